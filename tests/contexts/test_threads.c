/* test_threads.c - OpenMP and BLAS use a device's share of threads while functions run on several.
   The implementation is in this file once more, static, with a loader that finds what a test says
   is there: libraries of this file, which only keep their numbers, or those of the system. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void *fake_dlsym(void *library, const char *name); /* dp/os_posix.h declares it weak */

static int fake_pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*fn)(void *user),
                               void *user);

#define DP_STATIC
#define DP_IMPLEMENTATION
#define dlsym          fake_dlsym
#define pthread_create fake_pthread_create
#include "dp.h"
#undef dlsym
#undef pthread_create

static bool no_trials; /* no thread is there for them */

static int fake_pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*fn)(void *user),
                               void *user)
{
    return no_trials && fn == dp__trial_set ? EAGAIN : pthread_create(out, attr, fn, user);
}

#include "methods.h"

/* ---- libraries ------------------------------------------------------------------------------- */

enum { OPENMP = 1, OPENBLAS = 2, BLIS = 4, MKL = 8, ACCELERATE = 16, LACKS_SET = 32, REAL = 64 };

static int loaded;
static int blas_kind = 1;   /* 0: without threads, 1: with its own, 2: with OpenMP's */
static bool blis_of_thread; /* as new versions are */
static atomic_int calls;    /* that changed a number */

static _Thread_local int openmp_mine = 8, mkl_mine;
static _Thread_local int64_t blis_mine = 5;
static atomic_int blas_all = 6, mkl_all = 7;
static _Atomic int64_t blis_all = 5;

static void openmp_set(int count)
{
    atomic_fetch_add(&calls, 1);
    openmp_mine = count;
}

static int openmp_get(void)
{
    return openmp_mine;
}

static void blas_set(int count)
{
    atomic_fetch_add(&calls, 1);
    atomic_store(&blas_all, count);
}

static int blas_get(void)
{
    return atomic_load(&blas_all);
}

static int blas_get_kind(void)
{
    return blas_kind;
}

static void blis_set(int64_t count)
{
    atomic_fetch_add(&calls, 1);
    if (blis_of_thread)
        blis_mine = count;
    else
        atomic_store(&blis_all, count);
}

static int64_t blis_get(void)
{
    return blis_of_thread ? blis_mine : atomic_load(&blis_all);
}

static int mkl_set(int count)
{
    int before = mkl_mine;
    atomic_fetch_add(&calls, 1);
    mkl_mine = count;
    return before;
}

static int mkl_get(void)
{
    return mkl_mine > 0 ? mkl_mine : atomic_load(&mkl_all);
}

static void is_there(void)
{
}

#define ENTRY(library, name, fn)                                                                   \
    {                                                                                              \
        library, name, (void (*)(void))fn                                                          \
    }

static const struct entry {
    int library;
    const char *name;
    void (*fn)(void);
} entries[] = {
    ENTRY(OPENMP, "omp_set_num_threads", openmp_set),
    ENTRY(OPENMP, "omp_get_max_threads", openmp_get),
    ENTRY(OPENBLAS, "openblas_set_num_threads", blas_set),
    ENTRY(OPENBLAS, "openblas_get_num_threads", blas_get),
    ENTRY(OPENBLAS, "openblas_get_parallel", blas_get_kind),
    ENTRY(OPENBLAS, "openblas_get_config", is_there),
    ENTRY(BLIS, "bli_thread_set_num_threads", blis_set),
    ENTRY(BLIS, "bli_thread_get_num_threads", blis_get),
    ENTRY(BLIS, "bli_info_get_version_str", is_there),
    ENTRY(MKL, "MKL_Set_Num_Threads_Local", mkl_set),
    ENTRY(MKL, "MKL_Get_Max_Threads", mkl_get),
    ENTRY(MKL, "MKL_Get_Version", is_there),
    ENTRY(ACCELERATE, "appleblas_sgeadd", is_there),
};

void *fake_dlsym(void *library, const char *name)
{
    void *found = NULL;
    CHECK(library == RTLD_DEFAULT);
    if ((loaded & REAL) != 0)
        return dlsym(library, name);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (strcmp(entries[i].name, name) == 0 && (loaded & entries[i].library) != 0)
            memcpy(&found, &entries[i].fn, sizeof found);
    return strstr(name, "_set_") != NULL && (loaded & LACKS_SET) != 0 ? NULL : found;
}

