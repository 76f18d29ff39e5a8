/* test_sharded.c - optimizers of dp_train.h on several ranks: state that is spread over them, what
   they do not reduce, and which parameters are stepped together. */

#include <math.h>
#include <stdlib.h>
#include "methods.h"
#include "examples/custom_device.h"
#include "decorator.h"
#include "ranked.h"
#include "torch_steps.h"

/* Memory that the next scopes get: nobody may take it for zeros. */
static void scribble(dp_ctx *ctx)
{
    enum { PIECES = 40, WORDS = 256 };
    dp_scope *scope = dp_scope_begin(ctx);
    for (size_t i = 0; i < PIECES; i++) {
        uint64_t *piece = dp_scope_alloc(scope, WORDS * sizeof *piece);
        CHECK(piece != NULL);
        for (size_t k = 0; k < WORDS; k++)
            piece[k] = (i * WORDS + k + 1) * 0x9e3779b97f4a7c15u;
    }
    dp_scope_end(scope);
}

/* ---- a wide net ------------------------------------------------------------------------------ */

enum { WIDE_A = 1057, WIDE_B = 5, WIDE_C = 700, WIDE = WIDE_A + WIDE_B + WIDE_C };

/* Gradients are set by hand. */
static const dp_method methods[] = {{"forward", give_none}, {"backward", give_none}};

static const size_t wide_counts[] = {WIDE_A, WIDE_B, WIDE_C};

static dp_module *wide_net_with(dp_ctx *ctx, const dp_method own[2], dp_dtype dtype, bool packed)
{
    const dp_param_config params[] = {
        {.name = "a", .dtype = dtype, .ndim = 2, .shape = {7, WIDE_A / 7}},
        {.name = "b", .dtype = dtype, .ndim = 1, .shape = {WIDE_B}},
        {.name = "c", .dtype = dtype, .ndim = 1, .shape = {WIDE_C}}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "wide",
                                                  .methods = own,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 3,
                                                  .packed = packed},
                              &net));
    return net;
}

static dp_module *wide_net_of(dp_ctx *ctx, dp_dtype dtype, bool packed)
{
    return wide_net_with(ctx, methods, dtype, packed);
}

/* Numbers as torch_steps.h has them, again and again in each parameter. */
static void wide_put(dp_ctx *ctx, const dp_tensor *to, const float *pattern)
{
    dp_scope *temp = dp_scope_begin(ctx);
    static float numbers[WIDE_A];
    dp_tensor host = dp_wrap_const(numbers, DP_F32, to->ndim, to->shape), own;
    for (int64_t i = 0; i < dp_tensor_count(to); i++)
        numbers[i] = pattern[i % TORCH_ALL];
    CHECK_OK(dp_tensor_new(temp, to->device, DP_F32, to->ndim, to->shape, &own));
    CHECK_OK(dp_copy(ctx, &own, &host, NULL));
    CHECK_OK(dp_cast(ctx, to, &own));
    CHECK_OK(dp_wait(ctx));
    dp_scope_end(temp);
}

static void wide_begin(dp_module *net)
{
    dp_tensor data;
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_params_edit(net, i, &data, NULL));
        wide_put(dp_module_ctx(net), &data, beginning);
    }
}

/* Devices get parameters of their own at a forward. */
static void follow(dp_module *par)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, NULL));
    dp_scope_end(scope);
}

/* A wrapper around a net that is at the beginning. */
static dp_module *wide_par(dp_ctx *ctx, dp_dtype dtype, bool packed)
{
    dp_module *net = wide_net_of(ctx, dtype, packed), *par = NULL;
    wide_begin(net);
    CHECK_OK(dp_distributed(net, NULL, &par));
    return par;
}

static void wide_grads(dp_module *par, int step)
{
    float pattern[TORCH_ALL];
    grads_of(step, pattern);
    for (size_t owner = 0; owner < dp_owner_count(par); owner++)
        for (size_t i = 0; i < 3; i++) {
            dp_tensor data, grad;
            CHECK_OK(dp_owner_edit(par, owner, i, &data, &grad));
            wide_put(dp_module_ctx(par), &grad, pattern);
        }
}

/* As the first owner has them; the others have the same. */
static void wide_numbers(dp_module *par, float *out)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *temp = dp_scope_begin(ctx);
    static float all[WIDE];
    for (size_t owner = 0; owner < dp_owner_count(par); owner++) {
        float *to = owner == 0 ? out : all;
        for (size_t i = 0, at = 0; i < 3; at += wide_counts[i++]) {
            dp_tensor data, own;
            CHECK_OK(dp_owner_param(par, owner, i, &data));
            CHECK_OK(dp_tensor_new(temp, data.device, DP_F32, data.ndim, data.shape, &own));
            CHECK_OK(dp_cast(ctx, &own, &data));
            CHECK_OK(dp_read(ctx, &own, to + at, wide_counts[i] * sizeof(float)));
        }
        if (owner > 0)
            CHECK_BYTES(all, out, sizeof all);
    }
    dp_scope_end(temp);
}

static dp_optim *optim_of(dp_module *par, const rule_case *rule, dp_optim_config config)
{
    dp_optim *optim = NULL;
    config.rule = rule->rule();
    config.hyper = rule->hyper;
    scribble(dp_module_ctx(par));
    CHECK_OK(dp_optim_create(par, &config, &optim));
    return optim;
}

static dp_optim_info optim_info(const dp_optim *optim)
{
    dp_optim_info info;
    CHECK_OK(dp_optim_info_get(optim, &info));
    return info;
}

