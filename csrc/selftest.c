// SPDX-License-Identifier: MIT
// selftest.c - recorded logits of tiny models, with which a build is checked on a machine.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "llamac.h"
#include "mem.h"
#include "sha256.h"
#include "tiny_file.h"

enum { N = 290 };   // positions: more than a block of attention, and not a multiple of any tile
enum { MAX_SEQUENCES = 16 };

// SHA-256 of the logits of N positions on every machine. A change that moves these bits raises LLAMAC_NUMERICS.
static const struct recorded {
    const char *name;
    const struct tiny_shape *shape;
    int kv_dtype;
    const char *sha256;
    int numerics;
} recorded[] = {
    { "f32, KV cache in f32", &tiny_llama, LLAMAC_F32,
      "b2b9a73e9fffea128047bdd033a5a5c70b87a0416a7244757d63bc0d8ffef468", 0 },
    { "f32, KV cache in q8", &tiny_llama, LLAMAC_Q8,
      "255f23f4936fdb7ccebbe6f917004a7eea08e60ab31f2fe1d5a2f82e6b7635c3", 0 },
    { "f32", &tiny_llama, LLAMAC_F16, "557a3b4ea50e4f4a9bc2b5fc87332c2a3de9529a87d3a6a2ee0a2ed466c94272", 0 },
    { "bf16, GPT-2", &tiny_gpt2, LLAMAC_F16, "37e774927f70a30ec4c836f3af93a3340760ed39eeec311fbf329358f4ac6200", 0 },
    { "f32, f16, bf16, q8, q4 and q4s", &tiny_mixed, LLAMAC_F16,
      "48d9f0b51eb0098ac520702cd15b32f751a641209da77e5d79ddb07c5cf2688b", 0 },
    { "q8", &tiny_q8, LLAMAC_F16, "bea9c5c7f67f21331499266f1f319bbff71cebf1a0a608449a4f27c67a2155e6", 0 },
    { "q6", &tiny_q6, LLAMAC_F16, "7a8327cf83d22ce372208152ed057d13b1043fa867ea5f1736fca74b1ea9850a", 0 },
    { "q4, GPT-2", &tiny_q4, LLAMAC_F16, "5c6f2a8fbbc02819dcebde35b395e634230d41ad9713ec650a51add0d7ea1ade", 0 },
    { "bf16, experts", &tiny_experts, LLAMAC_F16,
      "84e630725c0e208b244e9077e7d6e3677d2b95e4e4d886f8fe1fed327871d3f8", 0 },
    { "q4s", &tiny_q4s, LLAMAC_F16, "b85f2e60f49f48a30b39d0c076552c68539edbe91bab68e891de9666bd075212", 0 },
    { "f32, delta nets and gates", &tiny_recurrent, LLAMAC_F16,
      "a50994c08669c0b44e5c0218f2e107db668a9409cd7164f4af6e4b69aca5cb54", 0 },
    { "f32, Mamba 2", &tiny_mamba, LLAMAC_F16,
      "2844216ec2126bfe507ba6c49883521077fe4a6b092f3c4c9e4c3320b909c1e8", 0 },
    { "f32, layers of one part", &tiny_parts, LLAMAC_F16,
      "59ed6a580caa70d5ce96097cf72e72cdc43c0c1d26a2e87d59f51323d54b362f", 0 },
    { "f32 to q4s, latent attention", &tiny_latent, LLAMAC_F16,
      "c7b50725839371b0e12f9191011d5d0f48d625ec5b591f0f10f2acf0df38b9b4", 0 },
    { "f32, short convolutions and sigmoid routers", &tiny_mixers, LLAMAC_F16,
      "7c70d7fb4b53f0a0ee094a8fbe42b9d48d9b30c13caca94f145480e9dcf5e069", 0 },
    { "f16, different layers", &tiny_layered, LLAMAC_F16,
      "13241eb23f47da3d2d6007c9fd45ad23e85297d131f90defaff4b799c0538d34", 0 },
    { "f32, f16, bf16, q8, q4 and q4s, experts beside networks", &tiny_mixture, LLAMAC_F16,
      "960ee4719578514ad3c3f87db575862a4dab826d2660725ff66636c44dd2f3a8", 0 },
    { "q3, q2 and t2", &tiny_few_bits, LLAMAC_F16,
      "f3a2e4088a9c9e9ad23841ceb950563cb4da327d9a804529799e2cdf1f8afe2d", 0 },
    { "GGUF's types", &tiny_exact, LLAMAC_F16, "a0f35c649ac7aea05762ae7fea968e9818aa0683840a6292f84775e00e4e9347", 0 },
    { "GGUF's types, fast numerics", &tiny_exact, LLAMAC_F16,
      "67b90c8c826b4219d10de1071a983b587ae754b01b142c1983777c2ce9387dad", LLAMAC_FAST },
    { "bf16, GPT-2, fast numerics", &tiny_gpt2, LLAMAC_F16,
      "ff55cc7ae2fcbb3175fe920686ec708a31cf2d7b3a191912167423769fbc6e24", LLAMAC_FAST },
};

