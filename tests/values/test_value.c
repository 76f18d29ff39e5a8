/* test_value.c - values: constructors, their copies and errors, access, dp_keep. */

#include <limits.h>
#include "tree.h"

/* `value` is an error with this status and a sentence that holds `part`. */
static void check_error_value(dp_value value, dp_status status, const char *part)
{
    CHECK_INT(value.kind, DP_ERROR);
    CHECK_INT(value.status, status);
    CHECK(value.as.s != NULL);
    if (strstr(value.as.s, part) == NULL) {
        test_fail(__FILE__, __LINE__, "\"%s\" does not hold \"%s\"", value.as.s, part);
    }
}

/* ---- leaves ---------------------------------------------------------------------------------- */

TEST(values_are_16_bytes)
{
    CHECK_INT(sizeof(dp_value), 16);
}

TEST(leaves_hold_what_they_are_given)
{
    int pointee;
    CHECK_INT(dp_none().kind, DP_NONE);
    CHECK_INT(dp_bool(true).kind, DP_BOOLEAN);
    CHECK(dp_bool(true).as.b && !dp_bool(false).as.b);
    CHECK_INT(dp_int(INT64_MIN).kind, DP_INT);
    CHECK_INT(dp_int(INT64_MIN).as.i, INT64_MIN);
    CHECK_INT(dp_int(INT64_MAX).as.i, INT64_MAX);
    CHECK_INT(dp_float(-0.5).kind, DP_FLOAT);
    CHECK_F64(dp_float(-0.5).as.f, -0.5, 0);
    CHECK_F64(dp_float((double)NAN).as.f, (double)NAN, 0);
    CHECK_INT(dp_opaque(&pointee).kind, DP_OPAQUE);
    CHECK(dp_opaque(&pointee).as.p == &pointee);
    CHECK(dp_opaque(NULL).as.p == NULL);
    CHECK_INT(dp_int(7).depth, 0);
    CHECK_INT(dp_int(7).count, 0);
    CHECK_INT(dp_int(7).status, 0);
}

/* A zeroed value is none, so that `dp_value out = {0}` needs no care. */
TEST(zero_is_none)
{
    dp_value value;
    memset(&value, 0, sizeof(value));
    CHECK_INT(value.kind, DP_NONE);
}

TEST_BACKENDS(strings_are_copied)
{
    char text[] = "caf\xc3\xa9";
    dp_value value = dp_string(scope, text), empty = dp_string(scope, "");
    memset(text, 'x', sizeof(text) - 1);
    CHECK_INT(value.kind, DP_STRING);
    CHECK_INT(value.depth, 0);
    CHECK_STR(value.as.s, "caf\xc3\xa9");
    CHECK_STR(empty.as.s, "");
    check_error_value(dp_string(scope, NULL), DP_ERR_INVALID, "");
}

TEST(texts_are_utf8_or_not)
{
    CHECK(dp_is_utf8("") && dp_is_utf8("plain") &&
          dp_is_utf8("\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"));
    CHECK(!dp_is_utf8("a\x80") && !dp_is_utf8("\xc3") && !dp_is_utf8("\xed\xa0\x80") &&
          !dp_is_utf8("\xc0\xaf") && !dp_is_utf8(NULL));
}

TEST_BACKENDS(tensor_values_copy_the_view_not_the_data)
{
    float data[6] = {0, 1, 2, 3, 4, 5};
    dp_tensor tensor = dp_wrap(data, DP_F32, DP_SHAPE(2, 3));
    dp_value value = dp_of(scope, &tensor);
    memset(&tensor, 0xff, sizeof(tensor));
    CHECK_INT(value.kind, DP_TENSOR);
    CHECK_INT(value.depth, 0);
    CHECK(value.as.t->data == data);
    data[5] = 50;
    CHECK_TREE(ctx, value, "f32[2,3]=0 1 2 3 4 50");
}

TEST_BACKENDS(malformed_tensors_are_error_values)
{
    float data[6] = {0};
    const dp_tensor good = dp_wrap(data, DP_F32, DP_SHAPE(2, 3));
    dp_tensor bad = good;
    check_error_value(dp_of(scope, NULL), DP_ERR_INVALID, "");
    bad.dtype = DP_DTYPE_COUNT;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
    bad = good;
    bad.ndim = DP_MAX_DIMS + 1;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
    bad = good;
    bad.shape[1] = -1;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
    bad = good;
    bad.stride[0] = -3;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
    bad = good;
    bad.data = NULL;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
    bad.shape[0] = 0; /* no elements need no memory */
    CHECK_INT(dp_of(scope, &bad).kind, DP_TENSOR);
    bad = good;
    bad.shape[0] = bad.shape[1] = INT64_MAX;
    check_error_value(dp_of(scope, &bad), DP_ERR_INVALID, "");
}

