// Numbers of every dtype, and blocks of them in the working precision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel.h"
#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float widen(Bfloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

// Integer steps only, so that the compiler can take many at a time: a half is a float with 3 exponent bits fewer,
// denormals come out right by subtracting the implicit one that the shift made up.
inline float widen(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, body = uint32_t(x.bits & 0x7fffu);
    const uint32_t normal = (body << 13) + (112u << 23);
    const float tiny = bits_to_float((body << 13) + (113u << 23)) - bits_to_float(113u << 23);
    const uint32_t special = (body << 13) + (224u << 23);
    const uint32_t size = body < 0x400u ? float_to_bits(tiny) : body >= 0x7c00u ? special : normal;
    return bits_to_float(size | sign);
}

inline Bfloat16 narrow(float x, Bfloat16) {
    const uint32_t bits = float_to_bits(x);
    if (x != x) return {uint16_t((bits >> 16) | 0x40u)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline Float16 narrow(float x, Float16) {
    const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
    if (body > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
    if (body >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // rounds past the largest half
    if (body < 0x38800000u) {
        // Adding 0.5 lines the bits up with those of a denormal half and rounds to nearest even on the way.
        const uint32_t aligned = float_to_bits(bits_to_float(body) + 0.5f) - 0x3f000000u;
        return {uint16_t(sign | aligned)};
    }
    return {uint16_t(sign | ((body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13))};
}
inline float narrow(float x, float) { return x; }
inline double narrow(double x, double) { return x; }

// The working precision of 16-bit numbers, and of others the numbers' own.
template <class In>
using Working = decltype(widen(In()));

template <class T>
void clear(T* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) numbers[i] = 0;
}

// Calls run(number of the working precision, number of the dtype).
template <class Run>
Status with_dtype(Dtype dtype, const Run& run) {
    switch (dtype) {
        case Dtype::float16: return run(float(), Float16());
        case Dtype::bfloat16: return run(float(), Bfloat16());
        case Dtype::float32: return run(float(), float());
        case Dtype::float64: return run(double(), double());
    }
    return Status::unknown_dtype;
}

// Rows of numbers in the working precision T: row i, element j is at data[i * row + j * step].
template <class T>
struct BlockView {
    const T* data;
    ptrdiff_t row, step;
};

template <class T, class In>
void copy_block(const In* from, ptrdiff_t row, ptrdiff_t step, int64_t rows, int64_t width, T* to) {
    for (int64_t i = 0; i < rows; ++i) {
        const In* p = from + i * row;
        if (step == 1) {
            for (int64_t j = 0; j < width; ++j) to[i * width + j] = widen(p[j]);
        } else {
            for (int64_t j = 0; j < width; ++j) to[i * width + j] = widen(p[j * step]);
        }
    }
}

// Where the rows lie, for products read any strides; or a copy, if the dtype differs.
template <class T, class In>
BlockView<T> view_block(const In* from, ptrdiff_t row, ptrdiff_t step, [[maybe_unused]] int64_t rows,
                        [[maybe_unused]] int64_t width, [[maybe_unused]] T* copy) {
    if constexpr (std::is_same<T, In>::value) {
        return {from, row, step};
    } else {
        copy_block<T, In>(from, row, step, rows, width, copy);
        return {copy, ptrdiff_t(width), 1};
    }
}

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