static void wide_steps(dp_module *par, dp_optim *optim, int first, int last)
{
    follow(par);
    for (int step = first; step < last; step++) {
        wide_grads(par, step);
        CHECK_OK(dp_optim_step(optim));
    }
}

/* ---- state is spread ------------------------------------------------------------------------- */

/* What the first owner keeps: of each stretch of memory its part, and what cannot be cut evenly. */
static size_t wide_kept(dp_module *par, bool packed)
{
    static const size_t all[] = {WIDE};
    const size_t *counts = packed ? all : wide_counts;
    dp_info info = info_here(dp_module_ctx(par));
    size_t ranks = (size_t)info.rank_count, kept = 0;
    size_t own = dp_owner_count(par) == 1 ? (size_t)info.local_count : 1;
    for (size_t i = 0; i < (packed ? 1 : 3); i++) {
        size_t each = counts[i] / ranks / 16 * 16; /* so that every part is aligned */
        kept += ranks > 1 && each >= 256 ? counts[i] - (ranks - own) * each : counts[i];
    }
    return kept;
}

static void check_torch(const rule_case *rule, const float *got)
{
    for (size_t i = 0, at = 0; i < 3; at += wide_counts[i++])
        for (size_t k = 0; k < wide_counts[i]; k++) {
            double want = (double)rule->torch[k % TORCH_ALL];
            CHECK_F64(got[at + k], want, 1e-6 * fmax(1, fabs(want)));
        }
}

static void check_sharded(dp_ctx *ctx, const rule_case *rule, bool packed)
{
    static float got[WIDE], want[WIDE];
    dp_module *whole = wide_par(ctx, DP_F32, packed), *par = wide_par(ctx, DP_F32, packed);
    dp_optim *all = optim_of(whole, rule, (dp_optim_config){0});
    dp_optim *some = optim_of(par, rule, (dp_optim_config){.sharded = true});
    CHECK_INT(optim_info(all).state_bytes, rule->states * WIDE * sizeof(float));
    CHECK_INT(optim_info(some).state_bytes, rule->states * wide_kept(par, packed) * sizeof(float));
    wide_steps(whole, all, 0, 50);
    wide_steps(par, some, 0, 50);
    wide_numbers(whole, want);
    wide_numbers(par, got);
    CHECK_BYTES(got, want, sizeof got);
    check_torch(rule, got);
}

static void sharded_steps(dp_ctx *ctx)
{
    for (size_t i = 1; i < sizeof rules / sizeof rules[0]; i += 3) /* momentum, uphill, adamw */
        check_sharded(ctx, &rules[i], i == 4);
    dp_close(ctx);
}

TEST(sharded_steps_of_torch)
{
    for (int devices = 1; devices <= 4; devices += test_stride() > 1 ? 3 : 1) {
        sharded_steps(open_here(devices));
        sharded_steps(open_on(toy_device(), devices));
    }
}

TEST(eight_owners_step_all_their_parameters)
{
    static float got[WIDE];
    dp_ctx *ctx = open_on(toy_device(), 8);
    dp_module *par = wide_par(ctx, DP_F32, false);
    dp_optim *optim = optim_of(par, &rules[1], (dp_optim_config){0});
    wide_steps(par, optim, 0, 2);
    wide_numbers(par, got); /* all have the same */
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

static void sharded_over_shm(meeting *m)
{
    sharded_steps(open_over_shm(m, 1, 0));
}

static void sharded_over_shm_by_owners_of_two(meeting *m)
{
    sharded_steps(open_over_shm(m, 2, 0));
}

static void sharded_on_toys(meeting *m)
{
    sharded_steps(open_job(m, 1 + m->process, toy_device()));
}

/* Two ranks that share memory, and two that do not. */
static void sharded_on_toys_and_a_host(meeting *m)
{
    dp_ctx *ctx = open_job(m, 2, m->process == 0 ? dp_cpu() : toy_device());
    check_sharded(ctx, &rules[1], true);
    dp_close(ctx);
}

TEST(sharded_steps_of_torch_in_processes)
{
    in_processes(3, sharded_over_shm);
    in_processes_on(toy_device(), 3, sharded_over_shm);
    in_processes(2, sharded_over_shm_by_owners_of_two);
    in_processes(2, sharded_on_toys);
    in_processes(2, sharded_on_toys_and_a_host);
}

/* More than travels at a time, of processes with several ranks that share memory. */
static void large_steps(meeting *m)
{
    enum { MANY = 3 * ((1 << 16) + 1) + 2 };
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {MANY}};
    static float got[MANY];
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = NULL, *par = NULL;
    dp_tensor data, grad, host;
    dp_value saved;
    const dp_tensor *state;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "large",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1},
                              &net));
    CHECK_OK(dp_distributed(net, NULL, &par));
    dp_optim *optim = optim_of(par, &rules[1], (dp_optim_config){.sharded = true});
    CHECK_OK(dp_owner_edit(par, 0, 0, &data, &grad));
    CHECK_OK(dp_fill(ctx, &data, dp_float(0)));
    for (int i = 0; i < MANY; i++)
        got[i] = (float)(i % 1021);
    host = dp_wrap(got, DP_F32, 1, grad.shape);
    CHECK_OK(dp_copy(ctx, &grad, &host, NULL));
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_read(ctx, &data, got, sizeof got));
    for (int i = 0; i < MANY; i++)
        CHECK_F64(got[i], -0.02 * (i % 1021), 1e-5);
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_OK(dp_as_tensor(dp_at(dp_get(dp_get(saved, "state"), "w"), 0), "w", DP_F32, 1, &state));
    for (int i = 0; i < MANY; i++)
        CHECK_F64(((const float *)state->data)[i], i % 1021, 0);
    dp_close(ctx);
}

