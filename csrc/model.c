// SPDX-License-Identifier: MIT
// model.c - the list of all weights, the binding of a file's tensors to it, and adapters.
//
// The list says which tensors a config calls for, their shapes and their order in the file. Binding goes through the
// list and the tensor table in parallel and reports missing, surplus, misplaced and misshaped tensors.
#include "model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "mem.h"

// ---- the list

enum extent {
    ONE, ONE_ROW, DIM, VOCAB, CONTEXT, ROPE_HALF, HEADS, Q_DIM, KV_DIM, Q_NORM_DIM, K_NORM_DIM, FFN_DIM, SHARED_FFN_DIM,
    EXPERTS
};

// When a model has a tensor: if all of its conditions hold. OPTIONAL: it may then still lack the tensor.
enum condition {
    ALWAYS = 0,
    OPTIONAL = 1 << 0,
    IF_LAYER_NORM = 1 << 1,
    IF_LEARNED = 1 << 2,
    IF_LONG_ROPE = 1 << 3,
    IF_UNTIED = 1 << 4,
    IF_QK_NORM = 1 << 5,
    IF_PRE_NORM = 1 << 6,
    IF_POST_NORM = 1 << 7,
    IF_DENSE = 1 << 8,
    IF_GATED = 1 << 9,
    IF_EXPERTS = 1 << 10,
    IF_OWN_KV = 1 << 11,
    IF_OWN_V = 1 << 12,
    IF_SINKS = 1 << 13,
    IF_SHARED = 1 << 14,
    IF_SHARED_GATE = 1 << 15,
    END_OF_CONDITIONS = 1 << 16,
};

struct slot {
    const char *name;
    unsigned conditions;
    enum extent rows, columns;   // a vector has ONE row, a matrix possibly ONE_ROW
    size_t offset;               // of the pointer or matrix in struct llamac_model, rope_table, layer or ffn_weights
};
#define OF_MODEL(member) offsetof(struct llamac_model, member)
#define OF_ROPE(member) offsetof(struct rope_table, member)
#define OF_LAYER(member) offsetof(struct layer, member)
#define OF_EXPERT(member) offsetof(struct ffn_weights, member)

