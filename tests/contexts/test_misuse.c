/* test_misuse.c - every function, with every argument wrong in turn: an error of the CALL class, a
   sentence that starts with the function's name, and nothing changed. */

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include "test.h"

/* Wherever a call may write. Filled with 0x5a before each call, and so it must stay. */
static struct outs {
    dp_tensor tensor;
    dp_value value, list;
    const dp_tensor *view;
    double number;
    dp_stats stats;
    dp_info info;
    dp_config config;
    dp_device_info device;
    dp_failure_info failure;
    size_t count;
    int64_t rows[4];
    float data[12], more[12];
} outs;

static int64_t shape_4[] = {4}, shape_2x2[] = {2, 2}, shape_8[] = {8};

static dp_scope *arm(dp_scope *scope)
{
    memset(&outs, 0x5a, sizeof outs);
    (void)dp_error(DP_ERR_USER, "stale");
    return scope;
}

static void check_untouched(int line, const char *name)
{
    const unsigned char *bytes = (const unsigned char *)&outs;
    for (size_t i = 0; i < sizeof outs; i++) {
        if (bytes[i] != 0x5a) {
            test_fail(__FILE__, line, "%s: byte %zu of what it may write to has changed", name, i);
        }
    }
}

static void check_sentence(int line, const char *name, const char *sentence)
{
    size_t count = strlen(name);
    if (sentence == NULL || strncmp(sentence, name, count) != 0 ||
        strncmp(sentence + count, ": ", 2) != 0 || sentence[count + 2] == '\0') {
        test_fail(__FILE__, line, "%s: the sentence is \"%s\"", name, sentence ? sentence : "NULL");
    }
}

static void check_status_of_misuse(int line, const char *name, dp_status status)
{
    if (dp_status_class(status) != DP_CLASS_CALL && status != DP_ERR_NO_MEMORY &&
        status != DP_ERR_NO_DEVICE) {
        test_fail(__FILE__, line, "%s: returns %s; \"%s\"", name, dp_status_name(status),
                  dp_last_error());
    }
}

static void check_rejected(int line, const char *name, dp_status status)
{
    check_status_of_misuse(line, name, status);
    check_sentence(line, name, dp_last_error());
    check_untouched(line, name);
}

static void check_value_rejected(int line, const char *name, dp_value value)
{
    if (value.kind != DP_ERROR) {
        test_fail(__FILE__, line, "%s: gives a value of kind %d", name, value.kind);
    }
    check_status_of_misuse(line, name, (dp_status)value.status);
    check_sentence(line, name, dp_last_error());
    if (value.as.s == NULL || value.as.s[0] == '\0') {
        test_fail(__FILE__, line, "%s: the value has no sentence", name);
    }
    check_untouched(line, name);
}

/* The call is made with these arguments and must be refused. */
#define REJECT(name, ...) (arm(NULL), check_rejected(__LINE__, #name, name(__VA_ARGS__)))
#define REJECT_VALUE(name, ...)                                                                    \
    (arm(NULL), check_value_rejected(__LINE__, #name, name(__VA_ARGS__)))

/* ---- what a right call needs ----------------------------------------------------------------- */

typedef struct kit {
    test_allocator counter;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_tensor x, y, out, more, locked; /* f32[4]; out and more lie in what must stay untouched */
    dp_value number, tensor, list;
    dp_part parts[3];
    float from[12];
} kit;

static void kit_open(kit *k, int device_count)
{
    *k = (kit){.from = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}};
    CHECK_OK(dp_open(
        &(dp_config){.device_count = device_count, .allocator = test_allocator_of(&k->counter)},
        &k->ctx));
    k->scope = dp_scope_begin(k->ctx);
    k->x = dp_wrap(k->from, DP_F32, 1, shape_4);
    k->y = dp_wrap(k->from + 4, DP_F32, 1, shape_4);
    k->out = dp_wrap(outs.data, DP_F32, 1, shape_4);
    k->more = dp_wrap(outs.more, DP_F32, 1, shape_4);
    k->locked = dp_wrap_const(k->from, DP_F32, 1, shape_4);
    k->number = dp_int(1);
    k->tensor = dp_of(k->scope, &k->x);
    k->list = dp_list_make(k->scope, DP_LIST, &k->tensor, 1);
    CHECK_INT(k->list.kind, DP_LIST);
    for (int i = 0; i < 3; i++) {
        k->parts[i] = (dp_part){k->from + 4 * i, outs.data + 4 * i, NULL};
    }
}

static atomic_int run_count;

static dp_status count_run(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)scope;
    (void)user;
    atomic_fetch_add(&run_count, 1);
    return DP_OK;
}

/* However much was refused, the context is well and nothing was lost. */
static void kit_close(kit *k)
{
    float sums[3] = {1, 1, 1};
    dp_part parts[3] = {
        {&sums[0], &sums[0], NULL}, {&sums[1], &sums[1], NULL}, {&sums[2], &sums[2], NULL}};
    dp_info info;
    for (int i = 0; i < 12; i++) {
        CHECK_F64(k->from[i], i + 1, 0.0);
    }
    CHECK(!dp_failure(k->ctx, NULL));
    CHECK_OK(dp_info_get(k->ctx, &info));
    CHECK_INT(run_count, 0); /* what was refused was not run */
    CHECK_OK(dp_run(k->ctx, k->scope, count_run, NULL));
    CHECK_INT(run_count, info.local_count);
    run_count = 0;
    CHECK_OK(dp_all_reduce(k->ctx, parts, 1, DP_F32, DP_OP_SUM));
    CHECK_F64(sums[0], info.local_count, 0.0);
    dp_scope_end(k->scope);
    dp_close(k->ctx);
    CHECK_NO_LEAKS(&k->counter);
}

static dp_value an_error(const kit *k)
{
    dp_value value = dp_string(k->scope, NULL);
    CHECK_INT(value.kind, DP_ERROR);
    CHECK_INT(value.status, DP_ERR_INVALID);
    CHECK_STR(value.as.s, dp_last_error());
    return value;
}

/* ---- wrong contexts -------------------------------------------------------------------------- */

