/* test_wrappers.c - the other wrappers: containers, outputs left in place and their criterion,
   tasks side by side, and dp_train_step. */

#include <stdatomic.h>
#include "nets.h"

static const net_shape by_rows = {0};

static dp_module *create(dp_ctx *ctx, const char *name, const dp_method *methods, size_t count,
                         const void *state)
{
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = name, .methods = methods, .method_count = count, .state = state},
        &module));
    return module;
}

/* ---- containers ------------------------------------------------------------------------------ */

static atomic_int container_count;
static void *step_optimizer;

/* Counts containers among its arguments, and returns the tensors of kwargs['image']. */
static dp_status unwrapped_forward(dp_call *call)
{
    dp_value image = dp_get(call->kwargs, "image"), meta = dp_get(call->kwargs, "meta");
    atomic_fetch_add(&container_count, (image.kind == DP_CONTAINER) + (meta.kind == DP_CONTAINER));
    call->out = image;
    return DP_OK;
}

static dp_status own_train_step(dp_call *call)
{
    dp_value optimizer = dp_at(call->args, 1);
    step_optimizer = optimizer.kind == DP_OPAQUE ? optimizer.as.p : NULL;
    call->out = DP_DICT(call->scope, {"data", dp_at(call->args, 0)});
    return DP_OK;
}

static const dp_method container_methods[] = {
    {"forward", unwrapped_forward}, {"train_step", own_train_step}, {"val_step", own_train_step}};

TEST_BACKENDS(containers_are_unwrapped_on_any_number_of_devices)
{
    dp_module *net = create(ctx, "net", container_methods, 3, NULL), *par = NULL;
    dp_value out;
    const dp_parallel_config one = over(1), two = over(2);
    atomic_store(&container_count, 0);
    CHECK_OK(dp_container_parallel(net, &one, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(),
                       tree_of(scope, "{'image': <stack: [f32[2,1]]>, 'meta': <cpu: [['a']]>}"),
                       NULL, &out, NULL));
    CHECK_STR(tree_text(ctx, out), "f32[2,1]=0 1");
    CHECK_OK(dp_container_parallel(net, &two, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(),
                       tree_of(scope, "{'image': <stack: [f32[2,1], f32[1,1]=7]>, "
                                      "'meta': <cpu: [['a', 'b'], ['c']]>}"),
                       NULL, &out, NULL));
    CHECK_STR(tree_text(ctx, out), "f32[3,1]=0 1 7");
    CHECK_INT(atomic_load(&container_count), 0);
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), dp_none(), NULL, &out, NULL)); /* empty */
    CHECK_INT(out.kind, DP_NONE);
}

TEST_BACKENDS(groups_for_more_devices_are_refused)
{
    dp_module *par = NULL;
    dp_value out;
    const dp_parallel_config two = over(2);
    CHECK_OK(dp_container_parallel(create(ctx, "net", container_methods, 3, NULL), &two, &par));
    CHECK_ERROR(dp_invoke(par, scope, "forward", dp_none(),
                          tree_of(scope, "{'image': <stack: [f32[1,1], f32[1,1], f32[1,1]]>}"),
                          NULL, &out, NULL),
                DP_ERR_MISMATCH, "['image'] has 3 groups for 2 devices");
}

TEST_BACKENDS(own_steps_run_on_a_single_device)
{
    dp_module *net = create(ctx, "net", container_methods, 3, NULL), *one = NULL, *two = NULL;
    dp_value out;
    int optimizer = 0;
    const dp_parallel_config single = over(1), several = over(2);
    CHECK_OK(dp_container_parallel(net, &single, &one));
    CHECK_OK(dp_container_parallel(net, &several, &two));
    dp_value args = DP_LIST_OF(scope, tree_of(scope, "<cpu: [[1, 2]]>"), dp_opaque(&optimizer));
    CHECK_OK(dp_invoke(one, scope, "train_step", args, dp_none(), NULL, &out, NULL));
    CHECK_STR(tree_text(ctx, out), "{'data': [1, 2]}"); /* untouched */
    CHECK(step_optimizer == &optimizer);
    CHECK_OK(dp_invoke(one, scope, "val_step", args, dp_none(), NULL, &out, NULL));
    CHECK_ERROR(dp_invoke(two, scope, "train_step", args, dp_none(), NULL, &out, NULL),
                DP_ERR_UNSUPPORTED, "'train_step' runs on a single device, this wrapper has 2");
    CHECK_ERROR(dp_invoke(two, scope, "val_step", args, dp_none(), NULL, &out, NULL),
                DP_ERR_UNSUPPORTED, "'val_step'");
}

/* ---- outputs left in place, and a criterion -------------------------------------------------- */

/* out = x * w of one number; as a tuple (out, 3) if the state says so */
static dp_status times_forward(dp_call *call)
{
    float x[8], w;
    const dp_tensor *in;
    dp_value out;
    TRY(dp_call_arg(call, 0, DP_F32, 1, &in));
    TRY(dp_read(call->ctx, in, x, (size_t)in->shape[0] * sizeof *x));
    TRY(net_read(call, dp_param(call, 0), &w, 1));
    for (int64_t i = 0; i < in->shape[0]; i++) {
        x[i] *= w;
    }
    call->saved = (void *)(uintptr_t)in;
    TRY(net_new(call, x, 1, in->shape, &out));
    const dp_value both[] = {out, dp_int(3)};
    call->out = call->state != NULL ? dp_list_make(call->scope, DP_TUPLE, both, 2) : out;
    return DP_OK;
}

static dp_status times_backward(dp_call *call)
{
    float x[8], g[8], sum = 0;
    const dp_tensor *in = call->saved, *grad;
    dp_value own = call->grad.kind == DP_TUPLE ? dp_at(call->grad, 0) : call->grad;
    TRY(dp_as_tensor(own, "gradient", DP_F32, 1, &grad));
    TRY(dp_read(call->ctx, in, x, (size_t)in->shape[0] * sizeof *x));
    TRY(dp_read(call->ctx, grad, g, (size_t)in->shape[0] * sizeof *x));
    for (int64_t i = 0; i < in->shape[0]; i++) {
        sum += g[i] * x[i];
    }
    return net_add(call, dp_grad(call, 0), &sum, 1);
}

static dp_module *times(dp_ctx *ctx, float w, bool tuple)
{
    static const dp_method methods[] = {{"forward", times_forward}, {"backward", times_backward}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {1}}};
    static const int yes = 1;
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "times",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 1,
                                                  .state = tuple ? &yes : NULL},
                              &net));
    CHECK_OK(dp_params_write(net, 0, &w, sizeof w));
    return net;
}

