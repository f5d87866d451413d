// Queries in lanes, backwards: a tile of rows and one block of keys, five products.
//
//   weights [key][row]   = keys x queries, then exp(s - max) / total from what the forward pass saved
//   gradients [key][row] = values x gradients of the output, then the gradient of each score: p * (dp - delta)
//   queries' [D][row]   += keys, turned x gradients
//   keys'    [key][D]   += gradients x queries       lanes are features here: rows as they lie, not transposed
//   values'  [key][V]   += weights x gradients of the output
#pragma once

#include <cmath>
#include <cstdint>

#include "backward/logit_gradients.h"
#include "backward/pairs.h"
#include "backward/sums.h"
#include "rows/arena.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "rows/tile_rows.h"
#include "simd/numbers.h"
#include "simd/product.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// The rows of a tile with all that their blocks of keys need.
template <class T, class In>
struct BackwardTile {
    using S = Simd<T>;
    using Rows = TileRows<T>;
    static constexpr int W = tile_rows<T>;

    static constexpr bool paired = in_pairs<T, In>;

    T* queries;       // [padded D][W], the scale multiplied in, as in the forward pass: the same scores to the bit
    T* query_rows;    // [W][padded D], the same
    T* grads;         // [padded V][W], gradients of the output
    T* grad_rows;     // [W][padded V]
    T* grad_queries;  // [padded D][W], before the scale is multiplied in
    // With pairs queries and grads are pairs of features, the scale is not multiplied in, and there are
    T *query_pairs, *grad_pairs;  // [W / 2][padded D or V]: pairs of rows,
    uint16_t* halves;             // [W][padded D or V]: and room to make them
    Rows rows;
    alignas(64) T top[W];
    alignas(64) T inverse[W];  // 0: the row has no part in the tile
    alignas(64) T delta[W];    // <gradient of the output, output>
    alignas(64) T given[W];    // what the row's weights add up to, by the forward pass: 1, or what a sink leaves of it,
    alignas(64) T taken[W];    // and in this pass; of few rows alone
    alignas(64) double by_position[W];  // position gradients
    bool fresh;                         // grad_queries holds nothing yet
    uint64_t lone;             // rows with all their weight on one key, as far as T can tell; none with dropout
    uint64_t fallback;         // rows for the float64 fallback,
    int64_t fallback_from[W];  // from this key on

    // Rows are padded to whole vectors, of pairs where products take pairs.
    static int64_t stride(int64_t width) {
        return paired ? (width + 2 * S::lanes - 1) / (2 * S::lanes) * (2 * S::lanes) : padded<T>(width);
    }

    void lay_out(Arena& memory, const Problem& call) {
        const int64_t d_k = stride(call.d_k), d_v = stride(call.d_v);
        memory.take(queries, W, d_k);
        memory.take(query_rows, W, d_k);
        memory.take(grad_queries, W, d_k);
        memory.take(grads, W, d_v);
        memory.take(grad_rows, W, d_v);
        memory.take(query_pairs, paired ? W / 2 : 0, d_k);
        memory.take(grad_pairs, paired ? W / 2 : 0, d_v);
        memory.take(halves, paired ? W : 0, larger(d_k, d_v));
    }

    // Rows [first, first + count) of a head.
    void load(const Backward& call, int64_t head, int64_t first, int count) {
        lone = fallback = 0;
        clear(taken, W);
        clear(by_position, W);
        rows.stand(call, head, first, count);
        fresh = true;
        const Working<In>* output = static_cast<const Working<In>*>(call.output) + rows.number(call) * call.d_v;
        RowPlace at = rows.place(call);
        int used = 0;
        for (; used < count; used += S::lanes) {
            typename S::Vec dots[S::lanes];
            bool sound[S::lanes];
            RowPlace again = at;
            for (int lane = 0; lane < S::lanes; ++lane) {
                const int i = used + lane;
                if (i >= count) clear_row(call, i);
                dots[lane] = S::zero();
                if (i >= count) continue;
                sound[lane] = copy_rows(call, i, at);
                dots[lane] = Vectors<T>::multiply(grad_rows + i * stride(call.d_v), output + i * call.d_v, 1, call.d_v);
                at.step(call, i + 1 < count);
            }
            S::store(delta + used, Vectors<T>::add_up(dots));
            for (int i = used; i < smaller(count, used + S::lanes); ++i) {
                weigh_row(call, i, again, sound[i - used]);
                again.step(call, i + 1 < count);
            }
        }
        if constexpr (paired) {
            pair_rows(query_rows, stride(call.d_k), used, halves, queries, query_pairs);
            pair_rows(grad_rows, stride(call.d_v), used, halves, grads, grad_pairs);
        } else {
            turn_rows(query_rows, padded<T>(call.d_k), used, queries);
            turn_rows(grad_rows, padded<T>(call.d_v), used, grads);
        }
        clear(grad_queries + call.d_k * W, (padded<T>(call.d_k) - call.d_k) * W);
        for (; lone != 0; lone &= lone - 1) {
            const int i = __builtin_ctzll(lone);
            delta[i] = multiply_as_value(call, i, output + i * call.d_v);
        }
    }

