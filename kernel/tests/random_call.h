// Random calls of forward() over the whole argument space: shapes that hit the tails, any strides, scales from 5e-324
// to 1e300, masks of every kind and byte, blind rows, sinks, NaN and infinity.
#pragma once

#include <cstdio>

#include "array.h"
#include "naive.h"

namespace sqrtdk {

inline double pick_number(Random& random, std::initializer_list<double> values) {
    return values.begin()[random() % values.size()];
}

inline double largest_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::float16: return 65504.0;
        case Dtype::bfloat16: return 0x1.fep127;
        case Dtype::float32: return 0x1.fffffep127;
        default: return std::numeric_limits<double>::max();
    }
}

struct Results {
    std::vector<char> output;
    std::vector<int64_t> counts;
    std::vector<double> numbers;

    Results(Forward& call, bool statistics) {
        const size_t rows = size_t(call.batch * call.groups * call.shared * call.queries);
        output.assign(rows * size_t(call.d_v * bytes_of(call.dtype)), 0x55);
        call.output = output.data();
        call.statistics = {};
        if (!statistics) return;
        counts.assign(2 * rows, -7);
        numbers.assign(11 * rows, -7.0);
        double* x = numbers.data();
        call.statistics = {counts.data(), counts.data() + rows, x,
                           x + rows,      x + 2 * rows,         x + 3 * rows,
                           x + 4 * rows,  x + 5 * rows,         x + 6 * rows,
                           x + 7 * rows,  x + 8 * rows,         x + 9 * rows,
                           x + 10 * rows};
    }
};

struct Case {
    Forward call = {};
    Array q, k, v, scale, mask;
    std::vector<double> sinks, slopes;
    bool exact = false;  // small integers and scales that are powers of two: no score is rounded

    explicit Case(Random& random) {
        call.dtype = Dtype(random() % 4);
        choose_shape(random);
        exact = chance(random, 0.5);
        const int64_t item = bytes_of(call.dtype);
        q = Array(random, {call.batch, call.groups, call.shared, call.queries, call.d_k}, item, 0.05);
        k = Array(random, {call.batch, call.groups, call.keys, call.d_k}, item, 0.05);
        v = Array(random, {call.batch, call.groups, call.keys, std::max<int64_t>(call.d_v, 1)}, item, 0.05);
        scale = Array(random, {call.batch, call.groups, call.shared, call.queries}, 8, 0.4);
        fill(random);
        choose_range(random);
        if (chance(random, 0.2)) call.softcap = pick_number(random, {2.0, 2.0, 30.0, 1e-3, 1e-300, 1e30, 1e300});
        if (chance(random, 0.3)) {
            const double size = pick_number(random, {1.0, 1.0, 1.0, 30.0, 120.0, 900.0, 1e300});
            for (int64_t i = 0; i < call.groups * call.shared; ++i) sinks.push_back(size * draw(random));
        }
        if (chance(random, 0.5)) make_mask(random);
        if (call.mask.kind <= MaskKind::boolean && chance(random, 0.3)) {
            const double size = pick_number(random, {0.01, 0.3, 3.0, 1e30, 1e300});
            for (int64_t i = 0; i < call.groups * call.shared; ++i) slopes.push_back(size * draw(random));
            call.offset = int64_t(random() % 200) - 100;
        }
        if (chance(random, 0.2)) plant(random);
        if (chance(random, 0.3)) {
            call.dropout = {pick_number(random, {0.1, 0.1, 0.5, 0.9, 0.99, 1e-12, 1.0}), int64_t(random() >> 1),
                            pick(random, {0, 0, 5, (int64_t(1) << 32) - 3, int64_t(1) << 40})};
        }
        connect();
    }

