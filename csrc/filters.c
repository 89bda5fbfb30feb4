// SPDX-License-Identifier: MIT
// filters.c - top-k, top-p, min-p, typical-p, XTC and mirostat's truncation. See filters.h.
//
// The surprise of a token comes from its logit, so the only logarithm is that of the total.
#include "filters.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "half.h"
#include "log_positive.h"

#define LOG2_E 0x1.71547652b82fep0

enum { LEAST_RADIX = 1024 };   // from this many candidates on, a radix sort is faster than comparing

static int ranks_before(const struct candidate *a, const struct candidate *b) {
    return a->p > b->p || (a->p == b->p && a->id < b->id);
}
static int compare(const void *a, const void *b) { return ranks_before(a, b) ? -1 : 1; }
static void sort(struct candidate *c, int n) { qsort(c, (size_t)n, sizeof *c, compare); }

// While the selection runs, the best k form a heap whose root ranks last.
void filter_top_k(struct candidate *c, int n, int k) {
    for (int i = 0; i < n; i++) {
        int hole = i;
        const struct candidate new = c[i];
        if (i < k) {
            for (; hole && ranks_before(&c[(hole - 1) / 2], &new); hole = (hole - 1) / 2) c[hole] = c[(hole - 1) / 2];
        } else {
            if (!ranks_before(&new, &c[0])) continue;
            hole = 0;
            for (int child; (child = 2 * hole + 1) < k; hole = child) {
                if (child + 1 < k && ranks_before(&c[child], &c[child + 1])) child++;
                if (!ranks_before(&new, &c[child])) break;
                c[hole] = c[child];
            }
        }
        c[hole] = new;
    }
    sort(c, k);
}

// Sorts candidates that are in the order of their ids and have positive probabilities. A stable radix sort of the bits
// of p, which order as the numbers do.
static void sort_by_bits(struct candidate *c, int n, struct candidate *scratch) {
    enum { DIGIT = 11, DIGITS = 3, VALUES = 1 << DIGIT };
    int counts[DIGITS][VALUES] = { 0 };
    for (int i = 0; i < n; i++) {
        const uint32_t key = ~f32_bits(c[i].p);
        for (int digit = 0; digit < DIGITS; digit++) counts[digit][key >> (DIGIT * digit) & (VALUES - 1)]++;
    }
    struct candidate *from = c, *to = scratch;
    for (int digit = 0; digit < DIGITS; digit++) {
        int *place = counts[digit];
        for (int value = 0, sum = 0; value < VALUES; value++) {
            const int count = place[value];
            place[value] = sum;
            sum += count;
        }
        for (int i = 0; i < n; i++) to[place[~f32_bits(from[i].p) >> (DIGIT * digit) & (VALUES - 1)]++] = from[i];
        struct candidate *other = from;
        from = to, to = other;
    }
    memcpy(c, from, (size_t)n * sizeof *c);   // the number of digits is odd
}

// Moves the candidates of at least `bound` to the front and sorts them; the others stay in the order of their ids.
// Returns the number of those at the front.
static int sort_best(struct candidate *c, int n, float bound, struct candidate *scratch) {
    int best = 0, others = 0;
    for (int i = 0; i < n; i++) {
        if (c[i].p < bound) scratch[others++] = c[i];
        else c[best++] = c[i];
    }
    memcpy(c + best, scratch, (size_t)others * sizeof *c);
    if (best < LEAST_RADIX) sort(c, best);
    else sort_by_bits(c, best, scratch);
    return best;
}

int filter_top_p(struct candidate *c, int n, int is_sorted, float top_p, struct candidate *scratch, double *total) {
    const double enough = (double)top_p * *total;
    double sum = 0;
    int kept = 0, sorted = is_sorted ? n : 0;
    float bound = 1;   // the greatest p; usually few candidates are needed and sorted
    while (kept < n && sum < enough) {
        if (kept == sorted) {
            bound = bound > 0x1p-100f ? bound / 16 : 0;
            sorted += sort_best(c + sorted, n - sorted, bound, scratch);
        } else {
            sum += (double)c[kept++].p;
        }
    }
    *total = sum;
    return kept;
}

