// SPDX-License-Identifier: MIT
// simd_scalar.h - the SIMD layer in plain C. It specifies what the layers for AVX2, AVX-512 and NEON must compute,
// bit for bit.
//
// v16 is a vector of 16 floats. The quantized kernels use lines of 16 rows x 4 bytes, accumulators of dot products,
// and block scales; each layer defines these types for its instructions.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <math.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "half.h"
#include "simd_panel_layout.h"

typedef struct { float f[16]; } v16;

// Tuning. Tiles are S strips x T rows; an accumulator is a v16, an int8_acc or an int16_acc.
enum {
    FLOAT_TILE_ACCS = 1,              // most accumulators of a float tile; one has 16 independent chains here
    INT8_TILE_ACCS = 1,               // likewise of a tile with int8 or int16 inputs
    INT16_TILE_ACCS = 1,
    MAX_LIVE_SUMS = 1 << 30,          // more sums than this are spilled while a group is accumulated
    MAX_CARRIED_SUMS = 1 << 30,       // up to this many sums of an int8 tile stay in registers from group to group
    UNPACK_ABOVE_F16 = 4,             // with more rows than this, weights are unpacked once for all of them
    UNPACK_ABOVE_BF16 = 1 << 30,
    UNPACK_ABOVE_NIBBLES = 4,
    UNPACK_ABOVE_BYTES = 4,           // dtypes with 8 bits and int16 inputs; those with fewer bits: FEW_ROWS
};

// No registers to allocate, so unrolling would only make the code larger.
#undef UNROLL
#define UNROLL

// Not inlined: operations that expand to many instructions without hardware would otherwise fill most of the library.
#define NOINLINE static __attribute__((noinline, unused))
// Nor does plain C gain from a copy of each tile per height and dtype.
#undef SPECIALIZED
#define SPECIALIZED NOINLINE
#if defined(LLAMAC_SMALL_KERNELS)
#undef INLINE
#define INLINE static inline __attribute__((unused))
#endif

#define FOR_LANES(expression) v16 r; for (int i = 0; i < 16; i++) r.f[i] = (expression); return r

INLINE v16 v16_set1(float x) { FOR_LANES(x); }
INLINE v16 v16_load(const float *p) { FOR_LANES(p[i]); }
INLINE void v16_store(float *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = a.f[i]; }
// Masked: the first n floats, 0 <= n <= 16. The other lanes are loaded as 0; memory beyond n is not accessed.
INLINE v16 v16_load_n(const float *p, int n) { FOR_LANES(i < n ? p[i] : 0.0f); }
INLINE void v16_store_n(float *p, v16 a, int n) { for (int i = 0; i < n; i++) p[i] = a.f[i]; }

// 16 int8, or 16 e8m0 (a byte e is 2^(e - 128)), as floats: scales.
INLINE v16 v16_load_int8(const uint8_t *p) { FOR_LANES((float)(int8_t)p[i]); }
INLINE v16 v16_load_e8m0(const uint8_t *p) {
    FOR_LANES(f32_from_bits(p[i] < 2 ? 0x200000u << p[i] : (p[i] - 1u) << 23));
}
NOINLINE v16 v16_load_f16(const uint16_t *p) { FOR_LANES(f32_from_f16(p[i])); }
NOINLINE void v16_store_f16(uint16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = f16_from_f32(a.f[i]); }
// bf16 may be loaded in a permuted lane order, whichever is fastest; v16_unpermute restores the order.
INLINE v16 v16_load_bf16_permuted(const uint16_t *p) { FOR_LANES(f32_from_bf16(p[i])); }
INLINE v16 v16_unpermute(v16 a) { return a; }

