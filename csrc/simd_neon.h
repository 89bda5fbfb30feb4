// SPDX-License-Identifier: MIT
// simd_neon.h - the SIMD layer for NEON: a v16 is four registers of 4 floats, a line four registers of 4 rows. With
// the dot product extension, sdot computes dot products of bytes; with i8mm, smmla and usmmla do so for two input
// rows at once. simd_scalar.h specifies each operation.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <arm_neon.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#include "simd_panel_layout.h"
#endif

typedef struct { float32x4_t a, b, c, d; } v16;   // lanes 0..3, 4..7, 8..11, 12..15
enum {
    FLOAT_TILE_ACCS = 6,   // 24 of 32 registers
    INT8_TILE_ACCS = 1, INT16_TILE_ACCS = 1, MAX_LIVE_SUMS = 2, MAX_CARRIED_SUMS = 2,
    UNPACK_ABOVE_F16 = 30, UNPACK_ABOVE_BF16 = 30,   // saves 4 of 28 instructions
#if defined(__ARM_FEATURE_MATMUL_INT8)
    UNPACK_ABOVE_NIBBLES = 5, UNPACK_ABOVE_BYTES = 4,
#else
    UNPACK_ABOVE_NIBBLES = 8, UNPACK_ABOVE_BYTES = 6,
#endif
};

#define MAP(f, x) (v16){ f(x.a), f(x.b), f(x.c), f(x.d) }
#define MAP2(f, x, y) (v16){ f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d) }
#define MAP3(f, x, y, z) (v16){ f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d) }

// A scalar in lane 0, for multiplications by an element. This is a plain load; a broadcast would cost another vector
// instruction. (GCC broadcasts in every form but this one. Clang turns a broadcast into an element.)
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
INLINE v16 v16_load(const float *p) {
    return (v16){ vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12) };
}
INLINE void v16_store(float *p, v16 x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
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
INLINE v16 v16_load_f16(const uint16_t *p) {
    return (v16){ load_f16(p), load_f16(p + 4), load_f16(p + 8), load_f16(p + 12) };
}
INLINE void store_f16(uint16_t *p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE void v16_store_f16(uint16_t *p, v16 x) {
    store_f16(p, x.a), store_f16(p + 4, x.b), store_f16(p + 8, x.c), store_f16(p + 12, x.d);
}
INLINE v16 v16_load_bf16_permuted(const uint16_t *p) {
    const uint16x8_t x = vld1q_u16(p), y = vld1q_u16(p + 8), zero = vdupq_n_u16(0);
    return (v16){ vreinterpretq_f32_u16(vzip1q_u16(zero, x)), vreinterpretq_f32_u16(vzip2q_u16(zero, x)),
                  vreinterpretq_f32_u16(vzip1q_u16(zero, y)), vreinterpretq_f32_u16(vzip2q_u16(zero, y)) };
}
INLINE v16 v16_unpermute(v16 x) { return x; }

INLINE v16 v16_add(v16 x, v16 y) { return MAP2(vaddq_f32, x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return MAP2(vsubq_f32, x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return MAP2(vmulq_f32, x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return MAP2(vdivq_f32, x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return MAP3(vfmaq_f32, z, x, y); }
INLINE v16 v16_fma_scalar(v16 x, float y, v16 z) {
    const float32x2_t v = lane_f32(y);
    return (v16){ vfmaq_lane_f32(z.a, x.a, v, 0), vfmaq_lane_f32(z.b, x.b, v, 0),
                  vfmaq_lane_f32(z.c, x.c, v, 0), vfmaq_lane_f32(z.d, x.d, v, 0) };
}
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return MAP3(vfmsq_f32, z, x, y); }
// Not vmaxq and vminq, which return NaN if either operand is NaN, and order zeros by sign.
INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE v16 v16_max(v16 x, v16 y) { return MAP2(larger, x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return MAP2(smaller, x, y); }
INLINE v16 v16_abs(v16 x) { return MAP(vabsq_f32, x); }
INLINE float32x4_t zero_below(float32x4_t x, float32x4_t y, float32x4_t low) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, low)));
}
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) { return MAP3(zero_below, x, y, low); }
INLINE float32x4_t blend_n(float32x4_t x, float32x4_t y, int n) {
    const int32x4_t lanes = { 0, 1, 2, 3 };
    return vbslq_f32(vcgtq_s32(vdupq_n_s32(n), lanes), x, y);
}
INLINE v16 v16_blend_n(v16 x, v16 y, int n) {
    return (v16){ blend_n(x.a, y.a, n), blend_n(x.b, y.b, n - 4), blend_n(x.c, y.c, n - 8), blend_n(x.d, y.d, n - 12) };
}
INLINE float32x4_t exp2_shifted(float32x4_t t) {
    return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23), vdupq_n_s32(0x3f800000)));
}
INLINE v16 v16_exp2_shifted(v16 t) { return MAP(exp2_shifted, t); }

