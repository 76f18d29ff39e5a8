/* test_norm.c - dp_norm.h: statistics of the whole batch, wherever its rows are. */

#include "examples/custom_device.h"
#include "tree.h"
/* clang-format off */
#include "ranked.h"
#include "dp_check.h"
#include "dp_norm.h"
/* clang-format on */

enum { ROWS = 7, CHANNELS = 3, INNER = 2, SIZE = CHANNELS * INNER };
enum { MEAN, VAR, STEPS, WEIGHT, BIAS };

/* ---- a layer --------------------------------------------------------------------------------- */

typedef struct layer { /* the module's state */
    dp_norm norm;      /* its tensors apart */
    bool affine, bare; /* bare: no running statistics */
} layer;

static dp_norm norm_of(const dp_call *call, dp_tensor tensors[5])
{
    const layer *own = call->state;
    dp_norm norm = own->norm;
    for (size_t i = 0; i < 5; i++)
        if (i < WEIGHT || own->affine)
            tensors[i] = i < WEIGHT ? dp_buffer_tensor(call, i) : dp_param_tensor(call, i);
    norm.mean = own->bare ? NULL : &tensors[MEAN];
    norm.var = own->bare ? NULL : &tensors[VAR];
    norm.steps = &tensors[STEPS];
    norm.weight = own->affine ? &tensors[WEIGHT] : NULL;
    norm.bias = own->affine ? &tensors[BIAS] : NULL;
    return norm;
}

static dp_status layer_forward(dp_call *call)
{
    dp_tensor tensors[5], y;
    const dp_tensor *x;
    const dp_norm norm = norm_of(call, tensors);
    DP_TRY(dp_call_arg_view(call, 0, DP_DTYPE_ANY, -1, &x));
    DP_TRY(dp_norm_forward(call, &norm, x, &y, call->grad_enabled ? &call->saved : NULL));
    call->out = dp_of(call->scope, &y);
    return DP_OK;
}

static dp_status layer_backward(dp_call *call)
{
    bool affine = ((const layer *)call->state)->affine;
    dp_tensor dy, dx, weight, bias;
    if (affine) {
        weight = dp_grad_tensor(call, WEIGHT);
        bias = dp_grad_tensor(call, BIAS);
    }
    DP_TRY(dp_call_out_grad(call, NULL, &dy));
    if (!call->input_grad_wanted)
        return dp_norm_backward(call, call->saved, &dy, NULL, &weight, &bias);
    DP_TRY(dp_norm_backward(call, call->saved, &dy, &dx, affine ? &weight : NULL,
                            affine ? &bias : NULL));
    call->args_grad = DP_TUPLE_OF(call->scope, dp_of(call->scope, &dx));
    return DP_OK;
}

static dp_module *layer_of(dp_ctx *ctx, const layer *state, int64_t channels)
{
    static const dp_method methods[] = {{"forward", layer_forward}, {"backward", layer_backward}};
    const dp_param_config params[] = {
        [MEAN] = {.name = "running_mean", .ndim = 1, .shape = {channels}, .buffer = true},
        [VAR] = {.name = "running_var", .ndim = 1, .shape = {channels}, .buffer = true},
        [STEPS] = {.name = "num_batches_tracked", .dtype = DP_I64, .buffer = true},
        [WEIGHT] = {.name = "weight", .ndim = 1, .shape = {channels}},
        [BIAS] = {.name = "bias", .ndim = 1, .shape = {channels}}};
    static const float ones[] = {1, 1, 1}, weight[] = {1.5f, -0.5f, 0.25f}, bias[] = {0.5f, 0, -1};
    size_t bytes = (size_t)channels * sizeof(float);
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "norm",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = state->affine ? 5 : 3,
                                                  .state = state},
                              &module));
    CHECK_OK(dp_params_write(module, VAR, ones, bytes));
    if (state->affine)
        CHECK_OK(dp_params_write(module, WEIGHT, weight, bytes));
    if (state->affine)
        CHECK_OK(dp_params_write(module, BIAS, bias, bytes));
    return module;
}

static void numbers_of(dp_module *module, size_t param, bool grad, double *out)
{
    dp_ctx *ctx = dp_module_ctx(module);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor data, own, wide;
    CHECK_OK(dp_params_edit(module, param, &data, &own));
    own = grad ? own : data;
    CHECK_OK(dp_tensor_new(scope, own.device, DP_F64, own.ndim, own.shape, &wide));
    CHECK_OK(dp_cast(ctx, &wide, &own));
    CHECK_OK(dp_read(ctx, &wide, out, (size_t)dp_tensor_count(&wide) * sizeof *out));
    dp_scope_end(scope);
}

/* On the devices of a wrapper, parts of these sizes; count 1: the plain module. */
static dp_module *spread(dp_module *module, size_t count, const int64_t *sizes)
{
    static const int ranks[] = {0, 1, 2};
    dp_module *par = NULL;
    if (count == 1)
        return module;
    CHECK_OK(dp_model_parallel(
        module,
        &(dp_parallel_config){
            .local_ranks = ranks,
            .local_rank_count = count,
            .cut = {.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = count}},
        &par));
    return par;
}

/* ---- batches --------------------------------------------------------------------------------- */

static double x_at(int64_t b, int64_t c, int64_t l)
{
    return (double)((b * 37 + c * 11 + l * 7) % 23 - 9) / 8 + (double)c;
}

static double dy_at(int64_t b, int64_t c, int64_t l)
{
    return (double)((b * 29 + c * 17 + l * 5) % 19 - 9) / 16;
}

/* Rows of a batch, from the `first` on, in host memory. */
static dp_tensor rows_of(dp_ctx *ctx, dp_scope *scope, dp_dtype dtype, int64_t first, int64_t rows,
                         double (*at)(int64_t, int64_t, int64_t))
{
    dp_tensor wide, out;
    CHECK_OK(
        dp_tensor_new(scope, (dp_device){0, 0}, DP_F64, DP_SHAPE(rows, CHANNELS, INNER), &wide));
    for (int64_t i = 0; i < rows * SIZE; i++)
        ((double *)wide.data)[i] = at(first + i / SIZE, i / INNER % CHANNELS, i % INNER);
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, dtype, 3, wide.shape, &out));
    CHECK_OK(dp_cast(ctx, &out, &wide));
    return out;
}

