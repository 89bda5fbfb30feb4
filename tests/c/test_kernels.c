// SPDX-License-Identifier: MIT
// test_kernels.c - every kernel of every instruction set of this machine: exactly the scalar kernel's bits for all tails and
// alignments, and close to the same formula in double.
#include <math.h>
#include "common.h"
#include "half.h"
#include "kernels.h"
#include "format.h"
#include "test.h"

static const struct kernels *tables[8];
static int n_tables;

static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_BF16, LLAMAC_Q8, LLAMAC_Q4, LLAMAC_Q4S };

// The same bits, but for a NaN's sign and payload, which C leaves open.
static int same(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) if (memcmp(a + i, b + i, sizeof *a) && (a[i] == a[i] || b[i] == b[i])) return 0;
    return 1;
}

static void halves_convert_like_the_hardware(void) {
#if defined(__x86_64__)
    for (int h = 0; h < 65536; h++) {
        const float x = f32_from_f16((uint16_t)h);
        if (x == x) CHECK(f16_from_f32(x) == h, "f16 %04x -> %g -> %04x", h, (double)x, f16_from_f32(x));
    }
#endif
    CHECK(f16_from_f32(65519.0f) == 0x7bff && f16_from_f32(65520.0f) == 0x7c00, "rounding at the top");
    CHECK(f16_from_f32(0x1p-25f) == 0 && f16_from_f32(0x1.000002p-25f) == 1 && f16_from_f32(0x1.8p-24f) == 2, "rounding at the bottom");
    CHECK(f16_from_f32(1.0f + 0x1p-11f) == 0x3c00 && f16_from_f32(1.0f + 0x1.8p-10f) == 0x3c02, "ties go to even");
}

