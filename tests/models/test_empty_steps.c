/* test_empty_steps.c - processes without data in some steps, beside others that use what they like:
   gradients never change places, whatever the order of events. */

#include "ranked.h"

/* FEW numbers share what is zeroed at once with others, MANY do not. */
enum { SIX = 6, FEW = 16, MANY = 33000, STEPS = 6, LINGER_US = 300 };

/* ---- a program drawn by a seed -----------------------------------------------------------------
   All processes draw the same one. In each step every process has rows for some of its devices, or
   for none; backward goes through the parameters in any order, and takes its time. */

typedef struct drawn {
    uint64_t seed;
    dp_unused rule;
    bool hook, scatter;
    int devices, step;
    size_t count; /* of each parameter */
} drawn;

static drawn program;
static bool on_simulated_gpus;

enum { ABOUT_ROWS, ABOUT_USE, ABOUT_ORDER, ABOUT_DELAY, ABOUT_SAYING, ABOUT_SYNC };

static uint64_t draw(int about, int rank, int step, int param)
{
    uint64_t state = program.seed ^ ((uint64_t)about << 48 | (uint64_t)rank << 32 |
                                     (uint64_t)step << 16 | (uint64_t)param);
    return test_random(&state) >> 16;
}

static int rows_of(int process, int step)
{
    return (int)(draw(ABOUT_ROWS, process, step, 0) % (uint64_t)(program.devices + 1));
}

/* With FIXED each rank uses the same in all steps. */
static bool uses(int rank, int step, int param)
{
    switch (program.rule) {
    case DP_UNUSED_ERROR:
        return true;
    case DP_UNUSED_FOUND:
        return draw(ABOUT_USE, rank, step, param) % 2 == 0;
    case DP_UNUSED_FIXED:
        return draw(ABOUT_USE, rank, 0, param) % 3 > 0;
    }
    return false;
}

/* The others' gradients are kept for the next step. */
static bool is_reduced(int step)
{
    return step == STEPS - 1 || draw(ABOUT_SYNC, 0, step, 0) % 4 > 0;
}

static double gradient(int rank, int step, int param)
{
    return (param + 1) * (rank + 1) * (step + 1);
}

static void linger(int rank, int place)
{
    uint64_t length = draw(ABOUT_DELAY, rank, program.step, place);
    if (length % 2 == 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(length / 2 % LINGER_US) * 1000}, NULL);
}

static dp_status six_forward(dp_call *call)
{
    linger(rank_of(call), SIX);
    call->out = dp_float(1);
    return DP_OK;
}

static dp_status add_everywhere(const dp_call *call, int param, float value)
{
    float *data = malloc(program.count * sizeof *data);
    dp_tensor grad = dp_grad_tensor(call, (size_t)param);
    CHECK(data != NULL);
    dp_tensor host = dp_wrap(data, DP_F32, grad.ndim, grad.shape);
    dp_status status = dp_copy(call->ctx, &host, &grad, NULL);
    for (size_t k = 0; k < program.count && status == DP_OK; k++)
        data[k] += value;
    if (status == DP_OK)
        status = dp_copy(call->ctx, &grad, &host, NULL);
    free(data);
    return status;
}

static dp_status six_backward(dp_call *call)
{
    int rank = rank_of(call), step = program.step;
    int first = (int)(draw(ABOUT_ORDER, 0, 0, 0) % SIX);
    for (int i = 0; i < SIX; i++) {
        int param = (first + i) % SIX;
        if (!uses(rank, step, param))
            continue;
        linger(rank, param);
        DP_TRY(add_everywhere(call, param, (float)gradient(rank, step, param)));
        if (draw(ABOUT_SAYING, rank, step, param) % 4 > 0)
            DP_TRY(dp_grad_ready(call, (size_t)param));
    }
    return DP_OK;
}

static dp_module *make_six_of(dp_ctx *ctx, const dp_method *methods)
{
    static const char *const names[SIX] = {"a", "b", "c", "d", "e", "f"};
    dp_param_config params[SIX];
    for (int i = 0; i < SIX; i++)
        params[i] =
            (dp_param_config){.name = names[i], .ndim = 1, .shape = {(int64_t)program.count}};
    return make_net_of(
        ctx, (dp_module_config){.methods = methods, .params = params, .param_count = SIX});
}

