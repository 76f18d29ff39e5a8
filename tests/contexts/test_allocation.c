/* test_allocation.c - the nth allocation fails, for every n; threads that cannot be started; tables
   that fail without a word. What fails says so, loses nothing, and leaves a context that works. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "test.h"

enum { DEVICES = 3, SAMPLES = 6, FEATURES = 4 };

/* ---- a step that uses most of the library ---------------------------------------------------- */

typedef struct step {
    dp_ctx *ctx;
    dp_scope *scope, *kept_in; /* kept_in outlives scope */
    dp_value batch, parts, outputs[DEVICES];
    float sums[DEVICES][FEATURES];
} step;

/* Constructors are not looked at one by one: what they could not make must show later. */
static dp_status make_batch(step *s)
{
    static const float data[SAMPLES][FEATURES] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}};
    dp_value samples[SAMPLES];
    for (int i = 0; i < SAMPLES; i++) {
        dp_tensor x = dp_wrap_const(data[i], DP_F32, 1, (int64_t[]){FEATURES});
        dp_container box = {.data = dp_of(s->scope, &x), .stack = true, .pad_dims = DP_PAD_NONE};
        dp_pair pairs[] = {
            {"x", dp_of(s->scope, &x)},
            {"label", dp_int(i)},
            {"name", dp_string(s->scope, "a sample")},
            {"box", dp_contain(s->scope, &box)},
        };
        samples[i] = dp_dict_make(s->scope, pairs, 4);
    }
    return dp_collate(s->scope, samples, SAMPLES, SAMPLES / DEVICES, &s->batch);
}

static dp_status forward(int local_rank, dp_scope *scope, void *user)
{
    step *s = user;
    const dp_tensor *x;
    dp_tensor y, column;
    DP_TRY(dp_as_tensor(dp_get(dp_at(s->parts, (size_t)local_rank), "x"), "x", DP_F32, 2, &x));
    DP_TRY(dp_tensor_new(scope, dp_local_device(s->ctx, local_rank), DP_F32, 2, x->shape, &y));
    DP_TRY(dp_axpby(s->ctx, 2.0, x, 1.0, x, &y));
    DP_TRY(dp_transpose(&y, 0, 1, &column));
    DP_TRY(dp_contiguous(dp_scope_child(scope), &column, &column));
    dp_value items[] = {dp_of(scope, &y), dp_of(scope, &column)};
    s->outputs[local_rank] = dp_list_make(scope, DP_TUPLE, items, 2);
    return dp_scope_alloc(scope, 70000) != NULL ? DP_OK : DP_ERR_NO_MEMORY;
}

static dp_status reduce(step *s)
{
    dp_part parts[DEVICES], scattered[DEVICES];
    float wide[DEVICES][DEVICES * FEATURES] = {{0}};
    for (int i = 0; i < DEVICES; i++) {
        for (int k = 0; k < FEATURES; k++) {
            s->sums[i][k] = (float)(i + k);
        }
        parts[i] = (dp_part){s->sums[i], s->sums[i], NULL};
    }
    DP_TRY(dp_all_reduce(s->ctx, parts, FEATURES, DP_F32, DP_OP_SUM));
    CHECK_F64(s->sums[DEVICES - 1][1], 6.0, 0.0);
    for (int i = 0; i < DEVICES; i++) {
        parts[i].recv = wide[i];
        scattered[i] = (dp_part){wide[i], s->sums[i], NULL};
    }
    DP_TRY(dp_all_gather(s->ctx, parts, FEATURES, DP_F32));
    DP_TRY(dp_reduce_scatter(s->ctx, scattered, FEATURES, DP_F32, DP_OP_MAX));
    DP_TRY(dp_reduce_to(s->ctx, parts, FEATURES, DP_F32, DP_OP_MIN, 1));
    CHECK_F64(s->sums[0][1], 6.0, 0.0);
    return dp_wait(s->ctx);
}

static void do_nothing(void *user)
{
    (void)user;
}

static dp_status collect(step *s, dp_value *out_kept)
{
    dp_value list = dp_list_make(s->scope, DP_LIST, s->outputs, DEVICES), gathered, copies, sum;
    dp_gather_config to_host = {.to_host = true}, to_last = {.local_rank = DEVICES - 1};
    const dp_tensor *y;
    float first[FEATURES];
    DP_TRY(dp_gather(s->ctx, s->scope, list, &to_host, &gathered));
    DP_TRY(dp_as_tensor(dp_at(gathered, 0), "y", DP_F32, 2, &y));
    CHECK_INT(y->shape[0], SAMPLES);
    DP_TRY(dp_replicate(s->ctx, s->scope, gathered, NULL, &copies));
    DP_TRY(dp_reduce_add(s->ctx, s->scope, copies, &to_last, &sum));
    DP_TRY(dp_as_tensor(dp_at(sum, 0), "sum", DP_F32, 2, &y));
    dp_tensor row;
    DP_TRY(dp_select(y, 0, 1, &row));
    DP_TRY(dp_read(s->ctx, &row, first, sizeof first));
    CHECK_F64(first[0], 5.0 * 3.0 * DEVICES, 0.0);
    DP_TRY(dp_scope_defer(s->scope, do_nothing, NULL));
    return dp_keep(s->kept_in, sum, out_kept);
}

