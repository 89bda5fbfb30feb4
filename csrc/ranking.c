// SPDX-License-Identifier: MIT
// ranking.c - a selection by radix: each pass divides the range of keys that is left by 1024, so at most four passes
// over all candidates are needed, whatever their ranks are. See ranking.h.
#include "ranking.h"

#include "common.h"

enum {
    SUBSET = 1024,     // the candidates of a range are listed once there are no more than this
    SORTED = 32,       // and sorted once there are no more than this
    STEP = 16,         // candidates that are tested together
};

struct search {
    const struct ranking *r;
    double threshold;
    int strict;
    uint32_t high, span;    // the sum reaches the threshold at a key in [high - span, high]
    double before;          // the sum of all candidates with greater keys
    int n;                  // candidates in `subset`, -1 if they are not listed
    int subset[SUBSET + STEP];
};

static uint32_t key_of(const struct ranking *r, int i) { return (uint32_t)ranking_key(r->c->rank[i]); }
static double weight_of(const struct ranking *r, int i) { return r->weights ? (double)r->weights[i] : 1.0; }
// How far a candidate's key is below the highest of the range. Greater than `span` if it is outside the range.
static uint32_t below_high(const struct search *s, int i) { return s->high - key_of(s->r, i); }

static int shift_of(uint32_t span) {
    int shift = 0;
    while (span >> shift >= RANKING_BUCKETS) shift++;
    return shift;
}

void ranking_make(struct ranking *r, const struct ranked *c, const float *weights, double margin) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < c->n; i++) {
        const int32_t key = ranking_key(c->rank[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    r->c = c, r->weights = weights, r->margin = margin;
    r->high = (uint32_t)high, r->span = (uint32_t)high - (uint32_t)low;
    if (r->span == 0) return;   // no sum is needed
    // two sums of each bucket, because an addition waits for the one before it in the same place
    double odd[RANKING_BUCKETS] = { 0 };
    memset(r->sums, 0, sizeof r->sums);
    const int shift = shift_of(r->span);
    int i = 0;
    for (; i + 1 < c->n; i += 2) {
        r->sums[(r->high - key_of(r, i)) >> shift] += weight_of(r, i);
        odd[(r->high - key_of(r, i + 1)) >> shift] += weight_of(r, i + 1);
    }
    if (i < c->n) r->sums[(r->high - key_of(r, i)) >> shift] += weight_of(r, i);
    for (int b = 0; b < RANKING_BUCKETS; b++) r->sums[b] += odd[b];
}

// Whether a sum reaches the threshold; -1 if rounding could decide.
static int reaches(const struct search *s, double sum) {
    const double distance = sum - s->threshold;
    if (s->r->margin > 0 && distance <= s->r->margin && distance >= -s->r->margin) return -1;
    return s->strict ? distance > 0 : distance >= 0;
}

// Lists the candidates of the range, unless there are too many.
static void list_range(struct search *s) {
    const int total = s->r->c->n, listed = s->n;
    int n = 0;
    for (int j = 0; j < listed; j++)
        if (below_high(s, s->subset[j]) <= s->span) s->subset[n++] = s->subset[j];
    for (int start = 0; start < total && n <= SUBSET && listed < 0; start += STEP) {
        const int end = min_int(start + STEP, total);
        int any = 0;
        for (int i = start; i < end; i++) any |= below_high(s, i) <= s->span;
        for (int i = start; i < end && any; i++)
            if (below_high(s, i) <= s->span) s->subset[n++] = i;
    }
    s->n = n <= SUBSET ? n : -1;
}

static void add_to_bucket(const struct search *s, int i, int shift, double *sums) {
    const uint32_t below = below_high(s, i);
    if (below <= s->span) sums[below >> shift] += weight_of(s->r, i);
}

// Replaces the range by the bucket of it in which the sum reaches the threshold. Returns -1 if rounding could decide.
static int enter_bucket(struct search *s, const double *sums) {
    const int shift = shift_of(s->span);
    const uint32_t last = s->span >> shift;
    uint32_t b = 0;
    for (; b < last; b++) {
        const int reached = reaches(s, s->before + sums[b]);
        if (reached < 0) return -1;
        if (reached) break;
        s->before += sums[b];
    }
    s->high -= b << shift;
    s->span = b < last ? (1u << shift) - 1 : s->span - (b << shift);
    list_range(s);
    return 0;
}

static int narrow(struct search *s) {
    double sums[RANKING_BUCKETS] = { 0 };
    const int shift = shift_of(s->span);
    for (int i = 0; i < s->n; i++) add_to_bucket(s, s->subset[i], shift, sums);
    for (int i = 0; i < s->r->c->n && s->n < 0; i++) add_to_bucket(s, i, shift, sums);
    return enter_bucket(s, sums);
}

// Adds candidate i to the sum. Returns whether it then reaches the threshold; -1 if rounding could decide.
static int step(struct search *s, int i) { return reaches(s, s->before += weight_of(s->r, i)); }

// Adds up the candidates of a range with a single key, which are in order.
static struct crossing walk_equal(struct search *s) {
    for (int i = 0, reached; i < s->r->c->n; i++)
        if (below_high(s, i) == 0 && (reached = step(s, i)))
            return (struct crossing){ reached < 0 ? -1 : i, s->before };
    return (struct crossing){ .index = -1 };
}

// Sorts the listed candidates and adds them up. Insertion keeps the order of equal keys.
static struct crossing walk_sorted(struct search *s) {
    int sorted[SORTED];
    for (int j = 0; j < s->n; j++) {
        const uint32_t below = below_high(s, s->subset[j]);
        int hole = j;
        for (; hole && below_high(s, sorted[hole - 1]) > below; hole--) sorted[hole] = sorted[hole - 1];
        sorted[hole] = s->subset[j];
    }
    for (int i = 0, reached; i < s->n; i++)
        if ((reached = step(s, sorted[i]))) return (struct crossing){ reached < 0 ? -1 : sorted[i], s->before };
    return (struct crossing){ .index = -1 };
}

struct crossing ranking_cross(const struct ranking *r, double threshold, int strict) {
    struct search s;   // without an initializer, which would clear the subset
    s.r = r, s.threshold = threshold, s.strict = strict;
    s.high = r->high, s.span = r->span, s.before = 0, s.n = -1;
    int failed = enter_bucket(&s, r->sums);
    while (!failed) {
        if (s.n >= 0 && s.n <= SORTED) return walk_sorted(&s);
        if (s.span == 0) return walk_equal(&s);
        failed = narrow(&s);
    }
    return (struct crossing){ .index = -1 };
}

// It is 0 if all sums are exact: floats of at least 2^-11 are multiples of 2^-34, and sums of 2^18 of them up to 1 fit
// a double's 53 bits.
double ranking_margin(const float *p, int n, double total) {
    int inexact = n > 1 << 18;
    for (int i = 0; i < n; i++) inexact |= (p[i] > 0) & (p[i] < 0x1p-11f);
    return inexact ? n * 0x1p-50 * total : 0;
}
