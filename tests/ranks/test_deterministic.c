/* test_deterministic.c - the same bits on any number of devices, in any number of processes: ranks
   are added in one tree, and shards make as many ranks of whatever there is. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "examples/mlp.h"
#include "grads.h"
/* clang-format off */
#include "dp_data.h"
/* clang-format on */

enum { MOST = 13, FORMS = 3, PERIOD = 1009 };

static const dp_dtype floats[] = {DP_F32, DP_F64, DP_F16, DP_BF16};

/* ---- sums of ranks, however they are spread -------------------------------------------------- */

/* Numbers that cancel each other, so that the order shows. */
static void make_rows(char *rows, int ranks, dp_dtype dtype, size_t count, uint64_t state)
{
    size_t bytes = dp_dtype_bytes(dtype);
    for (size_t i = 0; i < (size_t)ranks * count; i++) {
        static const double steps[] = {1e8, 1, -1e8, 0.3};
        uint64_t u = test_random(&state);
        double n = u % 3 == 0 ? steps[u / 3 % 4] : ldexp((double)(int64_t)u, (int)(u % 7) - 64);
        if (dtype == DP_F16 && fabs(n) > 1000)
            n = copysign(2048, n);
        number_put(dtype, rows + i * bytes, 0, (number)n);
    }
}

typedef struct form {
    dp_op op;
    double scale;
} form;

static const form forms[FORMS] = {{DP_OP_SUM, 1}, {DP_OP_MEAN, 0.3}, {DP_OP_PROD, 1}};

static char *tree_of_rows(const char *rows, int ranks, dp_dtype dtype, size_t count, form how)
{
    const void *in[MOST];
    size_t bytes = count * dp_dtype_bytes(dtype);
    void *out = malloc(bytes);
    CHECK(out != NULL);
    for (int r = 0; r < ranks; r++)
        in[r] = rows + (size_t)r * bytes;
    number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                    .op = how.op == DP_OP_MEAN ? DP_OP_SUM : how.op,
                                    .dtype = dtype,
                                    .count = count,
                                    .out = &out,
                                    .in = in,
                                    .out_count = 1,
                                    .in_count = (size_t)ranks,
                                    .alpha = how.scale,
                                    .beta = how.op == DP_OP_MEAN ? ranks : 1});
    return out;
}

static void lay_out(char *out, size_t bytes, const char *row, size_t row_bytes)
{
    for (size_t done = 0; done < bytes; done += row_bytes)
        memcpy(out + done, row, bytes - done < row_bytes ? bytes - done : row_bytes);
}

/* Each rank has its row, over and over, and gets what all come to; the last local one wants
   nothing, if it is not the only one. */
static void check_sum(dp_ctx *ctx, dp_dtype dtype, size_t count, form how)
{
    static char *rows;
    dp_info info;
    dp_part parts[MOST];
    size_t period = count < PERIOD ? count : PERIOD, size = dp_dtype_bytes(dtype);
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK(info.rank_count <= MOST);
    rows = rows != NULL ? rows : test_room(MOST * PERIOD * 8);
    make_rows(rows, info.rank_count, dtype, period, count + (uint64_t)dtype);
    char *sum = tree_of_rows(rows, info.rank_count, dtype, period, how),
         *want = malloc(count * size);
    CHECK(want != NULL);
    lay_out(want, count * size, sum, period * size);
    for (int i = 0; i < info.local_count; i++) {
        char *own = malloc(count * size);
        CHECK(own != NULL);
        lay_out(own, count * size, rows + (size_t)(info.rank_first + i) * period * size,
                period * size);
        parts[i] = (dp_part){.send = own, .recv = i > 0 && i + 1 == info.local_count ? NULL : own};
    }
    CHECK_OK(how.op == DP_OP_PROD
                 ? dp_all_reduce(ctx, parts, count, dtype, how.op)
                 : dp_all_reduce_scaled(ctx, parts, count, dtype, how.op, how.scale));
    for (int i = 0; i < info.local_count; i++) {
        if (parts[i].recv != NULL && memcmp(parts[i].recv, want, count * size) != 0)
            test_fail(__FILE__, __LINE__, "%zu %s, op %d, %d ranks, %d of them here from %d on",
                      count, dp_dtype_name(dtype), (int)how.op, info.rank_count, info.local_count,
                      info.rank_first);
        free((void *)(uintptr_t)parts[i].send);
    }
    free(sum);
    free(want);
}

