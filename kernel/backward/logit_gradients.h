// From scores to weights, and from weight gradients to logit gradients, one vector of rows at a time.
#pragma once

#include <cstdint>

#include "rows/logits.h"
#include "simd/exponential.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// What the weights and the logit gradients of a vector of rows are made from.
template <class T>
struct RowFactors {
    const T *top, *inverse, *delta;
    const T* distances;  // from each row to the first key, where position gradients are wanted; or null
};

// Gradients of what positions add to the logits: the sums of each row's logit gradients times its keys' distances.
inline bool wants_position_gradient(const Backward& call) { return call.gradients.alibi != nullptr; }
inline void write_position_gradient(const Backward& call, int64_t row, double sum) {
    if (wants_position_gradient(call)) call.gradients.alibi[row] = sum;
}

// One vector of rows, the keys of one block: scores become weights, gradients of weights become those of the logits,
// and behind a soft cap those of the scores. Returns the rows that did not stay finite. `sums`: where the
// position gradients go.
template <class T, int W, bool partial, bool adjusted>
__attribute__((noinline)) uint64_t differentiate(T* scores, T* gradients, int64_t keys, const uint64_t* words, int at,
                                                 const LogitStep<T>& logits, const RowFactors<T>& factors, T* sums) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    const Vec top = S::load(factors.top + at), inverse = S::load(factors.inverse + at);
    const Vec delta = S::load(factors.delta + at), one = S::all(T(1));
    const LogitStep<T> step = logits;  // a copy, which no store can change
    const T* const distances = factors.distances;
    Vec check = S::zero(), sum = S::zero();
#pragma GCC unroll 2
    for (int64_t j = 0; j < keys; ++j) {
        Vec x = S::load(scores + j * W), cap_gradient = one;
        if (adjusted) x = step.apply(x, j * W, cap_gradient);
        Vec p = S::mul(exponential<T>(S::sub(x, top)), inverse);
        Vec grad = S::mul(p, S::sub(S::load(gradients + j * W), delta));
        if (adjusted && distances != nullptr) {
            const Vec distance = S::add(S::load(distances), S::all(T(j)));
            sum = S::fma(partial ? S::keep(S::from_bits(words[j] >> at), grad) : grad, distance, sum);
        }
        if (adjusted) grad = S::mul(grad, cap_gradient);
        if (partial) {
            const auto sees = S::from_bits(words[j] >> at);
            p = S::keep(sees, p);
            grad = S::keep(sees, grad);
        }
        check = S::fma(grad, S::zero(), check);
        S::store(scores + j * W, p);
        S::store(gradients + j * W, grad);
    }
    if (adjusted && distances != nullptr) S::store(sums, sum);
    return ~Vectors<T>::sound(check) & Vectors<T>::every_lane;
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
