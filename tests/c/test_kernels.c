// SPDX-License-Identifier: MIT
// test_kernels.c - the kernels of every instruction set that this machine supports: the same bits as the scalar kernels
// for all tails and alignments, and close to the same formulas in float64.
#include <math.h>
#include "common.h"
#include "format.h"
#include "half.h"
#include "kernel_tables.h"
#include "mamba_kernels.h"


static void f16_conversions_round_to_nearest_even(void) {
#if defined(__x86_64__)
    for (int h = 0; h < 65536; h++) {
        const float x = f32_from_f16((uint16_t)h);
        if (x == x) CHECK(f16_from_f32(x) == h, "f16 %04x -> %g -> %04x", h, (double)x, f16_from_f32(x));
    }
#endif
    CHECK(f16_from_f32(65519.0f) == 0x7bff && f16_from_f32(65520.0f) == 0x7c00, "rounding at the top");
    CHECK(f16_from_f32(0x1p-25f) == 0 && f16_from_f32(0x1.000002p-25f) == 1, "rounding at the bottom");
    CHECK(f16_from_f32(0x1.8p-24f) == 2, "a tie between subnormals goes to even");
    CHECK(f16_from_f32(1.0f + 0x1p-11f) == 0x3c00 && f16_from_f32(1.0f + 0x1.8p-10f) == 0x3c02, "ties go to even");
}

// ---- products

static void pack_rows(const struct kernels *kernels, int dtype, int fast, void *panels, int m, const float *x,
                      int columns) {
    const int input = input_type_of(dtype);
    for (int r = 0; r < m; r++) {
        const struct panel_row to = panel_row(panels, m, kernels->panel_rows[input], input_words(input, columns), r);
        pack_input(kernels, input, to, x + r * columns, columns, m, fast);
    }
}

// Computes one row at a time, with the strips in two calls. The bits must be those of one call for all.
static void check_gemm_in_parts(const struct kernels *kernels, int dtype, const struct gemm *g, const float *x,
                                const float *expected) {
    const int strips = g->last;
    void *panel = take(4 * input_words(input_type_of(dtype), g->columns));
    for (int r = 0; r < g->m; r++) {
        struct gemm part = *g;
        pack_rows(kernels, dtype, g->fast, panel, 1, x + r * g->columns, g->columns);
        part.x = panel, part.m = 1, part.y = g->y + r * g->rows, part.last = strips / 2;
        kernels->gemm(&part);
        part.first = part.last, part.last = strips;
        kernels->gemm(&part);
    }
    CHECK(same(g->y, expected, (size_t)(g->m * g->rows)), "%s: single rows differ: dtype %d, %d x %d, %d rows",
          kernels->name, dtype, g->rows, g->columns, g->m);
    free(panel);
}

// With row_weights, y_rows and copy: row r, weighted, goes to row m - 1 - r; the copy is the product before weighting.
static void check_gemm_weighted(const struct kernels *kernels, const struct gemm *g, const float *expected) {
    float weights[64], *const copy = take_floats(g->m, g->rows);
    int y_rows[64];
    for (int r = 0; r < g->m; r++) weights[r] = 0.5f + (float)r, y_rows[r] = g->m - 1 - r;
    struct gemm weighted = *g;
    weighted.row_weights = weights, weighted.y_rows = y_rows, weighted.copy = copy, weighted.accumulate = 1;
    memset(g->y, 0, sizeof(float) * (size_t)(g->m * g->rows));
    kernels->gemm(&weighted);
    for (int r = 0; r < g->m; r++)
        for (int o = 0; o < g->rows; o++) {
            const float product = copy[r * g->rows + o], scaled = product * weights[r];
            CHECK(g->y[y_rows[r] * g->rows + o] == scaled && (g->accumulate || product == expected[r * g->rows + o]),
                  "%s: weighted row %d", kernels->name, r);
        }
    free(copy);
}

static void check_gather(int dtype, const uint8_t *w, size_t strip_bytes, int row, int columns) {
    float *found = take_floats(1, columns), *scalar = take_floats(1, columns);
    for (int t = 0; t < n_tables; t++) {
        tables[t]->gather[dtype](w, strip_bytes, row, columns, t ? found : scalar);
        if (t) CHECK(same(found, scalar, (size_t)columns), "%s: gather", tables[t]->name);
    }
    for (int k = 0; k < columns; k++) {
        const double expected = weight_at(dtype, w, strip_bytes, columns, row, k);
        CHECK(fabs((double)scalar[k] - expected) <= 1e-7 * fabs(expected),
              "gather: dtype %d, column %d is %g, expected %g", dtype, k, (double)scalar[k], expected);
    }
    free(found), free(scalar);
}

