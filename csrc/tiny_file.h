// SPDX-License-Identifier: MIT
// tiny_file.h - flat files of tiny models with random weights, the same bytes on every machine: for the self-test and
// the tests.
#ifndef LLAMAC_TINY_FILE_H
#define LLAMAC_TINY_FILE_H
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "format.h"
#include "random_weights.h"
#include "sha256.h"

// What a tiny model is like. 0 leaves a feature out, unless its comment says more.
struct tiny_shape {
    // shape
    int gpt2;                // as GPT-2: layer norms, learned positions, networks without gates
    int dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, vocab, context;
    int dtype;               // of the matrices; 0 gives each matrix a different one
    int tied;                // the output matrix is the token embedding
    int biases;              // the tensors that a model may have or lack, as biases
    int layered;             // layers differ in their heads, of some the keys are also the values, values are normed,
                             // the last layer reads the keys of another, layers have scales, embeddings of their own
                             // and every norm placement; experts have norms and factors
    int features;            // every norm placement, sinks, scaled queries, limited activations, norms with weights per
                             // head, layers that read the keys of layer 1, a second RoPE table for long contexts

    // norms, positions and activations
    int rope_dim;            // rotated dimensions of a head; 0: all
    int norm_after_rope;     // norms of each head of q and k after RoPE
    int sub_norms;           // norms between the products of a layer; 2: and inputs of 8 bits with one scale per row
    int bias_distance;       // biases of scores for distances up to it; without encoder, the embedding is also normed

    // mixers
    int window;              // of every second layer
    int chunks;              // windows are chunks, in layers with norms of rotated heads; the others have scaled
                             // queries and no RoPE. Experts are weighted before their networks. With mixers, routers
                             // have neither groups nor biases
    int latent;              // the width of the latent of keys and values; every norm placement, a latent of q in every
                             // second layer
    int encoder;             // attention to both sides, 3 types, and norms of the residual stream itself
    int recurrent;           // two of three layers are Gated DeltaNets, the others have a gate for each element of
                             // their result; 2: for each head
    int mamba;               // every second layer is Mamba 2, with limits of its steps; enum state_norm: of these
                             // layers
    int beside;              // Mamba 2 layers have attention, too
    int parts;               // layers alternate between Mamba 2, a network, attention, and experts without gates

    // experts
    int experts;             // per layer, 2 of them active; such a model also has norms of q and k, scales, caps and
                             // every norm placement
    int mixers;              // routers with sigmoids, groups and biases for the choice; 1: every second layer is a
                             // short convolution

    // drafters
    int mtp;                 // the number of the layer, from 1, that an MTP layer is like; 0: there is none
    int trunk_dim;           // of the model that it drafts for
    int clusters;            // their number, of which 3 are used
    int eagle;               // an EAGLE-3 head for models of this dim, without an embedding; -dim: with its own, a
                             // normed stream and a cap
    int eagle_norm;          // enum eagle_in_norm; with any norm, the next draft reads the normed output
};

// ---- building the file

