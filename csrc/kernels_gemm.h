// SPDX-License-Identifier: MIT
// kernels_gemm.h - products of any dtype. Part of kernels_template.h.
//
// Naming follows BLIS: a micro-kernel multiplies a tile of S strips by T rows in registers; a panel kernel runs it over
// all strips of a group for one panel of T rows; `gemm` chooses the form of a product, and blocks it over strip groups,
// columns and panels.

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
    v16 c[GEMM_STRIPS][PANEL_ROWS];
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
enum { NARROW_TILE_ACCS = 1 };   // no panel is narrow, but tile_accumulators names the constant
#endif

// Multiplies a tile of S strips by the T rows of a panel: sums[S][T][16] += w x over `columns` columns. dtype and
// variant are compile-time constants. variant: of float weights, the x_stride above; of quantized ones, whether they
// are unpacked, and the panel narrow, or block scales are multiplied as integers.
enum { PACKED, UNPACKED, UNPACKED_FOR_NARROW, UNPACKED_FOR_INTEGER_SCALES };
typedef void micro_kernel(int dtype, int variant, int S, int T, const uint8_t *w, size_t strip_bytes, const void *x,
                          int columns, float *sums);

// The accumulators that fit into registers.
INLINE int tile_accumulators(int input, int variant) {
    if (input == INPUT_INT16 && variant == UNPACKED_FOR_NARROW) return NARROW_TILE_ACCS;
    if (is_float_input(input)) return FLOAT_TILE_ACCS;
    return input == INPUT_INT8 ? (int)INT8_TILE_ACCS : (int)INT16_TILE_ACCS;
}

