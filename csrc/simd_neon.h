// SPDX-License-Identifier: MIT
// simd_neon.h - the vector vocabulary (see simd_scalar.h) for NEON: four registers of 4 floats or 4 rows each. With the dot product
// extension, sums of products of bytes are one instruction; with i8mm one instruction makes them for two rows of inputs.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <arm_neon.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#include "simd_rows.h"
#endif

typedef struct { float32x4_t a, b, c, d; } v16;   // lanes 0..3, 4..7, 8..11, 12..15
enum {
    SUMS_IN_FLIGHT = 6,                // 24 of 32 registers
    LINES_IN_FLIGHT = 1, LINES_IN_FLIGHT_Q8 = 1, SUMS_KEPT = 2, SUMS_HELD = 2,
    EXPAND_ROWS_F16 = 30, EXPAND_ROWS_BF16 = 30,   // 4 of 28 instructions less
#if defined(__ARM_FEATURE_MATMUL_INT8)
    EXPAND_ROWS = 5, EXPAND_ROWS_Q8 = 4,
#else
    EXPAND_ROWS = 8, EXPAND_ROWS_Q8 = 6,
#endif
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
typedef ints scaled, scales, grids, row_dots;

INLINE line line_load(const uint8_t *p) {
    const int8_t *q = (const int8_t *)p;
    return (line){ vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48) };
}
INLINE void line_store(uint8_t *p, line x) {
    int8_t *q = (int8_t *)p;
    vst1q_s8(q, x.a), vst1q_s8(q + 16, x.b), vst1q_s8(q + 32, x.c), vst1q_s8(q + 48, x.d);
}
INLINE ints ints_set1(int32x4_t x) { return (ints){ x, x, x, x }; }
INLINE ints ints_zero(void) { return ints_set1(vdupq_n_s32(0)); }
INLINE v16 ints_float(ints w) { return (v16){ vcvtq_f32_s32(w.a), vcvtq_f32_s32(w.b), vcvtq_f32_s32(w.c), vcvtq_f32_s32(w.d) }; }
INLINE ints ints_times_128_plus(ints h, ints l) {
    return (ints){ vaddq_s32(vshlq_n_s32(h.a, 7), l.a), vaddq_s32(vshlq_n_s32(h.b, 7), l.b),
                   vaddq_s32(vshlq_n_s32(h.c, 7), l.c), vaddq_s32(vshlq_n_s32(h.d, 7), l.d) };
}

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

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Sums of two input rows: a register holds (code row 0: input rows 0, 1; code row 1: input rows 0, 1). `zip` takes two lines, 8 columns, apart
// into code rows 0, 1 of each 4 and code rows 2, 3; `unzip` gives one input row's sums in order. The words of two columns and
// two rows lie together. Of an odd number of rows the last has a place beside it that is computed and not used.
typedef struct { ints first, second; } pairs;

INLINE int dots_rows(const int expanded) { return expanded ? 2 : 1; }
INLINE int dots8_rows(const int T) { return T > 1 ? 2 : 1; }
INLINE int word_place(int word, const int T, int t) { return (word & ~1) * T + 2 * t + (word & 1); }

INLINE int8x16_t zip_half(int8x16_t x, int8x16_t y, const int half) {
    const int32x4_t v = vreinterpretq_s32_s8(x), w = vreinterpretq_s32_s8(y);
    return vreinterpretq_s8_s32(half ? vzip2q_s32(v, w) : vzip1q_s32(v, w));
}
INLINE line zip(line x, line y, const int half) {
    return (line){ zip_half(x.a, y.a, half), zip_half(x.b, y.b, half), zip_half(x.c, y.c, half), zip_half(x.d, y.d, half) };
}
INLINE int32x4_t unzip_half(int32x4_t x, int32x4_t y, const int r) { return r ? vuzp2q_s32(x, y) : vuzp1q_s32(x, y); }
INLINE ints unzip(pairs p, const int r) {
    return (ints){ unzip_half(p.first.a, p.second.a, r), unzip_half(p.first.b, p.second.b, r),
                   unzip_half(p.first.c, p.second.c, r), unzip_half(p.first.d, p.second.d, r) };
}
// Two words of row t, and of row t + 1 if there is one.
INLINE int32x4_t two_rows(const int32_t *p, const int rows_left) {
    return rows_left > 1 ? vld1q_s32(p) : vcombine_s32(vld1_s32(p), vdup_n_s32(0));
}
INLINE ints ints_mmla(ints sum, line codes, int32x4_t inputs) {
    const int8x16_t x = vreinterpretq_s8_s32(inputs);
    return (ints){ vmmlaq_s32(sum.a, codes.a, x), vmmlaq_s32(sum.b, codes.b, x), vmmlaq_s32(sum.c, codes.c, x), vmmlaq_s32(sum.d, codes.d, x) };
}
INLINE pairs pairs_mmla(pairs p, line codes, int32x4_t inputs, const int half) {
    return half ? (pairs){ p.first, ints_mmla(p.second, codes, inputs) } : (pairs){ ints_mmla(p.first, codes, inputs), p.second };
}
#endif

