// SPDX-License-Identifier: MIT
// kernels_quant.h - products with quantized weights. Inputs are quantized to int8 or int16, the micro-kernels
// multiply codes by codes, and sums stay exact integers until scales are applied. Part of kernels_template.h.
// kernels.h specifies the order of operations (struct gemm) and the panels; dtype.h the weights.

// Prefetch distance of codes in bytes; 768 to 1536 measure alike.
enum { PREFETCH_BYTES_QUANT = 1152 };

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

// Words of an int8 group, per row: 8 of codes, then these.
enum { COMPENSATION_WORD = 8, GROUP_SCALE_WORD = 10 };

static void pack_int8(struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *p = to.panel;
    for (int k = 0; k < columns; k += GROUP_COLUMNS, p += GROUP_WORDS * T) {
        const int n = min_int(GROUP_COLUMNS, columns - k);
        int8_t x[GROUP_COLUMNS] = { 0 };
        int32_t compensation[2];
        float inverse;
        const float scale = input_scale(row + k, n, INT8_LIMIT, &inverse);
        if (inverse > 0)
            for (int i = 0; i < n; i += 16)
                v16_store_int8(x + i, v16_mul(load_up_to_16(row + k + i, n - i), v16_set1(inverse)));
        q4_compensation(x, compensation);
        for (int g = 0; g < 8; g++) memcpy(p + word_index(g, T, to.row), x + 4 * g, 4);
        p[COMPENSATION_WORD * T + to.row] = compensation[0], p[(COMPENSATION_WORD + 1) * T + to.row] = compensation[1];
        memcpy(p + GROUP_SCALE_WORD * T + to.row, &scale, 4);
    }
}

static void pack_int16(struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *p = to.panel;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        int16_t x[BLOCK_COLUMNS] = { 0 };
        float inverse;
        const float scale = input_scale(row + k, n, INT16_LIMIT, &inverse);
        if (inverse > 0)
            for (int i = 0; i < n; i += 16)
                v16_store_int16(x + i, v16_mul(load_up_to_16(row + k + i, n - i), v16_set1(inverse)));
        for (int i = 0; i < groups * GROUP_COLUMNS; i += 16, p += 8 * T) {
            int32_t words[8];
            q8_pack_words(x + i, words);
            for (int g = 0; g < 8; g++) p[word_index(g, T, to.row)] = words[g];
        }
        for (int j = 0; j < groups; j++, p += T) {
            int sum = 0;
            for (int i = 0; i < GROUP_COLUMNS; i++) sum += x[GROUP_COLUMNS * j + i];
            p[to.row] = sum;
        }
        memcpy(p + to.row, &scale, 4);
        p += T;
    }
}

// ---- unpacking weights: work done once per pass instead of once per panel
//
// An unpacked q4 group is 8 lines of int8 codes, grid included, then the block scales of both halves. An unpacked q8
// group is 8 lines in the form of q8_codes, then the block scales as floats.

enum {
    Q4_UNPACKED_GROUP_BYTES = 8 * LINE_BYTES + 2 * 64,
    Q8_UNPACKED_GROUP_BYTES = 8 * Q8_UNPACKED_LINE_BYTES + 64,
};

INLINE void unpack_q4(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const lut codebook = lut_load(q4_codebook);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *s = w, *codes = w + block_scale_bytes(dtype, groups);
        for (int j = 0; j < groups; j++, to += Q4_UNPACKED_GROUP_BYTES) {
            UNROLL for (int h = 0; h < 2; h++) {
                const grid_offsets grid = grid_offsets_load(s);
                block_scales_store(to + 8 * LINE_BYTES + 64 * h, block_scales_load(s));
                UNROLL for (int l = 2 * h; l < 2 * h + 2; l++, codes += LINE_BYTES) {
                    const line x = line_load(codes);
                    __builtin_prefetch(codes + PREFETCH_BYTES_QUANT);
                    line_store(to + 128 * l, q4_codes(codebook, x, grid, 0, 1));
                    line_store(to + 128 * l + 64, q4_codes(codebook, x, grid, 1, 1));
                }
                if (h || dtype == LLAMAC_Q4) s += STRIP_ROWS;
            }
        }
        w = codes;
    }
}

