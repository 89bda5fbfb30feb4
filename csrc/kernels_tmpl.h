// SPDX-License-Identifier: MIT
// kernels_tmpl.h - every inner loop, written once on the vector vocabulary and compiled once per instruction set.
//
// Included by kernels_<isa>.c after the vocabulary, with KERNELS naming the table. Contracts stand in kernels.h.
#include <limits.h>
#include <string.h>
#include "format.h"
#include "kernels.h"

// A function that is compiled into each of its callers with what is constant there, unless the vocabulary wants it once.
#ifndef SHARED
#define SHARED INLINE
#endif

// ---- loading weights: how one k of a strip becomes 16 floats. bf16 keeps the vocabulary's own lane order until `finish`.

enum { WEIGHT_BYTES_F32 = 4, WEIGHT_BYTES_HALF = 2 };
INLINE size_t element_bytes(const int dtype) { return dtype == LLAMAC_F32 ? WEIGHT_BYTES_F32 : WEIGHT_BYTES_HALF; }

INLINE v16 load_weights(const int dtype, const uint8_t *w) {
    if (dtype == LLAMAC_F32) return v16_load((const float *)(const void *)w);
    if (dtype == LLAMAC_F16) return v16_load_f16((const uint16_t *)(const void *)w);
    return v16_load_bf16_mixed((const uint16_t *)(const void *)w);
}
INLINE v16 finish_lanes(const int dtype, v16 sum) { return dtype == LLAMAC_BF16 ? v16_unmix(sum) : sum; }

// ---- products: tiles of S strips x T rows

enum {
    FETCH_AHEAD = 512,   // bytes that weights are fetched ahead of their use; the hardware's prefetchers stop at page ends
    FETCH_PANELS = 5,    // from so many panels on, a pass takes long enough to fetch the next one's weights
};

// sums[S][T][16] += over `columns` k. The sums live in registers in between: 2 S T of them on AVX2. Inputs lie as a panel, or each row by
// itself, `apart` numbers from one to the next.
INLINE void tile(const int dtype, const int apart, const int S, const int T, const uint8_t *w, size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const float *x = inputs;
    v16 c[4][PANEL_ROWS];
    const size_t step = 16 * element_bytes(dtype);
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_load(sums + 16 * (s * T + t));
    for (int k = 0; k < columns; k++, w += step, x += apart ? 1 : T) {
        if (S * T <= 4) UNROLL for (int s = 0; s < S; s++) __builtin_prefetch(w + (size_t)s * strip_bytes + FETCH_AHEAD);
        UNROLL for (int s = 0; s < S; s++) {
            const v16 weights = load_weights(dtype, w + (size_t)s * strip_bytes);
            UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_fma1(weights, x[apart ? apart * t : t], c[s][t]);
        }
    }
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) v16_store(sums + 16 * (s * T + t), c[s][t]);
}

// Strips side by side for T rows: with few rows several, so that there are enough independent sums.
INLINE int strips_for(int T, int in_flight) { return max_int(1, min_int(GEMM_STRIPS, in_flight / T)); }

// All strips of a group for one panel: sums[strip][T][16].
SHARED void tile_group(const int dtype, const int apart, const int T, const uint8_t *w, size_t strip_bytes, int strips, const void *x, int columns, float *sums) {
    const int S = strips_for(T, SUMS_IN_FLIGHT);
    int s = 0;
    for (; s + S <= strips; s += S) tile(dtype, apart, S, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns, sums + (size_t)s * 16 * (size_t)T);
    for (; s < strips; s++) tile(dtype, apart, 1, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns, sums + (size_t)s * 16 * (size_t)T);
}

// A group's tiles as functions by T: `body` with a constant T.
typedef void tile_function(const uint8_t *w, size_t strip_bytes, int strips, const void *x, int columns, float *sums);
#define TILE(name, T, body, ...) \
    static __attribute__((noinline)) void name##_##T(const uint8_t *w, size_t strip_bytes, int strips, const void *x, int columns, float *sums) { \
        body(__VA_ARGS__, T, w, strip_bytes, strips, x, columns, sums); \
    }
