/* test_local.c - dp_local.h: steps of each process' own, and sums of what they changed. */

#include <math.h>
#include "methods.h"
/* clang-format off */
#include "examples/custom_device.h"
#include "ranked.h"
#include "dp_local.h"
/* clang-format on */

/* "a", a frozen one, a buffer, an empty one, and "c" in a child. */
enum { A = 6, C = 11, ALL_OF = A + C, FIXED = 3, STEPS = 19 };

static dp_module *net_of(dp_ctx *ctx, dp_dtype dtype, int rank)
{
    const dp_param_config own[] = {{.name = "a", .dtype = dtype, .ndim = 2, .shape = {2, A / 2}},
                                   {.name = "fixed", .ndim = 1, .shape = {FIXED}, .frozen = true},
                                   {.name = "mean", .ndim = 1, .shape = {FIXED}, .buffer = true},
                                   {.name = "none", .ndim = 2, .shape = {0, 3}}};
    const dp_param_config inner = {.name = "c", .dtype = dtype, .ndim = 1, .shape = {C}};
    return net_with_child(ctx, rank, own, 4, rank, &inner);
}

static void net_io(dp_module *net, const char *name, bool put, double *numbers)
{
    dp_ctx *ctx = dp_module_ctx(net);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor data, wide;
    size_t param = 0;
    CHECK_OK(dp_module_find(net, name, &param));
    CHECK_OK(dp_params_edit(net, param, &data, NULL));
    CHECK_OK(dp_tensor_from(scope, data.device, numbers, DP_F64, data.ndim, data.shape, &wide));
    CHECK_OK(put ? dp_cast(ctx, &data, &wide) : dp_cast(ctx, &wide, &data));
    if (!put)
        CHECK_OK(dp_read(ctx, &wide, numbers, (size_t)dp_tensor_count(&wide) * sizeof *numbers));
    dp_scope_end(scope);
}

static void net_put(dp_module *net, double *numbers)
{
    net_io(net, "a", true, numbers);
    net_io(net, "inner.c", true, numbers + A);
}

static void net_get(dp_module *net, double *numbers)
{
    net_io(net, "a", false, numbers);
    net_io(net, "inner.c", false, numbers + A);
}

/* ---- the same by the words of the manual ----------------------------------------------------- */

typedef struct model { /* of all processes */
    dp_local_config config;
    int processes, share;
    bool wide; /* f64 */
    int64_t step;
    double own[RANKS][ALL_OF], left[RANKS][ALL_OF], sum[ALL_OF];
    double anchor[ALL_OF], momentum[ALL_OF];
    int64_t due[ALL_OF]; /* 0: nothing is under way */
    int64_t met[ALL_OF]; /* the step after which the last sum left */
} model;

/* As the parameters' dtype has it. */
static double rounded(const model *m, double x)
{
    return m->wide ? x : (double)(float)x;
}

static double product(const model *m, double a, double b)
{
    return rounded(m, rounded(m, a) * b);
}

static int fragment_of(const model *m, int k)
{
    int f = 0;
    while ((f + 1) * ALL_OF / m->config.fragments <= k)
        f++;
    return f;
}

static bool is_left_by(const model *m, int k)
{
    int every = m->config.every, f = fragment_of(m, k);
    return m->step % every == every * (f + 1) / m->config.fragments % every;
}

static void model_leave(model *m, int k)
{
    double ranks[RANKS];
    for (int p = 0; p < m->processes; p++) {
        m->left[p][k] = m->own[p][k];
        ranks[p] = rounded(m, m->anchor[k] - m->own[p][k]);
    }
    m->sum[k] = rounded(m, ranks[0] + (m->processes > 1 ? ranks[1] : 0));
    if (m->processes > 2)
        m->sum[k] = rounded(m, m->sum[k] + ranks[2]);
    m->due[k] = m->step + m->config.delay;
}

static void model_arrive(model *m, int k)
{
    const dp_local_config *config = &m->config;
    int64_t left = m->due[k] - config->delay;
    double share = 1.0 / m->processes, step = 0;
    if (left == m->met[k]) { /* nobody has trained since */
        step = product(m, share, m->sum[k]);
    } else if (config->momentum > 0) {
        m->momentum[k] =
            rounded(m, product(m, config->momentum, m->momentum[k]) + product(m, share, m->sum[k]));
        step = m->momentum[k];
        if (config->nesterov)
            step = rounded(m, product(m, share, m->sum[k]) +
                                  product(m, config->momentum, m->momentum[k]));
        step = product(m, config->lr, step);
    } else {
        step = product(m, config->lr * share, m->sum[k]);
    }
    m->anchor[k] = rounded(m, m->anchor[k] - step);
    for (int p = 0; p < m->processes; p++)
        m->own[p][k] = rounded(m, m->anchor[k] + rounded(m, m->own[p][k] - m->left[p][k]));
    m->due[k] = 0;
    m->met[k] = left;
}

