/* readers.h - rows of IDX files (MNIST and its kin) and of .npy files (numpy.save), for a loader.

   A row is what an array has at one index of its first dim: a picture, a label. Rows are read where
   they go, by any number of threads. A file that says more than it holds, or anything else that
   does not fit together, is refused when it is opened, with a sentence that names it.

       array_file images;
       DP_CHECK(array_file_open("train-images-idx3-ubyte", &images));
       ...
       DP_TRY(array_file_row(&images, sample->index, sample->rows[0]));       in dp_read_fn       */

#ifndef READERS_H
#define READERS_H

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../dp.h"

typedef struct array_file {
    int fd;
    dp_dtype dtype;
    int ndim;
    int64_t shape[DP_MAX_DIMS]; /* shape[0] rows */
    int64_t data_at, row_bytes;
    bool swapped; /* bytes of elements are in the other order than this machine's */
    char name[64];
} array_file;

enum { ARRAY_HEAD_BYTES = 2048 }; /* what a header may have; numpy's are 128 or so */

typedef struct array_head { /* the beginning of a file */
    unsigned char bytes[ARRAY_HEAD_BYTES + 1];
    int64_t count, file_bytes;
} array_head;

static inline bool array_little_endian(void)
{
    const uint16_t one = 1;
    return *(const unsigned char *)&one == 1;
}

/* ---- IDX ------------------------------------------------------------------------------------- */

static inline dp_status array_read_idx(const array_head *head, array_file *file)
{
    static const struct {
        unsigned char code;
        dp_dtype dtype;
    } codes[] = {{0x08, DP_U8},  {0x09, DP_I8},  {0x0b, DP_I16},
                 {0x0c, DP_I32}, {0x0d, DP_F32}, {0x0e, DP_F64}};
    const unsigned char *at = head->bytes + 4;
    file->dtype = DP_DTYPE_ANY;
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (codes[i].code == head->bytes[2])
            file->dtype = codes[i].dtype;
    file->ndim = head->bytes[3];
    file->data_at = 4 + 4 * (int64_t)file->ndim;
    file->swapped = array_little_endian();
    if (file->dtype == DP_DTYPE_ANY || file->ndim > DP_MAX_DIMS || file->data_at > head->count)
        return dp_error(DP_ERR_INVALID, "%s: type %d in %d dims is not what IDX files have",
                        file->name, head->bytes[2], head->bytes[3]);
    for (int d = 0; d < file->ndim; d++, at += 4)
        file->shape[d] = (int64_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
    return DP_OK;
}

/* ---- .npy ------------------------------------------------------------------------------------ */

typedef struct npy_text { /* {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } */
    const char *at;
} npy_text;

static inline bool npy_takes(npy_text *text, const char *word)
{
    size_t bytes = strlen(word);
    text->at += strspn(text->at, " ");
    if (strncmp(text->at, word, bytes) != 0)
        return false;
    text->at += bytes;
    return true;
}

static inline bool npy_takes_descr(npy_text *text, array_file *file)
{
    static const struct {
        const char *word;
        dp_dtype dtype;
    } words[] = {{"f2'", DP_F16}, {"f4'", DP_F32}, {"f8'", DP_F64},
                 {"i1'", DP_I8},  {"i2'", DP_I16}, {"i4'", DP_I32},
                 {"i8'", DP_I64}, {"u1'", DP_U8},  {"b1'", DP_BOOL}};
    if (!npy_takes(text, "'") || strchr("<>|", text->at[0]) == NULL || text->at[0] == '\0')
        return false;
    char order = *text->at++;
    file->swapped = order != '|' && (order == '<') != array_little_endian();
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strncmp(text->at, words[i].word, 3) == 0) {
            text->at += 3;
            file->dtype = words[i].dtype;
            return order != '|' || dp_dtype_bytes(file->dtype) == 1;
        }
    return false;
}

