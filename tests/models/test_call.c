/* test_call.c - what a method may ask of its call: arguments, parameters, children, and the other
   replicas of its pass; and what dp_invoke and dp_backward make of wrong requests. */

#include <stdatomic.h>
#include <time.h>
#include "lazy.h"
#include "nets.h"

static dp_module *module_of(dp_ctx *ctx, dp_status (*forward)(dp_call *call),
                            dp_status (*backward)(dp_call *call))
{
    const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "own",
                                                  .methods = methods,
                                                  .method_count = backward != NULL ? 2 : 1},
                              &module));
    return module;
}

static dp_module *on_devices(dp_module *module, size_t devices)
{
    dp_module *par = NULL;
    CHECK_OK(dp_data_parallel(
        module, &(dp_parallel_config){.local_ranks = first_ranks, .local_rank_count = devices},
        &par));
    return par;
}

/* A forward with nothing but rows, one a replica. */
static dp_status run_on(dp_module *module, dp_scope *scope, size_t devices, dp_pass **out_pass)
{
    char rows[32];
    dp_value out;
    snprintf(rows, sizeof rows, "(f32[%zu],)", devices);
    return dp_invoke(module, scope, "forward", tree_of(scope, rows), dp_none(), NULL, &out,
                     out_pass);
}

/* ---- arguments ------------------------------------------------------------------------------- */

/* Both shapes are in the sentence, whatever is wrong with one. */
static void look_at_shapes(dp_call *call)
{
    const dp_tensor *x = NULL, *none = NULL;
    CHECK_OK(dp_call_shaped(call, "mask", DP_BOOL, DP_SHAPE(2), &x));
    CHECK_INT(x->shape[0], 2);
    CHECK_OK(dp_call_shaped(call, "mask", DP_BOOL, DP_SHAPE(-1), &x));
    CHECK_OK(dp_call_shaped(call, "table", DP_F32, DP_SHAPE(8, 15), &x));
    CHECK_OK(dp_call_shaped(call, "table", DP_DTYPE_ANY, DP_SHAPE(-1, 15), &x));
    CHECK(dp_is_contiguous(x));
    CHECK_OK(dp_call_shaped(call, "number", DP_F32, 0, NULL, &x));
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, DP_SHAPE(-1, 16), &none), DP_ERR_INVALID,
                "dp_call_shaped: table is (8,15), not (any,16)");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, DP_SHAPE(7, -1), &none), DP_ERR_INVALID,
                "dp_call_shaped: table is (8,15), not (7,any)");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, DP_SHAPE(-1), &none), DP_ERR_INVALID,
                "dp_call_shaped: table is (8,15), not (any)");
    CHECK_ERROR(dp_call_shaped(call, "number", DP_F32, DP_SHAPE(1), &none), DP_ERR_INVALID,
                "dp_call_shaped: number is (), not (1)");
    CHECK_ERROR(dp_call_shaped(call, "mask", DP_BOOL, DP_SHAPE(2, 2), &none), DP_ERR_INVALID,
                "dp_call_shaped: mask is (2), not (2,2)");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F64, DP_SHAPE(8, 15), &none), DP_ERR_INVALID,
                "dp_call_shaped: table is f32, not f64");
    CHECK_ERROR(dp_call_shaped(call, "tables", DP_F32, DP_SHAPE(8, 15), &none), DP_ERR_INVALID,
                "dp_call_shaped: there is no argument 'tables'");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, 2, NULL, &none), DP_ERR_INVALID,
                "dp_call_shaped: shape is NULL");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, -1, NULL, &none), DP_ERR_INVALID,
                "dp_call_shaped: ndim is -1, not 0 to 8");
    CHECK_ERROR(dp_call_shaped(call, "table", DP_F32, DP_SHAPE(8, 15), NULL), DP_ERR_INVALID,
                "dp_call_shaped: out is NULL");
    CHECK(none == NULL);
}

