/* test_average.c - dp_average.h: SWA, EMA and annealed EMA of a module's parameters. */

#include "tree.h"
/* clang-format off */
#include "nets.h"
#include "dp_average.h"
/* clang-format on */

enum { A = 5, FIXED = 2, ALL = A + 2 * FIXED + 2 };

static const double beginning[ALL] = {1, -2, 0.25, 0, 3, 8, 9, 0.5, -0.5, 7, 1e6};

/* "inner.a", a frozen parameter, buffers of floats and of whole numbers, one that is empty. */
static dp_module *net_of(dp_ctx *ctx, dp_dtype dtype, int rank)
{
    const dp_param_config own[] = {
        {.name = "fixed", .ndim = 1, .shape = {FIXED}, .frozen = true},
        {.name = "mean", .ndim = 1, .shape = {FIXED}, .buffer = true},
        {.name = "count", .dtype = DP_I64, .ndim = 1, .shape = {2}, .buffer = true},
        {.name = "none", .ndim = 2, .shape = {0, 3}}};
    const dp_param_config inner = {.name = "a", .dtype = dtype, .ndim = 1, .shape = {A}};
    return net_with_child(ctx, rank, own, 4, rank, &inner);
}

static const char *const names[] = {"inner.a", "fixed", "mean", "count"};
static const int counts[] = {A, FIXED, FIXED, 2};

/* All numbers of one owner, in the order of `names`. */
static void net_io(dp_module *net, size_t owner, bool put, double *numbers)
{
    dp_ctx *ctx = dp_module_ctx(net);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < 4; numbers += counts[i++]) {
        dp_tensor data, wide;
        size_t param = 0;
        CHECK_OK(dp_module_find(net, names[i], &param));
        CHECK_OK(dp_owner_edit(net, owner, param, &data, NULL));
        CHECK_OK(dp_tensor_from(scope, data.device, numbers, DP_F64, 1, data.shape, &wide));
        CHECK_OK(put ? dp_cast(ctx, &data, &wide) : dp_cast(ctx, &wide, &data));
        if (!put)
            CHECK_OK(dp_read(ctx, &wide, numbers, (size_t)counts[i] * sizeof *numbers));
    }
    dp_scope_end(scope);
}

/* What a step makes of the numbers. */
static void numbers_of(int step, double *out)
{
    for (int k = 0; k < ALL; k++)
        out[k] = beginning[k] + (double)((step * 7 + k * 13) % 17 - 8) / (k < ALL - 2 ? 8 : 1);
}

static void step_to(dp_module *net, int step)
{
    double numbers[ALL];
    numbers_of(step, numbers);
    for (size_t owner = 0; owner < dp_owner_count(net); owner++)
        net_io(net, owner, true, numbers);
}

static dp_average *average_of(dp_module *net, dp_average_config config)
{
    dp_average *average = NULL;
    CHECK_OK(dp_average_create(net, &config, &average));
    return average;
}

static dp_average_info info_of(const dp_average *average)
{
    dp_average_info info;
    CHECK_OK(dp_average_info_get(average, &info));
    return info;
}

/* What every owner has between begin and end. */
static void averages_of(dp_module *net, dp_average *average, size_t owner, double *out)
{
    CHECK_OK(dp_average_begin(average));
    CHECK(info_of(average).begun);
    net_io(net, owner, false, out);
    CHECK_OK(dp_average_end(average));
    CHECK(!info_of(average).begun);
}

/* ---- mmengine's formulas --------------------------------------------------------------------- */

/* One update of a number, by the words of mmengine. */
static double formula(const dp_average_config *config, int64_t steps, double average, double source)
{
    double momentum = config->momentum < 0 ? 0 : config->momentum > 0 ? config->momentum : 0.0002;
    double gamma = config->gamma > 0 ? config->gamma : 100;
    int64_t interval = config->interval > 0 ? config->interval : 1;
    if (steps == 0)
        return source;
    if (steps % interval != 0)
        return average;
    if (config->rule == DP_AVERAGE_SWA)
        return average + (source - average) / (double)(steps / interval + 1);
    if (config->rule == DP_AVERAGE_ANNEALED)
        momentum = fmax(momentum, gamma / (gamma + (double)steps));
    return (1 - momentum) * average + momentum * source;
}

