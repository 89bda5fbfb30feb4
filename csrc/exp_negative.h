// SPDX-License-Identifier: MIT
// exp_negative.h - the definition of the exponential that token probabilities are computed with.
#ifndef LLAMAC_EXP_NEGATIVE_H
#define LLAMAC_EXP_NEGATIVE_H
#include <stdint.h>
#include <string.h>

// x = n ln 2 + r, |r| <= ln 2 / 2. The first part of ln 2 has few enough bits that its product with n is exact.
#define EXP_LOG2_E 0x1.71547652b82fep0
#define EXP_LN2_HIGH 0x1.62e42fefp-1
#define EXP_LN2_LOW 0x1.473de6af278edp-34
#define EXP_SHIFT 0x1.8p52   // adding it rounds to an integer, which the low bits of the sum then hold

// Returns exp(x) for x <= 0 in double, from +, -, *, / and powers of two, which round alike on every machine: Taylor
// polynomial of degree 13 in r.
static inline double exp_negative(double x) {
    if (!(x > -700.0)) return 0.0;
    const double n = (x * EXP_LOG2_E + EXP_SHIFT) - EXP_SHIFT;
    const double r = (x - n * EXP_LN2_HIGH) - n * EXP_LN2_LOW;
    double p = 1.0;
    for (int i = 13; i >= 1; i--) p = 1.0 + p * r / i;
    const uint64_t bits = (uint64_t)((int64_t)n + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return p * scale;
}
#endif
