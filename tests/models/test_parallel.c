/* test_parallel.c - dp_data_parallel: N devices compute what one computes, and what it does with
   few rows, odd devices, errors and memory. */

#include <stdatomic.h>
#include <time.h>
#include "lazy.h"
#include "nets.h"
#include "reluctant.h"

static const net_shape by_rows = {0}, by_columns = {1};

static dp_module *wrap(dp_module *net, size_t devices, dp_split split, int dim)
{
    dp_module *par = NULL;
    CHECK_OK(dp_data_parallel(net,
                              &(dp_parallel_config){.local_ranks = first_ranks,
                                                    .local_rank_count = devices,
                                                    .cut = {.split = split, .dim = dim}},
                              &par));
    return par;
}

/* ---- N devices equal one --------------------------------------------------------------------- */

typedef struct batch {
    int64_t rows;
    float x[NET_ROWS * NET_IN], gy[NET_ROWS * NET_OUT];
} batch;

static void fill_batch(batch *b, int64_t rows)
{
    b->rows = rows;
    for (int64_t i = 0; i < rows * NET_IN; i++) {
        b->x[i] = (float)(i * 7 % 5 - 2);
    }
    for (int64_t i = 0; i < rows * NET_OUT; i++) {
        b->gy[i] = (float)(i * 3 % 7 - 3);
    }
}

static void check_tensor(dp_ctx *ctx, dp_value got, const float *want, int64_t count)
{
    float data[NET_ROWS * NET_IN];
    CHECK_INT(got.kind, DP_TENSOR);
    CHECK_INT(dp_tensor_count(got.as.t), count);
    CHECK_OK(dp_read(ctx, got.as.t, data, (size_t)count * sizeof *data));
    CHECK_BYTES(data, want, (size_t)count * sizeof *data);
}

static void check_equal(dp_ctx *ctx, dp_module *net, dp_module *par, const batch *b, int dim)
{
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    static float y[NET_ROWS * NET_OUT], gx[NET_ROWS * NET_IN];
    float gw[NET_PARAMS] = {0}, got[NET_PARAMS];
    const int64_t x_shape[2][2] = {{b->rows, NET_IN}, {NET_IN, b->rows}};
    const int64_t y_shape[2][2] = {{b->rows, NET_OUT}, {NET_OUT, b->rows}};
    dp_value out;
    dp_pass *pass;
    dp_input_grad grads;
    dp_scope *scope = dp_scope_begin(ctx);
    net_apply(dim, b->rows, b->x, w, y);
    net_apply_back(dim, b->rows, b->x, w, b->gy, gw, gx);
    dp_value args = DP_LIST_OF(scope, floats(scope, b->x, 2, x_shape[dim]));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
    check_tensor(ctx, out, y, b->rows * NET_OUT);
    CHECK_OK(dp_backward(pass, floats(scope, b->gy, 2, y_shape[dim]), &grads));
    check_tensor(ctx, dp_at(grads.args, 0), gx, b->rows * NET_IN);
    if (dp_is_wrapper(par) && strcmp(dp_module_name(par), "user") != 0) {
        CHECK_INT(dp_at(grads.args, 0).as.t->device.backend, 0); /* where the input was */
    }
    net_numbers(ctx, net, true, got);
    for (int i = 0; i < NET_PARAMS; i++) {
        CHECK_F64(got[i], gw[i], 0);
    }
    CHECK_OK(dp_zero_grad(par));
    dp_scope_end(scope);
}

/* Every number of devices, of rows, split and dim; whole numbers, so the bits are the same. */
TEST_BACKENDS(n_devices_equal_one)
{
    static const size_t devices[] = {1, 2, 3, 4, 8};
    static const int64_t rows[] = {0, 1, 2, 3, 5, 7, 9, 16, 100};
    static batch b;
    for (int dim = 0; dim < 2; dim++) {
        dp_module *net = net_create(ctx, dim == 0 ? &by_rows : &by_columns, 0);
        for (size_t d = 0; d < 5; d++) {
            for (int split = DP_SPLIT_BALANCED; split <= DP_SPLIT_CHUNK; split++) {
                dp_module *par = wrap(net, devices[d], (dp_split)split, dim);
                for (size_t r = 0; r < 9; r++) {
                    fill_batch(&b, rows[r]);
                    check_equal(ctx, net, par, &b, dim);
                }
                CHECK_OK(dp_module_destroy(par));
            }
        }
    }
}

/* Numbers that round: each sum is within its count times the unit round-off of the exact one. */
TEST_BACKENDS(n_devices_are_near_an_f64_reference)
{
    static batch b;
    float got[NET_PARAMS];
    double want[NET_PARAMS] = {0}, size[NET_PARAMS] = {0};
    dp_module *net = net_create(ctx, &by_rows, 0);
    dp_module *par = wrap(net, 5, DP_SPLIT_BALANCED, 0);
    uint64_t random = test_seed();
    dp_value out;
    dp_pass *pass;
    fill_batch(&b, 100);
    for (int i = 0; i < 100 * NET_IN; i++) {
        b.x[i] = (float)(test_random(&random) >> 40) / (1 << 24) - 0.5f;
    }
    for (int i = 0; i < 100 * NET_IN * NET_OUT; i++) {
        int row = i / (NET_IN * NET_OUT), k = i / NET_OUT % NET_IN, o = i % NET_OUT;
        double term = (double)b.x[row * NET_IN + k] * (double)b.gy[row * NET_OUT + o];
        want[k * NET_OUT + o] += term;
        size[k * NET_OUT + o] += fabs(term);
    }
    dp_value args = DP_LIST_OF(scope, floats(scope, b.x, DP_SHAPE(100, NET_IN)));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, floats(scope, b.gy, DP_SHAPE(100, NET_OUT)), NULL));
    net_numbers(ctx, net, true, got);
    for (int i = 0; i < NET_IN * NET_OUT; i++) {
        CHECK_F64(got[i], want[i], 100 * 6e-8 * size[i]);
    }
}

/* ---- the worked value ------------------------------------------------------------------------ */

/* f * v1 * v2, where x is full of f */
static dp_status product_forward(dp_call *call)
{
    float x[25], v1, v2;
    const dp_tensor *in;
    TRY(dp_call_arg(call, 0, DP_F32, 2, &in));
    TRY(dp_read(call->ctx, in, x, (size_t)dp_tensor_count(in) * sizeof *x));
    TRY(net_read(call, dp_param(call, 0), &v1, 1));
    TRY(net_read(call, dp_param(call, 1), &v2, 1));
    for (int64_t i = 0; i < dp_tensor_count(in); i++) {
        x[i] *= v1 * v2;
    }
    call->saved = (void *)(uintptr_t)in;
    return net_new(call, x, 2, in->shape, &call->out);
}

