/* test_logs.c - dp_train.h: what a step logs, its mean over processes, optimizers with names. */

#include "methods.h"
#include "tree.h"
/* clang-format off */
#include "ranked.h"
#include "dp_train.h"
/* clang-format on */

static double entry_of(dp_ctx *ctx, dp_value log, const char *key)
{
    double entry = 0;
    CHECK_OK(dp_item(ctx, dp_get(log, key), &entry));
    return entry;
}

static dp_value log_of(dp_scope *scope, double loss, double right)
{
    return DP_DICT(scope, {"loss", dp_float(loss)}, {"right", dp_float(right)});
}

/* ---- what a step logs ------------------------------------------------------------------------ */

static dp_value scalar_of(const dp_call *call, float value)
{
    dp_tensor scalar;
    if (dp_tensor_from(call->scope, call->device, &value, DP_F32, 0, NULL, &scalar) != DP_OK)
        return dp_none();
    return dp_of(call->scope, &scalar);
}

static dp_status three_losses(dp_call *call)
{
    call->out =
        DP_DICT(call->scope, {"loss_cls", scalar_of(call, 1)},
                {"loss_list", DP_LIST_OF(call->scope, scalar_of(call, 2), scalar_of(call, 3))},
                {"right", scalar_of(call, 7)});
    return DP_OK;
}

TEST_BACKENDS(losses_are_parsed_as_mmengine_does)
{
    static const dp_method methods[] = {{"forward", three_losses}, {"backward", no_gradient}};
    dp_module *net = NULL, *par = NULL;
    dp_value log;
    const float x[TREE_DEVICES] = {0};
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 2}, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_train_step(
            i == 0 ? net : par, scope,
            DP_LIST_OF(scope, dp_array(scope, x, DP_F32, DP_SHAPE(TREE_DEVICES))), NULL, &log));
        CHECK_INT(dp_count(log), 4);
        CHECK_STR(dp_key_at(log, 0), "loss");
        CHECK_F64(entry_of(ctx, log, "loss"), 6, 0);
        CHECK_F64(entry_of(ctx, log, "loss_cls"), 1, 0);
        CHECK_F64(entry_of(ctx, log, "loss_list"), 5, 0);
        CHECK_F64(entry_of(ctx, log, "right"), 7, 0);
        CHECK_INT(dp_get(log, "loss").kind, DP_TENSOR); /* nobody has waited for it */
    }
}

/* ---- the mean over processes ----------------------------------------------------------------- */

TEST_BACKENDS(a_process_alone_has_its_own_log)
{
    dp_value out;
    dp_tensor loss;
    const float three = 3;
    CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, 1), &three, DP_F32, 0, NULL, &loss));
    dp_value log = DP_DICT(scope, {"loss", dp_of(scope, &loss)}, {"count", dp_int(5)});
    CHECK_OK(dp_log_mean(ctx, scope, log, 4, &out));
    CHECK_STR(tree_text(ctx, out), "{'loss': 3.0, 'count': 5.0}");
    CHECK_OK(dp_log_mean(ctx, scope, dp_none(), 0, &out));
    CHECK_INT(out.kind, DP_NONE);
    CHECK_OK(dp_log_mean(ctx, scope, DP_DICT(scope, {"x", dp_float((double)NAN)}), 4, &out));
    CHECK(isnan(dp_get(out, "x").as.f));
    CHECK_OK(dp_log_mean(ctx, scope, dp_dict_make(scope, NULL, 0), 4, &out));
    CHECK_INT(dp_count(out), 0);
    CHECK_INT(out.kind, DP_DICT);
    out = dp_int(77);
    CHECK_ERROR(dp_log_mean(ctx, scope, dp_int(3), 4, &out), DP_ERR_INVALID,
                "the log is not a dict");
    CHECK_ERROR(dp_log_mean(ctx, scope, log, -1, &out), DP_ERR_INVALID, "samples is -1");
    CHECK_ERROR(dp_log_mean(ctx, scope, DP_DICT(scope, {"a", dp_string(scope, "b")}), 1, &out),
                DP_ERR_INVALID, "dp_log_mean: 'a' is not a number");
    CHECK_ERROR(dp_log_mean(ctx, NULL, log, 1, &out), DP_ERR_INVALID, "scope is NULL");
    CHECK_ERROR(dp_log_mean(ctx, scope, log, 1, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_log_mean(NULL, scope, log, 1, &out), DP_ERR_INVALID, "ctx is NULL");
    CHECK_INT(out.as.i, 77);
}

