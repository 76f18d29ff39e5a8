/* test_train.c - dp_train.h: optimizers, schedules, clipping. */

#define _GNU_SOURCE /* terminals */
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include "tree.h"
/* clang-format off */
#include "nets.h"
#include "torch_steps.h"
#include "dp_average.h"
#include "dp_check.h"
#include "dp_save.h"
/* clang-format on */

enum { A = 4, B = 3 };
_Static_assert(A + B == TORCH_ALL, "the net has all numbers");

/* Parameters "layer.weight" and "bias", on one device. */
static dp_module *bare_net(dp_ctx *ctx, dp_dtype dtype)
{
    const dp_param_config own[] = {{.name = "bias", .dtype = dtype, .ndim = 1, .shape = {B}},
                                   {.name = "mean", .ndim = 1, .shape = {2}, .buffer = true}};
    const dp_param_config inner[] = {
        {.name = "weight", .dtype = dtype, .ndim = 2, .shape = {2, 2}},
        {.name = "fixed", .dtype = dtype, .ndim = 1, .shape = {2}, .frozen = true}};
    dp_module *layer = NULL, *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "layer", .params = inner, .param_count = 2}, &layer));
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "net", .params = own, .param_count = 2, .children = &layer, .child_count = 1},
        &net));
    return net;
}

static const char *const names[] = {"layer.weight", "bias"};
static const size_t counts[] = {A, B};

static void put(dp_ctx *ctx, const dp_tensor *to, const float *from)
{
    dp_scope *temp = dp_scope_begin(ctx);
    dp_tensor host = dp_wrap_const(from, DP_F32, to->ndim, to->shape), own;
    CHECK_OK(dp_tensor_new(temp, to->device, DP_F32, to->ndim, to->shape, &own));
    CHECK_OK(dp_copy(ctx, &own, &host, NULL));
    CHECK_OK(dp_cast(ctx, to, &own));
    CHECK_OK(dp_wait(ctx));
    dp_scope_end(temp);
}

static void pull(dp_ctx *ctx, const dp_tensor *from, float *to)
{
    dp_scope *temp = dp_scope_begin(ctx);
    dp_tensor own;
    CHECK_OK(dp_tensor_new(temp, from->device, DP_F32, from->ndim, from->shape, &own));
    CHECK_OK(dp_cast(ctx, &own, from));
    CHECK_OK(dp_read(ctx, &own, to, (size_t)dp_tensor_count(&own) * sizeof *to));
    dp_scope_end(temp);
}

/* All of a net's numbers, or its gradients'. */
static void net_put(dp_module *net, bool grads, const float *from)
{
    for (int i = 0, at = 0; i < 2; at += (int)counts[i++]) {
        dp_tensor data, grad;
        size_t param = 0;
        CHECK_OK(dp_module_find(net, names[i], &param));
        CHECK_OK(dp_params_edit(net, param, &data, &grad));
        put(dp_module_ctx(net), grads ? &grad : &data, from + at);
    }
}

static void net_pull(dp_module *net, bool grads, float *to)
{
    for (int i = 0, at = 0; i < 2; at += (int)counts[i++]) {
        dp_tensor data, grad;
        size_t param = 0;
        CHECK_OK(dp_module_find(net, names[i], &param));
        CHECK_OK(dp_params_edit(net, param, &data, &grad));
        pull(dp_module_ctx(net), grads ? &grad : &data, to + at);
    }
}

static dp_module *begun_net(dp_ctx *ctx)
{
    dp_module *net = bare_net(ctx, DP_F32);
    net_put(net, false, beginning);
    return net;
}

static dp_optim *optim_of(dp_module *net, dp_optim_config config)
{
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(net, &config, &optim));
    return optim;
}

static void some_steps(dp_module *net, dp_optim *optim, int first, int last)
{
    float grads[TORCH_ALL];
    for (int step = first; step < last; step++) {
        grads_of(step, grads);
        net_put(net, true, grads);
        CHECK_OK(dp_optim_step(optim));
    }
}

static dp_optim_info info_of(const dp_optim *optim)
{
    dp_optim_info info;
    CHECK_OK(dp_optim_info_get(optim, &info));
    return info;
}

/* ---- rules ----------------------------------------------------------------------------------- */

TEST_BACKENDS(fifty_steps_of_torch)
{
    float got[TORCH_ALL];
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const rule_case *own = &rules[i];
        dp_module *net = begun_net(ctx);
        dp_optim *optim =
            optim_of(net, (dp_optim_config){.rule = own->rule(), .hyper = own->hyper});
        some_steps(net, optim, 0, 50);
        net_pull(net, false, got);
        for (int k = 0; k < TORCH_ALL; k++)
            CHECK_F64(got[k], own->torch[k], 1e-6 * fmax(1, fabs((double)own->torch[k])));
        CHECK_INT(info_of(optim).step_count, 50);
        CHECK_INT(info_of(optim).state_bytes, own->states * TORCH_ALL * sizeof(float));
        net_pull(net, true, got);
        for (int k = 0; k < TORCH_ALL; k++)
            CHECK_F64(got[k], 0, 0);
        dp_optim_destroy(optim);
        CHECK_OK(dp_module_destroy(net));
    }
}

/* Their state is f32. */
TEST_BACKENDS(halves_are_stepped_too)
{
    float got[TORCH_ALL], first[TORCH_ALL];
    dp_module *net = bare_net(ctx, DP_BF16);
    net_put(net, false, beginning);
    dp_optim *optim =
        optim_of(net, (dp_optim_config){.hyper = {.lr = 0.125, .momentum = 0.5}, .accumulate = 1});
    some_steps(net, optim, 0, 1);
    grads_of(0, first);
    net_pull(net, false, got);
    for (int k = 0; k < TORCH_ALL; k++)
        CHECK_F64(got[k], beginning[k] - 0.125f * first[k], 0.004 * fabs((double)beginning[k]));
    CHECK_INT(info_of(optim).state_bytes, TORCH_ALL * sizeof(float));
}

static struct own_rule {
    int calls;
    double lrs[8], gate;
    size_t count;
} own;

static int one_state(const dp_hyper *hyper)
{
    (void)hyper;
    return 1;
}

/* state += grad, param = state */
static dp_status sum_up(const dp_rule_args *args)
{
    const void *in[] = {args->state[0], args->grad};
    void *out = args->state[0];
    dp_kernel_args add = {.kernel = DP_KERNEL_AXPBY,
                          .dtype = args->dtype,
                          .count = args->count,
                          .out = &out,
                          .in = in,
                          .out_count = 1,
                          .in_count = 2,
                          .alpha = 1,
                          .beta = 1};
    DP_TRY(dp_kernel_run(args->ctx, args->local_rank, &add));
    out = args->param;
    add.in_count = 1;
    own.lrs[own.calls++ % 8] = args->hyper.lr;
    own.count += args->count;
    return dp_kernel_run(args->ctx, args->local_rank, &add);
}

TEST_BACKENDS(a_rule_may_be_yours)
{
    const dp_rule rule = {
        .head = DP_TABLE(dp_rule), .name = "sums", .state_count = one_state, .step = sum_up};
    float got[TORCH_ALL], want[TORCH_ALL] = {0}, grads[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    own = (struct own_rule){0};
    dp_optim *optim = optim_of(net, (dp_optim_config){.rule = &rule, .hyper = {.lr = 0.5}});
    CHECK_STR(info_of(optim).rule, "sums");
    some_steps(net, optim, 0, 3);
    for (int step = 0; step < 3; step++) {
        grads_of(step, grads);
        for (int k = 0; k < TORCH_ALL; k++)
            want[k] += grads[k];
    }
    net_pull(net, false, got);
    CHECK_BYTES(got, want, sizeof got);
    CHECK_INT(own.calls, 6);
    CHECK_INT(own.count, 3 * TORCH_ALL);
    CHECK_F64(own.lrs[0], 0.5, 0);
}

static dp_status runs_nothing(const dp_rule_args *args)
{
    return dp_kernel_run(args->ctx, args->local_rank, NULL);
}

/* What another function has said stays in the sentence. */
TEST_BACKENDS(a_rule_may_fail)
{
    const dp_rule rule = {.head = DP_TABLE(dp_rule), .name = "none", .step = runs_nothing};
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.rule = &rule, .hyper = {.lr = 1}});
    CHECK_STATUS(dp_optim_step(optim), DP_ERR_INVALID);
    CHECK_SAYS(dp_last_error(), "dp_optim_step: dp_kernel_run: args is NULL");
    CHECK_INT(info_of(optim).step_count, 0);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void check_factor(dp_ctx *ctx, const char *match, bool weight, bool bias)
{
    const double ten = 10;
    const dp_param_group groups[] = {{.match = "*fixed"}, {.match = match, .lr_factor = &ten}};
    float got[TORCH_ALL], grads[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim_config config = {.hyper = {.lr = 0.125}, .groups = groups, .group_count = 2};
    dp_optim *optim = NULL;
    if (!weight && !bias) {
        CHECK_ERROR(dp_optim_create(net, &config, &optim), DP_ERR_INVALID,
                    "dp_optim_create: groups[1].match is '");
        CHECK_SAYS(dp_last_error(), match);
        CHECK_OK(dp_module_destroy(net));
        return;
    }
    optim = optim_of(net, config);
    some_steps(net, optim, 0, 1);
    grads_of(0, grads);
    net_pull(net, false, got);
    for (int k = 0; k < TORCH_ALL; k++) {
        double lr = (k < A ? weight : bias) ? 1.25 : 0.125;
        CHECK_F64(got[k], (double)beginning[k] - lr * (double)grads[k], 1e-6);
    }
    dp_optim_destroy(optim);
    CHECK_OK(dp_module_destroy(net));
}

TEST_BACKENDS(groups_are_found_by_name)
{
    check_factor(ctx, "bias", false, true);
    check_factor(ctx, "*", true, true);
    check_factor(ctx, "layer.*", true, false);
    check_factor(ctx, "*weight", true, false);
    check_factor(ctx, "*i*", true, true);
    check_factor(ctx, "*ei*t", true, false);
    check_factor(ctx, "b*as", false, true);
    check_factor(ctx, "b*s*", false, true);
    check_factor(ctx, "*bs", false, false);
    check_factor(ctx, "layer", false, false);
    check_factor(ctx, "ayer.weight", false, false);
    check_factor(ctx, "", false, false);
    check_factor(ctx, "*.w*.*", false, false);
}

/* A module of one child with parameters of these names. */
static dp_module *named_net(dp_ctx *ctx, const dp_param_config *params, size_t count)
{
    dp_module *layer = NULL, *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "layer", .params = params, .param_count = count}, &layer));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .children = &layer, .child_count = 1}, &net));
    return net;
}

static void check_no_match(dp_module *net, const dp_param_group *groups, size_t count,
                           const char *want)
{
    dp_optim *optim = NULL;
    CHECK_ERROR(dp_optim_create(
                    net,
                    &(dp_optim_config){.hyper = {.lr = 1}, .groups = groups, .group_count = count},
                    &optim),
                DP_ERR_INVALID, "dp_optim_create: groups[");
    CHECK_STR(dp_last_error() + strlen("dp_optim_create: "), want);
}

TEST(a_group_of_nothing_is_an_error_that_names_what_is_near)
{
    static const dp_param_config params[] = {
        {.name = "weight"}, {.name = "bias"}, {.name = "gain"}, {.name = "wait"}, {.name = "q"}};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *all = named_net(ctx, params, 5), *two = named_net(ctx, params, 2);
    dp_module *one = named_net(ctx, &params[1], 1), *none = named_net(ctx, NULL, 0);
    check_no_match(all, &(dp_param_group){.match = "layer.waight"}, 1,
                   "groups[0].match is 'layer.waight', which no parameter matches; "
                   "nearest: 'layer.weight', 'layer.wait', 'layer.gain'");
    check_no_match(all, &(dp_param_group){.match = "*.biass"}, 1,
                   "groups[0].match is '*.biass', which no parameter matches; "
                   "nearest: 'layer.bias', 'layer.gain', 'layer.wait'");
    check_no_match(two, &(dp_param_group){.match = "layer*bia"}, 1,
                   "groups[0].match is 'layer*bia', which no parameter matches; "
                   "nearest: 'layer.bias', 'layer.weight'");
    check_no_match(all, &(dp_param_group){.match = "layer.weightlayer.q"}, 1,
                   "groups[0].match is 'layer.weightlayer.q', which no parameter matches; "
                   "nearest: 'layer.weight', 'layer.wait', 'layer.bias'");
    check_no_match(one, &(dp_param_group){.match = ""}, 1,
                   "groups[0].match is '', which no parameter matches; nearest: 'layer.bias'");
    check_no_match(none, &(dp_param_group){.match = "*"}, 1,
                   "groups[0].match is '*', which no parameter matches");
    check_no_match(
        two, (const dp_param_group[]){{.match = "*weight"}, {.match = "*"}, {.match = "l*s"}}, 3,
        "groups[2] ('l*s') gets no parameter: 'layer.bias', say, is in groups[1] ('*')");
    dp_close(ctx);
}

