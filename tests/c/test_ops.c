// SPDX-License-Identifier: MIT
// test_ops.c - single operations on arrays, draws of many rows, measuring loops and profiles: against their formulas in
// float64, with the same bits for every kernel set and number of threads.
#include "common.h"
#include "open_shape.h"
#include "ops.h"
#include "profile.h"

static uint64_t state = 1;

static float *random_floats(int rows, int columns) {
    float *x = take_floats(rows, columns);
    fill_random(x, (size_t)rows * (size_t)columns, &state);
    return x;
}
static void check_close(const float *found, const double *expected, int n, double tolerance, const char *what) {
    for (int i = 0; i < n; i++)
        CHECK(fabs((double)found[i] - expected[i]) <= tolerance * (1 + fabs(expected[i])), "%s[%d]: %g, expected %g",
              what, i, (double)found[i], expected[i]);
}

// Runs `statement`, which writes the bytes of `out`, with each kernel set and with one to three threads. The bits have
// to be those of the first run.
#define SAME_BITS(out, bytes, statement) do { \
        const char *isa; \
        int supported, runs = 0; \
        uint8_t *first = take(bytes); \
        for (size_t table = 0; (isa = llamac_isa_at(table, &supported)); table++) { \
            if (!supported) continue; \
            for (int threads = 1; threads <= up_to_threads(3); threads += 2) { \
                memset(out, 0x55, bytes); \
                CHECK(!(statement), "%s: %s", isa, err.message); \
                if (!runs++) memcpy(first, out, bytes); \
                CHECK(!memcmp(first, out, bytes), "%s, %d threads: other bits", isa, threads); \
            } \
        } \
        free(first); \
    } while (0)

// ---- operations

enum { N = 3, WIDTH = 70 };   // rows; 70 is no multiple of a vector's length

static void rows_are_normalized(void) {
    const float eps = 1e-3f;
    float *x = random_floats(N, WIDTH), *weight = random_floats(1, WIDTH), *bias = random_floats(1, WIDTH);
    float *y = take_floats(N, WIDTH);
    for (int is_rms = 0; is_rms < 2; is_rms++) {
        for (int has_bias = 0; has_bias < 2 - is_rms; has_bias++) {   // RMS norms have no bias
            double expected[N * WIDTH];
            for (int r = 0; r < N; r++) {
                double mean = 0, square = 0;
                for (int i = 0; i < WIDTH && !is_rms; i++) mean += (double)x[r * WIDTH + i] / WIDTH;
                for (int i = 0; i < WIDTH; i++) square += pow((double)x[r * WIDTH + i] - mean, 2) / WIDTH;
                for (int i = 0; i < WIDTH; i++)
                    expected[r * WIDTH + i] = ((double)x[r * WIDTH + i] - mean) / sqrt(square + (double)eps) *
                                              (double)weight[i] + (has_bias ? (double)bias[i] : 0);
            }
            SAME_BITS(y, sizeof(float) * N * WIDTH,
                      llamac_op_norm(is_rms, x, N, WIDTH, weight, has_bias ? bias : NULL, eps, isa, y, &err));
            check_close(y, expected, N * WIDTH, 2e-6, is_rms ? "RMS norm" : "layer norm");
        }
    }
    free(x), free(weight), free(bias), free(y);
}

static void rows_become_probabilities(void) {
    float *x = random_floats(N, WIDTH), *y = take_floats(N, WIDTH);
    double expected[N * WIDTH];
    for (int r = 0; r < N; r++) {
        double sum = 0;
        for (int i = 0; i < WIDTH; i++) sum += exp((double)(x[r * WIDTH + i] *= 9));
        for (int i = 0; i < WIDTH; i++) expected[r * WIDTH + i] = exp((double)x[r * WIDTH + i]) / sum;
    }
    SAME_BITS(y, sizeof(float) * N * WIDTH, llamac_op_softmax(x, N, WIDTH, isa, y, &err));
    check_close(y, expected, N * WIDTH, 1e-6, "softmax");
    free(x), free(y);
}

