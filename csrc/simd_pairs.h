// SPDX-License-Identifier: MIT
// simd_pairs.h - inputs for vpmaddubsw and vpmaddwd, which AVX2 and AVX-512 without VNNI share: sums are pairs of int16.
#ifndef LLAMAC_SIMD_PAIRS_H
#define LLAMAC_SIMD_PAIRS_H
#include <immintrin.h>
#include "common.h"
#include "dtype.h"

INLINE void dots_starts(const int8_t *x, int32_t starts[2]) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(CODE_LIMIT), _mm256_loadu_si256((const __m256i *)x));
    const __m256i four = _mm256_add_epi16(pairs, _mm256_srli_si256(pairs, 8)), sums = _mm256_add_epi16(four, _mm256_srli_si256(four, 4));
    const __m256i negative = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
    starts[0] = _mm256_extract_epi32(negative, 0), starts[1] = _mm256_extract_epi32(negative, 4);
}
INLINE void pack8(const int16_t *x, int32_t *words) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256((__m256i *)words, _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)x), order));
}
#endif
