// SPDX-License-Identifier: MIT
// nodes.h - NUMA nodes: the node of each CPU, as set by llamac_set_nodes, and the placement of a team's members.
#ifndef LLAMAC_NODES_H
#define LLAMAC_NODES_H
#if defined(__linux__)
#include <sched.h>

// Finds the CPUs for a member of a team: the CPUs of one node that the caller may use. The members are divided among
// the nodes in proportion to the CPUs, neighbors together. With one node these are all CPUs of the caller.
void nodes_cpus_of(const cpu_set_t *allowed, int index, int count, cpu_set_t *cpus);
#endif

// Returns whether the machine has more than one node.
int nodes_are_several(void);
#endif
