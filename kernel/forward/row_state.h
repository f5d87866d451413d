// State of some rows after some of their keys, and the step that takes in one more block of keys.
//
// Weights are relative to the running maximum `top`. The maximum's own term (exactly 1) is not in the tail sums, so
// that a tail of 1e-20 keeps its digits. Accumulators are float64; a block brings its sums in the working precision.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernel.h"
#include "simd/logarithm.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Sums over one block of keys, one entry per row; p = exp(logit - top) with the top that holds after the block.
template <class T, int W>
struct alignas(64) BlockSums {
    T factor[W];  // exp(old top - new top)
    T old_top[W], top[W];
    T sum[W];                       // p
    T tail[W], tail2[W], tail3[W];  // p, p^2, p^3 without the top
    T ones[W];                      // how many logits equal to the top are left out of the tail
    T key[W];                       // where the top is, counted from the block's first key, if the block raised it
    T moment[W];                    // p * (top - logit)
    T count[W], reference[W], deviation[W], deviation2[W];  // visible logits: how many, around what, sums
    // Powers of weights so small that they underflow T: summed in float64, for the rows that need it.
    bool has_tiny;
    double tiny2[W], tiny3[W];
};

// A sum of cubes below this is taken again in float64, the squares with it: some of them may be denormal floats.
template <class T>
constexpr T tiny_cubes = T(7.703719777548943e-34);

// Count, mean and sum of squared deviations of the numbers seen so far. The mean is kept as its distance from an
// anchor, a number of the first block: a row that differs by single ulps has a mean no floating-point number can hold.
template <int W>
struct alignas(64) Moments {
    double count[W], anchor[W], offset[W], m2[W];

    void clear() {
        for (int i = 0; i < W; ++i) count[i] = anchor[i] = offset[i] = m2[i] = 0;
    }
    double mean(int i) const { return anchor[i] + offset[i]; }

    // Takes in n numbers by their sums of deviations from a reference, which need not be their mean.
    __attribute__((always_inline)) void add(int i, double n, double reference, double deviation, double deviation2) {
        const double shift = n > 0 ? deviation / n : 0.0;
        const double square = deviation2 - deviation * shift;
        anchor[i] = count[i] > 0 ? anchor[i] : reference;
        merge(i, n, reference - anchor[i] + shift, square < 0 ? 0.0 : square);
    }

    // Two sets together (Chan, Golub, LeVeque 1979); the other's mean is given from this anchor.
    __attribute__((always_inline)) void merge(int i, double n, double other_offset, double other_m2) {
        const double total = count[i] + n;
        const double share = total > 0 ? n / total : 0.0;
        const double apart = n > 0 ? other_offset - offset[i] : 0.0;
        offset[i] += apart * share;
        m2[i] += other_m2 + apart * apart * count[i] * share;
        count[i] = total;
    }

    void merge(int i, const Moments& other) {
        if (other.count[i] == 0) return;
        anchor[i] = count[i] > 0 ? anchor[i] : other.anchor[i];
        merge(i, other.count[i], other.anchor[i] - anchor[i] + other.offset[i], other.m2[i]);
    }
};

template <class T, int W>
struct alignas(64) RowState {
    T top[W];
    double sum[W];
    double tail[W], tail2[W], tail3[W], moment[W];
    Moments<W> logits;
    int64_t max_key[W];
    double score_top[W];
    Moments<W> scores;  // before soft cap and additive mask, filled only where there is either

    void clear() {
        for (int i = 0; i < W; ++i) {
            top[i] = -INFINITY;
            sum[i] = tail[i] = tail2[i] = tail3[i] = moment[i] = 0;
            max_key[i] = -1;
            score_top[i] = -INFINITY;
        }
        logits.clear();
        scores.clear();
    }
};

template <class T, int W, bool statistics>
void absorb(RowState<T, W>& row, const BlockSums<T, W>& block, int64_t first_key) {
    for (int i = 0; i < W; ++i) row.sum[i] = row.sum[i] * double(block.factor[i]) + double(block.sum[i]);
    for (int i = 0; i < W; ++i) row.top[i] = block.top[i];
    if (!statistics) return;
    for (int i = 0; i < W; ++i) {
        const double f = block.factor[i];
        const double grew = block.top[i] > block.old_top[i] ? 1.0 : 0.0;
        const double had = row.logits.count[i] > 0 ? 1.0 : 0.0;
        // A maximum that is overtaken joins the tail; one key of the new ones is the new maximum.
        const double joins = grew * had, ties = double(block.ones[i]) - grew;
        const double moved = joins > 0 ? double(block.top[i]) - double(block.old_top[i]) : 0.0;
        row.moment[i] = f * (row.moment[i] + moved * (row.tail[i] + had)) + double(block.moment[i]);
        row.tail[i] = f * (row.tail[i] + joins) + double(block.tail[i]) + ties;
        row.tail2[i] = f * f * (row.tail2[i] + joins) + double(block.tail2[i]) + ties;
        row.tail3[i] = f * f * f * (row.tail3[i] + joins) + double(block.tail3[i]) + ties;
        row.max_key[i] = grew > 0 ? first_key + int64_t(block.key[i]) : row.max_key[i];
    }
    for (int i = 0; i < W; ++i)
        row.logits.add(i, block.count[i], block.reference[i], block.deviation[i], block.deviation2[i]);
    if (!block.has_tiny) return;
    for (int i = 0; i < W; ++i) {
        row.tail2[i] += block.tiny2[i];
        row.tail3[i] += block.tiny3[i];
    }
}

