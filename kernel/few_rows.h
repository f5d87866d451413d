// Keys in lanes: fewer than eight rows per key/value head, as in decoding. Reads every key and value once.
#pragma once

#include <cmath>
#include <cstdint>

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

template <class T>
inline double add_lanes(typename Simd<T>::Vec v) {
    T x[Simd<T>::lanes];
    Simd<T>::store(x, v);
    double sum = 0;
    for (int i = 0; i < Simd<T>::lanes; ++i) sum += double(x[i]);
    return sum;
}

template <class T>
struct FewScratch {
    T* queries;  // [rows][D], the scale multiplied in
    T* scores;   // [few_block]
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

    // The keys [begin, end) of all rows of (n, g); output [rows][V] is relative to the state's maxima.
    void run(const Forward& call, const FewScratch<T>& scratch, T* output, int64_t n, int64_t g, int64_t begin,
             int64_t end) {
        const int rows = int(call.shared * call.queries);
        for (int row = 0; row < rows; ++row) load_query(call, scratch.queries + row * call.d_k, n, g, row);
        for (int64_t i = 0; i < rows * call.d_v; ++i) output[i] = 0;
        state.clear();
        for (int i = 0; i < few; ++i) seen[i] = false;
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
        bool looked = false;
        BlockView<T> keys{}, values{};
        for (int row = 0; row < few; ++row) clear_sums(row);
        block.has_tiny = false;
        uint64_t any = 0;
        for (int row = 0; row < rows; ++row) {
            uint64_t sees[few_block / 64] = {};
            if (!look(call, n, g, row, begin, count, sees)) continue;
            if (!looked) {
                const In* k_at = static_cast<const In*>(k.data) + n * k.n + g * k.g + begin * k.s;
                const In* v_at = static_cast<const In*>(v.data) + n * v.n + g * v.g + begin * v.s;
                keys = view(k_at, k.s, k.d, count, call.d_k, scratch.keys);
                values = view(v_at, v.s, v.d, count, call.d_v, scratch.values);
                looked = true;
            }
            any |= 1ull << row;
            seen[row] = true;
            multiply_keys(keys, scratch.queries + row * call.d_k, call.d_k, count, scratch.scores);
            if (call.softcap > 0 || call.mask.kind > MaskKind::boolean)
                adjust(call, n, g, row, begin, count, sees, scratch.scores);
            soften_row(row, count, sees, scratch.scores);
            if (call.dropout.probability > 0)
                drop_row(call.dropout, (n * call.groups + g) * rows + row, begin, count, scratch.scores);
            add_values(values, scratch.scores, sees, count, call.d_v, block.factor[row], output + row * call.d_v);
        }
        if (any != 0) absorb<T, few, statistics>(state, block, begin);
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

    // scores[j] = <key j, query>: a vector of keys at a time, products turned so that one sum per lane remains.
    static void multiply_keys(const BlockView<T>& keys, const T* query, int64_t d_k, int64_t count, T* scores) {
        const int64_t whole = d_k - d_k % S::lanes;
        for (int64_t j = 0; j < count; j += S::lanes) {
            Vec sum[S::lanes];
            for (int i = 0; i < S::lanes; ++i) {
                const T* k = keys.data + smaller(j + i, count - 1) * keys.row;
                Vec a = S::zero(), b = S::zero();
                int64_t d = 0;
                for (; d + 2 * S::lanes <= whole; d += 2 * S::lanes) {
                    a = S::fma(S::load(query + d), S::load(k + d), a);
                    b = S::fma(S::load(query + d + S::lanes), S::load(k + d + S::lanes), b);
                }
                if (d < whole) a = S::fma(S::load(query + d), S::load(k + d), a);
                sum[i] = S::add(a, b);
            }
            S::transpose(sum);
            for (int width = S::lanes / 2; width > 0; width /= 2)
                for (int i = 0; i < width; ++i) sum[i] = S::add(sum[i], sum[i + width]);
            T x[S::lanes];
            S::store(x, sum[0]);
            for (int i = 0; i < S::lanes && j + i < count; ++i) {
                const T* k = keys.data + (j + i) * keys.row;
                for (int64_t d = whole; d < d_k; ++d) x[i] += query[d] * k[d];
                scores[j + i] = x[i];
            }
        }
    }

  private:
    void adjust(const Forward& call, int64_t n, int64_t g, int64_t row, int64_t begin, int64_t count,
                const uint64_t* sees, T* scores) {
        const Mask& mask = call.mask;
        const int64_t r = row / call.queries, l = row % call.queries;
        const int64_t at = n * mask.n + g * mask.g + r * mask.r + l * mask.l + begin * mask.s;
        if (statistics) describe_row_scores(row, count, sees, scores);
        if (call.softcap > 0) {
            const Vec size = S::all(T(call.softcap)), inverse = S::all(T(1.0 / call.softcap));
            for (int64_t j = 0; j < count; j += S::lanes)
                S::store(scores + j, S::mul(size, hyperbolic_tangent<T>(S::mul(S::load(scores + j), inverse))));
        }
        if (mask.kind > MaskKind::boolean)
            for (int64_t j = 0; j < count; ++j)
                if (sees[j / 64] >> (j % 64) & 1) scores[j] += T(read_mask(mask, at + j * mask.s));
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

    // output = output * factor + sum_j weight_j * value_j, over the keys that are seen.
    static void add_values(const BlockView<T>& values, const T* weights, const uint64_t* sees, int64_t count,
                           int64_t d_v, T factor, T* output) {
        constexpr int chunk = 4;
        int64_t d = 0;
        for (; d + chunk * S::lanes <= d_v; d += chunk * S::lanes)
            add_chunk<chunk>(values, weights, sees, count, d, factor, output);
        for (; d + S::lanes <= d_v; d += S::lanes) add_chunk<1>(values, weights, sees, count, d, factor, output);
        for (; d < d_v; ++d) {
            T sum = output[d] * factor;
            for (int64_t j = 0; j < count; ++j)
                if (sees[j / 64] >> (j % 64) & 1) sum += weights[j] * values.data[j * values.row + d];
            output[d] = sum;
        }
    }

    template <int chunk>
    static void add_chunk(const BlockView<T>& values, const T* weights, const uint64_t* sees, int64_t count, int64_t d,
                          T factor, T* output) {
        Vec sum[chunk], other[chunk];
        for (int c = 0; c < chunk; ++c) {
            sum[c] = S::mul(S::load(output + d + c * S::lanes), S::all(factor));
            other[c] = S::zero();
        }
        const T* v = values.data + d;
        for (int64_t from = 0; from < count; from += 64) {
            const int64_t to = smaller(from + 64, count);
            const uint64_t word = sees[from / 64], whole = to - from == 64 ? ~0ull : (1ull << (to - from)) - 1;
            int64_t j = from;
            if (word == whole)
                for (; j + 2 <= to; j += 2) {
                    const Vec first = S::all(weights[j]), second = S::all(weights[j + 1]);
                    const T *p = v + j * values.row, *q = p + values.row;
                    for (int c = 0; c < chunk; ++c) {
                        sum[c] = S::fma(first, S::load(p + c * S::lanes), sum[c]);
                        other[c] = S::fma(second, S::load(q + c * S::lanes), other[c]);
                    }
                }
            for (; j < to; ++j) {
                if (!(word >> (j - from) & 1)) continue;
                const Vec weight = S::all(weights[j]);
                for (int c = 0; c < chunk; ++c)
                    sum[c] = S::fma(weight, S::load(v + j * values.row + c * S::lanes), sum[c]);
            }
        }
        for (int c = 0; c < chunk; ++c) S::store(output + d + c * S::lanes, S::add(sum[c], other[c]));
    }
};

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
