/* test_array.c - dp_array.h: DLPack, files of numpy, and text as numpy prints it. Each test that
   writes files has a folder of its own, in which it is. What numpy prints was printed by 2.4.6. */

#define _GNU_SOURCE /* P_tmpdir */
#include <limits.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "folder.h"
#include "process.h"
#include "tree.h"
#include "dp_array.h"

/* ---- files ----------------------------------------------------------------------------------- */

static dp_status read_npy(dp_ctx *ctx, dp_scope *scope, const char *name, dp_value *out)
{
    dp_tensor tensor;
    DP_TRY(dp_npy_read(ctx, scope, name, &tensor));
    CHECK(tensor.read_only);
    *out = dp_of(scope, &tensor);
    return DP_OK;
}

#define BYTES(text) text, sizeof text - 1

typedef struct file_row {
    const char *bytes;
    size_t count;
    const char *want; /* the array as a tree, or a part of the sentence */
    dp_status status;
} file_row;

static void check_npy(dp_ctx *ctx, const file_row *row)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value out = dp_none();
    put_file("a.npy", row->bytes, row->count);
    dp_status got = read_npy(ctx, scope, "a.npy", &out);
    tree_check_row(ctx, row->want, got, out, row->status, row->want);
    dp_scope_end(scope);
}

/* clang-format off */
#define F4   "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
#define PYTHON_2 "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }"
#define ONES "\0\0\x80\x3f\0\0\0\x40"
static const file_row npy[] = {
    {BYTES("\x93NUMPY\x01\0\x39\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x02\0\x39\0\0\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x03\0\x39\0\0\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x02\0\x3a\0\0\0" PYTHON_2 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x03\0\x3a\0\0\0" PYTHON_2 ONES), "makes no sense at \"L", DP_ERR_FILE},
    {BYTES("\x93NUMPY\x04\0\x39\0\0\0" F4 ONES), "version 4.0 of", DP_ERR_UNSUPPORTED},
    {BYTES("\x93NUMPY\0\0\x39\0\0\0" F4 ONES), "version 0.0 of .npy", DP_ERR_UNSUPPORTED},
    {BYTES("\x93NUMPY\x02\0\xff\xff\xff\xff" F4),
     "its header says that it has 4294967295 bytes, there are 57", DP_ERR_FILE},
    {BYTES("\x93NUMPY\x01\0\xff\xff" F4), "its header says that it has 65535 bytes", DP_ERR_FILE},
};

typedef struct npy_row { /* what numpy.save puts around it is right */
    const char *dict, *data;
    size_t count;
    const char *want;
    dp_status status;
} npy_row;

#define DICT(descr, order, shape)                                                                  \
    "{'descr': '" descr "', 'fortran_order': " order ", 'shape': (" shape "), }"
static const npy_row dicts[] = {
    {F4 "  \n", BYTES(ONES), "f32[2]=1 2", DP_OK},
    {"{'shape': (1, 2), 'descr': '>f4', 'fortran_order': False}",
     BYTES("\x3f\x80\0\0\x40\0\0\0"), "f32[1,2]=1 2", DP_OK},
    {DICT("|u1", "False", "2, 1"), BYTES("\x01\xff"), "u8[2,1]=1 255", DP_OK},
    {DICT("|b1", "False", "3,"), BYTES("\x01\0\x07"), "bool[3]=1 0 1", DP_OK},
    {DICT("<i8", "True", "1,"), BYTES("\xfe\xff\xff\xff\xff\xff\xff\xff"), "i64[1]=-2", DP_OK},
    {DICT("<f2", "False", "0, 5"), BYTES(""), "f16[0,5]=", DP_OK},
    {DICT(">i2", "False", "1,"), BYTES("\x01\x02"), "i16[1]=258", DP_OK},
    {DICT("<i4", "True", "1, 1"), BYTES("\0\0\0\0"),
     "i32[1,1]=0", DP_OK},
    {DICT("<f4", "False", ""), BYTES("\0\0\x80\x3f"), "f32[]=1", DP_OK},
    {DICT("<f4", "False", "0, 100000000000000000, 100000000000000000"), BYTES(""),
     "its shape has more elements than can be counted", DP_ERR_FILE},
    {F4 "x", BYTES(ONES), "something follows in its header: \"x\"", DP_ERR_FILE},
    {DICT("<c8", "False", "1,"), BYTES("12345678"), "its dtype is '<c8'", DP_ERR_UNSUPPORTED},
    {DICT("|f4", "False", "2,"), BYTES(ONES), "f32[2]=1 2", DP_OK},
    {DICT("=f4", "False", "2,"), BYTES(ONES), "f32[2]=1 2", DP_OK},
    {DICT("f4", "False", "2,"), BYTES(ONES), "f32[2]=1 2", DP_OK},
    {DICT(">u1", "False", "2,"), BYTES("\1\2"), "u8[2]=1 2", DP_OK},
    {DICT("", "False", "2,"), BYTES(ONES), "its dtype is ''", DP_ERR_UNSUPPORTED},
    {DICT("<", "False", "2,"), BYTES(ONES), "its dtype is '<'", DP_ERR_UNSUPPORTED},
    {DICT("<=f4", "False", "2,"), BYTES(ONES), "its dtype is '<=f4'", DP_ERR_UNSUPPORTED},
    {"{\"descr\": \"<f4\", \"fortran_order\": False, \"shape\": (2,), }", BYTES(ONES),
     "f32[2]=1 2", DP_OK},
    {"{'descr': \">i2\", \"fortran_order\": True,\t'shape':\r\n\f(1, 1)}\n", BYTES("\1\2"),
     "i16[1,1]=258", DP_OK},
    {"{\v'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", BYTES(ONES), "makes no sense",
     DP_ERR_FILE},
    {"{'descr\": '<f4', 'fortran_order': False, 'shape': (2,), }", BYTES(ONES),
     "makes no sense at \"'descr\": '<f4'", DP_ERR_FILE},
    {"{'descr': '<f4\", 'fortran_order': False, 'shape': (2,), }", BYTES(ONES),
     "its header makes no sense", DP_ERR_FILE},
    {"{'descr': '<f4', 'fortran_order': False, 'shapes': (2,), }", BYTES(ONES),
     "makes no sense at \"'shapes'", DP_ERR_FILE},
    {DICT("<f4", "False", "02,"), BYTES(ONES), "makes no sense at \"02,)", DP_ERR_FILE},
    {DICT("<f4", "False", "1, 02"), BYTES(ONES), "makes no sense at \"02)", DP_ERR_FILE},
    {DICT("<f4", "False", "00, 10"), BYTES(""), "f32[0,10]=", DP_OK},
    {DICT("<f4", "False", "1L, 2L"), BYTES(ONES), "f32[1,2]=1 2", DP_OK},
    {DICT("<f4", "False", "2LL,"), BYTES(ONES), "makes no sense at \"L,)", DP_ERR_FILE},
    {DICT("<f4", "False", "2l,"), BYTES(ONES), "makes no sense at \"l,)", DP_ERR_FILE},
    {DICT("<f4", "False", "L,"), BYTES(ONES), "makes no sense at \"L,)", DP_ERR_FILE},
    {DICT("<f4", "Maybe", "2,"), BYTES("12345678"), "makes no sense at \"Maybe", DP_ERR_FILE},
    {DICT("<f4", "False", "2"), BYTES("12345678"), "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "False", "-2,"), BYTES("12345678"), "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "False", "1 2"), BYTES("12345678"), "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "False", "1,1,1,1,1,1,1,1"), BYTES("\0\0\x80\x3f"), "f32[1,1,1,1,1,1,1,1]=1",
     DP_OK},
    {DICT("<f4", "False", "1,1,1,1,1,1,1,1,1"), BYTES("1234"), "it has more than 8 dims",
     DP_ERR_UNSUPPORTED},
    {DICT("<f4", "False", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"), BYTES("1234"),
     "it has more than 8 dims", DP_ERR_UNSUPPORTED},
    {DICT("<f4", "False", "1,1,1,1,1,1,1,1,1,x"), BYTES("1234"), "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "False", "9999999999999999999,"), BYTES("1"), "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "False", "1, 999999999999999999, 99"), BYTES("1234"),
     "it has 4 bytes of elements, and its shape says more than 9223372036854775807", DP_ERR_FILE},
    {DICT("<f4", "False", "999999999999999999,"), BYTES("1234"),
     "it has 4 bytes of elements, and its shape says 3999999999999999996", DP_ERR_FILE},
    {"{'descr': '<f4', 'descr': '<f4', 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_FILE},
    {"{'descr': '<f4', 'fortran_order': False}", BYTES(ONES), "makes no sense", DP_ERR_FILE},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), ", BYTES(ONES), "makes no sense",
     DP_ERR_FILE},
    {"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_FILE},
    {"{'descr' '<f4', 'fortran_order': False, 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_FILE},
    {DICT("<i2", "True", "2, 3"), BYTES("\1\0\4\0\2\0\5\0\3\0\6\0"), "i16[2,3]=1 2 3 4 5 6",
     DP_OK},
    {DICT(">i2", "True", "2, 2"), BYTES("\0\1\0\3\0\2\0\4"), "i16[2,2]=1 2 3 4", DP_OK},
    {DICT("<V2", "False", "2,"), BYTES("\x80\x3f\0\x40"), "bf16[2]=1 2", DP_OK},
    {DICT("|V2", "False", "1,"), BYTES("\x80\x3f"), "bf16[1]=1", DP_OK},
    {DICT("<u4", "False", "1,"), BYTES("1234"), "its dtype is '<u4'", DP_ERR_UNSUPPORTED},
    {DICT("|O", "False", "1,"), BYTES("1234"), "its dtype is '|O'", DP_ERR_UNSUPPORTED},
    {"{'descr': [('a', '<f4'), ('b', '<i2', (2,))], 'fortran_order': False, 'shape': (1,), }",
     BYTES("12345678"), "its dtype is '[fields]'", DP_ERR_UNSUPPORTED},
    {"{'descr': [('a]', '<f4'), ('\\'[', '<i4')], 'fortran_order': False, 'shape': (1,), }",
     BYTES("12345678"), "its dtype is '[fields]'", DP_ERR_UNSUPPORTED},
    {"{'descr': [(\"'[\", '<f4'), ('\\\\', '<i4')], 'fortran_order': False, 'shape': (1,), }",
     BYTES("12345678"), "its dtype is '[fields]'", DP_ERR_UNSUPPORTED},
    {"{'descr': [('a', '<f4', 'fortran_order': False, 'shape': (1,), }", BYTES("1234"),
     "makes no sense", DP_ERR_FILE},
    {DICT("<f4", "True", "0, 5"), BYTES(""), "f32[0,5]=", DP_OK},
    {DICT("<f4", "False", "3,"), BYTES(ONES), "it has 8 bytes of elements, and its shape says 12",
     DP_ERR_FILE},
    {"{'descr': '<f4", BYTES("', 'fortran_order': False, 'shape': (0,)}"), "makes no sense",
     DP_ERR_FILE},
    {"\x01\x7f\xff", BYTES(ONES), "makes no sense at \"???\"", DP_ERR_FILE},
    {"", BYTES(ONES), "makes no sense", DP_ERR_FILE},
};
/* clang-format on */

TEST(npy_files)
{
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < sizeof npy / sizeof npy[0]; i++)
        check_npy(ctx, &npy[i]);
    for (size_t i = 0; i < sizeof dicts / sizeof dicts[0]; i++) {
        char bytes[256];
        size_t length = strlen(dicts[i].dict);
        memcpy(bytes, "\x93NUMPY\x01\0", 8);
        bytes[8] = (char)length;
        bytes[9] = 0;
        memcpy(bytes + 10, dicts[i].dict, length);
        memcpy(bytes + 10 + length, dicts[i].data, dicts[i].count);
        const file_row row = {bytes, 10 + length + dicts[i].count, dicts[i].want, dicts[i].status};
        check_npy(ctx, &row);
    }
    dp_close(ctx);
}

