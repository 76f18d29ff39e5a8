/* test_gradients.c - what a module knows of its gradients: whether they are zero, whose they are,
   what they are worth after a failure, and which parameters have one. */

#include "examples/custom_device.h"
#include "tree.h"
/* clang-format off */
#include "ranked.h"
#include "dp_train.h"
/* clang-format on */

/* ---- a net that does as it is told --------------------------------------------------------------
   Parameters a, b and c, and a buffer. The gradient of each element is `grad`, times the number
   that backward is given unless the module has mean_grads.                                       */

enum { A = 2, B = 3, C = 1, ALL_ELEMENTS = A + B + C, PARAMS = 3 };

typedef enum trouble { NONE, IN_FORWARD, IN_BACKWARD, AT_ONCE } trouble;

typedef struct script { /* the module's state */
    float grad[PARAMS];
    bool unused[PARAMS];
    trouble trouble;
    int rank;    /* on which trouble comes; -1: on all */
    bool writes; /* it writes gradients instead of adding to them */
    bool means;  /* the module has mean_grads */
    bool apart;  /* the gradient of c lies in memory of its own */
} script;

static const script ones = {.grad = {1, 1, 1}, .rank = -1};

static bool troubled(const dp_call *call, trouble kind)
{
    const script *own = call->state;
    return own->trouble == kind && (own->rank < 0 || own->rank == rank_of(call));
}

static dp_status told_forward(dp_call *call)
{
    if (troubled(call, IN_FORWARD))
        return dp_error(DP_ERR_USER, "no forward today");
    call->out = dp_float(1);
    return DP_OK;
}

/* The device may read what it is given later: from the call's scope. */
static dp_status add_or_write(const dp_call *call, size_t param, bool writes, float value)
{
    dp_tensor grad = dp_grad_tensor(call, param);
    float *data = dp_scope_alloc(call->scope, B * sizeof *data);
    if (data == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    dp_tensor host = dp_wrap(data, DP_F32, grad.ndim, grad.shape);
    size_t count = (size_t)dp_tensor_count(&grad);
    DP_TRY(dp_read(call->ctx, &grad, data, count * sizeof *data));
    for (size_t k = 0; k < count; k++)
        data[k] = (writes ? 0 : data[k]) + value;
    return dp_copy(call->ctx, &grad, &host, NULL);
}

static dp_status told_backward(dp_call *call)
{
    const script *own = call->state;
    double factor = own->means ? 1 : call->grad.as.f;
    if (troubled(call, AT_ONCE))
        return dp_error(DP_ERR_USER, "no backward today");
    for (size_t i = 0; i < PARAMS; i++) {
        if (!own->unused[i])
            DP_TRY(add_or_write(call, i, own->writes, (float)((double)own->grad[i] * factor)));
        if (troubled(call, IN_BACKWARD))
            return dp_error(DP_ERR_USER, "no backward today");
    }
    return DP_OK;
}

static const dp_method told[] = {{"forward", told_forward}, {"backward", told_backward}};
static const dp_param_config told_params[] = {
    {.name = "a", .ndim = 1, .shape = {A}},
    {.name = "b", .ndim = 1, .shape = {B}},
    {.name = "c", .ndim = 1, .shape = {C}},
    {.name = "s", .ndim = 1, .shape = {1}, .buffer = true}};

static dp_module *told_net(dp_ctx *ctx, const script *how)
{
    dp_module *net = NULL;
    dp_param_config params[PARAMS + 1];
    dp_tensor grad = {0};
    memcpy(params, told_params, sizeof params);
    if (how->apart) {
        CHECK_OK(dp_tensor_new(dp_scope_begin(ctx), dp_local_device(ctx, 0), DP_F32, 1,
                               params[2].shape, &grad));
        CHECK_OK(dp_fill(ctx, &grad, dp_int(0)));
    }
    params[2].grad = grad.data;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = told,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = PARAMS + 1,
                                                  .state = how,
                                                  .mean_grads = how->means},
                              &net));
    return net;
}

enum { PLAIN, PARALLEL, DISTRIBUTED, FACES };

/* The net, or a wrapper of it that drives two devices. */
static dp_module *faced(dp_module *net, int face)
{
    static const int two[] = {0, 1};
    dp_module *par = net;
    if (face == PARALLEL)
        CHECK_OK(dp_model_parallel(
            net, &(dp_parallel_config){.local_ranks = two, .local_rank_count = 2}, &par));
    if (face == DISTRIBUTED)
        CHECK_OK(
            dp_distributed(net, &(dp_distributed_config){.unused_params = DP_UNUSED_FOUND}, &par));
    return par;
}

static dp_optim *optim_of(dp_module *module, dp_optim_config config)
{
    dp_optim *optim = NULL;
    config.hyper.lr = config.hyper.lr > 0 ? config.hyper.lr : 1;
    CHECK_OK(dp_optim_create(module, &config, &optim));
    return optim;
}

static dp_status step(dp_module *module, dp_optim *optim, float row)
{
    dp_ctx *ctx = dp_module_ctx(module);
    float rows[RANKS];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    for (int i = 0; i < RANKS; i++)
        rows[i] = row;
    dp_tensor batch = dp_wrap(rows, DP_F32, 1, (int64_t[]){info_here(ctx).local_count});
    dp_value data = DP_DICT(scope, {"x", dp_of(scope, &batch)});
    dp_status status = dp_train_step(module, scope, data, optim, &log);
    dp_scope_end(scope);
    return status;
}