// True if everything that was added up is finite.
template <class T, int W>
bool is_described(const RowState<T, W>& row, int i) {
    return std::isfinite(row.logits.offset[i] + row.logits.m2[i] + row.moment[i] + row.scores.m2[i]);
}

// The whole state of other keys of the same rows, taken in by the same rule: they are one more block.
template <class T, int W>
void merge_states(RowState<T, W>& row, const RowState<T, W>& other, int rows, double (&keep)[W], double (&take)[W]) {
    for (int i = 0; i < rows; ++i) {
        const double mine = row.top[i], theirs = other.top[i];
        const bool grew = theirs > mine;
        const double top = grew ? theirs : mine;
        keep[i] = mine == top ? 1.0 : std::exp(mine - top);
        take[i] = theirs == top ? 1.0 : std::exp(theirs - top);
        if (top == -INFINITY) keep[i] = take[i] = 0.0;
        const double mine_had = row.logits.count[i] > 0 ? 1.0 : 0.0, theirs_had = other.logits.count[i] > 0 ? 1.0 : 0.0;
        const double mine_joins = grew ? mine_had : 0.0, theirs_joins = grew ? 0.0 : theirs_had;
        const double k = keep[i], t = take[i];
        const double mine_moved = k > 0 && mine_joins > 0 ? top - mine : 0.0;
        const double theirs_moved = t > 0 && theirs_joins > 0 ? top - theirs : 0.0;
        row.moment[i] = k * (row.moment[i] + mine_moved * (row.tail[i] + mine_had)) +
                        t * (other.moment[i] + theirs_moved * (other.tail[i] + theirs_had));
        row.sum[i] = k * row.sum[i] + t * other.sum[i];
        row.tail[i] = k * (row.tail[i] + mine_joins) + t * (other.tail[i] + theirs_joins);
        row.tail2[i] = k * k * (row.tail2[i] + mine_joins) + t * t * (other.tail2[i] + theirs_joins);
        row.tail3[i] = k * k * k * (row.tail3[i] + mine_joins) + t * t * t * (other.tail3[i] + theirs_joins);
        row.max_key[i] = grew ? other.max_key[i] : row.max_key[i];
        row.logits.merge(i, other.logits);
        row.scores.merge(i, other.scores);
        row.score_top[i] = other.score_top[i] > row.score_top[i] ? other.score_top[i] : row.score_top[i];
        row.top[i] = T(top);
    }
}

// What the backward pass starts from.
inline void save_row(const Saved& to, int64_t at, double top, double sum) {
    if (to.max == nullptr) return;
    to.max[at] = top;
    to.sum[at] = sum;
}

// 1/(sum + the sink's weight), by which the output is multiplied; 0 for a row that sees nothing. False if a sink makes
// it so small that it has lost digits, unless the output is too small for any number anyway.
template <class T, int W>
bool invert_sum(const RowState<T, W>& row, int i, bool sees, const double* sink, T* inverse) {
    constexpr double smallest = sizeof(T) == sizeof(float) ? 0x1p-126 : 0x1p-1022;
    // exp of it times any number of values of any size is less than the smallest number.
    constexpr double out_of_reach = sizeof(T) == sizeof(float) ? -240 : -1500;
    const double top = row.top[i];
    const double total = row.sum[i] + (sink != nullptr && sees ? std::exp(*sink - top) : 0.0);
    *inverse = sees ? T(1.0 / total) : T(0);
    return !(sees && 1.0 / total < smallest && top - *sink > out_of_reach);
}

// Writes the statistics of the first `rows` rows, beginning at one place; `scores` says whether score_* differ from the
// logits'. The sink's weight is 0 until write_sink_weight() is called.
template <class T, int W>
__attribute__((noinline)) void write_statistics(const Statistics& to, int64_t at, const RowState<T, W>& state, int rows,
                                                bool scores) {
    // Computed here and copied: the compiler cannot know that the arrays outside do not overlap.
    alignas(64) double log_total[W];
    alignas(64) RowFields<int64_t[W], double[W]> row;
    for (int i = 0; i < W; ++i) log_total[i] = log1p_inline(state.tail[i]);
    describe_rows(state, log_total, scores, row);
    // Only nearly uniform rows come close to ln n, which is the library's, as callers compute it.
    for (int i = 0; i < rows; ++i) {
        const double count = state.logits.count[i];
        if (1.0 + state.tail[i] > 0.99 * count && count > 0 && row.entropy[i] > std::log(count))
            row.entropy[i] = std::log(count);
    }
#define SQRTDK_FIELD(name) __builtin_memcpy(to.name + at, row.name, size_t(rows) * sizeof(row.name[0]));
    SQRTDK_ROW_COUNTS(SQRTDK_FIELD)
    SQRTDK_ROW_MEASURES(SQRTDK_FIELD)
#undef SQRTDK_FIELD
}

// After write_statistics(): the share of the sink beside the row's visible keys.
inline void write_sink_weight(const Statistics& to, int64_t at, const double* sink) {
    if (sink != nullptr) to.sink_weight[at] = 1.0 / (1.0 + std::exp(to.logsumexp[at] - *sink));
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
