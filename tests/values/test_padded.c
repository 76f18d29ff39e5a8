/* test_padded.c - wrappers whose parts have one size, for graphs that accept no other: parts are
   filled up, and padding counts nowhere. How parts are made: test_scatter.c. */

#include "dp_train.h"
#include "examples/custom_device.h"
#include "methods.h"
#include "ranked.h"

/* ---- a graph of one size ------------------------------------------------------------------------
   y = w * x for each row, and the loss of a row is y; a method that computes all rows that it gets,
   padding too, as a graph does: none of it may count. With `means` it returns one number, for which
   it has to know how many rows are real.                                                         */

enum { SIZE = 4 };

static const int first_ranks[] = {0, 1, 2};

typedef struct graph {
    int64_t size; /* of each part; 0: any */
    int dim;
    bool means; /* mean_grads */
    bool bare;  /* the output is a tensor, and no dict */
} graph;

static dp_status graph_rows(dp_call *call, const dp_tensor **out, float *numbers)
{
    const graph *own = call->state;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 2, out));
    int64_t rows = (*out)->shape[own->dim];
    if (own->size > 0 && rows != own->size)
        return dp_error(DP_ERR_USER, "a graph of %d rows got %d", (int)own->size, (int)rows);
    return dp_read(call->ctx, *out, numbers, (size_t)rows * sizeof *numbers);
}

static dp_status graph_forward(dp_call *call)
{
    const graph *own = call->state;
    const dp_tensor *x;
    dp_tensor w = dp_param_tensor(call, 0), y, each;
    float weight, numbers[32];
    int64_t ids[32];
    DP_TRY(dp_read(call->ctx, &w, &weight, sizeof weight));
    DP_TRY(graph_rows(call, &x, numbers));
    int64_t rows = x->shape[own->dim];
    for (int64_t i = 0; i < rows; i++) {
        numbers[i] *= weight;
        ids[i] = i < call->row_count ? 10 : 1000; /* padding is seen in a log */
    }
    DP_TRY(dp_tensor_from(call->scope, call->device, numbers, DP_F32, 2, x->shape, &y));
    DP_TRY(dp_tensor_from(call->scope, call->device, ids, DP_I64, DP_SHAPE(rows), &each));
    call->out = dp_of(call->scope, &y);
    if (!own->bare)
        call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &y)},
                            {"ten", own->dim == 0 ? dp_of(call->scope, &each) : dp_none()});
    return DP_OK;
}

static dp_status graph_backward(dp_call *call)
{
    const graph *own = call->state;
    const dp_tensor *x;
    dp_tensor grad, gx;
    float numbers[32], each[32], sum = 0, weight;
    dp_tensor w = dp_param_tensor(call, 0);
    DP_TRY(graph_rows(call, &x, numbers));
    DP_TRY(dp_read(call->ctx, &w, &weight, sizeof weight));
    int64_t rows = x->shape[own->dim];
    DP_TRY(dp_call_out_grad(call, own->bare ? NULL : "loss", &grad));
    CHECK_INT(grad.shape[own->dim], rows);
    DP_TRY(dp_read(call->ctx, &grad, each, (size_t)rows * sizeof *each));
    for (int64_t i = 0; i < rows; i++) {
        sum += each[i] * numbers[i];
        each[i] *= weight;
        CHECK(i < call->row_count || !(fabsf(each[i]) > 0));
        each[i] += i < call->row_count ? 0 : 77; /* a gradient of padding goes nowhere */
    }
    DP_TRY(add_to(call, 0, sum));
    if (!call->input_grad_wanted)
        return DP_OK;
    DP_TRY(dp_tensor_from(call->scope, call->device, each, DP_F32, 2, x->shape, &gx));
    call->kwargs_grad = DP_DICT(call->scope, {"x", dp_of(call->scope, &gx)});
    return DP_OK;
}

