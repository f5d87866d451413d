// Random arrays, each in an allocation of its own that ends with its last element, so that a sanitizer sees the first
// byte read or written beyond it.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "kernel.h"

namespace sqrtdk {

using Random = std::mt19937_64;

inline int64_t pick(Random& random, std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
}

inline bool chance(Random& random, double probability) { return double(random() >> 11) * 0x1p-53 < probability; }

inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// An array of up to five axes that lies in memory in any order, forwards or backwards, spread out, or broadcast along
// each axis with the given probability.
struct Array {
    std::unique_ptr<char[]> memory;
    char* data = nullptr;
    std::vector<int64_t> sizes, strides;

    Array() = default;
    Array(Random& random, std::vector<int64_t> shape, int64_t bytes, double broadcast) : sizes(shape) {
        std::vector<size_t> order(shape.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        if (chance(random, 0.5)) std::shuffle(order.begin(), order.end(), random);
        strides.assign(shape.size(), 0);
        int64_t step = pick(random, {1, 1, 1, 2, 3}), least = 0, most = 0;
        for (size_t i = order.size(); i-- > 0;) {
            const size_t axis = order[i];
            if (chance(random, broadcast)) continue;
            strides[axis] = chance(random, 0.2) ? -step : step;
            (strides[axis] < 0 ? least : most) += strides[axis] * (shape[axis] - 1);
            step *= shape[axis];
            step += chance(random, 0.2) ? 3 : 0;
        }
        memory.reset(new char[size_t((most - least + 1) * bytes)]());
        data = memory.get() - least * bytes;
    }

    int64_t count() const {
        int64_t product = 1;
        for (int64_t size : sizes) product *= size;
        return product;
    }

    // Where the element with this number, counted in C order, lies.
    int64_t offset(int64_t number) const {
        int64_t at = 0;
        for (size_t i = sizes.size(); i-- > 0;) {
            at += number % sizes[i] * strides[i];
            number /= sizes[i];
        }
        return at;
    }

    // The same numbers one after the other.
    Array as_contiguous(int64_t bytes) const {
        Array copy;
        copy.sizes = sizes;
        copy.strides.assign(sizes.size(), 1);
        for (size_t i = sizes.size() - 1; i-- > 0;) copy.strides[i] = copy.strides[i + 1] * sizes[i + 1];
        copy.memory.reset(new char[size_t(count() * bytes)]);
        copy.data = copy.memory.get();
        for (int64_t at = 0; at < count(); ++at)
            std::memcpy(copy.data + at * bytes, data + offset(at) * bytes, size_t(bytes));
        return copy;
    }

    // Calls visit(offset in elements, index) for every element; a broadcast one is visited several times.
    template <typename Visit>
    void each(const Visit& visit) const {
        std::vector<int64_t> index(sizes.size(), 0);
        for (int64_t at = 0; at < count(); ++at) {
            int64_t left = at;
            for (size_t i = sizes.size(); i-- > 0; left /= sizes[i]) index[i] = left % sizes[i];
            visit(offset(at), index);
        }
    }
};

}  // namespace sqrtdk
