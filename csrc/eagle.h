// SPDX-License-Identifier: MIT
// eagle.h - the parts in which the graph of an EAGLE-3 head differs: the input of its first layer, and its logits.
#ifndef LLAMAC_EAGLE_H
#define LLAMAC_EAGLE_H
#include "products.h"

// Computes the residual stream x (n_rows, dim) before the layers: `in` times hidden states of the trunk or, for a draft
// after a draft, the head's own state. Keeps the normed embeddings and the normed stream. Ends without a barrier.
void eagle_in(const struct worker *w, float *x);
// Returns the inputs of q, k and v of the first layer: the normed embeddings beside the normed stream.
struct panels eagle_attention_inputs(const struct worker *w, struct consumers consumers);
// Moves the logits of n rows to the ids that they belong to, and gives all other ids minus infinity. observer: receives
// a copy, or NULL. The caller must pass a barrier before. Ends without a barrier.
void eagle_spread(const struct worker *w, int n, float *observer);
#endif
