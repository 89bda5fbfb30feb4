// SPDX-License-Identifier: MIT
// products_few.cuh - products of few rows with quantized weights, which are bound by reading the weights.
#ifndef LLAMAC_PRODUCTS_FEW_CUH
#define LLAMAC_PRODUCTS_FEW_CUH
#include "epilogue.cuh"
#include "terms.cuh"

// Rows of a tile; threads at most; and shared memory of each warp, which launches.py reserves: a ring of blocks, and
// floats for terms, besides 1/16 of those for their scales.
enum {
    FEW_ROWS = 8, FEW_THREADS = 512,
    RING_BYTES = 4736, WIDE_RING_BYTES = 6784,   // of dtypes whose blocks have 128 columns, and 256
    WARP_TERMS = 2048,
};

// A value as a type, which a function can get as an argument.
template <class T, T x> struct constant { static constexpr T value = x; };

// A warp's blocks of a strip: every `warps`th one. Copies as many of them ahead to shared memory as it has room for, so
// that the memory is busy while the warp multiplies, and before the inputs are ready.
template <int D> struct block_ring {
    static constexpr int bytes = dtype_of<D>::bytes, piece = 16 * (int)WARP_LANES,   // that a warp copies at once
                         all_bytes = dtype_of<D>::parts == 1 ? RING_BYTES : WIDE_RING_BYTES, stages = all_bytes / bytes;
    static_assert(stages > 1 && bytes % 16 == 0, "whole pieces");
    unsigned char *memory;         // of the ring
    const unsigned char *from;     // what the lane copies next
    int left, step, at;            // bytes of the strip from `from` on; to the warp's next block; the oldest stage
    uint32_t place;                // of the lane in a piece

    // strip: its first block; n: its bytes.
    __device__ __forceinline__ block_ring(unsigned char *memory, const unsigned char *strip, int n, int warp, int warps,
                                          int lane)
        : memory(memory), from(strip + warp * bytes + 16 * lane), left(n - warp * bytes - 16 * lane),
          step(warps * bytes), at(0), place(kept(16 * lane)) {
#pragma unroll
        for (int i = 0; i < stages; i++) copy(i * bytes);
    }
    template <int i> __device__ __forceinline__ void copy_pieces(unsigned char *to) {
        copy_async_if<i>((i + piece <= bytes || i + (int)place < bytes) && i < left, to, from);
        if constexpr (i + piece < bytes) copy_pieces<i + piece>(to);
    }
    __device__ __forceinline__ void copy(int stage) {
        copy_pieces<0>(memory + place + stage);
        copy_async_commit();
        from += step, left -= step;
    }
    // The oldest block, which has arrived.
    __device__ __forceinline__ const unsigned char *oldest() const {
        copy_async_wait<stages - 1>();
        __syncwarp();
        return memory + at;
    }
    // Replaces the oldest block, which has been read, by the next one.
    __device__ __forceinline__ void refill() {
        __syncwarp();
        copy(at);
        at = at == (stages - 1) * bytes ? 0 : at + bytes;
    }
};

// What block_terms reads of a block of the inputs, in registers.
template <int form> struct loaded_inputs {
    uint4 words[BLOCK_GROUPS];
    float4 row_sums[2], row_factors[2];

    // operand: the packed inputs of operand row lane / 4; rows: those of input rows 2 q and 2 q + 1.
    template <int D, int own_rows>
    __device__ __forceinline__ void load(const unsigned char *operand, const unsigned char *const (&rows)[2],
                                         const input_layout &layout, int block, int quad) {
        const unsigned char *const codes = operand + block * (unsigned)(BLOCK_GROUPS * group_input_bytes(form));
#pragma unroll
        for (int g = 0; g < BLOCK_GROUPS; g++) {
            if (form == INPUTS_INT16) {
                words[g] = ((const uint4 *)(const void *)codes)[4 * g + quad];
            } else {
                const uint2 x = ((const uint2 *)(const void *)codes)[4 * g + quad];
                words[g] = { x.x, x.y, 0, 0 };
            }
        }
#pragma unroll
        for (int n = 0; n < own_rows; n++) {
            if (dtype_of<D>::info.has_minimums)
                row_sums[n] = ((const float4 *)(const void *)(rows[n] + layout.sums))[block];
            if (form == INPUTS_FAST)
                row_factors[n] = ((const float4 *)(const void *)(rows[n] + layout.factors))[block];
        }
    }
    __device__ __forceinline__ uint4 codes(int g) const { return words[g]; }
    __device__ __forceinline__ float4 sums(int n) const { return row_sums[n]; }
    __device__ __forceinline__ float4 factors(int n) const { return row_factors[n]; }
};

