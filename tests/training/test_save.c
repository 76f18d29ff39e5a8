/* test_save.c - dp_save.h: trees, modules and jobs in safetensors files. Each test has a folder of
   its own, in which it is. */

#define _GNU_SOURCE /* P_tmpdir */
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
/* clang-format off */
#include "examples/custom_device.h"
#include "folder.h"
#include "tree.h"
#include "training.h"
#include "meeting.h"
#include "refusal.h"
/* clang-format on */

/* ---- values ---------------------------------------------------------------------------------- */

static const char *const values[] = {
    "{}",
    "{'a': f32[2,3]}",
    "{'f64': f64[2], 'bool': bool[3], 'bf16': bf16[2], 'i8': i8[3], 'f16': f16[1], 'i64': i64[1], "
    "'u8': u8[1], 'i16': i16[2], 'i32': i32[1], 'f32': f32[]}",
    "{'none': f32[0], 'all': f32[2,0,3], 'one': i8[1]}",
    "{'a': None, 'b': True, 'c': False, 'd': -5, 'e': 1.5, 'f': 'text', 'g': '', '': 3.0}",
    "{'a': 9223372036854775807, 'b': -9223372036854775808, 'c': 0}",
    "{'d': {}, 'l': [], 't': (), 'n': [[], (), {}, [()]]}",
    "{'model': {'fc.weight': f32[2,2], 'fc.bias': f32[2]}, 'optim': {'state': {'fc.weight': "
    "[f32[2,2], f64[2]]}}, 'epoch': 3}",
    "{'l': [1, f32[2], (2, u8[1]), 'x', None]}",
    "{'a.b': {'c': i64[1]=1}, 'a': {'b.c': i64[1]=2, 'b': {'c': i64[1]=3}, 'b.c~': i64[1]=4}}",
    "{'s:': 't:', 't:': 's:', 'tuple': ['tuple', ('tuple')], '\"': '\"}\\'}",
    "{'\n\t\x01\x7f': '\r\b', '\xc3\xa4': '\xf0\x9f\x99\x82', 'x\\u0041': f32[1]}",
    "{'a': f32[1], '__metadata__': {'format': 'pt', 'a \"b\"': ''}}",
    "{'a': [f32[1]], '__metadata__': {'format': 'pt'}}",
    "{'n': 1, '__metadata__': {}}"};

/* On every device, from which tensors have to be fetched. */
TEST_BACKENDS(values_come_back)
{
    enter_folder();
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        dp_value value = tree_of(scope, values[i]), got = dp_none();
        char *want = dp_scope_alloc(scope, strlen(tree_text(ctx, value)) + 1);
        strcpy(want, tree_text(ctx, value));
        char *empty = strstr(want, ", '__metadata__': {}");
        if (empty != NULL)
            memcpy(empty, "}", 2);
        for (int rank = 0; rank < 2; rank++) {
            dp_value there = tree_on(ctx, scope, value, dp_local_device(ctx, rank * 3));
            CHECK_OK(dp_file_write(ctx, "values", there));
            CHECK_OK(dp_file_read(ctx, scope, "values", &got));
            test_check_str(__FILE__, __LINE__, values[i], tree_text(ctx, got), want);
        }
        CHECK_INT(count_names(".", ""), 1);
    }
}

static double float_of(uint64_t bits)
{
    double out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

TEST(numbers_come_back_to_the_last_bit)
{
    double odd[64] = {
        0.0, -0.0, 0.1, 1e22, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, -1.0, 3.0};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value items[64], got;
    uint64_t state = test_seed();
    enter_folder();
    odd[9] = HUGE_VAL;
    odd[10] = -HUGE_VAL;
    for (int i = 11; i < 64; i++)
        for (odd[i] = (double)NAN; !isfinite(odd[i]);)
            odd[i] = float_of(test_random(&state));
    for (int i = 0; i < 64; i++)
        items[i] = dp_float(odd[i]);
    items[63] = dp_float((double)NAN);
    dp_value list = dp_list_make(scope, DP_LIST, items, 64);
    CHECK_OK(dp_file_write(ctx, "numbers", DP_DICT(scope, {"n", list})));
    CHECK_OK(dp_file_read(ctx, scope, "numbers", &got));
    for (size_t i = 0; i < 63; i++) {
        dp_value item = dp_at(dp_get(got, "n"), i);
        CHECK_INT(item.kind, DP_FLOAT);
        CHECK_BYTES(&item.as.f, &odd[i], sizeof(double));
    }
    CHECK(isnan(dp_at(dp_get(got, "n"), 63).as.f));
    dp_close(ctx);
}

TEST(depth_is_that_of_values)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = dp_int(7), got;
    enter_folder();
    for (int i = 1; i < DP_MAX_DEPTH; i++)
        value = i % 2 == 0 ? DP_DICT(scope, {"in", value}) : DP_LIST_OF(scope, value);
    CHECK_OK(dp_file_write(ctx, "deep", DP_DICT(scope, {"top", value})));
    CHECK_OK(dp_file_read(ctx, scope, "deep", &got));
    for (got = dp_get(got, "top"); got.kind != DP_INT;)
        got = dp_at(got, 0);
    CHECK_INT(got.as.i, 7);
    dp_close(ctx);
}

/* What others read there, byte by byte. */
TEST(files_are_as_others_expect)
{
    static const char plain[] =
        "\x70\0\0\0\0\0\0\0{\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]},"
        "\"a.w\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}} "
        "\0\0\x80\x3f\0\0\0\x40\7\x8\x9";
    static const char notes[] = "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"U8\","
                                "\"shape\":[0],\"data_offsets\":[0,0]}}";
    static const char tree[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"dp.h\":\"{\\\"m\\\":{\\\"x\\\":"
        "\\\"t:m.x\\\"},\\\"o\\\":[\\\"tuple\\\",\\\"s:a\\\\\\\"b\\\",-1,"
        "5.0000000000000000e-01,null,true]}\"},\"m.x\":{\"dtype\":\"BOOL\","
        "\"shape\":[1],\"data_offsets\":[0,1]}}";
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    size_t count = 0;
    enter_folder();
    CHECK_OK(
        dp_file_write(ctx, "plain", tree_of(scope, "{'b': u8[3]=7 8 9, 'a.w': f32[2,1]=1 2}")));
    const char *bytes = get_file("plain", &count);
    CHECK_INT(count, sizeof plain - 1);
    CHECK_BYTES(bytes, plain, sizeof plain - 1);
    CHECK_OK(dp_file_write(ctx, "tree",
                           tree_of(scope, "{'m': {'x': bool[1]=1}, '__metadata__': {'format': 'pt'}"
                                          ", 'o': ('a\"b', -1, 0.5, None, True)}")));
    bytes = get_file("tree", &count);
    CHECK_BYTES(bytes + 8, tree, sizeof tree - 1);
    CHECK_INT(bytes[count - 1], 1);
    CHECK_INT((count - 1) % 8, 0);
    CHECK_OK(dp_file_write(ctx, "notes",
                           tree_of(scope, "{'a': u8[0], '__metadata__': {'format': 'pt'}}")));
    bytes = get_file("notes", &count);
    CHECK_BYTES(bytes + 8, notes, sizeof notes - 1);
    dp_close(ctx);
}

/* Larger than a piece, in one row or in many, turned or with gaps, or the same row again. */
static void check_large(dp_ctx *ctx, dp_scope *scope, const dp_tensor *tensor)
{
    size_t bytes = (size_t)dp_tensor_count(tensor) * dp_dtype_bytes((dp_dtype)tensor->dtype);
    void *want = test_room(bytes);
    const dp_tensor *got = NULL;
    dp_value value;
    CHECK_OK(dp_read(ctx, tensor, want, bytes));
    CHECK_OK(dp_file_write(ctx, "large",
                           DP_DICT(scope, {"before", dp_of(scope, tensor)},
                                   {"x", dp_of(scope, tensor)}, {"n", dp_int(1)})));
    CHECK_OK(dp_file_read(ctx, scope, "large", &value));
    CHECK_OK(dp_as_tensor(dp_get(value, "x"), "x", (dp_dtype)tensor->dtype, tensor->ndim, &got));
    CHECK(memcmp(got->shape, tensor->shape, sizeof got->shape[0] * tensor->ndim) == 0);
    CHECK_BYTES(got->data, want, bytes);
}

TEST_BACKENDS(large_tensors_of_any_strides)
{
    enum { MANY = 150001 };
    dp_tensor host, own, view;
    float *numbers = test_room(2 * MANY * sizeof *numbers);
    for (int i = 0; i < 2 * MANY; i++)
        numbers[i] = (float)i;
    enter_folder();
    host = dp_wrap(numbers, DP_F32, 2, (int64_t[]){2, MANY});
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, 2, host.shape, &own));
    CHECK_OK(dp_copy(ctx, &own, &host, NULL));
    check_large(ctx, scope, &own);
    CHECK_OK(dp_transpose(&own, 0, 1, &view));
    check_large(ctx, scope, &view);
    CHECK_OK(dp_narrow(&own, 1, 3, MANY - 7, &view));
    check_large(ctx, scope, &view);
    CHECK_OK(dp_reshape(&own, 1, (int64_t[]){-1}, &view));
    check_large(ctx, scope, &view);
    CHECK_OK(dp_narrow(&own, 1, 5, 1000, &view));
    CHECK_OK(dp_reshape(&own, 3, (int64_t[]){1, 2, MANY}, &view));
    view.shape[0] = 3;
    view.stride[0] = 0;
    check_large(ctx, scope, &view);
}

/* Bytes of any number are taken for true where they are written, as they are where they are used,
   and refused where they are read. */
TEST(bools_are_0_or_1)
{
    uint8_t odd[3] = {0, 255, 2};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    enter_folder();
    CHECK_OK(dp_file_write(
        ctx, "odd", DP_DICT(scope, {"b", dp_array(scope, odd, DP_BOOL, 1, (int64_t[]){3})})));
    CHECK_OK(dp_file_read(ctx, scope, "odd", &got));
    CHECK_BYTES(dp_get(got, "b").as.t->data, "\0\1\1", 3);
    dp_close(ctx);
}

/* Nothing is copied, nothing can be changed, and what is there stays after the file's name went. */
TEST(tensors_are_views_of_the_file)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx), *other = dp_scope_begin(ctx);
    dp_value value = tree_of(other, "{'u': u8[3], 'd': f64[3], 'x': [f32[70000]]}"), got, next;
    test_allocator counter = {0};
    dp_ctx *counted = NULL;
    char want[64];
    enter_folder();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .allocator = test_allocator_of(&counter)},
                     &counted));
    dp_scope *own = dp_scope_begin(counted);
    CHECK_OK(dp_file_write(ctx, "file", value));
    size_t before = counter.live_bytes;
    CHECK_OK(dp_file_read(counted, own, "file", &got));
    CHECK(counter.peak_bytes - before < 200000);
    const dp_tensor *x = dp_at(dp_get(got, "x"), 0).as.t, *d = dp_get(got, "d").as.t;
    CHECK(x->read_only && (uintptr_t)x->data % 4 == 0 && (uintptr_t)d->data % 8 == 0);
    CHECK_ERROR(dp_fill(counted, x, dp_int(1)), DP_ERR_INVALID, "read-only");
    CHECK_OK(dp_file_write(ctx, "file", DP_DICT(scope, {"n", dp_int(1)})));
    snprintf(want, sizeof want, "%.1f", (double)((const float *)x->data)[123]);
    CHECK_STR(want, "23.0");
    CHECK_OK(dp_file_read(counted, own, "file", &next));
    CHECK_INT(dp_get(next, "n").as.i, 1);
    CHECK_OK(dp_fill(ctx, dp_get(value, "d").as.t, dp_int(0)));
    CHECK_F64(((const double *)d->data)[2], 2, 0);
    dp_abort(counted, DP_ERR_ABORTED, "over"); /* a device might read what it was given */
    dp_scope_end(own);
    CHECK_F64(((const float *)x->data)[123], 23, 0);
    dp_close(counted);
    dp_close(ctx);
}

