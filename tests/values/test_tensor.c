/* test_tensor.c - views, and what works on their elements, against scalar code written here. */

#include <fenv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "numbers.h"
#include "test.h"

static const dp_device host = {0, 0};

static bool same_device(dp_device a, dp_device b)
{
    return a.backend == b.backend && a.index == b.index;
}

static void check_shape(const dp_tensor *tensor, int ndim, const int64_t *shape,
                        const int64_t *stride)
{
    CHECK_INT(tensor->ndim, ndim);
    for (int i = 0; i < ndim; i++) {
        CHECK_INT(tensor->shape[i], shape[i]);
        if (stride != NULL) {
            CHECK_INT(tensor->stride[i], stride[i]);
        }
    }
}

/* ---- walking a tensor ------------------------------------------------------------------------ */

typedef struct walk { /* visits all elements, row-major */
    int64_t index[DP_MAX_DIMS];
    int64_t offset; /* in elements */
    bool done;
} walk;

static walk walk_start(const dp_tensor *tensor)
{
    walk w = {.offset = 0};
    for (int i = 0; i < tensor->ndim; i++) {
        w.done = w.done || tensor->shape[i] == 0;
    }
    return w;
}

static void walk_next(walk *w, const dp_tensor *tensor)
{
    int i = tensor->ndim;
    while (i-- > 0) {
        w->offset += tensor->stride[i];
        if (++w->index[i] < tensor->shape[i]) {
            return;
        }
        w->offset -= tensor->stride[i] * tensor->shape[i];
        w->index[i] = 0;
    }
    w->done = true;
}

static size_t element_bytes(const dp_tensor *tensor)
{
    return dp_dtype_bytes((dp_dtype)tensor->dtype);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

TEST(every_dtype_has_a_name_and_a_size)
{
    const struct {
        dp_dtype dtype;
        const char *name;
        size_t bytes;
    } dtypes[] = {
        {DP_F32, "f32", 4}, {DP_F64, "f64", 8},   {DP_F16, "f16", 2}, {DP_BF16, "bf16", 2},
        {DP_I64, "i64", 8}, {DP_I32, "i32", 4},   {DP_I16, "i16", 2}, {DP_I8, "i8", 1},
        {DP_U8, "u8", 1},   {DP_BOOL, "bool", 1},
    };
    CHECK_INT(sizeof dtypes / sizeof dtypes[0], DP_DTYPE_COUNT);
    for (int i = 0; i < DP_DTYPE_COUNT; i++) {
        CHECK_INT(dtypes[i].dtype, i);
        CHECK_STR(dp_dtype_name(dtypes[i].dtype), dtypes[i].name);
        CHECK_INT(dp_dtype_bytes(dtypes[i].dtype), dtypes[i].bytes);
    }
    const int none[] = {DP_DTYPE_COUNT, DP_DTYPE_ANY, 99, -1, 256, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        CHECK_INT(dp_dtype_bytes((dp_dtype)none[i]), 0);
        CHECK(dp_dtype_name((dp_dtype)none[i]) != NULL);
        CHECK(dp_dtype_name((dp_dtype)none[i])[0] != '\0');
    }
}

/* ---- wrap ------------------------------------------------------------------------------------ */

TEST(wrap_is_row_major)
{
    float data[24];
    dp_tensor t = dp_wrap(data, DP_F32, 3, (int64_t[]){2, 3, 4});
    CHECK(t.data == data && !t.read_only && t.dtype == DP_F32 && same_device(t.device, host));
    check_shape(&t, 3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1});
    CHECK_INT(dp_tensor_count(&t), 24);
    CHECK(dp_is_contiguous(&t));

    const float fixed[2] = {1.0f, 2.0f};
    t = dp_wrap_const(fixed, DP_F32, 1, (int64_t[]){2});
    CHECK(t.data == fixed && t.read_only);
    CHECK_INT(dp_tensor_count(&t), 2);
}

TEST(a_scalar_has_no_dims)
{
    double pi = 3.14;
    dp_tensor t = dp_wrap(&pi, DP_F64, 0, NULL);
    CHECK_INT(t.ndim, 0);
    CHECK_INT(dp_tensor_count(&t), 1);
    CHECK(dp_is_contiguous(&t));
}

TEST(wrap_takes_eight_dims_and_empty_ones)
{
    char data[256];
    dp_tensor t = dp_wrap(data, DP_I8, 8, (int64_t[]){2, 2, 2, 2, 2, 2, 2, 2});
    CHECK_INT(dp_tensor_count(&t), 256);
    CHECK_INT(t.stride[0], 128);
    t = dp_wrap(NULL, DP_F32, 2, (int64_t[]){0, 5}); /* nothing there, nothing needed */
    CHECK_INT(dp_tensor_count(&t), 0);
    CHECK(dp_is_contiguous(&t));
    t = dp_wrap(data, DP_F32, 3, (int64_t[]){3, 0, 5});
    CHECK_INT(dp_tensor_count(&t), 0);
}

static void check_wrong(dp_ctx *ctx, void *data, dp_dtype dtype, int ndim, const int64_t *shape)
{
    dp_tensor wrong = dp_wrap(data, dtype, ndim, shape), out;
    CHECK_INT(dp_tensor_count(&wrong), -1);
    CHECK(!dp_is_contiguous(&wrong));
    CHECK_ERROR(dp_fill(ctx, &wrong, dp_int(1)), DP_ERR_INVALID, "dp_fill: ");
    CHECK_ERROR(dp_narrow(&wrong, 0, 0, 0, &out), DP_ERR_INVALID, "dp_narrow: ");
    CHECK_ERROR(dp_reshape(&wrong, 0, NULL, &out), DP_ERR_INVALID, "dp_reshape: ");
}

TEST(a_wrong_wrap_shows_when_it_is_used)
{
    dp_ctx *ctx = open_cpus(1);
    int64_t data[4] = {0}, huge = (int64_t)1 << 32;
    check_wrong(ctx, NULL, DP_F32, 1, (int64_t[]){1});
    check_wrong(ctx, NULL, DP_F32, 0, NULL);
    check_wrong(ctx, data, DP_F32, 1, NULL);
    const int ndims[] = {-1, 9, 200, 256, 257, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof ndims / sizeof ndims[0]; i++) {
        check_wrong(ctx, data, DP_F32, ndims[i], (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1, 1});
    }
    const int dtypes[] = {DP_DTYPE_COUNT, DP_DTYPE_ANY, 99, 256, -1, INT32_MAX};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        check_wrong(ctx, data, (dp_dtype)dtypes[i], 1, (int64_t[]){1});
    }
    const int64_t shapes[][3] = {{-1, 1, 1},
                                 {-2, -2, 1},
                                 {0, -1, 1},
                                 {INT64_MIN, 1, 1},
                                 {INT64_MAX, 1, 1},
                                 {INT64_MAX / 8 + 1, 1, 1},
                                 {huge, huge, 1},
                                 {huge, huge, 0 - huge},
                                 {INT64_MAX, INT64_MAX, INT64_MAX},
                                 {1, INT64_MAX, 1024}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        check_wrong(ctx, data, DP_F64, 3, shapes[i]);
    }
    CHECK_INT(dp_tensor_count(NULL), -1);
    CHECK(!dp_is_contiguous(NULL));
    dp_close(ctx);
}

TEST(forged_tensors_are_malformed)
{
    float data[16];
    const dp_tensor good = dp_wrap(data, DP_F32, 2, (int64_t[]){4, 4});
    dp_tensor bad[9];
    for (int i = 0; i < 9; i++) {
        bad[i] = good;
    }
    bad[0].ndim = 9;
    bad[1].ndim = 255;
    bad[2].dtype = 99;
    bad[3].shape[1] = -4;
    bad[4].stride[0] = -4;
    bad[5].stride[0] = INT64_MAX; /* the last element is beyond any address */
    bad[6].shape[0] = (int64_t)1 << 31;
    bad[6].stride[0] = (int64_t)1 << 31;
    bad[7].data = NULL;
    bad[8].shape[0] = INT64_MAX;
    bad[8].stride[0] = 0; /* takes no room, but cannot be counted in bytes */
    for (int i = 0; i < 9; i++) {
        dp_tensor out;
        CHECK_INT(dp_tensor_count(&bad[i]), -1);
        CHECK_ERROR(dp_select(&bad[i], 0, 0, &out), DP_ERR_INVALID, "dp_select: ");
    }
}

TEST(contiguous_means_row_major_without_gaps)
{
    float data[64];
    dp_tensor t = dp_wrap(data, DP_F32, 2, (int64_t[]){4, 3}), view;
    CHECK_OK(dp_narrow(&t, 0, 1, 2, &view));
    CHECK(dp_is_contiguous(&view));
    CHECK_OK(dp_narrow(&t, 1, 1, 2, &view));
    CHECK(!dp_is_contiguous(&view));
    CHECK_OK(dp_transpose(&t, 0, 1, &view));
    CHECK(!dp_is_contiguous(&view));
    CHECK_OK(dp_select(&t, 1, 0, &view));
    CHECK(!dp_is_contiguous(&view));
    CHECK_OK(dp_narrow(&t, 1, 1, 0, &view)); /* no elements, no gaps */
    CHECK(dp_is_contiguous(&view));
    t = dp_wrap(data, DP_F32, 3, (int64_t[]){1, 5, 1});
    t.stride[0] = 99; /* a stride that is never walked does not count */
    t.stride[2] = 77;
    CHECK(dp_is_contiguous(&t));
    t.stride[1] = 0;
    CHECK(!dp_is_contiguous(&t));
}

/* ---- views ----------------------------------------------------------------------------------- */

TEST(narrow_keeps_a_range)
{
    int32_t data[24] = {0};
    dp_tensor t = dp_wrap_const(data, DP_I32, 3, (int64_t[]){2, 3, 4}), view;
    CHECK_OK(dp_narrow(&t, 1, 1, 2, &view));
    CHECK(view.data == data + 4 && view.read_only && view.dtype == DP_I32);
    check_shape(&view, 3, (int64_t[]){2, 2, 4}, (int64_t[]){12, 4, 1});
    CHECK_OK(dp_narrow(&t, -1, 3, 1, &view));
    CHECK(view.data == data + 3);
    check_shape(&view, 3, (int64_t[]){2, 3, 1}, NULL);
    CHECK_OK(dp_narrow(&t, -3, 0, 2, &view));
    check_shape(&view, 3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1});
    CHECK_OK(dp_narrow(&t, 0, 2, 0, &view)); /* an empty end */
    CHECK_INT(dp_tensor_count(&view), 0);

    CHECK_OK(dp_narrow(&t, 0, 1, 1, &t)); /* in place */
    CHECK_OK(dp_narrow(&t, 2, 2, 2, &t));
    CHECK(t.data == data + 14);
    check_shape(&t, 3, (int64_t[]){1, 3, 2}, (int64_t[]){12, 4, 1});
}