static void model_step(model *m)
{
    m->step++;
    for (int k = 0; k < ALL_OF; k++) {
        if (m->due[k] > 0 && m->due[k] == m->step)
            model_arrive(m, k);
        if (is_left_by(m, k)) {
            model_leave(m, k);
            if (m->config.delay == 0)
                model_arrive(m, k);
        }
    }
}

static void model_sync(model *m)
{
    for (int k = 0; k < ALL_OF; k++) {
        if (m->due[k] > 0)
            model_arrive(m, k);
        model_leave(m, k);
        model_arrive(m, k);
    }
}

/* What a process changes in a step. */
static double change(int process, int64_t step, int k)
{
    return (double)((process * 31 + (int)step * 17 + k * 7) % 23 - 11) / (k % 3 == 0 ? 7 : 64);
}

static void model_train(model *m)
{
    for (int p = 0; p < m->processes; p++)
        for (int k = 0; k < ALL_OF; k++)
            m->own[p][k] = rounded(m, m->own[p][k] + rounded(m, change(p, m->step, k)));
}

static model *model_of(dp_local_config config, int processes, bool wide)
{
    model *m = test_room(sizeof *m);
    m->config = config;
    m->config.lr = dp_or(config.lr, 1);
    m->config.fragments = config.fragments > 0 ? config.fragments : 1;
    m->processes = processes;
    m->wide = wide;
    for (int k = 0; k < ALL_OF; k++) {
        m->anchor[k] = rounded(m, (double)k / 3 - 2);
        for (int p = 0; p < processes; p++)
            m->own[p][k] = m->anchor[k];
    }
    return m;
}

/* ---- one process of it ----------------------------------------------------------------------- */

typedef struct one {
    dp_ctx *ctx;
    dp_info job;
    dp_module *net;
    dp_local *local;
} one;

/* Processes other than the first begin with other numbers. */
static one one_of(dp_ctx *ctx, const model *m, dp_dtype dtype, int rank)
{
    one o = {.ctx = ctx};
    double numbers[ALL_OF];
    CHECK_OK(dp_info_get(ctx, &o.job));
    o.net = net_of(ctx, dtype, rank);
    for (int k = 0; k < ALL_OF; k++)
        numbers[k] = o.job.process == 0 ? m->anchor[k] : 99 + k;
    net_put(o.net, numbers);
    CHECK_OK(dp_local_create(o.net, &m->config, &o.local));
    return o;
}

static dp_local_info told_by(const one *o)
{
    dp_local_info info;
    CHECK_OK(dp_local_info_get(o->local, &info));
    return info;
}

static void check_own(const one *o, const model *m)
{
    double got[ALL_OF];
    net_get(o->net, got);
    for (int k = 0; k < ALL_OF; k++)
        CHECK_F64(got[k], m->own[o->job.process][k], 0);
}

/* A training step of the model and of this process. */
static void train(const one *o, model *m)
{
    double numbers[ALL_OF];
    model_train(m);
    net_get(o->net, numbers);
    for (int k = 0; k < ALL_OF; k++)
        numbers[k] = rounded(m, numbers[k] + rounded(m, change(o->job.process, m->step, k)));
    net_put(o->net, numbers);
}

static void step(const one *o, model *m)
{
    train(o, m);
    model_step(m);
    CHECK_OK(dp_local_step(o->local));
    check_own(o, m);
}

static size_t under_way(const model *m)
{
    size_t count = 0;
    for (int k = 0; k < ALL_OF; k++)
        count += m->due[k] > 0 && (k == 0 || fragment_of(m, k) != fragment_of(m, k - 1));
    return count;
}

static void check_sync(const one *o, model *m)
{
    model_sync(m);
    CHECK_OK(dp_local_sync(o->local));
    check_own(o, m);
    CHECK_OK(dp_params_compare(o->net));
    CHECK_INT(told_by(o).under_way, 0);
}

static const dp_local_config configs[] = {
    {.every = 1},
    {.every = 4},
    {.every = 3, .lr = 0.5},
    {.every = 3, .momentum = 0.9},
    {.every = 5, .lr = 0.7, .momentum = 0.9, .nesterov = true},
    {.every = 4, .fragments = 3},
    {.every = 4, .delay = 3},
    {.every = 6, .lr = 0.7, .momentum = 0.9, .nesterov = true, .fragments = 3, .delay = 1},
    {.every = 6, .lr = 0.7, .momentum = 0.9, .nesterov = true, .fragments = 4, .delay = 5},
    {.every = 2, .fragments = 2, .delay = 1}};
