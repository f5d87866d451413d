// One forward pass on one CPU level: cuts the call into pieces, gives each worker its scratch, repairs odd rows.
#pragma once

#include <cstdint>

#include "arena.h"
#include "careful.h"
#include "dropout.h"
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
        const size_t pairs = in_pairs<T, In> ? W * key_block / 2 : 0;
        Arena arena(sizeof(T) * (W * (d_k + d_v + key_block) + key_block * (d_k + 1 + d_v) + pairs) + sizeof(Loop) +
                    7 * 64);
        Loop* loop = arena.take<Loop>(1);
        Scratch<T> scratch;
        scratch.queries = arena.take<T>(W * d_k);
        scratch.scores = arena.take<T>(W * key_block);
        scratch.output = arena.take<T>(W * d_v);
        scratch.keys = arena.take<T>(key_block * (d_k + 1));
        scratch.values = arena.take<T>(key_block * d_v);
        scratch.weights = arena.take<T>(pairs);
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        const int64_t rows = call.shared * call.queries;
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            const int64_t head = piece / tiles;
            // The last tiles of a causal call are the longest: they go first, so that no worker ends late.
            const int64_t first = (tiles - 1 - piece % tiles) * W;
            const int count = int(smaller(rows - first, W));
            const int64_t n = head / call.groups, g = head % call.groups;
            auto odd = loop->run(call, scratch, n, g, first, count, false);
            if ((odd.output & ~odd.unfolded) != 0) odd = loop->run(call, scratch, n, g, first, count, true);
            if (call.weights != nullptr) write_weights(*loop, call, scratch, n, g, first, count);
            const uint64_t wrong = odd.output | odd.unfolded, any = wrong | odd.description;
            for (int i = 0; i < count; ++i)
                if ((any >> i & 1) && !attend_carefully<In>(call, n, g, first + i, !(wrong >> i & 1)))
                    work.fail(Status::out_of_memory);
        }
    }
};

// The keys of a head are cut by their number alone and the parts merged in order. A part is a piece of work of its own
// if there are few heads; else a worker goes through the parts of a head, with the same bits.
template <class T, class In, bool statistics>
struct FewPass {
    using Loop = FewRows<T, In, statistics>;

    const Forward& call;
    Work& work;
    int64_t splits, per_split;
    bool apart;   // whether a part is a piece, then there are
    Loop* loops;  // [piece] and
    T* outputs;   // [piece][rows][V]

    static void body(void* context, int worker) { static_cast<FewPass*>(context)->serve(worker); }

