// Tells which CPU levels this CPU runs. The build includes it too: it may compile the best level alone.
#pragma once

namespace sqrtdk {

#if defined(__x86_64__)
inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
}
inline bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
inline bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
#endif

}  // namespace sqrtdk
