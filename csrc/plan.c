// SPDX-License-Identifier: MIT
// plan.c - writes the steps of a model, in the order of forward.c. See plan.h.
#include "plan.h"

#include <math.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "mem.h"
#include "model.h"

enum { STEPS_BEFORE = FORMAT_MAX_ROPE + 2, STEPS_OF_LAYER = 60, STEPS_AFTER = 6 };   // without products of experts

struct writer {
    const struct llamac_model *model;
    llamac_plan *plan;
    llamac_step *steps;          // the plan's
    llamac_linear *next_expert;  // the next free one of plan->experts
    int layer;                   // the layer of the steps that are added next
};

// ---- operands

static llamac_operand operand(const struct writer *w, const void *data, size_t bytes) {
    const struct flat_file *file = &w->model->file;
    if (!data) return (llamac_operand){ .offset = -1 };
    const uintptr_t at = (uintptr_t)data, start = (uintptr_t)file->data;
    const int in_file = at >= start && at - start < file->bytes;
    return (llamac_operand){ data, bytes, in_file ? (int64_t)(at - start) : -1 };
}

static llamac_operand vector(const struct writer *w, const float *data, int n) {
    return operand(w, data, sizeof(float) * (size_t)n);
}

static llamac_linear linear(const struct writer *w, const struct matrix *m, const float *bias) {
    const size_t bytes = llamac_matrix_bytes(m->dtype, (uint64_t)m->rows, (uint64_t)m->columns);
    return (llamac_linear){
        .weights = operand(w, m->data, bytes), .bias = vector(w, bias, m->rows),
        .scales = vector(w, m->scales, m->rows),
        .dtype = m->dtype, .rows = m->rows, .columns = m->columns, .strip_bytes = m->strip_bytes,
    };
}

// A factor of an adapter.
static llamac_linear factor(const struct writer *w, const uint8_t *data, int rows, int columns) {
    const struct matrix m = { .data = data, .dtype = LLAMAC_F32, .rows = rows, .columns = columns,
                              .strip_bytes = float_strip_bytes(LLAMAC_F32, columns) };
    return linear(w, &m, NULL);
}
static llamac_linear no_linear(const struct writer *w) { return linear(w, &(struct matrix){ 0 }, NULL); }

static llamac_norm norm_of(const struct writer *w, const float *weight, const float *bias) {
    const struct config *c = w->model->config;
    return (llamac_norm){ c->norm == NORM_RMS, c->norm_eps, vector(w, weight, (int)c->dim),
                          vector(w, bias, (int)c->dim) };
}

// ---- steps

static llamac_step *add_step(struct writer *w, enum llamac_op op) {
    llamac_step *step = &w->steps[w->plan->n_steps++];
    *step = (llamac_step){ .op = op, .layer = w->layer };
    return step;
}

// Grows the width of a buffer to at least `width`. Returns the buffer.
static int use_buffer(struct writer *w, int buffer, int width) {
    w->plan->widths[buffer] = max_int(w->plan->widths[buffer], width);
    return buffer;
}

static void observe(struct writer *w, int stage, int buffer, int width) {
    add_step(w, LLAMAC_OP_OBSERVE)->observe = (llamac_observe_step){ .stage = stage, .buffer = buffer, .width = width };
}

// Normalizes the residual stream as input of products. Returns the buffer: x itself if the layer has no norm there.
static int norm_stream(struct writer *w, int stage, const float *weight, const float *bias) {
    const int dim = (int)w->model->config->dim;
    int buffer = LLAMAC_BUFFER_X;
    if (weight) {
        buffer = use_buffer(w, LLAMAC_BUFFER_NORMED, dim);
        add_step(w, LLAMAC_OP_NORM)->norm = (llamac_norm_step){ .input = LLAMAC_BUFFER_X, .output = buffer,
                                                                .width = dim, .norm = norm_of(w, weight, bias) };
    }
    observe(w, stage, buffer, dim);
    return buffer;
}

