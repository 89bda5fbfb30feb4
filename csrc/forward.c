// SPDX-License-Identifier: MIT
// forward.c - the graph: one forward pass for all families, for prompts, single tokens and batches.
//
//     rows -> embed
//          -> [ norm -> q, k, v -> rope, cache, attention -> out -> + -> norm -> ffn -> + ] x layers
//               (a layer may lack the first part or the second one)
//               (or latents -> norms -> q, k, v; after attention, values of each head)
//               (or the products of a recurrent layer -> convolution, state)   (-> layer embeddings -> +)
//          -> norm -> logits
//
// Every member of the thread team runs this code on its share of each operation. A barrier precedes every read of data
// that other members have written; a comment there names the data. There is no barrier where each member reads only its
// own results.
#include <string.h>
#include "common.h"
#include "eagle.h"
#include "lora.h"
#include "products.h"
#include "profile.h"

// The residual stream. A branch with a post-norm can be added only after the next barrier, because its norm needs whole
// rows. Until then it is pending: the next reader of the rows adds it and writes the sum to the spare buffer, which
// then becomes x.
struct residual { float *x, *spare; struct pending_branch pending; };

static void swap_buffers(struct residual *stream) {
    float *const x = stream->x;
    stream->x = stream->spare;
    stream->spare = x;
    stream->pending = (struct pending_branch){ 0 };
}

static void set_pending(struct residual *stream, const float *branch, struct norm_weights norm) {
    stream->pending = (struct pending_branch){ .branch = branch, .norm = norm, .scale = 1, .sum = stream->spare };
}

static void add_pending(const struct worker *w, struct residual *stream) {
    if (!stream->pending.branch) return;
    add_branch(w, stream->x, &stream->pending, w->eval->n_rows, (int)w->eval->session->model->config->dim);
    swap_buffers(stream);
}

// Multiplies the stream by the scale of a complete layer, or defers that to the addition of the pending branch.
static void scale_stream(const struct worker *w, struct residual *stream, float scale) {
    if (stream->pending.branch) stream->pending.scale = scale;
    if (stream->pending.branch || scale == 1) return;
    const struct llamac_session *s = w->eval->session;
    const int dim = (int)s->model->config->dim;
    int first, last;
    pool_share(w->member, w->eval->n_rows, &first, &last);
    for (int r = first; r < last; r++) s->kernels->scale(stream->x + (size_t)r * (size_t)dim, dim, scale, 0);
    pool_barrier(w->member);   // members read rows that other members have scaled
}

// Takes a step with the stream's rows and packs them as inputs of the consumers. The step's `pending` and `stream` are
// set here. replaces: the result is the new stream.
static struct panels prepare_stream(const struct worker *w, struct residual *stream, struct norm_step step,
                                    int replaces, struct consumers consumers) {
    const struct rows rows = { .x = stream->x, .n = w->eval->n_rows,
                               .width = (int)w->eval->session->model->config->dim };
    step.pending = stream->pending.branch ? &stream->pending : NULL;
    step.stream = replaces ? stream->spare : NULL;
    const struct panels p = prepare_inputs(w, rows, &step, consumers);
    if (step.pending || replaces) swap_buffers(stream);
    return p;
}

// Adds a row of a table to x (dim), if the model has the table.
static void add_embedding(const struct worker *w, const struct matrix *table, int index, float *x) {
    const struct kernels *kernels = w->eval->session->kernels;
    if (!table->data) return;
    kernels->gather[table->dtype](table->data, table->strip_bytes, index, table->columns, w->local->row);
    if (table->lora) lora_gather(w, table->lora, index, table->columns, w->local->row);
    kernels->add(w->local->row, table->columns, x);
}