/* Tensors of a value, one after another, as f64. Returns how many numbers there are. */
static size_t read_all(dp_ctx *ctx, dp_value value, double *out)
{
    size_t done = 0;
    if (value.kind == DP_TENSOR) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor wide;
        done = (size_t)dp_tensor_count(value.as.t);
        CHECK_OK(dp_tensor_new(scope, value.as.t->device, DP_F64, value.as.t->ndim,
                               value.as.t->shape, &wide));
        CHECK_OK(dp_cast(ctx, &wide, value.as.t));
        CHECK_OK(dp_read(ctx, &wide, out, done * sizeof *out));
        dp_scope_end(scope);
    }
    for (size_t i = 0; i < dp_count(value); i++)
        done += read_all(ctx, dp_at(value, i), out + done);
    return done;
}

/* The gradient of a list of outputs: rows of dy for each part. */
static dp_value grads_for(dp_ctx *ctx, dp_scope *scope, dp_value outs, int64_t first)
{
    dp_value items[TREE_DEVICES];
    if (outs.kind == DP_TENSOR) {
        dp_tensor dy =
            rows_of(ctx, scope, (dp_dtype)outs.as.t->dtype, first, outs.as.t->shape[0], dy_at);
        return dp_of(scope, &dy);
    }
    for (size_t i = 0; i < dp_count(outs); i++) {
        items[i] = grads_for(ctx, scope, dp_at(outs, i), first);
        first += dp_at(outs, i).as.t->shape[0];
    }
    return dp_list_make(scope, DP_LIST, items, dp_count(outs));
}

typedef struct result {
    double y[ROWS * SIZE], dx[ROWS * SIZE], dw[CHANNELS], db[CHANNELS], mean[CHANNELS],
        var[CHANNELS];
} result;

/* A forward and a backward of rows `first` to `first + rows`. */
static result step(dp_module *par, dp_module *module, dp_dtype dtype, int64_t first, int64_t rows)
{
    dp_ctx *ctx = dp_module_ctx(module);
    dp_scope *scope = dp_scope_begin(ctx);
    result got = {.y = {0}};
    dp_tensor x = rows_of(ctx, scope, dtype, first, rows, x_at);
    dp_value out;
    dp_pass *pass;
    dp_input_grad grad;
    CHECK_OK(dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, dp_of(scope, &x)), dp_none(), NULL,
                       &out, &pass));
    CHECK_OK(dp_backward(pass, grads_for(ctx, scope, out, first), &grad));
    CHECK_INT(read_all(ctx, out, got.y), rows * SIZE);
    CHECK_INT(read_all(ctx, grad.args, got.dx), rows * SIZE);
    if (dp_module_param_count(module) > WEIGHT) {
        numbers_of(module, WEIGHT, true, got.dw);
        numbers_of(module, BIAS, true, got.db);
    }
    numbers_of(module, MEAN, false, got.mean);
    numbers_of(module, VAR, false, got.var);
    dp_scope_end(scope);
    return got;
}

static void check_near(const double *got, const double *want, int64_t count, double tolerance)
{
    for (int64_t i = 0; i < count; i++)
        CHECK_F64(got[i], want[i], tolerance);
}

/* ---- torch ----------------------------------------------------------------------------------- */

/* torch 2.15, BatchNorm1d on the whole batch, f32: what SyncBatchNorm makes of it on any ranks. */
/* clang-format off */
static const result torch = {
    .y = {-1.8435024, -0.352182686, -0.0392660946, -0.588991344, -0.628261328, -1.20253336,
          1.13913703, 2.63045669, 0.667523563, 0.117798269, -0.951289356, -0.700045347,
          -0.778274059, 0.713045657, -0.431926996, 0.824587882, -1.27431738, -1.02307343,
          2.20436525, -1.20436537, 0.274862647, -0.274862647, -0.771829367, -1.3461014,
          0.286954343, 1.77827406, -0.824587941, 0.431926996, -1.09485745, -0.843613327,
          -1.63045669, -0.139137015, -0.117798276, -0.667523563, -1.41788542, -1.16664135,
          1.35218263, 2.84350228, 0.588991344, 0.0392660871, -0.915397346, -0.664153337},
    .dx = {-0.709525585, -0.272535145, -0.318304986, 0.290750921, 0.112522326, -0.160070166,
           0.164455295, 0.601445794, -0.0411924273, -0.178192243, -0.0610002056, 0.0380697623,
           -0.671305478, -0.234314963, -0.315192044, 0.0989203155, 0.106451318, -0.135452777,
           0.202675492, 0.953858137, -0.0380794853, -0.175079301, -0.0363828056, 0.0319987535,
           -0.633085251, -0.196094811, 0.43397662, 0.102033265, 0.131068707, -0.110835381,
           0.555087924, 0.992078304, -0.0349665433, -0.171966344, -0.042453818, 0.0566161461,
           -0.594865143, -0.157874614, 0.242146015, 0.105146214, 0.15568611, -0.0862179771},
    .dw = {0.790044367, 1.20252407, -0.453136533},
    .db = {-0.8125, -0.1875, 0.4375},
    .mean = {0.0250000004, 0.118749999, 0.233035713},
    .var = {0.983413458, 0.968209088, 0.981636286}};
/* In an evaluation after that: two rows. */
static const double torch_eval_y[] = {
    -1.2394774, 0.0840380192, -0.574833155, -1.01945543, -0.144118294, -0.648770869,
    1.40755343, 2.73106861, -0.00317587331, -0.447798193, -0.42798537, -0.207199857};
static const double torch_eval_dx[] = {
    -0.850831389, -0.378147304, -0.254069895, 0.190552413, 0.0946223587, -0.12616314,
    0.094536826, 0.567220926, 0.0317587368, -0.127034947, -0.0473111793, 0.031540785};
static const double torch_eval_dw[] = {0.516801357, 0.768958569, 0.527913809};
/* clang-format on */

static void check_torch(const result *got, int64_t first, int64_t rows, double tolerance)
{
    check_near(got->y, torch.y + first * SIZE, rows * SIZE, 4 * tolerance);
    check_near(got->dx, torch.dx + first * SIZE, rows * SIZE, tolerance);
    check_near(got->mean, torch.mean, CHANNELS, tolerance);
    check_near(got->var, torch.var, CHANNELS, tolerance);
}

static const layer plain = {.affine = true}, rough = {.affine = false};

static const struct cut {
    size_t count;
    int64_t sizes[3];
} cuts[] = {{1, {7}}, {2, {4, 3}}, {2, {1, 6}}, {3, {3, 3, 1}}, {3, {5, 0, 2}}, {2, {0, 7}}};

