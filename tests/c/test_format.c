// SPDX-License-Identifier: MIT
// test_format.c - files that the core must reject: truncated, damaged, of other formats, or with wrong fields under
// valid hashes.
#include <math.h>
#include "common.h"
#include "model.h"
#include "slots.h"
#include "tiny_model.h"

static int is_rejected(struct tiny_file file, size_t bytes) {
    llamac_model *model;
    if (llamac_model_open(&model, file.data, bytes, &err)) return 1;
    llamac_model_close(&model);
    return 0;
}

// Whether a byte is in a section that the core does not read (metadata, tokenizer and other texts).
static int is_in_text(const struct header *h, size_t at) {
    for (int s = SECTION_METADATA; s < SECTION_DATA; s++)
        if (at >= h->sections[s].offset && at - h->sections[s].offset < h->sections[s].bytes) return 1;
    return 0;
}

static void truncated_files_are_rejected(void) {
    struct tiny_file file = tiny_model(&tiny_gpt2);
    for (size_t bytes = 0; bytes < file.bytes; bytes += bytes < 6000 ? 1 : 997) {
        CHECK(is_rejected(file, bytes), "truncated to %zu bytes", bytes);
        CHECK(strstr(err.message, bytes ? "header" : "empty"), "%zu bytes: %s", bytes, err.message);
    }
    CHECK(!is_rejected(file, file.bytes), "%s", err.message);
    free(file.data);
}

// Hashes cover every bit before the data, except those of texts, which Python checks.
static void hashes_reveal_every_flipped_bit(void) {
    struct tiny_file file = tiny_model(&tiny_gpt2);
    const struct header *h = (const struct header *)(const void *)file.data;
    const size_t end = (size_t)h->sections[SECTION_DATA].offset;
    for (size_t at = 0; at < end; at++) {
        if (is_in_text(h, at)) continue;
        for (int bit = sparse ? (int)(at % 4) : 0; bit < 8; bit += sparser(4)) {
            file.data[at] ^= (uint8_t)(1 << bit);
            CHECK(is_rejected(file, file.bytes), "bit %d of byte %zu", bit, at);
            file.data[at] ^= (uint8_t)(1 << bit);
        }
    }
    CHECK(!is_rejected(file, file.bytes), "%s", err.message);
    free(file.data);
}

// With valid hashes, a field's own check rejects the change, or the file describes another valid model.
static void flipped_bits_under_valid_hashes_never_crash(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    const struct header *h = (const struct header *)(const void *)file.data;
    uint8_t *copy = take(file.bytes);
    memcpy(copy, file.data, file.bytes);
    const struct section_record *tensors = &h->sections[SECTION_TENSORS];
    const size_t prefix = (size_t)h->sections[SECTION_DATA].offset, tables = (size_t)(tensors->offset + tensors->bytes);
    uint64_t state = 5;
    int accepted = 0;
    for (size_t at = 8; at < tables; at++) {
        for (int bit = sparse ? (int)(at % 3) : 0; bit < 8; bit += sparser(3)) {
            if (at > sizeof *h + 600 && random_below(&state, 4)) continue;   // a sample of the long tables
            file.data[at] ^= (uint8_t)(1 << bit);
            if (tiny_can_rehash(file.data, file.bytes)) tiny_rehash(file.data);
            llamac_model *model;
            if (llamac_model_open(&model, file.data, file.bytes, &err)) {
                CHECK(err.message[0] && strlen(err.message) < sizeof err.message - 1, "empty or truncated message");
            } else {
                accepted++;
                float *logits = take(sizeof(float) * model->config->vocab_size);
                llamac_session *s = open_session(model, 1, 0, 1, NULL);
                CHECK(!llamac_eval(s, &(llamac_row){ 0, 0, 0, 1 }, 1, logits, NULL, &err), "%s", err.message);
                llamac_session_close(&s);
                llamac_model_close(&model);
                free(logits);
            }
            memcpy(file.data, copy, prefix);
        }
    }
    CHECK(accepted > 0, "no change was valid");
    free(copy);
    free(file.data);
}

// A field of a record, an invalid value for it, and its name. Fields of up to 8 bytes.
struct invalid { size_t record, offset, size; int64_t value; const char *field; };

