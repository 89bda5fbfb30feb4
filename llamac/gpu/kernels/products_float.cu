// SPDX-License-Identifier: MIT
// products_float.cu - products with f32, f16 and bf16. Each output is one chain of fused multiply-adds over ascending
// columns, in one thread: no other order gives its bits.
#include "epilogue.cuh"

template <int dtype> struct float_of {
    static constexpr int bytes = dtype == LLAMAC_F32 ? 4 : 2;
    static __device__ __forceinline__ float load(const unsigned char *p) {
        if (dtype == LLAMAC_F32) return *(const float *)(const void *)p;
        const uint16_t x = *(const uint16_t *)(const void *)p;
        return dtype == LLAMAC_F16 ? f16_to_f32(x) : bf16_to_f32(x);
    }
};
static __device__ __forceinline__ const float *float_row(const product &p, int row) {
    return (const float *)(const void *)p.inputs + (size_t)input_row(p, row) * p.columns;
}

// ---- few rows

enum {
    FEW_ROWS = 8, FEW_STRIPS = 2, FEW_THREADS = 128,
    FEW_COLUMNS = 96, CHUNK = 16,   // columns of a stage, and those whose operands a thread holds in registers
    STRIP_THREADS = FEW_THREADS / FEW_STRIPS, FEW_WARPS = FEW_THREADS / WARP_LANES,
};

template <int dtype> struct few_stage {
    static constexpr int column_bytes = (int)STRIP_ROWS * float_of<dtype>::bytes,
                         strip_bytes = (int)FEW_COLUMNS * column_bytes,
                         pieces = strip_bytes / 16 / STRIP_THREADS;   // that a thread copies
    static_assert(pieces * STRIP_THREADS * 16 == strip_bytes, "whole pieces");
    __align__(16) unsigned char strips[FEW_STRIPS][strip_bytes + 64];   // strips in different banks
    __align__(16) float x[FEW_ROWS][FEW_COLUMNS];
};

// What a thread copies of each stage: pieces of one strip, and with its warp input rows `warp` and warp + 4. The
// addresses are those of the next stage.
template <int dtype> struct few_copier {
    const unsigned char *weights;
    const float *x[2];
    int strip, piece, lane, warp;
    int bytes, columns;            // left of the strip from `weights` on, and of the rows from `x` on

    // rows: how many of the two rows there are.
    template <int rows> __device__ __forceinline__ void copy(few_stage<dtype> &to) {
        unsigned char *const strip_to = &to.strips[strip][piece];
#pragma unroll
        for (int i = 0; i < few_stage<dtype>::pieces; i++)
            if (i * STRIP_THREADS * 16 < bytes)
                copy_async(strip_to + i * STRIP_THREADS * 16, weights + i * STRIP_THREADS * 16);
#pragma unroll
        for (int r = 0; r < rows; r++) {
            float *const row_to = &to.x[warp + r * FEW_WARPS][lane];
#pragma unroll
            for (int k = 0; k < FEW_COLUMNS; k += WARP_LANES)
                if (k < columns) copy_async4(row_to + k, x[r] + k);
            x[r] += FEW_COLUMNS;
        }
        copy_async_commit();
        weights += few_stage<dtype>::strip_bytes;
        bytes -= few_stage<dtype>::strip_bytes;
        columns -= FEW_COLUMNS;
    }
};

// The weights of a chunk of columns of a lane's output, in registers: 32 bits each, or two of 16 bits in a word.
// Of 16 bits, the lane's output is row lane / 4 of half lane % 4 of two strips, as load_transposed brings it.
template <int dtype> struct few_weights {
    static constexpr bool is_wide = dtype == LLAMAC_F32;
    static constexpr int column_bytes = few_stage<dtype>::column_bytes,
                         strip_stride = (int)sizeof(few_stage<dtype>::strips[0]);
    uint32_t words[is_wide ? CHUNK : CHUNK / 2];

    static __device__ __forceinline__ int strip_of(int lane) { return is_wide ? lane / STRIP_ROWS : lane % 4 / 2; }
    static __device__ __forceinline__ int row_of(int lane) {
        return is_wide ? lane % (int)STRIP_ROWS : lane % 2 * 8 + lane / 4;
    }
    // What a lane reads of the first column, in bytes: its weight, or its row for load_transposed.
    static __device__ __forceinline__ int place_of(int lane) {
        if (is_wide) return strip_of(lane) * strip_stride + row_of(lane) * 4;
        const int half = lane % 8 / 2, column = lane / 8 * 2 + lane % 2;
        return half / 2 * strip_stride + half % 2 * 16 + column * column_bytes;
    }
    __device__ __forceinline__ void load(const unsigned char *strips, int place) {
        if (is_wide) {
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
                words[k % (int)(sizeof words / 4)] =
                    *(const uint32_t *)(const void *)(strips + place + k * column_bytes);
            return;
        }
#pragma unroll
        for (int k = 0; k < CHUNK; k += 8) {
            uint32_t found[4];
            load_transposed(found, strips, place + k * column_bytes);
#pragma unroll
            for (int i = 0; i < 4; i++) words[k / 2 + i] = found[i];
        }
    }
    __device__ __forceinline__ float operator[](int k) const {
        if (is_wide) return __uint_as_float(words[k % (int)(sizeof words / 4)]);
        const uint32_t word = words[k / 2];
        if (dtype == LLAMAC_F16) return f16_to_f32((uint16_t)(k % 2 ? word >> 16 : word));
        return __uint_as_float(k % 2 ? word & 0xffff0000 : word << 16);
    }
};