int filter_min_p(struct candidate *c, int n, float min_p, double *total) {
    int kept = 0;
    *total = 0;
    for (int i = 0; i < n; i++) {
        if (c[i].p < min_p) continue;
        *total += (double)c[i].p;
        c[kept++] = c[i];
    }
    return kept;
}

// Keeps the candidates whose ids are not negative.
static int keep_marked(struct candidate *c, int n, double *total) {
    int kept = 0;
    *total = 0;
    for (int i = 0; i < n; i++) {
        if (c[i].id < 0) continue;
        *total += (double)c[i].p;
        c[kept++] = c[i];
    }
    return kept;
}

// The logarithm of the unnormalized probability.
static double log_of(const struct logits_source *source, int32_t id) {
    return ((double)source->logits[id] - (double)source->largest) / (double)source->temperature;
}

double surprise_bits(const struct logits_source *source, int32_t id, double total) {
    return (log_positive(total) - log_of(source, id)) * LOG2_E;
}

// A candidate by its closeness to the expected surprise.
struct distance { float rank; int32_t at; };

static int compare_distances(const void *a, const void *b) {
    const struct distance *x = a, *y = b;
    if (x->rank != y->rank) return x->rank > y->rank ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

// The less the surprise of a candidate differs from the expected one, the greater. Both lack the log of the total.
static float closeness(const struct logits_source *source, const struct candidate *c, double surprise) {
    return -fabsf((float)(-log_of(source, c->id) - surprise));
}

// Marks what typical-p leaves out, with a sort.
static void mark_by_sorting(struct candidate *c, int n, const struct logits_source *source, double surprise,
                            double enough, struct distance *distances) {
    for (int i = 0; i < n; i++) distances[i] = (struct distance){ .rank = closeness(source, &c[i], surprise), .at = i };
    qsort(distances, (size_t)n, sizeof *distances, compare_distances);
    double sum = 0;
    int kept = 0;
    while (kept < n && sum < enough) sum += (double)c[distances[kept++].at].p;
    for (int i = kept; i < n; i++) c[distances[i].at].id = -1;
}

int filter_typical(struct candidate *c, int n, const struct logits_source *source, float typical_p,
                   struct ranking *ranking, float *scratch, double *total) {
    float *rank = scratch, *p = scratch + n;
    const double enough = (double)typical_p * *total;
    double surprise = 0;   // the expected one
    for (int i = 0; i < n; i++) surprise += c[i].p > 0 ? (double)c[i].p * -log_of(source, c[i].id) : 0;
    surprise /= *total;
    for (int i = 0; i < n; i++) {
        p[i] = c[i].p;
        rank[i] = closeness(source, &c[i], surprise);
    }
    const struct ranked list = { .n = n, .rank = rank, .p = p };
    ranking_make(ranking, &list, p, ranking_margin(p, n, *total));
    const int last = ranking_cross(ranking, enough, 0).index;
    if (last < 0) {
        mark_by_sorting(c, n, source, surprise, enough, (struct distance *)(void *)scratch);
        return keep_marked(c, n, total);
    }
    const int32_t last_key = ranking_key(rank[last]);
    for (int i = 0; i < n; i++) {
        const int32_t key = ranking_key(rank[i]);
        if (key < last_key || (key == last_key && i > last)) c[i].id = -1;
    }
    return keep_marked(c, n, total);
}

int filter_top_choices(struct candidate *c, int n, float threshold, double *total) {
    const double least = (double)threshold * *total;
    int choices = 0, last = -1;
    for (int i = 0; i < n; i++) {
        if ((double)c[i].p < least) continue;
        choices++;
        if (last < 0 || ranks_before(&c[last], &c[i])) last = i;
    }
    if (choices < 2) return n;
    for (int i = 0; i < n; i++)
        if (i != last && (double)c[i].p >= least) c[i].id = -1;
    return keep_marked(c, n, total);
}

int filter_surprising(struct candidate *c, int n, const struct logits_source *source, double mu, double *total) {
    const double log_total = log_positive(*total);
    int first = 1;
    for (int i = 0; i < n; i++) {
        const int is_best = first && c[i].p >= 1;
        if (is_best) first = 0;
        else if (!(c[i].p > 0) || (log_total - log_of(source, c[i].id)) * LOG2_E > mu) c[i].id = -1;
    }
    return keep_marked(c, n, total);
}