static void check_gemm_of(int dtype, int fast, int rows, int columns, int m, int biased, int accumulate,
                          uint64_t *state) {
    const size_t strip_bytes = dtype_strip_bytes(dtype, (uint64_t)columns), strips = (size_t)ceil_div(rows, 16);
    const size_t outputs = (size_t)(m * rows);
    uint8_t *w = take(strips * strip_bytes);
    float *x = take_floats(m, columns), *bias = take_floats(1, rows);
    float *initial = take_floats(m, rows), *y = take_floats(m, rows), *expected = take_floats(m, rows);
    void *panels = take(4 * input_words(input_type_of(dtype), columns) * (size_t)m);
    void *scratch = take(gemm_scratch_bytes(m));
    struct cancel cancel = { 0 };
    fill_random(x, (size_t)(m * columns), state), fill_random(bias, (size_t)rows, state);
    fill_random(initial, outputs, state);
    fill_matrix(dtype, w, strip_bytes, rows, columns, 1, state);
    const struct gemm g = {
        .dtype = dtype, .w = w, .strip_bytes = strip_bytes, .last = (int)strips, .rows = rows, .columns = columns,
        .x = panels, .m = m, .fast = fast, .bias = biased ? bias : NULL, .y = y, .y_stride = (size_t)rows,
        .accumulate = accumulate, .scratch = scratch, .cancel = &cancel,
    };
    for (int t = 0; t < n_tables; t++) {
        pack_rows(tables[t], dtype, fast, panels, m, x, columns);
        memcpy(y, initial, sizeof *y * outputs);
        tables[t]->gemm(&g);
        if (t == 0) memcpy(expected, y, sizeof *y * outputs);
        CHECK(same(y, expected, outputs), "%s differs: dtype %d, fast %d, %d x %d, %d rows", tables[t]->name,
              dtype, fast, rows, columns, m);
        memcpy(y, initial, sizeof *y * outputs);
        check_gemm_in_parts(tables[t], dtype, &g, x, expected);
        check_gemm_weighted(tables[t], &g, expected);
    }
    for (int i = 0; i < 20; i++) {   // some outputs against float64
        const int r = random_below(state, m), o = random_below(state, rows);
        double sum = 0, magnitude = 0;
        for (int k = 0; k < columns; k++) {
            const double input = (fast ? fast_input_at : input_at)(dtype, x + r * columns, columns, k);
            const double product = weight_at(dtype, w, strip_bytes, columns, o, k) * input;
            sum += product;
            magnitude += fabs(product);
        }
        if (biased) sum += (double)bias[o];
        if (accumulate) sum += (double)initial[r * rows + o];
        CHECK(fabs(sum - (double)expected[r * rows + o]) <= 1e-6 * (magnitude + 2),
              "dtype %d, %d columns: output %d of row %d is %g, expected %g", dtype, columns, o, r,
              (double)expected[r * rows + o], sum);
    }
    check_gather(dtype, w, strip_bytes, rows - 1, columns);
    free(w), free(x), free(bias), free(panels), free(scratch), free(initial), free(y), free(expected);
}

static void check_gemm(int dtype, int rows, int columns, int m, int biased, int accumulate, uint64_t *state) {
    for (int fast = 0; fast <= has_fast(dtype); fast++)
        check_gemm_of(dtype, fast, rows, columns, m, biased, accumulate, state);
}

static void products_have_the_same_bits(void) {
    uint64_t state = 1;
    for (int dtype = LLAMAC_F32; dtype < LLAMAC_N_DTYPES; dtype++) {
        for (int rows = 1; rows <= 83; rows += rows < 20 ? sparser(7) : 9 * sparser(3)) {
            const int columns = 1 + random_below(&state, 90), m = 1 + random_below(&state, 20);
            check_gemm(dtype, rows, columns, m, rows % 2, rows % 3 == 0, &state);
        }
        for (int m = 1; m <= 40; m += sparser(13)) check_gemm(dtype, 70, 33, m, 1, 0, &state);
        for (int columns = 510; columns <= 1040; columns += 53 * sparser(9))
            check_gemm(dtype, 100, columns, columns % 2 ? 7 : 37, 0, 1, &state);
        // more columns than any pass has
        if (dtype % sparser(4) == 0) check_gemm(dtype, 20, 33000, 1, 0, 0, &state);
        for (int columns = 1; columns <= 300; columns += 23 * sparser(6))
            check_gemm(dtype, 40, columns, 1 + columns % 13, 0, 0, &state);
    }
}

