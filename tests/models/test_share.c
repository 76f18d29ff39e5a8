/* test_share.c - parameters that the processes of a machine have once (share_params): the same
   numbers come out as without, who may write when, what it costs, and how it ends. */

#include <stdatomic.h>
#include <sys/resource.h>
#include "examples/custom_device.h"
#include "sharing.h"

/* ---- the same numbers ------------------------------------------------------------------------ */

static void steps(dp_ctx *ctx)
{
    check_all_steps(ctx);
    dp_close(ctx);
}

static void steps_of_processes(meeting *m)
{
    steps(open_over_shm(m, 1, 0));
}

static void steps_of_devices(meeting *m)
{
    steps(open_over_shm(m, 1 + m->process, 0));
}

TEST(steps_are_those_of_parameters_of_ones_own)
{
    in_processes(2, steps_of_processes);
    in_processes(3, steps_of_processes);
    in_processes(2, steps_of_devices);
    steps(open_here(2));
}

TEST_SLOW(steps_are_the_same_on_several_machines, 60)
{
    on_machines("ab", steps_of_processes);
    on_machines("aabb", steps_of_processes);
    on_machines("abab", steps_of_processes);
    on_machines("baa", steps_of_processes);
    on_machines("ab", steps_of_devices);
}

/* By dp_train_step: three of them make a step, the last one the one that is left over. */
static void train_steps(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *pars[2] = {par_of(ctx, DP_F32, false, false), par_of(ctx, DP_F32, false, true)};
    for (int k = 0; k < 2; k++) {
        dp_optim *optim = optim_of(pars[k], &rules[1], (dp_optim_config){.accumulate = 3});
        CHECK_OK(dp_optim_progress(optim, 0, 7));
        for (int i = 0; i < 7; i++) {
            dp_scope *scope = dp_scope_begin(ctx);
            dp_value log;
            CHECK_OK(dp_train_step(pars[k], scope, a_part_each(ctx, scope), optim, &log));
            dp_scope_end(scope);
        }
    }
    check_same(pars[1], pars[0]);
    dp_close(ctx);
}

TEST(train_steps_are_the_same)
{
    in_processes(2, train_steps);
    on_machines("ab", train_steps);
}

static void what_is_said(meeting *m)
{
    static char text[4000];
    dp_report report;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *own = par_of(ctx, DP_F32, false, false), *par = par_of(ctx, DP_F32, false, true);
    for (size_t i = 0; i < 4; i++) {
        CHECK(is_shared(par, i));
        CHECK(!is_shared(own, i));
    }
    CHECK(!is_shared(par, 5)); /* a buffer */
    CHECK_OK(dp_report_get(par, &report));
    CHECK(report.params_shared);
    CHECK(dp_report_text(par, text, sizeof text) < sizeof text);
    CHECK_SAYS(text, meeting_machines != NULL ? "parameters: once a machine"
                                              : "parameters: once for all processes");
    CHECK_OK(dp_report_get(own, &report));
    CHECK(!report.params_shared);
    CHECK(dp_report_text(own, text, sizeof text) < sizeof text);
    CHECK(strstr(text, "parameters: once") == NULL);
    dp_close(ctx);
}

TEST(it_is_told_what_is_shared)
{
    in_processes(2, what_is_said);
    on_machines("ab", what_is_said);
}

TEST(one_process_shares_with_nobody)
{
    dp_ctx *ctx = open_here(2);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    CHECK(!is_shared(par, 0));
    CHECK_OK(put(par, 0, 7));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_OK(put(par, 0, 8));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_STATUS(dp_edit_begin(par, dp_error(DP_ERR_USER, "not today")), DP_ERR_USER);
    CHECK_STATUS(dp_edit_end(par, dp_error(DP_ERR_USER, "not today")), DP_ERR_USER);
    CHECK_SAYS(dp_last_error(), "not today");
    dp_close(ctx);
}

/* ---- who writes ------------------------------------------------------------------------------ */

