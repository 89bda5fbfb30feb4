// SPDX-License-Identifier: MIT
// forward.c - the graph: one forward pass for all families, for prompts, single tokens and batches.
//
//     rows -> embed
//          -> [ norm -> q, k, v -> rope, cache, attention -> out -> + -> norm -> ffn -> + ] x layers
//          -> norm -> logits
//
// Every member of the team runs this code on its share of each operation. A layer has four barriers. It has six if the
// KV heads do not divide evenly among the members, five if only head_dim is not a multiple of STRIP_ROWS, and four more
// with more than REDUNDANT_ROWS rows, which share the preparation of inputs. Norms over the whole q and k add two, a
// router adds one. Parallel blocks need two fewer.
#include <string.h>
#include "common.h"
#include "lora.h"
#include "products.h"

// The residual stream. A post-norm branch is complete only after the next barrier. Until then it is pending: the next
// reader of the rows adds it, and writes the sum to the other of two buffers.
struct residual { float *x, *other; struct pending pending; };

// The weight of each row of a branch, residual_scale, or NULL for 1.
static const float *residual_scales(const struct llamac_session *s) {
    return s->model->config->residual_scale == 1 ? NULL : s->scratch.scales;
}

static void swap_buffers(struct residual *stream) {
    float *const x = stream->x;
    stream->x = stream->other, stream->other = x;
    stream->pending = (struct pending){ 0 };
}
static void apply_pending(const struct worker *w, struct residual *stream) {
    if (!stream->pending.branch) return;
    add_branch(w, stream->x, &stream->pending, w->eval->n_rows, (int)w->eval->session->model->config->dim);
    swap_buffers(stream);
}
// Normalizes the stream's rows and packs them as inputs of the readers.
static struct panels prepare_stream(const struct worker *w, struct residual *stream, struct norm_weights norm,
    float *seen, int keep, struct readers readers) {
    const struct rows rows = { .x = stream->x, .n = w->eval->n_rows, .width = (int)w->eval->session->model->config->dim,
                               .pending = stream->pending.branch ? &stream->pending : NULL, .norm = norm,
                                   .observed = seen, .keep = keep };
    const struct panels p = prepare(w, rows, readers);
    if (rows.pending) swap_buffers(stream);
    return p;
}

// q, k and v. Where the KV heads divide evenly among the threads, each computes those of the heads whose attention it
// will compute, and they need not meet in between.
static void project(const struct worker *w, const struct product qkv[3], const struct panels *x) {
    const struct config *c = w->eval->session->model->config;
    const int heads = (int)c->n_kv_heads, own_heads = heads % w->member->count == 0 && c->head_dim % STRIP_ROWS == 0;
    int first, last;
    if (!own_heads) linear(w, qkv, 3, x, 0);
    pool_share(w->member, heads, &first, &last);
    for (int i = 0; own_heads && i < 3; i++) {
        const int strips = strips_of(qkv[i].matrix) / heads;
        multiply(w, &qkv[i], x, 0, first * strips, last * strips);
    }
    if (!own_heads || c->qk_norm == QK_NORM_WHOLE) pool_barrier(w->member);
}

// Norms over all heads together. (Those of single heads are attention's.)
static void norm_whole(const struct worker *w, const struct layer *layer) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    if (c->qk_norm != QK_NORM_WHOLE) return;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows;
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        float *q = s->scratch.q + (size_t)r * (size_t)q_dim, *k = s->scratch.k + (size_t)r * (size_t)kv_dim;
        s->kernels->rms_norm(q, layer->attn_q_norm, NULL, c->norm_eps, q_dim, q);
        s->kernels->rms_norm(k, layer->attn_k_norm, NULL, c->norm_eps, kv_dim, k);
    }
    pool_barrier(w->member);
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
        if (tokens->lora) lora_gather(w, tokens->lora, e->rows[r].token, tokens->columns, x);
        if (m->config->embedding_scale != 1) s->kernels->scale(x, tokens->columns, m->config->embedding_scale, 0);
        if (!positions->data) continue;
        s->kernels->gather[positions->dtype](positions->data, positions->strip_bytes, e->rows[r].position,
            positions->columns, w->local->row);
        if (positions->lora) lora_gather(w, positions->lora, e->rows[r].position, positions->columns, w->local->row);
        s->kernels->add(w->local->row, positions->columns, x);
    }
}

// The feed-forward network up to its hidden numbers, each thread's own columns.
static void ffn_hidden(const struct worker *w, struct residual *stream, int l) {
    const struct eval *e = w->eval;
    const struct scratch *x = &e->session->scratch;
    const struct layer *layer = &e->session->model->layers[l];
    const struct norm_weights norm = { layer->ffn_norm, layer->ffn_norm_bias };
    float *const seen = observed(e, LLAMAC_STAGE_FFN_NORM, l);
    const int experts = layer->record->ffn == FFN_EXPERTS;
    const struct readers readers = experts ? (struct readers){ { &layer->ffn_router }, 1 }
        : readers_of_hidden(&layer->ffn);
    const struct panels h = prepare_stream(w, stream, norm, seen, experts, readers);
    if (experts) experts_hidden(w, l, &h);
    else hidden(w, &layer->ffn, &h, x->gate, x->up);
}

