// SPDX-License-Identifier: MIT
// test_pool.c - the thread team: every member works, barriers hold, teams grow, and members that lose their CPUs to
// other programs sleep.
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

enum { ROUNDS = 40, LARGE = 9 };

static void sleep_us(long microseconds) {
    const struct timespec pause = { .tv_nsec = 1000 * microseconds };
    nanosleep(&pause, NULL);
}

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// The state of a thread of this process: 'R' if it runs or could, 'S' if it sleeps.
static char state_of(const char *thread) {
    char path[300], line[300] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    const char *name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return name_end ? name_end[2] : 0;
}

// ---- barriers

struct sums { int count, calls[POOL_MAX]; int32_t total; int wrong; };

// Each member adds 1 per round. Between the two barriers of a round all members must see the same total.
static void add_up(void *argument, const struct member *member) {
    struct sums *s = argument;
    if (member->index == 0) s->count = member->count;
    s->calls[member->index]++;
    for (int round = 1; round <= ROUNDS; round++) {
        __atomic_add_fetch(&s->total, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
        if (__atomic_load_n(&s->total, __ATOMIC_RELAXED) != round * member->count)
            __atomic_store_n(&s->wrong, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
    }
}

// Returns the team's size.
static int check_run(int threads) {
    static struct sums s;
    struct contention c = { 0 };
    memset(&s, 0, sizeof s);
    pool_run(&(struct pool_job){ threads, 0, add_up, &s }, &c, NULL);
    CHECK(s.count >= 1 && s.count <= threads, "%d of %d threads", s.count, threads);
    CHECK(!s.wrong && s.total == ROUNDS * s.count, "%d threads: total %d", s.count, s.total);
    for (int i = 0; i < POOL_MAX; i++)
        CHECK(s.calls[i] == (i < s.count), "%d threads: member %d was called %d times", s.count, i, s.calls[i]);
    return s.count;
}

static void every_member_passes_every_barrier(void) {
    const int most = llamac_has_threads() ? LARGE : 1;
    for (int threads = 1; threads <= LARGE; threads++) {
        const int count = check_run(threads);
        CHECK(count == (threads < most ? threads : most), "%d of %d threads", count, threads);
    }
    for (int i = 0; i < 200; i++) check_run(1 + i * 7 % LARGE);   // larger and smaller teams in turn
}

// ---- the queue of callers

static void *call_often(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) {
        struct contention c = { 0 };
        struct sums *s = take(sizeof *s);
        pool_run(&(struct pool_job){ 2 + i % 3, 0, add_up, s }, &c, NULL);
        const int ok = !s->wrong && s->total == ROUNDS * s->count && s->calls[0] == 1;
        free(s);
        if (!ok) return "a run went wrong";
    }
    return NULL;
}

static void callers_share_the_team(void) {
    pthread_t callers[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&callers[i], NULL, call_often, NULL) == 0, "caller %d", i);
    for (int i = 0; i < 4; i++) {
        void *problem = NULL;
        pthread_join(callers[i], &problem);
        CHECK(!problem, "caller %d: %s", i, (const char *)problem);
    }
}

struct holder { int32_t started, stop; };

static void hold_team(void *argument, const struct member *member) {
    struct holder *h = argument;
    __atomic_store_n(&h->started, 1, __ATOMIC_RELAXED);
    while (member->index == 0 && !__atomic_load_n(&h->stop, __ATOMIC_RELAXED)) sleep_us(1000);
}

static void *run_holder(void *holder) {
    struct contention c = { 0 };
    pool_run(&(struct pool_job){ 2, 0, hold_team, holder }, &c, NULL);
    return NULL;
}

struct cancellable { int32_t request; struct cancel cancel; struct sums *sums; };

static void *run_cancellable(void *caller) {
    struct cancellable *c = caller;
    struct contention contention = { 0 };
    pool_run(&(struct pool_job){ 2, 0, add_up, c->sums }, &contention, &c->cancel);
    return NULL;
}