    void take_block(const Backward& call, KeyBlock<T>& block, GradientBlock<T>& scratch, const KeySums<T>& sums) {
        T *weights = scratch.weights, *gradients = scratch.gradients;
        const Sight seen = rows.sight.look(call.mask, block.begin, block.begin + block.count);
        if (seen == Sight::nothing) return;
        const bool partial = seen == Sight::something;
        if (block.nonfinite != 0) drop(call, rows_that_see(block.nonfinite, partial), block.begin);
        const typename Rows::Span span = rows.spans(block.begin, block.count);
        Rows::each_run(span, block.count, [&](int64_t j, int64_t run, int first, int vectors) {
            score_run(call, block, j, run, first, vectors, weights, gradients);
        });
        uint64_t bad = 0;
        const bool drops = call.dropout.probability > 0;
        if (drops) rows.template drop<true>(gradients, block.begin, span);
        for (int c = 0; c < panel; ++c) {
            const int64_t from = span.from[c], keys = span.to[c] - from, at = from * W + c * S::lanes;
            bad |= differentiate_vector(call, block.begin + from, c, keys, partial, from, weights + at, gradients + at);
            if (has_few_rows(call)) add_weights(weights + at, keys, taken + c * S::lanes);
        }
        if (drops) rows.template drop<true>(weights, block.begin, span);
        if (bad != 0) {
            drop(call, bad, block.begin);
            for (int64_t j = 0; j < block.count; ++j)
                for (int i = 0; i < W; ++i)
                    if (bad >> i & 1) weights[j * W + i] = gradients[j * W + i] = 0;
        }
        if constexpr (paired) scratch.pairs.load(weights, gradients, block.count, rows.scale);
        // The first products need no zeros to add to, if they reach every row of the tile and every key of the block.
        bool reaches_rows = false;
        int64_t reached = 0;
        Rows::each_run(span, block.count, [&](int64_t, int64_t run, int first, int vectors) {
            if (reached == 0) reaches_rows = first == 0 && vectors * S::lanes >= rows.count;
            reached += run;
        });
        if (fresh && !reaches_rows) clear(grad_queries, padded<T>(call.d_k) * W);
        if (block.fresh && reached < block.count) sums.clear(block.begin, block.begin + block.count);
        bool add_rows = !fresh || !reaches_rows;
        const bool add_keys = !block.fresh || reached < block.count;
        Rows::each_run(span, block.count, [&](int64_t j, int64_t run, int first, int vectors) {
            auto add = add_rows   ? add_keys ? &BackwardTile::add_run<true, true> : &BackwardTile::add_run<true, false>
                       : add_keys ? &BackwardTile::add_run<false, true>
                                  : &BackwardTile::add_run<false, false>;
            (this->*add)(call, block, j, run, first, vectors, scratch, sums);
            add_rows = true;
        });
        fresh = block.fresh = false;
    }