/* A string does not end before its quote does. */
TEST(npy_headers_with_a_nul)
{
#define BEGIN "\x93NUMPY\x01\0\x3b\0{'descr"
#define END   ", 'fortran_order': False, 'shape': (2,), }" ONES
    static const file_row rows[] = {
        {BYTES(BEGIN "': '<f4\0x'" END), "makes no sense", DP_ERR_FILE},
        {BYTES(BEGIN "\0x': '<f4'" END), "makes no sense", DP_ERR_FILE},
        {BYTES(BEGIN "':   '<f4'" END), "f32[2]=1 2", DP_OK},
    };
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        check_npy(ctx, &rows[i]);
    dp_close(ctx);
}

/* The header is numpy's, byte by byte. */
TEST(npy_files_are_those_of_numpy)
{
    static const char want[] =
        "\x93NUMPY\x01\0v\0{'descr': '|u1', 'fortran_order': False, 'shape': (9,), }"
        "                                                            \n123456789";
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    const int64_t shape[] = {9};
    const dp_tensor tensor = dp_wrap_const("123456789", DP_U8, 1, shape);
    size_t count;
    CHECK_OK(dp_npy_write(ctx, "a.npy", &tensor));
    const char *bytes = get_file("a.npy", &count);
    CHECK_INT(count, sizeof want - 1);
    CHECK_BYTES(bytes, want, count);
    dp_close(ctx);
}

static const char *const arrays[] = {
    "f32[2,3]=1 2 3 4 5.5 -6",
    "f64[]=1.5",
    "f16[3]=1 2 65504",
    "bf16[2]=1 -2",
    "i64[2]=-9 9",
    "i32[1,1,2]=7 8",
    "i16[2]=-300 300",
    "i8[3]=-1 0 1",
    "u8[0]=",
    "bool[3]=1 0 1",
    "f32[3,0,2]=",
    "u8[1,1,1,1,1,1,1,3]=1 2 255",
    "i32[2,2,2]",
};

/* On each device in turn, and as views whose dims have changed places. */
TEST_BACKENDS(arrays_come_back)
{
    enter_folder();
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        dp_scope *temp = dp_scope_begin(ctx);
        dp_device to = dp_local_device(ctx, (int)(i % TREE_DEVICES));
        dp_value value = tree_on(ctx, temp, tree_of(temp, arrays[i]), to), again = dp_none();
        dp_tensor turned = *value.as.t;
        CHECK_OK(dp_npy_write(ctx, "a.npy", value.as.t));
        CHECK_OK(read_npy(ctx, temp, "a.npy", &again));
        CHECK_TREE(ctx, again, tree_text(ctx, value));
        if (turned.ndim > 1) {
            CHECK_OK(dp_transpose(value.as.t, 0, -1, &turned));
            CHECK_OK(dp_npy_write(ctx, "a.npy", &turned));
            CHECK_OK(read_npy(ctx, temp, "a.npy", &again));
            CHECK(dp_is_contiguous(again.as.t));
            CHECK_TREE(ctx, again, tree_text(ctx, dp_of(temp, &turned)));
        }
        dp_scope_end(temp);
    }
    CHECK_INT(access("a.npy.part", F_OK), -1);
}

/* More than is written at once, in rows of any size. */
TEST(large_arrays)
{
    static const int64_t shapes[][2] = {{1, 700001}, {700001, 1}, {3, 300007}};
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        dp_scope *scope = dp_scope_begin(ctx);
        size_t count = (size_t)(shapes[k][0] * shapes[k][1]);
        int32_t *numbers = dp_scope_alloc(scope, count * sizeof *numbers);
        for (size_t i = 0; i < count; i++)
            numbers[i] = (int32_t)(i * 2654435761u);
        const dp_tensor tensor = dp_wrap_const(numbers, DP_I32, 2, shapes[k]);
        dp_tensor again;
        dp_value value, dict = DP_DICT(scope, {"x", dp_of(scope, &tensor)});
        CHECK_OK(dp_npy_write(ctx, "a.npy", &tensor));
        CHECK_OK(dp_npy_read(ctx, scope, "a.npy", &again));
        CHECK_BYTES(again.data, numbers, count * sizeof *numbers);
        CHECK_OK(dp_npz_write(ctx, "a.npz", dict));
        CHECK_OK(dp_npz_read(ctx, scope, "a.npz", &value));
        CHECK_BYTES(dp_at(value, 0).as.t->data, numbers, count * sizeof *numbers);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* A file is mapped as long as the scope lives, and may be replaced meanwhile. */
TEST(files_stay_mapped)
{
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx), *first = dp_scope_child(scope);
    dp_tensor old, new;
    CHECK_OK(dp_npy_write(ctx, "a.npy", tree_of(scope, "i32[3]=1 2 3").as.t));
    CHECK_OK(dp_npy_read(ctx, first, "a.npy", &old));
    CHECK_OK(dp_npy_write(ctx, "a.npy", tree_of(scope, "i32[2]=8 9").as.t));
    CHECK_OK(dp_npy_read(ctx, scope, "a.npy", &new));
    CHECK_TREE(ctx, dp_of(scope, &old), "i32[3]=1 2 3");
    dp_scope_end(first);
    CHECK_TREE(ctx, dp_of(scope, &new), "i32[2]=8 9");
    CHECK_INT((uintptr_t) new.data % 64, 0);
    dp_close(ctx);
}

/* Every beginning of a file, and whatever one byte of a header says. */
TEST(damaged_npy_files)
{
    static const unsigned char odd[] = {0, 1, 0xff, '9', '(', ')', ',', '\'', '{', '}', ' ', 0x80};
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor;
    char bytes[128] = {0};
    for (size_t count = 0; count < npy[0].count; count++) {
        put_file("a.npy", npy[0].bytes, count);
        CHECK_STATUS(dp_npy_read(ctx, scope, "a.npy", &tensor), DP_ERR_FILE);
    }
    for (size_t at = 0; at < npy[0].count; at += (size_t)test_step())
        for (size_t i = 0; i < sizeof odd; i++) {
            memcpy(bytes, npy[0].bytes, npy[0].count);
            bytes[at] = (char)odd[i];
            put_file("a.npy", bytes, npy[0].count);
            dp_status status = dp_npy_read(ctx, scope, "a.npy", &tensor);
            if (status == DP_OK)
                CHECK_INT((size_t)dp_tensor_count(&tensor) * dp_dtype_bytes(tensor.dtype), 8);
            else
                CHECK(status == DP_ERR_FILE || status == DP_ERR_UNSUPPORTED);
        }
    dp_close(ctx);
}