/* mean((y - t)^2); its arguments are (y, t), or (y, 3, t) of a tuple */
static dp_status mse_forward(dp_call *call)
{
    float y[8], t[8], sum = 0;
    const dp_tensor *ty, *tt;
    TRY(dp_call_arg(call, 0, DP_F32, 1, &ty));
    TRY(dp_call_arg(call, call->args.count - 1, DP_F32, 1, &tt));
    TRY(dp_read(call->ctx, ty, y, (size_t)ty->shape[0] * sizeof *y));
    TRY(dp_read(call->ctx, tt, t, (size_t)tt->shape[0] * sizeof *t));
    if (ty->shape[0] != tt->shape[0]) {
        return dp_error(DP_ERR_INVALID, "rows");
    }
    for (int64_t i = 0; i < ty->shape[0]; i++) {
        sum += (y[i] - t[i]) * (y[i] - t[i]) / (float)ty->shape[0];
    }
    return net_new(call, &sum, 0, NULL, &call->out);
}

static dp_status mse_backward(dp_call *call)
{
    float y[8], t[8];
    double g;
    const dp_tensor *ty, *tt;
    dp_value grad, items[3] = {dp_none(), dp_none(), dp_none()};
    TRY(dp_call_arg(call, 0, DP_F32, 1, &ty));
    TRY(dp_call_arg(call, call->args.count - 1, DP_F32, 1, &tt));
    TRY(dp_read(call->ctx, ty, y, (size_t)ty->shape[0] * sizeof *y));
    TRY(dp_read(call->ctx, tt, t, (size_t)tt->shape[0] * sizeof *t));
    TRY(dp_item(call->ctx, call->grad, &g));
    for (int64_t i = 0; i < ty->shape[0]; i++) {
        y[i] = (float)g * 2 * (y[i] - t[i]) / (float)ty->shape[0];
    }
    TRY(net_new(call, y, 1, ty->shape, &grad));
    items[0] = grad;
    call->args_grad = dp_list_make(call->scope, DP_TUPLE, items, call->args.count);
    return DP_OK;
}

static const dp_method mse_methods[] = {{"forward", mse_forward}, {"backward", mse_backward}};
static const float one_to_five[] = {1, 2, 3, 4, 5}, zeros[8];

/* The loss of 1..5 against 0 on `devices`, and the gradient of w that it gives. */
static double encoding_loss(dp_ctx *ctx, size_t devices, bool of_samples, bool tuple,
                            float *out_grad)
{
    dp_parallel_config config = over(devices);
    dp_module *net = times(ctx, 1, tuple), *model = NULL, *criterion = NULL;
    dp_pass *forward, *loss;
    dp_value outs, mean;
    dp_input_grad grads;
    dp_scope *scope = dp_scope_begin(ctx);
    config.cut.split = DP_SPLIT_CHUNK;
    CHECK_OK(dp_model_parallel(net, &config, &model));
    config.mean_of_samples = of_samples;
    CHECK_OK(dp_criterion_parallel(create(ctx, "mse", mse_methods, 2, NULL), &config, &criterion));
    dp_value x = floats(scope, one_to_five, DP_SHAPE(5)), t = floats(scope, zeros, DP_SHAPE(5));
    CHECK_OK(
        dp_invoke(model, scope, "forward", DP_LIST_OF(scope, x), dp_none(), NULL, &outs, &forward));
    CHECK_INT(outs.kind, devices == 1 ? (tuple ? DP_TUPLE : DP_TENSOR) : DP_LIST);
    for (uint32_t i = 0; devices > 1 && i < outs.count && !tuple; i++) {
        CHECK_INT(dp_at(outs, i).as.t->device.index, i); /* left in place */
    }
    CHECK_OK(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs, t), dp_none(), NULL,
                       &mean, &loss));
    CHECK_OK(dp_backward(loss, dp_float(1), &grads));
    CHECK_OK(dp_backward(forward, dp_at(grads.args, 0), NULL));
    net_numbers(ctx, net, true, out_grad);
    double value = item(ctx, mean);
    dp_scope_end(scope);
    return value;
}

static dp_status one_gradient_too_many(dp_call *call)
{
    dp_value items[3] = {dp_none(), dp_none(), dp_none()};
    call->args_grad = dp_list_make(call->scope, DP_TUPLE, items, 3);
    return DP_OK;
}

static dp_status no_gradient_at_all(dp_call *call)
{
    call->args_grad = dp_none();
    return DP_OK;
}

/* What a criterion says of its inputs: one gradient an argument, or nothing. */
TEST_BACKENDS(a_criterions_gradients_are_those_of_its_arguments)
{
    dp_method methods[] = {{"forward", mse_forward}, {"backward", one_gradient_too_many}};
    dp_parallel_config config = over(2);
    dp_module *model = NULL, *criterion = NULL;
    dp_pass *loss;
    dp_value outs, mean;
    dp_input_grad grads;
    CHECK_OK(dp_model_parallel(times(ctx, 1, false), &config, &model));
    dp_value x = floats(scope, one_to_five, DP_SHAPE(5)), t = floats(scope, zeros, DP_SHAPE(5));
    CHECK_OK(
        dp_invoke(model, scope, "forward", DP_LIST_OF(scope, x), dp_none(), NULL, &outs, NULL));
    for (int i = 0; i < 2; i++) {
        methods[1].fn = i == 0 ? one_gradient_too_many : no_gradient_at_all;
        CHECK_OK(dp_criterion_parallel(create(ctx, "mse", methods, 2, NULL), &config, &criterion));
        CHECK_OK(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs, t), dp_none(), NULL,
                           &mean, &loss));
        if (i == 0)
            CHECK_ERROR(dp_backward(loss, dp_float(1), &grads), DP_ERR_MISMATCH,
                        "args_grad of replica 0 is a tuple of 3, it had 2 arguments");
        else
            CHECK_OK(dp_backward(loss, dp_float(1), &grads));
    }
}

/* d/dw of mean((w x)^2) is 2 mean(x^2), of the mean of the parts' means likewise. */
TEST_BACKENDS(the_mean_of_losses_is_that_of_devices_or_of_samples)
{
    static const double means[] = {11, 12.583333, 13.333333, 13.333333};
    float grad;
    for (size_t devices = 1; devices <= 4; devices++) {
        CHECK_F64(encoding_loss(ctx, devices, false, false, &grad), means[devices - 1], 1e-5);
        CHECK_F64(grad, 2 * means[devices - 1], 1e-5);
        CHECK_F64(encoding_loss(ctx, devices, true, false, &grad), 11, 1e-5);
        CHECK_F64(grad, 22, 1e-5);
    }
}

TEST_BACKENDS(tuples_of_outputs_are_several_arguments)
{
    float grad;
    for (size_t devices = 1; devices <= 3; devices++) {
        CHECK_F64(encoding_loss(ctx, devices, true, true, &grad), 11, 1e-5);
        CHECK_F64(grad, 22, 1e-5);
    }
}

