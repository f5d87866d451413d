// The CPU level that a source is compiled for: CMakeLists.txt names it, and its vector operations come with it.
#pragma once

#ifndef SQRTDK_LEVEL
#error "SQRTDK_LEVEL must name a level: see add_level in CMakeLists.txt"
#endif

#define SQRTDK_INLINE static inline __attribute__((always_inline))

namespace sqrtdk::SQRTDK_LEVEL {

// Vector operations on float and double.
template <class T>
struct Simd;

// Those on pairs of bfloat16, in lanes of T, where a level has them.
template <class T>
struct PairSimd;

}  // namespace sqrtdk::SQRTDK_LEVEL

#define SQRTDK_QUOTE_(path) #path
#define SQRTDK_QUOTE(path) SQRTDK_QUOTE_(path)
// clang-format off: it would put blanks into the path
#define SQRTDK_OPERATIONS(level) simd/level.h
// clang-format on
#include SQRTDK_QUOTE(SQRTDK_OPERATIONS(SQRTDK_LEVEL))
