// SPDX-License-Identifier: MIT
// simd_avx512.h - the SIMD layer for AVX-512 F, BW, DQ and VL, with or without VNNI: a v16 is one register. With
// VNNI, vpdpbusd computes dot products of bytes. simd_scalar.h specifies each operation.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <immintrin.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#if !defined(__AVX512VNNI__)
#include "simd_maddubs.h"
#endif
#include "simd_panel_layout.h"

typedef __m512 v16;
enum {
    FLOAT_TILE_ACCS = 24,        // of 32 registers
    INT8_TILE_ACCS = 12, MAX_LIVE_SUMS = 6, MAX_CARRIED_SUMS = 24,
    UNPACK_ABOVE_F16 = 30, UNPACK_ABOVE_BF16 = 30, UNPACK_ABOVE_NIBBLES = 18,
#if defined(__AVX512VNNI__)
    INT16_TILE_ACCS = 8,            // of two registers each
    NARROW_TILE_ACCS = 12, VALUES_TILE_ACCS = 24,
    UNPACK_ABOVE_BYTES = 1 << 30,   // vpdpbusd multiplies the bytes as stored
#else
    INT16_TILE_ACCS = 12,
    UNPACK_ABOVE_BYTES = 36,
#endif
};

INLINE __mmask16 lane_mask(int n) { return (__mmask16)((1u << (n < 0 ? 0 : n > 16 ? 16 : n)) - 1); }
INLINE v16 v16_set1(float x) { return _mm512_set1_ps(x); }
INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v16_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v16_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
INLINE void v16_store_n(float *p, v16 x, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), x); }

INLINE v16 v16_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE v16 v16_load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE v16 v16_load_e8m0(const uint8_t *p) {   // see simd_avx2.h
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), one = _mm512_set1_epi32(1);
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23),
                                                _mm512_slli_epi32(_mm512_add_epi32(e, one), 21)));
}
INLINE void v16_store_f16(uint16_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE v16 v16_load_bf16_permuted(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE v16 v16_unpermute(v16 x) { return x; }

INLINE v16 v16_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
INLINE v16 v16_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE v16 v16_fma_scalar(v16 x, float y, v16 z) { return v16_fma(x, v16_set1(y), z); }
INLINE v16 v16_fnma(v16 x, v16 y, v16 z) { return _mm512_fnmadd_ps(x, y, z); }
INLINE v16 v16_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
INLINE v16 v16_min(v16 x, v16 y) { return _mm512_min_ps(x, y); }
INLINE v16 v16_abs(v16 x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
INLINE v16 v16_zero_below(v16 x, v16 y, v16 low) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, low, _CMP_NLT_UQ), x);
}
INLINE v16 v16_blend_n(v16 x, v16 y, int n) { return _mm512_mask_mov_ps(y, lane_mask(n), x); }
INLINE v16 v16_exp2_shifted(v16 t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(0x3f800000)));
}

#define REDUCE(op, x) do { \
        __m256 eight = _mm256_##op##_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); \
        __m128 four = _mm_##op##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = _mm_##op##_ps(four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(_mm_##op##_ss(two, _mm_movehdup_ps(two))); } while (0)
INLINE float v16_reduce_add(v16 x) { REDUCE(add, x); }
INLINE float v16_reduce_max(v16 x) { REDUCE(max, x); }
#undef REDUCE

