// What an algorithm header sees of its CPU level: a file that includes it has defined SQRTDK_LEVEL and a Simd.
#pragma once

#ifndef SQRTDK_LEVEL
#error "define SQRTDK_LEVEL and include the matching simd_<level>.h first: see level_avx512.cpp"
#endif
