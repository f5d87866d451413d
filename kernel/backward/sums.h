// Sums that the tiles of a head add up for its keys and values, and the block of keys they add up for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows/place.h"
#include "simd/numbers.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

constexpr int backward_block = 64;  // keys; not above key_block

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
    uint64_t nonfinite;          // one bit per key
    bool fresh;                  // the sums of its keys hold nothing yet
};

// Sums of one or more splits, in order, to the gradients of the keys [begin, end) of one head.
template <class T, class In>
void write_sums(const T* sums, int64_t split_size, int64_t splits, int64_t row, int64_t width, int64_t begin,
                int64_t end, In* to) {
    constexpr int64_t chunk = 64;
    for (int64_t j = begin; j < end; ++j)
        for (int64_t first = 0; first < width; first += chunk) {
            double total[chunk] = {};
            const int64_t count = smaller(chunk, width - first);
            for (int64_t split = 0; split < splits; ++split)
                for (int64_t d = 0; d < count; ++d) total[d] += double(sums[split * split_size + j * row + first + d]);
            for (int64_t d = 0; d < count; ++d) to[j * width + first + d] = narrow(Working<In>(total[d]), In());
        }
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
