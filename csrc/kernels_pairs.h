// SPDX-License-Identifier: MIT
// kernels_pairs.h - products of many rows of int16 inputs with unpacked weights, where two columns take one
// multiplication (Winograd 1968). Part of kernels_template.h, for kernel sets that define SIMD_PAIRS.
//
//     c0 x0 + c1 x1 = (c0 + x1) (c1 + x0) - c0 c1 - x0 x1
//
// The last two terms belong to a row of the matrix and to a row of inputs, so that each is computed once. This is exact
// modulo 2^32, and the sum over a span is below 2^31. Two additions of int16 and a multiplication take less time than
// two multiplications on processors that add in more units than they multiply. With a quarter of the columns multiplied
// as usual (is_paired), all units are busy.
//
// Unpacked, a group is the even and the odd words of each 4 columns, 2 lines each; then, for each span, 16 scales,
// 16 minimums, if the dtype has them, and the initial sums of the 16 rows. For T rows, a block of a panel has
// 16 T code words of each group, then PAIRS_TERMS T terms of each group, then T scales.

#if defined(SIMD_PAIRS) && !defined(SIMD_TILES)
// A group's terms besides its codes: the initial sums of the whole group, of its first and of its second half, and the
// sum of the inputs, for minimums, as a float.
enum { PAIRS_START, PAIRS_HALVES_START, PAIRS_SUM = PAIRS_HALVES_START + 2, PAIRS_TERMS };
enum {
    PAIRS_KC = 256,       // columns per pass
    PAIRS_STRIPS = 2,     // strips per tile and group: they share the inputs, and their unpacked pass fits L1
    PAIRS_LINES_BYTES = 8 * 2 * LINE_BYTES,
};
_Static_assert(16 + (int)PAIRS_TERMS <= (int)INT16_GROUP_WORDS, "a block of pairs is not longer than others");
_Static_assert((int)PAIRS_KC / (int)GROUP_COLUMNS * ((int)PAIRS_LINES_BYTES + 4 * 64) <= (int)UNPACKED_STRIP_BYTES,
               "the scratch holds a pass of pairs");

INLINE int uses_pairs(int m) { return m >= MANY_ROWS && pairs_are_faster(); }
INLINE int is_paired(const int l) { return l % 4 != 3; }

INLINE size_t pairs_group_bytes(const int dtype) {
    return PAIRS_LINES_BYTES + (size_t)(group_spans(dtype) * (2 + has_minimums(dtype))) * 64;
}
// The i-th 16 numbers of a span after a group's words: scales, minimums, starts.
INLINE size_t pairs_scales_at(const int span) { return PAIRS_LINES_BYTES + (size_t)span * 64; }
INLINE size_t pairs_minimums_at(const int dtype, const int span) { return pairs_scales_at(group_spans(dtype) + span); }
INLINE size_t pairs_starts_at(const int dtype, const int span) {
    return pairs_scales_at(group_spans(dtype) * (1 + has_minimums(dtype)) + span);
}