static dp_status count_two(dp_call *call)
{
    const float two = (float)call->args.count;
    return net_new(call, &two, 0, NULL, &call->out);
}

/* Made by hand, with something behind their end that nobody may look at. */
TEST_BACKENDS(tuples_of_outputs_end_where_they_say)
{
    static const dp_method methods[] = {{"forward", count_two}};
    dp_parallel_config config = over(2);
    dp_module *criterion = NULL;
    dp_value items[2][3], tuples[2], mean;
    for (int r = 0; r < 2; r++) {
        items[r][0] = items[r][1] = floats(scope, one_to_five, DP_SHAPE(2));
        items[r][2] = dp_opaque(NULL);
        items[r][2].kind = DP_LIST;
        items[r][2].count = items[r][2].depth = 1;
        tuples[r] = dp_opaque(items[r]);
        tuples[r].kind = DP_TUPLE;
        tuples[r].count = 2;
        tuples[r].depth = 1;
    }
    CHECK_OK(dp_criterion_parallel(create(ctx, "two", methods, 1, NULL), &config, &criterion));
    dp_value outs = dp_list_make(scope, DP_LIST, tuples, 2);
    CHECK_OK(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs), dp_none(), NULL, &mean,
                       NULL));
    CHECK_F64(item(ctx, mean), 2, 0);
}

TEST_BACKENDS(one_part_on_several_devices)
{
    dp_parallel_config config = over(3);
    dp_module *model = NULL, *criterion = NULL;
    dp_value outs, mean;
    CHECK_OK(dp_model_parallel(times(ctx, 2, false), &config, &model));
    CHECK_OK(dp_criterion_parallel(create(ctx, "mse", mse_methods, 2, NULL), &config, &criterion));
    dp_value x = floats(scope, one_to_five, DP_SHAPE(1)), t = floats(scope, zeros, DP_SHAPE(1));
    CHECK_OK(
        dp_invoke(model, scope, "forward", DP_LIST_OF(scope, x), dp_none(), NULL, &outs, NULL));
    CHECK_INT(outs.count, 1);
    CHECK_OK(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs, t), dp_none(), NULL,
                       &mean, NULL));
    CHECK_F64(item(ctx, mean), 4, 0);
    CHECK_INT(mean.as.t->ndim, 0);
}

/* How many of 32 lists that were changed by hand are read beyond their end, at a cut. What tells
   them apart has 12 bits, so one of them passes once in a hundred runs or two. */
static int count_believed(dp_module *criterion, dp_scope *scope, dp_value outs, dp_value target)
{
    static int64_t rows[] = {2, 1, 1};
    dp_value items[32][4], mean;
    int count = 0;
    for (int i = 0; i < 32; i++) {
        dp_value changed = outs;
        for (int k = 0; k < 4; k++)
            items[i][k] = k < 3 ? outs.as.items[k] : dp_opaque(rows);
        changed.as.items = items[i];
        changed.reserved = (uint8_t)(i % 2 == 0 ? outs.reserved : 1u << i % 16 / 2);
        count += dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, changed, target),
                           dp_none(), NULL, &mean, NULL) != DP_ERR_MISMATCH;
    }
    return count;
}

TEST_BACKENDS(targets_are_cut_as_the_outputs_were)
{
    dp_parallel_config config = over(3);
    dp_module *model = NULL, *criterion = NULL;
    dp_value outs, mean;
    CHECK_OK(dp_model_parallel(times(ctx, 2, false), &config, &model));
    config.cut.split = DP_SPLIT_CHUNK; /* of the targets: the outputs' own cut comes first */
    CHECK_OK(dp_criterion_parallel(create(ctx, "mse", mse_methods, 2, NULL), &config, &criterion));
    dp_value x = floats(scope, one_to_five, DP_SHAPE(4)), t = floats(scope, zeros, DP_SHAPE(4));
    dp_value more = floats(scope, zeros, DP_SHAPE(5));
    CHECK_OK(
        dp_invoke(model, scope, "forward", DP_LIST_OF(scope, x), dp_none(), NULL, &outs, NULL));
    CHECK_INT(outs.count, 3); /* 2, 1, 1 where chunk makes 2, 2 */
    CHECK_OK(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs, t), dp_none(), NULL,
                       &mean, NULL));
    CHECK_ERROR(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, outs, more), dp_none(),
                          NULL, &mean, NULL),
                DP_ERR_MISMATCH,
                "dp_invoke: the targets cannot be cut as the outputs were: the sizes add up to 4, "
                "not to 5 rows");
    dp_value copy = dp_list_make(scope, DP_LIST, outs.as.items, 3); /* knows nothing of the cut */
    CHECK_ERROR(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, copy, t), dp_none(), NULL,
                          &mean, NULL),
                DP_ERR_MISMATCH, "the targets make 2 parts, the outputs are 3");
    CHECK(count_believed(criterion, scope, outs, t) <= 1);
    CHECK_ERROR(dp_invoke(criterion, scope, "forward", DP_LIST_OF(scope, t, t), dp_none(), NULL,
                          &mean, NULL),
                DP_ERR_MISMATCH, "the outputs are a tensor");
    CHECK_ERROR(dp_invoke(criterion, scope, "forward", dp_none(), dp_none(), NULL, &mean, NULL),
                DP_ERR_INVALID, "a criterion's first argument");
}

TEST_BACKENDS(losses_are_added_up_on_one_of_the_devices)
{
    static const int five = 5;
    dp_parallel_config config = over(2);
    dp_module *criterion = NULL, *mse = create(ctx, "mse", mse_methods, 2, NULL);
    config.output_rank = &five;
    CHECK_ERROR(dp_criterion_parallel(mse, &config, &criterion), DP_ERR_INVALID,
                "output_rank 5 is none of local_ranks");
}

TEST_BACKENDS(gradients_of_outputs_in_place_are_a_list)
{
    dp_parallel_config config = over(2);
    dp_module *model = NULL;
    dp_value outs;
    dp_pass *pass;
    CHECK_OK(dp_model_parallel(times(ctx, 2, false), &config, &model));
    dp_value x = floats(scope, one_to_five, DP_SHAPE(4));
    dp_value args = DP_LIST_OF(scope, x);
    CHECK_OK(dp_invoke(model, scope, "forward", args, dp_none(), NULL, &outs, &pass));
    CHECK_ERROR(dp_backward(pass, x, NULL), DP_ERR_MISMATCH, "a list with one entry per replica");
    CHECK_OK(dp_invoke(model, scope, "forward", args, dp_none(), NULL, &outs, &pass));
    CHECK_ERROR(dp_backward(pass, DP_LIST_OF(scope, x, x, x), NULL), DP_ERR_MISMATCH,
                "a list of 3, the pass has 2 replicas");
}

static dp_value grads_seen[TREE_DEVICES];

