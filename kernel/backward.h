// One backward pass on one CPU level: cuts the call into heads and splits of their queries, and adds the splits up in
// order.
#pragma once

#include <cstdint>

#include "arena.h"
#include "backward_careful.h"
#include "backward_sums.h"
#include "backward_tile.h"
#include "kernel.h"
#include "level.h"
#include "pool.h"
#include "work.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// How a call is cut, by its shape alone: the same bits for any number of threads.
struct Cut {
    int64_t rows;        // of a head: the queries of all heads that share its keys
    int64_t group_rows;  // that pass over a block of keys together
    int64_t groups, splits;

    // The group that a split takes in a round, or one past the last: forth and back, so that a causal call's long and
    // short groups are shared evenly.
    int64_t group(int64_t split, int64_t round) const {
        return smaller(groups, round * splits + (round % 2 == 0 ? split : splits - 1 - split));
    }
    int64_t rounds() const { return (groups + splits - 1) / splits; }
};

constexpr int most_splits = 4;
constexpr int most_group_tiles = 8;
constexpr size_t group_bytes = 1 << 20;  // of the tiles of a group: to stay in the second level of cache

template <class T>
Cut cut(const Problem& call) {
    constexpr int64_t W = tile_rows<T>;
    Cut cut;
    cut.rows = call.shared * call.queries;
    const int64_t heads = larger(call.batch * call.groups, 1), tiles = larger((cut.rows + W - 1) / W, 1);
    cut.splits = heads >= 8 ? 1 : smaller(smaller((7 + heads) / heads, most_splits), tiles);
    const int64_t tile_bytes = sizeof(T) * W * (3 * padded<T>(call.d_k) + 2 * padded<T>(call.d_v)) + 1;
    int64_t group_tiles = smaller(larger(int64_t(group_bytes) / tile_bytes, 1), most_group_tiles);
    group_tiles = smaller(group_tiles, (tiles + cut.splits - 1) / cut.splits);
    cut.group_rows = group_tiles * W;
    cut.groups = (cut.rows + cut.group_rows - 1) / cut.group_rows;
    return cut;
}

// Groups of tiles over the keys of a head.
template <class T, class In>
class BackwardLoop {
  public:
    using Tile = BackwardTile<T, In>;
    static constexpr int W = tile_rows<T>;

    static size_t bytes(const Problem& call, const Cut& cut) {
        const size_t tiles = size_t(cut.group_rows / W), d = size_t(call.d_k + call.d_v);
        const size_t pairs = Tile::paired ? PairedKeys<T>::numbers(call) + PairedSlopes<T>::numbers : 0;
        return tiles * (sizeof(Tile) + Tile::numbers(call) * sizeof(T) + 128) +
               sizeof(T) * (backward_block * (2 * W + d) + pairs) + 10 * 64;
    }

    BackwardLoop(const Backward& call, const Cut& cut, Work& work, int worker, Arena& arena)
        : call_(call), cut_(cut), work_(work), worker_(worker), tiles_(arena.take<Tile>(size_t(cut.group_rows / W))) {
        // A tile's numbers are whole vectors: each begins where one may.
        const int64_t tiles = cut.group_rows / W;
        T* numbers = arena.take<T>(size_t(tiles) * Tile::numbers(call));
        for (int64_t t = 0; t < tiles && arena.ok(); ++t) tiles_[t].attach(call, numbers + t * Tile::numbers(call));
        slopes_.weights = arena.take<T>(backward_block * W);
        slopes_.slopes = arena.take<T>(backward_block * W);
        if constexpr (Tile::paired) {
            slopes_.pairs.attach(arena.take<T>(PairedSlopes<T>::numbers));
            pairs_.attach(call, arena.take<T>(PairedKeys<T>::numbers(call)));
        }
        keys_ = arena.take<T>(size_t(backward_block * call.d_k));
        values_ = arena.take<T>(size_t(backward_block * call.d_v));
    }

    // The rows of one split of (n, g). Returns whether the sums, which begin at zero here, are sound: finite, if more
    // room would help, and made of weights that add up.
    bool run(int64_t n, int64_t g, int64_t split, const KeySums<T>& sums) {
        bool fresh = true;
        adds_up_ = true;
        for (int64_t round = 0; round < cut_.rounds() && !work_.is_over(worker_); ++round) {
            const int64_t group = cut_.group(split, round);
            if (group >= cut_.groups) continue;
            take_group(n, g, group * cut_.group_rows, sums, fresh);
            fresh = false;
        }
        if (fresh) sums.clear(0, call_.keys);
        if (!adds_up_ || sizeof(T) == sizeof(double)) return adds_up_;
        return is_finite_row(sums.key, 1, call_.keys * sums.key_row) &&
               is_finite_row(sums.value, 1, call_.keys * sums.value_row);
    }