int llamac_selftest_at(size_t index, llamac_selftest_case *test) {
    if (index >= ARRAY_LEN(recorded)) return 0;
    *test = (llamac_selftest_case){ recorded[index].name, recorded[index].sha256 };
    return 1;
}

// What a run of a case holds. All zero: nothing.
struct run {
    struct tiny_tables *tables;
    uint8_t *file;
    llamac_model *model;
    llamac_session *session;
    llamac_row *rows;      // (sequences, chunk)
    float *logits;         // (sequences, chunk, vocab_size)
};

static void close_run(struct run *run) {
    llamac_session_close(&run->session);
    llamac_model_close(&run->model);
    mem_free(run->tables), mem_free(run->file), mem_free(run->rows), mem_free(run->logits);
}

static int open_run(struct run *run, const struct recorded *r, const llamac_selftest_options *o, llamac_error *err) {
    const char *purpose = "the self-test";
    const size_t rows = (size_t)(o->sequences * min_int(o->chunk, N));
    if (!(run->tables = mem_alloc(1, sizeof *run->tables, purpose, err))) return -1;
    tiny_lay_out(r->shape, run->tables);
    const size_t bytes = (size_t)run->tables->header.file_bytes;
    if (!(run->file = mem_alloc(1, bytes, purpose, err))) return -1;
    tiny_write(run->tables, run->file);
    if (!(run->rows = mem_alloc(rows, sizeof *run->rows, purpose, err))) return -1;
    if (!(run->logits = mem_alloc(rows * (size_t)r->shape->vocab, sizeof *run->logits, purpose, err))) return -1;
    const llamac_session_options options = {
        .n_sequences = o->sequences, .kv_dtype = r->kv_dtype, .threads = o->threads, .isa = o->isa,
        .numerics = r->numerics,
    };
    if (llamac_model_open(&run->model, run->file, bytes, err)) return -1;
    return llamac_session_open(&run->session, run->model, &options, err);
}

// Computes all positions, `chunk` at a time, and adds the logits of each sequence to its hash.
static int hash_logits(const struct run *run, const struct recorded *r, const llamac_selftest_options *o,
                       struct sha256 *hashes, llamac_error *err) {
    const int vocab = r->shape->vocab;
    for (int start = 0, n; start < N; start += n) {
        n = min_int(o->chunk, N - start);
        for (int q = 0; q < o->sequences; q++)
            for (int i = 0; i < n; i++)
                run->rows[q * n + i] = (llamac_row){ token_at(0, start + i, vocab), q, start + i, 1 };
        if (llamac_eval(run->session, run->rows, o->sequences * n, run->logits, NULL, err)) return -1;
        for (int q = 0; q < o->sequences; q++)
            sha256_add(&hashes[q], run->logits + (size_t)(q * n * vocab), sizeof(float) * (size_t)(n * vocab));
    }
    return 0;
}

int llamac_selftest(size_t index, const llamac_selftest_options *o, char sha256[LLAMAC_SHA256_DIGITS],
                    llamac_error *err) {
    if (index >= ARRAY_LEN(recorded))
        return bad_argument(err, "case %zu does not exist: there are %zu", index, ARRAY_LEN(recorded));
    if (o->chunk < 1) return bad_argument(err, "chunk is %d, expected at least 1", o->chunk);
    if (o->sequences < 1 || o->sequences > MAX_SEQUENCES)
        return bad_argument(err, "sequences is %d, expected 1 to %d", o->sequences, MAX_SEQUENCES);
    const struct recorded *r = &recorded[index];
    struct sha256 hashes[MAX_SEQUENCES];
    for (int q = 0; q < o->sequences; q++) sha256_start(&hashes[q]);
    struct run run = { 0 };
    const int failed = open_run(&run, r, o, err) || hash_logits(&run, r, o, hashes, err);
    close_run(&run);
    if (failed) return -1;
    for (int q = 0; q < o->sequences; q++) {
        uint8_t digest[HASH_BYTES];
        sha256_finish(&hashes[q], digest);
        for (int b = 0; b < HASH_BYTES; b++) snprintf(sha256 + 2 * b, 3, "%02x", digest[b]);
        if (strcmp(sha256, r->sha256)) break;
    }
    return 0;
}