static dp_status a_dict_of_losses(dp_call *call)
{
    const float zero = 0;
    dp_value a, b;
    TRY(net_new(call, &zero, 0, NULL, &a));
    TRY(net_new(call, &zero, 0, NULL, &b));
    call->out = DP_DICT(call->scope, {"a", a}, {"b", DP_LIST_OF(call->scope, b)});
    return DP_OK;
}

static dp_status note_grad(dp_call *call)
{
    grads_seen[call->replica] = call->grad;
    return DP_OK;
}

/* Numbers are divided as tensors are, wherever they stand. */
TEST_BACKENDS(gradients_of_a_mean_are_shared_in_every_leaf)
{
    static const dp_method methods[] = {{"forward", a_dict_of_losses}, {"backward", note_grad}};
    dp_module *criterion = NULL;
    dp_value mean, x = tree_of(scope, "f32[4]");
    dp_pass *pass;
    for (size_t devices = 1; devices <= 3; devices++) {
        dp_parallel_config config = over(devices);
        const char *const want[] = {"{'a': 6, 'b': [f32[]=3]}", "{'a': 3.0, 'b': [f32[]=1.5]}",
                                    "{'a': 2.0, 'b': [f32[]=1]}"};
        CHECK_OK(dp_criterion_parallel(create(ctx, "two", methods, 2, NULL), &config, &criterion));
        const dp_value outs[] = {x, x, x};
        dp_value list = dp_list_make(scope, DP_LIST, outs, devices);
        CHECK_OK(dp_invoke(criterion, scope, "forward",
                           DP_LIST_OF(scope, devices > 1 ? list : x, tree_of(scope, "f32[6]")),
                           dp_none(), NULL, &mean, &pass));
        CHECK_OK(dp_backward(pass, tree_of(scope, "{'a': 6, 'b': [f32[]=3]}"), NULL));
        for (size_t r = 0; r < devices; r++) {
            CHECK_STR(tree_text(ctx, grads_seen[r]), want[devices - 1]);
        }
    }
}

static dp_status say_four(dp_call *call)
{
    const float four = 4;
    return net_new(call, &four, 0, NULL, &call->out);
}

/* Where all samples together are none, replicas weigh alike. */
/* What a mean of losses takes for itself is given back. */
TEST(a_steady_criterion_allocates_nothing)
{
    test_allocator counter = {0};
    const dp_config config = {.device_count = 3, .allocator = test_allocator_of(&counter)};
    dp_parallel_config how = over(3);
    dp_module *criterion = NULL;
    size_t calls = 0;
    dp_ctx *ctx;
    CHECK_OK(dp_open(&config, &ctx));
    how.mean_of_samples = true;
    CHECK_OK(dp_criterion_parallel(create(ctx, "mse", mse_methods, 2, NULL), &how, &criterion));
    for (int i = 0; i < 20; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_value y = floats(step, one_to_five, DP_SHAPE(2)), t = floats(step, zeros, DP_SHAPE(6));
        dp_value args = DP_LIST_OF(step, DP_LIST_OF(step, y, y, y), t), mean;
        CHECK_OK(dp_invoke(criterion, step, "forward", args, dp_none(), NULL, &mean, NULL));
        CHECK_F64(item(ctx, mean), 2.5, 0);
        dp_scope_end(step);
        calls = i == 4 ? counter.call_count : calls;
    }
    CHECK_INT(counter.call_count, calls);
    dp_close(ctx);
}

TEST_BACKENDS(a_mean_of_no_samples_is_that_of_replicas)
{
    static const dp_method methods[] = {{"forward", say_four}, {"backward", note_grad}};
    static const int64_t sizes[] = {0, 0};
    dp_parallel_config config = over(2);
    dp_module *criterion = NULL;
    dp_value mean, x = tree_of(scope, "f32[4]"), nothing = tree_of(scope, "f32[0]");
    dp_pass *pass;
    config.mean_of_samples = true;
    config.cut.split = DP_SPLIT_SIZES;
    config.cut.sizes = sizes;
    config.cut.split_count = 2;
    CHECK_OK(dp_criterion_parallel(create(ctx, "four", methods, 2, NULL), &config, &criterion));
    CHECK_OK(dp_invoke(criterion, scope, "forward",
                       DP_LIST_OF(scope, DP_LIST_OF(scope, x, x), nothing), dp_none(), NULL, &mean,
                       &pass));
    CHECK_F64(item(ctx, mean), 4, 0);
    CHECK_OK(dp_backward(pass, dp_float(6), NULL));
    CHECK_F64(grads_seen[0].as.f, 3, 0);
    CHECK_F64(grads_seen[1].as.f, 3, 0);
}

TEST_BACKENDS(all_reduce_of_a_list)
{
    const dp_scatter_config how = {.local_ranks = first_ranks, .local_rank_count = 3};
    dp_value out, list = tree_of(scope, "[(f32[2]=1 2, i64[1]=5), (f32[2]=3 4, i64[1]=6), "
                                        "(f32[2]=5 6, i64[1]=7)]");
    CHECK_OK(dp_all_reduce_list(ctx, scope, list, &how, &out));
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_STR(tree_text(ctx, dp_at(out, i)), "(f32[2]=9 12, i64[1]=18)");
        CHECK_INT(dp_at(dp_at(out, i), 0).as.t->device.index, i);
    }
    CHECK_ERROR(dp_all_reduce_list(ctx, scope, list, NULL, &out), DP_ERR_MISMATCH,
                "a list of 3 for 8 devices");
}

/* ---- tasks side by side ---------------------------------------------------------------------- */

static dp_status meta_method(dp_call *call)
{
    call->out = DP_LIST_OF(call->scope, dp_string(call->scope, call->method),
                           dp_int(call->args.count), dp_get(call->kwargs, "x"));
    return DP_OK;
}

static const char *const meta_names[] = {"forward", "before_meta_test", "before_forward_support",
                                         "before_forward_query"};

TEST_BACKENDS(a_meta_test_has_four_calls)
{
    dp_method methods[4];
    dp_module *net = NULL, *test = NULL;
    dp_value out;
    char want[128];
    for (int i = 0; i < 4; i++) {
        methods[i] = (dp_method){meta_names[i], meta_method};
    }
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.methods = methods, .method_count = 4, .local_rank = 3}, &net));
    CHECK_OK(dp_meta_test_parallel(net, &test));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(dp_invoke(test, scope, meta_names[i], tree_of(scope, "(<cpu: [['a']]>, 2)"),
                           tree_of(scope, "{'x': <stack: [f32[2]]>}"), NULL, &out, NULL));
        snprintf(want, sizeof want, "['%s', 2, f32[2]=0 1]", meta_names[i]);
        CHECK_STR(tree_text(ctx, out), want);
        CHECK_INT(dp_at(out, 2).as.t->device.index, 3);
        CHECK_OK(dp_invoke(test, scope, meta_names[i], dp_none(), dp_none(), NULL, &out, NULL));
    }
}

