// SPDX-License-Identifier: MIT
// pool.h - the one team of threads of the process, and the barrier its members meet at. Nothing else knows of threads.
//
// One OpenMP region per run. The team belongs to a thread of ours, not to the caller: GCC's OpenMP hangs in a forked child whose
// parent's calling thread had a team, whereas our thread is simply started anew there. Runs of several callers take turns; a
// run with one thread is computed by its caller, beside all others.
#ifndef LLAMAC_POOL_H
#define LLAMAC_POOL_H
#include <stdint.h>

// A number that threads wait to see change.
struct gate { int32_t number, sleepers; };

struct barrier {
    int members;
    int32_t arrived;
    struct gate round;
};

struct member {
    int index, count;         // 0 <= index < count
    struct barrier *barrier;
};

// Calls work(argument, member) on up to `threads` threads at once and returns when all are done. Floating-point control words are
// set and restored around it. If the team cannot be had, the caller computes alone.
void pool_run(int threads, void (*work)(void *argument, const struct member *member), void *argument);

// Waits until every member has come. All members must pass the same barriers in the same order.
void pool_barrier(const struct member *member);

// The part [*first, *last) of n items that this member works on: contiguous, of nearly equal size.
static inline void pool_share(const struct member *m, int n, int *first, int *last) {
    *first = (int)((int64_t)n * m->index / m->count);
    *last = (int)((int64_t)n * (m->index + 1) / m->count);
}
#endif