/* Names that are too long for the sentence, or to be compared to their end. */
TEST(long_names_are_near_too)
{
    static char longs[3][400];
    dp_param_config params[3] = {{.name = longs[0]}, {.name = longs[1]}, {.name = longs[2]}};
    char match[401];
    dp_ctx *ctx = NULL;
    for (int i = 0; i < 3; i++)
        memset(longs[i], 'a' + i, sizeof longs[i] - 1);
    memset(match, 'b', sizeof match - 1);
    match[sizeof match - 1] = 0;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_optim *optim = NULL;
    CHECK_ERROR(dp_optim_create(named_net(ctx, params, 3),
                                &(dp_optim_config){.hyper = {.lr = 1},
                                                   .groups = &(dp_param_group){.match = match},
                                                   .group_count = 1},
                                &optim),
                DP_ERR_INVALID, "; nearest: 'layer.bbbbbbbbbb");
    dp_close(ctx);
}

TEST(the_first_group_counts)
{
    double half = 0.5, none = 0, two = 2;
    char match[] = "*bias";
    dp_param_group groups[] = {{match, &half, &none}, {"*", &two, NULL}};
    dp_ctx *ctx = NULL;
    double lr = 0;
    float got[TORCH_ALL], zeros[TORCH_ALL] = {0};
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 0.125, .weight_decay = 0.5},
                                                      .groups = groups,
                                                      .group_count = 2});
    CHECK_INT(info_of(optim).group_count, 3);
    half = none = two = 7; /* it has copies */
    memset(match, 0, sizeof match);
    memset(groups, 0, sizeof groups);
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_optim_lr(optim, i, &lr));
        CHECK_F64(lr, i == 0 ? 0.0625 : i == 1 ? 0.25 : 0.125, 0);
    }
    CHECK_ERROR(dp_optim_lr(optim, 3, &lr), DP_ERR_INVALID, "dp_optim_lr: group 3 of 3");
    net_put(net, true, zeros);
    CHECK_OK(dp_optim_step(optim));
    net_pull(net, false, got);
    for (int k = 0; k < TORCH_ALL; k++) /* bias does not decay */
        CHECK_F64(got[k], beginning[k] * (k < A ? 0.875f : 1), 1e-7);
    dp_close(ctx);
}

/* ---- several at once ------------------------------------------------------------------------- */

enum { MANY_PARAMS = 151 };

static struct several {
    int calls, fails; /* fails: at which call; 0: at none */
    size_t counts[64];
    int64_t steps[64];
} several;

static dp_status adamw_of_several(const dp_rule_args *args, size_t count)
{
    several.steps[several.calls % 64] = args->step;
    several.counts[several.calls++ % 64] = count;
    if (several.calls == several.fails)
        return dp_error(DP_ERR_USER, "not now");
    return dp_adamw()->steps(args, count);
}

/* Weights and biases in turns, so that none is a neighbour of one of its group. */
typedef struct many_net {
    dp_module *net;
    dp_optim *optim;
    dp_rule rule;
} many_net;

static void many_open(dp_ctx *ctx, many_net *many, bool together)
{
    static char names_of[MANY_PARAMS][16];
    static dp_param_config params[MANY_PARAMS];
    static const double ten = 10, none = 0;
    static const dp_param_group groups[] = {
        {.match = "layer.b*", .lr_factor = &ten, .decay_factor = &none}, {.match = "layer.w9*"}};
    for (int i = 0; i < MANY_PARAMS; i++) {
        snprintf(names_of[i], sizeof names_of[i], "%c%d", i % 2 == 0 ? 'w' : 'b', i);
        params[i] = (dp_param_config){.name = names_of[i], .ndim = 1, .shape = {1 + i % 5}};
    }
    many->rule = *dp_adamw();
    many->rule.steps = together ? adamw_of_several : NULL;
    many->net = named_net(ctx, params, MANY_PARAMS);
    many->optim = optim_of(many->net, (dp_optim_config){.rule = &many->rule,
                                                        .hyper = {.lr = 0.01, .weight_decay = 0.1},
                                                        .groups = groups,
                                                        .group_count = 2});
}

static void many_close(many_net *many)
{
    dp_optim_destroy(many->optim);
    CHECK_OK(dp_module_destroy(many->net));
}

static dp_status many_step(many_net *many)
{
    float numbers[5];
    for (int i = 0; i < MANY_PARAMS; i++) {
        dp_tensor data, grad;
        for (int k = 0; k < 5; k++)
            numbers[k] = (float)(i + 1) / (float)(k + 2);
        CHECK_OK(dp_params_edit(many->net, (size_t)i, &data, &grad));
        put(dp_module_ctx(many->net), &grad, numbers);
    }
    several.calls = 0;
    return dp_optim_step(many->optim);
}

static void many_pull(const many_net *many, float *out)
{
    for (size_t i = 0; i < MANY_PARAMS; i++) {
        dp_tensor data, grad;
        CHECK_OK(dp_params_edit(many->net, i, &data, &grad));
        pull(dp_module_ctx(many->net), &data, out + 5 * i);
    }
}

TEST_BACKENDS(parameters_of_a_group_are_stepped_together)
{
    static float got[5 * MANY_PARAMS], want[5 * MANY_PARAMS];
    many_net together, apart;
    several = (struct several){0};
    many_open(ctx, &together, true);
    many_open(ctx, &apart, false);
    for (int step = 0; step < 3; step++) {
        /* 75 biases, 5 weights whose names begin with w9, 71 others: no more than 64 at a time */
        const size_t wanted[] = {64, 11, 5, 64, 7};
        CHECK_OK(many_step(&together));
        CHECK_INT(several.calls, 5);
        for (int i = 0; i < several.calls; i++) {
            CHECK_INT(several.counts[i], wanted[i]);
            CHECK_INT(several.steps[i], step + 1);
        }
        CHECK_OK(many_step(&apart));
        many_pull(&together, got);
        many_pull(&apart, want);
        CHECK_BYTES(got, want, sizeof got);
    }
    many_close(&together);
    many_close(&apart);
}

/* What was to be stepped with it does not come again. */
TEST_BACKENDS(several_steps_may_fail)
{
    many_net many;
    several = (struct several){0};
    many_open(ctx, &many, true);
    several.fails = 2;
    CHECK_ERROR(many_step(&many), DP_ERR_USER, "not now");
    CHECK_INT(several.calls, 2);
    several.fails = 0;
    CHECK_OK(many_step(&many));
    CHECK_INT(several.calls, 5);
    CHECK_INT(several.counts[0], 64);
    CHECK_INT(several.counts[1], 11);
    several.fails = 5; /* the last */
    CHECK_ERROR(many_step(&many), DP_ERR_USER, "not now");
    several.fails = 0;
    CHECK_OK(many_step(&many));
    CHECK_INT(several.calls, 5);
    many_close(&many);
}

/* ---- schedules ------------------------------------------------------------------------------- */

static void check_factors(dp_schedule schedule, const double *want, int count)
{
    for (int i = 0; i < count; i++)
        CHECK_F64(dp_schedule_factor(&schedule, i), want[i], 1e-12);
}

static double twice(int64_t step, void *user)
{
    return 2 * (double)step + *(const double *)user;
}

TEST(schedules_of_torch)
{
    double one = 1;
    check_factors((dp_schedule){0}, (const double[]){1, 1, 1}, 3);
    check_factors((dp_schedule){.start_factor = 0.5}, (const double[]){1, 1}, 2); /* of no steps */
    check_factors((dp_schedule){.warmup = 4, .start_factor = 0.25},
                  (const double[]){0.25, 0.4375, 0.625, 0.8125, 1, 1}, 6);
    check_factors((dp_schedule){.warmup = 3}, (const double[]){0.25, 0.5, 0.75, 1, 1}, 5);
    check_factors((dp_schedule){.decay = DP_DECAY_COSINE, .total = 8, .end_factor = 0.1},
                  (const double[]){1, 0.9657457896300791, 0.8681980515339464, 0.7222075445642905,
                                   0.55, 0.3777924554357097, 0.2318019484660537, 0.134254210369921,
                                   0.1, 0.1},
                  10);
    check_factors((dp_schedule){.decay = DP_DECAY_STEPS, .every = 3, .gamma = 0.5},
                  (const double[]){1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25}, 8);
    check_factors((dp_schedule){.warmup = 1, .decay = DP_DECAY_STEPS, .every = 2, .gamma = 0.5},
                  (const double[]){0.5, 1, 1, 0.5, 0.5}, 5);
    check_factors((dp_schedule){.warmup = 1, .decay = DP_DECAY_LINEAR, .total = 5},
                  (const double[]){0.5, 1, 0.75, 0.5, 0.25, 0, 0}, 7);
    check_factors((dp_schedule){.factor = twice, .user = &one, .warmup = 3},
                  (const double[]){1, 3, 5}, 3);
    check_factors((dp_schedule){.warmup = 4, .start_factor = DP_ZERO}, /* transformers' */
                  (const double[]){0, 0.25, 0.5, 0.75, 1, 1}, 6);
    check_factors((dp_schedule){.decay = DP_DECAY_STEPS, .every = 2, .gamma = DP_ZERO},
                  (const double[]){1, 1, 0, 0, 0}, 5);
    check_factors((dp_schedule){.decay = DP_DECAY_LINEAR, .total = 2, .end_factor = DP_ZERO},
                  (const double[]){1, 0.5, 0, 0}, 4);
}

/* MultiStepLR, by itself and after a warm-up; equal milestones count as often as they stand there,
   as torch's Counter has it. */
TEST(milestones_of_torch)
{
    const int64_t some[] = {2, 3, 6}, twice_there[] = {0, 4, 4}, late[] = {3, 5};
    dp_schedule schedule = {
        .decay = DP_DECAY_STEPS, .gamma = 0.1, .milestones = some, .milestone_count = 3};
    check_factors(schedule, (const double[]){1, 1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001}, 8);
    schedule.milestones = twice_there;
    check_factors(schedule, (const double[]){0.1, 0.1, 0.1, 0.1, 0.001, 0.001}, 6);
    schedule.milestone_count = 1;
    check_factors(schedule, (const double[]){0.1, 0.1}, 2);
    schedule = (dp_schedule){.warmup = 3,
                             .start_factor = 0.25,
                             .decay = DP_DECAY_STEPS,
                             .gamma = 0.5,
                             .milestones = late,
                             .milestone_count = 2};
    check_factors(schedule, (const double[]){0.25, 0.5, 0.75, 0.5, 0.5, 0.25, 0.25}, 7);
}

TEST(an_optimizer_has_milestones_of_its_own)
{
    int64_t milestones[] = {1, 2};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5},
                                                      .schedule = {.decay = DP_DECAY_STEPS,
                                                                   .gamma = 0.5,
                                                                   .milestones = milestones,
                                                                   .milestone_count = 2}});
    memset(milestones, 0, sizeof milestones);
    for (int step = 0; step < 4; step++) {
        CHECK_F64(info_of(optim).lr, ldexp(0.5, -(step < 2 ? step : 2)), 0);
        some_steps(net, optim, step, step + 1);
    }
    dp_close(ctx);
}

