// SPDX-License-Identifier: MIT
// kernels_measure.h - loops that measure the two limits of a forward pass with the kernels' own instructions: memory
// reads and multiply-adds. Part of kernels_template.h; specified in kernels.h.

// ---- memory reads: S concurrent streams, each over its own part of the block, into four vector sums

INLINE float read_streams(const int S, const float *block, size_t floats) {
    const size_t part = floats / (size_t)(S * READ_STEP) * READ_STEP;
    v16 sums[READ_STEP / 16] = { v16_set1(0), v16_set1(0), v16_set1(0), v16_set1(0) };
    for (size_t i = 0; i < part; i += READ_STEP)
        UNROLL for (int s = 0; s < S; s++)
            UNROLL for (int j = 0; j < READ_STEP / 16; j++)
                sums[j] = v16_add(sums[j], v16_load(block + (size_t)s * part + i + 16 * j));
    return v16_reduce_add(v16_add(v16_add(sums[0], sums[1]), v16_add(sums[2], sums[3])));
}
static float read_block(const float *block, size_t floats, int streams) {
    return streams == 1 ? read_streams(1, block, floats)
                        : streams == 2 ? read_streams(2, block, floats) : read_streams(4, block, floats);
}

// ---- multiply-adds: a tile of S strips x PANEL_ROWS rows, repeated over PEAK_STEPS lines that stay in L1

enum { PEAK_STEPS = 32, PEAK_ROUNDS = 16, PEAK_LINE_BYTES = 128 };

_Static_assert(4 * (int)PEAK_STEPS == (int)BLOCK_COLUMNS, "the int16 inputs are one block");
_Static_assert((int)INT16_UNPACKED_LINE_BYTES <= (int)PEAK_LINE_BYTES, "a line of operands is too short");

struct peak_operands {
    _Alignas(64) uint8_t lines[GEMM_STRIPS][PEAK_STEPS * PEAK_LINE_BYTES];
    int32_t words[PANEL_ROWS * (BLOCK_GROUPS * INT16_GROUP_WORDS + 1)];   // one block of int16 inputs needs the most
};
// Makes the compiler assume that the operands changed, so that it cannot hoist products out of a loop.
#define CLOBBER(operands) __asm__ volatile("" : : "r"(operands) : "memory")

// Each accumulator j = S t + s of a tile, in a single loop: GCC unrolls the outer of two nested loops too late to
// keep the accumulators in registers.
#define FOR_PEAK_ACCS(j) _Pragma("GCC unroll 32") for (int j = 0; j < S * T; j++)

INLINE void peak_loop_f32(const int S, const int T, const struct peak_operands *o, float *sums) {
    v16 c[GEMM_STRIPS * PANEL_ROWS];
    FOR_PEAK_ACCS(j) c[j] = v16_set1(0);
    for (int k = 0; k < PEAK_STEPS; k++)
        FOR_PEAK_ACCS(j) c[j] = v16_fma(v16_load((const float *)(const void *)(o->lines[j % S] + LINE_BYTES * k)),
                                        v16_set1(float_at(o->words + k * T + j / S)), c[j]);
    FOR_PEAK_ACCS(j) v16_store(sums + 16 * j, c[j]);
}

// Where an accumulator holds R rows, the first row's j stands for it.
INLINE void peak_loop_int8(const int S, const int T, const struct peak_operands *o, float *sums) {
    static const int8_t zeros[GROUP_COLUMNS];
    const block_scales scale = block_scales_load(o->lines[0]);
    const int R = int8_rows_per_acc(1);
    int32_t compensation[2];
    int8_compensation(zeros, compensation);
    int8_acc c[GEMM_STRIPS * PANEL_ROWS];
    FOR_PEAK_ACCS(j) if (j / S % R == 0) c[j] = int8_acc_init(compensation[0], grid_offsets_load(o->lines[0]), 1);
    for (int k = 0; k < PEAK_STEPS; k++)
        FOR_PEAK_ACCS(j) if (j / S % R == 0)
            c[j] = int8_acc_dot(c[j], line_load(o->lines[j % S] + LINE_BYTES * k), o->words, k, T, j / S, 1);
    FOR_PEAK_ACCS(j) if (j / S % R == 0)
        v16_store(sums + 16 * j, int8_scaled_to_float(int8_scale(int8_acc_row(c[j], 0, 1), scale)));
}

INLINE void peak_loop_int16(const int S, const int T, const struct peak_operands *o, float *sums) {
    static const int32_t zeros[PANEL_ROWS];
    const int R = int16_rows_per_acc(T);
    int16_acc c[GEMM_STRIPS * PANEL_ROWS];
    FOR_PEAK_ACCS(j) if (j / S % R == 0) c[j] = int16_acc_init(zeros, NULL, UNPACKED_BIAS, T, 0);
    for (int k = 0; k < PEAK_STEPS; k++)
        UNROLL for (int part = 0; part < INT16_PARTS; part++)
            FOR_PEAK_ACCS(j) if (j / S % R == 0)
                c[j] = int16_acc_dot(c[j], int16_codes_load_unpacked(o->lines[j % S], k, part), o->words, k, part, T,
                                     j / S);
    FOR_PEAK_ACCS(j) if (j / S % R == 0) v16_store(sums + 16 * j, int16_acc_to_float(c[j], T, 0));
}