// Sets all scales and minimums to the largest value of their type, or to its negative.
static void fill_scales(int dtype, uint8_t *w, int columns, int positive) {
    const struct layout *f = &layouts[dtype];
    const uint16_t largest = positive ? 0x7bff : 0xfbff, super[] = { 0x3c00, 0x3800 };   // 65504; 1 and 0.5
    for (int r = 0; r < 16 && f->row_scales; r++) ((float *)(void *)w)[r] = 1;
    for (int i = 0; i * f->block < columns; i++) {
        const struct layout_block b = layout_block(f, columns, i);
        uint8_t *p = w + b.start;
        memset(p, f->scale == 3 ? positive ? 140 : 0 : positive ? 127 : 0x81, (size_t)b.codes);
        for (int at = 0; at < b.scales; at += 2) memcpy(p + at, &super[at / 32], 2);
        for (int at = 0; at < b.codes && f->scale == 2; at += 2) memcpy(p + at, &largest, 2);
    }
}

// Weights of equal bytes `fill` and the largest scales, with inputs that are all 1 except for `extreme`: everywhere if
// it is 1 or -1, else at column 40 only. All m rows are equal.
enum { MOST = 8 };   // rows: enough for narrow panels and for pairs
static void check_extreme_product(int dtype, int fast, int m, int fill, float extreme) {
    enum { COLUMNS = 256 };
    const size_t strip_bytes = dtype_strip_bytes(dtype, COLUMNS);
    uint8_t *w = take(strip_bytes);
    int32_t panel[MOST * COLUMNS];
    float x[MOST * COLUMNS], y[MOST * 16], expected[16];
    void *scratch = take(gemm_scratch_bytes(m));
    struct cancel cancel = { 0 };
    memset(w, dtype == LLAMAC_Q8 && !fill ? 1 : fill, strip_bytes);
    fill_scales(dtype, w, COLUMNS, fill % 2);
    for (int k = 0; k < m * COLUMNS; k++) x[k] = fabsf(extreme) == 1 || k % COLUMNS == 40 ? extreme : 1;
    const struct gemm g = { .dtype = dtype, .w = w, .strip_bytes = strip_bytes, .last = 1, .rows = 16,
                            .columns = COLUMNS, .x = panel, .m = m, .fast = fast, .y = y, .y_stride = 16,
                            .scratch = scratch, .cancel = &cancel };
    for (int t = 0; t < n_tables; t++) {
        pack_rows(tables[t], dtype, fast, panel, m, x, COLUMNS);
        tables[t]->gemm(&g);
        if (t == 0) memcpy(expected, y, sizeof expected);
        if (isfinite(extreme))
            for (int r = 0; r < m; r++)
                CHECK(same(y + 16 * r, expected, 16), "%s differs: dtype %d, fast %d, %d rows, bytes %d, input %g",
                      tables[t]->name, dtype, fast, m, fill, (double)extreme);
        else
            for (int i = 0; i < 16 * m; i++)
                CHECK(y[i] != y[i], "%s: dtype %d hides %g", tables[t]->name, dtype, (double)extreme);
    }
    double sum = 0;
    for (int k = 0; k < COLUMNS; k++)
        sum += weight_at(dtype, w, strip_bytes, COLUMNS, 3, k) *
               (fast ? fast_input_at : input_at)(dtype, x, COLUMNS, k);
    if (isfinite(extreme))
        CHECK(fabs((double)expected[3] - sum) <= 1e-5 * fabs(sum) + 1e-30,
              "dtype %d, bytes %d, input %g: %g, expected %g", dtype, fill, (double)extreme, (double)expected[3], sum);
    free(w), free(scratch);
}

static void quantized_products_handle_extreme_inputs(void) {
    static const float extremes[] = { 1, -1, 0, 1e-40f, 1e30f, NAN, INFINITY };
    for (int dtype = LLAMAC_Q8; dtype < LLAMAC_N_DTYPES; dtype++)
        for (int fill = 0; fill < 256; fill += 15 * sparser(8))
            for (size_t i = 0; i < ARRAY_LEN(extremes); i++) {
                check_extreme_product(dtype, 0, 1, fill, extremes[i]);
                for (int fast = 0; fast < 2 && input_type_of(dtype) == INPUT_INT16; fast++)
                    check_extreme_product(dtype, fast, MOST, fill, extremes[i]);
            }
}

