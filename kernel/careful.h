// One row in float64, key by key: for rows whose products overflow, and for rows that NaN or infinity really reach.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "block_view.h"
#include "dropout.h"
#include "kernel.h"
#include "level.h"
#include "row_state.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// The largest of some numbers and the first place that has it; the first NaN if there is one, as in NumPy.
struct Largest {
    double value = -INFINITY;
    int64_t at = 0;

    void take(double x, int64_t place) {
        if (value != value || !(x > value || x != x)) return;
        value = x;
        at = place;
    }
};

// Mean and variance without a sum that could overflow. Measured from the largest, from which the distances of numbers
// that are single ulps apart are exact; numbers further apart than float64 reaches have no distance, but they have a
// mean.
inline void describe_numbers(const double* x, int64_t count, double largest, double* mean, double* variance) {
    *mean = *variance = NAN;
    if (count == 0 || !std::isfinite(largest)) return;
    const double n = double(count);
    double centre = 0, plain = 0, square = 0;
    for (int64_t j = 0; j < count; ++j) {
        centre += (x[j] - largest) / n;
        plain += x[j] / n;
    }
    const bool near = std::isfinite(centre);
    for (int64_t j = 0; j < count; ++j) {
        const double apart = near ? x[j] - largest - centre : x[j] - plain;
        square += apart * (apart / n);
    }
    *mean = near ? largest + centre : plain;
    *variance = square;
}

// Sums over the weights relative to the largest logit, which itself is left out.
inline void sum_tail(const double* logits, int64_t count, const Largest& top, RowState<double, 1>& state) {
    for (int64_t j = 0; j < count; ++j) {
        if (j == top.at) continue;
        const double p = std::exp(logits[j] - top.value);
        state.tail[0] += p;
        state.tail2[0] += p * p;
        state.tail3[0] += p * p * p;
        if (p > 0) state.moment[0] += p * (top.value - logits[j]);
    }
    if (!std::isfinite(top.value)) state.tail[0] = state.tail2[0] = state.tail3[0] = state.moment[0] = NAN;
}

// One row again, or its statistics alone if its output is sound. Returns false only when memory is not to be had.
template <class In>
bool attend_carefully(const Forward& call, int64_t n, int64_t g, int64_t row, bool is_output_sound) {
    const int64_t r = row / call.queries, l = row % call.queries;
    const int64_t at = ((n * call.groups + g) * call.shared) * call.queries + row;
    const In* q = static_cast<const In*>(call.q.data) + n * call.q.n + g * call.q.g + r * call.q.r + l * call.q.l;
    const In* k = static_cast<const In*>(call.k.data) + n * call.k.n + g * call.k.g;
    const In* v = static_cast<const In*>(call.v.data) + n * call.v.n + g * call.v.g;
    const Scale& s = call.scale;
    const double scale = s.data[n * s.n + g * s.g + r * s.r + l * s.l];
    const RowBias bias(call, n, g, r, l);
    int64_t lo, hi;
    key_range(l, call.first, call.last, call.keys, &lo, &hi);
    const int64_t most = larger(hi - lo + 1, 0);
    static_assert(sizeof(int64_t) == sizeof(double), "keys and numbers share one allocation");
    double* logits = static_cast<double*>(std::malloc(sizeof(double) * size_t(3 * most + call.d_v + 1)));
    if (logits == nullptr) return false;
    double* scores = logits + most;  // later the weights
    double* output = scores + most;
    int64_t* keys = reinterpret_cast<int64_t*>(output + call.d_v);

    int64_t count = 0;
    Largest top, score_top;
    for (int64_t j = lo; j <= hi; ++j) {
        if (bias.hides(j)) continue;
        double product = 0;
        for (int64_t d = 0; d < call.d_k; ++d)
            product += double(widen(q[d * call.q.d])) * double(widen(k[j * call.k.s + d * call.k.d]));
        const double score = scale * product;
        scores[count] = score;
        logits[count] = (call.softcap > 0 ? call.softcap * std::tanh(score / call.softcap) : score) + bias.of(j);
        keys[count] = j;
        top.take(logits[count], count);
        score_top.take(score, count);
        ++count;
    }
    const double* sink = call.sinks == nullptr ? nullptr : call.sinks + g * call.shared + r;
    if (call.statistics.entropy != nullptr) {
        RowState<double, 1> state;
        state.clear();
        state.logits.count[0] = double(count);
        state.max_key[0] = count > 0 ? keys[top.at] : -1;
        state.top[0] = top.value;
        state.score_top[0] = score_top.value;
        sum_tail(logits, count, top, state);
        write_statistics<double, 1>(call.statistics, at, state, 1, is_adjusted(call));
        write_sink_weight(call.statistics, at, sink);
        describe_numbers(logits, count, top.value, call.statistics.logit_mean + at,
                         call.statistics.logit_variance + at);
        double unused;
        describe_numbers(scores, count, score_top.value, &unused, call.statistics.score_variance + at);
    }
    if (!is_output_sound) {
        // A sink above the logits becomes the origin, and weights are divided before they are summed: neither they nor
        // values near the largest number leave the range of float64.
        const double origin = sink != nullptr && *sink > top.value ? *sink : top.value;
        double total = sink == nullptr ? 0.0 : std::exp(*sink - origin);
        if (!std::isfinite(top.value)) total = NAN;
        for (int64_t j = 0; j < count; ++j) total += scores[j] = std::exp(logits[j] - origin);
        for (int64_t d = 0; d < call.d_v; ++d) output[d] = 0;
        using Out = decltype(widen(In()));
        In* weights = call.weights == nullptr ? nullptr : static_cast<In*>(call.weights) + at * call.keys;
        for (int64_t j = 0; weights != nullptr && j < call.keys; ++j) weights[j] = In();
        const RowDropout dropout(call.dropout, at);
        for (int64_t j = 0; j < count; ++j) {
            const double weight = scores[j] / total, kept = dropout.apply(weight, keys[j]);
            for (int64_t d = 0; d < call.d_v; ++d)
                output[d] += kept * double(widen(v[keys[j] * call.v.s + d * call.v.d]));
            if (weights != nullptr) weights[keys[j]] = narrow(Out(weight), In());
        }
        // The logits of a tile are rounded otherwise: from this maximum it would make other weights.
        save_row(call.saved, at, top.value, NAN);
        In* to = static_cast<In*>(call.output) + at * call.d_v;
        for (int64_t d = 0; d < call.d_v; ++d) to[d] = narrow(Out(output[d]), In());
        if (sizeof(In) == 2 && call.exact != nullptr)
            for (int64_t d = 0; d < call.d_v; ++d) call.exact[at * call.d_v + d] = float(output[d]);
    }
    std::free(logits);
    return true;
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
