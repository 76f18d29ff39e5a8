/* test_failure_reason.c - why a job has failed, where its table of collectives cannot tell:
   processes hear it over the connections by which they have met. */

#include <pthread.h>
#include "grads.h"
#include "world.h"

enum { LONG_MS = 9000 };

static dp_status add_up(dp_ctx *ctx)
{
    int32_t n = me;
    dp_part part = {.send = &n, .recv = &n};
    return dp_all_reduce(ctx, &part, 1, DP_I32, DP_OP_SUM);
}

/* The collective fails soon, with the status and words of the process that was first, and all later
   calls do so, too. */
static void check_reason(dp_ctx *ctx, dp_status want, int rank, const char *text)
{
    dp_failure_info failure;
    double began = now_ms();
    CHECK_ERROR(add_up(ctx), want, text);
    CHECK(now_ms() - began < 2 * SOON_MS * test_timeout_scale());
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, want);
    CHECK_INT(failure.rank, rank);
    CHECK_SAYS(failure.text, text);
    CHECK_ERROR(add_up(ctx), want, text);
}

/* ---- a process that gives up ----------------------------------------------------------------- */

static bool closes;

static void one_gives_up(void)
{
    dp_ctx *ctx;
    use_tcp();
    CHECK_OK(open_world(LONG_MS, NULL, &ctx));
    check_sum(ctx);
    if (me == 1) {
        dp_abort(ctx, DP_ERR_ABORTED, "this leads nowhere");
        CHECK_ERROR(add_up(ctx), DP_ERR_ABORTED, "this leads nowhere");
        rest(closes ? 0 : 500);
    } else {
        rest(me == 2 ? 100 : 0); /* it hears of it before its call, or in it */
        check_reason(ctx, DP_ERR_ABORTED, 1, ") failed: this leads nowhere");
    }
    dp_close(ctx);
}

TEST(process_that_gives_up_is_quoted)
{
    for (int i = 0; i < 2; i++) {
        closes = i == 1;
        run_world(5, one_gives_up);
    }
}

/* The process itself waits for the others meanwhile. */
static void *give_up_soon(void *ctx)
{
    rest(300);
    dp_abort(ctx, DP_ERR_ABORTED, "this leads nowhere");
    return NULL;
}

static void one_gives_up_beside(void)
{
    dp_ctx *ctx;
    pthread_t beside;
    use_tcp();
    CHECK_OK(open_world(LONG_MS, NULL, &ctx));
    check_sum(ctx);
    if (me == 1) {
        CHECK_INT(pthread_create(&beside, NULL, give_up_soon, ctx), 0);
        check_reason(ctx, DP_ERR_ABORTED, 1, "this leads nowhere");
        CHECK_INT(pthread_join(beside, NULL), 0);
    } else if (me == 2) {
        rest(600);
        check_reason(ctx, DP_ERR_ABORTED, 1, ") failed: this leads nowhere");
    } else {
        check_reason(ctx, DP_ERR_ABORTED, 1, ") failed: this leads nowhere");
    }
    dp_close(ctx);
}

TEST(process_that_gives_up_while_waiting_is_quoted)
{
    run_world(3, one_gives_up_beside);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static dp_coll_ops table; /* boot_coll but for what a test has put in */

static dp_status (*all_reduce)(dp_comm *comm, const dp_coll_call *call); /* a test's */

static dp_status table_run(dp_comm *comm, const dp_coll_call *call)
{
    return call->verb == DP_ALL_REDUCE ? all_reduce(comm, call) : boot_coll()->run(comm, call);
}

static int plain; /* so many communicators are boot_coll's; the courier's is the second */

static dp_status table_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = boot_coll()->open(host, config, out);
    if (status == DP_OK && plain-- <= 0)
        (*out)->ops = &table;
    return status;
}

static dp_ctx *open_over_table(dp_status (*reduce)(dp_comm *, const dp_coll_call *))
{
    static const dp_coll_ops *const colls[] = {&table, NULL};
    dp_ctx *ctx;
    use_tcp();
    table = *boot_coll();
    table.open = table_open;
    all_reduce = reduce;
    table.run = table_run;
    CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = 1, .timeout_ms = LONG_MS}, &ctx));
    return ctx;
}

