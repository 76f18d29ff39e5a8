/* test_batches.c - batches with containers on their way through wrappers: the last, shorter batch
   of an epoch, groups without samples, one device, a model and its criterion. */

#include "nets.h"

static dp_module *module_of(dp_ctx *ctx, dp_status (*forward)(dp_call *))
{
    const dp_method methods[] = {{"forward", forward}, {"train_step", forward}};
    dp_module *module = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .methods = methods, .method_count = 2}, &module));
    return module;
}

/* ---- what a replica gets --------------------------------------------------------------------- */

typedef struct part {
    dp_value kwargs;
    int64_t row_first, row_count, row_total;
    double weight;
} part;

static part parts[TREE_DEVICES];
static size_t part_count;

static dp_status note_part(dp_call *call)
{
    parts[call->replica] =
        (part){call->kwargs, call->row_first, call->row_count, call->row_total, call->weight};
    if (call->replica == 0) {
        part_count = call->replica_count;
    }
    call->out = dp_none();
    return DP_OK;
}

/* Samples of images of one size, their names and labels, in groups. */
static dp_value batch_of(dp_scope *scope, size_t samples, size_t samples_per_device)
{
    dp_value list[16], batch;
    for (size_t i = 0; i < samples; i++) {
        char text[96];
        snprintf(text, sizeof text,
                 "{'img': <stack dims=1: f32[1,1]=%zu>, 'name': <cpu: '%c'>, 'label': %zu}", i,
                 'a' + (char)i, i);
        list[i] = tree_of(scope, text);
    }
    CHECK_OK(dp_collate(scope, list, samples, samples_per_device, &batch));
    return batch;
}

/* 4 samples in groups of 3: a split of the labels alone would be 2 and 2. */
TEST_BACKENDS(labels_follow_the_images_of_the_last_batch)
{
    dp_module *par = NULL;
    dp_value out;
    for (size_t devices = 2; devices <= 3; devices++) {
        for (int split = DP_SPLIT_BALANCED; split <= DP_SPLIT_CHUNK; split++) {
            dp_parallel_config config = over(devices);
            config.cut.split = (dp_split)split;
            CHECK_OK(dp_container_parallel(module_of(ctx, note_part), &config, &par));
            CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), batch_of(scope, 4, 3), NULL, &out,
                               NULL));
            CHECK_INT(part_count, 2);
            CHECK_TREE(ctx, parts[0].kwargs,
                       "{'img': f32[3,1,1]=0 1 2, 'name': ['a', 'b', 'c'], 'label': i64[3]=0 1 2}");
            CHECK_TREE(ctx, parts[1].kwargs,
                       "{'img': f32[1,1,1]=3, 'name': ['d'], 'label': i64[1]=3}");
            CHECK_INT(parts[1].row_first, 3);
            CHECK_INT(parts[1].row_count, 1);
            CHECK_INT(parts[0].row_count, 3);
            CHECK_INT(parts[0].row_total, 4);
            CHECK_F64(parts[0].weight, 3, 0);
            CHECK_F64(parts[1].weight, 1, 0);
        }
    }
}

/* Trailing groups get a replica, with samples or without. */
TEST_BACKENDS(empty_groups_are_groups)
{
    const dp_parallel_config config = over(3);
    dp_module *par = NULL;
    dp_value out;
    CHECK_OK(dp_data_parallel(module_of(ctx, note_part), &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(),
                       tree_of(scope, "{'y': i8[2], 'x': <stack: [f32[2,1], f32[0,1]]>}"), NULL,
                       &out, NULL));
    CHECK_INT(part_count, 2);
    CHECK_TREE(ctx, parts[1].kwargs, "{'y': i8[0]=, 'x': f32[0,1]=}");
    CHECK_F64(parts[1].weight, 0, 0);
    CHECK_INT(parts[1].row_first, 2);
    CHECK_ERROR(dp_invoke(par, scope, "forward", dp_none(), tree_of(scope, "{'x': <: []>}"), NULL,
                          &out, NULL),
                DP_ERR_INVALID, "['x'] has no groups: there is nothing to run");
    CHECK_ERROR(dp_invoke(par, scope, "forward", tree_of(scope, "[f32[2]]"),
                          tree_of(scope, "{'x': <: []>}"), NULL, &out, NULL),
                DP_ERR_MISMATCH, "[0] has 2 rows and ['x'] has 0 in its groups");
}

