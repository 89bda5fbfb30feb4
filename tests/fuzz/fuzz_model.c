// SPDX-License-Identifier: MIT
// fuzz_model.c - for libFuzzer: opens any bytes as a flat file. If they are a model, evaluates a few rows and samples.
// A drafter does so beside a small model.
//
// Hashes guard every table of a file and would reject every mutation. This mutator recomputes them, and half of the
// time changes one field of one record, as a hostile writer would.
//
// tests/fuzz/README.md shows how to build and run it. --seeds=DIR writes the seeds and exits.
#include "common.h"
#include "model.h"
#include "tiny_model.h"

enum { ROWS = 3, MAX_BYTES = 1 << 17 };

size_t LLVMFuzzerMutate(uint8_t *data, size_t bytes, size_t max_bytes);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t max_bytes, unsigned seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

// ---- seeds

#define SMALL .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16
#define SMALL_QUANTIZED SMALL, .dim = 32, .head_dim = 16, .ffn_dim = 40, .tied = 1

static const struct tiny_shape seeds[] = {
    { SMALL, .dim = 8, .head_dim = 4, .ffn_dim = 12, .dtype = LLAMAC_F16, .tied = 1 },
    { .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4, .ffn_dim = 12,
      .dtype = LLAMAC_F32, .biases = 1 },
    { .gpt2 = 1, .n_layers = 1, .n_heads = 2, .n_kv_heads = 2, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4,
      .ffn_dim = 16, .dtype = LLAMAC_BF16, .tied = 1, .biases = 1 },
    { SMALL_QUANTIZED, .dtype = LLAMAC_Q8 },
    { SMALL_QUANTIZED, .dtype = LLAMAC_Q6 },
    { SMALL_QUANTIZED, .dtype = LLAMAC_Q4 },
    { SMALL_QUANTIZED, .dtype = LLAMAC_Q4S },
    // experts, every norm placement, and windows
    { .n_layers = 4, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4, .ffn_dim = 12,
      .dtype = LLAMAC_BF16, .biases = 1, .experts = 3, .window = 5 },
    // drafters for `trunk_shape`: an assistant, and an EAGLE-3 head with norms of its states and a window
    { .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4, .ffn_dim = 12,
      .dtype = LLAMAC_F32, .window = 2, .trunk_dim = 8 },
    { .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4, .ffn_dim = 12,
      .dtype = LLAMAC_F32, .window = 2, .eagle = -8, .eagle_norm = EAGLE_IN_NORM_EACH },
};
static const struct tiny_shape trunk_shape = {
    .n_layers = 4, .n_heads = 2, .n_kv_heads = 1, .vocab = 11, .context = 16, .dim = 8, .head_dim = 4, .ffn_dim = 12,
    .dtype = LLAMAC_F32, .window = 2,
};

static void write_seed(const char *folder, size_t i) {
    const struct tiny_file file = tiny_model(&seeds[i]);
    char path[4096];
    snprintf(path, sizeof path, "%s/seed-%zu.bin", folder, i);
    FILE *out = fopen(path, "wb");
    if (!out || fwrite(file.data, 1, file.bytes, out) != file.bytes || fclose(out)) {
        printf("cannot write %s\n", path);
        exit(1);
    }
    free(file.data);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    for (int a = 1; a < *argc; a++) {
        if (strncmp((*argv)[a], "--seeds=", 8)) continue;
        for (size_t i = 0; i < ARRAY_LEN(seeds); i++) write_seed((*argv)[a] + 8, i);
        exit(0);
    }
    return 0;
}

// ---- the mutator

// Recomputes all hashes, or only the header's if the tables point outside of the file.
static void rehash(uint8_t *data, size_t bytes) {
    if (bytes < sizeof(struct header)) return;
    if (tiny_can_rehash(data, bytes)) tiny_rehash(data);
    else tiny_rehash_header(data);
}

// The offset of a random record of a kind, or `bytes` if the file has none.
static size_t random_record(const uint8_t *data, size_t bytes, const char *record, uint64_t *state) {
    const struct header *h = (const struct header *)(const void *)data;
    const size_t size = llamac_record_bytes(record);
    if (!strcmp(record, "header")) return 0;
    if (!strcmp(record, "section"))
        return offsetof(struct header, sections) + size * (size_t)random_below(state, N_SECTIONS);
    const enum section s = !strcmp(record, "config") ? SECTION_CONFIG
                         : !strcmp(record, "layer") ? SECTION_LAYERS : SECTION_TENSORS;
    const uint64_t offset = h->sections[s].offset, section_bytes = h->sections[s].bytes;
    if (section_bytes < size || offset > bytes || section_bytes > bytes - offset) return bytes;
    return (size_t)offset + size * (size_t)(random_bits(state) % (section_bytes / size));
}

static size_t element_bytes(const llamac_field *field) {
    switch (field->type) {
    case LLAMAC_TYPE_U64: return 8;
    case LLAMAC_TYPE_BYTES:
    case LLAMAC_TYPE_TEXT: return 1;
    default: return 4;
    }
}

