// SPDX-License-Identifier: MIT
// slots.c - the list of slots, iteration over those of a config, and what messages say about them.
#include "slots.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include "common.h"

// ---- the list

enum extent {
    ONE, ONE_ROW, DIM, VOCAB, CONTEXT, ROPE_HALF, HEADS, Q_DIM, KV_DIM, Q_NORM_DIM, K_NORM_DIM, FFN_DIM, SHARED_FFN_DIM,
    EXPERTS, CHANNELS, CONV_TAPS, STATE_HEADS, STATE_VALUE_DIM, STATE_VALUES, TYPES, POOLED_OUT, POOLED_IN,
    Q_INPUTS, MIX_DIM, Q_LORA_RANK, KV_LORA_RANK, LATENT_Q_DIM, NOPE_DIM, THREE_DIM, LAYER_EMBEDDING, LAYER_EMBEDDINGS,
    TWO_DIM, DISTANCES, GATES, TRUNK_DIM, DRAFTER_INPUTS, CLUSTERS, ATTN_INPUTS, OUTPUT_ROWS,
    HEAD_DIM, EAGLE_VOCAB, EXPERT_DIM
};

// When a model has a tensor: if all of its conditions hold. OPTIONAL: it may then still lack the tensor.
// condition_holds decides a condition, and slot_describe_conditions explains it: a new one belongs in both.
enum condition {
    ALWAYS, NOTHING = ALWAYS,   // NOTHING ends a list of conditions
    OPTIONAL, IF_LAYER_NORM, IF_LEARNED, IF_LONG_ROPE, IF_UNTIED, IF_QK_NORM, IF_ATTN_NORM, IF_FFN_NORM, IF_POST_NORM,
    IF_DENSE, IF_GATED, IF_EXPERTS, IF_OWN_KV, IF_OWN_V, IF_SINKS, IF_SHARED, IF_SHARED_GATE, IF_ATTENTION,
    IF_DELTA_NET, IF_OUTPUT_GATE, IF_TYPES, IF_LATENT, IF_LATENT_Q, IF_NOT_LATENT, IF_CHOICE_BIAS, IF_SHORT_CONV,
    IF_LAYER_EMBEDDING, IF_EXPERT_NORMS, IF_EXPERT_FACTORS, IF_XIELU, IF_MAMBA2, IF_STATE_NORM, IF_SUB_NORMS,
    IF_BIASED_DISTANCES, IF_POOLED_NORM, IF_MTP, IF_NOT_ASSISTANT, IF_ASSISTANT, IF_CLUSTERS, IF_DRAFTER, IF_EAGLE,
    IF_OUTPUT_IDS, IF_IN_NORM, IF_EXPERT_DIM, IF_EMBEDDING_NORM,
    OPTIONAL_IN_EAGLE   // the model that a head drafts for may have it instead
};
enum { MAX_CONDITIONS = 4 };

struct slot {
    const char *name;
    enum condition conditions[MAX_CONDITIONS];
    enum extent rows, columns;   // a vector has ONE row, a matrix possibly ONE_ROW
    size_t offset;               // of the pointer or matrix in struct llamac_model, rope_table, layer, ffn_weights, ...
};
#define OF_MODEL(member) offsetof(struct llamac_model, member)
#define OF_ROPE(member) offsetof(struct rope_table, member)
#define OF_LAYER(member) offsetof(struct layer, member)
#define OF_EXPERT(member) offsetof(struct ffn_weights, member)
#define OF_POOLED(member) offsetof(struct pooled_layer, member)

