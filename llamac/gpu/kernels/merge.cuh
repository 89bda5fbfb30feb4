// SPDX-License-Identifier: MIT
// merge.cuh - how the partial results of attention are merged (online softmax).
#ifndef LLAMAC_MERGE_CUH
#define LLAMAC_MERGE_CUH
#include "lane.cuh"

// How a block (m, l, o) is merged into running values, as merge_block of kernels_attention.h: run = run * run_scale +
// block * scale; the first block is copied.
struct Merge { float max, run_scale, scale; };
INLINE Merge merge_of(float run_m, float m) {
    const float max = run_m > m ? run_m : m;
    return { max, v16_exp(__fsub_rn(run_m, max)), v16_exp(__fsub_rn(m, max)) };
}
INLINE float merged(float run, float x, const Merge &merge) {
    return __fmaf_rn(x, merge.scale, __fmul_rn(run, merge.run_scale));
}
// A sink is merged like a block with one position, whose score it is and whose value is 0.
INLINE void merge_sink(float sink, float m, float &l, float &o) {
    const Merge merge = merge_of(m, sink);
    o = merged(o, 0, merge), l = merged(l, 1, merge);
}
#endif
