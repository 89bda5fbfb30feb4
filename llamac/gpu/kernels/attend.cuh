// SPDX-License-Identifier: MIT
// attend.cuh - the kernels of attention, softmax(q K) V over the paged KV cache. There is a file for each dtype of the
// cache, because they take long to compile. attention.cuh has their parts, attend_merge.cu what follows them.
#ifndef LLAMAC_ATTEND_CUH
#define LLAMAC_ATTEND_CUH
#include "attention.cuh"
#include "merge.cuh"
#include "packing.cuh"

// Calls use(query, d, o) for each number of o of the block: each thread for its dimensions and queries.
template <int dtype, int Q, class Use>
static __device__ __forceinline__ void block_values(const Attention &a, const Tile &tile, int table, int start,
                                                    int first, int last, const Memory<dtype, Q> &s, Use use) {
    const int n = Shares<dtype, Q>::width, R = Shares<dtype, Q>::value_queries;
    const int units = padded_head_dim(a.value_dim) / n;   // neighbors in a strip are neighbors in a warp
    for (int i = threadIdx.x; i < units * (Q / R); i += ATTEND_THREADS) {
        const int query = i / units * R, d = i % units * n;
        if (query >= tile.n) continue;
        float o[n][R];
        if constexpr (dtype == LLAMAC_Q8) add_value_codes<Q>(a, tile, table, start, first, last, s, query, d, o[0]);
        else add_values<dtype, Q>(a, tile, table, start, first, last, s, query, d, o);
#pragma unroll
        for (int t = 0; t < R; t++) {
            if (query + t >= tile.n) break;
#pragma unroll
            for (int j = 0; j < n; j++) use(query + t, d + j, o[j][t]);
        }
    }
}

// What a query does with a block of positions: none is visible; they are its first visible ones; others precede them.
enum { SKIP, COPY, MERGE };

// A tile's results in shared memory: those of the blocks of positions so far, merged.
template <int Q> struct TileResults {
    float *m, *l;                 // (Q)
    float *run_scale, *scale;     // (Q): for queries that merge the current block (struct Merge)
    int *action;                  // (Q): what each query does with the current block
    float *o;                     // (Q, width)
    int width;

    __device__ __forceinline__ TileResults(float *memory, int width)
        : m(memory), l(m + Q), run_scale(l + Q), scale(run_scale + Q), action((int *)(scale + Q)),
          o((float *)(action + Q)), width(width) {}
    // Adds the current block's m and l to those of query t, and decides what `add_output` does.
    __device__ __forceinline__ void add_block(int t, float block_m, float block_l, int is_visible, int is_first) const {
        if (!is_visible) {
            action[t] = SKIP;
        } else if (is_first) {
            action[t] = COPY, m[t] = block_m, l[t] = block_l;
        } else {
            const Merge merge = merge_of(m[t], block_m);
            m[t] = merge.max, l[t] = merged(l[t], block_l, merge);
            action[t] = MERGE, run_scale[t] = merge.run_scale, scale[t] = merge.scale;
        }
    }
    // Adds the current block's o of dimension d to that of query t.
    __device__ __forceinline__ void add_output(int t, int d, float block_o) const {
        float *const sum = &o[t * width + d];
        if (action[t] == COPY) *sum = block_o;
        else if (action[t] == MERGE) *sum = merged(*sum, block_o, { 0, run_scale[t], scale[t] });
    }
};

// mix = o / l of a tile's queries, after their sinks. Leaves the results in `o`, too.
template <int Q>
static __device__ __forceinline__ void store_mix(const Attention &a, const Tile &tile, const TileResults<Q> &results,
                                                 const float *sinks, float *mix) {
    for (int i = threadIdx.x; i < tile.n * results.width; i += ATTEND_THREADS) {
        const int t = i / results.width, d = i % results.width, head = head_of(a, tile, t);
        if (d >= a.value_dim) continue;
        float o = results.o[i], l = results.l[t];
        if (sinks) merge_sink(sinks[head], results.m[t], l, o);
        mix[((size_t)row_of(a, tile, t) * a.n_heads + head) * a.value_dim + d] = results.o[i] = __fdiv_rn(o, l);
    }
}