static void activations_follow_their_formulas(void) {
    static const int activations[] = { ACTIVATION_SILU, ACTIVATION_GELU_TANH, ACTIVATION_GELU_ERF, ACTIVATION_RELU,
                                       ACTIVATION_RELU2 };
    float *x = random_floats(N, WIDTH), *y = take_floats(N, WIDTH);
    for (size_t a = 0; a < ARRAY_LEN(activations); a++) {
        double expected[N * WIDTH];
        for (int i = 0; i < N * WIDTH; i++) expected[i] = reference_activation(activations[a], (double)x[i]);
        SAME_BITS(y, sizeof(float) * N * WIDTH, llamac_op_activate(activations[a], x, N, WIDTH, isa, y, &err));
        check_close(y, expected, N * WIDTH, 2e-6, "activation");
    }
    free(x), free(y);
}

static void heads_are_rotated(void) {
    enum { HEADS = 2, HEAD_DIM = 10, HALF = 4 };   // the last two numbers of a head stay
    const int32_t positions[N] = { 0, 5, 1000 };
    const float inv_freq[HALF] = { 1, 0.3f, 0.01f, 0.001f }, factor = 1.5f;
    float *x = random_floats(N, HEADS * HEAD_DIM), *y = take_floats(N, HEADS * HEAD_DIM);
    double expected[N * HEADS * HEAD_DIM];
    for (int i = 0; i < N * HEADS * HEAD_DIM; i++) expected[i] = (double)x[i];
    for (int h = 0; h < N * HEADS; h++) {
        for (int j = 0; j < HALF; j++) {
            const double angle = (double)((float)positions[h / HEADS] * inv_freq[j]), f = (double)factor;
            double *a = &expected[h * HEAD_DIM + j], *b = a + HALF;
            const double first = *a, second = *b;
            *a = f * (first * cos(angle) - second * sin(angle));
            *b = f * (second * cos(angle) + first * sin(angle));
        }
    }
    SAME_BITS(y, sizeof(float) * N * HEADS * HEAD_DIM,
              (memcpy(y, x, sizeof(float) * N * HEADS * HEAD_DIM),
               llamac_op_rope(y, N, HEADS, HEAD_DIM, positions, inv_freq, HALF, factor, isa, &err)));
    check_close(y, expected, N * HEADS * HEAD_DIM, 1e-6, "rotated heads");
    free(x), free(y);
}

enum { ROWS = 37, COLUMNS = 160, INPUTS = 300 };   // three strips, the last one in part; more inputs than a batch has

static void rows_of_matrices_are_gathered_and_multiplied(void) {
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_BF16, LLAMAC_Q8, LLAMAC_Q4 };
    static const int32_t rows[N] = { 36, 0, 17 };
    float *x = random_floats(INPUTS, COLUMNS), *bias = random_floats(1, ROWS), *y = take_floats(INPUTS, ROWS);
    for (size_t d = 0; d < ARRAY_LEN(dtypes); d++) {
        const int dtype = dtypes[d];
        const size_t strip_bytes = dtype_strip_bytes(dtype, COLUMNS);
        uint8_t *w = take(3 * strip_bytes);
        fill_matrix(dtype, w, strip_bytes, ROWS, COLUMNS, 0.01f, &state);
        double expected[N * COLUMNS];
        for (int i = 0; i < N * COLUMNS; i++)
            expected[i] = weight_at(dtype, w, strip_bytes, COLUMNS, rows[i / COLUMNS], i % COLUMNS);
        float *gathered = take_floats(N, COLUMNS);
        SAME_BITS(gathered, sizeof(float) * N * COLUMNS,
                  llamac_op_gather(dtype, w, COLUMNS, rows, N, isa, gathered, &err));
        check_close(gathered, expected, N * COLUMNS, 1e-6, "gathered rows");
        const llamac_op_product p = { .dtype = dtype, .rows = ROWS, .columns = COLUMNS, .w = w, .x = x, .n = INPUTS,
                                      .bias = d % 2 ? bias : NULL, .y = y };
        SAME_BITS(y, sizeof(float) * INPUTS * ROWS, llamac_op_matmul(&p, isa, threads, &err));
        for (int t = 0; t < INPUTS; t += INPUTS - 1) {
            double products[ROWS];
            for (int o = 0; o < ROWS; o++) {
                products[o] = p.bias ? (double)bias[o] : 0;
                for (int k = 0; k < COLUMNS; k++)
                    products[o] += weight_at(dtype, w, strip_bytes, COLUMNS, o, k) *
                                   input_at(dtype, x + t * COLUMNS, COLUMNS, k);
            }
            check_close(y + t * ROWS, products, ROWS, 2e-5, "products");
        }
        free(gathered), free(w);
    }
    free(x), free(bias), free(y);
}

