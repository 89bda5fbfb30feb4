// SPDX-License-Identifier: MIT
// kernels_int16.h - products of the quantized dtypes with int16 inputs. Part of kernels_template.h.
//
// A span is the columns of a group that share a scale: 32, or 16 in q6_k. Unpacked, a group is 8 lines in the form of
// int16_codes, then the scales of each span as floats, then its minimums as floats, if the dtype has them. So dtypes
// with the same spans and minimums share the kernels for unpacked weights: q8's, q4_1's and q6_k's.

enum { UNPACKED_LINES_BYTES = 8 * INT16_UNPACKED_LINE_BYTES };
INLINE int group_spans(const int dtype) { return GROUP_COLUMNS / scale_columns(dtype); }
INLINE int has_minimums(const int dtype) { return dtype_table[dtype].has_minimums; }
INLINE size_t unpacked_group_bytes(const int dtype) {
    return UNPACKED_LINES_BYTES + (size_t)(group_spans(dtype) * (1 + has_minimums(dtype))) * 64;
}
INLINE void unpacked_scales_store(uint8_t *group, const int i, v16 s) {
    v16_store((float *)(void *)(group + UNPACKED_LINES_BYTES + 64 * i), s);
}
INLINE v16 unpacked_scales_load(const uint8_t *group, const int i) {
    return v16_load((const float *)(const void *)(group + UNPACKED_LINES_BYTES + 64 * i));
}

// The scales and minimums (dtype.h: S without the row scale, and M) of span i of a block.
INLINE v16 super_scales(const uint8_t *block, const int i) {
    return v16_load_f16((const uint16_t *)(const void *)block + STRIP_ROWS * i);
}
INLINE v16 load_scales(const int dtype, const uint8_t *p) {
    if (dtype_table[dtype].scale == SCALE_F16) return v16_load_f16((const uint16_t *)(const void *)p);
    return dtype_table[dtype].scale == SCALE_E8M0 ? v16_load_e8m0(p) : v16_load_int8(p);
}
INLINE v16 span_scales(const int dtype, const uint8_t *block, const int i) {
    const v16 s = load_scales(dtype, block + scales_offset(dtype) + (size_t)i * span_scale_bytes(dtype));
    return dtype_table[dtype].has_super_scales ? v16_mul(super_scales(block, 0), s) : s;
}
INLINE v16 span_minimums(const int dtype, const uint8_t *block, const int groups, const int i) {
    const v16 m = load_scales(dtype, block + minimums_offset(dtype, groups) + (size_t)i * span_scale_bytes(dtype));
    return dtype_table[dtype].has_super_scales ? v16_mul(v16_sub(v16_set1(0), super_scales(block, 1)), m) : m;
}

// What code_line adds to the codes.
INLINE int code_bias(const int dtype) {
    const int is_byte = dtype_table[dtype].codebook || dtype_table[dtype].code_bits == 8;
    return is_byte ? BYTE_BIAS : dtype_table[dtype].offset;
}
INLINE lut codebook_load(const int dtype) {
    const int8_t *codebook = dtype_table[dtype].codebook;
    return lut_load(codebook ? codebook : q4_codebook, BYTE_BIAS);   // unused without a codebook
}
// Line l of a group's codes: columns 4 l to 4 l + 3.
INLINE line code_line(const int dtype, lut codebook, const uint8_t *group, const int l) {
    const int bits = dtype_table[dtype].code_bits;
    if (bits == 8) return line_from_bytes(line_load(group + l * LINE_BYTES));
    line x = line_nibbles(line_load(group + l / 2 * LINE_BYTES), l % 2);
    if (bits == 5) x = line_insert_bits(x, line_load(group + 4 * LINE_BYTES), l, 1 << 4);
    if (bits == 6) x = line_insert_bits(x, line_load(group + (4 + l / 4) * LINE_BYTES), l % 4 * 2, 3 << 4);
    return dtype_table[dtype].codebook ? line_lookup(codebook, x) : x;
}

