// SPDX-License-Identifier: MIT
// kernels_template.h - every kernel, written once against the SIMD layer (simd_scalar.h specifies it) and compiled
// once for each instruction set.
//
// Each kernels_<isa>.c includes its simd_*.h, defines KERNELS (the table's name), and includes this file. kernels.h
// specifies what the kernels compute. Naming follows BLIS: a micro-kernel multiplies a tile of S strips by T rows in
// registers; a panel kernel runs it over all strips of a group for one panel of T rows; `gemm` blocks over strip
// groups, columns and panels.
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

// ---- loading float weights: the 16 rows' values of one column. bf16 stays in the SIMD layer's permuted order until
// the epilogue.

enum { WEIGHT_BYTES_F32 = 4, WEIGHT_BYTES_HALF = 2 };
INLINE size_t element_bytes(int dtype) { return dtype == LLAMAC_F32 ? WEIGHT_BYTES_F32 : WEIGHT_BYTES_HALF; }

INLINE v16 load_weights(const int dtype, const uint8_t *w) {
    if (dtype == LLAMAC_F32) return v16_load((const float *)(const void *)w);
    if (dtype == LLAMAC_F16) return v16_load_f16((const uint16_t *)(const void *)w);
    return v16_load_bf16_permuted((const uint16_t *)(const void *)w);
}
INLINE v16 restore_lane_order(int dtype, v16 sum) { return dtype == LLAMAC_BF16 ? v16_unpermute(sum) : sum; }

// ---- float products

enum {
    PREFETCH_BYTES_FLOAT = 512,   // prefetch distance of float weights: hardware prefetchers stop at page ends
    PREFETCH_MIN_PANELS = 5,      // from this many panels, a pass takes long enough to prefetch the next pass's weights
};

// Each sum of a tile, unrolled.
#define FOR_TILE(s, t) UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++)

// sums[S][T][16] += w x over `columns` columns. The sums stay in registers: 2 S T of them on AVX2.
// x_stride: 0 for inputs in a panel; otherwise each row is contiguous and rows are x_stride floats apart.
INLINE void micro_kernel_float(const int dtype, const int x_stride, const int S, const int T, const uint8_t *w,
                               size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const float *x = inputs;
    v16 c[4][PANEL_ROWS];
    const size_t step = 16 * element_bytes(dtype);
    FOR_TILE(s, t) c[s][t] = v16_load(sums + 16 * (s * T + t));
    for (int k = 0; k < columns; k++, w += step, x += x_stride ? 1 : T) {
        if (S * T <= 4)
            UNROLL for (int s = 0; s < S; s++) __builtin_prefetch(w + (size_t)s * strip_bytes + PREFETCH_BYTES_FLOAT);
        UNROLL for (int s = 0; s < S; s++) {
            const v16 weights = load_weights(dtype, w + (size_t)s * strip_bytes);
            UNROLL for (int t = 0; t < T; t++)
                c[s][t] = v16_fma_scalar(weights, x[x_stride ? x_stride * t : t], c[s][t]);
        }
    }
    FOR_TILE(s, t) v16_store(sums + 16 * (s * T + t), c[s][t]);
}

// Strips per tile for T rows, given the number of accumulators that fit. Few rows take several strips, for enough
// independent dependency chains.
INLINE int tile_strips(int T, int accumulators) { return max_int(1, min_int(GEMM_STRIPS, accumulators / T)); }

#if !defined(SIMD_NARROW)
enum { NARROW_TILE_ACCS = 1 };
#endif

// Multiplies a tile of S strips by the T rows of a panel: sums[S][T][16] += w x over `columns` columns. dtype and form
// are compile-time constants. form: of float weights, the x_stride above; of quantized ones, whether they are unpacked,
// and the panel narrow, or block scales are multiplied as integers.
enum { UNPACKED = 1, UNPACKED_FOR_NARROW, UNPACKED_FOR_INTEGER_SCALES };
typedef void micro_kernel(int dtype, int form, int S, int T, const uint8_t *w, size_t strip_bytes, const void *x,
                          int columns, float *sums);

// The accumulators that fit into registers.
INLINE int tile_accumulators(int input, int form) {
    if (input == INPUT_INT16 && form == UNPACKED_FOR_NARROW) return NARROW_TILE_ACCS;
    if (is_float_input(input)) return FLOAT_TILE_ACCS;
    return input == INPUT_INT8 ? (int)Q4_TILE_ACCS : (int)INT16_TILE_ACCS;
}

