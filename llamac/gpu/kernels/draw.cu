// SPDX-License-Identifier: MIT
// draw.cu - draws tokens from rows of logits as csrc/sampler.c does, for temperature, top-k, top-p and min-p.
//
// The probabilities have csrc's bits. Their sums are added up in another order, so a draw has no result where rounding
// could decide, and where the tokens that can be drawn are too many to be sorted here: then the CPU draws.
#include "exp_negative.h"
#include "lane.cuh"
#include "uniform.h"

enum {
    NO_TOKEN = -1,
    CHUNK = 1024,                        // logits of a block of threads
    CHUNK_THREADS = 256, CHUNK_STEPS = CHUNK / CHUNK_THREADS,
    DRAW_THREADS = 1024, DRAW_WARPS = DRAW_THREADS / WARP_LANES,
    LISTED = 2 * DRAW_THREADS,           // the most probable tokens, which are sorted
    MAGNITUDES = 32,                     // of probabilities: 2^-m to 2^(1 - m) for all but the last, which has the rest
};

// A draw (draws.py has the same structure): llamac_sampling of csrc/llamac.h, the position, and the row of logits.
struct draw {
    uint64_t seed, position;
    uint32_t candidate;
    int top_k;
    float temperature, top_p, min_p;
    int row;
};

// What the kernels leave for each other, for each draw. Chunks: of a row.
#define DRAW_PARAMETERS \
    const float *logits, int width, int n, const draw *draws, float *maxima, int *finite, float *p, double *sums, \
    int *counts
// logits (rows, width): the first n of a row are used. maxima (draws, chunks): the largest logit, -inf if none is a
// number. finite (draws, chunks): how many are more than -inf. p (draws, n): probabilities, the largest 1. sums (draws,
// chunks): of those of at least min_p. counts (draws, MAGNITUDES): how many have a magnitude.

static __device__ __forceinline__ int chunks_of(int n) { return (n + CHUNK - 1) / CHUNK; }

// combine(x of all threads), for a block of at most 1024 threads; every thread gets it. shared: (32).
template <class T, class Combine> static __device__ T of_block(T x, T *shared, Combine combine) {
    for (int bits = WARP_LANES / 2; bits > 0; bits /= 2) x = combine(x, __shfl_xor_sync(FULL_WARP, x, bits));
    __syncthreads();   // the last call's results have been read
    if (threadIdx.x % WARP_LANES == 0) shared[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    x = shared[0];
    for (int i = 1; i < (int)blockDim.x / WARP_LANES; i++) x = combine(x, shared[i]);
    return x;
}
static __device__ float larger(float a, float b) { return v16_max(a, b); }
static __device__ int smaller_int(int a, int b) { return min(a, b); }
static __device__ int sum_of_ints(int a, int b) { return a + b; }
static __device__ double sum_of_doubles(double a, double b) { return a + b; }

// Grid (chunks, draws); block 256.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) draw_maxima(DRAW_PARAMETERS) {
    __shared__ float tops[WARP_LANES];
    __shared__ int numbers[WARP_LANES];
    const int start = blockIdx.x * CHUNK, at = blockIdx.y * gridDim.x + blockIdx.x;
    const float *const row = logits + (size_t)draws[blockIdx.y].row * width;
    float top = -infinity();
    int found = 0;
    for (int i = start + threadIdx.x; i < min(start + CHUNK, n); i += CHUNK_THREADS) {
        top = larger(row[i], top);   // NaN changes nothing
        found += row[i] > -infinity();
    }
    top = of_block(top, tops, larger);
    found = of_block(found, numbers, sum_of_ints);
    if (threadIdx.x == 0) maxima[at] = top, finite[at] = found;
    if (blockIdx.x == 0 && threadIdx.x < MAGNITUDES) counts[blockIdx.y * MAGNITUDES + threadIdx.x] = 0;
    (void)p, (void)sums;
}

// The largest logit of a row.
static __device__ float largest_of(const float *maxima, int chunks, float *shared) {
    float top = -infinity();
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) top = larger(maxima[i], top);
    return of_block(top, shared, larger);
}
INLINE int magnitude_of(float p) { return min(127 - (int)(f32_bits(p) >> 23), (int)MAGNITUDES - 1); }

