// SPDX-License-Identifier: MIT
// products_gguf.cu - products with GGUF's types that have a scale of their own for each group.
#include "products.cuh"

PRODUCT_INT16(q4_0, LLAMAC_Q4_0)
PRODUCT_INT16(q4_1, LLAMAC_Q4_1)
PRODUCT_INT16(q5_0, LLAMAC_Q5_0)
PRODUCT_INT16(q5_1, LLAMAC_Q5_1)
PRODUCT_INT16(q8_0, LLAMAC_Q8_0)
PRODUCT_INT16(iq4_nl, LLAMAC_IQ4_NL)
PRODUCT_INT16(mxfp4, LLAMAC_MXFP4)
