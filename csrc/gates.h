// SPDX-License-Identifier: MIT
// gates.h - sigmoid and softplus in double precision, by the polynomials that define probabilities: for the gates of
// recurrent layers and the scores of experts. Also the order in which scores rank.
#ifndef LLAMAC_GATES_H
#define LLAMAC_GATES_H
#include "exp_negative.h"
#include "log_positive.h"

static inline double softplus(double x) {
    const double size = x < 0 ? -x : x, rest = log_positive(1 + exp_negative(-size));
    return x < 0 ? rest : x + rest;   // NaN stays NaN
}

static inline float sigmoid(double x) {
    if (x != x) return (float)x;
    const double e = exp_negative(x < 0 ? x : -x);
    return (float)(x < 0 ? e / (1 + e) : 1 / (1 + e));
}

// Returns whether a score is strictly before another. Larger ones come first. A NaN comes before any number, so that it
// propagates to the result.
static inline int ranks_before(float x, float y) { return x > y || (x != x && y == y); }

// Returns exp(rate * step), at most 1; `rate` is negative and `step` positive.
static inline float decay_of(float rate, double step) {
    const double exponent = (double)rate * step;
    return exponent != exponent ? (float)exponent : exponent > 0 ? 1.0f : (float)exp_negative(exponent);
}
#endif
