/* test_report.c - what dp_report_get and dp_report_text say of a module on all ranks. */

#include <stdio.h>
#include "ranked.h"

static const plan how;

static dp_report report_of(const dp_module *par)
{
    dp_report report;
    CHECK_OK(dp_report_get(par, &report));
    return report;
}

/* ---- what is set ----------------------------------------------------------------------------- */

TEST(report_before_the_first_pass_has_the_config)
{
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    dp_report report = report_of(par);
    CHECK_INT(report.job.rank_count, 2);
    CHECK_STR(report.transport, "inside the process");
    CHECK_INT(report.buffers, DP_BUFFERS_FIRST);
    CHECK_STR(report.reducer.name, "net");
    CHECK_INT(report.reducer.reduction, DP_MEAN_RANKS);
    CHECK_INT(report.reducer.unused_units, DP_UNUSED_ERROR);
    CHECK_INT(report.reducer.buckets.wire, DP_F32);
    CHECK(report.reducer.buckets.hook == NULL && !report.reducer.regrouped);
    CHECK_INT(report.reducer.buckets.first_bytes, 1 << 20);
    CHECK_INT(report.reducer.buckets.bytes, 25 << 20);
    CHECK_INT(report.reducer.unit_count, 2);
    CHECK_INT(report.reducer.bytes, (V + W) * 4); /* without what pads v */
    CHECK_INT(report.reducer.pass_count, 0);
    CHECK_INT(report.ignored_count, 0);
    CHECK_F64(report.forward_s + report.mean_forward_s, 0, 0);
    CHECK_F64(report.reducer.mean.compute_s + report.reducer.mean.finish_s, 0, 0);
    dp_close(ctx);
}

TEST(a_report_says_what_was_asked_for)
{
    char text[2000];
    dp_ctx *ctx = open_here(1);
    dp_module *net = make_net(ctx, &how), *par;
    const dp_distributed_config config = {
        .reduction = DP_SUM_RANKS,
        .buffers = DP_BUFFERS_MEAN,
        .unused_params = DP_UNUSED_FIXED,
        .ignored = (const char *const[]){"seen"},
        .ignored_count = 1,
        .buckets = {.first_bytes = 4, .bytes = 8, .wire = DP_BF16, .hook = plain_hook}};
    CHECK_OK(dp_distributed(net, &config, &par));
    dp_report report = report_of(par);
    CHECK_STR(report.transport, "none");
    CHECK_INT(report.buffers, DP_BUFFERS_MEAN);
    CHECK_INT(report.reducer.reduction, DP_SUM_RANKS);
    CHECK_INT(report.reducer.unused_units, DP_UNUSED_FIXED);
    CHECK_INT(report.reducer.buckets.first_bytes, 4);
    CHECK_INT(report.reducer.buckets.bytes, 8);
    CHECK_INT(report.reducer.buckets.wire, DP_BF16);
    CHECK(report.reducer.buckets.hook == plain_hook);
    CHECK(dp_report_text(par, text, sizeof text) > 0);
    CHECK_SAYS(text, "'net': 292 bytes of gradients a rank; sum, on the wire as bf16, by a hook\n");
    CHECK_SAYS(text, "  buffers: their mean; unused parameters: fixed; ignored: 1\n");
    CHECK_SAYS(text, "  2 units in 2 buckets of 4, then 8 bytes; as parameters are listed\n");
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(dp_report_text(par, text, sizeof text) > 0);
    CHECK_SAYS(text, "; as rank 0 had them ready\n");
    CHECK_SAYS(text, "of reduced passes: 1\n");
    dp_close(ctx);
}

/* ---- the table ------------------------------------------------------------------------------- */

