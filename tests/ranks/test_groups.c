/* test_groups.c - some processes of a job as a job of their own: who is in it, what it shares with
   the job around it, and what it does not. */

#include <limits.h>
#include "examples/custom_device.h"
#include "ranked.h"
#include "world.h"

static dp_ctx *open_shm(meeting *m, int devices)
{
    return open_over_shm(m, devices, 0);
}

/* Each process' number plus one, summed over a context. */
static int64_t sum_of(dp_ctx *ctx, int process)
{
    int64_t sum = process + 1;
    CHECK_OK(dp_all_reduce_i64(ctx, &sum, 1, DP_OP_SUM));
    return sum;
}

typedef struct own_sum {
    dp_ctx *ctx;
    const dp_part *parts;
} own_sum;

static dp_status sum_for_itself(int local_rank, dp_scope *scope, void *user)
{
    const own_sum *sum = user;
    const dp_part *part = &sum->parts[local_rank];
    (void)scope;
    return dp_rank_all_reduce(sum->ctx, part->send, part->recv, 5, DP_F32, DP_OP_SUM);
}

/* The same of the ranks of all, through tensors: one call for all, and each rank for itself. */
static void check_ranks(dp_ctx *ctx, float want)
{
    dp_info info = info_here(ctx);
    float data[8][5];
    dp_part parts[8] = {{0}};
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < info.local_count; i++) {
        dp_tensor tensor;
        for (int k = 0; k < 5; k++)
            data[i][k] = (float)(info.rank_first + i + 1);
        CHECK_OK(
            dp_tensor_from(scope, dp_local_device(ctx, i), data[i], DP_F32, DP_SHAPE(5), &tensor));
        parts[i] = (dp_part){tensor.data, tensor.data, NULL};
    }
    CHECK_OK(dp_all_reduce(ctx, parts, 5, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_run(ctx, scope, sum_for_itself, &(own_sum){ctx, parts}));
    for (int i = 0; i < info.local_count; i++) {
        dp_tensor tensor = dp_wrap(parts[i].recv, DP_F32, DP_SHAPE(5));
        tensor.device = dp_local_device(ctx, i);
        CHECK_OK(dp_read(ctx, &tensor, data[i], sizeof data[i]));
        for (int k = 0; k < 5; k++)
            CHECK_F64(data[i][k], want * (float)info.rank_count, 0);
    }
    dp_scope_end(scope);
}

static void check_place(dp_ctx *ctx, int process, int count, int devices)
{
    dp_info info = info_here(ctx);
    int ranks = count * devices;
    CHECK_INT(info.process, process);
    CHECK_INT(info.process_count, count);
    CHECK_INT(info.local_count, devices);
    CHECK_INT(info.rank_first, process * devices);
    CHECK_INT(info.rank_count, ranks);
    CHECK_INT(info.machine, 0);
    CHECK_INT(info.machine_count, 1);
    CHECK_STR(info.launcher, "group");
    CHECK_STR(info.binding, "config.unbound");
    check_ranks(ctx, (float)(ranks * (ranks + 1) / 2));
}

/* ---- who is in it ---------------------------------------------------------------------------- */

/* Even and odd processes, used in turn with the whole, and closed before or after it. */
static void halves(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 2), *half = NULL;
    int mine = m->process % 2, count = (m->process_count + 1 - mine) / 2;
    CHECK_OK(dp_open_group(ctx, mine, NULL, &half));
    check_place(half, m->process / 2, count, 2);
    for (int i = 0; i < 3; i++) {
        int64_t all = m->process_count * (m->process_count + 1) / 2;
        CHECK_INT(sum_of(ctx, m->process), all);
        CHECK_INT(sum_of(half, m->process), count * (count + mine));
    }
    dp_close(m->process % 3 != 0 ? ctx : half);
    if (m->process % 3 == 0) {
        dp_close(ctx);
        return;
    }
    CHECK_OK(dp_wait(half)); /* it is not gone with the other one */
    dp_close(half);
}

TEST(even_and_odd_processes)
{
    in_processes(2, halves);
    in_processes(5, halves);
}

/* With the launcher's connections, too. */
static dp_status spawned_halves(void *user)
{
    dp_ctx *ctx, *half;
    (void)user;
    DP_TRY(dp_open(&(dp_config){.device_count = 2}, &ctx));
    int process = info_here(ctx).process;
    DP_TRY(dp_open_group(ctx, process / 2 + 7, NULL, &half));
    check_place(half, process % 2, 2, 2);
    dp_close(half);
    dp_close(ctx);
    return DP_OK;
}