// Appends output = the linear's map of x. Returns the product, which the caller may change until it adds the next step.
static llamac_product_step *product(struct writer *w, llamac_linear linear, int input, int output) {
    llamac_product_step *p = &add_step(w, LLAMAC_OP_PRODUCT)->product;
    *p = (llamac_product_step){ .linear = linear, .input = input, .output = use_buffer(w, output, linear.rows),
                                .scale = 1, .stage = -1 };
    return p;
}

// Appends the products of a matrix's adapter, if it has one, after the matrix's own product.
static void adapter(struct writer *w, const struct matrix *m, const llamac_product_step *own) {
    if (!m->lora) return;
    const int rank = m->lora->rank, projected = own->output == LLAMAC_BUFFER_LOGITS ? LLAMAC_BUFFER_OUTPUT_PROJECTED
                                                                                    : LLAMAC_BUFFER_PROJECTED;
    product(w, factor(w, m->lora->a, rank, m->columns), own->input, projected);
    llamac_product_step *p = product(w, factor(w, m->lora->b, m->rows, rank), projected, own->output);
    p->accumulate = p->accumulate_stage = 1;
    p->scale = own->scale, p->by_shared_weight = own->by_shared_weight, p->stage = own->stage;
}

// The product of a matrix, and where its result goes.
enum { MAX_PROJECTIONS = 3 };   // of the same inputs
struct projection { const struct matrix *matrix; const float *bias; int output; };

// Appends products of the same inputs, side by side, then those of their adapters.
static void project(struct writer *w, const struct projection *projections, int n, int input) {
    const llamac_product_step *own[MAX_PROJECTIONS];
    for (int i = 0; i < n; i++)
        own[i] = product(w, linear(w, projections[i].matrix, projections[i].bias), input, projections[i].output);
    for (int i = 0; i < n; i++) adapter(w, projections[i].matrix, own[i]);
}

static int has_post_norm(const struct layer *layer) {
    return layer->record->placement == PLACEMENT_POST || layer->record->placement == PLACEMENT_SANDWICH;
}

// Appends the last product of a branch, which goes to the residual stream, or to `branch` if a norm comes first.
static void branch_product(struct writer *w, const struct layer *layer, const struct matrix *m, const float *bias,
                           int input, int stage) {
    const int to_branch = has_post_norm(layer);
    llamac_product_step *p = product(w, linear(w, m, bias), input, to_branch ? LLAMAC_BUFFER_BRANCH : LLAMAC_BUFFER_X);
    p->stage = stage;
    if (!to_branch) {
        p->accumulate = 1;
        p->scale = w->model->config->residual_scale;
    }
    adapter(w, m, p);
}

static void add_branch(struct writer *w, const float *weight, const float *bias) {
    const struct config *c = w->model->config;
    add_step(w, LLAMAC_OP_ADD)->add =
        (llamac_add_step){ .width = (int)c->dim, .scale = c->residual_scale, .norm = norm_of(w, weight, bias) };
}

// ---- attention

static void project_qkv(struct writer *w, const struct layer *layer, int input) {
    const struct config *c = w->model->config;
    const int is_source = layer->kv_source == w->layer;
    const struct projection qkv[] = {
        { &layer->attn_q, layer->attn_q_bias, LLAMAC_BUFFER_Q },
        { &layer->attn_k, layer->attn_k_bias, LLAMAC_BUFFER_K },
        { &layer->attn_v, layer->attn_v_bias, LLAMAC_BUFFER_V },
    };
    project(w, qkv, is_source ? 3 : 1, input);
    if (c->qk_norm != QK_NORM_WHOLE) return;
    const struct { int buffer, width; const float *weight; } whole[] = {
        { LLAMAC_BUFFER_Q, layer->attn_q.rows, layer->attn_q_norm },
        { LLAMAC_BUFFER_K, layer->attn_k.rows, layer->attn_k_norm },
    };
    for (int i = 0; i < (is_source ? 2 : 1); i++)
        add_step(w, LLAMAC_OP_NORM)->norm = (llamac_norm_step){
            .input = whole[i].buffer, .output = whole[i].buffer, .width = whole[i].width,
            .norm = { .is_rms = 1, .eps = c->norm_eps, .weight = vector(w, whole[i].weight, whole[i].width),
                      .bias = vector(w, NULL, 0) },
        };
}

