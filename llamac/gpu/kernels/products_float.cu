// SPDX-License-Identifier: MIT
// products_float.cu - products with f32, f16 and bf16. Each output is one chain of fused multiply-adds over ascending
// columns, in one thread: no other order gives its bits.
#include "epilogue.cuh"

template <int dtype> struct float_of {
    static constexpr int bytes = dtype == LLAMAC_F32 ? 4 : 2;
    // Number i of those that start at `from`.
    static __device__ __forceinline__ float number(const uint4 *from, int i) {
        const uint32_t word = ((const uint32_t *)from)[i * bytes / 4];
        if (dtype == LLAMAC_F32) return __uint_as_float(word);
        if (dtype == LLAMAC_F16) return f16_to_f32((uint16_t)(word >> 16 * (i % 2)));
        return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
    }
};
static __device__ __forceinline__ const float *float_row(const product &p, int row) {
    return (const float *)(const void *)p.inputs + (size_t)input_row(p, row) * p.columns;
}

// ---- few rows

enum {
    FEW_ROWS = 8, FEW_STRIPS = 2, FEW_COLUMNS = 96,   // rows of a tile; strips of a block; columns of a stage
    FEW_STAGES = 3,                                   // in shared memory: multiplied, multiplied next, being written
    MULTIPLYING_WARPS = 2, WARP_ROWS = FEW_ROWS / MULTIPLYING_WARPS,
    // The other warps bring operands: each a part of a strip of all stages, and one or two rows of x.
    BRINGING_WARPS = 6, BROUGHT_ROWS = (FEW_ROWS + BRINGING_WARPS - 1) / BRINGING_WARPS,
    FEW_THREADS = (MULTIPLYING_WARPS + BRINGING_WARPS) * (int)WARP_LANES,
};

// A stage as it is multiplied. The weights of an output lie side by side, in ascending columns. Rows that are an odd
// number of 16 bytes apart, and halves of strips that are `skew` further: of the lanes that read float4 of neighboring
// outputs, and of those that write a word of each output of a few columns, none meet in a bank.
template <int dtype> struct few_stage {
    static constexpr int columns = 512 / (STRIP_ROWS * float_of<dtype>::bytes),   // that a warp reads at once
                         skew = columns, row_words = FEW_COLUMNS + 4, strip_words = STRIP_ROWS * row_words + skew;
    float weights[FEW_STRIPS * strip_words];
    float x[FEW_ROWS][FEW_COLUMNS];

    // Where the weights of an output of a strip begin, in words.
    static __device__ __forceinline__ int start_of(int strip, int output) {
        return strip * strip_words + output * row_words + output / (STRIP_ROWS / 2) * skew;
    }
};

// All warps of a block arrive, each where it is: a barrier counts warps, whatever they do in between.
static __device__ __forceinline__ void stage_barrier() { __syncthreads(); }

// What a lane brings of a stage, on its way to registers while stages before are multiplied: pieces of 16 bytes of
// weights, and numbers of rows of x.
template <int dtype> struct few_weights {
    using stage = few_stage<dtype>;
    static constexpr int bytes = float_of<dtype>::bytes,
                         pieces_n = FEW_STRIPS * FEW_COLUMNS / (stage::columns * BRINGING_WARPS),
                         stage_bytes = FEW_COLUMNS * STRIP_ROWS * bytes;
    uint4 pieces[pieces_n];

    // from: the lane's first piece, of `left` bytes of the strip.
    __device__ __forceinline__ void load(const unsigned char *from, int left) {
#pragma unroll
        for (int i = 0; i < pieces_n; i++)
            if (i * 512 < left) pieces[i] = load_stream(from + i * 512);
    }
    // to: where the lane's first weight belongs.
    __device__ __forceinline__ void store(float *to) const {
#pragma unroll
        for (int i = 0; i < pieces_n; i++)
#pragma unroll
            for (int output = 0; output < 16 / bytes; output++)
                to[output * stage::row_words + i * stage::columns] = float_of<dtype>::number(&pieces[i], output);
    }
};
struct few_numbers {
    float numbers[BROUGHT_ROWS][FEW_COLUMNS / WARP_LANES];

