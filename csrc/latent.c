// SPDX-License-Identifier: MIT
// latent.c - multi-head latent attention: from a layer's first products to q, k and v, and from attention's result to
// the input of the output projection.
//
//     q latent -> norm -> attn_q -> per head: rotated part, attn_k_b (other part)           -> q
//     rotated part, latent -> norm                                                          -> k, v
//     mix -> per head: attn_v_b                                                             -> latent_heads
//
// The heads share one key, the rotated part and the latent, and one value, the latent. So attention is that of one KV
// head. A head's score of the latent's key, attn_k_b^T latent, is computed as the score of attn_k_b q with the latent,
// and the values attn_v_b latent are mixed before attn_v_b is applied. Rows of prompts and single tokens are computed
// alike, so that the bits do not depend on how rows are grouped.
#include <string.h>
#include "common.h"
#include "products.h"

// The product of each head's own rows of a matrix with the head's own inputs.
struct head_products {
    const struct matrix *matrix;        // (heads * outputs, inputs)
    int heads;
    const float *x;                     // the inputs of a head are x_head floats after those of the one before
    size_t x_stride, x_head;            // x_stride: from row to row
    float *y;
    size_t y_stride, y_head;
};

// Returns the panels of a head's inputs, one after the other.
static struct panels head_panels(const struct worker *w, const struct head_products *p, int head) {
    const int n = w->eval->n_rows, columns = p->matrix->columns;
    struct panels panels = panels_at(w, is_redundant(n), n, 0, n, columns);
    for (int input = 0; input < N_INPUT_TYPES; input++)
        panels.by_input[input] = (int32_t *)panels.by_input[input] + (size_t)(head * n) * input_words(input, columns);
    return panels;
}

static struct matrix head_matrix(const struct head_products *p, int head) {
    struct matrix m = *p->matrix;
    m.rows /= p->heads;
    m.data += (size_t)(head * strips_of(&m)) * m.strip_bytes;
    return m;
}

// Multiplies this thread's strips. Each thread packs its own inputs if there are few rows. Otherwise the threads divide
// the packing and meet at a barrier. The caller's barrier before this separates it from earlier products.
static void multiply_heads(const struct worker *w, const struct head_products *p) {
    const int n = w->eval->n_rows, columns = p->matrix->columns, per_head = strips_of(p->matrix) / p->heads;
    const struct consumers consumers = { { p->matrix }, 1 };
    const struct strips share = strip_share(w, p->matrix);
    int first = share.first / per_head, last = ceil_div(share.last, per_head);
    if (share.first >= share.last) last = first;
    const int own_first = first, own_last = last;
    if (!is_redundant(n)) pool_share(w->member, p->heads, &first, &last);
    for (int head = first; head < last && !cancelled(&w->eval->cancel); head++) {
        const struct panels panels = head_panels(w, p, head);
        for (int r = 0; r < n; r++)
            pack_row(w, consumers, &panels, p->x + (size_t)r * p->x_stride + (size_t)head * p->x_head, columns, 0, n,
                     r);
    }
    if (!is_redundant(n)) pool_barrier(w->member);   // products read rows that other members have packed
    const int64_t adds = (int64_t)(p->matrix->rows / w->member->count) * columns * n;
    int pauses = (int)(adds / PAUSE_ADDS_HEADS);   // the same number for all members
    const int per_pause = ceil_div(own_last - own_first, pauses + 1);
    for (int head = 0; head < p->heads; head++) {
        if (pauses > 0 && head > own_first && head < own_last && (head - own_first) % per_pause == 0)
            pool_pause(w->member), pauses--;
        const struct matrix matrix = head_matrix(p, head);
        const struct panels panels = head_panels(w, p, head);
        const struct product product = { .matrix = &matrix, .y = p->y + (size_t)head * p->y_head,
                                         .y_stride = p->y_stride };
        multiply(w, &product, &panels, 0, (struct strips){ max_int(share.first - head * per_head, 0),
                                                           min_int(share.last - head * per_head, per_head) });
    }
    while (pauses-- > 0) pool_pause(w->member);
}

// Normalizes the latents of this thread's rows. The normed latent is the value, and the end of the key.
static void norm_latents(const struct worker *w, const struct layer *layer) {
    const struct llamac_session *s = w->eval->session;
    const struct layer_record *record = layer->record;
    const struct heads heads = layer->heads;
    const int q_rank = (int)record->q_lora_rank, rank = heads.value_dim;
    int first, last;
    pool_share(w->member, w->eval->n_rows, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        float *q = s->scratch.q_latent + (size_t)r * (size_t)q_rank,
              *latent = s->scratch.k + (size_t)(r + 1) * (size_t)heads.dim - rank;
        if (q_rank) s->kernels->rms_norm(q, layer->attn_q_a_norm, NULL, record->latent_norm_eps, q_rank, q);
        s->kernels->rms_norm(latent, layer->attn_kv_a_norm, NULL, record->latent_norm_eps, rank, latent);
        memcpy(s->scratch.v + (size_t)r * (size_t)rank, latent, sizeof(float) * (size_t)rank);
    }
    pool_barrier(w->member);   // attn_q and attention read rows that other members have normalized
}

void latent_qkv(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    const struct layer *layer = &e->session->model->layers[l];
    const struct heads heads = layer->heads;
    const size_t rotated = (size_t)(heads.dim - heads.value_dim), n_heads = (size_t)heads.n, dim = (size_t)heads.dim,
                 q_dim = rotated + layer->record->qk_nope_head_dim;
    norm_latents(w, layer);
    if (layer->record->q_lora_rank) {
        const struct rows rows = { .x = scratch->q_latent, .n = e->n_rows, .width = layer->attn_q.columns };
        const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { &layer->attn_q }, 1 });
        const struct product q = { .matrix = &layer->attn_q, .bias = layer->attn_q_bias, .y = scratch->latent_heads };
        multiply(w, &q, &inputs, 0, strip_share(w, &layer->attn_q));
        pool_barrier(w->member);   // heads of q consist of strips that other members have computed
    }
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (size_t i = (size_t)first * n_heads; i < (size_t)last * n_heads; i++)
        memcpy(scratch->q + i * dim, scratch->latent_heads + i * q_dim, sizeof(float) * rotated);
    multiply_heads(w, &(struct head_products){
        .matrix = &layer->attn_k_b, .heads = heads.n, .x = scratch->latent_heads + rotated, .x_stride = n_heads * q_dim,
        .x_head = q_dim, .y = scratch->q + rotated, .y_stride = n_heads * dim, .y_head = dim,
    });
    pool_barrier(w->member);   // attention reads whole rows of q
}

void latent_values(const struct worker *w, int l) {
    const struct scratch *scratch = &w->eval->session->scratch;
    const struct layer *layer = &w->eval->session->model->layers[l];
    const size_t n_heads = (size_t)layer->heads.n, rank = (size_t)layer->heads.value_dim,
                 v_dim = layer->record->v_head_dim;
    multiply_heads(w, &(struct head_products){
        .matrix = &layer->attn_v_b, .heads = layer->heads.n,
        .x = scratch->mix, .x_stride = n_heads * rank, .x_head = rank,
        .y = scratch->latent_heads, .y_stride = n_heads * v_dim, .y_head = v_dim,
    });
    pool_barrier(w->member);   // the output projection reads all columns
}