enum { CONFIGS = sizeof configs / sizeof configs[0] };

static void steps_of(dp_ctx *ctx, const dp_local_config *config, dp_dtype dtype, int rank)
{
    dp_info job;
    CHECK_OK(dp_info_get(ctx, &job));
    model *m = model_of(*config, job.process_count, dtype == DP_F64);
    double fixed[FIXED] = {1, 2, 3}, mean[FIXED] = {4, 5, job.process}, got[FIXED];
    one o = one_of(ctx, m, dtype, rank);
    check_own(&o, m);
    net_io(o.net, "mean", true, mean);
    net_io(o.net, "fixed", true, fixed);
    for (int i = 0; i < STEPS; i++) {
        step(&o, m);
        CHECK_INT(told_by(&o).under_way, under_way(m));
        CHECK_INT(told_by(&o).step_count, i + 1);
        if (config->delay == 0 && m->config.fragments == 1 && m->step % config->every == 0)
            CHECK_OK(dp_params_compare(o.net));
    }
    check_sync(&o, m);
    step(&o, m);
    check_sync(&o, m);
    net_io(o.net, "mean", false, got);
    CHECK_BYTES(got, mean, sizeof got);
    net_io(o.net, "fixed", false, got);
    CHECK_BYTES(got, fixed, sizeof got);
    dp_local_destroy(o.local);
    CHECK_OK(dp_module_destroy(o.net));
}

static void all_configs(dp_ctx *ctx, dp_dtype dtype, int rank)
{
    for (size_t i = 0; i < CONFIGS; i++)
        steps_of(ctx, &configs[i], dtype, rank);
    dp_close(ctx);
}

static void in_f32(meeting *m)
{
    all_configs(open_job(m, 1, dp_cpu()), DP_F32, 0);
}

static void in_f64(meeting *m)
{
    all_configs(open_job(m, 1, dp_cpu()), DP_F64, 0);
}

static void on_the_second_of_two(meeting *m)
{
    all_configs(open_job(m, 2, dp_cpu()), DP_F32, 1);
}

static void on_toys(meeting *m)
{
    all_configs(open_job(m, 2, toy_device()), DP_F32, 0);
}

TEST_SLOW(steps_are_exactly_those_of_the_manual, 60)
{
    all_configs(open_here(1), DP_F32, 0);
    all_configs(open_here(2), DP_F64, 1);
    in_processes(2, in_f32);
    in_processes(2, in_f64);
    in_processes(3, in_f32);
    in_processes(2, on_the_second_of_two);
    in_processes_on(dp_cpu(), 3, in_f32);
    in_processes_on(toy_device(), 2, on_toys);
}

#if defined(TEST_SIM)
/* What open_job() is given does not matter there. */
TEST_SLOW(steps_of_gpus_are_the_same, 60)
{
    on_gpus("11", in_f32);
    on_gpus("21", in_f64);
}
#endif

/* ---- worked values --------------------------------------------------------------------------- */

static dp_local *nesterov_of(dp_module *net, int fragments)
{
    dp_local *local = NULL;
    CHECK_OK(dp_local_create(
        net,
        &(dp_local_config){
            .every = 2, .lr = 0.5, .momentum = 0.5, .nesterov = true, .fragments = fragments},
        &local));
    return local;
}

/* From 0 process 0 goes to 2 and process 1 to 6, in halves. torch.optim.SGD steps from 0 by -lr
   times: gradient -4, with momentum 0.5 and nesterov -6; then gradient -2, momentum -4: -4. */
static void worked(meeting *meet)
{
    double numbers[ALL_OF] = {0};
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_module *net = net_of(ctx, DP_F16, 0);
    net_put(net, numbers);
    dp_local *local = nesterov_of(net, 1);
    for (int i = 0; i < 4; i++) {
        const double adds[] = {2 + 4 * meet->process, 0, 2, 0}, want[] = {0, 3, 0, 5};
        net_get(net, numbers);
        for (int k = 0; k < ALL_OF; k++)
            numbers[k] += adds[i];
        net_put(net, numbers);
        CHECK_OK(dp_local_step(local));
        net_get(net, numbers);
        for (int k = 0; k < ALL_OF && i % 2 != 0; k++)
            CHECK_F64(numbers[k], want[i], 0);
    }
    dp_close(ctx);
}

TEST(worked_values_in_halves)
{
    in_processes(2, worked);
}

