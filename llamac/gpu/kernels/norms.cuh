// SPDX-License-Identifier: MIT
// norms.cuh - rms_norm, layer_norm and unit_norm of csrc (kernels_template.h), for a row that a block or a warp has in
// shared memory. The 16 partial sums by index mod 16 are chains of fused multiply-adds; each belongs to one lane.
#ifndef LLAMAC_NORMS_CUH
#define LLAMAC_NORMS_CUH
#include "lane.cuh"

struct Moments { float mean, scale; };   // a norm is (x - mean) * scale * weight; without mean: rms_norm

// Of n numbers in shared memory. One warp calls it; its half-warps compute the same.
INLINE Moments moments(const float *x, int n, float eps, int is_rms) {
    const int lane = threadIdx.x % LANES;
    Moments m = { 0, 0 };
    float sum = 0, squares = 0;
    if (!is_rms) {
#pragma unroll 8
        for (int i = lane; i < n; i += LANES) sum = __fadd_rn(sum, x[i]);
        m.mean = __fdiv_rn(lanes_add(sum), (float)n);
    }
#pragma unroll 8
    for (int i = lane; i < n; i += LANES) {
        const float v = is_rms ? x[i] : __fsub_rn(x[i], m.mean);
        squares = __fmaf_rn(v, v, squares);
    }
    m.scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(lanes_add(squares), (float)n), eps)));
    return m;
}

// The factor of unit_norm for n numbers in shared memory. One warp calls it; its half-warps compute the same.
INLINE float unit_scale(const float *x, int n, float eps, float factor) {
    float squares = 0;
#pragma unroll 8
    for (int i = threadIdx.x % LANES; i < n; i += LANES) squares = __fmaf_rn(x[i], x[i], squares);
    return __fdiv_rn(factor, __fsqrt_rn(__fadd_rn(lanes_add(squares), eps)));
}

// One number of the norm. bias: 0 with rms_norm, and where layer_norm has none.
INLINE float normed(float x, Moments m, int is_rms, float weight, float bias) {
    if (is_rms) return __fmul_rn(__fmul_rn(x, m.scale), weight);
    return __fmaf_rn(__fmul_rn(__fsub_rn(x, m.mean), m.scale), weight, bias);
}
#endif
