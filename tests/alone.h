/* alone.h - tests of a library that was compiled with DP_ONE_PROCESS: what takes another process is
   refused, with a sentence, and nothing else is. In dp.c, after the implementation. */

#include "world.h"

#define ONE "this program was compiled with DP_ONE_PROCESS: it has one process"

const dp_coll_ops *pipes_coll(void);

/* Nothing carries anything. */
const dp_coll_ops *pipes_coll(void)
{
    return dp_tcp_coll();
}

static dp_ctx *open_alone(const dp_config *config)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(config, &ctx));
    return ctx;
}

/* Each would train a model of its own, and overwrite the files of the others. */
TEST(several_processes_of_a_launcher_are_refused)
{
    char why[80];
    for (int l = 0; l < LAUNCHERS; l++) {
        dp_ctx *ctx = NULL;
        nobody_launched_us();
        launched_by(&launchers[l], 1, 3);
        snprintf(why, sizeof why, "dp_open: %s is 3: a launcher has started", launchers[l].count);
        CHECK_ERROR(dp_open(NULL, &ctx), DP_ERR_UNSUPPORTED, why);
        CHECK_ERROR(dp_open(NULL, &ctx), DP_ERR_UNSUPPORTED, ONE);
        CHECK(ctx == NULL);
        set("DP_LAUNCH", "none");
        dp_close(open_alone(NULL));
        unsetenv("DP_LAUNCH");
        dp_close(open_alone(&(dp_config){.local_only = true}));
    }
}

TEST(one_process_of_a_launcher_is_alone)
{
    for (int l = 0; l < LAUNCHERS; l++) {
        dp_info info;
        nobody_launched_us();
        launched_by(&launchers[l], 0, 1);
        dp_ctx *ctx = open_alone(NULL);
        CHECK_OK(dp_info_get(ctx, &info));
        CHECK_STR(info.launcher, launchers[l].name);
        CHECK_INT(info.process_count, 1);
        dp_close(ctx);
    }
}

TEST(half_of_what_a_launcher_sets_is_an_error)
{
    dp_ctx *ctx = NULL;
    nobody_launched_us();
    set("RANK", "0");
    CHECK_ERROR(dp_open(NULL, &ctx), DP_ERR_INVALID, "RANK is '0' and WORLD_SIZE is not set");
}

TEST(to_come_later_is_refused)
{
    dp_ctx *ctx = NULL;
    nobody_launched_us();
    set("DP_REJOIN", "1");
    CHECK_ERROR(dp_open(NULL, &ctx), DP_ERR_UNSUPPORTED, "dp_open: DP_REJOIN is set, and " ONE);
    dp_close(open_alone(&(dp_config){.local_only = true}));
}

static dp_status copy_own(const void *in, void *out, size_t bytes_each, void *user)
{
    (void)user;
    memcpy(out, in, bytes_each);
    return DP_OK;
}

TEST(a_bootstrap_of_several_is_refused_and_one_of_one_serves)
{
    dp_config config = {.bootstrap = {.all_gather = copy_own, .process_count = 2}};
    dp_ctx *ctx = NULL;
    dp_info info;
    nobody_launched_us();
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_UNSUPPORTED,
                "dp_open: bootstrap.process_count is 2, and " ONE);
    config.bootstrap.process_count = 1;
    ctx = open_alone(&config);
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.launcher, "bootstrap");
    dp_close(ctx);
}

TEST(the_time_out_of_the_environment_counts)
{
    nobody_launched_us();
    set("DP_TIMEOUT", "7");
    dp_ctx *ctx = open_alone(NULL);
    CHECK_INT(ctx->config.timeout_ms, 7000);
    dp_close(ctx);
}

static dp_status start_nothing(void *user)
{
    (void)user;
    return DP_OK;
}

TEST(messages_and_other_processes_are_refused)
{
    float one = 0;
    const dp_tensor own = dp_wrap(&one, DP_F32, DP_SHAPE(1));
    dp_message message = {.tensor = own};
    nobody_launched_us();
    CHECK_ERROR(dp_spawn(1, start_nothing, NULL), DP_ERR_UNSUPPORTED, "dp_spawn: " ONE);
    CHECK_ERROR(dp_spawn(0, start_nothing, NULL), DP_ERR_INVALID, "dp_spawn: count is 0");
    dp_ctx *ctx = open_alone(&(dp_config){.device_count = 2});
    CHECK_ERROR(dp_send(ctx, &own, 1, 0), DP_ERR_UNSUPPORTED, "dp_send: " ONE);
    CHECK_ERROR(dp_recv(ctx, &own, 1, 0), DP_ERR_UNSUPPORTED, "dp_recv: " ONE);
    CHECK_ERROR(dp_messages_begin(ctx, &message, 1), DP_ERR_UNSUPPORTED, ONE);
    CHECK_ERROR(dp_messages_test(ctx, &message, 1), DP_ERR_UNSUPPORTED, ONE);
    CHECK_ERROR(dp_messages_end(ctx, &message, 1), DP_ERR_UNSUPPORTED, ONE);
    CHECK_OK(dp_barrier(ctx)); /* nothing has failed */
    dp_close(ctx);
}

TEST(nobody_comes_and_nothing_is_recovered)
{
    bool came = true;
    nobody_launched_us();
    dp_ctx *ctx = open_alone(NULL);
    CHECK_ERROR(dp_recover(ctx), DP_ERR_STATE, "or there was one process: " ONE);
    CHECK_ERROR(dp_admit(ctx, &came), DP_ERR_STATE, "dp_admit: config.recovers was not set");
    dp_close(ctx);
    ctx = open_alone(&(dp_config){.recovers = true});
    CHECK_OK(dp_admit(ctx, &came));
    CHECK(!came);
    dp_close(ctx);
}

TEST(a_group_of_one_is_a_context_like_any)
{
    dp_ctx *group = NULL;
    dp_info info;
    nobody_launched_us();
    dp_ctx *ctx = open_alone(&(dp_config){.device_count = 3, .timeout_ms = 5000});
    CHECK_OK(dp_open_group(ctx, 4, NULL, &group));
    CHECK_OK(dp_info_get(group, &info));
    CHECK_STR(info.launcher, "group");
    CHECK_INT(info.local_count, 3);
    CHECK_INT(group->config.timeout_ms, 5000);
    CHECK_OK(dp_barrier(group));
    dp_close(group);
    CHECK_OK(dp_open_group(ctx, -1, NULL, &group));
    CHECK(group == NULL);
    CHECK_ERROR(dp_open_group(ctx, -2, NULL, &group), DP_ERR_INVALID, "group is -2");
    CHECK_ERROR(dp_open_group(ctx, 0, &(dp_config){.shards = 3}, &group), DP_ERR_INVALID,
                "dp_open_group: shards is 3");
    dp_close(ctx);
}

/* A program that lists them is one for one process and for several. */
TEST(tables_between_processes_serve_nobody)
{
    const dp_coll_ops *const colls[] = {dp_shm_coll(), dp_tcp_coll(), dp_cpu_coll(), NULL};
    dp_info info;
    nobody_launched_us();
    dp_ctx *ctx = open_alone(&(dp_config){.device_count = 2, .colls = colls});
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, dp_cpu_coll()->name);
    dp_close(ctx);
}
