// One forward pass, compiled for each CPU level: cuts the call into pieces, gives each worker its scratch, repairs
// non-finite rows.
#include <cstdint>

#include "dispatch.h"
#include "forward/fallback.h"
#include "forward/few_rows.h"
#include "forward/tile.h"
#include "forward/weights.h"
#include "pool/work.h"
#include "rows/arena.h"
#include "rows/dropout.h"
#include "rows/place.h"
#include "simd/numbers.h"
#ifndef SQRTDK_HAS_PAIRS
#include "simd/probes.h"
#endif

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T, class In, bool statistics>
struct TilePass {
    using Loop = Tile<T, In, statistics>;
    static constexpr int W = tile_rows<T>;

    const Forward& call;
    Work& work;
    int64_t tiles;

    void serve(int worker) {
        Loop* loop;
        Scratch<T> scratch;
        const Arena arena([&](Arena& memory) {
            memory.take(loop, 1);
            scratch.lay_out(memory, call, in_pairs<T, In>);
        });
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        const int64_t rows = rows_per_head(call);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            const int64_t head = piece / tiles;
            // The last tiles of a causal call are the longest: they go first, so that no worker ends late.
            const int64_t first = (tiles - 1 - piece % tiles) * W;
            const int count = int(smaller(rows - first, W));
            auto nonfinite = loop->run(call, scratch, head, first, count, false);
            if ((nonfinite.output & ~nonfinite.unfolded) != 0)
                nonfinite = loop->run(call, scratch, head, first, count, true);
            if (call.weights != nullptr) write_weights(*loop, call, scratch);
            const uint64_t wrong = nonfinite.output | nonfinite.unfolded, any = wrong | nonfinite.description;
            for (int i = 0; i < count; ++i)
                if ((any >> i & 1) && !attend_in_float64<In>(call, RowPlace(call, head, first + i), !(wrong >> i & 1)))
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

    void serve(int worker) {
        const int64_t rows = rows_per_head(call);
        FewScratch<T> scratch;
        Loop *loop, *next_loop;
        T *output, *next_output;
        const Arena arena([&](Arena& memory) {
            scratch.lay_out(memory, call);
            memory.take(loop, 1);
            memory.take(next_loop, 1);
            memory.take(output, rows, call.d_v);
            memory.take(next_output, rows, call.d_v);
        });
        if (!arena.ok()) return work.fail(Status::out_of_memory);
        for (int64_t piece; (piece = work.take(worker)) >= 0;) {
            if (apart) {
                run_split(scratch, piece / splits, piece % splits, loops + piece, outputs + piece * rows * call.d_v);
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
        loop->run(call, scratch, output, head, begin, end);
    }

    void merge(Loop& loop, const Loop& other, T* output, const T* more) {
        const int rows = int(rows_per_head(call));
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
        const int rows = int(rows_per_head(call));
        const int64_t d_v = call.d_v;
        const RowState<T, few>& state = loop.state;
        bool ok = true;
        if (statistics) write_statistics<T, few>(call.statistics, head * rows, state, rows, is_adjusted(call));
        for (int row = 0; row < rows; ++row) {
            const RowPlace place(call, head, row);
            const int64_t at = place.number(call);
            const double* sink = sink_of(call, place);
            const bool sees = loop.seen[row];
            T inverse;
            const bool divides = invert_sum(state, row, sees, sink, &inverse);
            const T grown = inverse * T(Odds(call.dropout).factor);
            In* to = static_cast<In*>(call.output) + at * d_v;
            float* exact = exact_output<In>(call, at);
            double check = (state.sum[row] + double(state.top[row])) * 0.0;
            for (int64_t d = 0; d < d_v; ++d) {
                check += double(output[row * d_v + d]) * 0.0;
                to[d] = narrow(T(output[row * d_v + d] * grown), In());
                if (exact != nullptr) exact[d] = float(output[row * d_v + d] * grown);
            }
            if (statistics) write_sink_weight(call.statistics, at, sink);
            save_row(call.saved, at, state.top[row], state.sum[row]);
            if (call.weights != nullptr) ok = write_few_weights<Loop, In>(call, place, state.top[row], inverse) && ok;
            if (!sees) continue;
            const bool sound = check == 0 && state.sum[row] > 0 && divides && !loop.beyond[row] &&
                               can_fold<T>(number_of(call.scale, place));
            if (!sound || (statistics && !is_described(state, row)))
                ok = attend_in_float64<In>(call, place, sound) && ok;
        }
        return ok;
    }
};

// Multiply-adds of the two products.
inline double size_of(const Forward& call) {
    return double(call.batch * call.groups) * double(rows_per_head(call)) * double(call.keys) *
           double(call.d_k + call.d_v);
}

template <class T, class In, bool statistics>
Status run_tiles(const Forward& call) {
    const int64_t tiles = (rows_per_head(call) + tile_rows<T> - 1) / tile_rows<T>;
    const int64_t pieces = call.batch * call.groups * tiles;
    Work work(call, pieces);
    TilePass<T, In, statistics> pass{call, work, tiles};
    const int threads = useful_threads(call.threads, pieces, size_of(call));
    return run_workers(call, work, threads, [&](int worker) { pass.serve(worker); });
}

template <class T, class In, bool statistics>
Status run_few(const Forward& call) {
    using Pass = FewPass<T, In, statistics>;
    const int64_t heads = call.batch * call.groups, width = rows_per_head(call) * call.d_v;
    // From the shape of one head alone: bits must not depend on how many heads come in one call.
    const int64_t splits = larger(smaller((call.keys + 1023) / 1024, 8), 1);
    const int64_t per_split = ((call.keys + splits - 1) / splits + few_block - 1) / few_block * few_block;
    // Few heads over many keys: more than one thread should have something to do.
    const bool apart = heads < 8 && splits > 1;
    const int64_t pieces = apart ? heads * splits : heads;
    typename Pass::Loop* loops;
    T* outputs;
    const Arena arena([&](Arena& memory) {
        memory.take(loops, apart ? pieces : 0);
        memory.take(outputs, apart ? pieces : 0, width);
    });
    if (!arena.ok()) return Status::out_of_memory;
    Work work(call, pieces);
    Pass pass{call, work, splits, per_split, apart, loops, outputs};
    // Bound by memory, a multiply-add takes about four times as long as in a tile.
    const int threads = useful_threads(call.threads, pieces, 4 * size_of(call));
    const Status status = run_workers(call, work, threads, [&](int worker) { pass.serve(worker); });
    if (!apart || status != Status::ok) return status;
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
    if constexpr (!in_pairs<T, In>)
        if (rows_per_head(call) < few) return statistics ? run_few<T, In, true>(call) : run_few<T, In, false>(call);
    return statistics ? run_tiles<T, In, true>(call) : run_tiles<T, In, false>(call);
}

}  // namespace

Status forward(const Forward& call) {
#ifdef SQRTDK_HAS_PAIRS
    // Products of pairs are for tiles of bfloat16; the level below does everything else.
    if (call.dtype != Dtype::bfloat16 || rows_per_head(call) < few) return SQRTDK_LEVEL_BELOW::forward(call);
    return run<float, Bfloat16>(call);
#else
    return with_dtype(call.dtype, [&](auto working, auto in) { return run<decltype(working), decltype(in)>(call); });
#endif
}

}  // namespace sqrtdk::SQRTDK_LEVEL
