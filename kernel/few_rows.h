// Keys in lanes: fewer than eight rows per key/value head, as in decoding. Reads every key and value once.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "block_view.h"
#include "careful.h"
#include "dropout.h"
#include "exponential.h"
#include "kernel.h"
#include "level.h"
#include "row_state.h"
#include "soften.h"
#include "tile.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

constexpr int few_block = 512;  // long runs of keys and of values in turn suit the prefetcher

// Lane i is the sum of the lanes of rows[i].
template <class T>
inline typename Simd<T>::Vec add_each(typename Simd<T>::Vec (&rows)[Simd<T>::lanes]) {
    using S = Simd<T>;
    if constexpr (S::has_add_each) {
        return S::add_each(rows);
    } else {
        S::transpose(rows);
        for (int width = S::lanes / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) rows[i] = S::add(rows[i], rows[i + width]);
        return rows[0];
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
            row += step;
            --rows;
        }
    }
};

template <class T>
struct FewScratch {
    T* queries;  // [rows][D], the scale multiplied in
    T* scores;   // [rows][few_block]
    T* keys;     // [few_block][D], only for copies
    T* values;   // [few_block][V], only for copies
};

template <class T, class In, bool statistics>
struct FewRows {
    using S = Simd<T>;
    using Vec = typename S::Vec;

    RowState<T, few> state;
    BlockSums<T, few> block;
    bool seen[few];
    bool beyond[few];  // a score beyond T, which a soft cap would hide: its sign may be wrong

    // The keys [begin, end) of all rows of (n, g); output [rows][V] is relative to the state's maxima.
    void run(const Forward& call, const FewScratch<T>& scratch, T* output, int64_t n, int64_t g, int64_t begin,
             int64_t end) {
        const int rows = int(call.shared * call.queries);
        for (int row = 0; row < rows; ++row) load_query(call, scratch.queries + row * call.d_k, n, g, row);
        for (int64_t i = 0; i < rows * call.d_v; ++i) output[i] = 0;
        state.clear();
        for (int i = 0; i < few; ++i) seen[i] = beyond[i] = false;
        for (int64_t from = begin; from < end; from += few_block)
            take_block(call, scratch, output, n, g, from, smaller(from + few_block, end), rows);
    }

    static void load_query(const Forward& call, T* to, int64_t n, int64_t g, int64_t row) {
        const int64_t r = row / call.queries, l = row % call.queries;
        const In* q = static_cast<const In*>(call.q.data) + n * call.q.n + g * call.q.g + r * call.q.r + l * call.q.l;
        const Scale& s = call.scale;
        const T scale = T(s.data[n * s.n + g * s.g + r * s.r + l * s.l]);
        for (int64_t d = 0; d < call.d_k; ++d) to[d] = T(widen(q[d * call.q.d])) * scale;
    }

    // Rows of the block next to each other, so that a vector holds neighbouring features.
    static BlockView<T> view(const In* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width, T* copy) {
        if (step != 1) {
            copy_block<T, In>(from, row, step, rows, width, copy);
            return {copy, ptrdiff_t(width), 1};
        }
        return View<T, In>::of(from, row, step, rows, width, copy);
    }

