// SPDX-License-Identifier: MIT
// rope.h - cosines and sines of rotary position embedding, without libm: the same bits on every machine.
#ifndef LLAMAC_ROPE_H
#define LLAMAC_ROPE_H

// cosines[j], sines[j] = factor * cos, sin of (f32)position * inv_freq[j], the product rounded to f32 as checkpoints are trained with.
void rope_angles(int position, const float *inv_freq, int half, float factor, float *cosines, float *sines);
#endif