static const struct slot first_slots[] = {
    { "token_embedding.weight", ALWAYS, VOCAB, DIM, OF_MODEL(token_embedding) },
    { "position_embedding.weight", IF_LEARNED, CONTEXT, DIM, OF_MODEL(position_embedding) },
};
static const struct slot rope_slots[] = {
    { "inv_freq", ALWAYS, ONE, ROPE_HALF, OF_ROPE(inv_freq) },
    { "inv_freq_long", IF_LONG_ROPE, ONE, ROPE_HALF, OF_ROPE(inv_freq_long) },
};
static const struct slot layer_slots[] = {
    { "attn_norm.weight", IF_PRE_NORM, ONE, DIM, OF_LAYER(attn_norm) },
    { "attn_norm.bias", IF_PRE_NORM | IF_LAYER_NORM, ONE, DIM, OF_LAYER(attn_norm_bias) },
    { "attn_q.weight", ALWAYS, Q_DIM, DIM, OF_LAYER(attn_q) },
    { "attn_q.bias", OPTIONAL, ONE, Q_DIM, OF_LAYER(attn_q_bias) },
    { "attn_k.weight", IF_OWN_KV, KV_DIM, DIM, OF_LAYER(attn_k) },
    { "attn_k.bias", IF_OWN_KV | OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_k_bias) },
    { "attn_v.weight", IF_OWN_V, KV_DIM, DIM, OF_LAYER(attn_v) },
    { "attn_v.bias", IF_OWN_V | OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_v_bias) },
    { "attn_q_norm.weight", IF_QK_NORM, ONE, Q_NORM_DIM, OF_LAYER(attn_q_norm) },
    { "attn_k_norm.weight", IF_QK_NORM | IF_OWN_KV, ONE, K_NORM_DIM, OF_LAYER(attn_k_norm) },
    { "attn_sinks.weight", IF_SINKS, ONE, HEADS, OF_LAYER(attn_sinks) },
    { "attn_out.weight", ALWAYS, DIM, Q_DIM, OF_LAYER(attn_out) },
    { "attn_out.bias", OPTIONAL, ONE, DIM, OF_LAYER(attn_out_bias) },
    { "attn_post_norm.weight", IF_POST_NORM, ONE, DIM, OF_LAYER(attn_post_norm) },
    { "attn_post_norm.bias", IF_POST_NORM | IF_LAYER_NORM, ONE, DIM, OF_LAYER(attn_post_norm_bias) },
    { "ffn_norm.weight", IF_PRE_NORM, ONE, DIM, OF_LAYER(ffn_norm) },
    { "ffn_norm.bias", IF_PRE_NORM | IF_LAYER_NORM, ONE, DIM, OF_LAYER(ffn_norm_bias) },
    { "ffn_gate.weight", IF_GATED, FFN_DIM, DIM, OF_LAYER(ffn.gate) },
    { "ffn_gate.bias", IF_GATED | OPTIONAL, ONE, FFN_DIM, OF_LAYER(ffn.gate_bias) },
    { "ffn_up.weight", IF_DENSE, FFN_DIM, DIM, OF_LAYER(ffn.up) },
    { "ffn_up.bias", IF_DENSE | OPTIONAL, ONE, FFN_DIM, OF_LAYER(ffn.up_bias) },
    { "ffn_down.weight", IF_DENSE, DIM, FFN_DIM, OF_LAYER(ffn.down) },
    { "ffn_down.bias", IF_DENSE | OPTIONAL, ONE, DIM, OF_LAYER(ffn.down_bias) },
    { "ffn_post_norm.weight", IF_POST_NORM, ONE, DIM, OF_LAYER(ffn_post_norm) },
    { "ffn_post_norm.bias", IF_POST_NORM | IF_LAYER_NORM, ONE, DIM, OF_LAYER(ffn_post_norm_bias) },
    { "ffn_router.weight", IF_EXPERTS, EXPERTS, DIM, OF_LAYER(ffn_router) },
    { "ffn_router.bias", IF_EXPERTS | OPTIONAL, ONE, EXPERTS, OF_LAYER(ffn_router_bias) },
    { "shared_gate.weight", IF_SHARED_GATE, ONE_ROW, DIM, OF_LAYER(shared_gate) },
    { "shared_ffn_gate.weight", IF_SHARED, SHARED_FFN_DIM, DIM, OF_LAYER(ffn.gate) },
    { "shared_ffn_gate.bias", IF_SHARED | OPTIONAL, ONE, SHARED_FFN_DIM, OF_LAYER(ffn.gate_bias) },
    { "shared_ffn_up.weight", IF_SHARED, SHARED_FFN_DIM, DIM, OF_LAYER(ffn.up) },
    { "shared_ffn_up.bias", IF_SHARED | OPTIONAL, ONE, SHARED_FFN_DIM, OF_LAYER(ffn.up_bias) },
    { "shared_ffn_down.weight", IF_SHARED, DIM, SHARED_FFN_DIM, OF_LAYER(ffn.down) },
    { "shared_ffn_down.bias", IF_SHARED | OPTIONAL, ONE, DIM, OF_LAYER(ffn.down_bias) },
};
static const struct slot expert_slots[] = {
    { "ffn_gate.weight", ALWAYS, FFN_DIM, DIM, OF_EXPERT(gate) },
    { "ffn_gate.bias", OPTIONAL, ONE, FFN_DIM, OF_EXPERT(gate_bias) },
    { "ffn_up.weight", ALWAYS, FFN_DIM, DIM, OF_EXPERT(up) },
    { "ffn_up.bias", OPTIONAL, ONE, FFN_DIM, OF_EXPERT(up_bias) },
    { "ffn_down.weight", ALWAYS, DIM, FFN_DIM, OF_EXPERT(down) },
    { "ffn_down.bias", OPTIONAL, ONE, DIM, OF_EXPERT(down_bias) },
};
enum { MATRICES_OF_EXPERT = 3 };
static const struct slot last_slots[] = {
    { "output_norm.weight", ALWAYS, ONE, DIM, OF_MODEL(output_norm) },
    { "output_norm.bias", IF_LAYER_NORM, ONE, DIM, OF_MODEL(output_norm_bias) },
    { "output.weight", IF_UNTIED, VOCAB, DIM, OF_MODEL(output) },
    { "output.bias", OPTIONAL, ONE, VOCAB, OF_MODEL(output_bias) },
};

// ---- iteration over the slots of a config: the first ones, those of each RoPE table, those of each layer followed by
// those of its experts, and the last ones

