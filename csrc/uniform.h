// SPDX-License-Identifier: MIT
// uniform.h - the random numbers of draws, from a counter: Philox4x32-10 (Salmon et al. 2011). A GPU's kernels include
// this file as well.
#ifndef LLAMAC_UNIFORM_H
#define LLAMAC_UNIFORM_H
#include <stdint.h>
#include <string.h>

// Sets two numbers in [0, 1) with 24 random bits, which are a function of seed, position and candidate.
static inline void uniform(uint64_t seed, uint64_t position, uint32_t candidate, double *first, double *second) {
    uint32_t counter[4] = { (uint32_t)position, (uint32_t)(position >> 32), candidate, 0 };
    uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)counter[0] * 0xd2511f53, b = (uint64_t)counter[2] * 0xcd9e8d57;
        const uint32_t next[4] = {
            (uint32_t)(b >> 32) ^ counter[1] ^ key[0], (uint32_t)b,
            (uint32_t)(a >> 32) ^ counter[3] ^ key[1], (uint32_t)a,
        };
        memcpy(counter, next, sizeof counter);
        key[0] += 0x9e3779b9;
        key[1] += 0xbb67ae85;
    }
    *first = (double)(counter[0] >> 8) * 0x1p-24;
    *second = (double)(counter[1] >> 8) * 0x1p-24;
}
#endif
