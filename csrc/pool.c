// SPDX-License-Identifier: MIT
// pool.c - the team's threads and how they wait. See pool.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // syscall, pthread_sigmask, CPU_COUNT
#endif
#include "pool.h"

#include "fpenv.h"
#include "llamac.h"

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
#define POOL_WITHOUT_FUTEX   // tests define it, too
#endif

// ---- waiting: some microseconds awake, then asleep

enum {
    GLANCES = 100,            // looks at a gate before the clock is read for the first time
    SECOND_NS = 1000000000,
    SPIN_NS = 500000,         // awake at a gate: over what one member of a large model is late, under a scheduler's slice
    CROWDED_NS = 100000,      // awake so long at a barrier: who is late may be queued behind the one that waits
    LATE_NS = 1000000,        // who comes so late may have lost its CPU to another program
    WINDOW_NS = 10000000,     // runs are judged together when they have taken this long
    REST = 32,                // a bad window is followed by that many times its length without spinning
    LOOK_NS = 5000000,        // who waits for a turn looks that often whether it shall stop
};

// A number that threads wait to see change.
struct gate { uint32_t number, sleepers; };

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

#if !defined(POOL_WITHOUT_FUTEX)
// Asleep while the gate's number is `number`, until it is opened, or for most_ns if that is not 0; may also return early.
static void sleep_at(struct gate *gate, uint32_t number, int64_t most_ns) {
    const struct timespec most = { .tv_sec = most_ns / SECOND_NS, .tv_nsec = most_ns % SECOND_NS };
    syscall(SYS_futex, &gate->number, FUTEX_WAIT_PRIVATE, number, most_ns ? &most : NULL, 0, 0);
}
static void wake_at(struct gate *gate) { syscall(SYS_futex, &gate->number, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }
static void forget_sleepers(void) {}
#else
// Where threads sleep, by the address of their gate. Those of different gates may meet here: they are woken together and look again.
enum { BEDS = 64 };
static struct bed { pthread_mutex_t lock; pthread_cond_t opened; } beds[BEDS] = { [0 ... BEDS - 1] = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER } };
static struct bed *bed_of(const struct gate *gate) { return &beds[(uintptr_t)gate / 64 % BEDS]; }

static void sleep_at(struct gate *gate, uint32_t number, int64_t most_ns) {
    struct bed *bed = bed_of(gate);
    struct timespec until;   // of the clock that every system's conditions know; where it is set back, the sleep becomes longer
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (until.tv_nsec + most_ns) / SECOND_NS, until.tv_nsec = (until.tv_nsec + most_ns) % SECOND_NS;
    pthread_mutex_lock(&bed->lock);
    if (__atomic_load_n(&gate->number, __ATOMIC_SEQ_CST) != number) {}
    else if (most_ns) pthread_cond_timedwait(&bed->opened, &bed->lock, &until);
    else pthread_cond_wait(&bed->opened, &bed->lock);
    pthread_mutex_unlock(&bed->lock);
}

static void wake_at(struct gate *gate) {
    struct bed *bed = bed_of(gate);
    pthread_mutex_lock(&bed->lock);   // a sleeper has either seen the new number or lies down already
    pthread_cond_broadcast(&bed->opened);
    pthread_mutex_unlock(&bed->lock);
}

static void forget_sleepers(void) {
    for (int i = 0; i < BEDS; i++) pthread_mutex_init(&beds[i].lock, NULL), pthread_cond_init(&beds[i].opened, NULL);
}
#endif

static int changed(struct gate *gate, uint32_t number, int looks) {
    for (int i = 0; i < looks; i++) {
        if (__atomic_load_n(&gate->number, __ATOMIC_ACQUIRE) != number) return 1;
        relax();
    }
    return 0;
}

// Asleep until the gate's number is no longer `number`, or for about most_ns if that is not 0.
static void gate_sleep(struct gate *gate, uint32_t number, int64_t most_ns) {
    // sequentially consistent: either the opener sees the sleeper, or the sleeper sees the new number
    __atomic_add_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&gate->number, __ATOMIC_SEQ_CST) == number) {
        sleep_at(gate, number, most_ns);
        if (most_ns) break;
    }
    __atomic_sub_fetch(&gate->sleepers, 1, __ATOMIC_RELAXED);
}

// Awake until the gate's number is no longer `number`, or for spin_ns. Whether it has changed.
static int gate_spin(struct gate *gate, uint32_t number, int64_t spin_ns) {
    if (changed(gate, number, spin_ns ? GLANCES : 1)) return 1;
    for (const int64_t until = now_ns() + spin_ns; now_ns() < until;)
        if (changed(gate, number, 10)) return 1;
    return 0;
}

