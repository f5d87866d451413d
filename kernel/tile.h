// Queries in lanes: a tile of rows passes over its keys block by block.
//
//   queries [D][row]      transposed once, the scale multiplied in
//   scores  [key][row]    = keys x queries, then softened in place into weights
//   output  [V][row]     += values x weights
//
// A vector lane is one row, so maxima, sums and every statistic are vertical and need no reduction across lanes.
#pragma once

#include <cmath>
#include <cstdint>

#include "block_view.h"
#include "dropout.h"
#include "exponential.h"
#include "kernel.h"
#include "level.h"
#include "pairs.h"
#include "product.h"
#include "row_state.h"
#include "soften.h"
#include "vectors.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Head and query of a row, without a division per row; at the last row that is there it stays.
struct RowCursor {
    int64_t queries, r, l;
    RowCursor(const Problem& call, int64_t row) : queries(call.queries), r(row / call.queries), l(row % call.queries) {}
    void step(bool there) {
        if (!there || ++l < queries) return;
        l = 0;
        ++r;
    }
};

// Where a row's output goes before it is rounded to 16 bits; null where nobody wants it.
template <class T, class In>
T* exact_output(const Forward& call, int64_t row) {
    if constexpr (sizeof(In) == 2 && sizeof(T) == sizeof(float)) {
        return call.exact == nullptr ? nullptr : call.exact + row * call.d_v;
    } else {
        return nullptr;
    }
}

// What one worker needs, allocated once a call.
template <class T>
struct Scratch {
    T* queries;  // [D][W]
    T* scores;   // [key_block][W]
    T* output;   // [V][W]
    T* keys;     // [key_block][D + 1], only for copies
    T* values;   // [key_block][V], for copies, and for pairs of keys
    T* weights;  // [key_block / 2][W], only for pairs of keys
};

template <class T, class In, bool statistics>
struct Tile {
    using S = Simd<T>;
    static constexpr int W = tile_rows<T>;

    RowState<T, W> state;
    BlockSums<T, W> block;
    Visibility<T, W> sight;
    TileDraws<T, W> draws;   // where there is dropout
    alignas(64) T scale[W];  // 0 for a row that is not there
    uint64_t beyond;         // rows with a score beyond T, which a soft cap would hide: its sign may be wrong

    // Rows that need more than the loop, one bit each.
    struct Odd {
        uint64_t unfolded;     // the scale could not be multiplied in beforehand
        uint64_t output;       // did not end finite
        uint64_t description;  // statistics that did not end finite
    };

    // Rows [first_row, first_row + rows) of (n, g), counted r * L + l.
    Odd run(const Forward& call, const Scratch<T>& scratch, int64_t n, int64_t g, int64_t first_row, int rows,
            bool careful) {
        const uint64_t unfolded = load_queries(call, scratch.queries, n, g, first_row, rows);
        place(call, n, g, first_row, rows);
        state.clear();
        beyond = 0;
        for (int64_t i = 0; i < call.d_v * W; ++i) scratch.output[i] = 0;
        uint64_t seen = 0;
        const int64_t end = sight.end_key();
        for (int64_t begin = sight.first_key(); begin < end; begin += key_block)
            seen |= take_block(call, scratch, n, g, begin, smaller(begin + key_block, end), careful);
        Odd odd = finish(call, scratch.output, n, g, first_row, rows, seen);
        odd.unfolded = unfolded & seen;
        return odd;
    }

