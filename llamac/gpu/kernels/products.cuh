// SPDX-License-Identifier: MIT
// products.cuh - products with quantized weights of 1 to 8 rows per block of threads.
#ifndef LLAMAC_PRODUCTS_CUH
#define LLAMAC_PRODUCTS_CUH
#include "epilogue.cuh"
#include "weights.cuh"

enum {
    TERM_FLOATS = 8192,             // of shared memory
};

// ---- a warp's part: one block of 128 columns times up to 8 input rows

// What a lane reads of the inputs of a block: its operands B, and of input rows 2 q and 2 q + 1 the sums and factors.
template <int form> struct block_inputs {
    uint2 high[BLOCK_GROUPS], low[BLOCK_GROUPS];   // low: INPUTS_INT16
    float4 sums[2], factors[2];
};

// row: the packed inputs of operand row lane / 4, or NULL: zeros. rows: those of input rows 2 q and 2 q + 1, or NULL.
template <int D, int form>
static __device__ __forceinline__ void load_inputs(block_inputs<form> &to, const unsigned char *row,
                                                   const unsigned char *const (&rows)[2], const input_layout &layout,
                                                   int block, int quad) {
#pragma unroll
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        const int at = (block * BLOCK_GROUPS + g) * 4 + quad;   // of the row's lanes
        to.high[g] = to.low[g] = { 0, 0 };
        if (!row) continue;
        if (form == INPUTS_INT16) {
            const uint4 x = __ldg((const uint4 *)(const void *)row + at);
            to.high[g] = { x.x, x.y }, to.low[g] = { x.z, x.w };
        } else {
            to.high[g] = __ldg((const uint2 *)(const void *)row + at);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 && form != INPUTS_INT8; i++) {
        to.sums[i] = to.factors[i] = { 0, 0, 0, 0 };
        if (!rows[i]) continue;
        if (dtype_of<D>::info.has_minimums) to.sums[i] = __ldg((const float4 *)(const void *)(rows[i] + layout.sums) + block);
        if (form == INPUTS_ROUNDED) to.factors[i] = __ldg((const float4 *)(const void *)(rows[i] + layout.factors) + block);
    }
}
static __device__ __forceinline__ float element(const float4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// The exact sums over span `span` of a group: codes times inputs, in units of the factor with INPUTS_ROUNDED.
template <int D, int form>
static __device__ __forceinline__ void multiply_span(int (&sums)[4], const uint32_t (&a)[4],
                                                     const block_inputs<form> &x, int g, int span, int quad) {
    // With spans of 16 columns, lanes with columns of the other span multiply by 0.
    const bool is_in = dtype_of<D>::spans == 1 || quad / 2 == span;
    const uint32_t high[2] = { is_in ? x.high[g].x : 0, is_in ? x.high[g].y : 0 };
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = 0;
    mma_s8(sums, a, high);
    if (form != INPUTS_INT16) return;
    const uint32_t low[2] = { is_in ? x.low[g].x : 0, is_in ? x.low[g].y : 0 };
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] *= 128;
    mma_s8(sums, a, low);
}

// The terms that a block adds to the sums of struct gemm (csrc/kernels.h): sum = fma(term, scale, sum) over ascending
// blocks, or, for q4 and q4s, groups. terms[i][2 r + n]: of row 2 p + r and input row 2 q + n.
template <int D, int form>
static __device__ __forceinline__ void block_terms(float (&terms)[dtype_of<D>::terms][4], const block_weights<D> &w,
                                                   const block_inputs<form> &x, int quad) {
    using T = dtype_of<D>;
#pragma unroll
    for (int i = 0; i < 4; i++) terms[0][i] = 0;
#pragma unroll
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        if (g >= w.groups) break;
        uint32_t a[4];
        decode_group(w, g, quad, a);
        int whole[4] = { 0, 0, 0, 0 };   // of q4 and q4s
#pragma unroll
        for (int span = 0; span < T::spans; span++) {
            const int at = g * T::spans + span;
            int sums[4];
            multiply_span<D>(sums, a, x, g, span, quad);
            if (T::is_int8) {
#pragma unroll
                for (int i = 0; i < 4; i++) whole[i] += sums[i] * (int8_t)(w.scales[at] >> i / 2 * 8);
                continue;
            }
            float scales[2];
            scales_of(w, at, scales);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = (float)sums[i];
                if (form == INPUTS_ROUNDED) sum = __fmul_rn(sum, element(x.factors[i % 2], g));
                terms[0][i] = __fmaf_rn(sum, scales[i / 2], terms[0][i]);
            }
        }
        if (T::is_int8) {
#pragma unroll
            for (int i = 0; i < 4; i++) terms[g % T::terms][i] = (float)whole[i];
        }
        if (T::info.has_minimums) {
            float minimums[2];
            minimums_of(w, g, minimums);
#pragma unroll
            for (int i = 0; i < 4; i++)
                terms[0][i] = __fmaf_rn(minimums[i / 2], element(x.sums[i % 2], g), terms[0][i]);
        }
    }
}