/* What dp_wrap cannot take shows here, as it has no status to return. */
TEST_BACKENDS(wrong_wraps_show_when_they_are_used)
{
    float data[6] = {0};
    const int64_t many[DP_MAX_DIMS + 1] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    dp_tensor tensor = dp_wrap(data, DP_F32, DP_MAX_DIMS + 1, many);
    CHECK_INT(dp_tensor_count(&tensor), -1);
    check_error_value(dp_of(scope, &tensor), DP_ERR_INVALID, "");
    tensor = dp_wrap(data, DP_F32, -1, many);
    check_error_value(dp_of(scope, &tensor), DP_ERR_INVALID, "");
    tensor = dp_wrap(data, DP_F32, 1, NULL);
    check_error_value(dp_of(scope, &tensor), DP_ERR_INVALID, "");
    tensor = dp_wrap(data, DP_F32, 0, NULL);
    CHECK_INT(dp_of(scope, &tensor).kind, DP_TENSOR);
}

/* ---- lists and dicts ------------------------------------------------------------------------- */

TEST_BACKENDS(lists_copy_their_items)
{
    dp_value items[3] = {dp_int(1), dp_float(2.5), dp_bool(true)};
    dp_value list = dp_list_make(scope, DP_LIST, items, 3);
    dp_value tuple = dp_list_make(scope, DP_TUPLE, items, 2);
    items[0] = dp_none();
    CHECK_TREE(ctx, list, "[1, 2.5, True]");
    CHECK_TREE(ctx, tuple, "(1, 2.5)");
    CHECK_INT(list.count, 3);
    CHECK_INT(list.depth, 1);
    CHECK_TREE(ctx, DP_LIST_OF(scope, dp_int(1), list, tuple), "[1, [1, 2.5, True], (1, 2.5)]");
    CHECK_INT(DP_LIST_OF(scope, dp_int(1), list, tuple).depth, 2);
}

TEST_BACKENDS(dicts_copy_keys_and_keep_their_order)
{
    char key[] = "zeta";
    dp_pair pairs[] = {{key, dp_int(1)}, {"alpha", dp_int(2)}, {"", dp_int(3)}};
    dp_value dict = dp_dict_make(scope, pairs, 3);
    memset(key, 'x', 4);
    pairs[1] = (dp_pair){NULL, dp_none()};
    CHECK_TREE(ctx, dict, "{'zeta': 1, 'alpha': 2, '': 3}");
    CHECK_INT(dict.count, 3);
    CHECK_INT(dict.depth, 1);
    CHECK_TREE(ctx, DP_DICT(scope, {"b", dp_int(1)}, {"a", dict}),
               "{'b': 1, 'a': {'zeta': 1, 'alpha': 2, '': 3}}");
}

TEST_BACKENDS(empty_lists_and_dicts)
{
    CHECK_TREE(ctx, dp_list_make(scope, DP_LIST, NULL, 0), "[]");
    CHECK_TREE(ctx, dp_list_make(scope, DP_TUPLE, NULL, 0), "()");
    CHECK_TREE(ctx, dp_dict_make(scope, NULL, 0), "{}");
    CHECK_INT(dp_dict_make(scope, NULL, 0).count, 0);
}

TEST_BACKENDS(long_lists_and_dicts)
{
    enum { COUNT = 1000 };
    static dp_value items[COUNT];
    static dp_pair pairs[COUNT];
    static char keys[COUNT][8];
    for (int i = 0; i < COUNT; i++) {
        snprintf(keys[i], sizeof(keys[i]), "k%d", i);
        items[i] = dp_int(i);
        pairs[i] = (dp_pair){keys[i], items[i]};
    }
    dp_value list = dp_list_make(scope, DP_LIST, items, COUNT);
    dp_value dict = dp_dict_make(scope, pairs, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(dp_at(list, i).as.i, i);
        CHECK_INT(dp_get(dict, keys[i]).as.i, i);
    }
    memcpy(keys[COUNT - 1], keys[0], sizeof(keys[0]));
    check_error_value(dp_dict_make(scope, pairs, COUNT), DP_ERR_INVALID, "k0");
}