// All strips of a group against one panel of T rows: sums[strip][T][16]. A single row with quantized weights alternates
// between the strips block by block: several concurrent memory streams are faster than one.
SPECIALIZED void multiply_panel(micro_kernel *const micro, const int dtype, const int variant, const int T,
                                const uint8_t *w, size_t strip_bytes, int strips, const void *inputs, int columns,
                                float *sums) {
    const int input = input_type_of(dtype), S = tile_strips(T, tile_accumulators(input, variant));
    const int step = !is_float_input(input) && T == 1 && variant == PACKED ? block_columns(dtype) : columns;
    for (int k = 0; k < columns; k += step) {
        const int n = min_int(step, columns - k);
        const uint8_t *at = w;
        if (k) at += (size_t)(k / block_columns(dtype)) * block_bytes(dtype, block_groups(dtype));
        const int32_t *x = (const int32_t *)inputs + input_words(input, k) * (size_t)T;
        int s = 0;
        for (; s + S <= strips; s += S)
            micro(dtype, variant, S, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
                  sums + (size_t)s * 16 * (size_t)T);
        for (; s < strips; s++)
            micro(dtype, variant, 1, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
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
    [LLAMAC_Q4] = { panel_kernel_q4, unpack_q4, panel_kernel_q4_unpacked, UNPACK_ABOVE_NIBBLES },
    [LLAMAC_Q4S] = { panel_kernel_q4s, unpack_q4s, panel_kernel_q4s_unpacked, UNPACK_ABOVE_NIBBLES },
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
    [LLAMAC_Q3] = { panel_kernel_q3, unpack_q3, panel_kernel_q4_unpacked, UNPACK_ABOVE_NIBBLES },
    [LLAMAC_Q2] = { panel_kernel_q2, unpack_q2, panel_kernel_q4_unpacked, UNPACK_ABOVE_NIBBLES },
    [LLAMAC_T2] = { panel_kernel_t2, unpack_t2, panel_kernel_q4s_unpacked, UNPACK_ABOVE_NIBBLES },
};

// ---- the form of a product

enum { BYTES_MAX_COLUMNS = 16384 };   // of a pass, so that its inputs as bytes fit where unpacked strips would be
_Static_assert(BYTES_MAX_COLUMNS / BLOCK_COLUMNS * (BLOCK_GROUPS * INT16_GROUP_WORDS + 1) * 4
               <= GEMM_STRIPS * UNPACKED_STRIP_BYTES, "the scratch holds a panel of bytes");

// as_bytes: the inputs become bytes. as_tiles: unpacked codes are signed, for matrix tiles.
struct product_form {
    panel_kernel *const *multiply;   // by height
    unpack_function *unpack;         // NULL: weights are multiplied as they are stored
    int pass_columns, group_strips;
    int as_bytes, as_tiles;
};

INLINE struct product_form choose_form(const struct gemm *g) {
    const int dtype = g->dtype, input = input_type_of(dtype), m = g->m;
    const struct product_kernels *const kernels = &product_kernels[dtype];
    struct product_form form = { .multiply = kernels->packed, .group_strips = GEMM_STRIPS,
                                 .as_bytes = input == INPUT_INT16 && multiplies_bytes(dtype, 0, m),
                                 .as_tiles = uses_tiles(dtype, m) };
    form.pass_columns = dtype_is_quantized(dtype) ? GEMM_KC : GEMM_KC_FLOAT;
    if (m == 1) form.pass_columns = form.as_bytes ? BYTES_MAX_COLUMNS : max_int(g->columns, 1);
    if (form.as_tiles || m > kernels->unpack_above)
        form.multiply = kernels->unpacked, form.unpack = kernels->unpack;
    if (input == INPUT_INT8 && uses_integer_scales(dtype, m)) {
        form.multiply = panel_kernel_integer_scales;
    } else if (input == INPUT_INT16 && g->fast && uses_narrow_panels(m)) {
        form.multiply = narrow_kernels(dtype), form.unpack = kernels->unpack;
    } else if (input == INPUT_INT16 && !g->fast && uses_pairs(m)) {
        form.multiply = pairs_kernels(dtype), form.unpack = unpack_as_pairs[dtype];
        form.pass_columns = PAIRS_KC, form.group_strips = PAIRS_STRIPS;
    } else if (input == INPUT_BF16 && g->fast && uses_bf16_pairs(m)) {
        form.multiply = panel_kernel_bf16_pairs, form.unpack = unpack_bf16_pairs;
    }
    return form;
}

// ---- blocks of a product

// Strips `first`, `first + spacing` and so on, `count` of them. Those of a full group are a quarter of the range apart,
// or half of it with two: each of the streams reads memory without a jump, and the memory after a strip is what its
// stream reads next. The last group has the rest.
struct strip_group { int first, count, spacing; };
INLINE struct strip_group strip_group(const struct gemm *g, int group_strips, int index) {
    const int full = (g->last - g->first) / group_strips, rest = (g->last - g->first) % group_strips;
    if (index < full) return (struct strip_group){ g->first + index, group_strips, full };
    return (struct strip_group){ g->first + group_strips * full, rest, 1 };
}

// Panel p has the rows from `start` to `start + height`.
struct row_panel { int start, height; };
INLINE struct row_panel row_panel(const struct gemm *g, int p) {
    const int max_height = panel_rows(input_type_of(g->dtype)), start = panel_start(g->m, max_height, p);
    return (struct row_panel){ start, panel_start(g->m, max_height, p + 1) - start };
}
INLINE int row_panels(const struct gemm *g) { return panel_count(g->m, panel_rows(input_type_of(g->dtype))); }

// What the scratch of a product holds: unpacked strips, or the inputs as bytes; then the sums of a group,
// [panel][strip][row of the panel][16].
INLINE uint8_t *unpacked_strip(const struct gemm *g, int i) {
    return (uint8_t *)g->scratch + (size_t)i * UNPACKED_STRIP_BYTES;
}
INLINE float *group_sums(const struct gemm *g, const struct strip_group *group, const struct row_panel *panel) {
    float *const sums = (float *)(void *)unpacked_strip(g, GEMM_STRIPS);
    return sums + (size_t)panel->start * 16 * (size_t)group->count;
}

// Clears the sums of a group, and what its unpacked strips say of their weights.
INLINE void clear_sums(const struct gemm *g, const struct product_form *form, const struct strip_group *group) {
    memset(group_sums(g, group, &(struct row_panel){ 0, g->m }), 0,
           sizeof(float) * 16 * (size_t)group->count * (size_t)g->m);
    for (int i = 0; form->unpack && i < group->count; i++) clear_small_weights(unpacked_strip(g, i));
}

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

// The inputs of a panel from column k, which starts a pass of `columns` columns. Those as bytes are made for the first
// group only, if a pass has all columns.
INLINE const int32_t *panel_inputs(const struct gemm *g, const struct product_form *form,
                                   const struct strip_group *group, const struct row_panel *panel, int k, int columns) {
    const int input = input_type_of(g->dtype);
    const int32_t *x = (const int32_t *)g->x + (size_t)panel->start * input_words(input, g->columns)
                       + input_words(input, k) * (size_t)panel->height;
    if (!form->as_bytes) return x;
    if (group->first == g->first || g->columns > form->pass_columns) inputs_to_bytes(x, columns, g->scratch);
    return g->scratch;
}

// Unpacks a pass of each strip of a group, once for all panels.
INLINE void unpack_group(const struct gemm *g, const struct product_form *form, int strips, const uint8_t *w,
                         size_t stride, int columns) {
    for (int i = 0; i < strips; i++) {
        form->unpack(w + (size_t)i * stride, columns, unpacked_strip(g, i));
        if (form->as_tiles) make_codes_signed(g->dtype, columns, unpacked_strip(g, i));
    }
}

// ---- outputs

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

INLINE void store_group(const struct gemm *g, const struct strip_group *group) {
    for (int p = 0; p < row_panels(g); p++) {
        const struct row_panel panel = row_panel(g, p);
        const float *sums = group_sums(g, group, &panel);
        for (int i = 0; i < group->count; i++)
            for (int t = 0; t < panel.height; t++, sums += 16)
                epilogue(g, group->first + i * group->spacing, panel.start + t, sums);
    }
}

// Over strip groups, then passes over the columns, then panels. The sums of a group stay in memory between passes. With
// many rows, a pass is unpacked once for all panels while the next pass is prefetched.
static void gemm(const struct gemm *g) {
    const struct product_form form = choose_form(g);
    const int panels = row_panels(g), groups = ceil_div(g->last - g->first, form.group_strips);
    if (form.as_tiles) tiles_configure(g->dtype, g->m);
    for (int index = 0; index < groups; index++) {
        const struct strip_group group = strip_group(g, form.group_strips, index);
        const size_t stride = (size_t)group.spacing * g->strip_bytes;
        clear_sums(g, &form, &group);
        for (int k = 0; k < g->columns; k += form.pass_columns) {
            const int columns = min_int(form.pass_columns, g->columns - k);
            const uint8_t *const w = g->w + (size_t)group.first * g->strip_bytes + column_offset(g->dtype, k);
            const size_t bytes = column_offset(g->dtype, k + form.pass_columns) - column_offset(g->dtype, k);
            if (form.unpack) unpack_group(g, &form, group.count, w, stride, columns);
            for (int p = 0; p < panels; p++) {
                if (cancelled(g->cancel)) goto end;
                const struct row_panel panel = row_panel(g, p);
                const int32_t *const x = panel_inputs(g, &form, &group, &panel, k, columns);
                if (panels >= PREFETCH_MIN_PANELS) prefetch_next_pass(w, stride, group.count, bytes, p, panels);
                form.multiply[panel.height](form.unpack ? unpacked_strip(g, 0) : w,
                                            form.unpack ? (size_t)UNPACKED_STRIP_BYTES : stride, group.count, x,
                                            columns, group_sums(g, &group, &panel));
            }
        }
        store_group(g, &group);
    }
end:
    if (form.as_tiles) tiles_end();
}