static dp_module *make_six(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", six_forward}, {"backward", six_backward}};
    return make_six_of(ctx, methods);
}

/* Of all ranks in the steps since `first`. */
static double wanted(const dp_info *info, int first, int param)
{
    double sum = 0;
    for (int step = first; step <= program.step; step++)
        for (int rank = 0; rank < info->rank_count; rank++) {
            int process = rank / program.devices;
            if (rank % program.devices < rows_of(process, step) && uses(rank, step, param))
                sum += gradient(rank, step, param);
        }
    return sum;
}

/* Whether this process holds what was reduced of an element: all, or the shares of its ranks. */
static bool is_held(dp_module *par, int param, size_t element)
{
    dp_info job = info_here(dp_module_ctx(par));
    bool held = !dp_grads_are_scattered(par);
    for (int r = 0; r < job.local_count && !held; r++)
        held = has_share(par, (size_t)param, job.rank_first + r, element);
    return held;
}

static void check_gradient(dp_module *par, int param, double want)
{
    dp_tensor data, grad;
    float *got = test_room(program.count * sizeof *got);
    CHECK_OK(dp_params_edit(par, (size_t)param, &data, &grad));
    CHECK_OK(dp_read(dp_module_ctx(par), &grad, got, program.count * sizeof *got));
    for (size_t k = 0; k < program.count; k++)
        if (is_held(par, param, k))
            CHECK_F64(got[k], want, 0);
}

static dp_status one_step(dp_module *par, int rows)
{
    static float zeros[RANKS];
    dp_value out;
    dp_pass *pass;
    int64_t count = rows;
    dp_tensor batch = dp_wrap(zeros, DP_F32, 1, &count);
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_value data = DP_DICT(scope, {"x", dp_of(scope, &batch)});
    dp_status status = DP_OK;
    if (is_reduced(program.step)) {
        status = dp_train_step(par, scope, rows > 0 ? data : dp_none(), NULL, &out);
    } else if (rows > 0) {
        status = dp_invoke(par, scope, "forward", dp_none(), data,
                           &(dp_pass_config){.no_sync = true}, &out, &pass);
        if (status == DP_OK)
            status = dp_backward(pass, dp_float(1), NULL);
    }
    dp_scope_end(scope);
    return status;
}

static void idle_at_times(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, program.devices, (int)(PATIENCE_MS * test_timeout_scale()));
    dp_info info = info_here(ctx);
    dp_module *par;
    int first = 0;
    CHECK_OK(dp_distributed(
        make_six(ctx),
        &(dp_distributed_config){
            .reduction = DP_SUM_RANKS,
            .unused_params = program.rule,
            .buckets = {.hook = program.hook ? plain_hook : NULL, .first_bytes = 1, .bytes = 1}},
        &par));
    if (program.scatter)
        CHECK_OK(dp_grads_scatter_set(par, true));
    for (program.step = 0; program.step < STEPS; program.step++) {
        linger(info.rank_first, SIX + 1);
        CHECK_OK(one_step(par, rows_of(m->process, program.step)));
        if (!is_reduced(program.step))
            continue;
        for (int i = 0; i < SIX; i++)
            check_gradient(par, i, wanted(&info, first, i));
        CHECK_OK(dp_zero_grad(par));
        first = program.step + 1;
    }
    dp_close(ctx);
}

/* $TEST_RUNS: so many of each kind. */
static int run_count(int usual)
{
    const char *runs = getenv("TEST_RUNS");
    return runs != NULL ? atoi(runs) : usual;
}

static void idle_in(int process_count, int run)
{
    static const char *const gpus[2][3] = {{"11", "111", "1111"}, {"22", "222", "2222"}};
    program.devices = 1 + (int)(program.seed % 2);
    program.count = run % 4 == 3 ? MANY : FEW;
    program.scatter = program.count == MANY && !program.hook && !on_simulated_gpus;
    if (on_simulated_gpus)
        on_gpus(gpus[program.devices - 1][process_count - 2], idle_at_times);
    else
        in_processes(process_count, idle_at_times);
}

