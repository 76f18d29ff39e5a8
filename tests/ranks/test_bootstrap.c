/* test_bootstrap.c - jobs of several processes, which meet through dp_config.bootstrap alone. */

#include <pthread.h>
#include <time.h>
#include "examples/custom_device.h"
#include "meeting.h"

/* ---- ranks ----------------------------------------------------------------------------------- */

static void check_info(const dp_ctx *ctx, const meeting *m, int first, int local, int all)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process, m->process);
    CHECK_INT(info.process_count, m->process_count);
    CHECK_INT(info.rank_first, first);
    CHECK_INT(info.rank_count, all);
    CHECK_INT(info.local_count, local);
    CHECK_STR(info.coll_backend, "boot");
}

static void ranks_of_two_devices(meeting *m)
{
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    check_info(ctx, m, 2 * m->process, 2, 2 * m->process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

static void ranks_of_one_device(meeting *m)
{
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    check_info(ctx, m, m->process, 1, m->process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* 1 device in process 0, 2 in process 1, 3 in process 2 */
static void ranks_of_different_counts(meeting *m)
{
    dp_ctx *ctx = open_job(m, m->process + 1, dp_cpu());
    int all = m->process_count * (m->process_count + 1) / 2;
    check_info(ctx, m, m->process * (m->process + 1) / 2, m->process + 1, all);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST(ranks_are_counted_through)
{
    for (int processes = 2; processes <= 4; processes++) {
        in_processes(processes, ranks_of_one_device);
        in_processes(processes, ranks_of_two_devices);
        in_processes(processes, ranks_of_different_counts);
    }
}

/* ---- collectives over all ranks: rank r sends r * 1000 + i ----------------------------------- */

enum { COUNT = 700, RANKS = 9 };

typedef struct job {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_info info;
    dp_tensor send[RANKS], recv[RANKS];
    dp_part parts[RANKS];
    int32_t got[RANKS * COUNT];
} job;

static void job_begin(job *j, dp_ctx *ctx)
{
    memset(j, 0, sizeof *j);
    j->ctx = ctx;
    j->scope = dp_scope_begin(ctx);
    CHECK_OK(dp_info_get(ctx, &j->info));
    CHECK(j->info.rank_count <= RANKS);
    for (int i = 0; i < j->info.local_count; i++) {
        const int64_t shape[] = {RANKS * COUNT};
        dp_device here = dp_local_device(ctx, i);
        CHECK_OK(dp_tensor_new(j->scope, here, DP_I32, 1, shape, &j->send[i]));
        CHECK_OK(dp_tensor_new(j->scope, here, DP_I32, 1, shape, &j->recv[i]));
        for (int k = 0; k < RANKS * COUNT; k++) {
            j->got[k] = (j->info.rank_first + i) * 1000 + k;
        }
        dp_tensor host = dp_wrap_const(j->got, DP_I32, 1, shape);
        CHECK_OK(dp_copy(ctx, &j->send[i], &host, NULL));
        CHECK_OK(dp_wait(ctx));
        j->parts[i] = (dp_part){.send = j->send[i].data, .recv = j->recv[i].data};
    }
}

static void job_end(job *j)
{
    dp_scope_end(j->scope);
    dp_close(j->ctx);
}

/* What local rank i received. */
static const int32_t *job_got(job *j, int local_rank)
{
    CHECK_OK(dp_read(j->ctx, &j->recv[local_rank], j->got, sizeof(j->got)));
    return j->got;
}

static int sum_of_ranks(const job *j, int k)
{
    int ranks = j->info.rank_count;
    return ranks * k + 1000 * ranks * (ranks - 1) / 2;
}

static void check_reductions(job *j)
{
    int ranks = j->info.rank_count;
    CHECK_OK(dp_all_reduce(j->ctx, j->parts, COUNT, DP_I32, DP_OP_SUM));
    for (int i = 0; i < j->info.local_count; i++) {
        const int32_t *got = job_got(j, i);
        for (int k = 0; k < COUNT; k++) {
            CHECK_INT(got[k], sum_of_ranks(j, k));
        }
    }
    CHECK_OK(dp_reduce_scatter(j->ctx, j->parts, 100, DP_I32, DP_OP_MAX));
    for (int i = 0; i < j->info.local_count; i++) {
        const int32_t *got = job_got(j, i);
        for (int k = 0; k < 100; k++) {
            CHECK_INT(got[k], (ranks - 1) * 1000 + (j->info.rank_first + i) * 100 + k);
        }
    }
    for (int root = 0; root < ranks; root++) {
        CHECK_OK(dp_reduce_to(j->ctx, j->parts, 10, DP_I32, DP_OP_SUM, root));
        int local = root - j->info.rank_first;
        if (local >= 0 && local < j->info.local_count) {
            CHECK_INT(job_got(j, local)[9], sum_of_ranks(j, 9));
        }
    }
}

static void check_roots(job *j, int root)
{
    int local = root - j->info.rank_first;
    CHECK_OK(dp_broadcast(j->ctx, j->parts, COUNT, DP_I32, root));
    for (int i = 0; i < j->info.local_count; i++) {
        CHECK_INT(job_got(j, i)[0], root * 1000);
        CHECK_INT(job_got(j, i)[COUNT - 1], root * 1000 + COUNT - 1);
    }
    CHECK_OK(dp_scatter_from(j->ctx, j->parts, 50, DP_I32, root));
    for (int i = 0; i < j->info.local_count; i++) {
        CHECK_INT(job_got(j, i)[49], root * 1000 + (j->info.rank_first + i) * 50 + 49);
    }
    CHECK_OK(dp_gather_to(j->ctx, j->parts, 3, DP_I32, root));
    if (local >= 0 && local < j->info.local_count) {
        for (int k = 0; k < 3 * j->info.rank_count; k++) {
            CHECK_INT(job_got(j, local)[k], k / 3 * 1000 + k % 3);
        }
    }
}

static void check_moves(job *j)
{
    int ranks = j->info.rank_count;
    CHECK_OK(dp_all_gather(j->ctx, j->parts, COUNT, DP_I32));
    for (int i = 0; i < j->info.local_count; i++) {
        const int32_t *got = job_got(j, i);
        for (int k = 0; k < ranks * COUNT; k++) {
            CHECK_INT(got[k], k / COUNT * 1000 + k % COUNT);
        }
    }
    CHECK_OK(dp_all_to_all(j->ctx, j->parts, 20, DP_I32));
    for (int i = 0; i < j->info.local_count; i++) {
        const int32_t *got = job_got(j, i);
        for (int k = 0; k < ranks * 20; k++) {
            CHECK_INT(got[k], k / 20 * 1000 + (j->info.rank_first + i) * 20 + k % 20);
        }
    }
    for (int root = 0; root < ranks; root++) {
        check_roots(j, root);
    }
}

static void check_job(dp_ctx *ctx)
{
    static job j;
    job_begin(&j, ctx);
    check_reductions(&j);
    check_moves(&j);
    CHECK_OK(dp_barrier(ctx));
    job_end(&j);
}

static void job_on_cpu(meeting *m)
{
    check_job(open_job(m, 2, dp_cpu()));
}

static void job_on_toy(meeting *m)
{
    check_job(open_job(m, 2, toy_device()));
}

static void job_on_one(meeting *m)
{
    check_job(open_job(m, 1, m->process % 2 ? dp_cpu() : toy_device()));
}

static void job_of_different_counts(meeting *m)
{
    check_job(open_job(m, 3 - m->process, dp_cpu()));
}

TEST_SLOW(collectives_over_all_ranks_cpu, 20)
{
    in_processes(2, job_on_cpu);
    in_processes(3, job_on_cpu);
}

TEST_SLOW(collectives_over_all_ranks_toy, 20)
{
    in_processes(2, job_on_toy);
    in_processes(3, job_on_toy);
}

TEST_SLOW(collectives_of_processes_with_one_device, 20)
{
    in_processes(2, job_on_one);
    in_processes(3, job_on_one);
}

TEST_SLOW(collectives_of_processes_with_different_counts, 20)
{
    in_processes(2, job_of_different_counts);
    in_processes(3, job_of_different_counts);
}

/* ---- failures: all learn of them, nobody hangs ----------------------------------------------- */

/* Process 1 cannot open: it says why, the others say who. */
static void check_open_fails(meeting *m, const dp_config *config, dp_status status,
                             const char *sentence)
{
    dp_ctx *ctx = NULL;
    if (m->process == 1) {
        CHECK_ERROR(dp_open(config, &ctx), status, sentence);
    } else {
        CHECK_ERROR(dp_open(config, &ctx), DP_ERR_REMOTE, "process 1");
    }
    CHECK(ctx == NULL);
}

static void one_has_a_bad_index(meeting *m)
{
    dp_config config = config_of(m, 2);
    const int devices[] = {0, m->process == 1 ? 77 : 1};
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    config.backends = backends;
    config.devices = devices;
    check_open_fails(m, &config, DP_ERR_NO_DEVICE, "77");
}

static void one_has_a_bad_config(meeting *m)
{
    dp_config config = config_of(m, 1);
    config.thread_count = m->process == 1 ? -1 : 0;
    check_open_fails(m, &config, DP_ERR_INVALID, "thread_count");
}

static void one_has_no_memory(meeting *m)
{
    test_allocator counter = {.fail_at = 3, .keep_failing = true}; /* enough to tell the others */
    dp_config config = config_of(m, 1);
    if (m->process == 1) {
        config.allocator = test_allocator_of(&counter);
    }
    check_open_fails(m, &config, DP_ERR_NO_MEMORY, "memory");
    CHECK_NO_LEAKS(&counter);
}

static void one_has_no_table(meeting *m)
{
    dp_config config = config_of(m, 1);
    const dp_coll_ops *const colls[] = {dp_cpu_coll(), NULL};
    if (m->process == 1) {
        config.colls = colls;
    }
    check_open_fails(m, &config, DP_ERR_UNSUPPORTED, "processes");
}

TEST(one_process_cannot_open)
{
    in_processes(2, one_has_a_bad_index);
    in_processes(3, one_has_a_bad_index);
}

TEST(one_process_has_a_bad_config)
{
    in_processes(3, one_has_a_bad_config);
}

TEST(one_process_has_no_memory)
{
    in_processes(3, one_has_no_memory);
}

/* The table's own set-up talks to the others, so those who chose it wait for who did not. */
TEST(one_process_has_no_table)
{
    in_processes(2, one_has_no_table);
}

/* These tables serve the processes of one machine. */
static void nobody_has_a_table(meeting *m)
{
    const dp_coll_ops *const colls[] = {dp_cpu_coll(), dp_shm_coll(), NULL};
    dp_config config = config_of(m, 1 + m->process % 2);
    dp_ctx *ctx = NULL;
    CHECK_INT(setenv("DP_MACHINE", m->process == 1 ? "another" : "this", 1), 0);
    config.colls = colls;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_UNSUPPORTED, "processes on several machines");
    CHECK(ctx == NULL);
}

/* Nor do they serve the host and, through it, devices with memory of their own in one job. */
static void nobody_serves_both(meeting *m)
{
    const dp_device_ops *const backends[] = {m->process == 0 ? dp_cpu() : toy_device(), NULL};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    config.backends = backends;
    config.colls = NULL;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_MISMATCH,
                "process 1 has devices whose memory the host does not reach, process 0 has others");
    CHECK(ctx == NULL);
}

TEST(no_table_serves_several_processes)
{
    in_processes(2, nobody_has_a_table);
    in_processes(3, nobody_has_a_table);
    in_processes(2, nobody_serves_both);
    in_processes_on(toy_device(), 3, nobody_has_a_table);
}

/* Who chose another table would talk to it in another language. */
static bool never_fits(const dp_comm_config *config)
{
    (void)config;
    return false;
}

static void tables_in_different_places(meeting *m)
{
    static dp_coll_ops never;
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    const dp_coll_ops *const colls[] = {&never, meeting_coll(), NULL};
    never = *meeting_coll();
    never.name = "never";
    never.fits = never_fits;
    config.colls = m->process == 1 ? colls : config.colls;
    dp_status status = dp_open(&config, &ctx);
    CHECK_STR(dp_last_error(), m->process == 1
                                   ? "dp_open: process 1 has its table of collectives in place 1, "
                                     "process 0 in place 0"
                                   : "dp_open: process 0 has its table of collectives in place 0, "
                                     "process 1 in place 1");
    CHECK_STATUS(status, DP_ERR_MISMATCH);
    CHECK(ctx == NULL);
}

TEST(processes_choose_different_tables)
{
    in_processes(2, tables_in_different_places);
}

/* What process 1 says of its version, to the others, is one more than the truth. */
static dp_status gather_versions(const void *in, void *out, size_t bytes_each, void *user)
{
    const meeting *m = user;
    int32_t *all = out;
    size_t each = bytes_each / sizeof *all;
    dp_status status = meeting_all_gather(in, out, bytes_each, user);
    for (size_t i = each; i < 2 * each && m->process != 1; i++) {
        all[i] += all[i] == DP_VERSION;
    }
    return status;
}

static void another_version(meeting *m)
{
    char sentence[128];
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    config.bootstrap.all_gather = gather_versions;
    snprintf(sentence, sizeof sentence, "dp_open: process %d has dp.h %d, process 1 has %d",
             m->process, DP_VERSION, DP_VERSION + 1);
    dp_status status = dp_open(&config, &ctx);
    CHECK(status != DP_OK && ctx == NULL);
    if (m->process != 1) {
        CHECK_STATUS(status, DP_ERR_MISMATCH);
        CHECK_STR(dp_last_error(), sentence);
    }
}

TEST(processes_have_different_versions)
{
    in_processes(3, another_version);
}

static dp_status gather_nothing(const void *in, void *out, size_t bytes_each, void *user)
{
    (void)in, (void)out, (void)bytes_each, (void)user;
    return dp_error(DP_ERR_TIMEOUT, "dp_open: nobody answers"); /* of another context, say */
}

TEST(a_bootstrap_that_fails)
{
    dp_config config = {.bootstrap = {.all_gather = gather_nothing, .process_count = 2}};
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    config.allocator = test_allocator_of(&counter);
    dp_status status = dp_open(&config, &ctx);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_STR(dp_last_error(), "dp_open: bootstrap.all_gather failed: nobody answers");
    CHECK(ctx == NULL);
    CHECK_NO_LEAKS(&counter);
}

TEST(wrong_bootstraps)
{
    dp_ctx *ctx = NULL;
    dp_config config = {.bootstrap = {.process_count = 2}};
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID, "all_gather");
    config.bootstrap.all_gather = gather_nothing;
    config.bootstrap.process = 2;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID, "process 2");
    config.bootstrap.process = -1;
    CHECK_STATUS(dp_open(&config, &ctx), DP_ERR_INVALID);
    config.bootstrap.process = 0;
    config.bootstrap.process_count = -2;
    CHECK_STATUS(dp_open(&config, &ctx), DP_ERR_INVALID);
}

/* A job of one process has nobody to meet. */
TEST(one_process_does_not_meet)
{
    dp_config config = {.bootstrap = {.all_gather = gather_nothing, .process_count = 1}};
    dp_ctx *ctx;
    dp_info info;
    config.device_count = 2;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 1);
    CHECK_INT(info.rank_count, 2);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* ---- a job that ends early ------------------------------------------------------------------- */

/* In the process that aborts, every call says so from then on. */
static void check_aborted(dp_ctx *ctx, const job *j)
{
    dp_failure_info failure;
    dp_tensor t;
    CHECK(!dp_failure(ctx, &failure));
    dp_abort(ctx, DP_ERR_ABORTED, "enough after %d steps", 3);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, DP_ERR_ABORTED);
    CHECK_INT(failure.rank, j->info.rank_first);
    CHECK_STR(failure.text, "enough after 3 steps");
    CHECK_ERROR(dp_all_reduce(ctx, j->parts, 1, DP_I32, DP_OP_SUM), DP_ERR_ABORTED, "3 steps");
    CHECK_ERROR(dp_barrier(ctx), DP_ERR_ABORTED, "3 steps");
    CHECK_ERROR(dp_tensor_new(j->scope, dp_local_device(ctx, 0), DP_F32, 0, NULL, &t),
                DP_ERR_ABORTED, "3 steps");
    dp_abort(ctx, DP_ERR_DEVICE, "later");
    CHECK_STATUS(dp_wait(ctx), DP_ERR_ABORTED);
}

