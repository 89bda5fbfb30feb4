// SPDX-License-Identifier: MIT
// experts_tiles.cu - divides the pairs of experts and rows into the tiles that products multiply.
#include "epilogue.cuh"

// tiles (n_tiles) = for each expert ascending the tiles of up to `most` of its pairs [starts[e], starts[e + 1]); then
// empty tiles. Grid: 1 block.
//
// Budget: a sum over the experts per thread, from the L1 cache: 1 us with 128 experts.
extern "C" __global__ void tile_pairs(const int *starts, int n_experts, int most, int n_tiles, row_tile *tiles) {
    const auto tiles_of = [&](int e) { return (starts[e + 1] - starts[e] + most - 1) / most; };
    int all = 0;
#pragma unroll 8
    for (int e = 0; e < n_experts; e++) all += tiles_of(e);
    for (int i = all + threadIdx.x; i < n_tiles; i += blockDim.x) tiles[i] = { 0, 0, 0 };
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x) {
        int to = 0;
#pragma unroll 8
        for (int before = 0; before < e; before++) to += tiles_of(before);
        for (int first = starts[e]; first < starts[e + 1]; first += most)
            tiles[to++] = { e, first, min(most, starts[e + 1] - first) };
    }
}
