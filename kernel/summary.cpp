// Summaries of row statistics per head: moments, histograms and the most attended keys, in one pass over the rows.
//
// The definition is summary/heads.py in NumPy; the formulas below are those of AttentionStatistics, in the same order.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernel.h"
#include "pool/pool.h"

namespace sqrtdk {
namespace {

constexpr int lanes = 8, pairs = lanes / 2;  // partial sums, so that there may be vectors; their order is fixed
using Pair __attribute__((vector_size(16))) = double;  // of every 64-bit CPU
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

// Both give NaN if x is NaN.
double at_least(double x, double bound) { return x < bound ? bound : x; }
double at_most(double x, double bound) { return x > bound ? bound : x; }

#define SQRTDK_INDEX(name) at_##name,
enum : int { SQRTDK_SUMMARISED(SQRTDK_INDEX) statistics };
#undef SQRTDK_INDEX

// Numbers of a row that follow from how many keys it sees. Most rows see as many as the same row of the head before.
struct Visible {
    std::vector<double> keys, log_n, root, uniform;  // n; ln n and sqrt(2 ln n), NaN up to 1; 1/n

    explicit Visible(size_t rows) : keys(rows, -1.0), log_n(rows), root(rows), uniform(rows) {}

    void set(size_t at, double n) {
        if (keys[at] == n) {
            return;
        }
        const bool is_repeated = at > 0 && keys[at - 1] == n;
        keys[at] = n;
        log_n[at] = is_repeated ? log_n[at - 1] : n > 1 ? std::log(n) : nan;
        root[at] = is_repeated ? root[at - 1] : std::sqrt(2.0 * log_n[at]);
        uniform[at] = n > 1 ? 1.0 / n : 1.0;
    }
};

// The statistics of one head, one after another, into the results of each.
class Groups {
  public:
    explicit Groups(const Summary& call)
        : call_(call),
          rows_(call.batch * call.queries),
          most_(std::min(rows_, call.bins)),
          visible_(size_t(rows_)),
          step_(rows_ + lanes),
          values_(size_t(statistics * step_)),
          numbers_(counters * size_t(call.bins), 0) {}

    void add(int64_t head) {
        sees_all_ = true;
        for (int64_t sequence = 0; sequence < call_.batch; ++sequence) {
            const int64_t first = (sequence * call_.heads + head) * call_.queries, place = sequence * call_.queries;
            for (int64_t query = 0; query < call_.queries; ++query) {
                const int64_t n = call_.rows.visible_keys[first + query];
                visible_.set(size_t(place + query), double(n));
                sees_all_ = sees_all_ && n > 0;
            }
            describe(first, place);
        }
        for (int statistic = 0; statistic < statistics; ++statistic) {
            const int twin = find_twin(statistic, head);
            const int64_t group = statistic * call_.heads + head;
            if (twin != statistic) {
                repeat(group, twin * call_.heads + head);
            } else {
                add_statistic(group, statistic, values_.data() + statistic * step_);
            }
        }
    }

    // After all heads: the entries of all groups one after another.
    static void pack(const Summary& call) {
        const int64_t most = std::min(call.batch * call.queries, call.bins);
        call.ends[0] = 0;
        for (int64_t group = 0; group < statistics * call.heads; ++group) {
            const int64_t to = call.ends[group], entries = call.ends[group + 1];
            std::copy_n(call.filled + group * most, entries, call.filled + to);
            std::copy_n(call.numbers + group * most, entries, call.numbers + to);
            call.ends[group + 1] = to + entries;
        }
    }

  private:
    static constexpr int counters = 4;

