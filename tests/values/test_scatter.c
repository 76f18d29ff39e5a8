/* test_scatter.c - how rows fall on devices: dp_split_rows, dp_scatter and its other forms. */

#include "tree.h"

enum { CHUNK = DP_SPLIT_CHUNK, BALANCED = DP_SPLIT_BALANCED };

/* Over the first `count` local ranks. */
static dp_scatter_config over(size_t count, dp_split split, int dim)
{
    return (dp_scatter_config){
        .local_ranks = first_ranks, .local_rank_count = count, .cut = {.dim = dim, .split = split}};
}

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct rows_case {
    int64_t rows;
    size_t parts, made;
    int64_t want[TREE_DEVICES];
} rows_case;

static void check_rows(const dp_cut *how, const rows_case *row)
{
    int64_t got[TREE_DEVICES + 1];
    size_t made = 99;
    for (size_t i = 0; i <= TREE_DEVICES; i++) {
        got[i] = -7;
    }
    CHECK_OK(dp_split_rows(row->rows, row->parts, how, got, &made));
    CHECK_INT(made, row->made);
    for (size_t i = 0; i < row->parts; i++) {
        if (got[i] != row->want[i]) {
            test_fail(__FILE__, __LINE__, "%lld rows over %zu: part %zu has %lld, wanted %lld",
                      (long long)row->rows, row->parts, i, (long long)got[i],
                      (long long)row->want[i]);
        }
    }
    CHECK_INT(got[row->parts], -7);
}

/* The table of torch.chunk, as the original gives it. */
TEST(chunk_is_that_of_torch)
{
    static const rows_case table[] = {
        {5, 2, 2, {3, 2}},
        {1, 2, 1, {1}},
        {4, 3, 2, {2, 2}},
        {5, 4, 3, {2, 2, 1}},
        {6, 4, 3, {2, 2, 2}},
        {7, 4, 4, {2, 2, 2, 1}},
        {9, 4, 3, {3, 3, 3}},
        {9, 8, 5, {2, 2, 2, 2, 1}},
        {10, 4, 4, {3, 3, 3, 1}},
        {10, 8, 5, {2, 2, 2, 2, 2}},
        {17, 8, 6, {3, 3, 3, 3, 3, 2}},
        {100, 8, 8, {13, 13, 13, 13, 13, 13, 13, 9}},
        {0, 4, 4, {0, 0, 0, 0}},
    };
    const dp_cut how = {.split = DP_SPLIT_CHUNK};
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_rows(&how, &table[i]);
    }
}

TEST(balanced_is_the_default)
{
    static const rows_case table[] = {
        {10, 4, 4, {3, 3, 2, 2}},
        {6, 4, 4, {2, 2, 1, 1}},
        {5, 2, 2, {3, 2}},
        {1, 2, 2, {1, 0}},
        {9, 8, 8, {2, 1, 1, 1, 1, 1, 1, 1}},
        {100, 8, 8, {13, 13, 13, 13, 12, 12, 12, 12}},
        {0, 4, 4, {0, 0, 0, 0}},
        {7, 1, 1, {7}},
    };
    const dp_cut how = {.dim = 0};
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_rows(&how, &table[i]);
        check_rows(NULL, &table[i]);
    }
}

/* Both rules against their definitions, for every small case. */
TEST(every_small_case)
{
    for (int64_t rows = 0; rows <= 70; rows++) {
        for (size_t parts = 1; parts <= TREE_DEVICES; parts++) {
            int64_t count = (int64_t)parts, most = (rows + count - 1) / count;
            rows_case chunk = {rows, parts, rows ? (size_t)((rows + most - 1) / most) : parts, {0}};
            rows_case balanced = {rows, parts, parts, {0}};
            for (int64_t row = 0; row < rows; row++) {
                chunk.want[row / most]++;
                balanced.want[row % count]++;
            }
            check_rows(&(dp_cut){.split = DP_SPLIT_CHUNK}, &chunk);
            check_rows(&(dp_cut){.split = DP_SPLIT_BALANCED}, &balanced);
        }
    }
}

TEST(many_rows_do_not_overflow)
{
    int64_t got[2];
    size_t made;
    const dp_cut chunk = {.split = DP_SPLIT_CHUNK};
    const dp_cut weights = {
        .split = DP_SPLIT_WEIGHTS, .weights = (double[]){1, 1}, .split_count = 2};
    const dp_cut *const all[] = {NULL, &chunk, &weights};
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(dp_split_rows(INT64_MAX, 2, all[i], got, &made));
        CHECK_INT(made, 2);
        CHECK(got[0] > 0 && got[1] > 0);
        CHECK_INT(INT64_MAX - got[0], got[1]);
        CHECK(got[0] - got[1] <= 1 && got[1] - got[0] <= 1);
    }
    const dp_cut first = {.split = DP_SPLIT_WEIGHTS, .weights = (double[]){1, 0}, .split_count = 2};
    CHECK_OK(dp_split_rows(INT64_MAX, 2, &first, got, &made));
    CHECK_INT(got[0], INT64_MAX);
    CHECK_INT(got[1], 0);
}

TEST(sizes_are_taken_as_given)
{
    static const rows_case table[] = {
        {6, 2, 2, {2, 4}},
        {6, 3, 3, {0, 6, 0}},
        {0, 2, 2, {0, 0}},
        {5, 1, 1, {5}},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_rows(&(dp_cut){.split = DP_SPLIT_SIZES,
                             .sizes = table[i].want,
                             .split_count = table[i].parts},
                   &table[i]);
    }
}

TEST(wrong_sizes)
{
    int64_t got[4];
    size_t made;
    dp_cut how = {.split = DP_SPLIT_SIZES, .sizes = (int64_t[]){2, 3}, .split_count = 2};
    CHECK_ERROR(dp_split_rows(6, 2, &how, got, &made), DP_ERR_INVALID,
                "dp_split_rows: the sizes add up to 5, not to 6 rows");
    CHECK_ERROR(dp_split_rows(1, 2, &how, got, &made), DP_ERR_INVALID,
                "the sizes add up to 5, not to 1 row");
    how.sizes = (int64_t[]){7, -1};
    CHECK_STATUS(dp_split_rows(6, 2, &how, got, &made), DP_ERR_INVALID);
    how.sizes = (int64_t[]){-1, 7};
    CHECK_ERROR(dp_split_rows(6, 2, &how, got, &made), DP_ERR_INVALID, "-1");
    how.split_count = 3;
    how.sizes = (int64_t[]){INT64_MAX, INT64_MAX, 8};
    CHECK_ERROR(dp_split_rows(6, 3, &how, got, &made), DP_ERR_INVALID,
                "the sizes add up to more than 9223372036854775807, not to 6 rows");
    CHECK_ERROR(dp_split_rows(INT64_MAX, 3, &how, got, &made), DP_ERR_INVALID,
                "more than 9223372036854775807, not to 9223372036854775807 rows");
    how.sizes = NULL;
    CHECK_ERROR(dp_split_rows(6, 3, &how, got, &made), DP_ERR_INVALID, "sizes is NULL");
}

/* Sizes and weights come with their count and with the split that uses them. */
TEST_BACKENDS(a_split_has_what_it_needs)
{
    static const int64_t sizes[] = {2, 4};
    static const double weights[] = {1, 2};
    static const struct {
        dp_cut how;
        const char *want;
    } table[] = {
        {{.split = DP_SPLIT_SIZES, .sizes = sizes}, "split_count is 0, sizes"},
        {{.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = 1}, "for each of 2 parts"},
        {{.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = 3}, "split_count is 3, sizes"},
        {{.split = DP_SPLIT_SIZES, .split_count = 2}, "sizes is NULL"},
        {{.split = DP_SPLIT_WEIGHTS, .weights = weights}, "split_count is 0, weights"},
        {{.split = DP_SPLIT_WEIGHTS, .weights = weights, .split_count = 1}, "weights"},
        {{.split = DP_SPLIT_WEIGHTS, .split_count = 2}, "weights is NULL"},
        {{.sizes = sizes, .split_count = 2}, "sizes is given, and split is not DP_SPLIT_SIZES"},
        {{.weights = weights, .split_count = 2}, "weights is given"},
        {{.split = DP_SPLIT_SIZES, .sizes = sizes, .weights = weights, .split_count = 2},
         "weights is given, and split is not DP_SPLIT_WEIGHTS"},
        {{.split = DP_SPLIT_WEIGHTS, .sizes = sizes, .weights = weights, .split_count = 2},
         "sizes is given, and split is not DP_SPLIT_SIZES"},
        {{.split_count = 2}, "split_count is 2, and neither sizes nor weights"},
        {{.split = DP_SPLIT_CHUNK, .split_count = 2}, "split_count is 2, and neither"},
    };
    int64_t rows[2];
    size_t made;
    dp_value batch = tree_of(scope, "f32[6]"), out;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const dp_scatter_config how = {first_ranks, 2, table[i].how};
        CHECK_ERROR(dp_split_rows(6, 2, &how.cut, rows, &made), DP_ERR_INVALID, table[i].want);
        CHECK_ERROR(dp_scatter(ctx, scope, batch, &how, &out), DP_ERR_INVALID, table[i].want);
    }
}

