// SPDX-License-Identifier: MIT
// host_recurrent.h - the recurrent layers of host_device.h: convolutions, delta rules and Mamba 2, segment by segment.
#ifndef LLAMAC_HOST_RECURRENT_H
#define LLAMAC_HOST_RECURRENT_H
#include "gates.h"
#include "host_pass.h"

// n floats of a layer's part of a state, from `first` on; NULL if the address is 0.
static inline float *host_state(const struct pass *p, uint64_t page, int layer, int first, int n) {
    const size_t at = llamac_kv_place_of(p->chunk->session, layer).state_offset + sizeof(float) * (size_t)first;
    return page ? (float *)(void *)host_memory(p->device, page + at, sizeof(float) * (size_t)n) : NULL;
}

// The inputs of the convolution of a segment's rows, after those of the `before` positions before them, as far as these
// exist.
static inline float *host_conv_inputs(const struct pass *p, const llamac_convolve_step *s, int layer,
                                      const llamac_segment *g) {
    const int before = s->width - 1, n = s->channels, position = p->chunk->rows[g->first].position;
    const float *from = host_state(p, g->from, layer, s->state_floats, before * n), *in = p->buffers[s->input];
    float *inputs = take_floats(before + g->last - g->first, n);
    for (int i = 0; i < before * n && position; i++) inputs[i] = i / n < before - position ? NAN : from[i];
    for (int r = g->first; r < g->last; r++)
        for (int i = 0; i < n; i++)
            inputs[(before + r - g->first) * n + i] = s->is_gated ? in[3 * r * n + i] * in[(3 * r + 2) * n + i]
                                                                  : in[r * n + i];
    return inputs;
}

static inline void host_convolve(struct pass *p, const llamac_convolve_step *s, int layer) {
    const int before = s->width - 1, n = s->channels;
    for (int i = 0; i < p->n_segments; i++) {
        const llamac_segment *g = &p->segments[i];
        const int position = p->chunk->rows[g->first].position, rows = g->last - g->first;
        float *inputs = host_conv_inputs(p, s, layer, g),
              *to = host_state(p, g->to, layer, s->state_floats, before * n);
        for (int r = 0; r < rows; r++) {
            float *out = p->buffers[s->output] + (g->first + r) * n;
            const float *taps[FORMAT_MAX_CONV_WIDTH];
            for (int t = 0; t < s->width; t++)
                taps[t] = position + r + t >= before ? inputs + (r + t) * n : NULL;
            kernels_scalar.convolve(&(struct convolve){
                .width = s->width, .channels = n, .is_silu = s->is_silu, .inputs = taps,
                .weights = floats_of(&s->taps), .weight_stride = (size_t)n, .bias = floats_of(&s->bias), .out = out,
            });
            const float *c = p->buffers[s->input] + (3 * (g->first + r) + 1) * n;
            for (int d = 0; d < n && s->is_gated; d++) out[d] *= c[d];
        }
        for (int slot = 0; slot < before; slot++)
            for (int d = 0; d < n; d++)
                to[slot * n + d] = position + rows + slot >= before ? inputs[(rows + slot) * n + d] : 0;
        free(inputs);
    }
}