  private:
    void take_block(const Forward& call, const FewScratch<T>& scratch, T* output, int64_t n, int64_t g, int64_t begin,
                    int64_t end, int rows) {
        const int64_t count = end - begin;
        const KeyValue &k = call.k, &v = call.v;
        for (int row = 0; row < few; ++row) clear_sums(row);
        block.has_tiny = false;
        uint64_t sees[few][few_block / 64];
        int seeing[few], some = 0;  // the rows that see something of the block
        for (int row = 0; row < rows; ++row) {
            for (uint64_t& word : sees[row]) word = 0;
            if (look(call, n, g, row, begin, count, sees[row])) seeing[some++] = row;
        }
        if (some == 0) return;
        const In* k_at = static_cast<const In*>(k.data) + n * k.n + g * k.g + begin * k.s;
        const In* v_at = static_cast<const In*>(v.data) + n * v.n + g * v.g + begin * v.s;
        const BlockView<T> keys = view(k_at, k.s, k.d, count, call.d_k, scratch.keys);
        const BlockView<T> values = view(v_at, v.s, v.d, count, call.d_v, scratch.values);
        // What is short lies in a cache after its last use, and copies have been read when they are used.
        const bool asks_ahead = call.keys > few_block && std::is_same<T, In>::value;
        for (int64_t from = 0; from < count; from += stretch) {
            const int64_t to = smaller(from + stretch, count), next = smaller(to + stretch, count) - to;
            const int64_t turns = asks_ahead ? some * key_turns(to - from, call.d_k) : 0;
            Ahead<In> ahead = next > 0 ? Ahead<In>(k_at + to * k.s, k.s, k.d, next, call.d_k, turns)
                                       : Ahead<In>(v_at, v.s, v.d, smaller(stretch, count), call.d_v, turns);
            const BlockView<T> part = {keys.data + from * keys.row, keys.row, 1};
            each_rows(some, [&](int i, auto rows_at_once) {
                constexpr int R = decltype(rows_at_once)::value;
                const T* queries[R];
                T* scores[R];
                for (int r = 0; r < R; ++r) {
                    queries[r] = scratch.queries + seeing[i + r] * call.d_k;
                    scores[r] = scratch.scores + seeing[i + r] * few_block + from;
                }
                multiply_keys<R>(part, queries, call.d_k, to - from, scores, ahead);
            });
        }
        for (int i = 0; i < some; ++i) {
            const int row = seeing[i];
            T* scores = scratch.scores + row * few_block;
            seen[row] = true;
            if (is_adjusted(call)) adjust(call, n, g, row, begin, count, sees[row], scores);
            soften_row(row, count, sees[row], scores);
            if (call.dropout.probability > 0)
                drop_row(call.dropout, (n * call.groups + g) * rows + row, begin, count, scores);
        }
        const int64_t after = smaller(stretch, call.keys - end);  // keys of the next block
        for (int64_t from = 0; from < count; from += stretch) {
            const int64_t to = smaller(from + stretch, count), next = smaller(to + stretch, count) - to;
            const int64_t turns = asks_ahead ? some * value_turns(to - from, call.d_v) : 0;
            Ahead<In> ahead = next > 0 ? Ahead<In>(v_at + to * v.s, v.s, v.d, next, call.d_v, turns)
                                       : Ahead<In>(k_at + count * k.s, k.s, k.d, after, call.d_k, turns);
            const BlockView<T> part = {values.data + from * values.row, values.row, 1};
            each_rows(some, [&](int i, auto rows_at_once) {
                constexpr int R = decltype(rows_at_once)::value;
                Weighed<R> rows_of;
                for (int r = 0; r < R; ++r) {
                    const int row = seeing[i + r];
                    rows_of.weights[r] = scratch.scores + row * few_block + from;
                    rows_of.sees[r] = sees[row][from / 64] >> (from % 64) & bits_below(to - from);
                    rows_of.factor[r] = from == 0 ? block.factor[row] : T(1);
                    rows_of.output[r] = output + row * call.d_v;
                }
                add_values(rows_of, part, to - from, call.d_v, ahead);
            });
        }
        absorb<T, few, statistics>(state, block, begin);
    }

    // A row without keys in this block: absorbing it changes nothing.
    void clear_sums(int i) {
        block.factor[i] = 1;
        block.old_top[i] = block.top[i] = state.top[i];
        block.sum[i] = block.tail[i] = block.tail2[i] = block.tail3[i] = block.ones[i] = block.key[i] =
            block.moment[i] = 0;
        block.count[i] = block.reference[i] = block.deviation[i] = block.deviation2[i] = 0;
        block.tiny2[i] = block.tiny3[i] = 0;
    }

