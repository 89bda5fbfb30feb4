// SPDX-License-Identifier: MIT
// sampler.h - llamac_sample with a given kernel set.
#ifndef LLAMAC_SAMPLER_H
#define LLAMAC_SAMPLER_H
#include "kernels.h"

// As llamac_sample. Every kernel set draws the same token.
int sample_with(const struct kernels *kernels, const float *logits, int n, const llamac_sampling *sampling,
                uint64_t position, double *mu, void *scratch, llamac_error *err);
#endif
