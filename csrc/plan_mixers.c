// SPDX-License-Identifier: MIT
// plan_mixers.c - the steps of what mixes positions, in the order of forward.c.
#include <math.h>
#include "common.h"
#include "plan_writer.h"

static llamac_norm rms_norm(const struct writer *w, const float *weight, int n, float eps) {
    return (llamac_norm){ .is_rms = 1, .eps = eps, .weight = plan_vector(w, weight, n),
                          .bias = plan_vector(w, NULL, 0) };
}

static void project_qkv(struct writer *w, const struct layer *layer, int input) {
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
        plan_norm_rows(w, whole[i].buffer, whole[i].buffer, whole[i].width,
                       rms_norm(w, whole[i].weight, whole[i].width, c->norm_eps));
}

// ---- latent attention

static void head_product(struct writer *w, const struct matrix *m, int heads, int input, int output, int first,
                         int stride) {
    plan_step(w, LLAMAC_OP_HEAD_PRODUCT)->head_product = (llamac_head_product_step){
        .linear = plan_linear(w, m, NULL), .heads = heads, .input = input, .output = plan_use(w, output, m->rows),
        .first = first, .stride = stride,
    };
}

// The numbers of a head of q before attn_k_b: its rotated part, then the rest.
static int latent_q_dim(const struct layer *layer) {
    return layer->heads.dim - layer->heads.value_dim + (int)layer->record->qk_nope_head_dim;
}

// As the first products of forward.c, then latent_qkv of latent.c.
static void project_latents(struct writer *w, const struct layer *layer, int input) {
    const int q_rank = (int)layer->record->q_lora_rank, rank = layer->heads.value_dim, dim = layer->heads.dim;
    const float eps = layer->record->latent_norm_eps;
    const struct projection q = { &layer->attn_q, layer->attn_q_bias, LLAMAC_BUFFER_LATENT_HEADS },
                            q_latent = { &layer->attn_q_a, layer->attn_q_a_bias, LLAMAC_BUFFER_Q_LATENT },
                            first[] = { q_rank ? q_latent : q,
                                        { &layer->attn_kv_a, layer->attn_kv_a_bias, LLAMAC_BUFFER_K } };
    plan_project(w, first, (int)ARRAY_LEN(first), input);
    llamac_norm_step *of_kv = plan_norm_rows(w, LLAMAC_BUFFER_K, plan_use(w, LLAMAC_BUFFER_V, rank), rank,
                                             rms_norm(w, layer->attn_kv_a_norm, rank, eps));
    of_kv->first = dim - rank, of_kv->stride = dim;
    if (q_rank) {
        plan_norm_rows(w, LLAMAC_BUFFER_Q_LATENT, LLAMAC_BUFFER_Q_LATENT, q_rank,
                       rms_norm(w, layer->attn_q_a_norm, q_rank, eps));
        plan_project(w, &q, 1, LLAMAC_BUFFER_Q_LATENT);
    }
    head_product(w, &layer->attn_k_b, layer->heads.n, LLAMAC_BUFFER_LATENT_HEADS, LLAMAC_BUFFER_MIX, dim - rank,
                 latent_q_dim(layer));
    plan_use(w, LLAMAC_BUFFER_Q, layer->heads.n * dim);
}

// ---- attention