static dp_status product_backward(dp_call *call)
{
    float x[25], g[25], v1, v2, sum = 0;
    const dp_tensor *in = call->saved, *grad;
    size_t bytes = (size_t)dp_tensor_count(in) * sizeof *x;
    TRY(dp_as_tensor(call->grad, "gradient", DP_F32, 2, &grad));
    TRY(dp_read(call->ctx, in, x, bytes));
    TRY(dp_read(call->ctx, grad, g, bytes));
    TRY(net_read(call, dp_param(call, 0), &v1, 1));
    TRY(net_read(call, dp_param(call, 1), &v2, 1));
    for (int64_t i = 0; i < dp_tensor_count(in); i++) {
        sum += g[i] * x[i];
    }
    float by_v1 = sum * v2, by_v2 = sum * v1;
    TRY(net_add(call, dp_grad(call, 0), &by_v1, 1));
    return net_add(call, dp_grad(call, 1), &by_v2, 1);
}

TEST_BACKENDS(f_times_v1_times_v2_over_devices_1_and_0)
{
    static const dp_method methods[] = {{"forward", product_forward},
                                        {"backward", product_backward}};
    static const dp_param_config params[] = {{.name = "v1", .ndim = 1, .shape = {1}},
                                             {.name = "v2", .ndim = 1, .shape = {1}}};
    static const int ranks[] = {1, 0};
    const float two = 2, three = 3;
    float f[25], mean[25], out[25], grads[2];
    dp_module *net, *par;
    dp_value y;
    dp_pass *pass;
    for (int i = 0; i < 25; i++) {
        f[i] = 0.5f;
        mean[i] = 1.0f / 25;
    }
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 2,
                                                  .local_rank = 1},
                              &net));
    CHECK_OK(dp_params_write(net, 0, &two, 4));
    CHECK_OK(dp_params_write(net, 1, &three, 4));
    CHECK_OK(dp_data_parallel(
        net, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 2}, &par));
    dp_value args = DP_LIST_OF(scope, floats(scope, f, DP_SHAPE(5, 5)));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &y, &pass));
    CHECK_INT(y.as.t->device.index, 1);
    CHECK_OK(dp_read(ctx, y.as.t, out, sizeof out));
    for (int i = 0; i < 25; i++) {
        CHECK_F64(out[i], 3, 0);
    }
    CHECK_OK(dp_backward(pass, floats(scope, mean, DP_SHAPE(5, 5)), NULL));
    net_numbers(ctx, net, true, grads);
    CHECK_F64(grads[0], 1.5, 1e-6);
    CHECK_F64(grads[1], 1.0, 1e-6);
}

/* ---- how many replicas run ------------------------------------------------------------------- */

typedef struct visits { /* what a method saw, by replica */
    int count;
    size_t replicas[TREE_DEVICES];
    int64_t first[TREE_DEVICES], rows[TREE_DEVICES], total[TREE_DEVICES];
    int rank[TREE_DEVICES];
    double weight[TREE_DEVICES];
    dp_value args[TREE_DEVICES], kwargs[TREE_DEVICES];
    bool training, grad_enabled;
    dp_dtype compute_dtype;
} visits;

static visits seen;
static atomic_int seen_count;

/* Notes what it got, and gives its arguments out again. */
static dp_status note_forward(dp_call *call)
{
    size_t r = call->replica;
    seen.replicas[r] = call->replica_count;
    seen.first[r] = call->row_first;
    seen.rows[r] = call->row_count;
    seen.total[r] = call->row_total;
    seen.rank[r] = call->local_rank;
    seen.weight[r] = call->weight;
    seen.args[r] = call->args;
    seen.kwargs[r] = call->kwargs;
    if (r == 0) {
        seen.training = call->training;
        seen.grad_enabled = call->grad_enabled;
        seen.compute_dtype = call->compute_dtype;
    }
    atomic_fetch_add(&seen_count, 1);
    call->out = dp_get(call->kwargs, "give");
    return DP_OK;
}

static dp_module *noting(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", note_forward}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "note", .methods = methods, .method_count = 1}, &net));
    return net;
}

static dp_value note(dp_module *par, dp_scope *scope, const char *args, const char *kwargs)
{
    dp_value out = dp_none();
    atomic_store(&seen_count, 0);
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, args), tree_of(scope, kwargs), NULL,
                       &out, NULL));
    seen.count = atomic_load(&seen_count);
    return out;
}

typedef struct count_case {
    size_t devices;
    dp_split split;
    const char *args, *kwargs;
    int replicas;
    int64_t rows[TREE_DEVICES];
} count_case;

TEST_BACKENDS(replicas_run_for_parts_with_rows)
{
    static const count_case table[] = {
        {4, DP_SPLIT_BALANCED, "(f32[10,2],)", "None", 4, {3, 3, 2, 2}},
        {4, DP_SPLIT_CHUNK, "(f32[10,2],)", "None", 4, {3, 3, 3, 1}},
        {4, DP_SPLIT_CHUNK, "(f32[6,2],)", "{}", 3, {2, 2, 2}},
        {4, DP_SPLIT_BALANCED, "(f32[2,2],)", "None", 2, {1, 1}},
        {8, DP_SPLIT_BALANCED, "(f32[1],)", "{'give': None}", 1, {1}},
        {4, DP_SPLIT_BALANCED, "(f32[0,2],)", "None", 1, {0}},
        {4, DP_SPLIT_CHUNK, "(f32[0,2],)", "None", 4, {0, 0, 0, 0}},
        {3, DP_SPLIT_BALANCED, "()", "{}", 1, {0}},
        {3, DP_SPLIT_BALANCED, "None", "None", 1, {0}},
        {3, DP_SPLIT_BALANCED, "(1, 'a')", "None", 3, {0, 0, 0}},
        {3, DP_SPLIT_BALANCED, "(7,)", "{'x': f32[2]}", 2, {1, 1}},
        {2, DP_SPLIT_CHUNK, "(f32[1],)", "{'b': 3}", 1, {1}},
        {1, DP_SPLIT_BALANCED, "(f32[5],)", "None", 1, {5}},
    };
    dp_module *net = noting(ctx);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const count_case *row = &table[i];
        dp_module *par = wrap(net, row->devices, row->split, 0);
        note(par, scope, row->args, row->kwargs);
        CHECK_INT(seen.count, row->replicas);
        int64_t first = 0;
        for (int r = 0; r < row->replicas; r++) {
            CHECK_INT(seen.rows[r], row->rows[r]);
            CHECK_INT(seen.first[r], seen.total[r] > 0 ? first : 0);
            CHECK_INT(seen.rank[r], r);
            CHECK_INT(seen.replicas[r], row->replicas);
            first += row->rows[r];
        }
        CHECK_OK(dp_module_destroy(par));
    }
}

