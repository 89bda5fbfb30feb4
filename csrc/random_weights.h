// SPDX-License-Identifier: MIT
// random_weights.h - deterministic random numbers, and random matrices of every dtype: for the self-test and the tests.
#ifndef LLAMAC_RANDOM_WEIGHTS_H
#define LLAMAC_RANDOM_WEIGHTS_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
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

// ---- matrices

static inline void set_weight(int dtype, uint8_t *w, size_t strip_bytes, int row, int k, float x) {
    uint8_t *p = w + (size_t)(row / 16) * strip_bytes;
    const int at = k * 16 + row % 16;
    if (dtype == LLAMAC_F32) ((float *)(void *)p)[at] = x;
    else ((uint16_t *)(void *)p)[at] = dtype == LLAMAC_F16 ? f16_from_f32(x) : (uint16_t)(f32_bits(x) >> 16);
}
// The quantized dtypes as docs/format.md specifies them, deliberately without the core's table and size functions.
// scale: 0 none, 1 int8, 2 f16, 3 e8m0. super: f16 lines per block. codebook: 1 q4's, 2 iq4's, 3 mxfp4's,
// 4 q3's, 5 q2's, 6 t2's.
struct layout { int bits, offset, per_scale, scale, row_scales, super, minimums, block, codebook; };
static const struct layout layouts[LLAMAC_N_DTYPES] = {
    [LLAMAC_Q8] = { 8, 128, 32, 1, 1, 0, 0, 128, 0 }, [LLAMAC_Q4] = { 4, 0, 16, 1, 1, 0, 0, 128, 1 },
    [LLAMAC_Q4S] = { 4, 0, 32, 1, 1, 0, 0, 128, 1 }, [LLAMAC_Q4_0] = { 4, 8, 32, 2, 0, 0, 0, 128, 0 },
    [LLAMAC_Q4_1] = { 4, 0, 32, 2, 0, 0, 1, 128, 0 }, [LLAMAC_Q5_0] = { 5, 16, 32, 2, 0, 0, 0, 128, 0 },
    [LLAMAC_Q5_1] = { 5, 0, 32, 2, 0, 0, 1, 128, 0 }, [LLAMAC_Q8_0] = { 8, 128, 32, 2, 0, 0, 0, 128, 0 },
    [LLAMAC_Q4_K] = { 4, 0, 32, 1, 0, 2, 1, 256, 0 }, [LLAMAC_Q5_K] = { 5, 0, 32, 1, 0, 2, 1, 256, 0 },
    [LLAMAC_Q6_K] = { 6, 32, 16, 1, 0, 1, 0, 256, 0 }, [LLAMAC_IQ4_NL] = { 4, 0, 32, 2, 0, 0, 0, 128, 2 },
    [LLAMAC_IQ4_XS] = { 4, 0, 32, 1, 0, 1, 0, 256, 2 }, [LLAMAC_MXFP4] = { 4, 0, 32, 3, 0, 0, 0, 128, 3 },
    [LLAMAC_Q6] = { 6, 32, 32, 1, 1, 0, 0, 128, 0 }, [LLAMAC_Q3] = { 3, 0, 16, 1, 1, 0, 0, 128, 4 },
    [LLAMAC_Q2] = { 2, 0, 16, 1, 1, 0, 0, 128, 5 }, [LLAMAC_T2] = { 2, 0, 32, 0, 1, 0, 0, 128, 6 },
};
// A block of a strip of `columns` columns: its start, the offsets of its scales, minimums and codes, its columns
// rounded up to groups, and its bytes.
struct layout_block { size_t start; int scales, minimums, codes, columns, bytes; };
static inline struct layout_block layout_block(const struct layout *f, int columns, int index) {
    struct layout_block b = { 0 };
    size_t start = f->row_scales ? 64 : 0;
    for (int i = 0; i <= index; i++) {
        start += (size_t)b.bytes;
        const int left = columns - i * f->block, wide = (left < f->block ? left + 31 : f->block) / 32 * 32;
        const int per_span = f->scale == 2 ? 32 : f->scale ? 16 : 0, area = wide / f->per_scale * per_span;
        b = (struct layout_block){ start, f->super * 32, f->super * 32 + area, 0, wide, 0 };
        b.codes = (b.minimums + f->minimums * area + 63) / 64 * 64;
        b.bytes = b.codes + wide * 2 * f->bits;
    }
    return b;
}
static inline void store_random_f16(uint8_t *p, float limit, uint64_t *state) {
    const uint16_t h = f16_from_f32(limit * random_float(state));
    memcpy(p, &h, 2);
}
// Random weights; `limit` bounds row scales and f16 scales. In quantized strips any byte is a valid code, except q8's
// 0: it would mean -128. e8m0 scales are limit * 2^-8 to limit * 2^7, so that no weight dwarfs the others.
static inline void fill_matrix(int dtype, uint8_t *w, size_t strip_bytes, int rows, int columns, float limit,
                               uint64_t *state) {
    if (!dtype_is_quantized(dtype)) {
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < columns; k++) set_weight(dtype, w, strip_bytes, r, k, random_float(state));
        return;
    }
    const struct layout *f = &layouts[dtype];
    for (int s = 0; s < ceil_div(rows, 16); s++) {
        uint8_t *p = w + (size_t)s * strip_bytes;
        for (size_t i = 0; i < strip_bytes; i++) p[i] = (uint8_t)(1 + random_below(state, 255));
        for (int r = 0; r < STRIP_ROWS && f->row_scales; r++) ((float *)(void *)p)[r] = limit * random_float(state);
        for (int i = 0; i * f->block < columns; i++) {
            const struct layout_block b = layout_block(f, columns, i);
            const int halves = f->scale == 2 ? b.codes : b.scales;   // bytes of f16 numbers at the block's start
            for (int at = 0; at < halves; at += 2) store_random_f16(p + b.start + at, limit, state);
            if (f->scale == 3)
                for (int at = 0; at < b.codes; at++)
                    p[b.start + (size_t)at] = (uint8_t)(120 + ilogbf(limit) + random_below(state, 16));
        }
    }
}
#endif