/* As many evaluations as there are make no difference: see `worked` for the numbers. */
static void looked_at(meeting *meet)
{
    double numbers[ALL_OF] = {0};
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_module *net = net_of(ctx, DP_F32, 0);
    net_put(net, numbers);
    dp_local *local = nesterov_of(net, 1);
    CHECK_OK(dp_local_sync(local));
    for (int i = 0; i < 2; i++) {
        static const double adds[] = {2, 1}, want[] = {3, 4.25};
        for (int k = 0; k < 2; k++) {
            net_get(net, numbers);
            for (int j = 0; j < ALL_OF && k == 0; j++)
                numbers[j] += adds[i] + (i == 0) * 4 * meet->process;
            net_put(net, numbers);
            CHECK_OK(dp_local_step(local));
        }
        for (int look = 0; look < 3; look++) {
            net_get(net, numbers);
            for (int k = 0; k < ALL_OF; k++)
                CHECK_F64(numbers[k], want[i], 0);
            CHECK_OK(dp_local_sync(local));
        }
    }
    numbers[0] += 2 * meet->process; /* by hand: all meet in the middle */
    net_put(net, numbers);
    CHECK_OK(dp_local_sync(local));
    dp_value saved;
    CHECK_OK(dp_local_save(local, dp_scope_begin(ctx), &saved));
    dp_local_destroy(local);
    for (int fragments = 1; fragments < 3; fragments++) { /* and where it goes on */
        local = nesterov_of(net, fragments);
        CHECK_OK(dp_local_load(local, saved));
        CHECK_OK(dp_local_sync(local));
        net_get(net, numbers);
        CHECK_F64(numbers[0], 5.25, 0);
        CHECK_F64(numbers[1], 4.25, 0);
        dp_local_destroy(local);
    }
    dp_close(ctx);
}

TEST(without_a_step_of_training_nothing_moves)
{
    in_processes(2, looked_at);
}

/* Halves are cast where they lie, and the row may be on another device. */
static void on_two_devices(dp_ctx *ctx)
{
    const dp_param_config param = {.name = "w", .dtype = DP_BF16, .ndim = 1, .shape = {5}};
    dp_module *net = net_with_child(ctx, 0, &param, 1, 1, &param);
    dp_local *local = NULL;
    CHECK_OK(dp_local_create(net, &(dp_local_config){.every = 1, .lr = 0.5}, &local));
    double numbers[5] = {2, 4, 6, 8, 10};
    net_io(net, "w", true, numbers);
    net_io(net, "inner.w", true, numbers);
    CHECK_OK(dp_local_step(local));
    for (int i = 0; i < 2; i++) {
        net_io(net, i == 0 ? "w" : "inner.w", false, numbers);
        for (int k = 0; k < 5; k++)
            CHECK_F64(numbers[k], k + 1, 0);
    }
    dp_close(ctx);
}

TEST(halves_on_two_devices)
{
    on_two_devices(open_on(dp_cpu(), 2));
    on_two_devices(open_on(toy_device(), 2));
}

/* Fewer elements than fragments, and none. The first process has them on its second device. */
static void of_two_elements(meeting *meet)
{
    static const dp_param_config params[] = {
        {.name = "a", .ndim = 1, .shape = {2}},
        {.name = "mean", .ndim = 1, .shape = {2}, .buffer = true}};
    const int rank = meet->process == 0 ? 1 : 0;
    dp_ctx *ctx = open_job(meet, 2, dp_cpu());
    for (size_t first = 0; first < 2; first++) {
        double numbers[2] = {7 + meet->process, 8};
        dp_module *net = NULL;
        dp_local *local = NULL;
        dp_local_info info;
        CHECK_OK(dp_module_create(ctx,
                                  &(dp_module_config){.name = "net",
                                                      .params = params + first,
                                                      .param_count = 2 - first,
                                                      .local_rank = rank},
                                  &net));
        net_io(net, params[first].name, true, numbers);
        CHECK_OK(dp_local_create(net, &(dp_local_config){.every = 3, .fragments = 3}, &local));
        net_io(net, params[first].name, false, numbers);
        CHECK_F64(numbers[0], first == 0 ? 7 : 7 + meet->process, 0);
        numbers[0] += 2 * meet->process;
        net_io(net, params[first].name, true, numbers);
        for (int i = 0; i < 3; i++)
            CHECK_OK(dp_local_step(local));
        net_io(net, params[first].name, false, numbers);
        CHECK_F64(numbers[0], first == 0 ? 8 : 7 + 3 * meet->process, 0);
        CHECK_OK(dp_local_info_get(local, &info));
        CHECK_INT(info.sum_count, first == 0 ? 2 : 0);
        CHECK_OK(dp_local_sync(local));
        dp_local_destroy(local);
    }
    dp_close(ctx);
}