static void rotate_and_store(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct heads heads = layer->heads;
    const int norms = c->qk_norm == QK_NORM_HEAD || c->qk_norm == QK_NORM_LAYER_HEAD,
              per_head = c->qk_norm == QK_NORM_LAYER_HEAD, is_source = layer->kv_source == w->layer,
              rope = layer->record->rope;
    add_step(w, LLAMAC_OP_HEADS)->heads = (llamac_heads_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .is_source = is_source,
        .norms = norms, .norm_is_rms = c->qk_norm == QK_NORM_HEAD, .norm_per_head = per_head,
        .norm_after_rope = (int)c->qk_norm_after_rope, .eps = c->norm_eps,
        .q_norm = vector(w, norms ? layer->attn_q_norm : NULL, (per_head ? heads.n : 1) * heads.dim),
        .k_norm = vector(w, norms && is_source ? layer->attn_k_norm : NULL, (per_head ? heads.n_kv : 1) * heads.dim),
        .rope = rope, .rope_dim = rope < 0 ? 0 : (int)c->rope_dim[rope],
    };
}

static void attend(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct layer_record *record = layer->record;
    const struct heads heads = layer->heads;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows;
    add_step(w, LLAMAC_OP_ATTEND)->attend = (llamac_attend_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .kv_source = layer->kv_source,
        .window = (int)record->window, .scale = c->attention_scale, .soft_cap = c->attention_soft_cap,
        .query_beta = record->query_beta, .query_context = (int)record->query_context,
        .sinks = vector(w, layer->attn_sinks, heads.n),
    };
    use_buffer(w, LLAMAC_BUFFER_MIX, q_dim);
    observe(w, LLAMAC_STAGE_Q, LLAMAC_BUFFER_Q, q_dim);
    observe(w, LLAMAC_STAGE_K, kv_dim ? LLAMAC_BUFFER_K : LLAMAC_BUFFER_NONE, kv_dim);
    observe(w, LLAMAC_STAGE_V, kv_dim ? LLAMAC_BUFFER_V : LLAMAC_BUFFER_NONE, kv_dim);
    observe(w, LLAMAC_STAGE_CACHE_K, LLAMAC_BUFFER_NONE, heads.n_kv * heads.dim);
    observe(w, LLAMAC_STAGE_CACHE_V, LLAMAC_BUFFER_NONE, heads.n_kv * heads.dim);
    observe(w, LLAMAC_STAGE_SCORES, LLAMAC_BUFFER_NONE, heads.n);
    observe(w, LLAMAC_STAGE_ATTN_MIX, LLAMAC_BUFFER_MIX, q_dim);
}

// ---- feed-forward networks

static void activate(struct writer *w, const struct layer *layer, int gate, int up, int width) {
    const struct layer_record *r = layer->record;
    const float limit = r->activation_limit > 0 ? r->activation_limit : INFINITY;
    add_step(w, LLAMAC_OP_ACTIVATE)->activate = (llamac_activate_step){
        .activation = (int)w->model->config->activation, .gate = gate, .up = up, .width = width,
        .is_clamped = gate != LLAMAC_BUFFER_NONE && (limit != INFINITY || r->up_offset != 0),
        .limit = limit, .up_offset = r->up_offset,
    };
}

enum expert_matrix { EXPERT_GATE, EXPERT_UP, EXPERT_DOWN, N_EXPERT_MATRICES };

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