enum group { GROUP_FIRST, GROUP_ROPE, GROUP_LAYER, GROUP_EXPERT, GROUP_LAST };
static const struct { const struct slot *slots; uint32_t n; } groups[] = {
    [GROUP_FIRST] = { first_slots, ARRAY_LEN(first_slots) },
    [GROUP_ROPE] = { rope_slots, ARRAY_LEN(rope_slots) },
    [GROUP_LAYER] = { layer_slots, ARRAY_LEN(layer_slots) },
    [GROUP_EXPERT] = { expert_slots, ARRAY_LEN(expert_slots) },
    [GROUP_LAST] = { last_slots, ARRAY_LEN(last_slots) },
};

static const struct config *config_of(const llamac_slot_iterator *it) { return it->config; }
// The current layer; valid in the groups of layers and experts.
static const struct layer_record *layer_of(const llamac_slot_iterator *it) {
    return (const struct layer_record *)it->layers + it->layer;
}
static struct heads heads_of(const llamac_slot_iterator *it) {
    return it->group == GROUP_LAYER ? layer_heads(config_of(it), layer_of(it)) : (struct heads){ 0 };
}
static uint32_t experts_of(const llamac_slot_iterator *it) {
    return layer_of(it)->ffn == FFN_EXPERTS ? layer_of(it)->n_experts : 0;
}
static const struct slot *slot_of(const llamac_slot_iterator *it) { return &groups[it->group].slots[it->next - 1]; }
static int is_matrix(const llamac_slot_iterator *it) { return slot_of(it)->rows != ONE; }
static int is_required(const llamac_slot_iterator *it) { return !(slot_of(it)->conditions & OPTIONAL); }

// Moves to the next slot, whether its conditions hold or not. Returns 0 past the end.
static int advance(llamac_slot_iterator *it) {
    const struct config *c = config_of(it);
    if (it->next < groups[it->group].n) return (int)++it->next;
    if (it->group == GROUP_LAST) return 0;
    it->next = 1;
    const enum group after_rope = c->n_layers ? GROUP_LAYER : GROUP_LAST;
    if (it->group == GROUP_FIRST) {
        it->group = c->n_rope ? GROUP_ROPE : after_rope;
    } else if (it->group == GROUP_ROPE) {
        if (++it->table == c->n_rope) it->group = after_rope;
    } else if (it->group == GROUP_LAYER && experts_of(it)) {
        it->group = GROUP_EXPERT;
        it->expert = 0;
    } else if (it->group == GROUP_LAYER || ++it->expert == experts_of(it)) {
        it->group = ++it->layer == c->n_layers ? GROUP_LAST : GROUP_LAYER;
    }
    return 1;
}

static int condition_holds(const llamac_slot_iterator *it, unsigned condition) {
    const struct config *c = config_of(it);
    switch (condition) {
    case IF_LAYER_NORM: return c->norm == NORM_LAYER;
    case IF_LEARNED: return c->position == POSITION_LEARNED;
    case IF_LONG_ROPE: return c->rope_original_context[it->table] > 0;
    case IF_UNTIED: return !c->tied_output;
    case IF_QK_NORM: return c->qk_norm != QK_NORM_NONE;
    case IF_PRE_NORM: return layer_of(it)->placement != PLACEMENT_POST;
    case IF_POST_NORM:
        return layer_of(it)->placement == PLACEMENT_POST || layer_of(it)->placement == PLACEMENT_SANDWICH;
    case IF_DENSE: return layer_of(it)->ffn == FFN_PLAIN || layer_of(it)->ffn == FFN_GATED;
    case IF_GATED: return layer_of(it)->ffn == FFN_GATED;
    case IF_EXPERTS: return layer_of(it)->ffn == FFN_EXPERTS;
    case IF_OWN_KV: return layer_of(it)->kv_source < 0;
    case IF_OWN_V: return layer_of(it)->kv_source < 0 && !layer_of(it)->v_is_k;
    case IF_SINKS: return layer_of(it)->sinks;
    case IF_SHARED: return layer_of(it)->shared_ffn_dim > 0;
    case IF_SHARED_GATE: return layer_of(it)->shared_gate;
    default: return 1;
    }
}

// Whether all conditions of the current slot hold.
static int applies(const llamac_slot_iterator *it) {
    for (unsigned condition = 1; condition < END_OF_CONDITIONS; condition *= 2)
        if (slot_of(it)->conditions & condition && !condition_holds(it, condition)) return 0;
    return 1;
}