// One product by every table, in one call, row by row, and in two parts of strips; weighted, and its rows in another order.
static void check_gemm(int dtype, int rows, int columns, int m, int biased, int add, uint64_t *state) {
    const size_t strip_bytes = dtype_strip_bytes(dtype, (uint64_t)columns), strips = (size_t)ceil_div(rows, 16);
    const int input = input_of(dtype);
    const size_t words = input_words(input, columns);
    uint8_t *w = take(strips * strip_bytes);
    float *x = take(sizeof(float) * (size_t)(m * columns)), *bias = take(sizeof(float) * (size_t)rows);
    int32_t *panels = take(4 * words * (size_t)m), *alone = take(4 * words);
    void *scratch = take(gemm_scratch(m));
    float *y0 = take(sizeof(float) * (size_t)(m * rows)), *y = take(sizeof(float) * (size_t)(m * rows)), *first = take(sizeof(float) * (size_t)(m * rows));
    struct cancel cancel = { 0 };
    fill_random(x, (size_t)(m * columns), state), fill_random(bias, (size_t)rows, state), fill_random(y0, (size_t)(m * rows), state);
    fill_matrix(dtype, w, strip_bytes, rows, columns, state);
    struct gemm g = { .w = w, .strip_bytes = strip_bytes, .last = (int)strips, .rows = rows, .columns = columns, .x = panels, .m = m, .bias = biased ? bias : NULL, .y = y,
                      .y_stride = (size_t)rows, .add = add, .scratch = scratch, .cancel = &cancel };
    for (int t = 0; t < n_tables; t++) {
        for (int r = 0; r < m; r++) tables[t]->pack[input](panel_row(panels, m, words, r), x + r * columns, columns);
        memcpy(y, y0, sizeof(float) * (size_t)(m * rows));
        tables[t]->gemm[dtype](&g);
        if (t == 0) memcpy(first, y, sizeof(float) * (size_t)(m * rows));
        else CHECK(same(y, first, (size_t)(m * rows)), "%s differs from %s: dtype %d, %d x %d, %d rows", tables[t]->name, tables[0]->name, dtype, rows, columns, m);
        memcpy(y, y0, sizeof(float) * (size_t)(m * rows));
        for (int r = 0; r < m; r++) {   // a row alone, its strips in two calls
            struct gemm one = g;
            tables[t]->pack[input](panel_row(alone, 1, words, 0), x + r * columns, columns);
            one.x = alone, one.m = 1, one.y = y + r * rows, one.last = (int)strips / 2;
            tables[t]->gemm[dtype](&one);
            one.first = one.last, one.last = (int)strips;
            tables[t]->gemm[dtype](&one);
        }
        CHECK(same(y, first, (size_t)(m * rows)), "%s: rows alone differ: dtype %d, %d x %d, %d rows", tables[t]->name, dtype, rows, columns, m);
        float weights[64], *const plain = take(sizeof(float) * (size_t)(m * rows));
        int to[64];
        for (int r = 0; r < m; r++) weights[r] = 0.5f + (float)r, to[r] = m - 1 - r;
        struct gemm other = g;
        other.weights = weights, other.to = to, other.copy = plain, other.add = 1;
        memset(y, 0, sizeof(float) * (size_t)(m * rows));
        tables[t]->gemm[dtype](&other);
        for (int r = 0; r < m; r++)
            for (int o = 0; o < rows; o++) {
                const float product = plain[r * rows + o], alone_ = product * weights[r];
                CHECK(y[to[r] * rows + o] == alone_ && (add || product == first[r * rows + o]), "%s: weighted row %d", tables[t]->name, r);
            }
        free(plain);
    }
    for (int i = 0; i < 20; i++) {   // against double
        const int r = random_below(state, m), o = random_below(state, rows);
        double sum = 0, size = 0;
        for (int k = 0; k < columns; k++) {
            const double product = weight_at(dtype, w, strip_bytes, o, k) * input_at(dtype, x + r * columns, columns, k);
            sum += product;
            size += fabs(product);
        }
        if (biased) sum += (double)bias[o];
        if (add) sum += (double)y0[r * rows + o];
        CHECK(fabs(sum - (double)first[r * rows + o]) <= 1e-6 * (size + 2), "dtype %d, %d columns: output %d of row %d is %g, expected %g", dtype, columns, o, r,
              (double)first[r * rows + o], sum);
    }
    float *row = take(sizeof(float) * (size_t)columns), *row0 = take(sizeof(float) * (size_t)columns);
    for (int t = 0; t < n_tables; t++) {
        tables[t]->gather[dtype](w, strip_bytes, rows - 1, columns, t ? row : row0);
        if (t) CHECK(same(row, row0, (size_t)columns), "%s: gather", tables[t]->name);
    }
    for (int k = 0; k < columns; k++) {
        const double expected = weight_at(dtype, w, strip_bytes, rows - 1, k);
        CHECK(fabs((double)row0[k] - expected) <= 1e-7 * fabs(expected), "gather: dtype %d, column %d is %g, expected %g", dtype, k, (double)row0[k], expected);
    }
    free(w), free(x), free(bias), free(panels), free(alone), free(scratch), free(y0), free(y), free(first), free(row), free(row0);
}

static void products_have_the_same_bits(void) {
    uint64_t state = 1;
    for (size_t d = 0; d < ARRAY_LEN(dtypes); d++) {
        for (int rows = 1; rows <= 83; rows += rows < 20 ? 1 : 9) check_gemm(dtypes[d], rows, 1 + random_below(&state, 90), 1 + random_below(&state, 20), rows % 2, rows % 3 == 0, &state);
        for (int m = 1; m <= 40; m++) check_gemm(dtypes[d], 70, 33, m, 1, 0, &state);
        for (int columns = 510; columns <= 1040; columns += 53) check_gemm(dtypes[d], 100, columns, columns % 2 ? 7 : 37, 0, 1, &state);
        for (int columns = 1; columns <= 300; columns += 23) check_gemm(dtypes[d], 40, columns, 1 + columns % 13, 0, 0, &state);
    }
}