INLINE void unpack_q8(const uint8_t *w, int columns, uint8_t *to) {
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *codes = w + block_scale_bytes(LLAMAC_Q8, groups);
        for (int j = 0; j < groups; j++, to += Q8_UNPACKED_GROUP_BYTES) {
            for (int l = 0; l < 8; l++) q8_codes_unpack(to, codes, l);
            codes += 8 * LINE_BYTES;
            v16_store((float *)(void *)(to + 8 * Q8_UNPACKED_LINE_BYTES), v16_load_int8(w + STRIP_ROWS * j));
        }
        w = codes;
    }
}

// ---- micro-kernels: sums[S][T][16] += w x over `columns` columns. `unpacked`: w was written by unpack_q4 or
// unpack_q8.

// Each accumulator of a tile: one holds R rows.
#define FOR_TILE_ACCS(s, t) UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t += R)

// Forces an array of n vectors into memory where registers are scarce; the compiler would otherwise spill in the
// inner loop.
#define SPILL_SUMS(x, n) do { if ((n) > MAX_LIVE_SUMS) __asm__ volatile("" : "+m"(x)); } while (0)
// Keeps the compiler from carrying memory contents in registers across this point.
#define COMPILER_BARRIER() __asm__ volatile("" : : : "memory")

INLINE void add_scaled(float *sums, v16 x, float d) { v16_store(sums, v16_fma_scalar(x, d, v16_load(sums))); }

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
            __builtin_prefetch(at + PREFETCH_BYTES_QUANT);
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
                            size_t strip_bytes, const int32_t *x, int columns, float *sums) {
    const lut codebook = lut_load(q4_codebook);
    const int carried = S * T <= MAX_CARRIED_SUMS;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        v16 acc[GEMM_STRIPS][PANEL_ROWS];   // the sums, in registers for one block, if they are carried
        if (carried) FOR_TILE(i, t) acc[i][t] = v16_load(sums + 16 * (i * T + t));
        const uint8_t *s0 = w, *codes = unpacked ? w : w + block_scale_bytes(dtype, groups);
        for (int j = 0; j < groups; j++, x += GROUP_WORDS * T) {
            const uint8_t *s1 = dtype == LLAMAC_Q4 ? s0 + STRIP_ROWS : s0;   // scales of the group's second half
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

INLINE void micro_kernel_q8(const int unpacked, const int S, const int T, const uint8_t *w, size_t strip_bytes,
                            const int32_t *x, int columns, float *sums) {
    const int part_major = q8_part_major(T), R = q8_rows_per_acc(T);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const int32_t *input_sums = x + groups * 16 * T;   // after the code words; the block's input scale follows
        const uint8_t *codes = unpacked ? w : w + block_scale_bytes(LLAMAC_Q8, groups);
        struct { v16 v[GEMM_STRIPS][PANEL_ROWS]; } sum;
        FOR_TILE(i, t) sum.v[i][t] = v16_set1(0);
        for (int j = 0; j < groups; j++, input_sums += T) {
            q8_acc c[GEMM_STRIPS][PANEL_ROWS];
            FOR_TILE_ACCS(i, t) c[i][t] = q8_acc_init(input_sums, T, t, unpacked);
            UNROLL for (int n = 0; n < 8 * Q8_PARTS; n++) {
                const int l = part_major ? n % 8 : n / Q8_PARTS, part = part_major ? n / 8 : n % Q8_PARTS;
                if (part_major && n == 8) {
                    FOR_TILE_ACCS(i, t) c[i][t] = q8_acc_next_part(c[i][t]);
                    COMPILER_BARRIER();
                }
                UNROLL for (int i = 0; i < S; i++) {
                    const uint8_t *group = codes + (size_t)i * strip_bytes;
                    const q8_codes a =
                        unpacked ? q8_codes_load_unpacked(group, l, part) : q8_codes_load(group, l, part);
                    if (!unpacked && part == 0) __builtin_prefetch(group + l * LINE_BYTES + PREFETCH_BYTES_QUANT);
                    UNROLL for (int t = 0; t < T; t += R) c[i][t] = q8_acc_dot(c[i][t], a, x, l, part, T, t);
                }
            }
            UNROLL for (int i = 0; i < S; i++) {
                const v16 scale =
                    unpacked ? v16_load((const float *)(const void *)(codes + (size_t)i * strip_bytes +
                                                                      8 * Q8_UNPACKED_LINE_BYTES))
                             : v16_load_int8(w + (size_t)i * strip_bytes + STRIP_ROWS * j);
                UNROLL for (int t = 0; t < T; t++)
                    sum.v[i][t] = v16_fma(q8_acc_to_float(c[i][t - t % R], T, t % R), scale, sum.v[i][t]);
            }
            SPILL_SUMS(sum, S * T);
            codes += unpacked ? Q8_UNPACKED_GROUP_BYTES : 8 * LINE_BYTES;
            x += 16 * T;
        }
        FOR_TILE(i, t) add_scaled(sums + 16 * (i * T + t), sum.v[i][t], float_at(input_sums + t));
        x = input_sums + T;
        w = codes;
    }
}

INLINE void micro_kernel_quant(const int dtype, const int unpacked, const int S, const int T, const uint8_t *w,
                               size_t strip_bytes, const int32_t *x, int columns, float *sums) {
    if (dtype == LLAMAC_Q8) micro_kernel_q8(unpacked, S, T, w, strip_bytes, x, columns, sums);
    else micro_kernel_q4(dtype, unpacked, S, T, w, strip_bytes, x, columns, sums);
}
// All strips of a group against one panel. A single row alternates between the strips block by block: several
// concurrent memory streams are faster than one.
SPECIALIZED void panel_kernel_quant(const int dtype, const int unpacked, const int T, const uint8_t *w,
                                    size_t strip_bytes, int strips, const void *inputs, int columns, float *sums) {
    const int S = tile_strips(T, dtype == LLAMAC_Q8 ? Q8_TILE_ACCS : Q4_TILE_ACCS), input = input_type_of(dtype);
    const int step = T == 1 && !unpacked ? BLOCK_COLUMNS : columns;
    for (int k = 0; k < columns; k += step) {
        const int n = min_int(step, columns - k);
        const uint8_t *at = w + (size_t)(k / BLOCK_COLUMNS) * block_bytes(dtype, BLOCK_GROUPS);
        const int32_t *x = (const int32_t *)inputs + input_words(input, k) * (size_t)T;
        int s = 0;
        for (; s + S <= strips; s += S)
            micro_kernel_quant(dtype, unpacked, S, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
                               sums + (size_t)s * 16 * (size_t)T);
        for (; s < strips; s++)
            micro_kernel_quant(dtype, unpacked, 1, T, at + (size_t)s * strip_bytes, strip_bytes, x, n,
                               sums + (size_t)s * 16 * (size_t)T);
    }
}
PANEL_KERNELS(panel_kernels_q8, panel_kernel_quant, LLAMAC_Q8, 0)
PANEL_KERNELS(panel_kernels_q8_unpacked, panel_kernel_quant, LLAMAC_Q8, 1)
PANEL_KERNELS(panel_kernels_q4, panel_kernel_quant, LLAMAC_Q4, 0)
PANEL_KERNELS(panel_kernels_q4s, panel_kernel_quant, LLAMAC_Q4S, 0)
PANEL_KERNELS(panel_kernels_q4_unpacked, panel_kernel_quant, LLAMAC_Q4, 1)   // unpacked q4s has the same layout

// ---- one row of a quantized matrix

INLINE void gather_quant(const int dtype, const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) {
    const int r = row % STRIP_ROWS, per_scale = scale_columns(dtype);
    const uint8_t *p = w + (size_t)(row / STRIP_ROWS) * strip_bytes;
    float d;
    memcpy(&d, p + 4 * r, 4);
    p += LINE_BYTES;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int n = min_int(BLOCK_COLUMNS, columns - k), groups = ceil_div(n, GROUP_COLUMNS);
        const uint8_t *codes = p + block_scale_bytes(dtype, groups);
        for (int i = 0; i < n; i++) {
            const int s = (int8_t)p[i / per_scale * STRIP_ROWS + r];
            const int byte = dtype == LLAMAC_Q8 ? codes[i / 4 * LINE_BYTES + 4 * r + i % 4]
                                                : codes[i / 8 * LINE_BYTES + 4 * r + i % 4];
            const int c =
                dtype == LLAMAC_Q8 ? byte - Q8_OFFSET : q4_codebook[i % 8 < 4 ? byte & 15 : byte >> 4] + (s & 3);
            y[k + i] = (float)(s * c) * d;
        }
        p += block_bytes(dtype, groups);
    }
}
GATHER(q8, gather_quant, LLAMAC_Q8)
GATHER(q4, gather_quant, LLAMAC_Q4)
GATHER(q4s, gather_quant, LLAMAC_Q4S)
