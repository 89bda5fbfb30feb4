// SPDX-License-Identifier: MIT
// kernels_avx2.c - the kernels for x86-64 with AVX2, FMA and F16C. Empty elsewhere.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#define KERNELS kernels_avx2
#define KERNELS_NAME "avx2"
#include "simd_avx2.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