    // Writes the rows' own gradients; rows whose sums overflowed go to the fallback, with nothing left to add to
    // the keys.
    void finish(const Backward& call) {
        const int64_t width = padded<T>(call.d_k), row = stride(call.d_k);
        if (fresh) clear(grad_queries, width * W);
        // The scaled queries are not needed any more: the sums take their place, turned back into rows.
        for (int64_t d = 0; d < width; d += S::lanes)
            for (int c = 0; c < rows.count; c += S::lanes)
                Vectors<T>::turn([&](int t) { return S::load(grad_queries + (d + t) * W + c); },
                                 [&](int i, typename S::Vec x) { S::store(query_rows + (c + i) * row + d, x); });
        RowPlace at = rows.place(call);
        for (int i = 0; i < rows.count; ++i, at.step(call, i < rows.count))
            if (!(fallback >> i & 1)) leave_unless(write_row(call, i, at), i, call.keys);
        if (call.gradients.scale != nullptr) write_scales(call);
        for (int i = 0; wants_position_gradient(call) && i < rows.count; ++i) {
            if (fallback >> i & 1) continue;
            write_position_gradient(call, rows.number(call) + i, by_position[i]);
            leave_unless(std::isfinite(by_position[i]), i, call.keys);
        }
    }

    // Whether the weights of each row added up to what they were in the forward pass. Few rows had their maximum there
    // from scores that were added up in another order, and exp makes any number of what large logits differ by.
    bool adds_up(const Problem& call) const {
        constexpr T most = T(0x1p-40);
        for (int i = 0; has_few_rows(call) && i < rows.count; ++i)
            if (inverse[i] != 0 && !(std::fabs(taken[i] - given[i]) <= most * given[i])) return false;
        return true;
    }

  private:
    static bool has_few_rows(const Problem& call) { return rows_per_head(call) < few; }

    // A row that did not end sound goes to the float64 fallback, from this key on.
    void leave_unless(bool sound, int i, int64_t key) {
        if (sound) return;
        fallback |= 1ull << i;
        fallback_from[i] = key;
    }

    static void add_weights(const T* weights, int64_t keys, T* to) {
        auto sum = S::load(to);
        for (int64_t j = 0; j < keys; ++j) sum = S::add(sum, S::load(weights + j * W));
        S::store(to, sum);
    }

    // Scores, and gradients of the weights, of a run of keys by the vectors of rows that see it.
    void score_run(const Backward& call, const KeyBlock<T>& block, int64_t j, int64_t run, int first, int vectors,
                   T* weights, T* gradients) {
        const int64_t row = first * S::lanes, at = j * W + row;
        if constexpr (paired) {
            const PairView &keys = block.pairs->keys, &values = block.pairs->values;
            multiply<T, Into::scaled, Paired<T>>(weights + at, run, keys.data + j * keys.row, keys.row, 2,
                                                 queries + row, pairs_of(call.d_k), vectors, rows.scale + row);
            multiply<T, Into::place, Paired<T>>(gradients + at, run, values.data + j * values.row, values.row, 2,
                                                grads + row, pairs_of(call.d_v), vectors);
        } else {
            const BlockView<T>&keys = block.keys, &values = block.values;
            multiply<T, Into::place>(weights + at, run, keys.data + j * keys.row, keys.row, keys.step, queries + row,
                                     call.d_k, vectors);
            multiply<T, Into::place>(gradients + at, run, values.data + j * values.row, values.row, values.step,
                                     grads + row, call.d_v, vectors);
        }
    }