TEST(narrow_refuses_what_is_outside)
{
    int32_t data[6];
    dp_tensor t = dp_wrap(data, DP_I32, 2, (int64_t[]){2, 3}), view = {.data = data};
    const struct {
        int dim;
        int64_t first, count;
    } wrong[] = {
        {2, 0, 1},         {-3, 0, 1},        {INT32_MAX, 0, 1}, {INT32_MIN, 0, 1},
        {1, -1, 1},        {1, 0, -1},        {1, 0, 4},         {1, 3, 1},
        {1, 4, 0},         {1, INT64_MAX, 1}, {1, 1, INT64_MAX}, {1, INT64_MAX, INT64_MAX},
        {1, INT64_MIN, 1}, {1, 1, INT64_MIN},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_ERROR(dp_narrow(&t, wrong[i].dim, wrong[i].first, wrong[i].count, &view),
                    DP_ERR_INVALID, "dp_narrow: ");
        CHECK(view.data == data && view.ndim == 0);
    }
    t = dp_wrap(data, DP_I32, 0, NULL);
    CHECK_ERROR(dp_narrow(&t, 0, 0, 1, &view), DP_ERR_INVALID, "dp_narrow: ");
    CHECK_ERROR(dp_narrow(&t, -1, 0, 1, &view), DP_ERR_INVALID, "dp_narrow: ");
}

TEST(select_takes_one_and_drops_the_dim)
{
    int16_t data[24] = {0};
    dp_tensor t = dp_wrap_const(data, DP_I16, 3, (int64_t[]){2, 3, 4}), view;
    CHECK_OK(dp_select(&t, 1, 2, &view));
    CHECK(view.data == data + 8 && view.read_only && view.dtype == DP_I16);
    check_shape(&view, 2, (int64_t[]){2, 4}, (int64_t[]){12, 1});
    CHECK(view.shape[2] == 0 && view.stride[2] == 0); /* the dim is gone, as if never there */
    CHECK_OK(dp_select(&t, -1, 0, &view));
    check_shape(&view, 2, (int64_t[]){2, 3}, (int64_t[]){12, 4});
    CHECK_OK(dp_select(&t, 0, 1, &t));
    CHECK_OK(dp_select(&t, 0, 1, &t));
    CHECK_OK(dp_select(&t, 0, 1, &t));
    CHECK(t.data == data + 17 && t.ndim == 0);
    CHECK_INT(dp_tensor_count(&t), 1);

    CHECK_ERROR(dp_select(&t, 0, 0, &view), DP_ERR_INVALID, "dp_select: ");
    t = dp_wrap(data, DP_I16, 2, (int64_t[]){2, 0});
    CHECK_ERROR(dp_select(&t, 1, 0, &view), DP_ERR_INVALID, "dp_select: ");
    CHECK_ERROR(dp_select(&t, 0, 2, &view), DP_ERR_INVALID, "dp_select: ");
    CHECK_ERROR(dp_select(&t, 0, INT64_MAX, &view), DP_ERR_INVALID, "dp_select: ");
    CHECK_ERROR(dp_select(&t, 0, INT64_MIN, &view), DP_ERR_INVALID, "dp_select: ");
    CHECK_ERROR(dp_select(&t, 2, 0, &view), DP_ERR_INVALID, "dp_select: ");
    CHECK_ERROR(dp_select(&t, -3, 0, &view), DP_ERR_INVALID, "dp_select: ");
}

TEST(transpose_swaps_two_dims)
{
    double data[24] = {0};
    dp_tensor t = dp_wrap_const(data, DP_F64, 3, (int64_t[]){2, 3, 4}), view;
    CHECK_OK(dp_transpose(&t, 0, 2, &view));
    CHECK(view.data == data && view.read_only);
    check_shape(&view, 3, (int64_t[]){4, 3, 2}, (int64_t[]){1, 4, 12});
    CHECK_OK(dp_transpose(&t, -1, 1, &view));
    check_shape(&view, 3, (int64_t[]){2, 4, 3}, (int64_t[]){12, 1, 4});
    CHECK_OK(dp_transpose(&t, 1, 1, &view));
    check_shape(&view, 3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1});
    CHECK_OK(dp_transpose(&t, 0, 1, &t));
    check_shape(&t, 3, (int64_t[]){3, 2, 4}, (int64_t[]){4, 12, 1});
    CHECK_ERROR(dp_transpose(&t, 0, 3, &view), DP_ERR_INVALID, "dp_transpose: ");
    CHECK_ERROR(dp_transpose(&t, -4, 0, &view), DP_ERR_INVALID, "dp_transpose: ");
    CHECK_ERROR(dp_transpose(&t, INT32_MIN, INT32_MAX, &view), DP_ERR_INVALID, "dp_transpose: ");
}

TEST(reshape_of_what_is_contiguous)
{
    float data[24] = {0};
    dp_tensor t = dp_wrap_const(data, DP_F32, 2, (int64_t[]){4, 6}), view;
    CHECK_OK(dp_reshape(&t, 3, (int64_t[]){2, -1, 3}, &view));
    CHECK(view.data == data && view.read_only && view.dtype == DP_F32);
    check_shape(&view, 3, (int64_t[]){2, 4, 3}, (int64_t[]){12, 3, 1});
    CHECK_OK(dp_reshape(&t, 1, (int64_t[]){-1}, &view));
    check_shape(&view, 1, (int64_t[]){24}, (int64_t[]){1});
    CHECK_OK(dp_reshape(&t, 5, (int64_t[]){1, 24, 1, 1, 1}, &view));
    CHECK(dp_is_contiguous(&view));
    CHECK_OK(dp_reshape(&t, 2, (int64_t[]){-1, 8}, &t));
    check_shape(&t, 2, (int64_t[]){3, 8}, (int64_t[]){8, 1});

    t = dp_wrap(data, DP_F32, 0, NULL);
    CHECK_OK(dp_reshape(&t, 2, (int64_t[]){1, 1}, &view));
    CHECK_OK(dp_reshape(&view, 0, NULL, &view));
    CHECK_INT(view.ndim, 0);
    CHECK_OK(dp_reshape(&t, 1, (int64_t[]){-1}, &view));
    check_shape(&view, 1, (int64_t[]){1}, NULL);
}

