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

// Convolves one head of q, k or v in all rows, and normalizes it if it is of q or k.
static void convolve_head(const struct eval *e, int l, const struct state_sizes *sizes, int head) {
    const struct llamac_session *s = e->session;
    const int q_and_k = 2 * sizes->key_heads, is_v = head >= q_and_k,
              n = is_v ? sizes->value_dim : sizes->key_dim,
              channel = is_v ? 2 * sizes->keys + (head - q_and_k) * sizes->value_dim : head * sizes->key_dim;
    const float factor = head < sizes->key_heads ? 1.0f / sqrtf((float)sizes->key_dim) : 1.0f;
    convolve_channels(e, l, sizes, channel, n, 1);
    for (size_t r = 0; r < (size_t)e->n_rows && !is_v; r++)
        s->kernels->unit_norm(s->scratch.conv_out + r * (size_t)sizes->channels + channel, n, DELTA_UNIT_EPS, factor);
}

// Computes one head of the state in all rows, up to its part of mix.
static void update_head(const struct worker *w, int l, const struct state_sizes *sizes, int head) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct scratch *scratch = &s->scratch;
    const struct layer *layer = &s->model->layers[l];
    const size_t channels = (size_t)sizes->channels, heads = (size_t)sizes->heads, values = (size_t)sizes->values;
    const int key = head / (sizes->heads / sizes->key_heads) * sizes->key_dim, value = head * sizes->value_dim;
    float *const decay = scratch->state_decay + head, *const beta = scratch->state_beta + head;
    const float beta_factor = delta_beta_factor(s->model->config), eps = delta_norm_eps(s->model->config);
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        const double step = softplus((double)(decay[r * heads] + layer->state_dt_bias[head]));
        decay[r * heads] = decay_of(layer->state_decay[head], step);
        beta[r * heads] = beta_factor * sigmoid((double)beta[r * heads]);
    }
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        const size_t first = (size_t)segment->first;
        const float *q = scratch->conv_out + first * channels + key;
        float *out = scratch->mix + first * values + value;
        s->kernels->delta_rule(&(struct delta_rule){
            .key_dim = sizes->key_dim, .value_dim = sizes->value_dim, .n_rows = segment->last - segment->first,
            .state = state_of_segment(s, l, sizes, segment, head),
            .q = q, .k = q + sizes->keys, .v = scratch->conv_out + first * channels + 2 * sizes->keys + value,
            .row_stride = channels, .decay = decay + first * heads, .beta = beta + first * heads, .gate_stride = heads,
            .out = out, .out_stride = values,
        });
        w->local->bytes_read += sizeof(float) * (size_t)(sizes->key_dim * sizes->value_dim);
        for (int r = segment->first; r < segment->last; r++, out += values) {
            const float *gate = scratch->state_z + (size_t)r * values + value;
            s->kernels->rms_norm(out, layer->state_norm, NULL, eps, sizes->value_dim, out);
            s->kernels->activate(ACTIVATION_SILU, gate, out, sizes->value_dim, out);
        }
    }
}

void delta_net(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct state_sizes sizes = state_sizes_of(e->session, l);
    int first, last;
    pool_share(w->member, 2 * sizes.key_heads + sizes.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) convolve_head(e, l, &sizes, i);
    pool_barrier(w->member);   // the delta rule reads q and k that other members have convolved
    pool_share(w->member, sizes.heads, &first, &last);
    for (int i = first; i < last && !cancelled(&w->eval->cancel); i++) update_head(w, l, &sizes, i);
}
