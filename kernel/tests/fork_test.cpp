// Proves what pool.h promises of forked children and of a process that ends during a call; exits with 0 if it holds.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "pool_bodies.h"

// ThreadSanitizer does not support new threads in a forked child.
#if defined(__SANITIZE_THREAD__)
constexpr bool can_fork = false;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr bool can_fork = false;
#else
constexpr bool can_fork = true;
#endif
#else
constexpr bool can_fork = true;
#endif

namespace {

// The child's exit code, or -1 if a signal (the alarm, when it hangs) ended it.
int wait_for(pid_t child) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void check_in_child() {
    alarm(20);
    const bool empty = pool_size() == 0;
    Meeting meeting{3};
    const bool ran = run_on_pool(3, meet, &meeting) && meeting.inside == 3 && pool_size() == 2;
    _exit(empty && ran && computes(4) ? 0 : 1);
}

// AddressSanitizer's allocator is not safe to fork while it is in use, as it is while a thread starts.
void let_threads_start() {
    Meeting meeting{3};
    EXPECT(run_on_pool(3, meet, &meeting));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

void test_fork_of_an_idle_pool() {
    EXPECT(computes(3));
    let_threads_start();
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            if (i % 2 == 0) check_in_child();
            alarm(20);
            const pid_t grandchild = computes(2) ? fork() : -1;
            if (grandchild == 0) check_in_child();
            _exit(wait_for(grandchild) == 0 ? 0 : 1);
        }
        EXPECT(wait_for(child) == 0);
    }
    EXPECT(computes(3));
}

void test_fork_during_calls_of_others() {
    let_threads_start();
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0}, begun{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c)
        callers.emplace_back([&] {
            // One piece of work again and again: nothing is allocated while the others fork.
            Work work(2000);
            ++begun;
            while (!stop) {
                work.next = 0;
                std::fill(work.results.begin(), work.results.end(), 0);
                if (!run_on_pool(3, do_work, &work) || !work.complete()) ++wrong;
            }
        });
    while (begun < 3) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (int i = 0; i < 50; ++i) {
        const pid_t child = fork();
        if (child == 0) check_in_child();
        EXPECT(wait_for(child) == 0);
    }
    stop = true;
    for (std::thread& caller : callers) caller.join();
    EXPECT(wrong == 0);
}

void test_fork_inside_a_call() {
    // A Python signal handler that forks runs inside the interrupt check of worker 0.
    struct Context {
        Work work{4000};
        Meeting meeting{3};
        std::atomic<pid_t> child{-1};
    };
    for (int i = 0; i < 20; ++i) {
        Context context;
        const bool done = run_on_pool(
            3,
            [](void* c, int worker) {
                Context& own = *static_cast<Context*>(c);
                meet(&own.meeting, worker);
                if (worker == 0) own.child = fork();
                do_work(&own.work, worker);
            },
            &context);
        const bool complete = done && context.work.complete();
        if (context.child == 0) {
            if (!complete) _exit(2);
            check_in_child();
        }
        EXPECT(complete);
        EXPECT(wait_for(context.child) == 0);
    }
    EXPECT(computes(3));
}

// A program of its own: leaves main while a call that never ends is running.
int exit_during_a_call() {
    alarm(20);
    static Meeting meeting{3};
    std::thread([] {
        run_on_pool(
            3,
            [](void*, int worker) {
                meet(&meeting, worker);
                for (;;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            },
            nullptr);
    }).detach();
    while (meeting.inside < 3) std::this_thread::yield();
    return 7;
}

void test_exit_during_a_call(const char* program) {
    for (int i = 0; i < 5; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            execl(program, program, "exit", static_cast<char*>(nullptr));
            _exit(1);
        }
        EXPECT(wait_for(child) == 7);
    }
}

}  // namespace

int main(int count, char** arguments) {
    alarm(300);  // a hang is a failure
    if (count > 1 && std::strcmp(arguments[1], "exit") == 0) return exit_during_a_call();
    if (can_fork) {
        test_fork_of_an_idle_pool();
        test_fork_during_calls_of_others();
        test_fork_inside_a_call();
    }
    test_exit_during_a_call(arguments[0]);
    if (failures != 0) return 1;
    std::printf("forks: everything holds%s\n", can_fork ? "" : " (fork not tested under this sanitizer)");
    return 0;
}
