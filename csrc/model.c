// SPDX-License-Identifier: MIT
// model.c - the one list of weights, and the binding of a file's tensors to it.
//
// The list says which tensors a config needs, with which shape, and in which order they lie in the file. Binding walks
// the list and the tensor table side by side: whatever is missing, surplus, misplaced or misshaped is named.
#include "model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "mem.h"

// ---- the list

enum extent { ONE, DIM, VOCAB, CONTEXT, ROPE_HALF, Q_DIM, KV_DIM, Q_NORM_DIM, K_NORM_DIM, FFN_DIM, EXPERTS };

// What a model must be like to have a tensor: all of these at once. It must have it then, unless that is OPTIONAL.
enum needs {
    ALWAYS = 0, OPTIONAL = 1, IF_LAYER_NORM = 2, IF_LEARNED = 4, IF_LONG_ROPE = 8, IF_UNTIED = 16, IF_QK_NORM = 32,
    IF_PRE_NORM = 64, IF_POST_NORM = 128, IF_DENSE = 256, IF_GATED = 512, IF_EXPERTS = 1024, END_OF_NEEDS = 2048,
};

struct slot {
    const char *name;
    unsigned needs;
    enum extent rows, columns;   // a vector has ONE row
    size_t place;                // of the pointer or matrix in struct llamac_model, rope_table, layer or expert
};
#define OF_MODEL(member) offsetof(struct llamac_model, member)
#define OF_ROPE(member) offsetof(struct rope_table, member)
#define OF_LAYER(member) offsetof(struct layer, member)
#define OF_EXPERT(member) offsetof(struct expert, member)

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
    { "attn_k.weight", ALWAYS, KV_DIM, DIM, OF_LAYER(attn_k) },
    { "attn_k.bias", OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_k_bias) },
    { "attn_v.weight", ALWAYS, KV_DIM, DIM, OF_LAYER(attn_v) },
    { "attn_v.bias", OPTIONAL, ONE, KV_DIM, OF_LAYER(attn_v_bias) },
    { "attn_q_norm.weight", IF_QK_NORM, ONE, Q_NORM_DIM, OF_LAYER(attn_q_norm) },
    { "attn_k_norm.weight", IF_QK_NORM, ONE, K_NORM_DIM, OF_LAYER(attn_k_norm) },
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
};
static const struct slot expert_slots[] = {
    { "ffn_gate.weight", ALWAYS, FFN_DIM, DIM, OF_EXPERT(gate) },
    { "ffn_up.weight", ALWAYS, FFN_DIM, DIM, OF_EXPERT(up) },
    { "ffn_down.weight", ALWAYS, DIM, FFN_DIM, OF_EXPERT(down) },
};
static const struct slot last_slots[] = {
    { "output_norm.weight", ALWAYS, ONE, DIM, OF_MODEL(output_norm) },
    { "output_norm.bias", IF_LAYER_NORM, ONE, DIM, OF_MODEL(output_norm_bias) },
    { "output.weight", IF_UNTIED, VOCAB, DIM, OF_MODEL(output) },
    { "output.bias", OPTIONAL, ONE, VOCAB, OF_MODEL(output_bias) },
};

// ---- the walk over all slots of a config: the first, those of each RoPE table, of each layer and then of its experts,
// the last

enum group { GROUP_FIRST, GROUP_ROPE, GROUP_LAYER, GROUP_EXPERT, GROUP_LAST };
static const struct { const struct slot *slots; uint32_t n; } groups[] = {
    { first_slots, ARRAY_LEN(first_slots) }, { rope_slots, ARRAY_LEN(rope_slots) },
        { layer_slots, ARRAY_LEN(layer_slots) },
    { expert_slots, ARRAY_LEN(expert_slots) }, { last_slots, ARRAY_LEN(last_slots) },
};

static const struct config *config_of(const llamac_walk *w) { return w->config; }
// Of a walk in the groups of layers.
static const struct layer_record *layer_of(const llamac_walk *w) {
    return (const struct layer_record *)w->layers + w->layer;
}
static uint32_t experts_of(const llamac_walk *w) { return layer_of(w)->ffn == FFN_EXPERTS ? layer_of(w)->n_experts : 0;
    }
static const struct slot *slot_of(const llamac_walk *w) { return &groups[w->group].slots[w->taken - 1]; }
static int is_matrix(const llamac_walk *w) { return slot_of(w)->rows != ONE; }

