// SPDX-License-Identifier: MIT
// kernels_tiles.h - products of more than PANEL_ROWS rows with unpacked weights, for kernel sets with matrix tiles.
// Part of kernels_template.h.
//
// The unpacked lines of a span are a tile of codes as they are: a line holds 16 rows of the matrix x 4 columns. A tile
// of inputs holds as many rows as a panel. Their product is a tile of sums, whose row t holds input row t's 16 outputs.
// Since each span of 16 or 32 columns has a scale, the sums of each span are stored, then scaled in the order of all
// other kernels. So of the 64 columns that a tile can have, a product uses 16 or 32.

#ifdef SIMD_TILES
// Whether a product of m rows uses tiles, which tiles_configure must prepare: for panels of nearly equal height, the
// tallest of them. Where a panel has a row less, the last row of a tile is other words of the panel and is not used.
INLINE int uses_tiles(int dtype, int m) { return input_type_of(dtype) != INPUT_F32 && m > PANEL_ROWS; }
// Columns of a span in unpacked weights.
INLINE int tile_columns(int dtype) {
    return input_type_of(dtype) == INPUT_INT8 ? GROUP_COLUMNS / 2 : scale_columns(dtype);
}
INLINE void tiles_configure(int dtype, int m) {
    tiles_begin(ceil_div(m, panel_count(m, TILE_ROWS)), tile_columns(dtype));
}

// sums[S][T][16] += w x, as micro_kernel_int16.
INLINE void tile_kernel_int16(const int dtype, const int S, int T, const uint8_t *w, size_t strip_bytes,
                              const int32_t *x, int columns, float *sums) {
    const int spans = group_spans(dtype), words = scale_columns(dtype) / 4;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const int32_t *input_sums = x + groups * 16 * T;
        v16 block_sums[TILE_STRIPS][TILE_ROWS];
        for (int i = 0; i < S; i++) for (int t = 0; t < T; t++) block_sums[i][t] = v16_set1(0);
        for (int j = 0; j < groups; j++, input_sums += 2 * T, x += 16 * T, w += unpacked_group_bytes(dtype)) {
            UNROLL for (int span = 0; span < spans; span++) {
                const int32_t *high = x + span * words, *first_half = input_sums + T;
                tile_sums products;
                tiles_multiply(S, high, high + 8 * T, w + span * words * LINE_BYTES, strip_bytes, 0);
                tiles_store(S, &products);
                UNROLL for (int i = 0; i < S; i++) {
                    const uint8_t *group = w + (size_t)i * strip_bytes;
                    const v16 scale = unpacked_scales_load(group, span);
                    const v16 minimum = has_minimums(dtype) ? unpacked_scales_load(group, spans + span) : scale;
                    for (int t = 0; t < T; t++) {
                        const int all = input_sums[t];
                        const int n = spans == 1 ? all : span ? all - first_half[t] : first_half[t];
                        const int16_acc c = int16_acc_from_tiles(&products, i, t, n);
                        v16 sum = v16_fma(int16_acc_to_float(c, T, 0), scale, block_sums[i][t]);
                        if (has_minimums(dtype)) sum = v16_fma(minimum, line_to_floats(line_set1(all)), sum);
                        block_sums[i][t] = sum;
                    }
                }
            }
        }
        for (int i = 0; i < S; i++)
            for (int t = 0; t < T; t++) add_scaled(sums + 16 * (i * T + t), block_sums[i][t], float_at(input_sums + t));
        x = input_sums + T;
    }
}

// The same with int8 inputs, as micro_kernel_q4.
INLINE void tile_kernel_int8(const int S, int T, const uint8_t *w, size_t strip_bytes, const int32_t *x, int columns,
                             float *sums) {
    for (int k = 0; k < columns; k += GROUP_COLUMNS, x += GROUP_WORDS * T, w += Q4_UNPACKED_GROUP_BYTES) {
        const int32_t *compensation = x + COMPENSATION_WORD * T, *input_scales = x + GROUP_SCALE_WORD * T;
        tile_sums products;
        tiles_multiply(S, x, x + 4, w, strip_bytes, 4 * LINE_BYTES);
        tiles_store(S, &products);
        UNROLL for (int i = 0; i < S; i++) {
            const uint8_t *scales = w + (size_t)i * strip_bytes + 8 * LINE_BYTES;
            const block_scales s0 = block_scales_load_unpacked(scales), s1 = block_scales_load_unpacked(scales + 64);
            for (int t = 0; t < T; t++) {
                const q4_row_acc c0 = q4_acc_from_tiles(&products, i, 0, t, compensation[t]);
                const q4_row_acc c1 = q4_acc_from_tiles(&products, i, 1, t, compensation[T + t]);
                const v16 dot = q4_scaled_to_float(q4_scale_add(q4_scale(c0, s0), c1, s1));
                add_scaled(sums + 16 * (i * T + t), dot, float_at(input_scales + t));
            }
        }
    }
}

INLINE void tile_kernel(const int dtype, const int S, int T, const uint8_t *w, size_t strip_bytes, const int32_t *x,
                        int columns, float *sums) {
    if (input_type_of(dtype) == INPUT_INT8) tile_kernel_int8(S, T, w, strip_bytes, x, columns, sums);
    else tile_kernel_int16(dtype, S, T, w, strip_bytes, x, columns, sums);
}
// All strips of a group against one panel of more than PANEL_ROWS rows.
INLINE void panel_kernel_tiles(const int dtype, int T, const uint8_t *w, size_t strip_bytes, int strips, const void *x,
                               int columns, float *sums) {
    int s = 0;
    for (; s + TILE_STRIPS <= strips; s += TILE_STRIPS)
        tile_kernel(dtype, TILE_STRIPS, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns,
                    sums + (size_t)s * 16 * (size_t)T);
    if (s < strips)
        tile_kernel(dtype, 1, T, w + (size_t)s * strip_bytes, strip_bytes, x, columns,
                    sums + (size_t)s * 16 * (size_t)T);
}
#else
INLINE int uses_tiles(int dtype, int m) { (void)dtype, (void)m; return 0; }
INLINE void tiles_configure(int dtype, int m) { (void)dtype, (void)m; }
INLINE void tiles_end(void) { }
INLINE void panel_kernel_tiles(const int dtype, int T, const uint8_t *w, size_t strip_bytes, int strips, const void *x,
                               int columns, float *sums) {
    (void)dtype, (void)T, (void)w, (void)strip_bytes, (void)strips, (void)x, (void)columns, (void)sums;
}
#endif
