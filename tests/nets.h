/* nets.h - models for tests. Their methods reach parameters and tensors by dp_read and dp_copy, so
   that they run on any device; their numbers are small and whole, so that f32 sums are exact. */

#ifndef NETS_H
#define NETS_H

#include "methods.h"
#include "tree.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        dp_status status_ = (call);                                                                \
        if (status_ != DP_OK)                                                                      \
            return status_;                                                                        \
    } while (0)

enum { NET_IN = 3, NET_OUT = 2, NET_ROWS = 128, NET_W = 0, NET_B = 1 };
enum { NET_PARAMS = NET_IN * NET_OUT + NET_OUT };

typedef struct net_shape { /* the module's state */
    int dim;               /* along which the rows of x and y lie */
} net_shape;

/* On the first devices. */
static inline dp_parallel_config over(size_t devices)
{
    return (dp_parallel_config){.local_ranks = first_ranks, .local_rank_count = devices};
}

static inline double item(dp_ctx *ctx, dp_value value)
{
    double number = -1;
    CHECK_OK(dp_item(ctx, value, &number));
    return number;
}

static inline dp_value floats(dp_scope *scope, const float *data, int ndim, const int64_t *shape)
{
    dp_tensor tensor = dp_wrap_const(data, DP_F32, ndim, shape);
    return dp_of(scope, &tensor);
}

/* ---- memory of any device -------------------------------------------------------------------- */

static inline dp_tensor net_view(const dp_call *call, const void *data, int64_t count)
{
    dp_tensor view = dp_wrap_const(data, DP_F32, 1, &count);
    view.read_only = false;
    view.device = call->device;
    return view;
}

/* By way of the call's scope: a device that fails may write there later. */
static inline dp_status net_read_tensor(const dp_call *call, const dp_tensor *tensor, float *out)
{
    size_t bytes = (size_t)dp_tensor_count(tensor) * sizeof *out;
    float *got = dp_scope_alloc(call->scope, bytes);
    if (got == NULL)
        return dp_error(dp_failure(call->ctx, NULL) ? DP_ERR_DEVICE : DP_ERR_NO_MEMORY,
                        "no memory");
    TRY(dp_read(call->ctx, tensor, got, bytes));
    memcpy(out, got, bytes);
    return DP_OK;
}

static inline dp_status net_read(const dp_call *call, const void *data, float *out, int64_t count)
{
    dp_tensor view = net_view(call, data, count);
    return net_read_tensor(call, &view, out);
}

/* data += what */
static inline dp_status net_add(const dp_call *call, void *data, const float *what, int64_t count)
{
    float *sum = dp_scope_alloc(call->scope, (size_t)count * sizeof *sum + 1);
    dp_tensor host = dp_wrap(sum, DP_F32, 1, &count), view = net_view(call, data, count);
    dp_failure_info failure = {.status = DP_ERR_NO_MEMORY};
    if (sum == NULL || data == NULL) {
        dp_failure(call->ctx, &failure);
        return dp_error(failure.status, "%s", data == NULL ? dp_last_error() : "no memory");
    }
    TRY(net_read(call, data, sum, count));
    for (int64_t i = 0; i < count; i++)
        sum[i] += what[i];
    return dp_copy(call->ctx, &view, &host, NULL);
}

/* The device may read what it is given later: from the call's scope. */
static inline dp_status net_new(dp_call *call, const float *data, int ndim, const int64_t *shape,
                                dp_value *out)
{
    dp_tensor tensor, given = dp_wrap_const(data, DP_F32, ndim, shape), host;
    TRY(dp_tensor_new(call->scope, (dp_device){0, 0}, DP_F32, ndim, shape, &host));
    TRY(dp_copy(call->ctx, &host, &given, NULL));
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, ndim, shape, &tensor));
    TRY(dp_copy(call->ctx, &tensor, &host, NULL));
    *out = dp_of(call->scope, &tensor);
    return DP_OK;
}

