/* test_mismatch.c - ranks that take what has the same size for the same thing: reducers in another
   order, wrappers in another order. Nothing is added up; both sides of the mistake are named. */

#include "ranked.h"

/* On GPUs the mistake is seen when they are waited for. */
static void check_both(dp_ctx *ctx, dp_status status, const char *one, const char *other)
{
    if (meeting_gpus != NULL && status == DP_OK)
        status = dp_wait(ctx);
    CHECK_INT(status, DP_ERR_REMOTE);
    CHECK_SAYS(dp_last_error(), one);
    CHECK_SAYS(dp_last_error(), other);
    CHECK_SAYS(dp_last_error(), "all must make the same calls in the same order");
    CHECK(dp_failure(ctx, NULL));
    if (meeting_gpus != NULL)
        forget_findings();
}

static dp_ctx *open_mixed(meeting *m)
{
    if (meeting_gpus != NULL)
        expect_findings();
    return open_over_shm(m, 1, TIMEOUT_MS);
}

/* ---- two reducers ------------------------------------------------------------------------------
   Each has one unit of one number.                                                               */

typedef struct two {
    dp_ctx *ctx;
    dp_reducer *reducers[2];
    dp_tensor grads[2];
} two;

static void two_begin(two *own, meeting *m, dp_reducer_config config, const char *const *names)
{
    own->ctx = open_mixed(m);
    dp_scope *scope = dp_scope_begin(own->ctx); /* ends with the context */
    for (int i = 0; i < 2; i++) {
        dp_tensor *grad = &own->grads[i];
        CHECK_OK(dp_tensor_new(scope, dp_local_device(own->ctx, 0), DP_F32, 0, NULL, grad));
        CHECK_OK(dp_fill(own->ctx, grad, dp_float(1)));
        void *local[] = {grad->data};
        dp_block block = {DP_F32, 1, local};
        config.name = names[i];
        config.blocks = &block;
        config.block_count = 1;
        CHECK_OK(dp_reducer_create(own->ctx, &config, &own->reducers[i]));
    }
}

static const char *const left_and_right[] = {"left", "right"};

/* Their passes are begun in the same order, so a courier carries the left one alone. */
static void finished_in_another_order(meeting *m)
{
    static const dp_unused rules[] = {DP_UNUSED_ERROR, DP_UNUSED_FOUND};
    for (int i = 0; i < 2; i++) {
        two own;
        two_begin(&own, m, (dp_reducer_config){.reduction = DP_SUM_RANKS, .unused_units = rules[i]},
                  left_and_right);
        for (int k = 0; k < 2; k++) {
            CHECK_OK(dp_reducer_begin(own.reducers[k], NULL));
            CHECK_OK(dp_reducer_ready(own.reducers[k], 0, 0, NULL));
        }
        check_both(own.ctx, dp_reducer_finish(own.reducers[m->process]),
                   "gradients of 'left', in dp_reducer_finish",
                   "gradients of 'right' (reducer 2), in dp_reducer_finish");
        dp_close(own.ctx);
        wait_for_all(m);
    }
}

TEST(reducers_that_finish_in_another_order)
{
    in_processes(2, finished_in_another_order);
}

static void begun_in_another_order(meeting *m)
{
    two own;
    two_begin(&own, m, (dp_reducer_config){.reduction = DP_SUM_RANKS}, left_and_right);
    dp_reducer *first = own.reducers[m->process];
    CHECK_OK(dp_reducer_begin(first, NULL));
    dp_status status = dp_reducer_ready(first, 0, 0, NULL); /* from here on its bucket travels */
    for (int ms = 0; status == DP_OK && ms < TIMEOUT_MS; ms++) {
        rest(1);
        status = dp_reducer_ready(first, 0, 0, NULL);
        status = status == DP_ERR_STATE ? DP_OK : status; /* twice */
    }
    check_both(own.ctx, status, "bucket 0 of 'left', unit 0",
               "bucket 0 of 'right', unit 0 (reducer 2)");
    dp_close(own.ctx);
}

TEST(buckets_of_reducers_that_began_in_another_order)
{
    in_processes(2, begun_in_another_order);
}

static void samples_in_another_order(meeting *m)
{
    static const char *const names[] = {"net", "net"};
    const double samples = 3;
    two own;
    two_begin(&own, m, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES}, names);
    check_both(own.ctx,
               dp_reducer_begin(own.reducers[m->process], &(dp_reduce_pass){.samples = &samples}),
               "gradients of 'net', in dp_reducer_begin",
               "gradients of 'net' (reducer 2), in dp_reducer_begin");
    dp_close(own.ctx);
}

