// SPDX-License-Identifier: MIT
// test_format.c - every way a file can lie: damaged, truncated, of another kind, or with true hashes and wrong fields.
#include <math.h>
#include "common.h"
#include "model.h"
#include "tiny_model.h"

static int refused(struct tiny_file file, size_t bytes) {
    llamac_model *model;
    if (!llamac_model_open(&model, file.data, bytes, &err)) { llamac_model_close(&model); return 0; }
    return 1;
}

static void damaged_files_are_refused_by_name(void) {
    struct tiny_file file = tiny_model(&tiny_gpt2);
    struct header *h = (struct header *)(void *)file.data;
    const size_t data = (size_t)h->sections[SECTION_DATA].offset;
    for (size_t bytes = 0; bytes < file.bytes; bytes += bytes < 6000 ? 1 : 997) {
        CHECK(refused(file, bytes), "truncated to %zu bytes", bytes);
        CHECK(bytes >= 1 ? strstr(err.message, "header") != NULL : strstr(err.message, "empty") != NULL, "%zu: %s",
            bytes, err.message);
    }
    for (size_t at = 0; at < data; at++) {   // every single bit, raw: the hash of its section must tell
        for (int bit = 0; bit < 8; bit++) {
            file.data[at] ^= (uint8_t)(1 << bit);
            int in_text = 0;
            for (int s = SECTION_METADATA; s < SECTION_DATA; s++)
                if (at >= h->sections[s].offset && at < h->sections[s].offset + h->sections[s].bytes) in_text = 1;
            if (!in_text) CHECK(refused(file, file.bytes), "bit %d of byte %zu", bit, at);
            file.data[at] ^= (uint8_t)(1 << bit);
        }
    }
    CHECK(!refused(file, file.bytes), "%s", err.message);
    free(file.data);
}

// With true hashes a changed field is either refused by its own check or means a different, valid model; never a crash.
static void lies_with_true_hashes_are_refused_or_harmless(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    struct header *h = (struct header *)(void *)file.data;
    uint8_t *copy = take(file.bytes);
    memcpy(copy, file.data, file.bytes);
    const size_t prefix = (size_t)h->sections[SECTION_DATA].offset,
        tables = (size_t)(h->sections[SECTION_TENSORS].offset + h->sections[SECTION_TENSORS].bytes);
    uint64_t state = 5;
    int accepted = 0;
    for (size_t at = 8; at < tables; at++) {
        for (int bit = 0; bit < 8; bit++) {
            if (at > sizeof *h + 600 && random_below(&state, 4)) continue;   // tables are long and alike: a sample
            file.data[at] ^= (uint8_t)(1 << bit);
            struct tiny_file view = file;
            const struct section_record *tensors = &h->sections[SECTION_TENSORS];
            int sane = 1;   // the rehash itself needs sections inside the file
            for (int s = 0; s < N_SECTIONS; s++) sane &= h->sections[s].offset % 64 == 0
                && h->sections[s].offset < file.bytes && h->sections[s].bytes <= file.bytes - h->sections[s].offset;
            if (sane && tensors->bytes % sizeof(struct tensor_record) == 0) tiny_rehash(file.data);
            llamac_model *model;
            if (!llamac_model_open(&model, view.data, view.bytes, &err)) {
                accepted++;
                float *logits = take(sizeof(float) * model->config->vocab_size);
                llamac_session *s = open_session(model, 1, 0, 1, NULL);
                const llamac_row row = { 0, 0, 0, 1 };
                CHECK(!llamac_eval(s, &row, 1, logits, NULL, &err), "%s", err.message);
                llamac_session_close(&s);
                free(logits);
                llamac_model_close(&model);
            } else {
                CHECK(err.message[0] && strlen(err.message) < sizeof err.message - 1, "a message");
            }
            memcpy(file.data, copy, prefix);
        }
    }
    CHECK(accepted > 0, "some fields may have other values");
    free(copy);
    free(file.data);
}

struct lie { size_t record_offset; size_t offset; size_t size; int64_t value; const char *named; };

