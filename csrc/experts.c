// SPDX-License-Identifier: MIT
// experts.c - a mixture of experts: which rows go to which experts, and the experts' products.
//
//     rows -> router -> each row's experts -> pairs (expert, row) sorted by expert -> gate, up -> down
//          -> sums by row, experts ascending
//
// A chunk reads the weights of each expert once, for all its rows together, and skips experts without rows.
#include <string.h>
#include "common.h"
#include "products.h"

// An expert's rows: pairs [first, first + n).
struct expert_pairs { int first, n; };
static struct expert_pairs pairs_of(const struct worker *w, int expert) {
    const int *starts = w->local->pairs.starts;
    return (struct expert_pairs){ starts[expert], starts[expert + 1] - starts[expert] };
}

// ---- routing

// The largest comes first, the lowest among equals; a NaN before all numbers, so that it is not lost.
static int is_before(float x, float y) { return x > y || (x != x && y == y); }

// A row's experts, ascending, and their weights. logits (n_experts); p has room for as many.
static void choose(const struct kernels *kernels, const struct layer_record *record, const float *logits, float *p,
    int *experts, float *weights) {
    const int n = (int)record->n_experts, used = (int)record->n_experts_used;
    uint8_t taken[FORMAT_MAX_EXPERTS];
    memset(taken, 0, (size_t)n);
    for (int i = 0; i < used; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || is_before(logits[e], logits[best]))) best = e;
        taken[best] = 1;
    }
    for (int e = 0, i = 0; e < n; e++)
        if (taken[e]) experts[i++] = e;
    // divided by their own sum, probabilities are those among the experts in use
    if (!record->expert_weights) memcpy(p, logits, sizeof(float) * (size_t)n);
    for (int i = 0; record->expert_weights && i < used; i++) p[i] = logits[experts[i]];
    kernels->softmax(p, record->expert_weights ? used : n);
    for (int i = 0; i < used; i++) weights[i] = p[record->expert_weights ? i : experts[i]];
}

// The pairs by expert, then by row: every thread counts for itself.
static void sort_pairs(const struct worker *w, const struct layer_record *record, struct routes routes) {
    const struct pairs *pairs = &w->local->pairs;
    const int n = (int)record->n_experts, used = (int)record->n_experts_used, total = w->eval->n_rows * used;
    memset(pairs->starts, 0, sizeof(int) * (size_t)(n + 1));
    for (int i = 0; i < total; i++) pairs->starts[routes.experts[i]]++;
    for (int e = 0, start = 0; e <= n; e++) {
        const int count = e < n ? pairs->starts[e] : 0;
        pairs->starts[e] = start;
        start += count;
    }
    for (int i = 0; i < total; i++) {   // starts move on to their ends ...
        const int at = pairs->starts[routes.experts[i]]++;
        pairs->rows[at] = i / used;
        pairs->weights[at] = routes.weights[i];
    }
    memmove(pairs->starts + 1, pairs->starts, sizeof(int) * (size_t)n);   // ... each being the next one's start
    pairs->starts[0] = 0;
}

static void route(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer_record *record = s->model->layers[l].record;
    const int redundant = is_redundant(e->n_rows), used = (int)record->n_experts_used;
    const struct routes routes = redundant ? w->local->routes : s->scratch.routes;
    int first = 0, last = e->n_rows;
    if (!redundant) pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last; r++)
        choose(s->kernels, record, s->scratch.router + (size_t)r * record->n_experts, w->local->probabilities,
            routes.experts + r * used, routes.weights + r * used);
    if (!redundant) pool_barrier(w->member);
    sort_pairs(w, record, routes);
}

// ---- products

static struct panels panels_of(const struct worker *w, const struct layer_record *record, struct expert_pairs pairs,
    int width) {
    return panels_at(w, is_redundant(w->eval->n_rows), pairs.n, pairs.first, w->local->pairs.starts[record->n_experts],
        width);
}