TEST_BACKENDS(wrong_lists_and_dicts)
{
    const dp_value items[] = {dp_int(1)};
    const dp_pair twice[] = {{"a", dp_int(1)}, {"b", dp_int(2)}, {"a", dp_int(3)}};
    const dp_pair null_key[] = {{"a", dp_int(1)}, {NULL, dp_int(2)}};
    check_error_value(dp_list_make(scope, DP_DICT, items, 1), DP_ERR_INVALID, "");
    check_error_value(dp_list_make(scope, DP_INT, items, 1), DP_ERR_INVALID, "");
    check_error_value(dp_list_make(scope, DP_LIST, NULL, 1), DP_ERR_INVALID, "");
    check_error_value(dp_dict_make(scope, NULL, 1), DP_ERR_INVALID, "");
    check_error_value(dp_dict_make(scope, twice, 3), DP_ERR_INVALID, "a");
    check_error_value(dp_dict_make(scope, null_key, 2), DP_ERR_INVALID, "");
    check_error_value(dp_list_make(scope, DP_LIST, items, (size_t)UINT32_MAX + 1), DP_ERR_INVALID,
                      "");
}

TEST(no_scope_is_an_error_value)
{
    float number = 1;
    dp_tensor tensor = dp_wrap(&number, DP_F32, 0, NULL);
    dp_container container = {.data = dp_int(1)};
    check_error_value(dp_string(NULL, "a"), DP_ERR_INVALID, "");
    check_error_value(dp_of(NULL, &tensor), DP_ERR_INVALID, "");
    check_error_value(dp_contain(NULL, &container), DP_ERR_INVALID, "");
    check_error_value(dp_list_make(NULL, DP_LIST, NULL, 0), DP_ERR_INVALID, "");
    check_error_value(dp_dict_make(NULL, NULL, 0), DP_ERR_INVALID, "");
}

/* ---- depth ----------------------------------------------------------------------------------- */

/* One more level around `value`: a list, tuple, dict or container, by turns. */
static dp_value wrap_once(dp_scope *scope, dp_value value, int turn)
{
    dp_container container = {.data = value};
    switch (turn % 4) {
    case 0:
        return dp_list_make(scope, DP_LIST, &value, 1);
    case 1:
        return dp_list_make(scope, DP_TUPLE, &value, 1);
    case 2:
        return DP_DICT(scope, {"k", value});
    default:
        return dp_contain(scope, &container);
    }
}

TEST_BACKENDS(depth_is_limited)
{
    dp_value value = dp_int(1);
    CHECK_INT(value.depth, 0);
    for (int level = 1; level <= DP_MAX_DEPTH; level++) {
        value = wrap_once(scope, value, level);
        CHECK(value.kind != DP_ERROR);
        CHECK_INT(value.depth, level);
    }
    for (int turn = 0; turn < 4; turn++) {
        check_error_value(wrap_once(scope, value, turn), DP_ERR_INVALID, "64");
    }
}

/* The deepest item counts, not the first or the last. */
TEST_BACKENDS(depth_is_that_of_the_deepest_item)
{
    CHECK_INT(tree_of(scope, "[1, [2, (3)], 4]").depth, 3);
    CHECK_INT(tree_of(scope, "{'a': 1, 'b': {'c': [2]}, 'd': 4}").depth, 3);
    CHECK_INT(tree_of(scope, "[]").depth, 1);
}

/* ---- errors inside --------------------------------------------------------------------------- */

TEST_BACKENDS(errors_go_up)
{
    const dp_pair twice[] = {{"twin", dp_int(1)}, {"twin", dp_int(2)}};
    dp_value error = dp_dict_make(scope, twice, 2);
    dp_container container = {.data = error};
    check_error_value(error, DP_ERR_INVALID, "twin");
    check_error_value(DP_LIST_OF(scope, dp_int(1), error), DP_ERR_INVALID, "twin");
    check_error_value(DP_DICT(scope, {"a", dp_int(1)}, {"b", error}), DP_ERR_INVALID, "twin");
    check_error_value(dp_contain(scope, &container), DP_ERR_INVALID, "twin");
    check_error_value(DP_LIST_OF(scope, DP_DICT(scope, {"b", error})), DP_ERR_INVALID, "twin");
}

