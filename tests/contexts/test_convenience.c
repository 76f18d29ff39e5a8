/* test_convenience.c - what programs ask for every day: values in one line, tensors inside methods,
   shares of rows and means over them, one block of parameters, a backward that knows of one device
   only. */

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>
#include "nets.h"

/* The sum of all elements, or what they are where the host looks. */
static void check_floats(dp_ctx *ctx, const dp_tensor *tensor, const float *want, int64_t count)
{
    float got[256];
    CHECK_INT(dp_tensor_count(tensor), count);
    CHECK_OK(dp_read(ctx, tensor, got, (size_t)count * sizeof *got));
    CHECK_BYTES(got, want, (size_t)count * sizeof *got);
}

/* ---- values ---------------------------------------------------------------------------------- */

TEST_BACKENDS(arrays_are_tensors_that_are_not_copied)
{
    static const float data[6] = {1, 2, 3, 4, 5, 6};
    const dp_tensor *view;
    dp_value value = dp_array(scope, data, DP_F32, DP_SHAPE(3, 2));
    CHECK_OK(dp_as_tensor(value, "data", DP_F32, 2, &view));
    CHECK(view->data == data && view->read_only);
    CHECK_INT(view->shape[0], 3);
    check_floats(ctx, view, data, 6);
    CHECK_INT(dp_array(scope, NULL, DP_F32, DP_SHAPE(0)).kind, DP_TENSOR);
}

TEST_BACKENDS(wrong_arrays_are_errors)
{
    float data[2] = {1, 2};
    dp_value out = dp_none(), wrong[] = {dp_array(scope, NULL, DP_F32, DP_SHAPE(2)),
                                         dp_array(scope, data, (dp_dtype)77, DP_SHAPE(2)),
                                         dp_array(scope, data, DP_F32, DP_SHAPE(-1)),
                                         dp_array(scope, data, DP_F32, 9, NULL),
                                         dp_array(scope, data, DP_F32, 1, NULL)};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_INT(wrong[i].kind, DP_ERROR);
        CHECK_ERROR(dp_keep(scope, wrong[i], &out), DP_ERR_INVALID, "dp_array: ");
    }
    CHECK_INT(dp_array(NULL, data, DP_F32, DP_SHAPE(2)).kind, DP_ERROR);
    CHECK_INT(dp_array(dp_scope_begin(ctx), data, DP_F32, DP_SHAPE(2)).kind, DP_TENSOR);
}

TEST_BACKENDS(containers_in_one_line)
{
    static const float data[2] = {1, 2};
    dp_value tensor = dp_array(scope, data, DP_F32, DP_SHAPE(1, 1, 2));
    dp_value stacked = dp_stacked(scope, tensor, -1), host = dp_cpu_only(scope, dp_int(5));
    CHECK(stacked.kind == DP_CONTAINER && stacked.as.c->stack && !stacked.as.c->cpu_only);
    CHECK_F64(stacked.as.c->padding_value, -1, 0);
    CHECK_INT(stacked.as.c->pad_dims, 2);
    CHECK(host.kind == DP_CONTAINER && host.as.c->cpu_only && !host.as.c->stack);
    CHECK_INT(host.as.c->data.as.i, 5);
    CHECK_INT(dp_cpu_only(scope, dp_array(scope, NULL, DP_F32, DP_SHAPE(1))).kind, DP_ERROR);
    (void)ctx;
}

TEST_BACKENDS(values_are_walked_without_their_insides)
{
    dp_value dict = tree_of(scope, "{'a': 1, 'b': 'text'}");
    dp_value tuple = DP_TUPLE_OF(scope, dp_int(3), dp_int(4));
    CHECK_INT(dp_count(dict), 2);
    CHECK_STR(dp_key_at(dict, 1), "b");
    CHECK_STR(dp_text(dp_at(dict, 1)), "text");
    CHECK_INT(dp_at(dict, 0).as.i, 1);
    CHECK_INT(dp_at(dict, 2).kind, DP_NONE);
    CHECK_INT(tuple.kind, DP_TUPLE);
    CHECK_INT(dp_count(tuple), 2);
    CHECK_INT(dp_at(tuple, 1).as.i, 4);
    CHECK(dp_key_at(dict, 2) == NULL && dp_key_at(tuple, 0) == NULL && dp_text(tuple) == NULL);
    CHECK_INT(dp_count(dp_int(7)), 0);
    CHECK_INT(dp_count(dp_string(scope, "three")), 0);
    CHECK_INT(dp_at(dp_string(NULL, "x"), 0).kind, DP_ERROR);
    (void)ctx;
}

TEST_BACKENDS(numbers_come_from_the_host_at_once)
{
    float data[5];
    dp_tensor tensor, nothing;
    for (int rank = -1; rank < 3; rank++) {
        dp_device device = rank < 0 ? (dp_device){0, 0} : dp_local_device(ctx, rank);
        for (int i = 0; i < 5; i++)
            data[i] = (float)(i + rank);
        CHECK_OK(dp_tensor_from(scope, device, data, DP_F32, DP_SHAPE(5), &tensor));
        memset(data, 0x55, sizeof data); /* it may change as soon as the call has returned */
        for (int i = 0; i < 5; i++)
            data[i] = (float)(i + rank);
        CHECK(tree_same_device(tensor.device, device));
        check_floats(ctx, &tensor, data, 5);
    }
    CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, 0), NULL, DP_F32, DP_SHAPE(0), &nothing));
    CHECK_INT(dp_tensor_count(&nothing), 0);
    CHECK_ERROR(dp_tensor_from(scope, dp_local_device(ctx, 0), NULL, DP_F32, DP_SHAPE(1), &nothing),
                DP_ERR_INVALID, "dp_tensor_from: host is NULL");
    CHECK_ERROR(dp_tensor_from(scope, (dp_device){7, 7}, data, DP_F32, DP_SHAPE(1), &nothing),
                DP_ERR_INVALID, "dp_tensor_from: {7, 7} is not a device");
    CHECK_ERROR(dp_tensor_from(NULL, (dp_device){0, 0}, data, DP_F32, DP_SHAPE(1), &nothing),
                DP_ERR_INVALID, "dp_tensor_from: scope is NULL");
}

