// SPDX-License-Identifier: MIT
// recurrent.cu - recurrent layers: convolutions over positions, the gated delta rule, and Mamba 2 (csrc/recurrent.c,
// delta_net.c, mamba2.c and short_conv.c). Their states are pages, in which a layer's part has the heads' matrices,
// then the last inputs of the convolution.
#include "gates.h"
#include "norms.cuh"

// llamac_segment of csrc/device.h: rows that continue from one state and end with another. A chain is segments that
// continue from states of each other, in their order: starts (chains + 1) has the first segment of each.
struct segment { int first, last; uint64_t from, to; };

enum {
    WARPS_PER_BLOCK = 4,
    CONV_ROWS = 16,                          // of a segment that a thread convolves
    STATE_COLUMNS = 16, STATE_GROUP = 64,    // columns of a block of the delta rule, and of a group in memory
    SCAN_ROWS = 8,                           // of Mamba 2 that share one read of the state
};

// The input of the convolution in a row and channel: with is_gated, b * x of (b, c, x).
INLINE float conv_input(const float *in, int row, int i, int channels, int is_gated) {
    if (!is_gated) return in[(size_t)row * channels + i];
    const float *const b = in + (size_t)3 * row * channels + i;
    return __fmul_rn(b[0], b[2 * channels]);
}

