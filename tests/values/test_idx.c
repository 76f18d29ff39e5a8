/* test_idx.c - dp_data.h: IDX files, good, torn and lying, and a loader that reads them. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <unistd.h>
#include "process.h"
#include "tree.h"
#include "dp_data.h"

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
static dp_status read_all(dp_ctx *ctx, dp_scope *scope, dp_value *out)
{
    dp_idx *file;
    dp_idx_info info;
    dp_tensor all;
    DP_TRY(dp_idx_open(ctx, path, &file));
    CHECK_OK(dp_idx_info_get(file, &info));
    CHECK_OK(dp_tensor_new(scope, (dp_device){0, 0}, info.dtype, info.ndim, info.shape, &all));
    for (int64_t i = 0; i < info.shape[0]; i++)
        CHECK_OK(dp_idx_row(file, i, (char *)all.data + (size_t)i * info.row_bytes));
    dp_idx_close(file);
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
        dp_status got = read_all(ctx, scope, &out);
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
    {BYTES(""), "it is empty", DP_ERR_FILE},
    {BYTES("\0\0\x08"), "3 bytes are not an IDX file", DP_ERR_FILE},
    {BYTES("\0\0\x07\x01\0\0\0\x01a"), "type 7 in 1 dims is not what", DP_ERR_FILE},
    {BYTES("\0\0\x08\x09" "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "type 8 in 9 dims",
     DP_ERR_FILE},
    {BYTES("\0\0\x08\x00" "a"), "type 8 in 0 dims", DP_ERR_FILE},
    {BYTES("\0\0\x08\x02\0\0\0\x01\0\0"), "type 8 in 2 dims", DP_ERR_FILE},
    {BYTES(IDX3 "g"), "says 2 rows of 3 bytes, there are 7 bytes", DP_ERR_FILE},
    {BYTES("\0\0\x08\x03\0\0\0\x02\0\0\0\x01\0\0\0\x03" "abc"),
     "says 2 rows of 3 bytes, there are 3", DP_ERR_FILE},
    {BYTES("\0\0\x0e\x03\0\0\0\x02\xff\xff\xff\xff\xff\xff\xff\xff" "abc"),
     "a row is larger than any file", DP_ERR_FILE},
    {BYTES("\x1f\x8b\x08\x08" "aaaaaaaaaaaa"), "is compressed: gunzip it", DP_ERR_UNSUPPORTED},
    {BYTES("hello, world"), "it is not an IDX file", DP_ERR_FILE},
};
/* clang-format on */

TEST(idx_files)
{
    CHECK_FILES(idx);
}

/* Every beginning of a file, and every file with one byte more. */
TEST(torn_files_are_refused)
{
    char longer[128] = {0};
    dp_ctx *ctx = open_cpus(1);
    dp_idx *file = NULL;
    for (size_t count = 0; count < idx[0].count; count++) {
        put_file(idx[0].bytes, count);
        CHECK_STATUS(dp_idx_open(ctx, path, &file), DP_ERR_FILE);
        CHECK(file == NULL);
    }
    memcpy(longer, idx[0].bytes, idx[0].count);
    put_file(longer, idx[0].count + 1);
    CHECK_STATUS(dp_idx_open(ctx, path, &file), DP_ERR_FILE);
    dp_close(ctx);
    drop_file();
}

/* Whatever one byte of a header says: either it is refused, or what it says is there. */
TEST(lying_headers)
{
    static const unsigned char odd[] = {0, 1, 2, 8, 0x0e, 0x1f, 0x80, 0xff};
    char bytes[128], row[128];
    dp_ctx *ctx = open_cpus(1);
    for (size_t at = 0; at < idx[0].count; at += (size_t)test_step())
        for (size_t i = 0; i < sizeof odd; i++) {
            dp_idx *file;
            dp_idx_info info;
            memcpy(bytes, idx[0].bytes, idx[0].count);
            bytes[at] = (char)odd[i];
            put_file(bytes, idx[0].count);
            if (dp_idx_open(ctx, path, &file) != DP_OK)
                continue;
            CHECK_OK(dp_idx_info_get(file, &info));
            CHECK_INT(4 + 4 * (size_t)info.ndim + info.row_bytes * (size_t)info.shape[0],
                      idx[0].count);
            for (int64_t r = 0; r < info.shape[0]; r++)
                CHECK_OK(dp_idx_row(file, r, row));
            dp_idx_close(file);
        }
    dp_close(ctx);
    drop_file();
}