// Inputs that make sums as large as they can be, and inputs that are no numbers.
static void quantized_products_stand_extremes(void) {
    enum { COLUMNS = 256, WORDS = COLUMNS };
    static const float extremes[] = { 1, -1, 0, 1e-40f, 1e30f, NAN, INFINITY };
    struct cancel cancel = { 0 };
    for (int dtype = LLAMAC_Q8; dtype <= LLAMAC_Q4S; dtype++)
        for (int fill = 0; fill < 256; fill += 15) for (size_t e = 0; e < ARRAY_LEN(extremes); e++) {
            const size_t strip_bytes = dtype_strip_bytes(dtype, COLUMNS);
            uint8_t *w = take(strip_bytes);
            int32_t panel[WORDS];
            float x[COLUMNS], y[16], y0[16];
            void *scratch = take(gemm_scratch(1));
            memset(w, dtype == LLAMAC_Q8 && !fill ? 1 : fill, strip_bytes);
            for (int block = 0; block < 2; block++) memset(w + LINE_BYTES + (size_t)block * block_bytes(dtype, 4), fill % 2 ? 127 : 0x81, block_scale_bytes(dtype, 4));
            for (int r = 0; r < 16; r++) ((float *)(void *)w)[r] = 1;
            for (int k = 0; k < COLUMNS; k++) x[k] = e < 2 || k == 40 ? extremes[e] : 1;
            struct gemm g = { .w = w, .strip_bytes = strip_bytes, .last = 1, .rows = 16, .columns = COLUMNS, .x = panel, .m = 1, .y = y, .y_stride = 16, .scratch = scratch, .cancel = &cancel };
            for (int t = 0; t < n_tables; t++) {
                tables[t]->pack[input_of(dtype)](panel_row(panel, 1, input_words(input_of(dtype), COLUMNS), 0), x, COLUMNS);
                tables[t]->gemm[dtype](&g);
                if (t == 0) memcpy(y0, y, sizeof y);
                if (x[40] - x[40] == 0) CHECK(same(y, y0, 16), "%s differs: dtype %d, bytes %d, input %g", tables[t]->name, dtype, fill, (double)x[40]);
                else for (int i = 0; i < 16; i++) CHECK(y[i] != y[i], "%s: dtype %d hides %g", tables[t]->name, dtype, (double)x[40]);
            }
            double sum = 0;
            for (int k = 0; k < COLUMNS; k++) sum += weight_at(dtype, w, strip_bytes, 3, k) * input_at(dtype, x, COLUMNS, k);
            if (x[40] - x[40] == 0) CHECK(fabs((double)y0[3] - sum) <= 1e-5 * fabs(sum) + 1e-30, "dtype %d, bytes %d, input %g: %g, expected %g", dtype, fill, (double)x[40], (double)y0[3], sum);
            free(w), free(scratch);
        }
}

