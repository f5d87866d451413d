// Vector operations on AVX2 with FMA3: 8 floats or 4 doubles. Every header of a level has these names.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sqrtdk::avx2 {

// One bit for each of 64 bytes: is it not zero.
SQRTDK_INLINE uint64_t find_nonzero(const uint8_t* p) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    const uint64_t zeros = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, zero)));
    const uint64_t more = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, zero)));
    return ~(more << 32 | zeros);
}

// A mask is a vector of lanes that are all ones or all zeros.
template <>
struct Simd<float> {
    static constexpr int lanes = 8;
    static constexpr int registers = 16;  // decides how many rows a product keeps in registers
    static constexpr bool has_sixteenths = false;
    static constexpr bool has_add_each = false;
    static constexpr bool fused = true;  // fma rounds once
    using Vec = __m256;
    struct Mask {
        __m256 lanes;
    };

    SQRTDK_INLINE Vec zero() { return _mm256_setzero_ps(); }
    SQRTDK_INLINE Vec all(float x) { return _mm256_set1_ps(x); }
    SQRTDK_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
    SQRTDK_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
    // Of two operands one of which is NaN these give the second.
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }    // a*b + c
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }    // a*b - c
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a*b
    SQRTDK_INLINE Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    SQRTDK_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) {  // size >= 0 with the sign bit of `sign`
        return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
    }
    // x * 2^n for integral n >= -126, x and the result normal, or both x and n NaN. Added to the exponent's bits: a
    // product would take a slot of the FMA pipes. A NaN n converts to the lowest integer, whose shift is 0.
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
    }

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return {_mm256_cmp_ps(a, b, _CMP_EQ_OQ)}; }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a, b, _CMP_LT_OQ)}; }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return {_mm256_cmp_ps(a, b, _CMP_NLT_UQ)}; }  // true for NaN
    SQRTDK_INLINE Mask from_bits(uint64_t bits) {                                             // lowest lanes
        const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), lane);
        return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane))};
    }
    SQRTDK_INLINE uint64_t bits(Mask m) { return static_cast<uint64_t>(_mm256_movemask_ps(m.lanes)); }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return _mm256_and_ps(m.lanes, v); }  // 0 elsewhere
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m.lanes); }

    // 8 x 8 in registers: rows[i] lane j <-> rows[j] lane i.
    SQRTDK_INLINE void transpose(Vec (&r)[8]) {
        Vec t[8];
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
            r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
            r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
            r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
            t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
        }
        for (int i = 0; i < 8; ++i) r[i] = t[i];
    }
};

template <>
struct Simd<double> {
    static constexpr int lanes = 4;
    static constexpr int registers = 16;
    static constexpr bool has_sixteenths = false;
    static constexpr bool has_add_each = false;
    static constexpr bool fused = true;  // fma rounds once
    using Vec = __m256d;
    struct Mask {
        __m256d lanes;
    };

    SQRTDK_INLINE Vec zero() { return _mm256_setzero_pd(); }
    SQRTDK_INLINE Vec all(double x) { return _mm256_set1_pd(x); }
    SQRTDK_INLINE Vec load(const double* p) { return _mm256_loadu_pd(p); }
    SQRTDK_INLINE void store(double* p, Vec v) { _mm256_storeu_pd(p, v); }
    SQRTDK_INLINE Vec add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
    SQRTDK_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_pd(a, b); }
    SQRTDK_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_pd(a, b); }
    SQRTDK_INLINE Vec div(Vec a, Vec b) { return _mm256_div_pd(a, b); }
    SQRTDK_INLINE Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
    SQRTDK_INLINE Vec min(Vec a, Vec b) { return _mm256_min_pd(a, b); }
    SQRTDK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
    SQRTDK_INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_pd(a, b, c); }
    SQRTDK_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_pd(a, b, c); }
    SQRTDK_INLINE Vec round(Vec a) { return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    SQRTDK_INLINE Vec abs(Vec a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
    SQRTDK_INLINE Vec with_sign(Vec size, Vec sign) {
        return _mm256_or_pd(size, _mm256_and_pd(sign, _mm256_set1_pd(-0.0)));
    }
    // The same for -1022 <= n <= 1023. AVX2 converts no doubles to 64-bit integers, so n + 1023 is read from the low
    // bits of a sum; the power is multiplied, because a NaN there has any low bits and only a product keeps NaN.
    SQRTDK_INLINE Vec scale2(Vec x, Vec n) {
        const __m256i biased = _mm256_castpd_si256(_mm256_add_pd(n, _mm256_set1_pd(0x1.8p52 + 1023)));
        return _mm256_mul_pd(x, _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52)));
    }

    SQRTDK_INLINE Mask equal(Vec a, Vec b) { return {_mm256_cmp_pd(a, b, _CMP_EQ_OQ)}; }
    SQRTDK_INLINE Mask less(Vec a, Vec b) { return {_mm256_cmp_pd(a, b, _CMP_LT_OQ)}; }
    SQRTDK_INLINE Mask not_less(Vec a, Vec b) { return {_mm256_cmp_pd(a, b, _CMP_NLT_UQ)}; }
    SQRTDK_INLINE Mask from_bits(uint64_t bits) {
        const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
        const __m256i set = _mm256_and_si256(_mm256_set1_epi64x(static_cast<int64_t>(bits)), lane);
        return {_mm256_castsi256_pd(_mm256_cmpeq_epi64(set, lane))};
    }
    SQRTDK_INLINE uint64_t bits(Mask m) { return static_cast<uint64_t>(_mm256_movemask_pd(m.lanes)); }
    SQRTDK_INLINE Vec keep(Mask m, Vec v) { return _mm256_and_pd(m.lanes, v); }
    SQRTDK_INLINE Vec choose(Mask m, Vec yes, Vec no) { return _mm256_blendv_pd(no, yes, m.lanes); }

    SQRTDK_INLINE void transpose(Vec (&r)[4]) {
        const Vec a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
        const Vec c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
        r[0] = _mm256_permute2f128_pd(a, c, 0x20);
        r[1] = _mm256_permute2f128_pd(b, d, 0x20);
        r[2] = _mm256_permute2f128_pd(a, c, 0x31);
        r[3] = _mm256_permute2f128_pd(b, d, 0x31);
    }
};

}  // namespace sqrtdk::avx2
