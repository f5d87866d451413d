// Keys in lanes: fewer than eight rows per key/value head, as in decoding. Reads every key and value once.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "forward/few_products.h"
#include "forward/row_state.h"
#include "forward/soften.h"
#include "rows/arena.h"
#include "rows/dropout.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "rows/visibility.h"
#include "simd/exponential.h"
#include "simd/product.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T>
struct FewScratch {
    T* queries;  // [rows][D], the scale multiplied in
    T* scores;   // [rows][few_block]
    T* keys;     // [few_block][D], only for copies
    T* values;   // [few_block][V], only for copies

    void lay_out(Arena& memory, const Problem& call) {
        memory.take(queries, rows_per_head(call), call.d_k);
        memory.take(scores, rows_per_head(call), few_block);
        memory.take(keys, few_block, call.d_k);
        memory.take(values, few_block, call.d_v);
    }
};

template <class T, class In, bool statistics>
struct FewRows {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    using Products = FewProducts<T, In>;

    RowState<T, few> state;
    BlockSums<T, few> block;
    bool seen[few];
    bool beyond[few];  // a score beyond T, which a soft cap would hide: its sign may be wrong

    // The keys [begin, end) of all rows of a head; output [rows][V] is relative to the state's maxima.
    void run(const Forward& call, const FewScratch<T>& scratch, T* output, int64_t head, int64_t begin, int64_t end) {
        const int64_t rows = rows_per_head(call);
        for (int64_t row = 0; row < rows; ++row)
            load_query(call, scratch.queries + row * call.d_k, RowPlace(call, head, row));
        clear(output, rows * call.d_v);
        state.clear();
        for (int i = 0; i < few; ++i) seen[i] = beyond[i] = false;
        for (int64_t from = begin; from < end; from += few_block)
            take_block(call, scratch, output, head, from, smaller(from + few_block, end));
    }

    static void load_query(const Forward& call, T* to, const RowPlace& at) {
        const In* q = row_of<In>(call.q, at);
        const T scale = T(number_of(call.scale, at));
        for (int64_t d = 0; d < call.d_k; ++d) to[d] = T(widen(q[d * call.q.d])) * scale;
    }

