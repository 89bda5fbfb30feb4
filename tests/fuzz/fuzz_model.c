// SPDX-License-Identifier: MIT
// fuzz_model.c - for libFuzzer: any bytes as a flat file are opened; where a model comes of them, it computes a few rows and a token is drawn.
//
// Hashes guard every table of a file, so mutations would end at them. The mutator here makes them true again, and half of the time it
// changes one field of one record, because that is what a hostile writer would do.
//
//     python tests/c/build.py --cc clang --sanitize fuzzer,address,undefined --no-openmp --program tests/fuzz/fuzz_model.c --out fuzz_model
//     ./fuzz_model --seeds=DIR              write the seeds and end
//     ./fuzz_model -max_len=65536 DIR       fuzz
#include "common.h"
#include "model.h"
#include "tiny_model.h"

enum { ROWS = 3, MAX_BYTES = 1 << 17 };

size_t LLVMFuzzerMutate(uint8_t *data, size_t bytes, size_t max_bytes);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t bytes, size_t max_bytes, unsigned seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

// ---- seeds

static const struct tiny_shape seeds[] = {
    { 0, 8, 2, 2, 1, 4, 12, 11, 16, LLAMAC_F32, 0, 1, 0, 0 }, { 1, 8, 1, 2, 2, 4, 16, 11, 16, LLAMAC_BF16, 1, 1, 0, 0 },
    { 0, 8, 1, 2, 1, 4, 12, 11, 16, LLAMAC_F16, 1, 0, 0, 0 }, { 0, 32, 1, 2, 1, 16, 40, 11, 16, LLAMAC_Q8, 1, 0, 0, 0 },
    { 0, 32, 1, 2, 1, 16, 40, 11, 16, LLAMAC_Q4, 1, 0, 0, 0 }, { 0, 32, 1, 2, 1, 16, 40, 11, 16, LLAMAC_Q4S, 1, 0, 0, 0 },
    { 0, 8, 4, 2, 1, 4, 12, 11, 16, LLAMAC_BF16, 0, 1, 3, 5 },   // with experts, every placement of norms, and windows
};

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    for (int a = 1; a < *argc; a++) {
        if (strncmp((*argv)[a], "--seeds=", 8)) continue;
        for (size_t i = 0; i < ARRAY_LEN(seeds); i++) {
            const struct tiny_file file = tiny_model(&seeds[i]);
            char path[4096];
            snprintf(path, sizeof path, "%s/seed-%zu.bin", (*argv)[a] + 8, i);
            FILE *out = fopen(path, "wb");
            if (!out || fwrite(file.data, 1, file.bytes, out) != file.bytes || fclose(out)) { printf("cannot write %s\n", path); exit(1); }
            free(file.data);
        }
        exit(0);
    }
    return 0;
}

// ---- the mutator

// As far as the tables still say where things are; the header's own hash always.
static void make_hashes_true(uint8_t *data, size_t bytes) {
    struct header *h = (struct header *)(void *)data;
    if (bytes < sizeof *h) return;
    int sane = h->sections[SECTION_TENSORS].bytes % sizeof(struct tensor_record) == 0;
    for (int s = 0; s < N_SECTIONS; s++)
        sane &= h->sections[s].offset % 64 == 0 && h->sections[s].offset <= bytes && h->sections[s].bytes <= bytes - h->sections[s].offset;
    if (sane) {
        tiny_rehash(data);
        return;
    }
    memset(h->sha256, 0, HASH_BYTES);
    hash(h, sizeof *h, h->sha256);
}

// Where a random record of a kind lies in the file, or `bytes` if there is none.
static size_t random_record(const uint8_t *data, size_t bytes, const char *record, uint64_t *state) {
    const struct header *h = (const struct header *)(const void *)data;
    const size_t size = llamac_record_bytes(record);
    if (!strcmp(record, "header")) return 0;
    if (!strcmp(record, "section")) return offsetof(struct header, sections) + size * (size_t)random_below(state, N_SECTIONS);
    const enum section s = !strcmp(record, "config") ? SECTION_CONFIG : !strcmp(record, "layer") ? SECTION_LAYERS : SECTION_TENSORS;
    const uint64_t offset = h->sections[s].offset, held = h->sections[s].bytes;
    if (held < size || offset > bytes || held > bytes - offset) return bytes;
    return (size_t)offset + size * (size_t)(random_bits(state) % (held / size));
}

