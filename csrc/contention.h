// SPDX-License-Identifier: MIT
// contention.h - whether other programs compete for the CPUs, so that members of a team should sleep instead of spin.
#ifndef LLAMAC_CONTENTION_H
#define LLAMAC_CONTENTION_H
#include <stdint.h>

// Statistics of runs of one kind, which reveal other programs that compete for the CPUs. Initially all zero.
struct contention {
    int64_t run_ns;        // total length of the runs in the current window
    int64_t wait_ns;       // total wait of a member in these runs, on average
    int64_t preemptions;   // of members in these runs
    int64_t sleep_until;   // until this time, members sleep at barriers instead of spinning
};

// Measurements of a run: its duration, the mean wait of a member, and the members' preemptions.
struct run_report { int64_t run_ns, wait_ns; long preemptions; };

// Adds a run of a team of `count` members. At the end of a window, evaluates its runs.
void contention_judge(struct contention *c, int count, struct run_report run);
#endif
