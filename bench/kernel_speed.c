// SPDX-License-Identifier: MIT
// kernel_speed.c - measures each kernel of each instruction set: its error against float64, and its time. Prints one
// line per case for bench/kernels.py, separated by tabs: kernel, isa, case, error, seconds (median), seconds (best),
// bytes, multiply-adds, clock in Hz.
#include <time.h>
#include "format.h"
#include "kernel_tables.h"
#include "samples.h"

static double sample_seconds = 0.002;           // a sample lasts at least this long
static size_t pool_bytes = (size_t)256 << 20;   // the weights of products rotate through this much memory
static const char *only_isa, *only_kernel, *only_case;
static const struct kernels *table;
static struct cancel cancel;
enum { SAMPLES = 9 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The CPU clock in Hz, from a chain of dependent register additions, one cycle each.
static double clock_hertz(void) {
    enum { ADDS = 16, LOOPS = 20000 };
    uint64_t x = 1, y = 3;
    double best = 1;
    for (int i = 0; i < 3; i++) {
        __asm__ volatile("" : "+r"(y));
        const double start = now();
        for (int loop = 0; loop < LOOPS; loop++)
            UNROLL for (int j = 0; j < ADDS; j++) { x += y; __asm__ volatile("" : "+r"(x)); }
        const double seconds = now() - start;
        if (seconds < best) best = seconds;
    }
    return (double)ADDS * LOOPS / best;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int kernel_selected(const char *kernel) { return !only_kernel || !strcmp(only_kernel, kernel); }
static int case_selected(const char *what) { return !only_case || strstr(what, only_case) != NULL; }

// Measures one case. `run` is called with ascending numbers, so that it can use different memory each time.
typedef void run_function(void *argument, long i);
static void measure(const char *kernel, const char *what, double error, run_function *run, void *argument, double bytes,
                    double macs) {
    if (!case_selected(what)) return;
    double seconds[SAMPLES];
    long i = 0, n = 1;
    for (double took = 0; took < sample_seconds; n *= took < sample_seconds ? 2 : 1) {   // find n; this also warms up
        const double start = now();
        for (long j = 0; j < n; j++) run(argument, i++);
        took = now() - start;
    }
    for (int s = 0; s < SAMPLES; s++) {
        const double start = now();
        for (long j = 0; j < n; j++) run(argument, i++);
        seconds[s] = (now() - start) / (double)n;
    }
    const double hertz = clock_hertz();
    qsort(seconds, SAMPLES, sizeof *seconds, compare);
    printf("%s\t%s\t%s\t%.3e\t%.4e\t%.4e\t%.0f\t%.0f\t%.4e\n", kernel, table->name, what, error, seconds[SAMPLES / 2],
           seconds[0], bytes, macs, hertz);
    fflush(stdout);
}

// Relative error: the root mean square of the difference over that of the expected values.
struct rms { double difference, expected; };
static void rms_add(struct rms *r, double found, double expected) {
    r->difference += (found - expected) * (found - expected), r->expected += expected * expected;
}
static double rms_of(struct rms r) { return r.expected > 0 ? sqrt(r.difference / r.expected) : sqrt(r.difference); }

// ---- peak multiply-add rates

struct peak { int input, fast; float result; };
enum { PEAK_PASSES = 32 };   // enough that the time to fill the operands is negligible
static void run_peak(void *argument, long i) {
    (void)i;
    struct peak *p = argument;
    table->peak[p->input][p->fast](PEAK_PASSES, &p->result);
}
static void peaks(void) {
    static const char *const names[N_INPUT_TYPES] = {
        [INPUT_F32] = "f32, f16", [INPUT_INT8] = "q4, q4s", [INPUT_INT16] = "q8 and others",
        [INPUT_BF16] = "bf16",
    };
    for (int input = 0; input < N_INPUT_TYPES; input++)
        for (int fast = 0; fast < 1 + is_rounded_if_fast(input); fast++) {
            struct peak p = { input, fast, 0 };
            char what[40];
            snprintf(what, sizeof what, "%s%s", names[input], fast ? ", rounded" : "");
            measure("peak", what, 0, run_peak, &p, 0, table->peak[input][fast](PEAK_PASSES, &p.result));
        }
}

// ---- plain memory reads, the limit of products with few rows

enum { READ_BYTES = 2 << 20 };
struct read { const float *pool; long parts; int streams; volatile float result; };
static void run_read(void *argument, long i) {
    struct read *r = argument;
    const float *part = r->pool + (size_t)(i % r->parts) * (READ_BYTES / sizeof(float));
    r->result = table->read_block(part, READ_BYTES / sizeof(float), r->streams);
}
static void reads(void) {
    const long parts = (long)(pool_bytes / READ_BYTES) + 1;
    float *pool = take((size_t)parts * READ_BYTES);
    memset(pool, 0, (size_t)parts * READ_BYTES);
    for (int streams = 1; streams <= 4; streams *= 2) {
        char what[40];
        snprintf(what, sizeof what, "%d stream%s", streams, streams > 1 ? "s" : "");
        struct read r = { pool, parts, streams, 0 };
        measure("read", what, 0, run_read, &r, READ_BYTES, 0);
    }
    free(pool);
}

// ---- products

struct product { struct gemm g; const uint8_t *weights; size_t matrix_bytes; long copies; };
static void run_gemm(void *argument, long i) {
    struct product *p = argument;
    p->g.w = p->weights + (size_t)(i % p->copies) * p->matrix_bytes;
    table->gemm(&p->g);
}

static void gemm_case(int dtype, int fast, int rows, int columns, int m, uint64_t *state) {
    char what[80];
    snprintf(what, sizeof what, "%s %d x %d, %d %srow%s", llamac_dtype_name(dtype), rows, columns, m,
             fast ? "rounded " : "", m > 1 ? "s" : "");
    if (!case_selected(what)) return;
    const int input = input_type_of(dtype);
    const size_t strip_bytes = dtype_strip_bytes(dtype, (uint64_t)columns), words = input_words(input, columns);
    const size_t bytes = llamac_matrix_bytes(dtype, (uint64_t)rows, (uint64_t)columns);
    const long copies = bytes > (1 << 20) ? (long)(pool_bytes / bytes) + 1 : 1;   // a small matrix stays in L2
    uint8_t *w = take(bytes * (size_t)copies);
    float *x = take_floats(m, columns), *y = take_floats(m, rows);
    int32_t *panels = take(4 * words * (size_t)m);
    fill_matrix(dtype, w, strip_bytes, rows, columns, 1, state);
    for (long i = 1; i < copies; i++) memcpy(w + (size_t)i * bytes, w, bytes);
    fill_random(x, (size_t)m * (size_t)columns, state);
    for (int r = 0; r < m; r++) {
        const struct panel_row to = panel_row(panels, m, table->panel_rows[input], words, r);
        pack_input(table, input, to, x + (size_t)r * (size_t)columns, columns, m, fast);
    }
    const struct gemm g = { .dtype = dtype, .fast = fast, .w = w, .strip_bytes = strip_bytes,
                            .last = ceil_div(rows, 16), .rows = rows, .columns = columns, .x = panels, .m = m, .y = y,
                            .y_stride = (size_t)rows, .scratch = take(gemm_scratch_bytes(m)), .cancel = &cancel };
    struct product p = { g, w, bytes, copies };
    run_gemm(&p, 0);
    struct rms error = { 0 };
    for (int i = 0; i < 64; i++) {
        const int r = random_below(state, m), o = random_below(state, rows);
        const float *row = x + (size_t)r * (size_t)columns;
        double sum = 0;
        for (int k = 0; k < columns; k++) sum += weight_at(dtype, w, strip_bytes, columns, o, k) * (double)row[k];
        rms_add(&error, (double)y[(size_t)r * (size_t)rows + (size_t)o], sum);
    }
    measure("gemm", what, rms_of(error), run_gemm, &p, (double)bytes, (double)rows * columns * m);
    free(w), free(x), free(y), free(panels), free(p.g.scratch);
}

static void gemms(uint64_t *state) {
    static const int shapes[][2] = { { 256, 2048 }, { 2048, 2048 }, { 5632, 2048 }, { 2048, 5632 } };
    static const int heights[] = { 1, 2, 4, 8, 16, 32, 128, 512 };
    for (int dtype = LLAMAC_F32; dtype < LLAMAC_N_DTYPES; dtype++)
        for (size_t s = 0; s < ARRAY_LEN(shapes); s++)
            for (size_t h = 0; h < ARRAY_LEN(heights); h++) {
                if (table == &kernels_scalar && heights[h] > 8) continue;   // takes seconds and shows nothing new
                for (int fast = 0; fast <= has_fast(dtype); fast++)
                    gemm_case(dtype, fast, shapes[s][0], shapes[s][1], heights[h], state);
            }
}

// ---- packing: its error is that of a product with the identity matrix

static void identity_matrix(int dtype, uint8_t *w, int n) {
    const size_t strip_bytes = dtype_strip_bytes(dtype, (uint64_t)n), block = block_bytes(dtype, BLOCK_GROUPS);
    for (int o = 0; o < n; o++) {
        uint8_t *strip = w + (size_t)(o / 16) * strip_bytes;
        const int r = o % 16;
        const float d = dtype == LLAMAC_Q8 ? 1.0f : -1.0f / 128;   // q4: 4 * codebook[0] = -128, and codebook[8] = 0
        memcpy(strip + 4 * r, &d, 4);
        for (int k = 0; k < n; k++) {
            uint8_t *scales = strip + LINE_BYTES + (size_t)(k / BLOCK_COLUMNS) * block;
            uint8_t *codes = scales + block_scale_bytes(dtype, BLOCK_GROUPS);
            const int i = k % BLOCK_COLUMNS;
            scales[i / scale_columns(dtype) * STRIP_ROWS + r] = dtype == LLAMAC_Q8 ? 1 : 4;
            if (dtype == LLAMAC_Q8) codes[i / 4 * LINE_BYTES + 4 * r + i % 4] = (uint8_t)(Q8_OFFSET + (o == k));
            else codes[i / 8 * LINE_BYTES + 4 * r + i % 4] |= (uint8_t)((o == k ? 0 : 8) << (i % 8 < 4 ? 0 : 4));
        }
    }
}

struct packing { int input, columns; const float *x; int32_t *panel; };
static void run_pack(void *argument, long i) {
    (void)i;
    const struct packing *p = argument;
    table->pack[p->input](panel_row(p->panel, 1, PANEL_ROWS, input_words(p->input, p->columns), 0), p->x, p->columns);
}
static void packs(uint64_t *state) {
    enum { N = 2048 };
    static const char *const names[N_INPUT_TYPES] = {
        [INPUT_F32] = "f32", [INPUT_INT8] = "int8, for q4 and q4s", [INPUT_INT16] = "int16, for q8",
        [INPUT_BF16] = "floats, for bf16",
    };
    float *x = take_floats(1, N), *y = take_floats(1, N);
    int32_t *panel = take(4 * N * 2);
    for (int input = 0; input < N_INPUT_TYPES; input++) {
        struct packing p = { input, N, x, panel };
        struct rms error = { 0 };
        fill_random(x, N, state);
        if (!is_float_input(input)) {
            const int dtype = input == INPUT_INT16 ? LLAMAC_Q8 : LLAMAC_Q4S;
            const size_t strip_bytes = dtype_strip_bytes(dtype, N);
            uint8_t *w = take(strip_bytes * N / 16);
            identity_matrix(dtype, w, N);
            struct gemm g = { .dtype = dtype, .w = w, .strip_bytes = strip_bytes, .last = N / 16, .rows = N,
                              .columns = N, .x = panel, .m = 1, .y = y, .y_stride = N,
                              .scratch = take(gemm_scratch_bytes(1)),
                              .cancel = &cancel };
            run_pack(&p, 0);
            table->gemm(&g);
            for (int i = 0; i < N; i++) rms_add(&error, (double)y[i], (double)x[i]);
            free(w), free(g.scratch);
        }
        measure("pack", names[input], rms_of(error), run_pack, &p, sizeof(float) * N, 0);
    }
    free(x), free(y), free(panel);
}

// ---- attention of one KV head, rotating through the heads of a pool

struct attention { struct attend a; int dtype, heads, n_pages; uint8_t ***pages; };
static void run_attend(void *argument, long i) {
    struct attention *t = argument;
    t->a.kv.pages = (const uint8_t *const *)t->pages[i % t->heads];
    table->attend[t->dtype](&t->a);
}

// Every head holds the same keys and values.
static void fill_heads(struct attention *t, size_t page_bytes, int positions, const float *k, const float *v) {
    const int head_dim = t->a.head_dim;
    t->pages = take(sizeof *t->pages * (size_t)t->heads);
    for (int h = 0; h < t->heads; h++) {
        t->pages[h] = take(sizeof *t->pages[h] * (size_t)t->n_pages);
        for (int i = 0; i < t->n_pages; i++) t->pages[h][i] = take(page_bytes);
        for (int i = 0; i < positions; i++) {
            uint8_t *page = t->pages[h][i / KV_PAGE];
            table->store_key[t->dtype](page, i % KV_PAGE, head_dim, k + i * head_dim);
            table->store_value[t->dtype](page + t->a.kv.value_offset, i % KV_PAGE, head_dim, v + i * head_dim);
        }
    }
}

static void attend_case(int dtype, int head_dim, int positions, int queries, uint64_t *state) {
    char what[80];
    snprintf(what, sizeof what, "%s heads of %d, %d positions, %d quer%s", llamac_dtype_name(dtype), head_dim,
             positions, queries, queries > 1 ? "ies" : "y");
    if (!case_selected(what)) return;
    const int width = padded_head_dim(head_dim), n_pages = ceil_div(positions, KV_PAGE);
    const size_t key_bytes = kv_keys_bytes(dtype, head_dim), page_bytes = key_bytes + kv_values_bytes(dtype, head_dim);
    float *k = take_floats(positions, head_dim), *v = take_floats(positions, head_dim);
    const size_t words = kv_query_words(dtype, head_dim);
    float *q = take_floats(queries, head_dim), *panels = take_floats(queries, (int)words);
    double *p = take(sizeof *p * (size_t)positions), *o = take(sizeof *o * (size_t)head_dim);
    fill_random(k, (size_t)(positions * head_dim), state), fill_random(v, (size_t)(positions * head_dim), state);
    fill_random(q, (size_t)(queries * head_dim), state);
    struct attention t = {
        .a = { .kv = { NULL, 0, key_bytes }, .head_dim = head_dim, .n_queries = queries, .q = panels,
               .out = take_floats(queries, width), .scratch = take(sizeof(float) * attend_layout(head_dim).end),
               .cancel = &cancel },
        .dtype = dtype, .heads = (int)(pool_bytes / 4 / (page_bytes * (size_t)n_pages)) + 1, .n_pages = n_pages,
    };
    fill_heads(&t, page_bytes, positions, k, v);
    for (int i = 0; i < queries; i++) {
        t.a.end[i] = positions;
        table->pack[kv_query_type(dtype)](panel_row(panels, queries, PANEL_ROWS, words, i), q + i * head_dim, head_dim);
    }
    run_attend(&t, 0);
    struct rms error = { 0 };
    for (int i = 0; i < queries; i++) {   // against exact keys and values: the error includes the cache's rounding
        reference_attention(head_dim, q + i * head_dim, k, v, 0, positions, 0, -INFINITY, NULL, 0, 0, p, o);
        for (int d = 0; d < head_dim; d++) rms_add(&error, (double)t.a.out[i * width + d], o[d]);
    }
    measure("attend", what, rms_of(error), run_attend, &t, (double)page_bytes * n_pages,
            2.0 * positions * head_dim * queries);
    for (int h = 0; h < t.heads; h++) {
        for (int i = 0; i < n_pages; i++) free(t.pages[h][i]);
        free(t.pages[h]);
    }
    free(t.pages), free(k), free(v), free(q), free(panels), free(p), free(o), free(t.a.out), free(t.a.scratch);
}
static const int kv_dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
static void attends(uint64_t *state) {
    static const int query_counts[] = { 1, 4, 8, ATTENTION_QUERIES };
    for (size_t j = 0; j < ARRAY_LEN(kv_dtypes); j++)
        for (int head_dim = 64; head_dim <= 128; head_dim *= 2)
            for (int positions = 128; positions <= 8192; positions *= positions < 2048 ? 16 : 4)
                for (size_t i = 0; i < ARRAY_LEN(query_counts); i++)
                    attend_case(kv_dtypes[j], head_dim, positions, query_counts[i], state);
}

// ---- row functions

enum { ROW = 5632, HALF = 32 };
struct row { float x[ROW], w[ROW], b[ROW], y[ROW]; int n, activation; };
#define RUN_ROW(name, call) \
    static void run_##name(void *argument, long i) { (void)i; struct row *r = argument; table->call; }
RUN_ROW(rms_norm, rms_norm(r->x, r->w, NULL, 1e-5f, r->n, r->y))
RUN_ROW(layer_norm, layer_norm(r->x, r->w, r->b, 1e-5f, r->n, r->y))
RUN_ROW(add, add(r->x, r->n, r->y))
RUN_ROW(rotate, rotate(r->y, r->w, r->b, HALF))
RUN_ROW(activate, activate(r->activation, r->x, r->w, r->n, r->y))

static void norms(struct row *r) {
    double squares = 0, mean = 0, variance = 0;
    struct rms error[2] = { 0 };
    r->n = 2048;
    for (int i = 0; i < r->n; i++) squares += (double)r->x[i] * (double)r->x[i] / r->n, mean += (double)r->x[i] / r->n;
    for (int i = 0; i < r->n; i++) variance += ((double)r->x[i] - mean) * ((double)r->x[i] - mean) / r->n;
    const double rms = sqrt(squares + (double)1e-5f), deviation = sqrt(variance + (double)1e-5f);
    run_rms_norm(r, 0);
    for (int i = 0; i < r->n; i++) rms_add(&error[0], (double)r->y[i], (double)r->x[i] / rms * (double)r->w[i]);
    measure("rms_norm", "2048", rms_of(error[0]), run_rms_norm, r, 3.0 * sizeof(float) * r->n, 0);
    run_layer_norm(r, 0);
    for (int i = 0; i < r->n; i++)
        rms_add(&error[1], (double)r->y[i], ((double)r->x[i] - mean) / deviation * (double)r->w[i] + (double)r->b[i]);
    measure("layer_norm", "2048", rms_of(error[1]), run_layer_norm, r, 4.0 * sizeof(float) * r->n, 0);
}

static void rotates(struct row *r) {
    struct rms error = { 0 };
    for (int i = 0; i < HALF; i++) r->w[i] = (float)cos(i), r->b[i] = (float)sin(i);
    memcpy(r->y, r->x, sizeof r->y);
    run_rotate(r, 0);
    for (int i = 0; i < HALF; i++) {
        const double x = (double)r->x[i], z = (double)r->x[i + HALF], c = (double)r->w[i], s = (double)r->b[i];
        rms_add(&error, (double)r->y[i], x * c - z * s);
        rms_add(&error, (double)r->y[i + HALF], x * s + z * c);
    }
    measure("rotate", "64", rms_of(error), run_rotate, r, 6.0 * sizeof(float) * HALF, 0);
}

static void adds(struct row *r) {
    r->n = 2048;
    memset(r->y, 0, sizeof r->y);
    struct rms error = { 0 };
    run_add(r, 0);
    for (int i = 0; i < r->n; i++) rms_add(&error, (double)r->y[i], (double)r->x[i]);
    measure("add", "2048", rms_of(error), run_add, r, 3.0 * sizeof(float) * r->n, 0);
}

static void activations(struct row *r) {
    static const char *const names[] = {
        [ACTIVATION_SILU] = "silu", [ACTIVATION_GELU_TANH] = "gelu_tanh", [ACTIVATION_GELU_ERF] = "gelu_erf",
        [ACTIVATION_RELU] = "relu", [ACTIVATION_QUICK_GELU] = "quick_gelu",
    };
    r->n = ROW;
    for (int i = 0; i < ROW; i++) r->x[i] *= 6;
    for (r->activation = 1; r->activation < (int)ARRAY_LEN(names); r->activation++) {
        struct rms error = { 0 };
        run_activate(r, 0);
        for (int i = 0; i < ROW; i++)
            rms_add(&error, (double)r->y[i], reference_activation(r->activation, (double)r->x[i]) * (double)r->w[i]);
        char what[40];
        snprintf(what, sizeof what, "%s, gated, %d", names[r->activation], ROW);
        measure("activate", what, rms_of(error), run_activate, r, 3.0 * sizeof(float) * ROW, 0);
    }
}

// ---- single rows of matrices and of the cache

struct gathering { int dtype, rows, columns; const uint8_t *w; size_t strip_bytes; float *y; };
static void run_gather(void *argument, long i) {
    const struct gathering *g = argument;
    table->gather[g->dtype](g->w, g->strip_bytes, (int)(i * 17 % g->rows), g->columns, g->y);
}
static void gathers(uint64_t *state) {
    for (int dtype = LLAMAC_F32; dtype < LLAMAC_N_DTYPES; dtype++) {
        struct gathering g = { dtype, 4096, 2048, NULL, dtype_strip_bytes(dtype, 2048), take_floats(1, 2048) };
        uint8_t *w = take(llamac_matrix_bytes(dtype, 4096, 2048));
        struct rms error = { 0 };
        fill_matrix(dtype, w, g.strip_bytes, g.rows, g.columns, 1, state);
        g.w = w;
        for (int i = 0; i < 8; i++) {
            run_gather(&g, i);
            for (int k = 0; k < g.columns; k++)
                rms_add(&error, (double)g.y[k], weight_at(dtype, w, g.strip_bytes, g.columns, i * 17 % g.rows, k));
        }
        measure("gather", llamac_dtype_name(dtype), rms_of(error), run_gather, &g, (double)g.strip_bytes, 0);
        free(w), free(g.y);
    }
}

struct storing { int dtype, key; uint8_t *page; const float *x; };
enum { HEAD = 64 };
static void run_store(void *argument, long i) {
    const struct storing *s = argument;
    (s->key ? table->store_key : table->store_value)[s->dtype](s->page, (int)(i % KV_PAGE), HEAD, s->x);
}
static void stores(uint64_t *state) {
    float x[HEAD], y[HEAD];
    fill_random(x, HEAD, state);
    for (size_t i = 0; i < ARRAY_LEN(kv_dtypes); i++)
        for (int key = 0; key < 2; key++) {
            const int dtype = kv_dtypes[i];
            struct storing s = { dtype, key, take(kv_keys_bytes(dtype, HEAD) + kv_values_bytes(dtype, HEAD)), x };
            struct rms error = { 0 };
            run_store(&s, 5);
            (key ? table->load_key : table->load_value)[dtype](s.page, 5, HEAD, y);
            for (int d = 0; d < HEAD; d++) rms_add(&error, (double)y[d], (double)x[d]);
            char what[40];
            snprintf(what, sizeof what, "%s, %s of %d", llamac_dtype_name(dtype), key ? "key" : "value", HEAD);
            const double bytes = HEAD * (sizeof(float) + (dtype == LLAMAC_F32 ? 4 : dtype == LLAMAC_F16 ? 2 : 1));
            measure("store", what, rms_of(error), run_store, &s, bytes, 0);
            free(s.page);
        }
}

static void measure_table(void) {
    uint64_t state = 1;
    struct row *row = take(sizeof *row);
    fill_random(row->x, ROW, &state), fill_random(row->w, ROW, &state), fill_random(row->b, ROW, &state);
    if (kernel_selected("peak")) peaks();
    if (kernel_selected("read")) reads();
    if (kernel_selected("gemm")) gemms(&state);
    if (kernel_selected("pack")) packs(&state);
    if (kernel_selected("attend")) attends(&state);
    if (kernel_selected("norm")) norms(row);
    if (kernel_selected("add")) adds(row);
    if (kernel_selected("gather")) gathers(&state);
    if (kernel_selected("store")) stores(&state);
    if (kernel_selected("activate")) activations(row);
    if (kernel_selected("rotate")) rotates(row);
    free(row);
}

int main(int n, char **arguments) {
    if (n != 6) {
        fprintf(stderr, "usage: kernel_speed ISA|all KERNEL|all MILLISECONDS MEGABYTES CASE|all\n");
        return 2;
    }
    if (strcmp(arguments[1], "all")) only_isa = arguments[1];
    if (strcmp(arguments[2], "all")) only_kernel = arguments[2];
    sample_seconds = atof(arguments[3]) / 1e3, pool_bytes = (size_t)atol(arguments[4]) << 20;
    if (strcmp(arguments[5], "all")) only_case = arguments[5];
    int measured = 0;
    find_tables();
    for (int i = 0; i < n_tables; i++) {
        // the speed of an emulation says nothing
        if (only_isa ? strcmp(only_isa, tables[i]->name) : strstr(tables[i]->name, "emulated") != NULL) continue;
        table = tables[i];
        measure_table();
        measured = 1;
    }
    if (!measured) fprintf(stderr, "kernel_speed: this machine does not support isa \"%s\"\n", only_isa);
    return !measured;
}
