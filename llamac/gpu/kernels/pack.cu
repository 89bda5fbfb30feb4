// SPDX-License-Identifier: MIT
// pack.cu - rows of floats become packed inputs of products.
#include "packing.cuh"

// Packs x (rows, columns) as inputs (inputs.cuh). A warp packs a block of 128 columns.
// Grid: (blocks of columns / warps of a block of threads, rows). Equals the pack functions of csrc/kernels_quant.h.
template <int form>
static __device__ __forceinline__ void pack(const float *x, int columns, unsigned char *inputs) {
    const int lane = threadIdx.x % WARP_LANES, row = blockIdx.y,
              block = blockIdx.x * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES;
    if (block >= blocks_of(columns)) return;   // the whole warp
    const float *from = x + (size_t)row * columns;
    const int first = block * BLOCK_COLUMNS + 4 * lane;
    float v[4];
    for (int i = 0; i < 4; i++) v[i] = first + i < columns ? from[first + i] : 0;
    pack_block<form>(v, block, columns, inputs + (size_t)row * input_layout_of(form, columns).end);
}

#define PACK(name, form) \
    extern "C" __global__ void name(const float *x, int columns, unsigned char *inputs) { \
        wait_for_earlier(); \
        let_next_start(); \
        pack<form>(x, columns, inputs); \
    }
PACK(pack_int8, INPUTS_INT8)
PACK(pack_int16, INPUTS_INT16)
PACK(pack_rounded, INPUTS_ROUNDED)
