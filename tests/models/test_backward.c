/* test_backward.c - gradients on their way into a pass and out of it: what dp_backward takes, what
   methods get, and what replicas give for their inputs. */

#include "nets.h"

static dp_module *two_ways(dp_ctx *ctx, const char *name, dp_status (*forward)(dp_call *),
                           dp_status (*backward)(dp_call *))
{
    const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = name, .methods = methods, .method_count = 2}, &module));
    return module;
}

/* ---- into a pass ----------------------------------------------------------------------------- */

static dp_value seen[TREE_DEVICES];

static dp_status echo(dp_call *call)
{
    call->out = dp_at(call->args, 0);
    return DP_OK;
}

static void check_home(const dp_call *call, dp_value value)
{
    if (value.kind == DP_TENSOR) {
        CHECK(tree_same_device(value.as.t->device, call->device));
    }
    for (uint32_t i = 0; i < value.count; i++) {
        check_home(call, value.kind == DP_DICT ? value.as.pairs[i].value : value.as.items[i]);
    }
}

static dp_status look(dp_call *call)
{
    seen[call->replica] = call->grad;
    check_home(call, call->grad);
    return DP_OK;
}

static dp_status ask_child(dp_call *call)
{
    return dp_call_child(call, "own", "forward", call->args, call->kwargs, &call->out,
                         (dp_pass **)&call->saved);
}

static dp_status ask_child_back(dp_call *call)
{
    return dp_backward(call->saved, call->grad, NULL);
}

enum { PLAIN, ONE_DEVICE, GATHERED, KEPT, CRITERION, CHILD, WAYS };

/* A module whose output is its argument, run in one of the ways. */
static dp_module *run_way(dp_ctx *ctx, int way)
{
    const dp_parallel_config one = over(1), two = over(2);
    dp_module *net = two_ways(ctx, "own", echo, look), *out = net;
    const dp_method methods[] = {{"forward", ask_child}, {"backward", ask_child_back}};
    const dp_module_config parent = {
        .methods = methods, .method_count = 2, .children = &net, .child_count = 1};
    if (way == ONE_DEVICE) {
        CHECK_OK(dp_data_parallel(net, &one, &out));
    } else if (way == GATHERED) {
        CHECK_OK(dp_data_parallel(net, &two, &out));
    } else if (way == KEPT) {
        CHECK_OK(dp_model_parallel(net, &two, &out));
    } else if (way == CRITERION) {
        CHECK_OK(dp_criterion_parallel(net, &two, &out));
    } else if (way == CHILD) {
        CHECK_OK(dp_module_create(ctx, &parent, &out));
    }
    return out;
}

static dp_pass *pass_way(dp_module *module, dp_scope *scope, int way)
{
    dp_value whole = tree_of(scope, "{'a': f32[4,2], 'b': [f64[4]]}"), out;
    dp_value part = tree_of(scope, "{'a': f32[2,2], 'b': [f64[2]]}");
    dp_pass *pass = NULL;
    dp_value arg = way == CRITERION ? DP_LIST_OF(scope, part, part) : whole;
    CHECK_OK(
        dp_invoke(module, scope, "forward", DP_LIST_OF(scope, arg), dp_none(), NULL, &out, &pass));
    return pass;
}

/* `text`, with the rows that the gradient has to have where it has an 'R'. */
static dp_value grad_way(dp_scope *scope, int way, const char *text)
{
    char own[128];
    snprintf(own, sizeof own, "%s", text);
    for (char *at = own; *at != '\0'; at++) {
        *at = *at == 'R' ? (way == KEPT || way == CRITERION ? '2' : '4') : *at;
    }
    dp_value grad = tree_of(scope, own);
    return way == KEPT ? DP_LIST_OF(scope, grad, grad) : grad;
}

static const char *const wrong[][2] = {
    {"{'a': f32[R,3]}", "['a'] of the gradient is f32 ("},
    {"{'a': f32[3,2]}", "['a'] of the gradient is f32 (3,2), of the output f32 ("},
    {"{'a': f64[R,2]}", "['a'] of the gradient is f64 ("},
    {"{'b': [f64[R,1]]}", "['b'][0] of the gradient is f64 ("},
    {"{'b': [f64[R], f64[R]]}", "['b'] of the gradient has 2 entries, the output is a list of 1"},
    {"{'b': f64[R]}", "['b'] of the gradient is a tensor, of the output a list"},
    {"{'b': {'c': 1}}", "['b'] of the gradient has key 'c', the output has not"},
    {"{'c': 1.0}", "of the gradient has key 'c', the output has not"},
    {"{'a': 'text'}", "['a'] of the gradient is a string, of the output a tensor"},
    {"{'a': True}", "['a'] of the gradient is a bool"},
};

