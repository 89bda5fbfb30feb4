// SPDX-License-Identifier: MIT
// router.h - selects the experts of a row from the router's logits.
#ifndef LLAMAC_ROUTER_H
#define LLAMAC_ROUTER_H
#include "format.h"
#include "kernels.h"

// The floats of scratch that router_select needs.
static inline size_t router_scratch_floats(size_t n_experts) { return 3 * round_up(n_experts, 16); }

// Selects a row's experts, in ascending order, and their weights: (n_experts_used) each. Ties go to the lowest expert.
// logits: (n_experts); choice_bias: (n_experts), or NULL without router_choice_bias.
void router_select(const struct kernels *kernels, const struct layer_record *record, const float *choice_bias,
                   const float *logits, float *scratch, int *experts, float *weights);
#endif
