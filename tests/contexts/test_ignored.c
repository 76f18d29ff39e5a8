/* test_ignored.c - what a module on all ranks does not share, and whether the rest is the same. */

#include <stdio.h>
#include "examples/custom_device.h"
#include "ranked.h"

static const plan how;
static const plan all_said = {.habit = {ALL_SAID, ALL_SAID, ALL_SAID, ALL_SAID}};
static const char *const w_and_seen[] = {"w", "seen"};

static const dp_distributed_config without_w = {.ignored = w_and_seen, .ignored_count = 2};

static void check_number(dp_module *net, size_t param, bool grad, double want)
{
    CHECK_F64(element(net, param, grad, 0), want, 1e-5 * fabs(want));
}

/* ---- gradients stay with their rank ---------------------------------------------------------- */

static void local_gradients(dp_ctx *ctx, const plan *habits)
{
    dp_module *net = make_net(ctx, habits), *par;
    dp_reducer_info info;
    dp_report report;
    int ranks = info_here(ctx).rank_count, own = info_here(ctx).rank_first + 1;
    double mean = (ranks + 1) / 2.0;
    CHECK_OK(dp_distributed(net, &without_w, &par));
    CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
    CHECK_INT(info.unit_count, 1);
    CHECK_INT(info.bytes, V * 4);
    CHECK_OK(dp_report_get(par, &report));
    CHECK_INT(report.ignored_count, 2);
    for (int step = 1; step <= 3; step++) { /* reduced or not, it is added to */
        CHECK_OK(forward_and_backward(par, 1, step == 2));
        check_number(net, 0, true, own * step);
        check_number(net, 1, true, step == 2 ? mean + own : mean * step);
    }
    CHECK_OK(dp_zero_grad(par));
    check_number(net, 0, true, 0);
    CHECK_OK(forward_and_backward(par, 2, false));
    check_number(net, 0, true, 2 * own);
    check_number(net, 1, true, 2 * mean);
    dp_close(ctx);
}

static void local_over_shm(meeting *m)
{
    local_gradients(open_over_shm(m, 1 + m->process, 0), &all_said);
}

TEST(gradients_of_what_is_ignored_stay_with_their_rank)
{
    local_gradients(open_here(1), &how);
    local_gradients(open_here(3), &how);
    local_gradients(open_here(2), &all_said);
    local_gradients(open_on(toy_device(), 2), &how);
    in_processes(2, local_over_shm);
}

/* ---- numbers stay as they are ---------------------------------------------------------------- */

static void other_shapes(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *par;
    dp_param_config params[3];
    float w[W + 2] = {1}, v[V] = {2}, seen = (float)m->process;
    memcpy(params, net_params, sizeof params);
    params[0].shape[0] = m->process == 2 ? 0 : W + m->process; /* 3, 4 and none */
    w[0] = v[0] = 10 + (float)m->process;
    dp_module *net = make_net_of(ctx, (dp_module_config){.params = params, .state = &how});
    CHECK_OK(dp_params_write(net, 0, w, (size_t)params[0].shape[0] * sizeof *w));
    CHECK_OK(dp_params_write(net, 1, v, sizeof v));
    CHECK_OK(dp_params_write(net, 2, &seen, sizeof seen));
    CHECK_OK(dp_distributed(net, &without_w, &par));
    if (m->process < 2)
        check_number(net, 0, false, 10 + m->process);
    check_number(net, 1, false, 10);
    check_number(net, 2, false, m->process);
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(forward_and_backward(par, 1, false)); /* which makes no buffers equal */
    check_number(net, 1, true, 2 * 3.5);
    check_number(net, 2, false, 0.81 * m->process + 0.19 * (info_here(ctx).rank_first + 1));
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_buffers_compare(par));
    CHECK_ERROR(dp_params_compare(net), DP_ERR_MISMATCH, "rank 2 has parameter 'w' f32 [4] of");
    CHECK_ERROR(dp_buffers_compare(net), DP_ERR_MISMATCH, "rank 2 has buffer 'seen' f32 [] of");
    dp_close(ctx);
}

TEST(ignored_parameters_are_unchanged)
{
    in_processes(3, other_shapes);
}

/* ---- parameters that lie together ------------------------------------------------------------ */

static dp_status top_forward(dp_call *call)
{
    dp_pass *pass = NULL;
    DP_TRY(dp_call_child(call, "five", "forward", call->args, call->kwargs, &call->out, &pass));
    call->saved = pass;
    return DP_OK;
}

