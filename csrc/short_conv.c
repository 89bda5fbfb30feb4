// SPDX-License-Identifier: MIT
// short_conv.c - one layer with a short convolution (LFM2) for a chunk of rows: from the products of the rows to the
// input of the output projection.
//
//     conv_in -> b, c, x -> b * x -> convolution over positions -> c * that -> mix
//
// The threads divide the channels.
#include "common.h"
#include "recurrent.h"

enum { CHANNELS = 16 };   // per unit of work: whole vectors

void short_conv(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    const struct state_sizes sizes = state_sizes_of(e->session, l);
    const size_t channels = (size_t)sizes.channels;
    int first, last;
    pool_share(w->member, ceil_div(sizes.channels, CHANNELS), &first, &last);
    first *= CHANNELS, last = min_int(last * CHANNELS, sizes.channels);
    if (first >= last) return;
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        const float *b = scratch->state_z + 3 * r * channels, *from = b + 2 * channels;
        for (int i = first; i < last; i++) scratch->conv_in[r * channels + (size_t)i] = b[i] * from[i];
    }
    convolve_channels(e, l, &sizes, first, last - first, 0);
    for (size_t r = 0; r < (size_t)e->n_rows; r++) {
        const float *c = scratch->state_z + (3 * r + 1) * channels, *from = scratch->conv_out + r * channels;
        for (int i = first; i < last; i++) scratch->mix[r * channels + (size_t)i] = c[i] * from[i];
    }
}
