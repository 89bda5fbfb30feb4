// SPDX-License-Identifier: MIT
// kernels_neon_i8mm.c - the kernels for aarch64 with the dot product and int8 matrix instructions. Empty elsewhere.
#if defined(__aarch64__)
#if !defined(__ARM_FEATURE_DOTPROD) || !defined(__ARM_FEATURE_MATMUL_INT8)
#error "compile this file with -march=armv8.2-a+dotprod+i8mm"
#endif
#define KERNELS kernels_neon_i8mm
#define KERNELS_NAME "neon_i8mm"
#include "simd_neon.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