  public:
    static bool look(const Forward& call, int64_t n, int64_t g, int64_t row, int64_t begin, int64_t count,
                     uint64_t (&sees)[few_block / 64]) {
        const int64_t r = row / call.queries, l = row % call.queries;
        int64_t lo, hi;
        key_range(l, call.first, call.last, call.keys, &lo, &hi);
        const int64_t from = larger(lo - begin, 0), to = smaller(hi - begin + 1, count);
        if (from >= to) return false;
        const Mask& mask = call.mask;
        const int64_t at = n * mask.n + g * mask.g + r * mask.r + l * mask.l + begin * mask.s;
        bool any = false;
        for (int w = 0; w < few_block / 64; ++w) {
            const int64_t first = larger(from - 64 * w, 0), last = smaller(to - 64 * w, 64);
            if (first >= last) continue;
            uint64_t word = (last == 64 ? ~0ull : (1ull << last) - 1) & ~((1ull << first) - 1);
            if (mask.kind == MaskKind::boolean) {
                const uint8_t* p = static_cast<const uint8_t*>(mask.data) + at + (64 * w + first) * mask.s;
                word &= read_booleans(p, mask.s, last - first) << first;
            } else if (mask.kind != MaskKind::none) {
                for (int64_t j = first; j < last; ++j)
                    if (read_mask(mask, at + (64 * w + j) * mask.s) == -INFINITY) word &= ~(1ull << j);
            }
            sees[w] = word;
            any = any || word != 0;
        }
        return any;
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

  private:
    void adjust(const Forward& call, int64_t n, int64_t g, int64_t row, int64_t begin, int64_t count,
                const uint64_t* sees, T* scores) {
        if (statistics) describe_row_scores(row, count, sees, scores);
        if (call.softcap > 0) {
            const Vec size = S::all(T(call.softcap)), inverse = S::all(T(1.0 / call.softcap));
            Vec check = S::zero();
            for (int64_t j = 0; j < count; j += S::lanes) {
                const Vec x = S::load(scores + j);
                check = S::fma(S::keep(S::from_bits(sees[j / 64] >> (j % 64)), x), S::zero(), check);
                S::store(scores + j, S::mul(size, hyperbolic_tangent<T>(S::mul(x, inverse))));
            }
            beyond[row] = beyond[row] || S::bits(S::equal(check, S::zero())) != (1ull << S::lanes) - 1;
        }
        if (has_bias(call))
            add_bias(RowBias(call, n, g, row / call.queries, row % call.queries), begin, count, sees, scores);
    }

    void describe_row_scores(int64_t row, int64_t count, const uint64_t* sees, const T* scores) {
        double total = 0, seen_keys = 0, top = -INFINITY;
        for (int64_t j = 0; j < count; ++j) {
            if (!(sees[j / 64] >> (j % 64) & 1)) continue;
            const double x = scores[j];
            total += x;
            seen_keys += 1;
            top = x > top ? x : top;
        }
        const double reference = total / seen_keys;
        double deviation = 0, deviation2 = 0;
        for (int64_t j = 0; j < count; ++j) {
            if (!(sees[j / 64] >> (j % 64) & 1)) continue;
            const double d = double(scores[j]) - reference;
            deviation += d;
            deviation2 += d * d;
        }
        state.scores.add(int(row), seen_keys, reference, deviation, deviation2);
        state.score_top[row] = top > state.score_top[row] ? top : state.score_top[row];
    }

    // Scores of one row become weights, hidden keys exactly 0; the sums go to the row's place in the block.
    void soften_row(int row, int64_t count, const uint64_t* sees, T* scores) {
        const Vec hidden = S::all(T(-INFINITY)), one = S::all(T(1));
        Vec tops = hidden, total = S::zero(), counted = S::zero();
        for (int64_t j = 0; j < count; j += S::lanes) {
            const auto visible = S::from_bits(sees[j / 64] >> (j % 64));
            const Vec x = S::choose(visible, S::load(scores + j), hidden);
            S::store(scores + j, x);
            tops = S::max(x, tops);
            if (statistics) {
                total = S::add(total, S::keep(visible, x));
                counted = S::add(counted, S::keep(visible, one));
            }
        }
        T lanes[S::lanes];
        S::store(lanes, tops);
        T block_top = lanes[0];
        for (int i = 1; i < S::lanes; ++i) block_top = lanes[i] > block_top ? lanes[i] : block_top;
        const T old_top = state.top[row], top = block_top > old_top ? block_top : old_top;
        const T start = top == T(-INFINITY) ? T(0) : top;
        const Vec base = S::all(start);
        if (statistics && top > old_top) {
            int64_t key = 0;
            while (scores[key] != top) ++key;
            block.key[row] = T(key);
        }
        S::store(lanes, exponential<T>(S::all(old_top - start)));
        const T factor = lanes[0];
        const double keys_seen = statistics ? add_lanes<T>(counted) : 0;
        const T around = statistics && keys_seen > 0 ? T(add_lanes<T>(total) / keys_seen) : T(0);
        const Vec reference = S::all(around);

        Vec sum = S::zero(), ones = S::zero(), deviation = S::zero(), deviation2 = S::zero();
        TailSums<T> all, some;
        for (int64_t j = 0; j < count; j += S::lanes) {
            const Vec x = S::load(scores + j);
            const Vec p = exponential<T>(S::sub(x, base));
            S::store(scores + j, p);
            sum = S::add(sum, p);
            if (!statistics) continue;
            const auto visible = S::from_bits(sees[j / 64] >> (j % 64));
            const Vec t = S::keep(visible, S::sub(x, base)), d = S::keep(visible, S::sub(x, reference));
            const auto is_top = S::equal(x, base);
            const Vec rest = S::choose(is_top, S::zero(), p), square = S::mul(rest, rest);
            some.moment = S::fnma(p, t, some.moment);
            deviation = S::add(deviation, d);
            deviation2 = S::fma(d, d, deviation2);
            some.tail = S::add(some.tail, rest);
            some.tail2 = S::add(some.tail2, square);
            some.tail3 = S::fma(square, rest, some.tail3);
            ones = S::add(ones, S::keep(is_top, one));
            if ((j / S::lanes + 1) % tail_stretch == 0) all.add(some);
        }
        block.factor[row] = factor;
        block.old_top[row] = old_top;
        block.top[row] = top;
        block.sum[row] = T(add_lanes<T>(sum));
        if (!statistics) return;
        all.add(some);
        block.tail[row] = T(add_lanes<T>(all.tail));
        block.tail2[row] = T(add_lanes<T>(all.tail2));
        block.tail3[row] = T(add_lanes<T>(all.tail3));
        block.ones[row] = T(add_lanes<T>(ones));
        block.moment[row] = T(add_lanes<T>(all.moment));
        block.count[row] = T(keys_seen);
        block.reference[row] = around;
        block.deviation[row] = T(add_lanes<T>(deviation));
        block.deviation2[row] = T(add_lanes<T>(deviation2));
        if (sizeof(T) < sizeof(double) && block.tail[row] > 0 && block.tail3[row] < tiny_cubes<T>) {
            block.has_tiny = true;
            block.tail2[row] = block.tail3[row] = 0;
            for (int64_t j = 0; j < count; ++j) {
                const double p = scores[j];
                if (p >= 0.5) continue;
                block.tiny2[row] += p * p;
                block.tiny3[row] += p * p * p;
            }
        }
    }

    // What R rows have of a stretch.
    template <int R>
    struct Weighed {
        const T* weights[R];
        uint64_t sees[R];
        T factor[R];
        T* output[R];
    };

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

    // Vectors of a value that are taken at a time.
    static constexpr int chunk = 4;
    // Turns that a row has while a stretch of values is added up; a few at the end of a value are not counted.
    static int64_t value_turns(int64_t count, int64_t d_v) { return count * (d_v / (chunk * S::lanes)) / most_rows; }
    static constexpr int most_rows = 4;

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
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
