// ln(1 + x) without a call, so that the compiler takes many rows at a time.
#pragma once

#include <cstdint>

#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Relative error below 4e-16 for x >= 0; infinity and NaN as they are. 1 + x = 2^k * m with m around 1, ln m by the
// series of 2*atanh(s) with the coefficients of FreeBSD's log1p, and what 1 + x has rounded away is added.
inline __attribute__((always_inline)) double log1p_inline(double x) {
    constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
    constexpr double p[7] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                             2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                             1.479819860511658591e-01};
    constexpr uint64_t root_half = 0x3fe6a09e00000000ull;
    const double u = 1.0 + x;
    uint64_t bits;
    __builtin_memcpy(&bits, &u, 8);
    const uint64_t raised = bits + (0x3ff0000000000000ull - root_half);
    // The exponent as a double: its bits below those of 2^52.
    const uint64_t shifted = (raised >> 52) | 0x4330000000000000ull;
    double k;
    __builtin_memcpy(&k, &shifted, 8);
    k -= 0x1p52 + 1023.0;
    bits = (raised & 0xfffffffffffffull) + root_half;
    double m;
    __builtin_memcpy(&m, &bits, 8);
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s, half_square = 0.5 * f * f;
    const double lost = (x - (u - 1.0)) / u;
    double series = p[6];
    for (int i = 5; i >= 0; --i) series = series * z + p[i];
    const double result = s * (half_square + z * series) + (k * ln2_low + lost) - half_square + f + k * ln2_high;
    return x - x == 0.0 ? result : x;
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
