// SPDX-License-Identifier: MIT
// delta_net.c - one layer of Gated DeltaNet for a chunk of rows: from the products of the rows to the input of the
// output projection.
//
//     delta_qkv -> convolution over positions, silu -> norms of q and k -> delta rule -> norm * silu(z) -> mix
//
// The threads divide the heads of q, k and v for the convolution, and the heads of the state for the delta rule. Each
// computes all rows of its heads in ascending order, so that the bits do not depend on threads or chunks.
#include <math.h>
#include <string.h>
#include "common.h"
#include "eval.h"
#include "exp_negative.h"
#include "log_positive.h"

#define UNIT_NORM_EPS 1e-6f

// The sizes of a recurrent layer.
struct sizes { int keys, values, channels, key_heads, heads, key_dim, value_dim, width; };
static struct sizes sizes_of(const struct layer_record *r) {
    return (struct sizes){
        .keys = (int)state_keys(r), .values = (int)state_values(r), .channels = (int)state_channels(r),
        .key_heads = (int)r->state_key_heads, .heads = (int)r->state_heads, .key_dim = (int)r->state_key_dim,
        .value_dim = (int)r->state_value_dim, .width = (int)r->conv_width,
    };
}

// Returns the state of a layer's head in a page: (key_dim, value_dim), in the order of struct delta_rule.
static float *head_of(const struct llamac_session *s, int l, const struct sizes *z, uint8_t *page, int head) {
    return (float *)(void *)(page + s->kv_layers[l].offset) + (size_t)head * (size_t)(z->key_dim * z->value_dim);
}

// Returns a layer's inputs of the convolution at one of the last conv_width - 1 positions, the oldest being slot 0:
// (channels).
static float *inputs_of(const struct llamac_session *s, int l, const struct sizes *z, uint8_t *page, int slot) {
    return head_of(s, l, z, page, z->heads) + (size_t)slot * (size_t)z->channels;
}

// ---- convolution

// Returns the inputs of the convolution at `row`, which may be before the segment's first row; NULL before the first
// position of the sequence.
static const float *input_row(const struct eval *e, int l, const struct sizes *z, const struct state_segment *segment,
                              int row) {
    const struct llamac_session *s = e->session;
    const int before = segment->first - row;
    if (before <= 0) return s->scratch.delta_qkv + (size_t)row * (size_t)z->channels;
    if (e->rows[segment->first].position < before) return NULL;
    return inputs_of(s, l, z, segment->from, z->width - 1 - before);
}

// Stores the last inputs of a segment, of the channels [channel, channel + n), in the state that it ends with.
static void store_inputs(const struct eval *e, int l, const struct sizes *z, const struct state_segment *segment,
                         int channel, int n) {
    for (int slot = 0; slot < z->width - 1; slot++) {   // ascending: the state may be updated in place
        const float *from = input_row(e, l, z, segment, segment->last - (z->width - 1) + slot);
        float *to = inputs_of(e->session, l, z, segment->to, slot) + channel;
        if (from) memcpy(to, from + channel, sizeof(float) * (size_t)n);
        else memset(to, 0, sizeof(float) * (size_t)n);
    }
}

// Convolves one head of q, k or v in all rows, and normalizes it if it is of q or k.
static void convolve_head(const struct eval *e, int l, const struct sizes *z, int head) {
    const struct llamac_session *s = e->session;
    const int is_v = head >= 2 * z->key_heads, n = is_v ? z->value_dim : z->key_dim,
              channel = is_v ? 2 * z->keys + (head - 2 * z->key_heads) * z->value_dim : head * z->key_dim;
    const float factor = head < z->key_heads ? 1.0f / sqrtf((float)z->key_dim) : 1.0f;
    const float *taps[FORMAT_MAX_CONV_WIDTH];
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        for (int r = segment->first; r < segment->last; r++) {
            float *out = s->scratch.delta_conv + (size_t)r * (size_t)z->channels + channel;
            for (int t = 0; t < z->width; t++) {
                taps[t] = input_row(e, l, z, segment, r - (z->width - 1) + t);
                if (taps[t]) taps[t] += channel;
            }
            s->kernels->convolve(&(struct convolve){
                .width = z->width, .channels = n, .inputs = taps, .out = out,
                .weights = s->model->layers[l].delta_conv + channel, .weight_stride = (size_t)z->channels,
            });
            if (!is_v) s->kernels->unit_norm(out, n, UNIT_NORM_EPS, factor);
        }
        store_inputs(e, l, z, segment, channel, n);
    }
}

// ---- gates: in double precision, by the polynomials that define probabilities

static double softplus(double x) {
    const double size = x < 0 ? -x : x, rest = log_positive(1 + exp_negative(-size));
    return x < 0 ? rest : x + rest;   // NaN stays NaN
}

static float sigmoid(double x) {
    if (x != x) return (float)x;
    const double e = exp_negative(x < 0 ? x : -x);
    return (float)(x < 0 ? e / (1 + e) : 1 / (1 + e));
}

// Returns exp(rate * softplus(x)), at most 1; `rate` is negative.
static float decay_of(float rate, double x) {
    const double exponent = (double)rate * softplus(x);
    return exponent != exponent ? (float)exponent : exponent > 0 ? 1.0f : (float)exp_negative(exponent);
}

// ---- delta rule

// Computes one head of the state in all rows, up to its part of mix.
static void update_head(const struct worker *w, int l, const struct sizes *z, int head) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const size_t floats = (size_t)(z->key_dim * z->value_dim), channels = (size_t)z->channels,
                 heads = (size_t)z->heads, values = (size_t)z->values;
    const int key = head / (z->heads / z->key_heads) * z->key_dim, value = head * z->value_dim;
    float *const decay = x->delta_decay + head, *const beta = x->delta_beta + head;
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        decay[r * heads] = decay_of(layer->delta_decay[head], (double)(decay[r * heads] + layer->delta_dt_bias[head]));
        beta[r * heads] = sigmoid((double)beta[r * heads]);
    }
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        const size_t first = (size_t)segment->first;
        const float *q = x->delta_conv + first * channels + key;
        float *state = head_of(s, l, z, segment->to, head), *out = x->mix + first * values + value;
        if (!segment->from) memset(state, 0, sizeof(float) * floats);
        else if (segment->from != segment->to)
            memcpy(state, head_of(s, l, z, segment->from, head), sizeof(float) * floats);
        s->kernels->delta_rule(&(struct delta_rule){
            .key_dim = z->key_dim, .value_dim = z->value_dim, .n_rows = segment->last - segment->first, .state = state,
            .q = q, .k = q + z->keys, .v = x->delta_conv + first * channels + 2 * z->keys + value,
            .row_stride = channels, .decay = decay + first * heads, .beta = beta + first * heads, .gate_stride = heads,
            .out = out, .out_stride = values,
        });
        w->local->bytes_read += sizeof(float) * floats;
        for (int r = segment->first; r < segment->last; r++, out += values) {
            const float *gate = x->delta_z + (size_t)r * values + value;
            s->kernels->rms_norm(out, layer->delta_norm, NULL, s->model->config->norm_eps, z->value_dim, out);
            s->kernels->activate(ACTIVATION_SILU, gate, out, z->value_dim, out);
        }
    }
}

void delta_net(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct sizes z = sizes_of(e->session->model->layers[l].record);
    int first, last;
    pool_share(w->member, 2 * z.key_heads + z.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) convolve_head(e, l, &z, i);
    pool_barrier(w->member);   // the delta rule reads q and k that other members have convolved
    pool_share(w->member, z.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) update_head(w, l, &z, i);
}