static inline struct config tiny_config(const struct tiny_shape *s) {
    struct config c = {
        .dim = (uint32_t)s->dim,
        .n_layers = (uint32_t)s->n_layers,
        .mtp_layers = s->mtp > 0,
        .n_clusters = (uint32_t)s->clusters,
        .clusters_used = s->clusters ? 3 : 0,
        .n_heads = (uint32_t)s->n_heads,
        .n_kv_heads = (uint32_t)s->n_kv_heads,
        .head_dim = (uint32_t)s->head_dim,
        .vocab_size = (uint32_t)s->vocab,
        .n_token_ids = (uint32_t)s->vocab,
        .context = (uint32_t)s->context,
        .norm = s->gpt2 ? NORM_LAYER : NORM_RMS,
        .position = s->gpt2 ? POSITION_LEARNED : POSITION_ROPE,
        .activation = s->gpt2 ? ACTIVATION_GELU_TANH : ACTIVATION_SILU,
        .tied_output = (uint32_t)(s->tied || s->encoder),
        .two_sided = (uint32_t)s->encoder,
        .n_types = s->encoder ? 3 : 0,
        .rounds_inputs = s->sub_norms == 2,
        .bias_distance = (uint32_t)s->bias_distance,
        .embedding_norm = s->bias_distance && !s->encoder,
        .drafter = s->eagle ? DRAFTER_EAGLE3 : s->trunk_dim ? DRAFTER_ASSISTANT : DRAFTER_NONE,
        .trunk_dim = (uint32_t)(s->eagle < 0 ? -s->eagle : s->eagle ? s->eagle : s->trunk_dim),
        .eagle_vocab_size = s->eagle ? (uint32_t)(s->vocab / 2) : 0,
        .eagle_normed = s->eagle < 0,
        .eagle_in_norm = (uint32_t)s->eagle_norm,
        .eagle_out_normed = s->eagle_norm > 0,
        .norm_eps = 1e-5f,
        .attention_scale = 1.0f / sqrtf((float)s->head_dim),
        .embedding_scale = 1,
        .residual_scale = 1,
        .logit_scale = 1,
        .bos_id = 1,
        .eos_id = 2,
        .add_bos = 1,
        .n_stop_ids = 1,
        .stop_ids = { 2 },
    };
    if (s->parts) c.activation = ACTIVATION_RELU2;
    if (s->eagle < 0) c.logit_scale = 2, c.logit_soft_cap = 1;
    if (s->mamba) c.state_norm = (uint32_t)s->mamba, c.state_step_min = 0.5f, c.state_step_max = 0.875f;
    if (s->experts) {
        c.qk_norm = QK_NORM_WHOLE;
        c.embedding_scale = 3, c.residual_scale = 0.5f, c.logit_scale = 0.25f;
        c.attention_soft_cap = 5, c.logit_soft_cap = 4;
    }
    if (s->norm_after_rope) c.qk_norm = QK_NORM_HEAD, c.qk_norm_after_rope = 1;
    if (s->chunks) c.qk_norm = QK_NORM_ROTATED_HEAD, c.qk_norm_after_rope = 1;
    if (s->features) c.qk_norm = QK_NORM_LAYER_HEAD, c.residual_scale = 0.5f;
    if (s->layered) c.qk_norm = QK_NORM_HEAD, c.embedding_scale = 3;
    if (s->features) c.rope_original_context[0] = (uint32_t)s->context / 2;
    if (!s->gpt2) c.n_rope = 1, c.rope_dim[0] = s->rope_dim ? (uint32_t)s->rope_dim : c.head_dim;
    if (!s->gpt2) c.rope_attention_factor[0] = s->rope_dim ? 1.25f : 1;
    return c;
}

