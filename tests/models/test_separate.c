/* test_separate.c - a module whose children are on all ranks, each by itself. */

#include <stdio.h>
#include "dp_train.h"
#include "examples/custom_device.h"
#include "ranked.h"

enum { LEFT, EYE, RIGHT, CHILDREN };

static const plan how;
static int devices_each = 1;
static bool outputs_are_lists; /* of the wrapped children */
static dp_module *to_destroy;

/* ---- a pair of nets, and an eye that is not trained ------------------------------------------ */

static dp_status eye_forward(dp_call *call)
{
    call->out = dp_float(7);
    return DP_OK;
}

static dp_status train_child(dp_call *call, const char *child, double k)
{
    dp_pass *pass = NULL;
    dp_value out;
    DP_TRY(dp_call_child(call, child, "forward", call->args, call->kwargs, &out, &pass));
    outputs_are_lists = out.kind == DP_LIST;
    return dp_backward(pass, dp_float(k), NULL);
}

static dp_status pair_step(dp_call *call)
{
    dp_value seen;
    DP_TRY(dp_call_child(call, "eye", "forward", call->args, call->kwargs, &seen, NULL));
    CHECK_F64(seen.as.f, 7, 0); /* of one device */
    DP_TRY(train_child(call, "right", 1));
    DP_TRY(train_child(call, "left", 10));
    DP_TRY(train_child(call, "right", 2));
    if (to_destroy != NULL)
        CHECK_ERROR(dp_module_destroy(to_destroy), DP_ERR_STATE,
                    "in use by method 'pair.train_step'");
    call->out = dp_int(call->local_rank);
    return DP_OK;
}

static dp_status pair_half(dp_call *call)
{
    call->out = dp_none();
    return train_child(call, "left", 10);
}

/* Only what the first process does: nobody else need come. */
static dp_status pair_look(dp_call *call)
{
    return dp_call_child(call, "left", "forward", call->args, call->kwargs, &call->out, NULL);
}

static const dp_method pair_methods[] = {
    {"train_step", pair_step}, {"val_step", pair_look}, {"half_step", pair_half}};
static const dp_method eye_methods[] = {{"forward", eye_forward}};
static const dp_param_config own_param = {.name = "own", .dtype = DP_F32};

typedef struct pair {
    dp_module *children[CHILDREN], *module;
} pair;

static dp_status make_pair(dp_ctx *ctx, const dp_param_config *left_params, pair *out)
{
    static const char *const names[] = {"left", "eye", "right"};
    static const dp_param_config eye_param = {
        .name = "w", .dtype = DP_F32, .ndim = 1, .shape = {W}, .frozen = true};
    for (int i = 0; i < CHILDREN; i++) {
        dp_module_config config = {.name = names[i],
                                   .methods = i == EYE ? eye_methods : net_methods,
                                   .method_count = i == EYE ? 1 : 2,
                                   .params = i == EYE    ? &eye_param
                                             : i == LEFT ? left_params
                                                         : net_params,
                                   .param_count = i == EYE ? 1 : 3,
                                   .state = &how};
        DP_TRY(dp_module_create(ctx, &config, &out->children[i]));
    }
    return dp_module_create(ctx,
                            &(dp_module_config){.name = "pair",
                                                .methods = pair_methods,
                                                .method_count = 3,
                                                .params = &own_param,
                                                .param_count = 1,
                                                .children = out->children,
                                                .child_count = CHILDREN},
                            &out->module);
}

static pair a_pair(dp_ctx *ctx)
{
    pair made;
    CHECK_OK(make_pair(ctx, net_params, &made));
    return made;
}

static dp_status step(dp_module *module, const char *method, bool no_sync)
{
    dp_ctx *ctx = dp_module_ctx(module);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass; /* else there are no gradients inside */
    dp_value out;
    dp_status status = dp_invoke(module, scope, method, dp_none(), a_part_each(ctx, scope),
                                 &(dp_pass_config){.no_sync = no_sync}, &out, &pass);
    dp_scope_end(scope);
    return status;
}

static void check_pair(const pair *p, double k)
{
    check_grads(p->children[LEFT], 10 * k, 10 * k);
    check_grads(p->children[RIGHT], 3 * k, 3 * k);
}

/* ---- what it does ---------------------------------------------------------------------------- */

