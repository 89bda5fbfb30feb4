// SPDX-License-Identifier: MIT
// lora.h - adapters at run time: what they add to products (Hu et al., "LoRA", arXiv:2106.09685), y += b (a x).
#ifndef LLAMAC_LORA_H
#define LLAMAC_LORA_H
#include "eval.h"

// Adds the adapter's part of a product that has just been computed; `x` are its inputs as panels of f32. Every thread computes a x for
// itself: it is as small against the product as the adapter's rank is against the matrix's rows.
void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product, const void *x);
// Adds to row `row` of an embedding, `columns` wide, what its adapter adds to it.
void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x);
#endif