static void edits(meeting *m)
{
    static const float zeros[NET_B];
    float got[NET_B];
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    dp_tensor data, grad, half;
    const char *refused = "'b' is shared by the processes of this machine: all of them call "
                          "dp_edit_begin first";
    CHECK_ERROR(dp_params_edit(net, 1, &data, NULL), DP_ERR_STATE, refused);
    CHECK_ERROR(dp_params_edit(par, 1, &data, &grad), DP_ERR_STATE, refused);
    CHECK_ERROR(dp_owner_edit(par, 0, 1, &data, NULL), DP_ERR_STATE, refused);
    CHECK_ERROR(dp_params_write(net, 1, zeros, sizeof zeros), DP_ERR_STATE, refused);
    CHECK_OK(dp_params_edit(net, 5, &data, NULL)); /* a buffer */
    CHECK_OK(dp_owner_grad(par, 0, 1, &grad));
    CHECK_ERROR(dp_edit_end(net, DP_OK), DP_ERR_STATE, "no edit of 'net' is open");

    CHECK_OK(dp_edit_begin(m->process == 0 ? net : par, DP_OK));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_OK(dp_params_edit(net, 0, &data, NULL));
    CHECK_OK(dp_narrow(&data, 0, m->process == 0 ? 0 : 3, m->process == 0 ? 3 : 4, &half));
    CHECK_OK(dp_fill(ctx, &half, dp_float(5)));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(put(net, 2, 5));
    CHECK_OK(dp_params_write(net, 1, (float[]){5, 5, 5, 5, 5}, sizeof zeros));
    CHECK_OK(dp_edit_end(net, DP_OK));
    check_each(par, 5);
    CHECK_OK(dp_barrier(ctx)); /* the others have looked */
    CHECK_ERROR(dp_params_edit(net, 1, &data, NULL), DP_ERR_STATE, refused);

    dp_param_info info;
    CHECK_OK(dp_module_param(net, 1, &info));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    if (m->process == 1)
        CHECK_OK(dp_params_write(net, 1, zeros, sizeof zeros));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(dp_read(ctx, &info.data, got, sizeof got));
    CHECK_BYTES(got, zeros, sizeof got);
    dp_close(ctx);
}

TEST(all_write_between_two_meetings)
{
    in_processes(2, edits);
}

/* A status that one process comes with is everybody's, and then nobody is in an edit. */
static void edits_that_fail(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    dp_tensor data;
    dp_status own = m->process == 1 ? dp_error(DP_ERR_USER, "no numbers today") : DP_OK;
    CHECK_ERROR(dp_edit_begin(par, own), DP_ERR_USER, "no numbers today");
    CHECK_STATUS(dp_params_edit(par, 0, &data, NULL), DP_ERR_STATE);
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_OK(put(par, 0, 1));
    own = m->process == 1 ? dp_error(DP_ERR_USER, "none now") : DP_OK;
    CHECK_ERROR(dp_edit_end(par, own), DP_ERR_USER, "none now");
    CHECK_STATUS(dp_params_edit(par, 0, &data, NULL), DP_ERR_STATE);
    CHECK_OK(forward_and_backward(par, 1, false));
    dp_close(ctx);
}

static void edits_between(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    check_edits_between(ctx, meeting_machines);
    dp_close(ctx);
}

TEST(what_is_written_on_one_machine_is_on_all)
{
    on_machines("aabb", edits_between);
    on_machines("abab", edits_between);
    on_machines("aab", edits_between);
    on_machines("bbac", edits_between);
    on_machines("baabb", edits_between);
}