#define TILES(name, ...) \
    TILE(name, 1, __VA_ARGS__) TILE(name, 2, __VA_ARGS__) TILE(name, 3, __VA_ARGS__) \
    TILE(name, 4, __VA_ARGS__) TILE(name, 5, __VA_ARGS__) TILE(name, 6, __VA_ARGS__) \
    static tile_function *const name[PANEL_ROWS + 1] = { 0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6 };
TILES(tiles_f32, tile_group, LLAMAC_F32, 0)
TILES(tiles_f16, tile_group, LLAMAC_F16, 0)
TILES(tiles_bf16, tile_group, LLAMAC_BF16, 0)
#include "kernels_quant.h"

INLINE tile_function *const *tiles_of(const int dtype, const int expanded) {
    switch (dtype) {
    case LLAMAC_F32: return tiles_f32;
    case LLAMAC_F16: return expanded ? tiles_f32 : tiles_f16;
    case LLAMAC_BF16: return expanded ? tiles_f32 : tiles_bf16;   // in the vocabulary's lane order, too
    case LLAMAC_Q8: return expanded ? tiles_q8_expanded : tiles_q8;
    case LLAMAC_Q4: return expanded ? tiles_q4_expanded : tiles_q4;
    default: return expanded ? tiles_q4_expanded : tiles_q4s;
    }
}

// A pass's weights as its tiles for many rows read them.
INLINE void expand(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    if (dtype == LLAMAC_Q8) expand_q8(w, columns, to);
    else if (dtype_is_quantized(dtype)) expand_q4(dtype, w, columns, to);
    else for (int k = 0; k < columns; k++) v16_store((float *)(void *)(to + LINE_BYTES * k), load_weights(dtype, w + (size_t)k * 16 * element_bytes(dtype)));
}
// The number of rows from which on unpacking pays.
INLINE int expand_rows(const int dtype) {
    switch (dtype) {
    case LLAMAC_F32: return INT_MAX;
    case LLAMAC_F16: return EXPAND_ROWS_F16;
    case LLAMAC_BF16: return EXPAND_ROWS_BF16;
    case LLAMAC_Q8: return EXPAND_ROWS_Q8;
    default: return EXPAND_ROWS;
    }
}

// Where the weights of column k begin in a strip; k is a multiple of a pass.
INLINE size_t column_offset(const int dtype, int k) {
    if (!dtype_is_quantized(dtype)) return (size_t)k * 16 * element_bytes(dtype);
    return LINE_BYTES + (size_t)(k / BLOCK_COLUMNS) * block_bytes(dtype, BLOCK_GROUPS);
}

// A share of what follows the `bytes` of a pass in each of its strips: the next pass, or the next strip's first.
INLINE void fetch_next(const uint8_t *w, size_t stride, int strips, size_t bytes, int part, int parts) {
    const size_t lines = bytes / LINE_BYTES, first = lines * (size_t)part / (size_t)parts, last = lines * (size_t)(part + 1) / (size_t)parts;
    for (int i = 0; i < strips; i++)
        for (size_t l = first; l < last; l++) __builtin_prefetch(w + (size_t)i * stride + bytes + l * LINE_BYTES, 0, 2);
}

// Scale, bias and weight, then store or add; `sums` is one row's 16 outputs of strip s.
INLINE void finish(const struct gemm *g, const int dtype, int s, int t, const float *sums) {
    const int o = s * STRIP_ROWS, n = min_int(STRIP_ROWS, g->rows - o);
    v16 sum = finish_lanes(dtype, v16_load(sums));
    if (dtype_is_quantized(dtype)) sum = v16_mul(sum, v16_load((const float *)(const void *)(g->w + (size_t)s * g->strip_bytes)));
    if (g->scales) sum = v16_mul(sum, v16_load_n(g->scales + o, n));
    if (g->bias) sum = v16_add(sum, v16_load_n(g->bias + o, n));
    if (g->copy) {
        float *copy = g->copy + (size_t)t * (size_t)g->rows + o;
        v16_store_n(copy, g->add_copy ? v16_add(v16_load_n(copy, n), sum) : sum, n);
    }
    if (g->weights) sum = v16_mul(sum, v16_set1(g->weights[t]));
    float *y = g->y + (size_t)(g->to ? g->to[t] : t) * g->y_stride + o;
    if (n == STRIP_ROWS) v16_store(y, g->add ? v16_add(v16_load(y), sum) : sum);
    else v16_store_n(y, g->add ? v16_add(v16_load_n(y, n), sum) : sum, n);
}