static uint64_t extent_of(const llamac_slot_iterator *it, enum extent e) {
    const struct config *c = config_of(it);
    const struct heads heads = heads_of(it);
    const uint64_t head_dim = (uint64_t)heads.dim, q_dim = (uint64_t)heads.n * head_dim,
                   kv_dim = (uint64_t)heads.n_kv * head_dim;
    switch (e) {
    case DIM: return c->dim;
    case VOCAB: return c->vocab_size;
    case CONTEXT: return c->context;
    case ROPE_HALF: return c->rope_dim[it->table] / 2;
    case HEADS: return (uint64_t)heads.n;
    case Q_DIM: return q_dim;
    case KV_DIM: return kv_dim;
    case Q_NORM_DIM: return c->qk_norm == QK_NORM_HEAD ? head_dim : q_dim;
    case K_NORM_DIM: return c->qk_norm == QK_NORM_HEAD ? head_dim : kv_dim;
    case FFN_DIM: return layer_of(it)->ffn_dim;
    case SHARED_FFN_DIM: return layer_of(it)->shared_ffn_dim;
    case EXPERTS: return layer_of(it)->n_experts;
    default: return 1;
    }
}

static void name_of(const llamac_slot_iterator *it, char name[FORMAT_NAME_BYTES]) {
    const char *last = slot_of(it)->name;
    switch (it->group) {
    case GROUP_ROPE: snprintf(name, FORMAT_NAME_BYTES, "rope.%u.%s", it->table, last); break;
    case GROUP_LAYER: snprintf(name, FORMAT_NAME_BYTES, "layers.%u.%s", it->layer, last); break;
    case GROUP_EXPERT:
        snprintf(name, FORMAT_NAME_BYTES, "layers.%u.experts.%u.%s", it->layer, it->expert, last);
        break;
    default: snprintf(name, FORMAT_NAME_BYTES, "%s", last); break;
    }
}

int llamac_slot_next(llamac_slot_iterator *it, llamac_slot *slot) {
    if (config_of(it)->n_rope > FORMAT_MAX_ROPE) return -1;
    while (advance(it)) {
        if (it->group == GROUP_LAYER && experts_of(it) > FORMAT_MAX_EXPERTS) return -1;
        if (!applies(it)) continue;
        *slot = (llamac_slot){ 0 };
        name_of(it, slot->name);
        slot->required = is_required(it);
        slot->is_matrix = is_matrix(it);
        slot->rows = extent_of(it, slot_of(it)->rows);
        slot->columns = extent_of(it, slot_of(it)->columns);
        return 1;
    }
    return 0;
}

// ---- reasons, for messages

enum { REASON_BYTES = 128 };

// Writes which fields of config and layer determine an extent.
static void describe_extent(const llamac_slot_iterator *it, enum extent e, char text[REASON_BYTES]) {
    const struct config *c = config_of(it);
    const struct heads heads = heads_of(it);
    const int of_q = e == Q_DIM || e == Q_NORM_DIM, of_norm = e == Q_NORM_DIM || e == K_NORM_DIM;
    switch (e) {
    case DIM: snprintf(text, REASON_BYTES, "dim %u", c->dim); break;
    case VOCAB: snprintf(text, REASON_BYTES, "vocab_size %u", c->vocab_size); break;
    case CONTEXT: snprintf(text, REASON_BYTES, "context %u", c->context); break;
    case ROPE_HALF:
        snprintf(text, REASON_BYTES, "half of rope_dim[%u] %u", it->table, c->rope_dim[it->table]);
        break;
    case HEADS: snprintf(text, REASON_BYTES, "n_heads %d", heads.n); break;
    case Q_DIM: case KV_DIM: case Q_NORM_DIM: case K_NORM_DIM:
        if (of_norm && c->qk_norm == QK_NORM_HEAD) snprintf(text, REASON_BYTES, "head_dim %d", heads.dim);
        else snprintf(text, REASON_BYTES, "%s %d times head_dim %d", of_q ? "n_heads" : "n_kv_heads",
                      of_q ? heads.n : heads.n_kv, heads.dim);
        break;
    case FFN_DIM: snprintf(text, REASON_BYTES, "ffn_dim %u of layer %u", layer_of(it)->ffn_dim, it->layer); break;
    case SHARED_FFN_DIM:
        snprintf(text, REASON_BYTES, "shared_ffn_dim %u of layer %u", layer_of(it)->shared_ffn_dim, it->layer);
        break;
    case EXPERTS: snprintf(text, REASON_BYTES, "n_experts %u of layer %u", layer_of(it)->n_experts, it->layer); break;
    default: snprintf(text, REASON_BYTES, "1"); break;
    }
}