/* Whatever kind of pass it is. What was refused has changed nothing. */
TEST_BACKENDS(the_gradient_of_an_output_is_like_it)
{
    for (int way = 0; way < WAYS; way++) {
        dp_module *module = run_way(ctx, way);
        dp_pass *pass = pass_way(module, scope, way);
        for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
            dp_pass *child = way == CHILD ? pass_way(module, scope, way) : pass;
            CHECK_ERROR(dp_backward(child, grad_way(scope, way, wrong[i][0]), NULL),
                        DP_ERR_MISMATCH, wrong[i][1]);
        }
        dp_tensor lost =
            *tree_of(scope, way == KEPT || way == CRITERION ? "f64[2]" : "f64[4]").as.t;
        lost.device = (dp_device){99, 99};
        dp_value grad = DP_DICT(scope, {"b", DP_LIST_OF(scope, dp_of(scope, &lost))});
        grad = way == KEPT ? DP_LIST_OF(scope, grad, grad) : grad;
        dp_pass *child = way == CHILD ? pass_way(module, scope, way) : pass;
        CHECK_ERROR(dp_backward(child, grad, NULL), DP_ERR_INVALID,
                    "['b'][0] of the gradient is on no device");
        CHECK_OK(dp_backward(pass, grad_way(scope, way, "{'b': [f64[R]], 'a': f32[R,2]}"), NULL));
    }
}

/* From wherever it comes, to the device of the replica: `look` sees to that. */
TEST_BACKENDS(the_gradient_of_an_output_comes_to_the_device)
{
    static const char *const want[WAYS] = {
        [PLAIN] = "{'a': f32[4,2]=0 1 2 3 4 5 6 7, 'b': [f64[4]=0 1 2 3]}",
        [ONE_DEVICE] = "{'a': f32[4,2]=0 1 2 3 4 5 6 7, 'b': [f64[4]=0 1 2 3]}",
        [GATHERED] = "{'a': f32[2,2]=4 5 6 7, 'b': [f64[2]=2 3]}",
        [KEPT] = "{'a': f32[2,2]=0 1 2 3, 'b': [f64[2]=0 1]}",
        [CRITERION] = "{'a': f32[2,2]=0 0.5 1 1.5, 'b': [f64[2]=0 0.5]}",
        [CHILD] = "{'a': f32[4,2]=0 1 2 3 4 5 6 7, 'b': [f64[4]=0 1 2 3]}",
    };
    for (int way = 0; way < WAYS; way++) {
        for (int from = -1; from < 3; from++) {
            dp_module *module = run_way(ctx, way);
            dp_pass *pass = pass_way(module, scope, way);
            dp_value grad = grad_way(scope, way, "{'a': f32[R,2], 'b': [f64[R]]}");
            grad = from < 0 ? grad : tree_on(ctx, scope, grad, dp_local_device(ctx, from));
            CHECK_OK(dp_backward(pass, grad, NULL));
            size_t last = way == GATHERED || way == KEPT || way == CRITERION;
            CHECK_TREE(ctx, seen[last], want[way]);
        }
    }
}

/* Numbers stand for tensors and for whole parts of a tree, none and a missing key for nothing. */
TEST_BACKENDS(numbers_stand_for_gradients_in_every_pass)
{
    static const char *const table[][3] = {
        {"3", "3", "1.5"},
        {"None", "None", "None"},
        {"{'a': None, 'b': 2.0}", "{'a': None, 'b': 2.0}", "{'a': None, 'b': 1.0}"},
        {"{}", "{}", "{}"},
        {"{'b': [None]}", "{'b': [None]}", "{'b': [None]}"},
    };
    for (int way = 0; way < WAYS; way++) {
        dp_module *module = run_way(ctx, way);
        for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
            CHECK_OK(
                dp_backward(pass_way(module, scope, way), grad_way(scope, way, table[i][0]), NULL));
            CHECK_TREE(ctx, seen[0], table[i][way == CRITERION ? 2 : 1]);
        }
    }
    dp_module *kept = run_way(ctx, KEPT);
    CHECK_OK(dp_backward(pass_way(kept, scope, KEPT), dp_int(4), NULL));
    CHECK_TREE(ctx, seen[1], "4");
    CHECK_OK(dp_backward(pass_way(kept, scope, KEPT), tree_of(scope, "[None, 5]"), NULL));
    CHECK_TREE(ctx, seen[0], "None");
    CHECK_TREE(ctx, seen[1], "5");
}

