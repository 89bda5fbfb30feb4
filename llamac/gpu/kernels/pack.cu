// SPDX-License-Identifier: MIT
// pack.cu - rows of floats become packed inputs of products.
#include "packing.cuh"

#define ROUNDED_ROW_MIN 1e-5f       // as in csrc/kernels.h
#define FAST_BF16_MIN 0x1p-64f      // the same
enum { ROUNDING_WARPS = 8 };

// x rounded to bf16, as rounded_bf16 of csrc/kernels_bf16.h.
static __device__ __forceinline__ float rounded_bf16(float x) {
    const uint32_t bits = __float_as_uint(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    if (x != x) return x;
    return v16_abs(x) < FAST_BF16_MIN ? 0 : __uint_as_float(nearest);
}

// A warp stores a block of a row of inputs.
template <int form>
static __device__ __forceinline__ void store_block(const float (&v)[4], int block, int columns, unsigned char *inputs,
                                                   int row, float row_scale) {
    if constexpr (form == INPUTS_F32 || form == INPUTS_BF16) {
        float *const to = (float *)(void *)inputs + (size_t)row * columns;
        const int first = block * BLOCK_COLUMNS + threadIdx.x % WARP_LANES * 4;
        for (int i = 0; i < 4; i++)
            if (first + i < columns) to[first + i] = form == INPUTS_BF16 ? rounded_bf16(v[i]) : v[i];
    } else {
        unsigned char *const to = inputs + (size_t)row * input_layout_of(form, columns).end;
        pack_block<form>(v, block, columns, to, form == INPUTS_INT8 ? row_scale : 0);
    }
}

// Packs rows of `columns` numbers, which are `stride` apart, as inputs (inputs.cuh); floats: side by side. A warp
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
    store_block<form>(v, block, columns, inputs, row, 0);
}

// The same for rows that are rounded to 8 bits first, as round_row: integers times a scale of the whole row. A block of
// threads takes a row. Grid (rows); block 256.
//
// Budget: a row is read twice, from the L2 cache, between two barriers: 2 us.
template <int form>
static __device__ __forceinline__ void round_and_pack(const float *x, int columns, unsigned char *inputs) {
    __shared__ float tops[ROUNDING_WARPS];
    __shared__ int bad[ROUNDING_WARPS];
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES, row = blockIdx.x;
    const float *const from = x + (size_t)row * columns;
    float top = 0;
    int is_bad = 0;
    for (int i = threadIdx.x; i < columns; i += ROUNDING_WARPS * WARP_LANES) {
        top = v16_max(v16_abs(from[i]), top);
        is_bad |= !is_finite(from[i]);
    }
    top = group_max<WARP_LANES>(top), is_bad = __any_sync(FULL_WARP, is_bad);
    if (lane == 0) tops[warp] = top, bad[warp] = is_bad;
    __syncthreads();
    for (int i = 0; i < ROUNDING_WARPS; i++) top = v16_max(top, tops[i]), is_bad |= bad[i];
    const float factor = is_bad ? f32_from_bits(0x7fc00000)
                                : __fdiv_rn(INT8_LIMIT, top > ROUNDED_ROW_MIN ? top : ROUNDED_ROW_MIN);
    for (int block = warp; block < blocks_of(columns); block += ROUNDING_WARPS) {
        float v[4];
        for (int i = 0; i < 4; i++) {
            const int column = block * BLOCK_COLUMNS + 4 * lane + i;
            const float scaled = column < columns ? __fmul_rn(from[column], factor) : 0.0f;
            v[i] = column < columns ? __fdiv_rn(__fsub_rn(__fadd_rn(scaled, 0x1.8p23f), 0x1.8p23f), factor) : 0.0f;
        }
        store_block<form>(v, block, columns, inputs, row, __fdiv_rn(1, factor));
    }
}

#define PACK(name, form) \
    extern "C" __global__ void pack_##name(const float *x, int stride, int columns, unsigned char *inputs) { \
        wait_for_earlier(); \
        let_next_start(); \
        pack<form>(x, stride, columns, inputs); \
    } \
    extern "C" __global__ void __launch_bounds__(ROUNDING_WARPS * WARP_LANES) \
    round_and_pack_##name(const float *x, int columns, unsigned char *inputs) { \
        wait_for_earlier(); \
        let_next_start(); \
        round_and_pack<form>(x, columns, inputs); \
    }
PACK(f32, INPUTS_F32)
PACK(int8, INPUTS_INT8)
PACK(int16, INPUTS_INT16)
PACK(fast, INPUTS_FAST)
PACK(bf16, INPUTS_BF16)