static void check_formula(dp_module *net, dp_average *average, dp_average_config config, int steps,
                          double tolerance)
{
    double want[ALL], source[ALL], got[ALL];
    memcpy(want, beginning, sizeof want);
    for (int step = 0; step < steps; step++) {
        numbers_of(step, source);
        step_to(net, step);
        CHECK_OK(dp_average_update(average));
        for (int k = 0; k < ALL; k++) {
            bool buffer = k >= A + FIXED, whole = k >= ALL - 2;
            bool due = step % (config.interval > 0 ? config.interval : 1) == 0;
            if (buffer && (!config.buffers || (whole && due)))
                want[k] = source[k];
            else if (!whole)
                want[k] = formula(&config, step, want[k], source[k]);
        }
    }
    for (size_t owner = 0; owner < dp_owner_count(net); owner++) {
        averages_of(net, average, owner, got);
        for (int k = 0; k < ALL; k++)
            CHECK_F64(got[k], want[k], tolerance * fmax(1, fabs(want[k])));
        net_io(net, owner, false, got);
        CHECK_BYTES(got, source, sizeof got);
    }
    CHECK_INT(info_of(average).updates, steps);
}

static const dp_average_config rules[] = {
    {.rule = DP_AVERAGE_EMA},
    {.rule = DP_AVERAGE_EMA, .momentum = 0.25},
    {.rule = DP_AVERAGE_EMA, .momentum = 0.7, .buffers = true},
    {.rule = DP_AVERAGE_EMA, .momentum = 0.5, .interval = 3, .buffers = true},
    {.rule = DP_AVERAGE_SWA},
    {.rule = DP_AVERAGE_SWA, .interval = 2},
    {.rule = DP_AVERAGE_SWA, .interval = 4, .buffers = true},
    {.rule = DP_AVERAGE_ANNEALED},
    {.rule = DP_AVERAGE_ANNEALED, .gamma = 2, .momentum = 0.3, .interval = 2},
    {.rule = DP_AVERAGE_ANNEALED, .gamma = 2, .momentum = DP_ZERO},
    {.rule = DP_AVERAGE_EMA, .momentum = DP_ZERO}, /* stays at the first */
};

TEST_BACKENDS(averages_are_mmengines)
{
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        dp_module *net = net_of(ctx, i % 2 == 0 ? DP_F32 : DP_F64, 0);
        net_io(net, 0, true, (double[]){1, -2, 0.25, 0, 3, 8, 9, 0.5, -0.5, 7, 1e6});
        dp_average *average = average_of(net, rules[i]);
        check_formula(net, average, rules[i], 11, 1e-6);
        CHECK_OK(dp_average_update(average));
        CHECK_INT(info_of(average).updates, 12);
        CHECK_INT(info_of(average).bytes, (i % 2 == 0 ? 4 : 8) * A + 4 * 2 * FIXED + 8 * 2);
        dp_average_destroy(average);
        CHECK_OK(dp_module_destroy(net));
    }
}

/* 0.5 of 1, then 3: 2; the mean of 1, 3, 8: 4. */
TEST_BACKENDS(worked_values)
{
    static const double sources[] = {1, 3, 8}, want[3][3] = {{1, 2, 5}, {1, 2, 4}, {1, 2.6, 6.2}};
    static const dp_average_config how[] = {
        {.rule = DP_AVERAGE_EMA, .momentum = 0.5},
        {.rule = DP_AVERAGE_SWA},
        {.rule = DP_AVERAGE_ANNEALED, .momentum = 0.5, .gamma = 4}}; /* 4/5, then max(0.5, 4/6) */
    for (int i = 0; i < 3; i++) {
        dp_module *net = net_of(ctx, DP_F64, 0);
        dp_average *average = average_of(net, how[i]);
        double numbers[ALL] = {0};
        for (int k = 0; k < 3; k++) {
            numbers[0] = sources[k];
            net_io(net, 0, true, numbers);
            CHECK_OK(dp_average_update(average));
            averages_of(net, average, 0, numbers);
            CHECK_F64(numbers[0], want[i][k], 1e-14);
        }
        if (i == 2)
            CHECK_F64(info_of(average).momentum, 4.0 / 7, 1e-15);
    }
}

