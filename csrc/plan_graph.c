// SPDX-License-Identifier: MIT
// plan_graph.c - writes the plan of a model (plan.h), in the order of forward.c.
#include <math.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "plan_writer.h"
#include "session.h"

// Appends the branch of a layer's own token embeddings.
static void layer_embedding(struct writer *w, const struct layer *layer) {
    const struct projection gate = { &layer->layer_embedding_gate, NULL, LLAMAC_BUFFER_GATE },
                            out = { &layer->layer_embedding_out, NULL, LLAMAC_BUFFER_BRANCH };
    const int dim = layer->layer_embedding_gate.rows;
    plan_project(w, &gate, 1, LLAMAC_BUFFER_X);
    plan_step(w, LLAMAC_OP_ACTIVATE)->activate = (llamac_activate_step){
        .activation = (int)w->model->config->activation, .gate = LLAMAC_BUFFER_GATE, .up = LLAMAC_BUFFER_LAYER_INPUTS,
        .output = plan_use(w, LLAMAC_BUFFER_UP, dim), .width = dim, .first = w->layer * dim,
        .stride = w->model->layer_embedding_in.rows, .limit = INFINITY,
    };
    plan_project(w, &out, 1, LLAMAC_BUFFER_UP);
    plan_add_branch(w, layer->layer_embedding_post_norm, NULL);
}

static void mix(struct writer *w, const struct layer *layer) {
    const uint32_t placement = layer->record->placement;
    const int has_inputs = is_eagle(w->model) && w->layer == 0;   // plan_eagle_in
    plan_mixer_inputs(w, layer, has_inputs ? LLAMAC_BUFFER_STATE_INPUTS
                                           : plan_norm_stream(w, LLAMAC_STAGE_ATTN_NORM, norms_stream(placement),
                                                              layer->attn_norm, layer->attn_norm_bias));
    if (placement == PLACEMENT_PARALLEL) plan_ffn_hidden(w, layer);
    plan_mixer_out(w, layer);
    if (plan_has_post_norm(layer)) plan_add_branch(w, layer->attn_post_norm, layer->attn_post_norm_bias);
}

static void feed_forward(struct writer *w, const struct layer *layer) {
    if (layer->record->placement != PLACEMENT_PARALLEL) plan_ffn_hidden(w, layer);
    plan_ffn_down(w, layer);
    if (plan_has_post_norm(layer)) plan_add_branch(w, layer->ffn_post_norm, layer->ffn_post_norm_bias);
}

// Appends zeros for the stages [first, last], of a part that the layer does not have.
static void observe_none(struct writer *w, int first, int last) {
    for (int stage = first; stage <= last; stage++) plan_observe(w, stage, LLAMAC_BUFFER_X, 0);
}

static void block(struct writer *w, const struct layer *layer) {
    const struct layer_record *record = layer->record;
    const int dim = (int)w->model->config->dim;
    if (record->mixer != MIXER_NONE) mix(w, layer);
    else observe_none(w, LLAMAC_STAGE_ATTN_NORM, LLAMAC_STAGE_ATTN_OUT);
    if (record->ffn != FFN_NONE) feed_forward(w, layer);
    else observe_none(w, LLAMAC_STAGE_FFN_NORM, LLAMAC_STAGE_FFN);
    if (layer->layer_embedding_gate.data) layer_embedding(w, layer);
    if (record->layer_scale != 1) plan_scale(w, LLAMAC_BUFFER_X, dim, record->layer_scale, 0);
    plan_observe(w, LLAMAC_STAGE_BLOCK, LLAMAC_BUFFER_X, dim);
}

static llamac_embedding_adapter embedding_adapter(const struct writer *w, const struct matrix *m) {
    if (!m->lora) return (llamac_embedding_adapter){ plan_no_linear(w), plan_no_linear(w) };
    return (llamac_embedding_adapter){ plan_factor(w, m->lora->a, m->columns, m->lora->rank),
                                       plan_factor(w, m->lora->b, m->rows, m->lora->rank) };
}