TEST_BACKENDS(weights_are_rows_or_one)
{
    dp_module *par = wrap(noting(ctx), 2, DP_SPLIT_BALANCED, 0);
    note(par, scope, "(f32[5],)", "None");
    CHECK_F64(seen.weight[0], 3, 0);
    CHECK_F64(seen.weight[1], 2, 0);
    note(par, scope, "(5,)", "None");
    CHECK_F64(seen.weight[1], 1, 0);
    note(par, scope, "(<stack: [f32[4,2], f32[1,2]]>,)", "None"); /* groups of 4 and of 1 */
    CHECK_F64(seen.weight[0], 4, 0);
    CHECK_F64(seen.weight[1], 1, 0);
}

TEST_BACKENDS(a_call_says_how_it_runs)
{
    dp_module *par = wrap(noting(ctx), 2, DP_SPLIT_BALANCED, 0);
    dp_value out;
    dp_pass *pass = NULL;
    dp_value args = tree_of(scope, "(f32[4],)");
    const dp_pass_config half = {.compute_dtype = DP_BF16}, no_grad = {.no_grad = true};
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), &half, &out, &pass));
    CHECK(seen.training && seen.grad_enabled && pass != NULL);
    CHECK_INT(seen.compute_dtype, DP_BF16);
    CHECK_OK(dp_module_train(par, false));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), &no_grad, &out, &pass));
    CHECK(!seen.training && !seen.grad_enabled && pass == NULL);
    CHECK_INT(seen.compute_dtype, DP_F32);
    CHECK_OK(dp_module_train(par, true));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL));
    CHECK(seen.training && !seen.grad_enabled);
}

/* ---- what comes in and out ------------------------------------------------------------------- */

static void check_text(dp_ctx *ctx, dp_value value, const char *want)
{
    CHECK_STR(tree_text(ctx, value), want);
}

TEST_BACKENDS(outputs_are_gathered)
{
    dp_module *net = noting(ctx);
    dp_module *par = wrap(net, 2, DP_SPLIT_BALANCED, 0), *one = wrap(net, 1, DP_SPLIT_BALANCED, 0);
    dp_value out = note(par, scope, "None", "{'give': {'a': [f32[3,1], None], 'b': (i64[3],)}}");
    check_text(ctx, out, "{'a': [f32[3,1]=0 1 2, None], 'b': (i64[3]=0 1 2)}");
    out = note(one, scope, "(1,)", "{'give': {'a': [f32[3,1], 7], 'b': 'text'}}");
    check_text(ctx, out, "{'a': [f32[3,1]=0 1 2, 7], 'b': 'text'}");
}

static dp_status give_scalar(dp_call *call)
{
    const float scalar = (float)call->replica + 5;
    return net_new(call, &scalar, 0, NULL, &call->out);
}

static dp_module *one_method(dp_ctx *ctx, dp_status (*fn)(dp_call *call))
{
    const dp_method methods[] = {{"forward", fn}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "own", .methods = methods, .method_count = 1}, &net));
    return net;
}

/* A single device leaves 0 dims alone; several devices make a vector, also of a single part. */
TEST_BACKENDS(scalars_become_a_vector_on_several_devices)
{
    dp_module *net = one_method(ctx, give_scalar);
    dp_module *par = wrap(net, 2, DP_SPLIT_BALANCED, 0), *one = wrap(net, 1, DP_SPLIT_BALANCED, 0);
    check_text(ctx, note(par, scope, "(f32[4],)", "None"), "f32[2]=5 6");
    check_text(ctx, note(par, scope, "(f32[1],)", "None"), "f32[1]=5");
    check_text(ctx, note(one, scope, "(f32[4],)", "None"), "f32[]=5");
}

static _Thread_local bool is_the_caller;
static atomic_int caller_count;

static dp_status count_callers(dp_call *call)
{
    atomic_fetch_add(&caller_count, is_the_caller);
    return give_scalar(call);
}

/* The first replica runs on the caller's thread, so a single one does; the others do not. */
TEST_BACKENDS(threads_are_the_callers_and_the_workers)
{
    dp_module *par = wrap(one_method(ctx, count_callers), 4, DP_SPLIT_BALANCED, 0);
    is_the_caller = true;
    for (int rows = 1; rows <= 4; rows++) {
        const char *args[] = {"(f32[1],)", "(f32[2],)", "(f32[3],)", "(f32[4],)"};
        atomic_store(&caller_count, 0);
        note(par, scope, args[rows - 1], "None");
        CHECK_INT(atomic_load(&caller_count), 1);
    }
}

TEST_BACKENDS(the_output_goes_where_it_should)
{
    dp_module *net = one_method(ctx, give_scalar), *par = NULL;
    static const int two = 2;
    dp_parallel_config config = {.local_rank_count = 2, .local_ranks = first_ranks};
    config.output_rank = &two; /* needs not be one of the two */
    CHECK_OK(dp_data_parallel(net, &config, &par));
    CHECK_INT(note(par, scope, "(f32[4],)", "None").as.t->device.index, 2);
    config.output_to_host = true;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    CHECK_INT(note(par, scope, "(f32[4],)", "None").as.t->device.backend, 0);
}

TEST_BACKENDS(a_device_may_be_there_twice)
{
    static const int ranks[] = {1, 1, 0, 1};
    static batch b;
    dp_module *net = net_create(ctx, &by_rows, 1), *par = NULL;
    CHECK_OK(dp_data_parallel(
        net, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 4}, &par));
    fill_batch(&b, 9);
    check_equal(ctx, net, par, &b, 0);
}

static atomic_int busy, most_busy;

static dp_status busy_forward(dp_call *call)
{
    int now = atomic_fetch_add(&busy, 1) + 1, most = atomic_load(&most_busy);
    while (now > most && !atomic_compare_exchange_weak(&most_busy, &most, now)) {
    }
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    atomic_fetch_sub(&busy, 1);
    call->out = dp_none();
    return DP_OK;
}

/* Not where they would use one stream at the same time. */
TEST_BACKENDS(replicas_of_one_device_take_turns)
{
    static const dp_method methods[] = {{"forward", busy_forward}};
    static const int twice[] = {1, 1};
    dp_device_info device;
    dp_module *net = NULL, *par = NULL;
    dp_value out;
    CHECK_OK(dp_device_info_get(ctx, 1, &device));
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){.name = "busy", .methods = methods, .method_count = 1, .local_rank = 1},
        &net));
    CHECK_OK(dp_data_parallel(
        net, &(dp_parallel_config){.local_ranks = twice, .local_rank_count = 2}, &par));
    CHECK_OK(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"), dp_none(), NULL, &out, NULL));
    CHECK(atomic_load(&most_busy) == 1 || device.host_memory);
}

