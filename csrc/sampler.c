// SPDX-License-Identifier: MIT
// sampler.c - draws a token from logits, the same on every machine: temperature, top-k, top-p, min-p, typical-p, XTC;
// or temperature and mirostat.
//
// The random number is a function of seed and position (uniform.h). It does not depend on earlier draws, so a
// truncated, batched or resumed sequence draws the same tokens.
//
// `draw_filtered` defines the draw: filters leave a list of candidates, and sums are added up one by one in its order.
// For temperature, top-k, top-p and min-p alone, `draw_ranked` finds the same token without sorting: its sums have
// another order, but it gives no result when one of them is within the rounding error of its threshold.
#include "sampler.h"

#include <math.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "exp_negative.h"
#include "filters.h"
#include "fpenv.h"
#include "uniform.h"

_Static_assert(2 * sizeof(struct candidate) <= LLAMAC_SAMPLE_SCRATCH, "the scratch holds all candidates twice");
_Static_assert(3 * sizeof(float) + sizeof(int32_t) == LLAMAC_SAMPLE_SCRATCH,
               "the scratch holds a probability for each token and a candidate for each");

enum { MAX_BLOCKS = 2048 };   // blocks of logits whose maxima are known

// One call of llamac_sample. Its scratch holds, for n tokens:
//     draw_filtered    candidates (n), then n candidates or 2 n floats for the filters
//     draw_ranked      p (n), then rank, p and id of the ranked tokens (n each)
struct draw {
    const struct kernels *kernels;
    struct logits_source source;
    int n;
    const llamac_sampling *settings;
    double uniform, coin;         // in [0, 1)
    double *mu;                   // mirostat's state
    int block;                    // logits of a block
    float maxima[MAX_BLOCKS];     // of the blocks
    float *p;                     // (n): unnormalized probabilities
    struct ranked candidates;     // the tokens that are ranked
    struct ranking ranking;       // of the candidates
};

static int is_typical(const llamac_sampling *s) { return s->typical_p > 0 && s->typical_p < 1; }

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

// Lists the candidates that top-k leaves: in ranking order, or all of them by id. Returns their number.
static int list_candidates(const struct draw *d, struct candidate *c, int top_k, double *total) {
    const struct logits_source *source = &d->source;
    float *p = (float *)(void *)(c + d->n);
    if (!top_k) d->kernels->exponentials(d->source.logits, d->n, source->largest, source->temperature, p);
    int n = 0;
    for (int i = 0; i < d->n; i++) {
        const float logit = source->logits[i];
        if (logit > -INFINITY) c[n++] = (struct candidate){ .p = top_k ? logit : p[i], .id = i };
    }
    if (top_k) {
        filter_top_k(c, n, top_k);
        n = top_k;
    }
    *total = 0;
    for (int i = 0; i < n; i++) {
        if (top_k) c[i].p = (float)exp_negative((double)(c[i].p - source->largest) / (double)source->temperature);
        *total += (double)c[i].p;
    }
    return n;
}

// Draws with the filters one after another. top_k: 0 if it leaves all tokens.
static int draw_filtered(struct draw *d, struct candidate *c, int top_k) {
    const llamac_sampling *s = d->settings;
    double total, sum = 0;
    int n = list_candidates(d, c, d->mu ? 0 : top_k, &total);
    if (d->mu) {
        n = filter_surprising(c, n, &d->source, *d->mu, &total);
    } else {
        if (s->top_p < 1) n = filter_top_p(c, n, top_k > 0, s->top_p, c + d->n, &total);
        if (s->min_p > 0) n = filter_min_p(c, n, s->min_p, &total);
        float *scratch = (float *)(void *)(c + d->n);
        if (is_typical(s)) n = filter_typical(c, n, &d->source, s->typical_p, &d->ranking, scratch, &total);
        if (d->coin < (double)s->xtc_probability) n = filter_top_choices(c, n, s->xtc_threshold, &total);
    }
    const double target = d->uniform * total;
    int drawn = 0;
    for (; drawn < n - 1; drawn++) {
        sum += (double)c[drawn].p;
        if (sum > target) break;
    }
    if (d->mu)
        *d->mu -= (double)s->mirostat_eta * (surprise_bits(&d->source, c[drawn].id, total) - (double)s->mirostat_tau);
    return c[drawn].id;
}

// ---- the same without sorting

// Draws with neither top-k nor top-p: sums have the order of ids.
static int draw_by_id(const struct draw *d) {
    const float *p = d->p, min_p = d->settings->min_p;
    double total = 0, sum = 0;
    d->kernels->exponentials(d->source.logits, d->n, d->source.largest, d->settings->temperature, d->p);
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
    d->candidates = (struct ranked){
        .rank = scratch, .p = scratch + d->n, .id = (int32_t *)(void *)(scratch + 2 * (size_t)d->n),
    };
}

