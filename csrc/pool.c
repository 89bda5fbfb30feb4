// SPDX-License-Identifier: MIT
// pool.c - see pool.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // syscall, pthread_sigmask
#endif
#include "pool.h"

#include "fpenv.h"
#include "llamac.h"

#if defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// ---- waiting: some microseconds awake, then asleep

enum { SPINS = 4000 };

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Returns when the gate's number is no longer `number`.
static void gate_wait(struct gate *gate, int32_t number, int spins) {
    for (int i = 0; i < spins; i++) {
        if (__atomic_load_n(&gate->number, __ATOMIC_ACQUIRE) != number) return;
        relax();
    }
    // sequentially consistent: either the opener sees the sleeper, or the sleeper sees the new number
    __atomic_add_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&gate->number, __ATOMIC_SEQ_CST) == number) {
#if defined(__linux__)
        syscall(SYS_futex, &gate->number, FUTEX_WAIT_PRIVATE, number, 0, 0, 0);
#else
        sched_yield();
#endif
    }
    __atomic_sub_fetch(&gate->sleepers, 1, __ATOMIC_RELAXED);
}

static void gate_open(struct gate *gate, int32_t number) {
    __atomic_store_n(&gate->number, number, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&gate->sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &gate->number, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
#endif
}

void pool_barrier(const struct member *member) {
    struct barrier *b = member->barrier;
    if (member->count == 1) return;
    const int32_t round = __atomic_load_n(&b->round.number, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL) == b->members) {
        __atomic_store_n(&b->arrived, 0, __ATOMIC_RELAXED);
        gate_open(&b->round, round + 1);
    } else {
        gate_wait(&b->round, round, SPINS);
    }
}

// ---- the thread that owns the team

static struct {
    pthread_mutex_t turn;             // held by the caller whose run it is
    int started;
    struct gate posted, finished;     // numbers of runs; the owner waits at the first, the caller at the second
    int threads;
    void (*work)(void *argument, const struct member *member);
    void *argument;
} team = { .turn = PTHREAD_MUTEX_INITIALIZER };

static void run_team(void) {
    struct barrier barrier = { 0 };
    #pragma omp parallel num_threads(team.threads)
    {
        const struct member member = { omp_get_thread_num(), omp_get_num_threads(), &barrier };
        // the team may be smaller than asked for: every member knows its size before the first barrier
        #pragma omp single
        barrier.members = member.count;
        fp_control control = fp_enter();
        team.work(team.argument, &member);
        fp_leave(control);
    }
}

static void *own_team(void *unused) {
    (void)unused;
    for (int32_t done = team.finished.number;; done++) {
        gate_wait(&team.posted, done, 0);
        run_team();
        gate_open(&team.finished, done + 1);
    }
    return NULL;
}

// In a child process our threads do not exist, and the turn may have been held: start from nothing.
static void forget_team(void) {
    pthread_mutex_init(&team.turn, NULL);
    team.started = 0;
    team.posted = team.finished = (struct gate){ 0 };
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_team); }

// With the turn held. 0 if a thread cannot be had.
static int start_team(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_t owner;
    if (team.started) return 1;
    pthread_once(&once, watch_forks);
    // signals are the host's business: its threads take them, ours (which inherit this mask) never do
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    team.started = pthread_create(&owner, NULL, own_team, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (team.started) pthread_detach(owner);
    return team.started;
}

static int run_on_team(int threads, void (*work)(void *argument, const struct member *member), void *argument) {
    pthread_mutex_lock(&team.turn);
    const int started = start_team();
    if (started) {
        const int32_t before = team.finished.number;
        team.threads = threads, team.work = work, team.argument = argument;
        gate_open(&team.posted, before + 1);
        gate_wait(&team.finished, before, 0);   // asleep at once: the team needs this core
    }
    pthread_mutex_unlock(&team.turn);
    return started;
}

int llamac_has_threads(void) { return 1; }

#else
void pool_barrier(const struct member *member) { (void)member; }
static int run_on_team(int threads, void (*work)(void *argument, const struct member *member), void *argument) {
    (void)threads, (void)work, (void)argument;
    return 0;
}
int llamac_has_threads(void) { return 0; }
#endif

void pool_run(int threads, void (*work)(void *argument, const struct member *member), void *argument) {
    if (threads > 1 && run_on_team(threads, work, argument)) return;
    struct barrier barrier = { .members = 1 };
    const struct member alone = { 0, 1, &barrier };
    fp_control control = fp_enter();
    work(argument, &alone);
    fp_leave(control);
}
