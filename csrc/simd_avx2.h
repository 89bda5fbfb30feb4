// SPDX-License-Identifier: MIT
// simd_avx2.h - the SIMD layer for AVX2, FMA and F16C, with or without VNNI: a v16 is two registers of 8 floats. With
// VNNI (SIMD_VNNI is defined), vpdpbusd computes dot products of bytes. simd_scalar.h specifies each operation.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <immintrin.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#if !defined(SIMD_VNNI)
#include "simd_maddubs.h"
#endif
#include "simd_panel_layout.h"

typedef struct { __m256 a, b; } v16;   // lanes 0..7 and 8..15
enum {
    FLOAT_TILE_ACCS = 6,   // 12 of 16 registers; a single row uses 8, which hides the latency of the multiply-add
    INT8_TILE_ACCS = 1, INT16_TILE_ACCS = 1, MAX_LIVE_SUMS = 2, MAX_CARRIED_SUMS = 2,
    UNPACK_ABOVE_F16 = 30, UNPACK_ABOVE_BF16 = 1 << 30, UNPACK_ABOVE_NIBBLES = 7,
#if defined(SIMD_VNNI)
    UNPACK_ABOVE_BYTES = 1 << 30,   // vpdpbusd multiplies the bytes as stored
    NARROW_TILE_ACCS = 1, VALUES_TILE_ACCS = 1,
#else
    UNPACK_ABOVE_BYTES = 24,
#endif
};

INLINE __m256i broadcast_256(int32_t x) { return _mm256_set1_epi32(x); }
INLINE __m256i load_256(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store_256(void *p, __m256i x) { _mm256_storeu_si256((__m256i *)p, x); }

#define MAP(intrinsic, x) (v16){ intrinsic(x.a), intrinsic(x.b) }
#define MAP2(intrinsic, x, y) (v16){ intrinsic(x.a, y.a), intrinsic(x.b, y.b) }
#define MAP3(intrinsic, x, y, z) (v16){ intrinsic(x.a, y.a, z.a), intrinsic(x.b, y.b, z.b) }

INLINE v16 v16_set1(float x) { return (v16){ _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
INLINE v16 v16_load(const float *p) { return (v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
INLINE void v16_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }

// All ones in the first n of 8 lanes.
INLINE __m256i lane_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE v16 v16_load_n(const float *p, int n) {
    return (v16){ _mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8)) };
}
INLINE void v16_store_n(float *p, v16 x, int n) {
    _mm256_maskstore_ps(p, lane_mask(n), x.a);
    _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b);
}

INLINE v16 v16_load_f16(const uint16_t *p) {
    return (v16){ _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))) };
}
INLINE v16 v16_load_int8(const uint8_t *p) {
    return (v16){ _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))) };
}
// For e >= 2, the exponent field is e - 1. The bits of the subnormal 2^(e - 128) are larger only for e = 0 and 1.
INLINE __m256 load_e8m0(const uint8_t *p) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), one = broadcast_256(1);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23),
                                                _mm256_slli_epi32(_mm256_add_epi32(e, one), 21)));
}
INLINE v16 v16_load_e8m0(const uint8_t *p) { return (v16){ load_e8m0(p), load_e8m0(p + 8) }; }
INLINE void v16_store_f16(uint16_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Interleaving with zeros widens 16 values in two instructions, but within 128-bit halves: a holds values 0..3 and
// 8..11.
INLINE v16 v16_load_bf16_permuted(const uint16_t *p) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)p), zero = _mm256_setzero_si256();
    return (v16){ _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)),
                  _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x)) };
}
INLINE v16 v16_unpermute(v16 x) {
    return (v16){ _mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31) };
}