TEST(large_parameters_of_shared_memory)
{
    in_processes(2, large_steps);
}

/* Ranks that share memory have nothing to send. */
TEST(nothing_is_sent_to_oneself)
{
    const dp_coll_ops *const colls[] = {decorate_coll(dp_cpu_coll()), NULL};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 3, .colls = colls}, &ctx));
    dp_module *par = wide_par(ctx, DP_F32, true);
    dp_optim *optim = optim_of(par, &rules[1], (dp_optim_config){.sharded = true});
    wide_steps(par, optim, 0, 1);
    int before = deco_calls(DECO_coll_run);
    CHECK_OK(dp_optim_step(optim));
    CHECK_INT(deco_calls(DECO_coll_run), before);
    dp_close(ctx);
}

/* ---- master copies --------------------------------------------------------------------------- */

/* f32 steps, rounded: parameters in f16 are those of an f32 net, rounded. */
static void check_masters(dp_ctx *ctx, dp_dtype dtype, bool sharded, bool packed)
{
    const rule_case *rule = &rules[7];
    static float got[WIDE], want[WIDE], rounded[WIDE];
    dp_module *wide = wide_par(ctx, DP_F32, packed), *par = wide_par(ctx, dtype, packed);
    dp_module *plain = wide_par(ctx, dtype, packed);
    dp_optim *first = optim_of(wide, rule, (dp_optim_config){0});
    dp_optim *optim = optim_of(par, rule, (dp_optim_config){.masters = true, .sharded = sharded});
    dp_optim *without = optim_of(plain, rule, (dp_optim_config){0});
    CHECK_INT(optim_info(without).state_bytes, 2 * WIDE * sizeof(float));
    CHECK_INT(optim_info(optim).state_bytes,
              3 * (sharded ? wide_kept(par, packed) : WIDE) * sizeof(float));
    wide_steps(wide, first, 0, 50);
    wide_steps(par, optim, 0, 50);
    wide_steps(plain, without, 0, 50);
    wide_numbers(wide, want);
    wide_numbers(par, got);
    wide_numbers(plain, rounded);
    CHECK(memcmp(got, rounded, sizeof got) != 0); /* it makes a difference */
    double unit = dtype == DP_F16 ? 1.0 / 1024 : 1.0 / 128;
    for (int i = 0; i < WIDE; i++)
        CHECK_F64(got[i], want[i], fabs((double)want[i]) * unit / 2 + 1e-7);
}

static void masters_here(dp_ctx *ctx)
{
    check_masters(ctx, DP_F16, false, true);
    check_masters(ctx, DP_BF16, false, false);
    check_masters(ctx, DP_BF16, true, false);
    dp_close(ctx);
}

static void masters_in_processes(meeting *m)
{
    masters_here(open_over_shm(m, 1, 0));
}

TEST(master_copies)
{
    masters_here(open_here(2));
    masters_here(open_on(toy_device(), 3));
    in_processes(2, masters_in_processes);
    in_processes_on(toy_device(), 2, masters_in_processes);
}

/* ---- kept and brought back ------------------------------------------------------------------- */

/* As wide_steps, but each parameter has gradients of its own; those of "a" are -0, all of whose
   bits have to arrive. */
static void uneven_steps(dp_module *par, dp_optim *optim, int first, int last)
{
    follow(par);
    for (int step = first; step < last; step++) {
        wide_grads(par, step);
        for (size_t owner = 0; owner < dp_owner_count(par); owner++)
            for (size_t i = 0; i < 3; i++) {
                dp_tensor data, grad;
                CHECK_OK(dp_owner_edit(par, owner, i, &data, &grad));
                if (i == 0)
                    CHECK_OK(dp_fill(dp_module_ctx(par), &grad, dp_float(-0.0)));
                else
                    CHECK_OK(dp_axpby(dp_module_ctx(par), (double)i, &grad, 0, NULL, &grad));
            }
        CHECK_OK(dp_optim_step(optim));
    }
}

static void check_same_state(dp_value a, dp_value b)
{
    static const char *const names[] = {"a", "b", "c"};
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < dp_count(dp_get(dp_get(a, "state"), names[i])); k++) {
            const dp_tensor *x, *y;
            CHECK_OK(dp_as_tensor(dp_at(dp_get(dp_get(a, "state"), names[i]), k), "a", DP_F32,
                                  i == 0 ? 2 : 1, &x));
            CHECK_OK(dp_as_tensor(dp_at(dp_get(dp_get(b, "state"), names[i]), k), "b", DP_F32,
                                  i == 0 ? 2 : 1, &y));
            CHECK_INT(dp_tensor_count(x), (int64_t)wide_counts[i]);
            CHECK_BYTES(x->data, y->data, wide_counts[i] * sizeof(float));
        }
}