/* 1 - 0.0002 is no f32: with weights that do not add up to 1 numbers shrink, by 1.5e-4 in the
   end. */
TEST_BACKENDS(the_average_of_equal_numbers_is_that_number)
{
    double got[ALL];
    dp_module *net = net_of(ctx, DP_F32, 0);
    step_to(net, 3);
    dp_average *average = average_of(net, (dp_average_config){.momentum = 0.0002});
    for (int i = 0; i < 3000; i++)
        CHECK_OK(dp_average_update(average));
    averages_of(net, average, 0, got);
    for (int k = 0; k < A; k++) {
        double want[ALL];
        numbers_of(3, want);
        CHECK_F64(got[k], want[k], 1e-6 * fabs(want[k]));
    }
}

/* 1 and 1000 times 0.002 of the way to 2: a bf16 average would have stayed where it was. */
TEST_BACKENDS(averages_of_halves_are_f32)
{
    static const dp_dtype halves[] = {DP_F16, DP_BF16};
    for (int i = 0; i < 2; i++) {
        double numbers[ALL] = {1, 1, 1, 1, 1}, got[ALL];
        dp_module *net = net_of(ctx, halves[i], 0);
        dp_average *average = average_of(net, (dp_average_config){.momentum = 0.002});
        net_io(net, 0, true, numbers);
        CHECK_OK(dp_average_update(average));
        numbers[0] = 2;
        net_io(net, 0, true, numbers);
        for (int k = 0; k < 1000; k++)
            CHECK_OK(dp_average_update(average));
        averages_of(net, average, 0, got);
        CHECK_F64(got[0], 2 - pow(1 - 0.002, 1000), 0.01);
        CHECK_F64(got[1], 1, 0);
        CHECK_INT(info_of(average).bytes, 4 * A + 4 * 2 * FIXED + 8 * 2);
        net_io(net, 0, false, got);
        CHECK_BYTES(got, numbers, sizeof got);
    }
}

/* Each is computed where it lies. */
TEST_BACKENDS(averages_of_halves_on_several_devices)
{
    const dp_param_config param = {.name = "w", .dtype = DP_BF16, .ndim = 1, .shape = {3}};
    dp_module *net = net_with_child(ctx, 0, &param, 1, 1, &param);
    dp_average *average = average_of(net, (dp_average_config){.momentum = 0.5});
    for (int k = 0; k < 3; k++) {
        dp_value saved;
        CHECK_OK(dp_average_update(average));
        CHECK_OK(dp_average_save(average, scope, &saved));
        for (size_t i = 0; i < 2; i++) {
            static const double want[] = {0, 0.5, 0.75};
            double got = 0;
            dp_tensor data, first;
            CHECK_OK(dp_narrow(dp_get(dp_get(saved, "average"), i == 0 ? "w" : "inner.w").as.t, 0,
                               2, 1, &first));
            CHECK_OK(dp_item(ctx, dp_of(scope, &first), &got));
            CHECK_F64(got, want[k], 0);
            CHECK_OK(dp_params_edit(net, i, &data, NULL));
            CHECK_OK(dp_fill(ctx, &data, dp_float(1)));
        }
    }
}

/* Of an update that does not average it is that of the next one that does. */
TEST_BACKENDS(the_momentum_of_the_next_average)
{
    static const dp_average_config how[] = {
        {.rule = DP_AVERAGE_SWA, .interval = 2},
        {.rule = DP_AVERAGE_ANNEALED, .momentum = 0.25, .gamma = 4, .interval = 2},
        {.rule = DP_AVERAGE_SWA, .interval = INT64_MAX}};
    static const double want[3][4] = {{1, 1.0 / 2, 1.0 / 2, 1.0 / 3},
                                      {1, 4.0 / 6, 4.0 / 6, 4.0 / 8},
                                      {1, 1.0 / 2, 1.0 / 2, 1.0 / 2}};
    for (int i = 0; i < 3; i++) {
        dp_average *average = average_of(net_of(ctx, DP_F32, 0), how[i]);
        for (int k = 0; k < 4; k++) {
            CHECK_F64(info_of(average).momentum, want[i][k], 1e-15);
            CHECK_OK(dp_average_update(average));
        }
    }
}

