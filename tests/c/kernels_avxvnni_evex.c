// SPDX-License-Identifier: MIT
// kernels_avxvnni_evex.c - the AVX-VNNI kernels for processors that have AVX-512 VNNI instead: the same source with the
// other encoding of vpdpbusd. The tests compare its bits with those of every other table.
#undef LLAMAC_NO_AVXVNNI   // which leaves out the core's own table
#define KERNELS kernels_avxvnni_evex
#define KERNELS_NAME "avxvnni_evex"
#include "kernels_avxvnni.c"
