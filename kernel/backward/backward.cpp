// One backward pass, compiled for each CPU level: cuts the call into heads and splits of their queries, and adds the
// splits up in order. Apart from the forward pass, whose inlining it must not change.
#include <cstdint>

#include "backward/fallback.h"
#include "backward/sums.h"
#include "backward/tile.h"
#include "dispatch.h"
#include "pool/work.h"
#include "rows/arena.h"
#include "rows/place.h"
#include "simd/numbers.h"
#include "simd/vectors.h"

namespace sqrtdk::SQRTDK_LEVEL {
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
    cut.rows = rows_per_head(call);
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

    BackwardLoop(const Backward& call, const Cut& cut, Work& work, int worker)
        : call_(call),
          cut_(cut),
          work_(work),
          worker_(worker),
          tile_memory_([this](Arena& memory) { memory.take(tiles_, cut_.group_rows / W); }),
          memory_([this](Arena& memory) { lay_out(memory); }) {}

    bool ok() const { return tile_memory_.ok() && memory_.ok(); }

    // The rows of one split of a head. Returns whether the sums, which begin at zero here, are sound: finite, if more
    // room would help, and made of weights that add up.
    bool run(int64_t head, int64_t split, const KeySums<T>& sums) {
        bool fresh = true;
        adds_up_ = true;
        for (int64_t round = 0; round < cut_.rounds() && !work_.is_over(worker_); ++round) {
            const int64_t group = cut_.group(split, round);
            if (group >= cut_.groups) continue;
            take_group(head, group * cut_.group_rows, sums, fresh);
            fresh = false;
        }
        if (fresh) sums.clear(0, call_.keys);
        if (!adds_up_ || sizeof(T) == sizeof(double)) return adds_up_;
        return is_finite(BlockView<T>{sums.key, 0, 1}, 1, call_.keys * sums.key_row) &&
               is_finite(BlockView<T>{sums.value, 0, 1}, 1, call_.keys * sums.value_row);
    }

  private:
    void lay_out(Arena& memory) {
        for (int64_t t = 0; tile_memory_.ok() && t < cut_.group_rows / W; ++t) tiles_[t].lay_out(memory, call_);
        gradients_.lay_out(memory, Tile::paired);
        if constexpr (Tile::paired) pairs_.lay_out(memory, call_);
        memory.take(keys_, backward_block, call_.d_k);
        memory.take(values_, backward_block, call_.d_v);
    }

    // With `fresh` the sums hold nothing yet.
    void take_group(int64_t head, int64_t first_row, const KeySums<T>& sums, bool fresh) {
        const int64_t end_row = smaller(first_row + cut_.group_rows, cut_.rows);
        int64_t begin = INT64_MAX, end = 0;
        int tiles = 0;
        for (int64_t row = first_row; row < end_row; row += W, ++tiles) {
            Tile& tile = tiles_[tiles];
            tile.load(call_, head, row, int(smaller(W, end_row - row)));
            begin = smaller(begin, tile.rows.sight.first_key());
            end = larger(end, tile.rows.sight.end_key());
        }
        begin = smaller(begin, call_.keys);
        end = larger(begin, end);
        if (fresh) {
            sums.clear(0, begin);
            sums.clear(end, call_.keys);
        }
        for (; begin < end; begin += backward_block) {
            if (work_.is_over(worker_)) return;
            KeyBlock<T> block = take_keys(head, begin, smaller(backward_block, end - begin));
            block.fresh = fresh;
            for (int t = 0; t < tiles; ++t) tiles_[t].take_block(call_, block, gradients_, sums);
            if (block.fresh) sums.clear(block.begin, block.begin + block.count);
        }
        for (int t = 0; t < tiles; ++t) {
            Tile& tile = tiles_[t];
            tile.finish(call_);
            adds_up_ = adds_up_ && tile.adds_up(call_);
            for (; tile.fallback != 0 && !work_.is_over(worker_); tile.fallback &= tile.fallback - 1) {
                const int i = __builtin_ctzll(tile.fallback);
                const RowPlace place(call_, head, tile.rows.first + i);
                if (!differentiate_in_float64<In>(call_, place, tile.fallback_from[i], sums))
                    work_.fail(Status::out_of_memory);
            }
        }
    }

    KeyBlock<T> take_keys(int64_t head, int64_t begin, int64_t count) {
        const KeyValue &k = call_.k, &v = call_.v;
        const In *k_at = key_of<In>(call_, k, head, begin), *v_at = key_of<In>(call_, v, head, begin);
        const int64_t d_k = call_.d_k, d_v = call_.d_v;
        KeyBlock<T> block{};
        block.begin = begin;
        block.count = count;
        block.pairs = &pairs_;
        if constexpr (Tile::paired) {
            BlockView<In> keys{k_at, k.s, k.d}, values{v_at, v.s, v.d};
            block.nonfinite = clear_nonfinite(keys, values, count, pairs_.key_copy, pairs_.value_copy);
            pairs_.load(keys, values, count, d_k, d_v);
        } else {
            block.keys = view_block<T, In>(k_at, k.s, k.d, count, d_k, keys_);
            block.values = view_block<T, In>(v_at, v.s, v.d, count, d_v, values_);
            block.nonfinite = clear_nonfinite(block.keys, block.values, count, keys_, values_);
        }
        return block;
    }

