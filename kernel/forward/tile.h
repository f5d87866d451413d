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

#include "forward/row_state.h"
#include "forward/soften.h"
#include "rows/arena.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "rows/tile_rows.h"
#include "simd/numbers.h"
#include "simd/pairs.h"
#include "simd/product.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Address of a row's output before it is rounded to 16 bits; null if it is not wanted.
template <class In>
float* exact_output(const Forward& call, int64_t row) {
    return sizeof(In) == 2 && call.exact != nullptr ? call.exact + row * call.d_v : nullptr;
}

// What one worker needs, allocated once a call.
template <class T>
struct Scratch {
    T* queries;  // [padded D][W]
    T* scores;   // [key_block][W]
    T* output;   // [padded V][W]
    T* keys;     // [key_block][D + 1], only for copies
    T* values;   // [key_block][V], for copies, and for pairs of keys
    T* weights;  // [key_block / 2][W], only for pairs of keys

    void lay_out(Arena& memory, const Problem& call, bool paired) {
        constexpr int W = tile_rows<T>;
        memory.take(queries, padded<T>(call.d_k), W);
        memory.take(scores, key_block, W);
        memory.take(output, padded<T>(call.d_v), W);
        memory.take(keys, key_block, call.d_k + 1);
        memory.take(values, key_block, call.d_v);
        memory.take(weights, paired ? key_block / 2 : 0, W);
    }
};

template <class T, class In, bool statistics>
struct Tile {
    using S = Simd<T>;
    using Span = typename TileRows<T>::Span;
    static constexpr int W = tile_rows<T>;

    TileRows<T> rows;
    RowState<T, W> state;
    BlockSums<T, W> block;
    uint64_t beyond;  // rows with a score beyond T, which a soft cap would hide: its sign may be wrong

    // Rows that need more than the loop, one bit each.
    struct NonFinite {
        uint64_t unfolded;     // the scale could not be multiplied in beforehand
        uint64_t output;       // did not end finite
        uint64_t description;  // statistics that did not end finite
    };

    // Rows [first, first + count) of a head. `isolates`: non-finite values reach only the rows that see them.
    NonFinite run(const Forward& call, const Scratch<T>& scratch, int64_t head, int64_t first, int count,
                  bool isolates) {
        rows.stand(call, head, first, count);
        const uint64_t unfolded = load_queries(call, scratch.queries);
        state.clear();
        beyond = 0;
        clear(scratch.output, padded<T>(call.d_v) * W);
        uint64_t seen = 0;
        const int64_t end = rows.sight.end_key();
        for (int64_t begin = rows.sight.first_key(); begin < end; begin += key_block)
            seen |= take_block(call, scratch, begin, smaller(begin + key_block, end), isolates);
        NonFinite nonfinite = finish(call, scratch.output, seen);
        nonfinite.unfolded = unfolded & seen;
        return nonfinite;
    }

