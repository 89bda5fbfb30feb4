// SPDX-License-Identifier: MIT
// kernels_int8.h - products of q4, q4s, q3, q2 and t2 with int8 inputs: codes of fewer bits become nibbles, then all
// are multiplied alike. Part of kernels_template.h.
//
// Sums are exact, so the results are the same numbers however a kernel set forms them. One with SIMD_GROUP_SUMS sums
// whole groups of dtypes whose halves have the same block scales, and scales once. One with SIMD_INTEGER_SCALES can
// multiply sums by block scales as integers.

// Unpacked, a group is 8 lines of int8 codes, grid included, then the block scales of both halves.
enum { INT8_UNPACKED_GROUP_BYTES = 8 * LINE_BYTES + 2 * 64 };

// Whether each half of a group has scales of its own, or both have the same (q4s, t2).
INLINE int halves_have_scales(const int dtype) { return scale_columns(dtype) < GROUP_COLUMNS; }

// The sums of a group, over 16 or 32 columns each.
#ifdef SIMD_GROUP_SUMS
INLINE int sums_per_group(const int dtype) { return halves_have_scales(dtype) ? 2 : 1; }
#else
INLINE int sums_per_group(const int dtype) { (void)dtype; return 2; }
#endif

// The block scales of t2, which are not stored.
static const uint8_t unit_scales[STRIP_ROWS] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
INLINE int stores_scales(const int dtype) { return scale_element_bytes(dtype) > 0; }

// Line l < 4 of a group's nibbles: columns 8 l to 8 l + 7. Prefetches each stored line once.
INLINE line nibble_line(const int dtype, const int T, const uint8_t *group, const int l) {
    const int bits = dtype_table[dtype].code_bits;
    const uint8_t *at = group + (bits == 4 ? l : l / 2) * LINE_BYTES;
    const line stored = line_load(at);
    if (bits == 4 || l % 2 == 0) prefetch_quant(T, at);
    if (bits == 4) return stored;
    const line low = line_move_bits(stored, 4 + 2 * (l % 2), 0x33);
    if (bits == 2) return low;
    if (l == 3) prefetch_quant(T, group + 2 * LINE_BYTES);
    return line_insert_bits(low, line_load(group + 2 * LINE_BYTES), 2 + l, 0x44);
}

INLINE void unpack_int8(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const lut codebook = lut_load(dtype_table[dtype].codebook, INT8_BIAS);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *s = stores_scales(dtype) ? w : unit_scales, *codes = w + block_scale_bytes(dtype, groups);
        prefetch_scales(dtype, 1, w);
        for (int j = 0; j < groups; j++, to += INT8_UNPACKED_GROUP_BYTES, codes += group_code_bytes(dtype)) {
            UNROLL for (int h = 0; h < 2; h++) {
                const grid_offsets grid = grid_offsets_load(s);
                block_scales_store(to + 8 * LINE_BYTES + 64 * h, block_scales_load(s));
                UNROLL for (int l = 2 * h; l < 2 * h + 2; l++) {
                    const line x = nibble_line(dtype, 1, codes, l);
                    line_store(to + 128 * l, int8_codes(codebook, x, grid, 0, 1));
                    line_store(to + 128 * l + 64, int8_codes(codebook, x, grid, 1, 1));
                }
                if (stores_scales(dtype) && (h || halves_have_scales(dtype))) s += STRIP_ROWS;
            }
        }
        w = codes;
    }
}

#ifdef SIMD_INTEGER_SCALES
enum { FIRST_SUMS_SHIFT = SHIFT_BITS };   // part of what the sums of a first half start from
INLINE int uses_integer_scales(int dtype, int m) {
    return sums_per_group(dtype) == 2 && m > UNPACK_ABOVE_NIBBLES && integer_scales_are_faster();
}
#else
enum { FIRST_SUMS_SHIFT = 0 };
INLINE int uses_integer_scales(int dtype, int m) { (void)dtype, (void)m; return 0; }
INLINE int8_scaled int8_scale_integers(int8_row_acc d, block_scales s) { return int8_scale(d, s); }
INLINE int8_scaled int8_scale_add_integers(int8_scaled w, int8_row_acc d, block_scales s) {
    return int8_scale_add(w, d, s);
}
INLINE v16 int8_integers_to_float(int8_scaled w) { return int8_scaled_to_float(w); }
#endif

