// A persistent thread pool that is owned by one call at a time, survives fork, and is never torn down.
#include "pool/pool.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace sqrtdk {
namespace {

using Body = void (*)(void*, int);
using Clock = std::chrono::steady_clock;

constexpr int kMostThreads = 256;
// Long enough to catch the next of a series of calls, short enough to be invisible in a CPU profile of an idle process.
constexpr std::chrono::microseconds kSpin{40};
// Some C libraries give threads 128 KiB, which is little for what the compiler spills.
constexpr size_t kStackBytes = size_t{2} << 20;

// ---- Floating-point environment -------------------------------------------------------------------------------------

// FE_DFL_ENV also clears flush-to-zero and denormals-are-zero in glibc and musl. The three steps take 0.2 us.
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t saved_;
};

// ---- State ----------------------------------------------------------------------------------------------------------

// idle -> posted (owner) -> running (worker) -> idle (worker), or posted -> idle (owner lets a late worker off).
enum Phase : int { idle, posted, running };

// One cache line pair per worker: neighbours spin on their own.
struct alignas(128) Slot {
    std::atomic<int> phase{idle};
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable wake;
};

struct Pool {
    std::atomic<bool> busy{false};
    std::atomic<int> workers{0};
    std::atomic<bool> failed{false};
    std::atomic<bool> owner_asleep{false};
    std::mutex mutex;
    std::condition_variable finished;
    // Written by the owner before it posts, read by a worker after it has seen the post.
    Body body = nullptr;
    void* context = nullptr;
    int threads = 0;
    int processors = 1;
    Pool* previous = nullptr;
    Slot slots[kMostThreads];  // slot 0 belongs to the caller and stays unused
};

// Never destroyed: at process exit workers and daemon callers may still be running, and there is nothing to wait for.
std::atomic<Pool*> the_pool{nullptr};
// Pools of the processes before a fork. Their mutexes may be held by threads that no longer exist, so they are kept,
// reachable for leak checkers, and never touched again.
Pool* abandoned = nullptr;
// The pool that this thread owns, for the fork handler.
thread_local Pool* owned_here = nullptr;

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// False when the time is over; the clock is read rarely, it costs more than a look at the slot.
template <typename Condition>
bool spin_until(Condition holds) {
    const Clock::time_point end = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (holds()) return true;
            pause_briefly();
        }
    } while (Clock::now() < end);
    return holds();
}

// Calls the body; false if it threw. What is caught below for pthread_exit is a reference to nothing, as libstdc++
// defines it, and only the check for that is switched off.
__attribute__((no_sanitize("null"))) bool call_body(Body body, void* context, int worker) {
    try {
        body(context, worker);
        return true;
    }
#if defined(__GLIBCXX__)
    // Not an exception but pthread_exit: Python ends a daemon thread so when it asks for the GIL during shutdown.
    // Swallowing it would abort the process.
    catch (abi::__forced_unwind&) {
        throw;
    }
#endif
    catch (...) {
        return false;
    }
}

// ---- Workers --------------------------------------------------------------------------------------------------------

// Both sides of a sleep follow one pattern: the sleeper announces itself and then looks at the phase, the waker changes
// the phase and then looks for the announcement, all sequentially consistent, so one of them sees the other.
void wake(Slot& slot) {
    if (!slot.asleep.load()) return;
    { std::lock_guard<std::mutex> lock(slot.mutex); }
    slot.wake.notify_one();
}

// Waking is a system call each, so it spreads as a binary tree. Slots are posted from the last to the first: whoever
// sees its own post sees those of its children.
void wake_children(Pool& pool, int worker, int threads) {
    for (int child = 2 * worker + 1; child <= 2 * worker + 2 && child < threads; ++child) wake(pool.slots[child]);
}

void wait_for_post(Pool& pool, Slot& slot, int worker) {
    const auto is_posted = [&slot] { return slot.phase.load() == posted; };
    // Spinning where there are more threads than processors takes time from those that have work.
    if (worker < pool.processors && spin_until(is_posted)) return;
    std::unique_lock<std::mutex> lock(slot.mutex);
    slot.asleep.store(true);
    while (!is_posted()) slot.wake.wait(lock);
    slot.asleep.store(false);
}

void run_posted(Pool& pool, Slot& slot, int worker) {
    int expected = posted;
    if (!slot.phase.compare_exchange_strong(expected, running)) return;  // let off in the meantime
    wake_children(pool, worker, pool.threads);
    {
        DefaultFloatEnvironment environment;
        if (!call_body(pool.body, pool.context, worker)) pool.failed.store(true);
    }
    slot.phase.store(idle);
    if (pool.owner_asleep.load()) {
        {
            std::lock_guard<std::mutex> lock(pool.mutex);
        }
        pool.finished.notify_one();
    }
}

struct Start {
    Pool* pool;
    int worker;
};

void* work_forever(void* argument) {
    Start* start = static_cast<Start*>(argument);
    Pool& pool = *start->pool;
    const int worker = start->worker;
    delete start;
    Slot& slot = pool.slots[worker];
    for (;;) {
        wait_for_post(pool, slot, worker);
        run_posted(pool, slot, worker);
    }
    return nullptr;
}

// Signals belong to the program's own threads: Python's handler must interrupt the main thread, not a worker. Those
// that a thread raises by its own fault stay, or a crash would go unreported.
void block_signals(sigset_t* before) {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, before);
}

