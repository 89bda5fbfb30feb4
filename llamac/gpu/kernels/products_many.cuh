// SPDX-License-Identifier: MIT
// products_many.cuh - products of many rows with quantized weights, which are bound by multiplying.
#ifndef LLAMAC_PRODUCTS_MANY_CUH
#define LLAMAC_PRODUCTS_MANY_CUH
#include "epilogue.cuh"
#include "terms.cuh"

// Rows of a tile; threads at most, at least as many as rows; rows of an operand B, and operands that a warp multiplies
// side by side, so that one's latencies are hidden behind another's work.
enum { MANY_ROWS = 64, MANY_THREADS = 256, OPERAND_ROWS = 8, OPERANDS = MANY_ROWS / OPERAND_ROWS, SIDE_BY_SIDE = 2 };

// A block of 128 columns of the inputs of a tile in shared memory, for block_terms.
template <int form> struct input_stage {
    // (groups, rows): the codes of a group
    uint4 words[(int)BLOCK_GROUPS * MANY_ROWS * (form == INPUTS_INT16 ? 4 : 2)];
    float4 sums[MANY_ROWS], factors[MANY_ROWS];
    float scales[MANY_ROWS * (form == INPUTS_INT8 ? (int)BLOCK_GROUPS : 1)];   // (rows, of the block)
};

// Starts copying a block of the first n rows. rows: where the packed inputs of each row begin.
template <int D, int form>
static __device__ __forceinline__ void copy_block(input_stage<form> &to, const unsigned char *const *rows, int n,
                                                  const input_layout &layout, int block) {
    constexpr int bytes = group_input_bytes(form), pieces = bytes / 16, per_row = BLOCK_GROUPS * pieces;
    const int part = threadIdx.x % per_row, group = part / pieces, from = block * (int)BLOCK_GROUPS * bytes + part * 16;
    uint4 *const words = &to.words[group * MANY_ROWS * pieces + part % pieces];
    for (int row = threadIdx.x / per_row; row < n; row += blockDim.x / per_row)
        copy_async(words + row * pieces, rows[row] + from);
    const int row = threadIdx.x;
    if (row >= n) return;
    const unsigned char *const of_row = rows[row];
    if (dtype_of<D>::info.has_minimums) copy_async(&to.sums[row], of_row + layout.sums + 16 * block);
    if (form == INPUTS_FAST) copy_async(&to.factors[row], of_row + layout.factors + 16 * block);
    if (form == INPUTS_INT8) copy_async(&to.scales[BLOCK_GROUPS * row], of_row + layout.scales + 16 * block);
    else copy_async4(&to.scales[row], of_row + layout.scales + 4 * block);
}

// What block_terms reads of operand `index` of a stage. words, row_sums, row_factors, scales: those of the lane in
// operand 0.
template <int form> struct staged_inputs {
    const uint4 *words;
    const float4 *row_sums, *row_factors;
    const float *scales;
    int index;

    __device__ __forceinline__ uint4 codes(int g) const {
        const int at = (g * MANY_ROWS + index * OPERAND_ROWS) * 4;
        if (form == INPUTS_INT16) return words[at];
        const uint2 x = ((const uint2 *)words)[at];
        return { x.x, x.y, 0, 0 };
    }
    __device__ __forceinline__ float4 sums(int n) const { return row_sums[index * OPERAND_ROWS + n]; }
    __device__ __forceinline__ float4 factors(int n) const { return row_factors[index * OPERAND_ROWS + n]; }
    // The scale of term `term` of the block.
    __device__ __forceinline__ float scale(int n, int term) const {
        const int row = index * OPERAND_ROWS + n;
        return scales[form == INPUTS_INT8 ? BLOCK_GROUPS * row + term : row];
    }
};

