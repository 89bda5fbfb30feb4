// SPDX-License-Identifier: MIT
// test_pool.c - the team of threads: everybody takes part, barriers hold, teams grow, and those that lose their CPUs
// sleep.
#include "pool.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "llamac.h"
#include "test.h"

static int emulated;   // the programs run in an emulator: it may not have a thousand threads
enum { ROUNDS = 40, LARGE = 9 };

// What a thread of this process does: 'R' runs or could, 'S' sleeps.
static char state_of(const char *thread) {
    char path[300], line[300] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    const char *name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return name_end ? name_end[2] : 0;
}

struct sums { int count, came[POOL_MAX]; int32_t total; int wrong; };

// Each round everybody adds one; between two barriers everybody must see the same total.
static void add_up(void *argument, const struct member *member) {
    struct sums *s = argument;
    if (member->index == 0) s->count = member->count;
    s->came[member->index]++;
    for (int round = 1; round <= ROUNDS; round++) {
        __atomic_add_fetch(&s->total, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
        if (__atomic_load_n(&s->total, __ATOMIC_RELAXED) != round * member->count) __atomic_store_n(&s->wrong, 1,
            __ATOMIC_RELAXED);
        pool_barrier(member);
    }
}

static int check_run(int threads) {
    static struct sums s;
    struct contention c = { 0 };
    memset(&s, 0, sizeof s);
    pool_run(threads, &c, NULL, add_up, &s);
    CHECK(s.count >= 1 && s.count <= threads, "%d of %d", s.count, threads);
    CHECK(!s.wrong && s.total == ROUNDS * s.count, "%d threads: total %d", s.count, s.total);
    for (int i = 0; i < POOL_MAX; i++) CHECK(s.came[i] == (i < s.count), "%d threads: %d came %d times", s.count, i,
        s.came[i]);
    return s.count;
}

static void every_member_passes_every_barrier(void) {
    const int most = llamac_has_threads() ? LARGE : 1;
    CHECK(check_run(1) == 1, "alone");
    for (int threads = 2; threads <= LARGE; threads++) CHECK(check_run(threads) == (threads < most ? threads : most),
        "%d threads", threads);
    for (int i = 0; i < 200; i++) check_run(1 + i * 7 % LARGE);   // larger and smaller in turn
}

static void *call_often(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) {
        struct contention c = { 0 };
        struct sums *s = take(sizeof *s);
        pool_run(2 + i % 3, &c, NULL, add_up, s);
        if (s->wrong || s->total != ROUNDS * s->count) s->came[0] = -1;
        const int failed = s->came[0] != 1;
        free(s);
        if (failed) return s;
    }
    return NULL;
}

static void callers_take_turns(void) {
    pthread_t callers[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&callers[i], NULL, call_often, NULL) == 0, "caller %d", i);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        pthread_join(callers[i], &failed);
        CHECK(!failed, "caller %d", i);
    }
}

struct taking { int32_t begun, end; };

// A turn that lasts until it is told to end.
static void take_long(void *argument, const struct member *member) {
    struct taking *t = argument;
    const struct timespec pause = { .tv_nsec = 1000000 };
    __atomic_store_n(&t->begun, 1, __ATOMIC_RELAXED);
    while (member->index == 0 && !__atomic_load_n(&t->end, __ATOMIC_RELAXED)) nanosleep(&pause, NULL);
}

static void *call_long(void *taking) {
    struct contention c = { 0 };
    pool_run(2, &c, NULL, take_long, taking);
    return NULL;
}

struct waiting { struct cancel cancel; struct sums *sums; };

static void *call_cancellable(void *waiting) {
    struct waiting *w = waiting;
    struct contention c = { 0 };
    pool_run(2, &c, &w->cancel, add_up, w->sums);
    return NULL;
}