// A warp's part of a product: every `warps`th block of the dtype.
template <int D, int form> struct warp_part {
    const unsigned char *operand, *rows[2];    // see loaded_inputs
    input_layout layout;
    int columns, warps, lane, count, stride;   // count: rows of the tile; stride: of terms, see product_few

    // Computes the terms of blocks [block, end) of the dtype. to: for the terms of this block, shared memory
    // (16, stride); own_rows: see block_terms.
    template <int own_rows>
    __device__ __forceinline__ void multiply(block_ring<D> &ring, int block, int end, unsigned char *memory,
                                             float *to) const {
        using T = dtype_of<D>;
        const int pair = lane / 4, quad = lane % 4, groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS,
                  floats = T::terms * (int)STRIP_ROWS * stride;   // of a block of 128 columns
        value_table<D> table;
        table.keep_in_registers();
        const lane_places<D> places(lane);
        uint32_t place = (uint32_t)((unsigned char *)(to + 2 * pair * stride + 2 * quad) - memory);
        for (; block < end; block += warps, place += 4 * warps * T::parts * floats) {
            float *const own = (float *)(void *)(memory + place);
            const unsigned char *weights = nullptr;
#pragma unroll
            for (int part = 0; part < T::parts; part++) {
                const int at = block * T::parts + part;
                if (part && at * (int)BLOCK_GROUPS >= groups) break;
                loaded_inputs<form> inputs;
                inputs.template load<D, own_rows>(operand, rows, layout, at, quad);
                if (!part) weights = ring.oldest();
                block_weights<D> loaded;
                load_part_of<shared_memory>(loaded, weights, part, groups - block * dtype_of<D>::groups, places);
                block_operands<D> operands;
                decode_block(operands, loaded, table, quad);
                if (part == T::parts - 1) ring.refill();
                float terms[T::terms][4];
                block_terms<D, form, own_rows>(terms, operands, inputs, quad);
#pragma unroll
                for (int i = 0; i < T::terms; i++)
#pragma unroll
                    for (int j = 0; j < 4; j += 3 - own_rows)
                        if (2 * quad + j % 2 < count)
                            own[part * floats + (i * (int)STRIP_ROWS + j / 2) * stride + j % 2] = terms[i][j];
            }
        }
    }
};

// The same for one row of inputs with grids. In the operand B of group g only columns 2 g and 2 g + 1 are not 0: they
// have the inputs of the first and of the second half of the group (q4s, t2: of the group, and none). So the mma of a
// block leave lane 4 p + q with the sums of group q alone, of both halves and of rows 2 p and 2 p + 1. The values
// of codes are a table's plus a grid, which the sum of the inputs multiplies.
template <int D> struct one_row_part {
    using T = dtype_of<D>;
    const unsigned char *inputs;
    input_layout layout;
    int columns, warps, lane;

    // Of blocks [block, end) of the dtype. to: for the terms of this block, shared memory (4, 16).
    __device__ __forceinline__ void multiply(block_ring<D> &ring, int block, int end, unsigned char *memory,
                                              float *to) const {
        const int pair = lane / 4, quad = lane % 4, half = T::spans == 2 ? quad / 2 : 0,
                  group = pair % 2 == half ? pair / 2 : -1,   // whose inputs the lane has in operands B
                  groups = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, whole = groups / (int)BLOCK_GROUPS;
        uint2 b[BLOCK_GROUPS] = {};
        const split_table<D> table;
        lane_places<D, true> places(lane);
        places.keep();
        uint32_t at = kept((uint32_t)((unsigned char *)(to + quad * STRIP_ROWS + 2 * pair) - memory));
        const unsigned char *codes = inputs + block * (unsigned)BLOCK_COLUMNS + 8 * quad;
        const uint32_t *input_sums = (const uint32_t *)(const void *)(inputs + layout.sums) +
                                     block * (unsigned)BLOCK_GROUPS + quad;
        const auto multiply_block = [&](auto is_whole) {
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; g++)
                if (g == group) b[g] = *(const uint2 *)(const void *)(codes + g * GROUP_COLUMNS);
            const uint32_t sums_of_halves = *input_sums;
            block_weights<D> loaded;   // with the scales of group q alone
            load_part<is_whole.value, shared_memory>(
                loaded, ring.oldest(), 0, is_whole.value ? (int)BLOCK_GROUPS : groups % (int)BLOCK_GROUPS, places);
            int sums[4] = { 0, 0, 0, 0 };
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; g++) {
                uint32_t first[4], second[4];
                table.decode(loaded, g, quad, first, second);
                mma_s8(sums, first, { b[g].x, b[g].y });
                if (table.has_both) mma_s8(sums, second, { b[g].x, b[g].y });
            }
            ring.refill();
            int terms[2] = { 0, 0 };
            const int halves[2] = { signed_half(sums_of_halves, 0), signed_half(sums_of_halves, 1) };
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int i = 0; i < T::spans; i++) {
                    const int scale = signed_byte(loaded.scales[i], r), grid = scale & 3,
                              inputs_sum = T::spans == 2 ? halves[i] : halves[0] + halves[1];
                    terms[r] += (sums[2 * r + i] + grid * inputs_sum) * scale;
                }
            *(float2 *)(void *)(memory + at) = { (float)terms[0], (float)terms[1] };
            at += 4 * warps * (unsigned)BLOCK_GROUPS * (unsigned)STRIP_ROWS;
            codes += warps * (unsigned)BLOCK_COLUMNS, input_sums += warps * (unsigned)BLOCK_GROUPS;
        };
        for (; block < min(end, whole); block += warps) multiply_block(constant<bool, true>{});
        if (block < end) multiply_block(constant<bool, false>{});
    }
};