/* Every element of parameter `param`. */
static void check_param(dp_module *net, size_t param, double want)
{
    dp_param_info info;
    float got[B];
    CHECK_OK(dp_module_param(net, param, &info));
    CHECK_OK(dp_read(dp_module_ctx(net), &info.data, got,
                     (size_t)dp_tensor_count(&info.data) * sizeof *got));
    for (int64_t k = 0; k < dp_tensor_count(&info.data); k++)
        CHECK_F64(got[k], want, 1e-6 * fabs(want));
}

static void check_params(dp_module *net, double want)
{
    for (size_t i = 0; i < PARAMS; i++)
        check_param(net, i, want);
}

/* The gradient of c, which has one element. */
static void check_grad(dp_module *net, double want)
{
    dp_tensor grad;
    float got = 0;
    CHECK_OK(dp_owner_grad(net, 0, 2, &grad));
    CHECK_OK(dp_read(dp_module_ctx(net), &grad, &got, sizeof got));
    CHECK_F64(got, want, 0);
}

static bool is_used(dp_module *module, size_t param)
{
    bool used[8];
    size_t count = dp_module_param_count(module);
    CHECK_ERROR(dp_grads_used(module, used, count + 1), DP_ERR_INVALID, "count is");
    CHECK_OK(dp_grads_used(module, used, count));
    return used[param];
}

/* ---- several steps make one ---------------------------------------------------------------------
   A backward with mean_grads knows of nothing but its own batch.                                 */

static void accumulate(dp_ctx *ctx, int face, const script *how, dp_reduction reduction)
{
    dp_module *net = told_net(ctx, how), *par = net;
    if (face == DISTRIBUTED)
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = reduction}, &par));
    else
        par = faced(net, face);
    dp_optim *optim = optim_of(par, (dp_optim_config){.accumulate = 6});
    for (int i = 0; i < 36; i++)
        CHECK_OK(step(par, optim, 0));
    for (size_t i = 0; i < PARAMS; i++)
        check_param(net, i, -6 * (double)how->grad[i]);
    CHECK_OK(dp_optim_progress(optim, 0, 8)); /* six make a step, and so do the two left over */
    for (int i = 0; i < 8; i++)
        CHECK_OK(step(par, optim, 0));
    for (size_t i = 0; i < PARAMS; i++)
        check_param(net, i, -8 * (double)how->grad[i]);
}

static const script means[] = {
    {.grad = {1, 1, 1}, .rank = -1, .means = true},
    {.grad = {1, 2, 3}, .rank = -1, .means = true, .writes = true, .apart = true}};

TEST_BACKENDS(means_of_own_rows_accumulate)
{
    for (int face = 0; face < FACES; face++)
        for (int i = 0; i < 2; i++)
            accumulate(ctx, face, &means[i], DP_MEAN_RANKS);
    accumulate(ctx, DISTRIBUTED, &means[0], DP_MEAN_SAMPLES);
}

static void accumulate_here(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2 + m->process, 0);
    for (int i = 0; i < 2; i++) {
        accumulate(ctx, DISTRIBUTED, &means[i], DP_MEAN_RANKS);
        accumulate(ctx, DISTRIBUTED, &means[i], DP_MEAN_SAMPLES);
        accumulate(ctx, PARALLEL, &means[i], DP_MEAN_RANKS);
    }
    dp_close(ctx);
}

TEST(means_of_own_rows_accumulate_in_processes)
{
    in_processes(2, accumulate_here);
    in_processes_on(toy_device(), 2, accumulate_here);
}

/* Whether this pass adds is decided by the one before. */
TEST_BACKENDS(mean_grads_keep_what_no_sync_left)
{
    for (int face = 0; face < FACES; face++) {
        dp_module *net = told_net(ctx, &means[0]), *par = faced(net, face);
        static const bool no_sync[] = {false, false, true, true, false, false};
        dp_tensor data, grad;
        static const double wants[] = {2, 2, 2, 4, 6, 2};
        for (int i = 0; i < 6; i++) {
            CHECK_OK(forward_and_backward(par, 2, no_sync[i]));
            if (!no_sync[i] || face == PLAIN)
                check_grad(net, wants[i]);
        }
        CHECK_OK(forward_and_backward(par, 2, true));
        CHECK_OK(dp_zero_grad(par)); /* takes it back: what is there now is zeroed as ever */
        CHECK_OK(dp_params_edit(net, 2, &data, &grad));
        CHECK_OK(dp_fill(ctx, &grad, dp_int(9)));
        CHECK_OK(forward_and_backward(par, 2, false));
        check_grad(net, 2);
    }
}

