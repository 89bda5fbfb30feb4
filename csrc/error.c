// SPDX-License-Identifier: MIT
// error.c - formats error messages. See error.h.
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int err_set(llamac_error *err, int code, const char *format, ...) {
    if (err) {
        err->code = code;
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
    }
    return -1;
}