static void train_pair(dp_ctx *ctx)
{
    static char text[4000];
    double mean = (info_here(ctx).rank_count + 1) / 2.0, own = info_here(ctx).rank_first + 1;
    float value = (float)own;
    pair p = a_pair(ctx);
    dp_module *par;
    size_t param;
    for (int i = 0; i < CHILDREN; i++) {
        float w[W] = {(float)own, (float)own, (float)own};
        CHECK_OK(dp_params_write(p.children[i], 0, w, sizeof w));
    }
    CHECK_OK(dp_module_find(p.module, "own", &param));
    CHECK_OK(dp_params_write(p.module, param, &value, sizeof value));
    CHECK_OK(dp_separate_distributed(p.module, NULL, &par));
    CHECK_F64(element(p.children[LEFT], 0, false, 0), 1, 0); /* of rank 0 */
    CHECK_F64(element(p.children[RIGHT], 0, false, 0), 1, 0);
    CHECK_F64(element(p.children[EYE], 0, false, 0), own, 0); /* is left alone */
    CHECK_F64(element(p.module, param, false, 0), own, 0);
    CHECK(dp_is_wrapper(par) && dp_unwrap(par) == p.module);
    CHECK_STR(dp_module_name(par), "separate_distributed");
    CHECK_OK(step(par, "train_step", false));
    CHECK_INT(outputs_are_lists, info_here(ctx).local_count > 1);
    check_pair(&p, mean);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(step(par, "train_step", true)); /* of both children */
    check_pair(&p, own);
    CHECK_OK(step(par, "train_step", false));
    check_pair(&p, 2 * mean);
    if (info_here(ctx).process == 0) /* an evaluation meets nobody */
        CHECK_OK(step(par, "val_step", false));
    CHECK_OK(dp_zero_grad(p.module));
    CHECK_OK(step(p.module, "train_step", false)); /* without the wrapper each is alone */
    CHECK(!outputs_are_lists);
    check_pair(&p, own);
    CHECK(dp_report_text(par, text, sizeof text) < sizeof text);
    CHECK(strstr(text, "\n'left': 292 bytes") != NULL);
    CHECK(strstr(text, "\n'right': 292 bytes") != NULL && strstr(text, "'eye'") == NULL);
    CHECK(strstr(text, "of reduced passes: 2\n") != NULL); /* of left */
    CHECK(strstr(text, "of reduced passes: 4\n") != NULL); /* of right */
    to_destroy = par;
    CHECK_OK(step(par, "train_step", true));
    to_destroy = NULL;
    CHECK_ERROR(dp_module_destroy(p.module), DP_ERR_STATE, "is wrapped");
    CHECK_OK(dp_module_destroy(par)); /* with the children's */
    CHECK_OK(dp_separate_distributed(p.module, &(dp_distributed_config){.name = "again"}, &par));
    CHECK_STR(dp_module_name(par), "again");
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_module_destroy(p.module));
    dp_close(ctx);
}

static void train_over_shm(meeting *m)
{
    train_pair(open_over_shm(m, devices_each, 0));
}

TEST(children_are_trained_on_all_ranks)
{
    train_pair(open_here(1));
    train_pair(open_here(3));
    train_pair(open_on(toy_device(), 2));
    for (devices_each = 1; devices_each < 3; devices_each++)
        in_processes(2, train_over_shm);
    in_processes_on(toy_device(), 2, train_over_shm);
}

/* It may be a child itself. */
static dp_status trainer_step(dp_call *call)
{
    dp_pass *pass;
    return dp_call_child(call, "pair", "train_step", call->args, call->kwargs, &call->out, &pass);
}

TEST(a_parent_of_what_is_separate)
{
    static const dp_method methods[] = {{"train_step", trainer_step}};
    dp_ctx *ctx = open_here(2);
    pair p = a_pair(ctx);
    dp_module *par, *trainer, *other;
    CHECK_OK(dp_separate_distributed(p.module, &(dp_distributed_config){.name = "pair"}, &par));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "trainer",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .children = &par,
                                                  .child_count = 1},
                              &trainer));
    CHECK_OK(step(trainer, "train_step", false));
    check_pair(&p, 1.5);
    CHECK_OK(dp_zero_grad(trainer));
    CHECK_OK(step(trainer, "train_step", true));
    check_pair(&p, 1);
    CHECK_OK(dp_params_compare(trainer));
    CHECK_ERROR(dp_buffers_compare(trainer), DP_ERR_MISMATCH,
                "buffer 'pair.left.seen' f32 [] of hash");
    CHECK_ERROR(dp_data_parallel(trainer, NULL, &other), DP_ERR_UNSUPPORTED, "'pair' reduces");
    dp_close(ctx);
}

/* ---- what is ignored ------------------------------------------------------------------------- */

