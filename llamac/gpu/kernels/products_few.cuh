// SPDX-License-Identifier: MIT
// products_few.cuh - products of few rows with quantized weights, which are bound by reading the weights.
#ifndef LLAMAC_PRODUCTS_FEW_CUH
#define LLAMAC_PRODUCTS_FEW_CUH
#include "epilogue.cuh"
#include "terms.cuh"

enum { FEW_ROWS = 8, FEW_THREADS = 512, TERM_FLOATS = 8192 };   // rows of a tile; threads at most; shared memory

// What block_terms reads of a block of the inputs, in registers.
template <int form> struct loaded_inputs {
    uint4 words[BLOCK_GROUPS];
    float4 row_sums[2], row_factors[2];

    // operand: the packed inputs of operand row lane / 4; rows: those of input rows 2 q and 2 q + 1.
    template <int D>
    __device__ __forceinline__ void load(const unsigned char *operand, const unsigned char *const (&rows)[2],
                                         const input_layout &layout, int block, int quad) {
        const unsigned char *const codes = operand + block * (unsigned)(BLOCK_GROUPS * group_input_bytes(form));
#pragma unroll
        for (int g = 0; g < BLOCK_GROUPS; g++) {
            if (form == INPUTS_INT16) {
                words[g] = __ldg((const uint4 *)(const void *)codes + 4 * g + quad);
            } else {
                const uint2 x = __ldg((const uint2 *)(const void *)codes + 4 * g + quad);
                words[g] = { x.x, x.y, 0, 0 };
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (dtype_of<D>::info.has_minimums)
                row_sums[n] = __ldg((const float4 *)(const void *)(rows[n] + layout.sums) + block);
            if (form == INPUTS_ROUNDED)
                row_factors[n] = __ldg((const float4 *)(const void *)(rows[n] + layout.factors) + block);
        }
    }
    __device__ __forceinline__ uint4 codes(int g) const { return words[g]; }
    __device__ __forceinline__ float4 sums(int n) const { return row_sums[n]; }
    __device__ __forceinline__ float4 factors(int n) const { return row_factors[n]; }
};

// A block of threads computes the 16 outputs of strip blockIdx.y for tile blockIdx.x, of at most 8 rows. Its warps
// divide the blocks of 128 columns and leave their terms in shared memory; then a thread per output adds them up in
// order, so many at a time as fit. Threads: 128 to 512. Equals gemm of csrc/kernels_template.h.
//
// Budget, q4_k: a block of 1184 bytes takes a warp 270 instructions, regardless of the rows, where an SM of an H100 has
// 330 issue slots in the time that its share of the memory takes: 16 warps per SM, each with its next block in flight
// (19 KB per SM), get close to the memory's bandwidth. Limited by instructions; with 8-bit codes by the memory.
template <int D, int form> static __device__ __forceinline__ void product_few(product p) {
    using T = dtype_of<D>;
    __shared__ float shared_terms[TERM_FLOATS];   // (terms, 16, rows of the tile)
    const row_tile tile = tile_of(p, blockIdx.x, FEW_ROWS);
    if (!tile.count) return;
    const int warps = blockDim.x / WARP_LANES, warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES,
              pair = lane / 4, quad = lane % 4, count = tile.count;
    const unsigned char *strip = p.w.strips + blockIdx.y * valid_strip_bytes(D, p.columns);
    const int blocks = blocks_of(p.columns),
              pass = TERM_FLOATS / (STRIP_ROWS * T::terms * count) / warps * warps;   // blocks at a time
    block_weights<D> w;
    if (warp < blocks) load_block(w, strip, p.columns, warp, lane);

    const input_layout layout = input_layout_of(form, p.columns);
    const auto row_of = [&](int t) {   // rows that the tile does not have are its first, and their terms are not kept
        return p.inputs + (size_t)input_row(p, tile.first + (t < count ? t : 0)) * layout.end;
    };
    const unsigned char *const operand = row_of(pair), *const rows[2] = { row_of(2 * quad), row_of(2 * quad + 1) };
    const int o = threadIdx.x / count, t = threadIdx.x % count, is_summing = o < STRIP_ROWS;   // a thread's own output
    const float *input_scales =
        is_summing ? (const float *)(const void *)(row_of(t) + layout.scales) : nullptr;
    float sums[1] = { 0 };
    for (int start = 0; start < blocks; start += pass) {
        const int end = min(blocks, start + pass);
        if (start) __syncthreads();
        for (int block = start + warp; block < end; block += warps) {
            loaded_inputs<form> inputs;
            block_operands<D> operands;
            inputs.template load<D>(operand, rows, layout, block, quad);
            decode_block(operands, w, quad);
            if (block + warps < blocks) load_block(w, strip, p.columns, block + warps, lane);
            float terms[T::terms][4];
            block_terms<D, form>(terms, operands, inputs, quad);
            float *to = shared_terms + ((block - start) * T::terms * STRIP_ROWS + 2 * pair) * count + 2 * quad;
#pragma unroll
            for (int i = 0; i < T::terms; i++, to += STRIP_ROWS * count)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (2 * quad + j % 2 < count) to[j / 2 * count + j % 2] = terms[i][j];
        }
        __syncthreads();
        const int first = start * T::terms, last = min(end * T::terms, terms_of<D>(p.columns));
        if (is_summing)
#pragma unroll 4
            for (int i = first; i < last; i++) {
                const float term = shared_terms[(i - first) * STRIP_ROWS * count + threadIdx.x];
                sums[0] = __fmaf_rn(term, input_scales[i], sums[0]);
            }
    }
    const int row = blockIdx.y * STRIP_ROWS + o;
    if (!is_summing || row >= p.rows) return;
    sums[0] = times_row_scale<D>(strip, o, sums[0]);
    finish(p, sums, [&](int) { return place{ tile.first + t, row }; });
}
#endif
