// SPDX-License-Identifier: MIT
// format.c - the one table of the file's fields, and the check of everything in a file that is not tensor data or text.
//
// Order: header (magic, version, hash), sections (place, hash, padding), config, layers, tensor records (ranges of each
// field, then place). Every message names the section or the field, the number found and what was expected.
#include "format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "sha256.h"

// ---- the table of fields

#define SIZE_OF(structure, member) sizeof(((struct structure *)0)->member)
#define NUMBER(record, structure, member, type, lo, hi, names) \
    { record, #member, LLAMAC_TYPE_##type, offsetof(struct structure, member), \
      SIZE_OF(structure, member) / (LLAMAC_TYPE_##type == LLAMAC_TYPE_U64 ? 8 : 4), lo, hi, names }
#define BYTES(record, structure, member) { record, #member, LLAMAC_TYPE_BYTES, offsetof(struct structure, member), \
    SIZE_OF(structure, member), 0, 0, NULL }
#define TEXT(record, structure, member) { record, #member, LLAMAC_TYPE_TEXT, offsetof(struct structure, member), \
    SIZE_OF(structure, member), 0, 0, NULL }
#define HEADER(member, type, lo, hi) NUMBER("header", header, member, type, lo, hi, NULL)
#define SECTION(member, type, lo, hi) NUMBER("section", section_record, member, type, lo, hi, NULL)
#define CONFIG(member, type, lo, hi) NUMBER("config", config, member, type, lo, hi, NULL)
#define CONFIG_NAMED(member, hi, names) NUMBER("config", config, member, U32, 1, hi, names)
#define LAYER(member, type, lo, hi) NUMBER("layer", layer_record, member, type, lo, hi, NULL)
#define LAYER_NAMED(member, hi, names) NUMBER("layer", layer_record, member, U32, 1, hi, names)
#define TENSOR(member, type, lo, hi) NUMBER("tensor", tensor_record, member, type, lo, hi, NULL)

#define MAX_FILE 0x1p52        // sizes stay exact in a double, and sums of them in 64 bits
#define MAX_DIM (1 << 20)
#define MAX_VOCAB (1 << 24)
#define MAX_CONTEXT (1 << 24)  // a position is exact in f32
#define TINY 1e-30
#define HUGE_SCALE 1e6