    // rows: the lane's first number of each row that the warp brings, or NULL; columns: left after `start`.
    __device__ __forceinline__ void load(const float *const (&rows)[BROUGHT_ROWS], int start, int columns) {
#pragma unroll
        for (int r = 0; r < BROUGHT_ROWS; r++)
#pragma unroll
            for (int i = 0; i < FEW_COLUMNS / WARP_LANES; i++)
                if (rows[r] && i * WARP_LANES < columns) numbers[r][i] = rows[r][start + i * WARP_LANES];
    }
    __device__ __forceinline__ void store(float *to, const float *const (&rows)[BROUGHT_ROWS]) const {
#pragma unroll
        for (int r = 0; r < BROUGHT_ROWS; r++)
#pragma unroll
            for (int i = 0; i < FEW_COLUMNS / WARP_LANES; i++)
                if (rows[r]) to[r * BRINGING_WARPS * FEW_COLUMNS + i * WARP_LANES] = numbers[r][i];
    }
};

// Writes stage i while stage i - 2 is multiplied, and loads the weights `ahead` stages after it, and x, which is in the
// L2 cache, x_ahead stages after it. warp: of those that bring operands.
template <int dtype>
static __device__ __forceinline__ void bring_operands(few_stage<dtype> (&stages)[FEW_STAGES], const product &p,
                                                      const block_part &own, int warp, int lane) {
    using weights = few_weights<dtype>;
    constexpr int ahead = dtype == LLAMAC_F32 ? 4 : 8, x_ahead = 2,
                  pieces = STRIP_ROWS * weights::bytes / 16,   // of a column
        words = sizeof(few_stage<dtype>) / 4;
    static_assert(ahead % x_ahead == 0, "a stage's operands are always in the same registers");
    const int strip = warp % FEW_STRIPS, first = warp / FEW_STRIPS * weights::pieces_n,   // piece of the strip
        index = own.index * FEW_STRIPS + strip, n = (p.columns + FEW_COLUMNS - 1) / FEW_COLUMNS,
        at = first * 512 + 16 * lane;
    const size_t strip_bytes = float_strip_bytes(dtype, p.columns);
    const unsigned char *from = own.w.strips + index * strip_bytes + at;
    int left = index * STRIP_ROWS < own.rows ? (int)strip_bytes - at : 0;
    const float *rows[BROUGHT_ROWS];
#pragma unroll
    for (int r = 0; r < BROUGHT_ROWS; r++) {
        const int row = warp + r * BRINGING_WARPS;
        rows[r] = row < own.tile.count ? float_row(p, own.tile.first + row) + lane : nullptr;
    }
    weights next[ahead] = {};
    few_numbers next_x[x_ahead] = {};
    const auto load = [&](weights &to) {   // the stage after the last one that was loaded
        to.load(from, left);
        from += weights::stage_bytes, left -= weights::stage_bytes;
    };
    const auto load_x = [&](few_numbers &to, int i) {
        to.load(rows, i * FEW_COLUMNS, p.columns - i * FEW_COLUMNS - lane);
    };
#pragma unroll
    for (int i = 0; i < x_ahead; i++) load_x(next_x[i], i);
#pragma unroll
    for (int i = 0; i < ahead; i++) load(next[i]);
    float *const to = stages[0].weights + lane / pieces + first * few_stage<dtype>::columns +
        few_stage<dtype>::start_of(strip, lane % pieces * (16 / weights::bytes)),
                *const x_to = stages[0].x[warp] + lane;
    for (int start = 0, slot = 0; start <= n; start += ahead) {
#pragma unroll
        for (int k = 0; k < ahead; k++) {
            const int i = start + k;
            if (i > n) break;
            if (i < n) {
                next[k].store(to + slot * words);
                load(next[k]);
                next_x[k % x_ahead].store(x_to + slot * words, rows);
                load_x(next_x[k % x_ahead], i + x_ahead);
            }
            if (i) stage_barrier();   // with stage i - 1 multiplied from here on, stage i is there
            slot = slot + 1 < FEW_STAGES ? slot + 1 : 0;
        }
    }
}

// Operands of a chunk of columns, in registers.
template <int rows> struct few_chunk {
    static constexpr int columns = rows == 1 ? 16 : 8;
    float4 w[columns / 4], x[rows][columns / 4];

    // weights: the lane's of the first column; inputs: that column of the warp's first row.
    __device__ __forceinline__ void load(const float *weights, const float *inputs) {
#pragma unroll
        for (int k = 0; k < columns / 4; k++) {
            w[k] = ((const float4 *)(const void *)weights)[k];
#pragma unroll
            for (int r = 0; r < rows; r++)
                x[r][k] = ((const float4 *)(const void *)(inputs + r * MULTIPLYING_WARPS * FEW_COLUMNS))[k];
        }
    }
    __device__ __forceinline__ void multiply(float (&sums)[WARP_ROWS], int n = columns) const {
#pragma unroll
        for (int k = 0; k < columns; k++) {
            if (k >= n) break;
#pragma unroll
            for (int r = 0; r < rows; r++)
                sums[r] = __fmaf_rn(element(w[k / 4], k % 4), element(x[r][k / 4], k % 4), sums[r]);
        }
    }
};

