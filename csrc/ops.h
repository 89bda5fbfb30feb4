// SPDX-License-Identifier: MIT
// ops.h - single operations of the graph on plain arrays, for llamac.ops. The kernels that compute the graph compute
// them, so the bits are those of a stage of an eval.
//
// Arrays are contiguous, of f32 unless stated otherwise. Callers have checked the sizes, which are at least 1, and the
// dtypes. `isa` is the kernel set; NULL: the best of this machine. Neither it nor `threads` changes the bits.
//
// Errors of all functions: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED (the kernel set, or the threads),
// LLAMAC_NO_MEMORY.
#ifndef LLAMAC_OPS_H
#define LLAMAC_OPS_H
#include "llamac.h"

// y = rms_norm(x) or layer_norm(x) of n rows (n, width). bias: only of layer norms; NULL: none.
int llamac_op_norm(int is_rms, const float *x, size_t n, int width, const float *weight, const float *bias, float eps,
                   const char *isa, float *y, llamac_error *err);
// y = softmax(x) of n rows (n, width).
int llamac_op_softmax(const float *x, size_t n, int width, const char *isa, float *y, llamac_error *err);
// y = activation(x) of n rows (n, width). activation: as in the config (docs/format.md).
int llamac_op_activate(int activation, const float *x, size_t n, int width, const char *isa, float *y,
                       llamac_error *err);

// Rotates the first 2 * half numbers of each head of x (n, n_heads, head_dim), in place, by factor * (cos, sin) of
// position * inv_freq. positions: (n); inv_freq: (half).
int llamac_op_rope(float *x, size_t n, size_t n_heads, int head_dim, const int32_t *positions, const float *inv_freq,
                   int half, float factor, const char *isa, llamac_error *err);

// y (n, columns) = rows rows[0] to rows[n - 1] of a matrix in strips. The rows exist.
int llamac_op_gather(int dtype, const void *w, int columns, const int32_t *rows, size_t n, const char *isa, float *y,
                     llamac_error *err);

// llamac_quantize on several threads.
int llamac_op_quantize(int dtype, const float *w, size_t rows, int columns, const float *importance, const char *isa,
                       int threads, void *out, llamac_error *err);

// y = x W^T + bias
typedef struct {
    int dtype, rows, columns;
    const void *w;         // strips
    const float *x;        // (n, columns)
    size_t n;
    const float *bias;     // (rows), or NULL
    int numerics;          // LLAMAC_EXACT or LLAMAC_FAST
    float *y;              // (n, rows)
} llamac_op_product;
int llamac_op_matmul(const llamac_op_product *product, const char *isa, int threads, llamac_error *err);

// out = softmax(scale q k^T) v for each query head; query head h reads KV head h / (n_heads / n_kv_heads). Keys and
// values are stored and read as in a KV cache (struct attend).
typedef struct {
    int n_heads, n_kv_heads, head_dim;
    int kv_dtype;          // LLAMAC_F32, LLAMAC_F16 or LLAMAC_Q8
    const float *q;        // (n_queries, n_heads, head_dim); n_queries * n_heads fits an int
    int n_queries;
    const float *k, *v;    // (n_positions, n_kv_heads, head_dim)
    int n_positions;
    const int32_t *begin, *end;   // (n_queries): each sees positions [begin, end), at least one
    float scale, soft_cap; // soft_cap: 0: none
    const float *sinks;    // (n_heads), or NULL
    float *out;            // (n_queries, n_heads, head_dim)
} llamac_op_attention;
int llamac_op_attend(const llamac_op_attention *attention, const char *isa, int threads, llamac_error *err);

// As llamac_sample, without mirostat. Returns the token.
int llamac_op_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, const char *isa,
                     void *scratch, llamac_error *err);
#endif
