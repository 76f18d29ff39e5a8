/* test_context.c - open and close, workers, dp_run, streams, fork, several contexts at once. */

#define _GNU_SOURCE 1 /* sched_setaffinity */
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "process.h"

#define MAX_DEVICES 64

static dp_ctx *open_config(const dp_config *config)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(config, &ctx));
    CHECK(ctx != NULL);
    return ctx;
}

static dp_ctx *open_devices(int count)
{
    return open_config(&(dp_config){.device_count = count});
}

static dp_ctx *open_counted(int count, test_allocator *counter)
{
    return open_config(
        &(dp_config){.device_count = count, .allocator = test_allocator_of(counter)});
}

static double seconds_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A thread that was joined may be seen for a moment longer. */
static void check_thread_count(int want)
{
    for (int i = 0; i < 100 && count_threads() != want; i++) {
        rest(10);
    }
    CHECK_INT(count_threads(), want);
}

/* Of this process as it is, with what a sanitizer or an emulator adds when the first one starts. */
static int own_thread_count(void)
{
    dp_close(open_devices(2));
    rest(100);
    return count_threads();
}

static void wait_for(const atomic_int *value, int at_least)
{
    while (atomic_load(value) < at_least) {
        sched_yield();
    }
}

/* ---- a round of work that says whether the context is well ----------------------------------- */

typedef struct visit {
    atomic_int count[MAX_DEVICES];
    pthread_t thread[MAX_DEVICES];
} visit;

static dp_status note_visit(int local_rank, dp_scope *scope, void *user)
{
    visit *v = user;
    CHECK(scope != NULL && local_rank >= 0 && local_rank < MAX_DEVICES);
    v->thread[local_rank] = pthread_self();
    atomic_fetch_add(&v->count[local_rank], 1);
    return DP_OK;
}

static void check_all_reduce(dp_ctx *ctx, int device_count)
{
    float data[MAX_DEVICES][3];
    dp_part parts[MAX_DEVICES];
    for (int i = 0; i < device_count; i++) {
        data[i][0] = (float)(i + 1);
        data[i][1] = 1.0f;
        data[i][2] = (float)-i;
        parts[i] = (dp_part){data[i], data[i], NULL};
    }
    CHECK_OK(dp_all_reduce(ctx, parts, 3, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_wait(ctx));
    int sum = device_count * (device_count + 1) / 2;
    for (int i = 0; i < device_count; i++) {
        CHECK_F64(data[i][0], sum, 0.0);
        CHECK_F64(data[i][1], device_count, 0.0);
        CHECK_F64(data[i][2], device_count - sum, 0.0);
    }
}

static void check_works(dp_ctx *ctx, int device_count)
{
    visit v = {0};
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK(scope != NULL);
    CHECK_OK(dp_run(ctx, scope, note_visit, &v));
    for (int i = 0; i < MAX_DEVICES; i++) {
        CHECK_INT(v.count[i], i < device_count);
    }
    CHECK_INT(pthread_equal(v.thread[0], pthread_self()), 1);
    for (int i = 0; i < device_count; i++) {
        for (int k = 0; k < i; k++) {
            CHECK(!pthread_equal(v.thread[i], v.thread[k]));
        }
    }
    check_all_reduce(ctx, device_count);
    CHECK_OK(dp_barrier(ctx));
    dp_scope_end(scope);
}

/* ---- open and close -------------------------------------------------------------------------- */

TEST(any_number_of_devices_opens_and_works)
{
    const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, MAX_DEVICES};
    int own = own_thread_count();
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        test_allocator counter = {0};
        dp_ctx *ctx = open_counted(counts[i], &counter);
        check_thread_count(own + counts[i] - 1);
        for (int round = 0; round < 3; round++) {
            check_works(ctx, counts[i]);
            check_thread_count(own + counts[i] - 1);
        }
        dp_close(ctx);
        check_thread_count(own);
        CHECK_NO_LEAKS(&counter);
    }
}

TEST(a_world_of_one_starts_no_thread)
{
    int own = own_thread_count();
    dp_ctx *ctx = open_config(&(dp_config){.device_count = 1, .thread_count = 8});
    check_thread_count(own);
    float *data = test_room((1 << 20) * sizeof *data);
    dp_tensor tensor = dp_wrap(data, DP_F32, 1, (int64_t[]){1 << 20});
    CHECK_OK(dp_fill(ctx, &tensor, dp_int(1)));
    check_works(ctx, 1);
    check_thread_count(own);
    dp_close(ctx);
}

TEST(open_and_close_leave_nothing_behind)
{
    int threads = own_thread_count(), files = open_files();
    for (int i = 0; i < 100; i++) {
        dp_close(open_devices(1 + i % 4));
    }
    check_thread_count(threads);
    CHECK_INT(open_files(), files);
}

/* More in turn than the process may have at once. */
TEST(memory_goes_back_to_the_system)
{
    const struct rlimit at_most = {(rlim_t)1 << 30, (rlim_t)1 << 30};
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    const dp_config config = {.backends = backends, .device_count = 1, .thread_count = 1};
    if (WITH_ASAN || WITH_TSAN)
        SKIP("sanitizers take more addresses than there are");
    CHECK_INT(setrlimit(RLIMIT_AS, &at_most), 0);
    for (int i = 0; i < 16; i++) {
        dp_ctx *ctx = open_config(&config);
        dp_tensor tensor;
        CHECK_OK(dp_tensor_new(dp_scope_begin(ctx), dp_local_device(ctx, 0), DP_U8,
                               DP_SHAPE((int64_t)1 << 28), &tensor));
        dp_close(ctx);
    }
}

