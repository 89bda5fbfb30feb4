// SPDX-License-Identifier: MIT
// format_demands.c - the check of fields for which the value of another field leaves one value only.
#include "format_demands.h"

#include "error.h"

int format_check_demands(const char *where, const struct demand *demands, size_t n, const char *reason,
                         llamac_error *err) {
    for (size_t i = 0; i < n; i++)
        if (demands[i].found != demands[i].expected)
            return bad_model(err, "%s: %s is %.9g, expected %.9g %s", where, demands[i].field, demands[i].found,
                             demands[i].expected, reason);
    return 0;
}
