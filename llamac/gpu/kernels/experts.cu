// SPDX-License-Identifier: MIT
// experts.cu - the router's choice, the order of (expert, row) pairs, and the sums of experts' outputs.
#include "gates.h"
#include "lane.cuh"

// The parts of softmax over n numbers in shared memory: m, the largest, and l, the sum of exp(x - m). A warp calls it.
struct Softmax { float m, l; };
static __device__ Softmax softmax_parts(const float *x, int n) {
    const int lane = threadIdx.x % LANES;
    Softmax s = { -infinity(), 0 };
    for (int i = lane; i < n; i += LANES) s.m = v16_max(s.m, x[i]);
    s.m = lanes_max(s.m);
    for (int i = lane; i < n; i += LANES) s.l = __fadd_rn(s.l, v16_exp(__fsub_rn(x[i], s.m)));
    s.l = lanes_add(s.l);
    return s;
}
INLINE float softmax_of(float x, Softmax s) { return __fdiv_rn(v16_exp(__fsub_rn(x, s.m)), s.l); }

// How many of n numbers in shared memory rank before number e, as `choose` of router.c ranks them: ties go to the lower
// index. Numbers of groups of `size` that are excluded do not count (NULL: none is).
static __device__ int rank_of(const float *x, const int *excluded, int size, int n, int e) {
    int before = 0;
    for (int i = 0; i < n; i++) {
        if (excluded && excluded[i / size]) continue;
        before += ranks_before(x[i], x[e]) || (i < e && !ranks_before(x[e], x[i]));
    }
    return before;
}

// As group_rank of router.c.
static __device__ float group_rank(const float *ranks, int size, int is_sigmoid) {
    int best = 0, second = -1;
    for (int e = 1; e < size; e++) {
        if (ranks_before(ranks[e], ranks[best])) second = best, best = e;
        else if (second < 0 || ranks_before(ranks[e], ranks[second])) second = e;
    }
    return is_sigmoid && second >= 0 ? __fadd_rn(ranks[best], ranks[second]) : ranks[best];
}

// The numbers of the chosen of n experts, in ascending order. A warp calls it; then all of its lanes see them.
static __device__ void list_chosen(const int *chosen, int n, int *experts) {
    const int lane = threadIdx.x % WARP_LANES;
    int count = 0;
    for (int first = 0; first < n; first += WARP_LANES) {
        const int e = first + lane, is_chosen = e < n && chosen[e];
        const unsigned found = __ballot_sync(FULL_WARP, is_chosen);
        if (is_chosen) experts[count + __popc(found & ((1u << lane) - 1))] = e;
        count += __popc(found);
    }
    __syncwarp();
}

// The weight of the first of two numbers, x and 0, in their softmax.
static __device__ float softmax_beside_0(float x) {
    const float m = v16_max(x, 0.0f), e = v16_exp(__fsub_rn(x, m));
    return __fdiv_rn(e, __fadd_rn(e, v16_exp(__fsub_rn(0.0f, m))));
}

// The weights of a row's chosen experts, from their scores: `chosen_scores` (n_used) in shared memory, probabilities
// or sigmoids, or with is_logits logits of the chosen experts' softmax. A warp calls it. weights: (n_used).
static __device__ __forceinline__ void store_weights(const float *chosen_scores, const int *experts, int n_used,
                                                     int is_logits, int needs_sum, float eps, float scale,
                                                     const float *factors, float *weights) {
    const Softmax s = is_logits ? softmax_parts(chosen_scores, n_used) : Softmax { 0, 1 };
    double sum = 0;
    for (int i = 0; i < n_used && needs_sum; i++) sum += (double)chosen_scores[i];
    sum += (double)eps;
    for (int i = threadIdx.x % WARP_LANES; i < n_used; i += WARP_LANES) {
        float weight = chosen_scores[i];
        if (is_logits) weight = softmax_of(weight, s);
        if (needs_sum) weight = (float)((double)weight / sum);
        weight = __fmul_rn(weight, scale);
        weights[i] = factors ? __fmul_rn(weight, factors[experts[i]]) : weight;
    }
}