INLINE void unpack_pairs(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const lut codebook = codebook_load(dtype);
    const int spans = group_spans(dtype), lines = 8 / spans;
    for (int k = 0; k < columns; k += block_columns(dtype)) {
        const int groups = min_int(block_groups(dtype), ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *codes = w + block_scale_bytes(dtype, groups);
        prefetch_scales(dtype, 1, w);
        for (int j = 0; j < groups; j++, to += pairs_group_bytes(dtype), codes += group_code_bytes(dtype)) {
            UNROLL for (int l = 0; l < dtype_table[dtype].code_bits; l++) prefetch_quant(1, codes + l * LINE_BYTES);
            UNROLL for (int i = 0; i < spans; i++) {
                line products = line_set1(0);
                UNROLL for (int l = i * lines; l < (i + 1) * lines; l++) {
                    const line x = code_line(dtype, codebook, codes, l);
                    const line even = words_from(x, 0, code_bias(dtype)), odd = words_from(x, 1, code_bias(dtype));
                    line_store(to + 2 * l * LINE_BYTES, even);
                    line_store(to + (2 * l + 1) * LINE_BYTES, odd);
                    if (is_paired(l)) products = line_dot_words(products, even, odd);
                }
                v16_store((float *)(void *)(to + pairs_scales_at(i)), span_scales(dtype, w, spans * j + i));
                if (has_minimums(dtype))
                    v16_store((float *)(void *)(to + pairs_minimums_at(dtype, i)),
                              span_minimums(dtype, w, groups, spans * j + i));
                line_store(to + pairs_starts_at(dtype, i), line_sub(line_set1(0), products));
            }
        }
        w = codes;
    }
}

static void pack_pairs(struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *block = to.panel;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        float inverse;
        const float scale = input_scale(row + k, n, INT16_LIMIT, &inverse);
        int32_t *p = block + to.row, *terms = p + 16 * groups * T;
        for (int i = 0; i < n; i += GROUP_COLUMNS, p += 16 * T, terms += PAIRS_TERMS * T) {
            uint32_t start = 0;
            int sum = 0;
            for (int half = 0; half < 2; half++) {
                int16_t x[16];
                int32_t words[8];
                sum += store_int16_and_sum(x, scaled_inputs(row + k + i + 16 * half, n - i - 16 * half, inverse));
                const uint32_t products = pack_pair_words(x, words);
                terms[(PAIRS_HALVES_START + half) * T] = (int32_t)-products;
                start -= products;
                for (int g = 0; g < 8; g++) p[(8 * half + g) * T] = words[g];
            }
            const float all = (float)sum;
            terms[PAIRS_START * T] = (int32_t)start;
            memcpy(terms + PAIRS_SUM * T, &all, 4);
        }
        block += groups * INT16_GROUP_WORDS * T;
        memcpy(block + to.row, &scale, 4);
        block += T;
    }
}

INLINE void add_pair_products(const int paired, line *sum, line even, line odd, line x_even, line x_odd) {
    if (paired) *sum = line_dot_words(*sum, words_add(even, x_odd), words_add(odd, x_even));
    else *sum = line_dot_words(line_dot_words(*sum, even, x_even), odd, x_odd);
}

// sums[S][T][16] += w x over `columns` columns, as micro_kernel_int16. The sums of a span take the registers, so those
// of a block stay in memory.
INLINE void micro_kernel_pairs(const int dtype, const int S, const int T, const uint8_t *w, size_t strip_bytes,
                               const int32_t *x, int columns, float *sums) {
    const int spans = group_spans(dtype), lines = 8 / spans;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const int32_t *terms = x + 16 * groups * T, *const scales = x + groups * INT16_GROUP_WORDS * T;
        _Alignas(64) float sum[PAIRS_STRIPS * PANEL_ROWS][STRIP_ROWS];
        FOR_TILE(i, t) v16_store(sum[i * T + t], v16_set1(0));
        for (int j = 0; j < groups; j++, terms += PAIRS_TERMS * T, w += pairs_group_bytes(dtype)) {
            UNROLL for (int span = 0; span < spans; span++) {
                const int32_t *start = terms + (spans == 1 ? PAIRS_START : PAIRS_HALVES_START + span) * T;
                line c[PAIRS_STRIPS][PANEL_ROWS];
                UNROLL for (int i = 0; i < S; i++) {
                    const line own = line_load(w + (size_t)i * strip_bytes + pairs_starts_at(dtype, span));
                    UNROLL for (int t = 0; t < T; t++) c[i][t] = line_add(own, line_set1(start[t]));
                }
                UNROLL for (int l = span * lines; l < (span + 1) * lines; l++, x += 2 * T) {
                    line even[PAIRS_STRIPS], odd[PAIRS_STRIPS];
                    UNROLL for (int i = 0; i < S; i++) {
                        even[i] = line_load(w + (size_t)i * strip_bytes + 2 * l * LINE_BYTES);
                        odd[i] = line_load(w + (size_t)i * strip_bytes + (2 * l + 1) * LINE_BYTES);
                    }
                    UNROLL for (int t = 0; t < T; t++) {
                        const line x_even = line_set1(x[t]), x_odd = line_set1(x[T + t]);
                        UNROLL for (int i = 0; i < S; i++)
                            add_pair_products(is_paired(l), &c[i][t], even[i], odd[i], x_even, x_odd);
                    }
                }
                UNROLL for (int i = 0; i < S; i++) {
                    const uint8_t *group = w + (size_t)i * strip_bytes;
                    const v16 scale = v16_load((const float *)(const void *)(group + pairs_scales_at(span)));
                    UNROLL for (int t = 0; t < T; t++) {
                        v16 next = v16_fma(line_to_floats(c[i][t]), scale, v16_load(sum[i * T + t]));
                        if (has_minimums(dtype))
                            next = v16_fma_scalar(
                                v16_load((const float *)(const void *)(group + pairs_minimums_at(dtype, span))),
                                float_at(terms + PAIRS_SUM * T + t), next);
                        v16_store(sum[i * T + t], next);
                    }
                }
                COMPILER_BARRIER();
            }
        }
        FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), v16_load(sum[i * T + t]), float_at(scales + t));
        x = scales + T;
    }
}