TEST(threads_per_device_is_a_fair_share)
{
    const struct {
        int cores, devices, asked, config, info;
    } cases[] = {
        {4, 2, 0, 2, 2},   {4, 3, 0, 1, 1},  {5, 2, 0, 2, 2},   {1, 8, 0, 1, 1}, {7, 1, 0, 7, 7},
        {9, 9, 0, 1, 1},   {16, 5, 0, 3, 3}, {4, 2, 1, 1, 1},   {4, 2, 7, 7, 7}, {5, 2, -1, -1, 2},
        {1, 3, -1, -1, 1}, {7, 1, 3, 3, 3},  {7, 1, -1, -1, 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dp_ctx *ctx = open_config(&(dp_config){.thread_count = cases[i].cores,
                                               .device_count = cases[i].devices,
                                               .threads_per_device = cases[i].asked});
        dp_info info;
        dp_config config;
        CHECK_OK(dp_info_get(ctx, &info));
        CHECK_OK(dp_config_get(ctx, &config));
        CHECK_INT(info.core_count, cases[i].cores);
        CHECK_INT(info.local_count, cases[i].devices);
        CHECK_INT(info.threads_per_device, cases[i].info);
        CHECK_INT(config.threads_per_device, cases[i].config);
        check_works(ctx, cases[i].devices);
        dp_close(ctx);
    }
}

static void count_warnings(const dp_log_record *record, void *user)
{
    atomic_int *count = user;
    if (record->level == DP_LOG_WARN) {
        atomic_fetch_add(count, 1);
    }
}

TEST(several_devices_on_one_core_are_warned_about)
{
    atomic_int warnings = 0;
    use_one_core();
    dp_config config = {
        .device_count = 3,
        .log = {.fn = count_warnings, .user = &warnings, .level = DP_LOG_WARN},
    };
    dp_ctx *ctx = open_config(&config);
    CHECK(warnings > 0);
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.core_count, 1);
    CHECK_INT(info.threads_per_device, 1);
    dp_close(ctx);

    warnings = 0;
    config.device_count = 1;
    dp_close(open_config(&config));
    CHECK_INT(warnings, 0);
}

/* Who spins keeps the core from the one it waits for. Sleeping takes a twentieth of this limit. */
TEST(several_devices_on_one_core_do_not_spin)
{
    use_one_core();
    dp_ctx *ctx = open_devices(4);
    visit v = {0};
    double start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < 300; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_run(ctx, scope, note_visit, &v));
        CHECK_OK(dp_barrier(ctx));
        dp_scope_end(scope);
    }
    CHECK(seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start < 0.1 * test_timeout_scale());
    CHECK_INT(v.count[3], 300);
    dp_close(ctx);
}

TEST(idle_workers_burn_nothing)
{
    dp_ctx *ctx = open_devices(2);
    for (int i = 0; i < 5; i++) {
        check_works(ctx, 2);
    }
    rest(50);
    double start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    rest(400);
    CHECK(seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start < 0.02 * test_timeout_scale());
    check_works(ctx, 2);
    dp_close(ctx);
}

static void count_call(void *user)
{
    atomic_int *count = user;
    atomic_fetch_add(count, 1);
}

TEST(close_ends_open_scopes)
{
    test_allocator counter = {0};
    atomic_int ended = 0;
    dp_ctx *ctx = open_counted(3, &counter);
    for (int i = 0; i < 5; i++) {
        dp_scope *scope = dp_scope_begin(ctx), *child = dp_scope_child(scope);
        dp_tensor tensor;
        CHECK(dp_scope_alloc(scope, 100000) != NULL && dp_scope_alloc(child, 100) != NULL);
        CHECK_OK(dp_tensor_new(child, dp_local_device(ctx, i % 3), DP_F64, 1, (int64_t[]){999},
                               &tensor));
        CHECK_OK(dp_scope_defer(scope, count_call, &ended));
        CHECK_OK(dp_scope_defer(child, count_call, &ended));
    }
    dp_close(ctx);
    CHECK_INT(ended, 10);
    CHECK_NO_LEAKS(&counter);
}

