// SPDX-License-Identifier: MIT
// test_nodes.c - NUMA nodes: threads stay on their nodes. The nodes are made up.
#include "nodes.h"

#include <time.h>
#include "llamac.h"
#include "pool.h"
#include "test.h"

#if defined(__linux__)
static llamac_error err;

enum { NODE_TEAM = 5 };
struct placed { int count; cpu_set_t cpus[NODE_TEAM]; };

static void note_cpus(void *argument, const struct member *member) {
    struct placed *placed = argument;
    if (member->index == 0) placed->count = member->count;
    sched_getaffinity(0, sizeof *placed->cpus, &placed->cpus[member->index]);
}

// Member 1 is late. A member that waits moves it to other CPUs.
static void arrive_late(void *argument, const struct member *member) {
    (void)argument;
    const struct timespec pause = { .tv_nsec = 2000000 };
    if (member->index == 1) nanosleep(&pause, NULL);
    pool_barrier(member);
}

// Makes each CPU a node of its own.
static void threads_stay_on_their_nodes(void) {
    cpu_set_t before, cpus;
    int32_t nodes[CPU_SETSIZE];
    for (int i = 0; i < CPU_SETSIZE; i++) nodes[i] = i;
    CHECK(llamac_set_nodes(nodes, CPU_SETSIZE + 1, &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "%s", err.message);
    CHECK(llamac_set_nodes((const int32_t[]){ 0, -1 }, 2, &err) < 0, "a negative node");
    CHECK(!llamac_set_nodes((const int32_t[]){ 0, 0 }, 2, &err), "one node: %s", err.message);
    CHECK(!llamac_set_nodes(nodes, CPU_SETSIZE, &err), "%s", err.message);
    CHECK(llamac_set_nodes(nodes, 2, &err) < 0, "set twice");
    CHECK(!sched_getaffinity(0, sizeof before, &before), "the caller's CPUs");
    const int n = CPU_COUNT(&before);
    for (int threads = n < NODE_TEAM ? n : NODE_TEAM; threads > 1 && llamac_has_threads(); threads--) {
        struct placed placed = { 0 };
        struct contention c = { 0 };
        pool_run(&(struct pool_job){ threads, 0, note_cpus, &placed }, &c, NULL);
        CHECK(CPU_EQUAL(&placed.cpus[0], &before), "the caller has moved");
        for (int i = 1; i < placed.count; i++) {
            CHECK(CPU_COUNT(&placed.cpus[i]) == 1, "member %d of %d runs on %d CPUs", i, threads,
                  CPU_COUNT(&placed.cpus[i]));
            for (int earlier = 1; earlier < i; earlier++) {
                CPU_AND(&cpus, &placed.cpus[earlier], &placed.cpus[i]);
                CHECK(CPU_COUNT(&cpus) == 0, "members %d and %d of %d share a CPU", earlier, i, threads);
            }
        }
    }
    struct placed placed = { 0 };
    struct contention c = { 0 };
    for (int run = 0; run < 5; run++)   // others move it within its node
        pool_run(&(struct pool_job){ 2, 0, arrive_late, NULL }, &c, NULL);
    pool_run(&(struct pool_job){ 2, 0, note_cpus, &placed }, &c, NULL);
    CHECK(placed.count < 2 || n < 2 || CPU_COUNT(&placed.cpus[1]) == 1, "member 1 has left its node");
}

// Members are divided among the nodes in proportion to the CPUs that the caller may use.
static void nodes_get_members_by_their_cpus(void) {
    cpu_set_t allowed, cpus;
    CPU_ZERO(&allowed);
    for (unsigned cpu = 4; cpu < 8; cpu++) CPU_SET(cpu, &allowed);
    for (int i = 0; i < 4; i++) {
        nodes_cpus_of(&allowed, i, 4, &cpus);
        CHECK(CPU_COUNT(&cpus) == 1 && CPU_ISSET((unsigned)i + 4, &cpus), "member %d of 4", i);
        nodes_cpus_of(&allowed, i, 8, &cpus);
        CHECK(CPU_COUNT(&cpus) == 1 && CPU_ISSET((unsigned)i / 2 + 4, &cpus), "member %d of 8", i);
    }
}

int main(void) {
    RUN(threads_stay_on_their_nodes);
    RUN(nodes_get_members_by_their_cpus);
    return finish_tests("test_nodes");
}
#else
int main(void) { return 0; }   // nodes are used on Linux only
#endif