INLINE v16 v16_add(v16 x, v16 y) { return MAP2(_mm256_add_ps, x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return MAP2(_mm256_sub_ps, x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return MAP2(_mm256_mul_ps, x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return MAP2(_mm256_div_ps, x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return MAP3(_mm256_fmadd_ps, x, y, z); }
INLINE v16 v16_fma_scalar(v16 x, float y, v16 z) { return v16_fma(x, v16_set1(y), z); }
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return MAP3(_mm256_fnmadd_ps, x, y, z); }
INLINE v16 v16_max(v16 x, v16 y) { return MAP2(_mm256_max_ps, x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return MAP2(_mm256_min_ps, x, y); }
INLINE v16 v16_abs(v16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){ _mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b) };
}
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) {
    return (v16){ _mm256_andnot_ps(_mm256_cmp_ps(y.a, low.a, _CMP_LT_OQ), x.a),
                  _mm256_andnot_ps(_mm256_cmp_ps(y.b, low.b, _CMP_LT_OQ), x.b) };
}
INLINE v16 v16_blend_n(v16 x, v16 y, int n) {
    return (v16){ _mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(lane_mask(n))),
                  _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(lane_mask(n - 8))) };
}
INLINE __m256 exp2_shifted(__m256 t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(0x3f800000)));
}
INLINE v16 v16_exp2_shifted(v16 t) { return MAP(exp2_shifted, t); }

#define REDUCE(op, x) do { \
        __m256 eight = _mm256_##op##_ps(x.a, x.b); \
        __m128 four = _mm_##op##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = _mm_##op##_ps(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op##_ss(two, _mm_movehdup_ps(two))); } while (0)
INLINE float v16_reduce_add(v16 x) { REDUCE(add, x); }
INLINE float v16_reduce_max(v16 x) { REDUCE(max, x); }
#undef REDUCE

INLINE void v16_store_int16(int16_t *p, v16 x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
INLINE void v16_store_int8(int8_t *p, v16 x) {
    int16_t h[16];
    v16_store_int16(h, x);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm_loadu_si128((const __m128i *)h),
                                                   _mm_loadu_si128((const __m128i *)(h + 8))));
}

// Hides a register's value from the optimizer. GCC otherwise reassociates a chain of additions: it computes all
// products first and spills them.
#define VALUE_BARRIER(x) __asm__("" : "+x"(x))

// ---- codes: lines of 16 rows x 4 bytes

typedef struct { __m256i a, b; } line;           // rows 0..7 and 8..15
typedef __m256i lut;
typedef line grid_offsets;

INLINE lut lut_load(const int8_t *codebook, const int bias) {
    return _mm256_broadcastsi128_si256(
        _mm_add_epi8(_mm_loadu_si128((const __m128i *)codebook), _mm_set1_epi8((char)bias)));
}
INLINE line line_load(const uint8_t *p) { return (line){ load_256(p), load_256(p + 32) }; }
INLINE void line_store(uint8_t *p, line x) { store_256(p, x.a), store_256(p + 32, x.b); }
INLINE __m256i broadcast_128(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
INLINE grid_offsets grid_offsets_load(const uint8_t *p) {
    const __m256i rows_0_to_7 = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                                 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i s = _mm256_and_si256(broadcast_128(p), _mm256_set1_epi8(3));
    return (grid_offsets){ _mm256_shuffle_epi8(s, rows_0_to_7),
                           _mm256_shuffle_epi8(s, _mm256_add_epi8(rows_0_to_7, _mm256_set1_epi8(8))) };
}
INLINE __m256i decode_low_nibbles(lut t, __m256i x, __m256i grid) {
    return _mm256_add_epi8(_mm256_shuffle_epi8(t, _mm256_and_si256(x, _mm256_set1_epi8(15))), grid);
}
enum { INT8_BIAS = CODE_LIMIT };   // codes are unsigned in products with signed inputs
INLINE line int8_codes(lut t, line x, grid_offsets grid, const int half, const int unpacked) {
    (void)unpacked;
    if (half) x = (line){ _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4) };
    return (line){ decode_low_nibbles(t, x.a, grid.a), decode_low_nibbles(t, x.b, grid.b) };
}

