// SPDX-License-Identifier: MIT
// host_device.h - a device for tests. It computes chunks by their plan, step by step, with the scalar kernels, and
// knows nothing of a model but its plan.
#ifndef LLAMAC_HOST_DEVICE_H
#define LLAMAC_HOST_DEVICE_H
#include "gates.h"
#include "host_recurrent.h"
#include "rope.h"
#include "router.h"

// y = (scales * (W x) + bias) * weights for m rows; copy (m, rows): before the weights.
static inline void host_multiply(struct pass *p, const llamac_linear *l, const float *x, int m,
                                 const float *row_weights, int accumulate, float *copy, int accumulate_copy, float *y) {
    if (!m) return;
    const struct kernels *k = &kernels_scalar;
    const int input = input_type_of(l->dtype), fast = p->info.numerics == LLAMAC_FAST;
    const size_t words = input_words(input, l->columns);
    void *panels = take(words * 4 * (size_t)m), *scratch = take(gemm_scratch_bytes(m));
    float *row = take_floats(1, l->columns);
    for (int r = 0; r < m; r++) {
        const struct panel_row to = panel_row(panels, m, k->panel_rows[input], words, r);
        memcpy(row, x + r * l->columns, sizeof(float) * (size_t)l->columns);
        const float row_scale = l->rounds_inputs ? k->round_row(row, l->columns, row) : 0;
        if (l->rounds_inputs && input == INPUT_INT8) k->pack_rounded(to, row, l->columns, row_scale);
        else pack_input(k, input, to, row, l->columns, m, fast);
    }
    free(row);
    const struct gemm g = {
        .dtype = l->dtype, .w = l->weights.data, .strip_bytes = l->strip_bytes, .last = ceil_div(l->rows, 16),
        .rows = l->rows, .columns = l->columns, .x = panels, .m = m, .fast = fast,
        .scales = floats_of(&l->scales), .bias = floats_of(&l->bias),
        .y = y, .y_stride = (size_t)l->rows, .accumulate = accumulate, .row_weights = row_weights, .copy = copy,
        .accumulate_copy = accumulate_copy, .scratch = scratch, .cancel = &p->cancel,
    };
    k->gemm(&g);
    free(panels), free(scratch);
}

static inline void host_norm(const llamac_norm *n, const float *x, int width, float *y) {
    (n->is_rms ? kernels_scalar.rms_norm : kernels_scalar.layer_norm)(x, floats_of(&n->weight), floats_of(&n->bias),
                                                                      n->eps, width, y);
}

static inline void host_rope(struct pass *p, const llamac_rope_step *s) {
    const int is_long = s->original_context && p->info.context > s->original_context;
    const float *inv_freq = floats_of(is_long ? &s->inv_freq_long : &s->inv_freq);
    float *angles = p->angles[s->table] = take_floats(p->chunk->n_rows, s->dim);
    for (int r = 0; r < p->chunk->n_rows; r++)
        rope_angles(p->chunk->rows[r].position, inv_freq, s->dim / 2, s->factor, angles + r * s->dim,
                    angles + r * s->dim + s->dim / 2);
}

// y = row `row` of an embedding.
static inline void host_gather(struct pass *p, const llamac_linear *l, const llamac_embedding_adapter *adapter, int row,
                               float *y) {
    kernels_scalar.gather[l->dtype](l->weights.data, l->strip_bytes, row, l->columns, y);
    if (!adapter->a.weights.data) return;
    const llamac_linear *b = &adapter->b;
    float *b_row = take_floats(1, b->columns);
    kernels_scalar.gather[b->dtype](b->weights.data, b->strip_bytes, row, b->columns, b_row);
    host_multiply(p, &adapter->a, b_row, 1, NULL, 1, NULL, 0, y);
    free(b_row);
}

// x += row `row` of an embedding, if the model has it.
static inline void host_add_embedding(struct pass *p, const llamac_linear *l, const llamac_embedding_adapter *adapter,
                                      int row, float *x) {
    if (!l->weights.data) return;
    float *y = take_floats(1, l->columns);
    host_gather(p, l, adapter, row, y);
    kernels_scalar.add(y, l->columns, x);
    free(y);
}

static inline void host_embed(struct pass *p, const llamac_embed_step *s) {
    const llamac_linear *t = &s->tokens;
    for (int r = 0; r < p->chunk->n_rows; r++) {
        float *x = p->buffers[LLAMAC_BUFFER_X] + r * t->columns;
        host_gather(p, t, &s->tokens_adapter, p->chunk->rows[r].token, x);
        if (s->scale != 1) kernels_scalar.scale(x, t->columns, s->scale, 0);
        host_add_embedding(p, &s->types, &s->types_adapter, p->chunk->types ? p->chunk->types[r] : 0, x);
        host_add_embedding(p, &s->positions, &s->positions_adapter, p->chunk->rows[r].position, x);
    }
}

