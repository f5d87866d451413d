// Vector operations on AVX-512 with dot products of bfloat16 pairs: those of avx512.h and PairSimd.
#pragma once

#include "simd/avx512.h"

// The level has PairSimd: products of bfloat16 are taken two at a time (pairs.h). For all else there is the level
// below.
#define SQRTDK_HAS_PAIRS 1
#define SQRTDK_LEVEL_BELOW avx512

namespace sqrtdk::SQRTDK_LEVEL {

// A lane of 32 bits holds two bfloat16, the first in the lower half.
template <>
struct PairSimd<float> {
    using Pairs = __m512bh;
    using Vec = __m512;

    SQRTDK_INLINE Pairs load(const float* p) { return (__m512bh)_mm512_loadu_si512(p); }
    SQRTDK_INLINE Pairs all(const uint16_t* p) {
        int32_t pair;
        __builtin_memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    // c + a.first * b.first + a.second * b.second; numbers below the smallest normal one count as 0.
    SQRTDK_INLINE Vec dot(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }

    // Rounded to nearest, halves away from zero: lane i holds (first[i], second[i]). Integer operations: the conversion
    // instructions and the widening after them take twice as long. A NaN may come out as any number.
    SQRTDK_INLINE void store_pairs(float* p, Vec first, Vec second) {
        const __m512i half = _mm512_set1_epi32(0x8000);
        const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
        const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
        _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
    }
    // Rounded to nearest even, 32 in a row.
    SQRTDK_INLINE void store_row(uint16_t* p, Vec first, Vec second) {
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    // 16 in a row; unlike the instructions above this keeps numbers below the smallest normal one, for the results.
    SQRTDK_INLINE void store_exactly(uint16_t* p, Vec x) {
        const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
        const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 is_number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
        const __m512i rounded = _mm512_mask_mov_epi32(quiet, is_number, nearest);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
    // 16 in a row as floats.
    SQRTDK_INLINE Vec widen(const uint16_t* p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    // 32 numbers of each of two rows: to[i] = (first[i], second[i]).
    SQRTDK_INLINE void interleave(const uint16_t* first, const uint16_t* second, float* to) {
        const __m512i x = _mm512_loadu_si512(first), y = _mm512_loadu_si512(second);
        const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
        // Unpacking works within 128 bits: the quarters are put back into their order.
        const __m512i start = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i end = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, start, high));
        _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(low, end, high));
    }
};

}  // namespace sqrtdk::SQRTDK_LEVEL