// Groups of strips -> passes over k -> panels. The sums of the whole group stay in memory between passes. With many rows the weights
// of a pass are unpacked once for all of them, and those of the next are fetched meanwhile; one row takes all of k in one pass. The strips
// of a group are a quarter of the whole range apart: so each of four streams runs through memory without a jump, and what is fetched ahead
// is always what comes next.
INLINE void gemm(const int dtype, const struct gemm *g) {
    const int panels = panel_count(g->m), input = input_of(dtype), pass = g->m == 1 ? max_int(g->columns, 1) : dtype_is_quantized(dtype) ? GEMM_COLUMNS : GEMM_COLUMNS_FLOAT;
    const int expanded = g->m > expand_rows(dtype);
    const int quarter = (g->last - g->first) / GEMM_STRIPS, rest = (g->last - g->first) % GEMM_STRIPS;
    const size_t row_words = input_words(input, g->columns);
    tile_function *const *const tiles = tiles_of(dtype, expanded);
    uint8_t *const unpacked = g->scratch;
    float *const group_sums = (float *)(void *)(unpacked + (size_t)GEMM_STRIPS * EXPANDED_STRIP_BYTES);
    for (int group = 0; group < quarter + (rest > 0); group++) {
        const int whole = group < quarter, strips = whole ? GEMM_STRIPS : rest, apart = whole ? quarter : 1;
        const int s = g->first + (whole ? group : GEMM_STRIPS * quarter);
        const size_t stride = (size_t)apart * g->strip_bytes;
        memset(group_sums, 0, sizeof(float) * 16 * (size_t)strips * (size_t)g->m);
        for (int k = 0; k < g->columns; k += pass) {
            const int columns = min_int(pass, g->columns - k);
            const uint8_t *w = g->w + (size_t)s * g->strip_bytes + column_offset(dtype, k);
            const size_t bytes = column_offset(dtype, k + pass) - column_offset(dtype, k);
            if (expanded)
                for (int i = 0; i < strips; i++) expand(dtype, w + (size_t)i * stride, columns, unpacked + (size_t)i * EXPANDED_STRIP_BYTES);
            for (int p = 0; p < panels; p++) {
                if (cancelled(g->cancel)) return;
                const int start = panel_start(g->m, p), T = panel_start(g->m, p + 1) - start;
                const int32_t *x = (const int32_t *)g->x + (size_t)start * row_words + input_words(input, k) * (size_t)T;
                float *sums = group_sums + (size_t)start * 16 * (size_t)strips;
                if (panels >= FETCH_PANELS) fetch_next(w, stride, strips, bytes, p, panels);
                if (expanded) tiles[T](unpacked, EXPANDED_STRIP_BYTES, strips, x, columns, sums);
                else tiles[T](w, stride, strips, x, columns, sums);
            }
        }
        for (int p = 0; p < panels; p++) {
            const int start = panel_start(g->m, p), T = panel_start(g->m, p + 1) - start;
            const float *sums = group_sums + (size_t)start * 16 * (size_t)strips;
            for (int i = 0; i < strips; i++)
                for (int t = 0; t < T; t++) finish(g, dtype, s + i * apart, start + t, sums + 16 * (i * T + t));
        }
    }
}
static void gemm_f32(const struct gemm *g) { gemm(LLAMAC_F32, g); }
static void gemm_f16(const struct gemm *g) { gemm(LLAMAC_F16, g); }
static void gemm_bf16(const struct gemm *g) { gemm(LLAMAC_BF16, g); }
static void gemm_q8(const struct gemm *g) { gemm(LLAMAC_Q8, g); }
static void gemm_q4(const struct gemm *g) { gemm(LLAMAC_Q4, g); }
static void gemm_q4s(const struct gemm *g) { gemm(LLAMAC_Q4S, g); }

