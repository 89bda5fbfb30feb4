// SPDX-License-Identifier: MIT
// test_changed_file.c - a model whose file changes while it is opened and used: structure is never read again, and
// changed weights give wrong numbers at worst.
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include "common.h"
#include "format.h"
#include "model.h"
#include "tiny_model.h"

static int emulated;   // the programs run in an emulator: some fifty times slower

enum { N = 290 };   // positions: past a block of attention, not a multiple of anything

static int most_threads(int wanted) {
    return llamac_has_threads() ? wanted : 1;
}

static void prefill_whole(llamac_session *s, int sequence, int n, int vocab, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ (i * 37 + i * i) % vocab, sequence, i, 1 };
    CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
    free(rows);
}

// Overwrites everything in a file but tensor data: header, tables, texts and the padding between them.
static void overwrite_structure(struct tiny_file file, int value) {
    const struct header *h = (const struct header *)(const void *)file.data;
    memset(file.data, value, (size_t)h->sections[SECTION_DATA].offset);
}

static void an_open_model_does_not_read_the_files_structure_again(void) {
    const struct tiny_shape *shapes[] = { &tiny_llama, &tiny_experts, &tiny_gpt2, &tiny_q4s };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const size_t bytes = sizeof(float) * (size_t)shapes[i]->vocab * N;
        float *expected = take(bytes), *logits = take(bytes);
        struct tiny_file file = tiny_model(shapes[i]);
        llamac_model *model = open_model(file);
        llamac_session *s = open_session(model, 1, 0, most_threads(2), NULL);
        prefill_whole(s, 0, N, shapes[i]->vocab, expected);
        overwrite_structure(file, i % 2 ? 0xff : 0);
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        prefill_whole(s, 0, N, shapes[i]->vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "model %zu: a session from before the change", i);
        llamac_session_close(&s);
        s = open_session(model, 1, 0, 1, NULL);
        memset(logits, 0, bytes);
        prefill_whole(s, 0, N, shapes[i]->vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "model %zu: a session from after the change", i);
        llamac_session_close(&s);
        CHECK(llamac_model_replace(model, "output_norm.weight", LLAMAC_F32, logits, 4 * (size_t)shapes[i]->dim,
            &err) == 0, "%s", err.message);
        llamac_model_close(&model);
        free(expected), free(logits), free(file.data);
    }
}

struct writer { struct tiny_file file; int32_t end; };

// Switches head_dim between its true value and one that reads and writes out of bounds, as fast as it can.
static void *switch_head_dim(void *argument) {
    struct writer *w = argument;
    const struct header *h = (const struct header *)(const void *)w->file.data;
    struct config *c = (struct config *)(void *)(w->file.data + h->sections[SECTION_CONFIG].offset);
    const uint32_t sound = c->head_dim;
    for (uint32_t i = 0; !__atomic_load_n(&w->end, __ATOMIC_RELAXED); i++)
        __atomic_store_n(&c->head_dim, i % 2 ? 4096 : sound, __ATOMIC_RELAXED);
    return NULL;
}

// What has been checked is what is used: a change between the two must not come through.
static void a_file_that_changes_while_it_is_opened_is_refused_or_computes(void) {
    struct writer w = { .file = tiny_model(&tiny_llama) };
    float logits[101];
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, switch_head_dim, &w) == 0, "thread");
    for (int i = 0; i < (emulated ? 50 : 1000); i++) {
        llamac_model *model;
        if (llamac_model_open(&model, w.file.data, w.file.bytes, &err)) continue;
        CHECK(model->config->head_dim == (uint32_t)tiny_llama.head_dim, "head_dim is %u", model->config->head_dim);
        llamac_session *s = open_session(model, 1, 0, 1, NULL);
        CHECK(!llamac_eval(s, &(llamac_row){ 1, 0, 0, 1 }, 1, logits, NULL, &err), "%s", err.message);
        llamac_session_close(&s);
        llamac_model_close(&model);
    }
    __atomic_store_n(&w.end, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    free(w.file.data);
}

static void *scribble(void *argument) {
    struct writer *w = argument;
    uint64_t state = 3;
    while (!__atomic_load_n(&w->end, __ATOMIC_RELAXED))
        __atomic_store_n(&w->file.data[random_bits(&state) % w->file.bytes], (uint8_t)random_bits(&state),
            __ATOMIC_RELAXED);
    return NULL;
}

// Weights may change, too: that makes wrong numbers, but every index and size comes from elsewhere. For the sanitizers.
static void a_file_that_changes_during_evals_gives_wrong_numbers_at_worst(void) {
    const struct tiny_shape *shapes[] = { &tiny_experts, &tiny_mixed, &tiny_gpt2 };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct writer w = { .file = tiny_model(shapes[i]) };
        const int vocab = shapes[i]->vocab;
        float *logits = take(sizeof(float) * (size_t)(40 * vocab));
        llamac_model *model = open_model(w.file);
        llamac_session *s = open_session(model, 1, 0, most_threads(2), NULL);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, scribble, &w) == 0, "thread");
        for (int round = 0; round < (emulated ? 3 : 30); round++) {
            prefill_whole(s, 0, 40, vocab, logits);
            CHECK(!llamac_eval(s, &(llamac_row){ 1, 0, 40, 1 }, 1, logits, NULL, &err), "%s", err.message);
            CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        }
        __atomic_store_n(&w.end, 1, __ATOMIC_RELAXED);
        pthread_join(thread, NULL);
        llamac_session_close(&s);
        llamac_model_close(&model);
        free(logits), free(w.file.data);
    }
}

int main(int argc, char **argv) {
    emulated = argc > 1 && !strcmp(argv[1], "--emulated");
    RUN(an_open_model_does_not_read_the_files_structure_again);
    RUN(a_file_that_changes_while_it_is_opened_is_refused_or_computes);
    RUN(a_file_that_changes_during_evals_gives_wrong_numbers_at_worst);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_changed_file");
}
