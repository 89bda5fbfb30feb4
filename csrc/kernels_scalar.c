// SPDX-License-Identifier: MIT
// kernels_scalar.c - the kernels in plain C. They run everywhere and define the bits that every table computes.
#define KERNELS kernels_scalar
#define KERNELS_NAME "scalar"
#include "simd_scalar.h"
#include "kernels_template.h"