// Returns when the gate's number is no longer `number`. Awake for spin_ns, asleep after that.
static void gate_wait(struct gate *gate, uint32_t number, int64_t spin_ns) {
    if (!gate_spin(gate, number, spin_ns)) gate_sleep(gate, number, 0);
}

static void gate_open(struct gate *gate) {
    __atomic_add_fetch(&gate->number, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&gate->sleepers, __ATOMIC_SEQ_CST)) wake_at(gate);
}

// ---- the team

// A thread of ours waits here. Each on its own cache line.
struct seat {
    _Alignas(64) struct gate posted;
    uint32_t seen;            // the last number of `posted` that was taken up
    uint32_t places;          // the team's `places` that the thread is bound to
    int32_t thread;           // its number in the system, 0 if there is none
    uint32_t met;             // the round after the last one that the member has come to
    int32_t cpu;              // the caller's at that time
    int64_t waited, ended;    // nanoseconds of this run at barriers; when the work was done
    long lost;                // CPUs that the thread lost to another one in this run; during it, less those lost before it
};

// A caller that waits for its turn; its gate is opened once.
struct caller { struct gate called; struct caller *next; };

static struct {
    pthread_mutex_t lock;     // of the next two
    int taken;                // it is somebody's turn, and only they use what is below
    struct caller *waiting;   // in the order in which they came

    int started;              // there is a thread that owns the region
    int size;                 // members, the caller included; 0: not known yet
    int wanted;               // what the region is to be opened with
    int refused;              // as many could not be had, and are not asked for
    int64_t refused_until;    // before this time
    struct gate ready;        // the region is open
    struct seat seats[POOL_MAX];   // the first is the caller's, where nothing is posted

    // the run
    int count;
    int64_t spin_ns;
    void (*work)(void *argument, const struct member *member);
    void *argument;
    _Alignas(64) int32_t arrived;
    _Alignas(64) struct gate round;

#if defined(__linux__)
    cpu_set_t cpus;           // where the caller of the last run might run
    uint32_t places;          // counts changes of it; 0: nobody's choice but the system's
#endif
} team = { .lock = PTHREAD_MUTEX_INITIALIZER };

// Waits for the turn, behind all who came before. 0 if the caller was told to stop before that; `cancel` may be NULL.
static int take_turn(struct cancel *cancel) {
    struct caller self = { 0 }, **last = &team.waiting;
    pthread_mutex_lock(&team.lock);
    int mine = !team.taken, stop = 0;
    team.taken = 1;
    if (!mine) {
        while (*last) last = &(*last)->next;
        *last = &self;
    }
    pthread_mutex_unlock(&team.lock);
    while (!mine && !stop) {
        gate_sleep(&self.called, 0, cancel ? LOOK_NS : 0);
        pthread_mutex_lock(&team.lock);   // who called has left our gate by now, and nobody calls while we leave the queue
        mine = self.called.number != 0;
        stop = !mine && cancel && cancelled(cancel);
        if (stop) {
            for (last = &team.waiting; *last != &self; last = &(*last)->next) {}
            *last = self.next;
        }
        pthread_mutex_unlock(&team.lock);
    }
    return mine;
}