TEST_BACKENDS(any_cut_of_the_batch_is_torchs)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static const double tolerances[] = {2e-6, 2e-6, 2e-3, 1e-2};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++)
        for (int k = 0; k < 4; k++) {
            dp_module *module = layer_of(ctx, &plain, CHANNELS);
            dp_module *par = spread(module, cuts[i].count, cuts[i].sizes);
            result got = step(par, module, dtypes[k], 0, ROWS);
            check_torch(&got, 0, ROWS, tolerances[k]);
            check_near(got.dw, torch.dw, CHANNELS, 2 * tolerances[k]);
            check_near(got.db, torch.db, CHANNELS, 1e-6);
        }
}

TEST_BACKENDS(an_evaluation_uses_what_has_run)
{
    for (int i = 0; i < 2; i++) {
        const int64_t sizes[] = {1, 1};
        dp_module *module = layer_of(ctx, &plain, CHANNELS);
        step(module, module, DP_F32, 0, ROWS);
        CHECK_OK(dp_zero_grad(module));
        CHECK_OK(dp_module_train(module, false));
        dp_module *par = spread(module, i == 0 ? 1 : 2, sizes);
        step(par, module, DP_F32, 2, 2);
        CHECK_OK(dp_zero_grad(module));
        result got = step(par, module, DP_F32, 0, 2);
        check_near(got.y, torch_eval_y, 2 * SIZE, 1e-6);
        check_near(got.dx, torch_eval_dx, 2 * SIZE, 1e-6);
        check_near(got.mean, torch.mean, CHANNELS, 1e-7); /* as they were */
        check_near(got.var, torch.var, CHANNELS, 1e-7);
        CHECK_OK(dp_zero_grad(module));
        step(module, module, DP_F32, 0, ROWS);
        double dw[CHANNELS];
        numbers_of(module, WEIGHT, true, dw);
        check_near(dw, torch_eval_dw, CHANNELS, 2e-6);
    }
}

TEST_BACKENDS(without_running_statistics_each_part_is_normalised_by_itself)
{
    static const layer bare = {.bare = true};
    const int64_t sizes[] = {4, 3};
    dp_module *module = layer_of(ctx, &bare, CHANNELS), *other = layer_of(ctx, &bare, CHANNELS);
    dp_module *par = spread(module, 2, sizes);
    CHECK_OK(dp_module_train(par, false));
    result both = step(par, module, DP_F64, 0, ROWS), first = step(other, other, DP_F64, 0, 4),
           second = step(other, other, DP_F64, 4, 3);
    check_near(both.y, first.y, 4 * SIZE, 1e-14);
    check_near(both.y + 4 * SIZE, second.y, 3 * SIZE, 1e-14);
    check_near(both.dx, first.dx, 4 * SIZE, 1e-14);
    check_near(both.dx + 4 * SIZE, second.dx, 3 * SIZE, 1e-14);
    CHECK_F64(both.mean[0], 0, 0);
    static const layer alone = {.norm = {.alone = true}, .bare = true};
    dp_module *own = layer_of(ctx, &alone, CHANNELS);
    result again = step(spread(own, 2, sizes), own, DP_F64, 0, ROWS);
    CHECK_BYTES(again.y, both.y, sizeof both.y);
    CHECK_BYTES(again.dx, both.dx, sizeof both.dx);
}

/* torch: 0.375, 1.78125, 3.4955...; 2.0853..., and two batches. */
TEST_BACKENDS(cumulative_statistics_are_those_of_all_batches)
{
    static const layer cumulative = {.norm = {.cumulative = true}};
    const int64_t sizes[] = {3, 4};
    dp_module *module = layer_of(ctx, &cumulative, CHANNELS);
    dp_module *par = spread(module, 2, sizes);
    double steps = 0;
    result got = step(par, module, DP_F32, 0, ROWS), once = step(par, module, DP_F32, 0, ROWS);
    check_near(once.mean, got.mean, CHANNELS, 1e-7);
    check_near(once.var, got.var, CHANNELS, 1e-7);
    CHECK_F64(got.mean[0], 0.25, 1e-7);
    CHECK_F64(got.var[0], 0.834134664, 1e-6);
    numbers_of(module, STEPS, false, &steps);
    CHECK_F64(steps, 2, 0);
}

TEST_BACKENDS(a_momentum_of_zero_leaves_running_statistics_alone)
{
    static const layer still = {.norm = {.momentum = DP_ZERO}};
    const int64_t sizes[] = {3, 4};
    dp_module *module = layer_of(ctx, &still, CHANNELS);
    dp_module *par = spread(module, 2, sizes);
    double mean[CHANNELS], var[CHANNELS];
    numbers_of(module, MEAN, false, mean);
    numbers_of(module, VAR, false, var);
    result got = step(par, module, DP_F32, 0, ROWS);
    check_near(got.mean, mean, CHANNELS, 0);
    check_near(got.var, var, CHANNELS, 0);
}

static dp_status exact_forward(dp_call *call)
{
    dp_tensor y;
    const dp_tensor *x;
    DP_TRY(dp_call_arg(call, 0, DP_F64, 2, &x));
    DP_TRY(dp_norm_forward(call, &(dp_norm){.eps = DP_ZERO}, x, &y, NULL));
    call->out = dp_of(call->scope, &y);
    return DP_OK;
}

/* However small the deviation is: with torch's 1e-5 the result would be 0.003. */
TEST_BACKENDS(without_eps_the_result_has_a_variance_of_one)
{
    static const dp_method method = {"forward", exact_forward};
    double got[2];
    dp_value out, x = dp_array(scope, (double[]){1e-5, -1e-5}, DP_F64, DP_SHAPE(2, 1));
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "exact", .methods = &method, .method_count = 1}, &module));
    CHECK_OK(
        dp_invoke(module, scope, "forward", DP_TUPLE_OF(scope, x), dp_none(), NULL, &out, NULL));
    CHECK_INT(read_all(ctx, out, got), 2);
    check_near(got, (double[]){1, -1}, 2, 1e-12);
}

/* ---- worked values --------------------------------------------------------------------------- */