// All strips of a group against one panel of T rows: sums[strip][T][16]. A single row with quantized weights alternates
// between the strips block by block: several concurrent memory streams are faster than one.
SPECIALIZED void multiply_panel(micro_kernel *const micro, const int dtype, const int form, const int T,
                                const uint8_t *w, size_t strip_bytes, int strips, const void *inputs, int columns,
                                float *sums) {
    const int input = input_type_of(dtype), S = tile_strips(T, tile_accumulators(input, form));
    const int step = !is_float_input(input) && T == 1 && !form ? block_columns(dtype) : columns;
    for (int k = 0; k < columns; k += step) {
        const int n = min_int(step, columns - k);
        const uint8_t *at = w;
        if (k) at += (size_t)(k / block_columns(dtype)) * block_bytes(dtype, block_groups(dtype));
        const int32_t *x = (const int32_t *)inputs + input_words(input, k) * (size_t)T;
        int s = 0;
        for (; s + S <= strips; s += S)
            micro(dtype, form, S, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
                  sums + (size_t)s * 16 * (size_t)T);
        for (; s < strips; s++)
            micro(dtype, form, 1, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
                  sums + (size_t)s * 16 * (size_t)T);
    }
}

// A panel kernel for each height T, in a table by height. Each height is a function of its own, `body` with T as a
// compile-time constant: all in one function get worse registers (18% slower with int16 inputs on AVX2).
typedef void panel_kernel(const uint8_t *w, size_t strip_bytes, int strips, const void *x, int columns, float *sums);
#define PANEL_KERNEL_OF_HEIGHT(name, T, body, ...) \
    static __attribute__((noinline)) void name##_x##T(const uint8_t *w, size_t strip_bytes, int strips, const void *x, \
                                                      int columns, float *sums) { \
        body(__VA_ARGS__, T, w, strip_bytes, strips, x, columns, sums); \
    }
#define FEW_HEIGHTS(name, ...) \
    PANEL_KERNEL_OF_HEIGHT(name, 1, __VA_ARGS__) \
    PANEL_KERNEL_OF_HEIGHT(name, 2, __VA_ARGS__) \
    PANEL_KERNEL_OF_HEIGHT(name, 3, __VA_ARGS__) \
    PANEL_KERNEL_OF_HEIGHT(name, 4, __VA_ARGS__)
#define HIGHEST_HEIGHTS(name, ...) \
    PANEL_KERNEL_OF_HEIGHT(name, 5, __VA_ARGS__) \
    PANEL_KERNEL_OF_HEIGHT(name, 6, __VA_ARGS__)
#define ALL_HEIGHTS(name, ...) \
    FEW_HEIGHTS(name, __VA_ARGS__) \
    HIGHEST_HEIGHTS(name, __VA_ARGS__)
