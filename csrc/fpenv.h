// SPDX-License-Identifier: MIT
// fpenv.h - the floating-point control word. The host program, or a library built with -ffast-math, may have changed
// the rounding mode or enabled flush-to-zero. Every thread that computes therefore resets the word and restores it
// afterwards.
#ifndef LLAMAC_FPENV_H
#define LLAMAC_FPENV_H
#include <stdint.h>

// fp_control_reset: sets round-to-nearest, no flushing of subnormals, exceptions masked. Returns the old word for
// fp_control_restore.
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
typedef unsigned fp_control;
static inline fp_control fp_control_reset(void) {
    fp_control old = _mm_getcsr();
    _mm_setcsr(0x1f80);   // all exceptions masked, round to nearest, no FTZ, no DAZ
    return old;
}
static inline void fp_control_restore(fp_control old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t fp_control;
static inline fp_control fp_control_reset(void) {
    fp_control old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"((fp_control)0));
    return old;
}
static inline void fp_control_restore(fp_control old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
#include <fenv.h>
typedef fenv_t fp_control;
static inline fp_control fp_control_reset(void) {
    fenv_t old;
    fegetenv(&old);
    fesetenv(FE_DFL_ENV);
    return old;
}
static inline void fp_control_restore(fp_control old) { fesetenv(&old); }
#endif
#endif