static void who_waits_for_a_turn_can_be_cancelled(void) {
    if (!llamac_has_threads()) return;
    struct taking taking = { 0 };
    pthread_t holder, callers[3];
    int32_t requests[3] = { 0 };
    struct waiting waiting[3];
    const struct timespec pause = { .tv_nsec = 20000000 };
    CHECK(pthread_create(&holder, NULL, call_long, &taking) == 0, "holder");
    while (!__atomic_load_n(&taking.begun, __ATOMIC_RELAXED)) sched_yield();
    for (int i = 0; i < 3; i++) {
        waiting[i] = (struct waiting){ { &requests[i], 0 }, take(sizeof(struct sums)) };
        CHECK(pthread_create(&callers[i], NULL, call_cancellable, &waiting[i]) == 0, "caller %d", i);
    }
    nanosleep(&pause, NULL);   // they wait, in some order
    for (int i = 0; i < 2; i++) {   // while it is still the holder's turn
        __atomic_store_n(&requests[i], 1, __ATOMIC_RELAXED);
        pthread_join(callers[i], NULL);
        CHECK(waiting[i].cancel.seen && waiting[i].sums->total == 0, "caller %d computed", i);
    }
    __atomic_store_n(&taking.end, 1, __ATOMIC_RELAXED);
    pthread_join(holder, NULL);
    pthread_join(callers[2], NULL);
    CHECK(!waiting[2].cancel.seen && waiting[2].sums->total == ROUNDS * waiting[2].sums->count,
        "the third gets its turn");
    for (int i = 0; i < 3; i++) free(waiting[i].sums);
    check_run(3);
}

struct order { char came[3]; int n; pthread_t other; int32_t other_id; };

static void *call_as_other(void *order);

static void come(struct order *o, char who) { o->came[o->n++] = who; }
static void come_again(void *order, const struct member *member) { if (member->index == 0) come(order, 'a'); }
static void come_as_other(void *order, const struct member *member) { if (member->index == 0) come(order, 'o'); }

// A turn in which another caller begins to wait, which shows in its sleep.
static void come_first(void *order, const struct member *member) {
    struct order *o = order;
    const struct timespec pause = { .tv_nsec = 100000 };
    char thread[20];
    if (member->index) return;
    come(o, 'f');
    CHECK(pthread_create(&o->other, NULL, call_as_other, o) == 0, "caller");
    int32_t id;
    while (!(id = __atomic_load_n(&o->other_id, __ATOMIC_RELAXED))) nanosleep(&pause, NULL);
    snprintf(thread, sizeof thread, "%d", id);
    while (state_of(thread) != 'S') nanosleep(&pause, NULL);
}

static void *call_as_other(void *order) {
    struct contention c = { 0 };
    __atomic_store_n(&((struct order *)order)->other_id, (int32_t)syscall(SYS_gettid), __ATOMIC_RELAXED);
    pool_run(2, &c, NULL, come_as_other, order);
    return NULL;
}

static void who_calls_again_goes_behind_those_who_wait(void) {
    for (int i = 0; i < 50 && llamac_has_threads(); i++) {
        struct order order = { .n = 0 };
        struct contention c = { 0 };
        pool_run(2, &c, NULL, come_first, &order);
        pool_run(2, &c, NULL, come_again, &order);
        pthread_join(order.other, NULL);
        CHECK(!memcmp(order.came, "foa", 3), "they came as %.3s", order.came);
    }
}

// ---- busy machines

struct late { int count, index; };

// One member comes 2 ms after all others, as if another program had its CPU.
static void be_late(void *argument, const struct member *member) {
    struct late *late = argument;
    const struct timespec pause = { .tv_nsec = 2000000 };
    if (member->index == 0) late->count = member->count;
    if (member->index == late->index) nanosleep(&pause, NULL);
    pool_barrier(member);
}

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// CPUs that a team may have; more members than that never spin.
static int cpu_count(void) {
    cpu_set_t cpus;
    return llamac_has_threads() && !sched_getaffinity(0, sizeof cpus, &cpus) ? CPU_COUNT(&cpus) : 1;
}

#if defined(__linux__) && defined(RUSAGE_THREAD)
// The core asks here how often a thread has lost its CPU. Whether a scheduler takes one away depends on the machine and
// the moment, so the tests say it themselves: a thread has lost as many as it asked times with `loses_cpus` set.
static int loses_cpus;
int getrusage(__rusage_who_t who, struct rusage *use) {
    static __thread long lost;
    (void)who;
    memset(use, 0, sizeof *use);
    use->ru_nivcsw = lost += __atomic_load_n(&loses_cpus, __ATOMIC_RELAXED);
    return 0;
}
static void lose_cpus(int yes) { __atomic_store_n(&loses_cpus, yes, __ATOMIC_RELAXED); }
#else
static void lose_cpus(int yes) { (void)yes; }   // there the core takes it for granted
#endif