TEST_BACKENDS(every_call_reports_an_error_value)
{
    const dp_pair twice[] = {{"twin", dp_int(1)}, {"twin", dp_int(2)}};
    dp_value error = dp_dict_make(scope, twice, 2), out, more;
    const dp_tensor *tensor;
    double number;
    CHECK_ERROR(dp_keep(scope, error, &out), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_as_tensor(error, "x", DP_F32, 1, &tensor), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_item(ctx, error, &number), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_collate(scope, &error, 1, 1, &out), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_scatter(ctx, scope, error, NULL, &out), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_scatter_kwargs(ctx, scope, error, dp_none(), NULL, &out, &more), DP_ERR_INVALID,
                "twin");
    CHECK_ERROR(dp_scatter_kwargs(ctx, scope, dp_none(), error, NULL, &out, &more), DP_ERR_INVALID,
                "twin");
    CHECK_ERROR(dp_gather(ctx, scope, error, NULL, &out), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_replicate(ctx, scope, error, NULL, &out), DP_ERR_INVALID, "twin");
    CHECK_ERROR(dp_reduce_add(ctx, scope, error, NULL, &out), DP_ERR_INVALID, "twin");
}

/* ---- containers ------------------------------------------------------------------------------ */

TEST_BACKENDS(containers_keep_their_fields)
{
    dp_container container = {.data = dp_string(scope, "x"),
                              .padding_value = 255,
                              .pad_dims = 3,
                              .stack = true,
                              .cpu_only = true};
    dp_value value = dp_contain(scope, &container);
    memset(&container, 0, sizeof(container));
    CHECK_INT(value.kind, DP_CONTAINER);
    CHECK_TREE(ctx, value, "<stack cpu pad=255 dims=3: 'x'>");
}

TEST_BACKENDS(pad_dims_of_containers)
{
    for (int dims = INT8_MIN; dims <= INT8_MAX; dims++) {
        dp_container container = {.data = dp_int(1), .pad_dims = (int8_t)dims};
        dp_value value = dp_contain(scope, &container);
        if (dims >= DP_PAD_NONE && dims <= 3) {
            CHECK_INT(value.kind, DP_CONTAINER);
        } else {
            check_error_value(value, DP_ERR_INVALID, "pad_dims");
        }
    }
    check_error_value(dp_contain(scope, NULL), DP_ERR_INVALID, "");
}

/* ---- access ---------------------------------------------------------------------------------- */

TEST_BACKENDS(get_and_at)
{
    dp_value dict = tree_of(scope, "{'a': 1, 'b': None, 'ab': [3]}");
    dp_value list = tree_of(scope, "[5, 6]"), tuple = tree_of(scope, "(7)");
    CHECK_TREE(ctx, dp_get(dict, "a"), "1");
    CHECK_TREE(ctx, dp_get(dict, "ab"), "[3]");
    CHECK_TREE(ctx, dp_get(dict, "b"), "None");
    CHECK_TREE(ctx, dp_get(dict, "c"), "None");
    CHECK_TREE(ctx, dp_get(dict, ""), "None");
    CHECK_TREE(ctx, dp_get(dict, NULL), "None");
    CHECK_TREE(ctx, dp_at(list, 0), "5");
    CHECK_TREE(ctx, dp_at(list, 1), "6");
    CHECK_TREE(ctx, dp_at(list, 2), "None");
    CHECK_TREE(ctx, dp_at(list, SIZE_MAX), "None");
    CHECK_TREE(ctx, dp_at(tuple, 0), "7");
}

/* get is for dicts, at for lists and tuples; other kinds hold nothing, but errors stay errors. */
TEST_BACKENDS(get_and_at_of_other_kinds)
{
    static const char *const others[] = {
        "None", "True", "12", "1.5", "'text'", "&", "f32[2]", "<: [1, 2]>",
    };
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        dp_value value = tree_of(scope, others[i]);
        CHECK_TREE(ctx, dp_get(value, "a"), "None");
        CHECK_TREE(ctx, dp_at(value, 0), "None");
    }
    CHECK_TREE(ctx, dp_at(tree_of(scope, "{'a': 1}"), 0), "1");
    CHECK_TREE(ctx, dp_get(tree_of(scope, "[1]"), "a"), "None");
    CHECK_TREE(ctx, dp_get(dp_string(NULL, "no scope"), "a"), "!DP_ERR_INVALID");
    CHECK_TREE(ctx, dp_at(dp_string(NULL, "no scope"), 0), "!DP_ERR_INVALID");
}