TEST_BACKENDS(sizes_and_weights_split_too)
{
    int64_t sizes[] = {1, 0, 4};
    double weights[] = {1, 3};
    dp_module *net = noting(ctx), *par = NULL;
    dp_parallel_config config = {
        .local_ranks = first_ranks,
        .local_rank_count = 3,
        .cut = {.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = 3}};
    CHECK_OK(dp_data_parallel(net, &config, &par));
    memset(sizes, 0, sizeof sizes); /* it has copies */
    note(par, scope, "(f32[5],)", "None");
    CHECK_INT(seen.count, 3);
    CHECK_INT(seen.rows[1], 0);
    CHECK_INT(seen.rows[2], 4);
    config = (dp_parallel_config){
        .local_ranks = first_ranks,
        .local_rank_count = 2,
        .cut = {.split = DP_SPLIT_WEIGHTS, .weights = weights, .split_count = 2}};
    CHECK_OK(dp_data_parallel(net, &config, &par));
    memset(weights, 0, sizeof weights);
    note(par, scope, "(f32[8],)", "None");
    CHECK_INT(seen.rows[0], 2);
    CHECK_INT(seen.rows[1], 6);
}

TEST_BACKENDS(one_call_without_a_wrapper)
{
    dp_module *net = noting(ctx);
    dp_value out;
    const dp_parallel_config two = {.local_ranks = first_ranks, .local_rank_count = 2};
    CHECK_OK(dp_data_parallel_once(net, scope, "forward", tree_of(scope, "(f32[2],)"),
                                   tree_of(scope, "{'give': f32[2]}"), &two, &out, NULL));
    CHECK_INT(seen.replicas[0], 2);
    check_text(ctx, out, "f32[2]=0 1");
    CHECK_ERROR(
        dp_data_parallel_once(net, scope, "forward", dp_int(1), dp_none(), &two, &out, NULL),
        DP_ERR_INVALID, "dp_data_parallel_once: args is an int");
    CHECK(!dp_is_wrapper(net));
    CHECK_OK(dp_module_destroy(net));
}

/* ---- parameters, buffers, gradients ---------------------------------------------------------- */

TEST_BACKENDS(gradients_add_up_over_passes)
{
    static batch b;
    dp_module *net = net_create(ctx, &by_rows, 0), *par = wrap(net, 3, DP_SPLIT_BALANCED, 0);
    dp_pass *first, *second;
    dp_value out;
    float once[NET_PARAMS], twice[NET_PARAMS];
    fill_batch(&b, 7);
    dp_value args = DP_LIST_OF(scope, floats(scope, b.x, DP_SHAPE(7, NET_IN)));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &first));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &second));
    CHECK_OK(dp_backward(second, dp_float(1), NULL));
    net_numbers(ctx, net, true, once);
    CHECK_OK(dp_backward(first, dp_float(1), NULL));
    net_numbers(ctx, net, true, twice);
    for (int i = 0; i < NET_PARAMS; i++) {
        CHECK_F64(twice[i], 2 * once[i], 0);
    }
}

/* Adds 1 to every gradient that is to be touched in this pass: bit i for parameter i. */
static unsigned to_touch;

static dp_status touch_some(dp_call *call)
{
    static const float one = 1;
    for (size_t i = 0; i < 3; i++) {
        if (to_touch >> i & 1) {
            TRY(net_add(call, dp_grad(call, i), &one, 1));
        }
    }
    return DP_OK;
}

/* Replicas have gradients from earlier passes, which count once. The first two parameters are
   zeroed together, the last one, which is long, by itself. */
TEST_BACKENDS(gradients_that_backward_leaves_alone_add_nothing)
{
    enum { LONG = 40000, DEVICES = 3 };
    static const dp_method methods[] = {{"forward", give_none}, {"backward", touch_some}};
    static const dp_param_config params[] = {{.name = "a", .ndim = 1, .shape = {1}},
                                             {.name = "b", .ndim = 1, .shape = {1}},
                                             {.name = "long", .ndim = 1, .shape = {LONG}}};
    static const unsigned touched[] = {7, 0, 1, 4, 2, 6, 0, 5};
    float want[3] = {0}, got;
    dp_module *net = NULL;
    dp_value out;
    dp_pass *pass;
    dp_tensor data, grad, first;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 3},
                              &net));
    dp_module *par = wrap(net, DEVICES, DP_SPLIT_BALANCED, 0);
    for (size_t i = 0; i < sizeof touched / sizeof touched[0]; i++) {
        to_touch = touched[i];
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[6],)"), dp_none(), NULL,
                           &out, &pass));
        CHECK_OK(dp_backward(pass, dp_none(), NULL));
        for (size_t k = 0; k < 3; k++) {
            want[k] += to_touch >> k & 1 ? DEVICES : 0;
            CHECK_OK(dp_params_edit(net, k, &data, &grad));
            CHECK_OK(dp_narrow(&grad, 0, 0, 1, &first));
            CHECK_OK(dp_read(ctx, &first, &got, sizeof got));
            CHECK_F64(got, want[k], 0);
        }
    }
}

TEST_BACKENDS(replicas_follow_the_parameters)
{
    static batch b;
    static float y[NET_ROWS * NET_OUT];
    const float w[NET_PARAMS] = {5, 5, 5, 5, 5, 5, 1, 2};
    dp_module *net = net_create(ctx, &by_rows, 0), *par = wrap(net, 4, DP_SPLIT_BALANCED, 0);
    dp_value out;
    fill_batch(&b, 8);
    check_equal(ctx, net, par, &b, 0);
    CHECK_OK(dp_params_write(net, NET_W, w, sizeof(float) * NET_IN * NET_OUT));
    net_apply(0, 8, b.x, w, y);
    dp_value args = DP_LIST_OF(scope, floats(scope, b.x, DP_SHAPE(8, NET_IN)));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL));
    check_tensor(ctx, out, y, 8 * NET_OUT);
}

/* Adds 1 to the buffer, and returns what was there before. */
static dp_status count_forward(dp_call *call)
{
    const float one = 1;
    float before;
    const int64_t shape = 1;
    TRY(net_read(call, dp_param(call, 0), &before, 1));
    TRY(net_add(call, dp_buffer(call, 0), &one, 1));
    return net_new(call, &before, 1, &shape, &call->out);
}

