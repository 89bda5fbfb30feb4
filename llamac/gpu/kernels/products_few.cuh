// SPDX-License-Identifier: MIT
// products_few.cuh - products of few rows with quantized weights, which are bound by reading the weights.
#ifndef LLAMAC_PRODUCTS_FEW_CUH
#define LLAMAC_PRODUCTS_FEW_CUH
#include "epilogue.cuh"
#include "terms.cuh"

enum {
    FEW_ROWS = 8, FEW_THREADS = 512,   // rows of a tile; threads at most
    TERM_FLOATS = 8192, SCALE_FLOATS = TERM_FLOATS / STRIP_ROWS,   // shared memory for terms, and for their scales
};

// What block_terms reads of a block of the inputs, in registers.
template <int form> struct loaded_inputs {
    uint4 words[BLOCK_GROUPS];
    float4 row_sums[2], row_factors[2];

    // operand: the packed inputs of operand row lane / 4; rows: those of input rows 2 q and 2 q + 1.
    template <int D, int own_rows>
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
        for (int n = 0; n < own_rows; n++) {
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

// The same weights with scales in other registers. So with the codes decoded, the registers of w are free: loads of the
// next block into others would need copies, which wait for those loads.
template <int D> static __device__ __forceinline__ block_weights<D> copy_of_scales(block_weights<D> w) {
#pragma unroll
    for (int i = 0; i < BLOCK_GROUPS * dtype_of<D>::spans; i++) compute_now(w.scales[i]);
#pragma unroll
    for (int i = 0; i < BLOCK_GROUPS && dtype_of<D>::info.has_minimums; i++) compute_now(w.minimums[i]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (dtype_of<D>::info.has_super_scales && i <= dtype_of<D>::info.has_minimums) compute_now(w.super[i]);
    return w;
}

// A warp's part of a product: every `warps`th block of 128 columns.
template <int D, int form> struct warp_part {
    const unsigned char *strip, *operand, *rows[2];   // the last two: see loaded_inputs
    input_layout layout;
    int columns, blocks, warps, lane, count, stride;   // count: rows of the tile; stride: of terms, see product_few
    block_weights<D> next;                     // the weights of the next block

    // Computes the terms of blocks [block, end), and loads the weights of the block that follows. to: for the terms of
    // this block, shared memory (16, stride); own_rows: see block_terms.
    template <int own_rows> __device__ __forceinline__ void multiply(int block, int end, float *to) {
        constexpr int terms_n = dtype_of<D>::terms;
        const int pair = lane / 4, quad = lane % 4;
        value_table<D> table(dtype_of<D>::is_int8);
        table.keep_in_registers((uint32_t)columns >> 31);
        to += 2 * pair * stride + 2 * quad;
        for (; block < end; block += warps, to += warps * terms_n * STRIP_ROWS * stride) {
            loaded_inputs<form> inputs;
            block_operands<D> operands;
            inputs.template load<D, own_rows>(operand, rows, layout, block, quad);
            const block_weights<D> now = copy_of_scales(next);
            decode_block(operands, now, table, quad);
#pragma unroll
            for (int i = 0; i < 4 * BLOCK_GROUPS; i++) compute_now(operands.a[i / 4][i % 4]);
            if (block + warps < blocks) load_block(next, strip, columns, block + warps, lane);
            float terms[terms_n][4];
            block_terms<D, form, own_rows>(terms, operands, inputs, quad);
#pragma unroll
            for (int i = 0; i < terms_n; i++)
#pragma unroll
                for (int j = 0; j < 4; j += 3 - own_rows)
                    if (2 * quad + j % 2 < count) to[(i * STRIP_ROWS + j / 2) * stride + j % 2] = terms[i][j];
        }
    }
};

// The same for one row of inputs with grids. In the operand B of group g only columns 2 g and 2 g + 1 are not 0:
// they have the inputs of the first and of the second half of the group (q4s, t2: of the group, and none). So the four mma
// of a block leave lane 4 p + q with the sums of group q alone, of both halves and of rows 2 p and 2 p + 1. The values
// of codes are a table's plus a grid, which the sum of the inputs multiplies.
template <int D> struct one_row_part {
    using T = dtype_of<D>;
    const unsigned char *strip, *inputs;
    input_layout layout;
    int columns, blocks, warps, lane;
    block_weights<D> next;   // the weights of the next block, with the scales of group q

    __device__ __forceinline__ void load(int block) { load_block<D, true>(next, strip, columns, block, lane); }

    // to: for the terms of this block, shared memory (4, 16).
    __device__ __forceinline__ void multiply(int block, int end, float *to) {
        const int pair = lane / 4, quad = lane % 4, half = T::spans == 2 ? quad / 2 : 0,
                  group = pair % 2 == half ? pair / 2 : -1;   // whose inputs the lane has in operands B
        uint2 b[BLOCK_GROUPS] = {};
        value_table<D> table(false);
        table.keep_in_registers((uint32_t)columns >> 31);
        to += quad * STRIP_ROWS + 2 * pair;
        for (; block < end; block += warps, to += warps * (int)BLOCK_GROUPS * (int)STRIP_ROWS) {
            const unsigned char *const codes = inputs + block * (unsigned)BLOCK_COLUMNS + 8 * quad;
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; g++)
                if (g == group) b[g] = __ldg((const uint2 *)(const void *)(codes + g * GROUP_COLUMNS));
            const uint32_t input_sums =
                __ldg((const uint32_t *)(const void *)(inputs + layout.sums) + block * (unsigned)BLOCK_GROUPS + quad);
            uint32_t a[BLOCK_GROUPS][4], scales[T::spans];
#pragma unroll
            for (int i = 0; i < T::spans; i++) compute_now(scales[i] = next.scales[i]);
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; g++) {
                decode_group(next, table, false, g, quad, a[g]);
#pragma unroll
                for (int i = 0; i < 4; i++) compute_now(a[g][i]);
            }
            if (block + warps < blocks) load(block + warps);
            int sums[4] = { 0, 0, 0, 0 };
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; g++) mma_s8(sums, a[g], { b[g].x, b[g].y });
            int whole[2] = { 0, 0 };
            const int halves[2] = { (int16_t)input_sums, (int)input_sums >> 16 };
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int i = 0; i < T::spans; i++) {
                    const int scale = (int8_t)(scales[i] >> 8 * r), grid = scale & 3,
                              inputs_sum = T::spans == 2 ? halves[i] : halves[0] + halves[1];
                    whole[r] += (sums[2 * r + i] + grid * inputs_sum) * scale;
                }
            *(float2 *)(void *)to = { (float)whole[0], (float)whole[1] };
        }
    }
};

