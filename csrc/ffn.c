// SPDX-License-Identifier: MIT
// ffn.c - the feed-forward networks: dense networks, which process all rows, and experts, selected per row by a router.
//
//     rows -> gate, up -> activation -> down                     a dense layer's network, or the shared expert
//     rows -> router -> each row's experts -> (expert, row) pairs sorted by expert
//          -> gate, up -> activation -> down -> sums by row: the shared expert first, then experts ascending
//             (or the sum of the experts and the shared expert, each with a norm of its own)
//     rows -> experts_in -> what the experts read, and their sums -> experts_out, in models with an expert_dim
//
// A chunk reads the weights of each expert once, for all its rows together, and skips experts without rows.
#include <math.h>
#include <string.h>
#include "common.h"
#include "gates.h"
#include "products.h"
#include "router.h"

static int has_experts(const struct layer *layer) { return layer->record->ffn == FFN_EXPERTS; }
// Returns whether a layer with experts also has one that all rows use.
static int has_shared_expert(const struct layer *layer) { return layer->record->shared_ffn_dim > 0; }

// ---- one network

// Clamps the gate and the up branch, and adds up_offset, if the layer has a limit or an offset.
static void clamp_branches(const struct kernels *kernels, const struct layer_record *record, int n, float *gate,
                           float *up) {
    const float limit = record->activation_limit > 0 ? record->activation_limit : INFINITY;
    if (limit == INFINITY && record->up_offset == 0) return;
    kernels->clamp(gate, n, -INFINITY, limit, 0);
    kernels->clamp(up, n, -limit, limit, record->up_offset);
}

// Computes gate, up and the activation of this thread's columns. The result overwrites up (m, ffn_dim). Unless `down`
// is NULL, the result is also packed into `down` as input of the next product. weights: (m), factors of gate and up; or
// NULL. No barrier.
static void ffn_activations(const struct worker *w, const struct layer_record *record, const struct ffn_weights *ffn,
                            const struct panels *x, float *gate, float *up, const struct panels *down,
                            const float *weights) {
    const struct llamac_session *s = w->eval->session;
    const int gated = ffn->gate.data != NULL, dim = ffn->up.rows, activation = (int)s->model->config->activation;
    const struct product gate_product = { .matrix = &ffn->gate, .consumer = CONSUMER_GATE, .bias = ffn->gate_bias,
                                          .y = gate },
                         up_product = { .matrix = &ffn->up, .consumer = CONSUMER_UP, .bias = ffn->up_bias, .y = up };
    const int strips = strips_of(&ffn->up), unit = down ? BLOCK_STRIPS : 1;
    struct strips share;
    pool_share(w->member, ceil_div(strips, unit), &share.first, &share.last);
    share = (struct strips){ share.first * unit, min_int(share.last * unit, strips) };
    multiply(w, &up_product, x, 0, share);
    if (gated) multiply(w, &gate_product, x, 0, share);
    const int first = share.first * STRIP_ROWS, last = min_int(share.last * STRIP_ROWS, dim),
              is_xielu = activation == ACTIVATION_XIELU;
    const float alpha_p = is_xielu ? (float)softplus((double)*ffn->alpha_p) : 0,
                alpha_n = is_xielu ? (float)softplus((double)*ffn->alpha_n) : 0;
    for (int r = 0; r < x->m && first < last && !cancelled(&w->eval->cancel); r++) {
        const size_t at = (size_t)r * (size_t)dim + (size_t)first;
        float *u = up + at;
        if (weights) s->kernels->scale(u, last - first, weights[r], 0);
        if (weights && gated) s->kernels->scale(gate + at, last - first, weights[r], 0);
        if (gated) clamp_branches(s->kernels, record, last - first, gate + at, u);
        if (is_xielu) s->kernels->xielu(u, last - first, alpha_p, alpha_n);
        else s->kernels->activate(activation, gated ? gate + at : u, gated ? u : NULL, last - first, u);
        if (down) pack_columns(w, &ffn->down, down, up + (size_t)r * (size_t)dim, dim, first, last, r);
    }
}

