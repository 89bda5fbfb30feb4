// SPDX-License-Identifier: MIT
// test.h - named tests, and checks that print where they failed.
#ifndef LLAMAC_TEST_H
#define LLAMAC_TEST_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "mem.h"
#include "samples.h"

static int failures, checks;
static int emulated;   // whether the processor is, which is about fifty times slower
static int sparse;     // whether tests try fewer cases

static inline void read_arguments(int argc, char **argv) {
    emulated = argc > 1 && !strcmp(argv[1], "--emulated");
    sparse = emulated || (argc > 1 && !strcmp(argv[1], "--sparse"));
}
// Returns the step of a loop over cases.
static inline int sparser(int step) { return sparse ? step : 1; }

// Ends a line with the CPU time of a test that took long.
static inline void print_seconds(double seconds) {
    if (seconds >= 1) printf(", CPU %.0f s", seconds);
    printf("\n");
}

#define CHECK(condition, ...) do { \
        checks++; \
        if (!(condition)) { \
            failures++; \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__); \
            printf("\n"); \
            if (failures > 20) { printf("too many failures\n"); exit(1); } \
        } \
    } while (0)

#define RUN(test) do { \
        const int before = failures; \
        const clock_t start = clock(); \
        test(); \
        printf("%-64s %s", #test, failures == before ? "ok" : "FAILED"); \
        print_seconds((double)(clock() - start) / CLOCKS_PER_SEC); \
        fflush(stdout); \
    } while (0)

static inline int finish_tests(const char *name) {
    printf("%s: %d checks, %d failed\n", name, checks, failures);
    return failures != 0;
}

#endif