void token_embedding(const struct worker *w, int token, float *x) {
    const struct llamac_session *s = w->eval->session;
    const struct llamac_model *m = s->model->token_embedding.data ? s->model : s->trunk->model;
    const struct config *c = is_eagle(s->model) ? s->model->config : m->config;
    const struct matrix *tokens = &m->token_embedding;
    s->kernels->gather[tokens->dtype](tokens->data, tokens->strip_bytes, token, (int)c->dim, x);
    w->local->bytes_read += tokens->strip_bytes / STRIP_ROWS;
    if (tokens->lora) lora_gather(w, tokens->lora, token, (int)c->dim, x);
    if (c->embedding_scale != 1) s->kernels->scale(x, (int)c->dim, c->embedding_scale, 0);
}

// embeddings: (n_rows, dim).
static void embed(const struct worker *w, float *embeddings) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct config *c = s->model->config;
    const struct norm_weights norm = { s->model->embedding_norm, s->model->embedding_norm_bias };
    int first, last;
    if (states_dim(s->model)) {
        (is_eagle(s->model) ? eagle_in : states_in)(w, embeddings);
        return;
    }
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last; r++) {
        const int token = e->rows[r].token, position = e->rows[r].position;
        float *x = embeddings + (size_t)r * c->dim;
        if (e->inputs) {
            memcpy(x, e->inputs + (size_t)(e->first_row + r) * c->dim, sizeof(float) * c->dim);
            continue;
        }
        token_embedding(w, token, x);
        add_embedding(w, &s->model->type_embedding, e->types ? e->types[e->first_row + r] : 0, x);
        add_embedding(w, &s->model->position_embedding, position, x);
        if (norm.weight) norm_row(w, norm, x, (int)c->dim, x);
    }
}

// Returns this thread's share of n matrices in whole KV heads.
static void divide_heads(const struct worker *w, const struct product *products, int n, int heads,
                         struct strips *shares) {
    int first, last;
    pool_share(w->member, heads, &first, &last);
    for (int i = 0; i < n; i++) {
        const int per_head = strips_of(products[i].matrix) / heads;
        shares[i] = (struct strips){ first * per_head, last * per_head };
    }
}

// The first products of a layer, of the same inputs.
struct products { struct product list[MAX_CONSUMERS]; int n; };

// Appends a product, which is the next consumer.
static void append(struct products *p, const struct matrix *m, const float *bias, float *y) {
    p->list[p->n] = (struct product){ .matrix = m, .consumer = p->n, .bias = bias, .y = y };
    p->n++;
}

static struct products products_of(const struct worker *w, int l) {
    const struct scratch *scratch = &w->eval->session->scratch;
    const struct layer *layer = &w->eval->session->model->layers[l];
    const int is_latent = layer->record->kv_lora_rank > 0, attends = has_attention(layer->record) && !is_latent;
    struct products p = { .n = 0 };
    if (layer->record->mixer == MIXER_DELTA_NET) {
        append(&p, &layer->state_qkv, NULL, scratch->conv_in);
        append(&p, &layer->state_z, NULL, scratch->state_z);
        append(&p, &layer->state_beta, NULL, scratch->state_beta);
        append(&p, &layer->state_a, NULL, scratch->state_decay);
    }
    if (layer->record->mixer == MIXER_SHORT_CONV) append(&p, &layer->conv_in, layer->conv_in_bias, scratch->state_z);
    if (is_latent) {
        if (layer->record->q_lora_rank) append(&p, &layer->attn_q_a, layer->attn_q_a_bias, scratch->q_latent);
        else append(&p, &layer->attn_q, layer->attn_q_bias, scratch->latent_heads);
        append(&p, &layer->attn_kv_a, layer->attn_kv_a_bias, scratch->k);
    }
    if (attends && computes_queries(w->eval)) {
        append(&p, &layer->attn_q, layer->attn_q_bias, scratch->q);
        append(&p, &layer->attn_gate, layer->attn_gate_bias, scratch->attn_gate);
    }
    if (attends && computes_keys(w->eval, l)) {
        append(&p, &layer->attn_k, layer->attn_k_bias, scratch->k);
        append(&p, &layer->attn_v, layer->attn_v_bias, scratch->v);
    }
    if (has_mamba2(layer->record)) {
        append(&p, &layer->state_qkv, layer->state_qkv_bias, scratch->conv_in);
        append(&p, &layer->state_z, layer->state_z_bias, scratch->state_z);
        append(&p, &layer->state_a, layer->state_a_bias, scratch->state_decay);
    }
    return p;
}

