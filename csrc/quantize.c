// SPDX-License-Identifier: MIT
// quantize.c - checks the arguments of the quantizer, reserves its memory, and calls the kernel of an instruction set.
// Quantizes to t2, which takes a few operations per weight, without a kernel.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "fpenv.h"
#include "kernels.h"
#include "llamac.h"
#include "mem.h"

enum { MAX_COLUMNS = 1 << 24 };   // as in the tensor record

// Returns the largest `clip` of choose_sizes: the fewer codes there are, the more an optimal scale clips. With
// importance, columns that matter little may clip more.
static float most_clipping(int dtype, int has_importance) {
    const int bits = dtype_table[dtype].code_bits;
    return (bits == 2 ? 1.9f : bits == 3 ? 1.4f : 1.12f) + (has_importance ? 0.13f : 0);
}

// ---- t2
//
// D is the weighted mean magnitude of the weights that are not rounded to 0, which are those above D / 2: each gives
// the least squared error for the other. Ternary rows keep their numbers: the mean of equal floats, a sum of at most
// MAX_COLUMNS doubles, rounds to their float.

// Without importance: an iteration that starts at 1.5 times the mean of all magnitudes.
static double plain_scale(const float *x, size_t columns) {
    enum { STEPS = 32 };
    double d = 0;
    for (size_t k = 0; k < columns; k++) d += 1.5 / (double)columns * fabs((double)x[k]);
    for (int i = 0; i < STEPS; i++) {
        double sum = 0, total = 0;
        for (size_t k = 0; k < columns; k++) {
            const double magnitude = fabs((double)x[k]);
            if (magnitude > d / 2) sum += magnitude, total += 1;
        }
        if (total == 0 || sum / total == d) break;
        d = sum / total;
    }
    return d;
}

struct weighted { float magnitude, weight; };

// Descending. Only identical elements are equal, so the order of sums does not depend on the library's qsort.
static int compare_weighted(const void *first, const void *second) {
    const struct weighted *a = first, *b = second;
    if (a->magnitude != b->magnitude) return a->magnitude < b->magnitude ? 1 : -1;
    return (a->weight < b->weight) - (a->weight > b->weight);
}

// With importance, the iteration can stop far from the least error. Of the sets of the largest magnitudes, this finds
// the one whose mean lowers the error most: by its (sum of weight * magnitude)^2 / (sum of weights).
static double weighted_scale(const float *x, const float *weight, size_t columns, struct weighted *sorted) {
    for (size_t k = 0; k < columns; k++) sorted[k] = (struct weighted){ fabsf(x[k]), weight[k] };
    qsort(sorted, columns, sizeof *sorted, compare_weighted);
    double d = 0, most = 0, sum = 0, total = 0;
    for (size_t k = 0; k < columns; k++) {
        sum += (double)sorted[k].weight * (double)sorted[k].magnitude;
        total += (double)sorted[k].weight;
        if (sum * sum / total > most) most = sum * sum / total, d = sum / total;
    }
    return d;
}

// weight: NULL without importance. sorted: (columns), scratch with importance.
static float ternary_scale(const float *x, const float *weight, size_t columns, struct weighted *sorted) {
    const double d = weight ? weighted_scale(x, weight, columns, sorted) : plain_scale(x, columns);
    return d < 0x1p-100 ? 0 : (float)d;   // as in other dtypes, a row of tiny numbers becomes zeros
}

