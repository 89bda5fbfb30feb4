// SPDX-License-Identifier: MIT
// fuzz_calls.c - for libFuzzer: calls the core's functions that take numbers but no file with any bits in every number:
// sampling, quantizing, regrouping GGUF's blocks, changing a model's matrices, and evals.
// tests/fuzz/README.md shows how to build and run it.
#include "common.h"
#include "model.h"
#include "tiny_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct input { const uint8_t *data; size_t bytes; };   // what is left of it

// Copies `n` bytes of the input; zeros once it has ended.
static void next(struct input *in, void *into, size_t n) {
    memset(into, 0, n);
    const size_t available = n < in->bytes ? n : in->bytes;
    if (available) memcpy(into, in->data, available);
    in->data += available;
    in->bytes -= available;
}

// ---- sampling

// The result is a token with a finite logit, or an error with a message.
static void sample(struct input in) {
    enum { MAX_LOGITS = 300 };
    llamac_sampling sampling;
    uint64_t position;
    next(&in, &sampling, sizeof sampling);
    next(&in, &position, sizeof position);
    const int n = (int)(in.bytes / sizeof(float) < MAX_LOGITS ? in.bytes / sizeof(float) : MAX_LOGITS);
    float *logits = take(sizeof(float) * (size_t)n);
    next(&in, logits, sizeof(float) * (size_t)n);
    void *scratch = take((size_t)n * LLAMAC_SAMPLE_SCRATCH);
    err.message[0] = 0;
    const int token = llamac_sample(logits, n, &sampling, position, NULL, scratch, &err);
    if (token >= n || (token < 0 && !err.message[0])) __builtin_trap();
    if (token >= 0 && !isfinite(logits[token])) __builtin_trap();
    if (token >= 0 && token != llamac_sample(logits, n, &sampling, position, NULL, scratch, &err)) __builtin_trap();
    free(scratch);
    free(logits);
}

// ---- evals

// Adapts or replaces a tensor, or fails.
static void change_model(llamac_model *model, struct input *in, float a[64 * 8], float b[64 * 8]) {
    static const char *const names[] = {
        "layers.0.attn_q.weight", "layers.0.attn_q.bias", "output_norm.weight", "no such tensor",
    };
    uint8_t flags;
    uint16_t a_bytes, b_bytes;
    next(in, &flags, 1);
    next(in, &a_bytes, sizeof a_bytes);
    next(in, &b_bytes, sizeof b_bytes);
    a_bytes %= 64 * 8 * sizeof(float) + 1;
    b_bytes %= 64 * 8 * sizeof(float) + 1;
    for (int i = 0; i < 64 * 8; i++) a[i] = b[i] = 0.5f;
    if (flags & 0x80) {
        const char *name = flags & 0x40 ? "layers.0.attn_q.weight" : "output.weight";
        const float *scales = flags & 0x20 ? a : NULL;
        (void)llamac_model_adapt(model, name, flags % 5, a, a_bytes, b, b_bytes, scales, b_bytes % 16, &err);
    }
    if (flags & 0x10) {
        const int dtype = a_bytes % (LLAMAC_N_DTYPES + 1);
        const size_t right = llamac_matrix_bytes(dtype, 8, 8);
        const size_t bytes = flags & 8 && right <= 64 * 8 * sizeof(float) ? right : a_bytes;
        (void)llamac_model_replace(model, names[b_bytes % ARRAY_LEN(names)], dtype, a, bytes, &err);
    }
}

static int total_length(const llamac_session *s) { return llamac_length(s, 0) + llamac_length(s, 1); }

// A shift removes `by` positions, or fails with a message and changes nothing.
static void shift_once(llamac_session *session, int sequence, int begin, int by) {
    const int before = total_length(session);
    err.message[0] = 0;
    const int failed = llamac_shift(session, sequence, begin, begin + by, &err);
    if (failed && !err.message[0]) __builtin_trap();
    if (total_length(session) != before - (failed ? 0 : by)) __builtin_trap();
}

// An eval of up to four rows either appends them all, or fails with a message and changes nothing.
static void eval_once(llamac_session *session, struct input *in) {
    enum { ANY_ROWS = 1, OBSERVE = 2, TRUNCATE = 4, SHIFT = 8 };
    struct { uint8_t n, flags; int8_t token, sequence, position, want, stage, layer; } call;
    float logits[4 * 11], observed[4 * 64];
    llamac_row rows[4];
    next(in, &call, sizeof call);
    const int n = call.n % 5, sequence = call.sequence & 1, start = llamac_length(session, sequence);
    for (int r = 0; r < n; r++) {
        int32_t numbers[4];
        next(in, numbers, call.flags & ANY_ROWS ? sizeof numbers : sizeof numbers[0]);
        rows[r] = call.flags & ANY_ROWS ? (llamac_row){ numbers[0], numbers[1], numbers[2], numbers[3] }
                                        : (llamac_row){ call.token, sequence, start + r, call.want };
    }
    if (call.flags & TRUNCATE) (void)llamac_truncate(session, call.sequence, call.position, &err);
    if (call.flags & SHIFT) shift_once(session, call.sequence, call.position, call.layer);
    const llamac_observation observation = { call.stage, call.layer, observed };
    const int32_t cancel = 0;
    int done = 0, per_layer;
    llamac_eval_options options = { .observations = &observation, .cancel = &cancel, .rows_done = &done };
    if (call.flags & OBSERVE && llamac_stage_width(session, call.stage, &per_layer) <= ARRAY_LEN(observed) / 4)
        options.n_observations = 1;
    const int before = total_length(session);
    err.message[0] = 0;
    const int failed = llamac_eval(session, rows, n, logits, &options, &err);
    if (failed && !err.message[0]) __builtin_trap();
    if (total_length(session) != before + (failed ? 0 : n)) __builtin_trap();
}

