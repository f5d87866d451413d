// One forward pass on one CPU level: cuts the call into pieces, gives each worker its scratch, repairs odd rows.
#pragma once

#include <cstdint>

#include "arena.h"
#include "careful.h"
#include "few_rows.h"
#include "kernel.h"
#include "level.h"
#include "pool.h"
#include "tile.h"
#include "weights.h"
#include "work.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

template <class T, class In, bool statistics>
struct TilePass {
    using Loop = Tile<T, In, statistics>;
    static constexpr int W = tile_rows<T>;

    const Forward& call;
    Work& work;
    int64_t tiles;

    static void body(void* context, int worker) { static_cast<TilePass*>(context)->serve(worker); }

    void serve(int worker) {
        const size_t d_k = size_t(call.d_k), d_v = size_t(call.d_v);
        Arena arena(sizeof(T) * (W * (d_k + d_v + key_block) + key_block * (d_k + d_v)) + sizeof(Loop) + 6 * 64);
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        Loop* loop = arena.take<Loop>(1);
        Scratch<T> scratch;
        scratch.queries = arena.take<T>(W * d_k);
        scratch.scores = arena.take<T>(W * key_block);
        scratch.output = arena.take<T>(W * d_v);
        scratch.keys = arena.take<T>(key_block * d_k);
        scratch.values = arena.take<T>(key_block * d_v);
        const int64_t rows = call.shared * call.queries;
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            const int64_t head = piece / tiles;
            // The last tiles of a causal call are the longest: they go first, so that no worker ends late.
            const int64_t first = (tiles - 1 - piece % tiles) * W;
            const int count = int(smaller(rows - first, W));
            const int64_t n = head / call.groups, g = head % call.groups;
            uint64_t odd = loop->run(call, scratch, n, g, first, count, false);
            if (odd != 0) odd = loop->run(call, scratch, n, g, first, count, true);
            if (call.weights != nullptr) write_weights(*loop, call, scratch, n, g, first, count);
            if (odd == 0) continue;
            for (int i = 0; i < count; ++i)
                if ((odd >> i & 1) && !attend_carefully<In>(call, n, g, first + i)) work.fail(Status::out_of_memory);
        }
    }
};

template <class T, class In, bool statistics>
struct FewPass {
    using Loop = FewRows<T, In, statistics>;

    const Forward& call;
    Work& work;
    int64_t splits, per_split;
    Loop* loops;  // [piece], and
    T* outputs;   // [piece][rows][V], only if heads are cut: else a worker's own serve one head after the other

    static void body(void* context, int worker) { static_cast<FewPass*>(context)->serve(worker); }

    void serve(int worker) {
        const size_t d_k = size_t(call.d_k), d_v = size_t(call.d_v), rows = size_t(call.shared * call.queries);
        Arena arena(sizeof(T) * (rows * (d_k + d_v) + 2 * few_block + few_block * (d_k + d_v)) + sizeof(Loop) + 8 * 64);
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        FewScratch<T> scratch;
        scratch.queries = arena.take<T>(rows * d_k);
        scratch.scores = arena.take<T>(2 * few_block);
        scratch.keys = arena.take<T>(few_block * d_k);
        scratch.values = arena.take<T>(few_block * d_v);
        Loop* own_loop = arena.take<Loop>(1);
        T* own_output = arena.take<T>(rows * d_v);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            const int64_t head = piece / splits, split = piece % splits;
            const int64_t begin = smaller(split * per_split, call.keys), end = smaller(begin + per_split, call.keys);
            Loop* loop = splits == 1 ? own_loop : loops + piece;
            T* output = splits == 1 ? own_output : outputs + piece * int64_t(rows) * call.d_v;
            loop->run(call, scratch, output, head / call.groups, head % call.groups, begin, end);
            if (splits == 1 && !finish(head, loop, output)) work.fail(Status::out_of_memory);
        }
    }

    // Adds up the splits of one head in order, and writes its rows.
    bool finish(int64_t head, Loop* of_head, T* output) {
        const int rows = int(call.shared * call.queries);
        const int64_t n = head / call.groups, g = head % call.groups, d_v = call.d_v;
        Loop& first = of_head[0];
        for (int64_t split = 1; split < splits; ++split) {
            Loop& other = of_head[split];
            double keep[few], take[few];
            merge_states<T, few>(first.state, other.state, keep, take);
            const T* more = output + split * rows * d_v;
            for (int row = 0; row < rows; ++row) {
                first.seen[row] = first.seen[row] || other.seen[row];
                for (int64_t d = 0; d < d_v; ++d)
                    output[row * d_v + d] = T(keep[row] * double(output[row * d_v + d]) + take[row] * double(more[row * d_v + d]));
            }
        }
        bool ok = true;
        const bool scores = call.softcap > 0 || call.mask.kind > MaskKind::boolean;
        for (int row = 0; row < rows; ++row) {
            const int64_t at = (n * call.groups + g) * rows + row;
            const double* sink = call.sinks == nullptr ? nullptr : call.sinks + g * call.shared + row / call.queries;
            const RowState<T, few>& state = first.state;
            const bool sees = first.seen[row];
            const double total = state.sum[row] + (sink != nullptr && sees ? std::exp(*sink - double(state.top[row])) : 0.0);
            const T inverse = sees ? T(1.0 / total) : T(0);
            In* to = static_cast<In*>(call.output) + at * d_v;
            double check = (state.sum[row] + double(state.top[row])) * 0.0;
            for (int64_t d = 0; d < d_v; ++d) {
                check += double(output[row * d_v + d]) * 0.0;
                to[d] = narrow(T(output[row * d_v + d] * inverse), In());
            }
            if (statistics) write_statistics<T, few>(call.statistics, at, state, row, scores, sink);
            save_row(call.saved, at, state.top[row], state.sum[row]);
            if (call.weights != nullptr) ok = write_few_weights<Loop, In>(call, n, g, row, state.top[row], inverse) && ok;
            const Scale& s = call.scale;
            const double scale = s.data[n * s.n + g * s.g + row / call.queries * s.r + row % call.queries * s.l];
            const bool sound = check == 0 && state.sum[row] > 0 && (!statistics || is_described(state, row));
            if (sees && !(sound && can_fold<T>(scale))) ok = attend_carefully<In>(call, n, g, row) && ok;
        }
        return ok;
    }
};

