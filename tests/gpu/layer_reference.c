// SPDX-License-Identifier: MIT
// layer_reference.c - the core's scalar kernels of layers as a library, for tests of kernels on a GPU.
#include <string.h>
#include "gates.h"
#include "kernels.h"
#include "rope.h"
#include "router.h"
#include "samples.h"

void reference_norm(int is_rms, const float *x, const float *w, const float *bias, float eps, int n, float *y) {
    (is_rms ? kernels_scalar.rms_norm : kernels_scalar.layer_norm)(x, w, bias, eps, n, y);
}
void reference_activate(int activation, const float *gate, const float *up, int n, float *y) {
    kernels_scalar.activate(activation, gate, up, n, y);
}
void reference_learned(float *y, int n, float alpha_p, float alpha_n) {
    kernels_scalar.xielu(y, n, (float)softplus((double)alpha_p), (float)softplus((double)alpha_n));
}
void reference_clamp(float *y, int n, float least, float most, float offset) {
    kernels_scalar.clamp(y, n, least, most, offset);
}
void reference_scale(float *y, int n, float scale, float cap) { kernels_scalar.scale(y, n, scale, cap); }
void reference_add(const float *x, int n, float *y) { kernels_scalar.add(x, n, y); }
void reference_rotate(float *x, const float *cosines, const float *sines, int half) {
    kernels_scalar.rotate(x, cosines, sines, half);
}
void reference_gate(float *y, const float *gate, int n) { kernels_scalar.gate(y, gate, n); }
void reference_unit_norm(float *x, int n, float eps, float factor) { kernels_scalar.unit_norm(x, n, eps, factor); }
// router: n_experts, n_experts_used, router, n_expert_groups, n_expert_groups_used, expert_weights.
void reference_select(const int *router, float eps, float scale, const float *choice_bias, const float *logits,
                      int *experts, float *weights) {
    const struct layer_record record = {
        .n_experts = (uint32_t)router[0], .n_experts_used = (uint32_t)router[1], .router = (uint32_t)router[2],
        .n_expert_groups = (uint32_t)router[3], .n_expert_groups_used = (uint32_t)router[4],
        .expert_weights = (uint32_t)router[5], .expert_weights_eps = eps, .expert_scale = scale,
    };
    float *scratch = take_floats(1, (int)router_scratch_floats(record.n_experts));
    router_select(&kernels_scalar, &record, choice_bias, logits, scratch, experts, weights);
    free(scratch);
}
// inputs: (width - 1 + rows, channels), the first before_start rows of which do not exist; out: (rows, channels).
void reference_convolve(const float *inputs, int rows, int channels, int width, int before_start, int is_silu,
                        const float *weights, const float *bias, float *out) {
    const float *taps[16];
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < width; t++)
            taps[t] = r + t >= before_start ? inputs + (size_t)(r + t) * (size_t)channels : NULL;
        kernels_scalar.convolve(&(struct convolve){
            .width = width, .channels = channels, .is_silu = is_silu, .inputs = taps, .weights = weights,
            .weight_stride = (size_t)channels, .bias = bias, .out = out + (size_t)r * (size_t)channels });
    }
}
// One head: q, k (rows, key_dim), v, out (rows, value_dim); decay, beta: (rows), computed in place from their products.
void reference_delta(int rows, int key_dim, int value_dim, float rate, float dt_bias, float *state, const float *qk,
                     const float *v, float *gates, float *out) {
    float *const decay = gates, *const beta = gates + rows;
    for (int r = 0; r < rows; r++) {
        decay[r] = decay_of(rate, softplus((double)(decay[r] + dt_bias)));
        beta[r] = sigmoid((double)beta[r]);
        kernels_scalar.delta_rule(&(struct delta_rule){
            .key_dim = key_dim, .value_dim = value_dim, .n_rows = 1, .state = state,
            .q = qk + (size_t)r * (size_t)key_dim, .k = qk + (size_t)(rows + r) * (size_t)key_dim,
            .v = v + (size_t)r * (size_t)value_dim, .decay = decay + r, .beta = beta + r,
            .out = out + (size_t)r * (size_t)value_dim });
    }
}
// One head: bc (2, rows, state_dim), x, out (rows, head_dim); gates: (2, rows), decays from their products, then steps.
void reference_scan(int rows, int state_dim, int head_dim, const float *limits, float rate, float dt_bias, float skip,
                    float *state, const float *bc, const float *x, float *gates, float *out) {
    float *const decay = gates, *const step = gates + rows;
    for (int r = 0; r < rows; r++) {
        double t = softplus((double)(decay[r] + dt_bias));
        t = t < (double)limits[0] ? (double)limits[0] : t > (double)limits[1] ? (double)limits[1] : t;
        decay[r] = decay_of(rate, t), step[r] = (float)t;
        kernels_scalar.ssm_scan(&(struct ssm_scan){
            .state_dim = state_dim, .head_dim = head_dim, .n_rows = 1, .state = state,
            .x = x + (size_t)r * (size_t)head_dim, .b = bc + (size_t)r * (size_t)state_dim,
            .c = bc + (size_t)(rows + r) * (size_t)state_dim, .decay = decay + r, .step = step + r, .skip = skip,
            .out = out + (size_t)r * (size_t)head_dim });
    }
}
// The buffer of x is padded to a multiple of 16.
void reference_softmax(float *x, int n) { kernels_scalar.softmax(x, n); }

