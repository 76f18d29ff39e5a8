/* test_replicate.c - one value for every device, and values of every device added up. */

#include "decorator.h"
#include "tree.h"

static dp_scatter_config over(size_t count)
{
    return (dp_scatter_config){.local_ranks = first_ranks, .local_rank_count = count};
}

/* ---- replicate ------------------------------------------------------------------------------- */

TEST_BACKENDS(each_kind)
{
    static const char *const table[] = {
        "f32[2,3]=1 2 3 4 5 6",
        "f32[]=7",
        "f32[0,3]=",
        "12",
        "1.5",
        "True",
        "None",
        "'text'",
        "&",
        "[]",
        "()",
        "{}",
        "<stack pad=3 dims=1: [f32[1]=1, f32[2]=2 3]>",
        "[<cpu pad=0 dims=2: {'k': i8[1]=4}>, i8[1]=5]",
        "{'b': [f32[2]=1 2, (i64[1]=3, 'x')], 'a': None, 'c': f32[2]=4 5}",
    };
    static char want[TREE_TEXT];
    const dp_scatter_config how = over(3);
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        dp_value value = tree_of(scope, table[i]), on_0, out;
        snprintf(want, sizeof(want), "[%s, %s, %s]", table[i], table[i], table[i]);
        CHECK_OK(dp_replicate(ctx, scope, value, &how, &out));
        CHECK_TREE(ctx, out, want);
        on_0 = tree_on(ctx, scope, value, dp_local_device(ctx, 0));
        CHECK_OK(dp_replicate(ctx, scope, on_0, &how, &out));
        CHECK_TREE(ctx, out, want);
    }
}

/* Tensors of one dtype travel together; each comes back to its place, with its own shape. */
TEST_BACKENDS(mixed_dtypes_keep_their_order)
{
    static const char text[] =
        "[f32[2]=1 2, i64[1]=3, f32[0,2]=, f16[3]=4 5 6, f32[]=7, u8[3]=8 9 10, i64[2,1]=11 12, "
        "bool[1]=1, f16[]=13, f64[1]=14, bf16[2]=15 16, i8[]=17, f32[1,1]=18, i16[1]=19, "
        "i32[1]=20, u8[]=21, i64[0]=, f64[2]=22 23]";
    static char want[TREE_TEXT];
    const dp_scatter_config how = over(4);
    dp_value out;
    snprintf(want, sizeof(want), "[%s, %s, %s, %s]", text, text, text, text);
    for (int rank = -1; rank < 2; rank++) {
        dp_value value = tree_of(scope, text);
        if (rank >= 0) {
            value = tree_on(ctx, scope, value, dp_local_device(ctx, rank));
        }
        CHECK_OK(dp_replicate(ctx, scope, value, &how, &out));
        CHECK_TREE(ctx, out, want);
    }
}

TEST_BACKENDS(entries_are_on_their_devices)
{
    const int ranks[] = {3, 0, 6};
    const dp_scatter_config how = {.local_ranks = ranks, .local_rank_count = 3};
    dp_value out;
    CHECK_OK(dp_replicate(ctx, scope, tree_of(scope, "{'x': [f32[2]]}"), &how, &out));
    CHECK_INT(out.count, 3);
    for (size_t i = 0; i < 3; i++) {
        const dp_tensor *tensor = dp_at(dp_get(dp_at(out, i), "x"), 0).as.t;
        CHECK(tree_same_device(tensor->device, dp_local_device(ctx, ranks[i])));
    }
    CHECK_OK(dp_replicate(ctx, scope, tree_of(scope, "f32[1]"), NULL, &out));
    CHECK_INT(out.count, TREE_DEVICES);
}

