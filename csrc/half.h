// SPDX-License-Identifier: MIT
// half.h - scalar conversions between f32 and f16 or bf16, and a scalar fused multiply-add. On any processor they
// give the bits that hardware instructions give.
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
    // zero and subnormals: an integer times 2^-24, which f32 represents exactly
    if (exponent == 0) return f32_from_bits(sign | f32_bits((float)fraction * 0x1p-24f));
    return f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

// Rounds to nearest, ties to even.
static inline uint16_t f16_from_f32(float x) {
    const uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));   // a quiet NaN
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                             // rounds to infinity
    if (magnitude < 0x38800000)   // below 2^-14: the ulp of 0.5 is 2^-24, so the addition rounds to f16's subnormals
        return (uint16_t)(sign | (f32_bits(f32_from_bits(magnitude) + 0.5f) - 0x3f000000));
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}

// a * b + c, rounded once. Without hardware: the product is exact in double. The sum is rounded to odd, so that the
// second rounding, to f32, gives the correctly rounded result (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums", 2008). Faster than libm's fmaf, and vectorizable.
static inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * (double)b, sum = product + (double)c;
    // the sum's exact rounding error (Knuth's TwoSum); NaN where the sum is infinite
    const double c_part = sum - product, error = (product - (sum - c_part)) + ((double)c - c_part);
    int64_t bits;
    memcpy(&bits, &sum, 8);
    const int64_t toward_error = (error > 0) == (bits >= 0) ? 1 : -1, is_even = ~bits & 1;
    if (error > 0 || error < 0) bits += toward_error & -is_even;
    double rounded_to_odd;
    memcpy(&rounded_to_odd, &bits, 8);
    return (float)rounded_to_odd;
#endif
}
#endif
