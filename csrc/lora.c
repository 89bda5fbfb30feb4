// SPDX-License-Identifier: MIT
// lora.c - the products of adapters. See lora.h.
#include "lora.h"

#include "common.h"

// As panels of f32, in the thread's own memory.
static const void *pack_rows(const struct worker *w, const float *x, int n, int width) {
    const size_t words = input_words(INPUT_F32, width);
    for (int r = 0; r < n; r++)
        w->eval->session->kernels->pack[INPUT_F32](panel_row(w->own->lora_panels, n, words, r), x + (size_t)r * (size_t)width, width);
    return w->own->lora_panels;
}

void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product, const void *x) {
    const struct kernels *kernels = w->eval->session->kernels;
    if (product->first >= product->last) return;
    struct gemm inner = *product, outer = *product;
    inner.w = lora->a, inner.strip_bytes = float_strip_bytes(LLAMAC_F32, product->columns), inner.x = x;
    inner.first = 0, inner.last = ceil_div(lora->rank, STRIP_ROWS), inner.rows = lora->rank;
    inner.y = w->own->lora_rows, inner.y_stride = (size_t)lora->rank;
    inner.bias = inner.weights = NULL, inner.to = NULL, inner.copy = NULL, inner.add = 0;
    kernels->gemm[LLAMAC_F32](&inner);
    outer.w = lora->b, outer.strip_bytes = float_strip_bytes(LLAMAC_F32, lora->rank), outer.columns = lora->rank;
    outer.x = pack_rows(w, w->own->lora_rows, product->m, lora->rank);
    outer.bias = NULL, outer.add = 1, outer.add_copy = 1;
    kernels->gemm[LLAMAC_F32](&outer);
}

void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x) {
    const struct kernels *kernels = w->eval->session->kernels;
    kernels->gather[LLAMAC_F32](lora->b, float_strip_bytes(LLAMAC_F32, lora->rank), row, lora->rank, w->own->lora_rows);
    const struct gemm product = {
        .w = lora->a, .strip_bytes = float_strip_bytes(LLAMAC_F32, lora->rank), .last = ceil_div(columns, STRIP_ROWS), .rows = columns, .columns = lora->rank,
        .x = pack_rows(w, w->own->lora_rows, 1, lora->rank), .m = 1, .y = x, .y_stride = (size_t)columns, .add = 1, .scratch = w->own->gemm,
        .cancel = &w->eval->cancel,
    };
    kernels->gemm[LLAMAC_F32](&product);
}