static void callers_in_the_queue_can_be_cancelled(void) {
    if (!llamac_has_threads()) return;
    struct holder holder = { 0 };
    struct cancellable callers[3];
    pthread_t holding, waiting[3];
    CHECK(pthread_create(&holding, NULL, run_holder, &holder) == 0, "holder");
    while (!__atomic_load_n(&holder.started, __ATOMIC_RELAXED)) sched_yield();
    for (int i = 0; i < 3; i++) {
        callers[i] = (struct cancellable){ .cancel = { &callers[i].request, 0 }, .sums = take(sizeof(struct sums)) };
        CHECK(pthread_create(&waiting[i], NULL, run_cancellable, &callers[i]) == 0, "caller %d", i);
    }
    sleep_us(20000);   // they queue in some order
    for (int i = 0; i < 2; i++) {   // the holder still has the team
        __atomic_store_n(&callers[i].request, 1, __ATOMIC_RELAXED);
        pthread_join(waiting[i], NULL);
        CHECK(callers[i].cancel.seen && callers[i].sums->total == 0, "caller %d was not cancelled", i);
    }
    __atomic_store_n(&holder.stop, 1, __ATOMIC_RELAXED);
    pthread_join(holding, NULL);
    pthread_join(waiting[2], NULL);
    const struct sums *third = callers[2].sums;
    CHECK(!callers[2].cancel.seen && third->count > 0 && third->total == ROUNDS * third->count,
          "the third caller did not run");
    for (int i = 0; i < 3; i++) free(callers[i].sums);
    check_run(3);
}

enum { MAX_RUNS = 5 };
struct order { char runs[MAX_RUNS]; int n; };   // names of runs, in the order in which they started

// A caller in another thread. id: of the thread, 0 until it has started. sleep_us: how long its run takes at least.
// started, ended: when its run did, 0 before.
struct caller {
    struct order *order;
    char name;
    int32_t id;
    pthread_t thread;
    int is_short, sleep_us, is_guest;
    int64_t started, ended;
};

static void note_run(void *caller, const struct member *member) {
    struct caller *c = caller;
    if (member->index) return;
    c->order->runs[c->order->n++] = c->name;
    c->is_guest = member->is_guest;
    c->started = clock_ns();
    sleep_us(c->sleep_us);
    c->ended = clock_ns();
}

static void *run_caller(void *caller) {
    struct caller *c = caller;
    struct contention contention = { 0 };
    __atomic_store_n(&c->id, (int32_t)syscall(SYS_gettid), __ATOMIC_RELAXED);
    pool_run(&(struct pool_job){ 2, c->is_short, note_run, c }, &contention, NULL);
    return NULL;
}

// Starts a caller while the team is busy, and waits until it sleeps in the queue.
static void queue_caller(struct caller *c) {
    char thread[20];
    int32_t id;
    CHECK(pthread_create(&c->thread, NULL, run_caller, c) == 0, "caller %c", c->name);
    while (!(id = __atomic_load_n(&c->id, __ATOMIC_RELAXED))) sleep_us(100);
    snprintf(thread, sizeof thread, "%d", id);
    while (state_of(thread) != 'S') sleep_us(100);
}

static void callers_get_the_team_in_their_order(void) {
    if (!llamac_has_threads()) return;
    struct holder holder = { 0 };
    struct order order = { .n = 0 };
    struct caller callers[MAX_RUNS];
    pthread_t holding;
    CHECK(pthread_create(&holding, NULL, run_holder, &holder) == 0, "holder");
    while (!__atomic_load_n(&holder.started, __ATOMIC_RELAXED)) sched_yield();
    for (int i = 0; i < MAX_RUNS; i++) {
        callers[i] = (struct caller){ .order = &order, .name = (char)('a' + i) };
        queue_caller(&callers[i]);
    }
    __atomic_store_n(&holder.stop, 1, __ATOMIC_RELAXED);
    pthread_join(holding, NULL);
    for (int i = 0; i < MAX_RUNS; i++) pthread_join(callers[i].thread, NULL);
    CHECK(!memcmp(order.runs, "abcde", MAX_RUNS), "the order is %.5s", order.runs);
}

static void note_and_queue_another(void *other, const struct member *member) {
    struct caller *c = other;
    if (member->index) return;
    c->order->runs[c->order->n++] = '1';
    queue_caller(c);
}