// Appends the input of an MTP layer or an assistant: the product of the embedding, which is in x, and the hidden state.
// An MTP layer norms both.
static void state_inputs(struct writer *w) {
    const struct llamac_model *m = w->model;
    const int dim = states_dim(m), inputs = plan_use(w, LLAMAC_BUFFER_STATE_INPUTS, 2 * dim),
              from[] = { LLAMAC_BUFFER_X, plan_use(w, LLAMAC_BUFFER_STATES, dim) };
    const float *const weights[] = { m->mtp.embedding_norm, m->mtp.hidden_norm };
    for (int i = 0; i < 2 && m->is_mtp; i++) {
        llamac_norm_step *s = plan_norm_rows(w, from[i], inputs, dim, plan_norm(w, weights[i], NULL));
        s->to_first = i * dim, s->to_stride = 2 * dim;
    }
    for (int i = 0; i < 2 && !m->is_mtp; i++)
        plan_step(w, LLAMAC_OP_COPY)->copy = (llamac_copy_step){
            .input = from[i], .output = inputs, .width = dim, .first = i * dim, .stride = 2 * dim,
        };
    plan_project(w, &(struct projection){ m->is_mtp ? &m->mtp.in : &m->drafter.in, NULL, LLAMAC_BUFFER_X }, 1, inputs);
}

static void ropes_and_embedding(struct writer *w) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    for (uint32_t t = 0; t < c->n_rope; t++) {
        const int dim = (int)c->rope_dim[t];
        plan_step(w, LLAMAC_OP_ROPE)->rope = (llamac_rope_step){
            .table = (int)t, .inv_freq = plan_vector(w, m->rope[t].inv_freq, dim / 2),
            .inv_freq_long = plan_vector(w, m->rope[t].inv_freq_long, dim / 2),
            .original_context = (int)c->rope_original_context[t], .dim = dim, .factor = c->rope_attention_factor[t],
        };
    }
    const struct llamac_model *tokens = m->token_embedding.data ? m : w->trunk;   // the model that has their embedding
    plan_step(w, LLAMAC_OP_EMBED)->embed = (llamac_embed_step){
        .tokens = plan_linear(w, &tokens->token_embedding, NULL), .types = plan_linear(w, &m->type_embedding, NULL),
        .positions = plan_linear(w, &m->position_embedding, NULL),
        .tokens_adapter = embedding_adapter(w, &tokens->token_embedding),
        .types_adapter = embedding_adapter(w, &m->type_embedding),
        .positions_adapter = embedding_adapter(w, &m->position_embedding),
        .scale = (is_eagle(m) ? m : tokens)->config->embedding_scale,
    };
    plan_use(w, LLAMAC_BUFFER_X, max_int((int)c->dim, tokens->token_embedding.columns));
    if (is_eagle(m)) plan_eagle_in(w);
    else if (states_dim(m)) state_inputs(w);
    else if (m->embedding_norm)
        plan_norm_rows(w, LLAMAC_BUFFER_X, LLAMAC_BUFFER_X, (int)c->dim,
                       plan_norm(w, m->embedding_norm, m->embedding_norm_bias));
    plan_observe(w, LLAMAC_STAGE_EMBEDDING, LLAMAC_BUFFER_X, (int)c->dim);
}

// Appends the inputs of all layers from their own token embeddings.
static void layer_inputs(struct writer *w) {
    const struct llamac_model *m = w->model;
    const float scale = m->config->embedding_scale;
    const struct projection in = { &m->layer_embedding_in, NULL, LLAMAC_BUFFER_LAYER_INPUTS };
    if (!m->layer_embedding_in.data) return;
    plan_project(w, &in, 1, LLAMAC_BUFFER_X);
    llamac_layer_inputs_step *s = &plan_step(w, LLAMAC_OP_LAYER_INPUTS)->layer_inputs;
    *s = (llamac_layer_inputs_step){
        .table = plan_linear(w, &m->layer_embedding, NULL), .adapter = embedding_adapter(w, &m->layer_embedding),
        .dim = m->layer_embedding_dim, .own_scale = sqrtf((float)m->layer_embedding_dim), .input_scale = 1 / scale,
        .scale = sqrtf(0.5f), .norm = plan_norm(w, m->layer_embedding_norm, NULL),
    };
    s->norm.weight = plan_vector(w, m->layer_embedding_norm, m->layer_embedding_dim);   // of each layer's part
}

// Appends the hidden states after the layers: the normed stream, of an assistant `out` times that, of a head without
// eagle_out_normed the stream.
static void hidden_states(struct writer *w, llamac_norm norm) {
    const struct llamac_model *m = w->model;
    const struct matrix *out = &m->drafter.out;
    const int dim = (int)m->config->dim, normed = out->data ? LLAMAC_BUFFER_HIDDEN_NORMED : LLAMAC_BUFFER_HIDDEN;
    if (is_eagle(m) && !m->config->eagle_out_normed) {
        plan_step(w, LLAMAC_OP_COPY)->copy = (llamac_copy_step){
            .input = LLAMAC_BUFFER_X, .output = plan_use(w, normed, dim), .width = dim, .stride = dim,
        };
        return;
    }
    plan_norm_rows(w, LLAMAC_BUFFER_X, plan_use(w, normed, dim), dim, norm);
    plan_project(w, &(struct projection){ out, NULL, LLAMAC_BUFFER_HIDDEN }, 1, normed);
}

