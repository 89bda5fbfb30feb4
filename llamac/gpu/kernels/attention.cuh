// SPDX-License-Identifier: MIT
// attention.cuh - the parts of attention for one block of threads: a tile of up to Q queries of a KV head, and a block
// of 256 positions at a time. The order of operations is that of struct attend (csrc/kernels.h).
//
// Keys and values are read from global memory straight into registers, 128 bytes per load of a warp: strips hold 16
// positions, or 16 dimensions, side by side, so a thread takes two of them, for all or half of the queries. Queries and
// the numerators of the softmax are in shared memory, those of one dimension or position side by side: a thread reads
// them for 4 queries at once.
#ifndef LLAMAC_ATTENTION_CUH
#define LLAMAC_ATTENTION_CUH
#include "kv_cache.cuh"

enum {
    ATTEND_THREADS = 128,
    HALF_WARPS = ATTEND_THREADS / LANES,
    BATCH = 16,                                  // loads in flight per thread
    PREFETCH_BYTES = 128,                        // a line of the L2 cache
    BLOCK_PAGES = ATTENTION_BLOCK / KV_PAGE,
    PAGE_WORDS = KV_PAGE / 4,                    // words of 4 codes
};

// What all blocks of threads of a launch have in common.
struct Attention {
    const float *q;                              // (rows, n_heads, head_dim)
    float scale;                                 // multiplies q, unless there are
    const float *scales;                         // (rows), or NULL
    const int *positions, *runs;                 // (rows)
    Cache cache;
    int n_heads, n_kv_heads, head_dim, window;
    float soft_cap;
};

// Up to Q queries of one KV head: rows of a run, counted by row, then by head of the group.
struct Tile { int first_row, first_query, n, kv_head; };

INLINE int group_of(const Attention &a) { return a.n_heads / a.n_kv_heads; }
INLINE int row_of(const Attention &a, const Tile &tile, int query) {
    return tile.first_row + (tile.first_query + query) / group_of(a);
}
INLINE int head_of(const Attention &a, const Tile &tile, int query) {
    return tile.kv_head * group_of(a) + (tile.first_query + query) % group_of(a);
}
INLINE int first_visible(int position, int window) { return window ? max(0, position + 1 - window) : 0; }

// Shared memory of a block of threads.
template <int Q> struct Numerators {
    // Words from one position to the next: 16 lanes that read one query of as many positions hit different banks.
    static const int stride = Q < 8 ? Q : Q + 4;
};
template <int dtype, int Q> struct Memory {
    float *p;                 // (256, stride): scores, then numerators
    float *q;                 // f32, f16: (head_dim, Q)
    int *high, *low;          // q8: (head_dim / 4, Q) words of the halves of the queries' codes
    float *d;                 // q8: (head_dim / 128, Q): the queries' scales
    int *page_high, *page_low;   // q8: (64, Q) words: the numerators' codes
    float *page_d;            // q8: (4, Q): their scales
    float *m, *l;             // (Q): of the current block
    int *begin, *end;         // (Q): what each query sees
    float *rest;              // what follows

    __device__ __forceinline__ Memory(unsigned char *memory, int head_dim) {
        float *at = (float *)memory;
        p = take(at, ATTENTION_BLOCK * Numerators<Q>::stride);
        if (dtype == LLAMAC_Q8) {
            const int words = groups(head_dim) * (GROUP_COLUMNS / 4);
            high = (int *)take(at, words * Q);
            low = (int *)take(at, words * Q);
            d = take(at, (groups(head_dim) + BLOCK_GROUPS - 1) / BLOCK_GROUPS * Q);
            page_high = (int *)take(at, BLOCK_PAGES * PAGE_WORDS * Q);
            page_low = (int *)take(at, BLOCK_PAGES * PAGE_WORDS * Q);
            page_d = take(at, BLOCK_PAGES * Q);
        } else {
            q = take(at, head_dim * Q);
        }
        m = take(at, Q), l = take(at, Q);
        begin = (int *)take(at, Q), end = (int *)take(at, Q);
        rest = at;
    }
    static __device__ __forceinline__ int groups(int head_dim) {
        return (head_dim + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
    }
    static __device__ __forceinline__ float *take(float *&at, int n) {   // keeps parts aligned to 16 bytes
        float *const part = at;
        at += (n + 3) / 4 * 4;
        return part;
    }
};

// R queries' numbers, side by side in shared memory.
template <int R, class T> static __device__ __forceinline__ void load_queries(const T *from, T (&x)[R]) {
    if (R % 4 == 0) {
#pragma unroll
        for (int i = 0; i < R; i += 4) {
            const uint4 four = *(const uint4 *)(const void *)(from + i);
            const uint32_t bits[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
            for (int j = 0; j < 4; j++) memcpy(&x[i + j], &bits[j], 4);
        }
    } else if (R == 2) {
        const uint2 two = *(const uint2 *)(const void *)from;
        memcpy(&x[0], &two.x, 4), memcpy(&x[R - 1], &two.y, 4);
    } else {
#pragma unroll
        for (int i = 0; i < R; i++) x[i] = from[i];
    }
}

// Two neighbors of a strip of floats: 2 positions of a key's dimension, or 2 dimensions of a value.
template <int dtype> struct Pair;
template <> struct Pair<LLAMAC_F32> {
    float2 x;
    __device__ __forceinline__ void load(const uint8_t *p) { x = __ldg((const float2 *)p); }
    __device__ __forceinline__ float first() const { return x.x; }
    __device__ __forceinline__ float second() const { return x.y; }
};
template <> struct Pair<LLAMAC_F16> {
    uint32_t x;
    __device__ __forceinline__ void load(const uint8_t *p) { x = __ldg((const uint32_t *)p); }
    __device__ __forceinline__ float first() const { return f16_to_f32((uint16_t)x); }
    __device__ __forceinline__ float second() const { return f16_to_f32((uint16_t)(x >> 16)); }
};

// BATCH pairs, `step` bytes apart. They are loaded while those before them are multiplied.
template <int dtype> struct Batch {
    Pair<dtype> pairs[BATCH];
    __device__ __forceinline__ void load(const uint8_t *p) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) pairs[i].load(p + i * STRIP_ROWS * float_bytes(dtype));
    }
};

