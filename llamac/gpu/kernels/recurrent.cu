// SPDX-License-Identifier: MIT
// recurrent.cu - recurrent layers: convolutions over positions, and the gated delta rule (csrc/recurrent.c, delta_net.c
// and short_conv.c). Their states are pages, in which a layer's part has the heads' matrices, then the last inputs of
// the convolution.
#include "gates.h"
#include "norms.cuh"

// llamac_segment of csrc/device.h: rows that continue from one state and end with another. A chain is segments that
// continue from states of each other, in their order: starts (chains + 1) has the first segment of each.
struct segment { int first, last; uint64_t from, to; };

enum { WARPS_PER_BLOCK = 4, STATE_COLUMNS = 16, STATE_GROUP = 64 };   // columns of a block, and of a group in memory

// The input of the convolution in a row and channel: with is_gated, b * x of (b, c, x).
INLINE float conv_input(const float *in, int row, int i, int channels, int is_gated) {
    if (!is_gated) return in[(size_t)row * channels + i];
    const float *const b = in + (size_t)3 * row * channels + i;
    return __fmul_rn(b[0], b[2 * channels]);
}

// out (rows, channels) = the convolution of each channel over positions, then silu with is_silu, times c with is_gated;
// then the last width - 1 inputs of each segment go to the state after it. As convolve_channels of recurrent.c and
// short_conv.c. in: (rows, channels), with is_gated (rows, 3, channels); taps: (width, channels); bias: (channels) or
// NULL; offset: bytes in a state before the inputs. Grid (channels / 128, rounded up; chains); block 128.
//
// Budget: a thread computes a channel of a chain, row after row: 2 us with one row. Rows of prompts read width
// numbers each, from L1 but for the newest: 256 rows take 30 us.
extern "C" __global__ void __launch_bounds__(128)
convolve(const float *in, int channels, int width, int is_gated, int is_silu, const float *taps, const float *bias,
         const segment *segments, const int *starts, const int *positions, int offset, float *out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, before = width - 1;
    if (i >= channels) return;
    for (int s = starts[blockIdx.y]; s < starts[blockIdx.y + 1]; s++) {
        const segment g = segments[s];
        const float *const from = (const float *)(g.from + offset) + i;
        float *const to = (float *)(g.to + offset) + i;
        const int start = g.first - positions[g.first];   // where the row of position 0 would be
        for (int r = g.first; r < g.last; r++) {
            float sum = bias ? bias[i] : 0.0f;
            for (int t = 0; t < width; t++) {
                const int row = r - before + t;
                if (row < start) continue;
                const float x = row < g.first ? from[(size_t)(row - g.first + before) * channels]
                                              : conv_input(in, row, i, channels, is_gated);
                sum = __fmaf_rn(taps[(size_t)t * channels + i], x, sum);
            }
            if (is_silu) sum = v16_activate(ACTIVATION_SILU, sum);
            out[(size_t)r * channels + i] = is_gated ? __fmul_rn(in[((size_t)3 * r + 1) * channels + i], sum) : sum;
        }
        for (int slot = 0; slot < before; slot++) {   // ascending: the state may be updated in place
            const int row = g.last - before + slot;
            float x = 0;
            if (row >= g.first) x = conv_input(in, row, i, channels, is_gated);
            else if (row >= start) x = from[(size_t)(row - g.first + before) * channels];
            to[(size_t)slot * channels] = x;
        }
    }
}

// unit_norm of the first n_heads heads of dim numbers of each row of x, in place; the factor of the first n_q heads is
// q_factor, that of the others 1. x: rows that are `stride` apart. Grid (n_heads / 4, rounded up; rows); block 128;
// dynamic shared memory: 4 heads.
extern "C" __global__ void __launch_bounds__(128)
norm_state_keys(float *x, int stride, int n_heads, int n_q, int dim, float eps, float q_factor) {
    DYNAMIC_SHARED(memory);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES,
              head = blockIdx.x * WARPS_PER_BLOCK + warp;
    if (head >= n_heads) return;
    float *const own = (float *)memory + warp * dim;
    x += (size_t)blockIdx.y * stride + (size_t)head * dim;
    for (int d = lane; d < dim; d += WARP_LANES) own[d] = x[d];
    __syncwarp();
    const float scale = unit_scale(own, dim, eps, head < n_q ? q_factor : 1.0f);
    for (int d = lane; d < dim; d += WARP_LANES) x[d] = __fmul_rn(own[d], scale);
}

// Decays and betas of n = rows * heads heads, from their products, in place: as update_head of delta_net.c. rates,
// dt_bias: (heads). Grid (n / 64, rounded up); block 64.
extern "C" __global__ void __launch_bounds__(64)
state_gates(float *decay, float *beta, int n, int heads, const float *rates, const float *dt_bias) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    decay[i] = decay_of(rates[i % heads], softplus((double)__fadd_rn(decay[i], dt_bias[i % heads])));
    beta[i] = sigmoid((double)beta[i]);
}

