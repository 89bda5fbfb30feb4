// SPDX-License-Identifier: MIT
// plan_ffn.c - the steps of feed-forward networks, in the order of ffn.c.
#include <math.h>
#include "common.h"
#include "plan_writer.h"

static void activate(struct writer *w, const struct layer *layer, const struct ffn_weights *ffn, int gate, int up,
                     int width) {
    const struct layer_record *r = layer->record;
    const float limit = r->activation_limit > 0 ? r->activation_limit : INFINITY;
    plan_step(w, LLAMAC_OP_ACTIVATE)->activate = (llamac_activate_step){
        .activation = (int)w->model->config->activation, .gate = gate, .up = up, .output = up, .width = width,
        .stride = width, .alpha_p = plan_vector(w, ffn->alpha_p, 1), .alpha_n = plan_vector(w, ffn->alpha_n, 1),
        .by_weight = up == LLAMAC_BUFFER_EXPERT_UP && r->expert_weights_first,
        .is_clamped = gate != LLAMAC_BUFFER_NONE && (limit != INFINITY || r->up_offset != 0),
        .limit = limit, .up_offset = r->up_offset,
    };
}

enum expert_matrix { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN, N_EXPERT_MATRICES };
static int has_gate(const struct layer *layer) { return layer->experts[0].gate.data != NULL; }

static struct projection expert_of(const struct layer *layer, int expert, enum expert_matrix which) {
    const struct ffn_weights *ffn = &layer->experts[expert];
    switch (which) {
    case EXPERT_GATE: return (struct projection){ &ffn->gate, ffn->gate_bias, LLAMAC_BUFFER_EXPERT_GATE };
    case EXPERT_UP: return (struct projection){ &ffn->up, ffn->up_bias, LLAMAC_BUFFER_EXPERT_UP };
    default: return (struct projection){ &ffn->down, ffn->down_bias, LLAMAC_BUFFER_EXPERT_OUT };
    }
}

// The lowest rank above `rank` of the experts' adapters; 0: there is none.
static int next_rank(const struct layer *layer, enum expert_matrix which, int rank) {
    int next = 0;
    for (uint32_t i = 0; i < layer->record->n_experts; i++) {
        const struct lora *lora = expert_of(layer, (int)i, which).matrix->lora;
        if (lora && lora->rank > rank && (!next || lora->rank < next)) next = lora->rank;
    }
    return next;
}

// Appends a product with a linear for each expert. Returns them, which the caller sets; NULL if they are only counted.
// rows: of each.
static llamac_linear *expert_product(struct writer *w, int n, int rows, int input, int output, int accumulate) {
    llamac_linear *linears = w->plan->experts ? w->plan->experts + w->n_experts : NULL;
    w->n_experts += (size_t)n;
    plan_step(w, LLAMAC_OP_EXPERT_PRODUCT)->expert_product = (llamac_expert_product_step){
        .linears = linears, .n_experts = n, .input = input, .output = plan_use(w, output, rows),
        .accumulate = accumulate,
    };
    return linears;
}

static void expert_products(struct writer *w, const struct layer *layer, enum expert_matrix which, int input) {
    const int n = (int)layer->record->n_experts;
    const struct projection first = expert_of(layer, 0, which);
    llamac_linear *linears = expert_product(w, n, first.matrix->rows, input, first.output, 0);
    for (int i = 0; i < n && linears; i++) {
        const struct projection expert = expert_of(layer, i, which);
        linears[i] = plan_linear(w, expert.matrix, expert.bias);
    }
}

