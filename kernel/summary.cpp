// Summaries of row statistics per head: moments, histograms and the most attended keys, in one pass over the rows.
//
// The definition is summary/heads.py in NumPy; the formulas below are those of AttentionStatistics, in the same order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernel.h"

namespace sqrtdk {
namespace {

constexpr int lanes = 8;  // partial sums, so that the compiler may use vectors; their order is fixed
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

// Both give NaN if x is NaN.
double at_least(double x, double bound) { return x < bound ? bound : x; }
double at_most(double x, double bound) { return x > bound ? bound : x; }

// The statistics of one row. A row that sees nothing has only `visible_keys`.
struct Row {
#define SQRTDK_FIELD(name) double name;
    SQRTDK_SUMMARISED(SQRTDK_FIELD)
#undef SQRTDK_FIELD

    Row(const Statistics& rows, int64_t at, double log_n) {
        const int64_t n = rows.visible_keys[at];
        const double keys = double(n), uniform = n > 1 ? 1.0 / keys : 1.0;
        const double tail = rows.tail_weight[at], p2 = rows.tail_p2[at], p3 = rows.tail_p3[at];
        entropy = rows.entropy[at];
        entropy_ratio = n > 1 ? entropy / log_n : nan;
        saturation_index = n > 1 ? std::sqrt(rows.logit_variance[at]) / std::sqrt(2.0 * log_n) : nan;
        max_weight = at_least(1.0 - tail, uniform);
        const double a2 = max_weight * max_weight;
        sum_p2 = at_least(a2 + p2, uniform);
        effective_keys = at_most(1.0 / sum_p2, keys);
        jacobian_trace = at_most(tail * (2.0 - tail) - p2, 1.0 - uniform);
        jacobian_norm = std::sqrt(at_least(a2 * (tail * tail) + p2 * (1.0 + 2.0 * a2) - 2.0 * p3 + p2 * p2, 0.0));
        max_logit = rows.max_logit[at];
        logit_mean = rows.logit_mean[at];
        logit_variance = rows.logit_variance[at];
        score_max = rows.score_max[at];
        score_variance = rows.score_variance[at];
        sink_weight = rows.sink_weight[at];
        visible_keys = keys;
    }
};

// Counts the finite values [n] of one statistic and head into the results of group `group`.
class Groups {
  public:
    explicit Groups(const Summary& call) : call_(call), numbers_(2 * size_t(call.bins), 0) { call.ends[0] = 0; }

    void add(int64_t group, const double* values, int64_t n) {
        double sum[lanes] = {}, least = infinity, largest = -infinity;
        double low[lanes], high[lanes];
        std::fill(low, low + lanes, infinity);
        std::fill(high, high + lanes, -infinity);
        each(values, n, [&](int lane, double x) {
            sum[lane] += x;
            low[lane] = x < low[lane] ? x : low[lane];
            high[lane] = x > high[lane] ? x : high[lane];
        });
        for (int lane = 0; lane < lanes; ++lane) {
            least = std::min(least, low[lane]);
            largest = std::max(largest, high[lane]);
        }
        const double mean = n == 0 ? nan : least == largest ? least : add_up(sum) / double(n);
        double square[lanes] = {};
        if (least < largest) {
            each(values, n, [&](int lane, double x) { square[lane] += (x - mean) * (x - mean); });
        }
        call_.count[group] = n;
        call_.mean[group] = mean;
        call_.m2[group] = add_up(square);
        call_.least[group] = least;
        call_.largest[group] = largest;
        call_.ends[group + 1] = n == 0 ? call_.ends[group] : write_bins(call_.ends[group], values, n, least, largest);
    }

  private:
    template <class Use>
    static void each(const double* values, int64_t n, const Use& use) {
        int64_t at = 0;
        for (; at + lanes <= n; at += lanes) {
            for (int lane = 0; lane < lanes; ++lane) {
                use(lane, values[at + lane]);
            }
        }
        for (int lane = 0; at < n; ++at, ++lane) {
            use(lane, values[at]);
        }
    }

    static double add_up(const double (&part)[lanes]) {
        return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }

    int64_t find_bin(double x) const {
        const float rounded = float(x);
        uint32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        const int64_t bin = call_.edges_below[bits >> 16];
        return bin + (call_.next_edge[bin] <= x);
    }

    // Appends the bins that are not empty, and returns the end of all entries. Bins are in the order of their numbers.
    int64_t write_bins(int64_t to, const double* values, int64_t n, double least, double largest) {
        const int64_t first = find_bin(least), last = find_bin(largest);
        // Neighbours often share a bin: two counters in turn, for one would wait for itself.
        int32_t* const counters[2] = {numbers_.data(), numbers_.data() + call_.bins};
        for (int64_t i = 0; i < n; ++i) {
            ++counters[i % 2][find_bin(values[i])];
        }
        for (int64_t bin = first; bin <= last; ++bin) {
            const int64_t number = int64_t(counters[0][bin]) + counters[1][bin];
            if (number) {
                call_.filled[to] = int16_t(bin);
                call_.numbers[to++] = number;
                counters[0][bin] = counters[1][bin] = 0;
            }
        }
        return to;
    }

