// SPDX-License-Identifier: MIT
// products_mixed.cu - products of one row with matrices of two dtypes: q and k beside v, which exporters store wider.
#include "products_few.cuh"

// The first n parts have dtype D, the others E and inputs of their own. Each block of threads takes a strip of one
// part, as in product_few. The launch reserves what the dtype that needs more shared memory needs.
template <int D, int form, int E, int other_form>
static __device__ __forceinline__ void product_of_two(product p, const unsigned char *other_inputs, int n) {
    int blocks = 0;
#pragma unroll
    for (int i = 0; i < MOST_PARTS; i++)
        if (i < n) blocks += (p.parts[i].rows + (int)STRIP_ROWS - 1) / (int)STRIP_ROWS;
    if ((int)blockIdx.y < blocks) {
        product_few<D, form, 1>(p);
    } else {
        p.inputs = other_inputs;
        product_few<E, other_form, 1>(p);
    }
}

// As MIXED of launches.py.
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2)
product_q4_q8_one(PRODUCT_PARAMETERS, const unsigned char *other_inputs, int n) {
    product_of_two<LLAMAC_Q4, INPUTS_INT8, LLAMAC_Q8, INPUTS_INT16>({ PRODUCT_ARGUMENTS }, other_inputs, n);
}
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1)
product_q4_k_q6_k_one(PRODUCT_PARAMETERS, const unsigned char *other_inputs, int n) {
    product_of_two<LLAMAC_Q4_K, INPUTS_INT16, LLAMAC_Q6_K, INPUTS_INT16>({ PRODUCT_ARGUMENTS }, other_inputs, n);
}
