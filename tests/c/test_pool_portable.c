// SPDX-License-Identifier: MIT
// test_pool_portable.c - the tests of test_pool.c with the pool of systems that lack futexes.
#define POOL_WITHOUT_FUTEX
#include "pool.c"
#include "test_pool.c"
