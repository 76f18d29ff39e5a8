/* test_readers.c - examples/readers.h: IDX and .npy files, good, torn and lying. */

#include <stdlib.h>
#include "tree.h"
/* clang-format off */
#include "../dp_data.h"
#include "../examples/readers.h"
/* clang-format on */

/* A file without a name, which nothing leaves behind. */
static FILE *own_file;
static char path[32];

static void put_file(const void *bytes, size_t count)
{
    own_file = own_file != NULL ? own_file : tmpfile();
    CHECK(own_file != NULL);
    snprintf(path, sizeof path, "/dev/fd/%d", fileno(own_file));
    CHECK_INT(ftruncate(fileno(own_file), 0), 0);
    CHECK_INT(pwrite(fileno(own_file), bytes, count, 0), count);
}

static void drop_file(void)
{
    fclose(own_file);
    own_file = NULL;
}

typedef struct file_row {
    const char *bytes;
    size_t count;
    const char *want; /* the array as a tree, or a part of the sentence */
    dp_status status;
} file_row;

/* All rows as one tensor. */
static dp_status read_all(dp_scope *scope, dp_value *out)
{
    array_file file;
    dp_tensor all;
    DP_TRY(array_file_open(path, &file));
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, file.dtype, file.ndim, file.shape, &all));
    for (int64_t i = 0; i < file.shape[0]; i++)
        CHECK_OK(array_file_row(&file, i, (char *)all.data + i * file.row_bytes));
    array_file_close(&file);
    *out = dp_of(scope, &all);
    return DP_OK;
}

static void check_files(const file_row *rows, size_t count)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    for (size_t i = 0; i < count; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value out = dp_none();
        put_file(rows[i].bytes, rows[i].count);
        dp_status got = read_all(scope, &out);
        tree_check_row(ctx, rows[i].want, got, out, rows[i].status, rows[i].want);
        dp_scope_end(scope);
    }
    drop_file();
    dp_close(ctx);
}

#define BYTES(text)     text, sizeof text - 1
#define CHECK_FILES(of) check_files(of, sizeof of / sizeof of[0])