// The next slot, whether this config has it or not; 0 past the end.
static int walk_on(llamac_walk *w) {
    const struct config *c = config_of(w);
    if (w->taken < groups[w->group].n) return (int)++w->taken;
    if (w->group == GROUP_LAST) return 0;
    w->taken = 1;
    if (w->group == GROUP_FIRST) w->group = c->n_rope ? GROUP_ROPE : c->n_layers ? GROUP_LAYER : GROUP_LAST;
    else if (w->group == GROUP_ROPE && ++w->table == c->n_rope) w->group = c->n_layers ? GROUP_LAYER : GROUP_LAST;
    else if (w->group == GROUP_LAYER && experts_of(w)) w->group = GROUP_EXPERT, w->expert = 0;
    else if (w->group == GROUP_LAYER || (w->group == GROUP_EXPERT && ++w->expert == experts_of(w)))
        w->group = ++w->layer == c->n_layers ? GROUP_LAST : GROUP_LAYER;
    return 1;
}

// Whether the model fulfils one of a slot's needs.
static int fulfils(const llamac_walk *w, unsigned need) {
    const struct config *c = config_of(w);
    switch (need) {
    case IF_LAYER_NORM: return c->norm == NORM_LAYER;
    case IF_LEARNED: return c->position == POSITION_LEARNED;
    case IF_LONG_ROPE: return c->rope_original_context[w->table] > 0;
    case IF_UNTIED: return !c->tied_output;
    case IF_QK_NORM: return c->qk_norm != QK_NORM_NONE;
    case IF_PRE_NORM: return layer_of(w)->placement != PLACEMENT_POST;
    case IF_POST_NORM: return layer_of(w)->placement == PLACEMENT_POST || layer_of(w)->placement == PLACEMENT_SANDWICH;
    case IF_DENSE: return layer_of(w)->ffn != FFN_EXPERTS;
    case IF_GATED: return layer_of(w)->ffn == FFN_GATED;
    case IF_EXPERTS: return layer_of(w)->ffn == FFN_EXPERTS;
    default: return 1;
    }
}
static int belongs(const llamac_walk *w) {
    for (unsigned need = 1; need < END_OF_NEEDS; need *= 2)
        if (slot_of(w)->needs & need && !fulfils(w, need)) return 0;
    return 1;
}
static int is_required(const llamac_walk *w) { return !(slot_of(w)->needs & OPTIONAL); }

static uint64_t extent_of(const llamac_walk *w, enum extent e) {
    const struct config *c = config_of(w);
    const uint64_t q_dim = (uint64_t)c->n_heads * c->head_dim, kv_dim = (uint64_t)c->n_kv_heads * c->head_dim;
    switch (e) {
    case DIM: return c->dim;
    case VOCAB: return c->vocab_size;
    case CONTEXT: return c->context;
    case ROPE_HALF: return c->rope_dim[w->table] / 2;
    case Q_DIM: return q_dim;
    case KV_DIM: return kv_dim;
    case Q_NORM_DIM: return c->qk_norm == QK_NORM_HEAD ? c->head_dim : q_dim;
    case K_NORM_DIM: return c->qk_norm == QK_NORM_HEAD ? c->head_dim : kv_dim;
    case FFN_DIM: return layer_of(w)->ffn_dim;
    case EXPERTS: return layer_of(w)->n_experts;
    default: return 1;
    }
}

static void name_of(const llamac_walk *w, char name[FORMAT_NAME_BYTES]) {
    const char *last = slot_of(w)->name;
    switch (w->group) {
    case GROUP_ROPE: snprintf(name, FORMAT_NAME_BYTES, "rope.%" PRIu32 ".%s", w->table, last); break;
    case GROUP_LAYER: snprintf(name, FORMAT_NAME_BYTES, "layers.%" PRIu32 ".%s", w->layer, last); break;
    case GROUP_EXPERT: snprintf(name, FORMAT_NAME_BYTES, "layers.%" PRIu32 ".experts.%" PRIu32 ".%s", w->layer,
        w->expert, last); break;
    default: snprintf(name, FORMAT_NAME_BYTES, "%s", last); break;
    }
}

int llamac_slot_next(llamac_walk *w, llamac_slot *out) {
    if (config_of(w)->n_rope > FORMAT_MAX_ROPE) return -1;
    while (walk_on(w)) {
        if (w->group == GROUP_LAYER && experts_of(w) > FORMAT_MAX_EXPERTS) return -1;
        if (!belongs(w)) continue;
        *out = (llamac_slot){ 0 };
        name_of(w, out->name);
        out->required = is_required(w);
        out->is_matrix = is_matrix(w);
        out->rows = extent_of(w, slot_of(w)->rows);
        out->columns = extent_of(w, slot_of(w)->columns);
        return 1;
    }
    return 0;
}

