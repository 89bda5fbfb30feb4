// SPDX-License-Identifier: MIT
// kernels_quant.h - products with quantized weights: inputs become whole numbers, tiles multiply them with codes, sums are exact until the
// scales come in. Part of kernels_tmpl.h; the orders stand at struct gemm, the layouts in dtype.h.

// Bytes that codes are fetched ahead of their use (768 to 1536 measure alike).
enum { FETCH_AHEAD_QUANT = 1152 };

INLINE float float_at(const int32_t *p) { float f; memcpy(&f, p, 4); return f; }

// ---- inputs

static void pack_f32(struct panel_row to, const float *row, int columns) {
    float *p = (float *)(void *)to.panel + to.place;
    if (to.height == 1) memcpy(p, row, sizeof(float) * (size_t)columns);
    else for (int k = 0; k < columns; k++) p[(size_t)k * (size_t)to.height] = row[k];
}

INLINE v16 load_some(const float *x, int n) { return n >= 16 ? v16_load(x) : v16_load_n(x, max_int(0, n)); }

// The scale of n numbers whose largest shall become `limit`, and its inverse; both 0 where the numbers are next to nothing.
INLINE float input_scale(const float *x, int n, float limit, float *inverse) {
    v16 top = v16_set1(0), poison = v16_set1(0);
    for (int i = 0; i < n; i += 16) {
        const v16 v = load_some(x + i, n - i);
        top = v16_max(v16_abs(v), top);
        poison = v16_fma(v, v16_set1(0), poison);   // NaN from a NaN or an infinity, else 0
    }
    const float max = v16_max_lane(top), bad = v16_sum(poison);
    *inverse = max >= 0x1p-100f && bad == bad ? limit / max : 0;
    return bad != bad ? bad : *inverse > 0 ? max / limit : 0;
}

static void pack_int8(struct panel_row to, const float *row, int columns) {
    const int T = to.height;
    int32_t *p = to.panel;
    for (int k = 0; k < columns; k += GROUP_COLUMNS, p += GROUP_WORDS * T) {
        const int n = min_int(GROUP_COLUMNS, columns - k);
        int8_t x[GROUP_COLUMNS] = { 0 };
        int32_t starts[2];
        float inverse;
        const float scale = input_scale(row + k, n, INT8_LIMIT, &inverse);
        if (inverse > 0) for (int i = 0; i < n; i += 16) v16_to_int8(x + i, v16_mul(load_some(row + k + i, n - i), v16_set1(inverse)));
        dots_starts(x, starts);
        for (int g = 0; g < 8; g++) memcpy(p + word_place(g, T, to.place), x + 4 * g, 4);
        p[8 * T + to.place] = starts[0], p[9 * T + to.place] = starts[1];
        memcpy(p + 10 * T + to.place, &scale, 4);
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
        if (inverse > 0) for (int i = 0; i < n; i += 16) v16_to_int16(x + i, v16_mul(load_some(row + k + i, n - i), v16_set1(inverse)));
        for (int i = 0; i < groups * GROUP_COLUMNS; i += 16, p += 8 * T) {
            int32_t words[8];
            pack8(x + i, words);
            for (int g = 0; g < 8; g++) p[word_place(g, T, to.place)] = words[g];
        }
        for (int j = 0; j < groups; j++, p += T) {
            int sum = 0;
            for (int i = 0; i < GROUP_COLUMNS; i++) sum += x[GROUP_COLUMNS * j + i];
            p[to.place] = sum;
        }
        memcpy(p + to.place, &scale, 4);
        p += T;
    }
}

// ---- codes unpacked: what a pass needs more than once

enum { EXPANDED_GROUP_Q4 = 8 * LINE_BYTES + 2 * 64, EXPANDED_GROUP_Q8 = 8 * EXPANDED_LINE_Q8 + 64 };