static struct consumers consumers_of(const struct products *p) {
    struct consumers c = { .n = p->n };
    for (int i = 0; i < p->n; i++) c.matrices[i] = p->list[i].matrix;
    return c;
}

// Computes q and its gate, k and v, or only the first two if another layer is the source of keys and values. If the KV
// heads divide evenly, each thread projects the same heads that it later attends to, so no barrier is needed in
// between.
static void project_qkv(const struct worker *w, const struct layer *layer, const struct products *qkv,
                        const struct panels *x) {
    const struct config *c = w->eval->session->model->config;
    const int heads = layer->heads.n_kv;
    const int by_head = has_whole_heads(w, heads) && layer->heads.dim % STRIP_ROWS == 0 &&
                        layer->record->output_gate != OUTPUT_GATE_HEAD;
    struct strips shares[MAX_CONSUMERS];
    if (by_head) divide_heads(w, qkv->list, qkv->n, heads, shares);
    else divide_strips(w, qkv->list, qkv->n, shares);
    for (int i = 0; i < qkv->n; i++) multiply(w, &qkv->list[i], x, 0, shares[i]);
    // The next step reads strips of q, k and v that other members have computed: all of a head in attention, all of a
    // row in a norm over all heads.
    if (!by_head || c->qk_norm == QK_NORM_WHOLE) pool_barrier(w->member);
}

// Computes the first products of a recurrent layer, or of latent attention.
static void project_all(const struct worker *w, const struct products *p, const struct panels *x) {
    struct strips shares[MAX_CONSUMERS];
    divide_strips(w, p->list, p->n, shares);
    for (int i = 0; i < p->n; i++) multiply(w, &p->list[i], x, 0, shares[i]);
    pool_barrier(w->member);   // the convolution, or a norm, reads strips that other members have computed
}

// Normalizes q and k over all heads, if the model does. attention.c normalizes single heads.
static void norm_whole_qk(const struct worker *w, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const struct layer *layer = &s->model->layers[l];
    const struct config *c = s->model->config;
    if (c->qk_norm != QK_NORM_WHOLE) return;
    const int q_dim = layer->attn_q.rows, kv_dim = layer->attn_k.rows;
    int first, last;
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = first; r < last && !cancelled(&w->eval->cancel); r++) {
        float *q = s->scratch.q + (size_t)r * (size_t)q_dim, *k = s->scratch.k + (size_t)r * (size_t)kv_dim;
        if (computes_queries(e)) s->kernels->rms_norm(q, layer->attn_q_norm, NULL, c->norm_eps, q_dim, q);
        if (computes_keys(e, l)) s->kernels->rms_norm(k, layer->attn_k_norm, NULL, c->norm_eps, kv_dim, k);
    }
    pool_barrier(w->member);   // attention reads rows that other members have normalized
}

// Normalizes the stream's rows and computes the feed-forward network up to its hidden activations. The shared expert,
// the other experts and the router may have norms of their own.
static void norm_and_ffn_hidden(const struct worker *w, struct residual *stream, int l) {
    const struct eval *e = w->eval;
    const struct layer *layer = &e->session->model->layers[l];
    const int has_experts = layer->record->ffn == FFN_EXPERTS, has_norms = (int)layer->record->expert_norms;
    const struct norm_step step = { .norm = { layer->ffn_norm, layer->ffn_norm_bias },
                                    .copy = observer_of(e, LLAMAC_STAGE_FFN_NORM, l),
                                    .keep_normed = has_experts && !has_norms };
    struct panels inputs = prepare_stream(w, stream, step, layer->record->placement == PLACEMENT_NORMED,
                                          ffn_consumers(layer, has_norms ? FFN_NETWORK : FFN_NETWORK | FFN_ROUTERS));
    step_done(w, LLAMAC_STEP_FFN_NORM, l);
    ffn_hidden(w, l, &inputs);
    if (has_norms) {
        pool_barrier(w->member);   // other members still read the panels, or have written x
        const struct norm_step of_experts = { .norm = { layer->experts_norm, NULL }, .keep_normed = 1 },
                               of_router = { .norm = { layer->ffn_router_norm, NULL } };
        prepare_stream(w, stream, of_experts, 0, (struct consumers){ 0 });
        inputs = prepare_stream(w, stream, of_router, 0, ffn_consumers(layer, FFN_ROUTERS));
    }
    if (has_experts) experts_hidden(w, l, &inputs);
}