static bool is_mapped(const char *name)
{
    char line[600];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL)
        found = found || strstr(line, name) != NULL;
    fclose(maps);
    return found;
}

TEST(a_file_is_given_back_with_its_scope)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    int files = open_files();
    enter_folder();
    CHECK_OK(dp_file_write(ctx, "there", tree_of(scope, "{'x': f32[9]}")));
    CHECK_OK(dp_file_read(ctx, scope, "there", &got));
    CHECK(is_mapped("/there"));
    CHECK_INT(open_files(), files);
    dp_scope_end(scope);
    CHECK(!is_mapped("/there"));
    scope = dp_scope_begin(ctx);
    CHECK_OK(dp_file_read(ctx, scope, "there", &got));
    dp_close(ctx); /* with its scopes */
    CHECK(!is_mapped("/there"));
    ctx = open_cpus(1);
    scope = dp_scope_begin(ctx);
    put_file("broken", "\1\0\0\0\0\0\0\0[", 9);
    CHECK_ERROR(dp_file_read(ctx, scope, "broken", &got), DP_ERR_FILE, "dp_file_read: 'broken': ");
    CHECK(!is_mapped("/broken"));
    CHECK_INT(open_files(), files);
    dp_close(ctx);
}

/* ---- files of others ------------------------------------------------------------------------- */

/* By safetensors 0.8 of Python, with torch and with numpy. */
/* clang-format off */
static const char by_torch[] =
    "0\003\000\000\000\000\000\000"
    "{\"__metadata__\":{\"note\":\"a \\\"b\\\" \303\251\",\"format\":\"pt\"},"
    "\"gr\303\266\303\237e \\\"q\\\"\\\\\\n"
    "\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]},\"i64\":{\"dtype\":\"I64"
    "\",\"shape\":[2,1],\"data_offsets\":[8,24]},\"f64\":{\"dtype\":\"F64\",\"shape\":[2"
    "],\"data_offsets\":[24,40]},\"empty\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_o"
    "ffsets\":[40,40]},\"f32\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[40"
    ",64]},\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[64,68]},\"i32\""
    ":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[68,76]},\"bf16\":{\"dtype\":\"B"
    "F16\",\"shape\":[3],\"data_offsets\":[76,82]},\"f16\":{\"dtype\":\"F16\",\"shape\":"
    "[2],\"data_offsets\":[82,86]},\"i16\":{\"dtype\":\"I16\",\"shape\":[1],\"data_off"
    "sets\":[86,88]},\"i8\":{\"dtype\":\"I8\",\"shape\":[2],\"data_offsets\":[88,90]},"
    "\"u8\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[90,93]},\"bool\":{\"dtype\""
    ":\"BOOL\",\"shape\":[2],\"data_offsets\":[93,95]}}  "
    "\011\000\000\000\000\000\000\000"
    "\377\377\377\377\377\377\377\377\000\000\000\000\000\001\000\000"
    "\232\231\231\231\231\231\271\077\000\000\000\000\000\000\004\300\000\000\200\077\000\000\000@"
    "\000\000@@\000\000\200@\000\000\240@\000\000\320@\000\000(B\007\000\000\000"
    "\370\377\377\377\200\077\200>\340\300\000>\000\302,\001\200\177\377\000\001\001\000";
static const char by_numpy[] =
    "x\000\000\000\000\000\000\000"
    "{\"bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"weight\":{\"dt"
    "ype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[8,24]}}  "
    "\000\000\200\277\000\000\000\077\000\000\000\000\000\000\200\077\000\000\000@\000\000@@";
/* clang-format on */

TEST(files_of_python_open)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    enter_folder();
    put_file("torch", by_torch, sizeof by_torch - 1);
    CHECK_OK(dp_file_read(ctx, scope, "torch", &got));
    CHECK_TREE(ctx, got,
               "{'gr\xc3\xb6\xc3\x9f"
               "e \"q\"\\\n': i64[1]=9, 'i64': i64[2,1]=-1 1.09951163e+12, 'f64': f64[2]=0.1 -2.5, "
               "'empty': f32[0,3]=, 'f32': f32[2,3]=1 2 3 4 5 6.5, 'scalar': f32[]=42, "
               "'i32': i32[2]=7 -8, 'bf16': bf16[3]=1 0.25 -7, 'f16': f16[2]=1.5 -3, "
               "'i16': i16[1]=300, 'i8': i8[2]=-128 127, 'u8': u8[3]=255 0 1, 'bool': bool[2]=1 0, "
               "'__metadata__': {'note': 'a \"b\" \xc3\xa9', 'format': 'pt'}}");
    put_file("numpy", by_numpy, sizeof by_numpy - 1);
    CHECK_OK(dp_file_read(ctx, scope, "numpy", &got));
    CHECK_TREE(ctx, got, "{'bias': f32[2]=-1 0.5, 'weight': f32[2,2]=0 1 2 3}");
    dp_close(ctx);
}

/* A file from a header, and as many bytes 0, 1, 0, 1 ... of tensors. */
static void make_file(const char *name, const char *header, size_t data_bytes)
{
    uint64_t length = strlen(header);
    char *bytes = test_room(8 + length + data_bytes + 1);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + length + i] = (char)(i & 1);
    put_file(name, bytes, 8 + length + data_bytes);
}

#define T(dtype, shape, first, end)                                                                \
    "{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #first "," #end "]}"

/* A tensor of which more is said, which nobody has to understand. */
#define ALSO(more) "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]," more "}}"
#define DEEP       "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[" /* 32 */
#define UNDEEP     "]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"

typedef struct other_file {
    const char *header;
    size_t data_bytes;
    const char *says; /* the value, or a part of the sentence */
} other_file;

/* What is odd, and allowed. */
static const other_file odd_files[] = {
    {"{}", 0, "{}"},
    {"{ }  \n\t\r", 0, "{}"},
    {"{\"a\" : " T("U8", "2", 0, 2) " }", 2, "{'a': u8[2]=0 1}"},
    {"{\"\":" T("I8", "", 0, 1) "}", 1, "{'': i8[]=0}"},
    {"{\"a\":" T("U8", "1", 2, 3) ",\"b\":" T("I16", " 1 ", 0, 2) "}", 3,
     "{'a': u8[1]=0, 'b': i16[1]=256}"},
    {"{\"a\":" T("U8", "0,4611686018427387903", 0, 0) ",\"b\":" T("U8", "0", 0, 0) "}", 0,
     "{'a': u8[0,4611686018427387903]=, 'b': u8[0]=}"},
    {"{\"a\":" T("BOOL", "1", 0, 1) ",\"b\":" T("I32", "1", 1, 5) "}", 5,
     "{'a': bool[1]=0, 'b': i32[1]=65537}"}, /* not where an i32 should be */
    {"{\"a.b\":{\"data_offsets\":[0,1],\"shape\":[1,1],\"dtype\":\"U8\"}}", 1,
     "{'a.b': u8[1,1]=0}"},
    {"{\"\\u0061\\u00e9\\uD83D\\ude42\\/\\b\\f\\n\\r\\t\\\"\\\\\":" T("U8", "1", 0, 1) "}", 1,
     "{'a\xc3\xa9\xf0\x9f\x99\x82/\b\f\n\r\t\"\\': u8[1]=0}"},
    {ALSO("\"x\":1"), 1, "{'a': u8[1]=0}"},
    {ALSO("\"x\":-0.25e-7,\"x\" : 1E+5 , \"\":0"), 1, "{'a': u8[1]=0}"},
    {ALSO("\"x\":null,\"y\":true,\"z\":false"), 1, "{'a': u8[1]=0}"},
    {ALSO("\"x\":[],\"y\":{ },\"z\":[ 1 , [ -2 ] , { \"a\" : [ ] , \"a\":\"\" } ]"), 1,
     "{'a': u8[1]=0}"},
    {ALSO(
         "\"x\":\"dtype\\u00e9\\\"}\",\"y\":1234567890123456789012345678901234567890123456789e999"),
     1, "{'a': u8[1]=0}"},
    {ALSO("\"x\":" DEEP "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]" UNDEEP),
     1, "{'a': u8[1]=0}"},
    {"{\"a\":{\"x\":{\"shape\":[7]},\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "{'a': u8[1]=0}"},
    {"{\"__metadata__\": null,\"a\":" T("U8", "1", 0, 1) "}", 1, "{'a': u8[1]=0}"},
    {"{\"__metadata__\":{}}", 0, "{}"},
    {"{\"__metadata__\":{\"x\":\"y\"},\"a\":" T("U8", "1", 0, 1) "}", 1,
     "{'a': u8[1]=0, '__metadata__': {'x': 'y'}}"},
    {"{\"__metadata__\":{\"dp.h\":\" { \\\"a\\\" : [ \\\"tuple\\\" , 1e3 , -0 , \\\"t:x\\\" , "
     "[ ] , "
     "{ } ] } \"},\"x\":" T("U8", "1", 0, 1) "}",
     1, "{'a': (1000.0, 0, u8[1]=0, [], {})}"},
    {"{\"__metadata__\":{\"dp.h\":\"{\\\"a\\\":[1.25e-2,2E+1,NaN,-Infinity,0.5,-1.5]}\"}}", 0,
     "{'a': [0.0125, 20.0, nan, -inf, 0.5, -1.5]}"},
};

TEST(odd_files_are_read)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    enter_folder();
    for (size_t i = 0; i < sizeof odd_files / sizeof odd_files[0]; i++) {
        make_file("odd", odd_files[i].header, odd_files[i].data_bytes);
        test_check_status(__FILE__, __LINE__, odd_files[i].header,
                          dp_file_read(ctx, scope, "odd", &got), DP_OK, dp_last_error);
        test_check_str(__FILE__, __LINE__, odd_files[i].header, tree_text(ctx, got),
                       odd_files[i].says);
    }
    dp_close(ctx);
}

#define TREE(text) "{\"__metadata__\":{\"dp.h\":\"" text "\"},\"x\":" T("U8", "1", 0, 1) "}"

