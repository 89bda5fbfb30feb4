// SPDX-License-Identifier: MIT
// plan_writer.h - how a plan is written: operands, and the steps that layers have in common. Each function appends its
// steps to the plan.
#ifndef LLAMAC_PLAN_WRITER_H
#define LLAMAC_PLAN_WRITER_H
#include "model.h"
#include "plan.h"

struct writer {
    const struct llamac_model *model, *trunk;   // trunk: the model that a drafter drafts for; or NULL
    int after_draft;          // of an EAGLE-3 head: it continues from its own states
    const int *state_layers;  // (FORMAT_EAGLE_STATES), or NULL: what hidden states are (llamac_plan_open_trunk)
    llamac_plan *plan;
    llamac_step *steps;       // the plan's; NULL: steps and experts are only counted
    llamac_step counted;      // is written instead of them
    size_t n_experts;         // linears in use of plan->experts
    int layer;                // the layer of the steps that are added next
};

// ---- operands

llamac_operand plan_operand(const struct writer *w, const void *data, size_t bytes);
llamac_operand plan_vector(const struct writer *w, const float *data, int n);
llamac_linear plan_linear(const struct writer *w, const struct matrix *m, const float *bias);
llamac_linear plan_no_linear(const struct writer *w);
// A factor of an adapter.
llamac_linear plan_factor(const struct writer *w, const uint8_t *data, int rows, int columns);
llamac_norm plan_norm(const struct writer *w, const float *weight, const float *bias);

// ---- steps

llamac_step *plan_step(struct writer *w, enum llamac_op op);
// Grows the width of a buffer to at least `width`. Returns the buffer.
int plan_use(struct writer *w, int buffer, int width);
llamac_observe_step *plan_observe(struct writer *w, int stage, int buffer, int width);
void plan_scale(struct writer *w, int buffer, int width, float scale, float cap);
// Appends output = norm(input) of whole rows. Returns the step, like plan_product.
llamac_norm_step *plan_norm_rows(struct writer *w, int input, int output, int width, llamac_norm norm);
// Normalizes the residual stream as input of products. Returns the buffer: x itself if the layer has no norm there, or
// if the result replaces the stream.
int plan_norm_stream(struct writer *w, int stage, int replaces, const float *weight, const float *bias);
// Normalizes the inputs of a layer's last product of attention or of the network, in place. Observes the result.
void plan_sub_norm(struct writer *w, int stage, int buffer, const float *weight, int width);
// Appends output = the linear's map of x. Returns the product, which the caller may change until it adds the next step.
llamac_product_step *plan_product(struct writer *w, llamac_linear linear, int input, int output);
// Appends the products of a matrix's adapter, if it has one, after the matrix's own product.
void plan_adapter(struct writer *w, const struct matrix *m, llamac_product_step own);

// The product of a matrix, and where its result goes.
enum { MAX_PROJECTIONS = 4 };   // of the same inputs
struct projection { const struct matrix *matrix; const float *bias; int output; };
// Appends products of the same inputs, side by side, then those of their adapters. Projections without a matrix are
// left out.
void plan_project(struct writer *w, const struct projection *projections, int n, int input);

static inline int plan_has_post_norm(const struct layer *layer) {
    return layer->record->placement == PLACEMENT_POST || layer->record->placement == PLACEMENT_SANDWICH;
}
// Appends the last product of a branch, which goes to the residual stream, or to `branch` if a norm comes first.
// is_second: it is added to the last product of the layer's first mixer, also in the stage.
void plan_branch_product(struct writer *w, const struct layer *layer, const struct matrix *m, const float *bias,
                         int input, int stage, int is_second);
// x += the norm of `branch`, or `branch` itself without weights of a norm.
void plan_add_branch(struct writer *w, const float *weight, const float *bias);

// ---- parts of an EAGLE-3 head (plan_eagle.c)

// From the embedding, which is in x, to the residual stream and the inputs of the first layer's attention.
void plan_eagle_in(struct writer *w);
// From the normed rows to logits.
void plan_eagle_logits(struct writer *w, int normed);
// Appends the hidden states after `n` layers, if they consist of the residual stream there.
void plan_layer_states(struct writer *w, int n);

// ---- parts of a layer

// From the normalized rows (`input`) to q, k and v before they are stored, or to the inputs of the convolution and the
// state. Then to the residual stream, or to `branch` if a norm comes first.
void plan_mixer_inputs(struct writer *w, const struct layer *layer, int input);
void plan_mixer_out(struct writer *w, const struct layer *layer);

// From the residual stream to the hidden activations; then to the residual stream, or to `branch` if a norm comes
// first.
void plan_ffn_hidden(struct writer *w, const struct layer *layer);
void plan_ffn_down(struct writer *w, const struct layer *layer);
#endif