static dp_status top_backward(dp_call *call)
{
    return dp_backward(call->saved, call->grad, NULL);
}

typedef enum memory { OURS, PACKED, THEIRS, MEMORIES } memory;

/* In the process 1 "b" is empty, so that its neighbours touch. */
static dp_module *make_five(meeting *m, dp_ctx *ctx, memory whose, float *block)
{
    static const dp_method top_methods[] = {{"forward", top_forward}, {"backward", top_backward}};
    dp_param_config params[FIVE];
    dp_module *top;
    five_params(params);
    params[1].shape[0] = m->process == 1 ? 0 : EACH;
    dp_module *five = make_net_of(ctx, (dp_module_config){.name = "five",
                                                          .methods = five_methods,
                                                          .params = params,
                                                          .param_count = FIVE,
                                                          .packed = whose != OURS,
                                                          .block = whose == THEIRS ? block : NULL});
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "top",
                                                  .methods = top_methods,
                                                  .method_count = 2,
                                                  .children = &five,
                                                  .child_count = 1},
                              &top));
    return top;
}

static void some_of_five(meeting *m)
{
    static const char *const ignored[] = {"five.b", "five.e", "five.b"}; /* once is enough */
    float block[FIVE * EACH];
    dp_ctx *ctx = open_over_shm(m, 2 - m->process % 2, 0);
    double mean = (info_here(ctx).rank_count + 1) / 2.0;
    int own = info_here(ctx).rank_first + 1;
    for (memory whose = OURS; whose < MEMORIES; whose++) {
        for (int i = 0; i < FIVE * EACH; i++)
            block[i] = (float)m->process;
        dp_module *top = make_five(m, ctx, whose, block), *par;
        dp_distributed_config config = {.ignored = ignored, .ignored_count = 3};
        CHECK_OK(dp_distributed(top, &config, &par));
        for (int step = 1; step < 3; step++)
            CHECK_OK(forward_and_backward(par, 1, false));
        for (size_t i = 0; i < FIVE; i++) {
            double want = (double)(i + 1) * 2;
            bool kept = i == 1 || i == 4;
            if (i == 1 && m->process == 1)
                continue;
            check_number(top, i, true, kept ? want * own : want * mean);
            check_number(top, i, false, kept && whose == THEIRS ? m->process : 0);
        }
        CHECK_OK(dp_params_compare(par));
        CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_module_destroy(top));
    }
    dp_close(ctx);
}

TEST(parameters_beside_others_may_be_ignored)
{
    in_processes(3, some_of_five);
}

/* ---- what cannot be ignored ------------------------------------------------------------------ */

TEST(names_that_nothing_has)
{
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par = NULL;
    dp_distributed_config config = {.ignored_count = 1};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "ignored is NULL");
    config.ignored = (const char *const[]){NULL};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID, "ignored[0] is NULL");
    config.ignored = (const char *const[]){"scene"};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID,
                "dp_distributed: 'net' has no parameter 'scene'");
    CHECK(strstr(dp_last_error(), "seen") != NULL); /* which was meant */
    CHECK(par == NULL);
    CHECK_OK(dp_module_destroy(net)); /* nothing wraps it */
    dp_close(ctx);
}

static void different_names(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = make_net(ctx, &how), *par = NULL;
    dp_distributed_config config = {.ignored = w_and_seen, .ignored_count = m->process == 1};
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_MISMATCH,
                "rank 1 has 'w', ignored, rank 0 has parameter 'w' f32 [3]");
    config.ignored = (const char *const[]){m->process == 0 ? "nobody" : "w"};
    config.ignored_count = 1;
    CHECK_ERROR(dp_distributed(net, &config, &par), DP_ERR_INVALID,
                "rank 0: 'net' has no parameter 'nobody'");
    CHECK_OK(dp_distributed(net, &without_w, &par)); /* the job goes on */
    CHECK_OK(forward_and_backward(par, 1, false));
    dp_close(ctx);
}

TEST(ranks_ignore_the_same)
{
    in_processes(3, different_names);
}

/* ---- whether buffers are the same ------------------------------------------------------------ */

