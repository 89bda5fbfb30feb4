// SPDX-License-Identifier: MIT
// binding.c - opens and closes models: binds tensors, adapters and replaced tensors to the slots of the config.
//
// Binding a file goes through the list of slots and the tensor table in parallel. It reports missing, surplus,
// misplaced and misshaped tensors.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "error.h"
#include "mem.h"
#include "model.h"
#include "slots.h"

// ---- binding

static int check_shape(const llamac_slot_iterator *it, const struct tensor_record *t, llamac_error *err) {
    const uint64_t rows = slot_rows(it), columns = slot_columns(it);
    const uint32_t n_dims = slot_is_matrix(it) ? 2 : 1;
    const uint64_t first = slot_is_matrix(it) ? rows : columns, second = slot_is_matrix(it) ? columns : 0;
    if (t->n_dims != n_dims)
        return bad_model(err, "tensor %s: n_dims is %u, expected %u", t->name, t->n_dims, n_dims);
    if (t->shape[0] == first && t->shape[1] == second) return 0;
    // names only the extents that differ, which points to the wrong number in the config
    const int rows_differ = slot_is_matrix(it) && t->shape[0] != first,
              columns_differ = t->shape[slot_is_matrix(it) ? 1 : 0] != columns;
    char of_rows[SLOT_TEXT_BYTES] = "", of_columns[SLOT_TEXT_BYTES] = "";
    if (rows_differ) slot_describe_rows(it, of_rows);
    if (columns_differ) slot_describe_columns(it, of_columns);
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
    const uint8_t *data = m->file.data + t->offset;
    void *to = slot_target(it, m);
    if (slot_is_matrix(it)) {
        struct matrix view = matrix_view(data, (int)t->dtype, slot_rows(it), slot_columns(it));
        view.rounds_inputs = m->config->rounds_inputs && slot_is_of_layer(it);
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
    char name[FORMAT_NAME_BYTES], reason[SLOT_TEXT_BYTES];
    while (slot_advance(&it)) {
        slot_name(&it, name);
        const int in_file = t < end && !strcmp(t->name, name);
        if (slot_applies(&it) && in_file) {
            if (bind_tensor(m, &it, t++, err)) return -1;
        } else if (in_file) {
            slot_describe_conditions(&it, reason);
            return bad_model(err, "tensor %s does not belong to a model of this config%s", name, reason);
        } else if (slot_applies(&it) && slot_is_required(&it)) {
            slot_describe_conditions(&it, reason);
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

// The number of layers, including the MTP layer.
static uint32_t n_all_layers(const struct llamac_model *m) { return m->config->n_layers + m->config->mtp_layers; }

// Extends the model's maxima by a layer.
static void note_layer(struct llamac_model *m, const struct layer_record *record) {
    const int used = record->ffn == FFN_EXPERTS ? (int)record->n_experts_used : 0;
    const int expert_dim = used ? (int)record->ffn_dim : 0, dense_dim = used ? 0 : (int)record->ffn_dim;
    m->max_expert_dim = max_int(m->max_expert_dim, expert_dim);
    m->max_ffn_dim = max_int(m->max_ffn_dim, max_int(dense_dim, (int)record->shared_ffn_dim));
    const size_t hidden = (size_t)max_int(1, used) * record->ffn_dim + record->shared_ffn_dim;
    m->max_hidden = max_size(m->max_hidden, hidden);
    m->max_experts = max_int(m->max_experts, (int)record->n_experts);
    m->max_experts_used = max_int(m->max_experts_used, used);
    const size_t z = (size_t)(record->mixer == MIXER_SHORT_CONV ? 3 * m->config->dim : state_values(record));
    m->max_state_z = max_size(m->max_state_z, z);
    if (is_recurrent_layer(record)) {
        m->max_channels = max_size(m->max_channels, (size_t)conv_channels(m->config, record));
        // an observer's row holds the results of both mixers
        const uint64_t beside = has_attention(record) ? mix_width(m->config, record) : 0;
        m->max_recurrent_width = max_size(m->max_recurrent_width,
                                          (size_t)(recurrent_width(m->config, record) + beside));
    }
    m->max_state_heads = max_size(m->max_state_heads, record->state_heads);
    if (record->kv_lora_rank) {
        const uint64_t of_q = query_width(m->config, record), of_v = mix_width(m->config, record);
        m->max_q_rank = max_size(m->max_q_rank, record->q_lora_rank);
        m->max_latent_heads = max_size(m->max_latent_heads, (size_t)(of_q > of_v ? of_q : of_v));
        m->max_head_inputs = max_int(m->max_head_inputs, max_int((int)record->qk_nope_head_dim,
                                                                 (int)record->kv_lora_rank));
    }
    m->has_output_gates |= record->output_gate != OUTPUT_GATE_NONE;
    m->has_expert_norms |= (int)record->expert_norms;
    m->has_post_norms |= record->placement == PLACEMENT_POST || record->placement == PLACEMENT_SANDWICH ||
                         record->layer_embedding_dim > 0;
    m->has_normed_stream |= norms_stream(record->placement);
    m->has_parallel_layer |= record->placement == PLACEMENT_PARALLEL;
    m->has_sub_norms |= record->sub_norms == 1;
}

// Allocates the layers and their experts, and derives the model's maxima.
static int allocate_layers(struct llamac_model *m, llamac_error *err) {
    const uint32_t n_layers = n_all_layers(m);
    uint64_t n_experts = 0, n_matrices = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        n_experts += m->file.layers[l].n_experts;
        n_matrices += (uint64_t)m->file.layers[l].n_experts * (m->file.layers[l].plain_experts ? 2 : 3);
    }
    if (n_matrices > m->file.n_tensors)   // before memory is allocated for them
        return bad_model(err,
                         "section tensors: it has %zu tensors, but n_experts is %" PRIu64 " in all layers together, "
                         "with %" PRIu64 " matrices", m->file.n_tensors, n_experts, n_matrices);
    m->layers = mem_alloc(n_layers, sizeof *m->layers, "the model's layers", err);
    if (!m->layers) return -1;
    if (n_experts) {
        m->experts = mem_alloc((size_t)n_experts, sizeof *m->experts, "the model's experts", err);
        if (!m->experts) return -1;
    }
    struct ffn_weights *experts = m->experts;
    for (uint32_t l = 0; l < n_layers; l++) {
        const struct layer_record *record = &m->file.layers[l];
        m->layers[l].record = record;
        m->layers[l].heads = layer_heads(m->config, record);
        m->layers[l].kv_source = !has_attention(record) || reads_trunk_keys(m->config) ? -1
                                 : record->kv_source < 0 ? (int)l : record->kv_source;
        m->layers[l].experts = experts;
        if (experts) experts += record->n_experts;
        if (l < m->config->n_layers) note_layer(m, record);
    }
    m->layer_embedding_dim = (int)m->file.layers[0].layer_embedding_dim;
    return 0;
}

// ---- the MTP layer as a model

struct mtp_model {
    struct llamac_model model;
    struct config config;
    struct layer layer;
    struct kv_pool pages, device_pages;
};

// Makes mtp_model, or brings it up to date after an adapter or a replaced tensor.
static void set_mtp_model(struct llamac_model *m) {
    struct mtp_model *mtp = (struct mtp_model *)(void *)m->mtp_model;
    if (!mtp) return;
    const struct layer *layer = &m->layers[m->config->n_layers];
    mtp->config = *m->config;
    mtp->config.n_layers = 1, mtp->config.mtp_layers = 0;
    mtp->layer = *layer;
    mtp->layer.kv_source = 0;
    mtp->model = (struct llamac_model){
        .is_mtp = 1, .file = m->file, .config = &mtp->config, .layers = &mtp->layer, .mtp = m->mtp, .kv = &mtp->pages,
        .device_kv = m->device_kv ? &mtp->device_pages : NULL,
        .token_embedding = m->token_embedding, .output_norm = m->mtp.output_norm, .output = m->output,
        .output_bias = m->output_bias, .dtypes = m->dtypes, .max_rank = m->max_rank,
    };
    memcpy(mtp->model.rope, m->rope, sizeof m->rope);
    note_layer(&mtp->model, layer->record);
}

static int open_mtp_model(struct llamac_model *m, llamac_error *err) {
    if (!m->config->mtp_layers) return 0;
    struct mtp_model *mtp = mem_alloc(1, sizeof *mtp, "the MTP layer", err);
    if (!mtp) return -1;
    m->mtp_model = &mtp->model;
    set_mtp_model(m);
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
    if (!m->kv || allocate_layers(m, err) || bind_all(m, err) ||
        open_mtp_model(m, err)) {
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
    mem_free((*model)->mtp_model);
    mem_free((*model)->layers);
    mem_free((*model)->experts);
    mem_free((*model)->kv);
    mem_free((*model)->device_kv);
    mem_free((*model)->head_kv);
    format_close(&(*model)->file);
    mem_free(*model);
    mem_count_object(-1);
    *model = NULL;
}

int llamac_model_use_device(llamac_model *model, const llamac_device *device, llamac_error *err) {
    if (model->device_kv) return bad_argument(err, "the model already has a device");
    if (device->most_rows < LLAMAC_MAX_DRAFTS)
        return bad_argument(err, "most_rows is %d, expected %d or more", device->most_rows, LLAMAC_MAX_DRAFTS);
    model->device_kv = mem_alloc(1, sizeof *model->device_kv, "the pool of a device's KV pages", err);
    model->head_kv = mem_alloc(1, sizeof *model->head_kv, "the pool of the KV pages of heads", err);
    if (!model->device_kv || !model->head_kv) {
        mem_free(model->device_kv), mem_free(model->head_kv);
        model->device_kv = model->head_kv = NULL;
        return -1;
    }
    model->device_kv->device = model->head_kv->device = device;
    if (model->mtp_model) {
        struct mtp_model *mtp = (struct mtp_model *)(void *)model->mtp_model;
        mtp->device_pages.device = device;
        mtp->model.device_kv = &mtp->device_pages;
        kv_pool_set_budget(&mtp->device_pages, device->mtp_kv_budget);
    }
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
void llamac_set_head_kv_budget(llamac_model *model, size_t bytes) {
    if (model->head_kv) kv_pool_set_budget(model->head_kv, bytes);
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

// Points a new iterator to the slot of a tensor. Returns its matrix or pointer in the model, or NULL if the model has
// no such tensor.
static void *find_tensor(struct llamac_model *m, const char *tensor, llamac_slot_iterator *it) {
    char name[FORMAT_NAME_BYTES];
    const int tied_output = m->config->tied_output && !strcmp(tensor, "output.weight");
    *it = (llamac_slot_iterator){ .config = m->config, .layers = m->file.layers };
    while (slot_advance(it)) {
        if (!slot_applies(it)) continue;
        slot_name(it, name);
        if (strcmp(name, tied_output ? "token_embedding.weight" : tensor)) continue;
        return tied_output ? (void *)&m->output : slot_target(it, m);
    }
    return NULL;
}

int llamac_model_adapt(llamac_model *m, const char *matrix, int rank, const void *a, size_t a_bytes, const void *b,
                       size_t b_bytes, const float *scales, size_t n_scales, llamac_error *err) {
    llamac_slot_iterator it;
    struct matrix *adapted = find_tensor(m, matrix, &it);
    if (!adapted || !slot_is_matrix(&it) || !adapted->data)
        return bad_argument(err, "adapter: the model has no matrix %.64s", matrix);
    if (rank < 1 || rank > LLAMAC_MAX_RANK)
        return bad_argument(err, "adapter of %.64s: rank is %d, expected 1 to %d", matrix, rank, LLAMAC_MAX_RANK);
    if (adapted->lora) return bad_argument(err, "adapter of %.64s: the matrix already has an adapter", matrix);
    const struct layer *layer = it.layer < n_all_layers(m) ? &m->layers[it.layer] : NULL;
    if (layer && (adapted == &layer->attn_k_b || adapted == &layer->attn_v_b))
        return bad_argument(err, "adapter of %.64s: matrices of single heads cannot have adapters", matrix);
    const int is_embedding = adapted == &m->token_embedding || adapted == &m->position_embedding ||
                             adapted == &m->type_embedding || adapted == &m->layer_embedding;
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
    set_mtp_model(m);
    return 0;
}

int llamac_model_replace(llamac_model *m, const char *tensor, int dtype, const void *data, size_t bytes,
                         llamac_error *err) {
    llamac_slot_iterator it;
    void *found = find_tensor(m, tensor, &it);
    if (!found) return bad_argument(err, "replacing: a model of this config has no tensor %.64s", tensor);
    const uint64_t rows = slot_rows(&it), columns = slot_columns(&it);
    const size_t needed =
        slot_is_matrix(&it) ? llamac_matrix_bytes(dtype, rows, columns) : sizeof(float) * (size_t)columns;
    if (!slot_is_matrix(&it) && dtype != LLAMAC_F32)
        return bad_argument(err, "replacing %.64s: dtype is %d, but a vector is f32", tensor, dtype);
    if (!needed) return bad_argument(err, "replacing %.64s: dtype is %d, which does not exist", tensor, dtype);
    if (bytes != needed)
        return bad_argument(err, "replacing %.64s: %zu bytes of dtype %d, expected %zu", tensor, bytes, dtype, needed);
    if (slot_is_matrix(&it)) {
        struct matrix *matrix = found, view = matrix_view(data, dtype, rows, columns);
        view.lora = matrix->lora;
        view.scales = matrix->scales;
        view.rounds_inputs = matrix->rounds_inputs;
        *matrix = view;
        m->dtypes |= 1u << dtype;
    } else {
        const float *vector = data;
        memcpy(found, &vector, sizeof vector);
    }
    set_mtp_model(m);
    return 0;
}
