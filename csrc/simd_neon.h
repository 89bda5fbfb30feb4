// SPDX-License-Identifier: MIT
// simd_neon.h - the vector vocabulary (see simd_scalar.h) for NEON: four registers of 4 floats or 4 rows each. With the dot product
// extension, sums of products of bytes are one instruction.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <arm_neon.h>
#include <string.h>
#include "common.h"
#include "dtype.h"

typedef struct { float32x4_t a, b, c, d; } v16;   // lanes 0..3, 4..7, 8..11, 12..15
enum {
    SUMS_IN_FLIGHT = 6,                // 24 of 32 registers
    LINES_IN_FLIGHT = 1, LINES_IN_FLIGHT_Q8 = 1, SUMS_KEPT = 2,
    EXPAND_ROWS = 6, EXPAND_ROWS_Q8 = 6,
};

#define ALL(f, x) (v16){ f(x.a), f(x.b), f(x.c), f(x.d) }
#define ALL2(f, x, y) (v16){ f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d) }
#define ALL3(f, x, y, z) (v16){ f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d) }

// A number in lane 0, for multiplications by an element: a load alone, where a copy in all lanes costs a vector instruction more.
// (GCC makes such copies from everything but these bits, Clang makes elements from copies.)
INLINE int32x2_t lane_s32(int32_t x) {
#if defined(__clang__)
    return vdup_n_s32(x);
#else
    return vreinterpret_s32_u64(vcreate_u64((uint32_t)x));
#endif
}
INLINE float32x2_t lane_f32(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return vreinterpret_f32_s32(lane_s32(bits));
}

INLINE v16 v16_set1(float x) { const float32x4_t v = vdupq_n_f32(x); return (v16){ v, v, v, v }; }
INLINE v16 v16_load(const float *p) { return (v16){ vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12) }; }
INLINE void v16_store(float *p, v16 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
INLINE v16 v16_load_n(const float *p, int n) {
    float x[16] = { 0 };
    for (int i = 0; i < n; i++) x[i] = p[i];
    return v16_load(x);
}
INLINE void v16_store_n(float *p, v16 a, int n) {
    float x[16];
    v16_store(x, a);
    for (int i = 0; i < n; i++) p[i] = x[i];
}

INLINE float32x4_t load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE v16 v16_load_f16(const uint16_t *p) { return (v16){ load_f16(p), load_f16(p + 4), load_f16(p + 8), load_f16(p + 12) }; }
INLINE void store_f16(uint16_t *p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE void v16_store_f16(uint16_t *p, v16 x) { store_f16(p, x.a), store_f16(p + 4, x.b), store_f16(p + 8, x.c), store_f16(p + 12, x.d); }
INLINE v16 v16_load_bf16_mixed(const uint16_t *p) {
    const uint16x8_t x = vld1q_u16(p), y = vld1q_u16(p + 8), zero = vdupq_n_u16(0);
    return (v16){ vreinterpretq_f32_u16(vzip1q_u16(zero, x)), vreinterpretq_f32_u16(vzip2q_u16(zero, x)),
                  vreinterpretq_f32_u16(vzip1q_u16(zero, y)), vreinterpretq_f32_u16(vzip2q_u16(zero, y)) };
}
INLINE v16 v16_unmix(v16 x) { return x; }

INLINE v16 v16_add(v16 x, v16 y) { return ALL2(vaddq_f32, x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return ALL2(vsubq_f32, x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return ALL2(vmulq_f32, x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return ALL2(vdivq_f32, x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return ALL3(vfmaq_f32, z, x, y); }
INLINE v16 v16_fma1(v16 x, float y, v16 z) {
    const float32x2_t v = lane_f32(y);
    return (v16){ vfmaq_lane_f32(z.a, x.a, v, 0), vfmaq_lane_f32(z.b, x.b, v, 0), vfmaq_lane_f32(z.c, x.c, v, 0), vfmaq_lane_f32(z.d, x.d, v, 0) };
}
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return ALL3(vfmsq_f32, z, x, y); }
// Not vmaxq and vminq: those give NaN where either operand is one, and order zeros by their sign.
INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE v16 v16_max(v16 x, v16 y) { return ALL2(larger, x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return ALL2(smaller, x, y); }
INLINE v16 v16_abs(v16 x) { return ALL(vabsq_f32, x); }
INLINE float32x4_t zero_below(float32x4_t x, float32x4_t y, float32x4_t low) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, low)));
}
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) { return ALL3(zero_below, x, y, low); }
INLINE float32x4_t first_lanes(float32x4_t x, float32x4_t y, int n) {
    const int32x4_t lanes = { 0, 1, 2, 3 };
    return vbslq_f32(vcgtq_s32(vdupq_n_s32(n), lanes), x, y);
}
INLINE v16 v16_first(v16 x, v16 y, int n) {
    return (v16){ first_lanes(x.a, y.a, n), first_lanes(x.b, y.b, n - 4), first_lanes(x.c, y.c, n - 8), first_lanes(x.d, y.d, n - 12) };
}
INLINE float32x4_t exp2_of_shifted(float32x4_t t) {
    return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23), vdupq_n_s32(0x3f800000)));
}
INLINE v16 v16_exp2_of_shifted(v16 t) { return ALL(exp2_of_shifted, t); }

