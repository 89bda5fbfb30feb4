// SPDX-License-Identifier: MIT
// kernels_tmpl.h - every inner loop, written once on the vector vocabulary and compiled once per instruction set.
//
// Included by kernels_<isa>.c after the vocabulary, with KERNELS naming the table. Contracts stand in kernels.h.
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

// Bytes that the weights are fetched ahead of their use; the hardware's prefetchers stop at page ends.
enum { FETCH_AHEAD = 512 };

// sums[S][T][16] += over `columns` k. The sums live in registers in between: 2 S T of them on AVX2.
INLINE void tile(const int dtype, const int S, const int T, const uint8_t *w, size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const float *x = inputs;
    v16 c[4][PANEL_ROWS];
    const size_t step = 16 * element_bytes(dtype);
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_load(sums + 16 * (s * T + t));
    for (int k = 0; k < columns; k++, w += step, x += T) {
        if (S * T <= 4) UNROLL for (int s = 0; s < S; s++) __builtin_prefetch(w + (size_t)s * strip_bytes + FETCH_AHEAD);
        UNROLL for (int s = 0; s < S; s++) {
            const v16 weights = load_weights(dtype, w + (size_t)s * strip_bytes);
            UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_fma1(weights, x[t], c[s][t]);
        }
    }
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) v16_store(sums + 16 * (s * T + t), c[s][t]);
}

// Strips side by side for T rows: with few rows several, so that there are enough independent sums.
INLINE int strips_for(int T, int in_flight) { return max_int(1, min_int(GEMM_STRIPS, in_flight / T)); }

