// SPDX-License-Identifier: MIT
// weights.cuh - strips of quantized matrices (csrc/dtype.h) as operands of mma_s8 (device.cuh).
//
// A warp holds a block of 128 columns of a strip. Lane 4 p + q holds rows 2 p and 2 p + 1 and, of each group, columns
// 8 q to 8 q + 7: in every dtype whole words of few lines, so that a warp reads each line once. As operands, rows 2 p
// and 2 p + 1 are rows p and p + 8 of A, and the columns take the places that inputs.cuh gives those of the inputs.
#ifndef LLAMAC_WEIGHTS_CUH
#define LLAMAC_WEIGHTS_CUH
#include "inputs.cuh"

// What a dtype is, as constants.
template <int D> struct dtype_of {
    static constexpr dtype_info info = dtype_table[D];
    static constexpr int bits = info.code_bits, spans = GROUP_COLUMNS / info.scale_columns,
                         parts = info.block_columns / BLOCK_COLUMNS,   // blocks of 128 columns in one of its own
                         is_int8 = info.input == INPUT_INT8,           // codes have grids
                         has_codebook = info.codebook != nullptr,
                         terms = is_int8 ? (int)BLOCK_GROUPS : 1;      // of a sum, in 128 columns
    // block_bytes(D, groups) of a whole block
    static constexpr int groups = parts * (int)BLOCK_GROUPS, both = 1 + info.has_minimums,
                         super_bytes = info.has_super_scales ? 2 * (int)STRIP_ROWS * both : 0,
                         scale_width = info.scale == SCALE_F16 ? 2 : info.scale != SCALE_NONE,
                         scale_bytes = groups * spans * (int)STRIP_ROWS * scale_width * both,
                         block_lines = (super_bytes + scale_bytes + (int)LINE_BYTES - 1) / (int)LINE_BYTES,
                         bytes = (block_lines + groups * bits) * (int)LINE_BYTES;
};
// Terms of the sum over all columns: see block_terms in terms.cuh.
template <int D> static __device__ __forceinline__ constexpr int terms_of(int columns) {
    return dtype_of<D>::is_int8 ? (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS : blocks_of(columns);
}

// What a lane reads of a block: words of codes as they are, and of each row pair the scales, minimums and super-scales.
template <int D> struct block_weights {
    uint2 codes[BLOCK_GROUPS], more[BLOCK_GROUPS];   // `more`: of 3, 5, 6 and 8 bits
    uint32_t scales[BLOCK_GROUPS * dtype_of<D>::spans], minimums[BLOCK_GROUPS], super[2];
};

// Where a block lies: its 8 bytes of codes, and 2 or 4 bytes of scales.
struct global_memory {
    static __device__ __forceinline__ uint2 load8(const unsigned char *p) { return load_stream8(p); }
    template <class T> static __device__ __forceinline__ T load(const T *p) { return __ldg(p); }
};
struct shared_memory {
    static __device__ __forceinline__ uint2 load8(const unsigned char *p) { return *(const uint2 *)(const void *)p; }
    template <class T> static __device__ __forceinline__ T load(const T *p) { return *p; }
};
template <class Memory, int bytes> static __device__ __forceinline__ uint32_t load_pair(const unsigned char *p) {
    if (bytes == 2) return Memory::load((const uint32_t *)(const void *)p);
    return Memory::load((const uint16_t *)(const void *)p);
}

// Where a lane's parts of a block are, in bytes from the first of their kind on: codes, and scales, minimums and
// super-scales of a pair of rows. own_scales: the scales are those of group lane % 4 alone, as those of group 0.
template <int D, bool own_scales = false> struct lane_places {
    using T = dtype_of<D>;
    static constexpr int scale_bytes = T::info.scale == SCALE_F16 ? 2 : 1;
    uint32_t codes, more, scales;
    int pair, quad;

    __device__ __forceinline__ explicit lane_places(int lane) : pair(lane / 4), quad(lane % 4) {
        codes = 8 * pair + (T::bits == 8 ? 2 * quad : T::bits < 4 ? quad / 2 : quad) * LINE_BYTES;
        more = 8 * pair + (T::bits == 8   ? 2 * quad + 1
                           : T::bits == 3 ? 2
                           : T::bits == 5 ? 4
                                          : 4 + quad / 2) * LINE_BYTES;
        scales = 2 * scale_bytes * pair + (own_scales ? quad * T::spans * (int)span_scale_bytes(D) : 0);
    }
    // Keeps the places in registers during a loop.
    __device__ __forceinline__ void keep() {
        codes = kept(codes), scales = kept(scales);
        if (T::bits != 4 && T::bits != 2) more = kept(more);
    }
};

// Loads the groups from `first` on of a block of the dtype at `start`, which has `all` groups. full: whether it has as
// many as it can have, so that its parts are at constant places.
template <bool full, class Memory, int D, bool own_scales>
static __device__ __forceinline__ void load_part(block_weights<D> &to, const unsigned char *start, int first, int all,
                                                 const lane_places<D, own_scales> &own) {
    using T = dtype_of<D>;
    const int groups = full ? (int)BLOCK_GROUPS : min((int)BLOCK_GROUPS, all - first);
    const unsigned char *const codes = start + block_scale_bytes(D, all) + first * group_code_bytes(D),
                        *const own_codes = codes + own.codes, *const more_codes = codes + own.more;
#pragma unroll
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        to.codes[g] = to.more[g] = { 0, 0 };
        if (!full && g >= groups) continue;
        to.codes[g] = Memory::load8(own_codes + g * group_code_bytes(D));
        if (T::bits != 4 && T::bits != 2) to.more[g] = Memory::load8(more_codes + g * group_code_bytes(D));
    }
    constexpr int bytes = lane_places<D, own_scales>::scale_bytes;
    const unsigned char *const scales = start + scales_offset(D) + first * T::spans * span_scale_bytes(D) + own.scales,
                        *const minimums = start + minimums_offset(D, all) + first * span_scale_bytes(D) + own.scales;
#pragma unroll
    for (int i = 0; i < (own_scales ? 1 : (int)BLOCK_GROUPS) * T::spans; i++) {
        const bool is_there = full || (own_scales ? own.quad * T::spans + i : i) < groups * T::spans;
        if (T::info.scale == SCALE_NONE) to.scales[i] = 0x0101;   // t2: 1
        else to.scales[i] = is_there ? load_pair<Memory, bytes>(scales + i * span_scale_bytes(D)) : 0;
    }
#pragma unroll
    for (int i = 0; i < BLOCK_GROUPS && T::info.has_minimums; i++)
        to.minimums[i] = full || i < groups ? load_pair<Memory, bytes>(minimums + i * span_scale_bytes(D)) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (T::info.has_super_scales && i <= T::info.has_minimums)
            to.super[i] = load_pair<Memory, 2>(start + 2 * STRIP_ROWS * i + 4 * own.pair);
}

