// Vector operations on AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles. Every header of a level has these names.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sqrtdk::SQRTDK_LEVEL {

// One bit for each of 64 bytes: is it not zero.
SQRTDK_INLINE uint64_t find_nonzero(const uint8_t* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(bytes, bytes);
}

template <>
struct Simd<float> {
    static constexpr int lanes = 16;
    static constexpr int registers = 32;  // decides how many rows a product keeps in registers
    static constexpr bool fused = true;   // fma rounds once
    using Vec = __m512;
    using Mask = __mmask16;

    SQRTDK_INLINE Vec zero() { return _mm512_setzero_ps(); }
    SQRTDK_INLINE Vec all(float x) { return _mm512_set1_ps(x); }
    SQRTDK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
    SQRTDK_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    // Of two operands one of which is NaN these give the second.
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a*b + c
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }    // a*b - c
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a*b
    SQRTDK_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    SQRTDK_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) {  // size >= 0 with the sign bit of `sign`
        return _mm512_or_ps(size, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
    }
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x * 2^n, n integral and >= -126

    // 2^(k/16) for z = k + 1.5 * 2^23, k integral and >= -2016: a look into a table, off the pipes that multiply.
    static constexpr bool has_sixteenths = true;
    SQRTDK_INLINE Vec sixteenths(Vec z) {
        // The bits of 2^(i/16) less i << 19: what the lowest four bits of k add to the shifted k.
        const __m512i table = _mm512_setr_epi32(0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                                0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                                0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d);
        const __m512i k = _mm512_castps_si512(z);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_permutexvar_epi32(k, table), _mm512_slli_epi32(k, 19)));
    }

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // true for NaN
    SQRTDK_INLINE Mask from_bits(uint64_t bits) { return static_cast<Mask>(bits); }              // lowest lanes
    SQRTDK_INLINE uint64_t bits(Mask m) { return m; }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return _mm512_maskz_mov_ps(m, v); }  // 0 elsewhere
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, m, yes); }

    // Lane i is the sum of the lanes of r[i]: half the shuffles of transposing them.
    static constexpr bool has_add_each = true;
    SQRTDK_INLINE Vec add_each(const Vec (&r)[16]) {
        Vec pair[8], four[4], eight[2];
        for (int i = 0; i < 8; ++i)
            pair[i] = add(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
        for (int i = 0; i < 4; ++i)
            four[i] = add(_mm512_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x44),
                          _mm512_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xee));
        for (int i = 0; i < 2; ++i)
            eight[i] = add(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
        return add(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88), _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
    }

    // 16 x 16 in registers: rows[i] lane j <-> rows[j] lane i.
    SQRTDK_INLINE void transpose(Vec (&r)[16]) {
        Vec t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        }
        for (int i = 0; i < 4; ++i) {
            r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
            r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
            r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
            r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
        }
    }
};

template <>
struct Simd<double> {
    static constexpr int lanes = 8;
    static constexpr int registers = 32;
    static constexpr bool fused = true;  // fma rounds once
    using Vec = __m512d;
    using Mask = __mmask8;

    SQRTDK_INLINE Vec zero() { return _mm512_setzero_pd(); }
    SQRTDK_INLINE Vec all(double x) { return _mm512_set1_pd(x); }
    SQRTDK_INLINE Vec load(const double* p) { return _mm512_loadu_pd(p); }
    SQRTDK_INLINE void store(double* p, Vec v) { _mm512_storeu_pd(p, v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_pd(a, b); }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_pd(a, b); }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return _mm512_div_pd(a, b); }
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return _mm512_min_pd(a, b); }
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_pd(a, b, c); }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_pd(a, b, c); }
    SQRTDK_INLINE Vec round(Vec a) { return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    SQRTDK_INLINE Vec abs(Vec a) { return _mm512_abs_pd(a); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) {
        return _mm512_or_pd(size, _mm512_and_pd(sign, _mm512_set1_pd(-0.0)));
    }
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) { return _mm512_scalef_pd(x, n); }  // n >= -1022
    static constexpr bool has_sixteenths = false;
    static constexpr bool has_add_each = false;

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_NLT_UQ); }
    SQRTDK_INLINE Mask from_bits(uint64_t bits) { return static_cast<Mask>(bits); }
    SQRTDK_INLINE uint64_t bits(Mask m) { return m; }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return _mm512_maskz_mov_pd(m, v); }
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return _mm512_mask_mov_pd(no, m, yes); }

    SQRTDK_INLINE void transpose(Vec (&r)[8]) {
        Vec t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
        }
        for (int i = 0; i < 2; ++i) {
            r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
            r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
            r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
            r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
        }
        for (int i = 0; i < 8; ++i) r[i] = t[i];
    }
};

}  // namespace sqrtdk::SQRTDK_LEVEL