static void matrices_are_quantized_by_several_threads(void) {
    float *w = random_floats(ROWS, COLUMNS), *importance = take_floats(1, COLUMNS);
    for (int k = 0; k < COLUMNS; k++) importance[k] = (float)(k % 5);
    const size_t bytes = (size_t)llamac_matrix_bytes(LLAMAC_Q4, ROWS, COLUMNS);
    uint8_t *out = take(bytes), *expected = take(bytes);
    CHECK(!llamac_quantize(LLAMAC_Q4, w, ROWS, COLUMNS, importance, NULL, NULL, expected, &err), "%s", err.message);
    SAME_BITS(out, bytes, llamac_op_quantize(LLAMAC_Q4, w, ROWS, COLUMNS, importance, isa, threads, out, &err));
    CHECK(!memcmp(out, expected, bytes), "other bits than llamac_quantize");
    llamac_test_fail_allocation(1);   // of one of the threads
    CHECK(llamac_op_quantize(LLAMAC_Q4, w, ROWS, COLUMNS, NULL, NULL, up_to_threads(3), out, &err) &&
          err.code == LLAMAC_NO_MEMORY, "%s", err.message);
    llamac_test_fail_allocation(0);
    free(w), free(importance), free(out), free(expected);
}

static void queries_attend_to_their_positions(void) {
    enum { HEADS = 4, KV_HEADS = 2, HEAD_DIM = 24, QUERIES = 20, POSITIONS = 150 };
    static const int kv_dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    static int32_t begin[QUERIES], end[QUERIES];
    float *q = random_floats(QUERIES, HEADS * HEAD_DIM), *k = random_floats(POSITIONS, KV_HEADS * HEAD_DIM);
    float *v = random_floats(POSITIONS, KV_HEADS * HEAD_DIM), *out = take_floats(QUERIES, HEADS * HEAD_DIM);
    const float sinks[HEADS] = { 0, 1, -1, 2 };
    for (int t = 0; t < QUERIES; t++) begin[t] = t % 3 * t, end[t] = POSITIONS - QUERIES + t + 1;
    for (size_t d = 0; d < ARRAY_LEN(kv_dtypes); d++) {
        const int dtype = kv_dtypes[d];
        const llamac_op_attention a = {
            .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .kv_dtype = dtype, .q = q,
            .n_queries = QUERIES, .k = k, .v = v, .n_positions = POSITIONS, .begin = begin, .end = end, .scale = 0.4f,
            .soft_cap = d == 1 ? 5 : 0, .sinks = d ? sinks : NULL, .out = out,
        };
        SAME_BITS(out, sizeof(float) * QUERIES * HEADS * HEAD_DIM, llamac_op_attend(&a, isa, threads, &err));
        for (int i = 0; i < QUERIES * HEADS; i++) {
            const int t = i / HEADS, h = i % HEADS, kv_head = h / (HEADS / KV_HEADS);
            float scaled[HEAD_DIM], keys[POSITIONS * HEAD_DIM], values[POSITIONS * HEAD_DIM];
            double p[POSITIONS], expected[HEAD_DIM];
            for (int x = 0; x < HEAD_DIM; x++) scaled[x] = q[i * HEAD_DIM + x] * a.scale;
            for (int j = 0; j < POSITIONS; j++) {
                const int at = (j * KV_HEADS + kv_head) * HEAD_DIM;
                round_to_cache(dtype, 1, HEAD_DIM, k + at, keys + j * HEAD_DIM);
                round_to_cache(dtype, 0, HEAD_DIM, v + at, values + j * HEAD_DIM);
            }
            reference_attention(HEAD_DIM, scaled, keys, values, begin[t], end[t], (double)a.soft_cap,
                                a.sinks ? (double)sinks[h] : -INFINITY, NULL, 0, 0, p, expected);
            check_close(out + i * HEAD_DIM, expected, HEAD_DIM, dtype == LLAMAC_Q8 ? 4e-3 : 2e-5, "attention");
        }
    }
    free(q), free(k), free(v), free(out);
}