static inline struct layer_record tiny_layer(const struct tiny_shape *s, int layer) {
    const int is_delta = s->recurrent && layer % 3 != 2, is_mamba = s->mamba && layer % (s->parts ? 4 : 2) == 0,
              mixes = !s->parts || layer % 2 == 0, has_ffn = !s->parts || layer % 2,
              has_experts = s->experts && (!s->parts || layer % 4 == 3),
              is_recurrent = is_delta || is_mamba, is_short_conv = s->mixers == 1 && layer % 2 == 0,
              is_odd = layer % 2, is_last = s->layered && layer + 1 == s->n_layers,
              placement = 1 + layer % PLACEMENT_PARALLEL,
              has_post_norm = placement == PLACEMENT_POST || placement == PLACEMENT_SANDWICH;
    return (struct layer_record){
        .mixer = is_delta ? MIXER_DELTA_NET : is_mamba ? (s->beside ? MIXER_ATTENTION_MAMBA2 : MIXER_MAMBA2)
                 : is_short_conv ? MIXER_SHORT_CONV : mixes ? MIXER_ATTENTION : MIXER_NONE,
        .output_gate = !s->recurrent || is_delta ? OUTPUT_GATE_NONE
                       : s->recurrent == 2 ? OUTPUT_GATE_HEAD : OUTPUT_GATE_ELEMENT,
        .state_key_heads = is_recurrent ? 2 : 0,
        .state_heads = is_recurrent ? 6 : 0,
        .state_key_dim = is_recurrent ? 16 : 0,
        .state_value_dim = is_recurrent ? 80 : 0,
        .conv_width = is_recurrent ? 4 : is_short_conv ? 3 : 0,
        .layer_scale = s->layered ? 0.5f * (float)(1 + layer % 3) : 1,
        .kv_source = s->features && layer > 2 ? 1 : is_last ? layer - 2 : -1,
        .head_dim = s->layered && !is_odd ? (uint32_t)s->head_dim / 2 : 0,
        .n_kv_heads = s->layered && is_odd ? 1 : 0,
        .v_is_k = s->layered && is_odd && !is_last,
        .layer_embedding_dim = s->layered ? 20 : 0,
        .v_norm = s->layered && layer != 1 && !is_last ? V_NORM_HEAD : V_NORM_NONE,
        .router = s->mixers && has_experts ? ROUTER_SIGMOID : ROUTER_SOFTMAX,
        .router_choice_bias = s->mixers && !s->chunks && has_experts && (layer % 3 || s->parts),
        .n_expert_groups = s->mixers && !s->chunks && has_experts ? 3 : 0,
        .n_expert_groups_used = s->mixers && !s->chunks && has_experts ? 2 : 0,
        .expert_scale = s->mixers && has_experts ? 1.5f : 1,
        .expert_weights_eps = s->mixers && has_experts && layer % 2 ? 0x1p-10f : 0,
        .rope = s->gpt2 || (is_recurrent && !s->beside) || is_short_conv || s->parts || (s->chunks && !is_odd) ? -1 : 0,
        .q_lora_rank = s->latent && layer % 2 == 0 ? 20 : 0,
        .kv_lora_rank = (uint32_t)s->latent,
        .qk_nope_head_dim = s->latent ? 10 : 0,
        .v_head_dim = s->latent ? 16 : 0,
        .latent_norm_eps = s->latent ? 1e-3f : 0,
        .placement = s->parts ? PLACEMENT_PRE
                     : s->experts || s->features || s->latent || s->layered ? (uint32_t)placement
                     : s->encoder ? (layer ? PLACEMENT_NORMED : PLACEMENT_NORMED_ATTN) : PLACEMENT_PRE,
        .ffn = has_experts ? FFN_EXPERTS : !has_ffn ? FFN_NONE : s->gpt2 || s->parts ? FFN_PLAIN : FFN_GATED,
        .ffn_dim = has_ffn ? (uint32_t)s->ffn_dim : 0,
        .n_experts = has_experts ? (uint32_t)s->experts : 0,
        .n_experts_used = has_experts ? 2 : 0,
        .expert_weights = has_experts && layer % 2,
        .plain_experts = has_experts && s->parts,
        .expert_norms = s->experts && s->layered && has_post_norm,
        .expert_factors = s->experts && s->layered && layer % 3,
        .shared_ffn_dim = has_experts && (layer % 3 || s->parts || (s->layered && has_post_norm)) ? 21 : 0,
        .shared_gate = has_experts && layer % 3 == 1 && !(s->layered && has_post_norm),
        .window = layer % 2 ? (uint32_t)s->window : 0,
        .sinks = s->features && layer % 2,
        .sub_norms = s->sub_norms > 0,
        .window_chunks = s->chunks && is_odd,
        .query_beta = s->features || (s->chunks && !is_odd) ? 0.1f : 0,
        .query_context = s->features || (s->chunks && !is_odd) ? 8 : 0,
        .query_offset = s->chunks && !is_odd,
        .expert_weights_first = (uint32_t)s->chunks,
        .activation_limit = s->features ? 0.25f : 0,
        .up_offset = s->features ? 1 : 0,
    };
}

enum { EXACT_DTYPES = -1, FEW_BITS = -2 };   // a shape's dtype: matrices cycle through GGUF's dtypes, or q3, q2 and t2
// 0: cycles through f32 to q4s.
static inline int tiny_dtype(const struct tiny_shape *s, size_t tensor) {
    if (s->dtype == FEW_BITS) return LLAMAC_Q3 + (int)(tensor % (LLAMAC_T2 + 1 - LLAMAC_Q3));
    if (s->dtype != EXACT_DTYPES) return s->dtype ? s->dtype : 1 + (int)(tensor % LLAMAC_Q4S);
    return LLAMAC_Q4_0 + (int)(tensor % (LLAMAC_MXFP4 + 1 - LLAMAC_Q4_0));
}

// Writes the records of all tensors, with offsets from the start of the data section. Returns their number and, in
// *bytes, the size of that section.
static inline size_t tiny_records(const struct tiny_shape *s, const struct config *config,
                                  const struct layer_record *layers, struct tensor_record *records, size_t *bytes) {
    size_t n = 0, end = 0;
    llamac_slot_iterator slots = { .config = config, .layers = layers };
    for (llamac_slot slot; llamac_slot_next(&slots, &slot);) {
        const int has_embedding = s->eagle < 0 && !strcmp(slot.name, "token_embedding.weight");
        if (!slot.required && !s->biases && !has_embedding) continue;
        struct tensor_record *t = &records[n++];
        memcpy(t->name, slot.name, sizeof t->name);
        t->offset = (end + 63) / 64 * 64;
        if (slot.is_matrix) {
            t->dtype = (uint32_t)tiny_dtype(s, n);
            t->n_dims = 2, t->shape[0] = slot.rows, t->shape[1] = slot.columns;
            t->bytes = llamac_matrix_bytes((int)t->dtype, slot.rows, slot.columns);
        } else {
            t->dtype = LLAMAC_F32;
            t->n_dims = 1, t->shape[0] = slot.columns;
            t->bytes = 4 * slot.columns;
        }
        end = t->offset + t->bytes;
    }
    *bytes = end;
    return n;
}

