// SPDX-License-Identifier: MIT
// kernels_avx512vnni_other.c - the AVX-512 VNNI kernels as another vendor's processor chooses them: on Intel's those
// for AMD, and the reverse. The tests compare their bits with those of every other table.
#define IS_AMD (!__builtin_cpu_is("amd"))
#define BF16_PAIRS (!(__builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16")))
#define KERNELS kernels_avx512vnni_other
#define KERNELS_NAME "avx512vnni_other"
#include "kernels_avx512vnni.c"