static void reject_in_context(dp_ctx *ctx, kit *k)
{
    REJECT(dp_info_get, ctx, &outs.info);
    REJECT(dp_config_get, ctx, &outs.config);
    REJECT(dp_device_info_get, ctx, 0, &outs.device);
    REJECT(dp_use_stream, ctx, 0, NULL);
    REJECT(dp_wait, ctx);
    REJECT(dp_run, ctx, k->scope, count_run, NULL);
    REJECT(dp_fill, ctx, &k->out, dp_int(1));
    REJECT(dp_copy, ctx, &k->out, &k->x, NULL);
    REJECT(dp_cast, ctx, &k->out, &k->x);
    REJECT(dp_axpby, ctx, 1.0, &k->x, 1.0, &k->y, &k->out);
    REJECT(dp_tensor_stats, ctx, &k->x, &outs.stats);
    REJECT(dp_read, ctx, &k->x, outs.data, 16);
    REJECT(dp_item, ctx, k->number, &outs.number);
    REJECT(dp_scatter, ctx, k->scope, k->tensor, NULL, &outs.value);
    REJECT(dp_scatter_kwargs, ctx, k->scope, k->list, dp_dict_make(k->scope, NULL, 0), NULL,
           &outs.value, &outs.list);
    REJECT(dp_gather, ctx, k->scope, k->list, NULL, &outs.value);
    REJECT(dp_replicate, ctx, k->scope, k->tensor, NULL, &outs.value);
    REJECT(dp_reduce_add, ctx, k->scope, k->list, NULL, &outs.value);
    REJECT(dp_scatter_into, ctx, &k->x, 0, &k->out, 1);
    REJECT(dp_gather_into, ctx, &k->x, 1, 0, &k->out);
    REJECT(dp_replicate_into, ctx, &k->x, &k->out, 1);
    REJECT(dp_reduce_add_into, ctx, &k->x, 1, &k->out);
    REJECT(dp_all_reduce, ctx, k->parts, 4, DP_F32, DP_OP_SUM);
    REJECT(dp_all_reduce_scaled, ctx, k->parts, 4, DP_F32, DP_OP_SUM, 1.0);
    REJECT(dp_broadcast, ctx, k->parts, 4, DP_F32, 0);
    REJECT(dp_all_gather, ctx, k->parts, 1, DP_F32);
    REJECT(dp_reduce_scatter, ctx, k->parts, 1, DP_F32, DP_OP_SUM);
    REJECT(dp_all_to_all, ctx, k->parts, 1, DP_F32);
    REJECT(dp_reduce_to, ctx, k->parts, 4, DP_F32, DP_OP_SUM, 0);
    REJECT(dp_gather_to, ctx, k->parts, 1, DP_F32, 0);
    REJECT(dp_scatter_from, ctx, k->parts, 1, DP_F32, 0);
    REJECT(dp_barrier, ctx);
}

static void ignore_in_context(dp_ctx *ctx)
{
    arm(NULL);
    CHECK(dp_scope_begin(ctx) == NULL);
    check_sentence(__LINE__, "dp_scope_begin", dp_last_error());
    CHECK(!dp_failure(ctx, &outs.failure));
    CHECK(dp_local_device(ctx, 0).backend == -1 && dp_local_device(ctx, 0).index == -1);
    CHECK(dp_local_stream(ctx, 0) == NULL);
    dp_abort(ctx, DP_ERR_ABORTED, "nobody");
    check_untouched(__LINE__, "calls without a context");
}

TEST(no_context_at_all)
{
    kit k;
    kit_open(&k, 3);
    reject_in_context(NULL, &k);
    ignore_in_context(NULL);
    kit_close(&k);
}

/* The library knows its contexts, and looks at nothing else. */
TEST(other_memory_is_not_taken_for_a_context)
{
    static uint64_t zeros[512], ones[512];
    static char text[] = "this is no context";
    kit k;
    kit_open(&k, 3);
    memset(ones, 0xff, sizeof ones);
    void *const wrong[] = {zeros, ones, text, &k, k.scope};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        reject_in_context(wrong[i], &k);
        ignore_in_context(wrong[i]);
    }
    kit_close(&k);
}

static const int wrong_ranks[] = {-1, 3, 64, INT_MAX, INT_MIN};
#define RANK_COUNT (sizeof wrong_ranks / sizeof wrong_ranks[0])

TEST(context_calls)
{
    kit k;
    kit_open(&k, 3);
    REJECT(dp_info_get, k.ctx, NULL);
    REJECT(dp_config_get, k.ctx, NULL);
    REJECT(dp_device_info_get, k.ctx, 0, NULL);
    for (size_t i = 0; i < RANK_COUNT; i++) {
        REJECT(dp_device_info_get, k.ctx, wrong_ranks[i], &outs.device);
        REJECT(dp_use_stream, k.ctx, wrong_ranks[i], NULL);
        CHECK_INT(dp_local_device(k.ctx, wrong_ranks[i]).index, -1);
        CHECK(dp_local_stream(k.ctx, wrong_ranks[i]) == NULL);
    }
    REJECT(dp_run, k.ctx, k.scope, NULL, NULL);
    CHECK(!dp_failure(k.ctx, &outs.failure));
    dp_log_stderr(NULL, NULL);
    kit_close(&k);
}

/* ---- scopes ---------------------------------------------------------------------------------- */

static void call_back(void *user)
{
    (void)user;
}

static void reject_null(int line, const char *name, const void *result)
{
    CHECK(result == NULL);
    check_sentence(line, name, dp_last_error());
}

TEST(calls_with_a_scope)
{
    kit k;
    kit_open(&k, 3);
    dp_pair pair = {"key", dp_int(1)};
    reject_null(__LINE__, "dp_scope_alloc", dp_scope_alloc(arm(NULL), 1));
    reject_null(__LINE__, "dp_scope_child", dp_scope_child(arm(NULL)));
    reject_null(__LINE__, "dp_scope_alloc", dp_scope_alloc(arm(k.scope), SIZE_MAX));
    REJECT(dp_scope_defer, NULL, call_back, NULL);
    REJECT(dp_scope_defer, k.scope, NULL, NULL);
    REJECT(dp_scope_attach, NULL, k.scope);
    REJECT(dp_scope_attach, k.scope, NULL);
    REJECT(dp_scope_attach, k.scope, k.scope);
    REJECT(dp_keep, NULL, k.list, &outs.value);
    REJECT(dp_keep, k.scope, k.list, NULL);
    REJECT(dp_tensor_new, NULL, (dp_device){0, 0}, DP_F32, 1, shape_4, &outs.tensor);
    REJECT(dp_tensor_new, k.scope, (dp_device){0, 0}, DP_F32, 1, NULL, &outs.tensor);
    REJECT(dp_tensor_new, k.scope, (dp_device){0, 0}, DP_F32, 1, shape_4, NULL);
    REJECT(dp_contiguous, NULL, &k.x, &outs.tensor);
    REJECT(dp_contiguous, k.scope, &k.x, NULL);
    REJECT_VALUE(dp_string, NULL, "text");
    REJECT_VALUE(dp_string, k.scope, NULL);
    REJECT_VALUE(dp_of, NULL, &k.x);
    REJECT_VALUE(dp_of, k.scope, NULL);
    REJECT_VALUE(dp_contain, NULL, &(dp_container){.data = k.tensor});
    REJECT_VALUE(dp_contain, k.scope, NULL);
    REJECT_VALUE(dp_list_make, NULL, DP_LIST, &k.number, 1);
    REJECT_VALUE(dp_list_make, k.scope, DP_LIST, NULL, 1);
    REJECT_VALUE(dp_list_make, k.scope, DP_LIST, &k.number, SIZE_MAX);
    REJECT_VALUE(dp_list_make, k.scope, DP_TUPLE, &k.number, (size_t)UINT32_MAX + 1);
    REJECT_VALUE(dp_dict_make, NULL, &pair, 1);
    REJECT_VALUE(dp_dict_make, k.scope, NULL, 1);
    REJECT_VALUE(dp_dict_make, k.scope, &pair, SIZE_MAX);
    REJECT_VALUE(dp_dict_make, k.scope, &pair, (size_t)UINT32_MAX + 1);
    REJECT(dp_collate, NULL, &k.tensor, 1, 1, &outs.value);
    REJECT(dp_collate, k.scope, NULL, 1, 1, &outs.value);
    REJECT(dp_collate, k.scope, &k.tensor, SIZE_MAX, 1, &outs.value);
    REJECT(dp_collate, k.scope, &k.tensor, 1, 1, NULL);
    kit_close(&k);
}