// A word of stored codes, which are offset by 128, as int8.
INLINE int stored_codes(const uint8_t *p) { return (int)(__ldg((const uint32_t *)p) ^ 0x80808080u); }

// ---- queries

// A warp quantizes query t, of q times its scale, or zeros if q is NULL, like inputs of products: a lane takes 4
// dimensions of a block. As pack_int16.
template <int Q>
static __device__ void quantize_query(const float *q, float scale, int head_dim, const Memory<LLAMAC_Q8, Q> &s, int t) {
    const int lane = threadIdx.x % WARP_LANES, words = s.groups(head_dim) * (GROUP_COLUMNS / 4);
    for (int first = 0; first < head_dim; first += BLOCK_COLUMNS) {
        float x[4];
        for (int i = 0; i < 4; i++) {
            const int d = first + 4 * lane + i;
            x[i] = q && d < head_dim ? __fmul_rn(q[d], scale) : 0.0f;
        }
        const Codes codes = codes_of<WARP_LANES>(x);
        const int word = first / 4 + lane;
        if (word < words) s.high[word * Q + t] = codes.high, s.low[word * Q + t] = codes.low;
        if (lane == 0) s.d[first / BLOCK_COLUMNS * Q + t] = codes.scale;
    }
}

// Loads the tile's queries times their scales, and what they see. As load_queries of attention.c. Ends at a barrier.
template <int dtype, int Q>
static __device__ void load_tile(const Attention &a, const Tile &tile, const Memory<dtype, Q> &s) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    for (int t = threadIdx.x; t < Q; t += ATTEND_THREADS) {
        const int position = t < tile.n ? a.positions[row_of(a, tile, t)] : -1;
        s.begin[t] = t < tile.n ? first_visible(position, a.window) : 0;
        s.end[t] = position + 1;
    }
    for (int t = warp; t < Q; t += ATTEND_THREADS / WARP_LANES) {
        const int row = row_of(a, tile, t), is_query = t < tile.n;
        const float *const q = a.q + ((size_t)row * a.n_heads + head_of(a, tile, t)) * a.head_dim;
        const float scale = is_query && a.scales ? a.scales[row] : a.scale;
        if constexpr (dtype == LLAMAC_Q8) {
            quantize_query<Q>(is_query ? q : nullptr, scale, a.head_dim, s, t);
        } else {
            for (int d = lane; d < a.head_dim; d += WARP_LANES)
                s.q[d * Q + t] = is_query ? __fmul_rn(q[d], scale) : 0.0f;
        }
    }
    __syncthreads();
}

