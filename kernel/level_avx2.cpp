// The algorithm, compiled for the level avx2.
#define SQRTDK_LEVEL avx2
#include "simd_avx2.h"
//
#include "forward.h"
#include "probes.h"
