// Measures the machine for the benchmark: multiply-adds and bytes read per second, on the threads of the pool.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>

#include "dispatch.h"
#include "pool/pool.h"

namespace sqrtdk {
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
    Probe probe{find_level(level), nullptr, 0, {}};
    return probe.level == nullptr ? 0.0 : run_probe(probe, threads, probe_fma_body);
}

double probe_read(const char* level, int threads) {
    constexpr int64_t count = 64 << 20;  // 256 MiB: larger than any cache
    Probe probe{find_level(level), nullptr, count / std::max(threads, 1), {}};
    if (probe.level == nullptr) return 0.0;
    std::unique_ptr<float[]> memory(new (std::nothrow) float[count]());
    if (memory == nullptr) return 0.0;
    probe.memory = memory.get();
    return run_probe(probe, threads, probe_read_body);
}

}  // namespace sqrtdk
