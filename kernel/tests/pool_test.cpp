// Proves what pool.h promises; exits with 0 if everything holds. `pool_test latency` prints timings instead.
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "pool_bodies.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void test_every_thread_runs() {
    for (int threads : {1, 2, 3, 7, 16}) {
        Meeting meeting{threads};
        EXPECT(run_on_pool(threads, meet, &meeting));
        EXPECT(meeting.inside == threads);
        for (int i = 0; i < 256; ++i) EXPECT(meeting.numbers[i] == (i < threads ? 1 : 0));
        EXPECT(pool_size() == threads - 1);
    }
    EXPECT(computes(2));
    EXPECT(pool_size() == 15);  // neither grows nor shrinks for a smaller request
}

void test_sizes() {
    for (int threads : {-1, 0, 1, 2, 5, 33, 256, 1000}) EXPECT(computes(threads));
    EXPECT(pool_size() == 255);
    for (int items : {0, 1, 2, 1000}) EXPECT(computes(2, items));
}

void test_many_calls() {
    for (int i = 0; i < 20000; ++i) {
        if (computes(1 + i % 4, 8)) continue;
        EXPECT(!"a call among many is complete");
        return;
    }
    // With pauses around the spinning time, where falling asleep and being posted meet.
    for (int i = 0; i < 2000; ++i) {
        const Clock::time_point start = Clock::now();
        while (seconds_since(start) < 20e-6 + 1e-8 * i) {}
        if (computes(2, 8)) continue;
        EXPECT(!"a call after a pause is complete");
        return;
    }
}

void test_concurrent_calls() {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 8; ++c)
        callers.emplace_back([&wrong] {
            for (int i = 0; i < 500; ++i)
                if (!computes(3)) ++wrong;
        });
    for (std::thread& caller : callers) caller.join();
    EXPECT(wrong == 0);
}

void test_busy_pool_is_not_shared() {
    struct Outer {
        Meeting meeting{2};
        std::atomic<bool> inner_done{false};
    } outer;
    std::thread owner([&outer] {
        run_on_pool(
            2,
            [](void* context, int worker) {
                Outer& o = *static_cast<Outer*>(context);
                meet(&o.meeting, worker);
                const Clock::time_point start = Clock::now();
                while (!o.inner_done && seconds_since(start) < 10) std::this_thread::yield();
            },
            &outer);
    });
    while (outer.meeting.inside < 2) std::this_thread::yield();
    Work work(1000);
    EXPECT(run_on_pool(4, do_work, &work));
    EXPECT(work.complete() && work.helpers == 0);
    outer.inner_done = true;
    owner.join();
}

void test_nested_calls() {
    std::atomic<int> wrong{0};
    EXPECT(run_on_pool(
        3,
        [](void* context, int) {
            if (!computes(3)) ++*static_cast<std::atomic<int>*>(context);
        },
        &wrong));
    EXPECT(wrong == 0);
}

void test_late_worker_is_let_off() {
    // Worker 0 returns at once; the others are asleep and must not be waited for, nor be lost for the next call.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    int helpers = 0;
    for (int i = 0; i < 2000; ++i) {
        Work nothing(0);
        EXPECT(run_on_pool(16, do_work, &nothing));
        helpers += nothing.helpers;
    }
    EXPECT(helpers < 2000 * 15);
    Meeting meeting{16};
    EXPECT(run_on_pool(16, meet, &meeting));
    EXPECT(meeting.inside == 16);
}

// ---- Floating-point environment ----

struct Environment {
    Meeting meeting{2};
    std::atomic<int> wrong{0};
};

volatile double zero = 0, one = 1, tiny = 2.2250738585072014e-308;

void check_default_environment(void* context, int worker) {
    Environment& environment = *static_cast<Environment*>(context);
    meet(&environment.meeting, worker);
    if (fegetround() != FE_TONEAREST || fetestexcept(FE_ALL_EXCEPT & ~FE_INEXACT) != 0) ++environment.wrong;
    if (tiny / 2 == 0 || one + 1e-17 != 1) ++environment.wrong;
    volatile double infinite = one / zero;  // traps if the caller's traps are in force, and raises a flag
    (void)infinite;
}

void test_float_environment() {
    fenv_t before;
    fegetenv(&before);
    for (int round : {FE_UPWARD, FE_TOWARDZERO, FE_TONEAREST})
        for (int threads : {1, 2}) {
            fesetround(round);
            feclearexcept(FE_ALL_EXCEPT);
            feraiseexcept(FE_UNDERFLOW);
#if defined(__x86_64__)
            // Flush to zero, denormals are zero, trap division by zero.
            _mm_setcsr((_mm_getcsr() | 0x8040u) & ~0x0200u);
            const unsigned mxcsr = _mm_getcsr();
#endif
            Environment environment;
            environment.meeting.wanted = threads;
            const bool done = run_on_pool(threads, check_default_environment, &environment);
#if defined(__x86_64__)
            const bool same = _mm_getcsr() == mxcsr;
#else
            const bool same = true;
#endif
            const bool kept = fegetround() == round && fetestexcept(FE_ALL_EXCEPT & ~FE_INEXACT) == FE_UNDERFLOW;
            fesetenv(&before);
            EXPECT(done && same && kept);
            EXPECT(environment.wrong == 0 && environment.meeting.inside == threads);
        }
}

// ---- What a body may do ----