static void check_sums(dp_ctx *ctx, const size_t *counts)
{
    for (int i = 0; i < 4 * FORMS; i++)
        for (int c = 0; counts[c] > 0; c++)
            check_sum(ctx, floats[i % 4], counts[c], forms[i / 4]);
    dp_close(ctx);
}

static void sums_in_one_process(void)
{
    static const size_t counts[] = {1, 7, 131, 40003, 0};
    for (int ranks = 1; ranks <= MOST; ranks += test_stride() > 1 ? 4 : 1)
        check_sums(open_here(ranks), counts);
}

TEST_SLOW(sums_of_one_process_are_those_of_a_tree, 60)
{
    sums_in_one_process();
}

TEST_SLOW(vectors_of_any_width_give_the_same_sums, 60)
{
    setenv("DP_SIMD", "base", 1);
    sums_in_one_process();
}

static const int *spread; /* local ranks of each process */

static void sums_as_spread(meeting *m)
{
    static const size_t counts[] = {1, 131, 16385, 70001, 0}; /* small and large in shared memory */
    dp_ctx *ctx = NULL;
    dp_config config = config_of(m, spread[m->process]);
    config.colls = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    check_sums(ctx, counts);
}

TEST_SLOW(sums_of_processes_are_those_of_one, 120)
{
    static const int spreads[][BOOT_PROCESSES] = {
        {1, 1},          {2, 2},       {4, 4},          {1, 1, 1, 1}, {2, 2, 2, 2},
        {1, 1, 1},       {2, 2, 2},    {1, 1, 1, 1, 1}, {3, 3},       {3, 3, 3},
        {1, 2},          {2, 1},       {5, 4},          {1, 8},       {8, 1},
        {7, 1, 1},       {1, 6, 2},    {3, 2, 4},       {5, 1, 1, 6}, {1, 1, 5, 2, 4},
        {3, 1, 1, 1, 1}, {1, 2, 3, 3}, {6, 6},          {4, 1, 8},    {1, 1, 1, 1, 1, 1, 1, 1}};
    const size_t step = test_stride() > 4 ? 9 : test_stride() > 1 ? 4 : 1;
    for (size_t i = 0; i < sizeof spreads / sizeof *spreads; i += step) {
        int processes = 0;
        while (processes < BOOT_PROCESSES && spreads[i][processes] > 0)
            processes++;
        spread = spreads[i];
        in_processes(processes, sums_as_spread);
    }
}

/* ---- shards --------------------------------------------------------------------------------- */

static dp_status open_shards(dp_config config, dp_ctx **out)
{
    config.local_only = config.bootstrap.all_gather == NULL;
    return dp_open(&config, out);
}

TEST(shards_are_ranks)
{
    for (int devices = 1; devices <= 8; devices *= 2)
        for (int named = 0; named < 2; named++) {
            static const int indices[] = {5, 2, 7, 0, 1, 3, 4, 6};
            dp_config config = {.shards = 8, .device_count = devices}, got;
            dp_info info;
            dp_ctx *ctx, *again;
            config.devices = named ? indices : NULL;
            CHECK_OK(open_shards(config, &ctx));
            CHECK_OK(dp_info_get(ctx, &info));
            CHECK_INT(info.local_count, 8);
            CHECK_INT(info.rank_count, 8);
            CHECK_OK(dp_config_get(ctx, &got));
            CHECK_INT(got.shards, 8);
            CHECK_INT(got.device_count, 8);
            for (int i = 0; i < 8; i++)
                CHECK_INT(got.devices[i], named ? indices[i * devices / 8] : i * devices / 8);
            CHECK_OK(dp_open(&got, &again)); /* what was resolved means the same */
            CHECK_OK(dp_info_get(again, &info));
            CHECK_INT(info.rank_count, 8);
            dp_close(again);
            dp_close(ctx);
        }
}