static void a_caller_queues_again_after_those_that_wait(void) {
    for (int i = 0; i < 50 && llamac_has_threads(); i++) {
        struct order order = { .n = 0 };
        struct caller other = { .order = &order, .name = 'o' }, again = { .order = &order, .name = '2' };
        struct contention c = { 0 };
        pool_run(&(struct pool_job){ 2, 0, note_and_queue_another, &other }, &c, NULL);
        pool_run(&(struct pool_job){ 2, 0, note_run, &again }, &c, NULL);
        pthread_join(other.thread, NULL);
        CHECK(!memcmp(order.runs, "1o2", 3), "the order is %.3s", order.runs);
    }
}

// ---- guests of a long run

struct host { struct order *order; struct caller *callers; int n_callers, pauses; };

// Waits until all callers have queued, then pauses.
static void queue_and_pause(void *argument, const struct member *member) {
    struct host *h = argument;
    for (int i = 0; i < h->n_callers && !member->index; i++) queue_caller(&h->callers[i]);
    pool_barrier(member);
    for (int i = 0; i < h->pauses; i++) {
        pool_pause(member);
        pool_barrier(member);
        if (!member->index) h->order->runs[h->order->n++] = '.';
        sleep_us(1000);
    }
}

static void run_host(struct host *h, pool_work *work, int is_short) {
    struct contention c = { 0 };
    pool_run(&(struct pool_job){ 2, is_short, work, h }, &c, NULL);
    for (int i = 0; i < h->n_callers; i++) pthread_join(h->callers[i].thread, NULL);
}

static void short_runs_pass_long_ones_at_their_pauses(void) {
    if (!llamac_has_threads()) return;
    struct order order = { .n = 0 };
    struct caller callers[] = { { .order = &order, .name = 'l' }, { .order = &order, .name = 's', .is_short = 1 } };
    struct host host = { &order, callers, 2, 2 };
    run_host(&host, queue_and_pause, 0);
    CHECK(order.n == 4 && !memcmp(order.runs, "s..l", 4), "the order is %.5s", order.runs);
    CHECK(callers[1].is_guest && !callers[0].is_guest, "the wrong run was a guest");

    order.n = 0;
    callers[0].id = callers[1].id = 0;
    run_host(&host, queue_and_pause, 1);
    CHECK(order.n == 4 && !memcmp(order.runs, "..ls", 4), "a short run let others through: %.5s", order.runs);
}

// Pauses until both callers have run as guests, for at most 20 s.
static void pause_until_both_ran(void *argument, const struct member *member) {
    struct host *h = argument;
    for (int i = 0; i < h->n_callers && !member->index; i++) queue_caller(&h->callers[i]);
    for (int pause = 0, ended = 0; !ended && pause < 20000; pause++) {
        pool_barrier(member);
        ended = h->callers[0].ended && h->callers[1].ended;
        pool_barrier(member);
        pool_pause(member);
        sleep_us(1000);
    }
}

static void a_long_run_keeps_half_of_the_time(void) {
    if (!llamac_has_threads()) return;
    struct order order = { .n = 0 };
    struct caller callers[] = { { .order = &order, .name = 's', .is_short = 1, .sleep_us = 20000 },
                                { .order = &order, .name = 't', .is_short = 1, .sleep_us = 20000 } };
    struct host host = { &order, callers, 2, 0 };
    run_host(&host, pause_until_both_ran, 0);
    CHECK(callers[0].is_guest && callers[1].is_guest, "not both were guests: %.2s", order.runs);
    // The pool's own times enclose these, so the time that it keeps is no shorter.
    const int64_t taken = callers[0].ended - callers[0].started, kept = callers[1].started - callers[0].ended;
    CHECK(!memcmp(order.runs, "st", 2) && kept >= taken, "after a guest of %.1f ms the host computed for %.1f ms",
          taken * 1e-6, kept * 1e-6);
}

