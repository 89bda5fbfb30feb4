// SPDX-License-Identifier: MIT
// half.h - f16 and bf16 to f32 and back, and the fused multiply-add, one number at a time: the hardware's bits, where there is none, too.
#ifndef LLAMAC_HALF_H
#define LLAMAC_HALF_H
#include <stdint.h>
#include <string.h>

static inline float f32_from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t f32_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float f32_from_bf16(uint16_t h) { return f32_from_bits((uint32_t)h << 16); }

static inline float f32_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000 | fraction << 13);
    // 2^-24 times an integer is exact, also for the subnormal numbers
    if (exponent == 0) return f32_from_bits(sign | f32_bits((float)fraction * 0x1p-24f));
    return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t f16_from_f32(float x) {
    const uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));   // NaN, quiet
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                             // rounds to infinity
    if (magnitude < 0x38800000)   // below 2^-14: adding 0.5 lets the addition round to multiples of 2^-24
        return (uint16_t)(sign | (f32_bits(f32_from_bits(magnitude) + 0.5f) - 0x3f000000));
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}

// a * b + c, rounded once. Where the processor cannot: the product is exact in double, and a sum rounded to odd (Boldo and Melquiond
// 2008) loses nothing that the second rounding, to f32, could need. Faster than libm's fmaf, and vectorizable.
static inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * (double)b, sum = product + (double)c, back = sum - product;
    const double lost = (product - (sum - back)) + ((double)c - back);   // exact (Knuth's two-sum); NaN where the sum is infinite
    int64_t bits;
    memcpy(&bits, &sum, 8);
    const int64_t toward = (lost > 0) == (bits >= 0) ? 1 : -1, even = ~bits & 1;
    if (lost > 0 || lost < 0) bits += toward & -even;
    double odd;
    memcpy(&odd, &bits, 8);
    return (float)odd;
#endif
}
#endif
