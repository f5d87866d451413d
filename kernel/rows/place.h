// Place of a row in a call, and addresses of its numbers: the one place that multiplies by strides.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Key/value heads count n * G + g. The rows of one are the queries of all heads that share it, counted r * L + l.
inline int64_t rows_per_head(const Problem& call) { return call.shared * call.queries; }

struct RowPlace {
    int64_t n, g, r, l;

    RowPlace(const Problem& call, int64_t head, int64_t row)
        : n(head / call.groups), g(head % call.groups), r(row / call.queries), l(row % call.queries) {}

    // Of the head, and of the row among all rows of the call, as outputs and statistics lie.
    int64_t head(const Problem& call) const { return n * call.groups + g; }
    int64_t number(const Problem& call) const { return (head(call) * call.shared + r) * call.queries + l; }

    // To the next row, without a division; at the last row that is there it stays.
    void step(const Problem& call, bool there) {
        if (!there || ++l < call.queries) return;
        l = 0;
        ++r;
    }
};

// How far a row's numbers lie from an array's first: of queries, numbers per row and masks.
template <class Array>
int64_t offset(const Array& array, const RowPlace& at) {
    return at.n * array.n + at.g * array.g + at.r * array.r + at.l * array.l;
}

template <class In>
const In* row_of(const Query& array, const RowPlace& at) {
    return static_cast<const In*>(array.data) + offset(array, at);
}

// A key or value of a head.
template <class In>
const In* key_of(const Problem& call, const KeyValue& array, int64_t head, int64_t key) {
    const int64_t n = head / call.groups, g = head % call.groups;
    return static_cast<const In*>(array.data) + n * array.n + g * array.g + key * array.s;
}

inline double number_of(const Scale& array, const RowPlace& at) { return array.data[offset(array, at)]; }

// Null where there is none.
inline const double* sink_of(const Problem& call, const RowPlace& at) {
    return call.sinks == nullptr ? nullptr : call.sinks + at.g * call.shared + at.r;
}

// Whether q times the scale surely stays a normal number of type T if q is of ordinary size. Other rows are done in
// float64.
template <class T>
inline bool can_fold(double scale) {
    const double size = scale < 0 ? -scale : scale;
    return sizeof(T) == sizeof(double) || size == 0 || (size > 0x1p-40 && size < 0x1p40);
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
