// SPDX-License-Identifier: MIT
// pool.c - the thread team: its threads, its barrier, and how members wait. See pool.h.
//
// OpenMP determines how many threads the host allows and where it binds them (OMP_THREAD_LIMIT, OMP_PROC_BIND,
// OMP_PLACES). The threads themselves are plain pthreads: GCC's OpenMP ends the process when it cannot create a thread,
// takes the stack size from the environment, and hangs in a forked child.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // syscall, CPU_COUNT
#endif
#include "pool.h"

#include "clock.h"
#include "fpenv.h"
#include "llamac.h"
#include "nodes.h"

// A run that this caller has begun. count: its members, 1 if the caller computes alone; 0: there is nothing left to do,
// because the job was done as a guest or cancelled.
struct run { int count; int64_t spin_ns, started; struct contention *contention; };

#if defined(_OPENMP)
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if !defined(__linux__) && !defined(POOL_WITHOUT_FUTEX)
#define POOL_WITHOUT_FUTEX   // a test defines it on Linux
#endif

// ---- events: spin briefly, then sleep

enum {
    SECOND_NS = 1000000000,
    FIRST_POLLS = 100,          // polls of an event before the clock is read
    SPIN_NS = 500000,           // longer than members of a large model lag behind, shorter than a time slice
    STACKED_NS = 100000,        // a member missing for this long may be queued on the CPU of a member that waits for it
    LATE_NS = 1000000,          // a member that lost its CPU to another program is at least this late
    CANCEL_POLL_NS = 5000000,   // a queued caller checks its cancel flag this often
};

// Threads wait for `number` to change.
struct event { uint32_t number, sleepers; };

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if !defined(POOL_WITHOUT_FUTEX)
// Sleeps while the event's number is `number`: until a signal, or for at most timeout_ns unless that is 0. May return
// early.
static void park(struct event *event, uint32_t number, int64_t timeout_ns) {
    const struct timespec timeout = { .tv_sec = timeout_ns / SECOND_NS, .tv_nsec = timeout_ns % SECOND_NS };
    syscall(SYS_futex, &event->number, FUTEX_WAIT_PRIVATE, number, timeout_ns ? &timeout : NULL, 0, 0);
}
static void unpark_all(struct event *event) {
    syscall(SYS_futex, &event->number, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}
static void reset_parking_lot(void) {}
#else
// Sleeping threads, hashed by the address of their event. Events that share a bucket wake each other's sleepers, which
// then check their own event again.
enum { BUCKETS = 64 };
static struct bucket { pthread_mutex_t lock; pthread_cond_t signalled; } buckets[BUCKETS] = {
    [0 ... BUCKETS - 1] = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER }
};
static struct bucket *bucket_of(const struct event *event) { return &buckets[(uintptr_t)event / 64 % BUCKETS]; }

static void park(struct event *event, uint32_t number, int64_t timeout_ns) {
    struct bucket *bucket = bucket_of(event);
    struct timespec until;   // by the only clock that every system's conditions support
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (until.tv_nsec + timeout_ns) / SECOND_NS;
    until.tv_nsec = (until.tv_nsec + timeout_ns) % SECOND_NS;
    pthread_mutex_lock(&bucket->lock);
    if (__atomic_load_n(&event->number, __ATOMIC_SEQ_CST) == number) {
        if (timeout_ns) pthread_cond_timedwait(&bucket->signalled, &bucket->lock, &until);
        else pthread_cond_wait(&bucket->signalled, &bucket->lock);
    }
    pthread_mutex_unlock(&bucket->lock);
}

static void unpark_all(struct event *event) {
    struct bucket *bucket = bucket_of(event);
    pthread_mutex_lock(&bucket->lock);   // a sleeper has either seen the new number or already waits
    pthread_cond_broadcast(&bucket->signalled);
    pthread_mutex_unlock(&bucket->lock);
}

static void reset_parking_lot(void) {
    for (int i = 0; i < BUCKETS; i++) {
        pthread_mutex_init(&buckets[i].lock, NULL);
        pthread_cond_init(&buckets[i].signalled, NULL);
    }
}
#endif