/* What is saved does not show how state was spread, and whoever loads it goes on as the other. */
static void states_of(dp_ctx *ctx, const rule_case *rule, bool packed)
{
    static float got[WIDE], want[WIDE];
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *whole = wide_par(ctx, DP_BF16, false), *par = wide_par(ctx, DP_BF16, packed);
    dp_value of_all, of_some;
    dp_optim *all = optim_of(whole, rule, (dp_optim_config){.masters = true});
    dp_optim *some = optim_of(par, rule, (dp_optim_config){.masters = true, .sharded = true});
    uneven_steps(whole, all, 0, 5);
    uneven_steps(par, some, 0, 5);
    CHECK_OK(dp_optim_save(all, scope, &of_all));
    CHECK_OK(dp_optim_save(some, scope, &of_some));
    check_same_state(of_all, of_some);
    dp_optim_destroy(some);
    some = optim_of(par, rule, (dp_optim_config){.masters = true, .sharded = true});
    CHECK_OK(dp_optim_load(some, of_all));
    CHECK_OK(dp_optim_load(all, of_some));
    CHECK_INT(optim_info(some).step_count, 5);
    uneven_steps(whole, all, 5, 10);
    uneven_steps(par, some, 5, 10);
    wide_numbers(whole, want);
    wide_numbers(par, got);
    CHECK_BYTES(got, want, sizeof got);
    CHECK_OK(dp_optim_save(some, scope, &of_some));
    CHECK_OK(dp_optim_save(all, scope, &of_all));
    check_same_state(of_all, of_some);
    dp_optim_destroy(some);
    dp_optim_destroy(all);
    dp_scope_end(scope);
}

static void states_travel(dp_ctx *ctx)
{
    states_of(ctx, &rules[1], false); /* momentum */
    states_of(ctx, &rules[5], true);
    dp_close(ctx);
}

static void states_over_shm(meeting *m)
{
    states_travel(open_over_shm(m, 1 + m->process, 0));
}

static void states_of_pairs(meeting *m)
{
    states_travel(open_over_shm(m, 2, 0));
}

TEST(states_do_not_show_how_they_were_spread)
{
    states_travel(open_here(3));
    states_travel(open_on(toy_device(), 3));
    in_processes(2, states_over_shm);
    in_processes_on(toy_device(), 2, states_over_shm);
    in_processes(2, states_of_pairs);
}

/* ---- dp_train_step --------------------------------------------------------------------------- */

/* Each of two ranks adds its number, 1 or 2, to a gradient in each of ten passes: steps are made
   after the third, sixth, ninth and last, of 1.5. */
static void ten_train_steps(dp_ctx *ctx)
{
    static const plan how;
    static const double stepped[] = {0, 0, 1, 1, 1, 2, 2, 2, 3, 4};
    dp_module *net = make_net(ctx, &how), *par = NULL;
    dp_optim *optim = NULL;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(dp_optim_create(
        par, &(dp_optim_config){.hyper = {.lr = 1}, .accumulate = 3, .scale = {.dynamic = true}},
        &optim));
    CHECK_OK(dp_optim_progress(optim, 0, 10));
    for (int i = 0; i < 10; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        double loss = 0;
        CHECK_OK(dp_train_step(par, scope, a_part_each(ctx, scope), optim, &log));
        CHECK_F64(element(net, 0, false, 0), -1.5 * stepped[i], 1e-5);
        CHECK_F64(element(net, 1, false, V - 1), -1.5 * stepped[i], 1e-5);
        CHECK_OK(dp_item(ctx, dp_get(log, "loss"), &loss));
        CHECK_F64(loss, 1, 0);
        dp_scope_end(scope);
    }
    CHECK_INT(optim_info(optim).step_count, 4);
    CHECK_INT(optim_info(optim).done, 10);
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

static void ten_in_processes(meeting *m)
{
    ten_train_steps(open_over_shm(m, 1, 0));
}

TEST(gradients_of_several_train_steps_of_all_ranks)
{
    ten_train_steps(open_here(2));
    ten_train_steps(open_on(toy_device(), 2));
    in_processes(2, ten_in_processes);
    in_processes_on(toy_device(), 2, ten_in_processes);
}

/* ---- gradients that are no numbers ----------------------------------------------------------- */

static struct {
    size_t param; /* whose gradient is bad, */
    int rank;     /* on which rank; -1: on none */
    float number;
} bad;

static dp_status give_a_number(dp_call *call)
{
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status maybe_bad_backward(dp_call *call)
{
    for (size_t i = 0; i < 3; i++) {
        bool is_bad = i == bad.param && rank_of(call) == bad.rank;
        dp_tensor grad = {.data = dp_grad(call, i), .device = call->device, .dtype = DP_F32};
        grad.ndim = 1;
        grad.shape[0] = (int64_t)wide_counts[i];
        grad.stride[0] = 1;
        DP_TRY(dp_fill(call->ctx, &grad, dp_float(is_bad ? (double)bad.number : 0.5)));
    }
    return DP_OK;
}

static dp_status maybe_bad_step(dp_module *par, dp_optim *optim, int rank)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    bad.rank = rank;
    dp_status status = dp_train_step(par, scope, a_part_each(ctx, scope), optim, &log);
    dp_scope_end(scope);
    return status;
}

/* Nobody names another one than that which is bad; a rank that sees none does not name any. */
static void check_bad_is_named(dp_status status)
{
    char want[64];
    CHECK_ERROR(status, DP_ERR_STATE, "the norm of the gradients is ");
    snprintf(want, sizeof want, "the gradient of %c is not finite", 'a' + (int)bad.param);
    if (strstr(dp_last_error(), want) == NULL)
        CHECK_SAYS(dp_last_error(), ", here or in another process");
}

/* What three steps have made of the parameters, of which the second one is bad. */
static void steps_with_a_bad_one(dp_ctx *ctx, bool shared, dp_optim_config config, float *out)
{
    static const dp_method own[] = {{"forward", give_a_number}, {"backward", maybe_bad_backward}};
    static float before[WIDE];
    dp_module *net = wide_net_with(ctx, own, DP_F32, false), *par = NULL;
    dp_optim *optim = NULL;
    const bool skips = config.clip.skip_if_not_finite;
    wide_begin(net);
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = shared}, &par));
    CHECK_OK(dp_optim_create(par, &config, &optim));
    CHECK_OK(maybe_bad_step(par, optim, -1));
    wide_numbers(par, before);
    dp_status status = maybe_bad_step(par, optim, 1);
    if (skips)
        CHECK_OK(status);
    else
        check_bad_is_named(status);
    CHECK(!dp_failure(ctx, NULL));
    wide_numbers(par, out);
    CHECK_BYTES(out, before, sizeof before);
    CHECK_INT(optim_info(optim).step_count, 1);
    CHECK_INT(optim_info(optim).skip_count, skips);
    CHECK_INT(optim_info(optim).done, 1 + skips);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(maybe_bad_step(par, optim, -1));
    CHECK_INT(optim_info(optim).step_count, 2);
    CHECK(optim_info(optim).has_norm);
    CHECK_OK(dp_params_compare(par));
    wide_numbers(par, out);
    dp_optim_destroy(optim);
    CHECK_OK(dp_module_destroy(par));
}