TEST(few_elements_make_fewer_fragments)
{
    in_processes(2, of_two_elements);
}

/* What is under way when a context closes is dropped. */
static void closes_early(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    model *m = model_of((dp_local_config){.every = 3, .delay = 2}, 2, false);
    one o = one_of(ctx, m, DP_F32, 0);
    for (int i = 0; i < 3; i++)
        step(&o, m);
    CHECK_INT(told_by(&o).under_way, 1);
    if (meet->process == 0)
        CHECK_INT(told_by(&o).memory_bytes, 3 * ALL_OF * sizeof(float));
    wait_for_all(meet);
    dp_close(ctx);
}

/* And when local steps end: parameters stay as they are. */
static void ends_early(meeting *meet)
{
    double before[ALL_OF], after[ALL_OF];
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    model *m = model_of((dp_local_config){.every = 6, .fragments = 3, .delay = 5}, 2, false);
    one o = one_of(ctx, m, DP_F32, 0);
    for (int i = 0; i < 6; i++)
        step(&o, m);
    CHECK_INT(told_by(&o).under_way, 3);
    net_get(o.net, before);
    dp_local_destroy(o.local);
    dp_local_destroy(NULL);
    net_get(o.net, after);
    CHECK_BYTES(after, before, sizeof after);
    dp_close(ctx);
}

TEST(what_is_under_way_may_be_dropped)
{
    in_processes(2, closes_early);
    in_processes(2, ends_early);
}

/* ---- what travels ---------------------------------------------------------------------------- */

/* Differences in 8 bits: all processes have the same all the same. */
static void compressed(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_compressor *small = NULL;
    CHECK_OK(dp_compressor_create(ctx, &(dp_compressor_config){.bits = 8}, &small));
    model *m = model_of((dp_local_config){.every = 2,
                                          .fragments = 2,
                                          .buckets = {.hook = dp_compress, .hook_user = small}},
                        2, false);
    one o = one_of(ctx, m, DP_F32, 0);
    double got[ALL_OF];
    for (int i = 0; i < 6; i++) {
        train(&o, m);
        model_step(m);
        CHECK_OK(dp_local_step(o.local));
    }
    CHECK_OK(dp_local_sync(o.local));
    model_sync(m);
    CHECK_OK(dp_params_compare(o.net));
    net_get(o.net, got);
    for (int k = 0; k < ALL_OF; k++)
        CHECK_F64(got[k], m->own[0][k], 0.1);
    CHECK_INT(told_by(&o).sum_count, 8);
    /* Of 8 and 9 elements: parts of 4 and 6, of 8 and 10 bytes. */
    CHECK_INT(told_by(&o).bytes, 4 * (3 * 8 + 3 * 10));
    dp_close(ctx);
}

TEST(differences_travel_in_bits)
{
    in_processes(2, compressed);
}

/* With a failing hook. */
typedef struct failing {
    bool now;
} failing;

static dp_status fails_now(const dp_bucket *bucket, void *user)
{
    const failing *f = user;
    return f->now ? dp_error(DP_ERR_USER, "no hook today") : plain_hook(bucket, NULL);
}

/* A sum that fails changes nothing, and the next one has all. */
static void fails_once(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    failing f = {false};
    model *m = model_of(
        (dp_local_config){.every = 2, .buckets = {.hook = fails_now, .hook_user = &f}}, 2, false);
    one o = one_of(ctx, m, DP_F32, 0);
    step(&o, m);
    step(&o, m);
    step(&o, m);
    f.now = meet->process == 1;
    train(&o, m);
    CHECK_ERROR(dp_local_step(o.local), DP_ERR_USER, "dp_local_step: ");
    CHECK_SAYS(dp_last_error(), "no hook today");
    m->step++;
    check_own(&o, m);
    CHECK_INT(told_by(&o).under_way, 0);
    CHECK_ERROR(dp_local_sync(o.local), DP_ERR_USER, "dp_local_sync: ");
    f.now = false;
    step(&o, m);
    step(&o, m);
    CHECK_OK(dp_params_compare(o.net));
    dp_close(ctx);
}

