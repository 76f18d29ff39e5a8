/* test_zeroed.c - steps whose kernels make gradients 0 are those after which dp_zero_grad does it:
   the same numbers on a table that knows how and on one that does not. */

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "training.h"

/* ---- two tables ------------------------------------------------------------------------------ */

static dp_device_ops table;                            /* the CPU's, whose kernels are counted */
static atomic_int zeroing, stepping, filling, fail_at; /* which step fails; 0: none */

static dp_status counted_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cpu()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &table;
    return status;
}

static dp_status counted_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    bool steps = args->kernel == DP_KERNEL_SGD || args->kernel == DP_KERNEL_ADAMW;
    /* but for those of a gate, and of limits to clip to */
    filling += args->kernel == DP_KERNEL_FILL && args->count > 1 && args->count < 1 << 16;
    stepping += steps;
    zeroing += steps && (args->flags & DP_KERNEL_ZERO_GRAD) != 0;
    if (steps && fail_at > 0 && --fail_at == 0)
        return dp_error(DP_ERR_NO_MEMORY, "not now");
    return dp_cpu()->kernel(stream, args);
}

static dp_ctx *counted_ctx(bool knows)
{
    static const int devices[] = {0, 0};
    const dp_device_ops *const backends[] = {&table, NULL};
    dp_ctx *ctx = NULL;
    table = *dp_cpu();
    table.open = counted_open;
    table.kernel = counted_kernel;
    table.kernel_flags = knows ? DP_KERNEL_ZERO_GRAD : 0u;
    zeroing = stepping = filling = fail_at = 0;
    CHECK_OK(
        dp_open(&(dp_config){.backends = backends, .device_count = 2, .devices = devices}, &ctx));
    return ctx;
}

/* ---- what a run leaves ----------------------------------------------------------------------- */

enum { STEPS = 4, LOG_MOST = 1 << 19 };

typedef struct trail { /* numbers after each step, and which steps were made by such kernels */
    char bytes[LOG_MOST];
    size_t count;
    bool zeroes[STEPS];
} trail;

static void trail_add(trail *t, const void *bytes, size_t count)
{
    CHECK(t->count + count <= LOG_MOST);
    if (count > 0)
        memcpy(t->bytes + t->count, bytes, count);
    t->count += count;
}

/* Parameters, which gradients there are, and that these are 0. */
static void trail_net(trail *t, dp_module *net)
{
    size_t count = dp_module_param_count(net);
    bool *used = test_room(count * sizeof *used);
    CHECK_OK(dp_grads_used(net, used, count));
    trail_add(t, used, count * sizeof *used);
    for (size_t i = 0; i < count; i++) {
        dp_param_info info;
        dp_tensor grad;
        CHECK_OK(dp_module_param(net, i, &info));
        CHECK_OK(dp_owner_grad(net, 0, i, &grad));
        trail_add(t, info.data.data,
                  (size_t)dp_tensor_count(&info.data) * dp_dtype_bytes((dp_dtype)info.data.dtype));
        const char *bytes = grad.data;
        size_t all = (size_t)dp_tensor_count(&grad) * dp_dtype_bytes((dp_dtype)grad.dtype);
        for (size_t k = 0; k < all; k++)
            CHECK_INT(bytes[k], 0);
    }
}

static void trail_state(trail *t, dp_ctx *ctx, dp_optim *optim, const char *name)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value saved;
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    dp_value slots = dp_get(dp_get(saved, "state"), name);
    for (size_t i = 0; i < dp_count(slots); i++) {
        const dp_tensor *slot = dp_at(slots, i).as.t;
        trail_add(t, slot->data,
                  (size_t)dp_tensor_count(slot) * dp_dtype_bytes((dp_dtype)slot->dtype));
    }
    dp_scope_end(scope);
}

/* ---- by hand --------------------------------------------------------------------------------- */

/* Sizes with padding behind them, of nothing, and longer than what is zeroed at a time. */
enum { SIZES = 5 };
static const int64_t sizes[SIZES] = {3, 0, 1, 4507, 16};