static inline void host_norm_rows(struct pass *p, const llamac_norm_step *s) {
    const int *indices = s->output == LLAMAC_BUFFER_OUTPUT_NORMED ? p->wanted : NULL, n = rows_of(p, s->output),
              of_last = s->output == LLAMAC_BUFFER_HIDDEN || s->output == LLAMAC_BUFFER_HIDDEN_NORMED,
              before = of_last ? p->chunk->n_rows - n : 0;
    for (int i = 0; i < n * s->parts; i++) {
        const int r = i / s->parts, part = i % s->parts, from = indices ? indices[r] : before + r;
        llamac_norm norm = s->norm;
        norm.weight.data = floats_of(&norm.weight) + part * s->width;
        const float *x = p->buffers[s->input] + from * s->stride + s->first + part * s->width;
        host_norm(&norm, x, s->width, p->buffers[s->output] + r * s->to_stride + s->to_first + part * s->width);
    }
}

static inline void host_product(struct pass *p, const llamac_product_step *s, int layer) {
    const int m = rows_of(p, s->output);
    float *weights = s->scale == 1 && !s->by_shared_weight ? NULL : take_floats(m, 1);
    for (int r = 0; r < m && weights; r++) weights[r] = s->by_shared_weight ? p->shared_weights[r] : s->scale;
    float *copy = s->stage < 0 ? NULL : llamac_chunk_observer(p->chunk, s->stage, layer);
    host_multiply(p, &s->linear, p->buffers[s->input], m, weights, s->accumulate, copy, s->accumulate_stage,
                  p->buffers[s->output]);
    free(weights);
}

static inline void host_head_product(struct pass *p, const llamac_head_product_step *s) {
    const int n = p->chunk->n_rows, outputs = s->linear.rows / s->heads, columns = s->linear.columns;
    llamac_linear head = s->linear;
    head.rows = outputs;
    float *x = take_floats(n, columns), *y = take_floats(n, outputs);
    for (int h = 0; h < s->heads; h++) {
        const size_t strips = (size_t)(h * outputs / 16);
        head.weights.data = (const uint8_t *)s->linear.weights.data + strips * s->linear.strip_bytes;
        for (int r = 0; r < n; r++)
            memcpy(x + r * columns, p->buffers[s->input] + (r * s->heads + h) * s->stride + s->first,
                   sizeof(float) * (size_t)columns);
        host_multiply(p, &head, x, n, NULL, 0, NULL, 0, y);
        for (int r = 0; r < n; r++)
            memcpy(p->buffers[s->output] + (r * s->heads + h) * outputs, y + r * outputs,
                   sizeof(float) * (size_t)outputs);
    }
    free(x), free(y);
}

// ---- attention

// A page of a run, in memory; NULL if the sequence does not have it.
static inline uint8_t *host_page(const struct pass *p, int run, int group, int index, size_t bytes) {
    uint64_t *addresses = take(sizeof *addresses * (size_t)(index + 1));
    llamac_page_addresses(p->chunk->session, p->sequences[run], group, index + 1, addresses);
    const uint64_t address = addresses[index];
    free(addresses);
    return address ? host_memory(p->device, address, bytes) : NULL;
}

static inline void host_norm_head(const llamac_heads_step *s, const llamac_operand *weights, int head, float *x) {
    if (!s->norms) return;
    const float *w = floats_of(weights) + (s->norm_per_head ? head * s->head_dim : 0);
    (s->norm_is_rms ? kernels_scalar.rms_norm : kernels_scalar.layer_norm)(x, w, NULL, s->eps, s->head_dim, x);
}

static inline void host_head(const struct pass *p, const llamac_heads_step *s, const llamac_operand *norm, int head,
                             int row, float *x) {
    if (!s->norm_after_rope) host_norm_head(s, norm, head, x);
    if (s->rope >= 0) {
        const float *angles = p->angles[s->rope] + row * s->rope_dim;
        kernels_scalar.rotate(x, angles, angles + s->rope_dim / 2, s->rope_dim / 2);
    }
    if (s->norm_after_rope) host_norm_head(s, norm, head, x);
}

