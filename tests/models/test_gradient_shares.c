/* test_gradient_shares.c - gradients that are scattered: each rank gets its share of what is
   reduced, and an optimizer whose state is spread steps no more than that. */

#include <math.h>
#include "dp_train.h"
#include "examples/custom_device.h"
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

static dp_module *three_named(dp_ctx *ctx, const char *name, const habits *own, bool packed)
{
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = name,
                                                  .methods = three_methods,
                                                  .method_count = 2,
                                                  .params = three_params,
                                                  .param_count = 3,
                                                  .packed = packed,
                                                  .state = own},
                              &net));
    return net;
}

static dp_module *three(dp_ctx *ctx, const habits *own, bool packed)
{
    return three_named(ctx, "three", own, packed);
}

static dp_module *three_par(dp_ctx *ctx, const habits *own, bool packed,
                            const dp_distributed_config *config)
{
    dp_module *net = three(ctx, own, packed), *par = NULL;
    CHECK_OK(dp_distributed(net, config, &par));
    return par;
}

/* ---- processes ------------------------------------------------------------------------------- */

static int device_count = 1,
           more_devices; /* of the first process; and of each than of the one before */

static dp_ctx *open_process(meeting *m)
{
    return open_over_shm(m, device_count + more_devices * m->process, 0);
}

/* Several devices of one process share its parameters. */
static void in_jobs(void (*body)(meeting *m))
{
    in_processes(2, body);
    in_processes(3, body);
    device_count = 2;
    in_processes(2, body);
    device_count = more_devices = 1;
    in_processes(2, body);
    device_count = 3;
    more_devices = -1;
    in_processes(3, body);
    device_count = 1;
    more_devices = 0;
}

/* ---- which share is whose -------------------------------------------------------------------- */

static size_t each_of(size_t count, int ranks)
{
    size_t each = count / (size_t)ranks / 16 * 16;
    return ranks > 1 && each >= 256 ? each : 0;
}

/* Shares of three parameters from `first` on: of all together, or of each by itself. */
static void check_infos(dp_module *par, size_t first, bool together)
{
    int ranks = info_here(dp_module_ctx(par)).rank_count;
    for (size_t i = 0, at = 0; i < 3; at += counts[i++]) {
        dp_param_info info;
        size_t share_at, each = each_of(together ? ALL_OF_THEM : counts[i], ranks);
        CHECK_OK(dp_module_param(par, first + i, &info));
        CHECK(info.reduced);
        CHECK_INT(share_of(par, first + i, &share_at), each);
        if (each > 0)
            CHECK_INT(share_at, together ? at : 0);
    }
}

/* ---- layers that are short -------------------------------------------------------------------
   None would be shared out by itself. In memory the last one comes first.                        */

enum { SHORTS = 6, SHORT = 160 };

typedef enum lie { /* how numbers lie */
                   OWN_MEMORY,
                   EMPTY_BETWEEN,  /* likewise, and one has no elements */
                   FROZEN_BETWEEN, /* gradients adjoin, numbers do not */
                   APART,          /* likewise, as they are the user's */
                   IN_A_ROW,       /* both do, but the user may have numbers elsewhere */
                   ODD_IN_A_ROW    /* numbers adjoin, gradients do not */
} lie;

enum { FROZEN = 2 }; /* the parameter, or that without elements */

static size_t short_of(lie lies)
{
    return lies == ODD_IN_A_ROW ? SHORT - 10 : SHORT;
}

static dp_status shorts_backward(dp_call *call)
{
    for (size_t i = SHORTS; i-- > 0;) {
        dp_param_info info;
        DP_TRY(dp_module_param(call->module, i, &info));
        size_t count = (size_t)dp_tensor_count(&info.data);
        if (info.frozen || count == 0)
            continue;
        dp_tensor grad = dp_grad_tensor(call, i);
        float *numbers = dp_scope_alloc(call->scope, count * sizeof *numbers);
        dp_tensor host = dp_wrap(numbers, DP_F32, grad.ndim, grad.shape);
        for (size_t k = 0; k < count; k++)
            numbers[k] = (float)(rank_of(call) + 1) * one_of(i, k);
        DP_TRY(dp_copy(call->ctx, &grad, &host, NULL));
        DP_TRY(dp_grad_ready(call, i));
    }
    return DP_OK;
}

/* memory: of the user's. */
static dp_module *shorts_par(dp_ctx *ctx, lie lies, float *memory,
                             const dp_distributed_config *config)
{
    static const dp_method methods[] = {{"forward", number_forward}, {"backward", shorts_backward}};
    static const char *const names[SHORTS] = {"a", "b", "c", "d", "e", "f"};
    dp_param_config params[SHORTS];
    dp_module *net = NULL, *par = NULL;
    size_t step = lies == APART ? 2 * SHORT : short_of(lies);
    for (size_t i = 0; i < SHORTS; i++)
        params[i] = (dp_param_config){
            .name = names[i],
            .ndim = 1,
            .shape = {lies == EMPTY_BETWEEN && i == FROZEN ? 0 : (int64_t)short_of(lies)},
            .frozen = lies == FROZEN_BETWEEN && i == FROZEN,
            .data = lies <= FROZEN_BETWEEN ? NULL : memory + (SHORTS - 1 - i) * step};
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "shorts",
                                                  .methods = methods,
                                                  .method_count = 2,
                                                  .params = params,
                                                  .param_count = SHORTS},
                              &net));
    CHECK_OK(dp_distributed(net, config, &par));
    return par;
}