// Returns whether the event's number has changed.
static int poll_event(struct event *event, uint32_t number, int polls) {
    for (int i = 0; i < polls; i++) {
        if (__atomic_load_n(&event->number, __ATOMIC_ACQUIRE) != number) return 1;
        relax();
    }
    return 0;
}

// Sleeps until the event's number is no longer `number`, or for about timeout_ns unless that is 0.
static void event_sleep(struct event *event, uint32_t number, int64_t timeout_ns) {
    // sequentially consistent: either the signaller sees the sleeper or the sleeper sees the new number
    __atomic_add_fetch(&event->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&event->number, __ATOMIC_SEQ_CST) == number) {
        park(event, number, timeout_ns);
        if (timeout_ns) break;
    }
    __atomic_sub_fetch(&event->sleepers, 1, __ATOMIC_RELAXED);
}

// Spins until the event's number is no longer `number`, or for spin_ns. Returns whether the number has changed.
static int event_spin(struct event *event, uint32_t number, int64_t spin_ns) {
    if (poll_event(event, number, spin_ns ? FIRST_POLLS : 1)) return 1;
    for (const int64_t until = now_ns() + spin_ns; now_ns() < until;)
        if (poll_event(event, number, 10)) return 1;
    return 0;
}

// Spins for up to spin_ns, then sleeps, until the event's number is no longer `number`.
static void event_wait(struct event *event, uint32_t number, int64_t spin_ns) {
    if (!event_spin(event, number, spin_ns)) event_sleep(event, number, 0);
}

// Changes the event's number and wakes its sleepers.
static void event_signal(struct event *event) {
    __atomic_add_fetch(&event->number, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&event->sleepers, __ATOMIC_SEQ_CST)) unpark_all(event);
}

// ---- the team

// A thread's stack, independent of the process's limits. Evals use about 16 KiB. C libraries put thread-local data
// there.
enum { STACK_BYTES = 512 << 10 };

#if defined(__linux__)
struct affinity { cpu_set_t cpus; uint32_t version; int count; };   // version 0: we have not set it
#else
struct affinity { uint32_t version; int count; };
#endif

// A member's state, on its own cache lines. Only the member accesses it during a run, and only the team's owner between
// runs, except for the fields marked atomic.
struct member_state {
    _Alignas(64) struct event posted;   // its number counts the runs posted to this thread
    uint32_t runs_started;              // the number of `posted` that the thread has started on
    int32_t tid;                        // the system's id of the thread, 0 if unknown; atomic
    int32_t cpu;                        // member 0: where the caller was at the last barrier; atomic
    uint32_t arrived[2];                // one more than the number of the last barrier reached, of each kind; atomic
    uint32_t pauses;                    // that the member has reached in this run
    int64_t wait_ns, end_ns;            // of this run: time at barriers; when the work was done
    long preemptions;                   // in this run; while it runs, minus the thread's preemptions before it
    struct affinity affinity;           // a copy of the team's, which may change while a member still leaves a barrier
};

// A caller in the queue. `granted` is signalled once: when the caller owns the team, or when the members have computed
// its job.
struct waiter { struct event granted; struct waiter *next; const struct pool_job *job; int is_guest; };

// Where the members of a run meet.
struct meeting {
    _Alignas(64) int32_t arrived;   // members at the barrier; atomic
    _Alignas(64) struct event barrier;
};

// A short job that the members of a long run compute at pause number `pause`.
struct guest { struct waiter *waiter; uint32_t pause; int count; int64_t started; };

static struct {
    pthread_mutex_t lock;       // guards the fields up to `guest`
    int owned;                  // a caller owns the team: only it uses the fields after `guest`
    struct waiter *queue;       // in order of arrival
    uint32_t pauses;            // of the current run that some member has reached
    int64_t no_guest_before;    // the earliest time for the next guest
    struct guest guest;         // waiter NULL: none

    int size;                   // threads, without the caller
    int64_t retry_at;           // after thread creation failed: do not try again before this time
    struct member_state members[POOL_MAX];   // the first is the caller's