/* ---- what a device sees ---------------------------------------------------------------------- */

enum { DEVICES = 3, CORES = 7, EACH = CORES / DEVICES };

typedef struct numbers {
    int openmp, blas, blis, mkl;
} numbers;

static numbers numbers_here(void)
{
    return (numbers){openmp_get(), blas_get(), (int)blis_get(), mkl_get()};
}

static void check_numbers(numbers got, int openmp, int blas, int blis, int mkl)
{
    CHECK_INT(got.openmp, openmp);
    CHECK_INT(got.blas, blas);
    CHECK_INT(got.blis, blis);
    CHECK_INT(got.mkl, mkl);
}

static void check_as_before(void)
{
    check_numbers(numbers_here(), 8, 6, 5, 7);
    CHECK_INT(mkl_mine, 0);
}

typedef struct seen {
    numbers on[DEVICES];
    int fails; /* this local rank, counted from 1; 0: none */
} seen;

static dp_status look(int local_rank, dp_scope *scope, void *user)
{
    seen *s = user;
    (void)scope;
    s->on[local_rank] = numbers_here();
    return local_rank + 1 == s->fails ? dp_error(DP_ERR_USER, "no") : DP_OK;
}

static dp_ctx *open_with(dp_config config)
{
    dp_ctx *ctx = NULL;
    config.device_count = config.device_count != 0 ? config.device_count : DEVICES;
    config.thread_count = CORES;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static dp_ctx *open_default(void)
{
    return open_with((dp_config){0});
}

/* In a run of all devices. */
static void check_run(dp_ctx *ctx, int openmp, int blas, int blis, int mkl)
{
    seen s = {0};
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    for (int i = 0; i < DEVICES; i++)
        check_numbers(s.on[i], openmp, blas, blis, mkl);
}

static void only(int libraries)
{
    loaded = libraries;
    dp_ctx *ctx = open_default();
    check_as_before();
    for (int round = 0; round < 3; round++) {
        check_run(ctx, (libraries & OPENMP) != 0 ? EACH : 8, (libraries & OPENBLAS) != 0 ? EACH : 6,
                  (libraries & BLIS) != 0 ? EACH : 5, (libraries & MKL) != 0 ? EACH : 7);
        check_as_before();
    }
    dp_close(ctx);
    check_as_before();
}

/* ---- runs ------------------------------------------------------------------------------------ */

TEST(threads_of_openmp_are_shared_out)
{
    only(OPENMP);
}

TEST(threads_of_openblas_are_shared_out)
{
    only(OPENBLAS);
}

TEST(threads_of_blis_are_shared_out)
{
    for (int i = 0; i < 2; i++) {
        blis_of_thread = i == 1;
        only(BLIS);
    }
}

TEST(threads_of_mkl_are_shared_out)
{
    only(MKL);
}

TEST(threads_of_all_libraries_are_shared_out)
{
    only(OPENMP | OPENBLAS | BLIS | MKL);
    only(0);
    CHECK(atomic_load(&calls) > 0);
}

/* What the caller has set is put back, also where a function changes it. */
static dp_status change_all(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope, (void)user;
    openmp_set(100);
    blas_set(100);
    blis_set(100);
    mkl_set(100);
    return DP_OK;
}

TEST(own_numbers_of_the_caller_are_put_back)
{
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_default();
    for (int fails = 1; fails <= DEVICES; fails++) {
        seen s = {.fails = fails};
        CHECK_STATUS(dp_run(ctx, NULL, look, &s), DP_ERR_USER);
        check_as_before();
    }
    CHECK_OK(dp_run(ctx, NULL, change_all, NULL));
    check_as_before();
    check_run(ctx, EACH, EACH, EACH, EACH);
    mkl_set(9);
    openmp_set(9);
    check_run(ctx, EACH, EACH, EACH, EACH);
    check_numbers(numbers_here(), 9, 6, 5, 9);
    CHECK_INT(mkl_mine, 9);
    dp_close(ctx);
}

TEST(a_caller_who_wants_fewer_threads_gets_them)
{
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_default();
    openmp_set(1);
    blas_set(1);
    blis_set(1);
    mkl_set(1);
    check_run(ctx, 1, 1, 1, 1);
    check_numbers(numbers_here(), 1, 1, 1, 1);
    openmp_set(8);
    blas_set(6);
    blis_set(-1); /* nobody has said anything: it uses one, or what other variables say */
    mkl_set(0);
    check_run(ctx, EACH, EACH, -1, EACH);
    check_numbers(numbers_here(), 8, 6, -1, 7);
    dp_close(ctx);
}

/* Who has not said anything to BLIS has not to the other threads either. */
TEST(blis_that_was_not_told_is_left_alone)
{
    seen s = {0};
    loaded = BLIS;
    blis_of_thread = true;
    dp_ctx *ctx = open_default();
    blis_set(-1);
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    for (int i = 0; i < DEVICES; i++)
        CHECK_INT(s.on[i].blis, i == 0 ? -1 : 5);
    CHECK_INT(blis_mine, -1);
    dp_close(ctx);
}

TEST(threads_per_device_can_be_said)
{
    dp_config read;
    dp_info info;
    loaded = OPENMP | OPENBLAS;
    for (int each = 1; each <= 5; each++) {
        dp_ctx *ctx = open_with((dp_config){.threads_per_device = each});
        CHECK_OK(dp_config_get(ctx, &read));
        CHECK_OK(dp_info_get(ctx, &info));
        CHECK_INT(read.threads_per_device, each);
        CHECK_INT(info.threads_per_device, each);
        check_run(ctx, each, each, 5, 7);
        check_as_before();
        dp_close(ctx);
    }
    dp_ctx *ctx = NULL;
    CHECK_ERROR(dp_open(&(dp_config){.threads_per_device = -2}, &ctx), DP_ERR_INVALID,
                "dp_open: threads_per_device is -2");
}

TEST(libraries_can_be_left_alone)
{
    dp_config read;
    dp_info info;
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_with((dp_config){.threads_per_device = -1});
    CHECK_OK(dp_config_get(ctx, &read));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(read.threads_per_device, -1);
    CHECK_INT(info.threads_per_device, EACH);
    check_run(ctx, 8, 6, 5, 7);
    CHECK_INT(atomic_load(&calls), 0);
    dp_close(ctx);
}

TEST(one_device_has_all_threads)
{
    seen s = {0};
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_with((dp_config){.device_count = 1, .threads_per_device = 2});
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    check_numbers(s.on[0], 8, 6, 5, 7);
    CHECK_INT(atomic_load(&calls), 0);
    dp_close(ctx);
}

/* ---- what is said, to whoever listens -------------------------------------------------------- */

typedef struct said {
    int info, warn;
    char text[400]; /* of the last one */
} said;

static void hear(const dp_log_record *record, void *user)
{
    said *s = user;
    if (strstr(record->text, "threads_per_device") == NULL &&
        strstr(record->text, "cannot") == NULL)
        return;
    s->info += record->level == DP_LOG_INFO;
    s->warn += record->level == DP_LOG_WARN;
    snprintf(s->text, sizeof s->text, "%s", record->text);
}

/* ---- methods --------------------------------------------------------------------------------- */

static seen of_methods;

static dp_status note_method(dp_call *call)
{
    of_methods.on[call->local_rank] = numbers_here();
    call->out = dp_none();
    return DP_OK;
}

static void check_methods(int device_count, int each)
{
    for (int i = 0; i < device_count; i++)
        check_numbers(of_methods.on[i], each, each != 8 ? each : 6, each != 8 ? each : 5,
                      each != 8 ? each : 7);
    of_methods = (seen){0};
    check_as_before();
}

TEST(methods_on_several_devices_share_threads)
{
    const dp_method methods[] = {{"forward", note_method}, {"backward", note_method}};
    const float rows[DEVICES] = {0};
    dp_module *net = NULL, *par = NULL;
    dp_pass *pass = NULL;
    dp_value out;
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_default();
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 2}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    for (int64_t count = 1; count <= DEVICES; count++) {
        dp_tensor tensor = dp_wrap_const(rows, DP_F32, 1, &count);
        dp_value args = DP_TUPLE_OF(scope, dp_of(scope, &tensor));
        CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
        check_methods((int)count, count > 1 ? EACH : 8); /* one part runs alone */
        CHECK_OK(dp_backward(pass, dp_none(), NULL));
        check_methods((int)count, count > 1 ? EACH : 8);
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

/* Each of two processes has one device, and half of the cores. */
static dp_status one_of_two(void *unused)
{
    const dp_method methods[] = {{"forward", note_method}};
    dp_module *net = NULL, *par = NULL;
    dp_value out;
    seen s = {0};
    (void)unused;
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_with((dp_config){.device_count = 1, .threads_per_device = EACH});
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    check_numbers(s.on[0], EACH, EACH, EACH, EACH);
    check_as_before();
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    check_methods(1, EACH);
    dp_scope_end(scope);
    dp_close(ctx);
    return DP_OK;
}

TEST(one_device_of_each_process_has_its_share)
{
    for (int i = 0; i < 4; i++) {
        blis_of_thread = i % 2 == 1;
        no_trials = i >= 2;
        CHECK_OK(dp_spawn(2, one_of_two, NULL));
    }
}

/* A process alone with one device lets in another one, of which it has to leave threads. */
typedef struct growing {
    const char *place; /* where they meet */
    said heard;
} growing;

static void set_place(const growing *own, bool comes_later)
{
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_PROCESS", "0", 1);
    setenv("DP_PROCESS_COUNT", "1", 1);
    setenv("DP_PROCESS_LIMIT", "2", 1);
    setenv("DP_SECRET", "of this test", 1);
    setenv("DP_ADDR", own->place, 1);
    if (comes_later)
        setenv("DP_REJOIN", "1", 1);
}

static dp_ctx *open_growing(growing *own)
{
    return open_with((dp_config){.device_count = 1,
                                 .threads_per_device = EACH,
                                 .recovers = true,
                                 .log = {.fn = hear, .user = &own->heard}});
}

static pid_t start_later(growing *own)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid != 0)
        return pid;
    set_place(own, true);
    dp_close(open_growing(own));
    exit(EXIT_SUCCESS);
}