// sum = fma(term, scale, sum) for n terms of one row in ascending order. terms: (n, 16), from the thread's own on. The
// operands of 16 terms are loaded while the 16 before are added, which takes 4 cycles each.
static __device__ __forceinline__ float sum_of_terms(float sum, const float *terms, const float *scales, int n) {
    enum { CHUNK = 16 };
    float term[2][CHUNK], scale[2][CHUNK];
    const auto load = [&](int at, int first) {
        if (first + CHUNK > n) return;
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            term[at][i] = terms[(first + i) * (int)STRIP_ROWS], scale[at][i] = scales[first + i];
    };
    const auto add = [&](int at) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum = __fmaf_rn(term[at][i], scale[at][i], sum);
    };
    load(0, 0);
    int i = 0;
    for (; i + 2 * CHUNK <= n; i += 2 * CHUNK) {
        load(1, i + CHUNK);
        add(0);
        load(0, i + 2 * CHUNK);
        add(1);
    }
    if (i + CHUNK <= n) {
        add(0);
        i += CHUNK;
    }
#pragma unroll 4
    for (; i < n; i++) sum = __fmaf_rn(terms[i * (int)STRIP_ROWS], scales[i], sum);
    return sum;
}

// A block of threads computes the 16 outputs of a strip (blockIdx.y) for tile blockIdx.x, of at most 8 rows. Its warps
// divide the blocks of 128 columns and leave their terms in shared memory; then a thread per output adds them up in
// order, so many at a time as fit. Threads: 128, 256 or 512. Equals gemm of csrc/kernels_template.h.
//
// Budget, q4_k: a block of 1184 bytes takes a warp 205 instructions for one row and 250 for 2 to 8, where an SM of an
// H100 has 330 issue slots in the time that its share of the memory takes: 16 warps per SM, each with its next block in
// flight (19 KB per SM), get close to the memory's bandwidth. Limited by instructions; with 8-bit codes by the memory.
// A block of q4 takes 197 instructions for one row, 88 of them to look up codes, and 406 for 2 to 8.
// A matrix of 16 MB is read in 5 us, so what comes before the first loads and after the last counts: no divisions, and
// all operands of the sums in shared memory.
template <int D, int form> static __device__ __forceinline__ void product_few(product p) {
    using T = dtype_of<D>;
    // (terms, 16, stride); (terms, stride)
    __shared__ __align__(16) float shared_terms[TERM_FLOATS], shared_scales[SCALE_FLOATS];
    const block_part own = block_part_of<STRIP_ROWS, FEW_ROWS>(p);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    const int warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES, count = tile.count,
              lane = threadIdx.x % WARP_LANES, quad = lane % 4, blocks = blocks_of(p.columns),
              shift = (count > 1) + (count > 2) + (count > 4), stride = 1 << shift;   // count as a power of two
    const unsigned char *strip = own.w.strips + own.index * valid_strip_bytes(D, p.columns);
    warp_part<D, form> part;
    const input_layout layout = input_layout_of(form, p.columns);
    const bool is_one = T::is_int8 && count == 1;
    one_row_part<D> one = { strip, nullptr, layout, p.columns, blocks, warps, lane, {} };
    if (warp < blocks && is_one) one.load(warp);
    else if (warp < blocks) load_block(part.next, strip, p.columns, warp, lane);

    const auto row_of = [&](int t) {   // rows that the tile does not have are its first, and their terms are not kept
        return p.inputs + (size_t)input_row(p, tile.first + (t < count ? t : 0)) * layout.end;
    };
    one.inputs = row_of(0);
    part.strip = strip, part.operand = row_of(lane / 4), part.layout = layout, part.columns = p.columns;
    part.rows[0] = row_of(2 * quad), part.rows[1] = row_of(2 * quad + 1);
    part.blocks = blocks, part.warps = warps, part.lane = lane, part.count = count, part.stride = stride;

    const int pass = (TERM_FLOATS / (STRIP_ROWS * T::terms) >> shift) & -warps,   // blocks at a time
              o = threadIdx.x >> shift, t = threadIdx.x & (stride - 1);           // a thread's own output
    const bool is_summing = o < STRIP_ROWS && t < count;
    const float *input_scales = (const float *)(const void *)(row_of(t) + layout.scales);
    float sums[1] = { 0 };
    for (int start = 0; start < blocks; start += pass) {
        const int end = min(blocks, start + pass), first = start * T::terms,
                  last = min(end * T::terms, terms_of<D>(p.columns));
        if (start) __syncthreads();
        for (int i = o; i < last - first; i += (int)blockDim.x >> shift)
            copy_async4(&shared_scales[i * stride + t], input_scales + first + i);
        copy_async_commit();
        float *const to = shared_terms + warp * T::terms * STRIP_ROWS * stride;
        if (is_one) one.multiply(start + warp, end, to);
        else if (!T::is_int8 && count == 1) part.template multiply<1>(start + warp, end, to);
        else part.template multiply<2>(start + warp, end, to);
        copy_async_wait<0>();
        __syncthreads();
        if (is_summing && is_one)
            sums[0] = sum_of_terms(sums[0], shared_terms + threadIdx.x, shared_scales, last - first);
        else if (is_summing)
#pragma unroll 16
            for (int i = 0; i < last - first; i++)
                sums[0] = __fmaf_rn(shared_terms[i * STRIP_ROWS * stride + threadIdx.x], shared_scales[i * stride + t],
                                    sums[0]);
    }
    const block_part to = block_part_of<STRIP_ROWS, FEW_ROWS>(p);
    const int row = to.index * STRIP_ROWS + o;
    if (!is_summing || row >= to.rows) return;
    sums[0] = times_row_scale<D>(strip, o, sums[0]);
    finish(p, to, sums, [&](int) { return place{ tile.first + t, row }; });
}
#endif