// Appends the products of the adapters of one matrix of each expert.
static void expert_adapters(struct writer *w, const struct layer *layer, enum expert_matrix which, int input) {
    const int n = (int)layer->record->n_experts, is_down = which == EXPERT_DOWN;
    const struct projection first = expert_of(layer, 0, which);
    for (int rank = 0; (rank = next_rank(layer, which, rank)) > 0;) {
        llamac_linear *a = expert_product(w, n, rank, input, LLAMAC_BUFFER_EXPERT_PROJECTED, 0);
        llamac_linear *b = expert_product(w, n, first.matrix->rows, LLAMAC_BUFFER_EXPERT_PROJECTED,
                                          is_down ? LLAMAC_BUFFER_EXPERT_ADDED : first.output, !is_down);
        for (int i = 0; i < n && a && b; i++) {
            const struct matrix *m = expert_of(layer, i, which).matrix;
            const int has_rank = m->lora && m->lora->rank == rank;
            a[i] = has_rank ? plan_factor(w, m->lora->a, rank, m->columns) : plan_no_linear(w);
            b[i] = has_rank ? plan_factor(w, m->lora->b, m->rows, rank) : plan_no_linear(w);
        }
    }
}

// Normalizes the residual stream as input of the router or the experts, which have norms of their own.
static int own_norm(struct writer *w, const float *weight) {
    const int dim = (int)w->model->config->dim, buffer = plan_use(w, LLAMAC_BUFFER_NORMED, dim);
    plan_norm_rows(w, LLAMAC_BUFFER_X, buffer, dim, plan_norm(w, weight, NULL));
    return buffer;
}

static void experts_hidden(struct writer *w, const struct layer *layer, int input) {
    const struct layer_record *r = layer->record;
    const struct projection routers[] = {
        { &layer->ffn_router, layer->ffn_router_bias, LLAMAC_BUFFER_ROUTER },
        { &layer->experts_in, layer->experts_in_bias, LLAMAC_BUFFER_EXPERT_ROWS },
        { &layer->shared_gate, NULL, LLAMAC_BUFFER_SHARED_GATE },
    };
    if (r->expert_norms) input = own_norm(w, layer->ffn_router_norm);
    plan_project(w, routers, (int)ARRAY_LEN(routers), input);
    plan_observe(w, LLAMAC_STAGE_FFN_ROUTER, LLAMAC_BUFFER_ROUTER, (int)r->n_experts);
    plan_step(w, LLAMAC_OP_ROUTE)->route = (llamac_route_step){
        .n_experts = (int)r->n_experts, .n_used = (int)r->n_experts_used, .is_sigmoid = r->router == ROUTER_SIGMOID,
        .n_groups = (int)r->n_expert_groups, .n_groups_used = (int)r->n_expert_groups_used,
        .normalized = (int)r->expert_weights, .eps = r->expert_weights_eps, .scale = r->expert_scale,
        .choice_bias = plan_vector(w, layer->ffn_router_choice_bias, (int)r->n_experts),
        .factors = plan_vector(w, layer->expert_factors, (int)r->n_experts), .has_shared_gate = (int)r->shared_gate,
    };
    if (r->expert_norms) input = own_norm(w, layer->experts_norm);
    if (layer->experts_in.data) input = LLAMAC_BUFFER_EXPERT_ROWS;
    expert_products(w, layer, EXPERT_UP, input);
    if (has_gate(layer)) expert_products(w, layer, EXPERT_GATE, input);
    expert_adapters(w, layer, EXPERT_UP, input);
    if (has_gate(layer)) expert_adapters(w, layer, EXPERT_GATE, input);
    activate(w, layer, &layer->experts[0], has_gate(layer) ? LLAMAC_BUFFER_EXPERT_GATE : LLAMAC_BUFFER_NONE,
             LLAMAC_BUFFER_EXPERT_UP, (int)r->ffn_dim);
}

void plan_ffn_hidden(struct writer *w, const struct layer *layer) {
    const struct ffn_weights *ffn = &layer->ffn;
    const int input = plan_norm_stream(w, LLAMAC_STAGE_FFN_NORM, layer->record->placement == PLACEMENT_NORMED,
                                       layer->ffn_norm, layer->ffn_norm_bias);
    if (ffn->up.data) {
        const struct projection both[] = {
            { &ffn->up, ffn->up_bias, LLAMAC_BUFFER_UP }, { &ffn->gate, ffn->gate_bias, LLAMAC_BUFFER_GATE },
        };
        plan_project(w, both, (int)ARRAY_LEN(both), input);
        activate(w, layer, ffn, ffn->gate.data ? LLAMAC_BUFFER_GATE : LLAMAC_BUFFER_NONE, LLAMAC_BUFFER_UP,
                 ffn->up.rows);
    }
    if (layer->record->ffn == FFN_EXPERTS) experts_hidden(w, layer, input);
    else plan_observe(w, LLAMAC_STAGE_FFN_ROUTER, LLAMAC_BUFFER_NONE, 0);
}

