// Probes of the best speed of the machine on one CPU level, for the benchmark to compare with.
#pragma once

#include <cstdint>

#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {

// Independent chains of multiply-adds that stay in registers: what the products could reach at best.
double fused_operations(int64_t rounds) {
    using S = Simd<float>;
    S::Vec sum[12];
    for (int i = 0; i < 12; ++i) sum[i] = S::all(float(i));
    const auto a = S::all(0.999f), b = S::all(1e-3f);
    for (int64_t r = 0; r < rounds; ++r)
        for (int i = 0; i < 12; ++i) sum[i] = S::fma(sum[i], a, b);
    float out[S::lanes];
    for (int i = 1; i < 12; ++i) sum[0] = S::add(sum[0], sum[i]);
    S::store(out, sum[0]);
    volatile float used = out[0];
    (void)used;
    return double(rounds) * 12 * S::lanes;
}

// Reads memory front to back and adds it up, as decoding does.
void read_memory(const float* p, int64_t count) {
    using S = Simd<float>;
    S::Vec sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    for (int64_t i = 0; i + 4 * S::lanes <= count; i += 4 * S::lanes)
        for (int j = 0; j < 4; ++j) sum[j] = S::add(sum[j], S::load(p + i + j * S::lanes));
    float out[S::lanes];
    S::store(out, S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])));
    volatile float used = out[0];
    (void)used;
}

}  // namespace sqrtdk::SQRTDK_LEVEL