// Returns whether each thread packs the part of mix that it has computed: it must compute whole heads, and these must
// be whole blocks of input columns.
static int packs_mix(const struct worker *w, const struct layer *layer) {
    const int count = w->member->count, q_dim = layer->attn_q.rows;
    if (layer->record->kv_lora_rank || layer->record->sub_norms) return 0;
    const int panels_in_use = layer->record->placement == PLACEMENT_PARALLEL && layer->record->ffn == FFN_EXPERTS;
    return has_whole_heads(w, layer->heads.n_kv) && q_dim / count % BLOCK_COLUMNS == 0 && !panels_in_use &&
           packs_own_columns(w, &layer->attn_out, strips_of(&layer->attn_q));
}

static void pack_own_mix(const struct worker *w, const struct layer *layer) {
    const int n = w->eval->n_rows, q_dim = layer->attn_q.rows, share = q_dim / w->member->count,
              first = w->member->index * share;
    const struct panels to = unnormed_panels(w, q_dim);
    for (int r = 0; r < n && !cancelled(&w->eval->cancel); r++)
        pack_columns(w, &layer->attn_out, &to, w->eval->session->scratch.mix + (size_t)r * (size_t)q_dim, q_dim, first,
                     first + share, r);
}

// A layer without attention has no queries, keys, values and scores: their width is 0.
static void observe_attention(const struct worker *w, int l) {
    const struct scratch *scratch = &w->eval->session->scratch;
    const struct layer *layer = &w->eval->session->model->layers[l];
    const struct heads heads = layer->heads;
    const int n = w->eval->n_rows, n_kv = layer->kv_source == l ? heads.n_kv : 0;
    observe(w, LLAMAC_STAGE_Q, l, scratch->q, n, has_attention(layer->record) ? heads.n * heads.dim : 0);
    observe(w, LLAMAC_STAGE_K, l, scratch->k, n, n_kv * heads.dim);
    observe(w, LLAMAC_STAGE_V, l, scratch->v, n, n_kv * heads.value_dim);
    if (!has_attention(layer->record)) {
        observe(w, LLAMAC_STAGE_CACHE_K, l, scratch->k, n, 0);
        observe(w, LLAMAC_STAGE_CACHE_V, l, scratch->v, n, 0);
        observe(w, LLAMAC_STAGE_SCORES, l, scratch->q, n, 0);
    } else {
        observe_cache(w, l);
        observe_scores(w, l);
    }
}

static void run_mixer(const struct worker *w, int l, enum mixer mixer) {
    switch (mixer) {
    case MIXER_DELTA_NET: delta_net(w, l); break;
    case MIXER_MAMBA2: mamba2(w, l); break;
    case MIXER_SHORT_CONV: short_conv(w, l); break;
    default: attention(w, l); break;
    }
}