// Loads part `part` of 128 columns of a block of the dtype at `start`, which has `all` groups. Groups that a last block
// does not have become zeros: their inputs are 0, so they add 0 to the terms, which changes nothing (a term is never
// -0).
template <class Memory, int D>
static __device__ __forceinline__ void load_part_of(block_weights<D> &to, const unsigned char *start, int part, int all,
                                                    const lane_places<D> &own) {
    constexpr int most = dtype_of<D>::parts * (int)BLOCK_GROUPS;
    const int first = part * (int)BLOCK_GROUPS;
    if (all >= most) load_part<true, Memory>(to, start, first, most, own);
    else load_part<false, Memory>(to, start, first, all, own);
}
// Loads block `block` of 128 columns of a strip.
template <int D>
static __device__ __forceinline__ void load_block(block_weights<D> &to, const unsigned char *strip, int columns,
                                                  int block, int lane) {
    constexpr int parts = dtype_of<D>::parts, own = parts * (int)BLOCK_GROUPS;
    const int at = block / parts, all = (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS - at * own;
    const unsigned char *const start = strip + row_scale_bytes(D) + at * (unsigned)block_bytes(D, own);
    load_part_of<global_memory>(to, start, block % parts, all, lane_places<D>(lane));
}

// A sum of row o of a strip times its row scale, if the dtype has them.
template <int D>
static __device__ __forceinline__ float times_row_scale(const unsigned char *strip, int o, float sum) {
    return dtype_of<D>::info.has_row_scales ? __fmul_rn(sum, ((const float *)(const void *)strip)[o]) : sum;
}

// ---- codes

// Extract a half or a byte of a word by a multiplication: where codes are looked up, the multiplier has time to spare,
// and the unit for shifts has none.
static __device__ __forceinline__ uint32_t high_half(uint32_t x) { return __dp2a_lo(x, 0x0100u, 0u); }
static __device__ __forceinline__ int signed_half(uint32_t x, int half) { return __dp2a_lo((int)x, 1 << 8 * half, 0); }
static __device__ __forceinline__ int signed_byte(uint32_t x, int byte) { return __dp4a((int)x, 1 << 8 * byte, 0); }

// The numbers of a codebook; of dtypes with grids plus 128, so that adding a grid carries nothing into the next byte.
template <int D> struct value_table {
    uint32_t words[4], places = 0x32103210;
    __device__ __forceinline__ value_table() : words{} {
#pragma unroll
        for (int i = 0; i < 16 && dtype_of<D>::has_codebook; i++)
            words[i / 4] |= (uint32_t)(uint8_t)(dtype_of<D>::info.codebook[i] + 128 * dtype_of<D>::is_int8)
                            << 8 * (i % 4);
    }
    // An instruction can have only one constant as an operand, so the compiler, if it knew all words, would copy the
    // others into registers for each look-up.
    __device__ __forceinline__ void keep_in_registers() {
        words[0] = kept(words[0]), words[2] = kept(words[2]), places = kept(places);
    }
    // Eight bytes: byte i is number (nibbles >> 4 i) % 16.
    __device__ __forceinline__ uint2 look_up(uint32_t nibbles) const {
        const uint32_t low = nibbles & 0x77777777, half = (nibbles >> 1 & 0x44444444) | places;   // of the table
        const auto four = [&](uint32_t low, uint32_t half) {
            return choose_bytes(choose_bytes(words[0], words[1], low), choose_bytes(words[2], words[3], low), half);
        };
        return { four(low, half), four(high_half(low), high_half(half)) };
    }
};

// The codes of group g of a block, of rows 2 p and 2 p + 1: those of fewer than 4 bits as nibbles.
template <int D>
static __device__ __forceinline__ void nibbles_of(const block_weights<D> &w, int g, int quad, uint32_t (&words)[2]) {
    constexpr int bits = dtype_of<D>::bits;
    const uint32_t more[2] = { w.more[g].x, w.more[g].y };
    words[0] = w.codes[g].x, words[1] = w.codes[g].y;
#pragma unroll
    for (int r = 0; r < 2 && bits < 4; r++) {   // nibble_line of csrc/kernels_int8.h
        words[r] = words[r] >> 2 * (quad % 2) & 0x33333333;
        if (bits == 3) words[r] |= (more[r] >> quad & 0x11111111) << 2;
    }
}

// The numbers of a codebook as sums of two, which take fewer instructions to look up: mma_s8 adds them up. Of 16
// numbers the first 8 are negative and the others are not, so the sign of a byte that is looked up is -1 or 0. One
// summand is number n, or -1 if n is 8 or more; the other is 0, or in that case the number plus 1. Codes of fewer bits
// need only the first.
template <int D> struct split_table {
    using T = dtype_of<D>;
    static constexpr bool has_both = T::bits == 4;
    uint32_t words[4] = {};
    __device__ __forceinline__ split_table() {
#pragma unroll
        for (int i = 0; i < 16; i++)
            words[i / 4] |= (uint32_t)(uint8_t)(T::info.codebook[i] + (has_both && i >= 8)) << 8 * (i % 4);
        words[0] = kept(words[0]), words[2] = kept(words[2]);   // as in value_table
    }
    static constexpr bool is_split() {
        for (int i = 0; i < 16 && has_both; i++)
            if ((T::info.codebook[i] < 0) != (i < 8)) return false;
        return true;
    }
    // The codes of group g as operands A.
    __device__ __forceinline__ void decode(const block_weights<D> &w, int g, int quad, uint32_t (&first)[4],
                                           uint32_t (&second)[4]) const {
        static_assert(is_split(), "numbers of a codebook in ascending order, half of them negative");
        uint32_t nibbles[2];
        nibbles_of<D>(w, g, quad, nibbles);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t other = nibbles[r] ^ 0x88888888;
                first[r + 2 * half] = choose_bytes(words[0], words[1], half ? high_half(nibbles[r]) : nibbles[r]);
                if (has_both) second[r + 2 * half] = choose_bytes(words[2], words[3], half ? high_half(other) : other);
            }
    }
};