// Packs a tile's mix, (n, value_dim) in shared memory, as inputs of products. A warp packs a block of 128 dimensions.
static __device__ __forceinline__ void pack_mix(const Attention &a, const Tile &tile, const float *mix, int form,
                                                unsigned char *inputs) {
    const int head_blocks = a.value_dim / BLOCK_COLUMNS, lane = threadIdx.x % WARP_LANES;
    for (int i = threadIdx.x / WARP_LANES; i < tile.n * head_blocks; i += ATTEND_THREADS / WARP_LANES) {
        const int t = i / head_blocks, block = head_of(a, tile, t) * head_blocks + i % head_blocks;
        float numbers[4];
        for (int j = 0; j < 4; j++) numbers[j] = mix[i * BLOCK_COLUMNS + 4 * lane + j];
        pack_block_of(form, numbers, block, a.n_heads * a.value_dim, inputs, row_of(a, tile, t));
    }
}

// A tile of queries. Without partials, one block of threads computes all blocks of positions, ascending, and `mix`.
// Otherwise each computes one block of positions, the blockIdx.x-th from the first that the tile sees, and stores m, l
// and o of each query (partial_floats); attend_merge follows.
// tiles: (tiles, 4): first row, first query, queries. Grid (blocks of positions, or 1; KV heads; tiles); block 128.
// sinks: (n_heads) or NULL. mix: (rows, n_heads, value_dim). Unless form is INPUTS_F32, and with values of whole blocks
// of 128 dimensions, mix is then packed as inputs of products. partials: (tiles, KV heads, gridDim.x, Q,
// partial_floats).
//
// Budget of a block of positions in f16, 128 dimensions, on an H100: 128 KB, 9,100 cycles of a multiprocessor's share
// of bandwidth. With 4 queries: 1,800 cycles for scores (225 instructions per 128 multiply-adds), 700 for exponentials,
// 2,000 for values; so decoding is bound by memory, at 70% of it with one block of threads per multiprocessor and at
// 85% with more. With 32 queries: 84% of all instructions are multiply-adds, 24,000 cycles: prompts are bound by them.
// Latent attention of DeepSeek (keys of 576 numbers, values of 512), 32 queries: 557 KB, which other tiles of the row
// read from the L2 cache, and 8.9 million multiply-adds, 70,000 cycles: decoding is bound by them, too.
template <int dtype, int Q, bool two_sided>
static __device__ void attend(const Attention &a, const int *tiles, const float *sinks, float *mix, float *partials,
                              int form, unsigned char *inputs) {
    DYNAMIC_SHARED(memory);
    const int *const entry = tiles + 4 * blockIdx.z;
    const Tile tile = { entry[0], entry[1], entry[2], (int)blockIdx.y };
    const int first_row = row_of(a, tile, 0), last_row = row_of(a, tile, tile.n - 1), table = a.table_of[first_row];
    const int begin = first_visible(a.positions[first_row], a.window),
              end = visible_end<two_sided>(a.positions[last_row], a.window, two_sided ? a.ends[last_row] : 0);
    int start = begin / ATTENTION_BLOCK * ATTENTION_BLOCK;
    if (partials) start += blockIdx.x * ATTENTION_BLOCK;
    if (start >= end) return;

    const Memory<dtype, Q> s(memory, a.head_dim);
    const TileResults<Q> results(s.rest, padded_head_dim(a.value_dim));
    const size_t floats = partial_floats(a.value_dim),
                 block = ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    float *const to = partials + block * Q * floats;
    prefetch_block(a, tile, table, start, max(begin - start, 0), min(end - start, (int)ATTENTION_BLOCK));
    load_tile<two_sided>(a, tile, s);
    for (; start < end; start += ATTENTION_BLOCK) {
        const int first = max(begin - start, 0), last = min(end - start, (int)ATTENTION_BLOCK);
        const int next = start + ATTENTION_BLOCK;
        if (!partials) prefetch_block(a, tile, table, next, 0, min(end - next, (int)ATTENTION_BLOCK));
        block_scores<dtype, Q>(a, tile, table, start, first, last, s);
        __syncthreads();
        block_numerators<two_sided>(a, tile, start, s);
        __syncthreads();
        if constexpr (dtype == LLAMAC_Q8) pack_numerators<Q>(a, tile, table, start, first, last, s);
        if (threadIdx.x < (unsigned)tile.n) {
            const int t = threadIdx.x, is_visible = max(s.begin[t], start) < min(s.end[t], start + ATTENTION_BLOCK);
            if (partials) {
                to[t * floats + PARTIAL_M] = s.m[t], to[t * floats + PARTIAL_L] = s.l[t];
                to[t * floats + PARTIAL_VISIBLE] = is_visible;
            } else {
                results.add_block(t, s.m[t], s.l[t], is_visible, s.begin[t] >= start);
            }
        }
        __syncthreads();
        block_values<dtype, Q>(a, tile, table, start, first, last, s, [&](int t, int d, float o) {
            if (partials) to[t * floats + PARTIAL_O + d] = o;
            else results.add_output(t, d, o);
        });
        if (partials) return;
        __syncthreads();   // the next block overwrites scores
    }
    store_mix(a, tile, results, sinks, mix);
    if (form == INPUTS_F32) return;
    __syncthreads();
    pack_mix(a, tile, results.o, form, inputs);
}

