/* test_shards.c - with shards, ranks without rows: what a step leaves in parameters and buffers
   does not depend on how ranks are spread over processes and devices. */

#include <stdio.h>
#include <string.h>
#include "grads.h"
#include "methods.h"
#include "numbers.h"

/* ---- a net that treats no rows in a way of its own ---------------------------------------------
   A forward counts itself and adds up the sum of x over all ranks, and how many replicas have sent
   one. Its backward adds to "w" for each row; a child adds to "empty", only where there are no
   rows.                                                                                          */

enum { W, SEEN, STATS, OWN_PARAMS };
enum { EMPTY = OWN_PARAMS, PARAMS }; /* the child's is the last in the tree */
enum { SHARDS = 8, ROWS = 20, STEPS = 2, RULES = 3, SYNCS = 3 };

typedef struct habits {
    bool asks_for_all;  /* of its parameters, rows or not */
    bool reports_early; /* that they are ready */
    bool sums;          /* over ranks: then each process needs a batch */
    bool mean_grads;
    bool adds_up; /* the first step is not reduced, and the second adds to its gradients */
} habits;

static dp_status net_rows(dp_call *call, const dp_tensor **out)
{
    return dp_call_tensor(call, "x", DP_F32, 1, out);
}

static dp_status net_forward(dp_call *call)
{
    const habits *own = call->state;
    const dp_tensor *x;
    double sums[] = {0, 1};
    DP_TRY(net_rows(call, &x));
    for (int64_t i = 0; i < x->shape[0]; i++)
        sums[0] += (double)((const float *)x->data)[i];
    ((float *)dp_buffer(call, SEEN))[0] += 1;
    if (own->sums)
        DP_TRY(dp_call_all_reduce(call, sums, sums, 2, DP_F64, DP_OP_SUM));
    for (int i = 0; i < 2; i++)
        ((double *)dp_buffer(call, STATS))[i] += sums[i];
    call->weight = x->shape[0] > 0 ? (double)x->shape[0] : 5; /* a trap: there are no samples */
    call->out = dp_float(1);
    if (x->shape[0] > 0 && !own->asks_for_all)
        return DP_OK;
    dp_value out;
    return dp_call_child(call, "part", "forward", dp_none(), dp_none(), &out,
                         (dp_pass **)&call->saved);
}

static dp_status part_forward(dp_call *call)
{
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status part_backward(dp_call *call)
{
    const habits *own = call->state;
    float *empty = dp_grad(call, 0);
    if (empty == NULL)
        return DP_ERR_USER;
    *empty += 3;
    return own->reports_early ? dp_grad_ready(call, 0) : DP_OK;
}

static dp_status net_backward(dp_call *call)
{
    const habits *own = call->state;
    const dp_tensor *x;
    DP_TRY(net_rows(call, &x));
    float *w = x->shape[0] > 0 || own->asks_for_all ? dp_grad(call, W) : NULL;
    if (call->saved != NULL)
        DP_TRY(dp_backward(call->saved, dp_float(1), NULL));
    if (w != NULL)
        *w += (float)call->grad.as.f * (x->shape[0] > 0 ? ((const float *)x->data)[0] : 100);
    if (w != NULL && own->reports_early)
        DP_TRY(dp_grad_ready(call, W));
    return DP_OK;
}

/* Gives what the replica's buffers hold, whatever it is called with. */
static dp_status net_look(dp_call *call)
{
    double *copy = dp_scope_alloc(call->scope, 3 * sizeof *copy);
    const double *stats = dp_buffer(call, STATS);
    if (copy == NULL)
        return DP_ERR_NO_MEMORY;
    copy[0] = (double)*(const float *)dp_buffer(call, SEEN);
    copy[1] = stats[0];
    copy[2] = stats[1];
    call->out = dp_array(call->scope, copy, DP_F64, DP_SHAPE(3));
    return DP_OK;
}

static dp_module *make_net(dp_ctx *ctx, const habits *own)
{
    static const dp_method methods[] = {
        {"forward", net_forward}, {"backward", net_backward}, {"look", net_look}};
    static const dp_param_config params[] = {
        [W] = {.name = "w"},
        [SEEN] = {.name = "seen", .buffer = true},
        [STATS] = {.name = "stats", .dtype = DP_F64, .ndim = 1, .shape = {2}, .buffer = true}};
    static const dp_method part_methods[] = {{"forward", part_forward},
                                             {"backward", part_backward}};
    static const dp_param_config empty = {.name = "empty"};
    dp_module *net = NULL, *part = NULL;
    dp_tensor data;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "part",
                                                  .methods = part_methods,
                                                  .method_count = 2,
                                                  .params = &empty,
                                                  .param_count = 1,
                                                  .state = own},
                              &part));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 3,
                                                  .params = params,
                                                  .param_count = OWN_PARAMS,
                                                  .children = &part,
                                                  .child_count = 1,
                                                  .state = own,
                                                  .mean_grads = own->mean_grads},
                              &net));
    for (size_t i = W; i <= EMPTY; i += EMPTY - W) {
        CHECK_OK(dp_params_edit(net, i, &data, NULL));
        *(float *)data.data = 1;
    }
    return net;
}