INLINE v16 v16_add(v16 a, v16 b) { FOR_LANES(a.f[i] + b.f[i]); }
INLINE v16 v16_sub(v16 a, v16 b) { FOR_LANES(a.f[i] - b.f[i]); }
INLINE v16 v16_mul(v16 a, v16 b) { FOR_LANES(a.f[i] * b.f[i]); }
INLINE v16 v16_div(v16 a, v16 b) { FOR_LANES(a.f[i] / b.f[i]); }
// a * b + c and c - a * b, rounded once.
NOINLINE v16 v16_fma(v16 a, v16 b, v16 c) { FOR_LANES(fused_multiply_add(a.f[i], b.f[i], c.f[i])); }
INLINE v16 v16_fma_scalar(v16 a, float b, v16 c) { return v16_fma(a, v16_set1(b), c); }
NOINLINE v16 v16_fnma(v16 a, v16 b, v16 c) { FOR_LANES(fused_multiply_add(-a.f[i], b.f[i], c.f[i])); }
// Of two equal or unordered lanes, max and min return b's.
INLINE v16 v16_max(v16 a, v16 b) { FOR_LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_min(v16 a, v16 b) { FOR_LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_abs(v16 a) { FOR_LANES(f32_from_bits(f32_bits(a.f[i]) & 0x7fffffff)); }
// 0 where x < low, else a; also a where x is NaN.
INLINE v16 v16_zero_below(v16 a, v16 x, v16 low) { FOR_LANES(x.f[i] < low.f[i] ? 0.0f : a.f[i]); }
// a in the first n lanes, b in the others.
INLINE v16 v16_blend_n(v16 a, v16 b, int n) { FOR_LANES(i < n ? a.f[i] : b.f[i]); }
// 2^n for t = n + 1.5 * 2^23 with an integer n from -126 to 127: the low bits of t are n.
INLINE v16 v16_exp2_shifted(v16 t) { FOR_LANES(f32_from_bits((f32_bits(t.f[i]) << 23) + 0x3f800000)); }

// Reductions have one order: fold the upper half onto the lower half, four times.
INLINE float v16_reduce_add(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] += a.f[i + n];
    return a.f[0];
}
INLINE float v16_reduce_max(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] = a.f[i] > a.f[i + n] ? a.f[i] : a.f[i + n];
    return a.f[0];
}
#undef FOR_LANES

// Round to the nearest integer, ties to even, for |x| < 2^15; store as int8 or int16.
INLINE int round_even(float x) { return (int)((x + 0x1.8p23f) - 0x1.8p23f); }
INLINE void v16_store_int8(int8_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)round_even(a.f[i]); }
INLINE void v16_store_int16(int16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = (int16_t)round_even(a.f[i]); }

// ---- q4 and the others with grids: codes of at most 4 bits times int8 inputs
//
// An int8_acc accumulates, for each of 16 rows, the exact dot product over 16 columns, in layers that define
// SIMD_GROUP_SUMS over up to 32. Layers may represent it in any way whose final value is exact, e.g. with an offset
// that the compensation terms of the panel remove.
#define SIMD_GROUP_SUMS

typedef struct { int8_t b[64]; } line;             // 16 rows x 4 bytes
typedef struct { int32_t i[16]; } int8_acc;
typedef struct { int32_t i[16]; } int8_scaled;     // sums of dot products times block scales: exact, below 2^24
typedef struct { int32_t i[16]; } block_scales;    // the scales of 16 rows; 64 bytes in unpacked strips
typedef struct { int8_t b[16]; } lut;              // a codebook
typedef line grid_offsets;                         // s & 3 per row: what the row's grid adds to the codebook