TEST(of_processes_that_a_launcher_has_started)
{
    nobody_launched_us();
    CHECK_OK(dp_spawn(4, spawned_halves, NULL));
}

static void some_are_in_none(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *some = ctx;
    bool in = m->process > 0 && m->process < 3;
    CHECK_OK(dp_open_group(ctx, in ? INT_MAX : -1, NULL, &some));
    if (in)
        check_place(some, m->process - 1, 2, 1);
    else
        CHECK(some == NULL);
    dp_close(some);
    CHECK_OK(dp_open_group(ctx, -1, NULL, &some));
    CHECK(some == NULL);
    CHECK_INT(sum_of(ctx, m->process), 10);
    dp_close(ctx);
}

TEST(processes_in_no_group)
{
    in_processes(4, some_are_in_none);
}

static void one_each(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 3), *own = NULL;
    CHECK_OK(dp_open_group(ctx, m->process, NULL, &own));
    check_place(own, 0, 1, 3);
    CHECK_INT(sum_of(own, m->process), m->process + 1);
    dp_close(own);
    dp_close(ctx);
}

TEST(a_group_of_one)
{
    in_processes(3, one_each);
}

TEST(a_job_of_one_process)
{
    dp_ctx *ctx, *own;
    CHECK_OK(dp_open(&(dp_config){.local_only = true, .device_count = 2}, &ctx));
    CHECK_INT(info_here(ctx).machine_count, 1);
    CHECK_OK(dp_open_group(ctx, 0, NULL, &own));
    check_place(own, 0, 1, 2);
    dp_close(own);
    CHECK_OK(dp_open_group(ctx, -1, NULL, &own));
    CHECK(own == NULL);
    dp_close(ctx);
}

static void quarters(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *half, *pair, *back;
    CHECK_OK(dp_open_group(ctx, m->process / 4, NULL, &half));
    CHECK_OK(dp_open_group(half, m->process % 2, NULL, &pair));
    check_place(pair, m->process % 4 / 2, 2, 1);
    CHECK_INT(sum_of(pair, m->process), 2 * (m->process / 4 * 4 + m->process % 2 + 1) + 2);
    CHECK_OK(dp_open_group(ctx, m->process / 2, NULL, &back)); /* of neighbours */
    CHECK_INT(sum_of(back, m->process), m->process / 2 * 4 + 3);
    dp_close(half);
    CHECK_INT(sum_of(pair, m->process), 2 * (m->process / 4 * 4 + m->process % 2 + 1) + 2);
    dp_close(ctx);
    CHECK_INT(sum_of(back, m->process), m->process / 2 * 4 + 3);
    dp_close(back);
    dp_close(pair);
}

TEST(groups_of_groups)
{
    in_processes(8, quarters);
}

/* ---- its config ------------------------------------------------------------------------------ */

static void count_groups(const dp_log_record *record, void *user)
{
    *(int *)user += strncmp(record->text, "launcher: group, ", 17) == 0;
}

static void configs(meeting *m)
{
    dp_ctx *ctx, *group;
    dp_config config = config_of(m, 2), got;
    int seen = 0;
    config.colls = NULL;
    config.devices = (const int[]){3, 1};
    config.log = (dp_log){.fn = count_groups, .user = &seen};
    config.timeout_ms = 12345;
    config.thread_count = 3;
    config.threads_per_device = -1;
    config.poison = true;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    CHECK_OK(dp_config_get(group, &got));
    CHECK_INT(got.timeout_ms, 12345);
    CHECK_INT(got.thread_count, 3);
    CHECK_INT(got.threads_per_device, -1);
    CHECK(got.poison);
    CHECK_INT(got.shards, 0);
    CHECK_INT(got.devices[0], 3);
    CHECK_INT(got.devices[1], 1);
    CHECK_INT(seen, 1);
    dp_close(group);
    CHECK_OK(dp_open_group(
        ctx, 0, &(dp_config){.device_count = 3, .timeout_ms = 9999, .thread_count = 6}, &group));
    CHECK_OK(dp_config_get(group, &got));
    CHECK_INT(got.timeout_ms, 9999);
    CHECK_INT(info_here(group).core_count, 6);
    CHECK_INT(info_here(group).threads_per_device, 2);
    check_place(group, m->process, 2, 3);
    dp_close(group);
    dp_close(ctx);
}

TEST(what_is_not_set_is_as_around_it)
{
    in_processes(2, configs);
}