TEST(weights_round_by_largest_remainder)
{
    static const struct {
        double weights[4];
        rows_case want;
    } table[] = {
        {{1, 1, 1, 1}, {10, 4, 4, {3, 3, 2, 2}}}, /* ties go to the lower rank */
        {{3, 1}, {8, 2, 2, {6, 2}}},
        {{0, 1}, {5, 2, 2, {0, 5}}},
        {{1, 0, 1}, {3, 3, 3, {2, 0, 1}}},
        {{0.5, 0.25, 0.25}, {4, 3, 3, {2, 1, 1}}},
        {{1, 2, 3}, {10, 3, 3, {2, 3, 5}}}, /* 1.67 3.33 5 */
        {{5, 3, 1}, {4, 3, 3, {2, 1, 1}}},  /* 2.22 1.33 0.44 */
        {{1e300, 1e300}, {4, 2, 2, {2, 2}}},
        {{1e-300, 3e-300}, {4, 2, 2, {1, 3}}},
        {{2, 5}, {0, 2, 2, {0, 0}}},
        {{4}, {9, 1, 1, {9}}},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_rows(&(dp_cut){.split = DP_SPLIT_WEIGHTS,
                             .weights = table[i].weights,
                             .split_count = table[i].want.parts},
                   &table[i].want);
    }
}

TEST(wrong_weights)
{
    int64_t got[2];
    size_t made;
    const double wrong[][2] = {
        {1, -1}, {0, 0}, {1, (double)NAN}, {(double)INFINITY, 1}, {-0.5, 2}, {1.7e308, 1.7e308},
    };
    dp_cut how = {.split = DP_SPLIT_WEIGHTS, .split_count = 2};
    CHECK_ERROR(dp_split_rows(6, 2, &how, got, &made), DP_ERR_INVALID, "weights is NULL");
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        how.weights = wrong[i];
        CHECK_ERROR(dp_split_rows(6, 2, &how, got, &made), DP_ERR_INVALID, "weight");
        CHECK_ERROR(dp_split_rows(0, 2, &how, got, &made), DP_ERR_INVALID, "weight");
    }
}

TEST(wrong_splits)
{
    int64_t got[2];
    size_t made;
    const dp_cut unknown = {.split = (dp_split)9};
    CHECK_STATUS(dp_split_rows(-1, 2, NULL, got, &made), DP_ERR_INVALID);
    CHECK_STATUS(dp_split_rows(6, 0, NULL, got, &made), DP_ERR_INVALID);
    CHECK_STATUS(dp_split_rows(6, 2, NULL, NULL, &made), DP_ERR_INVALID);
    CHECK_STATUS(dp_split_rows(6, 2, NULL, got, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_split_rows(6, 2, &unknown, got, &made), DP_ERR_INVALID);
}

/* ---- structures ------------------------------------------------------------------------------ */

typedef struct scatter_case {
    const char *in;
    size_t devices;
    int split;
    const char *want; /* the list, or a part of the sentence */
    dp_status status;
} scatter_case;

static void check_scatter(dp_ctx *ctx, dp_scope *scope, const scatter_case *table, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const scatter_case *row = &table[i];
        dp_scatter_config how = over(row->devices, (dp_split)row->split, 0);
        dp_value out = dp_none();
        dp_status got = dp_scatter(ctx, scope, tree_of(scope, row->in), &how, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

#define CHECK_SCATTER(table) check_scatter(ctx, scope, table, sizeof(table) / sizeof((table)[0]))

TEST_BACKENDS(chunk_of_each_kind)
{
    static const scatter_case table[] = {
        {"f32[4]", 2, CHUNK, "[f32[2]=0 1, f32[2]=2 3]", DP_OK},
        {"(f32[3])", 2, CHUNK, "[(f32[2]=0 1), (f32[1]=2)]", DP_OK},
        {"[f32[2], i64[2]]", 2, CHUNK, "[[f32[1]=0, i64[1]=0], [f32[1]=1, i64[1]=1]]", DP_OK},
        {"{'b': f32[2], 'a': 'x'}", 2, CHUNK,
         "[{'b': f32[1]=0, 'a': 'x'}, {'b': f32[1]=1, 'a': 'x'}]", DP_OK},
        {"([f32[2]], {'k': (u8[2], 1)})", 2, CHUNK,
         "[([f32[1]=0], {'k': (u8[1]=0, 1)}), ([f32[1]=1], {'k': (u8[1]=1, 1)})]", DP_OK},
        {"12", 3, CHUNK, "[12, 12, 12]", DP_OK},
        {"1.5", 2, CHUNK, "[1.5, 1.5]", DP_OK},
        {"True", 2, CHUNK, "[True, True]", DP_OK},
        {"None", 2, CHUNK, "[None, None]", DP_OK},
        {"'text'", 2, CHUNK, "['text', 'text']", DP_OK},
        {"&", 2, CHUNK, "[&, &]", DP_OK},
        {"()", 2, CHUNK, "[(), ()]", DP_OK},
        {"[]", 2, CHUNK, "[[], []]", DP_OK},
        {"{}", 2, CHUNK, "[{}, {}]", DP_OK},
        {"[1, 'a', ()]", 2, CHUNK, "[[1, 'a', ()], [1, 'a', ()]]", DP_OK},
    };
    CHECK_SCATTER(table);
}

/* The number of parts is the smallest there is; what is repeated does not count. */
TEST_BACKENDS(chunk_makes_as_many_parts_as_the_least)
{
    static const scatter_case table[] = {
        {"(f32[1], 9)", 2, CHUNK, "[(f32[1]=0, 9)]", DP_OK},
        {"(f32[1], [], 'a', None)", 4, CHUNK, "[(f32[1]=0, [], 'a', None)]", DP_OK},
        {"f32[6]", 4, CHUNK, "[f32[2]=0 1, f32[2]=2 3, f32[2]=4 5]", DP_OK},
        {"(f32[5], f32[6])", 2, CHUNK, "[(f32[3]=0 1 2, f32[3]=0 1 2), (f32[2]=3 4, f32[3]=3 4 5)]",
         DP_OK},
        {"(f32[0], f32[1])", 2, CHUNK, "[(f32[0]=, f32[1]=0)]", DP_OK},
        {"(f32[1], f32[0])", 2, CHUNK, "[(f32[1]=0, f32[0]=)]", DP_OK},
        {"f32[0]", 4, CHUNK, "[f32[0]=, f32[0]=, f32[0]=, f32[0]=]", DP_OK},
        {"f32[0,3]", 2, CHUNK, "[f32[0,3]=, f32[0,3]=]", DP_OK},
        {"(f32[0], f32[2])", 2, CHUNK, "[(f32[0]=, f32[1]=0), (f32[0]=, f32[1]=1)]", DP_OK},
    };
    CHECK_SCATTER(table);
}

/* Where the original drops rows without a word, the sentence names the place and the rows. */
TEST_BACKENDS(chunk_never_loses_rows)
{
    static const scatter_case table[] = {
        {"(f32[4], f32[1])", 2, CHUNK, "[0]", DP_ERR_MISMATCH},
        {"(f32[4], f32[1])", 2, CHUNK, "2", DP_ERR_MISMATCH},
        {"(f32[1], f32[4])", 2, CHUNK, "[1]", DP_ERR_MISMATCH},
        {"{'a': f32[1], 'b': [7, f32[5]]}", 4, CHUNK, "['b'][1]", DP_ERR_MISMATCH},
        {"{'a': f32[1], 'b': [7, f32[5]]}", 4, CHUNK, "3", DP_ERR_MISMATCH},
        {"(f32[3], f32[4])", 4, CHUNK, "[1]", DP_ERR_MISMATCH},
        {"(f32[2], <: [[f32[1]], [f32[1]], [f32[1]]]>)", 4, CHUNK, "[1]", DP_ERR_MISMATCH},
    };
    CHECK_SCATTER(table);
}

TEST_BACKENDS(balanced_makes_a_part_a_device)
{
    static const scatter_case table[] = {
        {"f32[1]", 3, BALANCED, "[f32[1]=0, f32[0]=, f32[0]=]", DP_OK},
        {"f32[0,2]", 2, BALANCED, "[f32[0,2]=, f32[0,2]=]", DP_OK},
        {"(f32[3,1], 9)", 2, BALANCED, "[(f32[2,1]=0 1, 9), (f32[1,1]=2, 9)]", DP_OK},
        {"{'x': f32[3], 'y': i64[3,1]}", 2, BALANCED,
         "[{'x': f32[2]=0 1, 'y': i64[2,1]=0 1}, {'x': f32[1]=2, 'y': i64[1,1]=2}]", DP_OK},
        {"()", 2, BALANCED, "[(), ()]", DP_OK},
        {"7", 2, BALANCED, "[7, 7]", DP_OK},
    };
    CHECK_SCATTER(table);
}

/* One cut for all fields: balanced rows of two lengths would not belong together. */
TEST_BACKENDS(balanced_fields_have_the_same_rows)
{
    static const scatter_case table[] = {
        {"(f32[4], f32[1])", 2, BALANCED, "[0]", DP_ERR_MISMATCH},
        {"(f32[4], f32[1])", 2, BALANCED, "[1]", DP_ERR_MISMATCH},
        {"{'x': [f32[4]], 'y': f32[5,4]}", 2, BALANCED, "['x'][0]", DP_ERR_MISMATCH},
        {"{'x': [f32[4]], 'y': f32[5,4]}", 2, BALANCED, "['y']", DP_ERR_MISMATCH},
        {"{'x': f32[0], 'y': f32[1]}", 2, BALANCED, "['y']", DP_ERR_MISMATCH},
    };
    CHECK_SCATTER(table);
}

TEST_BACKENDS(sizes_and_weights_cut_all_fields)
{
    dp_scatter_config how = over(3, DP_SPLIT_SIZES, 0);
    dp_value value = tree_of(scope, "{'x': f32[4], 'y': i8[4,1], 'z': 1}"), out;
    how.cut.sizes = (int64_t[]){1, 0, 3};
    how.cut.split_count = 3;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK_TREE(ctx, out,
               "[{'x': f32[1]=0, 'y': i8[1,1]=0, 'z': 1}, {'x': f32[0]=, 'y': i8[0,1]=, 'z': 1}, "
               "{'x': f32[3]=1 2 3, 'y': i8[3,1]=1 2 3, 'z': 1}]");
    how.cut.split = DP_SPLIT_WEIGHTS;
    how.cut.sizes = NULL;
    how.cut.weights = (double[]){1, 0, 3};
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK_TREE(ctx, dp_get(dp_at(out, 2), "x"), "f32[3]=1 2 3");
    CHECK_INT(out.count, 3);
    how.cut.weights = (double[]){1, -1, 3};
    CHECK_ERROR(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_INVALID, "weight");
    how.cut.split = DP_SPLIT_SIZES;
    how.cut.weights = NULL;
    how.cut.sizes = (int64_t[]){1, 1, 1};
    CHECK_ERROR(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_INVALID, "4");
    CHECK_ERROR(dp_scatter(ctx, scope, tree_of(scope, "(f32[3], f32[2])"), &how, &out),
                DP_ERR_MISMATCH, "[1]");
}

/* rows 0-1 and rows 2-5 */
TEST_BACKENDS(sizes_2_4_of_6_by_4)
{
    dp_scatter_config how = over(2, DP_SPLIT_SIZES, 0);
    dp_value out;
    how.cut.sizes = (int64_t[]){2, 4};
    how.cut.split_count = 2;
    CHECK_OK(dp_scatter(ctx, scope, tree_of(scope, "f32[6,4]"), &how, &out));
    CHECK_TREE(ctx, out,
               "[f32[2,4]=0 1 2 3 4 5 6 7, "
               "f32[4,4]=8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23]");
}

/* ---- dims ------------------------------------------------------------------------------------ */

TEST_BACKENDS(dim_minus_2_of_4_by_4_is_dim_0)
{
    static char first[TREE_TEXT];
    dp_scatter_config how = over(4, DP_SPLIT_CHUNK, 0);
    dp_value value = tree_of(scope, "f32[4,4]"), out;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    snprintf(first, sizeof(first), "%s", tree_text(ctx, out));
    how.cut.dim = -2;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK_TREE(ctx, out, first);
    CHECK_TREE(ctx, dp_at(out, 1), "f32[1,4]=4 5 6 7");
    how.cut.dim = -1;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK_TREE(ctx, dp_at(out, 1), "f32[4,1]=1 5 9 13");
}

TEST_BACKENDS(wrong_dims)
{
    dp_value value = tree_of(scope, "{'x': f32[4,4]}"), out;
    for (int dim = -4; dim <= 3; dim++) {
        dp_scatter_config how = over(2, DP_SPLIT_BALANCED, dim);
        if (dim >= -2 && dim <= 1) {
            CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
        } else {
            CHECK_ERROR(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_INVALID, "['x']");
        }
    }
    dp_scatter_config how = over(2, DP_SPLIT_BALANCED, 1);
    CHECK_ERROR(dp_scatter(ctx, scope, tree_of(scope, "(f32[2,2], f32[2])"), &how, &out),
                DP_ERR_INVALID, "[1]");
}

/* A tensor without dims has no rows; a number has none either, but is repeated. */
TEST_BACKENDS(tensors_without_dims_cannot_be_cut)
{
    static const scatter_case table[] = {
        {"f32[]", 2, CHUNK, "0", DP_ERR_INVALID},
        {"f32[]", 1, CHUNK, "[f32[]=0]", DP_OK},
        {"{'a': f32[2], 'b': [f32[]]}", 2, BALANCED, "['b'][0]", DP_ERR_INVALID},
    };
    CHECK_SCATTER(table);
}

/* Part i of `out` is rows [first, first + rows) of `source` along dim, whatever the layout. */
static void check_part(dp_ctx *ctx, const dp_tensor *source, int dim, int64_t first,
                       const dp_tensor *part)
{
    int64_t rows = part->shape[dim < 0 ? dim + part->ndim : dim];
    dp_tensor want;
    CHECK_OK(dp_narrow(source, dim, first, rows, &want));
    CHECK_INT(part->ndim, source->ndim);
    CHECK_INT(part->dtype, source->dtype);
    for (int d = 0; d < part->ndim; d++) {
        CHECK_INT(part->shape[d], want.shape[d]);
    }
    void *got_elements = tree_read(ctx, part), *want_elements = tree_read(ctx, &want);
    CHECK_BYTES(got_elements, want_elements,
                (size_t)dp_tensor_count(part) * dp_dtype_bytes((dp_dtype)part->dtype));
    free(got_elements);
    free(want_elements);
}

/* Every part of a scatter of `source` under `how`, against views of the source. */
static void check_parts(dp_ctx *ctx, dp_scope *scope, const dp_tensor *source,
                        const dp_scatter_config *how)
{
    int64_t rows[TREE_DEVICES], first = 0;
    size_t made;
    dp_value out;
    int dim = how->cut.dim < 0 ? how->cut.dim + source->ndim : how->cut.dim;
    CHECK_OK(dp_split_rows(source->shape[dim], how->local_rank_count, &how->cut, rows, &made));
    CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, source), how, &out));
    CHECK_INT(out.kind, DP_LIST);
    CHECK_INT(out.count, made);
    for (size_t i = 0; i < made; i++) {
        const dp_tensor *part;
        CHECK_OK(dp_as_tensor(dp_at(out, i), "part", DP_DTYPE_ANY, -1, &part));
        CHECK_INT(part->shape[dim], rows[i]);
        CHECK(tree_same_device(part->device, dp_local_device(ctx, how->local_ranks[i])));
        check_part(ctx, source, how->cut.dim, first, part);
        first += rows[i];
    }
    CHECK_INT(first, source->shape[dim]);
}

