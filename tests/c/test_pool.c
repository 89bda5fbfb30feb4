// SPDX-License-Identifier: MIT
// test_pool.c - the team of threads: everybody takes part, barriers hold, teams grow, and shrink while their members mostly wait.
#include "pool.h"

#include <pthread.h>
#include <time.h>
#include "llamac.h"
#include "test.h"

enum { ROUNDS = 40, LARGE = 9 };

struct sums { int count, came[POOL_MAX]; int32_t total; int wrong; };

// Each round everybody adds one; between two barriers everybody must see the same total.
static void add_up(void *argument, const struct member *member) {
    struct sums *s = argument;
    if (member->index == 0) s->count = member->count;
    s->came[member->index]++;
    for (int round = 1; round <= ROUNDS; round++) {
        __atomic_add_fetch(&s->total, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
        if (__atomic_load_n(&s->total, __ATOMIC_RELAXED) != round * member->count) __atomic_store_n(&s->wrong, 1, __ATOMIC_RELAXED);
        pool_barrier(member);
    }
}

static int check_run(int threads) {
    static struct sums s;
    struct pace pace = { 0 };
    memset(&s, 0, sizeof s);
    pool_run(threads, &pace, add_up, &s);
    CHECK(s.count >= 1 && s.count <= threads, "%d of %d", s.count, threads);
    CHECK(!s.wrong && s.total == ROUNDS * s.count, "%d threads: total %d", s.count, s.total);
    for (int i = 0; i < POOL_MAX; i++) CHECK(s.came[i] == (i < s.count), "%d threads: %d came %d times", s.count, i, s.came[i]);
    return s.count;
}

static void every_member_passes_every_barrier(void) {
    const int most = llamac_has_threads() ? LARGE : 1;
    CHECK(check_run(1) == 1, "alone");
    for (int threads = 2; threads <= LARGE; threads++) CHECK(check_run(threads) == (threads < most ? threads : most), "%d threads", threads);
    for (int i = 0; i < 200; i++) check_run(1 + i * 7 % LARGE);   // larger and smaller in turn
}

static void *call_often(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) {
        struct pace pace = { 0 };
        struct sums *s = take(sizeof *s);
        pool_run(2 + i % 3, &pace, add_up, s);
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

// ---- how many

struct late { int count, index; };

// One member comes 2 ms after all others, as if another program had its CPU.
static void be_late(void *argument, const struct member *member) {
    struct late *late = argument;
    const struct timespec pause = { .tv_nsec = 2000000 };
    if (member->index == 0) late->count = member->count;
    if (member->index == late->index && member->count > 1) nanosleep(&pause, NULL);
    pool_barrier(member);
}

static void a_team_that_mostly_waits_shrinks(void) {
    if (!llamac_has_threads()) return;
    for (int index = 0; index < 2; index++) {
        struct pace pace = { 0 };
        struct late late = { .index = index };
        int before = 8, smallest = 8;
        for (int run = 0; run < 2000 && late.count != 1; run++) {
            pool_run(8, &pace, be_late, &late);
            CHECK(late.count == before || late.count == before / 2 || late.count > before, "from %d to %d", before, late.count);
            before = late.count;
            if (before < smallest) smallest = before;
        }
        CHECK(smallest == 1, "%d", smallest);
        // nobody is late when there is one only; and in time more are tried again
        int largest = 1;
        for (int64_t run = 0; run < 100000000 && largest < 2; run++) {
            pool_run(8, &pace, be_late, &late);
            if (late.count > largest) largest = late.count;
        }
        CHECK(largest > 1, "never tried again");
    }
}

static void another_pace_is_not_disturbed(void) {
    if (!llamac_has_threads()) return;
    struct pace bad = { .halvings = 2, .retry = INT64_MAX }, good = { 0 };
    struct late late = { .index = -1 };
    pool_run(8, &bad, be_late, &late);
    CHECK(late.count == 2, "%d", late.count);
    pool_run(8, &good, be_late, &late);
    CHECK(late.count == 8, "%d", late.count);
    bad.halvings = 9;
    pool_run(8, &bad, be_late, &late);
    CHECK(late.count == 1, "%d", late.count);
}

int main(void) {
    RUN(every_member_passes_every_barrier);
    RUN(callers_take_turns);
    RUN(a_team_that_mostly_waits_shrinks);
    RUN(another_pace_is_not_disturbed);
    return finish_tests("test_pool");
}