INLINE float v16_reduce_add(v16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float v16_reduce_max(v16 x) {
    const float32x4_t four = larger(larger(x.a, x.c), larger(x.b, x.d)), two = larger(four, vextq_f32(four, four, 2));
    const float first = vgetq_lane_f32(two, 0), second = vgetq_lane_f32(two, 1);
    return first > second ? first : second;
}

INLINE int16x8_t to_int16(float32x4_t x, float32x4_t y) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x)), vqmovn_s32(vcvtnq_s32_f32(y)));
}
INLINE void v16_store_int8(int8_t *p, v16 x) {
    vst1q_s8(p, vcombine_s8(vqmovn_s16(to_int16(x.a, x.b)), vqmovn_s16(to_int16(x.c, x.d))));
}
INLINE void v16_store_int16(int16_t *p, v16 x) {
    vst1q_s16(p, to_int16(x.a, x.b)), vst1q_s16(p + 8, to_int16(x.c, x.d));
}

// ---- lines and integer accumulators: 4 rows per register

typedef struct { int8x16_t a, b, c, d; } line;
typedef struct { int32x4_t a, b, c, d; } ints;
typedef ints int8_scaled, block_scales, grid_offsets, int8_row_acc;

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
INLINE v16 ints_to_float(ints w) {
    return (v16){ vcvtq_f32_s32(w.a), vcvtq_f32_s32(w.b), vcvtq_f32_s32(w.c), vcvtq_f32_s32(w.d) };
}
INLINE ints ints_times_128_plus(ints h, ints l) {
    return (ints){ vaddq_s32(vshlq_n_s32(h.a, 7), l.a), vaddq_s32(vshlq_n_s32(h.b, 7), l.b),
                   vaddq_s32(vshlq_n_s32(h.c, 7), l.c), vaddq_s32(vshlq_n_s32(h.d, 7), l.d) };
}

// sum + the dot product of each row's 4 codes with 4 inputs. Without sdot, pairs of products are added in int16: 2 *
// 127 * 127 fits.
INLINE int32x4_t dot4(int32x4_t sum, int8x16_t codes, int32x2_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_lane_s32(sum, codes, vreinterpret_s8_s32(inputs), 0);
#else
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_lane_s32(inputs, 0));
    return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(x)), vmull_high_s8(codes, x)));