static inline bool npy_takes_number(npy_text *text, int64_t *out)
{
    int digits = 0;
    text->at += strspn(text->at, " ");
    for (*out = 0; *text->at >= '0' && *text->at <= '9'; digits++)
        if (digits == 18)
            return false;
        else
            *out = *out * 10 + (*text->at++ - '0');
    return digits > 0;
}

static inline bool npy_takes_shape(npy_text *text, array_file *file)
{
    bool comma = true;
    if (!npy_takes(text, "("))
        return false;
    for (file->ndim = 0; !npy_takes(text, ")"); file->ndim++) {
        if (!comma || file->ndim == DP_MAX_DIMS ||
            !npy_takes_number(text, &file->shape[file->ndim]))
            return false;
        comma = npy_takes(text, ",");
    }
    return file->ndim != 1 || comma; /* (3) is a number in Python */
}

/* Each key once, in any order. */
static inline bool npy_takes_dict(npy_text *text, array_file *file, bool *out_fortran)
{
    unsigned found = 0;
    bool comma = true, good = true;
    if (!npy_takes(text, "{"))
        return false;
    while (good && !npy_takes(text, "}")) {
        unsigned key = npy_takes(text, "'descr'")           ? 1
                       : npy_takes(text, "'fortran_order'") ? 2
                       : npy_takes(text, "'shape'")         ? 4
                                                            : 0;
        good = comma && key != 0 && (found & key) == 0 && npy_takes(text, ":");
        found |= key;
        *out_fortran = key == 2 ? good && npy_takes(text, "True") : *out_fortran;
        if (good)
            good = key == 1   ? npy_takes_descr(text, file)
                   : key == 4 ? npy_takes_shape(text, file)
                              : *out_fortran || npy_takes(text, "False");
        comma = npy_takes(text, ",");
    }
    return good && found == 7;
}

static inline dp_status array_read_npy(array_head *head, array_file *file)
{
    const unsigned char *bytes = head->bytes;
    bool fortran = false, wide = bytes[6] > 1;
    int64_t text_at = wide ? 12 : 10, text_bytes = bytes[8] | bytes[9] << 8;
    if (wide)
        text_bytes |= (int64_t)bytes[10] << 16 | (int64_t)bytes[11] << 24;
    if (bytes[6] < 1 || bytes[6] > 3)
        return dp_error(DP_ERR_UNSUPPORTED, "%s: version %d.%d of .npy", file->name, bytes[6],
                        bytes[7]);
    file->data_at = text_at + text_bytes;
    if (file->data_at > head->count)
        return dp_error(DP_ERR_INVALID, "%s: its header has %lld bytes, more than it or we have",
                        file->name, (long long)text_bytes);
    head->bytes[file->data_at] = '\0'; /* at most one behind what was read */
    npy_text text = {(const char *)bytes + text_at};
    if (!npy_takes_dict(&text, file, &fortran))
        return dp_error(DP_ERR_INVALID, "%s: its header makes no sense at \"%.24s\"", file->name,
                        text.at + strspn(text.at, " "));
    text.at += strspn(text.at, " \n");
    if (text.at != (const char *)bytes + file->data_at)
        return dp_error(DP_ERR_INVALID, "%s: something follows its header", file->name);
    if (fortran && file->ndim > 1)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: columns come first: save numpy.ascontiguousarray of it", file->name);
    return DP_OK;
}

/* ---- both ------------------------------------------------------------------------------------ */