TEST_BACKENDS(the_rate_follows_its_schedule)
{
    float got[TORCH_ALL], grads[TORCH_ALL], want[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(
        net, (dp_optim_config){.hyper = {.lr = 0.5},
                               .schedule = {.decay = DP_DECAY_STEPS, .every = 1, .gamma = 0.5}});
    memcpy(want, beginning, sizeof want);
    for (int step = 0; step < 3; step++) {
        CHECK_F64(info_of(optim).lr, ldexp(0.5, -step), 0);
        some_steps(net, optim, step, step + 1);
        grads_of(step, grads);
        for (int k = 0; k < TORCH_ALL; k++)
            want[k] -= ldexpf(0.5f, -step) * grads[k];
    }
    net_pull(net, false, got);
    CHECK_BYTES(got, want, sizeof got);
}

/* ---- when it is time ------------------------------------------------------------------------- */

typedef struct turn {
    int divisor;
    bool steps;
} turn;

static void check_turns(dp_ctx *ctx, int accumulate, int64_t done, int64_t total, const turn *turns,
                        int count)
{
    float ones[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim =
        optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .accumulate = accumulate});
    CHECK_OK(dp_optim_progress(optim, done, total));
    for (int k = 0; k < TORCH_ALL; k++)
        ones[k] = 1;
    for (int i = 0; i < count; i++) {
        dp_pass_config pass = {0};
        double factor = 0;
        int64_t before = info_of(optim).step_count;
        float left[TORCH_ALL];
        net_put(net, true, ones);
        CHECK_OK(optim->ops->begin(optim, net, &pass));
        CHECK(pass.no_sync == !turns[i].steps);
        CHECK_OK(optim->ops->loss_factor(optim, &factor));
        CHECK_F64(1 / factor, turns[i].divisor, 1e-12);
        CHECK_OK(optim->ops->update(optim, net));
        CHECK_INT(info_of(optim).step_count - before, turns[i].steps);
        CHECK_INT(info_of(optim).done, done + i + 1);
        net_pull(net, true, left);
        CHECK_F64(left[0], turns[i].steps ? 0 : 1, 0);
    }
    CHECK_INT(info_of(optim).total, total);
    dp_optim_destroy(optim);
    CHECK_OK(dp_module_destroy(net));
}

/* As mmengine's OptimWrapper. */
TEST_BACKENDS(gradients_of_several_make_a_step)
{
    static const turn third[] = {{3, 0}, {3, 0}, {3, 1}, {3, 0}, {3, 0}, {3, 1}, {3, 0}};
    static const turn ten[] = {{3, 0}, {3, 0}, {3, 1}, {3, 0}, {3, 0},
                               {3, 1}, {3, 0}, {3, 0}, {3, 1}, {1, 1}};
    static const turn four[] = {{4, 0}, {4, 0}, {4, 0}, {4, 1}, {4, 0},
                                {4, 0}, {4, 0}, {4, 1}, {2, 0}, {2, 1}};
    static const turn two[] = {{2, 0}, {2, 1}};
    static const turn once[] = {{1, 1}, {1, 1}, {1, 1}};
    static const turn beyond[] = {{2, 1}, {2, 0}, {2, 1}};
    check_turns(ctx, 3, 0, -1, third, 7);
    check_turns(ctx, 3, 0, 10, ten, 10);
    check_turns(ctx, 3, 5, 10, ten + 5, 5);
    check_turns(ctx, 4, 0, 10, four, 10);
    check_turns(ctx, 3, 0, 2, two, 2);
    check_turns(ctx, 0, 0, -1, once, 3);
    check_turns(ctx, 2, 3, 4, beyond, 3);
}

static atomic_int seen_compute;

/* A loss of 1, with a gradient of 1. */
static dp_status one_forward(dp_call *call)
{
    const float loss = 1;
    atomic_store(&seen_compute, (int)call->compute_dtype);
    return net_new(call, &loss, 0, NULL, &call->out);
}

static dp_status one_backward(dp_call *call)
{
    double grad;
    TRY(dp_item(call->ctx, call->grad, &grad));
    const float more = (float)grad;
    return net_add(call, dp_grad(call, 0), &more, 1);
}

static dp_module *one_net(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", one_forward}, {"backward", one_backward}};
    static const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "one",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1},
                              &net));
    return net;
}

/* The net itself, and in wrappers that take means in all ways. */
static dp_module *trained_in_way(dp_module *net, int way)
{
    dp_module *par = net;
    if (way == 1)
        CHECK_OK(dp_data_parallel(net, NULL, &par));
    if (way > 1)
        CHECK_OK(dp_distributed(
            net, &(dp_distributed_config){.reduction = way == 2 ? DP_MEAN_RANKS : DP_MEAN_SAMPLES},
            &par));
    return par;
}

/* It is repeated, and is still the last one of those that there are. */
TEST_BACKENDS(a_step_whose_norm_is_no_number_does_not_count)
{
    const float good[TORCH_ALL] = {1}, bad[TORCH_ALL] = {NAN};
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(
        net, (dp_optim_config){.hyper = {.lr = 1}, .accumulate = 2, .clip = {.norm = 100}});
    CHECK_OK(dp_optim_progress(optim, 0, 2));
    for (int i = 0; i < 3; i++) {
        dp_pass_config pass = {0};
        CHECK_OK(optim->ops->begin(optim, net, &pass));
        CHECK(pass.no_sync == (i == 0));
        net_put(net, true, i == 1 ? bad : good);
        CHECK_STATUS(optim->ops->update(optim, net), i == 1 ? DP_ERR_STATE : DP_OK);
        CHECK_INT(info_of(optim).done, i == 0 ? 1 : i);
        CHECK_INT(info_of(optim).step_count, i == 2);
    }
    dp_optim_destroy(optim);
}

/* Ten train steps, three of which make a step of the optimizer. */
TEST_BACKENDS(all_wrappers_accumulate_alike)
{
    static const float stepped[] = {0, 0, 1, 1, 1, 2, 2, 2, 3, 4};
    for (int way = 0; way < 4; way++) {
        dp_module *net = one_net(ctx), *trained = trained_in_way(net, way);
        dp_param_info info;
        CHECK_OK(dp_module_param(trained, 0, &info));
        CHECK_INT(info.reduction, way == 3 ? DP_MEAN_SAMPLES : way == 2 ? DP_MEAN_RANKS : 0);
        dp_optim *optim = optim_of(
            trained,
            (dp_optim_config){.hyper = {.lr = 1}, .accumulate = 3, .compute_dtype = DP_BF16});
        CHECK_INT(info_of(optim).done, 0);
        CHECK_INT(info_of(optim).total, -1);
        CHECK_F64(info_of(optim).momentum, 0, 0);
        CHECK_OK(dp_optim_progress(optim, 0, 10));
        for (int step = 0; step < 10; step++) {
            dp_scope *once = dp_scope_begin(ctx);
            dp_tensor data, grad;
            dp_value log;
            float w;
            CHECK_OK(dp_train_step(trained, once, DP_LIST_OF(once, tree_of(once, "f32[16]")), optim,
                                   &log));
            CHECK_OK(dp_params_edit(net, 0, &data, &grad));
            pull(ctx, &data, &w);
            CHECK_F64(w, -stepped[step], 1e-6);
            CHECK_INT(atomic_load(&seen_compute), DP_BF16);
            dp_scope_end(once);
        }
        CHECK_INT(info_of(optim).step_count, 4);
        dp_optim_destroy(optim);
    }
}

/* Own numbers would be divided by the number of steps, those of the child by all samples. */
TEST_BACKENDS(gradients_of_two_means_do_not_accumulate)
{
    const dp_param_config mine = {.name = "v", .ndim = 1, .shape = {1}};
    dp_module *par = trained_in_way(one_net(ctx), 3), *parent = NULL;
    dp_optim *optim = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .params = &mine,
                                                  .param_count = 1,
                                                  .children = &par,
                                                  .child_count = 1},
                              &parent));
    CHECK_ERROR(
        dp_optim_create(parent, &(dp_optim_config){.hyper = {.lr = 1}, .accumulate = 2}, &optim),
        DP_ERR_INVALID,
        "dp_optim_create: accumulate is 2: of 2 parameters of 'parent' 1 have gradients "
        "that are means over samples, and the others have not");
    CHECK_OK(dp_optim_create(parent, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
}

/* ---- clipping -------------------------------------------------------------------------------- */

static void check_clipped(dp_module *net, double p, double want_norm, double want_3, double want_4)
{
    float grads[TORCH_ALL] = {3, 0, 0, 0, 0, 4, 0}, got[TORCH_ALL];
    double norm = 0;
    net_put(net, true, grads);
    CHECK_OK(dp_grad_norm(net, p, &norm));
    CHECK_F64(norm, want_norm, 1e-6);
    norm = 0;
    CHECK_OK(dp_clip_grad_norm(net, 1, p, &norm));
    CHECK_F64(norm, want_norm, 1e-6);
    net_pull(net, true, got);
    CHECK_F64(got[0], want_3, 1e-6);
    CHECK_F64(got[5], want_4, 1e-6);
    CHECK_F64(got[1], 0, 0);
}

TEST_BACKENDS(clipping_by_norm_as_torch)
{
    dp_module *net = begun_net(ctx);
    float small[TORCH_ALL] = {0.25f, 0, 0, 0, 0, 0.5f, 0}, got[TORCH_ALL];
    check_clipped(net, 2, 5, 0.6, 0.8);
    check_clipped(net, 1, 7, 0.42857134342193604, 0.5714284777641296);
    check_clipped(net, 3, 4.497941493988037, 0.6669716238975525, 0.8892955183982849);
    check_clipped(net, HUGE_VAL, 4, 0.7499998211860657, 0.9999997615814209);
    net_put(net, true, small);
    CHECK_OK(dp_clip_grad_norm(net, 1, 2, NULL));
    net_pull(net, true, got);
    CHECK_BYTES(got, small, sizeof got);
}

/* Nobody minds: infinity leaves zeros and a NaN where it was, NaN is everywhere. */
TEST_BACKENDS(clipping_by_no_finite_norm_as_torch)
{
    static const double ps[] = {2, 1, HUGE_VAL};
    const float infinite[TORCH_ALL] = {1, -2, 3, 4, -INFINITY, 5, 6};
    const float nan[TORCH_ALL] = {1, -2, 3, 4, NAN, 5, 6};
    dp_module *net = begun_net(ctx);
    for (int i = 0; i < 3; i++) {
        float got[TORCH_ALL];
        double norm = 0;
        net_put(net, true, infinite);
        CHECK_OK(dp_clip_grad_norm(net, 1, ps[i], &norm));
        CHECK_F64(norm, HUGE_VAL, 0);
        net_pull(net, true, got);
        for (int k = 0; k < TORCH_ALL; k++)
            CHECK_F64(got[k], k == 4 ? NAN : 0, 0);
        net_put(net, true, nan);
        CHECK_OK(dp_clip_grad_norm(net, 1, ps[i], &norm));
        CHECK(isnan(norm));
        net_pull(net, true, got);
        for (int k = 0; k < TORCH_ALL; k++)
            CHECK(isnan(got[k]));
    }
}

TEST_BACKENDS(clipping_by_value_as_torch)
{
    const float grads[TORCH_ALL] = {3, -3, 0.5f, -0.5f, INFINITY, NAN, 1};
    const float want[TORCH_ALL] = {1, -1, 0.5f, -0.5f, 1, 0, 1};
    float got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    net_put(net, true, grads);
    CHECK_OK(dp_clip_grad_value(net, 1));
    net_pull(net, true, got);
    for (int k = 0; k < TORCH_ALL; k++)
        if (k != 5)
            CHECK_F64(got[k], want[k], 0);
    CHECK(isnan(got[5]));
}

static double clipped_in_f64(dp_ctx *ctx, bool norm)
{
    const dp_param_config param = {.name = "w", .dtype = DP_F64, .ndim = 1, .shape = {1}};
    dp_module *net = NULL;
    dp_tensor data, grad;
    double got = 1;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "n", .params = &param, .param_count = 1}, &net));
    CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    CHECK_OK(dp_fill(ctx, &grad, dp_float(-2)));
    CHECK_OK(norm ? dp_clip_grad_norm(net, DP_ZERO, 2, NULL) : dp_clip_grad_value(net, DP_ZERO));
    CHECK_OK(dp_read(ctx, &grad, &got, sizeof got));
    CHECK_OK(dp_module_destroy(net));
    return got;
}

/* To 0 itself, not to a number that f64 can tell from it. */
TEST_BACKENDS(gradients_of_doubles_are_clipped_to_zero)
{
    CHECK_F64(clipped_in_f64(ctx, true), 0, 0);
    CHECK_F64(clipped_in_f64(ctx, false), 0, 0);
}