/* Nobody said how many devices: as many as can share the ranks evenly. */
TEST(shards_of_devices_that_nobody_counted)
{
    static const struct {
        int shards, cores;
    } table[] = {{8, 1}, {8, 3}, {4, 8}, {1, 6}, {16, 6}};
    const dp_device_ops *backends[] = {dp_cpu(), NULL};
    unsetenv("DP_DEVICES");
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        dp_config config = {.backends = backends, .thread_count = table[i].cores}, got;
        dp_ctx *ctx;
        int devices = 1;
        CHECK_OK(open_shards(config, &ctx));
        CHECK_OK(dp_config_get(ctx, &got)); /* all that there are */
        while (2 * devices <= got.device_count && 2 * devices <= table[i].shards)
            devices *= 2;
        dp_close(ctx);
        config.shards = table[i].shards;
        CHECK_OK(open_shards(config, &ctx));
        CHECK_OK(dp_config_get(ctx, &got));
        CHECK_INT(got.device_count, table[i].shards);
        CHECK_INT(got.devices[got.device_count - 1], devices - 1);
        dp_close(ctx);
    }
}

TEST(wrong_shards)
{
    dp_ctx *ctx = NULL;
    CHECK_ERROR(open_shards((dp_config){.shards = -1}, &ctx), DP_ERR_INVALID,
                "shards is -1, not a power of two from 1 to 4096");
    CHECK_ERROR(open_shards((dp_config){.shards = 6}, &ctx), DP_ERR_INVALID,
                "shards is 6, not a power of two");
    CHECK_ERROR(open_shards((dp_config){.shards = 8192}, &ctx), DP_ERR_INVALID, "shards is 8192");
    CHECK_ERROR(open_shards((dp_config){.shards = 8, .device_count = 3}, &ctx), DP_ERR_INVALID,
                "device_count is 3, and this process has 8 of 8 shards");
    CHECK_ERROR(open_shards((dp_config){.shards = 8, .device_count = 16}, &ctx), DP_ERR_INVALID,
                "device_count is 16, and this process has 8 of 8 shards");
    setenv("DP_DEVICES", "5", 1);
    CHECK_ERROR(open_shards((dp_config){.shards = 8}, &ctx), DP_ERR_INVALID, "device_count is 5");
    CHECK(ctx == NULL);
    setenv("DP_DEVICES", "0,1", 1);
    CHECK_OK(open_shards((dp_config){.shards = 4}, &ctx));
    dp_close(ctx);
}

static void wrong_in_processes(meeting *m)
{
    dp_ctx *ctx = NULL;
    dp_config config = config_of(m, 1);
    config.shards = 8;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_INVALID,
                "8 shards cannot be dealt out evenly to 3 processes");
    config.shards = m->process == 2 ? 0 : m->process == 1 ? 3 : 2048;
    CHECK_ERROR(dp_open(&config, &ctx), m->process == 2 ? DP_ERR_MISMATCH : DP_ERR_INVALID,
                m->process == 2   ? "process 2 has 0 shards, process 0 has 2048"
                : m->process == 1 ? "shards is 3"
                                  : "2048 shards");
    config.shards = 0;
    CHECK_OK(dp_open(&config, &ctx));
    dp_close(ctx);
}

static void other_shards_in_others(meeting *m)
{
    dp_ctx *ctx = NULL;
    dp_config config = config_of(m, 1);
    config.shards = m->process == 1 ? 4 : 8;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_MISMATCH,
                m->process == 1 ? "process 1 has 4 shards, process 0 has 8"
                                : "process 0 has 8 shards, process 1 has 4");
    config.shards = 8; /* 4 each, on as many devices as each one likes */
    config.device_count = m->process == 1 ? 4 : 2;
    CHECK_OK(dp_open(&config, &ctx));
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.local_count, 4);
    CHECK_INT(info.rank_first, 4 * m->process);
    CHECK_INT(info.rank_count, 8);
    dp_close(ctx);
}

TEST(all_processes_say_the_same_of_shards)
{
    in_processes(3, wrong_in_processes);
    in_processes(2, other_shards_in_others);
}

/* ---- a net is trained ------------------------------------------------------------------------ */

enum { INPUTS = 5, HIDDEN = 9, CLASSES = 3, STEPS = 6, ROWS = 40 };
enum { WEIGHTS = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES };

typedef struct training {
    int processes, devices, shards;
    int micro; /* steps of which the last one is reduced, and the parameters change */
    dp_distributed_config how;
} training;

typedef struct descent {
    dp_optim base;
    int micro, at;
} descent;

static dp_status descent_begin(dp_optim *optim, dp_module *net, dp_pass_config *pass)
{
    descent *d = (descent *)optim;
    (void)net;
    pass->no_sync = ++d->at % d->micro != 0;
    return DP_OK;
}