enum { BYTE_BIAS = 128 };
INLINE line line_from_bytes(line x) { return x; }
INLINE __m256i nibbles(__m256i x, const int half) {
    return _mm256_and_si256(half ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
}
INLINE line line_nibbles(line x, const int half) { return (line){ nibbles(x.a, half), nibbles(x.b, half) }; }
// The mask removes what a shift of int16 moves into another byte.
INLINE __m256i move_bits(__m256i x, const int from, const int mask) {
    const __m256i shifted = from < 4 ? _mm256_slli_epi16(x, 4 - from) : _mm256_srli_epi16(x, from - 4);
    return _mm256_and_si256(shifted, _mm256_set1_epi8((char)mask));
}
INLINE line line_move_bits(line x, const int from, const int mask) {
    return (line){ move_bits(x.a, from, mask), move_bits(x.b, from, mask) };
}
INLINE line line_insert_bits(line x, line other, const int from, const int mask) {
    return (line){ _mm256_or_si256(x.a, move_bits(other.a, from, mask)),
                   _mm256_or_si256(x.b, move_bits(other.b, from, mask)) };
}
INLINE line line_lookup(lut t, line x) { return (line){ _mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b) }; }

#if defined(SIMD_VNNI)
// ---- products with vpdpbusd

INLINE line line_set1(int32_t x) { return (line){ broadcast_256(x), broadcast_256(x) }; }
INLINE __m256i dot_bytes(__m256i sums, __m256i x, __m256i y) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, x, y);
#else
    return _mm256_dpbusd_epi32(sums, x, y);   // the same instruction of AVX-512 VNNI
#endif
}
INLINE line line_dot(line sums, line x, line y) {
    sums.a = dot_bytes(sums.a, x.a, y.a);
    VALUE_BARRIER(sums.a);
    sums.b = dot_bytes(sums.b, x.b, y.b);
    VALUE_BARRIER(sums.b);
    return sums;
}
INLINE void v16_store_uint8(uint8_t *p, v16 x) {
    int16_t h[16];
    v16_store_int16(h, x);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm_loadu_si128((const __m128i *)h),
                                                    _mm_loadu_si128((const __m128i *)(h + 8))));
}
INLINE line line_add_bytes(line x, const int n) {
    return (line){ _mm256_add_epi8(x.a, _mm256_set1_epi8((char)n)), _mm256_add_epi8(x.b, _mm256_set1_epi8((char)n)) };
}
INLINE line line_times_128_plus(line x, line y) {
    return (line){ _mm256_add_epi32(_mm256_slli_epi32(x.a, 7), y.a),
                   _mm256_add_epi32(_mm256_slli_epi32(x.b, 7), y.b) };
}
INLINE v16 line_to_floats(line x) { return (v16){ _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b) }; }
INLINE v16 line_as_floats(line x) { return (v16){ _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b) }; }
// Two sums of 3 rows take 12 of 16 registers; one sum of 6 rows takes as many.
enum { INT16_PARTS = 2 };
INLINE int int16_part_major(const int T) { return T > 3; }
#include "simd_vnni.h"
#else
// ---- q4 and q4s: vpmaddubsw multiplies unsigned codebook + 32 by signed inputs. The int16 sums may wrap around, but
// they start at -32 * (sum of the inputs), and the final sum of 8 products below 32 * 127 fits.

typedef struct { __m256i a, b; } int8_acc;       // two int16 per row: columns 0, 1 and columns 2, 3 of each 4
typedef struct { __m256i a, b; } int8_scaled;    // int32
typedef struct { __m256i a, b; } block_scales;   // int16, each row's scale twice
// The shuffle moves each int8 to the high byte of two int16; the shift sign-extends it.
INLINE block_scales block_scales_load(const uint8_t *p) {
    const __m256i rows_0_to_7 = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,
                                                 -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    const __m256i rows_8_to_15 = _mm256_setr_epi8(-1, 8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11,
                                                  -1, 12, -1, 12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15);
    return (block_scales){ _mm256_srai_epi16(_mm256_shuffle_epi8(broadcast_128(p), rows_0_to_7), 8),
                           _mm256_srai_epi16(_mm256_shuffle_epi8(broadcast_128(p), rows_8_to_15), 8) };
}
INLINE void block_scales_store(uint8_t *p, block_scales s) { store_256(p, s.a), store_256(p + 32, s.b); }
INLINE block_scales block_scales_load_unpacked(const uint8_t *p) {
    return (block_scales){ load_256(p), load_256(p + 32) };
}
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    (void)grid, (void)unpacked;
    return (int8_acc){ broadcast_256(compensation), broadcast_256(compensation) };
}
INLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                             const int unpacked) {
    (void)unpacked;
    const __m256i x = broadcast_256(inputs[word_index(word, T, t)]);
    d.a = _mm256_add_epi16(d.a, _mm256_maddubs_epi16(codes.a, x));
    VALUE_BARRIER(d.a);
    d.b = _mm256_add_epi16(d.b, _mm256_maddubs_epi16(codes.b, x));
    VALUE_BARRIER(d.b);
    return d;
}
typedef int8_acc int8_row_acc;
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) { (void)r, (void)unpacked; return d; }
INLINE int8_scaled int8_scale(int8_row_acc d, block_scales s) {
    return (int8_scaled){ _mm256_madd_epi16(d.a, s.a), _mm256_madd_epi16(d.b, s.b) };
}
INLINE int8_scaled int8_scale_add(int8_scaled w, int8_row_acc d, block_scales s) {
    return (int8_scaled){ _mm256_add_epi32(w.a, _mm256_madd_epi16(d.a, s.a)),
                          _mm256_add_epi32(w.b, _mm256_madd_epi16(d.b, s.b)) };
}
INLINE v16 int8_scaled_to_float(int8_scaled w) { return (v16){ _mm256_cvtepi32_ps(w.a), _mm256_cvtepi32_ps(w.b) }; }

