// SPDX-License-Identifier: MIT
// kernels_template.h - every kernel, written once against the SIMD layer (simd_scalar.h specifies it) and compiled
// once for each instruction set.
//
// Each kernels_<isa>.c includes its simd_*.h, defines KERNELS (the table's name), and includes this file. kernels.h
// specifies what the kernels compute. Products are in kernels_gemm.h.
#include <limits.h>
#include <math.h>
#include <string.h>
#include "exp_negative.h"
#include "format.h"
#include "half.h"
#include "kernels.h"

// A function that is inlined to specialize it for its callers' constants. The scalar build redefines this to share
// one copy.
#ifndef SPECIALIZED
#define SPECIALIZED INLINE
#endif
#include "functions.h"
#include "kernels_gemm.h"

// ---- one row of a float matrix

INLINE float element(const int dtype, const uint8_t *p) {
    float f;
    uint16_t h;
    if (dtype == LLAMAC_F32) { memcpy(&f, p, 4); return f; }
    memcpy(&h, p, 2);
    return dtype == LLAMAC_F16 ? f32_from_f16(h) : f32_from_bf16(h);
}
INLINE void gather_float(const int dtype, const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) {
    const size_t size = element_bytes(dtype);
    const uint8_t *p = w + (size_t)(row / STRIP_ROWS) * strip_bytes + (size_t)(row % STRIP_ROWS) * size;
    for (int k = 0; k < columns; k++, p += 16 * size) y[k] = element(dtype, p);
}
GATHER(f32, gather_float, LLAMAC_F32)
GATHER(f16, gather_float, LLAMAC_F16)
GATHER(bf16, gather_float, LLAMAC_BF16)

// ---- row functions: n floats, 16 at a time, then the tail. They touch the first n only.

// Runs a body for each vector of n floats. The body sees i, the vector's first index, and accesses memory through
// LOAD and STORE, which are masked in the tail. KEEP(v, neutral) replaces the lanes beyond the tail.
#define FOR_VECTORS(n, ...) do { \
        int i = 0; \
        for (; i + 16 <= (n); i += 16) { enum { is_tail = 0, lanes = 16 }; __VA_ARGS__; } \
        if (i < (n)) { enum { is_tail = 1 }; const int lanes = (n) - i; __VA_ARGS__; } } while (0)
#define LOAD(p) __builtin_choose_expr(is_tail, v16_load_n(p, lanes), v16_load(p))
#define STORE(p, v) __builtin_choose_expr(is_tail, v16_store_n(p, v, lanes), v16_store(p, v))
#define KEEP(v, neutral) __builtin_choose_expr(is_tail, v16_blend_n(v, neutral, lanes), v)

static void add(const float *x, int n, float *y) {
    FOR_VECTORS(n, STORE(y + i, v16_add(LOAD(y + i), LOAD(x + i))));
}

// Sums in the norms are 16 partial sums by index mod 16, reduced by v16_reduce_add.
static void rms_norm(const float *x, const float *w, const float *bias, float eps, int n, float *y) {
    (void)bias;
    v16 squares = v16_set1(0), v;
    FOR_VECTORS(n, v = LOAD(x + i); squares = v16_fma(v, v, squares));
    const v16 scale = v16_set1(1.0f / sqrtf(v16_reduce_add(squares) / (float)n + eps));
    FOR_VECTORS(n, STORE(y + i, v16_mul(v16_mul(LOAD(x + i), scale), LOAD(w + i))));
}

// The order of operations is that of BitNet's training: 127 / max, rounded; the product; the nearest integer, ties to
// even; the quotient.
static float round_row(const float *x, int n, float *y) {
    v16 top = v16_set1(0), poison = v16_set1(0), v;
    FOR_VECTORS(n, v = LOAD(x + i); top = v16_max(v16_abs(v), top); poison = v16_fma(v, v16_set1(0), poison));
    const float max = v16_reduce_max(top), bad = v16_reduce_add(poison),
                inverse = bad == bad ? INT8_LIMIT / (max > ROUNDED_ROW_MIN ? max : ROUNDED_ROW_MIN) : bad;
    const v16 factor = v16_set1(inverse), shift = v16_set1(0x1.8p23f);
    FOR_VECTORS(n, v = v16_mul(LOAD(x + i), factor);
                STORE(y + i, v16_div(v16_sub(v16_add(v, shift), shift), factor)));
    return 1 / inverse;
}

