// SPDX-License-Identifier: MIT
// kernels_values.h - products of the softmax numerators with the values of a page of a q8 cache. Part of
// kernels_template.h; kernels.h specifies the codes at struct attend.
//
// The codes of numerators are unsigned, those of values signed, and the sum over a page is below 2^24. So every order
// of the additions gives the same float.

// ---- sums[S][T][16] += the product of a page's values and numerators, which pack_page packed

#if defined(SIMD_NARROW)
// A panel for T queries holds KV_PAGE / 4 words of 4 codes for each of them, query by query, then the scales.
enum { PAGE_WORDS = KV_PAGE / 4 };
INLINE int values_tile_strips(const int T) { return tile_strips(T, VALUES_TILE_ACCS); }

INLINE void pack_page(struct panel_row to, const float *numerators) {
    float inverse;
    const float scale = input_scale(numerators, KV_PAGE, NUMERATOR_LIMIT, &inverse);
    uint8_t *codes = (uint8_t *)(to.panel + to.row * PAGE_WORDS);
    for (int i = 0; i < KV_PAGE; i += 16) v16_store_uint8(codes + i, scaled_inputs(numerators + i, 16, inverse));
    memcpy(to.panel + to.height * PAGE_WORDS + to.row, &scale, 4);
}

INLINE void micro_kernel_values(const int S, const int T, const uint8_t *w, const int32_t *x, float *sums) {
    line c[GEMM_STRIPS][PANEL_ROWS];
    FOR_TILE(i, t) c[i][t] = line_set1(0);
    for (int l = 0; l < PAGE_WORDS; l++, w += LINE_BYTES) {
        line codes[GEMM_STRIPS];
        UNROLL for (int i = 0; i < S; i++)
            codes[i] = line_add_bytes(line_load(w + i * KV_PAGE * STRIP_ROWS), -Q8_OFFSET);
        UNROLL for (int t = 0; t < T; t++) {
            const line numerators = line_set1(x[t * PAGE_WORDS + l]);
            UNROLL for (int i = 0; i < S; i++) c[i][t] = line_dot(c[i][t], numerators, codes[i]);
        }
    }
    FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), line_to_floats(c[i][t]), float_at(x + T * PAGE_WORDS + t));
}
#else
// A panel is one of int16 inputs, whose codes are at most NUMERATOR_LIMIT.
INLINE int values_tile_strips(const int T) { return tile_strips(T, INT16_TILE_ACCS); }

INLINE void pack_page(struct panel_row to, const float *numerators) {
    pack_int16_codes(NUMERATOR_LIMIT, 0, to, numerators, KV_PAGE);
}

INLINE void micro_kernel_values(const int S, const int T, const uint8_t *w, const int32_t *x, float *sums) {
    const int R = int16_rows_per_acc(T), strip_bytes = KV_PAGE * STRIP_ROWS, groups = KV_PAGE / GROUP_COLUMNS;
    const lut codebook = codebook_load(LLAMAC_Q8_0);
    const int32_t *input_sums = x + groups * 16 * T, *scales = x + groups * INT16_GROUP_WORDS * T;
    struct { v16 v[GEMM_STRIPS][PANEL_ROWS]; } sum;
    FOR_TILE(i, t) sum.v[i][t] = v16_set1(0);
    for (int j = 0; j < groups; j++, input_sums += 2 * T, x += 16 * T, w += 8 * LINE_BYTES) {
        int16_acc_tile c;
        multiply_span(LLAMAC_Q8_0, 0, S, T, 0, codebook, w, (size_t)strip_bytes, x, input_sums, NULL, &c);
        FOR_TILE(i, t) sum.v[i][t] = v16_add(sum.v[i][t], int16_acc_to_float(c.v[i][t - t % R], T, t % R));
    }
    FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), sum.v[i][t], float_at(scales + t));
}
#endif

SPECIALIZED void multiply_panel_values(const int unused, const int T, const uint8_t *w, size_t strip_bytes, int strips,
                                       const void *x, int columns, float *sums) {
    (void)unused, (void)columns;
    const int S = values_tile_strips(T);
    int s = 0;
    for (; s + S <= strips; s += S)
        micro_kernel_values(S, T, w + (size_t)s * strip_bytes, x, sums + (size_t)s * 16 * (size_t)T);
    for (; s < strips; s++)
        micro_kernel_values(1, T, w + (size_t)s * strip_bytes, x, sums + (size_t)s * 16 * (size_t)T);
}
PANEL_KERNEL(panel_kernel_q8_values, multiply_panel_values, 0)
