// The statistics of a row: names and order, and the formula of each from the sums over the row's keys.
#pragma once

#include <cmath>
#include <cstdint>

namespace sqrtdk {

// In the order in which callers hold them: integers, then numbers. Meanings: AttentionStatistics in statistics.py,
// whose names and order these are; a module with others is not imported.
#define SQRTDK_ROW_COUNTS(X) X(visible_keys) X(max_key)
#define SQRTDK_ROW_MEASURES(X) \
    X(max_logit)               \
    X(logsumexp)               \
    X(entropy)                 \
    X(tail_weight)             \
    X(tail_p2)                 \
    X(tail_p3) X(logit_mean) X(logit_variance) X(score_max) X(score_variance) X(sink_weight)

template <class Integer, class Number>
struct RowFields {
#define SQRTDK_FIELD(name) Integer name;
    SQRTDK_ROW_COUNTS(SQRTDK_FIELD)
#undef SQRTDK_FIELD
#define SQRTDK_FIELD(name) Number name;
    SQRTDK_ROW_MEASURES(SQRTDK_FIELD)
#undef SQRTDK_FIELD
};

// Arrays of a call, contiguous [N, G, R, L]; all null when none are wanted.
using Statistics = RowFields<int64_t*, double*>;

// The statistics of W rows; State is the RowState of a CPU level, and log_total is ln(1 + tail). `scores` says whether
// score_* differ from the logits'. The sink's weight is 0.
template <class State, int W>
__attribute__((always_inline)) inline void describe_rows(const State& state, const double (&log_total)[W], bool scores,
                                                         RowFields<int64_t[W], double[W]>& to) {
    for (int i = 0; i < W; ++i) {
        to.visible_keys[i] = int64_t(state.logits.count[i]);
        to.max_key[i] = state.logits.count[i] > 0 ? state.max_key[i] : -1;
    }
    for (int i = 0; i < W; ++i) {
        const double count = state.logits.count[i], total = 1.0 + state.tail[i], top = double(state.top[i]);
        const double share = 1.0 / total, per_key = 1.0 / count;
        const bool some = count > 0;
        to.max_logit[i] = top;
        to.logsumexp[i] = some && top - top == 0.0 ? top + log_total[i] : top;
        const double raw = some ? log_total[i] + state.moment[i] * share : 0.0;
        to.entropy[i] = raw < 0 ? 0.0 : raw;
        // Rounding must not push past what n keys allow: sum p <= 1 - 1/n. H <= ln n is left to the caller.
        const double most = some ? 1.0 - per_key : 0.0, tail = some ? state.tail[i] * share : 0.0;
        to.tail_weight[i] = tail > most ? most : tail;
        to.tail_p2[i] = some ? state.tail2[i] * share * share : 0.0;
        to.tail_p3[i] = some ? state.tail3[i] * share * share * share : 0.0;
        to.logit_mean[i] = some ? state.logits.mean(i) : NAN;
        to.logit_variance[i] = some ? state.logits.m2[i] * per_key : NAN;
        to.score_max[i] = scores && some ? state.score_top[i] : top;
        to.score_variance[i] = scores && some ? state.scores.m2[i] * per_key : to.logit_variance[i];
        to.sink_weight[i] = 0.0;
    }
}

}  // namespace sqrtdk