INLINE void unpack_int16(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const lut codebook = codebook_load(dtype);
    const int spans = group_spans(dtype);
    for (int k = 0; k < columns; k += block_columns(dtype)) {
        const int groups = min_int(block_groups(dtype), ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *codes = w + block_scale_bytes(dtype, groups);
        prefetch_scales(dtype, 1, w);
        for (int j = 0; j < groups; j++, to += unpacked_group_bytes(dtype), codes += group_code_bytes(dtype)) {
            UNROLL for (int l = 0; l < dtype_table[dtype].code_bits; l++) prefetch_quant(1, codes + l * LINE_BYTES);
            UNROLL for (int l = 0; l < 8; l += 2) {
                const line x = code_line(dtype, codebook, codes, l), y = code_line(dtype, codebook, codes, l + 1);
                int16_codes_unpack(to, x, y, l, code_bias(dtype));
                int16_codes_unpack(to, x, y, l + 1, code_bias(dtype));
            }
            UNROLL for (int i = 0; i < spans; i++) {
                unpacked_scales_store(to, i, span_scales(dtype, w, spans * j + i));
                if (has_minimums(dtype))
                    unpacked_scales_store(to, spans + i, span_minimums(dtype, w, groups, spans * j + i));
            }
        }
        w = codes;
    }
}

#ifdef INT16_AS_BYTES
// A single row, and codes of at most 5 bits: the inputs' halves h and l (int16_words_to_bytes) are multiplied by bytes.
// Two products per line and lane fit int16 as long as codes times 127 add up to less than 2^15: for 8 lines of codes
// of 4 bits, 4 lines of 5 bits. (With codes of 6 bits this would be slower.)
INLINE int multiplies_bytes(const int dtype, const int unpacked, const int T) {
    return T == 1 && !unpacked && dtype_table[dtype].code_bits <= 5 && !dtype_table[dtype].codebook;
}
INLINE int16_acc multiply_span_bytes(const int dtype, const int span, lut codebook, const uint8_t *group,
                                     const int32_t *x, int16_acc sum) {
    const int lines = 8 / group_spans(dtype), bits = dtype_table[dtype].code_bits, step = 8 >> (bits - 4);
    UNROLL for (int first = span * lines; first < (span + 1) * lines; first += step) {
        byte_acc c = byte_acc_start(code_line(dtype, codebook, group, first), x, first);
        UNROLL for (int l = first + 1; l < first + step; l++)
            c = byte_acc_dot(c, code_line(dtype, codebook, group, l), x, l);
        UNROLL for (int l = first; l < first + step; l++)
            if (l < bits) prefetch_quant(1, group + l * LINE_BYTES);
        sum = int16_acc_add_bytes(sum, c);
    }
    return sum;
}
// The panel of a single row, with bytes for its code words.
static void inputs_to_bytes(const int32_t *x, int columns, int32_t *to) {
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const size_t at = input_words(INPUT_INT16, k);
        for (int i = 0; i < 16 * groups; i += 8) int16_words_to_bytes(x + at + i, to + at + i);
        for (int i = 16 * groups; i <= INT16_GROUP_WORDS * groups; i++) to[at + (size_t)i] = x[at + (size_t)i];
    }
}
#else
INLINE int multiplies_bytes(const int dtype, const int unpacked, const int T) {
    (void)dtype, (void)unpacked, (void)T;
    return 0;
}
static void inputs_to_bytes(const int32_t *x, int columns, int32_t *to) {
    (void)x, (void)columns, (void)to;
}
#endif

// Exact dot products over span `span` of a group. x: the group's code words. plus, minus: see int16_acc_init.
typedef struct { int16_acc v[GEMM_STRIPS][PANEL_ROWS]; } int16_acc_tile;
INLINE void multiply_span(const int dtype, const int unpacked, const int S, const int T, const int span, lut codebook,
                          const uint8_t *codes, size_t strip_bytes, const int32_t *x, const int32_t *plus,
                          const int32_t *minus, int16_acc_tile *to) {
    const int R = int16_rows_per_acc(T), part_major = int16_part_major(T), lines = 8 / group_spans(dtype);
    FOR_TILE_ACCS(i, t) to->v[i][t] = int16_acc_init(plus, minus, unpacked ? UNPACKED_BIAS : code_bias(dtype), T, t);
#ifdef INT16_AS_BYTES
    if (multiplies_bytes(dtype, unpacked, T)) {
        UNROLL for (int i = 0; i < S; i++)
            to->v[i][0] = multiply_span_bytes(dtype, span, codebook, codes + (size_t)i * strip_bytes, x, to->v[i][0]);
        return;
    }
#endif
    UNROLL for (int n = 0; n < lines * INT16_PARTS; n++) {
        const int l = span * lines + (part_major ? n % lines : n / INT16_PARTS);
        const int part = part_major ? n / lines : n % INT16_PARTS;
        if (part_major && n == lines) {
            FOR_TILE_ACCS(i, t) to->v[i][t] = int16_acc_next_part(to->v[i][t]);
            COMPILER_BARRIER();
        }
        UNROLL for (int i = 0; i < S; i++) {
            const uint8_t *group = codes + (size_t)i * strip_bytes;
            const int16_codes a =
                unpacked ? int16_codes_load_unpacked(group, l, part)
                         : int16_codes_from(code_line(dtype, codebook, group, l & ~1),
                                            code_line(dtype, codebook, group, l | 1), l, part);
            if (!unpacked && part == 0 && l < dtype_table[dtype].code_bits)
                prefetch_quant(T, group + l * LINE_BYTES);
            UNROLL for (int t = 0; t < T; t += R) to->v[i][t] = int16_acc_dot(to->v[i][t], a, x, l, part, T, t);
        }
    }
}