/* ---- batches --------------------------------------------------------------------------------- */

/* How a process gets its rows; one without any: as tensors of no rows, or as none. BY_SIZES, HOLES:
   ranks without rows lie between others, the same ones in all steps, or other ones in each. */
typedef enum feed { TENSORS, TENSORS_OR_NONE, GROUPS_OR_NONE, BY_SIZES, HOLES, FEEDS } feed;

static const int64_t sizes[SHARDS] = {3, 0, 2, 1, 0, 0, 1, 0};

/* A group for each of the process' ranks, or for each that has rows: these may be fewer. */
static dp_value groups_of(dp_scope *scope, const float *x, const int64_t *rows, int ranks,
                          bool holes)
{
    dp_value groups[SHARDS];
    size_t count = 0;
    for (int r = 0; r < ranks && (rows[r] > 0 || holes); x += rows[r++])
        groups[count++] = dp_array(scope, x, DP_F32, DP_SHAPE(rows[r]));
    const dp_container container = {.data = dp_list_make(scope, DP_LIST, groups, count),
                                    .stack = true};
    return dp_contain(scope, &container);
}

/* The rows of this process' ranks, of all that a step has. */
static dp_value batch_of(dp_scope *scope, const dp_info *info, int64_t total, feed how)
{
    static float x[ROWS];
    int64_t rows[SHARDS], first = 0, count = 0;
    size_t parts = 0;
    for (int i = 0; i < ROWS; i++)
        x[i] = (float)(i % 7 + 1) / 3;
    for (int r = 0; r < SHARDS && how >= BY_SIZES; r++)
        rows[r] = sizes[(how == HOLES ? r + total : r) % SHARDS];
    if (how < BY_SIZES)
        CHECK_OK(dp_split_rows(total, (size_t)info->rank_count, NULL, rows, &parts));
    for (int r = 0; r < info->rank_first + info->local_count; r++)
        *(r < info->rank_first ? &first : &count) += rows[r];
    if (count == 0 && (how == TENSORS_OR_NONE || how == GROUPS_OR_NONE))
        return dp_none();
    dp_value value =
        how == GROUPS_OR_NONE || how == HOLES
            ? groups_of(scope, x + first, rows + info->rank_first, info->local_count, how == HOLES)
            : dp_array(scope, x + first, DP_F32, DP_SHAPE(count));
    return DP_DICT(scope, {"x", value});
}

/* ---- a few steps ----------------------------------------------------------------------------- */

typedef struct trial {
    dp_distributed_config config;
    habits own;
    feed how;
} trial;

typedef struct outcome { /* equal byte by byte, however ranks are spread */
    int32_t status[STEPS];
    float params[2];
    bool used[STEPS][2];
    double buffers[SHARDS][3];
} outcome;

typedef struct adder {
    dp_optim base;
    bool no_sync;
} adder;

static dp_status adder_begin(dp_optim *optim, dp_module *net, dp_pass_config *pass)
{
    (void)net;
    pass->no_sync = ((adder *)optim)->no_sync;
    return DP_OK;
}

static dp_status adder_update(dp_optim *optim, dp_module *net)
{
    (void)optim, (void)net;
    return DP_OK;
}

static const dp_optim_ops adder_ops = {
    .head = DP_TABLE(dp_optim_ops), .begin = adder_begin, .update = adder_update};

static void step(dp_module *par, const dp_info *info, int64_t rows, trial t, int at, outcome *out)
{
    bool used[PARAMS];
    dp_tensor data, grad;
    dp_value log;
    dp_ctx *ctx = dp_module_ctx(par);
    adder optim = {{&adder_ops}, at == 0 && t.own.adds_up};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value batch = batch_of(scope, info, rows, t.how);
    out->status[at] = dp_train_step(par, scope, batch, &optim.base, &log);
    dp_scope_end(scope);
    if (out->status[at] != DP_OK) {
        CHECK_OK(dp_zero_grad(par));
        return;
    }
    if (optim.no_sync)
        return;
    CHECK_OK(dp_grads_used(par, used, PARAMS));
    for (size_t i = W; i <= EMPTY; i += EMPTY - W) {
        out->used[at][i > W] = used[i];
        CHECK_OK(dp_params_edit(par, i, &data, &grad));
        if (used[i]) /* with decay: a step without a gradient shows, too */
            *(float *)data.data = *(float *)data.data * 0.9F - *(float *)grad.data;
        out->params[i > W] = *(float *)data.data;
    }
    CHECK_OK(dp_zero_grad(par));
}

