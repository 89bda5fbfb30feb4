// SPDX-License-Identifier: MIT
// test_model.c - the core as a whole: the same bits however an input is computed, every allocation that can fail,
// cancelling, observing.
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "common.h"
#include "kv_pages.h"
#include "model.h"
#include "pool.h"
#include "tiny_model.h"

static int emulated;   // the programs run in an emulator: some fifty times slower, and without fork

// As many threads as are wanted, or 1 if this build has no others.
static int most_threads(int wanted) {
    return llamac_has_threads() ? wanted : 1;
}

static int token_at(int sequence, int position,
    int vocab) { return (position * 37 + sequence * 11 + position * position) % vocab; }

// ---- the same bits

enum { N = 290 };   // positions: past a block of attention, no multiple of anything

static void prefill_whole(llamac_session *s, int sequence, int n, int vocab, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ token_at(sequence, i, vocab), sequence, i, 1 };
    CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
    free(rows);
}

static void check_same_bits(const struct tiny_shape *shape, int kv) {
    struct tiny_file file = tiny_model(shape);
    llamac_model *model = open_model(file);
    const size_t vocab = (size_t)shape->vocab;
    float *expected = take(sizeof(float) * vocab * N), *logits = take(sizeof(float) * vocab * N);
    llamac_session *s = open_session(model, 1, kv, 1, "scalar");
    prefill_whole(s, 0, N, shape->vocab, expected);
    for (size_t i = 0; i < vocab * N; i++) CHECK(isfinite(expected[i]), "logit %zu", i);
    llamac_session_close(&s);
    int supported;
    uint64_t state = 9;
    for (size_t i = 0; llamac_isa_at(i, &supported); i++) {
        if (!supported) continue;
        const char *isa = llamac_isa_at(i, &supported);
        for (int threads = 1; threads <= most_threads(emulated ? 2 : 3); threads++) {
            s = open_session(model, 1, kv, threads, isa);
            prefill_whole(s, 0, N, shape->vocab, logits);
            CHECK(!memcmp(logits, expected, sizeof(float) * vocab * N), "%s, %d threads, one prefill", isa, threads);
            CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
            for (int at = 0; at < N;) {   // chunks of random sizes, some of one token
                const int n = min_int(N - at, threads == 1 ? 1 : 1 + random_below(&state, 50));
                llamac_row rows[64];
                for (int r = 0; r < n; r++) rows[r] = (llamac_row){ token_at(0, at + r, shape->vocab), 0, at + r, 1 };
                CHECK(!llamac_eval(s, rows, n, logits + (size_t)at * vocab, NULL, &err), "%s", err.message);
                at += n;
            }
            CHECK(!memcmp(logits, expected, sizeof(float) * vocab * N), "%s, %d threads, in chunks", isa, threads);
            llamac_session_close(&s);
        }
    }
    free(logits), free(expected);
    llamac_model_close(&model);
    free(file.data);
}

static void bits_do_not_depend_on_threads_chunks_or_isa(void) {
    check_same_bits(&tiny_llama, LLAMAC_F16);
    check_same_bits(&tiny_gpt2, 0);
    check_same_bits(&tiny_mixed, 0);
    if (emulated) return;
    check_same_bits(&tiny_experts, 0);
    check_same_bits(&tiny_experts, LLAMAC_F32);
    check_same_bits(&tiny_q8, 0);
    check_same_bits(&tiny_q4, 0);
    check_same_bits(&tiny_q4s, 0);
    check_same_bits(&tiny_llama, LLAMAC_F32);
    struct tiny_shape f16 = tiny_llama;
    f16.dtype = LLAMAC_F16, f16.tied = 1, f16.biases = 0;
    check_same_bits(&f16, 0);
}

