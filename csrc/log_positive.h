// SPDX-License-Identifier: MIT
// log_positive.h - the definition of the logarithm that log probabilities are computed with.
#ifndef LLAMAC_LOG_POSITIVE_H
#define LLAMAC_LOG_POSITIVE_H
#include <stdint.h>
#include <string.h>

// Returns log(x) for normal x > 0 in double, from +, -, *, /, which round alike on every machine: x = m 2^n with m from
// 1/sqrt(2) to sqrt(2), and log(m) = 2 atanh((m - 1) / (m + 1)) as a Taylor polynomial of degree 21.
static inline double log_positive(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int n = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 0x1.6a09e667f3bcdp0) {
        m /= 2;
        n++;
    }
    const double z = (m - 1) / (m + 1), z2 = z * z;
    double sum = 0;
    for (int i = 21; i >= 1; i -= 2) sum = sum * z2 + 1.0 / i;
    return n * 0x1.62e42fefa39efp-1 + 2 * z * sum;
}
#endif