    // Returns the rows whose scale cannot be multiplied in beforehand.
    uint64_t load_queries(const Forward& call, T* to, int64_t n, int64_t g, int64_t first_row, int rows) {
        const In* rows_at[W];
        uint64_t odd = 0;
        RowCursor at(call, first_row);
        for (int i = 0; i < W; ++i, at.step(i < rows)) {
            const int64_t r = at.r, l = at.l;
            rows_at[i] =
                static_cast<const In*>(call.q.data) + n * call.q.n + g * call.q.g + r * call.q.r + l * call.q.l;
            const Scale& s = call.scale;
            const double given = s.data[n * s.n + g * s.g + r * s.r + l * s.l];
            scale[i] = i < rows ? T(given) : T(0);
            if (i < rows && !can_fold<T>(given)) odd |= 1ull << i;
            // All rows are asked for before the first is waited for.
            if (call.q.d == 1)
                for (int64_t d = 0; d < call.d_k; d += int64_t(64 / sizeof(In))) __builtin_prefetch(rows_at[i] + d);
        }
        if constexpr (in_pairs<T, In>) {
            turn_pairs(rows_at, call.q.d, call.d_k, rows, to);
            return odd;
        }
        int64_t d = 0;
        for (; d + S::lanes <= call.d_k; d += S::lanes)
            for (int c = 0; c * S::lanes < rows; ++c) {
                typename S::Vec square[S::lanes];
                for (int i = 0; i < S::lanes; ++i) {
                    const int lane = c * S::lanes + i;
                    const In* p = rows_at[lane] + d * call.q.d;
                    // A row that is not there has scale 0; times a NaN of row 0 it must still be 0.
                    square[i] = lane < rows ? S::mul(Vectors<T>::load(p, call.q.d), S::all(scale[lane])) : S::zero();
                }
                S::transpose(square);
                for (int t = 0; t < S::lanes; ++t) S::store(to + (d + t) * W + c * S::lanes, square[t]);
            }
        for (; d < call.d_k; ++d)
            for (int i = 0; i < W; ++i) to[d * W + i] = i < rows ? T(widen(rows_at[i][d * call.q.d])) * scale[i] : T(0);
        return odd;
    }

    // Rows of bfloat16 to pairs of features [width / 2][W]; rows that are not there are zeros. The scale would have to
    // be rounded: it is multiplied into the scores instead.
    static void turn_pairs(const In* const (&rows_at)[W], int64_t step, int64_t width, int rows, T* to) {
        int64_t d = 0;
        for (; step == 1 && d + 2 * S::lanes <= width; d += 2 * S::lanes)
            for (int c = 0; c * S::lanes < rows; ++c) {
                typename S::Vec square[S::lanes];
                for (int i = 0; i < S::lanes; ++i) {
                    const int lane = c * S::lanes + i;
                    square[i] = lane < rows ? S::load(reinterpret_cast<const T*>(rows_at[lane] + d)) : S::zero();
                }
                S::transpose(square);
                for (int t = 0; t < S::lanes; ++t) S::store(to + (d / 2 + t) * W + c * S::lanes, square[t]);
            }
        for (; d < width; d += 2)
            for (int i = 0; i < W; ++i) {
                const uint16_t first = rows_at[i][d * step].bits;
                const uint16_t second = d + 1 < width ? rows_at[i][(d + 1) * step].bits : uint16_t(0);
                const uint32_t pair = i < rows ? make_pair(first, second) : 0;
                __builtin_memcpy(to + d / 2 * W + i, &pair, 4);
            }
    }

    // Where each row stands: its range of keys and its row of the mask. Rows that are not there repeat the last one.
    void place(const Problem& call, int64_t n, int64_t g, int64_t first_row, int rows) {
        sight.rows = rows;
        sight.sloped = call.alibi.data != nullptr;
        sight.one_mask = true;
        RowCursor at(call, first_row);
        for (int i = 0; i < W; ++i, at.step(i < rows)) {
            const int64_t r = at.r, l = at.l;
            key_range(l, call.first, call.last, call.keys, &sight.lo[i], &sight.hi[i]);
            const RowBias bias(call, n, g, r, l);
            sight.mask_row[i] = bias.at;
            sight.slope[i] = bias.slope;
            sight.position[i] = bias.position;
            sight.one_mask = sight.one_mask && sight.mask_row[i] == sight.mask_row[0];
        }
        sight.settle();
        if (call.dropout.probability > 0)
            draws.place(call.dropout, (n * call.groups + g) * call.shared * call.queries + first_row);
    }

