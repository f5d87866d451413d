// Bounds on the distance of a result of the kernel from the plain loops: what the rounding of its logits explains.
#pragma once

#include <cmath>
#include <cstring>

#include "naive.h"
#include "random_call.h"

namespace sqrtdk {

// Half an ulp of 1 and the smallest normal and denormal number of the precision that a dtype is computed in.
struct Precision {
    double unit, normal, denormal;
};

inline Precision working_precision(Dtype dtype) {
    return dtype == Dtype::float64 ? Precision{0x1p-53, 0x1p-1022, 0x1p-1074} : Precision{0x1p-24, 0x1p-126, 0x1p-149};
}

// The error that the score and the logit of one visible key may have.
struct KeyError {
    double score, logit;
};

inline KeyError error_of(const Forward& call, const naive::Row& row, size_t j, bool exact, bool in_pairs) {
    const Precision working = working_precision(call.dtype);
    if (!std::isfinite(row.logits[j])) return {0.0, 0.0};
    KeyError error{};
    if (!exact) {
        error.score = working.unit * (4.0 * std::sqrt(double(call.d_k)) + 8.0) * row.magnitudes[j] +
                      (in_pairs ? working.normal : working.denormal) * (row.key_sizes[j] + double(call.d_k));
    }
    error.logit = error.score;
    if (call.softcap > 0)
        error.logit += 8.0 * working.unit * std::fmin(std::fabs(row.scores[j]), call.softcap) +
                       working.denormal * (1.0 + call.softcap);
    if (row.biases[j] != 0.0)
        error.logit += 2.0 * working.unit * (std::fabs(row.biases[j]) + std::fabs(row.logits[j] - row.biases[j]));
    return error;
}

// Something in which a result differs from what it must be; nothing if `what` is null.
struct Fault {
    const char* what = nullptr;
    int64_t row = -1;
    double number = NAN, expected = NAN, tolerance = NAN;
};

// Products of pairs take weights that are rounded to bfloat16, and numbers below the smallest normal one as 0.
inline bool takes_pairs(const Problem& call, const char* level) {
    return call.dtype == Dtype::bfloat16 && std::strcmp(level, "avx512_bf16") == 0;
}

class RowComparison {
  public:
    RowComparison(const Forward& call, const naive::Head& head, const naive::Row& row, bool exact, bool in_pairs)
        : call_(call), head_(head), row_(row), working_(working_precision(call.dtype)), in_pairs_(in_pairs) {
        for (size_t j = 0; j < row.keys.size(); ++j) {
            const KeyError error = error_of(call, row, j, exact, in_pairs);
            // Products beyond float64: NaN or infinite by the order of the sum.
            if (std::isinf(row.magnitudes[j]) && std::isfinite(row.scores[j])) unclear_ = true;
            if (std::isinf(error.logit) || std::isinf(error.score)) unclear_ = true;
            all_logits_ = std::fmax(all_logits_, error.logit);
            all_scores_ = std::fmax(all_scores_, error.score);
            if (std::isfinite(row.logits[j])) largest_ = std::fmax(largest_, std::fabs(row.logits[j]));
            if (std::isfinite(row.scores[j])) largest_score_ = std::fmax(largest_score_, std::fabs(row.scores[j]));
            top_error_ = row.keys[j] == row.max_key ? error.logit : top_error_;
        }
        // The distance of a sink is rounded, and exp makes that a relative error.
        for (int64_t i = 0; call.sinks != nullptr && i < call.groups * call.shared; ++i)
            sink_error_ = std::fmin(1.0, std::fmax(sink_error_, 0x1p-52 * (std::fabs(call.sinks[i]) + largest_)));
        for (size_t j = 0; j < row.keys.size(); ++j) {
            const KeyError error = error_of(call, row, j, exact, in_pairs);
            if (!(row.logits[j] + error.logit >= row.max_logit - top_error_ - 800.0)) continue;
            logits_ = std::fmax(logits_, error.logit);
            if (row.weights[j] > 0) below_ = std::fmax(below_, row.max_logit - row.logits[j]);
        }
    }

    // The first thing in which the row at this place differs from its definition.
    Fault check(const Results& results, int64_t at) const {
        Fault fault;
        if (!unclear_) fault = check_output(results, at);
        if (!unclear_ && fault.what == nullptr && !results.counts.empty()) fault = check_statistics(results, at);
        fault.row = at;
        return fault;
    }

  private:
    // Logits so uncertain that the weights are anybody's guess: only bounds can be checked.
    bool is_guess() const { return logits_ > 1e-3; }

    // Relative error of exp and of a sum of that many weights.
    double sums() const { return working_.unit * (16.0 + 4.0 * std::sqrt(double(row_.keys.size()))); }

    static bool close(double number, double expected, double tolerance) {
        if (std::isnan(expected)) return std::isnan(number);
        if (std::isinf(expected)) return number == expected;
        return std::fabs(number - expected) <= tolerance;
    }