    // Keys that are not finite, or whose values are not, become zeros. Returns them, one bit each.
    template <class E>
    uint64_t clear_nonfinite(BlockView<E>& keys, BlockView<E>& values, int64_t count, E* key_copy, E* value_copy) {
        const int64_t d_k = call_.d_k, d_v = call_.d_v;
        const uint64_t nonfinite = find_infinite(keys, count, d_k) | find_infinite(values, count, d_v);
        if (nonfinite == 0) return nonfinite;
        keys = copy_finite(keys, count, d_k, nonfinite, key_copy);
        values = copy_finite(values, count, d_v, nonfinite, value_copy);
        return nonfinite;
    }

    const Backward& call_;
    const Cut& cut_;
    Work& work_;
    int worker_;
    Tile* tiles_;
    GradientBlock<T> gradients_;
    PairedKeys<T> pairs_;
    T *keys_, *values_;  // [backward_block][D or V], only for copies
    bool adds_up_ = true;
    const Arena tile_memory_, memory_;
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
    int64_t piece_of(int64_t head, int64_t split) const { return head * cut.splits + split; }
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

    void serve(int worker) {
        const bool own = cut.splits == 1 && !is_direct();
        BackwardLoop<T, In> loop(call, cut, work, worker);
        T* own_sums;
        const Arena arena([&](Arena& memory_of_sums) { memory_of_sums.take(own_sums, own ? split_size() : 0); });
        if (!loop.ok() || !arena.ok()) return work.fail(Status::out_of_memory);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            // The last rows of a causal call see most: their splits go first.
            const int64_t head = piece / cut.splits, split = cut.splits - 1 - piece % cut.splits;
            const KeySums<T> sums = is_direct() ? gradients_of(head)
                                    : own       ? sums_in(own_sums)
                                                : sums_in(memory + piece_of(head, split) * split_size());
            const bool sound = loop.run(head, split, sums);
            if (cut.splits > 1) {
                sounds[piece_of(head, split)] = sound;
            } else if (!sound) {
                run_in_double(head, worker);
            } else if (own) {
                write_head(head, own_sums, 0, call.keys);
            }
        }
    }

    // A head whose sums are not sound once more, in float64, key by key: finite numbers whose sums leave the range of
    // float on the way may be finite in the end.
    void run_in_double(int64_t head, int worker) {
        const int64_t key_size = call.keys * call.d_k, value_size = call.keys * call.d_v;
        double *keys, *values;
        const Arena arena([&](Arena& memory_of_sums) {
            memory_of_sums.take(keys, key_size);
            memory_of_sums.take(values, value_size);
        });
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        const KeySums<double> sums{keys, values, call.d_k, call.d_v};
        sums.clear(0, call.keys);
        for (int64_t row = 0; row < cut.rows && !work.is_over(worker); ++row)
            if (!differentiate_in_float64<In>(call, RowPlace(call, head, row), 0, sums))
                return work.fail(Status::out_of_memory);
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
            for (int64_t split = 0; split < cut.splits; ++split) sound = sound && sounds[piece_of(head, split)];
            if (sound) {
                const T* at = memory + piece_of(head, 0) * split_size();
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
    Work work(call, pieces);
    BackwardPass<T, In> pass{call, shape, work, nullptr, nullptr};
    const Arena arena([&](Arena& memory) {
        memory.take(pass.memory, shape.splits == 1 ? 0 : pieces, pass.split_size());
        memory.take(pass.sounds, pieces);
    });
    if (!arena.ok()) return Status::out_of_memory;
    const double size = double(heads) * double(shape.rows) * double(call.keys) * double(3 * call.d_k + 2 * call.d_v);
    const int threads = useful_threads(call.threads, pieces, size);
    const Status status = run_workers(call, work, threads, [&](int worker) { pass.serve(worker); });
    if (shape.splits == 1 || status != Status::ok) return status;
    Work sums(call, heads * ((call.keys + pass.reduced_keys - 1) / pass.reduced_keys));
    BackwardPass<T, In> reduction{call, shape, sums, pass.memory, pass.sounds};
    return run_workers(call, sums, threads, [&](int worker) { reduction.reduce(worker); });
}

}  // namespace

Status backward(const Backward& call) {
#ifdef SQRTDK_HAS_PAIRS
    // Products of pairs are for tiles of bfloat16; the level below does everything else.
    if (call.dtype != Dtype::bfloat16 || rows_per_head(call) < few) return SQRTDK_LEVEL_BELOW::backward(call);
    return run<float, Bfloat16>(call);
#else
    return with_dtype(call.dtype, [&](auto working, auto in) { return run<decltype(working), decltype(in)>(call); });
#endif
}

}  // namespace sqrtdk::SQRTDK_LEVEL