// Writes which fields decide whether a model has the current slot: ", with NAME VALUE" for each, nothing if the slot
// does not depend on the config.
static void describe_conditions(const llamac_slot_iterator *it, char text[REASON_BYTES]) {
    const struct config *c = config_of(it);
    const unsigned conditions = slot_of(it)->conditions;
    const int in_layer = it->group == GROUP_LAYER;
    const struct { unsigned conditions; const char *record, *field; uint32_t value; } enums[] = {
        { IF_LAYER_NORM, "config", "norm", c->norm },
        { IF_LEARNED, "config", "position", c->position },
        { IF_QK_NORM, "config", "qk_norm", c->qk_norm },
        { IF_PRE_NORM | IF_POST_NORM, "layer", "placement", in_layer ? layer_of(it)->placement : 0 },
        { IF_DENSE | IF_GATED | IF_EXPERTS, "layer", "ffn", in_layer ? layer_of(it)->ffn : 0 },
    };
    const struct { unsigned conditions; const char *field; int32_t value; } numbers[] = {
        { IF_OWN_KV | IF_OWN_V, "kv_source", in_layer ? layer_of(it)->kv_source : 0 },
        { IF_OWN_V, "v_is_k", in_layer ? (int32_t)layer_of(it)->v_is_k : 0 },
        { IF_SINKS, "sinks", in_layer ? (int32_t)layer_of(it)->sinks : 0 },
        { IF_SHARED, "shared_ffn_dim", in_layer ? (int32_t)layer_of(it)->shared_ffn_dim : 0 },
        { IF_SHARED_GATE, "shared_gate", in_layer ? (int32_t)layer_of(it)->shared_gate : 0 },
    };
    size_t n = 0;
    text[0] = 0;
    for (size_t i = 0; i < ARRAY_LEN(enums); i++) {
        if (!(conditions & enums[i].conditions)) continue;
        char value[FORMAT_VALUE_BYTES];
        format_value_name(enums[i].record, enums[i].field, enums[i].value, value);
        n += (size_t)snprintf(text + n, REASON_BYTES - n, ", with %s %s", enums[i].field, value);
    }
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        if (conditions & numbers[i].conditions)
            n += (size_t)snprintf(text + n, REASON_BYTES - n, ", with %s %d", numbers[i].field, numbers[i].value);
    if (conditions & IF_LONG_ROPE)
        snprintf(text, REASON_BYTES, ", with rope_original_context[%u] %u", it->table,
                 c->rope_original_context[it->table]);
    if (conditions & IF_UNTIED) snprintf(text, REASON_BYTES, ", with tied_output %u", c->tied_output);
}

// ---- binding

// The structure that the current slot's offset refers to.
static char *base_of(struct llamac_model *m, const llamac_slot_iterator *it) {
    switch (it->group) {
    case GROUP_ROPE: return (char *)&m->rope[it->table];
    case GROUP_LAYER: return (char *)&m->layers[it->layer];
    case GROUP_EXPERT: return (char *)&m->layers[it->layer].experts[it->expert];
    default: return (char *)m;
    }
}

static int check_shape(const llamac_slot_iterator *it, const struct tensor_record *t, llamac_error *err) {
    const struct slot *s = slot_of(it);
    const uint64_t rows = extent_of(it, s->rows), columns = extent_of(it, s->columns);
    const uint32_t n_dims = is_matrix(it) ? 2 : 1;
    const uint64_t first = is_matrix(it) ? rows : columns, second = is_matrix(it) ? columns : 0;
    if (t->n_dims != n_dims)
        return bad_model(err, "tensor %s: n_dims is %u, expected %u", t->name, t->n_dims, n_dims);
    if (t->shape[0] == first && t->shape[1] == second) return 0;
    // names only the extents that differ, which points to the wrong number in the config
    const int rows_differ = is_matrix(it) && t->shape[0] != first,
              columns_differ = t->shape[is_matrix(it) ? 1 : 0] != columns;
    char of_rows[REASON_BYTES] = "", of_columns[REASON_BYTES] = "";
    if (rows_differ) describe_extent(it, s->rows, of_rows);
    if (columns_differ) describe_extent(it, s->columns, of_columns);
    return bad_model(err,
                     "tensor %s: its shape is (%" PRIu64 ", %" PRIu64 "), the config needs (%" PRIu64 ", %" PRIu64
                     "): %s%s%s", t->name, t->shape[0], t->shape[1], first, second, of_rows,
                     rows_differ && columns_differ ? ", " : "", of_columns);
}