/* The others fail in the collective that they are in, and stay failed. */
static void check_left_alone(dp_ctx *ctx, const job *j, dp_status want, const char *why)
{
    dp_failure_info failure;
    CHECK_ERROR(dp_all_reduce(ctx, j->parts, COUNT, DP_I32, DP_OP_SUM), want, why);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, want);
    CHECK_SAYS(failure.text, why);
    CHECK_STATUS(dp_barrier(ctx), want);
    CHECK_STATUS(dp_wait(ctx), want);
}

static void one_aborts(meeting *m)
{
    static job j;
    job_begin(&j, open_job(m, 2, dp_cpu()));
    CHECK_OK(dp_barrier(j.ctx));
    wait_for_all(m);
    if (m->process == 1) {
        check_aborted(j.ctx, &j);
    } else {
        check_left_alone(j.ctx, &j, DP_ERR_ABORTED, ") failed: enough after 3 steps");
    }
    job_end(&j);
}

static void one_exits(meeting *m)
{
    static job j;
    job_begin(&j, open_job(m, 1, toy_device()));
    CHECK_OK(dp_barrier(j.ctx));
    if (m->process != m->process_count - 1) {
        check_left_alone(j.ctx, &j, DP_ERR_REMOTE, ") has closed its context; ");
    }
    job_end(&j);
}

