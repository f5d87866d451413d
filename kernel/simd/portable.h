// Vector operations in the compiler's own vectors (GCC and clang), 16 bytes: 4 floats or 2 doubles. Every
// header of a level has these names.
//
// On ARM (aarch64) fma and fnma are fused. On the x86-64 baseline there is no such instruction: there they round twice,
// and results differ from other levels by more than the order of sums.
#pragma once

#include <cstdint>

#include "simd/bytes.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sqrtdk::portable {

// One bit for each of 64 bytes: is it not zero.
SQRTDK_INLINE uint64_t find_nonzero(const uint8_t* p) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += 8) bits |= find_nonzero_of_eight(p + i) << i;
    return bits;
}

template <>
struct Simd<float> {
    static constexpr int lanes = 4;
#if defined(__aarch64__)
    static constexpr int registers = 32;  // decides how many rows a product keeps in registers
    static constexpr bool fused = true;   // fma rounds once
#else
    static constexpr int registers = 16;
    static constexpr bool fused = false;
#endif
    static constexpr bool has_sixteenths = false;
    static constexpr bool has_add_each = false;
    typedef float Vec __attribute__((vector_size(16)));
    typedef int32_t Mask __attribute__((vector_size(16)));
    typedef uint32_t Bits __attribute__((vector_size(16)));

    SQRTDK_INLINE Vec zero() { return all(0); }
    SQRTDK_INLINE Vec all(float x) { return Vec{x, x, x, x}; }
    SQRTDK_INLINE Vec load(const float* p) {
        Vec v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    SQRTDK_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return a + b; }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return a - b; }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return a * b; }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return a / b; }
    // Of two operands one of which is NaN these give the second.
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#if defined(__aarch64__)
    using Neon = float32x4_t;
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return (Vec)vfmaq_f32((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return -(Vec)vfmsq_f32((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return (Vec)vfmsq_f32((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec round(Vec a) { return (Vec)vrndnq_f32((Neon)a); }
#else
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // a*b + c
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }  // c - a*b
    SQRTDK_INLINE Vec round(Vec a) {
        // A number of 2^23 or more is whole; below, adding and taking away 2^23 rounds to nearest even.
        const Vec whole = all(0x1p23f), size = abs(a);
        return choose(less(size, whole), with_sign((size + whole) - whole, a), a);
    }
#endif
    SQRTDK_INLINE Vec abs(Vec a) { return (Vec)((Bits)a & 0x7fffffffu); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) {  // size >= 0 with the sign bit of `sign`
        return (Vec)((Bits)size | ((Bits)sign & 0x80000000u));
    }
    // x * 2^n, integral -126 <= n <= 127. n + 127 is read from the low bits of a sum; the power is multiplied, because
    // a NaN there has any low bits and only a product keeps NaN.
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) {
        const Bits biased = (Bits)(n + all(0x1.8p23f + 127));
        return x * (Vec)(biased << 23);
    }

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return (Mask)(a == b); }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return (Mask)(a < b); }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return ~(Mask)(a < b); }  // true for NaN
    SQRTDK_INLINE Mask from_bits(uint64_t bits) {                         // lowest lanes
        const int32_t low = static_cast<int32_t>(bits & 15);
        return (Mask)((Mask{low, low, low, low} & Mask{1, 2, 4, 8}) != 0);
    }
    SQRTDK_INLINE uint64_t bits(Mask m) {
        const Mask one = m & Mask{1, 2, 4, 8};
        return static_cast<uint64_t>(one[0] | one[1] | one[2] | one[3]);
    }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return (Vec)(m & (Mask)v); }  // 0 elsewhere
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return (Vec)((m & (Mask)yes) | (~m & (Mask)no)); }

    // 4 x 4 in registers: rows[i] lane j <-> rows[j] lane i.
    SQRTDK_INLINE void transpose(Vec (&r)[4]) {
        const Vec a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
        const Vec b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
        const Vec c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
        const Vec d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
        r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
        r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
        r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
        r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
    }
};

template <>
struct Simd<double> {
    static constexpr int lanes = 2;
    static constexpr int registers = Simd<float>::registers;
    static constexpr bool has_sixteenths = false;
    static constexpr bool has_add_each = false;
    static constexpr bool fused = Simd<float>::fused;
    typedef double Vec __attribute__((vector_size(16)));
    typedef int64_t Mask __attribute__((vector_size(16)));
    typedef uint64_t Bits __attribute__((vector_size(16)));

    SQRTDK_INLINE Vec zero() { return all(0); }
    SQRTDK_INLINE Vec all(double x) { return Vec{x, x}; }
    SQRTDK_INLINE Vec load(const double* p) {
        Vec v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    SQRTDK_INLINE void store(double* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return a + b; }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return a - b; }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return a * b; }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return a / b; }
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#if defined(__aarch64__)
    using Neon = float64x2_t;
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return (Vec)vfmaq_f64((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return -(Vec)vfmsq_f64((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return (Vec)vfmsq_f64((Neon)c, (Neon)a, (Neon)b); }
    SQRTDK_INLINE Vec round(Vec a) { return (Vec)vrndnq_f64((Neon)a); }
#else
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
    SQRTDK_INLINE Vec round(Vec a) {
        const Vec whole = all(0x1p52), size = abs(a);
        return choose(less(size, whole), with_sign((size + whole) - whole, a), a);
    }
#endif
    SQRTDK_INLINE Vec abs(Vec a) { return (Vec)((Bits)a & 0x7fffffffffffffffu); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) { return (Vec)((Bits)size | ((Bits)sign & 0x8000000000000000u)); }
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) {  // -1022 <= n <= 1023
        const Bits biased = (Bits)(n + all(0x1.8p52 + 1023));
        return x * (Vec)(biased << 52);
    }

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return (Mask)(a == b); }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return (Mask)(a < b); }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return ~(Mask)(a < b); }
    SQRTDK_INLINE Mask from_bits(uint64_t bits) {
        return Mask{-static_cast<int64_t>(bits & 1), -static_cast<int64_t>(bits >> 1 & 1)};
    }
    SQRTDK_INLINE uint64_t bits(Mask m) { return static_cast<uint64_t>((m[0] & 1) | (m[1] & 2)); }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return (Vec)(m & (Mask)v); }
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return (Vec)((m & (Mask)yes) | (~m & (Mask)no)); }

    SQRTDK_INLINE void transpose(Vec (&r)[2]) {
        const Vec a = r[0];
        r[0] = Vec{a[0], r[1][0]};
        r[1] = Vec{a[1], r[1][1]};
    }
};

}  // namespace sqrtdk::portable