#endif
}
INLINE ints ints_dot(ints sum, line codes, int32_t inputs) {
    const int32x2_t x = lane_s32(inputs);
    return (ints){ dot4(sum.a, codes.a, x), dot4(sum.b, codes.b, x), dot4(sum.c, codes.c, x), dot4(sum.d, codes.d, x) };
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Accumulators of two input rows. smmla multiplies two code rows by two input rows over 8 columns, so a register
// holds (code row 0: input rows 0, 1; code row 1: input rows 0, 1). `zip` splits two lines, 8 columns, into code rows
// 0, 1 of each 4 (half 0) and code rows 2, 3 (half 1). `unzip` extracts one input row's sums in order. In a panel,
// the words of two rows at two adjacent column positions are adjacent. If T is odd, a partner of the last row is
// computed and ignored.
typedef struct { ints first, second; } int_pairs;

INLINE int int8_rows_per_acc(const int unpacked) { return unpacked ? 2 : 1; }
INLINE int int16_rows_per_acc(const int T) { return T > 1 ? 2 : 1; }
INLINE int word_index(int word, const int T, int t) { return (word & ~1) * T + 2 * t + (word & 1); }

INLINE int8x16_t zip_half(int8x16_t x, int8x16_t y, const int half) {
    const int32x4_t v = vreinterpretq_s32_s8(x), w = vreinterpretq_s32_s8(y);
    return vreinterpretq_s8_s32(half ? vzip2q_s32(v, w) : vzip1q_s32(v, w));
}
INLINE line zip(line x, line y, const int half) {
    return (line){ zip_half(x.a, y.a, half), zip_half(x.b, y.b, half), zip_half(x.c, y.c, half),
                   zip_half(x.d, y.d, half) };
}
INLINE int32x4_t unzip_half(int32x4_t x, int32x4_t y, const int r) { return r ? vuzp2q_s32(x, y) : vuzp1q_s32(x, y); }
INLINE ints unzip(int_pairs p, const int r) {
    return (ints){ unzip_half(p.first.a, p.second.a, r), unzip_half(p.first.b, p.second.b, r),
                   unzip_half(p.first.c, p.second.c, r), unzip_half(p.first.d, p.second.d, r) };
}
// Two words of row t and two of row t + 1, or zeros if row t is the last.
INLINE int32x4_t load_two_rows(const int32_t *p, const int rows_left) {
    return rows_left > 1 ? vld1q_s32(p) : vcombine_s32(vld1_s32(p), vdup_n_s32(0));
}
INLINE ints ints_mmla(ints sum, line codes, int32x4_t inputs) {
    const int8x16_t x = vreinterpretq_s8_s32(inputs);
    return (ints){ vmmlaq_s32(sum.a, codes.a, x), vmmlaq_s32(sum.b, codes.b, x), vmmlaq_s32(sum.c, codes.c, x),
                   vmmlaq_s32(sum.d, codes.d, x) };
}
INLINE int_pairs pairs_mmla(int_pairs p, line codes, int32x4_t inputs, const int half) {
    return half ? (int_pairs){ p.first, ints_mmla(p.second, codes, inputs) }
                : (int_pairs){ ints_mmla(p.first, codes, inputs), p.second };
}
#endif

// ---- q4 and q4s. Packed codes are decoded without their grid. Its contribution, offset * (sum of the inputs), is the
// accumulator's initial value, so it costs nothing per code: the compensation terms are the sums of the inputs.
// Unpacked codes include the grid.

#define SIMD_GROUP_SUMS
typedef int8x16_t lut;
enum { INT8_BIAS = 0 };
INLINE lut lut_load(const int8_t *codebook, const int bias) {
    return vaddq_s8(vld1q_s8(codebook), vdupq_n_s8((int8_t)bias));
}
INLINE block_scales block_scales_load(const uint8_t *p) {
    const int8x16_t s = vld1q_s8((const int8_t *)p);
    const int16x8_t low = vmovl_s8(vget_low_s8(s)), high = vmovl_high_s8(s);
    return (block_scales){ vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
                           vmovl_high_s16(high) };
}
INLINE v16 v16_load_int8(const uint8_t *p) { return ints_to_float(block_scales_load(p)); }
// For e >= 2, the exponent field is e - 1. The bits of the subnormal 2^(e - 128) are larger only for e = 0 and 1.
INLINE float32x4_t from_e8m0(uint16x4_t x) {
    const int32x4_t e = vreinterpretq_s32_u32(vmovl_u16(x)), one = vdupq_n_s32(1);
    return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(e, one), 23), vshlq_n_s32(vaddq_s32(e, one), 21)));
}
INLINE v16 v16_load_e8m0(const uint8_t *p) {
    const uint8x16_t e = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(e)), high = vmovl_high_u8(e);
    return (v16){ from_e8m0(vget_low_u16(low)), from_e8m0(vget_high_u16(low)), from_e8m0(vget_low_u16(high)),
                  from_e8m0(vget_high_u16(high)) };
}
INLINE void block_scales_store(uint8_t *p, block_scales s) {
    int32_t *q = (int32_t *)(void *)p;
    vst1q_s32(q, s.a), vst1q_s32(q + 4, s.b), vst1q_s32(q + 8, s.c), vst1q_s32(q + 12, s.d);
}
INLINE block_scales block_scales_load_unpacked(const uint8_t *p) {
    const int32_t *q = (const int32_t *)(const void *)p;
    return (block_scales){ vld1q_s32(q), vld1q_s32(q + 4), vld1q_s32(q + 8), vld1q_s32(q + 12) };
}
INLINE grid_offsets grid_offsets_load(const uint8_t *p) {
    const block_scales s = block_scales_load(p);
    const int32x4_t mask = vdupq_n_s32(3);
    return (grid_offsets){ vandq_s32(s.a, mask), vandq_s32(s.b, mask), vandq_s32(s.c, mask), vandq_s32(s.d, mask) };
}
INLINE int8x16_t decode_nibbles(lut t, int8x16_t x, int32x4_t grid, const int high, const int unpacked) {
    const uint8x16_t nibbles = vreinterpretq_u8_s8(x);
    const int8x16_t codes = vqtbl1q_s8(t, high ? vshrq_n_u8(nibbles, 4) : vandq_u8(nibbles, vdupq_n_u8(15)));
    return unpacked ? vaddq_s8(codes, vreinterpretq_s8_s32(vmulq_n_s32(grid, 0x01010101))) : codes;
}
INLINE line decode_line(lut t, line x, grid_offsets g, const int high, const int unpacked) {
    return (line){ decode_nibbles(t, x.a, g.a, high, unpacked), decode_nibbles(t, x.b, g.b, high, unpacked),
                   decode_nibbles(t, x.c, g.c, high, unpacked), decode_nibbles(t, x.d, g.d, high, unpacked) };
}
INLINE void int8_compensation(const int8_t *x, int32_t terms[2]) {
    terms[0] = vaddlvq_s8(vld1q_s8(x)), terms[1] = vaddlvq_s8(vld1q_s8(x + 16));
}
INLINE ints grid_times_sum(grid_offsets grid, int32_t input_sum) {
    const int32x2_t x = lane_s32(input_sum);
    return (ints){ vmulq_lane_s32(grid.a, x, 0), vmulq_lane_s32(grid.b, x, 0), vmulq_lane_s32(grid.c, x, 0),
                   vmulq_lane_s32(grid.d, x, 0) };
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Zipping pays off only in unpacked strips. Packed codes use sdot, with one row per accumulator, in `first` alone.
typedef int_pairs int8_acc;
INLINE line int8_codes(lut t, line x, grid_offsets grid, const int half, const int unpacked) {
    return unpacked ? zip(decode_line(t, x, grid, 0, 1), decode_line(t, x, grid, 1, 1), half)
                    : decode_line(t, x, grid, half, 0);
}
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    return (int8_acc){ unpacked ? ints_zero() : grid_times_sum(grid, compensation), ints_zero() };
}
INLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                             const int unpacked) {
    if (!unpacked) return (int8_acc){ ints_dot(d.first, codes, inputs[word_index(word, T, t)]), d.second };
    return pairs_mmla(d, codes, load_two_rows(inputs + word_index(word & ~1, T, t), T - t), word & 1);
}
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) {
    return unpacked ? unzip(d, r) : d.first;
}
#else
typedef ints int8_acc;
INLINE line int8_codes(lut t, line x, grid_offsets grid, const int half, const int unpacked) {
    return decode_line(t, x, grid, half, unpacked);
}
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    return unpacked ? ints_zero() : grid_times_sum(grid, compensation);
}
INLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                             const int unpacked) {
    (void)unpacked;
    return ints_dot(d, codes, inputs[word_index(word, T, t)]);
}
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) { (void)r, (void)unpacked; return d; }
#endif
INLINE int8_scaled int8_scale(int8_row_acc d, block_scales s) {
    return (int8_scaled){ vmulq_s32(d.a, s.a), vmulq_s32(d.b, s.b), vmulq_s32(d.c, s.c), vmulq_s32(d.d, s.d) };
}
INLINE int8_scaled int8_scale_add(int8_scaled w, int8_row_acc d, block_scales s) {
    return (int8_scaled){ vmlaq_s32(w.a, d.a, s.a), vmlaq_s32(w.b, d.b, s.b), vmlaq_s32(w.c, d.c, s.c),
                          vmlaq_s32(w.d, d.d, s.d) };
}
INLINE v16 int8_scaled_to_float(int8_scaled w) { return ints_to_float(w); }

