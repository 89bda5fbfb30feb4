// SPDX-License-Identifier: MIT
// simd_amx.h - the SIMD layer for AVX-512 with VNNI and AMX-INT8: that of simd_avx512.h, plus matrix tiles. A tile has
// up to 16 rows of up to 64 bytes. EMULATED_TILES names a header that implements the instructions in plain C instead.
#ifndef LLAMAC_SIMD_AMX_H
#define LLAMAC_SIMD_AMX_H
#include <immintrin.h>
#include "simd_avx512.h"

#define SIMD_TILES
enum { TILE_ROWS = 16 };

// ---- tile instructions. Tile numbers are literals from 0 to 7.

// The operand of ldtilecfg.
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
#if defined(EMULATED_TILES)
#include EMULATED_TILES
#else
// GCC's intrinsics do not say that they read all of the operand: the barrier does.
INLINE void tile_load_config(const struct tile_config *config) {
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
}
#define tile_release() _tile_release()
#define tile_load(tile, rows, stride) _tile_loadd(tile, rows, stride)
#define tile_zero(tile) _tile_zero(tile)
// sums += inputs times codes, both signed bytes: for each row of inputs and each row of a strip, the products of all
// columns.
#define tile_dot(sums, inputs, codes) _tile_dpbssd(sums, inputs, codes)
#define tile_store(tile, rows, stride) _tile_stored(tile, rows, stride)
#endif

// ---- products of input rows with codes

enum { INPUT_ROW_BYTES = 32 };   // of h, or of l, of a group in a panel; see kernels_quant.h

// The products of a panel's inputs, 128 h + l, with a strip: those of h and those of l. Row t holds input row t's 16
// outputs.
typedef struct { _Alignas(64) int32_t v[2][TILE_ROWS][STRIP_ROWS]; } tile_sums;

// Half of the tiles compute while the sums of the other half are stored: tile 0 or 4 holds inputs, 1 or 5 codes, and
// the two that follow hold sums.
INLINE void tiles_begin(int rows, int columns) {
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        const int is_inputs = i % 4 == 0, is_codes = i % 4 == 1;
        config.rows[i] = (uint8_t)(is_codes ? columns / 4 : rows);
        config.row_bytes[i] = (uint16_t)(is_inputs ? columns : LINE_BYTES);
    }
    tile_load_config(&config);
}
INLINE void tiles_end(void) { tile_release(); }

#define MULTIPLY(inputs, codes, high_sums, low_sums) do { \
        tile_load(inputs, high, INPUT_ROW_BYTES); \
        tile_load(codes, lines, LINE_BYTES); \
        tile_zero(high_sums); \
        tile_zero(low_sums); \
        tile_dot(high_sums, inputs, codes); \
        tile_load(inputs, low, INPUT_ROW_BYTES); \
        tile_dot(low_sums, inputs, codes); \
    } while (0)
INLINE void tiles_multiply(int half, const int32_t *high, const int32_t *low, const uint8_t *lines) {
    if (half) MULTIPLY(4, 5, 6, 7);
    else MULTIPLY(0, 1, 2, 3);
}
#undef MULTIPLY
INLINE void tiles_store(int half, tile_sums *to) {
    if (half) {
        tile_store(6, to->v[0], LINE_BYTES);
        tile_store(7, to->v[1], LINE_BYTES);
    } else {
        tile_store(2, to->v[0], LINE_BYTES);
        tile_store(3, to->v[1], LINE_BYTES);
    }
}

// Subtracts the bias of unpacked codes from n lines.
INLINE void lines_make_signed(uint8_t *lines, int n) {
    const __m512i bias = _mm512_set1_epi8((char)UNPACKED_BIAS);
    for (int i = 0; i < n; i++, lines += LINE_BYTES) store_512(lines, _mm512_sub_epi8(load_512(lines), bias));
}
INLINE v16 tile_row_to_float(const tile_sums *sums, int t) {
    return line_to_floats(line_times_128_plus(load_512(sums->v[0][t]), load_512(sums->v[1][t])));
}
#endif
