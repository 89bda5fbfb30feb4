// SPDX-License-Identifier: MIT
// kernels_quant.h - products with quantized weights. Inputs are quantized to int8 or int16, the micro-kernels
// multiply codes by codes, and sums stay exact integers until scales are applied. Part of kernels_template.h.
// kernels.h specifies the order of operations (struct gemm) and the panels; dtype.h the weights.

// Prefetch distances in bytes: into L2 for a single row, which reads each weight from memory once, and into L1 (768 to
// 1536 measure alike). Reading a line of codes prefetches one line; starting a block prefetches as many lines as its
// scales take.
enum { PREFETCH_BYTES_L2 = 4608, PREFETCH_BYTES_QUANT = 1152 };
INLINE void prefetch_quant(const int T, const uint8_t *p) {
    if (T == 1) __builtin_prefetch(p + PREFETCH_BYTES_L2, 0, 2);
    __builtin_prefetch(p + PREFETCH_BYTES_QUANT);
}
INLINE void prefetch_scales(const int dtype, const int T, const uint8_t *block) {
    UNROLL for (size_t i = 0; i < block_scale_bytes(dtype, block_groups(dtype)); i += LINE_BYTES)
        prefetch_quant(T, block + i);
}

INLINE float float_at(const int32_t *p) { float f; memcpy(&f, p, 4); return f; }

// ---- packing inputs

static void pack_f32(struct panel_row to, const float *row, int columns) {
    float *p = (float *)(void *)to.panel + to.row;
    if (to.height == 1) memcpy(p, row, sizeof(float) * (size_t)columns);
    else for (int k = 0; k < columns; k++) p[(size_t)k * (size_t)to.height] = row[k];
}

INLINE v16 load_up_to_16(const float *x, int n) { return n >= 16 ? v16_load(x) : v16_load_n(x, max_int(0, n)); }

// The scale that maps the largest of n magnitudes to `limit`, and its inverse. Both are 0 if all are below 2^-100.
// With a NaN or an infinity the scale is NaN and the inverse 0.
INLINE float input_scale(const float *x, int n, float limit, float *inverse) {
    v16 top = v16_set1(0), poison = v16_set1(0);
    for (int i = 0; i < n; i += 16) {
        const v16 v = load_up_to_16(x + i, n - i);
        top = v16_max(v16_abs(v), top);
        poison = v16_fma(v, v16_set1(0), poison);   // NaN if v is NaN or infinite, else 0
    }
    const float max = v16_reduce_max(top), bad = v16_reduce_add(poison);
    *inverse = max >= 0x1p-100f && bad == bad ? limit / max : 0;
    return bad != bad ? bad : *inverse > 0 ? max / limit : 0;
}

// The most rows in a panel of int16 inputs.
#ifdef SIMD_TILES
enum { INT16_PANEL_ROWS = TILE_ROWS };
#else
enum { INT16_PANEL_ROWS = PANEL_ROWS };
#endif
INLINE int panel_rows(int input) { return input == INPUT_INT16 ? (int)INT16_PANEL_ROWS : (int)PANEL_ROWS; }

// Index of a group's code word `word` of row t among those of T rows. In panels for tiles, the words of h of a row are
// adjacent, those of all rows before those of l (simd_vnni.h).
INLINE int int16_word_index(int word, int T, int t) {
    return T <= PANEL_ROWS ? word_index(word, T, t) : 8 * (word % 2 * T + t) + word / 2;
}

// Words of an int8 group, per row: 8 of codes, then these.
enum { COMPENSATION_WORD = 8, GROUP_SCALE_WORD = 10 };