static void a_team_that_loses_its_cpus_goes_to_sleep_for_a_while(void) {
    lose_cpus(1);
    for (int index = 0; index < 2 && cpu_count() > 1; index++) {
        struct contention c = { 0 };
        struct late late = { .index = index };
        for (int run = 0; run < 100 && !c.sleep_until; run++) pool_run(2, &c, NULL, be_late, &late);
        CHECK(c.sleep_until > 0, "member %d is late", index);
        // what comes while the team sleeps is not counted
        const struct contention before = c;
        pool_run(2, &c, NULL, be_late, &late);
        CHECK(!memcmp(&before, &c, sizeof c) || clock_ns() > before.sleep_until, "member %d is late", index);
        CHECK(late.count == 2, "%d", late.count);
        // in time spinning is tried again, and judged
        int again = 0;
        for (int run = 0; run < 100000 && !again; run++) {
            pool_run(2, &c, NULL, be_late, &late);
            again = c.sleep_until != before.sleep_until;
        }
        CHECK(again, "member %d is late", index);
    }
    lose_cpus(0);
}

#if defined(__linux__) && defined(RUSAGE_THREAD)
// Who waits for memory or a disk, say, has not lost its CPU.
static void a_team_that_keeps_its_cpus_stays_awake(void) {
    struct contention c = { 0 };
    struct late late = { .index = 1 };
    for (int window = 0; window < 5; window++) {
        do pool_run(2, &c, NULL, be_late, &late); while (c.run_ns > 0);
        CHECK(!c.sleep_until, "it went to sleep");
    }
}

struct bound { int cpus; };

// The second member binds itself to one CPU and comes late.
static void be_bound(void *argument, const struct member *member) {
    struct bound *bound = argument;
    const struct timespec pause = { .tv_nsec = 2000000 };
    cpu_set_t cpus;
    if (member->index == 1) {
        const int cpu = sched_getcpu();
        CPU_ZERO(&cpus);
        CPU_SET((unsigned)cpu, &cpus);
        sched_setaffinity(0, sizeof cpus, &cpus);
        nanosleep(&pause, NULL);
    }
    pool_barrier(member);
    if (member->index == 1 && !sched_getaffinity(0, sizeof cpus, &cpus)) bound->cpus = CPU_COUNT(&cpus);
}

static void who_is_late_is_sent_to_another_cpu(void) {
    struct contention c = { 0 };
    struct bound bound = { 0 };
    for (int run = 0; run < 100 && bound.cpus < cpu_count(); run++) pool_run(2, &c, NULL, be_bound, &bound);
    CHECK(bound.cpus == cpu_count() || cpu_count() == 1, "it may run on %d CPUs", bound.cpus);
}
#endif

#if defined(__linux__)
// Callers whose affinity changes before every run, and a member that is still making room for the others when the next
// run begins. The data race between the two shows under ThreadSanitizer only. The affinity is faked, so that a machine
// with two CPUs has two sets that fit.
static int fake_cpu;
int sched_getaffinity(pid_t thread, size_t bytes, cpu_set_t *cpus) {
    memset(cpus, 0, bytes);
    const long held = syscall(SYS_sched_getaffinity, thread, bytes, cpus);
    if (held < 0) return -1;
    if (fake_cpu) CPU_SET((unsigned)(CPU_SETSIZE - fake_cpu), cpus);
    return 0;
}

static void be_late_at_the_end(void *argument, const struct member *member) {
    const struct timespec pause = { .tv_nsec = 300000 };
    (void)argument;
    if (member->index == 0) nanosleep(&pause, NULL);
}

static void affinity_may_change_from_run_to_run(void) {
    struct contention c = { 0 };
    for (int run = 0; run < 200; run++) {
        fake_cpu = 1 + run % 2;
        pool_run(2, &c, NULL, be_late_at_the_end, NULL);
    }
    fake_cpu = 0;
}
#endif

