// SPDX-License-Identifier: MIT
// balance.c - shares of work by measured speed. See balance.h.
#include "balance.h"

#include <string.h>

enum {
    KNOWN_NS = 4000000,       // of products per member: enough to average over layers, short compared with a prompt
    FAR_LONGER = 4,           // times the usual: products of different matrices differ less
};
// The fastest member's speed divided by the slowest's: shares become unequal at UNEQUAL, and equal below EQUAL.
// The gap between the limits keeps noise from switching the shares back and forth.
static const double UNEQUAL = 1.2, EQUAL = 1.1;
// Equal shares let members skip barriers, and a share of almost nothing could not be measured.
static const double LEAST_SPEED = 1.0 / 16;   // of the mean

void pace_add(struct pace *pace, double work, int64_t ns) {
    if (pace->usual > 0 && (double)ns > FAR_LONGER * pace->usual * work) {
        pace->usual *= 1.25;   // a member that stays slow is believed after a few products
        return;
    }
    pace->work += work;
    pace->ns += ns;
}

int pace_is_known(int64_t ns, int count) { return ns >= (int64_t)KNOWN_NS * count; }

double pace_take(struct pace *pace) {
    const int known = pace->work > 0 && pace->ns >= KNOWN_NS / 16;   // less time is too noisy
    const double ns_per_work = known ? (double)pace->ns / pace->work : 0;
    *pace = (struct pace){ .usual = known ? ns_per_work : pace->usual };
    return known ? 1 / ns_per_work : 0;
}

// Divides the numbers by their mean over those that are known.
static void normalize(double *speeds, int count) {
    double sum = 0;
    int known = 0;
    for (int i = 0; i < count; i++) sum += speeds[i], known += speeds[i] > 0;
    for (int i = 0; i < count; i++) speeds[i] *= known / sum;
}

static void set_shares(struct shares *shares, const double *speeds, int count) {
    double sum = 0, before = 0;
    for (int i = 0; i < count; i++) sum += speeds[i];
    for (int i = 0; i < count; i++) {
        shares->starts[i] = (uint32_t)(before / sum * SHARE_UNITS + 0.5);
        before += speeds[i];
    }
    shares->starts[count] = SHARE_UNITS;
    shares->count = count;
}

void balance_update(struct balance *b, const double *speeds, int count) {
    double now[BALANCED_MAX], least = 1, most = 1;
    memcpy(now, speeds, sizeof(double) * (size_t)count);
    normalize(now, count);
    if (b->count != count) {
        *b = (struct balance){ .count = count };
        for (int i = 0; i < count; i++) b->speeds[i] = 1;
    }
    for (int i = 0; i < count; i++) {
        if (now[i] > 0) b->speeds[i] = (b->speeds[i] + now[i]) / 2;
        if (b->speeds[i] < LEAST_SPEED) b->speeds[i] = LEAST_SPEED;
        least = b->speeds[i] < least ? b->speeds[i] : least;
        most = b->speeds[i] > most ? b->speeds[i] : most;
    }
    const double limit = b->shares.count ? EQUAL : UNEQUAL;
    if (most < limit * least) b->shares.count = 0;
    else set_shares(&b->shares, b->speeds, count);
}
