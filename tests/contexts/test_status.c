/* test_status.c - codes and their words, a thread's last sentence, the failure of a job. */

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "methods.h"
#include "test.h"

static dp_ctx *open_devices(int count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = count}, &ctx));
    CHECK(ctx != NULL);
    return ctx;
}

static void run_thread(void *(*fn)(void *user), void *user)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, fn, user), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
}

/* ---- codes ----------------------------------------------------------------------------------- */

typedef struct code {
    dp_status status;
    int value;
    dp_class class_;
    const char *name, *text;
} code;

/* Written out: what programs and other languages' bindings rely on must not move by accident. */
static const code codes[] = {
    {DP_OK, 0, DP_CLASS_NONE, "DP_OK", "ok"},
    {DP_PENDING, 1, DP_CLASS_NONE, "DP_PENDING", "in progress"},
    {DP_ERR_INVALID, -1, DP_CLASS_CALL, "DP_ERR_INVALID", "an argument is wrong"},
    {DP_ERR_STATE, -2, DP_CLASS_CALL, "DP_ERR_STATE",
     "not now: wrong order, closed, or another process"},
    {DP_ERR_UNSUPPORTED, -3, DP_CLASS_CALL, "DP_ERR_UNSUPPORTED", "the backend cannot do this"},
    {DP_ERR_MISMATCH, -4, DP_CLASS_CALL, "DP_ERR_MISMATCH", "ranks, replicas or fields disagree"},
    {DP_ERR_NO_MEMORY, -5, DP_CLASS_PASS, "DP_ERR_NO_MEMORY", "out of memory"},
    {DP_ERR_NO_DEVICE, -6, DP_CLASS_PASS, "DP_ERR_NO_DEVICE", "no such device"},
    {DP_ERR_USER, -7, DP_CLASS_PASS, "DP_ERR_USER", "a function of the user's failed"},
    {DP_ERR_DEVICE, -8, DP_CLASS_JOB, "DP_ERR_DEVICE", "the driver reports a failure"},
    {DP_ERR_REMOTE, -9, DP_CLASS_JOB, "DP_ERR_REMOTE", "another rank failed first"},
    {DP_ERR_TIMEOUT, -10, DP_CLASS_JOB, "DP_ERR_TIMEOUT", "a rank did not arrive in time"},
    {DP_ERR_ABORTED, -11, DP_CLASS_JOB, "DP_ERR_ABORTED", "the job was aborted"},
    {DP_ERR_INTERNAL, -12, DP_CLASS_JOB, "DP_ERR_INTERNAL", "a bug in dp.h, or in a backend"},
    {DP_ERR_FILE, -13, DP_CLASS_PASS, "DP_ERR_FILE", "a file is damaged, or the system refuses it"},
    {DP_ERR_NO_FILE, -14, DP_CLASS_PASS, "DP_ERR_NO_FILE", "no such file"},
    {DP_ERR_CHECK, -15, DP_CLASS_PASS, "DP_ERR_CHECK",
     "a check of $DP_DEBUG=check has found a mistake"},
};
#define CODE_COUNT (sizeof codes / sizeof codes[0])

TEST(every_code_has_its_words)
{
    for (size_t i = 0; i < CODE_COUNT; i++) {
        CHECK_INT(codes[i].status, codes[i].value);
        CHECK_STR(dp_status_name(codes[i].status), codes[i].name);
        CHECK_STR(dp_status_text(codes[i].status), codes[i].text);
        CHECK_INT(dp_status_class(codes[i].status), codes[i].class_);
    }
}

TEST(unknown_codes_have_words_too)
{
    const int unknown[] = {2, 77, -16, -128, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        dp_status status = (dp_status)unknown[i];
        CHECK(dp_status_name(status) != NULL && dp_status_name(status)[0] != '\0');
        CHECK(dp_status_text(status) != NULL && dp_status_text(status)[0] != '\0');
        for (size_t k = 0; k < CODE_COUNT; k++) {
            CHECK(strcmp(dp_status_name(status), codes[k].name) != 0);
        }
        CHECK((unsigned)dp_status_class(status) <= DP_CLASS_JOB);
    }
}

TEST(version_is_that_of_the_header)
{
    CHECK_INT(dp_version(), DP_VERSION);
}

/* ---- a thread's sentence --------------------------------------------------------------------- */