static void check_short(dp_module *const *pars, lie lies, size_t i)
{
    dp_ctx *ctx = dp_module_ctx(pars[0]);
    float got[2][SHORT];
    dp_tensor data;
    size_t empty = lies == EMPTY_BETWEEN ? 1 : 0;
    size_t together = lies <= EMPTY_BETWEEN ? (SHORTS - empty) * SHORT : SHORT;
    size_t share_at, each = each_of(together, info_here(ctx).rank_count);
    size_t bytes = short_of(lies) * sizeof(float);
    if (empty > 0 && i == FROZEN)
        return;
    CHECK_INT(share_of(pars[1], i, &share_at), each);
    if (each > 0)
        CHECK_INT(share_at, (SHORTS - 1 - i - (i < FROZEN ? empty : 0)) * SHORT);
    for (int sharded = 0; sharded < 2; sharded++) {
        CHECK_OK(dp_params_edit(pars[sharded], i, &data, NULL));
        CHECK_OK(dp_read(ctx, &data, got[sharded], bytes));
    }
    CHECK_BYTES(got[1], got[0], bytes);
}

static void short_layers(dp_ctx *ctx, lie lies)
{
    static float memory[2][2 * SHORTS * SHORT];
    memset(memory, 0, sizeof memory);
    dp_module *pars[2];
    dp_optim *optims[2];
    for (int sharded = 0; sharded < 2; sharded++) {
        pars[sharded] = shorts_par(ctx, lies, memory[sharded], NULL);
        CHECK_OK(dp_optim_create(
            pars[sharded],
            &(dp_optim_config){.hyper = {.lr = 0.5, .momentum = 0.5}, .sharded = sharded},
            &optims[sharded]));
    }
    for (int step = 0; step < 3; step++) {
        double norms[2];
        for (int sharded = 0; sharded < 2; sharded++) {
            CHECK_OK(forward_and_backward(pars[sharded], 1, false));
            CHECK_INT(dp_grads_are_scattered(pars[sharded]), sharded);
            CHECK_OK(dp_grad_norm(pars[sharded], 2, &norms[sharded]));
            CHECK_OK(dp_optim_step(optims[sharded]));
        }
        CHECK_F64(norms[1], norms[0], 1e-12 * norms[0]);
    }
    CHECK_OK(dp_params_compare(pars[1]));
    for (size_t i = 0; i < SHORTS; i++)
        check_short(pars, lies, i);
    dp_close(ctx);
}

static void short_layers_in_processes(meeting *m)
{
    short_layers(open_process(m), OWN_MEMORY);
}

TEST(short_layers_are_shared_out_together)
{
    for (int devices = 1; devices <= 4; devices++)
        short_layers(open_on(toy_device(), devices), OWN_MEMORY);
    in_jobs(short_layers_in_processes);
}

TEST(a_parameter_without_elements_does_not_cut_shares)
{
    for (int devices = 2; devices <= 4; devices++)
        short_layers(open_on(toy_device(), devices), EMPTY_BETWEEN);
}

static lie some_lie;

static void layers_that_lie(meeting *m)
{
    short_layers(open_process(m), some_lie);
}

/* Ranks may have such memory elsewhere, and share out what is one piece on all of them. */
TEST(short_layers_that_are_no_neighbours_are_not_shared_out)
{
    for (some_lie = FROZEN_BETWEEN; some_lie <= ODD_IN_A_ROW; some_lie++)
        in_processes(2, layers_that_lie);
}

/* `c` differs from process to process: it counts once for each, and each steps its own. */
static void layers_with_one_ignored(meeting *m)
{
    static const char *const ignored[] = {"c"};
    const dp_distributed_config config = {.ignored = ignored, .ignored_count = 1};
    dp_ctx *ctx = open_process(m);
    dp_module *par = shorts_par(ctx, OWN_MEMORY, NULL, &config);
    double norm = 0, squares = 0, mean = 1.5;
    for (size_t i = 0; i < SHORTS; i++)
        for (size_t k = 0; k < SHORT; k++) {
            double one = (double)one_of(i, k);
            squares += i == 2 ? (1 + 4) * one * one : mean * mean * one * one;
        }
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_F64(norm, sqrt(squares), 1e-12 * norm);
    dp_close(ctx);
}

TEST(ignored_layers_are_not_grouped_with_reduced_ones)
{
    in_processes(2, layers_with_one_ignored);
}

/* The gradients that each owner has to have, of numbers of three parameters from `first` on times
   their factors; how many of the others are not what all ranks together have. */
static size_t check_shares_of(dp_module *par, size_t first, const double *factors, bool whole)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_info job = info_here(ctx);
    static float got[C];
    size_t void_count = 0;
    int owners = (int)dp_owner_count(par), each = job.local_count / owners; /* ranks of an owner */
    for (int owner = 0; owner < owners; owner++)
        for (size_t i = 0; i < 3; i++) {
            dp_tensor data, grad;
            CHECK_OK(dp_owner_edit(par, (size_t)owner, first + i, &data, &grad));
            CHECK_OK(dp_read(ctx, &grad, got, counts[i] * sizeof(float)));
            for (size_t k = 0; k < counts[i]; k++) {
                double want = factors[i] * (double)one_of(i, k);
                bool has = whole;
                for (int r = 0; r < each && !has; r++)
                    has = has_share(par, first + i, job.rank_first + owner * each + r, k);
                if (has)
                    CHECK_F64(got[k], want, 0);
                else
                    void_count += fabs((double)got[k] - want) > 0;
            }
        }
    return void_count;
}