/* shares: the parameters may be those of all processes. */
static void bad_gradients(dp_ctx *ctx, bool shares)
{
    static const double ps[] = {2, 1, HUGE_VAL};
    static const float numbers[] = {NAN, INFINITY};
    static float want[WIDE], got[WIDE];
    for (int way = 0; way < 3 * 3 * 2 * 2; way++) {
        dp_optim_config config = {
            .hyper = {.lr = 0.5, .momentum = 0.5},
            .clip = {.norm = 1, .p = ps[way / 3 % 3], .skip_if_not_finite = way / 9 % 2 == 1}};
        bad.param = (size_t)(way % 3);
        bad.number = numbers[way / 18];
        steps_with_a_bad_one(ctx, false, config, want);
        config.sharded = true;
        for (int shared = 0; shared <= shares; shared++) {
            steps_with_a_bad_one(ctx, shared, config, got);
            CHECK_BYTES(got, want, sizeof got);
        }
    }
    dp_close(ctx);
}

static void bad_gradients_of_two(meeting *m)
{
    bad_gradients(open_over_shm(m, 1, 0), true);
}

static void bad_gradients_of_uneven_ones(meeting *m)
{
    bad_gradients(open_over_shm(m, 1 + m->process, 0), false);
}

/* All ranks have the same norm before any is stepped: so all refuse the step, or leave it out, and
   the job is well. */
TEST(norm_that_is_not_finite_is_no_failure_of_the_job)
{
    bad_gradients(open_here(2), false);
    in_processes(2, bad_gradients_of_two);
    in_processes(2, bad_gradients_of_uneven_ones);
    in_processes_on(toy_device(), 2, bad_gradients_of_uneven_ones);
}

/* ---- what ranks do not reduce ---------------------------------------------------------------- */

static void set_grad(dp_module *par, size_t param, const float *numbers)
{
    dp_tensor data, grad, host;
    for (size_t owner = 0; owner < dp_owner_count(par); owner++) {
        CHECK_OK(dp_owner_edit(par, owner, param, &data, &grad));
        host = dp_wrap_const(numbers, DP_F32, 1, grad.shape);
        CHECK_OK(dp_copy(dp_module_ctx(par), &grad, &host, NULL));
        CHECK_OK(dp_wait(dp_module_ctx(par)));
    }
}

/* "own" is ignored: each process has a gradient of its own for it. */
static dp_module *spread_par(dp_ctx *ctx)
{
    static const char *const ignored[] = {"own"};
    const dp_param_config params[] = {{.name = "all", .ndim = 1, .shape = {2}},
                                      {.name = "own", .ndim = 1, .shape = {1}},
                                      {.name = "none", .ndim = 1, .shape = {0}}};
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 3},
                              &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.ignored = ignored, .ignored_count = 1},
                            &par));
    return par;
}

static void check_spread(dp_module *par, const float *own, double two, double one, double largest)
{
    double norm = 0;
    set_grad(par, 0, (const float[]){3, 0});
    set_grad(par, 1, own);
    scribble(dp_module_ctx(par));
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_F64(norm, two, 1e-12);
    CHECK_OK(dp_grad_norm(par, 1, &norm));
    CHECK_F64(norm, one, 1e-12);
    CHECK_OK(dp_grad_norm(par, HUGE_VAL, &norm));
    CHECK_F64(norm, largest, 0);
}

static void norms_of_a_job(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    const float own = m->process == 0 ? 4 : 12, infinite = m->process == 0 ? INFINITY : 1;
    dp_module *par = spread_par(ctx);
    dp_optim *optim = NULL;
    dp_param_info info;
    CHECK_OK(dp_module_param(par, 0, &info));
    CHECK(info.reduced);
    CHECK_OK(dp_module_param(par, 1, &info));
    CHECK(!info.reduced);
    CHECK_OK(dp_module_param(par, 2, &info));
    CHECK(info.reduced);
    check_spread(par, &own, 13, 19, 12);
    CHECK_OK(dp_optim_create(
        par,
        &(dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1, .skip_if_not_finite = true}},
        &optim));
    set_grad(par, 1, &infinite);
    CHECK_OK(dp_optim_step(optim));
    CHECK_INT(optim_info(optim).skip_count, 1); /* by both */
    dp_optim_destroy(optim);
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1}}, &optim));
    set_grad(par, 1, &infinite);
    CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE,
                m->process == 0 ? "the norm of the gradients is inf: the gradient of own is not "
                                  "finite"
                                : "the norm of the gradients is inf, here or in another process");
    dp_close(ctx);
}

