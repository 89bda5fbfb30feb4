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

enum { PEAK_STEPS = 32, PEAK_ROUNDS = 16, PEAK_LINE = 128 };

_Static_assert(4 * (int)PEAK_STEPS == (int)BLOCK_COLUMNS, "the inputs are one block of int16");
_Static_assert((int)EXPANDED_LINE_Q8 <= (int)PEAK_LINE, "a line of operands is too short");

struct peak_operands {
    _Alignas(64) uint8_t lines[GEMM_STRIPS][PEAK_STEPS * PEAK_LINE];
    int32_t words[PANEL_ROWS * (2 * PEAK_STEPS + 5)];   // the inputs of a block in int16
};
// What lies there may be anything, and may change: products that do not change could be taken out of a loop.
#define TOUCHED(operands) __asm__ volatile("" : : "r"(operands) : "memory")

// One loop over all sums of a tile: of two loops in each other GCC unrolls the outer one too late to keep the sums in registers.
#define EACH_SUM(j) _Pragma("GCC unroll 32") for (int j = 0; j < S * T; j++)

INLINE void pass_f32(const int S, const int T, const struct peak_operands *o, float *sums) {
    v16 c[GEMM_STRIPS * PANEL_ROWS];
    EACH_SUM(j) c[j] = v16_set1(0);
    for (int k = 0; k < PEAK_STEPS; k++)
        EACH_SUM(j) c[j] = v16_fma(v16_load((const float *)(const void *)(o->lines[j % S] + LINE_BYTES * k)), v16_set1(float_at(o->words + k * T + j / S)), c[j]);
    EACH_SUM(j) v16_store(sums + 16 * j, c[j]);
}

// Of the rows that share sums the first stands for all.
INLINE void pass_int8(const int S, const int T, const struct peak_operands *o, float *sums) {
    static const int8_t nothing[GROUP_COLUMNS];
    const scales scale = scales_load(o->lines[0]);
    const int R = dots_rows(1);
    int32_t starts[2];
    dots_starts(nothing, starts);
    dots c[GEMM_STRIPS * PANEL_ROWS];
    EACH_SUM(j) if (j / S % R == 0) c[j] = dots_from(starts[0], grid_load(o->lines[0]), 1);
    for (int k = 0; k < PEAK_STEPS; k++)
        EACH_SUM(j) if (j / S % R == 0) c[j] = dots_add(c[j], line_load(o->lines[j % S] + LINE_BYTES * k), o->words, k, T, j / S, 1);
    EACH_SUM(j) if (j / S % R == 0) v16_store(sums + 16 * j, scaled_float(scaled_first(dots_row(c[j], 0, 1), scale)));
}

INLINE void pass_int16(const int S, const int T, const struct peak_operands *o, float *sums) {
    static const int32_t none[PANEL_ROWS];
    const int R = dots8_rows(T);
    dots8 c[GEMM_STRIPS * PANEL_ROWS];
    EACH_SUM(j) if (j / S % R == 0) c[j] = dots8_start(none, T, 0, 1);
    for (int k = 0; k < PEAK_STEPS; k++)
        UNROLL for (int part = 0; part < WIDE_PARTS; part++)
            EACH_SUM(j) if (j / S % R == 0) c[j] = dots8_add(c[j], wide_reload(o->lines[j % S], k, part), o->words, k, part, T, j / S);
    EACH_SUM(j) if (j / S % R == 0) v16_store(sums + 16 * j, dots8_float(c[j], T, 0));
}
#undef EACH_SUM

// Small whole numbers in every kind's own format.
static void fill_operands(int input, struct peak_operands *o) {
    const float w = 3, x = -2;
    uint8_t codes[8 * LINE_BYTES];   // a group: some vocabularies expand two lines together
    for (int i = 0; i < 8 * LINE_BYTES; i++) codes[i] = (uint8_t)(1 + i % 31);
    for (int s = 0; s < GEMM_STRIPS; s++)
        for (int k = 0; k < PEAK_STEPS; k++) {
            uint8_t *to = o->lines[s] + k * (input == INPUT_INT16 ? EXPANDED_LINE_Q8 : LINE_BYTES);
            if (input == INPUT_INT16) wide_expand(to, codes, 0);
            else if (input == INPUT_INT8) memcpy(to, codes, LINE_BYTES);
            else for (int r = 0; r < STRIP_ROWS; r++) memcpy(to + 4 * r, &w, 4);
        }
    for (int i = 0; i < PANEL_ROWS * PEAK_STEPS; i++) {
        if (input == INPUT_F32) memcpy(o->words + i, &x, 4);
        else o->words[i] = 0x01020304;
    }
    if (input != INPUT_INT16) return;
    float row[4 * PEAK_STEPS];
    for (int i = 0; i < 4 * PEAK_STEPS; i++) row[i] = (float)(i % 5);
    for (int t = 0; t < PANEL_ROWS; t++) pack_int16((struct panel_row){ o->words, PANEL_ROWS, t }, row, 4 * PEAK_STEPS);
}

// As many strips as there are registers for their sums.
#define PEAK(kind, input, sum, weights_per_line) \
    enum { PEAK_SUMS_##kind = SUMS_IN_FLIGHT * sizeof(v16) / sizeof(sum) }; \
    static __attribute__((noinline)) void run_##kind(const struct peak_operands *operands, float *sums) { \
        TOUCHED(operands); \
        pass_##kind(strips_for(PANEL_ROWS, PEAK_SUMS_##kind), PANEL_ROWS, operands, sums); \
    } \
    static double peak_##kind(int passes, float *result) { \
        const int S = strips_for(PANEL_ROWS, PEAK_SUMS_##kind); \
        struct peak_operands operands; \
        _Alignas(64) float sums[16 * GEMM_STRIPS * PANEL_ROWS] = { 0 }; \
        fill_operands(input, &operands); \
        for (int i = 0; i < passes * PEAK_ROUNDS; i++) run_##kind(&operands, sums); \
        *result = v16_sum(v16_load(sums)); \
        return (double)passes * PEAK_ROUNDS * PEAK_STEPS * S * PANEL_ROWS * weights_per_line; \
    }
PEAK(f32, INPUT_F32, v16, 16)
PEAK(int8, INPUT_INT8, dots, 64)
PEAK(int16, INPUT_INT16, dots8, 64)
#undef PEAK
#undef TOUCHED