static const other_file hostile_files[] = {
    {"", 0, "the header is damaged: at byte 0 there is no '{'"},
    {" {}", 0, "at byte 0 there is no '{'"},
    {"[]", 0, "at byte 0 there is no '{'"},
    {"{", 0, "at byte 1 there is no '\"'"},
    {"{}x", 0, "at byte 2 something follows"},
    {"{},", 0, "at byte 2 something follows"},
    {"{\"a\"}", 0, "at byte 4 there is no ':'"},
    {"{\"a\":1}", 0, "at byte 5 there is no '{'"},
    {"{\"a\":[\"U8\",[1],[0,1]]}", 1, "at byte 5 there is no '{'"},
    {"{\"a\":{}}", 0, "'a' has no dtype"},
    {"{\"a\":{\"dtype\":\"U8\"}}", 0, "'a' has no shape"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[]}}", 0, "'a' has no data_offsets"},
    {"{\"a\":" T("U8", "1", 0, 1) ",}", 1, "there is no '\"'"},
    {"{\"a\":" T("U8", "1", 0, 1) " \"b\":" T("U8", "1", 1, 2) "}", 2, "there is no '}'"},
    {"{\"a\":" T("U8", "1,", 0, 1) "}", 1, "is not a whole number"},
    {"{\"a\":" T("U8", "-1", 0, 1) "}", 1, "is not a whole number"},
    {"{\"a\":" T("U8", "01", 0, 1) "}", 1, "at byte 28 is not a whole number"},
    {"{\"a\":" T("U8", "1.0", 0, 1) "}", 1, "there is no ']'"},
    {"{\"a\":" T("U8", "1e0", 0, 1) "}", 1, "there is no ']'"},
    {"{\"a\":" T("U8", "9223372036854775808", 0, 1) "}", 1, "at byte 28 a number is too large"},
    {"{\"a\":" T("U8", "99999999999999999999", 0, 1) "}", 1, "a number is too large"},
    {"{\"a\":" T("U8", "9223372036854775807", 0, 1) "}", 1, "more elements than there can be"},
    {"{\"a\":" T("F64", "4294967296,4294967296", 0, 0) "}", 0, "more elements than there can be"},
    {"{\"a\":" T("U8", "4294967296,4294967296,0", 0, 0) "}", 0,
     "'a' is empty, and has dims that cannot be counted"},
    {"{\"a\":" T("U8", "0,4611686018427387904", 0, 0) "}", 0, "dims that cannot be counted"},
    {"{\"a\":" T("I16", "2305843009213693952,0", 0, 0) "}", 0, "dims that cannot be counted"},
    {"{\"a\":" T("U8", "0,4611686018427387904", 0, 1) "}", 1, "dims that cannot be counted"},
    {"{\"a\":" T("U8", "1,1,1,1,1,1,1,1,1", 0, 1) "}", 1, "'a' has more than 8 dims"},
    {"{\"a\":" T("F8_E4M3", "1", 0, 1) "}", 1,
     "'a' has the dtype F8_E4M3, which dp.h does not have"},
    {"{\"a\":" T("f32", "1", 0, 4) "}", 4, "'a' has the dtype f32"},
    {"{\"a\":" T("", "1", 0, 4) "}", 4, "'a' has the dtype , which"},
    {"{\"a\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,1]}}", 1, "there is no '\"'"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "there is no '['"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0]}}", 1, "there is no ','"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1,2]}}", 1, "there is no ']'"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":{}}}", 1, "there is no '['"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1,
     "'a' has twice the field 'dtype'"},
    {"{\"a\":{\"x\":1,\"shape\":[],\"data_offsets\":[0,1]}}", 1, "'a' has no dtype"},
    {ALSO("\"x\":1,\"dtype\":\"U8\""), 1, "'a' has twice the field 'dtype'"},
    {ALSO("\"x\""), 1, "there is no ':'"},
    {ALSO("\"x\":"), 1, "is not a value"},
    {ALSO("\"x\":01"), 1, "there is no '}'"},
    {ALSO("\"x\":+1"), 1, "is not a value"},
    {ALSO("\"x\":.5"), 1, "is not a value"},
    {ALSO("\"x\":1."), 1, "is not a value"},
    {ALSO("\"x\":-"), 1, "is not a value"},
    {ALSO("\"x\":1e"), 1, "is not a value"},
    {ALSO("\"x\":1E+"), 1, "is not a value"},
    {ALSO("\"x\":NaN"), 1, "is not a value"},
    {ALSO("\"x\":tru"), 1, "is not a value"},
    {ALSO("\"x\":'a'"), 1, "is not a value"},
    {ALSO("\"x\":[1,]"), 1, "is not a value"},
    {ALSO("\"x\":[1 2]"), 1, "there is no ']'"},
    {ALSO("\"x\":[1}"), 1, "there is no ']'"},
    {ALSO("\"x\":{\"a\"}"), 1, "there is no ':'"},
    {ALSO("\"x\":{1:2}"), 1, "there is no '\"'"},
    {ALSO("\"x\":{\"a\":1,}"), 1, "there is no '\"'"},
    {ALSO("\"x\":{\"a\":1]"), 1, "there is no '}'"},
    {ALSO("\"x\":\"\\ud800\""), 1, "half of a pair"},
    {ALSO("\"x\":\"\x80\""), 1, "not UTF-8"},
    {ALSO("\"x\":" DEEP DEEP), 1, "it is too deep"},
    {"{\"a\":{\"x\":[[", 0, "is not a value"},
    {"{\"a\":{\"x\":{\"", 0, "a string does not end"},
    {"{\"a\":" T("U8", "1", 0, 1) ",\"a\":" T("U8", "1", 1, 2) "}", 2,
     "'hostile': 'a' is there twice"},
    {"{\"a\":" T("U8", "1", 0, 1) ",\"\\u0061\":" T("U8", "0", 1, 1) "}", 1,
     "'hostile': 'a' is there twice"},
    {"{\"a\":" T("U8", "2", 0, 1) "}", 1, "'a' has 1 bytes, its shape and dtype make 2"},
    {"{\"a\":" T("F32", "", 0, 1) "}", 1, "'a' has 1 bytes, its shape and dtype make 4"},
    {"{\"a\":" T("U8", "1", 1, 0) "}", 1, "'a' ends at byte 0, before it begins, at 1"},
    {"{\"a\":" T("U8", "5", 0, 5) "}", 3,
     "'a' ends at byte 5 of the tensors, of which there are 3: the file was cut short"},
    {"{\"a\":" T("U8", "1", 9223372036854775806, 9223372036854775807) "}", 3, "cut short"},
    {"{\"a\":" T("U8", "1", 0, 1) "}", 0, "cut short"},
    {"{\"a\":" T("U8", "2", 0, 2) ",\"b\":" T("U8", "2", 1, 3) "}", 3, "'a' and 'b' overlap"},
    {"{\"a\":" T("U8", "2", 0, 2) ",\"b\":" T("U8", "2", 0, 2) "}", 2, "overlap"},
    {"{\"a\":" T("U8", "3", 0, 3) ",\"b\":" T("U8", "0", 1, 1) "}", 3, "'a' and 'b' overlap"},
    {"{\"a\":" T("U8", "1", 1, 2) "}", 2, "bytes 0 to 1, before 'a', belong to no tensor"},
    {"{\"a\":" T("U8", "1", 0, 1) ",\"b\":" T("U8", "1", 2, 3) "}", 3,
     "bytes 1 to 2, before 'b', belong to no tensor"},
    {"{\"a\":" T("U8", "1", 0, 1) "}", 4, "the last 3 bytes belong to no tensor"},
    {"{}", 1, "the last 1 bytes belong to no tensor"},
    {"{\"a", 0, "a string does not end"},
    {"{\"a\n\":", 0, "a string has a control character"},
    {"{\"\\", 0, "is not an escape of JSON"},
    {"{\"\\x\":", 0, "is not an escape of JSON"},
    {"{\"\\u00g0\":", 0, "is not a hexadecimal digit"},
    {"{\"\\u00", 0, "is not a hexadecimal digit"},
    {"{\"\\u0000\":", 0, "a string has a zero in it"},
    {"{\"\\ud800\":", 0, "half of a pair"},
    {"{\"\\udc00\":" T("U8", "1", 0, 1) "}", 1, "not UTF-8"},
    {"{\"\\ud800\\ud800\":", 0, "half of a pair"},
    {"{\"\\ud800\\n\":", 0, "half of a pair"},
    {"{\"\x80\":", 0, "not UTF-8"},
    {"{\"\xc0\x80\":", 0, "not UTF-8"},
    {"{\"\xc3\":", 0, "not UTF-8"},
    {"{\"\xe0\x80\x80\":", 0, "not UTF-8"},
    {"{\"\xed\xa0\x80\":", 0, "not UTF-8"},
    {"{\"\xf4\x90\x80\x80\":", 0, "not UTF-8"},
    {"{\"\xf8\x88\x80\x80\x80\":", 0, "not UTF-8"},
    {"{\"a\\u001b[31m\\u007f\":{}}", 0, "'a?[31m?' has no dtype"}, /* no colours */
    {"{\"aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffffgggggggggg\":{}}", 0,
     "'aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff...' has no dtype"},
    {"{\"a\":" T("BOOL", "3", 0, 3) ",\"b\":" T("BOOL", "1", 3, 4) "}", 5, "the last 1 bytes"},
    {"{\"__metadata__\":nul}", 0, "there is no '{'"},
    {"{\"__metadata__\":null,\"__metadata__\":{}}", 0, "'__metadata__' is there twice"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "there is no '\"'"},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "'a' is there twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "'__metadata__' is there twice"},
    {"{\"__metadata__\":{\"dp.h\":\"{}\",\"dp.h\":\"{}\"}}", 0, "'dp.h' is there twice"},
    {TREE(""), 1, "'dp.h' in __metadata__ is damaged: at byte 0 there is no '{'"},
    {TREE("[]"), 1, "at byte 0 there is no '{'"},
    {TREE("{}"), 1, "'x' has no place in 'dp.h' in __metadata__"},
    {TREE("{\\\"a\\\":\\\"t:x\\\"}}"), 1, "at byte 11 something follows"},
    {TREE("{\\\"a\\\":\\\"t:x\\\",\\\"b\\\":\\\"t:x\\\"}"), 1,
     "'x' in 'dp.h' in __metadata__ is there twice"},
    {TREE("{\\\"a\\\":\\\"t:y\\\"}"), 1, "'y' in 'dp.h' in __metadata__ is no tensor of this file"},
    {TREE("{\\\"a\\\":\\\"x\\\"}"), 1, "a string does not say what it is"},
    {TREE("{\\\"a\\\":\\\"t:x\\\",\\\"a\\\":1}"), 1, "key 'a' is there twice"},
    {TREE("{\\\"\\\\u001bm\\\":\\\"t:x\\\",\\\"\\\\u001bm\\\":1}"), 1, "key '?m' is there twice"},
    {TREE("{\\\"a\\\":tru}"), 1, "at byte 5 is not a value"},
    {TREE("{\\\"a\\\":}"), 1, "is not a value"},
    {TREE("{\\\"a\\\":[1,]}"), 1, "is not a value"},
    {TREE("{\\\"a\\\":[1 2]}"), 1, "there is no ']'"},
    {TREE("{\\\"a\\\":1-2}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":9223372036854775808}"), 1,
     "at byte 5 a number is malformed, or has more than 64 bits"},
    {TREE("{\\\"a\\\":1.2.3}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":1e}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":1e5e5}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":1e99999}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":.}"), 1, "at byte 5 a number is malformed"},
    {TREE("{\\\"a\\\":1.11111111111111111111111111111111111111111111111111111111111111111111}"), 1,
     "there is no '}'"},
    {TREE("{\\\"a\\\":[\\\"tuple\\\" 1]}"), 1, "there is no ']'"},
    {TREE("{\\\"a\\\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["), 1,
     "it is too deep"},
    {"{\"__metadata__\":{\"dp.h\":\"{\\\"__metadata__\\\":1}\",\"x\":\"y\"}}", 0,
     "key '__metadata__' is there twice"},
};