static dp_status look_at_arguments(dp_call *call)
{
    const dp_tensor *tensor = NULL;
    CHECK_OK(dp_call_arg(call, 0, DP_F32, 2, &tensor));
    CHECK_INT(dp_tensor_count(tensor), 6);
    CHECK_OK(dp_call_arg(call, 0, DP_DTYPE_ANY, -1, &tensor));
    CHECK_ERROR(dp_call_arg(call, 0, DP_F64, 2, &tensor), DP_ERR_INVALID, "argument 0");
    CHECK_ERROR(dp_call_arg(call, 0, DP_F32, 1, &tensor), DP_ERR_INVALID, "argument 0");
    CHECK_ERROR(dp_call_arg(call, 1, DP_F32, 1, &tensor), DP_ERR_INVALID, "argument 1");
    CHECK_ERROR(dp_call_arg(call, 2, DP_F32, 1, &tensor), DP_ERR_INVALID,
                "argument 2, there are 2");
    CHECK_ERROR(dp_call_arg(call, 0, DP_F32, 2, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_call_tensor(call, "mask", DP_BOOL, 1, &tensor));
    CHECK_INT(tensor->shape[0], 2);
    CHECK_ERROR(dp_call_tensor(call, "mask", DP_F32, 1, &tensor), DP_ERR_INVALID, "mask");
    CHECK_ERROR(dp_call_tensor(call, "size", DP_F32, 1, &tensor), DP_ERR_INVALID, "size");
    CHECK_ERROR(dp_call_tensor(call, "face", DP_F32, 1, &tensor), DP_ERR_INVALID,
                "no argument 'face'; there are '");
    CHECK_ERROR(dp_call_tensor(call, NULL, DP_F32, 1, &tensor), DP_ERR_INVALID, "name is NULL");
    CHECK_ERROR(dp_call_tensor(NULL, "mask", DP_F32, 1, &tensor), DP_ERR_INVALID, "call is NULL");
    CHECK_ERROR(dp_call_arg(NULL, 0, DP_F32, 1, &tensor), DP_ERR_INVALID, "call is NULL");
    look_at_shapes(call);
    call->out = dp_none();
    return DP_OK;
}

static dp_status look_at_none(dp_call *call)
{
    const dp_tensor *tensor = NULL;
    CHECK_ERROR(dp_call_arg(call, 0, DP_F32, 1, &tensor), DP_ERR_INVALID,
                "argument 0, there are 0");
    CHECK_ERROR(dp_call_tensor(call, "mask", DP_F32, 1, &tensor), DP_ERR_INVALID,
                "no argument 'mask'; there are none");
    call->out = dp_none();
    return DP_OK;
}

TEST_BACKENDS(arguments_by_place_and_by_name)
{
    dp_value out;
    CHECK_OK(dp_invoke(module_of(ctx, look_at_arguments, NULL), scope, "forward",
                       tree_of(scope, "[f32[2,3], 7]"),
                       tree_of(scope, "{'size': 3, 'mask': bool[2], 'table': f32[8,15], "
                                      "'number': f32[]}"),
                       NULL, &out, NULL));
    CHECK_OK(dp_invoke(module_of(ctx, look_at_none, NULL), scope, "forward", dp_none(), dp_none(),
                       NULL, &out, NULL));
}

enum { CUT, TURNED, LAST, DENSE, LAYOUTS }; /* how args[0], f32[rows,3] or f32[1,2,2,3], lies */

static int layout;

/* Elements are 0, 1, 2, ... row-major in what is dense, whatever came. */
static dp_status look_at_layouts(dp_call *call)
{
    float data[12];
    const dp_tensor *view, *dense, *named, *named_view;
    CHECK_OK(dp_call_arg_view(call, 0, DP_F32, -1, &view));
    CHECK_OK(dp_call_arg(call, 0, DP_F32, -1, &dense));
    CHECK_OK(dp_call_tensor_view(call, "x", DP_F32, -1, &named_view));
    CHECK_OK(dp_call_tensor(call, "x", DP_F32, -1, &named));
    CHECK(view == dp_at(call->args, 0).as.t && named_view == dp_get(call->kwargs, "x").as.t);
    CHECK(dp_is_contiguous(dense) && dp_is_contiguous(named));
    CHECK((dense == view) == dp_is_contiguous(view)); /* copied only where it has to be */
    CHECK((named == named_view) == dp_is_contiguous(named_view));
    CHECK(tree_same_device(dense->device, view->device));
    if (layout != CUT || tree_host_memory(call->ctx)) {
        CHECK_INT(dp_is_contiguous(view), layout == DENSE);
    }
    for (int i = 0; i < dense->ndim; i++) {
        CHECK_INT(dense->shape[i], view->shape[i]);
    }
    int64_t count = dp_tensor_count(dense);
    const dp_tensor flat = dp_wrap(dense->data, DP_F32, 1, &count);
    dp_tensor memory = flat;
    memory.device = dense->device;
    CHECK_OK(dp_read(call->ctx, &memory, data, (size_t)count * sizeof *data));
    for (int64_t i = 0; i < count; i++) {
        CHECK_F64(data[i], layout == CUT ? (i / 2) * 4 + (int64_t)call->replica * 2 + i % 2 : i, 0);
    }
    call->out = dp_none();
    return DP_OK;
}

static dp_value lay_out(dp_scope *scope)
{
    static const float rows[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    static const float columns[] = {0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11};
    static const float channels[] = {0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11};
    dp_tensor tensor = dp_wrap_const(rows, DP_F32, DP_SHAPE(3, 4));
    if (layout == TURNED) {
        tensor = dp_wrap_const(columns, DP_F32, DP_SHAPE(3, 4));
        CHECK_OK(dp_transpose(&tensor, 0, 1, &tensor));
    } else if (layout == LAST) { /* [1,3,2,2], channels in the last place */
        tensor = dp_wrap_const(channels, DP_F32, DP_SHAPE(1, 2, 2, 3));
        CHECK_OK(dp_transpose(&tensor, 2, 3, &tensor));
        CHECK_OK(dp_transpose(&tensor, 1, 2, &tensor));
    }
    return dp_of(scope, &tensor);
}

/* Methods get rows one behind the other, or what there is if they ask for a view. */
TEST_BACKENDS(methods_get_dense_memory)
{
    dp_module *net = module_of(ctx, look_at_layouts, NULL), *par = NULL;
    dp_value out;
    const dp_parallel_config cut = {
        .local_ranks = first_ranks, .local_rank_count = 2, .cut.dim = 1};
    CHECK_OK(dp_data_parallel(net, &cut, &par));
    for (layout = CUT; layout < LAYOUTS; layout++) {
        dp_value x = lay_out(scope), args = DP_LIST_OF(scope, x), kwargs = DP_DICT(scope, {"x", x});
        CHECK_OK(
            dp_invoke(layout == CUT ? par : net, scope, "forward", args, kwargs, NULL, &out, NULL));
    }
}

static dp_status look_at_lost(dp_call *call)
{
    const dp_tensor *tensor = NULL;
    CHECK_ERROR(dp_call_arg(call, 0, DP_F32, 2, &tensor), DP_ERR_INVALID, "dp_call_arg: ");
    CHECK_ERROR(dp_call_tensor(call, "x", DP_F32, 2, &tensor), DP_ERR_INVALID, "dp_call_tensor: ");
    CHECK_ERROR(dp_call_arg(call, 0, DP_F64, 2, &tensor), DP_ERR_INVALID, "dp_call_arg: ");
    CHECK_ERROR(dp_call_arg_view(call, 1, DP_F64, 2, &tensor), DP_ERR_INVALID,
                "dp_call_arg_view: argument 1, there are 1");
    CHECK_ERROR(dp_call_arg_view(call, 0, DP_F64, 2, &tensor), DP_ERR_INVALID,
                "dp_call_arg_view: argument 0 is f32, not f64");
    CHECK_ERROR(dp_call_arg_view(call, 0, DP_F32, 2, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_call_tensor_view(call, "y", DP_F32, 2, &tensor), DP_ERR_INVALID,
                "dp_call_tensor_view: there is no argument 'y'");
    CHECK_ERROR(dp_call_tensor_view(call, "x", DP_F32, 1, &tensor), DP_ERR_INVALID,
                "dp_call_tensor_view: x has 2 dims, not 1");
    CHECK_ERROR(dp_call_tensor_view(NULL, "x", DP_F32, 1, &tensor), DP_ERR_INVALID, "call is NULL");
    CHECK(tensor == NULL);
    call->out = dp_none();
    return DP_OK;
}

TEST_BACKENDS(lost_tensors_reach_methods_as_they_are)
{
    dp_value out;
    layout = TURNED;
    dp_tensor lost = *lay_out(scope).as.t;
    lost.device = (dp_device){99, 99};
    dp_value x = dp_of(scope, &lost);
    CHECK_OK(dp_invoke(module_of(ctx, look_at_lost, NULL), scope, "forward", DP_LIST_OF(scope, x),
                       DP_DICT(scope, {"x", x}), NULL, &out, NULL));
}

TEST_BACKENDS(wrong_requests)
{
    dp_module *net = module_of(ctx, look_at_none, NULL);
    dp_value none = dp_none(), out, bad = dp_of(scope, NULL);
    dp_pass *pass = NULL;
    dp_pass_config odd = {.compute_dtype = (dp_dtype)99};
    CHECK_ERROR(dp_invoke(NULL, scope, "forward", none, none, NULL, &out, NULL), DP_ERR_INVALID,
                "module is NULL");
    CHECK_ERROR(dp_invoke(net, scope, NULL, none, none, NULL, &out, NULL), DP_ERR_INVALID,
                "method is NULL");
    CHECK_ERROR(dp_invoke(net, NULL, "forward", none, none, NULL, &out, NULL), DP_ERR_INVALID,
                "scope is NULL");
    CHECK_ERROR(dp_invoke(net, scope, "forward", none, none, NULL, NULL, NULL), DP_ERR_INVALID,
                "out is NULL");
    CHECK_ERROR(dp_invoke(net, scope, "forward", dp_int(3), none, NULL, &out, NULL), DP_ERR_INVALID,
                "args is an int, not a tuple");
    CHECK_ERROR(dp_invoke(net, scope, "forward", none, tree_of(scope, "[1]"), NULL, &out, NULL),
                DP_ERR_INVALID, "kwargs is a list, not a dict");
    CHECK_ERROR(dp_invoke(net, scope, "forward", bad, none, NULL, &out, NULL), DP_ERR_INVALID,
                "tensor is NULL");
    CHECK_ERROR(dp_invoke(net, scope, "forward", none, none, &odd, &out, NULL), DP_ERR_INVALID,
                "99");
    CHECK_ERROR(dp_invoke(net, scope, "backwards", none, none, NULL, &out, &pass),
                DP_ERR_UNSUPPORTED, "'own' has no method 'backwards'; there is 'forward'");
    CHECK(pass == NULL);
    CHECK_OK(dp_invoke(net, scope, "forward", none, none, NULL, &out, NULL));
    CHECK_OK(dp_module_destroy(net));
    CHECK_ERROR(dp_invoke(net, scope, "forward", none, none, NULL, &out, NULL), DP_ERR_STATE,
                "destroyed");
}

TEST(a_scope_of_another_context)
{
    dp_ctx *one, *other;
    CHECK_OK(dp_open(NULL, &one));
    CHECK_OK(dp_open(NULL, &other));
    dp_scope *scope = dp_scope_begin(other);
    dp_value out;
    CHECK_ERROR(dp_invoke(module_of(one, look_at_none, NULL), scope, "forward", dp_none(),
                          dp_none(), NULL, &out, NULL),
                DP_ERR_INVALID, "another context");
    dp_scope_end(scope);
    dp_close(one);
    dp_close(other);
}

/* ---- parameters ------------------------------------------------------------------------------ */

enum { PLAIN, FROZEN, BUFFER };
static const dp_param_config three_sorts[] = {
    [PLAIN] = {.name = "plain", .ndim = 1, .shape = {2}},
    [FROZEN] = {.name = "frozen", .ndim = 1, .shape = {2}, .frozen = true},
    [BUFFER] = {.name = "buffer", .ndim = 1, .shape = {2}, .buffer = true}};

#define CHECK_NULL(pointer, part)                                                                  \
    do {                                                                                           \
        CHECK((pointer) == NULL);                                                                  \
        CHECK(strstr(dp_last_error(), part) != NULL);                                              \
    } while (0)

static dp_status reach_in_forward(dp_call *call)
{
    for (size_t i = PLAIN; i <= BUFFER; i++) {
        CHECK(dp_param(call, i) != NULL);
        CHECK_NULL(dp_grad(call, i), "only in backward");
    }
    CHECK_NULL(dp_param(call, 3), "parameter 3, 'sorts' has 3 of its own");
    CHECK(dp_buffer(call, BUFFER) == dp_param(call, BUFFER));
    CHECK_NULL(dp_buffer(call, PLAIN), "'plain' of 'sorts' is a parameter");
    CHECK_NULL(dp_buffer(call, FROZEN), "'frozen' of 'sorts' is a parameter");
    CHECK_NULL(dp_buffer(call, 9), "parameter 9");
    CHECK_NULL(dp_param(NULL, 0), "call is NULL");
    CHECK_NULL(dp_buffer(NULL, 0), "call is NULL");
    CHECK_NULL(dp_grad(NULL, 0), "call is NULL");
    call->out = dp_none();
    return DP_OK;
}

static dp_status reach_in_backward(dp_call *call)
{
    float zeros[2] = {-1, -1};
    CHECK_INT(call->grad.kind, DP_NONE);
    CHECK_STR(call->method, "forward");
    CHECK_OK(net_read(call, dp_grad(call, PLAIN), zeros, 2));
    CHECK_F64(zeros[0], 0, 0);
    CHECK_F64(zeros[1], 0, 0);
    CHECK(dp_grad(call, PLAIN) == dp_grad(call, PLAIN));
    CHECK_NULL(dp_grad(call, FROZEN), "'frozen' of 'sorts' is frozen, or a buffer");
    CHECK_NULL(dp_grad(call, BUFFER), "'buffer' of 'sorts' is frozen, or a buffer");
    CHECK_NULL(dp_grad(call, 3), "parameter 3");
    CHECK(dp_param(call, PLAIN) != NULL && dp_buffer(call, BUFFER) != NULL);
    return DP_OK;
}

TEST_BACKENDS(each_sort_of_parameter)
{
    static const dp_method methods[] = {{"forward", reach_in_forward},
                                        {"backward", reach_in_backward}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "sorts",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = three_sorts,
                                                  .param_count = 3},
                              &net));
    for (size_t devices = 1; devices <= 3; devices++) {
        dp_pass *pass;
        CHECK_OK(run_on(on_devices(net, devices), scope, devices, &pass));
        CHECK_OK(dp_backward(pass, dp_none(), NULL));
    }
    dp_pass *pass;
    CHECK_OK(run_on(net, scope, 1, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
}

/* ---- passes ---------------------------------------------------------------------------------- */

static atomic_int backward_count;

static dp_status count_backward(dp_call *call)
{
    call->args_grad = dp_int(atomic_fetch_add(&backward_count, 1));
    return DP_OK;
}

static dp_status fail_backward(dp_call *call)
{
    (void)call;
    return dp_error(DP_ERR_USER, "no way back");
}

static dp_status give_bad_gradient(dp_call *call)
{
    call->kwargs_grad = dp_of(call->scope, NULL);
    return DP_OK;
}

TEST_BACKENDS(a_pass_has_one_backward)
{
    dp_module *net = module_of(ctx, give_none, count_backward);
    dp_pass *first, *second;
    dp_input_grad grads;
    atomic_store(&backward_count, 5);
    CHECK_OK(run_on(net, scope, 1, &first));
    CHECK_OK(run_on(net, scope, 1, &second));
    CHECK_OK(dp_backward(second, dp_none(), NULL));
    CHECK_OK(dp_backward(first, dp_none(), &grads));
    CHECK_INT(grads.args.as.i, 6);
    CHECK_INT(grads.kwargs.kind, DP_NONE);
    CHECK_ERROR(dp_backward(first, dp_none(), &grads), DP_ERR_STATE,
                "this pass of 'own' had its backward already");
    CHECK_INT(grads.args.as.i, 6);
    CHECK_INT(atomic_load(&backward_count), 7);
}

TEST_BACKENDS(wrong_backwards)
{
    dp_module *net = module_of(ctx, give_none, count_backward);
    dp_module *one_way = module_of(ctx, give_none, NULL);
    dp_module *failing = module_of(ctx, give_none, fail_backward);
    dp_module *odd = module_of(ctx, give_none, give_bad_gradient);
    dp_pass *pass = NULL;
    dp_value out;
    CHECK_ERROR(dp_backward(NULL, dp_none(), NULL), DP_ERR_INVALID, "pass is NULL");
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(),
                       &(dp_pass_config){.no_grad = true}, &out, &pass));
    CHECK(pass == NULL);
    CHECK_OK(run_on(one_way, scope, 1, &pass));
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_UNSUPPORTED,
                "'own' has no method 'backward'");
    CHECK_OK(run_on(failing, scope, 1, &pass));
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_USER,
                "dp_backward: own.backward: no way back");
    CHECK_OK(run_on(on_devices(failing, 2), scope, 2, &pass));
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_USER, "own.backward: no way back");
    CHECK_OK(run_on(odd, scope, 1, &pass));
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_INVALID, "kwargs_grad");
    CHECK_OK(run_on(net, scope, 1, &pass));
    CHECK_ERROR(dp_backward(pass, dp_of(scope, NULL), NULL), DP_ERR_INVALID, "tensor is NULL");
    CHECK_OK(dp_module_destroy(net));
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_STATE,
                "the module of this pass was destroyed");
    dp_module *heir = module_of(ctx, give_none, count_backward); /* in the same place */
    CHECK_ERROR(dp_backward(pass, dp_none(), NULL), DP_ERR_STATE, "destroyed");
    CHECK_OK(dp_module_destroy(heir));
}

