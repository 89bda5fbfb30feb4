// SPDX-License-Identifier: MIT
// format.c - the table of the file's fields, and all checks of a file except those of tensor shapes, tensor data and
// texts.
//
// Checks run in this order: header (magic, version, hash, fields), sections (fields, place, padding, hash), config,
// layers, tensors. Every message names the section or record, the field, the value found and the value expected.
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
#define NUMBER(record, structure, member, type, min, max, names) \
    { record, #member, LLAMAC_TYPE_##type, offsetof(struct structure, member), \
      SIZE_OF(structure, member) / (LLAMAC_TYPE_##type == LLAMAC_TYPE_U64 ? 8 : 4), min, max, names }
#define NOT_A_NUMBER(record, structure, member, type) \
    { record, #member, type, offsetof(struct structure, member), SIZE_OF(structure, member), 0, 0, NULL }
#define BYTES(record, structure, member) NOT_A_NUMBER(record, structure, member, LLAMAC_TYPE_BYTES)
#define TEXT(record, structure, member) NOT_A_NUMBER(record, structure, member, LLAMAC_TYPE_TEXT)
#define HEADER(member, type, min, max) NUMBER("header", header, member, type, min, max, NULL)
#define SECTION(member, type, min, max) NUMBER("section", section_record, member, type, min, max, NULL)
#define CONFIG(member, type, min, max) NUMBER("config", config, member, type, min, max, NULL)
#define CONFIG_ENUM(member, max, names) NUMBER("config", config, member, U32, 1, max, names)
#define LAYER(member, type, min, max) NUMBER("layer", layer_record, member, type, min, max, NULL)
#define LAYER_ENUM(member, max, names) NUMBER("layer", layer_record, member, U32, 1, max, names)
#define TENSOR(member, type, min, max) NUMBER("tensor", tensor_record, member, type, min, max, NULL)

#define MAX_FILE 0x1p52        // a double represents sizes exactly, and sums of a few do not overflow 64 bits
#define MAX_DIM (1 << 20)
#define MAX_VOCAB (1 << 24)
#define MAX_CONTEXT (1 << 24)  // f32 represents positions exactly
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
    CONFIG_ENUM(norm, NORM_LAYER, "rms,layer"),
    CONFIG_ENUM(position, POSITION_ROPE, "none,learned,rope"),
    CONFIG_ENUM(activation, ACTIVATION_QUICK_GELU, "silu,gelu_tanh,gelu_erf,relu,quick_gelu"),
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
    LAYER_ENUM(placement, PLACEMENT_PARALLEL, "pre,post,sandwich,parallel"),
    LAYER_ENUM(ffn, FFN_EXPERTS, "plain,gated,experts"),
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
        { "config", sizeof(struct config) },
        { "layer", sizeof(struct layer_record) },
        { "tensor", sizeof(struct tensor_record) },
    };
    for (size_t i = 0; i < ARRAY_LEN(records); i++)
        if (!strcmp(records[i].name, record)) return records[i].bytes;
    return 0;
}

void format_value_name(const char *record, const char *member, uint32_t value, char name[FORMAT_VALUE_BYTES]) {
    const char *at = NULL;   // a name in the list
    double names_left = value;
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        if (strcmp(fields[i].record, record) || strcmp(fields[i].name, member)) continue;
        at = fields[i].names;
        names_left -= fields[i].min;
    }
    for (; at && names_left > 0; names_left--) {
        at = strchr(at, ',');
        if (at) at++;
    }
    size_t n = at && names_left >= 0 ? strcspn(at, ",") : 0;
    if (n >= FORMAT_VALUE_BYTES) n = FORMAT_VALUE_BYTES - 1;
    if (n) memcpy(name, at, n);
    name[n] = 0;
}