TEST(close_after_errors)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(2, &counter);
    dp_tensor tensor;
    CHECK_STATUS(dp_run(ctx, NULL, NULL, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_all_reduce(ctx, NULL, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID);
    CHECK_STATUS(dp_tensor_new(NULL, (dp_device){0, 0}, DP_F32, 0, NULL, &tensor), DP_ERR_INVALID);
    dp_abort(ctx, DP_ERR_ABORTED, "and the job failed");
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST(close_takes_null_and_what_is_closed)
{
    dp_close(NULL);
    dp_ctx *first = open_devices(2), *second = open_devices(3);
    dp_close(first);
    dp_close(first);
    check_works(second, 3);
    dp_close(second);
    dp_close(second);
    dp_close(NULL);
}

TEST(local_devices_can_be_asked)
{
    dp_ctx *ctx = open_devices(3);
    for (int i = 0; i < 3; i++) {
        dp_device device = dp_local_device(ctx, i);
        dp_device_info info;
        CHECK(device.backend >= 0 && device.index >= 0);
        CHECK(dp_local_stream(ctx, i) != NULL);
        CHECK_OK(dp_device_info_get(ctx, i, &info));
        CHECK(memchr(info.name, '\0', sizeof info.name) != NULL && info.name[0] != '\0');
        CHECK(memchr(info.bus_id, '\0', sizeof info.bus_id) != NULL);
        CHECK(info.compute_units >= 1 && info.host_memory);
    }
    const int wrong[] = {-1, 3, 64, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        dp_device none = dp_local_device(ctx, wrong[i]);
        CHECK(none.backend == -1 && none.index == -1);
        CHECK(dp_local_stream(ctx, wrong[i]) == NULL);
    }
    CHECK_INT(dp_local_device(NULL, 0).backend, -1);
    CHECK(dp_local_stream(NULL, 0) == NULL);
    dp_close(ctx);
}

/* As many as there is room for, and one more: refused, and nothing of it is left. */
TEST(many_contexts_can_be_open)
{
    enum { room = 1024 };
    test_allocator counter = {0};
    static dp_ctx *contexts[room];
    dp_ctx *more = NULL;
    dp_config config = {.device_count = 1, .allocator = test_allocator_of(&counter)};
    for (int i = 0; i < room; i++) {
        contexts[i] = open_config(&config);
    }
    size_t blocks = counter.live_blocks;
    CHECK_ERROR(dp_open(&config, &more), DP_ERR_UNSUPPORTED, "dp_open: ");
    CHECK_INT(counter.live_blocks, blocks);
    dp_close(contexts[room / 2]);
    contexts[room / 2] = open_config(&config);
    for (int i = 0; i < room; i++) {
        check_works(contexts[i], 1);
        dp_close(contexts[i]);
    }
    CHECK_NO_LEAKS(&counter);
}

/* ---- what no longer works is refused --------------------------------------------------------- */

static void check_context_refused(dp_ctx *ctx, dp_scope *scope)
{
    dp_info info;
    dp_config config;
    dp_device_info device;
    visit v = {0};
    CHECK_ERROR(dp_info_get(ctx, &info), DP_ERR_STATE, "dp_info_get: ");
    CHECK_ERROR(dp_config_get(ctx, &config), DP_ERR_STATE, "dp_config_get: ");
    CHECK_ERROR(dp_device_info_get(ctx, 0, &device), DP_ERR_STATE, "dp_device_info_get: ");
    CHECK_ERROR(dp_use_stream(ctx, 0, NULL), DP_ERR_STATE, "dp_use_stream: ");
    CHECK_ERROR(dp_wait(ctx), DP_ERR_STATE, "dp_wait: ");
    CHECK_ERROR(dp_run(ctx, scope, note_visit, &v), DP_ERR_STATE, "dp_run: ");
    CHECK_INT(v.count[0], 0);
    CHECK(dp_scope_begin(ctx) == NULL);
    CHECK(strncmp(dp_last_error(), "dp_scope_begin: ", 16) == 0);
    CHECK_INT(dp_local_device(ctx, 0).backend, -1);
    CHECK(dp_local_stream(ctx, 0) == NULL);
    dp_abort(ctx, DP_ERR_ABORTED, "nobody listens");
}

static void check_tensors_refused(dp_ctx *ctx)
{
    float from[2] = {1.0f, 2.0f}, to[2] = {3.0f, 4.0f};
    double item;
    dp_stats stats;
    dp_tensor x = dp_wrap(from, DP_F32, 1, (int64_t[]){2});
    dp_tensor y = dp_wrap(to, DP_F32, 1, (int64_t[]){2});
    CHECK_ERROR(dp_fill(ctx, &y, dp_int(1)), DP_ERR_STATE, "dp_fill: ");
    CHECK_ERROR(dp_copy(ctx, &y, &x, NULL), DP_ERR_STATE, "dp_copy: ");
    CHECK_ERROR(dp_cast(ctx, &y, &x), DP_ERR_STATE, "dp_cast: ");
    CHECK_ERROR(dp_axpby(ctx, 1.0, &x, 1.0, &x, &y), DP_ERR_STATE, "dp_axpby: ");
    CHECK_ERROR(dp_tensor_stats(ctx, &x, &stats), DP_ERR_STATE, "dp_tensor_stats: ");
    CHECK_ERROR(dp_read(ctx, &x, to, sizeof to), DP_ERR_STATE, "dp_read: ");
    CHECK_ERROR(dp_item(ctx, dp_int(1), &item), DP_ERR_STATE, "dp_item: ");
    CHECK_ERROR(dp_scatter_into(ctx, &x, 0, &y, 1), DP_ERR_STATE, "dp_scatter_into: ");
    CHECK_ERROR(dp_gather_into(ctx, &x, 1, 0, &y), DP_ERR_STATE, "dp_gather_into: ");
    CHECK_ERROR(dp_replicate_into(ctx, &x, &y, 1), DP_ERR_STATE, "dp_replicate_into: ");
    CHECK_ERROR(dp_reduce_add_into(ctx, &x, 1, &y), DP_ERR_STATE, "dp_reduce_add_into: ");
    CHECK(to[0] == 3.0f && to[1] == 4.0f);
}

static void check_values_refused(dp_ctx *ctx, dp_scope *scope)
{
    dp_value item = dp_int(3), out, other;
    dp_value list = {.as.items = &item, .count = 1, .kind = DP_LIST, .depth = 1};
    dp_gather_config host = {.to_host = true};
    CHECK_ERROR(dp_scatter(ctx, scope, item, NULL, &out), DP_ERR_STATE, "dp_scatter: ");
    CHECK_ERROR(dp_scatter_kwargs(ctx, scope, item, item, NULL, &out, &other), DP_ERR_STATE,
                "dp_scatter_kwargs: ");
    CHECK_ERROR(dp_gather(ctx, scope, list, &host, &out), DP_ERR_STATE, "dp_gather: ");
    CHECK_ERROR(dp_replicate(ctx, scope, item, NULL, &out), DP_ERR_STATE, "dp_replicate: ");
    CHECK_ERROR(dp_reduce_add(ctx, scope, list, &host, &out), DP_ERR_STATE, "dp_reduce_add: ");
}

static void check_collectives_refused(dp_ctx *ctx)
{
    float data[6] = {0};
    dp_part parts[3] = {
        {data, data + 3, NULL}, {data + 1, data + 4, NULL}, {data + 2, data + 5, NULL}};
    CHECK_ERROR(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM), DP_ERR_STATE, "dp_all_reduce: ");
    CHECK_ERROR(dp_all_reduce_scaled(ctx, parts, 1, DP_F32, DP_OP_SUM, 2.0), DP_ERR_STATE,
                "dp_all_reduce_scaled: ");
    CHECK_ERROR(dp_broadcast(ctx, parts, 1, DP_F32, 0), DP_ERR_STATE, "dp_broadcast: ");
    CHECK_ERROR(dp_all_gather(ctx, parts, 1, DP_F32), DP_ERR_STATE, "dp_all_gather: ");
    CHECK_ERROR(dp_reduce_scatter(ctx, parts, 1, DP_F32, DP_OP_SUM), DP_ERR_STATE,
                "dp_reduce_scatter: ");
    CHECK_ERROR(dp_all_to_all(ctx, parts, 1, DP_F32), DP_ERR_STATE, "dp_all_to_all: ");
    CHECK_ERROR(dp_reduce_to(ctx, parts, 1, DP_F32, DP_OP_SUM, 0), DP_ERR_STATE, "dp_reduce_to: ");
    CHECK_ERROR(dp_gather_to(ctx, parts, 1, DP_F32, 0), DP_ERR_STATE, "dp_gather_to: ");
    CHECK_ERROR(dp_scatter_from(ctx, parts, 1, DP_F32, 0), DP_ERR_STATE, "dp_scatter_from: ");
    CHECK_ERROR(dp_barrier(ctx), DP_ERR_STATE, "dp_barrier: ");
}

static void check_all_refused(dp_ctx *ctx, dp_scope *scope)
{
    check_context_refused(ctx, scope);
    check_tensors_refused(ctx);
    check_values_refused(ctx, scope);
    check_collectives_refused(ctx);
}

TEST(a_closed_context_refuses_every_call)
{
    dp_ctx *alive = open_devices(2), *closed = open_devices(3);
    dp_close(closed);
    dp_scope *scope = dp_scope_begin(alive);
    check_all_refused(closed, scope);
    check_all_refused(closed, NULL);
    check_works(alive, 2);
    dp_scope_end(scope);
    dp_close(alive);
    check_all_refused(alive, NULL);
}

/* ---- fork ------------------------------------------------------------------------------------ */

static void check_scope_refused(dp_scope *scope)
{
    dp_tensor tensor, turned, out;
    dp_value value;
    float data[6] = {0};
    atomic_int calls = 0;
    tensor = dp_wrap(data, DP_F32, 2, (int64_t[]){2, 3});
    CHECK_OK(dp_transpose(&tensor, 0, 1, &turned));
    CHECK(dp_scope_child(scope) == NULL);
    CHECK(dp_scope_alloc(scope, 10) == NULL);
    CHECK_ERROR(dp_scope_defer(scope, count_call, &calls), DP_ERR_STATE, "dp_scope_defer: ");
    CHECK_ERROR(dp_keep(scope, dp_int(1), &value), DP_ERR_STATE, "dp_keep: ");
    CHECK_ERROR(dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, 0, NULL, &out), DP_ERR_STATE,
                "dp_tensor_new: ");
    CHECK_ERROR(dp_contiguous(scope, &turned, &out), DP_ERR_STATE, "dp_contiguous: ");
    CHECK_INT(dp_string(scope, "text").status, DP_ERR_STATE);
    CHECK_INT(dp_of(scope, &tensor).status, DP_ERR_STATE);
    CHECK_INT(calls, 0);
}