static const struct slot first_slots[] = {
    { "token_embedding.weight", { IF_NOT_ASSISTANT, OPTIONAL_IN_EAGLE }, VOCAB, DIM, OF_MODEL(token_embedding) },
    { "position_embedding.weight", { IF_LEARNED }, CONTEXT, DIM, OF_MODEL(position_embedding) },
    { "type_embedding.weight", { IF_TYPES }, TYPES, DIM, OF_MODEL(type_embedding) },
    { "distance_bias.weight", { IF_BIASED_DISTANCES }, ONE, DISTANCES, OF_MODEL(distance_bias) },
    { "embedding_norm.weight", { IF_EMBEDDING_NORM }, ONE, DIM, OF_MODEL(embedding_norm) },
    { "embedding_norm.bias", { IF_EMBEDDING_NORM, IF_LAYER_NORM }, ONE, DIM, OF_MODEL(embedding_norm_bias) },
    { "layer_embedding.weight", { IF_LAYER_EMBEDDING }, VOCAB, LAYER_EMBEDDINGS, OF_MODEL(layer_embedding) },
    { "layer_embedding_in.weight", { IF_LAYER_EMBEDDING }, LAYER_EMBEDDINGS, DIM, OF_MODEL(layer_embedding_in) },
    { "layer_embedding_norm.weight", { IF_LAYER_EMBEDDING }, ONE, LAYER_EMBEDDING, OF_MODEL(layer_embedding_norm) },
};
static const struct slot rope_slots[] = {
    { "inv_freq", { ALWAYS }, ONE, ROPE_HALF, OF_ROPE(inv_freq) },
    { "inv_freq_long", { IF_LONG_ROPE }, ONE, ROPE_HALF, OF_ROPE(inv_freq_long) },
};
static const struct slot layer_slots[] = {
    { "attn_norm.weight", { IF_ATTN_NORM }, ONE, DIM, OF_LAYER(attn_norm) },
    { "attn_norm.bias", { IF_ATTN_NORM, IF_LAYER_NORM }, ONE, DIM, OF_LAYER(attn_norm_bias) },
    { "attn_q_a.weight", { IF_ATTENTION, IF_LATENT_Q }, Q_LORA_RANK, DIM, OF_LAYER(attn_q_a) },
    { "attn_q_a.bias", { IF_ATTENTION, IF_LATENT_Q, OPTIONAL }, ONE, Q_LORA_RANK, OF_LAYER(attn_q_a_bias) },
    { "attn_q_a_norm.weight", { IF_ATTENTION, IF_LATENT_Q }, ONE, Q_LORA_RANK, OF_LAYER(attn_q_a_norm) },
    { "attn_q.weight", { IF_ATTENTION }, Q_DIM, Q_INPUTS, OF_LAYER(attn_q) },
    { "attn_q.bias", { IF_ATTENTION, OPTIONAL }, ONE, Q_DIM, OF_LAYER(attn_q_bias) },
    { "attn_kv_a.weight", { IF_ATTENTION, IF_LATENT }, KV_DIM, DIM, OF_LAYER(attn_kv_a) },
    { "attn_kv_a.bias", { IF_ATTENTION, IF_LATENT, OPTIONAL }, ONE, KV_DIM, OF_LAYER(attn_kv_a_bias) },
    { "attn_kv_a_norm.weight", { IF_ATTENTION, IF_LATENT }, ONE, KV_LORA_RANK, OF_LAYER(attn_kv_a_norm) },
    { "attn_k_b.weight", { IF_ATTENTION, IF_LATENT }, LATENT_Q_DIM, NOPE_DIM, OF_LAYER(attn_k_b) },
    { "attn_v_b.weight", { IF_ATTENTION, IF_LATENT }, MIX_DIM, KV_LORA_RANK, OF_LAYER(attn_v_b) },
    { "attn_k.weight", { IF_ATTENTION, IF_OWN_KV, IF_NOT_LATENT }, KV_DIM, ATTN_INPUTS, OF_LAYER(attn_k) },
    { "attn_k.bias", { IF_ATTENTION, IF_OWN_KV, IF_NOT_LATENT, OPTIONAL }, ONE, KV_DIM, OF_LAYER(attn_k_bias) },
    { "attn_v.weight", { IF_ATTENTION, IF_OWN_V, IF_NOT_LATENT }, KV_DIM, ATTN_INPUTS, OF_LAYER(attn_v) },
    { "attn_v.bias", { IF_ATTENTION, IF_OWN_V, IF_NOT_LATENT, OPTIONAL }, ONE, KV_DIM, OF_LAYER(attn_v_bias) },
    { "attn_gate.weight", { IF_ATTENTION, IF_OUTPUT_GATE }, GATES, DIM, OF_LAYER(attn_gate) },
    { "attn_gate.bias", { IF_ATTENTION, IF_OUTPUT_GATE, OPTIONAL }, ONE, GATES, OF_LAYER(attn_gate_bias) },
    { "attn_q_norm.weight", { IF_ATTENTION, IF_QK_NORM }, ONE, Q_NORM_DIM, OF_LAYER(attn_q_norm) },
    { "attn_k_norm.weight", { IF_ATTENTION, IF_QK_NORM, IF_OWN_KV }, ONE, K_NORM_DIM, OF_LAYER(attn_k_norm) },
    { "attn_sinks.weight", { IF_ATTENTION, IF_SINKS }, ONE, HEADS, OF_LAYER(attn_sinks) },
    { "attn_sub_norm.weight", { IF_SUB_NORMS }, ONE, MIX_DIM, OF_LAYER(attn_sub_norm) },
    { "attn_out.weight", { IF_ATTENTION }, DIM, MIX_DIM, OF_LAYER(attn_out) },
    { "attn_out.bias", { IF_ATTENTION, OPTIONAL }, ONE, DIM, OF_LAYER(attn_out_bias) },
    { "delta_qkv.weight", { IF_DELTA_NET }, CHANNELS, DIM, OF_LAYER(state_qkv) },
    { "delta_z.weight", { IF_DELTA_NET }, STATE_VALUES, DIM, OF_LAYER(state_z) },
    { "delta_beta.weight", { IF_DELTA_NET }, STATE_HEADS, DIM, OF_LAYER(state_beta) },
    { "delta_a.weight", { IF_DELTA_NET }, STATE_HEADS, DIM, OF_LAYER(state_a) },
    { "delta_conv.weight", { IF_DELTA_NET }, ONE, CONV_TAPS, OF_LAYER(conv_taps) },
    { "delta_decay.weight", { IF_DELTA_NET }, ONE, STATE_HEADS, OF_LAYER(state_decay) },
    { "delta_dt.bias", { IF_DELTA_NET }, ONE, STATE_HEADS, OF_LAYER(state_dt_bias) },
    { "delta_norm.weight", { IF_DELTA_NET }, ONE, STATE_VALUE_DIM, OF_LAYER(state_norm) },
    { "delta_out.weight", { IF_DELTA_NET }, DIM, STATE_VALUES, OF_LAYER(attn_out) },
    { "mamba_z.weight", { IF_MAMBA2 }, STATE_VALUES, DIM, OF_LAYER(state_z) },
    { "mamba_z.bias", { IF_MAMBA2, OPTIONAL }, ONE, STATE_VALUES, OF_LAYER(state_z_bias) },
    { "mamba_xbc.weight", { IF_MAMBA2 }, CHANNELS, DIM, OF_LAYER(state_qkv) },
    { "mamba_xbc.bias", { IF_MAMBA2, OPTIONAL }, ONE, CHANNELS, OF_LAYER(state_qkv_bias) },
    { "mamba_dt.weight", { IF_MAMBA2 }, STATE_HEADS, DIM, OF_LAYER(state_a) },
    { "mamba_dt.bias", { IF_MAMBA2, OPTIONAL }, ONE, STATE_HEADS, OF_LAYER(state_a_bias) },
    { "mamba_conv.weight", { IF_MAMBA2 }, ONE, CONV_TAPS, OF_LAYER(conv_taps) },
    { "mamba_conv.bias", { IF_MAMBA2, OPTIONAL }, ONE, CHANNELS, OF_LAYER(conv_bias) },
    { "mamba_step.bias", { IF_MAMBA2 }, ONE, STATE_HEADS, OF_LAYER(state_dt_bias) },
    { "mamba_decay.weight", { IF_MAMBA2 }, ONE, STATE_HEADS, OF_LAYER(state_decay) },
    { "mamba_skip.weight", { IF_MAMBA2 }, ONE, STATE_HEADS, OF_LAYER(state_skip) },
    { "mamba_norm.weight", { IF_MAMBA2, IF_STATE_NORM }, ONE, STATE_VALUES, OF_LAYER(state_norm) },
    { "mamba_out.weight", { IF_MAMBA2 }, DIM, STATE_VALUES, OF_LAYER(state_out) },
    { "mamba_out.bias", { IF_MAMBA2, OPTIONAL }, ONE, DIM, OF_LAYER(state_out_bias) },
    { "conv_in.weight", { IF_SHORT_CONV }, THREE_DIM, DIM, OF_LAYER(conv_in) },
    { "conv_in.bias", { IF_SHORT_CONV, OPTIONAL }, ONE, THREE_DIM, OF_LAYER(conv_in_bias) },
    { "conv_taps.weight", { IF_SHORT_CONV }, ONE, CONV_TAPS, OF_LAYER(conv_taps) },
    { "conv_taps.bias", { IF_SHORT_CONV, OPTIONAL }, ONE, DIM, OF_LAYER(conv_bias) },
    { "conv_out.weight", { IF_SHORT_CONV }, DIM, DIM, OF_LAYER(attn_out) },
    { "conv_out.bias", { IF_SHORT_CONV, OPTIONAL }, ONE, DIM, OF_LAYER(attn_out_bias) },
    { "attn_post_norm.weight", { IF_POST_NORM }, ONE, DIM, OF_LAYER(attn_post_norm) },
    { "attn_post_norm.bias", { IF_POST_NORM, IF_LAYER_NORM }, ONE, DIM, OF_LAYER(attn_post_norm_bias) },
    { "ffn_norm.weight", { IF_FFN_NORM }, ONE, DIM, OF_LAYER(ffn_norm) },
    { "ffn_norm.bias", { IF_FFN_NORM, IF_LAYER_NORM }, ONE, DIM, OF_LAYER(ffn_norm_bias) },
    { "ffn_gate.weight", { IF_DENSE, IF_GATED }, FFN_DIM, DIM, OF_LAYER(ffn.gate) },
    { "ffn_gate.bias", { IF_DENSE, IF_GATED, OPTIONAL }, ONE, FFN_DIM, OF_LAYER(ffn.gate_bias) },
    { "ffn_up.weight", { IF_DENSE }, FFN_DIM, DIM, OF_LAYER(ffn.up) },
    { "ffn_up.bias", { IF_DENSE, OPTIONAL }, ONE, FFN_DIM, OF_LAYER(ffn.up_bias) },
    { "ffn_alpha_p.weight", { IF_DENSE, IF_XIELU }, ONE, ONE, OF_LAYER(ffn.alpha_p) },
    { "ffn_alpha_n.weight", { IF_DENSE, IF_XIELU }, ONE, ONE, OF_LAYER(ffn.alpha_n) },
    { "ffn_sub_norm.weight", { IF_SUB_NORMS }, ONE, FFN_DIM, OF_LAYER(ffn_sub_norm) },
    { "ffn_down.weight", { IF_DENSE }, DIM, FFN_DIM, OF_LAYER(ffn.down) },
    { "ffn_down.bias", { IF_DENSE, OPTIONAL }, ONE, DIM, OF_LAYER(ffn.down_bias) },
    { "ffn_post_norm.weight", { IF_POST_NORM }, ONE, DIM, OF_LAYER(ffn_post_norm) },
    { "ffn_post_norm.bias", { IF_POST_NORM, IF_LAYER_NORM }, ONE, DIM, OF_LAYER(ffn_post_norm_bias) },
    { "ffn_router.weight", { IF_EXPERTS }, EXPERTS, DIM, OF_LAYER(ffn_router) },
    { "ffn_router.bias", { IF_EXPERTS, OPTIONAL }, ONE, EXPERTS, OF_LAYER(ffn_router_bias) },
    { "ffn_router_choice.bias", { IF_CHOICE_BIAS }, ONE, EXPERTS, OF_LAYER(ffn_router_choice_bias) },
    { "shared_gate.weight", { IF_SHARED_GATE }, ONE_ROW, DIM, OF_LAYER(shared_gate) },
    { "shared_ffn_gate.weight", { IF_SHARED, IF_GATED }, SHARED_FFN_DIM, DIM, OF_LAYER(ffn.gate) },
    { "shared_ffn_gate.bias", { IF_SHARED, IF_GATED, OPTIONAL }, ONE, SHARED_FFN_DIM, OF_LAYER(ffn.gate_bias) },
    { "shared_ffn_up.weight", { IF_SHARED }, SHARED_FFN_DIM, DIM, OF_LAYER(ffn.up) },
    { "shared_ffn_up.bias", { IF_SHARED, OPTIONAL }, ONE, SHARED_FFN_DIM, OF_LAYER(ffn.up_bias) },
    { "shared_ffn_down.weight", { IF_SHARED }, DIM, SHARED_FFN_DIM, OF_LAYER(ffn.down) },
    { "shared_ffn_down.bias", { IF_SHARED, OPTIONAL }, ONE, DIM, OF_LAYER(ffn.down_bias) },
    { "shared_ffn_post_norm.weight", { IF_EXPERT_NORMS }, ONE, DIM, OF_LAYER(shared_ffn_post_norm) },
    { "ffn_router_norm.weight", { IF_EXPERT_NORMS }, ONE, DIM, OF_LAYER(ffn_router_norm) },
    { "experts_norm.weight", { IF_EXPERT_NORMS }, ONE, DIM, OF_LAYER(experts_norm) },
    { "experts_post_norm.weight", { IF_EXPERT_NORMS }, ONE, DIM, OF_LAYER(experts_post_norm) },
    { "experts_in.weight", { IF_EXPERTS, IF_EXPERT_DIM }, EXPERT_DIM, DIM, OF_LAYER(experts_in) },
    { "experts_in.bias", { IF_EXPERTS, IF_EXPERT_DIM, OPTIONAL }, ONE, EXPERT_DIM, OF_LAYER(experts_in_bias) },
    { "experts_out.weight", { IF_EXPERTS, IF_EXPERT_DIM }, DIM, EXPERT_DIM, OF_LAYER(experts_out) },
    { "experts_out.bias", { IF_EXPERTS, IF_EXPERT_DIM, OPTIONAL }, ONE, DIM, OF_LAYER(experts_out_bias) },
    { "expert_factors.weight", { IF_EXPERT_FACTORS }, ONE, EXPERTS, OF_LAYER(expert_factors) },
    { "layer_embedding_gate.weight", { IF_LAYER_EMBEDDING }, LAYER_EMBEDDING, DIM, OF_LAYER(layer_embedding_gate) },
    { "layer_embedding_out.weight", { IF_LAYER_EMBEDDING }, DIM, LAYER_EMBEDDING, OF_LAYER(layer_embedding_out) },
    { "layer_embedding_post_norm.weight", { IF_LAYER_EMBEDDING }, ONE, DIM, OF_LAYER(layer_embedding_post_norm) },
};
static const struct slot expert_slots[] = {
    { "ffn_gate.weight", { IF_GATED }, FFN_DIM, EXPERT_DIM, OF_EXPERT(gate) },
    { "ffn_gate.bias", { IF_GATED, OPTIONAL }, ONE, FFN_DIM, OF_EXPERT(gate_bias) },
    { "ffn_up.weight", { ALWAYS }, FFN_DIM, EXPERT_DIM, OF_EXPERT(up) },
    { "ffn_up.bias", { OPTIONAL }, ONE, FFN_DIM, OF_EXPERT(up_bias) },
    { "ffn_down.weight", { ALWAYS }, EXPERT_DIM, FFN_DIM, OF_EXPERT(down) },
    { "ffn_down.bias", { OPTIONAL }, ONE, EXPERT_DIM, OF_EXPERT(down_bias) },
};
static const struct slot drafter_slots[] = {
    { "mtp.embedding_norm.weight", { IF_MTP }, ONE, DIM, OF_MODEL(mtp.embedding_norm) },
    { "mtp.hidden_norm.weight", { IF_MTP }, ONE, DIM, OF_MODEL(mtp.hidden_norm) },
    { "mtp.in.weight", { IF_MTP }, DIM, TWO_DIM, OF_MODEL(mtp.in) },
    { "mtp.output_norm.weight", { IF_MTP }, ONE, DIM, OF_MODEL(mtp.output_norm) },
    { "drafter.in_norm.weight", { IF_IN_NORM }, ONE, DRAFTER_INPUTS, OF_MODEL(drafter.in_norm) },
    { "drafter.in.weight", { IF_DRAFTER }, DIM, DRAFTER_INPUTS, OF_MODEL(drafter.in) },
    { "drafter.embedding_norm.weight", { IF_EAGLE }, ONE, DIM, OF_MODEL(drafter.embedding_norm) },
    { "drafter.out.weight", { IF_ASSISTANT }, TRUNK_DIM, DIM, OF_MODEL(drafter.out) },
    { "drafter.clusters.weight", { IF_CLUSTERS }, CLUSTERS, DIM, OF_MODEL(drafter.clusters) },
    { "drafter.output_ids.weight", { IF_OUTPUT_IDS }, ONE, OUTPUT_ROWS, OF_MODEL(drafter.output_ids) },
};
static const struct slot last_slots[] = {
    { "output_norm.weight", { ALWAYS }, ONE, DIM, OF_MODEL(output_norm) },
    { "output_norm.bias", { IF_LAYER_NORM }, ONE, DIM, OF_MODEL(output_norm_bias) },
    { "output.weight", { IF_UNTIED }, OUTPUT_ROWS, DIM, OF_MODEL(output) },
    { "output.bias", { OPTIONAL }, ONE, OUTPUT_ROWS, OF_MODEL(output_bias) },
};
static const struct slot pooled_slots[] = {
    { "weight", { ALWAYS }, POOLED_OUT, POOLED_IN, OF_POOLED(matrix) },
    { "bias", { OPTIONAL }, ONE, POOLED_OUT, OF_POOLED(bias) },
    { "norm.weight", { IF_POOLED_NORM }, ONE, POOLED_OUT, OF_POOLED(norm) },
};