typedef struct plan {
    const char *what;
    const dp_rule *(*rule)(void); /* NULL: SGD */
    dp_optim_config config;
    dp_dtype dtype;
    bool packed, tied, rest; /* rest: a frozen one and a buffer, too */
    int unused;              /* without a gradient in this step, from 1 on: parameter 3 */
    int odd;                 /* with a gradient that is infinite in this step */
    int fails;               /* a kernel, counted from the first step on */
    bool zeroes[STEPS];
} plan;

static void fill_some(const dp_tensor *to, int salt)
{
    for (int64_t k = 0; k < dp_tensor_count(to); k++) {
        double number = sin((double)(k + 1) * (salt + 1));
        uint32_t bits;
        float narrow = (float)number;
        memcpy(&bits, &narrow, sizeof bits);
        if (to->dtype == DP_F64)
            ((double *)to->data)[k] = number;
        else if (to->dtype == DP_F32)
            ((float *)to->data)[k] = narrow;
        else
            ((uint16_t *)to->data)[k] = (uint16_t)(bits >> 16); /* bf16 */
    }
}

static dp_module *planned_net(dp_ctx *ctx, const plan *p)
{
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    dp_param_config params[SIZES + 3] = {{0}};
    size_t count = 0;
    dp_module *net = NULL;
    for (; count < SIZES; count++)
        params[count] = (dp_param_config){
            .name = names[count], .dtype = p->dtype, .ndim = 1, .shape = {sizes[count]}};
    if (p->tied)
        params[count++] = (dp_param_config){
            .name = "tied", .dtype = p->dtype, .ndim = 1, .shape = {sizes[3]}, .same_as = "d"};
    if (p->rest) {
        params[count++] = (dp_param_config){
            .name = "frozen", .dtype = p->dtype, .ndim = 1, .shape = {7}, .frozen = true};
        params[count++] = (dp_param_config){
            .name = "buffer", .dtype = p->dtype, .ndim = 1, .shape = {7}, .buffer = true};
    }
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "net", .params = params, .param_count = count, .packed = p->packed},
        &net));
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_tensor data;
        CHECK_OK(dp_params_edit(net, i, &data, NULL));
        fill_some(&data, (int)i);
    }
    return net;
}

static void planned_grads(dp_module *net, const plan *p, int step)
{
    dp_tensor data, grad;
    for (size_t i = 0; i < SIZES; i++)
        if (i != 3 || p->unused != step) {
            CHECK_OK(dp_params_edit(net, i, &data, &grad));
            fill_some(&grad, 7 * step + (int)i);
        }
    if (p->odd != step)
        return;
    CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    *(float *)grad.data = INFINITY;
}

static void planned_run(const plan *p, bool knows, trail *t)
{
    dp_ctx *ctx = counted_ctx(knows);
    dp_module *net = planned_net(ctx, p);
    dp_optim *optim = NULL;
    dp_optim_config config = p->config;
    config.rule = p->rule != NULL ? p->rule() : NULL;
    CHECK_OK(dp_optim_create(net, &config, &optim));
    t->count = 0;
    fail_at = p->fails;
    for (int step = 1; step <= STEPS; step++) {
        int before = zeroing, fills = filling;
        planned_grads(net, p, step);
        dp_status status = dp_optim_step(optim);
        t->zeroes[step - 1] = zeroing > before;
        if (status == DP_OK && t->zeroes[step - 1])
            CHECK_INT(filling, fills); /* there is no second pass */
        if (status != DP_OK)
            CHECK_OK(dp_zero_grad(net));
        trail_add(t, &status, sizeof status);
        trail_net(t, net);
        trail_state(t, ctx, optim, "d");
    }
    CHECK(stepping > 0);
    dp_close(ctx);
}

static void check_plan(const plan *p)
{
    static trail with, without;
    planned_run(p, true, &with);
    planned_run(p, false, &without);
    for (int i = 0; i < STEPS; i++) {
        CHECK(!without.zeroes[i]);
        if (with.zeroes[i] != p->zeroes[i])
            test_fail(__FILE__, __LINE__, "%s: step %d", p->what, i + 1);
    }
    CHECK_INT(with.count, without.count);
    CHECK_BYTES(with.bytes, without.bytes, with.count);
}

