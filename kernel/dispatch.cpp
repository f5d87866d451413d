// Chooses the CPU level. Compiled without any -m flag.
#include "dispatch.h"

#include <cfenv>
#include <cstring>

#include "cpu.h"

namespace sqrtdk {
namespace {

[[maybe_unused]] bool always() { return true; }

// Best first.
const Implementation implementations[] = {
#if defined(SQRTDK_HAS_avx512_bf16)
    {"avx512_bf16", has_avx512_bf16, avx512_bf16::forward, avx512_bf16::backward, avx512::fused_operations,
     avx512::read_memory},
#endif
#if defined(SQRTDK_HAS_avx512)
    {"avx512", has_avx512, avx512::forward, avx512::backward, avx512::fused_operations, avx512::read_memory},
#endif
#if defined(SQRTDK_HAS_avx2)
    {"avx2", has_avx2, avx2::forward, avx2::backward, avx2::fused_operations, avx2::read_memory},
#endif
#if defined(SQRTDK_HAS_portable)
    {"portable", always, portable::forward, portable::backward, portable::fused_operations, portable::read_memory},
#endif
};
constexpr int implementation_count = int(sizeof(implementations) / sizeof(implementations[0]));

// Whether a number that came from outside is one of an enumeration's.
template <class Enumeration>
bool is_one_of(Enumeration value, Enumeration first, Enumeration last) {
    return int(first) <= int(value) && int(value) <= int(last);
}

template <class Call>
Status run(const Call& call, const char* level, Status (*Implementation::*pass)(const Call&)) {
    const Implementation* implementation = find_level(level);
    if (implementation == nullptr) return Status::unknown_level;
    if (!is_one_of(call.dtype, Dtype::float16, Dtype::float64)) return Status::unknown_dtype;
    if (!is_one_of(call.mask.kind, MaskKind::none, MaskKind::float64)) return Status::unknown_mask;
    // What is computed on the way to the pool and back is computed in the default environment, too: no traps, rounding
    // to nearest, denormals kept. The caller's environment and exception flags stay as they were.
    std::fenv_t environment;
    std::fegetenv(&environment);
    std::fesetenv(FE_DFL_ENV);
    const Status status = (implementation->*pass)(call);
    std::fesetenv(&environment);
    return status;
}

}  // namespace

const Implementation* find_level(const char* level) {
    for (const Implementation& item : implementations)
        if (std::strcmp(item.name, level) == 0) return item.runs_here() ? &item : nullptr;
    return nullptr;
}

Status forward(const Forward& call, const char* level) { return run(call, level, &Implementation::forward); }

Status backward(const Backward& call, const char* level) { return run(call, level, &Implementation::backward); }

const Level* levels(int* count) {
    struct Found {
        Level item[implementation_count];
        Found() {
            for (int i = 0; i < implementation_count; ++i)
                item[i] = {implementations[i].name, implementations[i].runs_here()};
        }
    };
    static const Found found;
    *count = implementation_count;
    return found.item;
}

}  // namespace sqrtdk
