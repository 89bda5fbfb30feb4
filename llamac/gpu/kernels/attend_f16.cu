// SPDX-License-Identifier: MIT
// attend_f16.cu - attention with a KV cache in f16.
#include "attend.cuh"

ATTENTION_KERNELS(f16, LLAMAC_F16)