TEST(last_error_is_empty_at_first)
{
    CHECK_STR(dp_last_error(), "");
}

TEST(dp_error_formats_and_returns_its_status)
{
    for (size_t i = 0; i < CODE_COUNT; i++) {
        if (codes[i].class_ != DP_CLASS_NONE) {
            CHECK_INT(dp_error(codes[i].status, "%s %d", codes[i].name, codes[i].value),
                      codes[i].value);
            char want[64];
            snprintf(want, sizeof want, "%s %d", codes[i].name, codes[i].value);
            CHECK_STR(dp_last_error(), want);
        }
    }
    CHECK_INT(dp_error(DP_ERR_USER, "%s", "100%d %n"), DP_ERR_USER);
    CHECK_STR(dp_last_error(), "100%d %n");
}

TEST(dp_error_takes_its_own_sentence_as_an_argument)
{
    CHECK_INT(dp_error(DP_ERR_INVALID, "the inner reason"), DP_ERR_INVALID);
    CHECK_INT(dp_error(DP_ERR_USER, "outer: %s", dp_last_error()), DP_ERR_USER);
    CHECK_STR(dp_last_error(), "outer: the inner reason");
}

TEST(dp_error_cuts_long_text)
{
    static char text[100001];
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        text[i] = (char)('a' + i % 26);
    }
    CHECK_INT(dp_error(DP_ERR_USER, "%s", text), DP_ERR_USER);
    size_t count = strlen(dp_last_error());
    CHECK(count >= 200 && count < sizeof text);
    CHECK(memcmp(dp_last_error(), text, 200) == 0);

    CHECK_INT(dp_error(DP_ERR_USER, "short"), DP_ERR_USER);
    CHECK_STR(dp_last_error(), "short");
}

static void *fail_in_thread(void *user)
{
    (void)user;
    CHECK_STR(dp_last_error(), "");
    CHECK_INT(dp_error(DP_ERR_USER, "of the other thread"), DP_ERR_USER);
    CHECK_STR(dp_last_error(), "of the other thread");
    return NULL;
}

TEST(last_error_belongs_to_its_thread)
{
    CHECK_INT(dp_error(DP_ERR_INVALID, "of the first thread"), DP_ERR_INVALID);
    for (int i = 0; i < 3; i++) {
        run_thread(fail_in_thread, NULL);
        CHECK_STR(dp_last_error(), "of the first thread");
    }
}

TEST(success_leaves_the_sentence_alone)
{
    CHECK_INT(dp_error(DP_ERR_USER, "older than all that follows"), DP_ERR_USER);
    dp_ctx *ctx = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor;
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, 1, (int64_t[]){5}, &tensor));
    CHECK_OK(dp_fill(ctx, &tensor, dp_int(3)));
    CHECK_INT(dp_string(scope, "text").kind, DP_STRING);
    CHECK_OK(dp_wait(ctx));
    CHECK_OK(dp_barrier(ctx));
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_STR(dp_last_error(), "older than all that follows");
}

TEST(the_sentence_outlives_the_context)
{
    dp_ctx *ctx = open_devices(1);
    CHECK_ERROR(dp_info_get(ctx, NULL), DP_ERR_INVALID, "dp_info_get: ");
    char before[1024];
    snprintf(before, sizeof before, "%s", dp_last_error());
    dp_close(ctx);
    CHECK_STR(dp_last_error(), before);
}

static dp_status fail_on_rank_1(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    (void)user;
    return local_rank == 1 ? dp_error(DP_ERR_USER, "seven beans are missing") : DP_OK;
}

TEST(a_workers_sentence_reaches_the_thread_that_waits)
{
    dp_ctx *ctx = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_run(ctx, scope, fail_on_rank_1, NULL), DP_ERR_USER, "seven beans are missing");
    CHECK(strstr(dp_last_error(), "local rank 1") != NULL);
    CHECK(!dp_failure(ctx, NULL)); /* of the PASS class: the job goes on */
    CHECK_OK(dp_wait(ctx));
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- the job's failure ----------------------------------------------------------------------- */

