// SPDX-License-Identifier: MIT
// products_many.cuh - products of many rows with quantized weights, which are bound by multiplying.
#ifndef LLAMAC_PRODUCTS_MANY_CUH
#define LLAMAC_PRODUCTS_MANY_CUH
#include "epilogue.cuh"
#include "terms.cuh"

enum { MANY_ROWS = 64, MANY_STRIPS = 8, MANY_THREADS = MANY_STRIPS * (int)WARP_LANES, OPERAND_ROWS = 8 };

// A block of 128 columns of the inputs of a tile in shared memory, for block_terms.
template <int form> struct input_stage {
    // (groups, rows): the codes of a group
    uint4 words[(int)BLOCK_GROUPS * MANY_ROWS * (form == INPUTS_INT16 ? 4 : 2)];
    float4 sums[MANY_ROWS], factors[MANY_ROWS];
    float scales[MANY_ROWS * (form == INPUTS_INT8 ? (int)BLOCK_GROUPS : 1)];   // (rows, of the block)
};

// Starts copying a block. row: where the packed inputs of a row begin; of rows that the tile does not have, the first.
template <int D, int form, class RowOf>
static __device__ __forceinline__ void copy_block(input_stage<form> &to, const RowOf &row_of,
                                                  const input_layout &layout, int block) {
    constexpr int bytes = group_input_bytes(form), pieces = bytes / 16, per_row = BLOCK_GROUPS * pieces;
#pragma unroll
    for (int i = threadIdx.x; i < MANY_ROWS * per_row; i += MANY_THREADS) {
        const int row = i / per_row, group = i % per_row / pieces, piece = i % pieces;
        copy_async(&to.words[(group * MANY_ROWS + row) * pieces + piece],
                   row_of(row) + (size_t)block * BLOCK_GROUPS * bytes + i % per_row * 16);
    }
    const int row = threadIdx.x;
    if (row >= MANY_ROWS) return;
    const unsigned char *const from = row_of(row);
    if (dtype_of<D>::info.has_minimums) copy_async(&to.sums[row], from + layout.sums + 16 * block);
    if (form == INPUTS_ROUNDED) copy_async(&to.factors[row], from + layout.factors + 16 * block);
    if (form == INPUTS_INT8) copy_async(&to.scales[BLOCK_GROUPS * row], from + layout.scales + 16 * block);
    else copy_async4(&to.scales[row], from + layout.scales + 4 * block);
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

// A block of threads computes the outputs of 8 strips (blockIdx.y), a warp each, for tile blockIdx.x, of at most 64
// rows. A warp reads its weights into registers; the inputs of a block of 128 columns are copied to
// shared memory while those before are multiplied. Threads: 256. Equals gemm of csrc/kernels_template.h.
//
// Budget: per 16 outputs, 8 rows and 32 columns, 2 mma, one load of 16 bytes per lane from shared memory, and per lane
// 4 sums to combine, convert and scale: about 18 instructions for 8 to 13 cycles of a tensor core. So instructions are
// the limit: 0.4 multiply-adds of H100's peak per cycle, 400 TOPS. Fast numerics need one mma, and half the reads.
template <int D, int form> static __device__ __forceinline__ void product_many(product p) {
    using T = dtype_of<D>;
    constexpr int operands_n = (int)MANY_ROWS / (int)OPERAND_ROWS;
    __shared__ __align__(16) input_stage<form> stages[2];
    constexpr int outputs_n = (int)MANY_STRIPS * (int)STRIP_ROWS;
    const block_part own = block_part_of<outputs_n, MANY_ROWS>(p);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, pair = lane / 4, quad = lane % 4,
              index = own.index * MANY_STRIPS + warp, blocks = blocks_of(p.columns),
              operands = (tile.count + OPERAND_ROWS - 1) / OPERAND_ROWS,
              has_strip = index * STRIP_ROWS < own.rows;
    const input_layout layout = input_layout_of(form, p.columns);
    const auto row_of = [&](int t) {
        return p.inputs + (size_t)input_row(p, tile.first + (t < tile.count ? t : 0)) * layout.end;
    };
    const unsigned char *strip = own.w.strips + (has_strip ? index : 0) * valid_strip_bytes(D, p.columns);
    float sums[operands_n * 4] = {};
    block_weights<D> w;
    load_block(w, strip, p.columns, 0, lane);
    copy_block<D>(stages[0], row_of, layout, 0);
    copy_async_commit();
    for (int block = 0; block < blocks; block++) {
        if (block + 1 < blocks) copy_block<D>(stages[(block + 1) % 2], row_of, layout, block + 1);
        copy_async_commit();
        block_operands<D> weights;
        decode_block(weights, w, value_table<D>(T::is_int8), quad);
        if (block + 1 < blocks) load_block(w, strip, p.columns, block + 1, lane);
        copy_async_wait<1>();
        __syncthreads();
        const input_stage<form> &stage = stages[block % 2];
        staged_inputs<form> inputs = {
            form == INPUTS_INT16 ? stage.words + lane : (const uint4 *)((const uint2 *)stage.words + lane),
            stage.sums + 2 * quad, stage.factors + 2 * quad, stage.scales + (form == INPUTS_INT8 ? 8 : 2) * quad, 0,
        };
#pragma unroll
        for (inputs.index = 0; inputs.index < operands_n; inputs.index++) {
            if (inputs.index >= operands) continue;
            float terms[T::terms][4];
            block_terms<D, form>(terms, weights, inputs, quad);
#pragma unroll
            for (int term = 0; term < T::terms; term++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float &sum = sums[4 * inputs.index + j];
                    sum = __fmaf_rn(terms[term][j], inputs.scale(j % 2, term), sum);
                }
        }
        __syncthreads();
    }
    if (!has_strip) return;
    const block_part to = block_part_of<outputs_n, MANY_ROWS>(p);
    const auto place_of = [&](int i) {
        const int t = i / 4 * OPERAND_ROWS + 2 * quad + i % 2, o = 2 * pair + i % 4 / 2,
                  row = (to.index * MANY_STRIPS + warp) * STRIP_ROWS + o;
        return place{ t < tile.count && row < to.rows ? tile.first + t : -1, row };
    };
#pragma unroll
    for (int i = 0; i < operands_n * 4; i++) sums[i] = times_row_scale<D>(strip, 2 * pair + i % 4 / 2, sums[i]);
    finish(p, to, sums, place_of);
}
#endif
