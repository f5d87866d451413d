// Random calls of forward() on every level that runs here, against plain loops over double: shapes that hit the tails,
// any strides, masks, ranges, features and dtypes. Every array has an allocation of its own that ends with its last
// element, so that a sanitizer sees the first byte read beyond it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "random_call.h"

using namespace sqrtdk;

namespace {

struct Results {
    std::vector<char> output;
    std::vector<int64_t> counts;
    std::vector<double> numbers;

    Results(const Forward& call, bool statistics) {
        const int64_t rows = call.batch * call.groups * call.shared * call.queries;
        output.assign(size_t(rows * call.d_v * bytes_of(call.dtype)), 0x55);
        if (statistics) {
            counts.assign(size_t(2 * rows), -7);
            numbers.assign(size_t(11 * rows), -7.0);
        }
    }

    void attach(Forward& call) {
        const size_t rows = size_t(call.batch * call.groups * call.shared * call.queries);
        call.output = output.data();
        call.statistics = {};
        if (counts.empty()) return;
        double* x = numbers.data();
        call.statistics = {counts.data(), counts.data() + rows, x,            x + rows,     x + 2 * rows,
                           x + 3 * rows,  x + 4 * rows,         x + 5 * rows, x + 6 * rows, x + 7 * rows,
                           x + 8 * rows,  x + 9 * rows,         x + 10 * rows};
    }
};

bool same_bits(const Results& one, const Results& other) {
    return one.output == other.output &&
           std::memcmp(one.numbers.data(), other.numbers.data(), one.numbers.size() * sizeof(double)) == 0 &&
           one.counts == other.counts;
}

bool close(double found, double expected, double tolerance) {
    if (std::isnan(expected)) return std::isnan(found);
    if (std::isinf(expected)) return found == expected;
    return std::fabs(found - expected) <= tolerance;
}

// The first thing in which a row differs from its definition, or null.
const char* compare_row(const Forward& call, const Results& found, int64_t at, const naive::Row& row,
                        const std::vector<double>& values) {
    const int64_t rows = call.batch * call.groups * call.shared * call.queries;
    const double unit = call.dtype == Dtype::float64 ? 2.3e-16 : 1.2e-7;
    const double rounding = call.dtype == Dtype::float16 ? 1e-3 : call.dtype == Dtype::bfloat16 ? 8e-3 : unit;
    double largest = 1.0;
    for (double logit : row.logits) largest = std::fmax(largest, std::fabs(logit));
    for (double score : row.scores) largest = std::fmax(largest, std::fabs(score));
    // Logits carry the rounding of a product of d_k terms; everything else follows from them.
    const double logits = unit * (8.0 * largest + 4.0 * std::sqrt(double(call.d_k)));
    for (int64_t c = 0; c < call.d_v; ++c) {
        const double output = naive::load(call.dtype, found.output.data(), at * call.d_v + c);
        const double expected = values[size_t(c)];
        if (!close(output, expected, 16.0 * logits + 2.0 * rounding * (1e-3 + std::fabs(expected)))) return "output";
    }
    if (found.counts.empty()) return nullptr;
    if (found.counts[size_t(at)] != int64_t(row.keys.size())) return "visible_keys";
    const int64_t top = found.counts[size_t(rows + at)];
    if (row.keys.empty()) {
        if (top != -1) return "max_key";
    } else {
        const auto key = std::find(row.keys.begin(), row.keys.end(), top);
        if (key == row.keys.end()) return "max_key";
        if (!close(row.logits[size_t(key - row.keys.begin())], row.max_logit, 2.0 * logits)) return "max_key";
    }
    const auto number = [&](int field) { return found.numbers[size_t(field * rows + at)]; };
    const double spread = 4.0 * logits * (1.0 + largest);
    if (!close(number(0), row.max_logit, 2.0 * logits)) return "max_logit";
    if (!close(number(1), row.logsumexp, 4.0 * logits)) return "logsumexp";
    if (!close(number(2), row.entropy, 4.0 * spread)) return "entropy";
    if (!close(number(3), row.tail_weight, 8.0 * logits)) return "tail_weight";
    if (!close(number(4), row.tail_p2, 8.0 * logits)) return "tail_p2";
    if (!close(number(5), row.tail_p3, 8.0 * logits)) return "tail_p3";
    if (!close(number(6), row.logit_mean, 4.0 * logits)) return "logit_mean";
    if (!close(number(7), row.logit_variance, 4.0 * spread)) return "logit_variance";
    if (!close(number(8), row.score_max, 2.0 * logits)) return "score_max";
    if (!close(number(9), row.score_variance, 4.0 * spread)) return "score_variance";
    if (!close(number(10), row.sink_weight, 8.0 * logits)) return "sink_weight";
    return nullptr;
}

const char* compare(const Forward& call, const Results& found) {
    int64_t at = 0;
    for (int64_t n = 0; n < call.batch; ++n)
        for (int64_t g = 0; g < call.groups; ++g)
            for (int64_t r = 0; r < call.shared; ++r)
                for (int64_t i = 0; i < call.queries; ++i, ++at) {
                    const naive::Row row = naive::attend(call, n, g, r, i);
                    const std::vector<double> values = naive::weigh(call, row, n, g);
                    if (const char* wrong = compare_row(call, found, at, row, values)) return wrong;
                }
    return nullptr;
}

const char* check(Case& test, const char* level) {
    Forward& call = test.call;
    Results alone(call, true), crowd(call, true), bare(call, false);
    alone.attach(call);
    if (forward(call, level) != Status::ok) return "status";
    if (const char* wrong = compare(call, alone)) return wrong;
    call.threads = 3;
    crowd.attach(call);
    if (forward(call, level) != Status::ok) return "status with threads";
    if (!same_bits(alone, crowd)) return "bits with threads";
    bare.attach(call);
    if (forward(call, level) != Status::ok) return "status without statistics";
    return bare.output == alone.output ? nullptr : "bits without statistics";
}

bool stops(Random& random, const char* level) {
    Case test(random);
    Results results(test.call, true);
    results.attach(test.call);
    test.call.threads = 2;
    test.call.interrupted = [](void*) { return true; };
    const Status status = forward(test.call, level);  // a call that ends before it is asked is complete
    return status == Status::interrupted || status == Status::ok;
}

}  // namespace

int main(int argc, char** argv) {
    const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
    int count = 0, failures = 0;
    const Level* all = levels(&count);
    for (int i = 0; i < count; ++i) {
        if (!all[i].runs_here) {
            std::printf("%s: does not run here\n", all[i].name);
            continue;
        }
        Random random(20260);
        int wrong = 0;
        for (int test = 0; test < cases; ++test) {
            Case drawn(random);
            if (const char* what = check(drawn, all[i].name)) {
                ++wrong;
                std::printf("%s, case %d: %s\n", all[i].name, test, what);
                print(drawn);
            }
        }
        wrong += !stops(random, all[i].name);
        std::printf("%s: %d calls, %d wrong\n", all[i].name, cases, wrong);
        failures += wrong;
    }
    Forward nothing = {};
    if (forward(nothing, "no such level") != Status::unknown_level) {
        std::printf("an unknown level is not refused\n");
        ++failures;
    }
    return failures != 0;
}