/* ---- y = x * w + b --------------------------------------------------------------------------- */

/* Element (row, k) of x or y. */
static inline size_t net_at(int dim, int64_t rows, int columns, int64_t row, int k)
{
    return (size_t)(dim == 0 ? row * columns + k : k * rows + row);
}

static inline void net_apply(int dim, int64_t rows, const float *x, const float *w, float *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int o = 0; o < NET_OUT; o++) {
            float sum = w[NET_IN * NET_OUT + o];
            for (int i = 0; i < NET_IN; i++)
                sum += x[net_at(dim, rows, NET_IN, r, i)] * w[i * NET_OUT + o];
            y[net_at(dim, rows, NET_OUT, r, o)] = sum;
        }
}

/* gw += , gx = */
static inline void net_apply_back(int dim, int64_t rows, const float *x, const float *w,
                                  const float *gy, float *gw, float *gx)
{
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < NET_IN; i++) {
            float sum = 0;
            for (int o = 0; o < NET_OUT; o++) {
                float g = gy[net_at(dim, rows, NET_OUT, r, o)];
                sum += g * w[i * NET_OUT + o];
                gw[i * NET_OUT + o] += g * x[net_at(dim, rows, NET_IN, r, i)];
            }
            gx[net_at(dim, rows, NET_IN, r, i)] = sum;
        }
    for (int64_t r = 0; r < rows; r++)
        for (int o = 0; o < NET_OUT; o++)
            gw[NET_IN * NET_OUT + o] += gy[net_at(dim, rows, NET_OUT, r, o)];
}

static inline int64_t net_rows(const dp_call *call, const dp_tensor *x)
{
    return x->shape[((const net_shape *)call->state)->dim];
}

static inline dp_status net_load(const dp_call *call, const dp_tensor *x, float *out_x,
                                 float *out_w)
{
    TRY(net_read_tensor(call, x, out_x));
    TRY(net_read(call, dp_param(call, NET_W), out_w, NET_IN * NET_OUT));
    return net_read(call, dp_param(call, NET_B), out_w + NET_IN * NET_OUT, NET_OUT);
}

static inline dp_status net_forward(dp_call *call)
{
    static _Thread_local float data[NET_ROWS * NET_IN], y[NET_ROWS * NET_OUT];
    float w[NET_PARAMS];
    const dp_tensor *x;
    int dim = ((const net_shape *)call->state)->dim;
    TRY(dp_call_arg(call, 0, DP_F32, 2, &x));
    int64_t rows = net_rows(call, x), shape[2] = {rows, NET_OUT}, turned[2] = {NET_OUT, rows};
    TRY(net_load(call, x, data, w));
    net_apply(dim, rows, data, w, y);
    call->saved = (void *)(uintptr_t)x;
    return net_new(call, y, 2, dim == 0 ? shape : turned, &call->out);
}

static inline dp_status net_backward(dp_call *call)
{
    static _Thread_local float data[NET_ROWS * NET_IN], gy[NET_ROWS * NET_OUT],
        gx[NET_ROWS * NET_IN];
    float w[NET_PARAMS], gw[NET_PARAMS] = {0};
    dp_value gx_value;
    const dp_tensor *x = call->saved, *g;
    int dim = ((const net_shape *)call->state)->dim;
    int64_t rows = net_rows(call, x);
    TRY(net_load(call, x, data, w));
    if (call->grad.kind == DP_TENSOR) {
        TRY(dp_as_tensor(call->grad, "gradient", DP_F32, 2, &g));
        TRY(net_read_tensor(call, g, gy));
    }
    for (int64_t i = 0; call->grad.kind == DP_FLOAT && i < rows * NET_OUT; i++)
        gy[i] = (float)call->grad.as.f;
    net_apply_back(dim, rows, data, w, gy, gw, gx);
    TRY(net_add(call, dp_grad(call, NET_W), gw, NET_IN * NET_OUT));
    TRY(net_add(call, dp_grad(call, NET_B), gw + NET_IN * NET_OUT, NET_OUT));
    if (!call->input_grad_wanted)
        return DP_OK;
    TRY(net_new(call, gx, 2, x->shape, &gx_value));
    call->args_grad = DP_LIST_OF(call->scope, gx_value);
    return DP_OK;
}