// out (rows, channels) = the convolution of each channel over positions, then silu with is_silu, times c with is_gated;
// then the last width - 1 inputs of each segment go to the state after it. As convolve_channels of recurrent.c and
// short_conv.c. in: (rows, channels), with is_gated (rows, 3, channels); taps: (width, channels); bias: (channels) or
// NULL; offset: bytes in a state before the inputs. Grid (channels / 128, rounded up; rows of the pass / 16, rounded
// up; chains); block 128.
//
// A thread takes a channel of 16 rows of each segment of a chain. The first rows, which alone read a state, and the
// stores of states are those of the same threads, which walk the segments in order.
//
// Budget: threads compute 16 rows each, one after the other; a row reads width numbers, from L1 but for the newest.
extern "C" __global__ void __launch_bounds__(128)
convolve(const float *in, int channels, int width, int is_gated, int is_silu, const float *taps, const float *bias,
         const segment *segments, const int *starts, const int *positions, int offset, float *out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, before = width - 1;   // at most CONV_ROWS
    if (i >= channels) return;
    for (int s = starts[blockIdx.z]; s < starts[blockIdx.z + 1]; s++) {
        const segment g = segments[s];
        const float *const from = (const float *)(g.from + offset) + i;
        float *const to = (float *)(g.to + offset) + i;
        const int start = g.first - positions[g.first],   // where the row of position 0 would be
                  first = g.first + (int)blockIdx.y * CONV_ROWS, last = min(first + (int)CONV_ROWS, g.last);
        for (int r = first; r < last; r++) {
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
        if (blockIdx.y > 0) continue;
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
// dt_bias: (heads); beta_factor: 1 or 2. Grid (n / 64, rounded up); block 64.
extern "C" __global__ void __launch_bounds__(64)
state_gates(float *decay, float *beta, int n, int heads, const float *rates, const float *dt_bias, float beta_factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    decay[i] = decay_of(rates[i % heads], softplus((double)__fadd_rn(decay[i], dt_bias[i % heads])));
    beta[i] = __fmul_rn(beta_factor, sigmoid((double)beta[i]));
}

// Loads q and k of a row and key head into shared memory, `to` (2, key_dim), while the warp computes. from: q; keys:
// from q to k.
static __device__ __forceinline__ void load_keys(float *to, const float *from, int keys, int key_dim) {
    for (int d = 4 * (int)threadIdx.x; d < 2 * key_dim; d += 4 * WARP_LANES)
        copy_async(to + d, from + (d < key_dim ? d : keys + d - key_dim));
}

// The sum of a column of a head's state, times its decay, with k of a row: S^T k. state: a lane's column.
static __device__ __forceinline__ float column_times(const float *state, float decay, const float *k, int key_dim) {
    float sum = 0;
    for (int i = 0; i < key_dim; i++) sum = __fmaf_rn(__fmul_rn(state[i * WARP_LANES], decay), k[i], sum);
    return sum;
}

// Updates a column of a head's state by a row, S = decay S + k change, and returns its sum, times `factor`, with
// `other`: q of the row, or k of the next.
static __device__ __forceinline__ float update_column(float *state, float decay, float change, const float *k,
                                                      float factor, const float *other, int key_dim) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < key_dim; i++) {
        const float x = __fmaf_rn(change, k[i], __fmul_rn(state[i * WARP_LANES], decay));
        state[i * WARP_LANES] = x;
        sum = __fmaf_rn(__fmul_rn(x, factor), other[i], sum);
    }
    return sum;
}

// The delta rule for 16 columns of a head's state and the rows of a chain, as the kernel delta_rule. qkv: (rows,
// channels): q and k of the key heads, then v of the heads; decay, beta: (rows, heads); mix: (rows, heads, value_dim);
// offset: bytes in a state before the heads. Grid (value_dim / 16; heads; chains); block 32; dynamic shared memory:
// 38 key_dim floats.
//
// A row has two chains of key_dim fused multiply-adds: S^T k decides how S changes, and S^T q follows. The second chain
// of a row and the first of the next row read the same numbers of S, so the half-warps compute one each, and a row
// takes the time of one. Both update S, each in its own copy. q and k arrive two rows ahead.
//
// Budget: a chain with key_dim 128 takes 0.4 us, what remains of a row 0.1 us; a state is read and written once per
// segment: bound by memory in decoding with many sequences.
extern "C" __global__ void __launch_bounds__(32)
delta_rule(const float *qkv, int key_heads, int heads, int key_dim, int value_dim, const float *decay,
           const float *beta, const segment *segments, const int *starts, int offset, float *mix) {
    DYNAMIC_SHARED(memory);
    float *const states = (float *)memory, *const rows = states + WARP_LANES * key_dim;   // (3, 2, key_dim): q, k
    const int lane = threadIdx.x, lane_column = lane % STATE_COLUMNS, is_next = lane / STATE_COLUMNS,
              column = blockIdx.x * STATE_COLUMNS, head = blockIdx.y,
              keys = key_heads * key_dim, channels = 2 * keys + heads * value_dim,
              key = head / (heads / key_heads) * key_dim, value = head * value_dim + column + lane_column;
    const int group = column / STATE_GROUP * STATE_GROUP, is_whole = group + STATE_GROUP <= value_dim;
    const int stride = is_whole ? STATE_GROUP : STATE_COLUMNS;   // from a key dimension to the next
    const size_t first = (size_t)head * key_dim * value_dim +
                         (is_whole ? (size_t)group * key_dim + (column - group) : (size_t)column * key_dim);
    float *const state = states + lane;
    const auto load_row = [&](int r, int last) {
        float *const to = rows + r % 3 * 2 * key_dim;
        if (r < last) load_keys(to, qkv + (size_t)r * channels + key, keys, key_dim);
        copy_async_commit();
    };
    for (int s = starts[blockIdx.z]; s < starts[blockIdx.z + 1]; s++) {
        const segment g = segments[s];
        const float *const from = (const float *)(g.from + offset) + first + lane_column;
        float *const to = (float *)(g.to + offset) + first + lane_column;
        load_row(g.first, g.last);
        load_row(g.first + 1, g.last);
#pragma unroll 8
        for (int i = 0; i < key_dim; i++) state[i * WARP_LANES] = g.from ? from[(size_t)i * stride] : 0.0f;
        copy_async_wait<1>();
        __syncwarp();
        float remains = decay[(size_t)g.first * heads + head], change = beta[(size_t)g.first * heads + head],
              v = qkv[(size_t)g.first * channels + 2 * keys + value],
              sum = column_times(state, remains, rows + (g.first % 3 * 2 + 1) * key_dim, key_dim);
        for (int r = g.first; r < g.last; r++) {
            const int next = min(r + 1, g.last - 1);   // after the last row, the sums of the next are not used
            const float *const k = rows + (r % 3 * 2 + 1) * key_dim,
                        *const with = is_next ? rows + (next % 3 * 2 + 1) * key_dim : k - key_dim;
            const float next_remains = decay[(size_t)next * heads + head],
                        next_beta = beta[(size_t)next * heads + head],
                        next_v = qkv[(size_t)next * channels + 2 * keys + value];
            copy_async_wait<0>();
            __syncwarp();
            load_row(r + 2, g.last);
            change = __fmul_rn(__fsub_rn(v, sum), change);
            sum = update_column(state, remains, change, k, is_next ? next_remains : 1.0f, with, key_dim);
            if (!is_next) mix[(size_t)r * heads * value_dim + value] = sum;
            sum = __shfl_sync(FULL_WARP, sum, STATE_COLUMNS + lane_column);
            remains = next_remains, change = next_beta, v = next_v;
        }
        for (int i = is_next; i < key_dim; i += 2) to[(size_t)i * stride] = state[i * WARP_LANES];
        __syncwarp();   // the next segment may continue from this state
    }
}

// Decays and steps of n = rows * heads heads, from the products in `decay`: as ssm_gates (kernels.h). rates, dt_bias:
// (heads); most: 0 without a limit. Grid (n / 64, rounded up); block 64.
extern "C" __global__ void __launch_bounds__(64)
scan_gates(float *decay, float *step, int n, int heads, const float *rates, const float *dt_bias, float least,
           float most) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double t = softplus((double)__fadd_rn(decay[i], dt_bias[i % heads]));
    if (t < (double)least) t = (double)least;   // a NaN stays a NaN
    if (most > 0 && t > (double)most) t = (double)most;
    decay[i] = decay_of(rates[i % heads], t);
    step[i] = (float)t;
}

