// SPDX-License-Identifier: MIT
// kernels.c - the list of kernel tables, best first, and runtime selection by CPU features.
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE   // syscall
#endif
#include "kernels.h"

#include <string.h>
#if defined(HAS_KERNELS_X86)
#include <cpuid.h>
#if defined(HAS_KERNELS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(HAS_KERNELS_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(HAS_KERNELS_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#include "common.h"
#include "error.h"

static int always(void) { return 1; }
#if defined(HAS_KERNELS_X86)
// __builtin_cpu_supports("avx2") also checks that the OS saves the wide registers. Some compilers do not know "f16c".
static int has_avx2(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C);
}
#if defined(HAS_KERNELS_AVXVNNI)
// Bit 4 of EAX, leaf 7.1. Some compilers that have the instruction do not know the feature's name.
static int has_avxvnni(void) {
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
           (a >> 4 & 1);
}
#endif
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
static int has_avx512vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#if defined(HAS_KERNELS_AMX)
// AMX-TILE and AMX-INT8 are bits 24 and 25 of EDX, leaf 7. The system saves tiles if bits 17 and 18 of XCR0 are set. A
// process must ask Linux for permission to use them; threads inherit it. Virtual machines can report AMX and refuse.
static int has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!has_avx512vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a >> 17 & 3) == 3 && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}
#endif
#elif defined(HAS_KERNELS_NEON)
// Linux hwcap bits by number: <asm/hwcap.h> of older systems does not define all of them.
#if defined(__linux__)
static int has(int type, int bit) { return getauxval((unsigned long)type) >> bit & 1; }
static int has_dotprod(void) { return has(AT_HWCAP, 20); }
static int has_i8mm(void) { return has_dotprod() && has(AT_HWCAP2, 13); }
#elif defined(__APPLE__)
static int has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, NULL, 0) && value;
}
static int has_dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif
#endif

static const struct { const struct kernels *table; int (*supported)(void); const char *needs; } tables[] = {
#if defined(HAS_KERNELS_X86)
#if defined(HAS_KERNELS_AMX)
    { &kernels_amx, has_amx, "AVX-512 F, BW, DQ, VL and VNNI, and AMX for int8 that the system permits" },
#endif
    { &kernels_avx512vnni, has_avx512vnni, "AVX-512 F, BW, DQ, VL and VNNI" },
    { &kernels_avx512, has_avx512, "AVX-512 F, BW, DQ and VL" },
#if defined(HAS_KERNELS_AVXVNNI)
    { &kernels_avxvnni, has_avxvnni, "AVX2, FMA, F16C and AVX-VNNI" },
#endif
    { &kernels_avx2, has_avx2, "AVX2, FMA and F16C" },
#elif defined(HAS_KERNELS_NEON)
    { &kernels_neon_i8mm, has_i8mm, "NEON with dot products and int8 matrix multiplication" },
    { &kernels_neon_dotprod, has_dotprod, "NEON with dot products" },
    { &kernels_neon, always, "NEON" },
#endif
    { &kernels_scalar, always, "nothing" },
};

const char *llamac_isa_at(size_t index, int *supported) {
    if (index >= ARRAY_LEN(tables)) return NULL;
    *supported = tables[index].supported();
    return tables[index].table->name;
}

const struct kernels *kernels_best(void) {
    static const struct kernels *best;   // threads that look for it at the same time find the same table
    const struct kernels *table = __atomic_load_n(&best, __ATOMIC_RELAXED);
    for (size_t i = 0; !table; i++)
        if (tables[i].supported()) table = tables[i].table;
    __atomic_store_n(&best, table, __ATOMIC_RELAXED);
    return table;
}

const struct kernels *kernels_select(const char *name, llamac_error *err) {
    if (!name) return kernels_best();
    for (size_t i = 0; i < ARRAY_LEN(tables); i++) {
        if (strcmp(name, tables[i].table->name)) continue;
        if (tables[i].supported()) return tables[i].table;
        err_set(err, LLAMAC_UNSUPPORTED, "isa \"%s\" needs %s, which this processor does not have", name,
                tables[i].needs);
        return NULL;
    }
    bad_argument(err, "isa \"%s\" is not in this build", name);
    return NULL;
}
