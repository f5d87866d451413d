// Eight bytes of a boolean mask at a time, on any CPU.
#pragma once

#include <cstdint>

namespace sqrtdk {

// One bit for each of eight bytes: is it not zero. The lower seven bits of a byte carry into its eighth if one of them
// is set; the product moves the eight results next to each other.
static inline __attribute__((always_inline)) uint64_t find_nonzero_of_eight(const uint8_t* p) {
    constexpr uint64_t lower = 0x7f7f7f7f7f7f7f7full;
    uint64_t bytes;
    __builtin_memcpy(&bytes, p, 8);
    const uint64_t eighths = (((bytes & lower) + lower) | bytes) & ~lower;
    return (eighths >> 7) * 0x0102040810204080ull >> 56;
}

}  // namespace sqrtdk
