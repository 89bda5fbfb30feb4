// SPDX-License-Identifier: MIT
// quantize.c - checks the arguments of the quantizer, reserves its memory, and calls the kernel of an instruction set.
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "fpenv.h"
#include "kernels.h"
#include "llamac.h"
#include "mem.h"

enum { MAX_COLUMNS = 1 << 24 };   // as in the tensor record

int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance,
                    const float *feedback, const char *isa, void *out, llamac_error *err) {
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || !dtype_table[dtype].has_row_scales)
        return bad_argument(err, "dtype is %d, expected q8 (%d), q6 (%d), q4 (%d) or q4s (%d)", dtype, LLAMAC_Q8,
                            LLAMAC_Q6, LLAMAC_Q4, LLAMAC_Q4S);
    if (columns < 1 || columns > MAX_COLUMNS)
        return bad_argument(err, "columns is %zu, expected 1 to %d", columns, MAX_COLUMNS);
    if (feedback && !dtype_has_grids(dtype))
        return bad_argument(err, "%s is quantized without feedback: expected NULL", dtype_table[dtype].name);
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const size_t padded = round_up(columns, GROUP_COLUMNS);
    const size_t strips = feedback ? QUANTIZE_STRIPS : 1;   // without feedback, one after another
    float *weight = mem_alloc(padded + strips * quantize_strip_floats((int)columns, feedback != NULL), sizeof(float),
                              "quantizing a strip", err);
    if (!weight) return -1;
    for (size_t k = 0; k < padded; k++) weight[k] = k >= columns ? 0 : importance ? importance[k] : 1;
    const struct quantize q = {
        .dtype = dtype, .columns = (int)columns, .rows = rows, .strip_bytes = dtype_strip_bytes(dtype, columns),
        .w = w, .weight = weight, .is_weighted = importance != NULL, .feedback = feedback,
        .clip = importance ? 1.25f : 1.12f, .scratch = weight + padded, .out = out,
    };
    const fp_control saved = fp_control_reset();
    kernels->quantize(&q);
    fp_control_restore(saved);
    mem_free(weight);
    return 0;
}
