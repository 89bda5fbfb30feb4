// SPDX-License-Identifier: MIT
// tiny_model.h - a whole flat file in memory with random weights, for the tests of the core; how they open it.
#ifndef LLAMAC_TINY_MODEL_H
#define LLAMAC_TINY_MODEL_H
#include <math.h>
#include "dtype.h"
#include "format.h"
#include "half.h"
#include "sha256.h"
#include "test.h"

// dtype 0: the matrices take the dtypes in turn.
// experts: so many in each layer, two of them in use; what else families may have comes with them. windows: of every
// second layer.
struct tiny_shape { int gpt2, dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, vocab, context, dtype, tied,
    biases, experts, window; };
struct tiny_file { uint8_t *data; size_t bytes; };

static inline struct config tiny_config(const struct tiny_shape *s) {
    struct config c = {
        .dim = (uint32_t)s->dim, .n_layers = (uint32_t)s->n_layers, .n_heads = (uint32_t)s->n_heads,
            .n_kv_heads = (uint32_t)s->n_kv_heads,
        .head_dim = (uint32_t)s->head_dim, .vocab_size = (uint32_t)s->vocab, .n_token_ids = (uint32_t)s->vocab,
            .context = (uint32_t)s->context,
        .norm = s->gpt2 ? NORM_LAYER : NORM_RMS, .position = s->gpt2 ? POSITION_LEARNED : POSITION_ROPE,
        .activation = s->gpt2 ? ACTIVATION_GELU_TANH : ACTIVATION_SILU, .tied_output = (uint32_t)s->tied,
            .norm_eps = 1e-5f,
        .attention_scale = 1.0f / sqrtf((float)s->head_dim), .embedding_scale = 1, .residual_scale = 1,
            .logit_scale = 1,
        .bos_id = 1, .eos_id = 2, .add_bos = 1, .n_stop_ids = 1, .stop_ids = { 2 },
    };
    if (s->experts) {
        c.qk_norm = QK_NORM_WHOLE, c.embedding_scale = 3, c.residual_scale = 0.5f, c.logit_scale = 0.25f;
        c.attention_soft_cap = 5, c.logit_soft_cap = 4;
    }
    if (!s->gpt2) c.n_rope = 1, c.rope_dim[0] = c.head_dim, c.rope_attention_factor[0] = 1;
    return c;
}

static inline void hash(const void *data, size_t bytes, uint8_t digest[HASH_BYTES]) {
    struct sha256 h;
    sha256_start(&h);
    sha256_add(&h, data, bytes);
    sha256_finish(&h, digest);
}

// Makes all hashes true again after a change.
static inline void tiny_rehash(uint8_t *data) {
    struct header *h = (struct header *)(void *)data;
    struct sha256 of_tensors, id;
    const struct section_record *tensors = &h->sections[SECTION_TENSORS];
    sha256_start(&of_tensors);
    for (uint64_t i = 0; i < tensors->bytes / sizeof(struct tensor_record); i++)
        sha256_add(&of_tensors, ((const struct tensor_record *)(const void *)(data + tensors->offset))[i].sha256,
            HASH_BYTES);
    sha256_finish(&of_tensors, h->sections[SECTION_DATA].sha256);
    for (int s = 0; s < SECTION_DATA; s++) hash(data + h->sections[s].offset, (size_t)h->sections[s].bytes,
        h->sections[s].sha256);
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) sha256_add(&id, h->sections[s].sha256, HASH_BYTES);
    sha256_finish(&id, h->id);
    memset(h->sha256, 0, HASH_BYTES);
    hash(h, sizeof *h, h->sha256);
}

static inline int tiny_dtype(const struct tiny_shape *shape,
    size_t tensor) { return shape->dtype ? shape->dtype : 1 + (int)(tensor % (LLAMAC_N_DTYPES - 1)); }

// Quantized: any bytes are weights, but q8's code 0.
static inline void tiny_fill_quantized(uint8_t *p, const llamac_slot *slot, int dtype, uint64_t *state) {
    const size_t strip_bytes = dtype_strip_bytes(dtype, slot->columns);
    for (uint64_t strip = 0; strip * STRIP_ROWS < slot->rows; strip++, p += strip_bytes) {
        for (int r = 0; r < STRIP_ROWS; r++) ((float *)(void *)p)[r] = (dtype == LLAMAC_Q8 ? 0x1p-14f
            : 0x1p-12f) * (1 + 0.5f * random_float(state));
        for (size_t i = LINE_BYTES; i < strip_bytes; i++) p[i] = (uint8_t)(1 + random_below(state, 255));
    }
}

static inline void tiny_fill(uint8_t *p, const llamac_slot *slot, int dtype, uint64_t *state) {
    if (slot->is_matrix && dtype_is_quantized(dtype)) {
        tiny_fill_quantized(p, slot, dtype, state);
        return;
    }
    for (uint64_t r = 0; r < slot->rows; r++)
        for (uint64_t k = 0; k < slot->columns; k++) {
            float x = 0.5f * random_float(state);
            // no libm: the same file everywhere
            if (!strcmp(slot->name, "rope.0.inv_freq")) x = 1.0f / (float)(1 + 5 * k * k);
            if (!slot->is_matrix) { ((float *)(void *)p)[k] = x; continue; }
            uint8_t *line = p + r / 16 * dtype_strip_bytes(dtype, slot->columns);
            if (dtype == LLAMAC_F32) ((float *)(void *)line)[k * 16 + r % 16] = x;
            else ((uint16_t *)(void *)line)[k * 16 + r % 16] = dtype == LLAMAC_F16 ? f16_from_f32(x)
                : (uint16_t)(f32_bits(x) >> 16);
        }
}