/* Those of this process' ranks; without arguments each rank has a replica. */
static void look(dp_module *par, const dp_info *info, outcome *out)
{
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_value all;
    CHECK_OK(dp_invoke(par, scope, "look", dp_none(), dp_none(), NULL, &all, NULL));
    CHECK(info->local_count == 1 || dp_count(all) == (size_t)info->local_count);
    for (int i = 0; i < info->local_count; i++) {
        dp_value one = info->local_count > 1 ? dp_at(all, (size_t)i) : all;
        CHECK_INT(one.kind, DP_TENSOR);
        memcpy(out->buffers[info->rank_first + i], one.as.t->data, sizeof out->buffers[0]);
    }
    dp_scope_end(scope);
}

static void run_trial(dp_ctx *ctx, trial t, int64_t rows, outcome *out)
{
    dp_info info;
    dp_module *par, *net = make_net(ctx, &t.own);
    CHECK_OK(dp_info_get(ctx, &info));
    if (t.how == BY_SIZES)
        t.config.cut = (dp_cut){.split = DP_SPLIT_SIZES,
                                .sizes = sizes + info.rank_first,
                                .split_count = (size_t)info.local_count};
    CHECK_OK(dp_distributed(net, &t.config, &par));
    step(par, &info, rows, t, 0, out);
    step(par, &info, ROWS - rows, t, 1, out);
    look(par, &info, out);
    dp_module_destroy(par);
    dp_module_destroy(net);
}

/* Visits all trials in one order; returns how many there are. */
static int each_trial(dp_ctx *ctx, outcome *out)
{
    int count = 0;
    for (int sync = 0; sync < SYNCS; sync++)
        for (int rule = 0; rule < RULES; rule++)
            for (int how = 0; how < FEEDS; how++)
                for (int64_t rows = 0; rows <= ROWS; rows++) {
                    trial t = {
                        .config = {.buffers = (dp_buffer_sync)sync,
                                   .unused_params = (dp_unused)rule,
                                   .reduction = rows % 2 == 0 ? DP_MEAN_SAMPLES : DP_MEAN_RANKS},
                        .own = {.asks_for_all = rule == 0,
                                .reports_early = rows % 3 == 0,
                                .sums = how == TENSORS || how >= BY_SIZES,
                                .mean_grads = rows % 5 == 1,
                                .adds_up = rows % 4 == 3},
                        .how = (feed)how};
                    run_trial(ctx, t, rows, &out[count++]);
                }
    return count;
}

enum { TRIALS = SYNCS * RULES * FEEDS * (ROWS + 1) };

static int shards, devices;
static outcome *outcomes; /* of each process, by trial */

