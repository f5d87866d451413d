// The backward pass, compiled for bfloat16 on the level avx512_bf16; everything else is avx512's.
#define SQRTDK_LEVEL avx512_bf16
#include "simd_avx512_bf16.h"
//
#include "backward.h"
#include "dispatch.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {

Status backward(const Backward& call) {
    if (call.dtype != Dtype::bfloat16 || call.shared * call.queries < few) return avx512::backward(call);
    return run<float, Bfloat16>(call);
}

}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
