// SPDX-License-Identifier: MIT
// products_llamac.cu - products with the dtypes that llamac's quantizer produces.
#include "products.cuh"

PRODUCT_INT8(q4, LLAMAC_Q4)
PRODUCT_INT8(q4s, LLAMAC_Q4S)
PRODUCT_INT8(q3, LLAMAC_Q3)
PRODUCT_INT8(q2, LLAMAC_Q2)
PRODUCT_INT8(t2, LLAMAC_T2)
PRODUCT_INT16(q6, LLAMAC_Q6)
PRODUCT_INT16(q8, LLAMAC_Q8)
