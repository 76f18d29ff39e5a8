/* test_shares.c - gradients that are scattered: each rank gets its share of what is reduced. */

#include <math.h>
#include "../examples/custom_device.h"
#include "ranked.h"

/* ---- a net with three parameters ---------------------------------------------------------------
   The gradient of element k of parameter i is (rank + 1) * one_of(i, k) in each backward. `a` and
   `c` are long enough to be shared out, `b` is not.                                              */

enum { A = 1057, B = 5, C = 1400, ALL_OF_THEM = A + B + C };

static const size_t counts[] = {A, B, C};

static float one_of(size_t param, size_t k)
{
    return (float)((param * 331 + k * 7) % 64 + 1);
}

typedef struct habits {
    bool uses[3], fails;
    int fails_on; /* this rank alone */
} habits;

static const habits uses_all = {.uses = {true, true, true}};

static dp_status add_numbers(const dp_call *call, size_t param)
{
    float *data = dp_scope_alloc(call->scope, counts[param] * sizeof *data);
    float factor = (float)call->grad.as.f * (float)(rank_of(call) + 1);
    dp_tensor grad = dp_grad_tensor(call, param);
    dp_tensor host = dp_wrap(data, DP_F32, grad.ndim, grad.shape);
    DP_TRY(dp_copy(call->ctx, &host, &grad, NULL));
    for (size_t k = 0; k < counts[param]; k++)
        data[k] += factor * one_of(param, k);
    return dp_copy(call->ctx, &grad, &host, NULL);
}

static dp_status three_backward(dp_call *call)
{
    const habits *own = call->state;
    if (own->fails && own->fails_on == rank_of(call))
        return dp_error(DP_ERR_USER, "no backward today");
    for (size_t i = 3; i-- > 0;) {
        if (!own->uses[i])
            continue;
        DP_TRY(add_numbers(call, i));
        DP_TRY(dp_grad_ready(call, i));
    }
    return DP_OK;
}

static const dp_method three_methods[] = {{"forward", number_forward},
                                          {"backward", three_backward}};
static const dp_param_config three_params[] = {{.name = "a", .ndim = 2, .shape = {7, A / 7}},
                                               {.name = "b", .ndim = 1, .shape = {B}},
                                               {.name = "c", .ndim = 1, .shape = {C}}};

static dp_module *three(dp_ctx *ctx, const habits *own, bool packed)
{
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "three",
                                                  .methods = three_methods,
                                                  .method_count = 2,
                                                  .params = three_params,
                                                  .param_count = 3,
                                                  .packed = packed,
                                                  .state = own},
                              &net));
    return net;
}

static dp_module *three_par(dp_ctx *ctx, const habits *own, bool packed,
                            const dp_distributed_config *config)
{
    dp_module *net = three(ctx, own, packed), *par = NULL;
    CHECK_OK(dp_distributed(net, config, &par));
    return par;
}

/* ---- which share is whose -------------------------------------------------------------------- */

static size_t each_of(size_t count, int ranks)
{
    size_t each = count / (size_t)ranks / 16 * 16;
    return ranks > 1 && each >= 256 ? each : 0;
}

/* Shares of elements, by the parameter: the three together, or each by itself. */
static void check_infos(dp_module *par, bool together)
{
    int ranks = info_here(dp_module_ctx(par)).rank_count;
    for (size_t i = 0, at = 0; i < 3; at += counts[i++]) {
        dp_param_info info;
        size_t each = each_of(together ? ALL_OF_THEM : counts[i], ranks);
        CHECK_OK(dp_module_param(par, i, &info));
        CHECK(info.reduced);
        CHECK_INT(info.share, each);
        CHECK_INT(info.share_at, each > 0 && together ? at : 0);
    }
}

static bool has_share(const dp_param_info *info, int ranks, int rank, size_t k)
{
    size_t at = info->share_at + k;
    return info->share == 0 || at >= info->share * (size_t)ranks ||
           at / info->share == (size_t)rank;
}

/* The gradients that each owner has to have, of numbers times `factor`; how many of the others are
   not what all ranks together have. */
static size_t check_shares(dp_module *par, double factor, bool whole)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_info job = info_here(ctx);
    static float got[C];
    size_t void_count = 0;
    for (size_t owner = 0; owner < dp_owner_count(par); owner++)
        for (size_t i = 0; i < 3; i++) {
            dp_param_info info;
            dp_tensor data, grad;
            CHECK_OK(dp_module_param(par, i, &info));
            CHECK_OK(dp_owner_edit(par, owner, i, &data, &grad));
            CHECK_OK(dp_read(ctx, &grad, got, counts[i] * sizeof(float)));
            for (size_t k = 0; k < counts[i]; k++) {
                double want = factor * (double)one_of(i, k);
                if (whole || has_share(&info, job.rank_count, job.rank_first + (int)owner, k))
                    CHECK_F64(got[k], want, 0);
                else
                    void_count += fabs((double)got[k] - want) > 0;
            }
        }
    return void_count;
}

/* The mean of rank + 1. */
static double mean_rank(dp_ctx *ctx)
{
    return (info_here(ctx).rank_count + 1) / 2.0;
}