static void ignore_some(meeting *m)
{
    static const char *const names[] = {"left.w", "right.w", "right.v", "right.seen", "own"};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    pair p = a_pair(ctx);
    dp_module *par;
    static char text[4000];
    float w[W] = {(float)m->process};
    CHECK_OK(dp_params_write(p.children[LEFT], 0, w, sizeof w));
    CHECK_OK(dp_params_write(p.children[RIGHT], 0, w, sizeof w));
    dp_distributed_config config = {.ignored = names, .ignored_count = 5};
    CHECK_OK(dp_separate_distributed(p.module, &config, &par));
    CHECK_F64(element(p.children[LEFT], 0, false, 0), m->process, 0);
    CHECK_OK(step(par, "train_step", false));
    check_grads(p.children[LEFT], 10 * (m->process + 1), 15);
    check_grads(p.children[RIGHT], 3 * (m->process + 1), 3 * (m->process + 1));
    CHECK(dp_report_text(par, text, sizeof text) < sizeof text);
    CHECK(strstr(text, "\n'left': 280 bytes") != NULL && strstr(text, "'right'") == NULL);
    CHECK_ERROR(dp_params_compare(par), DP_ERR_MISMATCH, "'right.w'"); /* which is not wrapped */
    dp_close(ctx);
}

/* A child of which everything is ignored is left alone. */
TEST(names_of_what_children_keep)
{
    in_processes(2, ignore_some);
}

/* ---- what cannot be separated ---------------------------------------------------------------- */

TEST(wrong_modules_are_not_separated)
{
    dp_ctx *ctx = open_here(2);
    pair p = a_pair(ctx);
    dp_module *par = NULL, *other = NULL, *lone;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    dp_distributed_config config = {.ignored_count = 1};
    CHECK_ERROR(dp_separate_distributed(NULL, NULL, &par), DP_ERR_INVALID, "module is NULL");
    CHECK_ERROR(dp_separate_distributed(p.module, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_separate_distributed(p.module, &config, &par), DP_ERR_INVALID,
                "dp_separate_distributed: ignored is NULL");
    config.ignored = (const char *const[]){"left.x"};
    CHECK_ERROR(dp_separate_distributed(p.module, &config, &par), DP_ERR_INVALID,
                "'pair' has no parameter 'left.x'");
    config = (dp_distributed_config){.reduction = (dp_reduction)9};
    CHECK_ERROR(dp_separate_distributed(p.module, &config, &par), DP_ERR_INVALID,
                "dp_separate_distributed: reduction is 9");
    CHECK_ERROR(dp_separate_distributed(p.children[LEFT], NULL, &par), DP_ERR_INVALID,
                "'left' has no child with a gradient to reduce");
    CHECK(par == NULL);
    CHECK_OK(dp_separate_distributed(p.module, NULL, &par));
    CHECK_ERROR(dp_separate_distributed(par, NULL, &other), DP_ERR_INVALID,
                "'separate_distributed' is a wrapper");
    CHECK_ERROR(dp_data_parallel(par, NULL, &other), DP_ERR_UNSUPPORTED,
                "it cannot be wrapped again");
    CHECK_ERROR(dp_train_step(par, scope, a_part_each(ctx, scope), NULL, &log), DP_ERR_UNSUPPORTED,
                "children of 'pair' are trained by its own methods");
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "lone", .params = &own_param, .param_count = 1}, &lone));
    CHECK_ERROR(dp_separate_distributed(lone, NULL, &other), DP_ERR_INVALID, "'lone' has no child");
    CHECK(other == NULL);
    dp_close(ctx);
}

/* One memory in two children, unless it is left alone. */
TEST(children_that_are_tied)
{
    static const char *const ignored[] = {"right.w"};
    static const char *const names[] = {"left", "right"};
    static const dp_param_config tie = {
        .name = "right.w", .dtype = DP_F32, .ndim = 1, .shape = {W}, .same_as = "left.w"};
    const dp_distributed_config config = {.ignored = ignored, .ignored_count = 1};
    dp_ctx *ctx = open_here(2);
    dp_module *nets[2], *both, *par = NULL;
    for (int i = 0; i < 2; i++)
        nets[i] = make_net_of(ctx, (dp_module_config){.name = names[i], .state = &how});
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "pair", .params = &tie, .param_count = 1, .children = nets, .child_count = 2},
        &both));
    CHECK_ERROR(dp_separate_distributed(both, NULL, &par), DP_ERR_UNSUPPORTED,
                "'left.w' and 'right.w' are tied, but belong to two children");
    CHECK(par == NULL);
    CHECK_OK(dp_separate_distributed(both, &config, &par)); /* by whichever of its names */
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

/* ---- ranks that differ ----------------------------------------------------------------------- */

