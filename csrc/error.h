// SPDX-License-Identifier: MIT
// error.h - how a function reports what went wrong: written once, where the fact is known; callers pass it on.
#ifndef LLAMAC_ERROR_H
#define LLAMAC_ERROR_H
#include "llamac.h"

// Fills `err` (may be NULL) and returns -1. The message names the object and both numbers.
int err_set(llamac_error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
#endif