static void cluster_logits(struct writer *w, int normed) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    const int vocab = (int)c->vocab_size, n = (int)c->n_clusters, used = (int)c->clusters_used;
    plan_project(w, &(struct projection){ &m->drafter.clusters, NULL, LLAMAC_BUFFER_CLUSTER_SCORES }, 1, normed);
    plan_use(w, LLAMAC_BUFFER_IN_CLUSTERS, used * (vocab / n)), plan_use(w, LLAMAC_BUFFER_LOGITS, vocab);
    plan_step(w, LLAMAC_OP_CLUSTER_LOGITS)->cluster_logits = (llamac_cluster_logits_step){
        .linear = plan_linear(w, &m->output, m->output_bias), .n_clusters = n, .n_used = used, .vocab_size = vocab,
        .ids = plan_vector(w, m->drafter.output_ids, vocab),
    };
}

static void output(struct writer *w) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    const int dim = (int)c->dim, vocab = (int)c->vocab_size;
    const int normed = plan_use(w, LLAMAC_BUFFER_OUTPUT_NORMED, dim);
    const llamac_norm norm = plan_norm(w, m->output_norm, m->output_norm_bias);
    if (has_logits(c) && !w->state_layers) hidden_states(w, norm);
    plan_norm_rows(w, LLAMAC_BUFFER_X, normed, dim, norm);
    plan_observe(w, LLAMAC_STAGE_OUTPUT_NORM, normed, dim);
    if (!has_logits(c)) return;
    if (is_eagle(m)) plan_eagle_logits(w, normed);
    else if (c->n_clusters) cluster_logits(w, normed);
    else plan_project(w, &(struct projection){ &m->output, m->output_bias, LLAMAC_BUFFER_LOGITS }, 1, normed);
    if (!is_eagle(m) && (c->logit_scale != 1 || c->logit_soft_cap > 0))
        plan_scale(w, LLAMAC_BUFFER_LOGITS, vocab, c->logit_scale, c->logit_soft_cap);
    plan_observe(w, LLAMAC_STAGE_LOGITS, LLAMAC_BUFFER_LOGITS, vocab);
}

static void write_graph(struct writer *w) {
    ropes_and_embedding(w);
    layer_inputs(w);
    const int n = (int)w->model->config->n_layers;
    for (w->layer = 0; w->layer < n; w->layer++) {
        plan_layer_states(w, w->layer);
        block(w, &w->model->layers[w->layer]);
    }
    w->layer = -1;
    plan_layer_states(w, n);
    output(w);
}

// Fills an empty plan. of: the model and what else determines the plan.
static int write_plan(llamac_plan *plan, struct writer of, llamac_error *err) {
    llamac_plan counted = { 0 };
    struct writer counter = of, w = of;
    counter.layer = w.layer = -1;
    counter.plan = &counted, w.plan = plan;
    write_graph(&counter);
    w.steps = mem_alloc((size_t)counted.n_steps, sizeof *w.steps, "the plan", err);
    plan->steps = w.steps, plan->max_experts_used = of.model->max_experts_used;
    if (w.steps) plan->experts = mem_alloc(counter.n_experts + 1, sizeof *plan->experts, "the plan's experts", err);
    if (!plan->experts) {
        llamac_plan_close(plan);
        return -1;
    }
    write_graph(&w);
    return 0;
}

int llamac_plan_open(llamac_plan *plan, const llamac_model *model, int mtp, llamac_error *err) {
    *plan = (llamac_plan){ 0 };
    if (mtp && !model->mtp_model) return bad_argument(err, "mtp is %d, but the model has no MTP layer", mtp);
    if (model->config->drafter)
        return err_set(err, LLAMAC_UNSUPPORTED, "the model is a drafter, whose plan depends on the model that it "
                       "drafts for");
    return write_plan(plan, (struct writer){ .model = mtp ? model->mtp_model : model }, err);
}

int llamac_plan_open_trunk(llamac_plan *plan, const llamac_model *model, const int *state_layers, llamac_error *err) {
    const struct config *c = model->config;
    *plan = (llamac_plan){ 0 };
    const char *kind = format_kind_without_logits(c);
    if (model->is_mtp || c->drafter || kind)
        return bad_argument(err, "the model is %s, expected a language model", kind ? kind : "itself a drafter");
    for (int i = 0; i < FORMAT_EAGLE_STATES; i++)
        if (state_layers[i] < 0 || state_layers[i] > (int)c->n_layers)
            return bad_argument(err, "state_layers[%d] is %d, expected 0 to %u, the number of layers", i,
                                state_layers[i], c->n_layers);
    return write_plan(plan, (struct writer){ .model = model, .state_layers = state_layers }, err);
}

