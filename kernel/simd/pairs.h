// Blocks of bfloat16 as the operands of products that take two numbers at a time, where the CPU has such an
// instruction.
//
//   broadcast (A): neighbours in memory; features of a key as they lie, or two keys interleaved
//   lanes (B):     one pair in each lane, in arrays of T: as wide as the two of them
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/numbers.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T, class In>
constexpr bool in_pairs = false;
#ifdef SQRTDK_HAS_PAIRS
template <>
constexpr bool in_pairs<float, Bfloat16> = true;
#endif

// Operands of multiply(); a step of k is a pair.
template <class T>
struct Paired {
    using Element = uint16_t;
    using Lanes = typename PairSimd<T>::Pairs;
    SQRTDK_INLINE Lanes load(const T* b) { return PairSimd<T>::load(b); }
    SQRTDK_INLINE Lanes all(const uint16_t* a) { return PairSimd<T>::all(a); }
    SQRTDK_INLINE typename Simd<T>::Vec fma(Lanes a, Lanes b, typename Simd<T>::Vec c) {
        return PairSimd<T>::dot(a, b, c);
    }
};

inline int64_t pairs_of(int64_t count) { return (count + 1) / 2; }

inline uint32_t make_pair(uint16_t first, uint16_t second) { return first | uint32_t(second) << 16; }

// Rows of numbers whose neighbours are pairs: an even width, zero beyond the last number.
struct PairView {
    const uint16_t* data;
    ptrdiff_t row;
};

// Where they lie, or copied if they are not next to one another or have an odd width.
inline PairView view_pairs(const Bfloat16* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width,
                           void* copy) {
    if (step == 1 && width % 2 == 0) return {&from->bits, row};
    uint16_t* to = static_cast<uint16_t*>(copy);
    const int64_t even = 2 * pairs_of(width);
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < width; ++j) to[i * even + j] = from[i * row + j * step].bits;
        if (width < even) to[i * even + width] = 0;
    }
    return {to, ptrdiff_t(even)};
}

// [rows][width] to pairs of rows [rows / 2][width], zero beyond the last row.
template <class T>
void interleave_rows(const Bfloat16* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width, T* to) {
    for (int64_t i = 0; i < rows; i += 2, to += width) {
        const bool both = i + 1 < rows;
        const Bfloat16 *first = from + i * row, *second = both ? first + row : first;
        int64_t j = 0;
        if (step == 1 && both)
            for (; j + 32 <= width; j += 32) PairSimd<T>::interleave(&first[j].bits, &second[j].bits, to + j);
        for (; j < width; ++j) {
            const uint32_t pair = make_pair(first[j * step].bits, both ? second[j * step].bits : 0);
            __builtin_memcpy(to + j, &pair, 4);
        }
    }
}

// Rows that are not finite become zeros: 0 * NaN would poison rows that do not see them.
template <class T>
void clear_infinite(const Bfloat16* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width, T* pairs) {
    for (int64_t i = 0; i < rows; ++i) {
        bool finite = true;
        for (int64_t j = 0; j < width; ++j) finite = finite && (from[i * row + j * step].bits & 0x7f80) != 0x7f80;
        if (finite) continue;
        for (int64_t j = 0; j < width; ++j) {
            T* at = pairs + i / 2 * width + j;
            uint32_t pair;
            __builtin_memcpy(&pair, at, 4);
            pair &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
            __builtin_memcpy(at, &pair, 4);
        }
    }
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
