// SPDX-License-Identifier: MIT
// test_shares.c - shares of work: the same bits for any shares, and shares by speed where threads differ in speed.
#include "balance.h"
#include "common.h"
#include "slowed_kernels.h"
#include "tiny_model.h"

enum { N = 290, MAX_THREADS = 4, BATCH = 7 };

// ---- the same bits

// Shares of random sizes, some of them empty. Once in four times they are equal.
static void draw_shares(struct shares *shares, int count, uint64_t *state) {
    shares->count = random_below(state, 4) ? count : 0;
    for (int i = 1; i < count; i++) shares->starts[i] = (uint32_t)random_below(state, SHARE_UNITS + 1);
    for (int i = 1; i < count; i++)   // sorts them
        for (int j = i; j > 1 && shares->starts[j] < shares->starts[j - 1]; j--) {
            const uint32_t swapped = shares->starts[j];
            shares->starts[j] = shares->starts[j - 1], shares->starts[j - 1] = swapped;
        }
    shares->starts[0] = 0, shares->starts[count] = SHARE_UNITS;
}

static void draw_all_shares(llamac_session *s, uint64_t *state) {
    for (int kind = 0; kind < N_RUN_KINDS; kind++) draw_shares(&s->balance[kind].shares, s->threads, state);
}

// Computes N positions of one sequence in chunks of up to max_chunk rows, each with other shares.
static void check_chunks(llamac_session *s, int vocab, int max_chunk, const float *expected, uint64_t *state) {
    float *logits = take_floats(max_chunk, vocab);
    llamac_row *rows = take(sizeof *rows * (size_t)max_chunk);
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    for (int start = 0, n; start < N; start += n) {
        n = min_int(N - start, 1 + random_below(state, max_chunk));
        for (int r = 0; r < n; r++) rows[r] = (llamac_row){ token_at(0, start + r, vocab), 0, start + r, 1 };
        draw_all_shares(s, state);
        CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
        CHECK(!memcmp(logits, expected + start * vocab, sizeof(float) * (size_t)(n * vocab)),
              "%d threads, rows %d to %d", s->threads, start, start + n - 1);
    }
    free(rows), free(logits);
}

// Computes the first positions of several sequences, one row of each at a time, or up to three.
static void check_batches(llamac_session *s, int vocab, const float *expected, uint64_t *state) {
    enum { LENGTH = 24 };
    float *logits = take_floats(3 * BATCH, vocab);
    llamac_row rows[3 * BATCH];
    for (int q = 0; q < BATCH; q++) CHECK(!llamac_truncate(s, q, 0, &err), "%s", err.message);
    for (int start = 0, n; start < LENGTH; start += n) {
        n = 1 + random_below(state, min_int(3, LENGTH - start));
        for (int r = 0; r < n * BATCH; r++)
            rows[r] = (llamac_row){ token_at(0, start + r % n, vocab), r / n, start + r % n, 1 };
        draw_all_shares(s, state);
        CHECK(!llamac_eval(s, rows, n * BATCH, logits, NULL, &err), "%s", err.message);
        for (int r = 0; r < n * BATCH; r++)
            CHECK(!memcmp(logits + r * vocab, expected + (start + r % n) * vocab, sizeof(float) * (size_t)vocab),
                  "%d threads, sequence %d, position %d", s->threads, r / n, start + r % n);
    }
    free(logits);
}

static void check_shape(const struct tiny_shape *shape, int kv_dtype) {
    struct tiny_file file = tiny_model(shape);
    llamac_model *model = open_model(file);
    float *expected = take_floats(N, shape->vocab);
    uint64_t state = 5;
    llamac_session *s = open_session(model, 1, kv_dtype, 1, NULL);
    prefill(s, 0, N, shape->vocab, expected);
    llamac_session_close(&s);
    for (int threads = 2; threads <= up_to_threads(MAX_THREADS); threads++) {
        s = open_session(model, BATCH, kv_dtype, threads, NULL);
        check_chunks(s, shape->vocab, N, expected, &state);
        check_chunks(s, shape->vocab, 9, expected, &state);
        check_batches(s, shape->vocab, expected, &state);
        llamac_session_close(&s);
    }
    free(expected);
    llamac_model_close(&model);
    free(file.data);
}

// Wide enough for hidden numbers and results of attention that threads pack themselves.
static const struct tiny_shape wide = {
    .dim = 256, .n_layers = 2, .n_heads = 8, .n_kv_heads = 4, .head_dim = 32, .ffn_dim = 512, .vocab = 101,
    .context = 400, .dtype = LLAMAC_Q4,
};

static void bits_do_not_depend_on_shares(void) {
    check_shape(&tiny_llama, 0);
    check_shape(&tiny_gpt2, 0);
    check_shape(&tiny_mixed, LLAMAC_Q8);
    check_shape(&tiny_experts, 0);
    check_shape(&tiny_exact, 0);
    check_shape(&tiny_latent, 0);
    check_shape(&wide, 0);
}

// ---- paces and speeds