static void grow_once(dp_ctx *ctx, growing *own)
{
    bool came = false;
    int status = 0;
    pid_t pid = start_later(own);
    while (!came)
        CHECK_OK(dp_admit(ctx, &came));
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
}

TEST_SLOW(one_device_has_its_share_once_the_job_has_grown, 30)
{
    char place[40];
    growing own = {.place = place};
    seen s = {0};
    snprintf(place, sizeof place, "@test-threads-%d", (int)getpid());
    loaded = OPENMP | OPENBLAS | BLIS | MKL | ACCELERATE;
    set_place(&own, false);
    dp_ctx *ctx = open_growing(&own);
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    check_numbers(s.on[0], 8, 6, 5, 7);
    CHECK_INT(own.heard.info + own.heard.warn, 0);
    grow_once(ctx, &own);
    CHECK_OK(dp_run(ctx, NULL, look, &s));
    check_numbers(s.on[0], EACH, EACH, EACH, EACH);
    check_as_before();
    CHECK_INT(own.heard.info, 1);
    CHECK_INT(own.heard.warn, 1);
    while (dp_barrier(ctx) == DP_OK) /* the other one has left */
        ;
    CHECK_OK(dp_recover(ctx));
    grow_once(ctx, &own);
    CHECK_INT(own.heard.info, 1); /* it has been said */
    CHECK_INT(own.heard.warn, 1);
    dp_close(ctx);
}

