// SPDX-License-Identifier: MIT
// layer_embedding.c - a token's embeddings for each layer, and the branch that a layer computes from its own.
//
//     x -> layer_embedding_in -> norm of each layer's part -> + layer_embedding[token] -> layer_inputs
//     rows of a layer -> layer_embedding_gate -> activation * layer_inputs -> layer_embedding_out -> branch
#include <math.h>
#include "common.h"
#include "lora.h"
#include "products.h"

// Makes the inputs of all layers for one row: y holds the product of its embedding with layer_embedding_in.
static void finish_inputs(const struct worker *w, int token, float *y) {
    const struct llamac_session *s = w->eval->session;
    const struct llamac_model *m = s->model;
    const struct matrix *table = &m->layer_embedding;
    const int dim = m->layer_embedding_dim, all = table->columns;
    const float embedding_scale = m->config->embedding_scale;
    float *const own = w->local->row;
    s->kernels->gather[table->dtype](table->data, table->strip_bytes, token, all, own);
    w->local->bytes_read += table->strip_bytes / STRIP_ROWS;
    if (table->lora) lora_gather(w, table->lora, token, all, own);
    s->kernels->scale(own, all, sqrtf((float)dim), 0);
    if (embedding_scale != 1) s->kernels->scale(y, all, 1 / embedding_scale, 0);
    for (int first = 0; first < all; first += dim)
        norm_row(w, (struct norm_weights){ m->layer_embedding_norm, NULL }, y + first, dim, y + first);
    s->kernels->add(own, all, y);
    s->kernels->scale(y, all, sqrtf(0.5f), 0);
}

void layer_inputs(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    const struct llamac_model *m = e->session->model;
    const struct matrix *in = &m->layer_embedding_in;
    if (!in->data) return;
    const struct rows rows = { .x = scratch->x, .n = e->n_rows, .width = (int)m->config->dim };
    const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { in }, 1 });
    const struct product product = { .matrix = in, .y = scratch->layer_inputs };
    multiply(w, &product, &inputs, 0, strip_share(w, in));
    pool_barrier(w->member);   // the norms read numbers that other members have computed
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++)
        finish_inputs(w, e->rows[r].token, scratch->layer_inputs + (size_t)r * (size_t)in->rows);
}

void layer_embedding(const struct worker *w, int l, const struct panels *inputs, float *branch) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *scratch = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const struct matrix *gate = &layer->layer_embedding_gate, *out = &layer->layer_embedding_out;
    const int dim = gate->rows, all = s->model->layer_embedding_in.rows;
    const struct strips share = strip_share(w, gate);
    const struct product gates = { .matrix = gate, .y = scratch->gate };
    multiply(w, &gates, inputs, 0, share);
    const int first = share.first * STRIP_ROWS, last = min_int(share.last * STRIP_ROWS, dim);
    for (int r = 0; r < e->n_rows && first < last && !cancelled(&w->eval->cancel); r++) {
        const size_t at = (size_t)r * (size_t)dim + (size_t)first;
        const float *own = scratch->layer_inputs + (size_t)r * (size_t)all + (size_t)(l * dim + first);
        s->kernels->activate((int)s->model->config->activation, scratch->gate + at, own, last - first,
                             scratch->up + at);
    }
    pool_barrier(w->member);   // the next product reads all columns
    const struct rows rows = { .x = scratch->up, .n = e->n_rows, .width = dim };
    const struct panels hidden = prepare_inputs(w, rows, NULL, (struct consumers){ { out }, 1 });
    const struct product product = { .matrix = out, .y = branch };
    multiply(w, &product, &hidden, 0, strip_share(w, out));
}