TEST(a_table_as_it_is)
{
    static char text[2000], part[2000];
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 3, .thread_count = 6}, &ctx));
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    static const char want[] =
        "process 0 of 1, 0 of 1 on this machine; launcher: none\n"
        "rank 0 to 2 of 3 on cpu, threads for each: 2; transport: inside the process\n"
        "\n"
        "'net': 292 bytes of gradients a rank; mean over ranks\n"
        "  buffers: those of rank 0; unused parameters: an error; ignored: 0\n"
        "  2 units in 1 bucket of 1048576, then 26214400 bytes; as parameters are listed\n"
        "  bucket  units        bytes    left ms    took ms  first parameter\n"
        "       0      2          332      0.000      0.000  w\n"
        "              last ms    mean ms  of reduced passes: 0\n"
        "  forward         0.000      0.000\n"
        "  backward        0.000      0.000\n"
        "  waited          0.000      0.000\n"
        "  travelled       0.000      0.000\n"
        "  hidden            0 %        0 %\n";
    CHECK_INT(dp_report_text(par, text, sizeof text), sizeof want - 1);
    CHECK_STR(text, want);
    CHECK_INT(dp_report_text(par, NULL, 0), sizeof want - 1);
    for (size_t bytes = 1; bytes <= sizeof want; bytes++) { /* what fits, and a zero */
        memset(part, 'x', sizeof part);
        CHECK_INT(dp_report_text(par, part, bytes), sizeof want - 1);
        CHECK_BYTES(part, want, bytes - 1);
        CHECK_INT(part[bytes - 1], '\0');
        CHECK_INT(part[bytes], 'x');
    }
    CHECK_INT(dp_report_text(net, text, sizeof text), strchr(want, '\'') - want - 1);
    dp_close(ctx);
}

TEST(only_distributed_wrappers_have_reports)
{
    char text[8] = "before";
    dp_report report;
    dp_ctx *ctx = open_here(2);
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_ERROR(dp_report_get(par, &report), DP_ERR_INVALID,
                "'data_parallel' is not a wrapper by dp_distributed");
    CHECK_ERROR(dp_report_get(net, &report), DP_ERR_INVALID, "'net' is not a wrapper");
    CHECK_ERROR(dp_report_get(NULL, &report), DP_ERR_INVALID, "module is NULL");
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_ERROR(dp_report_get(par, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_INT(dp_report_text(par, NULL, 8), 0);
    CHECK(strstr(dp_last_error(), "text is NULL") != NULL);
    CHECK_INT(dp_report_text(NULL, text, sizeof text), 0);
    CHECK_STR(text, "before");
    dp_close(ctx);
    CHECK_INT(dp_report_text(NULL, NULL, 0), 0);
}

/* ---- times ----------------------------------------------------------------------------------- */

enum { FORWARD_MS = 12, BACKWARD_MS = 25, SLOW_STEPS = 3 };

static dp_status slow_forward(dp_call *call)
{
    rest(FORWARD_MS);
    return net_forward(call);
}

/* "v" may travel while it sleeps on. */
static dp_status slow_backward(dp_call *call)
{
    DP_TRY(add_to(call, 1, 1));
    DP_TRY(dp_grad_ready(call, 1));
    rest(BACKWARD_MS);
    return add_to(call, 0, 1);
}

static dp_module *make_slow(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", slow_forward}, {"backward", slow_backward}};
    return make_net_of(ctx, (dp_module_config){.name = "slow", .methods = methods, .state = &how});
}

static void check_slow(dp_module *par)
{
    dp_reduce_times sum = {.bytes = 0};
    double forward = 0;
    for (int step = 1; step <= SLOW_STEPS; step++) {
        CHECK_OK(forward_and_backward(par, 1, true)); /* is no reduced pass */
        CHECK_OK(forward_and_backward(par, 1, false));
        dp_report report = report_of(par);
        const dp_reduce_times *last = &report.reducer.last, *mean = &report.reducer.mean;
        CHECK_INT(report.reducer.pass_count, step);
        CHECK(report.forward_s >= 1e-3 * FORWARD_MS && report.forward_s < 5);
        CHECK(last->compute_s >= 1e-3 * BACKWARD_MS && last->compute_s < 5);
        CHECK(last->hidden_s <= last->travel_s && last->travel_s < 5 && last->finish_s < 5);
        forward += report.forward_s;
        sum.compute_s += last->compute_s;
        sum.travel_s += last->travel_s;
        sum.hidden_s += last->hidden_s;
        sum.finish_s += last->finish_s;
        sum.bytes += last->bytes;
        CHECK_F64(report.mean_forward_s * step, forward, 1e-9);
        CHECK_F64(mean->compute_s * step, sum.compute_s, 1e-9);
        CHECK_F64(mean->travel_s * step, sum.travel_s, 1e-9);
        CHECK_F64(mean->hidden_s * step, sum.hidden_s, 1e-9);
        CHECK_F64(mean->finish_s * step, sum.finish_s, 1e-9);
        CHECK_INT(mean->bytes, sum.bytes / (size_t)step);
    }
}

/* Nothing travels before the end, and then all at once. */
TEST(times_in_one_process)
{
    dp_ctx *ctx = open_here(2);
    dp_module *par;
    dp_bucket_info a, b;
    CHECK_OK(
        dp_distributed(make_slow(ctx), &(dp_distributed_config){.buckets.first_bytes = 1}, &par));
    check_slow(par);
    dp_report report = report_of(par);
    CHECK_F64(report.reducer.last.hidden_s, 0, 0);
    CHECK_INT(report.reducer.bucket_count, 2);
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 0, &a));
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 1, &b));
    CHECK(a.left_s >= report.reducer.last.compute_s);
    CHECK_F64(a.left_s, b.left_s, 0);
    CHECK_F64(a.travel_s, report.reducer.last.travel_s, 1e-9);
    CHECK_F64(b.travel_s, a.travel_s, 0);
    dp_close(ctx);
}

