// SPDX-License-Identifier: MIT
// delta_net.c - one layer of Gated DeltaNet for a chunk of rows: from the products of the rows to the input of the
// output projection.
//
//     qkv -> convolution over positions, silu -> norms of q and k -> delta rule -> norm * silu(z) -> mix
//
// The threads divide the heads of q, k and v for the convolution, and the heads of the state for the delta rule. Each
// computes all rows of its heads in ascending order, so that the bits do not depend on threads or chunks.
#include <math.h>
#include "common.h"
#include "gates.h"
#include "recurrent.h"

#define UNIT_NORM_EPS 1e-6f   // the reference implementation's

// Convolves one head of q, k or v in all rows, and normalizes it if it is of q or k.
static void convolve_head(const struct eval *e, int l, const struct state_sizes *z, int head) {
    const struct llamac_session *s = e->session;
    const int is_v = head >= 2 * z->key_heads, n = is_v ? z->value_dim : z->key_dim,
              channel = is_v ? 2 * z->keys + (head - 2 * z->key_heads) * z->value_dim : head * z->key_dim;
    const float factor = head < z->key_heads ? 1.0f / sqrtf((float)z->key_dim) : 1.0f;
    convolve_channels(e, l, z, channel, n, 1);
    for (size_t r = 0; r < (size_t)e->n_rows && !is_v; r++)
        s->kernels->unit_norm(s->scratch.conv_out + r * (size_t)z->channels + channel, n, UNIT_NORM_EPS, factor);
}

// Computes one head of the state in all rows, up to its part of mix.
static void update_head(const struct worker *w, int l, const struct state_sizes *z, int head) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *x = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const size_t channels = (size_t)z->channels, heads = (size_t)z->heads, values = (size_t)z->values;
    const int key = head / (z->heads / z->key_heads) * z->key_dim, value = head * z->value_dim;
    float *const decay = x->state_decay + head, *const beta = x->state_beta + head;
    const float beta_factor = delta_beta_factor(s->model->config), eps = delta_norm_eps(s->model->config);
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        const double step = softplus((double)(decay[r * heads] + layer->state_dt_bias[head]));
        decay[r * heads] = decay_of(layer->state_decay[head], step);
        beta[r * heads] = beta_factor * sigmoid((double)beta[r * heads]);
    }
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        const size_t first = (size_t)segment->first;
        const float *q = x->conv_out + first * channels + key;
        float *out = x->mix + first * values + value;
        s->kernels->delta_rule(&(struct delta_rule){
            .key_dim = z->key_dim, .value_dim = z->value_dim, .n_rows = segment->last - segment->first,
            .state = state_of_segment(s, l, z, segment, head),
            .q = q, .k = q + z->keys, .v = x->conv_out + first * channels + 2 * z->keys + value,
            .row_stride = channels, .decay = decay + first * heads, .beta = beta + first * heads, .gate_stride = heads,
            .out = out, .out_stride = values,
        });
        w->local->bytes_read += sizeof(float) * (size_t)(z->key_dim * z->value_dim);
        for (int r = segment->first; r < segment->last; r++, out += values) {
            const float *gate = x->state_z + (size_t)r * values + value;
            s->kernels->rms_norm(out, layer->state_norm, NULL, eps, z->value_dim, out);
            s->kernels->activate(ACTIVATION_SILU, gate, out, z->value_dim, out);
        }
    }
}

void delta_net(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct state_sizes z = state_sizes_of(e->session, l);
    int first, last;
    pool_share(w->member, 2 * z.key_heads + z.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) convolve_head(e, l, &z, i);
    pool_barrier(w->member);   // the delta rule reads q and k that other members have convolved
    pool_share(w->member, z.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) update_head(w, l, &z, i);
}