TEST(one_process_aborts)
{
    in_processes(2, one_aborts);
    in_processes(3, one_aborts);
}

TEST(one_process_exits)
{
    in_processes(2, one_exits);
    in_processes(3, one_exits);
}

static dp_ctx *open_over_own_table(meeting *m)
{
    dp_config config = config_of(m, 1);
    dp_ctx *ctx;
    config.timeout_ms = END_TIMEOUT_MS;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

TEST_SLOW(ends_are_the_same_over_a_table_of_somebodys, 60)
{
    check_ends_over(open_over_own_table);
}

/* A table that has no memory in one process: the others would wait for it. */
static dp_coll_ops short_ops;
static bool is_short;

static dp_status short_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = boot_coll()->open(host, config, out);
    if (status == DP_OK)
        (*out)->ops = &short_ops;
    return status;
}

static dp_status short_run(dp_comm *comm, const dp_coll_call *call)
{
    return is_short ? dp_error(DP_ERR_NO_MEMORY, "short: no memory") : boot_coll()->run(comm, call);
}

static void one_table_has_no_memory(meeting *m)
{
    const dp_coll_ops *const colls[] = {&short_ops, NULL};
    static job j;
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    short_ops = *boot_coll();
    short_ops.open = short_open;
    short_ops.run = short_run;
    config.colls = colls;
    CHECK_OK(dp_open(&config, &ctx));
    job_begin(&j, ctx);
    CHECK_OK(dp_barrier(ctx));
    wait_for_all(m);
    is_short = m->process == 1;
    check_left_alone(ctx, &j, DP_ERR_INTERNAL, "short: no memory (DP_ERR_NO_MEMORY)");
    job_end(&j);
}

