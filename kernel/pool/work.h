// Hands out the pieces of one call to the workers; compiled once, outside the CPU levels.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernel.h"
#include "pool/pool.h"

namespace sqrtdk {

class Work {
  public:
    Work(const Problem& call, int64_t pieces);

    // The next piece, or -1 when there is none or the call was interrupted. Worker 0, the calling thread, polls.
    int64_t take(int worker);

    // Whether the call was interrupted or has failed: asked by a worker in the middle of a long piece.
    bool is_over(int worker);

    // The first reason counts: an interrupt is not overwritten by what fails after it.
    void fail(Status status) {
        int none = int(Status::ok);
        status_.compare_exchange_strong(none, int(status));
    }
    Status status() const { return Status(status_.load()); }

  private:
    bool (*interrupted_)(void*);
    void* context_;
    int64_t pieces_;
    int64_t next_poll_;
    std::atomic<int64_t> next_{0};
    std::atomic<int> status_{int(Status::ok)};
};

// Runs body(worker) on the pool or the call's team, and returns how the work ended.
template <class Body>
Status run_workers(const Problem& call, const Work& work, int threads, Body body) {
    const auto run = [](void* context, int worker) { (*static_cast<Body*>(context))(worker); };
    return run_on_pool(threads, run, &body, call.team) ? work.status() : Status::out_of_memory;
}

// How many workers are worth waking for this many multiply-adds.
int useful_threads(int threads, int64_t pieces, double multiply_adds);

}  // namespace sqrtdk