/* ---- .npz ------------------------------------------------------------------------------------ */

static uint64_t number_at(const char *bytes, int count)
{
    uint64_t number = 0;
    while (count-- > 0)
        number = number << 8 | (unsigned char)bytes[count];
    return number;
}

TEST_BACKENDS(dicts_come_back)
{
    static const char text[] = "{'x': f32[2,2]=1 2 3 4, 'a.npy': u8[3]=1 2 3, '': bool[1]=1, "
                               "'k\xc3\xa4se/2': f64[]=7, 'none': i64[0]=}";
    enter_folder();
    dp_value value = tree_on(ctx, scope, tree_of(scope, text), dp_local_device(ctx, 1)), again;
    CHECK_OK(dp_npz_write(ctx, "a.npz", value));
    CHECK_OK(dp_npz_read(ctx, scope, "a.npz", &again));
    CHECK_TREE(ctx, again, text);
    for (size_t i = 0; i < dp_count(again); i++) {
        CHECK(dp_at(again, i).as.t->read_only);
        CHECK_INT((uintptr_t)dp_at(again, i).as.t->data % 64, 0);
    }
    CHECK_OK(dp_npz_write(ctx, "a.npz", tree_of(scope, "{}")));
    CHECK_OK(dp_npz_read(ctx, scope, "a.npz", &again));
    CHECK_TREE(ctx, again, "{}");
}

/* The checksum is zlib's of what numpy.save writes. */
TEST(npz_files)
{
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const int64_t shape[] = {9};
    const dp_tensor tensor = dp_wrap_const("123456789", DP_U8, 1, shape);
    size_t count;
    CHECK_OK(dp_npz_write(ctx, "a.npz", DP_DICT(scope, {"x", dp_of(scope, &tensor)})));
    const char *bytes = get_file("a.npz", &count), *end = bytes + count - 22;
    CHECK_BYTES(bytes, "PK\3\4\x14\0\0\0\0\0\0\0\x21\0", 14);
    CHECK_INT(number_at(bytes + 14, 4), 0x9617b3b3);
    CHECK_INT(number_at(bytes + 18, 4), 137);
    CHECK_INT(number_at(bytes + 22, 4), 137);
    CHECK_BYTES(bytes + 30, "x.npy", 5);
    CHECK_INT(30 + number_at(bytes + 26, 2) + number_at(bytes + 28, 2), 64);
    CHECK_BYTES(bytes + 64, "\x93NUMPY", 6);
    const char *entry = bytes + 64 + 137;
    CHECK_BYTES(entry, "PK\1\2", 4);
    CHECK_INT(number_at(entry + 16, 4), 0x9617b3b3);
    CHECK_INT(number_at(entry + 38, 4), 0100644u << 16);
    CHECK_INT(end - entry, 46 + 5);
    CHECK_BYTES(end, "PK\5\6\0\0\0\0\1\0\1\0\x33\0\0\0\xc9\0\0\0\0\0", 22);
    dp_close(ctx);
}

/* A file of one member, which is put together by hand. */
typedef struct zip_row {
    int flags, method;
    bool wide;                           /* numbers of 64 bits, and the end of zip64 */
    uint64_t packed, bytes, at, entries; /* what the directory says, where not 0 */
    const char *name, *comment;
    const char *want;
    dp_status status;
} zip_row;

static char *put_number(char *to, uint64_t number, int bytes)
{
    for (; bytes > 0; bytes--, number >>= 8)
        *to++ = (char)(number & 0xff);
    return to;
}

static char *put_text(char *to, const char *text, size_t count)
{
    memcpy(to, text, count);
    return to + count;
}

static char *put_entry(char *to, const zip_row *row, uint64_t size)
{
    uint64_t packed = row->packed > 0 ? row->packed : size, most = 0xffffffff;
    uint64_t bytes = row->bytes > 0 ? row->bytes : size;
    size_t name = strlen(row->name);
    to = put_number(to, 0x02014b50, 4);
    to = put_number(to, 45u << 16 | 45, 4);
    to = put_number(to, (uint64_t)row->flags, 2);
    to = put_number(to, (uint64_t)row->method, 2);
    to = put_number(to, 0, 8);
    to = put_number(to, row->wide ? most : packed, 4);
    to = put_number(to, row->wide ? most : bytes, 4);
    to = put_number(to, name, 2);
    to = put_number(to, row->wide ? 33 : 0, 2);
    to = put_number(to, 0, 10);
    to = put_number(to, row->wide ? most : row->at, 4);
    to = put_text(to, row->name, name);
    if (!row->wide)
        return to;
    to = put_number(to, 0x0001cafe, 4); /* a field of others, of one byte, goes first */
    to = put_number(to, 7, 1);
    to = put_number(to, 24 << 16 | 1, 4);
    to = put_number(to, bytes, 8);
    to = put_number(to, packed, 8);
    return put_number(to, row->at, 8);
}

static size_t put_zip(char *bytes, const zip_row *row)
{
    size_t name = strlen(row->name), size = npy[0].count;
    uint64_t entries = row->entries > 0 ? row->entries : 1;
    memset(bytes, 0, 30);
    put_number(bytes, 0x04034b50, 4);
    put_number(bytes + 26, name, 2);
    char *to = put_text(bytes + 30, row->name, name), *directory, *end;
    directory = put_text(to, npy[0].bytes, size);
    end = to = put_entry(directory, row, size);
    if (row->wide) {
        to = put_number(to, 0x06064b50, 4);
        to = put_number(to, 44, 8);
        to = put_number(to, 0, 12);
        to = put_number(to, entries, 8);
        to = put_number(to, entries, 8);
        to = put_number(to, (uint64_t)(end - directory), 8);
        to = put_number(to, (uint64_t)(directory - bytes), 8);
        to = put_number(to, 0x07064b50, 4);
        to = put_number(to, 0, 4);
        to = put_number(to, (uint64_t)(end - bytes), 8);
        to = put_number(to, 1, 4);
    }
    size_t comment = row->comment != NULL ? strlen(row->comment) : 0;
    to = put_number(to, 0x06054b50, 4);
    to = put_number(to, 0, 4);
    to = put_number(to, row->wide ? 0xffff : entries, 2);
    to = put_number(to, row->wide ? 0xffff : entries, 2);
    to = put_number(to, row->wide ? 0xffffffff : (uint64_t)(end - directory), 4);
    to = put_number(to, row->wide ? 0xffffffff : (uint64_t)(directory - bytes), 4);
    to = put_number(to, comment, 2);
    to = put_text(to, comment > 0 ? row->comment : "", comment);
    return (size_t)(to - bytes);
}

/* clang-format off */
static const zip_row zips[] = {
    {.name = "x.npy", .want = "{'x': f32[2]=1 2}"},
    {.name = "x.npy", .want = "{'x': f32[2]=1 2}", .wide = true},
    {.name = "x.npy", .want = "{'x': f32[2]=1 2}", .comment = "some words, PK\5\6 or not"},
    {.name = "x", .want = "{'x': f32[2]=1 2}"},
    {.name = ".npy", .want = "{'': f32[2]=1 2}"},
    {.name = "x.npy", .method = 8,
     .want = "member 'x': it is compressed: write it with numpy.savez, and not "
             "numpy.savez_compressed", .status = DP_ERR_UNSUPPORTED},
    {.name = "x.npy", .flags = 1, .want = "it is encrypted", .status = DP_ERR_UNSUPPORTED},
    {.name = "x.npy", .packed = 5, .want = "it is not where the directory says",
     .status = DP_ERR_FILE},
    {.name = "x.npy", .packed = 1 << 20, .bytes = 1 << 20,
     .want = "its members have more bytes than it has", .status = DP_ERR_FILE},
    {.name = "x.npy", .packed = UINT64_MAX, .bytes = UINT64_MAX, .wide = true,
     .want = "its members have more bytes than it has", .status = DP_ERR_FILE},
    {.name = "x.npy", .at = 1, .want = "it is not where the directory says", .status = DP_ERR_FILE},
    {.name = "x.npy", .at = UINT64_MAX - 2, .wide = true,
     .want = "it is not where the directory says", .status = DP_ERR_FILE},
    {.name = "x.npy", .packed = 60, .bytes = 60, .want = "there are 50", .status = DP_ERR_FILE},
    {.name = "x.npy", .entries = 2, .want = "its directory of 2 members is not where",
     .status = DP_ERR_FILE},
    {.name = "x.npy", .entries = UINT64_MAX, .wide = true, .want = "is not where its end says",
     .status = DP_ERR_FILE},
    {.name = "\xff.npy", .want = "the name of a member is not UTF-8", .status = DP_ERR_FILE},
};
/* clang-format on */

