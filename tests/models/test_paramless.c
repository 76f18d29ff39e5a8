/* test_paramless.c - wrappers over all ranks of modules that have no parameters, or none to reduce:
   batches are cut, methods run, failures are told, and a trainer has its numbers for itself. */

#include "dp_average.h"
#include "dp_check.h"
#include "dp_local.h"
#include "dp_save.h"
#include "dp_train.h"
#include "examples/custom_device.h"
#include "methods.h"
#include "ranked.h"

enum { MOST_ROWS = 16 };

/* ---- a trainer ----------------------------------------------------------------------------------
   The loss of a row is w * x, and the gradient x. Each replica adds up its own; the trainer sums
   them over all ranks and steps.                                                                 */

typedef struct trainer {
    double w;
    double grads[RANKS]; /* by local rank */
    int rows[RANKS];
    int fails; /* the process whose forward does; -1: none */
} trainer;

static dp_status run_rows(dp_call *call, double *out_sum, dp_value *out_losses)
{
    trainer *own = (trainer *)(uintptr_t)call->state;
    const dp_tensor *x;
    dp_tensor losses;
    double data[MOST_ROWS];
    DP_TRY(dp_call_tensor(call, "x", DP_F64, 1, &x));
    DP_TRY(dp_read(call->ctx, x, data, (size_t)x->shape[0] * sizeof *data));
    *out_sum = 0;
    for (int64_t i = 0; i < x->shape[0]; i++) {
        *out_sum += data[i];
        data[i] *= own->w;
    }
    own->rows[call->local_rank] += (int)x->shape[0];
    DP_TRY(dp_tensor_from(call->scope, call->device, data, DP_F64, DP_SHAPE(x->shape[0]), &losses));
    *out_losses = dp_of(call->scope, &losses);
    return DP_OK;
}

static dp_status trainer_forward(dp_call *call)
{
    trainer *own = (trainer *)(uintptr_t)call->state;
    double sum = 0;
    if (own->fails == info_here(call->ctx).process)
        return dp_error(DP_ERR_USER, "no forward today");
    DP_TRY(run_rows(call, &sum, &call->out));
    own->grads[call->local_rank] += sum;
    return DP_OK;
}

/* Forward, backward and step at once: each replica has the sum of all. */
static dp_status trainer_train(dp_call *call)
{
    trainer *own = (trainer *)(uintptr_t)call->state;
    double *sum = dp_scope_alloc(call->scope, sizeof *sum);
    DP_TRY(run_rows(call, sum, &call->out));
    DP_TRY(dp_call_all_reduce(call, sum, sum, 1, DP_F64, DP_OP_SUM));
    own->grads[call->local_rank] = *sum;
    return DP_OK;
}

static const dp_method trainer_methods[] = {
    {"forward", trainer_forward}, {"train", trainer_train}, {"backward", no_gradient}};

static dp_module *trainer_module(dp_ctx *ctx, const trainer *own, dp_module_config config)
{
    dp_module *module = NULL;
    config.name = "net";
    config.methods = trainer_methods;
    config.method_count = config.method_count > 0 ? config.method_count : 3;
    config.state = own;
    CHECK_OK(dp_module_create(ctx, &config, &module));
    return module;
}

/* This process' of `total` rows: 1, 2, 3, ... */
static dp_value rows_here(dp_ctx *ctx, dp_scope *scope, int64_t total)
{
    static double data[MOST_ROWS];
    int64_t first, count;
    for (int i = 0; i < MOST_ROWS; i++)
        data[i] = i + 1;
    CHECK_OK(dp_my_rows(ctx, total, &first, &count));
    return DP_DICT(scope, {"x", dp_array(scope, data + first, DP_F64, DP_SHAPE(count))});
}

/* The sum of what all replicas of all processes have found, which begin anew. */
static double sum_of_all(dp_ctx *ctx, trainer *own)
{
    double sum = 0;
    for (int i = 0; i < RANKS; i++)
        sum += own->grads[i];
    memset(own->grads, 0, sizeof own->grads);
    CHECK_OK(dp_all_reduce_f64(ctx, &sum, 1, DP_OP_SUM));
    return sum;
}