static void shares_by_hand(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    check_shares_by_hand(ctx);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    CHECK_OK(dp_edit_begin(par, DP_OK)); /* one fails before it says what it writes */
    if (m->process == 1)
        CHECK_OK(put(par, 2, 6));
    dp_status own = m->process == 1 ? dp_error(DP_ERR_USER, "no step today") : dp_edit_shares(par);
    CHECK_ERROR(dp_edit_end(par, own), DP_ERR_USER, "no step today");
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

TEST(shares_are_written_by_hand)
{
    in_processes(2, shares_by_hand);
    on_machines("aabb", shares_by_hand);
    on_machines("abb", shares_by_hand);
    dp_ctx *ctx = open_here(2);
    CHECK_OK(dp_edit_shares(par_of(ctx, DP_F32, false, true)));
    dp_close(ctx);
}

TEST(an_edit_fails_for_all)
{
    in_processes(2, edits_that_fail);
    on_machines("ab", edits_that_fail);
}

static void passes_inside(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    dp_module *other = par_of(ctx, DP_F32, false, true), *task = NULL;
    dp_optim *optim = optim_of(par, &rules[0], (dp_optim_config){0});
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out, data = a_part_each(ctx, scope);
    dp_pass *pass = NULL;
    CHECK_OK(dp_meta_test_parallel(net, &task));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), data, NULL, &out, &pass));
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_ERROR(dp_invoke(par, scope, "forward", dp_none(), data, NULL, &out, NULL), DP_ERR_STATE,
                "parameters of 'distributed' are being edited by the processes that share them");
    CHECK_ERROR(dp_invoke(net, scope, "forward", dp_none(), data, NULL, &out, NULL), DP_ERR_STATE,
                "dp_edit_end first");
    CHECK_STATUS(dp_invoke(task, scope, "forward", dp_none(), data, NULL, &out, NULL),
                 DP_ERR_STATE);
    CHECK_STATUS(dp_train_step(par, scope, data, optim, &out), DP_ERR_STATE);
    CHECK_STATUS(dp_predict_step(par, scope, data, &out), DP_ERR_STATE);
    CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_STATE, "dp_edit_end first");
    CHECK_OK(forward_and_backward(other, 1, false)); /* which shares others */
    CHECK_ERROR(dp_module_destroy(task), DP_OK, "");
    CHECK_ERROR(dp_module_destroy(par), DP_ERR_STATE,
                "parameters of 'distributed' are being edited: dp_edit_end first");
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(dp_backward(pass, dp_float(1), NULL));
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(nothing_runs_in_an_edit)
{
    in_processes(2, passes_inside);
    on_machines("ab", passes_inside);
}

/* One process writes: backwards of passes from before are void in all. */
static void writes_of_others(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    dp_scope *scope = dp_scope_begin(ctx);
    const dp_pass_config alone = {.no_sync = true};
    dp_value out, data = a_part_each(ctx, scope);
    for (int round = 0; round < 2; round++) {
        dp_pass *pass = NULL;
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), data, &alone, &out, &pass));
        CHECK_OK(dp_edit_begin(par, DP_OK));
        if (m->process == 1 && round == 0)
            CHECK_OK(put(par, 1, 5));
        CHECK_OK(dp_edit_end(par, DP_OK));
        CHECK_STATUS(dp_backward(pass, dp_float(1), NULL), round == 0 ? DP_ERR_STATE : DP_OK);
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(a_pass_notices_what_another_process_wrote)
{
    in_processes(2, writes_of_others);
    on_machines("ab", writes_of_others);
}

static dp_optim *scaled;

static dp_status edit_inside(dp_call *call)
{
    call->out = dp_float(1);
    CHECK_STATUS(dp_edit_begin(call->module, DP_OK), DP_ERR_STATE);
    CHECK_STATUS(dp_edit_end(call->module, DP_OK), DP_ERR_STATE);
    CHECK_STATUS(dp_edit_shares(call->module), DP_ERR_STATE);
    CHECK_STATUS(dp_optim_unscale(scaled), DP_ERR_STATE); /* on both devices at the same time */
    CHECK_STATUS(dp_optim_step(scaled), DP_ERR_STATE);
    return DP_OK;
}

static void edits_in_methods(meeting *m)
{
    static const dp_method inside[] = {{"forward", edit_inside}, {"backward", pull}};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {3}};
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = inside, .method_count = 2, .params = &param, .param_count = 1},
        &net));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
    scaled = optim_of(par, &rules[0], (dp_optim_config){.scale = {.scale = 2}});
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), a_part_each(ctx, scope), NULL, &out, NULL));
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(no_method_begins_an_edit)
{
    in_processes(2, edits_in_methods);
    on_machines("ab", edits_in_methods);
}

