/* test_cuda_program.c - a program that trains, in which there is not a word of processes or GPUs:
   the same alone and in a job, on the CPU and on simulated GPUs. */

#include "test.h"

#if defined(TEST_SIM)
#include <cuda_runtime_api.h>
#include "dp_nccl.h"
#include "grads.h"
#include "nets.h"

/* ---- the program ----------------------------------------------------------------------------- */

enum { STEPS = 4 };

static const dp_distributed_config *how;

static dp_module *wrapped(dp_ctx *ctx, dp_module **out)
{
    static const net_shape by_rows = {0};
    dp_module *net = net_create(ctx, &by_rows, 0);
    CHECK_OK(dp_distributed(net, how, out));
    return net;
}

static void program(float *out)
{
    dp_module *net, *par;
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.shards = 8}, &ctx));
    net = wrapped(ctx, &par);
    for (int step = 0; step < STEPS; step++)
        CHECK_OK(net_step(net, par, step));
    net_numbers(ctx, net, false, out);
    dp_close(ctx);
}

/* ---- how it is started ----------------------------------------------------------------------- */

static struct start {
    int processes, gpus; /* of the machine */
} now;
static int starts;
static float *trained;

static void set_word(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

/* As a launcher does it: all see all GPUs. */
static void run_program(meeting *m)
{
    char address[64];
    snprintf(address, sizeof address, "@test-program-%d-%d", (int)getppid(), starts);
    if (now.processes > 1) {
        setenv("DP_LAUNCH", "dp", 1);
        setenv("DP_ADDR", address, 1);
        set_word("DP_PROCESS", m->process);
        set_word("DP_PROCESS_COUNT", now.processes);
        set_word("DP_LOCAL_PROCESS", m->process);
        set_word("DP_LOCAL_PROCESS_COUNT", now.processes);
    }
    if (now.gpus > 0)
        sim_set_device_count(now.gpus);
    program(trained + m->process * NET_PARAMS);
    cuda_check_leaks();
    CHECK((sim_nccl_count().groups > 0) == (now.processes > 1 && now.gpus > 0));
}

static void check_starts(const struct start *list, size_t count)
{
    float first[NET_PARAMS];
    for (size_t i = 0; i < count; i++, starts++) {
        now = list[i];
        in_processes(now.processes, run_program);
        if (i == 0)
            memcpy(first, trained, sizeof first);
        for (int p = 0; p < now.processes; p++)
            CHECK_BYTES(trained + p * NET_PARAMS, first, sizeof first);
    }
    CHECK(isfinite(first[0]) && (first[0] < 1 || first[0] > 1));
}

TEST_SLOW(a_program_trains_alike_however_it_is_started, 120)
{
    static const struct start all[] = {{1, 0}, {1, 1}, {1, 8}, {2, 0}, {2, 2},
                                       {2, 8}, {4, 4}, {4, 8}, {8, 8}};
    trained = shared_memory(sizeof(float) * NET_PARAMS * BOOT_PROCESSES);
    check_starts(all, sizeof all / sizeof *all);
}

TEST_SLOW(a_program_trains_alike_in_all_ways_to_reduce, 120)
{
    static const struct start some[] = {{1, 0}, {1, 4}, {2, 4}, {4, 4}};
    static const dp_distributed_config ways[] = {
        {.reduction = DP_SUM_RANKS, .buckets.wire = DP_BF16},
        {.reduction = DP_MEAN_SAMPLES, .buckets = {.first_bytes = 1, .bytes = 1}},
        {.unused_params = DP_UNUSED_FOUND, .buckets.hook = plain_hook}};
    trained = shared_memory(sizeof(float) * NET_PARAMS * BOOT_PROCESSES);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        how = &ways[i];
        check_starts(some, sizeof some / sizeof *some);
    }
}

/* ---- those who are left ---------------------------------------------------------------------- */

