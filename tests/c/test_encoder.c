// SPDX-License-Identifier: MIT
// test_encoder.c - encoders: attention to both sides over several chunks, the same bits however texts are computed,
// types, and what an encoder refuses.
#include "common.h"
#include "open_shape.h"

enum { N = 600, SHORT = 70, DIM = 24 };
static float *expected;   // (N, dim): the output norms of a text of several chunks, with the scalar kernels
static const struct tiny_shape *expected_of;   // the shape they belong to

// Computes the texts of `n` sequences at once, sequence i with lengths[i] tokens from token `starts[i]` on. out: the
// output norms of all rows.
static int run_texts(llamac_session *s, int n, const int *starts, const int *lengths, const int32_t *types,
                     float *out) {
    int total = 0, at = 0;
    for (int i = 0; i < n; i++) total += lengths[i];
    llamac_row *rows = take(sizeof *rows * (size_t)total);
    for (int i = 0; i < n; i++)
        for (int p = 0; p < lengths[i]; p++) rows[at++] = (llamac_row){ token_at(0, starts[i] + p, vocab), i, p, 1 };
    const llamac_observation norm = { .stage = LLAMAC_STAGE_OUTPUT_NORM, .out = out };
    const llamac_eval_options options = { .observations = &norm, .n_observations = 1, .types = types };
    const int failed = llamac_eval(s, rows, total, NULL, &options, &err);
    free(rows);
    return failed;
}

static void check_rows_of(const float *found, const float *wanted, int n, const char *what) {
    CHECK(!memcmp(found, wanted, sizeof(float) * (size_t)n * DIM), "%s", what);
}

static void open_encoder(const struct tiny_shape *shape) {
    open_shape(shape);
    if (expected_of == shape) return;
    free(expected);
    expected = take_floats(N, DIM);
    expected_of = shape;
    llamac_session *s = open_session(model, 1, 0, 1, "scalar");
    CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ N }, NULL, expected), "%s", err.message);
    llamac_session_close(&s);
}

static void threads_and_kernel_sets_change_no_bit(const struct tiny_shape *shape) {
    open_encoder(shape);
    float *found = take_floats(N, DIM);
    const int most = up_to_threads(3);
    int supported;
    const char *isa;
    for (size_t i = 0; (isa = llamac_isa_at(i, &supported)); i++)
        for (int threads = sparse && i % 2 ? most : 1; supported && threads <= most; threads += sparser(3)) {
            llamac_session *s = open_session(model, 1, 0, threads, isa);
            CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ N }, NULL, found), "%s", err.message);
            check_rows_of(found, expected, N, isa);
            llamac_session_close(&s);
        }
    free(found);
    close_shape();
}

// A text of one chunk, alone and next to a text of several, whose layers are computed in another way.
static void other_texts_change_no_bit(const struct tiny_shape *shape) {
    open_encoder(shape);
    float *alone = take_floats(SHORT, DIM), *together = take_floats(N + SHORT + 1, DIM);
    llamac_session *s = open_session(model, 3, 0, up_to_threads(2), NULL);
    CHECK(!run_texts(s, 1, (int[]){ 9 }, (int[]){ SHORT }, NULL, alone), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    CHECK(!run_texts(s, 3, (int[]){ 0, 9, 9 }, (int[]){ N, SHORT, 1 }, NULL, together), "%s", err.message);
    check_rows_of(together, expected, N, "the long text");
    check_rows_of(together + N * DIM, alone, SHORT, "the short text");
    CHECK(memcmp(together + (N + SHORT) * DIM, alone, sizeof(float) * DIM), "a token ignores the ones after it");
    CHECK(llamac_length(s, 0) == N && llamac_length(s, 2) == 1, "lengths %d and %d", llamac_length(s, 0),
          llamac_length(s, 2));
    llamac_session_close(&s);
    free(alone), free(together);
    close_shape();
}

static void encoders_change_no_bit(void) {
    const struct tiny_shape *const shapes[] = { &tiny_encoder, &tiny_biased };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        threads_and_kernel_sets_change_no_bit(shapes[i]);
        other_texts_change_no_bit(shapes[i]);
    }
}