/* ---- children -------------------------------------------------------------------------------- */

/* y = a * x; a is one number, x of any count up to NET_ROWS. */
static dp_status scale(const dp_call *call, dp_value x, dp_value *out, float *out_dot,
                       const dp_value *with)
{
    float data[NET_ROWS], other[NET_ROWS], a = 0;
    const dp_tensor *tensor, *second;
    TRY(dp_as_tensor(x, "x", DP_F32, 1, &tensor));
    int64_t count = tensor->shape[0];
    TRY(dp_read(call->ctx, tensor, data, (size_t)count * sizeof *data));
    TRY(net_read(call, dp_param(call, 0), &a, 1));
    if (with != NULL) {
        TRY(dp_as_tensor(*with, "with", DP_F32, 1, &second));
        TRY(dp_read(call->ctx, second, other, (size_t)count * sizeof *other));
    }
    for (int64_t i = 0; i < count; i++) {
        *out_dot += with != NULL ? data[i] * other[i] : 0;
        data[i] *= a;
    }
    return net_new((dp_call *)(uintptr_t)call, data, 1, &count, out);
}

static dp_status scale_forward(dp_call *call)
{
    float unused = 0;
    call->saved = (void *)(uintptr_t)&call->args.as.items[0];
    return scale(call, call->args.as.items[0], &call->out, &unused, NULL);
}

static dp_status scale_backward(dp_call *call)
{
    float dot = 0;
    dp_value gx;
    TRY(scale(call, call->grad, &gx, &dot, call->saved));
    TRY(net_add(call, dp_grad(call, 0), &dot, 1));
    call->args_grad = DP_LIST_OF(call->scope, gx);
    return DP_OK;
}

/* out = second(first(first(x))): a child may be asked several times. */
static const char *const chain[3] = {"first", "first", "second"};

static dp_status chain_forward(dp_call *call)
{
    dp_pass **passes = dp_scope_alloc(call->scope, sizeof(dp_pass *[3]));
    dp_value x = call->args, y = dp_none();
    for (int i = 0; i < 3; i++) {
        TRY(dp_call_child(call, chain[i], "forward", x, dp_none(), &y, &passes[i]));
        x = DP_LIST_OF(call->scope, y);
    }
    call->saved = passes;
    call->out = y;
    return DP_OK;
}

static dp_status chain_backward(dp_call *call)
{
    dp_pass **passes = call->saved;
    dp_input_grad gx = {.args = DP_LIST_OF(call->scope, call->grad)};
    for (int i = 2; i >= 0; i--)
        TRY(dp_backward(passes[i], gx.args.as.items[0], &gx));
    call->args_grad = gx.args;
    return DP_OK;
}

