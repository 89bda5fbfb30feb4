// SPDX-License-Identifier: MIT
// router.c - see router.h. Scores are the softmax or the sigmoid of the logits. Ranks, which are scores plus a bias,
// choose groups of experts, then experts; the scores alone give the weights.
#include "router.h"

#include <string.h>
#include "common.h"
#include "gates.h"

// Marks the `count` best of n items as chosen, except those that are `excluded` (NULL: none).
static void choose(const float *ranks, int n, int count, const uint8_t *excluded, uint8_t *chosen) {
    memset(chosen, 0, (size_t)n);
    for (int i = 0; i < count; i++) {
        int best = -1;
        for (int j = 0; j < n; j++)
            if (!chosen[j] && !(excluded && excluded[j]) && (best < 0 || ranks_before(ranks[j], ranks[best]))) best = j;
        chosen[best] = 1;
    }
}

// Returns a group's rank: the rank of its best expert or, with sigmoid, the sum of the two best ranks.
static float group_rank(const float *ranks, int size, int is_sigmoid) {
    int best = 0, second = -1;
    for (int e = 1; e < size; e++) {
        if (ranks_before(ranks[e], ranks[best])) second = best, best = e;
        else if (second < 0 || ranks_before(ranks[e], ranks[second])) second = e;
    }
    return is_sigmoid && second >= 0 ? ranks[best] + ranks[second] : ranks[best];
}

// Excludes the experts of all groups but the best.
static void exclude_groups(const struct layer_record *record, const float *ranks, float *group_ranks,
                           uint8_t *excluded) {
    const int n = (int)record->n_expert_groups, size = (int)(record->n_experts / record->n_expert_groups);
    uint8_t chosen[FORMAT_MAX_EXPERTS];
    for (int g = 0; g < n; g++) group_ranks[g] = group_rank(ranks + g * size, size, record->router == ROUTER_SIGMOID);
    choose(group_ranks, n, (int)record->n_expert_groups_used, NULL, chosen);
    for (int e = 0; e < n * size; e++) excluded[e] = !chosen[e / size];
}

static void score(const struct kernels *kernels, const struct layer_record *record, const float *logits,
                  float *scores) {
    const size_t n = record->n_experts;
    memcpy(scores, logits, sizeof(float) * n);
    if (record->router == ROUTER_SOFTMAX) kernels->softmax(scores, (int)n);
    for (size_t e = 0; e < n && record->router == ROUTER_SIGMOID; e++) scores[e] = sigmoid((double)logits[e]);
}

void router_select(const struct kernels *kernels, const struct layer_record *record, const float *choice_bias,
                   const float *logits, float *scratch, int *experts, float *weights) {
    const int n = (int)record->n_experts, used = (int)record->n_experts_used,
              is_softmax = record->router == ROUTER_SOFTMAX;
    const size_t part = router_scratch_floats((size_t)n) / 3;
    float *const scores = scratch, *const ranks = scores + part, *const group_ranks = ranks + part;
    uint8_t excluded[FORMAT_MAX_EXPERTS], chosen[FORMAT_MAX_EXPERTS];
    // logits rank like their scores, and still differ where sigmoids round to 1
    const int needs_scores = !is_softmax || choice_bias || !record->expert_weights;
    if (needs_scores) score(kernels, record, logits, scores);
    const float *order = is_softmax || !record->n_expert_groups ? logits : scores;
    if (choice_bias) {
        for (int e = 0; e < n; e++) ranks[e] = scores[e] + choice_bias[e];
        order = ranks;
    }
    const uint8_t *others = NULL;
    if (record->n_expert_groups) {
        exclude_groups(record, order, group_ranks, excluded);
        others = excluded;
    }
    choose(order, n, used, others, chosen);
    for (int e = 0, i = 0; e < n; e++)
        if (chosen[e]) experts[i++] = e;

    if (!needs_scores) {
        // dividing the probabilities of the chosen experts by their sum equals a softmax over these experts alone
        for (int i = 0; i < used; i++) scores[i] = logits[experts[i]];
        kernels->softmax(scores, used);
        for (int i = 0; i < used; i++) weights[i] = scores[i];
    } else {
        double sum = 0;
        for (int i = 0; i < used; i++) sum += (double)scores[experts[i]];
        sum += (double)record->expert_weights_eps;
        for (int i = 0; i < used; i++) {
            const float weight = scores[experts[i]];
            weights[i] = record->expert_weights ? (float)((double)weight / sum) : weight;
        }
    }
    for (int i = 0; i < used; i++) weights[i] *= record->expert_scale;
}
