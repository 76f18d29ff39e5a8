/* tree.h - values as text, so that a test is one line of a table: text in, a call, text out.

     None True 12 1.5 'text' &        none, bool, int, float, string, opaque
     [a, b] (a, b) {'key': a}         list, tuple, dict
     f32[2,3]                         tensor; its elements are 0 1 2 ... 99 0 1 ..., of a bool 0 1 0
     f32[2,3]=5 6 7 8 9 10            tensor with these elements, row-major
     <stack pad=9 dims=2: a>          container; words: stack, cpu, pad=NUMBER, dims=NUMBER

   tree_text writes the same form, with all elements. An error value is written !DP_ERR_INVALID. */

#ifndef TREE_H
#define TREE_H

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../examples/custom_device.h"
#include "conform.h"
#include "test.h"

enum { TREE_DEVICES = 8, TREE_ITEMS = 32, TREE_TEXT = 1 << 16 };

/* The config of the first local ranks, however many. */
static const int first_ranks[TREE_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};

/* ---- one test, every backend ----------------------------------------------------------------- */

/* The body runs once a backend, on TREE_DEVICES of its devices: tests name_cpu and name_toy, and
   name_cuda where there are GPUs, or simulated ones. */
#if defined(TEST_CONFORM)
#define TREE_TESTS(name)                                                                           \
    TEST_OF_TABLE(name, 30)                                                                        \
    {                                                                                              \
        tree_run(tree_body_##name, conform_device(TREE_DEVICES));                                  \
    }
#else
#define TREE_TESTS(name)                                                                           \
    TEST(name##_cpu)                                                                               \
    {                                                                                              \
        tree_run(tree_body_##name, dp_cpu());                                                      \
    }                                                                                              \
    TEST(name##_toy)                                                                               \
    {                                                                                              \
        tree_run(tree_body_##name, toy_device());                                                  \
    }                                                                                              \
    TREE_TEST_CUDA(name)
#endif
#if defined(TEST_CUDA)
#include "cuda_device.h"
#define TREE_TEST_CUDA(name)                                                                       \
    TEST(name##_cuda)                                                                              \
    {                                                                                              \
        tree_run(tree_body_##name, cuda_device(TREE_DEVICES));                                     \
    }
#else
#define TREE_TEST_CUDA(name)
#endif
#define TREE_UNUSED __attribute__((unused))
#define TEST_BACKENDS(name)                                                                        \
    static void tree_body_##name(dp_ctx *ctx, dp_scope *scope);                                    \
    TREE_TESTS(name)                                                                               \
    static void tree_body_##name(TREE_UNUSED dp_ctx *ctx, TREE_UNUSED dp_scope *scope)

typedef void (*tree_body)(dp_ctx *ctx, dp_scope *scope);

static inline void tree_run(tree_body body, const dp_device_ops *ops)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    test_allocator counter = {0};
    const dp_config config = {.backends = backends,
                              .colls = conform_colls(),
                              .device_count = TREE_DEVICES,
                              .poison = true,
                              .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK(scope != NULL);
    body(ctx, scope);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

static inline bool tree_host_memory(dp_ctx *ctx)
{
    dp_device_info info;
    CHECK_OK(dp_device_info_get(ctx, 0, &info));
    return info.host_memory;
}

/* Whether the devices see each other's memory. */
static inline bool tree_share_memory(dp_ctx *ctx, int first, int second)
{
    dp_device_info a, b;
    CHECK_OK(dp_device_info_get(ctx, first, &a));
    CHECK_OK(dp_device_info_get(ctx, second, &b));
    return (a.host_memory && b.host_memory) || (a.memory > 0 && a.memory == b.memory);
}

static inline bool tree_same_device(dp_device a, dp_device b)
{
    return a.backend == b.backend && a.index == b.index;
}

/* ---- elements -------------------------------------------------------------------------------- */

/* Exact for the whole numbers below 2048 and their halves, which is all that the tests use. */
static inline uint16_t tree_f16_bits(double number)
{
    int exponent;
    double mantissa = frexp(fabs(number), &exponent);
    unsigned sign = signbit(number) ? 0x8000U : 0;
    if (mantissa <= 0) {
        return (uint16_t)sign;
    }
    return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 | (unsigned)(mantissa * 2048 - 1024));
}

static inline double tree_f16_number(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double magnitude = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static inline void tree_store(void *element, dp_dtype dtype, double number)
{
    union {
        float f32;
        double f64;
        uint16_t half[2];
        int64_t whole;
        uint8_t flag;
    } bits = {.whole = (int64_t)number};
    if (dtype == DP_F32) {
        bits.f32 = (float)number;
    } else if (dtype == DP_F64) {
        bits.f64 = number;
    } else if (dtype == DP_F16) {
        bits.half[0] = tree_f16_bits(number);
    } else if (dtype == DP_BF16) {
        bits.f32 = (float)number;
        bits.half[0] = bits.half[1];
    } else if (dtype == DP_BOOL) {
        bits.flag = bits.whole != 0;
    }
    memcpy(element, &bits, dp_dtype_bytes(dtype)); /* little endian: whole numbers are cut */
}

static inline double tree_load(const void *element, dp_dtype dtype)
{
    union {
        float f32;
        double f64;
        uint16_t half[2];
        int64_t i64;
        int32_t i32;
        int16_t i16;
        int8_t i8;
        uint8_t u8;
    } bits = {.i64 = 0};
    memcpy(&bits, element, dp_dtype_bytes(dtype));
    switch ((int)dtype) {
    case DP_F32:
        return (double)bits.f32;
    case DP_F64:
        return bits.f64;
    case DP_F16:
        return tree_f16_number(bits.half[0]);
    case DP_BF16:
        bits.half[1] = bits.half[0];
        bits.half[0] = 0;
        return (double)bits.f32;
    case DP_I64:
        return (double)bits.i64;
    case DP_I32:
        return bits.i32;
    case DP_I16:
        return bits.i16;
    case DP_I8:
        return bits.i8;
    default:
        return bits.u8;
    }
}

/* All elements of a tensor, wherever it is, row-major; to be freed. */
static inline void *tree_read(dp_ctx *ctx, const dp_tensor *tensor)
{
    int64_t count = dp_tensor_count(tensor);
    CHECK(count >= 0);
    size_t bytes = (size_t)count * dp_dtype_bytes((dp_dtype)tensor->dtype);
    void *elements = malloc(bytes + 1);
    CHECK(elements != NULL);
    CHECK_OK(dp_read(ctx, tensor, elements, bytes));
    return elements;
}

/* A tensor in host memory with elements first, first + 1, ... */
static inline dp_tensor tree_tensor(dp_scope *scope, dp_dtype dtype, int ndim, const int64_t *shape,
                                    double first)
{
    size_t count = 1, bytes = dp_dtype_bytes(dtype);
    for (int d = 0; d < ndim; d++) {
        count *= (size_t)shape[d];
    }
    char *data = dp_scope_alloc(scope, count * bytes);
    CHECK(data != NULL);
    for (size_t i = 0; i < count; i++) {
        tree_store(data + i * bytes, dtype,
                   dtype == DP_BOOL ? (double)(i % 2) : first + (double)(i % 100));
    }
    return dp_wrap(data, dtype, ndim, shape);
}

/* ---- from text ------------------------------------------------------------------------------- */

static inline dp_value tree_parse(dp_scope *scope, const char **at);

static inline bool tree_word(const char **at, const char *word)
{
    const char *p = *at + strspn(*at, " ");
    size_t length = strlen(word);
    if (strncmp(p, word, length) != 0) {
        return false;
    }
    *at = p + length;
    return true;
}

static inline void tree_want(const char **at, const char *word)
{
    if (!tree_word(at, word)) {
        test_fail(__FILE__, __LINE__, "wanted \"%s\" at \"%s\"", word, *at);
    }
}

static inline dp_value tree_parse_tensor(dp_scope *scope, const char **at, dp_dtype dtype)
{
    int64_t shape[DP_MAX_DIMS];
    int ndim = 0;
    while (!tree_word(at, "]")) {
        char *end;
        CHECK(ndim < DP_MAX_DIMS);
        shape[ndim++] = strtoll(*at, &end, 10);
        *at = end + (*end == ',');
    }
    dp_tensor tensor = tree_tensor(scope, dtype, ndim, shape, 0);
    if (tree_word(at, "=")) {
        char *element = tensor.data, *end;
        for (int64_t i = 0; i < dp_tensor_count(&tensor); i++) {
            double number = strtod(*at, &end);
            CHECK(end != *at);
            tree_store(element, dtype, number);
            element += dp_dtype_bytes(dtype);
            *at = end;
        }
    }
    return dp_of(scope, &tensor);
}

static inline dp_value tree_parse_container(dp_scope *scope, const char **at)
{
    dp_container container = {.padding_value = 0};
    while (!tree_word(at, ":")) {
        char *end;
        if (tree_word(at, "stack")) {
            container.stack = true;
        } else if (tree_word(at, "cpu")) {
            container.cpu_only = true;
        } else if (tree_word(at, "dims=")) {
            container.pad_dims = (int8_t)strtol(*at, &end, 10);
            *at = end;
        } else {
            tree_want(at, "pad=");
            container.padding_value = strtod(*at, &end);
            *at = end;
        }
    }
    container.data = tree_parse(scope, at);
    tree_want(at, ">");
    return dp_contain(scope, &container);
}

/* 'text' is kept in the scope. */
static inline const char *tree_parse_string(dp_scope *scope, const char **at)
{
    tree_want(at, "'");
    size_t length = strcspn(*at, "'");
    char *text = dp_scope_alloc(scope, length + 1);
    CHECK(text != NULL);
    memcpy(text, *at, length);
    text[length] = '\0';
    *at += length;
    tree_want(at, "'");
    return text;
}

static inline dp_value tree_parse_items(dp_scope *scope, const char **at, dp_kind kind,
                                        const char *close)
{
    dp_value items[TREE_ITEMS];
    size_t count = 0;
    while (!tree_word(at, close)) {
        CHECK(count < TREE_ITEMS);
        items[count++] = tree_parse(scope, at);
        tree_word(at, ",");
    }
    return dp_list_make(scope, kind, items, count);
}

static inline dp_value tree_parse_dict(dp_scope *scope, const char **at)
{
    dp_pair pairs[TREE_ITEMS];
    size_t count = 0;
    while (!tree_word(at, "}")) {
        CHECK(count < TREE_ITEMS);
        pairs[count].key = tree_parse_string(scope, at);
        tree_want(at, ":");
        pairs[count++].value = tree_parse(scope, at);
        tree_word(at, ",");
    }
    return dp_dict_make(scope, pairs, count);
}

static inline dp_value tree_parse_number(const char **at)
{
    char *whole_end, *end;
    int64_t whole = strtoll(*at, &whole_end, 10);
    double number = strtod(*at, &end);
    if (end == *at) {
        test_fail(__FILE__, __LINE__, "no value at \"%s\"", *at);
    }
    *at = end;
    return end == whole_end ? dp_int(whole) : dp_float(number);
}

static inline dp_value tree_parse(dp_scope *scope, const char **at)
{
    static int opaque;
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        char head[16];
        snprintf(head, sizeof(head), "%s[", dp_dtype_name((dp_dtype)dtype));
        if (tree_word(at, head)) {
            return tree_parse_tensor(scope, at, (dp_dtype)dtype);
        }
    }
    if (tree_word(at, "[")) {
        return tree_parse_items(scope, at, DP_LIST, "]");
    } else if (tree_word(at, "(")) {
        return tree_parse_items(scope, at, DP_TUPLE, ")");
    } else if (tree_word(at, "{")) {
        return tree_parse_dict(scope, at);
    } else if (tree_word(at, "<")) {
        return tree_parse_container(scope, at);
    } else if (tree_word(at, "None")) {
        return dp_none();
    } else if (tree_word(at, "True") || tree_word(at, "False")) {
        return dp_bool((*at)[-2] == 'u');
    } else if (tree_word(at, "&")) {
        return dp_opaque(&opaque);
    }
    tree_word(at, "");
    return **at == '\'' ? dp_string(scope, tree_parse_string(scope, at)) : tree_parse_number(at);
}

/* The value that `text` describes, its tensors in host memory. */
static inline dp_value tree_of(dp_scope *scope, const char *text)
{
    dp_value value = tree_parse(scope, &text);
    CHECK_STR(text, "");
    return value;
}

/* ---- to text --------------------------------------------------------------------------------- */

typedef struct tree_out {
    dp_ctx *ctx;
    size_t count;
    char text[TREE_TEXT];
} tree_out;

static inline void DP_PRINTF(2, 3) tree_put(tree_out *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int count = vsnprintf(out->text + out->count, sizeof(out->text) - out->count, format, args);
    va_end(args);
    CHECK(count >= 0 && (size_t)count < sizeof(out->text) - out->count);
    out->count += (size_t)count;
}

static inline void tree_put_tensor(tree_out *out, const dp_tensor *tensor)
{
    dp_dtype dtype = (dp_dtype)tensor->dtype;
    int64_t count = dp_tensor_count(tensor);
    char *elements = tree_read(out->ctx, tensor);
    tree_put(out, "%s[", dp_dtype_name(dtype));
    for (int d = 0; d < tensor->ndim; d++) {
        tree_put(out, "%s%" PRId64, d ? "," : "", tensor->shape[d]);
    }
    tree_put(out, "]=");
    for (int64_t i = 0; i < count; i++) {
        const char *element = elements + (size_t)i * dp_dtype_bytes(dtype);
        tree_put(out, "%s%.9g", i ? " " : "", tree_load(element, dtype));
    }
    free(elements);
}

static inline void tree_put_value(tree_out *out, dp_value value);

static inline void tree_put_container(tree_out *out, const dp_container *container)
{
    tree_put(out, "<%s%s", container->stack ? "stack " : "", container->cpu_only ? "cpu " : "");
    tree_put(out, "pad=%.9g dims=%d: ", container->padding_value,
             container->pad_dims ? container->pad_dims : 2);
    tree_put_value(out, container->data);
    tree_put(out, ">");
}

static inline void tree_put_items(tree_out *out, dp_value value, const char *brackets)
{
    tree_put(out, "%c", brackets[0]);
    for (uint32_t i = 0; i < value.count; i++) {
        tree_put(out, "%s", i ? ", " : "");
        if (value.kind == DP_DICT) {
            tree_put(out, "'%s': ", value.as.pairs[i].key);
            tree_put_value(out, value.as.pairs[i].value);
        } else {
            tree_put_value(out, value.as.items[i]);
        }
    }
    tree_put(out, "%c", brackets[1]);
}

static inline void tree_put_value(tree_out *out, dp_value value)
{
    switch ((dp_kind)value.kind) {
    case DP_NONE:
        tree_put(out, "None");
        break;
    case DP_ERROR:
        tree_put(out, "!%s", dp_status_name((dp_status)value.status));
        break;
    case DP_BOOLEAN:
        tree_put(out, "%s", value.as.b ? "True" : "False");
        break;
    case DP_INT:
        tree_put(out, "%" PRId64, value.as.i);
        break;
    case DP_FLOAT:
        tree_put(out, "%.9g%s", value.as.f, fmod(value.as.f, 1) != 0 ? "" : ".0");
        break;
    case DP_STRING:
        tree_put(out, "'%s'", value.as.s);
        break;
    case DP_TENSOR:
        tree_put_tensor(out, value.as.t);
        break;
    case DP_CONTAINER:
        tree_put_container(out, value.as.c);
        break;
    case DP_LIST:
        tree_put_items(out, value, "[]");
        break;
    case DP_TUPLE:
        tree_put_items(out, value, "()");
        break;
    case DP_DICT:
        tree_put_items(out, value, "{}");
        break;
    case DP_OPAQUE:
        tree_put(out, "&");
        break;
    }
}

/* The text of a value; dies at the next call. */
static inline const char *tree_text(dp_ctx *ctx, dp_value value)
{
    static tree_out out;
    out.ctx = ctx;
    out.count = 0;
    tree_put_value(&out, value);
    return out.text;
}

#define CHECK_TREE(ctx, value, want)                                                               \
    test_check_str(__FILE__, __LINE__, #value, tree_text(ctx, value), want)

/* The outcome of a call against its line of a table: the status, and the value or the sentence. */
static inline void tree_check_row(dp_ctx *ctx, const char *in, dp_status got, dp_value value,
                                  dp_status want_status, const char *want)
{
    test_check_status(__FILE__, __LINE__, in, got, want_status, dp_last_error);
    if (want_status == DP_OK) {
        test_check_str(__FILE__, __LINE__, in, tree_text(ctx, value), want);
    } else {
        test_check_error(__FILE__, __LINE__, in, got, want_status, dp_last_error, want);
        if (strstr(dp_last_error(), "  ") || strstr(dp_last_error(), ": :")) {
            test_fail(__FILE__, __LINE__, "%s: a gap in \"%s\"", in, dp_last_error());
        }
    }
}

/* A value that no constructor makes. */
static inline dp_value tree_by_hand(int kind, const void *at, uint32_t count, uint8_t depth)
{
    dp_value value = dp_opaque((void *)(uintptr_t)at);
    value.kind = (uint8_t)kind;
    value.count = count;
    value.depth = depth;
    return value;
}

/* The dict with this entry added, or replaced. */
static inline dp_value tree_replaced(dp_scope *scope, dp_value dict, const char *key,
                                     dp_value value)
{
    dp_pair pairs[8];
    size_t count = dp_count(dict), at = count;
    for (size_t i = 0; i < count; i++) {
        pairs[i] = (dp_pair){dp_key_at(dict, i), dp_at(dict, i)};
        at = strcmp(pairs[i].key, key) == 0 ? i : at;
    }
    pairs[at] = (dp_pair){key, value};
    return dp_dict_make(scope, pairs, count + (at == count));
}

/* A host tensor that says it is on a device which no context has. */
static inline dp_tensor tree_lost(dp_scope *scope)
{
    dp_tensor tensor = tree_tensor(scope, DP_F32, 1, (const int64_t[]){2}, 0);
    tensor.device = (dp_device){99, 99};
    return tensor;
}

/* ---- to devices ------------------------------------------------------------------------------ */

static inline dp_value tree_on(dp_ctx *ctx, dp_scope *scope, dp_value value, dp_device device);

static inline dp_value tree_tensor_on(dp_ctx *ctx, dp_scope *scope, const dp_tensor *tensor,
                                      dp_device device)
{
    dp_tensor copy;
    CHECK_OK(
        dp_tensor_new(scope, device, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape, &copy));
    CHECK_OK(dp_copy(ctx, &copy, tensor, NULL));
    return dp_of(scope, &copy);
}

/* The same value, with its tensors (but for those in containers) copied to `device`. */
static inline dp_value tree_on(dp_ctx *ctx, dp_scope *scope, dp_value value, dp_device device)
{
    dp_value items[TREE_ITEMS];
    dp_pair pairs[TREE_ITEMS];
    CHECK(value.count <= TREE_ITEMS);
    if (value.kind == DP_TENSOR) {
        return tree_tensor_on(ctx, scope, value.as.t, device);
    }
    if (value.kind == DP_LIST || value.kind == DP_TUPLE) {
        for (uint32_t i = 0; i < value.count; i++) {
            items[i] = tree_on(ctx, scope, value.as.items[i], device);
        }
        return dp_list_make(scope, (dp_kind)value.kind, items, value.count);
    }
    if (value.kind == DP_DICT) {
        for (uint32_t i = 0; i < value.count; i++) {
            pairs[i].key = value.as.pairs[i].key;
            pairs[i].value = tree_on(ctx, scope, value.as.pairs[i].value, device);
        }
        return dp_dict_make(scope, pairs, value.count);
    }
    return value;
}

/* The list that `text` describes, with entry i on local rank i. */
static inline dp_value tree_spread(dp_ctx *ctx, dp_scope *scope, const char *text)
{
    dp_value list = tree_of(scope, text), items[TREE_ITEMS];
    CHECK(list.kind == DP_LIST && list.count <= TREE_DEVICES);
    for (uint32_t i = 0; i < list.count; i++) {
        items[i] = tree_on(ctx, scope, list.as.items[i], dp_local_device(ctx, (int)i));
    }
    return dp_list_make(scope, DP_LIST, items, list.count);
}

/* ---- out of memory --------------------------------------------------------------------------- */

typedef dp_status (*tree_call)(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out);

typedef struct tree_scenario {
    const dp_device_ops *ops;
    tree_call call;
    const char *in, *want;
    size_t pieces; /* small ones that a call cuts from its scope, at most */
    bool poison;   /* each of them an allocation */
    test_allocator counter;
} tree_scenario;

static inline dp_ctx *tree_open(tree_scenario *scenario)
{
    const dp_device_ops *const backends[] = {scenario->ops, NULL};
    dp_ctx *ctx;
    scenario->counter = (test_allocator){0};
    const dp_config config = {.backends = backends,
                              .device_count = 2,
                              .poison = scenario->poison,
                              .allocator = test_allocator_of(&scenario->counter)};
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

/* The call, with its n-th allocation failing: it says so or does without, and the next try
   succeeds. False when there is no n-th allocation. */
static inline bool tree_fails(tree_scenario *scenario, dp_ctx *ctx, dp_scope *scope, dp_value in,
                              size_t n)
{
    dp_value out = dp_none();
    scenario->counter.fail_count = 0;
    scenario->counter.fail_at = scenario->counter.call_count + n;
    dp_status status = scenario->call(ctx, scope, in, &out);
    scenario->counter.fail_at = 0;
    bool failed = scenario->counter.fail_count > 0;
    if (status != DP_OK) {
        CHECK_STATUS(status, DP_ERR_NO_MEMORY);
        CHECK(failed && dp_last_error()[0] != '\0');
        CHECK_OK(scenario->call(ctx, scope, in, &out));
    }
    CHECK_TREE(ctx, out, scenario->want);
    return failed;
}

/* Every allocation of a first call. */
static inline void tree_fail_each(tree_scenario *scenario)
{
    bool failed = true;
    for (size_t n = 1; failed; n += (size_t)test_step()) {
        dp_ctx *ctx = tree_open(scenario);
        dp_scope *scope = dp_scope_begin(ctx), *results = dp_scope_begin(ctx);
        dp_value in = tree_spread(ctx, scope, scenario->in);
        failed = tree_fails(scenario, ctx, results, in, n);
        dp_close(ctx);
        CHECK_NO_LEAKS(&scenario->counter);
    }
}

/* Pieces that are cut from the scope until it has to ask the allocator, but at most `most`. */
static inline size_t tree_cut(dp_scope *scope, const test_allocator *counter, size_t most)
{
    size_t before = counter->call_count, count = 0;
    while (count < most && counter->call_count == before) {
        CHECK(dp_scope_alloc(scope, 64) != NULL);
        count++;
    }
    return count;
}

/* The same when little is left of what the scope has: each small piece in turn is one too many. */
static inline void tree_fail_small(tree_scenario *scenario)
{
    dp_ctx *ctx = tree_open(scenario);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value in = tree_spread(ctx, scope, scenario->in);
    for (size_t left = 0; left < scenario->pieces; left += (size_t)test_step()) {
        dp_scope *results = dp_scope_begin(ctx);
        tree_cut(results, &scenario->counter, SIZE_MAX); /* what is free from earlier goes first */
        size_t pieces = tree_cut(results, &scenario->counter, SIZE_MAX);
        tree_cut(results, &scenario->counter, pieces - 1 - left);
        tree_fails(scenario, ctx, results, in, 1);
        dp_scope_end(results);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&scenario->counter);
}

static inline void tree_out_of_memory(tree_call call, size_t pieces, const char *in,
                                      const char *want)
{
    tree_scenario scenario = {
        .ops = dp_cpu(), .call = call, .in = in, .want = want, .pieces = pieces};
    tree_fail_each(&scenario);
    tree_fail_small(&scenario);
    scenario.ops = toy_device();
    tree_fail_each(&scenario);
    tree_fail_small(&scenario);
    scenario.poison = true;
    tree_fail_each(&scenario);
}

#endif /* TREE_H */