/* With two wrappers inside that share, and one that does not. */
static dp_module *tree_of(dp_ctx *ctx, dp_module **nets, dp_module **children)
{
    dp_module *tree = NULL;
    for (int i = 0; i < 3; i++) {
        char name[8];
        snprintf(name, sizeof name, "net%d", i);
        const dp_distributed_config config = {.name = name, .share_params = i != 1};
        nets[i] = net_of(ctx, DP_F32, false);
        CHECK_OK(dp_distributed(nets[i], &config, &children[i]));
    }
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "tree",
                                                  .methods = pulled,
                                                  .method_count = 2,
                                                  .children = children,
                                                  .child_count = 3},
                              &tree));
    return tree;
}

static void edits_of_trees(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *nets[3], *children[3], *tree = tree_of(ctx, nets, children);
    dp_tensor data;
    dp_optim *optim = optim_of(tree, &rules[1], (dp_optim_config){0});
    CHECK_OK(dp_edit_begin(tree, DP_OK));
    CHECK_OK(dp_edit_begin(children[2], DP_OK));
    for (int i = 0; i < 3; i++)
        for (size_t k = 0; k < 3; k++)
            CHECK_OK(put(children[i], k, 2));
    CHECK_OK(dp_edit_end(tree, DP_OK));
    CHECK_STATUS(dp_params_edit(children[0], 0, &data, NULL), DP_ERR_STATE);
    CHECK_OK(dp_params_edit(children[2], 0, &data, NULL));
    CHECK_OK(dp_edit_end(children[2], DP_OK));
    CHECK_STATUS(dp_params_edit(children[2], 0, &data, NULL), DP_ERR_STATE);
    for (int i = 0; i < 3; i++) {
        check_each(children[i], 2);
        CHECK_OK(forward_and_backward(children[i], 1, false));
    }
    CHECK_OK(dp_barrier(ctx));
    CHECK_OK(dp_optim_step(optim));
    for (int i = 0; i < 3; i++) /* the gradient was 1.5 + 0.02, the rate 0.02 */
        check_each(children[i], (float)(2 - 0.02 * 1.52));
    CHECK_OK(dp_barrier(ctx));
    dp_optim_destroy(optim);
    CHECK_OK(dp_module_destroy(tree)); /* and the wrappers in it: each has its own again */
    for (int i = 0; i < 3; i++) {
        check_each(nets[i], (float)(2 - 0.02 * 1.52));
        for (size_t k = 0; k < 3; k++)
            CHECK_OK(put(nets[i], k, m->process));
    }
    CHECK_OK(dp_barrier(ctx));
    for (int i = 0; i < 3; i++)
        check_each(nets[i], (float)m->process);
    dp_close(ctx);
}

/* The edit of a wrapper is not one of the tree that it is in, nor of what it wraps. */
static void edits_of_others(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *nets[3], *children[3], *tree = tree_of(ctx, nets, children);
    CHECK_OK(dp_edit_begin(children[0], DP_OK));
    CHECK_ERROR(dp_edit_shares(tree), DP_ERR_STATE,
                "dp_edit_shares: no edit of 'tree' is open: dp_edit_begin first");
    CHECK_ERROR(dp_edit_end(tree, DP_OK), DP_ERR_STATE,
                "dp_edit_end: no edit of 'tree' is open: dp_edit_begin first");
    CHECK_ERROR(dp_edit_shares(nets[0]), DP_ERR_INVALID,
                "dp_edit_shares: 'net' is in a wrapper that shares its parameters, 'net0': give "
                "that one");
    CHECK_OK(put(children[0], 0, 3));
    CHECK_OK(dp_edit_end(children[0], DP_OK));
    CHECK_OK(forward_and_backward(children[0], 1, false));

    CHECK_OK(dp_edit_begin(tree, DP_OK)); /* shares of one are none of another */
    for (size_t k = 0; k < 3 && m->process == 0; k++)
        CHECK_OK(put(children[2], k, 7));
    CHECK_OK(dp_edit_shares(children[0]));
    CHECK_STATUS(put(children[0], 1, 8), DP_ERR_STATE);
    CHECK_OK(dp_edit_end(tree, DP_OK));
    check_each(children[2], 7);
    CHECK_OK(dp_params_compare(children[0]));
    CHECK_OK(dp_params_compare(children[2]));
    dp_close(ctx);
}

