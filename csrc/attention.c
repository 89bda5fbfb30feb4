// SPDX-License-Identifier: MIT
// attention.c - one layer's attention for a chunk of rows: RoPE, the KV cache, and queries against it.
//
//     q, k, v -> norm -> rotate -> cache -> runs of queries that look at one KV head -> softmax(q K) V -> mix
//
// The work is a list of items (KV head, some queries), heads outermost: where the team's shares end at heads, a thread
// reads just the cache that it wrote itself and no barrier is needed in between.
#include <math.h>
#include <string.h>
#include "common.h"
#include "eval.h"
#include "rope.h"

// Rows [first, last) of one sequence, in the chunk; their queries for one KV head are (row, head of the group) in that
// order.
struct run { int first, last; };

static int next_run(const struct eval *e, struct run *run) {
    run->first = run->last;
    if (run->first >= e->n_rows) return 0;
    while (run->last < e->n_rows && e->rows[run->last].sequence == e->rows[run->first].sequence) run->last++;
    return 1;
}
static int group_of(const struct eval *e) {
    const struct config *c = e->session->model->config;
    return (int)(c->n_heads / c->n_kv_heads);
}
// A run's queries for one KV head in parts that are computed together. Small parts where heads alone do not keep every
// thread busy.
static int parts_of_run(const struct eval *e, struct run run, int whole_heads) {
    return ceil_div((run.last - run.first) * group_of(e), whole_heads ? ATTENTION_QUERIES : PANEL_ROWS);
}

// ---- RoPE and cache

static float *angles_of(const struct eval *e, uint32_t table, int row) {
    const struct config *c = e->session->model->config;
    return e->session->scratch.angles + ((size_t)table * (size_t)e->session->scratch.rows + (size_t)row) * c->head_dim;
}

void attention_prepare(const struct worker *w) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    const struct config *c = m->config;
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (uint32_t t = 0; t < c->n_rope; t++) {
        const int half = (int)c->rope_dim[t] / 2, original = (int)c->rope_original_context[t];
        // a session's context decides once: its bits must not depend on how far it has come
        const float *inv_freq = original && e->session->context > original ? m->rope[t].inv_freq_long
            : m->rope[t].inv_freq;
        for (int r = first; r < last; r++) {
            float *angles = angles_of(e, t, r);
            rope_angles(e->rows[r].position, inv_freq, half, c->rope_attention_factor[t], angles, angles + half);
        }
    }
}

// Norms of heads by themselves, of n from `head` on; x is the first of them.
static void head_norms(const struct llamac_session *s, const float *weight, int head, int n, float *x) {
    const struct config *c = s->model->config;
    const int head_dim = (int)c->head_dim;
    for (int i = 0; i < n; i++, x += head_dim) {
        if (c->qk_norm == QK_NORM_HEAD) s->kernels->rms_norm(x, weight, NULL, c->norm_eps, head_dim, x);
        if (c->qk_norm == QK_NORM_LAYER_HEAD) s->kernels->layer_norm(x, weight + (head + i) * head_dim, NULL,
            c->norm_eps, head_dim, x);
    }
}

static void rotate_and_store(const struct worker *w, int layer, int head, int row) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int head_dim = (int)c->head_dim, group = group_of(e), table = s->model->layers[layer].record->rope,
        position = e->rows[row].position;
    float *k = s->scratch.k + ((size_t)row * c->n_kv_heads + (size_t)head) * c->head_dim;
    float *v = s->scratch.v + ((size_t)row * c->n_kv_heads + (size_t)head) * c->head_dim;
    float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)(head * group)) * c->head_dim;
    head_norms(s, s->model->layers[layer].attn_k_norm, head, 1, k);
    head_norms(s, s->model->layers[layer].attn_q_norm, head * group, group, q);
    if (table >= 0) {
        const int half = (int)c->rope_dim[table] / 2;
        const float *angles = angles_of(e, (uint32_t)table, row);
        s->kernels->rotate(k, angles, angles + half, half);
        for (int g = 0; g < group; g++) s->kernels->rotate(q + g * head_dim, angles, angles + half, half);
    }
    const struct kv_view kv = session_kv(s, e->rows[row].sequence, layer, head);
    uint8_t *page = s->sequences[e->rows[row].sequence].pages[position / KV_PAGE];
    s->kernels->store_key[s->kv_dtype](page + kv.key_offset, position % KV_PAGE, head_dim, k);
    s->kernels->store_value[s->kv_dtype](page + kv.value_offset, position % KV_PAGE, head_dim, v);
}

// ---- queries

// Queries [first, last) of a run for one KV head, counted by row, then by head of the group.
struct queries { struct run run; int head, first, last; };

// The first position that a row sees.
static int first_seen(const struct llamac_session *s, int layer, int position) {
    const int window = (int)s->model->layers[layer].record->window;
    return window ? max_int(0, position + 1 - window) : 0;
}

static void load_queries(const struct eval *e, int layer, struct queries part, struct attend *a, float *panels) {
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int group = group_of(e), head_dim = (int)c->head_dim, n = part.last - part.first;
    *a = (struct attend){ .kv = session_kv(s, e->rows[part.run.first].sequence, layer, part.head),
        .head_dim = head_dim, .n_queries = n, .q = panels,
                          .soft_cap = c->attention_soft_cap };
    for (int t = 0; t < n; t++) {
        const int row = part.run.first + (part.first + t) / group,
            q_head = part.head * group + (part.first + t) % group;
        const float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim;
        const struct panel_row to = panel_row(panels, n, (size_t)head_dim, t);
        float *p = (float *)(void *)to.panel + to.row;
        for (int d = 0; d < head_dim; d++) p[d * to.height] = q[d] * c->attention_scale;
        a->end[t] = e->rows[row].position + 1;
        a->begin[t] = first_seen(s, layer, e->rows[row].position);
    }
}