// Any bytes are valid weights, except q8's code 0.
static inline void tiny_fill_quantized(uint8_t *p, const llamac_slot *slot, int dtype, uint64_t *state) {
    const size_t strip_bytes = dtype_strip_bytes(dtype, slot->columns);
    if (!layouts[dtype].row_scales) {
        fill_matrix(dtype, p, strip_bytes, (int)slot->rows, (int)slot->columns,
                    layouts[dtype].super ? 0x1p-13f : 0x1p-8f, state);
        return;
    }
    const float scale = dtype == LLAMAC_Q8 ? 0x1p-14f : 0x1p-12f;
    for (uint64_t strip = 0; strip * STRIP_ROWS < slot->rows; strip++, p += strip_bytes) {
        for (int r = 0; r < STRIP_ROWS; r++)
            ((float *)(void *)p)[r] = scale * (1 + 0.5f * random_float(state));
        for (size_t i = LINE_BYTES; i < strip_bytes; i++) p[i] = (uint8_t)(1 + random_below(state, 255));
    }
}

// Ids are odd numbers in an EAGLE-3 head, otherwise a permutation.
static inline void tiny_fill(const struct config *c, uint8_t *p, const llamac_slot *slot, int dtype, uint64_t *state) {
    if (slot->is_matrix && dtype_is_quantized(dtype)) {
        tiny_fill_quantized(p, slot, dtype, state);
        return;
    }
    const int is_rope = !strcmp(slot->name, "rope.0.inv_freq"), is_decay = strstr(slot->name, "_decay.") != NULL,
              are_ids = !strcmp(slot->name, "drafter.output_ids.weight"), is_head = c->drafter == DRAFTER_EAGLE3;
    const size_t strip_bytes = slot->is_matrix ? dtype_strip_bytes(dtype, slot->columns) : 0;
    for (uint64_t r = 0; r < slot->rows; r++)
        for (uint64_t k = 0; k < slot->columns; k++) {
            const float random = 0.5f * random_float(state), x = is_decay && random > 0 ? -random : random;
            if (slot->is_matrix) set_weight(dtype, p, strip_bytes, (int)r, (int)k, x);
            else if (are_ids) ((float *)(void *)p)[k] = (float)(is_head ? 2 * k + 1 : 5 * k % slot->columns);
            else ((float *)(void *)p)[k] = is_rope ? 1.0f / (float)(1 + 5 * k * k) : x;   // libm differs by machine
        }
}

static inline void hash(const void *data, size_t bytes, uint8_t digest[HASH_BYTES]) {
    struct sha256 h;
    sha256_start(&h);
    sha256_add(&h, data, bytes);
    sha256_finish(&h, digest);
}

static inline void tiny_rehash_header(uint8_t *data) {
    struct header *h = (struct header *)(void *)data;
    memset(h->sha256, 0, HASH_BYTES);
    hash(h, sizeof *h, h->sha256);
}

// Recomputes all hashes but those of tensors.
static inline void tiny_rehash(uint8_t *data) {
    struct header *h = (struct header *)(void *)data;
    const struct section_record *table = &h->sections[SECTION_TENSORS];
    const struct tensor_record *tensors = (const struct tensor_record *)(const void *)(data + table->offset);
    struct sha256 of_tensors, id;
    sha256_start(&of_tensors);
    for (uint64_t i = 0; i < table->bytes / sizeof *tensors; i++)
        sha256_add(&of_tensors, tensors[i].sha256, HASH_BYTES);
    sha256_finish(&of_tensors, h->sections[SECTION_DATA].sha256);
    for (int s = 0; s < SECTION_DATA; s++)
        hash(data + h->sections[s].offset, (size_t)h->sections[s].bytes, h->sections[s].sha256);
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) sha256_add(&id, h->sections[s].sha256, HASH_BYTES);
    sha256_finish(&id, h->id);
    tiny_rehash_header(data);
}