static struct matrix matrix_view(const void *data, int dtype, uint64_t rows, uint64_t columns) {
    return (struct matrix){ .data = data, .dtype = dtype, .rows = (int)rows, .columns = (int)columns,
                            .strip_bytes = dtype_strip_bytes(dtype, columns) };
}

static int bind_tensor(struct llamac_model *m, const llamac_slot_iterator *it, const struct tensor_record *t,
                       llamac_error *err) {
    if (check_shape(it, t, err)) return -1;
    const struct slot *s = slot_of(it);
    const uint8_t *data = m->file.data + t->offset;
    char *to = base_of(m, it) + s->offset;
    if (is_matrix(it)) {
        const struct matrix view = matrix_view(data, (int)t->dtype, extent_of(it, s->rows), extent_of(it, s->columns));
        memcpy(to, &view, sizeof view);
        m->dtypes |= 1u << t->dtype;
    } else {
        const float *vector = (const float *)(const void *)data;
        memcpy(to, &vector, sizeof vector);
    }
    return 0;
}

static int bind_all(struct llamac_model *m, llamac_error *err) {
    llamac_slot_iterator it = { .config = m->config, .layers = m->file.layers };
    const struct tensor_record *t = m->file.tensors, *end = t + m->file.n_tensors;
    char name[FORMAT_NAME_BYTES], reason[REASON_BYTES];
    while (advance(&it)) {
        name_of(&it, name);
        const int in_file = t < end && !strcmp(t->name, name);
        if (applies(&it) && in_file) {
            if (bind_tensor(m, &it, t++, err)) return -1;
        } else if (in_file) {
            describe_conditions(&it, reason);
            return bad_model(err, "tensor %s does not belong to a model of this config%s", name, reason);
        } else if (applies(&it) && is_required(&it)) {
            describe_conditions(&it, reason);
            return bad_model(err, "tensor %s is missing%s: %s%s", name, reason,
                             t < end ? "the table continues with " : "the table ends", t < end ? t->name : "");
        }
    }
    if (t < end)
        return bad_model(err, "tensor %s does not belong to a model of this config, or not at this place in the table",
                         t->name);
    if (m->config->tied_output) m->output = m->token_embedding;
    return 0;
}

// ---- what the format can say and the engine does not compute

struct uncomputed { const char *field; double found; int computed; };

static int check_computed(const struct llamac_model *m, llamac_error *err) {
    const struct config *c = m->config;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const struct layer_record *r = &m->file.layers[l];
        const struct uncomputed fields[] = {
            { "mixer", r->mixer, r->mixer == MIXER_ATTENTION },
            { "layer_scale", (double)r->layer_scale, r->layer_scale == 1 },
            { "v_is_k", r->v_is_k, !r->v_is_k },
            { "v_norm", r->v_norm, r->v_norm == V_NORM_NONE },
            { "output_gate", r->output_gate, r->output_gate == OUTPUT_GATE_NONE },
            { "ffn", r->ffn, r->ffn != FFN_NONE },
            { "router", r->router, r->router != ROUTER_SIGMOID },
            { "router_choice_bias", r->router_choice_bias, !r->router_choice_bias },
            { "n_expert_groups", r->n_expert_groups, !r->n_expert_groups },
            { "expert_scale", (double)r->expert_scale, r->expert_scale == 1 },
            { "layer_embedding_dim", r->layer_embedding_dim, !r->layer_embedding_dim },
        };
        for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
            if (fields[i].computed) continue;
            char value[FORMAT_VALUE_BYTES];
            format_value_name("layer", fields[i].field, (uint32_t)max_int(0, (int)fields[i].found), value);
            if (!value[0]) snprintf(value, sizeof value, "%.9g", fields[i].found);
            return err_set(err, LLAMAC_UNSUPPORTED,
                           "layer %u: %s is %s, which this version of llamac does not compute: use a newer one", l,
                           fields[i].field, value);
        }
    }
    return 0;
}