static dp_status train(step *s)
{
    dp_value kept;
    dp_scope *batch = dp_scope_begin(s->ctx);
    dp_status status = dp_scope_attach(s->scope, batch);
    if (status != DP_OK) {
        dp_scope_end(batch);
        return status;
    }
    DP_TRY(make_batch(s));
    DP_TRY(dp_scatter(s->ctx, s->scope, s->batch, NULL, &s->parts));
    DP_TRY(dp_run(s->ctx, s->scope, forward, s));
    DP_TRY(reduce(s));
    DP_TRY(collect(s, &kept));
    CHECK_INT(kept.kind, DP_TUPLE);
    return DP_OK;
}

/* A scope that could not be begun need not be looked at, unless another one is begun after it. */
static dp_status take_step(dp_ctx *ctx)
{
    step s = {.ctx = ctx};
    dp_status status = DP_ERR_NO_MEMORY;
    s.kept_in = dp_scope_begin(ctx);
    s.scope = s.kept_in != NULL ? dp_scope_begin(ctx) : NULL;
    if (s.scope != NULL) {
        status = train(&s);
    }
    dp_scope_end(s.scope);
    dp_scope_end(s.kept_in);
    return status;
}

/* ---- the nth allocation fails ---------------------------------------------------------------- */

static void check_no_memory(size_t n, dp_status status)
{
    if (status != DP_ERR_NO_MEMORY || dp_last_error()[0] == '\0') {
        test_fail(__FILE__, __LINE__, "allocation %zu fails: %s, \"%s\"", n, dp_status_name(status),
                  dp_last_error());
    }
}