/* Entry 0 is the original; a write to one copy is seen by no other. */
TEST_BACKENDS(the_first_shares_memory_the_others_do_not)
{
    dp_value value =
        tree_on(ctx, scope, tree_of(scope, "[f32[2]=1 2, f32[1]=3]"), dp_local_device(ctx, 0));
    const dp_scatter_config how = over(3);
    dp_value out;
    CHECK_OK(dp_replicate(ctx, scope, value, &how, &out));
    CHECK(dp_at(dp_at(out, 0), 0).as.t->data == dp_at(value, 0).as.t->data);
    CHECK(dp_at(dp_at(out, 0), 1).as.t->data == dp_at(value, 1).as.t->data);
    CHECK_OK(dp_fill(ctx, dp_at(dp_at(out, 1), 0).as.t, dp_int(8)));
    CHECK_TREE(ctx, out,
               "[[f32[2]=1 2, f32[1]=3], [f32[2]=8 8, f32[1]=3], [f32[2]=1 2, f32[1]=3]]");
    CHECK_OK(dp_fill(ctx, dp_at(dp_at(out, 0), 0).as.t, dp_int(9)));
    CHECK_TREE(ctx, out,
               "[[f32[2]=9 9, f32[1]=3], [f32[2]=8 8, f32[1]=3], [f32[2]=1 2, f32[1]=3]]");
    CHECK_TREE(ctx, value, "[f32[2]=9 9, f32[1]=3]");
}

/* Only the first rank may share: a value that lives on the second one's device is copied there. */
TEST_BACKENDS(a_value_of_another_device)
{
    dp_value value = tree_on(ctx, scope, tree_of(scope, "f32[2]=1 2"), dp_local_device(ctx, 1));
    const dp_scatter_config how = over(2);
    dp_value out;
    CHECK_OK(dp_replicate(ctx, scope, value, &how, &out));
    CHECK_OK(dp_fill(ctx, dp_at(out, 1).as.t, dp_int(5)));
    CHECK_TREE(ctx, value, "f32[2]=1 2");
    CHECK_TREE(ctx, out, "[f32[2]=1 2, f32[2]=5 5]");
}

TEST_BACKENDS(copies_of_const_memory_are_writable)
{
    static const float data[] = {1, 2};
    dp_tensor tensor = dp_wrap_const(data, DP_F32, DP_SHAPE(2));
    const dp_scatter_config how = over(2);
    dp_value out;
    CHECK_OK(dp_replicate(ctx, scope, dp_of(scope, &tensor), &how, &out));
    CHECK(!dp_at(out, 1).as.t->read_only);
    CHECK_OK(dp_fill(ctx, dp_at(out, 1).as.t, dp_int(4)));
    CHECK_TREE(ctx, out, "[f32[2]=1 2, f32[2]=4 4]");
}

TEST_BACKENDS(replicate_views_that_are_not_contiguous)
{
    dp_value value = tree_on(ctx, scope, tree_of(scope, "f32[2,3]"), dp_local_device(ctx, 0)), out;
    const dp_scatter_config how = over(2);
    dp_tensor turned;
    CHECK_OK(dp_transpose(value.as.t, 0, 1, &turned));
    CHECK_OK(dp_replicate(ctx, scope, dp_of(scope, &turned), &how, &out));
    CHECK_TREE(ctx, out, "[f32[3,2]=0 3 1 4 2 5, f32[3,2]=0 3 1 4 2 5]");
}

/* More than the 10 MiB that travel at once, of two dtypes by turns, one of them too large alone. */
TEST_BACKENDS(many_and_large_tensors)
{
    static const int64_t sizes[] = {3 << 19, 1000, 3 << 19, 3 << 20, 5, 7};
    enum { COUNT = sizeof(sizes) / sizeof(sizes[0]) };
    dp_value items[COUNT], out;
    const dp_scatter_config how = over(2);
    for (int i = 0; i < COUNT; i++) {
        dp_tensor tensor =
            tree_tensor(scope, i % 3 == 1 ? DP_I32 : DP_F32, 1, &sizes[i], 1000.0 * i);
        items[i] = dp_of(scope, &tensor);
    }
    CHECK_OK(dp_replicate(ctx, scope, dp_list_make(scope, DP_LIST, items, COUNT), &how, &out));
    for (size_t rank = 0; rank < 2; rank++) {
        for (size_t i = 0; i < COUNT; i++) {
            const dp_tensor *want = items[i].as.t, *got = dp_at(dp_at(out, rank), i).as.t;
            CHECK_INT(got->dtype, want->dtype);
            CHECK_INT(got->shape[0], want->shape[0]);
            void *elements = tree_read(ctx, got);
            CHECK_BYTES(elements, want->data, (size_t)want->shape[0] * 4);
            free(elements);
        }
    }
}