// sum = fma(term, scale, sum) for n terms in ascending order. terms: (n, 16, stride), from the thread's own on; scales:
// (n, stride). The operands of 8 terms are loaded while the 8 before are added, which takes 4 cycles each. The last
// loads are of terms that are there, and unused: a condition would cost a copy of each register.
static __device__ __forceinline__ float sum_of_terms(float sum, const float *terms, const float *scales, int stride,
                                                     int n) {
    enum { CHUNK = 8 };
    float term[2][CHUNK], scale[2][CHUNK];
    const int step = (int)STRIP_ROWS * stride, last = n / CHUNK * CHUNK - CHUNK;   // the last whole chunk
    const auto load = [&](int at, int first) {
        const int from = min(first, last);
        const float *next_term = terms + from * step, *next_scale = scales + from * stride;
#pragma unroll
        for (int i = 0; i < CHUNK; i++, next_term += step, next_scale += stride)
            term[at][i] = *next_term, scale[at][i] = *next_scale;
    };
    const auto add = [&](int at) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum = __fmaf_rn(term[at][i], scale[at][i], sum);
    };
    int i = 0;
    if (last >= 0) {
        load(0, 0);
        for (; i < last; i += 2 * CHUNK) {
            load(1, i + CHUNK);
            add(0);
            load(0, i + 2 * CHUNK);
            add(1);
        }
        if (i == last) {
            add(0);
            i += CHUNK;
        }
    }
#pragma unroll 4
    for (; i < n; i++) sum = __fmaf_rn(terms[i * step], scales[i * stride], sum);
    return sum;
}

// The same for one row of inputs, with a term per block, by the thread of each output: few, so they need no schedule.
static __device__ __forceinline__ void add_few_terms(float &sum, const float *terms, const float *scales, int n) {
#pragma unroll 16
    for (int i = 0; i < n; i++) sum = __fmaf_rn(terms[i * (int)STRIP_ROWS + threadIdx.x], scales[i], sum);
}

// The terms of a pass and their scales, in shared memory. A pass is as many blocks of the dtype as have room.
template <int D> struct pass_terms {
    int block_floats, blocks;     // of a block's terms; of a pass: a multiple of the warps
    float *terms, *scales;        // (terms, 16, stride), and (terms, stride)

    // memory: after the rings; strip_blocks: of the whole strip; shift: log2 of the stride.
    __device__ __forceinline__ pass_terms(unsigned char *memory, int strip_blocks, int warps, int shift)
        : block_floats(dtype_of<D>::parts * dtype_of<D>::terms * (int)STRIP_ROWS << shift),
          blocks(warps * (int)WARP_TERMS / block_floats & -warps), terms((float *)(void *)memory),
          scales(terms + min(blocks, (strip_blocks + warps - 1) & -warps) * block_floats) {}
};

