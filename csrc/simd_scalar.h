// SPDX-License-Identifier: MIT
// simd_scalar.h - the vector vocabulary in plain C: 16 floats at a time. It defines what every other vocabulary must compute.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <math.h>
#include "common.h"
#include "half.h"

typedef struct { float f[16]; } v16;
enum { STRIPS_IN_FLIGHT = 1 };   // 16 independent sums are enough for one at a time
#undef UNROLL
#define UNROLL                   // nothing to keep in registers: unrolled loops would only be long

// What takes many instructions without hardware is a function of its own: inlined everywhere it would be most of the library.
#define ONCE static __attribute__((noinline, unused))

#define EACH(expression) v16 r; for (int i = 0; i < 16; i++) r.f[i] = (expression); return r

INLINE v16 v16_set1(float x) { EACH(x); }
INLINE v16 v16_load(const float *p) { EACH(p[i]); }
INLINE void v16_store(float *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = a.f[i]; }
// The first n of 16 numbers (0 <= n <= 16); the others are 0 and are not touched.
INLINE v16 v16_load_n(const float *p, int n) { EACH(i < n ? p[i] : 0.0f); }
INLINE void v16_store_n(float *p, v16 a, int n) { for (int i = 0; i < n; i++) p[i] = a.f[i]; }

ONCE v16 v16_load_f16(const uint16_t *p) { EACH(f32_from_f16(p[i])); }
ONCE void v16_store_f16(uint16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = f16_from_f32(a.f[i]); }
// bf16 numbers come in an order of the vocabulary's own, which v16_unmix puts right.
INLINE v16 v16_load_bf16_mixed(const uint16_t *p) { EACH(f32_from_bf16(p[i])); }
INLINE v16 v16_unmix(v16 a) { return a; }

INLINE v16 v16_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
INLINE v16 v16_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
INLINE v16 v16_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
INLINE v16 v16_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
ONCE v16 v16_fma(v16 a, v16 b, v16 c) { EACH(fused_multiply_add(a.f[i], b.f[i], c.f[i])); }      // a * b + c, rounded once
ONCE v16 v16_fnma(v16 a, v16 b, v16 c) { EACH(fused_multiply_add(-a.f[i], b.f[i], c.f[i])); }    // c - a * b, rounded once
INLINE v16 v16_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_min(v16 a, v16 b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_abs(v16 a) { EACH(f32_from_bits(f32_bits(a.f[i]) & 0x7fffffff)); }
// a where x >= low (and where x is no number), else 0
INLINE v16 v16_zero_below(v16 a, v16 x, v16 low) { EACH(x.f[i] < low.f[i] ? 0.0f : a.f[i]); }
// a in the first n lanes, b in the others
INLINE v16 v16_first(v16 a, v16 b, int n) { EACH(i < n ? a.f[i] : b.f[i]); }
// 2^n for t = n + 1.5 * 2^23, n a whole number from -126 to 127
INLINE v16 v16_exp2_of_shifted(v16 t) { EACH(f32_from_bits((f32_bits(t.f[i]) << 23) + 0x3f800000)); }

// The one order in which 16 partial sums become one: halves are added, four times.
INLINE float v16_sum(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] += a.f[i + n];
    return a.f[0];
}
INLINE float v16_max_lane(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] = a.f[i] > a.f[i + n] ? a.f[i] : a.f[i + n];
    return a.f[0];
}
#undef EACH
#endif
