// SPDX-License-Identifier: MIT
// contention.c - whether members of a team should spin. See contention.h.
#include "contention.h"

#include "clock.h"

enum {
    WINDOW_NS = 10000000,       // runs are judged together until they have taken this long
    BACKOFF = 32,               // after a bad window, members do not spin for this many times its length
};

// While one member works, or has lost its CPU to another program, the other count - 1 members wait. A team that was
// preempted and made progress less than half of the time should sleep at barriers: sleeping threads get a CPU as soon
// as there is work, whereas the scheduler counts spinning as use of the CPU. Long waits alone prove nothing: the first
// pass waits for page faults.
void contention_judge(struct contention *c, int count, struct run_report run) {
    c->run_ns += run.run_ns, c->wait_ns += run.wait_ns, c->preemptions += run.preemptions;
    if (c->run_ns < WINDOW_NS) return;
    if (c->preemptions && c->wait_ns * count / (count - 1) > c->run_ns / 2)
        c->sleep_until = now_ns() + BACKOFF * c->run_ns;
    c->run_ns = c->wait_ns = c->preemptions = 0;
}