static void toys(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 2), *group;
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    CHECK_STR(info_here(group).device_backend, toy_device()->name);
    check_place(group, m->process, 2, 2);
    dp_close(group);
    dp_close(ctx);
}

TEST(devices_with_memory_of_their_own)
{
    in_processes_on(toy_device(), 2, toys);
}

/* Eight shards in four processes: two of these have four of them, three have none. */
static void shards(meeting *m)
{
    dp_ctx *ctx, *group;
    dp_config config = config_of(m, 1), got;
    config.colls = NULL;
    config.shards = 8;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_open_group(ctx, m->process / 2, NULL, &group));
    CHECK_OK(dp_config_get(group, &got));
    CHECK_INT(got.shards, 4);
    check_place(group, m->process % 2, 2, 2);
    dp_close(group);
    CHECK_OK(dp_open_group(ctx, m->process < 3 ? 0 : 1, NULL, &group));
    CHECK_OK(dp_config_get(group, &got));
    CHECK_INT(got.shards, m->process < 3 ? 0 : 2);
    CHECK_INT(info_here(group).rank_count, m->process < 3 ? 6 : 2);
    dp_close(group);
    dp_close(ctx);
}

TEST(shards_of_a_group)
{
    in_processes(4, shards);
}

/* ---- a net on it ----------------------------------------------------------------------------- */

static void trains(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *group;
    plan all = {{ALL}};
    dp_module *par = NULL;
    CHECK_OK(dp_open_group(ctx, m->process % 2, NULL, &group));
    dp_module *net = make_net(group, &all);
    CHECK_OK(dp_distributed(net, NULL, &par));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(forward_and_backward(par, 1, false));
        check_grads(net, 1.5, 1.5); /* the mean of ranks 0 and 1 */
        CHECK_INT(sum_of(ctx, m->process), 10);
    }
    dp_close(ctx);
    dp_close(group);
}

