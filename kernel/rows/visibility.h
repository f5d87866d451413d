// Visibility: causal, window, mask and tails all end in one word of bits per key, one bit per row of the tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "rows/logits.h"
#include "rows/place.h"
#include "simd/bytes.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

constexpr int key_block = 128;

struct KeyRange {
    int64_t lo, hi;
};

// The keys that query l sees but for the mask, as lo <= hi. If there are none, lo = keys and hi = -1: a row that widens
// no range of which it is a part. Open sides are int64 limits, so the sums must not wrap.
inline KeyRange key_range(const Problem& call, int64_t l) {
    int64_t lo, hi;
    if (__builtin_add_overflow(l, call.first, &lo)) lo = call.first < 0 ? INT64_MIN : INT64_MAX;
    if (__builtin_add_overflow(l, call.last, &hi)) hi = call.last < 0 ? INT64_MIN : INT64_MAX;
    const KeyRange range = {larger(lo, 0), smaller(hi, call.keys - 1)};
    return range.lo <= range.hi ? range : KeyRange{call.keys, -1};
}

enum class Sight { nothing, everything, something };

// 64 x 64 bits: bit j of word i <-> bit i of word j (Warren, Hacker's Delight, 7-3, recursive block swaps).
inline void transpose_bits(uint64_t (&words)[64]) {
    uint64_t mask = 0x00000000ffffffffull;
    for (int width = 32; width != 0; width >>= 1, mask ^= mask << width)
        for (int i = 0; i < 64; i = ((i | width) + 1) & ~width) {
            const uint64_t swapped = ((words[i] >> width) ^ words[i | width]) & mask;
            words[i] ^= swapped << width;
            words[i | width] ^= swapped;
        }
}

// One bit for each of `count` <= 64 bytes, `step` apart: is it not zero.
inline uint64_t read_booleans(const uint8_t* p, int64_t step, int64_t count) {
    if (step == 1 && count == 64) return find_nonzero(p);
    uint64_t bits = 0;
    int64_t j = 0;
    if (step == 1)
        for (; j + 8 <= count; j += 8) bits |= find_nonzero_of_eight(p + j) << j;
    for (; j < count; ++j) bits |= uint64_t(p[j * step] != 0) << j;
    return bits;
}

template <class T, int W>
struct Visibility {
    static constexpr uint64_t every_row = W == 64 ? ~0ull : (1ull << (W % 64)) - 1;

    int64_t lo[W], hi[W];  // range of visible keys of each row, before the mask
    int64_t mask_row[W];   // where each row of the mask begins, in elements
    bool one_mask;         // all rows have the same row of the mask
    PositionBias<W> by_position;
    int64_t most_lo, least_hi;
    uint64_t words[key_block];
    // Aligned: GCC 12 takes it for that where a loop over rows is the outer one.
    alignas(64) T bias[key_block * W];  // what the mask and positions add, turned: [key][row]

    // To be called when every row has its range.
    void settle() {
        most_lo = lo[0];
        least_hi = hi[0];
        for (int i = 1; i < W; ++i) {
            most_lo = larger(most_lo, lo[i]);
            least_hi = smaller(least_hi, hi[i]);
        }
    }

    // Whether the keys [begin, end) lie in the range of every row.
    bool is_whole(int64_t begin, int64_t end) const { return most_lo <= begin && least_hi >= end - 1; }

    int64_t first_key() const {
        int64_t first = lo[0];
        for (int i = 1; i < W; ++i) first = smaller(first, lo[i]);
        return first;
    }
    int64_t end_key() const {
        int64_t last = hi[0];
        for (int i = 1; i < W; ++i) last = larger(last, hi[i]);
        return last + 1;
    }

    // Works out the words of the keys [begin, end), and the bias where the mask is additive.
    Sight look(const Mask& mask, int64_t begin, int64_t end) {
        const int64_t count = end - begin;
        const bool all = is_whole(begin, end);
        if (all && mask.kind == MaskKind::none) {
            if (by_position.is_there) by_position.write(bias, begin, count, false);
            return Sight::everything;
        }
        bool none = true;
        for (int i = 0; i < W; ++i) none = none && (lo[i] > hi[i] || lo[i] >= end || hi[i] < begin);
        if (none) return Sight::nothing;
        if (all) {
            for (int64_t j = 0; j < count; ++j) words[j] = every_row;
        } else {
            toggle_ranges(begin, count);
        }
        if (mask.kind == MaskKind::boolean) {
            intersect_boolean(mask, begin, count);
        } else if (mask.kind != MaskKind::none) {
            turn_bias(mask, begin, count);
        }
        if (by_position.is_there) by_position.write(bias, begin, count, mask.kind > MaskKind::boolean);
        uint64_t any = 0, every = every_row;
        for (int64_t j = 0; j < count; ++j) {
            any |= words[j];
            every &= words[j];
        }
        if (any == 0) return Sight::nothing;
        return every == every_row ? Sight::everything : Sight::something;
    }

  private:
    // Each row switches its bit on at its first key and off after its last; a running XOR gives the words.
    void toggle_ranges(int64_t begin, int64_t count) {
        uint64_t toggles[key_block + 1] = {};
        for (int i = 0; i < W; ++i) {
            const int64_t on = larger(lo[i] - begin, 0), off = smaller(hi[i] - begin + 1, count);
            if (on >= off) continue;
            toggles[on] ^= 1ull << i;
            toggles[off] ^= 1ull << i;
        }
        uint64_t word = 0;
        for (int64_t j = 0; j < count; ++j) {
            word ^= toggles[j];
            words[j] = word;
        }
    }

    void intersect_boolean(const Mask& mask, int64_t begin, int64_t count) {
        const uint8_t* data = static_cast<const uint8_t*>(mask.data);
        if (one_mask) {
            const uint8_t* p = data + mask_row[0] + begin * mask.s;
            for (int64_t j = 0; j < count; ++j) words[j] &= p[j * mask.s] ? ~0ull : 0ull;
            return;
        }
        for (int64_t from = 0; from < count; from += 64) {
            const int64_t some = smaller(count - from, 64);
            uint64_t bits[64] = {};
            for (int i = 0; i < W; ++i)
                bits[i] = read_booleans(data + mask_row[i] + (begin + from) * mask.s, mask.s, some);
            transpose_bits(bits);
            for (int64_t j = 0; j < some; ++j) words[from + j] &= bits[j];
        }
    }

    void turn_bias(const Mask& mask, int64_t begin, int64_t count) {
        for (int i = 0; i < W; ++i) {
            if (one_mask && i > 0) break;
            for (int64_t j = 0; j < count; ++j) {
                const double x = read_mask(mask, mask_row[i] + (begin + j) * mask.s);
                const bool hidden = x == -INFINITY;
                const uint64_t bit = one_mask ? ~0ull : 1ull << i;
                if (hidden) words[j] &= ~bit;
                bias[j * W + i] = hidden ? T(0) : T(x);
            }
        }
        if (one_mask)
            for (int64_t j = 0; j < count; ++j)
                for (int i = 1; i < W; ++i) bias[j * W + i] = bias[j * W];
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