    // Addresses and strides of the arrays into the call.
    void connect() {
        call.q = {q.data, q.strides[0], q.strides[1], q.strides[2], q.strides[3], q.strides[4]};
        call.k = {k.data, k.strides[0], k.strides[1], k.strides[2], k.strides[3]};
        call.v = {v.data, v.strides[0], v.strides[1], v.strides[2], v.strides[3]};
        call.scale = {reinterpret_cast<const double*>(scale.data), scale.strides[0], scale.strides[1], scale.strides[2],
                      scale.strides[3]};
        call.sinks = sinks.empty() ? nullptr : sinks.data();
        if (!slopes.empty()) call.alibi = {slopes.data(), 0, call.shared, 1, 0};
        if (call.mask.kind == MaskKind::none) return;
        call.mask = {call.mask.kind,  mask.data,       mask.strides[0], mask.strides[1],
                     mask.strides[2], mask.strides[3], mask.strides[4]};
    }

    int64_t mask_bytes() const { return call.mask.kind == MaskKind::boolean ? 1 : bytes_of(mask_dtype()); }

    // The same call with every array in C order.
    void lie_contiguously() {
        const int64_t item = bytes_of(call.dtype);
        q = q.as_contiguous(item);
        k = k.as_contiguous(item);
        v = v.as_contiguous(item);
        scale = scale.as_contiguous(8);
        if (call.mask.kind != MaskKind::none) mask = mask.as_contiguous(mask_bytes());
        connect();
    }

    void print() const {
        std::printf("  dtype %d, batch %ld, groups %ld, shared %ld, queries %ld, keys %ld, d_k %ld, d_v %ld, exact %d",
                    int(call.dtype), long(call.batch), long(call.groups), long(call.shared), long(call.queries),
                    long(call.keys), long(call.d_k), long(call.d_v), exact);
        std::printf(", scale %g, mask %d, first %ld, last %ld, softcap %g, sink %g, dropout %g, threads %d\n",
                    call.scale.data[0], int(call.mask.kind), long(call.first), long(call.last), call.softcap,
                    sinks.empty() ? NAN : sinks[0], call.dropout.probability, call.threads);
    }

  private:
    Dtype mask_dtype() const { return Dtype(int(call.mask.kind) - int(MaskKind::float16)); }

    static double draw(Random& random) { return std::normal_distribution<>()(random); }

    void choose_shape(Random& random) {
        call.batch = pick(random, {1, 1, 2, 3});
        call.groups = pick(random, {1, 1, 1, 2, 3});
        call.shared = pick(random, {1, 1, 1, 2, 4, 7});
        call.threads = int(pick(random, {1, 1, 2, 3, 4}));
        call.d_k = pick(random, {1, 2, 3, 4, 7, 8, 9, 16, 17, 33});
        call.d_v = pick(random, {0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 33});
        if (chance(random, 0.05)) call.d_k = pick(random, {64, 65, 128, 131});
        if (chance(random, 0.05)) call.d_v = pick(random, {64, 65, 128, 131});
        if (chance(random, 0.03)) {  // decoding, long enough for its keys to be cut
            call.batch = pick(random, {1, 2, 9});
            call.shared = call.queries = 1;
            call.keys = pick(random, {1024, 1025, 1537, 2300});
            return;
        }
        call.queries = pick(random, {1, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33});
        call.keys = pick(random, {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65});
        if (chance(random, 0.08)) call.queries = pick(random, {63, 64, 65, 130});
        if (chance(random, 0.08)) call.keys = pick(random, {127, 128, 129, 257, 300});
    }

    void fill(Random& random) {
        const bool narrow = call.dtype == Dtype::float16, wide = call.dtype == Dtype::float64;
        const auto size = [&] {
            if (exact || narrow || chance(random, 0.8)) return 1.0;
            return wide ? pick_number(random, {1e-160, 1e-30, 1e19, 1e153})
                        : pick_number(random, {1e-30, 1e-10, 1e10, 1e18});
        };
        for (Array* array : {&q, &k}) {
            const double factor = size();
            for (int64_t at = 0; at < array->count(); ++at) {
                const double number = exact ? double(pick(random, {-2, -1, 0, 0, 1, 1})) : factor * draw(random);
                naive::store(call.dtype, array->data, array->offset(at), number);
            }
        }
        const double largest = largest_of(call.dtype);
        const double factor =
            chance(random, 0.85) ? 1.0 : pick_number(random, {0.2 * largest, 1e-3 * largest, 1.0 / largest});
        for (int64_t at = 0; at < v.count(); ++at) {
            const double number =
                factor == 1.0 ? draw(random) : factor * (double(random() >> 11) * 0x1p-53 * 2.0 - 0.5);
            naive::store(call.dtype, v.data, v.offset(at), number);
        }
        fill_scale(random);
    }