static void every_field_has_its_own_check(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    const struct header *h = (const struct header *)(const void *)file.data;
    const size_t section = offsetof(struct header, sections);
    const size_t config = (size_t)h->sections[SECTION_CONFIG].offset;
    const size_t layer = (size_t)h->sections[SECTION_LAYERS].offset;
    const size_t tensor = (size_t)h->sections[SECTION_TENSORS].offset + 3 * sizeof(struct tensor_record);
#define FIELD(at, type, member, value) \
    { at, offsetof(struct type, member), sizeof(((struct type *)0)->member), value, #member }
#define HEADER(member, value) FIELD(0, header, member, value)
#define SECTION(member, value) FIELD(section, section_record, member, value)
#define CONFIG(member, value) FIELD(config, config, member, value)
#define LAYER(member, value) FIELD(layer, layer_record, member, value)
#define TENSOR(member, value) FIELD(tensor, tensor_record, member, value)
    enum { NAN_BITS = 0x7fc00000, INF_BITS = 0x7f800000 };
    const int64_t minus_one_bits = 0xbf800000;
    const struct invalid cases[] = {
        HEADER(version, 2), HEADER(numerics, 9), HEADER(incompatible, 1), HEADER(file_bytes, 5), HEADER(alignment, 32),
        HEADER(n_sections, 8), HEADER(reserved[3], 1),
        SECTION(offset, 64), SECTION(name[2], 'x'), SECTION(bytes, 1 << 30),
        CONFIG(dim, 0), CONFIG(dim, 40), CONFIG(n_layers, 4), CONFIG(n_heads, 5), CONFIG(n_kv_heads, 4),
        CONFIG(head_dim, 12), CONFIG(vocab_size, 0), CONFIG(n_token_ids, 102), CONFIG(context, 0), CONFIG(norm, 3),
        CONFIG(position, 0), CONFIG(activation, 77), CONFIG(activation, ACTIVATION_XIELU), CONFIG(tied_output, 2),
        CONFIG(norm_eps, NAN_BITS),
        CONFIG(attention_scale, 0), CONFIG(embedding_scale, 0), CONFIG(residual_scale, INF_BITS),
        CONFIG(logit_scale, minus_one_bits), CONFIG(attention_soft_cap, NAN_BITS),
        CONFIG(logit_soft_cap, minus_one_bits), CONFIG(n_rope, 5), CONFIG(qk_norm, 4), CONFIG(qk_norm, QK_NORM_HEAD),
        CONFIG(qk_norm, QK_NORM_WHOLE), CONFIG(rope_dim[0], 11), CONFIG(rope_dim[1], 2),
        CONFIG(rope_attention_factor[0], 0), CONFIG(rope_original_context[2], 3), CONFIG(bos_id, -2),
        CONFIG(eos_id, 101), CONFIG(add_bos, 3), CONFIG(n_stop_ids, 17), CONFIG(stop_ids[0], 101),
        CONFIG(stop_ids[3], 1), CONFIG(two_sided, 2), CONFIG(mtp_layers, 2), CONFIG(mtp_layers, 1), CONFIG(n_types, 1),
        CONFIG(n_types, 257),
        CONFIG(scores_pairs, 1), CONFIG(n_pooled, 5), CONFIG(pooled_dim[0], 1), CONFIG(pooled_activation[3], 1),
        CONFIG(embedding_norm, 2), CONFIG(bias_distance, (1 << 17) + 1),
        CONFIG(state_norm_eps, minus_one_bits), CONFIG(state_beta_doubled, 2), CONFIG(expert_dim, (1 << 20) + 1),
        CONFIG(pooled_norm[0], 1), CONFIG(pooled_norm[3], 2), CONFIG(reserved[100], 1),
        CONFIG(drafter, 2), CONFIG(drafter, 1), CONFIG(trunk_dim, 8), CONFIG(n_clusters, 1), CONFIG(clusters_used, 1),
        LAYER(window, (1 << 24) + 1), LAYER(rope, 1), LAYER(placement, 7), LAYER(placement, 0),
        LAYER(placement, PLACEMENT_POST), LAYER(placement, PLACEMENT_SANDWICH), LAYER(ffn, 0), LAYER(ffn, FFN_EXPERTS),
        LAYER(ffn_dim, 0), LAYER(n_experts, 4), LAYER(n_experts_used, 1), LAYER(expert_weights, 1),
        LAYER(shared_ffn_dim, 8), LAYER(shared_gate, 1),
        TENSOR(name[3], 'x'), TENSOR(name[63], 'x'), TENSOR(dtype, 9), TENSOR(dtype, 4), TENSOR(n_dims, 1),
        TENSOR(n_dims, 7), TENSOR(shape[0], 17), TENSOR(shape[3], 1), TENSOR(offset, 64), TENSOR(bytes, 64),
        TENSOR(reserved[1], 1),
    };
    uint8_t *copy = take(file.bytes);
    memcpy(copy, file.data, file.bytes);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct invalid *c = &cases[i];
        memcpy(file.data + c->record + c->offset, &c->value, c->size);
        if (c->record == section) tiny_rehash_header(file.data);
        else tiny_rehash(file.data);
        CHECK(is_rejected(file, file.bytes), "%s was accepted", c->field);
        char name[40] = "layxrs.0.attn_q.weight";   // a changed tensor name is in the message itself
        if (strcmp(c->field, "name[3]"))
            snprintf(name, sizeof name, "%.*s", (int)strcspn(c->field, "["), c->field);
        CHECK(strstr(err.message, name), "%s: %s", c->field, err.message);
        memcpy(file.data, copy, file.bytes);
    }
    free(copy);
    free(file.data);
}