/* Ranks [1, 2, 3, 4] and [10, 20], one channel; what each rank finds goes into its output. */
static dp_status moments_forward(dp_call *call)
{
    double *got = dp_scope_alloc(call->scope, 3 * sizeof *got);
    dp_tensor tensors[5], y;
    const dp_tensor *x;
    const dp_norm norm = norm_of(call, tensors);
    DP_TRY(dp_call_arg(call, 0, DP_DTYPE_ANY, -1, &x));
    DP_TRY(dp_norm_moments(call, &norm, x, &got[0], &got[1], &got[2]));
    DP_TRY(dp_norm_forward(call, &norm, x, &y, NULL));
    call->out = dp_array(call->scope, got, DP_F64, DP_SHAPE(3));
    return DP_OK;
}

static dp_module *moments_of(dp_ctx *ctx, const layer *state)
{
    static const dp_method method = {"forward", moments_forward};
    static const dp_param_config params[] = {
        {.name = "mean", .ndim = 1, .shape = {1}, .buffer = true},
        {.name = "var", .ndim = 1, .shape = {1}, .buffer = true},
        {.name = "steps", .dtype = DP_I64, .buffer = true},
        {.name = "trained"}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "moments",
                                                  .methods = &method,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = 4,
                                                  .state = state},
                              &module));
    CHECK_OK(dp_params_write(module, VAR, &(float){1}, sizeof(float)));
    return module;
}

static const layer torch_way = {.norm = {.weights = DP_NORM_SAMPLES}},
                   encoding_way = {.norm = {.weights = DP_NORM_DEVICES}};
static const double worked_x[] = {1, 2, 3, 4, 10, 20};
static const double worked[2][4] = {{20.0 / 3, 43.8888888889, 0.666666667, 6.16666667},
                                    {8.75, 52.1875, 0.875, 6.11875}};

static void check_worked(dp_module *module, dp_value outs, const double *want)
{
    dp_ctx *ctx = dp_module_ctx(module);
    double got[9], running[2];
    size_t count = read_all(ctx, outs, got);
    numbers_of(module, MEAN, false, &running[0]);
    numbers_of(module, VAR, false, &running[1]);
    for (size_t i = 0; i < count; i += 3) {
        check_near(got + i, want, 2, 1e-9);
        CHECK_F64(got[i + 2], 6, 0);
    }
    check_near(running, want + 2, 2, 1e-6);
}

static void check_worked_values(dp_ctx *ctx, const layer *state, size_t count, const int64_t *sizes)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, x = dp_array(scope, worked_x, DP_F64, DP_SHAPE(6, 1));
    dp_module *module = moments_of(ctx, state);
    CHECK_OK(dp_invoke(spread(module, count, sizes), scope, "forward", DP_TUPLE_OF(scope, x),
                       dp_none(), NULL, &out, NULL));
    check_worked(module, out, worked[state == &encoding_way]);
    dp_scope_end(scope);
}

TEST_BACKENDS(worked_values)
{
    check_worked_values(ctx, &torch_way, 1, NULL);
    check_worked_values(ctx, &torch_way, 2, (const int64_t[]){4, 2});
    check_worked_values(ctx, &torch_way, 3, (const int64_t[]){4, 0, 2});
    check_worked_values(ctx, &encoding_way, 2, (const int64_t[]){4, 2});
    check_worked_values(ctx, &encoding_way, 3, (const int64_t[]){0, 4, 2}); /* counts for nothing */
}

/* A mean that is large beside the deviation costs no digits. */
TEST_BACKENDS(large_means_cost_no_digits)
{
    static const double x[] = {1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 4, 1e9 + 10, 1e9 + 20};
    dp_value out;
    double got[6];
    dp_module *par = spread(moments_of(ctx, &torch_way), 2, (const int64_t[]){4, 2});
    CHECK_OK(dp_invoke(par, scope, "forward",
                       DP_TUPLE_OF(scope, dp_array(scope, x, DP_F64, DP_SHAPE(6, 1))), dp_none(),
                       NULL, &out, NULL));
    CHECK_INT(read_all(ctx, out, got), 6);
    CHECK_F64(got[1], 43.8888888889, 1e-6);
    CHECK_F64(got[4], 43.8888888889, 1e-6);
}

/* A mean that is no f32: what its rounding leaves is not lost, neither forward nor backward. */
TEST_BACKENDS(rounding_of_a_mean_is_corrected)
{
    static const float x[] = {10000, 10000.25f, 10000.5f, 10000.75f, 10001, 10001.125f, 10000.375f};
    static const float dy[] = {1, -1, 0.5f, 0.25f, -0.75f, 2, 3};
    dp_module *par = spread(layer_of(ctx, &rough, 1), 2, (const int64_t[]){4, 3});
    double y[7], dx[7], mean = 0, var = 0, g = 0, d = 0;
    dp_value out, parts[2];
    dp_pass *pass;
    dp_input_grad grad;
    for (int i = 0; i < 7; i++)
        mean += (double)x[i] / 7;
    for (int i = 0; i < 7; i++) {
        var += ((double)x[i] - mean) * ((double)x[i] - mean) / 7;
        g += (double)dy[i] / 7;
        d += (double)dy[i] * ((double)x[i] - mean) / 7;
    }
    CHECK_OK(dp_invoke(par, scope, "forward",
                       DP_TUPLE_OF(scope, dp_array(scope, x, DP_F32, DP_SHAPE(7, 1))), dp_none(),
                       NULL, &out, &pass));
    for (int i = 0; i < 2; i++)
        parts[i] = dp_array(scope, dy + 4 * i, DP_F32, DP_SHAPE(4 - i, 1));
    CHECK_OK(dp_backward(pass, dp_list_make(scope, DP_LIST, parts, 2), &grad));
    CHECK_INT(read_all(ctx, out, y), 7);
    CHECK_INT(read_all(ctx, grad.args, dx), 7);
    for (int i = 0; i < 7; i++) {
        double centred = (double)x[i] - mean, s = 1 / sqrt(var + 1e-5);
        CHECK_F64(y[i], centred * s, 2e-6);
        CHECK_F64(dx[i], ((double)dy[i] - g - centred * d * s * s) * s, 5e-6);
    }
}

/* Nor in f64: 6.6667 beside 1e9 is rounded to some 1e-7. */
TEST_BACKENDS(nor_is_it_lost_in_f64)
{
    double x[6], y[6];
    dp_value out;
    for (int i = 0; i < 6; i++)
        x[i] = worked_x[i] + 1e9;
    CHECK_OK(dp_invoke(layer_of(ctx, &rough, 1), scope, "forward",
                       DP_TUPLE_OF(scope, dp_array(scope, x, DP_F64, DP_SHAPE(6, 1))), dp_none(),
                       NULL, &out, NULL));
    CHECK_INT(read_all(ctx, out, y), 6);
    for (int i = 0; i < 6; i++)
        CHECK_F64(y[i], (worked_x[i] - 20.0 / 3) / sqrt(395.0 / 9 + 1e-5), 1e-12);
}

