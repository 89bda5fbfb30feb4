// SPDX-License-Identifier: MIT
// ranking.h - finds the candidate at which a sum in ranking order reaches a threshold, without sorting all of them.
#ifndef LLAMAC_RANKING_H
#define LLAMAC_RANKING_H
#include "half.h"

// n candidates by ascending id. The one with the greater `rank` ranks first, among equals the one with the lower id.
struct ranked {
    int n;
    float *rank;      // not NaN
    float *p;         // may be the same array
    int32_t *id;      // NULL: a candidate's index is its id
};

// Returns an integer that orders as the number does, the same for 0 and -0.
static inline int32_t ranking_key(float x) {
    const int32_t bits = (int32_t)f32_bits(x + 0.0f);
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

enum { RANKING_BUCKETS = 1024 };

// A ranking of candidates by their buckets: equal parts of the range of keys.
struct ranking {
    const struct ranked *c;
    const float *weights;             // (n), at least 0; NULL: 1 for each
    double margin;
    uint32_t high, span;              // all keys are in [high - span, high]
    double sums[RANKING_BUCKETS];     // of the weights in each bucket, the one with the greatest keys first
};

// Ranks candidates. margin: the largest difference that rounding may have caused between sums of weights in another
// order or the threshold and the caller's definition of them.
void ranking_make(struct ranking *r, const struct ranked *c, const float *weights, double margin);

// The first candidate in ranking order at which a sum reaches a threshold, and that sum. index: -1 if there is none.
struct crossing { int index; double sum; };

// Finds the first candidate at which the sum of its weight and the weights of all that rank before it reaches the
// threshold, or exceeds it if `strict`. If a sum is within the margin of the threshold, there is no result.
struct crossing ranking_cross(const struct ranking *r, double threshold, int strict);

// Returns how much two sums of n numbers at least 0 can differ if they are added up in different orders and the greater
// is `total`, with the roundings of a threshold.
double ranking_margin(const float *p, int n, double total);
#endif
