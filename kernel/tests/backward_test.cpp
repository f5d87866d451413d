// Random calls of backward(), and of the weights that forward() writes, on every level that runs here, against plain
// loops over double. Every array has an allocation of its own that ends with its last element, so that a sanitizer sees
// the first byte read or written beyond it.
#include <cstdio>
#include <cstdlib>

#include "ordinary_call.h"

using namespace sqrtdk;

namespace {

struct Passes {
    Forward forward = {};
    Backward backward = {};
    Array grad_output;
    std::unique_ptr<char[]> output, weights, query, key, value;
    std::vector<double> max, sum, scale, sinks, alibi;
    std::vector<float> exact;
    int64_t rows, keys;

    Passes(const Case& drawn, Random& random) {
        static_cast<Problem&>(forward) = drawn.call;
        static_cast<Problem&>(backward) = drawn.call;
        const Problem& call = drawn.call;
        const int64_t item = bytes_of(call.dtype);
        rows = call.batch * call.groups * call.shared * call.queries;
        keys = call.batch * call.groups * call.keys;
        grad_output = Array(random, {call.batch, call.groups, call.shared, call.queries, call.d_v}, item, 0.0);
        std::normal_distribution<> normal;
        grad_output.each([&](int64_t at, const std::vector<int64_t>&) {
            naive::store(call.dtype, grad_output.data, at, normal(random));
        });
        const std::vector<int64_t>& by = grad_output.strides;
        backward.grad_output = {grad_output.data, by[0], by[1], by[2], by[3], by[4]};
        max.assign(size_t(rows), -7.0);
        sum = scale = sinks = alibi = max;
        allocate(output, rows * call.d_v * item);
        allocate(weights, rows * call.keys * item);
        allocate(query, rows * call.d_k * item);
        allocate(key, keys * call.d_k * item);
        allocate(value, keys * call.d_v * item);
        forward.output = output.get();
        forward.weights = weights.get();
        forward.saved = backward.saved = {max.data(), sum.data()};
        exact.assign(size_t(rows * call.d_v), 7.0f);
        if (item == 2) forward.exact = exact.data();
        backward.output = item == 2 ? static_cast<void*>(exact.data()) : output.get();
        backward.gradients = {query.get(), key.get(), value.get(), scale.data(), sinks.data(), alibi.data()};
    }

    static void allocate(std::unique_ptr<char[]>& memory, int64_t bytes) {
        memory.reset(new char[size_t(bytes)]);
        std::memset(memory.get(), 0x55, size_t(bytes));
    }