// Starts to load the keys and values of the block of positions at `start`, [first, last) of it, into the L2 cache: all
// at once, so that memory is busy also where few blocks of threads run.
static __device__ __forceinline__ void prefetch_block(const Attention &a, const Tile &tile, int run, int start,
                                                      int first, int last) {
    for (int i = first / KV_PAGE * KV_PAGE; i < last; i += KV_PAGE) {
        const uint8_t *const page = a.cache.keys(run, start + i, tile.kv_head);
        for (int at = threadIdx.x * PREFETCH_BYTES; at < a.cache.head_bytes; at += ATTEND_THREADS * PREFETCH_BYTES)
            prefetch_l2(page + at);
    }
}

// ---- scores

// Two positions' scores with Q queries: chains over ascending dimensions.
template <int dtype, int Q>
static __device__ __forceinline__ void score_floats(const Memory<dtype, Q> &s, const uint8_t *keys, int head_dim,
                                                    float (&first)[Q], float (&second)[Q]) {
    const int step = STRIP_ROWS * float_bytes(dtype);
#pragma unroll
    for (int t = 0; t < Q; t++) first[t] = second[t] = 0;
    const float *q = s.q, *const end = q + head_dim * Q;
    Batch<dtype> next;
    if (q + BATCH * Q <= end) next.load(keys);
    for (; q + BATCH * Q <= end; q += BATCH * Q) {
        const Batch<dtype> now = next;
        keys += BATCH * step;
        if (q + 2 * BATCH * Q <= end) next.load(keys);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float x[Q];
            load_queries(q + i * Q, x);
            const float a = now.pairs[i].first(), b = now.pairs[i].second();
#pragma unroll
            for (int t = 0; t < Q; t++) {
                first[t] = __fmaf_rn(a, x[t], first[t]);
                second[t] = __fmaf_rn(b, x[t], second[t]);
            }
        }
    }
#pragma unroll 1
    for (; q < end; q += Q, keys += step) {
        Pair<dtype> pair;
        float x[Q];
        pair.load(keys);
        load_queries(q, x);
#pragma unroll
        for (int t = 0; t < Q; t++) {
            first[t] = __fmaf_rn(pair.first(), x[t], first[t]);
            second[t] = __fmaf_rn(pair.second(), x[t], second[t]);
        }
    }
}

// One position's scores with Q queries: products with q8_0 (struct gemm). keys: of the position's strip.
template <int Q>
static __device__ __forceinline__ void score_codes(const Memory<LLAMAC_Q8, Q> &s, const uint8_t *keys, int slot,
                                                   int head_dim, float (&score)[Q]) {
    const int r = slot % STRIP_ROWS, groups = s.groups(head_dim);
    float p[Q];
#pragma unroll
    for (int t = 0; t < Q; t++) score[t] = p[t] = 0;
    for (int g = 0; g < groups; g++) {
        const int in_block = g % BLOCK_GROUPS, block_groups = min(groups - g + in_block, (int)BLOCK_GROUPS);
        const uint8_t *const codes = keys + block_scale_bytes(LLAMAC_Q8_0, block_groups) +
                                     (size_t)in_block * group_code_bytes(LLAMAC_Q8_0) + 4 * r;
        int words[GROUP_COLUMNS / 4], high[Q], low[Q];
#pragma unroll
        for (int j = 0; j < GROUP_COLUMNS / 4; j++) words[j] = stored_codes(codes + j * LINE_BYTES);
        const float scale = f16_to_f32(__ldg((const uint16_t *)keys + in_block * STRIP_ROWS + r));
#pragma unroll
        for (int t = 0; t < Q; t++) high[t] = low[t] = 0;
#pragma unroll
        for (int j = 0; j < GROUP_COLUMNS / 4; j++) {
            const int at = (g * (GROUP_COLUMNS / 4) + j) * Q;
            int x[Q];
            load_queries(s.high + at, x);
#pragma unroll
            for (int t = 0; t < Q; t++) high[t] = __dp4a(words[j], x[t], high[t]);
            load_queries(s.low + at, x);
#pragma unroll
            for (int t = 0; t < Q; t++) low[t] = __dp4a(words[j], x[t], low[t]);
        }
#pragma unroll
        for (int t = 0; t < Q; t++) p[t] = __fmaf_rn((float)(128 * high[t] + low[t]), scale, p[t]);
        if (in_block + 1 < block_groups) continue;
        const float *const d = s.d + g / BLOCK_GROUPS * Q;
#pragma unroll
        for (int t = 0; t < Q; t++) {
            score[t] = __fmaf_rn(p[t], d[t], score[t]);
            p[t] = 0;
        }
        keys += block_bytes(LLAMAC_Q8_0, BLOCK_GROUPS);
    }
}