// Makes inputs of the pairs' rows, each expert's as panels of their own. `down`: for the second products, otherwise for
// the first. `rows` NULL: x has one row per pair.
static void pack_pairs(const struct worker *w, const struct layer *layer, int down, const float *x, int width,
    const int *rows) {
    struct eval *e = w->eval;
    const int redundant = is_redundant(e->n_rows), n_experts = (int)layer->record->n_experts;
    int first = 0, last = w->local->pairs.starts[n_experts];
    if (!redundant) pool_share(w->member, last, &first, &last);
    for (int expert = 0; expert < n_experts && !cancelled(&e->cancel); expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct expert *net = &layer->experts[expert];
        const struct readers readers = down ? (struct readers){ { &net->down }, 1 } : readers_of_hidden(net);
        const struct panels p = panels_of(w, layer->record, pairs, width);
        const int begin = max_int(first - pairs.first, 0), end = min_int(last - pairs.first, pairs.n);
        for (int i = begin; i < end; i++)
            pack_row(w, readers, &p, x + (size_t)(rows ? rows[pairs.first + i] : pairs.first + i) * (size_t)width,
                width, begin, end, i);
    }
    if (!redundant) pool_barrier(w->member);
}

void experts_hidden(const struct worker *w, int l, const struct panels *h) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const int n = (int)layer->record->n_experts, dim = (int)s->model->config->dim;
    const size_t ffn_dim = layer->record->ffn_dim;
    linear(w, &(struct product){ .matrix = &layer->ffn_router, .y = s->scratch.router }, 1, h, 0);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_FFN_ROUTER, l, s->scratch.router, e->n_rows, n);
    route(w, l);
    pack_pairs(w, layer, 0, kept_rows(w, e->n_rows), dim, w->local->pairs.rows);
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct panels x = panels_of(w, layer->record, pairs, dim);
        if (pairs.n) hidden(w, &layer->experts[expert], &x, s->scratch.gate + (size_t)pairs.first * ffn_dim,
            s->scratch.up + (size_t)pairs.first * ffn_dim);
    }
}

void experts_observe(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer_record *record = s->model->layers[l].record;
    float *out = observed(e, LLAMAC_STAGE_FFN_HIDDEN, l);
    if (!out) return;
    int per_layer;
    const size_t used = record->n_experts_used, ffn_dim = record->ffn_dim,
        width = llamac_stage_width(s, LLAMAC_STAGE_FFN_HIDDEN, &per_layer);
    const struct routes routes = is_redundant(e->n_rows) ? w->local->routes : s->scratch.routes;
    for (int r = 0; r < e->n_rows && w->member->index == 0; r++) {
        memset(out + (size_t)r * width, 0, sizeof(float) * width);
        for (size_t i = 0; i < used; i++) {
            const struct expert_pairs pairs = pairs_of(w, routes.experts[(size_t)r * used + i]);
            int at = pairs.first;
            while (w->local->pairs.rows[at] != r) at++;
            memcpy(out + (size_t)r * width + i * ffn_dim, s->scratch.up + (size_t)at * ffn_dim,
                sizeof(float) * ffn_dim);
        }
    }
    pool_barrier(w->member);
}

void experts_down(const struct worker *w, int l, float *y, float *x) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const int n = (int)layer->record->n_experts, dim = (int)s->model->config->dim,
        ffn_dim = (int)layer->record->ffn_dim;
    pack_pairs(w, layer, 1, s->scratch.up, ffn_dim, NULL);
    int first, last;
    pool_share(w->member, ceil_div(dim, STRIP_ROWS), &first, &last);
    const int begin = first * STRIP_ROWS, end = min_int(last * STRIP_ROWS, dim);
    for (int r = 0; r < e->n_rows && begin < end; r++) memset(y + (size_t)r * (size_t)dim + begin, 0,
        sizeof(float) * (size_t)(end - begin));
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct panels inputs = panels_of(w, layer->record, pairs, ffn_dim);
        const struct product down = { .matrix = &layer->experts[expert].down, .y = y,
            .weights = w->local->pairs.weights + pairs.first, .to = w->local->pairs.rows + pairs.first };
        if (pairs.n) multiply(w, &down, &inputs, 1, first, last);
    }
    float *copy = observed(e, LLAMAC_STAGE_FFN, l);
    const float scale = s->model->config->residual_scale;
    for (int r = 0; r < e->n_rows && begin < end; r++) {
        const size_t at = (size_t)r * (size_t)dim + (size_t)begin;
        if (copy) memcpy(copy + at, y + at, sizeof(float) * (size_t)(end - begin));
        if (!x) continue;
        if (scale != 1) s->kernels->scale(y + at, end - begin, scale, 0);
        s->kernels->add(y + at, end - begin, x + at);
    }
}