// Operands of a chunk of columns, in registers.
template <int dtype, int rows> struct few_operands {
    few_weights<dtype> w;
    float4 x[rows ? rows : 1][CHUNK / 4];

    // inputs: the first column of each row.
    __device__ __forceinline__ void load(const unsigned char *strips, int place, const float *const (&inputs)[2]) {
        w.load(strips, place);
#pragma unroll
        for (int r = 0; r < rows; r++)
#pragma unroll
            for (int k = 0; k < CHUNK / 4; k++) x[r][k] = ((const float4 *)(const void *)inputs[r])[k];
    }
    __device__ __forceinline__ void multiply(float (&sums)[2], int columns = CHUNK) const {
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            if (k >= columns) break;
#pragma unroll
            for (int r = 0; r < rows; r++) sums[r] = __fmaf_rn(w[k], element(x[r][k / 4], k % 4), sums[r]);
        }
    }
};

// A ring of stages: the one that the warps multiply, and the one that gets new columns.
template <int dtype> struct few_ring {
    static constexpr int n = dtype == LLAMAC_F32 ? 4 : 6;   // as launches.py reserves
    few_stage<dtype> *stages;
    int at = 0, to = n - 1;

    // Returns when stage `at` is there and no warp reads stage `to` any more. All warps call it equally often, each in
    // the code for its number of rows: it is the same barrier.
    __device__ __forceinline__ void wait() const {
        copy_async_wait<n - 2>();
        __syncthreads();
    }
    __device__ __forceinline__ void advance() { at = at + 1 < n ? at + 1 : 0, to = to + 1 < n ? to + 1 : 0; }
};

// sums[r] += weights times row r, for the rows that the warp has, and copies the stages ahead. The first operands of a
// stage are loaded before the last of the stage before are multiplied, so that the chains wait for no load. place:
// few_weights.
template <int dtype, int rows>
static __device__ __forceinline__ void add_products(float (&sums)[2], few_ring<dtype> ring, few_copier<dtype> copier,
                                                    int columns, int place) {
    constexpr int chunks = FEW_COLUMNS / CHUNK;
    static_assert(chunks % 2 == 0, "a stage begins with operands[0]");
    few_operands<dtype, rows> operands[2];
    const auto load = [&](few_operands<dtype, rows> &to, int chunk) {
        const few_stage<dtype> &stage = ring.stages[ring.at];
        const float *const inputs[2] = { stage.x[copier.warp] + chunk * CHUNK,
                                         stage.x[copier.warp + FEW_WARPS] + chunk * CHUNK };
        to.load(stage.strips[0], place + chunk * (int)CHUNK * few_stage<dtype>::column_bytes, inputs);
    };
#pragma unroll
    for (int i = 0; i < few_ring<dtype>::n - 1; i++) copier.template copy<rows>(ring.stages[i]);
    ring.wait();
    if (rows) load(operands[0], 0);
    for (; columns >= FEW_COLUMNS; columns -= FEW_COLUMNS) {
#pragma unroll
        for (int chunk = 0; chunk < chunks; chunk++) {
            if (chunk == chunks - 1) {
                ring.advance();
                ring.wait();
                if (rows) load(operands[0], 0);
            } else if (rows) {
                load(operands[(chunk + 1) % 2], chunk + 1);
            }
            if (chunk == 0) copier.template copy<rows>(ring.stages[ring.to]);
            if (rows) operands[chunk % 2].multiply(sums);
        }
    }
    for (int chunk = 0; rows && chunk * CHUNK < columns; chunk++) {   // the end of the row
        if (chunk) load(operands[0], chunk);
        operands[0].multiply(sums, columns - chunk * CHUNK);
    }
}

