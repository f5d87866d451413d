// The products of fewer than eight rows: neighbouring features in lanes, and every key and value read once for all
// rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "rows/place.h"
#include "simd/numbers.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

constexpr int few_block = 512;  // long runs of keys and of values in turn suit the prefetcher

// Lane i is the sum of the lanes of rows[i].
template <class T>
inline typename Simd<T>::Vec add_each(typename Simd<T>::Vec (&rows)[Simd<T>::lanes]) {
    using S = Simd<T>;
    if constexpr (S::has_add_each) {
        return S::add_each(rows);
    } else {
        return Vectors<T>::add_up(rows);
    }
}

template <class T>
inline double add_lanes(typename Simd<T>::Vec v) {
    T x[Simd<T>::lanes];
    Simd<T>::store(x, v);
    double sum = 0;
    for (int i = 0; i < Simd<T>::lanes; ++i) sum += double(x[i]);
    return sum;
}

// Keys or values that all rows take before the next of them are read: they stay in the first cache until then.
constexpr int64_t stretch = 32;

inline uint64_t bits_below(int64_t count) { return count == 64 ? ~0ull : (1ull << count) - 1; }

// Asks for rows of memory ahead of their use, some lines in each turn: what one row of queries computes with one
// stretch leaves the memory idle, more so what eight of them do.
template <class In>
struct Ahead {
    static constexpr int64_t line = 64 / sizeof(In);
    const In* row = nullptr;
    ptrdiff_t step = 0;
    int64_t rows = 0, width = 0, lines = 0, at = 0;

    // `count` rows in so many turns; none if their numbers are not next to each other.
    Ahead(const In* from, ptrdiff_t row_step, ptrdiff_t column_step, int64_t count, int64_t columns, int64_t turns)
        : row(from), step(row_step), rows(column_step == 1 ? count : 0), width(columns) {
        if (step == width && rows > 0) {
            width *= rows;
            rows = 1;
        }
        if (turns > 0) lines = (rows * ((width + line - 1) / line) + turns - 1) / turns;
    }
    Ahead() = default;
    inline __attribute__((always_inline)) void take_turn() {
        for (int64_t i = 0; i < lines && rows > 0; ++i) {
            __builtin_prefetch(row + at, 0, 2);  // into the second cache: the first has no room
            at += line;
            if (at < width) continue;
            at = 0;
            if (--rows > 0) row += step;
        }
    }
};

template <class T, class In>
struct FewProducts {
    using S = Simd<T>;
    using Vec = typename S::Vec;

    // Rows of the block next to each other, so that a vector holds neighbouring features.
    static BlockView<T> view(const In* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width, T* copy) {
        if (step == 1) return view_block<T, In>(from, row, step, rows, width, copy);
        copy_block<T, In>(from, row, step, rows, width, copy);
        return {copy, ptrdiff_t(width), 1};
    }

    // Calls body(first, how many) for rows [0, rows), four, two or one at a time.
    template <class Body>
    static void each_rows(int rows, Body body) {
        int i = 0;
        for (; i + 4 <= rows; i += 4) body(i, std::integral_constant<int, 4>());
        if (i + 2 <= rows) {
            body(i, std::integral_constant<int, 2>());
            i += 2;
        }
        if (i < rows) body(i, std::integral_constant<int, 1>());
    }

    // scores[row][j] = <key j, query of the row>, as many keys at a time as registers allow. A sum's lanes are added up
    // when there are as many sums as lanes.
    template <int R>
    static void multiply_keys(const BlockView<T>& keys, const T* const (&queries)[R], int64_t d_k, int64_t count,
                              T* const (&scores)[R], Ahead<In>& ahead) {
        constexpr int keys_at_once = S::lanes > R ? S::lanes / R : 1;
        const int64_t whole = d_k - d_k % S::lanes;
        for (int64_t j = 0; j < count; j += S::lanes) {
            Vec sums[R][S::lanes];
            for (int first = 0; first < S::lanes; first += keys_at_once) {
                const T* at[keys_at_once];
                Vec sum[R][keys_at_once];
                for (int i = 0; i < keys_at_once; ++i) {
                    at[i] = keys.data + smaller(j + first + i, count - 1) * keys.row;
                    for (int r = 0; r < R; ++r) sum[r][i] = S::zero();
                }
                for (int64_t d = 0; d < whole; d += S::lanes) {
                    ahead.take_turn();
                    Vec query[R];
                    for (int r = 0; r < R; ++r) query[r] = S::load(queries[r] + d);
                    for (int i = 0; i < keys_at_once; ++i) {
                        const Vec key = S::load(at[i] + d);
                        for (int r = 0; r < R; ++r) sum[r][i] = S::fma(query[r], key, sum[r][i]);
                    }
                }
                for (int r = 0; r < R; ++r)
                    for (int i = 0; i < keys_at_once; ++i) sums[r][first + i] = sum[r][i];
            }
            for (int r = 0; r < R; ++r) {
                T x[S::lanes];
                S::store(x, add_each<T>(sums[r]));
                for (int i = 0; i < S::lanes && j + i < count; ++i) {
                    const T* key = keys.data + (j + i) * keys.row;
                    for (int64_t d = whole; d < d_k; ++d) x[i] += queries[r][d] * key[d];
                    scores[r][j + i] = x[i];
                }
            }
        }
    }
    // Turns that a row has while its scores of a stretch are taken.
    static int64_t key_turns(int64_t count, int64_t d_k) {
        return (count + S::lanes - 1) / S::lanes * (d_k / S::lanes);
    }

