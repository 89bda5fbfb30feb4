// SPDX-License-Identifier: MIT
// kernels_neon.c - the kernels for aarch64, whose every processor has NEON. Empty elsewhere.
#if defined(__aarch64__)
#include <math.h>
#include "half.h"
#define KERNELS kernels_neon
#define KERNELS_NAME "neon"
#include "simd_neon.h"
#include "kernels_tmpl.h"
#else
typedef int not_for_this_machine;
#endif