INLINE void expand_q4(const int dtype, const uint8_t *w, int columns, uint8_t *to) {
    const table codebook = table_load(q4_codebook);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *s = w, *codes = w + block_scale_bytes(dtype, groups);
        for (int j = 0; j < groups; j++, to += EXPANDED_GROUP_Q4) {
            UNROLL for (int h = 0; h < 2; h++) {
                const grids grid = grid_load(s);
                scales_store(to + 512 + 64 * h, scales_load(s));
                UNROLL for (int l = 2 * h; l < 2 * h + 2; l++, codes += LINE_BYTES) {
                    const line x = line_load(codes);
                    __builtin_prefetch(codes + FETCH_AHEAD_QUANT);
                    line_store(to + 128 * l, codes_of(codebook, x, grid, 0, 1));
                    line_store(to + 128 * l + 64, codes_of(codebook, x, grid, 1, 1));
                }
                if (h || dtype == LLAMAC_Q4) s += STRIP_ROWS;
            }
        }
        w = codes;
    }
}

INLINE void expand_q8(const uint8_t *w, int columns, uint8_t *to) {
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const uint8_t *codes = w + block_scale_bytes(LLAMAC_Q8, groups);
        for (int j = 0; j < groups; j++, to += EXPANDED_GROUP_Q8) {
            for (int l = 0; l < 8; l++) wide_expand(to, codes, l);
            codes += 8 * LINE_BYTES;
            v16_store((float *)(void *)(to + 8 * EXPANDED_LINE_Q8), v16_load_int8(w + STRIP_ROWS * j));
        }
        w = codes;
    }
}

// ---- tiles of S strips x T rows: sums[S][T][16] += over `columns` k

// Keeps n sums in memory while others need the registers; the compiler would spill in the inner loop instead.
#define PARK(x, n) do { if ((n) > SUMS_KEPT) __asm__ volatile("" : "+m"(x)); } while (0)
// What is in memory is read and written there, not kept in registers from before to after.
#define FORGET() __asm__ volatile("" : : : "memory")

INLINE void add_to(float *sums, v16 x, float d) { v16_store(sums, v16_fma1(x, d, v16_load(sums))); }

// The products of 16 columns, half h of a group, with scales that are still to come. `s`: the half's block scales.
typedef struct { row_dots v[GEMM_STRIPS][PANEL_ROWS]; } dots_tile;
INLINE void multiply_half(const int expanded, const int S, const int T, const int h, table codebook, const uint8_t *s, const uint8_t *codes,
                          size_t strip_bytes, const int32_t *x, dots_tile *to) {
    const int R = dots_rows(expanded);
    const int32_t *starts = x + (8 + h) * T;
    dots c[GEMM_STRIPS][PANEL_ROWS];
    grids grid[GEMM_STRIPS];
    if (!expanded) UNROLL for (int i = 0; i < S; i++) grid[i] = grid_load(s + (size_t)i * strip_bytes);
    UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots_from(starts[t], grid[i], expanded);
    if (expanded) {
        UNROLL for (int g = 4 * h; g < 4 * h + 4; g++) UNROLL for (int i = 0; i < S; i++) {
            const line a = line_load(codes + (size_t)i * strip_bytes + 64 * g);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots_add(c[i][t], a, x, g, T, t, expanded);
        }
    } else {
        UNROLL for (int g = 4 * h; g < 4 * h + 4; g += 2) UNROLL for (int i = 0; i < S; i++) {
            const uint8_t *at = codes + (size_t)i * strip_bytes + 32 * g;
            const line raw = line_load(at), a = codes_of(codebook, raw, grid[i], 0, 0);
            __builtin_prefetch(at + FETCH_AHEAD_QUANT);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots_add(c[i][t], a, x, g, T, t, expanded);
            const line b = codes_of(codebook, raw, grid[i], 1, 0);
            UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots_add(c[i][t], b, x, g + 1, T, t, expanded);
        }
    }
    UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t++) to->v[i][t] = dots_row(c[i][t - t % R], t % R, expanded);
}
INLINE scales half_scales(const int expanded, const int h, const uint8_t *s, const uint8_t *codes) {
    return expanded ? scales_reload(codes + 8 * LINE_BYTES + 64 * h) : scales_load(s);
}