// Adds the products of a block's weights with its inputs to the sums of a warp, 4 numbers of each operand per lane. The
// terms of SIDE_BY_SIDE operands are computed before any is added.
template <int D, int form>
static __device__ __forceinline__ void add_products(float (&sums)[(int)OPERANDS * 4], const block_operands<D> &weights,
                                                    const input_stage<form> &stage, int operands, int lane) {
    constexpr int n_terms = dtype_of<D>::terms;
    const int quad = lane % 4;
    staged_inputs<form> inputs = {
        form == INPUTS_INT16 ? stage.words + lane : (const uint4 *)((const uint2 *)stage.words + lane),
        stage.sums + 2 * quad, stage.factors + 2 * quad, stage.scales + (form == INPUTS_INT8 ? 8 : 2) * quad, 0,
    };
#pragma unroll
    for (int first = 0; first < OPERANDS; first += SIDE_BY_SIDE) {
        if (first >= operands) continue;
        float terms[SIDE_BY_SIDE][n_terms][4];   // of an operand that the tile does not have, never used
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            inputs.index = first + i;
            block_terms<D, form>(terms[i], weights, inputs, quad);
        }
#pragma unroll
        for (int term = 0; term < n_terms; term++)
#pragma unroll
            for (int i = 0; i < 4 * SIDE_BY_SIDE; i++) {
                inputs.index = first + i / 4;
                float &sum = sums[4 * first + i];
                sum = __fmaf_rn(terms[i / 4][term][i % 4], inputs.scale(i % 2, term), sum);
            }
    }
}

// A block of threads computes the outputs of a strip per warp (from blockIdx.y * warps on) for tile blockIdx.x, of at
// most 64 rows. A warp reads its weights into registers; the inputs of a block of 128 columns are copied to shared
// memory while those before are multiplied. Threads: 64, 128 or 256: with fewer, more multiprocessors have work. Equals
// gemm of csrc/kernels_template.h.
//
// Budget: per 16 outputs, 8 rows and 32 columns, 2 mma, one load of 16 bytes per lane from shared memory, and per lane
// 4 sums to combine, convert and scale: about 18 instructions for 8 to 13 cycles of a tensor core. So instructions are
// the limit: 0.4 multiply-adds of H100's peak per cycle, 400 TOPS. Fast numerics need one mma, and half the reads.
template <int D, int form> static __device__ __forceinline__ void product_many(product p) {
    __shared__ __align__(16) input_stage<form> stages[2];
    __shared__ const unsigned char *rows[MANY_ROWS];
    const int warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES, lane = threadIdx.x % WARP_LANES,
              pair = lane / 4, quad = lane % 4;
    const block_part own = block_part_of<MANY_ROWS>(p, warps * STRIP_ROWS);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    const int index = own.index * warps + warp, blocks = blocks_of(p.columns),
              has_strip = index * STRIP_ROWS < own.rows, operands = (tile.count + OPERAND_ROWS - 1) / OPERAND_ROWS,
              rows_n = operands * OPERAND_ROWS;
    const input_layout layout = input_layout_of(form, p.columns);
    const unsigned char *strip = own.w.strips + (has_strip ? index : 0) * valid_strip_bytes(D, p.columns);
    block_weights<D> w;
    load_block(w, strip, p.columns, 0, lane);
    if (threadIdx.x < MANY_ROWS)   // of rows that the tile does not have, the first
        rows[threadIdx.x] =
            p.inputs +
            (size_t)input_row(p, row_of_tile(tile, (int)threadIdx.x < tile.count ? (int)threadIdx.x : 0)) * layout.end;
    __syncthreads();
    float sums[(int)OPERANDS * 4] = {};
    copy_block<D>(stages[0], rows, rows_n, layout, 0);
    copy_async_commit();
    for (int block = 0; block < blocks; block++) {
        if (block + 1 < blocks) copy_block<D>(stages[(block + 1) % 2], rows, rows_n, layout, block + 1);
        copy_async_commit();
        block_operands<D> weights;
        decode_block(weights, w, value_table<D>(), quad);
        if (block + 1 < blocks) load_block(w, strip, p.columns, block + 1, lane);
        copy_async_wait<1>();
        __syncthreads();
        add_products<D>(sums, weights, stages[block % 2], operands, lane);
        __syncthreads();
    }
    if (!has_strip) return;
    const block_part to = block_part_of<MANY_ROWS>(p, warps * STRIP_ROWS);
    const auto place_of = [&](int i) {
        const int t = i / 4 * OPERAND_ROWS + 2 * quad + i % 2, o = 2 * pair + i % 4 / 2,
                  row = (to.index * warps + warp) * STRIP_ROWS + o;
        return place{ t < tile.count && row < to.rows ? row_of_tile(tile, t) : -1, row };
    };
#pragma unroll
    for (int i = 0; i < (int)OPERANDS * 4; i++) sums[i] = times_row_scale<D>(strip, 2 * pair + i % 4 / 2, sums[i]);
    finish(p, to, sums, place_of);
}
#endif
