// SPDX-License-Identifier: MIT
// pool.h - the one team of threads of the process, and the barrier its members meet at. Nothing else knows of threads.
//
// The caller of a run is a member of the team; the others are threads of ours. They stay in one OpenMP region for as long as the
// team need not grow, and between runs they wait: shortly awake, then asleep. Runs of several callers take turns, in the order in
// which they came; a run with one thread is computed by its caller, beside all others.
#ifndef LLAMAC_POOL_H
#define LLAMAC_POOL_H
#include "cancel.h"
#include "common.h"

enum { POOL_MAX = 1024 };     // threads of a run

struct member { int index, count; };   // 0 <= index < count

// What a sequence of runs of one kind has learned about waiting. Zeroed: nothing yet.
struct pace {
    int64_t ran, waited;      // nanoseconds of late: of the runs, and of waiting in them, a member's average
    int64_t lost;             // CPUs that members lost to other threads meanwhile
    int64_t asleep_until;     // before that time members wait asleep, because other programs want their CPUs
};

// Calls work(argument, member) on up to `threads` threads at once, POOL_MAX at most, and returns when all are done. Floating-point
// control words are set and restored around it. If the team cannot be had, the caller computes alone. Where `cancel` (NULL: never) is
// requested while others have their turn, nothing is called, and cancel->seen tells so.
void pool_run(int threads, struct pace *pace, struct cancel *cancel, void (*work)(void *argument, const struct member *member), void *argument);

// Waits until every member has come. All members must pass the same barriers in the same order.
void pool_barrier(const struct member *member);

// The part [*first, *last) of n items that this member works on: contiguous, of nearly equal size.
static inline void pool_share(const struct member *m, int n, int *first, int *last) {
    *first = share_start(n, m->index, m->count);
    *last = share_start(n, m->index + 1, m->count);
}
#endif