// ---- int16 inputs: an input is 128 h + l with h and l in int8, so there are two dot products of bytes. With many rows
// they run one after the other to save registers: all lines are multiplied by h (part 0), the sums are shifted, then
// all lines are multiplied by l (part 1). Sums of biases are split likewise: bias = 128 (bias / 128) + bias % 128.

enum { INT16_PARTS = 2, INT16_UNPACKED_LINE_BYTES = 64 };
typedef line int16_codes;
INLINE int8x16_t nibbles(int8x16_t x, const int half) {
    const uint8x16_t v = vreinterpretq_u8_s8(x);
    return vreinterpretq_s8_u8(half ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15)));
}
INLINE line line_nibbles(line x, const int half) {
    return (line){ nibbles(x.a, half), nibbles(x.b, half), nibbles(x.c, half), nibbles(x.d, half) };
}
INLINE int8x16_t move_bits(int8x16_t x, const int from, const int mask) {
    const uint8x16_t shifted = vshlq_u8(vreinterpretq_u8_s8(x), vdupq_n_s8((int8_t)(4 - from)));   // < 0: to the right
    return vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8((uint8_t)mask)));
}
INLINE line line_move_bits(line x, const int from, const int mask) {
    return (line){ move_bits(x.a, from, mask), move_bits(x.b, from, mask), move_bits(x.c, from, mask),
                   move_bits(x.d, from, mask) };
}
INLINE line line_insert_bits(line x, line other, const int from, const int mask) {
    const line y = line_move_bits(other, from, mask);
    return (line){ vorrq_s8(x.a, y.a), vorrq_s8(x.b, y.b), vorrq_s8(x.c, y.c), vorrq_s8(x.d, y.d) };
}
INLINE int8x16_t lookup(lut t, int8x16_t x) { return vqtbl1q_s8(t, vreinterpretq_u8_s8(x)); }
INLINE line line_lookup(lut t, line x) {
    return (line){ lookup(t, x.a), lookup(t, x.b), lookup(t, x.c), lookup(t, x.d) };
}
INLINE line line_add(line x, const int addend) {
    const int8x16_t y = vdupq_n_s8((int8_t)addend);
    return (line){ vaddq_s8(x.a, y), vaddq_s8(x.b, y), vaddq_s8(x.c, y), vaddq_s8(x.d, y) };
}
INLINE int16_codes int16_codes_load_unpacked(const uint8_t *group, const int l, const int part) {
    (void)part;
    return line_load(group + l * INT16_UNPACKED_LINE_BYTES);
}
// Narrows 16 int16 to int8: four words of 4 bytes.
INLINE int32x4_t narrow_to_words(int16x8_t v, int16x8_t w) {
    return vreinterpretq_s32_s8(vcombine_s8(vmovn_s16(v), vmovn_s16(w)));
}
INLINE void int16_pack_words(const int16_t *x, int32_t *words) {
    const int16x8_t v = vld1q_s16(x), w = vld1q_s16(x + 8), half = vdupq_n_s16(64);
    const int16x8_t vh = vshrq_n_s16(vaddq_s16(v, half), 7), wh = vshrq_n_s16(vaddq_s16(w, half), 7);
    const int32x4_t high = narrow_to_words(vh, wh);
    const int32x4_t low = narrow_to_words(vsubq_s16(v, vshlq_n_s16(vh, 7)), vsubq_s16(w, vshlq_n_s16(wh, 7)));
#if defined(__ARM_FEATURE_MATMUL_INT8)   // h of two column positions, then their l
    vst1q_s32(words, vcombine_s32(vget_low_s32(high), vget_low_s32(low)));
    vst1q_s32(words + 4, vcombine_s32(vget_high_s32(high), vget_high_s32(low)));
#else
    vst1q_s32(words, vzip1q_s32(high, low)), vst1q_s32(words + 4, vzip2q_s32(high, low));
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// usmmla multiplies unsigned codes. A single row's h and l are multiplied like two rows. Line l is represented by half
// l & 1 of two zipped lines.
enum { BYTE_BIAS = 128, UNPACKED_BIAS = 128 };
typedef struct { int_pairs h, l; } int16_acc;
INLINE int int16_part_major(const int T) { return T > 2; }
INLINE line line_from_bytes(line x) { return x; }
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) {
    (void)part;
    return zip(x, y, l & 1);
}
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    line_store(to + l * INT16_UNPACKED_LINE_BYTES, line_add(int16_codes_from(x, y, l, 0), UNPACKED_BIAS - bias));
}
INLINE int32x4_t usmmla(int32x4_t sum, int8x16_t codes, int32x4_t inputs) {
    return vusmmlaq_s32(sum, vreinterpretq_u8_s8(codes), vreinterpretq_s8_s32(inputs));
}
INLINE ints ints_usmmla(ints sum, int16_codes w, int32x4_t inputs) {
    return (ints){ usmmla(sum.a, w.a, inputs), usmmla(sum.b, w.b, inputs), usmmla(sum.c, w.c, inputs),
                   usmmla(sum.d, w.d, inputs) };
}
INLINE int_pairs pairs_usmmla(int_pairs p, int16_codes w, int32x4_t inputs, const int half) {
    return half ? (int_pairs){ p.first, ints_usmmla(p.second, w, inputs) }
                : (int_pairs){ ints_usmmla(p.first, w, inputs), p.second };
}
INLINE int32x2_t load_two_sums(const int32_t *sums, const int T, const int t) {
    return T - t > 1 ? vld1_s32(sums + t) : vset_lane_s32(sums[t], vdup_n_s32(0), 0);
}
INLINE int_pairs pairs_set1(int32x2_t x) {
    const ints sums = ints_set1(vcombine_s32(x, x));
    return (int_pairs){ sums, sums };
}
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    int32x2_t sums = load_two_sums(plus, T, t);
    if (minus) sums = vsub_s32(sums, load_two_sums(minus, T, t));
    const int32x2_t h = vmul_n_s32(sums, -(bias / 128)), l = vmul_n_s32(sums, -(bias % 128));
    return T == 1 ? (int16_acc){ pairs_set1(vzip1_s32(h, l)), pairs_set1(vdup_n_s32(0)) }
                  : (int16_acc){ pairs_set1(h), pairs_set1(l) };
}
INLINE int16_acc int16_acc_next_part(int16_acc d) {
    return (int16_acc){ { ints_zero(), ints_zero() },
                        { ints_times_128_plus(d.h.first, d.l.first), ints_times_128_plus(d.h.second, d.l.second) } };
}
INLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                               const int T, const int t) {
    if (T == 1)
        return part ? d : (int16_acc){
            pairs_usmmla(d.h, w, vld1q_s32(inputs + word_index(2 * (l & ~1), T, t)), l & 1), d.l };
    const int32x4_t x = load_two_rows(inputs + word_index(2 * (l & ~1) + 2 * part, T, t), T - t);
    return part ? (int16_acc){ d.h, pairs_usmmla(d.l, w, x, l & 1) }
                : (int16_acc){ pairs_usmmla(d.h, w, x, l & 1), d.l };
}
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    if (T == 1) return ints_to_float(ints_times_128_plus(unzip(d.h, 0), unzip(d.h, 1)));
    return ints_to_float(ints_times_128_plus(unzip(d.h, row), unzip(d.l, row)));
}
#else
enum { BYTE_BIAS = 0, UNPACKED_BIAS = 0 };
typedef struct { ints h, l; } int16_acc;
INLINE int int16_part_major(const int T) { return T > 3; }
INLINE line line_from_bytes(line x) { return line_add(x, -Q8_OFFSET); }
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) {
    (void)part;
    return l & 1 ? y : x;
}
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    line_store(to + l * INT16_UNPACKED_LINE_BYTES, line_add(int16_codes_from(x, y, l, 0), UNPACKED_BIAS - bias));
}
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    (void)T;
    const ints start = bias ? ints_set1(vdupq_n_s32(-bias * (minus ? plus[t] - minus[t] : plus[t]))) : ints_zero();
    return (int16_acc){ ints_zero(), start };
}
INLINE int16_acc int16_acc_next_part(int16_acc d) { return (int16_acc){ ints_zero(), ints_times_128_plus(d.h, d.l) }; }
INLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                               const int T, const int t) {
    const int32_t x = inputs[word_index(2 * l + part, T, t)];
    return part ? (int16_acc){ d.h, ints_dot(d.l, w, x) } : (int16_acc){ ints_dot(d.h, w, x), d.l };
}
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    (void)T, (void)row;
    return ints_to_float(ints_times_128_plus(d.h, d.l));
}
#endif

