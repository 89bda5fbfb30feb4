// SPDX-License-Identifier: MIT
// test_selftest.c - the recorded logits of tiny models, and how the self-test computes them; descriptions of models.
#include "tiny_model.h"

enum { POSITIONS = 1000 };   // more than a case has: one eval computes all

// The core's records, which `llamac selftest` compares on users' machines.
static void logits_have_the_recorded_bits(void) {
    llamac_selftest_case test;
    int supported;
    size_t best = 0, n = 0;
    while (llamac_isa_at(best, &supported) && !supported) best++;
    // without the processor's fused multiply-add, an emulator takes seconds for a case
    const size_t step = emulated && !strcmp(llamac_isa_at(best, &supported), "scalar") ? 5 : 1;
    for (; llamac_selftest_at(n, &test); n++) {
        if (n % step) continue;
        const llamac_selftest_options options = { NULL, 1, POSITIONS, 1 };
        char sha256[LLAMAC_SHA256_DIGITS];
        CHECK(!llamac_selftest(n, &options, sha256, &err), "%s", err.message);
        CHECK(!strcmp(sha256, test.sha256), "%s: %s", test.name, sha256);
    }
    CHECK(n == 21, "%zu cases", n);
}

static void the_self_test_computes_as_its_options_say(void) {
    llamac_selftest_case test;
    char sha256[LLAMAC_SHA256_DIGITS];
    CHECK(llamac_selftest_at(5, &test), "case 5");
    const llamac_selftest_options valid[] = {
        { "scalar", 1, 1, 1 }, { NULL, up_to_threads(3), 50, 2 }, { NULL, up_to_threads(2), 1000, 3 },
    };
    for (size_t i = 0; i < ARRAY_LEN(valid); i++) {
        CHECK(!llamac_selftest(5, &valid[i], sha256, &err), "%s", err.message);
        CHECK(!strcmp(sha256, test.sha256), "options %zu: %s", i, sha256);
    }
    const llamac_selftest_options invalid[] = { { "none", 1, 1, 1 }, { NULL, 0, 1, 1 }, { NULL, 1, 0, 1 },
                                                { NULL, 1, 1, 0 }, { NULL, 1, 1, 17 } };
    for (size_t i = 0; i < ARRAY_LEN(invalid); i++)
        CHECK(llamac_selftest(5, &invalid[i], sha256, &err) && err.code == LLAMAC_BAD_ARGUMENT, "options %zu", i);
    CHECK(llamac_selftest(21, &valid[0], sha256, &err) && err.code == LLAMAC_BAD_ARGUMENT, "no such case");
}

static void any_allocation_of_the_self_test_can_fail(void) {
    const long objects = llamac_live_objects();
    char sha256[LLAMAC_SHA256_DIGITS];
    int failed = 1;
    for (long n = 1; failed && n < 100; n++) {
        llamac_test_fail_allocation(n);
        failed = llamac_selftest(5, &(llamac_selftest_options){ NULL, 1, POSITIONS, 1 }, sha256, &err);
        llamac_test_fail_allocation(0);
        CHECK(!failed || err.code == LLAMAC_NO_MEMORY, "allocation %ld: %s", n, err.message);
        CHECK(llamac_live_objects() == objects, "allocation %ld: objects leak", n);
    }
    CHECK(!failed, "more than 100 allocations");
}

static void a_model_is_described(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_model_info info;
    llamac_model_describe(model, &info);
    CHECK(info.context == 400 && info.n_layers == 3 && info.vocab_size == 101 && info.n_token_ids == 101, "sizes");
    CHECK(info.bos_id == 1 && info.add_bos == 1 && info.n_stop_ids == 1 && info.stop_ids[0] == 2, "ids");
    llamac_model_close(&model);
    free(file.data);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(logits_have_the_recorded_bits);
    if (!emulated) {   // what does not depend on the processor
        RUN(the_self_test_computes_as_its_options_say);
        RUN(any_allocation_of_the_self_test_can_fail);
        RUN(a_model_is_described);
    }
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_selftest");
}