TEST(edits_of_one_are_none_of_another)
{
    in_processes(2, edits_of_others);
    on_machines("ab", edits_of_others);
    on_machines("abb", edits_of_others);
}

TEST(trees_with_several_wrappers)
{
    in_processes(2, edits_of_trees);
    on_machines("ab", edits_of_trees);
}

/* ---- who else writes ------------------------------------------------------------------------- */

static void loads(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    check_loads(ctx);
    dp_close(ctx);
}

static void averages(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    check_averages(ctx);
    dp_close(ctx);
}

TEST(checkpoints_and_averages_are_written_by_all)
{
    in_processes(2, averages);
    on_machines("ab", averages);
}

TEST(numbers_are_loaded_by_all)
{
    in_processes(2, loads);
    on_machines("ab", loads);
}

/* A step by hand, gradients that are looked at and clipped by hand need no edit. */
static void gradients(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    double norm = 0, clipped = 0;
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK(norm > 90);
    CHECK_OK(dp_clip_grad_norm(par, 1, 2, &clipped));
    CHECK_F64(clipped, norm, 1e-6);
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_F64(norm, 1, 1e-4);
    CHECK_OK(dp_zero_grad(par));
    dp_close(ctx);
}

TEST(gradients_are_each_ones_own)
{
    in_processes(2, gradients);
    on_machines("ab", gradients);
}

/* ---- what cannot be shared ------------------------------------------------------------------- */

static dp_status share(dp_module *net, dp_distributed_config config)
{
    dp_module *par = NULL;
    config.share_params = true;
    return dp_distributed(net, &config, &par);
}

static void refusals(meeting *m)
{
    static float numbers[3];
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {3}, .data = numbers}};
    dp_module *net = net_of(ctx, DP_F32, false), *par = NULL, *again = NULL, *tree = NULL;
    dp_module *child = net_of(ctx, DP_F32, false), *foreign = NULL;
    dp_optim *optim = NULL;
    CHECK_ERROR(share(net, (dp_distributed_config){.ignored = (const char *const[]){"a"},
                                                   .ignored_count = 1}),
                DP_ERR_UNSUPPORTED, "cannot be shared: some parameters are ignored");
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "yours",
                                                  .methods = pulled,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = 1},
                              &foreign));
    CHECK_ERROR(share(foreign, (dp_distributed_config){0}), DP_ERR_UNSUPPORTED,
                "parameters of 'yours' cannot be shared: it has memory of yours");
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "tree", .children = &child, .child_count = 1}, &tree));
    CHECK_ERROR(share(child, (dp_distributed_config){0}), DP_ERR_UNSUPPORTED,
                "they lie beside those of a larger module: wrap that one");
    CHECK_ERROR(
        dp_separate_distributed(tree, &(dp_distributed_config){.share_params = true}, &again),
        DP_ERR_UNSUPPORTED, "each child has its own wrapper");
    CHECK_ERROR(share(net, (dp_distributed_config){.reduction = m->process == 0 ? DP_SUM_RANKS
                                                                                : DP_MEAN_RANKS}),
                DP_ERR_MISMATCH, "");
    CHECK_ERROR(
        dp_distributed(net, &(dp_distributed_config){.share_params = m->process == 0}, &par),
        DP_ERR_MISMATCH, "");
    CHECK(!is_shared(net, 0));
    CHECK_OK(put(net, 0, 1));
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
    CHECK_ERROR(share(net, (dp_distributed_config){0}), DP_ERR_UNSUPPORTED,
                "another wrapper shares them already");
    CHECK_ERROR(dp_distributed(net, NULL, &again), DP_ERR_UNSUPPORTED,
                "another wrapper shares the parameters of 'net'");
    CHECK_ERROR(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}}, &optim),
                DP_ERR_INVALID, "(share_params): set sharded");
    CHECK_STATUS(dp_optim_create(net, &(dp_optim_config){.hyper = {.lr = 1}}, &optim),
                 DP_ERR_INVALID);
    dp_close(ctx);
}