#define ALL_STEPS                                                                                  \
    {                                                                                              \
        true, true, true, true                                                                     \
    }

/* Nobody knows what it does with gradients. */
static const dp_rule *rule_of_somebody(void)
{
    static dp_rule rule;
    rule = *dp_sgd();
    return &rule;
}

#define SGD  .hyper = {.lr = 0.125, .momentum = 0.5}
#define ADAM .hyper = {.lr = 0.01, .weight_decay = 0.1}

TEST(steps_zero_gradients_as_they_pass)
{
    static const double ten = 10;
    static const dp_param_group groups[] = {{.match = "c", .lr_factor = &ten}};
    static const plan plans[] = {
        {"SGD", .config = {SGD}, .zeroes = ALL_STEPS},
        {"SGD without state", .config = {.hyper = {.lr = 0.5}}, .zeroes = ALL_STEPS},
        {"AdamW", dp_adamw, .config = {ADAM}, .zeroes = ALL_STEPS},
        {"Adam", dp_adam, .config = {ADAM}, .zeroes = ALL_STEPS},
        {"packed", .config = {SGD}, .packed = true, .zeroes = ALL_STEPS},
        {"f64", .config = {SGD}, .dtype = DP_F64, .zeroes = ALL_STEPS},
        {"bf16", .config = {SGD}, .dtype = DP_BF16, .zeroes = ALL_STEPS},
        {"masters", .config = {SGD, .masters = true}, .dtype = DP_BF16},
        {"masters of none", .config = {SGD, .masters = true}, .zeroes = ALL_STEPS},
        {"tied", .config = {SGD}, .tied = true, .zeroes = ALL_STEPS},
        {"frozen", .config = {SGD}, .rest = true, .zeroes = ALL_STEPS},
        {"groups", .config = {SGD, .groups = groups, .group_count = 1}, .zeroes = ALL_STEPS},
        {"clip", .config = {SGD, .clip = {.norm = 0.5}}, .zeroes = ALL_STEPS},
        {"clip elements", .config = {SGD, .clip = {.value = 0.5}}, .zeroes = ALL_STEPS},
        {"not finite", .config = {SGD, .clip = {.norm = 0.5, .skip_if_not_finite = true}}, .odd = 2,
         .zeroes = {true, false, true, true}},
        {"refused", .config = {SGD, .clip = {.norm = 0.5}}, .odd = 3,
         .zeroes = {true, true, false, true}},
        {"scale", .config = {SGD, .scale = {.dynamic = true}}, .odd = 1,
         .zeroes = {false, true, true, true}},
        {"unused", dp_adamw, .config = {ADAM}, .unused = 2, .zeroes = {true, false, true, true}},
        {"failing", .config = {SGD}, .fails = 6, .zeroes = ALL_STEPS},
        {"a rule of somebody's", rule_of_somebody, .config = {SGD}}};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        check_plan(&plans[i]);
}

/* An optimizer of somebody's whose kernels zero gradients asks before, and says so after. */
TEST(another_optimizer_may_zero_gradients)
{
    const plan p = {.what = "by hand"};
    for (int knows = 0; knows < 2; knows++) {
        dp_ctx *ctx = counted_ctx(knows == 1);
        dp_module *net = planned_net(ctx, &p);
        dp_tensor data, grad;
        bool used[SIZES];
        planned_grads(net, &p, 1);
        CHECK_INT(dp_grads_may_zero(net), knows == 1);
        CHECK_OK(dp_grads_used(net, used, SIZES));
        CHECK(used[0] && used[4]);
        if (knows == 0) {
            CHECK_ERROR(dp_grads_zeroed(net), DP_ERR_UNSUPPORTED,
                        "dp_grads_zeroed: kernels cannot zero all gradients of 'net'");
            CHECK_OK(dp_grads_used(net, used, SIZES));
            CHECK(used[0]);
        } else {
            for (size_t i = 0; i < SIZES; i++) {
                CHECK_OK(dp_params_edit(net, i, &data, &grad));
                CHECK_OK(dp_fill(ctx, &grad, dp_float(0)));
            }
            CHECK_OK(dp_params_edit(net, 2, &data, &grad));
            float *behind = (float *)grad.data + 1;
            *behind = 5;
            CHECK_OK(dp_grads_zeroed(net));
            CHECK_F64(*behind, 0, 0);
            CHECK_OK(dp_grads_used(net, used, SIZES));
            CHECK(!used[0] && !used[4]);
        }
        dp_close(ctx);
    }
    CHECK(!dp_grads_may_zero(NULL));
}