// ---- products of few rows

// A block of threads computes the 16 outputs of strip blockIdx.x for rows tile blockIdx.y, of at most 8 rows. Its warps
// divide the blocks of 128 columns and leave their terms in shared memory; then a thread per output adds them up in
// order, so many at a time as fit. Threads: at least 128. Equals gemm of csrc/kernels_template.h.
//
// Budget, of weights of 4 bits: 256 bytes per group and warp in one load; about 40 instructions, regardless of the
// rows, where an SM of an H100 has 72 cycles times instructions for each 256 bytes of its share of the memory's
// bandwidth. Limited by the bytes in flight: 1 KiB per warp and its next block's.
template <int D, int form> static __device__ __forceinline__ void product_few(product p) {
    using T = dtype_of<D>;
    __shared__ float shared_terms[TERM_FLOATS];   // (terms, 16, rows of the tile)
    const row_tile tile = tile_of(p, blockIdx.y);
    if (!tile.count) return;
    const int warps = blockDim.x / WARP_LANES, warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES,
              pair = lane / 4, quad = lane % 4, count = tile.count;
    const unsigned char *strip = p.w.strips + (size_t)blockIdx.x * valid_strip_bytes(D, p.columns);
    const input_layout layout = input_layout_of(form, p.columns);
    const auto row_of = [&](int t) {
        return t < count ? p.inputs + (size_t)input_row(p, tile.first + t) * layout.end : nullptr;
    };
    const unsigned char *const operand = row_of(pair), *const rows[2] = { row_of(2 * quad), row_of(2 * quad + 1) };

    const int o = threadIdx.x / count, t = threadIdx.x % count, is_summing = o < STRIP_ROWS;   // a thread's own output
    const float *input_scales =
        is_summing ? (const float *)(const void *)(row_of(t) + layout.scales) : nullptr;
    const int blocks = blocks_of(p.columns), pass = TERM_FLOATS / (STRIP_ROWS * T::terms * count);
    float sum = 0;
    for (int start = 0; start < blocks; start += pass) {
        const int end = min(blocks, start + pass);
        if (start) __syncthreads();
        for (int block = start + warp; block < end; block += warps) {
            block_weights<D> w;
            block_inputs<form> x;
            load_block(w, strip, p.columns, block, lane);
            load_inputs<D>(x, operand, rows, layout, block, quad);
            float terms[T::terms][4];
            block_terms(terms, w, x, quad);
            float *to = shared_terms + ((block - start) * T::terms * STRIP_ROWS + 2 * pair) * count;
#pragma unroll
            for (int i = 0; i < T::terms; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (2 * quad + j % 2 < count)
                        to[(i * STRIP_ROWS + j / 2) * count + 2 * quad + j % 2] = terms[i][j];
        }
        __syncthreads();
        const int first = start * T::terms, last = min(end * T::terms, terms_of<D>(p.columns));
        if (is_summing)
            for (int i = first; i < last; i++)
                sum = __fmaf_rn(shared_terms[(i - first) * STRIP_ROWS * count + threadIdx.x], input_scales[i], sum);
    }
    const int row = blockIdx.x * STRIP_ROWS + o;
    if (!is_summing || row >= p.rows) return;
    if (T::info.has_row_scales) sum = __fmul_rn(sum, ((const float *)(const void *)strip)[o]);
    finish(p, tile.first + t, row, sum);
}
#endif