_Static_assert(PANEL_ROWS == 6, "ALL_HEIGHTS lists all heights");
enum { FEW_ROWS = 4, MANY_ROWS = 8 };
#define FEW_ROWS_KERNEL(name, ...) \
    FEW_HEIGHTS(name, __VA_ARGS__) \
    static panel_kernel *const name[] = { NULL, name##_x1, name##_x2, name##_x3, name##_x4 };
// For products of MANY_ROWS and more rows: their panels have at least 4 rows, and unpacking pays for all dtypes.
#define MANY_ROWS_KERNEL(name, ...) \
    PANEL_KERNEL_OF_HEIGHT(name, 4, __VA_ARGS__) \
    HIGHEST_HEIGHTS(name, __VA_ARGS__) \
    static panel_kernel *const name[] = { NULL, NULL, NULL, NULL, name##_x4, name##_x5, name##_x6 };
#define PANEL_KERNEL(name, ...) \
    ALL_HEIGHTS(name, __VA_ARGS__) \
    static panel_kernel *const name[] = { NULL, name##_x1, name##_x2, name##_x3, name##_x4, name##_x5, name##_x6 };
PANEL_KERNEL(panel_kernel_f32, multiply_panel, micro_kernel_float, LLAMAC_F32, 0)
PANEL_KERNEL(panel_kernel_f16, multiply_panel, micro_kernel_float, LLAMAC_F16, 0)
PANEL_KERNEL(panel_kernel_bf16, multiply_panel, micro_kernel_float, LLAMAC_BF16, 0)

// Unpacks one pass of a strip of floats for panel_kernel_f32. bf16 stays permuted.
INLINE void unpack_float(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    for (int k = 0; k < columns; k++)
        v16_store((float *)(void *)(to + LINE_BYTES * k),
                  load_weights(dtype, w + (size_t)k * 16 * element_bytes(dtype)));
}

// ---- entries of tables: `body` with the dtype as a compile-time constant

typedef void unpack_function(const uint8_t *w, int columns, uint8_t *to);
#define UNPACK(name, body, dtype) \
    static __attribute__((noinline)) void unpack_##name(const uint8_t *w, int columns, uint8_t *to) { \
        body(dtype, w, columns, to); \
    }
UNPACK(f16, unpack_float, LLAMAC_F16)
UNPACK(bf16, unpack_float, LLAMAC_BF16)

#define GATHER(name, body, dtype) \
    static void gather_##name(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { \
        body(dtype, w, strip_bytes, row, columns, y); \
    }

#include "kernels_quant.h"
#include "kernels_bf16.h"

// ---- products of any dtype

// How products with a dtype are computed: with more rows than `unpack_above`, it pays to unpack each pass once for all
// of them.
static const struct product_kernels {
    panel_kernel *const *packed;     // by height
    unpack_function *unpack;
    panel_kernel *const *unpacked;   // by height
    int unpack_above;
} product_kernels[LLAMAC_N_DTYPES] = {
    [LLAMAC_F32] = { panel_kernel_f32, NULL, NULL, INT_MAX },
    [LLAMAC_F16] = { panel_kernel_f16, unpack_f16, panel_kernel_f32, UNPACK_ABOVE_F16 },
    [LLAMAC_BF16] = { panel_kernel_bf16, unpack_bf16, panel_kernel_f32, UNPACK_ABOVE_BF16 },
    [LLAMAC_Q8] = { panel_kernel_q8, unpack_q8, panel_kernel_unpacked, UNPACK_ABOVE_BYTES },
    [LLAMAC_Q4] = { panel_kernel_q4, unpack_q4, panel_kernel_q4_unpacked, UNPACK_ABOVE_Q4 },
    [LLAMAC_Q4S] = { panel_kernel_q4s, unpack_q4s, panel_kernel_q4_unpacked, UNPACK_ABOVE_Q4 },
    [LLAMAC_Q4_0] = { panel_kernel_q4_0, unpack_q4_0, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_Q4_1] = { panel_kernel_q4_1, unpack_q4_1, panel_kernel_minimums_unpacked, FEW_ROWS },
    [LLAMAC_Q5_0] = { panel_kernel_q5_0, unpack_q5_0, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_Q5_1] = { panel_kernel_q5_1, unpack_q5_1, panel_kernel_minimums_unpacked, FEW_ROWS },
    [LLAMAC_Q8_0] = { panel_kernel_q8_0, unpack_q8_0, panel_kernel_unpacked, UNPACK_ABOVE_BYTES },
    [LLAMAC_Q4_K] = { panel_kernel_q4_k, unpack_q4_k, panel_kernel_minimums_unpacked, FEW_ROWS },
    [LLAMAC_Q5_K] = { panel_kernel_q5_k, unpack_q5_k, panel_kernel_minimums_unpacked, FEW_ROWS },
    [LLAMAC_Q6_K] = { panel_kernel_q6_k, unpack_q6_k, panel_kernel_half_spans_unpacked, FEW_ROWS },
    [LLAMAC_IQ4_NL] = { panel_kernel_iq4_nl, unpack_iq4_nl, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_IQ4_XS] = { panel_kernel_iq4_xs, unpack_iq4_xs, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_MXFP4] = { panel_kernel_mxfp4, unpack_mxfp4, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_Q6] = { panel_kernel_q6, unpack_q6, panel_kernel_unpacked, FEW_ROWS },
    [LLAMAC_Q3] = { panel_kernel_q3, unpack_q3, panel_kernel_q4_unpacked, UNPACK_ABOVE_Q4 },
    [LLAMAC_Q2] = { panel_kernel_q2, unpack_q2, panel_kernel_q4_unpacked, UNPACK_ABOVE_Q4 },
    [LLAMAC_T2] = { panel_kernel_t2, unpack_t2, panel_kernel_q4_unpacked, UNPACK_ABOVE_Q4 },
};

// Offset in a strip of the weights of column k, which starts a pass.
INLINE size_t column_offset(int dtype, int k) {
    if (!dtype_is_quantized(dtype)) return (size_t)k * 16 * element_bytes(dtype);
    return row_scale_bytes(dtype) + (size_t)(k / block_columns(dtype)) * block_bytes(dtype, block_groups(dtype));
}

// Prefetches one of `parts` parts of the `bytes` bytes that follow a pass in each strip: the next pass, or the start
// of the strip that comes next in memory. Locality 2: into L2.
INLINE void prefetch_next_pass(const uint8_t *w, size_t stride, int strips, size_t bytes, int part, int parts) {
    const size_t lines = bytes / LINE_BYTES;
    const size_t first = lines * (size_t)part / (size_t)parts, last = lines * (size_t)(part + 1) / (size_t)parts;
    for (int i = 0; i < strips; i++)
        for (size_t l = first; l < last; l++) __builtin_prefetch(w + (size_t)i * stride + bytes + l * LINE_BYTES, 0, 2);
}

// The epilogue for one row's 16 outputs of strip s: row scale, output scale, bias, input weight, then store or add.
INLINE void epilogue(const struct gemm *g, int s, int t, const float *sums) {
    const int o = s * STRIP_ROWS, n = min_int(STRIP_ROWS, g->rows - o);
    v16 sum = restore_lane_order(g->dtype, v16_load(sums));
    if (dtype_table[g->dtype].has_row_scales)
        sum = v16_mul(sum, v16_load((const float *)(const void *)(g->w + (size_t)s * g->strip_bytes)));
    if (g->scales) sum = v16_mul(sum, v16_load_n(g->scales + o, n));
    if (g->bias) sum = v16_add(sum, v16_load_n(g->bias + o, n));
    if (g->copy) {
        float *copy = g->copy + (size_t)t * (size_t)g->rows + o;
        v16_store_n(copy, g->accumulate_copy ? v16_add(v16_load_n(copy, n), sum) : sum, n);
    }
    if (g->row_weights) sum = v16_mul(sum, v16_set1(g->row_weights[t]));
    float *y = g->y + (size_t)(g->y_rows ? g->y_rows[t] : t) * g->y_stride + o;
    if (n == STRIP_ROWS) v16_store(y, g->accumulate ? v16_add(v16_load(y), sum) : sum);
    else v16_store_n(y, g->accumulate ? v16_add(v16_load_n(y, n), sum) : sum, n);
}

enum { BYTES_MAX_COLUMNS = 16384 };   // of a pass, so that its inputs as bytes fit where unpacked strips would be
_Static_assert(BYTES_MAX_COLUMNS / BLOCK_COLUMNS * (BLOCK_GROUPS * INT16_GROUP_WORDS + 1) * 4
               <= GEMM_STRIPS * UNPACKED_STRIP_BYTES, "the scratch holds a panel of bytes");

// Loops over strip groups, then passes over the columns, then panels. The sums of a strip group stay in memory
// between passes. With many rows, a pass is unpacked once for all panels while the next pass is prefetched. A single
// row takes all columns in one pass. The strips of a group are a quarter of the range apart: each of the four streams
// reads memory without a jump, and the memory after a strip is what its stream reads next.
static void gemm(const struct gemm *g) {
    const int dtype = g->dtype, input = input_type_of(dtype), max_height = panel_rows(input);
    const int panels = panel_count(g->m, max_height);
    const struct product_kernels *const kernels = &product_kernels[dtype];
    const int as_bytes = input == INPUT_INT16 && multiplies_bytes(dtype, 0, g->m);
    const int single_row_kc = as_bytes ? BYTES_MAX_COLUMNS : max_int(g->columns, 1);
    const int as_tiles = uses_tiles(dtype, g->m),
              integer_scales = input == INPUT_INT8 && uses_integer_scales(g->m),
              narrow = g->rounded && input == INPUT_INT16 && uses_narrow_panels(g->m),
              pairs = !g->rounded && input == INPUT_INT16 && uses_pairs(g->m),
              bf16_pairs = g->rounded && input == INPUT_BF16 && uses_bf16_pairs(g->m);
    const int kc = g->m == 1 ? single_row_kc : pairs ? PAIRS_KC : dtype_is_quantized(dtype) ? GEMM_KC : GEMM_KC_FLOAT;
    const int unpacked = as_tiles || narrow || pairs || bf16_pairs || g->m > kernels->unpack_above;
    panel_kernel *const *const panel_kernels =
        integer_scales ? panel_kernel_integer_scales : narrow ? narrow_kernels(dtype) : pairs ? pairs_kernels(dtype) :
        bf16_pairs ? panel_kernel_bf16_pairs : unpacked ? kernels->unpacked : kernels->packed;
    unpack_function *const unpack =
        pairs ? unpack_as_pairs[dtype] : bf16_pairs ? unpack_bf16_pairs : kernels->unpack;
    const int group_strips = pairs ? PAIRS_STRIPS : GEMM_STRIPS;
    const int full_groups = (g->last - g->first) / group_strips, rest = (g->last - g->first) % group_strips;
    const size_t row_words = input_words(input, g->columns);
    uint8_t *const unpack_buffer = g->scratch;
    float *const group_sums = (float *)(void *)(unpack_buffer + (size_t)GEMM_STRIPS * UNPACKED_STRIP_BYTES);
    if (as_tiles) tiles_configure(dtype, g->m);
    for (int group = 0; group < full_groups + (rest > 0); group++) {
        const int full = group < full_groups, strips = full ? group_strips : rest, spacing = full ? full_groups : 1;
        const int s = g->first + (full ? group : group_strips * full_groups);
        const size_t stride = (size_t)spacing * g->strip_bytes;
        memset(group_sums, 0, sizeof(float) * 16 * (size_t)strips * (size_t)g->m);
        for (int i = 0; bf16_pairs && i < strips; i++)
            clear_small_weights(unpack_buffer + (size_t)i * UNPACKED_STRIP_BYTES);
        for (int k = 0; k < g->columns; k += kc) {
            const int columns = min_int(kc, g->columns - k);
            const uint8_t *w = g->w + (size_t)s * g->strip_bytes + column_offset(dtype, k);
            const size_t bytes = column_offset(dtype, k + kc) - column_offset(dtype, k);
            if (unpacked) {
                for (int i = 0; i < strips; i++) {
                    uint8_t *strip = unpack_buffer + (size_t)i * UNPACKED_STRIP_BYTES;
                    unpack(w + (size_t)i * stride, columns, strip);
                    if (as_tiles) make_codes_signed(dtype, columns, strip);
                }
            }
            for (int p = 0; p < panels; p++) {
                if (cancelled(g->cancel)) goto end;
                const int start = panel_start(g->m, max_height, p), T = panel_start(g->m, max_height, p + 1) - start;
                const int32_t *x =
                    (const int32_t *)g->x + (size_t)start * row_words + input_words(input, k) * (size_t)T;
                float *sums = group_sums + (size_t)start * 16 * (size_t)strips;
                if (as_bytes) {   // once, unless there are several passes
                    if (group == 0 || g->columns > kc) inputs_to_bytes(x, columns, g->scratch);
                    x = g->scratch;
                }
                if (panels >= PREFETCH_MIN_PANELS) prefetch_next_pass(w, stride, strips, bytes, p, panels);
                if (unpacked) panel_kernels[T](unpack_buffer, UNPACKED_STRIP_BYTES, strips, x, columns, sums);
                else panel_kernels[T](w, stride, strips, x, columns, sums);
            }
        }
        for (int p = 0; p < panels; p++) {
            const int start = panel_start(g->m, max_height, p), T = panel_start(g->m, max_height, p + 1) - start;
            const float *sums = group_sums + (size_t)start * 16 * (size_t)strips;
            for (int i = 0; i < strips; i++)
                for (int t = 0; t < T; t++) epilogue(g, s + i * spacing, start + t, sums + 16 * (i * T + t));
        }
    }
end:
    if (as_tiles) tiles_end();
}

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
    .pack_product = pack_product,
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
    .peak = { [INPUT_F32] = peak_f32, [INPUT_INT8] = peak_int8, [INPUT_INT16] = peak_int16,
              [INPUT_BF16] = peak_f32 },
};