static const llamac_field fields[] = {
    BYTES("header", header, magic),
    HEADER(version, U32, FORMAT_VERSION, FORMAT_VERSION),
    HEADER(numerics, U32, FORMAT_NUMERICS, FORMAT_NUMERICS),
    HEADER(compatible, U64, 0, 0x1p64),   // any bits
    HEADER(incompatible, U64, 0, 0),
    HEADER(file_bytes, U64, sizeof(struct header), MAX_FILE),
    HEADER(alignment, U32, FORMAT_ALIGNMENT, FORMAT_ALIGNMENT),
    HEADER(n_sections, U32, N_SECTIONS, N_SECTIONS),
    BYTES("header", header, id),
    BYTES("header", header, sha256),
    BYTES("header", header, reserved),

    TEXT("section", section_record, name),
    SECTION(offset, U64, sizeof(struct header), MAX_FILE),
    SECTION(bytes, U64, 0, MAX_FILE),
    BYTES("section", section_record, sha256),

    CONFIG(dim, U32, 1, MAX_DIM),
    CONFIG(n_layers, U32, 1, 4096),
    CONFIG(n_heads, U32, 1, 4096),
    CONFIG(n_kv_heads, U32, 1, 4096),
    CONFIG(head_dim, U32, 1, 4096),
    CONFIG(vocab_size, U32, 1, MAX_VOCAB),
    CONFIG(n_token_ids, U32, 1, MAX_VOCAB),
    CONFIG(context, U32, 1, MAX_CONTEXT),
    CONFIG_NAMED(norm, NORM_LAYER, "rms,layer"),
    CONFIG_NAMED(position, POSITION_ROPE, "none,learned,rope"),
    CONFIG_NAMED(activation, ACTIVATION_QUICK_GELU, "silu,gelu_tanh,gelu_erf,relu,quick_gelu"),
    CONFIG(tied_output, U32, 0, 1),
    CONFIG(norm_eps, F32, 0, 1),
    CONFIG(attention_scale, F32, TINY, HUGE_SCALE),
    CONFIG(embedding_scale, F32, TINY, HUGE_SCALE),
    CONFIG(residual_scale, F32, TINY, HUGE_SCALE),
    CONFIG(logit_scale, F32, TINY, HUGE_SCALE),
    CONFIG(attention_soft_cap, F32, 0, HUGE_SCALE),
    CONFIG(logit_soft_cap, F32, 0, HUGE_SCALE),
    CONFIG(n_rope, U32, 0, FORMAT_MAX_ROPE),
    CONFIG(rope_dim, U32, 0, 4096),
    CONFIG(rope_original_context, U32, 0, MAX_CONTEXT),
    CONFIG(rope_attention_factor, F32, 0, HUGE_SCALE),
    CONFIG(bos_id, I32, -1, MAX_VOCAB - 1),
    CONFIG(eos_id, I32, -1, MAX_VOCAB - 1),
    CONFIG(add_bos, U32, 0, 1),
    CONFIG(add_eos, U32, 0, 1),
    CONFIG(n_stop_ids, U32, 0, FORMAT_MAX_STOP_IDS),
    CONFIG(stop_ids, I32, 0, MAX_VOCAB - 1),
    NUMBER("config", config, qk_norm, U32, QK_NORM_NONE, QK_NORM_LAYER_HEAD, "none,head,whole,layer_head"),
    BYTES("config", config, reserved),

    LAYER(window, U32, 0, MAX_CONTEXT),
    LAYER(rope, I32, -1, FORMAT_MAX_ROPE - 1),
    LAYER_NAMED(placement, PLACEMENT_PARALLEL, "pre,post,sandwich,parallel"),
    LAYER_NAMED(ffn, FFN_EXPERTS, "plain,gated,experts"),
    LAYER(ffn_dim, U32, 1, MAX_DIM),
    LAYER(n_experts, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER(n_experts_used, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER(expert_weights, U32, 0, 1),
    BYTES("layer", layer_record, reserved),

    TEXT("tensor", tensor_record, name),
    NUMBER("tensor", tensor_record, dtype, U32, 1, LLAMAC_N_DTYPES - 1, "f32,f16,bf16,q8,q4,q4s"),
    TENSOR(n_dims, U32, 1, FORMAT_MAX_DIMS),
    TENSOR(shape, U64, 0, MAX_VOCAB),
    TENSOR(offset, U64, sizeof(struct header), MAX_FILE),
    TENSOR(bytes, U64, 1, MAX_FILE),
    BYTES("tensor", tensor_record, sha256),
    BYTES("tensor", tensor_record, reserved),
};

const llamac_field *llamac_fields(size_t *n) {
    *n = ARRAY_LEN(fields);
    return fields;
}

size_t llamac_record_bytes(const char *record) {
    static const struct { const char *name; size_t bytes; } records[] = {
        { "header", sizeof(struct header) - sizeof(struct section_record[N_SECTIONS]) },
            { "section", sizeof(struct section_record) },
        { "config", sizeof(struct config) }, { "layer", sizeof(struct layer_record) },
            { "tensor", sizeof(struct tensor_record) },
    };
    for (size_t i = 0; i < ARRAY_LEN(records); i++)
        if (!strcmp(records[i].name, record)) return records[i].bytes;
    return 0;
}

void format_value_name(const char *record, const char *member, uint32_t value, char name[FORMAT_VALUE_BYTES]) {
    const char *at = NULL;
    double number = value;
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        if (!strcmp(fields[i].record, record) && !strcmp(fields[i].name, member)) at = fields[i].names,
            number -= fields[i].min;
    for (; at && number > 0; number--) {
        at = strchr(at, ',');
        if (at) at++;
    }
    size_t n = at && number >= 0 ? strcspn(at, ",") : 0;
    if (n >= FORMAT_VALUE_BYTES) n = FORMAT_VALUE_BYTES - 1;
    if (n) memcpy(name, at, n);
    name[n] = 0;
}

static const char *const section_names[N_SECTIONS] = {
    "config", "layers", "tensors", "metadata", "tokenizer", "spm", "template", "probes", "data"
};
const char *llamac_section_at(size_t index) { return index < N_SECTIONS ? section_names[index] : NULL; }

// ---- checks of one record

static double number_at(const llamac_field *f, const uint8_t *record, uint32_t i) {
    uint32_t u32;
    int32_t i32;
    float f32;
    uint64_t u64;
    const uint8_t *p = record + f->offset + (size_t)i * (f->type == LLAMAC_TYPE_U64 ? 8 : 4);
    switch (f->type) {
    case LLAMAC_TYPE_U32: memcpy(&u32, p, 4); return u32;
    case LLAMAC_TYPE_I32: memcpy(&i32, p, 4); return i32;
    case LLAMAC_TYPE_F32: memcpy(&f32, p, 4); return (double)f32;
    default: memcpy(&u64, p, 8); return (double)u64;
    }
}

// A text field holds a zero-terminated name and zeros after it.
static int text_is_clean(const char *text, uint32_t bytes) {
    uint32_t n = 0;
    while (n < bytes && text[n] >= '!' && text[n] <= '~') n++;
    if (n == 0 || n == bytes) return 0;
    while (n < bytes) if (text[n++]) return 0;
    return 1;
}

static int all_zero(const uint8_t *p, size_t bytes) {
    while (bytes--) if (*p++) return 0;
    return 1;
}

// Range of every number of a record; reserved bytes are zero; texts are clean. `where` names the record in messages.
static int check_record(const char *name, const char *where, const uint8_t *record, llamac_error *err) {
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        const llamac_field *f = &fields[i];
        if (strcmp(f->record, name)) continue;
        if (f->type == LLAMAC_TYPE_TEXT) {
            if (!text_is_clean((const char *)record + f->offset, f->count))
                return err_set(err, LLAMAC_BAD_MODEL, "%s: %s is not a zero-padded printable name", where, f->name);
        } else if (f->type == LLAMAC_TYPE_BYTES) {
            if (!strcmp(f->name, "reserved") && !all_zero(record + f->offset, f->count))
                return err_set(err, LLAMAC_BAD_MODEL, "%s: reserved bytes are not zero", where);
        } else {
            for (uint32_t e = 0; e < f->count; e++) {
                double x = number_at(f, record, e);
                if (x >= f->min && x <= f->max) continue;   // false for a NaN, too
                char element[24] = "";
                if (f->count > 1) snprintf(element, sizeof element, "[%" PRIu32 "]", e);
                return err_set(err, LLAMAC_BAD_MODEL, "%s: %s%s is %.9g, expected %.9g to %.9g%s%s%s", where, f->name,
                    element, x, f->min, f->max,
                               f->names ? " (" : "", f->names ? f->names : "", f->names ? ")" : "");
            }
        }
    }
    return 0;
}

static void hash_of(const void *data, size_t bytes, uint8_t digest[HASH_BYTES]) {
    struct sha256 h;
    sha256_start(&h);
    sha256_add(&h, data, bytes);
    sha256_finish(&h, digest);
}

// ---- header and sections

// What other file types begin with, so that the message can say what to do.
static int refuse_foreign(const uint8_t *data, size_t bytes, llamac_error *err) {
    static const struct { const char *magic; size_t bytes, at; const char *kind; } foreign[] = {
        { "GGUF", 4, 0, "a GGUF file" }, { "lmgg", 4, 0, "an old GGML file" }, { "tjgg", 4, 0, "an old GGML file" },
        { "PK\3\4", 4, 0, "a ZIP archive (a PyTorch checkpoint?)" }, { "24ka", 4, 0, "a llama2.c checkpoint" },
        { "\200\2", 2, 0, "a Python pickle (an old PyTorch checkpoint?)" }, { "{\"", 2, 8, "a safetensors file" },
    };
    for (size_t i = 0; i < ARRAY_LEN(foreign); i++)
        if (bytes >= foreign[i].at + foreign[i].bytes && !memcmp(data + foreign[i].at, foreign[i].magic,
            foreign[i].bytes))
            return err_set(err, LLAMAC_BAD_MODEL, "this is %s: run `llamac export` on it first", foreign[i].kind);
    // llama2.c's version 0 has no magic: seven int32 (dim, hidden_dim, layers, heads, KV heads, vocabulary, context)
    int32_t v0[7];
    if (bytes >= sizeof v0) {
        memcpy(v0, data, sizeof v0);
        if (v0[0] > 0 && v0[0] <= MAX_DIM && v0[1] > 0 && v0[1] <= MAX_DIM && v0[2] > 0 && v0[2] <= 4096 && v0[3] > 0
            && v0[4] > 0
            && v0[4] <= v0[3] && v0[0] % v0[3] == 0 && v0[5] != 0 && v0[6] > 0 && v0[6] <= MAX_CONTEXT)
            return err_set(err, LLAMAC_BAD_MODEL,
                "this looks like a llama2.c checkpoint: run `llamac export` on it first");
    }
    return err_set(err, LLAMAC_BAD_MODEL,
        "this is not a llamac file: it does not begin with the magic \"\\x89llamac\\n\"");
}

static int check_header(const struct header *h, size_t bytes, llamac_error *err) {
    if (h->version != FORMAT_VERSION)
        return err_set(err, LLAMAC_BAD_MODEL,
            "header: version is %" PRIu32 ", this library reads version %d: the file %s", h->version, FORMAT_VERSION,
                       h->version > FORMAT_VERSION && h->version < 1000 ? "needs a newer llamac, which wrote it"
                           : "is damaged");
    struct header copy = *h;
    uint8_t digest[HASH_BYTES];
    memset(copy.sha256, 0, sizeof copy.sha256);
    hash_of(&copy, sizeof copy, digest);
    if (memcmp(digest, h->sha256, HASH_BYTES))
        return err_set(err, LLAMAC_BAD_MODEL,
            "header: its SHA-256 does not match: the first %zu bytes of the file are damaged", sizeof copy);
    if (h->incompatible)
        return err_set(err, LLAMAC_UNSUPPORTED,
            "header: incompatible has feature bits 0x%" PRIx64 " that this library does not know: "
                       "the file needs a newer llamac", h->incompatible);
    if (h->numerics != FORMAT_NUMERICS)
        return err_set(err, LLAMAC_UNSUPPORTED,
            "header: numerics is %" PRIu32 ", this library computes by numerics %d: %s llamac wrote the "
            "file, and would give other bits; use that one, or export the model again", h->numerics, FORMAT_NUMERICS,
                       h->numerics > FORMAT_NUMERICS ? "a newer" : "an older");
    if (check_record("header", "header", (const uint8_t *)h, err)) return -1;
    if (h->file_bytes != bytes)
        return err_set(err, LLAMAC_BAD_MODEL, "header: file_bytes is %" PRIu64 " but the file has %zu bytes: it is %s",
            h->file_bytes, bytes,
                       bytes < h->file_bytes ? "truncated" : "too long");
    return 0;
}

static int check_section_places(const struct header *h, const uint8_t *data, size_t bytes, llamac_error *err) {
    uint64_t end = sizeof(struct header);
    struct sha256 id;
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) {
        const struct section_record *r = &h->sections[s];
        char where[40];
        snprintf(where, sizeof where, "section table, %s", section_names[s]);
        if (check_record("section", where, (const uint8_t *)r, err)) return -1;
        if (strcmp(r->name, section_names[s])) return err_set(err, LLAMAC_BAD_MODEL, "%s: name is \"%s\"", where,
            r->name);
        uint64_t start = round_up(end, FORMAT_ALIGNMENT);
        if (r->offset != start) return err_set(err, LLAMAC_BAD_MODEL, "%s: offset is %" PRIu64 ", expected %" PRIu64,
            where, r->offset, start);
        if (start > bytes || r->bytes > bytes - start)
            return err_set(err, LLAMAC_BAD_MODEL,
                "%s: bytes is %" PRIu64 ", which at %" PRIu64 " ends after the file (%zu bytes)", where, r->bytes,
                start,
                           bytes);
        if (!all_zero(data + end, start - end)) return err_set(err, LLAMAC_BAD_MODEL,
            "%s: the padding before it is not zero", where);
        end = start + r->bytes;
        sha256_add(&id, r->sha256, HASH_BYTES);
    }
    if (end != bytes) return err_set(err, LLAMAC_BAD_MODEL,
        "header: the sections end at %" PRIu64 " but the file has %zu bytes", end, bytes);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&id, digest);
    if (memcmp(digest, h->id, HASH_BYTES)) return err_set(err, LLAMAC_BAD_MODEL,
        "header: id is not the hash of the sections' hashes");
    return 0;
}

