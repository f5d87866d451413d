// Chooses the CPU level, hands out work, and probes the machine. Compiled without any -m flag.
#include "dispatch.h"

#include <cfenv>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>

#include "pool.h"
#include "work.h"

namespace sqrtdk {
namespace {

struct Implementation {
    const char* name;
    bool (*runs_here)();
    Status (*forward)(const Forward&);
    Status (*backward)(const Backward&);
    double (*fused_operations)(int64_t);
    void (*read_memory)(const float*, int64_t);
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); }
#endif

// Best first.
const Implementation implementations[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, avx512::forward, avx512::backward, avx512::fused_operations, avx512::read_memory},
    {"avx2", has_avx2, avx2::forward, avx2::backward, avx2::fused_operations, avx2::read_memory},
#endif
    {"portable", always, portable::forward, portable::backward, portable::fused_operations, portable::read_memory},
};
constexpr int implementation_count = int(sizeof(implementations) / sizeof(implementations[0]));

const Implementation* find(const char* level) {
    for (const Implementation& item : implementations)
        if (std::strcmp(item.name, level) == 0) return item.runs_here() ? &item : nullptr;
    return nullptr;
}

int64_t milliseconds() {
    using namespace std::chrono;
    return duration_cast<std::chrono::milliseconds>(steady_clock::now().time_since_epoch()).count();
}

constexpr int64_t poll_every = 20;

// Whether a number that came from outside is one of an enumeration's.
template <class Enumeration>
bool is_one_of(Enumeration value, Enumeration first, Enumeration last) {
    return int(first) <= int(value) && int(value) <= int(last);
}

}  // namespace

Work::Work(const Problem& call, int64_t pieces)
    : interrupted_(call.interrupted), context_(call.context), pieces_(pieces),
      next_poll_(interrupted_ == nullptr ? 0 : milliseconds() + poll_every) {}

bool Work::is_over(int worker) {
    if (worker == 0 && interrupted_ != nullptr) {
        const int64_t now = milliseconds();
        if (now >= next_poll_) {
            next_poll_ = now + poll_every;
            if (interrupted_(context_)) fail(Status::interrupted);
        }
    }
    return status_.load(std::memory_order_relaxed) != int(Status::ok);
}

int64_t Work::take(int worker) {
    if (is_over(worker)) return -1;
    const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < pieces_ ? piece : -1;
}

int useful_threads(int threads, int64_t pieces, double multiply_adds) {
    // Waking a worker costs some microseconds; below this much work per thread it does not pay.
    constexpr double worth = 4e5;
    int64_t useful = int64_t(multiply_adds / worth) + 1;
    useful = useful < pieces ? useful : pieces;
    useful = useful < threads ? useful : threads;
    return useful < 1 ? 1 : int(useful);
}

namespace {

template <class Call>
Status run(const Call& call, const char* level, Status (*Implementation::*pass)(const Call&)) {
    const Implementation* implementation = find(level);
    if (implementation == nullptr) return Status::unknown_level;
    if (!is_one_of(call.dtype, Dtype::float16, Dtype::float64)) return Status::unknown_dtype;
    if (!is_one_of(call.mask.kind, MaskKind::none, MaskKind::float64)) return Status::unknown_mask;
    // The caller's exception flags stay as they were, whatever is computed on the way to the pool and back.
    std::fenv_t environment;
    std::fegetenv(&environment);
    const Status status = (implementation->*pass)(call);
    std::fesetenv(&environment);
    return status;
}

}  // namespace

Status forward(const Forward& call, const char* level) { return run(call, level, &Implementation::forward); }

Status backward(const Backward& call, const char* level) { return run(call, level, &Implementation::backward); }

const Level* levels(int* count) {
    struct Found {
        Level item[implementation_count];
        Found() {
            for (int i = 0; i < implementation_count; ++i) item[i] = {implementations[i].name, implementations[i].runs_here()};
        }
    };
    static const Found found;
    *count = implementation_count;
    return found.item;
}

const char* best_level() {
    for (const Implementation& item : implementations)
        if (item.runs_here()) return item.name;
    return "portable";
}

namespace {

struct Probe {
    const Implementation* level;
    const float* memory;
    int64_t share;
    double operations[256];
};

void probe_fma_body(void* context, int worker) {
    Probe* probe = static_cast<Probe*>(context);
    probe->operations[worker] = probe->level->fused_operations(2'000'000);
}

void probe_read_body(void* context, int worker) {
    Probe* probe = static_cast<Probe*>(context);
    probe->level->read_memory(probe->memory + worker * probe->share, probe->share);
    probe->operations[worker] = double(probe->share) * sizeof(float);
}

double run_probe(Probe& probe, int threads, void (*body)(void*, int)) {
    for (double& item : probe.operations) item = 0;
    const auto began = std::chrono::steady_clock::now();
    run_on_pool(threads, body, &probe);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    double total = 0;
    for (double item : probe.operations) total += item;
    return total / seconds;
}

}  // namespace

double probe_fma(const char* level, int threads) {
    Probe probe{find(level), nullptr, 0, {}};
    return probe.level == nullptr ? 0.0 : run_probe(probe, threads, probe_fma_body);
}

double probe_read(const char* level, int threads) {
    constexpr int64_t count = 64 << 20;  // 256 MiB: larger than any cache
    Probe probe{find(level), nullptr, count / threads, {}};
    if (probe.level == nullptr) return 0.0;
    std::unique_ptr<float[]> memory(new (std::nothrow) float[count]());
    if (memory == nullptr) return 0.0;
    probe.memory = memory.get();
    return run_probe(probe, threads, probe_read_body);
}

}  // namespace sqrtdk