// Assembles q and k of latent attention.
static inline void host_join_latents(struct pass *p, const llamac_heads_step *s) {
    const int n = p->chunk->n_rows, first = s->head_dim - s->value_dim;
    const size_t bytes = sizeof(float) * (size_t)s->value_dim;
    for (int i = 0; i < n * s->n_heads; i++) {
        float *q = p->buffers[LLAMAC_BUFFER_Q] + i * s->head_dim;
        memcpy(q, p->buffers[LLAMAC_BUFFER_LATENT_HEADS] + i * s->latent_stride, sizeof(float) * (size_t)first);
        memcpy(q + first, p->buffers[LLAMAC_BUFFER_MIX] + i * s->value_dim, bytes);
    }
    for (int i = 0; i < n * s->n_kv_heads; i++)
        memcpy(p->buffers[LLAMAC_BUFFER_K] + i * s->head_dim + first, p->buffers[LLAMAC_BUFFER_V] + i * s->value_dim,
               bytes);
}

static inline void host_heads(struct pass *p, const llamac_heads_step *s, int layer) {
    if (s->latent_stride) host_join_latents(p, s);
    const llamac_kv_place place = llamac_kv_place_of(p->chunk->session, layer);
    const int dtype = p->info.kv_dtype;
    for (int r = 0; r < p->chunk->n_rows; r++) {
        const int position = p->chunk->rows[r].position;
        for (int h = 0; h < s->n_heads; h++)
            host_head(p, s, &s->q_norm, h, r, p->buffers[LLAMAC_BUFFER_Q] + (r * s->n_heads + h) * s->head_dim);
        for (int h = 0; h < s->n_kv_heads && s->is_source; h++) {
            const int at = r * s->n_kv_heads + h;
            float *k = p->buffers[LLAMAC_BUFFER_K] + at * s->head_dim,
                  *v = p->buffers[LLAMAC_BUFFER_V] + at * s->value_dim;
            if (s->v_is_k) memcpy(v, k, sizeof(float) * (size_t)s->head_dim);
            if (s->v_norm) kernels_scalar.unit_norm(v, s->head_dim, s->v_eps, s->v_factor);
            host_head(p, s, &s->k_norm, h, r, k);
            for (int run = p->table_of[r]; run <= p->last_table_of[r]; run++) {
                uint8_t *page = host_page(p, run, place.group, position / KV_PAGE, place.offset);
                uint8_t *keys = page + place.offset + (size_t)h * place.head_bytes;
                kernels_scalar.store_key[dtype](keys, position % KV_PAGE, s->head_dim, k);
                kernels_scalar.store_value[dtype](keys + place.value_offset, position % KV_PAGE, s->value_dim, v);
            }
        }
    }
}

static inline int host_first_visible(int position, int window) {
    if (window < 0) return position - position % -window;
    return window ? max_int(0, position + 1 - window) : 0;
}

// One query; scores (context): only computes them.
static inline void host_attend_query(struct pass *p, const llamac_attend_step *s, int layer, int r, int h,
                                     float *scores) {
    const llamac_kv_place place = llamac_kv_place_of(p->chunk->session, layer);
    const int position = p->chunk->rows[r].position, view = p->viewpoints[r], dim = s->head_dim,
              dtype = p->info.kv_dtype;
    const float *q = p->buffers[LLAMAC_BUFFER_Q] + (r * s->n_heads + h) * dim;
    const float scale = s->query_beta > 0 ? s->scale * rope_query_scale(position + s->query_offset, s->query_beta,
                                                                      s->query_context)
                                          : s->scale;
    float *scaled = take_floats(1, dim), *panel = take_floats(1, (int)kv_query_words(dtype, dim)),
          *out = take_floats(1, padded_head_dim(s->value_dim)), *scratch = take_floats(1, (int)attend_layout(dim).end);
    const int end = s->window > 0 ? min_int(view + s->window, p->ends[r]) : p->ends[r],
              n_pages = ceil_div(end, KV_PAGE), distances = 2 * s->bias_distance + 1;
    uint8_t **pages = take(sizeof *pages * (size_t)n_pages);
    for (int i = 0; i < n_pages; i++) pages[i] = host_page(p, p->table_of[r], place.group, i, place.offset);
    for (int d = 0; d < dim; d++) scaled[d] = q[d] * scale;
    kernels_scalar.pack[kv_query_type(dtype)](
        panel_row(panel, 1, PANEL_ROWS, kv_query_words(dtype, dim), 0), scaled, dim);
    const size_t key_offset = place.offset + (size_t)(h / (s->n_heads / s->n_kv_heads)) * place.head_bytes;
    const struct attend a = {
        .kv = { (const uint8_t *const *)pages, key_offset, key_offset + place.value_offset }, .head_dim = dim,
        .value_dim = s->value_dim, .n_queries = 1, .q = panel, .begin = { host_first_visible(view, s->window) },
        .end = { end }, .soft_cap = s->soft_cap, .has_sinks = s->sinks.data != NULL,
        .sinks = { s->sinks.data ? floats_of(&s->sinks)[h] : 0 }, .position = { position },
        .biases = { s->biases.data ? floats_of(&s->biases) + h * distances + s->bias_distance : NULL },
        .bias_distance = s->bias_distance, .out = out, .scratch = scratch, .scores = scores,
        .scores_stride = (size_t)p->info.context, .cancel = &p->cancel,
    };
    kernels_scalar.attend[dtype](&a);
    float *mix = p->buffers[LLAMAC_BUFFER_MIX] + (r * s->n_heads + h) * s->value_dim;
    if (!scores) memcpy(mix, out, sizeof(float) * (size_t)s->value_dim);
    free(scaled), free(panel), free(out), free(scratch), free(pages);
}