typedef struct cut_row {
    dp_split split;
    int64_t sizes[4];
    double weights[4];
    int64_t rows;
    size_t want; /* replicas on 4 devices */
} cut_row;

static const cut_row cut_rows[] = {
    {.split = DP_SPLIT_BALANCED, .rows = 5, .want = 4},
    {.split = DP_SPLIT_BALANCED, .rows = 2, .want = 2},
    {.split = DP_SPLIT_BALANCED, .rows = 0, .want = 1},
    {.split = DP_SPLIT_CHUNK, .rows = 5, .want = 3},
    {.split = DP_SPLIT_CHUNK, .rows = 1, .want = 1},
    {.split = DP_SPLIT_CHUNK, .rows = 0, .want = 4},
    {.split = DP_SPLIT_WEIGHTS, .weights = {1, 0, 3, 0}, .rows = 4, .want = 3},
    {.split = DP_SPLIT_WEIGHTS, .weights = {1, 3, 0, 0}, .rows = 4, .want = 2},
    {.split = DP_SPLIT_WEIGHTS, .weights = {1, 1, 1, 1}, .rows = 0, .want = 1},
    {.split = DP_SPLIT_SIZES, .sizes = {2, 0, 2, 0}, .rows = 4, .want = 4},
    {.split = DP_SPLIT_SIZES, .sizes = {4, 0, 0, 0}, .rows = 4, .want = 4},
    {.split = DP_SPLIT_SIZES, .sizes = {0, 0, 0, 0}, .rows = 0, .want = 4}};

/* `face`: one device, several, or all ranks. */
static void check_parts(dp_ctx *ctx, const cut_row *row, int face)
{
    static const dp_method method = {"forward", note_part};
    static const dp_param_config param = {.name = "w", .ndim = 1, .shape = {1}};
    const bool sizes = row->split == DP_SPLIT_SIZES, weights = row->split == DP_SPLIT_WEIGHTS;
    const size_t devices = face == 0 ? 1 : 4;
    const dp_parallel_config config = {.local_ranks = first_ranks,
                                       .local_rank_count = devices,
                                       .cut = {.split = row->split,
                                               .sizes = sizes ? row->sizes : NULL,
                                               .weights = weights ? row->weights : NULL,
                                               .split_count = sizes || weights ? devices : 0}};
    const dp_distributed_config all = {.cut = {.split = config.cut.split,
                                               .sizes = config.cut.sizes,
                                               .weights = config.cut.weights,
                                               .split_count = config.cut.split_count}};
    float numbers[5] = {0};
    dp_module *net = NULL, *par = NULL;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x = dp_wrap(numbers, DP_F32, 1, &row->rows);
    dp_value out;
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = &method,
                                                  .method_count = 1,
                                                  .params = &param,
                                                  .param_count = 1},
                              &net));
    CHECK_OK(face == 2 ? dp_distributed(net, &all, &par) : dp_data_parallel(net, &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", DP_TUPLE_OF(scope, dp_of(scope, &x)), dp_none(), NULL,
                       &out, NULL));
    CHECK_INT(part_count, devices == 1 ? 1 : row->want);
    CHECK_INT(parts[0].row_total, row->rows);
    dp_scope_end(scope);
    CHECK_OK(dp_module_destroy(par));
    CHECK_OK(dp_module_destroy(net));
}

TEST(which_parts_without_rows_get_a_replica)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 4}, &ctx));
    for (size_t i = 0; i < sizeof cut_rows / sizeof *cut_rows; i++)
        for (int face = 0; face < 3; face++)
            check_parts(ctx, &cut_rows[i], face);
    dp_close(ctx);
}

/* Groups that cannot be counted say how many parts there are, and nothing about rows. */
TEST_BACKENDS(groups_of_who_knows_what)
{
    const dp_parallel_config config = over(2);
    dp_module *par = NULL;
    dp_value out;
    CHECK_OK(dp_data_parallel(module_of(ctx, note_part), &config, &par));
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(), tree_of(scope, "{'m': <cpu: [1, 'a']>}"),
                       NULL, &out, NULL));
    CHECK_INT(part_count, 2);
    CHECK_INT(parts[1].row_total, 0);
    CHECK_F64(parts[1].weight, 1, 0);
    CHECK_OK(dp_invoke(par, scope, "forward", dp_none(),
                       tree_of(scope, "{'m': <cpu: [1, 'a']>, 'x': f32[3]}"), NULL, &out, NULL));
    CHECK_INT(parts[0].row_count, 2);
    CHECK_INT(parts[1].row_total, 3);
    CHECK_OK(dp_invoke(par, scope, "forward",
                       dp_none(), /* a group each, although one has no rows */
                       tree_of(scope, "{'m': <cpu: [1, 'a']>, 'x': f32[1]}"), NULL, &out, NULL));
    CHECK_INT(part_count, 2);
    CHECK_INT(parts[1].row_count, 0);
}