// A block of threads computes the 32 outputs of two strips (blockIdx.y) for tile blockIdx.x, of at most 8 rows. A warp
// computes rows w and w + 4, a lane each output; all threads copy weights ahead of use. Threads: 128. Dynamic shared
// memory: the stages. Equals gemm of csrc/kernels_template.h.
//
// Budget: a step of the chains takes 4 cycles and, for one row, 3.1 instructions with 16-bit weights, copies included.
// So a matrix of n columns takes at least 2 ns * n on an H100; reading 16-bit weights takes longer from 4000 rows on.
// Until then the chain is the limit, and cannot be shortened: nothing but its own steps may wait, hence operands are in
// registers a chunk ahead, also those of the next stage.
template <int dtype> static __device__ __forceinline__ void product_few(product p) {
    DYNAMIC_SHARED(memory);
    constexpr int outputs_n = (int)FEW_STRIPS * (int)STRIP_ROWS;
    let_next_start();
    const block_part own = block_part_of<FEW_ROWS>(p, outputs_n);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    // Warp 0 has most to compute: in other blocks it is on another part of the multiprocessor. A multiprocessor has
    // neighboring blocks, or those that are as far apart as there are multiprocessors: 132, a multiple of 4, or fewer.
    const int warp = (threadIdx.x / WARP_LANES + blockIdx.y + blockIdx.y / 128) % FEW_WARPS,
              lane = threadIdx.x % WARP_LANES;
    const bool has[2] = { warp < tile.count, warp + FEW_WARPS < tile.count };

    few_copier<dtype> copier;
    const size_t strip_bytes = float_strip_bytes(dtype, p.columns);
    copier.strip = threadIdx.x / STRIP_THREADS, copier.piece = threadIdx.x % STRIP_THREADS * 16;
    copier.lane = lane, copier.warp = warp;
    const int index = own.index * FEW_STRIPS + copier.strip;
    copier.weights = own.w.strips + index * strip_bytes + copier.piece;
    copier.bytes = index * STRIP_ROWS < own.rows ? (int)strip_bytes - copier.piece : 0;
    copier.columns = p.columns - lane;
    for (int r = 0; r < 2; r++)
        copier.x[r] = has[r] ? float_row(p, row_of_tile(tile, warp + r * FEW_WARPS)) + lane : nullptr;

    float sums[2] = { 0, 0 };
    const few_ring<dtype> ring = { (few_stage<dtype> *)(void *)memory };
    const int at_lane = few_weights<dtype>::place_of(lane);
    if (has[1]) add_products<dtype, 2>(sums, ring, copier, p.columns, at_lane);
    else if (has[0]) add_products<dtype, 1>(sums, ring, copier, p.columns, at_lane);
    else add_products<dtype, 0>(sums, ring, copier, p.columns, at_lane);
    const block_part to = block_part_of<FEW_ROWS>(p, outputs_n);
    const int row = (to.index * FEW_STRIPS + few_weights<dtype>::strip_of(lane)) * STRIP_ROWS +
                    few_weights<dtype>::row_of(lane);
    finish(p, to, sums, [&](int i) {
        return place{ has[i] && row < to.rows ? row_of_tile(tile, warp + i * FEW_WARPS) : -1, row };
    });
}

// ---- many rows

enum {
    MANY_ROWS = 64, MANY_STRIPS = 8, MANY_OUTPUTS = MANY_STRIPS * STRIP_ROWS, MANY_THREADS = 256, MANY_COLUMNS = 16,
    ROW_STRIDE = MANY_ROWS + 4,                                          // of x, for other banks
    PIECE = MANY_OUTPUTS * MANY_COLUMNS / MANY_THREADS,                  // weights that a thread copies: half a column
    X_PIECE = MANY_ROWS * MANY_COLUMNS / MANY_THREADS, THREAD_ROWS = 4, THREAD_OUTPUTS = 8,
};
static_assert(PIECE == STRIP_ROWS / 2 && X_PIECE == 4, "the pieces below");

// The operands of a block of columns, as floats in shared memory.
struct many_stage {
    __align__(16) float weights[MANY_COLUMNS][MANY_OUTPUTS];
    __align__(16) float x[MANY_COLUMNS][ROW_STRIDE];
};

