// The float64 fallback of the backward pass: gradients of one row, key by key.
#pragma once

#include <cmath>
#include <cstdint>

#include "backward/logit_gradients.h"
#include "backward/sums.h"
#include "rows/float64_row.h"
#include "simd/numbers.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Writes the gradients of one row, and adds to those of the keys from `begin` on: those before have the row's part
// already. Returns false only when memory for the row's weights is not to be had.
template <class In, class T>
bool differentiate_in_float64(const Backward& call, const RowPlace& place, int64_t begin, const KeySums<T>& sums) {
    Float64Row<In> row(call, place, call.d_k, true);
    if (!row.ok()) return false;
    const int64_t count = row.count;
    const bool poisoned = row.poisoned;  // then so is every weight of the row
    const Query& outputs = call.grad_output;
    const In* grad = row_of<In>(outputs, place);
    double *weights = row.logits, *grad_weights = row.scores;  // these come in place of those

    double top = -INFINITY;
    for (int64_t i = 0; i < count && !poisoned; ++i) top = row.logits[i] > top ? row.logits[i] : top;
    double sum = 0, delta = 0, grad_scale = 0, grad_position = 0, sink_weight = 0;
    for (int64_t i = 0; i < count && !poisoned; ++i) {
        weights[i] = std::exp(row.logits[i] - top);
        sum += weights[i];
    }
    const double* sink = count == 0 ? nullptr : row.sink;
    if (sink != nullptr) sink_weight = 1.0 / (1.0 + sum * std::exp(top - *sink));
    const double total = sum + (sink == nullptr ? 0.0 : std::exp(*sink - top));
    for (int64_t i = 0; i < count && !poisoned; ++i) {
        const int64_t j = row.keys[i];
        weights[i] /= total;
        const double product = row.multiply(grad, outputs.d, row.value + j * call.v.s, call.v.d, call.d_v);
        grad_weights[i] = row.dropout.apply(product, j);
        delta += weights[i] * grad_weights[i];
    }
    for (int64_t d = 0; d < call.d_k; ++d) row.sums[d] = poisoned ? NAN : 0.0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t j = row.keys[i];
        T *to_key = sums.key + j * sums.key_row, *to_value = sums.value + j * sums.value_row;
        if (poisoned) {
            for (int64_t d = 0; d < call.d_k && j >= begin; ++d) to_key[d] = T(NAN);
            for (int64_t d = 0; d < call.d_v && j >= begin; ++d) to_value[d] += T(row.dropout.apply(NAN, j));
            continue;
        }
        const double kept = row.dropout.apply(weights[i], j);
        const double grad_logit = weights[i] * (grad_weights[i] - delta),
                     grad_score = grad_logit * row.cap_gradients[i];
        grad_position += grad_logit * row.bias.distance(j);
        grad_scale += grad_score * row.products[i];
        row.add(row.scale * grad_score, row.key + j * call.k.s, call.k.d, call.d_k);
        if (j < begin) continue;
        for (int64_t d = 0; d < call.d_k; ++d)
            to_key[d] = T(to_key[d] + row.scale * grad_score * double(widen(row.query[d * call.q.d])));
        for (int64_t d = 0; d < call.d_v; ++d) to_value[d] = T(to_value[d] + kept * double(widen(grad[d * outputs.d])));
    }
    const Gradients& to = call.gradients;
    row.write(call.d_k, static_cast<In*>(to.query) + row.number * call.d_k);
    if (to.scale != nullptr) to.scale[row.number] = poisoned ? NAN : grad_scale;
    write_position_gradient(call, row.number, poisoned ? NAN : grad_position);
    if (to.sinks != nullptr) to.sinks[row.number] = sink == nullptr ? 0.0 : poisoned ? NAN : -sink_weight * delta;
    return true;
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
