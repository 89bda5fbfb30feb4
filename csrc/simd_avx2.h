// SPDX-License-Identifier: MIT
// simd_avx2.h - the vector vocabulary (see simd_scalar.h) for AVX2, FMA and F16C: two registers of 8 floats.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <immintrin.h>
#include "common.h"

typedef struct { __m256 a, b; } v16;   // lanes 0..7 and 8..15
enum { STRIPS_IN_FLIGHT = 4 };         // 8 registers of sums hide the latency of the multiply-add

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
#endif