/* ---- inside a method ------------------------------------------------------------------------- */

enum { W, B, LIVE, PARTS };
static const dp_param_config three[PARTS] = {
    [W] = {.name = "w", .ndim = 2, .shape = {2, 3}},
    [B] = {.name = "b", .dtype = DP_F64, .ndim = 1, .shape = {4}},
    [LIVE] = {.name = "live", .ndim = 0, .buffer = true}};

static dp_status look_forward(dp_call *call)
{
    dp_tensor w = dp_param_tensor(call, W), live = dp_buffer_tensor(call, LIVE), sum, none;
    CHECK(w.read_only && w.data == dp_param(call, W) && tree_same_device(w.device, call->device));
    CHECK(w.ndim == 2 && w.shape[0] == 2 && w.shape[1] == 3 && w.dtype == DP_F32);
    CHECK(!live.read_only && live.data == dp_buffer(call, LIVE) && live.ndim == 0);
    CHECK_ERROR((none = dp_buffer_tensor(call, W), dp_fill(call->ctx, &none, dp_int(0))),
                DP_ERR_INVALID,
                "dp_fill: there is no dst: dp_buffer_tensor: 'w' of 'module' is a parameter");
    none = dp_param_tensor(call, PARTS);
    CHECK_INT(none.dtype, DP_DTYPE_ANY);
    none = dp_grad_tensor(call, W); /* there are none in a forward */
    CHECK_INT(none.dtype, DP_DTYPE_ANY);
    for (int i = 0; i < 2; i++) /* and then the sentence is another one */
        CHECK_ERROR(dp_fill(call->ctx, &none, dp_int(0)), DP_ERR_STATE,
                    i == 0 ? "dp_fill: there is no dst: dp_grad_tensor: gradients exist only in "
                             "backward"
                           : "dp_fill: there is no dst: not now");
    CHECK_ERROR(dp_call_out_grad(call, NULL, &none), DP_ERR_STATE, "only in backward");
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(2, 3), &sum));
    TRY(dp_copy(call->ctx, &sum, &w, NULL));
    call->out = DP_DICT(call->scope, {"sum", dp_of(call->scope, &sum)}, {"count", dp_int(6)});
    return DP_OK;
}

static dp_status look_backward(dp_call *call)
{
    dp_tensor g, gw = dp_grad_tensor(call, W), gb = dp_grad_tensor(call, B), count;
    CHECK(gb.dtype == DP_F64 && gb.shape[0] == 4 && gb.data == dp_grad(call, B));
    CHECK_INT(dp_grad_tensor(call, LIVE).dtype, DP_DTYPE_ANY);
    CHECK_ERROR(dp_call_out_grad(call, "product", &g), DP_ERR_INVALID, "no key 'product'");
    CHECK_ERROR(dp_call_out_grad(call, NULL, &g), DP_ERR_INVALID, "the output is a dict");
    TRY(dp_call_out_grad(call, "count", &count));
    CHECK(count.dtype == DP_F64 && count.ndim == 0);
    TRY(dp_call_out_grad(call, "sum", &g));
    CHECK(g.dtype == DP_F32 && dp_is_contiguous(&g) && tree_same_device(g.device, call->device));
    return dp_axpby(call->ctx, 1, &gw, 1, &g, &gw);
}

static dp_module *in_three(dp_ctx *ctx, dp_status (*forward)(dp_call *),
                           dp_status (*backward)(dp_call *))
{
    const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = methods, .method_count = 2, .params = three, .param_count = PARTS},
        &net));
    return net;
}

static dp_module *looker(dp_ctx *ctx)
{
    return in_three(ctx, look_forward, look_backward);
}

/* The gradient that reaches w when `grad` is given to a backward. */
static void check_out_grad(dp_ctx *ctx, dp_module *net, dp_module *run, dp_value grad,
                           const float *want)
{
    dp_value out;
    dp_pass *pass;
    dp_tensor data, gw;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_zero_grad(net));
    CHECK_OK(dp_invoke(run, scope, "forward", dp_none(), dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, grad, NULL));
    CHECK_OK(dp_params_edit(net, W, &data, &gw));
    check_floats(ctx, &gw, want, 6);
    dp_scope_end(scope);
}