TEST_BACKENDS(every_dim_and_number_of_devices)
{
    for (int ndim = 1; ndim <= DP_MAX_DIMS; ndim++) {
        const int64_t shape[DP_MAX_DIMS] = {3, 2, 5, 1, 2, 1, 3, 2};
        dp_tensor source = tree_tensor(scope, DP_I16, ndim, shape, 0);
        for (int dim = -ndim; dim < ndim; dim++) {
            for (size_t devices = 1; devices <= 4; devices++) {
                dp_scatter_config how = over(devices, DP_SPLIT_CHUNK, dim);
                check_parts(ctx, scope, &source, &how);
                how.cut.split = DP_SPLIT_BALANCED;
                check_parts(ctx, scope, &source, &how);
            }
        }
    }
}

TEST_BACKENDS(every_dtype)
{
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        dp_tensor source = tree_tensor(scope, (dp_dtype)dtype, DP_SHAPE(7, 3), 1);
        dp_scatter_config how = over(4, DP_SPLIT_CHUNK, 0);
        check_parts(ctx, scope, &source, &how);
        how.cut.dim = 1;
        check_parts(ctx, scope, &source, &how);
    }
}

TEST_BACKENDS(sizes_0_and_1_and_odd)
{
    static const int64_t shapes[][3] = {{0, 3, 2}, {1, 1, 1}, {5, 0, 3}, {17, 1, 3}, {3, 7, 0}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        dp_tensor source = tree_tensor(scope, DP_F32, 3, shapes[i], 0);
        for (int dim = 0; dim < 3; dim++) {
            for (size_t devices = 1; devices <= TREE_DEVICES; devices++) {
                dp_scatter_config how = over(devices, DP_SPLIT_BALANCED, dim);
                check_parts(ctx, scope, &source, &how);
            }
        }
    }
}

TEST_BACKENDS(views_that_are_not_contiguous)
{
    dp_tensor base = tree_tensor(scope, DP_F32, DP_SHAPE(4, 5, 6), 0), view;
    dp_scatter_config how = over(3, DP_SPLIT_BALANCED, 0);
    CHECK_OK(dp_transpose(&base, 0, 2, &view));
    for (how.cut.dim = 0; how.cut.dim < 3; how.cut.dim++) {
        check_parts(ctx, scope, &view, &how);
    }
    CHECK_OK(dp_narrow(&base, 1, 1, 3, &view));
    for (how.cut.dim = 0; how.cut.dim < 3; how.cut.dim++) {
        check_parts(ctx, scope, &view, &how);
    }
    CHECK_OK(dp_select(&base, 1, 2, &view));
    for (how.cut.dim = 0; how.cut.dim < 2; how.cut.dim++) {
        check_parts(ctx, scope, &view, &how);
    }
    view.stride[0] = 0; /* every row is the same one */
    check_parts(ctx, scope, &view,
                &(dp_scatter_config){.local_ranks = first_ranks, .local_rank_count = 3});
}

