// The backward pass, compiled for the level avx512: apart from the forward pass, whose inlining it must not change.
#define SQRTDK_LEVEL avx512
#include "simd_avx512.h"
//
#include "backward.h"
