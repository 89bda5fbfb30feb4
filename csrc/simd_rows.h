// SPDX-License-Identifier: MIT
// simd_rows.h - which input rows share sums of products of codes, and how their words lie in a panel: in most vocabularies each row has
// its own sums, and the T words of one column follow one another. With i8mm two rows share theirs: see simd_neon.h.
#ifndef LLAMAC_SIMD_ROWS_H
#define LLAMAC_SIMD_ROWS_H
#include "common.h"

// Rows that one `dots` of a tile holds, and one `dots8` of a tile of T rows.
INLINE int dots_rows(const int expanded) { (void)expanded; return 1; }
INLINE int dots8_rows(const int T) { (void)T; return 1; }
// Where word `word` of row t stands among the words of codes of T rows.
INLINE int word_place(int word, const int T, int t) { return word * T + t; }
#endif