static int check_section_hash(const struct flat_file *file, enum section s, llamac_error *err) {
    const struct section_record *r = &file->header->sections[s];
    uint8_t digest[HASH_BYTES];
    hash_of(file->tables + r->offset, (size_t)r->bytes, digest);
    if (memcmp(digest, r->sha256, HASH_BYTES))
        return err_set(err, LLAMAC_BAD_MODEL, "section %s: its SHA-256 does not match: the section is damaged",
            section_names[s]);
    return 0;
}

// ---- config, layers, tensors

static int check_config(const struct config *c, llamac_error *err) {
    if (check_record("config", "config", (const uint8_t *)c, err)) return -1;
    if (c->n_heads % c->n_kv_heads)
        return err_set(err, LLAMAC_BAD_MODEL, "config: n_heads %" PRIu32 " is no multiple of n_kv_heads %" PRIu32,
            c->n_heads, c->n_kv_heads);
    if ((uint64_t)c->n_heads * c->head_dim > MAX_DIM)
        return err_set(err, LLAMAC_BAD_MODEL, "config: n_heads %" PRIu32 " times head_dim %" PRIu32 " exceeds %d",
            c->n_heads, c->head_dim, MAX_DIM);
    if (c->n_token_ids > c->vocab_size)
        return err_set(err, LLAMAC_BAD_MODEL, "config: n_token_ids %" PRIu32 " exceeds vocab_size %" PRIu32,
            c->n_token_ids, c->vocab_size);
    if (c->bos_id >= (int64_t)c->vocab_size || c->eos_id >= (int64_t)c->vocab_size)
        return err_set(err, LLAMAC_BAD_MODEL,
            "config: bos_id %" PRId32 " or eos_id %" PRId32 " is no id below vocab_size %" PRIu32,
                       c->bos_id, c->eos_id, c->vocab_size);
    if ((c->add_bos && c->bos_id < 0) || (c->add_eos && c->eos_id < 0))
        return err_set(err, LLAMAC_BAD_MODEL,
            "config: add_bos or add_eos is set, but bos_id is %" PRId32 " and eos_id is %" PRId32, c->bos_id,
            c->eos_id);
    for (uint32_t i = 0; i < FORMAT_MAX_STOP_IDS; i++)
        if (i < c->n_stop_ids ? (uint32_t)c->stop_ids[i] >= c->vocab_size : c->stop_ids[i] != 0)
            return err_set(err, LLAMAC_BAD_MODEL, "config: stop_ids[%" PRIu32 "] is %" PRId32 ", expected %s", i,
                c->stop_ids[i],
                           i < c->n_stop_ids ? "an id below vocab_size" : "0 (unused)");
    if ((c->position == POSITION_ROPE) != (c->n_rope > 0)) {
        char position[FORMAT_VALUE_BYTES];
        format_value_name("config", "position", c->position, position);
        return err_set(err, LLAMAC_BAD_MODEL, "config: n_rope is %" PRIu32 " with position %s", c->n_rope, position);
    }
    for (uint32_t i = 0; i < FORMAT_MAX_ROPE; i++) {
        int used = i < c->n_rope;
        if (used ? c->rope_dim[i] == 0 || c->rope_dim[i] % 2 || c->rope_dim[i] > c->head_dim : c->rope_dim[i] != 0)
            return err_set(err, LLAMAC_BAD_MODEL,
                "config: rope_dim[%" PRIu32 "] is %" PRIu32 ", expected %s (n_rope is %" PRIu32 ")", i, c->rope_dim[i],
                           used ? "an even number up to head_dim" : "0", c->n_rope);
        if (used ? !(c->rope_attention_factor[i] > 0) : c->rope_attention_factor[i] != 0)
            return err_set(err, LLAMAC_BAD_MODEL, "config: rope_attention_factor[%" PRIu32 "] is %.9g, expected %s", i,
                           (double)c->rope_attention_factor[i], used ? "more than 0" : "0 (unused)");
        if (!used && c->rope_original_context[i])
            return err_set(err, LLAMAC_BAD_MODEL,
                "config: rope_original_context[%" PRIu32 "] is %" PRIu32 ", expected 0 (unused)", i,
                           c->rope_original_context[i]);
    }
    return 0;
}

