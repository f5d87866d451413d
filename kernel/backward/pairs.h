// Copies that the backward pass keeps of a tile and of a block of keys where products take two bfloat16 at a time.
//
//   keys'    [key][D]  += gradients [key][row pairs] x queries [row pairs][D]      two rows make a pair
//   queries' [D][row]  += keys [key pairs][D], turned x gradients [key pairs][row]  two keys make a pair
#pragma once

#include <cstddef>
#include <cstdint>

#include "backward/sums.h"
#include "rows/arena.h"
#include "simd/numbers.h"
#include "simd/pairs.h"
#include "simd/product.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// A block of keys and values as operands; keys that are not finite are zeros.
template <class T>
struct PairedKeys {
    PairView keys, values;  // neighbours are features
    T* key_pairs;           // [keys / 2][D]: neighbours are keys
    Bfloat16 *key_copy, *value_copy;
    T *key_pad, *value_pad;  // copies of an even width

    void lay_out(Arena& memory, const Problem& call) {
        memory.take(key_pairs, backward_block, call.d_k);
        memory.take(key_copy, backward_block, call.d_k);
        memory.take(key_pad, backward_block, call.d_k + 1);
        memory.take(value_copy, backward_block, call.d_v);
        memory.take(value_pad, backward_block, call.d_v + 1);
    }

    void load(const BlockView<Bfloat16>& k, const BlockView<Bfloat16>& v, int64_t count, int64_t d_k, int64_t d_v) {
        keys = view_pairs(k.data, k.row, k.step, count, d_k, key_pad);
        values = view_pairs(v.data, v.row, v.step, count, d_v, value_pad);
        interleave_rows(k.data, k.row, k.step, count, d_k, key_pairs);
    }
};

// Weights and logit gradients of a block as operands.
template <class T>
struct PairedGradients {
    static constexpr int W = tile_rows<T>;
    uint16_t* weights;    // [key][W]: neighbours are rows
    uint16_t* gradients;  // [key][W], the scale multiplied in
    T* gradient_pairs;    // [keys / 2][W]: neighbours are keys; without the scale

    void lay_out(Arena& memory) {
        memory.take(weights, backward_block, W);
        memory.take(gradients, backward_block, W);
        memory.take(gradient_pairs, backward_block / 2, W);
    }

    void load(const T* from_weights, const T* from_gradients, int64_t keys, const T* scale) {
        using S = Simd<T>;
        using P = PairSimd<T>;
        for (int at = 0; at < W; at += 2 * S::lanes) {
            const auto scale0 = S::load(scale + at), scale1 = S::load(scale + at + S::lanes);
            for (int64_t j = 0; j < keys; j += 2) {
                const T *p = from_weights + j * W + at, *s = from_gradients + j * W + at;
                const auto a = S::load(s), b = S::load(s + S::lanes);
                auto c = S::zero(), d = S::zero();
                P::store_row(weights + j * W + at, S::load(p), S::load(p + S::lanes));
                P::store_row(gradients + j * W + at, S::mul(a, scale0), S::mul(b, scale1));
                if (j + 1 < keys) {
                    c = S::load(s + W);
                    d = S::load(s + W + S::lanes);
                    P::store_row(weights + (j + 1) * W + at, S::load(p + W), S::load(p + W + S::lanes));
                    P::store_row(gradients + (j + 1) * W + at, S::mul(c, scale0), S::mul(d, scale1));
                }
                P::store_pairs(gradient_pairs + j / 2 * W + at, a, c);
                P::store_pairs(gradient_pairs + j / 2 * W + at + S::lanes, b, d);
            }
        }
    }
};

// Weights and logit gradients of a block of keys [key][W], as they are computed and, where products take pairs, as
// operands.
template <class T>
struct GradientBlock {
    T *weights, *gradients;
    PairedGradients<T> pairs;

    void lay_out(Arena& memory, bool paired) {
        memory.take(weights, backward_block, tile_rows<T>);
        memory.take(gradients, backward_block, tile_rows<T>);
        if (paired) pairs.lay_out(memory);
    }
};

// [W][width] to [width][W], the rows in use.
template <class T>
void turn_rows(const T* from, int64_t width, int used, T* to) {
    using S = Simd<T>;
    for (int64_t d = 0; d < width; d += S::lanes)
        for (int c = 0; c < used; c += S::lanes)
            Vectors<T>::turn([&](int i) { return S::load(from + (c + i) * width + d); },
                             [&](int t, typename S::Vec x) { S::store(to + (d + t) * tile_rows<T> + c, x); });
}

// Rows of a tile [W][width] of numbers that bfloat16 can hold, width a multiple of 32: their features in pairs, turned
// [width / 2][W], and the rows in pairs [W / 2][width].
template <class T>
void pair_rows(const T* from, int64_t width, int used, uint16_t* rows, T* turned, T* pairs) {
    using S = Simd<T>;
    using P = PairSimd<T>;
    for (int64_t at = 0; at < used * width; at += 2 * S::lanes)
        P::store_row(rows + at, S::load(from + at), S::load(from + at + S::lanes));
    for (int i = 0; i < used; i += 2)
        for (int64_t d = 0; d < width; d += 2 * S::lanes)
            P::interleave(rows + i * width + d, rows + (i + 1) * width + d, pairs + i / 2 * width + d);
    turn_rows(reinterpret_cast<const T*>(rows), width / 2, used, turned);
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
