// SPDX-License-Identifier: MIT
// reference.c - the core's scalar kernels as a library for tests of kernels on a GPU: products of rows of floats,
// gathered rows, and random matrices of every dtype.
#include "kernels.h"
#include "samples.h"

void reference_fill(int dtype, uint8_t *w, int rows, int columns, float limit, uint64_t seed) {
    fill_matrix(dtype, w, valid_strip_bytes(dtype, columns), rows, columns, limit, &seed);
}

// y (m, rows) = the product of x (m, columns) with w; the other arguments as in struct gemm. With rounds_inputs, the
// rows of x are rounded to 8 bits first.
void reference_product(int dtype, const uint8_t *w, int rows, int columns, const float *x, int m, int fast,
                       int rounds_inputs, const float *scales, const float *bias, const float *row_weights,
                       int accumulate, int accumulate_copy, float *y, float *copy) {
    const struct kernels *kernels = &kernels_scalar;
    const int input = input_type_of(dtype), most = kernels->panel_rows[input];
    const size_t words = input_words(input, columns);
    struct cancel cancel = { 0 };
    void *panels = take((size_t)m * words * 4), *scratch = take(gemm_scratch_bytes(m));
    float *copied = take_floats(1, columns);
    for (int r = 0; r < m; r++) {
        const struct panel_row to = panel_row(panels, m, most, words, r);
        const float *row = x + (size_t)r * (size_t)columns;
        const float row_scale = rounds_inputs ? kernels->round_row(row, columns, copied) : 0;
        if (rounds_inputs) row = copied;
        if (rounds_inputs && input == INPUT_INT8) kernels->pack_rounded(to, row, columns, row_scale);
        else pack_input(kernels, input, to, row, columns, m, fast);
    }
    const struct gemm g = {
        .dtype = dtype, .w = w, .strip_bytes = valid_strip_bytes(dtype, columns), .last = ceil_div(rows, STRIP_ROWS),
        .rows = rows, .columns = columns, .x = panels, .m = m, .fast = fast, .scales = scales, .bias = bias,
        .y = y, .y_stride = (size_t)rows, .accumulate = accumulate, .row_weights = row_weights, .copy = copy,
        .accumulate_copy = accumulate_copy, .scratch = scratch, .cancel = &cancel,
    };
    kernels->gemm(&g);
    free(panels), free(scratch), free(copied);
}

void reference_gather(int dtype, const uint8_t *w, int row, int columns, float *y) {
    kernels_scalar.gather[dtype](w, valid_strip_bytes(dtype, columns), row, columns, y);
}