static void experts_down(struct writer *w, const struct layer *layer) {
    const struct layer_record *r = layer->record;
    const int dim = (int)w->model->config->dim, has_shared = layer->ffn.up.data != NULL,
              is_mapped = layer->experts_out.data != NULL, width = is_mapped ? layer->experts_out.columns : dim;
    plan_step(w, LLAMAC_OP_OBSERVE)->observe = (llamac_observe_step){
        .stage = LLAMAC_STAGE_FFN_HIDDEN, .buffer = LLAMAC_BUFFER_EXPERT_UP, .width = (int)r->ffn_dim,
        .shared_width = (int)r->shared_ffn_dim,
    };
    if (has_shared) {
        llamac_product_step *p = plan_product(w, plan_linear(w, &layer->ffn.down, layer->ffn.down_bias),
                                              LLAMAC_BUFFER_UP,
                                              r->expert_norms ? LLAMAC_BUFFER_SHARED_OUT : LLAMAC_BUFFER_BRANCH);
        p->by_shared_weight = (int)r->shared_gate;
        plan_adapter(w, &layer->ffn.down, *p);
    }
    expert_products(w, layer, EXPERT_DOWN, LLAMAC_BUFFER_EXPERT_UP);
    expert_adapters(w, layer, EXPERT_DOWN, LLAMAC_BUFFER_EXPERT_UP);
    const int branch = plan_use(w, LLAMAC_BUFFER_BRANCH, dim);
    plan_step(w, LLAMAC_OP_COMBINE)->combine = (llamac_combine_step){
        .output = is_mapped ? plan_use(w, LLAMAC_BUFFER_EXPERT_SUMS, width) : branch,
        .n_used = (int)r->n_experts_used, .width = width, .accumulate = has_shared && !r->expert_norms && !is_mapped,
        .by_weight = !r->expert_weights_first,
        .is_adapted = next_rank(layer, EXPERT_DOWN, 0) > 0,
    };
    if (is_mapped) {
        llamac_product_step *p = plan_product(w, plan_linear(w, &layer->experts_out, layer->experts_out_bias),
                                              LLAMAC_BUFFER_EXPERT_SUMS, branch);
        p->accumulate = has_shared;
        plan_adapter(w, &layer->experts_out, *p);
    }
    if (r->expert_norms) {
        plan_norm_rows(w, branch, branch, dim, plan_norm(w, layer->experts_post_norm, NULL));
        plan_step(w, LLAMAC_OP_ADD)->add = (llamac_add_step){
            .to = branch, .from = LLAMAC_BUFFER_SHARED_OUT, .width = dim, .scale = 1,
            .norm = plan_norm(w, layer->shared_ffn_post_norm, NULL),
        };
    }
    plan_observe(w, LLAMAC_STAGE_FFN, branch, dim);
    if (!plan_has_post_norm(layer)) plan_add_branch(w, NULL, NULL);
}

void plan_ffn_down(struct writer *w, const struct layer *layer) {
    if (layer->record->ffn == FFN_EXPERTS) {
        experts_down(w, layer);
        return;
    }
    if (layer->record->sub_norms)
        plan_sub_norm(w, LLAMAC_STAGE_FFN_HIDDEN, LLAMAC_BUFFER_UP, layer->ffn_sub_norm, layer->ffn.up.rows);
    else
        plan_observe(w, LLAMAC_STAGE_FFN_HIDDEN, LLAMAC_BUFFER_UP, layer->ffn.up.rows);
    plan_branch_product(w, layer, &layer->ffn.down, layer->ffn.down_bias, LLAMAC_BUFFER_UP, LLAMAC_STAGE_FFN, 0);
}
