/* test_buffers.c - dp_buffers_sync: buffers become the same on all ranks when the user says so. */

#include <stdio.h>
#include "examples/custom_device.h"
#include "ranked.h"

/* ---- a net that counts -------------------------------------------------------------------------
   A forward on rank r adds r + 1 to both numbers of "norm.mean", which the net also has as "mean",
   and 10 times that to "steps".                                                                  */

enum { STATS_W, STATS_STEPS, STATS_MEAN };

static const plan how;

static dp_status stats_forward(dp_call *call)
{
    int64_t steps = 0;
    float mean[2] = {0};
    dp_tensor on_device[] = {dp_buffer_tensor(call, STATS_STEPS),
                             dp_buffer_tensor(call, STATS_MEAN)};
    dp_tensor here[] = {dp_wrap(&steps, DP_I64, 0, NULL), dp_wrap(mean, DP_F32, DP_SHAPE(2))};
    for (int i = 0; i < 2; i++)
        DP_TRY(dp_copy(call->ctx, &here[i], &on_device[i], NULL));
    steps += 10 * (rank_of(call) + 1);
    for (int i = 0; i < 2; i++)
        mean[i] += (float)(rank_of(call) + 1);
    for (int i = 0; i < 2; i++)
        DP_TRY(dp_copy(call->ctx, &on_device[i], &here[i], NULL));
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status stats_backward(dp_call *call)
{
    return add_to(call, STATS_W, 1);
}

/* `memory`: for "norm.mean"; NULL: the library's. */
static dp_module *make_stats(dp_ctx *ctx, float *memory)
{
    static const dp_method methods[] = {{"forward", stats_forward}, {"backward", stats_backward}};
    static const dp_param_config own[] = {
        {.name = "w", .ndim = 1, .shape = {3}},
        {.name = "steps", .dtype = DP_I64, .buffer = true},
        {.name = "mean", .ndim = 1, .shape = {2}, .buffer = true, .same_as = "norm.mean"}};
    const dp_param_config inner = {
        .name = "mean", .ndim = 1, .shape = {2}, .buffer = true, .data = memory};
    dp_module *norm = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "norm", .params = &inner, .param_count = 1}, &norm));
    return make_net_of(ctx, (dp_module_config){.name = "stats",
                                               .methods = methods,
                                               .state = &how,
                                               .params = own,
                                               .param_count = 3,
                                               .children = &norm,
                                               .child_count = 1});
}

static void check_stats(dp_module *net, double mean, int64_t steps)
{
    float means[2];
    int64_t count = 0;
    dp_param_info info;
    CHECK_OK(dp_module_param(net, STATS_STEPS, &info));
    CHECK_OK(dp_read(dp_module_ctx(net), &info.data, &count, sizeof count));
    CHECK_OK(dp_module_param(net, STATS_MEAN, &info));
    CHECK_OK(dp_read(dp_module_ctx(net), &info.data, means, sizeof means));
    for (int i = 0; i < 2; i++)
        CHECK_F64(means[i], mean, 1e-6);
    CHECK_INT(count, steps);
}

/* ---- one wrapper ----------------------------------------------------------------------------- */

static const dp_buffer_sync kinds[] = {DP_BUFFERS_FIRST, DP_BUFFERS_MEAN, DP_BUFFERS_LOCAL};

/* How many collectives since the last dp_tag made buffers equal. */
static int spreads_since(dp_ctx *ctx, const char *tag)
{
    static char text[8000];
    char *line = text;
    int count = 0;
    CHECK(dp_recent_collectives(ctx, text, sizeof text) < sizeof text);
    for (char *end = line; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        count += strstr(line, "buffers of 'stats'") != NULL && strstr(line, tag) != NULL;
    }
    return count;
}

