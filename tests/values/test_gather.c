/* test_gather.c - the outputs of replicas become one: dp_gather, dp_gather_into. */

#include "tree.h"

typedef struct gather_case {
    const char *in; /* a list: entry i is put on device i */
    int dim;
    const char *want; /* the value, or a part of the sentence */
    dp_status status;
} gather_case;

static void check_gather(dp_ctx *ctx, dp_scope *scope, const gather_case *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const gather_case *row = &table[i];
        const dp_gather_config how = {.local_rank = 1, .dim = row->dim};
        dp_value out = dp_none();
        dp_status got = dp_gather(ctx, scope, tree_spread(ctx, scope, row->in), &how, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

#define CHECK_GATHER(table) check_gather(ctx, scope, table, sizeof(table) / sizeof((table)[0]))

/* ---- structures ------------------------------------------------------------------------------ */

TEST_BACKENDS(each_kind)
{
    static const gather_case table[] = {
        {"[f32[2], f32[1]=9]", 0, "f32[3]=0 1 9", DP_OK},
        {"[f32[2,1]=1 2, f32[1,1]=3]", 0, "f32[3,1]=1 2 3", DP_OK},
        {"[f32[2,1]=1 2, f32[2,2]=3 4 5 6]", 1, "f32[2,3]=1 3 4 2 5 6", DP_OK},
        {"[f32[2,1]=1 2, f32[2,2]=3 4 5 6]", -1, "f32[2,3]=1 3 4 2 5 6", DP_OK},
        {"[f32[2,1]=1 2, f32[1,1]=3]", -2, "f32[3,1]=1 2 3", DP_OK},
        {"[None, None, None]", 0, "None", DP_OK},
        {"[[f32[1]=1, i64[1]=2], [f32[1]=3, i64[1]=4]]", 0, "[f32[2]=1 3, i64[2]=2 4]", DP_OK},
        {"[(f32[1]=1, None), (f32[1]=3, None)]", 0, "(f32[2]=1 3, None)", DP_OK},
        {"[{'a': f32[1]=1}, {'a': f32[1]=2}]", 0, "{'a': f32[2]=1 2}", DP_OK},
        {"[{'a': [(f32[1]=1)]}, {'a': [(f32[1]=2)]}]", 0, "{'a': [(f32[2]=1 2)]}", DP_OK},
        {"[[], []]", 0, "[]", DP_OK},
        {"[(), ()]", 0, "()", DP_OK},
        {"[{}, {}]", 0, "{}", DP_OK},
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(keys_in_any_order_come_in_the_first_ones)
{
    static const gather_case table[] = {
        {"[{'b': f32[1]=1, 'a': i8[1]=2}, {'a': i8[1]=3, 'b': f32[1]=4}]", 0,
         "{'b': f32[2]=1 4, 'a': i8[2]=2 3}", DP_OK},
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(one_entry)
{
    static const gather_case table[] = {
        {"[f32[2]=3 4]", 0, "f32[2]=3 4", DP_OK},
        {"[f32[]=5]", 0, "f32[1]=5", DP_OK},
        {"[{'a': [None, f32[0]]}]", 0, "{'a': [None, f32[0]=]}", DP_OK},
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(parts_without_rows)
{
    static const gather_case table[] = {
        {"[f32[0], f32[0]]", 0, "f32[0]=", DP_OK},
        {"[f32[0,2], f32[1,2]=1 2, f32[0,2]]", 0, "f32[1,2]=1 2", DP_OK},
        {"[f32[2,0], f32[2,0]]", 0, "f32[4,0]=", DP_OK},
        {"[f32[2,0], f32[2,1]=1 2]", 1, "f32[2,1]=1 2", DP_OK},
        {"[f32[0], f32[0,2]]", 0, "1", DP_ERR_MISMATCH}, /* not even then */
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(tensors_without_dims_become_a_vector)
{
    static const gather_case table[] = {
        {"[f32[]=1, f32[]=2, f32[]=3]", 0, "f32[3]=1 2 3", DP_OK},
        {"[f32[]=1, f32[]=2]", -1, "f32[2]=1 2", DP_OK},
        {"[{'loss': f64[]=1}, {'loss': f64[]=2}]", 0, "{'loss': f64[2]=1 2}", DP_OK},
        {"[f32[]=1, f32[]=2]", 1, "dim", DP_ERR_INVALID},
        {"[f32[]=1, f32[]=2]", -2, "dim", DP_ERR_INVALID},
        {"[f32[]=1, f32[1]=2]", 0, "1", DP_ERR_MISMATCH},
        {"[f32[1]=1, f32[]=2]", 0, "1", DP_ERR_MISMATCH},
    };
    CHECK_GATHER(table);
}

/* Structure, kinds, dtypes, sizes: the sentence names the place and the replica. */
TEST_BACKENDS(replicas_must_agree)
{
    static const gather_case table[] = {
        {"[f32[1], None]", 0, "1", DP_ERR_MISMATCH},
        {"[None, f32[1]]", 0, "1", DP_ERR_MISMATCH},
        {"[[f32[1]], (f32[1])]", 0, "1", DP_ERR_MISMATCH},
        {"[[f32[1], f32[1]], [f32[1]]]", 0, "1", DP_ERR_MISMATCH},
        {"[[f32[1]], [f32[1], f32[1]]]", 0, "1", DP_ERR_MISMATCH},
        {"[[], [f32[1]]]", 0, "1", DP_ERR_MISMATCH},
        {"[{'a': f32[1]}, {'b': f32[1]}]", 0, "a", DP_ERR_MISMATCH},
        {"[{'a': f32[1]}, {'a': f32[1], 'zz': None}]", 0, "zz", DP_ERR_MISMATCH},
        {"[{'a': f32[1], 'zz': None}, {'a': f32[1]}]", 0, "zz", DP_ERR_MISMATCH},
        {"[{}, {'zz': f32[1]}]", 0, "zz", DP_ERR_MISMATCH},
        {"[f32[1], f64[1]]", 0, "f64", DP_ERR_MISMATCH},
        {"[f32[1,2], f32[2]]", 0, "1", DP_ERR_MISMATCH},
        {"[f32[1,2], f32[1,3]]", 0, "1", DP_ERR_MISMATCH},
        {"[f32[1,2], f32[2,2]]", 1, "1", DP_ERR_MISMATCH},
        {"[{'x': [None, 1]}, {'x': [None, f32[1]]}]", 0, "['x'][1]", DP_ERR_MISMATCH},
        {"[None, None, None, (None)]", 0, "3", DP_ERR_MISMATCH},
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(the_sentence_names_the_place)
{
    static const gather_case table[] = {
        {"[{'loss': [1, 2, 3]}, {'loss': [1, 2, 3]}]", 0, "['loss'][0]", DP_ERR_INVALID},
        {"[{'loss': [None, None, f32[1]]}, {'loss': [None, None, f64[1]]}]", 0, "['loss'][2]",
         DP_ERR_MISMATCH},
        {"[{'loss': (f32[2], {'a': f32[1,2]})}, {'loss': (f32[2], {'a': f32[1,3]})}]", 0,
         "['loss'][1]['a']", DP_ERR_MISMATCH},
        {"[[f32[1]], [f32[1]], [None]]", 0, "[0]", DP_ERR_MISMATCH},
        {"[[f32[1]], [f32[1]], [None]]", 0, "2", DP_ERR_MISMATCH},
        {"[{'a': f32[2]}, {'a': f32[2]}]", 1, "['a']", DP_ERR_INVALID},
    };
    CHECK_GATHER(table);
}

/* There is no one answer to what several numbers are: the module should return a tensor. */
TEST_BACKENDS(numbers_are_not_gathered)
{
    static const gather_case table[] = {
        {"[1, 2]", 0, "tensor", DP_ERR_INVALID},
        {"[1.5, 2.5]", 0, "tensor", DP_ERR_INVALID},
        {"[True, True]", 0, "tensor", DP_ERR_INVALID},
        {"['a', 'a']", 0, "tensor", DP_ERR_INVALID},
        {"[&, &]", 0, "tensor", DP_ERR_INVALID},
        {"[<: 1>, <: 1>]", 0, "tensor", DP_ERR_INVALID},
        {"[{'acc': 0.5}, {'acc': 0.5}]", 0, "['acc']", DP_ERR_INVALID},
        {"[1]", 0, "tensor", DP_ERR_INVALID},
    };
    CHECK_GATHER(table);
}

TEST_BACKENDS(wrong_dims)
{
    static const gather_case table[] = {
        {"[f32[1,1], f32[1,1]]", 2, "dim", DP_ERR_INVALID},
        {"[f32[1,1], f32[1,1]]", -3, "dim", DP_ERR_INVALID},
        {"[[f32[1,1], f32[1]], [f32[1,1], f32[1]]]", 1, "[1]", DP_ERR_INVALID},
    };
    CHECK_GATHER(table);
}

/* Rows of one byte of memory, more than can be together. */
TEST_BACKENDS(too_many_rows)
{
    uint8_t byte = 0;
    dp_tensor many = dp_wrap(&byte, DP_U8, 1, (const int64_t[]){1});
    many.shape[0] = INT64_MAX / 3;
    many.stride[0] = 0;
    dp_value value = dp_of(scope, &many), out;
    CHECK_INT(value.kind, DP_TENSOR);
    dp_value list = DP_LIST_OF(scope, value, value, value, value);
    CHECK_ERROR(dp_gather(ctx, scope, list, NULL, &out), DP_ERR_INVALID, "rows");
}

TEST_BACKENDS(wrong_arguments)
{
    dp_value list = tree_spread(ctx, scope, "[f32[1], f32[1]]"), out;
    const dp_gather_config far = {.local_rank = TREE_DEVICES}, below = {.local_rank = -1};
    CHECK_STATUS(dp_gather(NULL, scope, list, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, NULL, list, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, list, NULL, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, list, &far, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, list, &below, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, tree_of(scope, "[]"), NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, tree_of(scope, "f32[2]"), NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, tree_of(scope, "{'a': f32[2]}"), NULL, &out),
                 DP_ERR_INVALID);
    CHECK_STATUS(dp_gather(ctx, scope, dp_none(), NULL, &out), DP_ERR_INVALID);
    dp_tensor lost = tree_lost(scope);
    dp_value with_lost = DP_LIST_OF(scope, dp_at(list, 0), dp_of(scope, &lost));
    CHECK_ERROR(dp_gather(ctx, scope, with_lost, NULL, &out), DP_ERR_INVALID, "1");
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
}

/* ---- where the result is --------------------------------------------------------------------- */

TEST_BACKENDS(the_result_is_on_the_named_device)
{
    dp_value list = tree_spread(ctx, scope, "[f32[1]=1, f32[1]=2, f32[1]=3]"), out;
    for (int rank = 0; rank < TREE_DEVICES; rank++) {
        const dp_gather_config how = {.local_rank = rank};
        CHECK_OK(dp_gather(ctx, scope, list, &how, &out));
        CHECK(tree_same_device(out.as.t->device, dp_local_device(ctx, rank)));
        CHECK_TREE(ctx, out, "f32[3]=1 2 3");
    }
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
    CHECK(tree_same_device(out.as.t->device, dp_local_device(ctx, 0)));
}

TEST_BACKENDS(the_result_can_be_in_host_memory)
{
    static const float want[] = {1, 2, 3};
    dp_value list = tree_spread(ctx, scope, "[f32[1]=1, f32[1]=2, f32[1]=3]"), out;
    const dp_gather_config how = {.to_host = true, .local_rank = 5};
    CHECK_OK(dp_gather(ctx, scope, list, &how, &out));
    CHECK_INT(out.as.t->device.backend, 0);
    CHECK_BYTES(out.as.t->data, want, sizeof(want));
}

/* A rank's parts need not be on that rank's device, or on any. */
TEST_BACKENDS(parts_may_be_anywhere)
{
    dp_value out, items[3];
    dp_value host = tree_of(scope, "[i32[1]=1, i32[1]=2, i32[1]=3]");
    CHECK_OK(dp_gather(ctx, scope, host, NULL, &out));
    CHECK_TREE(ctx, out, "i32[3]=1 2 3");
    items[0] = tree_on(ctx, scope, dp_at(host, 0), dp_local_device(ctx, 4));
    items[1] = dp_at(host, 1);
    items[2] = tree_on(ctx, scope, dp_at(host, 2), dp_local_device(ctx, 4));
    CHECK_OK(dp_gather(ctx, scope, dp_list_make(scope, DP_LIST, items, 3), NULL, &out));
    CHECK_TREE(ctx, out, "i32[3]=1 2 3");
}

/* The result is its own memory, even of a single part. */
TEST_BACKENDS(the_result_shares_nothing)
{
    dp_value list = tree_spread(ctx, scope, "[f32[2]=1 2]"), out;
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
    CHECK_OK(dp_fill(ctx, dp_at(list, 0).as.t, dp_int(0)));
    CHECK_TREE(ctx, out, "f32[2]=1 2");
    CHECK(!out.as.t->read_only);
}

/* ---- memory layout --------------------------------------------------------------------------- */

/* A tensor of the shape n, c, [d,] h, w whose memory is n, [d,] h, w, c. */
static dp_tensor channels_last(dp_ctx *ctx, dp_scope *scope, int rank, int ndim,
                               const int64_t *shape)
{
    int64_t inner[DP_MAX_DIMS] = {shape[0]};
    dp_tensor host, turned;
    for (int d = 2; d < ndim; d++) {
        inner[d - 1] = shape[d];
    }
    inner[ndim - 1] = shape[1];
    host = tree_tensor(scope, DP_F32, ndim, inner, 0);
    turned = *tree_on(ctx, scope, dp_of(scope, &host), dp_local_device(ctx, rank)).as.t;
    for (int d = ndim - 1; d > 1; d--) {
        CHECK_OK(dp_transpose(&turned, d, d - 1, &turned));
    }
    for (int d = 0; d < ndim; d++) {
        CHECK_INT(turned.shape[d], shape[d]);
    }
    return turned;
}

static void check_strides(const dp_tensor *tensor, const int64_t *want)
{
    for (int d = 0; d < tensor->ndim; d++) {
        CHECK_INT(tensor->stride[d], want[d]);
    }
}

TEST_BACKENDS(channels_last_if_all_parts_are)
{
    dp_tensor a = channels_last(ctx, scope, 0, 4, (int64_t[]){2, 3, 2, 2});
    dp_tensor b = channels_last(ctx, scope, 1, 4, (int64_t[]){1, 3, 2, 2}), plain;
    dp_value parts[] = {dp_of(scope, &a), dp_of(scope, &b)}, out;
    CHECK_OK(dp_gather(ctx, scope, dp_list_make(scope, DP_LIST, parts, 2), NULL, &out));
    check_strides(out.as.t, (int64_t[]){12, 1, 6, 3});
    CHECK_TREE(ctx, out,
               "f32[3,3,2,2]=0 3 6 9 1 4 7 10 2 5 8 11 12 15 18 21 13 16 19 22 14 17 20 23 "
               "0 3 6 9 1 4 7 10 2 5 8 11");
    plain = *tree_on(ctx, scope, tree_of(scope, "f32[1,3,2,2]"), dp_local_device(ctx, 1)).as.t;
    parts[1] = dp_of(scope, &plain);
    CHECK_OK(dp_gather(ctx, scope, dp_list_make(scope, DP_LIST, parts, 2), NULL, &out));
    CHECK(dp_is_contiguous(out.as.t));
    CHECK_TREE(ctx, out,
               "f32[3,3,2,2]=0 3 6 9 1 4 7 10 2 5 8 11 12 15 18 21 13 16 19 22 14 17 20 23 "
               "0 1 2 3 4 5 6 7 8 9 10 11");
}

TEST_BACKENDS(channels_last_in_three_dimensions)
{
    dp_tensor a = channels_last(ctx, scope, 0, 5, (int64_t[]){1, 2, 2, 1, 2});
    dp_tensor b = channels_last(ctx, scope, 1, 5, (int64_t[]){1, 2, 2, 1, 2});
    dp_value parts[] = {dp_of(scope, &a), dp_of(scope, &b)}, out;
    CHECK_OK(dp_gather(ctx, scope, dp_list_make(scope, DP_LIST, parts, 2), NULL, &out));
    check_strides(out.as.t, (int64_t[]){8, 1, 4, 4, 2});
    CHECK_TREE(ctx, out, "f32[2,2,2,1,2]=0 2 4 6 1 3 5 7 0 2 4 6 1 3 5 7");
}

/* One channel: the same strides say both layouts, and then it is the plain one. */
TEST_BACKENDS(one_channel_is_contiguous)
{
    dp_value list = tree_spread(ctx, scope, "[f32[1,1,2,2], f32[1,1,2,2]]"), out;
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
    CHECK(dp_is_contiguous(out.as.t));
    check_strides(out.as.t, (int64_t[]){4, 4, 2, 1});
}

TEST_BACKENDS(other_layouts_become_contiguous)
{
    dp_value list = tree_spread(ctx, scope, "[f32[2,3], f32[2,3]]"), out, parts[2];
    dp_tensor turned;
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(dp_transpose(dp_at(list, i).as.t, 0, 1, &turned));
        parts[i] = dp_of(scope, &turned);
    }
    list = dp_list_make(scope, DP_LIST, parts, 2);
    CHECK_OK(dp_gather(ctx, scope, list, NULL, &out));
    CHECK(dp_is_contiguous(out.as.t));
    CHECK_TREE(ctx, out, "f32[6,2]=0 3 1 4 2 5 0 3 1 4 2 5");
    CHECK_OK(dp_gather(ctx, scope, list, &(dp_gather_config){.dim = 1}, &out));
    CHECK_TREE(ctx, out, "f32[3,4]=0 3 0 3 1 4 1 4 2 5 2 5");
}

/* ---- scatter and back ------------------------------------------------------------------------ */

static void check_round_trip(dp_ctx *ctx, dp_scope *scope, const dp_tensor *source,
                             const dp_scatter_config *cut)
{
    const dp_gather_config joined = {.dim = cut->cut.dim};
    dp_value parts, out;
    CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, source), cut, &parts));
    CHECK_OK(dp_gather(ctx, scope, parts, &joined, &out));
    CHECK_INT(out.as.t->ndim, source->ndim);
    CHECK_INT(out.as.t->dtype, source->dtype);
    for (int d = 0; d < source->ndim; d++) {
        CHECK_INT(out.as.t->shape[d], source->shape[d]);
    }
    void *got = tree_read(ctx, out.as.t), *want = tree_read(ctx, source);
    CHECK_BYTES(got, want,
                (size_t)dp_tensor_count(source) * dp_dtype_bytes((dp_dtype)source->dtype));
    free(got);
    free(want);
}

TEST_BACKENDS(gather_undoes_scatter)
{
    for (int ndim = 1; ndim <= DP_MAX_DIMS; ndim++) {
        const int64_t shape[DP_MAX_DIMS] = {3, 5, 1, 2, 2, 1, 3, 2};
        dp_tensor source = tree_tensor(scope, DP_I32, ndim, shape, 0), turned;
        CHECK_OK(dp_transpose(&source, 0, ndim - 1, &turned));
        for (int dim = -ndim; dim < ndim; dim++) {
            dp_scatter_config cut = {.cut = {.dim = dim, .split = DP_SPLIT_CHUNK}};
            check_round_trip(ctx, scope, &source, &cut);
            cut.cut.split = DP_SPLIT_BALANCED;
            check_round_trip(ctx, scope, &turned, &cut);
        }
    }
}

TEST_BACKENDS(every_dtype)
{
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        dp_tensor source = tree_tensor(scope, (dp_dtype)dtype, DP_SHAPE(5, 3), 1);
        check_round_trip(ctx, scope, &source, &(dp_scatter_config){.cut.dim = 0});
        check_round_trip(ctx, scope, &source, &(dp_scatter_config){.cut.dim = 1});
    }
}

static dp_status gather(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    return dp_gather(ctx, scope, in, NULL, out);
}

TEST(gather_out_of_memory)
{
    tree_out_of_memory(gather, 30,
                       "[{'a': f32[1]=1, 'b': [i8[]=2]}, {'a': f32[2]=3 4, 'b': [i8[]=5]}]",
                       "{'a': f32[3]=1 3 4, 'b': [i8[2]=2 5]}");
}

/* ---- into a tensor of the caller's ----------------------------------------------------------- */

TEST_BACKENDS(gather_into)
{
    dp_value list = tree_spread(ctx, scope, "[f32[1,2]=1 2, f32[0,2], f32[2,2]=3 4 5 6]");
    dp_tensor parts[3], out, whole;
    for (size_t i = 0; i < 3; i++) {
        parts[i] = *dp_at(list, i).as.t;
    }
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 2), DP_F32, DP_SHAPE(3, 2), &out));
    CHECK_OK(dp_gather_into(ctx, parts, 3, 0, &out));
    CHECK_TREE(ctx, dp_of(scope, &out), "f32[3,2]=1 2 3 4 5 6");
    CHECK_OK(dp_fill(ctx, &out, dp_int(0)));
    CHECK_OK(dp_gather_into(ctx, parts, 3, -2, &out));
    CHECK_TREE(ctx, dp_of(scope, &out), "f32[3,2]=1 2 3 4 5 6");
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(3, 4), &whole));
    CHECK_OK(dp_fill(ctx, &whole, dp_int(9)));
    CHECK_OK(dp_narrow(&whole, 1, 1, 2, &out));
    CHECK_OK(dp_gather_into(ctx, parts, 3, 0, &out));
    CHECK_TREE(ctx, dp_of(scope, &whole), "f32[3,4]=9 1 2 9 9 3 4 9 9 5 6 9");
}

TEST_BACKENDS(wrong_gather_into)
{
    static const int64_t wrong[][2] = {{4, 2}, {2, 2}, {3, 3}};
    dp_value list = tree_spread(ctx, scope, "[f32[1,2], f32[2,2]]");
    dp_tensor parts[] = {*dp_at(list, 0).as.t, *dp_at(list, 1).as.t}, good, out;
    const float data[6] = {0};
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(3, 2), &good));
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_tensor_new(scope, good.device, DP_F32, 2, wrong[i], &out));
        CHECK_STATUS(dp_gather_into(ctx, parts, 2, 0, &out), DP_ERR_INVALID);
    }
    CHECK_OK(dp_tensor_new(scope, good.device, DP_I32, DP_SHAPE(3, 2), &out));
    CHECK_STATUS(dp_gather_into(ctx, parts, 2, 0, &out), DP_ERR_INVALID);
    CHECK_OK(dp_tensor_new(scope, good.device, DP_F32, DP_SHAPE(6), &out));
    CHECK_STATUS(dp_gather_into(ctx, parts, 2, 0, &out), DP_ERR_INVALID);
    out = dp_wrap_const(data, DP_F32, DP_SHAPE(3, 2));
    CHECK_STATUS(dp_gather_into(ctx, parts, 2, 0, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather_into(ctx, parts, 2, 2, &good), DP_ERR_INVALID);
    out = good;
    CHECK_OK(dp_narrow(&good, 0, 1, 2, &good));
    const dp_tensor overlapping[] = {parts[0], good};
    CHECK_ERROR(dp_gather_into(ctx, overlapping, 2, 0, &out), DP_ERR_INVALID, "overlap");
    good = out;
    CHECK_STATUS(dp_gather_into(ctx, parts, 0, 0, &good), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather_into(ctx, NULL, 2, 0, &good), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather_into(ctx, parts, 2, 0, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_gather_into(NULL, parts, 2, 0, &good), DP_ERR_INVALID);
    CHECK_OK(dp_gather_into(ctx, parts, 2, 0, &good));
}

/* Elements that share a place make a large tensor of little memory. */
TEST_BACKENDS(more_elements_than_can_be_counted)
{
    float one = 1;
    dp_tensor wide = dp_wrap(&one, DP_F32, 1, (int64_t[]){1});
    wide.shape[0] = (int64_t)1 << 60;
    wide.stride[0] = 0;
    dp_value item = dp_of(scope, &wide), out;
    dp_value list = dp_list_make(scope, DP_LIST, (dp_value[]){item, item, item, item}, 4);
    CHECK_ERROR(dp_gather(ctx, scope, list, NULL, &out), DP_ERR_INVALID,
                "more elements than can be counted");
}
