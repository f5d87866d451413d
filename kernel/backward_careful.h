// The gradients of one row in float64, key by key: for rows whose sums overflow, and for rows that NaN or infinity
// really reach.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "backward_sums.h"
#include "block_view.h"
#include "dropout.h"
#include "kernel.h"
#include "level.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Writes the gradients of one row, and adds to those of the keys from `begin` on: those before have the row's part
// already. Returns false only when memory for the row's weights is not to be had.
template <class In, class T>
bool differentiate_carefully(const Backward& call, int64_t n, int64_t g, int64_t row, int64_t begin,
                             const KeySums<T>& sums) {
    const int64_t r = row / call.queries, l = row % call.queries;
    const int64_t at = ((n * call.groups + g) * call.shared) * call.queries + row;
    const Query &qs = call.q, &os = call.grad_output;
    const In* q = static_cast<const In*>(qs.data) + n * qs.n + g * qs.g + r * qs.r + l * qs.l;
    const In* grad = static_cast<const In*>(os.data) + n * os.n + g * os.g + r * os.r + l * os.l;
    const In* k = static_cast<const In*>(call.k.data) + n * call.k.n + g * call.k.g;
    const In* v = static_cast<const In*>(call.v.data) + n * call.v.n + g * call.v.g;
    const double scale = call.scale.data[n * call.scale.n + g * call.scale.g + r * call.scale.r + l * call.scale.l];
    const RowBias bias(call, n, g, r, l);
    int64_t lo, hi;
    key_range(l, call.first, call.last, call.keys, &lo, &hi);
    const int64_t most = larger(hi - lo + 1, 0);
    // Of the visible keys: which, their products q.k, weights, slopes of the cap, and gradients of the weights.
    const size_t bytes = size_t(most) * (sizeof(int64_t) + 4 * sizeof(double)) + size_t(call.d_k + 1) * sizeof(double);
    double* products = static_cast<double*>(std::malloc(bytes));
    if (products == nullptr) return false;
    double *weights = products + most, *slopes = weights + most, *grad_weights = slopes + most;
    double* grad_query = grad_weights + most;
    int64_t* keys = reinterpret_cast<int64_t*>(grad_query + call.d_k + 1);

    int64_t count = 0;
    double top = -INFINITY;
    bool poisoned = false;
    for (int64_t j = lo; j <= hi; ++j) {
        if (bias.hides(j)) continue;
        keys[count] = j;
        // A logit that is NaN makes every weight of the row NaN: nothing else needs to be known.
        if (!poisoned) {
            double product = 0;
            for (int64_t d = 0; d < call.d_k; ++d)
                product += double(widen(q[d * qs.d])) * double(widen(k[j * call.k.s + d * call.k.d]));
            const double score = scale * product;
            const double squashed = call.softcap > 0 ? std::tanh(score / call.softcap) : 0.0;
            products[count] = product;
            slopes[count] = 1.0 - squashed * squashed;
            weights[count] = (call.softcap > 0 ? call.softcap * squashed : score) + bias.of(j);
            poisoned = weights[count] != weights[count];
            top = weights[count] > top ? weights[count] : top;
        }
        ++count;
    }
    const RowDropout dropout(call.dropout, at);
    double sum = 0, delta = 0, grad_scale = 0, grad_alibi = 0, sink_weight = 0;
    for (int64_t i = 0; i < count && !poisoned; ++i) {
        weights[i] = std::exp(weights[i] - top);
        sum += weights[i];
    }
    const double* sink = call.sinks == nullptr || count == 0 ? nullptr : call.sinks + g * call.shared + r;
    if (sink != nullptr) sink_weight = 1.0 / (1.0 + sum * std::exp(top - *sink));
    const double total = sum + (sink == nullptr ? 0.0 : std::exp(*sink - top));
    for (int64_t i = 0; i < count && !poisoned; ++i) {
        weights[i] /= total;
        grad_weights[i] = 0;
        for (int64_t d = 0; d < call.d_v; ++d)
            grad_weights[i] += double(widen(grad[d * os.d])) * double(widen(v[keys[i] * call.v.s + d * call.v.d]));
        grad_weights[i] = dropout.apply(grad_weights[i], keys[i]);
        delta += weights[i] * grad_weights[i];
    }
    for (int64_t d = 0; d < call.d_k; ++d) grad_query[d] = poisoned ? NAN : 0.0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t j = keys[i];
        T *to_key = sums.key + j * sums.key_row, *to_value = sums.value + j * sums.value_row;
        if (poisoned) {
            for (int64_t d = 0; d < call.d_k && j >= begin; ++d) to_key[d] = T(NAN);
            for (int64_t d = 0; d < call.d_v && j >= begin; ++d) to_value[d] += T(dropout.apply(NAN, j));
            continue;
        }
        const double kept = dropout.apply(weights[i], j);
        const double grad_logit = weights[i] * (grad_weights[i] - delta), grad_score = grad_logit * slopes[i];
        grad_alibi += grad_logit * bias.distance(j);
        grad_scale += grad_score * products[i];
        for (int64_t d = 0; d < call.d_k; ++d)
            grad_query[d] += scale * grad_score * double(widen(k[j * call.k.s + d * call.k.d]));
        if (j < begin) continue;
        for (int64_t d = 0; d < call.d_k; ++d)
            to_key[d] = T(to_key[d] + scale * grad_score * double(widen(q[d * qs.d])));
        for (int64_t d = 0; d < call.d_v; ++d) to_value[d] = T(to_value[d] + kept * double(widen(grad[d * os.d])));
    }
    using Out = decltype(widen(In()));
    In* to = static_cast<In*>(call.gradients.query) + at * call.d_k;
    for (int64_t d = 0; d < call.d_k; ++d) to[d] = narrow(Out(grad_query[d]), In());
    if (call.gradients.scale != nullptr) call.gradients.scale[at] = poisoned ? NAN : grad_scale;
    if (call.gradients.alibi != nullptr) call.gradients.alibi[at] = poisoned ? NAN : grad_alibi;
    if (call.gradients.sinks != nullptr)
        call.gradients.sinks[at] = sink == nullptr ? 0.0 : poisoned ? NAN : -sink_weight * delta;
    std::free(products);
    return true;
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