/* NHWC in memory, NCHW in its shape: parts keep that order, so a kernel need not turn them. */
TEST_BACKENDS(channels_last_stays_so)
{
    dp_tensor nhwc = tree_tensor(scope, DP_F32, DP_SHAPE(5, 2, 2, 3), 0), nhcw, nchw;
    dp_scatter_config how = over(2, DP_SPLIT_BALANCED, 0);
    dp_value out;
    CHECK_OK(dp_transpose(&nhwc, 2, 3, &nhcw));
    CHECK_OK(dp_transpose(&nhcw, 1, 2, &nchw));
    CHECK_INT(nchw.stride[1], 1);
    check_parts(ctx, scope, &nchw, &how);
    CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, &nchw), &how, &out));
    for (size_t i = 0; i < 2; i++) {
        const dp_tensor *part = dp_at(out, i).as.t;
        for (int d = 0; d < 4; d++) {
            CHECK_INT(part->stride[d], nchw.stride[d]);
        }
    }
}

TEST_BACKENDS(from_one_device_to_others)
{
    for (int rank = 0; rank < TREE_DEVICES; rank += 3) {
        dp_value value =
            tree_on(ctx, scope, tree_of(scope, "i32[7,3]"), dp_local_device(ctx, rank));
        for (int dim = 0; dim < 2; dim++) {
            dp_scatter_config how = over(4, DP_SPLIT_CHUNK, dim);
            check_parts(ctx, scope, value.as.t, &how);
        }
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* CPU devices reach host memory: no part is a copy, strides and all. */
TEST_BACKENDS(parts_are_views_where_the_host_reaches)
{
    dp_tensor base = tree_tensor(scope, DP_F64, DP_SHAPE(6, 8), 0), view;
    dp_value out;
    CHECK_OK(dp_transpose(&base, 0, 1, &view));
    for (int dim = 0; dim < 2; dim++) {
        dp_scatter_config how = over(4, DP_SPLIT_BALANCED, dim);
        const double *want = base.data;
        CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, &view), &how, &out));
        for (size_t i = 0; i < 4; i++) {
            const dp_tensor *part = dp_at(out, i).as.t;
            CHECK(tree_same_device(part->device, dp_local_device(ctx, (int)i)));
            if (tree_host_memory(ctx)) {
                CHECK(part->data == want);
                CHECK_INT(part->stride[0], view.stride[0]);
                CHECK_INT(part->stride[1], view.stride[1]);
                want += part->shape[dim] * part->stride[dim];
            } else {
                CHECK(part->data != want);
            }
        }
    }
}

/* A part that is where it should be already is a view on every backend. */
TEST_BACKENDS(a_part_on_its_own_device_is_a_view)
{
    dp_value value = tree_on(ctx, scope, tree_of(scope, "f32[4,2]"), dp_local_device(ctx, 1)), out;
    dp_scatter_config how = over(2, DP_SPLIT_BALANCED, 0);
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK(dp_at(out, 1).as.t->data == (char *)value.as.t->data + 4 * sizeof(float));
    CHECK_TREE(ctx, out, "[f32[2,2]=0 1 2 3, f32[2,2]=4 5 6 7]");
}

TEST_BACKENDS(views_of_const_memory_are_read_only)
{
    static const float data[] = {0, 1, 2, 3};
    dp_tensor tensor = dp_wrap_const(data, DP_F32, DP_SHAPE(4));
    dp_scatter_config how = over(2, DP_SPLIT_BALANCED, 0);
    dp_value out;
    CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, &tensor), &how, &out));
    CHECK_INT(dp_at(out, 0).as.t->read_only, tree_host_memory(ctx));
    CHECK_INT(dp_at(out, 1).as.t->read_only, tree_host_memory(ctx));
}

/* ---- ranks ----------------------------------------------------------------------------------- */

TEST_BACKENDS(ranks_in_any_order)
{
    const int ranks[] = {5, 0, 2};
    const dp_scatter_config how = {.local_ranks = ranks, .local_rank_count = 3};
    dp_tensor source = tree_tensor(scope, DP_F32, DP_SHAPE(7), 0);
    check_parts(ctx, scope, &source, &how);
}

TEST_BACKENDS(no_config_is_all_devices)
{
    dp_value out;
    CHECK_OK(dp_scatter(ctx, scope, tree_of(scope, "f32[9]"), NULL, &out));
    CHECK_INT(out.count, TREE_DEVICES);
    CHECK_TREE(ctx, dp_at(out, 0), "f32[2]=0 1");
    CHECK_TREE(ctx, dp_at(out, 7), "f32[1]=8");
    for (int i = 0; i < TREE_DEVICES; i++) {
        CHECK(tree_same_device(dp_at(out, (size_t)i).as.t->device, dp_local_device(ctx, i)));
    }
}

TEST_BACKENDS(one_device_gets_all)
{
    static const scatter_case table[] = {
        {"(f32[3], 7)", 1, CHUNK, "[(f32[3]=0 1 2, 7)]", DP_OK},
        {"(f32[3], 7)", 1, BALANCED, "[(f32[3]=0 1 2, 7)]", DP_OK},
        {"(f32[3], f32[2])", 1, CHUNK, "[(f32[3]=0 1 2, f32[2]=0 1)]", DP_OK},
        {"(f32[3], f32[2])", 1, BALANCED, "[(f32[3]=0 1 2, f32[2]=0 1)]", DP_OK},
        {"(f32[3], f32[], [f32[2,0]])", 1, BALANCED, "[(f32[3]=0 1 2, f32[]=0, [f32[2,0]=])]",
         DP_OK},
        {"(<stack: [f32[3]]>, f32[2], <cpu: [[1, 2]]>)", 1, BALANCED,
         "[(f32[3]=0 1 2, f32[2]=0 1, [1, 2])]", DP_OK},
        {"(f32[2], <: [f32[1], f32[1]]>)", 1, BALANCED,
         "[1] has 2 groups for 1 device:", DP_ERR_MISMATCH},
    };
    CHECK_SCATTER(table);
}

/* Whole, on its device, whatever the dim and the sizes say. */
TEST_BACKENDS(one_device_cuts_nothing)
{
    static const int second = 1;
    dp_value value = tree_of(scope, "(f32[3,2], f32[2], f32[], <: [[f32[4]]]>)"), out;
    dp_scatter_config how = {.local_ranks = &second, .local_rank_count = 1, .cut.dim = 1};
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    how.cut.split = DP_SPLIT_SIZES;
    how.cut.sizes = (int64_t[]){7};
    how.cut.split_count = 1;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    CHECK_TREE(ctx, out, "[(f32[3,2]=0 1 2 3 4 5, f32[2]=0 1, f32[]=0, [f32[4]=0 1 2 3])]");
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_INT(dp_at(dp_at(out, 0), i).as.t->device.index, 1);
    }
    dp_tensor lost = tree_lost(scope);
    value = DP_LIST_OF(scope, dp_of(scope, &lost));
    CHECK_ERROR(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_INVALID, "[0] is on no device");
}

TEST_BACKENDS(wrong_ranks)
{
    const int bad[][2] = {{0, TREE_DEVICES}, {-1, 0}};
    dp_value value = tree_of(scope, "f32[4]"), out;
    for (size_t i = 0; i < 2; i++) {
        const dp_scatter_config how = {.local_ranks = bad[i], .local_rank_count = 2};
        CHECK_STATUS(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_INVALID);
    }
    const dp_scatter_config none = {.local_ranks = first_ranks}, two = {.local_rank_count = 2};
    CHECK_STATUS(dp_scatter(ctx, scope, value, &none, &out), DP_ERR_INVALID);
    CHECK_ERROR(dp_scatter(ctx, scope, value, &two, &out), DP_ERR_INVALID, "local_rank");
}