// Barriers and pauses in turn, in another order for each member's delays.
static void pause_often(void *argument, const struct member *member) {
    struct sums *s = argument;
    for (int round = 1; round <= ROUNDS; round++) {
        __atomic_add_fetch(&s->total, 1, __ATOMIC_RELAXED);
        for (int i = 0; i < 3; i++) {
            if ((round + member->index) % 4 == i) sleep_us(50);
            pool_pause(member);
        }
        pool_barrier(member);
        if (__atomic_load_n(&s->total, __ATOMIC_RELAXED) != round * member->count)
            __atomic_store_n(&s->wrong, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
        if (round % 3 == 0) pool_pause(member);
    }
    if (member->index == 0) s->count = member->count;
}

struct guests { int32_t done, runs, as_guest; };

static void note_guest(void *argument, const struct member *member) {
    struct sums *s = argument;
    if (member->index == 0) s->wrong = -member->is_guest;
    add_up(s, member);
}

static void *run_short_often(void *argument) {
    struct guests *g = argument;
    for (int i = 0; !__atomic_load_n(&g->done, __ATOMIC_RELAXED); i++) {
        struct contention c = { 0 };
        struct sums *s = take(sizeof *s);
        memset(s, 0, sizeof *s);
        // with fewer members than the host, as many, or more
        pool_run(&(struct pool_job){ 2 + i % 4, 1, note_guest, s }, &c, NULL);
        const int ok = s->wrong <= 0 && s->total == ROUNDS * s->count;
        __atomic_add_fetch(&g->as_guest, -s->wrong, __ATOMIC_RELAXED);
        __atomic_add_fetch(&g->runs, 1, __ATOMIC_RELAXED);
        free(s);
        if (!ok) return "a short run went wrong";
    }
    return NULL;
}

static void guests_and_hosts_keep_their_barriers(void) {
    struct guests guests = { 0 };
    struct contention c = { 0 };
    pthread_t callers[3];
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&callers[i], NULL, run_short_often, &guests), "caller %d", i);
    for (int i = 0; i < 12; i++) {
        struct sums *s = take(sizeof *s);
        memset(s, 0, sizeof *s);
        pool_run(&(struct pool_job){ 2 + i % 3, 0, pause_often, s }, &c, NULL);
        CHECK(!s->wrong && s->total == ROUNDS * s->count, "%d members: total %d", s->count, s->total);
        free(s);
    }
    __atomic_store_n(&guests.done, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++) {
        void *problem = NULL;
        pthread_join(callers[i], &problem);
        CHECK(!problem, "caller %d: %s", i, (const char *)problem);
    }
    CHECK(!llamac_has_threads() || guests.as_guest, "none of %d short runs was a guest", guests.runs);
}

// ---- busy machines

struct late { int count, index; };

// Member late->index arrives at the barrier 2 ms late, as if another program had its CPU.
static void arrive_late(void *argument, const struct member *member) {
    struct late *late = argument;
    if (member->index == 0) late->count = member->count;
    if (member->index == late->index) sleep_us(2000);
    pool_barrier(member);
}

// CPUs of the team; a larger team never spins.
static int cpu_count(void) {
    cpu_set_t cpus;
    return llamac_has_threads() && !sched_getaffinity(0, sizeof cpus, &cpus) ? CPU_COUNT(&cpus) : 1;
}

#if defined(__linux__) && defined(RUSAGE_THREAD)
// Replaces the function from which the pool learns how often a thread was preempted. Real preemption depends on the
// machine and its load; here each call counts one if `preempting` is set.
static int preempting;
int getrusage(__rusage_who_t who, struct rusage *use) {
    static __thread long preemptions;
    (void)who;
    memset(use, 0, sizeof *use);
    use->ru_nivcsw = preemptions += __atomic_load_n(&preempting, __ATOMIC_RELAXED);
    return 0;
}
static void set_preempting(int yes) { __atomic_store_n(&preempting, yes, __ATOMIC_RELAXED); }
#else
static void set_preempting(int yes) { (void)yes; }   // without RUSAGE_THREAD the pool assumes preemption
#endif