    // the current run
    int count;                  // members
    int64_t spin_ns;            // atomic
    const struct pool_job *job;
    struct meeting meetings[2]; // of the run's members, and of its guest's
    struct affinity affinity;   // of the callers; count: the members that NUMA nodes are divided among
} team = { .lock = PTHREAD_MUTEX_INITIALIZER };

enum outcome { OWNER, DONE, CANCELLED };

static void leave_queue(const struct waiter *waiter) {
    struct waiter **at = &team.queue;
    while (*at != waiter) at = &(*at)->next;
    *at = waiter->next;
}

// Waits until this caller owns the team, or until its job was done as a guest, or until it was cancelled before either.
// `cancel` may be NULL.
static enum outcome acquire_team(const struct pool_job *job, struct cancel *cancel) {
    struct waiter self = { .job = job }, **last = &team.queue;
    pthread_mutex_lock(&team.lock);
    int ready = !team.owned, stop = 0;
    team.owned = 1;
    if (!ready) {
        while (*last) last = &(*last)->next;
        *last = &self;
    }
    pthread_mutex_unlock(&team.lock);
    while (!ready && !stop) {
        event_sleep(&self.granted, 0, cancel ? CANCEL_POLL_NS : 0);
        pthread_mutex_lock(&team.lock);   // no thread may still be signalling the event when this function returns
        ready = self.granted.number != 0;
        stop = !ready && !self.is_guest && cancel && cancelled(cancel);   // a guest's own work polls the flag
        if (stop) leave_queue(&self);
        pthread_mutex_unlock(&team.lock);
    }
    return stop ? CANCELLED : self.is_guest ? DONE : OWNER;
}

// Hands the team to the first caller in the queue.
static void release_team(void) {
    pthread_mutex_lock(&team.lock);
    struct waiter *next = team.queue;
    if (next) {
        team.queue = next->next;
        event_signal(&next->granted);
    } else {
        team.owned = 0;
    }
    pthread_mutex_unlock(&team.lock);
}

#if defined(__linux__)
static int32_t this_thread(void) { return (int32_t)syscall(SYS_gettid); }
static int32_t this_cpu(void) { return sched_getcpu(); }
#else
static int32_t this_thread(void) { return 0; }
static int32_t this_cpu(void) { return -1; }
#endif

// The scheduler may wake a thread on the CPU of a member that spins for it, and leave it queued there while another CPU
// is idle. The spinning member `index` therefore moves the missing members off its own CPU with an affinity that it
// reverts at once. The caller's affinity is not ours to change: if the caller is missing, the member moves itself.
static void unstack_missing_members(const struct member *member, uint32_t barrier) {
#if defined(__linux__)
    const int index = member->index;
    const struct affinity *ours = &team.members[index].affinity;
    const int cpu = this_cpu();
    if (cpu < 0 || cpu >= CPU_SETSIZE || !ours->version) return;
    for (int i = 0; i < member->count; i++) {
        const uint32_t arrived = __atomic_load_n(&team.members[i].arrived[member->is_guest], __ATOMIC_RELAXED);
        if (i == index || arrived == barrier + 1) continue;
        if (i == 0 && __atomic_load_n(&team.members[0].cpu, __ATOMIC_RELAXED) != cpu) continue;
        cpu_set_t home, others;
        nodes_cpus_of(&ours->cpus, i ? i : index, ours->count, &home);
        others = home;
        CPU_CLR((unsigned)cpu, &others);
        const int32_t tid = __atomic_load_n(&team.members[i ? i : index].tid, __ATOMIC_RELAXED);
        if (tid && sched_setaffinity(tid, sizeof others, &others) == 0) sched_setaffinity(tid, sizeof home, &home);
    }
#else
    (void)member, (void)barrier;
#endif
}

// Returns how often this thread has lost its CPU to another thread. On systems that do not count this, the result grows
// with every call.
static long preemptions(void) {
#if defined(RUSAGE_THREAD)
    struct rusage use;
    getrusage(RUSAGE_THREAD, &use);
    return use.ru_nivcsw;
#else
    static __thread long calls;
    return calls++;
#endif
}