typedef struct tasks {
    dp_ctx *ctx;
    dp_module *tests[TREE_DEVICES];
    float grads[TREE_DEVICES][NET_PARAMS];
} tasks;

/* Every rank trains its own copy, with a gradient of its own. */
static dp_status run_task(int rank, dp_scope *scope, void *user)
{
    static const float x[6] = {1, 2, 3, 4, 5, 6};
    tasks *t = user;
    dp_value out;
    dp_pass *pass;
    for (int i = 0; i < 20; i++) {
        dp_value args = DP_LIST_OF(scope, floats(scope, x, DP_SHAPE(2, NET_IN)));
        TRY(dp_zero_grad(t->tests[rank]));
        TRY(dp_invoke(t->tests[rank], scope, "forward", args, dp_none(), NULL, &out, &pass));
        TRY(dp_backward(pass, dp_float(rank + 1), NULL));
    }
    net_numbers(t->ctx, t->tests[rank], true, t->grads[rank]);
    return DP_OK;
}

TEST_BACKENDS(tasks_on_copies_do_not_meet)
{
    tasks t = {.ctx = ctx};
    float before[NET_PARAMS], copied[NET_PARAMS];
    dp_module *net = net_create(ctx, &by_rows, 0), *copy = NULL;
    for (int rank = 0; rank < TREE_DEVICES; rank++) {
        CHECK_OK(dp_module_copy(net, rank, &copy));
        net_numbers(ctx, net, false, before);
        net_numbers(ctx, copy, false, copied);
        CHECK_BYTES(copied, before, sizeof before);
        CHECK_OK(dp_meta_test_parallel(copy, &t.tests[rank]));
    }
    CHECK_OK(dp_run(ctx, scope, run_task, &t));
    for (int rank = 0; rank < TREE_DEVICES; rank++) {
        CHECK_F64(t.grads[rank][0], 5 * (rank + 1), 0);
        CHECK_F64(t.grads[rank][NET_PARAMS - 1], 2 * (rank + 1), 0);
    }
    net_numbers(ctx, net, true, before);
    CHECK_F64(before[0], 0, 0);
}

/* ---- dp_train_step --------------------------------------------------------------------------- */

typedef struct step_net {
    bool scalar, list, token_weight;
} step_net;

/* loss_a: (w x)^2 a row, or its mean, or [that, that]; acc: x. The weight may be another. */
static dp_status step_forward(dp_call *call)
{
    const step_net *how = call->state;
    float x[16], loss[16], w, mean = 0;
    const dp_tensor *in;
    dp_value losses, acc;
    TRY(dp_call_tensor(call, "x", DP_F32, 1, &in));
    int64_t rows = in->shape[0];
    if (strcmp(dp_get(call->kwargs, "mode").as.s, "loss") != 0) {
        return dp_error(DP_ERR_INVALID, "mode");
    }
    TRY(dp_read(call->ctx, in, x, (size_t)rows * sizeof *x));
    TRY(net_read(call, dp_param(call, 0), &w, 1));
    for (int64_t i = 0; i < rows; i++) {
        loss[i] = w * x[i] * w * x[i];
        mean += loss[i] / (float)rows;
    }
    call->saved = (void *)(uintptr_t)in;
    TRY(net_new(call, how->scalar ? &mean : loss, how->scalar ? 0 : 1, &rows, &losses));
    TRY(net_new(call, x, 1, &rows, &acc));
    losses = how->list ? DP_LIST_OF(call->scope, losses, losses) : losses;
    call->weight = how->token_weight ? (double)call->replica + 1 : call->weight;
    call->out = DP_DICT(call->scope, {"acc", acc}, {"loss_a", losses});
    return DP_OK;
}

static dp_status step_backward(dp_call *call)
{
    const step_net *how = call->state;
    float x[16], w, sum = 0;
    const dp_tensor *in = call->saved;
    dp_value grads = dp_get(call->grad, "loss_a");
    TRY(dp_read(call->ctx, in, x, (size_t)in->shape[0] * sizeof *x));
    TRY(net_read(call, dp_param(call, 0), &w, 1));
    double each = how->list ? dp_at(grads, 0).as.f + dp_at(grads, 1).as.f : grads.as.f;
    if (dp_get(call->grad, "acc").kind != DP_NONE) {
        return dp_error(DP_ERR_INVALID, "acc is no loss");
    }
    for (int64_t i = 0; i < in->shape[0]; i++) {
        double own = how->scalar ? each / (double)in->shape[0] : each;
        sum += (float)(own * 2 * (double)(w * x[i] * x[i]));
    }
    return net_add(call, dp_grad(call, 0), &sum, 1);
}

static dp_module *step_create(dp_ctx *ctx, const step_net *how)
{
    static const dp_method methods[] = {{"forward", step_forward}, {"backward", step_backward}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {1}}};
    const float two = 2;
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "step",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 1,
                                                  .state = how},
                              &net));
    CHECK_OK(dp_params_write(net, 0, &two, sizeof two));
    return net;
}

static const float ten[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};

static dp_value step_data(dp_scope *scope, int64_t rows)
{
    return DP_DICT(scope, {"x", floats(scope, ten, DP_SHAPE(rows))});
}

/* The gradient of the mean over all rows, whatever the number of devices and the form of the
   losses: 2 w mean(x^2). */
static void check_step(dp_ctx *ctx, const step_net *how, size_t devices, dp_split split)
{
    dp_parallel_config config = over(devices);
    dp_module *net = step_create(ctx, how), *par = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    float grad;
    double lists = how->list ? 2 : 1;
    config.cut.split = split;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    CHECK_OK(dp_train_step(par, scope, step_data(scope, 10), NULL, &log));
    net_numbers(ctx, net, true, &grad);
    CHECK_F64(grad, lists * 4 * 38.5, 1e-4);
    CHECK_STR(log.as.pairs[0].key, "loss");
    CHECK_STR(log.as.pairs[1].key, "acc");
    CHECK_STR(log.as.pairs[2].key, "loss_a");
    CHECK_INT(log.count, 3);
    CHECK_F64(item(ctx, dp_get(log, "loss")), lists * 4 * 38.5, 1e-4);
    CHECK_F64(item(ctx, dp_get(log, "acc")), 5.5, 1e-6);
    dp_scope_end(scope);
}

TEST_BACKENDS(a_step_on_n_devices_is_one_on_one)
{
    static const step_net forms[] = {
        {false, false, false}, {true, false, false}, {true, true, false}};
    static const size_t devices[] = {1, 2, 3, 4, 8};
    for (int form = 0; form < 3; form++) {
        for (int d = 0; d < 5; d++) {
            check_step(ctx, &forms[form], devices[d], DP_SPLIT_BALANCED);
            check_step(ctx, &forms[form], devices[d], DP_SPLIT_CHUNK);
        }
    }
}