// Whether all sections are aligned and inside the file, so that tiny_rehash can read them.
static inline int tiny_can_rehash(const uint8_t *data, size_t bytes) {
    const struct header *h = (const struct header *)(const void *)data;
    for (int s = 0; s < N_SECTIONS; s++) {
        const struct section_record *section = &h->sections[s];
        if (section->offset % 64 || section->offset > bytes || section->bytes > bytes - section->offset) return 0;
    }
    return h->sections[SECTION_TENSORS].bytes % sizeof(struct tensor_record) == 0;
}

// A header whose sections of these sizes follow one another, without hashes.
static inline struct header tiny_header(const uint64_t bytes[N_SECTIONS]) {
    struct header h = {
        .magic = FORMAT_MAGIC,
        .version = FORMAT_VERSION,
        .numerics = FORMAT_NUMERICS,
        .alignment = FORMAT_ALIGNMENT,
        .n_sections = N_SECTIONS,
        .file_bytes = sizeof h,
    };
    for (int s = 0; s < N_SECTIONS; s++) {
        struct section_record *section = &h.sections[s];
        snprintf(section->name, sizeof section->name, "%s", llamac_section_at((size_t)s));
        section->offset = round_up(h.file_bytes, FORMAT_ALIGNMENT);
        section->bytes = bytes[s];
        h.file_bytes = section->offset + section->bytes;
    }
    return h;
}

// The most that a shape may ask for.
enum { TINY_MAX_LAYERS = 8, TINY_MAX_TENSORS = 1024 };

struct tiny_tables {
    struct config config;
    struct layer_record layers[TINY_MAX_LAYERS];
    struct tensor_record tensors[TINY_MAX_TENSORS];
    size_t n_tensors;
    struct header header;   // without hashes
};

static inline void tiny_lay_out(const struct tiny_shape *shape, struct tiny_tables *t) {
    size_t data_bytes;
    t->config = tiny_config(shape);
    const int n_layers = shape->n_layers + (shape->mtp > 0);
    for (int l = 0; l < n_layers; l++) t->layers[l] = tiny_layer(shape, l < shape->n_layers ? l : shape->mtp - 1);
    memset(t->tensors, 0, sizeof t->tensors);
    t->n_tensors = tiny_records(shape, &t->config, t->layers, t->tensors, &data_bytes);
    t->header = tiny_header((const uint64_t[N_SECTIONS]){
        [SECTION_CONFIG] = sizeof t->config,
        [SECTION_LAYERS] = (size_t)n_layers * sizeof t->layers[0],
        [SECTION_TENSORS] = t->n_tensors * sizeof t->tensors[0],
        [SECTION_METADATA] = 2,
        [SECTION_DATA] = data_bytes,
    });
    for (size_t i = 0; i < t->n_tensors; i++) t->tensors[i].offset += t->header.sections[SECTION_DATA].offset;
}

// Writes a file that tiny_lay_out describes to zeroed memory of header.file_bytes, aligned to 64.
static inline void tiny_write(const struct tiny_tables *t, uint8_t *data) {
    const void *const tables[] = { &t->config, t->layers, t->tensors, "{}" };
    memcpy(data, &t->header, sizeof t->header);
    for (size_t s = 0; s < ARRAY_LEN(tables); s++)
        memcpy(data + t->header.sections[s].offset, tables[s], (size_t)t->header.sections[s].bytes);

    uint64_t state = 42;
    llamac_slot slot;
    llamac_slot_iterator slots = { .config = &t->config, .layers = t->layers };
    for (size_t i = 0; i < t->n_tensors && llamac_slot_next(&slots, &slot);) {
        if (strcmp(t->tensors[i].name, slot.name)) continue;   // an optional tensor that the file does not have
        tiny_fill(&t->config, data + t->tensors[i].offset, &slot, (int)t->tensors[i].dtype, &state);
        i++;
    }
    tiny_rehash(data);
}

