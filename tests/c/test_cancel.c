// SPDX-License-Identifier: MIT
// test_cancel.c - cancelled evals: before they begin, while they wait for the team, and while they select experts.
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#include "common.h"
#include "kernels.h"
#include "pool.h"
#include "session.h"
#include "tiny_model.h"

static void a_cancelled_eval_leaves_the_session_usable(void) {
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    for (int threads = 1; threads <= up_to_threads(2); threads++) {
        llamac_session *s = open_session(model, 1, 0, threads, NULL);
        const int32_t cancel = 1;
        int done = -1;
        const llamac_eval_options options = { .cancel = &cancel, .rows_done = &done };
        const llamac_row row = { .token = 1 };
        CHECK(llamac_eval(s, &row, 1, NULL, &options, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
        CHECK(done == 0 && llamac_length(s, 0) == 0, "%d rows done, length %d", done, llamac_length(s, 0));
        CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err) && llamac_length(s, 0) == 1, "%s", err.message);
        llamac_session_close(&s);
    }
    llamac_model_close(&model);
    free(file.data);
}

struct holder { int32_t started, cancel, stop; };

// Holds the team until the eval that waits for it has been cancelled and has returned.
static void hold_team(void *argument, const struct member *member) {
    struct holder *h = argument;
    const struct timespec pause = { .tv_nsec = 20000000 };
    if (member->index) return;
    __atomic_store_n(&h->started, 1, __ATOMIC_RELAXED);
    nanosleep(&pause, NULL);   // the eval below starts to wait
    __atomic_store_n(&h->cancel, 1, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&h->stop, __ATOMIC_RELAXED)) nanosleep(&pause, NULL);
}

static void *run_holder(void *holder) {
    struct contention c = { 0 };
    pool_run(&(struct pool_job){ 2, 0, hold_team, holder }, &c, NULL);
    return NULL;
}

static void an_eval_that_waits_for_the_team_can_be_cancelled(void) {
    if (!llamac_has_threads()) return;
    struct tiny_file file = tiny_model(&tiny_llama);
    llamac_model *model = open_model(file);
    llamac_session *s = open_session(model, 1, 0, 2, NULL);
    struct holder holder = { 0 };
    const llamac_eval_options options = { .cancel = &holder.cancel };
    const llamac_row row = { .token = 1 };
    pthread_t thread;
    alarm(100);   // a hang is a failure
    CHECK(pthread_create(&thread, NULL, run_holder, &holder) == 0, "thread");
    while (!__atomic_load_n(&holder.started, __ATOMIC_RELAXED)) sched_yield();
    CHECK(llamac_eval(s, &row, 1, NULL, &options, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
    CHECK(llamac_length(s, 0) == 0, "length %d", llamac_length(s, 0));
    __atomic_store_n(&holder.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    alarm(0);
    CHECK(!llamac_eval(s, &row, 1, NULL, NULL, &err) && llamac_length(s, 0) == 1, "%s", err.message);
    llamac_session_close(&s);
    llamac_model_close(&model);
    free(file.data);
}

// ---- while experts are selected

// Kernels whose softmax, which only routers use, requests that the eval be cancelled.
static struct {
    void (*softmax)(float *x, int n);
    struct kernels table;
    int32_t request, calls;
} requesting;

static void requesting_softmax(float *x, int n) {
    __atomic_store_n(&requesting.request, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&requesting.calls, 1, __ATOMIC_RELAXED);
    requesting.softmax(x, n);
}

static void experts_are_not_selected_after_a_cancellation(void) {
    enum { ROWS = 200 };
    struct tiny_file file = tiny_model(&tiny_experts);
    llamac_model *model = open_model(file);
    llamac_row rows[ROWS];
    for (int r = 0; r < ROWS; r++) rows[r] = (llamac_row){ token_at(0, r, tiny_experts.vocab), 0, r, r == ROWS - 1 };
    float expected[101], logits[101];
    for (int threads = 1; threads <= up_to_threads(3); threads++) {
        llamac_session *s = open_session(model, 1, 0, threads, NULL);
        CHECK(!llamac_eval(s, rows, ROWS, expected, NULL, &err), "%s", err.message);
        llamac_session_close(&s);
        s = open_session(model, 1, 0, threads, NULL);
        const struct kernels *kernels = s->kernels;
        requesting.softmax = kernels->softmax;
        requesting.table = *kernels;
        requesting.table.softmax = requesting_softmax;
        requesting.request = requesting.calls = 0;
        s->kernels = &requesting.table;
        const llamac_eval_options options = { .cancel = &requesting.request };
        CHECK(llamac_eval(s, rows, ROWS, logits, &options, &err) && err.code == LLAMAC_CANCELLED, "%s", err.message);
        CHECK(llamac_length(s, 0) == 0, "length %d", llamac_length(s, 0));
        const int calls = requesting.calls;   // of a row: for its router, and for the gate of its shared expert
        CHECK(calls >= 1 && calls <= 2 * threads, "%d threads: experts of %d rows were selected", threads, calls);
        s->kernels = kernels;
        CHECK(!llamac_eval(s, rows, ROWS, logits, NULL, &err), "%s", err.message);
        CHECK(!memcmp(logits, expected, sizeof logits), "%d threads: other logits after a cancellation", threads);
        llamac_session_close(&s);
    }
    llamac_model_close(&model);
    free(file.data);
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(a_cancelled_eval_leaves_the_session_usable);
    RUN(an_eval_that_waits_for_the_team_can_be_cancelled);
    RUN(experts_are_not_selected_after_a_cancellation);
    CHECK(llamac_live_objects() == 0, "%ld objects leak", llamac_live_objects());
    return finish_tests("test_cancel");
}