static void change_field(uint8_t *data, size_t bytes, uint64_t *state) {
    static const uint64_t odd[] = { 0, 1, 2, 3, 7, 16, 64, 255, 4096, 65536, 1 << 20, 1 << 24, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fc00000, 0x7f800000,
                                    0x100000000, 0x3fffffffffffffff, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff };
    size_t n;
    const llamac_field *fields = llamac_fields(&n), *f = &fields[random_bits(state) % n];
    const size_t size = f->type == LLAMAC_TYPE_U64 ? 8 : f->type == LLAMAC_TYPE_BYTES || f->type == LLAMAC_TYPE_TEXT ? 1 : 4;
    const size_t record = random_record(data, bytes, f->record, state);
    const size_t at = record + f->offset + size * (size_t)(random_bits(state) % f->count);
    if (at > bytes || size > bytes - at) return;
    uint64_t value = 0;
    memcpy(&value, data + at, size);
    switch (random_below(state, 4)) {
    case 0: value = odd[random_bits(state) % ARRAY_LEN(odd)]; break;
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
    struct header aligned;   // libFuzzer's memory need not be aligned
    uint8_t *copy = take(max_bytes);
    memcpy(copy, data, bytes);
    if (random_below(&state, 2)) {
        for (int n = 1 + random_below(&state, 3); n; n--) change_field(copy, bytes, &state);
    } else {
        bytes = LLVMFuzzerMutate(copy, bytes, max_bytes);
    }
    if (bytes >= sizeof aligned && random_below(&state, 2)) {   // the size is another thing that a writer would get right
        memcpy(&aligned, copy, sizeof aligned);
        aligned.file_bytes = bytes;
        memcpy(copy, &aligned, sizeof aligned);
    }
    make_hashes_true(copy, bytes);
    memcpy(data, copy, bytes);
    free(copy);
    return bytes;
}

// ---- the target

static void compute(const llamac_model *model) {
    const llamac_session_options options = { .n_sequences = 1, .context = ROWS + 1, .threads = 1, .isa = "scalar" };
    llamac_session *session;
    if (llamac_session_open(&session, model, &options, &err)) return;
    const int32_t vocab = (int32_t)model->config->vocab_size;
    float *logits = take(sizeof(float) * (size_t)vocab);
    llamac_row rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = (llamac_row){ r == 1 ? vocab - 1 : 0, 0, r, r == ROWS - 1 };
    if (!llamac_eval(session, rows, ROWS, logits, NULL, &err)) {
        const llamac_sampling sampling = { .temperature = 1, .top_k = 5, .top_p = 0.9f, .min_p = 0.01f, .seed = 1 };
        void *scratch = take((size_t)vocab * LLAMAC_SAMPLE_SCRATCH);
        const int token = llamac_sample(logits, vocab, &sampling, 0, scratch, &err);
        if (token >= vocab) __builtin_trap();
        free(scratch);
    }
    free(logits);
    llamac_session_close(&session);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes > MAX_BYTES) return -1;
    void *file = NULL;   // not a byte more than the file has, so that the sanitizer sees what is read behind it
    if (posix_memalign(&file, 64, bytes ? bytes : 1)) return -1;
    memcpy(file, data, bytes);
    llamac_model *model;
    if (!llamac_model_open(&model, file, bytes, &err)) {
        compute(model);
        llamac_model_close(&model);
    } else if (!err.message[0]) {
        __builtin_trap();   // refused without a word
    }
    if (llamac_live_objects() != 0) __builtin_trap();
    free(file);
    return 0;
}