static dp_status give_number(dp_call *call)
{
    const float one = 1;
    return net_new(call, &one, 0, NULL, &call->out);
}

/* What was gathered as a vector goes back as it came. */
TEST_BACKENDS(the_gradient_of_a_number_has_no_dims)
{
    const int dims[] = {0, -1};
    dp_value out;
    dp_pass *pass;
    for (int i = 0; i < 2; i++) {
        dp_parallel_config three = over(3), one = over(1);
        dp_module *net = two_ways(ctx, "own", give_number, look), *par = NULL;
        three.cut.dim = one.cut.dim = dims[i];
        CHECK_OK(dp_data_parallel(net, &three, &par));
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[6],)"), dp_none(), NULL,
                           &out, &pass));
        CHECK_TREE(ctx, out, "f32[3]=1 1 1");
        CHECK_ERROR(dp_backward(pass, tree_of(scope, "f32[]=5"), NULL), DP_ERR_MISMATCH,
                    "of the gradient is f32 (), of the output f32 (3)");
        CHECK_ERROR(dp_backward(pass, tree_of(scope, "f32[3,1]"), NULL), DP_ERR_MISMATCH,
                    "of the gradient is f32 (3,1), of the output f32 (3)");
        CHECK_OK(dp_backward(pass, tree_of(scope, "f32[3]=5 6 7"), NULL));
        CHECK_TREE(ctx, seen[0], "f32[]=5");
        CHECK_TREE(ctx, seen[1], "f32[]=6");
        CHECK_TREE(ctx, seen[2], "f32[]=7");
        CHECK_OK(dp_data_parallel(net, &one, &par));
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[6],)"), dp_none(), NULL,
                           &out, &pass));
        CHECK_ERROR(dp_backward(pass, tree_of(scope, "f32[1]=5"), NULL), DP_ERR_MISMATCH,
                    "of the gradient is f32 (1), of the output f32 ()");
        CHECK_OK(dp_backward(pass, tree_of(scope, "f32[]=8"), NULL));
        CHECK_TREE(ctx, seen[0], "f32[]=8");
    }
}

/* ---- out of a pass --------------------------------------------------------------------------- */

enum { NOTHING, X_ONLY, BOTH, EMPTY, GIFTS };

static int gifts[TREE_DEVICES];

static dp_status like(dp_call *call, dp_value input, dp_dtype dtype, dp_value *out)
{
    dp_tensor tensor;
    TRY(dp_tensor_new(call->scope, call->device, dtype, input.as.t->ndim, input.as.t->shape,
                      &tensor));
    if (dp_tensor_count(&tensor) > 0) {
        TRY(dp_fill(call->ctx, &tensor, dp_int((int64_t)call->replica + 1)));
    }
    *out = dp_of(call->scope, &tensor);
    return DP_OK;
}

/* The gradients of (x, [y]) that gifts[] says, filled with the replica's number and 1. */
static dp_status give_gift(dp_call *call)
{
    int gift = gifts[call->replica];
    dp_value x = dp_none(), y = dp_none();
    if (gift == NOTHING) {
        return DP_OK;
    }
    TRY(gift != EMPTY ? like(call, dp_at(call->args, 0), DP_F32, &x) : DP_OK);
    TRY(gift == BOTH ? like(call, dp_at(dp_at(call->args, 1), 0), DP_F64, &y) : DP_OK);
    const dp_value items[] = {x, gift == X_ONLY ? dp_none() : DP_LIST_OF(call->scope, y)};
    call->args_grad = dp_list_make(call->scope, DP_TUPLE, items, 2);
    if (gift == BOTH) {
        call->kwargs_grad = DP_DICT(call->scope, {"z", x});
    }
    return DP_OK;
}

/* "f32[5]=" and each replica's number, or 0 where it gave nothing; "None" if nobody did. */
static void join(char *text, const char *shape, const int64_t *rows, size_t count, int first_gift,
                 int last_gift)
{
    size_t used = (size_t)sprintf(text, "%s=", shape);
    bool any = false;
    for (size_t r = 0; r < count; r++) {
        bool gives = gifts[r] >= first_gift && gifts[r] <= last_gift;
        any = any || gives;
        for (int64_t i = 0; i < rows[r]; i++) {
            used += (size_t)sprintf(text + used, "%d ", gives ? (int)r + 1 : 0);
        }
    }
    text[used - 1] = '\0';
    if (!any) {
        strcpy(text, "None");
    }
}