static void idle_under(dp_unused rule)
{
    uint64_t state = test_seed() + (uint64_t)rule;
    int stride = test_stride() > 3 ? 7 : 1; /* a small one without a hook, a large one with one */
    for (int run = 0; run < run_count(8); run += stride) {
        program = (drawn){.seed = test_random(&state), .rule = rule, .hook = run / 4 % 2 > 0};
        idle_in(2 + run % 3, run);
    }
}

TEST_SLOW(gradients_keep_their_places_where_unused_units_are_an_error, 60)
{
    idle_under(DP_UNUSED_ERROR);
}

TEST_SLOW(gradients_keep_their_places_where_unused_units_are_found, 60)
{
    idle_under(DP_UNUSED_FOUND);
}

TEST_SLOW(gradients_keep_their_places_where_unused_units_are_fixed, 60)
{
    idle_under(DP_UNUSED_FIXED);
}

/* ---- what DP_UNUSED_FIXED has fixed ---------------------------------------------------------- */

static dp_status step_or_idle(dp_module *par, bool idle)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out;
    dp_status status =
        dp_train_step(par, scope, idle ? dp_none() : a_part_each(ctx, scope), NULL, &out);
    dp_scope_end(scope);
    return status;
}

static dp_status step_without_rows(dp_module *par)
{
    float none = 0;
    dp_scope *scope = dp_scope_begin(dp_module_ctx(par));
    dp_value out, x = dp_array(scope, &none, DP_F32, DP_SHAPE(0));
    dp_status status = dp_train_step(par, scope, DP_DICT(scope, {"x", x}), NULL, &out);
    dp_scope_end(scope);
    return status;
}

/* Rank 0 uses w, then both use all, which is what they have to do from then on. */
static void fixed_after_an_idle_pass(meeting *m)
{
    plan how = {.habit = {ONLY_W, ALL}};
    dp_ctx *ctx = open_over_shm(m, 1, (int)(PATIENCE_MS * test_timeout_scale()));
    dp_module *net = make_net(ctx, &how), *par;
    CHECK_OK(dp_distributed(
        net, &(dp_distributed_config){.reduction = DP_SUM_RANKS, .unused_params = DP_UNUSED_FIXED},
        &par));
    CHECK_OK(step_or_idle(par, m->process == 1));
    check_grads(net, 1, 0);
    how.habit[0] = ALL;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(step_or_idle(par, i == 1 && m->process == 1));
        check_grads(net, i == 1 ? 1 : 3, i == 1 ? 1 : 3);
    }
    how.habit[1] = ONLY_W;
    CHECK_OK(dp_zero_grad(par));
    CHECK_ERROR(step_or_idle(par, false), DP_ERR_MISMATCH,
                "rank 1 did not report unit 1 'v' of 'net' in this pass, but in the first one");
    dp_close(ctx);
}

TEST(an_idle_pass_fixes_nothing)
{
    in_processes(2, fixed_after_an_idle_pass);
}

/* Rank 1 uses what it likes where it has no rows, before and after its use is fixed. */
static void use_without_rows(meeting *m)
{
    static const habit habits[] = {ONLY_W, ALL, V_SAID, ONLY_W, ALL_SAID};
    static const bool rows[] = {false, true, false, false, true};
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++) {
        plan how = {.habit = {ALL, ALL}};
        dp_ctx *ctx = open_over_shm(m, 1, (int)(PATIENCE_MS * test_timeout_scale()));
        dp_module *net = make_net(ctx, &how), *par;
        CHECK_OK(dp_distributed(
            net,
            &(dp_distributed_config){.reduction = DP_SUM_RANKS, .unused_params = (dp_unused)rule},
            &par));
        for (int i = 0; i < 5; i++) {
            how.habit[1] = habits[i];
            CHECK_OK(dp_zero_grad(par));
            CHECK_OK(rows[i] || m->process == 0 ? step_or_idle(par, false)
                                                : step_without_rows(par));
            check_grads(net, rows[i] ? 3 : 1, rows[i] ? 3 : 1);
        }
        dp_close(ctx);
    }
}

TEST(use_in_a_batch_without_rows_is_not_compared)
{
    in_processes(2, use_without_rows);
}

/* Rank 3 does not use "a", which travels before its backward has come to anything. */
static dp_module *the_wrapper;