// ---- iteration over the slots of a config: the first ones, those of each RoPE table, those of each layer followed by
// those of its experts (the MTP layer after the others), those around the MTP layer or a drafter's layers, the last
// ones, and those of each pooled layer

enum group { GROUP_FIRST, GROUP_ROPE, GROUP_LAYER, GROUP_EXPERT, GROUP_DRAFTER, GROUP_LAST, GROUP_POOLED };
static const struct { const struct slot *slots; uint32_t n; } groups[] = {
    [GROUP_FIRST] = { first_slots, ARRAY_LEN(first_slots) },
    [GROUP_ROPE] = { rope_slots, ARRAY_LEN(rope_slots) },
    [GROUP_LAYER] = { layer_slots, ARRAY_LEN(layer_slots) },
    [GROUP_EXPERT] = { expert_slots, ARRAY_LEN(expert_slots) },
    [GROUP_DRAFTER] = { drafter_slots, ARRAY_LEN(drafter_slots) },
    [GROUP_LAST] = { last_slots, ARRAY_LEN(last_slots) },
    [GROUP_POOLED] = { pooled_slots, ARRAY_LEN(pooled_slots) },
};

static const struct config *config_of(const llamac_slot_iterator *it) { return it->config; }
// The current layer; valid in the groups of layers and experts. Before these it is the first layer.
static const struct layer_record *layer_of(const llamac_slot_iterator *it) {
    return (const struct layer_record *)it->layers + it->layer;
}
static struct heads heads_of(const llamac_slot_iterator *it) {
    return it->group == GROUP_LAYER ? layer_heads(config_of(it), layer_of(it)) : (struct heads){ 0 };
}
static uint32_t experts_of(const llamac_slot_iterator *it) {
    return layer_of(it)->ffn == FFN_EXPERTS ? layer_of(it)->n_experts : 0;
}
// The width of layer embeddings, which is the same in all layers.
static uint32_t layer_embedding_of(const llamac_slot_iterator *it) {
    return it->group < GROUP_DRAFTER && config_of(it)->n_layers ? layer_of(it)->layer_embedding_dim : 0;
}
static const struct slot *slot_of(const llamac_slot_iterator *it) { return &groups[it->group].slots[it->next - 1]; }
int slot_is_matrix(const llamac_slot_iterator *it) { return slot_of(it)->rows != ONE; }
int slot_is_of_layer(const llamac_slot_iterator *it) { return it->group == GROUP_LAYER; }
// Whether one of the conditions of the current slot is among these.
static int depends_on(const llamac_slot_iterator *it, const enum condition *among) {
    const enum condition *of_slot = slot_of(it)->conditions;
    for (int i = 0; i < MAX_CONDITIONS && of_slot[i]; i++)
        for (int j = 0; j < MAX_CONDITIONS && among[j]; j++)
            if (of_slot[i] == among[j]) return 1;
    return 0;
}
int slot_is_required(const llamac_slot_iterator *it) {
    const int is_eagle = config_of(it)->drafter == DRAFTER_EAGLE3;
    return !depends_on(it, (const enum condition[MAX_CONDITIONS]){ OPTIONAL, is_eagle ? OPTIONAL_IN_EAGLE : NOTHING });
}

