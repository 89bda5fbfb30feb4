// SPDX-License-Identifier: MIT
// kernels_neon_dotprod.c - the kernels for aarch64 with the dot product instructions. Empty elsewhere.
#if defined(__aarch64__)
#if !defined(__ARM_FEATURE_DOTPROD)
#error "compile this file with -march=armv8.2-a+dotprod"
#endif
#define KERNELS kernels_neon_dotprod
#define KERNELS_NAME "neon_dotprod"
#include "simd_neon.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