// The EXPERT_PRODUCT steps of a layer.
static size_t n_expert_products(const struct layer *layer) {
    size_t n = layer->record->n_experts ? N_EXPERT_MATRICES : 0;
    for (int which = 0; which < N_EXPERT_MATRICES; which++)
        for (int rank = 0; (rank = next_rank(layer, which, rank)) > 0;) n += 2;
    return n;
}

// Appends a product with a linear for each expert. Returns them; the caller sets them. rows: of each.
static llamac_linear *expert_product(struct writer *w, int n, int rows, int input, int output, int accumulate) {
    llamac_linear *linears = w->next_expert;
    w->next_expert += n;
    add_step(w, LLAMAC_OP_EXPERT_PRODUCT)->expert_product = (llamac_expert_product_step){
        .linears = linears, .n_experts = n, .input = input, .output = use_buffer(w, output, rows),
        .accumulate = accumulate,
    };
    return linears;
}

static void expert_products(struct writer *w, const struct layer *layer, enum expert_matrix which, int input) {
    const int n = (int)layer->record->n_experts;
    const struct projection first = expert_of(layer, 0, which);
    llamac_linear *linears = expert_product(w, n, first.matrix->rows, input, first.output, 0);
    for (int i = 0; i < n; i++) {
        const struct projection expert = expert_of(layer, i, which);
        linears[i] = linear(w, expert.matrix, expert.bias);
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
        for (int i = 0; i < n; i++) {
            const struct matrix *m = expert_of(layer, i, which).matrix;
            const int has_rank = m->lora && m->lora->rank == rank;
            a[i] = has_rank ? factor(w, m->lora->a, rank, m->columns) : no_linear(w);
            b[i] = has_rank ? factor(w, m->lora->b, m->rows, rank) : no_linear(w);
        }
    }
}

static void experts_hidden(struct writer *w, const struct layer *layer, int input) {
    const struct layer_record *r = layer->record;
    const struct projection routers[] = {
        { &layer->ffn_router, layer->ffn_router_bias, LLAMAC_BUFFER_ROUTER },
        { &layer->shared_gate, NULL, LLAMAC_BUFFER_SHARED_GATE },
    };
    project(w, routers, r->shared_gate ? 2 : 1, input);
    observe(w, LLAMAC_STAGE_FFN_ROUTER, LLAMAC_BUFFER_ROUTER, (int)r->n_experts);
    add_step(w, LLAMAC_OP_ROUTE)->route = (llamac_route_step){
        .n_experts = (int)r->n_experts, .n_used = (int)r->n_experts_used, .normalized = (int)r->expert_weights,
        .has_shared_gate = (int)r->shared_gate,
    };
    expert_products(w, layer, EXPERT_UP, input);
    expert_products(w, layer, EXPERT_GATE, input);
    expert_adapters(w, layer, EXPERT_UP, input);
    expert_adapters(w, layer, EXPERT_GATE, input);
    activate(w, layer, LLAMAC_BUFFER_EXPERT_GATE, LLAMAC_BUFFER_EXPERT_UP, (int)r->ffn_dim);
}

// From the normalized rows to the hidden activations.
static void ffn_hidden(struct writer *w, const struct layer *layer, int input) {
    const struct ffn_weights *ffn = &layer->ffn;
    if (ffn->up.data) {
        const struct projection both[] = {
            { &ffn->up, ffn->up_bias, LLAMAC_BUFFER_UP }, { &ffn->gate, ffn->gate_bias, LLAMAC_BUFFER_GATE },
        };
        project(w, both, ffn->gate.data ? 2 : 1, input);
        activate(w, layer, ffn->gate.data ? LLAMAC_BUFFER_GATE : LLAMAC_BUFFER_NONE, LLAMAC_BUFFER_UP, ffn->up.rows);
    }
    if (layer->record->ffn == FFN_EXPERTS) experts_hidden(w, layer, input);
    else observe(w, LLAMAC_STAGE_FFN_ROUTER, LLAMAC_BUFFER_NONE, 0);
}