static dp_module *graph_module(dp_ctx *ctx, const graph *own)
{
    static const dp_method methods[] = {{"forward", graph_forward}, {"backward", graph_backward}};
    static const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}};
    const float two = 2;
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "graph",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = &param,
                                                  .param_count = 1,
                                                  .state = own,
                                                  .mean_grads = own->means},
                              &net));
    CHECK_OK(dp_params_write(net, 0, &two, sizeof two));
    return net;
}

/* 1, 2, 3, ... from `first` on, as a column or a row. */
static dp_value graph_batch(dp_scope *scope, int dim, int64_t first, int64_t rows)
{
    static const float all[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,
                                14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26};
    const int64_t shape[2] = {dim == 0 ? rows : 1, dim == 0 ? 1 : rows};
    return DP_DICT(scope, {"x", dp_array(scope, all + first, DP_F32, 2, shape)});
}

static double grad_of(dp_module *net)
{
    return (double)element(net, 0, true, 0);
}

static void check_numbers(dp_ctx *ctx, dp_value value, int dim, int64_t count, double by)
{
    const dp_tensor *tensor;
    float numbers[32];
    CHECK_OK(dp_as_tensor(value, "y", DP_F32, 2, &tensor));
    CHECK_INT(tensor->shape[dim], count);
    CHECK_INT(tensor->shape[1 - dim], 1);
    CHECK_OK(dp_read(ctx, tensor, numbers, (size_t)count * sizeof *numbers));
    for (int64_t i = 0; i < count; i++)
        CHECK_F64(numbers[i], by * (double)(i + 1), 0);
}

/* ---- wrappers of one process ----------------------------------------------------------------- */

typedef struct shape {
    size_t devices;
    int dim;
    int64_t part_rows;
    bool bare;
} shape;

static dp_module *wrap_graph(dp_module *net, const shape *s, bool container)
{
    dp_module *par = NULL;
    const dp_parallel_config config = {
        .local_ranks = first_ranks,
        .local_rank_count = s->devices,
        .cut = {.split = DP_SPLIT_PADDED, .dim = s->dim, .part_rows = s->part_rows}};
    CHECK_OK(container ? dp_container_parallel(net, &config, &par)
                       : dp_data_parallel(net, &config, &par));
    return par;
}

/* The gradient of the output: a number, a tensor with real rows, or none. */
static void run_rows(dp_module *net, dp_module *par, const shape *s, int64_t rows)
{
    dp_ctx *ctx = dp_module_ctx(net);
    double sum = (double)(rows * (rows + 1)) / 2;
    for (int kind = 0; kind < 3; kind++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value out, batch = graph_batch(scope, s->dim, 0, rows), x = dp_get(batch, "x");
        dp_pass *pass = NULL;
        dp_input_grad inputs;
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), batch, NULL, &out, &pass));
        check_numbers(ctx, s->bare ? out : dp_get(out, "loss"), s->dim, rows, 2);
        dp_value grad = kind == 0 ? dp_int(3) : kind == 1 ? x : dp_none();
        if (kind > 0 && !s->bare)
            grad = DP_DICT(scope, {"loss", grad});
        CHECK_OK(dp_backward(pass, grad, &inputs));
        double squares = (double)(rows * (rows + 1) * (2 * rows + 1)) / 6;
        CHECK_F64(grad_of(net), kind == 0 ? 3 * sum : kind == 1 ? squares : 0, 0);
        dp_value gx = dp_get(inputs.kwargs, "x");
        if (kind == 1)
            check_numbers(ctx, gx, s->dim, rows, 2);
        CHECK_INT(gx.as.t->shape[s->dim], rows);
        dp_scope_end(scope);
    }
}

