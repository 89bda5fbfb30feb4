// SPDX-License-Identifier: MIT
// embed.cu - rows of embedding matrices of any dtype as floats: `embed` of csrc/forward.c, and the inputs of layers:
// finish_inputs of csrc/layer_embedding.c.
#include "device.cuh"
#include "dtype.h"
#include "norms.cuh"

// Row r's i-th scale or minimum at p: scale_at of csrc/kernels_quant.h.
static __device__ __forceinline__ float scale_at(int dtype, const unsigned char *p, int i, int r) {
    const int at = STRIP_ROWS * i + r, kind = dtype_table[dtype].scale;
    if (kind == SCALE_NONE) return 1;
    if (kind == SCALE_INT8) return (float)(int8_t)p[at];
    if (kind == SCALE_E8M0) return __uint_as_float(p[at] < 2 ? 0x200000u << p[at] : (p[at] - 1u) << 23);
    return f16_to_f32(((const uint16_t *)(const void *)p)[at]);
}
// Row r's code in column i of a block's codes, less its grid: code_at there.
static __device__ __forceinline__ int code_at(int dtype, const unsigned char *codes, int i, int r) {
    const dtype_info &info = dtype_table[dtype];
    const unsigned char *group = codes + i / GROUP_COLUMNS * group_code_bytes(dtype) + 4 * r + i % 4;
    const int column = i % GROUP_COLUMNS, bits = info.code_bits;
    if (bits == 8) return group[column / 4 * LINE_BYTES] - info.offset;
    if (bits < 4) {
        int code = group[column / 16 * LINE_BYTES] >> (column / 8 % 2 * 2 + (column & 4)) & 3;
        if (bits == 3) code |= (group[2 * LINE_BYTES] >> (column / 8 + (column & 4)) & 1) << 2;
        return info.codebook[code];
    }
    int code = group[column / 8 * LINE_BYTES] >> (column & 4) & 15;
    if (bits == 5) code |= (group[4 * LINE_BYTES] >> column / 4 & 1) << 4;
    if (bits == 6) code |= (group[(4 + column / 16) * LINE_BYTES] >> column / 4 % 4 * 2 & 3) << 4;
    return info.codebook ? info.codebook[code] : code - info.offset;
}