static inline void host_delta_head(struct pass *p, const llamac_delta_rule_step *s, int layer, int head) {
    const int keys = s->key_heads * s->key_dim, values = s->heads * s->value_dim, channels = 2 * keys + values,
              size = s->key_dim * s->value_dim, key = head / (s->heads / s->key_heads) * s->key_dim,
              value = head * s->value_dim;
    float *const decay = p->buffers[LLAMAC_BUFFER_STATE_DECAY] + head,
          *const beta = p->buffers[LLAMAC_BUFFER_STATE_BETA] + head;
    for (int r = 0; r < p->chunk->n_rows; r++) {
        const double step = softplus((double)(decay[r * s->heads] + floats_of(&s->dt_bias)[head]));
        decay[r * s->heads] = decay_of(floats_of(&s->decay)[head], step);
        beta[r * s->heads] = s->beta_factor * sigmoid((double)beta[r * s->heads]);
    }
    for (int i = 0; i < p->n_segments; i++) {
        const llamac_segment *g = &p->segments[i];
        const float *from = host_state(p, g->from, layer, head * size, size),
                    *q = p->buffers[LLAMAC_BUFFER_CONV_OUT] + g->first * channels + key;
        float *to = host_state(p, g->to, layer, head * size, size),
              *out = p->buffers[LLAMAC_BUFFER_MIX] + g->first * values + value;
        for (int d = 0; d < size; d++) to[d] = from ? from[d] : 0;
        kernels_scalar.delta_rule(&(struct delta_rule){
            .key_dim = s->key_dim, .value_dim = s->value_dim, .n_rows = g->last - g->first, .state = to,
            .q = q, .k = q + keys, .v = q - key + 2 * keys + value, .row_stride = (size_t)channels,
            .decay = decay + g->first * s->heads, .beta = beta + g->first * s->heads, .gate_stride = (size_t)s->heads,
            .out = out, .out_stride = (size_t)values,
        });
        for (int r = g->first; r < g->last; r++, out += values) {
            const float *gate = p->buffers[LLAMAC_BUFFER_STATE_Z] + r * values + value;
            kernels_scalar.rms_norm(out, floats_of(&s->norm), NULL, s->norm_eps, s->value_dim, out);
            kernels_scalar.activate(ACTIVATION_SILU, gate, out, s->value_dim, out);
        }
    }
}

static inline void host_delta_rule(struct pass *p, const llamac_delta_rule_step *s, int layer) {
    const int channels = 2 * s->key_heads * s->key_dim + s->heads * s->value_dim;
    for (int r = 0; r < p->chunk->n_rows; r++)
        for (int h = 0; h < 2 * s->key_heads; h++)
            kernels_scalar.unit_norm(p->buffers[LLAMAC_BUFFER_CONV_OUT] + r * channels + h * s->key_dim, s->key_dim,
                                     s->unit_eps, h < s->key_heads ? s->q_factor : 1.0f);
    for (int h = 0; h < s->heads; h++) host_delta_head(p, s, layer, h);
}

static inline void host_scan_head(struct pass *p, const llamac_scan_step *s, int layer, int head) {
    const int keys = s->key_heads * s->key_dim, values = s->heads * s->value_dim, channels = 2 * keys + values,
              size = s->key_dim * s->value_dim, key = values + head / (s->heads / s->key_heads) * s->key_dim,
              value = head * s->value_dim;
    float *const decay = p->buffers[LLAMAC_BUFFER_STATE_DECAY] + head,
          *const step = p->buffers[LLAMAC_BUFFER_STATE_BETA] + head;
    for (int r = 0; r < p->chunk->n_rows; r++) {
        double t = softplus((double)(decay[r * s->heads] + floats_of(&s->dt_bias)[head]));
        if (t < (double)s->step_min) t = (double)s->step_min;
        if (s->step_max > 0 && t > (double)s->step_max) t = (double)s->step_max;
        decay[r * s->heads] = decay_of(floats_of(&s->decay)[head], t);
        step[r * s->heads] = (float)t;
    }
    for (int i = 0; i < p->n_segments; i++) {
        const llamac_segment *g = &p->segments[i];
        const float *from = host_state(p, g->from, layer, head * size, size),
                    *row = p->buffers[LLAMAC_BUFFER_CONV_OUT] + g->first * channels;
        float *to = host_state(p, g->to, layer, head * size, size);
        for (int d = 0; d < size; d++) to[d] = from ? from[d] : 0;
        kernels_scalar.ssm_scan(&(struct ssm_scan){
            .state_dim = s->key_dim, .head_dim = s->value_dim, .n_rows = g->last - g->first, .state = to,
            .x = row + value, .b = row + key, .c = row + key + keys, .row_stride = (size_t)channels,
            .decay = decay + g->first * s->heads, .step = step + g->first * s->heads, .gate_stride = (size_t)s->heads,
            .skip = floats_of(&s->skip)[head], .out = p->buffers[LLAMAC_BUFFER_MIX] + g->first * values + value,
            .out_stride = (size_t)values,
        });
    }
}
static inline void host_scan(struct pass *p, const llamac_scan_step *s, int layer) {
    for (int h = 0; h < s->heads; h++) host_scan_head(p, s, layer, h);
}
#endif
