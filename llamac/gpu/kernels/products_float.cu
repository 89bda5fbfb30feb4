// SPDX-License-Identifier: MIT
// products_float.cu - products with f32, f16 and bf16. Each output is one chain of fused multiply-adds over ascending
// columns, in one thread.
#include "epilogue.cuh"

enum { STAGE_COLUMNS = 64 };

static __device__ __forceinline__ float weight(int dtype, const unsigned char *strip, int column, int row) {
    const size_t at = (size_t)column * STRIP_ROWS + row;
    if (dtype == LLAMAC_F32) return __ldg((const float *)(const void *)strip + at);
    const uint16_t x = __ldg((const uint16_t *)(const void *)strip + at);
    return dtype == LLAMAC_F16 ? f16_to_f32(x) : bf16_to_f32(x);
}

// A block of threads computes the 16 outputs of strip blockIdx.x for rows tile blockIdx.y, of at most 8 rows, a thread
// for each. Threads: 128. Equals gemm of csrc/kernels_template.h.
template <int dtype> static __device__ __forceinline__ void product_float(product p) {
    __shared__ float weights[STAGE_COLUMNS][STRIP_ROWS], x[TILE_ROWS][STAGE_COLUMNS];
    const row_tile tile = tile_of(p, blockIdx.y);
    if (!tile.count) return;
    const int o = threadIdx.x % STRIP_ROWS, t = threadIdx.x / STRIP_ROWS, row = blockIdx.x * STRIP_ROWS + o;
    const unsigned char *strip = p.w.strips + blockIdx.x * float_strip_bytes(dtype, p.columns);
    float sum = 0;
    for (int start = 0; start < p.columns; start += STAGE_COLUMNS) {
        const int n = min((int)STAGE_COLUMNS, p.columns - start);
        if (start) __syncthreads();
        for (int i = threadIdx.x; i < n * STRIP_ROWS; i += blockDim.x)
            weights[i / STRIP_ROWS][i % STRIP_ROWS] = weight(dtype, strip, start + i / STRIP_ROWS, i % STRIP_ROWS);
        for (int i = threadIdx.x; i < tile.count * STAGE_COLUMNS; i += blockDim.x) {
            const float *from = (const float *)(const void *)p.inputs +
                                (size_t)input_row(p, tile.first + i / STAGE_COLUMNS) * p.columns + start;
            if (i % STAGE_COLUMNS < n) x[i / STAGE_COLUMNS][i % STAGE_COLUMNS] = from[i % STAGE_COLUMNS];
        }
        __syncthreads();
        if (t < tile.count)
            for (int k = 0; k < n; k++) sum = __fmaf_rn(weights[k][o], x[t][k], sum);
    }
    if (t < tile.count && row < p.rows) finish(p, tile.first + t, row, sum);
}

#define PRODUCT(name, dtype) \
    extern "C" __global__ void __launch_bounds__(128) name(PRODUCT_PARAMETERS) { \
        product_float<dtype>({ PRODUCT_ARGUMENTS }); \
    }
PRODUCT(product_f32, LLAMAC_F32)
PRODUCT(product_f16, LLAMAC_F16)
PRODUCT(product_bf16, LLAMAC_BF16)