// ---- int16 inputs: vpmaddwd on int16. Masking and shifting split a line into two vectors of int16 without a shuffle:
// columns (0, 2) and (1, 3) of each 4. Codes keep their bias unless they are unpacked.

enum { UNPACKED_BIAS = 0, INT16_PARTS = 2, INT16_UNPACKED_LINE_BYTES = 128 };
typedef struct { __m256i a, b; } int16_codes;
typedef struct { __m256i a, b; } int16_acc;
INLINE __m256i int16_part(__m256i x, const int part) {
    return part ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(255));
}
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) {
    if (l & 1) x = y;
    return (int16_codes){ int16_part(x.a, part), int16_part(x.b, part) };
}
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    const __m256i to_subtract = _mm256_set1_epi16((short)bias);
    UNROLL for (int part = 0; part < 2; part++) {
        const int16_codes c = int16_codes_from(x, y, l, part);
        uint8_t *p = to + l * INT16_UNPACKED_LINE_BYTES + 64 * part;
        store_256(p, _mm256_sub_epi16(c.a, to_subtract)), store_256(p + 32, _mm256_sub_epi16(c.b, to_subtract));
    }
}
INLINE int16_codes int16_codes_load_unpacked(const uint8_t *group, const int l, const int part) {
    const uint8_t *p = group + l * INT16_UNPACKED_LINE_BYTES + 64 * part;
    return (int16_codes){ load_256(p), load_256(p + 32) };
}
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    (void)T;
    const __m256i start = bias ? broadcast_256(-bias * (minus ? plus[t] - minus[t] : plus[t])) : _mm256_setzero_si256();
    return (int16_acc){ start, start };
}
INLINE int int16_part_major(const int T) { (void)T; return 0; }
INLINE int16_acc int16_acc_next_part(int16_acc d) { return d; }
INLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                               const int T, const int t) {
    const __m256i x = broadcast_256(inputs[word_index(2 * l + part, T, t)]);
    d.a = _mm256_add_epi32(d.a, _mm256_madd_epi16(w.a, x));
    VALUE_BARRIER(d.a);
    d.b = _mm256_add_epi32(d.b, _mm256_madd_epi16(w.b, x));
    VALUE_BARRIER(d.b);
    return d;
}

// ---- int16 inputs of a single row, as bytes: an input is 128 h + l with h and l in int8. vpmaddubsw multiplies codes
// by each, in about three quarters of the instructions that it takes to widen the codes.