TEST(norms_are_those_of_the_job)
{
    in_processes(2, norms_of_a_job);
    in_processes_on(toy_device(), 2, norms_of_a_job);
}

/* Each gradient is finite, and the sum of squares is not. */
TEST(a_norm_may_be_too_large)
{
    dp_ctx *ctx = open_here(2);
    dp_module *par = wide_par(ctx, DP_F64, true);
    dp_optim *optim = NULL;
    dp_tensor data, grad;
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1}}, &optim));
    CHECK_OK(dp_owner_edit(par, 0, 1, &data, &grad));
    CHECK_OK(dp_fill(ctx, &grad, dp_float(1e200)));
    CHECK_STATUS(dp_optim_step(optim), DP_ERR_STATE);
    /* there is no other process that it could be of */
    CHECK_STR(dp_last_error(), "dp_optim_step: the norm of the gradients is inf");
    dp_close(ctx);
}

/* Devices with memory of their own follow the first. */
TEST(unreduced_parameters_are_stepped_once)
{
    const float own = 4;
    dp_ctx *ctx = open_on(toy_device(), 3);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par = spread_par(ctx);
    dp_optim *optim = NULL;
    dp_tensor data;
    dp_value saved;
    float got = 0;
    scribble(ctx);
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 0.5, .momentum = 0.5}}, &optim));
    set_grad(par, 1, &own);
    CHECK_OK(dp_optim_step(optim));
    for (size_t owner = 0; owner < 3; owner++) {
        CHECK_OK(dp_owner_edit(par, owner, 1, &data, NULL));
        CHECK_OK(dp_read(ctx, &data, &got, sizeof got));
        CHECK_F64(got, owner == 0 ? -2 : 0, 0);
    }
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_OK(dp_optim_load(optim, saved));
    set_grad(par, 1, &own);
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_owner_edit(par, 0, 1, &data, NULL));
    CHECK_OK(dp_read(ctx, &data, &got, sizeof got));
    CHECK_F64(got, -2 - 0.5 * (0.5 * 4 + 4), 0); /* with its momentum */
    dp_close(ctx);
}

/* ... and so are its gradients divided and clipped, while all owners' are of what is reduced. */
TEST(unreduced_gradients_are_clipped_once)
{
    static const double want[] = {1.5, 0.75, 0.5}; /* divided, then by norm, then by value */
    const float own[] = {4};
    dp_ctx *ctx = open_on(toy_device(), 3);
    dp_module *par = spread_par(ctx);
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 2}},
                             &optim));
    follow(par);
    set_grad(par, 0, (const float[]){3, 0});
    set_grad(par, 1, own);
    for (int i = 0; i < 3; i++) {
        if (i == 0)
            CHECK_OK(dp_optim_unscale(optim)); /* 1.5, 0 and 2 */
        else if (i == 1)
            CHECK_OK(dp_clip_grad_norm(par, 1.25, 2, NULL));
        else
            CHECK_OK(dp_clip_grad_value(par, 0.5));
        for (size_t owner = 0; owner < 3; owner++)
            for (size_t param = 0; param < 2; param++) {
                double all = want[i], one = i < 2 ? want[i] * 4 / 3 : want[i];
                dp_tensor data, grad;
                float got = 0;
                CHECK_OK(dp_owner_edit(par, owner, param, &data, &grad));
                CHECK_OK(dp_narrow(&grad, 0, 0, 1, &grad));
                CHECK_OK(dp_read(ctx, &grad, &got, sizeof got));
                CHECK_F64(got, param == 0 ? all : owner == 0 ? one : 4, 1e-6);
            }
    }
    dp_close(ctx);
}

static dp_optim *meddled;
static dp_status met[2];

static dp_status meddle(dp_call *call)
{
    met[call->local_rank] = dp_optim_unscale(meddled);
    call->out = dp_none();
    return DP_OK;
}

/* While all devices run, gradients are left alone. */
TEST(gradients_are_not_divided_in_a_forward)
{
    static const dp_method meddling[] = {{"forward", meddle}, {"backward", give_none}};
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}};
    dp_ctx *ctx = open_on(toy_device(), 2);
    dp_module *net = NULL, *par = NULL;
    dp_tensor data, grad;
    float got = 0;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = meddling,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1},
                              &net));
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .scale = {.scale = 2}},
                             &meddled));
    set_grad(par, 0, (const float[]){4});
    follow(par);
    CHECK_STATUS(met[0], DP_ERR_STATE);
    CHECK_STATUS(met[1], DP_ERR_STATE);
    CHECK_OK(dp_optim_unscale(meddled));
    for (size_t owner = 0; owner < 2; owner++) {
        CHECK_OK(dp_owner_edit(par, owner, 0, &data, &grad));
        CHECK_OK(dp_read(ctx, &grad, &got, sizeof got));
        CHECK_F64(got, 2, 0);
    }
    dp_close(ctx);
}

/* ---- which are stepped together -------------------------------------------------------------- */

static struct seen {
    size_t calls, count;
    char names[64];
} seen;

static dp_status look(const dp_rule_args *args)
{
    seen.calls++;
    seen.count += args->count;
    if (args->name != NULL)
        snprintf(seen.names + strlen(seen.names), sizeof seen.names - strlen(seen.names),
                 "%s:%d:%d ", args->name, args->ndim, (int)args->shape[0]);
    return DP_OK;
}

