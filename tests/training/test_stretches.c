/* test_stretches.c - parameters side by side in memory, as optimizers step them. */

#include "tree.h"

/* Names in the order of memory, how many elements, and what comes right before, as in
   "c b 32; a 300 behind c". */
static void check_stretches(dp_module *module, const char *want)
{
    const dp_stretch *all, *again;
    size_t count = 0, used = 0;
    char text[256] = "";
    CHECK_OK(dp_module_stretches(module, &all, &count));
    for (size_t s = 0; s < count; s++) {
        dp_param_info info;
        used += (size_t)snprintf(text + used, sizeof text - used, s > 0 ? "; " : "");
        for (size_t i = 0; i < all[s].param_count; i++) {
            CHECK_OK(dp_module_param(module, all[s].params[i], &info));
            CHECK_INT(info.data.dtype, all[s].dtype);
            CHECK_INT(info.reduced, all[s].reduced);
            used += (size_t)snprintf(text + used, sizeof text - used, "%s ", info.name);
        }
        used += (size_t)snprintf(text + used, sizeof text - used, "%zu", all[s].count);
        if (all[s].before == SIZE_MAX)
            continue;
        CHECK_INT(all[all[s].before].after, s);
        CHECK_OK(dp_module_param(module, all[all[s].before].params[0], &info));
        used += (size_t)snprintf(text + used, sizeof text - used, " behind %s", info.name);
    }
    CHECK_STR(text, want);
    CHECK_OK(dp_module_stretches(module, &again, &count));
    CHECK(again == all);
}

static dp_status give_none(dp_call *call)
{
    call->out = dp_none();
    return DP_OK;
}

static dp_module *net_with(dp_ctx *ctx, const char *name, const dp_param_config *params,
                           size_t count)
{
    static const dp_method methods[] = {{"forward", give_none}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = count},
                              &net));
    return net;
}

enum { WHOLE = 32, ODD = 5 }; /* without padding, and with it */

static dp_param_config floats(const char *name, int64_t count)
{
    return (dp_param_config){.name = name, .ndim = 1, .shape = {count}};
}

/* ---- what is side by side -------------------------------------------------------------------- */

TEST_BACKENDS(padding_keeps_stretches_apart)
{
    const dp_param_config params[] = {floats("a", WHOLE), floats("b", WHOLE), floats("c", ODD)};
    dp_module *net = net_with(ctx, "net", params, 3);
    const dp_stretch *all;
    size_t count = 0;
    dp_tensor data[2], grad[2];
    check_stretches(net, "b a 64; c 5");
    CHECK_OK(dp_module_stretches(net, &all, &count));
    CHECK(all[0].share == 0 && !all[0].reduced);
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(dp_owner_edit(net, 0, all[0].params[i], &data[i], NULL));
        CHECK_OK(dp_owner_grad(net, 0, all[0].params[i], &grad[i]));
    }
    CHECK((float *)data[0].data + WHOLE == data[1].data);
    CHECK((float *)grad[0].data + WHOLE == grad[1].data);
}

TEST_BACKENDS(packed_parameters_are_one_stretch)
{
    const dp_param_config params[] = {floats("a", ODD), floats("b", 0), floats("c", ODD)};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.params = params, .param_count = 3, .packed = true}, &net));
    check_stretches(net, "a c 10; b 0");
}

TEST_BACKENDS(frozen_parameters_and_other_dtypes_keep_stretches_apart)
{
    dp_param_config params[] = {floats("a", WHOLE),      floats("frozen", WHOLE),
                                floats("b", WHOLE),      floats("half", WHOLE),
                                floats("empty", 0),      floats("c", WHOLE),
                                floats("buffer", WHOLE), floats("tied", WHOLE)};
    params[1].frozen = params[6].buffer = true;
    params[3].dtype = DP_BF16;
    params[7].same_as = "b";
    check_stretches(net_with(ctx, "net", params, 8), "a 32; half 32; empty 0; c b 64");
    check_stretches(net_with(ctx, "frozen", &params[1], 1), "");
    check_stretches(net_with(ctx, "none", NULL, 0), "");
}

TEST_BACKENDS(a_tree_is_one_stretch_and_so_is_a_child)
{
    const dp_param_config params[] = {floats("a", WHOLE), floats("b", WHOLE)};
    dp_module *inner = net_with(ctx, "inner", params, 2), *net = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .params = params, .param_count = 2, .children = &inner, .child_count = 1},
        &net));
    check_stretches(net, "inner.b inner.a b a 128");
    check_stretches(inner, "b a 64");
}

TEST_BACKENDS(modules_on_two_devices_are_not_side_by_side)
{
    const dp_param_config params[] = {floats("a", WHOLE)};
    dp_module *net = NULL, *inner = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){.name = "inner", .params = params, .param_count = 1, .local_rank = 1},
        &inner));
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .params = params, .param_count = 1, .children = &inner, .child_count = 1},
        &net));
    check_stretches(net, "a 32; inner.a 32");
}

typedef struct row {              /* of three parameters in memory of the test's */
    int64_t data_step, grad_step; /* from one to the next, in elements */
    bool backwards, own_grads;    /* the last comes first; gradients are the library's */
} row;