enum { INT8_BIAS = 0 };   // int8_codes returns codes plus this
// The table of codebook[i] + bias.
INLINE lut lut_load(const int8_t *codebook, const int bias) {
    lut t;
    for (int i = 0; i < 16; i++) t.b[i] = (int8_t)(codebook[i] + bias);
    return t;
}
INLINE line line_load(const uint8_t *p) { line x; memcpy(x.b, p, 64); return x; }
INLINE void line_store(uint8_t *p, line x) { memcpy(p, x.b, 64); }
// From the 16 block scales at p.
INLINE grid_offsets grid_offsets_load(const uint8_t *p) {
    grid_offsets g;
    for (int i = 0; i < 64; i++) g.b[i] = p[i / 4] & 3;
    return g;
}
// Decodes half of a line of nibbles, the operand that int8_acc_dot multiplies by input word g (half 0) or g + 1 (half
// 1). Here half 0 is the low nibbles. A layer whose compensation terms account for the grid leaves it out unless
// `unpacked`.
NOINLINE line int8_codes(lut t, line x, grid_offsets grid, const int half, const int unpacked) {
    (void)unpacked;
    for (int i = 0; i < 64; i++) x.b[i] = (int8_t)(t.b[x.b[i] >> 4 * half & 15] + grid.b[i]);
    return x;
}
INLINE block_scales block_scales_load(const uint8_t *p) {
    block_scales s;
    for (int i = 0; i < 16; i++) s.i[i] = (int8_t)p[i];
    return s;
}
INLINE void block_scales_store(uint8_t *p, block_scales s) { memcpy(p, s.i, 64); }
INLINE block_scales block_scales_load_unpacked(const uint8_t *p) { block_scales s; memcpy(s.i, p, 64); return s; }
// The compensation terms of 32 input codes, one per 16: what an accumulator starts from.
INLINE void int8_compensation(const int8_t *x, int32_t terms[2]) { (void)x, terms[0] = terms[1] = 0; }
INLINE int8_acc int8_acc_init(int32_t compensation, grid_offsets grid, const int unpacked) {
    (void)grid, (void)unpacked;
    int8_acc d;
    for (int i = 0; i < 16; i++) d.i[i] = compensation;
    return d;
}
// d += codes times input word `word` of row t; for layers with two rows per accumulator, of rows t and t + 1.
NOINLINE int8_acc int8_acc_dot(int8_acc d, line codes, const int32_t *inputs, const int word, const int T, const int t,
                               const int unpacked) {
    (void)unpacked;
    int8_t x[4];
    memcpy(x, inputs + word_index(word, T, t), 4);
    for (int r = 0; r < 16; r++) for (int i = 0; i < 4; i++) d.i[r] += codes.b[4 * r + i] * x[i];
    return d;
}
// The dot products of the accumulator's r-th input row.
typedef int8_acc int8_row_acc;
INLINE int8_row_acc int8_acc_row(int8_acc d, const int r, const int unpacked) { (void)r, (void)unpacked; return d; }
INLINE int8_scaled int8_scale(int8_row_acc d, block_scales s) {
    int8_scaled w;
    for (int i = 0; i < 16; i++) w.i[i] = d.i[i] * s.i[i];
    return w;
}
INLINE int8_scaled int8_scale_add(int8_scaled w, int8_row_acc d, block_scales s) {
    for (int i = 0; i < 16; i++) w.i[i] += d.i[i] * s.i[i];
    return w;
}
INLINE v16 int8_scaled_to_float(int8_scaled w) { v16 r; for (int i = 0; i < 16; i++) r.f[i] = (float)w.i[i]; return r; }

// ---- other quantized dtypes: codes times int16 inputs
//
// A code line holds 16 rows x 4 columns, one byte per code plus a bias: what the layer's instructions multiply. Bytes
// are unsigned where BYTE_BIAS is 128. Sums start at -bias * (sum of the inputs), so that they are exact products of
// codes without bias.
//
// An int16_acc accumulates, for each of 16 rows, the exact dot product over up to 32 columns. The inputs of 4 columns
// are two words in a form that each layer chooses. A line may be multiplied in INT16_PARTS parts.