    // The gradients from a run of keys that the same vectors of rows see; `query` and `key`: added to those there.
    template <bool query, bool key>
    void add_run(const Backward& call, const KeyBlock<T>& block, int64_t j, int64_t run, int first, int vectors,
                 const GradientBlock<T>& scratch, const KeySums<T>& sums) {
        constexpr Into to_query = query ? Into::sum : Into::place, to_key = key ? Into::sum : Into::place;
        const int64_t d_k = stride(call.d_k), d_v = stride(call.d_v);
        const int64_t key_vectors = padded<T>(call.d_k) / S::lanes, value_vectors = padded<T>(call.d_v) / S::lanes;
        const int64_t row = first * S::lanes, at = j * W + row, steps = smaller(vectors * S::lanes, rows.count - row);
        T *key_sums = sums.key + (block.begin + j) * sums.key_row,
          *value_sums = sums.value + (block.begin + j) * sums.value_row;
        if constexpr (paired) {
            const uint16_t* keys = reinterpret_cast<const uint16_t*>(block.pairs->key_pairs);
            const PairedGradients<T>& pairs = scratch.pairs;
            // Runs begin at multiples of four keys.
            multiply<T, to_query, Paired<T>>(grad_queries + row, call.d_k, keys + j * call.d_k, 2, 2 * call.d_k,
                                             pairs.gradient_pairs + j / 2 * W + row, pairs_of(run), vectors);
            multiply_wide<T, to_key, Paired<T>>(value_sums, sums.value_row, run, pairs.weights + at, W, 2,
                                                grad_pairs + row / 2 * d_v, d_v, pairs_of(steps), value_vectors);
            multiply_wide<T, to_key, Paired<T>>(key_sums, sums.key_row, run, pairs.gradients + at, W, 2,
                                                query_pairs + row / 2 * d_k, d_k, pairs_of(steps), key_vectors);
        } else {
            const BlockView<T>& keys = block.keys;
            multiply<T, to_query>(grad_queries + row, call.d_k, keys.data + j * keys.row, keys.step, keys.row,
                                  scratch.gradients + at, run, vectors);
            multiply_wide<T, to_key>(value_sums, sums.value_row, run, scratch.weights + at, W, 1, grad_rows + row * d_v,
                                     d_v, steps, value_vectors);
            multiply_wide<T, to_key>(key_sums, sums.key_row, run, scratch.gradients + at, W, 1, query_rows + row * d_k,
                                     d_k, steps, key_vectors);
        }
    }

    // <gradient of the output, output> of a row, added up as its gradients of weights are: where the output is the
    // value of one key, the gradient of that key's score is exactly 0, and not what two orders of one sum leave.
    T multiply_as_value(const Problem& call, int i, const Working<In>* output) {
        alignas(64) T sums[S::lanes];
        const int first = i / S::lanes * S::lanes;
        if constexpr (paired) {
            for (int64_t d = 0; d < 2 * pairs_of(call.d_v); ++d)
                halves[d] = d < call.d_v ? narrow(output[d], Bfloat16()).bits : uint16_t(0);
            multiply<T, Into::place, Paired<T>>(sums, 1, halves, 0, 2, grads + first, pairs_of(call.d_v), 1);
        } else {
            multiply<T, Into::place>(sums, 1, output, 0, 1, grads + first, call.d_v, 1);
        }
        return sums[i - first];
    }

    bool copy_rows(const Backward& call, int i, const RowPlace& at) {
        const Query &q = call.q, &o = call.grad_output;
        T *query = query_rows + i * stride(call.d_k), *grad = grad_rows + i * stride(call.d_v);
        rows.scale[i] = T(number_of(call.scale, at));
        if (paired) clear(query, stride(call.d_k)), clear(grad, stride(call.d_v));
        const bool sound = Vectors<T>::read_row(row_of<In>(q, at), q.d, call.d_k, paired ? T(1) : rows.scale[i], query);
        return Vectors<T>::read_row(row_of<In>(o, at), o.d, call.d_v, T(1), grad) && sound;
    }

    // From what the forward pass saved to the factors of the row's weights.
    void weigh_row(const Backward& call, int i, const RowPlace& place, bool sound) {
        const int64_t at = rows.number(call) + i;
        const double scale = number_of(call.scale, place), of_row = delta[i];
        const double largest = call.saved.max[at], sum = call.saved.sum[at];
        const bool blind = largest == -INFINITY && sum == 0;
        const double* sink = sink_of(call, place);
        const double share = 1.0 / (sum + (sink == nullptr ? 0.0 : std::exp(*sink - largest)));
        // Done in float64, key by key: few rows of narrower numbers (see adds_up()), and rows whose sink makes weights
        // leave the range of T.
        const bool is_few = sizeof(T) < sizeof(double) && has_few_rows(call);
        sound = sound && !is_few && can_fold<T>(scale) && std::isfinite(double(T(largest))) && std::isfinite(sum) &&
                sum > 0 && std::isfinite(of_row) && (sizeof(T) == sizeof(double) || share > 0x1p-100);
        if (sound && T(share) == T(1) && !(call.dropout.probability > 0)) lone |= 1ull << i;
        top[i] = sound ? T(largest) : T(0);
        inverse[i] = sound ? T(share) : T(0);
        given[i] = sound ? T(sum * share) : T(0);
        if (call.gradients.sinks != nullptr) {
            const bool has = sink != nullptr && !blind;
            call.gradients.sinks[at] = has ? -of_row / (1.0 + sum * std::exp(largest - *sink)) : 0.0;
        }
        if (!sound) clear_row(call, i);
        leave_unless(sound || blind, i, 0);
    }