static dp_value eight_entries(dp_scope *scope, int times)
{
    static const char *const keys[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    dp_pair pairs[8];
    for (int i = 0; i < 8; i++)
        pairs[i] = (dp_pair){keys[i], dp_int(i * times)};
    return dp_dict_make(scope, pairs, 8);
}

static void logs_of_three(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    const int me = m->process;
    char says[128];
    dp_value out;
    /* (1 * 2 + 2 * 4 + 4 * 2) / 8, and the same of numbers below 0 */
    const double losses[] = {1, 2, 4};
    CHECK_OK(
        dp_log_mean(ctx, scope, log_of(scope, losses[me], -losses[me]), me == 1 ? 4 : 2, &out));
    CHECK_F64(dp_get(out, "loss").as.f, 18.0 / 8, 0);
    CHECK_F64(dp_get(out, "right").as.f, -18.0 / 8, 0);
    CHECK_STR(dp_key_at(out, 0), "loss");
    dp_value own = me == 2 ? dp_none() : log_of(scope, losses[me], 1);
    CHECK_OK(dp_log_mean(ctx, scope, own, me == 2 ? 0 : 3, &out));
    if (me == 2)
        CHECK_INT(out.kind, DP_NONE);
    else
        CHECK_F64(dp_get(out, "loss").as.f, 1.5, 0);
    own = log_of(scope, me == 0 ? (double)NAN : 1, 2);
    CHECK_OK(dp_log_mean(ctx, scope, own, me == 0 ? 0 : 1, &out)); /* it has no say */
    CHECK_F64(dp_get(out, "loss").as.f, 1, 0);
    CHECK_OK(dp_log_mean(ctx, scope, log_of(scope, 1, 2), 0, &out));
    CHECK(isnan(dp_get(out, "loss").as.f));
    CHECK_OK(dp_log_mean(ctx, scope, eight_entries(scope, me + 1), 4 * me, &out));
    CHECK_INT(dp_count(out), 8);
    for (size_t i = 0; i < 8; i++) /* (2 * 4 + 3 * 8) / 12 */
        CHECK_F64(dp_at(out, i).as.f, (double)i * 8 / 3, 1e-12);
    out = dp_int(77);
    for (int odd = 0; odd < 3; odd++) {
        int rank = odd * (odd + 1) / 2; /* process p has p + 1 */
        own = me == odd ? DP_DICT(scope, {"loss", dp_float(1)}, {"left", dp_float(2)})
                        : log_of(scope, 1, 2);
        snprintf(says, sizeof says,
                 "dp_log_mean: entry 1 of the log is '%s' on rank 0 and '%s' on rank %d",
                 odd == 0 ? "left" : "right", odd == 0 ? "right" : "left", odd == 0 ? 1 : rank);
        CHECK_ERROR(dp_log_mean(ctx, scope, own, 1, &out), DP_ERR_MISMATCH, says);
        own = me == odd ? DP_DICT(scope, {"loss", dp_string(scope, "low")}) : log_of(scope, 1, 2);
        snprintf(says, sizeof says, "dp_log_mean: rank %d: 'loss' is not a number: ", rank);
        CHECK_ERROR(dp_log_mean(ctx, scope, own, 1, &out), DP_ERR_INVALID, says);
    }
    CHECK_INT(out.as.i, 77);
    CHECK_OK(dp_log_mean(ctx, scope, log_of(scope, 8, 2), 1, &out)); /* the job goes on */
    CHECK_F64(dp_get(out, "loss").as.f, 8, 0);
    dp_close(ctx);
}

/* 20 entries with long names. Process `odd` has something else at `at`: another name, nothing from
   there on, or a name that differs where a sentence does not show it. */
enum { OTHER_NAME, NOTHING, LATE, ODDITIES };

static dp_value many_entries(dp_scope *scope, bool odd, size_t at, int what)
{
    static char names[20][120];
    dp_pair pairs[20];
    for (size_t i = 0; i < 20; i++) {
        bool here = odd && i == at;
        memset(names[i], 'x', sizeof names[i] - 1);
        snprintf(names[i], sizeof names[i], "%s%zu", here && what == OTHER_NAME ? "other" : "key",
                 i);
        names[i][strlen(names[i])] = 'x';
        names[i][sizeof names[i] - 2] = here && what == LATE ? 'y' : 'x';
        pairs[i] = (dp_pair){names[i], dp_int(1)};
    }
    return dp_dict_make(scope, pairs, odd && what == NOTHING ? at : 20);
}

static void keys_of_three(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process % 2, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    char says[160];
    dp_value out;
    for (size_t at = 0; at < 20; at += 19)
        for (int what = 0; what < ODDITIES; what++) {
            dp_value log = many_entries(scope, m->process == 2, at, what);
            if (m->process == 0) /* who has had no batch is not asked */
                log = dp_none();
            CHECK_STATUS(dp_log_mean(ctx, scope, log, 1, &out), DP_ERR_MISMATCH);
            snprintf(says, sizeof says, "dp_log_mean: entry %zu of the log is 'key%zuxxx", at, at);
            CHECK_SAYS(dp_last_error(), says);
            CHECK_SAYS(dp_last_error(), "x' on rank 1 and ");
            snprintf(says, sizeof says, what == NOTHING ? "nothing on rank 3" : "and '%s%zuxxx",
                     what == LATE ? "key" : "other", at);
            CHECK_SAYS(dp_last_error(), says);
        }
    dp_close(ctx);
}

TEST(a_key_that_one_process_lacks_is_named)
{
    in_processes(3, keys_of_three);
}

TEST(the_mean_of_three_processes)
{
    in_processes(3, logs_of_three);
}

/* ---- optimizers with names ------------------------------------------------------------------- */

static dp_optim *made(dp_module *net, dp_optim_config config)
{
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(net, &config, &optim));
    return optim;
}

