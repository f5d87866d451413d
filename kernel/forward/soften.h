// From scores to weights, one vector of rows at a time, with the block's sums for every statistic on the way.
#pragma once

#include <cmath>
#include <cstdint>

#include "forward/row_state.h"
#include "simd/exponential.h"
#include "simd/pairs.h"
#include "simd/product.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Vectors of weights that are added up in a row: many equal weights, as beside a sink, would all be rounded the same
// way.
constexpr int64_t tail_stretch = 32;

template <class T>
struct TailSums {
    using S = Simd<T>;
    typename S::Vec tail = S::zero(), tail2 = S::zero(), tail3 = S::zero(), moment = S::zero();

    // Takes the sums of a stretch in and sets them to 0.
    inline __attribute__((always_inline)) void add(TailSums& some) {
        tail = S::add(tail, some.tail);
        tail2 = S::add(tail2, some.tail2);
        tail3 = S::add(tail3, some.tail3);
        moment = S::add(moment, some.moment);
        some = TailSums();
    }
};

// The squares and cubes of weights so small that they are denormal in T, or 0: in float64.
template <class T, int W>
__attribute__((noinline)) void sum_tiny_powers(const T* weights, int64_t keys, int at, BlockSums<T, W>& block) {
    for (int i = 0; i < Simd<T>::lanes; ++i) {
        if (!(block.tail[at + i] > 0 && block.tail3[at + i] < tiny_cubes<T>)) continue;
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

// The largest logits so far, and the first key of each.
template <class T>
struct Tops {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    Vec logit = S::all(T(-INFINITY)), key = S::zero();

    template <bool statistics>
    inline __attribute__((always_inline)) void take(Vec x, Vec place) {
        if (statistics) key = S::choose(S::less(logit, x), place, key);
        logit = S::max(x, logit);
    }
};

// One vector of rows, the keys of one block: scores become weights, the block's sums are written at lane `at`.
// `paired`: the weights are written as pairs of keys, too.
template <class T, int W, bool statistics, bool partial, bool paired>
__attribute__((noinline)) bool soften(T* scores, int64_t keys, const uint64_t* words, int at, const T* tops,
                                      BlockSums<T, W>& block, [[maybe_unused]] T* pairs) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    const Vec hidden = S::all(T(-INFINITY)), one = S::all(T(1));
    const Vec old_top = S::load(tops + at);
    Tops<T> tops0, tops1;
    Vec place = S::zero(), total = S::zero(), total1 = S::zero(), count = S::zero();
    int64_t j = 0;
    if (partial) {
        for (; j < keys; ++j) {
            const auto sees = S::from_bits(words[j] >> at);
            const Vec x = S::choose(sees, S::load(scores + j * W), hidden);
            S::store(scores + j * W, x);
            tops0.template take<statistics>(x, place);
            if (statistics) {
                place = S::add(place, one);
                total = S::add(total, S::keep(sees, x));
                count = S::add(count, S::keep(sees, one));
            }
        }
    } else {
        for (; j + 2 <= keys; j += 2) {
            const Vec x = S::load(scores + j * W), y = S::load(scores + (j + 1) * W);
            tops0.template take<statistics>(x, place);
            tops1.template take<statistics>(y, place);
            if (statistics) {
                place = S::add(place, S::all(T(2)));
                total = S::add(total, x);
                total1 = S::add(total1, y);
            }
        }
        if (j < keys) {
            const Vec x = S::load(scores + j * W);
            tops0.template take<statistics>(x, place);
            if (statistics) total = S::add(total, x);
        }
        count = S::all(T(keys));
    }
    const Vec block_top = S::max(tops0.logit, tops1.logit);
    const Vec top = S::max(block_top, old_top);
    // Rows that have seen nothing yet: any finite base gives them weights of exactly 0.
    const Vec base = S::choose(S::equal(top, hidden), S::zero(), top);
    const Vec factor = exponential<T>(S::sub(old_top, base));
    const uint64_t grew = S::bits(S::less(old_top, top));
    // Deviations are taken from the block's own mean, inexact as it is: from afar their squares would drown.
    const Vec reference = statistics ? S::div(S::add(total, total1), S::max(count, one)) : S::zero();

    Vec sum0 = S::zero(), sum1 = S::zero(), deviation = S::zero(), deviation2 = S::zero();
    TailSums<T> all, some;
    auto step = [&](int64_t i, Vec& sum) __attribute__((always_inline)) -> Vec {
        const Vec x = S::load(scores + i * W);
        Vec t = S::sub(x, base);
        const Vec p = exponential<T>(t);
        if (!paired || statistics) S::store(scores + i * W, p);
        sum = S::add(sum, p);
        if (!statistics) return p;
        // The largest is left out as it goes: taken off the sums in the end, its 1 would have drowned the small ones.
        const Vec rest = S::keep(S::less(t, S::zero()), p), square = S::mul(rest, rest);
        Vec d = S::sub(x, reference);
        if (partial) {
            const auto sees = S::from_bits(words[i] >> at);
            t = S::keep(sees, t);
            d = S::keep(sees, d);
        }
        some.moment = S::fnma(p, t, some.moment);
        deviation = S::add(deviation, d);
        deviation2 = S::fma(d, d, deviation2);
        some.tail = S::add(some.tail, rest);
        some.tail2 = S::add(some.tail2, square);
        some.tail3 = S::fma(square, rest, some.tail3);
        return p;
    };
    const int64_t stretch = statistics ? tail_stretch : keys;
    for (int64_t from = 0; from < keys; from += stretch) {
        const int64_t to = from + stretch < keys ? from + stretch : keys;
        for (j = from; j + 2 <= to; j += 2) {
            const Vec first = step(j, sum0), second = step(j + 1, sum1);
            if constexpr (paired) PairSimd<T>::store_pairs(pairs + j / 2 * W, first, second);
        }
        if (j < to) {
            const Vec last = step(j, sum0);
            if constexpr (paired) PairSimd<T>::store_pairs(pairs + j / 2 * W, last, S::zero());
        }
        if (statistics) all.add(some);
    }
    const Vec sum = S::add(sum0, sum1);
    S::store(block.factor + at, factor);
    S::store(block.top + at, top);
    S::store(block.sum + at, sum);
    if (statistics) {
        // Those of every second key lie one further than was counted. Of equal ones the first is the maximum.
        const Vec later = S::add(tops1.key, one), sooner = tops0.key;
        const Vec larger = S::choose(S::less(tops0.logit, tops1.logit), later, sooner);
        const Vec first = S::choose(S::equal(tops0.logit, tops1.logit), S::min(sooner, later), larger);
        S::store(block.key + at, first);
        S::store(block.old_top + at, old_top);
        S::store(block.tail + at, all.tail);
        S::store(block.tail2 + at, all.tail2);
        S::store(block.tail3 + at, all.tail3);
        // Both sums are off by far less than a half.
        S::store(block.ones + at, S::round(S::sub(sum, all.tail)));
        S::store(block.moment + at, all.moment);
        S::store(block.count + at, count);
        S::store(block.reference + at, reference);
        S::store(block.deviation + at, deviation);
        S::store(block.deviation2 + at, deviation2);
        if (sizeof(T) < sizeof(double) && S::bits(S::less(all.tail3, S::all(tiny_cubes<T>))) != 0)
            sum_tiny_powers<T, W>(scores, keys, at, block);
    }
    return grew != 0;
}

// Scores of row i before soft cap and additive mask, `step` apart, of the keys [from, to) for which sees(key) holds:
// their own maximum and moments, only where the logits differ from them.
template <class T, int W, class Sees>
void describe_scores(const T* scores, int64_t step, int64_t from, int64_t to, int i, RowState<T, W>& state,
                     const Sees& sees) {
    double total = 0, count = 0, top = -INFINITY;
    for (int64_t j = from; j < to; ++j) {
        if (!sees(j)) continue;
        const double x = scores[j * step];
        total += x;
        count += 1;
        top = x > top ? x : top;
    }
    if (count == 0) return;
    const double reference = total / count;
    double deviation = 0, deviation2 = 0;
    for (int64_t j = from; j < to; ++j) {
        if (!sees(j)) continue;
        const double d = scores[j * step] - reference;
        deviation += d;
        deviation2 += d * d;
    }
    state.scores.add(i, count, reference, deviation, deviation2);
    state.score_top[i] = top > state.score_top[i] ? top : state.score_top[i];
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