TEST_BACKENDS(wrong_arguments)
{
    dp_value value = tree_of(scope, "f32[4]"), out;
    const dp_scatter_config unknown = {.cut.split = (dp_split)-1};
    CHECK_STATUS(dp_scatter(NULL, scope, value, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter(ctx, NULL, value, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter(ctx, scope, value, NULL, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter(ctx, scope, value, &unknown, &out), DP_ERR_INVALID);
    dp_tensor lost = tree_lost(scope);
    dp_value of_lost = dp_of(scope, &lost), groups = DP_LIST_OF(scope, of_lost);
    dp_value field = DP_DICT(scope, {"x", of_lost});
    CHECK_ERROR(dp_scatter(ctx, scope, field, NULL, &out), DP_ERR_INVALID, "['x']");
    dp_value held = dp_contain(scope, &(dp_container){.data = groups});
    field = DP_DICT(scope, {"x", held});
    CHECK_ERROR(dp_scatter(ctx, scope, field, NULL, &out), DP_ERR_INVALID, "['x']");
    CHECK_OK(dp_scatter(ctx, scope, value, NULL, &out)); /* none of it harmed the context */
}

/* ---- containers ------------------------------------------------------------------------------ */

TEST_BACKENDS(containers_give_a_group_a_device)
{
    static const scatter_case table[] = {
        {"<stack: [f32[2]=1 2, f32[2]=3 4]>", 2, BALANCED, "[f32[2]=1 2, f32[2]=3 4]", DP_OK},
        {"<: [[f32[1], f32[2]], [f32[3]]]>", 2, BALANCED,
         "[[f32[1]=0, f32[2]=0 1], [f32[3]=0 1 2]]", DP_OK},
        {"<: [[[f32[1]], [f32[2]]], []]>", 2, BALANCED, "[[[f32[1]=0], [f32[2]=0 1]], []]", DP_OK},
        {"<: [(f32[1], [f32[2]]), ()]>", 2, BALANCED, "[(f32[1]=0, [f32[2]=0 1]), ()]", DP_OK},
        {"<cpu: [[1, 'a'], {'k': f32[2]}, None]>", 3, BALANCED,
         "[[1, 'a'], {'k': f32[2]=0 1}, None]", DP_OK},
        {"<cpu stack: [f32[]=3, f32[1]]>", 2, CHUNK, "[f32[]=3, f32[1]=0]", DP_OK},
        {"<stack: [f32[2]=1 2]>", 4, BALANCED, "[f32[2]=1 2]", DP_OK},
        {"<cpu: [1, 2]>", 4, BALANCED, "[1, 2]", DP_OK},
        {"{'a': <stack: [f32[1], f32[2]]>, 'b': <cpu: ['x', 'y']>, 'c': 3}", 2, BALANCED,
         "[{'a': f32[1]=0, 'b': 'x', 'c': 3}, {'a': f32[2]=0 1, 'b': 'y', 'c': 3}]", DP_OK},
        {"<: f32[2,1]>", 2, BALANCED, "[f32[2,1]=0 1]", DP_OK}, /* it was never collated */
        {"<cpu: f32[2]>", 3, CHUNK, "[f32[2]=0 1]", DP_OK},
        {"<: f32[]>", 1, BALANCED, "[f32[]=0]", DP_OK},
        {"(<: f32[3]>, f32[1], 7)", 2, CHUNK, "[(f32[3]=0 1 2, f32[1]=0, 7)]", DP_OK},
        {"(<: f32[3]>, f32[2])", 1, CHUNK, "[(f32[3]=0 1 2, f32[2]=0 1)]", DP_OK},
    };
    CHECK_SCATTER(table);
}

TEST_BACKENDS(wrong_containers)
{
    static const scatter_case table[] = {
        {"{'a': <stack: [f32[1], f32[1], f32[1]]>}", 2, BALANCED, "['a']", DP_ERR_MISMATCH},
        {"<cpu: [1, 2, 3]>", 2, BALANCED, "3", DP_ERR_MISMATCH},
        {"(<stack: [f32[1], f32[1]]>, <cpu: [1]>)", 4, BALANCED, "[0]", DP_ERR_MISMATCH},
        {"(<cpu: [1, 2]>, <cpu: [1]>)", 2, BALANCED, "[0]", DP_ERR_MISMATCH},
        {"(f32[4], <cpu: [1]>)", 2, BALANCED, "[0]", DP_ERR_MISMATCH},
        {"(<cpu: [1]>, f32[4])", 2, CHUNK,
         "[1] has rows in 2 parts, [0] makes 1 part:", DP_ERR_MISMATCH},
        {"(f32[2], <cpu: [1, 2, 3]>)", 3, CHUNK,
         "[1] has rows in 3 parts, [0] makes 2 parts:", DP_ERR_MISMATCH},
        {"{'a': f32[4], 'b': <: f32[4]>}", 2, CHUNK, "['a'] has rows in 2 parts, ['b'] makes 1",
         DP_ERR_MISMATCH},
        {"{'a': <: f32[2]>, 'b': <: [f32[1], f32[1]]>}", 2, BALANCED,
         "['b'] has 2 groups and ['a'] has 1:", DP_ERR_MISMATCH},
        {"{'a': <: (f32[2])>}", 2, BALANCED, "['a']", DP_ERR_INVALID},
        {"{'a': <: [[f32[2], 5]]>}", 2, BALANCED, "['a']", DP_ERR_INVALID},
        {"{'a': <: [f32[2], {'k': f32[2]}]>}", 2, BALANCED, "['a'][1]", DP_ERR_INVALID},
        {"{'a': <: [f32[2], {}]>}", 2, BALANCED, "['a'][1]", DP_ERR_INVALID},
        {"<cpu: 5>", 2, BALANCED, "", DP_ERR_INVALID},
        {"<: [5, 6]>", 2, BALANCED, "", DP_ERR_INVALID},
        {"<: ['x', 'y']>", 2, BALANCED, "", DP_ERR_INVALID},
    };
    CHECK_SCATTER(table);
}

/* Tensors follow the groups, whatever the split would do: the last, shorter batch of an epoch. */
TEST_BACKENDS(containers_decide_the_cut)
{
    static const char *const table[][2] = {
        {"{'x': <stack: [f32[3,1], f32[1,1]]>, 'y': i64[4]}",
         "[{'x': f32[3,1]=0 1 2, 'y': i64[3]=0 1 2}, {'x': f32[1,1]=0, 'y': i64[1]=3}]"},
        {"{'y': i64[4], 'x': <: [[f32[2], f32[1], f32[0]], [f32[1]]]>, 'z': 'a'}",
         "[{'y': i64[3]=0 1 2, 'x': [f32[2]=0 1, f32[1]=0, f32[0]=], 'z': 'a'}, "
         "{'y': i64[1]=3, 'x': [f32[1]=0], 'z': 'a'}]"},
        {"(<cpu: [['a', 'b'], ['c']]>, [f32[3], f32[3,1]], <stack: [i8[2], i8[1]]>)",
         "[(['a', 'b'], [f32[2]=0 1, f32[2,1]=0 1], i8[2]=0 1), "
         "(['c'], [f32[1]=2, f32[1,1]=2], i8[1]=0)]"},
        {"(<cpu: ['a', 'b']>, f32[3], <cpu: [[1], [2, 3]]>)", /* 'a' may be of any number */
         "[('a', f32[1]=0, [1]), ('b', f32[2]=1 2, [2, 3])]"},
        {"(<cpu: [[1, 2], 'b']>, <: [f32[], f32[]]>, <: [[f32[]], [f32[]]]>, f32[2])",
         "[([1, 2], f32[]=0, [f32[]=0], f32[1]=0), ('b', f32[]=0, [f32[]=0], f32[1]=1)]"},
        {"(f32[2], <stack: [f32[2], f32[0]]>)", "[(f32[2]=0 1, f32[2]=0 1), (f32[0]=, f32[0]=)]"},
        {"(f32[2], <: [[], [f32[], f32[]]]>)", "[(f32[0]=, []), (f32[2]=0 1, [f32[]=0, f32[]=0])]"},
        {"(f32[0,2], <: []>, 7)", "[]"},
    };
    const dp_split splits[] = {DP_SPLIT_BALANCED, DP_SPLIT_CHUNK, DP_SPLIT_WEIGHTS};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        for (int split = 0; split < 3; split++) {
            for (size_t devices = 2; devices <= 4; devices++) { /* more than there are groups */
                dp_scatter_config how = over(devices, splits[split], 0);
                dp_value out;
                how.cut.weights = split == 2 ? (double[]){0, 1, 7, 1} : NULL;
                how.cut.split_count = split == 2 ? devices : 0;
                CHECK_OK(dp_scatter(ctx, scope, tree_of(scope, table[i][0]), &how, &out));
                CHECK_TREE(ctx, out, table[i][1]);
            }
        }
    }
    dp_scatter_config columns = over(2, DP_SPLIT_BALANCED, -1);
    dp_value out, value = tree_of(scope, "(<stack: [f32[2,4], f32[1,4]]>, f32[1,3])");
    CHECK_OK(dp_scatter(ctx, scope, value, &columns, &out));
    CHECK_TREE(ctx, dp_at(dp_at(out, 0), 1), "f32[1,2]=0 1");
    CHECK_TREE(ctx, dp_at(dp_at(out, 1), 1), "f32[1,1]=2");
}

/* Both names and the numbers. */
TEST_BACKENDS(fields_that_do_not_follow_containers)
{
    static const scatter_case table[] = {
        {"{'x': <stack: [f32[3,1], f32[1,1]]>, 'y': i64[5]}", 2, BALANCED,
         "['y'] has 5 rows and ['x'] has 4 in its groups", DP_ERR_MISMATCH},
        {"{'y': i64[3], 'x': <stack: [f32[3,1], f32[1,1]]>}", 3, CHUNK,
         "['y'] has 3 rows and ['x'] has 4 in its groups", DP_ERR_MISMATCH},
        {"{'x': <stack: [f32[3,1], f32[1,1]]>, 'y': <: [[f32[1], f32[1]], [f32[1], f32[1]]]>}", 2,
         BALANCED, "['y'] has 2 samples in group 0 and ['x'] has 3:", DP_ERR_MISMATCH},
        {"[<cpu: [[1, 2], [3]]>, 5, <cpu: [[1, 2], [3, 4]]>]", 2, CHUNK,
         "[2] has 2 samples in group 1 and [0] has 1:", DP_ERR_MISMATCH},
        {"[<cpu: [[1, 2], [3, 4]]>, <cpu: [[1, 2], [3]]>]", 2, CHUNK,
         "[1] has 1 sample in group 1 and [0] has 2:", DP_ERR_MISMATCH},
        {"{'x': <cpu: [[1], [2]]>, 'y': <cpu: [[1], [2], [3]]>}", 3, BALANCED,
         "['y'] has 3 groups and ['x'] has 2:", DP_ERR_MISMATCH},
        {"{'x': <cpu: ['a', 'b']>, 'y': <cpu: [[1]]>}", 3, BALANCED,
         "['y'] has 1 group and ['x'] has 2:", DP_ERR_MISMATCH},
        {"(<stack: [f32[1], f32[1]]>, f32[])", 2, BALANCED, "[1] has 0 dims", DP_ERR_INVALID},
        {"(<: []>, f32[1])", 1, BALANCED, "[1] has 1 row and [0] has 0 in its groups",
         DP_ERR_MISMATCH},
        {"(<: []>, f32[1])", 2, CHUNK, "[1] has 1 row and [0] has 0 in its groups",
         DP_ERR_MISMATCH},
    };
    CHECK_SCATTER(table);
}

TEST_BACKENDS(sizes_are_those_of_the_groups)
{
    static const struct {
        size_t devices;
        int64_t sizes[4];
        const char *want; /* NULL: it fits */
    } table[] = {
        {2, {3, 1}, NULL},
        {3, {3, 1, 0}, NULL},
        {2, {2, 2}, "['x'] has 3 samples in group 0, and sizes[0] is 2"},
        {2, {3, 0}, "['x'] has 1 sample in group 1, and sizes[1] is 0"},
        {3, {3, 1, 1}, "['x'] has 0 samples in group 2, and sizes[2] is 1"},
        {1, {9}, "has 2 groups for 1 device"},
    };
    dp_value value = tree_of(scope, "{'y': i64[4], 'x': <: [[f32[], f32[], f32[]], [f32[]]]>}");
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        dp_scatter_config how = over(table[i].devices, DP_SPLIT_SIZES, 0);
        dp_value out;
        how.cut.sizes = table[i].sizes;
        how.cut.split_count = table[i].devices;
        if (table[i].want != NULL) {
            CHECK_ERROR(dp_scatter(ctx, scope, value, &how, &out), DP_ERR_MISMATCH, table[i].want);
            continue;
        }
        CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
        CHECK_INT(out.count, 2);
        CHECK_TREE(ctx, dp_get(dp_at(out, 0), "y"), "i64[3]=0 1 2");
    }
}

TEST_BACKENDS(a_tensor_that_was_never_collated_goes_to_the_first_device)
{
    dp_value value = tree_of(scope, "(<: f32[2]>, <cpu: f32[2]>)"), out;
    for (size_t devices = 1; devices <= 3; devices++) {
        const dp_scatter_config how = {.local_ranks = first_ranks + 2, .local_rank_count = devices};
        CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
        CHECK_INT(out.count, 1);
        CHECK(tree_same_device(dp_at(dp_at(out, 0), 0).as.t->device, dp_local_device(ctx, 2)));
        CHECK_INT(dp_at(dp_at(out, 0), 1).as.t->device.backend, 0); /* where it was */
    }
    dp_tensor lost = tree_lost(scope);
    const dp_container container = {.data = dp_of(scope, &lost)};
    CHECK_ERROR(dp_scatter(ctx, scope, dp_contain(scope, &container), NULL, &out), DP_ERR_INVALID,
                "is on no device");
}

/* What is cpu_only stays where it is, the rest goes to the device of its part. */
TEST_BACKENDS(groups_go_to_their_device)
{
    dp_value value = tree_of(scope, "(<: [[f32[2]], [f32[2]]]>, <cpu: [[f32[2]], [f32[2]]]>)"), out;
    dp_scatter_config how = over(2, DP_SPLIT_BALANCED, 0);
    dp_value groups = dp_at(value, 0).as.c->data, kept = dp_at(value, 1).as.c->data;
    CHECK_OK(dp_scatter(ctx, scope, value, &how, &out));
    for (size_t i = 0; i < 2; i++) {
        const dp_tensor *moved = dp_at(dp_at(dp_at(out, i), 0), 0).as.t;
        const dp_tensor *same = dp_at(dp_at(dp_at(out, i), 1), 0).as.t;
        CHECK(tree_same_device(moved->device, dp_local_device(ctx, (int)i)));
        CHECK_INT(moved->data == dp_at(dp_at(groups, i), 0).as.t->data, tree_host_memory(ctx));
        CHECK(same->data == dp_at(dp_at(kept, i), 0).as.t->data);
        CHECK(tree_same_device(same->device, dp_at(dp_at(kept, i), 0).as.t->device));
    }
}

/* ---- arguments ------------------------------------------------------------------------------- */

typedef struct kwargs_case {
    const char *args, *kwargs;
    size_t devices;
    int split;
    const char *want_args, *want_kwargs; /* or a part of the sentence in want_args */
    dp_status status;
} kwargs_case;

static void check_kwargs(dp_ctx *ctx, dp_scope *scope, const kwargs_case *row)
{
    dp_scatter_config how = over(row->devices, (dp_split)row->split, 0);
    dp_value args = dp_none(), kwargs = dp_none();
    dp_status got = dp_scatter_kwargs(ctx, scope, tree_of(scope, row->args),
                                      tree_of(scope, row->kwargs), &how, &args, &kwargs);
    tree_check_row(ctx, row->args, got, args, row->status, row->want_args);
    if (row->status == DP_OK) {
        tree_check_row(ctx, row->kwargs, got, kwargs, DP_OK, row->want_kwargs);
    }
}

TEST_BACKENDS(kwargs_are_filled_up_as_in_torch)
{
    static const kwargs_case table[] = {
        {"(f32[4])", "{'b': f32[1]}", 2, CHUNK, "[(f32[2]=0 1), (f32[2]=2 3)]",
         "[{'b': f32[1]=0}, {}]", DP_OK},
        {"(f32[1])", "{'b': 3}", 2, CHUNK, "[(f32[1]=0), ()]", "[{'b': 3}, {'b': 3}]", DP_OK},
        {"(3)", "{'b': f32[1]}", 2, CHUNK, "[(3), (3)]", "[{'b': f32[1]=0}, {}]", DP_OK},
        {"()", "{}", 2, CHUNK, "[]", "[]", DP_OK},
        {"None", "None", 2, CHUNK, "[]", "[]", DP_OK},
        {"[]", "None", 2, BALANCED, "[]", "[]", DP_OK},
        {"None", "{'b': f32[3]}", 2, CHUNK, "[(), ()]", "[{'b': f32[2]=0 1}, {'b': f32[1]=2}]",
         DP_OK},
        {"(f32[3])", "None", 2, CHUNK, "[(f32[2]=0 1), (f32[1]=2)]", "[{}, {}]", DP_OK},
        {"[f32[2]]", "{}", 2, CHUNK, "[[f32[1]=0], [f32[1]=1]]", "[{}, {}]", DP_OK},
        {"(f32[3])", "{'b': f32[3]}", 2, BALANCED, "[(f32[2]=0 1), (f32[1]=2)]",
         "[{'b': f32[2]=0 1}, {'b': f32[1]=2}]", DP_OK},
        {"(7)", "{'b': 3}", 2, BALANCED, "[(7), (7)]", "[{'b': 3}, {'b': 3}]", DP_OK},
        /* containers decide for both */
        {"(f32[3])", "{'b': <stack: [f32[1], f32[2]]>}", 3, CHUNK, "[(f32[1]=0), (f32[2]=1 2)]",
         "[{'b': f32[1]=0}, {'b': f32[2]=0 1}]", DP_OK},
        {"(<: [[f32[]]]>)", "{'b': 3}", 2, CHUNK, "[([f32[]=0])]", "[{'b': 3}]", DP_OK},
        {"(<cpu: ['a']>)", "{'b': f32[1]}", 2, CHUNK, "[('a')]", "[{'b': f32[1]=0}]", DP_OK},
        {"(f32[2])", "{'b': f32[5], 'c': f32[]}", 1, BALANCED, "[(f32[2]=0 1)]",
         "[{'b': f32[5]=0 1 2 3 4, 'c': f32[]=0}]", DP_OK},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_kwargs(ctx, scope, &table[i]);
    }
}

TEST_BACKENDS(wrong_kwargs)
{
    static const kwargs_case table[] = {
        {"(f32[4])", "{'b': f32[1]}", 2, BALANCED, "[0]", NULL, DP_ERR_MISMATCH},
        {"(f32[4])", "{'b': f32[1]}", 2, BALANCED, "['b']", NULL, DP_ERR_MISMATCH},
        {"(f32[4], f32[1])", "{}", 2, CHUNK, "[0]", NULL, DP_ERR_MISMATCH},
        {"(<: [[f32[]]]>)", "{'b': f32[2]}", 2, CHUNK,
         "['b'] has 2 rows and [0] has 1 in its groups", NULL, DP_ERR_MISMATCH},
        {"(f32[2])", "{'b': <: [[f32[]], [f32[], f32[]]]>}", 2, CHUNK,
         "[0] has 2 rows and ['b'] has 3 in its groups", NULL, DP_ERR_MISMATCH},
        {"(<cpu: ['a', 'b']>)", "{'b': <cpu: ['c']>}", 2, CHUNK, "['b'] has 1 group and [0] has 2",
         NULL, DP_ERR_MISMATCH},
        {"f32[4]", "{}", 2, CHUNK, "args", NULL, DP_ERR_INVALID},
        {"{'a': f32[4]}", "{}", 2, CHUNK, "args", NULL, DP_ERR_INVALID},
        {"()", "(f32[4])", 2, CHUNK, "kwargs", NULL, DP_ERR_INVALID},
        {"()", "7", 2, CHUNK, "kwargs", NULL, DP_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        check_kwargs(ctx, scope, &table[i]);
    }
}

TEST_BACKENDS(wrong_arguments_of_kwargs)
{
    dp_value args = tree_of(scope, "(f32[4])"), out, more;
    CHECK_STATUS(dp_scatter_kwargs(NULL, scope, args, dp_none(), NULL, &out, &more),
                 DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_kwargs(ctx, NULL, args, dp_none(), NULL, &out, &more), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_kwargs(ctx, scope, args, dp_none(), NULL, NULL, &more), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_kwargs(ctx, scope, args, dp_none(), NULL, &out, NULL), DP_ERR_INVALID);
}

static dp_status scatter(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    return dp_scatter(ctx, scope, in, NULL, out);
}

TEST(scatter_out_of_memory)
{
    tree_out_of_memory(scatter, 30, "[{'a': f32[3]}, <stack: [f32[2]=7 6, f32[1]=8]>]",
                       "[[{'a': f32[2]=0 1}, f32[2]=7 6], [{'a': f32[1]=2}, f32[1]=8]]");
}

/* ---- into tensors of the caller's ------------------------------------------------------------ */

TEST_BACKENDS(scatter_into)
{
    static const int64_t shapes[3][2] = {{2, 2}, {0, 2}, {3, 2}};
    static const char *const want[] = {"f32[2,2]=0 1 2 3", "f32[0,2]=", "f32[3,2]=4 5 6 7 8 9"};
    dp_tensor source = tree_tensor(scope, DP_F32, DP_SHAPE(5, 2), 0), outs[3];
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, 2, shapes[i], &outs[i]));
    }
    CHECK_OK(dp_scatter_into(ctx, &source, 0, outs, 3));
    for (int i = 0; i < 3; i++) {
        CHECK_TREE(ctx, dp_of(scope, &outs[i]), want[i]);
    }
    CHECK_OK(dp_scatter_into(ctx, &source, -2, outs, 3));
}

