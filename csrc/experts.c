// SPDX-License-Identifier: MIT
// experts.c - a mixture of experts: routing and the experts' products.
//
//     rows -> router -> each row's experts -> (expert, row) pairs sorted by expert -> gate, up -> down
//          -> sums by row, experts ascending
//
// A chunk reads the weights of each expert once, for all its rows together, and skips experts without rows.
#include <string.h>
#include "common.h"
#include "products.h"

// The pairs of one expert: [first, first + n).
struct expert_pairs { int first, n; };
static struct expert_pairs pairs_of(const struct worker *w, int expert) {
    const int *starts = w->local->pairs.starts;
    return (struct expert_pairs){ starts[expert], starts[expert + 1] - starts[expert] };
}

// ---- routing

// Whether logit x ranks strictly before y: the larger one does, and a NaN before any number, so that it shows in the
// result.
static int ranks_before(float x, float y) { return x > y || (x != x && y == y); }

// Selects a row's experts, in ascending order, and their weights. Among equal logits the lowest expert is selected.
// logits: (n_experts); p: scratch of the same size.
static void select_experts(const struct kernels *kernels, const struct layer_record *record, const float *logits,
                           float *p, int *experts, float *weights) {
    const int n = (int)record->n_experts, used = (int)record->n_experts_used;
    uint8_t selected[FORMAT_MAX_EXPERTS];
    memset(selected, 0, (size_t)n);
    for (int i = 0; i < used; i++) {
        int best = -1;
        for (int e = 0; e < n; e++)
            if (!selected[e] && (best < 0 || ranks_before(logits[e], logits[best]))) best = e;
        selected[best] = 1;
    }
    for (int e = 0, i = 0; e < n; e++)
        if (selected[e]) experts[i++] = e;
    if (record->expert_weights) {
        // probabilities divided by their sum over the experts in use: a softmax over these alone
        for (int i = 0; i < used; i++) p[i] = logits[experts[i]];
        kernels->softmax(p, used);
        for (int i = 0; i < used; i++) weights[i] = p[i];
    } else {
        memcpy(p, logits, sizeof(float) * (size_t)n);
        kernels->softmax(p, n);
        for (int i = 0; i < used; i++) weights[i] = p[experts[i]];
    }
}

// Sorts the pairs by expert, then by row (counting sort), into this thread's scratch.
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
    for (int i = 0; i < total; i++) {   // advances each start to its end, which is the next expert's start
        const int at = pairs->starts[routes.experts[i]]++;
        pairs->rows[at] = i / used;
        pairs->weights[at] = routes.weights[i];
    }
    memmove(pairs->starts + 1, pairs->starts, sizeof(int) * (size_t)n);
    pairs->starts[0] = 0;
}

static struct routes routes_of(const struct worker *w) {
    return is_redundant(w->eval->n_rows) ? w->local->routes : w->eval->session->scratch.routes;
}

// Selects the experts of all rows and sorts the pairs.
static void route(const struct worker *w, const struct layer_record *record) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct routes routes = routes_of(w);
    const int redundant = is_redundant(e->n_rows), used = (int)record->n_experts_used;
    int first = 0, last = e->n_rows;
    if (!redundant) pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last; r++)
        select_experts(s->kernels, record, s->scratch.router + (size_t)r * record->n_experts, w->local->probabilities,
                       routes.experts + r * used, routes.weights + r * used);
    if (!redundant) pool_barrier(w->member);
    sort_pairs(w, record, routes);
}

// ---- products

static struct panels panels_of(const struct worker *w, const struct layer_record *record, struct expert_pairs pairs,
                               int width) {
    const int total = w->local->pairs.starts[record->n_experts];
    return panels_at(w, is_redundant(w->eval->n_rows), pairs.n, pairs.first, total, width);
}