// What every machine must compute: SHA-256 of the logits of N positions. A change that moves these bits raises
// FORMAT_NUMERICS.
static void logits_have_the_recorded_bits(void) {
    const struct { const struct tiny_shape *shape; int kv; const char *sha256; } recorded[] = {
        { &tiny_llama, LLAMAC_F32, "b2b9a73e9fffea128047bdd033a5a5c70b87a0416a7244757d63bc0d8ffef468" },
            { &tiny_llama, LLAMAC_F16, "557a3b4ea50e4f4a9bc2b5fc87332c2a3de9529a87d3a6a2ee0a2ed466c94272" },
            { &tiny_gpt2, LLAMAC_F16, "37e774927f70a30ec4c836f3af93a3340760ed39eeec311fbf329358f4ac6200" },
        { &tiny_mixed, LLAMAC_F16, "48d9f0b51eb0098ac520702cd15b32f751a641209da77e5d79ddb07c5cf2688b" },
        { &tiny_q8, LLAMAC_F16, "bea9c5c7f67f21331499266f1f319bbff71cebf1a0a608449a4f27c67a2155e6" },
        { &tiny_q4, LLAMAC_F16, "5c6f2a8fbbc02819dcebde35b395e634230d41ad9713ec650a51add0d7ea1ade" },
        { &tiny_experts, LLAMAC_F16, "b7719035790b3aba60edee3674a2c504c02c486f16787bc357a3bca8709b3f4f" },
        { &tiny_q4s, LLAMAC_F16, "b85f2e60f49f48a30b39d0c076552c68539edbe91bab68e891de9666bd075212" },
    };
    for (size_t i = 0; i < ARRAY_LEN(recorded); i++) {
        struct tiny_file file = tiny_model(recorded[i].shape);
        llamac_model *model = open_model(file);
        llamac_session *s = open_session(model, 1, recorded[i].kv, 1, NULL);
        const size_t floats = (size_t)recorded[i].shape->vocab * N;
        float *logits = take(sizeof(float) * floats);
        uint8_t digest[HASH_BYTES];
        char text[2 * HASH_BYTES + 1];
        prefill_whole(s, 0, N, recorded[i].shape->vocab, logits);
        hash(logits, sizeof(float) * floats, digest);
        for (int b = 0; b < HASH_BYTES; b++) snprintf(text + 2 * b, 3, "%02x", digest[b]);
        CHECK(!strcmp(text, recorded[i].sha256), "model %zu: %s", i, text);
        llamac_session_close(&s);
        free(logits);
        llamac_model_close(&model);
        free(file.data);
    }
}

static void bits_do_not_depend_on_neighbours(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    enum { S = 4, L = 45 };
    const int vocab = tiny_llama.vocab;
    float *alone = take(sizeof(float) * (size_t)(S * L * vocab)), *row = take(sizeof(float) * (size_t)(64 * vocab));
    for (int q = 0; q < S; q++) {
        llamac_session *s = open_session(model, S, 0, 1, NULL);
        prefill_whole(s, q, L, vocab, alone + q * L * vocab);
        llamac_session_close(&s);
    }
    uint64_t state = 4;
    for (int threads = 1; threads <= most_threads(3); threads++) {
        llamac_session *s = open_session(model, S, 0, threads, NULL);
        int length[S] = { 0 };
        for (int round = 0; round < 60; round++) {   // rows of all sequences, mixed at random
            llamac_row rows[64];
            int n = 1 + random_below(&state, 40), kept = 0;
            for (int r = 0; r < n; r++) {
                const int q = random_below(&state, S);
                if (length[q] == L) continue;
                rows[kept++] = (llamac_row){ token_at(q, length[q], vocab), q, length[q], 1 };
                length[q]++;
            }
            CHECK(!llamac_eval(s, rows, kept, row, NULL, &err), "%s", err.message);
            for (int r = 0; r < kept; r++)
                CHECK(!memcmp(row + r * vocab, alone + (rows[r].sequence * L + rows[r].position) * vocab,
                    sizeof(float) * (size_t)vocab), "sequence %d, position %d", rows[r].sequence, rows[r].position);
        }
        llamac_session_close(&s);
    }
    free(alone), free(row);
    llamac_model_close(&model);
    free(file.data);
}