static void change_field(uint8_t *data, size_t bytes, uint64_t *state) {
    static const uint64_t unusual[] = {
        0, 1, 2, 3, 7, 16, 64, 255, 4096, 65536, 1 << 20, 1 << 24, 0x7fffffff, 0x80000000, 0xffffffff,
        0x7fc00000, 0x7f800000,   // NaN and infinity
        0x100000000, 0x3fffffffffffffff, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff,
    };
    size_t n;
    const llamac_field *fields = llamac_fields(&n), *f = &fields[random_bits(state) % n];
    const size_t size = element_bytes(f), record = random_record(data, bytes, f->record, state);
    const size_t at = record + f->offset + size * (size_t)(random_bits(state) % f->count);
    if (at > bytes || size > bytes - at) return;
    uint64_t value = 0;
    memcpy(&value, data + at, size);
    switch (random_below(state, 4)) {
    case 0: value = unusual[random_bits(state) % ARRAY_LEN(unusual)]; break;
    case 1: value += (uint64_t)random_below(state, 9) - 4; break;
    case 2: value ^= 1ull << random_below(state, (int)size * 8); break;
    default: value *= 2; break;
    }
    memcpy(data + at, &value, size);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t max_bytes, unsigned seed) {
    uint64_t state = seed + 1ull;
    random_bits(&state);
    if (bytes < sizeof(struct header)) return LLVMFuzzerMutate(data, bytes, max_bytes);
    uint8_t *copy = take(max_bytes);   // aligned, which libFuzzer's memory need not be
    memcpy(copy, data, bytes);
    if (random_below(&state, 2)) {
        for (int n = 1 + random_below(&state, 3); n; n--) change_field(copy, bytes, &state);
    } else {
        bytes = LLVMFuzzerMutate(copy, bytes, max_bytes);
    }
    // A wrong file size would hide all other changes.
    if (bytes >= sizeof(struct header) && random_below(&state, 2))
        ((struct header *)(void *)copy)->file_bytes = bytes;
    rehash(copy, bytes);
    memcpy(data, copy, bytes);
    free(copy);
    return bytes;
}

// ---- the target

static const llamac_session_options usual = { .n_sequences = 1, .context = ROWS + 1, .threads = 1, .isa = "scalar" };

// Evaluates a few rows. trunk: the session that a drafter belongs to, which has computed as many rows; or NULL.
// states: what the rows of a drafter read.
static void compute(const llamac_model *model, const llamac_session *trunk, const float *states) {
    llamac_session_options options = usual;
    options.trunk = trunk;
    llamac_session *session;
    if (llamac_session_open(&session, model, &options, &err)) return;
    const int32_t vocab = (int32_t)model->config->vocab_size;
    float *logits = take(sizeof(float) * (size_t)vocab);
    llamac_row rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = (llamac_row){ r == 1 ? vocab - 1 : 0, 0, r, r == ROWS - 1 };
    const int is_assistant = model->config->drafter == DRAFTER_ASSISTANT, n = is_assistant ? 1 : ROWS;
    if (is_assistant) rows[0] = (llamac_row){ 0, 0, ROWS, 1 };   // at the position after the trunk's
    const llamac_eval_options given = { .inputs = is_assistant ? states : NULL,
                                        .states = is_assistant ? NULL : states };
    if (!llamac_eval(session, rows, n, logits, &given, &err)) {
        const llamac_sampling sampling = { .temperature = 1, .top_k = 5, .top_p = 0.9f, .min_p = 0.01f, .seed = 1 };
        void *scratch = take((size_t)vocab * LLAMAC_SAMPLE_SCRATCH);
        if (llamac_sample(logits, vocab, &sampling, 0, NULL, scratch, &err) >= vocab) __builtin_trap();
        free(scratch);
    }
    free(logits);
    llamac_session_close(&session);
}

// Computes with a drafter beside a small model, if the two belong together.
static void compute_drafter(const llamac_model *drafter) {
    const struct tiny_file file = tiny_model(&trunk_shape);
    llamac_model *model;
    llamac_session_options options = usual;
    if (drafter->config->drafter == DRAFTER_EAGLE3) options.drafter = drafter;
    llamac_session *trunk;
    if (llamac_model_open(&model, file.data, file.bytes, &err)) __builtin_trap();
    if (!llamac_session_open(&trunk, model, &options, &err)) {
        llamac_row rows[ROWS];
        float *states = take_floats(ROWS, FORMAT_EAGLE_STATES * trunk_shape.dim),
              *logits = take_floats(1, trunk_shape.vocab);
        for (int r = 0; r < ROWS; r++) rows[r] = (llamac_row){ r, 0, r, r == ROWS - 1 };
        const llamac_eval_options asked = { .hidden = states, .n_hidden = ROWS };
        if (llamac_eval(trunk, rows, ROWS, logits, &asked, &err)) __builtin_trap();
        compute(drafter, trunk, states);
        free(states), free(logits);
        llamac_session_close(&trunk);
    }
    llamac_model_close(&model);
    free(file.data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes > MAX_BYTES) return -1;
    void *file = NULL;   // of the exact size, so that the address sanitizer sees every read after the end
    if (posix_memalign(&file, 64, bytes ? bytes : 1)) return -1;
    memcpy(file, data, bytes);
    llamac_model *model;
    if (!llamac_model_open(&model, file, bytes, &err)) {
        if (model->config->drafter) compute_drafter(model);
        else compute(model, NULL, NULL);
        llamac_model_close(&model);
    } else if (!err.message[0]) {
        __builtin_trap();   // an error without a message
    }
    if (llamac_live_objects() != 0) __builtin_trap();
    free(file);
    return 0;
}