static int check_layer(const struct config *c, const struct layer_record *layer, uint32_t l, llamac_error *err) {
    char where[32];
    snprintf(where, sizeof where, "layer %" PRIu32, l);
    if (check_record("layer", where, (const uint8_t *)layer, err)) return -1;
    if (layer->rope >= (int32_t)c->n_rope)
        return err_set(err, LLAMAC_BAD_MODEL, "%s: rope is %" PRId32 ", but n_rope is %" PRIu32, where, layer->rope,
            c->n_rope);
    int experts = layer->ffn == FFN_EXPERTS;
    char ffn[FORMAT_VALUE_BYTES];
    format_value_name("layer", "ffn", layer->ffn, ffn);
    if (experts ? layer->n_experts == 0 || layer->n_experts_used == 0
        || layer->n_experts_used > layer->n_experts : layer->n_experts || layer->n_experts_used)
        return err_set(err, LLAMAC_BAD_MODEL,
            "%s: n_experts is %" PRIu32 " and n_experts_used is %" PRIu32 ", which does not go with ffn %s", where,
                       layer->n_experts, layer->n_experts_used, ffn);
    if (!experts && layer->expert_weights)
        return err_set(err, LLAMAC_BAD_MODEL, "%s: expert_weights is %" PRIu32 ", expected 0 with ffn %s", where,
            layer->expert_weights, ffn);
    return 0;
}