    // The part of a block that each vector of rows can see by its ranges, to multiples of four keys.
    struct Span {
        int64_t from[panel], to[panel];
    };
    Span spans(int64_t begin, int64_t count) const {
        Span span;
        bool rising = !sight.is_whole(begin, begin + count);
        for (int c = 0; c < panel && rising; ++c) {
            int64_t lo = INT64_MAX, hi = -1;
            for (int i = c * S::lanes; i < (c + 1) * S::lanes; ++i) {
                if (sight.lo[i] > sight.hi[i]) continue;
                lo = smaller(lo, sight.lo[i]);
                hi = larger(hi, sight.hi[i]);
            }
            const int64_t from = lo == INT64_MAX ? 0 : smaller(larger(lo - begin, 0), count);
            const int64_t to = lo == INT64_MAX ? 0 : smaller(larger(hi - begin + 1, 0), count);
            span.from[c] = from & ~int64_t(3);
            span.to[c] = smaller((to + 3) & ~int64_t(3), count);
            if (from >= to) span.to[c] = span.from[c];
            // Vectors beyond the last row of a short tile have nothing to do.
            if (c * S::lanes >= sight.rows) span.from[c] = span.to[c] = span.to[c - 1];
            if (c > 0) rising = rising && span.from[c] >= span.from[c - 1] && span.to[c] >= span.to[c - 1];
        }
        if (rising) return span;
        // All rows see all keys, or rows of several heads are in one tile and there is no order to use: every vector
        // takes the whole block.
        for (int c = 0; c < panel; ++c) {
            span.from[c] = c * S::lanes < sight.rows ? 0 : count;
            span.to[c] = count;
        }
        return span;
    }

    // Calls body(first key, keys, first vector, vectors) for runs of keys that the same vectors see.
    template <class Body>
    static void each_run(const Span& span, int64_t count, Body body) {
        for (int64_t j = 0; j < count;) {
            int64_t next = count;
            int first = panel, last = -1;
            for (int c = 0; c < panel; ++c) {
                if (span.from[c] <= j && j < span.to[c]) {
                    first = c < first ? c : first;
                    last = c;
                    next = smaller(next, span.to[c]);
                } else if (span.from[c] > j && span.from[c] < span.to[c]) {
                    next = smaller(next, span.from[c]);
                }
            }
            if (last >= 0) body(j, next - j, first, last - first + 1);
            j = next;
        }
    }

