// SPDX-License-Identifier: MIT
// sha256.h - SHA-256 (FIPS 180-4), for the file's headers and tables.
#ifndef LLAMAC_SHA256_H
#define LLAMAC_SHA256_H
#include <stddef.h>
#include <stdint.h>

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;       // added so far
    uint8_t block[64];    // the last bytes that do not fill a block yet
};
void sha256_start(struct sha256 *h);
void sha256_add(struct sha256 *h, const void *data, size_t bytes);
void sha256_finish(struct sha256 *h, uint8_t digest[32]);
#endif