// After draw_maxima; the same grid and block. Draws with temperature 0 have no probabilities.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS) draw_probabilities(DRAW_PARAMETERS) {
    __shared__ float tops[WARP_LANES];
    __shared__ double totals[WARP_LANES];
    __shared__ int magnitudes[MAGNITUDES];
    const draw d = draws[blockIdx.y];
    if (d.temperature == 0) return;
    const int start = blockIdx.x * CHUNK;
    const float *const row = logits + (size_t)d.row * width;
    const float largest = largest_of(maxima + blockIdx.y * gridDim.x, gridDim.x, tops);
    if (threadIdx.x < MAGNITUDES) magnitudes[threadIdx.x] = 0;
    __syncthreads();
    double sum = 0;
    for (int i = start + threadIdx.x; i < min(start + CHUNK, n); i += CHUNK_THREADS) {
        const float x = (float)exp_negative((double)__fsub_rn(row[i], largest) / (double)d.temperature);
        p[(size_t)blockIdx.y * n + i] = x;
        if (x > 0) atomicAdd(&magnitudes[magnitude_of(x)], 1);
        if (x >= d.min_p || d.top_p < 1) sum += (double)x;   // top-p refers to the sum of all
    }
    sum = of_block(sum, totals, sum_of_doubles);
    if (threadIdx.x == 0) sums[blockIdx.y * gridDim.x + blockIdx.x] = sum;
    if (threadIdx.x < MAGNITUDES && magnitudes[threadIdx.x])
        atomicAdd(&counts[blockIdx.y * MAGNITUDES + threadIdx.x], magnitudes[threadIdx.x]);
    (void)finite;
}

// The sums of x over all threads up to each, in their order. shared: (DRAW_WARPS).
static __device__ double scan(double x, double *shared) {
    const int lane = threadIdx.x % WARP_LANES;
    for (int step = 1; step < WARP_LANES; step *= 2) {
        const double before = __shfl_up_sync(FULL_WARP, x, step);
        if (lane >= step) x += before;
    }
    __syncthreads();
    if (lane == WARP_LANES - 1) shared[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    for (int i = 0; i < (int)threadIdx.x / WARP_LANES; i++) x += shared[i];
    return x;
}

// What the threads of a block need to find a token together.
struct found {
    float floats[DRAW_WARPS];
    double doubles[DRAW_WARPS];
    int ints[DRAW_WARPS];
    int listed;
    uint64_t keys[LISTED];      // of the listed tokens: rank, then ~id. The greatest ranks first
    double sums[LISTED];        // of the probabilities of listed tokens up to each
};

// Whether a sum is so close to a threshold that rounding could decide whether it reaches it. Both sums are of at most n
// numbers, so they differ from csrc's by less.
INLINE int is_close(double sum, double threshold, double margin) { return !(fabs(sum - threshold) > margin); }
INLINE double margin_of(int n, double total) { return (n + 64) * 0x1p-49 * total; }

// The first index of `sums` (count) that reaches the threshold, or exceeds it if strict; NO_TOKEN if there is none or
// if rounding could decide.
static __device__ int crossing(found &f, int count, double threshold, int strict, double margin) {
    int first = LISTED;
    for (int i = threadIdx.x; i < count && first == LISTED; i += DRAW_THREADS)
        if (strict ? f.sums[i] > threshold : f.sums[i] >= threshold) first = i;
    first = of_block(first, f.ints, smaller_int);
    if (first == LISTED || is_close(f.sums[first], threshold, margin)) return NO_TOKEN;
    return first && is_close(f.sums[first - 1], threshold, margin) ? (int)NO_TOKEN : first;
}

// The id of the largest logit.
static __device__ int most_probable(const float *row, int n, const float *maxima, float largest, found &f) {
    int chunk = chunks_of(n), id = n;
    for (int i = threadIdx.x; i < chunks_of(n); i += DRAW_THREADS)
        if (maxima[i] >= largest) chunk = min(chunk, i);
    chunk = of_block(chunk, f.ints, smaller_int);
    const int own = chunk * CHUNK + threadIdx.x;
    if (own < n && row[own] >= largest) id = own;
    return of_block(id, f.ints, smaller_int);
}
static_assert(CHUNK == DRAW_THREADS, "a thread for each logit of a chunk");

// Draws with neither top-k nor top-p: the sums are in the order of ids.
static __device__ int draw_by_id(const draw &d, int n, const float *p, const double *sums, double u, found &f) {
    double total = 0, before = 0;
    int chunk = 0;
    for (int i = 0; i < chunks_of(n); i++) total += sums[i];
    const double target = u * total, margin = margin_of(n, total);
    while (chunk < chunks_of(n) && !(before + sums[chunk] > target)) before += sums[chunk++];
    const int id = chunk * CHUNK + threadIdx.x;
    const double own = chunk < chunks_of(n) && id < n && p[id] >= d.min_p ? (double)p[id] : 0;
    f.sums[threadIdx.x] = before + scan(own, f.doubles);
    __syncthreads();
    const int drawn = crossing(f, CHUNK, target, 1, margin);
    // the first token of a chunk also needs the sum before it
    return drawn == NO_TOKEN || (drawn == 0 && chunk && is_close(before, target, margin)) ? (int)NO_TOKEN
                                                                                         : chunk * CHUNK + drawn;
}

// Lists the tokens with the greatest probabilities, and sorts them by rank: logits with top_k, else probabilities.
static __device__ void list_tokens(const float *row, int n, const float *p, const int *counts, int top_k, found &f) {
    int least = 0, total = 0;   // magnitudes below `least` are listed
    while (least < MAGNITUDES && total + counts[least] <= LISTED) total += counts[least++];
    if (threadIdx.x == 0) f.listed = 0;
    for (int i = threadIdx.x; i < LISTED; i += DRAW_THREADS) f.keys[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += DRAW_THREADS) {
        if (!(p[i] > 0) || magnitude_of(p[i]) >= least) continue;
        const uint32_t bits = f32_bits(__fadd_rn(top_k ? row[i] : p[i], 0.0f)),
                       rank = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
        f.keys[atomicAdd(&f.listed, 1)] = (uint64_t)rank << 32 | ~(uint32_t)i;
    }
    for (int size = 2; size <= LISTED; size *= 2)   // bitonic
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            const int i = threadIdx.x / step * 2 * step + threadIdx.x % step, j = i + step;
            const uint64_t a = f.keys[i], b = f.keys[j];
            if ((a < b) == !(i & size)) f.keys[i] = b, f.keys[j] = a;
        }
    __syncthreads();
}
INLINE int listed_id(const found &f, int i) { return (int)~(uint32_t)f.keys[i]; }