static bool scatters(const dp_module *par)
{
    dp_reducer_info info;
    CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
    return info.scatters;
}

static void scattered_passes(dp_ctx *ctx, bool packed, size_t bucket_bytes)
{
    double mean = mean_rank(ctx);
    int ranks = info_here(ctx).rank_count;
    dp_module *par = three_par(
        ctx, &uses_all, packed,
        &(dp_distributed_config){.bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
    bool together = packed && bucket_bytes == 0;
    check_infos(par, together);
    CHECK_OK(forward_and_backward(par, 1, false)); /* as ranks have had it; then it is regrouped */
    check_shares(par, mean, true);
    CHECK(!dp_grads_are_scattered(par) && !scatters(par));
    CHECK_OK(dp_grads_scatter(par, true));
    CHECK(!dp_grads_are_scattered(par)); /* from the next backward on */
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_zero_grad(par));
        CHECK(!dp_grads_are_scattered(par));
        CHECK_OK(forward_and_backward(par, i + 1, true)); /* stays local, and is added to */
        CHECK(!dp_grads_are_scattered(par));
        CHECK_OK(forward_and_backward(par, 1, false));
        CHECK(dp_grads_are_scattered(par) && scatters(par));
        size_t some = check_shares(par, (i + 2) * mean, false);
        if (info_here(ctx).rank_first == 0) /* another rank's own may be what the mean is */
            CHECK_INT(some > 0, each_of(together ? ALL_OF_THEM : C, ranks) > 0);
        CHECK_ERROR(forward_and_backward(par, 1, false), DP_ERR_STATE,
                    "gradients of 'three' hold what was reduced, which would be added up again: "
                    "dp_zero_grad comes first");
    }
    CHECK_OK(dp_grads_scatter(par, false));
    CHECK(dp_grads_are_scattered(par)); /* those that are there */
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_shares(par, mean, true);
    CHECK(!dp_grads_are_scattered(par) && !scatters(par));
    CHECK_OK(forward_and_backward(par, 1, false)); /* which can be added to */
    check_shares(par, 2 * mean, true);
}

static void passes_of_all_sorts(dp_ctx *ctx)
{
    scattered_passes(ctx, true, 0);
    scattered_passes(ctx, false, 0);
    scattered_passes(ctx, true, 1); /* each parameter is a stretch, and a bucket */
    dp_close(ctx);
}

static void passes_of_processes(meeting *m)
{
    passes_of_all_sorts(open_over_shm(m, 1, 0));
}

TEST(ranks_get_their_shares)
{
    for (int devices = 1; devices <= 4; devices++)
        passes_of_all_sorts(open_on(toy_device(), devices));
    passes_of_all_sorts(open_on(toy_device(), 8));
    in_processes(2, passes_of_processes);
    in_processes(3, passes_of_processes);
}

/* The largest parameters stay in one bucket with those that they are shared out with, and buckets
   are complete when the last of these is. */
static void buckets_of_stretches(meeting *m)
{
    static const uint32_t last_first[] = {2, 0, 1};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_distributed_config config = {.first_bucket_bytes = 1, .bucket_bytes = 4 * (A * 4 + 1)};
    dp_module *par = three_par(ctx, &uses_all, true, &config);
    const dp_reducer *reducer = dp_wrapper_reducer(par);
    dp_bucket_info bucket;
    dp_reducer_info info;
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_reducer_info_get(reducer, &info));
    CHECK_INT(info.bucket_count, 2); /* c; b and a */
    CHECK_OK(dp_reducer_bucket_get(reducer, 0, &bucket));
    CHECK_INT(bucket.unit_count, 1);
    CHECK_OK(dp_grads_scatter(par, true));
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_reducer_info_get(reducer, &info));
    CHECK_INT(info.bucket_count, 2); /* c; then a and b, which are one stretch */
    CHECK_INT(info.last.bytes, ALL_OF_THEM * sizeof(float));
    for (size_t b = 0, k = 0; b < 2; b++) {
        CHECK_OK(dp_reducer_bucket_get(reducer, b, &bucket));
        for (size_t u = 0; u < bucket.unit_count; u++)
            CHECK_INT(bucket.units[u], last_first[k++]);
    }
    dp_close(ctx);
}

TEST(what_is_shared_out_together_is_in_one_bucket)
{
    in_processes(2, buckets_of_stretches);
}

/* ---- units that nobody uses ------------------------------------------------------------------ */

static void check_grad(dp_module *par, size_t param, size_t k, double want)
{
    static float got[C];
    dp_tensor data, grad;
    CHECK_OK(dp_owner_edit(par, 0, param, &data, &grad));
    CHECK_OK(dp_read(dp_module_ctx(par), &grad, got, counts[param] * sizeof(float)));
    CHECK_F64(got[k], want, 0);
}

/* The first element is rank 0's. A stretch of which something is used travels, in all its length;
   one that nobody uses stays as it is. */