INLINE void v16_store_int8(int8_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
INLINE void v16_store_int16(int16_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}

#define VALUE_BARRIER(x) __asm__("" : "+v"(x))   // see simd_avx2.h

INLINE __m512i broadcast_512(int32_t x) { return _mm512_set1_epi32(x); }
INLINE __m512i load_512(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_512(void *p, __m512i x) { _mm512_storeu_si512(p, x); }

// ---- codes: lines of 16 rows x 4 bytes

typedef __m512i line;
typedef __m512i lut;
typedef line grid_offsets;
INLINE lut lut_load(const int8_t *codebook, const int bias) {
    return _mm512_broadcast_i32x4(
        _mm_add_epi8(_mm_loadu_si128((const __m128i *)codebook), _mm_set1_epi8((char)bias)));
}
INLINE line line_load(const uint8_t *p) { return load_512(p); }
INLINE void line_store(uint8_t *p, line x) { store_512(p, x); }
INLINE grid_offsets grid_offsets_load(const uint8_t *p) {
    const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    const __m512i low_byte_to_all_4 =
        _mm512_set_epi64(0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000,
                         0x0c0c0c0c08080808, 0x0404040400000000, 0x0c0c0c0c08080808, 0x0404040400000000);
    return _mm512_and_si512(_mm512_shuffle_epi8(s, low_byte_to_all_4), _mm512_set1_epi8(3));
}
enum { INT8_BIAS = CODE_LIMIT };   // codes are unsigned in products with signed inputs
INLINE line int8_codes(lut t, line x, grid_offsets grid, const int half, const int unpacked) {
    (void)unpacked;
    return _mm512_add_epi8(
        _mm512_shuffle_epi8(t, _mm512_and_si512(half ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15))), grid);
}

enum { BYTE_BIAS = 128 };
INLINE line line_from_bytes(line x) { return x; }
INLINE line line_nibbles(line x, const int half) {
    return _mm512_and_si512(half ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
}
// The mask removes what a shift of int16 moves into another byte.
INLINE line line_move_bits(line x, const int from, const int mask) {
    const __m512i shifted = from < 4 ? _mm512_slli_epi16(x, (unsigned)(4 - from))
                                     : _mm512_srli_epi16(x, (unsigned)(from - 4));
    return _mm512_and_si512(shifted, _mm512_set1_epi8((char)mask));
}
INLINE line line_insert_bits(line x, line other, const int from, const int mask) {
    return _mm512_or_si512(x, line_move_bits(other, from, mask));
}
INLINE line line_lookup(lut t, line x) { return _mm512_shuffle_epi8(t, x); }

#if defined(__AVX512VNNI__)
// ---- products with vpdpbusd

INLINE line line_set1(int32_t x) { return broadcast_512(x); }
INLINE line line_dot(line sums, line x, line y) {
    sums = _mm512_dpbusd_epi32(sums, x, y);
    VALUE_BARRIER(sums);
    return sums;
}
INLINE void v16_store_uint8(uint8_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x)));
}
INLINE line line_add_bytes(line x, const int n) { return _mm512_add_epi8(x, _mm512_set1_epi8((char)n)); }
INLINE line line_times_128_plus(line x, line y) { return _mm512_add_epi32(_mm512_slli_epi32(x, 7), y); }
INLINE v16 line_to_floats(line x) { return _mm512_cvtepi32_ps(x); }
INLINE v16 line_as_floats(line x) { return _mm512_castsi512_ps(x); }
enum { INT16_PARTS = 1 };
INLINE int int16_part_major(const int T) { (void)T; return 0; }
INLINE line line_add(line x, line y) { return _mm512_add_epi32(x, y); }
#include "simd_vnni.h"
#if !defined(IS_AMD)
#define IS_AMD __builtin_cpu_is("amd")
#endif

#ifndef SIMD_TILES
// ---- q4 with block scales as integers

// AMD's cores, which have no matrix tiles, take one operation for a product of 32-bit integers, like one of floats;
// Intel's cores take two.
#define SIMD_INTEGER_SCALES
INLINE int integer_scales_are_faster(void) { return IS_AMD; }
INLINE int8_scaled int8_scale_integers(int8_row_acc d, block_scales s) {
    return line_as_floats(_mm512_mullo_epi32(d, _mm512_cvtps_epi32(s)));
}
INLINE int8_scaled int8_scale_add_integers(int8_scaled w, int8_row_acc d, block_scales s) {
    return line_as_floats(line_add(_mm512_castps_si512(w), _mm512_mullo_epi32(d, _mm512_cvtps_epi32(s))));
}
INLINE v16 int8_integers_to_float(int8_scaled w) { return line_to_floats(_mm512_castps_si512(w)); }
#endif