TEST_BACKENDS(buffers_come_from_replica_0)
{
    static const dp_method methods[] = {{"forward", count_forward}};
    static const dp_param_config params[] = {
        {.name = "steps", .ndim = 1, .shape = {1}, .buffer = true}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = methods, .method_count = 1, .params = params, .param_count = 1},
        &net));
    dp_module *par = wrap(net, 3, DP_SPLIT_BALANCED, 0);
    check_text(ctx, note(par, scope, "(f32[3],)", "None"), "f32[3]=0 0 0");
    check_text(ctx, note(par, scope, "(f32[3],)", "None"), "f32[3]=1 1 1");
    CHECK_OK(dp_module_train(par, false));
    check_text(ctx, note(par, scope, "(f32[2],)", "None"), "f32[2]=2 2");
}

/* One block of the user's, as llm.c has it: nothing else in it is touched. */
TEST(memory_of_the_user_stays_where_it_is)
{
    static float block[4 + NET_PARAMS], grads[4 + NET_PARAMS];
    static batch b;
    dp_ctx *ctx;
    dp_module *net, *par;
    dp_tensor data, grad;
    CHECK_OK(dp_open(&(dp_config){.device_count = 3}, &ctx));
    dp_param_config params[2];
    memcpy(params, net_params, sizeof params);
    params[0].data = block + 2;
    params[0].grad = grads + 2;
    params[1].data = block + 2 + NET_IN * NET_OUT;
    params[1].grad = grads + 2 + NET_IN * NET_OUT;
    for (int i = 0; i < 4 + NET_PARAMS; i++) {
        block[i] = (float)i;
        grads[i] = i < 2 || i >= 2 + NET_PARAMS ? -0.0f : 0;
    }
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.methods = net_methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 2,
                                                  .state = &by_rows},
                              &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(dp_params_edit(par, 1, &data, &grad));
    CHECK(data.data == params[1].data && grad.data == params[1].grad);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    dp_pass *pass;
    fill_batch(&b, 5);
    dp_value args = DP_LIST_OF(scope, floats(scope, b.x, DP_SHAPE(5, NET_IN)));
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(2), NULL));
    CHECK_F64(grads[2 + NET_IN * NET_OUT], 10, 0); /* of the bias: 2 for each of 5 rows */
    CHECK(signbit(grads[1]) && signbit(grads[2 + NET_PARAMS]));
    CHECK_F64(block[3], 3, 0);
    dp_close(ctx);
}

/* Of the last replica: y = b, as x is zero. */
static float last_output(dp_ctx *ctx, dp_scope *scope, dp_module *par)
{
    float y[8];
    dp_value out;
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4,3]=0 0 0 0 0 0 0 0 0 0 0 0,)"),
                       dp_none(), NULL, &out, NULL));
    CHECK_OK(dp_read(ctx, out.as.t, y, sizeof y));
    CHECK_F64(y[6], y[7], 0);
    return y[7];
}

/* Memory that the user writes to counts as changed at every forward, in training or not; if its
   owner announces changes, when he says so. */
static dp_status ask_net(dp_call *call)
{
    return dp_call_child(call, "net", "forward", call->args, call->kwargs, &call->out, NULL);
}

TEST_BACKENDS(owner_of_memory_may_write_to_it)
{
    static const dp_method methods[] = {{"forward", ask_net}};
    for (int form = 0; form <= 3; form++) {
        bool announces = form == 1, nested = form == 2, packed = form == 3;
        dp_param_config params[2];
        dp_tensor block, w, b;
        dp_device device = dp_local_device(ctx, 0);
        dp_module *net = NULL, *whole = NULL;
        memcpy(params, net_params, sizeof params);
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(NET_IN, NET_OUT), &w));
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(NET_OUT), &b));
        CHECK_OK(dp_fill(ctx, &w, dp_float(1)));
        CHECK_OK(dp_fill(ctx, &b, dp_float(1)));
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(NET_PARAMS), &block));
        CHECK_OK(dp_fill(ctx, &block, dp_float(1)));
        if (packed) {
            CHECK_OK(dp_narrow(&block, 0, NET_IN * NET_OUT, NET_OUT, &b));
        } else {
            params[0].data = w.data;
            params[1].data = b.data;
        }
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "net",
                                                      .methods = net_methods,
                                                      .method_count = 2,
                                                      .params = params,
                                                      .param_count = 2,
                                                      .state = &by_rows,
                                                      .packed = packed,
                                                      .block = packed ? block.data : NULL,
                                                      .announces_changes = announces},
                                  &net));
        if (nested) {
            CHECK_OK(dp_module_create(
                ctx,
                &(dp_module_config){
                    .methods = methods, .method_count = 1, .children = &net, .child_count = 1},
                &whole));
        }
        dp_module *par = wrap(nested ? whole : net, 3, DP_SPLIT_BALANCED, 0);
        bool shared = tree_share_memory(ctx, 0, 2); /* then the last has nothing to copy */
        CHECK_F64(last_output(ctx, scope, par), 1, 0);
        for (int i = 2; i < 6; i++) {
            CHECK_OK(dp_module_train(par, i % 2 == 0));
            CHECK_OK(dp_fill(ctx, &b, dp_float(i)));
            if (announces) {
                CHECK_OK(dp_params_changed(net));
            }
            CHECK_F64(last_output(ctx, scope, par), i, 0);
        }
        CHECK_OK(dp_fill(ctx, &b, dp_float(9)));
        CHECK_F64(last_output(ctx, scope, par), announces && !shared ? 5 : 9, 0);
    }
}

TEST(a_steady_step_allocates_nothing)
{
    static batch b;
    test_allocator counter = {0};
    dp_ctx *ctx;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 4, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_module *net = net_create(ctx, &by_rows, 0), *par = wrap(net, 4, DP_SPLIT_BALANCED, 0);
    fill_batch(&b, 9);
    size_t calls = 0;
    for (int i = 0; i < 20; i++) {
        check_equal(ctx, net, par, &b, 0);
        calls = i == 4 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static dp_status fail_some(dp_call *call)
{
    if (call->replica == 1 || call->replica == 2) {
        return dp_error(DP_ERR_INVALID, "this is replica %zu", call->replica);
    }
    return give_scalar(call);
}

static dp_status fail_silently(dp_call *call)
{
    return call->replica == 3 ? DP_ERR_NO_MEMORY : give_scalar(call);
}

static dp_status give_by_replica(dp_call *call)
{
    call->out = call->replica == 1 ? tree_of(call->scope, "{'a': None}") : dp_none();
    return DP_OK;
}

static dp_status odd_status(dp_call *call)
{
    (void)call;
    return (dp_status)77;
}

TEST_BACKENDS(a_failing_replica_is_named)
{
    char want[96];
    dp_info info;
    dp_value out, args = tree_of(scope, "(f32[4],)");
    CHECK_OK(dp_info_get(ctx, &info));
    dp_module *par = wrap(one_method(ctx, fail_some), 4, DP_SPLIT_BALANCED, 0);
    snprintf(want, sizeof want, "dp_invoke: replica 1 on %s 1: own.forward: this is replica 1",
             info.device_backend);
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL), DP_ERR_INVALID,
                want);
    par = wrap(one_method(ctx, fail_silently), 4, DP_SPLIT_BALANCED, 0);
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL),
                DP_ERR_NO_MEMORY, "own.forward: out of memory");
    par = wrap(one_method(ctx, no_gradient), 2, DP_SPLIT_BALANCED, 0);
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL), DP_ERR_USER,
                "without setting call->out");
    par = wrap(one_method(ctx, odd_status), 2, DP_SPLIT_BALANCED, 0);
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL), DP_ERR_USER,
                "replica 0");
    par = wrap(one_method(ctx, give_by_replica), 2, DP_SPLIT_BALANCED, 0);
    CHECK_ERROR(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL),
                DP_ERR_MISMATCH, "is none in replica 0 and a dict in replica 1");
    CHECK_ERROR(dp_invoke(par, scope, "fly", args, dp_none(), NULL, &out, NULL), DP_ERR_UNSUPPORTED,
                "'own' has no method 'fly'");
    par = wrap(one_method(ctx, give_scalar), 4, DP_SPLIT_BALANCED, 0); /* all is well again */
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL));
}