TEST(hostile_files_are_refused_by_what_is_wrong)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    for (size_t i = 0; i < sizeof hostile_files / sizeof hostile_files[0]; i++) {
        const other_file *row = &hostile_files[i];
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value got = dp_int(5);
        make_file("hostile", row->header, row->data_bytes);
        dp_status status = dp_file_read(ctx, scope, "hostile", &got);
        bool lacks = strstr(dp_last_error(), "dp.h does not have") != NULL ||
                     strstr(dp_last_error(), "dims") != NULL;
        test_check_status(__FILE__, __LINE__, row->header, status,
                          lacks ? DP_ERR_UNSUPPORTED : DP_ERR_FILE, dp_last_error);
        test_check_error(__FILE__, __LINE__, row->header, status, status, dp_last_error, row->says);
        CHECK(status != DP_OK && got.kind == DP_INT);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* A byte of the file, and what is said of it. */
static void check_bytes(dp_ctx *ctx, const void *bytes, size_t count, const char *says)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    put_file("bytes", bytes, count);
    CHECK_ERROR(dp_file_read(ctx, scope, "bytes", &got), DP_ERR_FILE, says);
    dp_scope_end(scope);
}

TEST(lengths_that_lie)
{
    static const char bool_of_2[] = "\x37\0\0\0\0\0\0\0{\"a\":" T("BOOL", "2", 0, 2) "}\1\2";
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    check_bytes(ctx, "", 0, "dp_file_read: 'bytes': it is empty");
    check_bytes(ctx, "\2\0\0", 3, "3 bytes are not a safetensors file");
    check_bytes(ctx, "\2\0\0\0\0\0\0", 7, "7 bytes are not a safetensors file");
    check_bytes(ctx, "\0\0\0\0\0\0\0\0", 8, "at byte 0 there is no '{'");
    check_bytes(ctx, "\3\0\0\0\0\0\0\0{}", 10, "the header has 3 bytes, the file only 2 more");
    check_bytes(ctx, "\0\xe1\xf5\5\0\0\0\0{}", 10, "the header has 100000000 bytes");
    check_bytes(ctx, "\1\xe1\xf5\5\0\0\0\0{}", 10, "a header of 100000001 bytes, the limit is");
    check_bytes(ctx, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "18446744073709551615 bytes");
    check_bytes(ctx, "\xf8\xff\xff\xff\xff\xff\xff\xff{}", 10, "not a safetensors file");
    check_bytes(ctx, "\3\0\0\0\0\0\0\0{}\0", 11, "something follows");
    check_bytes(ctx, bool_of_2, sizeof bool_of_2 - 1, "'a' is BOOL and has a byte of 2");
    dp_close(ctx);
}

/* Wherever a file ends too early, and whatever bit of a header is another one, there is a sentence,
   or a value that can be written again. */
TEST(no_piece_of_a_file_is_taken_for_one)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *all = dp_scope_begin(ctx);
    size_t count = 0;
    dp_value got;
    enter_folder();
    CHECK_OK(dp_file_write(
        ctx, "good", tree_of(all, "{'m': {'w': f32[2,2], 'b': bool[3]}, 'n': [1, 2.5, 'x']}")));
    char *bytes = get_file("good", &count);
    for (size_t end = 0; end < count; end += (size_t)test_step())
        check_bytes(ctx, bytes, end, "dp_file_read: 'bytes': ");
    for (size_t at = 0; at < count; at += (size_t)test_step())
        for (int bit = 0; bit < 8; bit += 3) {
            dp_scope *scope = dp_scope_begin(ctx);
            bytes[at] ^= (char)(1 << bit);
            put_file("flipped", bytes, count);
            bytes[at] ^= (char)(1 << bit);
            dp_status status = dp_file_read(ctx, scope, "flipped", &got);
            if (status == DP_OK)
                CHECK_OK(dp_file_write(ctx, "again", got));
            else
                CHECK(status == DP_ERR_FILE || status == DP_ERR_UNSUPPORTED);
            dp_scope_end(scope);
        }
    dp_close(ctx);
}

/* ---- Python ---------------------------------------------------------------------------------- */

static const char to_python[] =
    "import sys\n"
    "try:\n"
    "    import json, numpy\n"
    "    from safetensors import safe_open\n"
    "    from safetensors.numpy import load_file, save_file\n"
    "except ImportError:\n"
    "    sys.exit(77)\n"
    "t = load_file('ours')\n"
    "assert sorted(t) == ['bool', 'flag', 'i8', 'm.w', 'm.x.0', 'm.x.1', 'none'], sorted(t)\n"
    "assert t['m.w'].dtype == numpy.float32 and t['m.w'].tolist() == [[0, 1, 2], [3, 4, 5]]\n"
    "assert t['m.x.0'].dtype == numpy.float64 and t['m.x.0'].shape == ()\n"
    "assert t['m.x.1'].dtype == numpy.float16 and t['m.x.1'].tolist() == [0, 1]\n"
    "assert t['bool'].tolist() == [False, True, False] and t['none'].shape == (0, 4)\n"
    "assert t['i8'].tolist() == [-1, 5] and t['flag'].dtype == numpy.int64\n"
    "with safe_open('ours', 'numpy') as f:\n"
    "    assert f.metadata()['format'] == 'np'\n"
    "    tree = json.loads(f.metadata()['dp.h'])\n"
    "assert tree['epoch'] == 3 and tree['lr'] == 0.1 and tree['name'] == 's:a\"b'\n"
    "assert tree['m'] == {'w': 't:m.w', 'x': ['t:m.x.0', 't:m.x.1']}\n"
    "save_file({'bias': numpy.arange(3, dtype=numpy.int32), 'on': numpy.array([True]),\n"
    "           'a.b': numpy.array(2.5)}, 'theirs', metadata={'k': 'v'})\n"
    "t['m.w'][0, 0] = 7\n"
    "with safe_open('ours', 'numpy') as f:\n"
    "    save_file(t, 'changed', metadata=f.metadata())\n";

static int run_python(const char *program)
{
    put_file("program.py", program, strlen(program));
    int status = system("python3 program.py 2>said");
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Both ways; also one of ours whose tensors a script there has changed. */
TEST_SLOW(python_reads_and_writes_the_same, 60)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    size_t count = 0;
    dp_value got, value = tree_of(scope, "{'m': {'w': f32[2,3], 'x': [f64[], f16[2]]}, 'bool': "
                                         "bool[3], 'none': f32[0,4], 'i8': i8[2]=-1 5, 'flag': "
                                         "i64[1], 'epoch': 3, 'lr': 0.1, 'name': 'a\"b', "
                                         "'__metadata__': {'format': 'np'}}");
    enter_folder();
    CHECK_OK(dp_file_write(ctx, "ours", value));
    int status = run_python(to_python);
    if (status == 77 || status == 127)
        leave_folder();
    if (status == 77 || status == 127)
        SKIP("no Python with safetensors and numpy");
    test_check_str(__FILE__, __LINE__, "Python", get_file("said", &count), "");
    CHECK_OK(dp_file_read(ctx, scope, "theirs", &got));
    CHECK_TREE(ctx, dp_get(got, "bias"), "i32[3]=0 1 2");
    CHECK_TREE(ctx, dp_get(got, "on"), "bool[1]=1");
    CHECK_TREE(ctx, dp_get(got, "a.b"), "f64[]=2.5");
    CHECK_TREE(ctx, dp_get(got, "__metadata__"), "{'k': 'v'}");
    CHECK_OK(dp_file_read(ctx, scope, "changed", &got));
    CHECK_TREE(ctx, dp_get(got, "m"), "{'w': f32[2,3]=7 1 2 3 4 5, 'x': [f64[]=0, f16[2]=0 1]}");
    CHECK_TREE(ctx, dp_get(got, "epoch"), "3");
    dp_close(ctx);
}

/* ---- what can go wrong while a file is written ----------------------------------------------- */

/* The file there is the old one still, and nothing else is. */
static void check_old(dp_ctx *ctx, const char *path)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    CHECK_OK(dp_file_read(ctx, scope, path, &got));
    CHECK_TREE(ctx, got, "{'old': 1}");
    CHECK_INT(count_names(".", ""), 1);
    dp_scope_end(scope);
}

/* No room: the system lets a file grow to that size and no further. */
static void write_within(dp_ctx *ctx, rlim_t most, dp_value value, const char *says)
{
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dp_ctx *own = NULL;
        CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
        CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &own));
        CHECK_INT(setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, most}), 0);
        if (says != NULL)
            CHECK_ERROR(dp_file_write(own, "file", value), DP_ERR_FILE, says);
        else
            CHECK_OK(dp_file_write(own, "file", value));
        _exit(EXIT_SUCCESS);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    if (says != NULL)
        check_old(ctx, "file");
}

TEST(a_full_disk_leaves_the_old_file)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor large;
    dp_value value, old = tree_of(scope, "{'old': 1}"), got;
    struct stat there;
    enter_folder();
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, DP_F64, 1, (int64_t[]){300000}, &large));
    CHECK_OK(dp_fill(ctx, &large, dp_float(0)));
    value = DP_DICT(scope, {"large", dp_of(scope, &large)});
    CHECK_OK(dp_file_write(ctx, "file", value));
    CHECK_INT(stat("file", &there), 0);
    CHECK_OK(dp_file_write(ctx, "file", old));
    const char *says = "dp_file_write: 'file': cannot write 'file.part': File too large";
    const off_t limits[] = {0, 1, 7, 8, 50, 100, 4096, 1 << 20, 2000000, there.st_size - 1};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        write_within(ctx, (rlim_t)limits[i], value, says);
    write_within(ctx, (rlim_t)there.st_size, value, NULL);
    CHECK_OK(dp_file_read(ctx, scope, "file", &got));
    CHECK_INT(dp_get(got, "large").as.t->shape[0], 300000);
    dp_close(ctx);
}

static void check_not_written(dp_ctx *ctx, const char *path, const char *says)
{
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_file_write(ctx, path, DP_DICT(scope, {"n", dp_int(1)})), DP_ERR_FILE, says);
    dp_scope_end(scope);
}