static bool any_gift(size_t count, int first_gift, int last_gift)
{
    bool any = false;
    for (size_t r = 0; r < count; r++) {
        any = any || (gifts[r] >= first_gift && gifts[r] <= last_gift);
    }
    return any;
}

static void check_gifts(dp_ctx *ctx, dp_scope *scope, dp_module *par, size_t count,
                        const int64_t *rows)
{
    char x[64], y[64], z[64], want[256] = "None";
    dp_value out;
    dp_pass *pass;
    dp_input_grad grads;
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[5], [f64[5,1]])"),
                       tree_of(scope, "{'z': f32[5]}"), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_none(), &grads));
    join(x, "f32[5]", rows, count, X_ONLY, BOTH);
    join(y, "f64[5,1]", rows, count, BOTH, BOTH);
    join(z, "f32[5]", rows, count, BOTH, BOTH);
    if (any_gift(count, X_ONLY, EMPTY)) {
        snprintf(want, sizeof want, any_gift(count, BOTH, EMPTY) ? "(%s, [%s])" : "(%s, None)", x,
                 y);
    }
    CHECK_TREE(ctx, grads.args, want);
    snprintf(want, sizeof want, any_gift(count, BOTH, BOTH) ? "{'z': %s}" : "None", z);
    CHECK_TREE(ctx, grads.kwargs, want);
}

/* All ways in which up to three replicas may give something for a part of their inputs. */
TEST_BACKENDS(none_of_one_replica_is_zeros_beside_others)
{
    static const int64_t rows[][3] = {{5}, {3, 2}, {2, 2, 1}};
    static const int64_t sizes[] = {0, 5};
    dp_module *net = two_ways(ctx, "own", echo, give_gift), *par = NULL;
    for (size_t count = 1; count <= 3; count++) {
        dp_parallel_config config = over(count);
        CHECK_OK(dp_data_parallel(net, &config, &par));
        for (int gift = 0; gift < (count == 3 ? 64 : count == 2 ? 16 : 4); gift++) {
            dp_scope *inner = dp_scope_child(scope);
            gifts[0] = gift % GIFTS;
            gifts[1] = gift / GIFTS % GIFTS;
            gifts[2] = gift / GIFTS / GIFTS;
            check_gifts(ctx, inner, par, count, rows[count - 1]);
            dp_scope_end(inner);
        }
    }
    dp_parallel_config config = over(2);
    config.cut.split = DP_SPLIT_SIZES;
    config.cut.sizes = sizes;
    config.cut.split_count = 2;
    CHECK_OK(dp_data_parallel(net, &config, &par));
    gifts[0] = NOTHING; /* of no rows */
    gifts[1] = BOTH;
    check_gifts(ctx, scope, par, 2, sizes);
}

/* A group's gradient is as long as the group. */
TEST_BACKENDS(none_is_zeros_for_groups_too)
{
    const dp_parallel_config config = over(2);
    dp_module *par = NULL;
    dp_value out;
    dp_pass *pass;
    dp_input_grad grads;
    CHECK_OK(dp_data_parallel(two_ways(ctx, "own", echo, give_gift), &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward",
                       tree_of(scope, "(<stack: [f32[3], f32[1]]>, [f64[4]])"), dp_none(), NULL,
                       &out, &pass));
    gifts[0] = NOTHING;
    gifts[1] = X_ONLY;
    CHECK_OK(dp_backward(pass, dp_none(), &grads));
    CHECK_TREE(ctx, grads.args, "(f32[4]=0 0 0 2, None)");
}

static dp_status write_too_early(dp_call *call)
{
    call->out = dp_at(call->args, 0);
    call->args_grad = call->kwargs_grad = dp_int(7);
    return DP_OK;
}

static dp_status write_nothing(dp_call *call)
{
    CHECK_INT(call->args_grad.kind, DP_NONE);
    return DP_OK;
}

/* What a forward writes there is no gradient. */
TEST_BACKENDS(gradients_of_inputs_are_backwards_own)
{
    for (size_t devices = 0; devices <= 2; devices++) {
        dp_module *net = two_ways(ctx, "own", write_too_early, write_nothing), *par = net;
        const dp_parallel_config config = over(devices);
        dp_value out;
        dp_pass *pass;
        dp_input_grad grads = {dp_int(1), dp_int(1)};
        if (devices > 0) {
            CHECK_OK(dp_data_parallel(net, &config, &par));
        }
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4],)"), dp_none(), NULL,
                           &out, &pass));
        CHECK_OK(dp_backward(pass, dp_float(1), &grads));
        CHECK_INT(grads.args.kind, DP_NONE);
        CHECK_INT(grads.kwargs.kind, DP_NONE);
    }
}