// ---- 4-bit codes. The grid is no part of them in a tile: its share, grid * sum of the inputs, is added as a whole, so that it
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
INLINE int8x16_t code(table t, int8x16_t x, int32x4_t grid, const int high, const int expanded) {
    const uint8x16_t nibbles = vreinterpretq_u8_s8(x);
    const int8x16_t codes = vqtbl1q_s8(t, high ? vshrq_n_u8(nibbles, 4) : vandq_u8(nibbles, vdupq_n_u8(15)));
    return expanded ? vaddq_s8(codes, vreinterpretq_s8_s32(vmulq_n_s32(grid, 0x01010101))) : codes;
}
INLINE line nibbles_of(table t, line x, grids g, const int high, const int expanded) {
    return (line){ code(t, x.a, g.a, high, expanded), code(t, x.b, g.b, high, expanded), code(t, x.c, g.c, high, expanded), code(t, x.d, g.d, high, expanded) };
}
INLINE void dots_starts(const int8_t *x, int32_t starts[2]) { starts[0] = vaddlvq_s8(vld1q_s8(x)), starts[1] = vaddlvq_s8(vld1q_s8(x + 16)); }
INLINE ints share_of_grid(grids grid, int32_t inputs) {
    const int32x2_t x = lane_s32(inputs);
    return (ints){ vmulq_lane_s32(grid.a, x, 0), vmulq_lane_s32(grid.b, x, 0), vmulq_lane_s32(grid.c, x, 0), vmulq_lane_s32(grid.d, x, 0) };
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Only expanded strips are worth the zips. Sums of one row are the first half alone.
typedef pairs dots;
INLINE line codes_of(table t, line x, grids grid, const int part, const int expanded) {
    return expanded ? zip(nibbles_of(t, x, grid, 0, 1), nibbles_of(t, x, grid, 1, 1), part) : nibbles_of(t, x, grid, part, 0);
}
INLINE dots dots_from(int32_t start, grids grid, const int expanded) { return (dots){ expanded ? ints_zero() : share_of_grid(grid, start), ints_zero() }; }
INLINE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    if (!expanded) return (dots){ ints_dot(d.first, codes, inputs[word_place(word, T, t)]), d.second };
    return pairs_mmla(d, codes, two_rows(inputs + word_place(word & ~1, T, t), T - t), word & 1);
}
INLINE row_dots dots_row(dots d, const int r, const int expanded) { return expanded ? unzip(d, r) : d.first; }
#else
typedef ints dots;
INLINE line codes_of(table t, line x, grids grid, const int part, const int expanded) { return nibbles_of(t, x, grid, part, expanded); }
INLINE dots dots_from(int32_t start, grids grid, const int expanded) { return expanded ? ints_zero() : share_of_grid(grid, start); }
INLINE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    (void)expanded;
    return ints_dot(d, codes, inputs[word_place(word, T, t)]);
}
INLINE row_dots dots_row(dots d, const int r, const int expanded) { (void)r, (void)expanded; return d; }
#endif
INLINE scaled scaled_first(row_dots d, scales s) { return (scaled){ vmulq_s32(d.a, s.a), vmulq_s32(d.b, s.b), vmulq_s32(d.c, s.c), vmulq_s32(d.d, s.d) }; }
INLINE scaled scaled_add(scaled w, row_dots d, scales s) {
    return (scaled){ vmlaq_s32(w.a, d.a, s.a), vmlaq_s32(w.b, d.b, s.b), vmlaq_s32(w.c, d.c, s.c), vmlaq_s32(w.d, d.d, s.d) };
}
INLINE v16 scaled_float(scaled w) { return ints_float(w); }

// ---- 8-bit codes: an input is 128 h + l with h and l in int8: two sums of products of bytes. With many rows one follows the other, so that
// the registers suffice: all lines are multiplied with h, the sums shifted, all lines multiplied with l.

