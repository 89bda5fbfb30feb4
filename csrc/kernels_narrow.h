// SPDX-License-Identifier: MIT
// kernels_narrow.h - products of many rows with inputs of fast numerics and unpacked weights, for kernel sets with
// vpdpbusd and without matrix tiles. Part of kernels_template.h; kernels.h specifies these inputs.
//
// Such an input is f h, with an h of 8 bits and the group's factor f. A narrow panel holds h, so that a product takes
// one vpdpbusd instead of two. The exact integer sum i of c * h over a span of a group is below 2^24. So its conversion
// to float is exact, and f times that, rounded to a float, is what the other kernels compute: the exact integer f i,
// rounded to a float.
//
// A block takes as many words as in other panels of INPUT_INT16, and its scale is at the same place. For T rows, there
// are 8 T code words of each group, then NARROW_TERMS T terms of each group, then words that are not used.

#if defined(SIMD_NARROW) && !defined(SIMD_TILES)
// A group's terms besides its codes: the initial sums of the whole group, of its first and of its second half, which
// cancel the bias of unpacked codes; the factor; the sum of the inputs, for minimums. The last two are floats.
enum { NARROW_START, NARROW_HALVES_START, NARROW_FACTOR = NARROW_HALVES_START + 2, NARROW_SUM, NARROW_TERMS };
_Static_assert(8 + NARROW_TERMS <= INT16_GROUP_WORDS, "a narrow block is not longer than others");

INLINE int uses_narrow_panels(int m) { return m >= MANY_ROWS; }

static void pack_narrow(struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *block = to.panel;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        float inverse;
        const float scale = input_scale(row + k, n, INT16_LIMIT, &inverse);
        int32_t *p = block + to.row, *terms = p + 8 * groups * T;
        for (int i = 0; i < n; i += GROUP_COLUMNS, p += 8 * T, terms += NARROW_TERMS * T) {
            const struct fast_group g = round_group(scaled_inputs(row + k + i, n - i, inverse),
                                                    scaled_inputs(row + k + i + 16, n - i - 16, inverse));
            int8_t x[GROUP_COLUMNS];
            v16_store_int8(x, g.h[0]), v16_store_int8(x + 16, g.h[1]);
            for (int l = 0; l < 8; l++) memcpy(p + l * T, x + 4 * l, 4);
            const int first = (int)v16_reduce_add(g.h[0]), second = (int)v16_reduce_add(g.h[1]);
            const float sum = g.factor * (float)(first + second);
            terms[NARROW_START * T] = -UNPACKED_BIAS * (first + second);
            terms[NARROW_HALVES_START * T] = -UNPACKED_BIAS * first;
            terms[(NARROW_HALVES_START + 1) * T] = -UNPACKED_BIAS * second;
            memcpy(terms + NARROW_FACTOR * T, &g.factor, 4), memcpy(terms + NARROW_SUM * T, &sum, 4);
        }
        block += INT16_GROUP_WORDS * groups * T;
        memcpy(block + to.row, &scale, 4);
        block += T;
    }
}

INLINE void micro_kernel_narrow(const int dtype, const int variant, const int S, const int T, const uint8_t *w,
                                size_t strip_bytes, const void *inputs, int columns, float *sums) {
    (void)variant;
    const int32_t *x = inputs;
    const int spans = group_spans(dtype), lines = 8 / spans;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const int32_t *terms = x + 8 * groups * T, *const scales = x + INT16_GROUP_WORDS * groups * T;
        struct { v16 v[GEMM_STRIPS][PANEL_ROWS]; } sum;
        FOR_TILE(i, t) sum.v[i][t] = v16_set1(0);
        for (int j = 0; j < groups; j++, terms += NARROW_TERMS * T, w += unpacked_group_bytes(dtype)) {
            UNROLL for (int span = 0; span < spans; span++) {
                const int32_t *start = terms + (spans == 1 ? NARROW_START : NARROW_HALVES_START + span) * T;
                line c[GEMM_STRIPS][PANEL_ROWS];
                FOR_TILE(i, t) c[i][t] = line_set1(start[t]);
                UNROLL for (int l = span * lines; l < (span + 1) * lines; l++, x += T) {
                    line codes[GEMM_STRIPS];
                    UNROLL for (int i = 0; i < S; i++)
                        codes[i] = int16_codes_load_unpacked(w + (size_t)i * strip_bytes, l, 0);
                    UNROLL for (int t = 0; t < T; t++) UNROLL for (int i = 0; i < S; i++)
                        c[i][t] = line_add_products(c[i][t], codes[i], x[t]);
                }
                UNROLL for (int i = 0; i < S; i++) {
                    const uint8_t *group = w + (size_t)i * strip_bytes;
                    const v16 scale = unpacked_scales_load(group, span);
                    UNROLL for (int t = 0; t < T; t++) {
                        const v16 factor = v16_set1(float_at(terms + NARROW_FACTOR * T + t));
                        sum.v[i][t] = v16_fma(v16_mul(line_to_floats(c[i][t]), factor), scale, sum.v[i][t]);
                    }
                    if (!has_minimums(dtype)) continue;
                    const v16 minimum = unpacked_scales_load(group, spans + span);
                    UNROLL for (int t = 0; t < T; t++)
                        sum.v[i][t] = v16_fma_scalar(minimum, float_at(terms + NARROW_SUM * T + t), sum.v[i][t]);
                }
            }
            if (S * T > NARROW_TILE_ACCS) SPILL_SUMS(sum, S * T);
        }
        FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), sum.v[i][t], float_at(scales + t));
        x = scales + T;
    }
}

MANY_ROWS_KERNEL(panel_kernel_narrow, multiply_panel, micro_kernel_narrow, LLAMAC_Q8, UNPACKED_FOR_NARROW)
MANY_ROWS_KERNEL(panel_kernel_minimums_narrow, multiply_panel, micro_kernel_narrow, LLAMAC_Q4_1, UNPACKED_FOR_NARROW)
MANY_ROWS_KERNEL(panel_kernel_half_spans_narrow, multiply_panel, micro_kernel_narrow, LLAMAC_Q6_K, UNPACKED_FOR_NARROW)
INLINE panel_kernel *const *narrow_kernels(int dtype) {
    return shared_kernel(dtype, panel_kernel_narrow, panel_kernel_minimums_narrow, panel_kernel_half_spans_narrow);
}
#else
INLINE int uses_narrow_panels(int m) { (void)m; return 0; }
INLINE void pack_narrow(struct panel_row to, const float *row, int columns) { (void)to, (void)row, (void)columns; }
INLINE panel_kernel *const *narrow_kernels(int dtype) { (void)dtype; return NULL; }
#endif