/* Open, take a step, close, with this allocator; true when it was asked to fail. */
static bool survives(size_t n, bool keep_failing)
{
    test_allocator counter = {.fail_at = n, .keep_failing = keep_failing};
    dp_config config = {.device_count = DEVICES, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK) {
        status = take_step(ctx);
        counter.fail_at = 0;
        CHECK(!dp_failure(ctx, NULL));
        CHECK_OK(take_step(ctx));
        CHECK_OK(take_step(ctx));
    }
    if (status != DP_OK) {
        check_no_memory(n, status);
        CHECK(counter.fail_count > 0);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return counter.fail_count > 0;
}

TEST_SLOW(the_nth_allocation_fails, 30)
{
    size_t n = 1;
    while (survives(n, false)) {
        n++;
    }
    CHECK(n > 30); /* there was something to fail */
}

TEST_SLOW(all_from_the_nth_allocation_on_fail, 30)
{
    size_t n = 1;
    while (survives(n, true)) {
        n++;
    }
    CHECK(n > 30);
}

/* A config with a text, and a list of devices, which the context copies. */
TEST(the_nth_allocation_of_open_fails)
{
    bool failed = true;
    CHECK_INT(setenv("DP_DEVICES", "0,1,0", 1), 0);
    for (size_t n = 1; failed; n++) {
        test_allocator counter = {.fail_at = n};
        dp_config config = {.job = "a job", .allocator = test_allocator_of(&counter)}, got;
        dp_ctx *ctx = NULL;
        dp_status status = dp_open(&config, &ctx);
        failed = counter.fail_count > 0;
        if (failed) {
            check_no_memory(n, status);
            CHECK(ctx == NULL);
        } else {
            CHECK_OK(dp_config_get(ctx, &got));
            CHECK_STR(got.job, "a job");
            CHECK(got.job != config.job);
            CHECK_INT(got.device_count, 3);
            CHECK_INT(got.devices[1], 1);
        }
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* What was half done must not be left behind in a scope that goes on. */
TEST_SLOW(a_scope_goes_on_after_a_failure, 30)
{
    bool failed = true;
    for (size_t n = 1; failed; n++) {
        test_allocator counter = {0};
        dp_config config = {.device_count = DEVICES, .allocator = test_allocator_of(&counter)};
        step s = {0};
        CHECK_OK(dp_open(&config, &s.ctx));
        s.kept_in = dp_scope_begin(s.ctx);
        s.scope = dp_scope_begin(s.ctx);
        counter.fail_at = counter.call_count + n;
        dp_status status = train(&s);
        failed = counter.fail_count > 0;
        CHECK(failed || status == DP_OK);
        counter.fail_at = 0;
        CHECK_OK(train(&s)); /* again, in the same scopes */
        CHECK_OK(train(&s));
        dp_scope_end(s.scope);
        dp_scope_end(s.kept_in);
        dp_close(s.ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* The reason reaches whoever asks, by way of values and scopes that could not be made. */
TEST(error_values_carry_no_memory_on)
{
    test_allocator counter = {0};
    dp_config config = {.device_count = 1, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx;
    dp_value out;
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *scope = dp_scope_begin(ctx), *other = dp_scope_begin(ctx);
    CHECK_INT(dp_string(other, "a block for the other scope").kind, DP_STRING);
    counter.fail_at = counter.call_count + 1;
    counter.keep_failing = true;
    dp_value text = dp_string(scope, "no block for this");
    CHECK_INT(text.kind, DP_ERROR);
    CHECK_INT(text.status, DP_ERR_NO_MEMORY);
    CHECK(text.as.s != NULL && text.as.s[0] != '\0');
    dp_value list = dp_list_make(other, DP_LIST, &text, 1);
    CHECK_INT(list.kind, DP_ERROR);
    CHECK_STATUS(dp_keep(other, list, &out), DP_ERR_NO_MEMORY);
    CHECK_STATUS(dp_scatter(ctx, other, list, NULL, &out), DP_ERR_NO_MEMORY);
    CHECK_STATUS(dp_collate(other, &text, 1, 1, &out), DP_ERR_NO_MEMORY);
    dp_scope_end(other);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- threads that cannot be started ---------------------------------------------------------- */

static void grant(rlim_t bytes)
{
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_AS, &limit), 0);
    limit.rlim_cur = bytes < limit.rlim_max ? bytes : limit.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_AS, &limit), 0);
}

static rlim_t address_space_bytes(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static bool limit_works(rlim_t base)
{
    grant(base + (4 << 20));
    void *data = malloc(64 << 20);
    grant(RLIM_INFINITY);
    free(data);
    return data == NULL;
}

/* A thread needs an address range for its stack: grant a little more from round to round. */
TEST_SLOW(a_worker_that_cannot_be_started, 30)
{
    enum { workers = 40 };
    rlim_t base = address_space_bytes();
    if (WITH_ASAN || WITH_TSAN || !limit_works(base)) {
        SKIP("the address space cannot be limited here");
    }
    test_allocator counter = {0};
    dp_config config = {.device_count = workers + 1, .allocator = test_allocator_of(&counter)};
    int failed = 0;
    dp_ctx *ctx = NULL;
    for (rlim_t mib = 4; ctx == NULL; mib += 24) {
        grant(base + (mib << 20));
        dp_status status = dp_open(&config, &ctx);
        grant(RLIM_INFINITY);
        if (status != DP_OK) {
            CHECK_ERROR(status, DP_ERR_NO_MEMORY, "worker");
            CHECK(ctx == NULL);
            CHECK_NO_LEAKS(&counter);
            failed++;
        }
    }
    CHECK(failed > 2);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- a table that fails without a word ------------------------------------------------------- */

static dp_device_ops silent;            /* the CPU's, but for what follows */
static const dp_device_ops *silent_cpu; /* the CPU's */
static dp_status silent_status;         /* what it returns, and says nothing */

static dp_status open_silently(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = silent_cpu->open(host, index, out);
    if (status == DP_OK) {
        (*out)->ops = &silent;
    }
    return status;
}

static dp_status sync_silently(dp_stream *stream)
{
    (void)stream;
    return silent_status;
}

static dp_ctx *open_silent(void)
{
    const dp_device_ops *backends[] = {&silent, NULL};
    dp_ctx *ctx = NULL;
    dp_config config;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_config_get(ctx, &config));
    silent_cpu = config.backends[0];
    dp_close(ctx);
    silent = *silent_cpu;
    silent.open = open_silently;
    silent.stream_sync = sync_silently;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx));
    return ctx;
}

TEST(a_silent_failure_is_given_no_older_sentence)
{
    dp_ctx *ctx = open_silent();
    CHECK_ERROR(dp_info_get(ctx, NULL), DP_ERR_INVALID, "dp_info_get: ");
    silent_status = DP_ERR_DEVICE;
    CHECK_STATUS(dp_wait(ctx), DP_ERR_DEVICE);
    CHECK(strncmp(dp_last_error(), "dp_wait: ", 9) == 0 && dp_last_error()[9] != '\0');
    CHECK(strstr(dp_last_error(), "dp_info_get") == NULL);
    dp_failure_info failure;
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, DP_ERR_DEVICE);
    CHECK_STATUS(dp_barrier(ctx), DP_ERR_DEVICE);
    silent_status = DP_OK;
    dp_close(ctx);
}