// Fields that are valid alone and not together: the message has to name them.
static void contradictions_are_rejected(void) {
#define IN_CONFIG(member, number) { 1, offsetof(struct config, member), number }
#define IN_LAYER(l, member, number) { 2 + l, offsetof(struct layer_record, member), number }
    struct change { size_t record, offset; uint32_t value; };   // record: 1: the config; 2 + l: layer l; 0: none
    const uint32_t one_bits = 0x3f800000;
    struct tiny_shape with_mtp = tiny_llama;
    with_mtp.mtp = 1;   // layer 3
    struct tiny_shape assistant = tiny_llama;
    assistant.vocab = 112, assistant.clusters = 7, assistant.trunk_dim = 20;
    struct tiny_shape head = tiny_llama;
    head.n_layers = 1, head.eagle = 20;
    struct tiny_shape deep_head = tiny_llama;
    deep_head.eagle = 20, deep_head.eagle_norm = EAGLE_IN_NORM_EACH;
    const struct { const struct tiny_shape *shape; struct change changes[3]; const char *message; } cases[] = {
        { &tiny_mamba, { IN_CONFIG(state_step_min, one_bits + 1), IN_CONFIG(state_step_max, one_bits) },
          "config: state_step_max is 1, expected 0 or at least state_step_min 1.0000001" },
        { &tiny_llama, { IN_CONFIG(head_dim, 1 << 20), IN_CONFIG(rope_dim, 0) }, "head_dim" },
        { &tiny_llama, { IN_CONFIG(qk_norm_after_rope, 1) }, "config: qk_norm_after_rope is 1" },
        { &tiny_llama, { IN_CONFIG(add_bos, 1), IN_CONFIG(bos_id, UINT32_MAX) }, "bos_id is -1" },
        { &tiny_encoder, { IN_CONFIG(tied_output, 0) }, "config: tied_output is 0, expected 1 with two_sided 1" },
        { &tiny_encoder, { IN_CONFIG(bias_distance, 1) },
          "tensor distance_bias.weight is missing, with bias_distance 1" },
        { &tiny_biased, { IN_CONFIG(bias_distance, 0) },
          "tensor distance_bias.weight does not belong to a model of this config, with bias_distance 0" },
        { &tiny_biased, { IN_CONFIG(bias_distance, 70) }, "n_heads 4 times the 141 distances up to bias_distance" },
        { &tiny_llama, { IN_LAYER(1, n_heads, 7) }, "layer 1: n_heads is 7, expected at most the config's 6" },
        { &tiny_llama, { IN_LAYER(1, n_heads, 3) }, "layer 1: n_heads is 3, expected a multiple of n_kv_heads 2" },
        { &tiny_llama, { IN_LAYER(1, head_dim, 8) }, "layer 1: rope is 0, but rope_dim[0] 10 exceeds head_dim 8" },
        { &tiny_llama, { IN_LAYER(0, query_beta, one_bits) }, "layer 0: query_beta is 1 with query_context 0" },
        { &tiny_llama, { IN_CONFIG(qk_norm, QK_NORM_WHOLE), IN_LAYER(0, v_is_k, 1) },
          "layer 0: v_is_k is 1, expected 0 with qk_norm whole" },
        { &tiny_llama, { IN_LAYER(1, kv_source, 0), IN_LAYER(1, v_is_k, 1) },
          "layer 1: v_is_k is 1 and v_norm is 0, expected 0 with kv_source 0" },
        { &tiny_llama, { IN_LAYER(1, kv_source, 1) }, "layer 1: kv_source is 1, expected an earlier layer" },
        { &tiny_llama, { IN_LAYER(0, head_dim, 8), IN_LAYER(0, rope, UINT32_MAX), IN_LAYER(1, kv_source, 0) },
          "layer 1: kv_source is 0, expected a layer of attention with its own 2 KV heads of 10" },
        { &tiny_llama, { IN_LAYER(0, q_lora_rank, 8) }, "layer 0: q_lora_rank is 8, expected 0 with kv_lora_rank 0" },
        { &tiny_latent, { IN_LAYER(0, v_is_k, 1) }, "layer 0: v_is_k is 1, expected 0 with kv_lora_rank 32" },
        { &tiny_latent, { IN_LAYER(0, v_head_dim, 3) }, "layer 0: kv_lora_rank is 32 and v_head_dim is 3" },
        { &tiny_latent, { IN_LAYER(0, qk_nope_head_dim, 0) }, "layer 0: qk_nope_head_dim is 0, expected at least 1" },
        { &tiny_latent, { IN_LAYER(0, head_dim, 36) }, "layer 0: head_dim is 36, expected at least kv_lora_rank 32" },
        { &tiny_latent, { IN_LAYER(0, v_head_dim, 1 << 20) }, "v_head_dim" },
        { &tiny_llama, { IN_LAYER(0, state_heads, 2) }, "layer 0: state_heads is 2 with mixer attention" },
        { &tiny_llama, { IN_LAYER(0, conv_width, 2) }, "layer 0: conv_width is 2 with mixer attention" },
        { &tiny_recurrent, { IN_LAYER(0, state_key_heads, 5) }, "expected a multiple of state_key_heads 5" },
        { &tiny_recurrent, { IN_LAYER(0, state_key_dim, 3) }, "layer 0: state_key_dim is 3, expected a multiple of" },
        { &tiny_recurrent, { IN_LAYER(0, window, 3) }, "layer 0: window is 3, expected 0 with mixer" },
        { &tiny_experts, { IN_LAYER(3, n_expert_groups, 2) }, "layer 3: n_expert_groups is 2" },
        { &tiny_experts, { IN_LAYER(3, n_expert_groups, 5), IN_LAYER(3, n_expert_groups_used, 1),
                           IN_LAYER(3, n_experts_used, 2) }, "layer 3: n_experts_used is 2, expected at most 1" },
        { &tiny_experts, { IN_LAYER(3, expert_weights_eps, one_bits) }, "layer 3: expert_weights_eps is 1" },
        { &tiny_experts, { IN_LAYER(3, shared_gate, 1) }, "layer 3: shared_gate is 1, expected 0" },
        { &tiny_experts, { IN_LAYER(3, expert_norms, 1) }, "layer 3: expert_norms is 1, expected 0" },
        { &tiny_gpt2, { IN_LAYER(0, activation_limit, one_bits) }, "layer 0: activation_limit is 1, expected 0" },
        { &tiny_llama, { IN_LAYER(2, layer_embedding_dim, 8) },
          "layer 2: layer_embedding_dim is 8, expected that of layer 0, 0" },
        { &tiny_encoder, { IN_LAYER(0, mixer, MIXER_MAMBA2) }, "layer 0: mixer is" },
        { &tiny_encoder, { IN_LAYER(0, layer_embedding_dim, 8), IN_LAYER(1, layer_embedding_dim, 8),
                            IN_LAYER(2, layer_embedding_dim, 8) },
          "layer 0: layer_embedding_dim is 8, expected 0 with two_sided 1" },
        { &tiny_gpt2, { IN_CONFIG(activation, ACTIVATION_XIELU), IN_LAYER(0, layer_embedding_dim, 8) },
          "layer 0: layer_embedding_dim is 8, expected 0 with activation xielu" },
        { &tiny_llama, { IN_CONFIG(trunk_dim, 8) }, "config: trunk_dim is 8, expected 0 with drafter none" },
        { &assistant, { IN_CONFIG(trunk_dim, 0) }, "config: trunk_dim is 0, expected a width with drafter assistant" },
        { &assistant, { IN_CONFIG(drafter, 0), IN_CONFIG(trunk_dim, 0) }, "config: n_clusters is 7, expected 0" },
        { &tiny_llama, { IN_CONFIG(eagle_normed, 1) }, "eagle_normed is 1, expected 0 unless drafter is eagle3" },
        { &head, { IN_CONFIG(eagle_vocab_size, 0) }, "eagle_vocab_size is 0, expected 1 to vocab_size 101" },
        { &head, { IN_CONFIG(eagle_vocab_size, 102) }, "eagle_vocab_size is 102, expected 1 to vocab_size 101" },
        { &tiny_llama, { IN_CONFIG(eagle_in_norm, 1) }, "eagle_in_norm is 1, expected 0 unless drafter is eagle3" },
        { &tiny_llama, { IN_CONFIG(eagle_out_normed, 1) }, "eagle_out_normed is 1, expected 0 unless drafter is" },
        { &head, { IN_CONFIG(eagle_in_norm, 1) },
          "tensor drafter.in_norm.weight is missing, with eagle_in_norm whole" },
        { &deep_head, { IN_CONFIG(eagle_in_norm, 0) },
          "tensor drafter.in_norm.weight does not belong to a model of this config, with eagle_in_norm none" },
        { &head, { IN_LAYER(0, placement, PLACEMENT_POST) }, "layer 0: placement is 2, expected 1 with drafter" },
        { &deep_head, { IN_LAYER(1, placement, PLACEMENT_POST) }, "layer 1: placement is 2, expected 1 with drafter" },
        { &deep_head, { IN_LAYER(1, layer_embedding_dim, 8) }, "layer_embedding_dim" },
        { &head, { IN_CONFIG(rounds_inputs, 1) }, "rounds_inputs is 1, expected 0 with drafter eagle3" },
        { &assistant, { IN_CONFIG(norm, NORM_LAYER) }, "config: norm is 2, expected 1 with drafter assistant" },
        { &assistant, { IN_CONFIG(tied_output, 1) }, "config: tied_output is 1, expected 0 with drafter assistant" },
        { &assistant, { IN_CONFIG(n_clusters, 5) }, "a multiple of 16 of vocab_size 112 tokens" },
        { &assistant, { IN_CONFIG(n_clusters, 14) }, "a multiple of 16 of vocab_size 112 tokens" },
        { &assistant, { IN_CONFIG(clusters_used, 8) }, "config: clusters_used is 8 with n_clusters 7" },
        { &assistant, { IN_CONFIG(clusters_used, 0) }, "config: clusters_used is 0 with n_clusters 7" },
        { &assistant, { IN_CONFIG(logit_soft_cap, one_bits) }, "logit_soft_cap 1, expected 1 and 0 with n_clusters 7" },
        { &assistant, { IN_CONFIG(n_clusters, 0), IN_CONFIG(clusters_used, 0) },
          "tensor drafter.clusters.weight does not belong to a model of this config, with n_clusters 0" },
        { &assistant, { IN_CONFIG(trunk_dim, 21) }, "tensor drafter.in.weight: its shape is (36, 40)" },
        { &assistant, { IN_LAYER(1, kv_source, 0) }, "layer 1: kv_source is 0, expected -1 with drafter assistant" },
        { &assistant, { IN_LAYER(2, v_norm, V_NORM_HEAD) }, "layer 2: v_norm is 1, expected 0 with drafter" },
        { &with_mtp, { IN_CONFIG(mtp_layers, 0) }, "n_layers 3 and mtp_layers 0 need" },
        { &with_mtp, { IN_CONFIG(n_layers, 4) }, "n_layers 4 and mtp_layers 1 need" },
        { &with_mtp, { IN_CONFIG(norm, NORM_LAYER) }, "config: mtp_layers is 1, expected 0 unless norm is rms" },
        { &with_mtp, { IN_CONFIG(position, POSITION_LEARNED) }, "config: mtp_layers is 1, expected 0 unless norm" },
        { &with_mtp, { IN_CONFIG(two_sided, 1) }, "position is not learned, and two_sided and scores_pairs are 0" },
        { &with_mtp, { IN_LAYER(3, mixer, MIXER_NONE) }, "layer 3: the MTP layer has mixer 5" },
        { &with_mtp, { IN_LAYER(3, kv_source, 0) }, "layer 3: the MTP layer has mixer 1, kv_source 0" },
        { &with_mtp, { IN_LAYER(3, ffn_dim, 60) }, "tensor layers.3.ffn_gate.weight: its shape is (52, 36)" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct tiny_file file = tiny_model(cases[i].shape);
        const struct header *h = (const struct header *)(const void *)file.data;
        CHECK(!is_rejected(file, file.bytes), "case %zu: %s", i, err.message);
        for (int k = 0; k < 3 && cases[i].changes[k].record; k++) {
            const struct change *c = &cases[i].changes[k];
            const size_t record = c->record == 1 ? (size_t)h->sections[SECTION_CONFIG].offset
                : (size_t)h->sections[SECTION_LAYERS].offset + (c->record - 2) * sizeof(struct layer_record);
            memcpy(file.data + record + c->offset, &c->value, sizeof c->value);
        }
        tiny_rehash(file.data);
        CHECK(is_rejected(file, file.bytes) && strstr(err.message, cases[i].message), "case %zu, %s: %s", i,
              cases[i].message, err.message);
        free(file.data);
    }
}

// The value of a size as a message words it: "n_heads 6 times head_dim 10", "half of rope_dim[0] 10". Numbers of
// layers and tables do not count.
static uint64_t worded_size(const char *text, const struct layer_record *layer) {
    uint64_t numbers[4] = { 0 }, product = 1;
    int n = 0;
    for (const char *at = text; *at && strncmp(at, " of layer", 9); at++) {
        if (*at == '[') at = strchr(at, ']');
        else if (*at >= '0' && *at <= '9' && n < 4 && at > text && at[-1] == ' ')
            numbers[n++] = strtoull(at, (char **)(uintptr_t)&at, 10), at--;
    }
    if (*text >= '0' && *text <= '9') numbers[n++] = strtoull(text, NULL, 10);
    if (strstr(text, "the sum of")) return numbers[0] * (numbers[1] + numbers[2]);
    if (!strncmp(text, "conv_width times", 16)) numbers[n++] = layer->conv_width;
    for (int i = 0; i < n; i++) product *= numbers[i];
    return strstr(text, "half of") ? product / 2 : product;
}

// Messages about the shape of a tensor say which fields determine it.
static void sizes_of_tensors_are_worded(void) {
    static const struct tiny_shape rotated = {
        .dim = 40, .n_layers = 4, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .ffn_dim = 52, .vocab = 101,
        .context = 400, .dtype = LLAMAC_F32, .experts = 6, .window = 9, .chunks = 1, .mixers = 2,
    }, assistant = {
        .dim = 24, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 40, .vocab = 112,
        .context = 400, .dtype = LLAMAC_F32, .window = 20, .trunk_dim = 36, .clusters = 7,
    }, head = {
        .dim = 28, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ffn_dim = 44, .vocab = 101,
        .context = 400, .dtype = LLAMAC_F32, .eagle = -40, .eagle_norm = EAGLE_IN_NORM_EACH, .norm_after_rope = 1,
    };
    static const struct tiny_shape *const shapes[] = {
        &tiny_llama, &tiny_experts, &tiny_features, &tiny_encoder, &tiny_biased, &tiny_layered, &tiny_mixture,
        &tiny_recurrent, &tiny_mamba, &tiny_latent, &tiny_mixers, &tiny_gpt2, &rotated, &assistant, &head,
        &tiny_distant,
    };
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        struct tiny_file file = tiny_model(shapes[i]);
        llamac_model *model = open_model(file);
        llamac_slot_iterator it = { .config = model->config, .layers = model->file.layers };
        while (slot_advance(&it)) {
            char name[FORMAT_NAME_BYTES], rows[SLOT_TEXT_BYTES], columns[SLOT_TEXT_BYTES], reason[SLOT_TEXT_BYTES];
            slot_name(&it, name);
            slot_describe_conditions(&it, reason);
            CHECK(!*reason || !strncmp(reason, ", with ", 7), "%s: %s", name, reason);
            if (!slot_applies(&it)) {
                CHECK(*reason, "%s: the message does not say why the model lacks it", name);
                continue;
            }
            const struct layer_record *layer = &model->file.layers[min_int((int)it.layer, shapes[i]->n_layers - 1)];
            slot_describe_rows(&it, rows);
            slot_describe_columns(&it, columns);
            CHECK(!slot_is_matrix(&it) || worded_size(rows, layer) == slot_rows(&it), "%s: %s, but %d rows", name,
                  rows, (int)slot_rows(&it));
            CHECK(worded_size(columns, layer) == slot_columns(&it), "%s: %s, but %d columns", name, columns,
                  (int)slot_columns(&it));
        }
        llamac_model_close(&model);
        free(file.data);
    }
}