template <int Q> static __device__ __forceinline__ void store_scores(float *to, const float (&score)[Q], float cap) {
#pragma unroll
    for (int t = 0; t < Q; t++) to[t] = cap > 0 ? v16_soft_cap(score[t], cap) : score[t];
}

// The scores of the block's positions [first, last), counted from its start at position `start`, with all queries, and
// maybe those of neighbors.
template <int dtype, int Q>
static __device__ void block_scores(const Attention &a, const Tile &tile, int run, int start, int first, int last,
                                    const Memory<dtype, Q> &s) {
    const int stride = Numerators<Q>::stride, step = dtype == LLAMAC_Q8 ? 1 : 2;
    for (int i = step * threadIdx.x; i < last; i += step * ATTEND_THREADS) {
        if (i + step <= first) continue;
        const int slot = i % KV_PAGE;
        const uint8_t *const strip = a.cache.keys(run, start + i, tile.kv_head) +
                                     (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(dtype, a.head_dim);
        float score[Q];
        if constexpr (dtype == LLAMAC_Q8) {
            score_codes<Q>(s, strip, slot, a.head_dim, score);
        } else {
            float second[Q];
            score_floats<dtype, Q>(s, strip + slot % STRIP_ROWS * float_bytes(dtype), a.head_dim, score, second);
            store_scores<Q>(s.p + (i + 1) * stride, second, a.soft_cap);
        }
        store_scores<Q>(s.p + i * stride, score, a.soft_cap);
    }
}

// ---- softmax

// Scores become numerators: m, l and exp(score - m) of each query's visible positions in the block. A half-warp takes a
// query. As softmax_numerators of kernels_attention.h: other positions are -inf and add 0 to the sums, unless the
// result is NaN in any case.
template <int dtype, int Q>
static __device__ void block_numerators(const Memory<dtype, Q> &s, int start) {
    const int lane = threadIdx.x % LANES, half_warp = threadIdx.x / LANES, stride = Numerators<Q>::stride;
    for (int base = 0; base < Q; base += HALF_WARPS) {
        const int t = base + half_warp, begin = t < Q ? s.begin[t] - start : 0, end = t < Q ? s.end[t] - start : 0;
        float x[ATTENTION_BLOCK / LANES], m = -infinity(), l = 0;
#pragma unroll
        for (int i = 0; i < ATTENTION_BLOCK / LANES; i++) {
            const int position = LANES * i + lane;
            x[i] = position >= begin && position < end ? s.p[position * stride + t] : -infinity();
            m = v16_max(m, x[i]);
        }
        m = lanes_max(m);
#pragma unroll
        for (int i = 0; i < ATTENTION_BLOCK / LANES; i++) {
            x[i] = v16_exp(__fsub_rn(x[i], m));
            l = __fadd_rn(l, x[i]);
            if (t < Q) s.p[(LANES * i + lane) * stride + t] = x[i];
        }
        l = lanes_add(l);
        if (t < Q && lane == 0) s.m[t] = m, s.l[t] = l;
    }
}

// In q8: the numerators of each page, times the values' scales, become codes with one scale per query. A half-warp
// takes a query and a page, a lane 4 positions. As pack_numerators.
template <int Q>
static __device__ void pack_numerators(const Attention &a, const Tile &tile, int run, int start, int first, int last,
                                       const Memory<LLAMAC_Q8, Q> &s) {
    const int lane = threadIdx.x % LANES, half_warp = threadIdx.x / LANES, stride = Numerators<Q>::stride;
    for (int base = 0; base < Q * BLOCK_PAGES; base += HALF_WARPS) {   // Q * BLOCK_PAGES may be less than HALF_WARPS
        const int page = (base + half_warp) / Q, t = (base + half_warp) % Q, i = page * KV_PAGE + 4 * lane;
        const int is_seen = page < BLOCK_PAGES && page * KV_PAGE < last && (page + 1) * KV_PAGE > first;
        const int begin = s.begin[t] - start, end = is_seen ? s.end[t] - start : 0;
        const uint16_t *const scales =
            is_seen ? (const uint16_t *)a.cache.values(run, start + page * KV_PAGE, tile.kv_head) : nullptr;
        float x[4];
        for (int j = 0; j < 4; j++) {
            const int visible = i + j >= begin && i + j < end;
            x[j] = visible ? __fmul_rn(s.p[(i + j) * stride + t], f16_to_f32(__ldg(scales + 4 * lane + j))) : 0.0f;
        }
        const Codes codes = codes_of<LANES>(x);
        if (page >= BLOCK_PAGES) continue;
        s.page_high[(page * PAGE_WORDS + lane) * Q + t] = codes.high;
        s.page_low[(page * PAGE_WORDS + lane) * Q + t] = codes.low;
        if (lane == 0) s.page_d[page * Q + t] = codes.scale;
    }
}

// ---- values

// The range of positions that all of R queries see, from query `query` on.
struct Range { int first, last; };
template <int R, class M> static __device__ __forceinline__ Range shared_range(const M &s, int query, int start) {
    Range r = { 0, ATTENTION_BLOCK };
#pragma unroll
    for (int t = 0; t < R; t++) {
        r.first = max(r.first, s.begin[query + t] - start);
        r.last = min(r.last, s.end[query + t] - start);
    }
    return r;
}

// o of two dimensions for R queries: chains over the visible positions of [first, last), ascending.
template <int dtype, int Q, int R>
static __device__ __forceinline__ void add_values(const Attention &a, const Tile &tile, int run, int start, int first,
                                                  int last, const Memory<dtype, Q> &s, int query, int d, float (&o)[R],
                                                  float (&o2)[R]) {
    const int stride = Numerators<Q>::stride;
    const Range shared = shared_range<R>(s, query, start);
#pragma unroll
    for (int t = 0; t < R; t++) o[t] = o2[t] = 0;
    const auto values_at = [&](int i) {   // BATCH positions are in one page
        return a.cache.values(run, start + i, tile.kv_head) + value_at(dtype, i % KV_PAGE, d);
    };
    Batch<dtype> next;
    next.load(values_at(first / BATCH * BATCH));
    for (int i = first / BATCH * BATCH; i < last; i += BATCH) {
        const Batch<dtype> now = next;
        if (i + BATCH < last) next.load(values_at(i + BATCH));
        if (i >= shared.first && i + BATCH <= shared.last) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const float v = now.pairs[j].first(), v2 = now.pairs[j].second();
                float p[R];
                load_queries(s.p + (i + j) * stride + query, p);
#pragma unroll
                for (int t = 0; t < R; t++) {
                    o[t] = __fmaf_rn(v, p[t], o[t]);
                    o2[t] = __fmaf_rn(v2, p[t], o2[t]);
                }
            }
            continue;
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {   // some see it
            const float v = now.pairs[j].first(), v2 = now.pairs[j].second();
#pragma unroll
            for (int t = 0; t < R; t++) {
                if (start + i + j < s.begin[query + t] || start + i + j >= s.end[query + t]) continue;
                const float numerator = s.p[(i + j) * stride + query + t];
                o[t] = __fmaf_rn(v, numerator, o[t]);
                o2[t] = __fmaf_rn(v2, numerator, o2[t]);
            }
        }
    }
}