/* What makes room for a pass that adds is memory of its scope. */
TEST(a_pass_that_adds_finds_no_memory)
{
    size_t failures = 0;
    for (size_t fail_at = 1, failed = 1; failed > 0; fail_at++) {
        test_allocator counter = {0};
        dp_ctx *ctx;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2, .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_module *net = told_net(ctx, &means[1]), *par = faced(net, DISTRIBUTED);
        CHECK_OK(forward_and_backward(par, 1, true));
        dp_scope *scopes[8]; /* what is kept for reuse is taken */
        for (int i = 0; i < 8; i++)
            scopes[i] = dp_scope_begin(ctx);
        counter.fail_at = counter.call_count + fail_at;
        counter.keep_failing = true;
        dp_status status = forward_and_backward(par, 1, false);
        failed = counter.fail_count;
        failures += failed > 0;
        counter =
            (test_allocator){.live_blocks = counter.live_blocks, .live_bytes = counter.live_bytes};
        CHECK_STATUS(status, failed > 0 ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(forward_and_backward(par, 1, true));
        CHECK_OK(forward_and_backward(par, 1, false));
        check_grad(net, 6);
        CHECK(scopes[0] != NULL);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    CHECK(failures > 0);
}

/* Samples whose gradients were zeroed are not counted. */
static void zero_between(dp_ctx *ctx)
{
    for (int i = 0; i < 2; i++) {
        dp_module *net = told_net(ctx, i == 0 ? &ones : &means[0]), *par = NULL;
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES}, &par));
        dp_optim *optim = optim_of(par, (dp_optim_config){.accumulate = 2});
        CHECK_OK(step(par, optim, 0));
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(step(par, optim, 0));
        check_params(net, -1);
        CHECK_OK(step(par, optim, 0));
        CHECK_OK(step(par, optim, 0));
        check_params(net, -2);
    }
}

TEST_BACKENDS(zeroed_gradients_take_their_samples_along)
{
    zero_between(ctx);
}

static void zero_between_here(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    zero_between(ctx);
    dp_close(ctx);
}

TEST(zeroed_gradients_take_their_samples_along_in_processes)
{
    in_processes(3, zero_between_here);
}

/* ---- before the first forward ---------------------------------------------------------------- */

/* The user's memory for data, for gradients, or for both; 3: for neither. */
static dp_module *half_given(dp_ctx *ctx, dp_scope *scope, int which)
{
    const int64_t count = 2;
    dp_tensor data, grad;
    dp_module *net = NULL;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &grad));
    CHECK_OK(dp_fill(ctx, &data, dp_int(1)));
    CHECK_OK(dp_fill(ctx, &grad, dp_int(1)));
    const dp_param_config params[] = {{.name = "w",
                                       .ndim = 1,
                                       .shape = {2},
                                       .data = which == 0 || which == 2 ? data.data : NULL,
                                       .grad = which == 1 || which == 2 ? grad.data : NULL},
                                      {.name = "none", .ndim = 1, .shape = {0}}};
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .params = params, .param_count = 2}, &net));
    return net;
}

static void first_call(dp_module *net, int call)
{
    dp_tensor data = {0}, grad = {0};
    double norm = -1;
    dp_optim *optim = NULL;
    if (call == 0)
        CHECK_OK(dp_zero_grad(net));
    if (call == 1)
        CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    if (call == 2)
        CHECK_OK(dp_owner_edit(net, 0, 0, &data, &grad));
    if (call == 3)
        CHECK_OK(dp_owner_grad(net, 0, 0, &grad));
    CHECK(call == 0 || call > 3 || grad.data != NULL);
    if (call == 4)
        CHECK_OK(dp_grad_norm(net, 2, &norm));
    if (call == 5)
        CHECK_OK(dp_clip_grad_norm(net, 1, 2, &norm));
    if (call == 6)
        CHECK_OK(dp_clip_grad_value(net, 1));
    if (call == 7)
        optim = optim_of(net, (dp_optim_config){.rule = dp_adamw()});
    if (call == 7)
        CHECK_OK(dp_optim_step(optim));
}

TEST_BACKENDS(the_first_call_finds_gradients)
{
    for (int which = 0; which < 4; which++)
        for (int call = 0; call < 8; call++) {
            dp_module *net = half_given(ctx, scope, which), *outer = net;
            if (call % 2 == 1) /* the same as a child */
                CHECK_OK(dp_module_create(
                    ctx, &(dp_module_config){.name = "out", .children = &net, .child_count = 1},
                    &outer));
            first_call(outer, call);
            CHECK_OK(dp_zero_grad(outer));
        }
}

/* ---- after a failure ------------------------------------------------------------------------- */

static const char *const is_void = "of 'net' is void because a backward failed: call dp_zero_grad";

/* Nothing takes gradients for good that are not. */
static void check_void(dp_module *par, dp_optim *optim)
{
    dp_tensor data, grad;
    double norm;
    bool used[PARAMS + 1];
    CHECK_ERROR(step(par, optim, 0), DP_ERR_STATE, is_void);
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE, is_void);
    CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE, is_void);
    CHECK_ERROR(dp_grad_norm(par, 2, &norm), DP_ERR_STATE, is_void);
    CHECK_ERROR(dp_clip_grad_value(par, 1), DP_ERR_STATE, is_void);
    CHECK_ERROR(dp_params_edit(par, 1, &data, &grad), DP_ERR_STATE, "'b' of 'net' is void");
    CHECK_ERROR(dp_owner_grad(par, 0, 2, &grad), DP_ERR_STATE, "'c' of 'net' is void");
    CHECK_ERROR(dp_grads_used(par, used, PARAMS + 1), DP_ERR_STATE, is_void);
    CHECK_OK(dp_params_edit(par, 1, &data, NULL));
}