/* ---- several contexts, several processes ----------------------------------------------------- */

typedef struct inner {
    dp_ctx *ctx;
    numbers before, after;
} inner;

static dp_status run_inner(int local_rank, dp_scope *scope, void *user)
{
    inner *all = user;
    (void)scope;
    if (local_rank != 1)
        return DP_OK;
    all->before = numbers_here();
    check_run(all->ctx, 1, 1, EACH, 1);
    all->after = numbers_here();
    return DP_OK;
}

TEST(a_run_inside_a_run_puts_back_what_it_found)
{
    loaded = OPENMP | OPENBLAS | MKL;
    dp_ctx *outer = open_default();
    inner all = {.ctx = open_with((dp_config){.threads_per_device = 1})};
    blis_set(EACH);
    CHECK_OK(dp_run(outer, NULL, run_inner, &all));
    check_numbers(all.before, EACH, EACH, EACH, EACH);
    CHECK_INT(all.after.openmp, EACH);
    CHECK_INT(all.after.mkl, EACH);
    CHECK_INT(all.after.blas, 1); /* of the process: the run around it may have as few */
    blis_set(5);
    check_as_before();
    dp_close(all.ctx);
    dp_close(outer);
}

typedef struct gate {
    atomic_int inside, open;
    dp_ctx *ctx;
} gate;

