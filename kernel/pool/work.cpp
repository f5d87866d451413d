// Hands out the pieces of a call and notices an interrupt.
#include "pool/work.h"

#include <chrono>

namespace sqrtdk {
namespace {

int64_t milliseconds() {
    using namespace std::chrono;
    return duration_cast<std::chrono::milliseconds>(steady_clock::now().time_since_epoch()).count();
}

constexpr int64_t poll_every = 20;

}  // namespace

Work::Work(const Problem& call, int64_t pieces)
    : interrupted_(call.interrupted),
      context_(call.context),
      pieces_(pieces),
      next_poll_(interrupted_ == nullptr ? 0 : milliseconds() + poll_every) {}

bool Work::is_over(int worker) {
    if (worker == 0 && interrupted_ != nullptr) {
        const int64_t now = milliseconds();
        if (now >= next_poll_) {
            next_poll_ = now + poll_every;
            if (interrupted_(context_)) fail(Status::interrupted);
        }
    }
    return status_.load(std::memory_order_relaxed) != int(Status::ok);
}

int64_t Work::take(int worker) {
    if (is_over(worker)) return -1;
    const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
    return piece < pieces_ ? piece : -1;
}

int useful_threads(int threads, int64_t pieces, double multiply_adds) {
    // Waking a worker costs some microseconds; below this much work per thread it does not pay.
    constexpr double worth = 4e5;
    int64_t useful = int64_t(multiply_adds / worth) + 1;
    useful = useful < pieces ? useful : pieces;
    useful = useful < threads ? useful : threads;
    return useful < 1 ? 1 : int(useful);
}

}  // namespace sqrtdk
