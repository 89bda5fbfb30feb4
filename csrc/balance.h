// SPDX-License-Identifier: MIT
// balance.h - how the members of a team share work: equally, or by the speeds that they have shown if these differ, as
// on processors with fast and slow cores.
//
// Every member measures its pace: how much work its products are, and how long they take. Waiting does not count. Once
// enough has been measured, new shares follow. No result depends on the shares.
#ifndef LLAMAC_BALANCE_H
#define LLAMAC_BALANCE_H
#include "common.h"

enum {
    BALANCED_MAX = 256,       // larger teams share equally
    SHARE_UNITS = 1 << 16,
};

// The shares of `count` members: member i has [starts[i], starts[i + 1]) of SHARE_UNITS. count 0: the shares are equal.
struct shares { int count; uint32_t starts[BALANCED_MAX + 1]; };

// The first of n items in a share, which is also the end of the share before it.
static inline int unequal_share_start(const struct shares *s, int n, int share) {
    return (int)(((uint64_t)n * s->starts[share] + SHARE_UNITS / 2) / SHARE_UNITS);
}

// What one member has measured since the shares were last considered. Work is in any unit that fits the time which the
// products take. Initially all zero.
struct pace {
    double work;
    int64_t ns;
    double usual;             // nanoseconds per unit of work, 0 if unknown
};

// Adds a product. Products that took far longer than usual are left out: another program had the CPU meanwhile.
void pace_add(struct pace *pace, double work, int64_t ns);
// Whether members with this much time in total have measured enough.
int pace_is_known(int64_t ns, int count);
// Returns the units of work per nanosecond, 0 if unknown, and starts to measure anew.
double pace_take(struct pace *pace);

// The speeds of a team's members, and the shares that follow. Initially all zero: equal shares.
struct balance { int count; double speeds[BALANCED_MAX]; struct shares shares; };

// Considers new measurements of `count` members, at most BALANCED_MAX. speeds (count): 0 if unknown.
void balance_update(struct balance *balance, const double *speeds, int count);
#endif