// Computes a mixer and its output projection, and adds the result to x, or writes it to `branch` if that is not NULL.
// is_second: adds it to what the layer's first mixer has written there.
static void mix_and_project(const struct worker *w, int l, enum mixer mixer, int is_second, float *x, float *branch) {
    const struct eval *e = w->eval;
    const struct scratch *scratch = &e->session->scratch;
    const struct layer *layer = &e->session->model->layers[l];
    const int is_mamba = mixer == MIXER_MAMBA2;
    const struct matrix *matrix = is_mamba ? &layer->state_out : &layer->attn_out;
    const int n = e->n_rows, width = matrix->columns, is_latent = layer->record->kv_lora_rank > 0,
              packs = mixer == MIXER_ATTENTION && packs_mix(w, layer);
    const float *const mix = is_latent ? scratch->latent_heads : scratch->mix;
    run_mixer(w, l, mixer);
    if (packs) pack_own_mix(w, layer);
    pool_barrier(w->member);   // the output projection reads all columns of mix
    if (is_latent) latent_values(w, l);
    step_done(w, LLAMAC_STEP_ATTENTION, l);
    if (!is_second) observe_attention(w, l);
    const struct norm_step sub_norm = sub_norm_step(w, LLAMAC_STAGE_ATTN_MIX, l, layer->attn_sub_norm);
    const struct norm_step *step = layer->record->sub_norms ? &sub_norm : NULL;
    if (!step)
        observe_columns(w, LLAMAC_STAGE_ATTN_MIX, l, mix, n, width, is_second ? layer->attn_out.columns : 0);
    const struct rows rows = { .x = mix, .n = n, .width = width };
    const struct panels inputs = packs ? unnormed_panels(w, width)
                                       : prepare_inputs(w, rows, step, (struct consumers){ { matrix }, 1 });
    const struct product out = {
        .matrix = matrix, .bias = is_mamba ? layer->state_out_bias : layer->attn_out_bias, .y = branch ? branch : x,
        .copy = observer_of(e, LLAMAC_STAGE_ATTN_OUT, l), .add_copy = is_second,
        .row_weights = branch ? NULL : residual_scales(e->session),
    };
    multiply(w, &out, &inputs, !branch || is_second, strip_share(w, matrix));
}

// Computes what mixes positions. Of two mixers side by side, the first products of both have been computed.
static void mixer_out(const struct worker *w, int l, float *x, float *branch) {
    const enum mixer mixer = w->eval->session->model->layers[l].record->mixer;
    const int both = mixer == MIXER_ATTENTION_MAMBA2;
    mix_and_project(w, l, both ? MIXER_ATTENTION : mixer, 0, x, branch);
    if (both) mix_and_project(w, l, MIXER_MAMBA2, 1, x, branch);   // it passes a barrier before it overwrites mix
}

// Adds the branch of a layer's own token embeddings.
static void add_layer_embedding(const struct worker *w, struct residual *stream, int l) {
    const struct layer *layer = &w->eval->session->model->layers[l];
    float *const branch = w->eval->session->scratch.branch;
    const struct consumers consumers = { { &layer->layer_embedding_gate }, 1 };
    const struct panels inputs = prepare_stream(w, stream, (struct norm_step){ 0 }, 0, consumers);
    layer_embedding(w, l, &inputs, branch);
    pool_barrier(w->member);   // norms read all columns of the branch
    set_pending(stream, branch, (struct norm_weights){ layer->layer_embedding_post_norm, NULL });
    step_done(w, LLAMAC_STEP_FFN_DOWN, l);
}

// Updates the members' shares from their measured paces. One member calls this while the others wait. Shares change
// only between layers, because within a layer members read their own results without a barrier.
static void rebalance(void *eval, const struct member *member) {
    const struct eval *e = eval;
    const enum run_kind kind = run_kind(e);
    const int count = member->count;
    struct thread_scratch *threads = e->session->scratch.threads;
    double speeds[BALANCED_MAX];
    int64_t ns = 0;
    if (count > BALANCED_MAX) return;
    for (int i = 0; i < count; i++) ns += threads[i].paces[kind].ns;
    if (!pace_is_known(ns, count)) return;
    for (int i = 0; i < count; i++) speeds[i] = pace_take(&threads[i].paces[kind]);
    balance_update(&e->session->balance[kind], speeds, count);
}

// Observes zeros in the stages [first, last], of a part that the layer does not have.
static void observe_none(const struct worker *w, int l, const float *any, int first, int last) {
    for (int stage = first; stage <= last; stage++) observe(w, stage, l, any, w->eval->n_rows, 0);
}

