// Random calls of forward() on every level that runs here, against plain loops over double: shapes that hit the tails,
// any strides, masks, ranges, features and dtypes. Every array has an allocation of its own that ends with its last
// element, so that a sanitizer sees the first byte read beyond it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "naive.h"

using namespace sqrtdk;

namespace {

using Random = std::mt19937_64;

int64_t pick(Random& random, std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
}

bool chance(Random& random, double probability) { return std::uniform_real_distribution<>()(random) < probability; }

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// An array of up to five axes that lies in memory in any order, forwards or backwards, spread out or broadcast.
struct Array {
    std::unique_ptr<char[]> memory;
    char* data = nullptr;
    std::vector<int64_t> sizes, strides;

    Array() = default;
    Array(Random& random, std::vector<int64_t> shape, int64_t bytes, bool may_broadcast) : sizes(shape) {
        std::vector<size_t> order(shape.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        if (chance(random, 0.5)) std::shuffle(order.begin(), order.end(), random);
        strides.assign(shape.size(), 0);
        int64_t step = pick(random, {1, 1, 1, 2, 3}), least = 0, most = 0;
        for (size_t i = order.size(); i-- > 0;) {
            const size_t axis = order[i];
            if (may_broadcast && chance(random, 0.4)) continue;
            strides[axis] = chance(random, 0.2) ? -step : step;
            (strides[axis] < 0 ? least : most) += strides[axis] * (shape[axis] - 1);
            step *= shape[axis];
            step += chance(random, 0.2) ? 3 : 0;
        }
        memory.reset(new char[size_t((most - least + 1) * bytes)]());
        data = memory.get() - least * bytes;
    }

    // Calls visit(offset in elements, index) for every element; a broadcast one is visited several times.
    template <typename Visit>
    void each(const Visit& visit) const {
        std::vector<int64_t> index(sizes.size(), 0);
        int64_t count = 1;
        for (int64_t size : sizes) count *= size;
        for (int64_t at = 0; at < count; ++at) {
            int64_t left = at, offset = 0;
            for (size_t i = sizes.size(); i-- > 0;) {
                index[i] = left % sizes[i];
                left /= sizes[i];
                offset += index[i] * strides[i];
            }
            visit(offset, index);
        }
    }
};

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

struct Case {
    Forward call = {};
    Array q, k, v, scale, mask;
    std::vector<double> sinks;

    explicit Case(Random& random) {
        call.dtype = Dtype(random() % 4);
        call.batch = pick(random, {1, 1, 2, 3});
        call.groups = pick(random, {1, 1, 2, 3});
        call.shared = pick(random, {1, 1, 2, 4, 7});
        call.queries = pick(random, {1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130});
        call.keys = pick(random, {1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 257, 300});
        call.d_k = pick(random, {1, 2, 3, 7, 8, 16, 17, 40, 64, 65, 80, 128, 131});
        call.d_v = pick(random, {1, 2, 3, 7, 8, 16, 17, 40, 64, 65, 96, 128, 131});
        call.threads = 1;
        const int64_t item = bytes_of(call.dtype);
        std::normal_distribution<> normal;
        q = Array(random, {call.batch, call.groups, call.shared, call.queries, call.d_k}, item, false);
        k = Array(random, {call.batch, call.groups, call.keys, call.d_k}, item, false);
        v = Array(random, {call.batch, call.groups, call.keys, call.d_v}, item, false);
        for (Array* array : {&q, &k, &v}) {
            array->each([&](int64_t at, const std::vector<int64_t>&) {
                naive::store(call.dtype, array->data, at, normal(random));
            });
        }
        call.q = {q.data, q.strides[0], q.strides[1], q.strides[2], q.strides[3], q.strides[4]};
        call.k = {k.data, k.strides[0], k.strides[1], k.strides[2], k.strides[3]};
        call.v = {v.data, v.strides[0], v.strides[1], v.strides[2], v.strides[3]};
        scale = Array(random, {call.batch, call.groups, call.shared, call.queries}, 8, true);
        const double sharpness = pick(random, {0, 1, 1, 1, 3}) / std::sqrt(double(call.d_k));
        scale.each([&](int64_t at, const std::vector<int64_t>&) {
            reinterpret_cast<double*>(scale.data)[at] = sharpness * (1.0 + 0.3 * normal(random));
        });
        call.scale = {reinterpret_cast<const double*>(scale.data), scale.strides[0], scale.strides[1], scale.strides[2],
                      scale.strides[3]};
        call.first = chance(random, 0.2) ? -int64_t(random() % 150) : std::numeric_limits<int64_t>::min();
        call.last = chance(random, 0.4) ? int64_t(random() % 300) - 100 : std::numeric_limits<int64_t>::max();
        call.softcap = chance(random, 0.2) ? 2.0 : 0.0;
        if (chance(random, 0.3)) {
            for (int64_t i = 0; i < call.groups * call.shared; ++i) sinks.push_back(normal(random));
            call.sinks = sinks.data();
        }
        if (chance(random, 0.5)) make_mask(random);
        if (chance(random, 0.3)) poison_hidden_keys(random);
    }