/* The first bucket travels while backward sleeps. */
static void times_over_shm(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_module *par;
    dp_bucket_info a, b;
    CHECK_OK(
        dp_distributed(make_slow(ctx), &(dp_distributed_config){.buckets.first_bytes = 1}, &par));
    check_slow(par);
    dp_report report = report_of(par);
    CHECK_STR(report.transport, "shared memory");
    CHECK_INT(report.job.process, m->process);
    CHECK(report.reducer.regrouped);
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 0, &a));
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 1, &b));
    CHECK_INT(a.units[0], 1); /* "v" */
    CHECK(a.left_s < b.left_s && a.travel_s > 0);
    CHECK(b.left_s >= 1e-3 * BACKWARD_MS);
    CHECK(b.left_s + 1e-9 >= a.left_s + a.travel_s);
    CHECK_F64(a.travel_s + b.travel_s, report.reducer.last.travel_s, 1e-9);
    dp_close(ctx);
}

TEST(times_of_several_processes)
{
    in_processes(2, times_over_shm);
}

/* A step without data has no forward, and is a reduced pass. */
TEST(an_empty_step_does_not_count_as_a_forward)
{
    dp_ctx *ctx = open_here(1);
    dp_module *par;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value log;
    CHECK_OK(dp_distributed(make_slow(ctx), NULL, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    double forward = report_of(par).forward_s;
    CHECK_OK(dp_train_step(par, scope, dp_none(), NULL, &log));
    CHECK_INT(report_of(par).reducer.pass_count, 2);
    CHECK_F64(report_of(par).forward_s, forward, 0);
    CHECK_F64(report_of(par).mean_forward_s, forward, 1e-12);
    dp_close(ctx);
}

/* Flat buckets of one process are carried one after the other, each with its own times. */
TEST(times_of_flat_buckets)
{
    dp_ctx *ctx = open_here(2);
    dp_module *par;
    dp_bucket_info a, b;
    const dp_distributed_config config = {.buckets = {.first_bytes = 1, .wire = DP_F16}};
    CHECK_OK(dp_distributed(make_slow(ctx), &config, &par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(forward_and_backward(par, 1, false)); /* in the order that it has now */
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 0, &a));
    CHECK_OK(dp_reducer_bucket_get(dp_wrapper_reducer(par), 1, &b));
    CHECK(a.left_s >= 1e-3 * BACKWARD_MS && a.travel_s > 0 && b.travel_s > 0);
    CHECK(b.left_s + 1e-9 >= a.left_s + a.travel_s);
    dp_close(ctx);
}
