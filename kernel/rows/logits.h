// From scores to logits: the soft cap, then what masks and positions (ALiBi) add. float64_row.h does it in float64.
#pragma once

#include <cmath>
#include <cstdint>

#include "rows/place.h"
#include "simd/exponential.h"
#include "simd/numbers.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Whether positions, or they or a mask, add to the scores; and whether the logits are other numbers than the scores.
inline bool has_position_bias(const Problem& call) { return call.alibi.data != nullptr; }
inline bool has_bias(const Problem& call) { return call.mask.kind > MaskKind::boolean || has_position_bias(call); }
inline bool is_adjusted(const Problem& call) { return call.softcap > 0 || has_bias(call); }

inline double read_mask(const Mask& mask, int64_t at) {
    switch (mask.kind) {
        case MaskKind::float16: return widen(static_cast<const Float16*>(mask.data)[at]);
        case MaskKind::bfloat16: return widen(static_cast<const Bfloat16*>(mask.data)[at]);
        case MaskKind::float32: return static_cast<const float*>(mask.data)[at];
        case MaskKind::float64: return static_cast<const double*>(mask.data)[at];
        case MaskKind::boolean: return static_cast<const uint8_t*>(mask.data)[at] ? 0.0 : -INFINITY;
        default: return 0.0;
    }
}

// What one row's keys are hidden by and what is added to their scores, in float64.
struct RowBias {
    const Mask& mask;
    int64_t at;
    double slope;
    int64_t position;  // of the row among the keys

    RowBias(const Problem& call, const RowPlace& place)
        : mask(call.mask),
          at(offset(mask, place)),
          slope(has_position_bias(call) ? number_of(call.alibi, place) : 0.0),
          position(place.l + call.offset) {}

    bool hides(int64_t key) const { return read_mask(mask, at + key * mask.s) == -INFINITY; }
    double of(int64_t key) const { return read_mask(mask, at + key * mask.s) + slope * distance(key); }
    double distance(int64_t key) const { return double(key - position); }
};

// What positions add to the scores of W rows; `is_there` is false where they add nothing.
template <int W>
struct PositionBias {
    bool is_there;
    double slope[W];
    int64_t position[W];  // of each row among the keys

    void stand(int i, const RowBias& row) {
        slope[i] = row.slope;
        position[i] = row.position;
    }

    // To biases [key][W] of the keys from `begin` on; `more`: added to those there.
    template <class T>
    void write(T* bias, int64_t begin, int64_t count, bool more) const {
        alignas(64) double first[W];
        for (int i = 0; i < W; ++i) first[i] = double(begin - position[i]);
        for (int64_t j = 0; j < count; ++j) {
            T* to = bias + j * W;
            for (int i = 0; i < W; ++i) to[i] = T(slope[i] * (first[i] + double(j))) + (more ? to[i] : T(0));
        }
    }
};

// The step itself, on vectors of scores.
template <class T>
struct LogitStep {
    using S = Simd<T>;
    using Vec = typename S::Vec;

    bool caps;
    Vec cap, shrink;
    const T* bias;  // null: none is added

    // `biases` is where the bias of the first score lies.
    LogitStep(const Problem& call, const T* biases)
        : caps(call.softcap > 0),
          cap(S::all(T(call.softcap))),
          shrink(S::all(caps ? T(1.0 / call.softcap) : T(0))),
          bias(has_bias(call) ? biases : nullptr) {}

    // `at`: how far the bias lies from the first. `cap_gradient`: the derivative of the soft cap.
    inline __attribute__((always_inline)) Vec apply(Vec x, int64_t at, Vec& cap_gradient) const {
        if (caps) {
            const Vec squashed = hyperbolic_tangent<T>(S::mul(x, shrink));
            x = S::mul(cap, squashed);
            cap_gradient = S::fnma(squashed, squashed, S::all(T(1)));
        }
        return bias == nullptr ? x : S::add(x, S::load(bias + at));
    }
    inline __attribute__((always_inline)) Vec apply(Vec x, int64_t at) const {
        Vec unused;
        return apply(x, at, unused);
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
