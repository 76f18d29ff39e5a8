/* test_collate.c - samples become a batch: dp_collate, and the batch scattered. */

#include "tree.h"

typedef struct collate_case {
    const char *in; /* the list of samples */
    size_t samples_per_device;
    const char *want; /* the batch, or a part of the sentence */
    dp_status status;
} collate_case;

static void check_collate(dp_ctx *ctx, dp_scope *scope, const collate_case *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const collate_case *row = &table[i];
        dp_value samples = tree_of(scope, row->in), out = dp_none();
        CHECK_INT(samples.kind, DP_LIST);
        dp_status got =
            dp_collate(scope, samples.as.items, samples.count, row->samples_per_device, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

#define CHECK_COLLATE(table) check_collate(ctx, scope, table, sizeof(table) / sizeof((table)[0]))

/* ---- all but containers ---------------------------------------------------------------------- */

TEST_BACKENDS(each_kind)
{
    static const collate_case table[] = {
        {"[1, -2, 3]", 1, "i64[3]=1 -2 3", DP_OK},
        {"[1.5, 2.0]", 1, "f64[2]=1.5 2", DP_OK},
        {"[True, False, True]", 1, "bool[3]=1 0 1", DP_OK},
        {"['a', 'bc']", 1, "['a', 'bc']", DP_OK},
        {"[f32[2]=1 2, f32[2]=3 4]", 1, "f32[2,2]=1 2 3 4", DP_OK},
        {"[u8[1,2]=1 2, u8[1,2]=3 4]", 1, "u8[2,1,2]=1 2 3 4", DP_OK},
        {"[f32[]=1, f32[]=2, f32[]=3]", 1, "f32[3]=1 2 3", DP_OK},
        {"[f32[0], f32[0]]", 1, "f32[2,0]=", DP_OK},
        {"[[1, 'a'], [2, 'b']]", 1, "[i64[2]=1 2, ['a', 'b']]", DP_OK},
        {"[(1, 2.5), (2, 3.5)]", 1, "[i64[2]=1 2, f64[2]=2.5 3.5]", DP_OK}, /* always a list */
        {"[{'b': 1, 'a': f32[1]=5}, {'a': f32[1]=6, 'b': 2}]", 1,
         "{'b': i64[2]=1 2, 'a': f32[2,1]=5 6}", DP_OK},
        {"[{'x': [(1)]}, {'x': [(2)]}]", 1, "{'x': [[i64[2]=1 2]]}", DP_OK},
        {"[[], []]", 1, "[]", DP_OK},
        {"[(), ()]", 1, "[]", DP_OK},
        {"[{}, {}]", 1, "{}", DP_OK},
        {"[7]", 1, "i64[1]=7", DP_OK},
        {"[f32[1]=5]", 1, "f32[1,1]=5", DP_OK},
    };
    CHECK_COLLATE(table);
}

/* Groups are for containers: plain tensors are stacked over the whole batch. */
TEST_BACKENDS(plain_fields_know_no_groups)
{
    static const collate_case table[] = {
        {"[1, 2, 3]", 2, "i64[3]=1 2 3", DP_OK},
        {"[f32[1]=1, f32[1]=2, f32[1]=3]", 2, "f32[3,1]=1 2 3", DP_OK},
        {"['a', 'b', 'c']", 2, "['a', 'b', 'c']", DP_OK},
        {"[1, 2, 3]", 0, "i64[3]=1 2 3", DP_OK},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(numbers_at_their_limits)
{
    const dp_value whole[] = {dp_int(INT64_MIN), dp_int(INT64_MAX), dp_int(0)};
    const dp_value real[] = {dp_float(1e300), dp_float((double)-INFINITY), dp_float((double)NAN)};
    const int64_t want_whole[] = {INT64_MIN, INT64_MAX, 0};
    const double want_real[] = {1e300, (double)-INFINITY, (double)NAN};
    dp_value out;
    CHECK_OK(dp_collate(scope, whole, 3, 1, &out));
    CHECK_BYTES(out.as.t->data, want_whole, sizeof(want_whole));
    CHECK_OK(dp_collate(scope, real, 3, 1, &out));
    for (size_t i = 0; i < 3; i++) {
        CHECK_F64(((const double *)out.as.t->data)[i], want_real[i], 0);
    }
}

TEST_BACKENDS(every_dtype)
{
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        size_t bytes = 6 * dp_dtype_bytes((dp_dtype)dtype);
        dp_tensor a = tree_tensor(scope, (dp_dtype)dtype, DP_SHAPE(2, 3), 0);
        dp_tensor b = tree_tensor(scope, (dp_dtype)dtype, DP_SHAPE(2, 3), 1);
        const dp_value samples[] = {dp_of(scope, &a), dp_of(scope, &b)};
        dp_value out;
        CHECK_OK(dp_collate(scope, samples, 2, 1, &out));
        CHECK_INT(out.as.t->dtype, dtype);
        CHECK_INT(out.as.t->ndim, 3);
        CHECK_BYTES(out.as.t->data, a.data, bytes);
        CHECK_BYTES((char *)out.as.t->data + bytes, b.data, bytes);
    }
}

TEST_BACKENDS(views_that_are_not_contiguous)
{
    dp_tensor base = tree_tensor(scope, DP_F32, DP_SHAPE(2, 3), 0), turned;
    CHECK_OK(dp_transpose(&base, 0, 1, &turned));
    const dp_value samples[] = {dp_of(scope, &turned), tree_of(scope, "f32[3,2]")};
    dp_value out;
    CHECK_OK(dp_collate(scope, samples, 2, 1, &out));
    CHECK_TREE(ctx, out, "f32[2,3,2]=0 3 1 4 2 5 0 1 2 3 4 5");
}

TEST_BACKENDS(too_many_dims)
{
    static const collate_case table[] = {
        {"[f32[1,1,1,1,1,1,1]=1, f32[1,1,1,1,1,1,1]=2]", 1, "f32[2,1,1,1,1,1,1,1]=1 2", DP_OK},
        {"[f32[1,1,1,1,1,1,1,1]=1, f32[1,1,1,1,1,1,1,1]=2]", 1, "8", DP_ERR_INVALID},
        {"[<stack: f32[1,1,1,1,1,1,1,1]=1>]", 1, "8", DP_ERR_INVALID},
    };
    CHECK_COLLATE(table);
}

/* The batch is its own memory: samples may be gone before it. */
TEST_BACKENDS(the_batch_is_independent)
{
    dp_scope *loading = dp_scope_begin(ctx);
    dp_value samples = tree_of(loading, "[{'x': f32[2]=1 2, 's': 'one'}, {'x': f32[2]=3 4, 's': "
                                        "'two'}]");
    dp_value out;
    CHECK_OK(dp_collate(scope, samples.as.items, 2, 1, &out));
    CHECK_OK(dp_fill(ctx, dp_get(dp_at(samples, 0), "x").as.t, dp_int(0)));
    CHECK_TREE(ctx, dp_get(out, "x"), "f32[2,2]=1 2 3 4");
    dp_scope_end(loading);
    CHECK_TREE(ctx, dp_get(out, "x"), "f32[2,2]=1 2 3 4");
    CHECK(!dp_get(out, "x").as.t->read_only);
}

/* Where samples are on a device already, so is the batch. */
TEST_BACKENDS(samples_on_a_device)
{
    dp_value samples[] = {tree_of(scope, "[f32[2]=1 2, <stack dims=1: i8[1,1]=3>]"),
                          tree_of(scope, "[f32[2]=4 5, <stack dims=1 pad=9: i8[1,2]=6 7>]")};
    dp_device device = dp_local_device(ctx, 1);
    dp_value columns[2], out;
    for (size_t i = 0; i < 2; i++) {
        dp_container container = *dp_at(samples[i], 1).as.c;
        container.data = tree_on(ctx, scope, container.data, device);
        columns[0] = tree_on(ctx, scope, dp_at(samples[i], 0), device);
        columns[1] = dp_contain(scope, &container);
        samples[i] = dp_list_make(scope, DP_LIST, columns, 2);
    }
    CHECK_OK(dp_collate(scope, samples, 2, 2, &out));
    CHECK_TREE(ctx, out, "[f32[2,2]=1 2 4 5, <stack pad=0 dims=1: [i8[2,1,2]=3 0 6 7]>]");
    CHECK(tree_same_device(dp_at(out, 0).as.t->device, device));
    samples[1] = tree_of(scope, "[f32[2]=4 5, <stack dims=1 pad=9: i8[1,2]=6 7>]");
    if (!tree_host_memory(ctx)) {
        CHECK_ERROR(dp_collate(scope, samples, 2, 2, &out), DP_ERR_MISMATCH, "[0]");
    }
}

TEST_BACKENDS(samples_must_agree)
{
    static const collate_case table[] = {
        {"[1, 2.0]", 1, "1", DP_ERR_MISMATCH},
        {"[1.5, 2]", 1, "1", DP_ERR_MISMATCH},
        {"[1, True]", 1, "1", DP_ERR_MISMATCH},
        {"[1, 'a']", 1, "1", DP_ERR_MISMATCH},
        {"[f32[], 1]", 1, "1", DP_ERR_MISMATCH},
        {"[[1], (1)]", 1, "1", DP_ERR_MISMATCH},
        {"[f32[1], f64[1]]", 1, "f64", DP_ERR_MISMATCH},
        {"[f32[2], f32[3]]", 1, "1", DP_ERR_MISMATCH},
        {"[f32[2], f32[2,1]]", 1, "1", DP_ERR_MISMATCH},
        {"[[1, 2], [1]]", 1, "1", DP_ERR_MISMATCH},
        {"[[1], [1, 2]]", 1, "1", DP_ERR_MISMATCH},
        {"[[1], []]", 1, "1", DP_ERR_MISMATCH},
        {"[<: 1>, 1]", 1, "1", DP_ERR_MISMATCH},
        {"[{'a': [1, 2]}, {'a': [1, 2]}, {'a': [1, 2.5]}]", 1, "['a'][1]", DP_ERR_MISMATCH},
        {"[{'a': [1, 2]}, {'a': [1, 2]}, {'a': [1, 2.5]}]", 1, "2", DP_ERR_MISMATCH},
    };
    CHECK_COLLATE(table);
}

/* Where the original ignores a key, or fails without saying in which sample. */
TEST_BACKENDS(keys_must_agree)
{
    static const collate_case table[] = {
        {"[{'img': 1}, {'img': 1}, {}]", 1, "img", DP_ERR_MISMATCH},
        {"[{'img': 1}, {'img': 1}, {}]", 1, "2", DP_ERR_MISMATCH},
        {"[{'img': 1}, {'img': 1, 'mask': 2}]", 1, "mask", DP_ERR_MISMATCH},
        {"[{'img': 1, 'mask': 2}, {'img': 1, 'label': 2}]", 1, "label", DP_ERR_MISMATCH},
        {"[{'in': {'img': 1}}, {'in': {'mask': 1}}]", 1, "['in']", DP_ERR_MISMATCH},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(samples_without_tensors_are_not_collated)
{
    static const collate_case table[] = {
        {"[None, None]", 1, "none", DP_ERR_INVALID},
        {"[&, &]", 1, "opaque", DP_ERR_INVALID},
        {"[{'meta': &}, {'meta': &}]", 1, "['meta']", DP_ERR_INVALID},
        {"[[1, None], [2, None]]", 1, "[1]", DP_ERR_INVALID},
        {"[None]", 1, "none", DP_ERR_INVALID},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(wrong_arguments)
{
    const dp_value samples[] = {dp_int(1), dp_int(2)};
    dp_value out;
    CHECK_STATUS(dp_collate(scope, samples, 0, 1, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_collate(scope, NULL, 2, 1, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_collate(NULL, samples, 2, 1, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_collate(scope, samples, 2, 1, NULL), DP_ERR_INVALID);
    dp_tensor lost = tree_lost(scope);
    dp_value of_lost = dp_of(scope, &lost);
    CHECK_ERROR(dp_collate(scope, &of_lost, 1, 1, &out), DP_ERR_INVALID, "device");
    CHECK_OK(dp_collate(scope, samples, 2, SIZE_MAX, &out));
    CHECK_TREE(ctx, out, "i64[2]=1 2");
}

/* ---- containers ------------------------------------------------------------------------------ */

/* Shapes (1,2,2) with padding 9 and (1,1,1) with padding 7. */
TEST_BACKENDS(each_sample_pads_with_its_own_value)
{
    static const collate_case table[] = {
        {"[<stack pad=9: f32[1,2,2]=1 2 3 4>, <stack pad=7: f32[1,1,1]=1>]", 2,
         "<stack pad=9 dims=2: [f32[2,1,2,2]=1 2 3 4 1 7 7 7]>", DP_OK},
        {"[<stack pad=7: f32[1,1,1]=1>, <stack pad=9: f32[1,2,2]=1 2 3 4>]", 2,
         "<stack pad=7 dims=2: [f32[2,1,2,2]=1 7 7 7 1 2 3 4]>", DP_OK},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(padding_is_at_the_ends)
{
    static const collate_case table[] = {
        {"[<stack dims=1: f32[1,2]=1 2>, <stack dims=1 pad=-1: f32[1,4]=3 4 5 6>, "
         "<stack dims=1 pad=-1: f32[1,0]>]",
         3, "<stack pad=0 dims=1: [f32[3,1,4]=1 2 0 0 3 4 5 6 -1 -1 -1 -1]>", DP_OK},
        {"[<stack pad=9: i64[1,1,3]=1 2 3>, <stack pad=8: i64[1,2,1]=4 5>]", 2,
         "<stack pad=9 dims=2: [i64[2,1,2,3]=1 2 3 9 9 9 4 8 8 5 8 8]>", DP_OK},
        {"[<stack dims=3 pad=5: u8[1,1,1,2]=1 2>, <stack dims=3 pad=6: u8[1,2,1,1]=3 4>]", 2,
         "<stack pad=5 dims=3: [u8[2,1,2,1,2]=1 2 5 5 3 6 4 6]>", DP_OK},
        {"[<stack dims=1: f32[2,1]=1 2>, <stack dims=1 pad=3: f32[2,2]=4 5 6 7>]", 2,
         "<stack pad=0 dims=1: [f32[2,2,2]=1 0 2 0 4 5 6 7]>", DP_OK},
        {"[<stack dims=1 pad=0.5: f16[1,1]=1>, <stack dims=1: f16[1,2]=2 3>]", 2,
         "<stack pad=0.5 dims=1: [f16[2,1,2]=1 0.5 2 3]>", DP_OK},
        {"[<stack dims=1 pad=1: bool[1,1]=0>, <stack dims=1: bool[1,2]=1 0>]", 2,
         "<stack pad=1 dims=1: [bool[2,1,2]=0 1 1 0]>", DP_OK},
    };
    CHECK_COLLATE(table);
}

/* Each group has its own size. The last group may be shorter. */
TEST_BACKENDS(groups_are_consecutive_samples)
{
    static const collate_case table[] = {
        {"[<stack dims=1: f32[1,1]=1>, <stack dims=1: f32[1,2]=2 3>, <stack dims=1: f32[1,1]=4>]",
         2, "<stack pad=0 dims=1: [f32[2,1,2]=1 0 2 3, f32[1,1,1]=4]>", DP_OK},
        {"[<stack dims=1: f32[1,1]=1>, <stack dims=1: f32[1,2]=2 3>]", 0,
         "<stack pad=0 dims=1: [f32[1,1,1]=1, f32[1,1,2]=2 3]>", DP_OK},
        {"[<stack dims=1: f32[1,1]=1>, <stack dims=1: f32[1,1]=2>]", 5,
         "<stack pad=0 dims=1: [f32[2,1,1]=1 2]>", DP_OK},
        {"[<stack dims=1: f32[1,1]=1>, <stack dims=1: f32[2,1]=2 3>]", 1,
         "<stack pad=0 dims=1: [f32[1,1,1]=1, f32[1,2,1]=2 3]>", DP_OK},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(groups_are_those_of_parts)
{
    const size_t cases[][6] = {/* samples, parts, groups and their samples */
                               {5, 3, 3, 2, 2, 1},
                               {6, 3, 3, 2, 2, 2},
                               {2, 3, 2, 1, 1, 0},
                               {4, 1, 1, 4, 0, 0}};
    dp_value samples[6], out = dp_none();
    (void)ctx;
    for (int i = 0; i < 6; i++)
        samples[i] = dp_cpu_only(scope, dp_int(i));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_OK(dp_collate_parts(scope, samples, cases[i][0], cases[i][1], &out));
        CHECK_INT(dp_count(out.as.c->data), cases[i][2]);
        int64_t next = 0;
        for (size_t g = 0; g < cases[i][2]; g++) {
            dp_value group = dp_at(out.as.c->data, g);
            CHECK_INT(dp_count(group), cases[i][3 + g]);
            for (size_t k = 0; k < dp_count(group); k++)
                CHECK_INT(dp_at(group, k).as.i, next++);
        }
    }
    CHECK_ERROR(dp_collate_parts(scope, samples, 2, 0, &out), DP_ERR_INVALID,
                "dp_collate_parts: part_count is 0");
}

TEST_BACKENDS(no_padding_wants_equal_shapes)
{
    static const collate_case table[] = {
        {"[<stack dims=-1: f32[2]=1 2>, <stack dims=-1: f32[2]=3 4>]", 2,
         "<stack pad=0 dims=-1: [f32[2,2]=1 2 3 4]>", DP_OK},
        {"[<stack dims=-1: f32[]=1>, <stack dims=-1: f32[]=2>]", 2,
         "<stack pad=0 dims=-1: [f32[2]=1 2]>", DP_OK},
        {"[{'x': <stack dims=-1: f32[2]>}, {'x': <stack dims=-1: f32[3]>}]", 2, "['x']",
         DP_ERR_MISMATCH},
        {"[<stack dims=-1: f32[2]=1 2>, <stack dims=-1: f32[3]=3 4 5>]", 1,
         "<stack pad=0 dims=-1: [f32[1,2]=1 2, f32[1,3]=3 4 5]>", DP_OK}, /* not of one group */
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(containers_without_stack_make_lists)
{
    static const collate_case table[] = {
        {"[<: f32[2]>, <: f32[1]>, <: f32[3]>]", 2,
         "<pad=0 dims=2: [[f32[2]=0 1, f32[1]=0], [f32[3]=0 1 2]]>", DP_OK},
        {"[<: 'a'>, <: [1, None]>]", 1, "<pad=0 dims=2: [['a'], [[1, None]]]>", DP_OK},
        {"[<cpu: {'name': 'a'}>, <cpu: {'name': 'b', 'id': 3}>]", 2,
         "<cpu pad=0 dims=2: [[{'name': 'a'}, {'name': 'b', 'id': 3}]]>", DP_OK},
        {"[<cpu: &>, <cpu: None>]", 1, "<cpu pad=0 dims=2: [[&], [None]]>", DP_OK},
        {"[<stack cpu pad=3 dims=1: f32[1]>, <stack cpu pad=4 dims=1: f32[2]>]", 2,
         "<stack cpu pad=3 dims=1: [[f32[1]=0, f32[2]=0 1]]>", DP_OK}, /* cpu_only wins */
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(wrong_containers)
{
    static const collate_case table[] = {
        {"[{'img': <stack: f32[2,2]>}, {'img': <stack: f32[2,2]>}]", 2, "['img']", DP_ERR_INVALID},
        {"[<stack dims=1: f32[2]>]", 1, "1", DP_ERR_INVALID},
        {"[<stack dims=3: f32[1,2,2]>]", 1, "3", DP_ERR_INVALID},
        {"[<stack: 5>]", 1, "int", DP_ERR_INVALID},
        {"[{'x': <stack: [f32[1,1,1]]>}]", 1, "['x']", DP_ERR_INVALID},
        {"[<stack: f32[1,2,2]>, <stack: f32[2,2,2]>]", 2, "1", DP_ERR_MISMATCH},
        {"[<stack: f32[1,2,2]>, <stack: f32[1,1,2,2]>]", 2, "1", DP_ERR_MISMATCH},
        {"[<stack: f32[1,2,2]>, <stack: f64[1,2,2]>]", 2, "f64", DP_ERR_MISMATCH},
        {"[<stack: f32[1,2,2]>, <: f32[1,2,2]>]", 1, "stack", DP_ERR_MISMATCH},
        {"[<: 1>, <cpu: 1>]", 1, "cpu_only", DP_ERR_MISMATCH},
        {"[<stack: f32[1,1,1]>, <stack dims=1: f32[1,1,1]>]", 1, "pad_dims", DP_ERR_MISMATCH},
        {"[{'img': <: 1>}, {'img': 1}]", 1, "['img']", DP_ERR_MISMATCH},
    };
    CHECK_COLLATE(table);
}

/* 0 is another way to say 2. */
TEST_BACKENDS(pad_dims_0_is_2)
{
    static const collate_case table[] = {
        {"[<stack: f32[1,1,1]=1>, <stack dims=2: f32[1,1,2]=2 3>]", 2,
         "<stack pad=0 dims=2: [f32[2,1,1,2]=1 0 2 3]>", DP_OK},
    };
    CHECK_COLLATE(table);
}

/* A padding value is a number of the tensor's dtype, or it would be written as another one. */
TEST_BACKENDS(padding_must_fit_the_dtype)
{
    static const collate_case table[] = {
        {"[<stack dims=1 pad=300: u8[1,1]>, <stack dims=1: u8[1,2]>]", 2, "300", DP_ERR_INVALID},
        {"[<stack dims=1 pad=0.5: i64[1,1]>, <stack dims=1: i64[1,2]>]", 2, "0.5", DP_ERR_INVALID},
        {"[<stack dims=1 pad=-1: u8[1,1]>, <stack dims=1: u8[1,2]>]", 2, "-1", DP_ERR_INVALID},
    };
    CHECK_COLLATE(table);
}

TEST_BACKENDS(padding_of_nan)
{
    dp_container container = {.data = tree_of(scope, "f32[1,1]=1"),
                              .padding_value = (double)NAN,
                              .pad_dims = 1,
                              .stack = true};
    dp_value samples[2] = {dp_contain(scope, &container)}, out;
    container.data = tree_of(scope, "f32[1,2]=2 3");
    samples[1] = dp_contain(scope, &container);
    CHECK_OK(dp_collate(scope, samples, 2, 2, &out));
    const float *got = dp_at(out.as.c->data, 0).as.t->data;
    CHECK_F64(got[0], 1, 0);
    CHECK_F64(got[1], (double)NAN, 0);
    CHECK_F64(got[3], 3, 0);
}

/* So many bytes that several threads share the work. */
TEST_BACKENDS(large_batches)
{
    enum { COUNT = 8, ROWS = 150, COLUMNS = 200 };
    dp_value samples[COUNT], out;
    for (int i = 0; i < COUNT; i++) {
        dp_tensor tensor =
            tree_tensor(scope, DP_F32, DP_SHAPE(2, ROWS - i, COLUMNS - COUNT + i), i);
        dp_container container = {
            .data = dp_of(scope, &tensor), .padding_value = -i - 1, .stack = true};
        samples[i] = dp_contain(scope, &container);
    }
    CHECK_OK(dp_collate(scope, samples, COUNT, COUNT, &out));
    const dp_tensor *batch = dp_at(out.as.c->data, 0).as.t;
    const float *got = batch->data;
    CHECK_INT(batch->shape[2], ROWS);
    CHECK_INT(batch->shape[3], COLUMNS - 1);
    for (int i = 0; i < COUNT; i++) {
        const float *want = samples[i].as.c->data.as.t->data;
        for (int row = 0; row < 2 * ROWS; row++) {
            for (int column = 0; column < COLUMNS - 1; column++) {
                bool inside = row % ROWS < ROWS - i && column < COLUMNS - COUNT + i;
                CHECK_F64(*got++, inside ? *want++ : (float)(-i - 1), 0);
            }
        }
    }
}

/* ---- and then -------------------------------------------------------------------------------- */

TEST_BACKENDS(a_batch_falls_on_devices)
{
    dp_value samples = tree_of(
        scope, "[{'img': <stack dims=1: f32[1,1]=1>, 'meta': <cpu: 'a'>, 'boxes': <: f32[1]=5>}, "
               "{'img': <stack dims=1: f32[1,2]=2 3>, 'meta': <cpu: 'b'>, 'boxes': <: f32[2]>}, "
               "{'img': <stack dims=1: f32[1,1]=4>, 'meta': <cpu: 'c'>, 'boxes': <: f32[0]>}]");
    dp_value batch, parts;
    CHECK_OK(dp_collate(scope, samples.as.items, 3, 2, &batch));
    CHECK_OK(dp_scatter(ctx, scope, batch, NULL, &parts));
    CHECK_TREE(ctx, parts,
               "[{'img': f32[2,1,2]=1 0 2 3, 'meta': ['a', 'b'], 'boxes': [f32[1]=5, f32[2]=0 1]}, "
               "{'img': f32[1,1,1]=4, 'meta': ['c'], 'boxes': [f32[0]=]}]");
    for (int i = 0; i < 2; i++) {
        const dp_tensor *image = dp_get(dp_at(parts, (size_t)i), "img").as.t;
        CHECK(tree_same_device(image->device, dp_local_device(ctx, i)));
    }
}

TEST_BACKENDS(more_groups_than_devices)
{
    const int ranks[] = {0, 1};
    const dp_scatter_config how = {.local_ranks = ranks, .local_rank_count = 2};
    dp_value samples = tree_of(scope, "[{'m': <cpu: 1>}, {'m': <cpu: 2>}, {'m': <cpu: 3>}]"), out;
    CHECK_OK(dp_collate(scope, samples.as.items, 3, 1, &out));
    CHECK_ERROR(dp_scatter(ctx, scope, out, &how, &out), DP_ERR_MISMATCH, "['m']");
}

static dp_status collate(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    (void)ctx;
    return dp_collate(scope, in.as.items, in.count, 1, out);
}

TEST(collate_out_of_memory)
{
    tree_out_of_memory(collate, 30,
                       "[{'a': 1, 'b': 'x', 'c': <stack dims=1: f32[1,1]=2>, 'd': <cpu: &>}, "
                       "{'a': 3, 'b': 'y', 'c': <stack dims=1: f32[1,2]=4 5>, 'd': <cpu: &>}]",
                       "{'a': i64[2]=1 3, 'b': ['x', 'y'], 'c': <stack pad=0 dims=1: "
                       "[f32[1,1,1]=2, f32[1,1,2]=4 5]>, 'd': <cpu pad=0 dims=2: [[&], [&]]>}");
}