TEST_BACKENDS(as_tensor_checks_what_it_finds)
{
    dp_value value = tree_of(scope, "f32[2,3]");
    const dp_tensor *tensor = NULL;
    CHECK_OK(dp_as_tensor(value, "image", DP_F32, 2, &tensor));
    CHECK(tensor == value.as.t);
    CHECK_OK(dp_as_tensor(value, "image", DP_DTYPE_ANY, -1, &tensor));
    CHECK_ERROR(dp_as_tensor(value, "image", DP_F64, 2, &tensor), DP_ERR_INVALID, "image");
    CHECK_ERROR(dp_as_tensor(value, "image", DP_F64, 2, &tensor), DP_ERR_INVALID, "f32");
    CHECK_ERROR(dp_as_tensor(value, "image", DP_F64, 2, &tensor), DP_ERR_INVALID, "f64");
    CHECK_ERROR(dp_as_tensor(value, "image", DP_F32, 3, &tensor), DP_ERR_INVALID, "image");
    CHECK_ERROR(dp_as_tensor(value, "image", DP_F32, 0, &tensor), DP_ERR_INVALID, "image");
    CHECK_ERROR(dp_as_tensor(dp_int(1), "label", DP_F32, 0, &tensor), DP_ERR_INVALID, "label");
    CHECK_ERROR(dp_as_tensor(dp_none(), "label", DP_DTYPE_ANY, -1, &tensor), DP_ERR_INVALID,
                "label");
    CHECK_STATUS(dp_as_tensor(value, "image", DP_F32, 2, NULL), DP_ERR_INVALID);
}

/* ---- keep ------------------------------------------------------------------------------------ */

static const char everything[] =
    "{'t': f32[2,2]=1 2 3 4, 'l': [1, (2.5, True), None], 's': 'text', "
    "'c': <stack pad=7 dims=1: [i64[2]=5 6, 'in']>, 'o': &, 'e': [], 'z': u8[0,3]=, 'n': i8[]=-1}";

/* Everything in the value is changed and freed, as far as the host can reach it. */
static void destroy(dp_value value)
{
    if (value.kind == DP_TENSOR) {
        memset(value.as.t->data, 0x55,
               (size_t)dp_tensor_count(value.as.t) * dp_dtype_bytes((dp_dtype)value.as.t->dtype));
    } else if (value.kind == DP_CONTAINER) {
        destroy(value.as.c->data);
    }
    for (uint32_t i = 0; i < value.count; i++) {
        destroy(value.kind == DP_DICT ? dp_get(value, value.as.pairs[i].key) : dp_at(value, i));
    }
}

TEST_BACKENDS(keep_is_deep_and_independent)
{
    dp_scope *step = dp_scope_begin(ctx);
    dp_value value = tree_of(step, everything), kept;
    CHECK_TREE(ctx, value, everything);
    CHECK_OK(dp_keep(scope, value, &kept));
    destroy(value);
    CHECK_TREE(ctx, kept, everything);
    dp_scope_end(step);
    for (int i = 0; i < 3; i++) { /* a next step reuses the memory */
        step = dp_scope_begin(ctx);
        destroy(tree_of(step, everything));
        dp_scope_end(step);
    }
    CHECK_TREE(ctx, kept, everything);
    CHECK_INT(kept.depth, 3);
}

/* On a device, tensors stay there. */
TEST_BACKENDS(keep_leaves_tensors_on_their_device)
{
    dp_value kept;
    const dp_tensor *tensor;
    for (int rank = 0; rank < TREE_DEVICES; rank += TREE_DEVICES - 1) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_device device = dp_local_device(ctx, rank);
        dp_value value = tree_on(ctx, step, tree_of(step, "{'x': [f32[3]=1 2 3]}"), device);
        const dp_tensor *source = dp_at(dp_get(value, "x"), 0).as.t;
        CHECK_OK(dp_keep(scope, value, &kept));
        CHECK_OK(dp_fill(ctx, source, dp_int(0)));
        dp_scope_end(step);
        CHECK_TREE(ctx, kept, "{'x': [f32[3]=1 2 3]}");
        CHECK_OK(dp_as_tensor(dp_at(dp_get(kept, "x"), 0), "x", DP_F32, 1, &tensor));
        CHECK(tree_same_device(tensor->device, device));
    }
}

