// The weights themselves, where a caller wants to see them: scores taken again with the maximum and sum that the output
// has.
#pragma once

#include <cmath>
#include <cstdint>

#include "arena.h"
#include "few_rows.h"
#include "kernel.h"
#include "level.h"
#include "tile.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// One vector of rows: [key][W] to [row][key] at `to`, whose rows are `keys` apart.
template <class T, class In, int W>
void store_turned(const T* weights, int64_t count, int rows, In* to, int64_t keys) {
    using S = Simd<T>;
    int64_t j = 0;
    for (; j + S::lanes <= count; j += S::lanes) {
        typename S::Vec square[S::lanes];
        for (int t = 0; t < S::lanes; ++t) square[t] = S::load(weights + (j + t) * W);
        S::transpose(square);
        for (int i = 0; i < rows; ++i) {
            T row[S::lanes];
            S::store(row, square[i]);
            for (int t = 0; t < S::lanes; ++t) to[i * keys + j + t] = narrow(row[t], In());
        }
    }
    for (; j < count; ++j)
        for (int i = 0; i < rows; ++i) to[i * keys + j] = narrow(weights[j * W + i], In());
}

// After run(): the weights of the tile's rows over all keys.
template <class T, class In, bool statistics>
void write_weights(Tile<T, In, statistics>& tile, const Forward& call, const Scratch<T>& scratch, int64_t n, int64_t g,
                   int64_t first_row, int rows) {
    using S = Simd<T>;
    constexpr int W = tile_rows<T>;
    alignas(64) T top[W], inverse[W];
    for (int i = 0; i < W; ++i) {
        const bool sees = i < rows && tile.state.top[i] != T(-INFINITY);
        top[i] = sees ? tile.state.top[i] : T(0);
        double total = tile.state.sum[i];
        if (sees && call.sinks != nullptr)
            total += std::exp(call.sinks[g * call.shared + (first_row + i) / call.queries] - double(top[i]));
        inverse[i] = sees ? T(1.0 / total) : T(0);
    }
    const bool cap = call.softcap > 0, bias = has_bias(call);
    const auto size = S::all(T(call.softcap)), shrink = S::all(cap ? T(1.0 / call.softcap) : T(0));
    const int vectors = (rows + S::lanes - 1) / S::lanes;
    In* to =
        static_cast<In*>(call.weights) + (((n * call.groups + g) * call.shared) * call.queries + first_row) * call.keys;
    for (int64_t begin = 0; begin < call.keys; begin += key_block) {
        const int64_t count = smaller(key_block, call.keys - begin);
        T* scores = scratch.scores;
        const Sight sight = tile.sight.look(call.mask, begin, begin + count);
        if (sight == Sight::nothing) {
            for (int64_t i = 0; i < count * W; ++i) scores[i] = 0;
        } else {
            const In* at = static_cast<const In*>(call.k.data) + n * call.k.n + g * call.k.g + begin * call.k.s;
            typename Tile<T, In, statistics>::Span whole;
            for (int c = 0; c < panel; ++c) {
                whole.from[c] = c < vectors ? 0 : count;
                whole.to[c] = count;
            }
            tile.score(call, scratch, at, count, whole);
            for (int64_t j = 0; j < count; ++j)
                for (int c = 0; c < vectors; ++c) {
                    auto x = S::load(scores + j * W + c * S::lanes);
                    if (cap) x = S::mul(size, hyperbolic_tangent<T>(S::mul(x, shrink)));
                    if (bias) x = S::add(x, S::load(tile.sight.bias + j * W + c * S::lanes));
                    x = exponential<T>(S::sub(x, S::load(top + c * S::lanes)));
                    x = S::mul(x, S::load(inverse + c * S::lanes));
                    if (sight == Sight::something) x = S::keep(S::from_bits(tile.sight.words[j] >> (c * S::lanes)), x);
                    S::store(scores + j * W + c * S::lanes, x);
                }
        }
        for (int c = 0; c < vectors; ++c)
            store_turned<T, In, W>(scores + c * S::lanes, count, int(smaller(S::lanes, rows - c * S::lanes)),
                                   to + c * S::lanes * call.keys + begin, call.keys);
    }
}

// One row of the few-row loop. Returns false only when there is no memory for its scores.
template <class Loop, class In, class T>
bool write_few_weights(const Forward& call, int64_t n, int64_t g, int64_t row, T top, T inverse) {
    const size_t d_k = size_t(call.d_k);
    Arena arena(sizeof(T) * (d_k + few_block + few_block * d_k) + 4 * 64);
    T* query = arena.take<T>(d_k);
    T* scores = arena.take<T>(few_block);
    T* copy = arena.take<T>(few_block * d_k);
    if (!arena.ok()) return false;
    Loop::load_query(call, query, n, g, row);
    const RowBias bias(call, n, g, row / call.queries, row % call.queries);
    In* to = static_cast<In*>(call.weights) + ((n * call.groups + g) * call.shared * call.queries + row) * call.keys;
    for (int64_t begin = 0; begin < call.keys; begin += few_block) {
        const int64_t count = smaller(few_block, call.keys - begin);
        uint64_t sees[few_block / 64] = {};
        if (!Loop::look(call, n, g, row, begin, count, sees)) {
            for (int64_t j = 0; j < count; ++j) to[begin + j] = In();
            continue;
        }
        const In* at = static_cast<const In*>(call.k.data) + n * call.k.n + g * call.k.g + begin * call.k.s;
        const BlockView<T> keys = Loop::view(at, call.k.s, call.k.d, count, call.d_k, copy);
        Ahead<In> nothing;
        Loop::template multiply_keys<1>(keys, {query}, call.d_k, count, {scores}, nothing);
        using S = Simd<T>;
        if (call.softcap > 0)
            for (int64_t j = 0; j < count; j += S::lanes) {
                const auto x = S::mul(S::load(scores + j), S::all(T(1.0 / call.softcap)));
                S::store(scores + j, S::mul(S::all(T(call.softcap)), hyperbolic_tangent<T>(x)));
            }
        if (has_bias(call)) add_bias(bias, begin, count, sees, scores);
        for (int64_t j = 0; j < count; j += S::lanes) {
            const auto e = exponential<T>(S::sub(S::load(scores + j), S::all(top)));
            const auto visible = S::from_bits(sees[j / 64] >> (j % 64));
            S::store(scores + j, S::keep(visible, S::mul(e, S::all(inverse))));
        }
        for (int64_t j = 0; j < count; ++j) to[begin + j] = narrow(scores[j], In());
    }
    return true;
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