TEST_BACKENDS(a_failed_step_does_not_reach_the_next)
{
    for (int face = 0; face < FACES; face++)
        for (trouble kind = IN_BACKWARD; kind <= AT_ONCE; kind++) {
            script how = ones;
            dp_module *net = told_net(ctx, &how), *par = faced(net, face);
            dp_optim *optim = optim_of(par, (dp_optim_config){0});
            CHECK_OK(step(par, optim, 0));
            how.trouble = kind;
            how.rank = face == PLAIN ? 0 : 1;
            CHECK_ERROR(step(par, optim, 0), DP_ERR_USER, "no backward today");
            how.trouble = NONE;
            check_void(par, optim);
            check_params(net, -1);
            CHECK_OK(dp_zero_grad(net)); /* the memory's: whoever is asked */
            CHECK_OK(step(par, optim, 0));
            CHECK_OK(step(par, optim, 0));
            check_params(net, -3);
        }
}

/* What failed is told by the memory, not by the module that was asked. */
TEST_BACKENDS(void_gradients_are_seen_from_above_and_below)
{
    script how = ones;
    dp_module *net = told_net(ctx, &how), *outer = NULL, *beside = told_net(ctx, &ones);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "out", .children = &net, .child_count = 1}, &outer));
    dp_optim *optim = optim_of(outer, (dp_optim_config){0});
    how.trouble = IN_BACKWARD;
    CHECK_ERROR(forward_and_backward(net, 1, false), DP_ERR_USER, "no backward");
    CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE, "'net.a' of 'out' is void");
    CHECK_OK(forward_and_backward(beside, 1, false));
    CHECK_OK(forward_and_backward(beside, 1, false));
    how.trouble = NONE;
    CHECK_ERROR(forward_and_backward(net, 1, false), DP_ERR_STATE, is_void);
    CHECK_OK(dp_zero_grad(outer));
    CHECK_OK(forward_and_backward(net, 1, false));
    CHECK_OK(dp_optim_step(optim));
    check_params(net, -1);
}

/* A failed forward has added nothing. */
TEST_BACKENDS(a_failed_forward_leaves_gradients)
{
    script how = ones;
    dp_module *net = told_net(ctx, &how);
    dp_optim *optim = optim_of(net, (dp_optim_config){.accumulate = 2});
    CHECK_OK(step(net, optim, 0));
    how.trouble = IN_FORWARD;
    CHECK_ERROR(step(net, optim, 0), DP_ERR_USER, "no forward");
    how.trouble = NONE;
    CHECK_OK(step(net, optim, 0));
    check_params(net, -1);
}

/* mean_grads zeroes by itself, but for what is to be added to. */
TEST_BACKENDS(mean_grads_after_a_failure)
{
    script how = means[0];
    dp_module *net = told_net(ctx, &how);
    how.trouble = IN_BACKWARD;
    CHECK_ERROR(forward_and_backward(net, 1, false), DP_ERR_USER, "no backward");
    how.trouble = NONE;
    CHECK_OK(forward_and_backward(net, 1, true));
    how.trouble = IN_BACKWARD;
    CHECK_ERROR(forward_and_backward(net, 1, true), DP_ERR_USER, "no backward");
    how.trouble = NONE;
    CHECK_ERROR(forward_and_backward(net, 1, true), DP_ERR_STATE, is_void);
    CHECK_OK(dp_zero_grad(net));
    CHECK_OK(forward_and_backward(net, 1, true));
    CHECK_OK(forward_and_backward(net, 1, false));
    CHECK(is_used(net, 0));
}

static void one_process_fails(meeting *m)
{
    script how = ones;
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_module *net = told_net(ctx, &how), *par = faced(net, DISTRIBUTED);
    dp_optim *optim = optim_of(par, (dp_optim_config){0});
    how.rank = 2;
    for (trouble kind = IN_FORWARD; kind <= AT_ONCE; kind++) {
        how.trouble = kind;
        CHECK_ERROR(step(par, optim, 0), DP_ERR_USER, "today");
        how.trouble = NONE;
        CHECK_ERROR(step(par, optim, 0), DP_ERR_STATE, is_void);
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(step(par, optim, 0));
    }
    check_params(net, -3);
    dp_close(ctx);
}

TEST(a_failed_step_does_not_reach_the_next_in_any_process)
{
    in_processes(2, one_process_fails);
    in_processes_on(toy_device(), 2, one_process_fails);
}

/* ---- two who add ----------------------------------------------------------------------------- */

/* What a backward without ranks adds to, or adds, would be part of what ranks reduce. */
static void two_add(dp_ctx *ctx)
{
    static const int faces[] = {PLAIN, PARALLEL};
    const char *says = "has added to the gradient of 'a' of 'net': call dp_zero_grad first";
    for (int i = 0; i < 2; i++) {
        dp_module *net = told_net(ctx, &ones), *ranks = faced(net, DISTRIBUTED);
        dp_module *own = faced(net, info_here(ctx).local_count > 1 ? faces[i] : PLAIN);
        CHECK_OK(forward_and_backward(own, 1, false));
        CHECK_OK(forward_and_backward(own, 1, false));
        CHECK_ERROR(forward_and_backward(ranks, 1, false), DP_ERR_STATE, says);
        CHECK_OK(dp_zero_grad(net));
        CHECK_OK(forward_and_backward(ranks, 1, false));
        CHECK_ERROR(forward_and_backward(own, 1, false), DP_ERR_STATE, says);
        CHECK_OK(dp_zero_grad(net));
        CHECK_OK(forward_and_backward(own, 1, false));
        check_grad(net, own == net ? 1 : 2);
    }
}

