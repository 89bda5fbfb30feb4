// SPDX-License-Identifier: MIT
// inputs.cuh - the layout of packed inputs of products, which pack.cu writes and the products read.
//
// For groups of 32 and blocks of 128 columns (csrc/dtype.h), a row of inputs holds, where input_layout_of says,
//     form            codes of a group                            then floats, if nothing else is said
//     INPUTS_INT16    64 bytes: x = 128 h + l, with h and l in    per group the sum of the codes; per block the scale
//                     int8; 4 times h of 8 columns, then l
//     INPUTS_FAST     32 bytes: h, as fast numerics define it     per group the sum of the inputs, factor * (sum of
//                                                                 h); per group the factor; per block the scale
//     INPUTS_INT8     32 bytes; 4 times those of 8 columns, as    per group the sums of the codes of its halves, two
//                     nibbles of q4: columns 0, 4, 1, 5, 2, 6,    int16; per group the scale
//                     3, 7
// in the units of csrc/kernels.h. Columns after the last are 0. INPUTS_F32: the floats as they are, rows side by side.
// INPUTS_BF16: the same, rounded to bf16.
#ifndef LLAMAC_INPUTS_CUH
#define LLAMAC_INPUTS_CUH
#include "device.cuh"
#include "dtype.h"

enum input_form { INPUTS_F32, INPUTS_INT8, INPUTS_INT16, INPUTS_FAST, INPUTS_BF16 };

static __device__ __forceinline__ float element(const float4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Where the parts of a row start, in bytes.
struct input_layout { int sums, factors, scales, end; };
static __device__ __forceinline__ constexpr int blocks_of(int columns) {
    return (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
}
static __device__ __forceinline__ constexpr int group_input_bytes(int form) {
    return form == INPUTS_INT16 ? 2 * GROUP_COLUMNS : (int)GROUP_COLUMNS;
}
static __device__ __forceinline__ constexpr input_layout input_layout_of(int form, int columns) {
    // whole blocks, so that the 4 sums of a block are read together
    const int blocks = blocks_of(columns), groups = blocks * BLOCK_GROUPS;
    const int sums = groups * group_input_bytes(form), factors = sums + 4 * groups,
              scales = factors + (form == INPUTS_FAST ? 4 * groups : 0),
              end = scales + 4 * (form == INPUTS_INT8 ? groups : blocks);
    return { sums, factors, scales, (end + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES };
}
#endif