TEST(devices_that_are_not_there)
{
    const dp_device wrong[] = {
        {7, 7}, {-1, -1},           {0, -1},           {0, 1}, {1, 3}, {1, -1}, {-1, 0},
        {2, 0}, {INT_MAX, INT_MAX}, {INT_MIN, INT_MIN}};
    kit k;
    kit_open(&k, 3);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        REJECT(dp_tensor_new, k.scope, wrong[i], DP_F32, 1, shape_4, &outs.tensor);
    }
    kit_close(&k);
}

TEST(constructors)
{
    kit k;
    kit_open(&k, 1);
    const int kinds[] = {DP_NONE, DP_ERROR,  DP_INT, DP_STRING, DP_TENSOR,    DP_CONTAINER,
                         DP_DICT, DP_OPAQUE, 77,     -1,        256 + DP_LIST};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        REJECT_VALUE(dp_list_make, k.scope, (dp_kind)kinds[i], &k.number, 1);
        REJECT_VALUE(dp_list_make, k.scope, (dp_kind)kinds[i], NULL, 0);
    }
    const int pads[] = {-128, -2, 4, 127};
    for (size_t i = 0; i < sizeof pads / sizeof pads[0]; i++) {
        dp_container box = {.data = k.tensor, .pad_dims = (int8_t)pads[i], .stack = true};
        REJECT_VALUE(dp_contain, k.scope, &box);
    }
    REJECT_VALUE(dp_dict_make, k.scope, (dp_pair[]){{NULL, dp_int(1)}}, 1);
    REJECT_VALUE(dp_dict_make, k.scope, ((dp_pair[]){{"twice", dp_int(1)}, {"twice", dp_int(2)}}),
                 2);
    dp_value deep = dp_int(1);
    for (int i = 0; i < DP_MAX_DEPTH; i++) {
        deep = dp_list_make(k.scope, DP_LIST, &deep, 1);
        CHECK_INT(deep.kind, DP_LIST);
    }
    REJECT_VALUE(dp_list_make, k.scope, DP_LIST, &deep, 1);
    REJECT_VALUE(dp_dict_make, k.scope, (&(dp_pair){"deep", deep}), 1);
    REJECT_VALUE(dp_contain, k.scope, (&(dp_container){.data = deep}));
    kit_close(&k);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static const int wrong_dims[] = {1, -2, 8, INT_MAX, INT_MIN};
#define DIM_COUNT (sizeof wrong_dims / sizeof wrong_dims[0])

TEST(views)
{
    kit k;
    kit_open(&k, 1);
    REJECT(dp_narrow, &k.x, 0, 0, 1, NULL);
    REJECT(dp_select, &k.x, 0, 0, NULL);
    REJECT(dp_transpose, &k.x, 0, 0, NULL);
    REJECT(dp_reshape, &k.x, 2, shape_2x2, NULL);
    REJECT(dp_reshape, &k.x, 2, NULL, &outs.tensor);
    REJECT(dp_reshape, &k.x, 1, shape_8, &outs.tensor);
    for (size_t i = 0; i < DIM_COUNT; i++) {
        REJECT(dp_narrow, &k.x, wrong_dims[i], 0, 1, &outs.tensor);
        REJECT(dp_select, &k.x, wrong_dims[i], 0, &outs.tensor);
        REJECT(dp_transpose, &k.x, wrong_dims[i], 0, &outs.tensor);
        REJECT(dp_transpose, &k.x, 0, wrong_dims[i], &outs.tensor);
    }
    const int ndims[] = {-1, 9, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof ndims / sizeof ndims[0]; i++) {
        REJECT(dp_reshape, &k.x, ndims[i], shape_4, &outs.tensor);
        REJECT(dp_tensor_new, k.scope, (dp_device){0, 0}, DP_F32, ndims[i], shape_4, &outs.tensor);
    }
    kit_close(&k);
}

TEST(calls_on_elements)
{
    kit k;
    kit_open(&k, 2);
    dp_stream headless = {.dev = NULL};
    REJECT(dp_copy, k.ctx, &k.out, &k.x, &headless);
    REJECT(dp_tensor_stats, k.ctx, &k.x, NULL);
    REJECT(dp_read, k.ctx, &k.x, NULL, 16);
    REJECT(dp_read, k.ctx, &k.x, outs.data, SIZE_MAX);
    REJECT(dp_item, k.ctx, k.number, NULL);
    REJECT(dp_as_tensor, k.tensor, "x", DP_F32, 1, NULL);
    REJECT(dp_as_tensor, k.tensor, "x", DP_F64, 1, &outs.view);
    REJECT(dp_as_tensor, k.tensor, "x", DP_F32, 2, &outs.view);
    REJECT(dp_as_tensor, k.number, "x", DP_DTYPE_ANY, -1, &outs.view);
    CHECK(strstr(dp_last_error(), "x") != NULL);
    REJECT(dp_as_tensor, k.number, NULL, DP_DTYPE_ANY, -1, &outs.view);
    REJECT(dp_as_tensor, k.tensor, "x", (dp_dtype)77, -1, &outs.view);
    REJECT(dp_as_tensor, k.tensor, "x", DP_DTYPE_ANY, INT_MAX, &outs.view);
    REJECT(dp_as_tensor, k.tensor, "x", DP_DTYPE_ANY, INT_MIN, &outs.view);
    kit_close(&k);
}

/* ---- every place where a tensor goes, with every wrong tensor -------------------------------- */

typedef dp_status (*tensor_fn)(kit *k, const dp_tensor *t);

static dp_status narrow_it(kit *k, const dp_tensor *t)
{
    (void)k;
    return dp_narrow(t, 0, 0, 1, &outs.tensor);
}

static dp_status select_it(kit *k, const dp_tensor *t)
{
    (void)k;
    return dp_select(t, 0, 0, &outs.tensor);
}

static dp_status transpose_it(kit *k, const dp_tensor *t)
{
    (void)k;
    return dp_transpose(t, 0, 0, &outs.tensor);
}

static dp_status reshape_it(kit *k, const dp_tensor *t)
{
    (void)k;
    return dp_reshape(t, 2, shape_2x2, &outs.tensor);
}

static dp_status contiguous_it(kit *k, const dp_tensor *t)
{
    return dp_contiguous(k->scope, t, &outs.tensor);
}

static dp_status of_it(kit *k, const dp_tensor *t)
{
    dp_value value = dp_of(k->scope, t);
    return value.kind == DP_ERROR ? (dp_status)value.status : DP_OK;
}