static void buffers_apart(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    float own = (float)m->process;
    static const dp_buffer_sync kinds[] = {DP_BUFFERS_FIRST, DP_BUFFERS_MEAN, DP_BUFFERS_LOCAL};
    for (int i = 0; i < 3; i++) {
        dp_module *net = make_net(ctx, &how), *par;
        CHECK_OK(dp_params_write(net, 2, &own, sizeof own));
        CHECK_OK(dp_params_compare(net)); /* a buffer is none */
        CHECK_ERROR(dp_buffers_compare(net), DP_ERR_MISMATCH,
                    "dp_buffers_compare: rank 1 has buffer 'seen' f32 [] of hash");
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.buffers = kinds[i]}, &par));
        CHECK_OK(dp_buffers_compare(par));
        CHECK_OK(dp_buffers_compare(net));
        CHECK_OK(forward_and_backward(par, 1, false)); /* from rows of their own */
        CHECK_OK(dp_params_compare(par));
        if (kinds[i] == DP_BUFFERS_LOCAL)
            CHECK_OK(dp_buffers_compare(par));
        else
            CHECK_ERROR(dp_buffers_compare(par), DP_ERR_MISMATCH, "rank 1 has buffer 'seen'");
        CHECK_ERROR(dp_buffers_compare(net), DP_ERR_MISMATCH, "rank 1 has buffer 'seen'");
    }
    dp_close(ctx);
}

TEST(buffers_of_all_processes_are_compared)
{
    in_processes(2, buffers_apart);
}

static void compare_local(dp_ctx *ctx)
{
    dp_module *net = make_net(ctx, &how), *par, *parent;
    char says[100];
    int first = info_here(ctx).rank_first;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.name = "par"}, &par));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "parent", .children = &par, .child_count = 1}, &parent));
    CHECK_OK(dp_buffers_compare(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    snprintf(says, sizeof says, "dp_buffers_compare: rank %d has buffer 'seen' f32 [] of hash ",
             first);
    CHECK_ERROR(dp_buffers_compare(par), DP_ERR_MISMATCH, says);
    CHECK(strstr(dp_last_error(), " on rank 1") != NULL);
    CHECK_ERROR(dp_buffers_compare(parent), DP_ERR_MISMATCH, "buffer 'par.seen' f32 [] of hash ");
    CHECK_OK(dp_buffers_compare(net)); /* which is one */
    CHECK_OK(dp_module_train(par, false));
    CHECK_OK(forward_and_backward(par, 1, false)); /* made equal, and left so */
    CHECK_OK(dp_buffers_compare(par));
    dp_close(ctx);
}

TEST(buffers_of_local_ranks_are_compared)
{
    compare_local(open_here(2));
    compare_local(open_on(toy_device(), 3));
}

/* ---- what local ranks start with ------------------------------------------------------------- */

static float saw[RANKS];

static dp_status look_forward(dp_call *call)
{
    dp_tensor buffer = dp_buffer_tensor(call, 2),
              host = dp_wrap(&saw[rank_of(call)], DP_F32, 0, NULL);
    call->out = dp_float(1);
    return dp_copy(call->ctx, &host, &buffer, NULL);
}

/* Nobody makes them equal, so each has a copy of the module's from the start. */
TEST(local_buffers_start_as_the_modules)
{
    static const dp_method methods[] = {{"forward", look_forward}, {"backward", net_backward}};
    static const char *const seen[] = {"seen"};
    const dp_distributed_config configs[] = {{.buffers = DP_BUFFERS_LOCAL},
                                             {.ignored = seen, .ignored_count = 1}};
    const float start = 0.5f;
    dp_ctx *ctx = open_here(3);
    for (int i = 0; i < 2; i++) {
        dp_module *par,
            *net = make_net_of(
                ctx, (dp_module_config){.name = "look", .methods = methods, .state = &how});
        CHECK_OK(dp_params_write(net, 2, &start, sizeof start));
        CHECK_OK(dp_distributed(net, &configs[i], &par));
        CHECK_OK(forward_and_backward(par, 1, false));
        for (int r = 0; r < 3; r++)
            CHECK_F64(saw[r], start, 0);
        memset(saw, 0, sizeof saw);
    }
    dp_close(ctx);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_ignored_parameters_are_unchanged, 60)
{
    on_gpus("12", local_over_shm);
    on_gpus("222", other_shapes);
}

TEST_SLOW(cuda_nccl_ranks_ignore_the_same, 60)
{
    on_gpus("111", different_names);
    on_gpus("11", buffers_apart);
}
#endif