static void check_child(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 0);
}

TEST(a_child_of_fork_may_only_close)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = NULL;
    dp_tensor tensor;
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.name = "net"}, &net));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, 1, (int64_t[]){999}, &tensor));
    check_works(ctx, 3);
    for (int round = 0; round < 3; round++) {
        pid_t child = fork();
        if (child == 0) {
            check_all_refused(ctx, scope);
            check_scope_refused(scope);
            CHECK_ERROR(dp_module_destroy(net), DP_ERR_STATE, "dp_module_destroy: ");
            dp_close(ctx);
            CHECK_NO_LEAKS(&counter);
            check_all_refused(ctx, NULL);
            exit(EXIT_SUCCESS);
        }
        check_child(child);
        check_works(ctx, 3);
    }
    CHECK_OK(dp_fill(ctx, &tensor, dp_int(1)));
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static void *return_at_once(void *user)
{
    return user;
}

/* Under a sanitizer or an emulator they may not, with dp.h or without. */
static bool children_can_start_threads(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        int failed = pthread_create(&thread, NULL, return_at_once, NULL);
        _exit(failed != 0 || pthread_join(thread, NULL) != 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(a_child_of_fork_may_open_its_own)
{
    dp_ctx *ctx = open_devices(2);
    check_works(ctx, 2);
    if (!children_can_start_threads()) {
        SKIP("no child of fork can start a thread here");
    }
    pid_t child = fork();
    if (child == 0) {
        dp_ctx *own = open_devices(3);
        check_works(own, 3);
        CHECK_STATUS(dp_wait(ctx), DP_ERR_STATE);
        dp_close(ctx);
        check_works(own, 3);
        dp_close(own);
        exit(EXIT_SUCCESS);
    }
    check_child(child);
    check_works(ctx, 2);
    dp_close(ctx);
}

TEST(a_child_of_fork_may_ignore_the_context)
{
    dp_ctx *ctx = open_devices(2);
    pid_t child = fork();
    if (child == 0) {
        _exit(EXIT_SUCCESS);
    }
    check_child(child);
    check_works(ctx, 2);
    dp_close(ctx);
}

typedef struct gate { /* holds all ranks of a dp_run until it is opened */
    atomic_int entered, open;
    dp_ctx *ctx;
} gate;

static dp_status pass_gate(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)scope;
    gate *g = user;
    atomic_fetch_add(&g->entered, 1);
    wait_for(&g->open, 1);
    return DP_OK;
}

static void *run_gate(void *user)
{
    gate *g = user;
    dp_scope *scope = dp_scope_begin(g->ctx);
    CHECK_OK(dp_run(g->ctx, scope, pass_gate, g));
    dp_scope_end(scope);
    return NULL;
}

TEST(fork_while_a_run_is_under_way)
{
    test_allocator counter = {0};
    gate g = {.ctx = open_counted(2, &counter)};
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, run_gate, &g), 0);
    wait_for(&g.entered, 2);
    pid_t child = fork();
    if (child == 0) {
        dp_close(g.ctx);
        CHECK_NO_LEAKS(&counter);
        exit(EXIT_SUCCESS);
    }
    check_child(child);
    atomic_store(&g.open, 1);
    CHECK_INT(pthread_join(thread, NULL), 0);
    check_works(g.ctx, 2);
    dp_close(g.ctx);
    CHECK_NO_LEAKS(&counter);
}