static const dp_method net_methods[] = {{"forward", net_forward}, {"backward", net_backward}};
static const dp_param_config net_params[] = {
    [NET_W] = {.name = "w", .ndim = 2, .shape = {NET_IN, NET_OUT}},
    [NET_B] = {.name = "b", .ndim = 1, .shape = {NET_OUT}}};

/* Parameters 1, -1, 2, -2, ... on local rank `rank`. */
static inline dp_module *net_create(dp_ctx *ctx, const net_shape *shape, int rank)
{
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = net_methods,
                                                  .method_count = 2,
                                                  .params = net_params,
                                                  .param_count = 2,
                                                  .state = shape,
                                                  .local_rank = rank},
                              &net));
    CHECK_OK(dp_params_write(net, NET_W, w, NET_IN * NET_OUT * sizeof *w));
    CHECK_OK(dp_params_write(net, NET_B, w + NET_IN * NET_OUT, NET_OUT * sizeof *w));
    return net;
}

/* All numbers of a sort, parameter after parameter. */
static inline void net_numbers(dp_ctx *ctx, dp_module *net, bool grads, float *out)
{
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_param_info info;
        dp_tensor grad;
        CHECK_OK(dp_module_param(net, i, &info));
        CHECK_OK(dp_owner_grad(net, 0, i, &grad));
        size_t count = (size_t)dp_tensor_count(grads ? &grad : &info.data);
        CHECK_OK(dp_read(ctx, grads ? &grad : &info.data, out, count * sizeof *out));
        out += count;
    }
}

/* ---- a step of training ---------------------------------------------------------------------- */

enum { NET_STEP_ROWS = 64 }; /* of all ranks together */

/* Numbers with many digits: the order of sums shows. */
static inline dp_value net_rows_of(dp_scope *scope, const dp_info *info, int step)
{
    int64_t each = NET_STEP_ROWS / info->rank_count, count = each * info->local_count;
    float *x = dp_scope_alloc(scope, sizeof *x * NET_STEP_ROWS * NET_IN);
    uint64_t state = (uint64_t)step + 1;
    CHECK(x != NULL);
    for (int i = 0; i < NET_STEP_ROWS * NET_IN; i++)
        x[i] = (float)ldexp((double)(int64_t)test_random(&state), -64 - i % 5);
    dp_tensor own = dp_wrap(x + info->rank_first * each * NET_IN, DP_F32, DP_SHAPE(count, NET_IN));
    return DP_LIST_OF(scope, dp_of(scope, &own));
}

/* The gradient of a row's outputs are the outputs. */
static inline dp_status net_step(dp_module *net, dp_module *par, int step)
{
    dp_ctx *ctx = dp_module_ctx(net);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass = NULL;
    dp_info info;
    dp_value out;
    dp_tensor data, grad;
    dp_failure_info failure = {.status = DP_ERR_NO_MEMORY};
    if (scope == NULL) { /* the job may have failed since the last step */
        dp_failure(ctx, &failure);
        return failure.status;
    }
    CHECK_OK(dp_info_get(ctx, &info));
    dp_status status = dp_invoke(par, scope, "forward", net_rows_of(scope, &info, step), dp_none(),
                                 NULL, &out, &pass);
    if (status == DP_OK)
        status = dp_backward(pass, out, NULL);
    for (size_t i = 0; i < dp_module_param_count(net) && status == DP_OK; i++) {
        status = dp_params_edit(net, i, &data, &grad);
        if (status == DP_OK)
            status = dp_axpby(ctx, 1, &data, -0.01, &grad, &data);
    }
    dp_scope_end(scope);
    return status == DP_OK ? dp_zero_grad(par) : status;
}

#endif /* NETS_H */