/* What works on data or on the devices says `why`, again and again. */
static void check_failed(dp_ctx *ctx, dp_scope *scope, dp_status why, const char *part)
{
    float number = 1.0f, into = 0.0f;
    dp_tensor tensor = dp_wrap(&number, DP_F32, 1, (int64_t[]){1});
    dp_tensor other = dp_wrap(&into, DP_F32, 1, (int64_t[]){1});
    dp_part parts[3] = {
        {&number, &number, NULL}, {&number, &number, NULL}, {&number, &number, NULL}};
    dp_stats stats;
    for (int round = 0; round < 2; round++) {
        CHECK_ERROR(dp_wait(ctx), why, part);
        CHECK_ERROR(dp_run(ctx, scope, run_nothing, NULL), why, part);
        CHECK_ERROR(dp_fill(ctx, &tensor, dp_int(3)), why, part);
        CHECK_ERROR(dp_copy(ctx, &other, &tensor, NULL), why, part);
        CHECK_ERROR(dp_cast(ctx, &other, &tensor), why, part);
        CHECK_ERROR(dp_axpby(ctx, 2.0, &tensor, 0.0, NULL, &other), why, part);
        CHECK_ERROR(dp_tensor_stats(ctx, &tensor, &stats), why, part);
        CHECK_ERROR(dp_read(ctx, &tensor, &into, sizeof into), why, part);
        CHECK_ERROR(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM), why, part);
        CHECK_ERROR(dp_broadcast(ctx, parts, 1, DP_F32, 0), why, part);
        CHECK_ERROR(dp_barrier(ctx), why, part);
    }
    CHECK_F64(number, 1.0, 0.0);
    CHECK_F64(into, 0.0, 0.0);
}

TEST(there_is_no_failure_at_first)
{
    dp_ctx *ctx = open_devices(3);
    dp_failure_info failure = {0};
    CHECK(!dp_failure(ctx, &failure));
    CHECK_ERROR(dp_info_get(ctx, NULL), DP_ERR_INVALID, "");
    CHECK(!dp_failure(ctx, &failure));
    CHECK(!dp_failure(NULL, &failure));
    CHECK(!dp_failure(NULL, NULL));
    dp_close(ctx);
}

TEST(abort_fails_every_later_call)
{
    dp_ctx *ctx = open_devices(3);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_abort(ctx, DP_ERR_ABORTED, "the user lost %s", "patience");
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, DP_ERR_ABORTED);
    CHECK(strstr(failure.text, "the user lost patience") != NULL);
    check_failed(ctx, scope, DP_ERR_ABORTED, "the user lost patience");
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(any_status_of_the_job_class_can_be_the_reason)
{
    for (size_t i = 0; i < CODE_COUNT; i++) {
        if (codes[i].class_ == DP_CLASS_JOB) {
            dp_ctx *ctx = open_devices(2);
            dp_abort(ctx, codes[i].status, "reason");
            CHECK_ERROR(dp_wait(ctx), codes[i].status, "reason");
            dp_close(ctx);
        }
    }
}

/* A job that failed with DP_OK, or with a status that says "go on", would be a contradiction. */
TEST(other_reasons_fail_the_job_all_the_same)
{
    const dp_status reasons[] = {DP_OK,        DP_PENDING,       DP_ERR_INVALID,
                                 DP_ERR_USER,  DP_ERR_NO_MEMORY, (dp_status)77,
                                 DP_ERR_STATE, (dp_status)-77};
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
        dp_ctx *ctx = open_devices(2);
        dp_abort(ctx, reasons[i], "reason %zu", i);
        dp_failure_info failure = {0};
        CHECK(dp_failure(ctx, &failure));
        CHECK_INT(dp_status_class(failure.status), DP_CLASS_JOB);
        CHECK_INT(failure.status, DP_ERR_ABORTED);
        CHECK_STATUS(dp_wait(ctx), DP_ERR_ABORTED);
        dp_close(ctx);
    }
}

/* The function in which the job failed is named, but not twice. */
TEST(a_function_is_named_once)
{
    static const char *const reasons[] = {"dp_wait: enough", "dp_waits: enough", "dp_wait enough"};
    static const char *const wants[] = {"dp_wait: the job failed: enough",
                                        "dp_wait: the job failed: dp_waits: enough",
                                        "dp_wait: the job failed: dp_wait enough"};
    for (int i = 0; i < 3; i++) {
        dp_ctx *ctx = NULL;
        CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
        dp_abort(ctx, DP_ERR_ABORTED, "%s", reasons[i]);
        CHECK_STATUS(dp_wait(ctx), DP_ERR_ABORTED);
        CHECK_STR(dp_last_error(), wants[i]);
        CHECK_ERROR(dp_barrier(ctx), DP_ERR_ABORTED, reasons[i]);
        dp_close(ctx);
    }
}