static dp_status one_step(dp_module *par, trainer *own, int64_t total, dp_optim *optim,
                          double *out_loss)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    double rows = 0;
    memset(own->rows, 0, sizeof own->rows);
    dp_status status = dp_train_step(par, scope, rows_here(ctx, scope, total), optim, &log);
    for (int i = 0; i < RANKS; i++)
        rows += own->rows[i];
    if (status == DP_OK && out_loss != NULL) {
        CHECK_OK(dp_item(ctx, dp_get(log, "loss"), out_loss));
        double both[] = {rows > 0 ? rows * *out_loss : 0, rows}; /* the mean of nothing is NaN */
        CHECK_OK(dp_all_reduce_f64(ctx, both, 2, DP_OP_SUM));
        CHECK_F64(both[1], total, 0);
        *out_loss = both[0] / both[1];
    }
    dp_scope_end(scope);
    return status;
}

/* ---- a job ----------------------------------------------------------------------------------- */

static dp_distributed_config how;
static bool bare; /* there is no method "backward" */

static void trains_alike(dp_ctx *ctx)
{
    trainer own = {.w = 1, .fails = -1};
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.method_count = bare ? 2 : 3});
    dp_module *par = NULL;
    double loss = 0;
    CHECK_OK(dp_distributed(net, &how, &par));
    CHECK_INT(dp_module_param_count(par), 0);
    for (int64_t total = 1; total <= 13; total += 4) {
        double sum = (double)(total * (total + 1)) / 2;
        CHECK_OK(one_step(par, &own, total, NULL, &loss));
        CHECK_F64(loss, own.w * sum / (double)total, 1e-12);
        CHECK_F64(sum_of_all(ctx, &own), sum, 0);
        own.w -= sum / 1024;
    }
    CHECK_F64(own.w, 1 - (1 + 15 + 45 + 91) / 1024.0, 0);
    dp_close(ctx);
}

static void trains_in_processes(meeting *m)
{
    trains_alike(open_over_shm(m, 1 + m->process, 0));
}

TEST_SLOW(trainer_has_its_numbers_for_itself, 30)
{
    for (int i = 0; i < 6; i++) {
        bare = i % 2 == 1;
        how = (dp_distributed_config){.reduction = i < 2 ? DP_MEAN_SAMPLES : DP_SUM_RANKS};
        how.share_params = i == 3;
        how.buckets.wire = i == 4 ? DP_F16 : DP_F32;
        how.buckets.hook = i == 5 ? plain_hook : NULL;
        for (int devices = 1; devices <= 3; devices++)
            trains_alike(open_here(devices));
        in_processes(3, trains_in_processes);
        if (how.share_params) /* for which devices are CPUs */
            continue;
        trains_alike(open_on(toy_device(), 3));
        in_processes_on(toy_device(), 2, trains_in_processes);
    }
}