static void every_field_has_its_own_check(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    struct header *h = (struct header *)(void *)file.data;
    const size_t config = (size_t)h->sections[SECTION_CONFIG].offset,
        layers = (size_t)h->sections[SECTION_LAYERS].offset;
    const size_t tensor = (size_t)h->sections[SECTION_TENSORS].offset + 3 * sizeof(struct tensor_record),
        section = offsetof(struct header, sections);
#define LIE(base, structure, member, value) { base, offsetof(struct structure, member), \
    sizeof(((struct structure *)0)->member), value, #member }
    const struct lie lies[] = {
        LIE(0, header, version, 2), LIE(0, header, numerics, 9), LIE(0, header, incompatible, 1),
            LIE(0, header, file_bytes, 5),
        LIE(0, header, alignment, 32), LIE(0, header, n_sections, 8), LIE(0, header, reserved[3], 1),
        LIE(section, section_record, offset, 64), LIE(section, section_record, name[2], 'x'),
            LIE(section, section_record, bytes, 1 << 30),
        LIE(config, config, dim, 0), LIE(config, config, dim, 40), LIE(config, config, n_layers, 4),
            LIE(config, config, n_heads, 5),
        LIE(config, config, n_kv_heads, 4), LIE(config, config, head_dim, 12), LIE(config, config, vocab_size, 0),
            LIE(config, config, n_token_ids, 102),
        LIE(config, config, context, 0), LIE(config, config, norm, 3), LIE(config, config, position, 0),
            LIE(config, config, activation, 77),
        LIE(config, config, tied_output, 2), LIE(config, config, norm_eps, 0x7fc00000),
            LIE(config, config, attention_scale, 0),
        LIE(config, config, embedding_scale, 0), LIE(config, config, residual_scale, 0x7f800000),
            LIE(config, config, logit_scale, 0xbf800000),
        LIE(config, config, attention_soft_cap, 0x7fc00000), LIE(config, config, logit_soft_cap, 0xbf800000),
            LIE(config, config, n_rope, 5),
        LIE(config, config, qk_norm, 4), LIE(config, config, qk_norm, QK_NORM_HEAD),
            LIE(config, config, qk_norm, QK_NORM_WHOLE),
        LIE(config, config, rope_dim[0], 11), LIE(config, config, rope_dim[1], 2),
            LIE(config, config, rope_attention_factor[0], 0),
        LIE(config, config, rope_original_context[2], 3), LIE(config, config, bos_id, -2),
            LIE(config, config, eos_id, 101), LIE(config, config, add_bos, 3),
        LIE(config, config, n_stop_ids, 17), LIE(config, config, stop_ids[0], 101),
            LIE(config, config, stop_ids[3], 1), LIE(config, config, reserved[100], 1),
        LIE(layers, layer_record, window, (1 << 24) + 1), LIE(layers, layer_record, rope, 1),
            LIE(layers, layer_record, placement, 5), LIE(layers, layer_record, placement, 0),
        LIE(layers, layer_record, placement, PLACEMENT_POST), LIE(layers, layer_record, placement, PLACEMENT_SANDWICH),
            LIE(layers, layer_record, ffn, 0),
        LIE(layers, layer_record, ffn, FFN_EXPERTS), LIE(layers, layer_record, ffn_dim, 0),
            LIE(layers, layer_record, n_experts, 4),
        LIE(layers, layer_record, n_experts_used, 1), LIE(layers, layer_record, expert_weights, 1),
            LIE(layers, layer_record, reserved[0], 1),
        LIE(tensor, tensor_record, name[3], 'x'), LIE(tensor, tensor_record, name[63], 'x'),
            LIE(tensor, tensor_record, dtype, 9), LIE(tensor, tensor_record, dtype, 4),
        LIE(tensor, tensor_record, n_dims, 1), LIE(tensor, tensor_record, n_dims, 7),
            LIE(tensor, tensor_record, shape[0], 17), LIE(tensor, tensor_record, shape[3], 1),
        LIE(tensor, tensor_record, offset, 64), LIE(tensor, tensor_record, bytes, 64),
            LIE(tensor, tensor_record, reserved[1], 1),
    };
    uint8_t *copy = take(file.bytes);
    memcpy(copy, file.data, file.bytes);
    for (size_t i = 0; i < ARRAY_LEN(lies); i++) {
        const struct lie *l = &lies[i];
        memcpy(file.data + l->record_offset + l->offset, &l->value, l->size);
        const int in_sections = l->record_offset == section;
        if (!in_sections) tiny_rehash(file.data);
        else { memset(h->sha256, 0, HASH_BYTES); hash(h, sizeof *h, h->sha256); }
        CHECK(refused(file, file.bytes), "%s accepted", l->named);
        char name[40];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(l->named, "["), l->named);
        // a size that contradicts another one may be told by the other's name
        const int told = strstr(err.message, name) != NULL || strstr(err.message, "tensor ") != NULL
            || strstr(err.message, "section ") != NULL;
        CHECK(told, "%s: %s", l->named, err.message);
        memcpy(file.data, copy, file.bytes);
    }
    free(copy);
    free(file.data);
}

