// SPDX-License-Identifier: MIT
// terms.cuh - the terms of products with quantized weights: what a block of 128 columns adds to each sum.
#ifndef LLAMAC_TERMS_CUH
#define LLAMAC_TERMS_CUH
#include "weights.cuh"

// The exact sums over span `span` of a group: codes times inputs, in units of the factor with INPUTS_FAST.
// codes: the lane's operand B, 4 words (high, then low halves) of INPUTS_INT16, else 2.
template <int D, int form>
static __device__ __forceinline__ void multiply_span(int (&sums)[4], const uint32_t (&a)[4], uint4 codes, int span,
                                                     int quad) {
    if (dtype_of<D>::spans == 2 && quad / 2 != span) codes = { 0, 0, 0, 0 };   // columns of the other half
    const uint32_t high[2] = { codes.x, codes.y }, low[2] = { codes.z, codes.w };
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = 0;
    mma_s8(sums, a, high);
    if (form != INPUTS_INT16) return;
    int low_sums[4] = { 0, 0, 0, 0 };
    mma_s8(low_sums, a, low);
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = 128 * sums[i] + low_sums[i];
}

// The terms of a block in the sums of struct gemm (csrc/kernels.h): sum = fma(term, scale, sum) over ascending blocks,
// or, for dtypes with grids, groups. terms[i][2 r + n]: of row 2 p + r and input row 2 q + n of an operand B. inputs:
// what the lane reads of the operand: codes(g), and sums(n) and factors(n) of input row 2 q + n, one for each group.
// own_rows: 2, or 1 to leave out the second input row of each lane.
template <int D, int form, int own_rows = 2, class Inputs>
static __device__ __forceinline__ void block_terms(float (&terms)[dtype_of<D>::terms][4], const block_operands<D> &w,
                                                   const Inputs &inputs, int quad) {
    using T = dtype_of<D>;
    float4 input_sums[2], factors[2];
#pragma unroll
    for (int n = 0; n < own_rows; n++) {
        if (T::info.has_minimums) input_sums[n] = inputs.sums(n);
        if (form == INPUTS_FAST) factors[n] = inputs.factors(n);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) terms[0][i] = 0;
    constexpr int step = own_rows == 2 ? 1 : 2;   // to the next of a lane's sums
#pragma unroll
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        const uint4 codes = inputs.codes(g);
        int whole[4] = { 0, 0, 0, 0 };   // of dtypes with grids
#pragma unroll
        for (int span = 0; span < T::spans; span++) {
            const int at = g * T::spans + span;
            int sums[4];
            multiply_span<D, form>(sums, w.a[g], codes, span, quad);
#pragma unroll
            for (int i = 0; i < 4; i += step) {
                if (T::is_int8) {
                    whole[i] += sums[i] * w.integers[at][i / 2];
                    continue;
                }
                float sum = (float)sums[i];
                if (form == INPUTS_FAST) sum = __fmul_rn(sum, element(factors[i % 2], g));
                terms[0][i] = __fmaf_rn(sum, w.scales[at][i / 2], terms[0][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i += step) {
            if (T::is_int8) terms[g % T::terms][i] = (float)whole[i];
            if (T::info.has_minimums)
                terms[0][i] = __fmaf_rn(w.minimums[g][i / 2], element(input_sums[i % 2], g), terms[0][i]);
        }
    }
}
#endif