/* Also if nobody knew that ranks would come. */
TEST_BACKENDS(ranks_do_not_reduce_what_was_there_before)
{
    const char *says = "a backward without this wrapper, or an edit with out_grad before it was "
                       "made, has added to the gradient of 'a' of 'net': call dp_zero_grad first";
    for (int edits = 0; edits < 2; edits++) {
        dp_module *net = told_net(ctx, &ones), *ranks;
        dp_tensor data, grad;
        CHECK_OK(edits ? dp_params_edit(net, 0, &data, &grad)
                       : forward_and_backward(net, 1, false));
        ranks = faced(net, DISTRIBUTED);
        CHECK_ERROR(forward_and_backward(ranks, 1, false), DP_ERR_STATE, says);
        CHECK_OK(dp_zero_grad(net));
        CHECK_OK(forward_and_backward(ranks, 1, false));
        check_grad(net, 1);
    }
}

TEST_BACKENDS(ranks_do_not_reduce_what_others_add)
{
    two_add(ctx);
}

/* Ranks that step by what each of them has would come apart. */
static int rank_count(dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info.rank_count;
}

static void step_by_what_is_ones_own(dp_ctx *ctx, int face, bool past_the_wrapper)
{
    dp_module *net = told_net(ctx, &ones), *par = faced(net, face);
    dp_module *runs = past_the_wrapper ? net : par;
    dp_optim *optim = optim_of(par, (dp_optim_config){0});
    CHECK_OK(forward_and_backward(runs, 1, !past_the_wrapper));
    if (face == DISTRIBUTED && rank_count(ctx) > 1) {
        CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE,
                    "'a' of 'net' differs from rank to rank, because passes had no_sync");
        check_params(net, 0);
        CHECK_OK(past_the_wrapper ? dp_zero_grad(par) : DP_OK);
        CHECK_OK(forward_and_backward(par, 1, false));
    }
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(runs, 1, !past_the_wrapper));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(dp_optim_step(optim));
}

TEST_BACKENDS(unreduced_gradients_are_not_stepped)
{
    for (int face = 0; face < 2 * FACES; face++)
        step_by_what_is_ones_own(ctx, face / 2, face % 2 == 1);
}

TEST(one_rank_steps_by_what_it_has)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    step_by_what_is_ones_own(ctx, DISTRIBUTED, false);
    step_by_what_is_ones_own(ctx, DISTRIBUTED, true);
    dp_close(ctx);
}

/* ---- a child that is reduced, in a module that is not ---------------------------------------- */

typedef struct nest { /* the parent's pass */
    dp_pass *inner;
} nest;

typedef struct outer_how { /* its state */
    const char *child;
    bool means; /* it has mean_grads, and the child's gradient is its own */
} outer_how;

static dp_status outer_forward(dp_call *call)
{
    nest *own = dp_scope_alloc(call->scope, sizeof *own);
    if (own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    call->saved = own;
    return dp_call_child(call, ((const outer_how *)call->state)->child, "forward", call->args,
                         call->kwargs, &call->out, &own->inner);
}

static dp_status outer_backward(dp_call *call)
{
    const nest *own = call->saved;
    DP_TRY(add_or_write(call, 0, false, 1));
    return dp_backward(own->inner,
                       ((const outer_how *)call->state)->means ? call->grad : dp_float(1), NULL);
}

static dp_module *around(dp_ctx *ctx, dp_module *child, const outer_how *how)
{
    static const dp_method methods[] = {{"forward", outer_forward}, {"backward", outer_backward}};
    static const dp_param_config own = {.name = "own"};
    dp_module *out = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "out",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &own,
                                                  .param_count = 1,
                                                  .children = &child,
                                                  .child_count = 1,
                                                  .state = how,
                                                  .mean_grads = how->means},
                              &out));
    return out;
}

/* A net whose output has as many rows as x; the gradient of "a" is the sum of theirs. */
static dp_status rows_forward(dp_call *call)
{
    const dp_tensor *x;
    dp_tensor out;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, x->shape, &out));
    call->out = dp_of(call->scope, &out);
    return dp_fill(call->ctx, &out, dp_int(0));
}

static dp_status rows_backward(dp_call *call)
{
    float rows[RANKS], sum = 0;
    dp_tensor grad;
    DP_TRY(dp_call_out_grad(call, NULL, &grad));
    DP_TRY(dp_read(call->ctx, &grad, rows, (size_t)grad.shape[0] * sizeof *rows));
    for (int64_t r = 0; r < grad.shape[0]; r++)
        sum += rows[r];
    return add_or_write(call, 0, false, sum);
}

static dp_module *rows_net(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", rows_forward}, {"backward", rows_backward}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = told_params,
                                                  .param_count = 1},
                              &net));
    return net;
}

/* The mean of several rows too: each has its share of it. */
TEST_BACKENDS(means_of_rows_are_passed_on_to_children)
{
    static const outer_how means_itself = {"net", true};
    for (int face = 0; face < FACES; face++) {
        dp_module *net = rows_net(ctx), *out = around(ctx, net, &means_itself);
        dp_module *par = faced(out, face);
        dp_optim *optim = optim_of(par, (dp_optim_config){0});
        dp_tensor grad;
        float got[A];
        CHECK_OK(forward_and_backward(par, 4, false));
        CHECK_OK(dp_owner_grad(net, 0, 0, &grad));
        CHECK_OK(dp_read(ctx, &grad, got, sizeof got));
        CHECK_F64(got[0], 4, 1e-6);
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(step(par, optim, 0));
        check_param(net, 0, -1);
    }
}

