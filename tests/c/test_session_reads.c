// SPDX-License-Identifier: MIT
// test_session_reads.c - a session can be asked for its state while another thread computes, and sessions share the
// team. ThreadSanitizer reports unsynchronized accesses.
#include <pthread.h>
#include "tiny_model.h"


struct reader {
    llamac_session *session;
    int stop, errors;
};

static void *read_state(void *argument) {
    struct reader *r = argument;
    llamac_session_info info;
    while (!__atomic_load_n(&r->stop, __ATOMIC_RELAXED)) {
        const int length = llamac_length(r->session, 0);
        llamac_session_describe(r->session, &info);
        r->errors += length < 0 || length > tiny_llama.context || info.scratch_bytes == 0;
    }
    return NULL;
}

static void lengths_and_sizes_can_be_read_during_evals(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    struct reader r = { .session = open_session(model, 1, 0, 1, NULL) };
    float *logits = take_floats(40, tiny_llama.vocab);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, read_state, &r) == 0, "thread");
    for (int round = 0; round < (emulated ? 3 : 30); round++) {
        for (int position = 0; position < 3; position++)
            CHECK(!llamac_eval(r.session, &(llamac_row){ 1, 0, position, 1 }, 1, logits, NULL, &err), "%s",
                err.message);
        CHECK(!llamac_truncate(r.session, 0, 0, &err), "%s", err.message);
        prefill(r.session, 0, 40, tiny_llama.vocab, logits);   // more scratch and pages
        CHECK(!llamac_truncate(r.session, 0, 0, &err), "%s", err.message);
    }
    __atomic_store_n(&r.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    CHECK(!r.errors, "%d wrong answers", r.errors);
    llamac_session_close(&r.session);
    llamac_model_close(&model);
    free(logits), free(file.data);
}

struct decoder { llamac_session *session; float *logits; int rounds, wrong; };

// Decodes 3 tokens after 300, again and again. The logits of the first round are right.
static void *decode_often(void *argument) {
    struct decoder *d = argument;
    const size_t row = (size_t)tiny_llama.vocab;
    for (int round = 0; round < d->rounds; round++) {
        llamac_error problem;
        float *logits = d->logits + (round ? 3 * row : 0);
        for (int i = 0; i < 3; i++)
            d->wrong += llamac_eval(d->session, &(llamac_row){ 1, 0, 300 + i, 1 }, 1, logits + (size_t)i * row, NULL,
                                    &problem) != 0;
        d->wrong += memcmp(logits, d->logits, 3 * row * sizeof *logits) != 0;
        d->wrong += llamac_truncate(d->session, 0, 300, &problem) != 0;
    }
    return NULL;
}

static void short_evals_share_the_team_with_long_ones(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    const size_t row = (size_t)tiny_llama.vocab;
    // 3 members split the positions that 2 KV heads attend to
    struct decoder d = { .session = open_session(model, 1, 0, up_to_threads(3), NULL),
                         .logits = take_floats(6, tiny_llama.vocab) };
    llamac_session *long_one = open_session(model, 1, 0, up_to_threads(2), NULL);
    float *logits = take_floats(300, tiny_llama.vocab), *expected = take_floats(300, tiny_llama.vocab);
    prefill(d.session, 0, 300, tiny_llama.vocab, expected);
    d.rounds = 1;
    decode_often(&d);
    d.rounds = emulated ? 5 : 60;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, decode_often, &d) == 0, "thread");
    for (int round = 0; round < (emulated ? 1 : 6); round++) {
        prefill(long_one, 0, 300, tiny_llama.vocab, logits);
        CHECK(!memcmp(logits, expected, 300 * row * sizeof *logits), "round %d: other logits", round);
        CHECK(!llamac_truncate(long_one, 0, 0, &err), "%s", err.message);
    }
    pthread_join(thread, NULL);
    CHECK(!d.wrong, "%d wrong results", d.wrong);
    llamac_session_close(&long_one);
    llamac_session_close(&d.session);
    llamac_model_close(&model);
    free(logits), free(expected), free(d.logits), free(file.data);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(lengths_and_sizes_can_be_read_during_evals);
    RUN(short_evals_share_the_team_with_long_ones);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_session_reads");
}