// C code reads names as strings, so each has to end within its field.
static void names_are_padded_with_zeros(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    struct header *h = (struct header *)(void *)file.data;
    struct tensor_record *tensor = (struct tensor_record *)(void *)(file.data + h->sections[SECTION_TENSORS].offset);
    char *names[] = { h->sections[2].name, tensor->name };
    const size_t sizes[] = { sizeof h->sections[2].name, sizeof tensor->name };
    for (int i = 0; i < 2; i++) {
        char original[sizeof tensor->name];
        memcpy(original, names[i], sizes[i]);
        for (int kind = 0; kind < 4; kind++) {
            memset(names[i], kind == 0 ? 'x' : 0, sizes[i]);   // 0: without an end; 1: empty
            if (kind == 2) strcpy(names[i], "x y");
            if (kind == 3) strcpy(names[i], "x\x7f");
            tiny_rehash_header(file.data);
            if (i) tiny_rehash(file.data);
            CHECK(is_rejected(file, file.bytes) && strstr(err.message, "name is not a zero-padded printable name"),
                  "name %d of kind %d: %s", i, kind, err.message);
        }
        memcpy(names[i], original, sizes[i]);
    }
    free(file.data);
}

// The core checks the number of tensors before it allocates for them.
static void wrong_numbers_of_experts_are_rejected(void) {
    struct tiny_file file = tiny_model(&tiny_experts);
    const struct header *h = (const struct header *)(const void *)file.data;
    struct layer_record *last = (struct layer_record *)(void *)(file.data + h->sections[SECTION_LAYERS].offset)
        + tiny_experts.n_layers - 1;
    CHECK(!is_rejected(file, file.bytes), "%s", err.message);
    const struct layer_record valid = *last;
    const struct { uint32_t *field, value; const char *message; } cases[] = {
        { &last->n_experts, 0, "n_experts is 0" },
        { &last->n_experts, 6, "n_experts 6 of layer" },
        { &last->n_experts, 4, "n_experts 4 of layer" },
        { &last->n_experts, 4097, "expected 0 to 4096" },
        { &last->n_experts, 4096, "n_experts is 4111 in all layers together, with 12333 matrices" },
        { &last->n_experts_used, 0, "n_experts_used is 0" },
        { &last->n_experts_used, 6, "n_experts_used is 6" },
        { &last->expert_weights, 2, "expert_weights is 2" },
        { &last->ffn, FFN_GATED, "does not go with ffn gated" },
        { &last->ffn_dim, 77, "ffn_dim 77 of layer" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        *last = valid;
        *cases[i].field = cases[i].value;
        tiny_rehash(file.data);
        CHECK(is_rejected(file, file.bytes) && strstr(err.message, cases[i].message), "%s: %s", cases[i].message,
              err.message);
    }
    free(file.data);
}

static void errors_name_other_file_formats(void) {
    static const struct { const char *bytes; size_t n; const char *format; } cases[] = {
        { "GGUF\3\0\0\0", 8, "GGUF" },
        { "PK\3\4abc", 7, "ZIP" },
        { "\x20\0\0\0\0\0\0\0{\"a\":1}", 15, "safetensors" },
        { "24ka\1\0\0\0", 8, "llama2.c" },                                         // versions 1 and 2
        { "\x40\0\0\0\xac\0\0\0\5\0\0\0\x8\0\0\0\4\0\0\0\0\2\0\0\0\2\0\0", 28, "llama2.c" },   // version 0: 7 sizes
        { "hello world", 11, "magic" },
    };
    uint8_t *page = take(256);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        memset(page, 0, 256);
        memcpy(page, cases[i].bytes, cases[i].n);
        CHECK(is_rejected((struct tiny_file){ page, 256 }, 256) && strstr(err.message, cases[i].format), "%s: %s",
              cases[i].format, err.message);
    }
    CHECK(is_rejected((struct tiny_file){ page + 1, 200 }, 200) && err.code == LLAMAC_BAD_ARGUMENT, "unaligned: %s",
          err.message);
    free(page);
}

