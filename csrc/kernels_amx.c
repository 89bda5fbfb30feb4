// SPDX-License-Identifier: MIT
// kernels_amx.c - the kernels for x86-64 with AVX-512 F, BW, DQ, VL and VNNI and with AMX-INT8. Empty elsewhere, and
// where the compiler does not know AMX. Processors without AMX can run this source, too, with emulated tiles:
// tests/c/kernels_amx_emulated.c.
#include "kernels.h"
#if defined(HAS_KERNELS_AMX)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__) || \
    !defined(__AVX512VNNI__) || !(defined(__AMX_INT8__) || defined(__AMXINT8__) || defined(EMULATED_TILES))
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mamx-tile -mamx-int8"
#endif
#if !defined(KERNELS)
#define KERNELS kernels_amx
#define KERNELS_NAME "amx"
#endif
#include "simd_amx.h"
#include "kernels_template.h"
#else
typedef int iso_c_forbids_an_empty_file;
#endif
