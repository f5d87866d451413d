// The algorithm, compiled for bfloat16 on the level avx512_bf16; everything else is avx512's.
#define SQRTDK_LEVEL avx512_bf16
#include "simd_avx512_bf16.h"
//
#include "dispatch.h"
#include "forward.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {

Status forward(const Forward& call) {
    if (call.dtype != Dtype::bfloat16 || call.shared * call.queries < few) return avx512::forward(call);
    return call.statistics.entropy != nullptr ? run_tiles<float, Bfloat16, true>(call)
                                              : run_tiles<float, Bfloat16, false>(call);
}

}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
