// SPDX-License-Identifier: MIT
// pool.h - the process's one team of threads, and the barrier between its members. No other file knows of threads.
//
// The caller of a run is member 0 of the team; the other members are threads of ours. They stay until the process ends;
// between runs they spin briefly, then sleep. Callers queue for the team, first come first served. A run with one
// thread is computed by its caller, beside all others, without the team.
#ifndef LLAMAC_POOL_H
#define LLAMAC_POOL_H
#include "cancel.h"
#include "common.h"

enum { POOL_MAX = 1024 };     // threads of a run

struct member { int index, count; };   // 0 <= index < count
typedef void pool_work(void *argument, const struct member *member);

// What runs of one kind have learned about other programs that want the same CPUs. All zero: nothing yet.
struct contention {
    int64_t run_ns, wait_ns;  // of recent runs: their length; the time that a member waited in them, on average
    int64_t preemptions;      // of members in these runs
    int64_t sleep_until;      // before this time members sleep at barriers instead of spinning
};

// Calls work(argument, member) on up to `threads` threads at once, POOL_MAX at most, and returns when all calls have
// returned. Sets the floating-point control word around each. If no threads can be created, the caller computes alone.
// If `cancel` (NULL: never) is requested while the caller is in the queue, nothing is called, and cancel->seen is set.
void pool_run(int threads, struct contention *contention, struct cancel *cancel, pool_work *work, void *argument);

// Waits for all members. All members must pass the same barriers in the same order.
void pool_barrier(const struct member *member);

// The part [*first, *last) of n items that this member works on: contiguous, of nearly equal size.
static inline void pool_share(const struct member *m, int n, int *first, int *last) {
    *first = share_start(n, m->index, m->count);
    *last = share_start(n, m->index + 1, m->count);
}
#endif
