// SPDX-License-Identifier: MIT
// sampler.c - draws a token from logits, the same on every machine: temperature, top-k, top-p, min-p, typical-p, XTC;
// or temperature and mirostat.
//
// The random number is counter-based (Philox4x32-10, Salmon et al. 2011): a function of seed and position. It does not
// depend on earlier draws, so a truncated, batched or resumed sequence draws the same tokens.
//
// `draw_sorted` defines the draw: candidates are sorted, and sums are added up one by one in that order. It is used
// only where the order of a sum could decide. Otherwise `draw_ranked` finds the same token without sorting: its sums
// have another order, but it gives no result when one of them is within the rounding error of its threshold.
#include "sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "exp_negative.h"
#include "fpenv.h"
#include "log_positive.h"
#include "ranking.h"

// p: the logit, then the unnormalized probability.
struct candidate { float p; int32_t id; };
#define LOG2_E 0x1.71547652b82fep0
_Static_assert(sizeof(struct candidate) <= LLAMAC_SAMPLE_SCRATCH, "the scratch holds all candidates to be sorted");
_Static_assert(3 * sizeof(float) + sizeof(int32_t) == LLAMAC_SAMPLE_SCRATCH,
               "the scratch holds a probability for each token and a candidate for each");

enum { MAX_BLOCKS = 2048 };   // blocks of logits whose maxima are known

// One call of llamac_sample.
struct draw {
    const struct kernels *kernels;
    const float *logits;
    int n;
    const llamac_sampling *settings;
    double uniform, coin;         // in [0, 1)
    double *mu;                   // mirostat's state
    float largest;                // logit
    int block;                    // logits of a block
    float maxima[MAX_BLOCKS];     // of the blocks
    float *p;                     // (n): unnormalized probabilities
    struct candidates candidates;
    struct ranking ranking;       // of the candidates
};

// Sets two numbers in [0, 1) with 24 random bits.
static void uniform(uint64_t seed, uint64_t position, double *first, double *second) {
    uint32_t counter[4] = { (uint32_t)position, (uint32_t)(position >> 32), 0, 0 };
    uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)counter[0] * 0xd2511f53, b = (uint64_t)counter[2] * 0xcd9e8d57;
        const uint32_t next[4] = {
            (uint32_t)(b >> 32) ^ counter[1] ^ key[0], (uint32_t)b,
            (uint32_t)(a >> 32) ^ counter[3] ^ key[1], (uint32_t)a,
        };
        memcpy(counter, next, sizeof counter);
        key[0] += 0x9e3779b9;
        key[1] += 0xbb67ae85;
    }
    *first = (double)(counter[0] >> 8) * 0x1p-24;
    *second = (double)(counter[1] >> 8) * 0x1p-24;
}

