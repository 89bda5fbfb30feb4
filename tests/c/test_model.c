// SPDX-License-Identifier: MIT
// test_model.c - the core as a whole: the same bits however an input is computed, failing allocations, observing.
#include <fenv.h>
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "common.h"
#include "model.h"
#include "tiny_model.h"

// ---- the same bits

enum { N = 290 };   // positions: more than a block of attention, and not a multiple of any tile

// Sanitized builds run 1 and 3 threads, because the scalar kernels are slow in them. Other builds also run 2.
#ifdef __SANITIZE_ADDRESS__
enum { THREADS_STEP = 2 };
#else
enum { THREADS_STEP = 1 };
#endif

// Like `prefill`, in chunks of random sizes from 1 to max_chunk <= 64.
static void prefill_in_chunks(llamac_session *s, int vocab, int max_chunk, float *logits, uint64_t *state) {
    for (int start = 0, n; start < N; start += n) {
        n = min_int(N - start, 1 + random_below(state, max_chunk));
        llamac_row rows[64];
        for (int r = 0; r < n; r++) rows[r] = (llamac_row){ token_at(0, start + r, vocab), 0, start + r, 1 };
        CHECK(!llamac_eval(s, rows, n, logits + (size_t)(start * vocab), NULL, &err), "%s", err.message);
    }
}

// Compares every kernel set and several thread counts with the scalar kernels on one thread.
static void check_same_bits(const struct tiny_shape *shape, int kv_dtype, int numerics) {
    struct tiny_file file = tiny_model(shape);
    llamac_model *model = open_model(file);
    const int vocab = shape->vocab;
    const size_t floats = (size_t)(vocab * N), bytes = sizeof(float) * floats;
    float *expected = take(bytes), *logits = take(bytes);
    llamac_session_options options = { .n_sequences = 1, .kv_dtype = kv_dtype, .threads = 1, .isa = "scalar",
                                       .numerics = numerics };
    llamac_session *s = open_session_with(model, options);
    prefill(s, 0, N, vocab, expected);
    llamac_session_close(&s);
    for (size_t i = 0; i < floats; i++) CHECK(isfinite(expected[i]), "logit %zu", i);

    uint64_t state = 9;
    const int most = up_to_threads(emulated ? 2 : 3);
    const char *isa;
    int supported;
    for (size_t i = 0; (isa = llamac_isa_at(i, &supported)); i++) {
        if (!supported) continue;
        for (int threads = sparse && i % 2 ? most : 1; threads <= most; threads += sparse ? most : THREADS_STEP) {
            options.threads = threads, options.isa = isa;
            s = open_session_with(model, options);
            if (threads > 1 || strcmp(isa, "scalar")) {   // otherwise it is what `expected` comes from
                prefill(s, 0, N, vocab, logits);
                CHECK(!memcmp(logits, expected, bytes), "%s, %d threads, one prefill", isa, threads);
                CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
            }
            memset(logits, 0, bytes);
            prefill_in_chunks(s, vocab, threads > 1 ? 50 : sparser(7), logits, &state);
            CHECK(!memcmp(logits, expected, bytes), "%s, %d threads, in chunks", isa, threads);
            llamac_session_close(&s);
        }
    }
    free(logits), free(expected);
    llamac_model_close(&model);
    free(file.data);
}

static void bits_do_not_depend_on_threads_chunks_or_isa(void) {
    enum { EMULATED = 4 };   // the first cases, for emulators
    struct tiny_shape f16 = tiny_llama, experts = tiny_experts, ternary = tiny_few_bits;
    f16.dtype = LLAMAC_F16, f16.tied = 1, f16.biases = 0, experts.dtype = LLAMAC_Q5_K, ternary.sub_norms = 2;
    const struct { const struct tiny_shape *shape; int kv_dtype, numerics; } cases[] = {
        { &tiny_llama, LLAMAC_F16, 0 }, { &tiny_gpt2, 0, 0 }, { &tiny_mixed, 0, 0 }, { &tiny_mixed, LLAMAC_Q8, 0 },
        { &tiny_llama, LLAMAC_Q8, 0 }, { &tiny_llama, LLAMAC_F32, 0 }, { &f16, 0, 0 }, { &tiny_experts, 0, 0 },
        { &tiny_experts, LLAMAC_F32, 0 }, { &tiny_q8, 0, 0 }, { &tiny_q6, 0, 0 }, { &tiny_q4, 0, 0 },
        { &tiny_q4s, 0, 0 }, { &tiny_exact, 0, 0 }, { &tiny_q8, 0, LLAMAC_FAST }, { &tiny_exact, 0, LLAMAC_FAST },
        { &experts, 0, LLAMAC_FAST }, { &tiny_latent, LLAMAC_F32, 0 }, { &tiny_latent, LLAMAC_Q8, 0 },
        { &tiny_layered, 0, 0 }, { &tiny_mixture, 0, 0 }, { &ternary, 0, 0 }, { &tiny_distant, 0, 0 },
        { &tiny_distant, LLAMAC_Q8, 0 },
    };
    for (size_t i = 0; i < (emulated ? (size_t)EMULATED : ARRAY_LEN(cases)); i += emulated ? 1 : (size_t)sparser(4))
        check_same_bits(cases[i].shape, cases[i].kv_dtype, cases[i].numerics);
}