  private:
    // With `fresh` the sums hold nothing yet.
    void take_group(int64_t n, int64_t g, int64_t first_row, const KeySums<T>& sums, bool fresh) {
        const int64_t end_row = smaller(first_row + cut_.group_rows, cut_.rows);
        int64_t begin = INT64_MAX, end = 0;
        int tiles = 0;
        for (int64_t row = first_row; row < end_row; row += W, ++tiles) {
            Tile& tile = tiles_[tiles];
            tile.load(call_, n, g, row, int(smaller(W, end_row - row)));
            begin = smaller(begin, tile.place.sight.first_key());
            end = larger(end, tile.place.sight.end_key());
        }
        begin = smaller(begin, call_.keys);
        end = larger(begin, end);
        if (fresh) {
            sums.clear(0, begin);
            sums.clear(end, call_.keys);
        }
        for (; begin < end; begin += backward_block) {
            if (work_.is_over(worker_)) return;
            KeyBlock<T> block = take_keys(n, g, begin, smaller(backward_block, end - begin));
            block.fresh = fresh;
            for (int t = 0; t < tiles; ++t) tiles_[t].take_block(call_, block, slopes_, sums);
            if (block.fresh) sums.clear(block.begin, block.begin + block.count);
        }
        for (int t = 0; t < tiles; ++t) {
            Tile& tile = tiles_[t];
            tile.finish(call_);
            adds_up_ = adds_up_ && tile.adds_up(call_);
            for (; tile.odd != 0 && !work_.is_over(worker_); tile.odd &= tile.odd - 1) {
                const int i = __builtin_ctzll(tile.odd);
                if (!differentiate_carefully<In>(call_, n, g, tile.first_row + i, tile.odd_from[i], sums))
                    work_.fail(Status::out_of_memory);
            }
        }
    }

    KeyBlock<T> take_keys(int64_t n, int64_t g, int64_t begin, int64_t count) {
        const KeyValue &k = call_.k, &v = call_.v;
        const In* k_at = static_cast<const In*>(k.data) + n * k.n + g * k.g + begin * k.s;
        const In* v_at = static_cast<const In*>(v.data) + n * v.n + g * v.g + begin * v.s;
        KeyBlock<T> block{};
        block.begin = begin;
        block.count = count;
        if constexpr (Tile::paired) {
            block.odd = pairs_.load(call_, k_at, v_at, count);
            block.pairs = &pairs_;
            return block;
        }
        block.keys = View<T, In>::of(k_at, k.s, k.d, count, call_.d_k, keys_);
        block.values = View<T, In>::of(v_at, v.s, v.d, count, call_.d_v, values_);
        if (is_finite(block.keys, count, call_.d_k) && is_finite(block.values, count, call_.d_v)) return block;
        for (int64_t j = 0; j < count; ++j)
            if (!is_finite_row(block.keys.data + j * block.keys.row, block.keys.step, call_.d_k) ||
                !is_finite_row(block.values.data + j * block.values.row, block.values.step, call_.d_v))
                block.odd |= 1ull << j;
        // 0 * NaN would poison the rows that do not see the key.
        copy_block<T, In>(k_at, k.s, k.d, count, call_.d_k, keys_);
        copy_block<T, In>(v_at, v.s, v.d, count, call_.d_v, values_);
        for (uint64_t odd = block.odd; odd != 0; odd &= odd - 1) {
            const int j = __builtin_ctzll(odd);
            for (int64_t d = 0; d < call_.d_k; ++d) keys_[j * call_.d_k + d] = 0;
            for (int64_t d = 0; d < call_.d_v; ++d) values_[j * call_.d_v + d] = 0;
        }
        block.keys = {keys_, ptrdiff_t(call_.d_k), 1};
        block.values = {values_, ptrdiff_t(call_.d_v), 1};
        return block;
    }

    const Backward& call_;
    const Cut& cut_;
    Work& work_;
    int worker_;
    Tile* tiles_;
    SlopeBlock<T> slopes_;
    PairedKeys<T> pairs_;
    T *keys_, *values_;  // [backward_block][D or V], only for copies
    bool adds_up_ = true;
};

template <class T, class In>
struct BackwardPass {
    const Backward& call;
    const Cut& cut;
    Work& work;
    T* memory;     // [head][split][S][padded D + padded V], if heads are split
    bool* sounds;  // [head][split]: whether the sums are sound

    static constexpr int64_t reduced_keys = 256;
    int64_t key_row() const { return padded<T>(call.d_k); }
    int64_t value_row() const { return padded<T>(call.d_v); }
    int64_t split_size() const { return call.keys * (key_row() + value_row()); }
    In* to_key(int64_t head) const { return static_cast<In*>(call.gradients.key) + head * call.keys * call.d_k; }
    In* to_value(int64_t head) const { return static_cast<In*>(call.gradients.value) + head * call.keys * call.d_v; }

    KeySums<T> sums_in(T* at) const { return {at, at + call.keys * key_row(), key_row(), value_row()}; }

    // Sums that are of the right type and width already are added up where the gradients belong.
    bool is_direct() const {
        return cut.splits == 1 && sizeof(T) == sizeof(In) && key_row() == call.d_k && value_row() == call.d_v;
    }
    KeySums<T> gradients_of(int64_t head) const {
        return {reinterpret_cast<T*>(to_key(head)), reinterpret_cast<T*>(to_value(head)), key_row(), value_row()};
    }

