// SPDX-License-Identifier: MIT
// simd_scalar.h - the vector vocabulary in plain C: 16 floats at a time, and lines of 16 rows x 4 bytes. It defines what every other
// vocabulary must compute.
#ifndef LLAMAC_SIMD_H
#define LLAMAC_SIMD_H
#include <math.h>
#include <string.h>
#include "common.h"
#include "dtype.h"
#include "half.h"
#include "simd_rows.h"

typedef struct { float f[16]; } v16;
enum {
    SUMS_IN_FLIGHT = 1,          // vectors of sums that a tile keeps in registers: here 16 independent sums are enough
    LINES_IN_FLIGHT = 1, LINES_IN_FLIGHT_Q8 = 1,   // strips x rows that are multiplied together, of q4 and of q8
    SUMS_KEPT = 1 << 30,         // so many sums stay in registers beside those in the making
    SUMS_HELD = 1 << 30,         // so many of a q4 tile from group to group
    EXPAND_ROWS_F16 = 4, EXPAND_ROWS_BF16 = 1 << 30, EXPAND_ROWS = 4, EXPAND_ROWS_Q8 = 4,   // with more rows, weights are unpacked once for all of them
};
#undef UNROLL
#define UNROLL                   // nothing to keep in registers: unrolled loops would only be long

// What takes many instructions without hardware is a function of its own: inlined everywhere it would be most of the library.
#define ONCE static __attribute__((noinline, unused))
#define SHARED ONCE              // nor do tiles gain from a copy for each height and dtype (see kernels_tmpl.h)

#define EACH(expression) v16 r; for (int i = 0; i < 16; i++) r.f[i] = (expression); return r

INLINE v16 v16_set1(float x) { EACH(x); }
INLINE v16 v16_load(const float *p) { EACH(p[i]); }
INLINE void v16_store(float *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = a.f[i]; }
// The first n of 16 numbers (0 <= n <= 16); the others are 0 and are not touched.
INLINE v16 v16_load_n(const float *p, int n) { EACH(i < n ? p[i] : 0.0f); }
INLINE void v16_store_n(float *p, v16 a, int n) { for (int i = 0; i < n; i++) p[i] = a.f[i]; }

ONCE v16 v16_load_f16(const uint16_t *p) { EACH(f32_from_f16(p[i])); }
ONCE void v16_store_f16(uint16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = f16_from_f32(a.f[i]); }
// bf16 numbers come in an order of the vocabulary's own, which v16_unmix puts right.
INLINE v16 v16_load_bf16_mixed(const uint16_t *p) { EACH(f32_from_bf16(p[i])); }
INLINE v16 v16_unmix(v16 a) { return a; }

INLINE v16 v16_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
INLINE v16 v16_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
INLINE v16 v16_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
INLINE v16 v16_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
ONCE v16 v16_fma(v16 a, v16 b, v16 c) { EACH(fused_multiply_add(a.f[i], b.f[i], c.f[i])); }      // a * b + c, rounded once
// a * b + c with one b for all lanes
INLINE v16 v16_fma1(v16 a, float b, v16 c) { return v16_fma(a, v16_set1(b), c); }
ONCE v16 v16_fnma(v16 a, v16 b, v16 c) { EACH(fused_multiply_add(-a.f[i], b.f[i], c.f[i])); }    // c - a * b, rounded once
INLINE v16 v16_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_min(v16 a, v16 b) { EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
INLINE v16 v16_abs(v16 a) { EACH(f32_from_bits(f32_bits(a.f[i]) & 0x7fffffff)); }
// a where x >= low (and where x is no number), else 0
INLINE v16 v16_zero_below(v16 a, v16 x, v16 low) { EACH(x.f[i] < low.f[i] ? 0.0f : a.f[i]); }
// a in the first n lanes, b in the others
INLINE v16 v16_first(v16 a, v16 b, int n) { EACH(i < n ? a.f[i] : b.f[i]); }
// 2^n for t = n + 1.5 * 2^23, n a whole number from -126 to 127
INLINE v16 v16_exp2_of_shifted(v16 t) { EACH(f32_from_bits((f32_bits(t.f[i]) << 23) + 0x3f800000)); }

// The one order in which 16 partial sums become one: halves are added, four times.
INLINE float v16_sum(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] += a.f[i + n];
    return a.f[0];
}
INLINE float v16_max_lane(v16 a) {
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) a.f[i] = a.f[i] > a.f[i + n] ? a.f[i] : a.f[i + n];
    return a.f[0];
}
#undef EACH

// Whole numbers nearest to x (ties to even), |x| < 2^15, as int8 or int16.
INLINE int nearest(float x) { return (int)((x + 0x1.8p23f) - 0x1.8p23f); }
INLINE void v16_to_int8(int8_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)nearest(a.f[i]); }
INLINE void v16_to_int16(int16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = (int16_t)nearest(a.f[i]); }

// ---- 4-bit codes: a line is 16 rows x 4 codes; dots are exact sums of products of codes and int8 inputs over 16 columns

typedef struct { int8_t b[64]; } line;
typedef struct { int32_t i[16]; } dots;
typedef struct { int32_t i[16]; } scaled;      // sums of dots times block scales: exact, below 2^24
typedef struct { int32_t i[16]; } scales;     // block scales as the products need them; 64 bytes in expanded strips
typedef struct { int8_t b[16]; } table;
typedef line grids;                           // what the grids (s & 3) of 16 rows add