// What the last member to arrive at a barrier calls; work NULL: nothing.
struct last_call { pool_work *work; void *argument; };

// Waits for all members. Returns the nanoseconds of waiting, 0 for a short wait.
static int64_t barrier_wait(const struct member *member, struct last_call last) {
    struct meeting *meeting = &team.meetings[member->is_guest];
    struct member_state *state = &team.members[member->index];
    const uint32_t number = __atomic_load_n(&meeting->barrier.number, __ATOMIC_RELAXED);
    const int64_t spin_ns = __atomic_load_n(&team.spin_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&state->arrived[member->is_guest], number + 1, __ATOMIC_RELAXED);
    if (member->index == 0) __atomic_store_n(&state->cpu, this_cpu(), __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_ACQ_REL) == member->count) {
        __atomic_store_n(&meeting->arrived, 0, __ATOMIC_RELAXED);
        if (last.work) last.work(last.argument, member);
        event_signal(&meeting->barrier);
        return 0;
    }
    if (poll_event(&meeting->barrier, number, spin_ns ? FIRST_POLLS : 1)) return 0;
    const int64_t started = now_ns();
    if (spin_ns && !event_spin(&meeting->barrier, number, STACKED_NS)) unstack_missing_members(member, number);
    event_wait(&meeting->barrier, number, spin_ns);
    return now_ns() - started;
}

static void meet(const struct member *member, struct last_call last) {
    if (member->count == 1) return;
    struct member_state *state = &team.members[member->index];
    const int64_t wait_ns = barrier_wait(member, last);
    if (member->is_guest) return;   // members of a guest arrive from different points of another run
    state->wait_ns += wait_ns;
    // other programs compete for the CPUs, and spinning would make it worse: this run stops spinning
    if (wait_ns > LATE_NS && state->preemptions + preemptions() > 0)
        __atomic_store_n(&team.spin_ns, 0, __ATOMIC_RELAXED);
}

void pool_barrier(const struct member *member) { meet(member, (struct last_call){ 0 }); }

void pool_barrier_with(const struct member *member, pool_work *last, void *argument) {
    meet(member, (struct last_call){ last, argument });
}

// ---- guests

// Chooses the guest of a pause when the first member reaches it: the first short job in the queue. A long run keeps at
// least half of the time: after a guest, it computes for as long as the guest did before it accepts the next one.
static void choose_guest(void) {
    struct waiter *waiter = team.queue;
    while (waiter && !waiter->job->is_short) waiter = waiter->next;
    if (team.guest.waiter || !waiter) return;
    const int64_t now = now_ns();
    if (now < team.no_guest_before) return;
    leave_queue(waiter);
    waiter->is_guest = 1;
    team.guest = (struct guest){ .waiter = waiter, .pause = team.pauses, .started = now,
                                 .count = min_int(waiter->job->threads, team.count) };
}

// Computes a member's part of a guest. Member 0 ends the guest after all members have finished their work.
static void join_guest(int index, struct guest guest) {
    const struct member member = { index, guest.count, 1, NULL };
    guest.waiter->job->work(guest.waiter->job->argument, &member);   // with the control word of the host's run
    barrier_wait(&member, (struct last_call){ 0 });
    if (index) return;
    const int64_t now = now_ns();
    pthread_mutex_lock(&team.lock);
    team.no_guest_before = now + (now - guest.started);
    team.guest = (struct guest){ 0 };
    event_signal(&guest.waiter->granted);
    pthread_mutex_unlock(&team.lock);
}

// The first member that reaches a pause decides for all of them. The guest remains set until all its members have
// computed it, so later members still find it.
void pool_pause(const struct member *member) {
    if (member->count == 1 || member->is_guest || team.job->is_short) return;
    const uint32_t pause = ++team.members[member->index].pauses;
    pthread_mutex_lock(&team.lock);
    if (pause > team.pauses) {
        team.pauses = pause;
        choose_guest();
    }
    const struct guest guest = team.guest;
    pthread_mutex_unlock(&team.lock);
    if (guest.waiter && guest.pause == pause && member->index < guest.count) join_guest(member->index, guest);
}