static void check_synced(dp_ctx *ctx, dp_buffer_sync kind, float *memory)
{
    dp_module *net = make_stats(ctx, memory), *par = NULL;
    dp_info info = info_here(ctx);
    double own = info.rank_first + 1, ranks = info.rank_count;
    double mean = kind == DP_BUFFERS_FIRST ? 1 : kind == DP_BUFFERS_MEAN ? (ranks + 1) / 2 : own;
    int64_t steps = kind == DP_BUFFERS_LOCAL ? 10 * (int64_t)own : 10;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = kind}, &par));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_stats(net, own, 10 * (int64_t)own);
    for (int i = 0; i < 2; i++) {
        char tag[40];
        snprintf(tag, sizeof tag, "turn %d of %d", i, (int)kind);
        dp_tag(ctx, tag);
        CHECK_OK(dp_buffers_sync(par));
        check_stats(net, mean, steps);
        CHECK_INT(spreads_since(ctx, tag), /* one for each buffer */
                  info.process_count > 1 && kind != DP_BUFFERS_LOCAL ? 2 : 0);
        CHECK_OK(dp_buffers_compare(par)); /* on all local ranks */
    }
    dp_tag(ctx, "next"); /* whose forward finds them equal */
    CHECK_OK(forward_and_backward(par, 1, false));
    check_stats(net, mean + own, steps + 10 * (int64_t)own);
    CHECK_INT(spreads_since(ctx, "next"), 0);
    dp_tag(ctx, NULL);
    CHECK_OK(forward_and_backward(par, 1, true));
    CHECK_OK(forward_and_backward(par, 1, true)); /* which makes nothing equal, as told */
    CHECK_OK(dp_buffers_sync(par));
    CHECK_OK(dp_buffers_compare(par));
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_module_destroy(net));
}

static void sync_on(dp_ctx *ctx)
{
    for (int i = 0; i < 3; i++)
        check_synced(ctx, kinds[i], NULL);
    dp_close(ctx);
}

static void sync_over_shm(meeting *m)
{
    sync_on(open_over_shm(m, 1 + m->process % 2, 0));
}

TEST(buffers_become_equal_when_told)
{
    sync_on(open_here(1));
    sync_on(open_here(3));
    sync_on(open_on(toy_device(), 3));
    in_processes(2, sync_over_shm);
    in_processes(3, sync_over_shm);
}

static void sync_memory_of_the_users(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    for (int i = 0; i < 3; i++)
        check_synced(ctx, kinds[i], (float[2]){0});
    dp_close(ctx);
}

TEST(buffers_in_memory_of_the_users_become_equal)
{
    in_processes(2, sync_memory_of_the_users);
}

/* ---- trees ----------------------------------------------------------------------------------- */

static void put_stats(dp_module *net, float size)
{
    const float means[2] = {size, size};
    const int64_t steps = (int64_t)(10 * size);
    CHECK_OK(dp_params_write(net, STATS_STEPS, &steps, sizeof steps));
    CHECK_OK(dp_params_write(net, STATS_MEAN, means, sizeof means));
}

/* The wrapper is a child; what is ignored, and what the parent has itself, stays. */
static void sync_below(meeting *m)
{
    static const char *const ignored[] = {"steps"};
    static const dp_param_config own = {.name = "own", .buffer = true};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *net = make_stats(ctx, NULL), *par = NULL, *parent = NULL;
    float mine = (float)m->process;
    CHECK_OK(dp_distributed(
        net,
        &(dp_distributed_config){
            .name = "par", .buffers = DP_BUFFERS_MEAN, .ignored = ignored, .ignored_count = 1},
        &par));
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "parent", .params = &own, .param_count = 1, .children = &par, .child_count = 1},
        &parent));
    CHECK_OK(dp_params_write(parent, 0, &mine, sizeof mine));
    put_stats(net, mine);
    CHECK_OK(dp_buffers_sync(parent));
    check_stats(net, 0.25, 10 * m->process); /* of 0, 0, 1 and 0 */
    CHECK_F64(element(parent, 0, false, 0), m->process, 0);
    dp_close(ctx);
}

TEST(wrappers_in_a_tree_make_buffers_equal)
{
    in_processes(2, sync_below);
}

static void sync_children(meeting *m)
{
    static const char *const ignored[] = {"two.stats.steps"};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *nets[] = {make_stats(ctx, NULL), make_stats(ctx, NULL)}, *all = NULL, *par = NULL;
    dp_module *named[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = i == 0 ? "one" : "two",
                                                      .methods = net_methods,
                                                      .method_count = 2,
                                                      .children = &nets[i],
                                                      .child_count = 1},
                                  &named[i]));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "all", .children = named, .child_count = 2}, &all));
    CHECK_OK(dp_separate_distributed(
        all,
        &(dp_distributed_config){
            .name = "apart", .buffers = DP_BUFFERS_MEAN, .ignored = ignored, .ignored_count = 1},
        &par));
    for (int i = 0; i < 2; i++)
        put_stats(nets[i], (float)(m->process + i));
    CHECK_OK(dp_buffers_sync(par));
    for (int i = 0; i < 2; i++)
        check_stats(nets[i], 0.5 + i, i == 0 ? 0 : 10 * (m->process + 1));
    dp_close(ctx);
}

TEST(children_by_themselves_make_buffers_equal)
{
    in_processes(2, sync_children);
}

/* ---- without a wrapper ----------------------------------------------------------------------- */