static dp_status descent_update(dp_optim *optim, dp_module *net)
{
    const descent *d = (descent *)optim;
    dp_tensor data, grad;
    if (d->at % d->micro != 0)
        return DP_OK;
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        DP_TRY(dp_params_edit(net, i, &data, &grad));
        DP_TRY(dp_axpby(dp_module_ctx(net), 1, &data, -0.7, &grad, &data));
    }
    return dp_zero_grad(net);
}

static const dp_optim_ops descent_ops = {
    .head = DP_TABLE(dp_optim_ops), .begin = descent_begin, .update = descent_update};

/* Rows first .. first + count - 1 of a step's batch. */
static dp_value rows_of(dp_scope *scope, int step, int64_t first, int64_t count)
{
    float *x = dp_scope_alloc(scope, sizeof(float) * INPUTS * ROWS);
    int64_t *label = dp_scope_alloc(scope, sizeof(int64_t) * ROWS);
    uint64_t state = (uint64_t)step + 1;
    CHECK(x != NULL && label != NULL);
    for (int i = 0; i < INPUTS * ROWS; i++)
        x[i] = (float)ldexp((double)(int64_t)test_random(&state), -62);
    for (int i = 0; i < ROWS; i++)
        label[i] = (int64_t)(test_random(&state) % CLASSES);
    if (count == 0)
        return dp_none();
    return DP_DICT(scope,
                   {"image", dp_array(scope, x + first * INPUTS, DP_F32, DP_SHAPE(count, INPUTS))},
                   {"label", dp_array(scope, label + first, DP_I64, DP_SHAPE(count))});
}

/* Of the rows that a step has, those of this process' ranks. Some steps have fewer rows than
   ranks. */
static dp_value batch_of(dp_scope *scope, const dp_info *info, int step)
{
    static const int64_t sizes[] = {ROWS, 13, 8, 3, ROWS - 1, 17};
    int64_t rows[MOST], first = 0, count = 0;
    size_t parts = 0;
    CHECK_OK(dp_split_rows(sizes[step % 6], (size_t)info->rank_count, NULL, rows, &parts));
    for (int r = 0; r < info->rank_first + info->local_count; r++)
        *(r < info->rank_first ? &first : &count) += rows[r];
    return rows_of(scope, step, first, count);
}

static void read_weights(dp_ctx *ctx, dp_module *net, float *out)
{
    for (size_t i = 0; i < dp_module_param_count(net); i++) {
        dp_param_info param;
        CHECK_OK(dp_module_param(net, i, &param));
        size_t count = (size_t)dp_tensor_count(&param.data);
        CHECK_OK(dp_read(ctx, &param.data, out, count * sizeof *out));
        out += count;
    }
}

static void train(dp_ctx *ctx, dp_module *net, dp_module *par, int micro, float *out)
{
    descent optim = {{&descent_ops}, micro, 0};
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    for (int step = 0; step < STEPS; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        CHECK_OK(dp_train_step(par, scope, batch_of(scope, &info, step), &optim.base, &log));
        dp_scope_end(scope);
    }
    read_weights(ctx, net, out);
    dp_close(ctx);
}

static const mlp shape = {INPUTS, HIDDEN, CLASSES};