    void clear_row(const Problem& call, int i) {
        clear(query_rows + i * stride(call.d_k), stride(call.d_k));
        clear(grad_rows + i * stride(call.d_v), stride(call.d_v));
        top[i] = inverse[i] = delta[i] = given[i] = taken[i] = rows.scale[i] = 0;
    }

    uint64_t rows_that_see(uint64_t keys, bool partial) const {
        if (!partial) return Visibility<T, W>::every_row;
        uint64_t any = 0;
        for (; keys != 0; keys &= keys - 1) any |= rows.sight.words[__builtin_ctzll(keys)];
        return any;
    }

    // From `key` on the rows have no part in the tile any more.
    void drop(const Problem& call, uint64_t which, int64_t key) {
        for (int i = 0; i < rows.count; ++i) {
            if (!(which >> i & 1) || inverse[i] == 0) continue;
            clear_row(call, i);
            for (int64_t d = 0; d < (paired ? pairs_of(call.d_k) : call.d_k); ++d) queries[d * W + i] = 0;
            for (int64_t d = 0; d < (paired ? pairs_of(call.d_v) : call.d_v); ++d) grads[d * W + i] = 0;
            leave_unless(false, i, key);
        }
    }

    // Vector c of rows and the keys from `begin` on, the `from`-th and later ones of a block.
    uint64_t differentiate_vector(const Backward& call, int64_t begin, int c, int64_t keys, bool partial, int64_t from,
                                  T* weights, T* gradients) {
        const int at = c * S::lanes;
        alignas(64) T distances[S::lanes], sums[S::lanes];
        const bool sums_up = wants_position_gradient(call), adjusted = is_adjusted(call) || sums_up;
        for (int i = 0; sums_up && i < S::lanes; ++i) distances[i] = T(begin - rows.sight.by_position.position[at + i]);
        auto step = partial    ? adjusted ? differentiate<T, W, true, true> : differentiate<T, W, true, false>
                    : adjusted ? differentiate<T, W, false, true>
                               : differentiate<T, W, false, false>;
        const LogitStep<T> logits(call, rows.sight.bias + from * W + at);
        const RowFactors<T> factors{top, inverse, delta, sums_up ? distances : nullptr};
        const uint64_t bad = step(weights, gradients, keys, rows.sight.words + from, at, logits, factors, sums);
        for (int i = 0; sums_up && i < S::lanes; ++i) by_position[at + i] += double(sums[i]);
        return bad << at;
    }

    // Returns whether the row's gradient is finite.
    bool write_row(const Backward& call, int i, const RowPlace& at) {
        In* to = static_cast<In*>(call.gradients.query) + (rows.number(call) + i) * call.d_k;
        const T factor = T(number_of(call.scale, at));
        return Vectors<T>::write_row(query_rows + i * stride(call.d_k), call.d_k, factor, to);
    }

    // <q, sum of gradients * k> of every row.
    void write_scales(const Backward& call) {
        RowPlace at = rows.place(call);
        for (int first = 0; first < rows.count; first += S::lanes) {
            typename S::Vec dots[S::lanes];
            for (int lane = 0; lane < S::lanes; ++lane) {
                const int i = first + lane;
                dots[lane] = S::zero();
                if (i >= rows.count) continue;
                const T* row = query_rows + i * stride(call.d_k);
                // A row that sees nothing may have any q.
                if (inverse[i] != 0) dots[lane] = Vectors<T>::multiply(row, row_of<In>(call.q, at), call.q.d, call.d_k);
                at.step(call, i + 1 < rows.count);
            }
            T sums[S::lanes];
            S::store(sums, Vectors<T>::add_up(dots));
            for (int i = first; i < smaller(rows.count, first + S::lanes); ++i) {
                if (fallback >> i & 1) continue;
                call.gradients.scale[rows.number(call) + i] = double(sums[i - first]);
                leave_unless(std::isfinite(sums[i - first]), i, call.keys);
            }
        }
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
