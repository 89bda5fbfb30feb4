// SPDX-License-Identifier: MIT
// eval.h - what the threads of one eval share: the chunk of rows that goes through the layers, and who wants to see
// what.
#ifndef LLAMAC_EVAL_H
#define LLAMAC_EVAL_H
#include "pool.h"
#include "session.h"

// The matrices that multiply with the same inputs; absent ones have no data.
struct readers { const struct matrix *of[MAX_READERS]; int n; };
// Inputs of products: panels of m rows, by kind of input; and what the readers' adapters make of them (lora.h).
struct panels { void *of[N_INPUT_TYPES]; float *lora_x[MAX_READERS]; int m; };

struct eval {
    struct llamac_session *session;
    const llamac_row *rows;               // (n_rows) of this chunk
    int n_rows;
    // of this chunk in the whole eval: rows before it, and those that wanted logits
    int first_row, first_wanted;
    int n_wanted;                         // rows of this chunk that want logits
    float *logits;                        // (n_wanted, vocab_size)
    const llamac_observation *observations;
    int n_observations;
    struct cancel cancel;
};

// One thread's view of an eval.
struct worker {
    struct eval *eval;
    const struct member *member;
    struct thread_scratch *local;
};

// forward.c: the whole graph for one chunk; every member of the team runs it.
void forward(const struct worker *w);

// attention.c: RoPE, cache and attention of one layer, from q, k, v to mix. Ends without a barrier.
void attention(const struct worker *w, int layer);
// Fills scratch.angles for the rows of the chunk; before the first layer.
void attention_prepare(const struct worker *w);

// experts.c: from the router to the hidden numbers of each row's experts; h: the rows as the router takes them. Ends
// without a barrier.
void experts_hidden(const struct worker *w, int layer, const struct panels *h);
// From there to y (rows, dim), each thread its own columns, and added to x unless that is NULL. Begins after a barrier,
// ends without one.
void experts_down(const struct worker *w, int layer, float *y, float *x);
void experts_observe(const struct worker *w, int layer);

// observe.c: copies a stage, if somebody wants it, to the observer. All members call it; it ends at a barrier if it did
// anything. `numbers` is (n, width).
void observe(const struct worker *w, int stage, int layer, const float *numbers, int n, int width);
void observe_cache(const struct worker *w, int layer);
void observe_scores(const struct worker *w, int layer);
// The observer's buffer for a stage at this chunk's first row, or NULL.
float *observed(const struct eval *e, int stage, int layer);
#endif