static void layer_norm(const float *x, const float *w, const float *bias, float eps, int n, float *y) {
    v16 sum = v16_set1(0), squares = v16_set1(0), v;
    FOR_VECTORS(n, sum = v16_add(sum, LOAD(x + i)));
    const v16 mean = v16_set1(v16_reduce_add(sum) / (float)n);
    FOR_VECTORS(n, v = KEEP(v16_sub(LOAD(x + i), mean), v16_set1(0)); squares = v16_fma(v, v, squares));
    const v16 scale = v16_set1(1.0f / sqrtf(v16_reduce_add(squares) / (float)n + eps));
    const v16 zero = v16_set1(0);
    FOR_VECTORS(n, v = v16_mul(v16_sub(LOAD(x + i), mean), scale);
                STORE(y + i, v16_fma(v, LOAD(w + i), bias ? LOAD(bias + i) : zero)));
}

INLINE void activate_row(const int activation, const float *gate, const float *up, int n, float *y) {
    v16 v;
    FOR_VECTORS(n, v = v16_activate(activation, LOAD(gate + i)); STORE(y + i, up ? v16_mul(v, LOAD(up + i)) : v));
}
static void activate(int activation, const float *gate, const float *up, int n, float *y) {
    switch (activation) {   // a constant in each case compiles to a loop without branches
    case ACTIVATION_SILU: activate_row(ACTIVATION_SILU, gate, up, n, y); break;
    case ACTIVATION_GELU_TANH: activate_row(ACTIVATION_GELU_TANH, gate, up, n, y); break;
    case ACTIVATION_GELU_ERF: activate_row(ACTIVATION_GELU_ERF, gate, up, n, y); break;
    case ACTIVATION_RELU: activate_row(ACTIVATION_RELU, gate, up, n, y); break;
    case ACTIVATION_RELU2: activate_row(ACTIVATION_RELU2, gate, up, n, y); break;
    default: activate_row(ACTIVATION_QUICK_GELU, gate, up, n, y); break;
    }
}

static void xielu_row(float *y, int n, float alpha_p, float alpha_n) {
    const v16 p = v16_set1(alpha_p), negative = v16_set1(alpha_n);
    FOR_VECTORS(n, STORE(y + i, v16_xielu(LOAD(y + i), p, negative)));
}

static void gate_row(float *y, const float *gate, int n) {
    FOR_VECTORS(n, STORE(y + i, v16_mul_sigmoid(LOAD(y + i), LOAD(gate + i))));
}

static void clamp_row(float *y, int n, float low, float high, float offset) {
    const v16 lows = v16_set1(low), highs = v16_set1(high), c = v16_set1(offset);
    FOR_VECTORS(n, STORE(y + i, v16_clamp(LOAD(y + i), lows, highs, c)));
}

static void scale_row(float *y, int n, float scale, float cap) {
    const v16 s = v16_set1(scale), c = v16_set1(cap);
    if (cap > 0) FOR_VECTORS(n, STORE(y + i, v16_soft_cap(v16_mul(LOAD(y + i), s), c)));
    else FOR_VECTORS(n, STORE(y + i, v16_mul(LOAD(y + i), s)));
}

static void rotate(float *x, const float *cosines, const float *sines, int half) {
    float *z = x + half;
    v16 a, b, c, s;
    FOR_VECTORS(half, a = LOAD(x + i); b = LOAD(z + i); c = LOAD(cosines + i); s = LOAD(sines + i);
                STORE(x + i, v16_fnma(b, s, v16_mul(a, c))); STORE(z + i, v16_fma(a, s, v16_mul(b, c))));
}