// The pairs of one expert: [first, first + n).
struct expert_pairs { int first, n; };
static struct expert_pairs pairs_of(const struct worker *w, int expert) {
    const int *starts = w->local->pairs.starts;
    return (struct expert_pairs){ starts[expert], starts[expert + 1] - starts[expert] };
}

// ---- routing

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

// Returns the factor of the shared expert's output: the sigmoid of its gate, computed as the softmax of (gate, 0).
static float shared_weight(const struct kernels *kernels, float gate) {
    float p[16] = { gate, 0 };   // padded, as softmax requires
    kernels->softmax(p, 2);
    return p[0];
}

static struct routes routes_of(const struct worker *w) {
    return is_redundant(w->eval->n_rows) ? w->local->routes : w->eval->session->scratch.routes;
}

// Selects the experts of all rows, sorts the pairs, and computes the weights of the shared expert. After a
// cancellation, the experts are arbitrary.
static void route(const struct worker *w, const struct layer *layer) {
    struct eval *e = w->eval;
    const struct layer_record *record = layer->record;
    const struct llamac_session *s = e->session;
    const struct routes routes = routes_of(w);
    const int redundant = is_redundant(e->n_rows), used = (int)record->n_experts_used;
    int first = 0, last = e->n_rows;
    if (!redundant) pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last; r++) {
        if (cancelled(&e->cancel)) {   // sort_pairs still needs experts that exist
            for (int i = 0; i < used; i++) routes.experts[r * used + i] = i;
            continue;
        }
        router_select(s->kernels, record, layer->ffn_router_choice_bias,
                      s->scratch.router + (size_t)r * record->n_experts, w->local->router, routes.experts + r * used,
                      routes.weights + r * used);
        for (int i = 0; i < used && layer->expert_factors; i++)
            routes.weights[r * used + i] *= layer->expert_factors[routes.experts[r * used + i]];
        if (record->shared_gate) routes.shared_weights[r] = shared_weight(s->kernels, s->scratch.shared_gate[r]);
    }
    if (!redundant) pool_barrier(w->member);   // sort_pairs reads the experts of all rows
    sort_pairs(w, record, routes);
}

// ---- experts' products

static struct panels panels_of(const struct worker *w, const struct layer_record *record, struct expert_pairs pairs,
                               int width) {
    const int total = w->local->pairs.starts[record->n_experts];
    return panels_at(w, is_redundant(w->eval->n_rows), pairs.n, pairs.first, total, width);
}

// Packs the inputs of all pairs: for the down products if `down`, otherwise for gate and up. Each expert has separate
// panels. rows: the row of x that each pair reads; NULL: x has one row per pair.
static void pack_pairs(const struct worker *w, const struct layer *layer, int down, const float *x, int width,
                       const int *rows) {
    struct eval *e = w->eval;
    const int redundant = is_redundant(e->n_rows), n_experts = (int)layer->record->n_experts;
    int first = 0, last = w->local->pairs.starts[n_experts];
    if (!redundant) pool_share(w->member, last, &first, &last);
    for (int expert = 0; expert < n_experts && !cancelled(&e->cancel); expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct ffn_weights *ffn = &layer->experts[expert];
        const struct consumers of_down = { { &ffn->down }, 1 },
                               of_rows = { { [CONSUMER_GATE] = &ffn->gate, [CONSUMER_UP] = &ffn->up }, 2 },
                               consumers = down ? of_down : of_rows;
        const struct panels p = panels_of(w, layer->record, pairs, width);
        const int begin = max_int(first - pairs.first, 0), end = min_int(last - pairs.first, pairs.n);
        for (int i = begin; i < end; i++) {
            const int pair = pairs.first + i, row = rows ? rows[pair] : pair;
            pack_row(w, consumers, &p, x + (size_t)row * (size_t)width, width, begin, end, i);
        }
    }
    if (!redundant) pool_barrier(w->member);   // products read pairs that other members have packed
}

