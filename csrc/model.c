// SPDX-License-Identifier: MIT
// model.c - the one list of weights, and the binding of a file's tensors to it.
//
// The list says which tensors a config needs, with which shape, and in which order they lie in the file. Binding walks the list and
// the tensor table side by side: whatever is missing, surplus, misplaced or misshaped is named.
#include "model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "mem.h"

// ---- the list

enum extent { ONE, DIM, VOCAB, CONTEXT, ROPE_HALF, Q_DIM, KV_DIM, FFN_DIM };
enum presence { REQUIRED, OPTIONAL, IF_LAYER_NORM, IF_LEARNED, IF_LONG_ROPE, IF_GATED, IF_GATED_OPTIONAL, IF_UNTIED };

struct slot {
    const char *name;
    enum presence presence;
    enum extent rows, columns;   // a vector has ONE row
    size_t place;                // of the pointer or matrix in struct llamac_model, struct rope_table or struct layer
};
#define OF_MODEL(member) offsetof(struct llamac_model, member)
#define OF_ROPE(member) offsetof(struct rope_table, member)
#define OF_LAYER(member) offsetof(struct layer, member)

static const struct slot first_slots[] = {
    { "token_embedding.weight", REQUIRED, VOCAB, DIM, OF_MODEL(token_embedding) },
    { "position_embedding.weight", IF_LEARNED, CONTEXT, DIM, OF_MODEL(position_embedding) },
};
static const struct slot rope_slots[] = {
    { "inv_freq", REQUIRED, ONE, ROPE_HALF, OF_ROPE(inv_freq) },
    { "inv_freq_long", IF_LONG_ROPE, ONE, ROPE_HALF, OF_ROPE(inv_freq_long) },
};
static const struct slot layer_slots[] = {
    { "attn_norm.weight", REQUIRED, ONE, DIM, OF_LAYER(attn_norm) },
    { "attn_norm.bias", IF_LAYER_NORM, ONE, DIM, OF_LAYER(attn_norm_bias) },
    { "attn_q.weight", REQUIRED, Q_DIM, DIM, OF_LAYER(attn_q) },
    { "attn_q.bias", OPTIONAL, ONE, Q_DIM, OF_LAYER(attn_q_bias) },
    { "attn_k.weight", REQUIRED, KV_DIM, DIM, OF_LAYER(attn_k) },
    { "attn_k.bias", OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_k_bias) },
    { "attn_v.weight", REQUIRED, KV_DIM, DIM, OF_LAYER(attn_v) },
    { "attn_v.bias", OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_v_bias) },
    { "attn_out.weight", REQUIRED, DIM, Q_DIM, OF_LAYER(attn_out) },
    { "attn_out.bias", OPTIONAL, ONE, DIM, OF_LAYER(attn_out_bias) },
    { "ffn_norm.weight", REQUIRED, ONE, DIM, OF_LAYER(ffn_norm) },
    { "ffn_norm.bias", IF_LAYER_NORM, ONE, DIM, OF_LAYER(ffn_norm_bias) },
    { "ffn_gate.weight", IF_GATED, FFN_DIM, DIM, OF_LAYER(ffn_gate) },
    { "ffn_gate.bias", IF_GATED_OPTIONAL, ONE, FFN_DIM, OF_LAYER(ffn_gate_bias) },
    { "ffn_up.weight", REQUIRED, FFN_DIM, DIM, OF_LAYER(ffn_up) },
    { "ffn_up.bias", OPTIONAL, ONE, FFN_DIM, OF_LAYER(ffn_up_bias) },
    { "ffn_down.weight", REQUIRED, DIM, FFN_DIM, OF_LAYER(ffn_down) },
    { "ffn_down.bias", OPTIONAL, ONE, DIM, OF_LAYER(ffn_down_bias) },
};
static const struct slot last_slots[] = {
    { "output_norm.weight", REQUIRED, ONE, DIM, OF_MODEL(output_norm) },
    { "output_norm.bias", IF_LAYER_NORM, ONE, DIM, OF_MODEL(output_norm_bias) },
    { "output.weight", IF_UNTIED, VOCAB, DIM, OF_MODEL(output) },
    { "output.bias", OPTIONAL, ONE, VOCAB, OF_MODEL(output_bias) },
};

// A place in the walk over all slots of a config: first, rope tables, layers, last.
struct walk {
    const struct config *config;
    const struct layer_record *layers;
    uint32_t table, layer;       // indices, valid for slots of rope_slots and layer_slots
    const struct slot *slot;
};

