// SPDX-License-Identifier: MIT
// draws.c - draws the tokens of a batch's rows on several threads.
//
// A draw depends on nothing but its row, so the tokens are the same for every number of threads.
#include <string.h>

#include "common.h"
#include "llamac.h"
#include "pool.h"

// Logits per thread for which waking a thread pays: a draw takes 3 ns per logit, a sleeping thread 50 us to wake.
enum { LEAST_SHARE = 1 << 16 };

struct job { llamac_draw *draws; int rows, n; char *scratch; };

static void draw(llamac_draw *d, int n, char *scratch) {
    const float *logits = d->logits;
    if (d->adjustments) {
        float *adjusted = (float *)(void *)(scratch + (size_t)n * LLAMAC_SAMPLE_SCRATCH);
        memcpy(adjusted, logits, (size_t)n * sizeof *logits);
        llamac_adjust_logits(adjusted, n, d->adjustments, d->history, scratch);
        logits = adjusted;
    }
    d->token = llamac_sample(logits, n, d->sampling, d->position, d->mu, scratch, &d->err);
}

static void draw_some(void *argument, const struct member *member) {
    const struct job *job = argument;
    char *scratch = job->scratch + (size_t)member->index * (size_t)job->n * LLAMAC_DRAW_SCRATCH;
    for (int i = member->index; i < job->rows; i += member->count) draw(&job->draws[i], job->n, scratch);
}

int llamac_draw_threads(int rows, int n, int threads) {
    const int64_t paying = (int64_t)rows * n / LEAST_SHARE;
    return max_int(1, min_int(min_int(threads, rows), paying < POOL_MAX ? (int)paying : POOL_MAX));
}

void llamac_draw_rows(llamac_draw *draws, int rows, int n, int threads, void *scratch) {
    struct job job = { .draws = draws, .rows = rows, .n = n, .scratch = scratch };
    struct contention contention = { 0 };
    pool_run(&(struct pool_job){ llamac_draw_threads(rows, n, threads), 1, draw_some, &job }, &contention, NULL);
}