/* Until it fails, or has done so many steps. */
static dp_status train_for(meeting *m, int steps, int signal)
{
    dp_config config = config_of(m, 1);
    dp_module *net, *par;
    dp_ctx *ctx = NULL;
    pthread_t thread;
    dp_status status = DP_OK;
    config.timeout_ms = 30000;
    CHECK_OK(dp_open(&config, &ctx));
    net = wrapped(ctx, &par);
    wait_for_all(m);
    if (signal != 0)
        CHECK_INT(pthread_create(&thread, NULL, after_a_moment, &signal), 0);
    for (int step = 0; status == DP_OK && step < steps; step++)
        status = net_step(net, par, step);
    dp_close(ctx);
    return status;
}

/* Process 2 of 3 is killed at any moment; the other two begin again, as a job of two. */
static void two_go_on(meeting *m)
{
    meeting fewer = *m;
    CHECK_INT(dp_status_class(train_for(m, 1000000, m->process == 2 ? SIGKILL : 0)), DP_CLASS_JOB);
    fewer.process_count = 2;
    CHECK_OK(train_for(&fewer, STEPS, 0));
}

TEST_SLOW(those_who_are_left_train_on, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 3; i++) {
        moment = (int)(test_random(&state) % 100000);
        on_gpus_but("112", 2, two_go_on);
    }
}

/* ---- every call fails once ------------------------------------------------------------------- */

static struct shared { /* by all processes */
    bool fired;
    dp_status status[2];
} * shared;
static long fail_at;

/* A failure of the driver is one of the device, and so of the job. */
static void a_call_fails(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    dp_module *net, *par;
    dp_ctx *ctx = NULL;
    bool any;
    config.timeout_ms = 30000;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    net = wrapped(ctx, &par);
    wait_for_all(m);
    if (m->process == 1)
        sim_fail_at(fail_at, 999, false);
    dp_status status = DP_OK;
    for (int step = 0; step < 2 && status == DP_OK; step++)
        status = net_step(net, par, step);
    if (m->process == 1)
        shared->fired = sim_fault_fired();
    sim_fail_at(0, 0, false);
    if (status == DP_OK) /* who has all it needs hears of it now */
        status = dp_any(ctx, true, &any);
    shared->status[m->process] = status;
    CHECK(status != DP_ERR_TIMEOUT);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_SLOW(every_call_of_one_process_fails_in_training, 120)
{
    static const dp_distributed_config early = {.buckets = {.first_bytes = 1, .bytes = 1}};
    how = &early;
    shared = shared_memory(sizeof *shared);
    for (fail_at = 1; fail_at == 1 || shared->fired; fail_at += test_step()) {
        on_gpus("11", a_call_fails);
        CHECK_INT(shared->status[0] == DP_OK, shared->status[1] == DP_OK);
    }
    CHECK(fail_at > 100);
}

/* ---- a GPU is lost --------------------------------------------------------------------------- */

static void *lose_soon(void *unused)
{
    (void)unused;
    rest(moment / 1000);
    sim_lose_device(1, cudaErrorIllegalAddress);
    return NULL;
}

/* Of two of process 0. */
static void one_gpu_is_lost(meeting *m)
{
    dp_config config = config_of(m, 1);
    dp_module *net, *par;
    pthread_t thread;
    dp_ctx *ctx = NULL;
    dp_status status = DP_OK;
    config.timeout_ms = 30000;
    CHECK_OK(dp_open(&config, &ctx));
    net = wrapped(ctx, &par);
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 0)
        CHECK_INT(pthread_create(&thread, NULL, lose_soon, NULL), 0);
    for (int step = 0; status == DP_OK; step++)
        status = net_step(net, par, step);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK(dp_failure(ctx, NULL));
    CHECK(now_ms() - start < (SOON_MS + moment / 1000) * test_timeout_scale());
    expect_findings();
    dp_close(ctx);
    forget_findings();
    if (m->process == 0)
        exit(EXIT_SUCCESS); /* what the lost one has stays */
}

TEST_SLOW(a_gpu_that_is_lost_ends_training_everywhere, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 3; i++) {
        moment = (int)(test_random(&state) % 200000);
        on_gpus("21", one_gpu_is_lost);
    }
}
#endif