// ---- experts

static inline void host_route(struct pass *p, const llamac_route_step *s) {
    const int n = p->chunk->n_rows;
    const float *router = p->buffers[LLAMAC_BUFFER_ROUTER], *gate = p->buffers[LLAMAC_BUFFER_SHARED_GATE];
    p->n_used = s->n_used, p->n_pairs = 0;
    const struct layer_record record = {
        .n_experts = (uint32_t)s->n_experts, .n_experts_used = (uint32_t)s->n_used,
        .router = s->is_sigmoid ? ROUTER_SIGMOID : ROUTER_SOFTMAX, .expert_weights = (uint32_t)s->normalized,
        .n_expert_groups = (uint32_t)s->n_groups, .n_expert_groups_used = (uint32_t)s->n_groups_used,
        .expert_weights_eps = s->eps, .expert_scale = s->scale,
    };
    float *scratch = take_floats(1, (int)router_scratch_floats((size_t)s->n_experts));
    for (int r = 0; r < n; r++) {
        int *experts = p->experts + r * s->n_used;
        float *weights = p->weights + r * s->n_used;
        router_select(&kernels_scalar, &record, floats_of(&s->choice_bias), router + r * s->n_experts, scratch, experts,
                      weights);
        for (int i = 0; i < s->n_used && s->factors.data; i++) weights[i] *= floats_of(&s->factors)[experts[i]];
        float shared[16] = { s->has_shared_gate ? gate[r] : 0 };
        kernels_scalar.softmax(shared, 2);
        p->shared_weights[r] = shared[0];
    }
    free(scratch);
    for (int e = 0; e < s->n_experts; e++)
        for (int i = 0; i < n * s->n_used; i++) {
            if (p->experts[i] != e) continue;
            p->pair_rows[p->n_pairs] = i / s->n_used;
            p->pair_experts[p->n_pairs++] = e;
        }
}

static inline int pair_of(const struct pass *p, int row, int i) {
    int pair = 0;
    while (p->pair_rows[pair] != row || p->pair_experts[pair] != p->experts[row * p->n_used + i]) pair++;
    return pair;
}

static inline float weight_of_pair(const struct pass *p, int pair) {
    const int at = p->pair_rows[pair] * p->n_used;
    int i = 0;
    while (p->experts[at + i] != p->pair_experts[pair]) i++;
    return p->weights[at + i];
}

static inline void host_expert_product(struct pass *p, const llamac_expert_product_step *s) {
    const llamac_linear *some = s->linears;
    while (!some->weights.data) some++;
    const int by_row = s->input < LLAMAC_BUFFER_EXPERT_GATE, columns = some->columns;
    float *x = picked_rows(p->buffers[s->input], by_row ? p->pair_rows : NULL, p->n_pairs, columns);
    for (int first = 0, last; first < p->n_pairs; first = last) {
        const int e = p->pair_experts[first];
        for (last = first; last < p->n_pairs && p->pair_experts[last] == e;) last++;
        if (!s->linears[e].weights.data) continue;
        host_multiply(p, &s->linears[e], x + first * columns, last - first, NULL, s->accumulate, NULL, 0,
                      p->buffers[s->output] + first * some->rows);
    }
    free(x);
}