/* ---- owners ---------------------------------------------------------------------------------- */

TEST_BACKENDS(every_owner_has_its_averages)
{
    dp_module *net = net_of(ctx, DP_F32, 0), *par = NULL;
    int owners = 1;
    for (int i = 1; i < TREE_DEVICES; i++) {
        bool shared = false;
        for (int k = 0; k < i; k++)
            shared = shared || tree_share_memory(ctx, k, i);
        owners += !shared;
    }
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_INT(dp_owner_count(par), owners);
    dp_average *average = average_of(par, rules[1]);
    check_formula(par, average, rules[1], 5, 1e-6);
    CHECK_OK(dp_average_begin(average));
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_average_end(average));
    CHECK_OK(dp_params_compare(par));
}

/* Gradients of all numbers of a net; between the forward and the backward averages are made, and
   `average` is brought up to date. NULL: nothing happens there. */
static void gradients_around(dp_ctx *ctx, dp_module *par, dp_average *average, float *out)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_average *other = NULL;
    dp_pass *pass = NULL;
    dp_info info;
    dp_value y, saved;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(
        dp_invoke(par, scope, "forward", net_rows_of(scope, &info, 0), dp_none(), NULL, &y, &pass));
    if (average != NULL) {
        CHECK_OK(dp_average_update(average));
        CHECK_OK(dp_average_create(par, NULL, &other));
        CHECK_OK(dp_average_update(other));
        CHECK_OK(dp_average_save(other, scope, &saved));
        CHECK_OK(dp_average_load(average, saved));
        CHECK_OK(dp_average_update(average));
        dp_average_destroy(other);
    }
    CHECK_OK(dp_backward(pass, y, NULL));
    net_numbers(ctx, par, true, out);
    dp_scope_end(scope);
}

/* An average only reads its module: no owner counts as written to. */
TEST_BACKENDS(updates_between_a_forward_and_its_backward)
{
    static const net_shape rows_first = {0};
    float want[NET_PARAMS], got[NET_PARAMS], twice[NET_PARAMS];
    dp_module *net = net_create(ctx, &rows_first, 0), *par = NULL;
    CHECK_OK(dp_distributed(net, NULL, &par));
    dp_average *average = average_of(par, rules[1]);
    gradients_around(ctx, par, NULL, want);
    gradients_around(ctx, par, average, got);
    CHECK_BYTES(got, want, sizeof got);
    CHECK_INT(info_of(average).updates, 2);
    for (size_t owner = 0; owner < dp_owner_count(par); owner++)
        for (size_t i = 0; i < 2; i++) {
            dp_tensor data;
            CHECK_OK(dp_owner_edit(par, owner, i, &data, NULL));
            CHECK_OK(dp_axpby(ctx, 2, &data, 0, &data, &data));
        }
    CHECK_OK(dp_average_update(average));
    CHECK_OK(dp_average_begin(average)); /* 0.75 * 1 + 0.25 * 2 of what it was */
    net_numbers(ctx, net, false, got);
    CHECK_OK(dp_average_end(average));
    net_numbers(ctx, net, false, twice);
    for (int k = 0; k < NET_PARAMS; k++)
        CHECK_F64(got[k], 0.625 * (double)twice[k], 0);
}

static dp_average *updated_inside;
static dp_value loaded_inside; /* dp_none(): it is updated */
static dp_status inside;       /* the first replica's */

static dp_status update_inside(dp_call *call)
{
    if (call->local_rank == 0)
        inside = loaded_inside.kind == DP_NONE ? dp_average_update(updated_inside)
                                               : dp_average_load(updated_inside, loaded_inside);
    call->out = dp_none();
    return DP_OK;
}

/* While replicas run each keeps to its device: averages that lie on several are left alone, all of
   them; those on one device are for the replica there, or for a method that runs alone. */
