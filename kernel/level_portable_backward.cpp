// The backward pass, compiled for the level portable: apart from the forward pass, whose inlining it must not change.
#define SQRTDK_LEVEL portable
#include "simd_portable.h"
//
#include "backward.h"