// Whether a step of the layer writes the expert's EXPERT_ADDED.
static inline int has_added(const struct pass *p, int layer, int expert) {
    const llamac_plan *plan = p->plan;
    int found = 0;
    for (int i = 0; i < plan->n_steps; i++) {
        const llamac_step *s = &plan->steps[i];
        if (s->op == LLAMAC_OP_EXPERT_PRODUCT && s->layer == layer &&
            s->expert_product.output == LLAMAC_BUFFER_EXPERT_ADDED)
            found |= s->expert_product.linears[expert].weights.data != NULL;
    }
    return found;
}

static inline void host_combine(struct pass *p, const llamac_combine_step *s, int layer) {
    for (int r = 0; r < p->chunk->n_rows; r++)
        for (int d = 0; d < s->width; d++) {
            float *y = p->buffers[s->output] + r * s->width + d, sum = s->accumulate ? *y : 0;
            for (int i = 0; i < s->n_used; i++) {
                const int at = pair_of(p, r, i) * s->width + d;
                const float weight = s->by_weight ? p->weights[r * s->n_used + i] : 1,
                            weighted = p->buffers[LLAMAC_BUFFER_EXPERT_OUT][at] * weight;
                sum += weighted;
                if (!s->is_adapted || !has_added(p, layer, p->experts[r * s->n_used + i])) continue;
                const float added = p->buffers[LLAMAC_BUFFER_EXPERT_ADDED][at] * weight;
                sum += added;
            }
            *y = sum;
        }
}

// ---- the rest

static inline void host_activate(struct pass *p, const llamac_activate_step *s) {
    const int gated = s->gate != LLAMAC_BUFFER_NONE;
    for (int r = 0; r < rows_of(p, s->up); r++) {
        float *up = p->buffers[s->up] + r * s->stride + s->first,
              *gate = gated ? p->buffers[s->gate] + r * s->width : up;
        if (s->by_weight) {
            const float weight = weight_of_pair(p, r);
            kernels_scalar.scale(up, s->width, weight, 0);
            if (gated) kernels_scalar.scale(gate, s->width, weight, 0);
        }
        if (s->is_clamped) {
            kernels_scalar.clamp(gate, s->width, -INFINITY, s->limit, 0);
            kernels_scalar.clamp(up, s->width, -s->limit, s->limit, s->up_offset);
        }
        if (s->alpha_p.data)
            kernels_scalar.xielu(up, s->width, (float)softplus((double)*floats_of(&s->alpha_p)),
                                 (float)softplus((double)*floats_of(&s->alpha_n)));
        else
            kernels_scalar.activate(s->activation, gate, gated ? up : NULL, s->width,
                                    p->buffers[s->output] + r * s->width);
    }
}

static inline void host_add(struct pass *p, const llamac_add_step *s) {
    float *row = take_floats(1, s->width);
    for (int r = 0; r < p->chunk->n_rows; r++) {
        const float *branch = p->buffers[s->from] + r * s->width;
        if (s->norm.weight.data) host_norm(&s->norm, branch, s->width, row);
        else memcpy(row, branch, sizeof(float) * (size_t)s->width);
        if (s->scale != 1) kernels_scalar.scale(row, s->width, s->scale, 0);
        kernels_scalar.add(row, s->width, p->buffers[s->to] + r * s->width);
    }
    free(row);
}

static inline void host_layer_inputs(struct pass *p, const llamac_layer_inputs_step *s) {
    const int all = s->table.columns;
    float *own = take_floats(1, all);
    for (int r = 0; r < p->chunk->n_rows; r++) {
        float *y = p->buffers[LLAMAC_BUFFER_LAYER_INPUTS] + r * all;
        host_gather(p, &s->table, &s->adapter, p->chunk->rows[r].token, own);
        kernels_scalar.scale(own, all, s->own_scale, 0);
        if (s->input_scale != 1) kernels_scalar.scale(y, all, s->input_scale, 0);
        for (int first = 0; first < all; first += s->dim) host_norm(&s->norm, y + first, s->dim, y + first);
        kernels_scalar.add(own, all, y);
        kernels_scalar.scale(y, all, s->scale, 0);
    }
    free(own);
}

static inline void host_copy_rows(struct pass *p, const llamac_copy_step *s) {
    const int n = rows_of(p, s->output), before = p->chunk->n_rows - n;
    for (int r = 0; r < n; r++)
        memcpy(p->buffers[s->output] + r * s->stride + s->first, p->buffers[s->input] + (before + r) * s->width,
               sizeof(float) * (size_t)s->width);
}

