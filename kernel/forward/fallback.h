// The float64 fallback of the forward pass: output and statistics of one row, key by key.
#pragma once

#include <cmath>
#include <cstdint>

#include "forward/row_state.h"
#include "rows/float64_row.h"
#include "simd/numbers.h"

namespace sqrtdk::SQRTDK_LEVEL {
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
bool attend_in_float64(const Forward& call, const RowPlace& place, bool is_output_sound) {
    Float64Row<In> row(call, place, call.d_v, false);
    if (!row.ok()) return false;
    const int64_t at = row.number, count = row.count;
    Largest top, score_top;
    for (int64_t i = 0; i < count; ++i) {
        top.take(row.logits[i], i);
        score_top.take(row.scores[i], i);
    }
    if (call.statistics.entropy != nullptr) {
        RowState<double, 1> state;
        state.clear();
        state.logits.count[0] = double(count);
        state.max_key[0] = count > 0 ? row.keys[top.at] : -1;
        state.top[0] = top.value;
        state.score_top[0] = score_top.value;
        sum_tail(row.logits, count, top, state);
        write_statistics<double, 1>(call.statistics, at, state, 1, is_adjusted(call));
        write_sink_weight(call.statistics, at, row.sink);
        describe_numbers(row.logits, count, top.value, call.statistics.logit_mean + at,
                         call.statistics.logit_variance + at);
        double unused;
        describe_numbers(row.scores, count, score_top.value, &unused, call.statistics.score_variance + at);
    }
    if (is_output_sound) return true;
    // A sink above the logits becomes the origin, and weights are divided before they are summed: neither they nor
    // values near the largest number leave the range of float64.
    const double origin = row.sink != nullptr && *row.sink > top.value ? *row.sink : top.value;
    double total = row.sink == nullptr ? 0.0 : std::exp(*row.sink - origin);
    if (!std::isfinite(top.value)) total = NAN;
    for (int64_t i = 0; i < count; ++i) total += row.logits[i] = std::exp(row.logits[i] - origin);
    clear(row.sums, call.d_v);
    In* weights = call.weights == nullptr ? nullptr : static_cast<In*>(call.weights) + at * call.keys;
    for (int64_t j = 0; weights != nullptr && j < call.keys; ++j) weights[j] = In();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t j = row.keys[i];
        const double weight = row.logits[i] / total;
        row.add(row.dropout.apply(weight, j), row.value + j * call.v.s, call.v.d, call.d_v);
        if (weights != nullptr) weights[j] = narrow(Working<In>(weight), In());
    }
    // The logits of a tile are rounded otherwise: from this maximum it would make other weights.
    save_row(call.saved, at, top.value, NAN);
    row.write(call.d_v, static_cast<In*>(call.output) + at * call.d_v);
    if (sizeof(In) == 2 && call.exact != nullptr) row.write(call.d_v, call.exact + at * call.d_v);
    return true;
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