static size_t check_shares(dp_module *par, double factor, bool whole)
{
    const double factors[] = {factor, factor, factor};
    return check_shares_of(par, 0, factors, whole);
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
        &(dp_distributed_config){.buckets = {.first_bytes = bucket_bytes, .bytes = bucket_bytes}});
    bool together = packed && bucket_bytes == 0;
    check_infos(par, 0, together);
    CHECK_OK(forward_and_backward(par, 1, false)); /* as ranks have had it; then it is regrouped */
    check_shares(par, mean, true);
    CHECK(!dp_grads_are_scattered(par) && !scatters(par));
    CHECK_OK(dp_grads_scatter_set(par, true));
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
                    "gradients of 'three' are already reduced: call dp_zero_grad before the next "
                    "backward");
    }
    CHECK_OK(dp_grads_scatter_set(par, false));
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
    passes_of_all_sorts(open_process(m));
}

TEST(ranks_get_their_shares)
{
    for (int devices = 1; devices <= 4; devices++)
        passes_of_all_sorts(open_on(toy_device(), devices));
    passes_of_all_sorts(open_on(toy_device(), 8));
    in_jobs(passes_of_processes);
}

/* The largest parameters stay in one bucket with those that they are shared out with, and buckets
   are complete when the last of these is. */
static void buckets_of_stretches(meeting *m)
{
    static const uint32_t last_first[] = {2, 0, 1};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_distributed_config config = {.buckets = {.first_bytes = 1, .bytes = 4 * (A * 4 + 1)}};
    dp_module *par = three_par(ctx, &uses_all, true, &config);
    const dp_reducer *reducer = dp_wrapper_reducer(par);
    dp_bucket_info bucket;
    dp_reducer_info info;
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_reducer_info_get(reducer, &info));
    CHECK_INT(info.bucket_count, 2); /* c; b and a */
    CHECK_OK(dp_reducer_bucket_get(reducer, 0, &bucket));
    CHECK_INT(bucket.unit_count, 1);
    CHECK_OK(dp_grads_scatter_set(par, true));
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

/* ---- several blocks -------------------------------------------------------------------------- */

enum { BLOCKS = 3 };

static const char *const block_names[BLOCKS] = {"x", "y", "z"};

static dp_status blocks_forward(dp_call *call)
{
    dp_pass **passes = dp_scope_alloc(call->scope, BLOCKS * sizeof(dp_pass *));
    dp_value out;
    for (int i = 0; i < BLOCKS; i++)
        DP_TRY(
            dp_call_child(call, block_names[i], "forward", dp_none(), dp_none(), &out, &passes[i]));
    call->saved = passes;
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status blocks_backward(dp_call *call)
{
    dp_pass *const *passes = call->saved;
    for (int i = BLOCKS; i-- > 0;)
        DP_TRY(dp_backward(passes[i], call->grad, NULL));
    return DP_OK;
}

static const dp_method block_methods[] = {{"forward", blocks_forward},
                                          {"backward", blocks_backward}};

/* What is of two blocks is not cut together. All are one bucket, which would be flat if there were
   room for it: the third makes it longer than a bucket without stretches can be. */
static void shares_of_blocks(dp_ctx *ctx)
{
    const size_t cap = 2 * ALL_OF_THEM * sizeof(float) + 128;
    double mean = mean_rank(ctx);
    const double factors[] = {mean, mean, mean};
    dp_module *children[BLOCKS], *net = NULL, *par = NULL;
    for (int i = 0; i < BLOCKS; i++)
        children[i] = three_named(ctx, block_names[i], &uses_all, true);
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "blocks",
                                                  .methods = block_methods,
                                                  .method_count = 2,
                                                  .children = children,
                                                  .child_count = BLOCKS},
                              &net));
    CHECK_OK(dp_distributed(
        net, &(dp_distributed_config){.buckets = {.first_bytes = cap, .bytes = cap}}, &par));
    for (int pass = 0; pass < 3; pass++) {
        dp_reducer_info info;
        CHECK_OK(dp_grads_scatter_set(par, pass > 0));
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(forward_and_backward(par, 1, false));
        CHECK_OK(dp_reducer_info_get(dp_wrapper_reducer(par), &info));
        CHECK_INT(info.bucket_count, pass == 0 || info_here(ctx).rank_count == 1 ? 2 : 1);
        for (size_t i = 0; i < BLOCKS; i++) {
            check_infos(par, 3 * i, true);
            check_shares_of(par, 3 * i, factors, pass == 0);
        }
    }
    dp_close(ctx);
}

static void blocks_of_processes(meeting *m)
{
    shares_of_blocks(open_process(m));
}

TEST(shares_of_several_blocks)
{
    for (int devices = 1; devices <= 4; devices++)
        shares_of_blocks(open_on(toy_device(), devices));
    in_jobs(blocks_of_processes);
}

static int times_in(const char *text, const char *what)
{
    int times = 0;
    while ((text = strstr(text, what)) != NULL) {
        text += strlen(what);
        times++;
    }
    return times;
}

/* The ends of `a` and `c`, and all of `b`, which lie apart. */
static void rest_of_a_bucket(meeting *m)
{
    char text[4096];
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = three_par(ctx, &uses_all, false, NULL);
    CHECK_OK(dp_grads_scatter_set(par, true));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_shares(par, mean_rank(ctx), false);
    dp_recent_collectives(ctx, text, sizeof text);
    CHECK_INT(times_in(text, "reduce_scatter of 528 f32"), 1);
    CHECK_INT(times_in(text, "reduce_scatter of 688 f32"), 1);
    CHECK_INT(times_in(text, "reduce_scatter"), 2);
    CHECK_INT(times_in(text, " f32 (mean)"), 3);
    dp_close(ctx);
}

TEST(rest_of_a_bucket_is_one_collective)
{
    in_processes(2, rest_of_a_bucket);
    in_processes_on(toy_device(), 2, rest_of_a_bucket);
}

TEST(grouped_layers_are_in_one_bucket)
{
    in_processes(2, buckets_of_stretches);
}