int llamac_plan_open_drafter(llamac_plan *plan, const llamac_model *drafter, const llamac_model *trunk, int after_draft,
                             llamac_error *err) {
    *plan = (llamac_plan){ 0 };
    if (!drafter->config->drafter) return bad_argument(err, "the model is not a drafter");
    if (after_draft && !is_eagle(drafter))
        return bad_argument(err, "after_draft is %d, expected 0: the drafter is not an EAGLE-3 head", after_draft);
    if (drafter->config->n_clusters && drafter->output.lora)
        return err_set(err, LLAMAC_UNSUPPORTED, "the drafter has an adapter of its output matrix, whose rows are in "
                       "clusters: llamac computes this only on the CPU");
    if (session_check_pair(drafter, trunk, err)) return -1;
    return write_plan(plan, (struct writer){ .model = drafter, .trunk = trunk, .after_draft = after_draft }, err);
}

void llamac_plan_close(llamac_plan *plan) {
    mem_free((void *)(uintptr_t)plan->steps);
    mem_free(plan->experts);
    *plan = (llamac_plan){ 0 };
}

const char *llamac_buffer_name(int buffer) {
    static const char *const names[LLAMAC_N_BUFFERS] = {
        [LLAMAC_BUFFER_NONE] = "none", [LLAMAC_BUFFER_X] = "x", [LLAMAC_BUFFER_BRANCH] = "branch",
        [LLAMAC_BUFFER_NORMED] = "normed", [LLAMAC_BUFFER_Q] = "q", [LLAMAC_BUFFER_K] = "k", [LLAMAC_BUFFER_V] = "v",
        [LLAMAC_BUFFER_ATTN_GATE] = "attn_gate", [LLAMAC_BUFFER_Q_LATENT] = "q_latent",
        [LLAMAC_BUFFER_LATENT_HEADS] = "latent_heads",
        [LLAMAC_BUFFER_MIX] = "mix", [LLAMAC_BUFFER_GATE] = "gate", [LLAMAC_BUFFER_UP] = "up",
        [LLAMAC_BUFFER_CONV_IN] = "conv_in", [LLAMAC_BUFFER_CONV_OUT] = "conv_out",
        [LLAMAC_BUFFER_STATE_Z] = "state_z", [LLAMAC_BUFFER_STATE_BETA] = "state_beta",
        [LLAMAC_BUFFER_STATE_DECAY] = "state_decay",
        [LLAMAC_BUFFER_LAYER_INPUTS] = "layer_inputs", [LLAMAC_BUFFER_SHARED_OUT] = "shared_out",
        [LLAMAC_BUFFER_ROUTER] = "router", [LLAMAC_BUFFER_SHARED_GATE] = "shared_gate",
        [LLAMAC_BUFFER_EXPERT_ROWS] = "expert_rows", [LLAMAC_BUFFER_EXPERT_SUMS] = "expert_sums",
        [LLAMAC_BUFFER_EXPERT_GATE] = "expert_gate", [LLAMAC_BUFFER_EXPERT_UP] = "expert_up",
        [LLAMAC_BUFFER_EXPERT_OUT] = "expert_out", [LLAMAC_BUFFER_PROJECTED] = "projected",
        [LLAMAC_BUFFER_STATES] = "states", [LLAMAC_BUFFER_STATE_INPUTS] = "state_inputs",
        [LLAMAC_BUFFER_HIDDEN_NORMED] = "hidden_normed", [LLAMAC_BUFFER_HIDDEN_PROJECTED] = "hidden_projected",
        [LLAMAC_BUFFER_HIDDEN] = "hidden",
        [LLAMAC_BUFFER_EXPERT_PROJECTED] = "expert_projected", [LLAMAC_BUFFER_EXPERT_ADDED] = "expert_added",
        [LLAMAC_BUFFER_OUTPUT_NORMED] = "output_normed", [LLAMAC_BUFFER_OUTPUT_PROJECTED] = "output_projected",
        [LLAMAC_BUFFER_CLUSTER_SCORES] = "cluster_scores", [LLAMAC_BUFFER_IN_CLUSTERS] = "in_clusters",
        [LLAMAC_BUFFER_HEAD_LOGITS] = "head_logits",
        [LLAMAC_BUFFER_LOGITS] = "logits",
    };
    return buffer >= 0 && buffer < LLAMAC_N_BUFFERS ? names[buffer] : NULL;
}