typedef struct churn {
    dp_ctx *ctx;
    atomic_int stop;
} churn;

static void *churn_scopes(void *user)
{
    churn *c = user;
    while (!atomic_load(&c->stop)) {
        dp_scope *scope = dp_scope_begin(c->ctx);
        CHECK(dp_scope_alloc(scope, 5000) != NULL && dp_scope_child(scope) != NULL);
        dp_scope_end(scope);
    }
    return NULL;
}

/* Whatever lock another thread held at that moment, the child must be able to close. */
TEST_SLOW(fork_while_another_thread_uses_scopes, 30)
{
    if (WITH_ASAN || WITH_TSAN) {
        SKIP("the sanitizer's own locks are not ready for fork");
    }
    churn c = {.ctx = open_devices(2)};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, churn_scopes, &c), 0);
    }
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(5); /* a child does not inherit the test's */
            dp_close(c.ctx);
            _exit(EXIT_SUCCESS);
        }
        check_child(child);
    }
    atomic_store(&c.stop, 1);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    check_works(c.ctx, 2);
    dp_close(c.ctx);
}

/* ---- dp_run ---------------------------------------------------------------------------------- */

typedef struct results {
    unsigned char *bytes[MAX_DEVICES];
    dp_scope *scope[MAX_DEVICES];
    dp_ctx *ctx;
} results;

static dp_status leave_results(int local_rank, dp_scope *scope, void *user)
{
    results *r = user;
    r->scope[local_rank] = scope;
    r->bytes[local_rank] = dp_scope_alloc(scope, 1000);
    CHECK(r->bytes[local_rank] != NULL);
    memset(r->bytes[local_rank], local_rank + 1, 1000);
    return DP_OK;
}

TEST(scopes_of_ranks_live_as_long_as_the_callers)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(5, &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    results r = {0};
    CHECK_OK(dp_run(ctx, scope, leave_results, &r));
    CHECK(dp_scope_alloc(scope, 100000) != NULL);
    for (int i = 0; i < 5; i++) {
        CHECK(r.scope[i] != scope);
        for (int k = 0; k < i; k++) {
            CHECK(r.scope[i] != r.scope[k]);
        }
        for (int k = 0; k < 1000; k++) {
            CHECK_INT(r.bytes[i][k], i + 1);
        }
    }
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST(many_runs_in_one_scope_allocate_nothing)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    visit v = {0};
    CHECK_OK(dp_run(ctx, scope, note_visit, &v));
    size_t calls = counter.call_count;
    for (int i = 0; i < 100; i++) {
        CHECK_OK(dp_run(ctx, scope, note_visit, &v));
    }
    CHECK_INT(counter.call_count, calls);
    CHECK_INT(v.count[2], 101);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static dp_status end_own_scope(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)user;
    CHECK(dp_scope_alloc(scope, 100) != NULL);
    dp_scope_end(scope);
    return DP_OK;
}

/* A child may end earlier: the next run gives each rank one that lives, and is nobody else's. */
TEST(a_rank_may_end_its_scope)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    dp_scope *scope = dp_scope_begin(ctx), *others[3];
    results r = {0};
    CHECK_OK(dp_run(ctx, scope, end_own_scope, NULL));
    for (int i = 0; i < 3; i++) {
        others[i] = dp_scope_begin(ctx);
    }
    CHECK_OK(dp_run(ctx, scope, leave_results, &r));
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 3; k++) {
            CHECK(r.scope[i] != others[k]);
        }
        dp_scope_end(others[i]);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_INT(r.bytes[i][999], i + 1);
    }
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static dp_status attach_own_scope(int local_rank, dp_scope *scope, void *user)
{
    dp_scope **keeper = user;
    return dp_scope_attach(keeper[local_rank], scope);
}