TEST(no_memory_in_a_table_of_one_process_is_heard_by_all)
{
    in_processes(2, one_table_has_no_memory);
    in_processes(3, one_table_has_no_memory);
}

/* A table that waits for a process which never comes: it looks at host->aborted, as it must. */
static dp_coll_ops waiting_ops;

static dp_status wait_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = dp_cpu_coll()->open(host, config, out);
    if (status == DP_OK) {
        (*out)->ops = &waiting_ops;
    }
    return status;
}

static dp_status wait_run(dp_comm *comm, const dp_coll_call *call)
{
    (void)call;
    for (int ms = 0; ms < PATIENCE_MS; ms++) {
        if (comm->host->aborted(comm->host)) {
            return dp_error(DP_ERR_ABORTED, "stopped waiting");
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return dp_error(DP_ERR_TIMEOUT, "was never told");
}

static void *abort_soon(void *user)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    dp_abort(user, DP_ERR_ABORTED, "by another thread");
    return NULL;
}

TEST(abort_releases_who_waits)
{
    const dp_coll_ops *const colls[] = {&waiting_ops, NULL};
    float data[2] = {0};
    const dp_part parts[] = {{.send = &data[0], .recv = &data[0]},
                             {.send = &data[1], .recv = &data[1]}};
    dp_failure_info failure;
    pthread_t thread;
    dp_ctx *ctx;
    waiting_ops = *dp_cpu_coll();
    waiting_ops.open = wait_open;
    waiting_ops.run = wait_run;
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = 2}, &ctx));
    CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
    CHECK_ERROR(dp_all_reduce(ctx, parts, 1, DP_F32, DP_OP_SUM), DP_ERR_ABORTED, "");
    pthread_join(thread, NULL);
    CHECK(dp_failure(ctx, &failure));
    CHECK_STR(failure.text, "by another thread");
    CHECK_ERROR(dp_barrier(ctx), DP_ERR_ABORTED, "by another thread");
    dp_close(ctx);
}