    Fault check_output(const Results& results, int64_t at) const {
        const double largest = largest_of(call_.dtype), keys = double(row_.keys.size());
        const double rounding = call_.dtype == Dtype::float16    ? 0x1p-11
                                : call_.dtype == Dtype::bfloat16 ? 0x1p-8
                                                                 : working_.unit;
        const double denormal = call_.dtype == Dtype::float16    ? 0x1p-24
                                : call_.dtype == Dtype::bfloat16 ? 0x1p-133
                                                                 : working_.denormal;
        const double growth = std::fmax(1.0, naive::growth(call_.dropout));
        const std::vector<double> values = naive::weigh(call_, head_, row_);
        for (int64_t c = 0; c < call_.d_v; ++c) {
            const double output = naive::load(call_.dtype, results.output.data(), at * call_.d_v + c);
            long double reach = 0.0L;
            double size = 0.0, expected = values[size_t(c)];
            for (size_t j = 0; j < row_.keys.size(); ++j) {
                const double value = std::fabs(head_.values[size_t(row_.keys[j] * call_.d_v + c)]);
                if (!std::isfinite(value)) continue;
                reach += static_cast<long double>(row_.kept[j]) * value;
                size = std::fmax(size, value);
            }
            if (std::isfinite(expected) && std::fabs(expected) > 0.999 * largest)
                continue;  // rounds to infinity or not
            const double floor = growth * keys * (working_.normal * size + working_.denormal) + denormal;
            double tolerance = double(reach) * (4.0 * logits_ + 2.0 * sums() + sink_error_);
            if (in_pairs_) tolerance += 1.01 * 0x1p-8 * double(reach) + growth * keys * working_.normal;
            tolerance += rounding * std::fabs(expected) + floor;
            if (is_guess()) tolerance = 2.001 * growth * size + denormal;
            if (!close(output, expected, tolerance)) return {"output", at, output, expected, tolerance};
        }
        return {};
    }

    Fault check_statistics(const Results& results, int64_t at) const {
        const size_t rows = results.counts.size() / 2;
        if (results.counts[size_t(at)] != int64_t(row_.keys.size())) return {"visible_keys"};
        const int64_t key = results.counts[rows + size_t(at)];
        if (!is_top(key)) return {"max_key", at, double(key), double(row_.max_key), logits_};
        // Relative errors: of a weight, and of its powers.
        const double weight = 4.0 * logits_ + sums(), lost = double(row_.keys.size()) * working_.normal;
        const double tiny = double(row_.keys.size()) * working_.denormal;
        const double entropy = weight * (row_.entropy + row_.tail_weight * (1.0 + below_)) + 1000.0 * lost;
        const struct {
            const char* name;
            double expected, tolerance;
            bool of_weights;
        } fields[] = {
            {"max_logit", row_.max_logit, 2.0 * logits_, false},
            {"logsumexp", row_.logsumexp, 4.0 * logits_ + 2.0 * sums() * row_.tail_weight + 1e-15 * largest_ + tiny,
             false},
            {"entropy", row_.entropy, entropy, true},
            {"tail_weight", row_.tail_weight, weight * row_.tail_weight + lost, true},
            {"tail_p2", row_.tail_p2, 2.0 * weight * row_.tail_p2 + lost * lost, true},
            {"tail_p3", row_.tail_p3, 3.0 * weight * row_.tail_p3 + lost * lost * lost, true},
            {"logit_mean", row_.logit_mean, 2.0 * all_logits_ + 4.0 * sums() * largest_ + tiny, false},
            {"logit_variance", row_.logit_variance, of_variance(row_.logit_variance, all_logits_, largest_), false},
            {"score_max", row_.score_max, 2.0 * all_scores_, false},
            {"score_variance", row_.score_variance, of_variance(row_.score_variance, all_scores_, largest_score_),
             false},
            {"sink_weight", row_.sink_weight, row_.sink_weight * (weight + sink_error_) + 0x1p-1022, true},
        };
        for (size_t field = 0; field < 11; ++field) {
            const auto& [name, expected, tolerance, of_weights] = fields[field];
            const double number = results.numbers[field * rows + size_t(at)];
            if (of_weights && is_guess()) continue;
            if (!close(number, expected, tolerance)) return {name, at, number, expected, tolerance};
        }
        return {};
    }

    // The first of the largest logits; among those that rounding may have put in front.
    bool is_top(int64_t key) const {
        if (logits_ == 0.0 || row_.keys.empty() || !std::isfinite(row_.max_logit)) return key == row_.max_key;
        for (size_t j = 0; j < row_.keys.size(); ++j)
            if (row_.keys[j] == key) return row_.logits[j] >= row_.max_logit - 2.0 * logits_;
        return false;
    }

    double of_variance(double expected, double error, double largest) const {
        const double tolerance = 4.0 * error * (std::sqrt(expected) + error) + 256.0 * working_.unit * expected;
        // Squares below the smallest normal number are lost; those of numbers an ulp apart are rounded with their mean.
        const double ulp = working_.unit * working_.unit * largest * largest * 1e-6;
        return tolerance + ulp + 64.0 * working_.normal;
    }

    const Forward& call_;
    const naive::Head& head_;
    const naive::Row& row_;
    const Precision working_;
    double logits_ = 0.0, all_logits_ = 0.0, all_scores_ = 0.0, top_error_ = 0.0;
    double largest_ = 0.0, largest_score_ = 0.0, below_ = 0.0, sink_error_ = 0.0;
    bool unclear_ = false;
    const bool in_pairs_;
};

}  // namespace sqrtdk
