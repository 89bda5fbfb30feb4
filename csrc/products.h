// SPDX-License-Identifier: MIT
// products.h - matrix products of a chunk's rows, divided among the threads: preparation of inputs, and the products.
#ifndef LLAMAC_PRODUCTS_H
#define LLAMAC_PRODUCTS_H
#include "eval.h"

// ---- rows become inputs of products

struct norm_weights { const float *weight, *bias; };   // weight NULL: no norm
// y = the model's norm of x (width), with these weights. y may be x.
void norm_row(const struct worker *w, struct norm_weights norm, const float *x, int width, float *y);

// A branch that has not yet been added to the residual stream: sum = scale (x + residual_scale norm(branch)).
struct pending_branch {
    const float *branch;                    // (n, width)
    struct norm_weights norm;
    float scale;
    float *sum;                             // (n, width)
};

struct rows {
    const float *x;                         // (n, width), or more if there are indices
    const int *indices;                     // (n): the rows' indices in x; NULL: all of x
    int n, width;
};

// The steps before rows are packed: add the pending branch, normalize the sum, copy the result to an observer, and keep
// it. The residual stream has its own panels.
struct norm_step {
    const struct pending_branch *pending;   // or NULL
    struct norm_weights norm;
    float *copy;                            // (n, copy_width): an observer's, or NULL
    size_t copy_width;                      // 0: width; the numbers after a row are zeros
    int keep_normed;                        // whether normed_rows will return them
    float *stream;                          // (n, width): receives them as the residual stream; or NULL
    int is_inner;                           // the rows are not of the residual stream, but between products of a layer
};

// Each thread prepares up to REDUNDANT_ROWS rows in its own memory, which takes less time than a barrier. The threads
// divide the preparation of more rows and then meet at a barrier.
static inline int is_redundant(int rows) { return rows <= REDUNDANT_ROWS; }

// The step of a norm between products, whose result is a stage.
struct norm_step sub_norm_step(const struct worker *w, int stage, int layer, const float *weight);
// Prepares rows as inputs of the consumers. step: NULL for rows that are packed as they are.
struct panels prepare_inputs(const struct worker *w, struct rows rows, const struct norm_step *step,
                             struct consumers consumers);
// Returns the normed rows (n, dim) of the last prepare_inputs that kept them.
const float *normed_rows(const struct worker *w, int n);
// Adds a pending branch to this thread's share of the rows x (n, width). Ends at a barrier.
void add_branch(const struct worker *w, const float *x, const struct pending_branch *pending, int n, int width);

// Returns whether each thread packs the columns that it has computed itself, which saves a barrier. This pays if the
// threads' shares of `strips` strips, in whole blocks of input columns, are nearly equal. Rounding needs whole rows.
enum { BLOCK_STRIPS = BLOCK_COLUMNS / STRIP_ROWS };   // strips whose outputs share a scale as inputs
int packs_own_columns(const struct worker *w, const struct matrix *consumer, int strips);
// Packs columns [first, last) of row r, which start at a block of input columns, for a consumer without an adapter.
void pack_columns(const struct worker *w, const struct matrix *consumer, const struct panels *p, const float *x,
                  int width, int first, int last, int r);

// Returns panels for m rows of `width` floats in this thread's memory (local) or in shared memory. The memory is
// divided among `total` rows; the panels start at row `first`.
struct panels panels_at(const struct worker *w, int local, int m, int first, int total, int width);
// Returns the chunk's panels for rows outside the residual stream.
static inline struct panels unnormed_panels(const struct worker *w, int width) {
    return panels_at(w, is_redundant(w->eval->n_rows), w->eval->n_rows, 0, w->eval->n_rows, width);
}
// Packs row r into the panels, for each input type that the consumers need. A thread must call this for all of its rows
// [first, last) in ascending order.
void pack_row(const struct worker *w, struct consumers consumers, const struct panels *p, const float *x, int width,
              int first, int last, int r);

// ---- products

// One of several products of the same inputs: y = (W x + bias) * row_weights, or += if `add` is set.
struct product {
    const struct matrix *matrix;
    int consumer;                           // the matrix's index among the consumers
    const float *bias;                      // (matrix rows), or NULL
    float *y, *copy;                        // as in struct gemm
    int add_copy;                           // copy += instead of copy =
    size_t y_stride;                        // as in struct gemm; 0: the matrix's rows
    const float *row_weights;               // (m), or NULL
    const int *y_rows;                      // (m): the row of y that each input's outputs go to; NULL: the same row
};

static inline int strips_of(const struct matrix *m) { return ceil_div(m->rows, STRIP_ROWS); }

// Strips [first, last) of a matrix; none if first >= last.
struct strips { int first, last; };
// Returns this thread's share of a matrix.
struct strips strip_share(const struct worker *w, const struct matrix *m);
// Returns this thread's share of n matrices, whose strips form one list: `shares` (n) receives its part of each.
void divide_strips(const struct worker *w, const struct product *products, int n, struct strips *shares);

// Computes strips of a product, with pauses in between, and measures the thread's pace. All members must call it, even
// without strips. add: y += instead of y =.
void multiply(const struct worker *w, const struct product *p, const struct panels *x, int add, struct strips strips);
// Returns the factor of each row of a branch, residual_scale; NULL if it is 1.
static inline const float *residual_scales(const struct llamac_session *s) {
    return s->model->config->residual_scale == 1 ? NULL : s->scratch.scales;
}
#endif