// What all threads of ssm_scan share.
struct Scan {
    const float *xbc;                       // (rows, channels): x of the heads, then B and C of the key heads
    int key_heads, heads, key_dim, value_dim;
    const float *decay, *step, *skip;       // (rows, heads), (rows, heads), (heads)
    float *mix;                             // (rows, heads, value_dim)
};

// R rows of a column of a head's state, which is in shared memory, 32 apart. bc: shared memory for B and C of the rows,
// (2, key_dim, R).
template <int R>
static __device__ __forceinline__ void scan_rows(const Scan &a, float *state, float *bc, int row, int column) {
    const int lane = threadIdx.x, head = blockIdx.y, keys = a.key_heads * a.key_dim, values = a.heads * a.value_dim,
              channels = values + 2 * keys, key = values + head / (a.heads / a.key_heads) * a.key_dim;
    const float *const rows = a.xbc + (size_t)row * channels;
    float decay[R], x[R], input[R], sum[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        decay[r] = a.decay[(size_t)(row + r) * a.heads + head];
        x[r] = rows[(size_t)r * channels + head * a.value_dim + column];
        input[r] = __fmul_rn(x[r], a.step[(size_t)(row + r) * a.heads + head]);
        sum[r] = 0;
        for (int d = lane; d < a.key_dim; d += WARP_LANES) {
            bc[d * R + r] = rows[(size_t)r * channels + key + d];
            bc[(a.key_dim + d) * R + r] = rows[(size_t)r * channels + key + keys + d];
        }
    }
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < a.key_dim; i++) {
        const float *const b = bc + i * R, *const c = b + a.key_dim * R;
        float part = state[i * WARP_LANES];
#pragma unroll
        for (int r = 0; r < R; r++) {
            part = __fmaf_rn(input[r], b[r], __fmul_rn(part, decay[r]));
            sum[r] = __fmaf_rn(part, c[r], sum[r]);
        }
        state[i * WARP_LANES] = part;
    }
    if ((int)(blockIdx.x * WARP_LANES) + lane < a.value_dim)
#pragma unroll
        for (int r = 0; r < R; r++)
            a.mix[(size_t)(row + r) * values + head * a.value_dim + column] =
                __fmaf_rn(x[r], a.skip[head], sum[r]);
    __syncwarp();
}

// Mamba 2's recurrence for 32 columns of a head's state and the rows of a chain, as ssm_scan of kernels_delta.h.
// offset: bytes in a state before the heads. Grid (value_dim / 32, rounded up; heads; chains); block 32; dynamic shared
// memory: 48 key_dim floats.
//
// A number of the state is read and written once for 8 rows. What a row adds to it, and what it adds to a row, are
// chains over rows and over the state's dimensions, of which 8 of each run at a time.
//
// Budget of a row with key_dim 128: 400 operations, 0.25 us; with one row, the chain of 128 fused multiply-adds,
// 0.3 us, and a state that is read and written: bound by memory in decoding with many sequences.
extern "C" __global__ void __launch_bounds__(32)
ssm_scan(const float *xbc, int key_heads, int heads, int key_dim, int value_dim, const float *decay, const float *step,
         const float *skip, const segment *segments, const int *starts, int offset, float *mix) {
    DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x, own = blockIdx.x * WARP_LANES + lane, is_inside = own < value_dim,
              column = min(own, value_dim - 1);   // lanes after the last column compute it again, and store nothing
    const Scan a = { xbc, key_heads, heads, key_dim, value_dim, decay, step, skip, mix };
    float *const state = (float *)memory + lane, *const bc = (float *)memory + WARP_LANES * key_dim;
    const size_t first = (size_t)blockIdx.y * key_dim * value_dim + column / STATE_COLUMNS * STATE_COLUMNS * key_dim +
                         column % STATE_COLUMNS;
    for (int s = starts[blockIdx.z]; s < starts[blockIdx.z + 1]; s++) {
        const segment g = segments[s];
        const float *const from = (const float *)(g.from + offset) + first;
        float *const to = (float *)(g.to + offset) + first;
#pragma unroll 8
        for (int i = 0; i < key_dim; i++) state[i * WARP_LANES] = g.from ? from[(size_t)i * STATE_COLUMNS] : 0.0f;
        int r = g.first;
        for (; r + SCAN_ROWS <= g.last; r += SCAN_ROWS) scan_rows<SCAN_ROWS>(a, state, bc, r, column);
        for (; r < g.last; r++) scan_rows<1>(a, state, bc, r, column);
        for (int i = 0; i < key_dim && is_inside; i++) to[(size_t)i * STATE_COLUMNS] = state[i * WARP_LANES];
        __syncwarp();   // the next segment may continue from this state
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