// The same for one dimension in q8: a fused multiply-add per page.
template <int Q, int R>
static __device__ __forceinline__ void add_value_codes(const Attention &a, const Tile &tile, int run, int start,
                                                       int first, int last, const Memory<LLAMAC_Q8, Q> &s, int query,
                                                       int d, float (&o)[R]) {
    const int half = PAGE_WORDS / 2;   // the words of 32 positions
#pragma unroll
    for (int t = 0; t < R; t++) o[t] = 0;
    for (int page = first / KV_PAGE; page * KV_PAGE < last; page++) {
        const uint8_t *const codes =
            a.cache.values(run, start + page * KV_PAGE, tile.kv_head) + kv_value_code_offset(0, d);
        float sum[R];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int words[half], high[R], low[R];
#pragma unroll
            for (int j = 0; j < half; j++) words[j] = stored_codes(codes + (part * half + j) * LINE_BYTES);
#pragma unroll
            for (int t = 0; t < R; t++) high[t] = low[t] = 0;
#pragma unroll
            for (int j = 0; j < half; j++) {
                const int at = (page * PAGE_WORDS + part * half + j) * Q + query;
                int x[R];
                load_queries(s.page_high + at, x);
#pragma unroll
                for (int t = 0; t < R; t++) high[t] = __dp4a(words[j], x[t], high[t]);
                load_queries(s.page_low + at, x);
#pragma unroll
                for (int t = 0; t < R; t++) low[t] = __dp4a(words[j], x[t], low[t]);
            }
#pragma unroll
            for (int t = 0; t < R; t++) {
                const float i = (float)(128 * high[t] + low[t]);
                sum[t] = part ? __fadd_rn(sum[t], i) : i;
            }
        }
#pragma unroll
        for (int t = 0; t < R; t++) o[t] = __fmaf_rn(sum[t], s.page_d[page * Q + query + t], o[t]);
    }
}
#endif