// sums[r] = the weights of the lane's output times row `warp` + 2 r of the tile.
template <int rows, int dtype>
static __device__ __forceinline__ void multiply_stages(float (&sums)[WARP_ROWS],
                                                       const few_stage<dtype> (&stages)[FEW_STAGES], int all_columns,
                                                       int warp, int lane) {
    using chunk = few_chunk<rows>;
    constexpr int chunks = FEW_COLUMNS / chunk::columns, words = sizeof(few_stage<dtype>) / 4;
    static_assert(chunks % 2 == 0, "the first chunk of each stage is in the same registers");
    const float *const first_w = stages[0].weights + few_stage<dtype>::start_of(lane / STRIP_ROWS, lane % STRIP_ROWS),
                *const first_x = stages[0].x[warp];
    chunk next[2];
    for (int start = 0, slot = 0; start < all_columns; start += FEW_COLUMNS) {
        stage_barrier();   // from here on this stage and the next are there, and the last one may be written
        const float *const w = first_w + slot * words, *const x = first_x + slot * words;
        if (!start) next[0].load(w, x);
        const int columns = all_columns - start;
        if (columns < FEW_COLUMNS) {
            for (int k = 0; k < columns; k += chunk::columns) {
                if (k) next[0].load(w + k, x + k);
                next[0].multiply(sums, columns - k);
            }
            return;
        }
        slot = slot + 1 < FEW_STAGES ? slot + 1 : 0;
#pragma unroll
        for (int i = 0; i < chunks; i++) {
            chunk &to = next[(i + 1) % 2];
            if (i + 1 < chunks) to.load(w + (i + 1) * chunk::columns, x + (i + 1) * chunk::columns);
            else to.load(first_w + slot * words, first_x + slot * words);
            next[i % 2].multiply(sums);
        }
    }
}