// Layers with experts: numbers that contradict one another, tensors that are not there, and none of the memory that
// they would take.
static void lies_about_experts_are_refused(void) {
    struct tiny_file file = tiny_model(&tiny_experts);
    struct header *h = (struct header *)(void *)file.data;
    const size_t layers = (size_t)h->sections[SECTION_LAYERS].offset;
    struct layer_record *last = (struct layer_record *)(void *)(file.data + layers) + tiny_experts.n_layers - 1;
    llamac_model_close(&(llamac_model *){ open_model(file) });
    const struct layer_record sound = *last;
    const struct { struct layer_record record; const char *named; } lies[] = {
        { { .n_experts = 0 }, "n_experts is 0" }, { { .n_experts = 6 }, "n_experts 6 of layer" },
            { { .n_experts = 4 }, "n_experts 4 of layer" },
        { { .n_experts_used = 0 }, "n_experts_used is 0" }, { { .n_experts_used = 6 }, "n_experts_used is 6" },
            { { .n_experts = 4097 }, "expected 0 to 4096" },
        { { .n_experts = 4096 }, "n_experts is 4111 in all layers together, with 3 each" },
            { { .expert_weights = 2 }, "expert_weights is 2" }, { { .ffn = FFN_GATED }, "does not go with ffn gated" },
        { { .ffn_dim = 77 }, "ffn_dim 77 of layer" },
    };
    for (size_t i = 0; i < ARRAY_LEN(lies); i++) {
        const struct layer_record *l = &lies[i].record;
        *last = sound;
        if (strstr(lies[i].named, "n_experts_used")) last->n_experts_used = l->n_experts_used;
        else if (l->ffn) last->ffn = l->ffn;
        else if (l->ffn_dim) last->ffn_dim = l->ffn_dim;
        else if (l->expert_weights) last->expert_weights = l->expert_weights;
        else last->n_experts = l->n_experts;
        tiny_rehash(file.data);
        CHECK(refused(file, file.bytes) && strstr(err.message, lies[i].named), "%s: %s", lies[i].named, err.message);
    }
    free(file.data);
}

static void other_files_are_told_by_their_kind(void) {
    static const struct { const char *bytes; const char *told; } others[] = {
        { "GGUF\3\0\0\0", "GGUF" }, { "PK\3\4abc", "ZIP" }, { "\x20\0\0\0\0\0\0\0{\"a\":1}", "safetensors" },
            { "24ka\1\0\0\0", "llama2.c" }, { "hello world", "magic" },
    };
    uint8_t *page = take(256);
    for (size_t i = 0; i < ARRAY_LEN(others); i++) {
        memset(page, 0, 256);
        memcpy(page, others[i].bytes, i == 2 ? 15 : strlen(others[i].bytes));
        CHECK(refused((struct tiny_file){ page, 256 }, 256) && strstr(err.message, others[i].told), "%s: %s",
            others[i].told, err.message);
    }
    const int32_t v0[7] = { 64, 172, 5, 8, 4, 512, 512 };
    memcpy(page, v0, sizeof v0);
    CHECK(refused((struct tiny_file){ page, 256 }, 256) && strstr(err.message, "llama2.c"), "%s", err.message);
    CHECK(llamac_model_open(&(llamac_model *){ 0 }, page + 1, 200, &err) && err.code == LLAMAC_BAD_ARGUMENT,
        "unaligned");
    free(page);
}

// Sections of no bytes may not lie behind the end, either: the padding before them would be read. For the address
// sanitizer.
static void nothing_behind_the_end_is_read(void) {
    struct header h = { .magic = FORMAT_MAGIC, .version = FORMAT_VERSION, .numerics = FORMAT_NUMERICS, .alignment = 64,
        .n_sections = N_SECTIONS };
    // a config of one byte, and all else empty
    const size_t config_at = round_up(sizeof h, 64), bytes = config_at + 1;
    for (int s = 0; s < N_SECTIONS; s++) {
        snprintf(h.sections[s].name, sizeof h.sections[s].name, "%s", llamac_section_at((size_t)s));
        h.sections[s].offset = s ? config_at + 64 : config_at;
        h.sections[s].bytes = s == 0;
    }
    h.file_bytes = bytes;
    hash(&h, sizeof h, h.sha256);
    void *exact = NULL;   // not a byte more
    CHECK(!posix_memalign(&exact, 64, bytes), "memory");
    memset(exact, 0, bytes);
    memcpy(exact, &h, sizeof h);
    CHECK(refused((struct tiny_file){ exact, bytes }, bytes) && strstr(err.message, "section table, layers")
        && strstr(err.message, "after the file"), "%s", err.message);
    free(exact);
}