/* ---- backward against differences ------------------------------------------------------------ */

static double loss_of(dp_module *par, const double *x)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    double y[ROWS * SIZE], loss = 0;
    dp_value out, in = dp_array(scope, x, DP_F64, DP_SHAPE(ROWS, CHANNELS, INNER));
    CHECK_OK(dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, in), dp_none(), NULL, &out, NULL));
    read_all(ctx, out, y);
    for (int64_t i = 0; i < ROWS * SIZE; i++)
        loss += y[i] * dy_at(i / SIZE, i / INNER % CHANNELS, i % INNER);
    dp_scope_end(scope);
    return loss;
}

static void check_differences(dp_ctx *ctx, const layer *state)
{
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        dp_module *module = layer_of(ctx, state, CHANNELS);
        dp_module *par = spread(module, cuts[i].count, cuts[i].sizes);
        double x[ROWS * SIZE];
        for (int64_t k = 0; k < ROWS * SIZE; k++)
            x[k] = x_at(k / SIZE, k / INNER % CHANNELS, k % INNER);
        result got = step(par, module, DP_F64, 0, ROWS);
        for (int k = 0; k < ROWS * SIZE; k += 5) {
            double was = x[k];
            x[k] = was + 1e-5;
            double up = loss_of(par, x);
            x[k] = was - 1e-5;
            CHECK_F64(got.dx[k], (up - loss_of(par, x)) / 2e-5, 1e-7);
            x[k] = was;
        }
    }
}

TEST_BACKENDS(backward_is_what_differences_say)
{
    static const layer devices = {.norm = {.weights = DP_NORM_DEVICES, .eps = 0.5}, .affine = true};
    check_differences(ctx, &devices);
    check_differences(ctx, &rough);
}

/* A layer that keeps to itself depends on how the batch is cut, and the check says so. */
TEST_BACKENDS(a_layer_passes_its_check)
{
    static const layer alone = {.norm = {.alone = true}, .affine = true};
    const dp_check_config config = {.replicas = 3, .tolerance = 1e-5};
    dp_tensor x = rows_of(ctx, scope, DP_F64, 0, ROWS, x_at);
    dp_value batch = DP_TUPLE_OF(scope, dp_of(scope, &x));
    dp_check_report report;
    CHECK_OK(dp_self_check(layer_of(ctx, &plain, CHANNELS), batch, &config, &report));
    CHECK(report.moved >= 2 * CHANNELS + 8);
    CHECK_ERROR(dp_self_check(layer_of(ctx, &alone, CHANNELS), batch, &config, NULL),
                DP_ERR_MISMATCH, "output differs at [0, 0, 0]: ");
}

/* ---- more rows than are worked on at a time -------------------------------------------------- */

TEST_BACKENDS(many_rows)
{
    enum { MANY = 700, WIDE = 401 };
    float *x = test_room(MANY * WIDE * sizeof *x), *y = test_room(MANY * WIDE * sizeof *y);
    dp_module *module = layer_of(ctx, &rough, 1);
    dp_value out;
    double sum = 0, squares = 0;
    for (int i = 0; i < MANY * WIDE; i++)
        x[i] = (float)((i % 1009 * 7919) % 1009) / 64;
    CHECK_OK(dp_invoke(module, scope, "forward",
                       DP_TUPLE_OF(scope, dp_array(scope, x, DP_F32, DP_SHAPE(MANY, 1, WIDE))),
                       dp_none(), NULL, &out, NULL));
    CHECK_OK(dp_read(ctx, out.as.t, y, MANY * WIDE * sizeof *y));
    for (int i = 0; i < MANY * WIDE; i++) {
        sum += (double)x[i];
        squares += (double)x[i] * (double)x[i];
    }
    double mean = sum / (MANY * WIDE), var = squares / (MANY * WIDE) - mean * mean;
    for (int i = 0; i < MANY * WIDE; i++)
        CHECK_F64(y[i], ((double)x[i] - mean) / sqrt(var + 1e-5), 2e-6);
}

/* ---- processes ------------------------------------------------------------------------------- */

static const int *rows_each; /* of each process */
static int devices_each;

/* Gradients are summed over ranks, so that they are the whole batch's. */
static void norm_in_process(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, devices_each, 0);
    dp_module *module = layer_of(ctx, &plain, CHANNELS), *par;
    int64_t first = m->process > 0 ? rows_each[0] : 0, rows = rows_each[m->process];
    CHECK_OK(dp_distributed(module, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    result got = step(par, module, DP_F32, first, rows);
    check_torch(&got, first, rows, 2e-6);
    check_near(got.dw, torch.dw, CHANNELS, 4e-6);
    check_near(got.db, torch.db, CHANNELS, 1e-6);
    CHECK_OK(dp_module_train(par, false));
    if (m->process == 0) { /* an evaluation meets nobody */
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor x = rows_of(ctx, scope, DP_F32, 0, 2, x_at);
        dp_value out;
        double y[2 * SIZE];
        CHECK_OK(dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, dp_of(scope, &x)), dp_none(),
                           NULL, &out, NULL));
        read_all(ctx, out, y);
        check_near(y, torch_eval_y, 2 * SIZE, 1e-6);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

static void norm_in_processes(int devices, const int *rows)
{
    devices_each = devices;
    rows_each = rows;
    in_processes(2, norm_in_process);
}

TEST(processes_normalise_by_the_whole_batch)
{
    norm_in_processes(1, (const int[]){4, 3});
    norm_in_processes(2, (const int[]){5, 2});
    norm_in_processes(3, (const int[]){6, 1}); /* ranks without rows */
    norm_in_processes(2, (const int[]){7, 0}); /* a process without rows */
    norm_in_processes(1, (const int[]){0, 7});
}

/* Where one process has no memory between the sums of a layer, both know. */
static dp_module *layer_of_ranks(dp_ctx *ctx)
{
    dp_module *par;
    CHECK_OK(dp_distributed(layer_of(ctx, &plain, CHANNELS), NULL, &par));
    return par;
}

static dp_status one_pass_through(dp_module *par)
{
    static const float numbers[2 * CHANNELS] = {1, 2, 3, 5, 8, 13};
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, x = dp_array(scope, numbers, DP_F32, DP_SHAPE(2, CHANNELS, 1));
    dp_pass *pass = NULL;
    dp_status status = dp_zero_grad(par);
    if (status == DP_OK)
        status =
            dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, x), dp_none(), NULL, &out, &pass);
    if (status == DP_OK)
        status = dp_backward(pass, out, NULL);
    dp_scope_end(scope);
    return status;
}

