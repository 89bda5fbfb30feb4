// SPDX-License-Identifier: MIT
// rope.c - functions of rows of frequencies and positions. See rope.h.
#include "rope.h"

#include "angles.h"

void rope_angles(int position, const float *inv_freq, int half, float factor, float *cosines, float *sines) {
    for (int j = 0; j < half; j++) rope_angle(position, inv_freq[j], factor, &cosines[j], &sines[j]);
}

void rope_turns(int from, int to, const float *inv_freq, int half, float *cosines, float *sines) {
    for (int j = 0; j < half; j++) {
        double c, s;
        cos_sin((double)((float)to * inv_freq[j]) - (double)((float)from * inv_freq[j]), &c, &s);
        cosines[j] = (float)c;
        sines[j] = (float)s;
    }
}

float rope_query_scale(int position, float beta, int context) { return log_scale(position, beta, context); }