enum { WIDE_PARTS = 2, EXPANDED_LINE_Q8 = 64 };
typedef line wide;
INLINE v16 v16_load_int8(const uint8_t *p) { return ints_float(scales_load(p)); }
INLINE wide wide_reload(const uint8_t *group, const int l, const int part) { (void)part; return line_load(group + l * EXPANDED_LINE_Q8); }
// 16 numbers as words of 4 bytes.
INLINE int32x4_t narrow_words(int16x8_t v, int16x8_t w) { return vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(v), vmovn_s16(w))); }
INLINE void pack8(const int16_t *x, int32_t *words) {
    const int16x8_t v = vld1q_s16(x), w = vld1q_s16(x + 8), half = vdupq_n_s16(64);
    const int16x8_t vh = vshrq_n_s16(vaddq_s16(v, half), 7), wh = vshrq_n_s16(vaddq_s16(w, half), 7);
    const int32x4_t high = narrow_words(vh, wh), low = narrow_words(vsubq_s16(v, vshlq_n_s16(vh, 7)), vsubq_s16(w, vshlq_n_s16(wh, 7)));
#if defined(__ARM_FEATURE_MATMUL_INT8)   // two columns' h, then their l
    vst1q_s32(words, vcombine_s32(vget_low_s32(high), vget_low_s32(low)));
    vst1q_s32(words + 4, vcombine_s32(vget_high_s32(high), vget_high_s32(low)));
#else
    vst1q_s32(words, vzip1q_s32(high, low)), vst1q_s32(words + 4, vzip2q_s32(high, low));
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Bytes are multiplied as they lie in the file, unsigned; sums start at -128 * sum of the inputs, as -sum before the shift. A single row's h and l are
// multiplied like two rows. Half l & 1 of two lines stands for line l.
typedef struct { pairs h, l; } dots8;
INLINE int wide_passes(const int T) { return T > 2; }
INLINE wide wide_load(const uint8_t *group, const int l, const int part) {
    (void)part;
    const uint8_t *p = group + (l & ~1) * LINE_BYTES;
    return zip(line_load(p), line_load(p + LINE_BYTES), l & 1);
}
INLINE void wide_expand(uint8_t *to, const uint8_t *group, const int l) { line_store(to + l * EXPANDED_LINE_Q8, wide_load(group, l, 0)); }
INLINE int32x4_t usmmla(int32x4_t sum, int8x16_t codes, int32x4_t inputs) { return vusmmlaq_s32(sum, vreinterpretq_u8_s8(codes), vreinterpretq_s8_s32(inputs)); }
INLINE ints ints_usmmla(ints sum, wide w, int32x4_t inputs) {
    return (ints){ usmmla(sum.a, w.a, inputs), usmmla(sum.b, w.b, inputs), usmmla(sum.c, w.c, inputs), usmmla(sum.d, w.d, inputs) };
}
INLINE pairs pairs_usmmla(pairs p, wide w, int32x4_t inputs, const int half) {
    return half ? (pairs){ p.first, ints_usmmla(p.second, w, inputs) } : (pairs){ ints_usmmla(p.first, w, inputs), p.second };
}
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) {
    (void)expanded;
    const int32x2_t two = vneg_s32(T - t > 1 ? vld1_s32(sums + t) : vset_lane_s32(sums[t], vdup_n_s32(0), 0));
    const ints start = ints_set1(vcombine_s32(two, two));
    return (dots8){ { start, start }, { ints_zero(), ints_zero() } };
}
INLINE dots8 dots8_next(dots8 d) {
    return (dots8){ { ints_zero(), ints_zero() }, { ints_times_128_plus(d.h.first, d.l.first), ints_times_128_plus(d.h.second, d.l.second) } };
}
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    if (T == 1) return part ? d : (dots8){ pairs_usmmla(d.h, w, vld1q_s32(inputs + word_place(2 * (l & ~1), T, t)), l & 1), d.l };
    const int32x4_t x = two_rows(inputs + word_place(2 * (l & ~1) + 2 * part, T, t), T - t);
    return part ? (dots8){ d.h, pairs_usmmla(d.l, w, x, l & 1) } : (dots8){ pairs_usmmla(d.h, w, x, l & 1), d.l };
}
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    if (T == 1) return ints_float(ints_times_128_plus(unzip(d.h, 0), unzip(d.h, 1)));
    return ints_float(ints_times_128_plus(unzip(d.h, row), unzip(d.l, row)));
}
#else
typedef struct { ints h, l; } dots8;
INLINE int wide_passes(const int T) { return T > 3; }
INLINE int8x16_t without_offset(int8x16_t x) { return veorq_s8(x, vdupq_n_s8(-Q8_OFFSET)); }
INLINE wide wide_load(const uint8_t *group, const int l, const int part) {
    (void)part;
    const line x = line_load(group + l * LINE_BYTES);
    return (wide){ without_offset(x.a), without_offset(x.b), without_offset(x.c), without_offset(x.d) };
}
INLINE void wide_expand(uint8_t *to, const uint8_t *group, const int l) { line_store(to + l * EXPANDED_LINE_Q8, wide_load(group, l, 0)); }
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) {
    (void)sums, (void)T, (void)t, (void)expanded;
    return (dots8){ ints_zero(), ints_zero() };
}
INLINE dots8 dots8_next(dots8 d) { return (dots8){ ints_zero(), ints_times_128_plus(d.h, d.l) }; }
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    const int32_t x = inputs[word_place(2 * l + part, T, t)];
    return part ? (dots8){ d.h, ints_dot(d.l, w, x) } : (dots8){ ints_dot(d.h, w, x), d.l };
}
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    (void)T, (void)row;
    return ints_float(ints_times_128_plus(d.h, d.l));
}
#endif
#endif