static dp_optim_info state_of(const dp_optim *optim)
{
    dp_optim_info info = {0};
    CHECK_OK(dp_optim_info_get(optim, &info));
    return info;
}

TEST(what_is_kept_lies_in_scopes_of_its_context)
{
    dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
    dp_scope *scope = dp_scope_begin(other);
    dp_optim *optim = made(make_net(ctx, NULL), (dp_optim_config){.hyper = {.lr = 0.5}});
    dp_value out = dp_none();
    CHECK_ERROR(dp_optim_save(optim, scope, &out), DP_ERR_INVALID,
                "dp_optim_save: the scope is of another context");
    CHECK_ERROR(dp_optim_view(optim, scope, &out), DP_ERR_INVALID,
                "dp_optim_view: the scope is of another context");
    CHECK_ERROR(dp_log_mean(ctx, scope, out, 0, &out), DP_ERR_INVALID,
                "dp_log_mean: the scope is of another context");
    dp_close(ctx), dp_close(other);
}

TEST_BACKENDS(two_optimizers_are_kept_together)
{
    const dp_optim_config sgd = {.hyper = {.lr = 0.5, .momentum = 0.75}};
    const dp_optim_config adam = {.rule = dp_adam(), .hyper = {.lr = 0.25}};
    dp_module *a = make_net(ctx, NULL), *b = make_net(ctx, NULL);
    dp_optim *gen = made(a, sgd), *dis = made(b, adam), *other = made(a, sgd),
             *more = made(b, adam);
    const dp_named_optim both[] = {{"gen", gen}, {"dis", dis}};
    const dp_named_optim others[] = {{"gen", other}, {"dis", more}};
    const dp_named_optim swapped[] = {{"gen", more}, {"dis", other}};
    const dp_named_optim strange[] = {{"gen", other}, {"crit", more}};
    const dp_named_optim alone = {NULL, gen}, also_alone = {"", other}, named = {"gen", other};
    dp_value saved, one;
    CHECK_OK(dp_optim_step(gen));
    CHECK_OK(dp_optim_step(gen));
    CHECK_OK(dp_optim_step(dis));
    CHECK_OK(dp_optims_save(both, 2, scope, &saved));
    CHECK_INT(dp_count(saved), 2);
    CHECK_INT(dp_get(dp_get(saved, "gen"), "steps").as.i, 2);
    CHECK_ERROR(dp_optims_load(swapped, 2, saved), DP_ERR_MISMATCH,
                "dp_optims_load: 'gen': the rule is 'adam', saved 'sgd'");
    CHECK_ERROR(dp_optims_load(strange, 2, saved), DP_ERR_MISMATCH, "nothing was saved for 'crit'");
    CHECK_INT(state_of(other).step_count, 0); /* though 'gen' would have fitted */
    CHECK_ERROR(dp_optims_load(&named, 1, saved), DP_ERR_MISMATCH, "1 optimizers, saved 2");
    CHECK_OK(dp_optims_load(others, 2, saved));
    CHECK_INT(state_of(other).step_count, 2);
    CHECK_INT(state_of(more).step_count, 1);
    CHECK_OK(dp_optims_save(&alone, 1, scope, &one));
    CHECK_STR(dp_text(dp_get(one, "rule")), "sgd");
    CHECK_OK(dp_optim_step(gen));
    CHECK_OK(dp_optim_load(gen, one)); /* the same as without a name */
    CHECK_OK(dp_optims_load(&also_alone, 1, one));
    CHECK_OK(dp_optims_save(NULL, 0, scope, &one));
    CHECK_INT(dp_count(one), 0);
    CHECK_OK(dp_optims_load(NULL, 0, one));
}