static dp_status fill_it(kit *k, const dp_tensor *t)
{
    return dp_fill(k->ctx, t, dp_int(1));
}

static dp_status copy_to(kit *k, const dp_tensor *t)
{
    return dp_copy(k->ctx, t, &k->x, NULL);
}

static dp_status copy_from(kit *k, const dp_tensor *t)
{
    return dp_copy(k->ctx, &k->more, t, NULL);
}

static dp_status cast_to(kit *k, const dp_tensor *t)
{
    return dp_cast(k->ctx, t, &k->x);
}

static dp_status cast_from(kit *k, const dp_tensor *t)
{
    return dp_cast(k->ctx, &k->more, t);
}

static dp_status axpby_x(kit *k, const dp_tensor *t)
{
    return dp_axpby(k->ctx, 1.0, t, 1.0, &k->y, &k->more);
}

static dp_status axpby_y(kit *k, const dp_tensor *t)
{
    return t == NULL ? narrow_it(k, t) : dp_axpby(k->ctx, 1.0, &k->x, 1.0, t, &k->more);
}

static dp_status axpby_out(kit *k, const dp_tensor *t)
{
    return dp_axpby(k->ctx, 1.0, &k->x, 1.0, &k->y, t);
}

static dp_status stats_of(kit *k, const dp_tensor *t)
{
    return dp_tensor_stats(k->ctx, t, &outs.stats);
}

static dp_status read_it(kit *k, const dp_tensor *t)
{
    return dp_read(k->ctx, t, outs.more, 16);
}

static dp_status scatter_from_it(kit *k, const dp_tensor *t)
{
    return dp_scatter_into(k->ctx, t, 0, &k->more, 1);
}

static dp_status scatter_to_it(kit *k, const dp_tensor *t)
{
    return dp_scatter_into(k->ctx, &k->x, 0, t, 1);
}

static dp_status gather_from_it(kit *k, const dp_tensor *t)
{
    return dp_gather_into(k->ctx, t, 1, 0, &k->more);
}

static dp_status gather_to_it(kit *k, const dp_tensor *t)
{
    return dp_gather_into(k->ctx, &k->x, 1, 0, t);
}

static dp_status replicate_from_it(kit *k, const dp_tensor *t)
{
    return dp_replicate_into(k->ctx, t, &k->more, 1);
}

static dp_status replicate_to_it(kit *k, const dp_tensor *t)
{
    return dp_replicate_into(k->ctx, &k->x, t, 1);
}

static dp_status reduce_from_it(kit *k, const dp_tensor *t)
{
    return dp_reduce_add_into(k->ctx, t, 1, &k->more);
}

static dp_status reduce_to_it(kit *k, const dp_tensor *t)
{
    return dp_reduce_add_into(k->ctx, &k->x, 1, t);
}

static const struct {
    const char *name;
    tensor_fn call;
    bool knows_devices, writes;
} tensor_calls[] = {
    {"dp_narrow", narrow_it, false, false},
    {"dp_select", select_it, false, false},
    {"dp_transpose", transpose_it, false, false},
    {"dp_reshape", reshape_it, false, false},
    {"dp_of", of_it, false, false},
    {"dp_contiguous", contiguous_it, false, false},
    {"dp_fill", fill_it, true, true},
    {"dp_copy", copy_to, true, true},
    {"dp_copy", copy_from, true, false},
    {"dp_cast", cast_to, true, true},
    {"dp_cast", cast_from, true, false},
    {"dp_axpby", axpby_x, true, false},
    {"dp_axpby", axpby_out, true, true},
    {"dp_axpby", axpby_y, true, false},
    {"dp_tensor_stats", stats_of, true, false},
    {"dp_read", read_it, true, false},
    {"dp_scatter_into", scatter_from_it, true, false},
    {"dp_scatter_into", scatter_to_it, true, true},
    {"dp_gather_into", gather_from_it, true, false},
    {"dp_gather_into", gather_to_it, true, true},
    {"dp_replicate_into", replicate_from_it, true, false},
    {"dp_replicate_into", replicate_to_it, true, true},
    {"dp_reduce_add_into", reduce_from_it, true, false},
    {"dp_reduce_add_into", reduce_to_it, true, true},
};
#define TENSOR_CALL_COUNT (sizeof tensor_calls / sizeof tensor_calls[0])

static void reject_tensor(kit *k, const dp_tensor *t, bool for_all, bool for_writers)
{
    for (size_t i = 0; i < TENSOR_CALL_COUNT; i++) {
        if (for_all || (for_writers ? tensor_calls[i].writes : tensor_calls[i].knows_devices)) {
            arm(NULL);
            dp_status status = tensor_calls[i].call(k, t);
            const char *name = t == NULL && tensor_calls[i].call == axpby_y ? "dp_narrow"
                                                                            : tensor_calls[i].name;
            check_rejected(__LINE__, name, status);
        }
    }
}

TEST(null_for_every_tensor)
{
    kit k;
    kit_open(&k, 1);
    reject_tensor(&k, NULL, true, false);
    kit_close(&k);
}

enum { FORGERIES = 14 };

static dp_tensor forge(dp_tensor t, int number)
{
    switch (number) {
    case 0:
        t.ndim = 9;
        break;
    case 1:
        t.ndim = 200;
        break;
    case 2:
        t.dtype = DP_DTYPE_COUNT;
        break;
    case 3:
        t.dtype = 99;
        break;
    case 4:
        t.dtype = DP_DTYPE_ANY;
        break;
    case 5:
        t.shape[0] = -4;
        break;
    case 6:
        t.shape[0] = INT64_MIN;
        break;
    case 7:
        t.shape[0] = INT64_MAX;
        break;
    case 8:
        t.stride[0] = -1;
        break;
    case 9:
        t.stride[0] = INT64_MAX;
        break;
    case 10:
        t.stride[0] = INT64_MIN;
        break;
    case 11:
        t.stride[0] = INT64_MAX / 8;
        break;
    case 12:
        t.data = NULL;
        break;
    default:
        t.shape[0] = INT64_MAX;
        t.stride[0] = 0;
        break;
    }
    return t;
}

TEST(every_forged_tensor)
{
    kit k;
    kit_open(&k, 1);
    for (int i = 0; i < FORGERIES; i++) {
        dp_tensor t = forge(k.out, i);
        reject_tensor(&k, &t, true, false);
    }
    kit_close(&k);
}

TEST(tensors_of_no_device)
{
    const dp_device wrong[] = {{7, 7}, {-1, -1}, {0, 1}, {0, -1}, {1, 1}, {INT_MAX, INT_MIN}};
    kit k;
    kit_open(&k, 1);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        dp_tensor t = k.out;
        t.device = wrong[i];
        reject_tensor(&k, &t, false, false);
    }
    kit_close(&k);
}

TEST(read_only_tensors)
{
    kit k;
    kit_open(&k, 1);
    dp_tensor t = k.out;
    t.read_only = true;
    reject_tensor(&k, &t, false, true);
    reject_tensor(&k, &k.locked, false, true);
    kit_close(&k);
}