void experts_hidden(const struct worker *w, int l, const struct panels *inputs) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const int n = (int)layer->record->n_experts, is_mapped = layer->experts_in.data != NULL,
              dim = is_mapped ? layer->experts_in.rows : (int)s->model->config->dim;
    const struct product products[] = {
        { .matrix = &layer->ffn_router, .consumer = CONSUMER_ROUTER, .bias = layer->ffn_router_bias,
          .y = s->scratch.router },
        { .matrix = &layer->experts_in, .consumer = CONSUMER_EXPERTS_IN, .bias = layer->experts_in_bias,
          .y = s->scratch.expert_rows },
        { .matrix = &layer->shared_gate, .consumer = CONSUMER_SHARED_GATE, .y = s->scratch.shared_gate },
    };
    struct strips shares[3];
    divide_strips(w, products, 3, shares);
    for (int i = 0; i < 3; i++)
        if (products[i].matrix->data) multiply(w, &products[i], inputs, 0, shares[i]);
    pool_barrier(w->member);   // selecting a row's experts reads all of its router logits, and experts whole rows
    observe(w, LLAMAC_STAGE_FFN_ROUTER, l, s->scratch.router, e->n_rows, n);
    route(w, layer);
    pack_pairs(w, layer, 0, is_mapped ? s->scratch.expert_rows : normed_rows(w, e->n_rows), dim, w->local->pairs.rows);
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const size_t at = (size_t)pairs.first * layer->record->ffn_dim;
        const struct panels x = panels_of(w, layer->record, pairs, dim);
        const float *weights = layer->record->expert_weights_first ? w->local->pairs.weights + pairs.first : NULL;
        if (pairs.n) ffn_activations(w, layer->record, &layer->experts[expert], &x, s->scratch.gate + at,
                                     s->scratch.up + at, NULL, weights);
    }
}

// Returns where the hidden activations of the shared expert begin in scratch.gate and scratch.up: after those of all
// pairs.
static size_t shared_offset(const struct worker *w, const struct layer_record *record) {
    return (size_t)w->eval->n_rows * record->n_experts_used * record->ffn_dim;
}

// Copies the hidden activations to an observer: each row's experts in ascending order, then the shared expert. Ends at
// a barrier if there is an observer.
static void experts_observe(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer_record *record = s->model->layers[l].record;
    float *out = observer_of(e, LLAMAC_STAGE_FFN_HIDDEN, l);
    if (!out) return;
    int per_layer;
    const size_t used = record->n_experts_used, ffn_dim = record->ffn_dim, shared_dim = record->shared_ffn_dim,
                 width = llamac_stage_width(s, LLAMAC_STAGE_FFN_HIDDEN, &per_layer);
    const float *shared = s->scratch.up + shared_offset(w, record);
    const struct routes routes = routes_of(w);
    for (int r = 0; r < e->n_rows && w->member->index == 0; r++) {
        float *to = out + (size_t)r * width;
        memset(to, 0, sizeof(float) * width);
        for (size_t i = 0; i < used; i++) {
            int pair = pairs_of(w, routes.experts[(size_t)r * used + i]).first;
            while (w->local->pairs.rows[pair] != r) pair++;
            memcpy(to + i * ffn_dim, s->scratch.up + (size_t)pair * ffn_dim, sizeof(float) * ffn_dim);
        }
        memcpy(to + used * ffn_dim, shared + (size_t)r * shared_dim, sizeof(float) * shared_dim);
    }
    pool_barrier(w->member);
}

// Computes this thread's strips of y, the shared expert's output. With many rows, ends at a barrier, so that its inputs
// can be overwritten.
static void shared_down(const struct worker *w, const struct layer *layer, float *y, struct strips share) {
    const struct eval *e = w->eval;
    const struct layer_record *record = layer->record;
    const struct rows rows = { .x = e->session->scratch.up + shared_offset(w, record), .n = e->n_rows,
                               .width = (int)record->shared_ffn_dim };
    const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { &layer->ffn.down }, 1 });
    const struct product down = { .matrix = &layer->ffn.down, .bias = layer->ffn.down_bias, .y = y,
                                  .row_weights = record->shared_gate ? routes_of(w).shared_weights : NULL };
    multiply(w, &down, &inputs, 0, share);
    if (!is_redundant(e->n_rows)) pool_barrier(w->member);
}