static void a_preempted_team_sleeps_for_a_while(void) {
    set_preempting(1);
    for (int index = 0; index < 2 && cpu_count() > 1; index++) {
        struct contention c = { 0 };
        struct late late = { .index = index };
        for (int run = 0; run < 100 && !c.sleep_until; run++)
            pool_run(&(struct pool_job){ 2, 0, arrive_late, &late }, &c, NULL);
        CHECK(c.sleep_until > 0, "member %d is late: the team does not sleep", index);
        // runs of a sleeping team are not judged
        const struct contention before = c;
        pool_run(&(struct pool_job){ 2, 0, arrive_late, &late }, &c, NULL);
        CHECK(!memcmp(&before, &c, sizeof c) || clock_ns() > before.sleep_until, "member %d is late: judged", index);
        CHECK(late.count == 2, "%d members", late.count);
        // later the team spins again, and is judged again
        int again = 0;
        for (int run = 0; run < 100000 && !again; run++) {
            pool_run(&(struct pool_job){ 2, 0, arrive_late, &late }, &c, NULL);
            again = c.sleep_until != before.sleep_until;
        }
        CHECK(again, "member %d is late: the team sleeps forever", index);
    }
    set_preempting(0);
}

#if defined(__linux__) && defined(RUSAGE_THREAD)
// A member may be late for another reason, such as memory or a disk.
static void a_late_team_that_was_not_preempted_does_not_sleep(void) {
    struct contention c = { 0 };
    struct late late = { .index = 1 };
    for (int window = 0; window < 5; window++) {
        do pool_run(&(struct pool_job){ 2, 0, arrive_late, &late }, &c, NULL); while (c.run_ns > 0);
        CHECK(!c.sleep_until, "the team sleeps");
    }
}

struct bound { int cpus; };

// Member 1 binds itself to its CPU, arrives late, and reports its CPUs afterwards.
static void arrive_bound(void *argument, const struct member *member) {
    struct bound *bound = argument;
    cpu_set_t cpus;
    if (member->index == 1) {
        CPU_ZERO(&cpus);
        CPU_SET((unsigned)sched_getcpu(), &cpus);
        sched_setaffinity(0, sizeof cpus, &cpus);
        sleep_us(2000);
    }
    pool_barrier(member);
    if (member->index == 1 && !sched_getaffinity(0, sizeof cpus, &cpus)) bound->cpus = CPU_COUNT(&cpus);
}

static void a_waiting_member_moves_the_late_one_to_other_cpus(void) {
    struct contention c = { 0 };
    struct bound bound = { 0 };
    for (int run = 0; run < 100 && bound.cpus < cpu_count(); run++)
        pool_run(&(struct pool_job){ 2, 0, arrive_bound, &bound }, &c, NULL);
    CHECK(bound.cpus == cpu_count() || cpu_count() == 1, "it may run on %d CPUs", bound.cpus);
}
#endif

#if defined(__linux__)
// Reports one more CPU than there is while fake_cpu is set, so that the caller's affinity can change from run to run
// on a machine with two CPUs.
static int fake_cpu;
int sched_getaffinity(pid_t thread, size_t bytes, cpu_set_t *cpus) {
    memset(cpus, 0, bytes);
    if (syscall(SYS_sched_getaffinity, thread, bytes, cpus) < 0) return -1;
    if (fake_cpu) CPU_SET((unsigned)(CPU_SETSIZE - fake_cpu), cpus);
    return 0;
}

static void end_late(void *argument, const struct member *member) {
    (void)argument;
    if (member->index == 0) sleep_us(300);
}

// A member may still be moving others between CPUs when the next run starts with another affinity. ThreadSanitizer
// sees the data race that this could cause.
static void affinity_can_change_from_run_to_run(void) {
    struct contention c = { 0 };
    for (int run = 0; run < 200; run++) {
        fake_cpu = 1 + run % 2;
        pool_run(&(struct pool_job){ 2, 0, end_late, NULL }, &c, NULL);
    }
    fake_cpu = 0;
}
#endif

static void a_team_larger_than_its_cpus_never_spins(void) {
    struct contention c = { 0 };
    struct late late = { .index = 0 };
    for (int run = 0; run < 20; run++) pool_run(&(struct pool_job){ cpu_count() + 1, 0, arrive_late, &late }, &c, NULL);
    CHECK(c.run_ns == 0 && c.sleep_until == 0, "its runs were judged");
}