// Shape and size of one tensor record, and that it lies right behind the one before it.
static int check_tensor(const struct tensor_record *t, size_t i, uint64_t *end, uint64_t data_end, llamac_error *err) {
    char where[96];
    snprintf(where, sizeof where, "tensor %zu", i);
    if (check_record("tensor", where, (const uint8_t *)t, err)) return -1;
    snprintf(where, sizeof where, "tensor %s", t->name);
    uint64_t matrices = 1;
    for (uint32_t d = 0; d < FORMAT_MAX_DIMS; d++) {
        if ((t->shape[d] > 0) != (d < t->n_dims))
            return err_set(err, LLAMAC_BAD_MODEL, "%s: shape[%" PRIu32 "] is %" PRIu64 " with n_dims %" PRIu32, where,
                d, t->shape[d], t->n_dims);
        if (d + 2 < t->n_dims && mul_overflows(matrices, t->shape[d], &matrices))
            return err_set(err, LLAMAC_BAD_MODEL, "%s: shape overflows", where);
    }
    uint64_t bytes;
    if (t->n_dims == 1) {
        if (t->dtype != LLAMAC_F32) return err_set(err, LLAMAC_BAD_MODEL, "%s: dtype is %s, but a vector is f32",
            where, llamac_dtype_name((int)t->dtype));
        bytes = 4 * t->shape[0];
    } else {
        size_t one = llamac_matrix_bytes((int)t->dtype, t->shape[t->n_dims - 2], t->shape[t->n_dims - 1]);
        if (!one) return err_set(err, LLAMAC_BAD_MODEL, "%s: its size overflows", where);
        if (mul_overflows(one, matrices, &bytes)) return err_set(err, LLAMAC_BAD_MODEL, "%s: shape overflows", where);
    }
    if (t->bytes != bytes) return err_set(err, LLAMAC_BAD_MODEL,
        "%s: bytes is %" PRIu64 ", its shape and dtype need %" PRIu64, where, t->bytes, bytes);
    uint64_t start = round_up(*end, FORMAT_ALIGNMENT);
    if (t->offset != start) return err_set(err, LLAMAC_BAD_MODEL, "%s: offset is %" PRIu64 ", expected %" PRIu64,
        where, t->offset, start);
    if (start > data_end || bytes > data_end - start)
        return err_set(err, LLAMAC_BAD_MODEL, "%s: its %" PRIu64 " bytes at %" PRIu64 " end after the data section",
            where, bytes, start);
    *end = start + bytes;
    return 0;
}