TEST(members_of_files)
{
    char bytes[1024];
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < sizeof zips / sizeof zips[0]; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value out = dp_none();
        put_file("a.npz", bytes, put_zip(bytes, &zips[i]));
        dp_status got = dp_npz_read(ctx, scope, "a.npz", &out);
        tree_check_row(ctx, zips[i].name, got, out, zips[i].status, zips[i].want);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* It would be read as one that is shorter. */
TEST(a_name_with_a_nul_is_refused)
{
    char bytes[1024];
    dp_value out;
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    size_t count = put_zip(bytes, &(zip_row){.name = "x|y.npy"});
    for (size_t i = 0; i < count; i++)
        bytes[i] = (char)(bytes[i] == '|' ? '\0' : bytes[i]);
    put_file("a.npz", bytes, count);
    CHECK_ERROR(dp_npz_read(ctx, scope, "a.npz", &out), DP_ERR_FILE,
                "the name of a member is not UTF-8");
    dp_close(ctx);
}

TEST(members_of_one_name_are_refused)
{
    char bytes[1024];
    size_t count;
    dp_value out;
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_npz_write(ctx, "a.npz", tree_of(scope, "{'x': f32[1]=1, '|': f32[1]=1}")));
    const char *there = get_file("a.npz", &count);
    CHECK(count <= sizeof bytes);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (char)(there[i] == '|' ? 'x' : there[i]);
    put_file("a.npz", bytes, count);
    CHECK_ERROR(dp_npz_read(ctx, scope, "a.npz", &out), DP_ERR_FILE,
                "dp_npz_read: 'a.npz': two of its members have the same name");
    dp_close(ctx);
}

/* Every beginning, and every byte that is another: refused, or read as what it then says. */
TEST(damaged_npz_files)
{
    char bytes[1024], one[1024];
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    for (int wide = 0; wide < 2; wide++) {
        dp_value out;
        size_t count = put_zip(bytes, &zips[wide]);
        for (size_t at = 0; at < count; at += (size_t)test_step()) {
            dp_scope *scope = dp_scope_begin(ctx);
            put_file("a.npz", bytes, at);
            CHECK_STATUS(dp_npz_read(ctx, scope, "a.npz", &out), DP_ERR_FILE);
            for (int k = 0; k < 4; k++) {
                memcpy(one, bytes, count);
                one[at] = (char)(one[at] ^ (k == 0 ? 0xff : 1 << (2 * k)));
                put_file("a.npz", one, count);
                dp_status status = dp_npz_read(ctx, scope, "a.npz", &out);
                CHECK(status == DP_OK || status == DP_ERR_FILE || status == DP_ERR_UNSUPPORTED);
            }
            dp_scope_end(scope);
        }
    }
    dp_close(ctx);
}

/* More than 65,535 members have to be counted in the form of zip64. */
TEST_SLOW(many_members, 60)
{
    enum { COUNT = 65537, NAME = 8 };
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pair *pairs = dp_scope_alloc(scope, COUNT * sizeof *pairs);
    char *names = dp_scope_alloc(scope, COUNT * NAME);
    dp_value tensor = tree_of(scope, "u8[1]=5"), value;
    for (int i = 0; i < COUNT; i++) {
        snprintf(names + i * NAME, NAME, "%d", i);
        pairs[i] = (dp_pair){names + i * NAME, tensor};
    }
    CHECK_OK(dp_npz_write(ctx, "a.npz", dp_dict_make(scope, pairs, COUNT)));
    CHECK_OK(dp_npz_read(ctx, scope, "a.npz", &value));
    CHECK_INT(dp_count(value), COUNT);
    CHECK_STR(dp_key_at(value, COUNT - 1), "65536");
    CHECK_TREE(ctx, dp_at(value, COUNT - 1), "u8[1]=5");
    dp_close(ctx);
}

/* Whatever the disk refuses, the old file stays, and nothing beside it. */
TEST(writes_that_fail)
{
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = tree_of(scope, "{'x': i64[100], 'y': f32[3]}"), again;
    struct rlimit all;
    size_t whole;
    CHECK_OK(dp_npz_write(ctx, "a.npz", value));
    (void)get_file("a.npz", &whole);
    CHECK_OK(dp_npz_write(ctx, "a.npz", tree_of(scope, "{'old': i8[1]=3}")));
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &all), 0);
    for (rlim_t most = 0; most < whole; most += 97) {
        CHECK_INT(setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, all.rlim_max}), 0);
        dp_status status = dp_npz_write(ctx, "a.npz", value);
        CHECK_INT(setrlimit(RLIMIT_FSIZE, &all), 0);
        CHECK_ERROR(status, DP_ERR_FILE, "dp_npz_write: 'a.npz': cannot write 'a.npz.part'");
        CHECK_INT(access("a.npz.part", F_OK), -1);
    }
    CHECK_OK(dp_npz_read(ctx, scope, "a.npz", &again));
    CHECK_TREE(ctx, again, "{'old': i8[1]=3}");
    dp_close(ctx);
}

TEST(files_have_tensors_only)
{
    enum { LONG = 70000 };
    char *name = test_room(LONG);
    enter_folder();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_ERROR(dp_npz_write(ctx, "a.npz", tree_of(scope, "{'x': i8[1], 'n': 3}")), DP_ERR_INVALID,
                "'a.npz': 'n' is not a tensor: dp_file_write (dp_save.h) writes other values");
    CHECK_ERROR(dp_npz_write(ctx, "a.npz", tree_of(scope, "{'\xc3': i8[1]}")), DP_ERR_INVALID,
                "key '?' is not UTF-8");
    memset(name, 'n', LONG - 1);
    CHECK_ERROR(dp_npz_write(ctx, "a.npz", DP_DICT(scope, {name, tree_of(scope, "i8[1]")})),
                DP_ERR_INVALID, "' is too long");
    CHECK_INT(access("a.npz", F_OK), -1);
    CHECK_INT(access("a.npz.part", F_OK), -1);
    dp_close(ctx);
}

/* ---- DLPack ---------------------------------------------------------------------------------- */

