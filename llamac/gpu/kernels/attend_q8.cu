// SPDX-License-Identifier: MIT
// attend_q8.cu - attention with a KV cache in q8.
#include "attend.cuh"

ATTENTION_KERNELS(q8, LLAMAC_Q8)