    // What R rows have of a stretch.
    template <int R>
    struct Weighed {
        const T* weights[R];
        uint64_t sees[R];
        T factor[R];
        T* output[R];
    };

    // Vectors of a value that are taken at a time.
    static constexpr int chunk = 4;
    // Turns that a row has while a stretch of values is added up; a few at the end of a value are not counted.
    static int64_t value_turns(int64_t count, int64_t d_v) { return count * (d_v / (chunk * S::lanes)) / most_rows; }
    static constexpr int most_rows = 4;

    // output = output * factor + sum_j weight_j * value_j, over the keys of a stretch that are seen.
    template <int R>
    static void add_values(const Weighed<R>& rows, const BlockView<T>& values, int64_t count, int64_t d_v,
                           Ahead<In>& ahead) {
        int64_t d = 0;
        for (; d + chunk * S::lanes <= d_v; d += chunk * S::lanes) add_chunk<R, chunk>(rows, values, count, d, ahead);
        for (; d + S::lanes <= d_v; d += S::lanes) add_chunk<R, 1>(rows, values, count, d, ahead);
        for (; d < d_v; ++d)
            for (int r = 0; r < R; ++r) {
                T sum = rows.output[r][d] * rows.factor[r];
                for (int64_t j = 0; j < count; ++j)
                    if (rows.sees[r] >> j & 1) sum += rows.weights[r][j] * values.data[j * values.row + d];
                rows.output[r][d] = sum;
            }
    }

    template <int R, int vectors>
    static void add_chunk(const Weighed<R>& rows, const BlockView<T>& values, int64_t count, int64_t d,
                          Ahead<In>& ahead) {
        // One row alone has two sums of each vector, of even and of odd keys: one would wait for itself.
        constexpr int sums = R == 1 ? 2 : R;
        Vec sum[sums][vectors];
        uint64_t all = ~0ull, any = 0;
        for (int r = 0; r < sums; ++r)
            for (int c = 0; c < vectors; ++c)
                sum[r][c] =
                    r < R ? S::mul(S::load(rows.output[r] + d + c * S::lanes), S::all(rows.factor[r])) : S::zero();
        for (int r = 0; r < R; ++r) {
            all &= rows.sees[r];
            any |= rows.sees[r];
        }
        const T* v = values.data + d;
        int64_t j = 0;
        if (all == bits_below(count)) {
            for (; j + sums / R <= count; j += sums / R) {
                ahead.take_turn();
                for (int r = 0; r < sums; ++r) {
                    const Vec weight = S::all(rows.weights[r % R][j + r / R]);
                    const T* p = v + (j + r / R) * values.row;
                    for (int c = 0; c < vectors; ++c) sum[r][c] = S::fma(weight, S::load(p + c * S::lanes), sum[r][c]);
                }
            }
        }
        for (; j < count; ++j) {
            if (!(any >> j & 1)) continue;
            for (int r = 0; r < R; ++r) {
                if (!(rows.sees[r] >> j & 1)) continue;
                const Vec weight = S::all(rows.weights[r][j]);
                for (int c = 0; c < vectors; ++c)
                    sum[r][c] = S::fma(weight, S::load(v + j * values.row + c * S::lanes), sum[r][c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < vectors; ++c)
                S::store(rows.output[r] + d + c * S::lanes, R == 1 ? S::add(sum[0][c], sum[sums - 1][c]) : sum[r][c]);
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