#if defined(SIMD_BF16_PAIRS)
INLINE void peak_loop_bf16_pairs(const int S, const int T, const struct peak_operands *o, float *sums) {
    v16 c[GEMM_STRIPS * PANEL_ROWS];
    FOR_PEAK_ACCS(j) c[j] = v16_set1(0);
    for (int k = 0; k < PEAK_STEPS; k++)
        FOR_PEAK_ACCS(j)
            c[j] = v16_dot_bf16_pairs(line_load(o->lines[j % S] + LINE_BYTES * k), o->words[k * T + j / S], c[j]);
    FOR_PEAK_ACCS(j) v16_store(sums + 16 * j, c[j]);
}
#endif
#undef FOR_PEAK_ACCS

// Small integers in the format of each input type.
static void fill_operands(int input, struct peak_operands *o) {
    const float w = 3, x = -2;
    uint8_t codes[LINE_BYTES];
    for (int i = 0; i < LINE_BYTES; i++) codes[i] = (uint8_t)(1 + i % 31);
    for (int s = 0; s < GEMM_STRIPS; s++)
        for (int k = 0; k < PEAK_STEPS; k++) {
            uint8_t *to = o->lines[s] + k * (input == INPUT_INT16 ? INT16_UNPACKED_LINE_BYTES : LINE_BYTES);
            if (input == INPUT_INT16) int16_codes_unpack(to, line_load(codes), line_load(codes), 0, UNPACKED_BIAS);
            else if (input == INPUT_INT8) memcpy(to, codes, LINE_BYTES);
            else for (int r = 0; r < STRIP_ROWS; r++) memcpy(to + 4 * r, &w, 4);
        }
    for (int i = 0; i < PANEL_ROWS * PEAK_STEPS; i++) {
        if (is_float_input(input)) memcpy(o->words + i, &x, 4);
        else o->words[i] = 0x01020304;
    }
    if (input != INPUT_INT16) return;
    float row[4 * PEAK_STEPS];
    for (int i = 0; i < 4 * PEAK_STEPS; i++) row[i] = (float)(i % 5);
    for (int t = 0; t < PANEL_ROWS; t++) pack_int16((struct panel_row){ o->words, PANEL_ROWS, t }, row, 4 * PEAK_STEPS);
}

// As many strips as there are registers for their accumulators.
#define PEAK(kind, input, acc, weights_per_line) \
    enum { PEAK_ACCS_##kind = FLOAT_TILE_ACCS * sizeof(v16) / sizeof(acc) }; \
    static __attribute__((noinline)) void run_##kind(const struct peak_operands *operands, float *sums) { \
        CLOBBER(operands); \
        peak_loop_##kind(tile_strips(PANEL_ROWS, PEAK_ACCS_##kind), PANEL_ROWS, operands, sums); \
    } \
    static double peak_##kind(int passes, float *result) { \
        const int S = tile_strips(PANEL_ROWS, PEAK_ACCS_##kind); \
        struct peak_operands operands; \
        _Alignas(64) float sums[16 * GEMM_STRIPS * PANEL_ROWS] = { 0 }; \
        fill_operands(input, &operands); \
        for (int i = 0; i < passes * PEAK_ROUNDS; i++) run_##kind(&operands, sums); \
        *result = v16_reduce_add(v16_load(sums)); \
        return (double)passes * PEAK_ROUNDS * PEAK_STEPS * S * PANEL_ROWS * weights_per_line; \
    }
PEAK(f32, INPUT_F32, v16, 16)
PEAK(int8, INPUT_INT8, int8_acc, 64)
#ifdef SIMD_TILES
// The tiles of one group of TILE_ROWS input rows.
static double peak_int16(int passes, float *result) {
    struct peak_operands operands;
    tile_sums sums;
    fill_operands(INPUT_INT16, &operands);
    tiles_configure(LLAMAC_Q8, TILE_ROWS);
    for (int i = 0; i < passes * PEAK_ROUNDS * PEAK_STEPS; i++)
        tiles_multiply(i % 2, operands.words, operands.words + 8 * TILE_ROWS, operands.lines[0]);
    tiles_store(0, &sums);
    tiles_end();
    *result = (float)sums.v[0][0][0];
    return (double)passes * PEAK_ROUNDS * PEAK_STEPS * STRIP_ROWS * TILE_ROWS * GROUP_COLUMNS;
}
#else
PEAK(int16, INPUT_INT16, int16_acc, 64)
#endif
// Narrow panels are multiplied like int8 inputs.
static double peak_fast_int16(int passes, float *result) {
    return uses_narrow_panels(MANY_ROWS) ? peak_int8(passes, result) : peak_int16(passes, result);
}
#if defined(SIMD_BF16_PAIRS)
PEAK(bf16_pairs, INPUT_BF16, v16, 32)
static double peak_fast_bf16(int passes, float *result) {
    return uses_bf16_pairs(MANY_ROWS) && has_bf16_pairs() ? peak_bf16_pairs(passes, result) : peak_f32(passes, result);
}
#else
static double peak_fast_bf16(int passes, float *result) { return peak_f32(passes, result); }
#endif
#undef PEAK
#undef CLOBBER
