// The algorithm, compiled for the level avx512.
#define SQRTDK_LEVEL avx512
#include "simd_avx512.h"
//
#include "forward.h"
#include "probes.h"