#define INT16_AS_BYTES
typedef struct { __m256i h_a, h_b, l_a, l_b; } byte_acc;   // two int16 per row
// Turns the 8 words of 16 columns, as int16_pack_words wrote them, into alternating words of 4 h and of 4 l.
INLINE void int16_words_to_bytes(const int32_t *words, int32_t *bytes) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15));
    const __m256i x = load_256(words), h = _mm256_srai_epi16(_mm256_add_epi16(x, _mm256_set1_epi16(64)), 7);
    const __m256i l = _mm256_sub_epi16(x, _mm256_slli_epi16(h, 7));
    store_256(bytes, _mm256_shuffle_epi8(_mm256_packs_epi16(h, l), order));
}
INLINE byte_acc byte_acc_start(line w, const int32_t *x, const int l) {
    const __m256i h = broadcast_256(x[2 * l]), low = broadcast_256(x[2 * l + 1]);
    return (byte_acc){ _mm256_maddubs_epi16(w.a, h), _mm256_maddubs_epi16(w.b, h), _mm256_maddubs_epi16(w.a, low),
                       _mm256_maddubs_epi16(w.b, low) };
}
INLINE byte_acc byte_acc_dot(byte_acc d, line w, const int32_t *x, const int l) {
    const byte_acc p = byte_acc_start(w, x, l);
    d = (byte_acc){ _mm256_add_epi16(d.h_a, p.h_a), _mm256_add_epi16(d.h_b, p.h_b), _mm256_add_epi16(d.l_a, p.l_a),
                    _mm256_add_epi16(d.l_b, p.l_b) };
    VALUE_BARRIER(d.h_a);
    VALUE_BARRIER(d.h_b);
    VALUE_BARRIER(d.l_a);
    VALUE_BARRIER(d.l_b);
    return d;
}
INLINE __m256i add_bytes(__m256i sum, __m256i h, __m256i l) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(h, _mm256_set1_epi16(128)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(l, _mm256_set1_epi16(1)));
}
INLINE int16_acc int16_acc_add_bytes(int16_acc d, byte_acc c) {
    return (int16_acc){ add_bytes(d.a, c.h_a, c.l_a), add_bytes(d.b, c.h_b, c.l_b) };
}
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    (void)T, (void)row;
    return (v16){ _mm256_cvtepi32_ps(d.a), _mm256_cvtepi32_ps(d.b) };
}
#endif

// ---- quantizing

INLINE v16 v16_select_less(v16 x, v16 y, v16 a, v16 b) {
    return (v16){ _mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                  _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)) };
}
INLINE v16 v16_sub_exact_product(v16 x, v16 y, v16 z) { return v16_fnma(y, z, x); }

// 16 rows x 2 words.
INLINE __m256i words_from_floats(__m256 x, __m256 y) {
    return _mm256_blend_epi16(_mm256_cvtps_epi32(x), _mm256_slli_epi32(_mm256_cvtps_epi32(y), 16), 0xaa);
}
INLINE line line_from_floats(v16 x, v16 y) {
    return (line){ words_from_floats(x.a, y.a), words_from_floats(x.b, y.b) };
}
INLINE line line_scaled(line x, line y) {
    return (line){ _mm256_mulhrs_epi16(x.a, y.a), _mm256_mulhrs_epi16(x.b, y.b) };
}
INLINE __m256i broadcast_bytes(const int8_t *p) { return broadcast_128((const uint8_t *)p); }
typedef struct { __m256i code, first, second, twice; } cells_lut;
INLINE cells_lut cells_lut_load(const struct code_cells *c) {
    return (cells_lut){ broadcast_bytes(c->code), broadcast_bytes(c->first), broadcast_bytes(c->second),
                        broadcast_bytes(c->twice) };
}
typedef struct { __m256i a, b; } int16_squares;
INLINE int16_squares squares_zero(void) { return (int16_squares){ _mm256_setzero_si256(), _mm256_setzero_si256() }; }
// Packing saturates; unpacking restores the order.
INLINE __m256i add_squares(__m256i sum, cells_lut t, __m256i x, __m256i y) {
    const __m256i p = _mm256_packs_epi16(_mm256_srai_epi16(x, 7), _mm256_srai_epi16(y, 7));
    const __m256i cell = _mm256_and_si256(_mm256_srli_epi16(p, 4), _mm256_set1_epi8(15));
    __m256i code = _mm256_shuffle_epi8(t.code, cell);
    code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(p, _mm256_shuffle_epi8(t.first, cell)));
    code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(p, _mm256_shuffle_epi8(t.second, cell)));
    const __m256i twice = _mm256_shuffle_epi8(t.twice, code), zero = _mm256_setzero_si256();
    x = _mm256_sub_epi16(x, _mm256_unpacklo_epi8(zero, twice));
    y = _mm256_sub_epi16(y, _mm256_unpackhi_epi8(zero, twice));
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(x, x), _mm256_madd_epi16(y, y)));
}
INLINE int16_squares squares_add_nearest(int16_squares sum, cells_lut t, line x, line y) {
    return (int16_squares){ add_squares(sum.a, t, x.a, y.a), add_squares(sum.b, t, x.b, y.b) };
}
INLINE v16 squares_to_floats(int16_squares x) { return (v16){ _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b) }; }
INLINE unsigned v16_mask_less(v16 x, v16 y) {
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)) |
           (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)) << 8;
}