// ---- one row of a matrix

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
static void gather_f32(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_float(LLAMAC_F32, w, strip_bytes, row, columns, y); }
static void gather_f16(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_float(LLAMAC_F16, w, strip_bytes, row, columns, y); }
static void gather_bf16(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_float(LLAMAC_BF16, w, strip_bytes, row, columns, y); }

// ---- functions of a row: n numbers, 16 at a time, the rest by itself. Only the first n are touched.

#define ROW(n, whole, rest) do { \
        int i = 0; \
        for (; i + 16 <= (n); i += 16) { whole; } \
        if (i < (n)) { const int some = (n) - i; rest; } } while (0)

static void add(const float *x, int n, float *y) {
    ROW(n, v16_store(y + i, v16_add(v16_load(y + i), v16_load(x + i))),
        v16_store_n(y + i, v16_add(v16_load_n(y + i, some), v16_load_n(x + i, some)), some));
}

// Sums of squares are 16 partial sums by index mod 16.
static void norm_rms(const float *x, const float *w, const float *bias, float eps, int n, float *y) {
    (void)bias;
    v16 squares = v16_set1(0), v;
    ROW(n, v = v16_load(x + i); squares = v16_fma(v, v, squares), v = v16_load_n(x + i, some); squares = v16_fma(v, v, squares));
    const v16 scale = v16_set1(1.0f / sqrtf(v16_sum(squares) / (float)n + eps));
    ROW(n, v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), scale), v16_load(w + i))),
        v16_store_n(y + i, v16_mul(v16_mul(v16_load_n(x + i, some), scale), v16_load_n(w + i, some)), some));
}

static void norm_layer(const float *x, const float *w, const float *bias, float eps, int n, float *y) {
    v16 sum = v16_set1(0), squares = v16_set1(0), v;
    ROW(n, sum = v16_add(sum, v16_load(x + i)), sum = v16_add(sum, v16_load_n(x + i, some)));
    const v16 mean = v16_set1(v16_sum(sum) / (float)n);
    ROW(n, v = v16_sub(v16_load(x + i), mean); squares = v16_fma(v, v, squares),
        v = v16_first(v16_sub(v16_load_n(x + i, some), mean), v16_set1(0), some); squares = v16_fma(v, v, squares));
    const v16 scale = v16_set1(1.0f / sqrtf(v16_sum(squares) / (float)n + eps));
    const v16 none = v16_set1(0);
    ROW(n, v = v16_mul(v16_sub(v16_load(x + i), mean), scale); v16_store(y + i, v16_fma(v, v16_load(w + i), bias ? v16_load(bias + i) : none)),
        v = v16_mul(v16_sub(v16_load_n(x + i, some), mean), scale);
        v16_store_n(y + i, v16_fma(v, v16_load_n(w + i, some), bias ? v16_load_n(bias + i, some) : none), some));
}