enum { BYTE_BIAS = 0, UNPACKED_BIAS = 0, INT16_PARTS = 1, INT16_UNPACKED_LINE_BYTES = 128 };
// 8-bit codes as stored, plus 128, become code + BYTE_BIAS.
INLINE line line_from_bytes(line x) {
    for (int i = 0; i < 64; i++) x.b[i] = (int8_t)((uint8_t)x.b[i] - Q8_OFFSET);
    return x;
}
// The low (half 0) or high nibbles of each byte.
INLINE line line_nibbles(line x, const int half) {
    for (int i = 0; i < 64; i++) x.b[i] = (int8_t)((uint8_t)x.b[i] >> 4 * half & 15);
    return x;
}
// The bits of each byte that are in mask once bit `from` has moved to bit 4; from >= 2.
INLINE line line_move_bits(line x, const int from, const int mask) {
    for (int i = 0; i < 64; i++) x.b[i] = (int8_t)((uint8_t)x.b[i] << 4 >> from & mask);
    return x;
}
INLINE line line_insert_bits(line x, line other, const int from, const int mask) {
    other = line_move_bits(other, from, mask);
    for (int i = 0; i < 64; i++) x.b[i] |= other.b[i];
    return x;
}
INLINE line line_lookup(lut t, line x) {
    for (int i = 0; i < 64; i++) x.b[i] = t.b[x.b[i]];
    return x;
}
// Whether part 0 runs over all lines of a span before part 1, so that T rows need fewer registers at a time. Then
// int16_acc_next_part is called in between.
INLINE int int16_part_major(const int T) { (void)T; return 0; }
typedef struct { int16_t h[64]; } int16_codes;
typedef struct { int32_t i[16]; } int16_acc;
// The operand for line l: x, the code line l & ~1, if l is even, else y, which follows x.
INLINE int16_codes int16_codes_from(line x, line y, const int l, const int part) {
    (void)part;
    int16_codes c;
    for (int i = 0; i < 64; i++) c.h[i] = l & 1 ? y.b[i] : x.b[i];
    return c;
}
// Stores the operand for line l with UNPACKED_BIAS instead of `bias`.
INLINE void int16_codes_unpack(uint8_t *to, line x, line y, const int l, const int bias) {
    int16_codes c = int16_codes_from(x, y, l, 0);
    for (int i = 0; i < 64; i++) c.h[i] = (int16_t)(c.h[i] + UNPACKED_BIAS - bias);
    memcpy(to + l * INT16_UNPACKED_LINE_BYTES, c.h, 128);
}
INLINE int16_codes int16_codes_load_unpacked(const uint8_t *group, const int l, const int part) {
    (void)part;
    int16_codes c;
    memcpy(c.h, group + l * INT16_UNPACKED_LINE_BYTES, 128);
    return c;
}
// Arranges 16 int16 input codes as 8 words.
INLINE void int16_pack_words(const int16_t *x, int32_t *words) { memcpy(words, x, 32); }
// plus[t] - minus[t], or plus[t] if minus is NULL, is the sum of row t's inputs over the span.
INLINE int16_acc int16_acc_init(const int32_t *plus, const int32_t *minus, const int bias, const int T, const int t) {
    (void)T;
    int16_acc d;
    for (int i = 0; i < 16; i++) d.i[i] = -bias * (plus[t] - (minus ? minus[t] : 0));
    return d;
}
INLINE int16_acc int16_acc_next_part(int16_acc d) { return d; }
NOINLINE int16_acc int16_acc_dot(int16_acc d, int16_codes w, const int32_t *inputs, const int l, const int part,
                                 const int T, const int t) {
    (void)part;
    int16_t x[4];
    for (int i = 0; i < 2; i++) memcpy(x + 2 * i, inputs + word_index(2 * l + i, T, t), 4);
    for (int r = 0; r < 16; r++) for (int i = 0; i < 4; i++) d.i[r] += w.h[4 * r + i] * x[i];
    return d;
}
// The dot products of the accumulator's `row`-th input row.
INLINE v16 int16_acc_to_float(int16_acc d, const int T, const int row) {
    (void)T, (void)row;
    v16 r;
    for (int i = 0; i < 16; i++) r.f[i] = (float)d.i[i];
    return r;
}

// ---- quantizing

// x < y ? a : b in each lane; b where x or y is NaN.
INLINE v16 v16_select_less(v16 x, v16 y, v16 a, v16 b) {
    v16 r;
    for (int i = 0; i < 16; i++) r.f[i] = x.f[i] < y.f[i] ? a.f[i] : b.f[i];
    return r;
}
// x - y * z, where y * z is exact: a fused operation gives the same.
INLINE v16 v16_sub_exact_product(v16 x, v16 y, v16 z) { return v16_sub(x, v16_mul(y, z)); }