    static void body(void* context, int worker) { static_cast<BackwardPass*>(context)->serve(worker); }
    static void reduce_body(void* context, int worker) { static_cast<BackwardPass*>(context)->reduce(worker); }

    void serve(int worker) {
        const bool own = cut.splits == 1 && !is_direct();
        Arena arena(BackwardLoop<T, In>::bytes(call, cut) + (own ? size_t(split_size()) * sizeof(T) : 0) + 64);
        BackwardLoop<T, In> loop(call, cut, work, worker, arena);
        T* own_sums = arena.take<T>(own ? size_t(split_size()) : 0);
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            // The last rows of a causal call see most: their splits go first.
            const int64_t head = piece / cut.splits, split = cut.splits - 1 - piece % cut.splits;
            const int64_t n = head / call.groups, g = head % call.groups;
            T* at = own ? own_sums : memory + (head * cut.splits + split) * split_size();
            const KeySums<T> sums = is_direct() ? gradients_of(head) : sums_in(at);
            const bool sound = loop.run(n, g, split, sums);
            if (cut.splits > 1) {
                sounds[head * cut.splits + split] = sound;
            } else if (!sound) {
                run_in_double(head, worker);
            } else if (own) {
                write_head(head, at, 0, call.keys);
            }
        }
    }

    // A head whose sums are not sound once more, in float64, key by key: finite numbers whose sums leave the range of
    // float on the way may be finite in the end.
    void run_in_double(int64_t head, int worker) {
        const int64_t n = head / call.groups, g = head % call.groups;
        const int64_t key_size = call.keys * call.d_k, value_size = call.keys * call.d_v;
        Arena arena(sizeof(double) * size_t(key_size + value_size) + 2 * 64);
        double *keys = arena.take<double>(size_t(key_size)), *values = arena.take<double>(size_t(value_size));
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        const KeySums<double> sums{keys, values, call.d_k, call.d_v};
        sums.clear(0, call.keys);
        for (int64_t row = 0; row < cut.rows && !work.is_over(worker); ++row)
            if (!differentiate_carefully<In>(call, n, g, row, 0, sums)) return work.fail(Status::out_of_memory);
        write_sums(keys, key_size, 1, call.d_k, call.d_k, 0, call.keys, to_key(head));
        write_sums(values, value_size, 1, call.d_v, call.d_v, 0, call.keys, to_value(head));
    }

    void write_head(int64_t head, const T* at, int64_t begin, int64_t end) {
        write_sums(at, split_size(), cut.splits, key_row(), call.d_k, begin, end, to_key(head));
        write_sums(at + call.keys * key_row(), split_size(), cut.splits, value_row(), call.d_v, begin, end,
                   to_value(head));
    }

    void reduce(int worker) {
        const int64_t parts = (call.keys + reduced_keys - 1) / reduced_keys;
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            const int64_t head = piece / parts, begin = piece % parts * reduced_keys;
            bool sound = true;
            for (int64_t split = 0; split < cut.splits; ++split) sound = sound && sounds[head * cut.splits + split];
            if (sound) {
                const T* at = memory + head * cut.splits * split_size();
                write_head(head, at, begin, smaller(begin + reduced_keys, call.keys));
            } else if (begin == 0) {
                run_in_double(head, worker);
            }
        }
    }
};

template <class T, class In>
Status run(const Backward& call) {
    const Cut shape = cut<T>(call);
    const int64_t heads = call.batch * call.groups, pieces = heads * shape.splits;
    const size_t kept =
        shape.splits == 1 ? 0 : size_t(pieces * call.keys * (padded<T>(call.d_k) + padded<T>(call.d_v)));
    Arena arena(kept * sizeof(T) + size_t(pieces) + 128);
    T* memory = arena.take<T>(kept);
    bool* sounds = arena.take<bool>(size_t(pieces));
    if (!arena.ok()) return Status::out_of_memory;
    Work work(call, pieces);
    BackwardPass<T, In> pass{call, shape, work, memory, sounds};
    const double size = double(heads) * double(shape.rows) * double(call.keys) * double(3 * call.d_k + 2 * call.d_v);
    const int threads = useful_threads(call.threads, pieces, size);
    if (!run_on_pool(threads, pass.body, &pass, call.team)) return Status::out_of_memory;
    if (shape.splits == 1 || work.status() != Status::ok) return work.status();
    Work sums(call, heads * ((call.keys + pass.reduced_keys - 1) / pass.reduced_keys));
    BackwardPass<T, In> reduction{call, shape, sums, pass.memory, pass.sounds};
    if (!run_on_pool(threads, reduction.reduce_body, &reduction, call.team)) return Status::out_of_memory;
    return sums.status();
}

}  // namespace

#ifndef SQRTDK_HAS_PAIRS
Status backward(const Backward& call) {
    switch (call.dtype) {
        case Dtype::float16: return run<float, Float16>(call);
        case Dtype::bfloat16: return run<float, Bfloat16>(call);
        case Dtype::float32: return run<float, float>(call);
        case Dtype::float64: return run<double, double>(call);
    }
    return Status::unknown_dtype;
}
#endif

}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