TEST_BACKENDS(keep_of_views)
{
    static const float data[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    dp_tensor base = dp_wrap_const(data, DP_F32, DP_SHAPE(3, 4)), columns, turned;
    dp_value kept;
    CHECK_OK(dp_narrow(&base, 1, 1, 2, &columns));
    CHECK_OK(dp_transpose(&columns, 0, 1, &turned));
    CHECK_OK(dp_keep(scope, dp_of(scope, &turned), &kept));
    CHECK_TREE(ctx, kept, "f32[2,3]=1 5 9 2 6 10");
    CHECK(kept.as.t->data != turned.data);
}

/* A kept tensor is the keeper's: what it was copied from being const does not matter. */
TEST_BACKENDS(kept_tensors_are_writable)
{
    static const float data[] = {1, 2};
    dp_tensor base = dp_wrap_const(data, DP_F32, DP_SHAPE(2));
    dp_value kept;
    CHECK(base.read_only);
    CHECK_OK(dp_keep(scope, dp_of(scope, &base), &kept));
    CHECK(!kept.as.t->read_only);
    CHECK_OK(dp_fill(ctx, kept.as.t, dp_int(3)));
    CHECK_TREE(ctx, kept, "f32[2]=3 3");
}

TEST_BACKENDS(keep_of_every_dtype)
{
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_tensor tensor = tree_tensor(step, (dp_dtype)dtype, DP_SHAPE(3, 5), 1);
        size_t bytes = 15 * dp_dtype_bytes((dp_dtype)dtype);
        dp_value kept;
        CHECK_OK(dp_keep(scope, dp_of(step, &tensor), &kept));
        CHECK_INT(kept.as.t->dtype, dtype);
        void *elements = tree_read(ctx, kept.as.t);
        CHECK_BYTES(elements, tensor.data, bytes);
        free(elements);
        dp_scope_end(step);
    }
}

TEST_BACKENDS(kept_tensors_stay_channels_last)
{
    dp_tensor nhwc = tree_tensor(scope, DP_F32, DP_SHAPE(1, 2, 2, 3), 0), nchw;
    dp_value kept;
    CHECK_OK(dp_transpose(&nhwc, 2, 3, &nchw));
    CHECK_OK(dp_transpose(&nchw, 1, 2, &nchw));
    CHECK_OK(dp_keep(scope, dp_of(scope, &nchw), &kept));
    CHECK_INT(kept.as.t->stride[1], 1);
    CHECK_TREE(ctx, kept, "f32[1,3,2,2]=0 3 6 9 1 4 7 10 2 5 8 11");
}