INLINE void tile_q4(const int dtype, const int expanded, const int S, const int T, const uint8_t *w, size_t strip_bytes, const int32_t *x, int columns, float *sums) {
    const table codebook = table_load(q4_codebook);
    const int held = S * T <= SUMS_HELD;
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        v16 acc[GEMM_STRIPS][PANEL_ROWS];   // sums of a block, where they can be held
        if (held) UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t++) acc[i][t] = v16_load(sums + 16 * (i * T + t));
        const uint8_t *s0 = w, *codes = expanded ? w : w + block_scale_bytes(dtype, groups);
        for (int j = 0; j < groups; j++, x += GROUP_WORDS * T) {
            const uint8_t *s1 = dtype == LLAMAC_Q4 ? s0 + STRIP_ROWS : s0;   // of the group's second half
            dots_tile c;
            struct { scaled v[GEMM_STRIPS][PANEL_ROWS]; } sum;
            multiply_half(expanded, S, T, 0, codebook, s0, codes, strip_bytes, x, &c);
            UNROLL for (int i = 0; i < S; i++) {
                const scales scale = half_scales(expanded, 0, s0 + (size_t)i * strip_bytes, codes + (size_t)i * strip_bytes);
                UNROLL for (int t = 0; t < T; t++) sum.v[i][t] = scaled_first(c.v[i][t], scale);
            }
            PARK(sum, S * T);
            if (!held) FORGET();
            multiply_half(expanded, S, T, 1, codebook, s1, codes, strip_bytes, x, &c);
            UNROLL for (int i = 0; i < S; i++) {
                const scales scale = half_scales(expanded, 1, s1 + (size_t)i * strip_bytes, codes + (size_t)i * strip_bytes);
                UNROLL for (int t = 0; t < T; t++) {
                    const v16 whole = scaled_float(scaled_add(sum.v[i][t], c.v[i][t], scale));
                    if (held) acc[i][t] = v16_fma1(whole, float_at(x + 10 * T + t), acc[i][t]);
                    else add_to(sums + 16 * (i * T + t), whole, float_at(x + 10 * T + t));
                }
            }
            s0 = s1 + STRIP_ROWS;
            codes += expanded ? EXPANDED_GROUP_Q4 : 4 * LINE_BYTES;
        }
        if (held) UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t++) v16_store(sums + 16 * (i * T + t), acc[i][t]);
        w = codes;
    }
}

INLINE void tile_q8(const int expanded, const int S, const int T, const uint8_t *w, size_t strip_bytes, const int32_t *x, int columns, float *sums) {
    const int passes = wide_passes(T), R = dots8_rows(T);
    for (int k = 0; k < columns; k += BLOCK_COLUMNS) {
        const int groups = min_int(BLOCK_GROUPS, ceil_div(columns - k, GROUP_COLUMNS));
        const int32_t *starts = x + groups * 16 * T;
        const uint8_t *codes = expanded ? w : w + block_scale_bytes(LLAMAC_Q8, groups);
        struct { v16 v[GEMM_STRIPS][PANEL_ROWS]; } sum;
        UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t++) sum.v[i][t] = v16_set1(0);
        for (int j = 0; j < groups; j++, starts += T) {
            dots8 c[GEMM_STRIPS][PANEL_ROWS];
            UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots8_start(starts, T, t, expanded);
            UNROLL for (int n = 0; n < 8 * WIDE_PARTS; n++) {
                const int l = passes ? n % 8 : n / WIDE_PARTS, part = passes ? n / 8 : n % WIDE_PARTS;
                if (passes && n == 8) {
                    UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots8_next(c[i][t]);
                    FORGET();
                }
                UNROLL for (int i = 0; i < S; i++) {
                    const uint8_t *group = codes + (size_t)i * strip_bytes;
                    const wide a = expanded ? wide_reload(group, l, part) : wide_load(group, l, part);
                    if (!expanded && part == 0) __builtin_prefetch(group + l * LINE_BYTES + FETCH_AHEAD_QUANT);
                    UNROLL for (int t = 0; t < T; t += R) c[i][t] = dots8_add(c[i][t], a, x, l, part, T, t);
                }
            }
            UNROLL for (int i = 0; i < S; i++) {
                const v16 scale = expanded ? v16_load((const float *)(const void *)(codes + (size_t)i * strip_bytes + 8 * EXPANDED_LINE_Q8))
                                           : v16_load_int8(w + (size_t)i * strip_bytes + STRIP_ROWS * j);
                UNROLL for (int t = 0; t < T; t++) sum.v[i][t] = v16_fma(dots8_float(c[i][t - t % R], T, t % R), scale, sum.v[i][t]);
            }
            PARK(sum, S * T);
            codes += expanded ? EXPANDED_GROUP_Q8 : 8 * LINE_BYTES;
            x += 16 * T;
        }
        UNROLL for (int i = 0; i < S; i++) UNROLL for (int t = 0; t < T; t++) add_to(sums + 16 * (i * T + t), sum.v[i][t], float_at(starts + t));
        x = starts + T;
        w = codes;
    }
}

