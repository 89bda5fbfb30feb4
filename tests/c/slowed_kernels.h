// SPDX-License-Identifier: MIT
// slowed_kernels.h - simulates processors whose cores differ: some threads of a session take longer for each product
// and for attention. The core itself is not changed for this.
#ifndef LLAMAC_SLOWED_KERNELS_H
#define LLAMAC_SLOWED_KERNELS_H
#include <stdint.h>
#include <string.h>
#include "clock.h"
#include "session.h"

// The session that is slowed, and how many times as long each of its threads takes. Threads after the last take 1.
enum { SLOWED_THREADS = 64 };
static struct {
    const struct llamac_session *session;
    const struct kernels *kernels;   // the ones that compute
    double times[SLOWED_THREADS];
    int keeps_equal_shares;
    struct kernels table;
} slowed;

// Spins until the time since `started` is `times` as long.
static void slow_down(int64_t started, double times) {
    const int64_t end = started + (int64_t)((double)(now_ns() - started) * times);
    while (now_ns() < end) {}
}

// The thread that owns a piece of scratch memory.
static struct thread_scratch *slowed_owner(const void *memory) {
    const struct scratch *scratch = &slowed.session->scratch;
    int owner = 0;
    for (int t = 1; t < scratch->n_threads; t++)
        if ((uintptr_t)memory >= (uintptr_t)scratch->threads[t].row) owner = t;
    return &scratch->threads[owner];
}

static double times_of(const struct thread_scratch *thread) {
    const long index = (long)(thread - slowed.session->scratch.threads);
    return index < SLOWED_THREADS && slowed.times[index] > 1 ? slowed.times[index] : 1;
}

static void slowed_gemm(const struct gemm *g) {
    struct thread_scratch *thread = slowed_owner(g->scratch);
    const int64_t started = now_ns();
    slowed.kernels->gemm(g);
    slow_down(started, times_of(thread));
    if (slowed.keeps_equal_shares) memset(thread->paces, 0, sizeof thread->paces);   // never enough is known
}

static void slowed_attend(const struct attend *a) {
    const int64_t started = now_ns();
    slowed.kernels->attend[slowed.session->kv_dtype](a);
    slow_down(started, times_of(slowed_owner(a->scratch)));
}

// Slows a session, the only one at a time.
static inline void slow_session(struct llamac_session *s) {
    slowed.session = s;
    slowed.kernels = s->kernels;
    slowed.table = *s->kernels;
    slowed.table.gemm = slowed_gemm;
    slowed.table.attend[s->kv_dtype] = slowed_attend;
    s->kernels = &slowed.table;
}
#endif