TEST_BACKENDS(methods_see_tensors)
{
    static const float rows[6] = {1, 2, 3, 4, 5, 6}, fives[6] = {5, 5, 5, 5, 5, 5}, zeros[6];
    static const float turned[6] = {1, 3, 5, 2, 4, 6};
    dp_module *net = looker(ctx), *one = NULL;
    dp_parallel_config config = over(1);
    dp_tensor on, by_columns;
    CHECK_OK(dp_data_parallel(net, &config, &one));
    CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, 0), turned, DP_F32, DP_SHAPE(3, 2), &on));
    CHECK_OK(dp_transpose(&on, 0, 1, &by_columns));
    dp_value tensor = dp_array(scope, rows, DP_F32, DP_SHAPE(2, 3));
    for (int i = 0; i < 2; i++) {
        dp_module *run = i == 0 ? net : one;
        if (tree_host_memory(ctx))
            check_out_grad(ctx, net, run, DP_DICT(scope, {"sum", tensor}), rows);
        check_out_grad(ctx, net, run, dp_int(5), fives);
        check_out_grad(ctx, net, run, DP_DICT(scope, {"sum", dp_float(5)}, {"count", dp_int(1)}),
                       fives);
        check_out_grad(ctx, net, run, dp_none(), zeros);
        check_out_grad(ctx, net, run, DP_DICT(scope, {"count", dp_int(1)}), zeros);
        check_out_grad(ctx, net, run, DP_DICT(scope, {"sum", dp_of(scope, &by_columns)}),
                       (const float[]){1, 5, 4, 3, 2, 6});
    }
}

/* Each replica's tensors are on its own device. */
static dp_status place_forward(dp_call *call)
{
    dp_tensor w = dp_param_tensor(call, W), live = dp_buffer_tensor(call, LIVE), out;
    CHECK(tree_same_device(w.device, call->device) && tree_same_device(live.device, call->device));
    TRY(dp_fill(call->ctx, &live, dp_int(call->local_rank)));
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(1), &out));
    dp_tensor from = live;
    TRY(dp_reshape(&from, DP_SHAPE(1), &from));
    TRY(dp_copy(call->ctx, &out, &from, NULL));
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

static dp_status place_backward(dp_call *call)
{
    dp_tensor gw = dp_grad_tensor(call, W);
    CHECK(tree_same_device(gw.device, call->device));
    return DP_OK;
}

TEST_BACKENDS(tensors_of_replicas_are_on_their_devices)
{
    dp_parallel_config config = over(3);
    dp_module *net = in_three(ctx, place_forward, place_backward), *par = NULL;
    dp_value out;
    dp_pass *pass;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[3],)"), dp_none(), NULL, &out,
                       &pass));
    check_floats(ctx, out.as.t, (const float[]){0, 1, 2}, 3);
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
}

static dp_status alone_forward(dp_call *call)
{
    dp_tensor x = dp_param_tensor(call, W), y;
    TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(2, 3), &y));
    TRY(dp_copy(call->ctx, &y, &x, NULL));
    call->out = dp_of(call->scope, &y);
    return DP_OK;
}

static dp_status alone_backward(dp_call *call)
{
    dp_tensor g, gw = dp_grad_tensor(call, W);
    CHECK_ERROR(dp_call_out_grad(call, "sum", &g), DP_ERR_INVALID, "no key 'sum'");
    CHECK_ERROR(dp_call_out_grad(NULL, NULL, &g), DP_ERR_INVALID, "call is NULL");
    CHECK_ERROR(dp_call_out_grad(call, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    TRY(dp_call_out_grad(call, NULL, &g));
    return dp_axpby(call->ctx, 1, &gw, 1, &g, &gw);
}

TEST_BACKENDS(an_output_that_is_one_tensor)
{
    dp_module *net = in_three(ctx, alone_forward, alone_backward);
    check_out_grad(ctx, net, net, dp_float(-2), (const float[]){-2, -2, -2, -2, -2, -2});
    check_out_grad(ctx, net, net, dp_none(), (const float[6]){0});
    (void)scope;
}

/* ---- steps: losses of any form --------------------------------------------------------------- */

static dp_status give(dp_call *call)
{
    call->out = dp_get(call->kwargs, "give");
    return DP_OK;
}

static dp_value seen_grad;

static dp_status note_grad(dp_call *call)
{
    seen_grad = call->grad;
    return DP_OK;
}

static dp_value one_step(dp_ctx *ctx, dp_scope *scope, dp_module *net, const char *losses)
{
    dp_value log = dp_none();
    dp_value data = DP_DICT(scope, {"give", tree_of(scope, losses)});
    seen_grad = dp_none();
    CHECK_OK(dp_train_step(net, scope, data, NULL, &log));
    (void)ctx;
    return log;
}

TEST_BACKENDS(a_step_takes_losses_as_they_come)
{
    static const dp_method methods[] = {{"forward", give}, {"backward", note_grad}};
    dp_parallel_config config = over(1);
    dp_module *net = NULL, *one = NULL;
    CHECK_OK(
        dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 2}, &net));
    CHECK_OK(dp_data_parallel(net, &config, &one));
    for (int i = 0; i < 2; i++) {
        dp_module *run = i == 0 ? net : one;
        CHECK_F64(item(ctx, dp_get(one_step(ctx, scope, run, "2.5"), "loss")), 2.5, 0);
        CHECK_INT(seen_grad.kind, DP_FLOAT); /* of the form that forward returned */
        CHECK_F64(seen_grad.as.f, 1, 0);
        CHECK_F64(item(ctx, dp_get(one_step(ctx, scope, run, "3"), "loss")), 3, 0);
        CHECK_F64(item(ctx, dp_get(one_step(ctx, scope, run, "f32[4]"), "loss")), 1.5, 0);
        CHECK_F64(seen_grad.as.f, 0.25, 0);
        if (i == 0)
            CHECK_F64(item(ctx, dp_get(one_step(ctx, scope, run, "f32[]"), "loss")), 0, 0);
        dp_value log = one_step(ctx, scope, run,
                                "{'loss_a': 2, 'right': 7.5, 'loss_b': [1, f32[3]], 'on': True}");
        CHECK_F64(item(ctx, dp_get(log, "loss")), 4, 0);
        CHECK_F64(item(ctx, dp_get(log, "loss_b")), 2, 0);
        CHECK_F64(item(ctx, dp_get(log, "right")), 7.5, 0);
        CHECK_F64(item(ctx, dp_get(log, "on")), 1, 0);
        CHECK_F64(dp_get(seen_grad, "loss_a").as.f, 1, 0);
        CHECK_INT(dp_get(seen_grad, "right").kind, DP_NONE);
    }
}