/* Columns of one tensor into columns of another: nothing is contiguous. */
TEST_BACKENDS(scatter_into_views)
{
    dp_tensor source = tree_tensor(scope, DP_I32, DP_SHAPE(2, 3), 0), whole, outs[2];
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_I32, DP_SHAPE(2, 4), &whole));
    CHECK_OK(dp_fill(ctx, &whole, dp_int(-1)));
    CHECK_OK(dp_narrow(&whole, 1, 0, 1, &outs[0]));
    CHECK_OK(dp_narrow(&whole, 1, 2, 2, &outs[1]));
    CHECK_OK(dp_scatter_into(ctx, &source, 1, outs, 2));
    CHECK_TREE(ctx, dp_of(scope, &whole), "i32[2,4]=0 -1 1 2 3 -1 4 5");
}

TEST_BACKENDS(wrong_scatter_into)
{
    dp_tensor source = tree_tensor(scope, DP_F32, DP_SHAPE(4, 2), 0), outs[2], bad;
    const float data[4] = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, DP_SHAPE(2, 2), &outs[i]));
    }
    CHECK_STATUS(dp_scatter_into(ctx, &source, 0, outs, 1), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(ctx, &source, 1, outs, 2), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(ctx, &source, 2, outs, 2), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(ctx, &source, 0, NULL, 2), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(ctx, &source, 0, outs, 0), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(ctx, NULL, 0, outs, 2), DP_ERR_INVALID);
    CHECK_STATUS(dp_scatter_into(NULL, &source, 0, outs, 2), DP_ERR_INVALID);
    bad = outs[1];
    CHECK_OK(dp_tensor_new(scope, bad.device, DP_F64, DP_SHAPE(2, 2), &outs[1]));
    CHECK_ERROR(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID, "out 1");
    CHECK_OK(dp_tensor_new(scope, bad.device, DP_F32, DP_SHAPE(2, 3), &outs[1]));
    CHECK_ERROR(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID, "out 1");
    CHECK_OK(dp_tensor_new(scope, bad.device, DP_F32, DP_SHAPE(4), &outs[1]));
    CHECK_ERROR(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID, "out 1");
    outs[1] = dp_wrap_const(data, DP_F32, DP_SHAPE(2, 2));
    CHECK_STATUS(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID);
    outs[1] = outs[0];
    CHECK_ERROR(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID, "overlap");
    outs[1] = source;
    outs[1].shape[0] = 2;
    CHECK_ERROR(dp_scatter_into(ctx, &source, 0, outs, 2), DP_ERR_INVALID, "overlap");
    outs[1] = bad;
    CHECK_OK(dp_scatter_into(ctx, &source, 0, outs, 2));
}

