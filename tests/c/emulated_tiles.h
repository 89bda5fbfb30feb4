// SPDX-License-Identifier: MIT
// emulated_tiles.h - the tile instructions of simd_amx.h in plain C, for processors without AMX. Intel's manual defines
// them; these stop the program where the processor would raise an exception. Part of csrc/simd_amx.h.
#include <stdio.h>
#include <stdlib.h>

static _Thread_local struct tile_config tile_config;   // palette 0: no tiles
static _Thread_local _Alignas(64) uint8_t tiles[8][TILE_ROWS][64];

static inline void tile_check(int valid, const char *what) {
    if (valid) return;
    fprintf(stderr, "emulated tiles: %s\n", what);
    abort();
}
static inline void tile_check_exists(int tile) {
    tile_check(tile_config.palette == 1 && tile_config.rows[tile] && tile_config.row_bytes[tile], "unknown tile");
}
static inline void tile_release(void) {
    tile_check(tile_config.palette == 1, "released twice");   // the processor allows it
    memset(&tile_config, 0, sizeof tile_config);
}
static inline void tile_load_config(const struct tile_config *config) {
    tile_check(tile_config.palette == 0, "not released");     // the processor allows it
    for (int i = 0; i < 16; i++) {
        tile_check(config->rows[i] <= (i < 8 ? TILE_ROWS : 0), "rows of a tile");
        tile_check(config->row_bytes[i] <= (i < 8 ? 64 : 0), "bytes of a row");
        if (i < 14) tile_check(!config->reserved[i], "reserved bytes");
    }
    tile_check(config->palette == 1 && !config->start_row, "palette");
    tile_config = *config;
    memset(tiles, 0, sizeof tiles);
}
static inline void tile_zero(int tile) {
    tile_check_exists(tile);
    memset(tiles[tile], 0, sizeof tiles[tile]);
}
static inline void tile_load(int tile, const void *rows, long stride) {
    tile_zero(tile);
    for (int r = 0; r < tile_config.rows[tile]; r++)
        memcpy(tiles[tile][r], (const uint8_t *)rows + r * stride, tile_config.row_bytes[tile]);
}
static inline void tile_store(int tile, void *rows, long stride) {
    tile_check_exists(tile);
    for (int r = 0; r < tile_config.rows[tile]; r++)
        memcpy((uint8_t *)rows + r * stride, tiles[tile][r], tile_config.row_bytes[tile]);
}
static inline void tile_dot(int sums, int inputs, int codes) {
    tile_check_exists(sums), tile_check_exists(inputs), tile_check_exists(codes);
    tile_check(sums != inputs && sums != codes && inputs != codes, "a tile has two roles");
    tile_check(tile_config.rows[sums] == tile_config.rows[inputs] &&
               tile_config.row_bytes[sums] == tile_config.row_bytes[codes] &&
               tile_config.row_bytes[inputs] == 4 * tile_config.rows[codes], "shapes of the operands");
    for (int r = 0; r < tile_config.rows[sums]; r++)
        for (int c = 0; c < tile_config.row_bytes[sums] / 4; c++) {
            int32_t sum;
            memcpy(&sum, tiles[sums][r] + 4 * c, 4);
            for (int k = 0; k < tile_config.row_bytes[inputs]; k++)
                sum += (int8_t)tiles[inputs][r][k] * (int8_t)tiles[codes][k / 4][4 * c + k % 4];
            memcpy(tiles[sums][r] + 4 * c, &sum, 4);
        }
}
