// SPDX-License-Identifier: MIT
// observe.c - the graph's stages: their names, their widths and the copies that observers get. Without observers, a
// stage costs one comparison.
#include <string.h>
#include "common.h"
#include "eval.h"

enum width { W_DIM, W_Q, W_KV, W_MIX, W_ROUTER, W_HIDDEN, W_SCORES, W_VOCAB };

static const struct { const char *name; enum width width; int per_layer; } stages[LLAMAC_N_STAGES] = {
    [LLAMAC_STAGE_EMBEDDING] = { "embedding", W_DIM, 0 },
    [LLAMAC_STAGE_ATTN_NORM] = { "attn_norm", W_DIM, 1 },
    [LLAMAC_STAGE_Q] = { "q", W_Q, 1 },
    [LLAMAC_STAGE_K] = { "k", W_KV, 1 },
    [LLAMAC_STAGE_V] = { "v", W_KV, 1 },
    [LLAMAC_STAGE_CACHE_K] = { "cache_k", W_KV, 1 },
    [LLAMAC_STAGE_CACHE_V] = { "cache_v", W_KV, 1 },
    [LLAMAC_STAGE_SCORES] = { "scores", W_SCORES, 1 },
    [LLAMAC_STAGE_ATTN_MIX] = { "attn_mix", W_MIX, 1 },
    [LLAMAC_STAGE_ATTN_OUT] = { "attn_out", W_DIM, 1 },
    [LLAMAC_STAGE_FFN_NORM] = { "ffn_norm", W_DIM, 1 },
    [LLAMAC_STAGE_FFN_ROUTER] = { "ffn_router", W_ROUTER, 1 },
    [LLAMAC_STAGE_FFN_HIDDEN] = { "ffn_hidden", W_HIDDEN, 1 },
    [LLAMAC_STAGE_FFN] = { "ffn", W_DIM, 1 },
    [LLAMAC_STAGE_BLOCK] = { "block", W_DIM, 1 },
    [LLAMAC_STAGE_OUTPUT_NORM] = { "output_norm", W_DIM, 0 },
    [LLAMAC_STAGE_LOGITS] = { "logits", W_VOCAB, 0 },
};

const char *llamac_stage_name(int stage) { return stage >= 0 && stage < LLAMAC_N_STAGES ? stages[stage].name : NULL; }

size_t llamac_stage_width(const llamac_session *s, int stage, int *per_layer) {
    if (stage < 0 || stage >= LLAMAC_N_STAGES) return 0;
    const struct config *c = s->model->config;
    *per_layer = stages[stage].per_layer;
    switch (stages[stage].width) {
    case W_Q: return (size_t)c->n_heads * c->head_dim;
    case W_MIX: return mix_row_width(s->model);
    case W_KV: return (size_t)c->n_kv_heads * c->head_dim;
    case W_ROUTER: return (size_t)s->model->max_experts;
    case W_HIDDEN: return s->model->max_hidden;
    case W_SCORES: return (size_t)c->n_heads * (size_t)s->context;
    case W_VOCAB: return c->vocab_size;
    default: return c->dim;
    }
}

float *observer_of(const struct eval *e, int stage, int layer) {
    for (int i = 0; i < e->n_observations; i++) {
        const llamac_observation *o = &e->observations[i];
        if (o->stage != stage || (stages[stage].per_layer && o->layer != layer)) continue;
        int per_layer;
        const int only_wanted = stage == LLAMAC_STAGE_OUTPUT_NORM || stage == LLAMAC_STAGE_LOGITS;
        const int rows_before = only_wanted ? e->first_wanted : e->first_row;
        return o->out + (size_t)rows_before * llamac_stage_width(e->session, stage, &per_layer);
    }
    return NULL;
}

void observe_columns(const struct worker *w, int stage, int layer, const float *numbers, int n, int width, int first) {
    if (!w->eval->n_observations) return;
    float *out = observer_of(w->eval, stage, layer);
    if (!out) return;
    int per_layer;
    const size_t to_width = llamac_stage_width(w->eval->session, stage, &per_layer), from_width = (size_t)width;
    for (size_t r = 0; r < (size_t)n && w->member->index == 0; r++) {
        const size_t end = (size_t)first + from_width;
        memcpy(out + r * to_width + first, numbers + r * from_width, sizeof(float) * from_width);
        memset(out + r * to_width + end, 0, sizeof(float) * (to_width - end));
    }
    pool_barrier(w->member);
}

void observe(const struct worker *w, int stage, int layer, const float *numbers, int n, int width) {
    observe_columns(w, stage, layer, numbers, n, width, 0);
}
