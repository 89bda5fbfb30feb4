// SPDX-License-Identifier: MIT
// logits.c - adjusts logits before a draw: bias, repetition penalties, DRY, bans.
//
// Each step is a few float operations per token, in a fixed order, so the results are the same on every machine.
#include <math.h>

#include "common.h"
#include "error.h"
#include "fpenv.h"

enum { DRY_LONGEST = 50 };   // tokens of a repetition that are compared; longer ones get the same penalty

int llamac_adjustments_check(const llamac_adjustments *a, llamac_error *err) {
    if (a->n_bias < 0) return bad_argument(err, "n_bias is %d, expected 0 or more", a->n_bias);
    for (int i = 0; i < a->n_bias; i++)
        if (isnan(a->bias[i]) || a->bias[i] == INFINITY)
            return bad_argument(err, "the bias of token %d is %g, expected a number or -inf", a->bias_ids[i],
                                (double)a->bias[i]);
    if (!(a->repetition_penalty > 0 && a->repetition_penalty <= 1e6f))
        return bad_argument(err, "repetition_penalty is %g, expected more than 0 and at most 1e6",
                            (double)a->repetition_penalty);
    if (!(fabsf(a->presence_penalty) <= 1e6f))
        return bad_argument(err, "presence_penalty is %g, expected -1e6 to 1e6", (double)a->presence_penalty);
    if (!(fabsf(a->frequency_penalty) <= 1e6f))
        return bad_argument(err, "frequency_penalty is %g, expected -1e6 to 1e6", (double)a->frequency_penalty);
    if (!(a->dry_multiplier >= 0 && a->dry_multiplier <= 1e6f))
        return bad_argument(err, "dry_multiplier is %g, expected 0 (off) to 1e6", (double)a->dry_multiplier);
    if (!(a->dry_base >= 1 && a->dry_base <= 1e6f))
        return bad_argument(err, "dry_base is %g, expected 1 to 1e6", (double)a->dry_base);
    if (a->dry_allowed_length < 1)
        return bad_argument(err, "dry_allowed_length is %d, expected at least 1", a->dry_allowed_length);
    return 0;
}

static int is_id(int32_t id, int n) { return id >= 0 && id < n; }

static void penalize_repetitions(float *logits, int n, float penalty, const llamac_history *h, int32_t *seen) {
    for (int i = 0; i < h->n_ids; i++)
        if (is_id(h->ids[i], n)) seen[h->ids[i]] = 0;
    for (int i = 0; i < h->n_ids; i++) {
        const int32_t id = h->ids[i];
        if (!is_id(id, n) || seen[id]) continue;
        seen[id] = 1;
        logits[id] = logits[id] < 0 ? logits[id] * penalty : logits[id] / penalty;
    }
}

static void penalize_generated(float *logits, int n, float presence, float frequency, const llamac_history *h,
                               int32_t *counts) {
    for (int i = h->n_prompt; i < h->n_ids; i++)
        if (is_id(h->ids[i], n)) counts[h->ids[i]] = 0;
    for (int i = h->n_prompt; i < h->n_ids; i++)
        if (is_id(h->ids[i], n)) counts[h->ids[i]]++;
    for (int i = h->n_prompt; i < h->n_ids; i++) {
        const int32_t id = h->ids[i];
        if (!is_id(id, n) || !counts[id]) continue;
        logits[id] -= presence;
        logits[id] -= frequency * (float)counts[id];
        counts[id] = 0;
    }
}

static int breaks(const llamac_adjustments *a, int32_t id, int n) {
    return a->dry_breakers && is_id(id, n) && (a->dry_breakers[id / 8] >> id % 8 & 1);
}

// Returns how many tokens that end at `at` equal the last ones, up to a breaker.
static int repeated_length(const llamac_adjustments *a, const llamac_history *h, int at, int n) {
    const int end = h->n_ids - 1;
    int length = 0;
    while (length <= at && length < DRY_LONGEST) {
        const int32_t id = h->ids[end - length];
        if (h->ids[at - length] != id || breaks(a, id, n)) break;
        length++;
    }
    return length;
}

// A token that would continue a repetition of the last tokens loses multiplier * base^(length - allowed_length).
static void penalize_continuations(float *logits, int n, const llamac_adjustments *a, const llamac_history *h,
                                   int32_t *longest) {
    for (int i = 1; i < h->n_ids; i++)
        if (is_id(h->ids[i], n)) longest[h->ids[i]] = 0;
    for (int i = 0; i + 1 < h->n_ids; i++) {
        const int32_t next = h->ids[i + 1];
        if (h->ids[i] != h->ids[h->n_ids - 1] || !is_id(next, n) || breaks(a, next, n)) continue;
        longest[next] = max_int(longest[next], repeated_length(a, h, i, n));
    }
    for (int i = 1; i < h->n_ids; i++) {
        const int32_t id = h->ids[i];
        if (!is_id(id, n) || longest[id] < a->dry_allowed_length) continue;
        double penalty = (double)a->dry_multiplier;
        for (int k = a->dry_allowed_length; k < longest[id]; k++) penalty *= (double)a->dry_base;
        logits[id] = (float)((double)logits[id] - penalty);
        longest[id] = 0;
    }
}

static void ban_all_but(float *logits, int n, const uint8_t *allowed, int n_allowed) {
    const int n_bits = min_int(n, n_allowed);
    for (int start = 0; start < n_bits; start += 8)
        for (int i = start; allowed[start / 8] != 0xff && i < min_int(start + 8, n_bits); i++)
            if (!(allowed[start / 8] >> (i - start) & 1)) logits[i] = -INFINITY;
    for (int i = n_bits; i < n; i++) logits[i] = -INFINITY;
}

void llamac_adjust_logits(float *logits, int n, const llamac_adjustments *a, const llamac_history *h, void *scratch) {
    const fp_control control = fp_control_reset();
    for (int i = 0; i < a->n_bias; i++)
        if (is_id(a->bias_ids[i], n)) logits[a->bias_ids[i]] += a->bias[i];
    if (a->repetition_penalty != 1) penalize_repetitions(logits, n, a->repetition_penalty, h, scratch);
    if (a->presence_penalty != 0 || a->frequency_penalty != 0)
        penalize_generated(logits, n, a->presence_penalty, a->frequency_penalty, h, scratch);
    if (a->dry_multiplier > 0) penalize_continuations(logits, n, a, h, scratch);
    for (int i = 0; i < h->n_banned; i++)
        if (is_id(h->banned[i], n)) logits[h->banned[i]] = -INFINITY;
    if (h->allowed) ban_all_but(logits, n, h->allowed, h->n_allowed);
    fp_control_restore(control);
}