    // Which of the keys [begin, begin + count) a row sees, one bit each; whether it sees any.
    static bool look(const Forward& call, const RowPlace& place, int64_t begin, int64_t count,
                     uint64_t (&sees)[few_block / 64]) {
        const KeyRange range = key_range(call, place.l);
        const int64_t from = larger(range.lo - begin, 0), to = smaller(range.hi - begin + 1, count);
        if (from >= to) return false;
        const Mask& mask = call.mask;
        const int64_t at = offset(mask, place) + begin * mask.s;
        bool any = false;
        for (int w = 0; w < few_block / 64; ++w) {
            const int64_t first = larger(from - 64 * w, 0), last = smaller(to - 64 * w, 64);
            if (first >= last) continue;
            uint64_t word = bits_below(last) & ~bits_below(first);
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

    // Scores of one row become logits. Returns whether a visible one that is capped lay beyond T.
    static bool adjust(const Forward& call, const RowPlace& place, int64_t begin, int64_t count, const uint64_t* sees,
                       T* scores) {
        const LogitStep<T> step(call, nullptr);
        Vec check = S::zero();
        for (int64_t j = 0; step.caps && j < count; j += S::lanes) {
            const Vec x = S::load(scores + j);
            check = S::fma(S::keep(S::from_bits(sees[j / 64] >> (j % 64)), x), S::zero(), check);
            S::store(scores + j, step.apply(x, 0));
        }
        // Mask and positions are added up in float64 and rounded once; a tile rounds each of them to T. Either is
        // within half an ulp of the bias, and one step for both would change the bits of one of them.
        const RowBias bias(call, place);
        for (int64_t j = 0; has_bias(call) && j < count; ++j)
            if (sees[j / 64] >> (j % 64) & 1) scores[j] += T(bias.of(begin + j));
        return Vectors<T>::sound(check) != Vectors<T>::every_lane;
    }

  private:
    void take_block(const Forward& call, const FewScratch<T>& scratch, T* output, int64_t head, int64_t begin,
                    int64_t end) {
        const int rows = int(rows_per_head(call));
        const int64_t count = end - begin;
        const KeyValue &k = call.k, &v = call.v;
        // Rows without keys in this block: absorbing it changes nothing.
        block = {};
        for (int i = 0; i < few; ++i) {
            block.factor[i] = 1;
            block.old_top[i] = block.top[i] = state.top[i];
        }
        uint64_t sees[few][few_block / 64];
        int seeing[few], some = 0;  // the rows that see something of the block
        for (int row = 0; row < rows; ++row) {
            for (uint64_t& word : sees[row]) word = 0;
            if (look(call, RowPlace(call, head, row), begin, count, sees[row])) seeing[some++] = row;
        }
        if (some == 0) return;
        const In *k_at = key_of<In>(call, k, head, begin), *v_at = key_of<In>(call, v, head, begin);
        const BlockView<T> keys = Products::view(k_at, k.s, k.d, count, call.d_k, scratch.keys);
        const BlockView<T> values = Products::view(v_at, v.s, v.d, count, call.d_v, scratch.values);
        // What is short lies in a cache after its last use, and copies have been read when they are used.
        const bool asks_ahead = call.keys > few_block && std::is_same<T, In>::value;
        for (int64_t from = 0; from < count; from += stretch) {
            const int64_t to = smaller(from + stretch, count), next = smaller(to + stretch, count) - to;
            const int64_t turns = asks_ahead ? some * Products::key_turns(to - from, call.d_k) : 0;
            Ahead<In> ahead = next > 0 ? Ahead<In>(k_at + to * k.s, k.s, k.d, next, call.d_k, turns)
                                       : Ahead<In>(v_at, v.s, v.d, smaller(stretch, count), call.d_v, turns);
            const BlockView<T> part = {keys.data + from * keys.row, keys.row, 1};
            Products::each_rows(some, [&](int i, auto rows_at_once) {
                constexpr int R = decltype(rows_at_once)::value;
                const T* queries[R];
                T* scores[R];
                for (int r = 0; r < R; ++r) {
                    queries[r] = scratch.queries + seeing[i + r] * call.d_k;
                    scores[r] = scratch.scores + seeing[i + r] * few_block + from;
                }
                Products::template multiply_keys<R>(part, queries, call.d_k, to - from, scores, ahead);
            });
        }
        for (int i = 0; i < some; ++i) {
            const int row = seeing[i];
            const RowPlace place(call, head, row);
            T* scores = scratch.scores + row * few_block;
            seen[row] = true;
            if (is_adjusted(call)) {
                if (statistics)
                    describe_scores(scores, 1, 0, count, row, state,
                                    [&](int64_t j) { return sees[row][j / 64] >> (j % 64) & 1; });
                beyond[row] = adjust(call, place, begin, count, sees[row], scores) || beyond[row];
            }
            soften_row(row, count, sees[row], scores);
            if (call.dropout.probability > 0) drop_row(call.dropout, place.number(call), begin, count, scores);
        }
        const int64_t after = smaller(stretch, call.keys - end);  // keys of the next block
        for (int64_t from = 0; from < count; from += stretch) {
            const int64_t to = smaller(from + stretch, count), next = smaller(to + stretch, count) - to;
            const int64_t turns = asks_ahead ? some * Products::value_turns(to - from, call.d_v) : 0;
            Ahead<In> ahead = next > 0    ? Ahead<In>(v_at + to * v.s, v.s, v.d, next, call.d_v, turns)
                              : after > 0 ? Ahead<In>(k_at + count * k.s, k.s, k.d, after, call.d_k, turns)
                                          : Ahead<In>();
            const BlockView<T> part = {values.data + from * values.row, values.row, 1};
            Products::each_rows(some, [&](int i, auto rows_at_once) {
                constexpr int R = decltype(rows_at_once)::value;
                typename Products::template Weighed<R> rows_of;
                for (int r = 0; r < R; ++r) {
                    const int row = seeing[i + r];
                    rows_of.weights[r] = scratch.scores + row * few_block + from;
                    rows_of.sees[r] = sees[row][from / 64] >> (from % 64) & bits_below(to - from);
                    rows_of.factor[r] = from == 0 ? block.factor[row] : T(1);
                    rows_of.output[r] = output + row * call.d_v;
                }
                Products::add_values(rows_of, part, to - from, call.d_v, ahead);
            });
        }
        absorb<T, few, statistics>(state, block, begin);
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
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