/* What was handed over is no longer the rank's: the next run gives each rank another scope. */
TEST(a_rank_may_hand_its_scope_over)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(2, &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_scope *keepers[2] = {dp_scope_begin(ctx), dp_scope_begin(ctx)};
    results before = {0}, after = {0};
    CHECK_OK(dp_run(ctx, scope, leave_results, &before));
    CHECK_OK(dp_run(ctx, scope, attach_own_scope, keepers));
    CHECK_OK(dp_run(ctx, scope, leave_results, &after));
    for (int i = 0; i < 2; i++) {
        CHECK(after.scope[i] != before.scope[i]);
        CHECK_INT(before.bytes[i][999], i + 1);
        dp_scope_end(keepers[i]);
        CHECK_INT(after.bytes[i][999], i + 1);
        keepers[i] = dp_scope_begin(ctx);
    }
    CHECK_OK(dp_run(ctx, scope, leave_results, &after));
    for (int i = 0; i < 2; i++) {
        CHECK(after.scope[i] != keepers[0] && after.scope[i] != keepers[1]);
        dp_scope_end(keepers[i]);
        CHECK_INT(after.bytes[i][999], i + 1);
    }
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static dp_status use_own_device(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    dp_tensor a, b;
    dp_stats stats;
    float host[100];
    int64_t shape[] = {100};
    dp_device device = dp_local_device(ctx, local_rank);
    CHECK_OK(dp_tensor_new(scope, device, DP_F32, 1, shape, &a));
    CHECK_OK(dp_tensor_new(scope, device, DP_F32, 1, shape, &b));
    CHECK_OK(dp_fill(ctx, &a, dp_int(local_rank + 1)));
    CHECK_OK(dp_copy(ctx, &b, &a, NULL));
    CHECK_OK(dp_axpby(ctx, 2.0, &a, 1.0, &b, &b));
    CHECK_OK(dp_tensor_stats(ctx, &b, &stats));
    CHECK_F64(stats.sum_squares, 100.0 * 9.0 * (local_rank + 1) * (local_rank + 1), 0.0);
    CHECK_OK(dp_read(ctx, &b, host, sizeof host));
    CHECK_F64(host[99], 3.0 * (local_rank + 1), 0.0);
    dp_scope *own = dp_scope_begin(ctx);
    CHECK(dp_scope_alloc(own, 10) != NULL);
    dp_scope_end(own);
    return DP_OK;
}

TEST(a_rank_may_use_its_own_device)
{
    dp_ctx *ctx = open_devices(4);
    for (int i = 0; i < 20; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_run(ctx, scope, use_own_device, ctx));
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

typedef struct plan { /* what each rank of a run returns, and how late */
    dp_status status[MAX_DEVICES];
    const char *text[MAX_DEVICES];
    int delay_ms[MAX_DEVICES];
    atomic_int finished;
} plan;

static dp_status follow_plan(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    plan *p = user;
    rest(p->delay_ms[local_rank]);
    atomic_fetch_add(&p->finished, 1);
    if (p->text[local_rank] != NULL) {
        return dp_error(p->status[local_rank], "%s", p->text[local_rank]);
    }
    return p->status[local_rank];
}

static void check_plan(dp_ctx *ctx, plan *p, int device_count, dp_status want, const char *rank)
{
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_run(ctx, scope, follow_plan, p), want, rank);
    CHECK_INT(p->finished, device_count);
    CHECK(strncmp(dp_last_error(), "dp_run: ", 8) == 0);
    dp_scope_end(scope);
    CHECK_OK(dp_wait(ctx));
}

TEST(the_first_failure_in_rank_order_wins)
{
    dp_ctx *ctx = open_devices(5);
    plan late = {.status = {[1] = DP_ERR_USER, [3] = DP_ERR_NO_MEMORY},
                 .text = {[1] = "one is late", [3] = "three is early"},
                 .delay_ms = {[1] = 30}};
    check_plan(ctx, &late, 5, DP_ERR_USER, "local rank 1");
    CHECK(strstr(dp_last_error(), "one is late") != NULL);
    CHECK(strstr(dp_last_error(), "three is early") == NULL);

    plan caller = {.status = {DP_ERR_INVALID, DP_ERR_USER, DP_ERR_USER, DP_ERR_USER, DP_ERR_USER},
                   .text = {"zero", "one", "two", "three", "four"},
                   .delay_ms = {20}};
    check_plan(ctx, &caller, 5, DP_ERR_INVALID, "local rank 0");
    CHECK(strstr(dp_last_error(), "zero") != NULL);

    plan last = {.status = {[4] = DP_ERR_MISMATCH}, .text = {[4] = "four alone"}};
    check_plan(ctx, &last, 5, DP_ERR_MISMATCH, "local rank 4");
    check_works(ctx, 5);
    dp_close(ctx);
}

TEST(a_world_of_one_reports_its_rank_too)
{
    dp_ctx *ctx = open_devices(1);
    plan p = {.status = {DP_ERR_USER}, .text = {"alone"}};
    check_plan(ctx, &p, 1, DP_ERR_USER, "local rank 0");
    CHECK(strstr(dp_last_error(), "alone") != NULL);
    dp_close(ctx);
}

/* A worker that fails without a word must not be given the words of an older failure. */
TEST(a_failure_without_a_sentence_gets_no_old_one)
{
    dp_ctx *ctx = open_devices(2);
    plan first = {.status = {[1] = DP_ERR_USER}, .text = {[1] = "an old story"}};
    check_plan(ctx, &first, 2, DP_ERR_USER, "an old story");
    plan second = {.status = {[1] = DP_ERR_NO_MEMORY}};
    check_plan(ctx, &second, 2, DP_ERR_NO_MEMORY, "local rank 1");
    CHECK(strstr(dp_last_error(), "an old story") == NULL);
    dp_close(ctx);
}

TEST(a_worker_that_swallows_an_error_has_not_failed)
{
    dp_ctx *ctx = open_devices(3);
    dp_scope *scope = dp_scope_begin(ctx);
    plan p = {.text = {"swallowed", "swallowed", "swallowed"}};
    CHECK_OK(dp_run(ctx, scope, follow_plan, &p));
    CHECK_INT(p.finished, 3);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(numbers_that_are_no_status_are_failures)
{
    const int odd[] = {DP_PENDING, 2, 77, -13, -1000, INT_MAX, INT_MIN};
    dp_ctx *ctx = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx);
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        plan p = {.status = {[1] = (dp_status)odd[i]}};
        CHECK(dp_run(ctx, scope, follow_plan, &p) < 0);
        CHECK(strstr(dp_last_error(), "local rank 1") != NULL);
        CHECK(!dp_failure(ctx, NULL));
    }
    dp_scope_end(scope);
    check_works(ctx, 2);
    dp_close(ctx);
}

