/* test_tokens.c - samples that are no rows: a forward weights its replica by tokens, and gradients
   and logs are means over the tokens of all devices, processes and passes of a step. */

#include "dp_train.h"
#include "examples/custom_device.h"
#include "ranked.h"

/* Row i has tokens[i] tokens, some rows none; the loss of each of them is w * i. */
static const int64_t tokens[] = {3, 0, 1, 8, 0, 0, 2, 5, 0, 1, 1, 13, 2};
enum { ROWS = sizeof tokens / sizeof *tokens };

typedef struct texts {
    bool sums; /* the loss is a sum over tokens, and no mean */
} texts;

/* Sums over tokens first to last - 1 of what the loss is multiplied by w from; *out_count: how many
   tokens these are. */
static double sum_of(int64_t first, int64_t last, double *out_count)
{
    double sum = 0;
    *out_count = 0;
    for (int64_t i = first; i < last; i++) {
        sum += (double)(tokens[i] * i);
        *out_count += (double)tokens[i];
    }
    return sum;
}

/* "row" [rows]: which rows these are. Returns what sum_of does. */
static dp_status call_sum(dp_call *call, double *out_sum, double *out_count)
{
    const dp_tensor *row;
    int64_t rows[ROWS];
    *out_sum = *out_count = 0;
    DP_TRY(dp_call_tensor(call, "row", DP_I64, 1, &row));
    DP_TRY(dp_read(call->ctx, row, rows, (size_t)row->shape[0] * sizeof *rows));
    for (int64_t i = 0; i < row->shape[0]; i++) {
        double count;
        *out_sum += sum_of(rows[i], rows[i] + 1, &count);
        *out_count += count;
    }
    return DP_OK;
}

static dp_status texts_forward(dp_call *call)
{
    const texts *own = call->state;
    dp_tensor w = dp_param_tensor(call, 0), loss;
    float weight;
    double sum, count;
    DP_TRY(dp_read(call->ctx, &w, &weight, sizeof weight));
    DP_TRY(call_sum(call, &sum, &count));
    float mean = (float)sum * weight / (count > 0 && !own->sums ? (float)count : 1);
    DP_TRY(dp_tensor_from(call->scope, call->device, &mean, DP_F32, 0, NULL, &loss));
    call->weight = count;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static dp_status texts_backward(dp_call *call)
{
    const texts *own = call->state;
    double sum, count;
    float by;
    dp_tensor grad;
    DP_TRY(call_sum(call, &sum, &count));
    DP_TRY(dp_call_out_grad(call, "loss", &grad));
    DP_TRY(dp_read(call->ctx, &grad, &by, sizeof by));
    return add_to(call, 0, by * (float)(count > 0 && !own->sums ? sum / count : sum));
}

static dp_module *texts_module(dp_ctx *ctx, const texts *own)
{
    static const dp_method methods[] = {{"forward", texts_forward}, {"backward", texts_backward}};
    static const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}};
    return make_net_of(
        ctx,
        (dp_module_config){.methods = methods, .params = &param, .param_count = 1, .state = own});
}

