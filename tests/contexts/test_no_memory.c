/* test_no_memory.c - calls of several collectives, in which one process has no memory at some
   moment: what is refused to it before the others take part it can ask for again; or all have one
   error; or the job has failed, and all know why. Nobody waits. */

#define _GNU_SOURCE /* P_tmpdir */

#include "ranked.h"
#include "dp_norm.h"
#include "dp_save.h"
#include "dp_train.h"

/* What a process works with. */
static struct kit {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_module *net, *par;
    dp_optim *optim;
} kit;

static dp_module *make_kit(dp_ctx *ctx)
{
    static const plan how;
    kit.ctx = ctx;
    kit.scope = dp_scope_begin(ctx);
    kit.net = make_net(ctx, &how);
    CHECK_OK(dp_distributed(kit.net, NULL, &kit.par));
    return kit.par;
}

static dp_module *make_kit_of_shares(dp_ctx *ctx)
{
    make_kit(ctx);
    CHECK_OK(dp_optim_create(kit.par,
                             &(dp_optim_config){.rule = dp_adam(),
                                                .hyper = {.lr = 1},
                                                .clip = {.norm = 1},
                                                .scale = {.scale = 2, .dynamic = true},
                                                .sharded = true},
                             &kit.optim));
    CHECK_OK(forward_and_backward(kit.par, 1, false));
    return kit.par;
}

static bool is_first(void)
{
    return info_here(kit.ctx).process == 0;
}

/* ---- the calls ------------------------------------------------------------------------------- */

static dp_value three_losses(const char *last)
{
    return DP_DICT(kit.scope, {"a", dp_float(1)}, {"b", dp_float(2)}, {last, dp_float(3)});
}

static dp_status means(void)
{
    dp_value out;
    DP_TRY(dp_log_mean(kit.ctx, kit.scope, three_losses("c"), 3, &out));
    CHECK_F64(dp_get(out, "c").as.f, 3, 0);
    return DP_OK;
}

static dp_status means_of_one(void)
{
    dp_value out;
    return dp_log_mean(kit.ctx, kit.scope, is_first() ? three_losses("c") : dp_none(), 3, &out);
}

static dp_status means_of_others(void)
{
    dp_value out;
    dp_status status =
        dp_log_mean(kit.ctx, kit.scope, three_losses(is_first() ? "c" : "d"), 3, &out);
    CHECK(status != DP_OK);
    if (status == DP_ERR_MISMATCH && strstr(dp_last_error(), "'d' on rank 1") != NULL)
        return DP_OK;
    return status;
}

static dp_status weighs(void)
{
    double weights[RANKS] = {1, 2};
    float numbers[RANKS];
    dp_part parts[RANKS];
    for (int i = 0; i < RANKS; i++) {
        numbers[i] = 3;
        parts[i] = (dp_part){.send = &numbers[i], .recv = &numbers[i]};
    }
    DP_TRY(dp_all_reduce_weighted(kit.ctx, parts, weights, 1, DP_F32));
    CHECK_F64(numbers[0], 3, 0);
    return DP_OK;
}

static dp_status makes_an_optimizer(void)
{
    dp_optim *optim;
    DP_TRY(
        dp_optim_create(kit.par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, &optim));
    dp_optim_destroy(optim);
    return DP_OK;
}

static dp_status makes_a_reducer(void)
{
    static float numbers[RANKS];
    void *local[RANKS];
    dp_reducer *reducer;
    for (int i = 0; i < RANKS; i++)
        local[i] = &numbers[i];
    const dp_block block = {.dtype = DP_F32, .count = 1, .local = local};
    const dp_reducer_config config = {
        .name = "lack", .blocks = &block, .block_count = 1, .reduction = DP_SUM_RANKS};
    DP_TRY(dp_reducer_create(kit.ctx, &config, &reducer));
    return dp_reducer_destroy(reducer);
}

static dp_status unscales(void)
{
    return dp_optim_unscale(kit.optim);
}

static dp_status steps(void)
{
    return dp_optim_step(kit.optim);
}

static dp_status saves_and_loads(void)
{
    dp_value saved;
    DP_TRY(dp_optim_save(kit.optim, kit.scope, &saved));
    return dp_optim_load(kit.optim, saved);
}

static dp_status norms(void)
{
    double norm;
    return dp_grad_norm(kit.par, 3, &norm);
}

static dp_status clips(void)
{
    return dp_clip_grad_norm(kit.par, 1, 2, NULL);
}

static dp_status trains(void)
{
    dp_value log;
    DP_TRY(dp_zero_grad(kit.par));
    return dp_train_step(kit.par, kit.scope, a_part_each(kit.ctx, kit.scope), kit.optim, &log);
}

static dp_status compares(void)
{
    bool any;
    DP_TRY(dp_buffers_sync(kit.par));
    DP_TRY(dp_params_compare(kit.par));
    return dp_any(kit.ctx, true, &any);
}

static char path[64];

static dp_status keeps_and_reads(void)
{
    dp_value value;
    DP_TRY(dp_checkpoint_save(kit.ctx, path, three_losses("c")));
    return dp_checkpoint_load(kit.ctx, kit.scope, path, &value);
}

/* ---- the sweep ------------------------------------------------------------------------------- */

static dp_status (*call)(void);

static dp_status call_again(dp_module *module)
{
    (void)module;
    dp_status status = call();
    return is_refused(status) ? call() : status;
}

/* Of some allocations the others know, of most they need not. */
static void sweep(dp_module *(*make)(dp_ctx *ctx), dp_status (*one)(void), bool may_fail)
{
    size_t again = 0, over = 0;
    call = one;
    lack = shared_memory(sizeof *lack);
    *lack = (shortage){.make = make, .wrap = call_again, .devices = 1};
    do {
        lack->fail_at += (size_t)test_step();
        in_processes(2, one_has_no_memory);
        bool failed = lack->status[1] != DP_OK;
        CHECK_INT(lack->status[0] != DP_OK, failed);
        CHECK(!is_refused(lack->status[0]) && !is_refused(lack->status[1]));
        over += failed;
        again += lack->failed && !failed;
    } while (lack->failed);
    CHECK(test_skips() || (again > 0 && (over > 0) == may_fail));
}

TEST_SLOW(means_of_logs, 60)
{
    sweep(make_kit, means, true);
    sweep(make_kit, means_of_one, true);
    sweep(make_kit, means_of_others, true);
}

TEST_SLOW(sums_with_weights, 60)
{
    sweep(make_kit, weighs, false);
}

TEST_SLOW(steps_of_shares, 120)
{
    sweep(make_kit, makes_an_optimizer, false);
    sweep(make_kit_of_shares, unscales, false);
    sweep(make_kit_of_shares, steps, false);
    sweep(make_kit_of_shares, saves_and_loads, false);
}

TEST_SLOW(reducers, 60)
{
    sweep(make_kit, makes_a_reducer, false);
}

TEST_SLOW(train_steps, 120)
{
    sweep(make_kit_of_shares, trains, true);
}

TEST_SLOW(norms_of_gradients, 60)
{
    sweep(make_kit_of_shares, norms, true);
    sweep(make_kit_of_shares, clips, true);
}

TEST_SLOW(comparisons, 60)
{
    sweep(make_kit, compares, true);
}

TEST_SLOW(checkpoints, 60)
{
    snprintf(path, sizeof path, P_tmpdir "/test-lack-%d", (int)getpid());
    sweep(make_kit, keeps_and_reads, false);
    CHECK_INT(unlink(path), 0);
}
