// Dropout: which weights are kept is a function of seed, row and key alone, so that the backward pass draws what the
// forward pass drew, on every level and in any order.
//
//   start, step, twist = words of 32 bits from seed and row, once per row; the step is odd
//   draw(row, key)     = start + key * step, mixed, the twist stirred in half way: vertical in tiles, along a few rows
//
// The step is a row's own: with one step for all, any two rows would mix the same numbers, one some keys behind the
// other, and nothing but their twists would tell them apart.
//
// src/sqrtdk/operation/dropout.py draws the same words in NumPy and torch, and a test compares them.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Odd, and below 2^31, as steps are: their products with a word stay within int64, which is what torch has.
constexpr uint32_t first_multiplier = 0x21f0aaad, second_multiplier = 0x735a2d97;

// A permutation of the words in which every bit moves every other (Mueller, Wellons: hash prospector).
inline uint32_t mix(uint32_t word) {
    word ^= word >> 16;
    word *= first_multiplier;
    word ^= word >> 15;
    word *= second_multiplier;
    return word ^ word >> 15;
}

// The same with the twist, without the last step, which would change the lower half alone. One word or a vector.
template <class Words>
inline __attribute__((always_inline)) Words draw(Words word, Words twist) {
    word ^= word >> 16;
    word *= first_multiplier;
    word ^= word >> 15 ^ twist;
    return word * second_multiplier;
}

// What is drawn below the threshold is dropped, what is kept grows by the factor.
struct Odds {
    uint32_t threshold;
    double factor;

    explicit Odds(const Dropout& dropout) {
        const double least = dropout.probability * 0x1p32;
        threshold = least < 0xffffffffp0 ? uint32_t(least) : 0xffffffffu;
        factor = dropout.probability < 1.0 ? 1.0 / (1.0 - dropout.probability) : 0.0;
    }
};

// The words of one row.
struct RowDraw {
    uint32_t start, step, twist;

    // `row` counts from the first of this call.
    static RowDraw of(const Dropout& dropout, int64_t row) {
        const uint64_t number = uint64_t(dropout.first_row + row), seed = uint64_t(dropout.seed);
        const uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
        const uint32_t key = mix(low ^ mix(high + 1)), other_key = mix(high ^ mix(low + 1));
        const uint32_t start = mix(uint32_t(number) ^ mix(uint32_t(number >> 32) ^ key));
        const uint32_t twist = mix(start + other_key);
        return {start, mix(twist ^ key) >> 1 | 1, twist};
    }

    uint32_t at(int64_t key) const { return draw(start + uint32_t(key) * step, twist); }
};

// What becomes of the weights of one row, key by key.
struct RowDropout {
    bool drops;
    Odds odds;
    RowDraw row;

    RowDropout(const Dropout& dropout, int64_t number)
        : drops(dropout.probability > 0), odds(dropout), row(RowDraw::of(dropout, number)) {}

    double apply(double weight, int64_t key) const {
        if (!drops) return weight;
        return row.at(key) < odds.threshold ? 0.0 : weight * odds.factor;
    }
};

// As many words as a vector has numbers, and what they decide in the numbers' own width. Written out for both: in a
// template GCC forgets that they are vectors.
template <class T>
struct DrawTypes;
template <>
struct DrawTypes<float> {
    typedef uint32_t Words __attribute__((vector_size(4 * Simd<float>::lanes)));
    typedef int32_t Signs __attribute__((vector_size(4 * Simd<float>::lanes)));
    typedef Signs Kept;
};
template <>
struct DrawTypes<double> {
    typedef uint32_t Words __attribute__((vector_size(4 * Simd<double>::lanes)));
    typedef int32_t Signs __attribute__((vector_size(4 * Simd<double>::lanes)));
    typedef int64_t Kept __attribute__((vector_size(8 * Simd<double>::lanes)));
};

template <class T>
struct DrawLanes : DrawTypes<T> {
    using S = Simd<T>;
    using Words = typename DrawTypes<T>::Words;
    using Signs = typename DrawTypes<T>::Signs;
    using Kept = typename DrawTypes<T>::Kept;

    SQRTDK_INLINE Words load(const uint32_t* p) {
        Words words;
        __builtin_memcpy(&words, p, sizeof words);
        return words;
    }
    // Ones in the lanes that keep their number, else zeros.
    SQRTDK_INLINE Kept kept(Words word, Words twist, uint32_t threshold) {
        const Signs signs = (Signs)(draw(word, twist) >= threshold);
        return __builtin_convertvector(signs, Kept);
    }
    SQRTDK_INLINE typename S::Vec keep(Kept kept, typename S::Vec x) { return (typename S::Vec)(kept & (Kept)x); }
};

// The rows of a tile.
template <class T, int W>
struct TileDraws {
    using S = Simd<T>;
    using D = DrawLanes<T>;

    alignas(64) uint32_t start[W], step[W], twist[W];
    uint32_t threshold;
    T factor;

    // Rows that are not there get words as well.
    void place(const Dropout& dropout, int64_t first_row) {
        const Odds odds(dropout);
        threshold = odds.threshold;
        factor = T(odds.factor);
        for (int i = 0; i < W; ++i) {
            const RowDraw row = RowDraw::of(dropout, first_row + i);
            start[i] = row.start;
            step[i] = row.step;
            twist[i] = row.twist;
        }
    }

    // One vector of rows: numbers [key][W] become 0 where the draw says so; `grown`: the others grow by the factor.
    template <bool grown>
    __attribute__((noinline)) void drop(T* numbers, int64_t first_key, int64_t keys, int at) const {
        const auto twists = D::load(twist + at), steps = D::load(step + at);
        const auto grow = S::all(factor);
        auto word = D::load(start + at) + uint32_t(first_key) * steps;
#pragma GCC unroll 2
        for (int64_t j = 0; j < keys; ++j, word += steps) {
            const auto x = D::keep(D::kept(word, twists, threshold), S::load(numbers + j * W));
            S::store(numbers + j * W, grown ? S::mul(x, grow) : x);
        }
    }

    // The same of weights in pairs of keys [key / 2][W] (pairs.h).
    __attribute__((noinline)) void drop_pairs(T* pairs, int64_t first_key, int64_t keys, int at) const {
        const auto twists = D::load(twist + at), steps = D::load(step + at);
        auto word = D::load(start + at) + uint32_t(first_key) * steps;
        for (int64_t j = 0; j < keys; j += 2, word += 2 * steps) {
            const auto first = D::kept(word, twists, threshold), second = D::kept(word + steps, twists, threshold);
            T* const to = pairs + j / 2 * W;
            S::store(to, D::keep((first & 0x0000ffff) | (second & ~0x0000ffff), S::load(to)));
        }
    }
};

// Weights of one row, whose keys are in lanes, become 0 where the draw says so; room up to a whole vector.
template <class T>
void drop_row(const Dropout& dropout, int64_t row, int64_t first_key, int64_t keys, T* weights) {
    using S = Simd<T>;
    using D = DrawLanes<T>;
    const Odds odds(dropout);
    const RowDraw words = RowDraw::of(dropout, row);
    uint32_t starts[S::lanes], twists[S::lanes];
    for (int i = 0; i < S::lanes; ++i) {
        starts[i] = words.start + uint32_t(first_key + i) * words.step;
        twists[i] = words.twist;
    }
    auto word = D::load(starts);
    for (int64_t j = 0; j < keys; j += S::lanes, word += uint32_t(S::lanes) * words.step) {
        const auto kept = D::kept(word, D::load(twists), odds.threshold);
        S::store(weights + j, D::keep(kept, S::load(weights + j)));
    }
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