static void append(struct ranked *c, float rank, int id, int kept) {
    c->rank[c->n] = rank;
    c->id[c->n] = id;
    c->n += kept;
}

// Returns a logit that is at most the k-th greatest.
static float bound_of_top_k(struct draw *d, int k) {
    const struct ranked *c = &d->candidates;
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
    struct ranked *c = &d->candidates;
    clear_candidates(d);
    for (int start = 0; start < d->n; start += d->block) {
        if (d->maxima[start / d->block] < bound) continue;
        for (int i = start; i < min_int(start + d->block, d->n); i++)
            append(c, d->source.logits[i], i, d->source.logits[i] >= bound && d->source.logits[i] > -INFINITY);
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
    // bound >= 2^exponent, and 0.7 > ln 2: a block whose maximum is below `logit` has no candidate
    const int exponent = (int)(f32_bits(bound) >> 23) - 127;
    const float logit = d->source.largest + d->settings->temperature * 0.7f * (float)min_int(exponent - 1, 0);
    struct ranked *c = &d->candidates;
    clear_candidates(d);
    c->p = c->rank;
    int n = 0;
    for (int i = 0; i < d->n; i++) n += d->p[i] >= bound;
    if (n > d->n / 4) {
        *c = (struct ranked){ .n = d->n, .rank = d->p, .p = d->p };
        return;
    }
    for (int start = 0; start < d->n; start += d->block) {
        if (d->maxima[start / d->block] < logit) continue;
        for (int i = start; i < min_int(start + d->block, d->n); i++) append(c, d->p[i], i, d->p[i] >= bound);
    }
}

// Sets the probabilities of candidates that rank after `last`, or below min_p, to 0. Returns the sum of the others.
static double apply_min_p(struct ranked *c, int last, float min_p) {
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
    struct ranked *c = &d->candidates;
    double total, margin;
    if (top_k) {
        select_by_logit(d, top_k);
        total = d->kernels->exponentials(d->p, c->n, d->source.largest, s->temperature, c->p);
        margin = ranking_margin(c->p, c->n, total);
    } else {
        total = d->kernels->exponentials(d->source.logits, d->n, d->source.largest, s->temperature, d->p);
        margin = ranking_margin(d->p, d->n, total);
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
    while (d->maxima[i / d->block] < d->source.largest) i += d->block;
    while (!(d->source.logits[i] >= d->source.largest)) i++;
    return i;
}

static int choose_token(struct draw *d, uint64_t position, void *scratch, llamac_error *err) {
    const llamac_sampling *s = d->settings;
    if (llamac_sampling_check(s, err)) return -1;
    if (d->n < 1) return bad_argument(err, "n is %d, expected at least 1", d->n);
    d->block = (int)round_up((uint64_t)max_int(1, ceil_div(d->n, MAX_BLOCKS)), 16);
    d->source.largest = d->kernels->block_maxima(d->source.logits, d->n, d->block, d->maxima);
    if (!(d->source.largest > -INFINITY) || d->source.largest == INFINITY)
        return bad_model(err, "no token can be chosen: %s",
                         d->source.largest == INFINITY ? "a logit is infinite" : "none of the logits is a number");
    if (s->temperature == 0) return first_largest(d);
    uniform(s->seed, position, s->candidate, &d->uniform, &d->coin);
    d->p = scratch;
    int finite = 0;
    for (int i = 0; i < d->n; i++) finite += d->source.logits[i] > -INFINITY;
    const int top_k = s->top_k < finite ? s->top_k : 0;
    if (d->mu || is_typical(s) || d->coin < (double)s->xtc_probability) return draw_filtered(d, scratch, top_k);
    const int token = top_k || s->top_p < 1 ? draw_ranked(d, top_k) : draw_by_id(d);
    return token >= 0 ? token : draw_filtered(d, scratch, top_k);
}

int sample_with(const struct kernels *kernels, const float *logits, int n, const llamac_sampling *sampling,
                uint64_t position, double *mu, void *scratch, llamac_error *err) {
    const fp_control control = fp_control_reset();   // comparisons depend on it: the host may take subnormals for 0
    struct draw d;   // without an initializer, which would clear the maxima
    d.kernels = kernels, d.source.logits = logits, d.n = n, d.settings = sampling;
    d.source.temperature = sampling->temperature;
    d.mu = sampling->mirostat_tau > 0 ? mu : NULL;
    const int token = choose_token(&d, position, scratch, err);
    fp_control_restore(control);
    return token;
}

int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, double *mu,
                  void *scratch, llamac_error *err) {
    return sample_with(kernels_best(), logits, n, sampling, position, mu, scratch, err);
}