TEST_BACKENDS(a_forward_may_set_its_weight)
{
    static const step_net how = {.scalar = true, .token_weight = true};
    dp_parallel_config config = over(2);
    dp_module *par = NULL;
    dp_value log;
    CHECK_OK(dp_data_parallel(step_create(ctx, &how), &config, &par));
    CHECK_OK(dp_train_step(par, scope, step_data(scope, 4), NULL, &log));
    CHECK_F64(item(ctx, dp_get(log, "loss")), (1 * 4 * 2.5 + 2 * 4 * 12.5) / 3, 1e-4);
}

TEST_BACKENDS(a_plain_module_can_be_trained_too)
{
    static const step_net how = {.scalar = false};
    dp_value log;
    float grad;
    dp_module *net = step_create(ctx, &how);
    CHECK_OK(dp_train_step(net, scope, step_data(scope, 10), NULL, &log));
    net_numbers(ctx, net, true, &grad);
    CHECK_F64(grad, 4 * 38.5, 1e-4);
}

/* Entries "loss" of 2 and "loss_b" of 3, whatever comes in. */
static dp_status two_losses(dp_call *call)
{
    const float two = 2, three = 3;
    dp_value a, b;
    TRY(net_new(call, &two, 0, NULL, &a));
    TRY(net_new(call, &three, 0, NULL, &b));
    call->out = DP_DICT(call->scope, {"loss", a}, {"loss_b", b});
    return DP_OK;
}

TEST_BACKENDS(an_entry_called_loss_is_in_the_sum)
{
    static const dp_method methods[] = {{"forward", two_losses}, {"backward", no_gradient}};
    const dp_parallel_config two = over(2);
    dp_module *net = create(ctx, "net", methods, 2, NULL), *par = NULL;
    dp_value log;
    CHECK_OK(dp_data_parallel(net, &two, &par));
    CHECK_OK(dp_train_step(par, scope, step_data(scope, 4), NULL, &log));
    CHECK_STR(tree_text(ctx, log), "{'loss': f64[]=5, 'loss_b': f64[]=3}");
}

typedef struct steps { /* an optimizer that notes who was called, and may fail */
    dp_optim base;
    char calls[8];
    int fail_at, count;
    double factor;
} steps;

static dp_status steps_note(dp_optim *optim, char what)
{
    steps *own = (steps *)optim;
    own->calls[own->count] = what;
    return ++own->count == own->fail_at ? dp_error(DP_ERR_USER, "call %c failed", what) : DP_OK;
}

static dp_status steps_begin(dp_optim *optim, dp_module *module, dp_pass_config *pass)
{
    (void)module;
    pass->compute_dtype = DP_F16;
    return steps_note(optim, 'b');
}

static dp_status steps_factor(dp_optim *optim, double *out)
{
    *out = ((steps *)optim)->factor;
    return steps_note(optim, 'f');
}

static dp_status steps_update(dp_optim *optim, dp_module *module)
{
    (void)module;
    return steps_note(optim, 'u');
}

TEST_BACKENDS(the_optimizer_is_called_in_order)
{
    static const dp_optim_ops ops = {DP_TABLE(dp_optim_ops), steps_begin, steps_factor,
                                     steps_update};
    static const dp_optim_ops bare = {DP_TABLE(dp_optim_ops), NULL, NULL, steps_update},
                              none = {DP_TABLE(dp_optim_ops), NULL, NULL, NULL},
                              longer = {{sizeof longer + 8, 1}, NULL, NULL, steps_update},
                              newer = {{sizeof newer, 2}, NULL, NULL, steps_update};
    static const step_net how = {.scalar = true};
    dp_parallel_config config = over(3);
    dp_module *net = step_create(ctx, &how), *par = NULL;
    dp_value log;
    float grad;
    steps s = {.base = {&ops}, .factor = 0.5};
    CHECK_OK(dp_data_parallel(net, &config, &par));
    CHECK_OK(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log));
    CHECK_STR(s.calls, "bfu");
    net_numbers(ctx, net, true, &grad);
    CHECK_F64(grad, 2 * 38.5, 1e-4);
    CHECK_F64(item(ctx, dp_get(log, "loss")), 4 * 38.5, 1e-4); /* the log has no factor */
    for (int at = 1; at <= 3; at++) {
        s = (steps){.base = {&ops}, .factor = 1, .fail_at = at};
        CHECK_ERROR(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log), DP_ERR_USER,
                    "dp_train_step: call");
        CHECK_INT(s.count, at);
    }
    s = (steps){.base = {&bare}};
    CHECK_OK(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log));
    s = (steps){.base = {&none}};
    CHECK_ERROR(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log), DP_ERR_INVALID,
                "optim has no update");
    s = (steps){.base = {&longer}};
    CHECK_ERROR(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log), DP_ERR_INVALID,
                "dp_train_step: optim has a table of layout 1 and size ");
    s = (steps){.base = {&newer}};
    CHECK_ERROR(dp_train_step(par, scope, step_data(scope, 10), &s.base, &log), DP_ERR_INVALID,
                "dp_train_step: optim has a table of layout 2 and size ");
    CHECK_INT(s.count, 0);
}

/* An optimizer does not hear of a step that is none. */
TEST_BACKENDS(wrong_data_of_a_plain_module_begins_no_step)
{
    static const dp_optim_ops ops = {DP_TABLE(dp_optim_ops), steps_begin, steps_factor,
                                     steps_update};
    static const step_net how = {.scalar = true};
    dp_module *net = step_create(ctx, &how);
    dp_value log = dp_int(9);
    steps s = {.base = {&ops}, .factor = 1};
    CHECK_ERROR(dp_train_step(net, scope, dp_int(7), &s.base, &log), DP_ERR_INVALID,
                "data is an int, not a dict");
    CHECK_INT(s.count, 0);
    CHECK_INT(log.as.i, 9);
}

static dp_status halve(dp_call *call) /* "preprocess": {'x': x/2} of a list [x] */
{
    float x[16];
    const dp_tensor *in;
    dp_value out;
    TRY(dp_call_arg(call, 0, DP_F32, 1, &in));
    TRY(dp_read(call->ctx, in, x, (size_t)in->shape[0] * sizeof *x));
    for (int64_t i = 0; i < in->shape[0]; i++) {
        x[i] /= 2;
    }
    TRY(net_new(call, x, 1, in->shape, &out));
    call->out = DP_DICT(call->scope, {"x", out});
    return DP_OK;
}

