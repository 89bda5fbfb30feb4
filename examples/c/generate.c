// SPDX-License-Identifier: MIT
// generate.c - continues token ids greedily: the most probable token at each step.
//
//     generate MODEL COUNT ID...      prints up to COUNT ids
//
// It reads a whole file into memory aligned to 64 bytes. A program that shares the file with others maps it instead.
#include <llamac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 2 };   // the result is the same for every number

static void *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    void *data = NULL;
    long size = -1;
    if (file && !fseek(file, 0, SEEK_END)) size = ftell(file);
    if (size > 0) data = aligned_alloc(64, ((size_t)size + 63) / 64 * 64);
    if (data && (fseek(file, 0, SEEK_SET) || fread(data, 1, (size_t)size, file) != (size_t)size)) {
        free(data);
        data = NULL;
    }
    if (file) fclose(file);
    *bytes = data ? (size_t)size : 0;
    return data;
}

static int is_stop(const llamac_model_info *info, int token) {
    for (int i = 0; i < info->n_stop_ids; i++)
        if (info->stop_ids[i] == token) return 1;
    return 0;
}

// Prints the continuation of n prompt ids. The prompt is one eval with many rows, each further token one with a row.
static int generate(llamac_session *session, const llamac_model_info *info, const int32_t *ids, int n, int count,
                    llamac_error *err) {
    const llamac_sampling greedy = { .temperature = 0, .top_p = 1 };
    llamac_row *rows = calloc((size_t)n, sizeof *rows);
    float *logits = malloc(sizeof(float) * (size_t)info->vocab_size);
    void *scratch = malloc((size_t)info->vocab_size * LLAMAC_SAMPLE_SCRATCH);
    int failed = !rows || !logits || !scratch;
    if (failed) snprintf(err->message, sizeof err->message, "out of memory");
    for (int i = 0; i < n && !failed; i++)
        rows[i] = (llamac_row){ .token = ids[i], .position = i, .want_logits = i == n - 1 };
    for (int length = n; count > 0 && !failed; count--, length++) {
        failed = llamac_eval(session, rows, n, logits, NULL, err);
        const int token = failed ? -1
            : llamac_sample(logits, info->n_token_ids, &greedy, (uint64_t)length, NULL, scratch, err);
        failed = token < 0;
        if (failed || is_stop(info, token)) break;
        printf("%d\n", token);
        rows[0] = (llamac_row){ .token = token, .position = length, .want_logits = 1 };
        n = 1;
    }
    free(rows), free(logits), free(scratch);
    return failed ? -1 : 0;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: generate MODEL COUNT ID...\n");
        return 2;
    }
    if (llamac_version() / 100 != LLAMAC_VERSION / 100) {
        fprintf(stderr, "this program was compiled for another version of llamac\n");
        return 1;
    }
    const int n = argc - 3;
    int32_t *ids = malloc(sizeof *ids * (size_t)n);
    for (int i = 0; i < n && ids; i++) ids[i] = (int32_t)strtol(argv[3 + i], NULL, 10);

    size_t bytes;
    void *data = read_file(argv[1], &bytes);
    llamac_model *model = NULL;
    llamac_session *session = NULL;
    llamac_model_info info;
    llamac_error err = { .message = "" };
    const llamac_session_options options = { .n_sequences = 1, .threads = llamac_has_threads() ? THREADS : 1 };
    int failed = 1;
    if (!data || !ids) snprintf(err.message, sizeof err.message, "%s cannot be read", argv[1]);
    else if (!llamac_model_open(&model, data, bytes, &err)
             && !llamac_session_open(&session, model, &options, &err)) {
        llamac_model_describe(model, &info);
        failed = generate(session, &info, ids, n, atoi(argv[2]), &err);
    }
    if (failed) fprintf(stderr, "generate: %s\n", err.message);
    llamac_session_close(&session);   // both accept NULL; the session before the model, the model before its memory
    llamac_model_close(&model);
    free(data), free(ids);
    return failed ? 1 : 0;
}