static dp_module *scale_create(dp_ctx *ctx, const char *name, float a)
{
    static const dp_method methods[] = {{"forward", scale_forward}, {"backward", scale_backward}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &(dp_param_config){.name = "a"},
                                                  .param_count = 1},
                              &module));
    CHECK_OK(dp_params_write(module, 0, &a, sizeof a));
    return module;
}

static dp_module *chain_create(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", chain_forward}, {"backward", chain_backward}};
    dp_module *children[] = {scale_create(ctx, "first", 2), scale_create(ctx, "second", 3)};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "chain",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .children = children,
                                                  .child_count = 2},
                              &module));
    return module;
}

static dp_module *parent_of(dp_ctx *ctx, const char *name, const dp_method *methods,
                            dp_module *const *children, size_t count)
{
    static const dp_param_config own = {.name = "own", .ndim = 1, .shape = {5}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &own,
                                                  .param_count = 1,
                                                  .children = children,
                                                  .child_count = count},
                              &module));
    return module;
}

/* y = 12 x for a = 2 and b = 3; dy/da = 2 a b x, dy/db = a^2 x, dy/dx = 12. */
static void check_chain(dp_ctx *ctx, dp_scope *scope, dp_module *run, dp_module *net)
{
    dp_value x = tree_of(scope, "(f32[7],)"), y, gy = tree_of(scope, "f32[7]=1 2 -1 0 3 1 2");
    dp_input_grad gx;
    dp_pass *pass;
    float grads[8];
    size_t first;
    CHECK_OK(dp_zero_grad(net));
    CHECK_OK(dp_invoke(run, scope, "forward", x, dp_none(), NULL, &y, &pass));
    CHECK_STR(tree_text(ctx, y), "f32[7]=0 12 24 36 48 60 72");
    CHECK_OK(dp_backward(pass, gy, &gx));
    CHECK_STR(tree_text(ctx, gx.args.as.items[0]), "f32[7]=12 24 -12 0 36 12 24");
    net_numbers(ctx, net, true, grads);
    first = dp_module_param_count(net) == 3 ? 5 : 0; /* "own" comes before */

    CHECK_F64(grads[first], 12 * 29, 0);
    CHECK_F64(grads[first + 1], 4 * 29, 0);
}

TEST_BACKENDS(children_have_passes_of_their_own)
{
    dp_module *net = chain_create(ctx);
    check_chain(ctx, scope, net, net);
    for (size_t devices = 1; devices <= TREE_DEVICES; devices++) {
        check_chain(ctx, scope, on_devices(net, devices), net);
    }
}

static dp_status ask_the_chain(dp_call *call)
{
    return dp_call_child(call, "chain", "forward", call->args, dp_none(), &call->out,
                         (dp_pass **)&call->saved);
}

static dp_status ask_back(dp_call *call)
{
    dp_input_grad gx;
    TRY(dp_backward(call->saved, call->grad, &gx));
    call->args_grad = gx.args;
    return DP_OK;
}

/* The children of a child find their own parameters. */
TEST_BACKENDS(grandchildren)
{
    static const dp_method methods[] = {{"forward", ask_the_chain}, {"backward", ask_back}};
    dp_module *net = chain_create(ctx);
    dp_module *top = parent_of(ctx, "top", methods, &net, 1);
    for (size_t devices = 1; devices <= 4; devices++) {
        check_chain(ctx, scope, on_devices(top, devices), top);
    }
    check_chain(ctx, scope, top, top);
}

/* A child trains, and has a backward to come, if its parent does. */
static dp_status note_modes(dp_call *call)
{
    dp_value flags[] = {dp_bool(call->training), dp_bool(call->grad_enabled)};
    call->out = dp_list_make(call->scope, DP_LIST, flags, 2);
    return DP_OK;
}

static dp_status ask_for_modes(dp_call *call)
{
    dp_pass *pass = NULL;
    return dp_call_child(call, "own", "forward", dp_none(), dp_none(), &call->out, &pass);
}

TEST_BACKENDS(children_do_as_their_parent_does)
{
    static const dp_method methods[] = {{"forward", ask_for_modes}, {"backward", ask_back}};
    dp_module *child = module_of(ctx, note_modes, count_backward);
    dp_module *net = parent_of(ctx, "top", methods, &child, 1);
    const dp_pass_config no_grad = {.no_grad = true};
    dp_value out;
    dp_pass *pass;
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, &pass));
    CHECK_STR(tree_text(ctx, out), "[True, True]");
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), &no_grad, &out, &pass));
    CHECK_STR(tree_text(ctx, out), "[True, False]");
    CHECK_OK(dp_module_train(child, false));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, &pass));
    CHECK_STR(tree_text(ctx, out), "[False, True]");
    CHECK_OK(dp_module_train(net, false));
    CHECK_OK(dp_module_train(child, true));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, &pass));
    CHECK_STR(tree_text(ctx, out), "[False, True]");
}

static dp_status ask_for_nobody(dp_call *call)
{
    dp_value out = dp_none(), none = dp_none();
    CHECK_ERROR(dp_call_child(call, "third", "forward", none, none, &out, NULL), DP_ERR_INVALID,
                "'chain' has no child 'third'; there is 'first'");
    CHECK_ERROR(dp_call_child(call, NULL, "forward", none, none, &out, NULL), DP_ERR_INVALID,
                "child is NULL");
    CHECK_ERROR(dp_call_child(NULL, "first", "forward", none, none, &out, NULL), DP_ERR_INVALID,
                "call is NULL");
    CHECK_ERROR(dp_call_child(call, "first", NULL, none, none, &out, NULL), DP_ERR_INVALID,
                "method is NULL");
    CHECK_ERROR(dp_call_child(call, "first", "forward", none, none, NULL, NULL), DP_ERR_INVALID,
                "out is NULL");
    CHECK_ERROR(dp_call_child(call, "first", "sleep", none, none, &out, NULL), DP_ERR_UNSUPPORTED,
                "'first' has no method 'sleep'");
    CHECK_ERROR(dp_call_child(call, "first", "forward", dp_int(1), none, &out, NULL),
                DP_ERR_INVALID, "args is an int");
    return dp_call_child(call, "first", "fail", none, none, &call->out, NULL);
}

static dp_status fail_deep_down(dp_call *call)
{
    CHECK(!call->grad_enabled && !call->training);
    CHECK_INT(call->compute_dtype, DP_BF16);
    return dp_error(DP_ERR_USER, "deep down");
}

TEST_BACKENDS(error_of_a_child_has_its_path)
{
    static const dp_method own[] = {{"forward", ask_for_nobody}},
                           childs[] = {{"fail", fail_deep_down}};
    dp_module *child = NULL, *net = NULL;
    dp_value out;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "first", .methods = childs, .method_count = 1}, &child));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "chain",
                                                  .methods = own,
                                                  .method_count = 1,
                                                  .children = &child,
                                                  .child_count = 1},
                              &net));
    CHECK_OK(dp_module_train(net, false));
    dp_pass_config half = {.compute_dtype = DP_BF16};
    CHECK_ERROR(dp_invoke(net, scope, "forward", dp_none(), dp_none(), &half, &out, NULL),
                DP_ERR_USER, "chain.forward: dp_call_child: first.fail: deep down");
    CHECK_ERROR(
        dp_invoke(on_devices(net, 3), scope, "forward", dp_none(), dp_none(), &half, &out, NULL),
        DP_ERR_USER, "chain.forward: dp_call_child: first.fail: deep down");
}

/* ---- a wrapper among the children ------------------------------------------------------------ */

static dp_status ask_the_wrapped(dp_call *call)
{
    return dp_call_child(call, "data_parallel", "forward", call->args, call->kwargs, &call->out,
                         (dp_pass **)&call->saved);
}

/* A user's wrapper around the library's drives all devices; in a replica, that replica's alone. */
TEST_BACKENDS(a_users_wrapper_runs_the_librarys)
{
    static const dp_method methods[] = {{"forward", ask_the_wrapped}, {"backward", ask_back}};
    dp_module *net = chain_create(ctx), *user = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "user", .methods = methods, .method_count = 2, .wraps = on_devices(net, 3)},
        &user));
    check_chain(ctx, scope, user, net);
    check_chain(ctx, scope, on_devices(user, 2), net);
    check_chain(ctx, scope, on_devices(on_devices(user, 2), 4), net);
}