// The scores of a row's query heads, for observers: (rows, observed_heads, context), -inf at positions that a query
// does not see, and for heads that the layer does not have. As observe_scores of attention.c. Grid (blocks of 256
// positions of the context, observed heads, rows); block 128.
template <int dtype>
static __device__ void observe_scores(const Attention &a, int observed_heads, int context, float *scores) {
    DYNAMIC_SHARED(memory);
    const int head = blockIdx.y, row = blockIdx.z, start = blockIdx.x * ATTENTION_BLOCK, group = group_of(a);
    const int position = a.positions[row], begin = first_visible(position, a.window),
              end = visible_end<true>(position, a.window, a.ends[row]);
    float *const to = scores + ((size_t)row * observed_heads + head) * context;
    const Memory<dtype, 1> s(memory, a.head_dim);
    if (head < a.n_heads) {   // the whole block of threads
        const Tile tile = { row, head % group, 1, head / group };
        load_tile<true>(a, tile, s);
        block_scores<dtype, 1>(a, tile, a.table_of[row], start, max(begin - start, 0),
                               min(end - start, (int)ATTENTION_BLOCK), s);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < ATTENTION_BLOCK && start + i < context; i += ATTEND_THREADS) {
        const int visible = head < a.n_heads && start + i >= begin && start + i < end;
        to[start + i] = visible ? adjusted<true>(a, s.p[i], head, start + i - position) : -infinity();
    }
}

#define ATTENTION_PARAMETERS \
    const float *q, float scale, const float *scales, const int *positions, const int *table_of, const int *ends, \
        const uint64_t *tables, int max_pages, int offset, int head_bytes, int value_offset, int n_heads, \
        int n_kv_heads, int head_dim, int value_dim, int window, float soft_cap, const float *biases, int bias_distance
#define ATTENTION \
    Attention { q, scale, scales, positions, table_of, ends, \
                Cache { tables, max_pages, offset, head_bytes, value_offset }, n_heads, n_kv_heads, head_dim, \
                value_dim, window, soft_cap, biases, bias_distance }

#define ATTEND(name, dtype, Q, two_sided) \
    extern "C" __global__ void __launch_bounds__(128) \
    attend_##name##_x##Q(ATTENTION_PARAMETERS, const int *tiles, const float *sinks, float *mix, float *partials, \
                         int form, unsigned char *inputs) { \
        let_next_start(); \
        attend<dtype, Q, two_sided>(ATTENTION, tiles, sinks, mix, partials, form, inputs); \
    }
// As TILE_QUERIES and TWO_SIDED_TILE_QUERIES of layer_launches.py.
#define ATTENTION_KERNELS(name, dtype) \
    ATTEND(name, dtype, 1, false) \
    ATTEND(name, dtype, 4, false) \
    ATTEND(name, dtype, 8, false) \
    ATTEND(name, dtype, 16, false) \
    ATTEND(name, dtype, 32, false) \
    ATTEND(two_sided_##name, dtype, 4, true) \
    ATTEND(two_sided_##name, dtype, 32, true) \
    extern "C" __global__ void __launch_bounds__(128) \
    observe_scores_##name(ATTENTION_PARAMETERS, int observed_heads, int context, float *scores) { \
        observe_scores<dtype>(ATTENTION, observed_heads, context, scores); \
    }
#endif