// A block of threads computes the 16 outputs of a strip (blockIdx.y) for tile blockIdx.x, of at most 8 rows. Its warps
// divide the blocks of the dtype and leave their terms in shared memory; then a thread per output adds them up in
// order, as many at a time as fit. Threads: 128, 256 or 512. Dynamic shared memory: _few_shared of launches.py. Equals
// gemm of csrc/kernels_template.h.
//
// Budget, q4_k: a block of 1184 bytes takes a warp 186 instructions for one row and 230 for 2 to 8, where an SM of an
// H100 has 330 issue slots in the time that its share of the memory takes. Limited by instructions; with 8-bit codes by
// the memory. A block of q4 takes 139 instructions for one row, and 346 for 2 to 8. Of the 139, the integer unit of a
// quarter of the SM executes 87, in two cycles each; 56 of them look up codes. An H200's memory takes 250 cycles for
// the block. To keep the memory busy, an SM needs 18 KB in flight: 16 warps have 100 KB.
template <int D, int form, int most> static __device__ __forceinline__ void product_few(product p) {
    using T = dtype_of<D>;
    DYNAMIC_SHARED(memory);
    let_next_start();
    if (most == 1) p.tiles = nullptr;   // launches.py passes NULL; now the compiler knows
    if (p.tiles) wait_for_earlier();
    const block_part own = block_part_of<FEW_ROWS>(p, STRIP_ROWS);
    const row_tile tile = own.tile;
    if (!tile.count) return;
    const int warp = threadIdx.x / WARP_LANES, warps = blockDim.x / WARP_LANES, count = most == 1 ? 1 : tile.count,
              lane = threadIdx.x % WARP_LANES, quad = lane % 4,
              shift = most == 1 ? 0 : (count > 1) + (count > 2) + (count > 4),
              stride = 1 << shift;   // count as a power of two
    constexpr int block_columns = dtype_of<D>::info.block_columns;
    const int blocks = (p.columns + block_columns - 1) / block_columns;
    const size_t strip_bytes = valid_strip_bytes(D, p.columns);
    const unsigned char *const strip = own.w.strips + own.index * strip_bytes;
    const int scales_of_rows = (int)row_scale_bytes(D);
    block_ring<D> ring(memory + warp * block_ring<D>::all_bytes, strip + scales_of_rows,
                       (int)strip_bytes - scales_of_rows, warp, warps, lane);
    const int o = threadIdx.x >> shift, t = threadIdx.x & (stride - 1);   // a thread's own output
    const bool is_summing = o < STRIP_ROWS && t < count;
    const float row_scale = T::info.has_row_scales && is_summing ? ((const float *)(const void *)strip)[o] : 1;
    wait_for_earlier();

    const input_layout layout = input_layout_of(form, p.columns);
    const auto row_of = [&](int t) {   // rows that the tile does not have are its first, and their terms are not kept
        return p.inputs + (size_t)input_row(p, row_of_tile(tile, t < count ? t : 0)) * layout.end;
    };
    const bool is_one = T::is_int8 && (most == 1 || count == 1);
    one_row_part<D> one = { row_of(0), layout, p.columns, warps, lane };
    warp_part<D, form> part = { row_of(lane / 4), { row_of(2 * quad), row_of(2 * quad + 1) }, layout, p.columns, warps,
                                lane, count, stride };
    const pass_terms<D> pass(memory + warps * block_ring<D>::all_bytes, blocks, warps, shift);
    const float *input_scales = (const float *)(const void *)(row_of(t) + layout.scales);
    float sums[1] = { 0 };
    for (int start = 0; start < blocks; start += pass.blocks) {
        const int end = min(blocks, start + pass.blocks), first = start * T::parts * T::terms,
                  last = min(end * T::parts * T::terms, terms_of<D>(p.columns));
        if (start) __syncthreads();
        for (int i = o; i < last - first; i += (int)blockDim.x >> shift)
            copy_async4(&pass.scales[i * stride + t], input_scales + first + i);
        float *const to = pass.terms + warp * pass.block_floats;
        if constexpr (T::is_int8) {
            if (is_one) one.multiply(ring, start + warp, end, memory, to);
            else part.template multiply<2>(ring, start + warp, end, memory, to);
        } else {
            if (most == 1 || count == 1) part.template multiply<1>(ring, start + warp, end, memory, to);
            else part.template multiply<2>(ring, start + warp, end, memory, to);
        }
        copy_async_commit();   // the scales that no refill has committed
        copy_async_wait<0>();
        __syncthreads();
        if (is_summing && (most > 1 || is_one))
            sums[0] = sum_of_terms(sums[0], pass.terms + threadIdx.x, pass.scales + t, stride, last - first);
        else if (is_summing)
            add_few_terms(sums[0], pass.terms, pass.scales, last - first);
    }
    const block_part to = block_part_of<FEW_ROWS>(p, STRIP_ROWS);
    const int row = to.index * STRIP_ROWS + o;
    if (!is_summing || row >= to.rows) return;
    if (T::info.has_row_scales) sums[0] = __fmul_rn(sums[0], row_scale);
    finish(p, to, sums, [&](int) { return place{ row_of_tile(tile, t), row }; });
}
#endif