TEST_BACKENDS(wrong_keeps)
{
    dp_value out;
    dp_tensor lost = tree_lost(scope);
    CHECK_ERROR(dp_keep(scope, dp_of(scope, &lost), &out), DP_ERR_INVALID, "device");
    CHECK_STATUS(dp_keep(NULL, dp_int(1), &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_keep(scope, dp_int(1), NULL), DP_ERR_INVALID);
    CHECK_OK(dp_keep(scope, dp_int(INT_MAX), &out));
    CHECK_INT(out.as.i, INT_MAX);
}

static dp_status keep(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    (void)ctx;
    return dp_keep(scope, in, out);
}

TEST(keep_out_of_memory)
{
    static const char text[] = "[{'a': f32[2]=1 2, 'b': <cpu pad=0 dims=2: ['text']>}, i8[]=3]";
    tree_out_of_memory(keep, 30, text, text);
}

/* ---- made by hand ---------------------------------------------------------------------------- */

/* What is right is taken, however it was made. */
TEST_BACKENDS(values_made_by_hand)
{
    dp_tensor tensor = tree_tensor(scope, DP_F32, DP_SHAPE(8), 0);
    dp_value leaf = tree_by_hand(DP_TENSOR, &tensor, 0, 0), out;
    dp_value items[] = {leaf, dp_int(7)};
    dp_pair pairs[] = {{"x", tree_by_hand(DP_LIST, items, 2, 1)}, {"y", dp_none()}};
    dp_value dict = tree_by_hand(DP_DICT, pairs, 2, 2);
    CHECK_TREE(ctx, dict, "{'x': [f32[8]=0 1 2 3 4 5 6 7, 7], 'y': None}");
    CHECK_OK(dp_scatter(ctx, scope, dict, NULL, &out));
    CHECK_INT(out.count, TREE_DEVICES);
    CHECK_TREE(ctx, dp_at(out, 3), "{'x': [f32[1]=3, 7], 'y': None}");
    CHECK_OK(dp_keep(scope, dict, &out));
    CHECK_TREE(ctx, out, "{'x': [f32[8]=0 1 2 3 4 5 6 7, 7], 'y': None}");
    CHECK_INT(dp_get(dict, "x").kind, DP_LIST);
    CHECK_INT(dp_at(items[0], 0).kind, DP_NONE);
    CHECK_STR(dp_key_at(dict, 1), "y");
}

/* Each wrong value is found at the edge, at any depth, and its place is named. */
TEST_BACKENDS(wrong_values_made_by_hand)
{
    dp_tensor good = tree_tensor(scope, DP_F32, DP_SHAPE(4), 0), dims = good, dtype = good;
    dp_tensor empty = good;
    dims.ndim = 200;
    dtype.dtype = 99;
    empty.data = NULL;
    dp_container padding = {.pad_dims = 9};
    dp_container torn = {.data = dp_int(1)};
    *(unsigned char *)&torn.stack = 77;
    dp_value yes = dp_bool(true), items[1] = {dp_int(1)}, itself[1];
    *(unsigned char *)&yes.as = 77;
    dp_pair no_key = {NULL, dp_int(1)};
    const dp_pair twice[] = {{"k", dp_int(1)}, {"k", dp_int(2)}};
    itself[0] = tree_by_hand(DP_LIST, itself, 1, 1);
    const struct {
        dp_value value;
        const char *want;
    } table[] = {
        {tree_by_hand(DP_TENSOR, &dims, 0, 0), "value['a'][0] is not a tensor (dtype 0, 200 dims)"},
        {tree_by_hand(DP_TENSOR, &dtype, 0, 0), "value['a'][0] is not a tensor (dtype 99, 1 dim)"},
        {tree_by_hand(DP_TENSOR, &empty, 0, 0), "value['a'][0] has 4 elements and no data"},
        {tree_by_hand(DP_TENSOR, NULL, 0, 0), "value['a'][0] is not a value (kind 6, depth 0)"},
        {tree_by_hand(DP_STRING, NULL, 0, 0), "value['a'][0] is not a value"},
        {tree_by_hand(DP_OPAQUE + 1, &good, 0, 0), "value['a'][0] is not a value (kind 12"},
        {tree_by_hand(DP_LIST, NULL, 3, 1), "value['a'][0] is not a value"},
        {tree_by_hand(DP_LIST, items, 1, 0), "nested deeper than 0"},
        {tree_by_hand(DP_LIST, items, 1, 200), "nested deeper than 3"},
        {tree_by_hand(DP_INT, items, 1, 40), "nested deeper than 3"},
        {itself[0], "nested deeper than 1"},
        {tree_by_hand(DP_DICT, &no_key, 1, 1), "key 0 is NULL"},
        {tree_by_hand(DP_DICT, twice, 2, 1), "key 'k' is there twice"},
        {tree_by_hand(DP_CONTAINER, NULL, 0, 1), "value['a'][0] is not a value"},
        {tree_by_hand(DP_CONTAINER, &padding, 0, 1), "pad_dims is 9"},
        {tree_by_hand(DP_CONTAINER, &torn, 0, 1), "value['a'][0] is not a value"},
        {yes, "value['a'][0] is not a value (kind 2"},
        {tree_by_hand(DP_ERROR, "no luck", 0, 0), "value['a'][0]: no luck"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const dp_pair pair = {"a", tree_by_hand(DP_TUPLE, &table[i].value, 1, 3)};
        dp_value dict = tree_by_hand(DP_DICT, &pair, 1, 4), out;
        CHECK_ERROR(dp_scatter(ctx, scope, dict, NULL, &out), DP_ERR_INVALID, table[i].want);
        CHECK_ERROR(dp_keep(scope, dict, &out), DP_ERR_INVALID, table[i].want);
        CHECK_ERROR(dp_replicate(ctx, scope, dict, NULL, &out), DP_ERR_INVALID, table[i].want);
        CHECK_ERROR(dp_collate(scope, &dict, 1, 1, &out), DP_ERR_INVALID, "dp_collate: ");
        CHECK_INT(dp_list_make(scope, DP_LIST, &dict, 1).kind, DP_ERROR);
        CHECK_INT(dp_dict_make(scope, &pair, 1).kind, DP_ERROR);
        CHECK_INT(dp_contain(scope, &(dp_container){.data = dict}).kind, DP_ERROR);
        CHECK_INT(dp_get(dict, "a").kind, DP_ERROR);
        CHECK_INT(dp_at(dict, 0).kind, DP_ERROR);
        CHECK(dp_key_at(dict, 0) == NULL);
    }
}

/* A mark is believed only where nothing else was changed: garbage in its place says nothing. */
TEST_BACKENDS(marks_of_changed_values)
{
    dp_value plain = tree_of(scope, "[1, 2]"), tensor = tree_of(scope, "f32[8]");
    dp_value items[64], out;
    int believed = 0;
    for (size_t i = 0; i < 64; i++)
        items[i] = tensor;
    for (int k = 0; k < 256 + 63; k++) {
        dp_value value = tree_by_hand(DP_LIST, items, 1, 1);
        value.reserved = (uint8_t)k;
        if (k >= 256) { /* another array, and a count to go with it */
            value = plain;
            value.as.items = items + (k - 256);
            value.count = 1;
        }
        CHECK_OK(dp_scatter(ctx, scope, value, NULL, &out));
        believed += dp_at(dp_at(out, 0), 0).as.t->shape[0] != 1;
        CHECK(k != 1 || believed == 0);
    }
    CHECK(believed <= 3);
}

/* ---- trees that are mapped ------------------------------------------------------------------- */

typedef struct mapped {
    int tensors, containers;
    int fails_at; /* the number of a tensor */
    dp_value becomes;
} mapped;

static dp_status map_one(dp_scope *scope, dp_value value, dp_value *out, void *user)
{
    mapped *all = user;
    if (value.kind == DP_CONTAINER) {
        dp_container own = *value.as.c;
        all->containers++;
        DP_TRY(dp_map(scope, own.data, map_one, user, &own.data));
        *out = dp_contain(scope, &own);
        return DP_OK;
    }
    CHECK_INT(value.kind, DP_TENSOR);
    if (++all->tensors == all->fails_at)
        return dp_error(DP_ERR_USER, "tensor %d is not wanted", all->tensors);
    *out = all->becomes;
    return DP_OK;
}

TEST(a_map_makes_the_same_tree_of_other_tensors)
{
    static const float data[2] = {1, 2};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx), *inner = dp_scope_begin(ctx);
    dp_value tensor = dp_array(inner, data, DP_F32, DP_SHAPE(2)), out = dp_none();
    dp_value plain = DP_LIST_OF(inner, dp_int(1), dp_string(inner, "x"), dp_none());
    char key[] = "a";
    dp_value tree = DP_DICT(inner, {key, tensor}, {"b", DP_TUPLE_OF(inner, tensor, dp_float(2))},
                            {"c", dp_stacked(inner, DP_LIST_OF(inner, tensor), 0)}, {"d", plain});
    mapped all = {.becomes = dp_int(7)};
    CHECK_OK(dp_map(scope, tree, map_one, &all, &out));
    CHECK(all.tensors == 3 && all.containers == 1);
    CHECK_INT(dp_get(out, "a").as.i, 7);
    CHECK(dp_get(out, "b").kind == DP_TUPLE && dp_at(dp_get(out, "b"), 1).kind == DP_FLOAT);
    CHECK_INT(dp_at(dp_get(out, "b"), 0).as.i, 7);
    CHECK_INT(dp_at(dp_get(out, "c").as.c->data, 0).as.i, 7);
    CHECK(dp_get(out, "d").as.items == plain.as.items); /* shared */
    CHECK(dp_key_at(out, 0) != dp_key_at(tree, 0));
    CHECK_INT(dp_get(tree, "a").kind, DP_TENSOR);
    CHECK_OK(dp_map(scope, tensor, map_one, &all, &out));
    CHECK_INT(out.as.i, 7);
    CHECK_OK(dp_map(scope, dp_none(), map_one, &all, &out));
    CHECK_INT(out.kind, DP_NONE);
    dp_close(ctx);
}

TEST(a_map_that_fails_gives_nothing)
{
    static const float data[2] = {1, 2};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value tensor = dp_array(scope, data, DP_F32, DP_SHAPE(2)), out = dp_int(3);
    dp_value tree = DP_LIST_OF(scope, tensor, tensor);
    mapped all = {.fails_at = 2, .becomes = tensor};
    CHECK_ERROR(dp_map(scope, tree, map_one, &all, &out), DP_ERR_USER, "tensor 2 is not wanted");
    CHECK(strncmp(dp_last_error(), "tensor", 6) == 0);
    all = (mapped){.becomes = tree};
    CHECK_ERROR(dp_map(scope, tree, map_one, &all, &out), DP_ERR_INVALID,
                "dp_map: fn made a value of depth 1 of one of 0");
    all.becomes = dp_string(scope, NULL);
    CHECK_ERROR(dp_map(scope, tree, map_one, &all, &out), DP_ERR_INVALID, "dp_map: what fn made");
    CHECK_ERROR(dp_map(scope, tree, NULL, &all, &out), DP_ERR_INVALID, "dp_map: fn is NULL");
    CHECK_INT(out.as.i, 3);
    dp_close(ctx);
}