static void tokens_are_those_of_the_sampler(void) {
    const llamac_sampling sampling = { .temperature = 1, .top_p = 0.9f, .seed = 7 };
    float *logits = random_floats(1, WIDTH);
    uint64_t scratch[WIDTH * LLAMAC_SAMPLE_SCRATCH / 8];
    for (uint64_t at = 0; at < 20; at++) {
        int token = -1;
        const int expected = llamac_sample(logits, WIDTH, &sampling, at, NULL, scratch, &err);
        SAME_BITS(&token, sizeof token,
                  (token = llamac_op_sample(logits, WIDTH, &sampling, at, isa, scratch, &err)) < 0);
        CHECK(token == expected, "token %d, expected %d", token, expected);
    }
    free(logits);
}

// ---- refusals

// Runs the smallest case of an operation.
static int run_operation(int operation, const char *isa, int threads) {
    static _Alignas(64) float x[64], y[64], one[64] = { 1 };
    static _Alignas(64) uint8_t w[16 * 64 * 4];
    static const int32_t row[1] = { 0 }, last[1] = { 1 };
    static uint64_t scratch[64 * LLAMAC_SAMPLE_SCRATCH / 8];
    const llamac_sampling sampling = { .top_p = 1 };
    const llamac_op_product p = { .dtype = LLAMAC_F32, .rows = 4, .columns = 8, .w = w, .x = x, .n = 1, .y = y };
    const llamac_op_attention a = { .n_heads = 1, .n_kv_heads = 1, .head_dim = 8, .kv_dtype = LLAMAC_F32, .q = x,
                                    .n_queries = 1, .k = x, .v = x, .n_positions = 1, .begin = row, .end = last,
                                    .scale = 1, .out = y };
    switch (operation) {
    case 0: return llamac_op_norm(1, x, 1, 8, one, NULL, 1, isa, y, &err);
    case 1: return llamac_op_softmax(x, 1, 8, isa, y, &err);
    case 2: return llamac_op_activate(ACTIVATION_SILU, x, 1, 8, isa, y, &err);
    case 3: return llamac_op_rope(y, 1, 1, 8, row, x, 4, 1, isa, &err);
    case 4: return llamac_op_gather(LLAMAC_F32, w, 8, row, 1, isa, y, &err);
    case 5: return llamac_op_sample(x, 8, &sampling, 0, isa, scratch, &err) < 0;
    case 6: return llamac_op_quantize(LLAMAC_Q8, x, 1, 32, NULL, isa, threads, w, &err);
    case 7: return llamac_op_matmul(&p, isa, threads, &err);
    default: return llamac_op_attend(&a, isa, threads, &err);
    }
}

static void what_does_not_exist_or_fit_is_refused(void) {
    static const int allocations[] = { 0, 1, 0, 1, 0, 0, 0, 2, 3 };
    for (int operation = 0; operation < 9; operation++) {
        CHECK(!run_operation(operation, NULL, 1), "operation %d: %s", operation, err.message);
        CHECK(run_operation(operation, "abacus", 1) && strstr(err.message, "isa \"abacus\""), "operation %d: %s",
              operation, err.message);
        CHECK(operation < 6 || (run_operation(operation, NULL, 0) && strstr(err.message, "threads is 0")), "%s",
              err.message);
        for (long n = 1; n <= allocations[operation]; n++) {
            llamac_test_fail_allocation(n);
            CHECK(run_operation(operation, NULL, 1) && err.code == LLAMAC_NO_MEMORY, "operation %d, allocation %ld",
                  operation, n);
            llamac_test_fail_allocation(0);
        }
    }
}

