// SPDX-License-Identifier: MIT
// clock.h - time stamps.
#ifndef LLAMAC_CLOCK_H
#define LLAMAC_CLOCK_H
#include <stdint.h>

// Nanoseconds since a fixed point in the past, on a monotonic clock.
int64_t now_ns(void);
#endif