    // All statistics of the rows of a sequence, which begin at `first`, to their place among the head's.
    void describe(int64_t first, int64_t place) {
        const Statistics& rows = call_.rows;
        const auto to = [&](int statistic) { return values_.data() + statistic * step_ + place; };
#define SQRTDK_COPY(name) std::copy_n(rows.name + first, call_.queries, to(at_##name));
        SQRTDK_COPY(entropy)
        SQRTDK_COPY(max_logit)
        SQRTDK_COPY(logit_mean)
        SQRTDK_COPY(logit_variance)
        SQRTDK_COPY(score_max)
        SQRTDK_COPY(score_variance)
        SQRTDK_COPY(sink_weight)
#undef SQRTDK_COPY
        const double *const keys = visible_.keys.data() + place, *const uniform = visible_.uniform.data() + place;
        const double *const log_n = visible_.log_n.data() + place, *const root = visible_.root.data() + place;
        const double *const entropy = to(at_entropy), *const variance = to(at_logit_variance);
        const double *const tails = rows.tail_weight + first, *const tails2 = rows.tail_p2 + first;
        const double* const tails3 = rows.tail_p3 + first;
        double *const ratio = to(at_entropy_ratio), *const saturation = to(at_saturation_index);
        double *const weight = to(at_max_weight), *const effective = to(at_effective_keys), *const p2s = to(at_sum_p2);
        double *const trace = to(at_jacobian_trace), *const norm = to(at_jacobian_norm);
        std::copy_n(keys, call_.queries, to(at_visible_keys));
#pragma GCC ivdep
        for (int64_t i = 0; i < call_.queries; ++i) {
            ratio[i] = entropy[i] / log_n[i];
            saturation[i] = std::sqrt(variance[i]) / root[i];
        }
#pragma GCC ivdep
        for (int64_t i = 0; i < call_.queries; ++i) {
            const double tail = tails[i], p2 = tails2[i], p3 = tails3[i], least = uniform[i];
            const double max_weight = at_least(1.0 - tail, least), a2 = max_weight * max_weight;
            const double sum_p2 = at_least(a2 + p2, least);
            const double square = a2 * (tail * tail) + p2 * (1.0 + 2.0 * a2) - 2.0 * p3 + p2 * p2;
            weight[i] = max_weight;
            p2s[i] = sum_p2;
            effective[i] = at_most(1.0 / sum_p2, keys[i]);
            trace[i] = at_most(tail * (2.0 - tail) - p2, 1.0 - least);
            norm[i] = std::sqrt(at_least(square, 0.0));
        }
    }

    // A statistic before this one that has the same numbers, as those of scores and logits mostly are; or itself.
    int find_twin(int statistic, int64_t head) const {
        const Statistics& rows = call_.rows;
        if (statistic == at_score_max && is_same(head, rows.score_max, rows.max_logit)) {
            return at_max_logit;
        }
        if (statistic == at_score_variance && is_same(head, rows.score_variance, rows.logit_variance)) {
            return at_logit_variance;
        }
        return statistic;
    }

    bool is_same(int64_t head, const double* one, const double* other) const {
        bool same = true;
        for (int64_t sequence = 0; sequence < call_.batch && same; ++sequence) {
            const int64_t first = (sequence * call_.heads + head) * call_.queries;
            const size_t bytes = size_t(call_.queries) * sizeof(double);
            same = bytes == 0 || std::memcmp(one + first, other + first, bytes) == 0;
        }
        return same;
    }

    void repeat(int64_t group, int64_t of) {
        call_.count[group] = call_.count[of];
        call_.mean[group] = call_.mean[of];
        call_.m2[group] = call_.m2[of];
        call_.least[group] = call_.least[of];
        call_.largest[group] = call_.largest[of];
        const int64_t entries = call_.ends[group + 1] = call_.ends[of + 1];
        std::copy_n(call_.filled + of * most_, entries, call_.filled + group * most_);
        std::copy_n(call_.numbers + of * most_, entries, call_.numbers + group * most_);
    }

    struct Sums {
        double sum = 0, least = infinity, largest = -infinity;
    };

    static Sums add_up(const double* values, int64_t n) {
        Pair sum[pairs] = {}, low[pairs], high[pairs];
        for (int i = 0; i < pairs; ++i) {
            low[i] = Pair{infinity, infinity};
            high[i] = -low[i];
        }
        each(
            values, n,
            [&](int i, Pair x) {
                sum[i] += x;
                low[i] = x < low[i] ? x : low[i];
                high[i] = x > high[i] ? x : high[i];
            },
            [&](int i, int lane, double x) {
                sum[i][lane] += x;
                low[i][lane] = x < low[i][lane] ? x : low[i][lane];
                high[i][lane] = x > high[i][lane] ? x : high[i][lane];
            });
        Sums result;
        for (int lane = 0; lane < lanes; ++lane) {
            result.least = std::min(result.least, low[lane / 2][lane % 2]);
            result.largest = std::max(result.largest, high[lane / 2][lane % 2]);
        }
        result.sum = add_lanes(sum);
        return result;
    }

