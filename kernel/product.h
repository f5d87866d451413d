// The two matrix products of attention as one microkernel: rows of broadcast numbers times panels of query lanes.
//
//   C[row][lane] (+)= sum_k A[row][k] * B[k][lane]      A is read element by element from where it lies, any strides
//   scores: row = key, k = feature;  A = keys,             B = queries, transposed
//   output: row = feature, k = key;  A = values, turned,   B = weights
#pragma once

#include <cstddef>

#include "level.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {  // internal linkage: the linker must not merge one level's code with another's

// Vectors a tile of queries is wide.
constexpr int panel = 4;

template <class T>
constexpr int tile_rows = panel * Simd<T>::lanes;

// Rows that fit into registers beside one panel of B and a broadcast.
template <class T>
constexpr int row_block = Simd<T>::registers >= 32 ? 4 : 3;

// Noinline: inlined into the tile loop the register allocator spills and a fifth of the speed is gone.
template <class T, int rows, int vectors, bool add>
__attribute__((noinline)) void multiply_block(T* c, const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
                                              int64_t steps) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    constexpr int width = tile_rows<T>;
    Vec sum[rows][vectors];
    // Every loop over registers is unrolled by hand of the compiler's front end: left to the optimizer the sums take a
    // detour over the stack, 3% of the time of a block.
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; ++j) sum[i][j] = S::zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; ++k) {
        if (S::registers >= 32) {
            Vec lane[vectors];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) lane[j] = S::load(b + j * S::lanes);
#pragma GCC unroll 4
            for (int i = 0; i < rows; ++i) {
                const Vec x = S::all(a[i * a_row]);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; ++j) sum[i][j] = S::fma(x, lane[j], sum[i][j]);
            }
        } else {
            // 12 sums, 3 broadcasts and one vector of lanes are all 16 registers.
            Vec x[rows];
#pragma GCC unroll 4
            for (int i = 0; i < rows; ++i) x[i] = S::all(a[i * a_row]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) {
                const Vec lane = S::load(b + j * S::lanes);
#pragma GCC unroll 4
                for (int i = 0; i < rows; ++i) sum[i][j] = S::fma(x[i], lane, sum[i][j]);
            }
        }
        a += a_step;
        b += width;
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; ++j) {
            // What was there is added last: rounding grows with the block's length, not with all keys so far.
            T* to = c + i * width + j * S::lanes;
            S::store(to, add ? S::add(S::load(to), sum[i][j]) : sum[i][j]);
        }
}

template <class T, int vectors, bool add>
void multiply_rows(T* c, int64_t rows, const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b, int64_t steps) {
    constexpr int block = row_block<T>;
    constexpr int width = tile_rows<T>;
    int64_t i = 0;
    for (; i + block <= rows; i += block)
        multiply_block<T, block, vectors, add>(c + i * width, a + i * a_row, a_row, a_step, b, steps);
    switch (rows - i) {
        case 3: multiply_block<T, 3, vectors, add>(c + i * width, a + i * a_row, a_row, a_step, b, steps); break;
        case 2: multiply_block<T, 2, vectors, add>(c + i * width, a + i * a_row, a_row, a_step, b, steps); break;
        case 1: multiply_block<T, 1, vectors, add>(c + i * width, a + i * a_row, a_row, a_step, b, steps); break;
        default: break;
    }
}

// `vectors` from 1 to 4: on a causal diagonal only the vectors that see something take part.
template <class T, bool add>
void multiply(T* c, int64_t rows, const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b, int64_t steps, int vectors) {
    switch (vectors) {
        case 4: multiply_rows<T, 4, add>(c, rows, a, a_row, a_step, b, steps); break;
        case 3: multiply_rows<T, 3, add>(c, rows, a, a_row, a_step, b, steps); break;
        case 2: multiply_rows<T, 2, add>(c, rows, a, a_row, a_step, b, steps); break;
        case 1: multiply_rows<T, 1, add>(c, rows, a, a_row, a_step, b, steps); break;
        default: break;
    }
}

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