TEST_BACKENDS(updates_inside_a_method)
{
    static const dp_method forward = {"forward", update_inside};
    const dp_param_config params[] = {{.name = "a", .ndim = 1, .shape = {A}},
                                      {.name = "b", .ndim = 1, .shape = {FIXED}}};
    dp_module *net = NULL, *par = NULL;
    dp_tensor data;
    dp_value out, saved;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = &forward,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = 2},
                              &net));
    CHECK_OK(dp_distributed(net, NULL, &par));
    updated_inside = average_of(par, rules[1]);
    loaded_inside = dp_none();
    const bool one = dp_owner_count(par) == 1;
    dp_value batch = DP_LIST_OF(scope, tree_of(scope, "f32[8]"));
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(dp_params_edit(net, i, &data, NULL));
        CHECK_OK(dp_fill(ctx, &data, dp_int(2)));
    }
    CHECK_OK(dp_invoke(par, scope, "forward", batch, dp_none(), NULL, &out, NULL));
    CHECK_STATUS(inside, one ? DP_OK : DP_ERR_STATE);
    CHECK_INT(info_of(updated_inside).updates, one);
    CHECK_OK(dp_average_save(updated_inside, scope, &saved));
    CHECK_TREE(ctx, dp_get(saved, "average"),
               one ? "{'a': f32[5]=2 2 2 2 2, 'b': f32[2]=2 2}"
                   : "{'a': f32[5]=0 0 0 0 0, 'b': f32[2]=0 0}");
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    CHECK_OK(inside);
    CHECK_INT(info_of(updated_inside).updates, 1 + one);
    CHECK_OK(dp_average_save(updated_inside, scope, &loaded_inside));
    CHECK_OK(dp_average_load(updated_inside, saved));
    CHECK_OK(dp_invoke(par, scope, "forward", batch, dp_none(), NULL, &out, NULL));
    CHECK_STATUS(inside, one ? DP_OK : DP_ERR_STATE);
    CHECK_INT(info_of(updated_inside).updates, one ? 2 : 0);
    CHECK_OK(dp_average_save(updated_inside, scope, &saved));
    CHECK_TREE(ctx, dp_get(saved, "average"),
               one ? "{'a': f32[5]=2 2 2 2 2, 'b': f32[2]=2 2}"
                   : "{'a': f32[5]=0 0 0 0 0, 'b': f32[2]=0 0}");
}

/* ---- in a module ----------------------------------------------------------------------------- */

TEST_BACKENDS(a_module_has_its_own_numbers_again)
{
    double before[ALL], got[ALL], twos[ALL];
    dp_module *net = net_of(ctx, DP_F32, 0);
    dp_average *average = average_of(net, rules[1]);
    CHECK_ERROR(dp_average_end(average), DP_ERR_STATE, "dp_average_end: nothing was begun");
    for (int step = 0; step < 3; step++) {
        step_to(net, step);
        CHECK_OK(dp_average_update(average));
    }
    net_io(net, 0, false, before);
    averages_of(net, average, 0, twos);
    CHECK_OK(dp_average_begin(average));
    CHECK_ERROR(dp_average_begin(average), DP_ERR_STATE,
                "dp_average_begin: 'net' has the averages since dp_average_begin");
    CHECK_ERROR(dp_average_update(average), DP_ERR_STATE, "call dp_average_end before an update");
    CHECK_ERROR(dp_average_copy(average, net), DP_ERR_STATE, "call dp_average_end before a copy");
    step_to(net, 9); /* whatever happens to it */
    CHECK_OK(dp_average_end(average));
    net_io(net, 0, false, got);
    CHECK_BYTES(got, before, sizeof got);
    averages_of(net, average, 0, got);
    CHECK_BYTES(got, twos, sizeof got);
    CHECK_OK(dp_average_begin(average));
    dp_average_destroy(average); /* ends that */
    net_io(net, 0, false, got);
    CHECK_BYTES(got, before, sizeof got);
    dp_average_destroy(NULL);
}

