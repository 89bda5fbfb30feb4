// SPDX-License-Identifier: MIT
// fpenv.h - the floating-point control word: every thread that computes sets round-to-nearest without flush-to-zero and puts back
// what it found, because a host program (or a library built with -ffast-math) may have changed it.
#ifndef LLAMAC_FPENV_H
#define LLAMAC_FPENV_H
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
typedef unsigned fp_control;
static inline fp_control fp_enter(void) {
    fp_control old = _mm_getcsr();
    _mm_setcsr(0x1f80);   // all exceptions masked, nearest, no FTZ, no DAZ
    return old;
}
static inline void fp_leave(fp_control old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t fp_control;
static inline fp_control fp_enter(void) {
    fp_control old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"((fp_control)0));
    return old;
}
static inline void fp_leave(fp_control old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
#include <fenv.h>
typedef fenv_t fp_control;
static inline fp_control fp_enter(void) {
    fenv_t old;
    fegetenv(&old);
    fesetenv(FE_DFL_ENV);
    return old;
}
static inline void fp_leave(fp_control old) { fesetenv(&old); }
#endif
#endif