// ---- bf16 in pairs of columns (kernels_bf16.h)

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11   // older compilers may not know "avx512bf16"
#define SIMD_BF16_PAIRS
INLINE int has_bf16_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }
// On AMD's cores, vdpbf16ps multiplies twice as much as a multiply-add of floats. Intel's have not been measured.
#if !defined(BF16_PAIRS)
#define BF16_PAIRS (IS_AMD && has_bf16_pairs())
#endif
INLINE int bf16_pairs_are_faster(void) { return BF16_PAIRS; }
// The 16 rows' weights of two columns, or of one and 0, as words: the first column in the upper halves.
INLINE line bf16_pairs_load(const uint16_t *p, const int columns) {
    const __m512i row = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(_mm512_slli_epi32(row, 16), _mm512_add_epi32(row, _mm512_set1_epi32(16)));
    return _mm512_permutexvar_epi16(order, columns == 2 ? load_512(p) : _mm512_maskz_loadu_epi16(0xffff, p));
}
// For each place of a line, the smallest magnitude that is not 0, less a step of bf16: of `least` and of the pairs.
INLINE line bf16_pairs_least(line least, line pairs) {
    const __m512i magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
    return _mm512_min_epu16(least, _mm512_sub_epi16(magnitudes, _mm512_set1_epi16(1)));
}
INLINE int bf16_pairs_any_below(line least, uint16_t limit) {   // limit: a bf16
    return _mm512_cmplt_epu16_mask(least, _mm512_set1_epi16((short)(limit - 1))) != 0;
}
// sums plus the products of the first column, then of the second. x: the inputs of both.
INLINE v16 v16_dot_bf16_pairs(line pairs, int32_t x, v16 sums) {   // not all compilers know the instruction
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(pairs), "v"(broadcast_512(x)));
    return sums;
}
INLINE v16 v16_fma_bf16_pairs(line pairs, int32_t x, v16 sums) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000), words = broadcast_512(x);
    sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper)),
                           _mm512_castsi512_ps(_mm512_and_si512(words, upper)), sums);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), sums);
}
#endif

// ---- int16 inputs in pairs of columns (kernels_pairs.h): words (0, 2) and words (1, 3) of each 4 columns

#define SIMD_PAIRS
// AMD's cores multiply in two of the four units in which they add. Intel's cores have the same units for both.
INLINE int pairs_are_faster(void) { return IS_AMD; }
INLINE line words_from(line x, const int odd, const int bias) {
    x = odd ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(255));
    return bias ? _mm512_sub_epi16(x, _mm512_set1_epi16((short)bias)) : x;
}
INLINE line words_add(line x, line y) { return _mm512_add_epi16(x, y); }
INLINE line line_sub(line x, line y) { return _mm512_sub_epi32(x, y); }
// sums plus the products of words.
INLINE line line_dot_words(line sums, line x, line y) {
    sums = _mm512_dpwssd_epi32(sums, x, y);
    VALUE_BARRIER(sums);
    return sums;
}
// Stores the words of 16 columns. Returns the sum of the products within the pairs of the first 12, modulo 2^32.
INLINE uint32_t pack_pair_words(const int16_t *x, int32_t *words) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)x);
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256((__m256i *)words, _mm256_shuffle_epi8(v, order));
    const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xb1), 0xb1);
    const __m256i six = _mm256_srai_epi32(_mm256_maskz_madd_epi16(0x3f, v, swapped), 1);   // it adds each product twice
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(six), _mm256_extracti128_si256(six, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_srli_epi64(two, 32)));
}
#else
// ---- int8 inputs, as on AVX2 without VNNI

