// SPDX-License-Identifier: MIT
// simd_panel_layout.h - the usual layout of quantized inputs in a panel: each accumulator belongs to one input row,
// and the T words of one column position are adjacent. NEON with i8mm pairs rows instead: see simd_neon.h.
#ifndef LLAMAC_SIMD_PANEL_LAYOUT_H
#define LLAMAC_SIMD_PANEL_LAYOUT_H
#include "common.h"

// Input rows per accumulator.
INLINE int int8_rows_per_acc(const int unpacked) { (void)unpacked; return 1; }
INLINE int int16_rows_per_acc(const int T) { (void)T; return 1; }
// Index of code word `word` of row t among the code words of T rows.
INLINE int word_index(int word, const int T, int t) { return word * T + t; }
#endif