static dp_status pass_through(dp_module *par)
{
    dp_status status = one_pass_through(par);
    bool refused = status != DP_OK && dp_status_class(status) != DP_CLASS_JOB;
    return refused ? one_pass_through(par) : status;
}

TEST_SLOW(a_process_without_memory_leaves_nobody_waiting, 60)
{
    size_t over = 0;
    lack = shared_memory(sizeof *lack);
    *lack = (shortage){.make = layer_of_ranks, .wrap = pass_through, .devices = 1};
    do {
        lack->fail_at += (size_t)test_step();
        in_processes(2, one_has_no_memory);
        CHECK_INT(lack->status[0] != DP_OK, lack->status[1] != DP_OK);
        over += lack->status[0] != DP_OK;
    } while (lack->failed);
    CHECK(test_skips() || (over > 0 && over < lack->fail_at));
}

static void worked_in_process(meeting *m)
{
    for (int i = 0; i < 2; i++) {
        dp_ctx *ctx = open_over_shm(m, 1, 0);
        dp_module *module = moments_of(ctx, i == 0 ? &torch_way : &encoding_way), *par;
        dp_scope *scope = dp_scope_begin(ctx);
        int64_t rows = m->process == 0 ? 4 : 2;
        dp_value out, x = dp_array(scope, worked_x + 4 * m->process, DP_F64, DP_SHAPE(rows, 1));
        CHECK_OK(dp_distributed(module, NULL, &par));
        CHECK_OK(
            dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, x), dp_none(), NULL, &out, NULL));
        check_worked(module, out, worked[i]);
        dp_close(ctx);
    }
}

TEST(worked_values_in_two_processes)
{
    in_processes(2, worked_in_process);
    in_processes_on(toy_device(), 2, worked_in_process);
}

static void one_value_in_process(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *module = moments_of(ctx, &torch_way), *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, x = dp_array(scope, worked_x, DP_F64, DP_SHAPE(m->process == 0, 1));
    CHECK_OK(dp_distributed(module, NULL, &par));
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, x), dp_none(), NULL, &out, NULL),
        DP_ERR_INVALID,
        "Expected more than 1 value per channel when training: the whole batch has 1 row");
    dp_close(ctx);
}

TEST(one_value_in_all_processes_is_an_error_in_each)
{
    in_processes(2, one_value_in_process);
}

/* ---- the same bits --------------------------------------------------------------------------- */

static result step_of_shards(int devices)
{
    dp_ctx *ctx = NULL;
    dp_module *par;
    CHECK_OK(dp_open(&(dp_config){.device_count = devices, .shards = 4}, &ctx));
    dp_module *module = layer_of(ctx, &plain, CHANNELS);
    CHECK_OK(dp_distributed(module, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    result got = step(par, module, DP_F32, 0, ROWS);
    dp_close(ctx);
    return got;
}

TEST(shards_give_the_same_bits_on_any_number_of_devices)
{
    result one = step_of_shards(1), two = step_of_shards(2), four = step_of_shards(4);
    check_torch(&one, 0, ROWS, 2e-6);
    CHECK_BYTES(&two, &one, sizeof one);
    CHECK_BYTES(&four, &one, sizeof one);
}

/* Two steps on four shards, the first one of so few rows that some ranks have none. */
enum { QUARTERS = 4 };
static int64_t few_rows;
static result (*of_few)[2]; /* by process */

/* The rows of a process, of `total`. */
static int64_t few_here(int64_t total, int process, int process_count, int64_t *out_first)
{
    int64_t rows[QUARTERS], count = 0;
    size_t parts;
    int each = QUARTERS / process_count;
    CHECK_OK(dp_split_rows(total, QUARTERS, NULL, rows, &parts));
    *out_first = 0;
    for (int r = 0; r < (process + 1) * each; r++)
        *(r < process * each ? out_first : &count) += rows[r];
    return count;
}

static void few_rows_in_process(meeting *m)
{
    dp_ctx *ctx = NULL;
    dp_module *par;
    dp_config config = config_of(m, 1);
    const int64_t totals[] = {few_rows, ROWS};
    config.colls = NULL;
    config.shards = QUARTERS;
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *module = layer_of(ctx, &plain, CHANNELS);
    CHECK_OK(dp_distributed(
        module, &(dp_distributed_config){.reduction = DP_SUM_RANKS, .buffers = DP_BUFFERS_MEAN},
        &par));
    for (int i = 0; i < 2; i++) {
        int64_t first, count = few_here(totals[i], m->process, m->process_count, &first);
        of_few[m->process][i] = step(par, module, DP_F32, first, count);
        CHECK_OK(dp_zero_grad(par));
    }
    dp_close(ctx);
}

/* Process 0 has the first rows, and what all have alike. */
static void check_few(const result *got, const result *alone, int64_t rows)
{
    CHECK_BYTES(got->y, alone->y, (size_t)(rows * SIZE) * sizeof *got->y);
    CHECK_BYTES(got->dx, alone->dx, (size_t)(rows * SIZE) * sizeof *got->dx);
    CHECK_BYTES(got->dw, alone->dw, sizeof got->dw);
    CHECK_BYTES(got->db, alone->db, sizeof got->db);
    CHECK_BYTES(got->mean, alone->mean, sizeof got->mean);
    CHECK_BYTES(got->var, alone->var, sizeof got->var);
}

TEST_SLOW(shards_give_the_same_bits_in_processes_without_rows, 60)
{
    static result alone[2];
    of_few = shared_memory(QUARTERS * sizeof *of_few);
    for (few_rows = 1; few_rows <= ROWS; few_rows++)
        for (int processes = 1; processes <= QUARTERS; processes *= 2) {
            int64_t first;
            in_processes(processes, few_rows_in_process);
            if (processes == 1)
                memcpy(alone, of_few[0], sizeof alone);
            check_few(&of_few[0][0], &alone[0], few_here(few_rows, 0, processes, &first));
            check_few(&of_few[0][1], &alone[1], few_here(ROWS, 0, processes, &first));
        }
}

/* ---- bad input ------------------------------------------------------------------------------- */

typedef struct wrong {
    dp_norm norm;
    const char *x, *says;
    int bad; /* one of the cases below */
} wrong;

enum { NOTHING, NULL_X, NULL_Y, NULL_NORM, HALF, STEPLESS, STEPS_OF_F32, WEIGHT_OF_TWO };

static dp_status wrong_forward(dp_call *call)
{
    const wrong *own = call->state;
    static const int64_t two = 2;
    dp_tensor some, y;
    const dp_tensor *x;
    void *saved;
    dp_norm norm = own->norm;
    DP_TRY(dp_call_arg(call, 0, DP_DTYPE_ANY, -1, &x));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, &two, &some));
    norm.mean = own->bad == HALF ? &some : NULL;
    norm.cumulative = own->bad == STEPLESS;
    norm.steps = own->bad == STEPS_OF_F32 ? &some : NULL;
    norm.weight = own->bad == WEIGHT_OF_TWO ? &some : NULL;
    CHECK_ERROR(dp_norm_forward(call, own->bad == NULL_NORM ? NULL : &norm,
                                own->bad == NULL_X ? NULL : x, own->bad == NULL_Y ? NULL : &y,
                                &saved),
                DP_ERR_INVALID, own->says);
    CHECK_SAYS(dp_last_error(), "dp_norm_forward: ");
    call->out = dp_none();
    return DP_OK;
}