static dp_module *net_in_a_row(dp_ctx *ctx, dp_scope *scope, row how)
{
    dp_param_config params[] = {floats("a", ODD), floats("b", ODD), floats("c", ODD)};
    dp_tensor data, grad;
    const int64_t count = 6 * ODD;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &grad));
    CHECK_OK(dp_fill(ctx, &data, dp_int(0)));
    for (int64_t i = 0; i < 3; i++) {
        int64_t place = how.backwards ? 2 - i : i;
        params[i].data = (float *)data.data + place * how.data_step;
        params[i].grad = how.own_grads ? NULL : (float *)grad.data + place * how.grad_step;
    }
    return net_with(ctx, "net", params, 3);
}

TEST_BACKENDS(memory_of_the_users_is_side_by_side_if_both_parts_are)
{
    check_stretches(net_in_a_row(ctx, scope, (row){ODD, ODD, false, false}), "a b c 15");
    check_stretches(net_in_a_row(ctx, scope, (row){ODD, ODD, true, false}), "c b a 15");
    check_stretches(net_in_a_row(ctx, scope, (row){2 * ODD, ODD, false, false}), "a 5; b 5; c 5");
    check_stretches(net_in_a_row(ctx, scope, (row){ODD, 2 * ODD, false, false}), "a 5; b 5; c 5");
    check_stretches(net_in_a_row(ctx, scope, (row){ODD, 0, true, true}), "a 5; b 5; c 5");
}

/* ---- what ranks reduce ----------------------------------------------------------------------- */

TEST_BACKENDS(parameters_that_every_owner_has_side_by_side_are_one_stretch)
{
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(net_in_a_row(ctx, scope, (row){ODD, ODD, false, false}), NULL, &par));
    bool alone = dp_owner_count(par) == 1;
    check_stretches(par, alone ? "a b c 15" : "a 5; b 5; c 5");
}

enum { LONG = 512 * TREE_DEVICES };

static void check_shares(dp_module *module, size_t share)
{
    const dp_stretch *all;
    size_t count = 0;
    CHECK_OK(dp_module_stretches(module, &all, &count));
    for (size_t s = 0; s < count; s++) {
        CHECK_INT(all[s].share, share);
        CHECK_INT(all[s].reduced, share > 0);
    }
}

TEST_BACKENDS(stretches_are_as_long_as_ranks_share_at_once)
{
    const dp_param_config params[] = {floats("a", LONG), floats("b", LONG), floats("c", LONG)};
    const dp_distributed_config config = {.buckets = {.bytes = 4 * LONG * sizeof(float)}};
    dp_module *net = net_with(ctx, "net", params, 3), *par = NULL, *parent = NULL;
    CHECK_OK(dp_distributed(net, &config, &par));
    check_stretches(par, "a 4096 behind b; b 4096 behind c; c 4096");
    check_shares(par, LONG / TREE_DEVICES);
    check_stretches(net, "c b a 12288");
    check_shares(net, 0);
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "parent", .children = &par, .child_count = 1}, &parent));
    check_shares(parent, LONG / TREE_DEVICES);
}

TEST_BACKENDS(what_ranks_ignore_is_apart)
{
    static const char *const ignored[] = {"b"};
    const dp_param_config params[] = {floats("a", LONG), floats("b", WHOLE), floats("c", WHOLE)};
    const dp_distributed_config config = {.ignored = ignored, .ignored_count = 1};
    const dp_stretch *all;
    size_t count = 0;
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(net_with(ctx, "net", params, 3), &config, &par));
    check_stretches(par, "a 4096 behind b; b 32 behind c; c 32");
    CHECK_OK(dp_module_stretches(par, &all, &count));
    CHECK(all[0].reduced && !all[1].reduced && all[2].reduced);
    CHECK_INT(all[0].share, LONG / TREE_DEVICES);
    CHECK_INT(all[2].share, 0);
}

/* A stretch that is not shared out follows one that is. */
TEST_BACKENDS(what_follows_a_share_is_apart)
{
    const dp_param_config params[] = {floats("a", WHOLE), floats("b", WHOLE), floats("c", LONG)};
    const dp_distributed_config config = {.buckets = {.bytes = 4 * LONG * sizeof(float)}};
    dp_module *par = NULL;
    CHECK_OK(dp_distributed(net_with(ctx, "net", params, 3), &config, &par));
    check_stretches(par, "b a 64 behind c; c 4096");
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static dp_status ask_for_stretches(int local_rank, dp_scope *scope, void *user)
{
    const dp_stretch *all;
    size_t count;
    (void)scope, (void)local_rank;
    return dp_module_stretches(user, &all, &count);
}

TEST_BACKENDS(wrong_questions_for_stretches)
{
    const dp_param_config params[] = {floats("a", WHOLE)};
    dp_module *net = net_with(ctx, "net", params, 1);
    const dp_stretch *all;
    size_t count = 0;
    CHECK_ERROR(dp_module_stretches(NULL, &all, &count), DP_ERR_INVALID, "module is NULL");
    CHECK_ERROR(dp_module_stretches(net, NULL, &count), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_module_stretches(net, &all, NULL), DP_ERR_INVALID, "out_count is NULL");
    CHECK_ERROR(dp_run(ctx, scope, ask_for_stretches, net), DP_ERR_STATE, "dp_module_stretches");
}
