// SPDX-License-Identifier: MIT
// lora.h - adapters at run time: what they add to products (Hu et al., "LoRA", arXiv:2106.09685), y += b (a x).
//
// a x is computed where rows become inputs of products, by whoever prepares them; b then multiplies it behind the
// product itself.
#ifndef LLAMAC_LORA_H
#define LLAMAC_LORA_H
#include "eval.h"

// Takes row r of those that this thread prepares, [first, last) of the panels': as soon as there are enough of them, or
// no more, their a x are put into the panels, for each reader that has an adapter.
void lora_take(const struct worker *w, struct readers readers, const struct panels *panels, const float *x, int width,
    int first, int last, int r);
// Adds the adapter's part of a product that has just been computed; `lora_x`: panels of rank f32.
void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product, const float *lora_x);
// Adds to row `row` of an embedding, `columns` wide, what its adapter adds to it.
void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x);
#endif