static void bits_do_not_depend_on_the_hosts_control_word(void) {
    struct tiny_file file = tiny_model(&tiny_gpt2);
    llamac_model *model = open_model(file);
    const size_t bytes = sizeof(float) * (size_t)(tiny_gpt2.vocab * 20);
    float *expected = take(bytes), *logits = take(bytes);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    prefill_whole(s, 0, 20, tiny_gpt2.vocab, expected);
    llamac_session_close(&s);
    for (int threads = 1; threads <= most_threads(2); threads++) {
        s = open_session(model, 1, 0, threads, NULL);
        fesetround(FE_UPWARD);
#if defined(__x86_64__)
        const unsigned host = _mm_getcsr() | 0x8040;   // flush to zero, denormals are zero
        _mm_setcsr(host);
#endif
        prefill_whole(s, 0, 20, tiny_gpt2.vocab, logits);
#if defined(__x86_64__)
        CHECK((_mm_getcsr() & 0xffc0) == (host & 0xffc0), "the host's control word is put back");
        _mm_setcsr(0x1f80);
#endif
        CHECK(fegetround() == FE_UPWARD || threads, "rounding");
        fesetround(FE_TONEAREST);
        CHECK(!memcmp(logits, expected, bytes), "%d threads", threads);
        llamac_session_close(&s);
    }
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

static void a_rewound_session_continues_as_a_fresh_one(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    const size_t vocab = (size_t)tiny_llama.vocab;
    float *expected = take(sizeof(float) * vocab * N), *logits = take(sizeof(float) * vocab);
    prefill_whole(s, 0, N, tiny_llama.vocab, expected);
    llamac_session_info info;
    llamac_session_describe(s, &info);
    const size_t full = info.kv_bytes;
    const int places[] = { 289, 256, 255, 130, 64, 63, 1, 0 };
    for (size_t i = 0; i < ARRAY_LEN(places); i++) {
        const int p = places[i];
        CHECK(!llamac_truncate(s, 0, p, &err) && llamac_length(s, 0) == p, "%s", err.message);
        const llamac_row row = { token_at(0, p, tiny_llama.vocab), 0, p, 1 };
        CHECK(!llamac_eval(s, &row, 1, logits, NULL, &err), "%s", err.message);
        CHECK(!memcmp(logits, expected + (size_t)p * vocab, sizeof(float) * vocab), "position %d", p);
    }
    llamac_session_describe(s, &info);
    CHECK(info.kv_bytes < full, "pages are given back");
    CHECK(llamac_truncate(s, 0, 2, &err) && err.code == LLAMAC_BAD_ARGUMENT, "forward");
    CHECK(llamac_truncate(s, 1, 0, &err) && err.code == LLAMAC_BAD_ARGUMENT, "no such sequence");
    llamac_session_close(&s);
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

// ---- observing

static void observers_change_nothing(void) {
    const struct tiny_shape *shapes[] = { &tiny_llama, &tiny_gpt2 };
    for (size_t which = 0; which < 2; which++) {
        struct tiny_file file = tiny_model(shapes[which]);
        llamac_model *model = open_model(file);
        const size_t vocab = (size_t)shapes[which]->vocab;
        enum { ROWS = 270 };
        float *expected = take(sizeof(float) * vocab * ROWS), *logits = take(sizeof(float) * vocab * ROWS);
        float *seen[LLAMAC_N_STAGES], *again[LLAMAC_N_STAGES] = { NULL };
        llamac_row rows[ROWS];
        for (int i = 0; i < ROWS; i++) rows[i] = (llamac_row){ token_at(0, i, (int)vocab), 0, i, 1 };
        for (int threads = 1; threads <= most_threads(2); threads++) {
            llamac_session *s = open_session(model, 1, 0, threads, NULL);
            CHECK(!llamac_eval(s, rows, ROWS, expected, NULL, &err), "%s", err.message);
            CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
            llamac_observation requests[LLAMAC_N_STAGES];
            size_t widths[LLAMAC_N_STAGES];
            for (int g = 0; g < LLAMAC_N_STAGES; g++) {
                int per_layer;
                widths[g] = llamac_stage_width(s, g, &per_layer);
                float *out = take(sizeof(float) * widths[g] * ROWS);
                requests[g] = (llamac_observation){ g, per_layer, out };
                *(threads == 1 ? &seen[g] : &again[g]) = out;
            }
            const llamac_eval_options options = { .observations = requests, .n_observations = LLAMAC_N_STAGES };
            CHECK(!llamac_eval(s, rows, ROWS, logits, &options, &err), "%s", err.message);
            CHECK(!memcmp(logits, expected, sizeof(float) * vocab * ROWS), "observed logits differ with %d threads",
                threads);
            CHECK(!memcmp(threads == 1 ? seen[LLAMAC_STAGE_LOGITS] : again[LLAMAC_STAGE_LOGITS], expected,
                sizeof(float) * vocab * ROWS), "the stage logits");
            if (threads == 2)
                for (int g = 0; g < LLAMAC_N_STAGES; g++) CHECK(!memcmp(seen[g], again[g],
                    sizeof(float) * widths[g] * ROWS), "stage %s", llamac_stage_name(g));
            llamac_session_close(&s);
        }
        const float *scores = seen[LLAMAC_STAGE_SCORES];
        for (int r = 0; r < ROWS; r += 30)
            for (int p = 0; p < shapes[which]->context; p++)
                CHECK(p <= r ? isfinite(scores[(size_t)(r * shapes[which]->n_heads * shapes[which]->context + p)])
                    : scores[(size_t)(r * shapes[which]->n_heads * shapes[which]->context + p)] == -INFINITY,
                      "score of row %d at %d", r, p);
        for (int g = 0; g < LLAMAC_N_STAGES; g++) free(seen[g]), free(again[g]);
        free(expected), free(logits);
        llamac_model_close(&model);
        free(file.data);
    }
}

// ---- refusing

static void bad_rows_change_nothing(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    float logits[101];
    const struct { llamac_row rows[2]; int n; enum llamac_code code; } bad[] = {
        { { { -1, 0, 0, 0 } }, 1, LLAMAC_BAD_ARGUMENT }, { { { 101, 0, 0, 0 } }, 1, LLAMAC_BAD_ARGUMENT },
            { { { 1, 2, 0, 0 } }, 1, LLAMAC_BAD_ARGUMENT },
        { { { 1, -1, 0, 0 } }, 1, LLAMAC_BAD_ARGUMENT }, { { { 1, 0, 1, 0 } }, 1, LLAMAC_BAD_ARGUMENT },
            { { { 1, 0, 0, 0 }, { 1, 0, 2, 0 } }, 2, LLAMAC_BAD_ARGUMENT },
        { { { 1, 0, 0, 0 } }, -1, LLAMAC_BAD_ARGUMENT },
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        CHECK(llamac_eval(s, bad[i].rows, bad[i].n, logits, NULL, &err) < 0 && err.code == (int)bad[i].code,
            "row %zu: %s", i, err.message);
        CHECK(llamac_length(s, 0) == 0, "length");
    }
    CHECK(llamac_eval(s, &(llamac_row){ 1, 0, 0, 1 }, 1, NULL, NULL, &err), "no buffer");
    const llamac_observation nothing = { LLAMAC_STAGE_Q, 3, logits }, nowhere = { LLAMAC_STAGE_Q, 0, NULL },
        unknown = { 99, 0, logits };
    const llamac_observation *requests[] = { &nothing, &nowhere, &unknown };
    for (int i = 0; i < 3; i++) {
        const llamac_eval_options o = { .observations = requests[i], .n_observations = 1 };
        CHECK(llamac_eval(s, &(llamac_row){ 1, 0, 0, 1 }, 1, logits, &o, &err) && err.code == LLAMAC_BAD_ARGUMENT,
            "observation %d", i);
    }
    float numbers[60];
    const llamac_observation twice[] = { { LLAMAC_STAGE_Q, 1, numbers }, { LLAMAC_STAGE_Q, 0, numbers },
        { LLAMAC_STAGE_Q, 1, numbers } };
    // not of a layer
    const llamac_observation again[] = { { LLAMAC_STAGE_LOGITS, 0, logits }, { LLAMAC_STAGE_LOGITS, 1, logits } };
    const llamac_eval_options doubled[] = { { .observations = twice, .n_observations = 3 },
        { .observations = again, .n_observations = 2 } };
    for (int i = 0; i < 2; i++) {
        CHECK(llamac_eval(s, &(llamac_row){ 1, 0, 0, 1 }, 1, logits, &doubled[i], &err)
            && err.code == LLAMAC_BAD_ARGUMENT, "doubled %d", i);
        CHECK(strstr(err.message, i ? "observation 1" : "observation 2")
            && strstr(err.message, i ? "logits" : "stage q of layer 1"), "%s", err.message);
    }
    llamac_session_close(&s);
    const llamac_session_options options[] = {
        { .n_sequences = 0, .threads = 1 }, { .n_sequences = 1, .threads = 0 },
            { .n_sequences = 1, .threads = 1, .context = 401 },
        { .n_sequences = 1, .threads = 1, .context = -1 }, { .n_sequences = 1, .threads = 1, .kv_dtype = LLAMAC_BF16 },
            { .n_sequences = 1, .threads = 1, .isa = "none" },
    };
    for (size_t i = 0; i < ARRAY_LEN(options); i++) CHECK(llamac_session_open(&s, model, &options[i], &err) && !s,
        "options %zu", i);
    const llamac_session_options small = { .n_sequences = 1, .threads = 1, .context = 3 };
    CHECK(!llamac_session_open(&s, model, &small, &err), "%s", err.message);
    llamac_row rows[4];
    for (int i = 0; i < 4; i++) rows[i] = (llamac_row){ 1, 0, i, 0 };
    CHECK(llamac_eval(s, rows, 4, NULL, NULL, &err) && err.code == LLAMAC_CONTEXT_FULL && llamac_length(s, 0) == 0,
        "%s", err.message);
    CHECK(!llamac_eval(s, rows, 3, NULL, NULL, &err) && llamac_length(s, 0) == 3, "%s", err.message);
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// ---- memory, cancelling, forks

static void every_allocation_may_fail(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    const long objects = llamac_live_objects();
    int failed = 1;
    for (long n = 1; failed && n < 100; n++) {
        llamac_model *model = NULL;
        llamac_session *s = NULL;
        float logits[101];
        llamac_row rows[80];
        for (int i = 0; i < 80; i++) rows[i] = (llamac_row){ 1, 0, i, i == 79 };
        const llamac_session_options options = { .n_sequences = 2, .threads = 1 };
        llamac_test_fail_allocation(n);
        failed = llamac_model_open(&model, file.data, file.bytes, &err)
            || llamac_session_open(&s, model, &options, &err)
              || llamac_eval(s, rows, 80, logits, NULL, &err);
        llamac_test_fail_allocation(0);
        if (failed) CHECK(err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        if (s && failed) CHECK(llamac_length(s, 0) == 0 && !llamac_eval(s, rows, 80, logits, NULL, &err),
            "usable after a failure: %s", err.message);
        llamac_session_close(&s);
        llamac_model_close(&model);
        CHECK(llamac_live_objects() == objects, "objects leak at allocation %ld", n);
    }
    CHECK(!failed, "all allocations were tried");
    free(file.data);
}

static void a_cancel_keeps_whole_chunks(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    for (int threads = 1; threads <= most_threads(2); threads++) {
        llamac_session *s = open_session(model, 1, 0, threads, NULL);
        const int32_t stop = 1;
        int done = -1;
        const llamac_eval_options options = { .cancel = &stop, .rows_done = &done };
        const llamac_row row = { 1, 0, 0, 0 };
        CHECK(llamac_eval(s, &row, 1, NULL, &options, &err) && err.code == LLAMAC_CANCELLED && done == 0
            && llamac_length(s, 0) == 0, "%s", err.message);
        CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err) && llamac_length(s, 0) == 1, "%s", err.message);
        llamac_session_close(&s);
    }
    llamac_model_close(&model);
    free(file.data);
}

struct holding { int32_t begun, cancel, end; };

// Another caller's turn: it lasts until the eval below has been cancelled and has returned.
static void hold_the_turn(void *argument, const struct member *member) {
    struct holding *h = argument;
    const struct timespec pause = { .tv_nsec = 20000000 };
    if (member->index) return;
    __atomic_store_n(&h->begun, 1, __ATOMIC_RELAXED);
    nanosleep(&pause, NULL);   // by now the eval waits
    __atomic_store_n(&h->cancel, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&h->end, __ATOMIC_RELAXED)) nanosleep(&pause, NULL);
}

static void *hold(void *holding) {
    struct contention c = { 0 };
    pool_run(2, &c, NULL, hold_the_turn, holding);
    return NULL;
}

static void an_eval_that_waits_for_its_turn_can_be_cancelled(void) {
    if (!llamac_has_threads()) return;
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 2, NULL);
    struct holding holding = { 0 };
    const llamac_eval_options options = { .cancel = &holding.cancel };
    const llamac_row row = { 1, 0, 0, 0 };
    pthread_t holder;
    alarm(100);   // a hang is a failure
    CHECK(pthread_create(&holder, NULL, hold, &holding) == 0, "holder");
    while (!__atomic_load_n(&holding.begun, __ATOMIC_RELAXED)) sched_yield();
    CHECK(llamac_eval(s, &row, 1, NULL, &options, &err) < 0 && err.code == LLAMAC_CANCELLED
        && llamac_length(s, 0) == 0, "%s", err.message);
    __atomic_store_n(&holding.end, 1, __ATOMIC_RELAXED);
    pthread_join(holder, NULL);
    alarm(0);
    CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err) && llamac_length(s, 0) == 1, "%s", err.message);
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// Pages of positions that were not computed are given back.
static void failed_evals_hold_no_pages(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 2, 0, 1, NULL);
    llamac_session_info before, after;
    llamac_row rows[400];
    const int32_t stop = 1;
    const llamac_eval_options cancelling = { .cancel = &stop };
    float *logits = take(sizeof(float) * 5 * 101);
    prefill_whole(s, 1, 5, 101, logits);
    free(logits);
    llamac_session_describe(s, &before);
    for (int i = 0; i < 400; i++) rows[i] = (llamac_row){ 1, i % 2, i / 2 + (i % 2 ? 5 : 0), 0 };
    CHECK(llamac_eval(s, rows, 390, NULL, &cancelling, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
    llamac_session_describe(s, &after);
    CHECK(after.kv_bytes == before.kv_bytes, "%zu bytes, then %zu", before.kv_bytes, after.kv_bytes);
    CHECK(!llamac_eval(s, rows, 300, NULL, NULL, &err), "%s", err.message);   // activations are there now
    CHECK(!llamac_truncate(s, 0, 0, &err) && !llamac_truncate(s, 1, 0, &err), "%s", err.message);
    llamac_session_describe(s, &after);
    CHECK(after.kv_bytes == 0, "%zu bytes of no positions", after.kv_bytes);
    llamac_test_fail_allocation(1 + 1);   // the lengths, a slab
    CHECK(llamac_eval(s, rows, 1, NULL, NULL, &err) && err.code == LLAMAC_NO_MEMORY && strstr(err.message, "page"),
        "%s", err.message);
    llamac_test_fail_allocation(0);
    llamac_session_describe(s, &after);
    CHECK(after.kv_bytes == 0, "%zu bytes of no positions", after.kv_bytes);
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// Pages of several slabs, taken and given back in any order: each zeroed, none twice, all memory back at the end.
static void kv_pages_are_cut_from_slabs(void) {
    enum { MOST = 40, PAGE = 2 << 20 };   // four to a slab
    struct kv_pages pages = kv_pages_of(PAGE, MOST);
    CHECK(pages.per_slab == 4, "%d pages to a slab", pages.per_slab);
    CHECK(kv_pages_of(PAGE, 1).per_slab == 1 && kv_pages_of((size_t)1 << 30, MOST).per_slab == 1,
        "at least one page, no more than there can be");
    uint8_t *taken[MOST] = { 0 };
    uint64_t state = 1;
    for (int i = 0; i < 400; i++) {
        const int place = random_below(&state, MOST / 4);
        if (taken[place]) {
            CHECK(taken[place][0] == place && taken[place][PAGE - 1] == place, "page %d was given out twice", place);
            kv_page_give(&pages, taken[place]);
            taken[place] = NULL;
            continue;
        }
        llamac_test_fail_allocation(i % 5 ? 0 : 1);
        taken[place] = kv_page_take(&pages, &err);
        llamac_test_fail_allocation(0);
        if (!taken[place]) continue;
        CHECK(taken[place][0] == 0 && taken[place][PAGE - 1] == 0 && (uintptr_t)taken[place] % 64 == 0,
            "a page is not zeroed, or not aligned");
        taken[place][0] = taken[place][PAGE - 1] = (uint8_t)place;
    }
    for (int i = 0; i < MOST; i++) if (taken[i]) kv_page_give(&pages, taken[i]);
    CHECK(!pages.slabs, "a slab without pages is kept");
}

static void a_forked_child_can_eval(void) {
    if (!llamac_has_threads()) return;
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 2, NULL);
    const size_t bytes = sizeof(float) * 101 * 40;
    float *expected = take(bytes), *logits = take(bytes);
    prefill_whole(s, 0, 40, 101, expected);
    for (int i = 0; i < 3; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(100);   // a hang is a failure; emulators are slow
            llamac_truncate(s, 0, 0, &err);
            prefill_whole(s, 0, 40, 101, logits);
            _exit(memcmp(logits, expected, bytes) != 0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
            "child ended with %d", status);
    }
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    prefill_whole(s, 0, 40, 101, logits);
    CHECK(!memcmp(logits, expected, bytes), "the parent goes on");
    llamac_session_close(&s);
    free(expected), free(logits);
    llamac_model_close(&model);
    free(file.data);
}

int main(int argc, char **argv) {
    emulated = argc > 1 && !strcmp(argv[1], "--emulated");
    RUN(bits_do_not_depend_on_threads_chunks_or_isa);
    RUN(logits_have_the_recorded_bits);
    RUN(bits_do_not_depend_on_neighbours);
    RUN(bits_do_not_depend_on_the_hosts_control_word);
    RUN(a_rewound_session_continues_as_a_fresh_one);
    RUN(observers_change_nothing);
    RUN(bad_rows_change_nothing);
    RUN(every_allocation_may_fail);
    RUN(a_cancel_keeps_whole_chunks);
    RUN(an_eval_that_waits_for_its_turn_can_be_cancelled);
    RUN(failed_evals_hold_no_pages);
    RUN(kv_pages_are_cut_from_slabs);
    if (!emulated) RUN(a_forked_child_can_eval);   // qemu's user emulation asserts when a process with threads forks
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_model");
}
