// One row in float64, key by key: for rows whose products overflow, and for rows that NaN or infinity really reach.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "block_view.h"
#include "kernel.h"
#include "level.h"
#include "row_state.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Returns false only when memory for the row's logits is not to be had.
template <class In>
bool attend_carefully(const Forward& call, int64_t n, int64_t g, int64_t row) {
    const int64_t r = row / call.queries, l = row % call.queries;
    const int64_t at = ((n * call.groups + g) * call.shared) * call.queries + row;
    const In* q = static_cast<const In*>(call.q.data) + n * call.q.n + g * call.q.g + r * call.q.r + l * call.q.l;
    const In* k = static_cast<const In*>(call.k.data) + n * call.k.n + g * call.k.g;
    const In* v = static_cast<const In*>(call.v.data) + n * call.v.n + g * call.v.g;
    const Scale& s = call.scale;
    const double scale = s.data[n * s.n + g * s.g + r * s.r + l * s.l];
    const int64_t mask_row = n * call.mask.n + g * call.mask.g + r * call.mask.r + l * call.mask.l;
    int64_t lo, hi;
    key_range(l, call.first, call.last, call.keys, &lo, &hi);
    const int64_t keys = hi - lo + 1;
    double* logits = static_cast<double*>(std::malloc(sizeof(double) * size_t(2 * keys + call.d_v + 1)));
    if (logits == nullptr) return false;
    double* scores = logits + keys;
    double* output = scores + keys;
    for (int64_t d = 0; d < call.d_v; ++d) output[d] = 0;

    RowState<double, 1> state;
    state.clear();
    double& count = state.logits.count[0];
    double top = -INFINITY, score_top = -INFINITY, total = 0, score_total = 0;
    bool poisoned = false;
    for (int64_t j = 0; j < keys; ++j) {
        const double bias = read_mask(call.mask, mask_row + (lo + j) * call.mask.s);
        if (bias == -INFINITY) continue;
        double product = 0;
        for (int64_t d = 0; d < call.d_k; ++d)
            product += double(widen(q[d * call.q.d])) * double(widen(k[(lo + j) * call.k.s + d * call.k.d]));
        const double score = scale * product;
        const double capped = call.softcap > 0 ? call.softcap * std::tanh(score / call.softcap) : score;
        logits[j] = capped + bias;
        scores[j] = score;
        poisoned = poisoned || logits[j] != logits[j];
        if (logits[j] > top || count == 0) {
            state.max_key[0] = lo + j;
            top = logits[j];
        }
        score_top = score > score_top ? score : score_top;
        count += 1;
        total += logits[j];
        score_total += score;
    }
    const double score_mean = score_total / count;
    double mean = total / count;
    if (poisoned) top = NAN;
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
        if (read_mask(call.mask, mask_row + (lo + j) * call.mask.s) == -INFINITY) continue;
        const double p = std::exp(logits[j] - top);
        sum += p;
        if (lo + j != state.max_key[0]) {
            state.tail[0] += p;
            state.tail2[0] += p * p;
            state.tail3[0] += p * p * p;
            if (p > 0 || p != p) state.moment[0] += p * (top - logits[j]);
        }
        state.logits.m2[0] += (logits[j] - mean) * (logits[j] - mean);
        state.scores.m2[0] += (scores[j] - score_mean) * (scores[j] - score_mean);
        for (int64_t d = 0; d < call.d_v; ++d) output[d] += p * double(widen(v[(lo + j) * call.v.s + d * call.v.d]));
    }
    if (!std::isfinite(top)) state.tail[0] = state.tail2[0] = state.tail3[0] = state.moment[0] = mean = NAN;
    const double* sink = call.sinks == nullptr ? nullptr : call.sinks + g * call.shared + r;
    const double inverse = count > 0 ? 1.0 / (sum + (sink == nullptr ? 0.0 : std::exp(*sink - top))) : 0.0;
    In* to = static_cast<In*>(call.output) + at * call.d_v;
    using Out = decltype(widen(In()));
    for (int64_t d = 0; d < call.d_v; ++d) to[d] = narrow(Out(output[d] * inverse), In());
    save_row(call.saved, at, top, sum);
    if (call.weights != nullptr) {
        In* weights = static_cast<In*>(call.weights) + at * call.keys;
        for (int64_t j = 0; j < call.keys; ++j) weights[j] = In();
        for (int64_t j = 0; j < keys; ++j)
            if (read_mask(call.mask, mask_row + (lo + j) * call.mask.s) != -INFINITY)
                weights[lo + j] = narrow(Out(std::exp(logits[j] - top) * inverse), In());
    }
    if (call.statistics.entropy != nullptr) {
        state.top[0] = top;
        state.logits.anchor[0] = mean;
        state.score_top[0] = score_top;
        const bool differ = call.softcap > 0 || call.mask.kind > MaskKind::boolean;
        write_statistics<double, 1>(call.statistics, at, state, 0, differ, sink);
        if (std::isinf(top)) call.statistics.logsumexp[at] = top;
    }
    std::free(logits);
    return true;
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