TEST_BACKENDS(a_log_of_learning_rates)
{
    dp_module *a = make_net(ctx, NULL), *b = make_net(ctx, NULL);
    dp_optim *gen =
        made(a, (dp_optim_config){.hyper = {.lr = 0.5, .momentum = 0.75},
                                  .schedule = {.decay = DP_DECAY_STEPS, .every = 1, .gamma = 0.5},
                                  .clip = {.norm = 8}});
    dp_optim *dis = made(b, (dp_optim_config){.rule = dp_adam(), .hyper = {.lr = 0.25}});
    const dp_named_optim both[] = {{"gen", gen}, {"dis", dis}}, alone = {NULL, gen};
    dp_value log;
    CHECK_OK(dp_optims_log(both, 2, scope, &log));
    CHECK_STR(tree_text(ctx, log), "{'gen.lr': 0.5, 'gen.momentum': 0.75, 'dis.lr': 0.25, "
                                   "'dis.momentum': 0.9}");
    CHECK_OK(dp_optim_step(gen));
    CHECK_OK(dp_optims_log(both, 2, scope, &log));
    CHECK_STR(tree_text(ctx, log), "{'gen.lr': 0.25, 'gen.momentum': 0.75, 'gen.grad_norm': 0.0, "
                                   "'dis.lr': 0.25, 'dis.momentum': 0.9}");
    CHECK_OK(dp_optims_log(&alone, 1, scope, &log));
    CHECK_STR(tree_text(ctx, log), "{'lr': 0.25, 'momentum': 0.75, 'grad_norm': 0.0}");
    CHECK_OK(dp_optims_log(NULL, 0, scope, &log));
    CHECK_INT(dp_count(log), 0);
}