/* ---- every place where a value goes, with every wrong value ---------------------------------- */

typedef dp_status (*value_fn)(kit *k, dp_value v);

static dp_status status_of(dp_value value)
{
    return value.kind == DP_ERROR ? (dp_status)value.status : DP_OK;
}

static dp_status fill_with(kit *k, dp_value v)
{
    return dp_fill(k->ctx, &k->out, v);
}

static dp_status item_of(kit *k, dp_value v)
{
    return dp_item(k->ctx, v, &outs.number);
}

static dp_status keep_it(kit *k, dp_value v)
{
    return dp_keep(k->scope, v, &outs.value);
}

static dp_status tensor_in(kit *k, dp_value v)
{
    (void)k;
    return dp_as_tensor(v, "it", DP_DTYPE_ANY, -1, &outs.view);
}

static dp_status list_of(kit *k, dp_value v)
{
    return status_of(dp_list_make(k->scope, DP_LIST, &v, 1));
}

static dp_status dict_of(kit *k, dp_value v)
{
    dp_pair pair = {"key", v};
    return status_of(dp_dict_make(k->scope, &pair, 1));
}

static dp_status contain_it(kit *k, dp_value v)
{
    dp_container box = {.data = v};
    return status_of(dp_contain(k->scope, &box));
}

static dp_status collate_it(kit *k, dp_value v)
{
    return dp_collate(k->scope, &v, 1, 1, &outs.value);
}

static dp_status scatter_it(kit *k, dp_value v)
{
    return dp_scatter(k->ctx, k->scope, v, NULL, &outs.value);
}

static dp_status scatter_args(kit *k, dp_value v)
{
    return dp_scatter_kwargs(k->ctx, k->scope, v, dp_dict_make(k->scope, NULL, 0), NULL,
                             &outs.value, &outs.list);
}

static dp_status scatter_kwargs(kit *k, dp_value v)
{
    return dp_scatter_kwargs(k->ctx, k->scope, dp_list_make(k->scope, DP_TUPLE, NULL, 0), v, NULL,
                             &outs.value, &outs.list);
}

static dp_status gather_list(kit *k, dp_value v)
{
    return dp_gather(k->ctx, k->scope, v, NULL, &outs.value);
}

static dp_status gather_item(kit *k, dp_value v)
{
    dp_value list = dp_list_make(k->scope, DP_LIST, &v, 1);
    return dp_gather(k->ctx, k->scope, list, NULL, &outs.value);
}

static dp_status replicate_it(kit *k, dp_value v)
{
    return dp_replicate(k->ctx, k->scope, v, NULL, &outs.value);
}

static dp_status reduce_list(kit *k, dp_value v)
{
    return dp_reduce_add(k->ctx, k->scope, v, NULL, &outs.value);
}

static dp_status reduce_item(kit *k, dp_value v)
{
    dp_value list = dp_list_make(k->scope, DP_LIST, &v, 1);
    return dp_reduce_add(k->ctx, k->scope, list, NULL, &outs.value);
}

static const struct {
    const char *name;
    value_fn call;
} value_calls[] = {
    {"dp_fill", fill_with},
    {"dp_item", item_of},
    {"dp_keep", keep_it},
    {"dp_as_tensor", tensor_in},
    {"dp_list_make", list_of},
    {"dp_dict_make", dict_of},
    {"dp_contain", contain_it},
    {"dp_collate", collate_it},
    {"dp_scatter", scatter_it},
    {"dp_scatter_kwargs", scatter_args},
    {"dp_scatter_kwargs", scatter_kwargs},
    {"dp_gather", gather_list},
    {"dp_gather", gather_item},
    {"dp_replicate", replicate_it},
    {"dp_reduce_add", reduce_list},
    {"dp_reduce_add", reduce_item},
};
#define VALUE_CALL_COUNT (sizeof value_calls / sizeof value_calls[0])

static void reject_value(kit *k, dp_value v)
{
    for (size_t i = 0; i < VALUE_CALL_COUNT; i++) {
        arm(NULL);
        dp_status status = value_calls[i].call(k, v);
        check_rejected(__LINE__, value_calls[i].name, status);
    }
}

/* The reason that a value carries is what every call reports. */
TEST(every_error_value)
{
    kit k;
    kit_open(&k, 2);
    dp_value reason = an_error(&k);
    for (size_t i = 0; i < VALUE_CALL_COUNT; i++) {
        arm(NULL);
        dp_status status = value_calls[i].call(&k, reason);
        CHECK_INT(status, reason.status);
        CHECK(strstr(dp_last_error(), "dp_string: ") != NULL);
        check_untouched(__LINE__, value_calls[i].name);
    }
    CHECK_INT(dp_get(reason, "key").kind, DP_ERROR);
    CHECK_INT(dp_at(reason, 0).kind, DP_ERROR);
    kit_close(&k);
}

TEST(error_values_keep_their_status)
{
    const dp_status statuses[] = {DP_ERR_INVALID, DP_ERR_STATE, DP_ERR_UNSUPPORTED, DP_ERR_MISMATCH,
                                  DP_ERR_NO_MEMORY};
    kit k;
    kit_open(&k, 2);
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        dp_value v = {.kind = DP_ERROR, .status = (int8_t)statuses[i], .as.s = "no memory"};
        for (size_t c = 0; c < VALUE_CALL_COUNT; c++) {
            arm(NULL);
            CHECK_ERROR(value_calls[c].call(&k, v), statuses[i], "no memory");
        }
    }
    kit_close(&k);
}

TEST(error_values_without_an_error)
{
    const int statuses[] = {DP_OK, DP_PENDING, 77, -100};
    kit k;
    kit_open(&k, 2);
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        dp_value v = {.kind = DP_ERROR, .status = (int8_t)statuses[i], .as.s = "odd"};
        for (size_t c = 0; c < VALUE_CALL_COUNT; c++) {
            arm(NULL);
            CHECK(value_calls[c].call(&k, v) < 0);
            v.as.s = NULL;
            CHECK(value_calls[c].call(&k, v) < 0);
            check_untouched(__LINE__, value_calls[c].name);
        }
    }
    kit_close(&k);
}

TEST(every_forged_value)
{
    kit k;
    kit_open(&k, 2);
    const dp_value wrong[] = {
        {.kind = 77},
        {.kind = 255, .depth = 255, .count = UINT32_MAX},
        {.kind = DP_STRING},
        {.kind = DP_TENSOR},
        {.kind = DP_CONTAINER, .depth = 1},
        {.kind = DP_LIST, .depth = 1, .count = 1},
        {.kind = DP_TUPLE, .depth = 1, .count = UINT32_MAX},
        {.kind = DP_DICT, .depth = 1, .count = 1},
        {.kind = DP_LIST, .depth = DP_MAX_DEPTH + 1, .count = 1, .as.items = &k.number},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        reject_value(&k, wrong[i]);
    }
    kit_close(&k);
}

