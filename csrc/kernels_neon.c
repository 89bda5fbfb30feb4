// SPDX-License-Identifier: MIT
// kernels_neon.c - the kernels for aarch64; every aarch64 processor has NEON. Empty elsewhere.
#if defined(__aarch64__)
#define KERNELS kernels_neon
#define KERNELS_NAME "neon"
#include "simd_neon.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
