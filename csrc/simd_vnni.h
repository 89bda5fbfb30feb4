// SPDX-License-Identifier: MIT
// simd_vnni.h - products of codes with vpdpbusd, shared by AVX-VNNI and AVX-512 with VNNI. The instruction multiplies
// four unsigned bytes by four signed ones and adds the products to an int32. simd_scalar.h specifies the operations.
//
// Part of simd_avx2.h and simd_avx512.h. They first define v16, line, INT16_PARTS, int16_part_major, and operations on
// lines of 16 x 4 bytes or 16 int32:
//     line_set1             an int32 for all rows
//     line_dot              sums plus, for each row, the products of its four unsigned and four signed bytes
//     line_add_bytes        adds to each byte
//     v16_store_uint8       16 floats, rounded, as unsigned bytes
//     line_times_128_plus   128 x + y
//     line_to_floats, line_as_floats   the int32 converted; their bits as floats
#ifndef LLAMAC_SIMD_VNNI_H
#define LLAMAC_SIMD_VNNI_H

// sums plus, for each row, the products of its four unsigned codes with a word of inputs.
INLINE line line_add_products(line sums, line codes, int32_t inputs) {
    return line_dot(sums, codes, line_set1(inputs));
}

// ---- q4 and q4s: sums start at -32 * (sum of the inputs), since codes are stored plus 32. The sums of a group's first
// half, or of the whole group, start at the bit pattern of the float 1.5 * 2^23, too. Their bits as floats are
// SHIFT + n, which saves a conversion.

#define SIMD_GROUP_SUMS
#define SHIFT 0x1.8p23f
enum { SHIFT_BITS = 0x4b400000 };
typedef line int8_acc, int8_row_acc;   // an int32 per row
typedef v16 int8_scaled;               // floats, in which every step is exact
typedef v16 block_scales;
INLINE block_scales block_scales_load(const uint8_t *p) { return v16_load_int8(p); }
INLINE void block_scales_store(uint8_t *p, block_scales s) { v16_store((float *)(void *)p, s); }
INLINE block_scales block_scales_load_unpacked(const uint8_t *p) { return v16_load((const float *)(const void *)p); }
INLINE void int8_compensation(const int8_t *x, int32_t terms[2]) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)x));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-CODE_LIMIT));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_srli_si256(fours, 8));
    const __m256i halves = _mm256_add_epi32(eights, _mm256_srli_si256(eights, 4));
    terms[0] = SHIFT_BITS + _mm256_extract_epi32(halves, 0), terms[1] = _mm256_extract_epi32(halves, 4);
}
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    (void)grid, (void)unpacked;
    return line_set1(compensation);
}
INLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                             const int unpacked) {
    (void)unpacked;
    return line_add_products(d, codes, inputs[word_index(word, T, t)]);
}
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) { (void)r, (void)unpacked; return d; }
// (SHIFT + n) s - SHIFT s: one rounding, and the result n s is exact.
INLINE int8_scaled int8_scale(int8_row_acc d, block_scales s) {
    return v16_fma(line_as_floats(d), s, v16_mul(s, v16_set1(-SHIFT)));
}
INLINE int8_scaled int8_scale_add(int8_scaled w, int8_row_acc d, block_scales s) {
    return v16_fma(line_to_floats(d), s, w);
}
INLINE v16 int8_scaled_to_float(int8_scaled w) { return w; }

// ---- int16 inputs: an input is 128 h + l with h and l in int8. The words of 4 columns are their h and their l.

enum { UNPACKED_BIAS = 128, INT16_UNPACKED_LINE_BYTES = 64 };
#define SIMD_NARROW   // rounded inputs can be multiplied at once: kernels_narrow.h
typedef line int16_codes;
typedef struct { line h, l; } int16_acc;
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) { (void)part; return l & 1 ? y : x; }
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    line_store(to + l * INT16_UNPACKED_LINE_BYTES,
               line_add_bytes(int16_codes_from(x, y, l, 0), UNPACKED_BIAS - bias));
}
INLINE int16_codes int16_codes_load_unpacked(const uint8_t *group, const int l, const int part) {
    (void)part;
    return line_load(group + l * INT16_UNPACKED_LINE_BYTES);
}
INLINE void int16_pack_words(const int16_t *x, int32_t *words) {
    const __m256i v = _mm256_loadu_si256((const __m256i *)x);
    const __m256i h = _mm256_srai_epi16(_mm256_add_epi16(v, _mm256_set1_epi16(64)), 7);
    const __m256i l = _mm256_sub_epi16(v, _mm256_slli_epi16(h, 7));
    // words h0, h1, l0, l1 in each half become h0, l0, h1, l1
    _mm256_storeu_si256((__m256i *)words, _mm256_shuffle_epi32(_mm256_packs_epi16(h, l), 0xd8));
}
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    (void)T;
    return (int16_acc){ line_set1(0), line_set1(-bias * (minus ? plus[t] - minus[t] : plus[t])) };
}
INLINE int16_acc int16_acc_next_part(int16_acc d) { return (int16_acc){ line_set1(0), line_times_128_plus(d.h, d.l) }; }
INLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                               const int T, const int t) {
    if (INT16_PARTS == 1 || part == 0) d.h = line_add_products(d.h, w, inputs[word_index(2 * l, T, t)]);
    if (INT16_PARTS == 1 || part == 1) d.l = line_add_products(d.l, w, inputs[word_index(2 * l + 1, T, t)]);
    return d;
}
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    (void)T, (void)row;
    return line_to_floats(line_times_128_plus(d.h, d.l));
}
#endif