static inline void host_spread_logits(struct pass *p, const llamac_spread_logits_step *s) {
    for (int r = 0; r < p->chunk->n_wanted; r++) {
        float *logits = p->buffers[LLAMAC_BUFFER_LOGITS] + r * s->vocab_size;
        for (int i = 0; i < s->vocab_size; i++) logits[i] = -INFINITY;
        for (int i = 0; i < s->n; i++)
            logits[(int)floats_of(&s->ids)[i]] = p->buffers[LLAMAC_BUFFER_HEAD_LOGITS][r * s->n + i];
    }
}

// The position of a cluster in the ranking of a row's scores.
static inline int host_cluster_rank(const float *scores, int n, int cluster) {
    int rank = 0;
    for (int c = 0; c < n; c++)
        rank += ranks_before(scores[c], scores[cluster]) || (c < cluster && !ranks_before(scores[cluster], scores[c]));
    return rank;
}

static inline void host_cluster_logits(struct pass *p, const llamac_cluster_logits_step *s) {
    const llamac_linear *l = &s->linear;
    const int size = l->rows / s->n_clusters;
    for (int r = 0; r < p->chunk->n_wanted; r++) {
        float *logits = p->buffers[LLAMAC_BUFFER_LOGITS] + r * s->vocab_size, least = NAN,
              *found = p->buffers[LLAMAC_BUFFER_IN_CLUSTERS] + r * s->n_used * size;
        for (int pass = 0; pass < 2; pass++)   // products; then the logits of their tokens, after those of the others
            for (int c = 0; c < s->n_clusters; c++) {
                const int rank = host_cluster_rank(p->buffers[LLAMAC_BUFFER_CLUSTER_SCORES] + r * s->n_clusters,
                                                   s->n_clusters, c);
                if (rank >= s->n_used) continue;
                llamac_linear part = *l;
                part.rows = size;
                part.weights.data = (const uint8_t *)l->weights.data + (size_t)(c * size / 16) * l->strip_bytes;
                if (l->bias.data) part.bias.data = floats_of(&l->bias) + c * size;
                float *y = found + rank * size;
                if (!pass) host_multiply(p, &part, p->buffers[LLAMAC_BUFFER_OUTPUT_NORMED] + r * l->columns, 1, NULL, 0,
                                         NULL, 0, y);
                for (int i = 0; i < size; i++) {
                    const float id = floats_of(&s->ids)[c * size + i];
                    if (!pass && ranks_before(least, y[i])) least = y[i];
                    if (pass && id >= 0 && id < (float)s->vocab_size) logits[(int)id] = y[i];
                }
                for (int i = 0; !pass && i < s->vocab_size; i++) logits[i] = least - 1;
            }
    }
}

// The attention of a layer, as its plan says.
static inline const llamac_attend_step *attend_of(const struct pass *p, int layer) {
    const llamac_step *s = p->plan->steps;
    while (s->op != LLAMAC_OP_ATTEND || s->layer != layer) s++;
    return &s->attend;
}

static inline void host_observe(struct pass *p, const llamac_observe_step *s, int layer) {
    float *out = llamac_chunk_observer(p->chunk, s->stage, layer);
    if (!out) return;
    int per_layer;
    const int width = (int)llamac_stage_width(p->chunk->session, s->stage, &per_layer), dtype = p->info.kv_dtype,
              only_wanted = s->stage == LLAMAC_STAGE_OUTPUT_NORM || s->stage == LLAMAC_STAGE_LOGITS,
              is_computed = s->buffer == LLAMAC_BUFFER_NONE,
              is_cache = is_computed && (s->stage == LLAMAC_STAGE_CACHE_K || s->stage == LLAMAC_STAGE_CACHE_V),
              is_scores = is_computed && s->stage == LLAMAC_STAGE_SCORES;
    for (int r = 0; r < (only_wanted ? p->chunk->n_wanted : p->chunk->n_rows); r++) {
        float *to = out + r * width + s->first;
        memset(to, 0, sizeof(float) * (size_t)(width - s->first));
        const llamac_attend_step *a = is_cache || is_scores ? attend_of(p, layer) : NULL;
        const llamac_kv_place place = llamac_kv_place_of(p->chunk->session, max_int(layer, 0));
        const int position = p->chunk->rows[r].position;
        if (is_scores) {
            for (int i = 0; i < width; i++) to[i] = -INFINITY;
            for (int h = 0; h < a->n_heads; h++) host_attend_query(p, a, layer, r, h, to + h * p->info.context);
        } else if (is_cache) {
            const uint8_t *page = host_page(p, p->table_of[r], place.group, position / KV_PAGE, place.offset);
            for (int h = 0; h < a->n_kv_heads; h++) {
                const uint8_t *keys = page + place.offset + (size_t)h * place.head_bytes;
                if (s->stage == LLAMAC_STAGE_CACHE_K)
                    kernels_scalar.load_key[dtype](keys, position % KV_PAGE, a->head_dim, to + h * a->head_dim);
                else
                    kernels_scalar.load_value[dtype](keys + place.value_offset, position % KV_PAGE, a->value_dim,
                                                     to + h * a->value_dim);
            }
        } else if (s->buffer == LLAMAC_BUFFER_EXPERT_UP) {
            for (int i = 0; i < p->n_used; i++)
                memcpy(to + i * s->width, p->buffers[s->buffer] + pair_of(p, r, i) * s->width,
                       sizeof(float) * (size_t)s->width);
            if (s->shared_width)
                memcpy(to + p->n_used * s->width, p->buffers[LLAMAC_BUFFER_UP] + r * s->shared_width,
                       sizeof(float) * (size_t)s->shared_width);
        } else if (s->buffer != LLAMAC_BUFFER_NONE) {
            memcpy(to, p->buffers[s->buffer] + r * s->width, sizeof(float) * (size_t)s->width);
        }
    }
}