static void sums_inside(dp_ctx *ctx)
{
    trainer own = {.w = 1};
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.name = NULL}), *par = NULL;
    dp_info info = info_here(ctx);
    CHECK_OK(dp_everywhere(net, &par));
    for (int64_t total = info.rank_count; total < MOST_ROWS; total += 3) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value out;
        CHECK_OK(dp_invoke(par, scope, "train", dp_none(), rows_here(ctx, scope, total), NULL, &out,
                           NULL));
        for (int i = 0; i < info.local_count; i++) {
            const dp_tensor *losses;
            CHECK_OK(dp_as_tensor(dp_part_of(ctx, out, i), "losses", DP_F64, 1, &losses));
            CHECK(losses->shape[0] > 0);
            CHECK_F64(own.grads[i], (double)(total * (total + 1)) / 2, 0);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

static void sums_in_processes(meeting *m)
{
    sums_inside(open_over_shm(m, 2 - m->process, 0));
}

TEST(one_method_trains_and_sums_over_all_ranks)
{
    sums_inside(open_here(1));
    sums_inside(open_here(3));
    in_processes(2, sums_in_processes);
}

/* However shards are spread, a rank has the same rows. */
static double by_shards[2];

static void train_in_shards(int devices)
{
    dp_ctx *ctx = NULL;
    trainer own = {.w = 1, .fails = -1};
    CHECK_OK(dp_open(&(dp_config){.device_count = devices, .shards = 4}, &ctx));
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.name = NULL}), *par = NULL;
    CHECK_OK(dp_everywhere(net, &par));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(one_step(par, &own, 5 - 2 * step, NULL, NULL));
        for (int i = 0; i < 4; i++)
            own.w -= own.grads[i] / 3;
    }
    by_shards[devices - 1] = own.w;
    dp_close(ctx);
}

TEST(shards_give_a_trainer_the_same_bits)
{
    train_in_shards(1);
    train_in_shards(2);
    CHECK_BYTES(&by_shards[0], &by_shards[1], sizeof by_shards[0]);
}

/* ---- what others find of it ------------------------------------------------------------------ */

static const char *const checkpoint = "build/paramless.safetensors";

static void look_at_optimizers(dp_module *par, trainer *own)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_optim *optim = NULL, *sharded = NULL;
    double lr = 0, norm = -1;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value saved;
    CHECK_OK(dp_optim_create(
        par,
        &(dp_optim_config){.hyper.lr = 1,
                           .schedule = {.decay = DP_DECAY_STEPS, .every = 1, .gamma = 0.5},
                           .accumulate = 2},
        &optim));
    for (int step = 0; step < 4; step++) {
        CHECK_OK(dp_optim_lr(optim, 0, &lr));
        CHECK_F64(lr, step < 2 ? 1 : 0.5, 0); /* for the trainer's own step */
        CHECK_OK(one_step(par, own, 7, optim, NULL));
    }
    CHECK_OK(dp_optim_save(optim, scope, &saved));
    CHECK_INT(dp_get(saved, "steps").as.i, 2);
    CHECK_OK(dp_optim_load(optim, saved));
    CHECK_OK(dp_optim_step(optim));
    CHECK_ERROR(dp_optim_create(par, &(dp_optim_config){.hyper.lr = 1, .sharded = true}, &sharded),
                DP_ERR_INVALID, "'distributed' has no parameter that ranks reduce");
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_F64(norm, 0, 0);
    CHECK_OK(dp_clip_grad_norm(par, 1, 2, &norm));
    CHECK_OK(dp_clip_grad_value(par, 1));
    CHECK_ERROR(dp_grads_scatter_set(par, true), DP_ERR_INVALID, "no gradients that ranks reduce");
    CHECK_OK(dp_grads_scatter_set(par, false));
    CHECK(!dp_grads_are_scattered(par) && !dp_grads_are_unseen(par));
    dp_optim_destroy(optim);
    dp_scope_end(scope);
}

static void look_at_files(dp_module *par)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value model, saved;
    CHECK_OK(dp_module_save(par, scope, &model));
    CHECK_INT(dp_count(model), 0);
    CHECK_OK(dp_checkpoint_save(ctx, checkpoint,
                                DP_DICT(scope, {"model", model}, {"own", dp_float(0.5)})));
    CHECK_OK(dp_checkpoint_load(ctx, scope, checkpoint, &saved));
    CHECK_OK(dp_module_load(par, dp_get(saved, "model"), NULL));
    CHECK_F64(dp_get(saved, "own").as.f, 0.5, 0);
    CHECK_ERROR(dp_module_load(par, saved, NULL), DP_ERR_MISMATCH,
                "of the 0 parameters of 'distributed': 2 unknown ('model', 'own')");
    dp_scope_end(scope);
}