TEST(wrappers_are_of_the_group)
{
    in_processes(4, trains);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static void refused(dp_ctx *ctx, const meeting *m, const dp_config *config, const char *part)
{
    dp_ctx *group = ctx;
    char text[80];
    snprintf(text, sizeof text, "dp_open_group: rank 1: %s", part);
    CHECK_ERROR(dp_open_group(ctx, 0, m->process == 1 ? config : NULL, &group), DP_ERR_INVALID,
                text);
    CHECK(group == ctx);
    CHECK_INT(sum_of(ctx, m->process), 6);
}

static void wrong_configs(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *group = ctx;
    refused(ctx, m, &(dp_config){.job = "x"}, "config.job is set");
    refused(ctx, m, &(dp_config){.local_only = true}, "config.local_only is set");
    refused(ctx, m, &(dp_config){.bootstrap = {.process_count = 2}}, "config.bootstrap is set");
    refused(ctx, m, &(dp_config){.timeout_ms = -1}, "timeout_ms is negative");
    CHECK_ERROR(dp_open_group(ctx, m->process == 2 ? -2 : 0, NULL, &group), DP_ERR_INVALID,
                "dp_open_group: rank 2: group is -2");
    CHECK(group == ctx);
    dp_close(ctx);
}

TEST(what_is_wrong_in_one_process_is_heard_by_all)
{
    in_processes(3, wrong_configs);
}

TEST(wrong_arguments_of_a_group)
{
    dp_ctx *ctx, *group;
    CHECK_ERROR(dp_open_group(NULL, 0, NULL, &group), DP_ERR_INVALID, "ctx");
    CHECK_OK(dp_open(&(dp_config){.local_only = true, .device_count = 1}, &ctx));
    CHECK_ERROR(dp_open_group(ctx, 0, NULL, NULL), DP_ERR_INVALID, "out");
    CHECK_ERROR(dp__open_group(ctx, 0, NULL, 1, DP_VERSION, &group), DP_ERR_INVALID,
                "dp_open_group: the caller was compiled with another dp.h");
    CHECK_ERROR(dp_open_group(ctx, 0, &(dp_config){.job = "x"}, &group), DP_ERR_INVALID,
                "dp_open_group: config.job is set");
    dp_close(ctx);
    CHECK_STATUS(dp_open_group(ctx, 0, NULL, &group), DP_ERR_STATE);
}

/* Whatever they make of a millisecond, they have one secret, and are where they are. */
static void in_a_hurry(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *group = NULL;
    dp_status status = dp_open_group(ctx, 0, &(dp_config){.timeout_ms = 1}, &group);
    if (status != DP_OK) {
        CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
        CHECK(strstr(dp_last_error(), "DP_SECRET") == NULL);
        CHECK(group == NULL);
    }
    CHECK_INT(sum_of(ctx, m->process), 6);
    dp_close(group);
    dp_close(ctx);
}

TEST(a_group_in_a_hurry)
{
    in_processes(3, in_a_hurry);
}

/* Where the library has not brought the processes together it knows no address. */
static void apart(meeting *m)
{
    dp_ctx *ctx, *group;
    dp_config config = config_of(m, 1);
    set_number("DP_MACHINE", m->process / 2);
    set("DP_INTERFACE", "nowhere");
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_INT(info_here(ctx).machine, m->process / 2);
    CHECK_INT(info_here(ctx).machine_count, 2);
    CHECK_ERROR(dp_open_group(ctx, m->process % 2, NULL, &group), DP_ERR_UNSUPPORTED,
                "dp_open_group: rank 0: group 0 is on several machines, and this job has met by a "
                "bootstrap of yours");
    CHECK_OK(dp_open_group(ctx, m->process, NULL, &group));
    CHECK_INT(sum_of(group, m->process), m->process + 1);
    dp_close(group);
    dp_close(ctx);
}

TEST(several_machines_and_a_bootstrap_of_the_users)
{
    in_processes(4, apart);
}

/* Over TCP it makes connections, knows addresses, and hears of who dies. */
static void across(meeting *m)
{
    dp_ctx *ctx, *group;
    dp_config config = config_of(m, 1);
    config.colls = NULL;
    config.timeout_ms = 60000;
    set_number("DP_MACHINE", m->process / 2);
    set("DP_INTERFACE", "lo");
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(info_here(ctx).coll_backend, "TCP");
    CHECK_OK(dp_open_group(ctx, m->process % 2, NULL, &group));
    CHECK_INT(info_here(group).machine_count, 2);
    CHECK_STR(info_here(group).coll_backend, "TCP");
    CHECK_INT(sum_of(group, m->process), m->process % 2 ? 6 : 4);
    dp_close(group);
    wait_for_all(m);
    if (m->process == 3)
        raise(SIGKILL);
    CHECK_INT(dp_status_class(dp_barrier(ctx)), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "rank 3 (process 3");
    dp_close(ctx);
}

TEST(several_machines_over_tcp_and_a_bootstrap_of_the_users)
{
    in_processes_but(4, 3, across);
}

static dp_status open_inside(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *group = NULL;
    (void)local_rank, (void)scope;
    CHECK_STATUS(dp_open_group(user, 0, NULL, &group), DP_ERR_STATE);
    return DP_OK;
}

TEST(no_device_opens_one)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.local_only = true, .device_count = 2}, &ctx));
    CHECK_OK(dp_run(ctx, NULL, open_inside, ctx));
    dp_close(ctx);
}

/* No process has a context when one could not have one; the next try finds all as it was. */
static struct {
    size_t fail_at; /* of process 1's */
    bool all_went_well;
} * shortage_seen;

