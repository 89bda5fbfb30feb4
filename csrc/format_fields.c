// SPDX-License-Identifier: MIT
// format_fields.c - the table of the records' fields, and the checks of single fields against it.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "format.h"

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
#define LAYER_KIND(member, max, names) NUMBER("layer", layer_record, member, U32, 0, max, names)
#define TENSOR(member, type, min, max) NUMBER("tensor", tensor_record, member, type, min, max, NULL)

#define MAX_FILE 0x1p52        // a double represents sizes exactly, and sums of a few do not overflow 64 bits
#define MAX_VOCAB (1 << 24)
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

    CONFIG(dim, U32, 1, FORMAT_MAX_DIM),
    CONFIG(n_layers, U32, 1, 4096),
    CONFIG(n_heads, U32, 1, 4096),
    CONFIG(n_kv_heads, U32, 1, 4096),
    CONFIG(head_dim, U32, 1, 4096),
    CONFIG(vocab_size, U32, 1, MAX_VOCAB),
    CONFIG(n_token_ids, U32, 1, MAX_VOCAB),
    CONFIG(context, U32, 1, FORMAT_MAX_CONTEXT),
    CONFIG_ENUM(norm, NORM_LAYER, "rms,layer"),
    CONFIG_ENUM(position, POSITION_ROPE, "none,learned,rope"),
    CONFIG_ENUM(activation, ACTIVATION_XIELU, "silu,gelu_tanh,gelu_erf,relu,quick_gelu,relu2,xielu"),
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
    CONFIG(rope_original_context, U32, 0, FORMAT_MAX_CONTEXT),
    CONFIG(rope_attention_factor, F32, 0, HUGE_SCALE),
    CONFIG(bos_id, I32, -1, MAX_VOCAB - 1),
    CONFIG(eos_id, I32, -1, MAX_VOCAB - 1),
    CONFIG(add_bos, U32, 0, 1),
    CONFIG(add_eos, U32, 0, 1),
    CONFIG(n_stop_ids, U32, 0, FORMAT_MAX_STOP_IDS),
    CONFIG(stop_ids, I32, 0, MAX_VOCAB - 1),
    NUMBER("config", config, qk_norm, U32, QK_NORM_NONE, QK_NORM_ROTATED_HEAD,
           "none,head,whole,layer_head,rotated_head"),
    CONFIG(qk_norm_after_rope, U32, 0, 1),
    CONFIG(two_sided, U32, 0, 1),
    CONFIG(n_types, U32, 0, FORMAT_MAX_TYPES),
    CONFIG(scores_pairs, U32, 0, 1),
    CONFIG(n_pooled, U32, 0, FORMAT_MAX_POOLED),
    CONFIG(pooled_dim, U32, 0, FORMAT_MAX_DIM),
    NUMBER("config", config, pooled_activation, U32, POOLED_NONE, POOLED_RELU, "none,tanh,sigmoid,gelu_erf,relu"),
    NUMBER("config", config, state_norm, U32, STATE_NORM_NONE, STATE_NORM_AFTER_GATE, "none,before_gate,after_gate"),
    CONFIG(state_step_min, F32, 0, HUGE_SCALE),
    CONFIG(state_step_max, F32, 0, HUGE_SCALE),
    CONFIG(mtp_layers, U32, 0, 1),
    CONFIG(rounds_inputs, U32, 0, 1),
    CONFIG(bias_distance, U32, 0, FORMAT_MAX_BIAS_DISTANCE),
    CONFIG(pooled_norm, U32, 0, 1),
    NUMBER("config", config, drafter, U32, DRAFTER_NONE, DRAFTER_EAGLE3, "none,assistant,eagle3"),
    CONFIG(trunk_dim, U32, 0, FORMAT_MAX_DIM),
    CONFIG(n_clusters, U32, 0, FORMAT_MAX_CLUSTERS),
    CONFIG(clusters_used, U32, 0, FORMAT_MAX_CLUSTERS),
    CONFIG(eagle_layers, U32, 0, 4096),
    CONFIG(eagle_vocab_size, U32, 0, MAX_VOCAB),
    CONFIG(eagle_normed, U32, 0, 1),
    NUMBER("config", config, eagle_in_norm, U32, EAGLE_IN_NORM_NONE, EAGLE_IN_NORM_EACH, "none,whole,each"),
    CONFIG(eagle_out_normed, U32, 0, 1),
    CONFIG(state_norm_eps, F32, 0, 1),
    CONFIG(state_beta_doubled, U32, 0, 1),
    CONFIG(expert_dim, U32, 0, FORMAT_MAX_DIM),
    CONFIG(embedding_norm, U32, 0, 1),
    BYTES("config", config, reserved),

    LAYER_ENUM(mixer, MIXER_ATTENTION_MAMBA2, "attention,delta_net,mamba2,short_conv,none,attention_mamba2"),
    LAYER_ENUM(placement, PLACEMENT_NORMED_ATTN, "pre,post,sandwich,parallel,normed,normed_attn"),
    LAYER(layer_scale, F32, TINY, HUGE_SCALE),
    LAYER(window, U32, 0, FORMAT_MAX_CONTEXT),
    LAYER(rope, I32, -1, FORMAT_MAX_ROPE - 1),
    LAYER(n_heads, U32, 0, 4096),
    LAYER(n_kv_heads, U32, 0, 4096),
    LAYER(head_dim, U32, 0, 4096),
    LAYER(kv_source, I32, -1, 4095),
    LAYER(v_is_k, U32, 0, 1),
    LAYER_KIND(v_norm, V_NORM_HEAD, "none,head"),
    LAYER_KIND(output_gate, OUTPUT_GATE_ELEMENT, "none,head,element"),
    LAYER(sinks, U32, 0, 1),
    LAYER(query_beta, F32, 0, HUGE_SCALE),
    LAYER(query_context, U32, 0, FORMAT_MAX_CONTEXT),
    LAYER_ENUM(ffn, FFN_NONE, "plain,gated,experts,none"),
    LAYER(ffn_dim, U32, 0, FORMAT_MAX_DIM),
    LAYER(activation_limit, F32, 0, HUGE_SCALE),
    LAYER(up_offset, F32, -HUGE_SCALE, HUGE_SCALE),
    LAYER(n_experts, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER(n_experts_used, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER_KIND(router, ROUTER_SIGMOID, "softmax,sigmoid"),
    LAYER(router_choice_bias, U32, 0, 1),
    LAYER(n_expert_groups, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER(n_expert_groups_used, U32, 0, FORMAT_MAX_EXPERTS),
    LAYER(expert_weights, U32, 0, 1),
    LAYER(expert_scale, F32, TINY, HUGE_SCALE),
    LAYER(shared_ffn_dim, U32, 0, FORMAT_MAX_DIM),
    LAYER(shared_gate, U32, 0, 1),
    LAYER(layer_embedding_dim, U32, 0, FORMAT_MAX_DIM),
    LAYER(state_key_heads, U32, 0, 4096),
    LAYER(state_heads, U32, 0, 4096),
    LAYER(state_key_dim, U32, 0, 4096),
    LAYER(state_value_dim, U32, 0, 4096),
    LAYER(conv_width, U32, 0, FORMAT_MAX_CONV_WIDTH),
    LAYER(q_lora_rank, U32, 0, FORMAT_MAX_DIM),
    LAYER(kv_lora_rank, U32, 0, 4096),
    LAYER(qk_nope_head_dim, U32, 0, 4096),
    LAYER(v_head_dim, U32, 0, 4096),
    LAYER(latent_norm_eps, F32, 0, 1),
    LAYER(expert_weights_eps, F32, 0, 1),
    LAYER(expert_norms, U32, 0, 1),
    LAYER(expert_factors, U32, 0, 1),
    LAYER(plain_experts, U32, 0, 1),
    LAYER(sub_norms, U32, 0, 1),
    LAYER(window_chunks, U32, 0, 1),
    LAYER(query_offset, U32, 0, 1),
    LAYER(expert_weights_first, U32, 0, 1),

    TEXT("tensor", tensor_record, name),
    NUMBER("tensor", tensor_record, dtype, U32, 1, LLAMAC_N_DTYPES - 1,
           "f32,f16,bf16,q8,q4,q4s,q4_0,q4_1,q5_0,q5_1,q8_0,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,q6,q3,q2,t2"),
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

int format_all_zero(const uint8_t *p, size_t bytes) {
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

int format_check_record(const char *name, const char *where, const uint8_t *record, llamac_error *err) {
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        const llamac_field *f = &fields[i];
        if (strcmp(f->record, name)) continue;
        if (f->type == LLAMAC_TYPE_TEXT) {
            if (!is_padded_name((const char *)record + f->offset, f->count))
                return bad_model(err, "%s: %s is not a zero-padded printable name", where, f->name);
        } else if (f->type == LLAMAC_TYPE_BYTES) {
            if (!strcmp(f->name, "reserved") && !format_all_zero(record + f->offset, f->count))
                return bad_model(err, "%s: reserved bytes are not zero", where);
        } else if (check_range(f, where, record, err)) {
            return -1;
        }
    }
    return 0;
}