// Its second half: to the stream, or, where a norm comes behind, to `branch`.
static void ffn_down(const struct worker *w, int l, float *stream, float *branch) {
    const struct eval *e = w->eval;
    const struct scratch *x = &e->session->scratch;
    const struct layer *layer = &e->session->model->layers[l];
    if (layer->record->ffn == FFN_EXPERTS) {
        experts_observe(w, l);
        experts_down(w, l, x->branch, branch ? NULL : stream);
        return;
    }
    const struct expert *ffn = &layer->ffn;
    observe(w, LLAMAC_STAGE_FFN_ROUTER, l, x->up, e->n_rows, 0);
    observe(w, LLAMAC_STAGE_FFN_HIDDEN, l, x->up, e->n_rows, ffn->up.rows);
    const struct panels h = prepare(w, (struct rows){ .x = x->up, .n = e->n_rows, .width = ffn->up.rows },
        (struct readers){ { &ffn->down }, 1 });
    const struct product down = { .matrix = &ffn->down, .bias = ffn->down_bias, .y = branch ? branch : stream,
        .copy = observed(e, LLAMAC_STAGE_FFN, l),
                                  .weights = branch ? NULL : residual_scales(e->session) };
    linear(w, &down, 1, &h, !branch);
}

static void block(const struct worker *w, struct residual *stream, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const enum placement placement = layer->record->placement;
    const int n = e->n_rows, q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows,
        parallel = placement == PLACEMENT_PARALLEL;
    float *const branch = placement == PLACEMENT_POST || placement == PLACEMENT_SANDWICH ? x->branch : NULL;

    if (parallel) apply_pending(w, stream);
    const struct norm_weights attn_norm = { layer->attn_norm, layer->attn_norm_bias };
    struct panels h = prepare_stream(w, stream, attn_norm, observed(e, LLAMAC_STAGE_ATTN_NORM, l), 0,
                                     (struct readers){ { &layer->attn_q, &layer->attn_k, &layer->attn_v }, 3 });
    const struct product qkv[] = {
        { .matrix = &layer->attn_q, .bias = layer->attn_q_bias, .y = x->q },
            { .matrix = &layer->attn_k, .reader = 1, .bias = layer->attn_k_bias, .y = x->k },
        { .matrix = &layer->attn_v, .reader = 2, .bias = layer->attn_v_bias, .y = x->v },
    };
    project(w, qkv, &h);
    norm_whole(w, layer);
    if (parallel) {
        if (!is_redundant(n)) pool_barrier(w->member);   // before shared panels are filled anew
        ffn_hidden(w, stream, l);
    }
    attention(w, l);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_Q, l, x->q, n, q_dim);
    observe(w, LLAMAC_STAGE_K, l, x->k, n, kv_dim);
    observe(w, LLAMAC_STAGE_V, l, x->v, n, kv_dim);
    observe_cache(w, l);
    observe_scores(w, l);
    observe(w, LLAMAC_STAGE_ATTN_MIX, l, x->mix, n, q_dim);
    h = prepare(w, (struct rows){ .x = x->mix, .n = n, .width = q_dim }, (struct readers){ { &layer->attn_out }, 1 });
    const struct product out = { .matrix = &layer->attn_out, .bias = layer->attn_out_bias,
        .y = branch ? branch : stream->x,
                                 .copy = observed(e, LLAMAC_STAGE_ATTN_OUT, l),
                                     .weights = branch ? NULL : residual_scales(s) };
    linear(w, &out, 1, &h, !branch);
    if (branch) stream->pending = (struct pending){ branch, { layer->attn_post_norm, layer->attn_post_norm_bias },
        stream->other };

    if (!parallel || !is_redundant(n)) pool_barrier(w->member);
    if (!parallel) {
        ffn_hidden(w, stream, l);
        pool_barrier(w->member);
    }
    ffn_down(w, l, stream->x, branch);
    pool_barrier(w->member);
    if (branch) stream->pending = (struct pending){ branch, { layer->ffn_post_norm, layer->ffn_post_norm_bias },
        stream->other };
    if (l + 1 < (int)s->model->config->n_layers && !observed(e, LLAMAC_STAGE_BLOCK, l)) return;
    apply_pending(w, stream);
    observe(w, LLAMAC_STAGE_BLOCK, l, stream->x, n, (int)s->model->config->dim);
}

// Final norm and logits of the rows that want them.
static void output(const struct worker *w, const float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    int picked[MAX_ROWS], n = 0;
    for (int r = 0; r < e->n_rows; r++)
        if (e->rows[r].want_logits) picked[n++] = r;
    if (!n) return;
    const struct rows rows = { .x = x, .picked = picked, .n = n, .width = (int)m->config->dim,
        .norm = { m->output_norm, m->output_norm_bias },
                               .observed = observed(e, LLAMAC_STAGE_OUTPUT_NORM, 0) };
    const struct panels h = prepare(w, rows, (struct readers){ { &m->output }, 1 });
    const float scale = m->config->logit_scale, cap = m->config->logit_soft_cap;
    const int changed = scale != 1 || cap > 0;
    float *const seen = observed(e, LLAMAC_STAGE_LOGITS, 0);
    const struct product logits = { .matrix = &m->output, .bias = m->output_bias, .y = e->logits,
        .copy = changed ? NULL : seen };
    linear(w, &logits, 1, &h, 0);
    int first, last;
    pool_share(w->member, strips_of(&m->output), &first, &last);   // the same as in `linear`
    first *= STRIP_ROWS, last = min_int(last * STRIP_ROWS, m->output.rows);
    for (int r = 0; changed && r < n && first < last; r++) {
        const size_t at = (size_t)r * (size_t)m->output.rows + (size_t)first;
        e->session->kernels->scale(e->logits + at, last - first, scale, cap);
        if (seen) memcpy(seen + at, e->logits + at, sizeof(float) * (size_t)(last - first));
    }
}

void forward(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    struct residual stream = { .x = s->scratch.x, .other = s->scratch.other };
    embed(w);
    attention_prepare(w);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_EMBEDDING, 0, s->scratch.x, e->n_rows, (int)c->dim);
    for (int l = 0; l < (int)c->n_layers; l++) block(w, &stream, l);
    output(w, stream.x);
}