TEST_BACKENDS(names_that_make_no_sense)
{
    dp_module *net = make_net(ctx, NULL);
    dp_optim *optim = made(net, (dp_optim_config){.hyper = {.lr = 1}});
    struct dp_optim foreign = {NULL};
    const struct {
        dp_named_optim optims[2];
        const char *says;
    } rows[] = {{{{"a", optim}, {NULL, optim}}, "optimizer 1 of 2 has no name"},
                {{{"", optim}, {"b", optim}}, "optimizer 0 of 2 has no name"},
                {{{"a", optim}, {"a", optim}}, "two optimizers have the name 'a'"},
                {{{"a", optim}, {"b", NULL}}, "not an optimizer by dp_optim_create"},
                {{{"a", &foreign}, {"b", optim}}, "not an optimizer by dp_optim_create"}};
    dp_value out = dp_int(77);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK_ERROR(dp_optims_save(rows[i].optims, 2, scope, &out), DP_ERR_INVALID, rows[i].says);
        CHECK_ERROR(dp_optims_load(rows[i].optims, 2, dp_none()), DP_ERR_INVALID, rows[i].says);
        CHECK_ERROR(dp_optims_log(rows[i].optims, 2, scope, &out), DP_ERR_INVALID, rows[i].says);
    }
    const dp_named_optim one = {"a", optim};
    CHECK_ERROR(dp_optims_save(NULL, 2, scope, &out), DP_ERR_INVALID, "optims is NULL");
    CHECK_ERROR(dp_optims_save(&one, 1, NULL, &out), DP_ERR_INVALID, "scope is NULL");
    CHECK_ERROR(dp_optims_save(&one, 1, scope, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optims_log(&one, 1, NULL, &out), DP_ERR_INVALID, "scope is NULL");
    CHECK_ERROR(dp_optims_log(&one, 1, scope, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_optims_load(&one, 1, dp_none()), DP_ERR_MISMATCH, "nothing was saved for 'a'");
    CHECK_INT(out.as.i, 77);
}

/* ---- no memory ------------------------------------------------------------------------------- */

static dp_status logs(dp_ctx *ctx, dp_scope *scope, const dp_named_optim *optims)
{
    dp_value log;
    DP_TRY(dp_optims_log(optims, 2, scope, &log));
    return dp_log_mean(ctx, scope, log, 3, &log);
}

static dp_status saves(dp_ctx *ctx, dp_scope *scope, const dp_named_optim *optims)
{
    dp_value saved;
    (void)ctx;
    DP_TRY(dp_optims_save(optims, 2, scope, &saved));
    return dp_optims_load(optims, 2, saved);
}

/* So many allocations succeed and the next one fails; false: there is no next one. Each small piece
   of a scope is an allocation too. */
static bool fails_after(size_t allocations, dp_status (*calls)(dp_ctx *ctx, dp_scope *scope,
                                                               const dp_named_optim *optims))
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 2, .poison = true, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *net = make_net(ctx, NULL);
    const dp_named_optim optims[] = {{"gen", made(net, (dp_optim_config){.hyper = {.lr = 1}})},
                                     {"dis", made(net, (dp_optim_config){.hyper = {.lr = 2}})}};
    dp_scope *scope = dp_scope_begin(ctx);
    counter.fail_at = counter.call_count + allocations + 1;
    dp_status status = calls(ctx, scope, optims);
    bool failed = counter.fail_count > 0;
    if (status != DP_OK || !failed) /* what is loaded may do without */
        CHECK_STATUS(status, failed ? DP_ERR_NO_MEMORY : DP_OK);
    dp_scope_end(scope);
    size_t before = 0;
    for (int i = 0; i < 4; i++) { /* all memory goes back to where the next calls take it from */
        scope = dp_scope_begin(ctx);
        before = i == 1 ? counter.call_count : before;
        CHECK_OK(calls(ctx, scope, optims));
        dp_scope_end(scope);
    }
    CHECK_INT(counter.call_count, before);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return failed;
}

TEST(each_allocation_for_logs_and_names_fails_once)
{
    for (size_t allocations = 0; fails_after(allocations, logs);)
        allocations++;
    for (size_t allocations = 0; fails_after(allocations, saves);)
        allocations++;
}
