// SPDX-License-Identifier: MIT
// recurrent.h - what recurrent layers share: their sizes, their states, and the convolution over positions that they
// begin with.
#ifndef LLAMAC_RECURRENT_H
#define LLAMAC_RECURRENT_H
#include "eval.h"

// The sizes of a recurrent layer. A short convolution has only channels.
struct state_sizes { int keys, values, channels, key_heads, heads, key_dim, value_dim, width; };
struct state_sizes state_sizes_of(const struct llamac_session *s, int layer);

// Returns the state that a segment ends with, of a layer's head: (key_dim, value_dim), in the order of struct
// delta_rule. Initializes it with the state before the segment.
float *state_of_segment(const struct llamac_session *s, int layer, const struct state_sizes *sizes,
                        const struct state_segment *segment, int head);

// Convolves the channels [channel, channel + n) of all rows of the chunk, from conv_in to conv_out, and stores their
// last inputs in the states.
void convolve_channels(const struct eval *e, int layer, const struct state_sizes *sizes, int channel, int n,
                       int is_silu);
#endif