TEST(get_and_at_of_what_has_none)
{
    kit k;
    kit_open(&k, 1);
    dp_value dict = dp_dict_make(k.scope, &(dp_pair){"key", dp_int(3)}, 1);
    CHECK_INT(dp_get(dict, "other").kind, DP_NONE);
    CHECK_INT(dp_get(dict, "").kind, DP_NONE);
    CHECK(dp_get(dict, NULL).kind == DP_NONE || dp_get(dict, NULL).kind == DP_ERROR);
    CHECK_INT(dp_at(k.list, 1).kind, DP_NONE);
    CHECK_INT(dp_at(k.list, SIZE_MAX).kind, DP_NONE);
    CHECK_INT(dp_at(k.list, (size_t)UINT32_MAX + 1).kind, DP_NONE);
    const dp_value others[] = {dp_none(), dp_int(1), dp_opaque(&k), k.tensor};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        int got = dp_get(others[i], "key").kind, at = dp_at(others[i], 0).kind;
        CHECK((got == DP_NONE || got == DP_ERROR) && (at == DP_NONE || at == DP_ERROR));
    }
    kit_close(&k);
}

/* ---- scatter, gather and the rest ------------------------------------------------------------ */

static const dp_scatter_config *wrong_cuts(size_t *out_count)
{
    static const int ranks[] = {0, 3}, negative[] = {-1}, good[] = {0, 1};
    static const int64_t minus[] = {5, -1, 0}, short_of[] = {1, 1, 1}, wrap[] = {INT64_MAX, 5, 0};
    static const double none[] = {0, 0, 0}, below[] = {1, -1, 1};
    static double nan_weight[] = {1, 0, 1}, infinite[] = {1, 0, 1};
    nan_weight[1] = (double)NAN;
    infinite[1] = (double)INFINITY;
    static const dp_scatter_config cuts[] = {
        {.cut.split = (dp_split)77},
        {.cut.split = (dp_split)-1},
        {.cut.dim = 1},
        {.cut.dim = -2},
        {.cut.dim = INT_MAX},
        {.cut.dim = INT_MIN},
        {.local_ranks = ranks, .local_rank_count = 2},
        {.local_ranks = negative, .local_rank_count = 1},
        {.local_ranks = good},
        {.local_ranks = good, .local_rank_count = SIZE_MAX},
        {.cut.split = DP_SPLIT_SIZES},
        {.cut = {.split = DP_SPLIT_SIZES, .sizes = minus, .split_count = 3}},
        {.cut = {.split = DP_SPLIT_SIZES, .sizes = short_of, .split_count = 3}},
        {.cut = {.split = DP_SPLIT_SIZES, .sizes = wrap, .split_count = 3}},
        {.cut.split = DP_SPLIT_WEIGHTS},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = none, .split_count = 3}},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = below, .split_count = 3}},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = nan_weight, .split_count = 3}},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = infinite, .split_count = 3}},
        {.cut.split = DP_SPLIT_EQUAL},
        {.cut = {.split = DP_SPLIT_EQUAL, .part_rows = 1}},
        {.cut = {.split = DP_SPLIT_PADDED, .part_rows = 1}},
        {.cut = {.split = DP_SPLIT_PADDED, .part_rows = -1}},
        {.cut = {.split = DP_SPLIT_PADDED, .part_rows = INT64_MIN}},
        {.cut = {.split = DP_SPLIT_PADDED, .sizes = minus, .split_count = 3}},
        {.cut.part_rows = 2},
    };
    *out_count = sizeof cuts / sizeof cuts[0];
    return cuts;
}

TEST(wrong_cuts_of_a_batch)
{
    kit k;
    size_t count;
    const dp_scatter_config *cuts = wrong_cuts(&count);
    kit_open(&k, 3);
    dp_value args = dp_list_make(k.scope, DP_TUPLE, &k.tensor, 1);
    dp_value kwargs = dp_dict_make(k.scope, &(dp_pair){"x", k.tensor}, 1);
    for (size_t i = 0; i < count; i++) {
        REJECT(dp_scatter, k.ctx, k.scope, k.tensor, &cuts[i], &outs.value);
        REJECT(dp_scatter_kwargs, k.ctx, k.scope, args, kwargs, &cuts[i], &outs.value, &outs.list);
        if (cuts[i].cut.dim == 0 && cuts[i].local_ranks == NULL) {
            REJECT(dp_split_rows, 4, 3, &cuts[i].cut, outs.rows, &outs.count);
        }
        if (cuts[i].local_ranks != NULL) {
            REJECT(dp_replicate, k.ctx, k.scope, k.tensor, &cuts[i], &outs.value);
        }
    }
    kit_close(&k);
}

TEST(split_rows)
{
    kit k;
    kit_open(&k, 1);
    REJECT(dp_split_rows, -1, 3, NULL, outs.rows, &outs.count);
    REJECT(dp_split_rows, INT64_MIN, 3, NULL, outs.rows, &outs.count);
    REJECT(dp_split_rows, 4, 0, NULL, outs.rows, &outs.count);
    REJECT(dp_split_rows, 4, SIZE_MAX, NULL, outs.rows, &outs.count);
    REJECT(dp_split_rows, 4, 3, NULL, NULL, &outs.count);
    REJECT(dp_split_rows, 4, 3, NULL, outs.rows, NULL);
    kit_close(&k);
}

TEST(primitives)
{
    kit k;
    kit_open(&k, 2);
    dp_value empty = dp_list_make(k.scope, DP_LIST, NULL, 0);
    dp_gather_config wrong_dim = {.dim = 9}, host_dim = {.dim = INT_MIN, .to_host = true};
    REJECT(dp_scatter, k.ctx, NULL, k.tensor, NULL, &outs.value);
    REJECT(dp_scatter, k.ctx, k.scope, k.tensor, NULL, NULL);
    REJECT(dp_scatter_kwargs, k.ctx, NULL, k.list, k.tensor, NULL, &outs.value, &outs.list);
    REJECT(dp_scatter_kwargs, k.ctx, k.scope, k.list, k.tensor, NULL, NULL, &outs.list);
    REJECT(dp_scatter_kwargs, k.ctx, k.scope, k.list, k.tensor, NULL, &outs.value, NULL);
    REJECT(dp_scatter_kwargs, k.ctx, k.scope, k.number, k.number, NULL, &outs.value, &outs.list);
    REJECT(dp_gather, k.ctx, NULL, k.list, NULL, &outs.value);
    REJECT(dp_gather, k.ctx, k.scope, k.list, NULL, NULL);
    REJECT(dp_gather, k.ctx, k.scope, k.number, NULL, &outs.value);
    REJECT(dp_gather, k.ctx, k.scope, empty, NULL, &outs.value);
    REJECT(dp_gather, k.ctx, k.scope, k.list, &wrong_dim, &outs.value);
    REJECT(dp_gather, k.ctx, k.scope, k.list, &host_dim, &outs.value);
    REJECT(dp_replicate, k.ctx, NULL, k.tensor, NULL, &outs.value);
    REJECT(dp_replicate, k.ctx, k.scope, k.tensor, NULL, NULL);
    REJECT(dp_reduce_add, k.ctx, NULL, k.list, NULL, &outs.value);
    REJECT(dp_reduce_add, k.ctx, k.scope, k.list, NULL, NULL);
    REJECT(dp_reduce_add, k.ctx, k.scope, k.number, NULL, &outs.value);
    REJECT(dp_reduce_add, k.ctx, k.scope, empty, NULL, &outs.value);
    for (size_t i = 0; i < RANK_COUNT; i++) {
        dp_gather_config nowhere = {.local_rank = wrong_ranks[i]};
        REJECT(dp_gather, k.ctx, k.scope, k.list, &nowhere, &outs.value);
        REJECT(dp_reduce_add, k.ctx, k.scope, k.list, &nowhere, &outs.value);
    }
    kit_close(&k);
}