/* ---- units that nobody uses ------------------------------------------------------------------ */

/* A stretch of which something is used travels, in all its length. */
static void some_unused(dp_ctx *ctx, size_t bucket_bytes)
{
    const habits first_alone = {.uses = {true}}, last_alone = {.uses = {false, false, true}};
    double mean = mean_rank(ctx);
    for (int i = 0; i < 4; i++) {
        bool last = i % 2 > 0;
        dp_module *par = three_par(
            ctx, last ? &last_alone : &first_alone, true,
            &(dp_distributed_config){.buckets.bytes = bucket_bytes,
                                     .unused_params = i < 2 ? DP_UNUSED_FOUND : DP_UNUSED_FIXED});
        const double factors[] = {last ? 0 : mean, 0, last ? mean : 0};
        CHECK_OK(dp_grads_scatter_set(par, true));
        for (int pass = 0; pass < 3; pass++) {
            CHECK_OK(dp_zero_grad(par));
            CHECK_OK(forward_and_backward(par, 1, false));
            check_shares_of(par, 0, factors, false);
        }
    }
    dp_close(ctx);
}

static void unused_in_processes(meeting *m)
{
    some_unused(open_process(m), m->process_count == 2 ? 0 : 1);
}

TEST(unused_units_are_unchanged)
{
    some_unused(open_on(toy_device(), 2), 0);
    some_unused(open_on(toy_device(), 3), 1);
    in_jobs(unused_in_processes);
}

/* ---- a pass that fails ----------------------------------------------------------------------- */

static void one_has_no_backward(meeting *m)
{
    habits own = {.uses = {true, true, true}, .fails_on = 1};
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = three_par(ctx, &own, true, NULL);
    CHECK_OK(dp_grads_scatter_set(par, true));
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

static void check_refused(dp_module *par, const char *why)
{
    CHECK_ERROR(dp_grads_scatter_set(par, true), DP_ERR_UNSUPPORTED, "dp_grads_scatter_set: ");
    CHECK_SAYS(dp_last_error(), why);
    CHECK_OK(dp_grads_scatter_set(par, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_shares(par, mean_rank(dp_module_ctx(par)), true);
    CHECK(!scatters(par));
}

static dp_coll_ops lacking;

static dp_status lacking_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    DP_TRY(dp_shm_coll()->open(host, config, out));
    (*out)->ops = &lacking;
    return DP_OK;
}

static void one_lacks_the_verb(meeting *m)
{
    const dp_coll_ops *colls[] = {m->process == 1 ? &lacking : dp_shm_coll(), NULL};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    lacking = *dp_shm_coll();
    lacking.open = lacking_open;
    lacking.verbs &= ~(1u << DP_REDUCE_SCATTER);
    config.colls = colls;
    CHECK_OK(dp_open(&config, &ctx));
    check_refused(three_par(ctx, &uses_all, true, NULL),
                  "rank 1: 'distributed' has collectives without a reduce_scatter");
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

static dp_module *meddled;

static dp_status meddle(dp_call *call)
{
    call->out = dp_none();
    CHECK_STATUS(dp_grads_scatter_set(meddled, false), DP_ERR_STATE);
    return dp_grads_scatter_set(meddled, true);
}

/* All ranks would have to meet in it. */
static void from_inside(dp_ctx *ctx)
{
    static const dp_method meddling[] = {{"forward", meddle}, {"backward", meddle}};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "three",
                                                  .methods = meddling,
                                                  .method_count = 2,
                                                  .params = three_params,
                                                  .param_count = 3},
                              &net));
    CHECK_OK(dp_distributed(net, NULL, &meddled));
    CHECK_STATUS(forward_and_backward(meddled, 1, false), DP_ERR_STATE);
    CHECK_SAYS(dp_last_error(), "dp_grads_scatter_set: method 'three.forward' called it");
}

TEST(modules_that_share_or_hook_gradients_are_not_scattered)
{
    dp_ctx *ctx = open_here(2);
    dp_module *net = three(ctx, &uses_all, true);
    CHECK_ERROR(dp_grads_scatter_set(net, true), DP_ERR_INVALID,
                "dp_grads_scatter_set: 'three' has no gradients that ranks reduce");
    CHECK_OK(dp_grads_scatter_set(net, false));
    CHECK(!dp_grads_are_scattered(net));
    CHECK(!dp_grads_are_scattered(NULL));
    CHECK_STATUS(dp_grads_scatter_set(NULL, true), DP_ERR_INVALID);
    check_refused(three_par(ctx, &uses_all, true, NULL),
                  "'distributed' has devices that share parameters");
    dp_close(ctx);
    ctx = open_on(toy_device(), 2);
    from_inside(ctx);
    check_refused(
        three_par(ctx, &uses_all, true, &(dp_distributed_config){.buckets.hook = plain_hook}),
        "'distributed' has a hook");
    check_refused(three_par(ctx, &uses_all, true, &(dp_distributed_config){.buckets.wire = DP_F16}),
                  "'distributed' has a wire dtype");
    dp_close(ctx);
    in_processes(2, one_lacks_the_verb);
    in_processes(2, toys_of_processes);
}

/* ---- optimizers that step shares ------------------------------------------------------------- */

static dp_optim *optim_for(dp_module *par, dp_optim_config config)
{
    dp_optim *optim = NULL;
    CHECK_OK(dp_optim_create(par, &config, &optim));
    return optim;
}

static void numbers_of(dp_module *par, float *out)
{
    for (size_t i = 0; i < 3; out += counts[i++]) {
        dp_tensor data;
        CHECK_OK(dp_owner_edit(par, 0, i, &data, NULL));
        CHECK_OK(dp_read(dp_module_ctx(par), &data, out, counts[i] * sizeof(float)));
    }
}

