// SPDX-License-Identifier: MIT
// plan_mixers.c - the steps of what mixes positions, in the order of forward.c.
#include <math.h>
#include "plan_writer.h"

void plan_mixer_inputs(struct writer *w, const struct layer *layer, int input) {
    const struct config *c = w->model->config;
    const int is_source = layer->kv_source == w->layer;
    const struct projection qkv[] = {
        { &layer->attn_q, layer->attn_q_bias, LLAMAC_BUFFER_Q },
        { &layer->attn_gate, layer->attn_gate_bias, LLAMAC_BUFFER_ATTN_GATE },
        { &layer->attn_k, layer->attn_k_bias, LLAMAC_BUFFER_K },
        { &layer->attn_v, layer->attn_v_bias, LLAMAC_BUFFER_V },
    };
    plan_project(w, qkv, is_source ? 4 : 2, input);
    if (c->qk_norm != QK_NORM_WHOLE) return;
    const struct { int buffer, width; const float *weight; } whole[] = {
        { LLAMAC_BUFFER_Q, layer->attn_q.rows, layer->attn_q_norm },
        { LLAMAC_BUFFER_K, layer->attn_k.rows, layer->attn_k_norm },
    };
    for (int i = 0; i < (is_source ? 2 : 1); i++)
        plan_step(w, LLAMAC_OP_NORM)->norm = (llamac_norm_step){
            .input = whole[i].buffer, .output = whole[i].buffer, .width = whole[i].width,
            .norm = { .is_rms = 1, .eps = c->norm_eps, .weight = plan_vector(w, whole[i].weight, whole[i].width),
                      .bias = plan_vector(w, NULL, 0) },
        };
}

static void rotate_and_store(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct heads heads = layer->heads;
    const float n = (float)heads.dim;
    const int norms = c->qk_norm == QK_NORM_HEAD || c->qk_norm == QK_NORM_LAYER_HEAD,
              per_head = c->qk_norm == QK_NORM_LAYER_HEAD, is_source = layer->kv_source == w->layer,
              rope = layer->record->rope;
    if (is_source) plan_use(w, LLAMAC_BUFFER_V, heads.n_kv * heads.dim);   // without a product if v is k
    plan_step(w, LLAMAC_OP_HEADS)->heads = (llamac_heads_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .is_source = is_source,
        .norms = norms, .norm_is_rms = c->qk_norm == QK_NORM_HEAD, .norm_per_head = per_head,
        .norm_after_rope = (int)c->qk_norm_after_rope, .eps = c->norm_eps,
        .q_norm = plan_vector(w, norms ? layer->attn_q_norm : NULL, (per_head ? heads.n : 1) * heads.dim),
        .k_norm = plan_vector(w, norms && is_source ? layer->attn_k_norm : NULL,
                              (per_head ? heads.n_kv : 1) * heads.dim),
        .rope = rope, .rope_dim = rope < 0 ? 0 : (int)c->rope_dim[rope],
        .v_is_k = is_source && layer->record->v_is_k,
        .v_norm = is_source && layer->record->v_norm == V_NORM_HEAD, .v_eps = n * c->norm_eps, .v_factor = sqrtf(n),
    };
}

static void attend(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct layer_record *record = layer->record;
    const struct heads heads = layer->heads;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->kv_source == w->layer ? heads.n_kv * heads.dim : 0;
    plan_step(w, LLAMAC_OP_ATTEND)->attend = (llamac_attend_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .kv_source = layer->kv_source,
        .window = (int)record->window, .scale = c->attention_scale, .soft_cap = c->attention_soft_cap,
        .query_beta = record->query_beta, .query_context = (int)record->query_context,
        .sinks = plan_vector(w, layer->attn_sinks, heads.n),
    };
    plan_use(w, LLAMAC_BUFFER_MIX, q_dim);
    if (layer->attn_gate.data)
        plan_step(w, LLAMAC_OP_GATE)->gate =
            (llamac_gate_step){ .buffer = LLAMAC_BUFFER_MIX, .gate = LLAMAC_BUFFER_ATTN_GATE, .width = q_dim };
    plan_observe(w, LLAMAC_STAGE_Q, LLAMAC_BUFFER_Q, q_dim);
    plan_observe(w, LLAMAC_STAGE_K, kv_dim ? LLAMAC_BUFFER_K : LLAMAC_BUFFER_NONE, kv_dim);
    plan_observe(w, LLAMAC_STAGE_V, kv_dim ? LLAMAC_BUFFER_V : LLAMAC_BUFFER_NONE, kv_dim);
    plan_observe(w, LLAMAC_STAGE_CACHE_K, LLAMAC_BUFFER_NONE, heads.n_kv * heads.dim);
    plan_observe(w, LLAMAC_STAGE_CACHE_V, LLAMAC_BUFFER_NONE, heads.n_kv * heads.dim);
    plan_observe(w, LLAMAC_STAGE_SCORES, LLAMAC_BUFFER_NONE, heads.n);
    plan_observe(w, LLAMAC_STAGE_ATTN_MIX, LLAMAC_BUFFER_MIX, q_dim);
}

int plan_mixer(struct writer *w, const struct layer *layer) {
    rotate_and_store(w, layer);
    attend(w, layer);
    return LLAMAC_BUFFER_MIX;
}