TEST_BACKENDS(wrong_replicates)
{
    const int bad[] = {0, TREE_DEVICES};
    const dp_scatter_config far = {.local_ranks = bad, .local_rank_count = 2};
    dp_value value = tree_of(scope, "f32[1]"), out;
    CHECK_STATUS(dp_replicate(NULL, scope, value, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate(ctx, NULL, value, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate(ctx, scope, value, NULL, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate(ctx, scope, value, &far, &out), DP_ERR_INVALID);
    dp_tensor lost = tree_lost(scope);
    CHECK_ERROR(dp_replicate(ctx, scope, dp_of(scope, &lost), NULL, &out), DP_ERR_INVALID,
                "device");
    CHECK_OK(dp_replicate(ctx, scope, value, NULL, &out));
}

/* How often a device of its own is asked for memory, and to copy into it, to replicate a list. */
static void check_travel(const dp_value *items, size_t count, dp_scope *scope, dp_ctx *ctx,
                         int allocs, int copies)
{
    const dp_scatter_config how = over(1);
    dp_value list = dp_list_make(scope, DP_LIST, items, count), out;
    deco.log_count = 0;
    CHECK_OK(dp_replicate(ctx, scope, list, &how, &out));
    CHECK_INT(deco_calls(DECO_alloc), allocs);
    CHECK_INT(deco_calls(DECO_copy_in), copies);
}

/* One block a dtype, up to 10 MiB; what is larger goes alone, and a full block stays closed. */
TEST(tensors_of_a_dtype_travel_together)
{
    static const int64_t sizes[] = {3 << 19, 3 << 19, 3 << 20, 5, 7};
    const dp_device_ops *const backends[] = {decorate_device(toy_device()), NULL};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value small = tree_of(scope, "[f32[2], i64[3], f32[], i64[1], f16[1], f32[5], i64[0]]");
    check_travel(small.as.items, small.count, scope, ctx, 3, 3);
    dp_value large[5];
    for (int i = 0; i < 5; i++) {
        dp_tensor tensor = tree_tensor(scope, DP_F32, 1, &sizes[i], 0);
        large[i] = dp_of(scope, &tensor);
    }
    check_travel(large, 5, scope, ctx, 4, 4);
    dp_close(ctx);
    CHECK_DECORATOR();
}

static dp_status replicate(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    const dp_scatter_config how = over(2);
    return dp_replicate(ctx, scope, in, &how, out);
}

TEST(replicate_out_of_memory)
{
    tree_out_of_memory(replicate, 30, "[{'a': f32[2]=1 2}, [i8[]=3, f32[1]=4]]",
                       "[[{'a': f32[2]=1 2}, [i8[]=3, f32[1]=4]], "
                       "[{'a': f32[2]=1 2}, [i8[]=3, f32[1]=4]]]");
}

TEST_BACKENDS(replicate_into)
{
    dp_tensor source = tree_tensor(scope, DP_F32, DP_SHAPE(2, 2), 1), outs[3], bad;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, DP_SHAPE(2, 2), &outs[i]));
    }
    CHECK_OK(dp_transpose(&outs[2], 0, 1, &outs[2]));
    CHECK_OK(dp_replicate_into(ctx, &source, outs, 3));
    for (int i = 0; i < 3; i++) {
        CHECK_TREE(ctx, dp_of(scope, &outs[i]), "f32[2,2]=1 2 3 4");
    }
    bad = outs[1];
    CHECK_OK(dp_tensor_new(scope, bad.device, DP_F32, DP_SHAPE(4), &outs[1]));
    CHECK_ERROR(dp_replicate_into(ctx, &source, outs, 3), DP_ERR_INVALID, "out 1");
    CHECK_OK(dp_tensor_new(scope, bad.device, DP_I32, DP_SHAPE(2, 2), &outs[1]));
    CHECK_ERROR(dp_replicate_into(ctx, &source, outs, 3), DP_ERR_INVALID, "out 1");
    outs[1] = bad;
    outs[1].read_only = true;
    CHECK_STATUS(dp_replicate_into(ctx, &source, outs, 3), DP_ERR_INVALID);
    outs[1] = source;
    outs[1].stride[1] = 0;
    CHECK_ERROR(dp_replicate_into(ctx, &source, outs, 3), DP_ERR_INVALID, "out 1");
    CHECK_STATUS(dp_replicate_into(ctx, &source, NULL, 3), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate_into(ctx, &source, outs, 0), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate_into(ctx, NULL, outs, 3), DP_ERR_INVALID);
    CHECK_STATUS(dp_replicate_into(NULL, &source, outs, 3), DP_ERR_INVALID);
}