// The codes of group g of a block: the operand A. Those of dtypes with grids are sums with them.
template <int D>
static __device__ __forceinline__ void decode_group(const block_weights<D> &w, const value_table<D> &table,
                                                    int g, int quad, uint32_t (&a)[4]) {
    using T = dtype_of<D>;
    constexpr int bits = T::bits;
    const uint32_t more[2] = { w.more[g].x, w.more[g].y };
    uint32_t words[2];
    nibbles_of<D>(w, g, quad, words);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t first = words[r], second = more[r];   // columns 8 q to 8 q + 3, and the next four
        if (T::has_codebook) {
            const uint2 found = table.look_up(words[r]);
            first = found.x, second = found.y;   // in the order of INPUTS_INT8
            if (!T::is_int8) {
                first = __byte_perm(found.x, found.y, 0x6420), second = __byte_perm(found.x, found.y, 0x7531);
            } else {
                const uint32_t scales = T::spans == 2 && quad >= 2 ? w.scales[2 * g + 1] : w.scales[T::spans * g],
                               grid = (scales >> 8 * r & 3) * 0x01010101;
                first = (first + grid) ^ 0x80808080, second = (second + grid) ^ 0x80808080;
            }
        } else if (bits == 8) {
            first ^= 0x80808080, second ^= 0x80808080;
        } else {
            uint32_t high[2] = { 0, 0 };   // bits 4 and up of each column's code
            if (bits == 5) {
                const uint32_t x = more[r] >> 2 * quad;
                high[0] = x << 4 & 0x10101010, high[1] = x << 3 & 0x10101010;
            }
            if (bits == 6) {
                const uint32_t x = more[r] >> quad % 2 * 4;
                high[0] = x << 4 & 0x30303030, high[1] = x << 2 & 0x30303030;
            }
            first = (words[r] & 0x0f0f0f0f) | high[0], second = (words[r] >> 4 & 0x0f0f0f0f) | high[1];
            if (T::info.offset) {
                const uint32_t offset = T::info.offset * 0x01010101u;
                first = ((first | 0x80808080) - offset) ^ 0x80808080;
                second = ((second | 0x80808080) - offset) ^ 0x80808080;
            }
        }
        a[r] = first, a[2 + r] = second;
    }
}