// The delta rule for 16 columns of a head's state and the rows of a chain, as the kernel delta_rule. qkv: (rows,
// channels): q and k of the key heads, then v of the heads; decay, beta: (rows, heads); mix: (rows, heads, value_dim);
// offset: bytes in a state before the heads. Grid (value_dim / 16; heads; chains); block 32; dynamic shared memory:
// 18 key_dim floats.
//
// Budget: two chains of key_dim fused multiply-adds per row, which take 0.7 us with 128; a state is read and written
// once per segment: bound by memory in decoding with many sequences.
extern "C" __global__ void __launch_bounds__(32)
delta_rule(const float *qkv, int key_heads, int heads, int key_dim, int value_dim, const float *decay,
           const float *beta, const segment *segments, const int *starts, int offset, float *mix) {
    DYNAMIC_SHARED(memory);
    float *const state = (float *)memory, *const q = state + STATE_COLUMNS * key_dim, *const k = q + key_dim;
    const int lane = threadIdx.x, column = blockIdx.x * STATE_COLUMNS, head = blockIdx.y,
              keys = key_heads * key_dim, channels = 2 * keys + heads * value_dim,
              key = head / (heads / key_heads) * key_dim, value = head * value_dim + column;
    const int group = column / STATE_GROUP * STATE_GROUP, is_whole = group + STATE_GROUP <= value_dim;
    const int stride = is_whole ? STATE_GROUP : STATE_COLUMNS;   // from a key dimension to the next
    const size_t first = (size_t)head * key_dim * value_dim +
                         (is_whole ? (size_t)group * key_dim + (column - group) : (size_t)column * key_dim);
    for (int s = starts[blockIdx.z]; s < starts[blockIdx.z + 1]; s++) {
        const segment g = segments[s];
        const float *const from = (const float *)(g.from + offset) + first;
        float *const to = (float *)(g.to + offset) + first;
        for (int i = lane; i < STATE_COLUMNS * key_dim; i += WARP_LANES)
            state[i] = g.from ? from[(size_t)(i / STATE_COLUMNS) * stride + i % STATE_COLUMNS] : 0.0f;
        for (int r = g.first; r < g.last; r++) {
            const float *const row = qkv + (size_t)r * channels;
            for (int d = lane; d < key_dim; d += WARP_LANES) q[d] = row[key + d], k[d] = row[keys + key + d];
            __syncwarp();
            if (lane < STATE_COLUMNS) {
                const size_t gate = (size_t)r * heads + head;
                const float remains = decay[gate];
                float sum = 0;
                for (int i = 0; i < key_dim; i++)
                    sum = __fmaf_rn(__fmul_rn(state[i * STATE_COLUMNS + lane], remains), k[i], sum);
                const float change = __fmul_rn(__fsub_rn(row[2 * keys + value + lane], sum), beta[gate]);
                sum = 0;
                for (int i = 0; i < key_dim; i++) {
                    float *const at = &state[i * STATE_COLUMNS + lane];
                    *at = __fmaf_rn(change, k[i], __fmul_rn(*at, remains));
                    sum = __fmaf_rn(*at, q[i], sum);
                }
                mix[(size_t)r * heads * value_dim + value + lane] = sum;
            }
            __syncwarp();
        }
        for (int i = lane; i < STATE_COLUMNS * key_dim; i += WARP_LANES)
            to[(size_t)(i / STATE_COLUMNS) * stride + i % STATE_COLUMNS] = state[i];
    }
}

// mix = rms_norm(mix) * silu(z) of each head, in place. mix, z: (rows, heads, dim); weight: (dim). Grid (heads / 4,
// rounded up; rows); block 128; dynamic shared memory: 4 heads.
extern "C" __global__ void __launch_bounds__(128)
norm_state_heads(float *mix, const float *z, const float *weight, float eps, int heads, int dim) {
    DYNAMIC_SHARED(memory);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES,
              head = blockIdx.x * WARPS_PER_BLOCK + warp;
    if (head >= heads) return;
    float *const own = (float *)memory + warp * dim;
    const size_t at = ((size_t)blockIdx.y * heads + head) * dim;
    for (int d = lane; d < dim; d += WARP_LANES) own[d] = mix[at + d];
    __syncwarp();
    const Moments m = moments(own, dim, eps, 1);
    for (int d = lane; d < dim; d += WARP_LANES)
        mix[at + d] = __fmul_rn(v16_activate(ACTIVATION_SILU, z[at + d]), normed(own[d], m, 1, weight[d], 0));
}