static int is_matrix(const struct slot *s) { return s->rows != ONE; }

// The slot's number in the whole walk -> its description; 0 past the end.
static int walk_to(struct walk *w, size_t index) {
    const struct config *c = w->config;
    if (index < ARRAY_LEN(first_slots)) { w->slot = &first_slots[index]; return 1; }
    index -= ARRAY_LEN(first_slots);
    if (index < c->n_rope * ARRAY_LEN(rope_slots)) {
        w->table = (uint32_t)(index / ARRAY_LEN(rope_slots));
        w->slot = &rope_slots[index % ARRAY_LEN(rope_slots)];
        return 1;
    }
    index -= c->n_rope * ARRAY_LEN(rope_slots);
    if (index < c->n_layers * ARRAY_LEN(layer_slots)) {
        w->layer = (uint32_t)(index / ARRAY_LEN(layer_slots));
        w->slot = &layer_slots[index % ARRAY_LEN(layer_slots)];
        return 1;
    }
    index -= c->n_layers * ARRAY_LEN(layer_slots);
    if (index < ARRAY_LEN(last_slots)) { w->slot = &last_slots[index]; return 1; }
    return 0;
}

static int of_rope(const struct slot *s) { return s >= rope_slots && s < rope_slots + ARRAY_LEN(rope_slots); }
static int of_layer(const struct slot *s) { return s >= layer_slots && s < layer_slots + ARRAY_LEN(layer_slots); }

static enum presence presence_of(const struct walk *w) {
    const struct config *c = w->config;
    const int gated = of_layer(w->slot) && w->layers[w->layer].ffn == FFN_GATED;
    switch (w->slot->presence) {
    case IF_LAYER_NORM: return c->norm == NORM_LAYER ? REQUIRED : IF_LAYER_NORM;
    case IF_LEARNED: return c->position == POSITION_LEARNED ? REQUIRED : IF_LEARNED;
    case IF_LONG_ROPE: return c->rope_original_context[w->table] ? REQUIRED : IF_LONG_ROPE;
    case IF_GATED: return gated ? REQUIRED : IF_GATED;
    case IF_GATED_OPTIONAL: return gated ? OPTIONAL : IF_GATED_OPTIONAL;
    case IF_UNTIED: return c->tied_output ? IF_UNTIED : REQUIRED;
    default: return w->slot->presence;
    }
}

static uint64_t extent_of(const struct walk *w, enum extent e) {
    const struct config *c = w->config;
    switch (e) {
    case DIM: return c->dim;
    case VOCAB: return c->vocab_size;
    case CONTEXT: return c->context;
    case ROPE_HALF: return c->rope_dim[w->table] / 2;
    case Q_DIM: return (uint64_t)c->n_heads * c->head_dim;
    case KV_DIM: return (uint64_t)c->n_kv_heads * c->head_dim;
    case FFN_DIM: return w->layers[w->layer].ffn_dim;
    default: return 1;
    }
}

static void name_of(const struct walk *w, char name[FORMAT_NAME_BYTES]) {
    if (of_rope(w->slot)) snprintf(name, FORMAT_NAME_BYTES, "rope.%" PRIu32 ".%s", w->table, w->slot->name);
    else if (of_layer(w->slot)) snprintf(name, FORMAT_NAME_BYTES, "layers.%" PRIu32 ".%s", w->layer, w->slot->name);
    else snprintf(name, FORMAT_NAME_BYTES, "%s", w->slot->name);
}

int llamac_slot_at(const void *config, const void *layers, size_t index, llamac_slot *out) {
    struct walk w = { .config = config, .layers = layers };
    if (w.config->n_rope > FORMAT_MAX_ROPE) return -1;
    // slots that this config cannot have are skipped: the index counts the others
    for (size_t i = 0; walk_to(&w, i); i++) {
        enum presence p = presence_of(&w);
        if (p != REQUIRED && p != OPTIONAL) continue;
        if (index--) continue;
        *out = (llamac_slot){ 0 };
        name_of(&w, out->name);
        out->required = p == REQUIRED;
        out->is_matrix = is_matrix(w.slot);
        out->rows = extent_of(&w, w.slot->rows);
        out->columns = extent_of(&w, w.slot->columns);
        return 1;
    }
    return 0;
}

// ---- what this version of the graph cannot compute

