// SPDX-License-Identifier: MIT
// kernels_tiles.h - products of int16 inputs in more than PANEL_ROWS rows with unpacked weights, for kernel sets with
// matrix tiles. Part of kernels_template.h.
//
// The unpacked lines of a span are a tile of codes as they are: a line holds 16 rows of the matrix x 4 columns. A tile
// of inputs holds as many rows as a panel. Their product is a tile of sums, whose row t holds input row t's 16 outputs.
// Since each span of 16 or 32 columns has a scale, the sums of each span are stored, then scaled in the order of all
// other kernels. So of the 64 columns that a tile can have, a product uses 16 or 32.
//
// A tile instruction takes tens of cycles, and so does a store before it can be read. So these overlap: the products of
// a span, storing the sums of the span before it, and scaling the sums of the one before that.

#ifdef SIMD_TILES
// Whether a product of m rows uses tiles, which tiles_configure must prepare: for panels of nearly equal height, the
// tallest of them. If a panel has one row fewer, a tile's last row holds other words of the panel, unused.
// With int8 inputs, tiles would not be faster: two scales per group leave as much work beside the tiles as the products
// take without them.
INLINE int uses_tiles(int dtype, int m) { return input_type_of(dtype) == INPUT_INT16 && m > PANEL_ROWS; }
INLINE void tiles_configure(int dtype, int m) {
    tiles_begin(ceil_div(m, panel_count(m, TILE_ROWS)), scale_columns(dtype));
}
// Tiles multiply signed bytes; other products with unpacked weights need unsigned codes.
static void make_codes_signed(int dtype, int columns, uint8_t *strip) {
    for (int k = 0; k < columns; k += GROUP_COLUMNS, strip += unpacked_group_bytes(dtype)) lines_make_signed(strip, 8);
}

// The products of a strip and a panel, span by span.
struct tile_stream {
    const uint8_t *w;
    const int32_t *x;
    int spans;           // of all columns
    tile_sums sums[2];   // of two spans
};
INLINE void stream_multiply(const struct tile_stream *s, const int dtype, const int T, int i) {
    const int spans = group_spans(dtype), words = scale_columns(dtype) / 4, j = i / spans, span = i % spans;
    const int block = j / BLOCK_GROUPS * (BLOCK_GROUPS * INT16_GROUP_WORDS + 1);
    const int32_t *high = s->x + (block + j % BLOCK_GROUPS * 16) * T + span * words;
    const uint8_t *lines = s->w + (size_t)j * unpacked_group_bytes(dtype) + span * words * LINE_BYTES;
    tiles_multiply(i % 2, high, high + 8 * T, lines);
}
INLINE void stream_begin(struct tile_stream *s, const int dtype, const int T) {
    stream_multiply(s, dtype, T, 0);
    if (s->spans > 1) stream_multiply(s, dtype, T, 1);
    tiles_store(0, &s->sums[0]);
}
// The sums of span i. Called for all spans in ascending order.
INLINE const tile_sums *stream_next(struct tile_stream *s, const int dtype, const int T, int i) {
    if (i + 2 < s->spans) stream_multiply(s, dtype, T, i + 2);
    if (i + 1 < s->spans) tiles_store((i + 1) % 2, &s->sums[(i + 1) % 2]);
    return &s->sums[i % 2];
}

// sums[T][16] += w x for one strip, as micro_kernel_int16.
INLINE void tile_kernel(const int dtype, const int T, const uint8_t *w, const int32_t *x, int columns,
                        float *sums) {
    const int spans = group_spans(dtype), n = ceil_div(columns, GROUP_COLUMNS);
    const int32_t *input_sums = x;
    struct tile_stream stream = { .w = w, .x = x, .spans = n * spans };
    stream_begin(&stream, dtype, T);
    for (int first = 0; first < n; first += BLOCK_GROUPS) {
        const int groups = min_int(BLOCK_GROUPS, n - first);
        v16 sum[TILE_ROWS];
        UNROLL for (int t = 0; t < T; t++) sum[t] = v16_set1(0);
        const int32_t *const scales = input_sums + groups * INT16_GROUP_WORDS * T;
        input_sums += groups * 16 * T;
        for (int j = first; j < first + groups; j++, input_sums += 2 * T, w += unpacked_group_bytes(dtype)) {
            UNROLL for (int span = 0; span < spans; span++) {
                const tile_sums *products = stream_next(&stream, dtype, T, j * spans + span);
                const v16 scale = unpacked_scales_load(w, span);
                UNROLL for (int t = 0; t < T; t++) sum[t] = v16_fma(tile_row_to_float(products, t), scale, sum[t]);
                if (!has_minimums(dtype)) continue;
                const v16 minimum = unpacked_scales_load(w, spans + span);
                UNROLL for (int t = 0; t < T; t++)
                    sum[t] = v16_fma(minimum, line_to_floats(line_set1(input_sums[t])), sum[t]);
            }
        }
        UNROLL for (int t = 0; t < T; t++) add_scaled(sums + 16 * t, sum[t], float_at(scales + t));
        input_sums = scales + T;
    }
}

// All strips of a group against one panel of T rows.
SPECIALIZED void multiply_panel_tiles(const int dtype, const int T, const uint8_t *w, size_t strip_bytes, int strips,
                                      const void *x, int columns, float *sums) {
    for (int s = 0; s < strips; s++, w += strip_bytes, sums += 16 * T) tile_kernel(dtype, T, w, x, columns, sums);
}
_Static_assert(PANEL_ROWS == 6 && TILE_ROWS == 16, "TILE_HEIGHTS lists all heights");
#define TILE_HEIGHTS(name, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 7, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 8, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 9, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 10, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 11, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 12, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 13, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 14, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 15, multiply_panel_tiles, dtype) \
    PANEL_KERNEL_OF_HEIGHT(name, 16, multiply_panel_tiles, dtype)
#define TILE_ENTRIES(name) \
    , name##_x7, name##_x8, name##_x9, name##_x10, name##_x11, name##_x12, name##_x13, name##_x14, name##_x15, \
    name##_x16
#else
INLINE int uses_tiles(int dtype, int m) { (void)dtype, (void)m; return 0; }
INLINE void tiles_configure(int dtype, int m) { (void)dtype, (void)m; }
INLINE void tiles_end(void) { }
INLINE void make_codes_signed(int dtype, int columns, uint8_t *strip) { (void)dtype, (void)columns, (void)strip; }
#define TILE_HEIGHTS(name, dtype)
#define TILE_ENTRIES(name)
#endif