/* ---- one device ------------------------------------------------------------------------------ */

/* mmcv's and mmfewshot's: nothing is cut, so nothing has to agree. */
TEST_BACKENDS(one_device_takes_what_comes)
{
    const dp_parallel_config one = over(1);
    dp_module *net = module_of(ctx, note_part), *all[3] = {NULL};
    dp_value out;
    CHECK_OK(dp_meta_test_parallel(net, &all[0]));
    CHECK_OK(dp_container_parallel(net, &one, &all[1]));
    CHECK_OK(dp_data_parallel(net, &one, &all[2]));
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_invoke(all[i], scope, "forward", dp_none(),
                           tree_of(scope, "{'s': f32[], 'x': f32[3,1], 'y': i64[2], "
                                          "'g': <stack: [f32[4,1]]>, 'm': <cpu: [['a']]>}"),
                           NULL, &out, NULL));
        CHECK_TREE(ctx, parts[0].kwargs,
                   "{'s': f32[]=0, 'x': f32[3,1]=0 1 2, 'y': i64[2]=0 1, "
                   "'g': f32[4,1]=0 1 2 3, 'm': ['a']}");
        CHECK_INT(parts[0].row_count, 4); /* of the first container that can be counted */
        CHECK_OK(dp_invoke(all[i], scope, "forward", dp_none(),
                           tree_of(scope, "{'s': f32[], 'y': i64[2], 'x': f32[3,1]}"), NULL, &out,
                           NULL));
        CHECK_INT(parts[0].row_count, 2); /* of the first tensor that has any */
        CHECK_INT(parts[0].row_total, 2);
        CHECK_F64(parts[0].weight, 2, 0);
        CHECK_OK(dp_invoke(all[i], scope, "forward", tree_of(scope, "[f32[]]"), dp_none(), NULL,
                           &out, NULL));
        CHECK_INT(parts[0].row_total, 0);
        CHECK_ERROR(dp_invoke(all[i], scope, "forward", tree_of(scope, "[<: [f32[1], f32[1]]>]"),
                              dp_none(), NULL, &out, NULL),
                    DP_ERR_MISMATCH, "[0] has 2 groups for 1 device: groups would be lost");
    }
}

/* ---- a model and its criterion --------------------------------------------------------------- */

static dp_status images_of(dp_call *call)
{
    call->out = dp_get(call->kwargs, "img");
    return DP_OK;
}

/* (images, labels): as many of the one as of the other */
static dp_status compare(dp_call *call)
{
    const dp_tensor *images, *labels;
    const float zero = 0;
    TRY(dp_call_arg(call, 0, DP_F32, -1, &images));
    TRY(dp_call_arg(call, 1, DP_I64, 1, &labels));
    CHECK_INT(images->shape[0], labels->shape[0]);
    CHECK_F64(call->weight, (double)labels->shape[0], 0);
    return net_new(call, &zero, 0, NULL, &call->out);
}

TEST_BACKENDS(targets_follow_the_groups_of_the_batch)
{
    for (size_t devices = 1; devices <= 3; devices++) {
        const dp_parallel_config config = over(devices);
        dp_module *model = NULL, *criterion = NULL;
        dp_value outs, loss, batch = batch_of(scope, 4, devices > 1 ? 3 : 4);
        CHECK_OK(dp_model_parallel(module_of(ctx, images_of), &config, &model));
        CHECK_OK(dp_criterion_parallel(module_of(ctx, compare), &config, &criterion));
        CHECK_OK(dp_invoke(model, scope, "forward", dp_none(), batch, NULL, &outs, NULL));
        CHECK_OK(dp_invoke(criterion, scope, "forward",
                           DP_LIST_OF(scope, outs, dp_get(batch, "label")), dp_none(), NULL, &loss,
                           NULL));
        const char *const groups = devices > 1 ? "<stack: [i64[3], i64[1]]>" : "<stack: [i64[4]]>";
        CHECK_OK(dp_invoke(criterion, scope, "forward",
                           DP_LIST_OF(scope, outs, tree_of(scope, groups)), dp_none(), NULL, &loss,
                           NULL));
        if (devices > 1) {
            CHECK_ERROR(dp_invoke(criterion, scope, "forward",
                                  DP_LIST_OF(scope, outs, tree_of(scope, "<: [i64[2], i64[2]]>")),
                                  dp_none(), NULL, &loss, NULL),
                        DP_ERR_MISMATCH,
                        "the targets cannot be cut as the outputs were: [0] has 2 samples in group "
                        "0, and sizes[0] is 3");
            CHECK_ERROR(dp_invoke(criterion, scope, "forward",
                                  DP_LIST_OF(scope, outs, tree_of(scope, "<cpu: [1]>")), dp_none(),
                                  NULL, &loss, NULL),
                        DP_ERR_MISMATCH, "the targets make 1 part, the outputs are 2");
        }
    }
}