TEST(one_process_has_nothing_to_make_equal)
{
    dp_ctx *ctx = open_here(3);
    dp_module *net = make_stats(ctx, NULL), *par = NULL;
    put_stats(net, 3);
    CHECK_OK(dp_buffers_sync(net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(dp_buffers_sync(par));
    check_stats(net, 3, 30);
    dp_close(ctx);
}

static void sync_nothing(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_stats(ctx, NULL), *par = NULL;
    CHECK_ERROR(dp_buffers_sync(net), DP_ERR_INVALID,
                "dp_buffers_sync: no wrapper by dp_distributed is in the tree of 'stats'");
    CHECK_OK(dp_distributed(net, NULL, &par));
    put_stats(net, (float)m->process);
    CHECK_ERROR(dp_buffers_sync(net), DP_ERR_INVALID, "in the tree of 'stats'");
    CHECK_OK(dp_buffers_sync(par)); /* the job goes on */
    check_stats(net, 0, 0);
    dp_close(ctx);
}

TEST(several_processes_want_a_wrapper)
{
    in_processes(2, sync_nothing);
}

/* ---- it is a write --------------------------------------------------------------------------- */

/* Owners' parameters that were edited alike, but to other numbers. */
static void edit_owners(dp_module *par)
{
    for (size_t owner = 0; owner < 2; owner++) {
        dp_tensor data;
        CHECK_OK(dp_owner_edit(par, owner, STATS_W, &data, NULL));
        CHECK_OK(dp_fill(dp_module_ctx(par), &data, dp_float((double)owner)));
    }
}

/* Replicas of the wrapper itself stay current; others follow. */
TEST(replicas_know_of_the_write)
{
    for (int other = 0; other < 2; other++) {
        dp_ctx *ctx = open_on(toy_device(), 2);
        dp_module *pars[2], *net = make_stats(ctx, NULL);
        for (int i = 0; i < 2; i++)
            CHECK_OK(dp_distributed(net, NULL, &pars[i]));
        CHECK_OK(forward_and_backward(pars[0], 1, false));
        edit_owners(pars[0]);
        CHECK_OK(dp_buffers_sync(pars[other]));
        CHECK_OK(forward_and_backward(pars[0], 1, false));
        if (other == 0)
            CHECK_ERROR(dp_params_compare(pars[0]), DP_ERR_MISMATCH, "'w'");
        else
            CHECK_OK(dp_params_compare(pars[0]));
        dp_close(ctx);
    }
}

/* A backward wants what its forward has read, buffers too. Local ones are not written to. */
TEST(no_backward_after_the_write)
{
    for (int i = 0; i < 3; i++) {
        dp_ctx *ctx = open_here(2);
        dp_module *par = NULL, *net = make_stats(ctx, NULL);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_pass *pass = NULL;
        dp_value out;
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = kinds[i]}, &par));
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out,
                           &pass));
        CHECK_OK(dp_buffers_sync(par));
        if (kinds[i] == DP_BUFFERS_LOCAL)
            CHECK_OK(dp_backward(pass, dp_float(1), NULL));
        else
            CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE,
                        "'steps' of 'stats' was edited after the forward");
        CHECK_OK(forward_and_backward(par, 1, false));
        dp_close(ctx);
    }
}

/* ---- what fails ------------------------------------------------------------------------------ */

static dp_status sync_in_a_replica(dp_call *call)
{
    call->out = dp_none();
    return dp_buffers_sync(call->module);
}

TEST(replicas_cannot_make_buffers_equal)
{
    static const dp_method method = {"forward", sync_in_a_replica};
    dp_ctx *ctx = open_here(2);
    dp_module *net = NULL, *par = NULL;
    dp_value out;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = &method, .method_count = 1}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, NULL),
        DP_ERR_STATE, "dp_buffers_sync");
    CHECK_ERROR(dp_buffers_sync(NULL), DP_ERR_INVALID, "dp_buffers_sync");
    dp_close(ctx);
}

static dp_module *a_wrapper(dp_ctx *ctx)
{
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(make_stats(ctx, NULL), NULL, &par));
    return par;
}

static void one_syncs(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = a_wrapper(ctx);
    dp_status status = m->process == 0 ? dp_buffers_sync(par) : dp_barrier(ctx);
    CHECK(dp_status_class(status) == DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "buffers of 'stats'");
    dp_close(ctx);
}

TEST(process_in_another_call_learns_the_others_call)
{
    in_processes(2, one_syncs);
}

#if defined(TEST_SIM)
TEST_SLOW(cuda_nccl_buffers_become_equal_when_told, 60)
{
    on_gpus("11", sync_over_shm);
    on_gpus("22", sync_below);
}
#endif