static int check_tables(struct flat_file *file, llamac_error *err) {
    const struct section_record *sections = file->header->sections, *data = &sections[SECTION_DATA];
    if (sections[SECTION_CONFIG].bytes != sizeof(struct config))
        return err_set(err, LLAMAC_BAD_MODEL, "section config: bytes is %" PRIu64 ", expected %zu",
            sections[SECTION_CONFIG].bytes, sizeof(struct config));
    file->config = (const struct config *)(const void *)(file->tables + sections[SECTION_CONFIG].offset);
    if (check_config(file->config, err)) return -1;

    if (sections[SECTION_LAYERS].bytes != sizeof(struct layer_record) * (uint64_t)file->config->n_layers)
        return err_set(err, LLAMAC_BAD_MODEL,
            "section layers: bytes is %" PRIu64 ", n_layers %" PRIu32 " needs %" PRIu64, sections[SECTION_LAYERS].bytes,
                       file->config->n_layers, sizeof(struct layer_record) * (uint64_t)file->config->n_layers);
    file->layers = (const struct layer_record *)(const void *)(file->tables + sections[SECTION_LAYERS].offset);
    for (uint32_t l = 0; l < file->config->n_layers; l++)
        if (check_layer(file->config, &file->layers[l], l, err)) return -1;

    if (sections[SECTION_TENSORS].bytes % sizeof(struct tensor_record) || sections[SECTION_TENSORS].bytes == 0)
        return err_set(err, LLAMAC_BAD_MODEL, "section tensors: bytes is %" PRIu64 ", expected a multiple of %zu",
            sections[SECTION_TENSORS].bytes,
                       sizeof(struct tensor_record));
    file->n_tensors = (size_t)(sections[SECTION_TENSORS].bytes / sizeof(struct tensor_record));
    file->tensors = (const struct tensor_record *)(const void *)(file->tables + sections[SECTION_TENSORS].offset);
    uint64_t end = data->offset;
    struct sha256 hashes;
    sha256_start(&hashes);
    for (size_t i = 0; i < file->n_tensors; i++) {
        if (check_tensor(&file->tensors[i], i, &end, data->offset + data->bytes, err)) return -1;
        sha256_add(&hashes, file->tensors[i].sha256, HASH_BYTES);
    }
    if (end != data->offset + data->bytes)
        return err_set(err, LLAMAC_BAD_MODEL, "section data: bytes is %" PRIu64 ", its tensors need %" PRIu64,
            data->bytes, end - data->offset);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&hashes, digest);
    if (memcmp(digest, data->sha256, HASH_BYTES))
        return err_set(err, LLAMAC_BAD_MODEL, "section data: its SHA-256 is not that of the tensors' hashes");
    return 0;
}

