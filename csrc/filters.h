// SPDX-License-Identifier: MIT
// filters.h - the definition of the filters before a draw, on lists of candidates.
#ifndef LLAMAC_FILTERS_H
#define LLAMAC_FILTERS_H
#include "ranking.h"

// p: the logit or the unnormalized probability.
struct candidate { float p; int32_t id; };

// Where the candidates come from. An unnormalized probability is exp((logit - largest) / temperature).
struct source {
    const float *logits;
    float largest, temperature;
};

// Each filter moves the candidates that it keeps, of n, to the front and returns their number. *total is the sum of
// their unnormalized probabilities, which have been added up in the order of the list.

// The k with the greatest p, sorted: the larger one ranks first, among equals the lower id.
void filter_top_k(struct candidate *c, int n, int k);

// The first in ranking order that together reach this part of the total, sorted. The candidates are sorted already, or
// in the order of their ids.
//     scratch   (n)
int filter_top_p(struct candidate *c, int n, int is_sorted, float top_p, struct candidate *scratch, double *total);

// Those with at least this p.
int filter_min_p(struct candidate *c, int n, float min_p, double *total);

// Those whose surprise, -log of the probability, is closest to the expected one, until they reach `typical_p` together.
//     scratch   2 n floats
int filter_typical(struct candidate *c, int n, const struct source *from, float typical_p, struct ranking *ranking,
                   float *scratch, double *total);

// All but those with at least this part of the total, and of those the one that ranks last.
int filter_top_choices(struct candidate *c, int n, float threshold, double *total);

// The best one, whose p is 1, and all whose surprise is at most mu bits.
int filter_surprising(struct candidate *c, int n, const struct source *from, double mu, double *total);

// Returns the surprise of a token in bits, where `total` is the sum of the unnormalized probabilities.
double surprise_bits(const struct source *from, int32_t id, double total);
#endif