typedef __m512i int8_acc;           // two int16 per row
typedef int8_acc int8_row_acc;
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    (void)grid, (void)unpacked;
    return broadcast_512(compensation);
}
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) { (void)r, (void)unpacked; return d; }

typedef __m512i int8_scaled;
typedef __m512i block_scales;       // int16, each row's scale twice
INLINE block_scales block_scales_load(const uint8_t *p) {
    const __m512i s = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_mask_mov_epi16(s, 0xaaaaaaaau, _mm512_slli_epi32(s, 16));
}
INLINE void block_scales_store(uint8_t *p, block_scales s) { store_512(p, s); }
INLINE block_scales block_scales_load_unpacked(const uint8_t *p) { return load_512(p); }
INLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                             const int unpacked) {
    (void)unpacked;
    d = _mm512_add_epi16(d, _mm512_maddubs_epi16(codes, broadcast_512(inputs[word_index(word, T, t)])));
    VALUE_BARRIER(d);
    return d;
}
INLINE int8_scaled int8_scale(int8_row_acc d, block_scales s) { return _mm512_madd_epi16(d, s); }
INLINE int8_scaled int8_scale_add(int8_scaled w, int8_row_acc d, block_scales s) {
    return _mm512_add_epi32(w, _mm512_madd_epi16(d, s));
}
INLINE v16 int8_scaled_to_float(int8_scaled w) { return _mm512_cvtepi32_ps(w); }

// ---- int16 inputs, as on AVX2 without VNNI

typedef __m512i int16_codes;
enum { UNPACKED_BIAS = 0, INT16_PARTS = 2, INT16_UNPACKED_LINE_BYTES = 128 };
typedef __m512i int16_acc;
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) {
    if (l & 1) x = y;
    return part ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(x, _mm512_set1_epi16(255));
}
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    UNROLL for (int part = 0; part < 2; part++)
        store_512(to + l * INT16_UNPACKED_LINE_BYTES + 64 * part,
                  _mm512_sub_epi16(int16_codes_from(x, y, l, part), _mm512_set1_epi16((short)bias)));
}
INLINE int16_codes int16_codes_load_unpacked(const uint8_t *group, const int l, const int part) {
    return load_512(group + l * INT16_UNPACKED_LINE_BYTES + 64 * part);
}
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    (void)T;
    return bias ? broadcast_512(-bias * (minus ? plus[t] - minus[t] : plus[t])) : _mm512_setzero_si512();
}
INLINE int int16_part_major(const int T) { (void)T; return 0; }
INLINE int16_acc int16_acc_next_part(int16_acc d) { return d; }
INLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                               const int T, const int t) {
    d = _mm512_add_epi32(d, _mm512_madd_epi16(w, broadcast_512(inputs[word_index(2 * l + part, T, t)])));
    VALUE_BARRIER(d);
    return d;
}
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    (void)T, (void)row;
    return _mm512_cvtepi32_ps(d);
}
#endif

// ---- quantizing

INLINE v16 v16_select_less(v16 x, v16 y, v16 a, v16 b) {
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a);
}
INLINE v16 v16_sub_exact_product(v16 x, v16 y, v16 z) { return _mm512_fnmadd_ps(y, z, x); }

