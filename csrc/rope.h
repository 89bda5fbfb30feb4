// SPDX-License-Identifier: MIT
// rope.h - functions of positions: cosines and sines for rotary position embedding (Su et al. 2021), and the scale of
// queries at large positions. No libm: the same bits on every machine.
#ifndef LLAMAC_ROPE_H
#define LLAMAC_ROPE_H

// For j < half: cosines[j], sines[j] = factor * cos(angle), factor * sin(angle) with angle = (float)position *
// inv_freq[j]. The angle is rounded to f32, as in the code that trained the checkpoints.
void rope_angles(int position, const float *inv_freq, int half, float factor, float *cosines, float *sines);
// The rotations that take what is rotated for position `from` to what is rotated for position `to`: by the differences
// of the rounded angles.
void rope_turns(int from, int to, const float *inv_freq, int half, float *cosines, float *sines);
// 1 + beta log(1 + floor(position / context)).
float rope_query_scale(int position, float beta, int context);
#endif