static inline void host_step(struct pass *p, const llamac_step *s) {
    switch (s->op) {
    case LLAMAC_OP_ROPE: host_rope(p, &s->rope); break;
    case LLAMAC_OP_EMBED: host_embed(p, &s->embed); break;
    case LLAMAC_OP_NORM: host_norm_rows(p, &s->norm); break;
    case LLAMAC_OP_PRODUCT: host_product(p, &s->product, s->layer); break;
    case LLAMAC_OP_HEADS: host_heads(p, &s->heads, s->layer); break;
    case LLAMAC_OP_HEAD_PRODUCT: host_head_product(p, &s->head_product); break;
    case LLAMAC_OP_ATTEND:
        for (int i = 0; i < p->chunk->n_rows * s->attend.n_heads; i++)
            host_attend_query(p, &s->attend, s->layer, i / s->attend.n_heads, i % s->attend.n_heads, NULL);
        break;
    case LLAMAC_OP_ACTIVATE: host_activate(p, &s->activate); break;
    case LLAMAC_OP_ROUTE: host_route(p, &s->route); break;
    case LLAMAC_OP_EXPERT_PRODUCT: host_expert_product(p, &s->expert_product); break;
    case LLAMAC_OP_COMBINE: host_combine(p, &s->combine, s->layer); break;
    case LLAMAC_OP_ADD: host_add(p, &s->add); break;
    case LLAMAC_OP_SCALE:
        for (int r = 0; r < rows_of(p, s->scale.buffer); r++)
            kernels_scalar.scale(p->buffers[s->scale.buffer] + r * s->scale.width, s->scale.width, s->scale.scale,
                                 s->scale.cap);
        break;
    case LLAMAC_OP_GATE:
        for (int i = 0; i < rows_of(p, s->gate.buffer) * s->gate.width; i++)
            kernels_scalar.gate(p->buffers[s->gate.buffer] + i, p->buffers[s->gate.gate] + i / s->gate.group, 1);
        break;
    case LLAMAC_OP_LAYER_INPUTS: host_layer_inputs(p, &s->layer_inputs); break;
    case LLAMAC_OP_CONVOLVE: host_convolve(p, &s->convolve, s->layer); break;
    case LLAMAC_OP_DELTA_RULE: host_delta_rule(p, &s->delta_rule, s->layer); break;
    case LLAMAC_OP_SCAN: host_scan(p, &s->scan, s->layer); break;
    case LLAMAC_OP_COPY: host_copy_rows(p, &s->copy); break;
    case LLAMAC_OP_CLUSTER_LOGITS: host_cluster_logits(p, &s->cluster_logits); break;
    case LLAMAC_OP_SPREAD_LOGITS: host_spread_logits(p, &s->spread_logits); break;
    case LLAMAC_OP_OBSERVE: host_observe(p, &s->observe, s->layer); break;
    default: CHECK(0, "operation %d", s->op); break;
    }
}