/* ---- shares of rows, and means over them ----------------------------------------------------- */

typedef struct shared_work {
    dp_ctx *ctx;
    int64_t count, first[TREE_DEVICES], rows[TREE_DEVICES];
    atomic_int ran;
} shared_work;

static dp_status take_share(int rank, dp_scope *scope, void *user)
{
    shared_work *w = user;
    CHECK(dp_scope_alloc(scope, 100) != NULL);
    w->rows[rank] = dp_local_share(w->ctx, rank, w->count, &w->first[rank]);
    atomic_fetch_add(&w->ran, 1);
    return rank == 1 && w->count == 3 ? dp_error(DP_ERR_USER, "no more") : DP_OK;
}

TEST_BACKENDS(runs_need_no_scope_and_share_rows)
{
    shared_work w = {.ctx = ctx};
    for (w.count = 0; w.count < 3 * TREE_DEVICES; w.count++) {
        int64_t next = 0, rows[TREE_DEVICES];
        size_t parts;
        dp_status status = dp_run(ctx, NULL, take_share, &w);
        CHECK_INT(status, w.count == 3 ? DP_ERR_USER : DP_OK);
        CHECK_OK(dp_split_rows(w.count, TREE_DEVICES, NULL, rows, &parts));
        for (int i = 0; i < TREE_DEVICES; i++) {
            CHECK_INT(w.first[i], next);
            CHECK_INT(w.rows[i], rows[i]);
            next += rows[i];
        }
        CHECK_INT(next, w.count);
    }
    CHECK_INT(atomic_load(&w.ran), 3 * TREE_DEVICES * TREE_DEVICES);
    (void)scope;
}

/* What they need for a moment is given back: once warm, they allocate nothing. */
TEST(runs_and_means_in_a_loop_allocate_nothing)
{
    static const double weights[3] = {1, 2, 3};
    float numbers[3] = {1, 2, 3};
    test_allocator counter = {0};
    shared_work w = {.count = 9};
    dp_part parts[3];
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 3, .allocator = test_allocator_of(&counter)}, &w.ctx));
    for (int r = 0; r < 3; r++)
        parts[r] = (dp_part){.send = &numbers[r], .recv = &numbers[r]};
    size_t before = 0;
    for (int i = 0; i < 50; i++) {
        before = i == 10 ? counter.call_count : before;
        CHECK_OK(dp_run(w.ctx, NULL, take_share, &w));
        CHECK_OK(dp_all_reduce_weighted(w.ctx, parts, weights, 1, DP_F32));
    }
    CHECK_INT(counter.call_count, before);
    dp_close(w.ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_BACKENDS(wrong_shares)
{
    int64_t first = 9;
    CHECK_INT(dp_local_share(NULL, 0, 1, &first), -1);
    CHECK_INT(dp_local_share(ctx, TREE_DEVICES, 1, &first), -1);
    CHECK_INT(dp_local_share(ctx, -1, 1, &first), -1);
    CHECK_INT(dp_local_share(ctx, 0, -1, &first), -1);
    CHECK_STR(dp_last_error(), "dp_local_share: count is -1");
    CHECK_INT(dp_local_share(ctx, 0, 1, NULL), -1);
    CHECK_INT(first, 9);
    (void)scope;
}

static void check_weighted(dp_ctx *ctx, dp_scope *scope, const double *weights, bool in_place)
{
    dp_part parts[TREE_DEVICES];
    dp_tensor in[TREE_DEVICES], out[TREE_DEVICES];
    float data[3];
    double total = 0, want[3] = {0};
    for (int r = 0; r < TREE_DEVICES; r++) {
        for (int i = 0; i < 3; i++) {
            data[i] = weights[r] > 0 ? (float)(r * 8 + i) : NAN;
            want[i] += weights[r] > 0 ? weights[r] * (r * 8 + i) : 0;
        }
        total += weights[r];
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, r), data, DP_F32, DP_SHAPE(3), &in[r]));
        CHECK_OK(
            dp_tensor_from(scope, dp_local_device(ctx, r), data, DP_F32, DP_SHAPE(3), &out[r]));
        out[r] = in_place ? in[r] : out[r];
        parts[r] = (dp_part){.send = in[r].data, .recv = out[r].data};
    }
    CHECK_OK(dp_all_reduce_weighted(ctx, parts, weights, 3, DP_F32));
    for (int r = 0; r < TREE_DEVICES; r++) {
        CHECK_OK(dp_read(ctx, &out[r], data, sizeof data));
        for (int i = 0; i < 3; i++)
            CHECK_F64(data[i], want[i] / total, 1e-5);
    }
}