// ---- limits

#if defined(__GLIBC__)
static void measure_stack(void *argument, const struct member *member) {
    pthread_attr_t attributes;
    if (member->index == 1 && !pthread_getattr_np(pthread_self(), &attributes)) {
        pthread_attr_getstacksize(&attributes, argument);
        pthread_attr_destroy(&attributes);
    }
}

// glibc gives new threads the process's limit (ulimit -s), which can be 64 KiB. The default here is the least that
// every machine accepts. Runs first, before the team has threads.
static void threads_have_a_large_stack_whatever_the_limit(void) {
    pthread_attr_t small, original;
    struct contention c = { 0 };
    size_t stack_bytes = 0;
    if (!llamac_has_threads()) return;
    pthread_attr_init(&small);
    CHECK(!pthread_getattr_default_np(&original) && !pthread_attr_setstacksize(&small, 128 << 10)
          && !pthread_setattr_default_np(&small), "cannot set the default");
    pool_run(&(struct pool_job){ 2, 0, measure_stack, &stack_bytes }, &c, NULL);
    pthread_setattr_default_np(&original);
    pthread_attr_destroy(&small), pthread_attr_destroy(&original);
    CHECK(stack_bytes >= 256 << 10, "the stack has %zu bytes", stack_bytes);
}
#endif

static void too_many_threads_are_rejected_or_reduced(void) {
    static float block[64 * 16];
    llamac_error err;
    uint64_t n;
    CHECK(llamac_measure_read(block, ARRAY_LEN(block), 1, POOL_MAX + 1, 1, NULL, &n, &err) < 0
          && err.code == LLAMAC_BAD_ARGUMENT && strstr(err.message, "threads is 1025, expected 1 to 1024"), "%s",
          err.message);
    CHECK(llamac_measure_multiply(LLAMAC_F32, LLAMAC_EXACT, 1, 2000, NULL, &n, &err) < 0
          && err.code == LLAMAC_BAD_ARGUMENT, "%s", err.message);
    if (emulated) return;
    struct contention c = { 0 };
    struct late late = { .index = -1 };
    pool_run(&(struct pool_job){ INT32_MAX, 0, arrive_late, &late }, &c, NULL);
    CHECK(late.count >= 1 && late.count <= POOL_MAX, "%d members", late.count);
}

// ---- idle threads

// Threads of this process that run or could, not counting the caller.
static int running_threads(void) {
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (const struct dirent *task; tasks && (task = readdir(tasks));)
        n += task->d_name[0] != '.' && state_of(task->d_name) == 'R';
    if (tasks) closedir(tasks);
    return n - 1;
}

static void idle_members_sleep(void) {
    check_run(LARGE);
    for (int polls = 0; running_threads() > 0 && polls < 400; polls++) sleep_us(5000);
    CHECK(running_threads() <= 0, "%d threads still run", running_threads());
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
#if defined(__GLIBC__)
    RUN(threads_have_a_large_stack_whatever_the_limit);
#endif
    RUN(every_member_passes_every_barrier);
    RUN(callers_share_the_team);
    RUN(callers_in_the_queue_can_be_cancelled);
    RUN(callers_get_the_team_in_their_order);
    RUN(a_caller_queues_again_after_those_that_wait);
    RUN(short_runs_pass_long_ones_at_their_pauses);
    RUN(a_long_run_keeps_half_of_the_time);
    RUN(guests_and_hosts_keep_their_barriers);
    RUN(idle_members_sleep);
    RUN(a_preempted_team_sleeps_for_a_while);
#if defined(__linux__) && defined(RUSAGE_THREAD)
    RUN(a_late_team_that_was_not_preempted_does_not_sleep);
    RUN(a_waiting_member_moves_the_late_one_to_other_cpus);
#endif
#if defined(__linux__)
    RUN(affinity_can_change_from_run_to_run);
#endif
    RUN(a_team_larger_than_its_cpus_never_spins);
    RUN(too_many_threads_are_rejected_or_reduced);
    return finish_tests("test_pool");
}
