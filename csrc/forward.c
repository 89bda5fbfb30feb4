// SPDX-License-Identifier: MIT
// forward.c - the graph, once, for LLaMA and GPT-2, for prompts, single tokens and batches.
//
//     rows -> embed -> [ norm -> q,k,v -> rope, cache, attention -> out -> + -> norm -> ffn -> + ] x layers -> norm -> logits
//
// Every thread of the team runs this text. It works on its share of each operation, and they meet at four barriers a layer. Where
// the KV heads do not divide evenly among them it is six: also after q, k, v, and after what the cache gets of them; where only
// head_dim is no multiple of STRIP_ROWS, five. With many rows there are four more, after each preparation of inputs.
#include "eval.h"

#include <string.h>
#include "common.h"

// Rows of numbers (n, width) on their way into products: `picked` NULL or the rows' indices, `norm` NULL or what is done to each first.
struct norm_step { const float *weight, *bias; float *observed; };
struct rows { const float *x; const int *picked; int n, width; const struct norm_step *norm; };

// The kinds of inputs that matrices multiply with, as bits.
static unsigned kind_of(const struct matrix *m) { return m->data ? 1u << input_of(m->dtype) : 0; }

struct panels { const void *of[N_INPUTS]; int m; };

// Up to REDUNDANT_ROWS rows each thread prepares for itself, which is cheaper than a meeting; more are shared, and then it ends at a barrier.
static struct panels prepare(const struct worker *w, struct rows rows, unsigned kinds) {
    const struct llamac_session *s = w->eval->session;
    const struct config *c = s->model->config;
    const int alone = rows.n <= REDUNDANT_ROWS;
    void *const *to = alone ? w->own->panels : s->scratch.panels;
    int first = 0, last = rows.n;
    if (!alone) pool_share(w->member, rows.n, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        const float *x = rows.x + (size_t)(rows.picked ? rows.picked[r] : r) * (size_t)rows.width;
        if (rows.norm) {
            (c->norm == NORM_RMS ? s->kernels->norm_rms : s->kernels->norm_layer)(x, rows.norm->weight, rows.norm->bias, c->norm_eps, rows.width, w->own->row);
            x = w->own->row;
            if (rows.norm->observed && (!alone || w->member->index == 0))
                memcpy(rows.norm->observed + (size_t)r * (size_t)rows.width, x, sizeof(float) * (size_t)rows.width);
        }
        for (int kind = 0; kind < N_INPUTS; kind++)
            if (kinds & 1u << kind) s->kernels->pack[kind](panel_row(to[kind], rows.n, input_words(kind, rows.width), r), x, rows.width);
    }
    if (!alone) pool_barrier(w->member);
    struct panels p = { .m = rows.n };
    for (int kind = 0; kind < N_INPUTS; kind++) p.of[kind] = to[kind];
    return p;
}

// One product of several that share an input: y (+)= W x + bias.
struct product { const struct matrix *matrix; const float *bias; float *y; float *copy; };

static void multiply(const struct worker *w, const struct product *p, const struct panels *x, int add, int first_strip, int last_strip) {
    const struct gemm g = {
        .w = p->matrix->data, .strip_bytes = p->matrix->strip_bytes, .first = first_strip, .last = last_strip,
        .rows = p->matrix->rows, .columns = p->matrix->columns, .x = x->of[input_of(p->matrix->dtype)], .m = x->m, .bias = p->bias,
        .y = p->y, .y_stride = (size_t)p->matrix->rows, .add = add, .copy = p->copy, .scratch = w->own->gemm, .cancel = &w->eval->cancel,
    };
    w->eval->session->kernels->gemm[p->matrix->dtype](&g);
}

static int strips_of(const struct product *p) { return ceil_div(p->matrix->rows, STRIP_ROWS); }

// The strips of all the products are one long list; every thread takes one contiguous part of it.
static void linear(const struct worker *w, const struct product *products, int n, const struct panels *x, int add) {
    int total = 0, first, last;
    for (int i = 0; i < n; i++) total += strips_of(&products[i]);
    pool_share(w->member, total, &first, &last);
    for (int i = 0; i < n; i++) {
        const int strips = strips_of(&products[i]);
        multiply(w, &products[i], x, add, max_int(first, 0), min_int(last, strips));
        first -= strips, last -= strips;
    }
}