TEST_BACKENDS(data_is_preprocessed_in_every_replica)
{
    static const dp_method methods[] = {
        {"forward", step_forward}, {"backward", step_backward}, {"preprocess", halve}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {1}}};
    static const step_net how = {.scalar = false};
    const float two = 2;
    dp_parallel_config config = over(3);
    dp_module *net = NULL, *par = NULL;
    dp_value log;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.methods = methods,
                                                  .method_count = 3,
                                                  .params = params,
                                                  .param_count = 1,
                                                  .state = &how},
                              &net));
    CHECK_OK(dp_params_write(net, 0, &two, sizeof two));
    CHECK_OK(dp_data_parallel(net, &config, &par));
    dp_value list = DP_LIST_OF(scope, floats(scope, ten, DP_SHAPE(10)));
    CHECK_OK(dp_train_step(par, scope, list, NULL, &log));
    CHECK_F64(item(ctx, dp_get(log, "loss")), 38.5, 1e-4);
}

/* What it gets in mode "predict", and no gradient may follow. */
static dp_status predict(dp_call *call)
{
    const dp_tensor *in;
    TRY(dp_call_tensor(call, "x", DP_F32, 1, &in));
    if (call->grad_enabled || strcmp(dp_get(call->kwargs, "mode").as.s, "predict") != 0)
        return dp_error(DP_ERR_INVALID, "mode");
    call->out = DP_DICT(call->scope, {"y", dp_of(call->scope, in)});
    return DP_OK;
}

static void check_predicted(dp_ctx *ctx, dp_scope *scope, dp_module *module, double first,
                            double last)
{
    float got[10];
    const dp_tensor *y;
    dp_value out;
    CHECK_OK(
        dp_predict_step(module, scope, DP_LIST_OF(scope, floats(scope, ten, DP_SHAPE(10))), &out));
    CHECK_OK(dp_as_tensor(dp_get(out, "y"), "y", DP_F32, 1, &y));
    CHECK_INT(y->shape[0], 10);
    CHECK_OK(dp_read(ctx, y, got, sizeof got));
    CHECK_F64(got[0], first, 0);
    CHECK_F64(got[9], last, 0);
}

TEST_BACKENDS(an_evaluation_gets_the_same_data)
{
    static const dp_method methods[] = {{"forward", predict}, {"preprocess", halve}};
    dp_parallel_config config = over(3);
    dp_module *net = NULL, *par = NULL, *criterion = NULL;
    dp_value out = dp_int(9);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 2}, &net));
    CHECK_OK(dp_data_parallel(net, &config, &par));
    check_predicted(ctx, scope, net, 0.5, 5);
    check_predicted(ctx, scope, par, 0.5, 5);
    CHECK_ERROR(dp_predict_step(par, scope, dp_int(7), &out), DP_ERR_INVALID,
                "dp_predict_step: data is an int, not a dict, a list or a tuple");
    CHECK_ERROR(dp_predict_step(par, scope, dp_none(), &out), DP_ERR_INVALID, "data is none");
    CHECK_OK(dp_criterion_parallel(net, &config, &criterion));
    CHECK_ERROR(dp_predict_step(criterion, scope, dp_list_make(scope, DP_LIST, NULL, 0), &out),
                DP_ERR_UNSUPPORTED, "dp_predict_step: a criterion alone predicts nothing");
    CHECK_INT(out.as.i, 9);
}

static atomic_int training_seen, grads_wanted, far_seen, forward_trains;

/* Notes what it is told of the step. */
static dp_status look_at_step(dp_call *call)
{
    const dp_tensor *in;
    TRY(dp_call_tensor(call, "x", DP_F32, 1, &in));
    atomic_store(&training_seen, call->training);
    atomic_store(&grads_wanted, call->grad_enabled);
    if (!tree_same_device(in->device, call->device))
        atomic_fetch_add(&far_seen, 1);
    call->out = call->kwargs;
    return DP_OK;
}

static dp_status say_one(dp_call *call)
{
    const float one = 1;
    atomic_store(&forward_trains, call->training);
    return net_new(call, &one, 0, NULL, &call->out);
}

/* Whether it is for training: in the module's sense, and in that of the step. */
TEST_BACKENDS(preprocess_knows_what_the_data_is_for)
{
    static const dp_method methods[] = {
        {"forward", say_one}, {"backward", no_gradient}, {"preprocess", look_at_step}};
    dp_parallel_config config = over(3);
    dp_module *net = create(ctx, "net", methods, 3, NULL), *par = NULL;
    dp_value log, out;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    atomic_store(&far_seen, 0);
    for (int training = 1; training >= 0; training--) {
        CHECK_OK(dp_module_train(par, training));
        CHECK_OK(dp_train_step(par, scope, step_data(scope, 10), NULL, &log));
        CHECK_INT(atomic_load(&training_seen), training);
        CHECK_INT(atomic_load(&grads_wanted), 1);
        CHECK_OK(dp_predict_step(par, scope, step_data(scope, 10), &out));
        CHECK_INT(atomic_load(&training_seen), 0);
        CHECK_INT(atomic_load(&forward_trains), training); /* which is for dp_module_train to say */
        CHECK_INT(atomic_load(&grads_wanted), 0);
    }
    CHECK_INT(atomic_load(&far_seen), 0); /* it is on the device that will work on it */
    CHECK_OK(dp_train_step(net, scope, step_data(scope, 10), NULL, &log));
    CHECK_INT(atomic_load(&far_seen), 1); /* without a wrapper it is where the caller has it */
}

static dp_status a_number_of_data(dp_call *call)
{
    call->out = dp_int(7);
    return DP_OK;
}

TEST_BACKENDS(preprocess_gives_a_dict_or_a_list)
{
    static const dp_method methods[] = {
        {"forward", say_one}, {"backward", no_gradient}, {"preprocess", a_number_of_data}};
    dp_module *net = create(ctx, "net", methods, 3, NULL);
    dp_value out = dp_int(9);
    CHECK_ERROR(dp_train_step(net, scope, step_data(scope, 2), NULL, &out), DP_ERR_INVALID,
                "what preprocess returned is an int, not a dict, a list or a tuple");
    CHECK_ERROR(dp_predict_step(net, scope, step_data(scope, 2), &out), DP_ERR_INVALID,
                "what preprocess returned is an int, not a dict, a list or a tuple");
    CHECK_INT(out.as.i, 9);
}

/* Numbers beside tensors, and lists of nothing; "loss" is anywhere in a key. */
static dp_status losses_of_numbers(dp_call *call)
{
    const float three = 3;
    dp_value tensor, none = dp_list_make(call->scope, DP_LIST, NULL, 0);
    TRY(net_new(call, &three, 0, NULL, &tensor));
    call->out = DP_DICT(call->scope, {"decode.loss_a", dp_int(2)},
                        {"aux_loss", DP_LIST_OF(call->scope, dp_float(0.5), tensor, dp_bool(true))},
                        {"loss_none", none}, {"acc", none}, {"right", dp_float(0.25)});
    return DP_OK;
}