TEST_BACKENDS(averages_are_copied_into_a_module)
{
    for (int i = 0; i < 3; i++) {
        double want[ALL], got[ALL];
        dp_module *net = net_of(ctx, i == 1 ? DP_BF16 : DP_F32, 0), *other = NULL;
        dp_average *average = average_of(net, rules[1]);
        for (int step = 0; step < 3; step++) {
            step_to(net, step);
            CHECK_OK(dp_average_update(average));
        }
        averages_of(net, average, 0, want);
        CHECK_OK(dp_module_copy(net, 2, &other));
        CHECK_OK(dp_average_copy(average, i == 2 ? net : other));
        net_io(i == 2 ? net : other, 0, false, got);
        CHECK_BYTES(got, want, sizeof got);
        if (i < 2)
            continue;
        dp_module *wide = net_of(ctx, DP_F64, 0), *foreign = net_create(ctx, &(net_shape){0}, 0);
        step_to(wide, 1);
        net_io(wide, 0, false, want);
        CHECK_ERROR(dp_average_copy(average, wide), DP_ERR_MISMATCH,
                    "dp_average_copy: 'inner.a' of 'net' has another dtype or shape");
        CHECK_ERROR(dp_average_copy(average, foreign), DP_ERR_INVALID, "fixed");
        CHECK_ERROR(dp_average_copy(average, NULL), DP_ERR_INVALID, "not a module");
        net_io(wide, 0, false, got);
        CHECK_BYTES(got, want, sizeof got);
    }
}

static dp_module *pair_of(dp_ctx *ctx, const char *tie, float number)
{
    const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {1}},
                                      {.name = "t", .ndim = 1, .shape = {1}, .same_as = tie}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "pair", .params = params, .param_count = 2}, &net));
    for (size_t i = 0; i < dp_module_param_count(net); i++)
        CHECK_OK(dp_params_write(net, i, &(float){number + (float)i}, sizeof number));
    return net;
}

static void check_pair(dp_ctx *ctx, dp_module *net, size_t i, float want)
{
    dp_param_info info;
    float got = 0;
    CHECK_OK(dp_module_param(net, i, &info));
    CHECK_OK(dp_read(ctx, &info.data, &got, sizeof got));
    CHECK_F64(got, want, 0);
}

/* One memory cannot have two averages; what has none stays. */
TEST_BACKENDS(averages_and_ties)
{
    dp_module *untied = pair_of(ctx, NULL, 1), *tied = pair_of(ctx, "w", 5);
    dp_average *of_untied = NULL, *of_tied = NULL;
    CHECK_OK(dp_average_create(untied, NULL, &of_untied));
    CHECK_OK(dp_average_create(tied, NULL, &of_tied));
    CHECK_ERROR(dp_average_copy(of_untied, tied), DP_ERR_MISMATCH,
                "dp_average_copy: 't' of 'pair' is tied, and its average is not");
    check_pair(ctx, tied, 0, 5);
    CHECK_OK(dp_average_copy(of_tied, untied));
    check_pair(ctx, untied, 0, 5);
    check_pair(ctx, untied, 1, 2);
}

/* ---- saved and loaded ------------------------------------------------------------------------ */

TEST_BACKENDS(averages_go_on_where_they_stopped)
{
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        double want[ALL], got[ALL];
        dp_module *net = net_of(ctx, i % 2 == 0 ? DP_BF16 : DP_F32, 0), *again = NULL;
        dp_average *average = average_of(net, rules[i]), *second = NULL;
        dp_value saved;
        CHECK_OK(dp_module_copy(net, 1, &again));
        for (int step = 0; step < 8; step++) {
            if (step == 5) {
                CHECK_OK(dp_average_save(average, scope, &saved));
                second = average_of(again, rules[i]);
                CHECK_OK(dp_average_load(second, saved));
                CHECK_INT(info_of(second).updates, 5);
            }
            step_to(net, step);
            CHECK_OK(dp_average_update(average));
            step_to(again, step);
            if (second != NULL)
                CHECK_OK(dp_average_update(second));
        }
        averages_of(net, average, 0, want);
        averages_of(again, second, 0, got);
        CHECK_BYTES(got, want, sizeof got);
    }
}