static void experts_down(struct writer *w, const struct layer *layer) {
    const struct layer_record *r = layer->record;
    const int dim = (int)w->model->config->dim, has_shared = layer->ffn.up.data != NULL;
    add_step(w, LLAMAC_OP_OBSERVE)->observe = (llamac_observe_step){
        .stage = LLAMAC_STAGE_FFN_HIDDEN, .buffer = LLAMAC_BUFFER_EXPERT_UP, .width = (int)r->ffn_dim,
        .shared_width = (int)r->shared_ffn_dim,
    };
    if (has_shared) {
        llamac_product_step *p = product(w, linear(w, &layer->ffn.down, layer->ffn.down_bias), LLAMAC_BUFFER_UP,
                                         LLAMAC_BUFFER_BRANCH);
        p->by_shared_weight = (int)r->shared_gate;
        adapter(w, &layer->ffn.down, p);
    }
    expert_products(w, layer, EXPERT_DOWN, LLAMAC_BUFFER_EXPERT_UP);
    expert_adapters(w, layer, EXPERT_DOWN, LLAMAC_BUFFER_EXPERT_UP);
    add_step(w, LLAMAC_OP_COMBINE)->combine = (llamac_combine_step){
        .n_used = (int)r->n_experts_used, .width = dim, .accumulate = has_shared,
        .is_adapted = next_rank(layer, EXPERT_DOWN, 0) > 0,
    };
    observe(w, LLAMAC_STAGE_FFN, use_buffer(w, LLAMAC_BUFFER_BRANCH, dim), dim);
    if (!has_post_norm(layer)) add_branch(w, NULL, NULL);
}

// From the hidden activations to the residual stream, or to `branch` if a norm comes first.
static void ffn_down(struct writer *w, const struct layer *layer) {
    if (layer->record->ffn == FFN_EXPERTS) {
        experts_down(w, layer);
        return;
    }
    observe(w, LLAMAC_STAGE_FFN_HIDDEN, LLAMAC_BUFFER_UP, layer->ffn.up.rows);
    branch_product(w, layer, &layer->ffn.down, layer->ffn.down_bias, LLAMAC_BUFFER_UP, LLAMAC_STAGE_FFN);
}

// ---- the graph

static void norm_and_ffn_hidden(struct writer *w, const struct layer *layer) {
    ffn_hidden(w, layer, norm_stream(w, LLAMAC_STAGE_FFN_NORM, layer->ffn_norm, layer->ffn_norm_bias));
}

static void block(struct writer *w, const struct layer *layer) {
    const int parallel = layer->record->placement == PLACEMENT_PARALLEL, post_norm = has_post_norm(layer);
    project_qkv(w, layer, norm_stream(w, LLAMAC_STAGE_ATTN_NORM, layer->attn_norm, layer->attn_norm_bias));
    if (parallel) norm_and_ffn_hidden(w, layer);
    rotate_and_store(w, layer);
    attend(w, layer);
    branch_product(w, layer, &layer->attn_out, layer->attn_out_bias, LLAMAC_BUFFER_MIX, LLAMAC_STAGE_ATTN_OUT);
    if (post_norm) add_branch(w, layer->attn_post_norm, layer->attn_post_norm_bias);
    if (!parallel) norm_and_ffn_hidden(w, layer);
    ffn_down(w, layer);
    if (post_norm) add_branch(w, layer->ffn_post_norm, layer->ffn_post_norm_bias);
    observe(w, LLAMAC_STAGE_BLOCK, LLAMAC_BUFFER_X, (int)w->model->config->dim);
}