static const char *const section_names[N_SECTIONS] = {
    "config", "layers", "tensors", "metadata", "tokenizer", "spm", "template", "probes", "data",
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

// Whether a text field holds a printable name that is not empty, then only zeros, at least one.
static int is_padded_name(const char *text, uint32_t bytes) {
    uint32_t n = 0;
    while (n < bytes && text[n] >= '!' && text[n] <= '~') n++;
    if (n == 0 || n == bytes) return 0;
    while (n < bytes)
        if (text[n++]) return 0;
    return 1;
}

static int all_zero(const uint8_t *p, size_t bytes) {
    while (bytes--)
        if (*p++) return 0;
    return 1;
}

static int check_range(const llamac_field *f, const char *where, const uint8_t *record, llamac_error *err) {
    for (uint32_t i = 0; i < f->count; i++) {
        const double x = number_at(f, record, i);
        if (x >= f->min && x <= f->max) continue;   // false for a NaN
        char element[24] = "";
        if (f->count > 1) snprintf(element, sizeof element, "[%u]", i);
        return bad_model(err, "%s: %s%s is %.9g, expected %.9g to %.9g%s%s%s", where, f->name, element, x, f->min,
                         f->max, f->names ? " (" : "", f->names ? f->names : "", f->names ? ")" : "");
    }
    return 0;
}

// Checks all fields of a record by themselves. `where` names the record in messages.
static int check_record(const char *name, const char *where, const uint8_t *record, llamac_error *err) {
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        const llamac_field *f = &fields[i];
        if (strcmp(f->record, name)) continue;
        if (f->type == LLAMAC_TYPE_TEXT) {
            if (!is_padded_name((const char *)record + f->offset, f->count))
                return bad_model(err, "%s: %s is not a zero-padded printable name", where, f->name);
        } else if (f->type == LLAMAC_TYPE_BYTES) {
            if (!strcmp(f->name, "reserved") && !all_zero(record + f->offset, f->count))
                return bad_model(err, "%s: reserved bytes are not zero", where);
        } else if (check_range(f, where, record, err)) {
            return -1;
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

// llama2.c's version 0 has no magic. It starts with seven int32: dim, hidden_dim, layers, heads, KV heads, vocabulary
// (negative: untied output), context.
static int looks_like_llama2c(const uint8_t *data, size_t bytes) {
    int32_t v[7];
    if (bytes < sizeof v) return 0;
    memcpy(v, data, sizeof v);
    return v[0] > 0 && v[0] <= MAX_DIM && v[1] > 0 && v[1] <= MAX_DIM && v[2] > 0 && v[2] <= 4096 &&
           v[3] > 0 && v[4] > 0 && v[4] <= v[3] && v[0] % v[3] == 0 && v[5] != 0 && v[6] > 0 && v[6] <= MAX_CONTEXT;
}

// Recognizes other file types, so that the message can say what to do.
static int refuse_foreign(const uint8_t *data, size_t bytes, llamac_error *err) {
    static const struct { const char *magic; size_t bytes, at; const char *kind; } foreign[] = {
        { "GGUF", 4, 0, "a GGUF file" },
        { "lmgg", 4, 0, "an old GGML file" },
        { "tjgg", 4, 0, "an old GGML file" },
        { "PK\3\4", 4, 0, "a ZIP archive (a PyTorch checkpoint?)" },
        { "24ka", 4, 0, "a llama2.c checkpoint" },
        { "\200\2", 2, 0, "a Python pickle (an old PyTorch checkpoint?)" },
        { "{\"", 2, 8, "a safetensors file" },
    };
    for (size_t i = 0; i < ARRAY_LEN(foreign); i++)
        if (bytes >= foreign[i].at + foreign[i].bytes &&
            !memcmp(data + foreign[i].at, foreign[i].magic, foreign[i].bytes))
            return bad_model(err, "this is %s: run `llamac export` on it first", foreign[i].kind);
    if (looks_like_llama2c(data, bytes))
        return bad_model(err, "this looks like a llama2.c checkpoint: run `llamac export` on it first");
    return bad_model(err, "this is not a llamac file: it does not begin with the magic \"\\x89llamac\\n\"");
}

static int check_header(const struct header *h, size_t bytes, llamac_error *err) {
    if (h->version != FORMAT_VERSION)
        return bad_model(err, "header: version is %u, this library reads version %d: the file %s", h->version,
                         FORMAT_VERSION,
                         h->version > FORMAT_VERSION && h->version < 1000 ? "needs a newer llamac" : "is damaged");
    struct header copy = *h;
    uint8_t digest[HASH_BYTES];
    memset(copy.sha256, 0, sizeof copy.sha256);
    hash_of(&copy, sizeof copy, digest);
    if (memcmp(digest, h->sha256, HASH_BYTES))
        return bad_model(err, "header: its SHA-256 does not match: the first %zu bytes of the file are damaged",
                         sizeof copy);
    if (h->incompatible)
        return err_set(err, LLAMAC_UNSUPPORTED,
                       "header: incompatible has feature bits 0x%" PRIx64 " that this library does not know: "
                       "the file needs a newer llamac", h->incompatible);
    if (h->numerics != FORMAT_NUMERICS)
        return err_set(err, LLAMAC_UNSUPPORTED,
                       "header: numerics is %u, this library computes by numerics %d: %s llamac wrote the file, and "
                       "results would differ; use that version, or export the model again",
                       h->numerics, FORMAT_NUMERICS, h->numerics > FORMAT_NUMERICS ? "a newer" : "an older");
    if (check_record("header", "header", (const uint8_t *)h, err)) return -1;
    if (h->file_bytes != bytes)
        return bad_model(err, "header: file_bytes is %" PRIu64 " but the file has %zu bytes: it is %s", h->file_bytes,
                         bytes, bytes < h->file_bytes ? "truncated" : "too long");
    return 0;
}

// Checks the section table, the padding between sections, and the model's id.
static int check_section_table(const struct header *h, const uint8_t *data, size_t bytes, llamac_error *err) {
    uint64_t end = sizeof(struct header);
    struct sha256 id;
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) {
        const struct section_record *r = &h->sections[s];
        char where[40];
        snprintf(where, sizeof where, "section table, %s", section_names[s]);
        if (check_record("section", where, (const uint8_t *)r, err)) return -1;
        if (strcmp(r->name, section_names[s])) return bad_model(err, "%s: name is \"%s\"", where, r->name);
        const uint64_t start = round_up(end, FORMAT_ALIGNMENT);
        if (r->offset != start)
            return bad_model(err, "%s: offset is %" PRIu64 ", expected %" PRIu64, where, r->offset, start);
        if (start > bytes || r->bytes > bytes - start)
            return bad_model(err, "%s: bytes is %" PRIu64 ", which at %" PRIu64 " ends after the file (%zu bytes)",
                             where, r->bytes, start, bytes);
        if (!all_zero(data + end, start - end)) return bad_model(err, "%s: the padding before it is not zero", where);
        end = start + r->bytes;
        sha256_add(&id, r->sha256, HASH_BYTES);
    }
    if (end != bytes)
        return bad_model(err, "header: the sections end at %" PRIu64 " but the file has %zu bytes", end, bytes);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&id, digest);
    if (memcmp(digest, h->id, HASH_BYTES))
        return bad_model(err, "header: id is not the hash of the sections' hashes");
    return 0;
}

static int check_section_hash(const struct flat_file *file, enum section s, llamac_error *err) {
    const struct section_record *r = &file->header->sections[s];
    uint8_t digest[HASH_BYTES];
    hash_of(file->tables + r->offset, (size_t)r->bytes, digest);
    if (memcmp(digest, r->sha256, HASH_BYTES))
        return bad_model(err, "section %s: its SHA-256 does not match: the section is damaged", section_names[s]);
    return 0;
}

// ---- config, layers, tensors

static int check_rope(const struct config *c, llamac_error *err) {
    if ((c->position == POSITION_ROPE) != (c->n_rope > 0)) {
        char position[FORMAT_VALUE_BYTES];
        format_value_name("config", "position", c->position, position);
        return bad_model(err, "config: n_rope is %u with position %s", c->n_rope, position);
    }
    for (uint32_t i = 0; i < FORMAT_MAX_ROPE; i++) {
        const uint32_t dim = c->rope_dim[i];
        const float factor = c->rope_attention_factor[i];
        const int used = i < c->n_rope;
        if (used ? dim == 0 || dim % 2 || dim > c->head_dim : dim != 0)
            return bad_model(err, "config: rope_dim[%u] is %u, expected %s (n_rope is %u)", i, dim,
                             used ? "an even number up to head_dim" : "0", c->n_rope);
        if (used ? !(factor > 0) : factor != 0)
            return bad_model(err, "config: rope_attention_factor[%u] is %.9g, expected %s", i, (double)factor,
                             used ? "more than 0" : "0 (unused)");
        if (!used && c->rope_original_context[i])
            return bad_model(err, "config: rope_original_context[%u] is %u, expected 0 (unused)", i,
                             c->rope_original_context[i]);
    }
    return 0;
}

static int check_config(const struct config *c, llamac_error *err) {
    if (check_record("config", "config", (const uint8_t *)c, err)) return -1;
    if (c->n_heads % c->n_kv_heads)
        return bad_model(err, "config: n_heads is %u, expected a multiple of n_kv_heads %u", c->n_heads,
                         c->n_kv_heads);
    if ((uint64_t)c->n_heads * c->head_dim > MAX_DIM)
        return bad_model(err, "config: n_heads %u times head_dim %u exceeds %d", c->n_heads, c->head_dim, MAX_DIM);
    if (c->n_token_ids > c->vocab_size)
        return bad_model(err, "config: n_token_ids %u exceeds vocab_size %u", c->n_token_ids, c->vocab_size);
    if (c->bos_id >= (int64_t)c->vocab_size || c->eos_id >= (int64_t)c->vocab_size)
        return bad_model(err, "config: bos_id is %d and eos_id is %d, expected ids below vocab_size %u, or -1",
                         c->bos_id, c->eos_id, c->vocab_size);
    if ((c->add_bos && c->bos_id < 0) || (c->add_eos && c->eos_id < 0))
        return bad_model(err, "config: add_bos or add_eos is set, but bos_id is %d and eos_id is %d", c->bos_id,
                         c->eos_id);
    for (uint32_t i = 0; i < FORMAT_MAX_STOP_IDS; i++)
        if (i < c->n_stop_ids ? (uint32_t)c->stop_ids[i] >= c->vocab_size : c->stop_ids[i] != 0)
            return bad_model(err, "config: stop_ids[%u] is %d, expected %s", i, c->stop_ids[i],
                             i < c->n_stop_ids ? "an id below vocab_size" : "0 (unused)");
    return check_rope(c, err);
}

static int check_layer(const struct config *c, const struct layer_record *layer, uint32_t l, llamac_error *err) {
    char where[32], ffn[FORMAT_VALUE_BYTES];
    snprintf(where, sizeof where, "layer %u", l);
    if (check_record("layer", where, (const uint8_t *)layer, err)) return -1;
    if (layer->rope >= (int32_t)c->n_rope)
        return bad_model(err, "%s: rope is %d, but n_rope is %u", where, layer->rope, c->n_rope);
    const uint32_t n = layer->n_experts, used = layer->n_experts_used;
    const int experts = layer->ffn == FFN_EXPERTS;
    format_value_name("layer", "ffn", layer->ffn, ffn);
    if (experts ? n == 0 || used == 0 || used > n : n || used)
        return bad_model(err, "%s: n_experts is %u and n_experts_used is %u, which does not go with ffn %s", where, n,
                         used, ffn);
    if (!experts && layer->expert_weights)
        return bad_model(err, "%s: expert_weights is %u, expected 0 with ffn %s", where, layer->expert_weights, ffn);
    return 0;
}

// Checks one tensor record. *end: the end of the tensor before it; receives the end of this one.
static int check_tensor(const struct tensor_record *t, size_t i, uint64_t *end, uint64_t data_end, llamac_error *err) {
    char where[96];
    snprintf(where, sizeof where, "tensor %zu", i);
    if (check_record("tensor", where, (const uint8_t *)t, err)) return -1;
    snprintf(where, sizeof where, "tensor %s", t->name);
    uint64_t matrices = 1;
    for (uint32_t d = 0; d < FORMAT_MAX_DIMS; d++) {
        if ((t->shape[d] > 0) != (d < t->n_dims))
            return bad_model(err, "%s: shape[%u] is %" PRIu64 " with n_dims %u", where, d, t->shape[d], t->n_dims);
        if (d + 2 < t->n_dims && mul_overflows(matrices, t->shape[d], &matrices))
            return bad_model(err, "%s: shape overflows", where);
    }
    uint64_t bytes;
    if (t->n_dims == 1) {
        if (t->dtype != LLAMAC_F32)
            return bad_model(err, "%s: dtype is %s, but a vector is f32", where, llamac_dtype_name((int)t->dtype));
        bytes = 4 * t->shape[0];
    } else {
        const size_t one = llamac_matrix_bytes((int)t->dtype, t->shape[t->n_dims - 2], t->shape[t->n_dims - 1]);
        if (!one) return bad_model(err, "%s: its size overflows", where);
        if (mul_overflows(one, matrices, &bytes)) return bad_model(err, "%s: shape overflows", where);
    }
    if (t->bytes != bytes)
        return bad_model(err, "%s: bytes is %" PRIu64 ", its shape and dtype need %" PRIu64, where, t->bytes, bytes);
    const uint64_t start = round_up(*end, FORMAT_ALIGNMENT);
    if (t->offset != start)
        return bad_model(err, "%s: offset is %" PRIu64 ", expected %" PRIu64, where, t->offset, start);
    if (start > data_end || bytes > data_end - start)
        return bad_model(err, "%s: its %" PRIu64 " bytes at %" PRIu64 " end after the data section", where, bytes,
                         start);
    *end = start + bytes;
    return 0;
}

static int check_tensors(const struct flat_file *file, llamac_error *err) {
    const struct section_record *data = &file->header->sections[SECTION_DATA];
    uint64_t end = data->offset;
    struct sha256 hashes;
    sha256_start(&hashes);
    for (size_t i = 0; i < file->n_tensors; i++) {
        if (check_tensor(&file->tensors[i], i, &end, data->offset + data->bytes, err)) return -1;
        sha256_add(&hashes, file->tensors[i].sha256, HASH_BYTES);
    }
    if (end != data->offset + data->bytes)
        return bad_model(err, "section data: bytes is %" PRIu64 ", its tensors need %" PRIu64, data->bytes,
                         end - data->offset);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&hashes, digest);
    if (memcmp(digest, data->sha256, HASH_BYTES))
        return bad_model(err, "section data: its SHA-256 is not that of the tensors' hashes");
    return 0;
}

