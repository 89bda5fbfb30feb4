// SPDX-License-Identifier: MIT
// test_changed_file.c - a file that changes while a model is opened from it and used. The core reads the structure
// once; changed weights give wrong numbers at worst.
#include <pthread.h>
#include "common.h"
#include "format.h"
#include "model.h"
#include "tiny_model.h"


enum { N = 290 };   // positions: more than a block of attention, and not a multiple of any tile

// Overwrites everything but the tensors' data: header, tables, texts and padding.
static void overwrite_structure(struct tiny_file file, int value) {
    const struct header *h = (const struct header *)(const void *)file.data;
    memset(file.data, value, (size_t)h->sections[SECTION_DATA].offset);
}

static void an_open_model_never_rereads_the_structure(void) {
    const struct tiny_shape *shapes[] = { &tiny_llama, &tiny_experts, &tiny_gpt2, &tiny_q4s };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const int vocab = shapes[i]->vocab;
        const size_t bytes = sizeof(float) * (size_t)vocab * N;
        float *expected = take(bytes), *logits = take(bytes);
        struct tiny_file file = tiny_model(shapes[i]);
        llamac_model *model = open_model(file);
        llamac_session *s = open_session(model, 1, 0, up_to_threads(2), NULL);
        prefill(s, 0, N, vocab, expected);
        overwrite_structure(file, i % 2 ? 0xff : 0);
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        prefill(s, 0, N, vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "model %zu, session opened before the change", i);
        llamac_session_close(&s);
        s = open_session(model, 1, 0, 1, NULL);
        memset(logits, 0, bytes);
        prefill(s, 0, N, vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "model %zu, session opened after the change", i);
        llamac_session_close(&s);
        const size_t norm_bytes = sizeof(float) * (size_t)shapes[i]->dim;
        CHECK(!llamac_model_replace(model, "output_norm.weight", LLAMAC_F32, logits, norm_bytes, &err), "%s",
              err.message);
        llamac_model_close(&model);
        free(expected), free(logits), free(file.data);
    }
}

struct writer { struct tiny_file file; int32_t stop; };

// Alternates head_dim between its value and one that would read and write out of bounds.
static void *alternate_head_dim(void *argument) {
    struct writer *w = argument;
    const struct header *h = (const struct header *)(const void *)w->file.data;
    struct config *c = (struct config *)(void *)(w->file.data + h->sections[SECTION_CONFIG].offset);
    const uint32_t valid = c->head_dim;
    for (uint32_t i = 0; !__atomic_load_n(&w->stop, __ATOMIC_RELAXED); i++)
        __atomic_store_n(&c->head_dim, i % 2 ? 4096 : valid, __ATOMIC_RELAXED);
    return NULL;
}

// The core must use the very bytes that it checked.
static void opening_a_changing_file_fails_or_gives_a_valid_model(void) {
    struct writer w = { .file = tiny_model(&tiny_llama) };
    float logits[101];
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, alternate_head_dim, &w) == 0, "thread");
    for (int i = 0; i < (emulated ? 50 : 1000); i++) {
        llamac_model *model;
        if (llamac_model_open(&model, w.file.data, w.file.bytes, &err)) continue;
        CHECK(model->config->head_dim == (uint32_t)tiny_llama.head_dim, "head_dim is %u", model->config->head_dim);
        llamac_session *s = open_session(model, 1, 0, 1, NULL);
        CHECK(!llamac_eval(s, &(llamac_row){ 1, 0, 0, 1 }, 1, logits, NULL, &err), "%s", err.message);
        llamac_session_close(&s);
        llamac_model_close(&model);
    }
    __atomic_store_n(&w.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    free(w.file.data);
}

static void *write_random_bytes(void *argument) {
    struct writer *w = argument;
    uint64_t state = 3;
    while (!__atomic_load_n(&w->stop, __ATOMIC_RELAXED)) {
        uint8_t *p = &w->file.data[random_bits(&state) % w->file.bytes];
        __atomic_store_n(p, (uint8_t)random_bits(&state), __ATOMIC_RELAXED);
    }
    return NULL;
}

// No index or size depends on weights. Sanitizers would report one that does.
static void weights_that_change_during_evals_give_wrong_numbers_at_worst(void) {
    const struct tiny_shape *shapes[] = { &tiny_experts, &tiny_mixed, &tiny_gpt2 };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct writer w = { .file = tiny_model(shapes[i]) };
        const int vocab = shapes[i]->vocab;
        float *logits = take_floats(40, vocab);
        llamac_model *model = open_model(w.file);
        llamac_session *s = open_session(model, 1, 0, up_to_threads(2), NULL);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, write_random_bytes, &w) == 0, "thread");
        for (int round = 0; round < (emulated ? 3 : 30); round++) {
            prefill(s, 0, 40, vocab, logits);
            CHECK(!llamac_eval(s, &(llamac_row){ 1, 0, 40, 1 }, 1, logits, NULL, &err), "%s", err.message);
            CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        }
        __atomic_store_n(&w.stop, 1, __ATOMIC_RELAXED);
        pthread_join(thread, NULL);
        llamac_session_close(&s);
        llamac_model_close(&model);
        free(logits), free(w.file.data);
    }
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(an_open_model_never_rereads_the_structure);
    RUN(opening_a_changing_file_fails_or_gives_a_valid_model);
    RUN(weights_that_change_during_evals_give_wrong_numbers_at_worst);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_changed_file");
}