static llamac_embedding_adapter embedding_adapter(const struct writer *w, const struct matrix *m) {
    if (!m->lora) return (llamac_embedding_adapter){ no_linear(w), no_linear(w) };
    return (llamac_embedding_adapter){ factor(w, m->lora->a, m->columns, m->lora->rank),
                                       factor(w, m->lora->b, m->rows, m->lora->rank) };
}

static void ropes_and_embedding(struct writer *w) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    for (uint32_t t = 0; t < c->n_rope; t++) {
        const int dim = (int)c->rope_dim[t];
        add_step(w, LLAMAC_OP_ROPE)->rope = (llamac_rope_step){
            .table = (int)t, .inv_freq = vector(w, m->rope[t].inv_freq, dim / 2),
            .inv_freq_long = vector(w, m->rope[t].inv_freq_long, dim / 2),
            .original_context = (int)c->rope_original_context[t], .dim = dim, .factor = c->rope_attention_factor[t],
        };
    }
    add_step(w, LLAMAC_OP_EMBED)->embed = (llamac_embed_step){
        .tokens = linear(w, &m->token_embedding, NULL), .positions = linear(w, &m->position_embedding, NULL),
        .tokens_adapter = embedding_adapter(w, &m->token_embedding),
        .positions_adapter = embedding_adapter(w, &m->position_embedding),
        .scale = c->embedding_scale,
    };
    observe(w, LLAMAC_STAGE_EMBEDDING, use_buffer(w, LLAMAC_BUFFER_X, (int)c->dim), (int)c->dim);
}

static void output(struct writer *w) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    const int dim = (int)c->dim, vocab = (int)c->vocab_size;
    const int normed = use_buffer(w, LLAMAC_BUFFER_OUTPUT_NORMED, dim);
    add_step(w, LLAMAC_OP_NORM)->norm = (llamac_norm_step){
        .input = LLAMAC_BUFFER_X, .output = normed, .width = dim,
        .norm = norm_of(w, m->output_norm, m->output_norm_bias),
    };
    observe(w, LLAMAC_STAGE_OUTPUT_NORM, normed, dim);
    project(w, &(struct projection){ &m->output, m->output_bias, LLAMAC_BUFFER_LOGITS }, 1, normed);
    if (c->logit_scale != 1 || c->logit_soft_cap > 0)
        add_step(w, LLAMAC_OP_SCALE)->scale = (llamac_scale_step){
            .buffer = LLAMAC_BUFFER_LOGITS, .width = vocab, .scale = c->logit_scale, .cap = c->logit_soft_cap,
        };
    observe(w, LLAMAC_STAGE_LOGITS, LLAMAC_BUFFER_LOGITS, vocab);
}

// Checks that there are steps for everything that the model computes.
static int check_planned(const struct llamac_model *m, llamac_error *err) {
    if (m->config->two_sided)
        return err_set(err, LLAMAC_UNSUPPORTED, "the model is an encoder, which llamac computes only on the CPU");
    for (uint32_t l = 0; l < m->config->n_layers; l++) {
        const struct layer_record *r = m->layers[l].record;
        if (r->kv_lora_rank)
            return err_set(err, LLAMAC_UNSUPPORTED,
                           "layer %u: kv_lora_rank is %u (latent attention), which llamac computes only on the CPU", l,
                           r->kv_lora_rank);
        const struct { int is_planned; const char *what; } parts[] = {
            { m->config->activation != ACTIVATION_XIELU, "activation is xielu" },
            { r->mixer != MIXER_DELTA_NET, "mixer is delta_net" },
            { r->mixer != MIXER_SHORT_CONV, "mixer is short_conv" },
            { r->output_gate != OUTPUT_GATE_ELEMENT, "output_gate is element" },
            { r->router != ROUTER_SIGMOID, "router is sigmoid" },
            { !r->router_choice_bias, "router_choice_bias is 1" },
            { !r->n_expert_groups, "n_expert_groups is not 0" },
            { r->expert_scale == 1, "expert_scale is not 1" },
            { !r->v_is_k, "v_is_k is 1" },
            { r->v_norm == V_NORM_NONE, "v_norm is head" },
            { r->layer_scale == 1, "layer_scale is not 1" },
            { !r->layer_embedding_dim, "layer_embedding_dim is more than 0" },
            { !r->expert_norms, "expert_norms is 1" },
            { !r->expert_factors, "expert_factors is 1" },
        };
        for (size_t i = 0; i < ARRAY_LEN(parts); i++)
            if (!parts[i].is_planned)
                return err_set(err, LLAMAC_UNSUPPORTED, "layer %u: %s, which llamac computes only on the CPU", l,
                               parts[i].what);
    }
    return 0;
}

