// SPDX-License-Identifier: MIT
// clock.c - time stamps. See clock.h.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE   // clock_gettime
#endif
#include "clock.h"

#include <time.h>

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