    void serve(int worker) {
        const size_t d_k = size_t(call.d_k), d_v = size_t(call.d_v), rows = size_t(call.shared * call.queries);
        Arena arena(sizeof(T) * (rows * (d_k + 2 * d_v + few_block) + few_block * (d_k + d_v)) + 2 * sizeof(Loop) +
                    9 * 64);
        FewScratch<T> scratch;
        scratch.queries = arena.take<T>(rows * d_k);
        scratch.scores = arena.take<T>(rows * few_block);
        scratch.keys = arena.take<T>(few_block * d_k);
        scratch.values = arena.take<T>(few_block * d_v);
        Loop* loop = arena.take<Loop>(1);
        Loop* next_loop = arena.take<Loop>(1);
        T* output = arena.take<T>(rows * d_v);
        T* next_output = arena.take<T>(rows * d_v);
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            if (apart) {
                run_split(scratch, piece / splits, piece % splits, loops + piece,
                          outputs + piece * int64_t(rows) * call.d_v);
                continue;
            }
            run_split(scratch, piece, 0, loop, output);
            for (int64_t split = 1; split < splits; ++split) {
                run_split(scratch, piece, split, next_loop, next_output);
                merge(*loop, *next_loop, output, next_output);
            }
            if (!finish(piece, *loop, output)) work.fail(Status::out_of_memory);
        }
    }

    void run_split(const FewScratch<T>& scratch, int64_t head, int64_t split, Loop* loop, T* output) {
        const int64_t begin = smaller(split * per_split, call.keys), end = smaller(begin + per_split, call.keys);
        loop->run(call, scratch, output, head / call.groups, head % call.groups, begin, end);
    }

    void merge(Loop& loop, const Loop& other, T* output, const T* more) {
        const int rows = int(call.shared * call.queries);
        double keep[few], take[few];
        merge_states<T, few>(loop.state, other.state, rows, keep, take);
        for (int row = 0; row < rows; ++row) {
            loop.seen[row] = loop.seen[row] || other.seen[row];
            loop.beyond[row] = loop.beyond[row] || other.beyond[row];
            for (int64_t d = row * call.d_v; d < (row + 1) * call.d_v; ++d)
                output[d] = T(keep[row] * double(output[d]) + take[row] * double(more[d]));
        }
    }

    // Writes the rows of a head whose keys have all been taken in.
    bool finish(int64_t head, const Loop& loop, const T* output) {
        const int rows = int(call.shared * call.queries);
        const int64_t n = head / call.groups, g = head % call.groups, d_v = call.d_v;
        bool ok = true;
        const bool scores = is_adjusted(call);
        if (statistics)
            write_statistics<T, few>(call.statistics, (n * call.groups + g) * rows, loop.state, rows, scores);
        for (int row = 0; row < rows; ++row) {
            const int64_t at = (n * call.groups + g) * rows + row;
            const double* sink = call.sinks == nullptr ? nullptr : call.sinks + g * call.shared + row / call.queries;
            const RowState<T, few>& state = loop.state;
            const bool sees = loop.seen[row];
            T inverse;
            const bool divides = invert_sum(state, row, sees, sink, &inverse);
            const T grown = inverse * T(Odds(call.dropout).factor);
            In* to = static_cast<In*>(call.output) + at * d_v;
            T* exact = exact_output<T, In>(call, at);
            double check = (state.sum[row] + double(state.top[row])) * 0.0;
            for (int64_t d = 0; d < d_v; ++d) {
                check += double(output[row * d_v + d]) * 0.0;
                to[d] = narrow(T(output[row * d_v + d] * grown), In());
                if (exact != nullptr) exact[d] = output[row * d_v + d] * grown;
            }
            if (statistics) write_sink_weight(call.statistics, at, sink);
            save_row(call.saved, at, state.top[row], state.sum[row]);
            if (call.weights != nullptr)
                ok = write_few_weights<Loop, In>(call, n, g, row, state.top[row], inverse) && ok;
            if (!sees) continue;
            const Scale& s = call.scale;
            const double scale = s.data[n * s.n + g * s.g + row / call.queries * s.r + row % call.queries * s.l];
            const bool sound = check == 0 && state.sum[row] > 0 && divides && can_fold<T>(scale) && !loop.beyond[row];
            if (!sound || (statistics && !is_described(state, row)))
                ok = attend_carefully<In>(call, n, g, row, sound) && ok;
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
    if (!run_on_pool(useful_threads(call.threads, heads * tiles, size), pass.body, &pass, call.team))
        return Status::out_of_memory;
    return work.status();
}

template <class T, class In, bool statistics>
Status run_few(const Forward& call) {
    using Pass = FewPass<T, In, statistics>;
    const int64_t rows = call.shared * call.queries, heads = call.batch * call.groups;
    // From the shape of one head alone: bits must not depend on how many heads come in one call.
    const int64_t splits = larger(smaller((call.keys + 1023) / 1024, 8), 1);
    const int64_t per_split = ((call.keys + splits - 1) / splits + few_block - 1) / few_block * few_block;
    // Few heads over many keys: more than one thread should have something to do.
    const bool apart = heads < 8 && splits > 1;
    const int64_t pieces = apart ? heads * splits : heads;
    const size_t kept = apart ? size_t(pieces) : 0;
    const int64_t width = rows * call.d_v;
    Arena arena(kept * (sizeof(typename Pass::Loop) + sizeof(T) * size_t(width)) + 256);
    auto* loops = arena.take<typename Pass::Loop>(kept);
    auto* outputs = arena.take<T>(kept * size_t(width));
    if (!arena.ok()) return Status::out_of_memory;
    Work work(call, pieces);
    Pass pass{call, work, splits, per_split, apart, loops, outputs};
    const double size = double(heads) * double(rows) * double(call.keys) * double(call.d_k + call.d_v);
    // Bound by memory, a multiply-add takes about four times as long as in a tile.
    if (!run_on_pool(useful_threads(call.threads, pieces, 4 * size), pass.body, &pass, call.team))
        return Status::out_of_memory;
    if (!apart || work.status() != Status::ok) return work.status();
    for (int64_t head = 0; head < heads; ++head) {
        const int64_t first = head * splits;
        for (int64_t piece = first + 1; piece < first + splits; ++piece)
            pass.merge(loops[first], loops[piece], outputs + first * width, outputs + piece * width);
        if (!pass.finish(head, loops[first], outputs + first * width)) return Status::out_of_memory;
    }
    return Status::ok;
}

template <class T, class In>
Status run(const Forward& call) {
    const bool statistics = call.statistics.entropy != nullptr;
    if (call.shared * call.queries < few) return statistics ? run_few<T, In, true>(call) : run_few<T, In, false>(call);
    return statistics ? run_tiles<T, In, true>(call) : run_tiles<T, In, false>(call);
}

}  // namespace

#ifndef SQRTDK_HAS_PAIRS
Status forward(const Forward& call) {
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
