// SPDX-License-Identifier: MIT
// heads.cu - norms and RoPE of single heads of q and k, stores of keys and values in the cache, and the same read back
// for observers.
#include "kv_cache.cuh"
#include "norms.cuh"

enum { HEADS_PER_BLOCK = 4 };   // a warp each

enum head_norm { HEAD_NORM_NONE, HEAD_NORM_RMS, HEAD_NORM_LAYER };

// A warp norms a head in shared memory.
static __device__ void norm_head(float *x, int dim, const float *weight, float eps, int norm) {
    if (norm == HEAD_NORM_NONE) return;
    const int is_rms = norm == HEAD_NORM_RMS;
    const Moments m = moments(x, dim, eps, is_rms);
    __syncwarp();
    for (int i = threadIdx.x % WARP_LANES; i < dim; i += WARP_LANES)
        x[i] = normed(x[i], m, is_rms, weight[i], 0);
    __syncwarp();
}

// A warp rotates a head in shared memory, as rotate. angles: half cosines, half sines, in shared memory.
static __device__ void rotate_head(float *x, const float *angles, int half) {
    for (int j = threadIdx.x % WARP_LANES; j < half; j += WARP_LANES) {
        const float a = x[j], b = x[half + j], c = angles[j], s = angles[half + j];
        x[j] = v16_fnma(b, s, __fmul_rn(a, c));
        x[half + j] = v16_fma(a, s, __fmul_rn(b, c));
    }
    __syncwarp();
}

// A warp norms the value of a head in shared memory as unit_norm, unless `factor` is 0, and writes it to v.
static __device__ void make_value(float *x, float *v, float eps, float factor, int dim) {
    const float scale = factor != 0 ? unit_scale(x, dim, eps, factor) : 1.0f;
    __syncwarp();
    for (int d = threadIdx.x % WARP_LANES; d < dim; d += WARP_LANES)
        v[d] = x[d] = factor != 0 ? __fmul_rn(x[d], scale) : x[d];
    __syncwarp();
}

// A row's heads: first n_heads of q; then, unless n_kv_heads is 0, those of k, whose warps also store the head of v.
// Norms (before RoPE, or after it) and rotates q and k in place. Stores k and v at the row's position in the pages of
// tables table_of[r] to last_table_of[r]: those of a draft in all of its branches. As rotate_and_store of attention.c.
// Before that, makes v as make_value of attention.c: with v_is_k the key before its norm and RoPE; unless v_factor is
// 0, it is then normed.
// In latent attention, q and k are assembled first: the first head_dim - value_dim numbers of a head of q are those
// of q_start (rows, heads, q_stride), the others are q_end (rows, heads, value_dim); those of k are v. Otherwise q_end
// is NULL.
// q, k: (rows, heads, head_dim). v: (rows, heads, value_dim). q_weight, k_weight: (head_dim), or with per_head (heads,
// head_dim). angles: (rows, 2 half), or NULL: no RoPE. Grid (heads of q and k / 4, rounded up; rows); block 128;
// dynamic shared memory: 12 heads.
//
// Budget of a warp with 128 dimensions: a chain of 8 fused multiply-adds, a few barriers of the warp, 2 dependent
// loads (the head with all that belongs to it, and the page's address). 2.4 us on an H200, for up to some hundreds of
// blocks. Stores of keys are 2 bytes each.
template <int dtype>
static __device__ void heads(float *q, const float *q_start, int q_stride, const float *q_end, float *k, float *v,
                             const float *angles, int half, const float *q_weight, const float *k_weight, int norm,
                             int per_head, int norm_after_rope, float eps, int v_is_k, float v_eps, float v_factor,
                             int n_heads, int n_kv_heads, int head_dim, int value_dim, const int *positions,
                             const int *table_of, const int *last_table_of, Cache cache) {
    DYNAMIC_SHARED(memory);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int head = blockIdx.x * HEADS_PER_BLOCK + warp, row = blockIdx.y, is_key = head >= n_heads;
    if (head >= n_heads + n_kv_heads) return;
    float *const x = (float *)memory + warp * 3 * head_dim;
    float *const value = x + head_dim, *const turns = value + head_dim;
    const int kv_head = head - n_heads, start_dim = q_end ? head_dim - value_dim : head_dim;
    const size_t at = is_key ? (size_t)row * n_kv_heads + kv_head : (size_t)row * n_heads + head;
    float *const numbers = (is_key ? k : q) + at * head_dim, *const own_v = is_key ? v + at * value_dim : nullptr;
    const float *const start = q_end && !is_key ? q_start + at * q_stride : numbers,
                *const end = !q_end ? nullptr : is_key ? own_v : q_end + at * value_dim;
    const float *weight = is_key ? k_weight : q_weight;
    if (per_head) weight += (size_t)(is_key ? kv_head : head) * head_dim;

    const int position = positions[row], slot = position % KV_PAGE;
    const int first_table = table_of[row], last_table = last_table_of[row];
    if (angles) angles += (size_t)row * 2 * half;
    for (int d = lane; d < head_dim; d += WARP_LANES) {   // issues all loads first, so that their latencies overlap
        x[d] = d < start_dim ? start[d] : end[d - start_dim];
        if (is_key && d < value_dim) value[d] = v_is_k ? numbers[d] : own_v[d];
        if (angles && d < 2 * half) turns[d] = angles[d];
    }
    __syncwarp();
    if (is_key && (v_is_k || v_factor != 0)) make_value(value, own_v, v_eps, v_factor, value_dim);
    if (!norm_after_rope) norm_head(x, head_dim, weight, eps, norm);
    if (angles) rotate_head(x, turns, half);
    if (norm_after_rope) norm_head(x, head_dim, weight, eps, norm);
    for (int d = lane; d < head_dim; d += WARP_LANES) numbers[d] = x[d];
    if (!is_key) return;
    for (int table = first_table; table <= last_table; table++) {
        store_key<dtype>(cache.keys(table, position, kv_head), slot, head_dim, x);
        store_value<dtype>(cache.values(table, position, kv_head), slot, value_dim, value);
    }
}