static void look_at_the_rest(dp_module *net, dp_module *par)
{
    dp_ctx *ctx = dp_module_ctx(net);
    const dp_stretch *stretches;
    size_t count = 9;
    bool used;
    dp_average *average;
    dp_local *local;
    dp_report report;
    char text[2000];
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(dp_params_changed(par));
    CHECK_OK(dp_params_compare(par));
    CHECK_OK(dp_buffers_compare(par));
    CHECK_OK(dp_buffers_sync(par));
    CHECK_OK(dp_grads_used(par, &used, 0));
    CHECK_OK(dp_module_stretches(par, &stretches, &count));
    CHECK_INT(count, 0);
    CHECK_OK(dp_edit_begin(par, DP_OK));
    CHECK_OK(dp_edit_end(par, DP_OK));
    CHECK_OK(dp_average_create(par, NULL, &average));
    CHECK_OK(dp_average_update(average));
    CHECK_OK(dp_average_begin(average));
    CHECK_OK(dp_average_end(average));
    CHECK_OK(dp_local_create(net, &(dp_local_config){.every = 1}, &local));
    CHECK_OK(dp_local_step(local));
    CHECK_OK(dp_local_sync(local));
    CHECK_OK(dp_report_get(par, &report));
    CHECK_INT(report.reducer.unit_count, 0);
    CHECK_INT(report.reducer.bucket_count, 0);
    CHECK(report.reducer.pass_count > 0);
    CHECK(dp_report_text(par, text, sizeof text) > 0);
    CHECK_SAYS(text, "'net': 0 bytes of gradients a rank");
    CHECK_INT(dp_owner_count(par), 1);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_self_check(par, rows_here(ctx, scope, 12), NULL, NULL));
    dp_scope_end(scope);
}

static void look(dp_ctx *ctx)
{
    trainer own = {.w = 1, .fails = -1};
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.name = NULL}), *par = NULL;
    dp_module *parent = NULL, *child = trainer_module(ctx, &own, (dp_module_config){.name = NULL});
    CHECK_OK(dp_everywhere(net, &par));
    look_at_optimizers(par, &own);
    look_at_files(par);
    look_at_the_rest(net, par);
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_everywhere(child, &par));
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "parent", .children = &par, .child_count = 1}, &parent));
    CHECK_OK(dp_buffers_sync(parent)); /* a wrapper is in its tree */
    CHECK_OK(dp_params_compare(parent));
    if (info_here(ctx).process_count > 1)
        CHECK_ERROR(dp_buffers_sync(net), DP_ERR_INVALID, "no wrapper by dp_distributed is in");
    dp_close(ctx);
}

static void look_in_processes(meeting *m)
{
    look(open_over_shm(m, 2, 0));
}

TEST_SLOW(what_asks_for_parameters_finds_none, 30)
{
    look(open_here(1));
    look(open_here(2));
    in_processes(2, look_in_processes);
}

/* Frozen ones, buffers, those without elements and those that ranks leave alone are nothing to
   reduce either. */