// Moves to the next layer, or to what follows the last one.
static void advance_layer(llamac_slot_iterator *it) {
    const struct config *c = config_of(it);
    const enum group after_layers = c->mtp_layers || c->drafter ? GROUP_DRAFTER : GROUP_LAST;
    it->group = ++it->layer == c->n_layers + (c->mtp_layers > 0) ? after_layers : GROUP_LAYER;
}

int slot_advance(llamac_slot_iterator *it) {
    const struct config *c = config_of(it);
    if (it->next < groups[it->group].n) return (int)++it->next;
    const enum group after_rope = c->n_layers ? GROUP_LAYER : GROUP_LAST;
    switch ((enum group)it->group) {
    case GROUP_FIRST: it->group = c->n_rope ? GROUP_ROPE : after_rope; break;   // once
    case GROUP_ROPE:   // for each table
        if (++it->index == c->n_rope) it->group = after_rope;
        break;
    case GROUP_LAYER:   // for each layer, which its experts follow
        if (experts_of(it)) it->group = GROUP_EXPERT, it->expert = 0;
        else advance_layer(it);
        break;
    case GROUP_EXPERT:   // for each expert of the layer
        if (++it->expert == experts_of(it)) advance_layer(it);
        break;
    case GROUP_DRAFTER: it->group = GROUP_LAST; break;   // once
    case GROUP_LAST:   // once
        if (!c->n_pooled) return 0;
        it->group = GROUP_POOLED, it->index = 0;
        break;
    case GROUP_POOLED:   // for each pooled layer
        if (it->index + 1 >= c->n_pooled) return 0;
        it->index++;
        break;
    }
    it->next = 1;
    return 1;
}