typedef struct training {
    bool packed, stays_whole; /* stays_whole: devices share parameters, so all get all gradients */
    size_t bucket_bytes;
    dp_reduction reduction;
    int accumulate;
} training;

/* By the one optimizer as by the other, whose state is spread. `b` is stepped by another rate, in
   the middle of what is shared out together. */
static void check_training(dp_ctx *ctx, const training *how)
{
    static const double half = 0.5;
    const dp_param_group group = {.match = "b", .lr_factor = &half};
    const dp_distributed_config config = {.buckets.bytes = how->bucket_bytes,
                                          .reduction = how->reduction};
    dp_optim_config optim_config = {.rule = dp_adamw(),
                                    .hyper = {.lr = 0.01, .weight_decay = 0.1},
                                    .groups = &group,
                                    .group_count = 1,
                                    .accumulate = how->accumulate};
    static float want[ALL_OF_THEM], got[ALL_OF_THEM];
    dp_module *whole = three_par(ctx, &uses_all, how->packed, &config);
    dp_module *par = three_par(ctx, &uses_all, how->packed, &config);
    dp_optim *all = optim_for(whole, optim_config);
    optim_config.sharded = true;
    dp_optim *some = optim_for(par, optim_config);
    for (int step = 0; step < 6; step++) {
        for (int k = 0; k < 2; k++) {
            dp_scope *scope = dp_scope_begin(ctx);
            dp_value log;
            CHECK_OK(dp_train_step(k == 0 ? whole : par, scope, a_part_each(ctx, scope),
                                   k == 0 ? all : some, &log));
            dp_scope_end(scope);
        }
        CHECK_INT(scatters(par), !how->stays_whole);
        CHECK(!dp_grads_are_scattered(par)); /* they were zeroed */
    }
    CHECK(!scatters(whole));
    numbers_of(whole, want);
    numbers_of(par, got);
    CHECK(fabsf(want[0]) > 0.01f);
    CHECK_BYTES(got, want, sizeof got);
    CHECK_OK(dp_params_compare(par));
}

static void trainings(dp_ctx *ctx, bool stays_whole)
{
    for (unsigned i = 0; i < 8; i++) {
        const training how = {.packed = i % 2 == 0,
                              .stays_whole = stays_whole,
                              .bucket_bytes = i / 2 % 2 == 0 ? 0 : 64,
                              .reduction = i / 4 == 0 ? DP_MEAN_RANKS : DP_MEAN_SAMPLES,
                              .accumulate = 1 + (int)i % 3};
        check_training(ctx, &how);
    }
    dp_close(ctx);
}

static void trainings_of_processes(meeting *m)
{
    trainings(open_process(m), false);
}

TEST(steps_of_shares_are_those_of_the_whole)
{
    trainings(open_here(3), true);
    trainings(open_on(toy_device(), 1), false);
    trainings(open_on(toy_device(), 2), false);
    trainings(open_on(toy_device(), 3), false);
    in_jobs(trainings_of_processes);
}

/* ---- norms ----------------------------------------------------------------------------------- */

static double norm_of_numbers(double p, double factor)
{
    double sum = 0, largest = 0;
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < counts[i]; k++) {
            sum += pow(factor * (double)one_of(i, k), p);
            largest = fmax(largest, factor * (double)one_of(i, k));
        }
    return isinf(p) ? largest : pow(sum, 1 / p);
}

static void check_norms(dp_module *par, double factor)
{
    static const double ps[] = {1, 2, 3, HUGE_VAL};
    for (size_t i = 0; i < sizeof ps / sizeof ps[0]; i++) {
        double norm = 0, want = norm_of_numbers(ps[i], factor);
        CHECK_OK(dp_grad_norm(par, ps[i], &norm));
        CHECK_F64(norm, want, 1e-12 * want);
    }
}

/* What others' shares hold does not matter, and the end counts once. */
static void norms(dp_ctx *ctx, bool packed)
{
    dp_module *par = three_par(ctx, &uses_all, packed, NULL);
    double mean = mean_rank(ctx), norm = 0, full = norm_of_numbers(2, mean);
    static float got[ALL_OF_THEM];
    CHECK_OK(forward_and_backward(par, 1, false));
    check_norms(par, mean);
    dp_optim *optim =
        optim_for(par, (dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1}, .sharded = true});
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    check_norms(par, mean);
    CHECK_OK(dp_clip_grad_norm(par, full / 2, 2, &norm));
    CHECK_F64(norm, full, 1e-12 * full);
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_F64(norm, full / 2, 1e-5 * full);
    CHECK_OK(dp_zero_grad(par));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_optim_step(optim));
    numbers_of(par, got);
    for (size_t i = 0, at = 0; i < 3; at += counts[i++])
        for (size_t k = 0; k < counts[i]; k++)
            CHECK_F64(got[at + k], -mean * (double)one_of(i, k) / full, 1e-6);
    dp_optim_info info;
    CHECK_OK(dp_optim_info_get(optim, &info));
    CHECK_F64(info.grad_norm, full, 1e-12 * full);
}

static void norms_of_all_sorts(dp_ctx *ctx)
{
    norms(ctx, true);
    norms(ctx, false);
    dp_close(ctx);
}

static void norms_of_processes(meeting *m)
{
    norms_of_all_sorts(open_process(m));
}

TEST(norms_of_shares_are_those_of_the_whole)
{
    norms_of_all_sorts(open_here(3));
    norms_of_all_sorts(open_on(toy_device(), 1));
    norms_of_all_sorts(open_on(toy_device(), 3));
    in_jobs(norms_of_processes);
}

