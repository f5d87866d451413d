// exp and tanh on vectors, in natural units.
//
// exponential(t): relative error below 1.5e-7 (float) and 4e-16 (double) for t <= 0; exactly 1 at 0; 0 below the
// smallest normal number (2^-126, 2^-1022), so no denormals appear; NaN for NaN.
#pragma once

#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T>
struct ExpConstants;

// 2^f = 1 + f*P(f) on [-1/2, 1/2], P minimax in relative error with the value at 0 fixed: 2.6e-9 and 1.8e-17.
template <>
struct ExpConstants<float> {
    static constexpr float log2e = 1.44269502162933349609375f, log2e_low = 1.92596299e-8f;
    static constexpr float ln2 = 0.693359375f, ln2_low = -2.12194440e-4f;
    static constexpr float lowest = -87.3365402f;
    static constexpr int degree = 6;
    static constexpr float p[6] = {0.69314721496788496344f, 0.24022652782876176793f,   0.055503105512069805781f,
                                   0.0096176929761431872f,  0.0013406643847480060174f, 0.00015594677015105410559f};
    // 2^(f/16) = 1 + f*Q(f) on [-1/2, 1/2], in the same way: 1.6e-9.
    static constexpr float sixteenths = 23.083120346069336f, sixteenths_low = 3.0815408e-7f;
    static constexpr float q[3] = {0.043321698752078722f, 0.00093841518842642924f, 0.000013551257351286613f};
    static constexpr float shift = 12582912;  // 1.5 * 2^23: what is added to it is rounded to an integer
};
template <>
struct ExpConstants<double> {
    static constexpr double log2e = 1.4426950408889634074, log2e_low = 2.0355273740931033e-17;
    static constexpr double ln2 = 0x1.62e42fee00000p-1, ln2_low = 0x1.a39ef35793c76p-33;
    static constexpr double lowest = -708.39641853226410622;
    static constexpr int degree = 11;
    static constexpr double p[11] = {0.69314718055994569675,    0.24022650695910098006,   0.055504108664790394528,
                                     0.0096181291076070026171,  0.001333355815343996974,  0.00015403530441571850099,
                                     0.00001525272738518977478, 1.3215442675452855182e-6, 1.0180647660573069343e-7,
                                     7.0725703945407994337e-9,  4.0780717860928704165e-10};
};

template <class T>
inline __attribute__((always_inline)) typename Simd<T>::Vec exponential(typename Simd<T>::Vec t) {
    using S = Simd<T>;
    using C = ExpConstants<T>;
    if constexpr (S::has_sixteenths) {
        const auto z = S::fma(t, S::all(C::sixteenths), S::all(C::shift));
        auto f = S::fms(t, S::all(C::sixteenths), S::sub(z, S::all(C::shift)));
        f = S::fma(t, S::all(C::sixteenths_low), f);
        auto y = S::fma(S::all(C::q[2]), f, S::all(C::q[1]));
        y = S::mul(S::fma(y, f, S::all(C::q[0])), f);
        // The power of two is in the table's number, so that a NaN stays one.
        const auto power = S::sixteenths(z);
        return S::keep(S::not_less(t, S::all(C::lowest)), S::fma(power, y, power));
    }
    const auto log2e = S::all(C::log2e);
    const auto n = S::round(S::mul(t, log2e));
    typename S::Vec f;
    if (S::fused) {
        f = S::fms(t, log2e, n);
        f = S::fma(t, S::all(C::log2e_low), f);
    } else {
        // Without a fused multiply-add t*log2e - n would lose its digits; n times the short ln 2 is exact instead.
        f = S::fnma(n, S::all(C::ln2), t);
        f = S::fnma(n, S::all(C::ln2_low), f);
        f = S::mul(f, log2e);
    }
    auto y = S::all(C::p[C::degree - 1]);
    for (int i = C::degree - 2; i >= 0; --i) y = S::fma(y, f, S::all(C::p[i]));
    y = S::fma(y, f, S::all(T(1)));
    return S::keep(S::not_less(t, S::all(C::lowest)), S::scale2(y, n));
}

// tanh: Pade [7/6] below 1/2 (2e-16), (1 - e)/(1 + e) with e = exp(-2|x|) above.
template <class T>
inline typename Simd<T>::Vec hyperbolic_tangent(typename Simd<T>::Vec x) {
    using S = Simd<T>;
    const auto size = S::abs(x);
    const auto square = S::mul(x, x);
    auto top = S::fma(square, S::add(square, S::all(T(378))), S::all(T(17325)));
    top = S::fma(square, top, S::all(T(135135)));
    auto bottom = S::fma(square, S::fma(square, S::all(T(28)), S::all(T(3150))), S::all(T(62370)));
    bottom = S::fma(square, bottom, S::all(T(135135)));
    const auto near = S::div(S::mul(x, top), bottom);
    const auto e = exponential<T>(S::mul(size, S::all(T(-2))));
    const auto far = S::div(S::sub(S::all(T(1)), e), S::add(S::all(T(1)), e));
    return S::choose(S::less(size, S::all(T(0.5))), near, S::with_sign(far, x));
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