TEST(scopes_of_another_context)
{
    kit k, other;
    kit_open(&k, 2);
    kit_open(&other, 2);
    REJECT(dp_run, k.ctx, other.scope, count_run, NULL);
    REJECT(dp_scatter, k.ctx, other.scope, k.tensor, NULL, &outs.value);
    REJECT(dp_scatter_kwargs, k.ctx, other.scope, k.list, dp_dict_make(k.scope, NULL, 0), NULL,
           &outs.value, &outs.list);
    REJECT(dp_gather, k.ctx, other.scope, k.list, NULL, &outs.value);
    REJECT(dp_replicate, k.ctx, other.scope, k.tensor, NULL, &outs.value);
    REJECT(dp_reduce_add, k.ctx, other.scope, k.list, NULL, &outs.value);
    REJECT(dp_copy, k.ctx, &k.out, &k.x, dp_local_stream(other.ctx, 0));
    REJECT(dp_use_stream, k.ctx, 0, dp_local_stream(other.ctx, 0));
    kit_close(&other);
    kit_close(&k);
}

TEST(into_calls)
{
    kit k;
    kit_open(&k, 2);
    REJECT(dp_scatter_into, k.ctx, &k.x, 0, &k.out, 0);
    REJECT(dp_scatter_into, k.ctx, &k.x, 0, &k.out, SIZE_MAX);
    REJECT(dp_gather_into, k.ctx, &k.x, 0, 0, &k.out);
    REJECT(dp_gather_into, k.ctx, &k.x, SIZE_MAX, 0, &k.out);
    REJECT(dp_replicate_into, k.ctx, &k.x, &k.out, 0);
    REJECT(dp_replicate_into, k.ctx, &k.x, &k.out, SIZE_MAX);
    REJECT(dp_reduce_add_into, k.ctx, &k.x, 0, &k.out);
    REJECT(dp_reduce_add_into, k.ctx, &k.x, SIZE_MAX, &k.out);
    for (size_t i = 0; i < DIM_COUNT; i++) {
        REJECT(dp_scatter_into, k.ctx, &k.x, wrong_dims[i], &k.out, 1);
        REJECT(dp_gather_into, k.ctx, &k.x, 1, wrong_dims[i], &k.out);
    }
    dp_tensor both[2] = {k.out, k.more}, same[2] = {k.out, k.out};
    dp_tensor all = dp_wrap(k.from, DP_F32, 1, shape_8);
    REJECT(dp_scatter_into, k.ctx, &k.x, 0, both, 2); /* 4 rows do not fill 8 */
    REJECT(dp_gather_into, k.ctx, both, 2, 0, &k.out);
    REJECT(dp_scatter_into, k.ctx, &all, 0, same, 2);
    REJECT(dp_replicate_into, k.ctx, &k.x, same, 2);
    REJECT(dp_scatter_into, k.ctx, &k.x, 0, &k.x, 1);
    both[1].dtype = DP_I32;
    REJECT(dp_scatter_into, k.ctx, &all, 0, both, 2);
    REJECT(dp_replicate_into, k.ctx, &k.x, both, 2);
    REJECT(dp_reduce_add_into, k.ctx, both, 2, &k.out);
    kit_close(&k);
}

TEST(values_that_differ)
{
    kit k;
    kit_open(&k, 2);
    dp_tensor wide = dp_wrap(k.from, DP_F32, 2, shape_2x2), other = k.x;
    other.dtype = DP_I32;
    const dp_value pairs[][2] = {
        {k.tensor, k.number},
        {k.tensor, k.list},
        {k.tensor, dp_of(k.scope, &wide)},
        {k.tensor, dp_of(k.scope, &other)},
        {dp_dict_make(k.scope, &(dp_pair){"a", k.tensor}, 1),
         dp_dict_make(k.scope, &(dp_pair){"b", k.tensor}, 1)},
        {dp_dict_make(k.scope, &(dp_pair){"a", k.tensor}, 1), dp_dict_make(k.scope, NULL, 0)},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        dp_value list = dp_list_make(k.scope, DP_LIST, pairs[i], 2);
        CHECK_INT(list.kind, DP_LIST);
        REJECT(dp_gather, k.ctx, k.scope, list, NULL, &outs.value);
        REJECT(dp_reduce_add, k.ctx, k.scope, list, NULL, &outs.value);
        REJECT(dp_collate, k.scope, pairs[i], 2, 1, &outs.value);
    }
    kit_close(&k);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static void reject_parts(kit *k, const dp_part *parts)
{
    REJECT(dp_all_reduce, k->ctx, parts, 4, DP_F32, DP_OP_SUM);
    REJECT(dp_all_reduce_scaled, k->ctx, parts, 4, DP_F32, DP_OP_SUM, 2.0);
    REJECT(dp_broadcast, k->ctx, parts, 4, DP_F32, 0);
    REJECT(dp_all_gather, k->ctx, parts, 1, DP_F32);
    REJECT(dp_reduce_scatter, k->ctx, parts, 1, DP_F32, DP_OP_SUM);
    REJECT(dp_all_to_all, k->ctx, parts, 1, DP_F32);
    REJECT(dp_reduce_to, k->ctx, parts, 4, DP_F32, DP_OP_SUM, 0);
    REJECT(dp_gather_to, k->ctx, parts, 1, DP_F32, 0);
    REJECT(dp_scatter_from, k->ctx, parts, 1, DP_F32, 0);
}

static void reject_count(kit *k, size_t count, dp_dtype dtype)
{
    REJECT(dp_all_reduce, k->ctx, k->parts, count, dtype, DP_OP_MAX);
    REJECT(dp_broadcast, k->ctx, k->parts, count, dtype, 0);
    REJECT(dp_all_gather, k->ctx, k->parts, count, dtype);
    REJECT(dp_reduce_scatter, k->ctx, k->parts, count, dtype, DP_OP_MAX);
    REJECT(dp_all_to_all, k->ctx, k->parts, count, dtype);
    REJECT(dp_reduce_to, k->ctx, k->parts, count, dtype, DP_OP_MAX, 0);
    REJECT(dp_gather_to, k->ctx, k->parts, count, dtype, 0);
    REJECT(dp_scatter_from, k->ctx, k->parts, count, dtype, 0);
}

static void reject_op_and_root(kit *k, int op, int root)
{
    REJECT(dp_all_reduce, k->ctx, k->parts, 4, DP_F32, (dp_op)op);
    REJECT(dp_all_reduce_scaled, k->ctx, k->parts, 4, DP_F32, (dp_op)op, 2.0);
    REJECT(dp_reduce_scatter, k->ctx, k->parts, 1, DP_F32, (dp_op)op);
    REJECT(dp_reduce_to, k->ctx, k->parts, 4, DP_F32, (dp_op)op, 0);
    REJECT(dp_reduce_to, k->ctx, k->parts, 4, DP_F32, DP_OP_SUM, root);
    REJECT(dp_broadcast, k->ctx, k->parts, 4, DP_F32, root);
    REJECT(dp_gather_to, k->ctx, k->parts, 1, DP_F32, root);
    REJECT(dp_scatter_from, k->ctx, k->parts, 1, DP_F32, root);
}

static void reject_collectives(int device_count)
{
    kit k;
    kit_open(&k, device_count);
    reject_parts(&k, NULL);
    const int dtypes[] = {DP_DTYPE_COUNT, DP_DTYPE_ANY, 77, -1, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        reject_count(&k, 1, (dp_dtype)dtypes[i]);
        reject_count(&k, 0, (dp_dtype)dtypes[i]);
    }
    const size_t counts[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2 + 1, SIZE_MAX / 4,
                             SIZE_MAX / 4 + 2};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        reject_count(&k, counts[i], DP_F32);
        reject_count(&k, counts[i], DP_F64);
    }
    reject_count(&k, SIZE_MAX, DP_U8);
    const int numbers[] = {-1, 5, 77, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        reject_op_and_root(&k, numbers[i], numbers[i]);
    }
    reject_op_and_root(&k, 5, device_count);
    for (int dtype = DP_I64; dtype < DP_DTYPE_COUNT; dtype++) {
        REJECT(dp_all_reduce_scaled, k.ctx, k.parts, 1, (dp_dtype)dtype, DP_OP_SUM, 2.0);
    }
    dp_stream headless = {.dev = NULL};
    k.parts[device_count - 1].stream = &headless;
    reject_parts(&k, k.parts);
    kit_close(&k);
}