/* ---- replicas meet --------------------------------------------------------------------------- */

typedef struct meeting { /* what the replicas of a test ask for; one a test */
    dp_dtype dtype;
    dp_op op;
    size_t count;
    bool in_place;
    int rounds;
    size_t odd_one; /* the replica that does something else, */
    bool late;      /* when the others wait already */
} meeting;

static meeting plan;
static const double sent_first = 3; /* element i of replica r: 3 + r + i % 2, one of few values */

static double meeting_result(dp_op op, size_t replicas, size_t i)
{
    double result = op == DP_OP_PROD ? 1 : 0;
    for (size_t r = 0; r < replicas; r++) {
        double x = sent_first + (double)(r + i % 2);
        bool better = r == 0 || (op == DP_OP_MIN ? x < result : x > result);
        if (op == DP_OP_PROD) {
            result *= x;
        } else if (op == DP_OP_SUM || op == DP_OP_MEAN) {
            result += x;
        } else if (better) {
            result = x;
        }
    }
    return op == DP_OP_MEAN ? result / (double)replicas : result;
}

static dp_status send_of(dp_call *call, dp_tensor *out)
{
    int64_t count = (int64_t)plan.count;
    size_t each = dp_dtype_bytes(plan.dtype);
    char *data = dp_scope_alloc(call->scope, plan.count * each + 1);
    for (size_t i = 0; i < plan.count; i++) {
        tree_store(data + i * each, plan.dtype, sent_first + (double)(call->replica + i % 2));
    }
    dp_tensor host = dp_wrap(data, plan.dtype, 1, &count);
    TRY(dp_tensor_new(call->scope, call->device, plan.dtype, 1, &count, out));
    return dp_copy(call->ctx, out, &host, NULL);
}

static void check_received(const dp_call *call, const dp_tensor *got)
{
    size_t each = dp_dtype_bytes(plan.dtype);
    char *data = dp_scope_alloc(call->scope, plan.count * each + 1);
    CHECK_OK(dp_read(call->ctx, got, data, plan.count * each));
    for (size_t i = 0; i < plan.count; i++) {
        double want = meeting_result(plan.op, call->replica_count, i);
        bool whole = plan.dtype != DP_F32 && plan.dtype != DP_F64 && plan.dtype != DP_F16 &&
                     plan.dtype != DP_BF16;
        CHECK_F64(tree_load(data + i * each, plan.dtype), whole ? floor(want) : want, 1e-6);
    }
}

static dp_status meet(dp_call *call)
{
    call->out = dp_none();
    for (int round = 0; round < plan.rounds; round++) {
        dp_tensor send, recv;
        TRY(send_of(call, &send));
        TRY(plan.in_place ? (recv = send, DP_OK) : send_of(call, &recv));
        TRY(dp_call_all_reduce(call, send.data, recv.data, plan.count, plan.dtype, plan.op));
        check_received(call, &recv);
    }
    return DP_OK;
}

TEST_BACKENDS(replicas_add_up_what_they_have)
{
    static const size_t counts[] = {0, 1, 3, 1000};
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_I64, DP_I32, DP_F16, DP_BF16};
    dp_module *net = module_of(ctx, meet, NULL);
    for (size_t devices = 1; devices <= 4; devices++) {
        dp_module *par = on_devices(net, devices);
        for (size_t i = 0; i < 4 * 6 * 5 * 2; i++) {
            plan = (meeting){.count = counts[i % 4],
                             .dtype = dtypes[i / 4 % 6],
                             .op = (dp_op)(i / 24 % 5),
                             .in_place = i / 120 != 0,
                             .rounds = 1};
            bool halves = plan.dtype == DP_F16 || plan.dtype == DP_BF16;
            if (halves && (plan.op == DP_OP_MEAN || plan.op == DP_OP_PROD)) {
                continue; /* the results are not exact; test_coll.c has them */
            }
            CHECK_OK(run_on(par, scope, devices, NULL));
        }
    }
}

TEST_BACKENDS(replicas_meet_many_times)
{
    plan = (meeting){.count = 5, .rounds = 50};
    CHECK_OK(run_on(on_devices(module_of(ctx, meet, NULL), 8), scope, 8, NULL));
    CHECK_OK(run_on(on_devices(module_of(ctx, meet, NULL), 8), scope, 3, NULL)); /* rows for 3 */
    CHECK_OK(run_on(module_of(ctx, meet, NULL), scope, 1, NULL));
}

static double spent; /* seconds of all threads, while one is late */

static dp_status come_late(dp_call *call)
{
    struct timespec before, behind;
    if (call->replica == 0) {
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
        nanosleep(&(struct timespec){.tv_nsec = 400000000}, NULL);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &behind);
        spent = difftime(behind.tv_sec, before.tv_sec) +
                1e-9 * (double)(behind.tv_nsec - before.tv_nsec);
    }
    return meet(call);
}

/* A core is for those who compute. */
TEST(replicas_that_wait_sleep)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 3}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    plan = (meeting){.count = 5, .rounds = 1};
    CHECK_OK(run_on(on_devices(module_of(ctx, come_late, NULL), 3), scope, 3, NULL));
    CHECK(spent < 0.04 * test_timeout_scale());
    dp_close(ctx);
}

/* On devices whose memory is the allocator's as well. */
TEST(meetings_take_no_more_memory)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    test_allocator counter = {0};
    size_t calls = 0;
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .device_count = 3,
                                  .allocator = test_allocator_of(&counter)},
                     &ctx));
    dp_module *par = on_devices(module_of(ctx, meet, NULL), 3);
    plan = (meeting){.count = 1000, .rounds = 20};
    for (int i = 0; i < 10; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(run_on(par, scope, 3, NULL));
        dp_scope_end(scope);
        calls = i == 2 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static dp_status meet_in_backward(dp_call *call)
{
    dp_value none = call->out;
    TRY(meet(call));
    call->out = none;
    return DP_OK;
}

TEST_BACKENDS(replicas_meet_in_backward)
{
    dp_pass *pass;
    plan = (meeting){.count = 7, .rounds = 3};
    CHECK_OK(run_on(on_devices(module_of(ctx, meet, meet_in_backward), 4), scope, 4, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
}

static dp_status ask_child_to_meet(dp_call *call)
{
    return dp_call_child(call, "own", "forward", dp_none(), dp_none(), &call->out, NULL);
}

TEST_BACKENDS(children_meet_for_their_replica)
{
    static const dp_method methods[] = {{"forward", ask_child_to_meet}};
    dp_module *child = module_of(ctx, meet, NULL), *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "outer",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .children = &child,
                                                  .child_count = 1},
                              &net));
    plan = (meeting){.count = 9, .rounds = 4};
    CHECK_OK(run_on(on_devices(net, 4), scope, 4, NULL));
    CHECK_OK(run_on(net, scope, 1, NULL));
}

static atomic_int others; /* replicas that are about to meet */

/* The odd one comes to its end at once, or when the others have been waiting for it for a while. */
static bool is_odd(dp_call *call)
{
    const struct timespec a_while = {.tv_nsec = 3000000};
    if (call->replica != plan.odd_one) {
        atomic_fetch_add(&others, 1);
        return false;
    }
    while (plan.late && atomic_load(&others) + 1 < (int)call->replica_count) {
    }
    nanosleep(plan.late ? &a_while : &(struct timespec){0}, NULL);
    return true;
}

static dp_status tell_part(dp_call *call)
{
    const double seen[] = {call->weight, (double)call->row_first, (double)call->row_count,
                           (double)call->row_total};
    dp_tensor own;
    TRY(dp_tensor_from(call->scope, call->device, seen, DP_F64, DP_SHAPE(1, 4), &own));
    call->out = dp_of(call->scope, &own);
    return DP_OK;
}

static dp_status ask_child_for_its_part(dp_call *call)
{
    call->weight = 7 + (double)call->replica;
    return dp_call_child(call, "own", "forward", dp_none(), dp_none(), &call->out, NULL);
}

static double given_weight;

static dp_status give_weight(dp_call *call)
{
    call->weight = call->replica + 1 == call->replica_count ? given_weight : 1;
    call->out = dp_none();
    return DP_OK;
}

