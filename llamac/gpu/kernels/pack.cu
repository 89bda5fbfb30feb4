// SPDX-License-Identifier: MIT
// pack.cu - rows of floats become packed inputs of products (inputs.cuh), with the codes and scales of the pack kernels
// of csrc/kernels_quant.h.
#include "inputs.cuh"

// Less than 127.5: csrc/kernels.h.
#define ROUNDED_LIMIT 127.49609375f
enum { INT8_LIMIT = 127, INT16_LIMIT = 16319 };

// Lanes of a warp that hold a group: each lane has 4 columns of a block.
enum { GROUP_LANES = 8, LANE_COLUMNS = 4 };

static __device__ __forceinline__ float max_of_lanes(float x, int lanes) {
    for (int bits = lanes / 2; bits > 0; bits /= 2) {
        const float other = __shfl_xor_sync(FULL_WARP, x, bits);
        x = other > x ? other : x;
    }
    return x;
}
static __device__ __forceinline__ int sum_of_group(int x) {
    for (int bits = GROUP_LANES / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(FULL_WARP, x, bits);
    return x;
}
static __device__ __forceinline__ int round_even(float x) {
    return (int)__fsub_rn(__fadd_rn(x, 0x1.8p23f), 0x1.8p23f);
}
static __device__ __forceinline__ uint32_t bytes_of(const int (&x)[LANE_COLUMNS]) {
    return (x[0] & 255u) | (x[1] & 255u) << 8 | (x[2] & 255u) << 16 | (uint32_t)x[3] << 24;
}

// input_scale of csrc/kernels_quant.h over the columns of `lanes` lanes.
static __device__ __forceinline__ float input_scale(const float (&x)[LANE_COLUMNS], int lanes, float limit,
                                                    float *inverse) {
    float top = 0;
    int bad = 0;
    for (int i = 0; i < LANE_COLUMNS; i++) {
        const uint32_t bits = __float_as_uint(x[i]) & 0x7fffffff;
        if (bits >= 0x7f800000) bad = 1;
        else top = __uint_as_float(bits) > top ? __uint_as_float(bits) : top;
    }
    const unsigned any = __ballot_sync(FULL_WARP, bad);
    const int lane = threadIdx.x % WARP_LANES;
    bad = lanes == WARP_LANES ? any != 0 : (any >> lane / lanes * lanes & ((1u << lanes) - 1)) != 0;
    top = max_of_lanes(top, lanes);
    *inverse = top >= 0x1p-100f && !bad ? __fdiv_rn(limit, top) : 0;
    return bad ? __uint_as_float(0x7fc00000) : *inverse > 0 ? __fdiv_rn(top, limit) : 0;
}

// Packs x (rows, columns) as inputs (inputs.cuh). A warp packs a block of 128 columns.
// Grid: (blocks of columns / warps of a block of threads, rows). Equals the pack functions of csrc/kernels_quant.h.
template <int form>
static __device__ __forceinline__ void pack(const float *x, int columns, unsigned char *inputs) {
    const int lane = threadIdx.x % WARP_LANES, row = blockIdx.y,
              block = blockIdx.x * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES;
    if (block >= blocks_of(columns)) return;   // the whole warp
    const input_layout layout = input_layout_of(form, columns);
    const float *from = x + (size_t)row * columns;
    unsigned char *to = inputs + (size_t)row * layout.end;
    const int first = block * BLOCK_COLUMNS + lane * LANE_COLUMNS, group = block * BLOCK_GROUPS + lane / GROUP_LANES;
    float v[LANE_COLUMNS], inverse;
    for (int i = 0; i < LANE_COLUMNS; i++) v[i] = first + i < columns ? from[first + i] : 0;
    const float scale = input_scale(v, form == INPUTS_INT8 ? (int)GROUP_LANES : (int)WARP_LANES,
                                    form == INPUTS_INT8 ? INT8_LIMIT : INT16_LIMIT, &inverse);
    for (int i = 0; i < LANE_COLUMNS; i++) v[i] = inverse > 0 ? __fmul_rn(v[i], inverse) : 0;

    unsigned char *codes = to + (size_t)group * group_input_bytes(form);
    const int leads_group = lane % GROUP_LANES == 0;
    int code[LANE_COLUMNS], sum = 0;
    if (form == INPUTS_INT16) {
        int low[LANE_COLUMNS];
        for (int i = 0; i < LANE_COLUMNS; i++) {
            const int value = round_even(v[i]);
            sum += value;
            code[i] = (value + 64) >> 7;
            low[i] = value - 128 * code[i];
        }
        uint32_t *words = (uint32_t *)(void *)codes + lane % GROUP_LANES / 2 * 4 + lane % 2;
        words[0] = bytes_of(code), words[2] = bytes_of(low);
        sum = sum_of_group(sum);
        if (leads_group) ((float *)(void *)(to + layout.sums))[group] = (float)sum;
    } else {
        float factor = 1;
        if (form == INPUTS_ROUNDED) {
            float top = 0;
            for (int i = 0; i < LANE_COLUMNS; i++) top = fabsf(v[i]) > top ? fabsf(v[i]) : top;
            top = max_of_lanes(top, GROUP_LANES);
            factor = __fadd_rn(1, (float)(int)__fmul_rn(top, 1 / ROUNDED_LIMIT));
            const float smaller = __fdiv_rn(1, factor);
            for (int i = 0; i < LANE_COLUMNS; i++) v[i] = __fmul_rn(v[i], smaller);
        }
        for (int i = 0; i < LANE_COLUMNS; i++) sum += code[i] = round_even(v[i]);
        ((uint32_t *)(void *)codes)[lane % GROUP_LANES] = bytes_of(code);
        sum = sum_of_group(sum);
        if (form == INPUTS_ROUNDED && leads_group) {
            ((float *)(void *)(to + layout.sums))[group] = __fmul_rn(factor, (float)sum);
            ((float *)(void *)(to + layout.factors))[group] = factor;
        }
    }
    float *scales = (float *)(void *)(to + layout.scales);
    if (form == INPUTS_INT8 && leads_group) scales[group] = scale;
    if (form != INPUTS_INT8 && lane == 0) scales[block] = scale;
}

#define PACK(name, form) \
    extern "C" __global__ void name(const float *x, int columns, unsigned char *inputs) { \
        pack<form>(x, columns, inputs); \
    }
PACK(pack_int8, INPUTS_INT8)
PACK(pack_int16, INPUTS_INT16)
PACK(pack_rounded, INPUTS_ROUNDED)