// The numbers of a row's keys and values in the cache, for observers, as observe_cache of attention.c. keys, values:
// (rows, width), zeros after the heads' numbers. Grid (width / 128, rounded up; rows); block 128.
template <int dtype>
static __device__ void read_cache(float *keys, float *values, int width, int n_kv_heads, int head_dim, int value_dim,
                                  const int *positions, const int *table_of, Cache cache) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, key_head = i / head_dim,
              value_head = i / value_dim;
    if (i >= width) return;
    const size_t at = (size_t)row * width + i;
    const int table = table_of[row], position = positions[row], slot = position % KV_PAGE;
    keys[at] = key_head >= n_kv_heads ? 0.0f
                                      : load_key<dtype>(cache.keys(table, position, key_head), slot, head_dim,
                                                        i % head_dim);
    values[at] = value_head >= n_kv_heads ? 0.0f
                                          : load_value<dtype>(cache.values(table, position, value_head), slot,
                                                              i % value_dim);
}

#define CACHE_KERNELS(name, dtype) \
    extern "C" __global__ void __launch_bounds__(128) \
    heads_##name(float *q, const float *q_start, int q_stride, const float *q_end, float *k, float *v, \
                 const float *angles, int half, const float *q_weight, const float *k_weight, int norm, int per_head, \
                 int norm_after_rope, float eps, int v_is_k, float v_eps, float v_factor, int n_heads, \
                 int n_kv_heads, int head_dim, int value_dim, const int *positions, const int *table_of, \
                 const int *last_table_of, const uint64_t *tables, int max_pages, int offset, int head_bytes, \
                 int value_offset) { \
        wait_for_earlier(); \
        let_next_start(); \
        heads<dtype>(q, q_start, q_stride, q_end, k, v, angles, half, q_weight, k_weight, norm, per_head, \
                     norm_after_rope, eps, v_is_k, v_eps, v_factor, n_heads, n_kv_heads, head_dim, value_dim, \
                     positions, table_of, last_table_of, \
                     Cache { tables, max_pages, offset, head_bytes, value_offset }); \
    } \
    extern "C" __global__ void __launch_bounds__(128) \
    read_cache_##name(float *keys, float *values, int width, int n_kv_heads, int head_dim, int value_dim, \
                      const int *positions, const int *table_of, const uint64_t *tables, int max_pages, int offset, \
                      int head_bytes, int value_offset) { \
        read_cache<dtype>(keys, values, width, n_kv_heads, head_dim, value_dim, positions, table_of, \
                          Cache { tables, max_pages, offset, head_bytes, value_offset }); \
    }
CACHE_KERNELS(f32, LLAMAC_F32)
CACHE_KERNELS(f16, LLAMAC_F16)
CACHE_KERNELS(q8, LLAMAC_Q8)