TEST_BACKENDS(wrong_arguments_are_named)
{
    static const dp_method method = {"forward", wrong_forward};
    static const wrong cases[] = {
        {.x = "(f32[4],)", .says = "x has 1 dims"},
        {.x = "(i32[4,1],)", .says = "x is i32"},
        {.x = "(f32[1,3],)", .says = "Expected more than 1 value per channel"},
        {.x = "(f32[1,3],)", .norm = {.alone = true}, .says = "this part has 1 row"},
        {.x = "(f32[4,1],)", .norm = {.eps = -1}, .says = "eps is -1"},
        {.x = "(f32[4,1],)", .norm = {.eps = HUGE_VAL}, .says = "eps is inf"},
        {.x = "(f32[4,1],)", .norm = {.momentum = 1.5}, .says = "momentum is 1.5"},
        {.x = "(f32[4,1],)", .norm = {.momentum = -0.1}, .says = "momentum is -0.1"},
        {.x = "(f32[4,1],)", .norm = {.momentum = (double)NAN}, .says = "momentum is nan"},
        {.x = "(f32[4,1],)", .norm = {.eps = (double)NAN}, .says = "eps is nan"},
        {.x = "(f32[4,1],)", .norm = {.weights = (dp_norm_weights)2}, .says = "weights is 2"},
        {.x = "(f32[4,1],)", .bad = NULL_X, .says = "x is NULL"},
        {.x = "(f32[4,1],)", .bad = NULL_Y, .says = "out_y is NULL"},
        {.x = "(f32[4,1],)", .bad = NULL_NORM, .says = "norm is NULL"},
        {.x = "(f32[4,1],)", .bad = HALF, .says = "one of mean and var is NULL"},
        {.x = "(f32[4,1],)", .bad = STEPLESS, .says = "cumulative needs steps"},
        {.x = "(f32[4,1],)", .bad = STEPS_OF_F32, .says = "steps has 2 elements of f32"},
        {.x = "(f32[4,1],)", .bad = WEIGHT_OF_TWO, .says = "weight has 2 elements"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dp_module *module = NULL;
        dp_value out;
        CHECK_OK(dp_module_create(
            ctx,
            &(dp_module_config){
                .name = "wrong", .methods = &method, .method_count = 1, .state = &cases[i]},
            &module));
        CHECK_OK(dp_invoke(module, scope, "forward", tree_of(scope, cases[i].x), dp_none(), NULL,
                           &out, NULL));
    }
}

static dp_status wrong_backward(dp_call *call)
{
    dp_tensor dy, dx, two;
    const dp_tensor *x;
    DP_TRY(dp_call_arg(call, 0, DP_DTYPE_ANY, -1, &x));
    DP_TRY(dp_call_out_grad(call, NULL, &dy));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(2), &two));
    CHECK_ERROR(dp_norm_backward(NULL, call->saved, &dy, &dx, NULL, NULL), DP_ERR_INVALID,
                "dp_norm_backward: call is NULL");
    CHECK_ERROR(dp_norm_backward(call, NULL, &dy, &dx, NULL, NULL), DP_ERR_INVALID,
                "saved is NULL");
    CHECK_ERROR(dp_norm_backward(call, call->saved, NULL, &dx, NULL, NULL), DP_ERR_INVALID,
                "dy is NULL");
    CHECK_ERROR(dp_norm_backward(call, call->saved, &two, &dx, NULL, NULL), DP_ERR_INVALID,
                "dp_norm_backward: dy does not have the dtype and shape");
    CHECK_ERROR(dp_norm_backward(call, call->saved, &dy, &dx, &two, NULL), DP_ERR_INVALID,
                "weight_grad has 2 elements");
    CHECK_ERROR(dp_norm_backward(call, call->saved, &dy, &dx, NULL, &two), DP_ERR_INVALID,
                "bias_grad has 2 elements");
    return DP_OK;
}

