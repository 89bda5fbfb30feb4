// SPDX-License-Identifier: MIT
// attention.c - one layer's attention for a chunk of rows: RoPE, the KV cache, and queries against it.
//
//     q, k, v -> rotate -> cache -> runs of queries that look at one KV head -> softmax(q K) V -> mix
//
// The work is a list of items (KV head, query tile), heads outermost: where the team's shares end at heads, a thread reads just the
// cache that it wrote itself and no barrier is needed in between.
#include <math.h>
#include <string.h>
#include "common.h"
#include "eval.h"
#include "rope.h"

// Rows [first, last) of one sequence, in the chunk; their queries for one KV head are (row, head of the group) in that order.
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
static int tiles_of_run(const struct eval *e, struct run run) { return panel_count((run.last - run.first) * group_of(e)); }

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
        const float *inv_freq = original && e->session->context > original ? m->rope[t].inv_freq_long : m->rope[t].inv_freq;
        for (int r = first; r < last; r++) {
            float *angles = angles_of(e, t, r);
            rope_angles(e->rows[r].position, inv_freq, half, c->rope_attention_factor[t], angles, angles + half);
        }
    }
}

static void rotate_and_store(const struct worker *w, int layer, int head, int row) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int head_dim = (int)c->head_dim, group = group_of(e), table = s->model->layers[layer].record->rope, position = e->rows[row].position;
    float *k = s->scratch.k + ((size_t)row * c->n_kv_heads + (size_t)head) * c->head_dim;
    float *v = s->scratch.v + ((size_t)row * c->n_kv_heads + (size_t)head) * c->head_dim;
    if (table >= 0) {
        const int half = (int)c->rope_dim[table] / 2;
        const float *angles = angles_of(e, (uint32_t)table, row);
        float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)(head * group)) * c->head_dim;
        s->kernels->rotate(k, angles, angles + half, half);
        for (int g = 0; g < group; g++) s->kernels->rotate(q + g * head_dim, angles, angles + half, half);
    }
    const struct kv_view kv = session_kv(s, e->rows[row].sequence, layer, head);
    uint8_t *page = s->sequences[e->rows[row].sequence].pages[position / KV_PAGE];
    s->kernels->store_key[s->kv_dtype](page + kv.key_offset, position % KV_PAGE, head_dim, k);
    s->kernels->store_value[s->kv_dtype](page + kv.value_offset, position % KV_PAGE, head_dim, v);
}

// ---- queries

// Collects the queries of one tile of a run.
static void load_tile(struct eval *e, struct run run, int layer, int head, int tile, struct attend *a, float *panel) {
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int group = group_of(e), queries = (run.last - run.first) * group, start = panel_start(queries, tile);
    *a = (struct attend){ .kv = session_kv(s, e->rows[run.first].sequence, layer, head), .head_dim = (int)c->head_dim,
                          .n_queries = panel_start(queries, tile + 1) - start, .q = panel, .cancel = &e->cancel };
    for (int t = 0; t < a->n_queries; t++) {
        const int row = run.first + (start + t) / group, q_head = head * group + (start + t) % group;
        const float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim;
        for (int d = 0; d < a->head_dim; d++) panel[d * a->n_queries + t] = q[d] * c->attention_scale;
        a->visible[t] = e->rows[row].position + 1;
    }
}

static void store_tile(const struct eval *e, struct run run, int head, int tile, const struct attend *a) {
    const struct config *c = e->session->model->config;
    const int group = group_of(e), start = panel_start((run.last - run.first) * group, tile), width = value_width(a->head_dim);
    for (int t = 0; t < a->n_queries; t++) {
        const int row = run.first + (start + t) / group, q_head = head * group + (start + t) % group;
        memcpy(e->session->scratch.mix + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim, a->out + t * width, sizeof(float) * c->head_dim);
    }
}

void attention(const struct worker *w, int layer) {
    struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int heads = (int)c->n_kv_heads, ends_at_heads = heads % w->member->count == 0;
    int tiles = 0, first, last;
    for (struct run run = { 0 }; next_run(e, &run);) tiles += tiles_of_run(e, run);

    pool_share(w->member, heads * e->n_rows, &first, &last);
    for (int i = first; i < last && !cancelled(&e->cancel); i++) rotate_and_store(w, layer, i / e->n_rows, i % e->n_rows);
    if (!ends_at_heads) pool_barrier(w->member);

    float *panel = w->own->attention, *out = panel + PANEL_ROWS * c->head_dim, *scratch = out + PANEL_ROWS * value_width((int)c->head_dim);
    pool_share(w->member, heads * tiles, &first, &last);
    for (int head = 0, item = 0; head < heads; head++)
        for (struct run run = { 0 }; next_run(e, &run);)
            for (int tile = 0, n = tiles_of_run(e, run); tile < n; tile++, item++) {
                if (item < first || item >= last || cancelled(&e->cancel)) continue;
                struct attend a;
                load_tile(e, run, layer, head, tile, &a, panel);
                a.out = out, a.scratch = scratch;
                s->kernels->attend[s->kv_dtype](&a);
                store_tile(e, run, head, tile, &a);
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
        // a page's keys are a matrix (positions, head_dim), its values one (head_dim, positions): both read by the row of strips
        if (keys) s->kernels->gather[s->kv_dtype](page + kv.key_offset, float_strip_bytes(s->kv_dtype, head_dim), slot, head_dim, keys + (size_t)i * (size_t)head_dim);
        for (int d = 0; values && d < head_dim; d++) {
            float column[KV_PAGE];
            s->kernels->gather[s->kv_dtype](page + kv.value_offset, float_strip_bytes(s->kv_dtype, KV_PAGE), d, KV_PAGE, column);
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
    float *panel = w->own->attention, *scratch = panel + PANEL_ROWS * (c->head_dim + (size_t)value_width((int)c->head_dim));
    // one query at a time, so that rows land where the observer expects them: same sums in the same order as in `attention`
    for (int i = 0; w->member->index == 0 && i < e->n_rows * (int)c->n_heads; i++) {
        const int row = i / (int)c->n_heads, q_head = i % (int)c->n_heads, group = group_of(e);
        const float *q = s->scratch.q + ((size_t)row * c->n_heads + (size_t)q_head) * c->head_dim;
        float *to = scores + (size_t)i * stride;
        for (int p = 0; p < s->context; p++) to[p] = -INFINITY;
        for (int d = 0; d < (int)c->head_dim; d++) panel[d] = q[d] * c->attention_scale;
        const struct attend a = { .kv = session_kv(s, e->rows[row].sequence, layer, q_head / group), .head_dim = (int)c->head_dim, .n_queries = 1,
                                  .q = panel, .visible = { e->rows[row].position + 1 }, .scratch = scratch, .scores = to,
                                  .scores_stride = stride, .cancel = &e->cancel };
        s->kernels->attend[s->kv_dtype](&a);
    }
    pool_barrier(w->member);
}