/* A limit that the dtype does not have is its largest number. */
TEST_BACKENDS(gradients_of_any_dtype_are_clipped_to_anything)
{
    static const double largest[] = {(double)FLT_MAX, DBL_MAX, 65504, 0x1.fep127};
    for (dp_dtype dtype = DP_F32; dtype <= DP_BF16; dtype++) {
        const dp_param_config param = {.name = "w", .dtype = dtype, .ndim = 1, .shape = {1}};
        dp_scope *once = dp_scope_begin(ctx);
        dp_module *net = NULL;
        dp_tensor data, grad, wide;
        double got = 0;
        CHECK_OK(dp_module_create(
            ctx, &(dp_module_config){.name = "n", .params = &param, .param_count = 1}, &net));
        CHECK_OK(dp_params_edit(net, 0, &data, &grad));
        CHECK_OK(dp_tensor_new(once, grad.device, DP_F64, DP_SHAPE(1), &wide));
        CHECK_OK(dp_fill(ctx, &grad, dp_float(-2)));
        CHECK_OK(dp_clip_grad_value(net, DBL_MAX));
        CHECK_OK(dp_cast(ctx, &wide, &grad));
        CHECK_OK(dp_read(ctx, &wide, &got, sizeof got));
        CHECK_F64(got, -2, 0);
        CHECK_OK(dp_fill(ctx, &grad, dp_float(-HUGE_VAL)));
        CHECK_OK(dp_clip_grad_value(net, DBL_MAX));
        CHECK_OK(dp_cast(ctx, &wide, &grad));
        CHECK_OK(dp_read(ctx, &wide, &got, sizeof got));
        CHECK_F64(got, -largest[dtype], 0);
        dp_scope_end(once);
        CHECK_OK(dp_module_destroy(net));
    }
}

/* More elements than are done at a time. */
TEST(large_gradients_are_clipped)
{
    enum { MANY = 70001 };
    const dp_param_config param = {.name = "w", .dtype = DP_F64, .ndim = 1, .shape = {MANY}};
    dp_ctx *ctx = NULL;
    dp_module *net = NULL;
    dp_tensor data, grad;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "n", .params = &param, .param_count = 1}, &net));
    CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    for (int i = 0; i < MANY; i++)
        ((double *)grad.data)[i] = i - 35000;
    CHECK_OK(dp_clip_grad_value(net, 7));
    for (int i = 0; i < MANY; i++)
        CHECK_F64(((double *)grad.data)[i], fmax(-7, fmin(7, i - 35000)), 0);
    dp_close(ctx);
}

TEST_BACKENDS(a_step_is_clipped)
{
    const float grads[TORCH_ALL] = {3, 0, 0, 0, 0, -4, 0};
    float got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 2.5}});
    CHECK(!info_of(optim).has_norm);
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    CHECK(info_of(optim).has_norm);
    CHECK_F64(info_of(optim).grad_norm, 5, 1e-12);
    net_pull(net, false, got);
    CHECK_F64(got[0], 1 - 1.5, 1e-6);
    CHECK_F64(got[5], -0.5 + 2, 1e-6);
    CHECK_F64(got[6], 0.125, 0);
    dp_optim_destroy(optim);
    net_put(net, false, beginning);
    optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .clip = {.value = 0.5}});
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    net_pull(net, false, got);
    CHECK_F64(got[0], 0.5, 0);
    CHECK_F64(got[5], 0, 0);
    CHECK(!info_of(optim).has_norm);
}

/* A tree whose parts lie on two devices, neither of them the first: each is stepped where it is. */
static dp_module *net_elsewhere(dp_ctx *ctx, dp_dtype dtype)
{
    const dp_param_config one = {.name = "w", .dtype = dtype};
    dp_module_config config = {.name = "inner", .params = &one, .param_count = 1, .local_rank = 2};
    dp_module *inner = NULL, *net = NULL;
    CHECK_OK(dp_module_create(ctx, &config, &inner));
    config.name = "outer";
    config.local_rank = 1;
    config.children = &inner;
    config.child_count = 1;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    return net;
}

TEST_BACKENDS(a_step_is_clipped_wherever_it_is_made)
{
    for (int halves = 0; halves < 2; halves++) {
        dp_module *net = net_elsewhere(ctx, halves ? DP_BF16 : DP_F32);
        const dp_optim_config config = {
            .hyper = {.lr = 1}, .clip = {.norm = 2.5}, .masters = halves == 1};
        dp_optim *optim = optim_of(net, config);
        dp_tensor data, grad;
        double got;
        for (size_t i = 0; i < 2; i++) {
            CHECK_OK(dp_params_edit(net, i, &data, &grad));
            CHECK_OK(dp_fill(ctx, &grad, dp_float(i == 0 ? 3 : 4)));
        }
        CHECK_OK(dp_optim_step(optim));
        for (size_t i = 0; i < 2; i++) {
            dp_param_info info;
            CHECK_OK(dp_module_param(net, i, &info));
            CHECK_OK(dp_item(ctx, dp_of(scope, &info.data), &got));
            CHECK_F64(got, i == 0 ? -1.5 : -2, 1e-2);
        }
    }
}

TEST_BACKENDS(gradient_that_is_not_finite_is_named)
{
    const float grads[TORCH_ALL] = {1, 1, 1, 1, 1, NAN, INFINITY};
    const float others[TORCH_ALL] = {1, NAN, 1, 1, 1, 1, 1};
    float got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    for (int i = 0; i < 2; i++) {
        dp_optim *optim = optim_of(
            net,
            (dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1, .p = i == 0 ? 0 : HUGE_VAL}});
        net_put(net, true, grads);
        CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE,
                    "dp_optim_step: the norm of the gradients is nan: the gradient of bias is not "
                    "finite");
        net_pull(net, false, got);
        CHECK_BYTES(got, beginning, sizeof got);
        net_pull(net, true, got);
        CHECK_F64(got[0], 1, 0);
        CHECK_INT(info_of(optim).step_count, 0);
        net_put(net, true, others); /* the first parameter's are finite */
        CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE,
                    "the gradient of layer.weight is not finite");
        some_steps(net, optim, 0, 1);
        CHECK(info_of(optim).has_norm);
        net_put(net, true, grads);
        CHECK_STATUS(dp_optim_step(optim), DP_ERR_STATE);
        CHECK(!info_of(optim).has_norm); /* that of the step before is not taken for it */
        dp_optim_destroy(optim);
        net_put(net, false, beginning);
    }
}

/* Whatever else is clipped. */
TEST_BACKENDS(a_step_that_is_not_finite_may_be_left_out)
{
    static const dp_clip clips[] = {{.norm = 100, .skip_if_not_finite = true},
                                    {.value = 100, .skip_if_not_finite = true},
                                    {.skip_if_not_finite = true}};
    const float grads[TORCH_ALL] = {1, 1, 1, 1, 1, NAN, INFINITY};
    float got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    for (int i = 0; i < 3; i++) {
        dp_optim *optim =
            optim_of(net, (dp_optim_config){.hyper = {.lr = 0.125}, .clip = clips[i]});
        net_put(net, false, beginning);
        net_put(net, true, grads);
        CHECK_OK(dp_optim_step(optim));
        net_pull(net, false, got);
        CHECK_BYTES(got, beginning, sizeof got);
        CHECK_INT(info_of(optim).step_count, 0);
        CHECK_INT(info_of(optim).skip_count, 1);
        some_steps(net, optim, 0, 1);
        CHECK_INT(info_of(optim).step_count, 1);
        CHECK_INT(info_of(optim).skip_count, 1);
        CHECK(info_of(optim).has_norm == (i == 0));
        net_pull(net, false, got);
        CHECK_F64(got[0], 1.125, 1e-6); /* a gradient of -1 */
        dp_optim_destroy(optim);
    }
}

/* ---- the scale of losses --------------------------------------------------------------------- */

/* As dp_train_step would: gradients come with the factor in them. */
static dp_status scaled_step(dp_module *net, dp_optim *optim, float number)
{
    float grads[TORCH_ALL] = {0};
    grads[0] = number * (float)info_of(optim).loss_factor;
    net_put(net, true, grads);
    return dp_optim_step(optim);
}

static double first_of(dp_module *net)
{
    float got[TORCH_ALL];
    net_pull(net, false, got);
    return (double)got[0];
}

TEST_BACKENDS(the_scale_follows_the_gradients)
{
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(
        net,
        (dp_optim_config){
            .hyper = {.lr = 0.5},
            .scale = {.dynamic = true, .scale = 4, .growth = 2, .backoff = 0.25, .interval = 2}});
    CHECK_F64(info_of(optim).loss_factor, 4, 0);
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 4, 0);
    CHECK_F64(first_of(net), 0.5, 0);
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 8, 0);
    CHECK_F64(first_of(net), 0, 0);
    CHECK_OK(scaled_step(net, optim, INFINITY));
    CHECK_F64(info_of(optim).scale, 2, 0);
    CHECK_F64(first_of(net), 0, 0);
    CHECK_INT(info_of(optim).step_count, 2);
    CHECK_INT(info_of(optim).skip_count, 1);
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 2, 0); /* one good step since */
    CHECK_F64(first_of(net), -0.5, 0);
    CHECK_OK(scaled_step(net, optim, NAN));
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 0.5, 0);
    CHECK_F64(first_of(net), -1, 0);
    CHECK(!info_of(optim).has_norm);
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 1, 0);
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 1, 0); /* it counts from its last change */
}

TEST_BACKENDS(the_scale_has_defaults_and_an_end)
{
    dp_module *net = begun_net(ctx);
    dp_optim *optim =
        optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5}, .scale = {.dynamic = true}});
    CHECK_F64(info_of(optim).scale, 65536, 0);
    CHECK_OK(scaled_step(net, optim, INFINITY));
    CHECK_F64(info_of(optim).scale, 32768, 0);
    dp_optim_destroy(optim);
    optim =
        optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5},
                                        .scale = {.dynamic = true, .scale = 2e38, .interval = 1}});
    CHECK_OK(dp_optim_step(optim));
    CHECK_F64(info_of(optim).scale, 2e38, 0); /* no f32 is twice that */
    for (int i = 0; i < 300; i++)
        CHECK_OK(scaled_step(net, optim, INFINITY));
    double least = info_of(optim).scale / (double)FLT_MIN;
    CHECK(least >= 1 && least < 2); /* what is divided by it is an f32 */
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(first_of(net), 0.5, 1e-6);
    CHECK_INT(info_of(optim).skip_count, 300);
    net_put(net, false, beginning);
    dp_optim_destroy(optim);
    optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5}, .scale = {.scale = 128}});
    CHECK_OK(scaled_step(net, optim, INFINITY));
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_F64(info_of(optim).scale, 128, 0);
    CHECK_F64(first_of(net), 0.5, 0);
    CHECK_INT(info_of(optim).skip_count, 1);
    dp_optim_destroy(optim);
    optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5}, .scale = {.scale = 0x1p-30}});
    float large[TORCH_ALL] = {0x1p99f};
    net_put(net, true, large);
    CHECK_OK(dp_optim_step(optim));
    CHECK_F64(first_of(net), 0.5, 0);
    CHECK_INT(info_of(optim).skip_count, 1);
}

/* Limits are of gradients that are divided by it. */
TEST_BACKENDS(clipping_knows_the_scale)
{
    float grads[TORCH_ALL] = {3 * 64, 0, 0, 0, 0, 4 * 64, 0}, got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(
        net, (dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 64}, .clip = {.norm = 1}});
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    CHECK(info_of(optim).has_norm);
    CHECK_F64(info_of(optim).grad_norm, 5, 1e-12);
    net_pull(net, false, got);
    CHECK_F64(got[0], 1 - 0.6, 1e-6);
    CHECK_F64(got[5], -0.5 - 0.8, 1e-6);
    dp_optim_destroy(optim);
    net_put(net, false, beginning);
    optim = optim_of(
        net, (dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 64}, .clip = {.value = 3.5}});
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    net_pull(net, false, got);
    CHECK_F64(got[0], 1 - 3, 0);
    CHECK_F64(got[5], -0.5 - 3.5, 0);
    grads[5] = INFINITY; /* which the limit would hide */
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    CHECK_INT(info_of(optim).skip_count, 1);
}