static int condition_holds(const llamac_slot_iterator *it, enum condition condition) {
    const struct config *c = config_of(it);
    switch (condition) {   // names all conditions, so that the compiler warns of a missing one
    case ALWAYS: case OPTIONAL: case OPTIONAL_IN_EAGLE: return 1;
    case IF_LAYER_NORM: return c->norm == NORM_LAYER;
    case IF_LEARNED: return c->position == POSITION_LEARNED;
    case IF_LONG_ROPE: return c->rope_original_context[it->index] > 0;
    case IF_UNTIED: return !c->tied_output;
    case IF_QK_NORM:
        return c->qk_norm != QK_NORM_NONE && (c->qk_norm != QK_NORM_ROTATED_HEAD || layer_of(it)->rope >= 0);
    case IF_ATTN_NORM: return layer_of(it)->placement != PLACEMENT_POST && layer_of(it)->mixer != MIXER_NONE;
    case IF_FFN_NORM: return layer_of(it)->placement != PLACEMENT_POST && layer_of(it)->ffn != FFN_NONE;
    case IF_POST_NORM:
        return layer_of(it)->placement == PLACEMENT_POST || layer_of(it)->placement == PLACEMENT_SANDWICH;
    case IF_DENSE: return layer_of(it)->ffn == FFN_PLAIN || layer_of(it)->ffn == FFN_GATED;
    case IF_GATED:
        return layer_of(it)->ffn == FFN_GATED || (layer_of(it)->ffn == FFN_EXPERTS && !layer_of(it)->plain_experts);
    case IF_EXPERTS: return layer_of(it)->ffn == FFN_EXPERTS;
    case IF_OWN_KV: return layer_of(it)->kv_source < 0 && !reads_trunk_keys(c);
    case IF_OWN_V: return layer_of(it)->kv_source < 0 && !layer_of(it)->v_is_k && !reads_trunk_keys(c);
    case IF_SINKS: return layer_of(it)->sinks;
    case IF_XIELU: return c->activation == ACTIVATION_XIELU;
    case IF_ATTENTION: return has_attention(layer_of(it));
    case IF_DELTA_NET: return layer_of(it)->mixer == MIXER_DELTA_NET;
    case IF_SHORT_CONV: return layer_of(it)->mixer == MIXER_SHORT_CONV;
    case IF_MAMBA2: return has_mamba2(layer_of(it));
    case IF_STATE_NORM: return c->state_norm != STATE_NORM_NONE;
    case IF_OUTPUT_GATE: return layer_of(it)->output_gate != OUTPUT_GATE_NONE;
    case IF_TYPES: return c->n_types > 0;
    case IF_BIASED_DISTANCES: return c->bias_distance > 0;
    case IF_POOLED_NORM: return c->pooled_norm[it->index];
    case IF_LATENT: return layer_of(it)->kv_lora_rank > 0;
    case IF_LATENT_Q: return layer_of(it)->q_lora_rank > 0;
    case IF_NOT_LATENT: return layer_of(it)->kv_lora_rank == 0;
    case IF_CHOICE_BIAS: return layer_of(it)->router_choice_bias;
    case IF_SHARED: return layer_of(it)->shared_ffn_dim > 0;
    case IF_SHARED_GATE: return layer_of(it)->shared_gate;
    case IF_EXPERT_NORMS: return layer_of(it)->expert_norms;
    case IF_EXPERT_FACTORS: return layer_of(it)->expert_factors;
    case IF_LAYER_EMBEDDING: return layer_embedding_of(it) > 0;
    case IF_SUB_NORMS: return layer_of(it)->sub_norms;
    case IF_MTP: return c->mtp_layers > 0;
    case IF_NOT_ASSISTANT: return c->drafter != DRAFTER_ASSISTANT;
    case IF_ASSISTANT: return c->drafter == DRAFTER_ASSISTANT;
    case IF_CLUSTERS: return c->n_clusters > 0;
    case IF_DRAFTER: return c->drafter != DRAFTER_NONE;
    case IF_EAGLE: return c->drafter == DRAFTER_EAGLE3;
    case IF_EXPERT_DIM: return c->expert_dim > 0;
    case IF_EMBEDDING_NORM: return c->embedding_norm;
    case IF_IN_NORM: return c->eagle_in_norm != EAGLE_IN_NORM_NONE;
    case IF_OUTPUT_IDS: return c->n_clusters > 0 || c->drafter == DRAFTER_EAGLE3;
    }
    return 1;
}