static dp_ctx *open_shards(meeting *m)
{
    dp_config config = config_of(m, devices);
    dp_ctx *ctx;
    config.colls = NULL;
    config.shards = shards;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static void try_all(meeting *m)
{
    dp_ctx *ctx = open_shards(m);
    CHECK_INT(each_trial(ctx, outcomes + (size_t)m->process * TRIALS), TRIALS);
    dp_close(ctx);
}

/* What all have alike is that of process 0; buffers are those of each one's ranks. */
static void join_outcomes(int processes, outcome *out)
{
    int each = shards / processes;
    memcpy(out, outcomes, TRIALS * sizeof *out);
    for (int p = 1; p < processes; p++)
        for (int i = 0; i < TRIALS; i++) {
            const outcome *own = &outcomes[(size_t)p * TRIALS + (size_t)i];
            CHECK_BYTES(own->status, out[i].status, sizeof own->status);
            CHECK_BYTES(own->params, out[i].params, sizeof own->params);
            CHECK_BYTES(own->used, out[i].used, sizeof own->used);
            for (int r = p * each; r < (p + 1) * each; r++)
                memcpy(out[i].buffers[r], own->buffers[r], sizeof own->buffers[r]);
        }
}

static const char *told(const outcome *of, char *text, size_t bytes)
{
    const double *first = of->buffers[0], *last = of->buffers[shards - 1];
    snprintf(text, bytes, "status %d %d, w %g, empty %g, buffers %g %g %g to %g %g %g",
             of->status[0], of->status[1], (double)of->params[0], (double)of->params[1], first[0],
             first[1], first[2], last[0], last[1], last[2]);
    return text;
}

static void compare(const outcome *got, const outcome *want, int processes)
{
    char a[300], b[300];
    for (int i = 0; i < TRIALS; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            test_fail(__FILE__, __LINE__,
                      "trial %d of %d shards in %d processes of %d devices: %s; in one process: %s",
                      i, shards, processes, devices, told(&got[i], a, sizeof a),
                      told(&want[i], b, sizeof b));
}

static void refuse_cuts(meeting *m)
{
    static const double weights[] = {1, 2};
    dp_config config = config_of(m, 1);
    dp_module *par, *net;
    dp_ctx *ctx;
    config.colls = NULL;
    config.shards = 2 * m->process_count;
    CHECK_OK(dp_open(&config, &ctx));
    net = make_net(ctx, &(habits){.asks_for_all = true});
    CHECK_ERROR(
        dp_distributed(net, &(dp_distributed_config){.cut.split = DP_SPLIT_CHUNK}, &par),
        DP_ERR_UNSUPPORTED,
        "DP_SPLIT_CHUNK cuts the batch of each process by itself, so with shards the rows of a "
        "rank would depend on the number of processes: use DP_SPLIT_BALANCED, _SIZES, _EQUAL or "
        "_PADDED");
    CHECK_ERROR(dp_distributed(net, &(dp_distributed_config){.cut.split = DP_SPLIT_PADDED}, &par),
                DP_ERR_UNSUPPORTED, "with shards, DP_SPLIT_PADDED needs part_rows");
    for (int equal = 0; equal < 2; equal++) {
        CHECK_OK(dp_distributed(
            net,
            &(dp_distributed_config){
                .cut = {.split = equal ? DP_SPLIT_EQUAL : DP_SPLIT_PADDED, .part_rows = 2}},
            &par));
        CHECK_OK(dp_module_destroy(par));
    }
    CHECK_ERROR(
        dp_distributed(
            net, &(dp_distributed_config){.cut = {.split = DP_SPLIT_WEIGHTS, .weights = weights}},
            &par),
        DP_ERR_UNSUPPORTED, "DP_SPLIT_WEIGHTS cuts");
    CHECK_OK(dp_distributed(net,
                            &(dp_distributed_config){
                                .cut = {.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = 2}},
                            &par));
    dp_close(ctx);
}

TEST(cuts_that_depend_on_the_number_of_processes_are_refused)
{
    in_processes(1, refuse_cuts);
    in_processes(2, refuse_cuts);
}

TEST_SLOW(ranks_without_rows_leave_nothing_however_they_are_spread, 120)
{
    outcome *first = test_room(TRIALS * sizeof *first), *got = test_room(TRIALS * sizeof *got);
    size_t bytes = (size_t)SHARDS * TRIALS * sizeof *outcomes;
    outcomes = shared_memory(bytes);
    for (shards = 1; shards <= SHARDS; shards *= 2)
        for (int processes = 1; processes <= shards; processes *= test_stride() > 1 ? 4 : 2)
            for (devices = 1; processes * devices <= shards; devices *= 2) {
                memset(outcomes, 0, bytes);
                in_processes(processes, try_all);
                join_outcomes(processes, processes == 1 && devices == 1 ? first : got);
                if (processes > 1 || devices > 1)
                    compare(got, first, processes);
            }
}

/* ---- what ranks reduce in methods ------------------------------------------------------------ */

enum { BITS = 24 };

typedef struct bits { /* of each rank */
    float mean[SHARDS][BITS];
    uint16_t half[SHARDS][BITS], scattered[SHARDS][BITS];
} bits;

static bits *all_bits;

static void fill_sent(int rank, float *send, uint16_t *halves)
{
    for (int i = 0; i < BITS; i++)
        send[i] = (float)(rank + 1) / 7 + (float)i / 3;
    for (int i = 0; i < SHARDS * BITS; i++)
        number_put(DP_F16, halves, (size_t)i, (number)(rank * 17 + i) / 13);
}

static int rank_of(const dp_call *call)
{
    dp_info info;
    CHECK_OK(dp_info_get(call->ctx, &info));
    return info.rank_first + call->local_rank;
}

static dp_status leave_bits(dp_call *call)
{
    int rank = rank_of(call);
    float send[BITS];
    uint16_t halves[SHARDS * BITS];
    fill_sent(rank, send, halves);
    call->out = dp_none();
    DP_TRY(dp_call_all_reduce(call, send, all_bits->mean[rank], BITS, DP_F32, DP_OP_MEAN));
    DP_TRY(dp_call_all_reduce(call, halves, all_bits->half[rank], BITS, DP_F16, DP_OP_MEAN));
    return dp_rank_reduce_scatter(call->ctx, halves, all_bits->scattered[rank], BITS, DP_F16,
                                  DP_OP_MEAN);
}

static const dp_module_config bits_config = {.name = "bits",
                                             .methods = &(const dp_method){"forward", leave_bits},
                                             .method_count = 1,
                                             .params = &(const dp_param_config){.name = "w"},
                                             .param_count = 1};

static int64_t rows_now;

static void shards_in_process(meeting *m)
{
    static const float x[SHARDS];
    int64_t rows[SHARDS], own = 0;
    size_t parts = 0;
    dp_ctx *ctx = open_shards(m);
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *par, *net;
    dp_value out;
    CHECK_OK(dp_module_create(ctx, &bits_config, &net));
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(dp_split_rows(rows_now, SHARDS, NULL, rows, &parts));
    for (int i = 0; i < info.local_count; i++)
        own += rows[info.rank_first + i];
    dp_tensor batch = dp_wrap_const(x, DP_F32, 1, &own);
    CHECK_OK(dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, dp_of(scope, &batch)), dp_none(),
                       NULL, &out, NULL));
    dp_close(ctx);
}

