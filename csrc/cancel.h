// SPDX-License-Identifier: MIT
// cancel.h - how a running eval learns that it shall stop. The loops over tiles ask; once seen, every thread sees it.
#ifndef LLAMAC_CANCEL_H
#define LLAMAC_CANCEL_H
#include <stdint.h>

struct cancel {
    const int32_t *request;   // the caller's flag, or NULL
    int32_t seen;
};

static inline int cancelled(struct cancel *c) {
    if (__atomic_load_n(&c->seen, __ATOMIC_RELAXED)) return 1;
    if (!c->request || !__atomic_load_n(c->request, __ATOMIC_RELAXED)) return 0;
    __atomic_store_n(&c->seen, 1, __ATOMIC_RELAXED);
    return 1;
}
#endif
