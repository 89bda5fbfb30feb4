// SPDX-License-Identifier: MIT
// kernels_scalar.c - the kernels in plain C: for every machine, and the definition of what the others compute.
#define KERNELS kernels_scalar
#define KERNELS_NAME "scalar"
#include "simd_scalar.h"
#include "kernels_tmpl.h"