template <class T, class In, bool statistics>
Status run_tiles(const Forward& call) {
    const int64_t rows = call.shared * call.queries, heads = call.batch * call.groups;
    const int64_t tiles = (rows + tile_rows<T> - 1) / tile_rows<T>;
    Work work(call, heads * tiles);
    TilePass<T, In, statistics> pass{call, work, tiles};
    const double size = double(heads) * double(rows) * double(call.keys) * double(call.d_k + call.d_v);
    if (!run_on_pool(useful_threads(call.threads, heads * tiles, size), pass.body, &pass, call.team)) return Status::out_of_memory;
    return work.status();
}

template <class T, class In, bool statistics>
Status run_few(const Forward& call) {
    using Pass = FewPass<T, In, statistics>;
    const int64_t rows = call.shared * call.queries, heads = call.batch * call.groups;
    // From the shape alone: few heads over many keys are cut, so that more than one thread has something to do.
    int64_t splits = heads >= 8 ? 1 : smaller((call.keys + 1023) / 1024, 8);
    splits = larger(splits, 1);
    const int64_t per_split = ((call.keys + splits - 1) / splits + few_block - 1) / few_block * few_block;
    const int64_t pieces = heads * splits;
    const size_t kept = splits > 1 ? size_t(pieces) : 0;
    Arena arena(kept * (sizeof(typename Pass::Loop) + sizeof(T) * size_t(rows * call.d_v)) + 256);
    if (!arena.ok()) return Status::out_of_memory;
    Work work(call, pieces);
    auto* loops = arena.take<typename Pass::Loop>(kept);
    auto* outputs = arena.take<T>(kept * size_t(rows * call.d_v));
    Pass pass{call, work, splits, per_split, loops, outputs};
    const double size = double(heads) * double(rows) * double(call.keys) * double(call.d_k + call.d_v);
    // Bound by memory, a multiply-add takes about four times as long as in a tile.
    if (!run_on_pool(useful_threads(call.threads, pieces, 4 * size), pass.body, &pass, call.team)) return Status::out_of_memory;
    if (splits > 1 && work.status() == Status::ok)
        for (int64_t head = 0; head < heads; ++head)
            if (!pass.finish(head, loops + head * splits, outputs + head * splits * rows * call.d_v))
                return Status::out_of_memory;
    return work.status();
}

template <class T, class In>
Status run(const Forward& call) {
    const bool statistics = call.statistics.entropy != nullptr;
    if (call.shared * call.queries < few) return statistics ? run_few<T, In, true>(call) : run_few<T, In, false>(call);
    return statistics ? run_tiles<T, In, true>(call) : run_tiles<T, In, false>(call);
}

}  // namespace

Status forward(const Forward& call) {
    switch (call.dtype) {
        case Dtype::float16: return run<float, Float16>(call);
        case Dtype::bfloat16: return run<float, Bfloat16>(call);
        case Dtype::float32: return run<float, float>(call);
        case Dtype::float64: return run<double, double>(call);
    }
    return Status::invalid;
}

// Independent chains of multiply-adds that stay in registers: what the products could reach at best.
double fused_operations(int64_t rounds) {
    using S = Simd<float>;
    S::Vec sum[12];
    for (int i = 0; i < 12; ++i) sum[i] = S::all(float(i));
    const auto a = S::all(0.999f), b = S::all(1e-3f);
    for (int64_t r = 0; r < rounds; ++r)
        for (int i = 0; i < 12; ++i) sum[i] = S::fma(sum[i], a, b);
    float out[S::lanes];
    for (int i = 1; i < 12; ++i) sum[0] = S::add(sum[0], sum[i]);
    S::store(out, sum[0]);
    volatile float used = out[0];
    (void)used;
    return double(rounds) * 12 * S::lanes;
}

// Reads memory front to back and adds it up, as decoding does.
void read_memory(const float* p, int64_t count) {
    using S = Simd<float>;
    S::Vec sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    for (int64_t i = 0; i + 4 * S::lanes <= count; i += 4 * S::lanes)
        for (int j = 0; j < 4; ++j) sum[j] = S::add(sum[j], S::load(p + i + j * S::lanes));
    float out[S::lanes];
    S::store(out, S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])));
    volatile float used = out[0];
    (void)used;
}

}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