TEST_BACKENDS(a_weight_is_a_number_of_samples)
{
    static const struct {
        double weight;
        const char *want;
    } rows[] = {{0, NULL},
                {0.5, NULL},
                {-0.5, "own.forward: call->weight is -0.5"},
                {(double)NAN, "own.forward: call->weight is "},
                {HUGE_VAL, "own.forward: call->weight is inf"}};
    dp_module *net = module_of(ctx, give_weight, NULL), *both = on_devices(net, 2);
    dp_value out;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int wrapped = 0; wrapped < 2; wrapped++) {
            given_weight = rows[i].weight;
            dp_status got = dp_invoke(wrapped ? both : net, scope, "forward",
                                      tree_of(scope, "(f32[5],)"), dp_none(), NULL, &out, NULL);
            if (rows[i].want == NULL)
                CHECK_OK(got);
            else
                CHECK_ERROR(got, DP_ERR_INVALID, rows[i].want);
        }
}

/* A child's part of the batch is its parent's, with the weight that the parent has set. */
TEST_BACKENDS(children_know_the_part_of_their_replica)
{
    static const dp_method methods[] = {{"forward", ask_child_for_its_part}};
    dp_module *child = module_of(ctx, tell_part, NULL), *net = NULL;
    double got[2][4];
    dp_value out;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "outer",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .children = &child,
                                                  .child_count = 1},
                              &net));
    CHECK_OK(dp_invoke(on_devices(net, 2), scope, "forward", tree_of(scope, "(f32[5],)"), dp_none(),
                       NULL, &out, NULL));
    CHECK_OK(dp_read(ctx, out.as.t, got, sizeof got));
    for (int i = 0; i < 2; i++) {
        CHECK_F64(got[i][0], 7 + i, 0);
        CHECK_F64(got[i][1], 3 * i, 0);
        CHECK_F64(got[i][2], 3 - i, 0);
        CHECK_F64(got[i][3], 5, 0);
    }
}

static dp_status fail_one(dp_call *call)
{
    return is_odd(call) ? dp_error(DP_ERR_USER, "the odd one") : meet(call);
}

static dp_status leave_one(dp_call *call)
{
    call->out = dp_none();
    return is_odd(call) ? DP_OK : meet(call);
}

static dp_status count_one_more(dp_call *call)
{
    dp_tensor send;
    size_t less = is_odd(call) ? 1 : 0;
    call->out = dp_none();
    TRY(send_of(call, &send));
    return dp_call_all_reduce(call, send.data, send.data, plan.count - less, plan.dtype, plan.op);
}

static dp_status another_op(dp_call *call)
{
    dp_tensor send;
    dp_op op = call->replica == plan.odd_one ? DP_OP_MAX : plan.op;
    call->out = dp_none();
    TRY(send_of(call, &send));
    return dp_call_all_reduce(call, send.data, send.data, plan.count, plan.dtype, op);
}

/* The first to arrive and another one, each with what it asks for. */
static void check_who_asks(const char *text)
{
    size_t who[2], count[2];
    const char *at = strstr(text, "all_reduce: replica ");
    CHECK(at != NULL);
    CHECK_INT(sscanf(at,
                     "all_reduce: replica %zu asks for all_reduce of %zu f32 (sum), replica %zu "
                     "for all_reduce of %zu",
                     &who[0], &count[0], &who[1], &count[1]),
              4);
    CHECK(who[0] < 4 && who[1] < 4 && who[0] != who[1]);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(count[i], who[i] == plan.odd_one ? 3 : 4);
    }
}

/* Nobody waits for one that does not come; what happened to that one is what is reported. */
TEST_BACKENDS(replicas_that_do_not_come)
{
    char want[64];
    for (size_t i = 0; i < 8; i++) {
        size_t odd = i % 4;
        plan = (meeting){.count = 4, .rounds = 2, .odd_one = odd, .late = i / 4 == 1};
        dp_module *par = on_devices(module_of(ctx, fail_one, NULL), 4);
        atomic_store(&others, 0);
        snprintf(want, sizeof want, "replica %zu on ", odd);
        CHECK_ERROR(run_on(par, scope, 4, NULL), DP_ERR_USER, want);
        CHECK(strstr(dp_last_error(), "own.forward: the odd one") != NULL);
        par = on_devices(module_of(ctx, leave_one, NULL), 4);
        atomic_store(&others, 0);
        CHECK_ERROR(run_on(par, scope, 4, NULL), DP_ERR_MISMATCH, "returned without calling it");
        par = on_devices(module_of(ctx, count_one_more, NULL), 4);
        atomic_store(&others, 0);
        CHECK_ERROR(run_on(par, scope, 4, NULL), DP_ERR_MISMATCH, "all_reduce of 4 f32 (sum)");
        check_who_asks(dp_last_error());
        par = on_devices(module_of(ctx, another_op, NULL), 4);
        CHECK_ERROR(run_on(par, scope, 4, NULL), DP_ERR_MISMATCH, "all_reduce of 4 f32 (max)");
        plan.odd_one = 9; /* all is well again */
        CHECK_OK(run_on(par, scope, 4, NULL));
    }
}

static atomic_int told_why; /* replicas that were told that another one failed, and how */

static dp_status note_why(dp_call *call)
{
    if (is_odd(call))
        return dp_error(DP_ERR_USER, "the odd one");
    dp_status status = meet(call);
    bool why = status == DP_ERR_USER && strstr(dp_last_error(), "replica 1 failed") != NULL;
    atomic_fetch_add(&told_why, why);
    return status;
}

/* Those who wait already when one fails get its status; who comes later finds it gone. */
TEST_BACKENDS(waiting_replica_learns_that_another_failed)
{
    dp_module *par = on_devices(module_of(ctx, note_why, NULL), 2);
    plan = (meeting){.count = 1, .rounds = 1, .odd_one = 1, .late = true};
    atomic_store(&told_why, 0);
    for (int i = 0; i < 100 && atomic_load(&told_why) == 0; i++) {
        atomic_store(&others, 0);
        CHECK_ERROR(run_on(par, scope, 2, NULL), DP_ERR_USER, "own.forward: the odd one");
    }
    CHECK_INT(atomic_load(&told_why), 1);
}

/* More replicas than devices: some share a thread. As many: each has its own, unless those of one
   device take turns. */
TEST_BACKENDS(a_thread_cannot_wait_for_itself)
{
    static const int ranks[] = {0, 1, 0, 3, 4, 5, 6, 7, 1};
    dp_module *net = module_of(ctx, meet, NULL);
    dp_device_info device;
    plan = (meeting){.count = 2, .rounds = 1};
    CHECK_OK(dp_device_info_get(ctx, 0, &device));
    for (size_t replicas = 8; replicas <= 9; replicas++) {
        dp_module *par = NULL;
        CHECK_OK(dp_data_parallel(
            net, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = replicas}, &par));
        if (replicas == 8 && device.host_memory) {
            CHECK_OK(run_on(par, scope, replicas, NULL));
        } else {
            CHECK_ERROR(run_on(par, scope, replicas, NULL), DP_ERR_UNSUPPORTED,
                        "in the list twice");
        }
    }
}

