// Vectors of the working precision from and to rows of numbers of any dtype.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd/numbers.h"
#include "simd/pairs.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T>
inline int64_t padded(int64_t width) {
    return (width + Simd<T>::lanes - 1) / Simd<T>::lanes * Simd<T>::lanes;
}

template <class T>
struct Vectors {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    static constexpr uint64_t every_lane = (1ull << S::lanes) - 1;

    // A whole vector, known when it is compiled.
    struct Whole {
        constexpr operator int64_t() const { return S::lanes; }
    };

    // Calls body(d, count) for every vector of a row, and for what is left of it: `count` numbers from the d-th on.
    template <class Body>
    SQRTDK_INLINE void each(int64_t width, const Body& body) {
        int64_t d = 0;
        for (; d + S::lanes <= width; d += S::lanes) body(d, Whole());
        if (d < width) body(d, width - d);
    }

    // Numbers `step` apart, the first `count` of a vector; the other lanes are 0.
    template <class Other>
    SQRTDK_INLINE Vec load(const Other* p, int64_t step, int64_t count) {
        T copy[S::lanes];
        if (count < S::lanes) {
            for (int i = 0; i < S::lanes; ++i) copy[i] = i < count ? T(widen(p[i * step])) : T(0);
            return S::load(copy);
        }
        if constexpr (std::is_same<T, Other>::value) {
            if (step == 1) return S::load(p);
        } else if constexpr (in_pairs<T, Other>) {
            if (step == 1) return PairSimd<T>::widen(&p->bits);
        }
        for (int i = 0; i < S::lanes; ++i) copy[i] = widen(p[i * step]);
        return S::load(copy);
    }

    // The first `count` lanes.
    template <class Other>
    SQRTDK_INLINE void store(Other* p, Vec x, int64_t count) {
        if (count >= S::lanes) {
            if constexpr (std::is_same<T, Other>::value) return S::store(p, x);
            if constexpr (in_pairs<T, Other>) return PairSimd<T>::store_exactly(&p->bits, x);
        }
        alignas(64) T row[S::lanes];
        Other narrowed[S::lanes];
        S::store(row, x);
        for (int i = 0; i < S::lanes; ++i) narrowed[i] = narrow(Working<Other>(row[i]), Other());
        __builtin_memcpy(p, narrowed, size_t(count < S::lanes ? count : S::lanes) * sizeof(Other));
    }

    // A square of numbers: load(i) gives row i, store(i, x) takes column i.
    template <class Load, class Store>
    SQRTDK_INLINE void turn(const Load& load, const Store& store) {
        Vec square[S::lanes];
        for (int i = 0; i < S::lanes; ++i) square[i] = load(i);
        S::transpose(square);
        for (int i = 0; i < S::lanes; ++i) store(i, square[i]);
    }

    // Lane i is the sum of the lanes of rows[i].
    static Vec add_up(Vec (&rows)[S::lanes]) {
        S::transpose(rows);
        for (int width = S::lanes / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) rows[i] = S::add(rows[i], rows[i + width]);
        return rows[0];
    }

    // A padded row times another, lane by lane.
    template <class Other>
    static Vec multiply(const T* row, const Other* other, int64_t step, int64_t width) {
        Vec sum = S::zero();
        each(width,
             [&](int64_t d, auto count) { sum = S::fma(S::load(row + d), load(other + d * step, step, count), sum); });
        return sum;
    }

    // Lanes that are 0 in a sum of numbers times 0: those whose numbers are all finite.
    static uint64_t sound(Vec check) { return S::bits(S::equal(check, S::zero())); }

    // A row times a factor, to a padded one. Returns whether it is finite.
    template <class In>
    static bool read_row(const In* from, int64_t step, int64_t width, T factor, T* to) {
        Vec check = S::zero();
        each(width, [&](int64_t d, auto count) {
            const Vec x = S::mul(load(from + d * step, step, count), S::all(factor));
            check = S::fma(x, S::zero(), check);
            S::store(to + d, x);
        });
        return sound(check) == every_lane;
    }

    // A padded row times a factor, to one that is not. Returns whether it is finite.
    template <class In>
    static bool write_row(const T* from, int64_t width, T factor, In* to) {
        Vec check = S::zero();
        each(width, [&](int64_t d, auto count) {
            const Vec x = S::mul(S::load(from + d), S::all(factor));
            check = S::fma(x, S::zero(), check);
            store(to + d, x, count);
        });
        return sound(check) == every_lane;
    }

    // Four sums, for one would wait for itself.
    static bool is_finite(const BlockView<T>& block, int64_t rows, int64_t width) {
        Vec checks[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
        T rest = 0;
        for (int64_t i = 0; i < rows; ++i) {
            const T* row = block.data + i * block.row;
            int64_t d = 0;
            if (block.step == 1) {
                for (; d + 4 * S::lanes <= width; d += 4 * S::lanes)
                    for (int c = 0; c < 4; ++c)
                        checks[c] = S::fma(S::load(row + d + c * S::lanes), S::zero(), checks[c]);
                for (; d + S::lanes <= width; d += S::lanes) checks[0] = S::fma(S::load(row + d), S::zero(), checks[0]);
            }
            for (; d < width; ++d) rest += row[d * block.step] * T(0);
        }
        const Vec check = S::add(S::add(checks[0], checks[1]), S::add(checks[2], checks[3]));
        return rest == 0 && sound(check) == every_lane;
    }
};

// Whether rows of numbers are all finite.
template <class T>
bool is_finite(const BlockView<T>& block, int64_t rows, int64_t width) {
    if constexpr (std::is_same<T, Bfloat16>::value) {
        bool infinite = false;
        for (int64_t i = 0; i < rows; ++i) {
            const Bfloat16* row = block.data + i * block.row;
            if (block.step == 1) {
                for (int64_t d = 0; d < width; ++d) infinite |= (row[d].bits & 0x7f80) == 0x7f80;
            } else {
                for (int64_t d = 0; d < width; ++d) infinite |= (row[d * block.step].bits & 0x7f80) == 0x7f80;
            }
        }
        return !infinite;
    } else {
        return Vectors<T>::is_finite(block, rows, width);
    }
}

// The rows of a block of 64 at most that are not finite, one bit each.
template <class T>
uint64_t find_infinite(const BlockView<T>& block, int64_t rows, int64_t width) {
    uint64_t nonfinite = 0;
    if (is_finite(block, rows, width)) return nonfinite;
    for (int64_t i = 0; i < rows; ++i)
        if (!is_finite(BlockView<T>{block.data + i * block.row, 0, block.step}, 1, width)) nonfinite |= 1ull << i;
    return nonfinite;
}

// A copy in which those rows are zeros: 0 * NaN would poison rows that do not see them.
template <class T>
BlockView<T> copy_finite(const BlockView<T>& block, int64_t rows, int64_t width, uint64_t nonfinite, T* to) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < width; ++d)
            to[i * width + d] = nonfinite >> i & 1 ? T{} : block.data[i * block.row + d * block.step];
    return {to, ptrdiff_t(width), 1};
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