static const struct tiny_shape tiny_llama = {
    .dim = 36, .n_layers = 3, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F32, .biases = 1,
};
static const struct tiny_shape tiny_experts = {
    .dim = 40, .n_layers = 4, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_BF16, .biases = 1, .experts = 5, .window = 9,
};
static const struct tiny_shape tiny_features = {
    .dim = 36, .n_layers = 5, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F16, .window = 9, .features = 1,
};
static const struct tiny_shape tiny_encoder = {
    .dim = 24, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6, .ffn_dim = 40, .vocab = 101,
    .context = 700, .dtype = LLAMAC_F32, .biases = 1, .window = 50, .encoder = 1,
};
static const struct tiny_shape tiny_biased = {
    .dim = 24, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6, .ffn_dim = 40, .vocab = 101,
    .context = 700, .dtype = LLAMAC_F32, .biases = 1, .window = 50, .encoder = 1, .bias_distance = 65,
};
static const struct tiny_shape tiny_distant = {
    .dim = 36, .n_layers = 3, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F32, .biases = 1, .bias_distance = 150,
};
static const struct tiny_shape tiny_layered = {
    .dim = 36, .n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_F16, .window = 9, .rope_dim = 8, .layered = 1,
};
static const struct tiny_shape tiny_mixture = {
    .dim = 36, .n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 52, .vocab = 101,
    .context = 400, .experts = 4, .window = 9, .rope_dim = 8, .layered = 1,
};
static const struct tiny_shape tiny_recurrent = {
    .dim = 48, .n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
    .context = 1200, .dtype = LLAMAC_F32, .tied = 1, .biases = 1, .rope_dim = 4, .recurrent = 1,
};
static const struct tiny_shape tiny_mamba = {
    .dim = 48, .n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
    .context = 1200, .dtype = LLAMAC_F32, .biases = 1, .mamba = STATE_NORM_AFTER_GATE,
};
static const struct tiny_shape tiny_beside = {
    .dim = 48, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
    .context = 1200, .dtype = LLAMAC_F32, .biases = 1, .window = 9, .mamba = STATE_NORM_BEFORE_GATE, .beside = 1,
};
static const struct tiny_shape tiny_parts = {
    .dim = 48, .n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
    .context = 1200, .dtype = LLAMAC_F32, .biases = 1, .experts = 6, .mamba = STATE_NORM_AFTER_GATE, .parts = 1,
    .mixers = 2,
};
static const struct tiny_shape tiny_latent = {
    .dim = 48, .n_layers = 4, .n_heads = 3, .n_kv_heads = 1, .head_dim = 38, .ffn_dim = 52, .vocab = 101,
    .context = 400, .tied = 1, .biases = 1, .window = 9, .rope_dim = 6, .latent = 32,
};
static const struct tiny_shape tiny_mixers = {
    .dim = 40, .n_layers = 4, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
    .context = 1200, .dtype = LLAMAC_F32, .tied = 1, .biases = 1, .experts = 6, .mixers = 1,
};
static const struct tiny_shape tiny_gpt2 = {
    .gpt2 = 1, .dim = 40, .n_layers = 2, .n_heads = 5, .n_kv_heads = 5, .head_dim = 8, .ffn_dim = 70, .vocab = 99,
    .context = 300, .dtype = LLAMAC_BF16, .tied = 1, .biases = 1,
};
static const struct tiny_shape tiny_mixed = {
    .dim = 144, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 200, .vocab = 101,
    .context = 400,
};
static const struct tiny_shape tiny_q8 = {
    .dim = 36, .n_layers = 2, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_Q8, .tied = 1, .biases = 1,
};
static const struct tiny_shape tiny_q4 = {
    .gpt2 = 1, .dim = 144, .n_layers = 2, .n_heads = 5, .n_kv_heads = 5, .head_dim = 16, .ffn_dim = 300, .vocab = 99,
    .context = 300, .dtype = LLAMAC_Q4, .tied = 1, .biases = 1,
};
static const struct tiny_shape tiny_q4s = {
    .dim = 160, .n_layers = 2, .n_heads = 4, .n_kv_heads = 1, .head_dim = 32, .ffn_dim = 100, .vocab = 99,
    .context = 300, .dtype = LLAMAC_Q4S, .tied = 1, .biases = 1,
};
static const struct tiny_shape tiny_q6 = {
    .dim = 36, .n_layers = 2, .n_heads = 6, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 52, .vocab = 101,
    .context = 400, .dtype = LLAMAC_Q6, .tied = 1, .biases = 1,
};
static const struct tiny_shape tiny_few_bits = {
    .dim = 144, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 24, .ffn_dim = 200, .vocab = 101,
    .context = 400, .dtype = FEW_BITS,
};
static const struct tiny_shape tiny_exact = {
    .dim = 320, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .ffn_dim = 200, .vocab = 101,
    .context = 300, .dtype = EXACT_DTYPES,
};

// The token at a position of a sequence.
static inline int token_at(int sequence, int position, int vocab) {
    return (position * 37 + sequence * 11 + position * position) % vocab;
}
#endif
