// SPDX-License-Identifier: MIT
// recurrent.c - see recurrent.h. A state has, after its heads, the inputs of the last width - 1 positions.
#include "recurrent.h"

#include <string.h>
#include "common.h"

enum { CONVOLVED = 1024 };   // channels of all rows at a time: the inputs of a row and the weights stay in the L1 cache

struct state_sizes state_sizes_of(const struct llamac_session *s, int l) {
    const struct layer_record *r = s->model->layers[l].record;
    return (struct state_sizes){
        .keys = (int)state_keys(r), .values = (int)state_values(r), .channels = (int)conv_channels(s->model->config, r),
        .key_heads = (int)r->state_key_heads, .heads = (int)r->state_heads, .key_dim = (int)r->state_key_dim,
        .value_dim = (int)r->state_value_dim, .width = (int)r->conv_width,
    };
}

// Returns a layer's head in a page.
static float *head_of(const struct llamac_session *s, int l, const struct state_sizes *sizes, uint8_t *page, int head) {
    const size_t floats = (size_t)(sizes->key_dim * sizes->value_dim);
    return (float *)(void *)(page + s->kv_layers[l].state_offset) + (size_t)head * floats;
}

float *state_of_segment(const struct llamac_session *s, int l, const struct state_sizes *sizes,
                        const struct state_segment *segment, int head) {
    const size_t bytes = sizeof(float) * (size_t)(sizes->key_dim * sizes->value_dim);
    float *state = head_of(s, l, sizes, segment->to, head);
    if (!segment->from) memset(state, 0, bytes);
    else if (segment->from != segment->to) memcpy(state, head_of(s, l, sizes, segment->from, head), bytes);
    return state;
}

// Returns a layer's inputs of the convolution at one of the last width - 1 positions, the oldest being slot 0:
// (channels).
static float *inputs_of(const struct llamac_session *s, int l, const struct state_sizes *sizes, uint8_t *page,
                        int slot) {
    return head_of(s, l, sizes, page, sizes->heads) + (size_t)slot * (size_t)sizes->channels;
}

// Returns the inputs of the convolution at `row`, which may be before the segment's first row; NULL before the first
// position of the sequence.
static const float *input_row(const struct eval *e, int l, const struct state_sizes *sizes,
                              const struct state_segment *segment, int row) {
    const struct llamac_session *s = e->session;
    const int before = segment->first - row;
    if (before <= 0) return s->scratch.conv_in + (size_t)row * (size_t)sizes->channels;
    if (e->rows[segment->first].position < before) return NULL;
    return inputs_of(s, l, sizes, segment->from, sizes->width - 1 - before);
}

// Stores the last inputs of a segment, of the channels [channel, channel + n), in the state that it ends with.
static void store_inputs(const struct eval *e, int l, const struct state_sizes *sizes,
                         const struct state_segment *segment, int channel, int n) {
    for (int slot = 0; slot < sizes->width - 1; slot++) {   // ascending: the state may be updated in place
        const float *from = input_row(e, l, sizes, segment, segment->last - (sizes->width - 1) + slot);
        float *to = inputs_of(e->session, l, sizes, segment->to, slot) + channel;
        if (from) memcpy(to, from + channel, sizeof(float) * (size_t)n);
        else memset(to, 0, sizeof(float) * (size_t)n);
    }
}

static void convolve_block(const struct eval *e, int l, const struct state_sizes *sizes, int channel, int n,
                           int is_silu) {
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const float *taps[FORMAT_MAX_CONV_WIDTH];
    for (int i = 0; i < s->n_segments; i++) {
        const struct state_segment *segment = &s->segments[i];
        for (int r = segment->first; r < segment->last; r++) {
            for (int t = 0; t < sizes->width; t++) {
                taps[t] = input_row(e, l, sizes, segment, r - (sizes->width - 1) + t);
                if (taps[t]) taps[t] += channel;
            }
            s->kernels->convolve(&(struct convolve){
                .width = sizes->width, .channels = n, .is_silu = is_silu, .inputs = taps,
                .weights = layer->conv_taps + channel, .weight_stride = (size_t)sizes->channels,
                .bias = layer->conv_bias ? layer->conv_bias + channel : NULL,
                .out = s->scratch.conv_out + (size_t)r * (size_t)sizes->channels + channel,
            });
        }
        store_inputs(e, l, sizes, segment, channel, n);
    }
}

void convolve_channels(const struct eval *e, int l, const struct state_sizes *sizes, int channel, int n, int is_silu) {
    for (int done = 0; done < n; done += CONVOLVED)
        convolve_block(e, l, sizes, channel + done, min_int(CONVOLVED, n - done), is_silu);
}