// ---- quantizing

INLINE v16 v16_select_less(v16 x, v16 y, v16 a, v16 b) {
    return (v16){ vbslq_f32(vcltq_f32(x.a, y.a), a.a, b.a), vbslq_f32(vcltq_f32(x.b, y.b), a.b, b.b),
                  vbslq_f32(vcltq_f32(x.c, y.c), a.c, b.c), vbslq_f32(vcltq_f32(x.d, y.d), a.d, b.d) };
}
INLINE v16 v16_sub_exact_product(v16 x, v16 y, v16 z) { return v16_fnma(y, z, x); }

// 16 rows x 2 words.
INLINE int8x16_t words_from_floats(float32x4_t x, float32x4_t y) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(x)), high = vqmovn_s32(vcvtnq_s32_f32(y));
    return vreinterpretq_s8_s16(vcombine_s16(vzip1_s16(low, high), vzip2_s16(low, high)));
}
INLINE line line_from_floats(v16 x, v16 y) {
    return (line){ words_from_floats(x.a, y.a), words_from_floats(x.b, y.b), words_from_floats(x.c, y.c),
                   words_from_floats(x.d, y.d) };
}
INLINE int8x16_t scaled_words(int8x16_t x, int8x16_t y) {
    return vreinterpretq_s8_s16(vqrdmulhq_s16(vreinterpretq_s16_s8(x), vreinterpretq_s16_s8(y)));
}
INLINE line line_scaled(line x, line y) {
    return (line){ scaled_words(x.a, y.a), scaled_words(x.b, y.b), scaled_words(x.c, y.c), scaled_words(x.d, y.d) };
}
typedef struct { uint8x16_t code; int8x16_t first, second, twice; } cells_lut;
INLINE cells_lut cells_lut_load(const struct code_cells *c) {
    return (cells_lut){ vreinterpretq_u8_s8(vld1q_s8(c->code)), vld1q_s8(c->first), vld1q_s8(c->second),
                        vld1q_s8(c->twice) };
}
typedef ints int16_squares;
INLINE int16_squares squares_zero(void) { return ints_zero(); }
INLINE int32x4_t add_word_squares(int32x4_t sum, int16x8_t x, int16x8_t code) {
    x = vsubq_s16(x, code);
    return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(x)), vmull_high_s16(x, x)));
}
// Narrowing saturates.
INLINE int32x4_t add_squares(int32x4_t sum, cells_lut t, int16x8_t x, int16x8_t y) {
    const int8x16_t p = vcombine_s8(vqshrn_n_s16(x, 7), vqshrn_n_s16(y, 7));
    const uint8x16_t cell = vshrq_n_u8(vreinterpretq_u8_s8(p), 4);
    uint8x16_t code = vqtbl1q_u8(t.code, cell);
    code = vsubq_u8(code, vcgtq_s8(p, vqtbl1q_s8(t.first, cell)));
    code = vsubq_u8(code, vcgtq_s8(p, vqtbl1q_s8(t.second, cell)));
    const int8x16_t twice = vqtbl1q_s8(t.twice, code), zero = vdupq_n_s8(0);
    sum = add_word_squares(sum, x, vreinterpretq_s16_s8(vzip1q_s8(zero, twice)));
    return add_word_squares(sum, y, vreinterpretq_s16_s8(vzip2q_s8(zero, twice)));
}
INLINE int16_squares squares_add_nearest(int16_squares sum, cells_lut t, line x, line y) {
    return (int16_squares){ add_squares(sum.a, t, vreinterpretq_s16_s8(x.a), vreinterpretq_s16_s8(y.a)),
                      add_squares(sum.b, t, vreinterpretq_s16_s8(x.b), vreinterpretq_s16_s8(y.b)),
                      add_squares(sum.c, t, vreinterpretq_s16_s8(x.c), vreinterpretq_s16_s8(y.c)),
                      add_squares(sum.d, t, vreinterpretq_s16_s8(x.d), vreinterpretq_s16_s8(y.d)) };
}
INLINE v16 squares_to_floats(int16_squares x) { return ints_to_float(x); }
INLINE unsigned mask_less(float32x4_t x, float32x4_t y) {
    static const uint32_t bits[4] = { 1, 2, 4, 8 };
    return vaddvq_u32(vandq_u32(vcltq_f32(x, y), vld1q_u32(bits)));
}
INLINE unsigned v16_mask_less(v16 x, v16 y) {
    return mask_less(x.a, y.a) | mask_less(x.b, y.b) << 4 | mask_less(x.c, y.c) << 8 | mask_less(x.d, y.d) << 12;
}