// The weight in a row and column of a matrix: gather_quant and gather_float there.
static __device__ float weight_at(int dtype, const unsigned char *strips, int row, int column, int columns) {
    const dtype_info &info = dtype_table[dtype];
    const unsigned char *p = strips + row / STRIP_ROWS * valid_strip_bytes(dtype, columns);
    const int r = row % STRIP_ROWS;
    const size_t at = (size_t)column * STRIP_ROWS + r;
    if (dtype == LLAMAC_F32) return ((const float *)(const void *)p)[at];
    if (dtype == LLAMAC_F16) return f16_to_f32(((const uint16_t *)(const void *)p)[at]);
    if (dtype == LLAMAC_BF16) return bf16_to_f32(((const uint16_t *)(const void *)p)[at]);

    const int per_block = block_columns(dtype), block = column / per_block, i = column % per_block,
              span = i / scale_columns(dtype),
              groups = (min(per_block, columns - block * per_block) + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
    const unsigned char *start = p + row_scale_bytes(dtype) + block * block_bytes(dtype, per_block / GROUP_COLUMNS);
    const float s = scale_at(dtype, start + scales_offset(dtype), span, r);
    const int c = code_at(dtype, start + block_scale_bytes(dtype, groups), i, r);
    if (info.has_row_scales) {
        const int grid = dtype_has_grids(dtype) ? (int)s & 3 : 0;
        return __fmul_rn(__fmul_rn(s, (float)(c + grid)), ((const float *)(const void *)p)[r]);
    }
    const uint16_t *super = (const uint16_t *)(const void *)start;
    const float m = info.has_minimums ? scale_at(dtype, start + minimums_offset(dtype, groups), span, r) : 0;
    if (!info.has_super_scales) return __fmaf_rn(s, (float)c, m);
    const float d_min = info.has_minimums ? f16_to_f32(super[STRIP_ROWS + r]) : 0;
    return __fmaf_rn(__fmul_rn(f16_to_f32(super[r]), s), (float)c, -__fmul_rn(d_min, m));
}

// An embedding: a matrix, and its adapter: a (columns, rank) and b (rows, rank) in f32, or NULL. As lora_gather of
// csrc/lora.c, the adapter adds a chain of fused multiply-adds over the rank.
#define EMBEDDING(name) \
    const unsigned char *name##_w, int name##_dtype, const unsigned char *name##_a, const unsigned char *name##_b, \
    int name##_rank
static __device__ float embedding_at(EMBEDDING(of), int row, int column, int columns) {
    const float y = weight_at(of_dtype, of_w, row, column, columns);
    if (!of_a) return y;
    float sum = 0;
    for (int k = 0; k < of_rank; k++)
        sum = __fmaf_rn(weight_at(LLAMAC_F32, of_a, column, k, of_rank), weight_at(LLAMAC_F32, of_b, row, k, of_rank),
                        sum);
    return __fadd_rn(y, sum);
}

// x (rows, columns) = the tokens' rows, times `scale` unless it is 1, plus the rows of the tokens' types and of the
// positions, if there are any. tokens, types, positions: (rows). types_w, positions_w: NULL, or a matrix. A thread
// computes one number. Grid: (columns / threads, rows).
extern "C" __global__ void embed(EMBEDDING(tokens), EMBEDDING(types), EMBEDDING(positions), const int *tokens,
                                 const int *types, const int *positions, int columns, float scale, float *x) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= columns) return;
    float y = embedding_at(tokens_w, tokens_dtype, tokens_a, tokens_b, tokens_rank, tokens[row], column, columns);
    if (scale != 1) y = __fmul_rn(y, scale);
    if (types_w)
        y = __fadd_rn(y, embedding_at(types_w, types_dtype, types_a, types_b, types_rank, types[row], column, columns));
    if (positions_w)
        y = __fadd_rn(y, embedding_at(positions_w, positions_dtype, positions_a, positions_b, positions_rank,
                                      positions[row], column, columns));
    x[(size_t)row * columns + column] = y;
}

// y (rows, layers, dim) = scale * (norm(input_scale * y) + own_scale * the tokens' rows of a table), each layer's part
// with its own norm. An input_scale of 1 is left out. Grid (layers, rows); block 32; dynamic shared memory: dim floats.
//
// Budget of a warp with 256 dimensions: a chain of 16 fused multiply-adds and 2 dependent loads; 2 to 3 us, once
// per pass.
extern "C" __global__ void __launch_bounds__(32)
layer_inputs(EMBEDDING(table), const int *tokens, int dim, float input_scale, float own_scale, float scale,
             const float *weight, float eps, int is_rms, float *y) {
    DYNAMIC_SHARED(memory);
    float *const x = (float *)memory;
    const int part = blockIdx.x, row = blockIdx.y, columns = gridDim.x * dim;
    y += ((size_t)row * gridDim.x + part) * dim;
    for (int d = threadIdx.x; d < dim; d += WARP_LANES) x[d] = input_scale != 1 ? __fmul_rn(y[d], input_scale) : y[d];
    __syncwarp();
    const Moments m = moments(x, dim, eps, is_rms);
    for (int d = threadIdx.x; d < dim; d += WARP_LANES) {
        const float own = embedding_at(table_w, table_dtype, table_a, table_b, table_rank, tokens[row],
                                       part * dim + d, columns);
        const float sum = __fadd_rn(__fmul_rn(own, own_scale), normed(x[d], m, is_rms, weight[d], 0));
        y[d] = __fmul_rn(sum, scale);
    }
}
