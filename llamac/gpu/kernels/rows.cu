// SPDX-License-Identifier: MIT
// rows.cu - functions of rows of floats: norms, branches, activations, scales, angles.
#include "angles.h"
#include "gates.h"
#include "norms.cuh"
#include "packing.cuh"

// The moments of the row in shared memory, computed by the first warp.
static __device__ Moments block_moments(const float *row, int width, float eps, int is_rms, Moments *shared) {
    __syncthreads();
    if (threadIdx.x < WARP_LANES) {
        const Moments m = moments(row, width, eps, is_rms);
        if (threadIdx.x == 0) *shared = m;
    }
    __syncthreads();
    return *shared;
}

// The numbers of a row that a thread has at a time. All loads start before the first is used: each takes longer than
// everything else that happens to a number.
enum { NORM_THREADS = 512, NORM_NUMBERS = 8, NORM_STEP = NORM_THREADS * NORM_NUMBERS };
struct Numbers { float v[NORM_NUMBERS]; };
static __device__ __forceinline__ Numbers load_numbers(const float *from, int base, int width) {
    Numbers x;
#pragma unroll
    for (int j = 0; j < NORM_NUMBERS; j++) {
        const int i = base + j * NORM_THREADS + threadIdx.x;
        x.v[j] = from && i < width ? from[i] : 0.0f;
    }
    return x;
}
// Calls use(i, j) for each number i of the row that is in place j of the thread's.
template <class Use> static __device__ __forceinline__ void for_numbers(int base, int width, Use use) {
#pragma unroll
    for (int j = 0; j < NORM_NUMBERS; j++) {
        const int i = base + j * NORM_THREADS + threadIdx.x;
        if (i < width) use(i, j);
    }
}

// Norms a row in shared memory, in place.
static __device__ void norm_row(float *row, const float *weight, const float *bias, float eps, int is_rms, int width,
                                Moments *shared) {
    const Numbers first_weights = load_numbers(weight, 0, width);   // while the moments are computed
    const Moments m = block_moments(row, width, eps, is_rms, shared);
    for (int base = 0; base < width; base += NORM_STEP) {
        const Numbers w = base ? load_numbers(weight, base, width) : first_weights, b = load_numbers(bias, base, width);
        for_numbers(base, width, [&](int i, int j) { row[i] = normed(row[i], m, is_rms, w.v[j], b.v[j]); });
    }
}

// For each row r: t = x[rows[r]] (rows NULL: x[r]); with a branch t += norm(branch[r]) * scale, without weights of that
// norm t += branch[r] * scale, and sum[r] = t; then y[r] = norm(t), unless `weight` is NULL. A scale of 1 is left out.
// Rows of x are `stride` apart, rows of y `y_stride`. sum may be x, y may be sum. Equals norm_and_keep of products.c
// with rms_norm or layer_norm. Then y[r] is packed as inputs of products in up to two forms; INPUTS_F32: in none.
// branch, sum: (rows, width). Grid (rows); block 512; dynamic shared memory: the row and 16 bytes. With a second
// dimension of the grid, rows have so many parts of `width` numbers, with weights of their own, which are not packed.
//
// Budget, width 4096: a load from L2 takes 0.4 us, and there are two in a row; the chain of width / 16 fused
// multiply-adds, each 4 cycles, takes 0.6 us (two of them with a normed branch, three with layer_norm), barriers 1 us.
extern "C" __global__ void __launch_bounds__(512)
norm_rows(const float *x, int stride, const int *rows, const float *branch, const float *branch_weight,
          const float *branch_bias, float scale, float *sum, const float *weight, const float *bias, float eps,
          int is_rms, int width, float *y, int y_stride, int form, unsigned char *inputs, int other_form,
          unsigned char *other_inputs) {
    wait_for_earlier();
    let_next_start();
    DYNAMIC_SHARED(memory);
    Moments *const shared = (Moments *)memory;
    float *const row = (float *)(memory + 16);
    const size_t part = blockIdx.y, r = blockIdx.x * gridDim.y + part;
    const int from = rows ? rows[blockIdx.x] : (int)blockIdx.x;
    x += (size_t)from * stride + part * width;
    if (weight) weight += part * width;
    if (branch) branch += r * width;
    if (branch && branch_weight) {
        for (int base = 0; base < width; base += NORM_STEP) {
            const Numbers b = load_numbers(branch, base, width);
            for_numbers(base, width, [&](int i, int j) { row[i] = b.v[j]; });
        }
        norm_row(row, branch_weight, branch_bias, eps, is_rms, width, shared);
    }
    for (int base = 0; base < width; base += NORM_STEP) {   // a thread reads only what it wrote itself
        const Numbers t = load_numbers(x, base, width), b = load_numbers(branch_weight ? NULL : branch, base, width);
        for_numbers(base, width, [&](int i, int j) {
            float value = t.v[j];
            if (branch) {
                const float added = branch_weight ? row[i] : b.v[j];
                value = __fadd_rn(scale != 1 ? __fmul_rn(added, scale) : added, value);
                sum[r * width + i] = value;
            }
            row[i] = value;
        });
    }
    if (!weight) return;
    norm_row(row, weight, bias, eps, is_rms, width, shared);
    y += (size_t)blockIdx.x * y_stride + part * width;
    for (int base = 0; base < width; base += NORM_STEP)
        for_numbers(base, width, [&](int i, int) { y[i] = row[i]; });
    if (form == INPUTS_F32) return;
    __syncthreads();
    for (int block = threadIdx.x / WARP_LANES; block < blocks_of(width); block += blockDim.x / WARP_LANES) {
        const int first = block * BLOCK_COLUMNS + threadIdx.x % WARP_LANES * 4;
        float numbers[4];
        for (int i = 0; i < 4; i++) numbers[i] = first + i < width ? row[first + i] : 0.0f;
        pack_block_of(form, numbers, block, width, inputs, r);
        if (other_form != INPUTS_F32) pack_block_of(other_form, numbers, block, width, other_inputs, r);
    }
}