static void rotate_and_store(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct heads heads = layer->heads;
    const float n = (float)heads.dim;
    const int norms = layer->attn_q_norm && c->qk_norm != QK_NORM_WHOLE,
              per_head = c->qk_norm == QK_NORM_LAYER_HEAD, is_source = layer->kv_source == w->layer,
              rope = layer->record->rope;
    if (is_source) plan_use(w, LLAMAC_BUFFER_V, heads.n_kv * heads.value_dim);   // without a product if v is k
    plan_step(w, LLAMAC_OP_HEADS)->heads = (llamac_heads_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .value_dim = heads.value_dim,
        .latent_stride = layer->record->kv_lora_rank ? latent_q_dim(layer) : 0, .is_source = is_source,
        .norms = norms, .norm_is_rms = !per_head, .norm_per_head = per_head,
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
    const int reads_trunk = reads_trunk_keys(c), window = (int)record->window,
              mix_dim = heads.n * heads.value_dim, is_source = layer->kv_source == w->layer,
              k_dim = heads.n_kv * heads.dim, v_dim = heads.n_kv * heads.value_dim;
    plan_step(w, LLAMAC_OP_ATTEND)->attend = (llamac_attend_step){
        .n_heads = heads.n, .n_kv_heads = heads.n_kv, .head_dim = heads.dim, .value_dim = heads.value_dim,
        .kv_source = reads_trunk ? w->layer : layer->kv_source,   // whose place in the cache is one of the trunk's
        .window = record->window_chunks ? -window : reads_trunk ? assistant_window(window) : window,
        .two_sided = reads_trunk || c->two_sided, .scale = c->attention_scale,
        .soft_cap = c->attention_soft_cap, .query_beta = record->query_beta,
        .query_context = (int)record->query_context, .query_offset = (int)record->query_offset,
        .sinks = plan_vector(w, layer->attn_sinks, heads.n),
        .biases = plan_vector(w, w->model->distance_bias, heads.n * (2 * (int)c->bias_distance + 1)),
        .bias_distance = (int)c->bias_distance,
    };
    plan_use(w, LLAMAC_BUFFER_MIX, mix_dim);
    if (layer->attn_gate.data)
        plan_step(w, LLAMAC_OP_GATE)->gate = (llamac_gate_step){
            .buffer = LLAMAC_BUFFER_MIX, .gate = LLAMAC_BUFFER_ATTN_GATE, .width = mix_dim,
            .group = mix_dim / layer->attn_gate.rows,
        };
    plan_observe(w, LLAMAC_STAGE_Q, LLAMAC_BUFFER_Q, heads.n * heads.dim);
    plan_observe(w, LLAMAC_STAGE_K, is_source ? LLAMAC_BUFFER_K : LLAMAC_BUFFER_NONE, is_source ? k_dim : 0);
    plan_observe(w, LLAMAC_STAGE_V, is_source ? LLAMAC_BUFFER_V : LLAMAC_BUFFER_NONE, is_source ? v_dim : 0);
    plan_observe(w, LLAMAC_STAGE_CACHE_K, LLAMAC_BUFFER_NONE, k_dim);
    plan_observe(w, LLAMAC_STAGE_CACHE_V, LLAMAC_BUFFER_NONE, v_dim);
    plan_observe(w, LLAMAC_STAGE_SCORES, LLAMAC_BUFFER_NONE, heads.n);
}

// ---- recurrent layers

static void convolve(struct writer *w, const struct layer *layer, int output) {
    const struct layer_record *r = layer->record;
    const int channels = (int)conv_channels(w->model->config, r), is_gated = r->mixer == MIXER_SHORT_CONV;
    plan_step(w, LLAMAC_OP_CONVOLVE)->convolve = (llamac_convolve_step){
        .input = LLAMAC_BUFFER_CONV_IN, .output = plan_use(w, output, channels), .channels = channels,
        .width = (int)r->conv_width, .is_gated = is_gated, .is_silu = !is_gated,
        .state_floats = (int)(r->state_heads * r->state_key_dim * r->state_value_dim),
        .taps = plan_vector(w, layer->conv_taps, (int)r->conv_width * channels),
        .bias = plan_vector(w, layer->conv_bias, channels),
    };
}

static void delta_rule(struct writer *w, const struct layer *layer) {
    const struct layer_record *r = layer->record;
    plan_use(w, LLAMAC_BUFFER_MIX, (int)state_values(r));
    plan_step(w, LLAMAC_OP_DELTA_RULE)->delta_rule = (llamac_delta_rule_step){
        .key_heads = (int)r->state_key_heads, .heads = (int)r->state_heads, .key_dim = (int)r->state_key_dim,
        .value_dim = (int)r->state_value_dim, .unit_eps = DELTA_UNIT_EPS,
        .q_factor = 1.0f / sqrtf((float)r->state_key_dim), .beta_factor = delta_beta_factor(w->model->config),
        .norm_eps = delta_norm_eps(w->model->config),
        .decay = plan_vector(w, layer->state_decay, (int)r->state_heads),
        .dt_bias = plan_vector(w, layer->state_dt_bias, (int)r->state_heads),
        .norm = plan_vector(w, layer->state_norm, (int)r->state_value_dim),
    };
}

static void gate_mix(struct writer *w, int width) {
    plan_step(w, LLAMAC_OP_ACTIVATE)->activate = (llamac_activate_step){
        .activation = ACTIVATION_SILU, .alpha_p = plan_vector(w, NULL, 0), .alpha_n = plan_vector(w, NULL, 0),
        .gate = LLAMAC_BUFFER_STATE_Z, .up = LLAMAC_BUFFER_MIX, .output = LLAMAC_BUFFER_MIX, .width = width,
        .stride = width, .limit = INFINITY,
    };
}

static void scan(struct writer *w, const struct layer *layer) {
    const struct config *c = w->model->config;
    const struct layer_record *r = layer->record;
    const int values = (int)state_values(r), heads = (int)r->state_heads, groups = (int)r->state_key_heads;
    plan_use(w, LLAMAC_BUFFER_MIX, values), plan_use(w, LLAMAC_BUFFER_STATE_BETA, heads);
    plan_step(w, LLAMAC_OP_SCAN)->scan = (llamac_scan_step){
        .key_heads = groups, .heads = heads, .key_dim = (int)r->state_key_dim, .value_dim = (int)r->state_value_dim,
        .step_min = c->state_step_min, .step_max = c->state_step_max,
        .decay = plan_vector(w, layer->state_decay, heads), .dt_bias = plan_vector(w, layer->state_dt_bias, heads),
        .skip = plan_vector(w, layer->state_skip, heads),
    };
    if (c->state_norm != STATE_NORM_BEFORE_GATE) gate_mix(w, values);
    if (c->state_norm != STATE_NORM_NONE) {
        llamac_norm_step *norm = plan_norm_rows(w, LLAMAC_BUFFER_MIX, LLAMAC_BUFFER_MIX, values / groups,
                                                rms_norm(w, layer->state_norm, values, c->norm_eps));
        norm->parts = groups, norm->stride = norm->to_stride = values;
    }
    if (c->state_norm == STATE_NORM_BEFORE_GATE) gate_mix(w, values);
}

// Appends zeros for the stages of attention.
static void observe_no_attention(struct writer *w) {
    static const int stages[] = { LLAMAC_STAGE_Q, LLAMAC_STAGE_K, LLAMAC_STAGE_V, LLAMAC_STAGE_CACHE_K,
                                  LLAMAC_STAGE_CACHE_V, LLAMAC_STAGE_SCORES };
    for (int i = 0; i < (int)ARRAY_LEN(stages); i++) plan_observe(w, stages[i], LLAMAC_BUFFER_MIX, 0);
}

// ---- any

void plan_mixer_inputs(struct writer *w, const struct layer *layer, int input) {
    const struct projection of_delta_net[] = {
        { &layer->state_qkv, NULL, LLAMAC_BUFFER_CONV_IN }, { &layer->state_z, NULL, LLAMAC_BUFFER_STATE_Z },
        { &layer->state_beta, NULL, LLAMAC_BUFFER_STATE_BETA }, { &layer->state_a, NULL, LLAMAC_BUFFER_STATE_DECAY },
    }, of_mamba2[] = {
        { &layer->state_qkv, layer->state_qkv_bias, LLAMAC_BUFFER_CONV_IN },
        { &layer->state_z, layer->state_z_bias, LLAMAC_BUFFER_STATE_Z },
        { &layer->state_a, layer->state_a_bias, LLAMAC_BUFFER_STATE_DECAY },
    }, of_short_conv = { &layer->conv_in, layer->conv_in_bias, LLAMAC_BUFFER_CONV_IN };
    if (layer->record->kv_lora_rank) project_latents(w, layer, input);
    else if (has_attention(layer->record)) project_qkv(w, layer, input);
    if (has_mamba2(layer->record)) plan_project(w, of_mamba2, (int)ARRAY_LEN(of_mamba2), input);
    if (layer->record->mixer == MIXER_DELTA_NET)
        plan_project(w, of_delta_net, (int)ARRAY_LEN(of_delta_net), input);
    if (layer->record->mixer == MIXER_SHORT_CONV) plan_project(w, &of_short_conv, 1, input);
}

// Appends a mixer and its output projection, as mix_and_project of forward.c. is_second: beside attention.
static void mix_and_project(struct writer *w, const struct layer *layer, enum mixer mixer, int is_second) {
    const int is_mamba = mixer == MIXER_MAMBA2, is_latent = layer->record->kv_lora_rank > 0,
              mix = is_latent ? LLAMAC_BUFFER_LATENT_HEADS : LLAMAC_BUFFER_MIX;
    const struct matrix *out = is_mamba ? &layer->state_out : &layer->attn_out;
    if (mixer == MIXER_ATTENTION) {
        rotate_and_store(w, layer);
        attend(w, layer);
        if (is_latent)
            head_product(w, &layer->attn_v_b, layer->heads.n, LLAMAC_BUFFER_MIX, LLAMAC_BUFFER_LATENT_HEADS, 0,
                         layer->heads.value_dim);
    } else {
        convolve(w, layer, mixer == MIXER_SHORT_CONV ? LLAMAC_BUFFER_MIX : LLAMAC_BUFFER_CONV_OUT);
        if (mixer == MIXER_DELTA_NET) delta_rule(w, layer);
        if (is_mamba) scan(w, layer);
        if (!is_second) observe_no_attention(w);
    }
    if (layer->record->sub_norms)
        plan_sub_norm(w, LLAMAC_STAGE_ATTN_MIX, mix, layer->attn_sub_norm, out->columns);
    else
        plan_observe(w, LLAMAC_STAGE_ATTN_MIX, mix, out->columns)->first = is_second ? layer->attn_out.columns : 0;
    plan_branch_product(w, layer, out, is_mamba ? layer->state_out_bias : layer->attn_out_bias, mix,
                        LLAMAC_STAGE_ATTN_OUT, is_second);
}

void plan_mixer_out(struct writer *w, const struct layer *layer) {
    const enum mixer mixer = layer->record->mixer;
    const int both = mixer == MIXER_ATTENTION_MAMBA2;
    mix_and_project(w, layer, both ? MIXER_ATTENTION : mixer, 0);
    if (both) mix_and_project(w, layer, MIXER_MAMBA2, 1);
}