// Numbers of bf16 with which an instruction that takes subnormal numbers for 0 would give other bits. The first strip
// of three has none. In the second one, two products leave their last bit: 131 251 - 137 240 = 1, of 2^-126 or 2^-127.
// In the third one, weights from column 140 on are subnormal or nearly so.
static void small_bf16_numbers_keep_their_bits(void) {
    enum { ROWS = 48, COLUMNS = 300, M = 40, ONE = 127 << 7 };
    const size_t strip_bytes = dtype_strip_bytes(LLAMAC_BF16, COLUMNS);
    uint16_t *w = take(3 * strip_bytes);
    float *x = take_floats(M, COLUMNS), *y = take_floats(M, ROWS), *expected = take_floats(M, ROWS);
    void *panels = take(4 * (size_t)(M * COLUMNS)), *scratch = take(gemm_scratch_bytes(M));
    struct cancel cancel = { 0 };
    uint64_t state = 5;
    for (int round = 0; round < 60 / sparser(6); round++) {
        const int m = round % 3 == 0 ? M : MOST + round % 9, least = round % 2 ? 48 : 49;
        uint16_t *const strips[3] = { w, w + strip_bytes / 2, w + strip_bytes };
        memset(w, 0, 3 * strip_bytes);
        for (int i = 0; i < 16 * COLUMNS; i++) {
            const int sign = random_below(&state, 2) << 15, fraction = random_below(&state, 128);
            strips[0][i] = (uint16_t)(sign | (79 + random_below(&state, 60)) << 7 | fraction);
            if (i / 16 >= 140) strips[2][i] = (uint16_t)(sign | random_below(&state, 4) << 7 | fraction);
        }
        for (int r = 0; r < 16; r++) {
            strips[1][r] = (uint16_t)(ONE + 131 - 128 - (least << 7));
            strips[1][16 + r] = (uint16_t)(0x8000 | (ONE + 137 - 128 - (least << 7)));
        }
        for (int i = 0; i < m * COLUMNS; i++)
            x[i] = i % COLUMNS < 2 ? (i % COLUMNS ? 240 : 251) * 0x1p-71f :
                   ldexpf((float)random_below(&state, 65536) - 32768, -82 + random_below(&state, 80));
        if (round % 5 == 4) x[COLUMNS + 7] = round % 2 ? NAN : INFINITY;   // of the second row
        const struct gemm g = { .dtype = LLAMAC_BF16, .w = (uint8_t *)w, .strip_bytes = strip_bytes, .last = 3,
                                .rows = ROWS, .columns = COLUMNS, .x = panels, .m = m, .fast = 1, .y = y,
                                .y_stride = ROWS, .scratch = scratch, .cancel = &cancel };
        for (int t = 0; t < n_tables; t++) {
            pack_rows(tables[t], LLAMAC_BF16, 1, panels, m, x, COLUMNS);
            tables[t]->gemm(&g);
            if (t == 0) memcpy(expected, y, sizeof *y * (size_t)(m * ROWS));
            CHECK(same(y, expected, (size_t)(m * ROWS)), "%s: round %d, %d rows", tables[t]->name, round, m);
        }
        CHECK(isfinite(expected[ROWS]) == (round % 5 < 4), "round %d: %g", round, (double)expected[ROWS]);
        CHECK(expected[16] == ldexpf(1, -78 - least) && fabsf(expected[32]) < 0x1p-100f && expected[32] != 0,
              "round %d: %g and %g", round, (double)expected[16], (double)expected[32]);
    }
    free(w), free(x), free(y), free(expected), free(panels), free(scratch);
}