// Each row's experts in ascending order, and their weights, as router_select of router.c, and the factors of `route` of
// ffn.c: an expert is chosen if fewer than n_used others rank before it. logits: (rows, n); experts, weights: (rows,
// n_used); choice_bias, factors: (n) or NULL; n_groups: 0, or groups of which n_groups_used are chosen first.
// shared_gate: (rows) or NULL; shared_weights: (rows), softmax(gate, 0). Grid (rows); block 256; dynamic shared memory:
// 12 bytes per expert and 8 per group.
//
// Budget with 128 experts: 128 comparisons per thread in shared memory, 0.5 us, then the exponentials of one warp; in
// all 2.5 us. (4096 experts: 65,536 comparisons per thread, 150 us.)
extern "C" __global__ void __launch_bounds__(256)
choose_experts(const float *logits, int n, int n_used, int is_sigmoid, int n_groups, int n_groups_used, int normalized,
               float eps, float scale, const float *choice_bias, const float *factors, const float *shared_gate,
               int *experts, float *weights, float *shared_weights) {
    DYNAMIC_SHARED(memory);
    __shared__ Softmax all;
    const int lane = threadIdx.x % WARP_LANES, in_first_warp = threadIdx.x < WARP_LANES;
    // the scores, or the logits of their softmax; what ranks the experts; whether each is chosen; the groups
    float *const x = (float *)memory, *const ranks = x + n;
    int *const chosen = (int *)(ranks + n), *const excluded = n_groups ? chosen + n : NULL;
    float *const group_ranks = (float *)(chosen + n + n_groups);
    const int size = n_groups ? n / n_groups : n;
    const size_t row = blockIdx.x;
    for (int e = threadIdx.x; e < n; e += blockDim.x) {
        const float logit = logits[row * n + e];
        x[e] = is_sigmoid ? sigmoid((double)logit) : logit;
    }
    __syncthreads();
    const int needs_all = !is_sigmoid && (choice_bias || !normalized);   // the probabilities of all experts
    if (needs_all && in_first_warp) {
        const Softmax s = softmax_parts(x, n);
        if (lane == 0) all = s;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += blockDim.x)
        ranks[e] = choice_bias ? __fadd_rn(is_sigmoid ? x[e] : softmax_of(x[e], all), choice_bias[e])
                 : n_groups ? x[e] : logits[row * n + e];
    __syncthreads();
    for (int g = threadIdx.x; g < n_groups; g += blockDim.x)
        group_ranks[g] = group_rank(ranks + g * size, size, is_sigmoid);
    __syncthreads();
    for (int g = threadIdx.x; g < n_groups; g += blockDim.x)
        excluded[g] = rank_of(group_ranks, NULL, 1, n_groups, g) >= n_groups_used;
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += blockDim.x)
        chosen[e] = !(excluded && excluded[e / size]) && rank_of(ranks, excluded, size, n, e) < n_used;
    __syncthreads();
    if (!in_first_warp) return;
    experts += row * n_used;
    list_chosen(chosen, n, experts);
    for (int i = lane; i < n_used; i += WARP_LANES) {   // ranks have been read
        const float score = x[experts[i]];
        ranks[i] = needs_all ? softmax_of(score, all) : score;
    }
    __syncwarp();
    store_weights(ranks, experts, n_used, !is_sigmoid && !needs_all, normalized && (is_sigmoid || choice_bias), eps,
                  scale, factors, weights + row * n_used);
    if (shared_gate && lane == 0) shared_weights[row] = softmax_beside_0(shared_gate[row]);
}

