// SPDX-License-Identifier: MIT
// samples.h - memory for random matrices (random_weights.h), and float64 references of the kernels. Used by the tests
// and by bench/kernel_speed.c.
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
#include "random_weights.h"

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
static inline double layout_scale(const struct layout *f, const uint8_t *p, int at) {
    if (f->scale == 0) return 1;
    if (f->scale == 1) return (int8_t)p[at];
    return f->scale == 2 ? (double)f32_from_f16(((const uint16_t *)(const void *)p)[at]) : ldexp(1, p[at] - 128);
}
// Row o, column k of a matrix with this many columns.
static inline double weight_at(int dtype, const uint8_t *w, size_t strip_bytes, int columns, int o, int k) {
    static const int8_t *const codebooks[] = { NULL, q4_codebook, iq4_codebook, fp4_codebook, q3_codebook,
                                               q2_codebook, t2_codebook };
    const uint8_t *p = w + (size_t)(o / 16) * strip_bytes;
    const int r = o % 16;
    if (dtype == LLAMAC_F32) return (double)((const float *)(const void *)p)[k * 16 + r];
    if (dtype == LLAMAC_F16) return (double)f32_from_f16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    if (dtype == LLAMAC_BF16) return (double)f32_from_bf16(((const uint16_t *)(const void *)p)[k * 16 + r]);
    const struct layout *f = &layouts[dtype];
    const struct layout_block b = layout_block(f, columns, k / f->block);
    const uint8_t *block = p + b.start, *codes = block + b.codes + k % f->block / 32 * 64 * f->bits + 4 * r;
    const int span = k % f->block / f->per_scale * 16 + r, i = k % 32;
    const double s = layout_scale(f, block + b.scales, span);
    int code = f->bits == 8 ? codes[i / 4 * 64 + i % 4]
             : f->bits < 4  ? codes[i / 16 * 64 + i % 4] >> (i / 8 % 2 * 2 + i / 4 % 2 * 4) & 3
                            : codes[i / 8 * 64 + i % 4] >> (i / 4 % 2 * 4) & 15;
    if (f->bits == 3) code += (codes[2 * 64 + i % 4] >> (i / 8 + i / 4 % 2 * 4) & 1) * 4;
    if (f->bits == 5) code += (codes[4 * 64 + i % 4] >> i / 4 & 1) * 16;
    if (f->bits == 6) code += (codes[(4 + i / 16) * 64 + i % 4] >> i % 16 / 4 * 2 & 3) * 16;
    const int c = f->codebook ? codebooks[f->codebook][code] : code - f->offset;
    if (f->row_scales)
        return (double)((const float *)(const void *)p)[r] * s * (f->codebook ? c + ((int)s & 3) : c);
    const uint16_t *super = (const uint16_t *)(const void *)block;
    const double m = f->minimums ? layout_scale(f, block + b.minimums, span) : 0;
    if (!f->super) return s * c + m;
    return (double)f32_from_f16(super[r]) * s * c - (f->super == 2 ? (double)f32_from_f16(super[16 + r]) * m : 0);
}
// Whether fast numerics round inputs of a type, and those of products with a dtype.
static inline int is_rounded_if_fast(int input) { return input == INPUT_INT16 || input == INPUT_BF16; }
static inline int has_fast(int dtype) { return is_rounded_if_fast(dtype_table[dtype].input); }
// Input k of a row after the rounding that products with this dtype apply to their inputs.
static inline double input_at(int dtype, const float *x, int columns, int k) {
    if (!dtype_is_quantized(dtype)) return (double)x[k];
    const int is_int8 = layouts[dtype].row_scales && layouts[dtype].codebook;
    const int span = is_int8 ? 32 : 128, limit = is_int8 ? 127 : 16319, start = k / span * span;
    float max = 0;
    for (int i = start; i < min_int(columns, start + span); i++) max = fmaxf(max, fabsf(x[i]));
    return max > 0 ? (double)max / limit * nearbyint((double)(x[k] * ((float)limit / max))) : 0;
}
// Input k with fast numerics, for bf16 or a dtype with int16 inputs. In units of the scale it is a product h * factor.
static inline double fast_input_at(int dtype, const float *x, int columns, int k) {
    if (dtype == LLAMAC_BF16) {   // 8 significant bits
        int exponent;
        const double fraction = frexp((double)x[k], &exponent);
        return fabsf(x[k]) < 0x1p-64f ? 0 : ldexp(nearbyint(fraction * 256), exponent - 8);
    }
    const int block = k / 128 * 128, group = k / 32 * 32;
    float max = 0, group_max = 0;
    for (int i = block; i < min_int(columns, block + 128); i++) max = fmaxf(max, fabsf(x[i]));
    for (int i = group; i < min_int(columns, group + 32); i++) group_max = fmaxf(group_max, fabsf(x[i]));
    if (!(max > 0)) return 0;
    const float inverse = 16319 / max;
    const float factor = 1 + floorf(group_max * inverse * (1 / 127.49609375f));
    return (double)max / 16319 * (double)factor * nearbyint((double)(x[k] * inverse * (1 / factor)));
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

static inline double reference_xielu(double x, double alpha_p, double alpha_n) {
    return x > 0 ? alpha_p * x * x + x / 2 : (0.5 + alpha_n) * (expm1(x) - x) + x / 2;
}

// y = the key or value x of n floats, as a KV cache of this dtype holds it.
static inline void round_to_cache(int dtype, int is_key, int n, const float *x, float *y) {
    for (int i = 0; i < n && dtype != LLAMAC_Q8; i++) y[i] = rounded_to(dtype, x[i]);
    for (int first = 0, last; first < n && dtype == LLAMAC_Q8; first = last) {
        last = is_key ? min_int(n, first + 32) : n;
        float max = 0;
        for (int i = first; i < last; i++) max = fmaxf(max, fabsf(x[i]));
        float scale = 0;   // max / 127, rounded up to an f16
        for (uint16_t h = f16_from_f32(max / 127); (scale = f32_from_f16(h)) < max / 127;) h++;
        for (int i = first; i < last; i++)
            y[i] = max < 0x1p-100f ? 0 : scale * (nearbyintf(x[i] * (1 / scale)) + 0);   // not -0
    }
}

// o[d] = sum over positions [begin, end) of softmax(q K) V, with keys and values (positions, head_dim). sink: one more
// logit, or -INFINITY. biases: NULL, or those of distances -farthest to farthest from the query's position, of which
// larger distances have the outermost. p: a buffer of `end` numbers; receives exp of the scores. Returns their sum with
// the sink.
static inline double reference_attention(int head_dim, const float *q, const float *k, const float *v, int begin,
                                         int end, double soft_cap, double sink, const float *biases, int farthest,
                                         int position, double *p, double *o) {
    double sum = exp(sink);
    for (int j = begin; j < end; j++) {
        double s = 0;
        for (int d = 0; d < head_dim; d++) s += (double)k[j * head_dim + d] * (double)q[d];
        if (biases) s += (double)biases[farthest + max_int(-farthest, min_int(farthest, j - position))];
        if (soft_cap > 0) s = soft_cap * tanh(s / soft_cap);
        sum += p[j] = exp(s);
    }
    for (int d = 0; d < head_dim; d++) {
        o[d] = 0;
        for (int j = begin; j < end; j++) o[d] += p[j] / sum * (double)v[j * head_dim + d];
    }
    return sum;
}
#endif