// A bit for each lane, from the lowest: whether x < y.
INLINE unsigned v16_mask_less(v16 x, v16 y) {
    unsigned mask = 0;
    for (int i = 0; i < 16; i++) mask |= (unsigned)(x.f[i] < y.f[i]) << i;
    return mask;
}

// Lines of 16 rows x 2 int16, in bytes of the order of the machine.
//
// x and y, rounded to nearest even; |x|, |y| < 2^15.
INLINE line line_from_floats(v16 x, v16 y) {
    line to;
    int16_t words[32];
    for (int i = 0; i < 32; i++) words[i] = (int16_t)round_even(i % 2 ? y.f[i / 2] : x.f[i / 2]);
    memcpy(&to, words, sizeof to);
    return to;
}
// x * y / 2^15, rounded to nearest, up in the middle.
INLINE line line_scaled(line x, line y) {
    int16_t a[32], b[32];
    memcpy(a, &x, sizeof a), memcpy(b, &y, sizeof b);
    for (int i = 0; i < 32; i++) a[i] = (int16_t)((a[i] * b[i] + (1 << 14)) >> 15);
    memcpy(&x, a, sizeof x);
    return x;
}
typedef const struct code_cells *cells_lut;   // a table, loaded into registers
INLINE cells_lut cells_lut_load(const struct code_cells *cells) { return cells; }
// For each row, a sum of squares: adds those of the distances of four numbers from their nearest codes. The numbers,
// from x and y, are in units of 1/512 code, and less than 64 codes from 0.
typedef struct { int32_t i[16]; } int16_squares;
INLINE int16_squares squares_zero(void) { return (int16_squares){ { 0 } }; }
NOINLINE int16_squares squares_add_nearest(int16_squares sum, cells_lut t, line x, line y) {
    int16_t words[64];
    memcpy(words, &x, sizeof x), memcpy(words + 32, &y, sizeof y);
    for (int i = 0; i < 64; i++) {
        int p = words[i] >> 7;
        p = p < -128 ? -128 : p > 127 ? 127 : p;
        const int cell = p >> 4 & 15, code = t->code[cell] + (p > t->first[cell]) + (p > t->second[cell]);
        const int distance = words[i] - 256 * t->twice[code];
        sum.i[i % 32 / 2] += distance * distance;
    }
    return sum;
}
INLINE v16 squares_to_floats(int16_squares x) {
    v16 r;
    for (int i = 0; i < 16; i++) r.f[i] = (float)x.i[i];
    return r;
}

// The value of the nearest code to each position. Positions are in units of half a code, and code 0 is at
// CODE_POSITIONS / 2. The codes are `codes` + offset. The value of code j is values[j]; code j is nearest from the
// integer position of its midpoint with code j - 1 on. Positions below 0 count as 0 and those from CODE_POSITIONS - 0.5
// on as that.
typedef struct { float value[CODE_POSITIONS]; } code_table;
typedef const code_table *code_lut;   // a table, loaded into registers
INLINE void code_table_init(code_table *table, struct code_values codes, const int8_t *values, int offset) {
    for (int i = 0, j = 0; i < CODE_POSITIONS; i++) {
        while (j < codes.last && i >= code_start(codes, j + 1, offset)) j++;
        table->value[i] = values[j];
    }
}
INLINE code_lut code_lut_load(const code_table *table) { return table; }
NOINLINE void v16_nearest_codes(code_lut table, const v16 *positions, v16 *values) {
    int cell[64];
    for (int i = 0; i < 64; i++) {
        float p = positions[i / 16].f[i % 16];
        p = p > 0 ? p : 0;
        p = p < (float)CODE_POSITIONS - 0.5f ? p : (float)CODE_POSITIONS - 0.5f;
        cell[i] = (int)p;
    }
    for (int i = 0; i < 64; i++) values[i / 16].f[i % 16] = table->value[cell[i]];
}
#endif
