// SPDX-License-Identifier: MIT
// drafter.cu - what drafters compute besides the steps of other models: their inputs side by side, the logits of the
// tokens in the best clusters (clustered_logits of csrc/drafter.c), and logits of some of the tokens (eagle_spread of
// csrc/eagle.c).
#include "epilogue.cuh"
#include "gates.h"

// y[r] = x[r], for rows of x (width) and parts of the rows of y, which are `stride` apart.
// Grid (width / 256, rounded up; rows); block 256.
//
// Budget: 8 bytes per number; bound by the launch.
extern "C" __global__ void __launch_bounds__(256) copy_rows(const float *x, float *y, int width, int stride) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) y[(size_t)blockIdx.y * stride + i] = x[(size_t)blockIdx.y * width + i];
}

// Each row's clusters, as choose_clusters of drafter.c: the n_used clusters that rank first, in this order. scores:
// (rows, n). tiles: (rows, n_used), a tile of one pair for each chosen cluster; pair_rows: (rows, n_used), the row of
// each pair. Grid (n / 256, rounded up; rows); block 256.
//
// Budget with the 2,048 clusters of Gemma 4: each thread compares its score with 2,047 others, from the L1 cache: 8 us.
extern "C" __global__ void __launch_bounds__(256)
choose_clusters(const float *scores, int n, int n_used, row_tile *tiles, int *pair_rows) {
    const int cluster = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (cluster >= n) return;
    const float *const x = scores + (size_t)row * n;
    const float own = x[cluster];
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < n; i++) before += ranks_before(x[i], own) || (i < cluster && !ranks_before(own, x[i]));
    if (before >= n_used) return;
    const int pair = row * n_used + before;
    tiles[pair] = { cluster, pair, 1 };
    pair_rows[pair] = row;
}

enum { FILL_THREADS = 256, FILL_NUMBERS = 16 };   // numbers of a thread

// Each row's logits = the logit of the tokens outside of its chosen clusters, as other_logit of drafter.c.
// in_clusters: (rows, count), the logits in the clusters; logits: (rows, vocab_size).
// Grid (vocab_size / 4096, rounded up; rows); block 256.
//
// Budget with 4,096 of 262,144 tokens in the chosen clusters: each block reads 16 KB from the L2 cache, 2 us, and 1 MB
// is written.
extern "C" __global__ void __launch_bounds__(256)
fill_other_logits(const float *in_clusters, int count, int vocab_size, float *logits) {
    __shared__ float least[FILL_THREADS];
    const float *const x = in_clusters + (size_t)blockIdx.y * count;
    float own = f32_from_bits(0x7fc00000);   // NaN, which ranks before any number
    for (int i = threadIdx.x; i < count; i += FILL_THREADS)
        if (ranks_before(own, x[i])) own = x[i];
    least[threadIdx.x] = own;
    __syncthreads();
    for (int half = FILL_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half && ranks_before(least[threadIdx.x], least[threadIdx.x + half]))
            least[threadIdx.x] = least[threadIdx.x + half];
        __syncthreads();
    }
    const float other = __fsub_rn(least[0], 1.0f);
    float *const y = logits + (size_t)blockIdx.y * vocab_size;
    const int first = blockIdx.x * FILL_THREADS * FILL_NUMBERS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < FILL_NUMBERS; j++)
        if (first + j * FILL_THREADS < vocab_size) y[first + j * FILL_THREADS] = other;
}

// Writes the logits in the chosen clusters to the ids of their tokens, as spread_clusters of drafter.c. Of a token that
// a damaged file names twice, either logit remains. tiles: as choose_clusters wrote them; ids: (n * size), the tokens
// of all clusters; in_clusters: (rows, n_used, size). Grid (n_used * size / 256, rounded up; rows); block 256.
//
// Budget: 12 bytes per token of the clusters; bound by the launch.
extern "C" __global__ void __launch_bounds__(256)
spread_clusters(const float *in_clusters, const row_tile *tiles, const float *ids, int n_used, int size,
                int vocab_size, float *logits) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (i >= n_used * size) return;
    const int cluster = tiles[row * n_used + i / size].expert;
    const float id = ids[(size_t)cluster * size + i % size];
    if (id >= 0 && id < (float)vocab_size) logits[row * vocab_size + (int)id] = in_clusters[row * n_used * size + i];
}

// Each row's logits = those of the tokens that an EAGLE-3 head drafts, at their ids, and minus infinity at all others,
// as eagle_spread of eagle.c. head_logits: (rows, n); ids: (n), ascending; logits: (rows, vocab_size). In a damaged
// file, the ids may not ascend. The search then misses some of them, but still stays within head_logits, so such a file
// only costs accepted drafts.
// Grid (vocab_size / 256, rounded up; rows); block 256.
//
// Budget with 32,000 of 128,256 tokens: each thread reads 15 ids, most of them from the L1 cache: 3 us.
extern "C" __global__ void __launch_bounds__(256)
spread_head_logits(const float *head_logits, const float *ids, int n, int vocab_size, float *logits) {
    const int id = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (id >= vocab_size) return;
    int first = 0, end = n;   // of the ids that may be the first >= id
    while (first < end) {
        const int middle = first + (end - first) / 2;
        if (ids[middle] < (float)id) first = middle + 1;
        else end = middle;
    }
    const bool is_drafted = first < n && ids[first] == (float)id;
    logits[row * vocab_size + id] = is_drafted ? head_logits[row * n + first] : f32_from_bits(0xff800000);
}