    bool run(const char* level, int threads) {
        forward.threads = backward.threads = threads;
        return sqrtdk::forward(forward, level) == Status::ok && sqrtdk::backward(backward, level) == Status::ok;
    }
};

bool close(double found, double expected, double tolerance) { return std::fabs(found - expected) <= tolerance; }

double at(const Problem& call, const void* data, int64_t index) { return naive::load(call.dtype, data, index); }

// Adds up what each row gives, in double; the largest gradient sets what rounding may cost.
const char* compare(const Passes& passes) {
    const Backward& call = passes.backward;
    std::vector<double> key(size_t(passes.keys * call.d_k), 0.0), value(size_t(passes.keys * call.d_v), 0.0);
    std::vector<double> query(size_t(call.d_k));
    const double unit = call.dtype == Dtype::float64 ? 2.3e-16 : 1.2e-7;
    const double rounding = call.dtype == Dtype::float16 ? 1e-3 : call.dtype == Dtype::bfloat16 ? 8e-3 : unit;
    const double allowed = 300.0 * unit + 8.0 * rounding;
    const double growth = naive::growth(call.dropout);
    int64_t row_at = 0;
    for (int64_t n = 0; n < call.batch; ++n)
        for (int64_t g = 0; g < call.groups; ++g) {
            const naive::Head head = naive::read_head(call, n, g);
            for (int64_t r = 0; r < call.shared; ++r)
                for (int64_t i = 0; i < call.queries; ++i, ++row_at) {
                    const naive::Row row = naive::attend(call, head, n, g, r, i);
                    const double of_scale =
                        call.scale.data[n * call.scale.n + g * call.scale.g + r * call.scale.r + i * call.scale.l];
                    const auto grad = [&](int64_t c) {
                        const Query& o = call.grad_output;
                        return at(call, o.data, n * o.n + g * o.g + r * o.r + i * o.l + c * o.d);
                    };
                    std::vector<double> grad_weights(row.keys.size(), 0.0);
                    double delta = 0.0, scale = 0.0, alibi = 0.0, largest = 1.0;
                    for (size_t j = 0; j < row.keys.size(); ++j) {
                        for (int64_t c = 0; c < call.d_v; ++c)
                            grad_weights[j] +=
                                grad(c) * at(call, call.v.data,
                                             n * call.v.n + g * call.v.g + row.keys[j] * call.v.s + c * call.v.d);
                        grad_weights[j] *= naive::keeps(call, n, g, r, i, row.keys[j]) * growth;
                        delta += row.weights[j] * grad_weights[j];
                        largest = std::fmax(largest, std::fabs(grad_weights[j]) * (1.0 + std::fabs(row.scores[j])));
                    }
                    std::fill(query.begin(), query.end(), 0.0);
                    size_t seen = 0;
                    for (int64_t j = 0; j < call.keys; ++j) {
                        const bool sees = seen < row.keys.size() && row.keys[seen] == j;
                        const double weight = at(call, passes.weights.get(), row_at * call.keys + j);
                        if (!sees && weight != 0.0) return "weight of a hidden key";
                        if (!sees) continue;
                        if (!close(weight, row.weights[seen], allowed)) return "weight";
                        const double squashed = call.softcap > 0 ? std::tanh(row.scores[seen] / call.softcap) : 0.0;
                        const double of_logit = row.weights[seen] * (grad_weights[seen] - delta);
                        const double of_score = of_logit * (1.0 - squashed * squashed);
                        alibi += of_logit * double(j - i - call.offset);
                        const int64_t to = (n * call.groups + g) * call.keys + j;
                        for (int64_t d = 0; d < call.d_k; ++d) {
                            const double k =
                                at(call, call.k.data, n * call.k.n + g * call.k.g + j * call.k.s + d * call.k.d);
                            const double q =
                                at(call, call.q.data,
                                   n * call.q.n + g * call.q.g + r * call.q.r + i * call.q.l + d * call.q.d);
                            query[size_t(d)] += of_scale * of_score * k;
                            scale += of_score * q * k;
                            key[size_t(to * call.d_k + d)] += of_scale * of_score * q;
                        }
                        for (int64_t c = 0; c < call.d_v; ++c)
                            value[size_t(to * call.d_v + c)] += row.kept[seen] * grad(c);
                        ++seen;
                    }
                    for (int64_t d = 0; d < call.d_k; ++d)
                        if (!close(at(call, passes.query.get(), row_at * call.d_k + d), query[size_t(d)],
                                   4.0 * largest * allowed))
                            return "query";
                    if (!close(passes.scale[size_t(row_at)], scale, 16.0 * largest * allowed)) return "scale";
                    const double far = double(call.keys + call.queries + 50);
                    if (!close(passes.alibi[size_t(row_at)], alibi, 4.0 * far * largest * allowed)) return "alibi";
                    const double sink = row.keys.empty() ? 0.0 : -row.sink_weight * delta;
                    if (!close(passes.sinks[size_t(row_at)], sink, largest * allowed)) return "sinks";
                }
        }
    const double heads = std::sqrt(double(call.shared * call.queries)) + 4.0;
    for (size_t i = 0; i < key.size(); ++i)
        if (!close(at(call, passes.key.get(), int64_t(i)), key[i], heads * growth * 4.0 * allowed)) return "key";
    for (size_t i = 0; i < value.size(); ++i)
        if (!close(at(call, passes.value.get(), int64_t(i)), value[i], heads * growth * allowed)) return "value";
    return nullptr;
}

// Logits so large that rounding leaves nothing of their differences: the weights of every row add up to 1 all the same,
// and the gradients of a head's values to those of its output.
const char* compare_sums(const Passes& passes) {
    const Backward& call = passes.backward;
    const double rounding = call.dtype == Dtype::float16    ? 1e-3
                            : call.dtype == Dtype::bfloat16 ? 8e-3
                            : call.dtype == Dtype::float32  ? 1.2e-7
                                                            : 1e-12;
    for (int64_t n = 0; n < call.batch; ++n)
        for (int64_t g = 0; g < call.groups; ++g) {
            const size_t width = size_t(call.d_v);
            std::vector<double> given(width, 0.0), taken(width, 0.0), size(width, 0.0);
            for (int64_t r = 0; r < call.shared; ++r)
                for (int64_t i = 0; i < call.queries; ++i) {
                    bool sees = false;
                    double bias;
                    for (int64_t j = 0; j < call.keys && !sees; ++j) sees = naive::sees(call, n, g, r, i, j, &bias);
                    const Query& o = call.grad_output;
                    for (size_t c = 0; c < width && sees; ++c) {
                        const int64_t place = n * o.n + g * o.g + r * o.r + i * o.l + int64_t(c) * o.d;
                        given[c] += at(call, o.data, place);
                        size[c] += std::fabs(at(call, o.data, place));
                    }
                }
            for (int64_t j = 0; j < call.keys; ++j)
                for (size_t c = 0; c < width; ++c) {
                    const int64_t key = (n * call.groups + g) * call.keys + j;
                    const double x = at(call, passes.value.get(), key * call.d_v + int64_t(c));
                    taken[c] += x;
                    size[c] += std::fabs(x);
                }
            for (size_t c = 0; c < width; ++c)
                if (!close(taken[c], given[c], 4.0 * rounding * size[c])) return "sum of the gradients of values";
        }
    return nullptr;
}

const char* check_far(Case& drawn, Random& random, const char* level) {
    drawn.call.sinks = nullptr;
    drawn.call.dropout = {};
    const double size = std::exp2(double(random() % 60));
    drawn.scale.each([&](int64_t at, const std::vector<int64_t>&) {
        double& scale = reinterpret_cast<double*>(drawn.scale.data)[at];
        if (std::fabs(scale) < size) scale *= size;
    });
    Passes passes(drawn, random);
    return passes.run(level, 1) ? compare_sums(passes) : "status";
}

bool same_bits(const Passes& one, const Passes& other) {
    const int64_t item = bytes_of(one.forward.dtype), d_k = one.forward.d_k, d_v = one.forward.d_v;
    return std::memcmp(one.query.get(), other.query.get(), size_t(one.rows * d_k * item)) == 0 &&
           std::memcmp(one.key.get(), other.key.get(), size_t(one.keys * d_k * item)) == 0 &&
           std::memcmp(one.value.get(), other.value.get(), size_t(one.keys * d_v * item)) == 0 &&
           std::memcmp(one.scale.data(), other.scale.data(), one.scale.size() * sizeof(double)) == 0 &&
           std::memcmp(one.sinks.data(), other.sinks.data(), one.sinks.size() * sizeof(double)) == 0 &&
           std::memcmp(one.alibi.data(), other.alibi.data(), one.alibi.size() * sizeof(double)) == 0;
}

const char* check(const Case& drawn, Random& random, const char* level) {
    Random again = random;
    Passes alone(drawn, random), crowd(drawn, again);
    if (!alone.run(level, 1)) return "status";
    if (const char* wrong = compare(alone)) return wrong;
    if (!crowd.run(level, 3)) return "status with threads";
    return same_bits(alone, crowd) ? nullptr : "bits with threads";
}

bool stops(Random& random, const char* level) {
    const Case drawn(random);
    Passes passes(drawn, random);
    passes.backward.interrupted = [](void*) { return true; };
    if (!passes.run(level, 1)) return true;
    passes.backward.threads = 2;
    const Status status = backward(passes.backward, level);  // a call that ends before it is asked is complete
    return status == Status::interrupted || status == Status::ok;
}

}  // namespace

int main(int argc, char** argv) {
    const int cases = argc > 1 ? std::atoi(argv[1]) : 120;
    int count = 0, failures = 0;
    const Level* all = levels(&count);
    for (int i = 0; i < count; ++i) {
        if (!all[i].runs_here) {
            std::printf("%s: does not run here\n", all[i].name);
            continue;
        }
        Random random(20261);
        int wrong = 0;
        for (int test = 0; test < cases; ++test) {
            Case drawn(random);
            const char* difference = check(drawn, random, all[i].name);
            if (difference == nullptr && test % 3 == 0) difference = check_far(drawn, random, all[i].name);
            if (difference != nullptr) {
                ++wrong;
                std::printf("%s, case %d: %s\n", all[i].name, test, difference);
                print(drawn);
            }
        }
        wrong += !stops(random, all[i].name);
        std::printf("%s: %d calls, %d wrong\n", all[i].name, cases, wrong);
        failures += wrong;
    }
    Backward unknown = {};
    unknown.dtype = Dtype(9);
    if (backward(unknown, "portable") != Status::unknown_dtype) {
        std::printf("an unknown dtype is not refused\n");
        ++failures;
    }
    return failures != 0;
}