// An empty section after the end of the file would make the core read padding there. The address sanitizer sees it.
static void nothing_after_the_end_is_read(void) {
    struct header h = tiny_header((const uint64_t[N_SECTIONS]){ [SECTION_CONFIG] = 1 });
    const size_t bytes = (size_t)h.sections[SECTION_CONFIG].offset + 1;
    h.file_bytes = bytes;
    void *exact = NULL;   // exactly `bytes` long, which `take` is not
    CHECK(!posix_memalign(&exact, 64, bytes), "memory");
    memset(exact, 0, bytes);
    memcpy(exact, &h, sizeof h);
    tiny_rehash_header(exact);
    CHECK(is_rejected((struct tiny_file){ exact, bytes }, bytes) && strstr(err.message, "section table, layers")
          && strstr(err.message, "after the file"), "%s", err.message);
    free(exact);
}

// The table is copied, so its size must be checked first. This file is sparse; the copy would take 160 MiB.
static void too_many_tensors_are_rejected_before_the_table_is_copied(void) {
    struct header h = tiny_header((const uint64_t[N_SECTIONS]){
        [SECTION_CONFIG] = sizeof(struct config),
        [SECTION_LAYERS] = sizeof(struct layer_record),
        [SECTION_TENSORS] = (FORMAT_MAX_TENSORS + 1) * sizeof(struct tensor_record),
    });
    struct sha256 id;
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) sha256_add(&id, h.sections[s].sha256, HASH_BYTES);
    sha256_finish(&id, h.id);
    const size_t bytes = (size_t)h.file_bytes;
    uint8_t *memory = calloc(bytes + FORMAT_ALIGNMENT, 1), *data = memory;
    CHECK(memory, "memory");
    while ((uintptr_t)data % FORMAT_ALIGNMENT) data++;
    memcpy(data, &h, sizeof h);
    tiny_rehash_header(data);
    llamac_test_fail_allocation(1);
    CHECK(is_rejected((struct tiny_file){ data, bytes }, bytes)
          && strstr(err.message, "expected at most 167772160 (1048576 tensors)"), "%s", err.message);
    llamac_test_fail_allocation(0);
    free(memory);
}