static void train_here(int devices, int shards, int micro, float *out)
{
    dp_module *net, *par;
    dp_ctx *ctx;
    CHECK_OK(open_shards((dp_config){.device_count = devices, .shards = shards}, &ctx));
    CHECK_OK(mlp_create(ctx, &shape, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    train(ctx, net, par, micro, out);
}

TEST_SLOW(one_process_trains_alike_on_1_2_4_and_8_devices, 30)
{
    static float first[WEIGHTS], got[WEIGHTS];
    train_here(1, 8, 1, first);
    for (int devices = 2; devices <= 8; devices *= 2) {
        train_here(devices, 8, 1, got);
        CHECK_BYTES(got, first, sizeof first);
    }
    train_here(1, 0, 1, got);
    CHECK(memcmp(got, first, sizeof first) != 0); /* it is shards that do it */
    CHECK_F64(got[3], first[3], 1e-4);
}

static training now;
static float *trained;

static void train_together(meeting *m)
{
    static float own[WEIGHTS];
    dp_config config = config_of(m, now.devices);
    dp_module *net, *par;
    dp_ctx *ctx;
    config.colls = NULL;
    config.shards = now.shards;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(mlp_create(ctx, &shape, &net));
    CHECK_OK(dp_distributed(net, &now.how, &par));
    train(ctx, net, par, now.micro, own);
    if (m->process == 0)
        memcpy(trained, own, sizeof own);
}

/* All ways to spread as many ranks over processes, and these over devices. */
static void train_all_ways(void (*run)(meeting *), training how)
{
    static float first[WEIGHTS];
    bool some = false;
    for (int p = 1; p <= how.shards; p *= 2)
        for (int d = 1; p * d <= how.shards; d *= 2) {
            now = how;
            now.processes = p;
            now.devices = d;
            in_processes(p, run);
            if (!some)
                memcpy(first, trained, sizeof first);
            some = true;
            if (memcmp(trained, first, sizeof first) != 0)
                test_fail(__FILE__, __LINE__, "%d processes of %d devices train in another way", p,
                          d);
        }
    for (int i = 0; i < WEIGHTS; i++)
        CHECK(isfinite(first[i]));
}

TEST_SLOW(any_processes_and_devices_train_alike, 120)
{
    static const dp_reduction kinds[] = {DP_MEAN_SAMPLES, DP_MEAN_RANKS, DP_SUM_RANKS};
    trained = shared_memory(sizeof(float) * WEIGHTS);
    for (int i = 0; i < 3; i++)
        train_all_ways(train_together,
                       (training){.shards = 4, .micro = 1, .how = {.reduction = kinds[i]}});
    train_all_ways(train_together,
                   (training){.shards = 8, .micro = 1, .how = {.reduction = DP_MEAN_SAMPLES}});
}

TEST_SLOW(steps_that_add_up_train_alike, 120)
{
    trained = shared_memory(sizeof(float) * WEIGHTS);
    train_all_ways(train_together,
                   (training){.shards = 4, .micro = 3, .how = {.reduction = DP_MEAN_SAMPLES}});
    train_all_ways(train_together,
                   (training){.shards = 4, .micro = 2, .how = {.buckets.first_bytes = 1}});
}

TEST_SLOW(halves_on_the_wire_train_alike, 120)
{
    trained = shared_memory(sizeof(float) * WEIGHTS);
    train_all_ways(train_together,
                   (training){.shards = 4,
                              .micro = 1,
                              .how = {.reduction = DP_MEAN_SAMPLES, .buckets.wire = DP_BF16}});
    train_all_ways(train_together,
                   (training){.shards = 4,
                              .micro = 2,
                              .how = {.reduction = DP_MEAN_SAMPLES, .buckets.wire = DP_F16}});
}

/* ---- a loader deals the samples -------------------------------------------------------------- */

static dp_loader_config feed; /* its batch is that of all processes */

static dp_status read_row(dp_sample *sample, void *user)
{
    uint64_t state = (uint64_t)sample->index;
    (void)user;
    for (int i = 0; i < INPUTS; i++)
        ((float *)sample->rows[0])[i] = (float)ldexp((double)(int64_t)test_random(&state), -62);
    *(int64_t *)sample->rows[1] = (int64_t)(test_random(&state) % CLASSES);
    return DP_OK;
}

/* Two epochs; an endless one ends after as many batches. */
static void train_loaded(meeting *m)
{
    static const dp_field fields[] = {{"image", DP_F32, 1, {INPUTS}}, {"label", DP_I64, 0, {0}}};
    descent optim = {{&descent_ops}, 1, 0};
    dp_config config = config_of(m, now.devices);
    dp_loader_config how = feed;
    dp_loader *loader;
    dp_module *net, *par;
    dp_ctx *ctx;
    config.colls = NULL;
    config.shards = now.shards;
    how.batch /= now.processes;
    how.sampler.block /= now.processes;
    how.read = read_row;
    how.fields = fields;
    how.field_count = 2;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(mlp_create(ctx, &shape, &net));
    CHECK_OK(dp_distributed(net, &now.how, &par));
    CHECK_OK(dp_loader_create(ctx, &how, &loader));
    for (int step = 0, ends = 0; ends < 2 && step < 7; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value log;
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        ends += batch.ended;
        if (!batch.ended)
            CHECK_OK(dp_train_step(par, scope, batch.value, &optim.base, &log));
        dp_scope_end(scope);
    }
    read_weights(ctx, net, m->process == 0 ? trained : test_room(sizeof(float) * WEIGHTS));
    dp_close(ctx);
}

TEST_SLOW(loaders_of_any_processes_train_alike, 120)
{
    trained = shared_memory(sizeof(float) * WEIGHTS);
    const training how = {.shards = 8, .micro = 1, .how = {.reduction = DP_MEAN_SAMPLES}};
    for (int sampling = DP_SAMPLE_PADDED; sampling <= DP_SAMPLE_ENDLESS; sampling++)
        for (int rest = 3; rest < 32; rest += 27) { /* one process alone has samples; all have */
            feed = (dp_loader_config){.sampler = {.count = 64 + rest,
                                                  .sampling = (dp_sampling)sampling,
                                                  .seed = 5,
                                                  .block = rest == 3 ? 0 : 32},
                                      .batch = 32,
                                      .together = true,
                                      .worker_count = rest == 3 ? 0 : 2};
            train_all_ways(train_loaded, how);
        }
}

/* ---- gradients that are halves --------------------------------------------------------------- */

enum { LONG = 50021 };

static dp_dtype half;
static uint16_t *reduced;

static void reduce_halves(meeting *m)
{
    uint16_t(*rows)[LONG] = test_room(MOST * sizeof *rows);
    const int64_t count = LONG;
    dp_config config = config_of(m, now.devices);
    void *local[MOST];
    dp_tensor data[MOST];
    dp_info info;
    dp_ctx *ctx;
    dp_reducer *reducer;
    config.colls = NULL;
    config.shards = now.shards;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    make_rows((char *)rows, info.rank_count, half, LONG, 5);
    dp_scope *scope = dp_scope_begin(ctx); /* ends with the context */
    for (int i = 0; i < info.local_count; i++) {
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, i), rows[info.rank_first + i], half, 1,
                                &count, &data[i]));
        local[i] = data[i].data;
    }
    const dp_block block = {half, LONG, local};
    CHECK_OK(dp_reducer_create(
        ctx, &(dp_reducer_config){.blocks = &block, .block_count = 1, .reduction = DP_MEAN_RANKS},
        &reducer));
    CHECK_OK(dp_reducer_begin(reducer, NULL));
    for (int i = 0; i < info.local_count; i++)
        CHECK_OK(dp_reducer_ready(reducer, i, 0, NULL));
    CHECK_OK(dp_reducer_finish(reducer));
    if (m->process == 0)
        CHECK_OK(dp_read(ctx, &data[0], reduced, sizeof rows[0]));
    dp_close(ctx);
}