// ---- binding

enum { REASON_BYTES = 128 };

// Which fields of config and layer say that an extent is what it is.
static void describe_extent(const llamac_walk *w, enum extent e, char text[REASON_BYTES]) {
    const struct config *c = config_of(w);
    const int of_q = e == Q_DIM || e == Q_NORM_DIM, per_head = (e == Q_NORM_DIM || e == K_NORM_DIM)
        && c->qk_norm == QK_NORM_HEAD;
    switch (e) {
    case DIM: snprintf(text, REASON_BYTES, "dim %" PRIu32, c->dim); break;
    case VOCAB: snprintf(text, REASON_BYTES, "vocab_size %" PRIu32, c->vocab_size); break;
    case CONTEXT: snprintf(text, REASON_BYTES, "context %" PRIu32, c->context); break;
    case ROPE_HALF: snprintf(text, REASON_BYTES, "half of rope_dim[%" PRIu32 "] %" PRIu32, w->table,
        c->rope_dim[w->table]); break;
    case Q_DIM: case KV_DIM: case Q_NORM_DIM: case K_NORM_DIM:
        if (per_head) snprintf(text, REASON_BYTES, "head_dim %" PRIu32, c->head_dim);
        else snprintf(text, REASON_BYTES, "%s %" PRIu32 " times head_dim %" PRIu32, of_q ? "n_heads" : "n_kv_heads",
            of_q ? c->n_heads : c->n_kv_heads, c->head_dim);
        break;
    case FFN_DIM: snprintf(text, REASON_BYTES, "ffn_dim %" PRIu32 " of layer %" PRIu32, layer_of(w)->ffn_dim,
        w->layer); break;
    case EXPERTS: snprintf(text, REASON_BYTES, "n_experts %" PRIu32 " of layer %" PRIu32, layer_of(w)->n_experts,
        w->layer); break;
    default: snprintf(text, REASON_BYTES, "1"); break;
    }
}

// Which fields say that a model has the slot or has not; empty for those that every model has, or may have.
static void describe_needs(const llamac_walk *w, char text[REASON_BYTES]) {
    const struct config *c = config_of(w);
    const unsigned needs = slot_of(w)->needs;
    size_t n = 0;
    text[0] = 0;
    const struct { unsigned needs; const char *record, *field; uint32_t value; } named[] = {
        { IF_LAYER_NORM, "config", "norm", c->norm }, { IF_LEARNED, "config", "position", c->position },
            { IF_QK_NORM, "config", "qk_norm", c->qk_norm },
        { IF_PRE_NORM | IF_POST_NORM, "layer", "placement", w->group == GROUP_LAYER ? layer_of(w)->placement : 0 },
        { IF_DENSE | IF_GATED | IF_EXPERTS, "layer", "ffn", w->group == GROUP_LAYER ? layer_of(w)->ffn : 0 },
    };
    for (size_t i = 0; i < ARRAY_LEN(named); i++) {
        if (!(needs & named[i].needs)) continue;
        char value[FORMAT_VALUE_BYTES];
        format_value_name(named[i].record, named[i].field, named[i].value, value);
        n += (size_t)snprintf(text + n, REASON_BYTES - n, ", with %s %s", named[i].field, value);
    }
    if (needs & IF_LONG_ROPE)
        snprintf(text, REASON_BYTES, ", with rope_original_context[%" PRIu32 "] %" PRIu32, w->table,
            c->rope_original_context[w->table]);
    if (needs & IF_UNTIED) snprintf(text, REASON_BYTES, ", with tied_output %" PRIu32, c->tied_output);
}

// What a slot's place counts from.
static char *base_of(struct llamac_model *m, const llamac_walk *w) {
    switch (w->group) {
    case GROUP_ROPE: return (char *)&m->rope[w->table];
    case GROUP_LAYER: return (char *)&m->layers[w->layer];
    case GROUP_EXPERT: return (char *)&m->layers[w->layer].experts[w->expert];
    default: return (char *)m;
    }
}