// What a thread copies of each stage, through its registers: 8 weights of a column of strip `warp`, and 4 columns of
// an input row.
template <int dtype> struct many_copier {
    static constexpr int bytes = float_of<dtype>::bytes;
    const unsigned char *weights;
    const float *x;                                  // NULL: the tile does not have the row
    int warp, column, first, row, x_column;          // first: the first of the strip's rows
    uint4 next[bytes / 2];
    float x_next[X_PIECE];

    __device__ __forceinline__ many_copier(const product &p, const block_part &own) {
        const int lane = threadIdx.x % WARP_LANES;
        warp = threadIdx.x / WARP_LANES, column = lane / 2, first = lane % 2 * PIECE;
        const int strip = own.index * MANY_STRIPS + warp;
        const size_t start = strip * STRIP_ROWS < own.rows ? strip * float_strip_bytes(dtype, p.columns) : 0;
        weights = own.w.strips + start + (column * STRIP_ROWS + first) * bytes;
        row = threadIdx.x / (MANY_COLUMNS / X_PIECE), x_column = threadIdx.x % (MANY_COLUMNS / X_PIECE) * X_PIECE;
        x = row < own.tile.count ? float_row(p, row_of_tile(own.tile, row)) : nullptr;
    }
    // Loads what the stage of columns from `start` on needs; `columns`: of the matrix.
    __device__ __forceinline__ void load(int start, int columns) {
#pragma unroll
        for (int i = 0; i < bytes / 2; i++)
            if (start + column < columns)
                next[i] = load_stream(weights + (size_t)start * STRIP_ROWS * bytes + 16 * i);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++)
            x_next[i] = x && start + x_column + i < columns ? x[start + x_column + i] : 0;
    }
    // Stores what `load` has loaded.
    __device__ __forceinline__ void store(many_stage &to) const {
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            to.weights[column][warp * STRIP_ROWS + first + i] =
                float_of<dtype>::load((const unsigned char *)next + i * bytes);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++) to.x[x_column + i][row] = x_next[i];
    }
};

// sums += the first `columns` columns of a stage, for a thread's rows from `row` on and its outputs: from `output` on,
// half of them in each half of the stage's outputs.
static __device__ __forceinline__ void add_products(float (&sums)[THREAD_ROWS * THREAD_OUTPUTS],
                                                    const many_stage &stage, int columns, int output, int row) {
#pragma unroll
    for (int k = 0; k < MANY_COLUMNS; k++) {
        if (k >= columns) break;
        const float4 a = *(const float4 *)(const void *)&stage.weights[k][output],
                     b = *(const float4 *)(const void *)&stage.weights[k][MANY_OUTPUTS / 2 + output],
                     c = *(const float4 *)(const void *)&stage.x[k][row];
        const float w[] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w }, v[] = { c.x, c.y, c.z, c.w };
#pragma unroll
        for (int t = 0; t < THREAD_ROWS; t++)
#pragma unroll
            for (int o = 0; o < THREAD_OUTPUTS; o++)
                sums[t * THREAD_OUTPUTS + o] = __fmaf_rn(w[o], v[t], sums[t * THREAD_OUTPUTS + o]);
    }
}

// A block of threads computes the 128 outputs of 8 strips (blockIdx.y) for tile blockIdx.x, of at most 64 rows: a
// thread 4 rows, and outputs 4 i to 4 i + 3 of both halves. Threads: 256. Equals gemm of csrc/kernels_template.h.
//
// Budget: per thread and column 32 fused multiply-adds and 3 loads of 16 bytes from shared memory: 80% of the peak of
// 32-bit multiply-adds, 50 TFLOPS on an H100.
template <int dtype> static __device__ __forceinline__ void product_many(product p) {
    __shared__ many_stage stage;
    const block_part own = block_part_of<MANY_ROWS>(p, MANY_OUTPUTS);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    many_copier<dtype> copier(p, own);
    const int output = threadIdx.x % 16 * (THREAD_OUTPUTS / 2), own_row = threadIdx.x / 16 * THREAD_ROWS;
    float sums[THREAD_ROWS * THREAD_OUTPUTS] = {};
    copier.load(0, p.columns);
    for (int start = 0; start < p.columns; start += MANY_COLUMNS) {
        if (start) __syncthreads();
        copier.store(stage);
        __syncthreads();
        copier.load(start + MANY_COLUMNS, p.columns);
        add_products(sums, stage, min((int)MANY_COLUMNS, p.columns - start), output, own_row);
    }
    const block_part to = block_part_of<MANY_ROWS>(p, MANY_OUTPUTS);
    finish(p, to, sums, [&](int i) {
        const int t = own_row + i / THREAD_OUTPUTS, o = i % THREAD_OUTPUTS,
                  half = o / (THREAD_OUTPUTS / 2) * (MANY_OUTPUTS / 2),
                  at = to.index * MANY_OUTPUTS + half + output + o % (THREAD_OUTPUTS / 2);
        return place{ t < tile.count && at < to.rows ? row_of_tile(tile, t) : -1, at };
    });
}

#define PRODUCTS(name, dtype) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) product_##name##_few(PRODUCT_PARAMETERS) { \
        product_few<dtype>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) product_##name##_many(PRODUCT_PARAMETERS) { \
        product_many<dtype>({ PRODUCT_ARGUMENTS }); \
    }
PRODUCTS(f32, LLAMAC_F32)
PRODUCTS(f16, LLAMAC_F16)
PRODUCTS(bf16, LLAMAC_BF16)