static dp_status late_backward(dp_call *call)
{
    int rank = rank_of(call);
    if (rank == 3 && program.step > 0)
        await_early(dp_wrapper_reducer(the_wrapper), 1);
    for (int param = rank == 3; param < SIX; param++) {
        DP_TRY(add_everywhere(call, param, (float)gradient(rank, 0, param)));
        DP_TRY(dp_grad_ready(call, (size_t)param));
    }
    return DP_OK;
}

/* The hook leaves in each replica what was reduced in the step before. */
static void travels_unused(meeting *m)
{
    static const dp_method methods[] = {{"forward", number_forward}, {"backward", late_backward}};
    program = (drawn){.rule = DP_UNUSED_FIXED, .devices = 2, .count = MANY};
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    CHECK_OK(dp_distributed(
        make_six_of(ctx, methods),
        &(dp_distributed_config){.reduction = DP_SUM_RANKS,
                                 .unused_params = DP_UNUSED_FIXED,
                                 .buckets = {.hook = plain_hook, .first_bytes = 1, .bytes = 1}},
        &the_wrapper));
    for (program.step = 0; program.step < 3; program.step++) {
        CHECK_OK(step_or_idle(the_wrapper, false));
        for (int i = 0; i < SIX; i++)
            check_gradient(the_wrapper, i, (i + 1) * (i == 0 ? 1 + 2 + 3 : 1 + 2 + 3 + 4));
        CHECK_OK(dp_zero_grad(the_wrapper));
    }
    dp_close(ctx);
}

TEST(units_unused_by_a_replica_travel_as_zeros)
{
    in_processes(2, travels_unused);
}

/* ---- the order of buckets -------------------------------------------------------------------- */

static dp_status backward_from_the_end(dp_call *call)
{
    for (int param = SIX; param-- > 0;) {
        DP_TRY(add_everywhere(call, param, (float)gradient(rank_of(call), 0, param)));
        DP_TRY(dp_grad_ready(call, (size_t)param));
    }
    return DP_OK;
}

static void check_order(const dp_reducer *reducer, bool from_the_end)
{
    dp_reducer_info info;
    CHECK_OK(dp_reducer_info_get(reducer, &info));
    CHECK_INT(info.regrouped, from_the_end);
    CHECK_INT(info.bucket_count, SIX);
    for (size_t b = 0; b < SIX; b++) {
        dp_bucket_info bucket;
        CHECK_OK(dp_reducer_bucket_get(reducer, b, &bucket));
        CHECK_INT(bucket.units[0], from_the_end ? SIX - 1 - b : b);
    }
}

/* Rank 0 works from the third pass on; the others know no more of their order than it does. */
static void rank_0_is_idle_at_first(meeting *m)
{
    static const dp_method methods[] = {{"forward", number_forward},
                                        {"backward", backward_from_the_end}};
    dp_ctx *ctx = open_over_shm(m, 1, TIMEOUT_MS);
    dp_module *par;
    CHECK_OK(dp_distributed(make_six_of(ctx, methods),
                            &(dp_distributed_config){.reduction = DP_SUM_RANKS,
                                                     .unused_params = program.rule,
                                                     .buckets = {.first_bytes = 1, .bytes = 1}},
                            &par));
    for (program.step = 0; program.step < 4; program.step++) {
        bool idle = program.step < 2;
        CHECK_OK(step_or_idle(par, idle && m->process == 0));
        for (int i = 0; i < SIX; i++)
            check_gradient(par, i, (i + 1) * (idle ? 2 + 3 : 1 + 2 + 3));
        check_order(dp_wrapper_reducer(par), !idle);
        CHECK_OK(dp_zero_grad(par));
    }
    dp_close(ctx);
}

TEST(buckets_follow_the_first_pass_of_rank_0)
{
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++) {
        program = (drawn){.devices = 1, .count = FEW, .rule = (dp_unused)rule};
        in_processes(3, rank_0_is_idle_at_first);
    }
}

#if defined(TEST_SIM)
TEST_SLOW(cuda_nccl_gradients_keep_their_places, 60)
{
    on_simulated_gpus = true;
    for (int rule = DP_UNUSED_ERROR; rule <= DP_UNUSED_FIXED; rule++)
        idle_under((dp_unused)rule);
}
#endif