// row_scale: of the whole row, or 0: each group has its own.
INLINE void pack_int8_groups(struct panel_row to, const float *row, int columns, float row_scale) {
    const int T = to.height;
    int32_t *p = to.panel;
    for (int k = 0; k < columns; k += GROUP_COLUMNS, p += GROUP_WORDS * T) {
        const int n = min_int(GROUP_COLUMNS, columns - k);
        int8_t x[GROUP_COLUMNS] = { 0 };
        int32_t compensation[2];
        float inverse, scale = row_scale;
        if (row_scale == 0) scale = input_scale(row + k, n, INT8_LIMIT, &inverse);
        else inverse = 1 / row_scale;
        if (inverse > 0)
            for (int i = 0; i < n; i += 16)
                v16_store_int8(x + i, v16_mul(load_up_to_16(row + k + i, n - i), v16_set1(inverse)));
        int8_compensation(x, compensation);
        for (int g = 0; g < 8; g++) memcpy(p + word_index(g, T, to.row), x + 4 * g, 4);
        p[COMPENSATION_WORD * T + to.row] = compensation[0], p[(COMPENSATION_WORD + 1) * T + to.row] = compensation[1];
        memcpy(p + GROUP_SCALE_WORD * T + to.row, &scale, 4);
    }
}
static void pack_int8(struct panel_row to, const float *row, int columns) { pack_int8_groups(to, row, columns, 0); }
static void pack_rounded(struct panel_row to, const float *row, int columns, float scale) {
    pack_int8_groups(to, row, columns, scale);
}

// Stores 16 floats rounded to int16, as v16_store_int16 does. Returns the sum of the integers, which is below 2^24.
INLINE int store_int16_and_sum(int16_t *x, v16 v) {
    const v16 shift = v16_set1(0x1.8p23f);
    v16_store_int16(x, v);
    return (int)v16_reduce_add(v16_sub(v16_add(v, shift), shift));
}

// Half of a group of int16 inputs before they are rounded: up to 16 of n numbers times `inverse`.
INLINE v16 scaled_inputs(const float *x, int n, float inverse) {
    return inverse > 0 ? v16_mul(load_up_to_16(x, n), v16_set1(inverse)) : v16_set1(0);
}
// A group of inputs of fast numerics: factor * h, with h in int8.
struct fast_group { v16 h[2]; float factor; };
INLINE struct fast_group round_group(v16 x, v16 y) {
    const float factor = 1 + (float)(int)(v16_reduce_max(v16_max(v16_abs(x), v16_abs(y))) * (1 / FAST_LIMIT));
    const v16 inverse = v16_set1(1 / factor), shift = v16_set1(0x1.8p23f);
    return (struct fast_group){ { v16_sub(v16_add(v16_mul(x, inverse), shift), shift),
                                  v16_sub(v16_add(v16_mul(y, inverse), shift), shift) }, factor };
}

// limit: the largest code.
INLINE void pack_int16_codes(const int limit, const int fast, struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *p = to.panel;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        float inverse;
        const float scale = input_scale(row + k, n, (float)limit, &inverse);
        int32_t *const scales = p + groups * INT16_GROUP_WORDS * T;
        int sums[BLOCK_COLUMNS / 16];
        for (int j = 0; j < groups; j++, p += 16 * T) {
            const int first = j * GROUP_COLUMNS;
            v16 v[2] = { scaled_inputs(row + k + first, n - first, inverse),
                         scaled_inputs(row + k + first + 16, n - first - 16, inverse) };
            if (fast) {
                const struct fast_group g = round_group(v[0], v[1]);
                for (int i = 0; i < 2; i++) v[i] = v16_mul(g.h[i], v16_set1(g.factor));
            }
            for (int i = 0; i < 2; i++) {
                int16_t x[16];
                int32_t words[8];
                sums[2 * j + i] = store_int16_and_sum(x, v[i]);
                int16_pack_words(x, words);
                for (int g = 0; g < 8; g++) p[int16_word_index(8 * i + g, T, to.row)] = words[g];
            }
        }
        for (int j = 0; j < groups; j++, p += 2 * T)
            p[to.row] = sums[2 * j] + sums[2 * j + 1], p[T + to.row] = sums[2 * j];
        memcpy(scales + to.row, &scale, 4);
        p = scales + T;
    }
}
static void pack_int16(struct panel_row to, const float *row, int columns) {
    pack_int16_codes(INT16_LIMIT, 0, to, row, columns);
}

