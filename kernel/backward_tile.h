// Queries in lanes, backwards: a tile of rows and one block of keys, five products.
//
//   weights [key][row]   = keys x queries, then exp(s - max) / total from what the forward pass saved
//   slopes  [key][row]   = values x gradients of the output, then the gradient of each score: p * (dp - delta)
//   queries' [D][row]   += keys, turned x slopes
//   keys'    [key][D]   += slopes x queries       lanes are features here: rows as they lie, not transposed
//   values'  [key][V]   += weights x gradients of the output
#pragma once

#include <cmath>
#include <cstdint>

#include "backward_pairs.h"
#include "backward_slopes.h"
#include "backward_sums.h"
#include "block_view.h"
#include "kernel.h"
#include "level.h"
#include "product.h"
#include "tile.h"
#include "vectors.h"
#include "visibility.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Rows [first_row, first_row + rows) of (n, g), counted r * L + l, with all that their blocks of keys need.
template <class T, class In>
struct BackwardTile {
    using S = Simd<T>;
    using Place = Tile<T, In, false>;
    static constexpr int W = tile_rows<T>;

    static constexpr bool paired = in_pairs<T, In>;
    static constexpr uint64_t lanes = (1ull << S::lanes) - 1;

    T* queries;       // [padded D][W], the scale multiplied in, as in the forward pass: the same scores to the bit
    T* query_rows;    // [W][padded D], the same
    T* grads;         // [padded V][W], gradients of the output
    T* grad_rows;     // [W][padded V]
    T* grad_queries;  // [padded D][W], before the scale is multiplied in
    // With pairs queries and grads are pairs of features, the scale is not multiplied in, and there are
    T *query_pairs, *grad_pairs;  // [W / 2][padded D or V]: pairs of rows,
    uint16_t* halves;             // [W][padded D or V]: and room to make them
    Place place;
    alignas(64) T top[W];
    alignas(64) T inverse[W];  // 0: the row has no part in the tile
    alignas(64) T delta[W];    // <gradient of the output, output>
    alignas(64) T given[W];    // what the row's weights add up to, by the forward pass: 1, or what a sink leaves of it,
    alignas(64) T taken[W];    // and in this pass; of few rows alone
    alignas(64) double to_alibi[W];  // sums of gradients of logits times distances
    int64_t n, g, first_row;
    int rows;
    bool fresh;           // grad_queries holds nothing yet
    uint64_t lone;        // rows with all their weight on one key, as far as T can tell; none with dropout
    uint64_t odd;         // rows to be done carefully,
    int64_t odd_from[W];  // from this key on

    // Rows are padded to whole vectors, of pairs where products take pairs.
    static int64_t stride(int64_t width) {
        return paired ? (width + 2 * S::lanes - 1) / (2 * S::lanes) * (2 * S::lanes) : padded<T>(width);
    }

    static size_t numbers(const Problem& call) {
        const int64_t d_k = stride(call.d_k), d_v = stride(call.d_v);
        return size_t(W * (3 * d_k + 2 * d_v)) + (paired ? size_t(W / 2 * (d_k + d_v + larger(d_k, d_v))) : 0);
    }

    void attach(const Problem& call, T* memory) {
        const int64_t d_k = W * stride(call.d_k), d_v = W * stride(call.d_v);
        queries = memory;
        query_rows = queries + d_k;
        grad_queries = query_rows + d_k;
        grads = grad_queries + d_k;
        grad_rows = grads + d_v;
        query_pairs = grad_rows + d_v;
        grad_pairs = query_pairs + d_k / 2;
        halves = reinterpret_cast<uint16_t*>(grad_pairs + d_v / 2);
    }