// Returns where the branches of a layer are written if they are normed before they are added; NULL: they are not.
static float *branch_of(const struct worker *w, const struct layer *layer) {
    const uint32_t placement = layer->record->placement;
    return placement == PLACEMENT_POST || placement == PLACEMENT_SANDWICH ? w->eval->session->scratch.branch : NULL;
}

// Computes the feed-forward network; with parallel branches, only its second half. Ends without a barrier.
static void feed_forward(const struct worker *w, struct residual *stream, int l) {
    const struct layer *layer = &w->eval->session->model->layers[l];
    if (layer->record->placement != PLACEMENT_PARALLEL) {
        norm_and_ffn_hidden(w, stream, l);
        pool_barrier(w->member);   // ffn_down reads all hidden activations
        step_done(w, LLAMAC_STEP_FFN_UP, l);
    }
    ffn_down(w, l, stream->x, branch_of(w, layer));
}

// Norms and packs the inputs of a layer's first products.
static struct panels mixer_inputs(const struct worker *w, struct residual *stream, int l, struct consumers consumers) {
    const struct eval *e = w->eval;
    const struct layer *layer = &e->session->model->layers[l];
    const struct norm_step step = { .norm = { layer->attn_norm, layer->attn_norm_bias },
                                    .copy = observer_of(e, LLAMAC_STAGE_ATTN_NORM, l) };
    if (is_eagle(e->session->model) && l == 0) return eagle_attention_inputs(w, consumers);
    return prepare_stream(w, stream, step, norms_stream(layer->record->placement), consumers);
}

// Adds what follows the two branches of a layer. After the last layer, and for an observer, no branch stays pending.
static void finish_layer(const struct worker *w, struct residual *stream, int l) {
    const struct eval *e = w->eval;
    const struct layer *layer = &e->session->model->layers[l];
    const struct norm_weights post_norm = { layer->ffn_post_norm, layer->ffn_post_norm_bias };
    float *const branch = branch_of(w, layer);
    if (branch) set_pending(stream, branch, post_norm);
    if (layer->layer_embedding_gate.data) add_layer_embedding(w, stream, l);
    scale_stream(w, stream, layer->record->layer_scale);

    const int last = l + 1 == e->end_layer;
    if (!last && !observer_of(e, LLAMAC_STAGE_BLOCK, l)) return;
    add_pending(w, stream);
    observe(w, LLAMAC_STAGE_BLOCK, l, stream->x, e->n_rows, (int)e->session->model->config->dim);
}

static void block(const struct worker *w, struct residual *stream, int l) {
    const struct layer *layer = &w->eval->session->model->layers[l];
    const int mixes = layer->record->mixer != MIXER_NONE, has_ffn = layer->record->ffn != FFN_NONE,
              parallel = layer->record->placement == PLACEMENT_PARALLEL,
              panels_are_shared = !is_redundant(w->eval->n_rows);
    float *const branch = branch_of(w, layer);
    const struct norm_weights post_norm = { layer->attn_post_norm, layer->attn_post_norm_bias };
    if (mixes) {
        const struct products products = products_of(w, l);
        if (parallel) add_pending(w, stream);   // both attention and the feed-forward network read the sum
        const struct panels inputs = mixer_inputs(w, stream, l, consumers_of(&products));
        step_done(w, LLAMAC_STEP_ATTN_NORM, l);
        if (is_recurrent_layer(layer->record) || layer->record->kv_lora_rank) {
            project_all(w, &products, &inputs);
            if (layer->record->kv_lora_rank) latent_qkv(w, l);
            else if (has_attention(layer->record)) norm_whole_qk(w, l);
        } else {
            project_qkv(w, layer, &products, &inputs);
            norm_whole_qk(w, l);
        }
        step_done(w, LLAMAC_STEP_QKV, l);
        if (parallel) {
            if (panels_are_shared) pool_barrier(w->member);   // other members still read them
            norm_and_ffn_hidden(w, stream, l);
            step_done(w, LLAMAC_STEP_FFN_UP, l);
        }
        mixer_out(w, l, stream->x, branch);
        if (branch) set_pending(stream, branch, post_norm);
    } else {
        observe_none(w, l, stream->x, LLAMAC_STAGE_ATTN_NORM, LLAMAC_STAGE_ATTN_OUT);
    }

    if (mixes && has_ffn) {
        // norms read all columns of x; panels are overwritten
        if (!parallel || panels_are_shared) pool_barrier(w->member);
        step_done(w, LLAMAC_STEP_ATTN_OUT, l);
    }
    if (has_ffn) feed_forward(w, stream, l);
    else observe_none(w, l, stream->x, LLAMAC_STAGE_FFN_NORM, LLAMAC_STAGE_FFN);
    pool_barrier_with(w->member, rebalance, w->eval);   // the next layer reads all columns of x
    step_done(w, has_ffn ? LLAMAC_STEP_FFN_DOWN : LLAMAC_STEP_ATTN_OUT, l);
    finish_layer(w, stream, l);
}