static void refused_to_toys(meeting *m)
{
    dp_ctx *ctx = open_job(m, 1, toy_device());
    CHECK_ERROR(share(net_of(ctx, DP_F32, false), (dp_distributed_config){0}), DP_ERR_UNSUPPORTED,
                "cannot be shared: not all devices are CPU devices");
    dp_close(ctx);
}

/* One has no addresses for the memory of its machine; later it has. */
static int has_no_room;

static void refused_for_now(meeting *m)
{
    struct rlimit none, before;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = net_of(ctx, DP_F32, false), *par = NULL;
    const dp_distributed_config shared = {.share_params = true};
    CHECK_INT(getrlimit(RLIMIT_AS, &before), 0);
    none = before;
    none.rlim_cur = (rlim_t)2 << 30;
    if (m->process == has_no_room)
        CHECK_INT(setrlimit(RLIMIT_AS, &none), 0);
    CHECK_ERROR(dp_distributed(net, &shared, &par), DP_ERR_UNSUPPORTED,
                "parameters of 'net' cannot be shared: the processes do not see each other's "
                "memory (");
    CHECK_SAYS(dp_last_error(), "bytes cannot be mapped");
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    CHECK(!is_shared(net, 0));
    CHECK_OK(dp_distributed(net, &shared, &par));
    CHECK(is_shared(net, 0));
    train(par, optim_of(par, &rules[0], (dp_optim_config){0}), 1);
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

TEST(a_machine_without_room_may_have_some_later)
{
    if (WITH_ASAN || WITH_TSAN)
        test_skip("a sanitizer's own memory");
    for (has_no_room = 0; has_no_room < 3; has_no_room++)
        on_machines("aab", refused_for_now);
}

/* One has no addresses for the memory of all. */
static void refused_without_room(meeting *m)
{
    struct rlimit none, before;
    dp_ctx *ctx;
    dp_config config = config_of(m, 1);
    config.colls = NULL;
    CHECK_INT(getrlimit(RLIMIT_AS, &before), 0);
    none = before;
    none.rlim_cur = (rlim_t)2 << 30;
    if (m->process == 1 && !WITH_ASAN && !WITH_TSAN)
        CHECK_INT(setrlimit(RLIMIT_AS, &none), 0);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    if (!WITH_ASAN && !WITH_TSAN)
        CHECK_ERROR(share(net_of(ctx, DP_F32, false), (dp_distributed_config){0}),
                    DP_ERR_UNSUPPORTED, "the processes do not see each other's memory");
    dp_close(ctx);
}

TEST(what_cannot_be_shared)
{
    in_processes(2, refusals);
    in_processes_on(toy_device(), 2, refused_to_toys);
    in_processes(2, refused_without_room);
}

/* ---- how it ends ----------------------------------------------------------------------------- */

static void ends(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    dp_param_info before, after;
    CHECK_OK(dp_module_param(net, 0, &before));
    for (int round = 0; round < 3; round++) {
        CHECK_OK(dp_edit_begin(par, DP_OK));
        for (size_t i = 0; i < 3; i++)
            CHECK_OK(put(par, i, 10 + round));
        CHECK_OK(dp_edit_end(par, DP_OK));
        CHECK_OK(dp_module_destroy(par));
        CHECK(!is_shared(net, 0));
        check_each(net, (float)(10 + round));
        for (size_t i = 0; i < 3; i++)
            CHECK_OK(put(net, i, m->process));
        CHECK_OK(dp_barrier(ctx)); /* the other has written its own */
        check_each(net, (float)m->process);
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
        check_each(net, 0);
        CHECK_OK(dp_module_param(net, 0, &after));
        CHECK(after.data.data == before.data.data && after.shared);
    }
    dp_close(ctx);
}

TEST(each_has_its_own_again)
{
    in_processes(2, ends);
    on_machines("ab", ends);
}

/* What the first process gives out of its shared memory next lies behind what it gave out last,
   and not behind another room. */
static void rooms(meeting *m)
{
    enum { BYTES = 1 << 20 };
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    const char *last = dp_shared_alloc(scope, BYTES);
    for (int round = 0; round < 3; round++) {
        CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_barrier(ctx)); /* all have left */
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
        const char *next = dp_shared_alloc(scope, BYTES);
        CHECK(next == last + BYTES || round == 0); /* a reducer takes memory once */
        last = next;
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(a_room_that_all_have_left_is_used_again)
{
    in_processes(2, rooms);
}

#if defined(__linux__)
/* Where memory lies in the file that it is a part of. */
static unsigned long long file_offset(const void *data)
{
    char line[512];
    unsigned long long first = 0, end = 0, offset = 0, at = (unsigned long long)(uintptr_t)data;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (at < first || at >= end) {
        CHECK(fgets(line, sizeof line, maps) != NULL);
        CHECK_INT(sscanf(line, "%llx-%llx %*s %llx", &first, &end, &offset), 3);
    }
    fclose(maps);
    return offset + (at - first);
}

/* Likewise on each machine, once all of its own processes have left. */
static void rooms_of_machines(meeting *m)
{
    unsigned long long first = 0;
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(par);
    dp_param_info info;
    for (int round = 0; round < 4; round++) {
        CHECK_OK(dp_module_param(net, 0, &info));
        unsigned long long next = file_offset(info.data.data);
        CHECK(next == first || round == 0);
        first = next;
        CHECK_OK(dp_module_destroy(par));
        CHECK_OK(dp_barrier(ctx)); /* all have left */
        CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = true}, &par));
    }
    dp_close(ctx);
}