static void store_queries(const struct eval *e, struct queries part, const float *out) {
    const struct config *c = e->session->model->config;
    const int group = group_of(e), width = padded_head_dim((int)c->head_dim);
    for (int t = 0; t < part.last - part.first; t++) {
        const int row = part.run.first + (part.first + t) / group,
            q_head = part.head * group + (part.first + t) % group;
        memcpy(e->session->scratch.mix + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim, out + t * width,
            sizeof(float) * c->head_dim);
    }
}

void attention(const struct worker *w, int layer) {
    struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int heads = (int)c->n_kv_heads, whole_heads = heads % w->member->count == 0;
    int items = 0, first, last;
    for (struct run run = { 0 }; next_run(e, &run);) items += parts_of_run(e, run, whole_heads);

    pool_share(w->member, heads * e->n_rows, &first, &last);
    for (int i = first; i < last && !cancelled(&e->cancel);
        i++) rotate_and_store(w, layer, i / e->n_rows, i % e->n_rows);
    if (!whole_heads) pool_barrier(w->member);

    float *panels = w->local->attention, *out = panels + ATTENTION_QUERIES * c->head_dim,
        *scratch = out + ATTENTION_QUERIES * padded_head_dim((int)c->head_dim);
    pool_share(w->member, heads * items, &first, &last);
    for (int head = 0, item = 0; head < heads; head++)
        for (struct run run = { 0 }; next_run(e, &run);) {
            const int queries = (run.last - run.first) * group_of(e), parts = parts_of_run(e, run, whole_heads);
            for (int i = 0; i < parts; i++, item++) {
                if (item < first || item >= last || cancelled(&e->cancel)) continue;
                const struct queries part = { run, head, (int)((int64_t)queries * i / parts),
                    (int)((int64_t)queries * (i + 1) / parts) };
                struct attend a;
                load_queries(e, layer, part, &a, panels);
                a.out = out, a.scratch = scratch, a.cancel = &e->cancel;
                s->kernels->attend[s->kv_dtype](&a);
                store_queries(e, part, out);
            }
        }
}

// ---- what an observer may ask for

void observe_cache(const struct worker *w, int layer) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    float *keys = observed(e, LLAMAC_STAGE_CACHE_K, layer), *values = observed(e, LLAMAC_STAGE_CACHE_V, layer);
    if (!keys && !values) return;
    const int head_dim = (int)c->head_dim;
    for (int i = 0; w->member->index == 0 && i < e->n_rows * (int)c->n_kv_heads; i++) {
        const int row = i / (int)c->n_kv_heads, head = i % (int)c->n_kv_heads, slot = e->rows[row].position % KV_PAGE;
        const struct kv_view kv = session_kv(s, e->rows[row].sequence, layer, head);
        const uint8_t *page = kv.pages[e->rows[row].position / KV_PAGE];
        // a page's keys are a matrix (positions, head_dim), its values one (head_dim, positions): both read by the row
        // of strips
        if (keys) s->kernels->gather[s->kv_dtype](page + kv.key_offset, float_strip_bytes(s->kv_dtype, head_dim), slot,
            head_dim, keys + (size_t)i * (size_t)head_dim);
        for (int d = 0; values && d < head_dim; d++) {
            float column[KV_PAGE];
            s->kernels->gather[s->kv_dtype](page + kv.value_offset, float_strip_bytes(s->kv_dtype, KV_PAGE), d,
                KV_PAGE, column);
            values[(size_t)i * (size_t)head_dim + (size_t)d] = column[slot];
        }
    }
    pool_barrier(w->member);
}

void observe_scores(const struct worker *w, int layer) {
    struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    float *scores = observed(e, LLAMAC_STAGE_SCORES, layer);
    if (!scores) return;
    const size_t stride = (size_t)s->context;
    float *panel = w->local->attention,
        *scratch = panel + ATTENTION_QUERIES * (c->head_dim + (size_t)padded_head_dim((int)c->head_dim));
    // one query at a time, so that rows land where the observer expects them: same sums in the same order as in
    // `attention`
    for (int i = 0; w->member->index == 0 && i < e->n_rows * (int)c->n_heads; i++) {
        const int row = i / (int)c->n_heads, q_head = i % (int)c->n_heads, group = group_of(e);
        const float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim;
        float *to = scores + (size_t)i * stride;
        for (int p = 0; p < s->context; p++) to[p] = -INFINITY;
        for (int d = 0; d < (int)c->head_dim; d++) panel[d] = q[d] * c->attention_scale;
        const struct attend a = { .kv = session_kv(s, e->rows[row].sequence, layer, q_head / group),
            .head_dim = (int)c->head_dim, .n_queries = 1,
                                  .q = panel, .begin = { first_seen(s, layer, e->rows[row].position) },
                                      .end = { e->rows[row].position + 1 },
                                  .soft_cap = c->attention_soft_cap, .scratch = scratch, .scores = to,
                                      .scores_stride = stride, .cancel = &e->cancel };
        s->kernels->attend[s->kv_dtype](&a);
    }
    pool_barrier(w->member);
}