SPECIALIZED void multiply_panel_pairs(const int dtype, const int T, const uint8_t *w, size_t strip_bytes, int strips,
                                      const void *x, int columns, float *sums) {
    if (strips == PAIRS_STRIPS) micro_kernel_pairs(dtype, PAIRS_STRIPS, T, w, strip_bytes, x, columns, sums);
    else micro_kernel_pairs(dtype, 1, T, w, strip_bytes, x, columns, sums);
}

MANY_ROWS_KERNEL(panel_kernel_pairs, multiply_panel_pairs, LLAMAC_Q8)
MANY_ROWS_KERNEL(panel_kernel_minimums_pairs, multiply_panel_pairs, LLAMAC_Q4_1)
MANY_ROWS_KERNEL(panel_kernel_half_spans_pairs, multiply_panel_pairs, LLAMAC_Q6_K)
INLINE panel_kernel *const *pairs_kernels(int dtype) {
    return shared_kernel(dtype, panel_kernel_pairs, panel_kernel_minimums_pairs, panel_kernel_half_spans_pairs);
}

UNPACK(pairs_q8, unpack_pairs, LLAMAC_Q8)
UNPACK(pairs_q4_0, unpack_pairs, LLAMAC_Q4_0)
UNPACK(pairs_q4_1, unpack_pairs, LLAMAC_Q4_1)
UNPACK(pairs_q5_0, unpack_pairs, LLAMAC_Q5_0)
UNPACK(pairs_q5_1, unpack_pairs, LLAMAC_Q5_1)
UNPACK(pairs_q8_0, unpack_pairs, LLAMAC_Q8_0)
UNPACK(pairs_q4_k, unpack_pairs, LLAMAC_Q4_K)
UNPACK(pairs_q5_k, unpack_pairs, LLAMAC_Q5_K)
UNPACK(pairs_q6_k, unpack_pairs, LLAMAC_Q6_K)
UNPACK(pairs_iq4_nl, unpack_pairs, LLAMAC_IQ4_NL)
UNPACK(pairs_iq4_xs, unpack_pairs, LLAMAC_IQ4_XS)
UNPACK(pairs_mxfp4, unpack_pairs, LLAMAC_MXFP4)
UNPACK(pairs_q6, unpack_pairs, LLAMAC_Q6)
static unpack_function *const unpack_as_pairs[LLAMAC_N_DTYPES] = {
    [LLAMAC_Q8] = unpack_pairs_q8, [LLAMAC_Q4_0] = unpack_pairs_q4_0, [LLAMAC_Q4_1] = unpack_pairs_q4_1,
    [LLAMAC_Q5_0] = unpack_pairs_q5_0, [LLAMAC_Q5_1] = unpack_pairs_q5_1, [LLAMAC_Q8_0] = unpack_pairs_q8_0,
    [LLAMAC_Q4_K] = unpack_pairs_q4_k, [LLAMAC_Q5_K] = unpack_pairs_q5_k, [LLAMAC_Q6_K] = unpack_pairs_q6_k,
    [LLAMAC_IQ4_NL] = unpack_pairs_iq4_nl, [LLAMAC_IQ4_XS] = unpack_pairs_iq4_xs,
    [LLAMAC_MXFP4] = unpack_pairs_mxfp4, [LLAMAC_Q6] = unpack_pairs_q6,
};
#else
enum { PAIRS_KC = 0, PAIRS_STRIPS = 1 };
INLINE int uses_pairs(int m) { (void)m; return 0; }
INLINE void pack_pairs(struct panel_row to, const float *row, int columns) { (void)to, (void)row, (void)columns; }
INLINE panel_kernel *const *pairs_kernels(int dtype) { (void)dtype; return NULL; }
static unpack_function *const unpack_as_pairs[LLAMAC_N_DTYPES] = { NULL };
#endif
