// SPDX-License-Identifier: MIT
// eagle.c - EAGLE-3 heads: which layers of a model they read, the input of their own layers, and their logits. See
// eagle.h.
#include "eagle.h"

#include <math.h>
#include <string.h>
#include "common.h"
#include "error.h"

int session_check_head(const struct llamac_model *head, const struct llamac_model *trunk,
                       int layers[FORMAT_EAGLE_STATES], llamac_error *err) {
    const struct config *h = head->config, *t = trunk->config;
    const int n = (int)t->n_layers, usual[FORMAT_EAGLE_STATES] = { 2, n / 2, n - 3 };   // as in docs/format.md
    int any = 0;
    if (h->drafter != DRAFTER_EAGLE3) return bad_argument(err, "drafter is set, but it is not an EAGLE-3 head");
    if (h->trunk_dim != t->dim || h->vocab_size != t->vocab_size)
        return bad_argument(err, "the EAGLE-3 head does not belong to this model: it drafts for models of dim %u and "
                            "vocab_size %u, and the model has %u and %u", h->trunk_dim, h->vocab_size, t->dim,
                            t->vocab_size);
    if (!head->token_embedding.data && h->dim != t->dim)
        return bad_argument(err, "the EAGLE-3 head does not belong to this model: it has dim %u and no "
                            "token_embedding.weight, and the model's embedding has dim %u", h->dim, t->dim);
    for (int i = 0; i < FORMAT_EAGLE_STATES; i++) any |= h->eagle_layers[i] > 0;
    for (int i = 0; i < FORMAT_EAGLE_STATES; i++) {
        layers[i] = any ? (int)h->eagle_layers[i] : usual[i];
        if (layers[i] < 0 || layers[i] > n)
            return bad_argument(err, "the EAGLE-3 head does not belong to this model: it reads the state after %d "
                                "layers, and the model has %d", layers[i], n);
    }
    return 0;
}

// Norms the states of this member's share of the rows: all of a row together, or each of its states.
static void norm_states(const struct worker *w, const float *states, int width, float *normed) {
    const struct llamac_model *m = w->eval->session->model;
    const int part = m->config->eagle_in_norm == EAGLE_IN_NORM_EACH ? width / FORMAT_EAGLE_STATES : width;
    int first, last;
    pool_share(w->member, w->eval->n_rows, &first, &last);
    for (int r = first; r < last; r++)
        for (int at = 0; at < width; at += part) {
            const size_t place = (size_t)r * (size_t)width + (size_t)at;
            norm_row(w, (struct norm_weights){ m->drafter.in_norm + at, NULL }, states + place, part, normed + place);
        }
    pool_barrier(w->member);   // the product reads rows that other members have normed
}

void eagle_in(const struct worker *w, float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    const size_t dim = m->config->dim, bytes = sizeof(float) * dim;
    const int n = e->n_rows, width = m->drafter.in.columns;
    float *const normed = observer_of(e, LLAMAC_STAGE_ATTN_NORM, 0);
    int first, last;
    pool_share(w->member, n, &first, &last);
    if (e->states) {
        const float *states = e->states + (size_t)e->first_row * (size_t)width;
        if (m->drafter.in_norm) {
            norm_states(w, states, width, e->session->scratch.draft_inputs);
            states = e->session->scratch.draft_inputs;
        }
        const struct rows rows = { .x = states, .n = n, .width = width };
        const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { &m->drafter.in }, 1 });
        const struct product in = { .matrix = &m->drafter.in, .y = x };
        multiply(w, &in, &inputs, 0, strip_share(w, &m->drafter.in));
        pool_barrier(w->member);   // norms read all columns of x, and normed embeddings overwrite normed states
    }
    for (int r = first; r < last; r++) {
        float *const embedding = e->session->scratch.draft_inputs + 2 * (size_t)r * dim,
              *const state = embedding + dim, *const row = x + (size_t)r * dim;
        if (!e->states) memcpy(row, e->inputs + (size_t)(e->first_row + r) * dim, bytes);
        token_embedding(w, e->rows[r].token, embedding);
        norm_row(w, (struct norm_weights){ m->drafter.embedding_norm, NULL }, embedding, (int)dim, embedding);
        norm_row(w, (struct norm_weights){ m->layers[0].attn_norm, NULL }, row, (int)dim, state);
        if (m->config->eagle_normed) memcpy(row, state, bytes);
        if (normed) memcpy(normed + (size_t)r * dim, state, bytes);
    }
}

struct panels eagle_attention_inputs(const struct worker *w, struct consumers consumers) {
    static const struct norm_step none;   // the panels of the stream, which attention does not overwrite
    const struct rows rows = { .x = w->eval->session->scratch.draft_inputs, .n = w->eval->n_rows,
                               .width = 2 * (int)w->eval->session->model->config->dim };
    return prepare_inputs(w, rows, &none, consumers);
}

void eagle_spread(const struct worker *w, int n, float *observer) {
    const struct llamac_model *m = w->eval->session->model;
    const float *const ids = m->drafter.output_ids;
    const size_t vocab_size = m->config->vocab_size;
    int first, last;
    pool_share(w->member, n, &first, &last);
    for (int r = first; r < last; r++) {
        float *const row = w->eval->logits + (size_t)r * vocab_size;
        // ids ascend, so no number is overwritten before it has moved
        for (size_t id = vocab_size, i = m->config->eagle_vocab_size; id-- > 0;)
            row[id] = i && ids[i - 1] == (float)id ? row[--i] : -INFINITY;
        if (observer) memcpy(observer + (size_t)r * vocab_size, row, sizeof(float) * vocab_size);
    }
}