INLINE table table_load(const int8_t *codebook) { table t; memcpy(t.b, codebook, 16); return t; }
INLINE line line_load(const uint8_t *p) { line x; memcpy(x.b, p, 64); return x; }
INLINE void line_store(uint8_t *p, line x) { memcpy(p, x.b, 64); }
INLINE grids grid_load(const uint8_t *p) { grids g; for (int i = 0; i < 64; i++) g.b[i] = p[i / 4] & 3; return g; }
// Half of a line's codes as `dots_add` wants them, which is codebook + grid, or the codebook's values alone where the grid's share is added
// as a whole. Part 0 and 1: what is multiplied with words g and g + 1, here the low and the high nibbles.
ONCE line codes_of(table t, line x, grids grid, const int part, const int expanded) {
    (void)expanded;
    for (int i = 0; i < 64; i++) x.b[i] = (int8_t)(t.b[x.b[i] >> 4 * part & 15] + grid.b[i]);
    return x;
}
INLINE scales scales_load(const uint8_t *p) { scales s; for (int i = 0; i < 16; i++) s.i[i] = (int8_t)p[i]; return s; }
INLINE void scales_store(uint8_t *p, scales s) { memcpy(p, s.i, 64); }
INLINE scales scales_reload(const uint8_t *p) { scales s; memcpy(s.i, p, 64); return s; }
// What a panel holds for the sums to start from, for each 16 of 32 inputs.
INLINE void dots_starts(const int8_t *x, int32_t starts[2]) { (void)x, starts[0] = starts[1] = 0; }
INLINE dots dots_from(int32_t start, grids grid, const int expanded) {
    (void)grid, (void)expanded;
    dots d;
    for (int i = 0; i < 16; i++) d.i[i] = start;
    return d;
}
ONCE dots dots_add(dots d, line codes, const int32_t *inputs, const int word, const int T, const int t, const int expanded) {
    (void)expanded;
    int8_t x[4];
    memcpy(x, inputs + word_place(word, T, t), 4);
    for (int r = 0; r < 16; r++) for (int i = 0; i < 4; i++) d.i[r] += codes.b[4 * r + i] * x[i];
    return d;
}
// The sums of one of the rows.
typedef dots row_dots;
INLINE row_dots dots_row(dots d, const int r, const int expanded) { (void)r, (void)expanded; return d; }
INLINE scaled scaled_first(row_dots d, scales s) { scaled w; for (int i = 0; i < 16; i++) w.i[i] = d.i[i] * s.i[i]; return w; }
INLINE scaled scaled_add(scaled w, row_dots d, scales s) { for (int i = 0; i < 16; i++) w.i[i] += d.i[i] * s.i[i]; return w; }
INLINE v16 scaled_float(scaled w) { v16 r; for (int i = 0; i < 16; i++) r.f[i] = (float)w.i[i]; return r; }

// ---- 8-bit codes with int16 inputs: each 4 of 16 columns of inputs become two words of the vocabulary's own

enum { WIDE_PARTS = 1, EXPANDED_LINE_Q8 = 128 };   // parts in which a line is multiplied; bytes of an expanded line
// Whether each part goes through all lines of a group before the next: with T rows fewer sums at once. `dots8_next` between them.
INLINE int wide_passes(const int T) { (void)T; return 0; }
typedef struct { int16_t h[64]; } wide;
typedef struct { int32_t i[16]; } dots8;           // exact sums over 32 columns
// Line l of a group.
INLINE wide wide_load(const uint8_t *group, const int l, const int part) {
    (void)part;
    wide x;
    for (int i = 0; i < 64; i++) x.h[i] = (int16_t)(group[l * LINE_BYTES + i] - 128);
    return x;
}
INLINE void wide_expand(uint8_t *to, const uint8_t *group, int l) { const wide x = wide_load(group, l, 0); memcpy(to + l * EXPANDED_LINE_Q8, x.h, 128); }
INLINE wide wide_reload(const uint8_t *group, const int l, const int part) { (void)part; wide x; memcpy(x.h, group + l * EXPANDED_LINE_Q8, 128); return x; }
INLINE void pack8(const int16_t *x, int32_t *words) { memcpy(words, x, 32); }
// `expanded`: the sum starts for codes that `wide_expand` wrote. `sums`: of all rows' inputs.
INLINE dots8 dots8_start(const int32_t *sums, const int T, const int t, const int expanded) { (void)sums, (void)T, (void)t, (void)expanded; return (dots8){ { 0 } }; }
INLINE dots8 dots8_next(dots8 d) { return d; }
ONCE dots8 dots8_add(dots8 d, wide w, const int32_t *inputs, const int l, const int part, const int T, const int t) {
    (void)part;
    int16_t x[4];
    for (int i = 0; i < 2; i++) memcpy(x + 2 * i, inputs + word_place(2 * l + i, T, t), 4);
    for (int r = 0; r < 16; r++) for (int i = 0; i < 4; i++) d.i[r] += w.h[4 * r + i] * x[i];
    return d;
}
// Of one of the rows.
INLINE v16 dots8_float(dots8 d, const int T, const int row) {
    (void)T, (void)row;
    v16 r;
    for (int i = 0; i < 16; i++) r.f[i] = (float)d.i[i];
    return r;
}
// 16 block scales as floats.
INLINE v16 v16_load_int8(const uint8_t *p) { v16 r; for (int i = 0; i < 16; i++) r.f[i] = (float)(int8_t)p[i]; return r; }
#endif
