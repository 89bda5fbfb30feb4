// SPDX-License-Identifier: MIT
// samples.h - a deterministic source of numbers, random matrices of every dtype, and what a kernel should see of them, in double.
#ifndef LLAMAC_SAMPLES_H
#define LLAMAC_SAMPLES_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "half.h"

// xorshift64*: the same numbers everywhere.
static inline uint64_t random_bits(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1d;
}
static inline float random_float(uint64_t *state) { return (float)((double)(random_bits(state) >> 11) * 0x1p-52 - 1.0); }   // [-1, 1)
static inline int random_below(uint64_t *state, int n) { return (int)((random_bits(state) >> 33) % (uint64_t)n); }

static inline void fill_random(float *x, size_t n, uint64_t *state) { for (size_t i = 0; i < n; i++) x[i] = random_float(state); }

// Zeroed memory, aligned to cache lines; never NULL.
static inline void *take(size_t bytes) {
    const size_t padded = bytes ? (bytes + 63) / 64 * 64 : 64;
    void *p = aligned_alloc(64, padded);
    if (!p) { printf("out of memory\n"); exit(1); }
    return memset(p, 0, padded);
}
// ---- matrices

static inline float stored(int dtype, float x) {
    return dtype == LLAMAC_F32 ? x : dtype == LLAMAC_F16 ? f32_from_f16(f16_from_f32(x)) : f32_from_bits(f32_bits(x) & 0xffff0000);
}
static inline void put(int dtype, uint8_t *w, size_t strip_bytes, int row, int k, float x) {
    uint8_t *p = w + (size_t)(row / 16) * strip_bytes;
    if (dtype == LLAMAC_F32) ((float *)(void *)p)[k * 16 + row % 16] = x;
    else ((uint16_t *)(void *)p)[k * 16 + row % 16] = dtype == LLAMAC_F16 ? f16_from_f32(x) : (uint16_t)(f32_bits(x) >> 16);
}
// A matrix of random weights. Quantized: any bytes are weights, but q8's code 0, which stands for -128.
static inline void fill_matrix(int dtype, uint8_t *w, size_t strip_bytes, int rows, int columns, uint64_t *state) {
    if (!dtype_is_quantized(dtype)) {
        for (int r = 0; r < rows; r++) for (int k = 0; k < columns; k++) put(dtype, w, strip_bytes, r, k, random_float(state));
        return;
    }
    for (int s = 0; s < ceil_div(rows, 16); s++) {
        uint8_t *p = w + (size_t)s * strip_bytes;
        fill_random((float *)(void *)p, STRIP_ROWS, state);
        for (size_t i = LINE_BYTES; i < strip_bytes; i++) p[i] = (uint8_t)(1 + random_below(state, 255));
    }
}
// Row o, column k, decoded as docs/format.md has it.
static inline double weight_at(int dtype, const uint8_t *w, size_t strip_bytes, int o, int k) {
    const uint8_t *p = w + (size_t)(o / 16) * strip_bytes;
    const int r = o % 16;
    if (dtype == LLAMAC_F32) return (double)((const float *)(const void *)p)[k * 16 + r];
    if (dtype == LLAMAC_F16) return (double)f32_from_f16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    if (dtype == LLAMAC_BF16) return (double)f32_from_bf16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    const double d = (double)((const float *)(const void *)p)[r];
    const int per_scale = dtype == LLAMAC_Q4 ? 16 : 32, whole = dtype == LLAMAC_Q8 ? 64 + 32 * 64 : dtype == LLAMAC_Q4 ? 128 + 16 * 64 : 64 + 16 * 64;
    const size_t groups_after = (strip_bytes - 64 - (size_t)(k / 128 * whole)) / (dtype == LLAMAC_Q8 ? 512 : 256);
    const uint8_t *block = p + 64 + k / 128 * whole, *codes = block + (dtype == LLAMAC_Q4 && groups_after > 2 ? 128 : 64);
    const int i = k % 128, s = (int8_t)block[i / per_scale * 16 + r];
    if (dtype == LLAMAC_Q8) return d * s * (codes[i / 4 * 64 + 4 * r + i % 4] - 128);
    const uint8_t byte = codes[i / 8 * 64 + 4 * r + i % 4];
    return d * s * (q4_codebook[i % 8 < 4 ? byte & 15 : byte >> 4] + (s & 3));
}
// Input k of a row as the product sees it.
static inline double input_at(int dtype, const float *x, int columns, int k) {
    if (!dtype_is_quantized(dtype)) return (double)x[k];
    const int group = dtype == LLAMAC_Q8 ? 128 : 32, start = k / group * group, limit = dtype == LLAMAC_Q8 ? 16319 : 127;
    float top = 0;
    for (int i = start; i < min_int(columns, start + group); i++) top = fmaxf(top, fabsf(x[i]));
    return top > 0 ? (double)top / limit * nearbyint((double)(x[k] * ((float)limit / top))) : 0;
}
#endif