/* As <dlpack/dlpack.h> has them. */
typedef struct DLTensor {
    void *data;
    struct {
        int32_t device_type, device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
    struct {
        uint32_t major, minor;
    } version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

/* Theirs, that count how often they were given back. */
static void count_plain(DLManagedTensor *self)
{
    ++*(int *)self->manager_ctx;
}

static void count_versioned(DLManagedTensorVersioned *self)
{
    ++*(int *)self->manager_ctx;
}

static float their_floats[] = {1, 2, 3, 4, 5, 6};

static DLTensor their_tensor(int64_t *shape, int ndim)
{
    return (DLTensor){
        .data = their_floats, .device = {1, 0}, .ndim = ndim, .dtype = {2, 32, 1}, .shape = shape};
}

/* One of both forms, and how often it was given back when all has ended. */
static dp_status import(dp_ctx *ctx, const DLTensor *theirs, int form, uint64_t flags,
                        const char *want, int *out_count)
{
    dp_tensor tensor = {0};
    DLManagedTensor plain = {*theirs, out_count, count_plain};
    DLManagedTensorVersioned versioned = {{1, 7}, out_count, count_versioned, flags, *theirs};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = form == 0 ? dp_dlpack_import(ctx, scope, &plain, &tensor)
                                 : dp_dlpack_import_versioned(ctx, scope, &versioned, &tensor);
    CHECK_INT(*out_count, 0);
    if (status == DP_OK) {
        CHECK_TREE(ctx, dp_of(scope, &tensor), want);
        CHECK_INT(tensor.read_only, form == 1 && flags % 2 == 1);
        CHECK(dp_tensor_count(&tensor) == 0 ||
              (char *)tensor.data == (char *)theirs->data + theirs->byte_offset);
    }
    dp_scope_end(scope);
    return status;
}

typedef struct import_row {
    int64_t shape[3], strides[3];
    int ndim;
    uint64_t offset, flags;
    const char *want;
} import_row;

static const import_row imports[] = {
    {{2, 3}, {3, 1}, 2, 0, 0, "f32[2,3]=1 2 3 4 5 6"},
    {{2, 3}, {3, 1}, 2, 0, 1, "f32[2,3]=1 2 3 4 5 6"},
    {{3, 2}, {1, 3}, 2, 0, 2, "f32[3,2]=1 4 2 5 3 6"},
    {{2, 2}, {3, 2}, 2, 0, 3, "f32[2,2]=1 3 4 6"},
    {{2}, {1}, 1, 8, 0, "f32[2]=3 4"},
    {{2, 2}, {0, 1}, 2, 0, 0, "f32[2,2]=1 2 1 2"},
    {{1, 2}, {-77, 1}, 2, 0, 0, "f32[1,2]=1 2"},
    {{0}, {0}, 0, 4, 0, "f32[]=2"},
    {{0, 3}, {-3, -1}, 2, 0, 0, "f32[0,3]="},
};

TEST(dlpack_import)
{
    dp_ctx *ctx = open_cpus(2);
    for (int form = 0; form < 2; form++)
        for (size_t i = 0; i < sizeof imports / sizeof imports[0]; i++) {
            import_row row = imports[i];
            int count = 0;
            DLTensor theirs = their_tensor(row.shape, row.ndim);
            theirs.strides = row.strides;
            theirs.byte_offset = row.offset;
            CHECK_OK(import(ctx, &theirs, form, row.flags, row.want, &count));
            CHECK_INT(count, 1);
        }
    dp_close(ctx);
}

/* As all memory; what is written there lands there. */
TEST(dlpack_import_at_any_address)
{
    dp_ctx *ctx = open_cpus(2);
    for (size_t offset = 0; offset < sizeof(float); offset++) {
        char bytes[sizeof their_floats + sizeof(float)];
        int64_t shape[] = {6};
        int count = 0;
        DLTensor theirs = their_tensor(shape, 1);
        theirs.data = bytes;
        theirs.byte_offset = offset;
        memcpy(bytes + offset, their_floats, sizeof their_floats);
        CHECK_OK(import(ctx, &theirs, 0, 0, "f32[6]=1 2 3 4 5 6", &count));
        DLManagedTensor plain = {theirs, NULL, NULL};
        dp_tensor tensor;
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_dlpack_import(ctx, scope, &plain, &tensor));
        CHECK_OK(dp_axpby(ctx, 2, &tensor, 0, NULL, &tensor));
        CHECK_TREE(ctx, dp_of(scope, &tensor), "f32[6]=2 4 6 8 10 12");
        float last;
        memcpy(&last, bytes + offset + 5 * sizeof last, sizeof last);
        CHECK_F64(last, 12, 0);
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* Strides and data may be NULL where they say nothing, and so may a deleter. */
TEST(dlpack_import_of_null)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    int64_t shape[] = {2, 3}, empty[] = {0, 3};
    int count = 0;
    DLTensor theirs = their_tensor(shape, 2), none = their_tensor(empty, 2);
    none.data = NULL;
    CHECK_OK(import(ctx, &theirs, 0, 0, "f32[2,3]=1 2 3 4 5 6", &count));
    CHECK_INT(count, 1);
    count = 0;
    CHECK_OK(import(ctx, &none, 1, 0, "f32[0,3]=", &count));
    CHECK_INT(count, 1);
    DLManagedTensor plain = {theirs, NULL, NULL};
    DLManagedTensorVersioned versioned = {{1, 0}, NULL, NULL, 0, theirs};
    dp_tensor tensor;
    CHECK_OK(dp_dlpack_import(ctx, scope, &plain, &tensor));
    CHECK_OK(dp_dlpack_import_versioned(ctx, scope, &versioned, &tensor));
    dp_close(ctx);
}

/* What cannot be a tensor here is refused, and stays the caller's. */
TEST(dlpack_refused)
{
    static const struct {
        int32_t type, id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        int64_t size, stride;
        bool no_data, no_shape;
        uint64_t offset;
        dp_status status;
        const char *want;
    } rows[] = {
        {1, 0, 1, 1, 32, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "code 1, 32 bits and 1 lane"},
        {1, 0, 1, 2, 32, 4, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "32 bits and 4 lanes"},
        {1, 0, 1, 5, 64, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "code 5, 64 bits"},
        {1, 0, 1, 2, 32, 1, 2, -1, 0, 0, 0, DP_ERR_UNSUPPORTED, "its stride in dim 0 is -1: copy"},
        {2, 0, 1, 2, 32, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "is DLPack's {2, 0}"},
        {10, 3, 1, 2, 32, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "is DLPack's {10, 3}"},
        {0, 0, 1, 2, 32, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "is DLPack's {0, 0}"},
        {1, 0, -1, 2, 32, 1, 2, 1, 0, 0, 0, DP_ERR_INVALID, "-1 dims, a tensor has 0 to 8"},
        {1, 0, 9, 2, 32, 1, 2, 1, 0, 0, 0, DP_ERR_UNSUPPORTED, "9 dims"},
        {1, 0, 1, 2, 32, 1, 2, 1, 0, 1, 0, DP_ERR_INVALID, ", and a shape"},
        {1, 0, 1, 2, 32, 1, -2, 1, 0, 0, 0, DP_ERR_INVALID, "its shape has a size below 0"},
        {1, 0, 1, 2, 32, 1, INT64_MAX, 1, 0, 0, 0, DP_ERR_INVALID, "more elements than can be"},
        {1, 0, 1, 2, 32, 1, 3, INT64_MAX / 2, 0, 0, 0, DP_ERR_INVALID, "reach too far"},
        {1, 0, 1, 2, 32, 1, 2, 1, 1, 0, 0, DP_ERR_INVALID, "2 elements and no data"},
        {1, 0, 1, 2, 32, 1, 2, 1, 1, 0, 8, DP_ERR_INVALID, "8 bytes leads nowhere"},
        {1, 0, 1, 2, 32, 1, 2, 1, 0, 0, UINT64_MAX, DP_ERR_INVALID, "leads nowhere"},
    };
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int form = 0; form < 2; form++) {
            int64_t shape[] = {rows[i].size}, strides[] = {rows[i].stride};
            int count = 0;
            DLTensor theirs = {.data = rows[i].no_data ? NULL : their_floats,
                               .device = {rows[i].type, rows[i].id},
                               .ndim = rows[i].ndim,
                               .dtype = {rows[i].code, rows[i].bits, rows[i].lanes},
                               .shape = rows[i].no_shape ? NULL : shape,
                               .strides = strides,
                               .byte_offset = rows[i].offset};
            CHECK_ERROR(import(ctx, &theirs, form, 0, "", &count), rows[i].status, rows[i].want);
            CHECK_SAYS(dp_last_error(), form == 0 ? "dp_dlpack_import: " : "_import_versioned: ");
            CHECK_INT(count, 0);
        }
    dp_close(ctx);
}

TEST(dlpack_versions)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    int64_t shape[] = {6};
    int count = 0;
    dp_tensor tensor;
    DLManagedTensorVersioned later = {{2, 0}, &count, count_versioned, 0, their_tensor(shape, 1)};
    CHECK_ERROR(dp_dlpack_import_versioned(ctx, scope, &later, &tensor), DP_ERR_UNSUPPORTED,
                "version 2 of DLPack, and not 1");
    dp_close(ctx);
    CHECK_INT(count, 0);
}

static const char *const exported[] = {"f32[2,3]", "f64[2]",  "f16[3]=1 2 3", "bf16[2]=1 2",
                                       "i64[2]",   "i32[1]",  "i16[2]",       "i8[2]",
                                       "u8[3]",    "bool[2]", "f32[]=4",      "f32[0,2]="};

static bool is_name(const char *name, const char *want)
{
    return strcmp(name, want) == 0;
}

/* On each kind of device, there and back: as it is, where DLPack has a name for it, and copied. */
TEST_BACKENDS(dlpack_there_and_back)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    bool cuda = is_name(info.device_backend, "cuda"), hip = is_name(info.device_backend, "hip");
    bool named = cuda || hip || tree_host_memory(ctx);
    for (size_t i = 0; i < sizeof exported / sizeof exported[0]; i++)
        for (int copy = 0; copy < 2; copy++) {
            const dp_device to = dp_local_device(ctx, (int)i % TREE_DEVICES);
            dp_scope *holder = dp_scope_begin(ctx), *step = dp_scope_begin(ctx);
            dp_tensor back, own = *tree_on(ctx, holder, tree_of(holder, exported[i]), to).as.t;
            DLManagedTensor *theirs = NULL;
            const char *want = tree_text(ctx, dp_of(step, &own));
            const dp_dlpack_config config = {.holder = copy ? NULL : holder, .copy = copy};
            dp_status status = dp_dlpack_export(ctx, &own, &config, &theirs);
            if (!copy && !named) {
                CHECK_STATUS(status, DP_ERR_UNSUPPORTED);
                dp_scope_end(step);
                dp_scope_end(holder);
                continue;
            }
            CHECK_OK(status);
            CHECK_INT(theirs->dl_tensor.device.device_type, copy ? 1 : cuda ? 2 : hip ? 10 : 1);
            CHECK_INT(theirs->dl_tensor.dtype.bits, 8 * dp_dtype_bytes(own.dtype));
            CHECK_OK(dp_dlpack_import(ctx, step, theirs, &back));
            CHECK(copy || back.data == own.data);
            CHECK_INT(back.device.backend, !copy && (cuda || hip) ? to.backend : 0);
            CHECK_TREE(ctx, dp_of(step, &back), want);
            if (copy)
                dp_scope_end(holder);
            dp_scope_end(step); /* and the holder, by the deleter */
        }
}

TEST(dlpack_export)
{
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor = *tree_of(scope, "i16[2,3]").as.t, turned;
    DLManagedTensorVersioned *out;
    CHECK_OK(dp_transpose(&tensor, 0, 1, &turned));
    CHECK_OK(dp_dlpack_export_versioned(ctx, &turned, NULL, &out));
    CHECK_INT(out->version.major, 1);
    CHECK_INT(out->flags, 0);
    CHECK(out->dl_tensor.data == tensor.data && out->dl_tensor.byte_offset == 0);
    CHECK_INT(out->dl_tensor.ndim, 2);
    CHECK_INT(out->dl_tensor.shape[0], 3);
    CHECK_INT(out->dl_tensor.shape[1], 2);
    CHECK_INT(out->dl_tensor.strides[0], 1);
    CHECK_INT(out->dl_tensor.strides[1], 3);
    CHECK_INT(out->dl_tensor.dtype.code, 0);
    CHECK_INT(out->dl_tensor.dtype.bits, 16);
    CHECK_INT(out->dl_tensor.dtype.lanes, 1);
    out->deleter(out);
    turned.read_only = true;
    CHECK_OK(dp_dlpack_export_versioned(ctx, &turned, NULL, &out));
    CHECK_INT(out->flags, 1);
    out->deleter(out);
    CHECK_OK(dp_dlpack_export_versioned(ctx, &turned, &(dp_dlpack_config){.copy = true}, &out));
    CHECK_INT(out->flags, 2);
    CHECK_INT(out->dl_tensor.strides[0], 2);
    CHECK_INT((uintptr_t)out->dl_tensor.data % 256, 0);
    dp_close(ctx);
    CHECK_BYTES(out->dl_tensor.data, ((const int16_t[]){0, 3, 1, 4, 2, 5}), 12);
    out->deleter(out);
}