// y = activation(gate) * up; gate NULL: y = activation(up). Before that, with row_weights (rows), both are multiplied
// by the row's, and then, with is_clamped, gate = clamp(gate, -inf, limit, 0) and up = clamp(up, -limit, limit,
// offset). As scale, clamp and activate; xIELU, as xielu with the softplus of alphas. Then y is packed as inputs of
// products, unless form is INPUTS_F32. gate, y: (rows, width); up: rows that are `stride` apart; may be y. Grid (blocks
// of 128 columns / 4, rounded up; rows); block 128: a warp takes a block of columns, a lane 4 of them.
//
// Budget: 12 bytes and about 50 instructions per number: bound by memory, and in decoding by the launch.
extern "C" __global__ void __launch_bounds__(128)
activate(const float *gate, const float *up, int stride, float *y, int width, int activation, const float *alpha_p,
         const float *alpha_n, const float *row_weights, int is_clamped, float limit, float offset, int form,
         unsigned char *inputs) {
    wait_for_earlier();
    let_next_start();
    __shared__ float alphas[2];
    if (alpha_p) {   // the whole block
        if (threadIdx.x < 2) alphas[threadIdx.x] = (float)softplus((double)(threadIdx.x ? *alpha_n : *alpha_p));
        __syncthreads();
    }
    const int block = blockIdx.x * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES;
    if (block >= blocks_of(width)) return;   // the whole warp
    const int first = block * BLOCK_COLUMNS + threadIdx.x % WARP_LANES * 4;
    const size_t row = blockIdx.y, at = row * width + first;
    float numbers[4] = { 0, 0, 0, 0 };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i >= width) continue;
        float u = up[row * stride + first + i], g = gate ? gate[at + i] : u;
        if (row_weights) g = __fmul_rn(g, row_weights[row]), u = __fmul_rn(u, row_weights[row]);
        if (is_clamped) {
            g = v16_clamp(g, -infinity(), limit, 0);
            u = v16_clamp(u, -limit, limit, offset);
        }
        const float a = alpha_p ? v16_xielu(g, alphas[0], alphas[1]) : v16_activate(activation, g);
        y[at + i] = numbers[i] = gate ? __fmul_rn(a, u) : a;
    }
    if (form != INPUTS_F32) pack_block_of(form, numbers, block, width, inputs, row);
}

// y *= scale; then, unless cap is 0, y = cap tanh(y / cap). As scale. Grid (n / 256, rounded up); block 256.
extern "C" __global__ void __launch_bounds__(256) scale_numbers(float *y, int n, float scale, float cap) {
    wait_for_earlier();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)n) return;
    const float scaled = __fmul_rn(y[i], scale);
    y[i] = cap > 0 ? v16_soft_cap(scaled, cap) : scaled;
}

// y /= 1 + exp(-gate), for n numbers, where `group` neighbors share a gate. As gate. Grid (n / 256, rounded up);
// block 256.
extern "C" __global__ void __launch_bounds__(256) gate_numbers(float *y, const float *gate, int n, int group) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)n) y[i] = v16_mul_sigmoid(y[i], gate[(unsigned)i / (unsigned)group]);
}

// angles: (rows, 2 half): half cosines, then half sines of each row's position. As rope_angles.
// Grid (half / 64, rounded up; rows); block 64. Once per pass and table.
extern "C" __global__ void __launch_bounds__(64)
rope_angles(const int *positions, const float *inv_freq, int half, float factor, float *angles) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= half) return;
    float *const row = angles + (size_t)blockIdx.y * 2 * half;
    rope_angle(positions[blockIdx.y], inv_freq[j], factor, &row[j], &row[half + j]);
}

// scales[r] = scale * rope_query_scale(positions[r] + offset, beta, context). As query_scale of attention.c.
// Grid (rows / 64, rounded up); block 64. Once per pass for layers with the same beta and context.
extern "C" __global__ void __launch_bounds__(64)
query_scales(const int *positions, int rows, float scale, float beta, int context, int offset,
             float *scales) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r < rows) scales[r] = __fmul_rn(scale, log_scale(positions[r] + offset, beta, context));
}
