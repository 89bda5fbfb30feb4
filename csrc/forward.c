// SPDX-License-Identifier: MIT
// forward.c - the graph, once, for LLaMA and GPT-2, for prompts, single tokens and batches.
//
//     rows -> embed -> [ norm -> q,k,v -> rope, cache, attention -> out -> + -> norm -> ffn -> + ] x layers -> norm -> logits
//
// Every thread of the team runs this text. It works on its share of each operation, and they meet at about five barriers a layer.
// Up to REDUNDANT_ROWS rows each thread computes the norms for itself, which is cheaper than a meeting.
#include "eval.h"

#include <string.h>
#include "common.h"

static int is_redundant(int rows) { return rows <= REDUNDANT_ROWS; }

static void norm_row(const struct worker *w, const float *x, const float *weight, const float *bias, float *y) {
    const struct llamac_session *s = w->eval->session;
    const struct config *c = s->model->config;
    (c->norm == NORM_RMS ? s->kernels->norm_rms : s->kernels->norm_layer)(x, weight, bias, c->norm_eps, (int)c->dim, y);
}

static void put_in_panel(struct panel_row to, int first, const float *row, int n) {
    float *p = to.panel + (size_t)first * (size_t)to.height + to.place;
    if (to.height == 1) memcpy(p, row, sizeof(float) * (size_t)n);
    else for (int k = 0; k < n; k++) p[(size_t)k * (size_t)to.height] = row[k];
}

// Norms of rows of the residual stream, as panels. `picked` NULL: all rows of the chunk; else the n rows it names.
static const float *norm(const struct worker *w, const int *picked, int n, const float *weight, const float *bias) {
    const struct scratch *x = &w->eval->session->scratch;
    const int dim = (int)w->eval->session->model->config->dim, alone = is_redundant(n);
    float *panels = alone ? w->own->panel : x->panel;
    int first = 0, last = n;
    if (!alone) pool_share(w->member, n, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        norm_row(w, x->x + (size_t)(picked ? picked[r] : r) * (size_t)dim, weight, bias, w->own->row);
        put_in_panel(panel_row(panels, n, dim, r), 0, w->own->row, dim);
    }
    if (!alone) pool_barrier(w->member);
    return panels;
}

// One product of several that share an input: y (+)= W x + bias.
struct product { const struct matrix *matrix; const float *bias; float *y; float *copy; };

static void multiply(const struct worker *w, const struct product *p, const float *panels, int m, int add, int first_strip, int last_strip) {
    const struct gemm g = {
        .w = p->matrix->data, .strip_bytes = p->matrix->strip_bytes, .first = first_strip, .last = last_strip,
        .rows = p->matrix->rows, .columns = p->matrix->columns, .x = panels, .m = m, .bias = p->bias,
        .y = p->y, .y_stride = (size_t)p->matrix->rows, .add = add, .copy = p->copy, .sums = w->own->sums, .cancel = &w->eval->cancel,
    };
    w->eval->session->kernels->gemm[p->matrix->dtype](&g);
}

static int strips_of(const struct product *p) { return ceil_div(p->matrix->rows, STRIP_ROWS); }

// The strips of all the products are one long list; every thread takes one contiguous part of it.
static void linear(const struct worker *w, const struct product *products, int n, const float *panels, int m, int add) {
    int total = 0, first, last;
    for (int i = 0; i < n; i++) total += strips_of(&products[i]);
    pool_share(w->member, total, &first, &last);
    for (int i = 0; i < n; i++) {
        const int strips = strips_of(&products[i]);
        multiply(w, &products[i], panels, m, add, max_int(first, 0), min_int(last, strips));
        first -= strips, last -= strips;
    }
}

static void embed(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct llamac_model *m = s->model;
    const struct matrix *tokens = &m->token_embedding, *positions = &m->position_embedding;
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last; r++) {
        float *x = s->scratch.x + (size_t)r * m->config->dim;
        s->kernels->gather[tokens->dtype](tokens->data, tokens->strip_bytes, e->rows[r].token, tokens->columns, x);
        if (!positions->data) continue;
        s->kernels->gather[positions->dtype](positions->data, positions->strip_bytes, e->rows[r].position, positions->columns, w->own->row);
        s->kernels->add(w->own->row, positions->columns, x);
    }
}