    // Counts the finite values of rows that are there; one that sees nothing has only `visible_keys`.
    void add_statistic(int64_t group, int statistic, double* values) {
        const bool is_known = sees_all_ || statistic == at_visible_keys;
        int64_t n = rows_;
        Sums sums = add_up(values, n);
        if (call_.present || !is_known || !std::isfinite(sums.sum)) {
            n = drop_unknown(values, is_known);
            sums = add_up(values, n);
        }
        const double mean = n == 0 ? nan : sums.least == sums.largest ? sums.least : sums.sum / double(n);
        Pair square[pairs] = {};
        if (sums.least < sums.largest) {
            each(
                values, n, [&](int i, Pair x) { square[i] += (x - mean) * (x - mean); },
                [&](int i, int lane, double x) { square[i][lane] += (x - mean) * (x - mean); });
        }
        call_.count[group] = n;
        call_.mean[group] = mean;
        call_.m2[group] = add_lanes(square);
        call_.least[group] = sums.least;
        call_.largest[group] = sums.largest;
        call_.ends[group + 1] = n == 0 ? 0 : write_bins(group * most_, values, n, sums.least, sums.largest);
    }

    // Moves the values that count to the front, and returns their number.
    int64_t drop_unknown(double* values, bool is_known) const {
        int64_t number = 0;
        for (int64_t at = 0; at < rows_; ++at) {
            const double x = values[at];
            const bool is_present = !call_.present || call_.present[at];
            values[number] = x;
            number += (is_known || visible_.keys[size_t(at)] > 0) && is_present && x - x == 0.0;
        }
        return number;
    }

    template <class Use, class UseLast>
    static void each(const double* values, int64_t n, const Use& use, const UseLast& use_last) {
        int64_t at = 0;
        for (; at + lanes <= n; at += lanes) {
            for (int i = 0; i < pairs; ++i) {
                Pair x;
                std::memcpy(&x, values + at + 2 * i, sizeof x);
                use(i, x);
            }
        }
        for (int lane = 0; at < n; ++at, ++lane) {
            use_last(lane / 2, lane % 2, values[at]);
        }
    }

    static double add_lanes(const Pair (&x)[pairs]) {
        return ((x[0][0] + x[0][1]) + (x[1][0] + x[1][1])) + ((x[2][0] + x[2][1]) + (x[3][0] + x[3][1]));
    }

    int64_t find_bin(double x) const {
        const float rounded = float(x);
        uint32_t bits;
        std::memcpy(&bits, &rounded, sizeof bits);
        const int64_t bin = call_.edges_below[bits >> 16];
        return bin + (call_.next_edge[bin] <= x);
    }

    // Writes the bins that are not empty, in the order of their numbers, and returns how many there are.
    int64_t write_bins(int64_t to, const double* values, int64_t n, double least, double largest) {
        const int64_t first = find_bin(least), last = find_bin(largest);
        int64_t entries = 0;
        const auto write = [&](int64_t bin, int64_t number) {
            call_.filled[to + entries] = int16_t(bin);
            call_.numbers[to + entries++] = number;
        };
        if (first == last) {
            write(first, n);
            return entries;
        }
        // Neighbours often share a bin: several counters in turn, for one would wait for itself.
        for (int64_t i = 0; i < n; ++i) {
            ++numbers_[size_t(counters * find_bin(values[i]) + i % counters)];
        }
        for (int64_t bin = first; bin <= last; ++bin) {
            int32_t* const of_bin = numbers_.data() + counters * bin;
            const int64_t number = int64_t(of_bin[0]) + of_bin[1] + of_bin[2] + of_bin[3];
            if (number) {
                write(bin, number);
                std::fill(of_bin, of_bin + counters, 0);
            }
        }
        return entries;
    }

    const Summary& call_;
    const int64_t rows_, most_;
    Visible visible_;
    bool sees_all_ = true;
    const int64_t step_;  // a line more than rows: at a power of two all statistics would share one place in the cache
    std::vector<double> values_;    // [statistics, step]
    std::vector<int32_t> numbers_;  // [bins, counters]
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

// Heads that are left, taken by the workers one by one: no number depends on who takes which.
struct Heads {
    const Summary& call;
    std::atomic<int64_t> next{0};

    static void serve(void* context, int) {
        Heads& heads = *static_cast<Heads*>(context);
        Groups groups(heads.call);
        MaxKeys keys(heads.call);
        for (int64_t head; (head = heads.next++) < heads.call.heads;) {
            groups.add(head);
            keys.add(head);
        }
    }
};

}  // namespace

Status summarise(const Summary& call) {
    // A worker is worth waking for 60 us of work.
    constexpr int64_t worth = 2000;
    Heads heads{call};
    const int64_t useful = std::min(call.batch * call.queries * call.heads / worth + 1, call.heads);
    const int threads = int(std::max<int64_t>(std::min<int64_t>(call.threads, useful), 1));
    if (!run_on_pool(threads, &Heads::serve, &heads, call.team)) {
        return Status::out_of_memory;
    }
    Groups::pack(call);
    return Status::ok;
}

}  // namespace sqrtdk