/* ---- parts of one size ----------------------------------------------------------------------- */

enum { EQUAL = DP_SPLIT_EQUAL, PADDED = DP_SPLIT_PADDED };

/* Every small case: real rows are those of BALANCED, whenever there is room for them. */
TEST(rows_of_parts_of_one_size)
{
    for (int64_t rows = 0; rows <= 24; rows++)
        for (size_t parts = 1; parts <= 5; parts++)
            for (int64_t size = 0; size <= 9; size++) {
                const dp_cut equal = {.split = DP_SPLIT_EQUAL, .part_rows = size},
                             padded = {.split = DP_SPLIT_PADDED, .part_rows = size};
                int64_t want[5], got[5], count = (int64_t)parts, most = (rows + count - 1) / count;
                size_t made = 0;
                bool even = rows % count == 0 && (size == 0 || rows / count == size);
                CHECK_OK(dp_split_rows(rows, parts, NULL, want, &made));
                dp_status status = dp_split_rows(rows, parts, &equal, got, &made);
                CHECK_INT(status, even ? DP_OK : DP_ERR_INVALID);
                for (size_t i = 0; even && i < parts; i++)
                    CHECK_INT(got[i], rows / count);
                made = 0;
                status = dp_split_rows(rows, parts, &padded, got, &made);
                bool fits = size == 0 || most <= size;
                CHECK_INT(status, fits ? DP_OK : DP_ERR_INVALID);
                CHECK_INT(made, fits ? parts : 0);
                if (fits)
                    CHECK_BYTES(got, want, parts * sizeof *got);
            }
}

TEST(sentences_of_parts_that_cannot_be)
{
    int64_t rows[4];
    size_t made;
    CHECK_ERROR(dp_split_rows(10, 4, &(dp_cut){.split = DP_SPLIT_EQUAL}, rows, &made),
                DP_ERR_INVALID, "dp_split_rows: 10 rows cannot be cut into 4 equal parts");
    CHECK_ERROR(
        dp_split_rows(8, 4, &(dp_cut){.split = DP_SPLIT_EQUAL, .part_rows = 3}, rows, &made),
        DP_ERR_INVALID, "8 rows cannot be cut into 4 parts of 3");
    CHECK_ERROR(
        dp_split_rows(1, 1, &(dp_cut){.split = DP_SPLIT_EQUAL, .part_rows = 3}, rows, &made),
        DP_ERR_INVALID, "1 row cannot be cut into 1 part of 3");
    CHECK_ERROR(
        dp_split_rows(9, 4, &(dp_cut){.split = DP_SPLIT_PADDED, .part_rows = 2}, rows, &made),
        DP_ERR_INVALID, "9 rows do not fit into 4 parts of 2");
    CHECK_ERROR(
        dp_split_rows(9, 4, &(dp_cut){.split = DP_SPLIT_PADDED, .part_rows = -2}, rows, &made),
        DP_ERR_INVALID, "part_rows is -2");
    CHECK_ERROR(dp_split_rows(9, 4, &(dp_cut){.part_rows = 2}, rows, &made), DP_ERR_INVALID,
                "part_rows is 2, and split is not DP_SPLIT_EQUAL or DP_SPLIT_PADDED");
    CHECK_ERROR(dp_split_rows(9, 4, &(dp_cut){.split = (dp_split)(PADDED + 1)}, rows, &made),
                DP_ERR_INVALID, "is not a split");
    CHECK_OK(dp_split_rows(INT64_MAX, 2, &(dp_cut){.split = DP_SPLIT_PADDED}, rows, &made));
    CHECK_INT(rows[0] - rows[1], 1);
}

typedef struct one_size {
    const char *in;
    size_t devices;
    int split, dim;
    int64_t part_rows;
    const char *want; /* the list, or a part of the sentence */
    dp_status status;
} one_size;

