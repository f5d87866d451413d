// The backward pass, compiled for the level avx2: apart from the forward pass, whose inlining it must not change.
#define SQRTDK_LEVEL avx2
#include "simd_avx2.h"
//
#include "backward.h"