TEST(rooms_of_each_machine_are_used_again)
{
    in_processes(2, rooms_of_machines);
    on_machines("ab", rooms_of_machines);
    on_machines("abb", rooms_of_machines);
}
#endif

/* One process ends its wrapper while the other still reads: neither that, nor what is shared next,
   for which the room is not free, changes what the other has. */
static void ends_apart(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *first = par_of(ctx, DP_F32, false, true), *net = dp_unwrap(first), *next;
    static float got[NET], want[NET];
    numbers_of(first, want);
    if (m->process == 0)
        CHECK_OK(dp_module_destroy(first));
    if (m->process == 0)
        CHECK_OK(put(net, 2, 77));
    next = par_of(ctx, DP_F32, false, true);
    CHECK_OK(dp_edit_begin(next, DP_OK));
    for (size_t i = 0; i < 3; i++)
        CHECK_OK(put(next, i, 99));
    CHECK_OK(dp_edit_end(next, DP_OK));
    check_each(next, 99);
    if (m->process == 1) {
        numbers_of(first, got);
        CHECK_BYTES(got, want, sizeof got);
        CHECK_OK(dp_module_destroy(first));
        CHECK_OK(put(net, 2, 77));
    }
    CHECK_OK(dp_barrier(ctx));
    check_each(next, 99);
    dp_close(ctx);
}

TEST(one_may_end_it_before_the_other)
{
    in_processes(2, ends_apart);
    on_machines("ab", ends_apart);
}

/* A context that closes poisons what it had, but not what others read. */
static atomic_int *closed;

static void closes_early(meeting *m)
{
    dp_config config = config_of(m, 1);
    dp_ctx *ctx;
    dp_param_info info;
    static float want[NET_C];
    if (meeting_machines == NULL)
        config.colls = NULL;
    config.poison = true;
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *par = par_of(ctx, DP_F32, false, true);
    CHECK_OK(dp_module_param(par, 2, &info));
    CHECK_OK(dp_read(ctx, &info.data, want, sizeof want));
    wait_for_all(m);
    if (m->process == 0) {
        dp_close(ctx);
        atomic_store(closed, 1);
        return;
    }
    while (atomic_load(closed) == 0)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    CHECK_BYTES(info.data.data, want, sizeof want);
    dp_close(ctx);
}

TEST(who_closes_leaves_the_numbers)
{
    closed = shared_memory(sizeof *closed);
    in_processes(2, closes_early);
    atomic_store(closed, 0);
    on_machines("aab", closes_early);
}

/* One closes before the others come to a step, to an edit, or to its end. */
static int leaves_at;