    void fill_scale(Random& random) {
        const int kind = int(random() % 10);
        for (int64_t at = 0; at < scale.count(); ++at) {
            double number = 1.0 / std::sqrt(double(call.d_k)) * (1.0 + 0.3 * draw(random));
            if (exact)
                number = std::ldexp(chance(random, 0.1) ? -1.0 : 1.0,
                                    kind < 6 ? int(random() % 6) - 3 : int(random() % 2070) - 1074);
            if (kind == 6) number = 0.0;
            if (!exact && kind == 7) number *= pick_number(random, {1e-13, 1e13, -3.0, 30.0});
            if (!exact && kind >= 8)
                number = (chance(random, 0.5) ? -1.0 : 1.0) * std::exp2(double(random() % 2070) - 1074.0);
            reinterpret_cast<double*>(scale.data)[scale.offset(at)] = number;
        }
    }

    void choose_range(Random& random) {
        constexpr int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
        call.first = chance(random, 0.25) ? int64_t(random() % 120) - 90 : least;
        call.last = chance(random, 0.45) ? int64_t(random() % 140) - 60 : most;
        if (chance(random, 0.03))
            call.first = pick(random, {least + 1, -(int64_t(1) << 62), int64_t(1) << 62, most - 1, most});
        if (chance(random, 0.03))
            call.last = pick(random, {least, least + 1, -(int64_t(1) << 62), int64_t(1) << 62, most - 1});
    }

    void make_mask(Random& random) {
        call.mask.kind = chance(random, 0.5) ? MaskKind::boolean : MaskKind(2 + random() % 4);
        const bool boolean = call.mask.kind == MaskKind::boolean;
        mask = Array(random, {call.batch, call.groups, call.shared, call.queries, call.keys}, mask_bytes(), 0.3);
        const double visible = double(pick(random, {0, 50, 90, 100})) / 100.0;
        const bool any_byte = chance(random, 0.5), zeros = chance(random, 0.3);
        const double size = chance(random, 0.9) ? 1.0 : pick_number(random, {1e4, 1e30, 1e300});
        for (int64_t number = 0; number < mask.count(); ++number) {
            const int64_t at = mask.offset(number);
            const bool sees = chance(random, visible);
            if (boolean) {
                mask.data[at] = char(!sees ? 0 : any_byte ? 1 + random() % 255 : 1);
            } else {
                const double bias = zeros ? 0.0 : size * draw(random);
                const double kept = std::fmax(-largest_of(mask_dtype()), std::fmin(bias, largest_of(mask_dtype())));
                naive::store(mask_dtype(), mask.data, at, sees ? kept : -std::numeric_limits<double>::infinity());
            }
        }
    }

    // NaN or infinity somewhere, visible or not.
    void plant(Random& random) {
        constexpr double infinity = std::numeric_limits<double>::infinity();
        const bool additive = call.mask.kind > MaskKind::boolean;
        for (int64_t left = pick(random, {1, 1, 2, 5}); left > 0; --left) {
            const double poison = pick_number(random, {std::numeric_limits<double>::quiet_NaN(), infinity, -infinity});
            Array* const arrays[] = {&q, &k, &v, additive ? &mask : &v};
            Array* array = arrays[random() % 4];
            const int64_t at = array->offset(int64_t(random() % uint64_t(array->count())));
            naive::store(array == &mask ? mask_dtype() : call.dtype, array->data, at, poison);
        }
    }
};

}  // namespace sqrtdk
