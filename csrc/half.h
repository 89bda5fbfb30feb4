// SPDX-License-Identifier: MIT
// half.h - f16 and bf16 to f32 and back, one number at a time, exactly as the hardware does it (round to nearest even).
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
#endif
