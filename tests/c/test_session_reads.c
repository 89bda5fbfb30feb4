// SPDX-License-Identifier: MIT
// test_session_reads.c - a session can be asked for its state while another thread computes. ThreadSanitizer reports
// unsynchronized reads.
#include <pthread.h>
#include "tiny_model.h"

static int emulated;

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

int main(int argc, char **argv) {
    emulated = argc > 1 && !strcmp(argv[1], "--emulated");
    RUN(lengths_and_sizes_can_be_read_during_evals);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_session_reads");
}