/* ---- reduce_add ------------------------------------------------------------------------------ */

typedef struct reduce_case {
    const char *in; /* a list: entry i is put on device i */
    const char *want;
    dp_status status;
} reduce_case;

static void check_reduce(dp_ctx *ctx, dp_scope *scope, const reduce_case *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const reduce_case *row = &table[i];
        const dp_gather_config how = {.local_rank = 1};
        dp_value out = dp_none();
        dp_status got = dp_reduce_add(ctx, scope, tree_spread(ctx, scope, row->in), &how, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

#define CHECK_REDUCE(table) check_reduce(ctx, scope, table, sizeof(table) / sizeof((table)[0]))

TEST_BACKENDS(sums_of_each_structure)
{
    static const reduce_case table[] = {
        {"[f32[2]=1 2, f32[2]=10 20, f32[2]=100 200]", "f32[2]=111 222", DP_OK},
        {"[f32[2,2]=1 2 3 4, f32[2,2]=5 6 7 8]", "f32[2,2]=6 8 10 12", DP_OK},
        {"[f32[]=1, f32[]=2]", "f32[]=3", DP_OK},
        {"[f32[0,3], f32[0,3]]", "f32[0,3]=", DP_OK},
        {"[f32[3]=1 2 3]", "f32[3]=1 2 3", DP_OK},
        {"[[f32[1]=1, i64[1]=2], [f32[1]=3, i64[1]=4]]", "[f32[1]=4, i64[1]=6]", DP_OK},
        {"[(f64[1]=1), (f64[1]=3)]", "(f64[1]=4)", DP_OK},
        {"[{'a': f32[1]=1, 'b': {}}, {'b': {}, 'a': f32[1]=2}]", "{'a': f32[1]=3, 'b': {}}", DP_OK},
    };
    CHECK_REDUCE(table);
}

TEST_BACKENDS(values_must_agree)
{
    static const reduce_case table[] = {
        {"[f32[2], f32[3]]", "1", DP_ERR_MISMATCH},
        {"[f32[2], f32[1,2]]", "1", DP_ERR_MISMATCH},
        {"[f32[2], f64[2]]", "f64", DP_ERR_MISMATCH},
        {"[f32[], f32[1]]", "1", DP_ERR_MISMATCH},
        {"[[f32[2]], (f32[2])]", "1", DP_ERR_MISMATCH},
        {"[[f32[2]], [f32[2], f32[2]]]", "1", DP_ERR_MISMATCH},
        {"[{'a': f32[2]}, {'b': f32[2]}]", "a", DP_ERR_MISMATCH},
        {"[{'g': [f32[1], f32[1]]}, {'g': [f32[1], f32[2]]}]", "['g'][1]", DP_ERR_MISMATCH},
        {"[f32[2], None]", "1", DP_ERR_MISMATCH},
        {"[None, None]", "None", DP_OK},
        {"[1, 2]", "tensor", DP_ERR_INVALID},
        {"[{'a': 'x'}, {'a': 'x'}]", "['a']", DP_ERR_INVALID},
    };
    CHECK_REDUCE(table);
}

/* Every dtype adds in its own way: halves in f32, whole numbers wrap, flags are or. */
TEST_BACKENDS(sums_of_each_dtype)
{
    static const reduce_case table[] = {
        {"[f64[2]=1 0.5, f64[2]=2 0.25]", "f64[2]=3 0.75", DP_OK},
        {"[f16[2]=1 0.5, f16[2]=2 2, f16[2]=4 4]", "f16[2]=7 6.5", DP_OK},
        {"[bf16[2]=1 0.5, bf16[2]=2 2]", "bf16[2]=3 2.5", DP_OK},
        {"[i64[1]=4000000000, i64[1]=4000000000]", "i64[1]=8e+09", DP_OK},
        {"[i32[1]=-3, i32[1]=5]", "i32[1]=2", DP_OK},
        {"[i16[1]=30000, i16[1]=30000]", "i16[1]=-5536", DP_OK},
        {"[i8[1]=100, i8[1]=100]", "i8[1]=-56", DP_OK},
        {"[u8[1]=200, u8[1]=100]", "u8[1]=44", DP_OK},
        {"[bool[4]=0 0 1 1, bool[4]=0 1 0 1]", "bool[4]=0 1 1 1", DP_OK},
    };
    CHECK_REDUCE(table);
}

/* Partial sums are not rounded to half between two additions. */
TEST_BACKENDS(halves_are_added_in_f32)
{
    static const reduce_case table[] = {
        {"[f16[1]=2048, f16[1]=1, f16[1]=1]", "f16[1]=2050", DP_OK},
        {"[bf16[1]=256, bf16[1]=1, bf16[1]=1]", "bf16[1]=258", DP_OK},
    };
    CHECK_REDUCE(table);
}

/* (1e8 + 1) - 1e8 is 0 in f32, (1e8 - 1e8) + 1 is 1: the list's order shows in the sum. */
TEST_BACKENDS(the_order_is_that_of_a_tree_over_the_list)
{
    static const reduce_case table[] = {
        {"[f32[1]=1e8, f32[1]=1, f32[1]=-1e8]", "f32[1]=0", DP_OK},
        {"[f32[1]=1e8, f32[1]=-1e8, f32[1]=1]", "f32[1]=1", DP_OK},
        {"[f32[1]=1, f32[1]=1e8, f32[1]=-1e8]", "f32[1]=0", DP_OK},
        {"[f64[1]=1e16, f64[1]=-1e16, f64[1]=1]", "f64[1]=1", DP_OK},
        {"[f64[1]=1e16, f64[1]=1, f64[1]=-1e16]", "f64[1]=0", DP_OK},
        {"[f32[1]=1e8, f32[1]=1, f32[1]=-1e8, f32[1]=1]", "f32[1]=0", DP_OK},
        {"[f32[1]=1e8, f32[1]=1, f32[1]=1, f32[1]=-1e8]", "f32[1]=0", DP_OK},
        {"[f32[1]=1, f32[1]=2, f32[1]=1e8, f32[1]=-1e8]", "f32[1]=3", DP_OK},
    };
    CHECK_REDUCE(table);
}

/* Long enough to be split among threads, against a tree here. */
TEST_BACKENDS(long_sums_have_the_same_bits)
{
    enum { PARTS = 5, ELEMENTS = 100003 };
    float(*numbers)[ELEMENTS] = test_room(PARTS * sizeof *numbers);
    float *want = test_room(ELEMENTS * sizeof *want);
    uint64_t state = test_seed();
    dp_value items[PARTS], out;
    for (int p = 0; p < PARTS; p++) {
        dp_tensor tensor = dp_wrap(numbers[p], DP_F32, DP_SHAPE(ELEMENTS));
        for (int i = 0; i < ELEMENTS; i++) {
            numbers[p][i] = (float)(test_random(&state) >> 40) / 1000.0F;
        }
        items[p] = tree_on(ctx, scope, dp_of(scope, &tensor), dp_local_device(ctx, p));
    }
    for (int i = 0; i < ELEMENTS; i++) {
        float left = numbers[0][i] + numbers[1][i], right = numbers[2][i] + numbers[3][i];
        want[i] = (left + right) + numbers[4][i];
    }
    CHECK_OK(dp_reduce_add(ctx, scope, dp_list_make(scope, DP_LIST, items, PARTS), NULL, &out));
    void *got = tree_read(ctx, out.as.t);
    CHECK_BYTES(got, want, ELEMENTS * sizeof *want);
    free(got);
}

TEST_BACKENDS(the_sum_is_where_it_is_wanted)
{
    static const float want[] = {4};
    dp_value list = tree_spread(ctx, scope, "[f32[1]=1, f32[1]=3]"), out;
    for (int rank = 0; rank < TREE_DEVICES; rank++) {
        const dp_gather_config how = {.local_rank = rank};
        CHECK_OK(dp_reduce_add(ctx, scope, list, &how, &out));
        CHECK(tree_same_device(out.as.t->device, dp_local_device(ctx, rank)));
        CHECK_TREE(ctx, out, "f32[1]=4");
    }
    CHECK_OK(dp_reduce_add(ctx, scope, list, &(dp_gather_config){.to_host = true}, &out));
    CHECK_INT(out.as.t->device.backend, 0);
    CHECK_BYTES(out.as.t->data, want, sizeof(want));
    CHECK_TREE(ctx, list, "[f32[1]=1, f32[1]=3]"); /* the parts are as they were */
}

/* One entry's tensors need not be on one device, and entries need not be alike in that. */
TEST_BACKENDS(parts_may_be_anywhere)
{
    enum { ENTRIES = 2, ITEMS = 3 };
    dp_value list = tree_of(scope, "[[f32[1]=1, f32[1]=2, f32[1]=3], "
                                   "[f32[1]=10, f32[1]=20, f32[1]=30]]");
    for (unsigned places = 0; places < 1U << (ENTRIES * ITEMS); places++) {
        dp_value entries[ENTRIES], items[ITEMS], out;
        for (size_t e = 0; e < ENTRIES; e++) {
            for (size_t i = 0; i < ITEMS; i++) {
                int rank = places >> (e * ITEMS + i) & 1;
                items[i] =
                    tree_on(ctx, scope, dp_at(dp_at(list, e), i), dp_local_device(ctx, rank));
            }
            entries[e] = dp_list_make(scope, DP_LIST, items, ITEMS);
        }
        CHECK_OK(dp_reduce_add(ctx, scope, dp_list_make(scope, DP_LIST, entries, 2), NULL, &out));
        CHECK_TREE(ctx, out, "[f32[1]=11, f32[1]=22, f32[1]=33]");
        CHECK_OK(dp_gather(ctx, scope, dp_list_make(scope, DP_LIST, entries, 2), NULL, &out));
        CHECK_TREE(ctx, out, "[f32[2]=1 10, f32[2]=2 20, f32[2]=3 30]");
        CHECK_OK(dp_replicate(ctx, scope, entries[0], &(dp_scatter_config){0}, &out));
        CHECK_TREE(ctx, dp_at(out, 0), "[f32[1]=1, f32[1]=2, f32[1]=3]");
        CHECK_TREE(ctx, dp_at(out, 1), "[f32[1]=1, f32[1]=2, f32[1]=3]");
    }
}

TEST_BACKENDS(sums_of_views)
{
    dp_value list = tree_spread(ctx, scope, "[f32[2,3], f32[3,2]=10 20 30 40 50 60]"), out;
    dp_tensor turned;
    CHECK_OK(dp_transpose(dp_at(list, 0).as.t, 0, 1, &turned));
    dp_value parts = DP_LIST_OF(scope, dp_of(scope, &turned), dp_at(list, 1));
    CHECK_OK(dp_reduce_add(ctx, scope, parts, NULL, &out));
    CHECK_TREE(ctx, out, "f32[3,2]=10 23 31 44 52 65");
}

TEST_BACKENDS(wrong_reduces)
{
    dp_value list = tree_spread(ctx, scope, "[f32[1], f32[1]]"), out;
    const dp_gather_config far = {.local_rank = TREE_DEVICES};
    CHECK_STATUS(dp_reduce_add(NULL, scope, list, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add(ctx, NULL, list, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add(ctx, scope, list, NULL, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add(ctx, scope, list, &far, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add(ctx, scope, tree_of(scope, "[]"), NULL, &out), DP_ERR_INVALID);
    dp_tensor lost = tree_lost(scope);
    dp_value with_lost = DP_LIST_OF(scope, tree_of(scope, "f32[2]"), dp_of(scope, &lost));
    CHECK_ERROR(dp_reduce_add(ctx, scope, with_lost, NULL, &out), DP_ERR_INVALID, "1");
    CHECK_STATUS(dp_reduce_add(ctx, scope, tree_of(scope, "f32[1]"), NULL, &out), DP_ERR_INVALID);
    CHECK_OK(dp_reduce_add(ctx, scope, list, NULL, &out));
}

/* A kernel adds up as many as its tree has room for. */
TEST(no_sum_of_more_than_a_million_parts)
{
    enum { MOST = 1 << 20 };
    dp_value *ones = test_room((MOST + 1) * sizeof *ones), sum;
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i <= MOST; i++) {
        ones[i] = i > 0 ? ones[0] : tree_of(scope, "i32[1]=1");
    }
    CHECK_ERROR(dp_reduce_add(ctx, scope, dp_list_make(scope, DP_LIST, ones, MOST + 1), NULL, &sum),
                DP_ERR_UNSUPPORTED, "1048577 parts to add up, more than 1048576");
    CHECK_OK(dp_reduce_add(ctx, scope, dp_list_make(scope, DP_LIST, ones, MOST), NULL, &sum));
    CHECK_TREE(ctx, sum, "i32[1]=1048576");
    dp_close(ctx);
}

TEST_BACKENDS(reduce_add_into)
{
    dp_value list = tree_spread(ctx, scope, "[f32[2]=1 2, f32[2]=10 20]");
    dp_tensor parts[] = {*dp_at(list, 0).as.t, *dp_at(list, 1).as.t}, out, wrong;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 2), DP_F32, DP_SHAPE(2), &out));
    CHECK_OK(dp_reduce_add_into(ctx, parts, 2, &out));
    CHECK_TREE(ctx, dp_of(scope, &out), "f32[2]=11 22");
    CHECK_OK(dp_reduce_add_into(ctx, parts, 2, &parts[0])); /* onto a part itself */
    CHECK_TREE(ctx, list, "[f32[2]=11 22, f32[2]=10 20]");
    CHECK_OK(dp_tensor_new(scope, out.device, DP_F32, DP_SHAPE(1, 2), &wrong));
    CHECK_STATUS(dp_reduce_add_into(ctx, parts, 2, &wrong), DP_ERR_INVALID);
    CHECK_OK(dp_tensor_new(scope, out.device, DP_F64, DP_SHAPE(2), &wrong));
    CHECK_STATUS(dp_reduce_add_into(ctx, parts, 2, &wrong), DP_ERR_INVALID);
    parts[1].shape[0] = 1;
    CHECK_ERROR(dp_reduce_add_into(ctx, parts, 2, &out), DP_ERR_INVALID, "part 1");
    wrong = out;
    wrong.read_only = true;
    CHECK_STATUS(dp_reduce_add_into(ctx, parts, 1, &wrong), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add_into(ctx, parts, 0, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add_into(ctx, NULL, 2, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add_into(ctx, parts, 1, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_reduce_add_into(NULL, parts, 1, &out), DP_ERR_INVALID);
}

TEST_BACKENDS(reduce_add_into_views)
{
    dp_value list = tree_spread(ctx, scope, "[f32[2,2]=1 2 3 4, f32[2,2]=10 20 30 40]");
    dp_tensor parts[] = {*dp_at(list, 0).as.t, *dp_at(list, 1).as.t}, whole, out;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(2, 3), &whole));
    CHECK_OK(dp_fill(ctx, &whole, dp_int(-1)));
    CHECK_OK(dp_narrow(&whole, 1, 1, 2, &out));
    CHECK_OK(dp_reduce_add_into(ctx, parts, 2, &out));
    CHECK_TREE(ctx, dp_of(scope, &whole), "f32[2,3]=-1 11 22 -1 33 44");
    CHECK_OK(dp_narrow(&parts[0], 0, 0, 0, &parts[0]));
    CHECK_OK(dp_narrow(&out, 0, 0, 0, &out));
    CHECK_OK(dp_reduce_add_into(ctx, parts, 1, &out));
    CHECK_TREE(ctx, dp_of(scope, &whole), "f32[2,3]=-1 11 22 -1 33 44");
}

static dp_status reduce_add(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    return dp_reduce_add(ctx, scope, in, NULL, out);
}

TEST(reduce_add_out_of_memory)
{
    tree_out_of_memory(reduce_add, 30,
                       "[{'a': f32[2]=1 2, 'b': f16[]=3}, {'a': f32[2]=4 5, 'b': f16[]=6}]",
                       "{'a': f32[2]=5 7, 'b': f16[]=9}");
}