static int bind_tensor(struct llamac_model *m, const llamac_walk *w, const struct tensor_record *t, llamac_error *err) {
    const struct slot *s = slot_of(w);
    const uint64_t rows = extent_of(w, s->rows), columns = extent_of(w, s->columns);
    const uint32_t n_dims = is_matrix(w) ? 2 : 1;
    const uint64_t first = is_matrix(w) ? rows : columns, second = is_matrix(w) ? columns : 0;
    if (t->n_dims != n_dims)
        return err_set(err, LLAMAC_BAD_MODEL, "tensor %s: n_dims is %" PRIu32 ", expected %" PRIu32, t->name,
            t->n_dims, n_dims);
    if (t->shape[0] != first || t->shape[1] != second) {
        // only what differs is named: a wrong number in the config shows at one extent
        const int rows_differ = is_matrix(w) && t->shape[0] != first,
            columns_differ = t->shape[is_matrix(w) ? 1 : 0] != columns;
        char of_rows[REASON_BYTES] = "", of_columns[REASON_BYTES] = "";
        if (rows_differ) describe_extent(w, s->rows, of_rows);
        if (columns_differ) describe_extent(w, s->columns, of_columns);
        return err_set(err, LLAMAC_BAD_MODEL,
            "tensor %s: its shape is (%" PRIu64 ", %" PRIu64 "), the config needs (%" PRIu64 ", %" PRIu64 "): %s%s%s",
            t->name,
                       t->shape[0], t->shape[1], first, second, of_rows, rows_differ && columns_differ ? ", " : "",
                           of_columns);
    }
    char *base = base_of(m, w);
    const uint8_t *data = m->file.data + t->offset;
    if (is_matrix(w)) {
        const struct matrix view = { .data = data, .dtype = (int)t->dtype, .rows = (int)rows, .columns = (int)columns,
            .strip_bytes = dtype_strip_bytes((int)t->dtype, columns) };
        memcpy(base + s->place, &view, sizeof view);
        m->dtypes |= 1u << t->dtype;
    } else {
        const float *vector = (const float *)(const void *)data;
        memcpy(base + s->place, &vector, sizeof(const float *));
    }
    return 0;
}

static int bind_all(struct llamac_model *m, llamac_error *err) {
    llamac_walk w = { .config = m->config, .layers = m->file.layers };
    const struct tensor_record *t = m->file.tensors, *end = t + m->file.n_tensors;
    char name[FORMAT_NAME_BYTES], because[REASON_BYTES];
    while (walk_on(&w)) {
        name_of(&w, name);
        const int is_next = t < end && !strcmp(t->name, name);
        if (belongs(&w) && is_next) {
            if (bind_tensor(m, &w, t++, err)) return -1;
        } else if (is_next) {
            describe_needs(&w, because);
            return err_set(err, LLAMAC_BAD_MODEL, "tensor %s does not belong to a model of this config%s", name,
                because);
        } else if (belongs(&w) && is_required(&w)) {
            describe_needs(&w, because);
            return err_set(err, LLAMAC_BAD_MODEL, "tensor %s is missing%s: %s%s", name, because,
                t < end ? "in its place is " : "the table ends",
                           t < end ? t->name : "");
        }
    }
    if (t < end) return err_set(err, LLAMAC_BAD_MODEL,
        "tensor %s does not belong to a model of this config, or not in this place", t->name);
    if (m->config->tied_output) m->output = m->token_embedding;
    return 0;
}

