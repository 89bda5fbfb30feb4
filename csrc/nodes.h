// SPDX-License-Identifier: MIT
// nodes.h - NUMA nodes: which node each CPU belongs to, as llamac_set_nodes says, and where the members of a team run.
#ifndef LLAMAC_NODES_H
#define LLAMAC_NODES_H
#if defined(__linux__)
#include <sched.h>

// Finds the CPUs that a member of a team shall run on, out of those that the caller may use: those of one node. The
// members are divided among the nodes in proportion to the CPUs, neighbors together. With one node these are all CPUs.
void nodes_cpus_of(const cpu_set_t *allowed, int index, int count, cpu_set_t *cpus);
#endif

// Whether the machine has more than one node.
int nodes_are_several(void);
#endif
