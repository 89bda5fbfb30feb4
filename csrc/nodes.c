// SPDX-License-Identifier: MIT
// nodes.c - NUMA nodes. See nodes.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // cpu_set_t
#endif
#include "nodes.h"

#include <stdint.h>
#include "common.h"
#include "error.h"
#include "llamac.h"

enum { MAX_CPUS = 1024 };   // of cpu_set_t
static int16_t nodes[MAX_CPUS];   // of each CPU
static int last_node;   // set last, once; atomic. 0: there is one node

int nodes_are_several(void) { return __atomic_load_n(&last_node, __ATOMIC_ACQUIRE) > 0; }

int llamac_set_nodes(const int32_t *node_of_cpu, int n_cpus, llamac_error *err) {
    int last = 0;
    if (n_cpus < 0 || n_cpus > MAX_CPUS)
        return bad_argument(err, "n_cpus is %d, expected 0 to %d", n_cpus, MAX_CPUS);
    for (int cpu = 0; cpu < n_cpus; cpu++) {
        if (node_of_cpu[cpu] < 0 || node_of_cpu[cpu] >= MAX_CPUS)
            return bad_argument(err, "the node of CPU %d is %d, expected 0 to %d", cpu, node_of_cpu[cpu], MAX_CPUS - 1);
        last = max_int(last, node_of_cpu[cpu]);
    }
    if (nodes_are_several()) return bad_argument(err, "the nodes have already been set: they never change");
    for (int cpu = 0; cpu < n_cpus; cpu++) nodes[cpu] = (int16_t)node_of_cpu[cpu];
    __atomic_store_n(&last_node, last, __ATOMIC_RELEASE);
    return 0;
}

#if defined(__linux__)
_Static_assert((int)MAX_CPUS == (int)CPU_SETSIZE, "a node for each CPU of a cpu_set_t");

// The CPUs of one node among those allowed.
static void cpus_of_node(const cpu_set_t *allowed, int node, cpu_set_t *cpus) {
    CPU_ZERO(cpus);
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++)
        if (CPU_ISSET(cpu, allowed) && nodes[cpu] == node) CPU_SET(cpu, cpus);
}

void nodes_cpus_of(const cpu_set_t *allowed, int index, int count, cpu_set_t *cpus) {
    *cpus = *allowed;
    if (!nodes_are_several()) return;
    int before = share_start(CPU_COUNT(allowed), index, count);   // the CPU's place in a list ordered by node
    for (int node = 0; node <= last_node; node++) {
        cpus_of_node(allowed, node, cpus);
        before -= CPU_COUNT(cpus);
        if (before < 0) return;
    }
    *cpus = *allowed;
}
#endif