/* Gradients that are made by hand. */
static void give_grads(dp_module *net)
{
    dp_tensor data, grad;
    for (size_t i = 0; i < dp_module_param_count(net); i++)
        CHECK_OK(dp_params_edit(net, i, &data, &grad));
}

static void check_seen(dp_ctx *ctx, dp_optim_config config, bool packed, dp_dtype dtype,
                       size_t calls, const char *names)
{
    dp_module *net = wide_net_of(ctx, dtype, packed);
    dp_optim *optim = NULL;
    seen = (struct seen){0};
    config.hyper.lr = 1;
    CHECK_OK(dp_optim_create(net, &config, &optim));
    give_grads(net);
    CHECK_OK(dp_optim_step(optim));
    CHECK_INT(seen.calls, calls);
    CHECK_INT(seen.count, WIDE);
    CHECK_STR(seen.names, names);
}

TEST(neighbours_are_stepped_together)
{
    static const dp_rule any = {.head = DP_TABLE(dp_rule), .name = "any", .step = look};
    static const dp_rule each = {
        .head = DP_TABLE(dp_rule), .name = "each", .step = look, .whole = true};
    static const dp_param_group group = {.match = "c"};
    dp_ctx *ctx = open_here(1);
    check_seen(ctx, (dp_optim_config){.rule = &any}, true, DP_F32, 1, "");
    check_seen(ctx, (dp_optim_config){.rule = &any}, false, DP_F32, 3, "");
    check_seen(ctx, (dp_optim_config){.rule = &any, .groups = &group, .group_count = 1}, true,
               DP_F32, 2, "");
    check_seen(ctx, (dp_optim_config){.rule = &each}, true, DP_F32, 3, "a:2:7 b:1:5 c:1:700 ");
    check_seen(ctx, (dp_optim_config){.rule = &each, .masters = true}, true, DP_F16, 3,
               "a:2:7 b:1:5 c:1:700 ");
    dp_close(ctx);
}

static dp_module *layers_of(dp_ctx *ctx, bool packed)
{
    static const dp_param_config layers[] = {{.name = "a", .ndim = 1, .shape = {32}},
                                             {.name = "b", .ndim = 1, .shape = {16}},
                                             {.name = "c", .ndim = 1, .shape = {10}},
                                             {.name = "d", .ndim = 1, .shape = {48}}};
    const dp_module_config config = {
        .name = "layers", .params = layers, .param_count = 4, .packed = packed};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    return net;
}

/* The last parameter comes first in memory, where nothing lies between `d` and `c`, or `b` and
   `a`. */
TEST(neighbours_in_memory_need_not_be_packed)
{
    static const dp_rule any = {.head = DP_TABLE(dp_rule), .name = "any", .step = look};
    static const dp_param_group group = {.match = "b"};
    dp_ctx *ctx = open_here(1);
    dp_module *net = layers_of(ctx, false);
    for (size_t grouped = 0; grouped < 2; grouped++) {
        dp_optim_config config = {
            .rule = &any, .hyper = {.lr = 1}, .groups = &group, .group_count = grouped};
        dp_optim *optim = NULL;
        CHECK_OK(dp_optim_create(net, &config, &optim));
        seen = (struct seen){0};
        give_grads(net);
        CHECK_OK(dp_optim_step(optim));
        CHECK_INT(seen.calls, 2 + grouped);
        CHECK_INT(seen.count, 32 + 16 + 10 + 48);
        dp_optim_destroy(optim);
    }
    dp_close(ctx);
}

static dp_value saved_state(dp_scope *scope, dp_optim *optim)
{
    dp_value saved;
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    return dp_get(saved, "state");
}

/* State is saved in the order of the module's parameters, and goes to where they lie. */
TEST(saved_state_does_not_know_how_memory_lies)
{
    static const char *const names[] = {"a", "b", "c", "d"};
    dp_ctx *ctx = open_here(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_optim *optims[2];
    for (int packed = 0; packed < 2; packed++) {
        dp_module *net = layers_of(ctx, packed);
        dp_tensor data, grad;
        dp_value saved;
        CHECK_OK(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1, .momentum = 0.5}},
                                 &optims[packed]));
        if (packed) {
            CHECK_OK(dp_optim_save(optims[0], scope, &saved));
            CHECK_OK(dp_optim_load(optims[1], saved));
            continue;
        }
        for (size_t i = 0; i < 4; i++) {
            CHECK_OK(dp_params_edit(net, i, &data, &grad));
            for (int k = 0; k < grad.shape[0]; k++)
                ((float *)grad.data)[k] = (float)(100 * i) + (float)k;
        }
        CHECK_OK(dp_optim_step(optims[0]));
    }
    for (int packed = 0; packed < 2; packed++) {
        dp_value state = saved_state(scope, optims[packed]);
        CHECK_INT(dp_count(state), 4);
        for (size_t i = 0; i < 4; i++) {
            const dp_tensor *own;
            CHECK_STR(dp_key_at(state, i), names[i]);
            CHECK_OK(dp_as_tensor(dp_at(dp_at(state, i), 0), "momentum", DP_F32, 1, &own));
            for (int k = 0; k < own->shape[0]; k++)
                CHECK_F64(((float *)own->data)[k], (double)(100 * i) + k, 0);
        }
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

/* Neighbours are one to the norm too, whatever was in memory before. */
TEST(a_norm_is_that_of_neighbours_together)
{
    dp_ctx *ctx = open_on(decorate_device(dp_cpu()), 1);
    dp_module *packed = wide_net_of(ctx, DP_F32, true), *net = wide_net_of(ctx, DP_F32, false);
    double norm = 0;
    for (int i = 0; i < 2; i++) {
        dp_module *module = i == 0 ? packed : net;
        CHECK_OK(dp_grad_norm(module, 2, &norm)); /* gradients are there from now on */
        scribble(ctx);
        int before = deco_calls(DECO_kernel);
        CHECK_OK(dp_grad_norm(module, 2, &norm));
        CHECK_INT(deco_calls(DECO_kernel) - before, i == 0 ? 1 : 3);
        CHECK_F64(norm, 0, 0);
    }
    dp_close(ctx);
}

/* More than there is room for master copies. */
TEST(a_large_parameter_is_stepped_in_parts)
{
    enum { MANY = (2 << 20) + 3 };
    const dp_param_config param = {.name = "w", .dtype = DP_BF16, .ndim = 1, .shape = {MANY}};
    dp_ctx *ctx = open_here(2);
    dp_module *net = NULL;
    dp_optim *optim = NULL;
    dp_tensor data, grad;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "n", .params = &param, .param_count = 1}, &net));
    CHECK_OK(dp_optim_create(
        net, &(dp_optim_config){.hyper = {.lr = 1, .momentum = 0.5}, .masters = true}, &optim));
    for (int step = 0; step < 2; step++) {
        CHECK_OK(dp_params_edit(net, 0, &data, &grad));
        for (int i = 0; i < MANY; i++)
            ((uint16_t *)grad.data)[i] = i % 2 == 0 ? 0x3F80 : 0x4000; /* 1, 2 */
        CHECK_OK(dp_optim_step(optim));
    }
    CHECK_OK(dp_params_edit(net, 0, &data, &grad));
    for (int i = 0; i < MANY; i++)
        CHECK_INT(((uint16_t *)data.data)[i], i % 2 == 0 ? 0xC020 : 0xC0A0); /* -2.5, -5 */
    dp_close(ctx);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static int fails_at = -1;

