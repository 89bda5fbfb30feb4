// SPDX-License-Identifier: MIT
// simd_avx512.h - the vector vocabulary (see simd_scalar.h) for AVX-512 F, BW, DQ and VL: one register of 16 floats. With VNNI, sums of
// products of bytes are one instruction.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <immintrin.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#if !defined(__AVX512VNNI__)
#include "simd_pairs.h"
#endif
#include "simd_rows.h"

typedef __m512 v16;
enum {
    SUMS_IN_FLIGHT = 24,               // of 32 registers
    LINES_IN_FLIGHT = 12, SUMS_KEPT = 6, SUMS_HELD = 24,
    EXPAND_ROWS_F16 = 30, EXPAND_ROWS_BF16 = 30, EXPAND_ROWS = 18,
#if defined(__AVX512VNNI__)
    LINES_IN_FLIGHT_Q8 = 8,            // an input takes two sums
    EXPAND_ROWS_Q8 = 1 << 30,          // bytes are multiplied as they lie in the file
#else
    LINES_IN_FLIGHT_Q8 = 12,
    EXPAND_ROWS_Q8 = 36,
#endif
};

INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << (n < 0 ? 0 : n > 16 ? 16 : n)) - 1); }
INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v16_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
INLINE void v16_store_n(float *p, v16 x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

INLINE v16 v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v16_store_f16(uint16_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE v16 v16_load_bf16_mixed(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE v16 v16_unmix(v16 x) { return x; }

INLINE v16 v16_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE v16 v16_fma1(v16 x, float y, v16 z) { return v16_fma(x, v16_set1(y), z); }
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return _mm512_fnmadd_ps(x, y, z); }
INLINE v16 v16_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return _mm512_min_ps(x, y); }
INLINE v16 v16_abs(v16 x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, low, _CMP_NLT_UQ), x); }
INLINE v16 v16_first(v16 x, v16 y, int n) { return _mm512_mask_mov_ps(y, first_lanes(n), x); }
INLINE v16 v16_exp2_of_shifted(v16 t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(0x3f800000)));
}

#define FOLD(op, x) do { \
        __m256 eight = _mm256_##op##_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); \
        __m128 four = _mm_##op##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = _mm_##op##_ps(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op##_ss(two, _mm_movehdup_ps(two))); } while (0)
INLINE float v16_sum(v16 x) { FOLD(add, x); }
INLINE float v16_max_lane(v16 x) { FOLD(max, x); }
#undef FOLD

INLINE void v16_to_int8(int8_t *p, v16 x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
INLINE void v16_to_int16(int16_t *p, v16 x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x))); }

#define PIN(x) __asm__("" : "+v"(x))   // see simd_avx2.h

INLINE __m512i every64(int32_t x) { return _mm512_set1_epi32(x); }
INLINE __m512i load64(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store64(void *p, __m512i x) { _mm512_storeu_si512(p, x); }

// ---- 4-bit codes: unsigned (codebook + 32) times signed inputs; sums start at -32 * sum of the inputs

typedef __m512i line;
typedef __m512i table;
typedef line grids;
INLINE table table_load(const int8_t *codebook) {
    return _mm512_broadcast_i32x4(_mm_add_epi8(_mm_loadu_si128((const __m128i *)codebook), _mm_set1_epi8(CODE_LIMIT)));
}
INLINE line line_load(const uint8_t *p) { return load64(p); }
INLINE void line_store(uint8_t *p, line x) { store64(p, x); }
INLINE grids grid_load(const uint8_t *p) {   // a byte times 0x01010101 stands in all 4
    const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m512i spread = _mm512_set_epi64(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000,
                                            0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
    return _mm512_and_si512(_mm512_shuffle_epi8(s, spread), _mm512_set1_epi8(3));
}
INLINE line codes_of(table t, line x, grids grid, const int part, const int expanded) {
    (void)expanded;
    return _mm512_add_epi8(_mm512_shuffle_epi8(t, _mm512_and_si512(part ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15))), grid);
}

#if defined(__AVX512VNNI__)
// A group's first sums start at the bits of 1.5 * 2^23, so that as floats they are shift + n, without a conversion.
#define SHIFT 0x1.8p23f
enum { SHIFTED_BITS = 0x4b400000 };
typedef __m512i dots;                   // one int32 per row
typedef __m512 scaled;                   // as floats: every step is exact
typedef __m512 scales;
INLINE scales scales_load(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE void scales_store(uint8_t *p, scales s) { _mm512_storeu_ps(p, s); }
INLINE scales scales_reload(const uint8_t *p) { return _mm512_loadu_ps(p); }
INLINE void dots_starts(const int8_t *x, int32_t starts[2]) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)x));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-CODE_LIMIT));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_srli_si256(fours, 8)), halves = _mm256_add_epi32(eights, _mm256_srli_si256(eights, 4));
    starts[0] = SHIFTED_BITS + _mm256_extract_epi32(halves, 0), starts[1] = _mm256_extract_epi32(halves, 4);
}
INLINE dots dots_from(int32_t start, grids grid, const int expanded) {
    (void)grid, (void)expanded;
    return every64(start);
}
INLINE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    (void)expanded;
    d = _mm512_dpbusd_epi32(d, codes, every64(inputs[word_place(word, T, t)]));
    PIN(d);
    return d;
}
typedef dots row_dots;
INLINE row_dots dots_row(dots d, const int r, const int expanded) { (void)r, (void)expanded; return d; }
// (shift + n) s - shift s, with one rounding, of a number that needs none.
INLINE scaled scaled_first(row_dots d, scales s) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(d), s, _mm512_mul_ps(s, _mm512_set1_ps(-SHIFT)));
}
INLINE scaled scaled_add(scaled w, row_dots d, scales s) { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), s, w); }
INLINE v16 scaled_float(scaled w) { return w; }
#else
typedef __m512i dots;                   // per row two int16, as on AVX2
typedef __m512i scaled;
typedef __m512i scales;
INLINE scales scales_load(const uint8_t *p) {
    const __m512i s = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_mask_mov_epi16(s, 0xaaaaaaaau, _mm512_slli_epi32(s, 16));
}
INLINE void scales_store(uint8_t *p, scales s) { store64(p, s); }
INLINE scales scales_reload(const uint8_t *p) { return load64(p); }
INLINE dots dots_from(int32_t start, grids grid, const int expanded) {
    (void)grid, (void)expanded;
    return every64(start);
}
INLINE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    (void)expanded;
    d = _mm512_add_epi16(d, _mm512_maddubs_epi16(codes, every64(inputs[word_place(word, T, t)])));
    PIN(d);
    return d;
}
typedef dots row_dots;
INLINE row_dots dots_row(dots d, const int r, const int expanded) { (void)r, (void)expanded; return d; }
INLINE scaled scaled_first(row_dots d, scales s) { return _mm512_madd_epi16(d, s); }
INLINE scaled scaled_add(scaled w, row_dots d, scales s) { return _mm512_add_epi32(w, _mm512_madd_epi16(d, s)); }
INLINE v16 scaled_float(scaled w) { return _mm512_cvtepi32_ps(w); }
#endif