// Allocates the layers and their experts, and derives the model's maxima.
static int allocate_layers(struct llamac_model *m, llamac_error *err) {
    uint64_t n_experts = 0;
    for (uint32_t l = 0; l < m->config->n_layers; l++) n_experts += m->file.layers[l].n_experts;
    if (n_experts * MATRICES_OF_EXPERT > m->file.n_tensors)   // before memory is allocated for them
        return bad_model(err,
                         "section tensors: it has %zu tensors, but n_experts is %" PRIu64 " in all layers together, "
                         "with %d each", m->file.n_tensors, n_experts, MATRICES_OF_EXPERT);
    m->layers = mem_alloc(m->config->n_layers, sizeof *m->layers, "the model's layers", err);
    if (!m->layers) return -1;
    if (n_experts) {
        m->experts = mem_alloc((size_t)n_experts, sizeof *m->experts, "the model's experts", err);
        if (!m->experts) return -1;
    }
    struct ffn_weights *experts = m->experts;
    for (uint32_t l = 0; l < m->config->n_layers; l++) {
        const struct layer_record *record = &m->file.layers[l];
        const int used = record->ffn == FFN_EXPERTS ? (int)record->n_experts_used : 0;
        m->layers[l].record = record;
        m->layers[l].heads = layer_heads(m->config, record);
        m->layers[l].kv_source = record->kv_source < 0 ? (int)l : record->kv_source;
        m->layers[l].experts = experts;
        if (experts) experts += record->n_experts;
        const int expert_dim = used ? (int)record->ffn_dim : 0, dense_dim = used ? 0 : (int)record->ffn_dim;
        m->max_expert_dim = max_int(m->max_expert_dim, expert_dim);
        m->max_ffn_dim = max_int(m->max_ffn_dim, max_int(dense_dim, (int)record->shared_ffn_dim));
        const size_t hidden = (size_t)max_int(1, used) * record->ffn_dim + record->shared_ffn_dim;
        m->max_hidden = max_size(m->max_hidden, hidden);
        m->max_experts = max_int(m->max_experts, (int)record->n_experts);
        m->max_experts_used = max_int(m->max_experts_used, used);
        m->has_post_norms |= record->placement == PLACEMENT_POST || record->placement == PLACEMENT_SANDWICH;
    }
    return 0;
}

int llamac_model_open(llamac_model **model, const void *data, size_t bytes, llamac_error *err) {
    struct flat_file file;
    *model = NULL;
    if (format_open(&file, data, bytes, err)) return -1;
    llamac_model *m = mem_alloc(1, sizeof *m, "the model", err);
    if (!m) {
        format_close(&file);
        return -1;
    }
    mem_count_object(1);
    m->file = file;
    m->config = file.config;
    m->kv = mem_alloc(1, sizeof *m->kv, "the pool of KV pages", err);
    if (!m->kv || check_computed(m, err) || allocate_layers(m, err) || bind_all(m, err)) {
        llamac_model_close(&m);
        return -1;
    }
    *model = m;
    return 0;
}

void llamac_model_close(llamac_model **model) {
    if (!*model) return;
    for (struct lora *lora = (*model)->loras, *next; lora; lora = next) {
        next = lora->next;
        mem_free(lora);
    }
    mem_free((*model)->layers);
    mem_free((*model)->experts);
    mem_free((*model)->kv);
    mem_free((*model)->device_kv);
    format_close(&(*model)->file);
    mem_free(*model);
    mem_count_object(-1);
    *model = NULL;
}

int llamac_model_use_device(llamac_model *model, const llamac_device *device, llamac_error *err) {
    if (model->device_kv) return bad_argument(err, "the model already has a device");
    model->device_kv = mem_alloc(1, sizeof *model->device_kv, "the pool of a device's KV pages", err);
    if (!model->device_kv) return -1;
    model->device_kv->device = device;
    kv_pool_set_budget(model->device_kv, model->kv->budget);
    return 0;
}

void llamac_set_kv_budget(llamac_model *model, size_t bytes) {
    kv_pool_set_budget(model->kv, bytes);
    llamac_set_device_kv_budget(model, bytes);
}
void llamac_set_device_kv_budget(llamac_model *model, size_t bytes) {
    if (model->device_kv) kv_pool_set_budget(model->device_kv, bytes);
}
size_t llamac_device_kv_bytes(const llamac_model *model) {
    return model->device_kv ? kv_pool_bytes(model->device_kv) : 0;
}
size_t llamac_kv_bytes(const llamac_model *model) {
    return kv_pool_bytes(model->kv) + llamac_device_kv_bytes(model);
}

const void *llamac_model_tables(const llamac_model *model, size_t *bytes) {
    *bytes = model->file.table_bytes;
    return model->file.tables;
}

// ---- adapters and replaced tensors