// ---- members

// Begins a member's part of a run.
static struct member member_begin(int index) {
    struct member_state *state = &team.members[index];
    state->wait_ns = 0;
    state->pauses = 0;
    state->preemptions = -preemptions();
    return (struct member){ index, team.count, 0, NULL };
}

// Ends it at the barrier of all members.
static void member_end(const struct member *member) {
    struct member_state *state = &team.members[member->index];
    state->end_ns = now_ns();
    state->preemptions += preemptions();
    barrier_wait(member, (struct last_call){ 0 });
}

// Sets the affinity of a pool thread to that of the callers, restricted to the member's NUMA node if there are several.
static void adopt_team_affinity(struct member_state *state) {
#if defined(__linux__)
    if (state->affinity.version == team.affinity.version) return;
    state->affinity = team.affinity;
    if (state == team.members) return;
    cpu_set_t cpus;
    nodes_cpus_of(&state->affinity.cpus, (int)(state - team.members), state->affinity.count, &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);
#else
    (void)state;
#endif
}

// If OpenMP binds threads, it has bound the calling thread, and pool threads inherit its affinity. Each pool thread
// then binds itself to another place.
static void bind_to_place(int index) {
#if defined(__linux__)
    const int n_places = omp_get_proc_bind() == omp_proc_bind_false ? 0 : omp_get_num_places();
    if (n_places < 1 || omp_get_place_num_procs(index % n_places) > CPU_SETSIZE) return;
    int ids[CPU_SETSIZE];
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    omp_get_place_proc_ids(index % n_places, ids);
    for (int i = 0; i < omp_get_place_num_procs(index % n_places); i++)
        if (ids[i] >= 0 && ids[i] < CPU_SETSIZE) CPU_SET((unsigned)ids[i], &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);
#else
    (void)index;
#endif
}

// The main function of a thread of the team. Does not return.
static void *serve(void *argument) {
    struct member_state *state = argument;
    const int index = (int)(state - team.members);
    __atomic_store_n(&state->tid, this_thread(), __ATOMIC_RELAXED);
    bind_to_place(index);
    for (int64_t spin_ns = SPIN_NS;; state->runs_started++) {
        event_wait(&state->posted, state->runs_started, spin_ns);
        spin_ns = __atomic_load_n(&team.spin_ns, __ATOMIC_RELAXED);
        adopt_team_affinity(state);
        const struct member member = member_begin(index);
        const fp_control control = fp_control_reset();
        team.job->work(team.job->argument, &member);
        fp_control_restore(control);
        member_end(&member);
    }
    return NULL;
}

// Starts a new team in a forked child, where the pool threads and the queued callers do not exist and the team may have
// been owned.
static void reset_team(void) {
    memset(&team, 0, sizeof team);
    pthread_mutex_init(&team.lock, NULL);
    reset_parking_lot();
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, reset_team); }

static int start_thread(struct member_state *state) {
    pthread_t thread;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return -1;
    const int failed = pthread_attr_setstacksize(&attributes, STACK_BYTES) ||
                       pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED) ||
                       pthread_create(&thread, &attributes, serve, state);
    pthread_attr_destroy(&attributes);
    return failed ? -1 : 0;
}

// Grows the team to `threads` members, including the caller, as far as the system grants threads.
static void grow_team(int threads, int64_t now) {
    if (team.size + 1 >= threads || now < team.retry_at) return;
    // signals are for the host's threads: pool threads inherit a mask that blocks all
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (team.size + 1 < threads && !start_thread(&team.members[team.size + 1])) team.size++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (team.size + 1 < threads) team.retry_at = now + SECOND_NS;
}