INLINE void micro_kernel_int16(const int dtype, const int variant, const int S, const int T, const uint8_t *w,
                               size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const int32_t *x = inputs;
    const int unpacked = variant != PACKED, R = int16_rows_per_acc(T), spans = group_spans(dtype);
    const lut codebook = codebook_load(dtype);
    for (int k = 0; k < columns; k += block_columns(dtype)) {
        const int all_groups = min_int(block_groups(dtype), ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *codes = unpacked ? w : w + block_scale_bytes(dtype, all_groups);
        if (!unpacked) UNROLL for (int i = 0; i < S; i++) prefetch_scales(dtype, T, w + (size_t)i * strip_bytes);
        for (int first = 0; first < all_groups; first += BLOCK_GROUPS) {   // groups that share the inputs' scale
            const int groups = min_int(BLOCK_GROUPS, all_groups - first);
            const int32_t *input_sums = x + groups * 16 * T, *const scales = x + groups * INT16_GROUP_WORDS * T;
            struct { v16 v[GEMM_STRIPS][PANEL_ROWS]; } sum;
            FOR_TILE(i, t) sum.v[i][t] = v16_set1(0);
            for (int j = first; j < first + groups; j++, input_sums += 2 * T, x += 16 * T) {
                UNROLL for (int span = 0; span < spans; span++) {
                    int16_acc_tile c;
                    const int32_t *first_half = input_sums + T;
                    multiply_span(dtype, unpacked, S, T, span, codebook, codes, strip_bytes, x,
                                  spans == 2 && span == 0 ? first_half : input_sums, span ? first_half : NULL, &c);
                    UNROLL for (int i = 0; i < S; i++) {
                        const uint8_t *block = w + (size_t)i * strip_bytes;
                        const uint8_t *group = codes + (size_t)i * strip_bytes;
                        const v16 scale = unpacked ? unpacked_scales_load(group, span)
                                                   : span_scales(dtype, block, spans * j + span);
                        UNROLL for (int t = 0; t < T; t++)
                            sum.v[i][t] = v16_fma(int16_acc_to_float(c.v[i][t - t % R], T, t % R), scale, sum.v[i][t]);
                        if (!has_minimums(dtype)) continue;
                        const v16 minimum = unpacked ? unpacked_scales_load(group, spans + span)
                                                     : span_minimums(dtype, block, all_groups, spans * j + span);
                        UNROLL for (int t = 0; t < T; t++)
                            sum.v[i][t] = v16_fma_scalar(minimum, (float)input_sums[t], sum.v[i][t]);
                    }
                }
                SPILL_SUMS(sum, S * T);
                codes += unpacked ? unpacked_group_bytes(dtype) : group_code_bytes(dtype);
            }
            FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), sum.v[i][t], float_at(scales + t));
            x = scales + T;
        }
        w = codes;
    }
}

// Returns the kernel that a dtype shares: q8's, q4_1's or q6_k's.
INLINE panel_kernel *const *shared_kernel(const int dtype, panel_kernel *const *whole_spans,
                                          panel_kernel *const *minimums, panel_kernel *const *half_spans) {
    return has_minimums(dtype) ? minimums : group_spans(dtype) == 2 ? half_spans : whole_spans;
}
