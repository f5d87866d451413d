// Bodies for the pool's tests to run, and how a test says that something is not so.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "pool/pool.h"

namespace {

using sqrtdk::pool_size;
using sqrtdk::run_on_pool;
using Clock = std::chrono::steady_clock;

std::atomic<int> failures{0};

#define EXPECT(condition)                                                                \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                                  \
        }                                                                                \
    } while (false)

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The shape of every body in the kernel: items from a counter, each result written by whoever took the item.
struct Work {
    explicit Work(int items) : results(static_cast<size_t>(items), 0) {}
    std::atomic<int> next{0};
    std::atomic<int> helpers{0};
    std::vector<int> results;
    bool complete() const {
        for (size_t i = 0; i < results.size(); ++i)
            if (results[i] != static_cast<int>(i) + 1) return false;
        return true;
    }
};

void do_work(void* context, int worker) {
    Work& work = *static_cast<Work*>(context);
    if (worker > 0) ++work.helpers;
    const int items = static_cast<int>(work.results.size());
    for (int i = work.next++; i < items; i = work.next++) work.results[static_cast<size_t>(i)] += i + 1;
}

bool computes(int threads, int items = 100) {
    Work work(items);
    return run_on_pool(threads, do_work, &work) && work.complete();
}

// Stays until `wanted` workers are inside, or time is over: shows that they are threads of their own.
struct Meeting {
    int wanted;
    std::atomic<int> inside{0};
    std::atomic<int> numbers[256] = {};
};

void meet(void* context, int worker) {
    Meeting& meeting = *static_cast<Meeting*>(context);
    ++meeting.numbers[worker];
    ++meeting.inside;
    const Clock::time_point start = Clock::now();
    while (meeting.inside < meeting.wanted && seconds_since(start) < 10) std::this_thread::yield();
}

}  // namespace