TEST_BACKENDS(a_mean_counts_each_part_by_its_weight)
{
    static const double rows[][TREE_DEVICES] = {
        {3, 3, 2, 2, 2, 2, 2, 2}, {1, 0, 0, 0, 0, 0, 0, 3}, {0.5, 1, 0.5, 0, 2, 0, 0, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        check_weighted(ctx, scope, rows[i], false);
        check_weighted(ctx, scope, rows[i], true);
    }
}

TEST_BACKENDS(wrong_weights)
{
    dp_part parts[TREE_DEVICES];
    double weights[TREE_DEVICES] = {0};
    dp_tensor t;
    float data[2] = {1, 2};
    for (int r = 0; r < TREE_DEVICES; r++) {
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, r), data, DP_F32, DP_SHAPE(2), &t));
        parts[r] = (dp_part){.send = t.data, .recv = t.data};
    }
    CHECK_ERROR(dp_all_reduce_weighted(ctx, parts, weights, 2, DP_F32), DP_ERR_INVALID,
                "dp_all_reduce_weighted: the weights of all ranks add up to 0");
    CHECK_ERROR(dp_all_reduce_weighted(ctx, parts, NULL, 2, DP_F32), DP_ERR_INVALID,
                "weights is NULL");
    weights[1] = -1;
    CHECK_ERROR(dp_all_reduce_weighted(ctx, parts, weights, 2, DP_F32), DP_ERR_INVALID,
                "weight 1 is -1");
    weights[1] = (double)INFINITY;
    CHECK_ERROR(dp_all_reduce_weighted(ctx, parts, weights, 2, DP_F32), DP_ERR_INVALID, "weight 1");
    weights[1] = 1;
    CHECK_ERROR(dp_all_reduce_weighted(ctx, parts, weights, 2, DP_I32), DP_ERR_INVALID, "i32");
    CHECK_ERROR(dp_all_reduce_weighted(ctx, NULL, weights, 2, DP_F32), DP_ERR_INVALID,
                "local is NULL");
    CHECK_OK(dp_all_reduce_weighted(ctx, parts, weights, 0, DP_F32));
    CHECK_OK(dp_read(ctx, &t, data, sizeof data)); /* nothing was touched */
    CHECK_F64(data[1], 2, 0);
}

/* ---- one block, and a backward that divides itself ------------------------------------------- */

/* A program for one device: y = x * a + b, the loss is the mean of y over rows and columns. */
enum { COLUMNS = 3, BLOCK = 2 * COLUMNS };

static dp_status block_forward(dp_call *call)
{
    float block[BLOCK], x[64], loss = 0;
    const dp_tensor *input;
    dp_tensor out;
    dp_tensor all = dp_wrap_const(dp_param_block(call), DP_F32, DP_SHAPE(BLOCK));
    all.device = call->device;
    CHECK(all.data == dp_param(call, dp_module_param_count(call->module) - 2));
    TRY(dp_call_tensor(call, "x", DP_F32, 2, &input));
    TRY(dp_read(call->ctx, input, x, (size_t)dp_tensor_count(input) * sizeof *x));
    TRY(dp_read(call->ctx, &all, block, sizeof block));
    int64_t count = dp_tensor_count(input);
    for (int64_t i = 0; i < count; i++)
        loss += (x[i] * block[i % COLUMNS] + block[COLUMNS + i % COLUMNS]) / (float)count;
    TRY(dp_tensor_from(call->scope, call->device, &loss, DP_F32, 0, NULL, &out));
    call->saved = (void *)(uintptr_t)input;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &out)});
    return DP_OK;
}

/* It divides by its own rows, does not look at call->grad, and writes over what is there. */
static dp_status block_backward(dp_call *call)
{
    const dp_tensor *input = call->saved;
    float x[64], block[BLOCK] = {0};
    int64_t count = dp_tensor_count(input);
    dp_tensor grad = dp_wrap(dp_grad_block(call), DP_F32, DP_SHAPE(BLOCK));
    dp_tensor host = dp_wrap_const(block, DP_F32, DP_SHAPE(BLOCK));
    grad.device = call->device;
    TRY(dp_read(call->ctx, input, x, (size_t)count * sizeof *x));
    for (int64_t i = 0; i < count; i++) {
        block[i % COLUMNS] += x[i] / (float)count;
        block[COLUMNS + i % COLUMNS] += 1 / (float)count;
    }
    TRY(dp_copy(call->ctx, &grad, &host, NULL));
    return dp_wait(call->ctx);
}

static dp_module *block_create(dp_ctx *ctx, float *block, float *block_grad)
{
    static const dp_method methods[] = {{"forward", block_forward}, {"backward", block_backward}};
    static const dp_param_config params[] = {{.name = "none", .ndim = 1, .shape = {0}},
                                             {.name = "a", .ndim = 1, .shape = {COLUMNS}},
                                             {.name = "b", .ndim = 1, .shape = {COLUMNS}}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "block",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params + (block != NULL),
                                                  .param_count = block != NULL ? 2 : 3,
                                                  .packed = true,
                                                  .block = block,
                                                  .block_grad = block_grad,
                                                  .mean_grads = true},
                              &net));
    return net;
}

typedef struct block_optim { /* has a factor, and changes nothing */
    dp_optim base;
    double factor;
} block_optim;

static dp_status block_factor(dp_optim *optim, double *out)
{
    *out = ((block_optim *)optim)->factor;
    return DP_OK;
}

static dp_status block_update(dp_optim *optim, dp_module *module)
{
    (void)optim;
    (void)module;
    return DP_OK;
}