TEST_BACKENDS(gradients_are_divided_once)
{
    float grads[TORCH_ALL] = {16, -8, 0, 0, 0, 0, 0}, got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(
        net, (dp_optim_config){.hyper = {.lr = 1}, .scale = {.dynamic = true, .scale = 8}});
    net_put(net, true, grads);
    CHECK_OK(dp_optim_unscale(optim));
    net_pull(net, true, got);
    CHECK_F64(got[0], 2, 0);
    CHECK_F64(got[1], -1, 0);
    CHECK_F64(info_of(optim).loss_factor, 1, 0); /* of what is added to them */
    CHECK_F64(info_of(optim).scale, 8, 0);
    CHECK_ERROR(dp_optim_unscale(optim), DP_ERR_STATE,
                "dp_optim_unscale: gradients of this step were divided by the scale already");
    CHECK_OK(dp_optim_step(optim));
    CHECK_F64(first_of(net), -1, 0);
    CHECK_F64(info_of(optim).loss_factor, 8, 0);
    grads[0] = INFINITY;
    net_put(net, true, grads);
    CHECK_OK(dp_optim_unscale(optim));
    CHECK_OK(dp_clip_grad_value(net, 1)); /* what was seen is not forgotten */
    CHECK_OK(dp_optim_step(optim));
    CHECK_F64(first_of(net), -1, 0);
    CHECK_F64(info_of(optim).scale, 4, 0);
    net_put(net, true, beginning);
    CHECK_OK(dp_optim_unscale(optim)); /* of the next step, again */
    dp_optim_destroy(optim);
    optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}});
    CHECK_ERROR(dp_optim_unscale(optim), DP_ERR_STATE, "losses are not scaled");
}

/* 2^-28, which is no f16, times 2^28. */
TEST_BACKENDS(small_gradients_of_halves_do_not_vanish)
{
    for (int masters = 0; masters < 2; masters++) {
        const float grads[TORCH_ALL] = {ldexpf(1, -14)};
        dp_module *net = bare_net(ctx, DP_F16);
        net_put(net, false, beginning);
        dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = ldexp(1, 28)},
                                                          .scale = {.scale = ldexp(1, 14)},
                                                          .masters = masters == 1});
        net_put(net, true, grads);
        CHECK_ERROR(dp_optim_unscale(optim), DP_ERR_UNSUPPORTED,
                    "dp_optim_unscale: the gradient of 'bias' is f16, in which small");
        CHECK_OK(dp_optim_step(optim));
        CHECK_F64(first_of(net), 0, 0);
        dp_optim_destroy(optim);
        CHECK_OK(dp_module_destroy(net));
        net = bare_net(ctx, DP_BF16); /* in which they do not */
        optim = optim_of(net, (dp_optim_config){.hyper = {.lr = ldexp(1, 28)},
                                                .scale = {.scale = ldexp(1, 14)}});
        net_put(net, true, grads);
        CHECK_OK(dp_optim_unscale(optim));
        CHECK_OK(dp_optim_step(optim));
        CHECK_F64(first_of(net), -1, 0);
        dp_optim_destroy(optim);
    }
}

TEST_BACKENDS(the_scale_is_kept)
{
    const dp_optim_config config = {.hyper = {.lr = 1},
                                    .scale = {.dynamic = true, .scale = 4, .interval = 3}};
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, config), *other = optim_of(net, config);
    dp_value saved;
    CHECK_OK(scaled_step(net, optim, INFINITY));
    CHECK_OK(scaled_step(net, optim, 1));
    CHECK_OK(dp_optim_progress(optim, 5, -1));
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_OK(dp_optim_load(other, saved));
    CHECK_INT(info_of(other).done, 5);
    CHECK_INT(info_of(other).step_count, 1);
    CHECK_INT(info_of(other).skip_count, 1);
    CHECK_F64(info_of(other).scale, 2, 0);
    CHECK_OK(scaled_step(net, other, 1));
    CHECK_F64(info_of(other).scale, 2, 0);
    CHECK_OK(scaled_step(net, other, 1));
    CHECK_F64(info_of(other).scale, 4, 0);
    CHECK_OK(dp_optim_unscale(optim));
    CHECK_OK(dp_optim_load(optim, saved)); /* nothing has been divided in what comes next */
    CHECK_OK(dp_optim_unscale(optim));
    dp_optim_destroy(other);
    other = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 64}});
    CHECK_OK(dp_optim_load(other, saved));
    CHECK_F64(info_of(other).scale, 64, 0);
}

/* ---- kept and brought back ------------------------------------------------------------------- */

TEST_BACKENDS(training_goes_on_where_it_stopped)
{
    float want[TORCH_ALL], got[TORCH_ALL];
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const dp_optim_config config = {.rule = rules[i].rule(),
                                        .hyper = rules[i].hyper,
                                        .schedule = {.decay = DP_DECAY_LINEAR, .total = 30}};
        dp_value saved;
        dp_module *net = begun_net(ctx), *again = begun_net(ctx);
        dp_optim *optim = optim_of(net, config), *other = optim_of(again, config);
        some_steps(net, optim, 0, 10);
        CHECK_OK(dp_optim_save(optim, scope, &saved));
        net_pull(net, false, got);
        some_steps(net, optim, 10, 20);
        net_pull(net, false, want);
        net_put(again, false, got);
        CHECK_OK(dp_optim_load(other, saved));
        CHECK_INT(info_of(other).step_count, 10);
        some_steps(again, other, 10, 20);
        net_pull(again, false, got);
        CHECK_BYTES(got, want, sizeof got);
        dp_optim_destroy(optim);
        dp_optim_destroy(other);
        CHECK_OK(dp_module_destroy(net));
        CHECK_OK(dp_module_destroy(again));
    }
}

/* What is saved is a copy, and stays; what is viewed is the state, and becomes the next one. */
TEST_BACKENDS(views_are_of_the_state_itself)
{
    static char before[TREE_TEXT], after[TREE_TEXT];
    dp_value saved, viewed;
    const dp_tensor *view;
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 1}});
    some_steps(net, optim, 0, 3);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_OK(dp_optim_view(optim, scope, &viewed));
    snprintf(before, sizeof before, "%s", tree_text(ctx, saved));
    CHECK_TREE(ctx, viewed, before);
    some_steps(net, optim, 3, 4);
    CHECK_TREE(ctx, saved, before);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    snprintf(after, sizeof after, "%s", tree_text(ctx, dp_get(saved, "state")));
    CHECK_TREE(ctx, dp_get(viewed, "state"), after);
    CHECK(strstr(before, after) == NULL);
    view = dp_at(dp_at(dp_get(viewed, "state"), 0), 0).as.t;
    CHECK(view->read_only);
    CHECK(memcmp(&view->device, &(dp_device){0, 0}, sizeof view->device) != 0);
}

TEST_BACKENDS(checkpoint_that_does_not_fit_changes_nothing)
{
    dp_value saved, state, more;
    dp_module *net = begun_net(ctx);
    const dp_optim_config config = {.hyper = {.lr = 0.5, .momentum = 0.5}};
    dp_optim *optim = optim_of(net, config);
    dp_optim *adam = optim_of(net, (dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 1}});
    const dp_tensor small = dp_wrap(&(float){1}, DP_F32, 1, (const int64_t[]){1});
    some_steps(net, optim, 0, 3);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    state = dp_get(saved, "state");
    CHECK_ERROR(dp_optim_load(adam, saved), DP_ERR_MISMATCH,
                "dp_optim_load: the rule is 'adamw', saved 'sgd'");
    CHECK_ERROR(dp_optim_load(optim, dp_none()), DP_ERR_MISMATCH, "the rule is 'sgd', saved ''");
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "steps", dp_none())),
                DP_ERR_MISMATCH, "'steps' is missing, or not a count");
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "done", dp_int(-1))),
                DP_ERR_MISMATCH, "'done' is missing");
    const dp_value items[] = {dp_int(1), dp_int(2), dp_int(3)};
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "state",
                                                   dp_list_make(scope, DP_LIST, items, 3))),
                DP_ERR_MISMATCH, "tensors of state, 0 were saved");
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "steps", dp_int(INT64_MAX))),
                DP_ERR_MISMATCH, "'steps' is missing, or not a count");
    static const double no_scales[] = {0, -1, (double)NAN, HUGE_VAL, 1e-39, 1e39};
    for (int i = 0; i < 6; i++)
        CHECK_ERROR(
            dp_optim_load(optim, tree_replaced(scope, saved, "scale", dp_float(no_scales[i]))),
            DP_ERR_MISMATCH, "'scale' is missing, or not from 1.17549e-38 to");
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "scale", dp_int(1))),
                DP_ERR_MISMATCH, "'scale' is missing");
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "state", dp_none())),
                DP_ERR_MISMATCH, "'bias' has 1 tensors of state, 0 were saved");
    dp_tensor odd = *dp_at(dp_get(state, "bias"), 0).as.t;
    odd.shape[1] = 9; /* which is no dim of it */
    more = tree_replaced(scope, state, "bias", DP_LIST_OF(scope, dp_of(scope, &odd)));
    CHECK_OK(dp_optim_load(optim, tree_replaced(scope, saved, "state", more)));
    more = tree_replaced(scope, state, "bias", DP_LIST_OF(scope, dp_of(scope, &small)));
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "state", more)), DP_ERR_MISMATCH,
                "dim 0 of the state of 'bias' is 3, saved 1");
    const dp_pair three[] = {{"bias", dp_get(state, "bias")},
                             {"layer.weight", dp_get(state, "layer.weight")},
                             {"other", dp_none()}};
    more = dp_dict_make(scope, three, 3);
    CHECK_ERROR(dp_optim_load(optim, tree_replaced(scope, saved, "state", more)), DP_ERR_MISMATCH,
                "2 parameters, saved 3");
    CHECK_INT(info_of(optim).step_count, 3);
    CHECK_OK(dp_optim_load(optim, saved));
}

/* Turned around, it has to be put in order first: for that there may be no memory. */
TEST(state_that_is_no_longer_in_order)
{
    test_allocator counter = {0};
    dp_config with_counter = {
        .device_count = 1, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    dp_value saved;
    dp_tensor turned;
    dp_status status = DP_ERR_NO_MEMORY;
    CHECK_OK(dp_open(&with_counter, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1, .momentum = 0.5}});
    some_steps(net, optim, 0, 1);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    dp_value state = dp_get(saved, "state");
    const dp_tensor *weight = dp_at(dp_get(state, "layer.weight"), 0).as.t;
    CHECK_OK(dp_transpose(weight, 0, 1, &turned));
    state = tree_replaced(scope, state, "layer.weight", DP_LIST_OF(scope, dp_of(scope, &turned)));
    dp_value other =
        tree_replaced(scope, tree_replaced(scope, saved, "state", state), "steps", dp_int(9));
    for (size_t at = 1; status != DP_OK; at++) {
        CHECK_INT(info_of(optim).step_count, 1);
        counter.fail_at = counter.call_count + at;
        counter.fail_count = 0;
        status = dp_optim_load(optim, other);
        CHECK_STATUS(status, counter.fail_count > 0 ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK(at > 1 || status != DP_OK);
    }
    counter.fail_at = 0;
    CHECK_INT(info_of(optim).step_count, 9);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    const float *was = weight->data;
    const float *is = dp_at(dp_get(dp_get(saved, "state"), "layer.weight"), 0).as.t->data;
    for (int i = 0; i < A; i++)
        CHECK_F64(is[i], was[i % 2 * 2 + i / 2], 0);
    dp_close(ctx);
}

/* ---- several owners -------------------------------------------------------------------------- */

static void owners_step(dp_ctx *ctx, dp_module *par, dp_optim *optim, int step)
{
    enum { ROWS = 16 };
    float x[ROWS * NET_IN];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass = NULL;
    dp_value out;
    for (int i = 0; i < ROWS * NET_IN; i++)
        x[i] = (float)((i * 5 + step * 3) % 11 - 5) / 8;
    dp_tensor data = dp_wrap(x, DP_F32, 2, (const int64_t[]){ROWS, NET_IN});
    CHECK_OK(dp_invoke(par, scope, "forward", DP_LIST_OF(scope, dp_of(scope, &data)), dp_none(),
                       NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, out, NULL));
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_wait(ctx));
    dp_scope_end(scope);
}

/* Steps of a wrapper are those of a module alone. */
static void check_owners(dp_ctx *ctx, dp_module *net, dp_module *par)
{
    static const net_shape shape = {0};
    float alone[NET_PARAMS], together[NET_PARAMS];
    const dp_optim_config config = {
        .rule = dp_adamw(), .hyper = {.lr = 0.01}, .clip = {.norm = 0.5}};
    dp_module *one = net_create(ctx, &shape, 0);
    dp_optim *first = optim_of(one, config), *all = optim_of(par, config);
    for (int step = 0; step < 5; step++) {
        owners_step(ctx, one, first, step);
        owners_step(ctx, par, all, step);
        CHECK_F64(info_of(all).grad_norm, info_of(first).grad_norm,
                  1e-5 * info_of(first).grad_norm);
    }
    net_numbers(ctx, one, false, alone);
    net_numbers(ctx, net, false, together);
    for (int i = 0; i < NET_PARAMS; i++)
        CHECK_F64(together[i], alone[i], 1e-4);
    dp_optim_destroy(first);
    dp_optim_destroy(all);
}