    void load(const Backward& call, int64_t batch, int64_t group, int64_t first, int count) {
        n = batch;
        g = group;
        first_row = first;
        rows = count;
        lone = odd = 0;
        clear(taken, W);
        clear(to_alibi, W);
        place.place(call, n, g, first_row, rows);
        fresh = true;
        const Working<In>* output = static_cast<const Working<In>*>(call.output) + output_row(call) * call.d_v;
        RowCursor at(call, first_row);
        int used = 0;
        for (; used < rows; used += S::lanes) {
            typename S::Vec dots[S::lanes];
            bool sound[S::lanes];
            const RowCursor first_of_vector = at;
            for (int lane = 0; lane < S::lanes; ++lane) {
                const int i = used + lane;
                if (i >= rows) clear_row(call, i);
                dots[lane] = S::zero();
                if (i >= rows) continue;
                sound[lane] = copy_rows(call, i, at.r, at.l);
                dots[lane] = multiply_lanes(grad_rows + i * stride(call.d_v), output + i * call.d_v, 1, call.d_v);
                at.step(i + 1 < rows);
            }
            S::store(delta + used, add_up(dots));
            RowCursor again = first_of_vector;
            for (int lane = 0; used + lane < smaller(rows, used + S::lanes); ++lane) {
                weigh_row(call, used + lane, again.r, again.l, sound[lane]);
                again.step(used + lane + 1 < rows);
            }
        }
        if constexpr (paired) {
            pair_rows(query_rows, stride(call.d_k), used, halves, queries, query_pairs);
            pair_rows(grad_rows, stride(call.d_v), used, halves, grads, grad_pairs);
        } else {
            turn(query_rows, padded<T>(call.d_k), used, queries);
            turn(grad_rows, padded<T>(call.d_v), used, grads);
        }
        clear(grad_queries + call.d_k * W, (padded<T>(call.d_k) - call.d_k) * W);
        for (; lone != 0; lone &= lone - 1) {
            const int i = __builtin_ctzll(lone);
            delta[i] = multiply_as_value(call, i, output + i * call.d_v);
        }
    }

    void take_block(const Backward& call, KeyBlock<T>& block, SlopeBlock<T>& scratch, const KeySums<T>& sums) {
        T *weights = scratch.weights, *slopes = scratch.slopes;
        const Sight seen = place.sight.look(call.mask, block.begin, block.begin + block.count);
        if (seen == Sight::nothing) return;
        const bool partial = seen == Sight::something;
        if (block.odd != 0) drop(call, rows_that_see(block.odd, partial), block.begin);
        const typename Place::Span span = place.spans(block.begin, block.count);
        Place::each_run(span, block.count, [&](int64_t j, int64_t run, int first, int vectors) {
            score_run(call, block, j, run, first, vectors, weights, slopes);
        });
        uint64_t bad = 0;
        const bool drops = call.dropout.probability > 0;
        if (drops) drop_out(slopes, block.begin, span);
        for (int c = 0; c < panel; ++c) {
            const int64_t from = span.from[c], keys = span.to[c] - from, at = from * W + c * S::lanes;
            bad |= differentiate_vector(call, block.begin, c, from, span.to[c], partial, weights, slopes);
            if (has_few_rows(call)) add_weights(weights + at, keys, taken + c * S::lanes);
        }
        if (drops) drop_out(weights, block.begin, span);
        if (bad != 0) {
            drop(call, bad, block.begin);
            for (int64_t j = 0; j < block.count; ++j)
                for (int i = 0; i < W; ++i)
                    if (bad >> i & 1) weights[j * W + i] = slopes[j * W + i] = 0;
        }
        if constexpr (paired) scratch.pairs.load(weights, slopes, block.count, place.scale);
        // The first products need no zeros to add to, if they reach every row of the tile and every key of the block.
        bool reaches_rows = false;
        int64_t reached = 0;
        Place::each_run(span, block.count, [&](int64_t, int64_t run, int first, int vectors) {
            if (reached == 0) reaches_rows = first == 0 && vectors * S::lanes >= rows;
            reached += run;
        });
        if (fresh && !reaches_rows) clear(grad_queries, padded<T>(call.d_k) * W);
        if (block.fresh && reached < block.count) sums.clear(block.begin, block.begin + block.count);
        bool add_rows = !fresh || !reaches_rows;
        const bool add_keys = !block.fresh || reached < block.count;
        Place::each_run(span, block.count, [&](int64_t j, int64_t run, int first, int vectors) {
            auto add = add_rows   ? add_keys ? &BackwardTile::add_run<true, true> : &BackwardTile::add_run<true, false>
                       : add_keys ? &BackwardTile::add_run<false, true>
                                  : &BackwardTile::add_run<false, false>;
            (this->*add)(call, block, j, run, first, vectors, scratch, sums);
            add_rows = true;
        });
        fresh = block.fresh = false;
    }