TEST_BACKENDS(checkpoint_that_does_not_fit_changes_nothing)
{
    double before[ALL], got[ALL];
    dp_module *net = net_of(ctx, DP_F32, 0);
    dp_average *average = average_of(net, rules[1]);
    dp_value saved, entries;
    for (int step = 0; step < 2; step++) {
        step_to(net, step);
        CHECK_OK(dp_average_update(average));
    }
    averages_of(net, average, 0, before);
    CHECK_OK(dp_average_save(average, scope, &saved));
    entries = dp_get(saved, "average");
    CHECK_INT(dp_count(entries), 5);
    step_to(net, 2);
    dp_value less = DP_DICT(scope, {"inner.a", dp_get(entries, "inner.a")});
    const struct {
        dp_value saved;
        const char *says;
    } wrong[] = {{tree_replaced(scope, saved, "rule", dp_string(scope, "swa")),
                  "the rule is 'ema', saved 'swa'"},
                 {dp_none(), "the rule is 'ema', saved ''"},
                 {tree_replaced(scope, saved, "updates", dp_int(-1)),
                  "'updates' is missing, or not a count"},
                 {tree_replaced(scope, saved, "updates", dp_int(INT64_MAX)),
                  "'updates' is missing, or not a count"},
                 {tree_replaced(scope, saved, "updates", dp_float(1)),
                  "'updates' is missing, or not a count"},
                 {tree_replaced(scope, saved, "average", less), "no average of 'fixed' was saved"},
                 {tree_replaced(scope, saved, "average",
                                tree_replaced(scope, entries, "inner.a", dp_get(entries, "mean"))),
                  "dim 0 of 'inner.a' is 5, saved 2"},
                 {tree_replaced(scope, saved, "average",
                                tree_replaced(scope, entries, "count", dp_get(entries, "mean"))),
                  "count"},
                 {tree_replaced(scope, saved, "average",
                                tree_replaced(scope, entries, "more", dp_get(entries, "mean"))),
                  "5 parameters and buffers, saved 6"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        dp_status status = dp_average_load(average, wrong[i].saved);
        CHECK(status == DP_ERR_MISMATCH || status == DP_ERR_INVALID);
        CHECK_SAYS(dp_last_error(), wrong[i].says);
        averages_of(net, average, 0, got);
        CHECK_BYTES(got, before, sizeof got);
    }
    CHECK_ERROR(dp_average_view(average, scope, NULL), DP_ERR_INVALID,
                "dp_average_view: out is NULL");
    CHECK_ERROR(dp_average_save(average, NULL, &saved), DP_ERR_INVALID, "scope is NULL");
    dp_ctx *other = open_cpus(1);
    CHECK_ERROR(dp_average_save(average, dp_scope_begin(other), &saved), DP_ERR_INVALID,
                "dp_average_save: the scope is of another context");
    CHECK_ERROR(dp_average_view(average, dp_scope_begin(other), &saved), DP_ERR_INVALID,
                "dp_average_view: the scope is of another context");
    dp_close(other);
    CHECK_ERROR(dp_average_save(average, scope, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_average_load(average, saved));
}

/* What is saved is a copy, and stays; what is viewed is the next average after the next update. */
TEST_BACKENDS(views_are_of_the_averages_themselves)
{
    static char before[TREE_TEXT], after[TREE_TEXT];
    dp_value saved, viewed;
    dp_module *net = net_of(ctx, DP_F32, 0);
    dp_average *average = average_of(net, rules[1]);
    for (int step = 0; step < 2; step++) {
        step_to(net, step);
        CHECK_OK(dp_average_update(average));
    }
    CHECK_OK(dp_average_save(average, scope, &saved));
    CHECK_OK(dp_average_view(average, scope, &viewed));
    snprintf(before, sizeof before, "%s", tree_text(ctx, saved));
    CHECK_TREE(ctx, viewed, before);
    step_to(net, 2);
    CHECK_OK(dp_average_update(average));
    CHECK_TREE(ctx, saved, before);
    CHECK_OK(dp_average_save(average, scope, &saved));
    snprintf(after, sizeof after, "%s", tree_text(ctx, dp_get(saved, "average")));
    CHECK_TREE(ctx, dp_get(viewed, "average"), after);
    CHECK(strstr(before, after) == NULL);
    CHECK(dp_at(dp_get(viewed, "average"), 0).as.t->read_only);
}

/* ---- bad input ------------------------------------------------------------------------------- */

TEST_BACKENDS(numbers_that_make_no_sense)
{
    static const struct {
        dp_average_config config;
        const char *says;
    } wrong[] = {
        {{.momentum = 1}, "dp_average_create: momentum is 1, not from 0 to below 1"},
        {{.momentum = (double)NAN}, "momentum is nan"},
        {{.rule = DP_AVERAGE_SWA, .momentum = 0.5}, "momentum is 0.5, but SWA has none"},
        {{.rule = DP_AVERAGE_SWA, .gamma = 3}, "gamma is 3, but rule 'swa' has none"},
        {{.gamma = 3}, "gamma is 3, but rule 'ema' has none"},
        {{.rule = DP_AVERAGE_ANNEALED, .gamma = DP_ZERO},
         "gamma is 0, not a finite number above 0"},
        {{.momentum = -0.1}, "momentum is -0.1"},
        {{.momentum = 1.5}, "momentum is 1.5"},
        {{.rule = DP_AVERAGE_ANNEALED, .gamma = -1}, "gamma is -1, not a finite number above 0"},
        {{.rule = DP_AVERAGE_ANNEALED, .gamma = HUGE_VAL}, "gamma is inf"},
        {{.interval = -1}, "interval is -1, which is below 1"},
        {{.rule = (dp_average_rule)3}, "rule is 3"}};
    dp_module *net = net_of(ctx, DP_F32, 0);
    dp_average *average = NULL;
    dp_average_info info;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_ERROR(dp_average_create(net, &wrong[i].config, &average), DP_ERR_INVALID,
                    wrong[i].says);
    CHECK_ERROR(dp_average_create(NULL, NULL, &average), DP_ERR_INVALID, "not a module");
    CHECK_ERROR(dp_average_create(net, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_average_update(NULL), DP_ERR_INVALID, "dp_average_update: average is NULL");
    CHECK_ERROR(dp_average_begin(NULL), DP_ERR_INVALID, "average is NULL");
    CHECK_ERROR(dp_average_end(NULL), DP_ERR_INVALID, "average is NULL");
    CHECK_ERROR(dp_average_copy(NULL, net), DP_ERR_INVALID, "average is NULL");
    CHECK_ERROR(dp_average_save(NULL, scope, NULL), DP_ERR_INVALID, "average is NULL");
    CHECK_ERROR(dp_average_load(NULL, dp_none()), DP_ERR_INVALID, "average is NULL");
    CHECK_ERROR(dp_average_info_get(NULL, &info), DP_ERR_INVALID, "average is NULL");
    CHECK_OK(dp_average_create(net, NULL, &average));
    CHECK_ERROR(dp_average_info_get(average, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_F64(info_of(average).momentum, 0.0002, 0);
    CHECK_OK(dp_module_destroy(net));
    CHECK(dp_average_update(average) != DP_OK);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Updates allocate nothing; where anything else has no memory the module is as it was. */
static void allocations_fail_on(const dp_device_ops *ops)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    bool fired = true;
    for (size_t at = 1; fired; at++) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        dp_average *average = NULL;
        dp_value saved;
        double before[ALL], got[ALL];
        CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                      .device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_module *net = net_of(ctx, DP_BF16, 0);
        dp_scope *scope = dp_scope_begin(ctx);
        step_to(net, 1);
        net_io(net, 0, false, before);
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_average_create(net, &rules[1], &average);
        for (int i = 0; i < 2 && status == DP_OK; i++)
            status = dp_average_update(average);
        size_t calls = counter.call_count;
        for (int i = 0; i < 3 && status == DP_OK; i++)
            status = dp_average_update(average);
        CHECK_INT(counter.call_count, calls);
        if (status == DP_OK)
            status = dp_average_save(average, scope, &saved);
        if (status == DP_OK)
            status = dp_average_copy(average, net);
        if (status == DP_OK)
            status = dp_average_begin(average);
        fired = counter.fail_count > 0;
        CHECK_STATUS(status, fired ? DP_ERR_NO_MEMORY : DP_OK);
        if (average != NULL)
            CHECK(info_of(average).begun == (status == DP_OK));
        if (status == DP_OK)
            CHECK_OK(dp_average_end(average));
        counter.fail_at = 0;
        net_io(net, 0, false, got);
        CHECK_BYTES(got, before, sizeof got);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* Where the host does a device's work it needs memory for that, in the middle of it. */
TEST(every_allocation_fails_once)
{
    allocations_fail_on(dp_cpu());
    allocations_fail_on(toy_device());
}