/* Where there is one device there is no worker. */
TEST(the_only_device_may_be_there_twice)
{
    static const int ranks[] = {0, 0, 0};
    static batch b;
    dp_module *par = NULL;
    dp_value out;
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_module *net = net_create(ctx, &by_rows, 0);
    dp_parallel_config config = {.local_ranks = ranks, .local_rank_count = 3};
    CHECK_OK(dp_data_parallel(net, &config, &par));
    fill_batch(&b, 10);
    check_equal(ctx, net, par, &b, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_data_parallel(one_method(ctx, fail_some), &config, &par));
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"), dp_none(), NULL, &out, NULL),
        DP_ERR_INVALID, "dp_invoke: replica 1 on cpu 0: own.forward: this is replica 1");
    dp_close(ctx);
}

/* The devices are those that were named when the wrapper was made. */
TEST_BACKENDS(the_list_of_devices_is_copied)
{
    static batch b;
    int ranks[] = {1, 0, 2};
    dp_module *par = NULL;
    dp_wrapper_info info;
    dp_module *net = net_create(ctx, &by_rows, 1);
    CHECK_OK(dp_data_parallel(
        net, &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = 3}, &par));
    ranks[0] = ranks[1] = ranks[2] = 99;
    CHECK_OK(dp_wrapper_info_get(par, &info));
    CHECK_INT(info.local_ranks[0], 1);
    CHECK_INT(info.local_ranks[1], 0);
    CHECK_INT(info.local_ranks[2], 2);
    fill_batch(&b, 10);
    check_equal(ctx, net, par, &b, 0);
}

/* Nobody asks which of one it was. */
TEST_BACKENDS(a_single_replica_fails_without_a_number)
{
    dp_value out = dp_int(9), args = tree_of(scope, "(f32[4],)");
    dp_module *par = wrap(one_method(ctx, odd_status), 1, DP_SPLIT_BALANCED, 0);
    dp_status status = dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL);
    CHECK_STR(dp_last_error(), "dp_invoke: own.forward: a function of the user's failed");
    CHECK_INT(status, DP_ERR_USER);
    CHECK_INT(out.as.i, 9);
}

TEST_BACKENDS(fields_are_cut_alike)
{
    dp_module *par = wrap(noting(ctx), 2, DP_SPLIT_BALANCED, 0);
    dp_value out;
    CHECK_ERROR(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"),
                          tree_of(scope, "{'b': f32[3]}"), NULL, &out, NULL),
                DP_ERR_MISMATCH, "['b'] has 3 rows and [0] has 4");
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[],)"), dp_none(), NULL, &out, NULL),
        DP_ERR_INVALID, "0 dims");
    par = wrap(noting(ctx), 2, DP_SPLIT_CHUNK, 0); /* no replica goes without its argument */
    CHECK_ERROR(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"),
                          tree_of(scope, "{'b': f32[1]}"), NULL, &out, NULL),
                DP_ERR_MISMATCH, "rows would be lost");
}

TEST_BACKENDS(wrong_gradients)
{
    static batch b;
    dp_module *net = net_create(ctx, &by_rows, 0), *par = wrap(net, 2, DP_SPLIT_BALANCED, 0);
    static const char *const table[][2] = {
        {"f32[4,3]", "f32 (4,3), of the output f32 (4,2)"},
        {"f64[4,2]", "is f64"},
        {"[f32[4,2]]", "1 entry"},
        {"{'loss': 1.0}", "key 'loss'"},
        {"'text'", "is a string"},
    };
    fill_batch(&b, 4);
    dp_value args = DP_LIST_OF(scope, floats(scope, b.x, DP_SHAPE(4, NET_IN))), out;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        dp_pass *pass;
        CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, &pass));
        CHECK_ERROR(dp_backward(pass, tree_of(scope, table[i][0]), NULL), DP_ERR_MISMATCH,
                    table[i][1]);
    }
}

TEST_BACKENDS(wrong_wrappers)
{
    dp_module *net = net_create(ctx, &by_rows, 1), *par = NULL, *bare = NULL;
    static const int bad_rank[] = {0, 99};
    const int far_away = 44, far_dims[] = {-DP_MAX_DIMS - 1, DP_MAX_DIMS};
    dp_value out;
    dp_parallel_config config = {.local_ranks = bad_rank, .local_rank_count = 2};
    CHECK_ERROR(dp_data_parallel(NULL, NULL, &par), DP_ERR_INVALID, "module is NULL");
    CHECK_ERROR(dp_data_parallel(net, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_data_parallel(net, NULL, &par), DP_ERR_INVALID,
                "'net' is on local rank 1, the first of the devices is local rank 0");
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID,
                "local_ranks[1] is 99, the context has 8 devices");
    config = (dp_parallel_config){.local_ranks = first_ranks + 1, .local_rank_count = 1};
    config.output_rank = &far_away;
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID,
                "dp_data_parallel: output_rank is 44, the context");
    config.output_rank = NULL;
    config.cut.split = DP_SPLIT_SIZES;
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID, "sizes is NULL");
    config.cut.sizes = (int64_t[]){4};
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID,
                "dp_data_parallel: split_count is 0, sizes has an entry for each of 1 part");
    config.cut.sizes = NULL;
    for (size_t i = 0; i < sizeof far_dims / sizeof far_dims[0]; i++) {
        config.cut.split = DP_SPLIT_BALANCED;
        config.cut.dim = far_dims[i];
        CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID, "dim is ");
        CHECK_ERROR(
            dp_data_parallel_once(net, scope, "forward", dp_none(), dp_none(), &config, &out, NULL),
            DP_ERR_INVALID, "dp_data_parallel_once: dim is ");
    }
    config.cut.dim = 0;
    config.local_rank_count = 0;
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID,
                "local_ranks is given and local_rank_count is 0");
    config.local_rank_count = 1;
    config.cut.split = (dp_split)9;
    CHECK_ERROR(dp_data_parallel(net, &config, &par), DP_ERR_INVALID, "9 is not a split");
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.name = "bare"}, &bare));
    CHECK_ERROR(dp_data_parallel(bare, NULL, &par), DP_ERR_INVALID,
                "'bare' has no method 'forward'; there are none");
    CHECK_OK(dp_module_destroy(bare));
    CHECK_OK(dp_module_destroy(net)); /* no wrapper was left behind */
    CHECK(par == NULL);
}