    // Writes the rows' own gradients; rows whose sums overflowed join the odd ones, with nothing left to add to the
    // keys.
    void finish(const Backward& call) {
        const int64_t width = padded<T>(call.d_k), row = stride(call.d_k);
        if (fresh) clear(grad_queries, width * W);
        // The scaled queries are not needed any more: the sums take their place, turned back into rows.
        for (int64_t d = 0; d < width; d += S::lanes)
            for (int c = 0; c * S::lanes < rows; ++c) {
                typename S::Vec square[S::lanes];
                for (int t = 0; t < S::lanes; ++t) square[t] = S::load(grad_queries + (d + t) * W + c * S::lanes);
                S::transpose(square);
                for (int i = 0; i < S::lanes; ++i) S::store(query_rows + (c * S::lanes + i) * row + d, square[i]);
            }
        RowCursor at(call, first_row);
        for (int i = 0; i < rows; ++i, at.step(i < rows)) {
            if (odd >> i & 1) continue;
            if (!write_row(call, i, at.r, at.l)) {
                odd |= 1ull << i;
                odd_from[i] = call.keys;
            }
        }
        if (call.gradients.scale != nullptr) write_scales(call);
        for (int i = 0; call.gradients.alibi != nullptr && i < rows; ++i) {
            if (odd >> i & 1) continue;
            call.gradients.alibi[output_row(call) + i] = to_alibi[i];
            if (std::isfinite(to_alibi[i])) continue;
            odd |= 1ull << i;
            odd_from[i] = call.keys;
        }
    }

    // Whether the weights of each row added up to what they were in the forward pass. Few rows had their maximum there
    // from scores that were added up in another order, and exp makes any number of what large logits differ by.
    bool adds_up(const Problem& call) const {
        constexpr T most = T(0x1p-40);
        for (int i = 0; has_few_rows(call) && i < rows; ++i)
            if (inverse[i] != 0 && !(std::fabs(taken[i] - given[i]) <= most * given[i])) return false;
        return true;
    }

  private:
    static bool has_few_rows(const Problem& call) { return call.shared * call.queries < few; }

    static void add_weights(const T* weights, int64_t keys, T* to) {
        auto sum = S::load(to);
        for (int64_t j = 0; j < keys; ++j) sum = S::add(sum, S::load(weights + j * W));
        S::store(to, sum);
    }

    // Scores, and gradients of the weights, of a run of keys by the vectors of rows that see it.
    void score_run(const Backward& call, const KeyBlock<T>& block, int64_t j, int64_t run, int first, int vectors,
                   T* weights, T* slopes) {
        const int64_t row = first * S::lanes, at = j * W + row;
        if constexpr (paired) {
            const PairView &keys = block.pairs->keys, &values = block.pairs->values;
            multiply<T, Into::scaled, Paired<T>>(weights + at, run, keys.data + j * keys.row, keys.row, 2,
                                                 queries + row, pairs_of(call.d_k), vectors, place.scale + row);
            multiply<T, Into::place, Paired<T>>(slopes + at, run, values.data + j * values.row, values.row, 2,
                                                grads + row, pairs_of(call.d_v), vectors);
        } else {
            const BlockView<T>&keys = block.keys, &values = block.values;
            multiply<T, Into::place>(weights + at, run, keys.data + j * keys.row, keys.row, keys.step, queries + row,
                                     call.d_k, vectors);
            multiply<T, Into::place>(slopes + at, run, values.data + j * values.row, values.row, values.step,
                                     grads + row, call.d_v, vectors);
        }
    }