static dp_status meet_wrongly(dp_call *call)
{
    dp_tensor part;
    call->out = dp_none();
    TRY(send_of(call, &part));
    void *data = part.data;
    CHECK_ERROR(dp_call_all_reduce(NULL, data, data, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                "call is NULL");
    CHECK_ERROR(dp_call_all_reduce(call, NULL, data, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                "send is NULL");
    CHECK_ERROR(dp_call_all_reduce(call, data, NULL, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                "recv is NULL");
    CHECK_ERROR(dp_call_all_reduce(call, data, data, 1, (dp_dtype)77, DP_OP_SUM), DP_ERR_INVALID,
                "77");
    CHECK_ERROR(dp_call_all_reduce(call, data, data, 1, DP_F32, (dp_op)77), DP_ERR_INVALID,
                "77 is not a dp_op");
    if (DP_HAS(dp_device_ops, call->stream->dev->ops, owns)) {
        float lost = 0;
        CHECK_ERROR(dp_call_all_reduce(call, &lost, data, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                    "dp_call_all_reduce: send of local rank");
        CHECK_ERROR(dp_call_all_reduce(call, data, &lost, 1, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                    "dp_call_all_reduce: recv of local rank");
    }
    return dp_call_all_reduce(call, NULL, NULL, 0, DP_F32, DP_OP_SUM);
}

TEST_BACKENDS(wrong_meetings)
{
    plan = (meeting){.count = 1};
    dp_module *net = module_of(ctx, meet_wrongly, NULL);
    CHECK_OK(run_on(net, scope, 1, NULL));
    CHECK_OK(run_on(on_devices(net, 3), scope, 3, NULL));
}

/* Of a table that tells whose memory it is. */
TEST(meetings_in_lost_memory)
{
    tree_run(tree_body_wrong_meetings, lazy_device(toy_device()));
}

/* ---- meetings that fail ---------------------------------------------------------------------- */

enum { ROUNDS = 1000 };

static struct {
    dp_device_ops ops;
    const dp_device_ops *inner;
    atomic_int calls; /* of the reducing kernel: every third one fails */
} faulty;

static dp_status faulty_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel == DP_KERNEL_REDUCE && atomic_fetch_add(&faulty.calls, 1) % 3 == 2) {
        return dp_error(DP_ERR_NO_MEMORY, "the third one");
    }
    return DP_HAS(dp_device_ops, faulty.inner, kernel) ? faulty.inner->kernel(stream, args)
                                                       : DP_ERR_UNSUPPORTED;
}

static dp_status faulty_open(const dp_host *host, int index, dp_dev **out)
{
    TRY(faulty.inner->open(host, index, out));
    (*out)->ops = &faulty.ops;
    return DP_OK;
}

static dp_ctx *faulty_context(const dp_device_ops *inner, int devices)
{
    const dp_device_ops *const backends[] = {&faulty.ops, NULL};
    dp_ctx *ctx;
    faulty.ops = *inner;
    faulty.ops.head.size = sizeof faulty.ops;
    faulty.ops.open = faulty_open;
    faulty.ops.kernel = faulty_kernel;
    faulty.inner = inner;
    atomic_store(&faulty.calls, 0);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = devices}, &ctx));
    return ctx;
}

static int8_t told[3][ROUNDS]; /* what each replica was told of each round */

static dp_status meet_and_note(dp_call *call)
{
    dp_tensor part, number;
    call->out = dp_none();
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, 0, NULL, &part));
    for (int round = 0; round < ROUNDS; round++) {
        double sum = 0;
        number = part;
        TRY(dp_fill(call->ctx, &number, dp_int(round % 7 + (int64_t)call->replica)));
        dp_status status = dp_call_all_reduce(call, part.data, part.data, 1, DP_F32, DP_OP_SUM);
        told[call->replica][round] = (int8_t)status;
        if (status != DP_OK) {
            CHECK_STR(dp_last_error(), "dp_call_all_reduce: the third one");
            continue;
        }
        TRY(dp_item(call->ctx, dp_of(call->scope, &number), &sum));
        size_t count = call->replica_count;
        CHECK_F64(sum, (double)((size_t)(round % 7) * count + count * (count - 1) / 2), 0);
    }
    return DP_OK;
}

static void check_rounds(const dp_device_ops *inner)
{
    for (int devices = 2; devices <= 3; devices++) {
        dp_ctx *ctx = faulty_context(inner, devices);
        dp_scope *scope = dp_scope_begin(ctx);
        int failed = 0;
        CHECK_OK(run_on(on_devices(module_of(ctx, meet_and_note, NULL), (size_t)devices), scope,
                        (size_t)devices, NULL));
        for (int round = 0; round < ROUNDS; round++) {
            for (int r = 1; r < devices; r++) {
                CHECK_INT(told[r][round], told[0][round]);
            }
            failed += told[0][round] == DP_ERR_NO_MEMORY;
        }
        CHECK_INT(failed, ROUNDS / 3);
        dp_close(ctx);
    }
}

/* Every replica of a round is told the same, and a round that failed does not spoil the next. */
TEST_SLOW(a_round_has_one_result_cpu, 60)
{
    check_rounds(dp_cpu());
}

TEST_SLOW(a_round_has_one_result_toy, 60)
{
    check_rounds(toy_device());
}

static dp_status meet_until(dp_call *call)
{
    float one = 1;
    dp_tensor part;
    dp_value number = dp_int(1);
    call->out = dp_none();
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, 0, NULL, &part));
    for (int round = 0; round < plan.rounds + 1; round++) {
        if (call->replica == plan.odd_one && round == plan.rounds) {
            return DP_OK;
        }
        TRY(dp_fill(call->ctx, &part, number));
        dp_status status = dp_call_all_reduce(call, part.data, part.data, 1, DP_F32, DP_OP_SUM);
        told[call->replica][round] = (int8_t)status;
        TRY(status);
        TRY(dp_read(call->ctx, &part, &one, sizeof one));
        CHECK_F64(one, (double)call->replica_count, 0);
    }
    return DP_OK;
}

/* Up to the round that one did not come to, all have met; then nobody. */
TEST_BACKENDS(one_leaves_between_two_rounds)
{
    dp_module *par = on_devices(module_of(ctx, meet_until, NULL), 3);
    for (int i = 0; i < 200; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        plan = (meeting){.rounds = i % 5, .odd_one = (size_t)(i % 3)};
        memset(told, 1, sizeof told);
        CHECK_ERROR(run_on(par, step, 3, NULL), DP_ERR_MISMATCH, "returned without calling it");
        for (size_t r = 0; r < 3; r++) {
            for (int round = 0; round < plan.rounds; round++) {
                CHECK_INT(told[r][round], DP_OK);
            }
            CHECK_INT(told[r][plan.rounds], r == plan.odd_one ? 1 : DP_ERR_MISMATCH);
        }
        dp_scope_end(step);
    }
}

static dp_status meet_with_wrong_buffers(dp_call *call)
{
    dp_tensor part;
    int64_t count = 8;
    call->out = dp_none();
    TRY(dp_tensor_new(call->scope, call->device, DP_F64, 1, &count, &part));
    TRY(dp_fill(call->ctx, &part, dp_int(1)));
    double *data = part.data;
    CHECK_ERROR(dp_call_all_reduce(call, data, data, SIZE_MAX / 8 + 2, DP_F64, DP_OP_SUM),
                DP_ERR_INVALID, "dp_call_all_reduce: more elements than can be counted");
    CHECK_ERROR(dp_call_all_reduce(call, data, data, (size_t)INT64_MAX / 16 + 1, DP_F64, DP_OP_SUM),
                DP_ERR_INVALID, "more elements than can be counted");
    CHECK_ERROR(dp_call_all_reduce(call, data, data + 3, 4, DP_F64, DP_OP_SUM), DP_ERR_INVALID,
                "dp_call_all_reduce: send and recv overlap");
    CHECK_ERROR(dp_call_all_reduce(call, data + 3, data, 4, DP_F64, DP_OP_SUM), DP_ERR_INVALID,
                "send and recv overlap");
    TRY(dp_call_all_reduce(call, data, data + 4, 4, DP_F64, DP_OP_SUM));
    return dp_call_all_reduce(call, data, data, 8, DP_F64, DP_OP_MAX);
}

TEST_BACKENDS(buffers_that_overlap_or_cannot_be)
{
    dp_module *net = module_of(ctx, meet_with_wrong_buffers, NULL);
    CHECK_OK(run_on(net, scope, 1, NULL));
    CHECK_OK(run_on(on_devices(net, 1), scope, 1, NULL));
    CHECK_OK(run_on(on_devices(net, 2), scope, 2, NULL));
}

