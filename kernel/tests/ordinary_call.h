// Random calls with numbers of ordinary size: shapes that hit the tails, any strides, masks, ranges, features and
// dtypes.
#pragma once

#include <cstdio>

#include "array.h"
#include "naive.h"

namespace sqrtdk {

struct Case {
    Forward call = {};
    Array q, k, v, scale, mask;
    std::vector<double> sinks, slopes;

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
        q = Array(random, {call.batch, call.groups, call.shared, call.queries, call.d_k}, item, 0.0);
        k = Array(random, {call.batch, call.groups, call.keys, call.d_k}, item, 0.0);
        v = Array(random, {call.batch, call.groups, call.keys, call.d_v}, item, 0.0);
        for (Array* array : {&q, &k, &v}) {
            array->each([&](int64_t at, const std::vector<int64_t>&) {
                naive::store(call.dtype, array->data, at, normal(random));
            });
        }
        call.q = {q.data, q.strides[0], q.strides[1], q.strides[2], q.strides[3], q.strides[4]};
        call.k = {k.data, k.strides[0], k.strides[1], k.strides[2], k.strides[3]};
        call.v = {v.data, v.strides[0], v.strides[1], v.strides[2], v.strides[3]};
        scale = Array(random, {call.batch, call.groups, call.shared, call.queries}, 8, 0.4);
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
        if (chance(random, 0.3)) {
            for (int64_t i = 0; i < call.groups * call.shared; ++i) slopes.push_back(0.02 * normal(random));
            call.alibi = {slopes.data(), 0, call.shared, 1, 0};
            call.offset = int64_t(random() % 100) - 50;
        }
        if (chance(random, 0.5)) make_mask(random);
        if (chance(random, 0.3)) poison_hidden_keys(random);
        if (chance(random, 0.3)) call.dropout = {chance(random, 0.5) ? 0.1 : 0.5, int64_t(random() >> 1), 0};
    }

    void make_mask(Random& random) {
        call.mask.kind = chance(random, 0.5) ? MaskKind::boolean : MaskKind(2 + random() % 4);
        const bool boolean = call.mask.kind == MaskKind::boolean;
        const Dtype dtype = boolean ? Dtype::float64 : Dtype(int(call.mask.kind) - int(MaskKind::float16));
        const std::vector<int64_t> shape = {call.batch, call.groups, call.shared, call.queries, call.keys};
        mask = Array(random, shape, boolean ? 1 : bytes_of(dtype), 0.4);
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
        const double poison =
            chance(random, 0.5) ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
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

inline void print(const Case& test) {
    const Forward& call = test.call;
    std::printf("  dtype %d, batch %ld, groups %ld, shared %ld, queries %ld, keys %ld, d_k %ld, d_v %ld",
                int(call.dtype), long(call.batch), long(call.groups), long(call.shared), long(call.queries),
                long(call.keys), long(call.d_k), long(call.d_v));
    std::printf(", mask %d, first %ld, last %ld, softcap %g, sinks %d, dropout %g\n", int(call.mask.kind),
                long(call.first), long(call.last), call.softcap, call.sinks != nullptr, call.dropout.probability);
}

}  // namespace sqrtdk