TEST(places_where_no_file_can_be)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got, old = tree_of(scope, "{'old': 1}");
    static char endless[6000];
    enter_folder();
    check_not_written(ctx, "none/file",
                      "dp_file_write: 'none/file': cannot create 'none/file.part': No such file");
    CHECK_INT(mkdir("folder", 0777), 0);
    check_not_written(ctx, "folder", "'folder': it is not a regular file");
    check_not_written(ctx, ".", "it is not a regular file");
    CHECK_INT(rmdir("folder"), 0);
    CHECK_INT(mkfifo("pipe", 0666), 0);
    check_not_written(ctx, "pipe", "'pipe': it is not a regular file");
    CHECK_ERROR(dp_file_read(ctx, scope, "pipe", &got), DP_ERR_FILE, "'pipe': it is not a regular");
    CHECK_ERROR(dp_file_read(ctx, scope, ".", &got), DP_ERR_FILE, "'.': it is not a regular file");
    CHECK_INT(rename("pipe", "file.part"), 0);
    check_not_written(ctx, "file", "'file.part' is not a regular file");
    CHECK_INT(unlink("file.part"), 0);
    CHECK_INT(mkdir("file.part", 0777), 0);
    check_not_written(ctx, "file", "cannot create 'file.part': ");
    CHECK_INT(rmdir("file.part"), 0);
    put_file("theirs", "x", 1); /* is not written through a link that somebody has put there */
    CHECK_INT(symlink("theirs", "file.part"), 0);
    check_not_written(ctx, "file", "cannot create 'file.part': Too many levels");
    CHECK_INT(unlink("file.part"), 0);
    CHECK_INT(unlink("theirs"), 0);
    memset(endless, 'x', sizeof endless - 1);
    endless[sizeof endless - 1] = '\0';
    check_not_written(ctx, endless, "xxx': cannot create 'xxx");
    CHECK_ERROR(dp_file_read(ctx, scope, endless, &got), DP_ERR_FILE, "xxx': it cannot be opened");
    CHECK_ERROR(dp_file_read(ctx, scope, "none", &got), DP_ERR_NO_FILE,
                "dp_file_read: 'none': it cannot be opened: No such file");
    CHECK_INT(count_names(".", ""), 0);
    CHECK_OK(dp_file_write(ctx, "file", old)); /* a link is replaced */
    CHECK_INT(rename("file", "far"), 0);
    CHECK_INT(symlink("far", "file"), 0);
    CHECK_OK(dp_file_write(ctx, "./file", tree_of(scope, "{'new': 2}")));
    CHECK_INT(unlink("file"), 0);
    check_old(ctx, "far");
    dp_close(ctx);
}

/* These stand before the system's own, in the whole program: see refusal.h. */
static struct refusal refusal;
static atomic_int refusal_at; /* the others are read while it is positive */

void refuse(struct refusal next)
{
    atomic_store(&refusal_at, 0);
    refusal = next;
    atomic_store(&refusal_at, next.call != NULL ? next.at : 0);
}

bool refuses_later(void)
{
    return atomic_load(&refusal_at) > 0;
}

static bool refuses(const char *call)
{
    bool now = refuses_later() && strcmp(refusal.call, call) == 0 &&
               atomic_fetch_sub(&refusal_at, 1) == 1;
    if (now && refusal.hook != NULL) {
        refusal.hook();
        return false;
    }
    errno = now ? refusal.error : errno;
    return now;
}

int fsync(int fd)
{
    return refuses("fsync") ? -1 : (int)syscall(SYS_fsync, fd);
}

int stat(const char *path, struct stat *out)
{
    return refuses("stat") ? -1 : fstatat(AT_FDCWD, path, out, 0);
}

int lstat(const char *path, struct stat *out)
{
    return refuses("lstat") ? -1 : fstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW);
}

int open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = (flags & O_CREAT) != 0 ? va_arg(args, mode_t) : 0;
    va_end(args);
    return refuses("open") ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    return refuses("write") ? -1 : (ssize_t)syscall(SYS_write, fd, bytes, count);
}

int ftruncate(int fd, off_t bytes)
{
    return refuses("ftruncate") ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

int flock(int fd, int how)
{
    return refuses("flock") ? -1 : (int)syscall(SYS_flock, fd, how);
}

int rename(const char *from, const char *to)
{
    if (refuses("rename"))
        return -1;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlink(const char *path)
{
    return refuses("unlink") ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    return refuses("send") ? -1 : (ssize_t)syscall(SYS_sendto, fd, data, bytes, flags, NULL, 0);
}

ssize_t recv(int fd, void *data, size_t bytes, int flags)
{
    return refuses("recv") ? -1 : (ssize_t)syscall(SYS_recvfrom, fd, data, bytes, flags, NULL, 0);
}

typedef struct write_step { /* of writing a file, which fails */
    struct refusal refusal;
    dp_status status;
    const char *says;
    bool is_new; /* the file is in its place */
} write_step;

static const write_step steps[] = {
    {{"flock", 1, EWOULDBLOCK, NULL}, DP_ERR_FILE, "another process, or thread, is writing", false},
    {{"flock", 1, ENOLCK, NULL}, DP_OK, NULL, true},
    {{"ftruncate", 1, EIO, NULL},
     DP_ERR_FILE,
     "cannot empty 'file.part': Input/output error",
     false},
    {{"fsync", 1, EIO, NULL}, DP_ERR_FILE, "cannot write 'file.part': Input/output error", false},
    {{"fsync", 1, ENOSPC, NULL}, DP_ERR_FILE, "'file.part': No space left on device", false},
    {{"rename", 1, EIO, NULL}, DP_ERR_FILE, "cannot rename 'file.part': Input/output error", false},
    {{"fsync", 2, EIO, NULL},
     DP_ERR_FILE,
     "cannot make sure of the name in '.': Input/output",
     true},
    {{"fsync", 2, EINVAL, NULL}, DP_OK, NULL, true}, /* systems that have no such thing */
    {{"fsync", 2, ENOTSUP, NULL}, DP_OK, NULL, true},
    {{"fsync", 2, ENOSYS, NULL}, DP_OK, NULL, true},
    {{"fsync", 2, EBADF, NULL}, DP_OK, NULL, true},
    {{"fsync", 1, EINTR, NULL}, DP_OK, NULL, true}, /* a signal */
    {{"fsync", 2, EINTR, NULL}, DP_OK, NULL, true},
    {{"fsync", 3, EIO, NULL}, DP_OK, NULL, true}};

TEST(every_step_of_a_write_fails)
{
    dp_ctx *ctx = open_cpus(1);
    enter_folder();
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value old = tree_of(scope, "{'old': 1}"), got;
        CHECK_OK(dp_file_write(ctx, "file", old));
        int files = open_files();
        refuse(steps[i].refusal);
        dp_status status = dp_file_write(ctx, "file", tree_of(scope, "{'new': 2}"));
        refuse((struct refusal){.call = NULL});
        CHECK_STATUS(status, steps[i].status);
        if (status != DP_OK)
            CHECK_SAYS(dp_last_error(), steps[i].says);
        CHECK_INT(open_files(), files);
        CHECK_OK(dp_file_read(ctx, scope, "file", &got));
        CHECK_TREE(ctx, got, steps[i].is_new ? "{'new': 2}" : "{'old': 1}");
        dp_scope_end(scope);
    }
    CHECK_INT(count_names(".", ""), 1);
    dp_close(ctx);
}

TEST(paths_of_any_form)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .poison = true}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value got;
    char paths[4][320] = {"in/file", "./file", "in/../in//file"};
    enter_folder();
    CHECK_INT(mkdir("in", 0777), 0);
    snprintf(paths[3], sizeof paths[3], "%s/file", own_folder);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(dp_file_write(ctx, paths[i], DP_DICT(scope, {"i", dp_int(i)})));
        CHECK_OK(dp_file_read(ctx, scope, paths[i], &got));
        CHECK_INT(dp_get(got, "i").as.i, i);
    }
    CHECK_INT(count_names(".", ""), 2);
    refuse((struct refusal){.call = "fsync", .at = 2, .error = EIO});
    CHECK_ERROR(dp_file_write(ctx, "in/file", got), DP_ERR_FILE, "of the name in 'in/': Input/");
    dp_close(ctx);
}

TEST(other_writers_of_the_file_are_left_alone)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = tree_of(scope, "{'old': 1}"), got;
    enter_folder();
    put_file("file.part", "what a process that was killed has left, which is longer than all", 65);
    CHECK_OK(dp_file_write(ctx, "file", value));
    check_old(ctx, "file");
    int other = open("file.part", O_RDWR | O_CREAT, 0666);
    CHECK(other >= 0);
    CHECK_INT(flock(other, LOCK_EX), 0);
    CHECK_INT(write(other, "half", 4), 4);
    CHECK_ERROR(dp_file_write(ctx, "file", tree_of(scope, "{'new': 2}")), DP_ERR_FILE,
                "another process, or thread, is writing 'file.part'");
    struct stat there;
    CHECK_INT(stat("file.part", &there), 0);
    CHECK_INT(there.st_size, 4);
    CHECK_OK(dp_file_read(ctx, scope, "file", &got));
    CHECK_TREE(ctx, got, "{'old': 1}");
    close(other);
    CHECK_OK(dp_file_write(ctx, "file", value));
    check_old(ctx, "file");
    dp_close(ctx);
}

static void another_writes_the_file(void)
{
    CHECK_INT(rename("theirs", "file"), 0);
}

/* Another writer begins and ends before the part is locked, or while it is: on a file system that
   has no locks. */
TEST(a_file_that_came_meanwhile_stays)
{
    static const struct refusal moments[] = {{"open", 1, 0, another_writes_the_file},
                                             {"flock", 1, 0, another_writes_the_file},
                                             {"fsync", 1, 0, another_writes_the_file}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value mine = tree_of(scope, "{'mine': 3}"), old = tree_of(scope, "{'old': 1}");
    const char *says = "dp_file_write: 'file': another process, or thread, has written 'file' "
                       "meanwhile, and that file stays";
    enter_folder();
    for (int there = 0; there < 2; there++) /* before that */
        for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++) {
            CHECK_OK(dp_file_write(ctx, "theirs", old));
            if (there)
                CHECK_OK(dp_file_write(ctx, "file", mine));
            refuse(moments[i]);
            CHECK_ERROR(dp_file_write(ctx, "file", mine), DP_ERR_FILE, says);
            check_old(ctx, "file");
            CHECK_OK(dp_file_write(ctx, "file", mine)); /* now it is known */
            CHECK_INT(unlink("file"), 0);
        }
    dp_close(ctx);
}

static void somebody_removes_the_file(void)
{
    CHECK_INT(unlink("file"), 0);
}

TEST(a_file_that_went_meanwhile_is_written)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    enter_folder();
    CHECK_OK(dp_file_write(ctx, "file", tree_of(scope, "{'older': 0}")));
    refuse((struct refusal){.call = "fsync", .at = 1, .hook = somebody_removes_the_file});
    CHECK_OK(dp_file_write(ctx, "file", tree_of(scope, "{'old': 1}")));
    check_old(ctx, "file");
    dp_close(ctx);
}

static void another_takes_the_name(void)
{
    CHECK_INT(unlink("file.part"), 0);
    put_file("file.part", "theirs", 6);
    refuse((struct refusal){.call = "rename", .at = 1, .error = EIO});
}

TEST(a_part_of_another_writer_is_not_removed)
{
    dp_ctx *ctx = open_cpus(1);
    size_t count;
    enter_folder();
    refuse((struct refusal){.call = "fsync", .at = 1, .hook = another_takes_the_name});
    check_not_written(ctx, "file", "cannot rename 'file.part': Input/output error");
    CHECK_BYTES(get_file("file.part", &count), "theirs", 6);
    CHECK_INT(count_names(".", ""), 1);
    dp_close(ctx);
}

