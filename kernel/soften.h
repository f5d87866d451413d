// From scores to weights, one vector of rows at a time, with the block's sums for every statistic on the way.
#pragma once

#include <cmath>
#include <cstdint>

#include "exponential.h"
#include "level.h"
#include "product.h"
#include "row_state.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Sums over the tail of one vector of rows without the weight 1 of their largest logits: taken again where "sum minus one"
// would cancel. Where even the powers underflow they are summed in float64.
template <class T, int W>
__attribute__((noinline)) void sum_sharp_tails(const T* weights, int64_t keys, int at, BlockSums<T, W>& block) {
    using S = Simd<T>;
    const auto one = S::all(T(1));
    auto tail = S::zero(), tail2 = S::zero(), tail3 = S::zero(), ones = S::zero();
    for (int64_t j = 0; j < keys; ++j) {
        const auto p = S::load(weights + j * W);
        const auto is_one = S::equal(p, one);
        const auto rest = S::choose(is_one, S::zero(), p), square = S::mul(rest, rest);
        tail = S::add(tail, rest);
        tail2 = S::add(tail2, square);
        tail3 = S::fma(square, rest, tail3);
        ones = S::add(ones, S::keep(is_one, one));
    }
    alignas(64) T exact[4][S::lanes];
    S::store(exact[0], tail);
    S::store(exact[1], tail2);
    S::store(exact[2], tail3);
    S::store(exact[3], ones);
    for (int i = 0; i < S::lanes; ++i) {
        if (!(block.tail[at + i] < T(0.5))) continue;
        // Weights that round to 1 beside the largest belong to the tail.
        const T extra = exact[3][i] > block.ones[at + i] ? exact[3][i] - block.ones[at + i] : T(0);
        block.tail[at + i] = exact[0][i] + extra;
        block.tail2[at + i] = exact[1][i] + extra;
        block.tail3[at + i] = exact[2][i] + extra;
        if (sizeof(T) == sizeof(double) || !(block.tail[at + i] < tiny_tail<T>)) continue;
        block.has_tiny = true;
        block.tail2[at + i] = block.tail3[at + i] = 0;
        for (int64_t j = 0; j < keys; ++j) {
            const double p = weights[j * W + i];
            if (p >= 0.5) continue;  // the largest, which is not in the tail
            block.tiny2[at + i] += p * p;
            block.tiny3[at + i] += p * p * p;
        }
    }
}

// Where in the block the new maxima are: the first key of each row that grew.
template <class T, int W>
__attribute__((noinline)) void find_tops(const T* scores, int64_t keys, uint64_t grew, typename Simd<T>::Vec top, T* key) {
    using S = Simd<T>;
    if (__builtin_popcountll(grew) > S::lanes / 4) {
        auto found = S::zero(), at = S::all(T(keys));
        for (int64_t j = keys - 1; j >= 0; --j) {
            at = S::sub(at, S::all(T(1)));
            found = S::choose(S::equal(S::load(scores + j * W), top), at, found);
        }
        S::store(key, found);
        return;
    }
    alignas(64) T tops[S::lanes];
    S::store(tops, top);
    for (; grew != 0; grew &= grew - 1) {
        const int i = __builtin_ctzll(grew);
        int64_t j = 0;
        while (scores[j * W + i] != tops[i]) ++j;
        key[i] = T(j);
    }
}

