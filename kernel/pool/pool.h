// The threads of the kernel: one persistent pool per process.
#pragma once

#include "kernel.h"

namespace sqrtdk {

// Runs body(context, worker) on up to `threads` threads (at most 256) and returns when every started one has returned.
// The calling thread is worker 0; the others have distinct numbers from 1 to threads - 1.
//
// Fewer may run than were asked for: a call that finds the pool taken by another thread (or by itself, further up the
// stack) runs worker 0 alone; a worker that has not begun by the time worker 0 returns is let off; and the system may
// refuse a thread. So a body takes its work from a shared counter until nothing is left, and what it computes must not
// depend on who computes it.
//
// Every body runs in the default floating-point environment (round to nearest, no flush-to-zero, traps masked); the
// caller's environment, its exception flags included, is the same after the call as before.
//
// A forked child starts with an empty pool, whatever the parent's threads were doing. If the forking thread is itself
// inside a call on the pool, the fork waits until the workers have finished, and the call can be completed on both
// sides. A call on a team cannot be completed by the child: the threads of the team are not there.
//
// Returns false if a body threw: its work is then incomplete. No exception leaves this function.
//
// With a team the body runs on the team's threads instead, whose idle ones may still spin where a worker of the pool
// would have to run. Only for the first thread of the process: Python may end any other by unwinding its stack, and
// frames of a foreign runtime need not survive that. In a forked child the team must not be used any more.
bool run_on_pool(int threads, void (*body)(void* context, int worker), void* context, Team team = nullptr);

// pool_size() is declared in kernel.h.

}  // namespace sqrtdk