/* Writes one of two files over the other for as long as it lives. */
static void write_for_ever(void)
{
    static float numbers[2][40000];
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    for (int i = 0; i < 40000; i++)
        numbers[1][i] = 1;
    for (int i = 1;; i = !i) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value all = dp_array(scope, numbers[i], DP_F32, 1, (int64_t[]){40000});
        CHECK_OK(dp_file_write(ctx, "file", DP_DICT(scope, {"x", all}, {"i", dp_int(i)})));
        dp_scope_end(scope);
    }
}

/* Whenever it is killed, there is one of them, whole. */
TEST(kill_9_leaves_a_whole_file)
{
    dp_ctx *ctx = open_cpus(1);
    uint64_t state = test_seed();
    enter_folder();
    for (int i = 0; i < 12; i++) {
        dp_value got;
        kill_beside(write_for_ever, "file", &state, 5000000);
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_file_read(ctx, scope, "file", &got));
        const float *x = dp_get(got, "x").as.t->data;
        for (int k = 0; k < 40000; k++)
            CHECK_INT(x[k], dp_get(got, "i").as.i);
        dp_scope_end(scope);
        CHECK(count_names(".", "") <= 2);
    }
    dp_close(ctx);
}

TEST(values_that_no_file_holds)
{
    static const char *const rows[][2] = {
        {"[1]", "the value is not a dict"},
        {"f32[2]", "the value is not a dict"},
        {"None", "the value is not a dict"},
        {"{'a': [1, &]}", "'a.1' is an opaque pointer, for which files have no form"},
        {"{'a': {'b': <stack: f32[2]>}}", "'a.b' is a container"},
        {"{'a': '\xff'}", "a string or key in 'a' is not UTF-8"},
        {"{'a\xff': 1}", "a string or key in 'a\xff' is not UTF-8"},
        {"{'a': {'\xc3': 1}}", "a string or key in 'a.\xc3' is not UTF-8"},
        {"{'__metadata__': 3}", "'__metadata__' is not a dict"},
        {"{'__metadata__': f32[2]}", "'__metadata__' is not a dict"},
        {"{'__metadata__': {'a': 3}}", "'a' in '__metadata__' is not a string"},
        {"{'__metadata__': {'dp.h': ''}}", "'dp.h' in '__metadata__' is the library's own"},
        {"{'__metadata__': {'a': '\xff'}}", "a string or key in 'a' is not UTF-8"},
        {"{'__metadata__': {'\xff': 'a'}}", "a string or key in '__metadata__' is not UTF-8"}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value hand = tree_of(scope, "{'a': [f32[2]]}");
    enter_folder();
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        CHECK_ERROR(dp_file_write(ctx, "file", tree_of(scope, rows[i][0])), DP_ERR_INVALID,
                    rows[i][1]);
    dp_tensor lost = tree_lost(scope), huge = tree_tensor(scope, DP_F64, 1, (int64_t[]){1}, 0);
    CHECK_ERROR(dp_file_write(ctx, "file", DP_DICT(scope, {"a", dp_of(scope, &lost)})),
                DP_ERR_INVALID, "dp_file_write: 'file': ");
    huge.shape[0] = (int64_t)1 << 58;
    huge.stride[0] = 0;
    dp_value many = dp_of(scope, &huge);
    CHECK_ERROR(dp_file_write(ctx, "file", DP_DICT(scope, {"a", many}, {"b", many}, {"c", many})),
                DP_ERR_INVALID, "there are more bytes than a file can have");
    hand.count = 5;
    hand.status = 0;
    hand.reserved = 0;
    hand.as.pairs = (const dp_pair[]){{"a", {.kind = 77}}, {0}, {0}, {0}, {0}};
    CHECK_ERROR(dp_file_write(ctx, "file", hand), DP_ERR_INVALID, "dp_file_write: 'file': ");
    CHECK_ERROR(dp_file_write(ctx, "file", dp_string(NULL, "x")), DP_ERR_INVALID,
                "dp_file_write: 'file': dp_string: ");
    CHECK_INT(count_names(".", ""), 0);
    dp_close(ctx);
}

TEST(calls_that_make_no_sense)
{
    dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx), *elsewhere = dp_scope_begin(other);
    dp_value value = tree_of(scope, "{}"), out;
    CHECK_ERROR(dp_file_write(NULL, "x", value), DP_ERR_INVALID, "ctx");
    CHECK_ERROR(dp_file_write(ctx, NULL, value), DP_ERR_INVALID, "dp_file_write: path is NULL");
    CHECK_ERROR(dp_file_write(ctx, "", value), DP_ERR_INVALID, "path is no name of a file");
    CHECK_ERROR(dp_file_write(ctx, "x/", value), DP_ERR_INVALID, "path is no name of a file");
    CHECK_ERROR(dp_checkpoint_save(NULL, "x", value), DP_ERR_INVALID, "ctx");
    CHECK_ERROR(dp_checkpoint_save(ctx, NULL, value), DP_ERR_INVALID, "dp_checkpoint_save: path");
    CHECK_ERROR(dp_file_read(NULL, scope, "x", &out), DP_ERR_INVALID, "ctx");
    CHECK_ERROR(dp_file_read(ctx, NULL, "x", &out), DP_ERR_INVALID, "dp_file_read: scope is NULL");
    CHECK_ERROR(dp_file_read(ctx, elsewhere, "x", &out), DP_ERR_INVALID,
                "dp_file_read: the scope is of another context");
    CHECK_ERROR(dp_file_read(ctx, scope, NULL, &out), DP_ERR_INVALID, "path is NULL");
    CHECK_ERROR(dp_file_read(ctx, scope, "x", NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_checkpoint_load(NULL, scope, "x", &out), DP_ERR_INVALID, "ctx");
    CHECK_ERROR(dp_checkpoint_load(ctx, NULL, "x", &out), DP_ERR_INVALID,
                "dp_checkpoint_load: scope is NULL");
    CHECK_ERROR(dp_checkpoint_load(ctx, elsewhere, "x", &out), DP_ERR_INVALID,
                "dp_checkpoint_load: the scope is of another context");
    CHECK_ERROR(dp_checkpoint_share(ctx, elsewhere, 0, value, &out), DP_ERR_INVALID,
                "dp_checkpoint_share: the scope is of another context");
    CHECK_ERROR(dp_module_save(NULL, scope, &out), DP_ERR_INVALID, "dp_module_save: not a module");
    CHECK_ERROR(dp_module_load(NULL, value, NULL), DP_ERR_INVALID, "dp_module_load: not a module");
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(ctx, &(dp_module_config){.name = "net"}, &net));
    CHECK_ERROR(dp_module_save(net, NULL, &out), DP_ERR_INVALID, "dp_module_save: scope is NULL");
    CHECK_ERROR(dp_module_save(net, elsewhere, &out), DP_ERR_INVALID,
                "dp_module_save: the scope is of another context");
    CHECK_ERROR(dp_module_save(net, scope, NULL), DP_ERR_INVALID, "dp_module_save: out is NULL");
    CHECK_ERROR(dp_module_load(net, dp_int(1), NULL), DP_ERR_INVALID,
                "the saved value is not a dict");
    CHECK_ERROR(dp_module_load(net, dp_get(value, "model"), NULL), DP_ERR_INVALID, "is not a dict");
    CHECK_ERROR(dp_module_load(net, dp_string(NULL, "x"), NULL), DP_ERR_INVALID,
                "dp_module_load: dp_string: ");
    CHECK_OK(dp_module_save(net, scope, &out));
    CHECK_TREE(ctx, out, "{}");
    CHECK_OK(dp_module_load(net, out, NULL));
    dp_abort(other, DP_ERR_ABORTED, "over");
    CHECK_ERROR(dp_file_write(other, "x", value), DP_ERR_ABORTED, "dp_file_write: 'x': ");
    CHECK_ERROR(dp_checkpoint_save(other, "x", value), DP_ERR_ABORTED, "the job had failed");
    dp_close(ctx), dp_close(other);
}

/* ---- modules --------------------------------------------------------------------------------- */

/* Parameters "bias" and "w", which is "body.w" too, a frozen one, and a buffer. */
static dp_module *tied_net(dp_ctx *ctx)
{
    const dp_param_config own[] = {{.name = "bias", .ndim = 1, .shape = {3}},
                                   {.name = "mean", .dtype = DP_F64, .buffer = true},
                                   {.name = "w", .ndim = 2, .shape = {2, 2}, .same_as = "body.w"}};
    const dp_param_config inner[] = {
        {.name = "w", .ndim = 2, .shape = {2, 2}},
        {.name = "fixed", .dtype = DP_I64, .ndim = 1, .shape = {1}, .frozen = true}};
    static const dp_method forward = {"forward", give_none};
    dp_module *body = NULL, *net = NULL;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "body", .params = inner, .param_count = 2}, &body));
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = &forward,
                                                  .method_count = 1,
                                                  .params = own,
                                                  .param_count = 3,
                                                  .children = &body,
                                                  .child_count = 1},
                              &net));
    return net;
}

#define TIED                                                                                       \
    "'bias': f32[3]=1 2 3, 'mean': f64[]=4.5, 'w': f32[2,2]=5 6 7 8, 'body.fixed': i64[1]=9"

static void check_net(dp_module *net, dp_scope *scope, const char *want)
{
    dp_value saved;
    CHECK_OK(dp_module_save(net, scope, &saved));
    CHECK_TREE(dp_module_ctx(net), saved, want);
}

/* By file, from one net to another; "module." stands nowhere, whatever is around the net. */
TEST_BACKENDS(modules_come_back)
{
    dp_module *net = tied_net(ctx), *other = tied_net(ctx), *par = NULL, *all = NULL;
    dp_value saved;
    enter_folder();
    CHECK_OK(dp_module_load(net, tree_of(scope, "{" TIED "}"), NULL));
    check_net(net, scope, "{" TIED "}");
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    check_net(par, scope, "{" TIED "}");
    CHECK_OK(dp_module_save(par, scope, &saved));
    CHECK_OK(dp_file_write(ctx, "net", saved));
    CHECK_OK(dp_distributed(other, NULL, &all));
    CHECK_OK(dp_file_read(ctx, scope, "net", &saved));
    CHECK_OK(dp_module_load(all, saved, NULL));
    check_net(all, scope, "{" TIED "}");
    CHECK_OK(dp_params_compare(all));
    CHECK_OK(dp_module_save(all, scope, &saved));
    CHECK_OK(dp_module_load(all, saved, NULL)); /* itself */
    check_net(other, scope, "{" TIED "}");
}

typedef struct fitting {
    const char *saved;
    dp_module_load_config config;
    const char *says; /* what the net has then, or what is said */
} fitting;

#define ZEROS "'bias': f32[3]=0 0 0, 'mean': f64[]=0, 'w': f32[2,2]=0 0 0 0, 'body.fixed': i64[1]=0"

