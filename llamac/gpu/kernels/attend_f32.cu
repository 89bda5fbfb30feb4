// SPDX-License-Identifier: MIT
// attend_f32.cu - attention with a KV cache in f32.
#include "attend.cuh"

ATTENTION_KERNELS(f32, LLAMAC_F32)
