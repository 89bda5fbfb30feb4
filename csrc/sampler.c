// SPDX-License-Identifier: MIT
// sampler.c - draws a token from logits: temperature, top-k, top-p, min-p. The same token on every machine.
//
// The random number is counter-based (Philox4x32-10, Salmon et al. 2011): a function of seed and position. It does not
// depend on earlier draws, so a truncated, batched or resumed sequence draws the same tokens.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "fpenv.h"

// p: the logit, then the unnormalized probability.
struct candidate { float p; int32_t id; };
_Static_assert(sizeof(struct candidate) == LLAMAC_SAMPLE_SCRATCH, "scratch of llamac_sample");

// Returns a number in [0, 1) with 24 random bits.
static float uniform(uint64_t seed, uint64_t position) {
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
    return (float)(counter[0] >> 8) * 0x1p-24f;
}

// Returns exp(x) for x <= 0 in double, from +, -, *, / and powers of two, which round alike on every machine: Taylor
// polynomial of degree 13 on |r| <= ln 2 / 2.
static double exp_negative(double x) {
    if (!(x > -700.0)) return 0.0;
    const double shift = 0x1.8p52, n = (x * 0x1.71547652b82fep0 + shift) - shift;
    const double r = (x - n * 0x1.62e42fefp-1) - n * 0x1.473de6af278edp-34;
    double p = 1.0;
    for (int i = 13; i >= 1; i--) p = 1.0 + p * r / i;
    const uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return p * scale;
}

int llamac_sampling_check(const llamac_sampling *s, llamac_error *err) {
    if (!(s->temperature >= 0 && s->temperature <= 1e6f))
        return bad_argument(err, "temperature is %g, expected 0 to 1e6", (double)s->temperature);
    if (s->top_k < 0) return bad_argument(err, "top_k is %d, expected 0 (off) or more", s->top_k);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return bad_argument(err, "top_p is %g, expected more than 0 and at most 1", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return bad_argument(err, "min_p is %g, expected 0 to 1", (double)s->min_p);
    return 0;
}

// Whether a ranks before b: the larger one does, among equals the lower id.
static int ranks_before(const struct candidate *a, const struct candidate *b) {
    return a->p > b->p || (a->p == b->p && a->id < b->id);
}
static int compare(const void *a, const void *b) { return ranks_before(a, b) ? -1 : 1; }

// Returns the id of the largest logit, or -1 if all are NaN or -inf.
static int largest(const float *logits, int n) {
    int best = -1;
    for (int i = 0; i < n; i++)
        if (logits[i] == logits[i] && logits[i] > -INFINITY && (best < 0 || logits[i] > logits[best])) best = i;
    return best;
}

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

static int draw(const float *logits, int n, const llamac_sampling *s, uint64_t position, struct candidate *c,
                float largest_logit) {
    int m = 0;
    for (int i = 0; i < n; i++)
        if (logits[i] > -INFINITY) c[m++] = (struct candidate){ .p = logits[i], .id = i };
    double total, sum = 0;
    m = filter(c, m, s, largest_logit, &total);
    const double target = (double)uniform(s->seed, position) * total;
    for (int i = 0; i < m; i++)
        if ((sum += (double)c[i].p) > target) return c[i].id;
    return c[m - 1].id;
}

static int choose_token(const float *logits, int n, const llamac_sampling *s, uint64_t position, void *scratch,
                        llamac_error *err) {
    if (llamac_sampling_check(s, err)) return -1;
    const int best = largest(logits, n);
    if (best < 0 || logits[best] == INFINITY)
        return bad_model(err, "no token can be chosen: %s",
                         best < 0 ? "none of the logits is a number" : "a logit is infinite");
    return s->temperature == 0 ? best : draw(logits, n, s, position, scratch, logits[best]);
}

int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, void *scratch,
                  llamac_error *err) {
    const fp_control control = fp_control_reset();   // comparisons depend on it: the host may take subnormals for 0
    const int token = choose_token(logits, n, sampling, position, scratch, err);
    fp_control_restore(control);
    return token;
}