static const fitting fits[] = {
    {"{'body.w': f32[2,2]=5 6 7 8, 'body.fixed': i64[1]=9, 'bias': f32[3]=1 2 3, 'mean': "
     "f64[]=4.5}",
     {0},
     "{" TIED "}"},
    {"{" TIED ", 'body.w': f32[2,2]=5 6 7 8, '__metadata__': {'format': 'pt'}}", {0}, "{" TIED "}"},
    {"{'bias': f32[3]=1 2 3}",
     {.allow_missing = true},
     "{'bias': f32[3]=1 2 3, 'mean': f64[]=0, 'w': f32[2,2]=0 0 0 0, 'body.fixed': i64[1]=0}"},
    {"{}", {.allow_missing = true}, "{" ZEROS "}"},
    {"{" TIED ", 'more': 3}", {.allow_unknown = true}, "{" TIED "}"},
    {"{" TIED "}", {.check_only = true}, "{" ZEROS "}"},
    {"{'module.bias': f32[3]=1 2 3, 'bias': f32[1], 'modul': 1}",
     {.prefix = "module.", .allow_missing = true},
     "{'bias': f32[3]=1 2 3, 'mean': f64[]=0, 'w': f32[2,2]=0 0 0 0, 'body.fixed': i64[1]=0}"},
    {"{'bias': f16[3]=1 2 3, 'mean': bf16[]=0.5, 'w': f64[2,2]=1 2 3 4, 'body.fixed': i64[1]=3}",
     {.cast = true},
     "{'bias': f32[3]=1 2 3, 'mean': f64[]=0.5, 'w': f32[2,2]=1 2 3 4, 'body.fixed': i64[1]=3}"},
    {"{" TIED ", 'body.w': f64[2,2]=5 6 7 8.000000001}", {.cast = true}, "{" TIED "}"},
    {"{'body.w': f16[2,2]=5 6 7 8, " TIED "}", {.cast = true}, "{" TIED "}"},
};

static const fitting misfits[] = {
    {"{}",
     {0},
     "dp_module_load: of the 4 parameters of 'net': 4 missing ('bias', 'mean', 'w', "
     "...)"},
    {"{'bias': f32[3], 'mean': f64[], 'body.fixed': i64[1]}", {0}, "'net': 1 missing ('w')"},
    {"{" TIED ", 'x': f32[1], 'body.v': 2}", {0}, "'net': 2 unknown ('x', 'body.v')"},
    {"{" TIED ", 'x': f32[1]}", {.allow_missing = true}, "'net': 1 unknown ('x')"},
    {"{'x': f32[1]}", {.allow_unknown = true}, "'net': 4 missing ('bias', 'mean', 'w', ...)"},
    {"{'x': 1, 'bias': f32[2], 'mean': f64[], 'w': f32[2,2]}",
     {0},
     "'net': 1 missing ('body.fixed'); 1 unknown ('x'); 1 different ('bias'): 'bias' is f32[3], "
     "and "
     "not f32[2]"},
    {"{'bias': f32[3,1], 'mean': f32[], 'w': f32[2,3], 'body.fixed': i64[1]}",
     {.allow_missing = true, .allow_unknown = true},
     "'net': 3 different ('bias', 'mean', 'w'): 'bias' is f32[3], and not f32[3,1]"},
    {"{'bias': 1}", {.allow_missing = true}, "'bias' is f32[3], and not a tensor here"},
    {"{'bias': [f32[3]]}", {.allow_missing = true}, "'bias' is f32[3], and not a tensor here"},
    {"{'bias': f16[3]}", {.allow_missing = true}, "'bias' is f32[3], and not f16[3]"},
    {"{'bias': i64[3]}", {.allow_missing = true, .cast = true}, "is f32[3], and not i64[3]"},
    {"{'body.fixed': f32[1]}", {.allow_missing = true, .cast = true}, "is i64[1], and not f32[1]"},
    {"{'mean': f64[1]}", {.allow_missing = true}, "'mean' is f64[], and not f64[1]"},
    {"{" TIED ", 'body.w': f32[2,2]=5 6 7 9}",
     {0},
     "'body.w' and another name of the same parameter have different numbers"},
    {"{" TIED ", 'body.w': f64[2,2]=5 6 7 9}",
     {.cast = true},
     "'body.w' and another name of the same parameter have different numbers"},
    {"{'w': f32[3,2], 'body.w': f32[2,2]=5 6 7 8}",
     {.allow_missing = true},
     "'net': 1 different ('w'): 'w' is f32[2,2], and not f32[3,2]"},
    {"{'body.w': f32[2,2]=5 6 7 8, 'w': 1}",
     {.allow_missing = true},
     "'net': 1 different ('w'): 'w' is f32[2,2], and not a tensor here"},
    {"{'body.w': f32[3,2], 'w': 1}", {.allow_missing = true}, "2 different ('body.w', 'w')"},
    {"{'bias': f32[1], 'module.bias': f32[3], 'module.x': 1}",
     {.prefix = "module.", .allow_missing = true},
     "'net': 1 unknown ('x')"},
};

/* The shapes and dtypes are f32[3] and so on; all that is refused changes nothing. */
TEST_BACKENDS(saved_trees_must_fit_the_module)
{
    for (size_t i = 0; i < sizeof fits / sizeof fits[0]; i++) {
        dp_module *net = tied_net(ctx);
        dp_value saved =
            tree_on(ctx, scope, tree_of(scope, fits[i].saved), dp_local_device(ctx, (int)i % 2));
        (void)dp_error(DP_ERR_USER, "an older sentence");
        CHECK_OK(dp_module_load(net, saved, &fits[i].config));
        CHECK_STR(dp_last_error(), "an older sentence");
        check_net(net, scope, fits[i].says);
        CHECK_OK(dp_module_destroy(net));
    }
    dp_module *net = tied_net(ctx);
    for (size_t i = 0; i < sizeof misfits / sizeof misfits[0]; i++) {
        dp_value saved = tree_of(scope, misfits[i].saved);
        CHECK_ERROR(dp_module_load(net, saved, &misfits[i].config), DP_ERR_MISMATCH,
                    misfits[i].says);
        check_net(net, scope, "{" ZEROS "}");
    }
}

/* A module of "a" and "b", f32[2,2]. */
static dp_module *pair_net(dp_ctx *ctx)
{
    static const dp_param_config own[] = {{.name = "a", .ndim = 2, .shape = {2, 2}},
                                          {.name = "b", .ndim = 2, .shape = {2, 2}}};
    static const dp_method forward = {"forward", give_none};
    dp_module *net = NULL;
    CHECK_OK(dp_module_create(
        ctx,
        &(dp_module_config){
            .name = "net", .methods = &forward, .method_count = 1, .params = own, .param_count = 2},
        &net));
    return net;
}

static void check_pair(dp_module *net, dp_scope *scope, dp_value a, dp_value b, const char *want)
{
    CHECK_OK(dp_module_load(net, DP_DICT(scope, {"a", a}, {"b", b}), NULL));
    check_net(net, scope, want);
    CHECK_OK(dp_params_compare(net));
}

/* The parameter in another order, one row of it for all, another one, a part of both. */
TEST_BACKENDS(a_module_loads_views_of_itself)
{
    dp_module *net = pair_net(ctx), *all = NULL;
    dp_tensor view;
    dp_value saved;
    CHECK_OK(dp_distributed(net, NULL, &all));
    CHECK_OK(dp_module_save(all, scope, &saved));
    dp_value a = dp_get(saved, "a"), b = dp_get(saved, "b");
    check_pair(all, scope, tree_of(scope, "f32[2,2]=1 2 3 4"), tree_of(scope, "f32[2,2]=5 6 7 8"),
               "{'a': f32[2,2]=1 2 3 4, 'b': f32[2,2]=5 6 7 8}");
    CHECK_OK(dp_transpose(a.as.t, 0, 1, &view));
    check_pair(all, scope, dp_of(scope, &view), b,
               "{'a': f32[2,2]=1 3 2 4, 'b': f32[2,2]=5 6 7 8}");
    check_pair(all, scope, b, a, "{'a': f32[2,2]=5 6 7 8, 'b': f32[2,2]=1 3 2 4}");
    check_pair(all, scope, a, a, "{'a': f32[2,2]=5 6 7 8, 'b': f32[2,2]=5 6 7 8}");
    view = *a.as.t;
    view.stride[0] = 0;
    check_pair(all, scope, dp_of(scope, &view), tree_of(scope, "f32[2,2]=1 2 3 4"),
               "{'a': f32[2,2]=5 6 5 6, 'b': f32[2,2]=1 2 3 4}");
}

/* A parameter as an owner has it, or turned. */
static dp_value owner_view(dp_module *module, dp_scope *scope, size_t owner, size_t param,
                           bool turned)
{
    dp_tensor data;
    CHECK_OK(dp_owner_edit(module, owner, param, &data, NULL));
    if (turned)
        CHECK_OK(dp_transpose(&data, 0, 1, &data));
    return dp_of(scope, &data);
}

/* Exchanged, turned, or as they are: from any owner, from two of them, and into all. */
TEST_BACKENDS(a_module_loads_views_of_any_owner)
{
    dp_module *net = pair_net(ctx), *all = NULL;
    CHECK_OK(dp_distributed(net, NULL, &all));
    const size_t count = dp_owner_count(all);
    for (size_t from = 0; from < count; from++)
        for (int how = 0; how < 4; how++) {
            size_t other = how == 3 ? (from + 1) % count : from;
            check_pair(all, scope, tree_of(scope, "f32[2,2]=1 2 3 4"),
                       tree_of(scope, "f32[2,2]=5 6 7 8"),
                       "{'a': f32[2,2]=1 2 3 4, 'b': f32[2,2]=5 6 7 8}");
            dp_value a = owner_view(all, scope, from, how != 2, how == 1);
            dp_value b = owner_view(all, scope, other, how == 2, how == 1);
            CHECK_OK(dp_module_load(all, DP_DICT(scope, {"a", a}, {"b", b}), NULL));
            for (size_t owner = 0; owner < count; owner++) {
                dp_value got = DP_DICT(scope, {"a", owner_view(all, scope, owner, 0, false)},
                                       {"b", owner_view(all, scope, owner, 1, false)});
                CHECK_TREE(ctx, got,
                           how == 1   ? "{'a': f32[2,2]=5 7 6 8, 'b': f32[2,2]=1 3 2 4}"
                           : how == 2 ? "{'a': f32[2,2]=1 2 3 4, 'b': f32[2,2]=5 6 7 8}"
                                      : "{'a': f32[2,2]=5 6 7 8, 'b': f32[2,2]=1 2 3 4}");
            }
        }
}