/* The gradient after a step over `rows` rows on `devices` devices, times `factor`. */
static void block_step(dp_ctx *ctx, dp_module *net, dp_module *run, int64_t rows, double factor,
                       bool step)
{
    static const dp_optim_ops ops = {
        .head = DP_TABLE(dp_optim_ops), .loss_factor = block_factor, .update = block_update};
    block_optim optim = {{&ops}, factor};
    float x[64], got[BLOCK], want[BLOCK] = {0};
    dp_value out;
    dp_pass *pass;
    dp_scope *scope = dp_scope_begin(ctx);
    for (int64_t i = 0; i < rows * COLUMNS; i++) {
        x[i] = (float)(i * 5 % 7);
        want[i % COLUMNS] += (float)factor * x[i] / (float)(rows * COLUMNS);
        want[COLUMNS + i % COLUMNS] += (float)factor / (float)(rows * COLUMNS);
    }
    dp_value data = DP_DICT(scope, {"x", dp_array(scope, x, DP_F32, DP_SHAPE(rows, COLUMNS))});
    if (step)
        CHECK_OK(dp_train_step(run, scope, data, factor < 1 ? &optim.base : NULL, &out));
    else {
        CHECK_OK(dp_invoke(run, scope, "forward", dp_none(), data, NULL, &out, &pass));
        CHECK_OK(dp_backward(pass, dp_float(factor), NULL));
    }
    net_numbers(ctx, net, true, got);
    for (int i = 0; i < BLOCK; i++)
        CHECK_F64(got[i], want[i], 1e-5);
    dp_scope_end(scope);
}

TEST_BACKENDS(one_block_and_means_of_its_own)
{
    for (size_t devices = 0; devices <= 3; devices++) {
        dp_module *net = block_create(ctx, NULL, NULL), *par = net;
        dp_parallel_config config = over(devices);
        if (devices > 0)
            CHECK_OK(dp_data_parallel(net, &config, &par));
        for (int64_t rows = 1; rows < 8; rows++) {
            block_step(ctx, net, par, rows, 1, true);
            block_step(ctx, net, par, rows, 1, true);   /* of this step alone */
            block_step(ctx, net, par, rows, 0.5, true); /* by the optimizer's factor */
            block_step(ctx, net, par, rows, 3, false);
        }
        if (devices > 0)
            CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_module_destroy(net));
    }
    (void)scope;
}

enum { WIDE = 50000 }; /* of two such parameters each is zeroed by itself */

static dp_status wide_backward(dp_call *call)
{
    static const float ones[2 * WIDE] = {[0] = 1, [WIDE - 1] = 1, [WIDE] = 1, [2 * WIDE - 1] = 1};
    dp_tensor grad = dp_wrap(dp_grad_block(call), DP_F32, DP_SHAPE(2 * WIDE)), more;
    grad.device = call->device;
    TRY(dp_tensor_from(call->scope, call->device, ones, DP_F32, DP_SHAPE(2 * WIDE), &more));
    return dp_axpby(call->ctx, 1, &grad, 1, &more, &grad);
}

TEST_BACKENDS(a_block_is_zeroed_whole)
{
    static const dp_method methods[] = {{"forward", give_none}, {"backward", wide_backward}};
    static const dp_param_config params[] = {{.name = "a", .ndim = 1, .shape = {WIDE}},
                                             {.name = "b", .ndim = 1, .shape = {WIDE}}};
    float *got = test_room(2 * WIDE * sizeof *got);
    const dp_module_config wide = {.name = "wide",
                                   .methods = methods,
                                   .method_count = 2,
                                   .params = params,
                                   .param_count = 2,
                                   .packed = true};
    dp_module *net = NULL, *par = NULL;
    dp_parallel_config config = over(2);
    dp_value out;
    dp_pass *pass = NULL;
    CHECK_OK(dp_module_create(ctx, &wide, &net));
    CHECK_OK(dp_data_parallel(net, &config, &par));
    for (int step = 1; step <= 3; step++) {
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[2],)"), dp_none(), NULL,
                           &out, &pass));
        CHECK_OK(dp_backward(pass, dp_none(), NULL));
        net_numbers(ctx, net, true, got);
        CHECK_F64(got[0] + got[WIDE - 1], 4 * step, 0);
        CHECK_F64(got[WIDE] + got[2 * WIDE - 1], 4 * step, 0);
    }
}

TEST_BACKENDS(a_block_of_the_users)
{
    float data[BLOCK] = {1, 2, 3, 4, 5, 6}, grad[BLOCK] = {0}, got[BLOCK];
    if (!tree_host_memory(ctx))
        SKIP("memory of the host's is for devices of the host");
    dp_module *net = block_create(ctx, data, grad), *par = NULL, *copy = NULL;
    dp_parallel_config config = over(2);
    CHECK_OK(dp_data_parallel(net, &config, &par));
    block_step(ctx, net, par, 5, 1, true);
    CHECK_F64(grad[COLUMNS], 1. / 3, 1e-6);
    CHECK_OK(dp_module_copy(net, 1, &copy)); /* has a block of its own */
    net_numbers(ctx, copy, false, got);
    CHECK_BYTES(got, data, sizeof data);
    block_step(ctx, copy, copy, 5, 1, true);
    (void)scope;
}