// Hands the turn over to the first who waits.
static void give_turn(void) {
    pthread_mutex_lock(&team.lock);
    struct caller *next = team.waiting;
    if (next) {
        team.waiting = next->next;
        gate_open(&next->called);
    } else {
        team.taken = 0;
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

// A scheduler may put a thread that wakes on the CPU of one that waits for it awake, and leave it there, queued, while another CPU is
// idle. The member `index` asks the system to keep who has not come to this round off its own CPU; if that is the caller, whose affinity
// is not ours, it moves itself. Afterwards all may run everywhere again.
static void make_room(int index, int count, uint32_t round) {
#if defined(__linux__)
    cpu_set_t others = team.cpus;
    const int cpu = this_cpu();
    if (cpu < 0 || cpu >= CPU_SETSIZE || !team.places) return;
    CPU_CLR((unsigned)cpu, &others);
    for (int i = 0; i < count; i++) {
        if (i == index || __atomic_load_n(&team.seats[i].met, __ATOMIC_RELAXED) == round + 1) continue;
        if (i == 0 && __atomic_load_n(&team.seats[0].cpu, __ATOMIC_RELAXED) != cpu) continue;
        const int32_t thread = __atomic_load_n(&team.seats[i ? i : index].thread, __ATOMIC_RELAXED);
        if (thread && sched_setaffinity(thread, sizeof others, &others) == 0) sched_setaffinity(thread, sizeof team.cpus, &team.cpus);
    }
#else
    (void)index, (void)count, (void)round;
#endif
}

// How often this thread has lost its CPU to another one so far. Where nobody counts that, it grows with every call.
static long cpus_lost(void) {
#if defined(RUSAGE_THREAD)
    struct rusage use;
    getrusage(RUSAGE_THREAD, &use);
    return use.ru_nivcsw;
#else
    static __thread long calls;
    return calls++;
#endif
}

// Returns the nanoseconds of waiting, 0 for few.
static int64_t meet(int index, int count) {
    const uint32_t round = __atomic_load_n(&team.round.number, __ATOMIC_RELAXED);
    const int64_t spin_ns = __atomic_load_n(&team.spin_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&team.seats[index].met, round + 1, __ATOMIC_RELAXED);
    if (index == 0) __atomic_store_n(&team.seats[0].cpu, this_cpu(), __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == count) {
        __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
        gate_open(&team.round);
        return 0;
    }
    if (changed(&team.round, round, spin_ns ? GLANCES : 1)) return 0;
    const int64_t started = now_ns();
    if (spin_ns && !gate_spin(&team.round, round, CROWDED_NS)) make_room(index, count, round);
    gate_wait(&team.round, round, spin_ns);
    return now_ns() - started;
}

void pool_barrier(const struct member *member) {
    if (member->count == 1) return;
    struct seat *seat = &team.seats[member->index];
    const int64_t waited = meet(member->index, member->count);
    seat->waited += waited;
    if (waited > LATE_NS && seat->lost + cpus_lost() > 0) __atomic_store_n(&team.spin_ns, 0, __ATOMIC_RELAXED);   // no more in this run
}

static void work_as(const struct member *member, void (*work)(void *argument, const struct member *member), void *argument) {
    fp_control control = fp_enter();
    work(argument, member);
    fp_leave(control);
}

// A member's part of a run, up to the meeting at its end.
static void take_part(int index) {
    const struct member member = { index, team.count };
    struct seat *seat = &team.seats[index];
    seat->waited = 0;
    seat->lost = -cpus_lost();
    work_as(&member, team.work, team.argument);
    seat->ended = now_ns();
    seat->lost += cpus_lost();
    meet(index, member.count);
}

static void sit(struct seat *seat, int32_t thread) { __atomic_store_n(&seat->thread, thread, __ATOMIC_RELAXED); }
// A thread's life in the region. It ends when the team has to grow.
static void serve(int index) {
    struct seat *seat = &team.seats[index];
    sit(seat, this_thread());
    for (int64_t spin_ns = SPIN_NS;;) {
        gate_wait(&seat->posted, seat->seen, spin_ns);
        seat->seen++;
        if (team.size == 0) break;
        spin_ns = __atomic_load_n(&team.spin_ns, __ATOMIC_RELAXED);
#if defined(__linux__)
        if (seat->places != team.places) sched_setaffinity(0, sizeof team.cpus, &team.cpus);
        seat->places = team.places;
#endif
        take_part(index);
    }
    sit(seat, 0);
}

static void *own_team(void *unused) {
    (void)unused;
    for (;;) {
        #pragma omp parallel num_threads(team.wanted - 1)
        {
            // the region may be smaller than asked for: the first run must know
            #pragma omp single
            {
                team.size = omp_get_num_threads() + 1;
                gate_open(&team.ready);
            }
            serve(omp_get_thread_num() + 1);
        }
    }
    return NULL;
}

// In a child process our threads and waiting callers do not exist, and it may have been somebody's turn: start from nothing.
static void forget_team(void) {
    memset(&team, 0, sizeof team);
    pthread_mutex_init(&team.lock, NULL);
    forget_sleepers();
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_team); }

static void *wait_for(void *gate) {
    gate_wait(gate, 0, 0);
    return NULL;
}

// Whether n more threads can be had now. GCC's OpenMP ends the process where it cannot have its threads: it is not asked before this is known.
static int can_have(int n) {
    pthread_t threads[POOL_MAX];
    struct gate end = { 0 };
    int had = 0;
    while (had < n && pthread_create(&threads[had], NULL, wait_for, &end) == 0) had++;
    gate_open(&end);
    for (int i = 0; i < had; i++) pthread_join(threads[i], NULL);
    return had == n;
}

// In the caller's turn: makes the team as large as `threads`, if that can be had.
static void grow_team(int threads, int64_t now) {
    if (team.wanted >= threads || (threads >= team.refused && now < team.refused_until)) return;
    const uint32_t ready = team.ready.number;
    const int starts = !team.started;
    // signals are the host's business: its threads take them, ours (which inherit this mask) never do
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int had = can_have(threads - (team.wanted > 1 ? team.wanted : 1));
    if (had && starts) {
        pthread_t owner;
        team.wanted = threads;
        had = team.started = pthread_create(&owner, NULL, own_team, NULL) == 0;
        if (had) pthread_detach(owner);
        else team.wanted = 0;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!had) {   // trying costs dozens of threads where a team is large: not at every run
        team.refused = threads, team.refused_until = now + SECOND_NS;
        return;
    }
    if (!starts) {
        team.wanted = threads;
        const int members = team.size;
        team.size = 0;
        for (int i = 1; i < members; i++) gate_open(&team.seats[i].posted);
    }
    gate_wait(&team.ready, ready, 0);
}

// Our threads follow the caller to the CPUs that it may run on. How many there are for the run; `threads` if nobody knows.
static int follow_cpus(int threads) {
#if defined(__linux__)
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus)) return threads;
    const int n = CPU_COUNT(&cpus);
    // a caller that is alone on its CPU has been placed there by somebody who did not think of our threads, nor has who binds OpenMP's
    if (n >= threads && !CPU_EQUAL(&cpus, &team.cpus) && omp_get_proc_bind() == omp_proc_bind_false) team.cpus = cpus, team.places++;
    return n;