void test_exceptions_stay_inside() {
    for (int thrower : {0, 1}) {
        struct Context {
            Meeting meeting{2};
            int thrower;
        } context;
        context.thrower = thrower;
        EXPECT(!run_on_pool(
            2,
            [](void* c, int worker) {
                meet(&static_cast<Context*>(c)->meeting, worker);
                if (worker == static_cast<Context*>(c)->thrower) throw std::runtime_error("from a body");
            },
            &context));
        EXPECT(computes(2));
    }
    EXPECT(!run_on_pool(1, [](void*, int) { throw 1; }, nullptr));
}

void test_caller_ended_by_pthread_exit() {
    // What Python does to a daemon thread that asks for the GIL while the interpreter shuts down.
    static Meeting meeting{2};
    static std::atomic<bool> worker_done{false};
    std::thread caller([] {
        run_on_pool(
            2,
            [](void*, int worker) {
                meet(&meeting, worker);
                if (worker == 0) pthread_exit(nullptr);
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                worker_done = true;
            },
            nullptr);
        EXPECT(!"this line is not reached");
    });
    caller.join();
    EXPECT(worker_done);  // the caller's stack outlived the worker
    Meeting again{2};
    EXPECT(run_on_pool(2, meet, &again));
    EXPECT(again.inside == 2);
}

void test_signals_are_the_callers() {
    struct Context {
        Meeting meeting{2};
        std::atomic<int> wrong{0};
    } context;
    EXPECT(run_on_pool(
        2,
        [](void* c, int worker) {
            meet(&static_cast<Context*>(c)->meeting, worker);
            sigset_t blocked;
            pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
            const bool interrupt = sigismember(&blocked, SIGINT), fault = sigismember(&blocked, SIGSEGV);
            if (interrupt != (worker > 0) || fault) ++static_cast<Context*>(c)->wrong;
        },
        &context));
    EXPECT(context.wrong == 0 && context.meeting.inside == 2);
}

void test_idle_pool_sleeps() {
    EXPECT(computes(16, 1000));
    timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const double used =
        static_cast<double>(after.tv_sec - before.tv_sec) + 1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
    EXPECT(used < 0.02);
}

// ---- Timings ----

void print_latency() {
    const auto time_calls = [](int threads, int calls, double pause, const char* what) {
        std::vector<double> times;
        for (int i = 0; i < calls; ++i) {
            const Clock::time_point pausing = Clock::now();
            if (pause > 1e-4) std::this_thread::sleep_for(std::chrono::duration<double>(pause));
            while (seconds_since(pausing) < pause) {}
            Meeting meeting{threads};
            const Clock::time_point start = Clock::now();
            run_on_pool(threads, meet, &meeting);
            times.push_back(seconds_since(start) * 1e6);
        }
        std::qsort(times.data(), times.size(), sizeof(double), [](const void* a, const void* b) {
            const double x = *static_cast<const double*>(a), y = *static_cast<const double*>(b);
            return (x > y) - (x < y);
        });
        const double median = times[times.size() / 2], late = times[times.size() * 9 / 10];
        std::printf("%-58s median %7.2f us, 90%% %7.2f us\n", what, median, late);
    };
    time_calls(1, 10000, 0, "1 thread: the call itself");
    time_calls(2, 10000, 0, "2 threads, back to back, until both are inside");
    time_calls(2, 5000, 10e-6, "2 threads, 10 us apart, until both are inside");
    time_calls(2, 2000, 90e-6, "2 threads, 90 us apart (asleep), until both are inside");
    time_calls(2, 300, 5e-3, "2 threads, 5 ms apart (asleep), until both are inside");
}

// A runtime in miniature, with the signature of GOMP_parallel.
void run_on_new_threads(void (*body)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
    body(data);
    for (std::thread& other : others) other.join();
}

void test_a_team_runs_the_body() {
    struct Seen {
        std::atomic<int> times[4];
        std::thread::id first;
    } seen = {};
    const auto note = [](void* context, int worker) {
        Seen& to = *static_cast<Seen*>(context);
        ++to.times[worker];
        if (worker == 0) to.first = std::this_thread::get_id();
    };
    EXPECT(run_on_pool(4, note, &seen, run_on_new_threads));
    for (const std::atomic<int>& times : seen.times) EXPECT(times == 1);
    EXPECT(seen.first == std::this_thread::get_id());
    EXPECT(!run_on_pool(
        3,
        [](void*, int worker) {
            if (worker != 0) throw std::runtime_error("no");
        },
        nullptr, run_on_new_threads));
    // Another thread than the process's first is not given to a foreign runtime.
    const sqrtdk::Team must_not_run = [](void (*)(void*), void*, unsigned, unsigned) { ++failures; };
    std::thread([must_not_run] { EXPECT(run_on_pool(2, [](void*, int) {}, nullptr, must_not_run)); }).join();
}

}  // namespace

int main(int count, char** arguments) {
    alarm(300);  // a hang is a failure
    if (count > 1 && std::strcmp(arguments[1], "latency") == 0) {
        print_latency();
        return 0;
    }
    test_every_thread_runs();
    test_late_worker_is_let_off();
    test_busy_pool_is_not_shared();
    test_nested_calls();
    test_float_environment();
    test_exceptions_stay_inside();
    test_caller_ended_by_pthread_exit();
    test_signals_are_the_callers();
    test_concurrent_calls();
    test_many_calls();
    test_sizes();
    test_a_team_runs_the_body();
    test_idle_pool_sleeps();
    if (failures != 0) return 1;
    std::printf("pool: everything holds\n");
    return 0;
}
