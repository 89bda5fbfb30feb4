// SPDX-License-Identifier: MIT
// kernel_tables.h - for tests and benchmarks of kernels: the tables that this machine can run.
#ifndef KERNEL_TABLES_H
#define KERNEL_TABLES_H
#include "kernels.h"
#include "test.h"

static const struct kernels *tables[12];   // tables[0]: the scalar kernels
static int n_tables;

#if defined(TEST_TABLES)
extern const struct kernels kernels_avxvnni_evex, kernels_amx_emulated, kernels_avx512vnni_other;
static inline int has_avxvnni_evex(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

static inline void find_tables(void) {
    int supported;
    llamac_error err;
    for (size_t i = 0; llamac_isa_at(i, &supported); i++)
        if (supported) tables[n_tables++] = kernels_select(llamac_isa_at(i, &supported), &err);
    const struct kernels *scalar = tables[n_tables - 1];   // last in the list
    tables[n_tables - 1] = tables[0], tables[0] = scalar;
#if defined(TEST_TABLES)
    if (has_avxvnni_evex()) tables[n_tables++] = &kernels_avxvnni_evex;
    if (kernels_select("avx512vnni", &err)) {
        tables[n_tables++] = &kernels_amx_emulated;
        tables[n_tables++] = &kernels_avx512vnni_other;
    }
#endif
}
static inline void print_tables(void) {
    for (int i = 0; i < n_tables; i++) printf("testing %s\n", tables[i]->name);
}

// Whether all bits are equal. NaNs may differ in sign and payload, which C leaves unspecified.
static inline int same(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) && (a[i] == a[i] || b[i] == b[i])) return 0;
    return 1;
}
#endif