static void others(dp_ctx *ctx)
{
    const dp_param_config kinds[] = {
        {.name = "a", .dtype = DP_F64, .ndim = 1, .shape = {3}, .frozen = true},
        {.name = "a", .dtype = DP_F64, .ndim = 1, .shape = {3}, .buffer = true},
        {.name = "a", .dtype = DP_F64, .ndim = 1, .shape = {0}},
        {.name = "a", .dtype = DP_F64, .ndim = 1, .shape = {3}}};
    const char *const names[] = {"a"};
    for (size_t i = 0; i < 4; i++)
        for (int shares = 0; shares < (i == 3 ? 1 : 2); shares++) {
            trainer own = {.w = 1, .fails = -1};
            dp_module *par = NULL;
            dp_module *net = trainer_module(
                ctx, &own,
                (dp_module_config){.params = &kinds[i], .param_count = 1, .method_count = 3});
            const double first[] = {1, 2, info_here(ctx).process};
            dp_tensor data;
            if (i != 2)
                CHECK_OK(dp_params_write(net, 0, first, sizeof first));
            CHECK_OK(dp_distributed(net,
                                    &(dp_distributed_config){.ignored = i == 3 ? names : NULL,
                                                             .ignored_count = i == 3,
                                                             .share_params = shares == 1},
                                    &par));
            for (int step = 0; step < 2; step++)
                CHECK_OK(one_step(par, &own, 5, NULL, NULL));
            CHECK_F64(sum_of_all(ctx, &own), 30, 0);
            CHECK_OK(dp_owner_param(par, 0, 0, &data));
            double got[3] = {0, 0, 0};
            CHECK_OK(dp_read(ctx, &data, got, i == 2 ? 0 : sizeof got));
            CHECK_F64(got[2], i == 3 ? first[2] : 0, 0); /* rank 0's, but for what is ignored */
            CHECK_OK(dp_params_compare(par));
            CHECK_OK(dp_buffers_sync(par));
            CHECK_OK(dp_module_destroy(par));
        }
    dp_close(ctx);
}

static void others_in_processes(meeting *m)
{
    others(open_over_shm(m, 2, 0));
}

TEST(parameters_that_nobody_reduces)
{
    others(open_here(2));
    in_processes(2, others_in_processes);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void fail_in_one(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    trainer own = {.w = 1, .fails = 1};
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.name = NULL}), *par = NULL;
    double loss = 0;
    CHECK_OK(dp_everywhere(net, &par));
    for (int i = 0; i < 2; i++) {
        own.fails = 1;
        CHECK_ERROR(one_step(par, &own, 9, NULL, NULL), DP_ERR_USER,
                    "net.forward: no forward today");
        if (m->process != 1)
            CHECK_SAYS(dp_last_error(), "rank 2: ");
        own.fails = -1;
        memset(own.grads, 0, sizeof own.grads);
        CHECK_OK(one_step(par, &own, 9, NULL, &loss)); /* there is nothing to be zeroed */
        CHECK_F64(sum_of_all(ctx, &own), 45, 0);
    }
    dp_close(ctx);
}

TEST(a_step_that_fails_in_one_process_fails_in_all)
{
    in_processes(3, fail_in_one);
}

static dp_module *make_one(dp_ctx *ctx)
{
    static trainer own = {.w = 1, .fails = -1};
    return trainer_module(ctx, &own, (dp_module_config){.name = NULL});
}

static dp_status wrap_one(dp_module *module)
{
    dp_module *par = NULL;
    return dp_everywhere(module, &par);
}

TEST_SLOW(each_allocation_fails_in_one_process, 60)
{
    CHECK(each_allocation_fails_in_one(make_one, wrap_one) > 3);
}

/* Backward is for those who have something to learn, and for gradients of inputs. */
TEST(a_backward_that_is_not_there)
{
    dp_ctx *ctx = open_here(2);
    trainer own = {.w = 1, .fails = -1};
    const dp_param_config weight = {.name = "w", .ndim = 1, .shape = {2}};
    dp_module *par = NULL;
    dp_module *net = trainer_module(ctx, &own, (dp_module_config){.method_count = 2});
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pass *pass = NULL;
    dp_value out;
    CHECK_OK(dp_everywhere(net, &par));
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), rows_here(ctx, scope, 5), NULL, &out, &pass));
    CHECK_ERROR(dp_backward(pass, dp_float(1), NULL), DP_ERR_UNSUPPORTED,
                "'net' has no method 'backward'");
    CHECK_OK(one_step(net, &own, 5, NULL, NULL)); /* nor does it take a wrapper */
    dp_module *learns = trainer_module(
        ctx, &own, (dp_module_config){.params = &weight, .param_count = 1, .method_count = 2});
    CHECK_ERROR(one_step(learns, &own, 5, NULL, NULL), DP_ERR_UNSUPPORTED,
                "'net' has no method 'backward'");
    dp_scope_end(scope);
    dp_close(ctx);
}