// Moves a new iterator to the slot of a tensor. Returns its matrix or pointer in the model, or NULL if the model has
// no such tensor.
static void *find_tensor(struct llamac_model *m, const char *tensor, llamac_slot_iterator *it) {
    char name[FORMAT_NAME_BYTES];
    const int tied_output = m->config->tied_output && !strcmp(tensor, "output.weight");
    *it = (llamac_slot_iterator){ .config = m->config, .layers = m->file.layers };
    while (advance(it)) {
        if (!applies(it)) continue;
        name_of(it, name);
        if (strcmp(name, tied_output ? "token_embedding.weight" : tensor)) continue;
        return tied_output ? (void *)&m->output : base_of(m, it) + slot_of(it)->offset;
    }
    return NULL;
}

int llamac_model_adapt(llamac_model *m, const char *matrix, int rank, const void *a, size_t a_bytes, const void *b,
                       size_t b_bytes, const float *scales, size_t n_scales, llamac_error *err) {
    llamac_slot_iterator it;
    struct matrix *adapted = find_tensor(m, matrix, &it);
    if (!adapted || !is_matrix(&it)) return bad_argument(err, "adapter: the model has no matrix %.64s", matrix);
    if (rank < 1 || rank > LLAMAC_MAX_RANK)
        return bad_argument(err, "adapter of %.64s: rank is %d, expected 1 to %d", matrix, rank, LLAMAC_MAX_RANK);
    if (adapted->lora) return bad_argument(err, "adapter of %.64s: the matrix already has an adapter", matrix);
    const int is_embedding = adapted == &m->token_embedding || adapted == &m->position_embedding;
    if (is_embedding && scales) return bad_argument(err, "adapter of %.64s: an embedding has no scales", matrix);
    if (scales && n_scales != (size_t)adapted->rows)
        return bad_argument(err, "adapter of %.64s: there are %zu scales, expected %d", matrix, n_scales,
                            adapted->rows);
    const uint64_t r = (uint64_t)rank, rows = (uint64_t)adapted->rows, columns = (uint64_t)adapted->columns;
    const size_t a_needed = is_embedding ? llamac_matrix_bytes(LLAMAC_F32, columns, r)
                                         : llamac_matrix_bytes(LLAMAC_F32, r, columns);
    const size_t b_needed = llamac_matrix_bytes(LLAMAC_F32, rows, r);
    if (a_bytes != a_needed || b_bytes != b_needed)
        return bad_argument(err, "adapter of %.64s: a has %zu bytes and b %zu, expected %zu and %zu", matrix, a_bytes,
                            b_bytes, a_needed, b_needed);
    struct lora *lora = mem_alloc(1, sizeof *lora, "an adapter", err);
    if (!lora) return -1;
    *lora = (struct lora){ .rank = rank, .a = a, .b = b, .next = m->loras };
    m->loras = lora;
    m->max_rank = max_int(m->max_rank, rank);
    adapted->lora = lora;
    adapted->scales = scales;
    return 0;
}

int llamac_model_replace(llamac_model *m, const char *tensor, int dtype, const void *data, size_t bytes,
                         llamac_error *err) {
    llamac_slot_iterator it;
    void *found = find_tensor(m, tensor, &it);
    if (!found) return bad_argument(err, "replacing: a model of this config has no tensor %.64s", tensor);
    const uint64_t rows = extent_of(&it, slot_of(&it)->rows), columns = extent_of(&it, slot_of(&it)->columns);
    const size_t needed = is_matrix(&it) ? llamac_matrix_bytes(dtype, rows, columns) : sizeof(float) * (size_t)columns;
    if (!is_matrix(&it) && dtype != LLAMAC_F32)
        return bad_argument(err, "replacing %.64s: dtype is %d, but a vector is f32", tensor, dtype);
    if (!needed) return bad_argument(err, "replacing %.64s: dtype is %d, which does not exist", tensor, dtype);
    if (bytes != needed)
        return bad_argument(err, "replacing %.64s: %zu bytes of dtype %d, expected %zu", tensor, bytes, dtype, needed);
    if (is_matrix(&it)) {
        struct matrix *matrix = found, view = matrix_view(data, dtype, rows, columns);
        view.lora = matrix->lora;
        view.scales = matrix->scales;
        *matrix = view;
        m->dtypes |= 1u << dtype;
    } else {
        const float *vector = data;
        memcpy(found, &vector, sizeof vector);
    }
    return 0;
}
