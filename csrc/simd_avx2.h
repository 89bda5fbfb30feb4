// SPDX-License-Identifier: MIT
// simd_avx2.h - the vector vocabulary (see simd_scalar.h) for AVX2, FMA and F16C: two registers of 8 floats.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <immintrin.h>
#include "common.h"
#include "dtype.h"
#include "simd_pairs.h"
#include "simd_rows.h"

typedef struct { __m256 a, b; } v16;   // lanes 0..7 and 8..15
enum {
    SUMS_IN_FLIGHT = 6,                // 12 of 16 registers; with one row 8 hide the latency of the multiply-add
    LINES_IN_FLIGHT = 1, LINES_IN_FLIGHT_Q8 = 1, SUMS_KEPT = 2, SUMS_HELD = 2,
    EXPAND_ROWS_F16 = 30, EXPAND_ROWS_BF16 = 1 << 30, EXPAND_ROWS = 7, EXPAND_ROWS_Q8 = 24,
};

#define BOTH(intrinsic, x) (v16){ intrinsic(x.a), intrinsic(x.b) }
#define BOTH2(intrinsic, x, y) (v16){ intrinsic(x.a, y.a), intrinsic(x.b, y.b) }
#define BOTH3(intrinsic, x, y, z) (v16){ intrinsic(x.a, y.a, z.a), intrinsic(x.b, y.b, z.b) }

INLINE v16 v16_set1(float x) { return (v16){ _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
INLINE v16 v16_load(const float *p) { return (v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
INLINE void v16_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }

// All ones in the first n of 8 lanes.
INLINE __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
INLINE v16 v16_load_n(const float *p, int n) {
    return (v16){ _mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8)) };
}
INLINE void v16_store_n(float *p, v16 x, int n) {
    _mm256_maskstore_ps(p, first_lanes(n), x.a);
    _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.b);
}

INLINE v16 v16_load_f16(const uint16_t *p) {
    return (v16){ _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))) };
}
INLINE void v16_store_f16(uint16_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Interleaving with zeros widens 16 numbers in two instructions, but within 128-bit halves: a holds 0..3 and 8..11.
INLINE v16 v16_load_bf16_mixed(const uint16_t *p) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)p), zero = _mm256_setzero_si256();
    return (v16){ _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x)) };
}
INLINE v16 v16_unmix(v16 x) { return (v16){ _mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31) }; }

INLINE v16 v16_add(v16 x, v16 y) { return BOTH2(_mm256_add_ps, x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return BOTH2(_mm256_sub_ps, x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return BOTH2(_mm256_mul_ps, x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return BOTH2(_mm256_div_ps, x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return BOTH3(_mm256_fmadd_ps, x, y, z); }
INLINE v16 v16_fma1(v16 x, float y, v16 z) { return v16_fma(x, v16_set1(y), z); }
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return BOTH3(_mm256_fnmadd_ps, x, y, z); }
INLINE v16 v16_max(v16 x, v16 y) { return BOTH2(_mm256_max_ps, x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return BOTH2(_mm256_min_ps, x, y); }
INLINE v16 v16_abs(v16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){ _mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b) };
}
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) {
    return (v16){ _mm256_andnot_ps(_mm256_cmp_ps(y.a, low.a, _CMP_LT_OQ), x.a), _mm256_andnot_ps(_mm256_cmp_ps(y.b, low.b, _CMP_LT_OQ), x.b) };
}
INLINE v16 v16_first(v16 x, v16 y, int n) {
    return (v16){ _mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(first_lanes(n))),
                  _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(first_lanes(n - 8))) };
}
INLINE __m256 exp2_of_shifted(__m256 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(0x3f800000)));
}
INLINE v16 v16_exp2_of_shifted(v16 t) { return BOTH(exp2_of_shifted, t); }

#define FOLD(op, x) do { \
        __m256 eight = _mm256_##op##_ps(x.a, x.b); \
        __m128 four = _mm_##op##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = _mm_##op##_ps(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op##_ss(two, _mm_movehdup_ps(two))); } while (0)
INLINE float v16_sum(v16 x) { FOLD(add, x); }
INLINE float v16_max_lane(v16 x) { FOLD(max, x); }
#undef FOLD

INLINE void v16_to_int16(int16_t *p, v16 x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
INLINE void v16_to_int8(int8_t *p, v16 x) {
    int16_t h[16];
    v16_to_int16(h, x);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm_loadu_si128((const __m128i *)h), _mm_loadu_si128((const __m128i *)(h + 8))));
}

// An accumulator whose sum the compiler may not reorder: GCC otherwise takes all products first and spills them.
#define PIN(x) __asm__("" : "+x"(x))

INLINE __m256i every32(int32_t x) { return _mm256_set1_epi32(x); }
INLINE __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store32(void *p, __m256i x) { _mm256_storeu_si256((__m256i *)p, x); }

// ---- 4-bit codes: unsigned (codebook + 32) times signed inputs. int16 sums wrap, but start at -32 * sum of the inputs, so that the
// final sum fits: 8 products below 32 * 127.

typedef struct { __m256i a, b; } line;     // rows 0..7 and 8..15
typedef struct { __m256i a, b; } dots;     // per row two int16: columns 0, 1 and 2, 3 of each 4
typedef struct { __m256i a, b; } scaled;
typedef struct { __m256i a, b; } scales;   // per row the scale twice, int16
typedef __m256i table;
typedef line grids;