static inline int host_forward(void *context, const llamac_chunk *chunk, llamac_error *e) {
    struct host_device *d = context;
    const llamac_plan *plan = chunk->drafter ? &d->drafter_plans[chunk->after_draft]
                              : chunk->is_mtp ? &d->mtp_plan : chunk->state_layers ? &d->trunk_plan : &d->plan;
    d->forwards++;
    if (host_fails(d, e)) return -1;
    if (d->cancels) {
        e->code = LLAMAC_CANCELLED;
        return -1;
    }
    struct pass p = { .device = d, .plan = plan, .chunk = chunk };
    llamac_session_describe(chunk->session, &p.info);
    CHECK(chunk->n_rows <= MOST_ROWS, "%d rows", chunk->n_rows);
    llamac_chunk_tables(chunk, p.table_of, p.last_table_of, p.sequences);
    llamac_chunk_ends(chunk, p.ends);
    llamac_chunk_viewpoints(chunk, p.viewpoints);
    p.n_segments = llamac_chunk_segments(chunk, p.segments);
    for (int r = 0, n = 0; r < chunk->n_rows; r++)
        if (chunk->rows[r].want_logits) p.wanted[n++] = r;
    const int pairs = chunk->n_rows * plan->max_experts_used;
    p.experts = take(sizeof(int) * (size_t)pairs), p.weights = take_floats(pairs, 1);
    p.shared_weights = take_floats(chunk->n_rows, 1);
    p.pair_rows = take(sizeof(int) * (size_t)pairs), p.pair_experts = take(sizeof(int) * (size_t)pairs);
    for (int b = 0; b < LLAMAC_N_BUFFERS; b++) {
        const size_t bytes = sizeof(float) * (size_t)max_int(chunk->n_rows, pairs) * (size_t)plan->widths[b];
        p.buffers[b] = take(bytes);
        memset(p.buffers[b], 0xff, bytes);   // NaNs
    }
    if (chunk->inputs)
        memcpy(p.buffers[LLAMAC_BUFFER_STATES], chunk->inputs,
               sizeof(float) * (size_t)chunk->n_rows * (size_t)plan->widths[LLAMAC_BUFFER_STATES]);
    for (int i = 0; i < plan->n_steps; i++) {
        const llamac_step *s = &plan->steps[i];
        const int is_logits = s->op == LLAMAC_OP_PRODUCT && s->product.output > LLAMAC_BUFFER_OUTPUT_PROJECTED;
        if (is_logits && !chunk->logits) break;
        host_step(&p, s);
    }
    if (chunk->logits)
        memcpy(chunk->logits, p.buffers[LLAMAC_BUFFER_LOGITS],
               sizeof(float) * (size_t)chunk->n_wanted * (size_t)plan->widths[LLAMAC_BUFFER_LOGITS]);
    if (chunk->hidden)
        memcpy(chunk->hidden, p.buffers[LLAMAC_BUFFER_HIDDEN],
               sizeof(float) * (size_t)chunk->n_hidden * (size_t)plan->widths[LLAMAC_BUFFER_HIDDEN]);
    for (int b = 0; b < LLAMAC_N_BUFFERS; b++) free(p.buffers[b]);
    for (int t = 0; t < FORMAT_MAX_ROPE; t++) free(p.angles[t]);
    free(p.experts), free(p.weights), free(p.shared_weights), free(p.pair_rows), free(p.pair_experts);
    return 0;
}

static inline void host_device_open(struct host_device *d, llamac_model *model) {
    llamac_error e;
    *d = (struct host_device){ .callbacks = { d, CHUNK_ROWS, 0, host_alloc, host_free, host_copy, host_read, host_write,
                                              host_forward } };
    CHECK(!llamac_plan_open(&d->plan, model, 0, &e), "%s", e.message);
    CHECK(!model->mtp_model || !llamac_plan_open(&d->mtp_plan, model, 1, &e), "%s", e.message);
    CHECK(!llamac_model_use_device(model, &d->callbacks, &e), "%s", e.message);
}
// Lets the device compute a drafter that drafts for the model.
static inline void host_device_add_drafter(struct host_device *d, const llamac_model *drafter,
                                           const llamac_model *model) {
    llamac_error e;
    int layers[FORMAT_EAGLE_STATES];
    for (int i = 0; i < 1 + is_eagle(drafter); i++)
        CHECK(!llamac_plan_open_drafter(&d->drafter_plans[i], drafter, model, i, &e), "%s", e.message);
    if (is_eagle(drafter))
        CHECK(!session_check_head(drafter, model, layers, &e) &&
              !llamac_plan_open_trunk(&d->trunk_plan, model, layers, &e), "%s", e.message);
}
static inline void host_device_close(struct host_device *d) {
    CHECK(d->n_blocks == 0, "%d blocks of the device leak", d->n_blocks);
    llamac_plan_close(&d->plan), llamac_plan_close(&d->mtp_plan), llamac_plan_close(&d->trunk_plan);
    for (int i = 0; i < 2; i++) llamac_plan_close(&d->drafter_plans[i]);
}
#endif