/* The file has exactly what its header says. */
static inline dp_status array_check(const array_head *head, array_file *file)
{
    int64_t left = head->file_bytes - file->data_at;
    file->row_bytes = (int64_t)dp_dtype_bytes(file->dtype);
    if (file->ndim == 0)
        return dp_error(DP_ERR_INVALID, "%s: a single number has no rows", file->name);
    for (int d = 1; d < file->ndim; d++) {
        if (file->shape[d] > 0 && file->row_bytes > INT64_MAX / file->shape[d])
            return dp_error(DP_ERR_INVALID, "%s: a row is larger than any file", file->name);
        file->row_bytes *= file->shape[d];
    }
    if (file->row_bytes == 0
            ? left != 0
            : left % file->row_bytes != 0 || left / file->row_bytes != file->shape[0])
        return dp_error(DP_ERR_INVALID,
                        "%s: its header says %lld rows of %lld bytes, there are "
                        "%lld bytes",
                        file->name, (long long)file->shape[0], (long long)file->row_bytes,
                        (long long)left);
    return DP_OK;
}

static inline dp_status array_file_read_head(array_file *file, array_head *head)
{
    struct stat about;
    if (fstat(file->fd, &about) != 0 || !S_ISREG(about.st_mode))
        return dp_error(DP_ERR_INVALID, "%s: is no file", file->name);
    head->file_bytes = about.st_size;
    head->count = pread(file->fd, head->bytes, ARRAY_HEAD_BYTES, 0);
    if (head->count < 4)
        return dp_error(DP_ERR_INVALID, "%s: is empty, or cannot be read", file->name);
    if (head->bytes[0] == 0x1f && head->bytes[1] == 0x8b)
        return dp_error(DP_ERR_UNSUPPORTED, "%s: is compressed: gunzip it", file->name);
    if (head->count >= 12 && memcmp(head->bytes, "\x93NUMPY", 6) == 0)
        DP_TRY(array_read_npy(head, file));
    else if (head->bytes[0] == 0 && head->bytes[1] == 0)
        DP_TRY(array_read_idx(head, file));
    else
        return dp_error(DP_ERR_INVALID, "%s: is neither an IDX nor a .npy file", file->name);
    return array_check(head, file);
}

static inline void array_file_close(array_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}

static inline dp_status array_file_open(const char *path, array_file *out)
{
    array_head head = {.count = 0};
    const char *name = strrchr(path, '/');
    *out = (array_file){.fd = open(path, O_RDONLY | O_CLOEXEC)};
    snprintf(out->name, sizeof out->name, "%s", name != NULL ? name + 1 : path);
    if (out->fd < 0)
        return dp_error(DP_ERR_INVALID, "%s: cannot be opened", path);
    dp_status status = array_file_read_head(out, &head);
    if (status != DP_OK)
        array_file_close(out);
    return status;
}

static inline void array_swap(unsigned char *bytes, size_t each, size_t count)
{
    for (; count > 0; count--, bytes += each)
        for (size_t i = 0; i < each / 2; i++) {
            unsigned char byte = bytes[i];
            bytes[i] = bytes[each - 1 - i];
            bytes[each - 1 - i] = byte;
        }
}

/* file->row_bytes bytes; any thread. */
static inline dp_status array_file_row(const array_file *file, int64_t row, void *out)
{
    unsigned char *bytes = out;
    int64_t done = 0, each = (int64_t)dp_dtype_bytes(file->dtype);
    if (row < 0 || row >= file->shape[0])
        return dp_error(DP_ERR_INVALID, "%s: row %lld of %lld", file->name, (long long)row,
                        (long long)file->shape[0]);
    while (done < file->row_bytes) {
        ssize_t some = pread(file->fd, bytes + done, (size_t)(file->row_bytes - done),
                             file->data_at + row * file->row_bytes + done);
        if (some <= 0) /* it has changed since it was opened */
            return dp_error(DP_ERR_USER, "%s: row %lld cannot be read", file->name, (long long)row);
        done += some;
    }
    if (file->swapped)
        array_swap(bytes, (size_t)each, (size_t)(file->row_bytes / each));
    for (int64_t i = 0; i < file->row_bytes && file->dtype == DP_BOOL; i++)
        bytes[i] = bytes[i] != 0; /* a bool that is neither would be no bool */
    return DP_OK;
}

#endif /* READERS_H */