int llamac_sampling_check(const llamac_sampling *s, llamac_error *err) {
    if (!(s->temperature >= 0 && s->temperature <= 1e6f))
        return bad_argument(err, "temperature is %g, expected 0 to 1e6", (double)s->temperature);
    if (s->top_k < 0) return bad_argument(err, "top_k is %d, expected 0 (off) or more", s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return bad_argument(err, "top_p is %g, expected more than 0 and at most 1", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return bad_argument(err, "min_p is %g, expected 0 to 1", (double)s->min_p);
    if (!(s->typical_p >= 0 && s->typical_p <= 1))
        return bad_argument(err, "typical_p is %g, expected 0 to 1", (double)s->typical_p);
    if (!(s->xtc_probability >= 0 && s->xtc_probability <= 1))
        return bad_argument(err, "xtc_probability is %g, expected 0 to 1", (double)s->xtc_probability);
    if (!(s->xtc_threshold >= 0 && s->xtc_threshold <= 1))
        return bad_argument(err, "xtc_threshold is %g, expected 0 to 1", (double)s->xtc_threshold);
    if (!(s->mirostat_tau >= 0 && s->mirostat_tau <= 1e3f))
        return bad_argument(err, "mirostat_tau is %g, expected 0 to 1000", (double)s->mirostat_tau);
    if (!(s->mirostat_eta >= 0 && s->mirostat_eta <= 1))
        return bad_argument(err, "mirostat_eta is %g, expected 0 to 1", (double)s->mirostat_eta);
    return 0;
}

// ---- the definition

// Whether a ranks before b: the larger one does, among equals the lower id.
static int ranks_before(const struct candidate *a, const struct candidate *b) {
    return a->p > b->p || (a->p == b->p && a->id < b->id);
}
static int compare(const void *a, const void *b) { return ranks_before(a, b) ? -1 : 1; }

// Moves the k best candidates to the front, sorted. While it runs, they form a heap whose root ranks last.
static void select_top_k(struct candidate *c, int n, int k) {
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
    qsort(c, (size_t)k, sizeof *c, compare);
}

// Applies temperature, top-k, top-p and min-p. Moves the remaining candidates to the front, with unnormalized
// probabilities, and returns their number. *total receives the sum of their probabilities.
static int filter(struct candidate *c, int n, const llamac_sampling *s, float largest_logit, double *total) {
    const int sorted = s->top_k && s->top_k < n;
    if (sorted) {
        select_top_k(c, n, s->top_k);
        n = s->top_k;
    }
    *total = 0;
    for (int i = 0; i < n; i++) {
        c[i].p = (float)exp_negative((double)(c[i].p - largest_logit) / (double)s->temperature);
        *total += (double)c[i].p;
    }
    if (s->top_p < 1) {
        if (!sorted) qsort(c, (size_t)n, sizeof *c, compare);
        const double enough = (double)s->top_p * *total;
        double sum = 0;
        int kept = 0;
        while (kept < n && sum < enough) sum += (double)c[kept++].p;
        n = kept;
        *total = sum;
    }
    if (s->min_p > 0) {   // relative to the largest probability, which is 1 before normalization
        double sum = 0;
        int kept = 0;
        for (int i = 0; i < n; i++) {
            if (c[i].p < s->min_p) continue;
            sum += (double)c[i].p;
            c[kept++] = c[i];
        }
        n = kept;
        *total = sum;
    }
    return n;
}

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

// A candidate's distance from the expected surprise.
struct distance { float nats; int32_t at; };
_Static_assert(sizeof(struct candidate) + sizeof(struct distance) <= LLAMAC_SAMPLE_SCRATCH, "the scratch holds both");

static int compare_distances(const void *a, const void *b) {
    const struct distance *x = a, *y = b;
    if (x->nats != y->nats) return x->nats < y->nats ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

// Keeps the candidates whose surprise, -log p, is closest to the expected one, until they reach `typical_p` together.
static int keep_typical(struct candidate *c, int n, float typical_p, struct distance *distances, double *total) {
    double expected = 0, sum = 0;
    const double log_total = log_positive(*total);
    for (int i = 0; i < n; i++)
        if (c[i].p > 0) expected += (double)c[i].p / *total * (log_total - log_positive((double)c[i].p));
    for (int i = 0; i < n; i++) {
        const double surprise = c[i].p > 0 ? log_total - log_positive((double)c[i].p) : 1e30;
        distances[i] = (struct distance){ .nats = fabsf((float)(surprise - expected)), .at = i };
    }
    qsort(distances, (size_t)n, sizeof *distances, compare_distances);
    const double enough = (double)typical_p * *total;
    int kept = 0;
    while (kept < n && sum < enough) sum += (double)c[distances[kept++].at].p;
    for (int i = kept; i < n; i++) c[distances[i].at].id = -1;
    return keep_marked(c, n, total);
}

// Of the candidates with at least this share of the total, keeps the one that ranks last; keeps all others.
static int exclude_top_choices(struct candidate *c, int n, float threshold, double *total) {
    int choices = 0, last = -1;
    for (int i = 0; i < n; i++) {
        if ((double)c[i].p < (double)threshold * *total) continue;
        choices++;
        if (last < 0 || ranks_before(&c[last], &c[i])) last = i;
    }
    if (choices < 2) return n;
    const double least = (double)threshold * *total;
    for (int i = 0; i < n; i++)
        if (i != last && (double)c[i].p >= least) c[i].id = -1;
    return keep_marked(c, n, total);
}

// Keeps the best candidate and all whose surprise is at most mu bits.
static int keep_unsurprising(struct candidate *c, int n, float best, double mu, double *total) {
    const double log_total = log_positive(*total);
    int first = 1;
    for (int i = 0; i < n; i++) {
        const int is_best = first && c[i].p >= best;
        if (is_best) first = 0;
        else if (!(c[i].p > 0) || (log_total - log_positive((double)c[i].p)) * LOG2_E > mu) c[i].id = -1;
    }
    return keep_marked(c, n, total);
}

static int draw_sorted(const struct draw *d, struct candidate *c) {
    const llamac_sampling *s = d->settings;
    int m = 0, drawn = -1;
    for (int i = 0; i < d->n; i++)
        if (d->logits[i] > -INFINITY) c[m++] = (struct candidate){ .p = d->logits[i], .id = i };
    double total, sum = 0;
    llamac_sampling filters = *s;
    if (d->mu) filters.top_k = 0, filters.top_p = 1, filters.min_p = 0;
    m = filter(c, m, &filters, d->largest, &total);
    if (d->mu) {
        m = keep_unsurprising(c, m, 1, *d->mu, &total);   // the best candidate's probability is 1 before normalization
    } else {
        struct distance *distances = (struct distance *)(void *)(c + d->n);
        if (s->typical_p > 0 && s->typical_p < 1) m = keep_typical(c, m, s->typical_p, distances, &total);
        if (d->coin < (double)s->xtc_probability) m = exclude_top_choices(c, m, s->xtc_threshold, &total);
    }
    const double target = d->uniform * total;
    for (int i = 0; i < m && drawn < 0; i++)
        if ((sum += (double)c[i].p) > target) drawn = i;
    if (drawn < 0) drawn = m - 1;
    if (d->mu) {
        const double p = (double)c[drawn].p > 0 ? (double)c[drawn].p : 0x1p-149;
        const double bits = (log_positive(total) - log_positive(p)) * LOG2_E;
        *d->mu -= (double)s->mirostat_eta * (bits - (double)s->mirostat_tau);
    }
    return c[drawn].id;
}

// ---- the same without sorting

// Draws with neither top-k nor top-p: sums have the order of ids.
static int draw_by_id(const struct draw *d) {
    const float *p = d->p, min_p = d->settings->min_p;
    double total = 0, sum = 0;
    d->kernels->exponentials(d->logits, d->n, d->largest, d->settings->temperature, d->p);
    for (int i = 0; i < d->n; i++)
        if (p[i] >= min_p) total += (double)p[i];
    const double target = d->uniform * total;
    for (int i = 0; i < d->n; i++)
        if (p[i] >= min_p && (sum += (double)p[i]) > target) return i;
    return -1;
}

// Makes the list of candidates empty, with room for all tokens.
static void clear_candidates(struct draw *d) {
    float *scratch = d->p + d->n;
    d->candidates = (struct candidates){
        .rank = scratch, .p = scratch + d->n, .id = (int32_t *)(void *)(scratch + 2 * (size_t)d->n),
    };
}

static void append(struct candidates *c, float rank, int id, int kept) {
    c->rank[c->n] = rank;
    c->id[c->n] = id;
    c->n += kept;
}

// Returns a logit that is at most the k-th greatest.
static float bound_of_top_k(struct draw *d, int k) {
    const struct candidates *c = &d->candidates;
    clear_candidates(d);
    for (int b = 0; b * d->block < d->n; b++)
        append(&d->candidates, d->maxima[b], b, d->maxima[b] > -INFINITY);
    ranking_make(&d->ranking, c, NULL, 0);
    const struct crossing kth = ranking_cross(&d->ranking, k, 0);   // each maximum is a logit
    return kth.index < 0 ? -INFINITY : c->rank[kth.index];
}

// Makes the k greatest logits the candidates. d->p receives them, too.
static void select_by_logit(struct draw *d, int k) {
    const float bound = bound_of_top_k(d, k);
    struct candidates *c = &d->candidates;
    clear_candidates(d);
    for (int start = 0; start < d->n; start += d->block) {
        if (d->maxima[start / d->block] < bound) continue;
        for (int i = start; i < min_int(start + d->block, d->n); i++)
            append(c, d->logits[i], i, d->logits[i] >= bound && d->logits[i] > -INFINITY);
    }
    ranking_make(&d->ranking, c, NULL, 0);
    const struct crossing last = ranking_cross(&d->ranking, k, 0);
    const int32_t last_key = ranking_key(c->rank[last.index]);
    const int n = c->n;
    c->n = 0;
    for (int i = 0; i < n; i++) {
        const int32_t key = ranking_key(c->rank[i]);
        d->p[c->n] = c->rank[i];
        append(c, c->rank[i], c->id[i], key > last_key || (key == last_key && i <= last.index));
    }
}

// Makes the tokens with probabilities of at least `bound` the candidates, or all tokens if few are below it.
static void select_by_probability(struct draw *d, float bound) {
    // bound >= 2^exponent, so a block whose maximum is below `logit` has no candidate
    const int exponent = (int)(f32_bits(bound) >> 23) - 127;
    const float logit = d->largest + d->settings->temperature * 0.7f * (float)min_int(exponent - 1, 0);
    struct candidates *c = &d->candidates;
    clear_candidates(d);
    c->p = c->rank;
    int n = 0;
    for (int i = 0; i < d->n; i++) n += d->p[i] >= bound;
    if (n > d->n / 4) {
        *c = (struct candidates){ .n = d->n, .rank = d->p, .p = d->p };
        return;
    }
    for (int start = 0; start < d->n; start += d->block) {
        if (d->maxima[start / d->block] < logit) continue;
        for (int i = start; i < min_int(start + d->block, d->n); i++) append(c, d->p[i], i, d->p[i] >= bound);
    }
}

// Returns how much two sums of n numbers at least 0 can differ if they are added up in different orders and the greater
// is `total`, with the roundings of a threshold. It is 0 if all sums are exact: floats of at least 2^-11 are multiples
// of 2^-34, and sums of 2^18 of them up to 1 fit a double's 53 bits.
static double rounding_margin(const float *p, int n, double total) {
    int inexact = n > 1 << 18;
    for (int i = 0; i < n; i++) inexact |= (p[i] > 0) & (p[i] < 0x1p-11f);
    return inexact ? n * 0x1p-50 * total : 0;
}

// Sets the probabilities of candidates that rank after `last`, or below min_p, to 0. Returns the sum of the others.
static double apply_min_p(struct candidates *c, int last, float min_p) {
    const int32_t last_key = last < 0 ? INT32_MIN : ranking_key(c->rank[last]);
    double total = 0;
    for (int i = 0; i < c->n; i++) {
        const int32_t key = ranking_key(c->rank[i]);
        const int cut = (last >= 0) & ((key < last_key) | ((key == last_key) & (i > last)));
        c->p[i] = (cut | (c->p[i] < min_p)) ? 0 : c->p[i];
        total += (double)c->p[i];
    }
    return total;
}

// Draws with top-k (0: off) or top-p. Returns -1 if the order of a sum could decide.
static int draw_ranked(struct draw *d, int top_k) {
    const llamac_sampling *s = d->settings;
    struct candidates *c = &d->candidates;
    double total, margin;
    if (top_k) {
        select_by_logit(d, top_k);
        total = d->kernels->exponentials(d->p, c->n, d->largest, s->temperature, c->p);
        margin = rounding_margin(c->p, c->n, total);
    } else {
        total = d->kernels->exponentials(d->logits, d->n, d->largest, s->temperature, d->p);
        margin = rounding_margin(d->p, d->n, total);
        // all tokens below the bound together have less than half of the probability that top-p leaves out
        select_by_probability(d, (float)((1 - (double)s->top_p) * total / (2.0 * d->n)));
    }
    ranking_make(&d->ranking, c, c->p, margin);
    struct crossing last = { .index = -1 };
    if (s->top_p < 1) {
        last = ranking_cross(&d->ranking, (double)s->top_p * total, 0);
        if (last.index < 0) return -1;
        total = last.sum;
    }
    if (s->min_p > 0 && top_k) {
        total = apply_min_p(c, last.index, s->min_p);
        ranking_make(&d->ranking, c, c->p, margin);
    } else if (s->min_p > 0 && c->p[last.index] < s->min_p) {
        // top-p has left all that min-p leaves, which rank first
        total = 0;
        for (int i = 0; i < c->n; i++) total += c->p[i] >= s->min_p ? (double)c->p[i] : 0;
    }
    const struct crossing drawn = ranking_cross(&d->ranking, d->uniform * total, 1);
    return drawn.index < 0 || !c->id ? drawn.index : c->id[drawn.index];
}

// ---- the call

// Returns the id of the largest logit.
static int first_largest(const struct draw *d) {
    int i = 0;
    while (d->maxima[i / d->block] < d->largest) i += d->block;
    while (!(d->logits[i] >= d->largest)) i++;
    return i;
}

static int choose_token(struct draw *d, uint64_t position, void *scratch, llamac_error *err) {
    const llamac_sampling *s = d->settings;
    if (llamac_sampling_check(s, err)) return -1;
    d->block = (int)round_up((uint64_t)max_int(1, ceil_div(d->n, MAX_BLOCKS)), 16);
    d->largest = d->kernels->block_maxima(d->logits, d->n, d->block, d->maxima);
    if (!(d->largest > -INFINITY) || d->largest == INFINITY)
        return bad_model(err, "no token can be chosen: %s",
                         d->largest == INFINITY ? "a logit is infinite" : "none of the logits is a number");
    if (s->temperature == 0) return first_largest(d);
    uniform(s->seed, position, &d->uniform, &d->coin);
    d->p = scratch;
    if (d->mu || (s->typical_p > 0 && s->typical_p < 1) || d->coin < (double)s->xtc_probability)
        return draw_sorted(d, scratch);
    int finite = 0;
    for (int i = 0; i < d->n; i++) finite += d->logits[i] > -INFINITY;
    const int top_k = s->top_k < finite ? s->top_k : 0;
    const int token = top_k || s->top_p < 1 ? draw_ranked(d, top_k) : draw_by_id(d);
    return token >= 0 ? token : draw_sorted(d, scratch);
}

int sample_with(const struct kernels *kernels, const float *logits, int n, const llamac_sampling *sampling,
                uint64_t position, double *mu, void *scratch, llamac_error *err) {
    const fp_control control = fp_control_reset();   // comparisons depend on it: the host may take subnormals for 0
    struct draw d;   // without an initializer, which would clear the maxima
    d.kernels = kernels, d.logits = logits, d.n = n, d.settings = sampling;
    d.mu = sampling->mirostat_tau > 0 ? mu : NULL;
    const int token = choose_token(&d, position, scratch, err);
    fp_control_restore(control);
    return token;
}

int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, double *mu,
                  void *scratch, llamac_error *err) {
    return sample_with(kernels_best(), logits, n, sampling, position, mu, scratch, err);
}