TEST(collectives_of_several)
{
    reject_collectives(3);
}

TEST(collectives_in_a_world_of_one)
{
    reject_collectives(1);
}

/* Where a pointer matters, NULL is refused, whichever rank's it is. */
static void reject_null_parts(int device_count)
{
    kit k;
    kit_open(&k, device_count);
    for (int i = 0; i < device_count; i++) {
        dp_part parts[3] = {k.parts[0], k.parts[1], k.parts[2]};
        parts[i].recv = NULL;
        REJECT(dp_broadcast, k.ctx, parts, 4, DP_F32, 0);
        REJECT(dp_all_to_all, k.ctx, parts, 1, DP_F32);
        REJECT(dp_scatter_from, k.ctx, parts, 1, DP_F32, 0);
        REJECT(dp_reduce_to, k.ctx, parts, 4, DP_F32, DP_OP_SUM, i);
        REJECT(dp_gather_to, k.ctx, parts, 1, DP_F32, i);
        parts[i] = (dp_part){NULL, k.parts[i].recv, NULL};
        REJECT(dp_all_reduce, k.ctx, parts, 4, DP_F32, DP_OP_SUM);
        REJECT(dp_broadcast, k.ctx, parts, 4, DP_F32, i);
        REJECT(dp_all_gather, k.ctx, parts, 1, DP_F32);
        REJECT(dp_reduce_scatter, k.ctx, parts, 1, DP_F32, DP_OP_SUM);
        REJECT(dp_all_to_all, k.ctx, parts, 1, DP_F32);
        REJECT(dp_reduce_to, k.ctx, parts, 4, DP_F32, DP_OP_SUM, 0);
        REJECT(dp_gather_to, k.ctx, parts, 1, DP_F32, 0);
        REJECT(dp_scatter_from, k.ctx, parts, 1, DP_F32, i);
    }
    kit_close(&k);
}

TEST(parts_without_memory)
{
    reject_null_parts(1);
    reject_null_parts(3);
}

/* The data are 0x5a in all of outs, so an overlap that is not refused shows as a change. */
TEST(parts_that_overlap)
{
    kit k;
    kit_open(&k, 3);
    for (int i = 0; i < 3; i++) {
        dp_part shifted[3] = {k.parts[0], k.parts[1], k.parts[2]};
        shifted[i].send = (char *)shifted[i].recv + 2;
        REJECT(dp_all_reduce, k.ctx, shifted, 4, DP_F32, DP_OP_SUM);
        REJECT(dp_all_to_all, k.ctx, shifted, 1, DP_F32);

        dp_part shared[3] = {k.parts[0], k.parts[1], k.parts[2]};
        shared[i].recv = (char *)shared[(i + 1) % 3].recv + 8;
        REJECT(dp_all_reduce, k.ctx, shared, 4, DP_F32, DP_OP_SUM);
        REJECT(dp_broadcast, k.ctx, shared, 4, DP_F32, 0);
        REJECT(dp_all_gather, k.ctx, shared, 1, DP_F32);
        REJECT(dp_reduce_scatter, k.ctx, (dp_part[]){shared[i], shared[i], shared[i]}, 1, DP_F32,
               DP_OP_SUM);
        REJECT(dp_all_to_all, k.ctx, shared, 1, DP_F32);
    }
    dp_part in_place[3];
    for (int i = 0; i < 3; i++) {
        in_place[i] = (dp_part){outs.data + 4 * i, outs.data + 4 * i, NULL};
    }
    REJECT(dp_all_to_all, k.ctx, in_place, 1, DP_F32);
    kit_close(&k);
}

TEST(collectives_of_nothing_need_no_memory)
{
    for (int device_count = 1; device_count <= 3; device_count += 2) {
        kit k;
        kit_open(&k, device_count);
        dp_part parts[3] = {{NULL, NULL, NULL}, {NULL, NULL, NULL}, {NULL, NULL, NULL}};
        CHECK_OK(dp_all_reduce(k.ctx, parts, 0, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_all_reduce_scaled(k.ctx, parts, 0, DP_F32, DP_OP_SUM, 2.0));
        CHECK_OK(dp_broadcast(k.ctx, parts, 0, DP_F32, 0));
        CHECK_OK(dp_all_gather(k.ctx, parts, 0, DP_F32));
        CHECK_OK(dp_reduce_scatter(k.ctx, parts, 0, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_all_to_all(k.ctx, parts, 0, DP_F32));
        CHECK_OK(dp_reduce_to(k.ctx, parts, 0, DP_F32, DP_OP_SUM, 0));
        CHECK_OK(dp_gather_to(k.ctx, parts, 0, DP_F32, 0));
        CHECK_OK(dp_scatter_from(k.ctx, parts, 0, DP_F32, 0));
        kit_close(&k);
    }
}