/* Outputs that know nothing of a cut: targets in more parts than there are outputs are lost. */
TEST_BACKENDS(targets_for_more_devices_than_outputs)
{
    const dp_parallel_config config = over(3);
    dp_module *criterion = NULL;
    dp_value loss, x = tree_of(scope, "f32[2]"), outs = DP_LIST_OF(scope, x, x);
    CHECK_OK(dp_criterion_parallel(module_of(ctx, compare), &config, &criterion));
    CHECK_ERROR(dp_invoke(criterion, scope, "forward",
                          DP_LIST_OF(scope, outs, tree_of(scope, "i64[5]")), dp_none(), NULL, &loss,
                          NULL),
                DP_ERR_MISMATCH, "the targets have rows in 3 parts, the outputs are 2");
    CHECK_ERROR(dp_invoke(criterion, scope, "forward",
                          DP_LIST_OF(scope, outs, tree_of(scope, "<cpu: [1, 2, 3]>")), dp_none(),
                          NULL, &loss, NULL),
                DP_ERR_MISMATCH, "the targets have rows in 3 parts, the outputs are 2");
}

/* ---- gradients and training ------------------------------------------------------------------ */

/* loss = mean of img * label, as an entry; w counts how often it was called */
static dp_status step_loss(dp_call *call)
{
    float x[8], sum = 0;
    int64_t y[8];
    const dp_tensor *images, *labels;
    dp_value loss;
    TRY(dp_call_tensor(call, "img", DP_F32, 3, &images));
    TRY(dp_call_tensor(call, "label", DP_I64, 1, &labels));
    CHECK_INT(images->shape[0], labels->shape[0]);
    TRY(dp_read(call->ctx, images, x, (size_t)images->shape[0] * sizeof *x));
    TRY(dp_read(call->ctx, labels, y, (size_t)labels->shape[0] * sizeof *y));
    for (int64_t i = 0; i < labels->shape[0]; i++) {
        sum += x[i] * (float)y[i] / (float)labels->shape[0];
    }
    TRY(net_new(call, &sum, 0, NULL, &loss));
    call->out = DP_DICT(call->scope, {"loss", loss});
    return DP_OK;
}

/* Mean of i * i over 0 .. 6, whatever the groups: devices count as their samples do. */
TEST_BACKENDS(a_step_over_groups_is_one_over_samples)
{
    for (size_t devices = 1; devices <= 3; devices++) {
        const dp_parallel_config config = over(devices);
        dp_module *par = NULL;
        dp_value log;
        double loss = 0;
        CHECK_OK(dp_container_parallel(module_of(ctx, step_loss), &config, &par));
        CHECK_OK(dp_train_step(par, scope, batch_of(scope, 7, devices == 1 ? 7 : 4), NULL, &log));
        CHECK_OK(dp_item(ctx, dp_get(log, "loss"), &loss));
        CHECK_F64(loss, 13, 1e-5); /* there is nothing to learn, and no backward */
        const dp_method methods[] = {{"forward", step_loss}, {"backward", note_part}};
        dp_module *net = NULL;
        CHECK_OK(dp_module_create(ctx, &(dp_module_config){.methods = methods, .method_count = 2},
                                  &net));
        CHECK_OK(dp_container_parallel(net, &config, &par));
        CHECK_OK(dp_train_step(par, scope, batch_of(scope, 7, devices == 1 ? 7 : 4), NULL, &log));
        CHECK_OK(dp_item(ctx, dp_get(log, "loss"), &loss));
        CHECK_F64(loss, 13, 1e-5);
    }
}