// The scalar kernels' panel of one row holds the int16 codes in order: 32 of each group of a block; then sums, scale.
static void inputs_are_rounded_to_eight_bits_and_a_factor(void) {
    enum { COLUMNS = 300 };
    uint64_t state = 8;
    for (int round = 0; round < 2000 / sparser(5); round++) {
        float x[COLUMNS];
        int32_t panel[COLUMNS];
        fill_random(x, COLUMNS, &state);
        for (int k = 0; k < COLUMNS; k++)   // groups of very different sizes; h of 127.5, which must not become 128
            x[k] = k == 0 ? 16319 : ldexpf(round % 8 ? x[k] : 1, random_below(&state, 1 + k % 14));
        if (round % 8 == 0)
            for (int i = 0; i < 32; i++) x[32 + i] = 127.5f * (float)(1 + round / 8 % 127) - (float)i / 32;
        const struct panel_row to = panel_row(panel, 1, PANEL_ROWS, input_words(INPUT_INT16, COLUMNS), 0);
        tables[0]->pack_int16_product(to, x, COLUMNS, 1, 1);
        for (int k = 0; k < COLUMNS; k++) {
            const int block = k / 128 * 128, groups = min_int(4, (COLUMNS - block + 31) / 32);
            const int32_t *words = panel + input_words(INPUT_INT16, block);
            int16_t codes[128];
            float scale;
            memcpy(codes, words, 64 * (size_t)groups), memcpy(&scale, words + groups * INT16_GROUP_WORDS, 4);
            const double found = codes[k - block] * (double)scale;
            const double expected = fast_input_at(LLAMAC_Q8_0, x, COLUMNS, k);
            CHECK(fabs(found - expected) <= 1e-6 * fabs(expected), "column %d: %g, expected %g", k, found, expected);
            int most = 0, shared = 0;   // a group's codes are at most 127 times what they have in common
            for (int i = k / 32 * 32 - block; i < k / 32 * 32 - block + 32; i++) {
                int a = codes[i] < 0 ? -codes[i] : codes[i];
                most = max_int(most, a);
                for (int b = shared; b; ) { const int rest = a % b; a = b, b = rest; }
                shared = a;
            }
            CHECK(most <= 127 * max_int(shared, 1) && most <= INT16_LIMIT, "column %d: %d of %d", k, most, shared);
            CHECK(fabs(found - (double)x[k]) <= 0.5 * (double)scale * (1 + most / 126.9), "column %d is %g, was %g", k,
                  found, (double)x[k]);
        }
    }
}

// ---- the quantizer

// Quantizes random rows. The result must be close to them and have the expected size; its bytes are added to the hash.
// mode: 0 plain, 1 with importance, 2 with importance and feedback.
static void check_quantize(int dtype, int rows, int columns, int mode, uint64_t *state, uint64_t *hash) {
    const size_t n = (size_t)columns, strip_bytes = dtype_strip_bytes(dtype, n);
    const size_t bytes = llamac_matrix_bytes(dtype, (uint64_t)rows, n);
    float *w = take_floats(rows, columns), *importance = take_floats(1, columns);
    float *feedback = take_floats(columns, columns), *decoded = take_floats(1, columns);
    uint8_t *out = take(bytes + 64);
    fill_random(w, (size_t)rows * n, state), fill_random(feedback, n * n, state);
    for (size_t k = 0; k < n; k++) importance[k] = 0.5f + (float)(k % 7);
    for (size_t i = 0; i < n * n; i++) feedback[i] *= 0x1p-7f;
    memset(out + bytes, 0xa5, 64);
    llamac_error err;
    CHECK(!llamac_quantize(dtype, w, (size_t)rows, n, mode ? importance : NULL, mode == 2 ? feedback : NULL, NULL, out,
                           &err),
          "%s", err.message);
    uint8_t *again = take(bytes);
    for (int i = 0; i < n_tables; i++) {
        if (!kernels_select(tables[i]->name, &err)) continue;   // a table of the tests, which no name selects
        CHECK(!llamac_quantize(dtype, w, (size_t)rows, n, mode ? importance : NULL, mode == 2 ? feedback : NULL,
                               tables[i]->name, again, &err), "%s", err.message);
        CHECK(!memcmp(out, again, bytes), "%s, dtype %d, %d columns, mode %d: other bytes", tables[i]->name, dtype,
              columns, mode);
    }
    free(again);
    double error = 0, total = 0;
    for (int r = 0; r < rows; r++) {
        tables[0]->gather[dtype](out, strip_bytes, r, columns, decoded);
        for (size_t k = 0; k < n; k++) {
            const double x = (double)w[(size_t)r * n + k], d = (double)decoded[k] - x;
            error += d * d, total += x * x;
        }
    }
    const double most = dtype == LLAMAC_T2 ? 0.2 : dtype == LLAMAC_Q2 ? 0.15 : dtype == LLAMAC_Q3 ? 0.05 : 0.02;
    CHECK(error < most * total, "dtype %d, %d columns, mode %d: %g of %g", dtype, columns, mode, error, total);
    for (int i = 0; i < 64; i++) CHECK(out[bytes + (size_t)i] == 0xa5, "the quantizer wrote past the end");
    for (size_t i = 0; i < bytes; i++) *hash = (*hash ^ out[i]) * 1099511628211u;
    free(w), free(importance), free(feedback), free(decoded), free(out);
}

static void quantized_bytes_are_the_same_everywhere(void) {
    uint64_t state = 4, hash = 14695981039346656037u;   // FNV-1a
    static const int dtypes[] = { LLAMAC_Q8, LLAMAC_Q4, LLAMAC_Q4S, LLAMAC_Q6, LLAMAC_Q3, LLAMAC_Q2, LLAMAC_T2 };
    for (size_t i = 0; i < ARRAY_LEN(dtypes); i++)
        for (int columns = 1; columns <= 300; columns += 1 + columns / 3)
            for (int mode = 0; mode < (dtype_has_grids(dtypes[i]) && dtypes[i] != LLAMAC_T2 ? 3 : 2); mode++)
                check_quantize(dtypes[i], 1 + random_below(&state, 33), columns, mode, &state, &hash);
    CHECK(hash == 8295407139412704611u, "the bytes have changed: %llu", (unsigned long long)hash);
}

