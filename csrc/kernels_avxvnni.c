// SPDX-License-Identifier: MIT
// kernels_avxvnni.c - the kernels for x86-64 with AVX2, FMA, F16C and AVX-VNNI. Empty elsewhere, and where the compiler
// does not know AVX-VNNI. Processors with AVX-512 VNNI, whose vpdpbusd has another encoding, can run this source, too:
// tests/c/kernels_avxvnni_evex.c compiles it for them.
#include "kernels.h"
#if defined(HAS_KERNELS_AVXVNNI)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__) || \
    !(defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))
#error "compile this file with -mavx2 -mfma -mf16c -mavxvnni"
#endif
#if !defined(KERNELS)
#define KERNELS kernels_avxvnni
#define KERNELS_NAME "avxvnni"
#endif
#define SIMD_VNNI
#include "simd_avx2.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
