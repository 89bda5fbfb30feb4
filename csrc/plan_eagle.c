// SPDX-License-Identifier: MIT
// plan_eagle.c - the steps in which the plan of an EAGLE-3 head differs, in the order of eagle.c, and what its trunk
// records for it.
#include "plan_writer.h"

static void copy_rows(struct writer *w, int input, int output, int width, int first, int stride) {
    plan_step(w, LLAMAC_OP_COPY)->copy = (llamac_copy_step){
        .input = input, .output = output, .width = width, .first = first, .stride = stride,
    };
}

// Appends x = `in` times the trunk's states, possibly normed: all of a row together, or each of its states.
static void stream_of_states(struct writer *w) {
    const struct llamac_model *m = w->model;
    const int width = m->drafter.in.columns, states = plan_use(w, LLAMAC_BUFFER_STATES, width);
    if (m->drafter.in_norm) {
        const int parts = m->config->eagle_in_norm == EAGLE_IN_NORM_EACH ? FORMAT_EAGLE_STATES : 1;
        llamac_norm_step *s = plan_norm_rows(w, states, states, width / parts, plan_norm(w, m->drafter.in_norm, NULL));
        s->norm.weight = plan_vector(w, m->drafter.in_norm, width);
        s->parts = parts, s->stride = s->to_stride = width;
    }
    plan_project(w, &(struct projection){ &m->drafter.in, NULL, LLAMAC_BUFFER_X }, 1, states);
}

void plan_eagle_in(struct writer *w) {
    const struct llamac_model *m = w->model;
    const int dim = (int)m->config->dim, inputs = plan_use(w, LLAMAC_BUFFER_STATE_INPUTS, 2 * dim);
    llamac_norm_step *s = plan_norm_rows(w, LLAMAC_BUFFER_X, inputs, dim,
                                         plan_norm(w, m->drafter.embedding_norm, NULL));
    s->to_stride = 2 * dim;
    if (w->after_draft) copy_rows(w, plan_use(w, LLAMAC_BUFFER_STATES, dim), LLAMAC_BUFFER_X, dim, 0, dim);
    else stream_of_states(w);
    w->layer = 0;   // which has the stage
    const int normed = plan_norm_stream(w, LLAMAC_STAGE_ATTN_NORM, (int)m->config->eagle_normed,
                                        m->layers[0].attn_norm, NULL);
    w->layer = -1;
    copy_rows(w, normed, inputs, dim, dim, 2 * dim);
}

void plan_eagle_logits(struct writer *w, int normed) {
    const struct llamac_model *m = w->model;
    const struct config *c = m->config;
    const int n = m->output.rows, vocab = (int)c->vocab_size;
    plan_project(w, &(struct projection){ &m->output, m->output_bias, LLAMAC_BUFFER_HEAD_LOGITS }, 1, normed);
    if (c->logit_scale != 1 || c->logit_soft_cap > 0)
        plan_scale(w, LLAMAC_BUFFER_HEAD_LOGITS, n, c->logit_scale, c->logit_soft_cap);
    plan_use(w, LLAMAC_BUFFER_LOGITS, vocab);
    plan_step(w, LLAMAC_OP_SPREAD_LOGITS)->spread_logits = (llamac_spread_logits_step){
        .n = n, .vocab_size = vocab, .ids = plan_vector(w, m->drafter.output_ids, n),
    };
}

void plan_layer_states(struct writer *w, int n) {
    const int dim = (int)w->model->config->dim, width = FORMAT_EAGLE_STATES * dim;
    for (int i = 0; i < FORMAT_EAGLE_STATES && w->state_layers; i++)
        if (w->state_layers[i] == n)
            copy_rows(w, LLAMAC_BUFFER_X, plan_use(w, LLAMAC_BUFFER_HIDDEN, width), dim, i * dim, width);
}