static dp_status pass_gate(int local_rank, dp_scope *scope, void *user)
{
    gate *g = user;
    (void)local_rank, (void)scope;
    atomic_fetch_add(&g->inside, 1);
    while (atomic_load(&g->open) == 0)
        sched_yield();
    return DP_OK;
}

static void *run_gate(void *user)
{
    gate *g = user;
    CHECK_OK(dp_run(g->ctx, NULL, pass_gate, g));
    CHECK_INT(openmp_get(), 8);
    return NULL;
}

static pthread_t enter_gate(gate *g, int each)
{
    pthread_t thread;
    g->ctx = open_with((dp_config){.threads_per_device = each});
    CHECK_INT(pthread_create(&thread, NULL, run_gate, g), 0);
    while (atomic_load(&g->inside) < DEVICES)
        sched_yield();
    return thread;
}

static void leave_gate(gate *g, pthread_t thread)
{
    atomic_store(&g->open, 1);
    CHECK_INT(pthread_join(thread, NULL), 0);
    dp_close(g->ctx);
}

/* In whatever order they end. */
TEST(two_contexts_at_a_time_share_one_number)
{
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    for (int i = 0; i < 4; i++) {
        gate gates[2] = {0};
        pthread_t threads[2];
        int first = i % 2, each[2] = {3, 3};
        each[i / 2] = 2;
        for (int k = 0; k < 2; k++) {
            threads[k] = enter_gate(&gates[k], each[k]);
            check_numbers(numbers_here(), 8, k == 0 ? each[0] : 2, k == 0 ? each[0] : 2, 7);
        }
        leave_gate(&gates[first], threads[first]);
        check_numbers(numbers_here(), 8, 2, 2, 7);
        leave_gate(&gates[1 - first], threads[1 - first]);
        check_as_before();
    }
}

