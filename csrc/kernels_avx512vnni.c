// SPDX-License-Identifier: MIT
// kernels_avx512vnni.c - the kernels for x86-64 with AVX-512 F, BW, DQ, VL and VNNI. Empty elsewhere. Some depend on
// the vendor; tests/c/kernels_avx512vnni_other.c has those for the other vendor.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__) || \
    !defined(__AVX512VNNI__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
#endif
#if !defined(KERNELS)
#define KERNELS kernels_avx512vnni
#define KERNELS_NAME "avx512vnni"
#endif
#include "simd_avx512.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