#include "kernels_delta.h"
#include "kernels_values.h"
#include "kernels_attention.h"
#include "kernels_measure.h"
#include "kernels_sample.h"
#include "quantize_template.h"

// ---- the table

const struct kernels KERNELS = {
    .name = KERNELS_NAME,
    .panel_rows = { [INPUT_F32] = PANEL_ROWS, [INPUT_INT8] = PANEL_ROWS, [INPUT_INT16] = INT16_PANEL_ROWS,
                    [INPUT_BF16] = PANEL_ROWS },
    .gemm = gemm,
    .pack = { [INPUT_F32] = pack_f32, [INPUT_INT8] = pack_int8, [INPUT_INT16] = pack_int16,
              [INPUT_BF16] = pack_f32 },
    .pack_bf16 = pack_bf16,
    .pack_int16_product = pack_int16_product,
    .round_row = round_row,
    .pack_rounded = pack_rounded,
    .attend = { [LLAMAC_F32] = attend_f32, [LLAMAC_F16] = attend_f16, [LLAMAC_Q8] = attend_q8 },
    .gather = { [LLAMAC_F32] = gather_f32, [LLAMAC_F16] = gather_f16, [LLAMAC_BF16] = gather_bf16,
                [LLAMAC_Q8] = gather_q8, [LLAMAC_Q4] = gather_q4, [LLAMAC_Q4S] = gather_q4s,
                [LLAMAC_Q4_0] = gather_q4_0, [LLAMAC_Q4_1] = gather_q4_1, [LLAMAC_Q5_0] = gather_q5_0,
                [LLAMAC_Q5_1] = gather_q5_1, [LLAMAC_Q8_0] = gather_q8_0, [LLAMAC_Q4_K] = gather_q4_k,
                [LLAMAC_Q5_K] = gather_q5_k, [LLAMAC_Q6_K] = gather_q6_k, [LLAMAC_IQ4_NL] = gather_iq4_nl,
                [LLAMAC_IQ4_XS] = gather_iq4_xs, [LLAMAC_MXFP4] = gather_mxfp4,
                [LLAMAC_Q6] = gather_q6, [LLAMAC_Q3] = gather_q3, [LLAMAC_Q2] = gather_q2, [LLAMAC_T2] = gather_t2 },
    .attend_merge = attend_merge,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .activate = activate,
    .xielu = xielu_row,
    .gate = gate_row,
    .clamp = clamp_row,
    .add = add,
    .scale = scale_row,
    .softmax = softmax,
    .block_maxima = block_maxima,
    .exponentials = exponentials,
    .rotate = rotate,
    .convolve = convolve,
    .unit_norm = unit_norm,
    .delta_rule = delta_rule,
    .ssm_gates = ssm_gates,
    .ssm_scan = ssm_scan,
    .store_key = { [LLAMAC_F32] = store_key_f32, [LLAMAC_F16] = store_key_f16, [LLAMAC_Q8] = store_key_q8 },
    .store_value = { [LLAMAC_F32] = store_value_f32, [LLAMAC_F16] = store_value_f16, [LLAMAC_Q8] = store_value_q8 },
    .load_key = { [LLAMAC_F32] = load_key_f32, [LLAMAC_F16] = load_key_f16, [LLAMAC_Q8] = load_key_q8 },
    .load_value = { [LLAMAC_F32] = load_value_f32, [LLAMAC_F16] = load_value_f16, [LLAMAC_Q8] = load_value_q8 },
    .quantize = quantize_strips,
    .read_block = read_block,
    .peak = { [INPUT_F32] = { peak_f32, peak_f32 }, [INPUT_INT8] = { peak_int8, peak_int8 },
              [INPUT_INT16] = { peak_int16, peak_fast_int16 }, [INPUT_BF16] = { peak_f32, peak_fast_bf16 } },
};
