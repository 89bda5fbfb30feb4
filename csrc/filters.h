// SPDX-License-Identifier: MIT
// filters.h - the definition of the filters before a draw, on lists of candidates.
#ifndef LLAMAC_FILTERS_H
#define LLAMAC_FILTERS_H
#include "ranking.h"

// p: the logit or the unnormalized probability.
struct candidate { float p; int32_t id; };

// The logits behind the candidates. An unnormalized probability is exp((logit - largest) / temperature).
struct logits_source {
    const float *logits;
    float largest, temperature;
};

// Each filter moves the candidates that it keeps to the front of the list of n and returns their number. *total becomes
// the sum of their unnormalized probabilities, added up in the order of the list.

// Keeps the k candidates with the largest p, sorted in descending order. Ties are ordered by ascending id.
void filter_top_k(struct candidate *c, int n, int k);

// Keeps the best candidates that together reach this fraction of the total, sorted. The input is sorted or in the order
// of ids.
//     scratch   (n)
int filter_top_p(struct candidate *c, int n, int is_sorted, float top_p, struct candidate *scratch, double *total);

// Keeps the candidates with at least this p.
int filter_min_p(struct candidate *c, int n, float min_p, double *total);

// Keeps the candidates whose surprise (-log of the probability) is closest to the expected surprise, until they reach
// `typical_p` together.
//     scratch   2 n floats
int filter_typical(struct candidate *c, int n, const struct logits_source *source, float typical_p,
                   struct ranking *ranking, float *scratch, double *total);

// Drops the candidates with at least this fraction of the total, except the last of them in ranking order.
int filter_top_choices(struct candidate *c, int n, float threshold, double *total);

// Keeps the best candidate, whose p is 1, and all candidates whose surprise is at most mu bits.
int filter_surprising(struct candidate *c, int n, const struct logits_source *source, double mu, double *total);

// Returns the surprise of a token in bits, where `total` is the sum of the unnormalized probabilities.
double surprise_bits(const struct logits_source *source, int32_t id, double total);
#endif
