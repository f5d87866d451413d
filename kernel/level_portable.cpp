// The algorithm, compiled for the level portable.
#define SQRTDK_LEVEL portable
#include "simd_portable.h"
//
#include "forward.h"
#include "probes.h"