// The table is copied, so its size is checked first. The test's file is zero pages but for its header: a copy would
// show as 160 MiB.
static void too_many_tensors_are_refused_before_they_are_copied(void) {
    struct header h = { .magic = FORMAT_MAGIC, .version = FORMAT_VERSION, .numerics = FORMAT_NUMERICS, .alignment = 64,
        .n_sections = N_SECTIONS };
    const uint64_t bytes[N_SECTIONS] = { sizeof(struct config), sizeof(struct layer_record),
        (FORMAT_MAX_TENSORS + 1) * sizeof(struct tensor_record) };
    uint64_t end = sizeof h;
    struct sha256 id;
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) {
        snprintf(h.sections[s].name, sizeof h.sections[s].name, "%s", llamac_section_at((size_t)s));
        h.sections[s].offset = round_up(end, FORMAT_ALIGNMENT);
        h.sections[s].bytes = bytes[s];
        end = h.sections[s].offset + bytes[s];
        sha256_add(&id, h.sections[s].sha256, HASH_BYTES);
    }
    h.file_bytes = end;
    sha256_finish(&id, h.id);
    hash(&h, sizeof h, h.sha256);
    uint8_t *memory = calloc(end + FORMAT_ALIGNMENT, 1), *data = memory;
    CHECK(memory, "memory");
    while ((uintptr_t)data % FORMAT_ALIGNMENT) data++;
    memcpy(data, &h, sizeof h);
    llamac_test_fail_allocation(1);   // none is expected
    CHECK(refused((struct tiny_file){ data, end }, end)
        && strstr(err.message, "expected at most 167772160 (1048576 tensors)"), "%s", err.message);
    llamac_test_fail_allocation(0);
    free(memory);
}

// -1 where the walk ends with an error; it does so again when it is asked again.
static int count_slots(const struct config *config, const struct layer_record *layers) {
    llamac_walk walk = { .config = config, .layers = layers };
    llamac_slot slot;
    int n = 0, result;
    while ((result = llamac_slot_next(&walk, &slot)) > 0) n++;
    return result || llamac_slot_next(&walk, &slot) ? -1 : n;
}

// Before a config has been checked: what its fields would index is looked up only where that exists.
static void slots_of_damaged_configs_are_refused(void) {
    struct config config = tiny_config(&tiny_llama);
    struct layer_record layers[3] = { { .ffn = FFN_GATED }, { .ffn = FFN_EXPERTS, .n_experts = 5 },
        { .ffn = FFN_GATED, .n_experts = UINT32_MAX } };
    CHECK(count_slots(&config, layers) > 50, "%d slots", count_slots(&config, layers));
    const uint32_t wrong[] = { FORMAT_MAX_ROPE + 1, FORMAT_MAX_EXPERTS + 1, 1000000, UINT32_MAX };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        layers[1].n_experts = wrong[i];
        CHECK((count_slots(&config, layers) < 0) == (i > 0), "n_experts %u", wrong[i]);
    }
    layers[1].n_experts = 5;
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        config.n_rope = wrong[i];
        CHECK(count_slots(&config, layers) < 0, "n_rope %u", wrong[i]);
    }
}

static void sha256_matches_the_standard(void) {
    uint8_t digest[32], expected[32] = { 0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d,
        0xae, 0x22, 0x23,
                                         0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2,
                                             0x00, 0x15, 0xad };
    hash("abc", 3, digest);
    CHECK(!memcmp(digest, expected, 32), "abc");
    uint8_t data[300], whole[32];
    for (int i = 0; i < 300; i++) data[i] = (uint8_t)i;
    for (size_t n = 0; n < 300; n++) {
        hash(data, n, whole);
        struct sha256 h;
        sha256_start(&h);
        sha256_add(&h, data, n / 3), sha256_add(&h, data + n / 3, n - n / 3);
        sha256_finish(&h, digest);
        CHECK(!memcmp(digest, whole, 32), "%zu bytes in two parts", n);
    }
}

int main(void) {
    RUN(sha256_matches_the_standard);
    RUN(damaged_files_are_refused_by_name);
    RUN(every_field_has_its_own_check);
    RUN(lies_with_true_hashes_are_refused_or_harmless);
    RUN(lies_about_experts_are_refused);
    RUN(other_files_are_told_by_their_kind);
    RUN(nothing_behind_the_end_is_read);
    RUN(too_many_tensors_are_refused_before_they_are_copied);
    RUN(slots_of_damaged_configs_are_refused);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_format");
}