// ---- scales, of the two rows

template <int kind> static __device__ __forceinline__ void to_floats(uint32_t pair, float (&to)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (kind == SCALE_F16) to[r] = f16_to_f32((uint16_t)(pair >> 16 * r));
        else if (kind == SCALE_INT8)   // 2^23 + 128 + number, without a slow conversion
            to[r] = __fsub_rn(__uint_as_float(__byte_perm(pair ^ 0x8080, 0x4b000000, 0x7640 + r)), 0x1.0001p23f);
        else {
            const uint32_t e = pair >> 8 * r & 255;   // 2^(e - 128), of which the first two are subnormal
            to[r] = __uint_as_float(e < 2 ? 0x200000u << e : (e - 1) << 23);
        }
    }
}

// A block as it is multiplied: operands A, and per span or group the factors S and M (dtype.h, S without the row scale)
// of the two rows. With grids, S is an integer.
template <int D> struct block_operands {
    uint32_t a[BLOCK_GROUPS][4];
    float scales[BLOCK_GROUPS * dtype_of<D>::spans][2], minimums[BLOCK_GROUPS][2];
    int integers[BLOCK_GROUPS * dtype_of<D>::spans][2];
};

template <int D>
static __device__ __forceinline__ void decode_block(block_operands<D> &to, const block_weights<D> &w,
                                                    const value_table<D> &table, int quad) {
    using T = dtype_of<D>;
    float super[2][2];
    if (T::info.has_super_scales) to_floats<SCALE_F16>(w.super[0], super[0]);
    if (T::info.has_super_scales && T::info.has_minimums) to_floats<SCALE_F16>(w.super[1], super[1]);
#pragma unroll
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        decode_group(w, table, g, quad, to.a[g]);
#pragma unroll
        for (int i = g * T::spans; i < (g + 1) * T::spans; i++) {
            to_floats<T::info.scale>(w.scales[i], to.scales[i]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                to.integers[i][r] = (int8_t)(w.scales[i] >> 8 * r);
                if (T::info.has_super_scales) to.scales[i][r] = __fmul_rn(super[0][r], to.scales[i][r]);
            }
        }
        if (!T::info.has_minimums) continue;
        to_floats<T::info.scale>(w.minimums[g], to.minimums[g]);
#pragma unroll
        for (int r = 0; r < 2 && T::info.has_super_scales; r++)
            to.minimums[g][r] = __fmul_rn(__fsub_rn(0, super[1][r]), to.minimums[g][r]);
    }
}
#endif