// Stores the keys and values of a layer, which its attention reads in a later run. The residual stream stays.
static void store_keys(const struct worker *w, struct residual stream, int l) {
    const struct layer *layer = &w->eval->session->model->layers[l];
    const struct products products = products_of(w, l);
    if (!products.n) return;
    const struct norm_step step = { .norm = { layer->attn_norm, layer->attn_norm_bias } };
    const struct panels inputs = prepare_stream(w, &stream, step, 0, consumers_of(&products));
    project_qkv(w, layer, &products, &inputs);
    norm_whole_qk(w, l);
    attention_store(w, l);
}

// Copies the stream's rows back to where they were before the layers: an odd number of swaps moves them to the other
// buffer.
static void keep_stream(const struct worker *w, const struct residual *stream, float *rows) {
    const size_t dim = w->eval->session->model->config->dim;
    int first, last;
    if (stream->x == rows) return;
    pool_share(w->member, w->eval->n_rows, &first, &last);
    const size_t start = (size_t)first * dim, n = (size_t)max_int(last - first, 0) * dim;
    memcpy(rows + start, stream->x + start, sizeof(float) * n);
}

// Computes the hidden states that the caller wants: the output of the final norm or, in an EAGLE-3 head without
// eagle_out_normed, the residual stream. Each member computes its share.
static void hidden_states(const struct worker *w, const float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    const size_t dim = m->config->dim;
    int first, last;
    if (!e->hidden || e->session->has_layer_states) return;
    if (m->drafter.out.data) {
        states_out(w, x);
        return;
    }
    pool_share(w->member, e->n_rows, &first, &last);
    for (int r = max_int(first, e->first_hidden - e->first_row); r < last; r++) {
        float *const to = e->hidden + (size_t)(e->first_row + r - e->first_hidden) * dim;
        const float *const from = x + (size_t)r * dim;
        if (is_eagle(m) && !m->config->eagle_out_normed) memcpy(to, from, sizeof(float) * dim);
        else norm_row(w, (struct norm_weights){ m->output_norm, m->output_norm_bias }, from, (int)dim, to);
    }
}

// Copies the residual stream after l layers, if the caller's hidden states consist of it.
static void layer_states(const struct worker *w, struct residual *stream, int l) {
    const struct eval *e = w->eval;
    const struct llamac_session *s = e->session;
    const size_t dim = s->model->config->dim;
    if (!e->hidden || !s->has_layer_states) return;
    for (int i = 0; i < FORMAT_EAGLE_STATES; i++) {
        if (s->eagle_layers[i] != l) continue;
        add_pending(w, stream);
        int first, last;
        pool_share(w->member, e->n_rows, &first, &last);
        for (int r = max_int(first, e->first_hidden - e->first_row); r < last; r++) {
            const size_t row = (size_t)(e->first_row + r - e->first_hidden);
            memcpy(e->hidden + (row * FORMAT_EAGLE_STATES + (size_t)i) * dim, stream->x + (size_t)r * dim,
                   sizeof(float) * dim);
        }
    }
}

