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
// sums += inputs (signed bytes) times codes (unsigned bytes): for each row of inputs and each row of a strip, the
// products of all columns.
#define tile_dot(sums, inputs, codes) _tile_dpbsud(sums, inputs, codes)
#define tile_store(tile, rows, stride) _tile_stored(tile, rows, stride)
#endif

// ---- products of input rows with unpacked codes

enum { INPUT_ROW_BYTES = 32, TILE_STRIPS = 2 };   // bytes of a group's inputs per row in a panel; see kernels_quant.h

// Two products for each strip, as sums of `rows` x 16 int32: of the first inputs with the first codes, and of the
// second inputs with the second codes.
typedef struct { _Alignas(64) int32_t v[TILE_STRIPS][2][TILE_ROWS][STRIP_ROWS]; } tile_sums;

// Tiles 0 and 1 hold inputs, 2 and 3 codes, 4 to 7 sums.
INLINE void tiles_begin(int rows, int columns) {
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        const int is_codes = i == 2 || i == 3;
        config.rows[i] = (uint8_t)(is_codes ? columns / 4 : rows);
        config.row_bytes[i] = (uint16_t)(i < 2 ? columns : LINE_BYTES);
    }
    tile_load_config(&config);
}
INLINE void tiles_end(void) { tile_release(); }

#define MULTIPLY_STRIP(codes, first, second, first_sums, second_sums) do { \
        tile_load(first, codes, LINE_BYTES); \
        tile_zero(first_sums); \
        tile_zero(second_sums); \
        tile_dot(first_sums, 0, first); \
        if (second_codes) { \
            tile_load(second, (codes) + second_codes, LINE_BYTES); \
            tile_dot(second_sums, 1, second); \
        } else { \
            tile_dot(second_sums, 1, first); \
        } } while (0)
// second_codes: where the second codes are, relative to the first; 0: the same.
INLINE void tiles_multiply(const int S, const int32_t *first_inputs, const int32_t *second_inputs,
                           const uint8_t *codes, size_t strip_bytes, const size_t second_codes) {
    tile_load(0, first_inputs, INPUT_ROW_BYTES);
    tile_load(1, second_inputs, INPUT_ROW_BYTES);
    MULTIPLY_STRIP(codes, 2, 3, 4, 5);
    if (S == 2) MULTIPLY_STRIP(codes + strip_bytes, 3, 2, 6, 7);
}
#undef MULTIPLY_STRIP
INLINE void tiles_store(const int S, tile_sums *to) {
    tile_store(4, to->v[0][0], LINE_BYTES);
    tile_store(5, to->v[0][1], LINE_BYTES);
    if (S == 2) {
        tile_store(6, to->v[1][0], LINE_BYTES);
        tile_store(7, to->v[1][1], LINE_BYTES);
    }
}

// Row t of the sums of strip i as an accumulator without the codes' bias. The two products of q4 are those of a group's
// halves, each with its compensation term.
INLINE q4_row_acc q4_acc_from_tiles(const tile_sums *sums, const int i, const int half, int t, int32_t compensation) {
    return _mm512_add_epi32(load_512(sums->v[i][half][t]), broadcast_512(compensation));
}
// The products of int16 inputs are those of h and of l: 128 (h - n) + l with the sum n of the inputs.
INLINE int16_acc int16_acc_from_tiles(const tile_sums *sums, const int i, int t, int32_t n) {
    _Static_assert(UNPACKED_BIAS == 128, "removing the bias takes one subtraction");
    return (int16_acc){ _mm512_sub_epi32(load_512(sums->v[i][0][t]), broadcast_512(n)),
                        load_512(sums->v[i][1][t]) };
}
#endif