/* What a backward with mean_grads is given is the gradient of its own mean, which it may pass on:
   the rest is done to all that the tree has written. */
TEST_BACKENDS(mean_grads_are_passed_on_to_children)
{
    static const outer_how means_itself = {"net", true};
    for (int face = 0; face < FACES; face++) {
        dp_module *net = told_net(ctx, &ones), *out = around(ctx, net, &means_itself);
        dp_module *par = faced(out, face);
        dp_optim *optim = optim_of(par, (dp_optim_config){.accumulate = 2});
        for (int i = 0; i < 2; i++)
            CHECK_OK(step(par, optim, 0));
        check_params(net, -1);
        check_param(out, 0, -1);
        CHECK_OK(forward_and_backward(par, 3, false));
        check_grad(net, 3);
    }
}

/* Plain, each adds to what is its own; torn by either, all of it is. */
TEST_BACKENDS(a_wrapper_inside_a_plain_module)
{
    static const outer_how ranks = {"distributed", false}, plain = {"net", false};
    script how = ones;
    dp_module *net = told_net(ctx, &how);
    dp_module *outer = around(ctx, faced(net, DISTRIBUTED), &ranks);
    dp_optim *optim = optim_of(outer, (dp_optim_config){0});
    for (int i = 0; i < 2; i++) {
        CHECK_OK(forward_and_backward(outer, 1, false));
        CHECK_OK(dp_optim_step(optim));
        check_params(net, -1 - i);
    }
    how.trouble = IN_BACKWARD;
    CHECK_ERROR(forward_and_backward(outer, 1, false), DP_ERR_USER, "no backward");
    how.trouble = NONE;
    CHECK_ERROR(forward_and_backward(outer, 1, false), DP_ERR_STATE, "is void");
    CHECK_OK(dp_zero_grad(outer));
    CHECK_OK(forward_and_backward(outer, 1, false));
    /* the same, with replicas of the whole */
    dp_module *par = faced(around(ctx, told_net(ctx, &ones), &plain), PARALLEL);
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(is_used(par, 0) && is_used(par, 1));
}

static void two_add_here(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    two_add(ctx);
    dp_close(ctx);
}

TEST(ranks_do_not_reduce_what_others_add_in_processes)
{
    in_processes(2, two_add_here);
}

/* ---- a step that fails before it is reduced -----------------------------------------------------
   The others do not know, and go on: who has failed makes the same step again.                   */

enum { AGAIN, EMPTY, SKIPPED };

static int after_failure;
static trouble first_trouble;

static dp_status empty_step(dp_module *module, dp_optim *optim)
{
    dp_scope *scope = dp_scope_begin(dp_module_ctx(module));
    dp_value log;
    dp_status status = dp_train_step(module, scope, dp_none(), optim, &log);
    dp_scope_end(scope);
    return status;
}

static void mend_a_step(dp_module *par, dp_optim *optim)
{
    const char *again = "failed on rank 1 only, and other processes have made it: repeat it";
    for (int i = 0; i < 2 && after_failure == SKIPPED; i++)
        CHECK_ERROR(step(par, optim, 8), DP_ERR_STATE, again);
    if (first_trouble == IN_BACKWARD && after_failure != EMPTY) {
        CHECK_ERROR(step(par, optim, 7), DP_ERR_STATE, is_void);
        CHECK_ERROR(step(par, optim, 8), DP_ERR_STATE, again);
    }
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(after_failure == EMPTY ? empty_step(par, optim) : step(par, optim, 7));
}

static void one_fails_on_its_own(meeting *m)
{
    script how = ones;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = told_net(ctx, &how), *par = NULL;
    CHECK_OK(dp_distributed(
        net,
        &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES, .unused_params = DP_UNUSED_FOUND},
        &par));
    dp_optim *optim = optim_of(par, (dp_optim_config){.accumulate = 2});
    for (int i = 0; i < 2; i++) {
        how.trouble = m->process == 1 ? first_trouble : NONE;
        if (m->process == 1)
            CHECK_ERROR(step(par, optim, 7), DP_ERR_USER, "today");
        how.trouble = NONE;
        if (m->process == 1)
            mend_a_step(par, optim);
        else
            CHECK_OK(step(par, optim, 7));
        CHECK_OK(step(par, optim, 9));
        check_params(net, -1 - i);
    }
    dp_close(ctx);
}

TEST(a_step_that_failed_on_one_rank_alone_is_made_again)
{
    for (first_trouble = IN_FORWARD; first_trouble <= IN_BACKWARD; first_trouble++)
        for (after_failure = AGAIN; after_failure <= SKIPPED; after_failure++)
            in_processes(2, one_fails_on_its_own);
}

/* Whoever goes on with void gradients fails for all when they are reduced. */
static void one_goes_on(meeting *m)
{
    script how = ones;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = told_net(ctx, &how), *par = faced(net, DISTRIBUTED);
    how.trouble = m->process == 1 ? IN_BACKWARD : NONE;
    CHECK_STATUS(forward_and_backward(par, 1, true), m->process == 1 ? DP_ERR_USER : DP_OK);
    how.trouble = NONE;
    CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE, is_void);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 3, false));
    check_grad(net, 3);
    dp_close(ctx);
}