    const Summary& call_;
    std::vector<int32_t> numbers_;  // [2, bins]
};

// Most attended keys of one head: offsets from the query's own position, and the share of the commonest key.
class MaxKeys {
  public:
    explicit MaxKeys(const Summary& call) : call_(call), times_(size_t(call.keys), 0) {}

    void add(int64_t head) {
        const int64_t offsets = 2 * call_.farthest + 3;
        int64_t* const to = call_.offsets + head * offsets;
        std::fill(to, to + offsets, 0);
        call_.share_sum[head] = 0;
        call_.sequences[head] = 0;
        for (int64_t sequence = 0; sequence < call_.batch; ++sequence) {
            add_sequence(head, sequence, to);
        }
    }

  private:
    template <class Use>
    void each_key(int64_t head, int64_t sequence, const Use& use) const {
        const int64_t first = (sequence * call_.heads + head) * call_.queries, place = sequence * call_.queries;
        for (int64_t query = 0; query < call_.queries; ++query) {
            const int64_t key = call_.rows.max_key[first + query];
            const bool is_present = !call_.present || call_.present[place + query];
            if (is_present && key >= 0 && std::isfinite(call_.rows.entropy[first + query])) {
                use(key, place + query);
            }
        }
    }

    void add_sequence(int64_t head, int64_t sequence, int64_t* offsets) {
        const int64_t far = call_.farthest + 1;
        int64_t rows = 0, commonest = 0;
        each_key(head, sequence, [&](int64_t key, int64_t place) {
            ++rows;
            commonest = std::max(commonest, ++times_[size_t(key)]);
            if (call_.positions) {
                ++offsets[std::min(std::max(key - call_.positions[place], -far), far) + far];
            }
        });
        each_key(head, sequence, [&](int64_t key, int64_t) { times_[size_t(key)] = 0; });
        if (rows > 1) {
            call_.share_sum[head] += double(commonest) / double(rows);
            ++call_.sequences[head];
        }
    }

    const Summary& call_;
    std::vector<int64_t> times_;
};

// ln n of every row [B, H, L]. Most rows see as many keys as the same row of the head before.
std::vector<double> take_logarithms(const Summary& call) {
    const int64_t* const n = call.rows.visible_keys;
    std::vector<double> logarithms(size_t(call.batch * call.heads * call.queries));
    for (int64_t at = 0; at < int64_t(logarithms.size()); ++at) {
        const int64_t before = at - call.queries;
        logarithms[size_t(at)] =
            before >= 0 && n[at] == n[before] ? logarithms[size_t(before)] : std::log(double(n[at]));
    }
    return logarithms;
}

// Writes the finite values of one statistic of one head, and returns their number.
template <double Row::* statistic>
int64_t collect(const Summary& call, const std::vector<double>& logarithms, int64_t head, double* values) {
    int64_t number = 0;
    for (int64_t sequence = 0; sequence < call.batch; ++sequence) {
        const int64_t first = (sequence * call.heads + head) * call.queries;
        for (int64_t query = 0; query < call.queries; ++query) {
            const int64_t at = first + query;
            const double x = Row(call.rows, at, logarithms[size_t(at)]).*statistic;
            const bool is_known = statistic == &Row::visible_keys || call.rows.visible_keys[at] > 0;
            const bool is_present = !call.present || call.present[sequence * call.queries + query];
            values[number] = x;
            number += is_known && is_present && x - x == 0.0;
        }
    }
    return number;
}

void run(const Summary& call) {
    const std::vector<double> logarithms = take_logarithms(call);
    std::vector<double> values(size_t(call.batch * call.queries) + 1);
    Groups groups(call);
    int64_t group = 0;
#define SQRTDK_ADD(name)                                                                   \
    for (int64_t head = 0; head < call.heads; ++head) {                                    \
        const int64_t number = collect<&Row::name>(call, logarithms, head, values.data()); \
        groups.add(group++, values.data(), number);                                        \
    }
    SQRTDK_SUMMARISED(SQRTDK_ADD)
#undef SQRTDK_ADD
    MaxKeys keys(call);
    for (int64_t head = 0; head < call.heads; ++head) {
        keys.add(head);
    }
}

}  // namespace

Status summarise(const Summary& call) {
    try {
        run(call);
    } catch (const std::bad_alloc&) {
        return Status::out_of_memory;
    }
    return Status::ok;
}

}  // namespace sqrtdk