static void quantize_rejects_invalid_arguments(void) {
    llamac_error err;
    float w[16] = { 1 };
    uint8_t out[1024];
    CHECK(llamac_quantize(LLAMAC_F16, w, 1, 16, NULL, NULL, NULL, out, &err) < 0 &&
          err.code == LLAMAC_BAD_ARGUMENT, "f16");
    CHECK(strstr(err.message, "dtype is 2, expected q8 (4), q6 (18), q4 (5), q4s (6), q3 (19), q2 (20) or t2 (21)"),
          "%s", err.message);
    CHECK(llamac_quantize(LLAMAC_Q8, w, 1, 4, NULL, w, NULL, out, &err) < 0 &&
          err.code == LLAMAC_BAD_ARGUMENT, "feedback");
    llamac_test_fail_allocation(1);
    CHECK(llamac_quantize(LLAMAC_Q4, w, 1, 16, NULL, NULL, NULL, out, &err) < 0 &&
          err.code == LLAMAC_NO_MEMORY, "no memory");
    llamac_test_fail_allocation(0);
}

// ---- row functions

// Inputs x, w and b and output y of one call. variant: a setting of the function.
struct row_case { const float *x, *w, *b; float *y; int n, variant; };
static void row_rms_norm(const struct kernels *k, const struct row_case *c) {
    k->rms_norm(c->x, c->w, NULL, 1e-5f, c->n, c->y);
}
static void row_layer_norm(const struct kernels *k, const struct row_case *c) {
    k->layer_norm(c->x, c->w, c->variant ? c->b : NULL, 1e-5f, c->n, c->y);
}
static void row_add(const struct kernels *k, const struct row_case *c) { k->add(c->x, c->n, c->y); }
static void row_rotate(const struct kernels *k, const struct row_case *c) {
    memcpy(c->y, c->x, sizeof(float) * (size_t)c->n);
    k->rotate(c->y, c->w, c->b, c->n / 2);
}
static void row_activate(const struct kernels *k, const struct row_case *c) {
    k->activate(1 + c->variant / 2, c->x, c->variant % 2 ? c->w : NULL, c->n, c->y);
}
static void row_xielu(const struct kernels *k, const struct row_case *c) {
    memcpy(c->y, c->x, sizeof(float) * (size_t)c->n);
    k->xielu(c->y, c->n, 0.8f, 0.3f * (float)c->variant);
}
static void row_scale(const struct kernels *k, const struct row_case *c) {
    memcpy(c->y, c->x, sizeof(float) * (size_t)c->n);
    k->scale(c->y, c->n, 0.7f, 3 * (float)c->variant);   // variant 0: no cap
}

static void row_clamp(const struct kernels *k, const struct row_case *c) {
    memcpy(c->y, c->x, sizeof(float) * (size_t)c->n);
    if (c->n) c->y[0] = NAN;
    k->clamp(c->y, c->n, c->variant ? -INFINITY : -3.5f, 3.5f, 1);
    for (int i = 0; i < c->n; i++) {
        const float limited = c->x[i] > 3.5f ? 3.5f : c->x[i] < -3.5f && !c->variant ? -3.5f : c->x[i];
        if (i) CHECK(c->y[i] == limited + 1, "clamp of %g is %g", (double)c->x[i], (double)c->y[i]);
        else CHECK(c->y[i] != c->y[i], "clamp hides a NaN");
    }
    if (c->n) c->y[0] = 0;
}

static void row_round(const struct kernels *k, const struct row_case *c) {
    const float scale = k->round_row(c->x, c->n, c->y);
    for (int i = 0; i < c->n; i++) {
        const double exact = (double)c->x[i] / (double)scale, found = (double)c->y[i] / (double)scale;
        CHECK(fabs(found - rint(found)) < 1e-4 && fabs(found) < 127.5 && fabs(found - exact) < 0.5001,
              "%s: %g rounds to %g", k->name, exact, found);
    }
}

