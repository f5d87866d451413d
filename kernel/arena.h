// Scratch memory of one worker.
#pragma once

#include <cstddef>
#include <cstdlib>

#include "level.h"

namespace sqrtdk {
namespace SQRTDK_LEVEL {
namespace {

// Memory that is cut into aligned arrays of numbers; freed when the worker is done.
class Arena {
  public:
    explicit Arena(size_t bytes)
        : start_(static_cast<char*>(std::aligned_alloc(64, room(bytes)))),
          next_(start_),
          left_(start_ == nullptr ? 0 : room(bytes)) {}
    ~Arena() { std::free(start_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // To be asked before the arrays are used: the memory was to be had, and every array found its room in it.
    bool ok() const { return start_ != nullptr && fits_; }
    static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }
    template <class T>
    T* take(size_t count) {
        const size_t bytes = room(count * sizeof(T));
        fits_ = fits_ && bytes <= left_;
        if (!fits_) return nullptr;
        T* p = reinterpret_cast<T*>(next_);
        next_ += bytes;
        left_ -= bytes;
        return p;
    }

  private:
    char* start_;
    char* next_;
    size_t left_;
    bool fits_ = true;
};

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
