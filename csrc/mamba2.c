// SPDX-License-Identifier: MIT
// mamba2.c - one layer of Mamba 2 (Dao and Gu 2024) for a chunk of rows: from the products of the rows to the input of
// the output projection.
//
//     x, B, C -> convolution over positions, silu -> recurrence -> norm(y * silu(z)), or norm(y) * silu(z) -> mix
//
// The threads divide the channels of the convolution, the heads of the recurrence, and the groups of the norm. Each
// computes all rows of its heads in ascending order, so that the bits do not depend on threads or chunks. With many
// rows, z is applied with the norm, while a whole row is in the cache; with few, the threads divide it like the heads.
#include "common.h"
#include "recurrent.h"

enum { CHANNELS = 16 };   // per unit of work: whole vectors

static void gate(const struct llamac_session *s, const float *z, int n, float *y) {
    s->kernels->activate(ACTIVATION_SILU, z, y, n, y);
}

// Returns whether each head gates its part of mix.
static int is_gated_by_heads(const struct eval *e) {
    return e->n_rows <= REDUNDANT_ROWS && e->session->model->config->state_norm != STATE_NORM_BEFORE_GATE;
}

// Computes the decays and steps of the heads [first, last) in all rows.
static void compute_gates(const struct eval *e, int l, const struct state_sizes *sizes, int first, int last) {
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const struct layer *layer = &s->model->layers[l];
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        const size_t at = r * (size_t)sizes->heads + (size_t)first;
        s->kernels->ssm_gates(&(struct ssm_gates){
            .n = last - first, .step_min = c->state_step_min, .step_max = c->state_step_max,
            .bias = layer->state_dt_bias + first, .rate = layer->state_decay + first,
            .decay = s->scratch.state_decay + at, .step = s->scratch.state_beta + at,
        });
    }
}

// Computes one head of the state in all rows.
static void update_head(const struct worker *w, int l, const struct state_sizes *sizes, int head) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *scratch = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const size_t channels = (size_t)sizes->channels, heads = (size_t)sizes->heads, values = (size_t)sizes->values;
    const int key = sizes->values + head / (sizes->heads / sizes->key_heads) * sizes->key_dim,
              value = head * sizes->value_dim;
    const float *const decay = scratch->state_decay + head, *const step = scratch->state_beta + head;
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        const size_t first = (size_t)segment->first;
        const float *row = scratch->conv_out + first * channels;
        s->kernels->ssm_scan(&(struct ssm_scan){
            .state_dim = sizes->key_dim, .head_dim = sizes->value_dim, .n_rows = segment->last - segment->first,
            .state = state_of_segment(s, l, sizes, segment, head),
            .x = row + value, .b = row + key, .c = row + key + sizes->keys, .row_stride = channels,
            .decay = decay + first * heads, .step = step + first * heads, .gate_stride = heads,
            .skip = layer->state_skip[head], .out = scratch->mix + first * values + value, .out_stride = values,
        });
        w->local->bytes_read += sizeof(float) * (size_t)(sizes->key_dim * sizes->value_dim);
    }
    for (size_t r = 0; r < (size_t)e->n_rows && is_gated_by_heads(e); r++)
        gate(s, scratch->state_z + r * values + value, sizes->value_dim, scratch->mix + r * values + value);
}

// Normalizes one group of heads in one row, and gates it before or after the norm if its heads were not gated.
static void norm_group(const struct eval *e, int l, const struct state_sizes *sizes, size_t row, int group) {
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const int width = sizes->values / sizes->key_heads;
    const size_t first = (size_t)(group * width), at = row * (size_t)sizes->values + first;
    float *const y = s->scratch.mix + at;
    const int norm_first = c->state_norm == STATE_NORM_BEFORE_GATE;
    if (!norm_first && !is_gated_by_heads(e)) gate(s, s->scratch.state_z + at, width, y);
    if (c->state_norm != STATE_NORM_NONE)
        s->kernels->rms_norm(y, s->model->layers[l].state_norm + first, NULL, c->norm_eps, width, y);
    if (norm_first) gate(s, s->scratch.state_z + at, width, y);
}

void mamba2(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct state_sizes sizes = state_sizes_of(e->session, l);
    int first, last;
    pool_share(w->member, ceil_div(sizes.channels, CHANNELS), &first, &last);
    const int channel = first * CHANNELS, n = min_int(last * CHANNELS, sizes.channels) - channel;
    if (n > 0) convolve_channels(e, l, &sizes, channel, n, 1);
    pool_barrier(w->member);   // the recurrence reads channels that other members have convolved
    pool_share(w->member, sizes.heads, &first, &last);
    if (first < last) compute_gates(e, l, &sizes, first, last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) update_head(w, l, &sizes, i);
    if (e->session->model->config->state_norm == STATE_NORM_NONE && is_gated_by_heads(e)) return;
    pool_barrier(w->member);   // the norms read heads that other members have computed
    pool_share(w->member, e->n_rows * sizes.key_heads, &first, &last);
    for (int i = first; i < last; i++) norm_group(e, l, &sizes, (size_t)(i / sizes.key_heads), i % sizes.key_heads);
}