TEST(void_gradients_are_reduced_by_nobody)
{
    in_processes(2, one_goes_on);
}

/* ---- parameters that change between forward and backward ------------------------------------- */

static dp_pass *forward(dp_module *par, dp_scope *scope)
{
    dp_value out;
    dp_pass *pass = NULL;
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), a_part_each(dp_module_ctx(par), scope),
                       NULL, &out, &pass));
    return pass;
}

static const char *change(dp_module *net, int how)
{
    static const float zeros[B];
    dp_tensor data, grad;
    switch (how) {
    case 0:
        CHECK_OK(dp_params_edit(net, 1, &data, NULL));
        return "'b' of 'net' was edited after the forward";
    case 1:
        CHECK_OK(dp_params_write(net, 0, zeros, A * sizeof *zeros));
        return "'a' of 'net' was edited";
    case 2:
        CHECK_OK(dp_owner_edit(net, 0, 2, &data, &grad));
        return "'c' of 'net' was edited";
    case 3:
        CHECK_OK(dp_params_write(net, 3, zeros, sizeof *zeros));
        return "'s' of 'net' was edited";
    case 4:
        CHECK_OK(dp_params_changed(net));
        return "'a' of 'net' was edited";
    default:
        return NULL;
    }
}

TEST_BACKENDS(editing_between_forward_and_backward_is_refused)
{
    for (int face = 0; face < FACES; face++)
        for (int how = 0; how < 5; how++) {
            dp_module *net = told_net(ctx, &ones), *par = faced(net, face);
            dp_module *other = told_net(ctx, &ones);
            dp_pass *pass = forward(par, scope), *unspoilt = forward(other, scope);
            const char *says = change(net, how);
            CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE, says);
            CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE, says);
            CHECK_OK(dp_backward(unspoilt, dp_float(1), NULL));
            pass = forward(par, scope); /* nothing has happened: the next one is as ever */
            CHECK_OK(dp_backward(pass, dp_float(1), NULL));
            CHECK(is_used(par, 0));
        }
}

/* An optimizer's step is an edit, whoever made it. */
TEST_BACKENDS(a_pass_is_over_once_its_net_has_been_stepped)
{
    dp_module *net = told_net(ctx, &ones), *par = faced(net, PARALLEL), *outer = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "out", .children = &net, .child_count = 1}, &outer));
    dp_optim *optim = optim_of(outer, (dp_optim_config){0});
    dp_pass *first = forward(par, scope), *second = forward(par, scope);
    CHECK_OK(dp_backward(second, dp_float(1), NULL));
    CHECK_OK(dp_optim_step(optim));
    CHECK_ERROR(dp_backward(first, dp_float(1), NULL), DP_ERR_STATE, "was edited");
    check_params(net, -2);
}

static void one_edits(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = told_net(ctx, &ones), *par = faced(net, DISTRIBUTED);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass = forward(par, scope);
    dp_tensor data;
    if (m->process == 1)
        CHECK_OK(dp_params_edit(net, 1, &data, NULL));
    CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE, "'b' of 'net' was edited");
    CHECK_OK(dp_zero_grad(par));
    pass = forward(par, scope);
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(an_edit_in_one_process_is_known_to_all)
{
    in_processes(2, one_edits);
}

/* ---- parameters without a gradient ----------------------------------------------------------- */

static void check_who_is_used(dp_module *module, bool a, bool b, bool c)
{
    CHECK_INT(is_used(module, 0), a);
    CHECK_INT(is_used(module, 1), b);
    CHECK_INT(is_used(module, 2), c);
    CHECK_INT(is_used(module, 3), false);
}

TEST_BACKENDS(gradients_know_who_has_asked_for_them)
{
    dp_tensor data, grad;
    for (int face = 0; face < FACES; face++) {
        script how = ones;
        dp_module *net = told_net(ctx, &how), *par = faced(net, face);
        how.unused[1] = true;
        check_who_is_used(par, false, false, false);
        CHECK_OK(forward_and_backward(par, 1, false));
        check_who_is_used(par, true, false, true);
        CHECK_OK(dp_params_edit(net, 1, &data, NULL));
        check_who_is_used(net, true, false, true);
        CHECK_OK(dp_params_edit(net, 1, &data, &grad));
        check_who_is_used(net, true, true, true);
        CHECK_OK(dp_zero_grad(par));
        check_who_is_used(par, false, false, false);
        CHECK_OK(dp_owner_grad(par, 0, 0, &grad));
        CHECK(grad.read_only);
        CHECK_INT(dp_tensor_count(&grad), A);
        CHECK_OK(dp_owner_edit(par, 0, 0, &data, &grad));
        check_who_is_used(par, true, false, false);
        CHECK_OK(dp_owner_grad(par, 0, 3, &grad));
        CHECK_INT(dp_tensor_count(&grad), 0);
        CHECK_ERROR(dp_owner_grad(par, 9, 0, &grad), DP_ERR_INVALID, "owner 9");
    }
}

TEST_BACKENDS(gradients_in_memory_of_yours_always_count)
{
    dp_module *net = half_given(ctx, scope, 1);
    CHECK(is_used(net, 0) && !is_used(net, 1));
    CHECK_OK(dp_zero_grad(net));
    CHECK(is_used(net, 0));
}

