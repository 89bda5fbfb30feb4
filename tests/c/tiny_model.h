// SPDX-License-Identifier: MIT
// tiny_model.h - tiny models (tiny_file.h) in memory, for the tests of the core; helpers that open and run them.
#ifndef LLAMAC_TINY_MODEL_H
#define LLAMAC_TINY_MODEL_H
#include "test.h"
#include "tiny_file.h"

struct tiny_file { uint8_t *data; size_t bytes; };

static inline struct tiny_file tiny_model(const struct tiny_shape *shape) {
    if (shape->n_layers + (shape->mtp > 0) > TINY_MAX_LAYERS) {
        printf("a tiny model of %d layers\n", shape->n_layers);
        exit(1);
    }
    struct tiny_tables *tables = take(sizeof *tables);
    tiny_lay_out(shape, tables);
    const size_t bytes = (size_t)tables->header.file_bytes;
    const struct tiny_file file = { take(bytes), bytes };
    tiny_write(tables, file.data);
    free(tables);
    return file;
}

// ---- running it

static llamac_error err;   // the core's last error

static inline llamac_model *open_model(struct tiny_file file) {
    llamac_model *model;
    if (llamac_model_open(&model, file.data, file.bytes, &err)) { printf("model: %s\n", err.message); exit(1); }
    return model;
}

static inline llamac_session *open_session_with(const llamac_model *model, llamac_session_options options) {
    llamac_session *session;
    if (llamac_session_open(&session, model, &options, &err)) { printf("session: %s\n", err.message); exit(1); }
    return session;
}
static inline llamac_session *open_session(const llamac_model *model, int sequences, int kv_dtype, int threads,
                                           const char *isa) {
    return open_session_with(model, (llamac_session_options){ .n_sequences = sequences, .kv_dtype = kv_dtype,
                                                              .threads = threads, .isa = isa });
}

// `wanted`, or 1 in a build without threads.
static inline int up_to_threads(int wanted) { return llamac_has_threads() ? wanted : 1; }

// Evaluates the first n tokens of a sequence in one call; logits: (n, vocab).
static inline void prefill(llamac_session *s, int sequence, int n, int vocab, float *logits) {
    llamac_row *rows = take(sizeof *rows * (size_t)n);
    for (int i = 0; i < n; i++) rows[i] = (llamac_row){ token_at(sequence, i, vocab), sequence, i, 1 };
    CHECK(!llamac_eval(s, rows, n, logits, NULL, &err), "%s", err.message);
    free(rows);
}
#endif