// One vector of rows, the keys of one block: scores become weights, the block's sums are written at lane `at`.
template <class T, int W, bool statistics, bool partial>
__attribute__((noinline)) bool soften(T* scores, int64_t keys, const uint64_t* words, int at, const T* tops,
                                      BlockSums<T, W>& block) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    const Vec hidden = S::all(T(-INFINITY)), one = S::all(T(1));
    const Vec old_top = S::load(tops + at);
    Vec top0 = hidden, top1 = hidden, total = S::zero(), total1 = S::zero(), count = S::zero();
    int64_t j = 0;
    if (partial) {
        for (; j < keys; ++j) {
            const auto sees = S::from_bits(words[j] >> at);
            const Vec x = S::choose(sees, S::load(scores + j * W), hidden);
            S::store(scores + j * W, x);
            top0 = S::max(x, top0);
            if (statistics) {
                total = S::add(total, S::keep(sees, x));
                count = S::add(count, S::keep(sees, one));
            }
        }
    } else {
        for (; j + 2 <= keys; j += 2) {
            const Vec x = S::load(scores + j * W), y = S::load(scores + (j + 1) * W);
            top0 = S::max(x, top0);
            top1 = S::max(y, top1);
            if (statistics) {
                total = S::add(total, x);
                total1 = S::add(total1, y);
            }
        }
        if (j < keys) {
            const Vec x = S::load(scores + j * W);
            top0 = S::max(x, top0);
            if (statistics) total = S::add(total, x);
        }
        count = S::all(T(keys));
    }
    const Vec block_top = S::max(top0, top1);
    const Vec top = S::max(block_top, old_top);
    // Rows that have seen nothing yet: any finite base gives them weights of exactly 0.
    const Vec base = S::choose(S::equal(top, hidden), S::zero(), top);
    const Vec factor = exponential<T>(S::sub(old_top, base));
    const uint64_t grew = S::bits(S::less(old_top, top));
    const auto reaches = S::equal(block_top, base);
    // Deviations are taken from the block's own mean, inexact as it is: from afar their squares would drown.
    const Vec reference = statistics ? S::div(S::add(total, total1), S::max(count, one)) : S::zero();
    if (statistics && grew != 0) find_tops<T, W>(scores, keys, grew, base, block.key + at);

    Vec sum0 = S::zero(), sum1 = S::zero(), square_sum = S::zero(), cube_sum = S::zero();
    Vec moment = S::zero(), deviation = S::zero(), deviation2 = S::zero();
    auto step = [&](int64_t i, Vec& sum) __attribute__((always_inline)) {
        const Vec x = S::load(scores + i * W);
        Vec t = S::sub(x, base);
        const Vec p = exponential<T>(t);
        S::store(scores + i * W, p);
        sum = S::add(sum, p);
        if (!statistics) return;
        Vec d = S::sub(x, reference);
        if (partial) {
            const auto sees = S::from_bits(words[i] >> at);
            t = S::keep(sees, t);
            d = S::keep(sees, d);
        }
        const Vec square = S::mul(p, p);
        moment = S::fnma(p, t, moment);
        deviation = S::add(deviation, d);
        deviation2 = S::fma(d, d, deviation2);
        square_sum = S::add(square_sum, square);
        cube_sum = S::fma(square, p, cube_sum);
    };
    for (j = 0; j + 2 <= keys; j += 2) {
        step(j, sum0);
        step(j + 1, sum1);
    }
    if (j < keys) step(j, sum0);
    const Vec sum = S::add(sum0, sum1);
    S::store(block.factor + at, factor);
    S::store(block.top + at, top);
    S::store(block.sum + at, sum);
    if (statistics) {
        const Vec ones = S::keep(reaches, one), tail = S::sub(sum, ones);
        S::store(block.old_top + at, old_top);
        S::store(block.tail + at, tail);
        S::store(block.tail2 + at, S::sub(square_sum, ones));
        S::store(block.tail3 + at, S::sub(cube_sum, ones));
        S::store(block.ones + at, ones);
        S::store(block.moment + at, moment);
        S::store(block.count + at, count);
        S::store(block.reference + at, reference);
        S::store(block.deviation + at, deviation);
        S::store(block.deviation2 + at, deviation2);
        if (S::bits(S::less(tail, S::all(T(0.5)))) != 0) sum_sharp_tails<T, W>(scores, keys, at, block);
    }
    return grew != 0;
}

// Scores before soft cap and additive mask: their own maximum and moments, only where the logits differ from them.
template <class T, int W>
void describe_scores(const T* scores, int64_t keys, const uint64_t* words, int at, RowState<T, W>& state) {
    for (int i = at; i < at + Simd<T>::lanes; ++i) {
        double total = 0, count = 0, top = -INFINITY;
        for (int64_t j = 0; j < keys; ++j) {
            if (words != nullptr && !(words[j] >> i & 1)) continue;
            const double x = scores[j * W + i - at];
            total += x;
            count += 1;
            top = x > top ? x : top;
        }
        if (count == 0) continue;
        const double reference = total / count;
        double deviation = 0, deviation2 = 0;
        for (int64_t j = 0; j < keys; ++j) {
            if (words != nullptr && !(words[j] >> i & 1)) continue;
            const double d = scores[j * W + i - at] - reference;
            deviation += d;
            deviation2 += d * d;
        }
        state.scores.add(i, count, reference, deviation, deviation2);
        state.score_top[i] = top > state.score_top[i] ? top : state.score_top[i];
    }
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