// ---- 8-bit codes

INLINE int wide_passes(const int T) { (void)T; return 0; }
INLINE v16 v16_load_int8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
#if defined(__AVX512VNNI__)
// An input is 128 h + l with h and l in int8: two sums of bytes, from the codes as they lie in the file.
enum { WIDE_PARTS = 1, EXPANDED_LINE_Q8 = 64 };
typedef __m512i wide;
typedef struct { __m512i h, l; } dots8;
INLINE wide wide_load(const uint8_t *group, const int l, const int part) { (void)part; return load64(group + l * LINE_BYTES); }
INLINE void wide_expand(uint8_t *to, const uint8_t *group, int l) { store64(to + l * EXPANDED_LINE_Q8, wide_load(group, l, 0)); }
INLINE wide wide_reload(const uint8_t *group, const int l, const int part) { (void)part; return load64(group + l * EXPANDED_LINE_Q8); }
INLINE void pack8(const int16_t *x, int32_t *words) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)x), h = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(64)), 7);
    const __m128i high = _mm256_cvtepi16_epi8(h), low = _mm256_cvtepi16_epi8(_mm256_sub_epi16(v, _mm256_slli_epi16(h, 7)));
    _mm_storeu_si128((__m128i *)words, _mm_unpacklo_epi32(high, low));
    _mm_storeu_si128((__m128i *)(words + 4), _mm_unpackhi_epi32(high, low));
}
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) {
    (void)T, (void)expanded;
    return (dots8){ _mm512_setzero_si512(), every64(-Q8_OFFSET * sums[t]) };
}
INLINE dots8 dots8_next(dots8 d) { return d; }
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    (void)part;
    d.h = _mm512_dpbusd_epi32(d.h, w, every64(inputs[word_place(2 * l, T, t)]));
    PIN(d.h);
    d.l = _mm512_dpbusd_epi32(d.l, w, every64(inputs[word_place(2 * l + 1, T, t)]));
    PIN(d.l);
    return d;
}
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    (void)T, (void)row;
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(d.h, 7), d.l));
}
#else
enum { WIDE_PARTS = 2, EXPANDED_LINE_Q8 = 128 };   // as on AVX2
typedef __m512i wide;
typedef __m512i dots8;
INLINE wide wide_load(const uint8_t *group, const int l, const int part) {
    const __m512i x = load64(group + l * LINE_BYTES);
    return part ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(255));
}
INLINE void wide_expand(uint8_t *to, const uint8_t *group, int l) {
    UNROLL for (int part = 0; part < 2; part++)
        store64(to + l * EXPANDED_LINE_Q8 + 64 * part, _mm512_sub_epi16(wide_load(group, l, part), _mm512_set1_epi16(Q8_OFFSET)));
}
INLINE wide wide_reload(const uint8_t *group, const int l, const int part) { return load64(group + l * EXPANDED_LINE_Q8 + 64 * part); }
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) {
    (void)T;
    return expanded ? _mm512_setzero_si512() : every64(-Q8_OFFSET * sums[t]);
}
INLINE dots8 dots8_next(dots8 d) { return d; }
INLINE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    d = _mm512_add_epi32(d, _mm512_madd_epi16(w, every64(inputs[word_place(2 * l + part, T, t)])));
    PIN(d);
    return d;
}
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    (void)T, (void)row;
    return _mm512_cvtepi32_ps(d);
}
#endif
#endif