/* Parameters or none: methods run where their module is. */
TEST_BACKENDS(all_modules_are_on_the_first_device)
{
    dp_module *child = NULL, *top = NULL, *par = NULL;
    const dp_module_config one = {
        .name = "child", .methods = net_methods, .method_count = 1, .local_rank = 1};
    CHECK_OK(dp_module_create(ctx, &one, &child));
    CHECK_ERROR(dp_data_parallel(child, NULL, &par), DP_ERR_INVALID,
                "'child' is on local rank 1, the first of the devices is local rank 0");
    const dp_module_config two = {.name = "top",
                                  .methods = net_methods,
                                  .method_count = 1,
                                  .children = &child,
                                  .child_count = 1};
    CHECK_OK(dp_module_create(ctx, &two, &top));
    CHECK_ERROR(dp_data_parallel(top, NULL, &par), DP_ERR_INVALID, "'child' is on local rank 1");
    const dp_parallel_config second = {.local_ranks = first_ranks + 1, .local_rank_count = 1};
    CHECK_ERROR(dp_data_parallel(top, &second, &par), DP_ERR_INVALID, "'top' is on local rank 0");
    CHECK_OK(dp_data_parallel(child, &second, &par));
}

/* ---- wrappers of wrappers -------------------------------------------------------------------- */

TEST_BACKENDS(the_outer_wrapper_decides)
{
    static batch b;
    dp_module *net = net_create(ctx, &by_rows, 0), *inner = wrap(net, 4, DP_SPLIT_BALANCED, 0);
    dp_module *outer = wrap(inner, 2, DP_SPLIT_BALANCED, 0);
    fill_batch(&b, 6);
    check_equal(ctx, net, outer, &b, 0);
    CHECK(dp_unwrap(outer) == net && dp_is_wrapper(inner));
    dp_param_info info;
    CHECK_OK(dp_module_param(outer, 0, &info));
    CHECK_STR(info.name, "w");
}

static dp_status pass_on(dp_call *call)
{
    return dp_call_child(call, "inner", "forward", call->args, call->kwargs, &call->out,
                         (dp_pass **)&call->saved);
}

static dp_status pass_back(dp_call *call)
{
    dp_input_grad grads;
    TRY(dp_backward(call->saved, call->grad, &grads));
    call->args_grad = grads.args;
    return DP_OK;
}

/* A wrapper of the user's, around the library's or inside it, changes nothing. */
TEST_BACKENDS(wrappers_of_the_users)
{
    static const dp_method methods[] = {{"forward", pass_on}, {"backward", pass_back}};
    static batch b;
    const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    dp_module *net = NULL, *user = NULL, *around = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "inner",
                                                  .methods = net_methods,
                                                  .method_count = 2,
                                                  .params = net_params,
                                                  .param_count = 2,
                                                  .state = &by_rows},
                              &net));
    CHECK_OK(dp_params_write(net, 0, w, NET_IN * NET_OUT * sizeof *w));
    CHECK_OK(dp_params_write(net, 1, w + NET_IN * NET_OUT, NET_OUT * sizeof *w));
    dp_module_config config = {.name = "user", .methods = methods, .method_count = 2, .wraps = net};
    CHECK_OK(dp_module_create(ctx, &config, &user));
    fill_batch(&b, 7);
    check_equal(ctx, net, user, &b, 0);
    check_equal(ctx, net, wrap(user, 3, DP_SPLIT_BALANCED, 0), &b, 0);
    CHECK(dp_is_wrapper(user) && dp_unwrap(user) == net);
    config.wraps = wrap(net, 3, DP_SPLIT_BALANCED, 0);
    CHECK_OK(dp_module_create(ctx, &config, &around));
    CHECK_STR(dp_module_name(config.wraps), "data_parallel");
}

/* ---- devices that differ --------------------------------------------------------------------- */

static int warn_count;
static char warning[256];
static int uneven_units[3];
static size_t uneven_bytes[3] = {1000, 1000, 1000};

static void note_warning(const dp_log_record *record, void *user)
{
    (void)user;
    warn_count += record->level == DP_LOG_WARN;
    snprintf(warning, sizeof warning, "%s", record->text);
}

static dp_status uneven_info(dp_dev *dev, dp_device_info *out)
{
    TRY(dp_cpu()->info(dev, out));
    out->bytes_total = uneven_bytes[dev->index % 3];
    out->compute_units = uneven_units[dev->index % 3];
    return DP_OK;
}

static const dp_device_ops *uneven_device(void);
static dp_status uneven_open(const dp_host *host, int index, dp_dev **out)
{
    TRY(dp_cpu()->open(host, index, out));
    (*out)->ops = uneven_device();
    return DP_OK;
}

static const dp_device_ops *uneven_device(void)
{
    static dp_device_ops ops;
    ops = *dp_cpu();
    ops.open = uneven_open;
    ops.info = uneven_info;
    return &ops;
}

static int warnings_of(int a, int b, int c)
{
    const dp_device_ops *const backends[] = {uneven_device(), NULL};
    dp_ctx *ctx;
    uneven_units[0] = a;
    uneven_units[1] = b;
    uneven_units[2] = c;
    CHECK_OK(dp_open(
        &(dp_config){.backends = backends, .device_count = 3, .log = {note_warning, NULL, 0}},
        &ctx));
    warn_count = 0;
    wrap(net_create(ctx, &by_rows, 0), 2, DP_SPLIT_BALANCED, 0); /* the third is not in the list */
    dp_close(ctx);
    return warn_count;
}

TEST(a_weak_device_is_named_once)
{
    CHECK_INT(warnings_of(4, 4, 1), 0);
    CHECK_INT(warnings_of(3, 4, 1), 0); /* exactly 0.75 */
    CHECK_INT(warnings_of(100, 74, 1), 1);
    CHECK(strstr(warning, "compute units") != NULL);
    uneven_bytes[0] = 700; /* memory is looked at first, and one warning is enough */
    CHECK_INT(warnings_of(100, 74, 1), 1);
    CHECK(strstr(warning, "memory") != NULL);
}