// ---- micro-kernels: sums[S][T][16] += w x over `columns` columns. `unpacked`: w was written by unpack_int8 or
// unpack_int16, once per pass for all panels.

// Each accumulator of a tile: one holds R rows.
#define FOR_TILE_ACCS(s, t) UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t += R)

// Forces an array of n vectors into memory where registers are scarce; the compiler would otherwise spill in the
// inner loop.
#define SPILL_SUMS(x, n) do { if ((n) > MAX_LIVE_SUMS) __asm__ volatile("" : "+m"(x)); } while (0)
// Keeps the compiler from carrying memory contents in registers across this point.
#define COMPILER_BARRIER() __asm__ volatile("" : : : "memory")

INLINE void add_scaled(float *sums, v16 x, float d) { v16_store(sums, v16_fma_scalar(x, d, v16_load(sums))); }

#include "kernels_int16.h"
#include "kernels_int8.h"
#include "kernels_tiles.h"
#include "kernels_narrow.h"
#include "kernels_pairs.h"

// A row of a product of m rows.
static void pack_int16_product(struct panel_row to, const float *row, int columns, int m, int fast) {
    if (fast && uses_narrow_panels(m)) pack_narrow(to, row, columns);
    else if (fast) pack_int16_codes(INT16_LIMIT, 1, to, row, columns);
    else if (uses_pairs(m)) pack_pairs(to, row, columns);
    else pack_int16(to, row, columns);
}

PANEL_KERNEL(panel_kernel_q4, multiply_panel, micro_kernel_int8, LLAMAC_Q4, PACKED)
PANEL_KERNEL(panel_kernel_q4s, multiply_panel, micro_kernel_int8, LLAMAC_Q4S, PACKED)
PANEL_KERNEL(panel_kernel_q3, multiply_panel, micro_kernel_int8, LLAMAC_Q3, PACKED)
PANEL_KERNEL(panel_kernel_q2, multiply_panel, micro_kernel_int8, LLAMAC_Q2, PACKED)
PANEL_KERNEL(panel_kernel_t2, multiply_panel, micro_kernel_int8, LLAMAC_T2, PACKED)
PANEL_KERNEL(panel_kernel_q8, multiply_panel, micro_kernel_int16, LLAMAC_Q8, PACKED)
PANEL_KERNEL(panel_kernel_q8_0, multiply_panel, micro_kernel_int16, LLAMAC_Q8_0, PACKED)
// Codes of fewer bits are unpacked for more than FEW_ROWS rows.
FEW_ROWS_KERNEL(panel_kernel_q4_0, multiply_panel, micro_kernel_int16, LLAMAC_Q4_0, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q4_1, multiply_panel, micro_kernel_int16, LLAMAC_Q4_1, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q5_0, multiply_panel, micro_kernel_int16, LLAMAC_Q5_0, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q5_1, multiply_panel, micro_kernel_int16, LLAMAC_Q5_1, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q4_k, multiply_panel, micro_kernel_int16, LLAMAC_Q4_K, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q5_k, multiply_panel, micro_kernel_int16, LLAMAC_Q5_K, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q6_k, multiply_panel, micro_kernel_int16, LLAMAC_Q6_K, PACKED)
FEW_ROWS_KERNEL(panel_kernel_iq4_nl, multiply_panel, micro_kernel_int16, LLAMAC_IQ4_NL, PACKED)
FEW_ROWS_KERNEL(panel_kernel_iq4_xs, multiply_panel, micro_kernel_int16, LLAMAC_IQ4_XS, PACKED)
FEW_ROWS_KERNEL(panel_kernel_mxfp4, multiply_panel, micro_kernel_int16, LLAMAC_MXFP4, PACKED)
FEW_ROWS_KERNEL(panel_kernel_q6, multiply_panel, micro_kernel_int16, LLAMAC_Q6, PACKED)