#else
    return threads;
#endif
}

// What a run says of the machine: nanoseconds that it took and that a member waited on average, and how many CPUs members lost.
struct run { int64_t ran, waited; long lost; };

// In the caller's turn.
static struct run run_team(int count, int64_t spin_ns, void (*work)(void *argument, const struct member *member), void *argument) {
    team.count = count, team.work = work, team.argument = argument;
    __atomic_store_n(&team.spin_ns, spin_ns, __ATOMIC_RELAXED);
    for (int i = 1; i < count; i++) gate_open(&team.seats[i].posted);
    const int64_t started = now_ns();
    take_part(0);
    const int64_t now = now_ns();
    struct run run = { .ran = now - started };
    for (int i = 0; i < count; i++) run.waited += (team.seats[i].waited + now - team.seats[i].ended) / count, run.lost += team.seats[i].lost;
    return run;
}

// ---- whether to spin

// While one member works or has lost its CPU to another program, n - 1 wait. A team that got on with its work less than half of the
// time, and not because of its own (pages that came late, say), would do better asleep: its threads then take their CPUs back as soon as
// they have something to do, whereas the scheduler counts spinning as their share of the time.
static void learn(struct pace *pace, int count, struct run run) {
    pace->ran += run.ran, pace->waited += run.waited, pace->lost += run.lost;
    if (pace->ran < WINDOW_NS) return;
    if (pace->lost && pace->waited * count / (count - 1) > pace->ran / 2) pace->asleep_until = now_ns() + REST * pace->ran;
    pace->ran = pace->waited = pace->lost = 0;
}

// 0 if there is no team, and the caller must compute alone.
static int run_on_team(int threads, struct pace *pace, struct cancel *cancel, void (*work)(void *argument, const struct member *member), void *argument) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);   // before there is a turn that a fork could find taken
    if (!take_turn(cancel)) return 1;
    const int64_t started = now_ns();
    const int cpus = follow_cpus(threads);
    grow_team(threads, started);
    const int count = team.size < threads ? team.size : threads;
    if (count > 1) {
        const int64_t spin_ns = count <= cpus && started >= pace->asleep_until ? SPIN_NS : 0;
        const struct run run = run_team(count, spin_ns, work, argument);
        if (spin_ns) learn(pace, count, run);
    }
    give_turn();
    return count > 1;
}

int llamac_has_threads(void) { return 1; }

#else
void pool_barrier(const struct member *member) { (void)member; }
static int run_on_team(int threads, struct pace *pace, struct cancel *cancel, void (*work)(void *argument, const struct member *member), void *argument) {
    (void)threads, (void)pace, (void)cancel, (void)work, (void)argument;
    return 0;
}
static void work_as(const struct member *member, void (*work)(void *argument, const struct member *member), void *argument) {
    fp_control control = fp_enter();
    work(argument, member);
    fp_leave(control);
}
int llamac_has_threads(void) { return 0; }
#endif

void pool_run(int threads, struct pace *pace, struct cancel *cancel, void (*work)(void *argument, const struct member *member), void *argument) {
    if (threads > 1 && run_on_team(min_int(threads, POOL_MAX), pace, cancel, work, argument)) return;
    const struct member alone = { 0, 1 };
    work_as(&alone, work, argument);
}