TEST(reshape_of_nothing)
{
    dp_tensor t = dp_wrap(NULL, DP_F32, 2, (int64_t[]){0, 6}), view;
    CHECK_OK(dp_reshape(&t, 1, (int64_t[]){0}, &view));
    CHECK_OK(dp_reshape(&t, 3, (int64_t[]){5, 0, 7}, &view));
    check_shape(&view, 3, (int64_t[]){5, 0, 7}, NULL);
    CHECK_OK(dp_reshape(&t, 2, (int64_t[]){-1, 3}, &view));
    check_shape(&view, 2, (int64_t[]){0, 3}, NULL);
    CHECK_ERROR(dp_reshape(&t, 2, (int64_t[]){-1, 0}, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_ERROR(dp_reshape(&t, 0, NULL, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_ERROR(dp_reshape(&t, 1, (int64_t[]){1}, &view), DP_ERR_INVALID, "dp_reshape: ");
}

TEST(reshape_refuses_what_does_not_fit)
{
    float data[24];
    dp_tensor t = dp_wrap(data, DP_F32, 2, (int64_t[]){4, 6}), view;
    const struct {
        int ndim;
        int64_t shape[3];
    } wrong[] = {
        {1, {23}},
        {1, {25}},
        {2, {-1, 5}},
        {2, {-1, -1}},
        {2, {-1, 0}},
        {2, {-2, 12}},
        {2, {-4, -6}},
        {2, {INT64_MIN, 1}},
        {3, {INT64_MAX, INT64_MAX, -1}},
        {3, {(int64_t)1 << 32, (int64_t)1 << 32, 24}},
        {0, {0}},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_ERROR(dp_reshape(&t, wrong[i].ndim, wrong[i].shape, &view), DP_ERR_INVALID,
                    "dp_reshape: ");
    }
    int64_t nine[9] = {24, 1, 1, 1, 1, 1, 1, 1, 1};
    CHECK_ERROR(dp_reshape(&t, 9, nine, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_ERROR(dp_reshape(&t, -1, nine, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_ERROR(dp_reshape(&t, 1, NULL, &view), DP_ERR_INVALID, "dp_reshape: ");
}

TEST(reshape_of_strided_views)
{
    float data[24];
    dp_tensor t = dp_wrap(data, DP_F32, 2, (int64_t[]){4, 6}), rows, columns, turned, view;
    CHECK_OK(dp_narrow(&t, 0, 1, 2, &rows));
    CHECK_OK(dp_reshape(&rows, 1, (int64_t[]){12}, &view));
    CHECK_OK(dp_narrow(&t, 1, 0, 4, &columns));
    CHECK_ERROR(dp_reshape(&columns, 1, (int64_t[]){16}, &view), DP_ERR_INVALID, "dp_contiguous");
    CHECK_OK(dp_reshape(&columns, 4, (int64_t[]){2, 2, 2, 2}, &view));
    check_shape(&view, 4, (int64_t[]){2, 2, 2, 2}, (int64_t[]){12, 6, 2, 1});
    CHECK_ERROR(dp_reshape(&columns, 2, (int64_t[]){2, 8}, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_OK(dp_transpose(&t, 0, 1, &turned));
    CHECK_ERROR(dp_reshape(&turned, 1, (int64_t[]){24}, &view), DP_ERR_INVALID, "dp_reshape: ");
    CHECK_OK(dp_reshape(&turned, 3, (int64_t[]){6, 1, 4}, &view));
    CHECK_OK(dp_reshape(&turned, 3, (int64_t[]){3, 2, 4}, &view));
    check_shape(&view, 3, (int64_t[]){3, 2, 4}, (int64_t[]){2, 1, 6});
}

/* ---- random views ---------------------------------------------------------------------------- */

#define ROOM 60000 /* elements in a buffer for random views */

static int64_t random_below(uint64_t *random, int64_t limit)
{
    return (int64_t)(test_random(random) % (uint64_t)limit);
}

static void random_shape(uint64_t *random, dp_tensor *out)
{
    out->ndim = (uint8_t)random_below(random, DP_MAX_DIMS + 1);
    int64_t most = out->ndim <= 3 ? 9 : out->ndim <= 5 ? 5 : 3;
    for (int i = 0; i < out->ndim; i++) {
        out->shape[i] = random_below(random, 40) == 0 ? 0 : 1 + random_below(random, most);
    }
}

/* Strides for the shape: dims in any order in memory, with gaps; with `repeat` some are 0. Returns
   how many elements the view spans, or 0 if that is more than there is room for. */
static int64_t random_strides(uint64_t *random, bool repeat, dp_tensor *out)
{
    int order[DP_MAX_DIMS];
    for (int i = 0; i < out->ndim; i++) {
        int k = (int)random_below(random, i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    int64_t span = 1;
    for (int i = 0; i < out->ndim; i++) {
        int dim = order[i];
        int64_t shape = out->shape[dim] > 0 ? out->shape[dim] : 1;
        int64_t gap = random_below(random, 3) == 0 ? random_below(random, 3) : 0;
        out->stride[dim] = repeat && random_below(random, 5) == 0 ? 0 : span + gap;
        span += (shape - 1) * out->stride[dim];
    }
    return span <= ROOM ? span : 0;
}

/* Same elements in the same order, whatever the strides. */
static void check_same_elements(const dp_tensor *a, const dp_tensor *b)
{
    const char *a_data = a->data, *b_data = b->data;
    size_t bytes = element_bytes(a);
    CHECK_INT(element_bytes(b), bytes);
    walk w = walk_start(a), v = walk_start(b);
    for (; !w.done && !v.done; walk_next(&w, a), walk_next(&v, b)) {
        CHECK(memcmp(a_data + w.offset * (int64_t)bytes, b_data + v.offset * (int64_t)bytes,
                     bytes) == 0);
    }
    CHECK(w.done && v.done);
}

TEST(reshape_never_moves_an_element)
{
    uint16_t *data = test_room(ROOM * sizeof *data);
    uint64_t random = test_seed();
    int view_count = 0;
    for (int i = 0; i < ROOM; i++) {
        data[i] = (uint16_t)i;
    }
    for (int round = 0; round < 3000 / test_stride(); round++) {
        dp_tensor t = dp_wrap(data, DP_I16, 0, NULL), view;
        random_shape(&random, &t);
        if (random_strides(&random, true, &t) == 0) {
            continue;
        }
        int64_t rest = dp_tensor_count(&t), shape[DP_MAX_DIMS];
        int ndim = 0;
        for (int64_t part = 2; ndim < DP_MAX_DIMS - 1 && rest > 0; part++) {
            while (ndim < DP_MAX_DIMS - 1 && rest % part == 0 && random_below(&random, 2) == 0) {
                shape[ndim++] = part;
                rest /= part;
            }
            if (part > 9) {
                break;
            }
        }
        shape[ndim++] = rest;
        dp_status status = dp_reshape(&t, ndim, shape, &view);
        if (status == DP_OK) {
            check_shape(&view, ndim, shape, NULL);
            check_same_elements(&t, &view);
            view_count += !dp_is_contiguous(&t);
        } else {
            CHECK(!dp_is_contiguous(&t));
        }
    }
    CHECK(view_count > 50);
}

/* ---- new ------------------------------------------------------------------------------------- */

TEST(new_makes_every_dtype_on_every_device)
{
    dp_ctx *ctx = open_cpus(3);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int rank = -1; rank < 3; rank++) {
        dp_device device = rank < 0 ? host : dp_local_device(ctx, rank);
        for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
            dp_tensor t;
            CHECK_OK(dp_tensor_new(scope, device, (dp_dtype)dtype, 3, (int64_t[]){2, 3, 5}, &t));
            CHECK(same_device(t.device, device) && t.dtype == dtype && !t.read_only);
            check_shape(&t, 3, (int64_t[]){2, 3, 5}, (int64_t[]){15, 5, 1});
            CHECK_INT((uintptr_t)t.data % 64, 0);
            memset(t.data, 1, 30 * element_bytes(&t));
            CHECK_OK(dp_tensor_new(scope, device, (dp_dtype)dtype, 0, NULL, &t));
            CHECK_INT(dp_tensor_count(&t), 1);
            CHECK_OK(dp_tensor_new(scope, device, (dp_dtype)dtype, 2, (int64_t[]){7, 0}, &t));
            CHECK_INT(dp_tensor_count(&t), 0);
        }
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(new_refuses_wrong_sizes)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const int64_t huge = (int64_t)1 << 32;
    const struct {
        dp_dtype dtype;
        int ndim;
        int64_t shape[3];
    } wrong[] = {
        {DP_F32, 1, {-1}},
        {DP_F32, 2, {-2, -2}},
        {DP_F32, 2, {0, -2}},
        {DP_F32, 1, {INT64_MIN}},
        {DP_F32, 1, {INT64_MAX}},
        {DP_U8, 2, {huge, huge}},
        {DP_F64, 3, {huge, huge / 8, 1}},
        {DP_F64, 3, {INT64_MAX, INT64_MAX, INT64_MAX}},
        {DP_F64, 1, {INT64_MAX / 8 + 1}},
        {DP_F32, -1, {1}},
        {DP_F32, 9, {1}},
        {DP_F32, INT32_MAX, {1}},
        {DP_F32, INT32_MIN, {1}},
        {DP_DTYPE_COUNT, 1, {1}},
        {DP_DTYPE_ANY, 1, {1}},
        {(dp_dtype)-1, 1, {1}},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        dp_tensor t = {.data = scope};
        CHECK_ERROR(dp_tensor_new(scope, host, wrong[i].dtype, wrong[i].ndim, wrong[i].shape, &t),
                    DP_ERR_INVALID, "dp_tensor_new: ");
        CHECK_ERROR(dp_tensor_new(scope, dp_local_device(ctx, 0), wrong[i].dtype, wrong[i].ndim,
                                  wrong[i].shape, &t),
                    DP_ERR_INVALID, "dp_tensor_new: ");
        CHECK(t.data == scope);
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* numbers.h rounds once; dp_cast goes to 16 bits by way of f32. */
static void put(dp_dtype dtype, void *data, size_t i, number value)
{
    bool small = dtype == DP_F16 || dtype == DP_BF16;
    number_put(dtype, data, i, small ? (number)(float)value : value);
}

static void put_f64(dp_dtype dtype, void *data, size_t i, double value)
{
    put(dtype, data, i, (number)value);
}

static int64_t least_of(dp_dtype dtype)
{
    return (int64_t)number_least(dtype);
}

static int64_t most_of(dp_dtype dtype)
{
    return (int64_t)number_most(dtype);
}

/* Equal bits; NaNs of any kind equal each other. */
static void check_elements(dp_dtype dtype, const void *got, const void *want, size_t count,
                           const char *what)
{
    size_t bytes = dp_dtype_bytes(dtype);
    for (size_t i = 0; i < count; i++) {
        if (memcmp((const char *)got + i * bytes, (const char *)want + i * bytes, bytes) != 0) {
            number a = number_get(dtype, got, i), b = number_get(dtype, want, i);
            if (!isnan(a) || !isnan(b)) {
                test_fail(__FILE__, __LINE__, "%s: element %zu is %.21Lg, wanted %.21Lg", what, i,
                          a, b);
            }
        }
    }
}

TEST(the_reference_knows_its_numbers)
{
    CHECK_INT(number_to_f16(1), 0x3c00);
    CHECK_INT(number_to_f16(-2), 0xc000);
    CHECK_INT(number_to_f16(65504), 0x7bff);
    CHECK_INT(number_to_f16(65519), 0x7bff);
    CHECK_INT(number_to_f16(65520), 0x7c00);
    CHECK_INT(number_to_f16(0x1p-24L), 0x0001);
    CHECK_INT(number_to_f16(0x1p-25L), 0x0000); /* half of the least: to even */
    CHECK_INT(number_to_f16(0x1.8p-25L), 0x0001);
    CHECK_INT(number_to_f16(2049), 0x6800);
    CHECK_INT(number_to_f16(2051), 0x6802);
    CHECK_INT(number_to_bf16(1), 0x3f80);
    CHECK_INT(number_to_bf16(0x1.fffffep127L), 0x7f80);
    CHECK_INT(number_to_bf16(-0.0L), 0x8000);
    for (int i = 0; i < 65536; i++) {
        uint16_t bits = (uint16_t)i, back;
        number half = number_get(DP_F16, &bits, 0), brain = number_get(DP_BF16, &bits, 0);
        put(DP_F16, &back, 0, half);
        CHECK(isnan(half) || back == bits);
        put(DP_BF16, &back, 0, brain);
        CHECK(isnan(brain) || back == bits);
    }
    CHECK_INT(least_of(DP_I8), -128);
    CHECK_INT(most_of(DP_I64), INT64_MAX);
}

/* ---- fill ------------------------------------------------------------------------------------ */

/* Fill `count` elements and compare each; those around them stay as they are. */
static void check_fill(dp_ctx *ctx, dp_dtype dtype, dp_value value, number n)
{
    enum { count = 37 };
    unsigned char data[(count + 2) * 8], want[sizeof data];
    size_t bytes = dp_dtype_bytes(dtype);
    memset(data, 0x5a, sizeof data);
    memset(want, 0x5a, sizeof want);
    for (size_t i = 1; i <= count; i++) {
        put(dtype, want, i, n);
    }
    dp_tensor t = dp_wrap(data + bytes, dtype, 1, (int64_t[]){count});
    CHECK_OK(dp_fill(ctx, &t, value));
    check_elements(dtype, data, want, count + 2, dp_dtype_name(dtype));
}

TEST(fill_writes_every_dtype)
{
    dp_ctx *ctx = open_cpus(2);
    for (int i = 0; i < DP_DTYPE_COUNT; i++) {
        dp_dtype dtype = (dp_dtype)i;
        check_fill(ctx, dtype, dp_int(0), 0);
        check_fill(ctx, dtype, dp_int(1), 1);
        check_fill(ctx, dtype, dp_float(1.0), 1);
        check_fill(ctx, dtype, dp_bool(true), 1);
        check_fill(ctx, dtype, dp_bool(false), 0);
        if (number_is_float(dtype)) {
            const double values[] = {0.1,
                                     -0.0,
                                     1e-3,
                                     -1.0 / 3.0,
                                     1e-45,
                                     60000.0,
                                     (double)INFINITY,
                                     (double)-INFINITY,
                                     (double)NAN};
            for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
                check_fill(ctx, dtype, dp_float(values[k]), (number)values[k]);
            }
        } else {
            check_fill(ctx, dtype, dp_int(least_of(dtype)), least_of(dtype));
            check_fill(ctx, dtype, dp_int(most_of(dtype)), most_of(dtype));
            check_fill(ctx, dtype, dp_float(-0.0), 0);
        }
    }
    check_fill(ctx, DP_I64, dp_float(-9223372036854775808.0), INT64_MIN);
    check_fill(ctx, DP_F64, dp_float(1e300), (number)1e300);
    check_fill(ctx, DP_F32, dp_float(0x1.fffffep127), 0x1.fffffep127L);
    dp_close(ctx);
}

static void check_no_fit(dp_ctx *ctx, dp_dtype dtype, dp_value value)
{
    int64_t data[2] = {0x5a5a5a5a5a5a5a5a, 0x5a5a5a5a5a5a5a5a};
    dp_tensor t = dp_wrap(data, dtype, 1, (int64_t[]){2});
    CHECK_ERROR(dp_fill(ctx, &t, value), DP_ERR_INVALID, "dp_fill: ");
    CHECK(data[0] == 0x5a5a5a5a5a5a5a5a && data[1] == 0x5a5a5a5a5a5a5a5a);
}

TEST(fill_refuses_numbers_that_do_not_fit)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < DP_DTYPE_COUNT; i++) {
        dp_dtype dtype = (dp_dtype)i;
        check_no_fit(ctx, dtype, dp_none());
        check_no_fit(ctx, dtype, dp_string(scope, "1"));
        check_no_fit(ctx, dtype, dp_list_make(scope, DP_LIST, NULL, 0));
        check_no_fit(ctx, dtype, dp_opaque(NULL));
        if (!number_is_float(dtype)) {
            check_no_fit(ctx, dtype, dp_float(0.5));
            check_no_fit(ctx, dtype, dp_float((double)NAN));
            check_no_fit(ctx, dtype, dp_float((double)INFINITY));
            check_no_fit(ctx, dtype, dp_float(9223372036854775808.0));
            check_no_fit(ctx, dtype, dp_float(-1e300));
        }
        if (!number_is_float(dtype) && dtype != DP_I64) {
            check_no_fit(ctx, dtype, dp_int(most_of(dtype) + 1));
            check_no_fit(ctx, dtype, dp_int(least_of(dtype) - 1));
            check_no_fit(ctx, dtype, dp_float((double)(most_of(dtype) + 1)));
            check_no_fit(ctx, dtype, dp_int(INT64_MAX));
            check_no_fit(ctx, dtype, dp_int(INT64_MIN));
        }
    }
    check_no_fit(ctx, DP_F32, dp_float(1e39));
    check_no_fit(ctx, DP_F16, dp_float(70000.0));
    check_no_fit(ctx, DP_F16, dp_int(-70000));
    check_no_fit(ctx, DP_BF16, dp_float(3.4028234663852886e38)); /* rounds to infinity */
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(fill_leaves_gaps_alone)
{
    const size_t bytes = ROOM * sizeof(int32_t);
    int32_t *data = test_room(bytes), *want = test_room(bytes);
    dp_ctx *ctx = open_cpus(2);
    uint64_t random = test_seed();
    for (int round = 0; round < 300 / test_stride(); round++) {
        dp_tensor t = dp_wrap(data, DP_I32, 0, NULL);
        random_shape(&random, &t);
        if (random_strides(&random, false, &t) == 0) {
            continue;
        }
        memset(data, 0x11, bytes);
        memcpy(want, data, bytes);
        for (walk w = walk_start(&t); !w.done; walk_next(&w, &t)) {
            want[w.offset] = -7;
        }
        CHECK_OK(dp_fill(ctx, &t, dp_int(-7)));
        CHECK_BYTES(data, want, bytes);
    }
    dp_close(ctx);
}

/* ---- copy ------------------------------------------------------------------------------------ */

static void random_bytes(uint64_t *random, void *out, size_t bytes)
{
    unsigned char *p = out;
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (unsigned char)test_random(random);
    }
}

/* A view of a whole buffer's memory: the host's, or a device's that the host can see. */
static dp_tensor view_of_buffer(dp_scope *scope, dp_device device, dp_dtype dtype)
{
    dp_tensor t;
    CHECK_OK(dp_tensor_new(scope, device, dtype, 1, (int64_t[]){ROOM}, &t));
    return t;
}

static void check_random_copy(dp_ctx *ctx, dp_scope *scope, uint64_t *random, dp_device to,
                              dp_device from)
{
    static unsigned char *want;
    want = want != NULL ? want : test_room(ROOM * 8);
    dp_dtype dtype = (dp_dtype)random_below(random, DP_DTYPE_COUNT);
    dp_tensor dst = view_of_buffer(scope, to, dtype);
    dp_tensor src = view_of_buffer(scope, from, dtype);
    random_shape(random, &src);
    dst.ndim = src.ndim;
    memcpy(dst.shape, src.shape, sizeof dst.shape);
    if (random_strides(random, true, &src) == 0 || random_strides(random, false, &dst) == 0) {
        return;
    }
    size_t bytes = element_bytes(&src);
    random_bytes(random, src.data, 4096);
    memset(dst.data, 0x5a, ROOM * bytes);
    memset(want, 0x5a, ROOM * bytes);
    walk w = walk_start(&dst), v = walk_start(&src);
    for (; !w.done; walk_next(&w, &dst), walk_next(&v, &src)) {
        memcpy(want + (size_t)w.offset * bytes, (char *)src.data + (size_t)v.offset * bytes, bytes);
    }
    src.read_only = true;
    CHECK_OK(dp_copy(ctx, &dst, &src, NULL));
    CHECK_OK(dp_wait(ctx));
    CHECK_BYTES(dst.data, want, ROOM * bytes);
}

/* Rows that are streamed past the caches: large ones of a large block, at odd places. */
TEST(long_rows_of_large_blocks)
{
    enum { ROWS = 300, COLUMNS = 65536, GAP = 37, BYTES = ROWS * (COLUMNS + GAP) };
    dp_ctx *ctx = NULL;
    dp_tensor from, to;
    unsigned char *in = malloc(ROWS * COLUMNS), *out = malloc(BYTES);
    CHECK(in != NULL && out != NULL);
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    for (size_t i = 0; i < ROWS * COLUMNS; i++)
        in[i] = (unsigned char)(i * 2654435761u >> 13);
    memset(out, 0xa5, BYTES);
    from = dp_wrap_const(in, DP_U8, DP_SHAPE(ROWS, COLUMNS));
    to = dp_wrap(out, DP_U8, DP_SHAPE(ROWS, COLUMNS + GAP));
    CHECK_OK(dp_narrow(&to, 1, GAP / 2, COLUMNS, &to));
    CHECK_OK(dp_copy(ctx, &to, &from, NULL));
    for (size_t r = 0; r < ROWS; r++) {
        const unsigned char *row = out + r * (COLUMNS + GAP);
        CHECK(memcmp(row + GAP / 2, in + r * COLUMNS, COLUMNS) == 0);
        for (size_t i = 0; i < GAP / 2; i++)
            CHECK(row[i] == 0xa5 && row[COLUMNS + GAP / 2 + i] == 0xa5);
    }
    dp_close(ctx);
    free(in);
    free(out);
}

/* So are blocks that are filled, whatever the number and wherever they begin and end. */
TEST(fills_of_large_blocks)
{
    enum { BYTES = (16 << 20) + 200 };
    static const struct {
        dp_dtype dtype;
        int64_t number;
        size_t first;
        int extra;
    } cases[] = {{DP_I8, -91, 1, 0},          {DP_I16, 0x1234, 7, 1},
                 {DP_I32, 0x12345678, 63, 3}, {DP_I64, 0x123456789abcdef, 13, 2},
                 {DP_I64, 77, 64, 0},         {DP_F32, 0, 4, 5}};
    dp_ctx *ctx = NULL;
    unsigned char *room = malloc(BYTES + 200);
    CHECK(room != NULL);
    CHECK_OK(dp_open(&(dp_config){.device_count = 2}, &ctx));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const size_t each = dp_dtype_bytes(cases[i].dtype), first = cases[i].first;
        const size_t count = (16 << 20) / each + (size_t)cases[i].extra;
        bool same = true;
        memset(room, 0xa5, BYTES + 200);
        dp_tensor all = dp_wrap(room + first, cases[i].dtype, DP_SHAPE((int64_t)count));
        CHECK_OK(dp_fill(ctx, &all, dp_int(cases[i].number)));
        for (size_t k = 0; k < count && same; k++)
            same = memcmp(room + first + k * each, &cases[i].number, each) == 0;
        CHECK(same);
        for (size_t k = 0; k < first; k++)
            CHECK_INT(room[k], 0xa5);
        for (size_t k = first + count * each; k < BYTES + 200; k++)
            CHECK_INT(room[k], 0xa5);
    }
    dp_close(ctx);
    free(room);
}

TEST_SLOW(copy_takes_any_strides_between_any_devices, 20)
{
    dp_ctx *ctx = open_cpus(3);
    uint64_t random = test_seed();
    for (int round = 0; round < 500 / test_stride(); round++) {
        dp_scope *scope = dp_scope_begin(ctx);
        int to = (int)random_below(&random, 4), from = (int)random_below(&random, 4);
        check_random_copy(ctx, scope, &random, to == 3 ? host : dp_local_device(ctx, to),
                          from == 3 ? host : dp_local_device(ctx, from));
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST(copy_turns_large_matrices)
{
    enum { rows = 1501, columns = 701 };
    const size_t bytes = rows * columns * sizeof(float);
    float *data = test_room(bytes), *turned = test_room(bytes);
    dp_ctx *ctx = open_cpus(2);
    dp_tensor src = dp_wrap(data, DP_F32, 2, (int64_t[]){rows, columns}), view;
    dp_tensor dst = dp_wrap(turned, DP_F32, 2, (int64_t[]){columns, rows});
    for (int i = 0; i < rows * columns; i++) {
        data[i] = (float)i;
    }
    CHECK_OK(dp_transpose(&src, 0, 1, &view));
    CHECK_OK(dp_copy(ctx, &dst, &view, NULL));
    for (int i = 0; i < rows; i++) {
        for (int k = 0; k < columns; k++) {
            CHECK(turned[k * rows + i] == data[i * columns + k]);
        }
    }
    CHECK_OK(dp_transpose(&dst, 0, 1, &dst));
    memset(data, 0, bytes);
    CHECK_OK(dp_copy(ctx, &src, &dst, NULL));
    for (int i = 0; i < rows * columns; i++) {
        CHECK(data[i] == (float)i);
    }
    dp_close(ctx);
}

TEST(copy_takes_a_stream_of_its_context)
{
    dp_ctx *ctx = open_cpus(4), *other = open_cpus(4);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor src = view_of_buffer(scope, dp_local_device(ctx, 1), DP_F32);
    dp_tensor dst = view_of_buffer(scope, dp_local_device(ctx, 2), DP_F32);
    CHECK_OK(dp_fill(ctx, &src, dp_int(4)));
    for (int rank = 0; rank < 4; rank++) {
        CHECK_OK(dp_fill(ctx, &dst, dp_int(0)));
        CHECK_OK(dp_copy(ctx, &dst, &src, dp_local_stream(ctx, rank)));
        CHECK_OK(dp_wait(ctx));
        CHECK_F64(((const float *)dst.data)[ROOM - 1], 4.0, 0.0);
    }
    CHECK_ERROR(dp_copy(ctx, &dst, &src, dp_local_stream(other, 1)), DP_ERR_INVALID, "dp_copy: ");
    dp_scope_end(scope);
    dp_close(other);
    dp_close(ctx);
}

TEST(copy_refuses_what_differs)
{
    dp_ctx *ctx = open_cpus(1);
    float a[6] = {0}, b[6] = {0};
    dp_tensor src = dp_wrap(a, DP_F32, 2, (int64_t[]){2, 3});
    const dp_tensor wrong[] = {
        dp_wrap(b, DP_F32, 2, (int64_t[]){3, 2}),
        dp_wrap(b, DP_F32, 1, (int64_t[]){6}),
        dp_wrap(b, DP_F32, 2, (int64_t[]){1, 3}),
        dp_wrap(b, DP_I32, 2, (int64_t[]){2, 3}),
        dp_wrap(b, DP_F32, 0, NULL),
        dp_wrap(b, DP_F32, 2, (int64_t[]){0, 3}),
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(dp_status_class(dp_copy(ctx, &wrong[i], &src, NULL)) == DP_CLASS_CALL);
        CHECK(dp_status_class(dp_copy(ctx, &src, &wrong[i], NULL)) == DP_CLASS_CALL);
        CHECK(strncmp(dp_last_error(), "dp_copy: ", 9) == 0);
    }
    dp_close(ctx);
}

TEST(copy_refuses_overlap)
{
    dp_ctx *ctx = open_cpus(2);
    int32_t data[20], want[20];
    for (int i = 0; i < 20; i++) {
        data[i] = want[i] = i;
    }
    dp_tensor all = dp_wrap(data, DP_I32, 1, (int64_t[]){20}), a, b;
    for (int distance = 1; distance < 10; distance++) {
        CHECK_OK(dp_narrow(&all, 0, 0, 10, &a));
        CHECK_OK(dp_narrow(&all, 0, distance, 10, &b));
        CHECK_ERROR(dp_copy(ctx, &a, &b, NULL), DP_ERR_INVALID, "overlap");
        CHECK_ERROR(dp_copy(ctx, &b, &a, NULL), DP_ERR_INVALID, "overlap");
    }
    dp_tensor square = dp_wrap(data, DP_I32, 2, (int64_t[]){4, 4}), turned;
    CHECK_OK(dp_transpose(&square, 0, 1, &turned));
    CHECK_ERROR(dp_copy(ctx, &square, &turned, NULL), DP_ERR_INVALID, "overlap");
    CHECK_BYTES(data, want, sizeof data);

    CHECK_OK(dp_narrow(&all, 0, 10, 10, &b)); /* side by side is fine */
    CHECK_OK(dp_copy(ctx, &b, &a, NULL));
    CHECK_INT(data[19], 9);
    dp_close(ctx);
}

/* The bytes of a view, marked in a map of the buffer; false if one is marked already. */
static bool mark_bytes(const dp_tensor *t, const unsigned char *buffer, bool *map)
{
    bool fresh = true;
    size_t bytes = element_bytes(t), first = (size_t)((const unsigned char *)t->data - buffer);
    for (walk w = walk_start(t); !w.done; walk_next(&w, t)) {
        for (size_t i = 0; i < bytes; i++) {
            bool *at = &map[first + (size_t)w.offset * bytes + i];
            fresh = fresh && !*at;
            *at = true;
        }
    }
    return fresh;
}

/* A view with small strides somewhere in the buffer; often strides that `like` has too. */
static dp_tensor random_place(uint64_t *random, unsigned char *buffer, dp_dtype dtype,
                              const dp_tensor *like)
{
    size_t bytes = dp_dtype_bytes(dtype);
    dp_tensor t = dp_wrap(buffer + bytes * (test_random(random) % 12), dtype, 0, NULL);
    t.ndim = like->ndim;
    for (int i = 0; i < t.ndim; i++) {
        t.shape[i] = like->shape[i];
        t.stride[i] = 1 + random_below(random, 7);
    }
    if (random_below(random, 2) == 0) {
        memcpy(t.stride, like->stride, sizeof t.stride);
    }
    return t;
}

/* What overlaps byte for byte is refused, what lies apart in memory is not. Between, where views
   interleave, a refusal is allowed. */
TEST(overlap_is_seen_between_any_views)
{
    static unsigned char buffer[1024];
    static bool map[sizeof buffer], read[sizeof buffer];
    dp_ctx *ctx = open_cpus(1);
    uint64_t random = test_seed();
    int refused = 0, allowed = 0;
    for (int round = 0; round < 20000 / test_stride(); round++) {
        dp_dtype dtypes[] = {DP_U8, DP_I16, DP_F32, DP_F64};
        dp_tensor seed = {.ndim = (uint8_t)(1 + round % 2)};
        for (int i = 0; i < seed.ndim; i++) {
            seed.shape[i] = 1 + random_below(&random, 4);
            seed.stride[i] = 1 + random_below(&random, 7);
        }
        dp_tensor dst = random_place(&random, buffer, dtypes[test_random(&random) % 4], &seed);
        dp_tensor src = random_place(&random, buffer, dtypes[test_random(&random) % 4], &seed);
        memset(map, 0, sizeof map);
        memset(read, 0, sizeof read);
        bool spread = mark_bytes(&dst, buffer, map), apart = true;
        (void)mark_bytes(&src, buffer, read);
        for (size_t i = 0; i < sizeof buffer; i++) {
            apart = apart && !(map[i] && read[i]);
        }
        bool same = dst.data == src.data && dst.dtype == src.dtype &&
                    memcmp(dst.stride, src.stride, sizeof dst.stride) == 0;
        dp_status status = dp_cast(ctx, &dst, &src);
        CHECK(status == DP_OK || status == DP_ERR_INVALID);
        CHECK(status == DP_ERR_INVALID || (spread && (apart || same)));
        refused += status == DP_ERR_INVALID;
        allowed += status == DP_OK;
    }
    CHECK(refused > 1000 / test_stride() && allowed > 1000 / test_stride());
    dp_close(ctx);
}

TEST(a_column_can_be_copied_to_its_neighbour)
{
    dp_ctx *ctx = open_cpus(1);
    float data[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    dp_tensor matrix = dp_wrap(data, DP_F32, 2, (int64_t[]){4, 3}), from, to;
    CHECK_OK(dp_select(&matrix, 1, 0, &from));
    CHECK_OK(dp_select(&matrix, 1, 2, &to));
    CHECK_OK(dp_copy(ctx, &to, &from, NULL));
    for (int i = 0; i < 4; i++) {
        CHECK(data[3 * i + 2] == (float)(3 * i + 1) && data[3 * i + 1] == (float)(3 * i + 2));
    }
    dp_close(ctx);
}

/* Several elements in one place: what they hold afterwards would depend on the order. */
TEST(writing_through_a_repeating_view_is_refused)
{
    dp_ctx *ctx = open_cpus(1);
    float from[6] = {1, 2, 3, 4, 5, 6}, to[6] = {0};
    dp_tensor src = dp_wrap(from, DP_F32, 2, (int64_t[]){2, 3});
    dp_tensor dst = dp_wrap(to, DP_F32, 2, (int64_t[]){2, 3});
    dst.stride[0] = 0;
    CHECK_ERROR(dp_copy(ctx, &dst, &src, NULL), DP_ERR_INVALID, "dp_copy: ");
    CHECK_ERROR(dp_cast(ctx, &dst, &src), DP_ERR_INVALID, "dp_cast: ");
    CHECK_ERROR(dp_axpby(ctx, 1.0, &src, 1.0, &src, &dst), DP_ERR_INVALID, "dp_axpby: ");
    dst.stride[0] = 1; /* rows 0 1 2 and 1 2 3 */
    CHECK_ERROR(dp_copy(ctx, &dst, &src, NULL), DP_ERR_INVALID, "dp_copy: ");
    CHECK_F64(to[0] + to[1] + to[2] + to[3], 0.0, 0.0);
    dp_close(ctx);
}

/* ---- contiguous ------------------------------------------------------------------------------ */

TEST(contiguous_copies_only_if_it_must)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    uint64_t random = test_seed();
    for (int round = 0; round < 200 / test_stride(); round++) {
        dp_device device = round % 2 == 0 ? host : dp_local_device(ctx, 1);
        dp_tensor t = view_of_buffer(scope, device, DP_I16), out;
        random_bytes(&random, t.data, 2048);
        random_shape(&random, &t);
        if (random_strides(&random, true, &t) == 0) {
            continue;
        }
        CHECK_OK(dp_contiguous(scope, &t, &out));
        CHECK_OK(dp_wait(ctx));
        CHECK(dp_is_contiguous(&out) && same_device(out.device, device));
        CHECK((out.data == t.data) == dp_is_contiguous(&t));
        check_shape(&out, t.ndim, t.shape, NULL);
        check_same_elements(&out, &t);
    }
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- cast ------------------------------------------------------------------------------------ */

#define CAST_COUNT 70000

/* clang-format off */
static const double hard_doubles[] = {
    0.0, -0.0, 0.5, -0.5, 0.99999999999999989, 1.0, -1.0, 1.5, 2.5, -1.5, 127.0, 127.5, 128.0,
    -128.0, -128.5, -129.0, 255.0, 255.9, 256.0, -0.9, -1e-300, 1e-300, 32767.0, 32767.9,
    32768.0, -32768.0, -32768.9, -32769.0, 65504.0, 65519.9, 65520.0, 65536.0, 2147483647.0,
    2147483647.5, 2147483648.0, -2147483648.0, -2147483648.9, -2147483649.0, 4294967296.0,
    9007199254740993.0, 9223372036854774784.0, 9223372036854775808.0, 9223372036854777856.0,
    -9223372036854775808.0, -9223372036854777856.0, 1e30, -1e30, 3.4028234663852886e38,
    3.4028235677973366e38, 1e39, 1e308, -1e308, 5.9604644775390625e-8, 2.98023223876953125e-8,
    2.9802322387695315e-8, 1e-45, 7e-46, 1.0004882812500002, 1.00048828125, 1.0014648437500002,
    1.00390625, 1.00390625000001, 1.01171875
};
/* clang-format on */
#define HARD_COUNT (sizeof hard_doubles / sizeof hard_doubles[0])

/* clang-format off */
static const int64_t hard_integers[] = {
    0, 1, -1, 2, 127, 128, -128, -129, 255, 256, 32767, 32768, -32768, -32769, 65504, 65519,
    65520, 65536, 16777215, 16777216, 16777217, 16777219, 2147483647, 2147483648, -2147483648,
    -2147483649, 9007199254740991, 9007199254740993, -9007199254740993, INT64_MAX,
    INT64_MAX - 1, INT64_MIN, INT64_MIN + 1
};
/* clang-format on */
#define HARD_INTEGER_COUNT (sizeof hard_integers / sizeof hard_integers[0])

/* Random bits, and before them the numbers at which conversions go wrong. Small dtypes: all. */
static void fill_patterns(dp_dtype dtype, unsigned char *out)
{
    size_t bytes = dp_dtype_bytes(dtype);
    uint64_t random = test_seed();
    random_bytes(&random, out, CAST_COUNT * bytes);
    for (size_t i = 0; i < CAST_COUNT && bytes == 2; i++) {
        uint16_t bits = (uint16_t)i;
        memcpy(out + 2 * i, &bits, 2);
    }
    for (size_t i = 0; i < CAST_COUNT && bytes == 1; i++) {
        out[i] = (unsigned char)(dtype == DP_BOOL ? i & 1 : i & 255);
    }
    for (size_t i = 0; i < HARD_COUNT && number_is_float(dtype); i++) {
        put_f64(dtype, out, i, hard_doubles[i]);
    }
    for (size_t i = 0; i < HARD_INTEGER_COUNT && bytes >= 4 && !number_is_float(dtype); i++) {
        put(dtype, out, i, hard_integers[i]);
    }
    for (size_t i = HARD_COUNT; i < CAST_COUNT / 2 && bytes >= 4; i++) {
        double spread = ldexp((double)(int32_t)test_random(&random), (int)(i % 80) - 60);
        put_f64(dtype, out, i, spread);
    }
}

static void check_cast(dp_ctx *ctx, dp_dtype to, dp_dtype from)
{
    const size_t bytes = CAST_COUNT * 8;
    unsigned char *src = malloc(bytes), *dst = malloc(bytes), *want = malloc(bytes);
    char what[32];
    CHECK(src != NULL && dst != NULL && want != NULL);
    fill_patterns(from, src);
    snprintf(what, sizeof what, "%s from %s", dp_dtype_name(to), dp_dtype_name(from));
    for (size_t i = 0; i < CAST_COUNT; i++) {
        put(to, want, i, number_get(from, src, i));
    }
    dp_tensor x = dp_wrap_const(src, from, 1, (int64_t[]){CAST_COUNT});
    dp_tensor y = dp_wrap(dst, to, 1, (int64_t[]){CAST_COUNT});
    memset(dst, 0x5a, bytes);
    CHECK_OK(dp_cast(ctx, &y, &x));
    check_elements(to, dst, want, CAST_COUNT, what);
    free(src);
    free(dst);
    free(want);
}

static void check_casts_from(dp_dtype from)
{
    dp_ctx *ctx = open_cpus(2);
    for (int to = 0; to < DP_DTYPE_COUNT; to++) {
        check_cast(ctx, (dp_dtype)to, from);
    }
    dp_close(ctx);
}

TEST(cast_from_f32)
{
    check_casts_from(DP_F32);
}

TEST(cast_from_f64)
{
    check_casts_from(DP_F64);
}

TEST(cast_from_f16)
{
    check_casts_from(DP_F16);
}

TEST(cast_from_bf16)
{
    check_casts_from(DP_BF16);
}

TEST(cast_from_i64)
{
    check_casts_from(DP_I64);
}

TEST(cast_from_i32)
{
    check_casts_from(DP_I32);
}

TEST(cast_from_small_integers)
{
    check_casts_from(DP_I16);
    check_casts_from(DP_I8);
    check_casts_from(DP_U8);
    check_casts_from(DP_BOOL);
}

TEST(cast_of_any_count_and_alignment)
{
    float from[80];
    uint16_t to[80], want;
    dp_ctx *ctx = open_cpus(1);
    for (int i = 0; i < 80; i++) {
        from[i] = (float)i + 0.25f;
    }
    for (size_t count = 0; count <= 70; count++) {
        for (size_t offset = 0; offset < 5; offset++) {
            memset(to, 0x5a, sizeof to);
            dp_tensor x = dp_wrap(from + offset, DP_F32, 1, (int64_t[]){(int64_t)count});
            dp_tensor y = dp_wrap(to + offset, DP_BF16, 1, (int64_t[]){(int64_t)count});
            CHECK_OK(dp_cast(ctx, &y, &x));
            for (size_t i = 0; i < 80; i++) {
                want = i >= offset && i < offset + count ? number_to_bf16((number)from[i]) : 0x5a5a;
                CHECK_INT(to[i], want);
            }
        }
    }
    dp_close(ctx);
}

/* The stack below is full of them. */
static double leave_nans(int frames)
{
    volatile double room[256];
    for (int i = 0; i < 256; i++) {
        room[i] = (double)NAN;
    }
    return frames > 0 ? leave_nans(frames - 1) + room[0] : room[0];
}

/* Only what is cast counts, and not what lies behind it by chance: a program may have set a trap
   for each NaN. */
TEST(a_cast_of_few_reads_nothing_else)
{
    const double from[3] = {1, -2, 3};
    int32_t to[3] = {0};
    dp_ctx *ctx = open_cpus(1);
    dp_tensor x = dp_wrap_const(from, DP_F64, DP_SHAPE(3)), y = dp_wrap(to, DP_I32, DP_SHAPE(3));
    CHECK(isnan(leave_nans(32)));
    feclearexcept(FE_ALL_EXCEPT);
    CHECK_OK(dp_cast(ctx, &y, &x));
    CHECK_INT(fetestexcept(FE_INVALID), 0);
    CHECK(to[0] == 1 && to[1] == -2 && to[2] == 3);
    dp_close(ctx);
}

TEST(cast_takes_any_strides)
{
    const size_t bytes = ROOM * sizeof(int16_t);
    float *from = test_room(ROOM * sizeof *from);
    int16_t *to = test_room(bytes), *want = test_room(bytes);
    dp_ctx *ctx = open_cpus(2);
    uint64_t random = test_seed();
    for (int i = 0; i < ROOM; i++) {
        from[i] = (float)i * 0.7f;
    }
    for (int round = 0; round < 200 / test_stride(); round++) {
        dp_tensor x = dp_wrap_const(from, DP_F32, 0, NULL), y = dp_wrap(to, DP_I16, 0, NULL);
        random_shape(&random, &x);
        y.ndim = x.ndim;
        memcpy(y.shape, x.shape, sizeof y.shape);
        if (random_strides(&random, true, &x) == 0 || random_strides(&random, false, &y) == 0) {
            continue;
        }
        memset(to, 0x5a, bytes);
        memset(want, 0x5a, bytes);
        walk w = walk_start(&y), v = walk_start(&x);
        for (; !w.done; walk_next(&w, &y), walk_next(&v, &x)) {
            put(DP_I16, want, (size_t)w.offset, (number)from[v.offset]);
        }
        CHECK_OK(dp_cast(ctx, &y, &x));
        CHECK_BYTES(to, want, bytes);
    }
    dp_close(ctx);
}

/* It is cast where it is read, whatever the strides. */
TEST(cast_goes_from_one_device_to_another)
{
    const double numbers[6] = {1, -2, 3, 4, 5, 6.5};
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int from = -1; from < 2; from++) {
        dp_device devices[2];
        dp_tensor x, y, turned, part;
        float got[12];
        for (int i = 0; i < 2; i++)
            devices[i] = from + i < 0 || from + i > 1 ? host : dp_local_device(ctx, from + i);
        CHECK_OK(dp_tensor_from(scope, devices[0], numbers, DP_F64, DP_SHAPE(2, 3), &x));
        CHECK_OK(dp_transpose(&x, 0, 1, &turned));
        CHECK_OK(dp_tensor_new(scope, devices[1], DP_F32, DP_SHAPE(3, 4), &y));
        CHECK_OK(dp_fill(ctx, &y, dp_float(9)));
        CHECK_OK(dp_narrow(&y, 1, 1, 2, &part));
        CHECK_OK(dp_cast(ctx, &part, &turned));
        CHECK_OK(dp_read(ctx, &y, got, sizeof got));
        for (int k = 0; k < 12; k++) {
            int row = k / 4, col = k % 4;
            CHECK_F64(got[k], col == 0 || col == 3 ? 9 : numbers[3 * (col - 1) + row], 0);
        }
    }
    dp_close(ctx);
}

TEST(cast_between_equal_dtypes_copies_all_bits)
{
    const uint32_t bits[3] = {0x7fa00001, 0x80000000, 0xff800000}; /* a NaN that signals */
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor x, y;
    uint32_t got[3];
    CHECK_OK(dp_tensor_from(scope, host, bits, DP_F32, DP_SHAPE(3), &x));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(3), &y));
    CHECK_OK(dp_cast(ctx, &y, &x));
    CHECK_OK(dp_read(ctx, &y, got, sizeof got));
    CHECK_BYTES(got, bits, sizeof bits);
    dp_close(ctx);
}

TEST(a_tensor_goes_to_another_device_and_dtype)
{
    const float numbers[6] = {1, -2, 3, 4, 5, 6.5F};
    const double want[6] = {1, 4, -2, 5, 3, 6.5};
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_device second = dp_local_device(ctx, 1);
    dp_tensor x, turned, y;
    double got[6];
    CHECK_OK(dp_tensor_from(scope, host, numbers, DP_F32, DP_SHAPE(2, 3), &x));
    CHECK_OK(dp_transpose(&x, 0, 1, &turned));
    CHECK_OK(dp_tensor_to(scope, second, DP_F64, &turned, &y));
    CHECK(y.device.index == second.index && y.device.backend == second.backend);
    CHECK(y.dtype == DP_F64 && dp_is_contiguous(&y));
    check_shape(&y, 2, (int64_t[]){3, 2}, NULL);
    CHECK_OK(dp_read(ctx, &y, got, sizeof got));
    CHECK_BYTES(got, want, sizeof want);
    CHECK_OK(dp_tensor_to(scope, host, DP_F32, &x, &y)); /* new memory, also where nothing moves */
    CHECK(y.data != x.data && !y.read_only);
    CHECK_OK(dp_tensor_to(scope, host, DP_F64, &x, &x));
    CHECK_INT(x.dtype, DP_F64);
    CHECK_ERROR(dp_tensor_to(scope, host, DP_F64, NULL, &x), DP_ERR_INVALID,
                "dp_tensor_to: from is NULL");
    dp_close(ctx);
}

typedef struct pieces { /* what came so far */
    uint8_t bytes[256];
    size_t used, count, largest;
    size_t fails_at;
} pieces;

static dp_status take_piece(const dp_tensor *piece, size_t bytes, void *user)
{
    pieces *all = user;
    walk w = walk_start(piece);
    CHECK_INT(bytes, (size_t)dp_tensor_count(piece) * 2);
    all->largest = bytes > all->largest ? bytes : all->largest;
    if (++all->count == all->fails_at)
        return dp_error(DP_ERR_USER, "the disk is full");
    for (; !w.done; walk_next(&w, piece)) {
        memcpy(all->bytes + all->used, (const int16_t *)piece->data + w.offset, 2);
        all->used += 2;
    }
    return DP_OK;
}

TEST(a_tensor_is_walked_over_in_pieces)
{
    const struct {
        size_t most, largest, count;
    } cases[] = {{1000, 60, 1}, {60, 60, 1}, {59, 40, 2}, {20, 20, 3}, {19, 16, 6}, {2, 2, 30}};
    int16_t data[30], turned_data[30];
    dp_tensor x = dp_wrap(data, DP_I16, DP_SHAPE(3, 5, 2)), turned;
    for (int i = 0; i < 30; i++)
        data[i] = (int16_t)i;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        pieces all = {.count = 0};
        CHECK_OK(dp_tensor_pieces(&x, cases[i].most, take_piece, &all));
        CHECK_INT(all.used, sizeof data);
        CHECK_BYTES(all.bytes, data, sizeof data);
        CHECK_INT(all.largest, cases[i].largest);
        CHECK_INT(all.count, cases[i].count);
    }
    pieces all = {.fails_at = 0};
    CHECK_OK(dp_transpose(&x, 0, 2, &turned));
    walk w = walk_start(&turned);
    for (int i = 0; !w.done; walk_next(&w, &turned), i++)
        turned_data[i] = data[w.offset];
    CHECK_OK(dp_tensor_pieces(&turned, 6, take_piece, &all));
    CHECK_BYTES(all.bytes, turned_data, sizeof turned_data);
    all = (pieces){.fails_at = 2};
    CHECK_ERROR(dp_tensor_pieces(&x, 20, take_piece, &all), DP_ERR_USER, "the disk is full");
    CHECK_INT(all.count, 2);
    CHECK_ERROR(dp_tensor_pieces(&x, 1, take_piece, &all), DP_ERR_INVALID,
                "dp_tensor_pieces: 1 bytes do not hold an element of i16");
    CHECK_ERROR(dp_tensor_pieces(&x, 2, NULL, &all), DP_ERR_INVALID,
                "dp_tensor_pieces: fn is NULL");
}

TEST(shapes_are_the_same_whatever_else_differs)
{
    float data[6];
    dp_tensor x = dp_wrap(data, DP_F32, DP_SHAPE(2, 3)), y = dp_wrap(data, DP_F16, DP_SHAPE(2, 3));
    dp_tensor turned, flat = dp_wrap(data, DP_F32, DP_SHAPE(6)), wrong = x;
    CHECK_OK(dp_transpose(&x, 0, 1, &turned));
    wrong.ndim = 9;
    CHECK(dp_same_shape(&x, &y) && !dp_same_shape(&x, &turned) && !dp_same_shape(&x, &flat));
    CHECK(!dp_same_shape(&wrong, &wrong) && !dp_same_shape(&x, NULL));
}

TEST(dtypes_are_floats_or_not)
{
    for (int i = -1; i <= DP_DTYPE_COUNT; i++)
        CHECK_INT(dp_dtype_is_float((dp_dtype)i),
                  i == DP_F32 || i == DP_F64 || i == DP_F16 || i == DP_BF16);
}

TEST(cast_refuses_overlap_and_other_shapes)
{
    dp_ctx *ctx = open_cpus(1);
    float data[8] = {0};
    dp_tensor x = dp_wrap(data, DP_F32, 1, (int64_t[]){4});
    dp_tensor half = dp_wrap(data, DP_F16, 1, (int64_t[]){4});
    dp_tensor tail = dp_wrap(data + 2, DP_I32, 1, (int64_t[]){4});
    dp_tensor other = dp_wrap(data + 4, DP_F16, 1, (int64_t[]){3});
    dp_tensor flat = dp_wrap(data + 4, DP_F16, 2, (int64_t[]){1, 4});
    CHECK_ERROR(dp_cast(ctx, &half, &x), DP_ERR_INVALID, "dp_cast: ");
    CHECK_ERROR(dp_cast(ctx, &x, &half), DP_ERR_INVALID, "dp_cast: ");
    CHECK_ERROR(dp_cast(ctx, &tail, &x), DP_ERR_INVALID, "dp_cast: ");
    CHECK_INT(dp_status_class(dp_cast(ctx, &other, &x)), DP_CLASS_CALL);
    CHECK_INT(dp_status_class(dp_cast(ctx, &flat, &x)), DP_CLASS_CALL);
    dp_close(ctx);
}

/* ---- axpby ----------------------------------------------------------------------------------- */

enum { AXPBY_COUNT = 5001 };

static void check_axpby(dp_ctx *ctx, dp_dtype dtype, double a, double b, bool with_y, int out_is)
{
    static unsigned char x[AXPBY_COUNT * 8], y[AXPBY_COUNT * 8], z[AXPBY_COUNT * 8],
        want[AXPBY_COUNT * 8];
    uint64_t random = test_seed();
    for (size_t i = 0; i < AXPBY_COUNT; i++) {
        double p = ldexp((double)(int64_t)test_random(&random), -62 + (int)(i % 9));
        double q = ldexp((double)(int64_t)test_random(&random), -60 - (int)(i % 7));
        put_f64(dtype, x, i, i < HARD_COUNT ? hard_doubles[i] : p);
        put_f64(dtype, y, i, q);
        number sum = number_multiply(dtype, (number)a, number_get(dtype, x, i));
        if (with_y) {
            sum =
                number_add(dtype, sum, number_multiply(dtype, (number)b, number_get(dtype, y, i)));
        }
        put(dtype, want, i, sum);
    }
    dp_tensor tx = dp_wrap(x, dtype, 1, (int64_t[]){AXPBY_COUNT});
    dp_tensor ty = dp_wrap(y, dtype, 1, (int64_t[]){AXPBY_COUNT});
    dp_tensor tz = dp_wrap(z, dtype, 1, (int64_t[]){AXPBY_COUNT});
    const dp_tensor *out = out_is == 0 ? &tx : out_is == 1 ? &ty : &tz;
    CHECK_OK(dp_axpby(ctx, a, &tx, b, with_y ? &ty : NULL, out));
    check_elements(dtype, out->data, want, AXPBY_COUNT, dp_dtype_name(dtype));
}

TEST(axpby_rounds_each_product_and_the_sum)
{
    const double factors[][2] = {{1.0, 1.0},  {0.1, 0.9},    {-2.0, 1.0 / 3.0},  {0.0, 1.0},
                                 {1.0, -1.0}, {1e30, 1e-30}, {(double)NAN, 1.0}, {1.0, 0.0}};
    const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    dp_ctx *ctx = open_cpus(2);
    for (size_t i = 0; i < 4; i++) {
        for (size_t k = 0; k < sizeof factors / sizeof factors[0]; k++) {
            for (int out_is = 0; out_is < 3; out_is++) {
                check_axpby(ctx, dtypes[i], factors[k][0], factors[k][1], true, out_is);
                check_axpby(ctx, dtypes[i], factors[k][0], (double)NAN, false, out_is);
            }
        }
    }
    dp_close(ctx);
}

TEST(axpby_takes_any_strides)
{
    const size_t bytes = ROOM * sizeof(float);
    float *x = test_room(bytes), *y = test_room(bytes);
    float *z = test_room(bytes), *want = test_room(bytes);
    dp_ctx *ctx = open_cpus(2);
    uint64_t random = test_seed();
    for (int i = 0; i < ROOM; i++) {
        x[i] = (float)i;
        y[i] = (float)(2 * i + 1);
    }
    for (int round = 0; round < 200 / test_stride(); round++) {
        dp_tensor tx = dp_wrap_const(x, DP_F32, 0, NULL), ty, tz;
        random_shape(&random, &tx);
        ty = tz = tx;
        ty.data = y;
        tz.data = z;
        tz.read_only = false;
        if (random_strides(&random, true, &tx) == 0 || random_strides(&random, true, &ty) == 0 ||
            random_strides(&random, false, &tz) == 0) {
            continue;
        }
        memset(z, 0x5a, bytes);
        memcpy(want, z, bytes);
        walk i = walk_start(&tx), k = walk_start(&ty), o = walk_start(&tz);
        for (; !o.done; walk_next(&i, &tx), walk_next(&k, &ty), walk_next(&o, &tz)) {
            want[o.offset] = 2.0f * x[i.offset] - y[k.offset];
        }
        CHECK_OK(dp_axpby(ctx, 2.0, &tx, -1.0, &ty, &tz));
        CHECK_BYTES(z, want, bytes);
    }
    dp_close(ctx);
}

TEST(axpby_refuses_integers_overlap_and_other_shapes)
{
    dp_ctx *ctx = open_cpus(1);
    float data[16] = {0};
    for (int i = DP_I64; i < DP_DTYPE_COUNT; i++) {
        dp_tensor t = dp_wrap(data, (dp_dtype)i, 1, (int64_t[]){4});
        CHECK_INT(dp_status_class(dp_axpby(ctx, 1.0, &t, 1.0, &t, &t)), DP_CLASS_CALL);
        CHECK(strncmp(dp_last_error(), "dp_axpby: ", 10) == 0);
    }
    dp_tensor x = dp_wrap(data, DP_F32, 1, (int64_t[]){4});
    dp_tensor shifted = dp_wrap(data + 1, DP_F32, 1, (int64_t[]){4});
    dp_tensor shorter = dp_wrap(data + 8, DP_F32, 1, (int64_t[]){3});
    dp_tensor wider = dp_wrap(data + 8, DP_F64, 1, (int64_t[]){4});
    CHECK_ERROR(dp_axpby(ctx, 1.0, &x, 1.0, NULL, &shifted), DP_ERR_INVALID, "dp_axpby: ");
    CHECK_ERROR(dp_axpby(ctx, 1.0, &x, 1.0, &shifted, &x), DP_ERR_INVALID, "dp_axpby: ");
    CHECK_INT(dp_status_class(dp_axpby(ctx, 1.0, &x, 1.0, &shorter, &x)), DP_CLASS_CALL);
    CHECK_INT(dp_status_class(dp_axpby(ctx, 1.0, &x, 1.0, &x, &shorter)), DP_CLASS_CALL);
    CHECK_INT(dp_status_class(dp_axpby(ctx, 1.0, &x, 1.0, &wider, &x)), DP_CLASS_CALL);
    CHECK_INT(dp_status_class(dp_axpby(ctx, 1.0, &x, 1.0, &x, &wider)), DP_CLASS_CALL);
    dp_close(ctx);
}

/* ---- stats ----------------------------------------------------------------------------------- */

TEST(stats_sum_squares_of_every_floating_dtype)
{
    static unsigned char data[5000 * 8];
    const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    dp_ctx *ctx = open_cpus(2);
    uint64_t random = test_seed();
    for (size_t d = 0; d < 4; d++) {
        for (int64_t count = 0; count <= 5000; count = count * 2 + 1) {
            double want = 0.0;
            for (size_t i = 0; i < (size_t)count; i++) {
                put_f64(dtypes[d], data, i, ldexp((double)(int32_t)test_random(&random), -28));
                double n = (double)number_get(dtypes[d], data, i);
                want += n * n;
            }
            dp_tensor t = dp_wrap_const(data, dtypes[d], 1, &count);
            dp_stats stats = {.sum_squares = -1.0};
            CHECK_OK(dp_tensor_stats(ctx, &t, &stats));
            CHECK_F64(stats.sum_squares, want, want * 1e-12);
            CHECK(stats.all_finite);
        }
    }
    dp_close(ctx);
}

TEST(stats_see_every_element_that_is_not_finite)
{
    static float data[1000];
    const float odd[] = {INFINITY, -INFINITY, NAN};
    dp_ctx *ctx = open_cpus(2);
    dp_tensor t = dp_wrap_const(data, DP_F32, 1, (int64_t[]){1000});
    dp_stats stats;
    for (int at = 0; at < 1000; at += 37) {
        for (int k = 0; k < 3; k++) {
            data[at] = odd[k];
            CHECK_OK(dp_tensor_stats(ctx, &t, &stats));
            CHECK(!stats.all_finite);
            data[at] = 3e38f; /* large is not infinite, and its square fits */
            CHECK_OK(dp_tensor_stats(ctx, &t, &stats));
            CHECK(stats.all_finite && isfinite(stats.sum_squares));
            data[at] = 0.0f;
        }
    }
    double large = 1e200;
    t = dp_wrap(&large, DP_F64, 0, NULL);
    CHECK_OK(dp_tensor_stats(ctx, &t, &stats));
    CHECK(stats.all_finite && isinf(stats.sum_squares));
    dp_close(ctx);
}

TEST(stats_see_what_is_not_finite_in_every_dtype)
{
    const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < 4; i++) {
        unsigned char data[8 * 8];
        const double odd[] = {(double)INFINITY, (double)-INFINITY, (double)NAN};
        for (size_t k = 0; k < 3; k++) {
            memset(data, 0, sizeof data);
            put_f64(dtypes[i], data, 7, odd[k]);
            dp_tensor t = dp_wrap(data, dtypes[i], 1, (int64_t[]){8});
            dp_stats stats;
            CHECK_OK(dp_tensor_stats(ctx, &t, &stats));
            CHECK(!stats.all_finite);
        }
    }
    dp_close(ctx);
}

static double sum_with(int device_count, int thread_count, const dp_tensor *tensor)
{
    dp_ctx *ctx;
    dp_stats stats;
    CHECK_OK(
        dp_open(&(dp_config){.device_count = device_count, .thread_count = thread_count}, &ctx));
    CHECK_OK(dp_tensor_stats(ctx, tensor, &stats));
    dp_close(ctx);
    return stats.sum_squares;
}

TEST(stats_have_the_same_bits_whatever_the_threads)
{
    enum { count = (1 << 20) + 3 };
    float *data = test_room(count * sizeof *data);
    uint64_t random = test_seed();
    for (int i = 0; i < count; i++) {
        data[i] = (float)ldexp((double)(int32_t)test_random(&random), -25);
    }
    for (int64_t n = count; n > 10; n = n * 2 / 3) {
        dp_tensor t = dp_wrap_const(data, DP_F32, 1, &n);
        double one = sum_with(1, 1, &t);
        const int devices[] = {2, 3, 8};
        for (int i = 0; i < 3; i++) {
            double sum = sum_with(devices[i], devices[i], &t);
            CHECK_BYTES(&sum, &one, sizeof sum);
        }
    }
}

TEST(stats_of_a_view)
{
    float data[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    dp_ctx *ctx = open_cpus(1);
    dp_tensor t = dp_wrap(data, DP_F32, 2, (int64_t[]){3, 4}), view;
    dp_stats stats;
    CHECK_OK(dp_narrow(&t, 1, 1, 2, &view));
    CHECK_OK(dp_tensor_stats(ctx, &view, &stats));
    CHECK_F64(stats.sum_squares, 4 + 9 + 36 + 49 + 100 + 121, 0.0);
    CHECK_OK(dp_select(&t, 1, 0, &view));
    CHECK_OK(dp_tensor_stats(ctx, &view, &stats));
    CHECK_F64(stats.sum_squares, 1 + 25 + 81, 0.0);
    dp_close(ctx);
}

/* ---- read and item --------------------------------------------------------------------------- */

TEST(read_gives_row_major_elements)
{
    dp_ctx *ctx = open_cpus(2);
    uint64_t random = test_seed();
    const size_t room = ROOM * sizeof(uint32_t);
    uint32_t *out = test_room(room);
    for (int round = 0; round < 200 / test_stride(); round++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_device device = round % 2 == 0 ? host : dp_local_device(ctx, 1);
        dp_tensor t = view_of_buffer(scope, device, DP_I32);
        random_bytes(&random, t.data, 4096);
        random_shape(&random, &t);
        if (random_strides(&random, true, &t) != 0) {
            size_t bytes = (size_t)dp_tensor_count(&t) * 4;
            memset(out, 0x5a, room);
            t.read_only = true;
            CHECK_OK(dp_read(ctx, &t, out, bytes));
            dp_tensor flat = dp_wrap(out, DP_I32, t.ndim, t.shape);
            check_same_elements(&flat, &t);
            CHECK(bytes == room || out[bytes / 4] == 0x5a5a5a5a);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST(read_wants_the_exact_size)
{
    dp_ctx *ctx = open_cpus(1);
    float data[3] = {1, 2, 3}, out[4] = {9, 9, 9, 9};
    dp_tensor t = dp_wrap(data, DP_F32, 1, (int64_t[]){3});
    const size_t wrong[] = {0, 1, 3, 8, 11, 13, 16, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_ERROR(dp_read(ctx, &t, out, wrong[i]), DP_ERR_INVALID, "dp_read: ");
    }
    CHECK_ERROR(dp_read(ctx, &t, NULL, 12), DP_ERR_INVALID, "dp_read: ");
    CHECK_F64(out[0], 9.0, 0.0);
    CHECK_OK(dp_read(ctx, &t, out, 12));
    CHECK(out[2] == 3.0f && out[3] == 9.0f);
    t.shape[0] = 0;
    CHECK_OK(dp_read(ctx, &t, NULL, 0));
    dp_close(ctx);
}

TEST(item_is_the_number)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    double item = 0.0;
    CHECK_OK(dp_item(ctx, dp_int(-7), &item));
    CHECK_F64(item, -7.0, 0.0);
    CHECK_OK(dp_item(ctx, dp_float(2.5), &item));
    CHECK_F64(item, 2.5, 0.0);
    CHECK_OK(dp_item(ctx, dp_bool(true), &item));
    CHECK_F64(item, 1.0, 0.0);
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        for (int ndim = 0; ndim <= DP_MAX_DIMS; ndim++) {
            dp_tensor t;
            dp_device device = ndim % 2 == 0 ? host : dp_local_device(ctx, 1);
            CHECK_OK(dp_tensor_new(scope, device, (dp_dtype)dtype, ndim,
                                   (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1}, &t));
            CHECK_OK(dp_fill(ctx, &t, dp_int(1)));
            CHECK_OK(dp_item(ctx, dp_of(scope, &t), &item));
            CHECK_F64(item, 1.0, 0.0);
        }
    }
    float data[6] = {1, 2, 3, 4, 5, 6};
    dp_tensor t = dp_wrap_const(data, DP_F32, 2, (int64_t[]){2, 3});
    CHECK_OK(dp_narrow(&t, 0, 1, 1, &t));
    CHECK_OK(dp_narrow(&t, 1, 1, 1, &t));
    CHECK_OK(dp_item(ctx, dp_of(scope, &t), &item));
    CHECK_F64(item, 5.0, 0.0);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST(item_refuses_all_else)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    float data[2] = {1, 2};
    dp_tensor two = dp_wrap(data, DP_F32, 1, (int64_t[]){2});
    dp_tensor none = dp_wrap(data, DP_F32, 1, (int64_t[]){0});
    dp_value one = dp_int(1);
    const dp_value wrong[] = {
        dp_none(),
        dp_string(scope, "1"),
        dp_of(scope, &two),
        dp_of(scope, &none),
        dp_list_make(scope, DP_LIST, &one, 1),
        dp_dict_make(scope, NULL, 0),
        dp_opaque(data),
    };
    double item = 77.0;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK_ERROR(dp_item(ctx, wrong[i], &item), DP_ERR_INVALID, "dp_item: ");
    }
    CHECK_ERROR(dp_item(ctx, one, NULL), DP_ERR_INVALID, "dp_item: ");
    CHECK_F64(item, 77.0, 0.0);
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- read-only ------------------------------------------------------------------------------- */

TEST(nobody_writes_through_a_read_only_view)
{
    dp_ctx *ctx = open_cpus(2);
    const float fixed[4] = {1, 2, 3, 4};
    float data[8] = {9, 9, 9, 9, 9, 9, 9, 9};
    int64_t four[] = {4}, eight[] = {8};
    dp_tensor locked = dp_wrap_const(fixed, DP_F32, 1, four);
    dp_tensor open = dp_wrap(data, DP_F32, 1, four), rest = dp_wrap(data + 4, DP_F32, 1, four);
    dp_tensor long_locked = dp_wrap_const(data, DP_F32, 1, eight);
    dp_tensor outs[2] = {open, locked}, parts[2] = {locked, locked};
    dp_tensor as_integers = locked;
    as_integers.dtype = DP_I32;
    CHECK_ERROR(dp_fill(ctx, &locked, dp_int(5)), DP_ERR_INVALID, "dp_fill: ");
    CHECK_ERROR(dp_copy(ctx, &locked, &open, NULL), DP_ERR_INVALID, "dp_copy: ");
    CHECK_ERROR(dp_cast(ctx, &as_integers, &open), DP_ERR_INVALID, "dp_cast: ");
    CHECK_ERROR(dp_axpby(ctx, 1.0, &open, 1.0, &rest, &locked), DP_ERR_INVALID, "dp_axpby: ");
    CHECK_ERROR(dp_axpby(ctx, 2.0, &locked, 0.0, NULL, &locked), DP_ERR_INVALID, "dp_axpby: ");
    CHECK_ERROR(dp_scatter_into(ctx, &long_locked, 0, outs, 2), DP_ERR_INVALID,
                "dp_scatter_into: ");
    CHECK_ERROR(dp_gather_into(ctx, parts, 2, 0, &long_locked), DP_ERR_INVALID, "dp_gather_into: ");
    CHECK_ERROR(dp_replicate_into(ctx, &rest, outs, 2), DP_ERR_INVALID, "dp_replicate_into: ");
    CHECK_ERROR(dp_reduce_add_into(ctx, &rest, 1, &locked), DP_ERR_INVALID, "dp_reduce_add_into: ");
    for (int i = 0; i < 4; i++) {
        CHECK(fixed[i] == (float)(i + 1) && data[i] == 9.0f && data[i + 4] == 9.0f);
    }
    dp_close(ctx);
}

TEST(views_of_what_is_read_only_are_too)
{
    const float fixed[12] = {0};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor t = dp_wrap_const(fixed, DP_F32, 2, (int64_t[]){3, 4}), view;
    CHECK_OK(dp_narrow(&t, 0, 0, 2, &view));
    CHECK(view.read_only);
    CHECK_OK(dp_select(&t, 0, 0, &view));
    CHECK(view.read_only);
    CHECK_OK(dp_transpose(&t, 0, 1, &view));
    CHECK(view.read_only);
    CHECK_OK(dp_reshape(&t, 1, (int64_t[]){12}, &view));
    CHECK(view.read_only);
    CHECK_OK(dp_contiguous(scope, &t, &view));
    CHECK(view.read_only && view.data == fixed);
    CHECK(dp_of(scope, &t).as.t->read_only);
    dp_scope_end(scope);
    dp_close(ctx);
}