// Gate and up of a thread's own columns, then the activation: no barrier in between.
static void ffn_hidden(const struct worker *w, const struct layer *layer, const float *panels) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const int gated = layer->ffn_gate.data != NULL, dim = layer->ffn_up.rows;
    const struct product up = { &layer->ffn_up, layer->ffn_up_bias, x->up, NULL }, gate = { &layer->ffn_gate, layer->ffn_gate_bias, x->gate, NULL };
    int first, last;
    pool_share(w->member, strips_of(&up), &first, &last);
    multiply(w, &up, panels, e->n_rows, 0, first, last);
    if (gated) multiply(w, &gate, panels, e->n_rows, 0, first, last);
    first *= STRIP_ROWS, last = min_int(last * STRIP_ROWS, dim);
    for (int r = 0; r < e->n_rows && first < last && !cancelled(&w->eval->cancel); r++) {
        const float *u = x->up + (size_t)r * (size_t)dim + first, *g = x->gate + (size_t)r * (size_t)dim + first;
        s->kernels->activate((int)s->model->config->activation, gated ? g : u, gated ? u : NULL, last - first, w->own->row);
        put_in_panel(panel_row(x->hidden, e->n_rows, dim, r), first, w->own->row, last - first);
    }
}

static void block(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const int n = e->n_rows, dim = (int)s->model->config->dim;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows;

    const float *h = norm(w, NULL, n, layer->attn_norm, layer->attn_norm_bias);
    observe(w, LLAMAC_STAGE_ATTN_NORM, l, h, n, dim, 0);
    const struct product qkv[] = {
        { &layer->attn_q, layer->attn_q_bias, x->q, NULL }, { &layer->attn_k, layer->attn_k_bias, x->k, NULL }, { &layer->attn_v, layer->attn_v_bias, x->v, NULL },
    };
    linear(w, qkv, 3, h, n, 0);
    pool_barrier(w->member);
    attention(w, l);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_Q, l, x->q, n, q_dim, q_dim);
    observe(w, LLAMAC_STAGE_K, l, x->k, n, kv_dim, kv_dim);
    observe(w, LLAMAC_STAGE_V, l, x->v, n, kv_dim, kv_dim);
    observe_cache(w, l);
    observe_scores(w, l);
    observe(w, LLAMAC_STAGE_ATTN_MIX, l, x->mix, n, q_dim, 0);
    const struct product out = { &layer->attn_out, layer->attn_out_bias, x->x, observed(e, LLAMAC_STAGE_ATTN_OUT, l) };
    linear(w, &out, 1, x->mix, n, 1);
    pool_barrier(w->member);

    h = norm(w, NULL, n, layer->ffn_norm, layer->ffn_norm_bias);
    observe(w, LLAMAC_STAGE_FFN_NORM, l, h, n, dim, 0);
    ffn_hidden(w, layer, h);
    pool_barrier(w->member);
    const struct product down = { &layer->ffn_down, layer->ffn_down_bias, x->x, observed(e, LLAMAC_STAGE_FFN, l) };
    linear(w, &down, 1, x->hidden, n, 1);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_BLOCK, l, x->x, n, dim, dim);
}

// Final norm and logits of the rows that want them.
static void output(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    int picked[MAX_ROWS], n = 0;
    for (int r = 0; r < e->n_rows; r++)
        if (e->rows[r].want_logits) picked[n++] = r;
    if (!n) return;
    const float *h = norm(w, picked, n, m->output_norm, m->output_norm_bias);
    observe(w, LLAMAC_STAGE_OUTPUT_NORM, 0, h, n, (int)m->config->dim, 0);
    const struct product logits = { &m->output, m->output_bias, e->logits, observed(e, LLAMAC_STAGE_LOGITS, 0) };
    linear(w, &logits, 1, h, n, 0);
}

void forward(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    embed(w);
    attention_prepare(w);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_EMBEDDING, 0, s->scratch.x, e->n_rows, (int)c->dim, (int)c->dim);
    for (int l = 0; l < (int)c->n_layers; l++) block(w, l);
    output(w);
}