TEST(rows_that_are_not_there)
{
    dp_ctx *ctx = open_cpus(1);
    dp_idx *file;
    char row[16];
    put_file(idx[0].bytes, idx[0].count);
    CHECK_OK(dp_idx_open(ctx, path, &file));
    CHECK_ERROR(dp_idx_row(file, 2, row), DP_ERR_INVALID, ": row 2 of 2");
    CHECK_ERROR(dp_idx_row(file, -1, row), DP_ERR_INVALID, ": row -1 of 2");
    put_file(idx[0].bytes, idx[0].count - 1);
    CHECK_OK(dp_idx_row(file, 0, row));
    CHECK_ERROR(dp_idx_row(file, 1, row), DP_ERR_FILE, "row 1 cannot be read");
    drop_file();
    CHECK_ERROR(dp_idx_open(ctx, path, &file), DP_ERR_NO_FILE, "cannot be opened");
    CHECK_ERROR(dp_idx_open(ctx, ".", &file), DP_ERR_FILE, "is not a regular file");
    dp_close(ctx);
}

TEST(wrong_arguments)
{
    dp_ctx *ctx = open_cpus(1);
    dp_idx *file;
    dp_idx_info info;
    char row[16];
    put_file(idx[0].bytes, idx[0].count);
    CHECK_ERROR(dp_idx_open(NULL, path, &file), DP_ERR_INVALID, "dp_idx_open: ");
    CHECK_ERROR(dp_idx_open(ctx, NULL, &file), DP_ERR_INVALID, "path is NULL");
    CHECK_ERROR(dp_idx_open(ctx, "", &file), DP_ERR_INVALID, "no name of a file");
    CHECK_ERROR(dp_idx_open(ctx, path, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_idx_open(ctx, path, &file));
    CHECK_ERROR(dp_idx_info_get(NULL, &info), DP_ERR_INVALID, "dp_idx_info_get: idx is NULL");
    CHECK_ERROR(dp_idx_info_get(file, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_idx_row(NULL, 0, row), DP_ERR_INVALID, "dp_idx_row: idx is NULL");
    CHECK_ERROR(dp_idx_row(file, 0, NULL), DP_ERR_INVALID, "out is NULL");
    dp_idx_close(NULL);
    dp_close(ctx);
    drop_file();
}

/* Each closes its file: by a call, by dp_close, or because it could not be opened. */
TEST(files_are_closed)
{
    dp_idx *file;
    put_file(idx[0].bytes, idx[0].count);
    int before = open_files();
    for (int by_hand = 0; by_hand < 2; by_hand++) {
        dp_ctx *ctx = open_cpus(1);
        CHECK_OK(dp_idx_open(ctx, path, &file));
        if (by_hand)
            dp_idx_close(file);
        put_file(idx[0].bytes, 7);
        CHECK_STATUS(dp_idx_open(ctx, path, &file), DP_ERR_FILE);
        put_file(idx[0].bytes, idx[0].count);
        dp_close(ctx);
        CHECK_INT(open_files(), before);
    }
    drop_file();
}

static dp_status open_and_close(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    dp_idx *file = NULL;
    (void)scope;
    (void)in;
    DP_TRY(dp_idx_open(ctx, path, &file));
    dp_idx_close(file);
    *out = dp_none();
    return DP_OK;
}

TEST(out_of_memory)
{
    put_file(idx[0].bytes, idx[0].count);
    tree_out_of_memory(open_and_close, 0, "[]", "None");
    drop_file();
}

static dp_status read_row(dp_sample *sample, void *user)
{
    return dp_idx_row(user, sample->index, sample->rows[0]);
}

/* As its manual shows it. */
TEST(a_loader_reads_files)
{
    static const dp_field field = {"image", DP_U8, 2, {1, 3}};
    dp_ctx *ctx = NULL;
    dp_loader *loader = NULL;
    dp_batch batch;
    dp_idx *file;
    dp_idx_info info;
    put_file(idx[0].bytes, idx[0].count);
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    CHECK_OK(dp_idx_open(ctx, path, &file));
    CHECK_OK(dp_idx_info_get(file, &info));
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(
        dp_loader_create(ctx,
                         &(dp_loader_config){.sampler = {.count = info.shape[0], .in_order = true},
                                             .batch = 2,
                                             .read = read_row,
                                             .user = file,
                                             .fields = &field,
                                             .field_count = 1,
                                             .worker_count = 2},
                         &loader));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_TREE(ctx, batch.value, "{'image': u8[2,1,3]=97 98 99 100 101 102}");
    dp_close(ctx);
    drop_file();
}
