// SPDX-License-Identifier: MIT
// plan_writer.c - see plan_writer.h.
#include "plan_writer.h"

#include "common.h"
#include "dtype.h"

// ---- operands

llamac_operand plan_operand(const struct writer *w, const void *data, size_t bytes) {
    const struct flat_file *file = &w->model->file;
    if (!data) return (llamac_operand){ .offset = -1 };
    const uintptr_t at = (uintptr_t)data, start = (uintptr_t)file->data;
    const int in_file = at >= start && at - start < file->bytes;
    return (llamac_operand){ data, bytes, in_file ? (int64_t)(at - start) : -1 };
}

llamac_operand plan_vector(const struct writer *w, const float *data, int n) {
    return plan_operand(w, data, sizeof(float) * (size_t)n);
}

llamac_linear plan_linear(const struct writer *w, const struct matrix *m, const float *bias) {
    const size_t bytes = llamac_matrix_bytes(m->dtype, (uint64_t)m->rows, (uint64_t)m->columns);
    return (llamac_linear){
        .weights = plan_operand(w, m->data, bytes), .bias = plan_vector(w, bias, m->rows),
        .scales = plan_vector(w, m->scales, m->rows),
        .dtype = m->dtype, .rows = m->rows, .columns = m->columns, .rounds_inputs = m->rounds_inputs,
        .strip_bytes = m->strip_bytes,
    };
}

llamac_linear plan_factor(const struct writer *w, const uint8_t *data, int rows, int columns) {
    const struct matrix m = { .data = data, .dtype = LLAMAC_F32, .rows = rows, .columns = columns,
                              .strip_bytes = float_strip_bytes(LLAMAC_F32, columns) };
    return plan_linear(w, &m, NULL);
}
llamac_linear plan_no_linear(const struct writer *w) { return plan_linear(w, &(struct matrix){ 0 }, NULL); }

llamac_norm plan_norm(const struct writer *w, const float *weight, const float *bias) {
    const struct config *c = w->model->config;
    return (llamac_norm){ c->norm == NORM_RMS, c->norm_eps, plan_vector(w, weight, (int)c->dim),
                          plan_vector(w, bias, (int)c->dim) };
}

// ---- steps

llamac_step *plan_step(struct writer *w, enum llamac_op op) {
    llamac_step *step = w->steps ? &w->steps[w->plan->n_steps] : &w->counted;
    w->plan->n_steps++;
    *step = (llamac_step){ .op = op, .layer = w->layer };
    return step;
}

int plan_use(struct writer *w, int buffer, int width) {
    w->plan->widths[buffer] = max_int(w->plan->widths[buffer], width);
    return buffer;
}

llamac_observe_step *plan_observe(struct writer *w, int stage, int buffer, int width) {
    llamac_observe_step *s = &plan_step(w, LLAMAC_OP_OBSERVE)->observe;
    *s = (llamac_observe_step){ .stage = stage, .buffer = buffer, .width = width };
    return s;
}

llamac_norm_step *plan_norm_rows(struct writer *w, int input, int output, int width, llamac_norm norm) {
    llamac_norm_step *s = &plan_step(w, LLAMAC_OP_NORM)->norm;
    *s = (llamac_norm_step){ .input = input, .output = output, .width = width, .parts = 1, .stride = width,
                             .to_stride = width, .norm = norm };
    return s;
}

int plan_norm_stream(struct writer *w, int stage, int replaces, const float *weight, const float *bias) {
    const int dim = (int)w->model->config->dim, buffer = !weight || replaces ? LLAMAC_BUFFER_X : LLAMAC_BUFFER_NORMED;
    if (weight) plan_norm_rows(w, LLAMAC_BUFFER_X, plan_use(w, buffer, dim), dim, plan_norm(w, weight, bias));
    plan_observe(w, stage, buffer, dim);
    return buffer;
}

void plan_sub_norm(struct writer *w, int stage, int buffer, const float *weight, int width) {
    llamac_norm_step *s = plan_norm_rows(w, buffer, buffer, width, plan_norm(w, weight, NULL));
    s->norm.weight = plan_vector(w, weight, width);
    plan_observe(w, stage, buffer, width);
}

llamac_product_step *plan_product(struct writer *w, llamac_linear linear, int input, int output) {
    llamac_product_step *p = &plan_step(w, LLAMAC_OP_PRODUCT)->product;
    *p = (llamac_product_step){ .linear = linear, .input = input, .output = plan_use(w, output, linear.rows),
                                .scale = 1, .stage = -1 };
    return p;
}

void plan_adapter(struct writer *w, const struct matrix *m, llamac_product_step own) {
    if (!m->lora) return;
    const int rank = m->lora->rank,
              projected = own.input == LLAMAC_BUFFER_OUTPUT_NORMED   ? LLAMAC_BUFFER_OUTPUT_PROJECTED
                          : own.input == LLAMAC_BUFFER_HIDDEN_NORMED ? LLAMAC_BUFFER_HIDDEN_PROJECTED
                                                                     : LLAMAC_BUFFER_PROJECTED;
    plan_product(w, plan_factor(w, m->lora->a, rank, m->columns), own.input, projected);
    llamac_product_step *p = plan_product(w, plan_factor(w, m->lora->b, m->rows, rank), projected, own.output);
    p->accumulate = p->accumulate_stage = 1;
    p->scale = own.scale, p->by_shared_weight = own.by_shared_weight, p->stage = own.stage;
}

void plan_project(struct writer *w, const struct projection *projections, int n, int input) {
    llamac_product_step own[MAX_PROJECTIONS];
    for (int i = 0; i < n; i++)
        if (projections[i].matrix->data)
            own[i] = *plan_product(w, plan_linear(w, projections[i].matrix, projections[i].bias), input,
                                   projections[i].output);
    for (int i = 0; i < n; i++)
        if (projections[i].matrix->data) plan_adapter(w, projections[i].matrix, own[i]);
}

void plan_branch_product(struct writer *w, const struct layer *layer, const struct matrix *m, const float *bias,
                         int input, int stage, int is_second) {
    const int to_branch = plan_has_post_norm(layer);
    llamac_product_step *p = plan_product(w, plan_linear(w, m, bias), input,
                                          to_branch ? LLAMAC_BUFFER_BRANCH : LLAMAC_BUFFER_X);
    p->stage = stage;
    p->accumulate = !to_branch || is_second, p->accumulate_stage = is_second;
    if (!to_branch) p->scale = w->model->config->residual_scale;
    plan_adapter(w, m, *p);
}

void plan_add_branch(struct writer *w, const float *weight, const float *bias) {
    const struct config *c = w->model->config;
    plan_step(w, LLAMAC_OP_ADD)->add = (llamac_add_step){
        .to = LLAMAC_BUFFER_X, .from = LLAMAC_BUFFER_BRANCH, .width = (int)c->dim, .scale = c->residual_scale,
        .norm = plan_norm(w, weight, bias),
    };
}

void plan_scale(struct writer *w, int buffer, int width, float scale, float cap) {
    plan_step(w, LLAMAC_OP_SCALE)->scale = (llamac_scale_step){ buffer, width, scale, cap };
}