TEST_SLOW(halves_are_reduced_alike, 60)
{
    uint16_t(*rows)[LONG] = test_room(8 * sizeof *rows);
    reduced = shared_memory(sizeof *rows);
    for (int i = 0; i < 2; i++) {
        half = i == 0 ? DP_F16 : DP_BF16;
        make_rows((char *)rows, 8, half, LONG, 5);
        char *want = tree_of_rows((char *)rows, 8, half, LONG, (form){DP_OP_MEAN, 1});
        for (int p = 1; p <= 8; p *= test_stride() > 1 ? 4 : 2)
            for (int d = 1; p * d <= 8; d *= 4) {
                now = (training){.processes = p, .devices = d, .shards = 8};
                in_processes(p, reduce_halves);
                CHECK_BYTES(reduced, want, sizeof rows[0]);
            }
        free(want);
    }
}

#if defined(TEST_SIM)
/* ---- on GPUs, over NCCL ---------------------------------------------------------------------- */

TEST_SLOW(cuda_nccl_halves_are_reduced_alike, 60)
{
    static const char *const gpus[] = {"11", "22", "1111", "11111111"};
    uint16_t(*rows)[LONG] = test_room(8 * sizeof *rows);
    reduced = shared_memory(sizeof *rows);
    now.shards = 8;
    for (int i = 0; i < 4; i++) {
        half = i % 2 == 0 ? DP_F16 : DP_BF16;
        make_rows((char *)rows, 8, half, LONG, 5);
        char *want = tree_of_rows((char *)rows, 8, half, LONG, (form){DP_OP_MEAN, 1});
        on_gpus(gpus[i], reduce_halves);
        CHECK_BYTES(reduced, want, sizeof rows[0]);
        free(want);
    }
}
#endif