// y = norm(shared) + norm(y), with the norms of the shared expert and of the others, for this thread's rows. `copy`: an
// observer's, or NULL.
static void add_normed(const struct worker *w, const struct layer *layer, float *shared, float *y, float *copy) {
    const int dim = (int)w->eval->session->model->config->dim;
    int first, last;
    pool_barrier(w->member);   // the norms read columns that other members have computed
    pool_share(w->member, w->eval->n_rows, &first, &last);
    for (int r = first; r < last; r++) {
        const size_t at = (size_t)r * (size_t)dim;
        norm_row(w, (struct norm_weights){ layer->shared_ffn_post_norm, NULL }, shared + at, dim, shared + at);
        norm_row(w, (struct norm_weights){ layer->experts_post_norm, NULL }, y + at, dim, y + at);
        w->eval->session->kernels->add(shared + at, dim, y + at);
        if (copy) memcpy(copy + at, y + at, sizeof(float) * (size_t)dim);
    }
}

// Adds the down products of all pairs to the rows of y, each thread its own columns. Ends without a barrier.
static void add_experts(const struct worker *w, const struct layer *layer, float *y, struct strips share) {
    const int n = (int)layer->record->n_experts, ffn_dim = (int)layer->record->ffn_dim;
    pack_pairs(w, layer, 1, w->eval->session->scratch.up, ffn_dim, NULL);
    for (int expert = 0; expert < n; expert++) {
        const struct expert_pairs pairs = pairs_of(w, expert);
        const struct panels inputs = panels_of(w, layer->record, pairs, ffn_dim);
        const struct product down = {
            .matrix = &layer->experts[expert].down, .bias = layer->experts[expert].down_bias, .y = y,
            .row_weights = layer->record->expert_weights_first ? NULL : w->local->pairs.weights + pairs.first,
            .y_rows = w->local->pairs.rows + pairs.first,
        };
        if (pairs.n) multiply(w, &down, &inputs, 1, share);
    }
}

// Sets columns [begin, end) of n rows of y (n, width) to zero.
static void clear_columns(float *y, int n, int width, int begin, int end) {
    for (int r = 0; r < n && begin < end; r++)
        memset(y + (size_t)r * (size_t)width + begin, 0, sizeof(float) * (size_t)(end - begin));
}

// Computes the experts_out product of the sums of the experts into y, or adds it. Ends without a barrier.
static void map_experts(const struct worker *w, const struct layer *layer, float *y, int add, struct strips share) {
    const struct eval *e = w->eval;
    const int width = layer->experts_out.columns;
    float *const sums = e->session->scratch.expert_sums;
    const struct strips own = strip_share(w, &layer->experts[0].down);
    clear_columns(sums, e->n_rows, width, own.first * STRIP_ROWS, min_int(own.last * STRIP_ROWS, width));
    add_experts(w, layer, sums, own);
    pool_barrier(w->member);   // the next product reads all columns; other members still read the panels
    const struct rows rows = { .x = sums, .n = e->n_rows, .width = width };
    const struct panels inputs = prepare_inputs(w, rows, NULL, (struct consumers){ { &layer->experts_out }, 1 });
    const struct product out = { .matrix = &layer->experts_out, .bias = layer->experts_out_bias, .y = y };
    multiply(w, &out, &inputs, add, share);
}

// Computes the down products into y (rows, dim), each thread its own columns, and adds y to x unless x is NULL. Ends
// without a barrier.
static void experts_down(const struct worker *w, int l, float *y, float *x) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const int dim = (int)s->model->config->dim, is_mapped = layer->experts_out.data != NULL;
    const float scale = s->model->config->residual_scale;
    struct strips share;
    pool_share(w->member, ceil_div(dim, STRIP_ROWS), &share.first, &share.last);
    const int begin = share.first * STRIP_ROWS, end = min_int(share.last * STRIP_ROWS, dim);   // this thread's columns
    const size_t bytes = begin < end ? sizeof(float) * (size_t)(end - begin) : 0;
    const int has_norms = (int)layer->record->expert_norms;
    if (has_shared_expert(layer)) shared_down(w, layer, has_norms ? s->scratch.shared_out : y, share);
    if (is_mapped) {
        map_experts(w, layer, y, has_shared_expert(layer), share);
    } else {
        if (!has_shared_expert(layer) || has_norms) clear_columns(y, e->n_rows, dim, begin, end);
        add_experts(w, layer, y, share);
    }
    float *copy = observer_of(e, LLAMAC_STAGE_FFN, l);
    if (has_norms) {   // the branches of the layer are normed, too (check_ffn): x is NULL
        add_normed(w, layer, s->scratch.shared_out, y, copy);
        return;
    }
    for (int r = 0; r < e->n_rows && bytes; r++) {
        const size_t at = (size_t)r * (size_t)dim + (size_t)begin;
        if (copy) memcpy(copy + at, y + at, bytes);
        if (!x) continue;
        if (scale != 1) s->kernels->scale(y + at, end - begin, scale, 0);
        s->kernels->add(y + at, end - begin, x + at);
    }
}