/* Rank 1 has the end of `c`, if there are two. */
static void one_is_not_finite(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = three_par(ctx, &uses_all, true, NULL);
    dp_optim *optim =
        optim_for(par, (dp_optim_config){.hyper = {.lr = 1}, .clip = {.norm = 1}, .sharded = true});
    const float huge = INFINITY;
    const int64_t one = 1;
    dp_tensor data, grad, host = dp_wrap_const(&huge, DP_F32, 1, &one);
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_owner_edit(par, 0, 2, &data, &grad));
    CHECK_OK(dp_narrow(&grad, 0, C - 40, 1, &grad));
    if (m->process == 1)
        CHECK_OK(dp_copy(ctx, &grad, &host, NULL));
    CHECK_ERROR(dp_optim_step(optim), DP_ERR_STATE,
                m->process == 1 ? "the norm of the gradients is inf: the gradient of c is not "
                                  "finite"
                                : "the norm of the gradients is inf, here or in another process");
    dp_close(ctx);
}

TEST(the_rank_whose_share_is_not_finite_names_it)
{
    in_processes(2, one_is_not_finite);
    in_processes_on(toy_device(), 2, one_is_not_finite);
}

/* ---- several wrappers ------------------------------------------------------------------------ */

/* A module whose two children are on all ranks; one optimizer steps both, and a parameter of the
   module's own, which nobody reduces. */
static dp_module *parent_of(dp_ctx *ctx, dp_module *const *pars)
{
    const dp_param_config own = {.name = "own", .ndim = 1, .shape = {1}};
    dp_module *parent = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "parent", .params = &own, .param_count = 1, .children = pars, .child_count = 2},
        &parent));
    return parent;
}

static void steps_of_children(meeting *m)
{
    static float want[ALL_OF_THEM], got[ALL_OF_THEM];
    dp_ctx *ctx = open_process(m);
    dp_module *pars[2][2], *parents[2];
    dp_optim *optims[2];
    for (int sharded = 0; sharded < 2; sharded++) {
        for (int i = 0; i < 2; i++)
            pars[sharded][i] = three_par(ctx, &uses_all, i == 0,
                                         &(dp_distributed_config){.name = i == 0 ? "x" : "y"});
        parents[sharded] = parent_of(ctx, pars[sharded]);
        optims[sharded] = optim_for(
            parents[sharded],
            (dp_optim_config){.rule = dp_adamw(), .hyper = {.lr = 0.01}, .sharded = sharded > 0});
    }
    for (int step = 0; step < 3; step++)
        for (int sharded = 0; sharded < 2; sharded++) {
            for (int i = 0; i < 2; i++) {
                CHECK(!dp_grads_are_scattered(parents[sharded]) || (i > 0 && sharded > 0));
                CHECK_OK(forward_and_backward(pars[sharded][i], 1 + i, false));
                CHECK_INT(scatters(pars[sharded][i]), sharded);
            }
            CHECK_OK(dp_optim_step(optims[sharded]));
        }
    for (int i = 0; i < 2; i++) {
        numbers_of(pars[0][i], want);
        numbers_of(pars[1][i], got);
        CHECK(fabsf(want[0]) > 0.01f);
        CHECK_BYTES(got, want, sizeof got);
    }
    dp_close(ctx);
}

TEST(children_on_all_ranks_are_stepped_in_shares)
{
    in_jobs(steps_of_children);
}

/* The second of three has another name above their wrapper, and is listed first there, before one
   that is not theirs. */
static dp_module *parent_of_tied(dp_ctx *ctx, dp_module **out_par)
{
    const dp_param_config own[] = {{.name = "own", .ndim = 1, .shape = {B}, .same_as = "x.b"},
                                   {.name = "other", .ndim = 1, .shape = {3}}};
    dp_module *parent = NULL;
    *out_par = three_par(ctx, &uses_all, true, &(dp_distributed_config){.name = "x"});
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "parent",
                                                  .params = own,
                                                  .param_count = 2,
                                                  .children = out_par,
                                                  .child_count = 1},
                              &parent));
    return parent;
}

static void steps_of_tied(dp_ctx *ctx)
{
    static const double half = 0.5;
    const dp_param_group group = {.match = "own", .lr_factor = &half};
    static float want[ALL_OF_THEM], got[ALL_OF_THEM];
    for (int sharded = 0; sharded < 2; sharded++) {
        dp_module *par, *parent = parent_of_tied(ctx, &par);
        dp_optim *optim =
            optim_for(parent, (dp_optim_config){.hyper = {.lr = 0.01, .momentum = 0.9},
                                                .groups = &group,
                                                .group_count = 1,
                                                .sharded = sharded > 0});
        for (int step = 0; step < 3; step++) {
            CHECK_OK(forward_and_backward(par, 1 + step, false));
            CHECK_OK(dp_optim_step(optim));
        }
        numbers_of(par, sharded > 0 ? got : want);
    }
    CHECK(fabsf(want[0]) > 0.01f);
    CHECK_BYTES(got, want, sizeof got);
    dp_close(ctx);
}

static void tied_of_processes(meeting *m)
{
    steps_of_tied(open_process(m));
}

TEST(a_share_with_another_name_above_is_where_it_belongs)
{
    steps_of_tied(open_on(toy_device(), 2));
    in_jobs(tied_of_processes);
}

/* ---- optimizers that meet -------------------------------------------------------------------- */