/* Each device steps its own parameters, and all have the same; or all follow the first. */
TEST_BACKENDS(every_owner_is_stepped)
{
    static const net_shape shape = {0};
    dp_module *net = net_create(ctx, &shape, 0), *par = NULL;
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    check_owners(ctx, net, par);
    CHECK_OK(dp_params_compare(par));
    net = net_create(ctx, &shape, 0);
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    check_owners(ctx, net, par);
}

/* ---- little to do ---------------------------------------------------------------------------- */

TEST_BACKENDS(nothing_to_train_with_a_scale)
{
    static const dp_method methods[] = {{"forward", one_forward}, {"backward", no_gradient}};
    static const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}, .frozen = true};
    const dp_module_config config = {
        .name = "one", .methods = methods, .method_count = 2, .params = &param, .param_count = 1};
    dp_module *net = NULL;
    dp_value log;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 8}});
    dp_value data = DP_LIST_OF(scope, tree_of(scope, "f32[16]"));
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_train_step(net, scope, data, optim, &log));
    CHECK_INT(info_of(optim).step_count, 2);
}

/* ---- functions of the user's that fail ------------------------------------------------------- */

static dp_status tidy_failure(dp_module *module)
{
    dp_scope *temp = dp_scope_begin(dp_module_ctx(module));
    TRY(dp_scope_check(temp));
    dp_status status = dp_error(DP_ERR_USER, "the learning rate is out of paper");
    dp_scope_end(temp);
    return status;
}

static dp_status failing_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)optim, (void)pass;
    return tidy_failure(module);
}

static dp_status failing_update(dp_optim *optim, dp_module *module)
{
    (void)optim;
    return tidy_failure(module);
}

TEST_BACKENDS(cleanup_after_a_failure_keeps_the_sentence)
{
    static const dp_optim_ops begins = {
        .head = DP_TABLE(dp_optim_ops), .begin = failing_begin, .update = failing_update};
    static const dp_optim_ops updates = {.head = DP_TABLE(dp_optim_ops), .update = failing_update};
    dp_optim one = {&begins}, other = {&updates};
    dp_module *net = one_net(ctx);
    dp_value log, data = DP_LIST_OF(scope, tree_of(scope, "f32[16]"));
    CHECK_ERROR(dp_train_step(net, scope, data, &one, &log), DP_ERR_USER,
                "dp_train_step: the learning rate is out of paper");
    CHECK_ERROR(dp_train_step(net, scope, data, &other, &log), DP_ERR_USER,
                "dp_train_step: the learning rate is out of paper");
}

/* ---- bad input ------------------------------------------------------------------------------- */

static int many_states(const dp_hyper *hyper)
{
    (void)hyper;
    return DP_RULE_STATES + 1;
}

static const double less = -1;
static const int64_t falling[] = {5, 7, 6};
static const dp_param_group nameless = {0}, backwards = {.match = "*", .lr_factor = &less};
static const dp_rule old = {.head = {8, DP_LAYOUT}, .step = sum_up},
                     idle = {.head = DP_TABLE(dp_rule)};
static const dp_rule longer = {.head = {sizeof longer + 8, 1}, .step = sum_up};
static const dp_rule newer = {.head = {sizeof newer, 2}, .step = sum_up};
static const dp_rule unnamed = {.head = DP_TABLE(dp_rule), .step = sum_up};
static const dp_rule greedy = {
    .head = DP_TABLE(dp_rule), .name = "greedy", .state_count = many_states, .step = sum_up};

typedef struct refusal {
    const char *text;
    dp_optim_config config;
} refusal;

/* clang-format off */
static const refusal of_sgd[] = {
    {"dp_optim_create: lr is 0", {.hyper = {.lr = 0}}},
    {"lr is -1", {.hyper = {.lr = -1}}},
    {"lr is nan", {.hyper = {.lr = (double)NAN}}},
    {"lr is inf", {.hyper = {.lr = HUGE_VAL}}},
    {"weight_decay is -1", {.hyper = {.lr = 1, .weight_decay = -1}}},
    {"weight_decay is nan", {.hyper = {.lr = 1, .weight_decay = (double)NAN}}},
    {"weight_decay is inf", {.hyper = {.lr = 1, .weight_decay = HUGE_VAL}}},
    {"beta1, beta2 and eps are 0.9, 0 and 0, and not for SGD", {.hyper = {.lr = 1, .beta1 = 0.9}}},
    {"are 0, 0.5 and 0, and not for SGD", {.hyper = {.lr = 1, .beta2 = 0.5}}},
    {"are 0, 0 and -1, and not for SGD", {.hyper = {.lr = 1, .eps = -1}}},
    {"momentum is 1", {.hyper = {.lr = 1, .momentum = 1}}},
    {"momentum is -0.5", {.hyper = {.lr = 1, .momentum = -0.5}}},
    {"dampening is inf", {.hyper = {.lr = 1, .dampening = HUGE_VAL}}},
    {"nesterov needs", {.hyper = {.lr = 1, .nesterov = true}}},
    {"nesterov needs",
     {.hyper = {.lr = 1, .momentum = 0.5, .dampening = 0.5, .nesterov = true}}},
    {"nesterov needs",
     {.hyper = {.lr = 1, .momentum = 0.5, .dampening = -0.5, .nesterov = true}}},
    {"warm-up of -1 steps", {.hyper = {.lr = 1}, .schedule = {.warmup = -1}}},
    {"from a factor of 2", {.hyper = {.lr = 1}, .schedule = {.start_factor = 2}}},
    {"from a factor of -1", {.hyper = {.lr = 1}, .schedule = {.start_factor = -1}}},
    {"by step 0", {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_LINEAR}}},
    {"after 5 steps",
     {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_COSINE, .warmup = 5, .total = 5}}},
    {"to a factor of -1",
     {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_LINEAR, .total = 5, .end_factor = -1}}},
    {"to a factor of inf",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_LINEAR, .total = 5, .end_factor = HUGE_VAL}}},
    {"times 1 every 0 steps",
     {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_STEPS, .gamma = 1}}},
    {"times 0 every 1 steps",
     {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_STEPS, .every = 1}}},
    {"times inf every 1 steps",
     {.hyper = {.lr = 1}, .schedule = {.decay = DP_DECAY_STEPS, .every = 1, .gamma = HUGE_VAL}}},
    {"times 0.5 every 2 steps or at 1 milestones, one of both",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_STEPS, .gamma = 0.5, .every = 2, .milestones = falling,
                   .milestone_count = 1}}},
    {"times 0.5 every -2 steps",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_STEPS, .gamma = 0.5, .every = -2, .milestones = falling,
                   .milestone_count = 1}}},
    {"times 0 every 0 steps or at 1 milestones",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_STEPS, .milestones = falling, .milestone_count = 1}}},
    {"schedule.milestones is NULL",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_STEPS, .gamma = 0.5, .milestone_count = 1}}},
    {"schedule.milestones[2] is 6, which is below the one before, 7",
     {.hyper = {.lr = 1},
      .schedule = {.decay = DP_DECAY_STEPS, .gamma = 0.5, .milestones = falling,
                   .milestone_count = 3}}},
    {"schedule.milestones[0] is 5, which is below warmup, 6",
     {.hyper = {.lr = 1},
      .schedule = {.warmup = 6, .decay = DP_DECAY_STEPS, .gamma = 0.5, .milestones = falling,
                   .milestone_count = 1}}},
    {"schedule has milestones, but decay is not DP_DECAY_STEPS",
     {.hyper = {.lr = 1}, .schedule = {.milestones = falling, .milestone_count = 1}}},
    {"schedule.decay is 9", {.hyper = {.lr = 1}, .schedule = {.decay = (dp_decay)9}}},
    {"accumulate is -1", {.hyper = {.lr = 1}, .accumulate = -1}},
    {"compute_dtype is 4, not a floating dtype",
     {.hyper = {.lr = 1}, .compute_dtype = DP_I64}},
    {"clip.norm is -1", {.hyper = {.lr = 1}, .clip = {.norm = -1}}},
    {"clip.value -1", {.hyper = {.lr = 1}, .clip = {.value = -1}}},
    {"clip.norm is 1 and clip.value 1", {.hyper = {.lr = 1}, .clip = {.norm = 1, .value = 1}}},
    {"p is -2", {.hyper = {.lr = 1}, .clip = {.norm = 1, .p = -2}}},
    {"scale.scale is -1", {.hyper = {.lr = 1}, .scale = {.scale = -1}}},
    {"scale.scale is 1e+39", {.hyper = {.lr = 1}, .scale = {.scale = 1e39}}},
    {"scale.scale is 1e-39, not from 1.17549e-38 to 3.40282e+38",
     {.hyper = {.lr = 1}, .scale = {.scale = 1e-39}}},
    {"p is 0", {.hyper = {.lr = 1}, .clip = {.norm = 1, .p = DP_ZERO}}},
    {"p is nan", {.hyper = {.lr = 1}, .clip = {.norm = 1, .p = (double)NAN}}},
    {"clip.norm is nan", {.hyper = {.lr = 1}, .clip = {.norm = (double)NAN}}},
    {"scale.scale is 0", {.hyper = {.lr = 1}, .scale = {.scale = DP_ZERO}}},
    {"scale.scale is 0", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .scale = DP_ZERO}}},
    {"times 0 after 2000 steps",
     {.hyper = {.lr = 1}, .scale = {.dynamic = true, .growth = DP_ZERO}}},
    {"or times 0,", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .backoff = DP_ZERO}}},
    {"scale.scale is nan", {.hyper = {.lr = 1}, .scale = {.scale = (double)NAN}}},
    {"times 1 after 2000 steps", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .growth = 1}}},
    {"times inf after", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .growth = HUGE_VAL}}},
    {"times 2 after -1 steps", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .interval = -1}}},
    {"or times 1,", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .backoff = 1}}},
    {"or times -1,", {.hyper = {.lr = 1}, .scale = {.dynamic = true, .backoff = -1}}},
    {"groups is NULL", {.hyper = {.lr = 1}, .group_count = 1}},
    {"groups[0].match is NULL", {.hyper = {.lr = 1}, .groups = &nameless, .group_count = 1}},
    {"groups[0] ('*'): factors are -1 and 1",
     {.hyper = {.lr = 1}, .groups = &backwards, .group_count = 1}},
    {"rule has no step", {.rule = &old, .hyper = {.lr = 1}}},
    {"rule has no step", {.rule = &idle, .hyper = {.lr = 1}}},
    {"rule is a table of layout 1 and size ", {.rule = &longer, .hyper = {.lr = 1}}},
    {"rule is a table of layout 2 and size ", {.rule = &newer, .hyper = {.lr = 1}}},
    {"rule has no name", {.rule = &unnamed, .hyper = {.lr = 1}}},
    {"rule 'greedy' needs 5 states, the limit is 4", {.rule = &greedy, .hyper = {.lr = 1}}},
};
static const refusal of_adam[] = {
    {"momentum and dampening are 0.9 and 0, nesterov 0, and not for Adam",
     {.hyper = {.lr = 1, .momentum = 0.9}}},
    {"are 0 and -1, nesterov 0, and not for Adam", {.hyper = {.lr = 1, .dampening = -1}}},
    {"are 0 and 0, nesterov 1, and not for Adam", {.hyper = {.lr = 1, .nesterov = true}}},
    {"betas are nan and 0.999", {.hyper = {.lr = 1, .beta1 = (double)NAN}}},
    {"betas are 0.9 and -1e-290", {.hyper = {.lr = 1, .beta2 = -1e-290}}},
    {"betas are 1 and 0.999, not both from 0 to below 1",
     {.hyper = {.lr = 1, .beta1 = 1}}},
    {"betas are 0.9 and -1", {.hyper = {.lr = 1, .beta2 = -1}}},
    {"betas are 0.9 and 1", {.hyper = {.lr = 1, .beta2 = 1}}},
    {"eps is -1", {.hyper = {.lr = 1, .eps = -1}}},
    {"eps is inf", {.hyper = {.lr = 1, .eps = HUGE_VAL}}},
};
/* clang-format on */