/* It is zeroed with the gradients, and is part of what ranks add up. */
TEST(padding_between_gradients_is_zeroed_too)
{
    const plan p = {.what = "padding"};
    dp_ctx *ctx = counted_ctx(true);
    dp_module *net = planned_net(ctx, &p);
    dp_optim *optim = NULL;
    dp_tensor data, grad;
    CHECK_OK(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &optim));
    planned_grads(net, &p, 1);
    CHECK_OK(dp_params_edit(net, 2, &data, &grad)); /* one float, and parameter 0 lies behind it */
    float *behind = (float *)grad.data + 1;
    behind[0] = behind[14] = 5;
    CHECK_OK(dp_optim_step(optim));
    CHECK(zeroing > 0);
    CHECK_F64(behind[0], 0, 0);
    CHECK_F64(behind[14], 0, 0);
    dp_close(ctx);
}

/* ---- memory of the user's -------------------------------------------------------------------- */

/* Two parameters with one gradient: the second is stepped by it, too. */
TEST(gradients_in_the_same_memory_are_read_before_they_are_zeroed)
{
    static float data[2][4], grad[8];
    for (int apart = 0; apart < 3; apart++) {
        dp_param_config params[2] = {{.name = "a", .ndim = 1, .shape = {4}},
                                     {.name = "b", .ndim = 1, .shape = {4}}};
        dp_ctx *ctx = counted_ctx(true);
        dp_module *net = NULL;
        dp_optim *optim = NULL;
        for (int i = 0; i < 2; i++) {
            params[i].data = data[i];
            params[i].grad = &grad[apart == 0 ? 0 : apart == 1 ? 2 * i : 4 * i];
            data[i][0] = data[i][3] = 1;
        }
        for (int k = 0; k < 8; k++)
            grad[k] = 1;
        CHECK_OK(dp_module_create(
            ctx, &(dp_module_config){.name = "net", .params = params, .param_count = 2}, &net));
        CHECK_OK(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 0.25}}, &optim));
        CHECK_OK(dp_optim_step(optim));
        CHECK(apart == 2 || zeroing == 0); /* side by side they are apart */
        for (int i = 0; i < 2; i++) {
            CHECK_F64(data[i][0], 0.75, 0);
            CHECK_F64(data[i][3], 0.75, 0);
        }
        for (int k = 0; k < 8; k++)
            CHECK_F64(grad[k], k < (apart == 0 ? 4 : apart == 1 ? 6 : 8) ? 0 : 1, 0);
        dp_close(ctx);
    }
}

TEST(a_block_of_the_users_is_zeroed)
{
    static float block[8], block_grad[8];
    const dp_param_config params[] = {{.name = "a", .ndim = 1, .shape = {3}},
                                      {.name = "b", .ndim = 1, .shape = {5}}};
    dp_ctx *ctx = counted_ctx(true);
    dp_module *net = NULL;
    dp_optim *optim = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .params = params,
                                                  .param_count = 2,
                                                  .packed = true,
                                                  .block = block,
                                                  .block_grad = block_grad},
                              &net));
    CHECK_OK(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 0.25}}, &optim));
    for (int k = 0; k < 8; k++)
        block_grad[k] = block[k] = 1;
    CHECK_OK(dp_optim_step(optim));
    CHECK(zeroing > 0);
    for (int k = 0; k < 8; k++) {
        CHECK_F64(block[k], 0.75, 0);
        CHECK_F64(block_grad[k], 0, 0);
    }
    dp_close(ctx);
}

/* ---- wrappers -------------------------------------------------------------------------------- */