TEST(an_optimizer_without_shares_wants_all_gradients)
{
    dp_ctx *ctx = open_on(toy_device(), 2);
    dp_module *par = three_par(ctx, &uses_all, true, NULL);
    dp_optim *plain = optim_for(par, (dp_optim_config){.hyper = {.lr = 1}});
    dp_optim *shares = optim_for(par, (dp_optim_config){.hyper = {.lr = 1}, .sharded = true});
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(scatters(par));
    CHECK_ERROR(dp_optim_step(plain), DP_ERR_STATE,
                "dp_optim_step: gradients of 'distributed' are scattered, for another optimizer: "
                "dp_grads_scatter_set(module, false) comes before a backward");
    CHECK_OK(dp_optim_step(shares));
    dp_optim *last = optim_for(par, (dp_optim_config){.hyper = {.lr = 1}});
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(!scatters(par));
    CHECK_OK(dp_optim_step(last));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_optim_step(shares)); /* its shares are among them */
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

/* Wrappers of one net have devices of their own and may cut it differently: what is asked of one
   when the other has scattered. */
static void shares_of_another_wrapper(dp_ctx *ctx)
{
    const dp_optim_config config = {.hyper = {.lr = 1}, .sharded = true};
    const dp_distributed_config small = {.buckets = {.first_bytes = 1, .bytes = 1}};
    dp_module *net = three(ctx, &uses_all, true), *pars[3];
    dp_optim *optims[3];
    double norm = 0, want = 0;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_distributed(net, i == 1 ? &small : NULL, &pars[i]));
        CHECK_OK(forward_and_backward(pars[i], 1, false));
        CHECK_OK(dp_grad_norm(pars[i], 2, &want));
        CHECK_OK(dp_zero_grad(net));
        optims[i] = optim_for(pars[i], config);
    }
    for (int by = 0; by < 3; by++) {
        CHECK_OK(forward_and_backward(pars[by], 1, false));
        for (int i = 0; i < 3; i++) {
            CHECK_INT(dp_grads_are_unseen(pars[i]), i != by);
            if (i == by)
                continue;
            CHECK_ERROR(dp_grad_norm(pars[i], 2, &norm), DP_ERR_STATE,
                        "dp_grad_norm: gradients of 'distributed' are scattered, which only its "
                        "wrappers see");
            CHECK_ERROR(dp_optim_step(optims[i]), DP_ERR_STATE,
                        "gradients of 'distributed' are scattered, for another optimizer");
        }
        CHECK_OK(dp_grad_norm(pars[by], 2, &norm));
        CHECK_F64(norm, want, 1e-12 * want);
        CHECK_OK(dp_optim_step(optims[by]));
        CHECK(!dp_grads_are_unseen(net));
        CHECK_OK(dp_params_compare(pars[by]));
    }
    dp_close(ctx);
}

static void shares_of_another_wrapper_in_processes(meeting *m)
{
    shares_of_another_wrapper(open_process(m));
}

TEST(shares_of_another_wrapper_are_not_seen)
{
    shares_of_another_wrapper(open_on(toy_device(), 2));
    in_jobs(shares_of_another_wrapper_in_processes);
}

/* It has the first device's gradients alone. */
TEST(shares_on_other_devices_are_not_seen_from_above)
{
    dp_ctx *ctx = open_on(toy_device(), 2);
    dp_module *par, *parent = parent_of_tied(ctx, &par);
    const dp_optim_config config = {.hyper = {.lr = 1}, .scale = {.scale = 2}, .sharded = true};
    dp_optim *above = optim_for(parent, config), *optim = optim_for(par, config);
    const char *unseen =
        "gradients of 'parent' are scattered, which only its wrappers see: ask these, or "
        "dp_grads_scatter_set(module, false) comes before a backward";
    double norm = 0;
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_ERROR(dp_grad_norm(parent, 2, &norm), DP_ERR_STATE, unseen);
    CHECK_ERROR(dp_clip_grad_norm(parent, 1, 2, NULL), DP_ERR_STATE, unseen);
    CHECK_ERROR(dp_clip_grad_value(parent, 1), DP_ERR_STATE, unseen);
    unseen =
        "gradients of 'parent' are scattered, for another optimizer: dp_grads_scatter_set(module, "
        "false) comes before a backward";
    CHECK_ERROR(dp_optim_step(above), DP_ERR_STATE, unseen);
    CHECK_ERROR(dp_optim_unscale(above), DP_ERR_STATE, unseen);
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_grads_scatter_set(parent, false));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_OK(dp_grad_norm(parent, 2, &norm));
    CHECK_OK(dp_optim_step(above));
    dp_close(ctx);
}

/* What is wrapped, and another wrapper of it, have the same memory. */
static void shares_seen_from_elsewhere(meeting *m)
{
    dp_ctx *ctx = open_process(m);
    dp_module *net = three(ctx, &uses_all, true), *par = NULL, *other = NULL;
    double norm = 0;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(dp_distributed(net, NULL, &other));
    dp_optim *plain = optim_for(net, (dp_optim_config){.hyper = {.lr = 1}});
    CHECK_OK(dp_grads_scatter_set(par, true));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(dp_grads_are_scattered(net) && dp_grads_are_scattered(other));
    CHECK_ERROR(dp_grad_norm(net, 2, &norm), DP_ERR_STATE,
                "gradients of 'three' are scattered, which only its wrappers see");
    CHECK_ERROR(dp_optim_step(plain), DP_ERR_STATE,
                "gradients of 'three' are scattered, for another optimizer");
    CHECK_ERROR(forward_and_backward(other, 1, false), DP_ERR_STATE,
                "gradients of 'three' are already reduced");
    CHECK_OK(dp_zero_grad(net));
    CHECK(!dp_grads_are_scattered(par));
    CHECK_OK(forward_and_backward(other, 1, false));
    check_shares(par, mean_rank(ctx), true);
    CHECK_OK(dp_grad_norm(net, 2, &norm));
    dp_close(ctx);
}