TEST_BACKENDS(each_kind_in_parts_of_one_size)
{
    static const one_size table[] = {
        {"f32[4]", 2, EQUAL, 0, 0, "[f32[2]=0 1, f32[2]=2 3]", DP_OK},
        {"f32[4]", 2, EQUAL, 0, 2, "[f32[2]=0 1, f32[2]=2 3]", DP_OK},
        {"f32[5]", 1, EQUAL, 0, 0, "[f32[5]=0 1 2 3 4]", DP_OK},
        {"f32[0]", 3, EQUAL, 0, 0, "[f32[0]=, f32[0]=, f32[0]=]", DP_OK},
        {"f32[5]", 2, EQUAL, 0, 0, "5 rows cannot be cut into 2 equal parts", DP_ERR_INVALID},
        {"f32[4]", 2, EQUAL, 0, 3, "4 rows cannot be cut into 2 parts of 3", DP_ERR_INVALID},
        {"f32[5]", 1, EQUAL, 0, 4, "5 rows cannot be cut into 1 part of 4", DP_ERR_INVALID},
        {"f32[0]", 2, EQUAL, 0, 1, "0 rows cannot be cut into 2 parts of 1", DP_ERR_INVALID},
        {"f32[4]", 2, PADDED, 0, 0, "[f32[2]=0 1, f32[2]=2 3]", DP_OK},
        {"f32[5]", 2, PADDED, 0, 0, "[f32[3]=0 1 2, f32[3]=3 4 4]", DP_OK},
        {"f32[5]", 3, PADDED, 0, 0, "[f32[2]=0 1, f32[2]=2 3, f32[2]=4 4]", DP_OK},
        {"f32[1]", 3, PADDED, 0, 2, "[f32[2]=0 0, f32[2]=0 0, f32[2]=0 0]", DP_OK},
        {"f32[2]=7 8", 3, PADDED, 0, 2, "[f32[2]=7 7, f32[2]=8 8, f32[2]=8 8]", DP_OK},
        {"f32[0]", 2, PADDED, 0, 2, "[f32[2]=0 0, f32[2]=0 0]", DP_OK},
        {"f32[0]", 2, PADDED, 0, 0, "[f32[0]=, f32[0]=]", DP_OK},
        {"f32[0,2]", 1, PADDED, 0, 1, "[f32[1,2]=0 0]", DP_OK},
        {"f32[3]", 1, PADDED, 0, 0, "[f32[3]=0 1 2]", DP_OK},
        {"f32[3]", 1, PADDED, 0, 5, "[f32[5]=0 1 2 2 2]", DP_OK},
        {"i64[3,2]", 2, PADDED, 0, 3, "[i64[3,2]=0 1 2 3 2 3, i64[3,2]=4 5 4 5 4 5]", DP_OK},
        {"bool[3]=1 0 1", 2, PADDED, 0, 2, "[bool[2]=1 0, bool[2]=1 1]", DP_OK},
        {"f32[2,3]", 2, PADDED, 1, 0, "[f32[2,2]=0 1 3 4, f32[2,2]=2 2 5 5]", DP_OK},
        {"f32[2,3]", 2, PADDED, -1, 3, "[f32[2,3]=0 1 1 3 4 4, f32[2,3]=2 2 2 5 5 5]", DP_OK},
        {"f32[3,0]", 2, PADDED, 0, 2, "[f32[2,0]=, f32[2,0]=]", DP_OK},
        {"f32[7]", 2, PADDED, 0, 3, "7 rows do not fit into 2 parts of 3", DP_ERR_INVALID},
        {"{'x': f32[3], 'y': i64[3], 'n': 5, 's': 'a'}", 2, PADDED, 0, 0,
         "[{'x': f32[2]=0 1, 'y': i64[2]=0 1, 'n': 5, 's': 'a'}, "
         "{'x': f32[2]=2 2, 'y': i64[2]=2 2, 'n': 5, 's': 'a'}]",
         DP_OK},
        {"{'x': f32[3], 'y': i64[4]}", 2, PADDED, 0, 0, "['y'] has 4 rows and ['x'] has 3",
         DP_ERR_MISMATCH},
        {"{'x': f32[3], 'y': i64[4]}", 1, PADDED, 0, 4, "['y'] has 4 rows and ['x'] has 3",
         DP_ERR_MISMATCH},
        {"f32[]", 1, PADDED, 0, 4, "has 0 dims and cannot be cut", DP_ERR_INVALID},
        {"f32[2]", 1, PADDED, 0, INT64_MAX,
         "a part: the shape has more elements than can be counted", DP_ERR_INVALID}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const one_size *row = &table[i];
        const dp_scatter_config how = {
            .local_ranks = first_ranks,
            .local_rank_count = row->devices,
            .cut = {.split = (dp_split)row->split, .dim = row->dim, .part_rows = row->part_rows}};
        dp_value out = dp_none();
        dp_status got = dp_scatter(ctx, scope, tree_of(scope, row->in), &how, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

/* Groups are the parts, and have samples enough. */
TEST_BACKENDS(groups_in_parts_of_one_size)
{
    static const one_size table[] = {
        {"<stack: [f32[2], f32[1]=7]>", 2, PADDED, 0, 0, "[f32[2]=0 1, f32[2]=7 7]", DP_OK},
        {"<stack: [f32[2], f32[1]=7]>", 2, PADDED, 0, 3, "[f32[3]=0 1 1, f32[3]=7 7 7]", DP_OK},
        {"<stack: [f32[2], f32[0]]>", 2, PADDED, 0, 0, "[f32[2]=0 1, f32[2]=0 0]", DP_OK},
        {"<stack: [f32[2]]>", 1, PADDED, 0, 3, "[f32[3]=0 1 1]", DP_OK},
        {"<stack: [f32[2]]>", 1, PADDED, 0, 0, "[f32[2]=0 1]", DP_OK},
        {"<stack: [f32[1]]>", 3, PADDED, 0, 2, "[f32[2]=0 0]", DP_OK},
        {"<: [[f32[1], f32[2]], [f32[3]]]>", 2, PADDED, 0, 0,
         "[[f32[1]=0, f32[2]=0 1], [f32[3]=0 1 2, f32[3]=0 1 2]]", DP_OK},
        {"<: [[f32[1]], []]>", 2, PADDED, 0, 2, "[[f32[1]=0, f32[1]=0], []]", DP_OK},
        {"<cpu: [[1, 2], [3]]>", 2, PADDED, 0, 3, "[[1, 2], [3]]", DP_OK},
        {"{'x': <stack: [f32[2], f32[1]]>, 'y': i64[3], 'm': <cpu: [['a', 'b'], ['c']]>}", 2,
         PADDED, 0, 0,
         "[{'x': f32[2]=0 1, 'y': i64[2]=0 1, 'm': ['a', 'b']}, {'x': f32[2]=0 0, 'y': i64[2]=2 2, "
         "'m': ['c']}]",
         DP_OK},
        {"<stack: [f32[2], f32[2]]>", 2, EQUAL, 0, 2, "[f32[2]=0 1, f32[2]=0 1]", DP_OK},
        {"<stack: [f32[2]]>", 2, EQUAL, 0, 0, "[f32[2]=0 1]", DP_OK},
        {"{'x': <stack: [f32[2], f32[1]]>}", 2, EQUAL, 0, 0,
         "['x'] has 1 sample in group 1: each part is to have 2", DP_ERR_MISMATCH},
        {"{'x': <stack: [f32[1]]>}", 1, EQUAL, 0, 2,
         "['x'] has 1 sample in group 0: each part is to have 2", DP_ERR_MISMATCH},
        {"{'x': <stack: [f32[2], f32[3]]>}", 2, PADDED, 0, 2,
         "['x'] has 3 samples in group 1: part_rows is 2", DP_ERR_MISMATCH},
        {"{'x': <stack: [f32[2]]>, 'y': <stack: [f32[1]]>}", 1, PADDED, 0, 2,
         "['y'] has 1 sample in group 0 and ['x'] has 2", DP_ERR_MISMATCH}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const one_size *row = &table[i];
        const dp_scatter_config how = {
            .local_ranks = first_ranks,
            .local_rank_count = row->devices,
            .cut = {.split = (dp_split)row->split, .part_rows = row->part_rows}};
        dp_value out = dp_none();
        dp_status got = dp_scatter(ctx, scope, tree_of(scope, row->in), &how, &out);
        tree_check_row(ctx, row->in, got, out, row->status, row->want);
    }
}

/* Parts that are full stay where they are, and channels-last ones stay so. */
TEST(parts_that_are_full_are_views)
{
    static float numbers[5 * 2 * 2 * 2];
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value list;
    dp_tensor images = dp_wrap(numbers, DP_F32, DP_SHAPE(5, 2, 2, 2));
    images.stride[1] = 1;
    images.stride[2] = 4;
    images.stride[3] = 2;
    const dp_scatter_config how = {.cut.split = DP_SPLIT_PADDED};
    CHECK_OK(dp_scatter(ctx, scope, dp_of(scope, &images), &how, &list));
    CHECK(dp_at(list, 0).as.t->data == numbers);
    CHECK((const float *)dp_at(list, 1).as.t->data != numbers + 24);
    CHECK_INT(dp_at(list, 1).as.t->stride[1], 1);
    CHECK_INT(dp_at(list, 1).as.t->shape[0], 3);
    dp_close(ctx);
}