/* Here alone, and others wait for this process. */
static dp_status break_here(dp_comm *comm, const dp_coll_call *call)
{
    if (me != 1)
        return boot_coll()->run(comm, call);
    return dp_error(DP_ERR_DEVICE, "the card is gone");
}

static dp_status break_here_late(dp_comm *comm, const dp_coll_call *call)
{
    rest(me == 1 ? 300 : 0);
    return break_here(comm, call);
}

static void one_breaks(void)
{
    dp_ctx *ctx = open_over_table(break_here);
    check_reason(ctx, DP_ERR_DEVICE, 1,
                 me == 1 ? "the card is gone" : ") failed: the card is gone");
    dp_close(ctx);
}

TEST(failure_in_one_process_is_quoted)
{
    run_world(3, one_breaks);
}

/* What has failed here already stays the reason here. */
static void one_breaks_after_another(void)
{
    dp_ctx *ctx = open_over_table(break_here_late);
    rest(me == 2 ? 100 : 0);
    if (me == 2)
        dp_abort(ctx, DP_ERR_ABORTED, "the house is full");
    if (me == 1)
        check_reason(ctx, DP_ERR_DEVICE, 1, "the card is gone");
    else
        check_reason(ctx, DP_ERR_ABORTED, 2, "the house is full");
    dp_close(ctx);
}

TEST(second_failure_is_quoted_on_its_own_rank)
{
    run_world(3, one_breaks_after_another);
}

/* Others see over wires of their own that something is wrong, and not what. */
static dp_status wire_breaks(dp_comm *comm, const dp_coll_call *call)
{
    (void)comm, (void)call;
    rest(100 * me);
    return dp_error(DP_ERR_REMOTE, "the wire to rank 1 is cut");
}

static void one_is_cut_off(void)
{
    dp_ctx *ctx = open_over_table(wire_breaks);
    rest(me == 1 ? 300 : 0); /* the others have noticed by then */
    if (me == 1)
        dp_abort(ctx, DP_ERR_NO_MEMORY, "the house is full");
    else
        check_reason(ctx, DP_ERR_ABORTED, 1, ") failed: the house is full");
    rest(me == 1 ? 100 : 0);
    dp_close(ctx);
}

/* Nobody knows more than rank 0, which is the first to say something. */
static void all_are_cut_off(void)
{
    dp_ctx *ctx = open_over_table(wire_breaks);
    check_reason(ctx, DP_ERR_REMOTE, 0, "the wire to rank 1 is cut");
    dp_close(ctx);
}

TEST(a_broken_wire_is_explained_if_somebody_can)
{
    run_world(4, one_is_cut_off);
    run_world(2, all_are_cut_off);
}

/* ---- a process that closes in an open pass --------------------------------------------------- */

static dp_status wait_in_vain(dp_comm *comm, const dp_coll_call *call)
{
    while (me == 1 && !comm->host->aborted(comm->host))
        rest(1);
    return wire_breaks(comm, call);
}

static void one_leaves_a_pass(void)
{
    grads g;
    dp_failure_info failure;
    plain = 1;
    layers_begin(&g, open_over_table(wait_in_vain), 10, (dp_reducer_config){0});
    double began = now_ms();
    CHECK_OK(dp_reducer_begin(g.reducer, NULL));
    if (me == 0) {
        backward(&g);
        CHECK_ERROR(dp_reducer_finish(g.reducer), DP_ERR_ABORTED,
                    ") failed: dp_close: in an open pass");
        CHECK(dp_failure(g.ctx, &failure));
        CHECK_INT(failure.rank, 1);
    }
    dp_close(g.ctx);
    CHECK(now_ms() - began < 2 * SOON_MS * test_timeout_scale());
    free(g.local[0]);
}

TEST(replica_that_leaves_a_pass_is_named)
{
    run_world(2, one_leaves_a_pass);
}