TEST(the_first_failure_wins)
{
    dp_ctx *ctx = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_abort(ctx, DP_ERR_DEVICE, "the first");
    dp_failure_info first, second;
    CHECK(dp_failure(ctx, &first));
    dp_abort(ctx, DP_ERR_TIMEOUT, "the second");
    CHECK_INT(dp_error(DP_ERR_USER, "noise"), DP_ERR_USER);
    CHECK(dp_failure(ctx, &second));
    CHECK_INT(second.status, DP_ERR_DEVICE);
    CHECK_STR(second.text, first.text);
    CHECK(strstr(second.text, "the first") != NULL);
    CHECK(strstr(second.text, "the second") == NULL);
    check_failed(ctx, scope, DP_ERR_DEVICE, "the first");
    dp_scope_end(scope);
    dp_close(ctx);
}

static void *abort_in_thread(void *user)
{
    dp_abort(user, DP_ERR_ABORTED, "from thread %d", 2);
    return NULL;
}

TEST(abort_works_from_another_thread)
{
    dp_ctx *ctx = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx);
    run_thread(abort_in_thread, ctx);
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure)); /* its thread is gone, its text is not */
    CHECK(strstr(failure.text, "from thread 2") != NULL);
    check_failed(ctx, scope, DP_ERR_ABORTED, "from thread 2");
    dp_scope_end(scope);
    dp_close(ctx);
}

static dp_status abort_on_rank_1(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    if (local_rank == 1) {
        dp_abort(user, DP_ERR_ABORTED, "rank 1 gives up");
    }
    return DP_OK;
}

TEST(abort_works_inside_dp_run)
{
    dp_ctx *ctx = open_devices(3);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_run(ctx, scope, abort_on_rank_1, ctx), DP_ERR_ABORTED, "rank 1 gives up");
    check_failed(ctx, scope, DP_ERR_ABORTED, "rank 1 gives up");
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(abort_keeps_long_text_within_bounds)
{
    static char text[50001];
    memset(text, 'x', sizeof text - 1);
    dp_ctx *ctx = open_devices(1);
    dp_abort(ctx, DP_ERR_ABORTED, "%s", text);
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure));
    CHECK(strlen(failure.text) >= 100 && strlen(failure.text) < sizeof text);
    CHECK_ERROR(dp_wait(ctx), DP_ERR_ABORTED, "xxxxxxxxxx");
    dp_close(ctx);
}

TEST(abort_takes_the_threads_own_sentence)
{
    dp_ctx *ctx = open_devices(1);
    CHECK_INT(dp_error(DP_ERR_USER, "what went wrong"), DP_ERR_USER);
    dp_abort(ctx, DP_ERR_ABORTED, "given up: %s", dp_last_error());
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure));
    CHECK(strstr(failure.text, "given up: what went wrong") != NULL);
    dp_close(ctx);
}

TEST(contexts_fail_apart)
{
    dp_ctx *broken = open_devices(2), *whole = open_devices(2);
    dp_abort(broken, DP_ERR_ABORTED, "only this one");
    CHECK_ERROR(dp_wait(broken), DP_ERR_ABORTED, "only this one");
    CHECK_OK(dp_wait(whole));
    CHECK_OK(dp_barrier(whole));
    CHECK(!dp_failure(whole, NULL));
    CHECK(dp_failure(broken, NULL));
    dp_abort(NULL, DP_ERR_ABORTED, "nobody");
    CHECK_OK(dp_barrier(whole));
    dp_close(broken);
    CHECK_OK(dp_barrier(whole));
    dp_close(whole);
}

/* What was in flight when the job failed can still be looked at, ended and closed. */
TEST(a_failed_context_can_be_cleaned_up)
{
    test_allocator counter = {0};
    dp_ctx *ctx;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_scope *outer = dp_scope_begin(ctx), *inner = dp_scope_child(outer);
    dp_value text = dp_string(inner, "still here");
    dp_abort(ctx, DP_ERR_ABORTED, "enough");
    CHECK_INT(text.kind, DP_STRING);
    CHECK_STR(text.as.s, "still here");
    dp_info info;
    (void)!dp_info_get(ctx, &info);
    dp_scope_end(inner);
    dp_scope_end(outer);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}
