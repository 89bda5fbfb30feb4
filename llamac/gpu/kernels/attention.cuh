// SPDX-License-Identifier: MIT
// attention.cuh - the parts of attention for one block of threads: a tile of up to Q queries of a KV head, and a block
// of 256 positions at a time. The order of operations is that of struct attend (csrc/kernels.h).
//
// Keys and values are read from global memory straight into registers, 128 or 256 bytes per load of a warp: strips hold
// 16 positions, or 16 dimensions, side by side, so a thread takes two or four of them, for some of the queries. Queries
// and the numerators of the softmax are in shared memory, those of one dimension or position side by side: a thread
// reads them for 4 queries at once.
#ifndef LLAMAC_ATTENTION_CUH
#define LLAMAC_ATTENTION_CUH
#include "kv_cache.cuh"

enum {
    ATTEND_THREADS = 128,
    HALF_WARPS = ATTEND_THREADS / LANES,
    PREFETCH_BYTES = 128,                        // a line of the L2 cache
    BLOCK_PAGES = ATTENTION_BLOCK / KV_PAGE,
    PAGE_WORDS = KV_PAGE / 4,                    // words of 4 codes
};

// What all blocks of threads of a launch share.
struct Attention {
    const float *q;                              // (rows, n_heads, head_dim)
    float scale;                                 // multiplies q if `scales` is NULL
    const float *scales;                         // (rows), or NULL
    const int *positions, *table_of, *ends;      // (rows); ends: of the positions that a row sees without a window
    Cache cache;
    int n_heads, n_kv_heads, head_dim, value_dim, window;
    float soft_cap;
    const float *biases;                         // (n_heads, 2 bias_distance + 1), or NULL
    int bias_distance;
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
INLINE int first_visible(int position, int window) {
    if (window < 0) return position - position % -window;   // the row's chunk
    return window ? max(0, position + 1 - window) : 0;
}
// Rows of encoders and of models with biases are two_sided: they see up to an end of their own, and their scores can
// have biases. Kernels of other models are compiled without both: decoding took up to 11% longer with them.
// end: as Attention.ends. Windows of encoders reach as far to later positions as to earlier ones.
template <bool two_sided> INLINE int visible_end(int position, int window, int end) {
    if (!two_sided) return position + 1;
    return window > 0 ? min(position + window, end) : end;
}
// A score with what is added to it, and capped. distance: from the query's position to the key's. As adjust_scores of
// kernels_attention.h.
template <bool two_sided> INLINE float adjusted(const Attention &a, float score, int head, int distance) {
    if (two_sided && a.biases) {
        const int most = a.bias_distance, at = most + max(-most, min(most, distance));
        score = __fadd_rn(score, __ldg(a.biases + (size_t)head * (2 * most + 1) + at));
    }
    return a.soft_cap > 0 ? v16_soft_cap(score, a.soft_cap) : score;
}

// How threads divide the work of a tile of Q queries. With 32 queries, there are enough multiplications per number that
// a thread reads from shared memory to keep the multipliers busy; with fewer, memory is the limit.
template <int dtype, int Q> struct Shares {
    // Neighbors in a strip that a thread takes: positions of keys, dimensions of values.
    static const int width = dtype == LLAMAC_Q8 ? 1 : Q < 32 ? 2 : 4;
    static const int batch = width == 4 ? 8 : 16;               // loads of a thread in flight
    static const int score_queries = Q < 16 ? Q : 16;           // of a thread
    static const int score_threads = ATTEND_THREADS / (Q / score_queries);   // that take different positions
    static const int value_queries = Q < 2 ? 1 : Q < 16 ? Q / 2 : 8;
    // Words from one position's numerators to the next: 16 lanes that read one query of as many positions hit different
    // banks.
    static const int stride = Q < 8 ? Q : Q + 4;
};

// Shared memory of a block of threads.
template <int dtype, int Q> struct Memory {
    float *p;                 // (256, stride): scores, then numerators
    float *q;                 // f32, f16: (head_dim, Q)
    int *high, *low;          // q8: (head_dim / 4, Q) words of the halves of the queries' codes
    float *d;                 // q8: (head_dim / 128, Q): the queries' scales
    unsigned *page_codes;     // q8: (64, Q) words: the numerators' codes
    int *page_bias;           // q8: (4, Q): 128 times their sums
    float *page_d;            // q8: (4, Q): their scales
    float *m, *l;             // (Q): of the current block
    int *begin, *end;         // (Q): what each query sees
    float *rest;              // what follows

    __device__ __forceinline__ Memory(unsigned char *memory, int head_dim) {
        float *at = (float *)memory;
        p = take(at, ATTENTION_BLOCK * Shares<dtype, Q>::stride);
        if (dtype == LLAMAC_Q8) {
            const int words = groups(head_dim) * (GROUP_COLUMNS / 4);
            high = (int *)take(at, words * Q);
            low = (int *)take(at, words * Q);
            d = take(at, (groups(head_dim) + BLOCK_GROUPS - 1) / BLOCK_GROUPS * Q);
            page_codes = (unsigned *)take(at, BLOCK_PAGES * PAGE_WORDS * Q);
            page_bias = (int *)take(at, BLOCK_PAGES * Q);
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

// Neighbors in a line of a strip of floats.
template <int dtype, int n> struct Neighbors {
    static const int words = n * (dtype == LLAMAC_F32 ? 4 : 2) / 4;
    uint32_t bits[words];

    __device__ __forceinline__ void load(const uint8_t *p) {
        if (words == 4) {
            const uint4 x = __ldg((const uint4 *)p);
            bits[0] = x.x, bits[1 % words] = x.y, bits[2 % words] = x.z, bits[3 % words] = x.w;
        } else if (words == 2) {
            const uint2 x = __ldg((const uint2 *)p);
            bits[0] = x.x, bits[1 % words] = x.y;
        } else {
            bits[0] = __ldg((const uint32_t *)p);
        }
    }
    __device__ __forceinline__ float at(int i) const {
        if (dtype == LLAMAC_F32) return __uint_as_float(bits[i % words]);
        return f16_to_f32((uint16_t)(bits[i / 2] >> i % 2 * 16));
    }
};

// Those of adjacent lines, which are loaded while lines before them are multiplied.
template <int dtype, int n, int lines> struct Batch {
    Neighbors<dtype, n> line[lines];
    __device__ __forceinline__ void load(const uint8_t *p) {
#pragma unroll
        for (int i = 0; i < lines; i++) line[i].load(p + i * STRIP_ROWS * float_bytes(dtype));
    }
};

// A word of stored codes, which are offset by 128, as int8.
INLINE int stored_codes(const uint8_t *p) { return (int)(__ldg((const uint32_t *)p) ^ 0x80808080u); }

// sums[t] = words of 4 codes, all int or all unsigned, times those of R queries, Q apart in shared memory.
template <int Q, class Word, int n, int R>
static __device__ __forceinline__ void dot_products(const Word (&words)[n], const Word *queries, Word (&sums)[R]) {
#pragma unroll
    for (int t = 0; t < R; t++) sums[t] = 0;
#pragma unroll
    for (int i = 0; i < n; i++) {
        Word x[R];
        load_queries(queries + i * Q, x);
#pragma unroll
        for (int t = 0; t < R; t++) sums[t] = __dp4a(words[i], x[t], sums[t]);
    }
}

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
        const Scaled numbers = scaled<WARP_LANES>(x, INT16_LIMIT);
        const Halves codes = halves_of(numbers.x);
        const int word = first / 4 + lane;
        if (word < words) s.high[word * Q + t] = codes.high, s.low[word * Q + t] = codes.low;
        if (lane == 0) s.d[first / BLOCK_COLUMNS * Q + t] = numbers.scale;
    }
}

// Loads the tile's queries times their scales, and what they see. As load_queries of attention.c. Ends at a barrier.
template <bool two_sided, int dtype, int Q>
static __device__ void load_tile(const Attention &a, const Tile &tile, const Memory<dtype, Q> &s) {
    const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    for (int t = threadIdx.x; t < Q; t += ATTEND_THREADS) {
        const int row = row_of(a, tile, min(t, tile.n - 1)), position = a.positions[row];   // after the last: the last
        s.begin[t] = first_visible(position, a.window);
        s.end[t] = visible_end<two_sided>(position, a.window, two_sided ? a.ends[row] : 0);
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
// at once, so that memory is busy even if few blocks of threads run.
static __device__ __forceinline__ void prefetch_block(const Attention &a, const Tile &tile, int table, int start,
                                                      int first, int last) {
    for (int i = first / KV_PAGE * KV_PAGE; i < last; i += KV_PAGE) {
        const uint8_t *const page = a.cache.keys(table, start + i, tile.kv_head);
        for (int at = threadIdx.x * PREFETCH_BYTES; at < a.cache.head_bytes; at += ATTEND_THREADS * PREFETCH_BYTES)
            prefetch_l2(page + at);
    }
}

// ---- scores

// sums[i][t] += x.at(i) * y[t]
template <int dtype, int n, int R>
static __device__ __forceinline__ void multiply_add(const Neighbors<dtype, n> &x, const float (&y)[R],
                                                    float (&sums)[n][R]) {
#pragma unroll
    for (int i = 0; i < n; i++) {
        const float number = x.at(i);
#pragma unroll
        for (int t = 0; t < R; t++) sums[i][t] = __fmaf_rn(number, y[t], sums[i][t]);
    }
}

// The scores of neighboring positions with R queries, Q apart in shared memory: chains over ascending dimensions.
template <int dtype, int Q, int n, int R>
static __device__ __forceinline__ void score_floats(const float *q, const uint8_t *keys, int head_dim,
                                                    float (&scores)[n][R]) {
    const int lines = Shares<dtype, Q>::batch, step = STRIP_ROWS * float_bytes(dtype);
    const float *const end = q + head_dim * Q;
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int t = 0; t < R; t++) scores[i][t] = 0;
    float x[R];
    Batch<dtype, n, lines> next;
    if (q + lines * Q <= end) next.load(keys);
    for (; q + lines * Q <= end; q += lines * Q) {
        const Batch<dtype, n, lines> now = next;
        keys += lines * step;
        if (q + 2 * lines * Q <= end) next.load(keys);
#pragma unroll
        for (int i = 0; i < lines; i++) {
            load_queries(q + i * Q, x);
            multiply_add(now.line[i], x, scores);
        }
    }
#pragma unroll 1
    for (; q < end; q += Q, keys += step) {
        Neighbors<dtype, n> line;
        line.load(keys);
        load_queries(q, x);
        multiply_add(line, x, scores);
    }
}

// One position's scores with R queries, from query `first` on: products with q8_0 (struct gemm). keys: of the
// position's strip.
template <int Q, int R>
static __device__ __forceinline__ void score_codes(const Memory<LLAMAC_Q8, Q> &s, const uint8_t *keys, int slot,
                                                   int head_dim, int first, float (&scores)[R]) {
    const int r = slot % STRIP_ROWS, groups = s.groups(head_dim);
    float p[R];
#pragma unroll
    for (int t = 0; t < R; t++) scores[t] = p[t] = 0;
    for (int g = 0; g < groups; g++) {
        const int in_block = g % BLOCK_GROUPS, block_groups = min(groups - g + in_block, (int)BLOCK_GROUPS);
        const uint8_t *const codes = keys + block_scale_bytes(LLAMAC_Q8_0, block_groups) +
                                     (size_t)in_block * group_code_bytes(LLAMAC_Q8_0) + 4 * r;
        int words[GROUP_COLUMNS / 4], high[R], low[R];
#pragma unroll
        for (int j = 0; j < GROUP_COLUMNS / 4; j++) words[j] = stored_codes(codes + j * LINE_BYTES);
        const float scale = f16_to_f32(__ldg((const uint16_t *)keys + in_block * STRIP_ROWS + r));
        const int at = g * (GROUP_COLUMNS / 4) * Q + first;
        dot_products<Q>(words, s.high + at, high);
        dot_products<Q>(words, s.low + at, low);
#pragma unroll
        for (int t = 0; t < R; t++) p[t] = __fmaf_rn((float)(128 * high[t] + low[t]), scale, p[t]);
        if (in_block + 1 < block_groups) continue;
        const float *const d = s.d + g / BLOCK_GROUPS * Q + first;
#pragma unroll
        for (int t = 0; t < R; t++) {
            scores[t] = __fmaf_rn(p[t], d[t], scores[t]);
            p[t] = 0;
        }
        keys += block_bytes(LLAMAC_Q8_0, BLOCK_GROUPS);
    }
}

// The scores, before the soft cap, of the block's positions [first, last), counted from its start at position `start`,
// with all queries, and maybe those of neighbors.
template <int dtype, int Q>
static __device__ void block_scores(const Attention &a, const Tile &tile, int table, int start, int first, int last,
                                    const Memory<dtype, Q> &s) {
    typedef Shares<dtype, Q> Share;
    const int n = Share::width, R = Share::score_queries, threads = Share::score_threads;
    const int query = threadIdx.x / threads * R;
    for (int i = n * (threadIdx.x % threads); i < last; i += n * threads) {
        if (i + n <= first) continue;
        const int slot = i % KV_PAGE;
        const uint8_t *const strip = a.cache.keys(table, start + i, tile.kv_head) +
                                     (size_t)(slot / STRIP_ROWS) * kv_key_strip_bytes(dtype, a.head_dim);
        float scores[n][R];
        if constexpr (dtype == LLAMAC_Q8)
            score_codes<Q>(s, strip, slot, a.head_dim, query, scores[0]);
        else
            score_floats<dtype, Q>(s.q + query, strip + slot % STRIP_ROWS * float_bytes(dtype), a.head_dim, scores);
#pragma unroll
        for (int j = 0; j < n; j++)
#pragma unroll
            for (int t = 0; t < R; t++) s.p[(i + j) * Share::stride + query + t] = scores[j][t];
    }
}

// ---- softmax

// Scores are capped and become numerators: m, l and exp(score - m) of each query's visible positions in the block. A
// half-warp takes a query. As softmax_numerators of kernels_attention.h: other positions are -inf and add 0 to the
// sums, unless the result is NaN in any case.
template <bool two_sided, int dtype, int Q>
static __device__ void block_numerators(const Attention &a, const Tile &tile, int start, const Memory<dtype, Q> &s) {
    const int lane = threadIdx.x % LANES, half_warp = threadIdx.x / LANES, stride = Shares<dtype, Q>::stride;
    for (int base = 0; base < Q; base += HALF_WARPS) {
        const int t = base + half_warp, begin = t < Q ? s.begin[t] - start : 0, end = t < Q ? s.end[t] - start : 0;
        float x[ATTENTION_BLOCK / LANES], m = -infinity(), l = 0;
        if (a.soft_cap > 0 || (two_sided && a.biases)) {
            const int query = min(t, tile.n - 1), first = start - a.positions[row_of(a, tile, query)];
#pragma unroll 1
            for (int i = lane; i < min(end, (int)ATTENTION_BLOCK); i += LANES)
                if (i >= begin) {
                    float *const score = &s.p[i * stride + t];
                    *score = adjusted<two_sided>(a, *score, head_of(a, tile, query), first + i);
                }
        }
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
static __device__ void pack_numerators(const Attention &a, const Tile &tile, int table, int start, int first, int last,
                                       const Memory<LLAMAC_Q8, Q> &s) {
    const int lane = threadIdx.x % LANES, half_warp = threadIdx.x / LANES, stride = Shares<LLAMAC_Q8, Q>::stride;
    for (int base = 0; base < Q * BLOCK_PAGES; base += HALF_WARPS) {   // Q * BLOCK_PAGES may be less than HALF_WARPS
        const int page = (base + half_warp) / Q, t = (base + half_warp) % Q, i = page * KV_PAGE + 4 * lane;
        const int is_seen = page < BLOCK_PAGES && page * KV_PAGE < last && (page + 1) * KV_PAGE > first;
        const int begin = s.begin[t] - start, end = is_seen ? s.end[t] - start : 0;
        const uint16_t *const scales =
            is_seen ? (const uint16_t *)a.cache.values(table, start + page * KV_PAGE, tile.kv_head) : nullptr;
        float x[4];
        for (int j = 0; j < 4; j++) {
            const int visible = i + j >= begin && i + j < end;
            x[j] = visible ? __fmul_rn(s.p[(i + j) * stride + t], f16_to_f32(__ldg(scales + 4 * lane + j))) : 0.0f;
        }
        const Scaled numbers = scaled<LANES>(x, NUMERATOR_LIMIT);
        int codes[4];
        for (int j = 0; j < 4; j++) codes[j] = round_even(numbers.x[j]);
        const float sum = lanes_add((float)(codes[0] + codes[1] + codes[2] + codes[3]));   // exact
        if (page >= BLOCK_PAGES) continue;
        s.page_codes[(page * PAGE_WORDS + lane) * Q + t] = (unsigned)pack_bytes(codes);
        if (lane == 0) s.page_bias[page * Q + t] = Q8_OFFSET * (int)sum, s.page_d[page * Q + t] = numbers.scale;
    }
}

// ---- values

// The positions that all of R queries see, from query `query` on, and whether none sees more.
struct Range { int first, last, is_all; };
template <int R, class M> static __device__ __forceinline__ Range shared_range(const M &s, int query, int start) {
    Range r = { 0, ATTENTION_BLOCK, 1 };
#pragma unroll
    for (int t = 0; t < R; t++) {
        r.first = max(r.first, s.begin[query + t] - start);
        r.last = min(r.last, s.end[query + t] - start);
        r.is_all &= s.begin[query + t] == s.begin[query] && s.end[query + t] == s.end[query];
    }
    return r;
}

// o of n neighboring dimensions for R queries, from query `query` on: chains over the visible positions of [first,
// last), ascending.
template <int dtype, int Q, int n, int R>
static __device__ __forceinline__ void add_values(const Attention &a, const Tile &tile, int table, int start, int first,
                                                  int last, const Memory<dtype, Q> &s, int query, int d,
                                                  float (&o)[n][R]) {
    const int stride = Shares<dtype, Q>::stride, lines = Shares<dtype, Q>::batch;
    const Range shared = shared_range<R>(s, query, start);
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int t = 0; t < R; t++) o[i][t] = 0;
    const auto values_at = [&](int i) {   // a batch of positions is in one page
        return a.cache.values(table, start + i, tile.kv_head) + value_at(dtype, i % KV_PAGE, d);
    };
    Batch<dtype, n, lines> next;
    next.load(values_at(first / lines * lines));
    for (int i = first / lines * lines; i < last; i += lines) {
        const Batch<dtype, n, lines> now = next;
        if (i + lines < last) next.load(values_at(i + lines));
        float p[R];
        if (i >= shared.first && i + lines <= shared.last) {
#pragma unroll
            for (int j = 0; j < lines; j++) {
                load_queries(s.p + (i + j) * stride + query, p);
                multiply_add(now.line[j], p, o);
            }
        } else if (shared.is_all) {
#pragma unroll
            for (int j = 0; j < lines; j++) {
                if (i + j < shared.first || i + j >= shared.last) continue;
                load_queries(s.p + (i + j) * stride + query, p);
                multiply_add(now.line[j], p, o);
            }
        } else {   // where the ranges of rows begin and end
#pragma unroll 1
            for (int j = max(i, first); j < min(i + lines, last); j++) {
                Neighbors<dtype, n> line;
                line.load(values_at(j));
#pragma unroll
                for (int t = 0; t < R; t++) {
                    if (start + j < s.begin[query + t] || start + j >= s.end[query + t]) continue;
#pragma unroll
                    for (int k = 0; k < n; k++)
                        o[k][t] = __fmaf_rn(line.at(k), s.p[j * stride + query + t], o[k][t]);
                }
            }
        }
    }
}

// The same for one dimension in q8: a fused multiply-add per page. Stored codes are offset by 128, and so is their
// product with the numerators' codes by 128 times the sum of those.
template <int Q, int R>
static __device__ __forceinline__ void add_value_codes(const Attention &a, const Tile &tile, int table, int start,
                                                       int first, int last, const Memory<LLAMAC_Q8, Q> &s, int query,
                                                       int d, float (&o)[R]) {
#pragma unroll
    for (int t = 0; t < R; t++) o[t] = 0;
    for (int page = first / KV_PAGE; page * KV_PAGE < last; page++) {
        const uint8_t *const codes =
            a.cache.values(table, start + page * KV_PAGE, tile.kv_head) + kv_value_code_offset(0, d);
        unsigned words[PAGE_WORDS], sums[R];
#pragma unroll
        for (int j = 0; j < PAGE_WORDS; j++) words[j] = __ldg((const uint32_t *)(codes + j * LINE_BYTES));
        dot_products<Q>(words, s.page_codes + page * PAGE_WORDS * Q + query, sums);
#pragma unroll
        for (int t = 0; t < R; t++) {
            const int at = page * Q + query + t;
            o[t] = __fmaf_rn((float)((int)sums[t] - s.page_bias[at]), s.page_d[at], o[t]);
        }
    }
}
#endif