static void leaves_in_the_middle(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = par_of(ctx, DP_F32, false, true);
    dp_optim *optim = optim_of(par, &rules[1], (dp_optim_config){0});
    dp_status status = DP_OK;
    train(par, optim, 1);
    if (leaves_at == 2) {
        CHECK_OK(dp_edit_begin(par, DP_OK));
        if (m->process == 0)
            CHECK_OK(put(par, 1, 4));
    }
    wait_for_all(m);
    if (m->process == 3) {
        dp_close(ctx);
        return;
    }
    status = leaves_at == 0   ? dp_optim_step(optim)
             : leaves_at == 1 ? dp_edit_begin(par, DP_OK)
                              : dp_edit_end(par, DP_OK);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK(dp_failure(ctx, NULL));
    dp_close(ctx);
}

TEST(who_leaves_in_the_middle_fails_all)
{
    for (leaves_at = 0; leaves_at < 3; leaves_at++)
        on_machines("aabb", leaves_in_the_middle);
}

/* ---- what it costs --------------------------------------------------------------------------- */

#if defined(__linux__)
enum { LARGE_BYTES = 12 << 20, LARGE_PROCESSES = 4 };

/* The process' part of all memory that it sees, in bytes. */
static double own_bytes(void)
{
    char line[256];
    double kib = -1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    CHECK(file != NULL);
    while (kib < 0 && fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "Pss: %lf", &kib);
    fclose(file);
    return kib * 1024;
}

/* What collectives use for themselves is there before. */
static void use_buffers(dp_ctx *ctx)
{
    static float numbers[LARGE_BYTES / 4];
    const dp_part part = {.send = numbers, .recv = numbers};
    CHECK_OK(dp_all_reduce(ctx, &part, LARGE_BYTES / 4, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_broadcast(ctx, &part, LARGE_BYTES / 4, DP_F32, 0));
}

/* What a module and AdamW take in all processes together, as multiples of its size. */
static double large_cost(meeting *m, bool shared)
{
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {LARGE_BYTES / 4}};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *net = NULL, *par = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .methods = pulled, .method_count = 2, .params = &param, .param_count = 1},
        &net));
    if (meeting_by_tcp)
        use_buffers(ctx);
    double before = own_bytes();
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.share_params = shared}, &par));
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(
        par, &(dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 0.1}, .sharded = shared},
        &optim));
    CHECK_OK(dp_optim_step(optim)); /* nothing has a gradient */
    CHECK_OK(dp_barrier(ctx));
    double more = own_bytes() - before;
    CHECK_OK(dp_all_reduce_f64(ctx, &more, 1, DP_OP_SUM));
    dp_close(ctx);
    return more / LARGE_BYTES;
}

/* Parameters: once on each machine; two moments: once; gradients: in each process. */
static void costs(meeting *m)
{
    int machines = meeting_machines != NULL ? 2 : 1;
    CHECK_F64(large_cost(m, false), LARGE_PROCESSES * 4, 0.5);
    CHECK_F64(large_cost(m, true), machines + 2 + LARGE_PROCESSES, 0.5);
}

TEST_SLOW(memory_is_used_once, 60)
{
    if (WITH_ASAN || WITH_TSAN)
        test_skip("a sanitizer's own memory");
    in_processes(LARGE_PROCESSES, costs);
    on_machines("aabb", costs);
}
#endif

/* ---- half failed ----------------------------------------------------------------------------- */

static dp_module *plain_net(dp_ctx *ctx)
{
    return net_of(ctx, DP_F32, false);
}

static dp_status wrap_shared(dp_module *net)
{
    return share(net, (dp_distributed_config){0});
}

TEST_SLOW(one_process_has_no_memory_to_share, 60)
{
    CHECK(each_allocation_fails_in_one(plain_net, wrap_shared) > 3);
}

static dp_module *shared_par(dp_ctx *ctx)
{
    return par_of(ctx, DP_F32, false, true);
}

static dp_status step_shared(dp_module *par)
{
    dp_optim *optim = NULL;
    DP_TRY(dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = 1}, .sharded = true}, &optim));
    return dp_optim_step(optim);
}

TEST_SLOW(one_process_has_no_memory_to_step, 60)
{
    CHECK(each_allocation_fails_in_one(shared_par, step_shared) > 3);
}
