// SPDX-License-Identifier: MIT
// simd_maddubs.h - inputs in the form that vpmaddubsw and vpmaddwd multiply, shared by AVX2 and AVX-512 without VNNI.
// Their q4 accumulators are pairs of int16.
#ifndef LLAMAC_SIMD_MADDUBS_H
#define LLAMAC_SIMD_MADDUBS_H
#include <immintrin.h>
#include "common.h"
#include "dtype.h"

// -32 * (sum of the inputs): q4 codes are stored plus 32, unsigned. Two int16 per term, one for each half of an int32
// lane.
INLINE void int8_compensation(const int8_t *x, int32_t terms[2]) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(CODE_LIMIT), _mm256_loadu_si256((const __m256i *)x));
    const __m256i four = _mm256_add_epi16(pairs, _mm256_srli_si256(pairs, 8));
    const __m256i sums = _mm256_add_epi16(four, _mm256_srli_si256(four, 4));
    const __m256i negative = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
    terms[0] = _mm256_extract_epi32(negative, 0), terms[1] = _mm256_extract_epi32(negative, 4);
}
// Columns (0, 2) of each 4 in one word, (1, 3) in the next, as int16_codes_from splits the codes.
INLINE void int16_pack_words(const int16_t *x, int32_t *words) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256((__m256i *)words, _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)x), order));
}
#endif
