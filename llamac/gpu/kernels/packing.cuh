// SPDX-License-Identifier: MIT
// packing.cuh - a warp packs a block of 128 columns of a row as inputs of products (inputs.cuh), with the codes and
// scales of the pack functions of csrc/kernels_quant.h.
#ifndef LLAMAC_PACKING_CUH
#define LLAMAC_PACKING_CUH
#include "codes.cuh"
#include "inputs.cuh"

#define FAST_LIMIT 127.49609375f   // less than 127.5: csrc/kernels.h

enum { GROUP_LANES = 8 };   // that hold a group: each lane has 4 columns

static __device__ __forceinline__ int sum_of_group(int x) {
    for (int bits = GROUP_LANES / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(FULL_WARP, x, bits);
    return x;
}

// Numbers of a row that are integers times its scale, as pack_rounded. A scale of NaN leaves codes of 0.
static __device__ __forceinline__ Scaled of_row_scale(const float (&x)[4], float row_scale) {
    const float inverse = __fdiv_rn(1, row_scale);
    Scaled to = { {}, row_scale };
    for (int i = 0; i < 4; i++) to.x[i] = inverse > 0 ? __fmul_rn(x[i], inverse) : 0.0f;
    return to;
}

// x: columns 4 lane to 4 lane + 3 of block `block`, 0 after the row's last. to: the row of inputs. row_scale: for int8,
// of the whole row (of_row_scale); 0: each group has its own.
template <int form>
static __device__ __forceinline__ void pack_block(const float (&x)[4], int block, int columns, unsigned char *to,
                                                  float row_scale = 0) {
    const int lane = threadIdx.x % WARP_LANES, group = block * BLOCK_GROUPS + lane / GROUP_LANES,
              leads_group = lane % GROUP_LANES == 0;
    const input_layout layout = input_layout_of(form, columns);
    float *const sums = (float *)(void *)(to + layout.sums), *const scales = (float *)(void *)(to + layout.scales);
    uint32_t *const codes = (uint32_t *)(void *)(to + (size_t)group * group_input_bytes(form));
    if (form == INPUTS_INT16) {
        const Scaled numbers = scaled<WARP_LANES>(x, INT16_LIMIT);
        const Halves halves = halves_of(numbers.x);
        uint32_t *const words = codes + lane % GROUP_LANES / 2 * 4 + lane % 2;
        words[0] = halves.high, words[2] = halves.low;
        const int sum = sum_of_group(halves.sum);
        if (leads_group) sums[group] = (float)sum;
        if (lane == 0) scales[block] = numbers.scale;
        return;
    }
    Scaled numbers = form != INPUTS_INT8 ? scaled<WARP_LANES>(x, INT16_LIMIT)
                     : row_scale == 0    ? scaled<GROUP_LANES>(x, INT8_LIMIT)
                                         : of_row_scale(x, row_scale);
    float factor = 1;
    if (form == INPUTS_FAST) {
        float top = 0;
        for (int i = 0; i < 4; i++) top = v16_max(v16_abs(numbers.x[i]), top);
        factor = __fadd_rn(1, (float)(int)__fmul_rn(group_max<GROUP_LANES>(top), 1 / FAST_LIMIT));
        const float smaller = __fdiv_rn(1, factor);
        for (int i = 0; i < 4; i++) numbers.x[i] = __fmul_rn(numbers.x[i], smaller);
    }
    int code[4], sum = 0;
    for (int i = 0; i < 4; i++) sum += code[i] = round_even(numbers.x[i]);
    uint32_t word = pack_bytes(code);
    if (form == INPUTS_INT8) {   // columns 0 to 3 in even lanes, 4 to 7 in odd ones
        const uint32_t other = __shfl_xor_sync(FULL_WARP, word, 1);
        word = lane % 2 ? __byte_perm(word, other, 0x3726) : __byte_perm(word, other, 0x5140);
        for (int bits = GROUP_LANES / 4; bits > 0; bits /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bits);
        const int of_half = __shfl_xor_sync(FULL_WARP, sum, GROUP_LANES / 2);   // the second, for the lane that leads
        if (leads_group) ((uint32_t *)sums)[group] = (sum & 0xffff) | (uint32_t)of_half << 16;
    }
    codes[lane % GROUP_LANES] = word;
    if (form == INPUTS_FAST) sum = sum_of_group(sum);
    if (form == INPUTS_FAST && leads_group) {
        sums[group] = __fmul_rn(factor, (float)sum);
        ((float *)(void *)(to + layout.factors))[group] = factor;
    }
    if (form == INPUTS_INT8 && leads_group) scales[group] = numbers.scale;
    if (form == INPUTS_FAST && lane == 0) scales[block] = numbers.scale;
}

// The same for row `row` of inputs, in a form that is known at run time. INPUTS_F32: nothing.
INLINE void pack_block_of(int form, const float (&x)[4], int block, int columns, unsigned char *inputs, size_t row) {
    unsigned char *const to = inputs + row * input_layout_of(form, columns).end;
    if (form == INPUTS_INT8) pack_block<INPUTS_INT8>(x, block, columns, to);
    if (form == INPUTS_INT16) pack_block<INPUTS_INT16>(x, block, columns, to);
    if (form == INPUTS_FAST) pack_block<INPUTS_FAST>(x, block, columns, to);
}
#endif