int slot_applies(const llamac_slot_iterator *it) {
    const enum condition *conditions = slot_of(it)->conditions;
    for (int i = 0; i < MAX_CONDITIONS && conditions[i]; i++)
        if (!condition_holds(it, conditions[i])) return 0;
    return 1;
}

// Whether the norms of q and k have one vector of weights for all heads.
static int norms_each_head(const struct config *c) {
    return c->qk_norm == QK_NORM_HEAD || c->qk_norm == QK_NORM_ROTATED_HEAD;
}

// Whether attention also reads the normed embeddings: in the first layer of an EAGLE-3 head.
static int reads_embeddings(const llamac_slot_iterator *it) {
    return config_of(it)->drafter == DRAFTER_EAGLE3 && it->layer == 0;
}

// Returns the extent that one which depends on the kind of layer or drafter equals in this model.
static enum extent resolve_extent(const llamac_slot_iterator *it, enum extent e) {
    switch (e) {
    case EXPERT_DIM: return config_of(it)->expert_dim ? EXPERT_DIM : DIM;
    case GATES: return layer_of(it)->output_gate == OUTPUT_GATE_HEAD ? HEADS : Q_DIM;
    case OUTPUT_ROWS: return config_of(it)->drafter == DRAFTER_EAGLE3 ? EAGLE_VOCAB : VOCAB;
    case Q_INPUTS: return layer_of(it)->q_lora_rank ? Q_LORA_RANK : resolve_extent(it, ATTN_INPUTS);
    case ATTN_INPUTS: return reads_embeddings(it) ? TWO_DIM : DIM;
    case Q_NORM_DIM: return norms_each_head(config_of(it)) ? HEAD_DIM : Q_DIM;
    case K_NORM_DIM: return norms_each_head(config_of(it)) ? HEAD_DIM : KV_DIM;
    default: return e;
    }
}

// The hidden states, and embeddings of the trunk, that a drafter's first product reads.
static int inputs_of_drafter(const struct config *c) { return c->drafter == DRAFTER_EAGLE3 ? FORMAT_EAGLE_STATES : 2; }

static uint64_t extent_of(const llamac_slot_iterator *it, enum extent e) {
    const struct config *c = config_of(it);
    const struct heads heads = heads_of(it);
    const uint64_t head_dim = (uint64_t)heads.dim, kv_dim = (uint64_t)heads.n_kv * head_dim,
                   q_dim = it->group == GROUP_LAYER ? query_width(c, layer_of(it)) : 0;
    switch (resolve_extent(it, e)) {
    case DIM: return c->dim;
    case VOCAB: return c->vocab_size;
    case CONTEXT: return c->context;
    case ROPE_HALF: return c->rope_dim[it->index] / 2;
    case HEADS: return (uint64_t)heads.n;
    case Q_DIM: return q_dim;
    case KV_DIM: return kv_dim;
    case HEAD_DIM: return head_dim;
    case FFN_DIM: return layer_of(it)->ffn_dim;
    case SHARED_FFN_DIM: return layer_of(it)->shared_ffn_dim;
    case EXPERTS: return layer_of(it)->n_experts;
    case CHANNELS: return conv_channels(c, layer_of(it));
    case CONV_TAPS: return layer_of(it)->conv_width * conv_channels(c, layer_of(it));
    case TWO_DIM: return 2 * (uint64_t)c->dim;
    case TRUNK_DIM: return c->trunk_dim;
    case DRAFTER_INPUTS: return (uint64_t)inputs_of_drafter(c) * c->trunk_dim;
    case CLUSTERS: return c->n_clusters;
    case THREE_DIM: return 3 * (uint64_t)c->dim;
    case STATE_HEADS: return layer_of(it)->state_heads;
    case STATE_VALUE_DIM: return layer_of(it)->state_value_dim;
    case STATE_VALUES: return state_values(layer_of(it));
    case TYPES: return c->n_types;
    case DISTANCES: return (uint64_t)c->n_heads * (2 * (uint64_t)c->bias_distance + 1);
    case POOLED_OUT: return c->pooled_dim[it->index];
    case POOLED_IN: return it->index ? c->pooled_dim[it->index - 1] : c->dim;
    case EAGLE_VOCAB: return c->eagle_vocab_size;
    case EXPERT_DIM: return c->expert_dim;
    case MIX_DIM: return mix_width(c, layer_of(it));
    case Q_LORA_RANK: return layer_of(it)->q_lora_rank;
    case KV_LORA_RANK: return layer_of(it)->kv_lora_rank;
    case LATENT_Q_DIM: return (uint64_t)heads.n * layer_of(it)->kv_lora_rank;
    case NOPE_DIM: return layer_of(it)->qk_nope_head_dim;
    case LAYER_EMBEDDING: return layer_embedding_of(it);
    case LAYER_EMBEDDINGS: return (uint64_t)c->n_layers * layer_embedding_of(it);
    case ONE: case ONE_ROW: return 1;
    case GATES: case OUTPUT_ROWS: case Q_INPUTS: case ATTN_INPUTS: case Q_NORM_DIM: case K_NORM_DIM: break;
    }
    return 0;   // these have been resolved
}

uint64_t slot_rows(const llamac_slot_iterator *it) { return extent_of(it, slot_of(it)->rows); }
uint64_t slot_columns(const llamac_slot_iterator *it) { return extent_of(it, slot_of(it)->columns); }

void slot_name(const llamac_slot_iterator *it, char name[FORMAT_NAME_BYTES]) {
    const char *last = slot_of(it)->name;
    switch (it->group) {
    case GROUP_ROPE: snprintf(name, FORMAT_NAME_BYTES, "rope.%u.%s", it->index, last); break;
    case GROUP_POOLED: snprintf(name, FORMAT_NAME_BYTES, "pooled.%u.%s", it->index, last); break;
    case GROUP_LAYER: snprintf(name, FORMAT_NAME_BYTES, "layers.%u.%s", it->layer, last); break;
    case GROUP_EXPERT:
        snprintf(name, FORMAT_NAME_BYTES, "layers.%u.experts.%u.%s", it->layer, it->expert, last);
        break;
    default: snprintf(name, FORMAT_NAME_BYTES, "%s", last); break;
    }
}