    // The gradients from a run of keys that the same vectors of rows see; `query` and `key`: added to those there.
    template <bool query, bool key>
    void add_run(const Backward& call, const KeyBlock<T>& block, int64_t j, int64_t run, int first, int vectors,
                 const SlopeBlock<T>& scratch, const KeySums<T>& sums) {
        constexpr Into to_query = query ? Into::sum : Into::place, to_key = key ? Into::sum : Into::place;
        const int64_t d_k = stride(call.d_k), d_v = stride(call.d_v);
        const int64_t key_vectors = padded<T>(call.d_k) / S::lanes, value_vectors = padded<T>(call.d_v) / S::lanes;
        const int64_t row = first * S::lanes, at = j * W + row, steps = smaller(vectors * S::lanes, rows - row);
        T *key_sums = sums.key + (block.begin + j) * sums.key_row,
          *value_sums = sums.value + (block.begin + j) * sums.value_row;
        if constexpr (paired) {
            const uint16_t* keys = reinterpret_cast<const uint16_t*>(block.pairs->key_pairs);
            const PairedSlopes<T>& pairs = scratch.pairs;
            // Runs begin at multiples of four keys.
            multiply<T, to_query, Paired<T>>(grad_queries + row, call.d_k, keys + j * call.d_k, 2, 2 * call.d_k,
                                             pairs.slope_pairs + j / 2 * W + row, pairs_of(run), vectors);
            multiply_wide<T, to_key, Paired<T>>(value_sums, sums.value_row, run, pairs.weights + at, W, 2,
                                                grad_pairs + row / 2 * d_v, d_v, pairs_of(steps), value_vectors);
            multiply_wide<T, to_key, Paired<T>>(key_sums, sums.key_row, run, pairs.slopes + at, W, 2,
                                                query_pairs + row / 2 * d_k, d_k, pairs_of(steps), key_vectors);
        } else {
            const BlockView<T>& keys = block.keys;
            multiply<T, to_query>(grad_queries + row, call.d_k, keys.data + j * keys.row, keys.step, keys.row,
                                  scratch.slopes + at, run, vectors);
            multiply_wide<T, to_key>(value_sums, sums.value_row, run, scratch.weights + at, W, 1, grad_rows + row * d_v,
                                     d_v, steps, value_vectors);
            multiply_wide<T, to_key>(key_sums, sums.key_row, run, scratch.slopes + at, W, 1, query_rows + row * d_k,
                                     d_k, steps, key_vectors);
        }
    }

    // Of gradients of weights, and of the weights that the values were multiplied with.
    void drop_out(T* numbers, int64_t begin, const typename Place::Span& span) const {
        for (int c = 0; c < panel; ++c) {
            const int64_t from = span.from[c], at = c * S::lanes;
            place.draws.template drop<true>(numbers + from * W + at, begin + from, span.to[c] - from, int(at));
        }
    }

    int64_t output_row(const Problem& call) const {
        return (n * call.groups + g) * call.shared * call.queries + first_row;
    }

    static const In* row_of(const Query& x, int64_t n, int64_t g, int64_t r, int64_t l) {
        return static_cast<const In*>(x.data) + n * x.n + g * x.g + r * x.r + l * x.l;
    }

    // A row times a factor, padded with zeros. Returns whether it is finite.
    static bool copy_row(const In* from, int64_t step, int64_t width, T factor, T* to) {
        auto check = S::zero();
        int64_t d = 0;
        for (; d + S::lanes <= width; d += S::lanes) {
            const auto x = S::mul(Vectors<T>::load(from + d * step, step), S::all(factor));
            S::store(to + d, x);
            check = S::fma(x, S::zero(), check);
        }
        if (d < width) {
            T rest[S::lanes] = {};
            for (int i = 0; d + i < width; ++i) rest[i] = T(widen(from[(d + i) * step])) * factor;
            const auto x = S::load(rest);
            S::store(to + d, x);
            check = S::fma(x, S::zero(), check);
        }
        return S::bits(S::equal(check, S::zero())) == lanes;
    }