// The number of slots, or -1 if the iteration fails. It must then fail again.
static int count_slots(const struct config *config, const struct layer_record *layers) {
    llamac_slot_iterator slots = { .config = config, .layers = layers };
    llamac_slot slot;
    int n = 0, result;
    while ((result = llamac_slot_next(&slots, &slot)) > 0) n++;
    return result || llamac_slot_next(&slots, &slot) ? -1 : n;
}

// The iteration runs before the config has been checked, so it must not index arrays with the config's numbers.
static void slots_of_damaged_configs_are_rejected(void) {
    struct config config = tiny_config(&tiny_llama);
    struct layer_record layers[3] = {
        { .ffn = FFN_GATED },
        { .ffn = FFN_EXPERTS, .n_experts = 5 },
        { .ffn = FFN_GATED, .n_experts = UINT32_MAX },   // ignored: this layer has no experts
    };
    CHECK(count_slots(&config, layers) > 50, "%d slots", count_slots(&config, layers));
    layers[1].n_experts = FORMAT_MAX_EXPERTS;
    CHECK(count_slots(&config, layers) > FORMAT_MAX_EXPERTS, "%d slots", count_slots(&config, layers));
    const uint32_t too_large[] = { FORMAT_MAX_EXPERTS + 1, 1000000, UINT32_MAX };
    for (size_t i = 0; i < ARRAY_LEN(too_large); i++) {
        layers[1].n_experts = too_large[i];
        CHECK(count_slots(&config, layers) < 0, "n_experts %u", too_large[i]);
    }
    layers[1].n_experts = 5;
    const uint32_t too_many_tables[] = { FORMAT_MAX_ROPE + 1, 1000000, UINT32_MAX };
    for (size_t i = 0; i < ARRAY_LEN(too_many_tables); i++) {
        config.n_rope = too_many_tables[i];
        CHECK(count_slots(&config, layers) < 0, "n_rope %u", too_many_tables[i]);
    }
    config.n_rope = 0;
    config.n_pooled = FORMAT_MAX_POOLED + 1;
    CHECK(count_slots(&config, layers) < 0, "n_pooled %u", config.n_pooled);
}