/* Whatever lies between where the outer one begins and what is read of it. */
TEST(parameters_may_lie_inside_others)
{
    float outer[8] = {1, 2, 3, 4, 5, 6, 7, 8}, apart[2] = {0};
    const dp_param_config own[] = {{.name = "a", .ndim = 1, .shape = {8}, .data = outer},
                                   {.name = "b", .ndim = 1, .shape = {2}, .data = outer + 2},
                                   {.name = "c", .ndim = 1, .shape = {2}, .data = apart}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net = NULL;
    dp_value saved;
    dp_tensor part;
    CHECK_OK(dp_module_create(
        ctx, &(dp_module_config){.name = "net", .params = own, .param_count = 3}, &net));
    CHECK_OK(dp_module_save(net, scope, &saved));
    CHECK_OK(dp_narrow(dp_get(saved, "a").as.t, 0, 5, 2, &part));
    CHECK_OK(dp_module_load(
        net,
        DP_DICT(scope, {"a", tree_of(scope, "f32[8]=9 9 9 9 9 9 9 9")}, {"c", dp_of(scope, &part)}),
        &(dp_module_load_config){.allow_missing = true}));
    CHECK(apart[0] == 6 && apart[1] == 7 && outer[5] == 9);
    dp_close(ctx);
}

/* ---- training -------------------------------------------------------------------------------- */

/* All the same bits: without a break, with one, and the file of each. */
TEST_BACKENDS(training_goes_on_from_a_file)
{
    training whole = train_begin(ctx, false, false), first = train_begin(ctx, true, false);
    training second = train_begin(ctx, false, false);
    enter_folder();
    train_steps(&whole, 0, 6);
    train_save(&whole, "whole", 6);
    train_steps(&first, 0, 3);
    train_save(&first, "half", 3);
    CHECK_INT(train_load(&second, "half"), 3);
    CHECK_OK(dp_params_compare(second.par));
    train_save(&second, "half again", 3);
    check_same_files("half", "half again");
    train_steps(&second, 3, 6);
    train_save(&second, "second", 6);
    check_same_files("whole", "second");
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static struct job { /* what the processes of a test know */
    int devices;
    bool sharded;   /* the optimizer's state */
    char first[64]; /* a file that is there before */
} job;

static dp_ctx *open_sharded(meeting *m)
{
    dp_config config = m != NULL ? config_of(m, job.devices)
                                 : (dp_config){.device_count = job.devices};
    dp_ctx *ctx = NULL;
    config.colls = NULL;
    config.shards = 8;
    CHECK_OK(dp_open(&config, &ctx));
    return ctx;
}

static void train_on(meeting *m)
{
    char path[64];
    training t = train_begin(open_sharded(m), job.sharded, false);
    snprintf(path, sizeof path, "by %d x %d", m != NULL ? m->process_count : 1, job.devices);
    CHECK_INT(train_load(&t, job.first), 2);
    train_save(&t, path, 2);
    check_same_files(path, job.first);
    if (m != NULL)
        wait_for_all(m);
    train_steps(&t, 2, 4);
    train_save(&t, path, 4);
    dp_close(t.ctx);
}

/* One file for any number of devices and processes, from which all go on alike. */
TEST_SLOW(a_file_is_for_any_devices_and_processes, 30)
{
    enter_folder();
    job.devices = 1;
    training t = train_begin(open_sharded(NULL), false, false);
    train_steps(&t, 0, 2);
    train_save(&t, "first", 2);
    train_steps(&t, 2, 4);
    train_save(&t, "by one", 4);
    dp_close(t.ctx);
    snprintf(job.first, sizeof job.first, "first");
    for (job.devices = 2; job.devices <= 8; job.devices *= 4) {
        train_on(NULL);
        check_same_files(job.devices == 2 ? "by 1 x 2" : "by 1 x 8", "by one");
    }
    job.devices = 1;
    in_processes(2, train_on);
    check_same_files("by 2 x 1", "by one");
    in_processes_on(toy_device(), 2, train_on);
    check_same_files("by 2 x 1", "by one");
    job.devices = 2;
    job.sharded = true;
    in_processes(4, train_on);
    check_same_files("by 4 x 2", "by one");
    CHECK_INT(count_names(".", ""), 6);
}

static void save_in_job(meeting *m)
{
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = dp_none(), got;
    char says[80];
    if (m->process == 0)
        value =
            tree_on(ctx, scope, tree_of(scope, "{'a': f32[3], 'n': [1]}"), dp_local_device(ctx, 1));
    CHECK_OK(dp_checkpoint_save(ctx, "job", value));
    CHECK_OK(dp_checkpoint_load(ctx, scope, "job", &got));
    CHECK_TREE(ctx, got, "{'a': f32[3]=0 1 2, 'n': [1]}");
    CHECK_ERROR(dp_checkpoint_save(ctx, "none/job", value), DP_ERR_FILE,
                "dp_checkpoint_save: 'none/job': rank 0: cannot create 'none/job.part': No such");
    CHECK_ERROR(dp_checkpoint_save(ctx, "job", m->process != 0 ? value : dp_int(1)), DP_ERR_INVALID,
                "dp_checkpoint_save: 'job': rank 0: the value is not a dict");
    CHECK_ERROR(dp_checkpoint_load(ctx, scope, "none", &got), DP_ERR_NO_FILE,
                "dp_checkpoint_load: 'none': rank 0: it cannot be opened: No such file");
    snprintf(says, sizeof says, "%d", m->process);
    CHECK_ERROR(dp_checkpoint_load(ctx, scope, m->process == 2 ? "other" : "job", &got),
                DP_ERR_MISMATCH, "rank 4: it cannot be opened: No such file or directory; others");
    CHECK_ERROR(dp_checkpoint_load(ctx, scope, m->process == 1 ? "damaged" : "job", &got),
                DP_ERR_FILE, "rank 2: 7 bytes are not a safetensors file");
    const char *const files[] = {"other", "damaged", "job"}; /* what is damaged is told first */
    CHECK_ERROR(dp_checkpoint_load(ctx, scope, files[m->process], &got), DP_ERR_FILE,
                "rank 2: 7 bytes are not a safetensors file");
    CHECK_ERROR(dp_checkpoint_load(ctx, scope, m->process == 2 ? "theirs" : "job", &got),
                DP_ERR_MISMATCH, "rank 4: this is another file than rank 0 has");
    CHECK_TREE(ctx, got, "{'a': f32[3]=0 1 2, 'n': [1]}");
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

static void hear_how_it_went(const char *gpus)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    enter_folder();
    put_file("damaged", "7 bytes", 7);
    CHECK_OK(dp_file_write(ctx, "theirs", tree_of(scope, "{'a': f32[3]=0 1 3, 'n': [1]}")));
    dp_close(ctx);
    if (gpus != NULL)
        on_gpus(gpus, save_in_job);
    else
        in_processes(3, save_in_job);
    in_processes_on(toy_device(), 3, save_in_job);
    CHECK_INT(count_names(".", ""), 3);
}

TEST(all_processes_hear_how_it_went)
{
    hear_how_it_went(NULL);
}

#if defined(TEST_SIM)
TEST(all_processes_hear_how_it_went_on_gpus)
{
    hear_how_it_went("223");
}
#endif

/* Process 0 says now and then that it still writes. The file is in memory, and has holes in mind:
   a row of which there are many. */
static void save_for_long(meeting *m)
{
    static char lines[4000];
    dp_ctx *ctx = open_job(m, 1, dp_cpu());
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor rows = tree_tensor(scope, DP_F64, 2, (int64_t[]){1, 1 << 17}, 0);
    dp_value value = dp_none();
    rows.shape[0] = 67;
    rows.stride[0] = 0;
    if (m->process == 0)
        value = DP_DICT(scope, {"rows", dp_of(scope, &rows)});
    CHECK_OK(dp_checkpoint_save(ctx, "long", value));
    dp_recent_collectives(ctx, lines, sizeof lines);
    CHECK_SAYS(lines, "collective 2, broadcast of ");
    CHECK_SAYS(lines, "collective 3, all_reduce of 1 i64 (min), in dp_agree: ");
    CHECK_SAYS(lines, "collective 4, all_reduce of 1 i64 (min), in dp_agree: ");
    CHECK(strstr(lines, "collective 5, ") == NULL);
    CHECK_OK(dp_checkpoint_load(ctx, scope, "long", &value));
    dp_recent_collectives(ctx, lines, sizeof lines);
    CHECK_SAYS(lines, "collective 5, all_reduce of 3 i64 (max)");
    CHECK_SAYS(lines, "collective 6, all_reduce of 1 i64 (min), in dp_agree: ");
    CHECK(strstr(lines, "collective 7, ") == NULL);
    dp_close(ctx);
}

TEST(waiting_process_learns_of_a_long_write)
{
    enter_folder();
    in_processes(2, save_for_long);
    CHECK_INT(count_names(".", ""), 1);
}

/* ---- no memory ------------------------------------------------------------------------------- */

typedef struct sequel { /* what runs with an allocation that fails */
    dp_ctx *ctx;
    dp_scope *scope;
    dp_module *net;
    dp_value saved;
} sequel;

static dp_status all_of_it(sequel *s)
{
    dp_value got;
    DP_TRY(dp_module_save(s->net, s->scope, &got));
    DP_TRY(dp_file_write(
        s->ctx, "file",
        DP_DICT(s->scope, {"m", got}, {"a", s->saved}, {"l", DP_LIST_OF(s->scope, dp_none())},
                {"__metadata__", DP_DICT(s->scope, {"k", dp_string(s->scope, "v")})})));
    DP_TRY(dp_file_read(s->ctx, s->scope, "file", &got));
    DP_TRY(dp_file_read(s->ctx, s->scope, "odd", &got));
    return dp_module_load(s->net, s->saved, &(dp_module_load_config){.cast = true});
}

/* Every allocation in turn: nothing leaks, the old file or the new one is there, the module has
   what it had or what it should have. */
static void fail_each(bool poison)
{
    test_allocator counter = {0};
    dp_config config = {
        .device_count = 2, .poison = poison, .allocator = test_allocator_of(&counter)};
    bool fired = true;
    const int files = open_files();
    for (size_t at = 1; fired; at += (size_t)test_step()) {
        sequel s = {0};
        dp_value got;
        counter = (test_allocator){0};
        CHECK_OK(dp_open(&config, &s.ctx));
        s.net = tied_net(s.ctx);
        s.scope = dp_scope_begin(s.ctx);
        s.saved = tree_of(s.scope,
                          "{'bias': f16[3]=1 2 3, 'mean': f64[]=4.5, 'w': f32[2,2]=5 6 7 8,"
                          " 'body.w': f32[2,2]=5 6 7 8, 'body.fixed': i64[1]=9}");
        check_net(s.net, s.scope, "{" ZEROS "}");
        CHECK_OK(dp_file_write(s.ctx, "file", tree_of(s.scope, "{'old': 1}")));
        counter.fail_at = counter.call_count + at;
        dp_status status = all_of_it(&s);
        fired = counter.fail_count > 0;
        counter.fail_at = 0;
        CHECK(status == DP_OK || (fired && status == DP_ERR_NO_MEMORY));
        CHECK_OK(dp_file_read(s.ctx, s.scope, "file", &got));
        CHECK(dp_get(got, "old").kind == DP_INT || dp_get(got, "m").kind == DP_DICT);
        check_net(s.net, s.scope, status == DP_OK ? "{" TIED "}" : "{" ZEROS "}");
        CHECK_INT(count_names(".", ""), 2);
        dp_close(s.ctx);
        CHECK_NO_LEAKS(&counter);
        CHECK_INT(open_files(), files);
        CHECK(!is_mapped("/test-dp-"));
    }
}

TEST(every_allocation_fails_once)
{
    enter_folder();
    make_file("odd", odd_files[6].header, odd_files[6].data_bytes);
    fail_each(false);
    fail_each(true);
}