// Dot products over part h of a group, a half or all of it, before scaling. s: the part's block scales, which are
// s_stride bytes apart in the strips. x: the group's words.
typedef struct { int8_row_acc v[GEMM_STRIPS][PANEL_ROWS]; } int8_acc_tile;
INLINE void multiply_part(const int dtype, const int variant, const int S, const int T, const int h, lut codebook,
                          const uint8_t *s, size_t s_stride, const uint8_t *codes, size_t strip_bytes,
                          const int32_t *x, int8_acc_tile *to) {
    const int unpacked = variant != PACKED, R = int8_rows_per_acc(unpacked);
    const int parts = sums_per_group(dtype), words = 8 / parts;
    const int32_t shift = variant == UNPACKED_FOR_INTEGER_SCALES && h == 0 ? FIRST_SUMS_SHIFT : 0;
    const int32_t *compensation = x + (COMPENSATION_WORD + h) * T;
    int8_acc c[GEMM_STRIPS][PANEL_ROWS];
    grid_offsets grid[GEMM_STRIPS];
    if (!unpacked) UNROLL for (int i = 0; i < S; i++) grid[i] = grid_offsets_load(s + (size_t)i * s_stride);
    FOR_TILE_ACCS(i, t) {
        const int32_t terms = compensation[t] + (parts == 1 ? compensation[T + t] : 0);
        c[i][t] = int8_acc_init(terms - shift, grid[i], unpacked);
    }
    if (unpacked) {
        UNROLL for (int g = words * h; g < words * (h + 1); g++) UNROLL for (int i = 0; i < S; i++) {
            const line a = line_load(codes + (size_t)i * strip_bytes + 64 * g);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = int8_acc_dot(c[i][t], a, x, g, T, t, unpacked);
        }
    } else {
        UNROLL for (int g = words * h; g < words * (h + 1); g += 2) UNROLL for (int i = 0; i < S; i++) {
            const line packed = nibble_line(dtype, T, codes + (size_t)i * strip_bytes, g / 2);
            const line a = int8_codes(codebook, packed, grid[i], 0, 0);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = int8_acc_dot(c[i][t], a, x, g, T, t, unpacked);
            const line b = int8_codes(codebook, packed, grid[i], 1, 0);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = int8_acc_dot(c[i][t], b, x, g + 1, T, t, unpacked);
        }
    }
    FOR_TILE(i, t) to->v[i][t] = int8_acc_row(c[i][t - t % R], t % R, unpacked);
}
INLINE block_scales half_scales(const int unpacked, const int h, const uint8_t *s, const uint8_t *codes) {
    return unpacked ? block_scales_load_unpacked(codes + 8 * LINE_BYTES + 64 * h) : block_scales_load(s);
}

// One row's sums over a group's first half, scaled; and over both halves.
INLINE int8_scaled scale_first(const int variant, int8_row_acc d, block_scales s) {
    return variant == UNPACKED_FOR_INTEGER_SCALES ? int8_scale_integers(d, s) : int8_scale(d, s);
}
INLINE v16 scale_second(const int variant, int8_scaled first, int8_row_acc d, block_scales s) {
    if (variant == UNPACKED_FOR_INTEGER_SCALES) return int8_integers_to_float(int8_scale_add_integers(first, d, s));
    return int8_scaled_to_float(int8_scale_add(first, d, s));
}

INLINE void micro_kernel_int8(const int dtype, const int variant, const int S, const int T, const uint8_t *w,
                              size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const int32_t *x = inputs;
    const int unpacked = variant != PACKED;
    const lut codebook = lut_load(dtype_table[dtype].codebook, INT8_BIAS);
    const int carried = S * T <= MAX_CARRIED_SUMS;
    const size_t s_stride = stores_scales(dtype) ? strip_bytes : 0;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        v16 acc[GEMM_STRIPS][PANEL_ROWS];   // the sums, in registers for one block, if they are carried
        if (carried) FOR_TILE(i, t) acc[i][t] = v16_load(sums + 16 * (i * T + t));
        const uint8_t *s0 = stores_scales(dtype) ? w : unit_scales;
        const uint8_t *codes = unpacked ? w : w + block_scale_bytes(dtype, groups);
        if (!unpacked) UNROLL for (int i = 0; i < S; i++) prefetch_scales(dtype, T, w + (size_t)i * strip_bytes);
        for (int j = 0; j < groups; j++, x += GROUP_WORDS * T) {
            const uint8_t *s1 = halves_have_scales(dtype) ? s0 + STRIP_ROWS : s0;   // of the group's second half
            int8_acc_tile c;
            struct { int8_scaled v[GEMM_STRIPS][PANEL_ROWS]; } sum;
            multiply_part(dtype, variant, S, T, 0, codebook, s0, s_stride, codes, strip_bytes, x, &c);
            if (sums_per_group(dtype) == 2) {
                UNROLL for (int i = 0; i < S; i++) {
                    const block_scales scale =
                        half_scales(unpacked, 0, s0 + (size_t)i * s_stride, codes + (size_t)i * strip_bytes);
                    UNROLL for (int t = 0; t < T; t++) sum.v[i][t] = scale_first(variant, c.v[i][t], scale);
                }
                SPILL_SUMS(sum, S * T);
                if (!carried) COMPILER_BARRIER();
                multiply_part(dtype, variant, S, T, 1, codebook, s1, s_stride, codes, strip_bytes, x, &c);
            }
            UNROLL for (int i = 0; i < S; i++) {
                const block_scales scale =
                    half_scales(unpacked, 1, s1 + (size_t)i * s_stride, codes + (size_t)i * strip_bytes);
                UNROLL for (int t = 0; t < T; t++) {
                    const v16 dot = sums_per_group(dtype) == 2 ? scale_second(variant, sum.v[i][t], c.v[i][t], scale)
                                                               : int8_scaled_to_float(int8_scale(c.v[i][t], scale));
                    if (carried) acc[i][t] = v16_fma_scalar(dot, float_at(x + GROUP_SCALE_WORD * T + t), acc[i][t]);
                    else add_scaled(sums + 16 * (i * T + t), dot, float_at(x + GROUP_SCALE_WORD * T + t));
                }
            }
            if (stores_scales(dtype)) s0 = s1 + STRIP_ROWS;
            codes += unpacked ? (size_t)INT8_UNPACKED_GROUP_BYTES : group_code_bytes(dtype);
        }
        if (carried) FOR_TILE(i, t) v16_store(sums + 16 * (i * T + t), acc[i][t]);
        w = codes;
    }
}