static dp_status run_again(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    dp_ctx *ctx = user;
    visit v = {0};
    CHECK_ERROR(dp_run(ctx, scope, note_visit, &v), DP_ERR_STATE, "dp_run: ");
    CHECK_INT(v.count[0], 0);
    return DP_OK;
}

static dp_status call_collectives(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)scope;
    check_collectives_refused(user);
    return DP_OK;
}

TEST(no_run_and_no_collective_inside_a_run)
{
    const int counts[] = {1, 2, 3};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        dp_ctx *ctx = open_devices(counts[i]);
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_run(ctx, scope, run_again, ctx));
        CHECK_OK(dp_run(ctx, scope, call_collectives, ctx));
        dp_scope_end(scope);
        check_works(ctx, counts[i]);
        dp_close(ctx);
    }
}

static dp_status run_other(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    dp_ctx **others = user;
    check_works(others[local_rank], 2 + local_rank);
    return DP_OK;
}

TEST(a_rank_may_run_another_context)
{
    dp_ctx *ctx = open_devices(3), *others[3];
    for (int i = 0; i < 3; i++) {
        others[i] = open_devices(2 + i);
    }
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < 10; i++) {
        CHECK_OK(dp_run(ctx, scope, run_other, others));
    }
    dp_scope_end(scope);
    for (int i = 0; i < 3; i++) {
        dp_close(others[i]);
    }
    dp_close(ctx);
}

static dp_status close_context(int local_rank, dp_scope *scope, void *user)
{
    CHECK(scope != NULL);
    if (local_rank == 1) {
        dp_close(user);
        CHECK(strncmp(dp_last_error(), "dp_close: ", 10) == 0);
    }
    return DP_OK;
}

/* A worker cannot wait for its own end: it is told so, and the context goes on. */
TEST(close_inside_a_run_is_refused)
{
    test_allocator counter = {0};
    dp_ctx *ctx = open_counted(3, &counter);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_run(ctx, scope, close_context, ctx));
    check_works(ctx, 3);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST(a_second_thread_is_refused_while_a_run_is_under_way)
{
    gate g = {.ctx = open_devices(2)};
    pthread_t thread;
    visit v = {0};
    dp_scope *scope = dp_scope_begin(g.ctx);
    CHECK_INT(pthread_create(&thread, NULL, run_gate, &g), 0);
    wait_for(&g.entered, 2);
    CHECK_ERROR(dp_run(g.ctx, scope, note_visit, &v), DP_ERR_STATE, "dp_run: ");
    CHECK_INT(v.count[0] + v.count[1], 0);
    check_collectives_refused(g.ctx);
    atomic_store(&g.open, 1);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_OK(dp_run(g.ctx, scope, note_visit, &v));
    CHECK_INT(v.count[0] + v.count[1], 2);
    dp_scope_end(scope);
    dp_close(g.ctx);
}

typedef struct contender {
    dp_ctx *ctx;
    int won;
} contender;

static void *contend(void *user)
{
    contender *c = user;
    for (int i = 0; i < 300; i++) {
        visit v = {0};
        dp_scope *scope = dp_scope_begin(c->ctx);
        dp_status status = dp_run(c->ctx, scope, note_visit, &v);
        CHECK(status == DP_OK || status == DP_ERR_STATE);
        CHECK_INT(v.count[0] + v.count[1] + v.count[2], status == DP_OK ? 3 : 0);
        c->won += status == DP_OK;
        dp_scope_end(scope);
    }
    return NULL;
}

