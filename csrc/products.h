// SPDX-License-Identifier: MIT
// products.h - products of a chunk's rows with matrices, shared out to the threads: what the graph is made of.
#ifndef LLAMAC_PRODUCTS_H
#define LLAMAC_PRODUCTS_H
#include "eval.h"

// Rows on their way into products. In this order, each row gets its pending branch added, is normalized, is copied to
// an observer, and is kept.
struct norm_weights { const float *weight, *bias; };
// (n, width): to = row + residual_scale norm(branch)
struct pending { const float *branch; struct norm_weights norm; float *to; };
struct rows {
    const float *x;               // (n, width)
    const int *picked;            // the rows' numbers in x, or NULL
    int n, width;
    const struct pending *pending;    // or NULL
    struct norm_weights norm;     // weight NULL: none
    float *observed;              // (n, width) or NULL
    int keep;                     // whether the rows are kept, where `kept_rows` finds them
};

// The input type that a matrix multiplies with, as a bit; 0 for an absent matrix.
static inline unsigned kind_of(const struct matrix *m) { return m->data ? 1u << input_type_of(m->dtype) : 0; }

// Panels of m rows, from row `first` of `total`, each `width` wide: in this thread's memory if redundant, else shared.
struct panels panels_at(const struct worker *w, int redundant, int m, int first, int total, int width);
// Puts row r of those that this thread prepares, [first, last), into the panels; all of them, in turn.
void pack_row(const struct worker *w, struct readers readers, const struct panels *p, const float *x, int width,
    int first, int last, int r);

// Up to REDUNDANT_ROWS rows each thread prepares for itself, which is cheaper than a meeting; more are shared, and then
// it ends at a barrier.
static inline int is_redundant(int rows) { return rows <= REDUNDANT_ROWS; }
struct panels prepare(const struct worker *w, struct rows rows, struct readers readers);
// The rows that were kept: (n, dim).
const float *kept_rows(const struct worker *w, int n);

// x = row + residual_scale norm(branch), for this thread's share of the rows; ends at a barrier.
void add_branch(const struct worker *w, const float *x, const struct pending *pending, int n, int width);

// One product of several that share an input: y (+)= (W x + bias) weight, stored in row `to` of y. reader: the matrix's
// place among the readers.
struct product {
    const struct matrix *matrix;
    int reader;
    const float *bias;
    float *y, *copy;
    const float *weights;         // (m) or NULL
    const int *to;                // (m) or NULL
};
static inline int strips_of(const struct matrix *m) { return ceil_div(m->rows, STRIP_ROWS); }

void multiply(const struct worker *w, const struct product *p, const struct panels *x, int add, int first_strip,
    int last_strip);
// The strips of all the products are one long list; every thread takes one contiguous part of it.
void linear(const struct worker *w, const struct product *products, int n, const struct panels *x, int add);
// Who reads the inputs of a network's hidden numbers.
static inline struct readers readers_of_hidden(const struct expert *net) { return (struct readers){ { &net->gate,
    &net->up }, 2 }; }
// Gate and up of a thread's own columns, then the activation, in place of up (m, ffn_dim): no barrier in between.
void hidden(const struct worker *w, const struct expert *net, const struct panels *x, float *gate, float *up);
#endif