TEST_BACKENDS(wrong_backward_arguments_are_named)
{
    static const dp_method methods[] = {{"forward", layer_forward}, {"backward", wrong_backward}};
    static const dp_param_config params[] = {
        {.name = "mean", .ndim = 1, .shape = {3}, .buffer = true},
        {.name = "var", .ndim = 1, .shape = {3}, .buffer = true},
        {.name = "steps", .dtype = DP_I64, .buffer = true}};
    dp_module *module = NULL;
    dp_value out;
    dp_pass *pass;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "wrong",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 3,
                                                  .state = &rough},
                              &module));
    CHECK_OK(dp_invoke(module, scope, "forward", tree_of(scope, "(f32[4,3],)"), dp_none(), NULL,
                       &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
}

/* A batch without rows is no batch. */
TEST_BACKENDS(no_rows_at_all_change_nothing)
{
    dp_module *module = layer_of(ctx, &plain, CHANNELS);
    double steps = 1;
    result got = step(module, module, DP_F32, 0, 0);
    CHECK_F64(got.mean[0], 0, 0);
    CHECK_F64(got.var[0], 1, 0);
    CHECK_F64(got.dw[0], 0, 0);
    numbers_of(module, STEPS, false, &steps);
    CHECK_F64(steps, 0, 0);
}

/* Backward without the gradient of x leaves that of the parameters as it is with it. */
TEST_BACKENDS(the_gradient_of_x_may_be_left_out)
{
    const int64_t sizes[] = {4, 3};
    dp_module *module = layer_of(ctx, &plain, CHANNELS);
    dp_tensor x = rows_of(ctx, scope, DP_F32, 0, ROWS, x_at);
    double dw[CHANNELS];
    dp_value out;
    dp_pass *pass;
    CHECK_OK(dp_invoke(spread(module, 2, sizes), scope, "forward",
                       DP_TUPLE_OF(scope, dp_of(scope, &x)), dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, grads_for(ctx, scope, out, 0), NULL));
    numbers_of(module, WEIGHT, true, dw);
    check_near(dw, torch.dw, CHANNELS, 4e-6);
}

/* ---- sums over ranks ------------------------------------------------------------------------- */

/* In a wrapper of one process: what its replicas have. */
static dp_status sum_forward(dp_call *call)
{
    double mine = (double)call->replica + 1;
    dp_tensor own;
    DP_TRY(dp_tensor_from(call->scope, call->device, &mine, DP_F64, 0, NULL, &own));
    dp_op op = call->replica == 1 && call->state != NULL ? DP_OP_MAX : DP_OP_SUM;
    call->out = dp_of(call->scope, &own);
    return dp_call_all_reduce(call, own.data, own.data, 1, DP_F64, op);
}

static dp_module *sums_of(dp_ctx *ctx, const void *state)
{
    static const dp_method method = {"forward", sum_forward};
    static const dp_param_config param = {.name = "trained"};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "sum",
                                                  .methods = &method,
                                                  .params = &param,
                                                  .param_count = 1,
                                                  .method_count = 1,
                                                  .state = state},
                              &module));
    return module;
}

static double sum_by(dp_module *par, const char *batch)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    double got[8] = {0};
    dp_value out;
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, batch), dp_none(), NULL, &out, NULL));
    size_t count = read_all(ctx, out, got);
    for (size_t i = 1; i < count; i++)
        CHECK_F64(got[i], got[0], 0);
    dp_scope_end(scope);
    return got[0];
}

TEST_BACKENDS(sums_of_ranks_in_one_process_are_those_of_replicas)
{
    dp_module *alone = sums_of(ctx, NULL), *spread_out = sums_of(ctx, NULL),
              *all = sums_of(ctx, NULL), *par;
    CHECK_F64(sum_by(alone, "(f32[6],)"), 1, 0);
    CHECK_F64(sum_by(spread(spread_out, 3, (const int64_t[]){1, 2, 3}), "(f32[6],)"), 6, 0);
    CHECK_OK(dp_distributed(all, NULL, &par));
    CHECK_F64(sum_by(par, "(f32[8],)"), 36, 0);
    CHECK_F64(sum_by(par, "(f32[3],)"), 6, 0); /* ranks without a replica count as 0 */
    CHECK_F64(sum_by(par, "(f32[1],)"), 1, 0);
}

static void sums_in_process(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *par, *one = sums_of(ctx, NULL), *wide = sums_of(ctx, NULL);
    CHECK_OK(dp_distributed(one, NULL, &par));
    CHECK_F64(sum_by(par, "(f32[4],)"), 6, 0);
    CHECK_F64(sum_by(par, m->process == 0 ? "(f32[4],)" : "(f32[1],)"), 4, 0);
    CHECK_F64(sum_by(par, m->process == 0 ? "(f32[1],)" : "(f32[0],)"), 2, 0);
    if (m->process == 1) /* other wrappers are their process' own */
        CHECK_F64(sum_by(spread(wide, 2, (const int64_t[]){1, 2}), "(f32[3],)"), 3, 0);
    dp_close(ctx);
}

TEST(sums_of_ranks_are_those_of_all_processes)
{
    in_processes(2, sums_in_process);
    in_processes_on(toy_device(), 2, sums_in_process);
}

static void others_in_process(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, (int)(TIMEOUT_MS * test_timeout_scale()));
    dp_module *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    CHECK_OK(dp_distributed(sums_of(ctx, NULL), NULL, &par));
    dp_status status = m->process == 1
                           ? dp_barrier(ctx)
                           : dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"),
                                       dp_none(), NULL, &out, NULL);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "rank");
    dp_close(ctx);
}

TEST(process_in_another_call_is_named)
{
    in_processes(2, others_in_process);
    in_processes_on(toy_device(), 2, others_in_process);
}

TEST(replicas_that_mean_different_sums_are_told_so)
{
    dp_ctx *ctx = open_here(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par;
    dp_value out;
    static const int differs = 1;
    CHECK_OK(dp_distributed(sums_of(ctx, &differs), NULL, &par));
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[2],)"), dp_none(), NULL, &out, NULL),
        DP_ERR_MISMATCH, "all_reduce of 1 f64 (max)");
    dp_close(ctx);
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

#if defined(TEST_SIM)
TEST(gpus_of_processes_normalise_by_the_whole_batch)
{
    rows_each = (const int[]){5, 2};
    on_gpus("21", norm_in_process);
    rows_each = (const int[]){3, 4};
    on_gpus("22", norm_in_process);
    on_gpus("11", worked_in_process);
}
#endif

/* ---- memory ---------------------------------------------------------------------------------- */

/* Whichever allocation fails, the sentence says so and nothing is lost. */
TEST(each_allocation_may_fail)
{
    bool failed = true;
    for (size_t at = 1; failed; at += (size_t)test_step()) {
        test_allocator counter = {.fail_at = 0};
        dp_ctx *ctx = NULL;
        dp_value out;
        dp_pass *pass = NULL;
        dp_input_grad grad;
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_module *par = spread(layer_of(ctx, &plain, CHANNELS), 2, (const int64_t[]){4, 3});
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor x = rows_of(ctx, scope, DP_BF16, 0, ROWS, x_at);
        dp_value args = DP_TUPLE_OF(scope, dp_of(scope, &x));
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass);
        if (status == DP_OK)
            status = dp_backward(pass, dp_float(1), &grad);
        failed = counter.fail_count > 0;
        CHECK_STATUS(status, failed ? DP_ERR_NO_MEMORY : DP_OK);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}