bool start_worker(Pool& pool, int worker) {
    Start* start = new (std::nothrow) Start{&pool, worker};
    if (start == nullptr) return false;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_t thread;
    const bool started = pthread_create(&thread, &attributes, work_forever, start) == 0;
    pthread_attr_destroy(&attributes);
    if (!started) delete start;
    return started;
}

// Only the owner grows the pool.
void grow(Pool& pool, int workers) {
    int alive = pool.workers.load();
    if (alive >= workers) return;
    sigset_t before;
    block_signals(&before);
    while (alive < workers && start_worker(pool, alive + 1)) pool.workers.store(++alive);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// ---- The owner ------------------------------------------------------------------------------------------------------

void post(Pool& pool, Body body, void* context, int threads) {
    pool.body = body;
    pool.context = context;
    pool.threads = threads;
    pool.failed.store(false);
    for (int worker = threads - 1; worker > 0; --worker) pool.slots[worker].phase.store(posted);
    wake_children(pool, 0, threads);
}

// Releases workers that have not begun and waits for the others. Safe to call twice.
void join(Pool& pool) {
    for (int worker = 1; worker < pool.threads; ++worker) {
        Slot& slot = pool.slots[worker];
        int expected = posted;
        if (slot.phase.compare_exchange_strong(expected, idle) || expected == idle) continue;
        const auto is_idle = [&slot] { return slot.phase.load() == idle; };
        if (pool.threads <= pool.processors && spin_until(is_idle)) continue;
        std::unique_lock<std::mutex> lock(pool.mutex);
        pool.owner_asleep.store(true);
        while (!is_idle()) pool.finished.wait(lock);
        pool.owner_asleep.store(false);
    }
}

void before_fork() {
    // Workers do not exist in the child; what they have in hand must be done before the memory is copied.
    if (owned_here != nullptr) join(*owned_here);
}

void in_child() {
    Pool* pool = the_pool.exchange(nullptr);
    if (pool == nullptr) return;
    pool->previous = abandoned;
    abandoned = pool;
}

void register_fork_handlers() { pthread_atfork(before_fork, nullptr, in_child); }

// The process's pool, made by the first call that wants more than one thread; null when memory is out.
Pool* find_or_make_pool() {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handlers);
    Pool* pool = the_pool.load();
    if (pool != nullptr) return pool;
    Pool* made = new (std::nothrow) Pool;
    if (made == nullptr) return nullptr;
    const int processors = static_cast<int>(std::thread::hardware_concurrency());
    made->processors = processors > 0 ? processors : 1;
    if (the_pool.compare_exchange_strong(pool, made)) return made;
    delete made;  // another thread was faster; nobody has seen this one
    return pool;
}

// Owns the pool for one call. The destructor also runs when pthread_exit unwinds the caller: the workers use memory of
// its stack, so they are waited for before it goes.
class Ownership {
  public:
    explicit Ownership(Pool& pool) : pool_(pool), outer_(owned_here), owns_(!pool.busy.exchange(true)) {
        if (owns_) owned_here = &pool;
    }
    ~Ownership() {
        if (!owns_) return;
        join(pool_);
        pool_.threads = 0;
        owned_here = outer_;
        pool_.busy.store(false);
    }
    Ownership(const Ownership&) = delete;
    Ownership& operator=(const Ownership&) = delete;
    bool owns() const { return owns_; }

  private:
    Pool& pool_;
    Pool* const outer_;
    const bool owns_;
};

// ---- A team of another runtime --------------------------------------------------------------------------------------

struct TeamCall {
    Body body;
    void* context;
    pthread_t owner;
    std::atomic<int> others{0};
    std::atomic<bool> failed{false};
};

void run_member(void* data) {
    TeamCall& call = *static_cast<TeamCall*>(data);
    DefaultFloatEnvironment environment;
    const int worker = pthread_equal(pthread_self(), call.owner) ? 0 : call.others.fetch_add(1) + 1;
    if (!call_body(call.body, call.context, worker)) call.failed.store(true);
}

bool is_first_thread() {
#if defined(__linux__)
    static thread_local const bool first = getpid() == static_cast<pid_t>(syscall(SYS_gettid));
    return first;
#else
    return false;
#endif
}

}  // namespace

bool run_on_pool(int threads, Body body, void* context, Team team) {
    DefaultFloatEnvironment environment;
    if (threads > kMostThreads) threads = kMostThreads;
    if (team != nullptr && threads > 1 && is_first_thread()) {
        TeamCall call{body, context, pthread_self()};
        team(run_member, &call, static_cast<unsigned>(threads), 0);
        return !call.failed.load();
    }
    Pool* pool = threads > 1 ? find_or_make_pool() : nullptr;
    if (pool == nullptr) return call_body(body, context, 0);
    Ownership ownership(*pool);
    if (!ownership.owns()) return call_body(body, context, 0);
    grow(*pool, threads - 1);
    const int alive = pool->workers.load() + 1;
    post(*pool, body, context, threads < alive ? threads : alive);
    const bool completed = call_body(body, context, 0);
    join(*pool);
    return completed && !pool->failed.load();
}

int pool_size() {
    const Pool* pool = the_pool.load();
    return pool == nullptr ? 0 : pool->workers.load();
}

}  // namespace sqrtdk