/* clang-format off */
#define IDX3 "\0\0\x08\x03\0\0\0\x02\0\0\0\x01\0\0\0\x03" "abcdef"
static const file_row idx[] = {
    {BYTES(IDX3), "u8[2,1,3]=97 98 99 100 101 102", DP_OK},
    {BYTES("\0\0\x08\x01\0\0\0\x02\x07\xff"), "u8[2]=7 255", DP_OK},
    {BYTES("\0\0\x09\x01\0\0\0\x02\x07\xff"), "i8[2]=7 -1", DP_OK},
    {BYTES("\0\0\x0b\x01\0\0\0\x02\x01\x02\xff\xfe"), "i16[2]=258 -2", DP_OK},
    {BYTES("\0\0\x0c\x02\0\0\0\x01\0\0\0\x01\0\0\x01\x02"), "i32[1,1]=258", DP_OK},
    {BYTES("\0\0\x0d\x01\0\0\0\x01\x3f\xc0\0\0"), "f32[1]=1.5", DP_OK},
    {BYTES("\0\0\x0e\x01\0\0\0\x01\xbf\xf8\0\0\0\0\0\0"), "f64[1]=-1.5", DP_OK},
    {BYTES("\0\0\x08\x01\0\0\0\0"), "u8[0]=", DP_OK},
    {BYTES("\0\0\x08\x02\0\0\0\x02\0\0\0\0"), "u8[2,0]=", DP_OK},
    {BYTES(""), "is empty, or cannot be read", DP_ERR_INVALID},
    {BYTES("\0\0\x08"), "is empty", DP_ERR_INVALID},
    {BYTES("\0\0\x07\x01\0\0\0\x01a"), "type 7 in 1 dims is not what", DP_ERR_INVALID},
    {BYTES("\0\0\x08\x09" "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "type 8 in 9 dims",
     DP_ERR_INVALID},
    {BYTES("\0\0\x08\x00" "a"), "a single number has no rows", DP_ERR_INVALID},
    {BYTES("\0\0\x08\x02\0\0\0\x01\0\0"), "type 8 in 2 dims", DP_ERR_INVALID},
    {BYTES(IDX3 "g"), "says 2 rows of 3 bytes, there are 7 bytes", DP_ERR_INVALID},
    {BYTES("\0\0\x08\x03\0\0\0\x02\0\0\0\x01\0\0\0\x03" "abc"),
     "says 2 rows of 3 bytes, there are 3", DP_ERR_INVALID},
    {BYTES("\0\0\x0e\x03\0\0\0\x02\xff\xff\xff\xff\xff\xff\xff\xff" "abc"),
     "a row is larger than any file", DP_ERR_INVALID},
    {BYTES("\x1f\x8b\x08\x08" "aaaaaaaaaaaa"), "is compressed: gunzip it", DP_ERR_UNSUPPORTED},
    {BYTES("hello, world"), "is neither an IDX nor a .npy file", DP_ERR_INVALID},
};

#define F4   "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
#define ONES "\0\0\x80\x3f\0\0\0\x40"
static const file_row npy[] = {
    {BYTES("\x93NUMPY\x01\0\x39\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x02\0\x39\0\0\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x03\0\x39\0\0\0" F4 ONES), "f32[2]=1 2", DP_OK},
    {BYTES("\x93NUMPY\x04\0\x39\0\0\0" F4 ONES), "version 4.0 of", DP_ERR_UNSUPPORTED},
    {BYTES("\x93NUMPY\0\0\x39\0\0\0" F4 ONES), "version 0.0 of .npy", DP_ERR_UNSUPPORTED},
    {BYTES("\x93NUMPY\x02\0\xff\xff\xff\xff" F4),
     "its header has 4294967295 bytes, more than it or we have", DP_ERR_INVALID},
    {BYTES("\x93NUMPY\x01\0\xff\xff" F4), "its header has 65535 bytes", DP_ERR_INVALID},
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
     "columns come first: save numpy.ascontiguousarray", DP_ERR_UNSUPPORTED},
    {DICT("<f4", "False", ""), BYTES("1234"), "a single number has no rows", DP_ERR_INVALID},
    {F4 "x", BYTES(ONES), "something follows its header", DP_ERR_INVALID},
    {DICT("<c8", "False", "1,"), BYTES("12345678"), "makes no sense at \"c8'", DP_ERR_INVALID},
    {DICT("|f4", "False", "2,"), BYTES("12345678"), "makes no sense", DP_ERR_INVALID},
    {DICT("f4", "False", "2,"), BYTES("12345678"), "makes no sense at \"f4'", DP_ERR_INVALID},
    {DICT("<f4", "Maybe", "2,"), BYTES("12345678"), "makes no sense at \"Maybe", DP_ERR_INVALID},
    {DICT("<f4", "False", "2"), BYTES("12345678"), "makes no sense", DP_ERR_INVALID},
    {DICT("<f4", "False", "-2,"), BYTES("12345678"), "makes no sense", DP_ERR_INVALID},
    {DICT("<f4", "False", "1 2"), BYTES("12345678"), "makes no sense", DP_ERR_INVALID},
    {DICT("<f4", "False", "1,1,1,1,1,1,1,1,1"), BYTES("1234"), "makes no sense", DP_ERR_INVALID},
    {DICT("<f4", "False", "9999999999999999999,"), BYTES("1"), "makes no sense", DP_ERR_INVALID},
    {DICT("<f4", "False", "1, 999999999999999999, 99"), BYTES("1234"),
     "a row is larger than any file", DP_ERR_INVALID},
    {DICT("<f4", "False", "999999999999999999,"), BYTES("1234"),
     "says 999999999999999999 rows of 4 bytes, there are 4 bytes", DP_ERR_INVALID},
    {"{'descr': '<f4', 'descr': '<f4', 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_INVALID},
    {"{'descr': '<f4', 'fortran_order': False}", BYTES(ONES), "makes no sense", DP_ERR_INVALID},
    {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), ", BYTES(ONES), "makes no sense",
     DP_ERR_INVALID},
    {"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_INVALID},
    {"{'descr' '<f4', 'fortran_order': False, 'shape': (2,)}", BYTES(ONES), "makes no sense",
     DP_ERR_INVALID},
    {"", BYTES(ONES), "makes no sense", DP_ERR_INVALID},
};
/* clang-format on */

TEST(idx_files)
{
    CHECK_FILES(idx);
}

TEST(npy_files)
{
    CHECK_FILES(npy);
    for (size_t i = 0; i < sizeof dicts / sizeof dicts[0]; i++) {
        char bytes[256];
        size_t length = strlen(dicts[i].dict);
        memcpy(bytes, "\x93NUMPY\x01\0", 8);
        bytes[8] = (char)length;
        bytes[9] = 0;
        memcpy(bytes + 10, dicts[i].dict, length);
        memcpy(bytes + 10 + length, dicts[i].data, dicts[i].count);
        const file_row row = {bytes, 10 + length + dicts[i].count, dicts[i].want, dicts[i].status};
        check_files(&row, 1);
    }
}

/* Every beginning of a file, and every file with one byte more. */
TEST(torn_files_are_refused)
{
    char longer[128] = {0};
    for (int k = 0; k < 2; k++) {
        const file_row *good = k == 0 ? &idx[0] : &npy[0];
        array_file file;
        for (size_t count = 0; count < good->count; count++) {
            put_file(good->bytes, count);
            CHECK(array_file_open(path, &file) != DP_OK);
            CHECK_INT(file.fd, -1);
        }
        memcpy(longer, good->bytes, good->count);
        put_file(longer, good->count + 1);
        CHECK_STATUS(array_file_open(path, &file), DP_ERR_INVALID);
    }
    drop_file();
}

/* Whatever one byte of a header says: either it is refused, or what it says is there. */
TEST(lying_headers)
{
    static const unsigned char odd[] = {0, 1, 0xff, '9', '(', ')', ',', '\'', '{', '}', ' ', 0x80};
    char bytes[128];
    for (int k = 0; k < 2; k++) {
        const file_row *good = k == 0 ? &idx[0] : &npy[0];
        for (size_t at = 0; at < good->count; at += (size_t)test_stride())
            for (size_t i = 0; i < sizeof odd; i++) {
                array_file file;
                char row[128];
                memcpy(bytes, good->bytes, good->count);
                bytes[at] = (char)odd[i];
                put_file(bytes, good->count);
                if (array_file_open(path, &file) != DP_OK)
                    continue;
                CHECK_INT(file.data_at + file.row_bytes * file.shape[0], good->count);
                for (int64_t r = 0; r < file.shape[0]; r++)
                    CHECK_OK(array_file_row(&file, r, row));
                array_file_close(&file);
            }
    }
    drop_file();
}

TEST(rows_that_are_not_there)
{
    array_file file;
    char row[16];
    put_file(idx[0].bytes, idx[0].count);
    CHECK_OK(array_file_open(path, &file));
    CHECK_ERROR(array_file_row(&file, 2, row), DP_ERR_INVALID, ": row 2 of 2");
    CHECK_ERROR(array_file_row(&file, -1, row), DP_ERR_INVALID, ": row -1 of 2");
    put_file(idx[0].bytes, idx[0].count - 1);
    CHECK_OK(array_file_row(&file, 0, row));
    CHECK_ERROR(array_file_row(&file, 1, row), DP_ERR_USER, "row 1 cannot be read");
    array_file_close(&file);
    array_file_close(&file);
    drop_file();
    CHECK_ERROR(array_file_open(path, &file), DP_ERR_INVALID, "cannot be opened");
    CHECK_ERROR(array_file_open(".", &file), DP_ERR_INVALID, "is no file");
}

static dp_status read_row(dp_sample *sample, void *user)
{
    return array_file_row(user, sample->index, sample->rows[0]);
}

/* As its manual shows it. */
TEST(a_loader_reads_files)
{
    static const dp_field field = {"image", DP_U8, 2, {1, 3}};
    dp_ctx *ctx = NULL;
    dp_loader *loader = NULL;
    dp_batch batch;
    array_file file;
    put_file(idx[0].bytes, idx[0].count);
    CHECK_OK(array_file_open(path, &file));
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(
        dp_loader_create(ctx,
                         &(dp_loader_config){.sampler = {.count = file.shape[0], .in_order = true},
                                             .batch = 2,
                                             .read = read_row,
                                             .user = &file,
                                             .fields = &field,
                                             .field_count = 1,
                                             .worker_count = 2},
                         &loader));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_TREE(ctx, batch.value, "{'image': u8[2,1,3]=97 98 99 100 101 102}");
    dp_close(ctx);
    array_file_close(&file);
    drop_file();
}