int llamac_slot_next(llamac_slot_iterator *it, llamac_slot *slot) {
    if (config_of(it)->n_rope > FORMAT_MAX_ROPE || config_of(it)->n_pooled > FORMAT_MAX_POOLED) return -1;
    while (slot_advance(it)) {
        if (it->group == GROUP_LAYER && experts_of(it) > FORMAT_MAX_EXPERTS) return -1;
        if (!slot_applies(it)) continue;
        *slot = (llamac_slot){ 0 };
        slot_name(it, slot->name);
        slot->required = slot_is_required(it);
        slot->is_matrix = slot_is_matrix(it);
        slot->rows = slot_rows(it);
        slot->columns = slot_columns(it);
        return 1;
    }
    return 0;
}

// ---- reasons, for messages

// The field of the config or of a layer that alone is an extent; NULL: several fields determine it.
static const char *const field_names[] = {
    [DIM] = "dim", [VOCAB] = "vocab_size", [CONTEXT] = "context", [HEADS] = "n_heads", [HEAD_DIM] = "head_dim",
    [FFN_DIM] = "ffn_dim", [SHARED_FFN_DIM] = "shared_ffn_dim", [EXPERTS] = "n_experts",
    [Q_LORA_RANK] = "q_lora_rank", [KV_LORA_RANK] = "kv_lora_rank", [NOPE_DIM] = "qk_nope_head_dim",
    [LAYER_EMBEDDING] = "layer_embedding_dim", [STATE_HEADS] = "state_heads", [STATE_VALUE_DIM] = "state_value_dim",
    [TYPES] = "n_types", [TRUNK_DIM] = "trunk_dim", [EAGLE_VOCAB] = "eagle_vocab_size", [CLUSTERS] = "n_clusters",
    [EXPERT_DIM] = "expert_dim",
};

// Writes the heads' fields whose product is an extent.
static void describe_heads(const llamac_slot_iterator *it, enum extent e, char text[SLOT_TEXT_BYTES]) {
    const struct layer_record *layer = layer_of(it);
    const struct heads heads = heads_of(it);
    const uint32_t rank = layer->kv_lora_rank;
    if (e == LATENT_Q_DIM) snprintf(text, SLOT_TEXT_BYTES, "n_heads %d times kv_lora_rank %u", heads.n, rank);
    else if (e == MIX_DIM && rank)
        snprintf(text, SLOT_TEXT_BYTES, "n_heads %d times v_head_dim %u", heads.n, layer->v_head_dim);
    else if (e == Q_DIM && rank)
        snprintf(text, SLOT_TEXT_BYTES,
                 "n_heads %d times the sum of head_dim - kv_lora_rank %u and qk_nope_head_dim %u", heads.n,
                 (uint32_t)heads.dim - rank, layer->qk_nope_head_dim);
    else if (e == KV_DIM) snprintf(text, SLOT_TEXT_BYTES, "n_kv_heads %d times head_dim %d", heads.n_kv, heads.dim);
    else snprintf(text, SLOT_TEXT_BYTES, "n_heads %d times head_dim %d", heads.n, heads.dim);
}

// Writes which fields of config and layer determine an extent.
static void describe_extent(const llamac_slot_iterator *it, enum extent e, char text[SLOT_TEXT_BYTES]) {
    const struct config *c = config_of(it);
    e = resolve_extent(it, e);
    if ((size_t)e < ARRAY_LEN(field_names) && field_names[e]) {
        const int n = snprintf(text, SLOT_TEXT_BYTES, "%s %" PRIu64, field_names[e], extent_of(it, e));
        if (e == FFN_DIM || e == SHARED_FFN_DIM || e == EXPERTS)   // these differ most often between layers
            snprintf(text + n, SLOT_TEXT_BYTES - (size_t)n, " of layer %u", it->layer);
        return;
    }
    switch (e) {
    case Q_DIM: case KV_DIM: case MIX_DIM: case LATENT_Q_DIM: describe_heads(it, e, text); break;
    case ROPE_HALF:
        snprintf(text, SLOT_TEXT_BYTES, "half of rope_dim[%u] %u", it->index, c->rope_dim[it->index]);
        break;
    case LAYER_EMBEDDINGS:
        snprintf(text, SLOT_TEXT_BYTES, "n_layers %u times layer_embedding_dim %u", c->n_layers,
                 layer_embedding_of(it));
        break;
    case STATE_VALUES:
        snprintf(text, SLOT_TEXT_BYTES, "state_heads %u times state_value_dim %u", layer_of(it)->state_heads,
                 layer_of(it)->state_value_dim);
        break;
    case CHANNELS: case CONV_TAPS:
        snprintf(text, SLOT_TEXT_BYTES, "%s%" PRIu64 " channels of %s", e == CONV_TAPS ? "conv_width times " : "",
                 conv_channels(c, layer_of(it)), layer_of(it)->mixer == MIXER_SHORT_CONV ? "x"
                 : has_mamba2(layer_of(it)) ? "x, B and C" : "q, k and v");
        break;
    case DISTANCES:
        snprintf(text, SLOT_TEXT_BYTES, "n_heads %u times the %u distances up to bias_distance", c->n_heads,
                 2 * c->bias_distance + 1);
        break;
    case POOLED_OUT: snprintf(text, SLOT_TEXT_BYTES, "pooled_dim[%u] %u", it->index, c->pooled_dim[it->index]); break;
    case POOLED_IN: snprintf(text, SLOT_TEXT_BYTES, "width %" PRIu64 " of its inputs", extent_of(it, e)); break;
    case DRAFTER_INPUTS:
        snprintf(text, SLOT_TEXT_BYTES, "%d times trunk_dim %u", inputs_of_drafter(c), c->trunk_dim);
        break;
    case TWO_DIM: snprintf(text, SLOT_TEXT_BYTES, "2 times dim %u", c->dim); break;
    case THREE_DIM: snprintf(text, SLOT_TEXT_BYTES, "3 times dim %u", c->dim); break;
    default: snprintf(text, SLOT_TEXT_BYTES, "1"); break;
    }
}

