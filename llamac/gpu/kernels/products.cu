// SPDX-License-Identifier: MIT
// products.cu - the products of few rows with llamac's own quantized dtypes and with GGUF's (products.cuh).
#include "products.cuh"

#define PRODUCT(name, dtype, form) \
    extern "C" __global__ void __launch_bounds__(256) name(PRODUCT_PARAMETERS) { \
        product_few<dtype, form>({ PRODUCT_ARGUMENTS }); \
    }
#define PRODUCTS(name, dtype) PRODUCT(name, dtype, INPUTS_INT16) PRODUCT(name##_rounded, dtype, INPUTS_ROUNDED)
PRODUCT(product_q4, LLAMAC_Q4, INPUTS_INT8)
PRODUCT(product_q4s, LLAMAC_Q4S, INPUTS_INT8)
PRODUCTS(product_q8, LLAMAC_Q8)
PRODUCTS(product_q6, LLAMAC_Q6)
PRODUCTS(product_q4_0, LLAMAC_Q4_0)
PRODUCTS(product_q4_1, LLAMAC_Q4_1)
PRODUCTS(product_q5_0, LLAMAC_Q5_0)
PRODUCTS(product_q5_1, LLAMAC_Q5_1)
PRODUCTS(product_q8_0, LLAMAC_Q8_0)
PRODUCTS(product_q4_k, LLAMAC_Q4_K)
PRODUCTS(product_q5_k, LLAMAC_Q5_K)
PRODUCTS(product_q6_k, LLAMAC_Q6_K)
PRODUCTS(product_iq4_nl, LLAMAC_IQ4_NL)
PRODUCTS(product_iq4_xs, LLAMAC_IQ4_XS)
PRODUCTS(product_mxfp4, LLAMAC_MXFP4)