static void count_end(void *user)
{
    ++*(int *)user;
}

/* The holder ends once: by the deleter, or before it. */
TEST(dlpack_holders)
{
    for (int by_close = 0; by_close < 2; by_close++) {
        test_allocator counter = {0};
        dp_ctx *ctx;
        int ended = 0;
        CHECK_OK(dp_open(&(dp_config){.device_count = 1, .allocator = test_allocator_of(&counter)},
                         &ctx));
        dp_scope *holder = dp_scope_begin(ctx);
        dp_tensor tensor = *tree_of(holder, "f32[3]").as.t;
        DLManagedTensor *out;
        CHECK_OK(dp_scope_defer(holder, count_end, &ended));
        CHECK_OK(dp_dlpack_export(ctx, &tensor, &(dp_dlpack_config){.holder = holder}, &out));
        CHECK_INT(ended, 0);
        if (by_close)
            dp_close(ctx);
        CHECK_INT(ended, by_close);
        out->deleter(out);
        CHECK_INT(ended, 1);
        if (!by_close)
            dp_close(ctx);
        CHECK_INT(ended, 1);
        CHECK_NO_LEAKS(&counter);
    }
}

TEST(dlpack_wrong_arguments)
{
    dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx), *elsewhere = dp_scope_begin(other);
    int64_t shape[] = {6};
    DLManagedTensor plain = {their_tensor(shape, 1), NULL, NULL}, *out;
    DLManagedTensorVersioned versioned = {{1, 0}, NULL, NULL, 0, their_tensor(shape, 1)}, *out_v;
    dp_tensor tensor, lost = tree_lost(scope), far = *tree_of(scope, "f32[2]").as.t;
    const dp_dlpack_config both = {.holder = scope, .copy = true};
    CHECK_STATUS(dp_dlpack_import(NULL, scope, &plain, &tensor), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_import(ctx, NULL, &plain, &tensor), DP_ERR_INVALID);
    CHECK_ERROR(dp_dlpack_import(ctx, elsewhere, &plain, &tensor), DP_ERR_INVALID,
                "dp_dlpack_import: the scope is of another context");
    CHECK_ERROR(dp_dlpack_import(ctx, scope, NULL, &tensor), DP_ERR_INVALID, "managed is NULL");
    CHECK_ERROR(dp_dlpack_import(ctx, scope, &plain, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_STATUS(dp_dlpack_import_versioned(NULL, scope, &versioned, &tensor), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_import_versioned(ctx, NULL, &versioned, &tensor), DP_ERR_INVALID);
    CHECK_ERROR(dp_dlpack_import_versioned(ctx, elsewhere, &versioned, &tensor), DP_ERR_INVALID,
                "dp_dlpack_import_versioned: the scope is of another context");
    CHECK_STATUS(dp_dlpack_import_versioned(ctx, scope, NULL, &tensor), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_import_versioned(ctx, scope, &versioned, NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_export(NULL, &far, NULL, &out), DP_ERR_INVALID);
    CHECK_ERROR(dp_dlpack_export(ctx, NULL, NULL, &out), DP_ERR_INVALID, "tensor is NULL");
    CHECK_ERROR(dp_dlpack_export(ctx, &far, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_dlpack_export(ctx, &far, &both, &out), DP_ERR_INVALID, "a copy needs no holder");
    CHECK_STATUS(dp_dlpack_export(ctx, &lost, NULL, &out), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_export_versioned(NULL, &far, NULL, &out_v), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_export_versioned(ctx, NULL, NULL, &out_v), DP_ERR_INVALID);
    CHECK_STATUS(dp_dlpack_export_versioned(ctx, &far, NULL, NULL), DP_ERR_INVALID);
    far.read_only = true;
    CHECK_ERROR(dp_dlpack_export(ctx, &far, NULL, &out), DP_ERR_UNSUPPORTED,
                "tensor is read-only, which this form cannot say");
    far.device = (dp_device){1, 5};
    CHECK_ERROR(dp_dlpack_export_versioned(ctx, &far, NULL, &out_v), DP_ERR_INVALID,
                "{1, 5} is not a device of this context");
    dp_close(ctx);
}

/* ---- text ------------------------------------------------------------------------------------ */

typedef struct print_row {
    const char *tensor;
    const char *str, *repr; /* numpy's */
} print_row;

/* clang-format off */
static const print_row prints[] = {
    {"f32[3]=0.1 1 2.5",
     "[0.1 1.  2.5]",
     "array([0.1, 1. , 2.5], dtype=float32)"},
    {"f64[4]=0.1 0.2 0.30000000000000004 123",
     "[1.00e-01 2.00e-01 3.00e-01 1.23e+02]",
     "array([1.00e-01, 2.00e-01, 3.00e-01, 1.23e+02])"},
    {"f32[2,2]=1 -2 3.25 -0",
     "[[ 1.   -2.  ]\n"
     " [ 3.25 -0.  ]]",
     "array([[ 1.  , -2.  ],\n"
     "       [ 3.25, -0.  ]], dtype=float32)"},
    {"f64[3]=1e-5 1 2",
     "[1.e-05 1.e+00 2.e+00]",
     "array([1.e-05, 1.e+00, 2.e+00])"},
    {"f64[2]=1e8 1",
     "[1.e+08 1.e+00]",
     "array([1.e+08, 1.e+00])"},
    {"f32[2]=999999 1000000",
     "[9.99999e+05 1.00000e+06]",
     "array([9.99999e+05, 1.00000e+06], dtype=float32)"},
    {"f16[2]=999 1000",
     "[9.99e+02 1.00e+03]",
     "array([9.99e+02, 1.00e+03], dtype=float16)"},
    {"f16[2]=1000 1000.5",
     "[1.0000e+03 1.0005e+03]",
     "array([1.0000e+03, 1.0005e+03], dtype=float16)"},
    {"f32[4]=nan inf -inf 1.5",
     "[ nan  inf -inf  1.5]",
     "array([ nan,  inf, -inf,  1.5], dtype=float32)"},
    {"f64[3]=nan 1e20 -inf",
     "[   nan 1.e+20   -inf]",
     "array([   nan, 1.e+20,   -inf])"},
    {"f64[2]=nan nan",
     "[nan nan]",
     "array([nan, nan])"},
    {"f64[2]=1e-310 5e-324",
     "[1.e-310 5.e-324]",
     "array([1.e-310, 5.e-324])"},
    {"f64[3]=1.7976931348623157e308 2 3",
     "[1.79769313e+308 2.00000000e+000 3.00000000e+000]",
     "array([1.79769313e+308, 2.00000000e+000, 3.00000000e+000])"},
    {"f64[2]=0.5 501",
     "[5.00e-01 5.01e+02]",
     "array([5.00e-01, 5.01e+02])"},
    {"f64[2]=0.5 500",
     "[  0.5 500. ]",
     "array([  0.5, 500. ])"},
    {"f32[3]=3.4028235e38 1 0",
     "[3.4028235e+38 1.0000000e+00 0.0000000e+00]",
     "array([3.4028235e+38, 1.0000000e+00, 0.0000000e+00], dtype=float32)"},
    {"f32[2]=1e-4 1",
     "[1.e-04 1.e+00]",
     "array([1.e-04, 1.e+00], dtype=float32)"},
    {"f16[3]=0.1 0.2 65504",
     "[1.00e-01 2.00e-01 6.55e+04]",
     "array([1.00e-01, 2.00e-01, 6.55e+04], dtype=float16)"},
    {"f64[3]=0.123456789 0.999999999 1",
     "[0.12345679 1.         1.        ]",
     "array([0.12345679, 1.        , 1.        ])"},
    {"f64[2]=0.000000123456789 9.99999999999e-7",
     "[1.23456789e-07 1.00000000e-06]",
     "array([1.23456789e-07, 1.00000000e-06])"},
    {"i64[3]=-9007199254740991 0 12",
     "[-9007199254740991                 0                12]",
     "array([-9007199254740991,                 0,                12])"},
    {"i32[4]=-1 10 200 3000",
     "[  -1   10  200 3000]",
     "array([  -1,   10,  200, 3000], dtype=int32)"},
    {"i8[3]=-128 127 0",
     "[-128  127    0]",
     "array([-128,  127,    0], dtype=int8)"},
    {"u8[2,2]=0 255 7 90",
     "[[  0 255]\n"
     " [  7  90]]",
     "array([[  0, 255],\n"
     "       [  7,  90]], dtype=uint8)"},
    {"i16[1]=-5",
     "[-5]",
     "array([-5], dtype=int16)"},
    {"bool[3]=1 0 1",
     "[ True False  True]",
     "array([ True, False,  True])"},
    {"bool[2,2]=1 1 1 1",
     "[[ True  True]\n"
     " [ True  True]]",
     "array([[ True,  True],\n"
     "       [ True,  True]])"},
    {"f32[]=0.1",
     "0.1",
     "array(0.1, dtype=float32)"},
    {"f64[]=1e-5",
     "1e-05",
     "array(1.e-05)"},
    {"f64[]=1e16",
     "1e+16",
     "array(1.e+16)"},
    {"f32[]=1e6",
     "1e+06",
     "array(1.e+06, dtype=float32)"},
    {"f16[]=1000",
     "1e+03",
     "array(1.e+03, dtype=float16)"},
    {"f64[]=-0",
     "-0.0",
     "array(-0.)"},
    {"f64[]=nan",
     "nan",
     "array(nan)"},
    {"f64[]=123456789",
     "123456789.0",
     "array(1.23456789e+08)"},
    {"i32[]=-7",
     "-7",
     "array(-7, dtype=int32)"},
    {"bool[]=1",
     "True",
     "array(True)"},
    {"f32[0]=",
     "[]",
     "array([], dtype=float32)"},
    {"f64[0]=",
     "[]",
     "array([], dtype=float64)"},
    {"f32[2,0]=",
     "[]",
     "array([], shape=(2, 0), dtype=float32)"},
    {"u8[0,3]=",
     "[]",
     "array([], shape=(0, 3), dtype=uint8)"},
    {"f32[1001]",
     "[ 0.  1.  2. ... 98. 99.  0.]",
     "array([ 0.,  1.,  2., ..., 98., 99.,  0.], shape=(1001,), dtype=float32)"},
    {"u8[7,200]",
     "[[ 0  1  2 ... 97 98 99]\n"
     " [ 0  1  2 ... 97 98 99]\n"
     " [ 0  1  2 ... 97 98 99]\n"
     " ...\n"
     " [ 0  1  2 ... 97 98 99]\n"
     " [ 0  1  2 ... 97 98 99]\n"
     " [ 0  1  2 ... 97 98 99]]",
     "array([[ 0,  1,  2, ..., 97, 98, 99],\n"
     "       [ 0,  1,  2, ..., 97, 98, 99],\n"
     "       [ 0,  1,  2, ..., 97, 98, 99],\n"
     "       ...,\n"
     "       [ 0,  1,  2, ..., 97, 98, 99],\n"
     "       [ 0,  1,  2, ..., 97, 98, 99],\n"
     "       [ 0,  1,  2, ..., 97, 98, 99]], shape=(7, 200), dtype=uint8)"},
    {"i32[2,3,4]",
     "[[[ 0  1  2  3]\n"
     "  [ 4  5  6  7]\n"
     "  [ 8  9 10 11]]\n"
     "\n"
     " [[12 13 14 15]\n"
     "  [16 17 18 19]\n"
     "  [20 21 22 23]]]",
     "array([[[ 0,  1,  2,  3],\n"
     "        [ 4,  5,  6,  7],\n"
     "        [ 8,  9, 10, 11]],\n"
     "\n"
     "       [[12, 13, 14, 15],\n"
     "        [16, 17, 18, 19],\n"
     "        [20, 21, 22, 23]]], dtype=int32)"},
    {"f64[1,1,1]=2",
     "[[[2.]]]",
     "array([[[2.]]])"},
    {"i64[40]",
     "[ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23\n"
     " 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39]",
     "array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16,\n"
     "       17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33,\n"
     "       34, 35, 36, 37, 38, 39])"},
    {"f64[1,1,1001]",
     "[[[ 0.  1.  2. ... 98. 99.  0.]]]",
     "array([[[ 0.,  1.,  2., ..., 98., 99.,  0.]]], shape=(1, 1, 1001))"},
};
/* clang-format on */

TEST(numpy_prints_the_same)
{
    dp_ctx *ctx = open_cpus(1);
    for (size_t i = 0; i < sizeof prints / sizeof prints[0]; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        const char *text;
        dp_value tensor = tree_of(scope, prints[i].tensor);
        CHECK_OK(dp_print_text(ctx, scope, tensor, &text));
        CHECK_STR(text, prints[i].str);
        CHECK_OK(dp_print_text(ctx, scope, dp_list_make(scope, DP_TUPLE, &tensor, 1), &text));
        CHECK_INT(text[0], '(');
        CHECK_INT(strncmp(text + 1, prints[i].repr, strlen(prints[i].repr)), 0);
        CHECK_STR(text + 1 + strlen(prints[i].repr), ",)");
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* What numpy has no dtype for, in the form of one that is as wide. */
static const struct {
    const char *value, *want;
} values[] = {
    {"bf16[3]=0.10009765625 1 2.5", "[0.1 1.  2.5]"},
    {"bf16[2]=0.5 100", "[5.e-01 1.e+02]"},
    {"bf16[2]=3.3895e38 1", "[3.38e+38 1.00e+00]"},
    {"bf16[]=0.30078125", "0.3"},
    {"None", "None"},
    {"True", "True"},
    {"False", "False"},
    {"-12", "-12"},
    {"0.1", "0.1"},
    {"1e16", "1e+16"},
    {"1e15", "1000000000000000.0"},
    {"1.5e-07", "1.5e-07"},
    {"0.0001", "0.0001"},
    {"5e-324", "5e-324"},
    {"1.7976931348623157e308", "1.7976931348623157e+308"},
    {"9007199254740993.0", "9007199254740992.0"},
    {"'text'", "text"},
    {"['text', 1, 0.5, None]", "['text', 1, 0.5, None]"},
    {"()", "()"},
    {"(1)", "(1,)"},
    {"(1, 2)", "(1, 2)"},
    {"[]", "[]"},
    {"{}", "{}"},
    {"{'a': [True], 'b': {'c': 1.0}}", "{'a': [True], 'b': {'c': 1.0}}"},
    {"{'x': bf16[1]=2}", "{'x': array([2.], dtype=bfloat16)}"},
    {"<stack: f64[2]=1 2>", "array([1., 2.])"},
    {"[i32[2,2]=1 2 3 4, 1]", "[array([[1, 2],\n       [3, 4]], dtype=int32), 1]"},
};

TEST(values_are_printed_as_in_python)
{
    static const struct {
        const char *text, *want;
    } strings[] = {
        {"it's", "[\"it's\"]"},
        {"'\"", "['\\'\"']"},
        {"a\\b\n\t\r\x01\x7f", "['a\\\\b\\n\\t\\r\\x01\\x7f']"},
        {"k\xc3\xa4se", "['k\xc3\xa4se']"},
        {"\xc2\x80\xc2\x9f\xc2\xa0\xc2\xa1\xc2\xac\xc2\xad\xc2\xae",
         "['\\x80\\x9f\\xa0\xc2\xa1\xc2\xac\\xad\xc2\xae']"},
        {"\xe1\x9a\x80\xe2\x80\x8b\xe2\x80\x90\xe2\x80\xa8\xe2\x80\xb0",
         "['\\u1680\\u200b\xe2\x80\x90\\u2028\xe2\x80\xb0']"},
        {"\xe3\x80\x80\xe3\x80\x81\xee\x80\x80\xef\xa3\xbf\xef\xa4\x80\xef\xbb\xbf",
         "['\\u3000\xe3\x80\x81\\ue000\\uf8ff\xef\xa4\x80\\ufeff']"},
        {"\xef\xb7\x8f\xef\xb7\x90\xef\xb7\xaf\xef\xb7\xb0\xef\xbf\xbd\xef\xbf\xbe",
         "['\xef\xb7\x8f\\ufdd0\\ufdef\xef\xb7\xb0\xef\xbf\xbd\\ufffe']"},
        {"\xf0\x9f\xbf\xbe\xf0\xb0\x80\x80\xf0\xbf\xbf\xbd\xf0\xbf\xbf\xbf",
         "['\\U0001fffe\xf0\xb0\x80\x80\xf0\xbf\xbf\xbd\\U0003ffff']"},
        {"\xf1\x80\x80\x80\xf3\xa0\x80\x80\xf3\xa0\x83\xbf\xf3\xa0\x87\xaf\xf3\xa0\x87\xb0",
         "['\\U00040000\\U000e0000\\U000e00ff\xf3\xa0\x87\xaf\\U000e01f0']"},
        {"\xf0\x9f\x98\x80\xf3\xa0\x80\x81\xf3\xa0\x84\x80\xf4\x8f\xbf\xbd",
         "['\xf0\x9f\x98\x80\\U000e0001\xf3\xa0\x84\x80\\U0010fffd']"},
        {"\xff"
         "a\xc3",
         "['\\xffa\\xc3']"}, /* not UTF-8 */
        {"\xed\xa0\x80", "['\\xed\\xa0\\x80']"}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const char *text;
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        CHECK_OK(dp_print_text(ctx, scope, tree_of(scope, values[i].value), &text));
        CHECK_STR(text, values[i].want);
    }
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        dp_value string = dp_string(scope, strings[i].text);
        CHECK_OK(dp_print_text(ctx, scope, dp_list_make(scope, DP_LIST, &string, 1), &text));
        CHECK_STR(text, strings[i].want);
    }
    CHECK_OK(dp_print_text(ctx, scope, DP_DICT(scope, {"\xc2\xa0", dp_int(1)}), &text));
    CHECK_STR(text, "{'\\xa0': 1}");
    CHECK_OK(dp_print_text(ctx, scope, dp_opaque(scope), &text));
    CHECK_SAYS(text, "<opaque 0x");
    dp_close(ctx);
}

/* Each f16 and bf16 that there is, by itself, is the shortest that reads as it. */
TEST(halves_are_read_as_what_is_printed)
{
    dp_ctx *ctx = open_cpus(1);
    for (unsigned bits = 0; bits < 0x8000; bits += 7 * (unsigned)test_stride()) {
        dp_scope *scope = dp_scope_begin(ctx);
        uint16_t half = (uint16_t)bits, neighbour = (uint16_t)(bits ^ 1);
        const char *text;
        dp_tensor f16 = dp_wrap(&half, DP_F16, 0, NULL), bf16 = dp_wrap(&half, DP_BF16, 0, NULL);
        for (int k = 0; k < 2; k++) {
            dp_dtype dtype = k == 0 ? DP_F16 : DP_BF16;
            unsigned special = k == 0 ? 0x7c00 : 0x7f80;
            if ((bits & special) == special)
                continue;
            double number = tree_load(&half, dtype), gap = tree_load(&neighbour, dtype) - number;
            CHECK_OK(dp_print_text(ctx, scope, dp_of(scope, k == 0 ? &f16 : &bf16), &text));
            CHECK_F64(strtod(text, NULL), number, fabs(gap) / 2);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

/* Below a power of two numbers are twice as near: a decimal that is not the nearest may stand for
   it, and be shorter. */
TEST(shortest_decimals_of_numbers_at_an_edge)
{
    static const struct {
        double number;
        const char *want;
    } edges[] = {{0x1p-44, "5.684341886080802e-14"},
                 {-0x1p-44, "-5.684341886080802e-14"},
                 {0x1p-1074, "5e-324"},
                 {0x1p-1022, "2.2250738585072014e-308"},
                 {0x1.fffffffffffffp+1023, "1.7976931348623157e+308"},
                 {0x1p53, "9007199254740992.0"},
                 {9.999999999999998, "9.999999999999998"},
                 {1e23, "1e+23"}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const char *text;
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        CHECK_OK(dp_print_text(ctx, scope, dp_float(edges[i].number), &text));
        CHECK_STR(text, edges[i].want);
    }
    dp_close(ctx);
}

/* From each device, with any strides; of a large tensor only the corners. */
TEST_BACKENDS(prints_from_a_device)
{
    const dp_device to = dp_local_device(ctx, TREE_DEVICES - 1);
    dp_value tensor = tree_on(ctx, scope, tree_of(scope, "i32[2,3]=1 2 3 4 5 6"), to);
    dp_value large = tree_on(ctx, scope, tree_of(scope, "u8[40,9,7]"), to);
    dp_tensor turned;
    const char *text;
    CHECK_OK(dp_transpose(tensor.as.t, 0, 1, &turned));
    CHECK_OK(dp_print_text(ctx, scope, dp_of(scope, &turned), &text));
    CHECK_STR(text, "[[1 4]\n [2 5]\n [3 6]]");
    CHECK_OK(dp_print_text(ctx, scope, large, &text));
    CHECK_SAYS(text, "[[[ 0  1  2 ...  4  5  6]\n  [ 7  8  9 ... 11 12 13]\n");
    CHECK_SAYS(text, "]]\n\n ...\n\n [[");
}

TEST(prints_to_files)
{
    char line[64];
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value tensor = tree_of(scope, "f32[2]=1 2");
    FILE *file = tmpfile(), *full = fopen("/dev/full", "w");
    CHECK(file != NULL);
    CHECK_OK(dp_print(ctx, file, tensor));
    CHECK_OK(dp_print(ctx, file, dp_none()));
    rewind(file);
    CHECK_INT(fread(line, 1, sizeof line, file), 13);
    CHECK_BYTES(line, "[1. 2.]\nNone\n", 13);
    fclose(file);
    if (full != NULL) {
        CHECK_INT(setvbuf(full, NULL, _IONBF, 0), 0);
        CHECK_ERROR(dp_print(ctx, full, tensor), DP_ERR_FILE, "dp_print: the text cannot be");
        fclose(full);
    }
    dp_close(ctx);
}

/* ---- all of it ------------------------------------------------------------------------------- */

TEST(wrong_arguments)
{
    enter_folder();
    dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx), *elsewhere = dp_scope_begin(other);
    dp_tensor tensor = *tree_of(scope, "f32[2]").as.t, lost = tree_lost(scope);
    dp_value value = dp_of(scope, &tensor), dict = tree_of(scope, "{}");
    const char *text;
    CHECK_OK(dp_npy_write(ctx, "a.npy", &tensor));
    CHECK_STATUS(dp_npy_read(NULL, scope, "a.npy", &tensor), DP_ERR_INVALID);
    CHECK_STATUS(dp_npy_read(ctx, NULL, "a.npy", &tensor), DP_ERR_INVALID);
    CHECK_ERROR(dp_npy_read(ctx, elsewhere, "a.npy", &tensor), DP_ERR_INVALID,
                "dp_npy_read: the scope is of another context");
    CHECK_ERROR(dp_npy_read(ctx, scope, NULL, &tensor), DP_ERR_INVALID, "path is NULL");
    CHECK_ERROR(dp_npy_read(ctx, scope, "a.npy", NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_npy_read(ctx, scope, "b.npy", &tensor), DP_ERR_NO_FILE, "'b.npy': it cannot be");
    CHECK_ERROR(dp_npy_read(ctx, scope, ".", &tensor), DP_ERR_FILE, "it is not a regular file");
    CHECK_STATUS(dp_npy_write(NULL, "a.npy", &tensor), DP_ERR_INVALID);
    CHECK_ERROR(dp_npy_write(ctx, "", &tensor), DP_ERR_INVALID, "path is no name of a file");
    CHECK_ERROR(dp_npy_write(ctx, "a.npy", NULL), DP_ERR_INVALID, "tensor is NULL");
    CHECK_STATUS(dp_npy_write(ctx, "a.npy", &lost), DP_ERR_INVALID);
    CHECK_STATUS(dp_npz_read(NULL, scope, "a.npz", &value), DP_ERR_INVALID);
    CHECK_STATUS(dp_npz_read(ctx, NULL, "a.npz", &value), DP_ERR_INVALID);
    CHECK_ERROR(dp_npz_read(ctx, elsewhere, "a.npz", &value), DP_ERR_INVALID,
                "dp_npz_read: the scope is of another context");
    CHECK_STATUS(dp_npz_read(ctx, scope, NULL, &value), DP_ERR_INVALID);
    CHECK_STATUS(dp_npz_read(ctx, scope, "a.npz", NULL), DP_ERR_INVALID);
    CHECK_STATUS(dp_npz_read(ctx, scope, "a.npz", &dict), DP_ERR_NO_FILE);
    CHECK_ERROR(dp_npz_read(ctx, scope, "a.npy", &dict), DP_ERR_FILE, "it does not end as a .npz");
    CHECK_STATUS(dp_npz_write(NULL, "a.npz", dict), DP_ERR_INVALID);
    CHECK_STATUS(dp_npz_write(ctx, NULL, dict), DP_ERR_INVALID);
    CHECK_ERROR(dp_npz_write(ctx, "a.npz", value), DP_ERR_INVALID, "dict is not a dict");
    CHECK_STATUS(dp_npz_write(ctx, "a.npz", dp_dict_make(NULL, NULL, 0)), DP_ERR_INVALID);
    CHECK_STATUS(dp_print(NULL, stdout, value), DP_ERR_INVALID);
    CHECK_ERROR(dp_print(ctx, NULL, value), DP_ERR_INVALID, "dp_print: file is NULL");
    CHECK_STATUS(dp_print(ctx, stdout, dp_dict_make(NULL, NULL, 0)), DP_ERR_INVALID);
    CHECK_STATUS(dp_print_text(NULL, scope, value, &text), DP_ERR_INVALID);
    CHECK_STATUS(dp_print_text(ctx, NULL, value, &text), DP_ERR_INVALID);
    CHECK_ERROR(dp_print_text(ctx, elsewhere, value, &text), DP_ERR_INVALID,
                "dp_print_text: the scope is of another context");
    CHECK_STATUS(dp_print_text(ctx, scope, value, NULL), DP_ERR_INVALID);
    dp_close(ctx), dp_close(other);
}

/* Through each of them, and out as it came in. */
static dp_status all_ways(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    dp_value dict = DP_DICT(scope, {"x", dp_at(in, 1)});
    dp_tensor tensor, back;
    DLManagedTensorVersioned *theirs;
    const char *text;
    DP_TRY(dp_npz_write(ctx, "a.npz", dict));
    DP_TRY(dp_npz_read(ctx, scope, "a.npz", &dict));
    DP_TRY(dp_npy_write(ctx, "a.npy", dp_at(dict, 0).as.t));
    DP_TRY(dp_npy_read(ctx, scope, "a.npy", &tensor));
    DP_TRY(dp_print_text(ctx, scope, dict, &text));
    CHECK_STR(text, "{'x': array([ True, False])}");
    DP_TRY(dp_dlpack_export_versioned(ctx, &tensor, NULL, &theirs));
    dp_status status = dp_dlpack_import_versioned(ctx, scope, theirs, &back);
    if (status != DP_OK) {
        theirs->deleter(theirs);
        return status;
    }
    *out = dp_of(scope, &back);
    return out->kind == DP_ERROR ? (dp_status)out->status : DP_OK;
}

TEST_SLOW(out_of_memory, 30)
{
    enter_folder();
    tree_out_of_memory(all_ways, 8, "[None, bool[2]=1 0]", "bool[2]=1 0");
}