/* Two blocks of one array: what lies between them is not the library's. */
TEST_BACKENDS(memory_between_two_blocks_is_unchanged)
{
    float data[2 * BLOCK + 2] = {0}, grad[2 * BLOCK + 2] = {0};
    dp_module *children[2], *parent = NULL, *par = NULL;
    static const dp_method methods[] = {{"forward", place_forward}, {"backward", place_backward}};
    static const dp_param_config own[PARTS] = {
        {.name = "w"}, {.name = "b"}, {.name = "live", .buffer = true}};
    dp_param_config part = {.name = "part", .ndim = 1, .shape = {BLOCK}};
    dp_parallel_config config = over(2);
    dp_value out;
    dp_pass *pass;
    if (!tree_host_memory(ctx))
        SKIP("memory of the host's is for devices of the host");
    for (int i = 0; i < 2; i++) {
        dp_module_config child = {.name = i == 0 ? "a" : "b",
                                  .params = &part,
                                  .param_count = 1,
                                  .packed = true,
                                  .block = data + i * (BLOCK + 2),
                                  .block_grad = grad + i * (BLOCK + 2)};
        CHECK_OK(dp_module_create(ctx, &child, &children[i]));
    }
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = own,
                                                  .param_count = PARTS,
                                                  .children = children,
                                                  .child_count = 2},
                              &parent));
    CHECK_OK(dp_data_parallel(parent, &config, &par));
    grad[BLOCK] = NAN;
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[2],)"), dp_none(), NULL, &out,
                       &pass));
    grad[BLOCK + 1] = -0.0f; /* which is +0 when anything is added */
    CHECK_OK(dp_backward(pass, dp_none(), NULL));
    CHECK(isnan(grad[BLOCK]) && signbit(grad[BLOCK + 1]) != 0);
}

static dp_status nothing_forward(dp_call *call)
{
    CHECK(dp_param_block(call) == NULL && dp_grad_block(call) == NULL);
    call->out = dp_none();
    return DP_OK;
}

static dp_status empty_forward(dp_call *call)
{
    (void)dp_error(DP_ERR_USER, "nothing is wrong");
    CHECK(dp_param_block(call) == NULL);
    CHECK_STR(dp_last_error(), "nothing is wrong");
    call->out = dp_none();
    return DP_OK;
}

TEST_BACKENDS(wrong_blocks)
{
    static const dp_method methods[] = {{"forward", nothing_forward}};
    static const dp_method of_nothing[] = {{"forward", empty_forward}};
    static const dp_param_config none = {.name = "none", .ndim = 1, .shape = {0}};
    float memory[4];
    dp_param_config a = {.name = "a", .ndim = 1, .shape = {2}}, b[2] = {a, a};
    dp_module *net = NULL;
    dp_value out;
    dp_module_config config = {
        .methods = methods, .method_count = 1, .params = b, .param_count = 2, .packed = true};
    const dp_param_config wrong[] = {
        {.name = "b", .dtype = DP_F64}, {.name = "b", .frozen = true},
        {.name = "b", .buffer = true},  {.name = "b", .ndim = 1, .shape = {2}, .same_as = "a"},
        {.name = "b", .data = memory},  {.name = "b", .grad = memory}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        b[1] = wrong[i];
        CHECK_ERROR(dp_module_create(ctx, &config, &net), DP_ERR_INVALID,
                    "dp_module_create: 'b' cannot be packed with 'a'");
    }
    config.packed = false;
    config.params = &a;
    config.param_count = 1;
    config.block = memory;
    CHECK_ERROR(dp_module_create(ctx, &config, &net), DP_ERR_INVALID, "packed is not set");
    config.block = NULL;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    config.packed = true;
    config.param_count = 0;
    config.params = NULL;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
    config.param_count = 1;
    config.params = &none;
    config.methods = of_nothing;
    CHECK_OK(dp_module_create(ctx, &config, &net));
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL));
}

static dp_status outer_forward(dp_call *call)
{
    dp_pass *pass;
    return dp_call_child(call, NULL, "forward", dp_none(), call->kwargs, &call->out, &pass);
}

TEST_BACKENDS(module_with_mean_grads_is_called_directly)
{
    static const dp_method methods[] = {{"forward", outer_forward}};
    dp_module *net = block_create(ctx, NULL, NULL), *outer = NULL;
    dp_value out, data;
    dp_pass *pass;
    float x[COLUMNS] = {1, 2, 3};
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){.name = "outer", .methods = methods, .method_count = 1, .wraps = net},
        &outer));
    data = DP_DICT(scope, {"x", dp_array(scope, x, DP_F32, DP_SHAPE(1, COLUMNS))});
    CHECK_ERROR(dp_invoke(outer, scope, "forward", dp_none(), data, NULL, &out, &pass),
                DP_ERR_UNSUPPORTED, "'block' has mean_grads and is run by a method of 'outer'");
    CHECK_OK(dp_invoke(net, scope, "forward", dp_none(), data, NULL, &out, &pass));
    CHECK_ERROR(dp_backward(pass, out, NULL), DP_ERR_INVALID,
                "dp_backward: 'block' has mean_grads: its gradient is a number, not a dict");
    CHECK_OK(dp_backward(pass, dp_int(2), NULL)); /* the pass was not used up */
}

/* ---- wrappers -------------------------------------------------------------------------------- */