int reference_head_bytes(int dtype, int head_dim, int value_dim, int *value_offset) {
    *value_offset = (int)kv_keys_bytes(dtype, head_dim);
    return (int)(kv_keys_bytes(dtype, head_dim) + kv_values_bytes(dtype, value_dim));
}
void reference_store(int dtype, uint8_t *head, int slot, int head_dim, int value_dim, const float *k, const float *v) {
    kernels_scalar.store_key[dtype](head, slot, head_dim, k);
    kernels_scalar.store_value[dtype](head + kv_keys_bytes(dtype, head_dim), slot, value_dim, v);
}
void reference_load(int dtype, const uint8_t *head, int slot, int head_dim, int value_dim, float *k, float *v) {
    kernels_scalar.load_key[dtype](head, slot, head_dim, k);
    kernels_scalar.load_value[dtype](head + kv_keys_bytes(dtype, head_dim), slot, value_dim, v);
}

// One query q (head_dim), already scaled, of the KV head at `offset` in pages, which sees positions [begin, end). out:
// (value_dim). scores: (end) or NULL: only the scores.
void reference_attend(int dtype, const uint8_t *const *pages, int offset, int head_dim, int value_dim, const float *q,
                      int begin, int end, float soft_cap, const float *sink, const float *biases, int bias_distance,
                      int position, float *out, float *scores) {
    struct cancel cancel = { 0 };
    const int width = padded_head_dim(value_dim);
    void *panel = take(4 * kv_query_words(dtype, head_dim));
    float *padded = take_floats(1, width), *scratch = take_floats(1, (int)attend_layout(head_dim).end);
    kernels_scalar.pack[kv_query_type(dtype)](
        panel_row(panel, 1, PANEL_ROWS, kv_query_words(dtype, head_dim), 0), q, head_dim);
    const size_t key_offset = (size_t)offset;
    const struct attend a = {
        .kv = { pages, key_offset, key_offset + kv_keys_bytes(dtype, head_dim) }, .head_dim = head_dim,
        .value_dim = value_dim, .n_queries = 1, .q = panel, .begin = { begin }, .end = { end }, .soft_cap = soft_cap,
        .has_sinks = sink != NULL, .sinks = { sink ? *sink : 0 }, .biases = { biases ? biases + bias_distance : NULL },
        .bias_distance = bias_distance, .position = { position }, .out = padded, .scratch = scratch, .scores = scores,
        .scores_stride = (size_t)end, .cancel = &cancel,
    };
    kernels_scalar.attend[dtype](&a);
    if (!scores) memcpy(out, padded, sizeof(float) * (size_t)value_dim);
    free(panel), free(padded), free(scratch);
}

// Merges the partial results (n_blocks, n_queries, partial_floats) of queries. out: (n_queries, padded_head_dim).
void reference_merge(const float *partials, int n_blocks, int n_queries, int head_dim, float *out) {
    float *scratch = take_floats(1, (int)attend_layout(head_dim).end);
    const struct attend a = { .head_dim = head_dim, .value_dim = head_dim, .n_queries = n_queries, .out = out,
                              .scratch = scratch };
    kernels_scalar.attend_merge(&a, partials, n_blocks);
    free(scratch);
}