static void check_refused(dp_module *net, const dp_rule *rule, const refusal *row)
{
    dp_optim *optim = NULL;
    dp_optim_config config = row->config;
    config.rule = rule != NULL ? rule : config.rule;
    CHECK_ERROR(dp_optim_create(net, &config, &optim), DP_ERR_INVALID, row->text);
    CHECK(optim == NULL);
}

TEST_BACKENDS(numbers_that_make_no_sense)
{
    dp_module *net = begun_net(ctx);
    for (size_t i = 0; i < sizeof of_sgd / sizeof of_sgd[0]; i++)
        check_refused(net, NULL, &of_sgd[i]);
    for (size_t i = 0; i < sizeof of_adam / sizeof of_adam[0]; i++) {
        check_refused(net, dp_adam(), &of_adam[i]);
        check_refused(net, dp_adamw(), &of_adam[i]);
    }
}

/* ---- zeros that are meant -------------------------------------------------------------------- */

static dp_hyper seen_hyper;

static dp_status with_half(dp_hyper *hyper)
{
    hyper->beta1 = dp_or(hyper->beta1, 0.5);
    hyper->beta2 = dp_or(hyper->beta2, 0.5);
    return DP_OK;
}

static dp_status sees(const dp_rule_args *args)
{
    seen_hyper = args->hyper;
    return DP_OK;
}

TEST(rules_are_told_zeros_that_are_zeros)
{
    static const dp_rule rule = {
        .head = DP_TABLE(dp_rule), .name = "sees", .check = with_half, .step = sees};
    const dp_hyper hyper = {.lr = DP_ZERO,
                            .weight_decay = DP_ZERO,
                            .momentum = DP_ZERO,
                            .dampening = DP_ZERO,
                            .beta1 = DP_ZERO};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.rule = &rule, .hyper = hyper});
    CHECK_OK(dp_optim_step(optim));
    const double zeros[] = {seen_hyper.lr, seen_hyper.weight_decay, seen_hyper.momentum,
                            seen_hyper.dampening, seen_hyper.beta1};
    for (int i = 0; i < 5; i++)
        CHECK(!signbit(zeros[i]) && fpclassify(zeros[i]) == FP_ZERO);
    CHECK_F64(seen_hyper.beta2, 0.5, 0);
    CHECK_F64(info_of(optim).lr, 0, 0);
    CHECK_F64(info_of(optim).momentum, 0, 0);
    dp_optim_destroy(optim);
    optim =
        optim_of(net, (dp_optim_config){.rule = dp_adam(), .hyper = {.lr = 1, .beta1 = DP_ZERO}});
    CHECK_F64(info_of(optim).momentum, 0, 0);
    dp_close(ctx);
}

/* Without eps a step is lr long, however small the gradient is. */
TEST_BACKENDS(eps_may_be_zero)
{
    float grads[TORCH_ALL], got[TORCH_ALL];
    dp_module *net = begun_net(ctx);
    dp_optim *optim =
        optim_of(net, (dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 0.5, .eps = DP_ZERO}});
    for (int k = 0; k < TORCH_ALL; k++)
        grads[k] = k % 2 == 0 ? 1e-12f : -1e-12f;
    net_put(net, true, grads);
    CHECK_OK(dp_optim_step(optim));
    net_pull(net, false, got);
    for (int k = 0; k < TORCH_ALL; k++)
        CHECK_F64(got[k], (double)beginning[k] - (k % 2 == 0 ? 0.5 : -0.5), 1e-5);
}

TEST_BACKENDS(all_may_be_clipped_away)
{
    static const dp_clip clips[] = {{.norm = DP_ZERO}, {.value = DP_ZERO}};
    float got[TORCH_ALL];
    double norm = 0;
    dp_module *net = begun_net(ctx);
    for (int i = 0; i < 2; i++) {
        dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .clip = clips[i]});
        some_steps(net, optim, 0, 3);
        net_pull(net, false, got);
        for (int k = 0; k < TORCH_ALL; k++)
            CHECK_F64(got[k], beginning[k], 0);
        CHECK_INT(info_of(optim).step_count, 3);
        CHECK(info_of(optim).has_norm == (i == 0));
        dp_optim_destroy(optim);
    }
    net_put(net, true, beginning);
    CHECK_OK(dp_clip_grad_norm(net, DP_ZERO, 2, &norm));
    CHECK(norm > 3);
    net_pull(net, true, got);
    net_put(net, true, beginning);
    CHECK_OK(dp_clip_grad_value(net, DP_ZERO));
    for (int k = 0; k < TORCH_ALL; k++)
        CHECK_F64(got[k], 0, 0);
    net_pull(net, true, got);
    for (int k = 0; k < TORCH_ALL; k++)
        CHECK_F64(got[k], 0, 0);
}

TEST_BACKENDS(calls_that_make_no_sense)
{
    static const dp_optim_ops ops = {.head = DP_TABLE(dp_optim_ops)};
    dp_optim stranger = {&ops}, *optim = NULL;
    dp_optim_info info;
    dp_value value;
    double number;
    dp_pass_config pass = {0};
    dp_module *net = begun_net(ctx), *other = begun_net(ctx);
    const dp_optim_config config = {.hyper = {.lr = 1}};
    CHECK_ERROR(dp_optim_create(NULL, &config, &optim), DP_ERR_INVALID, "not a module");
    CHECK_ERROR(dp_optim_create(net, NULL, &optim), DP_ERR_INVALID, "config is NULL");
    CHECK_ERROR(dp_optim_create(net, &config, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optim_step(NULL), DP_ERR_INVALID, "dp_optim_step: not an optimizer");
    CHECK_ERROR(dp_optim_step(&stranger), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_unscale(&stranger), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_progress(&stranger, 0, 0), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_info_get(&stranger, &info), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_lr(NULL, 0, &number), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_save(&stranger, scope, &value), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_load(&stranger, dp_none()), DP_ERR_INVALID, "not an optimizer");
    dp_optim_destroy(NULL);
    optim = optim_of(net, config);
    CHECK_ERROR(dp_optim_info_get(optim, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optim_lr(optim, 0, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optim_save(optim, scope, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optim_save(optim, NULL, &value), DP_ERR_INVALID, "scope");
    CHECK_ERROR(dp_optim_view(optim, scope, NULL), DP_ERR_INVALID, "dp_optim_view: out is NULL");
    CHECK_ERROR(dp_optim_view(&stranger, scope, &value), DP_ERR_INVALID, "not an optimizer");
    CHECK_ERROR(dp_optim_progress(optim, -1, 3), DP_ERR_INVALID, "-1 of 3 are done");
    CHECK_ERROR(dp_optim_progress(optim, 4, 3), DP_ERR_INVALID, "4 of 3 are done");
    CHECK_ERROR(dp_optim_progress(optim, 0, -2), DP_ERR_INVALID, "0 of -2 are done");
    CHECK_ERROR(dp_optim_progress(optim, INT64_MAX, -1), DP_ERR_INVALID, "of -1 are done");
    CHECK_ERROR(optim->ops->begin(optim, other, &pass), DP_ERR_INVALID,
                "the optimizer was made for 'net', not for 'net'");
    CHECK_ERROR(dp_grad_norm(net, 0, &number), DP_ERR_INVALID, "dp_grad_norm: p is 0");
    CHECK_ERROR(dp_grad_norm(net, 2, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_grad_norm(NULL, 2, &number), DP_ERR_INVALID, "not a module");
    CHECK_ERROR(dp_clip_grad_norm(net, 0, 2, NULL), DP_ERR_INVALID, "most is 0");
    CHECK_ERROR(dp_clip_grad_norm(net, 1, (double)NAN, NULL), DP_ERR_INVALID, "p is nan");
    CHECK_ERROR(dp_clip_grad_value(net, -1), DP_ERR_INVALID, "most is -1");
    CHECK_ERROR(dp_clip_grad_value(net, (double)NAN), DP_ERR_INVALID, "most is nan");
}

/* Those before them are not clipped either. */
TEST(parameters_that_are_no_numbers_of_a_floating_dtype)
{
    const dp_param_config params[] = {{.name = "w"}, {.name = "ids", .dtype = DP_I64}};
    static const char says[] = "parameter 'ids' is i64, not a floating dtype";
    dp_ctx *ctx = NULL;
    dp_module *net = NULL;
    dp_optim *optim = NULL;
    dp_tensor data, grad;
    double got = 0;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "n", .params = params, .param_count = 2}, &net));
    CHECK_ERROR(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &optim),
                DP_ERR_INVALID, says);
    CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    CHECK_OK(dp_fill(ctx, &grad, dp_float(8)));
    CHECK_ERROR(dp_clip_grad_norm(net, 1, 2, NULL), DP_ERR_INVALID, says);
    CHECK_ERROR(dp_clip_grad_value(net, 1), DP_ERR_INVALID, says);
    CHECK_ERROR(dp_grad_norm(net, 2, &got), DP_ERR_INVALID, says);
    CHECK_OK(dp_item(ctx, dp_of(scope, &grad), &got));
    CHECK_F64(got, 8, 0);
    dp_close(ctx);
}

TEST(a_net_without_parameters)
{
    dp_ctx *ctx = NULL;
    dp_module *net = NULL;
    double norm = 7;
    dp_value saved;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.name = "empty"}, &net));
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1}});
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_grad_norm(net, 2, &norm));
    CHECK_F64(norm, 0, 0);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_OK(dp_optim_load(optim, saved));
    dp_close(ctx);
}

/* NULL is the address of what is not there, so what has no elements has another one. */
static dp_status gap_forward(dp_call *call)
{
    if (dp_param(call, 1) == NULL)
        return dp_error(DP_ERR_STATE, "the parameter has no address");
    return one_forward(call);
}

static dp_status gap_backward(dp_call *call)
{
    if (dp_grad(call, 1) == NULL || dp_grad(call, 2) == NULL)
        return dp_error(DP_ERR_STATE, "the gradient has no address");
    return one_backward(call);
}

TEST_BACKENDS(a_parameter_without_elements_has_an_address_on_each_device)
{
    static const dp_method methods[] = {{"forward", gap_forward}, {"backward", gap_backward}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {1}},
                                             {.name = "gap", .ndim = 1, .shape = {0}},
                                             {.name = "v", .ndim = 1, .shape = {1}}};
    for (int way = 0; way < 4; way++) {
        dp_module *net = NULL;
        dp_value log;
        dp_tensor data;
        CHECK_OK(dp_module_create(
            ctx,
            &(dp_module_config){
                .methods = methods, .method_count = 2, .params = params, .param_count = 3},
            &net));
        dp_module *trained = trained_in_way(net, way);
        dp_optim *optim = optim_of(trained, (dp_optim_config){.hyper = {.lr = 1}});
        CHECK_OK(dp_train_step(trained, scope, tree_of(scope, "(f32[8],)"), optim, &log));
        for (size_t owner = 0; owner < dp_owner_count(trained); owner++) {
            CHECK_OK(dp_owner_edit(trained, owner, 1, &data, NULL));
            CHECK(data.data != NULL);
        }
        dp_optim_destroy(optim);
    }
}

/* ---- no memory ------------------------------------------------------------------------------- */

/* The calls that need memory. */
static dp_status all_calls(dp_module *net, dp_scope *scope)
{
    static const dp_param_group groups[] = {{.match = "bias"}, {.match = "*"}};
    const dp_optim_config config = {.rule = dp_adamw(),
                                    .hyper = {.lr = 1},
                                    .groups = groups,
                                    .group_count = 2,
                                    .clip = {.norm = 1},
                                    .scale = {.scale = 2},
                                    .masters = true};
    dp_optim *optim = NULL;
    dp_value saved;
    double norm;
    TRY(dp_optim_create(net, &config, &optim));
    TRY(dp_optim_unscale(optim));
    TRY(dp_optim_step(optim));
    TRY(dp_optim_save(optim, scope, &saved));
    TRY(dp_optim_load(optim, saved));
    TRY(dp_grad_norm(net, 3, &norm));
    TRY(dp_clip_grad_norm(net, 1, 2, NULL));
    TRY(dp_clip_grad_value(net, 1));
    dp_optim_destroy(optim);
    return DP_OK;
}

