// The forward pass in plain loops over double: what the test programs compare the kernel with. Slow on purpose.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../kernel.h"

namespace sqrtdk {
namespace naive {

inline double from_half(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int fraction = bits & 1023;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) {
        return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline double from_bfloat(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Rounds to `digits` significant bits (fewer below the least exponent), ties to even; beyond `largest` to infinity.
inline double round_to(double value, int digits, int least_exponent, double largest) {
    if (!std::isfinite(value) || value == 0.0) {
        return value;
    }
    int exponent;
    std::frexp(value, &exponent);
    const int step = (exponent > least_exponent ? exponent : least_exponent) - digits;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
    return std::fabs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

inline uint16_t to_bfloat(double value) {
    const float narrow = float(round_to(value, 8, -125, std::ldexp(255.0, 120)));
    uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return uint16_t(bits >> 16) | (std::isnan(value) ? 0x40 : 0);
}

inline uint16_t to_half(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) {
        return sign | 0x7e00;
    }
    const double rounded = std::fabs(round_to(value, 11, -13, 65504.0));
    if (std::isinf(rounded)) {
        return sign | 0x7c00;
    }
    if (rounded < std::ldexp(1.0, -14)) {
        return sign | uint16_t(std::ldexp(rounded, 24));
    }
    int exponent;
    const double fraction = std::frexp(rounded, &exponent);
    return sign | uint16_t((exponent + 14) << 10) | uint16_t(std::ldexp(fraction, 11) - 1024);
}

inline double load(Dtype dtype, const void* data, int64_t at) {
    switch (dtype) {
        case Dtype::float16: return from_half(static_cast<const uint16_t*>(data)[at]);
        case Dtype::bfloat16: return from_bfloat(static_cast<const uint16_t*>(data)[at]);
        case Dtype::float32: return static_cast<const float*>(data)[at];
        default: return static_cast<const double*>(data)[at];
    }
}

inline void store(Dtype dtype, void* data, int64_t at, double value) {
    switch (dtype) {
        case Dtype::float16: static_cast<uint16_t*>(data)[at] = to_half(value); break;
        case Dtype::bfloat16: static_cast<uint16_t*>(data)[at] = to_bfloat(value); break;
        case Dtype::float32: static_cast<float*>(data)[at] = float(value); break;
        default: static_cast<double*>(data)[at] = value;
    }
}

// One row: what it sees and what follows from that.
struct Row {
    std::vector<int64_t> keys;
    std::vector<double> scores, logits, weights;
    int64_t max_key = -1;
    double max_logit, logsumexp, entropy, tail_weight, tail_p2, tail_p3;
    double logit_mean, logit_variance, score_max, score_variance, sink_weight;
};

inline void describe(const std::vector<double>& x, double* largest, double* mean, double* variance) {
    *largest = -std::numeric_limits<double>::infinity();
    *mean = *variance = x.empty() ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    for (double value : x) {
        *largest = std::isnan(*largest) || value <= *largest ? *largest : value;
    }
    for (double value : x) {
        *mean += (value - *largest) / double(x.size());
    }
    for (double value : x) {
        const double apart = value - *largest - *mean;
        *variance += apart * apart / double(x.size());
    }
    *mean += *largest;
}

inline bool sees(const Problem& call, int64_t n, int64_t g, int64_t r, int64_t i, int64_t j, double* bias) {
    const Mask& mask = call.mask;
    *bias = 0.0;
    if (j - i < call.first || j - i > call.last) {
        return false;
    }
    if (mask.kind == MaskKind::none) {
        return true;
    }
    const int64_t at = n * mask.n + g * mask.g + r * mask.r + i * mask.l + j * mask.s;
    if (mask.kind == MaskKind::boolean) {
        return static_cast<const uint8_t*>(mask.data)[at] != 0;
    }
    *bias = load(Dtype(int(mask.kind) - int(MaskKind::float16)), mask.data, at);
    return *bias != -std::numeric_limits<double>::infinity();
}

inline Row attend(const Problem& call, int64_t n, int64_t g, int64_t r, int64_t i) {
    Row row;
    const double scale = call.scale.data[n * call.scale.n + g * call.scale.g + r * call.scale.r + i * call.scale.l];
    for (int64_t j = 0; j < call.keys; ++j) {
        double bias;
        if (!sees(call, n, g, r, i, j, &bias)) {
            continue;
        }
        double product = 0.0;
        for (int64_t d = 0; d < call.d_k; ++d) {
            const int64_t from = n * call.q.n + g * call.q.g + r * call.q.r + i * call.q.l + d * call.q.d;
            const int64_t with = n * call.k.n + g * call.k.g + j * call.k.s + d * call.k.d;
            product += load(call.dtype, call.q.data, from) * load(call.dtype, call.k.data, with);
        }
        const double score = scale * product;
        row.keys.push_back(j);
        row.scores.push_back(score);
        row.logits.push_back((call.softcap > 0 ? call.softcap * std::tanh(score / call.softcap) : score) + bias);
    }
    double unused;
    describe(row.logits, &row.max_logit, &row.logit_mean, &row.logit_variance);
    describe(row.scores, &row.score_max, &unused, &row.score_variance);
    size_t top = 0;
    for (size_t j = 0; j < row.logits.size(); ++j) {
        if (std::isnan(row.logits[j])) {  // A visible NaN is the answer, as in NumPy.
            row.max_logit = row.logits[j];
            top = j;
            break;
        }
        if (row.logits[j] > row.logits[top]) {
            top = j;
        }
    }
    double rest = 0.0, below = 0.0, squares = 0.0, cubes = 0.0;
    for (size_t j = 0; j < row.logits.size(); ++j) {
        const double e = std::exp(row.logits[j] - row.max_logit);
        row.weights.push_back(e);
        if (j != top) {
            rest += e;
            below += e > 0 ? e * (row.max_logit - row.logits[j]) : 0.0;
            squares += e * e;
            cubes += e * e * e;
        }
    }
    const double total = 1.0 + rest;
    const bool some = !row.keys.empty();
    // NaN where a visible logit is NaN or the largest is infinite.
    const double poison = some ? row.max_logit * 0.0 : 0.0;
    row.max_key = some ? row.keys[top] : -1;
    row.logsumexp = some ? row.max_logit + std::log1p(rest) : -std::numeric_limits<double>::infinity();
    row.entropy = some ? std::fmin(std::log1p(rest) + below / total, std::log(double(row.keys.size()))) + poison : 0.0;
    row.tail_weight = some ? rest / total + poison : 0.0;
    row.tail_p2 = some ? squares / total / total + poison : 0.0;
    row.tail_p3 = some ? cubes / total / total / total + poison : 0.0;
    row.sink_weight = 0.0;
    double divisor = total;
    if (call.sinks) {
        const double sink = call.sinks[g * call.shared + r];
        row.sink_weight = 1.0 / (1.0 + std::exp(row.logsumexp - sink));
        divisor += some ? std::exp(sink - row.max_logit) : 0.0;
    }
    for (double& weight : row.weights) {
        weight = weight / divisor + poison;
    }
    return row;
}

inline std::vector<double> weigh(const Forward& call, const Row& row, int64_t n, int64_t g) {
    std::vector<double> sums(size_t(call.d_v), 0.0);
    for (size_t j = 0; j < row.keys.size(); ++j) {
        for (int64_t c = 0; c < call.d_v; ++c) {
            const int64_t at = n * call.v.n + g * call.v.g + row.keys[j] * call.v.s + c * call.v.d;
            sums[size_t(c)] += row.weights[j] * load(call.dtype, call.v.data, at);
        }
    }
    return sums;
}

inline void write(const Statistics& to, int64_t at, const Row& row) {
    to.visible_keys[at] = int64_t(row.keys.size());
    to.max_key[at] = row.max_key;
    to.max_logit[at] = row.max_logit;
    to.logsumexp[at] = row.logsumexp;
    to.entropy[at] = row.entropy;
    to.tail_weight[at] = row.tail_weight;
    to.tail_p2[at] = row.tail_p2;
    to.tail_p3[at] = row.tail_p3;
    to.logit_mean[at] = row.logit_mean;
    to.logit_variance[at] = row.logit_variance;
    to.score_max[at] = row.score_max;
    to.score_variance[at] = row.score_variance;
    to.sink_weight[at] = row.sink_weight;
}

// Asked after every row whether to stop, as the kernel asks between tiles.
inline Status forward(const Forward& call) {
    int64_t at = 0;
    for (int64_t n = 0; n < call.batch; ++n) {
        for (int64_t g = 0; g < call.groups; ++g) {
            for (int64_t r = 0; r < call.shared; ++r) {
                for (int64_t i = 0; i < call.queries; ++i, ++at) {
                    const Row row = attend(call, n, g, r, i);
                    const std::vector<double> sums = weigh(call, row, n, g);
                    for (int64_t c = 0; c < call.d_v; ++c) {
                        store(call.dtype, call.output, at * call.d_v + c, sums[size_t(c)]);
                    }
                    if (call.statistics.visible_keys) {
                        write(call.statistics, at, row);
                    }
                    if (call.interrupted && call.interrupted(call.context)) {
                        return Status::interrupted;
                    }
                }
            }
        }
    }
    return Status::ok;
}

}  // namespace naive
}  // namespace sqrtdk