/* This process' part of rows first to last - 1, and how many tokens it has. */
static dp_value texts_batch(dp_ctx *ctx, dp_scope *scope, int64_t first, int64_t last,
                            double *out_count)
{
    static const int64_t all[ROWS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    int64_t mine, rows;
    CHECK_OK(dp_my_rows(ctx, last - first, &mine, &rows));
    sum_of(first + mine, first + mine + rows, out_count);
    return DP_DICT(scope, {"row", dp_array(scope, &all[first + mine], DP_I64, DP_SHAPE(rows))});
}

static dp_optim *descent_of(dp_module *par, int accumulate)
{
    dp_optim *optim = NULL;
    CHECK_OK(
        dp_optim_create(par, &(dp_optim_config){.hyper.lr = 1, .accumulate = accumulate}, &optim));
    return optim;
}

/* ---- steps of one pass and of several -------------------------------------------------------- */

/* A step of passes that end before these rows; w becomes minus the mean over all their tokens. */
static void check_steps(dp_ctx *ctx, int passes, const int64_t *last)
{
    static const texts own = {false};
    dp_module *net = texts_module(ctx, &own), *par = NULL;
    float w = 0;
    double want = 0;
    CHECK_OK(dp_everywhere(net, &par));
    dp_optim *optim = descent_of(par, passes);
    for (int step = 0; step < 2; step++) {
        double count = 0, sum = sum_of(0, last[passes - 1], &count), pass_count, mine;
        for (int pass = 0; pass < passes; pass++) {
            int64_t first = pass > 0 ? last[pass - 1] : 0;
            double pass_sum = sum_of(first, last[pass], &pass_count);
            dp_scope *scope = dp_scope_begin(ctx);
            dp_value log, batch = texts_batch(ctx, scope, first, last[pass], &mine);
            CHECK_OK(dp_train_step(par, scope, batch, optim, &log));
            CHECK_OK(dp_log_mean(ctx, scope, log, (int64_t)mine, &log));
            double loss = dp_get(log, "loss").as.f;
            if (pass_count > 0)
                CHECK_F64(loss, want * pass_sum / pass_count, 1e-4);
            else
                CHECK(isnan(loss));
            dp_scope_end(scope);
        }
        want -= sum / count;
        w = element(net, 0, false, 0);
        CHECK_F64(w, want, 1e-4);
    }
    dp_optim_destroy(optim);
}

static void train_by_tokens(dp_ctx *ctx)
{
    check_steps(ctx, 1, (const int64_t[]){ROWS});
    check_steps(ctx, 1, (const int64_t[]){1});
    check_steps(ctx, 2, (const int64_t[]){4, ROWS});
    check_steps(ctx, 3, (const int64_t[]){4, 6, 11}); /* the second pass has no tokens */
    check_steps(ctx, 2, (const int64_t[]){2, 3});
    dp_close(ctx);
}

static void train_in_processes(meeting *m)
{
    train_by_tokens(open_over_shm(m, 1 + m->process % 2, 0));
}

TEST_SLOW(steps_are_means_over_tokens, 30)
{
    for (int devices = 1; devices <= 3; devices++)
        train_by_tokens(open_here(devices));
    train_by_tokens(open_on(toy_device(), 2));
    in_processes(2, train_in_processes);
    in_processes(3, train_in_processes);
}

/* ---- by hand --------------------------------------------------------------------------------- */

/* Passes with no_sync, and sums over tokens: the reduced pass divides by the tokens of all. */
static void no_sync_by_hand(dp_ctx *ctx)
{
    static const texts own = {true};
    static const int64_t last[] = {4, 6, ROWS};
    dp_module *net = texts_module(ctx, &own), *par = NULL;
    double count, sum = sum_of(0, ROWS, &count), mine;
    CHECK_OK(dp_everywhere(net, &par));
    for (int pass = 0; pass < 3; pass++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_pass *open = NULL;
        dp_value out,
            batch = texts_batch(ctx, scope, pass > 0 ? last[pass - 1] : 0, last[pass], &mine);
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), batch,
                           &(dp_pass_config){.no_sync = pass < 2}, &out, &open));
        CHECK_OK(dp_backward(open, dp_float(1), NULL));
        dp_scope_end(scope);
    }
    CHECK_F64(element(net, 0, true, 0), sum / count, 1e-5);
    dp_close(ctx);
}

static void no_sync_in_processes(meeting *m)
{
    no_sync_by_hand(open_over_shm(m, 1 + m->process % 2, 0));
}

/* A loop that has no module: each rank's mean over its tokens, weighted by them. */
static void means_by_hand(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    int64_t first, rows;
    double own, count, sum = sum_of(0, ROWS, &count);
    CHECK_OK(dp_my_rows(ctx, ROWS, &first, &rows));
    float mean = (float)sum_of(first, first + rows, &own);
    mean /= own > 0 ? (float)own : 1;
    CHECK_OK(
        dp_all_reduce_weighted(ctx, &(dp_part){.send = &mean, .recv = &mean}, &own, 1, DP_F32));
    CHECK_F64(mean, sum / count, 1e-5);
    dp_close(ctx);
}

TEST_SLOW(gradients_by_hand_are_means_over_tokens, 30)
{
    no_sync_by_hand(open_here(1));
    no_sync_by_hand(open_here(3));
    in_processes(2, no_sync_in_processes);
    in_processes(3, no_sync_in_processes);
    in_processes(3, means_by_hand);
}

/* ---- no tokens at all ------------------------------------------------------------------------ */

/* There is no mean: all learn it, and the next step has one. */
static void nobody_has_tokens(meeting *m)
{
    static const texts own = {false};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    dp_module *net = texts_module(ctx, &own), *par = NULL;
    dp_value log;
    double count, sum, mine;
    CHECK_OK(dp_everywhere(net, &par));
    dp_optim *optim = descent_of(par, 1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value none = texts_batch(ctx, scope, 4, 6, &mine);
    CHECK_F64(mine, 0, 0);
    CHECK_ERROR(dp_train_step(par, scope, none, optim, &log), DP_ERR_INVALID,
                "all ranks together have 0 samples");
    CHECK_F64(element(net, 0, false, 0), 0, 0);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(dp_train_step(par, scope, texts_batch(ctx, scope, 0, 4, &mine), optim, &log));
    sum = sum_of(0, 4, &count);
    CHECK_F64(element(net, 0, false, 0), -sum / count, 1e-5);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(a_step_without_tokens_fails_and_the_next_one_works)
{
    in_processes(2, nobody_has_tokens);
}
