// Random calls of forward() on every level that runs here, against plain loops; and the same bits whatever the threads,
// the batch, the strides, with statistics or without. `forward_fuzz [calls [seed]]`; the seed is printed.
#include <cstdlib>

#include "compare.h"

using namespace sqrtdk;

namespace {

struct Expected {
    std::vector<naive::Head> heads;
    std::vector<naive::Row> rows;

    explicit Expected(const Forward& call) {
        for (int64_t n = 0; n < call.batch; ++n)
            for (int64_t g = 0; g < call.groups; ++g) {
                heads.push_back(naive::read_head(call, n, g));
                for (int64_t r = 0; r < call.shared; ++r)
                    for (int64_t i = 0; i < call.queries; ++i)
                        rows.push_back(naive::attend(call, heads.back(), n, g, r, i));
            }
    }
};

Fault compare(const Case& test, const Expected& expected, const Results& results, const char* level) {
    const int64_t rows = int64_t(expected.rows.size()), per_head = test.call.shared * test.call.queries;
    for (int64_t at = 0; at < rows; ++at) {
        const RowComparison comparison(test.call, expected.heads[size_t(at / per_head)], expected.rows[size_t(at)],
                                       test.exact, takes_pairs(test.call, level));
        if (const Fault fault = comparison.check(results, at); fault.what) return fault;
    }
    return {};
}

// NaN counts as equal to NaN of any sign and payload.
bool same_number(double one, double other) {
    return std::memcmp(&one, &other, sizeof one) == 0 || (std::isnan(one) && std::isnan(other));
}

// Whether the rows of `part` are those of `whole` from `first` on, to the bit.
bool same_bits(const Forward& call, const Results& whole, const Results& part, int64_t first, int64_t rows) {
    for (int64_t at = 0; at < rows * call.d_v; ++at)
        if (!same_number(naive::load(call.dtype, whole.output.data(), first * call.d_v + at),
                         naive::load(call.dtype, part.output.data(), at)))
            return false;
    if (whole.counts.empty() || part.counts.empty()) return true;
    const int64_t all = int64_t(whole.counts.size()) / 2;
    for (int64_t at = 0; at < rows; ++at) {
        for (int64_t field = 0; field < 2; ++field)
            if (whole.counts[size_t(field * all + first + at)] != part.counts[size_t(field * rows + at)]) return false;
        for (int64_t field = 0; field < 11; ++field)
            if (!same_number(whole.numbers[size_t(field * all + first + at)], part.numbers[size_t(field * rows + at)]))
                return false;
    }
    return true;
}

Forward cut_batch(const Forward& call, int64_t n, int64_t mask_bytes) {
    Forward part = call;
    const auto moved = [n](const void* data, int64_t step, int64_t bytes) {
        return static_cast<const char*>(data) + n * step * bytes;
    };
    part.batch = 1;
    part.dropout.first_row += n * call.groups * call.shared * call.queries;
    part.q.data = moved(call.q.data, call.q.n, bytes_of(call.dtype));
    part.k.data = moved(call.k.data, call.k.n, bytes_of(call.dtype));
    part.v.data = moved(call.v.data, call.v.n, bytes_of(call.dtype));
    part.scale.data = call.scale.data + n * call.scale.n;
    if (call.mask.kind != MaskKind::none) part.mask.data = moved(call.mask.data, call.mask.n, mask_bytes);
    return part;
}

Fault check(Case& test, const Expected& expected, Random random, const char* level) {
    Forward& call = test.call;
    const int64_t rows = int64_t(expected.rows.size());
    Results results(call, true);
    if (forward(call, level) != Status::ok) return {"status"};
    if (const Fault fault = compare(test, expected, results, level); fault.what) return fault;

    call.threads = int(pick(random, {1, 2, 3, 5}));
    Results bare(call, false);
    if (forward(call, level) != Status::ok) return {"status without statistics"};
    if (!same_bits(call, results, bare, 0, rows)) return {"bits without statistics, with other threads"};

    const int64_t n = int64_t(random() % uint64_t(call.batch)), rows_of_one = rows / call.batch;
    Forward one = cut_batch(call, n, call.mask.kind == MaskKind::none ? 0 : test.mask_bytes());
    Results alone(one, true);
    if (forward(one, level) != Status::ok) return {"status of one entry of the batch"};
    if (!same_bits(call, results, alone, n * rows_of_one, rows_of_one)) return {"bits of one entry of the batch"};
    return {};
}

Fault check_strides(Case& test, Random& random, const char* level) {
    Results spread(test.call, true);
    if (forward(test.call, level) != Status::ok) return {"status"};
    test.lie_contiguously();
    test.call.threads = int(pick(random, {1, 2, 3}));
    Results dense(test.call, true);
    if (forward(test.call, level) != Status::ok) return {"status with other strides"};
    return {same_bits(test.call, spread, dense, 0, int64_t(spread.counts.size() / 2)) ? nullptr
                                                                                      : "bits with other strides"};
}

}  // namespace

int main(int argc, char** argv) {
    const long calls = argc > 1 ? std::atol(argv[1]) : 20000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20261116;
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    int count = 0;
    const Level* all = levels(&count);
    long done = 0, wrong = 0;
    for (uint64_t number = 0; done < calls && wrong < 20; ++number) {
        // Every call has a seed of its own: `forward_fuzz 1 <seed + number>` repeats it alone.
        Random random(seed + number);
        Case test(random);
        const Expected expected(test.call);
        const auto report = [&](const char* level, const Fault& fault) {
            ++done;
            if (fault.what == nullptr) return;
            ++wrong;
            std::printf("%s, seed %llu, row %ld: %s %.17g, must be %.17g within %.3g\n", level,
                        static_cast<unsigned long long>(seed + number), long(fault.row), fault.what, fault.number,
                        fault.expected, fault.tolerance);
            test.print();
            std::fflush(stdout);
        };
        const char* last = nullptr;
        for (int i = 0; i < count; ++i) {
            if (!all[i].runs_here) continue;
            report(all[i].name, check(test, expected, random, all[i].name));
            if (last == nullptr || chance(random, 0.5)) last = all[i].name;
        }
        if (const Fault fault = check_strides(test, random, last); fault.what) report(last, fault);
    }
    std::printf("%ld calls compared, %ld wrong\n", done, wrong);
    return wrong != 0;
}