static void eval(struct input in) {
    static const struct tiny_shape shape = {
        .dim = 8, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ffn_dim = 12, .vocab = 11,
        .context = 16, .dtype = LLAMAC_F32, .biases = 1,
    };
    const struct tiny_file file = tiny_model(&shape);
    _Alignas(64) float a[64 * 8], b[64 * 8];   // borrowed by the model
    llamac_model *model;
    llamac_session *session;
    if (llamac_model_open(&model, file.data, file.bytes, &err)) __builtin_trap();
    change_model(model, &in, a, b);
    const llamac_session_options options = { .n_sequences = 2, .context = 8, .threads = 1, .isa = "scalar" };
    if (llamac_session_open(&session, model, &options, &err)) __builtin_trap();
    while (in.bytes) eval_once(session, &in);
    llamac_session_close(&session);
    llamac_model_close(&model);
    free(file.data);
}

// ---- quantizing

// Quantizing is undefined for numbers that are not finite or too large.
static void limit(float *x, int n, float bound, float replacement) {
    for (int i = 0; i < n; i++)
        if (!(fabsf(x[i]) < bound)) x[i] = replacement;
}

static void quantize(struct input in) {
    enum { MAX_ROWS = 17, MAX_COLUMNS = 70, IMPORTANCE = 1, FEEDBACK = 2, SCALAR = 4 };
    struct { uint8_t dtype, rows, columns, flags; } call;
    next(&in, &call, sizeof call);
    const int dtype = call.dtype % (LLAMAC_N_DTYPES + 2);
    const int rows = call.rows % (MAX_ROWS + 1), columns = call.columns % (MAX_COLUMNS + 1);
    const int squared = call.flags & FEEDBACK && columns < 12 ? columns * columns : 0;
    float *w = take_floats(rows, columns), *importance = take_floats(1, columns), *feedback = take_floats(1, squared);
    next(&in, w, sizeof(float) * (size_t)(rows * columns));
    next(&in, importance, sizeof(float) * (size_t)columns);
    next(&in, feedback, sizeof(float) * (size_t)squared);
    limit(w, rows * columns, 0x1p119f, 1);
    limit(importance, columns, 0x1p60f, 1);
    limit(feedback, squared, 0x1p20f, 0);
    for (int i = 0; i < columns; i++) importance[i] = fabsf(importance[i]);   // must not be negative
    uint8_t *out = take(llamac_matrix_bytes(dtype, (uint64_t)rows, (uint64_t)columns));
    err.message[0] = 0;
    const int failed = llamac_quantize(dtype, w, (size_t)rows, (size_t)columns,
                                       call.flags & IMPORTANCE ? importance : NULL, squared ? feedback : NULL,
                                       call.flags & SCALAR ? "scalar" : NULL, out, &err);
    if (failed && !err.message[0]) __builtin_trap();
    free(out), free(feedback), free(importance), free(w);
}

// ---- regrouping

// Blocks of any bits become strips and the same blocks again. Strips of any bits become blocks that survive this, too.
// Wrong sizes are errors with a message. The buffers have no byte to spare.
static void regroup(struct input in) {
    enum { MAX_ROWS = 34, WRONG_SIZE = 1, FROM_STRIPS = 2, UNEVEN = 4 };
    struct { uint8_t dtype, rows, groups, flags; } call;
    next(&in, &call, sizeof call);
    const int dtype = call.dtype % (LLAMAC_N_DTYPES + 2);
    const size_t rows = 1 + call.rows % MAX_ROWS;
    const size_t columns = 32 * (size_t)(1 + call.groups % 24) + (call.flags & UNEVEN ? call.groups % 32u : 0);
    const size_t row_bytes = llamac_gguf_row_bytes(dtype, columns);
    const size_t blocks_size = row_bytes ? rows * row_bytes : columns, strips_size = row_bytes
        ? llamac_matrix_bytes(dtype, rows, columns) : columns;
    uint8_t *blocks = take(blocks_size), *strips = take(strips_size), *again = take(blocks_size);
    err.message[0] = 0;
    if (!row_bytes || call.flags & WRONG_SIZE) {
        const size_t other = row_bytes ? blocks_size - 1 : blocks_size;
        if (llamac_regroup(dtype, blocks, other, rows, columns, strips, strips_size, &err) >= 0) __builtin_trap();
        if (llamac_ungroup(dtype, strips, strips_size, rows, columns, blocks, other, &err) >= 0) __builtin_trap();
        if (!err.message[0]) __builtin_trap();
    } else {
        if (call.flags & FROM_STRIPS) {
            next(&in, strips, strips_size);
            if (llamac_ungroup(dtype, strips, strips_size, rows, columns, blocks, blocks_size, &err)) __builtin_trap();
        } else {
            next(&in, blocks, blocks_size);
        }
        if (llamac_regroup(dtype, blocks, blocks_size, rows, columns, strips, strips_size, &err) < 0) __builtin_trap();
        if (llamac_ungroup(dtype, strips, strips_size, rows, columns, again, blocks_size, &err)) __builtin_trap();
        if (memcmp(blocks, again, blocks_size)) __builtin_trap();
    }
    free(again), free(strips), free(blocks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!bytes) return 0;
    const struct input in = { data + 1, bytes - 1 };
    if (data[0] >= 0xC0) regroup(in);
    else if (data[0] % 3 == 0) quantize(in);
    else if (data[0] % 3 == 1) sample(in);
    else eval(in);
    if (llamac_live_objects() != 0) __builtin_trap();
    return 0;
}