// Packs the inputs of all pairs, the panels of each expert separate from the others': of the second products if `down`,
// otherwise of the first. rows: the row of x that each pair reads; NULL: x has one row per pair.
static void pack_pairs(const struct worker *w, const struct layer *layer, int down, const float *x, int width,
                       const int *rows) {
    struct eval *e = w->eval;
    const int redundant = is_redundant(e->n_rows), n_experts = (int)layer->record->n_experts;
    int first = 0, last = w->local->pairs.starts[n_experts];
    if (!redundant) pool_share(w->member, last, &first, &last);
    for (int expert = 0; expert < n_experts && !cancelled(&e->cancel); expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct ffn_weights *ffn = &layer->experts[expert];
        const struct consumers consumers = down ? (struct consumers){ { &ffn->down }, 1 } : hidden_consumers(ffn);
        const struct panels p = panels_of(w, layer->record, pairs, width);
        const int begin = max_int(first - pairs.first, 0), end = min_int(last - pairs.first, pairs.n);
        for (int i = begin; i < end; i++) {
            const int pair = pairs.first + i, row = rows ? rows[pair] : pair;
            pack_row(w, consumers, &p, x + (size_t)row * (size_t)width, width, begin, end, i);
        }
    }
    if (!redundant) pool_barrier(w->member);
}

void experts_hidden(const struct worker *w, int l, const struct panels *router_inputs) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const int n = (int)layer->record->n_experts, dim = (int)s->model->config->dim;
    const struct product router = { .matrix = &layer->ffn_router, .bias = layer->ffn_router_bias,
                                    .y = s->scratch.router };
    linear(w, &router, 1, router_inputs, 0);
    pool_barrier(w->member);
    observe(w, LLAMAC_STAGE_FFN_ROUTER, l, s->scratch.router, e->n_rows, n);
    route(w, layer->record);
    pack_pairs(w, layer, 0, normed_rows(w, e->n_rows), dim, w->local->pairs.rows);
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const size_t at = (size_t)pairs.first * layer->record->ffn_dim;
        const struct panels x = panels_of(w, layer->record, pairs, dim);
        if (pairs.n) hidden(w, layer->record, &layer->experts[expert], &x, s->scratch.gate + at, s->scratch.up + at);
    }
}

void experts_observe(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer_record *record = s->model->layers[l].record;
    float *out = observer_of(e, LLAMAC_STAGE_FFN_HIDDEN, l);
    if (!out) return;
    int per_layer;
    const size_t used = record->n_experts_used, ffn_dim = record->ffn_dim,
                 width = llamac_stage_width(s, LLAMAC_STAGE_FFN_HIDDEN, &per_layer);
    const struct routes routes = routes_of(w);
    for (int r = 0; r < e->n_rows && w->member->index == 0; r++) {
        float *to = out + (size_t)r * width;
        memset(to, 0, sizeof(float) * width);
        for (size_t i = 0; i < used; i++) {
            int pair = pairs_of(w, routes.experts[(size_t)r * used + i]).first;
            while (w->local->pairs.rows[pair] != r) pair++;
            memcpy(to + i * ffn_dim, s->scratch.up + (size_t)pair * ffn_dim, sizeof(float) * ffn_dim);
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
    const float scale = s->model->config->residual_scale;
    pack_pairs(w, layer, 1, s->scratch.up, ffn_dim, NULL);
    int first, last;
    pool_share(w->member, ceil_div(dim, STRIP_ROWS), &first, &last);
    const int begin = first * STRIP_ROWS, end = min_int(last * STRIP_ROWS, dim);   // this thread's columns
    const size_t bytes = begin < end ? sizeof(float) * (size_t)(end - begin) : 0;
    for (int r = 0; r < e->n_rows && bytes; r++) memset(y + (size_t)r * (size_t)dim + begin, 0, bytes);
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct panels inputs = panels_of(w, layer->record, pairs, ffn_dim);
        const struct product down = {
            .matrix = &layer->experts[expert].down, .bias = layer->experts[expert].down_bias, .y = y,
            .row_weights = w->local->pairs.weights + pairs.first, .y_rows = w->local->pairs.rows + pairs.first,
        };
        if (pairs.n) multiply(w, &down, &inputs, 1, first, last);
    }
    float *copy = observer_of(e, LLAMAC_STAGE_FFN, l);
    for (int r = 0; r < e->n_rows && bytes; r++) {
        const size_t at = (size_t)r * (size_t)dim + (size_t)begin;
        if (copy) memcpy(copy + at, y + at, bytes);
        if (!x) continue;
        if (scale != 1) s->kernels->scale(y + at, end - begin, scale, 0);
        s->kernels->add(y + at, end - begin, x + at);
    }
}