TEST(samples_of_reducers_that_began_in_another_order)
{
    in_processes(2, samples_in_another_order);
}

/* What a program does between begin and finish is its own. */
static void a_sum_in_between(meeting *m)
{
    const double samples = 3;
    float one = 1;
    const dp_part part = {.send = &one, .recv = &one};
    char text[400];
    two own;
    two_begin(&own, m, (dp_reducer_config){.reduction = DP_MEAN_SAMPLES}, left_and_right);
    CHECK_OK(dp_reducer_begin(own.reducers[1], &(dp_reduce_pass){.samples = &samples}));
    CHECK_OK(dp_all_reduce(own.ctx, &part, 1, DP_F32, DP_OP_SUM));
    CHECK(dp_recent_collectives(own.ctx, text, sizeof text) > 0);
    *strchr(text, '\n') = '\0'; /* the last one comes first */
    CHECK_SAYS(text, ", all_reduce of 1 f32 (sum): ended");
    CHECK_OK(dp_reducer_ready(own.reducers[1], 0, 0, NULL));
    CHECK_OK(dp_reducer_finish(own.reducers[1]));
    dp_close(own.ctx);
}

TEST(a_sum_between_begin_and_finish_is_for_no_reducer)
{
    in_processes(2, a_sum_in_between);
}

/* ---- buckets of one reducer --------------------------------------------------------------------
   A table that loses a collective puts the next bucket in the place of this one.                 */

enum { EQUAL = 16 };

static int to_lose; /* of all_reduces of so many numbers, this one */

static dp_status losing_run(dp_comm *comm, const dp_coll_call *call)
{
    if (call->verb == DP_ALL_REDUCE && call->count == EQUAL && to_lose-- == 0)
        return DP_OK;
    return dp_shm_coll()->run(comm, call);
}

static dp_coll_ops losing;

static dp_status losing_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = dp_shm_coll()->open(host, config, out);
    if (status == DP_OK)
        (*out)->ops = &losing;
    return status;
}

static void one_loses_a_bucket(meeting *m)
{
    const dp_coll_ops *const colls[] = {&losing, NULL};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx;
    grads g;
    losing = *dp_shm_coll();
    losing.open = losing_open;
    losing.run = losing_run;
    to_lose = m->process == 1 ? 2 : -1;
    config.colls = colls;
    config.timeout_ms = TIMEOUT_MS;
    CHECK_OK(dp_open(&config, &ctx));
    layers_begin(&g, ctx, EQUAL,
                 (dp_reducer_config){.name = "net", .buckets = {.first_bytes = 1, .bytes = 1}});
    dp_status status = dp_reducer_begin(g.reducer, NULL);
    for (uint32_t unit = 0; unit < LAYERS && status == DP_OK; unit++)
        status = dp_reducer_ready(g.reducer, 0, unit, NULL);
    if (status == DP_OK)
        status = dp_reducer_finish(g.reducer);
    check_both(ctx, status, "bucket 2 of 'net', unit 2", "bucket 3 of 'net', unit 3");
    dp_close(ctx);
    free(g.local[0]);
}

TEST(buckets_of_one_size_do_not_change_places)
{
    in_processes(2, one_loses_a_bucket);
}

/* ---- two wrappers ---------------------------------------------------------------------------- */

static void buffers_in_another_order(meeting *m)
{
    static const plan how;
    dp_ctx *ctx = open_mixed(m);
    dp_module *pars[2];
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_distributed(
            make_net_of(ctx, (dp_module_config){.name = left_and_right[i], .state = &how}), NULL,
            &pars[i]));
    const bool late = meeting_gpus != NULL; /* when backward is through */
    check_both(ctx, forward_and_backward(pars[m->process], 1, false),
               late ? "of 'left'" : "buffers of 'left'",
               late ? "of 'right'" : "buffers of 'right' (reducer 2)");
    dp_close(ctx);
}

TEST(wrappers_in_another_order)
{
    in_processes(2, buffers_in_another_order);
}

#if defined(TEST_SIM)
/* ---- over NCCL, which compares nothing ------------------------------------------------------- */

TEST_SLOW(cuda_nccl_reducers_in_another_order, 60)
{
    on_gpus("11", finished_in_another_order);
    on_gpus("11", begun_in_another_order);
    on_gpus("11", samples_in_another_order);
}

TEST_SLOW(cuda_nccl_wrappers_in_another_order, 60)
{
    on_gpus("11", buffers_in_another_order);
}
#endif