static const struct { const char *name; void (*call)(const struct kernels *, const struct row_case *); int variants; }
row_functions[] = {
    { "rms_norm", row_rms_norm, 1 }, { "layer_norm", row_layer_norm, 2 }, { "add", row_add, 1 },
    { "rotate", row_rotate, 1 }, { "activate", row_activate, 2 * ACTIVATION_RELU2 }, { "scale", row_scale, 3 },
    { "clamp", row_clamp, 2 }, { "xielu", row_xielu, 2 }, { "round_row", row_round, 1 },
};

// All tables must give the same bits and write only to the n floats at y + shift.
static void check_row_function(size_t f, int variant, int n, int shift, uint64_t *state) {
    enum { SIZE = 88 };
    float x[SIZE], w[SIZE], b[SIZE], y[SIZE], expected[SIZE];
    fill_random(x, SIZE, state), fill_random(w, SIZE, state), fill_random(b, SIZE, state);
    for (int i = 0; i < SIZE; i++) x[i] *= 12;   // large enough to saturate activations
    const struct row_case c = { x + shift, w, b, y + shift, n, variant };
    for (int t = 0; t < n_tables; t++) {
        for (int i = 0; i < SIZE; i++) y[i] = 77;
        row_functions[f].call(tables[t], &c);
        if (t == 0) memcpy(expected, y, sizeof y);
        CHECK(same(y, expected, SIZE), "%s: %s, variant %d, n %d, shift %d", tables[t]->name, row_functions[f].name,
              variant, n, shift);
        for (int i = 0; i < SIZE; i++)
            if (i < shift || i >= shift + n)
                CHECK(y[i] == 77, "%s: %s wrote at %d of %d", tables[t]->name, row_functions[f].name, i - shift, n);
    }
}

static void row_functions_have_the_same_bits(void) {
    uint64_t state = 2;
    for (size_t f = 0; f < ARRAY_LEN(row_functions); f++)
        for (int variant = 0; variant < row_functions[f].variants; variant++)
            for (int n = 1; n <= 70; n += sparser(5))
                for (int shift = 0; shift < 3; shift++) check_row_function(f, variant, n, shift, &state);
}

// y = cap tanh(y / cap) must be accurate to a few units in the last place, even near 0, odd, and never exceed the cap.
static void soft_caps_are_accurate(void) {
    const float caps[] = { 0.001f, 1, 30, 50, 3e5f };
    for (size_t c = 0; c < ARRAY_LEN(caps); c++)
        for (int i = 0; i < 20000; i += sparser(16)) {
            const float cap = caps[c], x = cap * ldexpf(1 + (float)(i % 1000) / 1000, i / 1000 * 2 - 32);
            float y = x, opposite = -x;
            tables[0]->scale(&y, 1, 1, cap), tables[0]->scale(&opposite, 1, 1, cap);
            const double expected = (double)cap * tanh((double)x / (double)cap);
            CHECK(fabs((double)y - expected) <= 5e-7 * fabs(expected), "cap %g of %g is %.9g, expected %.9g",
                  (double)cap, (double)x, (double)y, expected);
            CHECK(y == -opposite && y <= cap, "cap %g of %g: %.9g, %.9g", (double)cap, (double)x, (double)y,
                  (double)opposite);
        }
    const float special[] = { 0, INFINITY, -INFINITY, NAN }, capped[] = { 0, 30, -30, NAN };
    for (size_t i = 0; i < ARRAY_LEN(special); i++) {
        float y = special[i];
        tables[0]->scale(&y, 1, 1, 30);
        CHECK(y == capped[i] || (y != y && capped[i] != capped[i]), "cap of %g is %g", (double)special[i], (double)y);
    }
}

static void softmax_has_the_same_bits(void) {
    uint64_t state = 5;
    for (int n = 1; n <= 130; n++) {
        float x[144], y[144], expected[144];
        fill_random(x, (size_t)n, &state);
        for (int i = 0; i < n; i++) x[i] *= 9;
        double sum = 0;
        for (int i = 0; i < n; i++) sum += exp((double)x[i]);
        for (int t = 0; t < n_tables; t++) {
            memcpy(y, x, sizeof y);
            tables[t]->softmax(y, n);
            if (!t) memcpy(expected, y, sizeof y);
            CHECK(same(y, expected, (size_t)n), "%s differs, n %d", tables[t]->name, n);
        }
        for (int i = 0; i < n; i++)
            CHECK(fabs((double)expected[i] - exp((double)x[i]) / sum) <= 1e-6, "%g", (double)expected[i]);
    }
}

