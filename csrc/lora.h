// SPDX-License-Identifier: MIT
// lora.h - the products of low-rank adapters (Hu et al., "LoRA", arXiv:2106.09685): y += b (a x).
//
// The thread that packs an input row x also computes a x. After its strips of W x, each thread adds its strips of
// b (a x).
#ifndef LLAMAC_LORA_H
#define LLAMAC_LORA_H
#include "eval.h"

// Packs row r of this thread's rows [first, last), as pack_row does. After each PANEL_ROWS rows, and after the last
// row, computes their a x for each consumer that has an adapter and packs the results into panels->lora_projected.
void lora_pack_row(const struct worker *w, struct consumers consumers, const struct panels *panels, const float *x,
                   int width, int first, int last, int r);
// Adds an adapter's part to a product that has just been computed. projected: a x, f32 panels of `rank` columns.
void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product,
                   const float *projected);
// Adds an adapter's part to row `row` of an embedding, x (columns).
void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x);
#endif