static void a_product_that_took_far_too_long_is_left_out(void) {
    struct pace pace = { 0 };
    pace_add(&pace, 10, 4000000);
    CHECK(pace_is_known(pace.ns, 1) && !pace_is_known(pace.ns, 2), "known");
    CHECK(pace_take(&pace) == 10 / 4e6 && pace.ns == 0, "the speed");
    CHECK(pace_take(&pace) == 0, "unknown without products");
    pace_add(&pace, 10, 100 * 4000000);
    CHECK(pace.ns == 0, "left out");
    pace_add(&pace, 10, 3 * 4000000);
    CHECK(pace.ns == 3 * 4000000, "slower, but counted");
    int products = 0;
    for (const int64_t before = pace.ns; pace.ns == before && products < 100; products++)
        pace_add(&pace, 10, 100 * 4000000);
    CHECK(products > 10 && products < 20, "a thread that stays slow is believed after %d products", products);
}

static int units(const struct shares *s, int i) { return (int)(s->starts[i + 1] - s->starts[i]); }

static void shares_follow_speeds(void) {
    struct balance b = { 0 };
    for (int i = 0; i < 20; i++) balance_update(&b, (const double[]){ 2, 2, 1, 1 }, 4);
    CHECK(b.shares.count == 4 && b.shares.starts[0] == 0 && b.shares.starts[4] == SHARE_UNITS, "four shares");
    for (int i = 0; i < 4; i++)
        CHECK(abs(units(&b.shares, i) * 6 - SHARE_UNITS * (i < 2 ? 2 : 1)) < 60, "share %d: %d", i,
              units(&b.shares, i));
    balance_update(&b, (const double[]){ 1, 0, 0, 0 }, 4);
    CHECK(b.shares.count == 4, "unknown speeds stay as they are");
    for (int i = 0; i < 20; i++) balance_update(&b, (const double[]){ 2, 2, 1.9, 2 }, 4);
    CHECK(b.shares.count == 0, "equal again");
    balance_update(&b, (const double[]){ 2, 1 }, 2);
    CHECK(b.shares.count == 2, "another team starts anew");
    for (int i = 0; i < 50; i++) balance_update(&b, (const double[]){ 1e9, 1 }, 2);
    CHECK(units(&b.shares, 1) > SHARE_UNITS / 100, "no share is empty: %d", units(&b.shares, 1));
}

static void noise_does_not_make_shares_unequal(void) {
    struct balance b = { 0 };
    uint64_t state = 3;
    for (int i = 0; i < 1000; i++) {
        const double speeds[] = { 1 + 0.09 * random_float(&state), 1 + 0.09 * random_float(&state) };
        balance_update(&b, speeds, 2);
        CHECK(b.shares.count == 0, "update %d", i);
    }
}

// ---- a slow thread

static void a_slow_thread_gets_less_work(void) {
    if (!llamac_has_threads()) return;
    struct tiny_file file = tiny_model(&wide);
    llamac_model *model = open_model(file);
    const size_t bytes = sizeof(float) * (size_t)(N * wide.vocab);
    float *expected = take(bytes), *logits = take(bytes);
    llamac_session *s = open_session(model, 1, 0, 2, NULL);
    prefill(s, 0, N, wide.vocab, expected);
    slowed.times[1] = 6;
    slow_session(s);
    const struct shares *shares = &s->balance[RUN_MANY_ROWS].shares;
    for (int i = 0; i < 200 && !(shares->count && units(shares, 1) < SHARE_UNITS / 3); i++) {
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        prefill(s, 0, N, wide.vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "prefill %d", i);
    }
    CHECK(shares->count == 2 && units(shares, 1) < SHARE_UNITS / 3, "the slow thread's share is %d", units(shares, 1));
    llamac_session_close(&s);
    free(logits), free(expected);
    llamac_model_close(&model);
    free(file.data);
}

// ---- new scratch

// Allocators return memory with any bytes in it.
static void new_scratch_is_cleared(void) {
    struct tiny_file file = tiny_model(&tiny_experts);
    llamac_model *model = open_model(file);
    float *expected = take_floats(N, tiny_experts.vocab), *logits = take_floats(N, tiny_experts.vocab);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    prefill(s, 0, N, tiny_experts.vocab, expected);
    llamac_session_close(&s);
    for (int threads = 1; threads <= up_to_threads(3); threads++) {
        s = open_session(model, 1, 0, threads, NULL);
        CHECK(!session_reserve_rows(s, CHUNK_ROWS, N, &err), "%s", err.message);
        CHECK(!s->scratch.is_cleared, "cleared by the thread that reserves it");
        memset(s->scratch.memory, 0xff, s->scratch_bytes);
        prefill(s, 0, N, tiny_experts.vocab, logits);
        CHECK(s->scratch.is_cleared, "not cleared");
        CHECK(!memcmp(logits, expected, sizeof(float) * (size_t)(N * tiny_experts.vocab)), "%d threads", threads);
        const struct scratch *x = &s->scratch;
        size_t bytes = x->shared_bytes;
        for (int t = 0; t < x->n_threads; t++) bytes += x->threads[t].bytes;
        CHECK(bytes == s->scratch_bytes, "the pieces have %zu of %zu bytes", bytes, s->scratch_bytes);
        llamac_session_close(&s);
    }
    free(logits), free(expected);
    llamac_model_close(&model);
    free(file.data);
}

int main(void) {
    RUN(bits_do_not_depend_on_shares);
    RUN(a_product_that_took_far_too_long_is_left_out);
    RUN(shares_follow_speeds);
    RUN(noise_does_not_make_shares_unequal);
    RUN(a_slow_thread_gets_less_work);
    RUN(new_scratch_is_cleared);
    return finish_tests("test_shares");
}
