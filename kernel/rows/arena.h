// Scratch memory: one layout says which arrays there are, and is run twice, to count them and to hand them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "simd/level.h"

namespace sqrtdk::SQRTDK_LEVEL {
namespace {

// Memory that is cut into arrays, each from a line of 64 bytes on; freed with the arena.
class Arena {
  public:
    // layout(arena) takes every array, the same ones both times.
    template <class Layout>
    explicit Arena(const Layout& layout) {
        layout(*this);
        size_ = used_;
        used_ = 0;
        // A line more than was counted: nobody asks for 0 bytes.
        if (ok_) start_ = static_cast<char*>(std::aligned_alloc(line, size_ + line));
        ok_ = start_ != nullptr;
        if (ok_) layout(*this);
    }
    ~Arena() { std::free(start_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // To be asked before the arrays are used: the memory was to be had, and every array found its room in it.
    bool ok() const { return ok_; }

    // rows * width numbers; null while they are counted, and where they do not fit.
    template <class T>
    void take(T*& to, int64_t rows, int64_t width = 1) {
        constexpr size_t most = size_t(INT64_MAX) - line;  // so that whole lines and one more fit into the sum
        size_t bytes = 0, end = 0;
        ok_ = ok_ && !__builtin_mul_overflow(rows, width, &bytes) &&
              !__builtin_mul_overflow(bytes, sizeof(T), &bytes) && bytes <= most &&
              !__builtin_add_overflow(used_, (bytes + line - 1) / line * line, &end) && end <= most &&
              (start_ == nullptr || end <= size_);
        to = ok_ && start_ != nullptr ? reinterpret_cast<T*>(start_ + used_) : nullptr;
        if (ok_) used_ = end;
    }

  private:
    static constexpr size_t line = 64;
    char* start_ = nullptr;
    size_t size_ = 0, used_ = 0;
    bool ok_ = true;
};

}  // namespace
}  // namespace sqrtdk::SQRTDK_LEVEL