TEST(shares_are_known_to_all_who_have_their_memory)
{
    in_jobs(shares_seen_from_elsewhere);
}

/* ---- no memory in one process ---------------------------------------------------------------- */

typedef struct refused {
    double p; /* 0: no clip before the step */
    dp_optim_config config;
    float numbers[2][ALL_OF_THEM]; /* of both processes */
} refused;

static refused *asking;
static dp_optim *asks;

static dp_module *one_that_asks(dp_ctx *ctx)
{
    dp_module *par = three_par(ctx, &uses_all, true, NULL);
    asks = optim_for(par, asking->config);
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(dp_grads_are_scattered(par));
    return par;
}

/* Asks again for what it was refused. */
static dp_status clips_and_steps(dp_module *par)
{
    double norm = 0;
    dp_status status = DP_OK;
    if (asking->p > 0)
        status = dp_clip_grad_norm(par, 100, asking->p, &norm);
    if (is_refused(status))
        CHECK_OK(status = dp_clip_grad_norm(par, 100, asking->p, &norm));
    if (status == DP_OK)
        status = dp_optim_step(asks);
    if (is_refused(status))
        CHECK_OK(status = dp_optim_step(asks));
    if (status == DP_OK)
        numbers_of(par, asking->numbers[info_here(dp_module_ctx(par)).rank_first]);
    return status;
}

/* What is refused to one process alone it can ask for again, and the others wait; or the job has
   failed, for all. */
static void one_asks_again(double p, dp_optim_config config)
{
    static float want[ALL_OF_THEM];
    size_t again = 0, over = 0;
    asking = shared_memory(sizeof *asking);
    asking->p = p;
    asking->config = config;
    lack = shared_memory(sizeof *lack);
    *lack = (shortage){.devices = 1, .make = one_that_asks, .wrap = clips_and_steps};
    do {
        memset(asking->numbers, 0, sizeof asking->numbers);
        in_processes(2, one_has_no_memory);
        bool fails = lack->status[1] != DP_OK;
        CHECK(!is_refused(lack->status[0]));
        CHECK_INT(lack->status[0] != DP_OK, fails);
        if (lack->fail_at == 0)
            memcpy(want, asking->numbers[0], sizeof want);
        for (int i = 0; i < 2 && !fails; i++)
            CHECK_BYTES(asking->numbers[i], want, sizeof want);
        again += lack->failed && !fails;
        over += fails;
        lack->fail_at += (size_t)test_stride();
    } while (lack->failed || lack->fail_at <= (size_t)test_stride());
    CHECK(fabsf(want[0]) > 0);
    CHECK(test_stride() > 1 || (again > 0 && (over > 0) == (p > 0)));
}

TEST(refused_rank_may_ask_again)
{
    dp_optim_config config = {.hyper = {.lr = 1}, .sharded = true};
    config.clip = (dp_clip){.norm = 50, .p = 2};
    one_asks_again(0, config);
    config.clip.p = 3;
    one_asks_again(2, config);
    config.clip = (dp_clip){.value = 0.5};
    config.scale.scale = 1;
    one_asks_again(3, config);
}

/* Nobody waits for one that has none. */
static void one_has_no_optimizer(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par = three_par(ctx, &uses_all, true, NULL);
    dp_optim *optim = NULL;
    double lr = m->process == 1 ? -1 : 1;
    dp_status status =
        dp_optim_create(par, &(dp_optim_config){.hyper = {.lr = lr}, .sharded = true}, &optim);
    CHECK(optim == NULL);
    CHECK_INT(status, DP_ERR_INVALID);
    CHECK_SAYS(dp_last_error(), "dp_optim_create: rank 1: ");
    CHECK_OK(forward_and_backward(par, 1, false));
    check_shares(par, mean_rank(ctx), true);
    dp_close(ctx);
}

TEST(all_have_an_optimizer_or_none)
{
    in_processes(2, one_has_no_optimizer);
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL -------------------------------------------------------------------------
   It adds up three numbers in an order of its own.                                               */

TEST_SLOW(cuda_nccl_ranks_get_their_shares, 60)
{
    on_gpus("3", passes_of_processes);
    on_gpus("11", passes_of_processes);
}

TEST_SLOW(cuda_nccl_steps_of_shares_are_those_of_the_whole, 60)
{
    on_gpus("3", trainings_of_processes);
    on_gpus("11", trainings_of_processes);
}

/* The second process has two GPUs, of which a module above its wrapper shows one. */
static void one_hides_shares(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 1, 0);
    dp_module *par, *parent = parent_of_tied(ctx, &par);
    double norm = 0;
    CHECK_OK(dp_grads_scatter_set(par, true));
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK_ERROR(dp_grad_norm(parent, 2, &norm), DP_ERR_STATE,
                "gradients of 'parent' are scattered, which only its wrappers see");
    CHECK_OK(dp_grad_norm(par, 2, &norm));
    CHECK_OK(dp_grads_scatter_set(par, false));
    CHECK_OK(dp_zero_grad(parent));
    dp_optim *optim = optim_for(parent, (dp_optim_config){.hyper = {.lr = 1}, .sharded = true});
    CHECK_OK(forward_and_backward(par, 1, false));
    CHECK(!scatters(par));
    CHECK_OK(dp_optim_step(optim));
    CHECK_OK(dp_params_compare(par));
    dp_close(ctx);
}

TEST_SLOW(cuda_nccl_shares_that_one_process_hides, 60)
{
    on_gpus("12", one_hides_shares);
}

TEST_SLOW(cuda_nccl_norms_of_shares_are_those_of_the_whole, 60)
{
    on_gpus("3", norms_of_processes);
    on_gpus("11", norms_of_processes);
}
#endif