static void check_child(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* The run of its parent's other thread, which is not in the child, will never end there. */
TEST(a_child_of_fork_counts_its_own_runs)
{
    gate g = {0};
    loaded = OPENBLAS;
    if (WITH_TSAN)
        SKIP("no child of fork can start threads here");
    pthread_t thread = enter_gate(&g, 1);
    pid_t child = fork();
    if (child == 0) {
        dp_ctx *ctx = open_default();
        CHECK_INT(blas_get(), 1);
        check_run(ctx, 8, EACH, 5, 7);
        check_as_before();
        dp_close(ctx);
        exit(EXIT_SUCCESS);
    }
    check_child(child);
    CHECK_INT(blas_get(), 1);
    leave_gate(&g, thread);
    check_as_before();
}

static atomic_int inside;
static atomic_bool forked;

/* The child runs on in a function that its parent called. The other devices are in theirs, and hold
   no lock of an allocator. */
static dp_status fork_here(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    (void)scope;
    atomic_fetch_add(&inside, 1);
    while (local_rank > 0 ? !atomic_load(&forked) : atomic_load(&inside) < DEVICES)
        sched_yield();
    pid_t child = local_rank == 0 ? fork() : 1;
    if (child == 0) {
        dp_ctx *own = open_default();
        check_run(own, EACH, EACH, 5, 7);
        CHECK_INT(blas_get(), 6);
        dp_close(own);
        dp_close(ctx);
        exit(EXIT_SUCCESS);
    }
    atomic_store(&forked, true);
    if (local_rank == 0)
        check_child(child);
    return DP_OK;
}

TEST(a_fork_inside_a_run_changes_nothing_here)
{
    loaded = OPENMP | OPENBLAS;
    if (WITH_TSAN)
        SKIP("no child of fork can start threads here");
    dp_ctx *ctx = open_default();
    CHECK_OK(dp_run(ctx, NULL, fork_here, ctx));
    check_as_before();
    check_run(ctx, EACH, EACH, 5, 7);
    dp_close(ctx);
}

/* A child may come back from the run of its parent, once the other devices are done. */
static dp_status fork_last(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    (void)scope;
    if (local_rank > 0)
        return DP_OK;
    while (dp__gate_word(&ctx->team->inside) > 0)
        sched_yield();
    return fork() == 0 ? dp_error(DP_ERR_USER, "child") : DP_OK;
}

TEST(a_child_of_fork_comes_back_from_a_run)
{
    int status;
    loaded = OPENMP | OPENBLAS;
    if (WITH_TSAN)
        SKIP("no child of fork can start threads here");
    dp_ctx *ctx = open_default();
    if (dp_run(ctx, NULL, fork_last, ctx) != DP_OK) {
        check_as_before();
        dp_ctx *own = open_default();
        for (int round = 0; round < 2; round++) {
            check_run(own, EACH, EACH, 5, 7);
            check_as_before();
            blas_set(1 + EACH);
            check_run(own, EACH, EACH, 5, 7);
            CHECK_INT(blas_get(), 1 + EACH);
            blas_set(6);
        }
        dp_close(own);
        dp_close(ctx);
        exit(EXIT_SUCCESS);
    }
    CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_as_before();
    dp_close(ctx);
}

/* ---- what is said ---------------------------------------------------------------------------- */

static said say(int libraries, int each, int device_count)
{
    said s = {0};
    loaded = libraries;
    dp_ctx *ctx = open_with((dp_config){
        .device_count = device_count, .threads_per_device = each, .log = {.fn = hear, .user = &s}});
    int info = s.info, warn = s.warn;
    check_run(ctx, (libraries & LACKS_SET) == 0 && (libraries & OPENMP) != 0 ? 1 : 8,
              (libraries & LACKS_SET) == 0 && (libraries & OPENBLAS) != 0 && blas_kind == 1 ? 1 : 6,
              5, (libraries & LACKS_SET) == 0 && (libraries & MKL) != 0 ? 1 : 7);
    dp_close(ctx);
    CHECK_INT(s.info, info); /* not at each run */
    CHECK_INT(s.warn, warn);
    return s;
}

static void check_said(said s, int info, int warn, const char *text)
{
    CHECK_INT(s.info, info);
    CHECK_INT(s.warn, warn);
    CHECK_SAYS(s.text, text);
}

TEST(what_was_done_is_said_once)
{
    check_said(say(OPENMP | OPENBLAS | MKL, 1, DEVICES), 1, 0,
               "OpenMP, OpenBLAS and MKL may use 1 thread on each device while your functions run "
               "(threads_per_device)");
    check_said(say(OPENMP, 1, DEVICES), 1, 0, "OpenMP may use 1 thread on each");
    check_said(say(0, 1, DEVICES), 0, 0, "");
    check_said(say(ACCELERATE, 1, DEVICES), 0, 1,
               "Accelerate cannot be told to use 1 thread on each device: set "
               "VECLIB_MAXIMUM_THREADS=1 before the program starts");
    check_said(say(OPENBLAS | LACKS_SET, 1, DEVICES), 0, 1, "set OPENBLAS_NUM_THREADS=1");
    check_said(say(ACCELERATE | OPENMP, 1, DEVICES), 1, 1, "OpenMP may use");
}

TEST(openblas_with_openmp_follows_openmp)
{
    blas_kind = 2;
    check_said(say(OPENMP | OPENBLAS, 1, DEVICES), 1, 0, "OpenMP may use");
    check_said(say(OPENBLAS, 1, DEVICES), 0, 1, "OpenBLAS cannot be told");
    blas_kind = 0; /* it has no threads */
    check_said(say(OPENMP | OPENBLAS, 1, DEVICES), 1, 0, "OpenMP may use");
    check_said(say(OPENBLAS, 1, DEVICES), 0, 0, "");
    check_as_before();
}

/* Each allocation of dp_open fails once. */
TEST(no_memory_for_libraries_leaks_none)
{
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    bool failed = true;
    for (size_t at = 1; failed; at++) {
        test_allocator counter = {.fail_at = at};
        dp_ctx *ctx = NULL;
        dp_status status = dp_open(&(dp_config){.device_count = 2,
                                                .thread_count = 2,
                                                .allocator = test_allocator_of(&counter)},
                                   &ctx);
        failed = counter.fail_count > 0;
        CHECK_STATUS(status, failed ? DP_ERR_NO_MEMORY : DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
        check_as_before();
    }
}

/* ---- from now on ----------------------------------------------------------------------------- */

static dp_ctx *limited(int each, said *s)
{
    dp_ctx *ctx = open_with(
        (dp_config){.device_count = 1, .threads_per_device = each, .log = {.fn = hear, .user = s}});
    CHECK_INT(s->info + s->warn, 0);
    CHECK_OK(dp_threads_limit(ctx));
    return ctx;
}

static void as_before(void)
{
    openmp_set(8);
    blas_set(6);
    blis_set(5);
    mkl_set(0);
    check_as_before();
}

TEST(a_limit_stays)
{
    for (int i = 0; i < 2; i++) {
        said s = {0};
        loaded = OPENMP | OPENBLAS | BLIS | MKL;
        blis_of_thread = i == 1;
        as_before();
        dp_ctx *ctx = limited(2, &s);
        check_numbers(numbers_here(), 2, 2, 2, 2);
        check_said(s, 1, 0,
                   "OpenMP, OpenBLAS, BLIS and MKL may use 2 threads on each device from now on "
                   "(threads_per_device)");
        dp_ctx *several = open_with((dp_config){.threads_per_device = 1});
        check_run(several, 1, 1, 1, 1);
        check_numbers(numbers_here(), 2, 2, 2, 2);
        dp_close(several);
        dp_close(ctx);
        check_numbers(numbers_here(), 2, 2, 2, 2);
    }
}

TEST(a_limit_raises_nothing)
{
    said s = {0}, of_none = {0};
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    openmp_set(1);
    blas_set(3);
    blis_set(-1);
    mkl_set(2);
    int before = atomic_load(&calls);
    dp_close(limited(3, &s));
    check_numbers(numbers_here(), 1, 3, -1, 2);
    CHECK_INT(atomic_load(&calls), before);
    as_before();
    before = atomic_load(&calls);
    dp_close(limited(-1, &of_none));
    check_as_before();
    CHECK_INT(atomic_load(&calls), before);
    CHECK_INT(of_none.info, 0);
}

TEST(a_limit_says_what_cannot_be_told)
{
    said s = {0};
    loaded = ACCELERATE;
    dp_close(limited(1, &s));
    check_said(s, 0, 1, "set VECLIB_MAXIMUM_THREADS=1 before the program starts");
}

/* Another context's run brings back what was before it, or the limit, if that is less. A run that
   begins meanwhile keeps to it. */
TEST(a_limit_during_a_run_stays)
{
    loaded = OPENBLAS;
    for (int each = 1; each <= 5; each++) {
        gate gates[2] = {0};
        pthread_t threads[2];
        said s = {0};
        blas_set(4);
        threads[0] = enter_gate(&gates[0], 3);
        CHECK_INT(blas_get(), 3);
        dp_ctx *ctx = limited(each, &s);
        CHECK_INT(blas_get(), each < 3 ? each : 3);
        threads[1] = enter_gate(&gates[1], 2);
        CHECK_INT(blas_get(), each < 2 ? each : 2);
        for (int i = 0; i < 2; i++)
            leave_gate(&gates[i], threads[i]);
        CHECK_INT(blas_get(), each < 4 ? each : 4);
        dp_close(ctx);
    }
}

/* Its parent's run has no end there. */
TEST(a_limit_in_a_child_of_fork)
{
    gate g = {0};
    said s = {0};
    loaded = OPENBLAS;
    if (WITH_TSAN)
        SKIP("no child of fork can start threads here");
    pthread_t thread = enter_gate(&g, 1);
    pid_t child = fork();
    if (child == 0) {
        dp_close(limited(2, &s));
        CHECK_INT(blas_get(), 2);
        exit(EXIT_SUCCESS);
    }
    check_child(child);
    CHECK_INT(blas_get(), 1);
    leave_gate(&g, thread);
    CHECK_INT(blas_get(), 6);
}

static dp_status limit_here(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope;
    CHECK_ERROR(dp_threads_limit(user), DP_ERR_STATE, "dp_threads_limit: ");
    return DP_OK;
}

TEST(a_limit_is_not_for_functions_that_run_together)
{
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_default();
    CHECK_OK(dp_run(ctx, NULL, limit_here, ctx));
    check_as_before();
    dp_close(ctx);
}

/* A method that runs alone may set one: it stays, for the caller of the method too. */
static dp_status limit_in_method(dp_call *call)
{
    call->out = dp_none();
    return dp_threads_limit(call->ctx);
}

static dp_status limit_in_one_of_two(void *unused)
{
    const dp_method methods[] = {{"forward", limit_in_method}};
    dp_module *net = NULL, *par = NULL;
    dp_value out;
    (void)unused;
    loaded = OPENMP | OPENBLAS | BLIS | MKL;
    dp_ctx *ctx = open_with((dp_config){.device_count = 1, .threads_per_device = EACH});
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    check_as_before();
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    check_numbers(numbers_here(), EACH, EACH, EACH, EACH);
    openmp_set(1);
    blas_set(1);
    blis_set(1);
    mkl_set(1);
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    check_numbers(numbers_here(), 1, 1, 1, 1);
    dp_scope_end(scope);
    dp_close(ctx);
    return DP_OK;
}

TEST(a_limit_that_a_method_sets_stays)
{
    for (int i = 0; i < 2; i++) {
        blis_of_thread = i == 1;
        CHECK_OK(dp_spawn(2, limit_in_one_of_two, NULL));
    }
}

/* ---- those of the system --------------------------------------------------------------------- */

static dp__os_fn function_of(void *library, const char *name)
{
    dp__os_fn fn = NULL;
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    memcpy(&fn, &found, sizeof fn);
    return fn;
}

typedef struct real {
    void (*parallel)(void (*fn)(void *), void *user, unsigned count, unsigned flags);
    int (*get)(void);
    atomic_int threads[DEVICES];
    atomic_int number[DEVICES];
} real;

static void count_thread(void *user)
{
    atomic_fetch_add((atomic_int *)user, 1);
}

static dp_status use_openmp(int local_rank, dp_scope *scope, void *user)
{
    real *r = user;
    (void)scope;
    r->parallel(count_thread, &r->threads[local_rank], 0, 0);
    atomic_store(&r->number[local_rank], r->get());
    return DP_OK;
}

TEST(real_openmp_has_teams_of_the_share)
{
    real r = {0};
    void *library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL)
        SKIP("no libgomp");
    r.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))function_of(
        library, "GOMP_parallel");
    r.get = (int (*)(void))function_of(library, "omp_get_max_threads");
    ((void (*)(int))function_of(library, "omp_set_num_threads"))(5);
    loaded = REAL;
    dp_ctx *ctx = open_default();
    for (int round = 1; round <= 3; round++) {
        CHECK_OK(dp_run(ctx, NULL, use_openmp, &r));
        CHECK_INT(r.get(), 5);
        for (int i = 0; i < DEVICES; i++) {
            CHECK_INT(r.number[i], EACH);
            CHECK_INT(r.threads[i], round * EACH);
        }
    }
    dp_close(ctx);
}

static dp_status use_openblas(int local_rank, dp_scope *scope, void *user)
{
    real *r = user;
    (void)scope;
    atomic_store(&r->number[local_rank], r->get());
    return DP_OK;
}

TEST_SLOW(real_openblas_has_its_share, 60)
{
    real r = {0};
    void *library = WITH_TSAN ? NULL : dlopen("libopenblas.so.0", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL)
        SKIP(WITH_TSAN ? "OpenBLAS has locks of its own" : "no OpenBLAS");
    int kind = ((int (*)(void))function_of(library, "openblas_get_parallel"))();
    r.get = (int (*)(void))function_of(library, "openblas_get_num_threads");
    ((void (*)(int))function_of(library, "openblas_set_num_threads"))(2);
    if (kind != 1 || r.get() != 2)
        SKIP("OpenBLAS without threads of its own, or for one thread");
    loaded = REAL;
    dp_ctx *ctx = open_with((dp_config){.threads_per_device = 1});
    CHECK_OK(dp_run(ctx, NULL, use_openblas, &r));
    for (int i = 0; i < DEVICES; i++)
        CHECK_INT(r.number[i], 1);
    CHECK_INT(r.get(), 2);
    dp_close(ctx);
}
