// SPDX-License-Identifier: MIT
// balance.h - the division of work among the members of a team: equal shares, or shares by measured speed if the speeds
// differ, as on processors with fast and slow cores.
//
// Every member measures its pace: the work and the duration of its products, without waiting. Once there are enough
// measurements, the shares are updated. Results do not depend on the shares.
#ifndef LLAMAC_BALANCE_H
#define LLAMAC_BALANCE_H
#include "common.h"

enum {
    BALANCED_MAX = 256,       // larger teams always have equal shares
    SHARE_UNITS = 1 << 16,
};

// The shares of `count` members: member i has [starts[i], starts[i + 1]) of SHARE_UNITS. count 0: the shares are equal.
struct shares { int count; uint32_t starts[BALANCED_MAX + 1]; };

// Returns the first of n items in a share, which is also the end of the previous share.
static inline int unequal_share_start(const struct shares *s, int n, int share) {
    return (int)(((uint64_t)n * s->starts[share] + SHARE_UNITS / 2) / SHARE_UNITS);
}

// One member's measurements since the last update of the shares. Work is in any unit that is proportional to the time
// of the products. Initially all zero.
struct pace {
    double work;
    int64_t ns;
    double usual;             // nanoseconds per unit of work, 0 if unknown
};

// Adds a product. Products that took much longer than usual are ignored, because another program used the CPU.
void pace_add(struct pace *pace, double work, int64_t ns);
// Returns whether members with this total time have measured enough.
int pace_is_known(int64_t ns, int count);
// Returns the units of work per nanosecond, 0 if unknown, and resets the measurements.
double pace_take(struct pace *pace);

// The speeds of a team's members, and the resulting shares. Initially all zero: equal shares.
struct balance { int count; double speeds[BALANCED_MAX]; struct shares shares; };

// Updates the shares with new measurements of `count` members, at most BALANCED_MAX. speeds (count): 0 if unknown.
void balance_update(struct balance *balance, const double *speeds, int count);
#endif
