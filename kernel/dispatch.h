// Functions of each CPU level: forward.cpp and backward.cpp define them once per level, in its own namespace.
#pragma once

#include "kernel.h"

#define SQRTDK_DECLARE_LEVEL(name)                   \
    namespace name {                                 \
    Status forward(const Forward& call);             \
    Status backward(const Backward& call);           \
    double fused_operations(int64_t rounds);         \
    void read_memory(const float* p, int64_t count); \
    }

namespace sqrtdk {
#if defined(__x86_64__)
SQRTDK_DECLARE_LEVEL(avx512_bf16)
SQRTDK_DECLARE_LEVEL(avx512)
SQRTDK_DECLARE_LEVEL(avx2)
#endif
SQRTDK_DECLARE_LEVEL(portable)

// One CPU level of this build.
struct Implementation {
    const char* name;
    bool (*runs_here)();
    Status (*forward)(const Forward&);
    Status (*backward)(const Backward&);
    double (*fused_operations)(int64_t);
    void (*read_memory)(const float*, int64_t);
};

// The level of that name; null where it is unknown or this CPU lacks it.
const Implementation* find_level(const char* name);

}  // namespace sqrtdk