static void activations_are_accurate(void) {
    for (int activation = 1; activation <= ACTIVATION_RELU2; activation++)
        for (int i = -40000; i <= 40000; i += sparser(16)) {
            const float x = (float)i / 400;
            float y;
            tables[0]->activate(activation, &x, NULL, 1, &y);
            const double expected = reference_activation(activation, (double)x);
            CHECK(fabs((double)y - expected) <= 4e-7 * (1 + fabs(expected)), "activation %d of %g is %g, expected %g",
                  activation, (double)x, (double)y, expected);
        }
    const float nan = NAN, inf = INFINITY;
    float y;
    for (int activation = 1; activation <= ACTIVATION_RELU2; activation++) {
        tables[0]->activate(activation, &nan, NULL, 1, &y);
        CHECK(y != y, "activation %d hides a NaN", activation);
        tables[0]->activate(activation, &inf, NULL, 1, &y);
        CHECK(y == inf || y != y, "activation %d of infinity is %g", activation, (double)y);
    }
}

static void xielu_is_accurate(void) {
    for (int i = -40000; i <= 40000; i += sparser(16)) {
        const float x = (float)i / 400, alpha_p = 0.25f + (float)(i & 7), alpha_n = 0.5f * (float)(i & 3);
        float y = x;
        tables[0]->xielu(&y, 1, alpha_p, alpha_n);
        const double expected = reference_xielu((double)x, (double)alpha_p, (double)alpha_n);
        CHECK(fabs((double)y - expected) <= 4e-7 * (1 + fabs(expected)), "xielu of %g (%g, %g) is %g, expected %g",
              (double)x, (double)alpha_p, (double)alpha_n, (double)y, expected);
    }
    const float tiny[] = { 1e-4f, -1e-4f, 1e-20f, -1e-20f };   // the relative error is small near 0, too
    for (size_t i = 0; i < ARRAY_LEN(tiny); i++) {
        float y = tiny[i];
        tables[0]->xielu(&y, 1, 0.8f, 0.3f);
        const double expected = reference_xielu((double)tiny[i], (double)0.8f, (double)0.3f);
        CHECK(fabs((double)y - expected) <= 4e-7 * fabs(expected), "xielu of %g is %g", (double)tiny[i], (double)y);
    }
    float nan = NAN;
    tables[0]->xielu(&nan, 1, 0.8f, 0.3f);
    CHECK(nan != nan, "xielu hides a NaN");
}

// ---- measuring loops, selection of a table

static void measuring_loops_do_the_work_that_they_report(void) {
    enum { FLOATS = 4 * 5 * READ_STEP };
    float *block = take_floats(1, FLOATS), result;
    for (int i = 0; i < FLOATS; i++) block[i] = (float)(i % 9);
    float sum = 0;
    for (int i = 0; i < FLOATS; i++) sum += block[i];
    for (int t = 0; t < n_tables; t++) {
        for (int streams = 1; streams <= 4; streams *= 2)
            CHECK(tables[t]->read_block(block, FLOATS, streams) == sum, "%s: %d streams", tables[t]->name, streams);
        for (int i = 0; i < 2 * N_INPUT_TYPES; i++) {
            double (*const peak)(int, float *) = tables[t]->peak[i / 2][i % 2];
            result = NAN;
            const double once = peak(1, &result);
            CHECK(once > 0 && result == result, "%s: %g multiply-adds of input type %d, fast %d", tables[t]->name,
                  once, i / 2, i % 2);
            CHECK(peak(3, &result) == 3 * once, "%s: three passes, input type %d", tables[t]->name, i / 2);
        }
    }
    free(block);
}

static void unknown_isas_are_rejected(void) {
    llamac_error err;
    CHECK(!kernels_select("sse9", &err) && err.code == LLAMAC_BAD_ARGUMENT, "sse9");
    CHECK(kernels_select("scalar", &err) != NULL, "scalar");
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    find_tables();
    print_tables();
    RUN(f16_conversions_round_to_nearest_even);
    RUN(products_have_the_same_bits);
    RUN(quantized_products_handle_extreme_inputs);
    RUN(small_bf16_numbers_keep_their_bits);
    RUN(inputs_are_rounded_to_eight_bits_and_a_factor);
    RUN(quantized_bytes_are_the_same_everywhere);
    RUN(quantize_rejects_invalid_arguments);
    RUN(row_functions_have_the_same_bits);
    RUN(activations_are_accurate);
    RUN(xielu_is_accurate);
    RUN(soft_caps_are_accurate);
    RUN(softmax_has_the_same_bits);
    RUN(the_gates_of_mamba_are_the_same_everywhere);
    RUN(the_recurrence_of_mamba_is_accurate_everywhere);
    RUN(measuring_loops_do_the_work_that_they_report);
    RUN(unknown_isas_are_rejected);
    return finish_tests("test_kernels");
}