static dp_status fail_once(const dp_rule_args *args)
{
    return fails_at >= 0 && args->step == fails_at ? dp_error(DP_ERR_USER, "no more")
                                                   : dp_sgd()->step(args);
}

static void one_fails(meeting *m)
{
    static const dp_rule rule = {.head = DP_TABLE(dp_rule), .name = "fails", .step = fail_once};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = wide_par(ctx, DP_F32, true);
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(
        par, &(dp_optim_config){.rule = &rule, .hyper = {.lr = 1}, .sharded = true}, &optim));
    wide_steps(par, optim, 0, 1);
    fails_at = m->process == 1 ? 2 : -1;
    wide_grads(par, 1);
    dp_status status = dp_optim_step(optim);
    CHECK_INT(status, m->process == 1 ? DP_ERR_USER : DP_OK);
    if (status != DP_OK)
        CHECK_STR(dp_last_error(), "dp_optim_step: no more");
    CHECK_OK(dp_barrier(ctx)); /* nobody waits for what the other does not send */
    dp_close(ctx);
}

TEST(one_rank_that_fails_holds_nobody_up)
{
    in_processes(2, one_fails);
}

TEST(unsuitable_rules_are_not_sharded)
{
    static const dp_rule each = {
        .head = DP_TABLE(dp_rule), .name = "each", .step = look, .whole = true};
    dp_ctx *ctx = open_here(2);
    dp_module *par = wide_par(ctx, DP_F32, true), *net = wide_net_of(ctx, DP_F32, true);
    dp_optim *optim = NULL;
    CHECK_ERROR(
        dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, &optim),
        DP_ERR_INVALID, "sharded: 'wide' is no wrapper over ranks: make the optimizer for the one");
    CHECK_ERROR(
        dp_optim_create(par, &(dp_optim_config){.rule = &each, .hyper = {.lr = 1}, .sharded = true},
                        &optim),
        DP_ERR_INVALID, "sharded: rule 'each' needs whole parameters");
    dp_close(ctx);
}

TEST(every_allocation_of_spread_state_fails_once)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    test_allocator counter = {0};
    dp_config config = {.backends = backends,
                        .device_count = 2,
                        .poison = true, /* each small piece of a scope is an allocation too */
                        .allocator = test_allocator_of(&counter)};
    bool fired = true;
    for (int at = 1; fired; at++) {
        dp_ctx *ctx = NULL;
        dp_optim *optim = NULL;
        dp_value saved;
        counter = (test_allocator){0};
        CHECK_OK(dp_open(&config, &ctx));
        dp_module *par = wide_par(ctx, DP_BF16, true);
        dp_scope *scope = dp_scope_begin(ctx);
        counter.fail_at = counter.call_count + (size_t)at;
        dp_status status = dp_optim_create(par,
                                           &(dp_optim_config){.rule = dp_adamw(),
                                                              .hyper = {.lr = 1},
                                                              .clip = {.norm = 1},
                                                              .masters = true,
                                                              .sharded = true},
                                           &optim);
        if (status == DP_OK)
            status = dp_optim_step(optim);
        if (status == DP_OK)
            status = dp_optim_save(optim, scope, &saved);
        fired = counter.fail_count > 0;
        CHECK(status == DP_OK || status == DP_ERR_NO_MEMORY);
        CHECK(fired || status == DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_sharded_steps_of_torch, 60)
{
    on_gpus("21", sharded_over_shm);
}

TEST_SLOW(cuda_nccl_states_do_not_show_how_they_were_spread, 60)
{
    on_gpus("21", states_over_shm);
}

TEST_SLOW(cuda_nccl_norms_are_those_of_the_job, 60)
{
    on_gpus("21", norms_of_a_job);
}
#endif