// Adopts the caller's affinity for the run. Returns the number of its CPUs, or `threads` if the system does not say.
static int update_affinity(int threads) {
#if defined(__linux__)
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus)) return threads;
    const int n = CPU_COUNT(&cpus);
    // a host that pins the caller to few CPUs does not mean pool threads; if OpenMP binds threads, they stay in place
    const int divided = nodes_are_several() && team.affinity.count != threads;
    if (n >= threads && (divided || !CPU_EQUAL(&cpus, &team.affinity.cpus)) &&
        omp_get_proc_bind() == omp_proc_bind_false)
        team.affinity = (struct affinity){ cpus, team.affinity.version + 1, threads };
    adopt_team_affinity(&team.members[0]);
    return n;
#else
    return threads;
#endif
}

// Begins a run. With more than one member, the caller owns the team until run_end.
static struct run run_begin(const struct pool_job *job, struct contention *contention, struct cancel *cancel) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct run run = { .count = 1, .contention = contention };
    if (job->threads <= 1) return run;
    pthread_once(&once, watch_forks);   // before any fork can copy an owned team
    if (acquire_team(job, cancel) != OWNER) return (struct run){ 0 };
    const int threads = min_int(job->threads, POOL_MAX);
    const int64_t now = now_ns();
    const int cpus = update_affinity(threads);
    grow_team(min_int(threads, omp_get_thread_limit()), now);
    run.count = min_int(team.size + 1, threads);
    if (run.count <= 1) {
        release_team();
        return run;
    }
    run.spin_ns = run.count <= cpus && now >= contention->sleep_until ? SPIN_NS : 0;
    team.count = run.count, team.job = job, team.pauses = 0;
    __atomic_store_n(&team.spin_ns, run.spin_ns, __ATOMIC_RELAXED);
    for (int i = 1; i < run.count; i++) event_signal(&team.members[i].posted);
    run.started = now_ns();
    return run;
}

// Ends a run of more than one member, after member 0 has ended.
static void run_end(const struct run *run) {
    const int64_t now = now_ns();
    struct run_report report = { .run_ns = now - run->started };
    for (int i = 0; i < run->count; i++) {
        report.wait_ns += (team.members[i].wait_ns + now - team.members[i].end_ns) / run->count;
        report.preemptions += team.members[i].preemptions;
    }
    if (run->spin_ns) contention_judge(run->contention, run->count, report);
    release_team();
}

// A fork waits for the lock, so that the child does not inherit it locked by a thread that does not exist there.
static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static void lock_process(void) { pthread_mutex_lock(&process_lock); }
static void unlock_process(void) { pthread_mutex_unlock(&process_lock); }
static void watch_lock(void) { pthread_atfork(lock_process, unlock_process, unlock_process); }

void pool_lock(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_lock);
    lock_process();
}
void pool_unlock(void) { unlock_process(); }

int llamac_has_threads(void) { return 1; }

#else
static char process_lock;   // the host may have threads
void pool_lock(void) {
    while (__atomic_test_and_set(&process_lock, __ATOMIC_ACQUIRE)) {}
}
void pool_unlock(void) { __atomic_clear(&process_lock, __ATOMIC_RELEASE); }

void pool_barrier(const struct member *member) { (void)member; }
void pool_barrier_with(const struct member *member, pool_work *last, void *argument) {
    (void)member, (void)last, (void)argument;
}
void pool_pause(const struct member *member) { (void)member; }
static struct member member_begin(int index) { return (struct member){ index, 1, 0, NULL }; }
static void member_end(const struct member *member) { (void)member; }
static struct run run_begin(const struct pool_job *job, struct contention *contention, struct cancel *cancel) {
    (void)job, (void)contention, (void)cancel;
    return (struct run){ .count = 1 };
}
static void run_end(const struct run *run) { (void)run; }
int llamac_has_threads(void) { return 0; }
#endif

void pool_run(const struct pool_job *job, struct contention *contention, struct cancel *cancel) {
    const struct run run = run_begin(job, contention, cancel);
    if (!run.count) return;
    const struct member alone = { 0, 1, 0, NULL }, member = run.count > 1 ? member_begin(0) : alone;
    const fp_control control = fp_control_reset();
    job->work(job->argument, &member);
    fp_control_restore(control);
    if (run.count > 1) {
        member_end(&member);
        run_end(&run);
    }
}