// Sorts the pairs of rows and experts by expert, then by row, as sort_pairs of ffn.c. experts: (rows, n_used), as
// choose_experts wrote them. starts: (n_experts + 1), the first pair of each expert; pair_rows: (rows * n_used);
// pair_of: (rows, n_used), the pair of each row's i-th expert; pair_weights: (rows * n_used), from weights. masks:
// scratch, n_experts * (rows / 32, rounded up) words. One block of 1024.
//
// Budget: a bit per expert and row; a pair's place is a number of bits. 4 barriers, atomic operations in L2: 4 us.
extern "C" __global__ void __launch_bounds__(1024)
sort_pairs(const int *experts, int rows, int n_experts, int n_used, const float *weights, unsigned *masks, int *starts,
           int *pair_rows, int *pair_of, float *pair_weights) {
    __shared__ int warp_totals[WARP_LANES];
    const int words = (rows + 31) / 32, total = rows * n_used, lane = threadIdx.x % WARP_LANES,
              warp = threadIdx.x / WARP_LANES;
    for (int i = threadIdx.x; i < n_experts * words; i += blockDim.x) masks[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
        const int row = i / n_used;
        atomicAdd(&masks[(size_t)experts[i] * words + row / 32], 1u << row % 32);   // each bit once
    }
    __syncthreads();
    for (int first = 0, before = 0; first < n_experts; first += blockDim.x) {   // prefix sums of 1024 experts at a time
        const int e = first + threadIdx.x;
        int count = 0;
        for (int w = 0; e < n_experts && w < words; w++) count += __popc(masks[(size_t)e * words + w]);
        int sum = count;   // of the warp's lanes up to this one
        for (int delta = 1; delta < WARP_LANES; delta *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, sum, delta);
            if (lane >= delta) sum += other;
        }
        if (lane == WARP_LANES - 1) warp_totals[warp] = sum;
        __syncthreads();
        int start = before, all = before;
        for (int i = 0; i < WARP_LANES; i++) {
            if (i < warp) start += warp_totals[i];
            all += warp_totals[i];
        }
        if (e < n_experts) starts[e] = start + sum - count;
        before = all;
        __syncthreads();   // warp_totals are overwritten
    }
    if (threadIdx.x == 0) starts[n_experts] = total;
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
        const int row = i / n_used, e = experts[i];
        const unsigned *const mask = masks + (size_t)e * words;
        int pair = starts[e] + __popc(mask[row / 32] & ((1u << row % 32) - 1));
        for (int w = 0; w < row / 32; w++) pair += __popc(mask[w]);
        pair_rows[pair] = row;
        pair_of[i] = pair;
        pair_weights[pair] = weights[i];
    }
}

// y[r] = its old value if `accumulate`, otherwise 0; then y[r] += outputs[pair] * weight for the row's experts in
// ascending order, each followed by y[r] += added[pair] * weight if its is_adapted; each product is rounded. As the
// accumulating products of experts_down (ffn.c). outputs: (pairs, width); pair_of, weights: (rows, n_used); weights
// may be NULL: all are 1.
// Adapters: added (pairs, width), experts (rows, n_used), is_adapted (n_experts); or NULL.
// Grid (width / 256, rounded up; rows); block 256.
//
// Budget: 4 bytes per number of outputs: bound by memory, and in decoding by the launch.
extern "C" __global__ void __launch_bounds__(256)
combine_experts(const float *outputs, const float *added, const int *experts, const int *is_adapted,
                const int *pair_of, const float *weights, int n_used, int width, int accumulate, float *y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = blockIdx.y;
    if (i >= width) return;
    float sum = accumulate ? y[row * width + i] : 0.0f;
#pragma unroll 4
    for (int j = 0; j < n_used; j++) {
        const size_t at = (size_t)pair_of[row * n_used + j] * width + i;
        const float weight = weights ? weights[row * n_used + j] : 1.0f;
        sum = __fadd_rn(sum, __fmul_rn(outputs[at], weight));
        if (added && is_adapted[experts[row * n_used + j]]) sum = __fadd_rn(sum, __fmul_rn(added[at], weight));
    }
    y[row * width + i] = sum;
}
