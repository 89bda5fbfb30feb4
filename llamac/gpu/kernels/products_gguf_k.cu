// SPDX-License-Identifier: MIT
// products_gguf_k.cu - products with GGUF's types that have super-scales.
#include "products.cuh"

PRODUCT_INT16(q4_k, LLAMAC_Q4_K)
PRODUCT_INT16(q5_k, LLAMAC_Q5_K)
PRODUCT_INT16(q6_k, LLAMAC_Q6_K)
PRODUCT_INT16(iq4_xs, LLAMAC_IQ4_XS)
