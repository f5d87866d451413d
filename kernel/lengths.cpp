// Sums of query lengths and key spread per head. The definition is read_causes in score_sums.py, in torch.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <new>
#include <vector>

#include "kernel.h"

namespace sqrtdk {
namespace {

constexpr int lanes = 8;  // partial sums, so that the compiler may use vectors; their order is fixed

// The sum of squares of n numbers, each less by its mean.
template <class T>
double sum_squares(const T* x, const double* mean, int64_t n) {
    double part[lanes] = {};
    int64_t at = 0;
    for (; at + lanes <= n; at += lanes) {
        for (int lane = 0; lane < lanes; ++lane) {
            const double apart = double(x[at + lane]) - mean[at + lane];
            part[lane] += apart * apart;
        }
    }
    for (; at < n; ++at) {
        part[0] += (double(x[at]) - mean[at]) * (double(x[at]) - mean[at]);
    }
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <class T>
bool run(const Lengths& call) {
    const int64_t heads = call.heads, shared = heads / call.groups;
    const std::vector<double> zero(size_t(call.d_k), 0.0);
    std::vector<double> mean(size_t(call.d_k));
    double* const sums = call.sums;
    std::fill(sums, sums + 6 * heads, 0.0);
    for (int64_t n = 0; n < call.batch; ++n) {
        for (int64_t head = 0; head < heads; ++head) {
            const T* const q = static_cast<const T*>(call.q.data) + n * call.q.n + head * call.q.g;
            double length = 0, square = 0;
            for (int64_t i = 0; i < call.queries; ++i) {
                const double own = sum_squares(q + i * call.q.s, zero.data(), call.d_k);
                length += std::sqrt(own);
                square += own;
            }
            sums[1 * heads + head] += length;
            sums[2 * heads + head] += square * call.scale * call.scale;
        }
        for (int64_t group = 0; group < call.groups; ++group) {
            const T* const k = static_cast<const T*>(call.k.data) + n * call.k.n + group * call.k.g;
            std::fill(mean.begin(), mean.end(), 0.0);
            for (int64_t j = 0; j < call.keys; ++j) {
                const T* const key = k + j * call.k.s;
                for (int64_t d = 0; d < call.d_k; ++d) {
                    mean[size_t(d)] += double(key[d]);
                }
            }
            for (double& one : mean) {
                one /= double(call.keys);
            }
            double spread = 0;
            for (int64_t j = 0; j < call.keys; ++j) {
                spread += sum_squares(k + j * call.k.s, mean.data(), call.d_k);
            }
            spread /= double(call.keys);
            const double square = spread + sum_squares(mean.data(), zero.data(), call.d_k);
            for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
                sums[4 * heads + head] += spread / call.width;
                sums[5 * heads + head] += square / call.width;
            }
        }
    }
    bool is_finite = true;
    for (int64_t head = 0; head < heads; ++head) {
        sums[head] = double(call.batch * call.queries);
        sums[3 * heads + head] = double(call.batch);
        for (int64_t row = 1; row < 6; ++row) {
            is_finite = is_finite && std::isfinite(sums[row * heads + head]);
        }
    }
    return is_finite;
}

}  // namespace

bool add_up_lengths(const Lengths& call) { return call.dtype == Dtype::float64 ? run<double>(call) : run<float>(call); }

}  // namespace sqrtdk