// All strips of a group for one panel. With one row, strips take turns block by block: several streams of memory are faster than one.
INLINE void tile_quant(const int dtype, const int expanded, const int S, const int T, const uint8_t *w, size_t strip_bytes, const int32_t *x, int columns, float *sums) {
    if (dtype == LLAMAC_Q8) tile_q8(expanded, S, T, w, strip_bytes, x, columns, sums);
    else tile_q4(dtype, expanded, S, T, w, strip_bytes, x, columns, sums);
}
SHARED void quant_group(const int dtype, const int expanded, const int T, const uint8_t *w, size_t strip_bytes, int strips, const void *inputs, int columns, float *sums) {
    const int S = strips_for(T, dtype == LLAMAC_Q8 ? LINES_IN_FLIGHT_Q8 : LINES_IN_FLIGHT), input = input_of(dtype);
    const int step = T == 1 && !expanded ? BLOCK_COLUMNS : columns;
    for (int k = 0; k < columns; k += step) {
        const int n = min_int(step, columns - k);
        const uint8_t *at = w + (size_t)(k / BLOCK_COLUMNS) * block_bytes(dtype, BLOCK_GROUPS);
        const int32_t *x = (const int32_t *)inputs + input_words(input, k) * (size_t)T;
        int s = 0;
        for (; s + S <= strips; s += S) tile_quant(dtype, expanded, S, T, at + (size_t)s * strip_bytes, strip_bytes, x, n, sums + (size_t)s * 16 * (size_t)T);
        for (; s < strips; s++) tile_quant(dtype, expanded, 1, T, at + (size_t)s * strip_bytes, strip_bytes, x, n, sums + (size_t)s * 16 * (size_t)T);
    }
}
TILES(tiles_q8, quant_group, LLAMAC_Q8, 0)
TILES(tiles_q8_expanded, quant_group, LLAMAC_Q8, 1)
TILES(tiles_q4, quant_group, LLAMAC_Q4, 0)
TILES(tiles_q4s, quant_group, LLAMAC_Q4S, 0)
TILES(tiles_q4_expanded, quant_group, LLAMAC_Q4, 1)   // q4s' too: unpacked, they are alike

// ---- one row of a matrix

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
            const int byte = dtype == LLAMAC_Q8 ? codes[i / 4 * LINE_BYTES + 4 * r + i % 4] : codes[i / 8 * LINE_BYTES + 4 * r + i % 4];
            const int c = dtype == LLAMAC_Q8 ? byte - Q8_OFFSET : q4_codebook[i % 8 < 4 ? byte & 15 : byte >> 4] + (s & 3);
            y[k + i] = (float)(s * c) * d;
        }
        p += block_bytes(dtype, groups);
    }
}
static void gather_q8(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_quant(LLAMAC_Q8, w, strip_bytes, row, columns, y); }
static void gather_q4(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_quant(LLAMAC_Q4, w, strip_bytes, row, columns, y); }
static void gather_q4s(const uint8_t *w, size_t strip_bytes, int row, int columns, float *y) { gather_quant(LLAMAC_Q4S, w, strip_bytes, row, columns, y); }
