// SPDX-License-Identifier: MIT
// lora.c - the products of adapters. See lora.h.
#include "lora.h"

#include "common.h"

// y (+)= a x of m rows in one panel, or in several.
static void multiply_by(const struct worker *w, const uint8_t *a, int rows, int columns, const void *x, int m,
    float *y, int add) {
    const struct gemm product = {
        .w = a, .strip_bytes = float_strip_bytes(LLAMAC_F32, columns), .last = ceil_div(rows, STRIP_ROWS),
            .rows = rows, .columns = columns,
        .x = x, .m = m, .y = y, .y_stride = (size_t)rows, .accumulate = add, .scratch = w->local->gemm,
            .cancel = &w->eval->cancel,
    };
    w->eval->session->kernels->gemm[LLAMAC_F32](&product);
}

void lora_take(const struct worker *w, struct readers readers, const struct panels *panels, const float *x, int width,
    int first, int last, int r) {
    const struct kernels *kernels = w->eval->session->kernels;
    const int start = r - (r - first) % PANEL_ROWS, height = min_int(PANEL_ROWS, last - start);
    kernels->pack[INPUT_F32]((struct panel_row){ (int32_t *)(void *)w->local->lora_panel, height, r - start }, x,
        width);
    if (r + 1 < start + height) return;
    for (int i = 0; i < readers.n; i++) {
        const struct lora *lora = readers.of[i]->lora;
        if (!lora) continue;
        const int rank = lora->rank;
        multiply_by(w, lora->a, rank, width, w->local->lora_panel, height, w->local->lora_rows, 0);
        for (int t = 0; t < height; t++)
            kernels->pack[INPUT_F32](panel_row(panels->lora_x[i], panels->m, (size_t)rank, start + t),
                w->local->lora_rows + (size_t)t * (size_t)rank, rank);
    }
}

void lora_multiply(const struct worker *w, const struct lora *lora, const struct gemm *product, const float *lora_x) {
    struct gemm outer = *product;
    outer.w = lora->b, outer.strip_bytes = float_strip_bytes(LLAMAC_F32, lora->rank), outer.columns = lora->rank,
        outer.x = lora_x;
    outer.scales = outer.bias = NULL, outer.accumulate = 1, outer.accumulate_copy = 1;
    w->eval->session->kernels->gemm[LLAMAC_F32](&outer);
}

void lora_gather(const struct worker *w, const struct lora *lora, int row, int columns, float *x) {
    const struct kernels *kernels = w->eval->session->kernels;
    kernels->gather[LLAMAC_F32](lora->b, float_strip_bytes(LLAMAC_F32, lora->rank), row, lora->rank,
        w->local->lora_rows);
    multiply_by(w, lora->a, columns, lora->rank, w->local->lora_rows, 1, x, 1);   // one row is its own panel
}