    // A padded row times another, lane by lane.
    template <class Other>
    static typename S::Vec multiply_lanes(const T* row, const Other* other, int64_t step, int64_t width) {
        auto sum = S::zero();
        int64_t d = 0;
        for (; d + S::lanes <= width; d += S::lanes)
            sum = S::fma(S::load(row + d), Vectors<T>::load(other + d * step, step), sum);
        if (d == width) return sum;
        T rest[S::lanes] = {};
        for (int i = 0; d + i < width; ++i) rest[i] = T(widen(other[(d + i) * step]));
        return S::fma(S::load(row + d), S::load(rest), sum);
    }

    // The sums of the lanes of each vector, one per lane.
    static typename S::Vec add_up(typename S::Vec (&rows)[S::lanes]) {
        S::transpose(rows);
        for (int width = S::lanes / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) rows[i] = S::add(rows[i], rows[i + width]);
        return rows[0];
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

    double scale_of(const Problem& call, int64_t r, int64_t l) const {
        return call.scale.data[n * call.scale.n + g * call.scale.g + r * call.scale.r + l * call.scale.l];
    }

    bool copy_rows(const Backward& call, int i, int64_t r, int64_t l) {
        const Query &q = call.q, &o = call.grad_output;
        T *query = query_rows + i * stride(call.d_k), *grad = grad_rows + i * stride(call.d_v);
        place.scale[i] = T(scale_of(call, r, l));
        if (paired) clear(query, stride(call.d_k)), clear(grad, stride(call.d_v));
        const bool sound = copy_row(row_of(q, n, g, r, l), q.d, call.d_k, paired ? T(1) : place.scale[i], query);
        return copy_row(row_of(o, n, g, r, l), o.d, call.d_v, T(1), grad) && sound;
    }

    // From what the forward pass saved to the factors of the row's weights.
    void weigh_row(const Backward& call, int i, int64_t r, int64_t l, bool sound) {
        const int64_t at = output_row(call) + i;
        const double scale = scale_of(call, r, l), of_row = delta[i];
        const double largest = call.saved.max[at], sum = call.saved.sum[at];
        const bool blind = largest == -INFINITY && sum == 0;
        const double* sink = call.sinks == nullptr ? nullptr : call.sinks + g * call.shared + r;
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
        if (sound) return;
        clear_row(call, i);
        if (blind) return;
        odd |= 1ull << i;
        odd_from[i] = 0;
    }

    void clear_row(const Problem& call, int i) {
        clear(query_rows + i * stride(call.d_k), stride(call.d_k));
        clear(grad_rows + i * stride(call.d_v), stride(call.d_v));
        top[i] = inverse[i] = delta[i] = given[i] = taken[i] = place.scale[i] = 0;
    }

    // [W][width] to [width][W]
    static void turn(const T* from, int64_t width, int used, T* to) {
        for (int64_t d = 0; d < width; d += S::lanes)
            for (int c = 0; c < used; c += S::lanes) {
                typename S::Vec square[S::lanes];
                for (int i = 0; i < S::lanes; ++i) square[i] = S::load(from + (c + i) * width + d);
                S::transpose(square);
                for (int t = 0; t < S::lanes; ++t) S::store(to + (d + t) * W + c, square[t]);
            }
    }

    uint64_t rows_that_see(uint64_t keys, bool partial) const {
        if (!partial) return Visibility<T, W>::every_row;
        uint64_t any = 0;
        for (; keys != 0; keys &= keys - 1) any |= place.sight.words[__builtin_ctzll(keys)];
        return any;
    }

    // From `key` on the rows have no part in the tile any more.
    void drop(const Problem& call, uint64_t which, int64_t key) {
        for (int i = 0; i < rows; ++i) {
            if (!(which >> i & 1) || inverse[i] == 0) continue;
            clear_row(call, i);
            for (int64_t d = 0; d < (paired ? pairs_of(call.d_k) : call.d_k); ++d) queries[d * W + i] = 0;
            for (int64_t d = 0; d < (paired ? pairs_of(call.d_v) : call.d_v); ++d) grads[d * W + i] = 0;
            odd |= 1ull << i;
            odd_from[i] = key;
        }
    }

    uint64_t differentiate_vector(const Backward& call, int64_t begin, int c, int64_t from, int64_t to, bool partial,
                                  T* weights, T* slopes) {
        const int at = c * S::lanes;
        const T* bias = has_bias(call) ? place.sight.bias + from * W + at : nullptr;
        alignas(64) T distances[S::lanes], sums[S::lanes];
        const bool slopes_too = call.gradients.alibi != nullptr, adjusted = is_adjusted(call) || slopes_too;
        for (int i = 0; slopes_too && i < S::lanes; ++i) distances[i] = T(begin + from - place.sight.position[at + i]);
        auto step = partial    ? adjusted ? differentiate<T, W, true, true> : differentiate<T, W, true, false>
                    : adjusted ? differentiate<T, W, false, true>
                               : differentiate<T, W, false, false>;
        const uint64_t bad = step(weights + from * W + at, slopes + from * W + at, to - from, place.sight.words + from,
                                  at, bias, call.softcap, top, inverse, delta, slopes_too ? distances : nullptr, sums);
        for (int i = 0; slopes_too && i < S::lanes; ++i) to_alibi[at + i] += double(sums[i]);
        return bad << at;
    }

    bool write_row(const Backward& call, int i, int64_t r, int64_t l) {
        const int64_t at = output_row(call) + i;
        const T* sums = query_rows + i * stride(call.d_k);
        In* to = static_cast<In*>(call.gradients.query) + at * call.d_k;
        const auto factor = S::all(T(scale_of(call, r, l)));
        auto check = S::zero();
        int64_t d = 0;
        for (; d + S::lanes <= call.d_k; d += S::lanes) {
            const auto x = S::mul(S::load(sums + d), factor);
            check = S::fma(x, S::zero(), check);
            Vectors<T>::store(to + d, x);
        }
        if (d < call.d_k) {
            In rest[S::lanes];
            const auto x = S::mul(S::load(sums + d), factor);
            check = S::fma(x, S::zero(), check);
            Vectors<T>::store(rest, x);
            for (int i = 0; d + i < call.d_k; ++i) to[d + i] = rest[i];
        }
        return S::bits(S::equal(check, S::zero())) == lanes;
    }

    // <q, sum of slopes * k> of every row.
    void write_scales(const Backward& call) {
        RowCursor at(call, first_row);
        for (int first = 0; first < rows; first += S::lanes) {
            typename S::Vec dots[S::lanes];
            for (int lane = 0; lane < S::lanes; ++lane) {
                const int i = first + lane;
                dots[lane] = S::zero();
                if (i >= rows) continue;
                const T* row = query_rows + i * stride(call.d_k);
                // A row that sees nothing may have any q.
                if (inverse[i] != 0)
                    dots[lane] = multiply_lanes(row, row_of(call.q, n, g, at.r, at.l), call.q.d, call.d_k);
                at.step(i + 1 < rows);
            }
            T sums[S::lanes];
            S::store(sums, add_up(dots));
            for (int lane = 0; lane < S::lanes && first + lane < rows; ++lane) {
                const int i = first + lane;
                if (odd >> i & 1) continue;
                call.gradients.scale[output_row(call) + i] = double(sums[lane]);
                if (std::isfinite(sums[lane])) continue;
                odd |= 1ull << i;
                odd_from[i] = call.keys;
            }
        }
    }
};

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