// Unpacked codes of int16 inputs: by tiles above PANEL_ROWS rows, where the kernel set has them.
#define UNPACKED_KERNEL(name, dtype) \
    ALL_HEIGHTS(name, multiply_panel, micro_kernel_int16, dtype, UNPACKED) \
    TILE_HEIGHTS(name, dtype) \
    static panel_kernel *const name[] = { NULL, name##_x1, name##_x2, name##_x3, name##_x4, name##_x5, name##_x6 \
                                          TILE_ENTRIES(name) };
// Unpacked, dtypes with int8 inputs have the same layout. With SIMD_GROUP_SUMS, those whose halves of groups have the
// same scales, q4s and t2, have a faster kernel.
PANEL_KERNEL(panel_kernel_q4_unpacked, multiply_panel, micro_kernel_int8, LLAMAC_Q4, UNPACKED)
#ifdef SIMD_GROUP_SUMS
PANEL_KERNEL(panel_kernel_q4s_unpacked, multiply_panel, micro_kernel_int8, LLAMAC_Q4S, UNPACKED)
#else
#define panel_kernel_q4s_unpacked panel_kernel_q4_unpacked
#endif
#ifdef SIMD_INTEGER_SCALES
MANY_ROWS_KERNEL(panel_kernel_integer_scales, multiply_panel, micro_kernel_int8, LLAMAC_Q4, UNPACKED_FOR_INTEGER_SCALES)
#else
static panel_kernel *const *const panel_kernel_integer_scales = NULL;
#endif
UNPACKED_KERNEL(panel_kernel_unpacked, LLAMAC_Q8)
UNPACKED_KERNEL(panel_kernel_minimums_unpacked, LLAMAC_Q4_1)
UNPACKED_KERNEL(panel_kernel_half_spans_unpacked, LLAMAC_Q6_K)

UNPACK(q8, unpack_int16, LLAMAC_Q8)
UNPACK(q4, unpack_int8, LLAMAC_Q4)
UNPACK(q4s, unpack_int8, LLAMAC_Q4S)
UNPACK(q3, unpack_int8, LLAMAC_Q3)
UNPACK(q2, unpack_int8, LLAMAC_Q2)
UNPACK(t2, unpack_int8, LLAMAC_T2)
UNPACK(q4_0, unpack_int16, LLAMAC_Q4_0)
UNPACK(q4_1, unpack_int16, LLAMAC_Q4_1)
UNPACK(q5_0, unpack_int16, LLAMAC_Q5_0)
UNPACK(q5_1, unpack_int16, LLAMAC_Q5_1)
UNPACK(q8_0, unpack_int16, LLAMAC_Q8_0)
UNPACK(q4_k, unpack_int16, LLAMAC_Q4_K)
UNPACK(q5_k, unpack_int16, LLAMAC_Q5_K)
UNPACK(q6_k, unpack_int16, LLAMAC_Q6_K)
UNPACK(iq4_nl, unpack_int16, LLAMAC_IQ4_NL)
UNPACK(iq4_xs, unpack_int16, LLAMAC_IQ4_XS)
UNPACK(mxfp4, unpack_int16, LLAMAC_MXFP4)
UNPACK(q6, unpack_int16, LLAMAC_Q6)

// ---- one row of a quantized matrix