static int check_supported(const struct flat_file *file, llamac_error *err) {
    const struct config *c = file->config;
    const struct { const char *name; float value, neutral; } neutral[] = {
        { "embedding_scale", c->embedding_scale, 1 }, { "residual_scale", c->residual_scale, 1 }, { "logit_scale", c->logit_scale, 1 },
        { "attention_soft_cap", c->attention_soft_cap, 0 }, { "logit_soft_cap", c->logit_soft_cap, 0 },
    };
    for (size_t i = 0; i < ARRAY_LEN(neutral); i++)
        if (neutral[i].value != neutral[i].neutral)
            return err_set(err, LLAMAC_UNSUPPORTED, "config: %s %.9g is not supported by this version", neutral[i].name, (double)neutral[i].value);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const struct layer_record *r = &file->layers[l];
        if (r->placement == PLACEMENT_PRE && r->ffn != FFN_EXPERTS && !r->window) continue;
        char placement[FORMAT_VALUE_BYTES], ffn[FORMAT_VALUE_BYTES];
        format_value_name("layer", "placement", r->placement, placement);
        format_value_name("layer", "ffn", r->ffn, ffn);
        return err_set(err, LLAMAC_UNSUPPORTED, "layer %" PRIu32 ": placement %s with ffn %s and window %" PRIu32 " is not supported by this version",
                       l, placement, ffn, r->window);
    }
    return 0;
}

// ---- binding

// Which fields of config and layer say that an extent is what it is.
static void describe_extent(const struct walk *w, enum extent e, char text[FORMAT_NAME_BYTES]) {
    const struct config *c = w->config;
    switch (e) {
    case DIM: snprintf(text, FORMAT_NAME_BYTES, "dim %" PRIu32, c->dim); break;
    case VOCAB: snprintf(text, FORMAT_NAME_BYTES, "vocab_size %" PRIu32, c->vocab_size); break;
    case CONTEXT: snprintf(text, FORMAT_NAME_BYTES, "context %" PRIu32, c->context); break;
    case ROPE_HALF: snprintf(text, FORMAT_NAME_BYTES, "half of rope_dim[%" PRIu32 "] %" PRIu32, w->table, c->rope_dim[w->table]); break;
    case Q_DIM: snprintf(text, FORMAT_NAME_BYTES, "n_heads %" PRIu32 " times head_dim %" PRIu32, c->n_heads, c->head_dim); break;
    case KV_DIM: snprintf(text, FORMAT_NAME_BYTES, "n_kv_heads %" PRIu32 " times head_dim %" PRIu32, c->n_kv_heads, c->head_dim); break;
    case FFN_DIM: snprintf(text, FORMAT_NAME_BYTES, "ffn_dim %" PRIu32 " of layer %" PRIu32, w->layers[w->layer].ffn_dim, w->layer); break;
    default: snprintf(text, FORMAT_NAME_BYTES, "1"); break;
    }
}

// Which field says that a model has the slot or has not; empty for those that every model has, or may have.
static void describe_presence(const struct walk *w, char text[FORMAT_NAME_BYTES]) {
    const struct config *c = w->config;
    char value[FORMAT_VALUE_BYTES];
    text[0] = 0;
    switch (w->slot->presence) {
    case IF_LAYER_NORM:
        format_value_name("config", "norm", c->norm, value);
        snprintf(text, FORMAT_NAME_BYTES, ", with norm %s", value);
        break;
    case IF_LEARNED:
        format_value_name("config", "position", c->position, value);
        snprintf(text, FORMAT_NAME_BYTES, ", with position %s", value);
        break;
    case IF_LONG_ROPE:
        snprintf(text, FORMAT_NAME_BYTES, ", with rope_original_context[%" PRIu32 "] %" PRIu32, w->table, c->rope_original_context[w->table]);
        break;
    case IF_GATED: case IF_GATED_OPTIONAL:
        format_value_name("layer", "ffn", w->layers[w->layer].ffn, value);
        snprintf(text, FORMAT_NAME_BYTES, ", with ffn %s", value);
        break;
    case IF_UNTIED: snprintf(text, FORMAT_NAME_BYTES, ", with tied_output %" PRIu32, c->tied_output); break;
    default: break;
    }
}

