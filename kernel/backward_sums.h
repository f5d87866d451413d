// What the tiles of a head add up for its keys and values, and the block of keys they add up for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block_view.h"
#include "level.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

constexpr int backward_block = 64;  // keys; not above key_block

template <class T>
inline int64_t padded(int64_t width) {
    return (width + Simd<T>::lanes - 1) / Simd<T>::lanes * Simd<T>::lanes;
}

template <class T>
void clear(T* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) numbers[i] = 0;
}

// Where the gradients of one head's keys and values are added up, rows of the working precision padded to whole
// vectors.
template <class T>
struct KeySums {
    T* key;
    T* value;
    int64_t key_row, value_row;

    void clear(int64_t begin, int64_t end) const {
        sqrtdk::SQRTDK_LEVEL::clear(key + begin * key_row, (end - begin) * key_row);
        sqrtdk::SQRTDK_LEVEL::clear(value + begin * value_row, (end - begin) * value_row);
    }
};

template <class T>
struct PairedKeys;

// A block of keys and values that several tiles share. Keys that are not finite are zeros here and marked.
template <class T>
struct KeyBlock {
    int64_t begin, count;
    BlockView<T> keys, values;   // or, where products take pairs,
    const PairedKeys<T>* pairs;  // these
    uint64_t odd;                // one bit per key
    bool fresh;                  // the sums of its keys hold nothing yet
};

// Whether rows of numbers are all finite; four sums, for one would wait for itself.
template <class T>
bool is_finite(const BlockView<T>& block, int64_t rows, int64_t width) {
    using S = Simd<T>;
    typename S::Vec checks[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    T rest = 0;
    for (int64_t i = 0; i < rows; ++i) {
        const T* row = block.data + i * block.row;
        int64_t d = 0;
        if (block.step == 1) {
            for (; d + 4 * S::lanes <= width; d += 4 * S::lanes)
                for (int c = 0; c < 4; ++c) checks[c] = S::fma(S::load(row + d + c * S::lanes), S::zero(), checks[c]);
            for (; d + S::lanes <= width; d += S::lanes) checks[0] = S::fma(S::load(row + d), S::zero(), checks[0]);
        }
        for (; d < width; ++d) rest += row[d * block.step] * T(0);
    }
    const auto check = S::add(S::add(checks[0], checks[1]), S::add(checks[2], checks[3]));
    constexpr uint64_t lanes = (1ull << S::lanes) - 1;
    return rest == 0 && S::bits(S::equal(check, S::zero())) == lanes;
}

template <class T>
bool is_finite_row(const T* row, ptrdiff_t step, int64_t width) {
    return is_finite(BlockView<T>{row, 0, step}, 1, width);
}

// Sums of one or more splits, in order, to the gradients of the keys [begin, end) of one head.
template <class T, class In>
void write_sums(const T* sums, int64_t split_size, int64_t splits, int64_t row, int64_t width, int64_t begin,
                int64_t end, In* to) {
    using Out = decltype(widen(In()));
    constexpr int64_t chunk = 64;
    for (int64_t j = begin; j < end; ++j)
        for (int64_t first = 0; first < width; first += chunk) {
            double total[chunk] = {};
            const int64_t count = smaller(chunk, width - first);
            for (int64_t split = 0; split < splits; ++split)
                for (int64_t d = 0; d < count; ++d) total[d] += double(sums[split * split_size + j * row + first + d]);
            for (int64_t d = 0; d < count; ++d) to[j * width + first + d] = narrow(Out(total[d]), In());
        }
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