// Two tables of 64 bytes hold the values of positions 0 to 127 of grid 0; later positions have the last value.
// Conversions and narrowing saturate.
typedef struct { int8_t value[128]; int offset; } code_table;
typedef const code_table *code_lut;
INLINE void code_table_init(code_table *table, struct code_values codes, const int8_t *values, int offset) {
    for (int i = 0, j = 0; i < 128; i++) {
        while (j < codes.last && i >= code_start(codes, j + 1, 0)) j++;
        table->value[i] = values[j];
    }
    table->offset = offset;
}
INLINE code_lut code_lut_load(const code_table *table) { return table; }
INLINE uint16x8_t positions_to_words(float32x4_t x, float32x4_t y) {
    return vcombine_u16(vqmovn_u32(vcvtq_u32_f32(x)), vqmovn_u32(vcvtq_u32_f32(y)));
}
INLINE void v16_nearest_codes(code_lut t, const v16 *positions, v16 *values) {
    const int8x16x4_t below_64 = vld1q_s8_x4(t->value), from_64 = vld1q_s8_x4(t->value + 64);
    UNROLL for (int i = 0; i < 4; i++) {
        const v16 x = positions[i];
        uint8x16_t p = vcombine_u8(vqmovn_u16(positions_to_words(x.a, x.b)), vqmovn_u16(positions_to_words(x.c, x.d)));
        p = vminq_u8(vqsubq_u8(p, vdupq_n_u8((uint8_t)(2 * t->offset))), vdupq_n_u8(127));
        const int8x16_t value = vqtbx4q_s8(vqtbl4q_s8(below_64, p), from_64, vsubq_u8(p, vdupq_n_u8(64)));
        const int16x8_t low = vmovl_s8(vget_low_s8(value)), high = vmovl_s8(vget_high_s8(value));
        values[i].a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
        values[i].b = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
        values[i].c = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
        values[i].d = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    }
}
#endif
