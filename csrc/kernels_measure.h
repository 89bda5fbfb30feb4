// SPDX-License-Identifier: MIT
// kernels_measure.h - the two limits of a forward pass, in the kernels' own instructions: reading memory, and multiply-adds. Part of
// kernels_tmpl.h; contracts stand in kernels.h.

// ---- reading: S runs side by side, each a part of the block, four sums

INLINE float read_runs(const int S, const float *block, size_t floats) {
    const size_t part = floats / (size_t)(S * READ_STEP) * READ_STEP;
    v16 sums[READ_STEP / 16] = { v16_set1(0), v16_set1(0), v16_set1(0), v16_set1(0) };
    for (size_t i = 0; i < part; i += READ_STEP)
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int j = 0; j < READ_STEP / 16; j++) sums[j] = v16_add(sums[j], v16_load(block + (size_t)s * part + i + 16 * j));
    return v16_sum(v16_add(v16_add(sums[0], sums[1]), v16_add(sums[2], sums[3])));
}
static float read_block(const float *block, size_t floats, int streams) {
    return streams == 1 ? read_runs(1, block, floats) : streams == 2 ? read_runs(2, block, floats) : read_runs(4, block, floats);
}

// ---- multiply-adds: a tile of S strips x PANEL_ROWS inputs over PEAK_STEPS lines that stay in the first cache, again and again

enum { PEAK_STEPS = 32, PEAK_ROUNDS = 16 };   // as long as whole numbers do not overflow

// What lies in memory may have changed: products that do not change could be taken out of the loop otherwise.
#define TOUCHED(w, x) __asm__ volatile("" : : "r"(w), "r"(x) : "memory")

INLINE double peak_float(const int S, const int T, int passes, float *result) {
    _Alignas(64) float w[GEMM_STRIPS][16 * PEAK_STEPS], x[PANEL_ROWS * PEAK_STEPS];
    v16 c[GEMM_STRIPS][PANEL_ROWS], total = v16_set1(0);
    for (int i = 0; i < GEMM_STRIPS * 16 * PEAK_STEPS; i++) w[i / (16 * PEAK_STEPS)][i % (16 * PEAK_STEPS)] = (float)(i % 7 - 3);
    for (int i = 0; i < PANEL_ROWS * PEAK_STEPS; i++) x[i] = (float)(i % 5 - 2);
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_set1(0);
    for (int round = 0; round < passes * PEAK_ROUNDS; round++) {
        TOUCHED(w, x);
        for (int k = 0; k < PEAK_STEPS; k++) UNROLL for (int s = 0; s < S; s++) {
            const v16 weights = v16_load(w[s] + 16 * k);
            UNROLL for (int t = 0; t < T; t++) c[s][t] = v16_fma(weights, v16_set1(x[k * T + t]), c[s][t]);
        }
    }
    UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) total = v16_add(total, c[s][t]);
    *result = v16_sum(total);
    return (double)passes * PEAK_ROUNDS * PEAK_STEPS * S * T * 16;
}

INLINE double peak_q4(const int S, const int T, int passes, float *result) {
    _Alignas(64) uint8_t w[GEMM_STRIPS][LINE_BYTES * PEAK_STEPS];
    int32_t x[PANEL_ROWS * PEAK_STEPS];
    uint8_t ones[STRIP_ROWS];
    v16 total = v16_set1(0);
    memset(ones, 1, sizeof ones);
    for (int i = 0; i < GEMM_STRIPS * LINE_BYTES * PEAK_STEPS; i++) w[i / (LINE_BYTES * PEAK_STEPS)][i % (LINE_BYTES * PEAK_STEPS)] = (uint8_t)(i % 61);
    for (int i = 0; i < PANEL_ROWS * PEAK_STEPS; i++) x[i] = 0x01020304 * (i % 9);
    const scales scale = scales_load(ones);
    for (int pass = 0; pass < passes; pass++) {
        dots c[GEMM_STRIPS][PANEL_ROWS];
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) c[s][t] = dots_from(0);
        for (int round = 0; round < PEAK_ROUNDS; round++) {
            TOUCHED(w, x);
            for (int k = 0; k < PEAK_STEPS; k++) UNROLL for (int s = 0; s < S; s++) {
                const line codes = line_load(w[s] + LINE_BYTES * k);
                UNROLL for (int t = 0; t < T; t++) c[s][t] = dots_add(c[s][t], codes, x[k * T + t]);
            }
        }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) total = v16_add(total, scaled_float(scaled_first(c[s][t], scale)));
    }
    *result = v16_sum(total);
    return (double)passes * PEAK_ROUNDS * PEAK_STEPS * S * T * LINE_BYTES;
}

INLINE double peak_q8(const int S, const int T, int passes, float *result) {
    _Alignas(64) uint8_t lines[LINE_BYTES * GEMM_STRIPS], w[GEMM_STRIPS][EXPANDED_LINE_Q8 * PEAK_STEPS];
    int32_t x[2 * PANEL_ROWS * PEAK_STEPS];
    v16 total = v16_set1(0);
    for (int i = 0; i < LINE_BYTES * GEMM_STRIPS; i++) lines[i] = (uint8_t)(100 + i % 61);
    for (int i = 0; i < GEMM_STRIPS * PEAK_STEPS; i++) wide_expand(w[i / PEAK_STEPS] + i % PEAK_STEPS * EXPANDED_LINE_Q8, lines + i % GEMM_STRIPS * LINE_BYTES);
    for (int i = 0; i < PANEL_ROWS * PEAK_STEPS; i++) pack8((const int16_t[]){ 1, 2, 3, (int16_t)(i % 9) }, x + 2 * i);
    for (int pass = 0; pass < passes; pass++) {
        dots8 c[GEMM_STRIPS][PANEL_ROWS];
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) c[s][t] = dots8_start(0, 1);
        for (int round = 0; round < PEAK_ROUNDS; round++) {
            TOUCHED(w, x);
            for (int k = 0; k < PEAK_STEPS; k++) UNROLL for (int part = 0; part < WIDE_PARTS; part++) UNROLL for (int s = 0; s < S; s++) {
                const wide codes = wide_reload(w[s] + EXPANDED_LINE_Q8 * k, part);
                UNROLL for (int t = 0; t < T; t++) c[s][t] = dots8_add(c[s][t], codes, x + 2 * k * T + t, T, part);
            }
        }
        UNROLL for (int s = 0; s < S; s++) UNROLL for (int t = 0; t < T; t++) total = v16_add(total, dots8_float(c[s][t]));
    }
    *result = v16_sum(total);
    return (double)passes * PEAK_ROUNDS * PEAK_STEPS * S * T * LINE_BYTES;
}
#undef TOUCHED

static double peak_f32(int passes, float *result) { return peak_float(strips_for(PANEL_ROWS, SUMS_IN_FLIGHT), PANEL_ROWS, passes, result); }
static double peak_int8(int passes, float *result) { return peak_q4(LINES_IN_FLIGHT, PANEL_ROWS, passes, result); }
static double peak_int16(int passes, float *result) { return peak_q8(LINES_IN_FLIGHT_Q8, PANEL_ROWS, passes, result); }