// Bytes: 8 positions of grid 0 form a cell, in which at most two codes start. `code` is the first code of each cell,
// `first` and `second` are the positions before those where the next two codes start, or 127. A value is an integer
// below 2^8, whose float has zeros in its lower half: `high` and `low` have the other bytes.
typedef struct { int8_t code[16], first[16], second[16], high[16], low[16]; int offset; } code_table;
typedef struct { __m256i code, first, second, high, low, shift; } code_lut;
INLINE void code_table_init(code_table *table, struct code_values codes, const int8_t *values, int offset) {
    for (int cell = 0, j = 0; cell < 16; cell++) {
        while (j < codes.last && code_start(codes, j + 1, 0) <= 8 * cell) j++;
        table->code[cell] = (int8_t)j;
        for (int next = 1; next <= 2; next++) {
            const int start = j + next <= codes.last ? code_start(codes, j + next, 0) : 128;
            const int8_t before = (int8_t)(start < 8 * cell + 8 ? start - 1 : 127);
            if (next == 1) table->first[cell] = before;
            else table->second[cell] = before;
        }
    }
    for (int j = 0; j < 16; j++) {
        const float value = values[j];
        uint32_t bits;
        memcpy(&bits, &value, 4);
        table->high[j] = (int8_t)(bits >> 24), table->low[j] = (int8_t)(bits >> 16);
    }
    table->offset = offset;
}
INLINE code_lut code_lut_load(const code_table *t) {
    return (code_lut){ broadcast_bytes(t->code), broadcast_bytes(t->first), broadcast_bytes(t->second),
                       broadcast_bytes(t->high), broadcast_bytes(t->low), _mm256_set1_epi8((char)(2 * t->offset)) };
}
// 8 lanes of four positions. Packing saturates, and interleaving the bytes restores the order.
INLINE void nearest_codes_8(const code_lut *t, const __m256 *positions, __m256 *values) {
    __m256i n[4];
    UNROLL for (int i = 0; i < 4; i++) n[i] = _mm256_cvttps_epi32(positions[i]);
    __m256i p = _mm256_packus_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    p = _mm256_min_epu8(_mm256_subs_epu8(p, t->shift), _mm256_set1_epi8(127));
    const __m256i cell = _mm256_and_si256(_mm256_srli_epi16(p, 3), _mm256_set1_epi8(15));
    __m256i code = _mm256_shuffle_epi8(t->code, cell);
    code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(p, _mm256_shuffle_epi8(t->first, cell)));
    code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(p, _mm256_shuffle_epi8(t->second, cell)));
    const __m256i low = _mm256_shuffle_epi8(t->low, code), high = _mm256_shuffle_epi8(t->high, code);
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    const __m256i zero = _mm256_setzero_si256();
    values[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, a));
    values[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, a));
    values[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, b));
    values[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, b));
}
INLINE void v16_nearest_codes(code_lut table, const v16 *positions, v16 *values) {
    __m256 low[4], high[4];
    UNROLL for (int i = 0; i < 4; i++) {
        // beyond int32, a conversion gives the lowest int32
        const v16 p = v16_min(positions[i], v16_set1((float)CODE_POSITIONS));
        low[i] = p.a, high[i] = p.b;
    }
    nearest_codes_8(&table, low, low), nearest_codes_8(&table, high, high);
    UNROLL for (int i = 0; i < 4; i++) values[i] = (v16){ low[i], high[i] };
}
#endif
