// From scores to weights, and from the gradients of weights to those of scores, one vector of rows at a time.
#pragma once

#include <cstdint>

#include "exponential.h"
#include "level.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// One vector of rows, the keys of one block: scores become weights, gradients of weights become those of scores.
// Returns the rows that did not stay finite. `to_alibi`: the sums of gradients of logits times the distances from each
// row to its keys, of which `distances` is that to the first; where there are any.
template <class T, int W, bool partial, bool adjusted>
__attribute__((noinline)) uint64_t differentiate(T* scores, T* slopes, int64_t keys, const uint64_t* words, int at,
                                                 const T* bias, double softcap, const T* tops, const T* inverses,
                                                 const T* deltas, const T* distances, T* to_alibi) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    const Vec top = S::load(tops + at), inverse = S::load(inverses + at), delta = S::load(deltas + at);
    // As in the forward pass, to the bit.
    const Vec cap = S::all(T(softcap)), shrink = S::all(softcap > 0 ? T(1.0 / softcap) : T(0)), one = S::all(T(1));
    Vec check = S::zero(), sum = S::zero();
#pragma GCC unroll 2
    for (int64_t j = 0; j < keys; ++j) {
        Vec x = S::load(scores + j * W), slope = one;
        if (adjusted && softcap > 0) {
            const Vec squashed = hyperbolic_tangent<T>(S::mul(x, shrink));
            x = S::mul(cap, squashed);
            slope = S::fnma(squashed, squashed, one);
        }
        if (adjusted && bias != nullptr) x = S::add(x, S::load(bias + j * W));
        Vec p = S::mul(exponential<T>(S::sub(x, top)), inverse);
        Vec grad = S::mul(p, S::sub(S::load(slopes + j * W), delta));
        if (adjusted && distances != nullptr) {
            const Vec distance = S::add(S::load(distances), S::all(T(j)));
            sum = S::fma(partial ? S::keep(S::from_bits(words[j] >> at), grad) : grad, distance, sum);
        }
        if (adjusted) grad = S::mul(grad, slope);
        if (partial) {
            const auto sees = S::from_bits(words[j] >> at);
            p = S::keep(sees, p);
            grad = S::keep(sees, grad);
        }
        check = S::fma(grad, S::zero(), check);
        S::store(scores + j * W, p);
        S::store(slopes + j * W, grad);
    }
    if (adjusted && distances != nullptr) S::store(to_alibi, sum);
    constexpr uint64_t lanes = (1ull << S::lanes) - 1;
    return ~S::bits(S::equal(check, S::zero())) & lanes;
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