static dp_status answer(dp_call *call)
{
    dp_tensor out;
    float number = (float)call->local_rank;
    TRY(dp_tensor_from(call->scope, call->device, &number, DP_F32, DP_SHAPE(1), &out));
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

static dp_status wrap_answer(dp_call *call)
{
    TRY(dp_call_child(call, "inner", "ask", call->args, dp_none(), &call->out, NULL));
    CHECK_ERROR(dp_call_child(call, "none", "ask", call->args, dp_none(), &call->out, NULL),
                DP_ERR_INVALID, "none");
    return dp_call_child(call, NULL, "ask", call->args, dp_none(), &call->out, NULL);
}

static const dp_method ask_methods[] = {{"ask", answer}, {"forward", answer}};

TEST_BACKENDS(wrapper_info_has_its_ranks_and_module)
{
    static const dp_method methods[] = {{"forward", wrap_answer}};
    dp_module *inner = NULL, *outer = NULL, *par = NULL;
    dp_wrapper_info info;
    const int ranks[2] = {2, 1}, output = 4;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "inner", .methods = ask_methods, .method_count = 2, .local_rank = 2},
        &inner));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "outer",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .wraps = inner,
                                                  .local_rank = 2},
                              &outer));
    CHECK_OK(dp_data_parallel(
        outer,
        &(dp_parallel_config){
            .local_ranks = ranks, .local_rank_count = 2, .output_rank = &output, .cut.dim = 0},
        &par));
    CHECK_INT(dp_module_rank(inner), 2);
    CHECK_INT(dp_module_rank(par), 2);
    CHECK_INT(dp_module_rank(NULL), -1);
    CHECK(dp_module_ctx(par) == ctx && dp_module_ctx(NULL) == NULL);
    CHECK(dp_wrapped(par) == outer && dp_wrapped(outer) == inner && dp_wrapped(inner) == NULL);
    CHECK(dp_unwrap(par) == inner && dp_wrapped(NULL) == NULL);
    CHECK_OK(dp_wrapper_info_get(par, &info));
    CHECK(info.local_rank_count == 2 && info.local_ranks[0] == 2 && info.local_ranks[1] == 1);
    CHECK(info.dim == 0 && tree_same_device(info.output, dp_local_device(ctx, 4)));
    CHECK_ERROR(dp_wrapper_info_get(outer, &info), DP_ERR_INVALID,
                "'outer' is not a wrapper of the");
    CHECK_ERROR(dp_wrapper_info_get(par, NULL), DP_ERR_INVALID, "out is NULL");
    dp_value out, args = tree_of(scope, "(f32[2],)");
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL));
    check_floats(ctx, out.as.t, (const float[]){2, 1}, 2);
}

static dp_status bare_forward(dp_call *call)
{
    call->out = dp_none();
    return dp_call_child(call, NULL, "ask", call->args, dp_none(), &call->out, NULL);
}

TEST_BACKENDS(nothing_is_wrapped)
{
    static const dp_method methods[] = {{"forward", bare_forward}};
    dp_module *net = NULL;
    dp_value out;
    CHECK_OK(
        dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 1}, &net));
    CHECK_ERROR(dp_invoke(net, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL),
                DP_ERR_INVALID, "child is NULL, and 'module' wraps nothing");
}

TEST_BACKENDS(one_pass_without_a_wrapper)
{
    static const net_shape by_rows = {0};
    float x[4 * NET_IN], got[NET_PARAMS], want[NET_PARAMS];
    dp_module *net = net_create(ctx, &by_rows, 0), *ask = NULL;
    dp_parallel_config two = over(2);
    dp_value out;
    dp_pass *pass;
    for (int i = 0; i < 4 * NET_IN; i++)
        x[i] = (float)(i % 5);
    dp_value args = DP_TUPLE_OF(scope, dp_array(scope, x, DP_F32, DP_SHAPE(4, NET_IN)));
    CHECK_OK(dp_invoke(net, scope, "forward", args, dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    net_numbers(ctx, net, true, want);
    CHECK_OK(dp_zero_grad(net));
    CHECK_OK(dp_data_parallel_once(net, scope, "forward", args, dp_none(), &two, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    net_numbers(ctx, net, true, got);
    CHECK_BYTES(got, want, sizeof want);
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.methods = ask_methods, .method_count = 2},
                              &ask));
    CHECK_OK(dp_data_parallel_once(ask, scope, "ask", args, dp_none(), &two, &out, NULL));
    check_floats(ctx, out.as.t, (const float[]){0, 1}, 2);
    two.cut.dim = 99;
    CHECK_ERROR(dp_data_parallel_once(ask, scope, "ask", args, dp_none(), &two, &out, NULL),
                DP_ERR_INVALID, "dp_data_parallel_once: dim is 99");
    two.cut.dim = 0;
    CHECK_ERROR(dp_data_parallel_once(ask, scope, "tell", args, dp_none(), &two, &out, NULL),
                DP_ERR_UNSUPPORTED, "dp_data_parallel_once: 'module' has no method 'tell'");
    CHECK_ERROR(dp_data_parallel_once(ask, scope, NULL, args, dp_none(), &two, &out, NULL),
                DP_ERR_INVALID, "dp_data_parallel_once: method is NULL");
}

/* ---- macros ---------------------------------------------------------------------------------- */

static dp_status tries(dp_status status)
{
    DP_TRY(status);
    return DP_PENDING;
}

TEST(try_returns_what_failed)
{
    CHECK_INT(tries(DP_ERR_STATE), DP_ERR_STATE);
    CHECK_INT(tries(DP_OK), DP_PENDING);
    DP_CHECK(DP_OK);
}

TEST(check_says_where_and_exits)
{
    int ends[2], status = 0;
    char text[256] = "";
    CHECK_INT(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        DP_CHECK(dp_error(DP_ERR_USER, "%s", "what went wrong"));
        _exit(0);
    }
    close(ends[1]);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(read(ends[0], text, sizeof text - 1) > 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    CHECK(strstr(text, "test_convenience.c:") != NULL &&
          strstr(text, ": what went wrong\n") != NULL);
}

TEST(local_ranks_have_their_count)
{
    const dp_parallel_config config = {DP_LOCAL_RANKS(3, 0, 1), .cut.dim = 1};
    const dp_scatter_config how = {DP_LOCAL_RANKS(5)};
    CHECK(config.local_rank_count == 3 && config.local_ranks[0] == 3 && config.cut.dim == 1);
    CHECK(how.local_rank_count == 1 && how.local_ranks[0] == 5);
}