static void run_shapes(dp_ctx *ctx)
{
    for (size_t devices = 1; devices <= 3; devices++)
        for (int dim = 0; dim < 2; dim++)
            for (int64_t part_rows = 0; part_rows <= SIZE; part_rows += SIZE)
                for (int bare = 0; bare < 2; bare++) {
                    const shape s = {devices, dim, part_rows, bare == 1};
                    const graph own = {.size = part_rows, .dim = dim, .bare = s.bare};
                    dp_module *net = graph_module(ctx, &own);
                    dp_module *par = wrap_graph(net, &s, false);
                    for (int64_t rows = 0; rows <= (int64_t)devices * SIZE; rows++)
                        run_rows(net, par, &s, rows);
                    CHECK_OK(dp_module_destroy(par));
                    CHECK_OK(dp_module_destroy(net));
                }
    dp_close(ctx);
}

TEST_SLOW(padding_counts_nowhere, 30)
{
    run_shapes(open_here(3));
    run_shapes(open_on(toy_device(), 3));
}

/* A step: losses of rows, a log of rows, a loss that is divided by real rows. */
static void step_rows(dp_ctx *ctx, bool means)
{
    for (size_t devices = 1; devices <= 3; devices++) {
        const shape s = {devices, 0, SIZE, false};
        const graph own = {.size = SIZE, .means = means};
        dp_module *net = graph_module(ctx, &own), *par = wrap_graph(net, &s, true);
        for (int64_t rows = 1; rows <= (int64_t)devices * SIZE; rows++) {
            dp_scope *scope = dp_scope_begin(ctx);
            dp_value log;
            double loss, ten, mean = (double)(rows + 1) / 2;
            CHECK_OK(dp_zero_grad(par));
            CHECK_OK(dp_train_step(par, scope, graph_batch(scope, 0, 0, rows), NULL, &log));
            CHECK_OK(dp_item(ctx, dp_get(log, "loss"), &loss));
            CHECK_OK(dp_item(ctx, dp_get(log, "ten"), &ten));
            CHECK_F64(loss, 2 * mean, 1e-6 * mean);
            CHECK_F64(ten, 10, 1e-9);
            CHECK_F64(grad_of(net), mean, 1e-6 * mean);
            dp_value out;
            dp_pass *pass = NULL;
            CHECK_OK(dp_zero_grad(par));
            CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), graph_batch(scope, 0, 0, rows),
                               NULL, &out, &pass));
            CHECK_OK(dp_backward(pass, dp_float(2), NULL)); /* the sum of rows, or their mean */
            mean *= means ? 2 : 2 * (double)rows;
            CHECK_F64(grad_of(net), mean, 1e-6 * mean);
            dp_scope_end(scope);
        }
    }
    dp_close(ctx);
}

TEST(steps_leave_padding_out)
{
    for (int means = 0; means < 2; means++) {
        step_rows(open_here(3), means == 1);
        step_rows(open_on(toy_device(), 3), means == 1);
    }
}

/* A batch of no rows, and what is refused. */
TEST(no_rows_and_too_many)
{
    const graph own = {.size = SIZE};
    const shape s = {2, 0, SIZE, false};
    dp_ctx *ctx = open_here(2);
    dp_module *net = graph_module(ctx, &own), *par = wrap_graph(net, &s, false), *other = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    dp_parallel_config config = {.cut = {.split = DP_SPLIT_EQUAL, .part_rows = SIZE}};
    CHECK_OK(
        dp_invoke(par, scope, "forward", dp_none(), graph_batch(scope, 0, 0, 0), NULL, &out, NULL));
    CHECK_INT(dp_get(out, "loss").as.t->shape[0], 0); /* the graph ran all the same */
    CHECK_ERROR(
        dp_invoke(par, scope, "forward", dp_none(), graph_batch(scope, 0, 0, 9), NULL, &out, NULL),
        DP_ERR_INVALID, "dp_invoke: 9 rows do not fit into 2 parts of 4");
    CHECK_OK(dp_data_parallel(net, &config, &other));
    CHECK_OK(dp_invoke(other, scope, "forward", dp_none(), graph_batch(scope, 0, 0, 8), NULL, &out,
                       NULL));
    check_numbers(ctx, dp_get(out, "loss"), 0, 8, 2);
    for (int64_t rows = 0; rows < 8; rows++)
        CHECK_ERROR(dp_invoke(other, scope, "forward", dp_none(), graph_batch(scope, 0, 0, rows),
                              NULL, &out, NULL),
                    DP_ERR_INVALID, "cannot be cut into 2 parts of 4");
    config.cut.split = DP_SPLIT_PADDED;
    CHECK_ERROR(dp_criterion_parallel(net, &config, &other), DP_ERR_UNSUPPORTED,
                "a criterion gets outputs and targets without padding");
    config.cut.part_rows = -1;
    CHECK_ERROR(dp_data_parallel(net, &config, &other), DP_ERR_INVALID, "part_rows is -1");
    dp_scope_end(scope);
    dp_close(ctx);
}