    void make_mask(Random& random) {
        call.mask.kind = chance(random, 0.5) ? MaskKind::boolean : MaskKind(2 + random() % 4);
        const bool boolean = call.mask.kind == MaskKind::boolean;
        const Dtype dtype = boolean ? Dtype::float64 : Dtype(int(call.mask.kind) - int(MaskKind::float16));
        const std::vector<int64_t> shape = {call.batch, call.groups, call.shared, call.queries, call.keys};
        mask = Array(random, shape, boolean ? 1 : bytes_of(dtype), true);
        const double visible = double(pick(random, {0, 50, 90, 100})) / 100.0;
        std::normal_distribution<> normal;
        mask.each([&](int64_t at, const std::vector<int64_t>&) {
            const bool sees = chance(random, visible);
            if (boolean) {
                mask.data[at] = sees;
            } else {
                naive::store(dtype, mask.data, at, sees ? normal(random) : -std::numeric_limits<double>::infinity());
            }
        });
        call.mask.data = mask.data;
        call.mask.n = mask.strides[0];
        call.mask.g = mask.strides[1];
        call.mask.r = mask.strides[2];
        call.mask.l = mask.strides[3];
        call.mask.s = mask.strides[4];
    }

    // Keys that no query of their head sees become NaN or infinite: without influence on any row.
    void poison_hidden_keys(Random& random) {
        const double poison = chance(random, 0.5) ? std::numeric_limits<double>::quiet_NaN()
                                                  : std::numeric_limits<double>::infinity();
        for (Array* array : {&k, &v}) {
            array->each([&](int64_t at, const std::vector<int64_t>& index) {
                const bool hidden = index[3] == 0 && !is_seen(index[0], index[1], index[2]);
                if (hidden) naive::store(call.dtype, array->data, at, poison);
            });
        }
    }

    bool is_seen(int64_t n, int64_t g, int64_t j) const {
        double bias;
        for (int64_t r = 0; r < call.shared; ++r)
            for (int64_t i = 0; i < call.queries; ++i)
                if (naive::sees(call, n, g, r, i, j, &bias)) return true;
        return false;
    }
};

void print(const Case& test) {
    const Forward& call = test.call;
    std::printf("  dtype %d, batch %ld, groups %ld, shared %ld, queries %ld, keys %ld, d_k %ld, d_v %ld",
                int(call.dtype), long(call.batch), long(call.groups), long(call.shared), long(call.queries),
                long(call.keys), long(call.d_k), long(call.d_v));
    std::printf(", mask %d, first %ld, last %ld, softcap %g, sinks %d\n", int(call.mask.kind), long(call.first),
                long(call.last), call.softcap, call.sinks != nullptr);
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
