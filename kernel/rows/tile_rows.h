// Rows of a tile, for both passes: their places, the keys they see, their dropout, their scales.
#pragma once

#include <cstdint>

#include "rows/dropout.h"
#include "rows/logits.h"
#include "rows/place.h"
#include "rows/visibility.h"
#include "simd/product.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

template <class T>
struct TileRows {
    using S = Simd<T>;
    static constexpr int W = tile_rows<T>;

    int64_t head, first;  // rows [first, first + count) of a head
    int count;
    Visibility<T, W> sight;
    TileDraws<T, W> draws;   // where there is dropout
    alignas(64) T scale[W];  // 0 for an absent row; set when the queries are loaded

    RowPlace place(const Problem& call) const { return RowPlace(call, head, first); }
    int64_t number(const Problem& call) const { return head * rows_per_head(call) + first; }

    // Where each row stands: its range of keys and its row of the mask. Rows that are not there repeat the last one.
    void stand(const Problem& call, int64_t of_head, int64_t first_row, int rows) {
        head = of_head;
        first = first_row;
        count = rows;
        sight.by_position.is_there = has_position_bias(call);
        sight.one_mask = true;
        RowPlace at = place(call);
        for (int i = 0; i < W; ++i, at.step(call, i < rows)) {
            const KeyRange range = key_range(call, at.l);
            const RowBias bias(call, at);
            sight.lo[i] = range.lo;
            sight.hi[i] = range.hi;
            sight.mask_row[i] = bias.at;
            sight.by_position.stand(i, bias);
            sight.one_mask = sight.one_mask && sight.mask_row[i] == sight.mask_row[0];
        }
        sight.settle();
        if (call.dropout.probability > 0) draws.place(call.dropout, number(call));
    }

    // The part of a block that each vector of rows can see by its ranges, to multiples of four keys.
    struct Span {
        int64_t from[panel], to[panel];
    };

    // Every vector that has rows takes the whole block.
    Span whole(int64_t keys) const {
        Span span;
        for (int c = 0; c < panel; ++c) {
            span.from[c] = c * S::lanes < count ? 0 : keys;
            span.to[c] = keys;
        }
        return span;
    }

    Span spans(int64_t begin, int64_t keys) const {
        Span span;
        bool rising = !sight.is_whole(begin, begin + keys);
        for (int c = 0; c < panel && rising; ++c) {
            int64_t lo = INT64_MAX, hi = -1;
            for (int i = c * S::lanes; i < (c + 1) * S::lanes; ++i) {
                if (sight.lo[i] > sight.hi[i]) continue;
                lo = smaller(lo, sight.lo[i]);
                hi = larger(hi, sight.hi[i]);
            }
            const int64_t from = lo == INT64_MAX ? 0 : smaller(larger(lo - begin, 0), keys);
            const int64_t to = lo == INT64_MAX ? 0 : smaller(larger(hi - begin + 1, 0), keys);
            span.from[c] = from & ~int64_t(3);
            span.to[c] = smaller((to + 3) & ~int64_t(3), keys);
            if (from >= to) span.to[c] = span.from[c];
            // Vectors beyond the last row of a short tile have nothing to do.
            if (c * S::lanes >= count) span.from[c] = span.to[c] = span.to[c - 1];
            if (c > 0) rising = rising && span.from[c] >= span.from[c - 1] && span.to[c] >= span.to[c - 1];
        }
        // All rows see all keys, or rows of several heads are in one tile and there is no order to use.
        return rising ? span : whole(keys);
    }

    // Calls body(first key, keys, first vector, vectors) for runs of keys that the same vectors see.
    template <class Body>
    static void each_run(const Span& span, int64_t keys, Body body) {
        for (int64_t j = 0; j < keys;) {
            int64_t next = keys;
            int first = panel, last = -1;
            for (int c = 0; c < panel; ++c) {
                if (span.from[c] <= j && j < span.to[c]) {
                    first = c < first ? c : first;
                    last = c;
                    next = smaller(next, span.to[c]);
                } else if (span.from[c] > j && span.from[c] < span.to[c]) {
                    next = smaller(next, span.from[c]);
                }
            }
            if (last >= 0) body(j, next - j, first, last - first + 1);
            j = next;
        }
    }

    // Dropout of numbers [key][W] of a block that begins at a key; `grown`: what is kept grows by the factor.
    template <bool grown>
    void drop(T* numbers, int64_t begin, const Span& span) const {
        for (int c = 0; c < panel; ++c) {
            const int64_t from = span.from[c], at = c * S::lanes;
            draws.template drop<grown>(numbers + from * W + at, begin + from, span.to[c] - from, int(at));
        }
    }
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