INLINE float v16_sum(v16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float v16_max_lane(v16 x) {
    const float32x4_t four = larger(larger(x.a, x.c), larger(x.b, x.d)), two = larger(four, vextq_f32(four, four, 2));
    const float first = vgetq_lane_f32(two, 0), second = vgetq_lane_f32(two, 1);
    return first > second ? first : second;
}

INLINE int16x8_t to_int16(float32x4_t x, float32x4_t y) { return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x)), vqmovn_s32(vcvtnq_s32_f32(y))); }
INLINE void v16_to_int8(int8_t *p, v16 x) { vst1q_s8(p, vcombine_s8(vqmovn_s16(to_int16(x.a, x.b)), vqmovn_s16(to_int16(x.c, x.d)))); }
INLINE void v16_to_int16(int16_t *p, v16 x) { vst1q_s16(p, to_int16(x.a, x.b)), vst1q_s16(p + 8, to_int16(x.c, x.d)); }

// ---- lines: 4 rows a register, signed codes

typedef struct { int8x16_t a, b, c, d; } line;
typedef struct { int32x4_t a, b, c, d; } ints;
typedef ints dots, scaled, scales, grids;

INLINE line line_load(const uint8_t *p) {
    const int8_t *q = (const int8_t *)p;
    return (line){ vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48) };
}
INLINE void line_store(uint8_t *p, line x) {
    int8_t *q = (int8_t *)p;
    vst1q_s8(q, x.a), vst1q_s8(q + 16, x.b), vst1q_s8(q + 32, x.c), vst1q_s8(q + 48, x.d);
}
INLINE ints ints_zero(void) { const int32x4_t zero = vdupq_n_s32(0); return (ints){ zero, zero, zero, zero }; }
INLINE v16 ints_float(ints w) { return (v16){ vcvtq_f32_s32(w.a), vcvtq_f32_s32(w.b), vcvtq_f32_s32(w.c), vcvtq_f32_s32(w.d) }; }

// Adds each row's 4 products. Without the instruction two products in int16 at a time: 2 * 127 * 127 fits.
INLINE int32x4_t dot(int32x4_t sum, int8x16_t codes, int32x2_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_lane_s32(sum, codes, vreinterpret_s8_s32(inputs), 0);
#else
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_lane_s32(inputs, 0));
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(x)), vmull_high_s8(codes, x)));
#endif
}
INLINE ints ints_dot(ints sum, line codes, int32_t inputs) {
    const int32x2_t x = lane_s32(inputs);
    return (ints){ dot(sum.a, codes.a, x), dot(sum.b, codes.b, x), dot(sum.c, codes.c, x), dot(sum.d, codes.d, x) };
}

// ---- 4-bit codes. The grid is no part of them in a tile: its share, grid * sum of the inputs, is what sums start from, so that it
// costs nothing per code. In expanded lines it is.