/* Losses where the outputs are: the criterion gets real rows, and as many targets. */
static dp_status compare(dp_call *call)
{
    const dp_tensor *y, *target;
    DP_TRY(dp_call_arg(call, 0, DP_F32, 2, &y));
    DP_TRY(dp_call_arg(call, 1, DP_F32, 2, &target));
    CHECK_INT(y->shape[0], target->shape[0]);
    CHECK_INT(y->shape[0], call->row_count);
    float got[32], want[32];
    DP_TRY(dp_read(call->ctx, y, got, (size_t)y->shape[0] * sizeof *got));
    DP_TRY(dp_read(call->ctx, target, want, (size_t)y->shape[0] * sizeof *want));
    for (int64_t i = 0; i < y->shape[0]; i++)
        CHECK_F64(got[i], 2 * want[i], 0);
    dp_tensor loss;
    DP_TRY(dp_tensor_from(call->scope, call->device, got, DP_F32, 0, NULL, &loss));
    call->out = dp_of(call->scope, &loss);
    return DP_OK;
}

TEST(criteria_get_real_rows)
{
    static const dp_method methods[] = {{"forward", compare}};
    const graph own = {.size = SIZE, .bare = true};
    dp_ctx *ctx = open_here(3);
    dp_module *net = graph_module(ctx, &own), *criterion = NULL, *model = NULL, *losses = NULL;
    const dp_parallel_config config = {.cut = {.split = DP_SPLIT_PADDED, .part_rows = SIZE}};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value outs, out, batch = graph_batch(scope, 0, 0, 7);
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 1},
                              &criterion));
    CHECK_OK(dp_model_parallel(net, &config, &model));
    CHECK_OK(dp_criterion_parallel(criterion, NULL, &losses));
    CHECK_OK(dp_invoke(model, scope, "forward", dp_none(), batch, NULL, &outs, NULL));
    CHECK_INT(dp_count(outs), 3);
    for (size_t i = 0; i < 3; i++)
        CHECK_INT(dp_at(outs, i).as.t->shape[0], i == 0 ? 3 : 2);
    CHECK_OK(dp_invoke(losses, scope, "forward", DP_LIST_OF(scope, outs, dp_get(batch, "x")),
                       dp_none(), NULL, &out, NULL));
    dp_close(ctx);
}

/* ---- all ranks ------------------------------------------------------------------------------- */

static dp_reduction reduction;