// The layers with their records and with room for their experts.
static int take_layers(struct llamac_model *m, llamac_error *err) {
    uint64_t n_experts = 0;
    for (uint32_t l = 0; l < m->config->n_layers; l++) n_experts += m->file.layers[l].n_experts;
    if (n_experts * ARRAY_LEN(expert_slots) > m->file.n_tensors)   // no memory is taken for what cannot be there
        return err_set(err, LLAMAC_BAD_MODEL,
            "section tensors: it has %zu tensors, but n_experts is %" PRIu64 " in all layers together, with %zu each",
            m->file.n_tensors, n_experts,
                       ARRAY_LEN(expert_slots));
    m->layers = mem_alloc(m->config->n_layers, sizeof *m->layers, "the model's layers", err);
    if (!m->layers) return -1;
    if (n_experts) {
        m->experts = mem_alloc((size_t)n_experts, sizeof *m->experts, "the model's experts", err);
        if (!m->experts) return -1;
    }
    struct expert *experts = m->experts;
    for (uint32_t l = 0; l < m->config->n_layers; l++) {
        const struct layer_record *record = &m->file.layers[l];
        m->layers[l].record = record;
        m->layers[l].experts = experts;
        if (experts) experts += record->n_experts;
        const int used = record->ffn == FFN_EXPERTS ? (int)record->n_experts_used : 0;
        int *const widest = used ? &m->max_expert_dim : &m->max_ffn_dim;
        *widest = max_int(*widest, (int)record->ffn_dim);
        m->max_hidden = max_size(m->max_hidden, (size_t)max_int(1, used) * record->ffn_dim);
        m->max_experts = max_int(m->max_experts, (int)record->n_experts),
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
    if (take_layers(m, err) || bind_all(m, err)) {
        llamac_model_close(&m);
        return -1;
    }
    *model = m;
    return 0;
}

const void *llamac_model_tables(const llamac_model *model, size_t *bytes) {
    *bytes = model->file.table_bytes;
    return model->file.tables;
}

// ---- adapters

// Walks to a tensor of this name. Returns where its view is, or NULL.
static void *find_view(struct llamac_model *m, const char *tensor, llamac_walk *w) {
    char name[FORMAT_NAME_BYTES];
    const int output = m->config->tied_output && !strcmp(tensor, "output.weight");
    *w = (llamac_walk){ .config = m->config, .layers = m->file.layers };
    while (walk_on(w)) {
        if (!belongs(w)) continue;
        name_of(w, name);
        if (!strcmp(name, output ? "token_embedding.weight" : tensor)) return output ? (void *)&m->output : base_of(m,
            w) + slot_of(w)->place;
    }
    return NULL;
}

int llamac_model_adapt(llamac_model *m, const char *matrix, int rank, const void *a, size_t a_bytes, const void *b,
    size_t b_bytes, const float *scales,
                       size_t n_scales, llamac_error *err) {
    llamac_walk w;
    struct matrix *adapted = find_view(m, matrix, &w);
    if (!adapted || !is_matrix(&w)) return err_set(err, LLAMAC_BAD_ARGUMENT, "adapter: the model has no matrix %.64s",
        matrix);
    if (rank < 1 || rank > LLAMAC_MAX_RANK) return err_set(err, LLAMAC_BAD_ARGUMENT,
        "adapter of %.64s: rank is %d, expected 1 to %d", matrix, rank, LLAMAC_MAX_RANK);
    if (adapted->lora) return err_set(err, LLAMAC_BAD_ARGUMENT, "adapter of %.64s: it has one already", matrix);
    const int is_embedding = adapted == &m->token_embedding || adapted == &m->position_embedding;
    if (is_embedding && scales) return err_set(err, LLAMAC_BAD_ARGUMENT,
        "adapter of %.64s: an embedding has no scales", matrix);
    if (scales && n_scales != (size_t)adapted->rows)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "adapter of %.64s: there are %zu scales, expected %d", matrix,
            n_scales, adapted->rows);
    const uint64_t across = (uint64_t)rank, columns = (uint64_t)adapted->columns;
    const size_t a_needed = is_embedding ? llamac_matrix_bytes(LLAMAC_F32, columns, across)
        : llamac_matrix_bytes(LLAMAC_F32, across, columns);
    const size_t b_needed = llamac_matrix_bytes(LLAMAC_F32, (uint64_t)adapted->rows, across);
    if (a_bytes != a_needed || b_bytes != b_needed)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "adapter of %.64s: a has %zu bytes and b %zu, expected %zu and %zu",
            matrix, a_bytes, b_bytes, a_needed, b_needed);
    struct lora *lora = mem_alloc(1, sizeof *lora, "an adapter's part", err);
    if (!lora) return -1;
    *lora = (struct lora){ rank, a, b, m->loras };
    m->loras = lora;
    m->max_rank = max_int(m->max_rank, rank);
    adapted->lora = lora;
    adapted->scales = scales;
    return 0;
}

int llamac_model_replace(llamac_model *m, const char *tensor, int dtype, const void *data, size_t bytes,
    llamac_error *err) {
    llamac_walk w;
    void *view = find_view(m, tensor, &w);
    if (!view) return err_set(err, LLAMAC_BAD_ARGUMENT, "replacing: a model of this config has no tensor %.64s",
        tensor);
    const uint64_t rows = extent_of(&w, slot_of(&w)->rows), columns = extent_of(&w, slot_of(&w)->columns);
    const size_t needed = is_matrix(&w) ? llamac_matrix_bytes(dtype, rows, columns) : dtype == LLAMAC_F32
        ? sizeof(float) * (size_t)columns : 0;
    if (!needed || bytes != needed)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "replacing %.64s: %zu bytes of dtype %d, expected %zu%s", tensor,
            bytes, dtype, needed, needed ? "" : ": no such dtype here");
    if (is_matrix(&w)) {
        struct matrix *matrix = view;
        matrix->data = data, matrix->dtype = dtype, matrix->rows = (int)rows, matrix->columns = (int)columns;
        matrix->strip_bytes = dtype_strip_bytes(dtype, columns);
        m->dtypes |= 1u << dtype;
    } else {
        const float *vector = data;
        memcpy(view, &vector, sizeof vector);
    }
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
    format_close(&(*model)->file);
    mem_free(*model);
    mem_count_object(-1);
    *model = NULL;
}