static void sha256_matches_the_standard(void) {
    static const uint8_t of_abc[HASH_BYTES] = {
        0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
        0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad,
    };
    uint8_t data[300], digest[HASH_BYTES], whole[HASH_BYTES];
    hash("abc", 3, digest);
    CHECK(!memcmp(digest, of_abc, HASH_BYTES), "abc");
    for (int i = 0; i < 300; i++) data[i] = (uint8_t)i;
    for (size_t n = 0; n < 300; n++) {
        hash(data, n, whole);
        struct sha256 h;
        sha256_start(&h);
        sha256_add(&h, data, n / 3);
        sha256_add(&h, data + n / 3, n - n / 3);
        sha256_finish(&h, digest);
        CHECK(!memcmp(digest, whole, HASH_BYTES), "%zu bytes in two parts", n);
    }
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(sha256_matches_the_standard);
    RUN(truncated_files_are_rejected);
    RUN(hashes_reveal_every_flipped_bit);
    RUN(every_field_has_its_own_check);
    RUN(contradictions_are_rejected);
    RUN(sizes_of_tensors_are_worded);
    RUN(names_are_padded_with_zeros);
    RUN(flipped_bits_under_valid_hashes_never_crash);
    RUN(wrong_numbers_of_experts_are_rejected);
    RUN(errors_name_other_file_formats);
    RUN(nothing_after_the_end_is_read);
    RUN(too_many_tensors_are_rejected_before_the_table_is_copied);
    RUN(slots_of_damaged_configs_are_rejected);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_format");
}