// The header has been checked: it says how much there is to copy.
static int copy_tables(struct flat_file *file, const struct header *checked, llamac_error *err) {
    const struct section_record *tensors = &checked->sections[SECTION_TENSORS];
    if (tensors->bytes > FORMAT_MAX_TENSORS * sizeof(struct tensor_record))
        return err_set(err, LLAMAC_BAD_MODEL,
            "section tensors: bytes is %" PRIu64 ", expected at most %zu (%d tensors)", tensors->bytes,
                       FORMAT_MAX_TENSORS * sizeof(struct tensor_record), FORMAT_MAX_TENSORS);
    file->table_bytes = (size_t)(tensors->offset + tensors->bytes);
    file->tables = mem_alloc(1, file->table_bytes, "the file's tables", err);
    if (!file->tables) return -1;
    memcpy(file->tables, checked, sizeof *checked);
    memcpy(file->tables + sizeof *checked, file->data + sizeof *checked, file->table_bytes - sizeof *checked);
    file->header = (const struct header *)(const void *)file->tables;
    return 0;
}

int format_open(struct flat_file *file, const void *data, size_t bytes, llamac_error *err) {
    const uint8_t *p = data;
    *file = (struct flat_file){ .data = p, .bytes = bytes };
    if ((uintptr_t)p % FORMAT_ALIGNMENT)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "the model's memory is not aligned to %d bytes", FORMAT_ALIGNMENT);
    const size_t magic = sizeof FORMAT_MAGIC - 1;
    if (bytes == 0) return err_set(err, LLAMAC_BAD_MODEL, "the file is empty");
    if (memcmp(p, FORMAT_MAGIC, bytes < magic ? bytes : magic)) return refuse_foreign(p, bytes, err);
    struct header header;
    if (bytes < sizeof header)
        return err_set(err, LLAMAC_BAD_MODEL, "header: the file is truncated: it has %zu bytes, the header alone %zu",
            bytes, sizeof header);
    memcpy(&header, p, sizeof header);
    if (check_header(&header, bytes, err) || check_section_places(&header, p, bytes, err)
        || copy_tables(file, &header, err)) return -1;
    int failed = 0;
    for (int s = SECTION_CONFIG; s <= SECTION_TENSORS && !failed;
        s++) failed = check_section_hash(file, (enum section)s, err);
    if (!failed && !check_tables(file, err)) return 0;
    format_close(file);
    return -1;
}

void format_close(struct flat_file *file) {
    mem_free(file->tables);
    *file = (struct flat_file){ 0 };
}
