// SPDX-License-Identifier: MIT
// kernels_int8.h - products of q4 and q4s with int8 inputs. Part of kernels_template.h.

// Unpacked, a group is 8 lines of int8 codes, grid included, then the block scales of both halves.
enum { Q4_UNPACKED_GROUP_BYTES = 8 * LINE_BYTES + 2 * 64 };

// Whether each half of a group has scales of its own (q4), or both have the same (q4s).
INLINE int halves_have_scales(const int dtype) { return scale_columns(dtype) < GROUP_COLUMNS; }

INLINE void unpack_int8(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const lut codebook = lut_load(q4_codebook, Q4_BIAS);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *s = w, *codes = w + block_scale_bytes(dtype, groups);
        prefetch_scales(dtype, 1, w);
        for (int j = 0; j < groups; j++, to += Q4_UNPACKED_GROUP_BYTES) {
            UNROLL for (int h = 0; h < 2; h++) {
                const grid_offsets grid = grid_offsets_load(s);
                block_scales_store(to + 8 * LINE_BYTES + 64 * h, block_scales_load(s));
                UNROLL for (int l = 2 * h; l < 2 * h + 2; l++, codes += LINE_BYTES) {
                    const line x = line_load(codes);
                    prefetch_quant(1, codes);
                    line_store(to + 128 * l, q4_codes(codebook, x, grid, 0, 1));
                    line_store(to + 128 * l + 64, q4_codes(codebook, x, grid, 1, 1));
                }
                if (h || halves_have_scales(dtype)) s += STRIP_ROWS;
            }
        }
        w = codes;
    }
}

// Dot products over half h of a group, 16 columns, before scaling. s: the half's block scales. x: the group's words.
typedef struct { q4_row_acc v[GEMM_STRIPS][PANEL_ROWS]; } q4_acc_tile;
INLINE void multiply_half(const int unpacked, const int S, const int T, const int h, lut codebook, const uint8_t *s,
                          const uint8_t *codes, size_t strip_bytes, const int32_t *x, q4_acc_tile *to) {
    const int R = q4_rows_per_acc(unpacked);
    const int32_t *compensation = x + (COMPENSATION_WORD + h) * T;
    q4_acc c[GEMM_STRIPS][PANEL_ROWS];
    grid_offsets grid[GEMM_STRIPS];
    if (!unpacked) UNROLL for (int i = 0; i < S; i++) grid[i] = grid_offsets_load(s + (size_t)i * strip_bytes);
    FOR_TILE_ACCS(i, t) c[i][t] = q4_acc_init(compensation[t], grid[i], unpacked);
    if (unpacked) {
        UNROLL for (int g = 4 * h; g < 4 * h + 4; g++) UNROLL for (int i = 0; i < S; i++) {
            const line a = line_load(codes + (size_t)i * strip_bytes + 64 * g);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = q4_acc_dot(c[i][t], a, x, g, T, t, unpacked);
        }
    } else {
        UNROLL for (int g = 4 * h; g < 4 * h + 4; g += 2) UNROLL for (int i = 0; i < S; i++) {
            const uint8_t *at = codes + (size_t)i * strip_bytes + 32 * g;
            const line packed = line_load(at), a = q4_codes(codebook, packed, grid[i], 0, 0);
            prefetch_quant(T, at);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = q4_acc_dot(c[i][t], a, x, g, T, t, unpacked);
            const line b = q4_codes(codebook, packed, grid[i], 1, 0);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = q4_acc_dot(c[i][t], b, x, g + 1, T, t, unpacked);
        }
    }
    FOR_TILE(i, t) to->v[i][t] = q4_acc_row(c[i][t - t % R], t % R, unpacked);
}
INLINE block_scales half_scales(const int unpacked, const int h, const uint8_t *s, const uint8_t *codes) {
    return unpacked ? block_scales_load_unpacked(codes + 8 * LINE_BYTES + 64 * h) : block_scales_load(s);
}

INLINE void micro_kernel_q4(const int dtype, const int unpacked, const int S, const int T, const uint8_t *w,
                            size_t strip_bytes, const void *inputs, int columns, float *sums) {
    const int32_t *x = inputs;
    const lut codebook = lut_load(q4_codebook, Q4_BIAS);
    const int carried = S * T <= MAX_CARRIED_SUMS;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        v16 acc[GEMM_STRIPS][PANEL_ROWS];   // the sums, in registers for one block, if they are carried
        if (carried) FOR_TILE(i, t) acc[i][t] = v16_load(sums + 16 * (i * T + t));
        const uint8_t *s0 = w, *codes = unpacked ? w : w + block_scale_bytes(dtype, groups);
        if (!unpacked) UNROLL for (int i = 0; i < S; i++) prefetch_scales(dtype, T, w + (size_t)i * strip_bytes);
        for (int j = 0; j < groups; j++, x += GROUP_WORDS * T) {
            const uint8_t *s1 = halves_have_scales(dtype) ? s0 + STRIP_ROWS : s0;   // of the group's second half
            q4_acc_tile c;
            struct { q4_scaled v[GEMM_STRIPS][PANEL_ROWS]; } sum;
            multiply_half(unpacked, S, T, 0, codebook, s0, codes, strip_bytes, x, &c);
            UNROLL for (int i = 0; i < S; i++) {
                const block_scales scale =
                    half_scales(unpacked, 0, s0 + (size_t)i * strip_bytes, codes + (size_t)i * strip_bytes);
                UNROLL for (int t = 0; t < T; t++) sum.v[i][t] = q4_scale(c.v[i][t], scale);
            }
            SPILL_SUMS(sum, S * T);
            if (!carried) COMPILER_BARRIER();
            multiply_half(unpacked, S, T, 1, codebook, s1, codes, strip_bytes, x, &c);
            UNROLL for (int i = 0; i < S; i++) {
                const block_scales scale =
                    half_scales(unpacked, 1, s1 + (size_t)i * strip_bytes, codes + (size_t)i * strip_bytes);
                UNROLL for (int t = 0; t < T; t++) {
                    const v16 dot = q4_scaled_to_float(q4_scale_add(sum.v[i][t], c.v[i][t], scale));
                    if (carried) acc[i][t] = v16_fma_scalar(dot, float_at(x + GROUP_SCALE_WORD * T + t), acc[i][t]);
                    else add_scaled(sums + 16 * (i * T + t), dot, float_at(x + GROUP_SCALE_WORD * T + t));
                }
            }
            s0 = s1 + STRIP_ROWS;
            codes += unpacked ? Q4_UNPACKED_GROUP_BYTES : 4 * LINE_BYTES;
        }
        if (carried) FOR_TILE(i, t) v16_store(sums + 16 * (i * T + t), acc[i][t]);
        w = codes;
    }
}