/* ---- tables that fail, and leave something where the result would be ------------------------- */

static char rubbish[4096];

static bool fit(const dp_comm_config *config)
{
    return config->rank_count == 2;
}

static dp_status fail_to_connect(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    (void)host, (void)config;
    *out = (dp_comm *)(void *)rubbish;
    return dp_error(DP_ERR_DEVICE, "no line");
}

static dp_status fail_to_open(const dp_host *host, int index, dp_dev **out)
{
    (void)host, (void)index;
    *out = (dp_dev *)(void *)rubbish;
    return dp_error(DP_ERR_DEVICE, "no such thing");
}

TEST(pointer_left_by_a_failing_open_is_not_used)
{
    dp_coll_ops coll = *boot_coll();
    dp_device_ops ops = *dp_cpu();
    const dp_coll_ops *const colls[] = {&coll, NULL};
    const dp_device_ops *const backends[] = {&ops, NULL};
    dp_ctx *ctx;
    memset(rubbish, 'x', sizeof rubbish);
    coll.open = fail_to_connect;
    coll.fits = fit;
    ops.open = fail_to_open;
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2, .colls = colls}, &ctx), DP_ERR_DEVICE,
                "dp_open: no line");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2, .backends = backends}, &ctx), DP_ERR_DEVICE,
                "dp_open: no such thing");
}