// Rows of any width, with and without weights and feedback: near what they were, in exactly their bytes, the same bytes from every compiler.
static void rows_are_quantized(void) {
    uint64_t state = 4, hash = 14695981039346656037u;   // FNV-1a
    for (int dtype = LLAMAC_Q8; dtype <= LLAMAC_Q4S; dtype++)
        for (int columns = 1; columns <= 300; columns += 1 + columns / 3) for (int way = 0; way < (dtype == LLAMAC_Q8 ? 2 : 3); way++) {
            const int rows = 1 + random_below(&state, 33);
            const size_t n = (size_t)columns, bytes = llamac_matrix_bytes(dtype, (uint64_t)rows, n), strip_bytes = dtype_strip_bytes(dtype, n);
            float *w = take(sizeof(float) * (size_t)rows * n), *weights = take(sizeof(float) * n), *feedback = take(sizeof(float) * n * n), *back = take(sizeof(float) * n);
            uint8_t *out = take(bytes + 64);
            fill_random(w, (size_t)rows * n, &state), fill_random(feedback, n * n, &state);
            for (size_t k = 0; k < n; k++) weights[k] = 0.5f + (float)(k % 7);
            for (size_t i = 0; i < n * n; i++) feedback[i] *= 0x1p-7f;
            memset(out + bytes, 0xa5, 64);
            llamac_error err;
            CHECK(!llamac_quantize(dtype, w, (size_t)rows, n, way ? weights : NULL, way == 2 ? feedback : NULL, out, &err), "%s", err.message);
            double error = 0, all = 0;
            for (int r = 0; r < rows; r++) {
                tables[0]->gather[dtype](out, strip_bytes, r, columns, back);
                for (size_t k = 0; k < n; k++) {
                    const double x = (double)w[(size_t)r * n + k], d = (double)back[k] - x;
                    error += d * d, all += x * x;
                }
            }
            CHECK(error < 0.02 * all, "dtype %d, %d columns, way %d: %g of %g", dtype, columns, way, error, all);
            for (int i = 0; i < 64; i++) CHECK(out[bytes + (size_t)i] == 0xa5, "written behind the end");
            for (size_t i = 0; i < bytes; i++) hash = (hash ^ out[i]) * 1099511628211u;
            free(w), free(weights), free(feedback), free(back), free(out);
        }
    CHECK(hash == 10110740812635404679u, "the bytes have changed: %llu", (unsigned long long)hash);
    llamac_error err;
    float w[16] = { 1 };
    uint8_t out[1024];
    CHECK(llamac_quantize(LLAMAC_F16, w, 1, 16, NULL, NULL, out, &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "f16");
    llamac_test_fail_allocation(1);
    CHECK(llamac_quantize(LLAMAC_Q4, w, 1, 16, NULL, NULL, out, &err) < 0 && err.code == LLAMAC_NO_MEMORY, "no memory");
    llamac_test_fail_allocation(0);
}

// Row functions: n numbers at an odd address, guards around them that must stay.
static void row_functions_have_the_same_bits(void) {
    uint64_t state = 2;
    enum { MAX = 80 };
    float x[MAX + 8], w[MAX + 8], b[MAX + 8], y[MAX + 8], y0[MAX + 8];
    for (int n = 1; n <= 70; n++) for (int shift = 0; shift < 3; shift++) for (int what = 0; what < 18; what++) {
        fill_random(x, MAX + 8, &state), fill_random(w, MAX + 8, &state), fill_random(b, MAX + 8, &state);
        if (what >= 4) for (int i = 0; i < MAX; i++) x[i] *= 12;
        for (int t = 0; t < n_tables; t++) {
            const struct kernels *k = tables[t];
            for (int i = 0; i < MAX + 8; i++) y[i] = 77;
            float *out = y + shift;
            if (what == 0) k->norm_rms(x + shift, w, NULL, 1e-5f, n, out);
            else if (what == 1) k->norm_layer(x + shift, w, b, 1e-5f, n, out);
            else if (what == 2) k->add(x + shift, n, out);
            else if (what == 3) { memcpy(y, x, sizeof y); k->rotate(out, w, b, n / 2); }
            else if (what < 14) k->activate(1 + (what - 4) / 2, x + shift, what % 2 ? w : NULL, n, out);
            else if (what == 14) k->norm_layer(x + shift, w, NULL, 1e-5f, n, out);
            else { memcpy(out, x, sizeof(float) * (size_t)n); k->scale(out, n, 0.7f, (float)(what - 15) * 3); }
            if (t == 0) memcpy(y0, y, sizeof y);
            else CHECK(same(y, y0, MAX + 8), "%s: function %d, n %d, shift %d", k->name, what, n, shift);
            for (int i = 0; i < MAX + 8; i++)
                if (what != 3 && (i < shift || i >= shift + n)) CHECK(y[i] == 77, "%s: function %d wrote at %d of %d", k->name, what, i - shift, n);
        }
    }
}

// y = cap tanh(scale y / cap): to a few units of its last place, near 0 too, odd, and never beyond the cap.
static void caps_are_accurate(void) {
    const float caps[] = { 0.001f, 1, 30, 50, 3e5f };
    for (size_t c = 0; c < ARRAY_LEN(caps); c++)
        for (int i = 0; i < 20000; i++) {
            const float x = caps[c] * ldexpf(1 + (float)(i % 1000) / 1000, i / 1000 * 2 - 32), cap = caps[c];
            float y = x, opposite = -x;
            tables[0]->scale(&y, 1, 1, cap), tables[0]->scale(&opposite, 1, 1, cap);
            const double expected = (double)cap * tanh((double)x / (double)cap);
            CHECK(fabs((double)y - expected) <= 5e-7 * fabs(expected), "cap %g of %g is %.9g, expected %.9g", (double)cap, (double)x, (double)y, expected);
            CHECK(y == -opposite && y <= cap, "cap %g of %g: %.9g, %.9g", (double)cap, (double)x, (double)y, (double)opposite);
        }
    const float special[] = { 0, INFINITY, -INFINITY, NAN };
    for (size_t i = 0; i < ARRAY_LEN(special); i++) {
        float y = special[i];
        tables[0]->scale(&y, 1, 1, 30);
        CHECK(i == 0 ? y == 0 : i == 1 ? y == 30 : i == 2 ? y == -30 : y != y, "cap of %g is %g", (double)special[i], (double)y);
    }
}

// exp(x - max) / their sum, of any number of numbers: the same bits from all tables, near double's.
static void softmax_has_the_same_bits(void) {
    uint64_t state = 5;
    for (int n = 1; n <= 130; n++) {
        float x[144], y[144], first[144];
        fill_random(x, (size_t)n, &state);
        for (int i = 0; i < n; i++) x[i] *= 9;
        double sum = 0;
        for (int i = 0; i < n; i++) sum += exp((double)x[i]);
        for (int t = 0; t < n_tables; t++) {
            memcpy(y, x, sizeof y);
            tables[t]->softmax(y, n);
            if (!t) memcpy(first, y, sizeof y);
            CHECK(same(y, first, (size_t)n), "%s differs, n %d", tables[t]->name, n);
        }
        for (int i = 0; i < n; i++) CHECK(fabs((double)first[i] - exp((double)x[i]) / sum) <= 1e-6, "%g", (double)first[i]);
    }
}

static double act_reference(int activation, double x) {
    switch (activation) {
    case ACTIVATION_SILU: return x / (1 + exp(-x));
    case ACTIVATION_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    case ACTIVATION_GELU_ERF: return 0.5 * x * erfc(-x / sqrt(2));
    case ACTIVATION_RELU: return x > 0 ? x : 0;
    default: return x / (1 + exp(-1.702 * x));
    }
}
static void activations_are_accurate(void) {
    for (int activation = 1; activation <= ACTIVATION_QUICK_GELU; activation++)
        for (int i = -40000; i <= 40000; i++) {
            const float x = (float)i / 400;
            float y;
            tables[0]->activate(activation, &x, NULL, 1, &y);
            const double expected = act_reference(activation, (double)x);
            CHECK(fabs((double)y - expected) <= 4e-7 * (1 + fabs(expected)), "activation %d of %g is %g, expected %g", activation, (double)x, (double)y, expected);
        }
    const float nan = NAN, inf = INFINITY;
    float y;
    for (int activation = 1; activation <= ACTIVATION_QUICK_GELU; activation++) {
        tables[0]->activate(activation, &nan, NULL, 1, &y);
        CHECK(y != y, "activation %d hides a NaN", activation);
        tables[0]->activate(activation, &inf, NULL, 1, &y);
        CHECK(y == inf || y != y, "activation %d of infinity is %g", activation, (double)y);
    }
}

// A cache of one head, queries with different views of it; against double, and each query alone.
static void check_attention(int dtype, int head_dim, int positions, int n_queries, uint64_t *state) {
    const int width = value_width(head_dim), pages_n = ceil_div(positions, KV_PAGE);
    const size_t key_bytes = KV_PAGE / 16 * float_strip_bytes(dtype, head_dim), page_bytes = key_bytes + (size_t)(width / 16) * float_strip_bytes(dtype, KV_PAGE);
    uint8_t **pages = take(sizeof *pages * (size_t)pages_n);
    float *k = take(sizeof(float) * (size_t)(positions * head_dim)), *v = take(sizeof(float) * (size_t)(positions * head_dim));
    float *q = take(sizeof(float) * (size_t)(n_queries * head_dim)), *panel = take(sizeof(float) * (size_t)(n_queries * head_dim));
    float *scratch = take(sizeof(float) * attend_scratch(head_dim)), *out = take(sizeof(float) * (size_t)(n_queries * width)), *first = take(sizeof(float) * (size_t)(n_queries * width));
    fill_random(k, (size_t)(positions * head_dim), state), fill_random(v, (size_t)(positions * head_dim), state), fill_random(q, (size_t)(n_queries * head_dim), state);
    const int poisoned = random_below(state, 2);   // the last position, which not all queries see
    if (poisoned) k[positions * head_dim - 1] = v[positions * head_dim - 1] = NAN;
    for (int p = 0; p < pages_n; p++) pages[p] = take(page_bytes);
    for (int t = 0; t < n_tables; t++)   // each table writes the same cache
        for (int p = 0; p < positions; p++) {
            tables[t]->store_key[dtype](pages[p / KV_PAGE], p % KV_PAGE, head_dim, k + p * head_dim);
            tables[t]->store_value[dtype](pages[p / KV_PAGE] + key_bytes, p % KV_PAGE, head_dim, v + p * head_dim);
        }
    struct cancel cancel = { 0 };
    struct attend a = { .cancel = &cancel, .kv = { (const uint8_t *const *)pages, 0, key_bytes }, .head_dim = head_dim, .n_queries = n_queries, .q = panel, .out = out, .scratch = scratch };
    // as in a prompt, each row by itself or several queries a row, or anything
    const int group = (const int[]){ 0, 1, 4, 8 }[random_below(state, 4)];
    for (int i = 0; i < n_queries; i++) {
        a.visible[i] = group ? max_int(1, positions - (n_queries - 1) / group + i / group) : 1 + random_below(state, positions);
        tables[0]->pack[INPUT_F32](panel_row(panel, n_queries, (size_t)head_dim, i), q + i * head_dim, head_dim);
    }
    a.visible[n_queries - 1] = positions;
    // windows: none, or so many positions; what is before them may be NaN, like what no query sees
    const int window = (const int[]){ 0, 0, 1, 5, 300 }[random_below(state, 5)];
    int seen = positions;
    for (int i = 0; i < n_queries; i++) {
        a.first[i] = window ? max_int(0, a.visible[i] - window) : 0;
        seen = min_int(seen, a.first[i]);
    }
    a.cap = window % 2 ? 0.5f : 0;
    for (int p = 0; p < seen; p += 1 + p / 2) {
        float *const nowhere = take(sizeof(float) * (size_t)head_dim);
        for (int d = 0; d < head_dim; d++) nowhere[d] = NAN;
        tables[0]->store_key[dtype](pages[p / KV_PAGE], p % KV_PAGE, head_dim, nowhere);
        tables[0]->store_value[dtype](pages[p / KV_PAGE] + key_bytes, p % KV_PAGE, head_dim, nowhere);
        free(nowhere);
    }
    for (int t = 0; t < n_tables; t++) {
        tables[t]->attend[dtype](&a);
        if (t == 0) memcpy(first, out, sizeof(float) * (size_t)(n_queries * width));
        else CHECK(same(out, first, (size_t)(n_queries * width)), "%s differs: dtype %d, head_dim %d, %d positions, %d queries", tables[t]->name, dtype, head_dim, positions, n_queries);
        for (int i = 0; i < n_queries; i++) {
            struct attend one = a;
            one.n_queries = 1, one.q = q + i * head_dim, one.visible[0] = a.visible[i], one.first[0] = a.first[i];
            tables[t]->attend[dtype](&one);
            CHECK(same(out, first + i * width, (size_t)head_dim), "%s: query %d alone differs: dtype %d, head_dim %d, %d positions", tables[t]->name, i, dtype, head_dim, positions);
        }
    }
    double *p = take(sizeof(double) * (size_t)positions);
    for (int i = 0; i < n_queries; i++) {
        double sum = 0;
        if (poisoned && a.visible[i] == positions) {
            for (int d = 0; d < head_dim; d++) CHECK(first[i * width + d] != first[i * width + d], "a NaN of position %d is lost", positions - 1);
            continue;
        }
        for (int j = a.first[i]; j < a.visible[i]; j++) {
            double s = 0;
            for (int d = 0; d < head_dim; d++) s += (double)stored(dtype, k[j * head_dim + d]) * (double)q[i * head_dim + d];
            if (a.cap > 0) s = (double)a.cap * tanh(s / (double)a.cap);
            sum += p[j] = exp(s);
        }
        for (int d = 0; d < head_dim; d++) {
            double o = 0;
            for (int j = a.first[i]; j < a.visible[i]; j++) o += p[j] / sum * (double)stored(dtype, v[j * head_dim + d]);
            CHECK(fabs(o - (double)first[i * width + d]) < 2e-6, "attention %g, expected %g", (double)first[i * width + d], o);
        }
    }
    for (int i = 0; i < pages_n; i++) free(pages[i]);
    free(pages), free(k), free(v), free(q), free(panel), free(scratch), free(out), free(first), free(p);
}

static void attention_has_the_same_bits(void) {
    uint64_t state = 3;
    for (int d = 0; d < 2; d++)
        for (int head_dim = 1; head_dim <= 40; head_dim += 3)
            for (int i = 0; i < 4; i++) check_attention(dtypes[d], head_dim, 1 + random_below(&state, 700), 1 + random_below(&state, ATTENTION_QUERIES), &state);
    check_attention(LLAMAC_F16, 64, 1024, 8, &state);
    check_attention(LLAMAC_F32, 16, 256, 1, &state);
    check_attention(LLAMAC_F32, 16, 257, 2, &state);
}

static void the_f16_cache_saturates(void) {
    const float x[3] = { 1e6f, -1e6f, 65504.0f };
    for (int t = 0; t < n_tables; t++) {
        uint8_t *page = take(KV_PAGE * 64);
        float back[3];
        tables[t]->store_key[LLAMAC_F16](page, 5, 3, x);
        tables[t]->gather[LLAMAC_F16](page, float_strip_bytes(LLAMAC_F16, 3), 5, 3, back);
        CHECK(back[0] == 65504.0f && back[1] == -65504.0f && back[2] == 65504.0f, "%s: %g %g", tables[t]->name, (double)back[0], (double)back[1]);
        free(page);
    }
}

// What the measuring loops claim to have done, they have done.
static void measuring_loops_do_their_work(void) {
    enum { FLOATS = 4 * 5 * READ_STEP };
    float *block = take(sizeof(float) * FLOATS), result;
    for (int i = 0; i < FLOATS; i++) block[i] = (float)(i % 9);
    float sum = 0;
    for (int i = 0; i < FLOATS; i++) sum += block[i];
    for (int t = 0; t < n_tables; t++) {
        for (int streams = 1; streams <= 4; streams *= 2) CHECK(tables[t]->read_block(block, FLOATS, streams) == sum, "%s: %d streams", tables[t]->name, streams);
        for (int input = 0; input < N_INPUTS; input++) {
            result = NAN;
            const double once = tables[t]->peak[input](1, &result);
            CHECK(once > 0 && result == result, "%s: %g multiply-adds of input %d", tables[t]->name, once, input);
            CHECK(tables[t]->peak[input](3, &result) == 3 * once, "%s: three passes of input %d", tables[t]->name, input);
        }
    }
    free(block);
}

static void unknown_isas_are_refused(void) {
    llamac_error err;
    CHECK(!kernels_select("sse9", &err) && err.code == LLAMAC_BAD_ARGUMENT, "sse9");
    CHECK(kernels_select("scalar", &err) != NULL, "scalar");
}

int main(void) {
    int supported;
    llamac_error err;
    for (size_t i = 0; llamac_isa_at(i, &supported); i++)   // the scalar one, last in the list, comes first here
        if (supported) tables[n_tables++] = kernels_select(llamac_isa_at(i, &supported), &err);
    const struct kernels *scalar = tables[n_tables - 1];
    tables[n_tables - 1] = tables[0], tables[0] = scalar;
    for (int i = 0; i < n_tables; i++) printf("testing %s\n", tables[i]->name);
    RUN(halves_convert_like_the_hardware);
    RUN(products_have_the_same_bits);
    RUN(quantized_products_stand_extremes);
    RUN(rows_are_quantized);
    RUN(row_functions_have_the_same_bits);
    RUN(activations_are_accurate);
    RUN(caps_are_accurate);
    RUN(softmax_has_the_same_bits);
    RUN(attention_has_the_same_bits);
    RUN(the_f16_cache_saturates);
    RUN(measuring_loops_do_their_work);
    RUN(unknown_isas_are_refused);
    return finish_tests("test_kernels");
}
