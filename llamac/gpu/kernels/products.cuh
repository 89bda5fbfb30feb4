// SPDX-License-Identifier: MIT
// products.cuh - entry points of products with a quantized dtype. The dtypes are divided among the files that include
// this, so that they compile side by side.
#ifndef LLAMAC_PRODUCTS_CUH
#define LLAMAC_PRODUCTS_CUH
#include "products_few.cuh"
#include "products_many.cuh"

// product_NAME_one for one row, product_NAME_few and product_NAME_many; of dtypes with int16 inputs, the same with
// _fast after them for fast numerics. With one row, a multiprocessor holds 32 warps if blocks have 128 columns; with
// 256 columns, or more rows, too many registers would be spilled.
#define PRODUCT_OF_FORM(name, dtype, form, suffix) \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS, dtype_of<dtype>::parts == 1 ? 2 : 1) \
    product_##name##_one##suffix(PRODUCT_PARAMETERS) { \
        product_few<dtype, form, 1>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) product_##name##_few##suffix(PRODUCT_PARAMETERS) { \
        product_few<dtype, form, FEW_ROWS>({ PRODUCT_ARGUMENTS }); \
    } \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 2) product_##name##_many##suffix(PRODUCT_PARAMETERS) { \
        product_many<dtype, form>({ PRODUCT_ARGUMENTS }); \
    }
#define PRODUCT_INT8(name, dtype) PRODUCT_OF_FORM(name, dtype, INPUTS_INT8, )
#define PRODUCT_INT16(name, dtype) \
    PRODUCT_OF_FORM(name, dtype, INPUTS_INT16, ) \
    PRODUCT_OF_FORM(name, dtype, INPUTS_FAST, _fast)
#endif