// exp(x) - 1 = power * part + (power - 1) for -87 <= x <= 88 and for numbers beyond, which count as these: power = 2^n, and part the polynomial
// of what remains (Cephes expf's coefficients, 2 ulp).
struct exp_parts { v16 power, part; };
INLINE struct exp_parts exp_parts(v16 x) {
    const v16 shift = v16_set1(0x1.8p23f), low = v16_set1(-87.0f);
    const v16 clamped = v16_min(v16_set1(88.0f), v16_max(low, x));   // a NaN passes: max and min then return their second operand
    const v16 t = v16_fma(clamped, v16_set1(0x1.715476p0f), shift), n = v16_sub(t, shift);
    v16 r = v16_fnma(n, v16_set1(0x1.62ep-1f), clamped);             // ln 2 in two parts; the first times n is exact
    r = v16_fnma(n, v16_set1(0x1.0bfbe8p-15f), r);
    v16 p = v16_set1(1.9875691500e-4f);
    p = v16_fma(p, r, v16_set1(1.3981999507e-3f));
    p = v16_fma(p, r, v16_set1(8.3334519073e-3f));
    p = v16_fma(p, r, v16_set1(4.1665795894e-2f));
    p = v16_fma(p, r, v16_set1(1.6666665459e-1f));
    p = v16_fma(p, r, v16_set1(5.0000001201e-1f));
    return (struct exp_parts){ v16_exp2_of_shifted(t), v16_fma(p, v16_mul(r, r), r) };
}

// exp for x <= 88; 0 below -87, where f32 would leave its normal range.
SHARED v16 exp16(v16 x) {
    const struct exp_parts e = exp_parts(x);
    return v16_zero_below(v16_mul(v16_add(e.part, v16_set1(1.0f)), e.power), x, v16_set1(-87.0f));
}

// tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which is exact to its last bits near 0, too; then x's sign.
SHARED v16 tanh16(v16 x) {
    const v16 zero = v16_set1(0), one = v16_set1(1.0f), size = v16_abs(x);
    const struct exp_parts parts = exp_parts(v16_add(size, size));
    const v16 e = v16_fma(parts.part, parts.power, v16_sub(parts.power, one)), y = v16_div(e, v16_add(e, v16_set1(2.0f)));
    return v16_sub(v16_zero_below(y, x, zero), v16_zero_below(y, v16_sub(zero, x), zero));   // one of the two is 0
}

// x times the logistic function of g.
INLINE v16 gated_by(v16 x, v16 g) { return v16_div(x, v16_add(v16_set1(1.0f), exp16(v16_sub(v16_set1(0), g)))); }

// x * Phi(x), with erfc by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7) on |x| / sqrt(2): no cancellation on either side.
INLINE v16 gelu_erf(v16 x) {
    const v16 z = v16_mul(v16_abs(x), v16_set1(0x1.6a09e6p-1f)), one = v16_set1(1.0f);
    const v16 t = v16_div(one, v16_fma(z, v16_set1(0.3275911f), one));
    v16 p = v16_set1(1.061405429f);
    p = v16_fma(p, t, v16_set1(-1.453152027f));
    p = v16_fma(p, t, v16_set1(1.421413741f));
    p = v16_fma(p, t, v16_set1(-0.284496736f));
    p = v16_fma(p, t, v16_set1(0.254829592f));
    const v16 erfc = v16_mul(v16_mul(p, t), exp16(v16_sub(v16_set1(0), v16_mul(z, z))));
    return v16_sub(v16_max(v16_set1(0), x), v16_mul(v16_mul(v16_set1(0.5f), v16_abs(x)), erfc));
}

// GELU's tanh form (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh u) = x logistic(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE v16 gelu_tanh(v16 x) {
    const v16 cubic = v16_fma(v16_mul(v16_set1(0.044715f), v16_mul(x, x)), x, x);
    return gated_by(x, v16_mul(v16_set1(1.5957691216f), cubic));
}

