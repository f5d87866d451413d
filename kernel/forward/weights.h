// The weights themselves, where a caller wants to see them: scores taken again with the maximum and sum that the output
// has.
#pragma once

#include <cmath>
#include <cstdint>

#include "forward/few_rows.h"
#include "forward/tile.h"
#include "rows/arena.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// After run(): the weights of the tile's rows over all keys.
template <class T, class In, bool statistics>
void write_weights(Tile<T, In, statistics>& tile, const Forward& call, const Scratch<T>& scratch) {
    using S = Simd<T>;
    constexpr int W = tile_rows<T>;
    TileRows<T>& rows = tile.rows;
    alignas(64) T top[W], inverse[W];
    RowPlace at = rows.place(call);
    for (int i = 0; i < W; ++i, at.step(call, i < rows.count)) {
        const bool sees = i < rows.count && tile.state.top[i] != T(-INFINITY);
        const double* sink = sink_of(call, at);
        top[i] = sees ? tile.state.top[i] : T(0);
        double total = tile.state.sum[i];
        if (sees && sink != nullptr) total += std::exp(*sink - double(top[i]));
        inverse[i] = sees ? T(1.0 / total) : T(0);
    }
    const LogitStep<T> step(call, rows.sight.bias);
    In* to = static_cast<In*>(call.weights) + rows.number(call) * call.keys;
    for (int64_t begin = 0; begin < call.keys; begin += key_block) {
        const int64_t count = smaller(key_block, call.keys - begin);
        T* scores = scratch.scores;
        const Sight sight = rows.sight.look(call.mask, begin, begin + count);
        if (sight == Sight::nothing) {
            clear(scores, count * W);
        } else {
            tile.score(call, scratch, begin, count, rows.whole(count));
            for (int64_t j = 0; j < count; ++j)
                for (int c = 0; c < rows.count; c += S::lanes) {
                    auto x = step.apply(S::load(scores + j * W + c), j * W + c);
                    x = exponential<T>(S::sub(x, S::load(top + c)));
                    x = S::mul(x, S::load(inverse + c));
                    if (sight == Sight::something) x = S::keep(S::from_bits(rows.sight.words[j] >> c), x);
                    S::store(scores + j * W + c, x);
                }
        }
        // [key][W] to [row][key]
        for (int c = 0; c < rows.count; c += S::lanes)
            for (int64_t j = 0; j < count; j += S::lanes)
                Vectors<T>::turn([&](int t) { return j + t < count ? S::load(scores + (j + t) * W + c) : S::zero(); },
                                 [&](int i, typename S::Vec x) {
                                     if (c + i < rows.count)
                                         Vectors<T>::store(to + (c + i) * call.keys + begin + j, x, count - j);
                                 });
    }
}

// One row of the few-row loop. Returns false only when there is no memory for its scores.
template <class Loop, class In, class T>
bool write_few_weights(const Forward& call, const RowPlace& place, T top, T inverse) {
    using S = Simd<T>;
    using Products = FewProducts<T, In>;
    T *query, *scores, *copy;
    const Arena arena([&](Arena& memory) {
        memory.take(query, call.d_k);
        memory.take(scores, few_block);
        memory.take(copy, few_block, call.d_k);
    });
    if (!arena.ok()) return false;
    Loop::load_query(call, query, place);
    In* to = static_cast<In*>(call.weights) + place.number(call) * call.keys;
    for (int64_t begin = 0; begin < call.keys; begin += few_block) {
        const int64_t count = smaller(few_block, call.keys - begin);
        uint64_t sees[few_block / 64] = {};
        if (!Loop::look(call, place, begin, count, sees)) {
            for (int64_t j = 0; j < count; ++j) to[begin + j] = In();
            continue;
        }
        const BlockView<T> keys = Products::view(key_of<In>(call, call.k, place.head(call), begin), call.k.s, call.k.d,
                                                 count, call.d_k, copy);
        Ahead<In> nothing;
        Products::template multiply_keys<1>(keys, {query}, call.d_k, count, {scores}, nothing);
        Loop::adjust(call, place, begin, count, sees, scores);
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
}  // namespace sqrtdk::SQRTDK_LEVEL
