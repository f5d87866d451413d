// Summaries against plain loops: counts, sums, bins and most attended keys of random rows, with NaN and padding; and
// sums of vector lengths.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernel.h"

namespace {

#define SQRTDK_ONE(name) +1
constexpr int counts = 0 SQRTDK_ROW_COUNTS(SQRTDK_ONE), measures = 0 SQRTDK_ROW_MEASURES(SQRTDK_ONE);
constexpr int summarised = 0 SQRTDK_SUMMARISED(SQRTDK_ONE);
constexpr int64_t farthest = 3, bins = 5, keys = 9;
const double next_edge[bins] = {-1, 0, 1, 2, std::numeric_limits<double>::infinity()};

void require(bool holds, const char* what) {
    if (!holds) {
        std::printf("summary_test: %s\n", what);
        std::exit(1);
    }
}

// Edges below all numbers that round to a float32 with this upper half: none is claimed that may lie above.
std::vector<int16_t> count_edges() {
    std::vector<int16_t> below(1 << 16);
    for (uint32_t half = 0; half < below.size(); ++half) {
        const uint32_t bits = half << 16 | (half >> 15 ? 0xffff : 0);
        float least;
        std::memcpy(&least, &bits, sizeof least);
        int16_t edges = 0;
        while (edges < bins - 1 && next_edge[edges] < double(least) - 1e-30) {
            ++edges;
        }
        below[half] = std::isnan(least) ? 0 : edges;
    }
    return below;
}

void try_shape(int64_t batch, int64_t heads, int64_t queries, bool has_padding, std::mt19937& rng) {
    const int64_t rows = batch * heads * queries, places = batch * queries, groups = summarised * heads;
    std::vector<int64_t> integers(size_t(counts * rows)), positions(size_t(places), 0);
    std::vector<double> numbers(size_t(measures * rows));
    std::vector<uint8_t> present(size_t(places), 1);
    for (int64_t& x : integers) x = int64_t(rng() % keys);
    for (double& x : numbers) x = rng() % 9 ? double(rng() % 1000) / 250 - 2 : std::nan("");
    for (uint8_t& x : present) x = !has_padding || rng() % 3 != 0;
    sqrtdk::Statistics statistics;
    int64_t at = 0;
#define SQRTDK_INTEGER(name) statistics.name = integers.data() + at++ * rows;
    SQRTDK_ROW_COUNTS(SQRTDK_INTEGER)
    at = 0;
#define SQRTDK_NUMBER(name) statistics.name = numbers.data() + at++ * rows;
    SQRTDK_ROW_MEASURES(SQRTDK_NUMBER)
    const std::vector<int16_t> below = count_edges();
    const size_t most = size_t(groups * std::min(places, bins));
    std::vector<int64_t> count(static_cast<size_t>(groups)), ends(size_t(groups + 1)), filled_numbers(most);
    std::vector<int64_t> offsets(size_t(heads * (2 * farthest + 3))), sequences(static_cast<size_t>(heads));
    std::vector<double> mean(static_cast<size_t>(groups)), m2 = mean, least = mean, largest = mean;
    std::vector<double> share(static_cast<size_t>(heads));
    std::vector<int16_t> filled(most);
    const sqrtdk::Summary call{batch,
                               heads,
                               queries,
                               statistics,
                               present.data(),
                               positions.data(),
                               keys,
                               farthest,
                               bins,
                               next_edge,
                               below.data(),
                               count.data(),
                               mean.data(),
                               m2.data(),
                               least.data(),
                               largest.data(),
                               ends.data(),
                               filled.data(),
                               filled_numbers.data(),
                               offsets.data(),
                               share.data(),
                               sequences.data(),
                               1 + int(rng() % 3),
                               nullptr};
    require(sqrtdk::summarise(call) == sqrtdk::Status::ok, "it must end well");
    for (int64_t head = 0; head < heads; ++head) {
        int64_t known = 0, seen = 0;
        double sum = 0;
        int64_t of_bins[bins] = {};
        for (int64_t place = 0; place < places; ++place) {
            const int64_t row = (place / queries * heads + head) * queries + place % queries;
            if (!present[size_t(place)]) continue;
            ++seen;
            const double x = statistics.entropy[row];
            if (statistics.visible_keys[row] > 0 && !std::isnan(x)) {
                ++known;
                sum += x;
                ++of_bins[std::upper_bound(next_edge, next_edge + bins - 1, x) - next_edge];
            }
        }
        require(count[size_t(head)] == known, "entropy is counted where it is known");
        require(count[size_t(groups - heads + head)] == seen, "visible keys are counted in every row");
        require(known == 0 || std::abs(mean[size_t(head)] - sum / double(known)) < 1e-12, "the mean");
        for (int64_t entry = ends[size_t(head)]; entry < ends[size_t(head + 1)]; ++entry) {
            of_bins[filled[size_t(entry)]] -= filled_numbers[size_t(entry)];
        }
        for (int64_t left : of_bins) require(left == 0, "the bins");
    }
}

// Vectors that fill their memory to its last number, so that a sanitizer sees a step too far.
template <class T>
void try_lengths(sqrtdk::Dtype dtype, std::mt19937& rng) {
    const int64_t batch = 1 + rng() % 3, groups = 1 + rng() % 3, shared = 1 + rng() % 2, heads = groups * shared;
    const int64_t queries = rng() % 5, length = 1 + rng() % 5, d_k = 1 + rng() % 20;
    std::vector<T> q(size_t(batch * heads * queries * d_k)), k(size_t(batch * groups * length * d_k));
    for (T& x : q) x = T(rng() % 1000) / 250 - 2;
    for (T& x : k) x = T(rng() % 1000) / 250 - 2;
    std::vector<double> sums(size_t(6 * heads));
    const sqrtdk::KeyValue at_q{q.data(), heads * queries * d_k, queries * d_k, d_k, 1};
    const sqrtdk::KeyValue at_k{k.data(), groups * length * d_k, length * d_k, d_k, 1};
    const sqrtdk::Lengths call{dtype, batch, heads, groups, queries, length, d_k, at_q, at_k, 0.5, 3.0, sums.data()};
    require(sqrtdk::add_up_lengths(call), "finite vectors have finite sums");
    double squares = 0, expected = 0;
    for (T x : q) expected += double(x) * double(x) / 4;
    for (T x : k) squares += double(x) * double(x) / double(length) / 3 * double(shared);
    for (int64_t head = 0; head < heads; ++head) {
        expected -= sums[size_t(2 * heads + head)];
        squares -= sums[size_t(5 * heads + head)];
        require(sums[size_t(4 * heads + head)] <= sums[size_t(5 * heads + head)] * (1 + 1e-12), "spread <= square");
    }
    require(std::abs(expected) < 1e-9 && std::abs(squares) < 1e-9, "the squares of all vectors");
    k.back() = T(INFINITY);
    require(!sqrtdk::add_up_lengths(call), "an infinite sum is told");
}

}  // namespace

int main() {
    std::mt19937 rng(20261118);
    for (int round = 0; round < 400; ++round) {
        try_shape(int64_t(rng() % 4), int64_t(1 + rng() % 3), int64_t(rng() % 40), round % 2 == 0, rng);
    }
    // Enough rows for several threads.
    for (int round = 0; round < 10; ++round) {
        try_shape(3, 3, 700, round % 2 == 0, rng);
    }
    for (int round = 0; round < 200; ++round) {
        try_lengths<float>(sqrtdk::Dtype::float32, rng);
        try_lengths<double>(sqrtdk::Dtype::float64, rng);
    }
    std::puts("summary_test: ok");
}