static dp_status look_at_lists(dp_call *call)
{
    dp_value some = dp_get(call->grad, "aux_loss"), none = dp_get(call->grad, "loss_none");
    return some.count == 3 && none.kind == DP_LIST && none.count == 0
               ? DP_OK
               : dp_error(DP_ERR_USER, "no such lists");
}

TEST_BACKENDS(losses_may_be_numbers_and_lists_of_nothing)
{
    static const dp_method methods[] = {{"forward", losses_of_numbers},
                                        {"backward", look_at_lists}};
    dp_parallel_config config = over(3);
    dp_module *net = create(ctx, "net", methods, 2, NULL), *par = NULL;
    dp_value log;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_train_step(i == 0 ? net : par, scope, step_data(scope, 10), NULL, &log));
        CHECK_STR(tree_text(ctx, log),
                  "{'loss': f64[]=6.5, 'decode.loss_a': f64[]=2, 'aux_loss': f64[]=4.5, "
                  "'loss_none': f64[]=0, 'acc': f64[]=0, 'right': f64[]=0.25}");
    }
}

static dp_status odd_losses(dp_call *call)
{
    call->out = dp_get(call->kwargs, "give");
    return DP_OK;
}

/* What replica 0 is given as 'first', the others as 'rest'. */
static dp_status different_losses(dp_call *call)
{
    call->out = dp_get(call->kwargs, call->replica == 0 ? "first" : "rest");
    return DP_OK;
}

TEST_BACKENDS(replicas_return_the_same_losses)
{
    static const dp_method methods[] = {{"forward", different_losses}, {"backward", no_gradient}};
    static const char *const table[][2] = {
        {"{'first': {'loss': f32[4]}, 'rest': {'lost': f32[4]}}",
         "'loss' of replica 1 is not as in"},
        {"{'first': {'loss': f32[4]}, 'rest': {'loss': [f32[4], f32[4]]}}",
         "'loss' of replica 1 is not as in replica 0"},
        {"{'first': {'loss': [f32[4], f32[4]]}, 'rest': {'loss': [f32[4]]}}",
         "'loss' of replica 1 is not as in replica 0"},
        {"{'first': {'loss': f32[4]}, 'rest': {'loss': f32[4], 'acc': f32[4]}}",
         "forward of replica 1 returned 2 losses and log entries, that of replica 0 1"},
    };
    dp_parallel_config config = over(2);
    dp_module *net = create(ctx, "different", methods, 2, NULL), *par = NULL;
    dp_value log = dp_int(9);
    CHECK_OK(dp_data_parallel(net, &config, &par));
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        CHECK_ERROR(dp_train_step(par, scope, tree_of(scope, table[i][0]), NULL, &log),
                    DP_ERR_MISMATCH, table[i][1]);
    CHECK_INT(log.as.i, 9);
    CHECK_OK(dp_train_step(par, scope,
                           tree_of(scope, "{'first': {'loss': f32[4]}, 'rest': {'loss': f32[4]}}"),
                           NULL, &log));
}

TEST_BACKENDS(wrong_steps)
{
    static const dp_method methods[] = {{"forward", odd_losses}, {"backward", no_gradient}};
    static const char *const table[][2] = {
        {"{'give': [f32[4]]}",
         "odd.forward returned a list; the step needs a dict with a key that holds 'loss', or a"},
        {"{'give': {'loss': 'text'}}", "'loss' is not a tensor or list of tensors"},
        {"{'give': {'loss': [f32[4], 'x']}}", "'loss' is not a tensor or list of tensors"},
        {"{'give': {'acc': f32[4]}}",
         "no key of what forward returned holds 'loss'; there is 'acc'"},
        {"{'mode': 'x'}", "the data has a key 'mode'"},
        {"7", "data is an int, not a dict"},
        {"'text'", "data is a string, not a dict"},
    };
    dp_parallel_config config = over(2);
    dp_module *net = create(ctx, "odd", methods, 2, NULL), *par = NULL, *criterion = NULL;
    dp_value log = dp_int(9);
    CHECK_OK(dp_data_parallel(net, &config, &par));
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        CHECK_ERROR(dp_train_step(par, scope, tree_of(scope, table[i][0]), NULL, &log),
                    DP_ERR_INVALID, table[i][1]);
    }
    CHECK_INT(log.as.i, 9);
    CHECK_OK(dp_criterion_parallel(net, &config, &criterion));
    CHECK_ERROR(dp_train_step(criterion, scope, tree_of(scope, "{}"), NULL, &log),
                DP_ERR_UNSUPPORTED, "a criterion alone");
    CHECK_ERROR(dp_train_step(NULL, scope, dp_none(), NULL, &log), DP_ERR_INVALID,
                "module is NULL");
}

static dp_status loss_of_nowhere(dp_call *call)
{
    static const float loss = 1;
    dp_tensor tensor = dp_wrap_const(&loss, DP_F32, 0, NULL);
    tensor.device = (dp_device){7, 7};
    call->out = dp_of(call->scope, &tensor);
    return DP_OK;
}

TEST_BACKENDS(a_loss_is_on_a_device)
{
    static const dp_method methods[] = {{"forward", loss_of_nowhere}, {"backward", no_gradient}};
    dp_module *net = create(ctx, "odd", methods, 2, NULL);
    dp_value log = dp_int(9);
    CHECK_ERROR(dp_train_step(net, scope, tree_of(scope, "{}"), NULL, &log), DP_ERR_INVALID,
                "dp_train_step: a loss of replica 0 is on no device of this context");
    CHECK_INT(log.as.i, 9);
}

/* The mean over no elements counts for nothing, and is 0 in the log. */
static double grad_of_nothing;

static dp_status loss_of_nothing(dp_call *call)
{
    dp_value none, some;
    const float four = 4;
    TRY(net_new(call, &four, 1, (int64_t[]){0}, &none));
    TRY(net_new(call, &four, 0, NULL, &some));
    call->out = DP_DICT(call->scope, {"loss_a", none}, {"loss_b", some}, {"acc", none});
    return DP_OK;
}

static dp_status look_at_nothing(dp_call *call)
{
    grad_of_nothing = dp_get(call->grad, "loss_a").as.f;
    return dp_get(call->grad, "loss_b").as.f == 1 ? DP_OK : dp_error(DP_ERR_USER, "not 1");
}

TEST_BACKENDS(a_loss_without_elements_is_nothing)
{
    static const dp_method methods[] = {{"forward", loss_of_nothing},
                                        {"backward", look_at_nothing}};
    dp_module *net = create(ctx, "net", methods, 2, NULL);
    dp_value log;
    grad_of_nothing = 9;
    CHECK_OK(dp_train_step(net, scope, tree_of(scope, "{}"), NULL, &log));
    CHECK_STR(tree_text(ctx, log),
              "{'loss': f64[]=4, 'loss_a': f64[]=0, 'loss_b': f64[]=4, 'acc': f64[]=0}");
    CHECK_F64(grad_of_nothing, 0, 0);
}