typedef int8x16_t table;
INLINE table table_load(const int8_t *codebook) { return vld1q_s8(codebook); }
INLINE scales scales_load(const uint8_t *p) {
    const int8x16_t s = vld1q_s8((const int8_t *)p);
    const int16x8_t low = vmovl_s8(vget_low_s8(s)), high = vmovl_high_s8(s);
    return (scales){ vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high) };
}
INLINE void scales_store(uint8_t *p, scales s) {
    int32_t *q = (int32_t *)(void *)p;
    vst1q_s32(q, s.a), vst1q_s32(q + 4, s.b), vst1q_s32(q + 8, s.c), vst1q_s32(q + 12, s.d);
}
INLINE scales scales_reload(const uint8_t *p) {
    const int32_t *q = (const int32_t *)(const void *)p;
    return (scales){ vld1q_s32(q), vld1q_s32(q + 4), vld1q_s32(q + 8), vld1q_s32(q + 12) };
}
INLINE grids grid_load(const uint8_t *p) {
    const scales s = scales_load(p);
    const int32x4_t mask = vdupq_n_s32(3);
    return (grids){ vandq_s32(s.a, mask), vandq_s32(s.b, mask), vandq_s32(s.c, mask), vandq_s32(s.d, mask) };
}
INLINE int8x16_t low_code(table t, int8x16_t x) { return vqtbl1q_s8(t, vandq_u8(vreinterpretq_u8_s8(x), vdupq_n_u8(15))); }
INLINE int8x16_t high_code(table t, int8x16_t x) { return vqtbl1q_s8(t, vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }
INLINE line codes_low(table t, line x, grids grid) { (void)grid; return (line){ low_code(t, x.a), low_code(t, x.b), low_code(t, x.c), low_code(t, x.d) }; }
INLINE line codes_high(table t, line x, grids grid) { (void)grid; return (line){ high_code(t, x.a), high_code(t, x.b), high_code(t, x.c), high_code(t, x.d) }; }
INLINE int8x16_t on_grid(int8x16_t codes, int32x4_t grid) { return vaddq_s8(codes, vreinterpretq_s8_s32(vmulq_n_s32(grid, 0x01010101))); }
INLINE void codes_store(uint8_t *p, line x, grids grid) {
    line_store(p, (line){ on_grid(x.a, grid.a), on_grid(x.b, grid.b), on_grid(x.c, grid.c), on_grid(x.d, grid.d) });
}
INLINE void dots_starts(const int8_t *x, int32_t starts[2]) { starts[0] = vaddlvq_s8(vld1q_s8(x)), starts[1] = vaddlvq_s8(vld1q_s8(x + 16)); }
INLINE dots dots_from(int32_t start, grids grid, const int expanded) {
    if (expanded) return ints_zero();
    const int32x2_t x = lane_s32(start);
    return (dots){ vmulq_lane_s32(grid.a, x, 0), vmulq_lane_s32(grid.b, x, 0), vmulq_lane_s32(grid.c, x, 0), vmulq_lane_s32(grid.d, x, 0) };
}
INLINE dots dots_add(dots d, line codes, int32_t inputs) { return ints_dot(d, codes, inputs); }
INLINE scaled scaled_first(dots d, scales s) { return (scaled){ vmulq_s32(d.a, s.a), vmulq_s32(d.b, s.b), vmulq_s32(d.c, s.c), vmulq_s32(d.d, s.d) }; }
INLINE scaled scaled_add(scaled w, dots d, scales s) {
    return (scaled){ vmlaq_s32(w.a, d.a, s.a), vmlaq_s32(w.b, d.b, s.b), vmlaq_s32(w.c, d.c, s.c), vmlaq_s32(w.d, d.d, s.d) };
}
INLINE v16 scaled_float(scaled w) { return ints_float(w); }

// ---- 8-bit codes: an input is 128 h + l with h and l in int8: two sums of products of bytes. With many rows one follows the other, so that
// the registers suffice: all lines are multiplied with h, the sums shifted, all lines multiplied with l.

enum { WIDE_PARTS = 2, EXPANDED_LINE_Q8 = 64 };
INLINE int wide_passes(const int T) { return T > 3; }
typedef line wide;
typedef struct { ints h, l; } dots8;
INLINE int8x16_t without_offset(int8x16_t x) { return veorq_s8(x, vdupq_n_s8(-128)); }
INLINE wide wide_load(const uint8_t *p, const int part) {
    (void)part;
    const line x = line_load(p);
    return (wide){ without_offset(x.a), without_offset(x.b), without_offset(x.c), without_offset(x.d) };
}
INLINE void wide_expand(uint8_t *to, const uint8_t *p) { line_store(to, wide_load(p, 0)); }
INLINE wide wide_reload(const uint8_t *p, const int part) { (void)part; return line_load(p); }
INLINE void pack8(const int16_t *x, int32_t *words) {
    const int16x8_t v = vld1q_s16(x), w = vld1q_s16(x + 8), half = vdupq_n_s16(64);
    const int16x8_t vh = vshrq_n_s16(vaddq_s16(v, half), 7), wh = vshrq_n_s16(vaddq_s16(w, half), 7);
    const int32x4_t high = vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(vh), vmovn_s16(wh)));
    const int32x4_t low = vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(vsubq_s16(v, vshlq_n_s16(vh, 7))), vmovn_s16(vsubq_s16(w, vshlq_n_s16(wh, 7)))));
    vst1q_s32(words, vzip1q_s32(high, low)), vst1q_s32(words + 4, vzip2q_s32(high, low));
}
INLINE ints ints_times_128_plus(ints h, ints l) {
    return (ints){ vaddq_s32(vshlq_n_s32(h.a, 7), l.a), vaddq_s32(vshlq_n_s32(h.b, 7), l.b),
                   vaddq_s32(vshlq_n_s32(h.c, 7), l.c), vaddq_s32(vshlq_n_s32(h.d, 7), l.d) };
}
INLINE dots8 dots8_start(int32_t sum, const int expanded) { (void)sum, (void)expanded; return (dots8){ ints_zero(), ints_zero() }; }
INLINE dots8 dots8_next(dots8 d) { return (dots8){ ints_zero(), ints_times_128_plus(d.h, d.l) }; }
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, int height, const int part) {
    return part ? (dots8){ d.h, ints_dot(d.l, w, inputs[height]) } : (dots8){ ints_dot(d.h, w, inputs[0]), d.l };
}
INLINE v16 dots8_float(dots8 d) { return ints_float(ints_times_128_plus(d.h, d.l)); }
INLINE v16 v16_load_int8(const uint8_t *p) { return ints_float(scales_load(p)); }
#endif