static void short_of_memory(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx, *group = NULL;
    config.colls = NULL;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    size_t blocks = counter.live_blocks;
    if (m->process == 1)
        counter.fail_at = counter.call_count + shortage_seen->fail_at;
    dp_status status = dp_open_group(ctx, m->process / 2, NULL, &group); /* 2 is alone */
    char failed = counter.fail_count != 0, all[BOOT_PROCESSES];
    CHECK_OK(meeting_all_gather(&failed, all, 1, m));
    CHECK_STATUS(status, all[1] ? DP_ERR_NO_MEMORY : DP_OK);
    if (status != DP_OK) {
        CHECK(group == NULL);
        CHECK_INT((int64_t)counter.live_blocks, (int64_t)blocks);
        CHECK_INT(sum_of(ctx, m->process), 6);
        counter.fail_at = 0;
        CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    } else if (m->process == 1) {
        shortage_seen->all_went_well = true;
    }
    dp_close(group);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_SLOW(every_allocation_of_a_group_fails_once, 120)
{
    shortage_seen = shared_memory(sizeof *shortage_seen);
    while (!shortage_seen->all_went_well && shortage_seen->fail_at < 200) {
        shortage_seen->fail_at++;
        in_processes(3, short_of_memory);
    }
    CHECK(shortage_seen->fail_at > 10 && shortage_seen->all_went_well);
}

/* A group that fails is its processes' alone. */
static void aborted(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *half, *again;
    CHECK_OK(dp_open_group(ctx, m->process / 2, NULL, &half));
    wait_for_all(m);
    if (m->process == 1)
        dp_abort(half, DP_ERR_ABORTED, "enough of this");
    if (m->process == 0) {
        int64_t one = 1;
        CHECK_ERROR(dp_all_reduce_i64(half, &one, 1, DP_OP_SUM), DP_ERR_ABORTED, "enough of this");
    }
    if (m->process >= 2)
        CHECK_INT(sum_of(half, m->process), 7);
    CHECK_INT(sum_of(ctx, m->process), 10);
    CHECK_OK(dp_open_group(ctx, m->process % 2, NULL, &again)); /* beside the old one */
    CHECK_INT(sum_of(again, m->process), m->process % 2 ? 6 : 4);
    dp_close(half);
    dp_close(again);
    dp_close(ctx);
}

TEST(a_group_fails_alone)
{
    in_processes(4, aborted);
}

/* Who dies is missed wherever it was. */
static void one_dies(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *half;
    int64_t one = 1;
    CHECK_OK(dp_open_group(ctx, m->process % 2, NULL, &half));
    CHECK_INT(sum_of(ctx, m->process), 10);
    if (m->process == 2) {
        raise(SIGKILL);
    }
    if (m->process == 0)
        CHECK_ERROR(dp_all_reduce_i64(half, &one, 1, DP_OP_SUM), DP_ERR_REMOTE, "rank 1");
    else
        CHECK_INT(sum_of(half, m->process), 6);
    CHECK_ERROR(dp_all_reduce_i64(ctx, &one, 1, DP_OP_SUM), DP_ERR_REMOTE, "rank 2");
    if (m->process != 0)
        CHECK_INT(sum_of(half, m->process), 6); /* which has all its processes */
    dp_close(ctx);
    dp_close(half);
}

TEST(a_process_that_dies_fails_what_it_was_in)
{
    in_processes_but(4, 2, one_dies);
}

static void *stop_instead(size_t bytes, size_t alignment, void *user)
{
    (void)bytes, (void)alignment, (void)user;
    raise(SIGSTOP);
    return NULL;
}

static void never_free(void *data, size_t bytes, void *user)
{
    (void)data, (void)bytes, (void)user;
}

/* Process 1 stops when it has met 0, for which process 2 waits in the job of all. */
static void one_stops(meeting *m)
{
    dp_config config = config_of(m, 1);
    dp_failure_info failure;
    dp_ctx *ctx, *group = NULL;
    config.timeout_ms = 2000;
    CHECK_OK(dp_open(&config, &ctx));
    config = (dp_config){.allocator = {stop_instead, never_free, NULL}};
    CHECK_ERROR(
        dp_open_group(ctx, m->process < 2 ? 0 : -1, m->process == 1 ? &config : NULL, &group),
        DP_ERR_TIMEOUT, "rank 1 (process 1, pid ");
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 1);
    dp_close(ctx);
}

TEST_SLOW(a_process_that_stops_while_its_group_opens_is_named, 60)
{
    in_processes_but(3, 1, one_stops);
}

/* ---- again and again ------------------------------------------------------------------------- */

#if defined(__linux__)
static void many(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *group;
    int before = 0;
    for (int i = 0; i < 12; i++) {
        CHECK_OK(dp_open_group(ctx, i % 3 == 2 ? -1 + m->process % 2 : 0, NULL, &group));
        dp_close(group);
        before = i == 2 ? open_files() : before;
    }
    CHECK_INT(open_files(), before);
    dp_close(ctx);
}

TEST(nothing_stays_behind)
{
    int before = count_names("/dev/shm", "dp-");
    in_processes(3, many);
    check_names(before);
}
#endif

#if defined(TEST_CUDA)
/* ---- GPUs ------------------------------------------------------------------------------------ */

static void gpus(meeting *m)
{
    dp_ctx *ctx = open_shm(m, 1), *half;
    CHECK_OK(dp_open_group(ctx, m->process % 2, NULL, &half));
    CHECK_STR(info_here(half).device_backend, info_here(ctx).device_backend);
    CHECK_STR(info_here(half).coll_backend, "nccl");
    check_place(half, m->process / 2, 2, m->process % 2 + 1);
    check_ranks(ctx, 21);
    dp_close(ctx);
    dp_close(half);
}

TEST(gpus_of_some_processes)
{
    on_gpus("1212", gpus);
}
#endif
