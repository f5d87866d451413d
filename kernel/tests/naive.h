// The forward pass in plain loops over double: what the test programs compare the kernel with. Slow on purpose.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernel.h"

namespace sqrtdk::naive {

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

// Keys and values of one head, read once.
struct Head {
    std::vector<double> keys, values;  // [S][D], [S][V]
};

inline Head read_head(const Problem& call, int64_t n, int64_t g) {
    Head head;
    for (int64_t j = 0; j < call.keys; ++j) {
        for (int64_t d = 0; d < call.d_k; ++d) {
            head.keys.push_back(
                load(call.dtype, call.k.data, n * call.k.n + g * call.k.g + j * call.k.s + d * call.k.d));
        }
        for (int64_t c = 0; c < call.d_v; ++c) {
            head.values.push_back(
                load(call.dtype, call.v.data, n * call.v.n + g * call.v.g + j * call.v.s + c * call.v.d));
        }
    }
    return head;
}

// One row: what it sees and what follows from that.
struct Row {
    std::vector<int64_t> keys;
    std::vector<double> scores, logits, weights;
    std::vector<double> kept;                           // the weights that dropout leaves, grown
    std::vector<double> biases, magnitudes, key_sizes;  // what rounding is relative to: |scale| sum |q k|, sum |k|
    int64_t max_key = -1;
    double max_logit, logsumexp, entropy, tail_weight, tail_p2, tail_p3;
    double logit_mean, logit_variance, score_max, score_variance, sink_weight;
};

// NaN if one of the numbers is, as in NumPy. Mean and variance in a wider format, measured from the largest number.
inline void describe(const std::vector<double>& x, double* largest, double* mean, double* variance) {
    *largest = -std::numeric_limits<double>::infinity();
    *mean = *variance = std::numeric_limits<double>::quiet_NaN();
    for (double value : x) {
        *largest = std::isnan(*largest) || value <= *largest ? *largest : value;
    }
    if (x.empty() || !std::isfinite(*largest)) {
        return;
    }
    long double centre = 0.0L, square = 0.0L;
    for (double value : x) {
        centre += (static_cast<long double>(value) - *largest) / x.size();
    }
    for (double value : x) {
        const long double apart = static_cast<long double>(value) - *largest - centre;
        square += apart * apart / x.size();
    }
    *mean = double(*largest + centre);
    *variance = double(square);
}

inline bool sees(const Problem& call, int64_t n, int64_t g, int64_t r, int64_t i, int64_t j, double* bias) {
    const Mask& mask = call.mask;
    const Scale& slopes = call.alibi;
    *bias = slopes.data == nullptr
                ? 0.0
                : slopes.data[n * slopes.n + g * slopes.g + r * slopes.r + i * slopes.l] * double(j - i - call.offset);
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
    const double added = load(Dtype(int(mask.kind) - int(MaskKind::float16)), mask.data, at);
    *bias += added;
    return added != -std::numeric_limits<double>::infinity();
}

// The word that decides about one weight, in arithmetic modulo 2^32 on wider numbers.
inline uint64_t draw(uint64_t seed, uint64_t row, uint64_t key) {
    constexpr uint64_t words = uint64_t(1) << 32;
    const auto mix = [](uint64_t x) {
        x = (x ^ x >> 16) * 0x21f0aaad % words;
        x = (x ^ x >> 15) * 0x735a2d97 % words;
        return x ^ x >> 15;
    };
    const uint64_t low = seed % words, high = seed / words;
    const uint64_t one = mix(low ^ mix((high + 1) % words)), other = mix(high ^ mix((low + 1) % words));
    const uint64_t start = mix(row % words ^ mix(row / words ^ one)), twist = mix((start + other) % words);
    const uint64_t step = mix(twist ^ one) / 2 | 1;
    uint64_t x = (start + key * step) % words;
    x = (x ^ x >> 16) * 0x21f0aaad % words;
    return (x ^ x >> 15 ^ twist) * 0x735a2d97 % words;
}

// By what a weight that is kept is multiplied.
inline double growth(const Dropout& dropout) {
    return dropout.probability == 1.0 ? 0.0 : 1.0 / (1.0 - dropout.probability);
}

inline bool keeps(const Problem& call, int64_t n, int64_t g, int64_t r, int64_t i, int64_t j) {
    const int64_t row = ((n * call.groups + g) * call.shared + r) * call.queries + i;
    const double least = std::fmin(std::floor(std::ldexp(call.dropout.probability, 32)), 4294967295.0);
    return double(draw(uint64_t(call.dropout.seed), uint64_t(call.dropout.first_row + row), uint64_t(j))) >= least;
}

inline Row attend(const Problem& call, const Head& head, int64_t n, int64_t g, int64_t r, int64_t i) {
    Row row;
    const double scale = call.scale.data[n * call.scale.n + g * call.scale.g + r * call.scale.r + i * call.scale.l];
    std::vector<double> query;
    for (int64_t d = 0; d < call.d_k; ++d) {
        query.push_back(
            load(call.dtype, call.q.data, n * call.q.n + g * call.q.g + r * call.q.r + i * call.q.l + d * call.q.d));
    }
    for (int64_t j = 0; j < call.keys; ++j) {
        double bias;
        if (!sees(call, n, g, r, i, j, &bias)) {
            continue;
        }
        double product = 0.0, magnitude = 0.0, key_size = 0.0;
        for (int64_t d = 0; d < call.d_k; ++d) {
            const double term = query[size_t(d)] * head.keys[size_t(j * call.d_k + d)];
            product += term;
            magnitude += std::fabs(term);
            key_size += std::fabs(head.keys[size_t(j * call.d_k + d)]);
        }
        const double score = scale * product;
        row.keys.push_back(j);
        row.scores.push_back(score);
        row.logits.push_back((call.softcap > 0 ? call.softcap * std::tanh(score / call.softcap) : score) + bias);
        row.biases.push_back(bias);
        row.magnitudes.push_back(std::fabs(scale) * magnitude);
        row.key_sizes.push_back(key_size);
    }
    double unused;
    describe(row.logits, &row.max_logit, &row.logit_mean, &row.logit_variance);
    describe(row.scores, &row.score_max, &unused, &row.score_variance);
    // The first NaN if there is one, else the first of the largest.
    size_t top = 0;
    while (top < row.logits.size() && !std::isnan(row.logits[top])) {
        ++top;
    }
    if (top == row.logits.size()) {
        top = 0;
        while (top < row.logits.size() && row.logits[top] != row.max_logit) {
            ++top;
        }
    }
    const bool some = !row.keys.empty();
    const bool finite = some && std::isfinite(row.max_logit);
    // NaN where a visible logit is NaN or the largest is infinite.
    const double poison = some && !finite ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    long double rest = 0.0L, below = 0.0L, squares = 0.0L, cubes = 0.0L;
    for (size_t j = 0; finite && j < row.logits.size(); ++j) {
        const long double apart = static_cast<long double>(row.logits[j]) - row.max_logit;
        const long double e = std::isinf(row.logits[j]) ? 0.0L : std::exp(apart);
        if (j != top) {
            rest += e;
            below -= e > 0 ? e * apart : 0.0L;
            squares += e * e;
            cubes += e * e * e;
        }
    }
    const long double total = 1.0L + rest, log_total = std::log1p(rest);
    const double empty = -std::numeric_limits<double>::infinity();
    row.max_key = some ? row.keys[top] : -1;
    row.logsumexp = some ? (finite ? double(row.max_logit + log_total) : row.max_logit) : empty;
    row.entropy = some ? double(log_total + below / total) + poison : 0.0;
    row.tail_weight = some ? double(rest / total) + poison : 0.0;
    row.tail_p2 = some ? double(squares / total / total) + poison : 0.0;
    row.tail_p3 = some ? double(cubes / total / total / total) + poison : 0.0;
    row.sink_weight = 0.0;
    long double divisor = total;
    if (call.sinks) {
        const double sink = call.sinks[g * call.shared + r];
        row.sink_weight = double(1.0L / (1.0L + std::exp(static_cast<long double>(row.logsumexp) - sink)));
        divisor += finite ? std::exp(static_cast<long double>(sink) - row.max_logit) : 0.0L;
    }
    for (size_t j = 0; j < row.logits.size(); ++j) {
        const double logit = row.logits[j];
        const long double e =
            finite && std::isfinite(logit) ? std::exp(static_cast<long double>(logit) - row.max_logit) : 0.0L;
        row.weights.push_back(double(e / divisor) + poison);
        const bool kept = keeps(call, n, g, r, i, row.keys[j]);
        row.kept.push_back(kept ? row.weights[j] * growth(call.dropout) : 0.0);
    }
    return row;
}

inline std::vector<double> weigh(const Forward& call, const Head& head, const Row& row) {
    std::vector<double> sums;
    for (int64_t c = 0; c < call.d_v; ++c) {
        long double sum = 0.0L;
        for (size_t j = 0; j < row.keys.size(); ++j) {
            sum += static_cast<long double>(row.kept[j]) * head.values[size_t(row.keys[j] * call.d_v + c)];
        }
        sums.push_back(double(sum));
    }
    return sums;
}

}  // namespace sqrtdk::naive
