// SPDX-License-Identifier: MIT
// pack.cu - rows of floats become packed inputs of products.
#include "packing.cuh"

// Packs rows of `columns` numbers, which are `stride` apart, as inputs (inputs.cuh); INPUTS_F32: side by side. A warp
// packs a block of 128 columns. Grid: (blocks of columns / warps of a block of threads, rows, heads of a row, each of
// which is a row of inputs). Equals the pack functions of csrc/kernels_quant.h.
template <int form>
static __device__ __forceinline__ void pack(const float *x, int stride, int columns, unsigned char *inputs) {
    const int lane = threadIdx.x % WARP_LANES, row = blockIdx.y * gridDim.z + blockIdx.z,
              block = blockIdx.x * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES;
    if (block >= blocks_of(columns)) return;   // the whole warp
    const float *from = x + (size_t)row * stride;
    const int first = block * BLOCK_COLUMNS + 4 * lane;
    float v[4];
    for (int i = 0; i < 4; i++) v[i] = first + i < columns ? from[first + i] : 0;
    if constexpr (form == INPUTS_F32) {
        float *const to = (float *)(void *)inputs + (size_t)row * columns;
        for (int i = 0; i < 4; i++)
            if (first + i < columns) to[first + i] = v[i];
    } else {
        pack_block<form>(v, block, columns, inputs + (size_t)row * input_layout_of(form, columns).end);
    }
}

#define PACK(name, form) \
    extern "C" __global__ void name(const float *x, int stride, int columns, unsigned char *inputs) { \
        wait_for_earlier(); \
        let_next_start(); \
        pack<form>(x, stride, columns, inputs); \
    }
PACK(pack_f32, INPUTS_F32)
PACK(pack_int8, INPUTS_INT8)
PACK(pack_int16, INPUTS_INT16)
PACK(pack_rounded, INPUTS_ROUNDED)