/* Steps of any number of rows, each process with its own; the loss is the job's. */
static void train_everywhere(dp_ctx *ctx)
{
    const graph own = {.size = SIZE};
    dp_info info = info_here(ctx);
    dp_module *net = graph_module(ctx, &own), *par = NULL;
    CHECK_OK(dp_distributed(
        net,
        &(dp_distributed_config){.reduction = reduction,
                                 .cut = {.split = DP_SPLIT_PADDED, .part_rows = SIZE}},
        &par));
    for (int64_t total = 1; total <= info.rank_count * SIZE; total++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log, mean;
        int64_t first, rows;
        double want = (double)(total + 1) / 2;
        CHECK_OK(dp_my_rows(ctx, total, &first, &rows));
        CHECK_OK(dp_train_step(par, scope, graph_batch(scope, 0, first, rows), NULL, &log));
        CHECK_OK(dp_log_mean(ctx, scope, log, rows, &mean));
        CHECK_F64(dp_get(mean, "loss").as.f, (double)(total + 1), 1e-5 * (double)total);
        CHECK_F64(dp_get(mean, "ten").as.f, 10, 1e-9);
        if (reduction == DP_MEAN_SAMPLES)
            CHECK_F64(grad_of(net), want, 1e-5 * want);
        else if (total % info.rank_count == 0) /* ranks have as many, and the mean is the same */
            CHECK_F64(grad_of(net), want, 1e-5 * want);
        CHECK_OK(dp_zero_grad(par));
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

static void train_in_processes(meeting *m)
{
    train_everywhere(open_over_shm(m, 1 + m->process, 0));
}

TEST_SLOW(ranks_train_in_parts_of_one_size, 30)
{
    for (reduction = DP_MEAN_RANKS; reduction <= DP_MEAN_SAMPLES; reduction++) {
        train_everywhere(open_here(1));
        train_everywhere(open_here(3));
        train_everywhere(open_on(toy_device(), 2));
        in_processes(2, train_in_processes);
        in_processes(3, train_in_processes);
    }
}

/* One process' batch does not fit: all learn it, and the next one does. */
static void one_does_not_fit(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    const graph own = {.size = SIZE};
    dp_module *net = graph_module(ctx, &own), *par = NULL;
    CHECK_OK(dp_distributed(
        net, &(dp_distributed_config){.cut = {.split = DP_SPLIT_PADDED, .part_rows = SIZE}}, &par));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    CHECK_ERROR(
        dp_train_step(par, scope, graph_batch(scope, 0, 0, m->process == 1 ? 9 : 3), NULL, &log),
        DP_ERR_INVALID, "9 rows do not fit into 2 parts of 4");
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(dp_train_step(par, scope, graph_batch(scope, 0, 0, 3), NULL, &log));
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(what_does_not_fit_in_one_process_fails_in_all)
{
    in_processes(2, one_does_not_fit);
}

/* With shards a rank has the same rows, and the same padding. */
static float *by_shards; /* in memory that all see */
static int shard_devices, trial;

static void train_in_shards(meeting *m)
{
    dp_config config = config_of(m, shard_devices);
    dp_ctx *ctx = NULL;
    const graph own = {.size = SIZE};
    config.colls = NULL;
    config.shards = 4;
    CHECK_OK(dp_open(&config, &ctx));
    dp_module *net = graph_module(ctx, &own), *par = NULL;
    dp_optim *optim;
    CHECK_OK(dp_distributed(
        net,
        &(dp_distributed_config){.reduction = DP_MEAN_SAMPLES,
                                 .cut = {.split = DP_SPLIT_PADDED, .part_rows = SIZE}},
        &par));
    CHECK_OK(dp_optim_create(par, &(dp_optim_config){.hyper.lr = 0.3}, &optim));
    for (int64_t total = 1; total <= 13; total += 2) {
        dp_scope *scope = dp_scope_begin(ctx);
        int64_t first, rows;
        dp_value log;
        CHECK_OK(dp_my_rows(ctx, total, &first, &rows));
        CHECK_OK(dp_train_step(par, scope, graph_batch(scope, 0, first, rows), optim, &log));
        dp_scope_end(scope);
    }
    if (m->process == 0)
        by_shards[trial] = element(net, 0, false, 0);
    dp_close(ctx);
}

TEST_SLOW(shards_pad_alike, 30)
{
    by_shards = shared_memory(16 * sizeof *by_shards);
    for (int processes = 1; processes <= 4; processes *= 2)
        for (shard_devices = 1; processes * shard_devices <= 4; shard_devices *= 2) {
            in_processes(processes, train_in_shards);
            CHECK_BYTES(&by_shards[trial], &by_shards[0], sizeof(float));
            trial++;
        }
    CHECK_INT(trial, 6);
}