// Row r's i-th scale or minimum at p.
INLINE float scale_at(const int dtype, const uint8_t *p, int i, int r) {
    const int at = STRIP_ROWS * i + r;
    if (dtype_table[dtype].scale == SCALE_NONE) return 1;
    if (dtype_table[dtype].scale == SCALE_INT8) return (float)(int8_t)p[at];
    if (dtype_table[dtype].scale == SCALE_E8M0) return ldexpf(1.0f, p[at] - 128);
    uint16_t h;
    memcpy(&h, p + 2 * at, 2);
    return f32_from_f16(h);
}
// Row r's code in column i of a block's codes, less its grid.
INLINE int code_at(const int dtype, const uint8_t *codes, int i, int r) {
    const struct dtype_info *info = &dtype_table[dtype];
    const uint8_t *group = codes + (size_t)(i / GROUP_COLUMNS) * group_code_bytes(dtype) + 4 * r + i % 4;
    const int column = i % GROUP_COLUMNS, bits = info->code_bits;
    if (bits == 8) return group[column / 4 * LINE_BYTES] - info->offset;
    if (bits < 4) {
        int code = group[column / 16 * LINE_BYTES] >> (column / 8 % 2 * 2 + (column & 4)) & 3;
        if (bits == 3) code |= (group[2 * LINE_BYTES] >> (column / 8 + (column & 4)) & 1) << 2;
        return info->codebook[code];
    }
    int code = group[column / 8 * LINE_BYTES] >> (column & 4) & 15;
    if (bits == 5) code |= (group[4 * LINE_BYTES] >> column / 4 & 1) << 4;
    if (bits == 6) code |= (group[(4 + column / 16) * LINE_BYTES] >> column / 4 % 4 * 2 & 3) << 4;
    return info->codebook ? info->codebook[code] : code - info->offset;
}
INLINE void gather_quant(const int dtype, const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) {
    const struct dtype_info *info = &dtype_table[dtype];
    const int r = row % STRIP_ROWS, per_scale = scale_columns(dtype);
    const uint8_t *p = w + (size_t)(row / STRIP_ROWS) * strip_bytes;
    float d = 1;
    if (info->has_row_scales) memcpy(&d, p + 4 * r, 4);
    p += row_scale_bytes(dtype);
    for (int k = 0; k < columns; k += block_columns(dtype)) {
        const int n = min_int(block_columns(dtype), columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        const uint8_t *codes = p + block_scale_bytes(dtype, groups);
        float super[2] = { 0 };   // d and d_min
        for (int i = 0; i < (info->has_super_scales ? 1 + info->has_minimums : 0); i++) {
            uint16_t h;
            memcpy(&h, p + 2 * (STRIP_ROWS * i + r), 2);
            super[i] = f32_from_f16(h);
        }
        for (int i = 0; i < n; i++) {
            const float s = scale_at(dtype, p + scales_offset(dtype), i / per_scale, r);
            int c = code_at(dtype, codes, i, r);
            if (info->input == INPUT_INT8) c += (int)s & 3;
            if (info->has_row_scales) { y[k + i] = s * (float)c * d; continue; }
            const uint8_t *minimums = p + minimums_offset(dtype, groups);
            const float m = info->has_minimums ? scale_at(dtype, minimums, i / per_scale, r) : 0;
            const float scale = info->has_super_scales ? super[0] * s : s;
            const float minimum = info->has_super_scales ? -(super[1] * m) : m;
            y[k + i] = fused_multiply_add(scale, (float)c, minimum);
        }
        p += block_bytes(dtype, groups);
    }
}
GATHER(q8, gather_quant, LLAMAC_Q8)
GATHER(q4, gather_quant, LLAMAC_Q4)
GATHER(q4s, gather_quant, LLAMAC_Q4S)
GATHER(q4_0, gather_quant, LLAMAC_Q4_0)
GATHER(q4_1, gather_quant, LLAMAC_Q4_1)
GATHER(q5_0, gather_quant, LLAMAC_Q5_0)
GATHER(q5_1, gather_quant, LLAMAC_Q5_1)
GATHER(q8_0, gather_quant, LLAMAC_Q8_0)
GATHER(q4_k, gather_quant, LLAMAC_Q4_K)
GATHER(q5_k, gather_quant, LLAMAC_Q5_K)
GATHER(q6_k, gather_quant, LLAMAC_Q6_K)
GATHER(iq4_nl, gather_quant, LLAMAC_IQ4_NL)
GATHER(iq4_xs, gather_quant, LLAMAC_IQ4_XS)
GATHER(mxfp4, gather_quant, LLAMAC_MXFP4)
GATHER(q6, gather_quant, LLAMAC_Q6)
GATHER(q3, gather_quant, LLAMAC_Q3)
GATHER(q2, gather_quant, LLAMAC_Q2)
GATHER(t2, gather_quant, LLAMAC_T2)