static dp_status give_odd(dp_call *call)
{
    dp_value x;
    TRY(like(call, dp_at(call->args, 0), DP_F32, &x));
    if (call->replica == 1) {
        call->args_grad = DP_LIST_OF(call->scope, dp_none(), x); /* of a number */
    }
    return DP_OK;
}

/* Zeros of what size? */
TEST_BACKENDS(none_for_what_is_no_tensor_is_a_mismatch)
{
    const dp_parallel_config config = over(2);
    dp_module *par = NULL;
    dp_value out;
    dp_pass *pass;
    dp_input_grad grads;
    CHECK_OK(dp_data_parallel(two_ways(ctx, "own", echo, give_odd), &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[4], 7)"), dp_none(), NULL, &out,
                       &pass));
    CHECK_ERROR(dp_backward(pass, dp_none(), &grads), DP_ERR_MISMATCH,
                "[1] is none in replica 0 and a tensor in replica 1");
}

static dp_status loss_of(dp_call *call)
{
    const float zero = 0;
    return net_new(call, &zero, 0, NULL, &call->out);
}

/* (output, target): replica 0 has nothing for the target. */
static dp_status give_target(dp_call *call)
{
    dp_value output, target = dp_none();
    TRY(like(call, dp_at(call->args, 0), DP_F32, &output));
    TRY(call->replica > 0 ? like(call, dp_at(call->args, 1), DP_F64, &target) : DP_OK);
    call->args_grad = DP_LIST_OF(call->scope, output, target);
    return DP_OK;
}

TEST_BACKENDS(none_of_a_criterions_target_is_zeros)
{
    const dp_parallel_config config = over(3);
    dp_module *par = NULL;
    dp_value out, y = tree_of(scope, "f32[2]");
    dp_pass *pass;
    dp_input_grad grads;
    CHECK_OK(dp_criterion_parallel(two_ways(ctx, "own", loss_of, give_target), &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward",
                       DP_LIST_OF(scope, DP_LIST_OF(scope, y, y, y), tree_of(scope, "f64[7]")),
                       dp_none(), NULL, &out, &pass));
    CHECK_OK(dp_backward(pass, dp_float(1), &grads));
    CHECK_TREE(ctx, grads.args, "([f32[2]=1 1, f32[2]=2 2, f32[2]=3 3], f64[7]=0 0 0 2 2 3 3)");
}

static dp_status nested_loss(dp_call *call)
{
    const float zero = 0;
    dp_value loss;
    TRY(net_new(call, &zero, 0, NULL, &loss));
    call->out = DP_DICT(call->scope, {"a", DP_LIST_OF(call->scope, loss)});
    return DP_OK;
}

/* One pass of a criterion over (y, target), and the gradients of these. */
static dp_status criterion_pass(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    static const dp_method methods[] = {{"forward", nested_loss}, {"backward", give_target}};
    const dp_module_config config = {.name = "own", .methods = methods, .method_count = 2};
    static const float number = 1;
    const dp_parallel_config two = over(2);
    dp_module *net = NULL, *par = NULL;
    dp_pass *pass = NULL;
    dp_input_grad grads = {dp_none(), dp_none()};
    dp_status status = dp_module_create(ctx, &config, &net);
    if (status == DP_OK) {
        status = dp_criterion_parallel(net, &two, &par);
    }
    if (status == DP_OK) {
        dp_value outs = DP_LIST_OF(scope, dp_at(in, 0), dp_at(in, 0));
        status = dp_invoke(par, scope, "forward", DP_LIST_OF(scope, outs, dp_at(in, 1)), dp_none(),
                           NULL, out, &pass);
    }
    if (status == DP_OK) {
        const dp_tensor one = dp_wrap_const(&number, DP_F32, 0, NULL);
        dp_value loss = DP_LIST_OF(scope, dp_of(scope, &one));
        status = dp_backward(pass, DP_DICT(scope, {"a", loss}), &grads);
        *out = grads.args;
    }
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_module_destroy(net));
    return status;
}

TEST_SLOW(backward_out_of_memory, 30)
{
    tree_out_of_memory(criterion_pass, 200, "[f32[1], f64[3]]",
                       "([f32[1]=1, f32[1]=2], f64[3]=0 0 2)");
}