static void some_unused(dp_ctx *ctx, size_t bucket_bytes)
{
    const habits first_alone = {.uses = {true}}, last_alone = {.uses = {false, false, true}};
    double mean = mean_rank(ctx);
    for (int i = 0; i < 4; i++) {
        bool last = i % 2 > 0;
        dp_module *par = three_par(
            ctx, last ? &last_alone : &first_alone, true,
            &(dp_distributed_config){.bucket_bytes = bucket_bytes,
                                     .unused_params = i < 2 ? DP_UNUSED_FOUND : DP_UNUSED_FIXED});
        int rank = info_here(ctx).rank_first;
        CHECK_OK(dp_grads_scatter(par, true));
        for (int pass = 0; pass < 3; pass++) {
            CHECK_OK(dp_zero_grad(par));
            CHECK_OK(forward_and_backward(par, 1, false));
            if (rank == 0)
                check_grad(par, 0, 0, last ? 0 : mean * (double)one_of(0, 0));
            if (rank == 0 && bucket_bytes > 0)
                check_grad(par, 2, 0, last ? mean * (double)one_of(2, 0) : 0);
            check_grad(par, 2, C - 1, last ? mean * (double)one_of(2, C - 1) : 0);
            check_grad(par, 1, 0, 0);
        }
    }
    dp_close(ctx);
}

static void unused_in_processes(meeting *m)
{
    some_unused(open_over_shm(m, 1, 0), m->process_count == 2 ? 0 : 1);
}

TEST(what_nobody_uses_stays_as_it_is)
{
    some_unused(open_on(toy_device(), 2), 0);
    some_unused(open_on(toy_device(), 3), 1);
    in_processes(2, unused_in_processes);
    in_processes(3, unused_in_processes);
}

/* ---- a pass that fails ----------------------------------------------------------------------- */

static void one_has_no_backward(meeting *m)
{
    habits own = {.uses = {true, true, true}, .fails_on = 1};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = three_par(ctx, &own, true, NULL);
    CHECK_OK(dp_grads_scatter(par, true));
    for (int i = 0; i < 3; i++) {
        own.fails = i == 1;
        CHECK_OK(dp_zero_grad(par));
        dp_status status = forward_and_backward(par, 1, false);
        CHECK_INT(status, own.fails ? DP_ERR_USER : DP_OK);
        if (!own.fails)
            check_shares(par, mean_rank(ctx), false);
    }
    dp_close(ctx);
}

TEST(the_pass_after_one_that_failed_is_scattered)
{
    in_processes(2, one_has_no_backward);
}

/* ---- what cannot be scattered ---------------------------------------------------------------- */

static dp_status hook(const dp_bucket *bucket, void *user)
{
    (void)user;
    return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, bucket->dtype, bucket->op,
                                bucket->scale);
}

static void check_refused(dp_module *par, const char *why)
{
    char text[160];
    snprintf(text, sizeof text, "dp_grads_scatter: %s", why);
    CHECK_STATUS(dp_grads_scatter(par, true), DP_ERR_UNSUPPORTED);
    CHECK_STR(dp_last_error(), text);
    CHECK_OK(dp_grads_scatter(par, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_shares(par, mean_rank(dp_module_ctx(par)), true);
    CHECK(!scatters(par));
}

static void one_has_two_devices(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1 + m->process, 0);
    dp_module *par = three_par(ctx, &uses_all, true, NULL);
    check_refused(par, m->process == 0 ? "another process cannot"
                                       : "'distributed' has devices that share parameters");
    dp_close(ctx);
}

/* Their table has no more than it must. */
static void toys_of_processes(meeting *m)
{
    dp_ctx *ctx = open_job(m, 1, toy_device());
    check_refused(three_par(ctx, &uses_all, true, NULL),
                  "'distributed' has collectives without a reduce_scatter");
    dp_close(ctx);
}

TEST(what_cannot_be_scattered)
{
    dp_ctx *ctx = open_here(2);
    dp_module *net = three(ctx, &uses_all, true);
    CHECK_ERROR(dp_grads_scatter(net, true), DP_ERR_INVALID,
                "dp_grads_scatter: 'three' has no gradients that ranks reduce");
    CHECK_OK(dp_grads_scatter(net, false));
    CHECK(!dp_grads_are_scattered(net));
    CHECK(!dp_grads_are_scattered(NULL));
    CHECK_STATUS(dp_grads_scatter(NULL, true), DP_ERR_INVALID);
    check_refused(three_par(ctx, &uses_all, true, NULL),
                  "'distributed' has devices that share parameters");
    dp_close(ctx);
    ctx = open_on(toy_device(), 2);
    check_refused(three_par(ctx, &uses_all, true, &(dp_distributed_config){.hook = hook}),
                  "'distributed' has a hook");
    check_refused(three_par(ctx, &uses_all, true, &(dp_distributed_config){.wire = DP_F16}),
                  "'distributed' has a wire dtype");
    dp_close(ctx);
    in_processes(2, one_has_two_devices);
    in_processes(2, toys_of_processes);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_ranks_get_their_shares, 60)
{
    on_gpus("3", passes_of_processes);
    on_gpus("21", passes_of_processes);
}
#endif