// Draws with top-k (0: off) or top-p.
static __device__ int draw_ranked(const draw &d, int top_k, const float *row, int n, const float *p,
                                  const double *sums, const int *counts, double u, found &f) {
    list_tokens(row, n, p, counts, top_k, f);
    const int count = top_k ? top_k : f.listed;
    if (count == 0 || count > f.listed) return NO_TOKEN;
    double own[2], total = 0;   // of tokens 2 threadIdx.x and 2 threadIdx.x + 1
    for (int i = 0; i < 2; i++) {
        const int at = 2 * threadIdx.x + i;
        own[i] = at < count ? (double)p[listed_id(f, at)] : 0;
    }
    const double both = scan(own[0] + own[1], f.doubles);
    f.sums[2 * threadIdx.x] = both - own[1], f.sums[2 * threadIdx.x + 1] = both;
    __syncthreads();
    if (top_k) total = f.sums[count - 1];
    else for (int i = 0; i < chunks_of(n); i++) total += sums[i];
    const double margin = margin_of(n, total);
    int last = count - 1;
    if (d.top_p < 1 && (last = crossing(f, count, (double)d.top_p * total, 0, margin)) == NO_TOKEN) return NO_TOKEN;
    if (d.min_p > 0) {   // leaves those that rank first
        int kept = 0, first_cut = last + 1;
        for (int i = threadIdx.x; i <= last; i += DRAW_THREADS) {
            const int is_kept = p[listed_id(f, i)] >= d.min_p;
            kept += is_kept;
            if (!is_kept) first_cut = min(first_cut, i);
        }
        kept = of_block(kept, f.ints, sum_of_ints);
        if (kept == 0 || of_block(first_cut, f.ints, smaller_int) != kept) return NO_TOKEN;
        last = kept - 1;
    }
    const int drawn = crossing(f, last + 1, u * f.sums[last], 1, margin);
    return drawn == NO_TOKEN ? (int)NO_TOKEN : listed_id(f, drawn);
}

// After draw_probabilities. tokens: (draws), receives the drawn token, or NO_TOKEN if the CPU must draw. Grid (draws);
// block 1024.
//
// Budget, 128256 logits on an H100: draw_probabilities computes 126 blocks of 1024 doubles, 3 us; this kernel reads a
// row twice at the speed of one multiprocessor, 10 us, and has 66 barriers of the sorting, 4 us.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS) draw_tokens(DRAW_PARAMETERS, int *tokens) {
    __shared__ found f;
    const draw d = draws[blockIdx.x];
    const int chunks = chunks_of(n), first = blockIdx.x * chunks;
    const float *const row = logits + (size_t)d.row * width, *const own_p = p + (size_t)blockIdx.x * n;
    const float largest = largest_of(maxima + first, chunks, f.floats);
    int numbers = 0, token = NO_TOKEN;
    for (int i = threadIdx.x; i < chunks; i += DRAW_THREADS) numbers += finite[first + i];
    numbers = of_block(numbers, f.ints, sum_of_ints);
    if (largest > -infinity() && largest < infinity()) {   // otherwise the CPU reports the error
        double u, coin;
        uniform(d.seed, d.position, d.candidate, &u, &coin);
        const int top_k = d.top_k < numbers ? d.top_k : 0;
        if (d.temperature == 0) token = most_probable(row, n, maxima + first, largest, f);
        else if (top_k || d.top_p < 1)
            token = draw_ranked(d, top_k, row, n, own_p, sums + first, counts + blockIdx.x * MAGNITUDES, u, f);
        else token = draw_by_id(d, n, own_p, sums + first, u, f);
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}
