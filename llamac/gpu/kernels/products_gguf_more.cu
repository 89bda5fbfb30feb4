// SPDX-License-Identifier: MIT
// products_gguf_more.cu - products with GGUF's types of 8 bits and of codebooks with a scale for each group.
#include "products.cuh"

PRODUCT_INT16(q8_0, LLAMAC_Q8_0)
PRODUCT_INT16(iq4_nl, LLAMAC_IQ4_NL)
PRODUCT_INT16(mxfp4, LLAMAC_MXFP4)