int llamac_plan_open(llamac_plan *plan, const llamac_model *model, llamac_error *err) {
    const uint32_t n_layers = model->config->n_layers;
    *plan = (llamac_plan){ .max_experts_used = model->max_experts_used };
    if (check_planned(model, err)) return -1;
    size_t max_steps = STEPS_BEFORE + STEPS_OF_LAYER * (size_t)n_layers + STEPS_AFTER, n_linears = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        const size_t products = n_expert_products(&model->layers[l]);
        max_steps += products;
        n_linears += products * model->layers[l].record->n_experts;
    }
    struct writer w = { .model = model, .plan = plan, .layer = -1 };
    w.steps = mem_alloc(max_steps, sizeof *w.steps, "the plan", err);
    w.next_expert = w.steps ? mem_alloc(n_linears + 1, sizeof *w.next_expert, "the plan's experts", err) : NULL;
    plan->steps = w.steps, plan->experts = w.next_expert;
    if (!w.next_expert) {
        llamac_plan_close(plan);
        return -1;
    }
    ropes_and_embedding(&w);
    for (w.layer = 0; w.layer < (int)n_layers; w.layer++) block(&w, &model->layers[w.layer]);
    w.layer = -1;
    output(&w);
    return 0;
}

void llamac_plan_close(llamac_plan *plan) {
    mem_free((void *)(uintptr_t)plan->steps);
    mem_free(plan->experts);
    *plan = (llamac_plan){ 0 };
}

const char *llamac_buffer_name(int buffer) {
    static const char *const names[LLAMAC_N_BUFFERS] = {
        [LLAMAC_BUFFER_NONE] = "none", [LLAMAC_BUFFER_X] = "x", [LLAMAC_BUFFER_BRANCH] = "branch",
        [LLAMAC_BUFFER_NORMED] = "normed", [LLAMAC_BUFFER_Q] = "q", [LLAMAC_BUFFER_K] = "k", [LLAMAC_BUFFER_V] = "v",
        [LLAMAC_BUFFER_MIX] = "mix", [LLAMAC_BUFFER_GATE] = "gate", [LLAMAC_BUFFER_UP] = "up",
        [LLAMAC_BUFFER_ROUTER] = "router", [LLAMAC_BUFFER_SHARED_GATE] = "shared_gate",
        [LLAMAC_BUFFER_EXPERT_GATE] = "expert_gate", [LLAMAC_BUFFER_EXPERT_UP] = "expert_up",
        [LLAMAC_BUFFER_EXPERT_OUT] = "expert_out", [LLAMAC_BUFFER_PROJECTED] = "projected",
        [LLAMAC_BUFFER_EXPERT_PROJECTED] = "expert_projected", [LLAMAC_BUFFER_EXPERT_ADDED] = "expert_added",
        [LLAMAC_BUFFER_OUTPUT_NORMED] = "output_normed", [LLAMAC_BUFFER_OUTPUT_PROJECTED] = "output_projected",
        [LLAMAC_BUFFER_LOGITS] = "logits",
    };
    return buffer >= 0 && buffer < LLAMAC_N_BUFFERS ? names[buffer] : NULL;
}