static void one_is_odd(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_param_config params[3];
    dp_module *par = NULL;
    for (int kind = 0; kind < 3; kind++) {
        pair p;
        dp_distributed_config config = {.name = NULL};
        memcpy(params, net_params, sizeof params);
        if (m->process == 1) {
            params[0].frozen = params[1].frozen = kind == 0;
            params[0].name = kind == 1 ? "other" : "w";
            config.reduction = kind == 2 ? (dp_reduction)7 : (dp_reduction)0;
        }
        CHECK_OK(make_pair(ctx, params, &p));
        CHECK_ERROR(dp_separate_distributed(p.module, &config, &par),
                    kind == 2 ? DP_ERR_INVALID : DP_ERR_MISMATCH,
                    kind == 0   ? "rank 1 has child 'left', which is not trained, rank 0 has "
                                  "child 'left', which is trained"
                    : kind == 1 ? "rank 1 has parameter 'other' f32 [3]"
                                : "rank 1: reduction is 7, not DP_SUM_RANKS");
        CHECK(par == NULL);
        CHECK_OK(dp_module_destroy(p.module)); /* nothing wraps it */
    }
    pair p = a_pair(ctx);
    CHECK_OK(dp_separate_distributed(p.module, NULL, &par)); /* the job goes on */
    CHECK_OK(step(par, "train_step", false));
    check_pair(&p, 2);
    dp_close(ctx);
}

TEST(ranks_train_the_same_children)
{
    in_processes(3, one_is_odd);
}

static bool survives_allocation(size_t n)
{
    test_allocator counter = {.fail_at = n};
    dp_ctx *ctx = NULL;
    pair p = {.module = NULL};
    dp_module *par = NULL;
    dp_config config = {
        .device_count = 2, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK)
        status = make_pair(ctx, net_params, &p);
    if (status == DP_OK)
        status = dp_separate_distributed(p.module, NULL, &par);
    if (status != DP_OK)
        CHECK_INT(status, DP_ERR_NO_MEMORY);
    else
        CHECK_OK(dp_module_destroy(par));
    if (p.module != NULL)
        CHECK_OK(dp_module_destroy(p.module)); /* nothing wraps it */
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return counter.fail_count > 0;
}

TEST_SLOW(the_nth_allocation_fails, 60)
{
    for (size_t n = 1; survives_allocation(n);)
        n += (size_t)test_step();
}

static dp_module *a_module(dp_ctx *ctx)
{
    return a_pair(ctx).module;
}

static dp_status wrap_separately(dp_module *module)
{
    dp_module *par;
    return dp_separate_distributed(module, NULL, &par);
}

TEST(no_memory_for_a_scope_ends_no_job)
{
    dp_status (*const calls[])(dp_module *) = {wrap_separately, dp_params_compare};
    lack = shared_memory(sizeof *lack);
    for (int i = 0; i < 2; i++) {
        *lack = (shortage){.fail_at = 1, .make = a_module, .wrap = calls[i]};
        in_processes(2, one_has_no_memory);
        CHECK_INT(lack->status[0], DP_ERR_NO_MEMORY);
        CHECK_INT(lack->status[1], DP_ERR_NO_MEMORY);
    }
}

TEST_SLOW(the_nth_allocation_of_one_process_fails, 120)
{
    each_allocation_fails_in_one(a_module, wrap_separately);
}

/* ---- optimizers ------------------------------------------------------------------------------ */

static dp_status sharded_of(dp_module *module, dp_optim **out)
{
    return dp_optim_create(module, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, out);
}

/* State is spread for the wrapper: a child by itself is reduced as well, but has no ranks. */
static void spread_state(meeting *m)
{
    static const char advice[] = "is no wrapper over ranks: make the optimizer for the one that "
                                 "dp_distributed or dp_separate_distributed has made of it, or of "
                                 "its parent";
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    pair p = a_pair(ctx);
    dp_module *par, *frozen;
    dp_optim *optim = NULL;
    CHECK_OK(dp_separate_distributed(p.module, NULL, &par));
    dp_module *const plain[] = {p.module, p.children[LEFT], p.children[EYE]};
    for (int i = 0; i < 3; i++) {
        CHECK_ERROR(sharded_of(plain[i], &optim), DP_ERR_INVALID, advice);
        CHECK_SAYS(dp_last_error(), dp_module_name(plain[i]));
    }
    CHECK_OK(dp_data_parallel(p.children[EYE], NULL, &frozen));
    CHECK_ERROR(sharded_of(frozen, &optim), DP_ERR_INVALID, "has no parameter that ranks reduce");
    CHECK_OK(sharded_of(par, &optim));
    float before = element(p.children[LEFT], 0, false, 0);
    CHECK_OK(step(par, "half_step", false));
    CHECK_OK(dp_optim_step(optim));
    CHECK_F64(element(p.children[LEFT], 0, false, 0), (double)before - 15, 0); /* the ranks' mean */
    CHECK_F64(element(p.children[RIGHT], 0, false, 0), before, 0);
    dp_optim_destroy(optim);
    dp_close(ctx);
}

TEST(state_is_spread_for_the_wrapper)
{
    in_processes(2, spread_state);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_children_are_trained_on_all_ranks, 60)
{
    on_gpus("11", train_over_shm);
    on_gpus("21", train_over_shm);
}

TEST_SLOW(cuda_nccl_ranks_train_the_same_children, 60)
{
    on_gpus("11", ignore_some);
    on_gpus("111", one_is_odd);
}
#endif