/* What AdamW makes of a gradient of 1 in each of `steps` steps. */
static double adamw_of_ones(int steps, double lr, double decay)
{
    double w = 0;
    for (int i = 0; i < steps; i++)
        w = w * (1 - lr * decay) - lr / (1 + 1e-8);
    return w;
}

/* b gets its first gradient after three steps: then it is as in its first step. */
static void step_late(dp_module *net, dp_module *par, script *how, bool sharded)
{
    const dp_optim_config config = {
        .rule = dp_adamw(), .hyper = {.lr = 0.5, .weight_decay = 0.1}, .sharded = sharded};
    float one[B] = {1, 1, 1};
    dp_optim *optim = optim_of(par, config), *other = NULL;
    dp_scope *scope = dp_scope_begin(dp_module_ctx(net));
    dp_value saved;
    how->unused[1] = true;
    CHECK_OK(dp_params_write(net, 1, one, sizeof one));
    for (int i = 0; i < 3; i++)
        CHECK_OK(step(par, optim, 0));
    check_param(net, 0, adamw_of_ones(3, 0.5, 0.1));
    check_param(net, 1, 1); /* no decay either */
    CHECK_OK(dp_params_write(net, 1, (float[B]){0}, sizeof one));
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    other = optim_of(par, config);
    CHECK_OK(dp_optim_load(other, saved));
    how->unused[1] = false;
    for (int i = 0; i < 2; i++)
        CHECK_OK(step(par, other, 0));
    check_param(net, 0, adamw_of_ones(5, 0.5, 0.1));
    check_param(net, 1, adamw_of_ones(2, 0.5, 0.1));
    check_param(net, 2, adamw_of_ones(5, 0.5, 0.1));
    dp_scope_end(scope);
    dp_optim_destroy(optim);
    dp_optim_destroy(other);
}

TEST_BACKENDS(parameters_that_nobody_used_are_not_stepped)
{
    for (int face = 0; face < FACES; face++) {
        script how = ones;
        dp_module *net = told_net(ctx, &how);
        step_late(net, faced(net, face), &how, false);
    }
}

/* One rank alone uses it: all step it. */
static void one_uses(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    for (int sharded = 0; sharded < 2; sharded++) {
        script how = ones;
        dp_module *net = told_net(ctx, &how), *par = faced(net, DISTRIBUTED);
        dp_optim *optim = optim_of(par, (dp_optim_config){.rule = dp_adamw(), .sharded = sharded});
        how.unused[0] = true;
        how.unused[2] = m->process == 0;
        CHECK_OK(step(par, optim, 0));
        check_param(net, 0, 0);
        check_param(net, 1, -1);
        check_param(net, 2, -1);
        how = ones;
        net = told_net(ctx, &how);
        step_late(net, faced(net, DISTRIBUTED), &how, sharded);
    }
    dp_close(ctx);
}

TEST(parameters_that_one_rank_used_are_stepped_by_all)
{
    in_processes(3, one_uses);
}

/* SGD's momentum begins with the first gradient. */
TEST_BACKENDS(a_momentum_begins_with_the_first_gradient)
{
    script how = ones;
    dp_module *net = told_net(ctx, &how);
    dp_optim *optim =
        optim_of(net, (dp_optim_config){.hyper = {.momentum = 0.5, .dampening = 0.5}});
    how.unused[2] = true;
    CHECK_OK(step(net, optim, 0));
    how.unused[2] = false;
    CHECK_OK(step(net, optim, 0));
    check_param(net, 0, -2);
    check_param(net, 2, -1);
    CHECK_OK(step(net, optim, 0));
    check_param(net, 2, -2);
}

TEST(counts_of_steps_that_cannot_be_are_refused)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    script how = ones;
    dp_module *net = told_net(ctx, &how);
    dp_optim *optim = optim_of(net, (dp_optim_config){0});
    how.unused[1] = true;
    CHECK_OK(step(net, optim, 0));
    static const int64_t wrong[][3] = {{-1, 0, 1}, {1, 2, 1}};
    for (int i = 0; i < 4; i++) {
        dp_value saved, counts = dp_int(3);
        CHECK_OK(dp_optim_save(optim, scope, &saved));
        CHECK_INT(dp_get(dp_get(saved, "param_steps"), "b").as.i, 0);
        CHECK_INT(dp_get(dp_get(saved, "param_steps"), "a").as.i, 1);
        if (i < 2)
            counts = DP_DICT(scope, {"a", dp_int(wrong[i][0])}, {"b", dp_int(wrong[i][1])},
                             {"c", dp_int(wrong[i][2])});
        if (i == 2)
            counts = DP_DICT(scope, {"a", dp_int(1)}, {"b", dp_int(1)});
        dp_value all = DP_DICT(scope, {"rule", dp_get(saved, "rule")},
                               {"done", dp_get(saved, "done")}, {"steps", dp_get(saved, "steps")},
                               {"skipped", dp_get(saved, "skipped")},
                               {"good", dp_get(saved, "good")}, {"scale", dp_get(saved, "scale")},
                               {"state", dp_get(saved, "state")}, {"param_steps", counts});
        CHECK_ERROR(dp_optim_load(optim, all), DP_ERR_MISMATCH, "'param_steps' of '");
    }
    dp_close(ctx);
}
