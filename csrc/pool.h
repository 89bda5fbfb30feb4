// SPDX-License-Identifier: MIT
// pool.h - the process's team of threads, and the barrier between its members. No other file deals with threads.
//
// The caller of a run is member 0 of the team. The other members are threads that the pool creates and that live until
// the process ends. Between runs they spin briefly, then sleep. Callers queue for the team, first come, first served,
// but a long run executes short runs at its pauses. With one thread, the caller computes alone, without the team or the
// queue.
#ifndef LLAMAC_POOL_H
#define LLAMAC_POOL_H
#include "balance.h"
#include "cancel.h"
#include "common.h"
#include "contention.h"

enum { POOL_MAX = 1024 };   // threads of a run

// 0 <= index < count. is_guest: the run executes at a pause of another run. shares: the members' shares of the work;
// NULL: equal shares.
struct member { int index, count, is_guest; const struct shares *shares; };
typedef void pool_work(void *argument, const struct member *member);

// A caller's work, for up to `threads` threads. A short job does not wait for the end of a longer run: up to `threads`
// members of that run compute the job at a pause.
struct pool_job { int threads, is_short; pool_work *work; void *argument; };

// Calls work(argument, member) on up to job->threads threads at once, at most POOL_MAX, and returns when all calls have
// returned. Each call runs with the default floating-point control word. If no threads can be created, the caller
// computes alone. If `cancel`, which may be NULL, is requested while the caller is queued, nothing is called and
// cancel->seen is set.
void pool_run(const struct pool_job *job, struct contention *contention, struct cancel *cancel);

// Waits for all members. All must pass the same barriers in the same order.
void pool_barrier(const struct member *member);
// The same, but the last member to arrive calls `last` before any member continues.
void pool_barrier_with(const struct member *member, pool_work *last, void *argument);

// A pause of a long run: members compute a queued short run, if there is one. Members do not wait for each other. All
// must pass the same pauses and barriers in the same order. Short runs do not pause.
void pool_pause(const struct member *member);

// Multiply-adds of a member between two pauses, a few milliseconds of each kind of work: chosen, not derived. Products
// and the heads of latent attention compute at least so many, attention about so many.
enum { PAUSE_ADDS_PRODUCT = 1 << 28, PAUSE_ADDS_HEADS = 1 << 27, PAUSE_ADDS_ATTENTION = 1 << 26 };

// A process-wide lock for short critical sections of other files. It stays usable in a forked child.
void pool_lock(void);
void pool_unlock(void);

// Returns whether all members have equal shares. Shares computed for another number of members are ignored.
static inline int pool_shares_are_equal(const struct member *m) { return !m->shares || m->shares->count != m->count; }

// This member's share [*first, *last) of n items: contiguous, of nearly equal size unless the run has unequal shares.
static inline void pool_share(const struct member *m, int n, int *first, int *last) {
    if (pool_shares_are_equal(m)) {
        *first = share_start(n, m->index, m->count);
        *last = share_start(n, m->index + 1, m->count);
    } else {
        *first = unequal_share_start(m->shares, n, m->index);
        *last = unequal_share_start(m->shares, n, m->index + 1);
    }
}
#endif
