// SPDX-License-Identifier: MIT
// angles.h - sine, cosine and logarithm in double from +, -, * and / alone, which IEEE 754 rounds correctly on every
// machine, and what RoPE computes with them for one number. A GPU's kernels include this file as well.
#ifndef LLAMAC_ANGLES_H
#define LLAMAC_ANGLES_H
#include <stdint.h>
#include <string.h>

// Cody-Waite reduction: subtracts n pi/2 with pi/2 in three parts. For |x| up to 2^24, the products of n with the first
// two, of at most 27 bits, are exact. Then Taylor polynomials on [-pi/4, pi/4], with omitted terms below 2^-54.
static inline void cos_sin(double x, double *cosine, double *sine) {
    const double shift = 0x1.8p52;   // adding it rounds to an integer
    const double shifted = x * 0x1.45f306dc9c883p-1 + shift, n = shifted - shift;
    const double r = ((x - n * 0x1.921fb54p0) - n * 0x1.10b461p-30) - n * 0x1.a62633145c06ep-58, z = r * r;
    double s = -1.0 / 1307674368000.0, c = 1.0 / 20922789888000.0;
    const double sine_terms[] = {
        1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0,
    };
    const double cosine_terms[] = {
        -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5,
    };
    for (int i = 0; i < 6; i++) s = s * z + sine_terms[i];
    for (int i = 0; i < 7; i++) c = c * z + cosine_terms[i];
    s = r + r * z * s;
    c = 1.0 + z * c;
    uint64_t bits;
    memcpy(&bits, &shifted, 8);   // the low bits of `shifted` are n modulo 4
    const int quadrant = (int)(bits & 3);
    *cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
    *sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
}

// log(n) for n >= 1: n = 2^k f with f in [2/3, 4/3], then log(f) = 2 atanh((f - 1) / (f + 1)) as a series, whose first
// omitted term is below 2^-56.
static inline double log_of(int n) {
    double f = n, k = 0;
    for (; f > 4.0 / 3; k++) f *= 0.5;
    const double s = (f - 1) / (f + 1), z = s * s;
    double sum = 0;
    for (int i = 25; i > 0; i -= 2) sum = sum * z + 1.0 / i;
    return k * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

// One number of rope_angles (rope.h).
static inline void rope_angle(int position, float inv_freq, float factor, float *cosine, float *sine) {
    double c, s;
    cos_sin((double)((float)position * inv_freq), &c, &s);
    *cosine = (float)c * factor;
    *sine = (float)s * factor;
}

// rope_query_scale (rope.h).
static inline float log_scale(int position, float beta, int context) {
    return (float)(1 + (double)beta * log_of(1 + position / context));
}
#endif