// Checks config, layers and tensors in the copy, and sets the pointers to them.
static int check_tables(struct flat_file *file, llamac_error *err) {
    const struct section_record *sections = file->header->sections;
    const uint64_t config_bytes = sections[SECTION_CONFIG].bytes, layer_bytes = sections[SECTION_LAYERS].bytes,
                   tensor_bytes = sections[SECTION_TENSORS].bytes;
    if (config_bytes != sizeof(struct config))
        return bad_model(err, "section config: bytes is %" PRIu64 ", expected %zu", config_bytes,
                         sizeof(struct config));
    file->config = (const struct config *)(const void *)(file->tables + sections[SECTION_CONFIG].offset);
    if (check_config(file->config, err)) return -1;

    const uint32_t n_layers = file->config->n_layers;
    const uint64_t layers_needed = sizeof(struct layer_record) * (uint64_t)n_layers;
    if (layer_bytes != layers_needed)
        return bad_model(err, "section layers: bytes is %" PRIu64 ", n_layers %u needs %" PRIu64, layer_bytes,
                         n_layers, layers_needed);
    file->layers = (const struct layer_record *)(const void *)(file->tables + sections[SECTION_LAYERS].offset);
    for (uint32_t l = 0; l < n_layers; l++)
        if (check_layer(file->config, &file->layers[l], l, err)) return -1;

    if (tensor_bytes % sizeof(struct tensor_record) || tensor_bytes == 0)
        return bad_model(err, "section tensors: bytes is %" PRIu64 ", expected a multiple of %zu", tensor_bytes,
                         sizeof(struct tensor_record));
    file->n_tensors = (size_t)(tensor_bytes / sizeof(struct tensor_record));
    file->tensors = (const struct tensor_record *)(const void *)(file->tables + sections[SECTION_TENSORS].offset);
    return check_tensors(file, err);
}

