// SPDX-License-Identifier: MIT
// samples.h - deterministic random numbers, random matrices of every dtype, and float64 references of the kernels.
// Used by the tests and by bench/kernel_speed.c.
#ifndef LLAMAC_SAMPLES_H
#define LLAMAC_SAMPLES_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "format.h"
#include "half.h"

// xorshift64*: the same numbers on every machine.
static inline uint64_t random_bits(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1d;
}
// In [-1, 1).
static inline float random_float(uint64_t *state) {
    return (float)((double)(random_bits(state) >> 11) * 0x1p-52 - 1.0);
}
// In [0, n).
static inline int random_below(uint64_t *state, int n) { return (int)((random_bits(state) >> 33) % (uint64_t)n); }

static inline void fill_random(float *x, size_t n, uint64_t *state) {
    for (size_t i = 0; i < n; i++) x[i] = random_float(state);
}

// Zeroed memory, aligned to cache lines. Exits if memory runs out.
static inline void *take(size_t bytes) {
    const size_t padded = bytes ? (bytes + 63) / 64 * 64 : 64;
    void *p = aligned_alloc(64, padded);
    if (!p) { printf("out of memory\n"); exit(1); }
    return memset(p, 0, padded);
}
static inline float *take_floats(int rows, int columns) { return take(sizeof(float) * (size_t)rows * (size_t)columns); }

// ---- matrices

// x rounded to a float dtype; bf16 by truncation.
static inline float rounded_to(int dtype, float x) {
    if (dtype == LLAMAC_F32) return x;
    return dtype == LLAMAC_F16 ? f32_from_f16(f16_from_f32(x)) : f32_from_bits(f32_bits(x) & 0xffff0000);
}
static inline void set_weight(int dtype, uint8_t *w, size_t strip_bytes, int row, int k, float x) {
    uint8_t *p = w + (size_t)(row / 16) * strip_bytes;
    const int at = k * 16 + row % 16;
    if (dtype == LLAMAC_F32) ((float *)(void *)p)[at] = x;
    else ((uint16_t *)(void *)p)[at] = dtype == LLAMAC_F16 ? f16_from_f32(x) : (uint16_t)(f32_bits(x) >> 16);
}
// Random weights. In quantized strips any byte is a valid code, except q8's 0: it would mean -128.
static inline void fill_matrix(int dtype, uint8_t *w, size_t strip_bytes, int rows, int columns, uint64_t *state) {
    if (!dtype_is_quantized(dtype)) {
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < columns; k++) set_weight(dtype, w, strip_bytes, r, k, random_float(state));
        return;
    }
    for (int s = 0; s < ceil_div(rows, 16); s++) {
        uint8_t *p = w + (size_t)s * strip_bytes;
        fill_random((float *)(void *)p, STRIP_ROWS, state);
        for (size_t i = LINE_BYTES; i < strip_bytes; i++) p[i] = (uint8_t)(1 + random_below(state, 255));
    }
}
// Row o, column k, decoded as docs/format.md specifies, deliberately without the core's size functions.
static inline double weight_at(int dtype, const uint8_t *w, size_t strip_bytes, int o, int k) {
    const uint8_t *p = w + (size_t)(o / 16) * strip_bytes;
    const int r = o % 16;
    if (dtype == LLAMAC_F32) return (double)((const float *)(const void *)p)[k * 16 + r];
    if (dtype == LLAMAC_F16) return (double)f32_from_f16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    if (dtype == LLAMAC_BF16) return (double)f32_from_bf16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    const double d = (double)((const float *)(const void *)p)[r];
    const int per_scale = dtype == LLAMAC_Q4 ? 16 : 32;
    const int full_block = dtype == LLAMAC_Q8 ? 64 + 32 * 64 : dtype == LLAMAC_Q4 ? 128 + 16 * 64 : 64 + 16 * 64;
    const size_t groups_left = (strip_bytes - 64 - (size_t)(k / 128 * full_block)) / (dtype == LLAMAC_Q8 ? 512 : 256);
    const uint8_t *block = p + 64 + k / 128 * full_block;
    const uint8_t *codes = block + (dtype == LLAMAC_Q4 && groups_left > 2 ? 128 : 64);
    const int i = k % 128, s = (int8_t)block[i / per_scale * 16 + r];
    if (dtype == LLAMAC_Q8) return d * s * (codes[i / 4 * 64 + 4 * r + i % 4] - 128);
    const uint8_t byte = codes[i / 8 * 64 + 4 * r + i % 4];
    return d * s * (q4_codebook[i % 8 < 4 ? byte & 15 : byte >> 4] + (s & 3));
}
// Input k of a row after the rounding that products with this dtype apply to their inputs.
static inline double input_at(int dtype, const float *x, int columns, int k) {
    if (!dtype_is_quantized(dtype)) return (double)x[k];
    const int span = dtype == LLAMAC_Q8 ? 128 : 32, limit = dtype == LLAMAC_Q8 ? 16319 : 127, start = k / span * span;
    float max = 0;
    for (int i = start; i < min_int(columns, start + span); i++) max = fmaxf(max, fabsf(x[i]));
    return max > 0 ? (double)max / limit * nearbyint((double)(x[k] * ((float)limit / max))) : 0;
}

// ---- references in float64

static inline double reference_activation(int activation, double x) {
    const double pi = 3.14159265358979323846;
    switch (activation) {
    case ACTIVATION_SILU: return x / (1 + exp(-x));
    case ACTIVATION_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
    case ACTIVATION_GELU_ERF: return 0.5 * x * erfc(-x / sqrt(2));
    case ACTIVATION_RELU: return x > 0 ? x : 0;
    case ACTIVATION_RELU2: return x > 0 ? x * x : 0;
    default: return x / (1 + exp(-1.702 * x));
    }
}

// o[d] = sum over positions [begin, end) of softmax(q K) V, with keys and values (positions, head_dim) rounded to the
// cache's dtype. sink: one more logit, or -INFINITY. p: a buffer of `end` numbers.
static inline void reference_attention(int dtype, int head_dim, const float *q, const float *k, const float *v,
                                       int begin, int end, double soft_cap, double sink, double *p,
                                       double *o) {
    double sum = exp(sink);
    for (int j = begin; j < end; j++) {
        double s = 0;
        for (int d = 0; d < head_dim; d++) s += (double)rounded_to(dtype, k[j * head_dim + d]) * (double)q[d];
        if (soft_cap > 0) s = soft_cap * tanh(s / soft_cap);
        sum += p[j] = exp(s);
    }
    for (int d = 0; d < head_dim; d++) {
        o[d] = 0;
        for (int j = begin; j < end; j++) o[d] += p[j] / sum * (double)rounded_to(dtype, v[j * head_dim + d]);
    }
}
#endif
