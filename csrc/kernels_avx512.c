// SPDX-License-Identifier: MIT
// kernels_avx512.c - the kernels for x86-64 with AVX-512 F, BW, DQ and VL. Empty elsewhere.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#define KERNELS kernels_avx512
#define KERNELS_NAME "avx512"
#include "simd_avx512.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