// Copies the tables. The checked header says how large they are. It is copied from `checked`, not read again.
static int copy_tables(struct flat_file *file, const struct header *checked, llamac_error *err) {
    const struct section_record *tensors = &checked->sections[SECTION_TENSORS];
    const size_t max_bytes = FORMAT_MAX_TENSORS * sizeof(struct tensor_record);
    if (tensors->bytes > max_bytes)
        return bad_model(err, "section tensors: bytes is %" PRIu64 ", expected at most %zu (%d tensors)",
                         tensors->bytes, max_bytes, FORMAT_MAX_TENSORS);
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
    const size_t magic_bytes = sizeof FORMAT_MAGIC - 1;
    *file = (struct flat_file){ .data = p, .bytes = bytes };
    if ((uintptr_t)p % FORMAT_ALIGNMENT)
        return bad_argument(err, "the model's memory is not aligned to %d bytes", FORMAT_ALIGNMENT);
    if (bytes == 0) return bad_model(err, "the file is empty");
    if (memcmp(p, FORMAT_MAGIC, bytes < magic_bytes ? bytes : magic_bytes)) return refuse_foreign(p, bytes, err);
    struct header header;
    if (bytes < sizeof header)
        return bad_model(err, "header: the file is truncated: it has %zu bytes, the header alone %zu", bytes,
                         sizeof header);
    memcpy(&header, p, sizeof header);
    if (check_header(&header, bytes, err) || check_section_table(&header, p, bytes, err) ||
        copy_tables(file, &header, err))
        return -1;
    int failed = 0;
    for (int s = SECTION_CONFIG; s <= SECTION_TENSORS && !failed; s++)
        failed = check_section_hash(file, (enum section)s, err);
    if (!failed && !check_tables(file, err)) return 0;
    format_close(file);
    return -1;
}

void format_close(struct flat_file *file) {
    mem_free(file->tables);
    *file = (struct flat_file){ 0 };
}