// ---- a layer's networks

struct consumers ffn_consumers(const struct layer *layer, int parts) {
    static const struct matrix none;
    const int network = parts & FFN_NETWORK, routers = parts & FFN_ROUTERS;
    return (struct consumers){ .n = N_FFN_CONSUMERS, .matrices = {
        [CONSUMER_GATE] = network ? &layer->ffn.gate : &none,
        [CONSUMER_UP] = network ? &layer->ffn.up : &none,
        [CONSUMER_ROUTER] = routers ? &layer->ffn_router : &none,
        [CONSUMER_SHARED_GATE] = routers ? &layer->shared_gate : &none,
        [CONSUMER_EXPERTS_IN] = routers ? &layer->experts_in : &none,
    } };
}

// Returns whether each thread packs the hidden activations that it has computed. In parallel blocks the panels are
// needed for mix; with experts, for the rows of the experts.
static int packs_hidden(const struct worker *w, const struct layer *layer) {
    return !has_experts(layer) && layer->record->placement != PLACEMENT_PARALLEL && !layer->record->sub_norms &&
           packs_own_columns(w, &layer->ffn.down, strips_of(&layer->ffn.up));
}

void ffn_hidden(const struct worker *w, int l, const struct panels *inputs) {
    const struct scratch *scratch = &w->eval->session->scratch;
    const struct layer *layer = &w->eval->session->model->layers[l];
    const size_t at = has_experts(layer) ? shared_offset(w, layer->record) : 0;
    const struct panels down = unnormed_panels(w, layer->ffn.up.rows);
    if (layer->ffn.up.data)
        ffn_activations(w, layer->record, &layer->ffn, inputs, scratch->gate + at, scratch->up + at,
                        packs_hidden(w, layer) ? &down : NULL, NULL);
}

void ffn_down(const struct worker *w, int l, float *x, float *branch) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    const struct layer *layer = &e->session->model->layers[l];
    if (has_experts(layer)) {
        experts_observe(w, l);
        experts_down(w, l, scratch->branch, branch ? NULL : x);
        return;
    }
    const struct ffn_weights *ffn = &layer->ffn;
    const int ffn_dim = ffn->up.rows;
    observe(w, LLAMAC_STAGE_FFN_ROUTER, l, scratch->up, e->n_rows, 0);   // zeros: no router
    const struct norm_step sub_norm = sub_norm_step(w, LLAMAC_STAGE_FFN_HIDDEN, l, layer->ffn_sub_norm);
    const struct norm_step *step = layer->record->sub_norms ? &sub_norm : NULL;
    if (!step) observe(w, LLAMAC_STAGE_FFN_HIDDEN, l, scratch->up, e->n_rows, ffn_dim);
    const struct rows rows = { .x = scratch->up, .n = e->n_rows, .width = ffn_dim };
    const struct panels inputs = packs_hidden(w, layer)
                                     ? unnormed_panels(w, ffn_dim)
                                     : prepare_inputs(w, rows, step, (struct consumers){ { &ffn->down }, 1 });
    const struct product down = {
        .matrix = &ffn->down, .bias = ffn->down_bias, .y = branch ? branch : x,
        .copy = observer_of(e, LLAMAC_STAGE_FFN, l), .row_weights = branch ? NULL : residual_scales(e->session),
    };
    multiply(w, &down, &inputs, !branch, strip_share(w, &ffn->down));
}