static int bind_tensor(struct llamac_model *m, const struct walk *w, const struct tensor_record *t, llamac_error *err) {
    const struct slot *s = w->slot;
    const uint64_t rows = extent_of(w, s->rows), columns = extent_of(w, s->columns);
    const uint32_t n_dims = is_matrix(s) ? 2 : 1;
    const uint64_t first = is_matrix(s) ? rows : columns, second = is_matrix(s) ? columns : 0;
    if (t->n_dims != n_dims)
        return err_set(err, LLAMAC_BAD_MODEL, "tensor %s: n_dims is %" PRIu32 ", expected %" PRIu32, t->name, t->n_dims, n_dims);
    if (t->shape[0] != first || t->shape[1] != second) {
        // only what differs is named: a wrong number in the config shows at one extent
        const int rows_differ = is_matrix(s) && t->shape[0] != first, columns_differ = t->shape[is_matrix(s) ? 1 : 0] != columns;
        char of_rows[FORMAT_NAME_BYTES] = "", of_columns[FORMAT_NAME_BYTES] = "";
        if (rows_differ) describe_extent(w, s->rows, of_rows);
        if (columns_differ) describe_extent(w, s->columns, of_columns);
        return err_set(err, LLAMAC_BAD_MODEL, "tensor %s: its shape is (%" PRIu64 ", %" PRIu64 "), the config needs (%" PRIu64 ", %" PRIu64 "): %s%s%s", t->name,
                       t->shape[0], t->shape[1], first, second, of_rows, rows_differ && columns_differ ? ", " : "", of_columns);
    }
    char *base = of_rope(s) ? (char *)&m->rope[w->table] : of_layer(s) ? (char *)&m->layers[w->layer] : (char *)m;
    const uint8_t *data = m->file.data + t->offset;
    if (is_matrix(s)) {
        struct matrix view = { data, (int)t->dtype, (int)rows, (int)columns, dtype_strip_bytes((int)t->dtype, columns) };
        memcpy(base + s->place, &view, sizeof view);
        m->dtypes |= 1u << t->dtype;
    } else {
        const float *vector = (const float *)(const void *)data;
        memcpy(base + s->place, &vector, sizeof(const float *));
    }
    return 0;
}

static int bind_all(struct llamac_model *m, llamac_error *err) {
    struct walk w = { .config = m->config, .layers = m->file.layers };
    const struct tensor_record *t = m->file.tensors, *end = t + m->file.n_tensors;
    char name[FORMAT_NAME_BYTES], because[FORMAT_NAME_BYTES];
    for (size_t i = 0; walk_to(&w, i); i++) {
        enum presence p = presence_of(&w);
        name_of(&w, name);
        describe_presence(&w, because);
        const int is_next = t < end && !strcmp(t->name, name);
        if (p != REQUIRED && p != OPTIONAL) {
            if (is_next) return err_set(err, LLAMAC_BAD_MODEL, "tensor %s does not belong to a model of this config%s", name, because);
        } else if (is_next) {
            if (bind_tensor(m, &w, t++, err)) return -1;
        } else if (p == REQUIRED) {
            return err_set(err, LLAMAC_BAD_MODEL, "tensor %s is missing%s: %s%s", name, because, t < end ? "in its place is " : "the table ends",
                           t < end ? t->name : "");
        }
    }
    if (t < end) return err_set(err, LLAMAC_BAD_MODEL, "tensor %s does not belong to a model of this config, or not in this place", t->name);
    if (m->config->tied_output) m->output = m->token_embedding;
    return 0;
}

int llamac_model_open(llamac_model **model, const void *data, size_t bytes, llamac_error *err) {
    struct flat_file file;
    *model = NULL;
    if (format_open(&file, data, bytes, err) || check_supported(&file, err)) return -1;
    llamac_model *m = mem_take(1, sizeof *m, "the model", err);
    if (!m) return -1;
    mem_count_object(1);
    m->file = file;
    m->config = file.config;
    m->layers = mem_take(m->config->n_layers, sizeof *m->layers, "the model's layers", err);
    if (!m->layers || bind_all(m, err)) {
        llamac_model_close(&m);
        return -1;
    }
    for (uint32_t l = 0; l < m->config->n_layers; l++) {
        m->layers[l].record = &file.layers[l];
        m->max_ffn_dim = max_int(m->max_ffn_dim, (int)file.layers[l].ffn_dim);
    }
    *model = m;
    return 0;
}

void llamac_model_close(llamac_model **model) {
    if (!*model) return;
    mem_give((*model)->layers);
    mem_give(*model);
    mem_count_object(-1);
    *model = NULL;
}