static void reduce_by_the_book(dp_dtype dtype, const void *const *in, double alpha, double beta,
                               size_t count, void *out)
{
    number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                    .op = DP_OP_SUM,
                                    .dtype = dtype,
                                    .count = count,
                                    .out = &out,
                                    .in = in,
                                    .out_count = 1,
                                    .in_count = SHARDS,
                                    .alpha = alpha,
                                    .beta = beta});
}

/* Ranks without rows are zeros in the tree, and not in the divisor. */
static void bits_by_the_book(int takers, bits *out)
{
    static float send[SHARDS][BITS];
    static uint16_t halves[SHARDS][SHARDS * BITS];
    uint16_t whole[SHARDS * BITS];
    const void *in[SHARDS], *half_in[SHARDS];
    memset(send, 0, sizeof send);
    memset(halves, 0, sizeof halves);
    for (int r = 0; r < SHARDS; r++) {
        if (r < takers)
            fill_sent(r, send[r], halves[r]);
        in[r] = send[r];
        half_in[r] = halves[r];
    }
    bool all = takers == SHARDS;
    reduce_by_the_book(DP_F32, in, 1, takers, BITS, out->mean[0]);
    reduce_by_the_book(DP_F16, half_in, all ? 1 : 1 / (double)takers, all ? takers : 1,
                       SHARDS * BITS, whole);
    memcpy(out->half[0], whole, sizeof out->half[0]);
    memcpy(out->scattered, whole, sizeof out->scattered);
    for (int r = 1; r < SHARDS; r++) {
        memcpy(out->mean[r], out->mean[0], sizeof out->mean[0]);
        memcpy(out->half[r], out->half[0], sizeof out->half[0]);
    }
}

/* Where a process has no rows at all, the methods of one of its ranks run: the memory of the others
   stays as it was. */
static void check_bits(const bits *want, int processes)
{
    int each = SHARDS / processes;
    for (int r = 0; r < SHARDS; r++) {
        bool runs = r < rows_now || (r % each == 0 && r >= rows_now);
        if (!runs)
            continue;
        CHECK_BYTES(all_bits->mean[r], want->mean[r], sizeof want->mean[r]);
        CHECK_BYTES(all_bits->half[r], want->half[r], sizeof want->half[r]);
        CHECK_BYTES(all_bits->scattered[r], want->scattered[r], sizeof want->scattered[r]);
    }
}

TEST_SLOW(means_with_shards_have_the_same_bits, 120)
{
    static bits want;
    shards = SHARDS;
    all_bits = shared_memory(sizeof *all_bits);
    for (rows_now = 1; rows_now <= SHARDS; rows_now += rows_now < 3 ? 1 : 5)
        for (int processes = 1; processes <= SHARDS; processes *= 2)
            for (devices = 1; processes * devices <= SHARDS; devices *= 4) {
                memset(all_bits, 0, sizeof *all_bits);
                bits_by_the_book((int)rows_now, &want);
                in_processes(processes, shards_in_process);
                check_bits(&want, processes);
            }
}
