// SPDX-License-Identifier: MIT
// slow_thread.c - simulates CPUs of two speeds: one thread of a session takes longer than the others. Prints the time
// of prompts and steps with equal shares and with shares by measured speed.
//
//     slow_thread MODEL.bin [THREADS [ROUNDS]]       MODEL.bin "-": random weights in q4; no rounds: only warms up
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "common.h"
#include "slowed_kernels.h"
#include "tiny_model.h"

enum { PROMPT = 256, STEPS = 240, MAX_ROUNDS = 99 };
static const struct tiny_shape made = {
    .dim = 256, .n_layers = 4, .n_heads = 4, .n_kv_heads = 2, .head_dim = 64, .ffn_dim = 704, .vocab = 500,
    .context = PROMPT + STEPS, .dtype = LLAMAC_Q4,
};

static struct tiny_file map_file(const char *path) {
    struct stat status;
    const int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &status)) { perror(path); exit(1); }
    void *data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED) { perror(path); exit(1); }
    return (struct tiny_file){ data, (size_t)status.st_size };
}

// The best of n times: the one that other programs have disturbed least.
static double best(const double *x, int n) {
    double least = x[0];
    for (int i = 1; i < n; i++) least = x[i] < least ? x[i] : least;
    return least;
}

static double eval_ms(llamac_session *s, const llamac_row *rows, int n) {
    const int64_t started = now_ns();
    if (llamac_eval(s, rows, n, NULL, NULL, &err)) { printf("eval: %s\n", err.message); exit(1); }
    return 1e-6 * (double)(now_ns() - started);
}

// The times of a prompt and of a step, in a new session: as a program sees them that starts with this prompt.
static void measure(const llamac_model *model, int threads, double times, int equal, double *prompt, double *step) {
    llamac_session *s = open_session(model, 1, 0, threads, NULL);
    llamac_row rows[PROMPT + STEPS];
    double steps[STEPS];
    for (int i = 0; i < PROMPT + STEPS; i++) rows[i] = (llamac_row){ i % 100, 0, i, 0 };
    slow_session(s);
    slowed.times[threads - 1] = times;
    slowed.keeps_equal_shares = equal;
    *prompt = eval_ms(s, rows, PROMPT);
    for (int i = 0; i < STEPS; i++) steps[i] = eval_ms(s, rows + PROMPT + i, 1);
    *step = best(steps, STEPS);
    llamac_session_close(&s);
}

static void compare(llamac_model *model, int threads, int rounds) {
    printf("%d threads, the last of them slower; ms, best of %d rounds in turn\n", threads, rounds);
    printf("%-8s %30s %30s\n", "", "prompt of 256", "step");
    printf("%-8s %10s %10s %8s %10s %10s %8s\n", "slower", "equal", "by speed", "ratio", "equal", "by speed", "ratio");
    for (int f = 0; f < 5; f++) {
        const double times = (const double[]){ 1, 1.5, 2, 3, 4 }[f];
        double prompt[2][MAX_ROUNDS], step[2][MAX_ROUNDS], p[2], d[2];
        for (int r = 0; r < rounds; r++)
            for (int by_speed = 0; by_speed < 2; by_speed++)
                measure(model, threads, times, !by_speed, &prompt[by_speed][r], &step[by_speed][r]);
        for (int by_speed = 0; by_speed < 2; by_speed++)
            p[by_speed] = best(prompt[by_speed], rounds), d[by_speed] = best(step[by_speed], rounds);
        printf("%-8.1f %10.2f %10.2f %8.2f %10.3f %10.3f %8.2f\n", times, p[0], p[1], p[0] / p[1], d[0], d[1],
               d[0] / d[1]);
    }
}

int main(int argc, char **argv) {
    const int threads = argc > 2 ? atoi(argv[2]) : 2, rounds = argc > 3 ? min_int(atoi(argv[3]), MAX_ROUNDS) : 3;
    const int is_made = argc < 2 || !strcmp(argv[1], "-");
    if (!llamac_has_threads() || threads < 2 || threads > SLOWED_THREADS) return 0;
    const struct tiny_file file = is_made ? tiny_model(&made) : map_file(argv[1]);
    llamac_model *model = open_model(file);
    double warm[2];
    measure(model, threads, 1, 1, warm, warm + 1);
    if (rounds > 0) compare(model, threads, rounds);
    llamac_model_close(&model);
    if (is_made) free(file.data);
    return 0;
}
