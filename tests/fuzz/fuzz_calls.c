// SPDX-License-Identifier: MIT
// fuzz_calls.c - for libFuzzer: the core's functions that take numbers of strangers but no file, with any bits in every number: drawing a
// token from logits, quantizing rows, changing matrices, and the arguments of an eval.
//
//     python tests/c/build.py --cc clang --sanitize fuzzer,address,undefined --no-openmp --program tests/fuzz/fuzz_calls.c --out fuzz_calls
//     ./fuzz_calls -max_len=4096 DIR
#include "common.h"
#include "model.h"
#include "tiny_model.h"

enum { MAX_LOGITS = 300, CONTEXT = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

// Takes `n` bytes of the input, zeros where it has ended.
static void next(const uint8_t **data, size_t *left, void *into, size_t n) {
    memset(into, 0, n);
    const size_t have = n < *left ? n : *left;
    if (have) memcpy(into, *data, have);
    *data += have;
    *left -= have;
}

// A token is one of the logits that are finite numbers, or there is an error with words.
static void draw(const uint8_t *data, size_t left) {
    llamac_sampling sampling;
    uint64_t position;
    next(&data, &left, &sampling, sizeof sampling);
    next(&data, &left, &position, sizeof position);
    const int n = (int)(left / sizeof(float) < MAX_LOGITS ? left / sizeof(float) : MAX_LOGITS);
    float *logits = take(sizeof(float) * (size_t)(n ? n : 1));
    next(&data, &left, logits, sizeof(float) * (size_t)n);
    void *scratch = take((size_t)(n ? n : 1) * LLAMAC_SAMPLE_SCRATCH);
    err.message[0] = 0;
    const int token = llamac_sample(logits, n, &sampling, position, scratch, &err);
    if (token >= n || (token < 0 && !err.message[0])) __builtin_trap();
    if (token >= 0 && !isfinite(logits[token])) __builtin_trap();
    if (token >= 0 && token != llamac_sample(logits, n, &sampling, position, scratch, &err)) __builtin_trap();
    free(scratch);
    free(logits);
}

// Any rows, one after another, on a small model: what cannot be computed is refused and changes nothing.
static void compute(const uint8_t *data, size_t left) {
    static const struct tiny_shape shape = { 0, 8, 1, 2, 1, 4, 12, 11, 16, LLAMAC_F32, 0, 1, 0, 0 };
    const struct tiny_file file = tiny_model(&shape);
    llamac_model *model;
    if (llamac_model_open(&model, file.data, file.bytes, &err)) __builtin_trap();
    uint8_t kind;
    next(&data, &left, &kind, 1);
    int32_t rank = kind % 5;
    _Alignas(64) float a[64 * 8], b[64 * 8];
    for (int i = 0; i < 64 * 8; i++) a[i] = b[i] = 0.5f;
    uint16_t a_bytes, b_bytes;
    next(&data, &left, &a_bytes, sizeof a_bytes);
    next(&data, &left, &b_bytes, sizeof b_bytes);
    a_bytes %= sizeof a + 1;
    b_bytes %= sizeof b + 1;
    const float *const scales = kind & 0x20 ? a : NULL;
    if (kind & 0x80) (void)llamac_model_adapt(model, kind & 0x40 ? "layers.0.attn_q.weight" : "output.weight", rank, a, a_bytes, b, b_bytes, scales, b_bytes % 16, &err);
    static const char *const names[] = { "layers.0.attn_q.weight", "layers.0.attn_q.bias", "output_norm.weight", "no such tensor" };
    const int dtype = a_bytes % (LLAMAC_N_DTYPES + 1);
    const size_t whole = llamac_matrix_bytes(dtype, 8, 8);
    if (kind & 0x10) (void)llamac_model_replace(model, names[b_bytes % ARRAY_LEN(names)], dtype, a, kind & 8 && whole <= sizeof a ? whole : a_bytes, &err);
    llamac_session *session;
    const llamac_session_options options = { .n_sequences = 2, .context = CONTEXT, .threads = 1, .isa = "scalar" };
    if (llamac_session_open(&session, model, &options, &err)) __builtin_trap();
    float logits[4 * 11], seen[4 * 64];
    while (left) {
        struct { uint8_t n, how; int8_t token, sequence, position, want, stage, layer; } call;
        llamac_row rows[4];
        const int before[] = { llamac_length(session, 0), llamac_length(session, 1) };
        next(&data, &left, &call, sizeof call);
        const int n = call.n % 5;
        for (int r = 0; r < n; r++) {
            int32_t change[4];
            next(&data, &left, change, call.how & 1 ? sizeof change : 4);
            rows[r] = call.how & 1 ? (llamac_row){ change[0], change[1], change[2], change[3] }
                                   : (llamac_row){ call.token, call.sequence & 1, before[call.sequence & 1] + r, call.want };
        }
        const llamac_observation wish = { call.stage, call.layer, seen };
        int32_t cancel = 0;
        int done = 0, per_layer;
        llamac_eval_options more = { .observations = &wish, .n_observations = call.how & 2 ? 1 : 0, .cancel = &cancel, .rows_done = &done };
        if (llamac_stage_width(session, call.stage, &per_layer) > ARRAY_LEN(seen) / 4) more.n_observations = 0;
        if (call.how & 4) (void)llamac_truncate(session, call.sequence, call.position, &err);
        const int length = llamac_length(session, 0) + llamac_length(session, 1);
        err.message[0] = 0;
        const int status = llamac_eval(session, rows, n, logits, &more, &err);
        const int after = llamac_length(session, 0) + llamac_length(session, 1);
        if (status && (!err.message[0] || after != length)) __builtin_trap();
        if (!status && after != length + n) __builtin_trap();
    }
    llamac_session_close(&session);
    llamac_model_close(&model);
    free(file.data);
}

// Numbers of any size that quantizing allows.
static void quantize(const uint8_t *data, size_t left) {
    enum { ROWS = 17, COLUMNS = 70 };
    struct { uint8_t dtype, rows, columns, how; } call;
    next(&data, &left, &call, sizeof call);
    const int dtype = call.dtype % (LLAMAC_N_DTYPES + 2), rows = call.rows % (ROWS + 1), columns = call.columns % (COLUMNS + 1);
    const int has_feedback = call.how & 2 && columns < 12;
    float *w = take(sizeof(float) * (size_t)(rows * columns + 1)), *importance = take(sizeof(float) * (size_t)(columns + 1));
    float *feedback = take(sizeof(float) * (size_t)(has_feedback ? columns * columns + 1 : 1));
    next(&data, &left, w, sizeof(float) * (size_t)(rows * columns));
    next(&data, &left, importance, sizeof(float) * (size_t)columns);
    if (has_feedback) next(&data, &left, feedback, sizeof(float) * (size_t)(columns * columns));
    for (int i = 0; i < rows * columns; i++) if (!(fabsf(w[i]) < 0x1p119f)) w[i] = 1;
    for (int i = 0; i < columns; i++) if (!(importance[i] >= 0 && importance[i] < 0x1p60f)) importance[i] = 1;
    for (int i = 0; has_feedback && i < columns * columns; i++) if (!(fabsf(feedback[i]) < 0x1p20f)) feedback[i] = 0;
    const size_t bytes = llamac_matrix_bytes(dtype, (uint64_t)rows, (uint64_t)columns);
    uint8_t *out = take(bytes ? bytes : 1);
    err.message[0] = 0;
    if (llamac_quantize(dtype, w, (size_t)rows, (size_t)columns, call.how & 1 ? importance : NULL, has_feedback ? feedback : NULL, out, &err) && !err.message[0])
        __builtin_trap();
    free(out), free(feedback), free(importance), free(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!bytes) return 0;
    if (data[0] % 3 == 0) quantize(data + 1, bytes - 1);
    else if (data[0] % 3 == 1) draw(data + 1, bytes - 1);
    else compute(data + 1, bytes - 1);
    if (llamac_live_objects() != 0) __builtin_trap();
    return 0;
}