// A block of threads computes the 32 outputs of two strips (blockIdx.y) for tile blockIdx.x, of at most 8 rows: warp 0
// rows 0, 2, 4 and 6, and warp 1 the others, a lane each output. The other warps bring the operands as f32. Threads:
// 256. Equals gemm of csrc/kernels_template.h.
//
// Budget: a step of the chains takes 4.2 cycles, so n columns take at least 2.2 ns * n on an H100; its memory brings
// the 16-bit weights of 4096 rows in 2.6 ns * n. So nothing but the steps may take time. Per column, a warp that
// multiplies one row issues 1.8 instructions, one that multiplies 4 rows 5.6; shared memory is busy for 2.2 cycles with
// 1 row, 5 with 8. In a stage, 400 cycles of steps, each bringing warp issues 130 instructions. A load takes 2.3 us if
// all multiprocessors read at 2 TB/s, so 48 KB of weights per block are on their way.
template <int dtype> static __device__ __forceinline__ void product_few(product p) {
    __shared__ __align__(16) few_stage<dtype> stages[FEW_STAGES];
    constexpr int outputs_n = (int)FEW_STRIPS * (int)STRIP_ROWS;
    const block_part own = block_part_of<outputs_n, FEW_ROWS>(p);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    if (warp >= MULTIPLYING_WARPS) {
        bring_operands(stages, p, own, warp - MULTIPLYING_WARPS, lane);
        return;
    }
    float sums[WARP_ROWS] = {};
    const int rows = (tile.count - warp + MULTIPLYING_WARPS - 1) / MULTIPLYING_WARPS;
    if (rows > 2) multiply_stages<WARP_ROWS>(sums, stages, p.columns, warp, lane);
    else if (rows == 2) multiply_stages<2>(sums, stages, p.columns, warp, lane);
    else if (rows == 1) multiply_stages<1>(sums, stages, p.columns, warp, lane);
    else
        for (int i = 0; i < p.columns; i += FEW_COLUMNS) stage_barrier();
    const block_part to = block_part_of<outputs_n, FEW_ROWS>(p);
    const int row = to.index * outputs_n + lane;
    finish(p, to, sums, [&](int i) {
        const int t = warp + i * MULTIPLYING_WARPS;
        return place{ t < tile.count && row < to.rows ? tile.first + t : -1, row };
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

// A block of threads computes the 128 outputs of 8 strips (blockIdx.y) for tile blockIdx.x, of at most 64 rows: a
// thread 4 rows, and outputs 4 i to 4 i + 3 of both halves. Threads: 256. Equals gemm of csrc/kernels_template.h.
//
// Budget: per thread and column 32 fused multiply-adds and 3 loads of 16 bytes from shared memory: 80% of the peak of
// 32-bit multiply-adds, 50 TFLOPS on an H100.
template <int dtype> static __device__ __forceinline__ void product_many(product p) {
    __shared__ __align__(16) float weights[MANY_COLUMNS][MANY_OUTPUTS], x[MANY_COLUMNS][ROW_STRIDE];
    const block_part own = block_part_of<MANY_OUTPUTS, MANY_ROWS>(p);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    // what the thread copies: 8 weights of a column of a strip, and 4 columns of a row
    constexpr int bytes = float_of<dtype>::bytes;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES, column = lane / 2,
              first = lane % 2 * PIECE, strip = own.index * MANY_STRIPS + warp;
    const size_t start_of_strip = strip * STRIP_ROWS < own.rows ? strip * float_strip_bytes(dtype, p.columns) : 0;
    const unsigned char *from = own.w.strips + start_of_strip + (column * STRIP_ROWS + first) * bytes;
    const int row = threadIdx.x / (MANY_COLUMNS / X_PIECE), x_column = threadIdx.x % (MANY_COLUMNS / X_PIECE) * X_PIECE;
    const float *x_from = row < tile.count ? float_row(p, tile.first + row) : nullptr;
    uint4 next[bytes / 2];
    float x_next[X_PIECE];
    const auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < bytes / 2; i++)
            if (start + column < p.columns)
                next[i] = load_stream(from + (size_t)start * STRIP_ROWS * bytes + 16 * i);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++)
            x_next[i] = x_from && start + x_column + i < p.columns ? x_from[start + x_column + i] : 0;
    };
    // what it computes
    const int output = threadIdx.x % 16 * (THREAD_OUTPUTS / 2), own_row = threadIdx.x / 16 * THREAD_ROWS;
    float sums[THREAD_ROWS * THREAD_OUTPUTS] = {};
    load(0);
    for (int start = 0; start < p.columns; start += MANY_COLUMNS) {
        if (start) __syncthreads();
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            weights[column][warp * STRIP_ROWS + first + i] = float_of<dtype>::number(next, i);
#pragma unroll
        for (int i = 0; i < X_PIECE; i++) x[x_column + i][row] = x_next[i];
        __syncthreads();
        load(start + MANY_COLUMNS);
        const int columns = min((int)MANY_COLUMNS, p.columns - start);
#pragma unroll
        for (int k = 0; k < MANY_COLUMNS; k++) {
            if (k >= columns) break;
            const float4 a = *(const float4 *)(const void *)&weights[k][output],
                         b = *(const float4 *)(const void *)&weights[k][MANY_OUTPUTS / 2 + output],
                         c = *(const float4 *)(const void *)&x[k][own_row];
            const float w[] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w }, v[] = { c.x, c.y, c.z, c.w };
#pragma unroll
            for (int t = 0; t < THREAD_ROWS; t++)
#pragma unroll
                for (int o = 0; o < THREAD_OUTPUTS; o++)
                    sums[t * THREAD_OUTPUTS + o] = __fmaf_rn(w[o], v[t], sums[t * THREAD_OUTPUTS + o]);
        }
    }
    const block_part to = block_part_of<MANY_OUTPUTS, MANY_ROWS>(p);
    finish(p, to, sums, [&](int i) {
        const int t = own_row + i / THREAD_OUTPUTS, o = i % THREAD_OUTPUTS,
                  half = o / (THREAD_OUTPUTS / 2) * (MANY_OUTPUTS / 2),
                  at = to.index * MANY_OUTPUTS + half + output + o % (THREAD_OUTPUTS / 2);
        return place{ t < tile.count && at < to.rows ? tile.first + t : -1, at };
    });
}

#define PRODUCTS(name, dtype) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2) product_##name##_few(PRODUCT_PARAMETERS) { \
        product_few<dtype>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) product_##name##_many(PRODUCT_PARAMETERS) { \
        product_many<dtype>({ PRODUCT_ARGUMENTS }); \
    }
PRODUCTS(f32, LLAMAC_F32)
PRODUCTS(f16, LLAMAC_F16)
PRODUCTS(bf16, LLAMAC_BF16)