static void bits_do_not_depend_on_other_rows_of_the_batch(void) {
    enum { SEQUENCES = 4, LENGTH = 45, ROWS = 40 };
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    const int vocab = tiny_llama.vocab;
    const size_t row_bytes = sizeof(float) * (size_t)vocab;
    float *expected = take_floats(SEQUENCES * LENGTH, vocab), *logits = take_floats(ROWS, vocab);
    for (int q = 0; q < SEQUENCES; q++) {
        llamac_session *s = open_session(model, SEQUENCES, 0, 1, NULL);
        prefill(s, q, LENGTH, vocab, expected + q * LENGTH * vocab);
        llamac_session_close(&s);
    }
    uint64_t state = 4;
    for (int threads = 1; threads <= up_to_threads(3); threads++) {
        llamac_session *s = open_session(model, SEQUENCES, 0, threads, NULL);
        int lengths[SEQUENCES] = { 0 };
        for (int left = SEQUENCES * LENGTH; left > 0;) {   // batches of rows of random sequences
            llamac_row rows[ROWS];
            int n = 0;
            for (int tries = 1 + random_below(&state, ROWS); tries; tries--) {
                const int q = random_below(&state, SEQUENCES), position = lengths[q];
                if (position == LENGTH) continue;
                rows[n++] = (llamac_row){ token_at(q, position, vocab), q, position, 1 };
                lengths[q]++;
            }
            CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
            for (int r = 0; r < n; r++) {
                const int q = rows[r].sequence, position = rows[r].position;
                CHECK(!memcmp(logits + r * vocab, expected + (q * LENGTH + position) * vocab, row_bytes),
                      "sequence %d, position %d, %d threads", q, position, threads);
            }
            left -= n;
        }
        llamac_session_close(&s);
    }
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

// Rounding mode and handling of denormal numbers: an eval uses its own and restores the caller's.
static void bits_do_not_depend_on_the_callers_floating_point_settings(void) {
    struct tiny_file file = tiny_model(&tiny_gpt2);
    llamac_model *model = open_model(file);
    const int vocab = tiny_gpt2.vocab;
    const size_t bytes = sizeof(float) * (size_t)(20 * vocab);
    float *expected = take(bytes), *logits = take(bytes);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    prefill(s, 0, 20, vocab, expected);
    llamac_session_close(&s);
    for (int threads = 1; threads <= up_to_threads(2); threads++) {
        s = open_session(model, 1, 0, threads, NULL);
        memset(logits, 0, bytes);
        fesetround(FE_UPWARD);
#if defined(__x86_64__)
        const unsigned settings = _mm_getcsr() | 0x8040;   // flush to zero, denormals are zero
        _mm_setcsr(settings);
#endif
        prefill(s, 0, 20, vocab, logits);
        const int rounding = fegetround();
#if defined(__x86_64__)
        const unsigned after = _mm_getcsr();
        _mm_setcsr(0x1f80);   // the default
        CHECK((after & 0xffc0) == (settings & 0xffc0), "MXCSR is %x, was %x", after, settings);
#endif
        fesetround(FE_TONEAREST);
        CHECK(rounding == FE_UPWARD, "the rounding mode is %d, was %d", rounding, FE_UPWARD);
        CHECK(!memcmp(logits, expected, bytes), "%d threads", threads);
        llamac_session_close(&s);
    }
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

static void a_truncated_session_gives_the_bits_of_a_new_one(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    const int vocab = tiny_llama.vocab;
    float *expected = take_floats(N, vocab), *logits = take_floats(1, vocab);
    prefill(s, 0, N, vocab, expected);
    llamac_session_info info;
    llamac_session_describe(s, &info);
    const size_t full = info.kv_bytes;
    const int lengths[] = { 289, 256, 255, 130, 64, 63, 1, 0 };
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        const int n = lengths[i];
        CHECK(!llamac_truncate(s, 0, n, &err) && llamac_length(s, 0) == n, "%s", err.message);
        const llamac_row row = { token_at(0, n, vocab), 0, n, 1 };
        CHECK(!llamac_eval(s, &row, 1, logits, NULL, &err), "%s", err.message);
        CHECK(!memcmp(logits, expected + n * vocab, sizeof(float) * (size_t)vocab), "position %d", n);
    }
    llamac_session_describe(s, &info);
    CHECK(info.kv_bytes < full, "%zu bytes for 1 position, %zu for %d", info.kv_bytes, full, N);
    CHECK(llamac_truncate(s, 0, 2, &err) && err.code == LLAMAC_BAD_ARGUMENT, "beyond the length");
    CHECK(llamac_truncate(s, 1, 0, &err) && err.code == LLAMAC_BAD_ARGUMENT, "no such sequence");
    llamac_session_close(&s);
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

// ---- observing

enum { OBSERVED_ROWS = 270 };

// Requests every stage, with new buffers; of layer 1 where a stage exists once per layer. floats: their sizes.
static void request_all_stages(const llamac_session *s, llamac_observation *requests, size_t *floats) {
    for (int stage = 0; stage < LLAMAC_N_STAGES; stage++) {
        int per_layer;
        floats[stage] = llamac_stage_width(s, stage, &per_layer) * OBSERVED_ROWS;
        requests[stage] = (llamac_observation){ stage, per_layer, take(sizeof(float) * floats[stage]) };
    }
}

// scores: (rows, n_heads, context). A row attends to itself and the rows before it.
static void check_causal_scores(const float *scores, const struct tiny_shape *shape) {
    for (int r = 0; r < OBSERVED_ROWS; r += 30)
        for (int p = 0; p < shape->context; p++) {
            const float score = scores[(size_t)(r * shape->n_heads * shape->context + p)];
            CHECK(p <= r ? isfinite(score) : score == -INFINITY, "score of row %d at position %d is %g", r, p,
                  (double)score);
        }
}

static void check_observers(const struct tiny_shape *shape) {
    struct tiny_file file = tiny_model(shape);
    llamac_model *model = open_model(file);
    const size_t logits_bytes = sizeof(float) * (size_t)(shape->vocab * OBSERVED_ROWS);
    float *expected = take(logits_bytes), *logits = take(logits_bytes);
    llamac_observation requests[2][LLAMAC_N_STAGES];   // of one thread, of two
    size_t floats[LLAMAC_N_STAGES];
    llamac_row rows[OBSERVED_ROWS];
    for (int i = 0; i < OBSERVED_ROWS; i++) rows[i] = (llamac_row){ token_at(0, i, shape->vocab), 0, i, 1 };
    const int most = up_to_threads(2);
    for (int threads = 1; threads <= most; threads++) {
        llamac_session *s = open_session(model, 1, 0, threads, NULL);
        CHECK(!llamac_eval(s, rows, OBSERVED_ROWS, expected, NULL, &err), "%s", err.message);
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        llamac_observation *seen = requests[threads - 1];
        request_all_stages(s, seen, floats);
        const llamac_eval_options options = { .observations = seen, .n_observations = LLAMAC_N_STAGES };
        CHECK(!llamac_eval(s, rows, OBSERVED_ROWS, logits, &options, &err), "%s", err.message);
        CHECK(!memcmp(logits, expected, logits_bytes), "%d threads: an observer changes logits", threads);
        CHECK(!memcmp(seen[LLAMAC_STAGE_LOGITS].out, expected, logits_bytes), "%d threads: stage logits", threads);
        check_causal_scores(seen[LLAMAC_STAGE_SCORES].out, shape);
        llamac_session_close(&s);
    }
    for (int stage = 0; stage < LLAMAC_N_STAGES; stage++) {
        if (most == 2)
            CHECK(!memcmp(requests[0][stage].out, requests[1][stage].out, sizeof(float) * floats[stage]),
                  "stage %s depends on threads", llamac_stage_name(stage));
        for (int t = 0; t < most; t++) free(requests[t][stage].out);
    }
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

// Without a buffer for logits, the observed norm has the same bits, and rows are appended all the same.
static void the_output_norm_needs_no_logits(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    const int vocab = tiny_llama.vocab;
    int per_layer;
    const size_t width = llamac_stage_width(s, LLAMAC_STAGE_OUTPUT_NORM, &per_layer);
    enum { ROWS = 270 };
    llamac_row rows[ROWS];
    for (int i = 0; i < ROWS; i++) rows[i] = (llamac_row){ token_at(0, i, vocab), 0, i, i % 3 != 0 };
    float *logits = take(sizeof(float) * (size_t)(vocab * ROWS));
    float *norms[2] = { take(sizeof(float) * width * ROWS), take(sizeof(float) * width * ROWS) };
    for (int without = 0; without < 2; without++) {
        const llamac_observation request = { LLAMAC_STAGE_OUTPUT_NORM, 0, norms[without] };
        const llamac_eval_options options = { .observations = &request, .n_observations = 1 };
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        CHECK(!llamac_eval(s, rows, ROWS, without ? NULL : logits, &options, &err), "%s", err.message);
        CHECK(llamac_length(s, 0) == ROWS, "length %d", llamac_length(s, 0));
    }
    CHECK(!memcmp(norms[0], norms[1], sizeof(float) * width * 180), "the norm depends on whether logits are computed");
    llamac_session_close(&s);
    free(norms[0]), free(norms[1]), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

static void observers_change_nothing(void) {
    check_observers(&tiny_llama);
    check_observers(&tiny_gpt2);
}

// ---- invalid arguments

static void invalid_rows_are_rejected_and_change_nothing(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    float logits[101];
    const struct { llamac_row rows[2]; int n; } cases[] = {
        { { { .token = -1 } }, 1 },
        { { { .token = 101 } }, 1 },
        { { { .sequence = 2 } }, 1 },
        { { { .sequence = -1 } }, 1 },
        { { { .position = 1 } }, 1 },
        { { { .position = 0 }, { .position = 2 } }, 2 },
        { { { .position = 0 } }, -1 },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        CHECK(llamac_eval(s, cases[i].rows, cases[i].n, logits, NULL, &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT,
              "case %zu: %s", i, err.message);
        CHECK(llamac_length(s, 0) == 0, "case %zu: length %d", i, llamac_length(s, 0));
    }
    CHECK(llamac_eval(s, &(llamac_row){ .want_logits = 1 }, 1, NULL, NULL, &err), "no buffer for logits");
    const llamac_observation seen[] = { { LLAMAC_STAGE_OUTPUT_NORM, 0, logits }, { LLAMAC_STAGE_LOGITS, 0, logits } };
    const llamac_eval_options options = { .observations = seen, .n_observations = 2 };
    CHECK(llamac_eval(s, &(llamac_row){ .want_logits = 1 }, 1, NULL, &options, &err), "no buffer for observed logits");
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

static void invalid_observations_are_rejected(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    const llamac_row row = { .token = 1, .want_logits = 1 };
    float logits[101], q[60];
    const struct { llamac_observation requests[3]; int n; const char *messages[2]; } cases[] = {
        { { { LLAMAC_STAGE_Q, 3, q } }, 1, { "observation 0", "in layer 3" } },
        { { { LLAMAC_STAGE_Q, 0, NULL } }, 1, { "observation 0", "no buffer" } },
        { { { 99, 0, q } }, 1, { "observation 0", "no stage 99" } },
        // the same stage twice
        { { { LLAMAC_STAGE_Q, 1, q }, { LLAMAC_STAGE_Q, 0, q }, { LLAMAC_STAGE_Q, 1, q } }, 3,
          { "observation 2", "stage q of layer 1" } },
        // the layer does not matter for stages outside of layers
        { { { LLAMAC_STAGE_LOGITS, 0, logits }, { LLAMAC_STAGE_LOGITS, 1, logits } }, 2,
          { "observation 1", "logits" } },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const llamac_eval_options options = { .observations = cases[i].requests, .n_observations = cases[i].n };
        CHECK(llamac_eval(s, &row, 1, logits, &options, &err) && err.code == LLAMAC_BAD_ARGUMENT, "case %zu", i);
        for (int m = 0; m < 2; m++)
            CHECK(strstr(err.message, cases[i].messages[m]), "%s: %s", cases[i].messages[m], err.message);
    }
    for (int n = -1; n <= 1; n += 2) {
        const llamac_eval_options options = { .n_observations = n };
        CHECK(llamac_eval(s, &row, 1, logits, &options, &err) && err.code == LLAMAC_BAD_ARGUMENT, "%d of NULL", n);
    }
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

static void invalid_session_options_are_rejected(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    const llamac_session_options cases[] = {
        { .n_sequences = 0, .threads = 1 },
        { .n_sequences = 1, .threads = 0 },
        { .n_sequences = 1, .threads = 1, .context = 401 },
        { .n_sequences = 1, .threads = 1, .context = -1 },
        { .n_sequences = 1, .threads = 1, .kv_dtype = LLAMAC_BF16 },
        { .n_sequences = 1, .threads = 1, .isa = "none" }, { .n_sequences = 1, .threads = 1, .numerics = 2 },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        llamac_session *s;
        CHECK(llamac_session_open(&s, model, &cases[i], &err) && !s, "case %zu", i);
    }
    llamac_model_close(&model);
    free(file.data);
}

static void rows_beyond_the_context_are_rejected(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    const llamac_session_options options = { .n_sequences = 1, .threads = 1, .context = 3 };
    llamac_session *s;
    CHECK(!llamac_session_open(&s, model, &options, &err), "%s", err.message);
    llamac_row rows[4];
    for (int i = 0; i < 4; i++) rows[i] = (llamac_row){ .token = 1, .position = i };
    CHECK(llamac_eval(s, rows, 4, NULL, NULL, &err) && err.code == LLAMAC_CONTEXT_FULL && llamac_length(s, 0) == 0,
          "%s", err.message);
    CHECK(!llamac_eval(s, rows, 3, NULL, NULL, &err) && llamac_length(s, 0) == 3, "%s", err.message);
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// ---- memory

// Fails the first allocation, then the second, and so on until all of them succeed.
static void any_allocation_can_fail(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    const long objects = llamac_live_objects();
    const llamac_session_options options = { .n_sequences = 2, .threads = 1 };
    llamac_row rows[80];
    for (int i = 0; i < 80; i++) rows[i] = (llamac_row){ 1, 0, i, i == 79 };
    float logits[101];
    int failed = 1;
    for (long n = 1; failed && n < 100; n++) {
        llamac_model *model = NULL;
        llamac_session *s = NULL;
        llamac_test_fail_allocation(n);
        failed = llamac_model_open(&model, file.data, file.bytes, &err)
            || llamac_session_open(&s, model, &options, &err)
            || llamac_eval(s, rows, 80, logits, NULL, &err);
        llamac_test_fail_allocation(0);
        if (failed) CHECK(err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        if (failed && s) {
            CHECK(llamac_length(s, 0) == 0, "allocation %ld: length %d", n, llamac_length(s, 0));
            CHECK(!llamac_eval(s, rows, 80, logits, NULL, &err), "allocation %ld: retried: %s", n, err.message);
        }
        llamac_session_close(&s);
        llamac_model_close(&model);
        CHECK(llamac_live_objects() == objects, "allocation %ld: objects leak", n);
    }
    CHECK(!failed, "more than 100 allocations");
    free(file.data);
}

static size_t kv_bytes(const llamac_session *s) {
    llamac_session_info info;
    llamac_session_describe(s, &info);
    return info.kv_bytes;
}

static void failed_evals_release_their_pages(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    float *logits = take_floats(5, tiny_llama.vocab);
    prefill(s, 1, 5, tiny_llama.vocab, logits);
    free(logits);
    llamac_row rows[390];   // two sequences in turn; the second one already has five positions
    for (int i = 0; i < 390; i++) rows[i] = (llamac_row){ 1, i % 2, i / 2 + (i % 2 ? 5 : 0), 0 };

    const size_t before = kv_bytes(s);
    const int32_t cancel = 1;
    const llamac_eval_options cancelled = { .cancel = &cancel };
    CHECK(llamac_eval(s, rows, 390, NULL, &cancelled, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
    CHECK(kv_bytes(s) == before, "cancelled: %zu bytes, then %zu", before, kv_bytes(s));

    CHECK(!llamac_eval(s, rows, 300, NULL, NULL, &err), "%s", err.message);
    CHECK(kv_bytes(s) > before, "%zu bytes, then %zu", before, kv_bytes(s));
    CHECK(!llamac_truncate(s, 0, 0, &err) && !llamac_truncate(s, 1, 0, &err), "%s", err.message);
    CHECK(kv_bytes(s) == 0, "%zu bytes without positions", kv_bytes(s));

    // Activations have been allocated: the first allocation is for the lengths, the second for a slab of pages.
    llamac_test_fail_allocation(2);
    CHECK(llamac_eval(s, rows, 1, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY && strstr(err.message, "page"),
          "%s", err.message);
    llamac_test_fail_allocation(0);
    CHECK(kv_bytes(s) == 0, "%zu bytes without positions", kv_bytes(s));
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// ---- forks

static void a_forked_child_can_eval(void) {
    if (!llamac_has_threads()) return;
    enum { ROWS = 40 };
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 2, NULL);
    const int vocab = tiny_llama.vocab;
    const size_t bytes = sizeof(float) * (size_t)(ROWS * vocab);
    float *expected = take(bytes), *logits = take(bytes);
    prefill(s, 0, ROWS, vocab, expected);
    for (int i = 0; i < 3; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(100);   // a hang is a failure
            llamac_truncate(s, 0, 0, &err);
            prefill(s, 0, ROWS, vocab, logits);
            _exit(memcmp(logits, expected, bytes) != 0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "the child's status is %d", status);
    }
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    prefill(s, 0, ROWS, vocab, logits);
    CHECK(!memcmp(logits, expected, bytes), "the parent's logits have changed");
    llamac_session_close(&s);
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

static void changes_of_a_model_are_checked(void) {
    struct tiny_file file = tiny_model(&tiny_latent);
    llamac_model *model = open_model(file);
    static const float data[64 * 128];
    const char *matrix = "layers.0.attn_out.weight", *vector = "output_norm.weight";
    const struct { const char *name; int rank; size_t a, b; const float *scales; const char *message; } adapters[] = {
        { "layers.9.attn_out.weight", 1, 4, 4, NULL, "the model has no matrix layers.9" },
        { vector, 1, 4, 4, NULL, "the model has no matrix output_norm" },
        { matrix, 0, 4, 4, NULL, "rank is 0" },
        { "layers.0.attn_k_b.weight", 1, 4, 4, NULL, "matrices of single heads" },
        { "token_embedding.weight", 1, 4, 4, data, "an embedding has no scales" },
        { matrix, 1, 4, 4, data, "there are 1 scales, expected 48" },
        { matrix, 1, 4, 5, NULL, "a has 4 bytes and b 5, expected" },
    };
    for (size_t i = 0; i < ARRAY_LEN(adapters); i++)
        CHECK(llamac_model_adapt(model, adapters[i].name, adapters[i].rank, data, adapters[i].a, data, adapters[i].b,
                                 adapters[i].scales, 1, &err) && strstr(err.message, adapters[i].message), "%s: %s",
              adapters[i].message, err.message);
    const struct { const char *name; int dtype; size_t bytes; const char *message; } replaced[] = {
        { "layers.0.attn_x.weight", LLAMAC_F32, 4, "has no tensor layers.0.attn_x" },
        { vector, LLAMAC_F16, 96, "dtype is 2, but a vector is f32" },
        { matrix, 99, 4, "dtype is 99, which does not exist" },
        { vector, LLAMAC_F32, 4, "4 bytes of dtype 1, expected 192" },
    };
    for (size_t i = 0; i < ARRAY_LEN(replaced); i++)
        CHECK(llamac_model_replace(model, replaced[i].name, replaced[i].dtype, data, replaced[i].bytes, &err) &&
              strstr(err.message, replaced[i].message), "%s: %s", replaced[i].message, err.message);
    llamac_model_close(&model);
    free(file.data);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(bits_do_not_depend_on_threads_chunks_or_isa);
    RUN(bits_do_not_depend_on_other_rows_of_the_batch);
    RUN(bits_do_not_depend_on_the_callers_floating_point_settings);
    RUN(a_truncated_session_gives_the_bits_of_a_new_one);
    RUN(observers_change_nothing);
    RUN(the_output_norm_needs_no_logits);
    RUN(invalid_rows_are_rejected_and_change_nothing);
    RUN(invalid_observations_are_rejected);
    RUN(invalid_session_options_are_rejected);
    RUN(rows_beyond_the_context_are_rejected);
    RUN(changes_of_a_model_are_checked);
    RUN(any_allocation_can_fail);
    RUN(failed_evals_release_their_pages);
    if (!emulated) RUN(a_forked_child_can_eval);   // qemu's user mode asserts when a process with threads forks
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_model");
}