static void a_team_larger_than_its_cpus_sleeps_at_once(void) {
    struct contention c = { 0 };
    struct late late = { .index = 0 };
    for (int run = 0; run < 20; run++) pool_run(cpu_count() + 1, &c, NULL, be_late, &late);
    CHECK(c.run_ns == 0 && c.sleep_until == 0, "it learned of spinning");
}

// ---- limits

#if defined(__GLIBC__)
struct stacks { size_t least; };

static void measure_stack(void *argument, const struct member *member) {
    struct stacks *s = argument;
    pthread_attr_t attributes;
    size_t bytes = 0;
    if (member->index == 1 && !pthread_getattr_np(pthread_self(), &attributes)) {
        pthread_attr_getstacksize(&attributes, &bytes);
        pthread_attr_destroy(&attributes);
        s->least = bytes;
    }
}

// glibc gives new threads a stack as large as the process's limit (ulimit -s), which can be 64 KiB. The default here is
// the smallest that every machine accepts (aarch64's minimum). Runs before any other test.
static void threads_get_a_stack_whatever_the_limit(void) {
    pthread_attr_t small, sound;
    struct contention c = { 0 };
    struct stacks stacks = { 0 };
    if (!llamac_has_threads()) return;
    pthread_attr_init(&small);
    CHECK(!pthread_getattr_default_np(&sound) && !pthread_attr_setstacksize(&small, 128 << 10)
        && !pthread_setattr_default_np(&small), "a small default");
    pool_run(2, &c, NULL, measure_stack, &stacks);
    pthread_setattr_default_np(&sound);
    pthread_attr_destroy(&small), pthread_attr_destroy(&sound);
    CHECK(stacks.least >= 256 << 10, "the stack has %zu bytes", stacks.least);
}
#endif

static void too_many_threads_are_refused_or_cut(void) {
    static float block[64 * 16];
    llamac_error err;
    uint64_t n;
    CHECK(llamac_measure_read(block, ARRAY_LEN(block), 1, POOL_MAX + 1, 1, NULL, &n, &err) < 0
        && err.code == LLAMAC_BAD_ARGUMENT, "read");
    CHECK(strstr(err.message, "threads is 1025, expected 1 to 1024"), "%s", err.message);
    CHECK(llamac_measure_multiply(LLAMAC_F32, 1, 2000, NULL, &n, &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT,
        "multiply");
    if (emulated) return;
    struct contention c = { 0 };
    struct late late = { .index = -1 };
    pool_run(INT32_MAX, &c, NULL, be_late, &late);
    CHECK(late.count >= 1 && late.count <= POOL_MAX, "%d members", late.count);
}

// ---- idle

// Threads of this process beside the caller that run or could.
static int awake(void) {
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (const struct dirent *task; tasks && (task = readdir(tasks));) n += task->d_name[0] != '.'
        && state_of(task->d_name) == 'R';
    if (tasks) closedir(tasks);
    return n - 1;
}

static void idle_members_sleep(void) {
    const struct timespec pause = { .tv_nsec = 5000000 };
    check_run(LARGE);
    int looks = 0;
    while (awake() > 0 && looks < 400) looks++, nanosleep(&pause, NULL);
    CHECK(awake() <= 0, "%d threads are awake", awake());
}

int main(int argc, char **argv) {
    emulated = argc > 1 && !strcmp(argv[1], "--emulated");
#if defined(__GLIBC__)
    RUN(threads_get_a_stack_whatever_the_limit);
#endif
    RUN(every_member_passes_every_barrier);
    RUN(callers_take_turns);
    RUN(who_waits_for_a_turn_can_be_cancelled);
    RUN(who_calls_again_goes_behind_those_who_wait);
    RUN(idle_members_sleep);
    RUN(a_team_that_loses_its_cpus_goes_to_sleep_for_a_while);
#if defined(__linux__) && defined(RUSAGE_THREAD)
    RUN(a_team_that_keeps_its_cpus_stays_awake);
    RUN(who_is_late_is_sent_to_another_cpu);
#endif
#if defined(__linux__)
    RUN(affinity_may_change_from_run_to_run);
#endif
    RUN(a_team_larger_than_its_cpus_sleeps_at_once);
    RUN(too_many_threads_are_refused_or_cut);
    return finish_tests("test_pool");
}
