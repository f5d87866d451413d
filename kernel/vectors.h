// Vectors of the working precision from and to numbers of any dtype.
#pragma once

#include <cstdint>

#include "block_view.h"
#include "level.h"
#include "pairs.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

template <class T>
struct Vectors {
    using S = Simd<T>;
    using Vec = typename S::Vec;

    static Vec load(const T* p, int64_t step) {
        if (step == 1) return S::load(p);
        T copy[S::lanes];
        for (int i = 0; i < S::lanes; ++i) copy[i] = p[i * step];
        return S::load(copy);
    }
    template <class Other>
    static Vec load(const Other* p, int64_t step) {
        if constexpr (in_pairs<T, Other>)
            if (step == 1) return PairSimd<T>::widen(&p->bits);
        T copy[S::lanes];
        for (int i = 0; i < S::lanes; ++i) copy[i] = widen(p[i * step]);
        return S::load(copy);
    }

    static void store(T* p, Vec x) { S::store(p, x); }
    template <class Other>
    static void store(Other* p, Vec x) {
        if constexpr (in_pairs<T, Other>) return PairSimd<T>::store_exactly(&p->bits, x);
        using Out = decltype(widen(Other()));
        alignas(64) T row[S::lanes];
        S::store(row, x);
        for (int i = 0; i < S::lanes; ++i) p[i] = narrow(Out(row[i]), Other());
    }
};

// The working precision of 16-bit numbers, and of others the numbers' own.
template <class In>
using Working = decltype(widen(In()));

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