INLINE v16 act16(const int activation, v16 x) {
    switch (activation) {
    case ACTIVATION_SILU: return gated_by(x, x);
    case ACTIVATION_GELU_TANH: return gelu_tanh(x);
    case ACTIVATION_GELU_ERF: return gelu_erf(x);
    case ACTIVATION_RELU: return v16_max(v16_set1(0), x);
    default: return gated_by(x, v16_mul(v16_set1(1.702f), x));
    }
}
INLINE void act_row(const int activation, const float *gate, const float *up, int n, float *y) {
    v16 v;
    ROW(n, v = act16(activation, v16_load(gate + i)); v16_store(y + i, up ? v16_mul(v, v16_load(up + i)) : v),
        v = act16(activation, v16_load_n(gate + i, some)); v16_store_n(y + i, up ? v16_mul(v, v16_load_n(up + i, some)) : v, some));
}
static void activate(int activation, const float *gate, const float *up, int n, float *y) {
    switch (activation) {   // a constant in each branch lets the compiler make one loop of each
    case ACTIVATION_SILU: act_row(ACTIVATION_SILU, gate, up, n, y); break;
    case ACTIVATION_GELU_TANH: act_row(ACTIVATION_GELU_TANH, gate, up, n, y); break;
    case ACTIVATION_GELU_ERF: act_row(ACTIVATION_GELU_ERF, gate, up, n, y); break;
    case ACTIVATION_RELU: act_row(ACTIVATION_RELU, gate, up, n, y); break;
    default: act_row(ACTIVATION_QUICK_GELU, gate, up, n, y); break;
    }
}

// Between -cap and cap: cap tanh(x / cap).
INLINE v16 cap16(v16 x, v16 cap) { return v16_mul(cap, tanh16(v16_div(x, cap))); }

static void scale_row(float *y, int n, float scale, float cap) {
    const v16 s = v16_set1(scale), c = v16_set1(cap);
    if (cap > 0) ROW(n, v16_store(y + i, cap16(v16_mul(v16_load(y + i), s), c)), v16_store_n(y + i, cap16(v16_mul(v16_load_n(y + i, some), s), c), some));
    else ROW(n, v16_store(y + i, v16_mul(v16_load(y + i), s)), v16_store_n(y + i, v16_mul(v16_load_n(y + i, some), s), some));
}

static void rotate(float *x, const float *cosines, const float *sines, int half) {
    float *z = x + half;
    v16 a, b, c, s;
    ROW(half, a = v16_load(x + i); b = v16_load(z + i); c = v16_load(cosines + i); s = v16_load(sines + i);
        v16_store(x + i, v16_fnma(b, s, v16_mul(a, c))); v16_store(z + i, v16_fma(a, s, v16_mul(b, c))),
        a = v16_load_n(x + i, some); b = v16_load_n(z + i, some); c = v16_load_n(cosines + i, some); s = v16_load_n(sines + i, some);
        v16_store_n(x + i, v16_fnma(b, s, v16_mul(a, c)), some); v16_store_n(z + i, v16_fma(a, s, v16_mul(b, c)), some));
}

#include "kernels_attention.h"
#include "kernels_measure.h"

// ---- the table

const struct kernels KERNELS = {
    .name = KERNELS_NAME,
    .gemm = { [LLAMAC_F32] = gemm_f32, [LLAMAC_F16] = gemm_f16, [LLAMAC_BF16] = gemm_bf16,
              [LLAMAC_Q8] = gemm_q8, [LLAMAC_Q4] = gemm_q4, [LLAMAC_Q4S] = gemm_q4s },
    .pack = { [INPUT_F32] = pack_f32, [INPUT_INT8] = pack_int8, [INPUT_INT16] = pack_int16 },
    .attend = { [LLAMAC_F32] = attend_f32, [LLAMAC_F16] = attend_f16 },
    .gather = { [LLAMAC_F32] = gather_f32, [LLAMAC_F16] = gather_f16, [LLAMAC_BF16] = gather_bf16,
                [LLAMAC_Q8] = gather_q8, [LLAMAC_Q4] = gather_q4, [LLAMAC_Q4S] = gather_q4s },
    .norm_rms = norm_rms,
    .norm_layer = norm_layer,
    .activate = activate,
    .add = add,
    .scale = scale_row,
    .softmax = softmax,
    .rotate = rotate,
    .store_key = { [LLAMAC_F32] = store_key_f32, [LLAMAC_F16] = store_key_f16 },
    .store_value = { [LLAMAC_F32] = store_value_f32, [LLAMAC_F16] = store_value_f16 },
    .read_block = read_block,
    .peak = { [INPUT_F32] = peak_f32, [INPUT_INT8] = peak_int8, [INPUT_INT16] = peak_int16 },
};