static void types_are_added(void) {
    open_encoder(&tiny_encoder);
    float *found = take_floats(3, DIM), *plain = take_floats(3, DIM);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    const int32_t zeros[3] = { 0 }, others[3] = { 0, 0, 2 }, wrong[3] = { 0, 3, 0 };
    CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ 3 }, NULL, plain), "%s", err.message);
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ 3 }, zeros, found), "%s", err.message);
    check_rows_of(found, plain, 3, "types of 0");
    CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
    CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ 3 }, others, found), "%s", err.message);
    CHECK(memcmp(found, plain, sizeof(float) * DIM), "the first token ignores the type of the last");
    CHECK(!llamac_truncate(s, 0, 0, &err) && run_texts(s, 1, (int[]){ 0 }, (int[]){ 3 }, wrong, found) &&
          strstr(err.message, "row 1: type is 3, expected 0 to 2"), "%s", err.message);
    llamac_session_close(&s);
    free(found), free(plain);
    close_shape();
}

static void what_an_encoder_cannot_do_is_refused(void) {
    open_encoder(&tiny_encoder);
    float *found = take_floats(3, DIM), *logits = take_floats(1, vocab);
    llamac_session *s = open_session(model, 1, 0, 1, NULL);
    const llamac_row row = { .token = 1, .want_logits = 1 }, next = { .token = 1, .position = 3 };
    CHECK(llamac_eval(s, &row, 1, logits, NULL, &err) && err.code == LLAMAC_UNSUPPORTED &&
          strstr(err.message, "it only embeds texts (embed)"), "%s", err.message);
    CHECK(!run_texts(s, 1, (int[]){ 0 }, (int[]){ 3 }, NULL, found), "%s", err.message);
    CHECK(llamac_eval(s, &next, 1, NULL, NULL, &err) && strstr(err.message, "computes whole sequences"), "%s",
          err.message);
    const llamac_draft draft = { 1, 0, -1, 0 };
    CHECK(llamac_eval_drafts(s, &draft, 1, NULL, NULL, &err) && err.code == LLAMAC_UNSUPPORTED, "%s", err.message);
    CHECK(llamac_shift(s, 0, 0, 1, &err) && err.code == LLAMAC_UNSUPPORTED, "%s", err.message);
    llamac_session_close(&s);
    free(found), free(logits);
    close_shape();
}

static void cancelled_and_failed_texts_leave_nothing(void) {
    open_encoder(&tiny_encoder);
    llamac_row *rows = take(sizeof *rows * N);
    for (int i = 0; i < N; i++) rows[i] = (llamac_row){ 1, 0, i, 0 };
    llamac_session *s = open_session(model, 1, 0, up_to_threads(2), NULL);
    const int32_t cancel = 1;
    const llamac_eval_options options = { .cancel = &cancel };
    CHECK(llamac_eval(s, rows, N, NULL, &options, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
    CHECK(llamac_length(s, 0) == 0 && llamac_kv_bytes(model) == 0, "length %d", llamac_length(s, 0));
    for (long n = 1, failed = 1; failed && n < 100; n++) {
        llamac_test_fail_allocation(n);
        failed = llamac_eval(s, rows, N, NULL, NULL, &err);
        llamac_test_fail_allocation(0);
        if (failed) CHECK(err.code == LLAMAC_NO_MEMORY && !llamac_length(s, 0), "allocation %ld: %s", n, err.message);
    }
    CHECK(llamac_length(s, 0) == N, "length %d", llamac_length(s, 0));
    llamac_session_close(&s);
    free(rows);
    close_shape();
}

// An eval of several long texts keeps the residual stream of all their rows.
static void memory_limits_count_every_text(void) {
    open_encoder(&tiny_encoder);
    llamac_session *one = open_session(model, 1, 0, 1, NULL), *three = open_session(model, 3, 0, 1, NULL);
    const size_t stream = (size_t)one->context * DIM * sizeof(float);
    CHECK(one->context >= N, "context %d", one->context);
    CHECK(session_scratch_limit(three) >= session_scratch_limit(one) + 2 * stream, "%zu and %zu bytes",
          session_scratch_limit(one), session_scratch_limit(three));
    llamac_session_close(&one), llamac_session_close(&three);
    close_shape();
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(encoders_change_no_bit);
    RUN(types_are_added);
    if (!emulated) {   // what does not depend on the processor
        RUN(what_an_encoder_cannot_do_is_refused);
        RUN(cancelled_and_failed_texts_leave_nothing);
        RUN(memory_limits_count_every_text);
    }
    free(expected);
    return finish_tests("test_encoder");
}
