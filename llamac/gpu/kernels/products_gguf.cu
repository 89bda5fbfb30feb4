// SPDX-License-Identifier: MIT
// products_gguf.cu - products with GGUF's types of 4 and 5 bits with a scale for each group.
#include "products.cuh"

PRODUCT_INT16(q4_0, LLAMAC_Q4_0)
PRODUCT_INT16(q4_1, LLAMAC_Q4_1)
PRODUCT_INT16(q5_0, LLAMAC_Q5_0)
PRODUCT_INT16(q5_1, LLAMAC_Q5_1)
