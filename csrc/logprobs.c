// SPDX-License-Identifier: MIT
// logprobs.c - log probabilities of the model's own distribution: the softmax of the logits as the model gives them.
#include <math.h>

#include "common.h"
#include "error.h"
#include "filters.h"
#include "fpenv.h"
#include "kernels.h"
#include "log_positive.h"

enum { LANES = 8 };   // sums of every eighth probability: the order is part of the definition

static double sum_of(const float *p, int n) {
    double sums[LANES] = { 0 }, total = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)p[i + lane];
    for (; i < n; i++) sums[i % LANES] += (double)p[i];
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}

static int describe(const struct kernels *kernels, const float *logits, int n, int32_t token, int top,
                    llamac_logprob *out, void *scratch, llamac_error *err) {
    if (n < 1) return bad_argument(err, "n is %d, expected at least 1", n);
    if (token < 0 || token >= n) return bad_argument(err, "there is no token %d, expected 0 to %d", token, n - 1);
    if (top < 0 || top > n) return bad_argument(err, "logprobs is %d, expected 0 to %d", top, n);
    float largest = -INFINITY;
    for (int i = 0; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;
    if (!(largest > -INFINITY) || largest == INFINITY)
        return bad_model(err, "there are no probabilities: %s",
                         largest == INFINITY ? "a logit is infinite" : "none of the logits is a number");
    float *p = scratch;
    kernels->exponentials(logits, n, largest, 1, p);
    const double log_total = log_positive(sum_of(p, n));
    struct candidate *best = scratch;
    int kept = 0;
    for (int i = 0; i < n && top; i++)
        if (logits[i] > -INFINITY) best[kept++] = (struct candidate){ .p = logits[i], .id = i };
    top = min_int(top, kept);
    if (top) filter_top_k(best, kept, top);
    for (int i = 0; i <= top; i++) {
        const int32_t id = i ? best[i - 1].id : token;
        const double logprob = (double)logits[id] - (double)largest - log_total;
        out[i] = (llamac_logprob){ .id = id, .logprob = logprob == logprob ? logprob : (double)-INFINITY };
    }
    return top;
}

int llamac_logprobs(const float *logits, int n, int32_t token, int top, llamac_logprob *out, void *scratch,
                    llamac_error *err) {
    const fp_control control = fp_control_reset();
    const int found = describe(kernels_best(), logits, n, token, top, out, scratch, err);
    fp_control_restore(control);
    return found;
}
