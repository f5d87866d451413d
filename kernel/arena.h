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
        : start_(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))), next_(start_) {}
    ~Arena() { std::free(start_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    bool ok() const { return start_ != nullptr; }
    static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }
    template <class T>
    T* take(size_t count) {
        T* p = reinterpret_cast<T*>(next_);
        next_ += room(count * sizeof(T));
        return p;
    }

  private:
    char* start_;
    char* next_;
};

}  // namespace
}  // namespace SQRTDK_LEVEL
}  // namespace sqrtdk
