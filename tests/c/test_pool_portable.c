// SPDX-License-Identifier: MIT
// test_pool_portable.c - the tests of test_pool.c, with a pool that waits as it does where there is no futex.
#define POOL_WITHOUT_FUTEX
#include "pool.c"
#include "test_pool.c"