static inline struct tiny_file tiny_model(const struct tiny_shape *shape) {
    struct config config = tiny_config(shape);
    struct layer_record *layers = calloc((size_t)shape->n_layers, sizeof *layers);
    for (int l = 0; l < shape->n_layers; l++)
        layers[l] = (struct layer_record){ .rope = shape->gpt2 ? -1 : 0,
            .placement = shape->experts ? 1 + (uint32_t)l % PLACEMENT_PARALLEL : PLACEMENT_PRE,
                                           .ffn = shape->experts ? FFN_EXPERTS : shape->gpt2 ? FFN_PLAIN : FFN_GATED,
                                               .ffn_dim = (uint32_t)shape->ffn_dim,
                                           .n_experts = (uint32_t)shape->experts,
                                               .n_experts_used = shape->experts ? 2 : 0,
                                           .expert_weights = shape->experts && l % 2,
                                               .window = l % 2 ? (uint32_t)shape->window : 0 };
    llamac_slot slot;
    size_t n = 0, used = 0;
    struct tensor_record *records = calloc(64 + (30 + 3 * (size_t)shape->experts) * (size_t)shape->n_layers,
        sizeof *records);
    for (llamac_walk walk = { .config = &config, .layers = layers }; llamac_slot_next(&walk, &slot);) {
        if (!slot.required && !shape->biases) continue;
        struct tensor_record *t = &records[n++];
        memcpy(t->name, slot.name, sizeof t->name);
        t->dtype = slot.is_matrix ? (uint32_t)tiny_dtype(shape, n) : LLAMAC_F32;
        t->n_dims = slot.is_matrix ? 2 : 1;
        t->shape[0] = slot.is_matrix ? slot.rows : slot.columns;
        t->shape[1] = slot.is_matrix ? slot.columns : 0;
        t->bytes = slot.is_matrix ? llamac_matrix_bytes((int)t->dtype, slot.rows, slot.columns) : 4 * slot.columns;
        used = (used + 63) / 64 * 64;
        t->offset = used;
        used += t->bytes;
    }
    const struct { const void *data; size_t bytes; } texts[N_SECTIONS] = {
        { &config, sizeof config }, { layers, sizeof *layers * (size_t)shape->n_layers },
            { records, n * sizeof *records }, { "{}", 2 },
        { "", 0 }, { "", 0 }, { "", 0 }, { "", 0 }, { NULL, used } };
    struct header h = { .magic = FORMAT_MAGIC, .version = FORMAT_VERSION, .numerics = FORMAT_NUMERICS, .alignment = 64,
        .n_sections = N_SECTIONS };
    size_t end = sizeof h;
    for (int s = 0; s < N_SECTIONS; s++) {
        snprintf(h.sections[s].name, sizeof h.sections[s].name, "%s", llamac_section_at((size_t)s));
        h.sections[s].offset = (end + 63) / 64 * 64;
        h.sections[s].bytes = texts[s].bytes;
        end = h.sections[s].offset + texts[s].bytes;
    }
    h.file_bytes = end;
    struct tiny_file file = { take(end), end };
    memcpy(file.data, &h, sizeof h);
    for (size_t i = 0; i < n; i++) records[i].offset += h.sections[SECTION_DATA].offset;
    for (int s = 0; s < SECTION_DATA; s++) memcpy(file.data + h.sections[s].offset, texts[s].data, texts[s].bytes);
    uint64_t state = 42;
    llamac_walk walk = { .config = &config, .layers = layers };
    for (size_t at = 0; llamac_slot_next(&walk, &slot);) {
        if (at >= n || strcmp(records[at].name, slot.name)) continue;
        tiny_fill(file.data + records[at].offset, &slot, (int)records[at].dtype, &state);
        at++;
    }
    free(layers);
    free(records);
    tiny_rehash(file.data);
    return file;
}

// What the core said last.
static llamac_error err;

static inline llamac_session *open_session(const llamac_model *model, int sequences, int kv, int threads,
    const char *isa) {
    const llamac_session_options options = { .n_sequences = sequences, .kv_dtype = kv, .threads = threads, .isa = isa };
    llamac_session *session;
    if (llamac_session_open(&session, model, &options, &err)) { printf("session: %s\n", err.message); exit(1); }
    return session;
}
static inline llamac_model *open_model(struct tiny_file file) {
    llamac_model *model;
    if (llamac_model_open(&model, file.data, file.bytes, &err)) { printf("model: %s\n", err.message); exit(1); }
    return model;
}

static const struct tiny_shape tiny_llama = { 0, 36, 3, 6, 2, 10, 52, 101, 400, LLAMAC_F32, 0, 1, 0, 0 };
static const struct tiny_shape tiny_experts = { 0, 40, 4, 6, 2, 10, 52, 101, 400, LLAMAC_BF16, 0, 1, 5, 9 };
static const struct tiny_shape tiny_gpt2 = { 1, 40, 2, 5, 5, 8, 70, 99, 300, LLAMAC_BF16, 1, 1, 0, 0 };
static const struct tiny_shape tiny_mixed = { 0, 144, 3, 4, 2, 32, 200, 101, 400, 0, 0, 0, 0, 0 };
static const struct tiny_shape tiny_q8 = { 0, 36, 2, 6, 2, 10, 52, 101, 400, LLAMAC_Q8, 1, 1, 0, 0 };
static const struct tiny_shape tiny_q4 = { 1, 144, 2, 5, 5, 16, 300, 99, 300, LLAMAC_Q4, 1, 1, 0, 0 };
static const struct tiny_shape tiny_q4s = { 0, 160, 2, 4, 1, 32, 100, 99, 300, LLAMAC_Q4S, 1, 1, 0, 0 };
#endif
