// SPDX-License-Identifier: MIT
// functions.h - exp, tanh, the activations and other functions of single numbers, written against a SIMD layer, which
// the including file has chosen (simd_scalar.h specifies it). A GPU's kernels include this file as well: there a v16 is
// one number of one thread (llamac/gpu/kernels/lane.cuh).
#ifndef LLAMAC_FUNCTIONS_H
#define LLAMAC_FUNCTIONS_H
#include "format_enums.h"

// The parts of exp(x) for x clamped to [-87, 88]: exp(x) = pow2 * (1 + expm1), with pow2 = 2^n for n = round(x / ln
// 2), and expm1 a polynomial in r = x - n ln 2 (the coefficients of Cephes' expf, 2 ulp).
struct exp_parts { v16 pow2, expm1; };
INLINE struct exp_parts exp_parts(v16 x) {
    const v16 shift = v16_set1(0x1.8p23f), low = v16_set1(-87.0f);
    const v16 clamped = v16_min(v16_set1(88.0f), v16_max(low, x));   // NaN passes: it is the second operand
    const v16 t = v16_fma(clamped, v16_set1(0x1.715476p0f), shift), n = v16_sub(t, shift);
    v16 r = v16_fnma(n, v16_set1(0x1.62ep-1f), clamped);             // ln 2 in two parts; n times the first is exact
    r = v16_fnma(n, v16_set1(0x1.0bfbe8p-15f), r);
    v16 p = v16_set1(1.9875691500e-4f);
    p = v16_fma(p, r, v16_set1(1.3981999507e-3f));
    p = v16_fma(p, r, v16_set1(8.3334519073e-3f));
    p = v16_fma(p, r, v16_set1(4.1665795894e-2f));
    p = v16_fma(p, r, v16_set1(1.6666665459e-1f));
    p = v16_fma(p, r, v16_set1(5.0000001201e-1f));
    const struct exp_parts parts = { v16_exp2_shifted(t), v16_fma(p, v16_mul(r, r), r) };
    return parts;
}

// exp(x) for x <= 88; 0 below -87, where the result would be subnormal.
SPECIALIZED v16 v16_exp(v16 x) {
    const struct exp_parts e = exp_parts(x);
    return v16_zero_below(v16_mul(v16_add(e.expm1, v16_set1(1.0f)), e.pow2), x, v16_set1(-87.0f));
}

// tanh|x| = e / (e + 2) with e = exp(2|x|) - 1, which keeps full precision near 0. Then the sign of x.
SPECIALIZED v16 v16_tanh(v16 x) {
    const v16 zero = v16_set1(0), one = v16_set1(1.0f), size = v16_abs(x);
    const struct exp_parts parts = exp_parts(v16_add(size, size));
    const v16 e = v16_fma(parts.expm1, parts.pow2, v16_sub(parts.pow2, one));
    const v16 y = v16_div(e, v16_add(e, v16_set1(2.0f)));
    return v16_sub(v16_zero_below(y, x, zero), v16_zero_below(y, v16_sub(zero, x), zero));   // one of the two is 0
}

INLINE v16 v16_mul_sigmoid(v16 x, v16 g) {
    return v16_div(x, v16_add(v16_set1(1.0f), v16_exp(v16_sub(v16_set1(0), g))));
}

// x * Phi(x). erfc(|x| / sqrt(2)) by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7); no cancellation for either
// sign.
INLINE v16 v16_gelu_erf(v16 x) {
    const v16 z = v16_mul(v16_abs(x), v16_set1(0x1.6a09e6p-1f)), one = v16_set1(1.0f);
    const v16 t = v16_div(one, v16_fma(z, v16_set1(0.3275911f), one));
    v16 p = v16_set1(1.061405429f);
    p = v16_fma(p, t, v16_set1(-1.453152027f));
    p = v16_fma(p, t, v16_set1(1.421413741f));
    p = v16_fma(p, t, v16_set1(-0.284496736f));
    p = v16_fma(p, t, v16_set1(0.254829592f));
    const v16 erfc = v16_mul(v16_mul(p, t), v16_exp(v16_sub(v16_set1(0), v16_mul(z, z))));
    return v16_sub(v16_max(v16_set1(0), x), v16_mul(v16_mul(v16_set1(0.5f), v16_abs(x)), erfc));
}

// The tanh form of GELU (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh u) = x sigmoid(2u), u = sqrt(2 / pi) (x +
// 0.044715 x^3).
INLINE v16 v16_gelu_tanh(v16 x) {
    const v16 cubic = v16_fma(v16_mul(v16_set1(0.044715f), v16_mul(x, x)), x, x);
    return v16_mul_sigmoid(x, v16_mul(v16_set1(1.5957691216f), cubic));
}

INLINE v16 v16_activate(const int activation, v16 x) {
    switch (activation) {
    case ACTIVATION_SILU: return v16_mul_sigmoid(x, x);
    case ACTIVATION_GELU_TANH: return v16_gelu_tanh(x);
    case ACTIVATION_GELU_ERF: return v16_gelu_erf(x);
    case ACTIVATION_RELU: return v16_max(v16_set1(0), x);
    case ACTIVATION_RELU2: x = v16_max(v16_set1(0), x); return v16_mul(x, x);
    default: return v16_mul_sigmoid(x, v16_mul(v16_set1(1.702f), x));
    }
}

// xIELU (Huang and Schlag 2024) with beta 0.5: p x^2 + x / 2 for x > 0, else (0.5 + n) (exp(x) - 1 - x) + x / 2. p and
// n are the softplus of the learned alphas. Both cases are computed, and one of them is 0.
INLINE v16 v16_xielu(v16 x, v16 p, v16 n) {
    const v16 zero = v16_set1(0), half = v16_set1(0.5f), above = v16_max(zero, x), below = v16_min(zero, x);
    const struct exp_parts parts = exp_parts(below);
    const v16 expm1 = v16_fma(parts.expm1, parts.pow2, v16_sub(parts.pow2, v16_set1(1.0f)));
    const v16 curved = v16_fma(p, v16_mul(above, above), v16_mul(v16_add(half, n), v16_sub(expm1, below)));
    return v16_fma(half, x, curved);
}

// Limits x to [low, high] and adds an offset. A NaN stays a NaN: it is the second operand.
INLINE v16 v16_clamp(v16 x, v16 low, v16 high, v16 offset) { return v16_add(v16_min(high, v16_max(low, x)), offset); }

INLINE v16 v16_soft_cap(v16 x, v16 cap) { return v16_mul(cap, v16_tanh(v16_div(x, cap))); }
#endif