// q, k and v. Where the KV heads divide evenly among the threads, each computes those of the heads whose attention it will compute, and
// they need not meet in between.
static void project(const struct worker *w, const struct product qkv[3], const struct panels *x) {
    const struct config *c = w->eval->session->model->config;
    const int heads = (int)c->n_kv_heads;
    int first, last;
    if (heads % w->member->count || c->head_dim % STRIP_ROWS) {
        linear(w, qkv, 3, x, 0);
        pool_barrier(w->member);
        return;
    }
    pool_share(w->member, heads, &first, &last);
    for (int i = 0; i < 3; i++) {
        const int strips = strips_of(&qkv[i]) / heads;
        multiply(w, &qkv[i], x, 0, first * strips, last * strips);
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

// Gate and up of a thread's own columns, then the activation, in place of up: no barrier in between.
static void ffn_hidden(const struct worker *w, const struct layer *layer, const struct panels *x) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const int gated = layer->ffn.gate.data != NULL, dim = layer->ffn.up.rows;
    const struct product up = { &layer->ffn.up, layer->ffn.up_bias, s->scratch.up, NULL }, gate = { &layer->ffn.gate, layer->ffn.gate_bias, s->scratch.gate, NULL };
    int first, last;
    pool_share(w->member, strips_of(&up), &first, &last);
    multiply(w, &up, x, 0, first, last);
    if (gated) multiply(w, &gate, x, 0, first, last);
    first *= STRIP_ROWS, last = min_int(last * STRIP_ROWS, dim);
    for (int r = 0; r < e->n_rows && first < last && !cancelled(&w->eval->cancel); r++) {
        float *u = s->scratch.up + (size_t)r * (size_t)dim + first, *g = s->scratch.gate + (size_t)r * (size_t)dim + first;
        s->kernels->activate((int)s->model->config->activation, gated ? g : u, gated ? u : NULL, last - first, u);
    }
}

static void block(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const int n = e->n_rows, dim = (int)s->model->config->dim;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows;

    const struct norm_step attn_norm = { layer->attn_norm, layer->attn_norm_bias, observed(e, LLAMAC_STAGE_ATTN_NORM, l) };
    struct panels h = prepare(w, (struct rows){ x->x, NULL, n, dim, &attn_norm }, kind_of(&layer->attn_q) | kind_of(&layer->attn_k) | kind_of(&layer->attn_v));
    const struct product qkv[] = {
        { &layer->attn_q, layer->attn_q_bias, x->q, NULL }, { &layer->attn_k, layer->attn_k_bias, x->k, NULL }, { &layer->attn_v, layer->attn_v_bias, x->v, NULL },
    };
    project(w, qkv, &h);
    attention(w, l);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_Q, l, x->q, n, q_dim);
    observe(w, LLAMAC_STAGE_K, l, x->k, n, kv_dim);
    observe(w, LLAMAC_STAGE_V, l, x->v, n, kv_dim);
    observe_cache(w, l);
    observe_scores(w, l);
    observe(w, LLAMAC_STAGE_ATTN_MIX, l, x->mix, n, q_dim);
    h = prepare(w, (struct rows){ x->mix, NULL, n, q_dim, NULL }, kind_of(&layer->attn_out));
    const struct product out = { &layer->attn_out, layer->attn_out_bias, x->x, observed(e, LLAMAC_STAGE_ATTN_OUT, l) };
    linear(w, &out, 1, &h, 1);
    pool_barrier(w->member);

    const struct norm_step ffn_norm = { layer->ffn_norm, layer->ffn_norm_bias, observed(e, LLAMAC_STAGE_FFN_NORM, l) };
    h = prepare(w, (struct rows){ x->x, NULL, n, dim, &ffn_norm }, kind_of(&layer->ffn.gate) | kind_of(&layer->ffn.up));
    ffn_hidden(w, layer, &h);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_FFN_HIDDEN, l, x->up, n, layer->ffn.up.rows);
    h = prepare(w, (struct rows){ x->up, NULL, n, layer->ffn.up.rows, NULL }, kind_of(&layer->ffn.down));
    const struct product down = { &layer->ffn.down, layer->ffn.down_bias, x->x, observed(e, LLAMAC_STAGE_FFN, l) };
    linear(w, &down, 1, &h, 1);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_BLOCK, l, x->x, n, dim);
}

// Final norm and logits of the rows that want them.
static void output(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    int picked[MAX_ROWS], n = 0;
    for (int r = 0; r < e->n_rows; r++)
        if (e->rows[r].want_logits) picked[n++] = r;
    if (!n) return;
    const struct norm_step norm = { m->output_norm, m->output_norm_bias, observed(e, LLAMAC_STAGE_OUTPUT_NORM, 0) };
    const struct panels h = prepare(w, (struct rows){ e->session->scratch.x, picked, n, (int)m->config->dim, &norm }, kind_of(&m->output));
    const struct product logits = { &m->output, m->output_bias, e->logits, observed(e, LLAMAC_STAGE_LOGITS, 0) };
    linear(w, &logits, 1, &h, 0);
}

void forward(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    embed(w);
    attention_prepare(w);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_EMBEDDING, 0, s->scratch.x, e->n_rows, (int)c->dim);
    for (int l = 0; l < (int)c->n_layers; l++) block(w, l);
    output(w);
}