void slot_describe_rows(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]) {
    describe_extent(it, slot_of(it)->rows, text);
}
void slot_describe_columns(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]) {
    describe_extent(it, slot_of(it)->columns, text);
}

// Appends to a text, which ends where its array does.
__attribute__((format(printf, 2, 3)))
static void append(char text[SLOT_TEXT_BYTES], const char *format, ...) {
    const size_t n = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, SLOT_TEXT_BYTES - n, format, args);
    va_end(args);
}

void slot_describe_conditions(const llamac_slot_iterator *it, char text[SLOT_TEXT_BYTES]) {
    const struct config *c = config_of(it);
    const int in_layer = it->group == GROUP_LAYER || it->group == GROUP_EXPERT;
    const struct layer_record none = { 0 }, *layer = in_layer ? layer_of(it) : &none;
    const struct { enum condition conditions[MAX_CONDITIONS]; const char *record, *field; uint32_t value; } enums[] = {
        { { IF_LAYER_NORM }, "config", "norm", c->norm },
        { { IF_LEARNED }, "config", "position", c->position },
        { { IF_XIELU }, "config", "activation", c->activation },
        { { IF_QK_NORM }, "config", "qk_norm", c->qk_norm },
        { { IF_ATTN_NORM, IF_FFN_NORM, IF_POST_NORM }, "layer", "placement", layer->placement },
        { { IF_DENSE, IF_GATED, IF_EXPERTS, IF_FFN_NORM }, "layer", "ffn", layer->ffn },
        { { IF_ATTENTION, IF_DELTA_NET, IF_MAMBA2, IF_SHORT_CONV }, "layer", "mixer", layer->mixer },
        { { IF_ATTN_NORM }, "layer", "mixer", layer->mixer },
        { { IF_STATE_NORM }, "config", "state_norm", c->state_norm },
        { { IF_OUTPUT_GATE }, "layer", "output_gate", layer->output_gate },
        { { IF_NOT_ASSISTANT, IF_ASSISTANT, IF_DRAFTER, IF_EAGLE }, "config", "drafter", c->drafter },
        { { IF_OUTPUT_IDS, c->drafter ? IF_OWN_KV : NOTHING, IF_OWN_V }, "config", "drafter", c->drafter },
        { { IF_IN_NORM }, "config", "eagle_in_norm", c->eagle_in_norm },
    };
    const struct { enum condition conditions[MAX_CONDITIONS]; const char *field; int32_t value; } numbers[] = {
        { { IF_OWN_KV, IF_OWN_V }, "kv_source", layer->kv_source },
        { { IF_OWN_V }, "v_is_k", (int32_t)layer->v_is_k },
        { { IF_SINKS }, "sinks", (int32_t)layer->sinks },
        { { IF_LATENT, IF_NOT_LATENT }, "kv_lora_rank", (int32_t)layer->kv_lora_rank },
        { { IF_LATENT_Q }, "q_lora_rank", (int32_t)layer->q_lora_rank },
        { { IF_CHOICE_BIAS }, "router_choice_bias", (int32_t)layer->router_choice_bias },
        { { IF_SHARED }, "shared_ffn_dim", (int32_t)layer->shared_ffn_dim },
        { { IF_SHARED_GATE }, "shared_gate", (int32_t)layer->shared_gate },
        { { layer->ffn == FFN_EXPERTS ? IF_GATED : NOTHING }, "plain_experts", (int32_t)layer->plain_experts },
        { { IF_EXPERT_NORMS }, "expert_norms", (int32_t)layer->expert_norms },
        { { IF_EXPERT_FACTORS }, "expert_factors", (int32_t)layer->expert_factors },
        { { IF_LAYER_EMBEDDING }, "layer_embedding_dim", (int32_t)layer_embedding_of(it) },
        { { IF_SUB_NORMS }, "sub_norms", (int32_t)layer->sub_norms },
        { { IF_MTP }, "mtp_layers", (int32_t)c->mtp_layers },
        { { IF_EXPERT_DIM }, "expert_dim", (int32_t)c->expert_dim },
        { { IF_EMBEDDING_NORM }, "embedding_norm", (int32_t)c->embedding_norm },
        { { IF_CLUSTERS }, "n_clusters", (int32_t)c->n_clusters },
    };
    text[0] = 0;
    for (size_t i = 0; i < ARRAY_LEN(enums); i++) {
        if (!depends_on(it, enums[i].conditions)) continue;
        char value[FORMAT_VALUE_BYTES];
        format_value_name(enums[i].record, enums[i].field, enums[i].value, value);
        append(text, ", with %s %s", enums[i].field, value);
    }
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        if (depends_on(it, numbers[i].conditions))
            append(text, ", with %s %d", numbers[i].field, numbers[i].value);
    if (depends_on(it, (const enum condition[MAX_CONDITIONS]){ IF_LONG_ROPE }))
        append(text, ", with rope_original_context[%u] %u", it->index, c->rope_original_context[it->index]);
    if (depends_on(it, (const enum condition[MAX_CONDITIONS]){ IF_TYPES }))
        append(text, ", with n_types %u", c->n_types);
    if (depends_on(it, (const enum condition[MAX_CONDITIONS]){ IF_BIASED_DISTANCES }))
        append(text, ", with bias_distance %u", c->bias_distance);
    if (depends_on(it, (const enum condition[MAX_CONDITIONS]){ IF_POOLED_NORM }))
        append(text, ", with pooled_norm[%u] %u", it->index, c->pooled_norm[it->index]);
    if (depends_on(it, (const enum condition[MAX_CONDITIONS]){ IF_UNTIED }))
        append(text, ", with tied_output %u", c->tied_output);
}

// ---- where the model keeps them

// The structure that the current slot's offset refers to.
static char *base_of(const llamac_slot_iterator *it, struct llamac_model *m) {
    switch (it->group) {
    case GROUP_ROPE: return (char *)&m->rope[it->index];
    case GROUP_POOLED: return (char *)&m->pooled[it->index];
    case GROUP_LAYER: return (char *)&m->layers[it->layer];
    case GROUP_EXPERT: return (char *)&m->layers[it->layer].experts[it->expert];
    default: return (char *)m;
    }
}

void *slot_target(const llamac_slot_iterator *it, struct llamac_model *m) {
    return base_of(it, m) + slot_of(it)->offset;
}