TEST(a_sum_that_fails_changes_nothing)
{
    in_processes(2, fails_once);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void resumed(meeting *meet)
{
    for (int i = 0; i < CONFIGS; i++) {
        dp_ctx *ctx = open_job(meet, 1, dp_cpu());
        dp_scope *scope = dp_scope_begin(ctx);
        model *m = model_of(configs[i], 2, false);
        one o = one_of(ctx, m, DP_F32, 0), second = {.ctx = ctx, .job = o.job};
        double numbers[ALL_OF];
        dp_value saved;
        for (int k = 0; k < 7; k++)
            step(&o, m);
        if (told_by(&o).under_way > 0) {
            CHECK_ERROR(dp_local_save(o.local, scope, &saved), DP_ERR_STATE,
                        "dp_local_save: sums of 'net' are under way: call dp_local_sync first");
            CHECK_ERROR(dp_local_load(o.local, dp_none()), DP_ERR_STATE, "under way");
            check_sync(&o, m);
        }
        CHECK_OK(dp_local_save(o.local, scope, &saved));
        CHECK_INT(dp_count(saved), configs[i].momentum > 0 ? 4 : 3);
        second.net = net_of(ctx, DP_F32, 0);
        CHECK_OK(dp_local_create(second.net, &configs[i], &second.local));
        net_get(o.net, numbers);
        net_put(second.net, numbers);
        CHECK_OK(dp_local_load(second.local, saved));
        dp_scope_end(scope);
        dp_local_destroy(o.local);
        check_sync(&second, m);
        check_sync(&second, m);
        for (int k = 0; k < STEPS; k++)
            step(&second, m);
        check_sync(&second, m);
        dp_close(ctx);
    }
}

TEST_SLOW(local_steps_go_on_where_they_stopped, 30)
{
    in_processes(2, resumed);
}

static dp_value with(dp_scope *scope, dp_value steps, dp_value anchor, dp_value momentum)
{
    return DP_DICT(scope, {"steps", steps}, {"anchor", anchor}, {"momentum", momentum});
}

TEST(checkpoint_that_does_not_fit_changes_nothing)
{
    dp_ctx *ctx = open_here(1), *other = open_here(1);
    dp_scope *s = dp_scope_begin(ctx);
    model *m = model_of((dp_local_config){.every = 2, .momentum = 0.5}, 1, false);
    one o = one_of(ctx, m, DP_F32, 0);
    dp_value saved;
    for (int i = 0; i < 3; i++)
        step(&o, m);
    CHECK_OK(dp_local_save(o.local, s, &saved));
    dp_value steps = dp_get(saved, "steps"), anchor = dp_get(saved, "anchor");
    dp_value momentum = dp_get(saved, "momentum"), a = dp_get(anchor, "a");
    dp_value c = dp_get(anchor, "inner.c"), none = dp_get(anchor, "none");
    float numbers[A] = {0};
    double doubles[A] = {0};
    const struct {
        dp_value saved;
        const char *says;
    } wrong[] = {
        {dp_none(), "'steps' is missing, or not a count"},
        {with(s, dp_int(-1), anchor, momentum), "'steps' is missing, or not a count"},
        {with(s, dp_int(INT64_MAX), anchor, momentum), "'steps' is missing, or not a count"},
        {with(s, steps, dp_none(), momentum), "no anchor of 'a' was saved"},
        {with(s, steps, anchor, dp_none()), "no momentum of 'a' was saved"},
        {with(s, steps, DP_DICT(s, {"a", a}, {"none", none}), momentum),
         "no anchor of 'inner.c' was saved"},
        {with(s, steps, DP_DICT(s, {"a", a}, {"none", none}, {"inner.c", c}, {"d", a}), momentum),
         "anchor of 3 parameters, saved 4"},
        {with(s, steps,
              DP_DICT(s, {"a", dp_array(s, numbers, DP_F32, DP_SHAPE(3, 2))}, {"none", none},
                      {"inner.c", c}),
              momentum),
         "anchor of 'a' has another shape"},
        {with(s, steps,
              DP_DICT(s, {"a", dp_array(s, doubles, DP_F64, DP_SHAPE(2, 3))}, {"none", none},
                      {"inner.c", c}),
              momentum),
         "a is f64, not f32"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(dp_local_load(o.local, wrong[i].saved) != DP_OK);
        CHECK_SAYS(dp_last_error(), "dp_local_load: ");
        CHECK_SAYS(dp_last_error(), wrong[i].says);
    }
    CHECK_OK(dp_local_load(o.local, with(s, dp_int(0), anchor, momentum)));
    CHECK_INT(told_by(&o).step_count, 0);
    CHECK_OK(dp_local_load(o.local, saved));
    step(&o, m);
    CHECK_ERROR(dp_local_save(o.local, NULL, &saved), DP_ERR_INVALID, "scope is NULL");
    CHECK_ERROR(dp_local_save(o.local, dp_scope_begin(other), &saved), DP_ERR_INVALID,
                "dp_local_save: the scope is of another context");
    CHECK_ERROR(dp_local_save(o.local, s, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_local_load(o.local, saved)); /* one step back */
    CHECK_INT(told_by(&o).step_count, 3);
    dp_close(ctx), dp_close(other);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static dp_status steps_together(int local_rank, dp_scope *scope, void *user)
{
    const one *o = user;
    (void)scope;
    if (local_rank > 0)
        return DP_OK;
    CHECK_ERROR(dp_local_step(o->local), DP_ERR_STATE,
                "dp_local_step: a function under dp_run called it on local rank 0");
    CHECK_ERROR(dp_local_sync(o->local), DP_ERR_STATE,
                "dp_local_sync: a function under dp_run called it on local rank 0");
    dp_local_destroy(o->local);
    CHECK_SAYS(dp_last_error(), "dp_local_destroy: a function under dp_run called it");
    return DP_OK;
}

/* What is refused is not counted, and what is under way stays so. */
TEST(functions_that_run_together_make_no_step)
{
    dp_ctx *ctx = open_here(2);
    model *m = model_of((dp_local_config){.every = 2, .delay = 1}, 1, false);
    one o = one_of(ctx, m, DP_F32, 0);
    for (int i = 0; i < 5; i++) {
        CHECK_OK(dp_run(ctx, NULL, steps_together, &o));
        CHECK_INT(told_by(&o).step_count, i);
        CHECK_INT(told_by(&o).under_way, under_way(m));
        step(&o, m);
    }
    check_sync(&o, m);
    dp_close(ctx);
}

TEST(numbers_that_make_no_sense)
{
    static const struct {
        dp_local_config config;
        const char *says;
    } wrong[] = {{{.every = 0}, "dp_local_create: every is 0, which is below 1"},
                 {{.every = 2, .lr = -1}, "lr is -1, not a finite number above 0"},
                 {{.every = 2, .lr = (double)INFINITY}, "lr is inf, not"},
                 {{.every = 2, .lr = DP_ZERO}, "lr is 0, not"},
                 {{.every = 2, .momentum = 1}, "momentum is 1, not from 0 to below 1"},
                 {{.every = 2, .momentum = -0.5}, "momentum is -0.5"},
                 {{.every = 2, .nesterov = true}, "nesterov is set, but there is no momentum"},
                 {{.every = 2, .fragments = 3}, "fragments is 3, not from 1 to 2, as every is"},
                 {{.every = 2, .fragments = -1}, "fragments is -1"},
                 {{.every = 2, .delay = 2}, "delay is 2, not from 0 to below 2, as every is"},
                 {{.every = 2, .delay = -1}, "delay is -1"}};
    static const plan how;
    dp_ctx *ctx = open_here(2);
    dp_module *net = net_of(ctx, DP_F32, 0), *par = NULL;
    dp_local *local = NULL;
    dp_local_info info;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_ERROR(dp_local_create(net, &wrong[i].config, &local), DP_ERR_INVALID, wrong[i].says);
    CHECK_ERROR(dp_local_create(net, NULL, &local), DP_ERR_INVALID, "every is 0");
    CHECK_ERROR(dp_local_create(NULL, NULL, &local), DP_ERR_INVALID, "not a module");
    CHECK_ERROR(dp_local_create(net, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_local_step(NULL), DP_ERR_INVALID, "dp_local_step: local is NULL");
    CHECK_ERROR(dp_local_sync(NULL), DP_ERR_INVALID, "local is NULL");
    CHECK_ERROR(dp_local_save(NULL, NULL, NULL), DP_ERR_INVALID, "local is NULL");
    CHECK_ERROR(dp_local_load(NULL, dp_none()), DP_ERR_INVALID, "local is NULL");
    CHECK_ERROR(dp_local_info_get(NULL, &info), DP_ERR_INVALID, "local is NULL");
    CHECK_OK(dp_distributed(make_net(ctx, &how), NULL, &par));
    CHECK_ERROR(dp_local_create(par, &configs[0], &local), DP_ERR_INVALID,
                "dp_local_create: ranks have 'w' in common already: give the module that "
                "'distributed' wraps");
    CHECK(local == NULL);
    CHECK_OK(dp_local_create(net, &configs[0], &local));
    CHECK_ERROR(dp_local_info_get(local, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_local_info_get(local, &info));
    CHECK_F64(info.config.lr, 1, 0);
    CHECK_INT(info.config.fragments, 1);
    dp_close(ctx);
}

/* All processes learn what differs, and may try again. */
static void another_config(meeting *meet)
{
    dp_ctx *ctx = open_job(meet, 1, dp_cpu());
    dp_module *net = net_of(ctx, DP_F32, 0);
    dp_local *local = NULL;
    bool odd = meet->process == 1;
    CHECK_ERROR(dp_local_create(net, &(dp_local_config){.every = odd ? 4 : 8}, &local),
                DP_ERR_MISMATCH, "dp_local_create: every is 4 on rank 1, 8 on rank 0");
    CHECK_ERROR(
        dp_local_create(net, &(dp_local_config){.every = 8, .momentum = odd ? 0.5 : 0.25}, &local),
        DP_ERR_MISMATCH, "momentum is 0.5 on rank 1, 0.25 on rank 0");
    CHECK_ERROR(dp_local_create(net, &(dp_local_config){.every = odd ? 0 : 8}, &local),
                DP_ERR_INVALID, "rank 1: ");
    CHECK_ERROR(
        dp_local_create(
            net, &(dp_local_config){.every = 8, .buckets.hook = odd ? plain_hook : NULL}, &local),
        DP_ERR_MISMATCH, "rank 1 has a hook, rank 0 has no hook");
    CHECK(local == NULL);
    CHECK_OK(dp_local_create(net, &(dp_local_config){.every = 8}, &local));
    dp_close(ctx);
}

TEST(processes_that_differ_are_told_so)
{
    in_processes(2, another_config);
}

/* ---- memory ---------------------------------------------------------------------------------- */

TEST(each_allocation_may_fail)
{
    bool fired = true;
    for (size_t at = 1; fired; at++) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        dp_local *local = NULL;
        dp_value saved;
        model *m = model_of(configs[7], 1, false);
        CHECK_OK(dp_open(&(dp_config){.device_count = 2,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_module *net = net_of(ctx, DP_F32, 1);
        net_put(net, m->anchor);
        counter.fail_at = counter.call_count + at;
        dp_status status = dp_local_create(net, &configs[7], &local);
        for (int i = 0; i < 12 && status == DP_OK; i++)
            status = dp_local_step(local);
        size_t calls = counter.call_count;
        for (int i = 0; i < 12 && status == DP_OK; i++)
            status = dp_local_step(local);
        CHECK_INT(counter.call_count, calls);
        if (status == DP_OK)
            status = dp_local_sync(local);
        if (status == DP_OK)
            status = dp_local_save(local, dp_scope_begin(ctx), &saved);
        if (status == DP_OK)
            status = dp_local_load(local, saved);
        fired = counter.fail_count > 0;
        CHECK_STATUS(status, fired ? DP_ERR_NO_MEMORY : DP_OK);
        counter.fail_at = 0;
        one o = {.ctx = ctx, .net = net};
        check_own(&o, m);
        dp_local_destroy(local);
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* And nothing hangs. */
TEST(after_a_failure_each_call_says_why)
{
    dp_ctx *ctx = open_here(1);
    model *m = model_of(configs[0], 1, false);
    one o = one_of(ctx, m, DP_F32, 0);
    dp_abort(ctx, DP_ERR_ABORTED, "enough");
    CHECK_ERROR(dp_local_step(o.local), DP_ERR_ABORTED, "enough");
    CHECK_ERROR(dp_local_sync(o.local), DP_ERR_ABORTED, "enough");
    dp_local_destroy(o.local);
    CHECK_ERROR(dp_local_create(o.net, &configs[0], &o.local), DP_ERR_ABORTED, "dp_local_create: ");
    CHECK_SAYS(dp_last_error(), "enough");
    dp_close(ctx);
}

TEST(a_module_that_has_gone_is_noticed)
{
    const char *says = "the module was destroyed";
    dp_ctx *ctx = open_here(1);
    dp_scope *scope = dp_scope_begin(ctx);
    model *m = model_of((dp_local_config){.every = 2, .delay = 1}, 1, false);
    one o = one_of(ctx, m, DP_F32, 0);
    dp_value saved;
    step(&o, m);
    step(&o, m);
    CHECK_OK(dp_module_destroy(o.net));
    CHECK_ERROR(dp_local_step(o.local), DP_ERR_STATE, says);
    CHECK_INT(told_by(&o).step_count, 2);
    CHECK_ERROR(dp_local_sync(o.local), DP_ERR_STATE, says);
    CHECK_INT(told_by(&o).under_way, 1);
    CHECK_ERROR(dp_local_save(o.local, scope, &saved), DP_ERR_STATE, says);
    CHECK_ERROR(dp_local_load(o.local, dp_none()), DP_ERR_STATE, says);
    dp_close(ctx);
}