static dp_status meet_with_tensors(dp_call *call)
{
    double ones[6] = {1, 1, 1, 1, 1, 1}, sums[6];
    dp_tensor host = dp_wrap(ones, DP_F64, DP_SHAPE(2, 3)), send, recv, wrong;
    call->out = dp_none();
    TRY(dp_tensor_new(call->scope, call->device, DP_F64, DP_SHAPE(2, 3), &send));
    TRY(dp_tensor_new(call->scope, call->device, DP_F64, DP_SHAPE(2, 3), &recv));
    TRY(dp_copy(call->ctx, &send, &host, NULL));
    TRY(dp_transpose(&recv, 0, 1, &wrong));
    CHECK_ERROR(dp_call_all_reduce_tensor(call, &send, &wrong, DP_OP_SUM), DP_ERR_INVALID,
                "dp_call_all_reduce_tensor: recv has gaps, or is not row-major");
    wrong = recv;
    wrong.read_only = true;
    CHECK_ERROR(dp_call_all_reduce_tensor(call, &send, &wrong, DP_OP_SUM), DP_ERR_INVALID, "recv");
    CHECK_ERROR(dp_call_all_reduce_tensor(call, NULL, &recv, DP_OP_SUM), DP_ERR_INVALID,
                "send is NULL");
    TRY(dp_reshape(&recv, DP_SHAPE(6), &wrong));
    CHECK_ERROR(dp_call_all_reduce_tensor(call, &send, &wrong, DP_OP_SUM), DP_ERR_MISMATCH,
                "send and recv differ in dtype or shape");
    wrong = recv;
    wrong.dtype = DP_I64;
    CHECK_ERROR(dp_call_all_reduce_tensor(call, &send, &wrong, DP_OP_SUM), DP_ERR_MISMATCH,
                "send and recv differ");
    wrong.device = (dp_device){9, 9};
    CHECK_ERROR(dp_call_all_reduce_tensor(call, &send, &wrong, DP_OP_SUM), DP_ERR_INVALID,
                "{9, 9} is not a device");
    CHECK_ERROR(dp_call_all_reduce_tensor(NULL, &send, &recv, DP_OP_SUM), DP_ERR_INVALID,
                "call is NULL");
    TRY(dp_call_all_reduce_tensor(call, &send, &recv, DP_OP_SUM));
    TRY(dp_read(call->ctx, &recv, sums, sizeof sums));
    CHECK_F64(sums[5], (double)call->replica_count, 0);
    if (!tree_host_memory(call->ctx)) {
        CHECK_ERROR(dp_call_all_reduce_tensor(call, &host, &recv, DP_OP_SUM), DP_ERR_INVALID,
                    "send is on {0, 0}, which local rank ");
        return DP_OK;
    }
    TRY(dp_call_all_reduce_tensor(call, &host, &recv, DP_OP_SUM));
    return dp_call_all_reduce_tensor(call, &recv, &host, DP_OP_MAX);
}

TEST_BACKENDS(replicas_add_up_tensors)
{
    dp_module *net = module_of(ctx, meet_with_tensors, NULL);
    CHECK_OK(run_on(net, scope, 1, NULL));
    CHECK_OK(run_on(on_devices(net, 2), scope, 2, NULL));
    CHECK_OK(run_on(on_devices(net, 3), scope, 3, NULL));
}

static double shared[4]; /* of all replicas, on devices whose memory the host reaches */

static dp_status meet_in_one_place(dp_call *call)
{
    double own[4] = {1, 2, 3, 4};
    double *recv = plan.odd_one == 0 ? shared : shared + call->replica;
    call->out = dp_none();
    CHECK_ERROR(dp_call_all_reduce(call, own, recv, 2, DP_F64, DP_OP_SUM), DP_ERR_INVALID,
                "recv of replica 0 overlaps a buffer of replica 1");
    CHECK_ERROR(
        dp_call_all_reduce(call, shared, call->replica == 0 ? own : shared, 2, DP_F64, DP_OP_SUM),
        DP_ERR_INVALID, "recv of replica 1 overlaps a buffer of replica 0");
    return dp_call_all_reduce(call, own, shared + 2 * call->replica, 2, DP_F64, DP_OP_SUM);
}

TEST(replicas_receive_in_places_of_their_own)
{
    dp_ctx *ctx;
    CHECK_OK(dp_open(
        &(dp_config){.backends = (const dp_device_ops *const[]){dp_cpu(), NULL}, .device_count = 2},
        &ctx));
    dp_module *par = on_devices(module_of(ctx, meet_in_one_place, NULL), 2);
    dp_scope *scope = dp_scope_begin(ctx);
    for (size_t i = 0; i < 2; i++) {
        plan = (meeting){.odd_one = i};
        CHECK_OK(run_on(par, scope, 2, NULL));
        CHECK_F64(shared[0], 2, 0);
        CHECK_F64(shared[3], 4, 0);
    }
    dp_close(ctx);
}

/* ---- batch statistics, from replicas that meet ----------------------------------------------- */

typedef struct norm { /* the module's state */
    bool devices_count_alike, biased;
} norm;

/* Mean and variance of the whole batch, and running ones of momentum 0.1 in the buffer. */
static dp_status norm_forward(dp_call *call)
{
    const norm *how = call->state;
    double sums[3] = {0, 0, 0}; /* weight, x, x * x */
    float x[8], running[2], add[2];
    const dp_tensor *in;
    dp_tensor mine, host = dp_wrap(sums, DP_F64, DP_SHAPE(3));
    TRY(dp_call_arg(call, 0, DP_F32, 1, &in));
    TRY(dp_read(call->ctx, in, x, (size_t)in->shape[0] * sizeof *x));
    double each = how->devices_count_alike ? 1 / (double)in->shape[0] : 1;
    for (int64_t i = 0; i < in->shape[0]; i++) {
        sums[0] += each;
        sums[1] += each * (double)x[i];
        sums[2] += each * (double)(x[i] * x[i]);
    }
    TRY(dp_tensor_new(call->scope, call->device, DP_F64, DP_SHAPE(3), &mine));
    TRY(dp_copy(call->ctx, &mine, &host, NULL));
    TRY(dp_call_all_reduce(call, mine.data, mine.data, 3, DP_F64, DP_OP_SUM));
    TRY(dp_read(call->ctx, &mine, sums, sizeof sums));
    double mean = sums[1] / sums[0], variance = sums[2] / sums[0] - mean * mean;
    double count = (double)call->row_total;
    TRY(net_read(call, dp_buffer(call, 0), running, 2));
    add[0] = 0.1f * ((float)mean - running[0]);
    add[1] = 0.1f * ((float)(how->biased ? variance : variance * count / (count - 1)) - running[1]);
    TRY(net_add(call, dp_buffer(call, 0), add, 2));
    return net_new(call, (const float[]){(float)mean, (float)variance}, DP_SHAPE(2), &call->out);
}

/* 1 2 3 4 on the first device, 10 20 on the second. torch: samples count alike, and the running
   variance is unbiased; PyTorch-Encoding: devices count alike, and it is biased. */
TEST_BACKENDS(statistics_of_the_whole_batch)
{
    static const dp_method methods[] = {{"forward", norm_forward}};
    static const dp_param_config running = {
        .name = "running", .ndim = 1, .shape = {2}, .buffer = true};
    static const norm torch = {false, false}, encoding = {true, true};
    static const double want[2][4] = {{6.6667, 43.889, 0.66667, 6.16667},
                                      {8.75, 52.1875, 0.875, 6.11875}};
    for (int i = 0; i < 2; i++) {
        dp_module *net = NULL, *par = NULL;
        dp_param_info info;
        dp_value out;
        float got[4], both[4];
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "norm",
                                                      .methods = methods,
                                                      .method_count = 1,
                                                      .params = &running,
                                                      .param_count = 1,
                                                      .state = i == 0 ? &torch : &encoding},
                                  &net));
        CHECK_OK(dp_params_write(net, 0, (float[]){0, 1}, 2 * sizeof(float)));
        CHECK_OK(dp_data_parallel(net,
                                  &(dp_parallel_config){.local_ranks = first_ranks,
                                                        .local_rank_count = 2,
                                                        .cut.split = DP_SPLIT_SIZES,
                                                        .cut.sizes = (int64_t[]){4, 2},
                                                        .cut.split_count = 2},
                                  &par));
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[6]=1 2 3 4 10 20,)"),
                           dp_none(), NULL, &out, NULL));
        CHECK_OK(dp_read(ctx, out.as.t, both, sizeof both));
        CHECK_BYTES(both, both + 2, 2 * sizeof *both);
        memcpy(got, both, 2 * sizeof *got);
        CHECK_OK(dp_module_param(net, 0, &info));
        CHECK_OK(dp_read(ctx, &info.data, got + 2, 2 * sizeof *got));
        for (int k = 0; k < 4; k++) {
            CHECK_F64(got[k], want[i][k], 1e-3);
        }
    }
}