// ---- draws of many rows

static void rows_are_drawn_as_if_alone(void) {
    enum { DRAWS = 5, TOKENS = 30000 };   // enough logits for two threads
    const llamac_sampling sampling = { .temperature = 1, .top_p = 0.5f, .seed = 3 };
    const int32_t banned[1] = { 9 }, ids[3] = { 4, 5, 4 };
    const llamac_adjustments adjustments = { .repetition_penalty = 2, .dry_base = 1, .dry_allowed_length = 1 };
    const llamac_history history = { .ids = ids, .n_ids = 3, .n_prompt = 1, .banned = banned, .n_banned = 1 };
    float *logits = random_floats(DRAWS, TOKENS), *adjusted = take_floats(1, TOKENS);
    llamac_draw draws[DRAWS] = { 0 };
    int expected[DRAWS];
    char *scratch = take((size_t)TOKENS * LLAMAC_DRAW_SCRATCH * 3);
    for (int i = 0; i < DRAWS; i++) {
        float *row = logits + i * TOKENS;
        row[9] = 100, row[5] = i % 2 ? 60 : 0;
        draws[i] = (llamac_draw){ .logits = row, .sampling = &sampling, .position = (uint64_t)i,
                                  .adjustments = i % 3 ? &adjustments : NULL, .history = &history };
        memcpy(adjusted, row, sizeof(float) * TOKENS);
        if (draws[i].adjustments) llamac_adjust_logits(adjusted, TOKENS, &adjustments, &history, scratch);
        expected[i] = llamac_sample(adjusted, TOKENS, &sampling, (uint64_t)i, NULL, scratch, &err);
        CHECK(expected[i] == (i % 3 == 0 ? 9 : i % 2 ? 5 : expected[i]) && (i % 3 == 0 || expected[i] != 9),
              "row %d: token %d", i, expected[i]);
    }
    for (int threads = 1; threads <= up_to_threads(3); threads++) {
        llamac_draw_rows(draws, DRAWS, TOKENS, threads, scratch);
        for (int i = 0; i < DRAWS; i++)
            CHECK(draws[i].token == expected[i], "%d threads, row %d: token %d, expected %d", threads, i,
                  draws[i].token, expected[i]);
    }
    logits[0] = INFINITY;
    llamac_draw_rows(draws, 1, TOKENS, 1, scratch);
    CHECK(draws[0].token < 0 && draws[0].err.code == LLAMAC_BAD_MODEL, "%s", draws[0].err.message);
    CHECK(llamac_draw_threads(1, 1000, 8) == 1 && llamac_draw_threads(100, 1 << 16, 8) == 8 &&
          llamac_draw_threads(2, 1 << 20, 8) == 2, "threads of draws");
    free(logits), free(adjusted), free(scratch);
}

// ---- measuring

static void measuring_counts_what_it_does(void) {
    enum { FLOATS = 1 << 14 };
    float *block = random_floats(1, FLOATS);
    uint64_t counted = 0;
    const char *isa;
    int supported;
    for (size_t k = 0; (isa = llamac_isa_at(k, &supported)); k++) {
        if (!supported) continue;
        for (int streams = 1; streams <= 4; streams *= 2) {
            CHECK(!llamac_measure_read(block, FLOATS, 3, up_to_threads(2), streams, isa, &counted, &err), "%s",
                  err.message);
            CHECK(counted == 3 * sizeof(float) * FLOATS, "%s: %d bytes", isa, (int)counted);
        }
        for (int dtype = 1; dtype < LLAMAC_N_DTYPES; dtype++)
            for (int numerics = LLAMAC_EXACT; numerics <= LLAMAC_FAST; numerics++)
                CHECK(!llamac_measure_multiply(dtype, numerics, 2, 1, isa, &counted, &err) && counted > 0, "%s",
                      err.message);
    }
    const struct { int threads, times, streams, dtype, passes; const char *isa, *message; } refused[] = {
        { 0, 1, 1, 1, 1, NULL, "threads is 0" }, { 1, -1, 1, 0, 1, NULL, "is" }, { 1, 1, 3, 1, -1, NULL, "is" },
        { 1, 1, 1, 1, 1, "abacus", "abacus" },
    };
    for (size_t i = 0; i < ARRAY_LEN(refused); i++) {
        CHECK(llamac_measure_read(block, FLOATS, refused[i].times, refused[i].threads, refused[i].streams,
                                  refused[i].isa, &counted, &err) && strstr(err.message, refused[i].message), "%s",
              err.message);
        CHECK(llamac_measure_multiply(refused[i].dtype, LLAMAC_EXACT, refused[i].passes, refused[i].threads,
                                      refused[i].isa, &counted, &err) && strstr(err.message, refused[i].message), "%s",
              err.message);
    }
    free(block);
}

