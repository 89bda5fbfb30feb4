// SPDX-License-Identifier: MIT
// lora.c - the products of adapters. See lora.h.
#include "lora.h"

#include "common.h"

// y (+)= a x for m inputs in panels; a is f32 (rows, columns).
static void multiply_f32(const struct worker *w, const uint8_t *a, int rows, int columns, const void *x, int m,
                         float *y, int add) {
    const struct gemm product = {
        .dtype = LLAMAC_F32, .w = a, .strip_bytes = float_strip_bytes(LLAMAC_F32, columns),
        .last = ceil_div(rows, STRIP_ROWS), .rows = rows, .columns = columns, .x = x, .m = m,
        .y = y, .y_stride = (size_t)rows, .accumulate = add,
        .scratch = w->local->gemm, .cancel = &w->eval->cancel,
    };
    w->eval->session->kernels->gemm(&product);
}

void lora_pack_row(const struct worker *w, struct consumers consumers, const struct panels *panels, const float *x,
                   int width, int first, int last, int r) {
    const struct kernels *kernels = w->eval->session->kernels;
    const int start = r - (r - first) % PANEL_ROWS, height = min_int(PANEL_ROWS, last - start);
    const struct panel_row to = { .panel = (int32_t *)(void *)w->local->lora_panel, .height = height,
                                  .row = r - start };
    kernels->pack[INPUT_F32](to, x, width);
    if (r + 1 < start + height) return;
    for (int i = 0; i < consumers.n; i++) {
        const struct lora *lora = consumers.matrices[i]->lora;
        if (!lora) continue;
        const int rank = lora->rank;
        multiply_f32(w, lora->a, rank, width, w->local->lora_panel, height, w->local->lora_projected_rows, 0);
        for (int t = 0; t < height; t++)
            kernels->pack[INPUT_F32](
                panel_row(panels->lora_projected[i], panels->m, PANEL_ROWS, (size_t)rank, start + t),
                w->local->lora_projected_rows + (size_t)t * (size_t)rank, rank);
    }
}

void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product,
                   const float *projected) {
    struct gemm g = *product;
    g.dtype = LLAMAC_F32;
    g.w = lora->b;
    g.strip_bytes = float_strip_bytes(LLAMAC_F32, lora->rank);
    g.columns = lora->rank;
    g.x = projected;
    g.scales = NULL;
    g.bias = NULL;
    g.accumulate = 1;
    g.accumulate_copy = 1;
    w->eval->session->kernels->gemm(&g);
}

void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x) {
    const struct kernels *kernels = w->eval->session->kernels;
    float *b_row = w->local->lora_projected_rows;   // one row is also a panel
    kernels->gather[LLAMAC_F32](lora->b, float_strip_bytes(LLAMAC_F32, lora->rank), row, lora->rank, b_row);
    multiply_f32(w, lora->a, columns, lora->rank, b_row, 1, x, 1);
}