INLINE table table_load(const int8_t *codebook) {
    return _mm256_broadcastsi128_si256(_mm_add_epi8(_mm_loadu_si128((const __m128i *)codebook), _mm_set1_epi8(CODE_LIMIT)));
}
INLINE line line_load(const uint8_t *p) { return (line){ load32(p), load32(p + 32) }; }
INLINE void line_store(uint8_t *p, line x) { store32(p, x.a), store32(p + 32, x.b); }
INLINE __m256i sixteen(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
INLINE grids grid_load(const uint8_t *p) {
    const __m256i first = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i s = _mm256_and_si256(sixteen(p), _mm256_set1_epi8(3));
    return (grids){ _mm256_shuffle_epi8(s, first), _mm256_shuffle_epi8(s, _mm256_add_epi8(first, _mm256_set1_epi8(8))) };
}
INLINE __m256i code(table t, __m256i x, __m256i grid) { return _mm256_add_epi8(_mm256_shuffle_epi8(t, _mm256_and_si256(x, _mm256_set1_epi8(15))), grid); }
INLINE line codes_of(table t, line x, grids grid, const int part, const int expanded) {
    (void)expanded;
    if (part) x = (line){ _mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4) };
    return (line){ code(t, x.a, grid.a), code(t, x.b, grid.b) };
}
// The shuffle puts a byte on top of each int16, the shift extends its sign.
INLINE scales scales_load(const uint8_t *p) {
    const __m256i first = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    const __m256i second = _mm256_setr_epi8(-1, 8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11, -1, 12, -1, 12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15);
    return (scales){ _mm256_srai_epi16(_mm256_shuffle_epi8(sixteen(p), first), 8), _mm256_srai_epi16(_mm256_shuffle_epi8(sixteen(p), second), 8) };
}
INLINE void scales_store(uint8_t *p, scales s) { store32(p, s.a), store32(p + 32, s.b); }
INLINE scales scales_reload(const uint8_t *p) { return (scales){ load32(p), load32(p + 32) }; }
INLINE dots dots_from(int32_t start, grids grid, const int expanded) {
    (void)grid, (void)expanded;
    return (dots){ every32(start), every32(start) };
}
INLINE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    (void)expanded;
    const __m256i x = every32(inputs[word_place(word, T, t)]);
    d.a = _mm256_add_epi16(d.a, _mm256_maddubs_epi16(codes.a, x));
    PIN(d.a);
    d.b = _mm256_add_epi16(d.b, _mm256_maddubs_epi16(codes.b, x));
    PIN(d.b);
    return d;
}
typedef dots row_dots;
INLINE row_dots dots_row(dots d, const int r, const int expanded) { (void)r, (void)expanded; return d; }
INLINE scaled scaled_first(row_dots d, scales s) { return (scaled){ _mm256_madd_epi16(d.a, s.a), _mm256_madd_epi16(d.b, s.b) }; }
INLINE scaled scaled_add(scaled w, row_dots d, scales s) {
    return (scaled){ _mm256_add_epi32(w.a, _mm256_madd_epi16(d.a, s.a)), _mm256_add_epi32(w.b, _mm256_madd_epi16(d.b, s.b)) };
}
INLINE v16 scaled_float(scaled w) { return (v16){ _mm256_cvtepi32_ps(w.a), _mm256_cvtepi32_ps(w.b) }; }

// ---- 8-bit codes: a line gives two vectors of int16 without a shuffle, columns (0, 2) and (1, 3) of each 4. The offset of the codes is
// taken away by the start, or by the expansion.

enum { WIDE_PARTS = 2, EXPANDED_LINE_Q8 = 128 };
typedef struct { __m256i a, b; } wide;
typedef struct { __m256i a, b; } dots8;
INLINE __m256i wide_part(__m256i x, const int part) { return part ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(255)); }
INLINE wide wide_load(const uint8_t *group, const int l, const int part) {
    const uint8_t *p = group + l * LINE_BYTES;
    return (wide){ wide_part(load32(p), part), wide_part(load32(p + 32), part) };
}
INLINE void wide_expand(uint8_t *to, const uint8_t *group, int l) {
    const __m256i offset = _mm256_set1_epi16(Q8_OFFSET);
    UNROLL for (int part = 0; part < 2; part++) {
        const wide x = wide_load(group, l, part);
        uint8_t *p = to + l * EXPANDED_LINE_Q8 + 64 * part;
        store32(p, _mm256_sub_epi16(x.a, offset)), store32(p + 32, _mm256_sub_epi16(x.b, offset));
    }
}
INLINE wide wide_reload(const uint8_t *group, const int l, const int part) {
    const uint8_t *p = group + l * EXPANDED_LINE_Q8 + 64 * part;
    return (wide){ load32(p), load32(p + 32) };
}
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) {
    (void)T;
    const __m256i start = expanded ? _mm256_setzero_si256() : every32(-Q8_OFFSET * sums[t]);
    return (dots8){ start, start };
}
INLINE int wide_passes(const int T) { (void)T; return 0; }
INLINE dots8 dots8_next(dots8 d) { return d; }
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    const __m256i x = every32(inputs[word_place(2 * l + part, T, t)]);
    d.a = _mm256_add_epi32(d.a, _mm256_madd_epi16(w.a, x));
    PIN(d.a);
    d.b = _mm256_add_epi32(d.b, _mm256_madd_epi16(w.b, x));
    PIN(d.b);
    return d;
}
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    (void)T, (void)row;
    return (v16){ _mm256_cvtepi32_ps(d.a), _mm256_cvtepi32_ps(d.b) };
}
INLINE v16 v16_load_int8(const uint8_t *p) {
    return (v16){ _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))) };
}
#endif
