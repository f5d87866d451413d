// What the backward pass keeps of a tile and of a block of keys where products take two bfloat16 at a time.
//
//   keys'    [key][D]  += slopes [key][row pairs] x queries [row pairs][D]      two rows make a pair
//   queries' [D][row]  += keys [key pairs][D], turned x slopes [key pairs][row]  two keys make a pair
#pragma once

#include <cstddef>
#include <cstdint>

#include "backward_sums.h"
#include "block_view.h"
#include "level.h"
#include "pairs.h"
#include "product.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// A block of keys and values as operands; keys that are not finite are zeros.
template <class T>
struct PairedKeys {
    PairView keys, values;  // neighbours are features
    T* key_pairs;           // [keys / 2][D]: neighbours are keys
    Bfloat16 *key_copy, *value_copy;
    T *key_pad, *value_pad;

    static size_t numbers(const Problem& call) {
        return size_t(backward_block) * size_t(3 * call.d_k + 2 * call.d_v + 5) + 5 * 16;
    }

    void attach(const Problem& call, T* memory) {
        const auto take = [&memory](int64_t width) {
            T* at = memory;
            memory += (backward_block * width + 15) / 16 * 16;
            return at;
        };
        key_pairs = take(call.d_k);
        key_copy = reinterpret_cast<Bfloat16*>(take(call.d_k));
        key_pad = take(call.d_k + 1);
        value_copy = reinterpret_cast<Bfloat16*>(take(call.d_v));
        value_pad = take(call.d_v + 1);
    }

    // Returns the keys that are not finite, or whose values are not, one bit each.
    uint64_t load(const Problem& call, const Bfloat16* k_at, const Bfloat16* v_at, int64_t count) {
        ptrdiff_t k_row = call.k.s, k_step = call.k.d, v_row = call.v.s, v_step = call.v.d;
        uint64_t odd = 0;
        if (!is_finite_block(k_at, k_row, k_step, count, call.d_k) ||
            !is_finite_block(v_at, v_row, v_step, count, call.d_v)) {
            for (int64_t j = 0; j < count; ++j)
                if (!is_finite_block(k_at + j * k_row, 0, k_step, 1, call.d_k) ||
                    !is_finite_block(v_at + j * v_row, 0, v_step, 1, call.d_v))
                    odd |= 1ull << j;
            k_at = copy_finite(k_at, k_row, k_step, count, call.d_k, odd, key_copy);
            v_at = copy_finite(v_at, v_row, v_step, count, call.d_v, odd, value_copy);
            k_row = call.d_k;
            v_row = call.d_v;
            k_step = v_step = 1;
        }
        keys = view_pairs(k_at, k_row, k_step, count, call.d_k, key_pad);
        values = view_pairs(v_at, v_row, v_step, count, call.d_v, value_pad);
        interleave_rows(k_at, k_row, k_step, count, call.d_k, key_pairs);
        return odd;
    }

  private:
    static bool is_finite_block(const Bfloat16* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width) {
        bool infinite = false;
        for (int64_t i = 0; i < rows; ++i) {
            const Bfloat16* p = from + i * row;
            if (step == 1) {
                for (int64_t j = 0; j < width; ++j) infinite |= (p[j].bits & 0x7f80) == 0x7f80;
            } else {
                for (int64_t j = 0; j < width; ++j) infinite |= (p[j * step].bits & 0x7f80) == 0x7f80;
            }
        }
        return !infinite;
    }

    // 0 * NaN would poison the rows that do not see the key.
    static Bfloat16* copy_finite(const Bfloat16* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width,
                                 uint64_t odd, Bfloat16* to) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < width; ++j)
                to[i * width + j] = odd >> i & 1 ? Bfloat16{0} : from[i * row + j * step];
        return to;
    }
};

// Weights and slopes of a block as operands.
template <class T>
struct PairedSlopes {
    static constexpr int W = tile_rows<T>;
    uint16_t* weights;  // [key][W]: neighbours are rows
    uint16_t* slopes;   // [key][W], the scale multiplied in
    T* slope_pairs;     // [keys / 2][W]: neighbours are keys; without the scale

    static constexpr size_t numbers = size_t(backward_block) * W * 3 / 2;

    void attach(T* memory) {
        weights = reinterpret_cast<uint16_t*>(memory);
        slopes = weights + backward_block * W;
        slope_pairs = memory + backward_block * W;
    }

    void load(const T* from_weights, const T* from_slopes, int64_t keys, const T* scale) {
        using S = Simd<T>;
        using P = PairSimd<T>;
        for (int at = 0; at < W; at += 2 * S::lanes) {
            const auto scale0 = S::load(scale + at), scale1 = S::load(scale + at + S::lanes);
            for (int64_t j = 0; j < keys; j += 2) {
                const T *p = from_weights + j * W + at, *s = from_slopes + j * W + at;
                const auto a = S::load(s), b = S::load(s + S::lanes);
                auto c = S::zero(), d = S::zero();
                P::store_row(weights + j * W + at, S::load(p), S::load(p + S::lanes));
                P::store_row(slopes + j * W + at, S::mul(a, scale0), S::mul(b, scale1));
                if (j + 1 < keys) {
                    c = S::load(s + W);
                    d = S::load(s + W + S::lanes);
                    P::store_row(weights + (j + 1) * W + at, S::load(p + W), S::load(p + W + S::lanes));
                    P::store_row(slopes + (j + 1) * W + at, S::mul(c, scale0), S::mul(d, scale1));
                }
                P::store_pairs(slope_pairs + j / 2 * W + at, a, c);
                P::store_pairs(slope_pairs + j / 2 * W + at + S::lanes, b, d);
            }
        }
    }
};

// Weights and slopes of a block of keys [key][W], as they are computed and, where products take pairs, as operands.
template <class T>
struct SlopeBlock {
    T *weights, *slopes;
    PairedSlopes<T> pairs;
};

// Rows of a tile [W][width] of numbers that bfloat16 can hold, width a multiple of 32: their features in pairs, turned
// [width / 2][W], and the rows in pairs [W / 2][width].
template <class T>
void pair_rows(const T* from, int64_t width, int used, uint16_t* rows, T* turned, T* pairs) {
    using S = Simd<T>;
    using P = PairSimd<T>;
    constexpr int W = tile_rows<T>;
    for (int64_t at = 0; at < used * width; at += 2 * S::lanes)
        P::store_row(rows + at, S::load(from + at), S::load(from + at + S::lanes));
    for (int i = 0; i < used; i += 2)
        for (int64_t d = 0; d < width; d += 2 * S::lanes)
            P::interleave(rows + i * width + d, rows + (i + 1) * width + d, pairs + i / 2 * width + d);
    const T* as_pairs = reinterpret_cast<const T*>(rows);
    for (int64_t d = 0; d < width / 2; d += S::lanes)
        for (int c = 0; c < used; c += S::lanes) {
            typename S::Vec square[S::lanes];
            for (int i = 0; i < S::lanes; ++i) square[i] = S::load(as_pairs + (c + i) * (width / 2) + d);
            S::transpose(square);
            for (int t = 0; t < S::lanes; ++t) S::store(turned + (d + t) * W + c, square[t]);
        }
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