typedef enum way { ALONE, PARALLEL, DISTRIBUTED, SHARDED } way;

static dp_module *wrapped(dp_module *net, way how)
{
    dp_module *par = net;
    if (how == PARALLEL)
        CHECK_OK(dp_data_parallel(net, NULL, &par));
    if (how >= DISTRIBUTED)
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    return par;
}

/* Two backwards make a step. */
static void wrapped_step(dp_ctx *ctx, dp_module *par, dp_optim *optim, int step)
{
    enum { ROWS = 16 };
    float x[ROWS * NET_IN];
    for (int half = 0; half < 2; half++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_pass *pass = NULL;
        dp_value out;
        for (int i = 0; i < ROWS * NET_IN; i++)
            x[i] = (float)((i * 5 + step * 3 + half) % 11 - 5) / 8;
        dp_tensor data = dp_wrap(x, DP_F32, 2, (const int64_t[]){ROWS, NET_IN});
        CHECK_OK(dp_invoke(par, scope, "forward", DP_LIST_OF(scope, dp_of(scope, &data)), dp_none(),
                           &(dp_pass_config){.no_sync = half == 0}, &out, &pass));
        CHECK_OK(dp_backward(pass, out, NULL));
        dp_scope_end(scope);
    }
    CHECK_OK(dp_optim_step(optim));
}

static void wrapped_run(way how, bool knows, trail *t)
{
    static const net_shape shape = {0};
    dp_ctx *ctx = counted_ctx(knows);
    dp_module *net = net_create(ctx, &shape, 0), *par = wrapped(net, how);
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(par,
                             &(dp_optim_config){.rule = dp_adamw(),
                                                .hyper = {.lr = 0.01},
                                                .sharded = how == SHARDED,
                                                .clip = {.norm = 0.5}},
                             &optim));
    t->count = 0;
    for (int step = 0; step < STEPS; step++) {
        wrapped_step(ctx, par, optim, step);
        trail_net(t, net);
    }
    CHECK(knows == (zeroing > 0));
    CHECK(!knows || zeroing == stepping);
    dp_close(ctx);
}

TEST(wrapped_modules_are_zeroed_as_they_are_stepped)
{
    static trail with, without;
    for (way how = ALONE; how <= SHARDED; how++) {
        wrapped_run(how, true, &with);
        wrapped_run(how, false, &without);
        CHECK_INT(with.count, without.count);
        CHECK_BYTES(with.bytes, without.bytes, with.count);
    }
}

/* What other optimizers step waits for them. */
TEST(only_the_gradients_of_the_module_are_zeroed)
{
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {5}}};
    dp_ctx *ctx = counted_ctx(true);
    dp_module *halves[2] = {NULL, NULL}, *whole = NULL;
    dp_optim *optims[2] = {NULL, NULL};
    dp_tensor data, grad;
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_module_create(
            ctx,
            &(dp_module_config){.name = i == 0 ? "gen" : "dis", .params = params, .param_count = 1},
            &halves[i]));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "gan", .children = halves, .child_count = 2}, &whole));
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_optim_create(halves[i], &(dp_optim_config){.hyper = {.lr = 1}}, &optims[i]));
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(dp_params_edit(whole, i, &data, &grad));
        for (int k = 0; k < 5; k++)
            ((float *)grad.data)[k] = (float)(k + 1);
    }
    for (size_t step = 0; step < 2; step++) {
        bool used[2];
        CHECK_OK(dp_optim_step(optims[step]));
        CHECK_INT(zeroing, step + 1);
        CHECK_OK(dp_grads_used(whole, used, 2));
        for (size_t i = 0; i < 2; i++) {
            dp_param_info info;
            CHECK_OK(dp_owner_grad(whole, 0, i, &grad));
            CHECK_OK(dp_module_param(whole, i, &info));
            CHECK(used[i] == (i > step));
            for (int k = 0; k < 5; k++) {
                CHECK_F64(((const float *)grad.data)[k], i > step ? k + 1 : 0, 0);
                CHECK_F64(((const float *)info.data.data)[k], i > step ? 0 : -k - 1, 0);
            }
        }
    }
    dp_close(ctx);
}