// 16 rows x 2 words.
INLINE line line_from_floats(v16 x, v16 y) {
    return _mm512_mask_mov_epi16(_mm512_cvtps_epi32(x), 0xaaaaaaaau, _mm512_slli_epi32(_mm512_cvtps_epi32(y), 16));
}
INLINE line line_scaled(line x, line y) { return _mm512_mulhrs_epi16(x, y); }
typedef struct { __m512i code, first, second, twice; } cells_lut;
INLINE __m512i broadcast_bytes(const int8_t *p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}
INLINE cells_lut cells_lut_load(const struct code_cells *c) {
    return (cells_lut){ broadcast_bytes(c->code), broadcast_bytes(c->first), broadcast_bytes(c->second),
                        broadcast_bytes(c->twice) };
}
typedef __m512i int16_squares;
INLINE int16_squares squares_zero(void) { return _mm512_setzero_si512(); }
INLINE int16_squares add_squares(int16_squares sum, __m512i x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, x, x);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, x));
#endif
}
// Packing saturates; unpacking restores the order.
INLINE int16_squares squares_add_nearest(int16_squares sum, cells_lut t, line x, line y) {
    const __m512i one = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    const __m512i p = _mm512_packs_epi16(_mm512_srai_epi16(x, 7), _mm512_srai_epi16(y, 7));
    const __m512i cell = _mm512_and_si512(_mm512_srli_epi16(p, 4), _mm512_set1_epi8(15));
    __m512i code = _mm512_shuffle_epi8(t.code, cell);
    code = _mm512_mask_add_epi8(code, _mm512_cmpgt_epi8_mask(p, _mm512_shuffle_epi8(t.first, cell)), code, one);
    code = _mm512_mask_add_epi8(code, _mm512_cmpgt_epi8_mask(p, _mm512_shuffle_epi8(t.second, cell)), code, one);
    const __m512i twice = _mm512_shuffle_epi8(t.twice, code);
    sum = add_squares(sum, _mm512_sub_epi16(x, _mm512_unpacklo_epi8(zero, twice)));
    return add_squares(sum, _mm512_sub_epi16(y, _mm512_unpackhi_epi8(zero, twice)));
}
INLINE v16 squares_to_floats(int16_squares x) { return _mm512_cvtepi32_ps(x); }
INLINE unsigned v16_mask_less(v16 x, v16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }

// Cells of 5 positions around multiples of 5: in each, at most one code starts. `start` is its position, `value` the
// value before it; the value after it is that of the next cell.
enum { CELL = 5, CELLS = 32 };
_Static_assert(CELL * CELLS == CODE_POSITIONS, "the cells cover all positions");
typedef struct { float start[CELLS], value[CELLS]; } code_table;
typedef struct { __m512 start[2], value[2]; } code_lut;
INLINE void code_table_init(code_table *table, struct code_values codes, const int8_t *values, int offset) {
    for (int cell = 0, j = 0; cell < CELLS; cell++) {
        while (j < codes.last && code_start(codes, j + 1, offset) < CELL * cell - 2) j++;
        table->value[cell] = values[j];
        const int start = j < codes.last ? code_start(codes, j + 1, offset) : CELL * CELLS;
        table->start[cell] = start <= CELL * cell + 2 ? (float)start : 3.4e38f;
    }
}
INLINE code_lut code_lut_load(const code_table *t) {
    return (code_lut){ { _mm512_loadu_ps(t->start), _mm512_loadu_ps(t->start + 16) },
                       { _mm512_loadu_ps(t->value), _mm512_loadu_ps(t->value + 16) } };
}
INLINE void v16_nearest_codes(code_lut t, const v16 *positions, v16 *values) {
    UNROLL for (int i = 0; i < 4; i++) {
        const v16 p =
            _mm512_min_ps(_mm512_max_ps(positions[i], _mm512_setzero_ps()), _mm512_set1_ps(CELL * CELLS - 3));
        // rounded to a multiple of CELL. A permutation uses the low bits of an index, here those of a fraction.
        __m512i cell = _mm512_castps_si512(_mm512_fmadd_ps(p, _mm512_set1_ps(1.0f / CELL), _mm512_set1_ps(0x1.8p23f)));
        const __m512 start = _mm512_permutex2var_ps(t.start[0], cell, t.start[1]);
        cell = _mm512_mask_add_epi32(cell, _mm512_cmp_ps_mask(p, start, _CMP_GE_OQ), cell, _mm512_set1_epi32(1));
        values[i] = _mm512_permutex2var_ps(t.value[0], cell, t.value[1]);
    }
}
#endif