/* poison: each small piece of a scope is an allocation too. */
static void check_each_allocation(dp_dtype dtype, bool poison)
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 2, .poison = poison, .allocator = test_allocator_of(&counter)};
    bool fired = true;
    for (int at = 1; fired; at++) {
        dp_ctx *ctx = NULL;
        counter = (test_allocator){0};
        CHECK_OK(dp_open(&config, &ctx));
        dp_module *net = bare_net(ctx, dtype);
        dp_scope *scope = dp_scope_begin(ctx);
        counter.fail_at = counter.call_count + (size_t)at;
        dp_status status = all_calls(net, scope);
        fired = counter.fail_count > 0;
        CHECK_STATUS(status, fired ? DP_ERR_NO_MEMORY : DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* The same state in tensors that are not dense, each in the first column of another. */
static dp_value in_columns(dp_ctx *ctx, dp_scope *scope, dp_value saved)
{
    dp_value state = dp_get(saved, "state"), lists[TORCH_ALL];
    dp_pair pairs[TORCH_ALL];
    for (size_t i = 0; i < dp_count(state); i++) {
        const dp_tensor *from = dp_at(dp_at(state, i), 0).as.t;
        dp_tensor wide = *from, column;
        wide.shape[from->ndim] = 2;
        CHECK_OK(
            dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, from->ndim + 1, wide.shape, &wide));
        CHECK_OK(dp_select(&wide, -1, 0, &column));
        CHECK_OK(dp_copy(ctx, &column, from, NULL));
        lists[i] = dp_of(scope, &column);
        pairs[i] = (dp_pair){dp_key_at(state, i), dp_list_make(scope, DP_LIST, &lists[i], 1)};
    }
    return tree_replaced(scope, saved, "state", dp_dict_make(scope, pairs, dp_count(state)));
}

TEST(without_memory_to_load_nothing_changes)
{
    static char before[1 << 16];
    test_allocator counter = {0};
    dp_config config = {.poison = true, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    dp_value saved, now;
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = begun_net(ctx);
    dp_optim *optim = optim_of(net, (dp_optim_config){.hyper = {.lr = 0.5, .momentum = 0.5}});
    some_steps(net, optim, 0, 1);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    saved = in_columns(ctx, scope, saved);
    some_steps(net, optim, 1, 3);
    CHECK_OK(dp_optim_save(optim, scope, &now));
    snprintf(before, sizeof before, "%s", tree_text(ctx, now));
    dp_status status = DP_ERR_NO_MEMORY;
    for (size_t at = 1; status != DP_OK; at++) {
        counter.fail_at = counter.call_count + at;
        status = dp_optim_load(optim, saved);
        counter.fail_at = 0;
        CHECK(status == DP_OK || status == DP_ERR_NO_MEMORY);
        CHECK_OK(dp_optim_save(optim, scope, &now));
        CHECK(status == DP_OK || strcmp(tree_text(ctx, now), before) == 0);
    }
    CHECK_STR(tree_text(ctx, dp_get(now, "steps")), "1");
    dp_close(ctx);
}

TEST(every_allocation_fails_once)
{
    check_each_allocation(DP_F32, false);
    check_each_allocation(DP_F32, true);
    check_each_allocation(DP_BF16, true);
}

/* All memory goes back to where the next calls take it from. */
TEST(no_call_keeps_memory)
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 2, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *net = bare_net(ctx, DP_BF16);
    size_t before = 0;
    for (int i = 0; i < 4; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        before = i == 1 ? counter.call_count : before;
        CHECK_OK(all_calls(net, scope));
        dp_scope_end(scope);
    }
    CHECK_INT(counter.call_count, before);
    dp_close(ctx);
}

/* What is kept of many parameters does not fit into memory that a scope has already. */
TEST(every_allocation_of_many_parameters_fails_once)
{
    enum { MANY = 1500 };
    static dp_param_config params[MANY];
    static char of_params[MANY][16];
    test_allocator counter = {0};
    dp_config config = {.device_count = 2, .allocator = test_allocator_of(&counter)};
    bool fired = true;
    for (int i = 0; i < MANY; i++) {
        snprintf(of_params[i], sizeof of_params[i], "parameter %d", i);
        params[i] = (dp_param_config){.name = of_params[i], .ndim = 1, .shape = {1}};
    }
    for (int at = 1; fired; at++) {
        dp_ctx *ctx = NULL;
        dp_module *net = NULL;
        dp_optim *optim = NULL;
        dp_value saved;
        counter = (test_allocator){0};
        CHECK_OK(dp_open(&config, &ctx));
        CHECK_OK(dp_module_create(
            ctx, &(dp_module_config){.name = "net", .params = params, .param_count = MANY}, &net));
        dp_scope *scope = dp_scope_begin(ctx);
        counter.fail_at = counter.call_count + (size_t)at;
        dp_status status = dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &optim);
        if (status == DP_OK)
            status = dp_optim_save(optim, scope, &saved);
        fired = counter.fail_count > 0;
        CHECK(status == DP_OK || status == DP_ERR_NO_MEMORY);
        CHECK(fired || status == DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* ---- after the job has failed ---------------------------------------------------------------- */

static void check_ended(dp_status status)
{
    CHECK_ERROR(status, DP_ERR_ABORTED, "the job");
}

/* Whatever is called says so. None takes the scope that it cannot have for a lack of memory. */
TEST(training_calls_say_that_the_job_has_failed)
{
    dp_ctx *ctx = NULL;
    dp_optim *optim = NULL, *other = NULL;
    dp_average *average = NULL;
    dp_value state, kept, log, out;
    double norm;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = one_net(ctx);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    CHECK_OK(dp_average_create(net, NULL, &average));
    CHECK_OK(dp_optim_save(optim, scope, &state));
    CHECK_OK(dp_module_save(net, scope, &kept));
    log = DP_DICT(scope, {"loss", dp_float(1)});
    dp_abort(ctx, DP_ERR_ABORTED, "the disk is full");
    check_ended(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &other));
    check_ended(dp_optim_step(optim));
    check_ended(dp_optim_save(optim, scope, &out));
    check_ended(dp_optim_load(optim, state));
    check_ended(dp_grad_norm(net, 2, &norm));
    check_ended(dp_clip_grad_norm(net, 1, 2, NULL));
    check_ended(dp_clip_grad_value(net, 1));
    check_ended(dp_log_mean(ctx, scope, log, 1, &out));
    check_ended(dp_average_create(net, NULL, &average));
    check_ended(dp_average_update(average));
    check_ended(dp_average_begin(average));
    check_ended(dp_average_copy(average, net));
    check_ended(dp_average_save(average, scope, &out));
    check_ended(dp_module_load(net, kept, NULL));
    check_ended(dp_file_write(ctx, "no/folder", log));
    check_ended(dp_file_read(ctx, scope, "no/folder", &out));
    check_ended(dp_checkpoint_save(ctx, "no/folder", log));
    check_ended(dp_checkpoint_load(ctx, scope, "no/folder", &out));
    check_ended(dp_self_check(net, dp_none(), NULL, NULL));
    dp_tensor tensor;
    dp_scope *none = dp_scope_begin(ctx);
    check_ended(dp_tensor_new(none, dp_local_device(ctx, 0), DP_F32, 0, NULL, &tensor));
    CHECK_SAYS(dp_last_error(), "scope is NULL, the job had failed before it was begun");
    check_ended(dp_module_save(net, none, &out));
    CHECK_SAYS(dp_last_error(), "scope is NULL, the job had failed before it was begun");
    check_ended(dp_optim_save(optim, none, &out));
    check_ended(dp_average_save(average, none, &out));
    check_ended(dp_file_read(ctx, none, "no/folder", &out));
    dp_close(ctx);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx)); /* with a job of its own */
    CHECK_ERROR(dp_tensor_new(NULL, dp_local_device(ctx, 0), DP_F32, 0, NULL, &tensor),
                DP_ERR_INVALID, "dp_tensor_new: scope is NULL");
    dp_close(ctx);
}

/* ---- the line of progress -------------------------------------------------------------------- */

/* All up to this word: a terminal may hand over what was written in parts. */
static void read_until(int file, char *text, size_t size, const char *word)
{
    size_t used = 0;
    for (text[0] = 0; strstr(text, word) == NULL; text[used] = 0) {
        ssize_t got = read(file, text + used, size - 1 - used);
        CHECK(got > 0);
        used += (size_t)got;
    }
}

/* What three steps say on a stderr of this kind. */
static void check_line(const char *said, bool terminal, double every_s, const char *wants,
                       const char *wants_too)
{
    char text[1024];
    int ends[2], kept = dup(2);
    dp_ctx *ctx = NULL;
    dp_progress progress = {.epoch_count = 2, .step_count = 3, .every_s = every_s};
    if (terminal) {
        ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
        CHECK(ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0);
        ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
    } else {
        CHECK(pipe(ends) == 0);
    }
    CHECK(said == NULL || setenv("DP_PROGRESS", said, 1) == 0);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log = DP_DICT(scope, {"loss", dp_float(0.25)});
    CHECK(dup2(ends[1], 2) == 2);
    dp_progress_step(&progress, ctx, 0, 1, 8, log);
    dp_progress_step(&progress, ctx, 0, 2, 8, dp_none());
    dp_progress_step(&progress, ctx, 1, 3, 8, log);
    dp_progress_end(&progress);
    fprintf(stderr, "end\n");
    CHECK(dup2(kept, 2) == 2);
    read_until(ends[0], text, sizeof text, terminal ? "end\r\n" : "end\n");
    CHECK_SAYS(text, wants);
    CHECK_SAYS(text, wants_too);
    CHECK(*wants_too != '\0' || strstr(text, "epoch") == NULL);
    close(ends[0]);
    close(ends[1]);
    dp_close(ctx);
    unsetenv("DP_PROGRESS");
}

TEST(progress_is_told_to_terminals)
{
    CHECK(unsetenv("DP_PROGRESS") == 0);
    check_line(NULL, false, -1, "end\n", "");
    check_line(NULL, true, -1, "\repoch 1/2  step 1/3  loss 0.25\x1b[K\repoch 1/2  step 2/3  ",
               "\x1b[K\r\nend\r\n");
    check_line("off", true, -1, "end\r\n", "");
    check_line("on", false, DP_ZERO, "epoch 1/2  step 1/3  loss 0.25\nepoch 1/2  step 2/3  ",
               " samples/s  0:00 left\nend\n");
}

/* Hours go by where the first step is said to have been long ago. */
static void tell_hours(dp_ctx *ctx)
{
    const int64_t second = 1000000000;
    dp_progress progress = {.epoch_count = 1, .step_count = 10, .every_s = 500};
    dp_progress_step(&progress, ctx, 0, 1, 8, dp_none());
    dp_progress_step(&progress, ctx, 0, 2, 250, dp_none()); /* too early */
    progress.seen.began_ns -= 1000 * second;
    progress.seen.shown_ns -= 1000 * second;
    dp_progress_step(&progress, ctx, 0, 3, 250, dp_none());
    progress.seen.began_ns -= 4000 * second;
    progress.seen.shown_ns -= 4000 * second;
    dp_progress_step(&progress, ctx, 0, 5, 2000, dp_none());
    progress.seen.began_ns -= 5000 * second;
    progress.seen.shown_ns -= 5000 * second;
    dp_progress_step(&progress, ctx, 0, 7, 123447500, dp_none());
    dp_progress_end(&progress);
    dp_progress_step(&progress, ctx, 0, 6, 8, dp_none()); /* it begins anew */
    dp_progress_end(&progress);
}

/* A tenth of a second changes a digit: a machine that has much else to do is asked once more. */
TEST(progress_tells_how_long_it_takes)
{
    static const char wants[] = "epoch 1/1  step 1/10\n"
                                "epoch 1/1  step 3/10  0.5 samples/s  58:20 left\n"
                                "epoch 1/1  step 5/10  0.5 samples/s  1:44:10 left\n"
                                "epoch 1/1  step 7/10  12345 samples/s  1:23:20 left\n"
                                "epoch 1/1  step 6/10\nend\n";
    char text[1024] = "";
    int ends[2], kept = dup(2);
    dp_ctx *ctx = NULL;
    CHECK(pipe(ends) == 0 && setenv("DP_PROGRESS", "on", 1) == 0);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    for (int i = 0; i < 20 && strcmp(text, wants) != 0; i++) {
        CHECK(dup2(ends[1], 2) == 2);
        tell_hours(ctx);
        fprintf(stderr, "end\n");
        CHECK(dup2(kept, 2) == 2);
        read_until(ends[0], text, sizeof text, "end\n");
    }
    CHECK_STR(text, wants);
    close(ends[0]);
    close(ends[1]);
    dp_close(ctx);
    unsetenv("DP_PROGRESS");
}
