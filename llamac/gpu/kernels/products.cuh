// SPDX-License-Identifier: MIT
// products.cuh - entry points of products with a quantized dtype. The dtypes are divided among the files that include
// this, so that they compile side by side.
#ifndef LLAMAC_PRODUCTS_CUH
#define LLAMAC_PRODUCTS_CUH
#include "products_few.cuh"
#include "products_many.cuh"

// product_NAME_few and product_NAME_many; of dtypes with int16 inputs, the same with _rounded after them for fast
// numerics.
#define PRODUCT_OF_FORM(few, many, dtype, form) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) few(PRODUCT_PARAMETERS) { \
        product_few<dtype, form>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) many(PRODUCT_PARAMETERS) { \
        product_many<dtype, form>({ PRODUCT_ARGUMENTS }); \
    }
#define PRODUCT_INT8(name, dtype) PRODUCT_OF_FORM(product_##name##_few, product_##name##_many, dtype, INPUTS_INT8)
#define PRODUCT_INT16(name, dtype) \
    PRODUCT_OF_FORM(product_##name##_few, product_##name##_many, dtype, INPUTS_INT16) \
    PRODUCT_OF_FORM(product_##name##_few_rounded, product_##name##_many_rounded, dtype, INPUTS_ROUNDED)
#endif