// All strips of a group for one panel: sums[strip][T][16].
SHARED void tile_group(const int dtype, const int T, const uint8_t *w, size_t strip_bytes, int strips, const void *x, int columns, float *sums) {
    const int S = strips_for(T, SUMS_IN_FLIGHT);
    int s = 0;
    for (; s + S <= strips; s += S) tile(dtype, S, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns, sums + (size_t)s * 16 * (size_t)T);
    for (; s < strips; s++) tile(dtype, 1, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns, sums + (size_t)s * 16 * (size_t)T);
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
TILES(tiles_f32, tile_group, LLAMAC_F32)
TILES(tiles_f16, tile_group, LLAMAC_F16)
TILES(tiles_bf16, tile_group, LLAMAC_BF16)
#include "kernels_quant.h"

INLINE tile_function *const *tiles_of(const int dtype, const int expanded) {
    switch (dtype) {
    case LLAMAC_F32: return tiles_f32;
    case LLAMAC_F16: return tiles_f16;
    case LLAMAC_BF16: return tiles_bf16;
    case LLAMAC_Q8: return expanded ? tiles_q8_expanded : tiles_q8;
    case LLAMAC_Q4: return expanded ? tiles_q4_expanded : tiles_q4;
    default: return expanded ? tiles_q4_expanded : tiles_q4s;
    }
}

// Where the weights of column k begin in a strip; k is a multiple of GEMM_COLUMNS.
INLINE size_t column_offset(const int dtype, int k) {
    if (!dtype_is_quantized(dtype)) return (size_t)k * 16 * element_bytes(dtype);
    return LINE_BYTES + (size_t)(k / BLOCK_COLUMNS) * block_bytes(dtype, BLOCK_GROUPS);
}

// Scale and bias, then store or add; `sums` is one row's 16 outputs of strip s.
INLINE void finish(const struct gemm *g, const int dtype, int s, int t, const float *sums) {
    const int o = s * STRIP_ROWS, n = min_int(STRIP_ROWS, g->rows - o);
    v16 sum = finish_lanes(dtype, v16_load(sums));
    if (dtype_is_quantized(dtype)) sum = v16_mul(sum, v16_load((const float *)(const void *)(g->w + (size_t)s * g->strip_bytes)));
    if (g->bias) sum = v16_add(sum, v16_load_n(g->bias + o, n));
    if (g->copy) v16_store_n(g->copy + (size_t)t * (size_t)g->rows + o, sum, n);
    float *y = g->y + (size_t)t * g->y_stride + o;
    if (n == STRIP_ROWS) v16_store(y, g->add ? v16_add(v16_load(y), sum) : sum);
    else v16_store_n(y, g->add ? v16_add(v16_load_n(y, n), sum) : sum, n);
}

// Groups of strips -> passes over k -> panels. The sums of the whole group stay in memory between passes. With many rows the codes
// of a pass are unpacked once for all of them; one row takes all of k in one pass. The strips of a group are a quarter of the whole range
// apart: so each of four streams runs through memory without a jump, and what is fetched ahead is always what comes next.
INLINE void gemm(const int dtype, const struct gemm *g) {
    const int panels = panel_count(g->m), input = input_of(dtype), pass = g->m == 1 ? max_int(g->columns, 1) : GEMM_COLUMNS;
    const int expanded = dtype_is_quantized(dtype) && g->m > (dtype == LLAMAC_Q8 ? EXPAND_ROWS_Q8 : EXPAND_ROWS);
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
            if (expanded)
                for (int i = 0; i < strips; i++) expand(dtype, w + (size_t)i * stride, columns, unpacked + (size_t)i * EXPANDED_STRIP_BYTES);
            for (int p = 0; p < panels; p++) {
                if (cancelled(g->cancel)) return;
                const int start = panel_start(g->m, p), T = panel_start(g->m, p + 1) - start;
                const int32_t *x = (const int32_t *)g->x + (size_t)start * row_words + input_words(input, k) * (size_t)T;
                float *sums = group_sums + (size_t)start * 16 * (size_t)strips;
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
    ROW(n, v = v16_mul(v16_sub(v16_load(x + i), mean), scale); v16_store(y + i, v16_fma(v, v16_load(w + i), v16_load(bias + i))),
        v = v16_mul(v16_sub(v16_load_n(x + i, some), mean), scale);
        v16_store_n(y + i, v16_fma(v, v16_load_n(w + i, some), v16_load_n(bias + i, some)), some));
}

// exp for x <= 88: 2^n * polynomial (Cephes expf's coefficients, 2 ulp); 0 below -87, where f32 would leave its normal range.
SHARED v16 exp16(v16 x) {
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
    p = v16_add(v16_fma(p, v16_mul(r, r), r), v16_set1(1.0f));
    return v16_zero_below(v16_mul(p, v16_exp2_of_shifted(t)), x, low);
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

static void rotate(float *x, const float *cosines, const float *sines, int half) {
    float *z = x + half;
    v16 a, b, c, s;
    ROW(half, a = v16_load(x + i); b = v16_load(z + i); c = v16_load(cosines + i); s = v16_load(sines + i);
        v16_store(x + i, v16_fnma(b, s, v16_mul(a, c))); v16_store(z + i, v16_fma(a, s, v16_mul(b, c))),
        a = v16_load_n(x + i, some); b = v16_load_n(z + i, some); c = v16_load_n(cosines + i, some); s = v16_load_n(sines + i, some);
        v16_store_n(x + i, v16_fnma(b, s, v16_mul(a, c)), some); v16_store_n(z + i, v16_fma(a, s, v16_mul(b, c)), some));
}

// ---- KV cache: a page holds, per layer and head, keys as KV_PAGE / 16 strips of head_dim columns, then values as strips of 16
// dimensions of KV_PAGE columns.

// 16 numbers as the cache holds them: in f32 as they are, in f16 saturated.
INLINE void store16(const int dtype, void *p, v16 x) {
    if (dtype == LLAMAC_F32) v16_store(p, x);
    else v16_store_f16(p, v16_max(v16_set1(-65504.0f), v16_min(v16_set1(65504.0f), x)));   // a NaN passes
}
INLINE void store_key(const int dtype, uint8_t *keys, int slot, int head_dim, const float *x) {
    const size_t size = element_bytes(dtype), strip = float_strip_bytes(dtype, head_dim);
    uint8_t *p = keys + (size_t)(slot / STRIP_ROWS) * strip + (size_t)(slot % STRIP_ROWS) * size;
    uint8_t sixteen[64];
    for (int d = 0; d < head_dim; d += 16) {
        const int n = min_int(16, head_dim - d);
        store16(dtype, sixteen, v16_load_n(x + d, n));
        for (int i = 0; i < n; i++) memcpy(p + (size_t)(d + i) * 16 * size, sixteen + (size_t)i * size, size);
    }
}
INLINE void store_value(const int dtype, uint8_t *values, int slot, int head_dim, const float *x) {
    const size_t size = element_bytes(dtype);
    for (int d = 0; d < head_dim; d += 16)
        store16(dtype, values + ((size_t)d * KV_PAGE + (size_t)slot * 16) * size, v16_load_n(x + d, min_int(16, head_dim - d)));
}
static void store_key_f32(uint8_t *keys, int slot, int head_dim, const float *x) { store_key(LLAMAC_F32, keys, slot, head_dim, x); }
static void store_key_f16(uint8_t *keys, int slot, int head_dim, const float *x) { store_key(LLAMAC_F16, keys, slot, head_dim, x); }
static void store_value_f32(uint8_t *values, int slot, int head_dim, const float *x) { store_value(LLAMAC_F32, values, slot, head_dim, x); }
static void store_value_f16(uint8_t *values, int slot, int head_dim, const float *x) { store_value(LLAMAC_F16, values, slot, head_dim, x); }

// ---- attention

// Scores of positions [first, first + n) of one page for T queries: scores[t][position], 16 at a time.
INLINE void page_scores(const int dtype, const struct attend *a, const uint8_t *keys, int n, float *sums, float *scores, size_t stride) {
    const int T = a->n_queries, strips = ceil_div(n, STRIP_ROWS);
    memset(sums, 0, sizeof(float) * 16 * (size_t)strips * (size_t)T);
    tiles_of(dtype, 0)[T](keys, float_strip_bytes(dtype, a->head_dim), strips, a->q, a->head_dim, sums);
    for (int s = 0; s < strips; s++)
        for (int t = 0; t < T; t++) v16_store(scores + (size_t)t * stride + 16 * s, v16_load(sums + 16 * (s * T + t)));
}

// One query's softmax numerators over a block: p[i] = exp(score - max) for the first `visible` positions, 0 for the rest of the n
// (a multiple of 16). Returns max and sum.
INLINE void softmax_block(const float *scores, int visible, int n, float *p, float *max, float *sum) {
    const v16 nothing = v16_set1(-__builtin_inff());
    v16 top = nothing, total = v16_set1(0);
    for (int i = 0; i < n; i += 16)
        top = v16_max(top, v16_first(v16_load(scores + i), nothing, max_int(0, min_int(16, visible - i))));
    const float m = v16_max_lane(top);
    for (int i = 0; i < n; i += 16) {
        const v16 e = v16_first(exp16(v16_sub(v16_load(scores + i), v16_set1(m))), v16_set1(0), max_int(0, min_int(16, visible - i)));
        v16_store(p + i, e);
        total = v16_add(total, e);
    }
    *max = m;
    *sum = v16_sum(total);
}

INLINE float exp1(float x) { float y[16]; v16_store(y, exp16(v16_set1(x))); return y[0]; }

// Merges a block's (m, l, o) into the running one; the first block is taken as it is.
INLINE void merge_block(int first, float m, float l, const float *o, int n, float *run_m, float *run_l, float *run_o) {
    if (first) {
        *run_m = m, *run_l = l;
        memcpy(run_o, o, sizeof(float) * (size_t)n);
        return;
    }
    const float top = *run_m > m ? *run_m : m, keep = exp1(*run_m - top), take = exp1(m - top);
    const v16 kept = v16_set1(keep), taken = v16_set1(take);
    for (int i = 0; i < n; i += 16) v16_store(run_o + i, v16_fma(v16_load(o + i), taken, v16_mul(v16_load(run_o + i), kept)));
    *run_l = fused_multiply_add(l, take, *run_l * keep);
    *run_m = top;
}

INLINE void attend(const int dtype, const struct attend *a) {
    const int T = a->n_queries, width = value_width(a->head_dim), value_strips = width / 16;
    const size_t value_strip = float_strip_bytes(dtype, KV_PAGE);
    float *scores = a->scratch, *p = scores + PANEL_ROWS * ATTENTION_BLOCK, *o = p + PANEL_ROWS * ATTENTION_BLOCK, *o_row = o + PANEL_ROWS * width;
    float *sums = o_row + PANEL_ROWS * width, run_m[PANEL_ROWS] = { 0 }, run_l[PANEL_ROWS] = { 0 };
    int last = 0;
    for (int t = 0; t < T; t++) last = max_int(last, a->visible[t]);
    for (int b = 0; b < last && !cancelled(a->cancel); b += ATTENTION_BLOCK) {
        const int n = min_int(ATTENTION_BLOCK, last - b), padded = ceil_div(n, 16) * 16;
        for (int i = 0; i < n; i += KV_PAGE) {
            const uint8_t *keys = a->kv.pages[(b + i) / KV_PAGE] + a->kv.key_offset;
            page_scores(dtype, a, keys, min_int(KV_PAGE, n - i), sums, scores + i, ATTENTION_BLOCK);
        }
        if (a->scores) {
            for (int t = 0; t < T; t++) {
                const int seen = max_int(0, min_int(n, a->visible[t] - b));
                memcpy(a->scores + (size_t)t * a->scores_stride + b, scores + (size_t)t * ATTENTION_BLOCK, sizeof(float) * (size_t)seen);
            }
            continue;
        }
        float m[PANEL_ROWS], l[PANEL_ROWS];
        for (int t = 0; t < T; t++) {
            const int seen = max_int(0, min_int(n, a->visible[t] - b));
            float *row = scores + (size_t)t * ATTENTION_BLOCK;
            softmax_block(row, seen, padded, row, &m[t], &l[t]);
            for (int i = 0; i < n; i++) p[i * T + t] = row[i];
        }
        memset(o, 0, sizeof(float) * (size_t)(T * width));
        for (int i = 0; i < n; i += KV_PAGE) {
            const uint8_t *values = a->kv.pages[(b + i) / KV_PAGE] + a->kv.value_offset;
            tiles_of(dtype, 0)[T](values, value_strip, value_strips, p + i * T, min_int(KV_PAGE, n - i), o);
        }
        for (int t = 0; t < T; t++) {
            if (a->visible[t] <= b) continue;
            for (int s = 0; s < value_strips; s++) v16_store(o_row + 16 * s, v16_load(o + 16 * (s * T + t)));
            merge_block(b == 0, m[t], l[t], o_row, width, &run_m[t], &run_l[t], a->out + (size_t)t * (size_t)width);
        }
    }
    if (a->scores) return;
    for (int t = 0; t < T; t++) {
        float *out = a->out + (size_t)t * (size_t)width;
        const v16 whole = v16_set1(run_l[t]);
        for (int i = 0; i < width; i += 16) v16_store(out + i, v16_div(v16_load(out + i), whole));
    }
}
static void attend_f32(const struct attend *a) { attend(LLAMAC_F32, a); }
static void attend_f16(const struct attend *a) { attend(LLAMAC_F16, a); }

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
    .rotate = rotate,
    .store_key = { [LLAMAC_F32] = store_key_f32, [LLAMAC_F16] = store_key_f16 },
    .store_value = { [LLAMAC_F32] = store_value_f32, [LLAMAC_F16] = store_value_f16 },
    .read_block = read_block,
    .peak = { [INPUT_F32] = peak_f32, [INPUT_INT8] = peak_int8, [INPUT_INT16] = peak_int16 },
};