TEST(two_threads_that_run_at_once_do_not_crash)
{
    dp_ctx *ctx = open_devices(3);
    contender contenders[2] = {{ctx, 0}, {ctx, 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, contend, &contenders[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    CHECK(contenders[0].won + contenders[1].won > 0);
    check_works(ctx, 3);
    dp_close(ctx);
}

TEST(a_run_needs_a_scope_of_its_context)
{
    dp_ctx *ctx = open_devices(2), *other = open_devices(2);
    dp_scope *scope = dp_scope_begin(ctx), *foreign = dp_scope_begin(other);
    visit v = {0};
    CHECK_ERROR(dp_run(ctx, foreign, note_visit, &v), DP_ERR_INVALID, "dp_run: ");
    CHECK_ERROR(dp_run(ctx, scope, NULL, &v), DP_ERR_INVALID, "dp_run: ");
    CHECK_INT(v.count[0] + v.count[1], 0);
    dp_scope_end(foreign);
    dp_scope_end(scope);
    dp_close(other);
    dp_close(ctx);
}

/* ---- signals --------------------------------------------------------------------------------- */

static dp_status check_signals(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    (void)user;
    const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGUSR1, SIGUSR2, SIGCHLD, SIGPIPE};
    const int raised[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL}; /* by the worker's own code */
    sigset_t blocked;
    CHECK_INT(pthread_sigmask(SIG_SETMASK, NULL, &blocked), 0);
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        CHECK_INT(sigismember(&blocked, signals[i]), local_rank != 0);
    }
    for (size_t i = 0; i < sizeof raised / sizeof raised[0]; i++) {
        CHECK_INT(sigismember(&blocked, raised[i]), 0);
    }
    return DP_OK;
}

TEST(signals_are_left_to_the_program)
{
    sigset_t before, after;
    CHECK_INT(sigemptyset(&before), 0);
    CHECK_INT(sigaddset(&before, SIGWINCH), 0);
    CHECK_INT(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
    dp_ctx *ctx = open_devices(3);
    CHECK_INT(pthread_sigmask(SIG_SETMASK, NULL, &after), 0);
    for (int i = 1; i < 32; i++) {
        CHECK_INT(sigismember(&after, i), i == SIGWINCH);
    }
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_run(ctx, scope, check_signals, NULL));
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- streams --------------------------------------------------------------------------------- */

static dp_stream *make_stream(dp_ctx *ctx, int local_rank)
{
    dp_dev *dev = dp_local_stream(ctx, local_rank)->dev;
    dp_stream *stream = NULL;
    CHECK_OK(dev->ops->stream_create(dev, 0, &stream));
    CHECK(stream != NULL);
    return stream;
}

TEST(a_stream_of_the_users_can_serve)
{
    dp_ctx *ctx = open_devices(2);
    dp_stream *own[2] = {dp_local_stream(ctx, 0), dp_local_stream(ctx, 1)};
    dp_stream *users = make_stream(ctx, 1);
    CHECK_OK(dp_use_stream(ctx, 1, users));
    CHECK(dp_local_stream(ctx, 1) == users && dp_local_stream(ctx, 0) == own[0]);
    check_works(ctx, 2);
    CHECK_OK(dp_use_stream(ctx, 1, NULL));
    CHECK(dp_local_stream(ctx, 1) == own[1]);
    check_works(ctx, 2);
    users->dev->ops->stream_destroy(users);
    dp_close(ctx);
}

TEST(a_foreign_stream_is_refused)
{
    dp_ctx *ctx = open_devices(2), *other = open_devices(2);
    dp_stream *own = dp_local_stream(ctx, 0), headless = {.dev = NULL};
    dp_dev nobody = {.ops = own->dev->ops, .host = own->dev->host};
    dp_stream invented = {.dev = &nobody};
    CHECK_ERROR(dp_use_stream(ctx, 0, dp_local_stream(ctx, 1)), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK_ERROR(dp_use_stream(ctx, 0, dp_local_stream(other, 0)), DP_ERR_INVALID, "");
    CHECK_ERROR(dp_use_stream(ctx, 0, &headless), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK_ERROR(dp_use_stream(ctx, 0, &invented), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK_ERROR(dp_use_stream(ctx, 2, own), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK_ERROR(dp_use_stream(ctx, -1, own), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK_ERROR(dp_use_stream(ctx, INT_MAX, NULL), DP_ERR_INVALID, "dp_use_stream: ");
    CHECK(dp_local_stream(ctx, 0) == own);
    check_works(ctx, 2);
    dp_close(other);
    dp_close(ctx);
}

/* ---- two contexts ---------------------------------------------------------------------------- */

static void *work_alone(void *user)
{
    int device_count = *(const int *)user;
    for (int i = 0; i < 10; i++) {
        dp_ctx *ctx = open_devices(device_count);
        for (int k = 0; k < 10; k++) {
            check_works(ctx, device_count);
        }
        dp_close(ctx);
    }
    return NULL;
}

TEST_SLOW(contexts_of_several_threads_do_not_meet, 20)
{
    int counts[] = {1, 2, 3, 4};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, work_alone, &counts[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
}

TEST(contexts_of_one_thread_take_turns)
{
    dp_ctx *a = open_devices(2), *b = open_devices(3), *c = open_devices(1);
    for (int i = 0; i < 10; i++) {
        check_works(a, 2);
        check_works(b, 3);
        check_works(c, 1);
    }
    dp_close(b);
    check_works(a, 2);
    check_works(c, 1);
    dp_close(a);
    check_works(c, 1);
    dp_close(c);
}

static void *open_here(void *user)
{
    dp_ctx **out = user;
    *out = open_devices(3);
    return NULL;
}

TEST(a_context_outlives_the_thread_that_opened_it)
{
    dp_ctx *ctx = NULL;
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, open_here, &ctx), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    check_works(ctx, 3);
    dp_close(ctx);
}
