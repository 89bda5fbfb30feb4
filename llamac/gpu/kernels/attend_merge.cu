// SPDX-License-Identifier: MIT
// attend_merge.cu - merges the blocks of positions that attend kernels have computed one by one.
#include "attention.cuh"
#include "merge.cuh"
#include "packing.cuh"

// Up to 128 blocks of positions of a query, in shared memory: their m and l, and the scales with which each is merged
// into those before it (struct Merge).
struct BlockChunk { float m[ATTEND_THREADS], l[ATTEND_THREADS], run_scale[ATTEND_THREADS], scale[ATTEND_THREADS]; };

// Loads n blocks and computes their scales: each thread those of one block. from: the first block's partial results,
// those of the next `step` further on. run_m: the maximum of the chunks before, if there are any. Returns the maximum
// up to the end of this one.
static __device__ __forceinline__ float load_chunk(BlockChunk &chunk, const float *from, size_t step, int n,
                                                   int has_before, float run_m) {
    const int i = threadIdx.x;
    __syncthreads();   // the chunk before has been read
    if (i < n) chunk.m[i] = from[i * step + PARTIAL_M], chunk.l[i] = from[i * step + PARTIAL_L];
    __syncthreads();
    float all = has_before ? run_m : chunk.m[0], before = all;   // maxima: of all blocks, and of those before block i
    for (int j = !has_before; j < n; j++) {
        if (j < i) before = before > chunk.m[j] ? before : chunk.m[j];
        all = all > chunk.m[j] ? all : chunk.m[j];
    }
    if (i < n) {   // unused for the first block, which is copied
        const Merge merge = merge_of(before, chunk.m[i]);
        chunk.run_scale[i] = merge.run_scale, chunk.scale[i] = merge.scale;
    }
    __syncthreads();
    return all;
}

// Merges a chunk's blocks into run_l and into o of the thread's dimension, whose partial results begin at `from`.
static __device__ __forceinline__ void merge_chunk(const BlockChunk &chunk, const float *from, size_t step, int n,
                                                   int has_before, float &run_l, float &o) {
#pragma unroll 16
    for (int j = 0; j < n; j++) {
        const float x = from[j * step];
        if (!has_before && j == 0) {
            o = x, run_l = chunk.l[0];
            continue;
        }
        const Merge merge = { 0, chunk.run_scale[j], chunk.scale[j] };
        o = merged(o, x, merge), run_l = merged(run_l, chunk.l[j], merge);
    }
}

// Merges the partial results of a query's blocks in ascending order, then its sink. n_blocks: the blocks per tile in
// `partials`, Q queries each; those that the tile does not reach are not read. Packs as attend does. Grid
// (tiles, KV heads, Q); block 128.
//
// The scales of a block depend on the maximum of the blocks before it alone: 128 threads compute those of as many
// blocks. What remains in order is a multiplication and a fused multiply-add per block.
//
// Budget: a query's partials, 4 (16 + value_dim) bytes per block of positions, are read once: 2% of the KV cache in f16
// with 4 queries per KV head. 128 blocks (32,768 positions): 3 us.
extern "C" __global__ void __launch_bounds__(128)
attend_merge(const float *partials, int n_blocks, int tile_queries, const int *tiles, const int *positions,
             const int *ends, int window, const float *sinks, int n_heads, int n_kv_heads, int value_dim, float *mix,
             int form, unsigned char *inputs) {
    let_next_start();
    __shared__ BlockChunk chunk;
    const int *const entry = tiles + 4 * blockIdx.x;
    const Tile tile = { entry[0], entry[1], entry[2], (int)blockIdx.y };
    const int t = blockIdx.z, group = n_heads / n_kv_heads, width = padded_head_dim(value_dim), i = threadIdx.x;
    if (t >= tile.n) return;
    const int first_row = tile.first_row + tile.first_query / group,
              row = tile.first_row + (tile.first_query + t) / group,
              head = tile.kv_head * group + (tile.first_query + t) % group;
    const int tile_first = first_visible(positions[first_row], window) / ATTENTION_BLOCK,
              first = first_visible(positions[row], window) / ATTENTION_BLOCK - tile_first,
              end = visible_end<true>(positions[row], window, ends[row]),
              last = (end - 1) / ATTENTION_BLOCK + 1 - tile_first;   // [first, last): the blocks that the query sees
    const size_t floats = partial_floats(value_dim);
    partials += (((size_t)blockIdx.x * gridDim.y + blockIdx.y) * n_blocks * tile_queries + t) * floats;
    const size_t step = tile_queries * floats;   // from a block to the next
    for (int base = 0; base < width; base += ATTEND_THREADS) {
        const int d = min(base + i, width - 1);
        float run_m = 0, run_l = 0, o = 0;
        for (int block = first; block < last; block += ATTEND_THREADS) {
            const int n = min(last - block, (int)ATTEND_THREADS), has_before = block > first;
            const float *const from = partials + block * step;
            run_m = load_chunk(chunk, from, step, n, has_before, run_m);
            merge_chunk(chunk, from + PARTIAL_O + d, step, n, has_before, run_l, o);
        }
        if (sinks) merge_sink(sinks[head], run_m, run_l, o);
        const float x = __fdiv_rn(o, run_l);
        if (base + i < value_dim) mix[((size_t)row * n_heads + head) * value_dim + base + i] = x;
        if (form == INPUTS_F32) continue;
        chunk.m[i] = x;
        __syncthreads();
        if (i >= WARP_LANES) continue;
        const float numbers[4] = { chunk.m[4 * i], chunk.m[4 * i + 1], chunk.m[4 * i + 2], chunk.m[4 * i + 3] };
        pack_block_of(form, numbers, (head * value_dim + base) / BLOCK_COLUMNS, n_heads * value_dim, inputs, row);
    }
}