    // Scores of the keys from `begin` on, for each run of them by the vectors that see something of it.
    void score(const Forward& call, const Scratch<T>& scratch, int64_t begin, int64_t count, const Span& span) {
        const KeyValue& k = call.k;
        const In* k_at = key_of<In>(call, k, rows.head, begin);
        T* scores = scratch.scores;
        if constexpr (in_pairs<T, In>) {
            const PairView keys = view_pairs(k_at, k.s, k.d, count, call.d_k, scratch.keys);
            rows.each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::scaled, Paired<T>>(scores + j * W + first * S::lanes, run, keys.data + j * keys.row,
                                                     keys.row, 2, scratch.queries + first * S::lanes,
                                                     pairs_of(call.d_k), vectors, rows.scale + first * S::lanes);
            });
        } else {
            const BlockView<T> keys = view_block<T, In>(k_at, k.s, k.d, count, call.d_k, scratch.keys);
            rows.each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::place>(scores + j * W + first * S::lanes, run, keys.data + j * keys.row, keys.row,
                                         keys.step, scratch.queries + first * S::lanes, call.d_k, vectors);
            });
        }
    }

  private:
    // Returns the rows whose scale cannot be multiplied in beforehand.
    uint64_t load_queries(const Forward& call, T* to) {
        const In* rows_at[W];
        uint64_t unfolded = 0;
        RowPlace at = rows.place(call);
        for (int i = 0; i < W; ++i, at.step(call, i < rows.count)) {
            rows_at[i] = row_of<In>(call.q, at);
            const double given = number_of(call.scale, at);
            rows.scale[i] = i < rows.count ? T(given) : T(0);
            if (i < rows.count && !can_fold<T>(given)) unfolded |= 1ull << i;
            // All rows are asked for before the first is waited for.
            if (call.q.d == 1)
                for (int64_t d = 0; d < call.d_k; d += int64_t(64 / sizeof(In))) __builtin_prefetch(rows_at[i] + d);
        }
        if constexpr (in_pairs<T, In>) {
            turn_pairs(rows_at, call.q.d, call.d_k, rows.count, to);
            return unfolded;
        }
        Vectors<T>::each(call.d_k, [&](int64_t d, auto width) {
            for (int c = 0; c < rows.count; c += S::lanes)
                Vectors<T>::turn(
                    [&](int i) {
                        // A row that is not there has scale 0; times a NaN of row 0 it must still be 0.
                        if (c + i >= rows.count) return S::zero();
                        const In* p = rows_at[c + i] + d * call.q.d;
                        return S::mul(Vectors<T>::load(p, call.q.d, width), S::all(rows.scale[c + i]));
                    },
                    [&](int t, typename S::Vec x) { S::store(to + (d + t) * W + c, x); });
        });
        return unfolded;
    }

    // Rows of bfloat16 to pairs of features [width / 2][W]; rows that are not there are zeros. The scale would have to
    // be rounded: it is multiplied into the scores instead.
    static void turn_pairs(const In* const (&rows_at)[W], int64_t step, int64_t width, int count, T* to) {
        int64_t d = 0;
        for (; step == 1 && d + 2 * S::lanes <= width; d += 2 * S::lanes)
            for (int c = 0; c < count; c += S::lanes)
                Vectors<T>::turn(
                    [&](int i) {
                        return c + i < count ? S::load(reinterpret_cast<const T*>(rows_at[c + i] + d)) : S::zero();
                    },
                    [&](int t, typename S::Vec x) { S::store(to + (d / 2 + t) * W + c, x); });
        for (; d < width; d += 2)
            for (int i = 0; i < W; ++i) {
                const uint16_t first = rows_at[i][d * step].bits;
                const uint16_t second = d + 1 < width ? rows_at[i][(d + 1) * step].bits : uint16_t(0);
                const uint32_t pair = i < count ? make_pair(first, second) : 0;
                __builtin_memcpy(to + d / 2 * W + i, &pair, 4);
            }
    }

    uint64_t take_block(const Forward& call, const Scratch<T>& scratch, int64_t begin, int64_t end, bool isolates) {
        const Sight what = rows.sight.look(call.mask, begin, end);
        if (what == Sight::nothing) return 0;
        const int64_t count = end - begin;
        const In* v_at = key_of<In>(call, call.v, rows.head, begin);
        const Span span = rows.spans(begin, count);
        score(call, scratch, begin, count, span);
        const bool partial = what == Sight::something;
        if (is_adjusted(call)) adjust(call, scratch.scores, span, partial);
        soften_block(scratch, span, partial, call.d_v, begin);
        if (call.dropout.probability > 0) drop_block(scratch, span, begin);
        add_values(call, scratch, v_at, count, span, isolates);
        if (isolates) add_infinite(call, v_at, scratch.scores, span, partial, scratch.output, count);
        if (!partial) return Visibility<T, W>::every_row;
        uint64_t seen = 0;
        for (int64_t j = 0; j < count; ++j) seen |= rows.sight.words[j];
        return seen;
    }

    // What is kept grows by a factor that the output is multiplied with in the end.
    void drop_block(const Scratch<T>& scratch, const Span& span, int64_t begin) {
        if constexpr (in_pairs<T, In>) {
            for (int c = 0; c < panel; ++c) {
                const int64_t from = span.from[c], at = c * S::lanes;
                rows.draws.drop_pairs(scratch.weights + from / 2 * W + at, begin + from, span.to[c] - from, int(at));
            }
        } else {
            rows.template drop<false>(scratch.scores, begin, span);
        }
    }

    void add_values(const Forward& call, const Scratch<T>& scratch, const In* v_at, int64_t count, const Span& span,
                    bool isolates) {
        const KeyValue& v = call.v;
        if constexpr (in_pairs<T, In>) {
            interleave_rows(v_at, v.s, v.d, count, call.d_v, scratch.values);
            if (isolates) clear_infinite(v_at, v.s, v.d, count, call.d_v, scratch.values);
            const uint16_t* pairs = reinterpret_cast<const uint16_t*>(scratch.values);
            // Runs begin at multiples of four keys.
            rows.each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::sum, Paired<T>>(scratch.output + first * S::lanes, call.d_v, pairs + j * call.d_v, 2,
                                                  2 * call.d_v, scratch.weights + j / 2 * W + first * S::lanes,
                                                  pairs_of(run), vectors);
            });
        } else {
            const BlockView<T> values = isolates ? copy_finite(v_at, v, count, call.d_v, scratch.values)
                                                 : view_block<T, In>(v_at, v.s, v.d, count, call.d_v, scratch.values);
            rows.each_run(span, count, [&](int64_t j, int64_t run, int first, int vectors) {
                multiply<T, Into::sum>(scratch.output + first * S::lanes, call.d_v, values.data + j * values.row,
                                       values.step, values.row, scratch.scores + j * W + first * S::lanes, run,
                                       vectors);
            });
        }
    }

    // Scores become logits; what they were before is described first.
    void adjust(const Forward& call, T* scores, const Span& span, bool partial) {
        const LogitStep<T> step(call, rows.sight.bias);
        for (int c = 0; c < panel; ++c) {
            const int at = c * S::lanes;
            for (int i = at; statistics && i < at + S::lanes; ++i)
                describe_scores(scores + i, W, span.from[c], span.to[c], i, state,
                                [&](int64_t j) { return !partial || (rows.sight.words[j] >> i & 1); });
            auto check = S::zero();
            for (int64_t j = span.from[c]; j < span.to[c]; ++j) {
                const auto x = S::load(scores + j * W + at);
                if (step.caps)
                    check = S::fma(partial ? S::keep(S::from_bits(rows.sight.words[j] >> at), x) : x, S::zero(), check);
                S::store(scores + j * W + at, step.apply(x, j * W + at));
            }
            beyond |= (~Vectors<T>::sound(check) & Vectors<T>::every_lane) << at;
        }
    }

    void soften_block(const Scratch<T>& scratch, const Span& span, bool partial, int64_t d_v, int64_t begin) {
        block.has_tiny = false;
        if (statistics)
            for (int i = 0; i < W; ++i) block.tiny2[i] = block.tiny3[i] = 0;
        for (int c = 0; c < panel; ++c) {
            const int at = c * S::lanes;
            const int64_t from = span.from[c], keys = span.to[c] - from;
            constexpr bool paired = in_pairs<T, In>;
            T *column = scratch.scores + from * W + at, *pairs = paired ? scratch.weights + from / 2 * W + at : nullptr;
            const bool grew =
                partial ? soften<T, W, statistics, true, paired>(column, keys, rows.sight.words + from, at, state.top,
                                                                 block, pairs)
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
        for (int64_t j = 0; j < count; ++j)
            if (!is_finite(BlockView<T>{to + j * d_v, 0, 1}, 1, d_v)) clear(to + j * d_v, d_v);
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
                if (j < span.from[c] || j >= span.to[c] || (partial && !(rows.sight.words[j] >> i & 1))) continue;
                for (int64_t d = 0; d < call.d_v; ++d)
                    output[d * W + i] += scores[j * W + i] * T(widen(v_at[j * call.v.s + d * call.v.d]));
            }
        }
    }

    NonFinite finish(const Forward& call, const T* output, uint64_t seen) {
        alignas(64) T inverse[W] = {};
        NonFinite nonfinite = {};
        const int64_t out_row = rows.number(call);
        if (statistics) write_statistics<T, W>(call.statistics, out_row, state, rows.count, is_adjusted(call));
        RowPlace at = rows.place(call);
        for (int i = 0; i < rows.count; ++i, at.step(call, i < rows.count)) {
            const double* sink = sink_of(call, at);
            const bool sees = seen >> i & 1;
            const bool divides = invert_sum(state, i, sees, sink, inverse + i);
            if (call.dropout.probability > 0) inverse[i] *= rows.draws.factor;
            const bool finite = std::isfinite(state.sum[i]) && std::isfinite(double(state.top[i])) &&
                                state.sum[i] > 0 && !(beyond >> i & 1);
            if (sees && !(finite && divides)) nonfinite.output |= 1ull << i;
            if (statistics && sees && !is_described(state, i)) nonfinite.description |= 1ull << i;
            if (statistics) write_sink_weight(call.statistics, out_row + i, sink);
            save_row(call.saved, out_row + i, state.top[i], state.sum[i]);
        }
        In* to = static_cast<In*>(call.output) + out_row * call.d_v;
        float* exact = exact_output<In>(call, out_row);
        for (int c = 0; c < rows.count; c += S::lanes) {
            const auto factor = S::load(inverse + c);
            auto check = S::zero(), other = S::zero();  // two, for one would wait for itself
            Vectors<T>::each(call.d_v, [&](int64_t d, auto width) {
                Vectors<T>::turn(
                    [&](int t) {
                        const auto x = S::load(output + (d + t) * W + c);
                        if (t % 2 == 0) check = S::fma(x, S::zero(), check);
                        if (t % 2 == 1) other = S::fma(x, S::zero(), other);
                        return S::mul(x, factor);
                    },
                    [&](int i, typename S::Vec x) {
                        if (c + i >= rows.count) return;
                        const int64_t at = (c + i) * call.d_v + d;
                        Vectors<T>::store(to + at, x, width);
                        if (exact != nullptr) Vectors<T>::store(exact + at, x, width);
                    });
            });
            nonfinite.output |= (~Vectors<T>::sound(S::add(check, other)) & Vectors<T>::every_lane) << c;
        }
        if (rows.count < W) nonfinite.output &= (1ull << rows.count) - 1;
        return nonfinite;
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