    // Scores of the keys at k_at, for each run of them by the vectors that see something of it.
    void score(const Forward& call, const Scratch<T>& scratch, const In* k_at, int64_t count, const Span& span) {
        const KeyValue& k = call.k;
        T* scores = scratch.scores;
        if constexpr (in_pairs<T, In>) {
            const PairView keys = view_pairs(k_at, k.s, k.d, count, call.d_k, scratch.keys);
            each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::scaled, Paired<T>>(scores + j * W + first * S::lanes, run, keys.data + j * keys.row,
                                                     keys.row, 2, scratch.queries + first * S::lanes,
                                                     pairs_of(call.d_k), vectors, scale + first * S::lanes);
            });
        } else {
            const BlockView<T> keys = View<T, In>::of(k_at, k.s, k.d, count, call.d_k, scratch.keys);
            each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::place>(scores + j * W + first * S::lanes, run, keys.data + j * keys.row, keys.row,
                                         keys.step, scratch.queries + first * S::lanes, call.d_k, vectors);
            });
        }
    }

  private:
    uint64_t take_block(const Forward& call, const Scratch<T>& scratch, int64_t n, int64_t g, int64_t begin,
                        int64_t end, bool careful) {
        const Sight what = sight.look(call.mask, begin, end);
        if (what == Sight::nothing) return 0;
        const int64_t count = end - begin;
        const KeyValue &k = call.k, &v = call.v;
        const In* k_at = static_cast<const In*>(k.data) + n * k.n + g * k.g + begin * k.s;
        const In* v_at = static_cast<const In*>(v.data) + n * v.n + g * v.g + begin * v.s;
        const Span span = spans(begin, count);
        T* scores = scratch.scores;
        score(call, scratch, k_at, count, span);
        const bool partial = what == Sight::something;
        if (is_adjusted(call)) adjust(call, scores, span, partial);
        soften_block(scratch, span, partial, call.d_v, begin);
        if (call.dropout.probability > 0) drop_block(scratch, span, begin);
        add_values(call, scratch, v_at, count, span, careful);
        if (careful) add_infinite(call, v_at, scores, span, partial, scratch.output, count);
        if (!partial) return Visibility<T, W>::every_row;
        uint64_t seen = 0;
        for (int64_t j = 0; j < count; ++j) seen |= sight.words[j];
        return seen;
    }

    // What is kept grows by a factor that the output is multiplied with in the end.
    void drop_block(const Scratch<T>& scratch, const Span& span, int64_t begin) {
        for (int c = 0; c < panel; ++c) {
            const int at = c * S::lanes;
            const int64_t from = span.from[c], keys = span.to[c] - from;
            if constexpr (in_pairs<T, In>) {
                draws.drop_pairs(scratch.weights + from / 2 * W + at, begin + from, keys, at);
            } else {
                draws.template drop<false>(scratch.scores + from * W + at, begin + from, keys, at);
            }
        }
    }

    void add_values(const Forward& call, const Scratch<T>& scratch, const In* v_at, int64_t count, const Span& span,
                    bool careful) {
        const KeyValue& v = call.v;
        if constexpr (in_pairs<T, In>) {
            interleave_rows(v_at, v.s, v.d, count, call.d_v, scratch.values);
            if (careful) clear_infinite(v_at, v.s, v.d, count, call.d_v, scratch.values);
            const uint16_t* pairs = reinterpret_cast<const uint16_t*>(scratch.values);
            // Runs begin at multiples of four keys.
            each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::sum, Paired<T>>(scratch.output + first * S::lanes, call.d_v, pairs + j * call.d_v, 2,
                                                  2 * call.d_v, scratch.weights + j / 2 * W + first * S::lanes,
                                                  pairs_of(run), vectors);
            });
        } else {
            const BlockView<T> values = careful ? copy_finite(v_at, v, count, call.d_v, scratch.values)
                                                : View<T, In>::of(v_at, v.s, v.d, count, call.d_v, scratch.values);
            each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::sum>(scratch.output + first * S::lanes, call.d_v, values.data + j * values.row,
                                       values.step, values.row, scratch.scores + j * W + first * S::lanes, run,
                                       vectors);
            });
        }
    }

    // Soft cap, then the additive mask; what the scores were before is described first.
    void adjust(const Forward& call, T* scores, const Span& span, bool partial) {
        const bool cap = call.softcap > 0, bias = has_bias(call);
        const auto size = S::all(T(call.softcap)), inverse = S::all(cap ? T(1.0 / call.softcap) : T(0));
        for (int c = 0; c < panel; ++c) {
            const int at = c * S::lanes;
            if (statistics)
                describe_scores<T, W>(scores + span.from[c] * W + at, span.to[c] - span.from[c],
                                      partial ? sight.words + span.from[c] : nullptr, at, state);
            auto check = S::zero();
            for (int64_t j = span.from[c]; j < span.to[c]; ++j) {
                auto x = S::load(scores + j * W + at);
                if (cap) {
                    check = S::fma(partial ? S::keep(S::from_bits(sight.words[j] >> at), x) : x, S::zero(), check);
                    x = S::mul(size, hyperbolic_tangent<T>(S::mul(x, inverse)));
                }
                if (bias) x = S::add(x, S::load(sight.bias + j * W + at));
                S::store(scores + j * W + at, x);
            }
            beyond |= (~S::bits(S::equal(check, S::zero())) & ((1ull << S::lanes) - 1)) << at;
        }
    }

    void soften_block(const Scratch<T>& scratch, const Span& span, bool partial, int64_t d_v, int64_t begin) {
        block.has_tiny = false;
        if (statistics)
            for (int i = 0; i < W; ++i) block.tiny2[i] = block.tiny3[i] = 0;
        for (int c = 0; c < panel; ++c) {
            const int at = c * S::lanes;
            const int64_t from = span.from[c], keys = span.to[c] - from;
            T *column = scratch.scores + from * W + at, *pairs = scratch.weights + from / 2 * W + at;
            constexpr bool paired = in_pairs<T, In>;
            const bool grew =
                partial ? soften<T, W, statistics, true, paired>(column, keys, sight.words + from, at, state.top, block,
                                                                 pairs)
                        : soften<T, W, statistics, false, paired>(column, keys, nullptr, at, state.top, block, pairs);
            if (statistics && from > 0)
                for (int i = at; i < at + S::lanes; ++i) block.key[i] += T(from);
            if (!grew) continue;
            const auto factor = S::load(block.factor + at);
            T* output = scratch.output + at;
            for (int64_t d = 0; d < d_v; ++d) S::store(output + d * W, S::mul(S::load(output + d * W), factor));
        }
        absorb<T, W, statistics>(state, block, begin);
    }

    // Values in which rows that are not finite are zero: 0 * NaN would poison the rows that do not see them.
    static BlockView<T> copy_finite(const In* from, const KeyValue& v, int64_t count, int64_t d_v, T* to) {
        copy_block<T, In>(from, v.s, v.d, count, d_v, to);
        for (int64_t j = 0; j < count; ++j) {
            T check = 0;
            for (int64_t d = 0; d < d_v; ++d) check += to[j * d_v + d] * T(0);
            if (check != 0)
                for (int64_t d = 0; d < d_v; ++d) to[j * d_v + d] = 0;
        }
        return {to, ptrdiff_t(d_v), 1};
    }

    void add_infinite(const Forward& call, const In* v_at, const T* scores, const Span& span, bool partial, T* output,
                      int64_t count) {
        for (int64_t j = 0; j < count; ++j) {
            T check = 0;
            for (int64_t d = 0; d < call.d_v; ++d) check += T(widen(v_at[j * call.v.s + d * call.v.d])) * T(0);
            if (check == 0) continue;
            for (int i = 0; i < W; ++i) {
                const int c = i / S::lanes;
                if (j < span.from[c] || j >= span.to[c] || (partial && !(sight.words[j] >> i & 1))) continue;
                for (int64_t d = 0; d < call.d_v; ++d)
                    output[d * W + i] += scores[j * W + i] * T(widen(v_at[j * call.v.s + d * call.v.d]));
            }
        }
    }

    Odd finish(const Forward& call, const T* output, int64_t n, int64_t g, int64_t first_row, int rows, uint64_t seen) {
        alignas(64) T inverse[W];
        Odd odd = {};
        const bool scores = is_adjusted(call);
        const int64_t out_row = ((n * call.groups + g) * call.shared) * call.queries + first_row;
        if (statistics) write_statistics<T, W>(call.statistics, out_row, state, rows, scores);
        for (int i = 0; i < W; ++i) {
            const double* sink = nullptr;
            if (call.sinks != nullptr && i < rows) sink = call.sinks + g * call.shared + (first_row + i) / call.queries;
            const bool sees = seen >> i & 1;
            const bool divides = invert_sum(state, i, sees, sink, inverse + i);
            if (call.dropout.probability > 0) inverse[i] *= draws.factor;
            const bool finite = std::isfinite(state.sum[i]) && std::isfinite(double(state.top[i])) &&
                                state.sum[i] > 0 && !(beyond >> i & 1);
            if (i < rows && sees && !(finite && divides)) odd.output |= 1ull << i;
            if (statistics && i < rows && sees && !is_described(state, i)) odd.description |= 1ull << i;
            if (statistics && i < rows) write_sink_weight(call.statistics, out_row + i, sink);
            if (i < rows) save_row(call.saved, out_row + i, state.top[i], state.sum[i]);
        }
        In* to = static_cast<In*>(call.output) + out_row * call.d_v;
        T* exact = exact_output<T, In>(call, out_row);
        for (int c = 0; c * S::lanes < rows; ++c) {
            const auto factor = S::load(inverse + c * S::lanes);
            auto check = S::zero(), other = S::zero();  // two, for one would wait for itself
            int64_t d = 0;
            for (; d + S::lanes <= call.d_v; d += S::lanes) {
                typename S::Vec square[S::lanes];
                for (int t = 0; t < S::lanes; t += 2) {
                    const T* at = output + (d + t) * W + c * S::lanes;
                    const auto x = S::load(at), y = S::load(at + W);
                    check = S::fma(x, S::zero(), check);
                    other = S::fma(y, S::zero(), other);
                    square[t] = S::mul(x, factor);
                    square[t + 1] = S::mul(y, factor);
                }
                S::transpose(square);
                for (int i = 0; i < S::lanes && c * S::lanes + i < rows; ++i) {
                    const int64_t at = (c * S::lanes + i) * call.d_v + d;
                    Vectors<T>::store(to + at, square[i]);
                    if (exact != nullptr) S::store(exact + at, square[i]);
                }
            }
            for (; d < call.d_v; ++d) {
                alignas(64) T row[S::lanes];
                const auto x = S::load(output + d * W + c * S::lanes);
                check = S::fma(x, S::zero(), check);
                S::store(row, S::mul(x, factor));
                for (int i = 0; i < S::lanes && c * S::lanes + i < rows; ++i) {
                    const int64_t at = (c * S::lanes + i) * call.d_v + d;
                    to[at] = narrow(row[i], In());
                    if (exact != nullptr) exact[at] = row[i];
                }
            }
            const uint64_t sound = S::bits(S::equal(S::add(check, other), S::zero()));
            for (int i = 0; i < S::lanes && c * S::lanes + i < rows; ++i)
                if (!(sound >> i & 1)) odd.output |= 1ull << (c * S::lanes + i);
        }
        return odd;
    }
};

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