// The bytes of a step are those of its weights: each is read once in an eval of one row.
static void a_profile_counts_the_bytes_of_each_step(void) {
    open_shape(&tiny_llama);
    const struct layer *layer = &model->layers[1];
    const size_t n_costs = (size_t)LLAMAC_N_STEPS * model->config->n_layers;
    llamac_step_cost *costs = take(sizeof *costs * n_costs);
    float *logits = take_floats(2, vocab);
    llamac_session *s = open_session(model, 1, 0, up_to_threads(2), NULL);
    CHECK(llamac_profile(s, costs, n_costs - 1, &err) && strstr(err.message, "expected 30"), "%s", err.message);
    CHECK(!llamac_profile(s, costs, n_costs, &err), "%s", err.message);
    prefill(s, 0, 1, vocab, logits);
    uint64_t ns = 0;
    for (size_t i = 0; i < n_costs; i++) ns += costs[i].ns;
    CHECK(ns > 0, "no step took any time");
#define BYTES_OF(matrix) llamac_matrix_bytes((matrix).dtype, (uint64_t)(matrix).rows, (uint64_t)(matrix).columns)
    const size_t of_output = BYTES_OF(layer->attn_out), of_down = BYTES_OF(layer->ffn.down);
    const llamac_step_cost *of_layer = costs + LLAMAC_N_STEPS;
    CHECK(of_layer[LLAMAC_STEP_ATTN_OUT].bytes == of_output && of_layer[LLAMAC_STEP_FFN_DOWN].bytes == of_down,
          "%d and %d bytes, expected %d and %d", (int)of_layer[LLAMAC_STEP_ATTN_OUT].bytes,
          (int)of_layer[LLAMAC_STEP_FFN_DOWN].bytes, (int)of_output, (int)of_down);
    CHECK(of_layer[LLAMAC_STEP_LOGITS].bytes == 0, "logits in a layer that is not the last");
    CHECK(!strcmp(llamac_step_name(LLAMAC_STEP_QKV), "qkv") && !llamac_step_name(LLAMAC_N_STEPS) &&
          !llamac_step_name(-1), "names of steps");
    memset(costs, 0, sizeof *costs * n_costs);
    CHECK(!llamac_profile(s, NULL, 0, &err) && !llamac_truncate(s, 0, 0, &err), "%s", err.message);
    prefill(s, 0, 1, vocab, logits);
    for (size_t i = 0; i < n_costs; i++) CHECK(!costs[i].bytes && !costs[i].ns, "a cost after the profile has ended");
    llamac_session_close(&s);
    free(costs), free(logits);
    close_shape();
}

int main(void) {
    RUN(rows_are_normalized);
    RUN(rows_become_probabilities);
    RUN(activations_follow_their_formulas);
    RUN(heads_are_rotated);
    RUN(rows_of_matrices_are_gathered_and_multiplied);
    RUN(matrices_are_quantized_by_several_threads);
    RUN(queries_attend_to_their_positions);
    RUN(tokens_are_those_of_the_sampler);
    RUN(what_does_not_exist_or_fit_is_refused);
    RUN(rows_are_drawn_as_if_alone);
    RUN(measuring_counts_what_it_does);
    RUN(a_profile_counts_the_bytes_of_each_step);
    return finish_tests("test_ops");
}