/* ---- what was written reaches every replica -------------------------------------------------- */

/* The parameter and the buffer as this replica has them. */
static dp_status show_both(dp_call *call)
{
    float both[2];
    dp_tensor w = dp_param_tensor(call, 0), live = dp_buffer_tensor(call, 1), out;
    TRY(dp_read(call->ctx, &w, &both[0], sizeof both[0]));
    TRY(dp_read(call->ctx, &live, &both[1], sizeof both[1]));
    TRY(dp_tensor_from(call->scope, call->device, both, DP_F32, DP_SHAPE(1, 2), &out));
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

static void check_shown(dp_ctx *ctx, dp_scope *scope, dp_module *par, float w, float live)
{
    float got[6];
    dp_value out;
    CHECK_OK(
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[3],)"), dp_none(), NULL, &out, NULL));
    CHECK_OK(dp_read(ctx, out.as.t, got, sizeof got));
    for (int r = 0; r < 3; r++) {
        CHECK_F64(got[2 * r], w, 0);
        CHECK_F64(got[2 * r + 1], live, 0);
    }
}

TEST_BACKENDS(written_parameters_reach_every_replica)
{
    static const dp_method methods[] = {{"forward", show_both}};
    static const dp_param_config params[] = {{.name = "w"}, {.name = "live", .buffer = true}};
    dp_module *net = NULL;
    dp_tensor w;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = methods, .method_count = 1, .params = params, .param_count = 2},
        &net));
    dp_module *par = wrap(net, 3, DP_SPLIT_BALANCED, 0);
    check_shown(ctx, scope, par, 0, 0);
    CHECK_OK(dp_params_write(net, 1, &(float){5}, sizeof(float)));
    check_shown(ctx, scope, par, 0, 5);
    CHECK_OK(dp_params_write(net, 0, &(float){7}, sizeof(float)));
    check_shown(ctx, scope, par, 7, 5);
    CHECK_OK(dp_params_edit(net, 0, &w, NULL));
    CHECK_OK(dp_fill(ctx, &w, dp_int(9)));
    check_shown(ctx, scope, par, 9, 5);
}

/* ---- devices of one memory ------------------------------------------------------------------- */

/* Replicas use the original's parameters as they are, on streams of their own: what was done to
   these, and what will be, is ordered with that. */
#define TEST_ONE_MEMORY(name)                                                                      \
    TEST_SLOW(name##_of_one_memory, 30)                                                            \
    {                                                                                              \
        tree_run(tree_body_##name, lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS)));       \
    }
TEST_ONE_MEMORY(n_devices_equal_one)
TEST_ONE_MEMORY(gradients_add_up_over_passes)
TEST_ONE_MEMORY(replicas_follow_the_parameters)
TEST_ONE_MEMORY(buffers_come_from_replica_0)
TEST_ONE_MEMORY(written_parameters_reach_every_replica)

static dp_tensor copied; /* of the second device */
static atomic_int copy_runs;

/* Replica 1 copies the parameter, on its own stream, and nobody waits for that. */
static dp_status copy_param(dp_call *call)
{
    dp_tensor param = dp_param_tensor(call, 0);
    call->out = dp_none();
    atomic_fetch_add(&copy_runs, 1);
    return call->replica == 1 ? dp_copy(call->ctx, &copied, &param, NULL) : DP_OK;
}

static dp_status invoke_copies(dp_ctx *ctx, dp_module *par)
{
    dp_value out;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status =
        dp_invoke(par, scope, "forward", tree_of(scope, "(f32[2],)"), dp_none(), NULL, &out, NULL);
    dp_scope_end(scope);
    return status;
}

static float first_of(dp_ctx *ctx, const dp_tensor *tensor)
{
    float numbers[4];
    CHECK_OK(dp_read(ctx, tensor, numbers, sizeof numbers));
    return numbers[0];
}

static dp_ctx *open_copies(const dp_device_ops *ops, dp_module **out_net, dp_module **out_par)
{
    static const dp_method methods[] = {{"forward", copy_param}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {4}}};
    const dp_device_ops *const backends[] = {ops, NULL};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = 1},
                              out_net));
    CHECK_OK(dp_data_parallel(*out_net, NULL, out_par));
    CHECK_OK(
        dp_tensor_new(dp_scope_begin(ctx), dp_local_device(ctx, 1), DP_F32, DP_SHAPE(4), &copied));
    return ctx;
}

TEST(replicas_of_one_memory_come_after_what_was_written_and_before_what_will_be)
{
    dp_module *net, *par;
    dp_tensor param;
    dp_ctx *ctx = open_copies(lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS)), &net, &par);
    CHECK_OK(dp_params_edit(net, 0, &param, NULL));
    CHECK_OK(dp_fill(ctx, &param, dp_int(5)));
    CHECK_OK(invoke_copies(ctx, par));
    CHECK_F64(first_of(ctx, &copied), 5, 0);
    CHECK_OK(dp_fill(ctx, &param, dp_int(6)));
    CHECK_OK(invoke_copies(ctx, par));
    CHECK_OK(dp_fill(ctx, &param, dp_int(7)));
    CHECK_F64(first_of(ctx, &param), 7, 0);
    CHECK_F64(first_of(ctx, &copied), 6, 0);
    dp_close(ctx);
}

/* Whatever fails in a pass fails it: in front of the methods none of them runs. */
TEST(replicas_of_one_memory_that_cannot_be_ordered)
{
    int before = 0, behind = 0;
    bool fired = true;
    for (long n = 1; fired; n++) {
        dp_module *net, *par;
        dp_ctx *ctx = open_copies(
            decorate_device(lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS))), &net, &par);
        CHECK_OK(invoke_copies(ctx, par));
        CHECK_OK(dp_wait(ctx));
        atomic_store(&copy_runs, 0);
        deco.fail_with = DP_ERR_NO_MEMORY;
        deco.fail_at = deco.call_count + n;
        dp_status status = invoke_copies(ctx, par);
        fired = deco.fired;
        if (fired && deco.fired_in == DECO_event_wait) {
            CHECK_STATUS(status, DP_ERR_NO_MEMORY);
            CHECK(strncmp(dp_last_error(), "dp_invoke: ", 11) == 0);
            before += atomic_load(&copy_runs) == 0;
            behind += atomic_load(&copy_runs) == 2;
        }
        dp_close(ctx);
        CHECK_DECORATOR();
    }
    CHECK_INT(before, 1);
    CHECK_INT(behind, 1);
}
