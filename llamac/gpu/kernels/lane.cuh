// SPDX-License-Identifier: MIT
// lane.cuh - the SIMD layer of csrc (simd_scalar.h) for a GPU. A v16 is one of its 16 numbers: a thread computes one
// lane, a half-warp a vector. So csrc's functions.h compiles here as it is, and gives the same bits.
#ifndef LLAMAC_LANE_CUH
#define LLAMAC_LANE_CUH
#include "device.cuh"

#ifndef INLINE
#define INLINE static __device__ __forceinline__
#endif
#ifndef SPECIALIZED
#define SPECIALIZED INLINE
#endif

typedef float v16;

INLINE v16 v16_set1(float x) { return x; }
INLINE v16 v16_add(v16 a, v16 b) { return __fadd_rn(a, b); }
INLINE v16 v16_sub(v16 a, v16 b) { return __fsub_rn(a, b); }
INLINE v16 v16_mul(v16 a, v16 b) { return __fmul_rn(a, b); }
INLINE v16 v16_div(v16 a, v16 b) { return __fdiv_rn(a, b); }
INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return __fmaf_rn(a, b, c); }
INLINE v16 v16_fnma(v16 a, v16 b, v16 c) { return __fmaf_rn(-a, b, c); }
INLINE v16 v16_max(v16 a, v16 b) { return a > b ? a : b; }
INLINE v16 v16_min(v16 a, v16 b) { return a < b ? a : b; }
INLINE v16 v16_abs(v16 a) { return f32_from_bits(f32_bits(a) & 0x7fffffff); }
INLINE v16 v16_zero_below(v16 a, v16 x, v16 low) { return x < low ? 0.0f : a; }
INLINE v16 v16_exp2_shifted(v16 t) { return f32_from_bits((f32_bits(t) << 23) + 0x3f800000); }

INLINE float infinity() { return f32_from_bits(0x7f800000); }

#include "functions.h"

enum { LANES = 16 };   // of a v16; every lane of the warp calls the functions below

// v16_reduce_add and v16_reduce_max for both half-warps; all of their lanes get the result. Adding a pair in either
// order gives the same sum. Where a number is NaN, the maximum may be another than csrc's: then exp of the NaN is NaN,
// and with it every result.
INLINE float lanes_add(float x) {
    for (int bits = LANES / 2; bits > 0; bits /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, bits));
    return x;
}
INLINE float lanes_max(float x) {
    for (int bits = LANES / 2; bits > 0; bits /= 2) x = v16_max(x, __shfl_xor_sync(FULL_WARP, x, bits));
    return x;
}

// The integer nearest to x, ties to even, for |x| < 2^22. As round_even.
INLINE int round_even(float x) { return (int)__fsub_rn(__fadd_rn(x, 0x1.8p23f), 0x1.8p23f); }
#endif
