// The matrix products of attention, two forward and five back, as one microkernel: rows of broadcast numbers times
// panels of lanes.
//
//   C[row][lane] (+)= sum_k A[row][k] * B[k][lane]      A is read element by element from where it lies, any strides
//   scores: row = key, k = feature;  A = keys,             B = queries, transposed
//   output: row = feature, k = key;  A = values, turned,   B = weights
//   gradient of values: row = key, k = query;  A = weights,  B = gradients of the output, lanes are features
//
// With pairs (pairs.h) each k is two neighbours of 16 bits, in A as in B, and C is float.
#pragma once

#include <cstddef>

#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {  // internal linkage: the linker must not merge one level's code with another's

// Vectors a tile of queries is wide.
constexpr int panel = 4;

// Rows of a key/value head from which on they are taken in tiles; fewer go through few_rows.h, keys in lanes.
constexpr int few = 8;

template <class T>
constexpr int tile_rows = panel * Simd<T>::lanes;

// Rows that fit into registers beside one panel of B and a broadcast.
template <class T>
constexpr int row_block = Simd<T>::registers >= 32 ? 4 : 3;

// Operands in the working precision.
template <class T>
struct Single {
    using Element = T;  // of A
    using Lanes = typename Simd<T>::Vec;
    SQRTDK_INLINE Lanes load(const T* b) { return Simd<T>::load(b); }
    SQRTDK_INLINE Lanes all(const T* a) { return Simd<T>::all(*a); }
    SQRTDK_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return Simd<T>::fma(a, b, c); }
};

// What becomes of a product: it is written, added to what is there, or written with a factor for each lane.
enum class Into { place, sum, scaled };

// Noinline: inlined into the tile loop the register allocator spills and a fifth of the speed is gone.
template <class T, class Operand, int rows, int vectors, Into into>
__attribute__((noinline)) void multiply_block(T* c, ptrdiff_t c_row, const typename Operand::Element* a,
                                              ptrdiff_t a_row, ptrdiff_t a_step, const T* b, ptrdiff_t b_row,
                                              int64_t steps, const T* factors) {
    using S = Simd<T>;
    using Vec = typename S::Vec;
    using Lanes = typename Operand::Lanes;
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
            Lanes lane[vectors];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) lane[j] = Operand::load(b + j * S::lanes);
#pragma GCC unroll 4
            for (int i = 0; i < rows; ++i) {
                const Lanes x = Operand::all(a + i * a_row);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; ++j) sum[i][j] = Operand::fma(x, lane[j], sum[i][j]);
            }
        } else {
            // 12 sums, 3 broadcasts and one vector of lanes are all 16 registers.
            Lanes x[rows];
#pragma GCC unroll 4
            for (int i = 0; i < rows; ++i) x[i] = Operand::all(a + i * a_row);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; ++j) {
                const Lanes lane = Operand::load(b + j * S::lanes);
#pragma GCC unroll 4
                for (int i = 0; i < rows; ++i) sum[i][j] = Operand::fma(x[i], lane, sum[i][j]);
            }
        }
        // After the last step both point past the numbers that were read. Nothing is read there.
        a += a_step;
        b += b_row;
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; ++j) {
            // What was there is added last: rounding grows with the block's length, not with all keys so far.
            T* to = c + i * c_row + j * S::lanes;
            S::store(to, into == Into::sum      ? S::add(S::load(to), sum[i][j])
                         : into == Into::scaled ? S::mul(S::load(factors + j * S::lanes), sum[i][j])
                                                : sum[i][j]);
        }
}

template <class T, class Operand, int vectors, Into into>
void multiply_rows(T* c, ptrdiff_t c_row, int64_t rows, const typename Operand::Element* a, ptrdiff_t a_row,
                   ptrdiff_t a_step, const T* b, ptrdiff_t b_row, int64_t steps, const T* factors) {
    constexpr int block = row_block<T>;
    int64_t i = 0;
    for (; i + block <= rows; i += block)
        multiply_block<T, Operand, block, vectors, into>(c + i * c_row, c_row, a + i * a_row, a_row, a_step, b, b_row,
                                                         steps, factors);
    c += i * c_row;
    a += i * a_row;
    switch (rows - i) {
        case 3:
            multiply_block<T, Operand, 3, vectors, into>(c, c_row, a, a_row, a_step, b, b_row, steps, factors);
            break;
        case 2:
            multiply_block<T, Operand, 2, vectors, into>(c, c_row, a, a_row, a_step, b, b_row, steps, factors);
            break;
        case 1:
            multiply_block<T, Operand, 1, vectors, into>(c, c_row, a, a_row, a_step, b, b_row, steps, factors);
            break;
        default: break;
    }
}

// C and B any number of vectors wide, their rows any distance apart.
template <class T, Into into, class Operand = Single<T>>
void multiply_wide(T* c, ptrdiff_t c_row, int64_t rows, const typename Operand::Element* a, ptrdiff_t a_row,
                   ptrdiff_t a_step, const T* b, ptrdiff_t b_row, int64_t steps, int64_t vectors,
                   const T* factors = nullptr) {
    for (; vectors > 0; vectors -= panel, c += tile_rows<T>, b += tile_rows<T>) {
        auto rows_of = vectors >= panel ? multiply_rows<T, Operand, 4, into>
                       : vectors == 3   ? multiply_rows<T, Operand, 3, into>
                       : vectors == 2   ? multiply_rows<T, Operand, 2, into>
                                        : multiply_rows<T, Operand, 1, into>;
        rows_of(c, c_row, rows, a, a_row, a_step, b, b_row, steps, factors);
    }
}

// `vectors` from 1 to 4 of a tile of queries: on a causal diagonal only those that see something take part.
template <class T, Into into, class Operand = Single<T>>
void multiply(T* c, int64_t rows, const typename Operand::Element* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
              int64_t steps, int vectors, const T* factors = nullptr) {
    multiply_wide<T, into, Operand>(c, tile_rows<T>, rows, a, a_row, a_step, b, tile_rows<T>, steps, vectors, factors);
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