static void quantize_ternary(const float *w, size_t rows, size_t columns, const float *weight,
                             struct weighted *sorted, uint8_t *out) {
    const size_t strip_bytes = dtype_strip_bytes(LLAMAC_T2, columns), padded = round_up(columns, GROUP_COLUMNS);
    memset(out, 0, strip_bytes * (round_up(rows, STRIP_ROWS) / STRIP_ROWS));
    for (size_t row = 0; row < round_up(rows, STRIP_ROWS); row++) {
        uint8_t *strip = out + row / STRIP_ROWS * strip_bytes, *codes = strip + LINE_BYTES + 4 * (row % STRIP_ROWS);
        const float *x = w + row * columns, d = row < rows ? ternary_scale(x, weight, columns, sorted) : 0;
        memcpy(strip + 4 * (row % STRIP_ROWS), &d, 4);
        for (size_t k = 0; k < padded; k++) {   // the places of dtype.h
            const float value = row < rows && k < columns ? x[k] : 0;
            const int code = d == 0 ? 1 : value > d / 2 ? 2 : value < -d / 2 ? 0 : 1, column = (int)(k % GROUP_COLUMNS);
            codes[k / GROUP_COLUMNS * group_code_bytes(LLAMAC_T2) + (size_t)(column / 16 * LINE_BYTES + column % 4)] |=
                (uint8_t)(code << (column / 8 % 2 * 2 + (column & 4)));
        }
    }
}

// Fills the weights of columns. Importances are divided by a power of two near the largest one, so that weighted errors
// are finite numbers. Columns without importance have a weight that only matters in blocks of such columns, whose scale
// would otherwise be arbitrary.
static void fill_weights(const float *importance, size_t columns, size_t padded, float *weight) {
    float most = 0;
    for (size_t k = 0; importance && k < columns; k++) most = importance[k] > most ? importance[k] : most;
    int exponent;
    frexp((double)most, &exponent);
    const double unit = ldexp(1, -exponent);
    for (size_t k = 0; k < columns; k++) {
        const float own = importance ? (float)((double)importance[k] * unit) : 1;
        weight[k] = own > 0x1p-60f ? own : 0x1p-60f;
    }
    for (size_t k = columns; k < padded; k++) weight[k] = 0;
}

int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance,
                    const float *feedback, const char *isa, void *out, llamac_error *err) {
    if (dtype <= 0 || dtype >= LLAMAC_N_DTYPES || !dtype_table[dtype].has_row_scales)
        return bad_argument(err, "dtype is %d, expected q8 (%d), q6 (%d), q4 (%d), q4s (%d), q3 (%d), q2 (%d) or "
                            "t2 (%d)", dtype, LLAMAC_Q8, LLAMAC_Q6, LLAMAC_Q4, LLAMAC_Q4S, LLAMAC_Q3, LLAMAC_Q2,
                            LLAMAC_T2);
    if (columns < 1 || columns > MAX_COLUMNS)
        return bad_argument(err, "columns is %zu, expected 1 to %d", columns, MAX_COLUMNS);
    if (feedback && (!dtype_has_grids(dtype) || dtype == LLAMAC_T2))
        return bad_argument(err, "%s is quantized without feedback: expected NULL", dtype_table[dtype].name);
    const struct kernels *kernels = kernels_select(isa, err);
    if (!kernels) return -1;
    const size_t padded = round_up(columns, GROUP_COLUMNS);
    const size_t strips = feedback ? QUANTIZE_STRIPS : 1;   // without feedback, one after another
    const size_t scratch = dtype == LLAMAC_T2 ? columns * sizeof(struct weighted) / sizeof(float)
                                              : strips * quantize_strip_floats((int)columns, feedback != NULL);
    float *weight = mem_alloc(padded + scratch, sizeof(float), "quantizing a strip", err);
    if (!weight) return -1;
    const fp_control saved = fp_control_reset();
    fill_weights(importance, columns, padded, weight);
    const struct quantize q = {
        .dtype = dtype, .columns = (int)columns, .rows = rows, .strip_bytes = dtype_strip_bytes(dtype, columns),
        .w = w, .weight = weight, .is_weighted = importance != NULL, .feedback = feedback,
        .clip = most_clipping(dtype, importance != NULL), .scratch = weight + padded, .out = out,
    };
    if (dtype == LLAMAC_T2)
        quantize_ternary(w, rows, columns, importance ? weight : NULL, (struct weighted *)q.scratch, out);
    else
        kernels->quantize(&q);
    fp_control_restore(saved);
    mem_free(weight);
    return 0;
}