// Computes the final norm and the logits of the rows that want them, or only the norm if there is no logits buffer.
static void output(const struct worker *w, const float *x) {
    const struct eval *e = w->eval;
    const struct llamac_model *m = e->session->model;
    int indices[EXPERTS_CHUNK_ROWS], n = 0;
    for (int r = 0; r < e->n_rows; r++)
        if (e->rows[r].want_logits) indices[n++] = r;
    if (!n) return;
    if (m->config->n_clusters && e->logits) {
        clustered_logits(w, x);
        return;
    }
    const struct rows rows = { .x = x, .indices = indices, .n = n, .width = (int)m->config->dim };
    const struct norm_step step = { .norm = { m->output_norm, m->output_norm_bias },
                                    .copy = observer_of(e, LLAMAC_STAGE_OUTPUT_NORM, 0) };
    const struct consumers consumers = { { &m->output }, e->logits ? 1 : 0 };
    const struct panels inputs = prepare_inputs(w, rows, &step, consumers);
    step_done(w, LLAMAC_STEP_OUTPUT_NORM, 0);
    if (!e->logits) return;
    const float scale = m->config->logit_scale, cap = m->config->logit_soft_cap;
    const int is_scaled = scale != 1 || cap > 0;
    float *const observer = observer_of(e, LLAMAC_STAGE_LOGITS, 0);
    const struct product logits = { .matrix = &m->output, .bias = m->output_bias, .y = e->logits,
                                    .y_stride = m->config->vocab_size,
                                    .copy = is_scaled || is_eagle(m) ? NULL : observer };
    const struct strips share = strip_share(w, &m->output);
    multiply(w, &logits, &inputs, 0, share);
    const int first = share.first * STRIP_ROWS, last = min_int(share.last * STRIP_ROWS, m->output.rows);
    for (int r = 0; r < n && is_scaled && first < last; r++) {
        const size_t at = (size_t)r * m->config->vocab_size + (size_t)first;
        e->session->kernels->scale(e->logits + at, last - first, scale, cap);
        if (observer && !is_eagle(m)) memcpy(observer + at, e->logits + at, sizeof(float) * (size_t)(last - first));
    }
    if (!is_eagle(m)) return;
    pool_barrier(w->member);   // rows are spread that other members have computed
    eagle_spread(w, n, observer);
}

void forward(void *eval, const struct member *member) {
    struct eval *e = eval;
    const struct llamac_session *s = e->session;
    session_clear_scratch(e->session, member);
    struct member sharing = *member;
    sharing.shares = &s->balance[run_kind(e)].shares;
    const struct worker worker = { .eval = e, .member = &sharing, .local = &s->scratch.threads[member->index] };
    const struct worker *const w = &worker;
    float *const rows = e->stream ? e->stream + (size_t)e->first_row * s->model->config->dim : s->scratch.x;
    struct residual stream = { .x = rows, .spare = s->scratch.spare_x };
    const int embeds = !e->stream || (e->first_layer == 0 && e->part == PART_KEYS);
    profile_begin(w);
    if (embeds) embed(w, rows);
    attention_prepare(w);
    pool_barrier(member);   // the first layer reads all rows of x
    if (embeds) layer_inputs(w);
    step_done(w, LLAMAC_STEP_EMBED, 0);
    if (embeds) observe(w, LLAMAC_STAGE_EMBEDDING, 0, rows, e->n_rows, (int)s->model->config->dim);
    if (e->part == PART_KEYS) {
        store_keys(w, stream, e->first_layer);
        return;
    }
    for (int l = e->first_layer; l < e->end_layer; l++) {
        layer_states(w, &stream, l);
        block(w, &stream, l);
        pool_pause(member);
    }
    if (e->stream) keep_stream(w, &stream, rows);
    if (e->end_layer < (int)s->model->config->n_layers) return;
    layer_states(w, &stream, e->end_layer);
    hidden_states(w, stream.x);
    output(w, stream.x);
    step_done(w, LLAMAC_STEP_LOGITS, 0);
}
