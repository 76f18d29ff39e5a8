/* dp_save.h - v0.2.0 - what a training program keeps in files - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h, and on its system
   for files and threads (dp/os.h, dp/team.h). Files are safetensors files: Python's `safetensors`
   reads them, and its files can be read here.

       dp_module_save(par, step, &model);
       dp_optim_save(optim, step, &state);                     of dp_train.h
       dp_checkpoint_save(ctx, "last.safetensors",
                          DP_DICT(step, {"model", model}, {"optim", state}, {"epoch", dp_int(3)}));
       ...
       status = dp_checkpoint_load(ctx, step, "last.safetensors", &saved);
       if (status == DP_OK) {                                  DP_ERR_NO_FILE: from the beginning
           dp_module_load(par, dp_get(saved, "model"), NULL);
           dp_optim_load(optim, dp_get(saved, "optim"));
           epoch = dp_get(saved, "epoch").as.i;
       }

   A file does not depend on devices, processes or wrappers: it is the same whatever has written it,
   and can be loaded on any others.

   CONTENTS (search for the tag)
     >>files        a tree of values in a file, and back
     >>models       parameters and buffers by name
     >>checkpoints  the same for all processes of a job
     >>savers       checkpoints beside training, and which of them are kept
   and of the implementation
     >>words        names and text
     >>leaves       which tensors a value has, and where they go
     >>headers      what a file begins with
     >>writing      all the rest of it
     >>json         what others have written, character by character
     >>entries      what a header says of tensors
     >>places       whether that can be true
     >>trees        values as they were
     >>reading      a file as a value
     >>loading      a value into a module
     >>agreement    what all processes know of it
     >>sharing      one process' value becomes that of all
     >>names        of the files of a saver
     >>tidying      which of them stay
     >>beside       a copy, and the thread that writes it
     >>finding      what an earlier run has kept
     >>saving       a saver as all processes see it
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_SAVE_H) && defined(DP_H)
#define DP_SAVE_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>files ==================================================================================
   A file holds a dict of tensors (on any device, with any strides), numbers, strings, none, lists,
   tuples and dicts. Reading gives back what was written: names with dots, the order of entries,
   empty values, tuples, and 3 apart from 3.0. Containers, opaque pointers and text that is not
   UTF-8 are refused. Saves are atomic, even if the disk fills up or the process is killed.

   In the file, a tensor's name is made of the keys and indices that lead to it, joined by dots:
   {"optim": {"state": {"fc.weight": [a, b]}}} has optim.state.fc.weight.0 and .1. (If two would
   have the same name, one gets a "~".) If there is anything but tensors at the top, `__metadata__`
   has an entry "dp.h" with the tree as JSON. Other entries of `__metadata__` are a dict of strings
   under that key, which comes last, and which you may write too: some programs ask for {"format":
   "pt"}.

   Files of other programs are read as a flat dict, in the order of their headers. Files are
   memory-mapped and validated before use: every byte must belong to one tensor, which has as many
   as its dtype and shape say. Anything else is a DP_ERR_FILE that says what is wrong where. What
   dp.h does not have is UNSUPPORTED: other dtypes, more dims, and beside a dim of 0 others that
   cannot be counted. What else an entry says of its tensor is passed over.                     */

/* The file is written as path.part, synced to disk, and renamed. If anything fails, the old file
   stays, unless all that failed is to sync the folder with the new name; only a process that was
   killed leaves a path.part, which the next write reuses. Of two writers to one path at the same
   time, one is refused: it finds the part locked, or in the end another file than at the beginning.
   A symbolic link is replaced by the file. Tensors are read by dp_read, piece by piece, in this
   process only. [host] */
DP_MUST_USE DP_API dp_status dp_file_write(dp_ctx *ctx, const char *path, dp_value value);

/* Tensors are read-only views of the file, which stays mapped until the scope ends. Nothing is read
   before it is used, so the file may be larger than memory. Meanwhile it may be replaced, as
   dp_file_write does, but not changed or cut: the system kills a process that reads bytes which are
   gone. Only tensors that are not aligned to their elements are copied. DP_ERR_NO_FILE: there is no
   file of this name. */
DP_MUST_USE DP_API dp_status dp_file_read(dp_ctx *ctx, dp_scope *scope, const char *path,
                                          dp_value *out);

/* ==== >>models =================================================================================
   Of modules and wrappers. Wrappers add nothing to the names of parameters.                    */

/* A dict of all parameters and buffers of a module, from its first owner. They are views, not
   copies: write them out, or dp_keep them, before the next step. */
DP_MUST_USE DP_API dp_status dp_module_save(dp_module *module, dp_scope *scope, dp_value *out);

typedef struct dp_module_load_config { /* zero: all that the module has, and nothing else */
    const char *prefix; /* use only entries that begin with it, and strip it: "module." of torch's
                               DistributedDataParallel, or "backbone." for a part */
    bool allow_missing; /* parameters without an entry stay as they are */
    bool allow_unknown; /* entries without a parameter are ignored */
    bool cast;          /* from one floating dtype to another */
    bool check_only;    /* say whether it fits, and change nothing: so that a model and its
                           optimizer, which checks itself, are loaded both or not at all */
} dp_module_load_config;

/* Into every owner. Everything is checked first: if entries are missing, unknown, or of another
   shape or dtype, a MISMATCH counts them and names some, and nothing changes. For names that share
   memory one entry is enough; several must agree, after the cast. What was saved may be views of
   parameters of any owner, as dp_module_save gives them of the first, in any form and under any
   names: they are read before one is written. [host] */
DP_MUST_USE DP_API dp_status dp_module_load(dp_module *module, dp_value saved,
                                            const dp_module_load_config *config);

/* ==== >>checkpoints ============================================================================
   dp_file_write and dp_file_read for all processes of a job. All processes make the call, like a
   collective, and each learns whether it succeeded.

   Process 0 may be stopped, or wait for a disk, for longer than timeout_ms. Then the others go on
   without it (by dp_recover, or as a new run), and save newer files. When it wakes up it leaves
   these alone, and returns an error: it renames its part only if all others have answered since it
   was locked, and no other file has come to the path since the call began. As long as the part is
   locked the others cannot write that path: they get an error until process 0 goes on or is killed.

   Not all can be known. A newer file is lost if process 0 was stopped between its last look and its
   next step, and the file system has no locks, or loses one, or a saver of the others has used the
   same number with another score. And a process that was alone in its job has nobody to ask: it
   knows only of files that were written since its call began.                                  */

/* Process 0 writes its value; the others' values are ignored and may be none. All return the same
   status when the write has ended; if the job fails before that, the file is the old one or the new
   one. Nobody times out as long as each 64 MiB take less than timeout_ms. */
DP_MUST_USE DP_API dp_status dp_checkpoint_save(dp_ctx *ctx, const char *path, dp_value value);

/* Every process reads the file itself: from a shared disk, or from a copy on its machine. If one
   cannot, all fail, and say which and why. DP_ERR_NO_FILE means that no process has the file. If
   only some have it, or the files differ, that is a MISMATCH, so that none starts over while others
   resume. (Files are compared by size, header and samples of their bytes.) */
DP_MUST_USE DP_API dp_status dp_checkpoint_load(dp_ctx *ctx, dp_scope *scope, const char *path,
                                                dp_value *out);

/* A checkpoint without a file: all processes get the value of the one with the largest `progress`
   (of several, the first). If all are equal, so are their values, it is assumed, and nothing is
   sent. They get copies on the host, which end with the scope: load them after dp_recover, as from
   a file. A process that has nothing yet gives -1. */
DP_MUST_USE DP_API dp_status dp_checkpoint_share(dp_ctx *ctx, dp_scope *scope, int64_t progress,
                                                 dp_value value, dp_value *out);

/* ==== >>savers =================================================================================
   Checkpoints that are written while training goes on, and of which some are kept:

       dp_saver *saver;
       dp_saver_create(ctx, &(dp_saver_config){.path = "run/step-*.safetensors",
                                               .last = 3,
                                               .best_by = "loss"}, &saver);
       status = dp_saver_load(saver, scope, DP_SAVER_LAST, &saved);        then as at the top
       ...
       dp_saver_save(saver, step, value, log);      run/step-48-loss=0.4312.safetensors
       ...
       dp_saver_wait(saver);                        the last one is on disk, too

   A save copies the value on process 0, begins the file, and returns; then a thread writes the
   copy, as dp_checkpoint_save would have written it. So the step that saves takes longer by that
   copy (and by a second one of what dp_optim_save and dp_average_save make, which dp_optim_view and
   dp_average_view spare). It is as large as the file, in host memory, allocated by the first save
   and used again by all. There is one: a save waits until the one before it is on disk.

   An error in the thread harms no finished file, and training goes on. The next dp_saver_save or
   dp_saver_wait, and only that call, returns it in all processes; a save has begun all the same,
   unless the job has failed. dp_saver_load, dp_saver_destroy and dp_close wait for the thread, too,
   but do not return it. A process 0 that was left behind writes and removes no file if it finds
   that the others have saved since: see >>checkpoints.

   Files are known by their names alone, so that a run finds what an earlier one has kept, and goes
   on with it. When a new file is on disk, those are removed that have its number, or are neither
   among the newest nor the best, and parts of files that a killed process has left. What has
   another name, or the number of another entry in it, is left alone. One saver at a time has a
   path.                                                                                        */

typedef struct dp_saver dp_saver;

typedef struct dp_saver_config {
    /* In the name of the file, a * stands for the number of the save. Without one, each save
       replaces the file. The folder must be there. */
    const char *path;
    int last;            /* so many of the newest are kept; 0 = 1, below 0: all */
    const char *best_by; /* an entry of logs: the file with the least number there is kept, too */
    bool best_is_most;   /* with the greatest */
} dp_saver_config;

/* All processes make the calls of a saver, like collectives. It ends with the context, or by
   dp_saver_destroy. */
DP_MUST_USE DP_API dp_status dp_saver_create(dp_ctx *ctx, const dp_saver_config *config,
                                             dp_saver **out);
/* NULL is fine. */
DP_API void dp_saver_destroy(dp_saver *saver);

/* Between two steps. The number, say of steps, does not fall: to go on from an older file, remove
   the newer ones. Value and log are those of process 0: dp_log_mean makes the log of all. A log
   without the entry best_by is INVALID. A file with dp_none() for a log, or where the entry is not
   finite, is never the best. [host] */
DP_MUST_USE DP_API dp_status dp_saver_save(dp_saver *saver, int64_t number, dp_value value,
                                           dp_value log);

/* Wait until nothing is being written: call it before the program ends. [host] */
DP_MUST_USE DP_API dp_status dp_saver_wait(dp_saver *saver);

enum { DP_SAVER_LAST = -1, DP_SAVER_BEST = -2 };

/* As dp_checkpoint_load, the file with this number. DP_SAVER_LAST: the newest that can be read;
   where a newer one cannot, a warning in the log says why. */
DP_MUST_USE DP_API dp_status dp_saver_load(dp_saver *saver, dp_scope *scope, int64_t number,
                                           dp_value *out);

#ifdef __cplusplus
}
#endif
#endif /* DP_SAVE_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_SAVE_IMPLEMENTED)
#define DP_SAVE_IMPLEMENTED

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "dp_save.h: safetensors files are little-endian, and so must be the machine"
#else

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== >>words ===================================================================================
   Names come from untrusted files: sentences show only their beginning, without control
   characters.                                                                                   */

enum { DP__SAVE_SENTENCE = 512 }; /* bytes */

typedef struct dp__save_shown {
    char text[64];
} dp__save_shown;

static char dp__save_tame(char c)
{
    return (unsigned char)c < ' ' || c == 127 ? '?' : c;
}

static dp__save_shown dp__save_show(const char *name)
{
    enum { MOST = sizeof(dp__save_shown) - 4 };
    dp__save_shown out;
    size_t count = 0;
    for (; name[count] != '\0' && count < MOST; count++)
        out.text[count] = dp__save_tame(name[count]);
    memcpy(&out.text[count], name[count] != '\0' ? "..." : "\0\0\0", 4);
    return out;
}

static const char dp__save_notes_name[] = "__metadata__";
static const char dp__save_tree_name[] = "dp.h";

static const char *const dp__save_dtypes[] = {"F32", "F64", "F16", "BF16", "I64",
                                              "I32", "I16", "I8",  "U8",   "BOOL"};
_Static_assert(sizeof dp__save_dtypes / sizeof dp__save_dtypes[0] == DP_DTYPE_COUNT,
               "each dtype has a name in files");

/* ==== >>leaves ==================================================================================
   The tensors of a value get names and places. The largest elements come first, so that all are
   aligned to their elements.                                                                    */

typedef struct dp__save_leaf {
    const char *name;
    const dp_tensor *tensor;
    uint64_t first, bytes;
} dp__save_leaf;

static const size_t dp__save_sizes[] = {8, 4, 2, 1};

typedef struct dp__save_writer {
    dp_ctx *ctx;
    dp_scope *temp;
    dp_value value;
    bool flat; /* a dict of tensors and nothing else: the file needs no tree */
    dp__save_leaf *leaves;
    size_t leaf_count;
    size_t next_leaf; /* while the tree is put down: the leaf that comes next */
    uint64_t data_bytes;
    char *header;
    size_t header_bytes;
    dp__os_part part;
    char *chunk;
    size_t room, filled, unsaid;   /* bytes of the chunk; in it; written since the last beat */
    dp_status (*beat)(void *user); /* NULL, or called every DP__SAVE_BEAT bytes */
    void *user;
} dp__save_writer;

static bool dp__save_holds(dp_value value)
{
    return value.kind == DP_LIST || value.kind == DP_TUPLE || value.kind == DP_DICT;
}

static size_t dp__save_tensors_in(dp_value value)
{
    size_t count = value.kind == DP_TENSOR;
    for (size_t i = 0; i < dp_count(value); i++)
        count += dp__save_tensors_in(dp_at(value, i));
    return count;
}

static uint64_t dp__save_bytes_of(const dp_tensor *tensor)
{
    return (uint64_t)dp_tensor_count(tensor) * dp_dtype_bytes((dp_dtype)tensor->dtype);
}

static dp_status dp__save_check_text(const char *path, const char *text)
{
    if (!dp_is_utf8(text))
        return dp_error(DP_ERR_INVALID, "a string or key in '%s' is not UTF-8",
                        dp__save_show(path).text);
    return DP_OK;
}

static dp_status dp__save_collect(dp__save_writer *writer, dp_value value, const char *path);

static dp_status dp__save_collect_in(dp__save_writer *writer, dp_value value, const char *path)
{
    char number[24];
    for (size_t i = 0; i < dp_count(value); i++) {
        const char *key = dp_key_at(value, i);
        if (path == NULL && strcmp(key, dp__save_notes_name) == 0)
            continue;
        snprintf(number, sizeof number, "%zu", i);
        const char *own = dp_join_names(writer->temp, path, key != NULL ? key : number);
        if (own == NULL)
            return dp_no_memory();
        if (key != NULL)
            DP_TRY(dp__save_check_text(own, key));
        if (path == NULL && dp_at(value, i).kind != DP_TENSOR)
            writer->flat = false;
        DP_TRY(dp__save_collect(writer, dp_at(value, i), own));
    }
    return DP_OK;
}

static dp_status dp__save_collect(dp__save_writer *writer, dp_value value, const char *path)
{
    if (dp__save_holds(value))
        return dp__save_collect_in(writer, value, path);
    if (value.kind == DP_STRING)
        return dp__save_check_text(path, value.as.s);
    if (value.kind == DP_CONTAINER || value.kind == DP_OPAQUE)
        return dp_error(DP_ERR_INVALID, "'%s' is %s, for which files have no form",
                        dp__save_show(path).text,
                        value.kind == DP_OPAQUE ? "an opaque pointer" : "a container");
    if (value.kind == DP_TENSOR)
        writer->leaves[writer->leaf_count++] =
            (dp__save_leaf){path, value.as.t, 0, dp__save_bytes_of(value.as.t)};
    return DP_OK;
}

/* By name, then by place in the tree. */
static int dp__save_leaf_order(const void *a, const void *b)
{
    const dp__save_leaf *const *one = a, *const *two = b;
    int order = strcmp((*one)->name, (*two)->name);
    return order != 0 ? order : (*one > *two) - (*one < *two);
}

/* "a.b" and "c" give the same name as "a" and "b.c". A name with a "~" may equal another one, so
   this goes on until all differ. */
static dp_status dp__save_leaves_differ(dp__save_writer *writer)
{
    bool same = true;
    dp__save_leaf **sorted = dp_scope_alloc(writer->temp, writer->leaf_count * sizeof *sorted);
    if (sorted == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < writer->leaf_count; i++)
        sorted[i] = &writer->leaves[i];
    while (same) {
        same = false;
        qsort(sorted, writer->leaf_count, sizeof *sorted, dp__save_leaf_order);
        for (size_t i = 1; i < writer->leaf_count; i++)
            if (strcmp(sorted[i]->name, sorted[i - 1]->name) == 0) {
                size_t count = strlen(sorted[i]->name);
                char *name = dp_scope_alloc(writer->temp, count + 2);
                if (name == NULL)
                    return dp_no_memory();
                memcpy(name, sorted[i]->name, count);
                memcpy(name + count, "~", 2);
                sorted[i]->name = name;
                same = true;
            }
    }
    return DP_OK;
}

static dp_status dp__save_leaves_place(dp__save_writer *writer)
{
    for (size_t s = 0; s < sizeof dp__save_sizes / sizeof dp__save_sizes[0]; s++)
        for (size_t i = 0; i < writer->leaf_count; i++) {
            dp__save_leaf *leaf = &writer->leaves[i];
            if (dp_dtype_bytes((dp_dtype)leaf->tensor->dtype) != dp__save_sizes[s])
                continue;
            leaf->first = writer->data_bytes;
            writer->data_bytes += leaf->bytes; /* each is below half of the range */
            if (writer->data_bytes > INT64_MAX / 2)
                return dp_error(DP_ERR_INVALID, "there are more bytes than a file can have");
        }
    return DP_OK;
}

static dp_status dp__save_check_notes(dp_value notes)
{
    if (notes.kind != DP_DICT && notes.kind != DP_NONE)
        return dp_error(DP_ERR_INVALID, "'%s' is not a dict", dp__save_notes_name);
    for (size_t i = 0; i < dp_count(notes); i++) {
        const char *key = dp_key_at(notes, i), *text = dp_text(dp_at(notes, i));
        if (text == NULL || strcmp(key, dp__save_tree_name) == 0)
            return dp_error(DP_ERR_INVALID, "'%s' in '%s' %s", dp__save_show(key).text,
                            dp__save_notes_name,
                            text == NULL ? "is not a string" : "is the library's own");
        DP_TRY(dp__save_check_text(dp__save_notes_name, key));
        DP_TRY(dp__save_check_text(key, text));
    }
    return DP_OK;
}

/* dp_get checks a value made by hand. */
static dp_status dp__save_leaves(dp__save_writer *writer)
{
    dp_value value = writer->value, notes = dp_get(value, dp__save_notes_name);
    if (notes.kind == DP_ERROR)
        return dp_error((dp_status)notes.status, "%s", notes.as.s);
    if (value.kind != DP_DICT)
        return dp_error(DP_ERR_INVALID, "the value is not a dict");
    writer->leaves =
        dp_scope_alloc(writer->temp, dp__save_tensors_in(value) * sizeof *writer->leaves);
    if (writer->leaves == NULL)
        return dp_no_memory();
    writer->flat = true;
    DP_TRY(dp__save_check_notes(notes));
    DP_TRY(dp__save_collect_in(writer, value, NULL));
    DP_TRY(dp__save_leaves_differ(writer));
    return dp__save_leaves_place(writer);
}

/* ==== >>headers =================================================================================
   Written twice: first only to count.                                                           */

enum { DP__SAVE_HEADER_MOST = 100000000, DP__SAVE_HEADER_ALIGN = 8 };

typedef struct dp__save_sink {
    char *text; /* NULL: only count */
    size_t count;
    bool inside; /* a string of JSON */
} dp__save_sink;

static void dp__save_put_byte(dp__save_sink *sink, char c)
{
    if (sink->text != NULL)
        sink->text[sink->count] = c;
    sink->count++;
}

static void dp__save_put_char(dp__save_sink *sink, char c)
{
    if (sink->inside && (c == '"' || c == '\\'))
        dp__save_put_byte(sink, '\\');
    dp__save_put_byte(sink, c);
}

static void dp__save_put(dp__save_sink *sink, const char *text)
{
    for (; *text != '\0'; text++)
        dp__save_put_char(sink, *text);
}

static void dp__save_put_number(dp__save_sink *sink, long long number)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", number);
    dp__save_put(sink, text);
}

/* 17 digits are exact. The decimal point depends on the locale. */
static void dp__save_put_float(dp__save_sink *sink, double number)
{
    char text[48], *rest = text;
    if (isnan(number) || isinf(number)) {
        dp__save_put(sink, isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
        return;
    }
    snprintf(text, sizeof text, "%.16e", number);
    rest += *rest == '-';
    char first[] = {text[0], *text == '-' ? text[1] : '.', *text == '-' ? '.' : '\0', '\0'};
    dp__save_put(sink, first);
    for (rest++; *rest < '0' || *rest > '9'; rest++)
        continue;
    dp__save_put(sink, rest);
}

/* `mark` tells strings of a tree from names of tensors; "" elsewhere. */
static void dp__save_put_string(dp__save_sink *sink, const char *mark, const char *text)
{
    char code[8];
    dp__save_put(sink, "\"");
    dp__save_put(sink, mark);
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < ' ') {
            snprintf(code, sizeof code, "\\u%04x", (unsigned)*text);
            dp__save_put(sink, code);
            continue;
        }
        if (*text == '"' || *text == '\\')
            dp__save_put_char(sink, '\\');
        dp__save_put_char(sink, *text);
    }
    dp__save_put(sink, "\"");
}

static void dp__save_put_value(dp__save_writer *writer, dp__save_sink *sink, dp_value value);

static void dp__save_put_members(dp__save_writer *writer, dp__save_sink *sink, dp_value value,
                                 bool top)
{
    const char *comma = "";
    dp__save_put(sink, value.kind == DP_DICT ? "{" : "[");
    if (value.kind == DP_TUPLE) {
        dp__save_put(sink, "\"tuple\"");
        comma = ",";
    }
    for (size_t i = 0; i < dp_count(value); i++) {
        const char *key = dp_key_at(value, i);
        if (top && strcmp(key, dp__save_notes_name) == 0)
            continue;
        dp__save_put(sink, comma);
        if (key != NULL) {
            dp__save_put_string(sink, "", key);
            dp__save_put(sink, ":");
        }
        dp__save_put_value(writer, sink, dp_at(value, i));
        comma = ",";
    }
    dp__save_put(sink, value.kind == DP_DICT ? "}" : "]");
}

static void dp__save_put_value(dp__save_writer *writer, dp__save_sink *sink, dp_value value)
{
    if (dp__save_holds(value))
        dp__save_put_members(writer, sink, value, false);
    else if (value.kind == DP_TENSOR)
        dp__save_put_string(sink, "t:", writer->leaves[writer->next_leaf++].name);
    else if (value.kind == DP_STRING)
        dp__save_put_string(sink, "s:", value.as.s);
    else if (value.kind == DP_INT)
        dp__save_put_number(sink, value.as.i);
    else if (value.kind == DP_FLOAT)
        dp__save_put_float(sink, value.as.f);
    else if (value.kind == DP_BOOLEAN)
        dp__save_put(sink, value.as.b ? "true" : "false");
    else
        dp__save_put(sink, "null");
}

static void dp__save_put_notes(dp__save_writer *writer, dp__save_sink *sink)
{
    dp_value notes = dp_get(writer->value, dp__save_notes_name);
    const char *comma = "";
    dp__save_put_string(sink, "", dp__save_notes_name);
    dp__save_put(sink, ":{");
    for (size_t i = 0; i < dp_count(notes); i++) {
        dp__save_put(sink, comma);
        dp__save_put_string(sink, "", dp_key_at(notes, i));
        dp__save_put(sink, ":");
        dp__save_put_string(sink, "", dp_text(dp_at(notes, i)));
        comma = ",";
    }
    if (!writer->flat) {
        dp__save_put(sink, comma);
        dp__save_put_string(sink, "", dp__save_tree_name);
        dp__save_put(sink, ":\"");
        sink->inside = true;
        writer->next_leaf = 0;
        dp__save_put_members(writer, sink, writer->value, true);
        sink->inside = false;
        dp__save_put(sink, "\"");
    }
    dp__save_put(sink, "}");
}

static void dp__save_put_leaf(dp__save_sink *sink, const dp__save_leaf *leaf)
{
    dp__save_put_string(sink, "", leaf->name);
    dp__save_put(sink, ":{\"dtype\":\"");
    dp__save_put(sink, dp__save_dtypes[leaf->tensor->dtype]);
    dp__save_put(sink, "\",\"shape\":[");
    for (int d = 0; d < leaf->tensor->ndim; d++) {
        dp__save_put(sink, d > 0 ? "," : "");
        dp__save_put_number(sink, leaf->tensor->shape[d]);
    }
    dp__save_put(sink, "],\"data_offsets\":[");
    dp__save_put_number(sink, (long long)leaf->first);
    dp__save_put(sink, ",");
    dp__save_put_number(sink, (long long)(leaf->first + leaf->bytes));
    dp__save_put(sink, "]}");
}

/* Padded with blanks, so that tensors begin at a multiple of 8. */
static void dp__save_put_header(dp__save_writer *writer, dp__save_sink *sink)
{
    const char *comma = "";
    bool has_notes = !writer->flat || dp_count(dp_get(writer->value, dp__save_notes_name)) > 0;
    dp__save_put(sink, "{");
    if (has_notes) {
        dp__save_put_notes(writer, sink);
        comma = ",";
    }
    for (size_t i = 0; i < writer->leaf_count; i++) {
        dp__save_put(sink, comma);
        dp__save_put_leaf(sink, &writer->leaves[i]);
        comma = ",";
    }
    dp__save_put(sink, "}");
    while (sink->count % DP__SAVE_HEADER_ALIGN != 0)
        dp__save_put(sink, " ");
}

/* With its length before it. */
static dp_status dp__save_header_make(dp__save_writer *writer)
{
    dp__save_sink counted = {0};
    uint64_t length = 0;
    dp__save_put_header(writer, &counted);
    length = counted.count;
    if (length > DP__SAVE_HEADER_MOST)
        return dp_error(DP_ERR_INVALID,
                        "the header needs %zu bytes for all these names; the limit is %d",
                        counted.count, DP__SAVE_HEADER_MOST);
    writer->header_bytes = sizeof length + counted.count;
    writer->header = dp_scope_alloc(writer->temp, writer->header_bytes);
    if (writer->header == NULL)
        return dp_no_memory();
    memcpy(writer->header, &length, sizeof length);
    dp__save_sink sink = {.text = writer->header + sizeof length};
    dp__save_put_header(writer, &sink);
    return DP_OK;
}

/* ==== >>writing =================================================================================
   Tensors go through a piece of host memory, whatever their size.                               */

enum { DP__SAVE_CHUNK = 1 << 20, DP__SAVE_BEAT = 64 << 20 };

/* All that can be wrong with the value or the path is found here. */
static dp_status dp__save_prepare(dp__save_writer *writer, const char *path)
{
    DP_TRY(dp__os_part_make(writer->temp, path, &writer->part));
    DP_TRY(dp__save_leaves(writer));
    return dp__save_header_make(writer);
}

/* Other processes are told that the write goes on, after a sync, so that no later sync takes
   long. */
static dp_status dp__save_flush(dp__save_writer *writer)
{
    DP_TRY(dp__os_part_write(&writer->part, writer->chunk, writer->filled));
    writer->unsaid += writer->filled;
    writer->filled = 0;
    if (writer->beat == NULL || writer->unsaid < DP__SAVE_BEAT)
        return DP_OK;
    writer->unsaid = 0;
    DP_TRY(dp__os_part_sync(&writer->part));
    return writer->beat(writer->user);
}

/* No more than a chunk. */
static dp_status dp__save_put_piece(const dp_tensor *piece, size_t bytes, void *user)
{
    dp__save_writer *writer = user;
    if (writer->filled + bytes > writer->room)
        DP_TRY(dp__save_flush(writer));
    char *to = writer->chunk + writer->filled;
    DP_TRY(dp_read(writer->ctx, piece, to, bytes));
    for (size_t i = 0; i < bytes && piece->dtype == DP_BOOL; i++)
        to[i] = to[i] != 0;
    writer->filled += bytes;
    return DP_OK;
}

static dp_status dp__save_put_tensors(dp__save_writer *writer)
{
    for (size_t s = 0; s < sizeof dp__save_sizes / sizeof dp__save_sizes[0]; s++)
        for (size_t i = 0; i < writer->leaf_count; i++) {
            const dp_tensor *tensor = writer->leaves[i].tensor;
            size_t most = dp_is_contiguous(tensor) ? writer->room : DP__SAVE_CHUNK;
            if (dp_dtype_bytes((dp_dtype)tensor->dtype) == dp__save_sizes[s])
                DP_TRY(dp_tensor_pieces(tensor, most, dp__save_put_piece, writer));
        }
    return DP_OK;
}

static dp_status dp__save_put_file(dp__save_writer *writer)
{
    DP_TRY(dp__os_part_write(&writer->part, writer->header, writer->header_bytes));
    DP_TRY(dp__save_put_tensors(writer));
    DP_TRY(dp__save_flush(writer));
    return dp__os_part_sync(&writer->part);
}

/* All but the last step, which is dp__save_write_end, whatever this returns. */
static dp_status dp__save_write_begin(dp__save_writer *writer, const char *path)
{
    writer->part.fd = -1;
    writer->temp = dp_scope_begin(writer->ctx);
    DP_TRY(dp_scope_check(writer->temp));
    DP_TRY(dp__save_prepare(writer, path));
    writer->room = DP__SAVE_CHUNK;
    writer->chunk = dp_scope_alloc(writer->temp, writer->room);
    if (writer->chunk == NULL)
        return dp_no_memory();
    DP_TRY(dp__os_part_open(&writer->part));
    return dp__save_put_file(writer);
}

static dp_status dp__save_write_end(dp__save_writer *writer, dp_status status)
{
    status = dp__os_part_end(&writer->part, status);
    dp_scope_end(writer->temp);
    return status;
}

static dp_status dp__save_write(dp_ctx *ctx, const char *path, dp_value value)
{
    dp__save_writer writer = {.ctx = ctx, .value = value};
    return dp__save_write_end(&writer, dp__save_write_begin(&writer, path));
}

typedef struct dp__save_image { /* what a file would hold */
    char *bytes;
    size_t count;
} dp__save_image;

/* Where there is room for header and tensors. */
static dp_status dp__save_image_put(dp__save_writer *writer, char *to)
{
    memcpy(to, writer->header, writer->header_bytes);
    writer->room = (size_t)writer->data_bytes;
    writer->chunk = to + writer->header_bytes;
    return dp__save_put_tensors(writer);
}

static dp_status dp__save_image_fill(dp__save_writer *writer, dp_scope *scope, dp__save_image *out)
{
    DP_TRY(dp__save_leaves(writer));
    DP_TRY(dp__save_header_make(writer));
    out->count = writer->header_bytes + (size_t)writer->data_bytes;
    out->bytes = dp_scope_alloc(scope, out->count);
    if (out->bytes == NULL)
        return dp_no_memory();
    return dp__save_image_put(writer, out->bytes);
}

static dp_status dp__save_image_make(dp_ctx *ctx, dp_scope *scope, dp_value value,
                                     dp__save_image *out)
{
    dp__save_writer writer = {.ctx = ctx, .value = value};
    writer.temp = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(writer.temp));
    dp_status status = dp__save_image_fill(&writer, scope, out);
    dp_scope_end(writer.temp);
    return status;
}

DP_API dp_status dp_file_write(dp_ctx *ctx, const char *path, dp_value value)
{
    dp_info info;
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(dp__os_check_path(__func__, path));
    return dp__os_named(__func__, path, dp__save_write(ctx, path, value));
}

/* ==== >>json ====================================================================================
   Strict: what two readers might understand differently is refused. Decoded strings are never
   longer than their JSON, so all of a header fit into as many bytes as it has.                  */

typedef struct dp__save_scan {
    const char *begin, *at, *end;
    const char *what; /* this text is, for sentences */
    char *strings;    /* where the next one goes */
} dp__save_scan;

static dp_status dp__save_scan_begin(dp__save_scan *scan, dp_scope *temp, const char *what,
                                     const char *text, size_t count)
{
    *scan = (dp__save_scan){text, text, text + count, what, dp_scope_alloc(temp, count)};
    return scan->strings != NULL ? DP_OK : dp_no_memory();
}

static dp_status dp__save_bad(const dp__save_scan *scan, const char *why)
{
    return dp_error(DP_ERR_FILE, "%s is damaged: at byte %zu %s", scan->what,
                    (size_t)(scan->at - scan->begin), why);
}

static void dp__save_blanks(dp__save_scan *scan)
{
    while (scan->at < scan->end &&
           (*scan->at == ' ' || *scan->at == '\t' || *scan->at == '\r' || *scan->at == '\n'))
        scan->at++;
}

static bool dp__save_take(dp__save_scan *scan, char c)
{
    dp__save_blanks(scan);
    bool there = scan->at < scan->end && *scan->at == c;
    scan->at += there;
    return there;
}

static dp_status dp__save_expect(dp__save_scan *scan, char c)
{
    char why[] = "there is no '?'";
    why[sizeof why - 3] = c;
    return dp__save_take(scan, c) ? DP_OK : dp__save_bad(scan, why);
}

/* After a member: another one follows, or the end. */
static dp_status dp__save_next(dp__save_scan *scan, char end, bool *out_more)
{
    *out_more = dp__save_take(scan, ',');
    return *out_more ? DP_OK : dp__save_expect(scan, end);
}

static bool dp__save_word(dp__save_scan *scan, const char *word)
{
    size_t count = strlen(word);
    bool there = (size_t)(scan->end - scan->at) >= count && memcmp(scan->at, word, count) == 0;
    scan->at += there ? count : 0;
    return there;
}

static dp_status dp__save_hex(dp__save_scan *scan, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, scan->at++) {
        static const char digits[] = "0123456789abcdef";
        char c = scan->at < scan->end ? *scan->at : '\0';
        const char *digit = c != '\0' ? strchr(digits, c >= 'A' && c <= 'F' ? c + 32 : c) : NULL;
        if (digit == NULL)
            return dp__save_bad(scan, "is not a hexadecimal digit");
        *out = *out << 4 | (uint32_t)(digit - digits);
    }
    return DP_OK;
}

/* \uXXXX, or two of them for what is beyond 16 bits. */
static dp_status dp__save_unicode(dp__save_scan *scan)
{
    uint32_t code = 0, low = 0;
    DP_TRY(dp__save_hex(scan, &code));
    if (code == 0)
        return dp__save_bad(scan, "a string has a zero in it");
    if (code >= 0xD800 && code < 0xDC00) {
        if (dp__save_word(scan, "\\u"))
            DP_TRY(dp__save_hex(scan, &low));
        if (low < 0xDC00 || low > 0xDFFF)
            return dp__save_bad(scan, "a character is half of a pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint32_t marks[] = {0, 0xC0, 0xE0, 0xF0};
    *scan->strings++ = (char)(marks[more] | code >> (6 * more));
    while (more-- > 0)
        *scan->strings++ = (char)(0x80 | (code >> (6 * more) & 0x3F));
    return DP_OK;
}

static dp_status dp__save_escape(dp__save_scan *scan)
{
    static const char letters[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    char c = scan->at < scan->end ? *scan->at : '\0';
    const char *letter = c != '\0' ? strchr(letters, c) : NULL;
    if (c == 'u') {
        scan->at++;
        return dp__save_unicode(scan);
    }
    if (letter == NULL)
        return dp__save_bad(scan, "is not an escape of JSON");
    scan->at++;
    *scan->strings++ = means[letter - letters];
    return DP_OK;
}

static dp_status dp__save_string(dp__save_scan *scan, const char **out)
{
    DP_TRY(dp__save_expect(scan, '"'));
    *out = scan->strings;
    while (scan->at < scan->end && *scan->at != '"') {
        if ((unsigned char)*scan->at < ' ')
            return dp__save_bad(scan, "a string has a control character");
        char c = *scan->at++;
        if (c == '\\')
            DP_TRY(dp__save_escape(scan));
        else
            *scan->strings++ = c;
    }
    if (scan->at == scan->end)
        return dp__save_bad(scan, "a string does not end");
    scan->at++;
    *scan->strings++ = '\0';
    return dp_is_utf8(*out) ? DP_OK : dp__save_bad(scan, "a string is not UTF-8");
}

/* Digits; what follows is for the caller to judge. */
static dp_status dp__save_whole(dp__save_scan *scan, uint64_t *out)
{
    bool fits = true;
    dp__save_blanks(scan);
    const char *first = scan->at;
    for (*out = 0; scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9'; scan->at++) {
        uint64_t digit = (uint64_t)(*scan->at - '0');
        fits = fits && *out <= (INT64_MAX - digit) / 10;
        *out = *out * 10 + digit;
    }
    bool whole = scan->at > first && (*first != '0' || scan->at - first == 1);
    if (whole && fits)
        return DP_OK;
    scan->at = first;
    return dp__save_bad(scan, whole ? "a number is too large" : "is not a whole number");
}

static bool dp__save_digits(dp__save_scan *scan)
{
    const char *first = scan->at;
    while (scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9')
        scan->at++;
    return scan->at > first;
}

/* Passes over a number, of any size. */
static dp_status dp__save_skip_number(dp__save_scan *scan)
{
    (void)dp__save_word(scan, "-");
    bool good = dp__save_word(scan, "0") || dp__save_digits(scan);
    if (good && dp__save_word(scan, "."))
        good = dp__save_digits(scan);
    if (good && (dp__save_word(scan, "e") || dp__save_word(scan, "E"))) {
        (void)(dp__save_word(scan, "+") || dp__save_word(scan, "-"));
        good = dp__save_digits(scan);
    }
    return good ? DP_OK : dp__save_bad(scan, "is not a value");
}

static dp_status dp__save_skip(dp__save_scan *scan, int depth);

/* Passes over all behind a bracket: names and values, or values. */
static dp_status dp__save_skip_members(dp__save_scan *scan, char end, int depth)
{
    const char *key;
    if (depth == DP_MAX_DEPTH)
        return dp__save_bad(scan, "it is too deep");
    for (bool more = !dp__save_take(scan, end); more;) {
        if (end == '}') {
            DP_TRY(dp__save_string(scan, &key));
            DP_TRY(dp__save_expect(scan, ':'));
        }
        DP_TRY(dp__save_skip(scan, depth + 1));
        DP_TRY(dp__save_next(scan, end, &more));
    }
    return DP_OK;
}

/* Passes over a value of which nobody wants to know anything but where it ends. */
static dp_status dp__save_skip(dp__save_scan *scan, int depth)
{
    const char *text;
    if (dp__save_take(scan, '{'))
        return dp__save_skip_members(scan, '}', depth);
    if (dp__save_take(scan, '['))
        return dp__save_skip_members(scan, ']', depth);
    if (scan->at < scan->end && *scan->at == '"')
        return dp__save_string(scan, &text);
    if (dp__save_word(scan, "null") || dp__save_word(scan, "true") || dp__save_word(scan, "false"))
        return DP_OK;
    return dp__save_skip_number(scan);
}

/* ==== >>entries =================================================================================
   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}                     */

typedef struct dp__save_entry {
    const char *name;
    uint64_t first, end;
    int64_t shape[DP_MAX_DIMS];
    dp_dtype dtype;
    int ndim;
    bool used; /* by the tree */
    dp_value value;
} dp__save_entry;

typedef struct dp__save_reader {
    dp_scope *scope, *temp; /* for what is read; while it is read */
    const char *data;       /* of the tensors */
    uint64_t data_bytes;
    dp__save_entry *entries, **sorted; /* by place at first, then by name */
    size_t entry_count, entry_room;
    dp_pair *notes; /* what else __metadata__ says */
    size_t note_count, note_room;
    bool has_notes;
    const char *tree; /* NULL: there is none */
} dp__save_reader;

/* Room for one more; NULL when there is no memory. */
static void *dp__save_grow(dp_scope *temp, void *old, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return old;
    *room = *room > 0 ? *room * 2 : 16;
    void *grown = dp_scope_alloc(temp, *room * size);
    if (grown != NULL && count > 0)
        memcpy(grown, old, count * size);
    return grown;
}

static dp_status dp__save_entry_dtype(dp__save_scan *scan, dp__save_entry *entry)
{
    const char *name;
    DP_TRY(dp__save_string(scan, &name));
    for (int i = 0; i < DP_DTYPE_COUNT; i++)
        if (strcmp(name, dp__save_dtypes[i]) == 0) {
            entry->dtype = (dp_dtype)i;
            return DP_OK;
        }
    return dp_error(DP_ERR_UNSUPPORTED, "'%s' has the dtype %s, which dp.h does not have",
                    dp__save_show(entry->name).text, dp__save_show(name).text);
}

static dp_status dp__save_entry_shape(dp__save_scan *scan, dp__save_entry *entry)
{
    uint64_t size;
    DP_TRY(dp__save_expect(scan, '['));
    for (bool more = !dp__save_take(scan, ']'); more; entry->ndim++) {
        if (entry->ndim == DP_MAX_DIMS)
            return dp_error(DP_ERR_UNSUPPORTED, "'%s' has more than %d dims",
                            dp__save_show(entry->name).text, DP_MAX_DIMS);
        DP_TRY(dp__save_whole(scan, &size));
        entry->shape[entry->ndim] = (int64_t)size;
        DP_TRY(dp__save_next(scan, ']', &more));
    }
    return DP_OK;
}

static dp_status dp__save_entry_place(dp__save_scan *scan, dp__save_entry *entry)
{
    DP_TRY(dp__save_expect(scan, '['));
    DP_TRY(dp__save_whole(scan, &entry->first));
    DP_TRY(dp__save_expect(scan, ','));
    DP_TRY(dp__save_whole(scan, &entry->end));
    return dp__save_expect(scan, ']');
}

static dp_status dp__save_entry_parse(dp__save_scan *scan, dp__save_entry *entry)
{
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    static dp_status (*const parse[])(dp__save_scan *, dp__save_entry *) = {
        dp__save_entry_dtype, dp__save_entry_shape, dp__save_entry_place};
    enum { FIELDS = sizeof fields / sizeof fields[0] };
    bool seen[FIELDS + 1] = {false}; /* the last: any other */
    DP_TRY(dp__save_expect(scan, '{'));
    for (bool more = !dp__save_take(scan, '}'); more;) {
        const char *key;
        size_t field = 0;
        DP_TRY(dp__save_string(scan, &key));
        while (field < FIELDS && strcmp(key, fields[field]) != 0)
            field++;
        if (field < FIELDS && seen[field])
            return dp_error(DP_ERR_FILE, "'%s' has twice the field '%s'",
                            dp__save_show(entry->name).text, key);
        DP_TRY(dp__save_expect(scan, ':'));
        if (field < FIELDS)
            DP_TRY(parse[field](scan, entry));
        else
            DP_TRY(dp__save_skip(scan, 1));
        seen[field] = true;
        DP_TRY(dp__save_next(scan, '}', &more));
    }
    for (size_t field = 0; field < FIELDS; field++)
        if (!seen[field])
            return dp_error(DP_ERR_FILE, "'%s' has no %s", dp__save_show(entry->name).text,
                            fields[field]);
    return DP_OK;
}

static dp_status dp__save_notes_parse(dp__save_scan *scan, dp__save_reader *reader)
{
    if (reader->has_notes)
        return dp_error(DP_ERR_FILE, "'%s' is there twice", dp__save_notes_name);
    reader->has_notes = true;
    dp__save_blanks(scan);
    if (dp__save_word(scan, "null"))
        return DP_OK;
    DP_TRY(dp__save_expect(scan, '{'));
    for (bool more = !dp__save_take(scan, '}'); more;) {
        const char *key, *text;
        DP_TRY(dp__save_string(scan, &key));
        DP_TRY(dp__save_expect(scan, ':'));
        DP_TRY(dp__save_string(scan, &text));
        reader->notes = dp__save_grow(reader->temp, reader->notes, reader->note_count,
                                      &reader->note_room, sizeof *reader->notes);
        if (reader->notes == NULL)
            return dp_no_memory();
        if (strcmp(key, dp__save_tree_name) != 0)
            reader->notes[reader->note_count++] = (dp_pair){key, dp_string(reader->scope, text)};
        else if (reader->tree == NULL)
            reader->tree = text;
        else
            return dp_error(DP_ERR_FILE, "'%s' is there twice", dp__save_tree_name);
        DP_TRY(dp__save_next(scan, '}', &more));
    }
    return DP_OK;
}

static dp_status dp__save_header_member(dp__save_scan *scan, dp__save_reader *reader)
{
    const char *name;
    DP_TRY(dp__save_string(scan, &name));
    DP_TRY(dp__save_expect(scan, ':'));
    if (strcmp(name, dp__save_notes_name) == 0)
        return dp__save_notes_parse(scan, reader);
    reader->entries = dp__save_grow(reader->temp, reader->entries, reader->entry_count,
                                    &reader->entry_room, sizeof *reader->entries);
    if (reader->entries == NULL)
        return dp_no_memory();
    dp__save_entry *entry = &reader->entries[reader->entry_count++];
    *entry = (dp__save_entry){.name = name};
    return dp__save_entry_parse(scan, entry);
}

static dp_status dp__save_header_parse(dp__save_reader *reader, const char *text, size_t count)
{
    dp__save_scan scan;
    DP_TRY(dp__save_scan_begin(&scan, reader->temp, "the header", text, count));
    if (count == 0 || *text != '{')
        return dp__save_bad(&scan, "there is no '{'");
    scan.at++;
    for (bool more = !dp__save_take(&scan, '}'); more;) {
        DP_TRY(dp__save_header_member(&scan, reader));
        DP_TRY(dp__save_next(&scan, '}', &more));
    }
    dp__save_blanks(&scan);
    return scan.at == scan.end ? DP_OK : dp__save_bad(&scan, "something follows");
}

/* ==== >>places ==================================================================================
   Every byte belongs to one tensor, and every tensor has its bytes.                             */

static int dp__save_place_order(const void *a, const void *b)
{
    const dp__save_entry *const *one = a, *const *two = b;
    int order = ((*one)->first > (*two)->first) - ((*one)->first < (*two)->first);
    return order != 0 ? order : ((*one)->end > (*two)->end) - ((*one)->end < (*two)->end);
}

static int dp__save_name_order(const void *a, const void *b)
{
    const dp__save_entry *const *one = a, *const *two = b;
    return strcmp((*one)->name, (*two)->name);
}

static dp_status dp__save_entry_check(const dp__save_entry *entry, uint64_t data_bytes)
{
    uint64_t count = dp_dtype_bytes(entry->dtype);
    bool empty = false, counts = true;
    for (int d = 0; d < entry->ndim; d++) {
        uint64_t size = entry->shape[d] > 0 ? (uint64_t)entry->shape[d] : 1;
        empty = empty || entry->shape[d] == 0;
        counts = counts && count <= INT64_MAX / 2 / size;
        count *= counts ? size : 1;
    }
    if (!counts && empty)
        return dp_error(DP_ERR_UNSUPPORTED, "'%s' is empty, and has dims that cannot be counted",
                        dp__save_show(entry->name).text);
    if (!counts)
        return dp_error(DP_ERR_FILE, "the shape of '%s' has more elements than there can be",
                        dp__save_show(entry->name).text);
    count = empty ? 0 : count;
    if (entry->end < entry->first)
        return dp_error(DP_ERR_FILE, "'%s' ends at byte %llu, before it begins, at %llu",
                        dp__save_show(entry->name).text, (unsigned long long)entry->end,
                        (unsigned long long)entry->first);
    if (entry->end - entry->first != count)
        return dp_error(DP_ERR_FILE, "'%s' has %llu bytes, its shape and dtype make %llu",
                        dp__save_show(entry->name).text,
                        (unsigned long long)(entry->end - entry->first), (unsigned long long)count);
    if (entry->end > data_bytes)
        return dp_error(DP_ERR_FILE,
                        "'%s' ends at byte %llu of the tensors, of which there are %llu: the file "
                        "was cut short",
                        dp__save_show(entry->name).text, (unsigned long long)entry->end,
                        (unsigned long long)data_bytes);
    return DP_OK;
}

static dp_status dp__save_places_check(const dp__save_reader *reader)
{
    uint64_t at = 0;
    for (size_t i = 0; i < reader->entry_count; i++) {
        const dp__save_entry *entry = reader->sorted[i];
        if (entry->first < at)
            return dp_error(DP_ERR_FILE, "'%s' and '%s' overlap",
                            dp__save_show(reader->sorted[i - 1]->name).text,
                            dp__save_show(entry->name).text);
        if (entry->first > at)
            return dp_error(DP_ERR_FILE, "bytes %llu to %llu, before '%s', belong to no tensor",
                            (unsigned long long)at, (unsigned long long)entry->first,
                            dp__save_show(entry->name).text);
        at = entry->end;
    }
    if (at < reader->data_bytes)
        return dp_error(DP_ERR_FILE, "the last %llu bytes belong to no tensor",
                        (unsigned long long)(reader->data_bytes - at));
    return DP_OK;
}

/* Most files are already in one of the two orders. */
static void dp__save_sort(dp__save_reader *reader, int (*order)(const void *a, const void *b))
{
    dp__save_entry **list = reader->sorted;
    size_t count = reader->entry_count;
    bool sorted = true;
    for (size_t i = 0; i < count; i++) {
        list[i] = &reader->entries[i];
        sorted = sorted && (i == 0 || order(&list[i - 1], &list[i]) <= 0);
    }
    if (!sorted)
        qsort(list, count, sizeof *list, order);
}

/* Leaves them sorted by name. */
static dp_status dp__save_entries_check(dp__save_reader *reader)
{
    size_t count = reader->entry_count;
    reader->sorted = dp_scope_alloc(reader->temp, count * sizeof *reader->sorted);
    if (reader->sorted == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__save_entry_check(&reader->entries[i], reader->data_bytes));
    dp__save_sort(reader, dp__save_place_order);
    DP_TRY(dp__save_places_check(reader));
    dp__save_sort(reader, dp__save_name_order);
    for (size_t i = 1; i < count; i++)
        if (dp__save_name_order(&reader->sorted[i - 1], &reader->sorted[i]) == 0)
            return dp_error(DP_ERR_FILE, "'%s' is there twice",
                            dp__save_show(reader->sorted[i]->name).text);
    return DP_OK;
}

/* What a constructor made; what it refuses is the file's fault. */
static dp_status dp__save_made(dp_value made, dp_value *out)
{
    char text[DP__SAVE_SENTENCE] = "";
    *out = made;
    if (made.kind != DP_ERROR)
        return DP_OK;
    for (size_t i = 0; i < sizeof text - 1 && made.as.s[i] != '\0'; i++)
        text[i] = dp__save_tame(made.as.s[i]);
    return dp_error(made.status == DP_ERR_INVALID ? DP_ERR_FILE : (dp_status)made.status, "%s",
                    text);
}

static dp_status dp__save_check_bools(const dp__save_entry *entry, const char *bytes)
{
    for (uint64_t i = 0; i < entry->end - entry->first; i++)
        if ((bytes[i] & ~1) != 0)
            return dp_error(DP_ERR_FILE, "'%s' is BOOL and has a byte of %d",
                            dp__save_show(entry->name).text, (unsigned char)bytes[i]);
    return DP_OK;
}

static dp_status dp__save_entry_value(dp__save_reader *reader, dp__save_entry *entry)
{
    const char *bytes = reader->data + entry->first;
    if (entry->dtype == DP_BOOL)
        DP_TRY(dp__save_check_bools(entry, bytes));
    dp_tensor tensor = dp_wrap_const(bytes, entry->dtype, entry->ndim, entry->shape);
    if ((uintptr_t)bytes % dp_dtype_bytes(entry->dtype) != 0) {
        DP_TRY(dp_tensor_new(reader->scope, tensor.device, entry->dtype, entry->ndim, entry->shape,
                             &tensor));
        if (entry->end > entry->first)
            memcpy(tensor.data, bytes, (size_t)(entry->end - entry->first));
        tensor.read_only = true;
    }
    return dp__save_made(dp_of(reader->scope, &tensor), &entry->value);
}

/* ==== >>trees ===================================================================================
   JSON in which every string says what it is: "s:" and a string, "t:" and the name of a tensor,
   "tuple" as the first thing in a list that is one.                                             */

typedef struct dp__save_tree {
    dp__save_scan scan;
    dp__save_reader *reader;
} dp__save_tree;

static dp_status dp__save_tree_value(dp__save_tree *tree, int depth, dp_value *out);

static dp_status dp__save_tree_tensor(dp__save_tree *tree, const char *name, dp_value *out)
{
    dp__save_entry wanted = {.name = name}, *key = &wanted;
    const dp__save_reader *reader = tree->reader;
    dp__save_entry **found = bsearch(&key, reader->sorted, reader->entry_count,
                                     sizeof *reader->sorted, dp__save_name_order);
    if (found == NULL || (*found)->used)
        return dp_error(DP_ERR_FILE, "'%s' in %s is %s", dp__save_show(name).text, tree->scan.what,
                        found == NULL ? "no tensor of this file" : "there twice");
    (*found)->used = true;
    *out = (*found)->value;
    return DP_OK;
}

static dp_status dp__save_tree_string(dp__save_tree *tree, dp_value *out)
{
    const char *text;
    DP_TRY(dp__save_string(&tree->scan, &text));
    if (strncmp(text, "t:", 2) == 0)
        return dp__save_tree_tensor(tree, text + 2, out);
    if (strncmp(text, "s:", 2) == 0)
        return dp__save_made(dp_string(tree->reader->scope, text + 2), out);
    return dp__save_bad(&tree->scan, "a string does not say what it is");
}

/* Whether the token is a number. It is read as digits and an exponent: what stands for a point
   depends on the locale. */
static bool dp__save_float(const char *token, dp_value *out)
{
    char digits[96];
    size_t count = 0;
    long behind = 0, exponent = 0;
    bool point = false;
    char *end = NULL;
    for (; *token != '\0' && *token != 'e' && *token != 'E'; token++) {
        if (*token == '.' && point)
            return false;
        if (*token != '.')
            digits[count++] = *token;
        behind += point;
        point = point || *token == '.';
    }
    if (*token != '\0') {
        exponent = strtol(token + 1, &end, 10);
        if (*end != '\0' || end == token + 1 || exponent > 9999 || exponent < -9999)
            return false;
    }
    snprintf(digits + count, sizeof digits - count, "e%ld", exponent - behind);
    *out = dp_float(strtod(digits, &end));
    return *end == '\0';
}

static bool dp__save_int(const char *token, dp_value *out)
{
    char *end = NULL;
    errno = 0;
    *out = dp_int(strtoll(token, &end, 10));
    return errno == 0 && *end == '\0';
}

/* Of at most DP__SAVE_TOKEN bytes. */
static bool dp__save_token(const char *token, dp_value *out)
{
    return strpbrk(token, ".eE") != NULL ? dp__save_float(token, out) : dp__save_int(token, out);
}

enum { DP__SAVE_TOKEN = 63 };
static const char dp__save_in_numbers[] = "0123456789+-.eE";

static dp_status dp__save_number(dp__save_scan *scan, dp_value *out)
{
    char token[DP__SAVE_TOKEN + 1];
    size_t count = 0;
    while (scan->at < scan->end && *scan->at != '\0' && count < DP__SAVE_TOKEN &&
           strchr(dp__save_in_numbers, *scan->at) != NULL)
        token[count++] = *scan->at++;
    token[count] = '\0';
    if (count == 0)
        return dp__save_bad(scan, "is not a value");
    if (dp__save_token(token, out))
        return DP_OK;
    scan->at -= count;
    return dp__save_bad(scan, "a number is malformed, or has more than 64 bits");
}

static dp_status dp__save_tree_items(dp__save_tree *tree, int depth, dp_value *out)
{
    dp__save_scan *scan = &tree->scan;
    dp_value *items = NULL;
    size_t count = 0, room = 0;
    bool more = !dp__save_take(scan, ']');
    dp_kind kind = more && dp__save_word(scan, "\"tuple\"") ? DP_TUPLE : DP_LIST;
    if (kind == DP_TUPLE)
        DP_TRY(dp__save_next(scan, ']', &more));
    while (more) {
        items = dp__save_grow(tree->reader->temp, items, count, &room, sizeof *items);
        if (items == NULL)
            return dp_no_memory();
        DP_TRY(dp__save_tree_value(tree, depth, &items[count++]));
        DP_TRY(dp__save_next(scan, ']', &more));
    }
    return dp__save_made(dp_list_make(tree->reader->scope, kind, items, count), out);
}

/* With room for one more pair. */
static dp_status dp__save_tree_pairs(dp__save_tree *tree, int depth, dp_pair **out, size_t *count)
{
    dp__save_scan *scan = &tree->scan;
    size_t room = 0;
    *out = NULL;
    *count = 0;
    for (bool more = !dp__save_take(scan, '}'); more;) {
        const char *key;
        *out = dp__save_grow(tree->reader->temp, *out, *count, &room, sizeof **out);
        if (*out == NULL)
            return dp_no_memory();
        DP_TRY(dp__save_string(scan, &key));
        DP_TRY(dp__save_expect(scan, ':'));
        dp_pair *pair = *out + (*count)++;
        pair->key = key;
        DP_TRY(dp__save_tree_value(tree, depth, &pair->value));
        DP_TRY(dp__save_next(scan, '}', &more));
    }
    *out = dp__save_grow(tree->reader->temp, *out, *count, &room, sizeof **out);
    return *out != NULL ? DP_OK : dp_no_memory();
}

static dp_status dp__save_tree_value(dp__save_tree *tree, int depth, dp_value *out)
{
    static const char *const words[] = {"null", "true", "false", "NaN", "Infinity", "-Infinity"};
    const dp_value means[] = {dp_none(),          dp_bool(true),
                              dp_bool(false),     dp_float((double)NAN),
                              dp_float(HUGE_VAL), dp_float(-HUGE_VAL)};
    dp_pair *pairs;
    size_t count;
    dp__save_blanks(&tree->scan);
    char first = tree->scan.at < tree->scan.end ? *tree->scan.at : '\0';
    if (depth == DP_MAX_DEPTH && (first == '[' || first == '{'))
        return dp__save_bad(&tree->scan, "it is too deep");
    if (dp__save_take(&tree->scan, '['))
        return dp__save_tree_items(tree, depth + 1, out);
    if (dp__save_take(&tree->scan, '{')) {
        DP_TRY(dp__save_tree_pairs(tree, depth + 1, &pairs, &count));
        return dp__save_made(dp_dict_make(tree->reader->scope, pairs, count), out);
    }
    if (first == '"')
        return dp__save_tree_string(tree, out);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (dp__save_word(&tree->scan, words[i])) {
            *out = means[i];
            return DP_OK;
        }
    return dp__save_number(&tree->scan, out);
}

/* ==== >>reading =================================================================================
   From bytes to a value.                                                                        */

/* The pairs of the whole, with room for the notes. */
static dp_status dp__save_pairs_of_tree(dp__save_reader *reader, dp_pair **out, size_t *count)
{
    dp__save_tree tree = {.reader = reader};
    DP_TRY(dp__save_scan_begin(&tree.scan, reader->temp, "'dp.h' in __metadata__", reader->tree,
                               strlen(reader->tree)));
    DP_TRY(dp__save_expect(&tree.scan, '{'));
    DP_TRY(dp__save_tree_pairs(&tree, 1, out, count));
    dp__save_blanks(&tree.scan);
    if (tree.scan.at < tree.scan.end)
        return dp__save_bad(&tree.scan, "something follows");
    for (size_t i = 0; i < reader->entry_count; i++)
        if (!reader->entries[i].used)
            return dp_error(DP_ERR_FILE, "'%s' has no place in %s",
                            dp__save_show(reader->entries[i].name).text, tree.scan.what);
    return DP_OK;
}

static dp_status dp__save_pairs_of_entries(const dp__save_reader *reader, dp_pair **out,
                                           size_t *count)
{
    *count = reader->entry_count;
    *out = dp_scope_alloc(reader->temp, (*count + 1) * sizeof **out);
    if (*out == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < *count; i++)
        (*out)[i] = (dp_pair){reader->entries[i].name, reader->entries[i].value};
    return DP_OK;
}

static dp_status dp__save_value_of(dp__save_reader *reader, dp_value *out)
{
    dp_pair *pairs;
    size_t count;
    for (size_t i = 0; i < reader->entry_count; i++)
        DP_TRY(dp__save_entry_value(reader, &reader->entries[i]));
    if (reader->tree != NULL)
        DP_TRY(dp__save_pairs_of_tree(reader, &pairs, &count));
    else
        DP_TRY(dp__save_pairs_of_entries(reader, &pairs, &count));
    if (reader->note_count > 0) {
        pairs[count].key = dp__save_notes_name;
        DP_TRY(dp__save_made(dp_dict_make(reader->scope, reader->notes, reader->note_count),
                             &pairs[count++].value));
    }
    return dp__save_made(dp_dict_make(reader->scope, pairs, count), out);
}

/* The whole of a file; `bytes` are there as long as the scope. */
static dp_status dp__save_parse(dp_scope *scope, dp_scope *temp, const char *bytes, size_t count,
                                dp_value *out)
{
    uint64_t length = 0, rest = count - sizeof length;
    dp__save_reader reader = {.scope = scope, .temp = temp};
    if (count < sizeof length)
        return dp_error(DP_ERR_FILE, "%zu bytes are not a safetensors file", count);
    memcpy(&length, bytes, sizeof length);
    if (length > DP__SAVE_HEADER_MOST)
        return dp_error(DP_ERR_FILE,
                        "a header of %llu bytes, the limit is %d: not a safetensors file",
                        (unsigned long long)length, DP__SAVE_HEADER_MOST);
    if (length > rest)
        return dp_error(DP_ERR_FILE,
                        "the header has %llu bytes, the file only %llu more: it was "
                        "cut short",
                        (unsigned long long)length, (unsigned long long)rest);
    reader.data = bytes + sizeof length + length;
    reader.data_bytes = rest - length;
    DP_TRY(dp__save_header_parse(&reader, bytes + sizeof length, (size_t)length));
    DP_TRY(dp__save_entries_check(&reader));
    return dp__save_value_of(&reader, out);
}

/* Tells files of different steps of training apart: from their size, their header, words of 8 bytes
   from all over the rest, and its last bytes. */
static uint64_t dp__save_mark(const char *bytes, size_t count)
{
    enum { SAMPLES = 4096 };
    uint64_t length = 0, word = 0;
    memcpy(&length, bytes, sizeof length);
    size_t first = sizeof length + (size_t)length, words = (count - first) / sizeof word;
    uint64_t mark = dp__hash(dp__hash_first ^ count, bytes, first);
    for (size_t i = 0, step = words / SAMPLES + 1; i < words; i += step) {
        memcpy(&word, bytes + first + i * sizeof word, sizeof word);
        mark = (mark ^ word) * 0x100000001B3U;
        mark ^= mark >> 32;
    }
    size_t rest = first + words * sizeof word;
    return dp__hash(mark, bytes + rest, count - rest);
}

/* `own` ends the mapping. The values lie in a child scope, which ends first, and waits for devices
   that still read. */
static dp_status dp__save_read_in(dp_ctx *ctx, dp_scope *own, const char *path, dp_value *out,
                                  uint64_t *out_mark)
{
    dp__os_map map;
    dp_scope *inner = dp_scope_child(own);
    DP_TRY(dp_scope_check(inner));
    dp_scope *temp = dp_scope_begin(ctx);
    dp_status status = dp_scope_check(temp);
    if (status == DP_OK)
        status = dp__os_map_open(ctx, own, path, &map);
    if (status == DP_OK)
        status = dp__save_parse(inner, temp, map.bytes, map.count, out);
    if (status == DP_OK && out_mark != NULL)
        *out_mark = dp__save_mark(map.bytes, map.count);
    dp_scope_end(temp);
    return status;
}

static dp_status dp__save_check_read(const char *fn, dp_ctx *ctx, const dp_scope *scope,
                                     const char *path, const dp_value *out)
{
    dp_info info;
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(dp__os_check_path(fn, path));
    DP_TRY(dp_check_scope(fn, scope, ctx));
    return dp_check_pointer(fn, "out", out);
}

DP_API dp_status dp_file_read(dp_ctx *ctx, dp_scope *scope, const char *path, dp_value *out)
{
    dp_value value;
    DP_TRY(dp__save_check_read(__func__, ctx, scope, path, out));
    dp_scope *own = dp_scope_child(scope);
    dp_status status = dp__save_read_in(ctx, own, path, &value, NULL);
    if (status == DP_OK)
        *out = value;
    else
        dp_scope_end(own);
    return dp__os_named(__func__, path, status);
}

/* ==== >>loading =================================================================================
   All is checked, and all memory is there, before the first parameter changes.                  */

enum { DP__SAVE_SOME = 3 }; /* names in a sentence */

typedef struct dp__save_some { /* of many: how many, and the first */
    size_t count;
    const char *names[DP__SAVE_SOME];
} dp__save_some;

typedef struct dp__save_span { /* of memory: from the first to the last element */
    uintptr_t first, end;
} dp__save_span;

typedef struct dp__save_loader {
    dp_ctx *ctx;
    dp_module *module;
    dp_scope *temp;
    dp_module_load_config config;
    size_t count;
    dp_tensor *own, *from; /* of each parameter: what it is, and what it gets */
    bool *named, *given;   /* there is an entry; and it fits, and is in `from` */
    dp__save_span *spans;  /* where all owners' parameters lie, in the order of memory */
    size_t span_count;
    dp__save_some missing, unknown, other;
    char differs[160]; /* the first of the other ones */
} dp__save_loader;

static void dp__save_also(dp__save_some *some, const char *name)
{
    if (some->count < DP__SAVE_SOME)
        some->names[some->count] = name;
    some->count++;
}

/* "f32[2,3]" */
static dp__save_shown dp__save_form(const dp_tensor *tensor)
{
    dp__save_shown out;
    size_t at = 0, room = sizeof out.text;
    int wrote = snprintf(out.text, room, "%s[", dp_dtype_name((dp_dtype)tensor->dtype));
    at += (size_t)wrote;
    for (int d = 0; d < tensor->ndim && at < room; d++)
        at += (size_t)snprintf(out.text + at, room - at, "%s%lld", d > 0 ? "," : "",
                               (long long)tensor->shape[d]);
    if (at < room)
        snprintf(out.text + at, room - at, "]");
    return out;
}

static bool dp__save_fits(const dp__save_loader *loader, const dp_tensor *to, const dp_tensor *from)
{
    bool floats = to->dtype <= DP_BF16 && from->dtype <= DP_BF16;
    return dp_same_shape(to, from) && (to->dtype == from->dtype || (loader->config.cast && floats));
}

/* As the parameter would have them. */
static dp_status dp__save_numbers(const dp__save_loader *loader, dp_scope *temp, dp_dtype dtype,
                                  dp_tensor tensor, void **out)
{
    if (tensor.dtype != dtype)
        DP_TRY(dp_tensor_to(temp, (dp_device){0, 0}, dtype, &tensor, &tensor));
    size_t bytes = (size_t)dp__save_bytes_of(&tensor);
    *out = dp_scope_alloc(temp, bytes);
    return *out != NULL ? dp_read(loader->ctx, &tensor, *out, bytes) : dp_no_memory();
}

/* Two names of one memory. */
static dp_status dp__save_check_equal(const dp__save_loader *loader, const dp_tensor *to,
                                      const dp_tensor *a, const dp_tensor *b, const char *name)
{
    void *one = NULL, *two = NULL;
    dp_scope *temp = dp_scope_child(loader->temp);
    dp_status status = dp_scope_check(temp);
    if (status == DP_OK)
        status = dp__save_numbers(loader, temp, (dp_dtype)to->dtype, *a, &one);
    if (status == DP_OK)
        status = dp__save_numbers(loader, temp, (dp_dtype)to->dtype, *b, &two);
    if (status == DP_OK && memcmp(one, two, (size_t)dp__save_bytes_of(to)) != 0)
        status = dp_error(DP_ERR_MISMATCH,
                          "'%s' and another name of the same parameter have different numbers",
                          dp__save_show(name).text);
    dp_scope_end(temp);
    return status;
}

static dp_status dp__save_take_entry(dp__save_loader *loader, const char *name, dp_value value)
{
    size_t param = 0;
    if (dp_module_find(loader->module, name, &param) != DP_OK) {
        dp__save_also(&loader->unknown, name);
        return DP_OK;
    }
    const dp_tensor *own = &loader->own[param];
    loader->named[param] = true;
    if (value.kind != DP_TENSOR || !dp__save_fits(loader, own, value.as.t)) {
        if (loader->other.count == 0)
            snprintf(loader->differs, sizeof loader->differs, "%s, and not %s",
                     dp__save_form(own).text,
                     value.kind == DP_TENSOR ? dp__save_form(value.as.t).text : "a tensor here");
        dp__save_also(&loader->other, name);
        return DP_OK;
    }
    if (loader->given[param])
        return dp__save_check_equal(loader, own, value.as.t, &loader->from[param], name);
    loader->from[param] = *value.as.t;
    loader->given[param] = true;
    return DP_OK;
}

static dp_status dp__save_take_entries(dp__save_loader *loader, dp_value saved)
{
    const char *prefix = loader->config.prefix != NULL ? loader->config.prefix : "";
    for (size_t i = 0; i < dp_count(saved); i++) {
        const char *key = dp_key_at(saved, i);
        bool counts = strncmp(key, prefix, strlen(prefix)) == 0;
        if (counts && strcmp(key, dp__save_notes_name) != 0)
            DP_TRY(dp__save_take_entry(loader, key + strlen(prefix), dp_at(saved, i)));
    }
    for (size_t i = 0; i < loader->count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(loader->module, i, &info));
        if (!loader->named[i])
            dp__save_also(&loader->missing, info.name);
    }
    return DP_OK;
}

static void dp__save_say(char *text, size_t room, const char *format, ...) DP_PRINTF(3, 4);
static void dp__save_say(char *text, size_t room, const char *format, ...)
{
    size_t at = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + at, room - at, format, args);
    va_end(args);
}

static void dp__save_say_some(char *text, size_t room, const dp__save_some *some, const char *what)
{
    if (some->count == 0)
        return;
    dp__save_say(text, room, "%s%zu %s (", text[0] != '\0' ? "; " : "", some->count, what);
    for (size_t i = 0; i < some->count && i < DP__SAVE_SOME; i++)
        dp__save_say(text, room, "%s'%s'", i > 0 ? ", " : "", dp__save_show(some->names[i]).text);
    dp__save_say(text, room, "%s)", some->count > DP__SAVE_SOME ? ", ..." : "");
}

static dp_status dp__save_verdict(const dp__save_loader *loader)
{
    char text[480] = "";
    if (!loader->config.allow_missing)
        dp__save_say_some(text, sizeof text, &loader->missing, "missing");
    if (!loader->config.allow_unknown)
        dp__save_say_some(text, sizeof text, &loader->unknown, "unknown");
    dp__save_say_some(text, sizeof text, &loader->other, "different");
    if (loader->other.count > 0)
        dp__save_say(text, sizeof text, ": '%s' is %s", dp__save_show(loader->other.names[0]).text,
                     loader->differs);
    if (text[0] == '\0')
        return DP_OK;
    return dp_error(DP_ERR_MISMATCH, "of the %zu parameters of '%s': %s", loader->count,
                    dp_module_name(loader->module), text);
}

/* Of one shape and dtype: whether they have the same elements. */
static bool dp__save_is_same(const dp_tensor *a, const dp_tensor *b)
{
    return a->data == b->data && memcmp(a->stride, b->stride, a->ndim * sizeof *a->stride) == 0;
}

/* Of one that has elements. */
static dp__save_span dp__save_span_of(const dp_tensor *tensor)
{
    uintptr_t first = (uintptr_t)tensor->data;
    int64_t last = 0;
    for (int d = 0; d < tensor->ndim; d++)
        last += (tensor->shape[d] - 1) * tensor->stride[d];
    return (dp__save_span){first,
                           first + (size_t)(last + 1) * dp_dtype_bytes((dp_dtype)tensor->dtype)};
}

static int dp__save_span_order(const void *a, const void *b)
{
    const dp__save_span *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Returns true if the numbers for a parameter would have changed before it gets them: they lie in
   the memory of an owner, and are not those that the first owner, which is written first, has
   there. */
static bool dp__save_is_written(const dp__save_loader *loader, size_t param)
{
    const dp_tensor *from = &loader->from[param];
    if (dp_tensor_count(from) == 0 || dp__save_is_same(from, &loader->own[param]))
        return false;
    dp__save_span span = dp__save_span_of(from);
    size_t low = 0, high = loader->span_count; /* to find the last one that begins before its end */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (loader->spans[mid].first < span.end)
            low = mid + 1;
        else
            high = mid;
    }
    return low > 0 && loader->spans[low - 1].end > span.first;
}

/* What cannot be put where it goes as it is becomes a copy; of another dtype, on the host. */
static dp_status dp__save_ready(dp__save_loader *loader)
{
    for (size_t i = 0; i < loader->count; i++) {
        dp_tensor *from = &loader->from[i];
        dp_dtype dtype = (dp_dtype)loader->own[i].dtype;
        bool cast = loader->given[i] && from->dtype != dtype;
        if (cast || (loader->given[i] && dp__save_is_written(loader, i)))
            DP_TRY(dp_tensor_to(loader->temp, cast ? (dp_device){0, 0} : from->device, dtype, from,
                                from));
    }
    return DP_OK;
}

/* A saved tensor may be the parameter itself. */
static dp_status dp__save_put_all(const dp__save_loader *loader)
{
    for (size_t owner = 0; owner < dp_owner_count(loader->module); owner++)
        for (size_t i = 0; i < loader->count; i++) {
            dp_tensor data;
            if (!loader->given[i])
                continue;
            DP_TRY(dp_owner_edit(loader->module, owner, i, &data, NULL));
            if (!dp__save_is_same(&data, &loader->from[i]))
                DP_TRY(dp_copy(loader->ctx, &data, &loader->from[i], NULL));
        }
    return dp_wait(loader->ctx); /* the saved value may end now */
}

static dp_status dp__save_spans_make(dp__save_loader *loader)
{
    size_t owners = dp_owner_count(loader->module);
    loader->spans = dp_scope_alloc(loader->temp, owners * loader->count * sizeof *loader->spans);
    if (loader->spans == NULL)
        return dp_no_memory();
    for (size_t owner = 0; owner < owners; owner++)
        for (size_t i = 0; i < loader->count; i++) {
            dp_tensor data;
            DP_TRY(dp_owner_param(loader->module, owner, i, &data));
            if (dp_tensor_count(&data) > 0)
                loader->spans[loader->span_count++] = dp__save_span_of(&data);
        }
    qsort(loader->spans, loader->span_count, sizeof *loader->spans, dp__save_span_order);
    for (size_t i = 1; i < loader->span_count; i++) /* who lies in another one ends where it does */
        if (loader->spans[i].end < loader->spans[i - 1].end)
            loader->spans[i].end = loader->spans[i - 1].end;
    return DP_OK;
}

static dp_status dp__save_room(dp__save_loader *loader)
{
    size_t count = loader->count = dp_module_param_count(loader->module);
    loader->own = dp_scope_alloc(loader->temp, count * sizeof *loader->own);
    loader->from = dp_scope_alloc(loader->temp, count * sizeof *loader->from);
    loader->named = dp_scope_alloc(loader->temp, count * sizeof *loader->named);
    loader->given = dp_scope_alloc(loader->temp, count * sizeof *loader->given);
    if (loader->own == NULL || loader->from == NULL || loader->named == NULL ||
        loader->given == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(loader->module, i, &info));
        loader->own[i] = info.data;
        loader->named[i] = loader->given[i] = false;
    }
    return dp__save_spans_make(loader);
}

static dp_status dp__save_load(dp__save_loader *loader, dp_value saved)
{
    DP_TRY(dp__save_room(loader));
    DP_TRY(dp__save_take_entries(loader, saved));
    DP_TRY(dp__save_verdict(loader));
    return dp__save_ready(loader);
}

/* Where processes share the parameters they all write the same; `status`: whether this one can. */
static dp_status dp__save_put_in(const dp__save_loader *loader, dp_status status)
{
    if (loader->config.check_only)
        return status;
    DP_TRY(dp_edit_begin(loader->module, status));
    return dp_edit_end(loader->module, dp__save_put_all(loader));
}

static dp_status dp__save_check_module(const char *fn, const dp_module *module)
{
    if (dp_module_ctx(module) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", fn);
    return DP_OK;
}

static dp_status dp__save_check_saved(dp_value saved)
{
    dp_value probe = dp_get(saved, "");
    if (probe.kind == DP_ERROR)
        return dp_error((dp_status)probe.status, "%s", probe.as.s);
    return saved.kind == DP_DICT ? DP_OK
                                 : dp_error(DP_ERR_INVALID, "the saved value is not a dict");
}

DP_API dp_status dp_module_load(dp_module *module, dp_value saved,
                                const dp_module_load_config *config)
{
    DP_TRY(dp__save_check_module(__func__, module));
    char before[DP__SAVE_SENTENCE];
    dp__save_loader loader = {.ctx = dp_module_ctx(module), .module = module};
    if (config != NULL)
        loader.config = *config;
    dp_status status = dp__save_check_saved(saved);
    snprintf(before, sizeof before, "%s", dp_last_error());
    if (status == DP_OK) {
        loader.temp = dp_scope_begin(loader.ctx);
        status = dp_scope_check(loader.temp);
    }
    if (status == DP_OK)
        status = dp__save_load(&loader, saved);
    status = dp__save_put_in(&loader, status);
    dp_scope_end(loader.temp);
    if (status == DP_OK) /* which leaves sentences alone; that of a name unknown is not one */
        return dp_error(DP_OK, "%s", before);
    return dp_error_in(__func__, status);
}

static dp_status dp__save_module(dp_module *module, dp_scope *scope, dp_value *out)
{
    size_t count = dp_module_param_count(module);
    dp_pair *pairs = dp_scope_alloc(scope, count * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(module, i, &info));
        pairs[i] = (dp_pair){info.name, dp_of(scope, &info.data)};
    }
    return dp__save_made(dp_dict_make(scope, pairs, count), out);
}

DP_API dp_status dp_module_save(dp_module *module, dp_scope *scope, dp_value *out)
{
    dp_value made;
    DP_TRY(dp__save_check_module(__func__, module));
    DP_TRY(dp_check_scope(__func__, scope, dp_module_ctx(module)));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp_error_in(__func__, dp__save_module(module, scope, &made)));
    *out = made;
    return DP_OK;
}

/* ==== >>agreement ===============================================================================
   Processes tell each other how it went.                                                        */

static dp_status dp__save_goes_on(void *ctx)
{
    int64_t status = DP_PENDING;
    return dp_broadcast_i64(ctx, &status, 1, 0);
}

/* How it went on process 0; the others hear from it until it has ended, and answer only then. So
   process 0, when it has their answers, knows that no one had left it behind when it asked. */
static dp_status dp__save_hear(dp_ctx *ctx, dp_status status)
{
    int64_t other;
    if (dp_status_class(status) == DP_CLASS_JOB)
        return status;
    do {
        other = status;
        DP_TRY(dp_broadcast_i64(ctx, &other, 1, 0));
    } while (other == DP_PENDING);
    return dp_agree(ctx, status);
}

/* Process 0 asks when it has locked the part. A job that goes on without it has to lock that, too,
   and so cannot have written the file that this one then replaces. */
static dp_status dp__save_write_in_job(dp_ctx *ctx, const char *path, dp_value value)
{
    bool writes = dp_rank(ctx) == 0;
    dp__save_writer writer = {.ctx = ctx, .value = value, .beat = dp__save_goes_on, .user = ctx};
    dp_status heard = dp__save_hear(ctx, writes ? dp__save_write_begin(&writer, path) : DP_OK);
    dp_status status = writes ? dp__save_write_end(&writer, heard) : heard;
    return heard == DP_OK ? dp_agree(ctx, status) : heard;
}

DP_API dp_status dp_checkpoint_save(dp_ctx *ctx, const char *path, dp_value value)
{
    dp_info info;
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(dp__os_check_path(__func__, path));
    dp_trace_begin(__func__);
    dp_status status = info.process_count == 1 ? dp__save_write(ctx, path, value)
                                               : dp__save_write_in_job(ctx, path, value);
    dp_trace_end();
    return dp__os_named(__func__, path, status);
}

/* Each process has read by itself. If only some have a file, all fail, rather than begin anew. */
static dp_status dp__save_found(dp_ctx *ctx, uint64_t mark, dp_status status)
{
    enum { HAVE_IT, CANNOT_READ, MARK_OF_0, FIELDS };
    bool lacks = status == DP_ERR_NO_FILE;
    int64_t own = status == DP_OK ? (int64_t)(mark >> 1) : -1;
    int64_t all[FIELDS] = {status == DP_OK, status != DP_OK && !lacks,
                           dp_rank(ctx) == 0 ? own : -1};
    DP_TRY(dp_all_reduce_i64(ctx, all, FIELDS, DP_OP_MAX));
    if (lacks && all[CANNOT_READ] != 0)
        status = DP_OK; /* the sentence is that of a process which cannot read it */
    else if (lacks && all[HAVE_IT] != 0)
        status = dp_error(DP_ERR_MISMATCH, "%s; others have it", dp_last_error());
    else if (status == DP_OK && all[MARK_OF_0] >= 0 && own != all[MARK_OF_0])
        status = dp_error(DP_ERR_MISMATCH, "this is another file than rank 0 has");
    return dp_agree(ctx, status);
}

DP_API dp_status dp_checkpoint_load(dp_ctx *ctx, dp_scope *scope, const char *path, dp_value *out)
{
    dp_info info;
    dp_value value;
    uint64_t mark = 0;
    DP_TRY(dp__save_check_read(__func__, ctx, scope, path, out));
    DP_TRY(dp_info_get(ctx, &info));
    dp_scope *own = dp_scope_child(scope);
    dp_trace_begin(__func__);
    bool alone = info.process_count == 1;
    dp_status status = dp__save_read_in(ctx, own, path, &value, alone ? NULL : &mark);
    if (!alone)
        status = dp__save_found(ctx, mark, status);
    dp_trace_end();
    if (status == DP_OK)
        *out = value;
    else
        dp_scope_end(own);
    return dp__os_named(__func__, path, status);
}

/* ==== >>sharing =================================================================================
   One process' value becomes that of all, through memory of the devices.                       */

enum { DP__SAVE_SHARED = 4 << 20 }; /* at once */

typedef struct dp__save_sharing {
    dp_ctx *ctx;
    dp_scope *scope, *temp;
    dp_info info;
    int64_t progress, root; /* root: the rank that gives; -1: all have the same */
    dp__save_image image;
    dp_tensor *pieces; /* of each local rank */
    dp_part *parts;
} dp__save_sharing;

/* Who is furthest. */
static dp_status dp__save_furthest(dp__save_sharing *own)
{
    int64_t far[2] = {own->progress, -own->progress};
    DP_TRY(dp_all_reduce_i64(own->ctx, far, 2, DP_OP_MAX));
    if (far[0] < 0)
        return dp_error(DP_ERR_INVALID, "no process has a value: progress is -1 in all");
    own->root = own->progress == far[0] ? own->info.rank_first : INT64_MAX;
    DP_TRY(dp_all_reduce_i64(own->ctx, &own->root, 1, DP_OP_MIN));
    if (far[0] == -far[1])
        own->root = -1;
    return DP_OK;
}

static dp_status dp__save_pieces_make(dp__save_sharing *own)
{
    size_t count = (size_t)own->info.local_count;
    own->pieces = dp_scope_alloc(own->temp, count * sizeof *own->pieces);
    own->parts = dp_scope_alloc(own->temp, count * sizeof *own->parts);
    if (own->pieces == NULL || own->parts == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++) {
        DP_TRY(dp_tensor_new(own->temp, dp_local_device(own->ctx, (int)i), DP_U8,
                             DP_SHAPE(DP__SAVE_SHARED), &own->pieces[i]));
        own->parts[i] = (dp_part){own->pieces[i].data, own->pieces[i].data, NULL};
    }
    return DP_OK;
}

static dp_status dp__save_piece_share(const dp__save_sharing *own, char *at, size_t bytes)
{
    dp_tensor here = dp_wrap(at, DP_U8, DP_SHAPE((int64_t)bytes)), there = own->pieces[0];
    there.shape[0] = (int64_t)bytes;
    if (own->root == own->info.rank_first)
        DP_TRY(dp_copy(own->ctx, &there, &here, NULL));
    DP_TRY(dp_broadcast(own->ctx, own->parts, bytes, DP_U8, (int)own->root));
    return dp_read(own->ctx, &there, at, bytes);
}

/* A process that is as far gets what it has. */
static dp_status dp__save_image_share(dp__save_sharing *own)
{
    int64_t count = (int64_t)own->image.count;
    dp_status status = DP_OK;
    DP_TRY(dp_broadcast_i64(own->ctx, &count, 1, (int)own->root));
    if (own->root != own->info.rank_first) {
        own->image.count = (size_t)count;
        own->image.bytes = dp_scope_alloc(own->scope, own->image.count);
        status = own->image.bytes != NULL ? DP_OK : dp_no_memory();
    }
    if (status == DP_OK)
        status = dp__save_pieces_make(own);
    DP_TRY(dp_agree(own->ctx, status));
    for (size_t at = 0, bytes; at < own->image.count; at += bytes) {
        bytes = own->image.count - at < DP__SAVE_SHARED ? own->image.count - at : DP__SAVE_SHARED;
        DP_TRY(dp__save_piece_share(own, own->image.bytes + at, bytes));
    }
    return DP_OK;
}

static dp_status dp__save_share(dp__save_sharing *own, dp_value value, dp_value *out)
{
    dp_status status = dp_scope_check(own->scope);
    if (status == DP_OK)
        status = dp_scope_check(own->temp);
    DP_TRY(dp_agree(own->ctx, status));
    DP_TRY(dp__save_furthest(own));
    if (own->root < 0 || own->root == own->info.rank_first)
        status = dp__save_image_make(own->ctx, own->scope, value, &own->image);
    DP_TRY(dp_agree(own->ctx, status));
    if (own->root >= 0)
        DP_TRY(dp__save_image_share(own));
    status = dp__save_parse(own->scope, own->temp, own->image.bytes, own->image.count, out);
    return dp_agree(own->ctx, status);
}

DP_API dp_status dp_checkpoint_share(dp_ctx *ctx, dp_scope *scope, int64_t progress, dp_value value,
                                     dp_value *out)
{
    dp__save_sharing own = {.ctx = ctx, .progress = progress};
    DP_TRY(dp_info_get(ctx, &own.info));
    DP_TRY(dp_check_scope(__func__, scope, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (progress < -1)
        return dp_error(DP_ERR_INVALID, "%s: progress is %lld", __func__, (long long)progress);
    own.scope = dp_scope_child(scope);
    own.temp = dp_scope_begin(ctx);
    dp_trace_begin(__func__);
    dp_value shared = dp_none();
    dp_status status = dp__save_share(&own, value, &shared);
    dp_trace_end();
    dp_scope_end(own.temp);
    if (status == DP_OK)
        *out = shared;
    else
        dp_scope_end(own.scope);
    return dp_error_in(__func__, status);
}

/* ==== >>names ===================================================================================
   A file of a saver is HEAD number TAIL, or HEAD number-ENTRY=score TAIL. What a saver would not
   call so is none.                                                                              */

enum { DP__SAVER_NAME = 256, DP__SAVER_DIGITS = 18, DP__SAVER_SCORE = 32 };

typedef struct dp__saver_file {
    char name[DP__SAVER_NAME];
    int64_t number;
    bool scored, others; /* by an entry that is not this saver's */
    double score;
} dp__saver_file;

struct dp_saver {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_saver_config config;           /* with copies of its strings */
    const char *folder, *head, *tail; /* the path around its *; without one, tail is NULL */
    char *path;                       /* room for the folder and a name */
    dp_info info;                     /* as it was at the last call */
    bool writes;                      /* this is process 0, which alone has the rest */
    int64_t newest;                   /* number that was saved, or is kept; -1: none */
    dp_scope *copied;                 /* has the image of a file */
    dp__save_image image;
    size_t image_room;
    dp_scope *temp, *guard; /* of the save in progress; the end of the guard waits for the thread */
    dp__save_writer writer;
    dp__saver_file last; /* the newest of the other files when that save began */
    dp__thread thread;
    bool running;      /* the thread, or it was not waited for */
    dp__gate news;     /* for who waits for it: it has written for a while, or has ended */
    atomic_bool ended; /* all but its last instructions */
    dp_status status;  /* what the next call returns */
    char text[DP__SAVE_SENTENCE];
};

/* "-ENTRY=score" */
static bool dp__saver_scored(const dp_saver *saver, char *text, dp__saver_file *file)
{
    dp_value score;
    char *equals = strrchr(text, '=');
    size_t count = equals != NULL ? strlen(equals + 1) : 0;
    if (*text != '-' || count == 0 || count > DP__SAVE_TOKEN ||
        strspn(equals + 1, dp__save_in_numbers) != count || !dp__save_token(equals + 1, &score))
        return false;
    *equals = '\0';
    file->scored = true;
    file->others = saver->config.best_by == NULL || strcmp(text + 1, saver->config.best_by) != 0;
    file->score = score.kind == DP_INT ? (double)score.as.i : score.as.f;
    return true;
}

static bool dp__saver_file_of(const dp_saver *saver, const char *name, dp__saver_file *out)
{
    char middle[DP__SAVER_NAME];
    size_t head = strlen(saver->head), tail = strlen(saver->tail), count = strlen(name);
    if (count >= sizeof middle || count <= head + tail || memcmp(name, saver->head, head) != 0 ||
        strcmp(name + count - tail, saver->tail) != 0)
        return false;
    memcpy(middle, name + head, count - head - tail);
    middle[count - head - tail] = '\0';
    size_t digits = strspn(middle, "0123456789");
    if (digits == 0 || digits > DP__SAVER_DIGITS || (digits > 1 && middle[0] == '0'))
        return false;
    *out = (dp__saver_file){.number = strtoll(middle, NULL, 10)};
    memcpy(out->name, name, count + 1);
    return middle[digits] == '\0' || dp__saver_scored(saver, middle + digits, out);
}

/* In as few digits as give it again. What stands for a point depends on the locale. */
static void dp__saver_put_score(char *text, double score)
{
    dp_value again = dp_none();
    for (int digits = 1; digits <= 17; digits++) {
        char *to = text, own[DP__SAVER_SCORE];
        snprintf(own, sizeof own, "%.*g", digits, score);
        for (const char *from = own; *from != '\0'; from++)
            if (strchr(dp__save_in_numbers, *from) != NULL)
                *to++ = *from;
            else if (to > text && to[-1] != '.')
                *to++ = '.';
        *to = '\0';
        if (dp__save_token(text, &again) &&
            !(fabs((again.kind == DP_INT ? (double)again.as.i : again.as.f) - score) > 0))
            return;
    }
}

/* "": there is none. */
static dp_status dp__saver_score(const dp_saver *saver, dp_value log, char *text)
{
    const char *entry = saver->config.best_by;
    double score = 0;
    *text = '\0';
    if (entry == NULL || log.kind == DP_NONE)
        return DP_OK;
    if (dp_item(saver->ctx, dp_get(log, entry), &score) != DP_OK)
        return dp_error(DP_ERR_INVALID, "the log has no number '%s': %s", dp__save_show(entry).text,
                        dp_last_error());
    if (isfinite(score))
        dp__saver_put_score(text, score);
    return DP_OK;
}

static dp_status dp__saver_name(const dp_saver *saver, int64_t number, dp_value log,
                                const char **out)
{
    char score[DP__SAVER_SCORE];
    *out = saver->config.path;
    if (saver->tail == NULL)
        return DP_OK;
    if (number < saver->newest)
        return dp_error(
            DP_ERR_INVALID,
            "number %lld comes after %lld, which is kept already: to go on from an older "
            "file, remove the newer ones",
            (long long)number, (long long)saver->newest);
    DP_TRY(dp__saver_score(saver, log, score));
    const char *entry = score[0] != '\0' ? saver->config.best_by : "";
    size_t room = strlen(saver->config.path) + DP__SAVER_DIGITS + strlen(entry) +
                  sizeof "-=" + strlen(score);
    char *path = dp_scope_alloc(saver->temp, room);
    if (path == NULL)
        return dp_no_memory();
    snprintf(path, room, "%s%s%lld%s%s%s%s%s", saver->folder, saver->head, (long long)number,
             *entry != '\0' ? "-" : "", entry, *entry != '\0' ? "=" : "", score, saver->tail);
    *out = path;
    return DP_OK;
}

/* ==== >>tidying =================================================================================
   What is kept is what is in the folder: nothing else remembers it.                             */

typedef enum dp__saver_order { DP__SAVER_NEWEST, DP__SAVER_OLDEST, DP__SAVER_BEST } dp__saver_order;

typedef struct dp__saver_search {
    const dp_saver *saver;
    dp__saver_order order;
    int64_t least, most;         /* numbers */
    const dp__saver_file *below; /* NULL, or only what is older */
    const char *apart[2];        /* names, or NULL: not these */
    size_t count;                /* of what is left */
    dp__saver_file found;        /* the first of them in that order */
} dp__saver_search;

static bool dp__saver_is_older(const dp__saver_file *a, const dp__saver_file *b)
{
    return a->number != b->number ? a->number < b->number : strcmp(a->name, b->name) < 0;
}

static bool dp__saver_counts(const dp__saver_search *search, const dp__saver_file *file)
{
    for (int i = 0; i < 2; i++)
        if (search->apart[i] != NULL && strcmp(search->apart[i], file->name) == 0)
            return false;
    return file->number >= search->least && file->number <= search->most &&
           (search->below == NULL || dp__saver_is_older(file, search->below)) &&
           (search->order == DP__SAVER_NEWEST || !file->others) &&
           (search->order != DP__SAVER_BEST || file->scored);
}

static bool dp__saver_is_first(const dp__saver_search *search, const dp__saver_file *file)
{
    double less = search->found.score - file->score;
    double better = search->saver->config.best_is_most ? -less : less;
    if (search->count == 1)
        return true;
    if (search->order == DP__SAVER_BEST && (better > 0 || better < 0))
        return better > 0;
    return dp__saver_is_older(file, &search->found) == (search->order != DP__SAVER_NEWEST);
}

static void dp__saver_see(const char *name, void *user)
{
    dp__saver_search *search = user;
    dp__saver_file file;
    if (!dp__saver_file_of(search->saver, name, &file) || !dp__saver_counts(search, &file))
        return;
    search->count++;
    if (dp__saver_is_first(search, &file))
        search->found = file;
}

static dp_status dp__saver_names(const dp_saver *saver, void (*fn)(const char *name, void *user),
                                 void *user)
{
    return dp__os_names(saver->folder[0] != '\0' ? saver->folder : ".", fn, user);
}

/* The newest file but `own`, whether it can be read or not; if there is none, its number is -1. */
static dp_status dp__saver_last(const dp_saver *saver, const char *own, dp__saver_file *out)
{
    dp__saver_search search = {.saver = saver,
                               .order = DP__SAVER_NEWEST,
                               .most = INT64_MAX,
                               .apart = {own},
                               .found = {.number = -1}};
    if (saver->tail != NULL)
        DP_TRY(dp__saver_names(saver, dp__saver_see, &search));
    *out = search.found;
    return DP_OK;
}

static const char *dp__saver_path(const dp_saver *saver, const char *name)
{
    snprintf(saver->path, strlen(saver->folder) + DP__SAVER_NAME, "%s%s", saver->folder, name);
    return saver->path;
}

/* Parts of files have the names of these, and ".part". */
static void dp__saver_clear(const char *name, void *user)
{
    const dp_saver *saver = user;
    dp__saver_file file;
    char whole[DP__SAVER_NAME];
    size_t count = strlen(name), part = sizeof ".part" - 1;
    if (count < part || count >= sizeof whole || strcmp(name + count - part, ".part") != 0)
        return;
    memcpy(whole, name, count - part);
    whole[count - part] = '\0';
    if (dp__saver_file_of(saver, whole, &file))
        dp__os_part_clear(dp__saver_path(saver, name));
}

/* What was saved before under the number of a file is not what the number stands for any more. */
static dp_status dp__saver_replace(const dp_saver *saver, const char *own)
{
    for (size_t before = SIZE_MAX;;) {
        dp__saver_search same = {.saver = saver,
                                 .order = DP__SAVER_OLDEST,
                                 .least = saver->newest,
                                 .most = saver->newest,
                                 .apart = {own}};
        DP_TRY(dp__saver_names(saver, dp__saver_see, &same));
        if (same.count == 0 || same.count >= before)
            return DP_OK;
        before = same.count;
        DP_TRY(dp__os_remove(dp__saver_path(saver, same.found.name)));
    }
}

/* Returns the name of the file that is being saved. */
static const char *dp__saver_own(const dp_saver *saver)
{
    return saver->writer.part.target + strlen(saver->folder);
}

/* A job that has gone on without this process has saved since, under other names: then this one has
   nothing to add, and nothing to remove. */
static dp_status dp__saver_check_last(const dp_saver *saver)
{
    dp__saver_file now;
    DP_TRY(dp__saver_last(saver, dp__saver_own(saver), &now));
    if (!dp__saver_is_older(&saver->last, &now))
        return DP_OK;
    return dp_error(DP_ERR_FILE,
                    "another process has saved '%s' while this one saved '%s', and that file stays",
                    now.name, dp__saver_own(saver));
}

/* After a save. It is the newest, whatever files with larger numbers there are: those could not be
   read. */
static dp_status dp__saver_tidy(dp_saver *saver)
{
    const char *own = dp__saver_own(saver);
    dp__saver_search best = {.saver = saver, .order = DP__SAVER_BEST, .most = saver->newest};
    size_t before = SIZE_MAX;
    DP_TRY(dp__saver_names(saver, dp__saver_clear, saver));
    DP_TRY(dp__saver_replace(saver, own));
    if (saver->config.last < 0)
        return DP_OK;
    DP_TRY(dp__saver_names(saver, dp__saver_see, &best));
    for (;;) {
        dp__saver_search old = {.saver = saver,
                                .order = DP__SAVER_OLDEST,
                                .most = saver->newest,
                                .apart = {own, best.count > 0 ? best.found.name : NULL}};
        DP_TRY(dp__saver_names(saver, dp__saver_see, &old));
        bool best_is_newer = best.count > 0 && strcmp(best.found.name, own) != 0 &&
                             dp__saver_is_older(&old.found, &best.found);
        if (old.count + best_is_newer < (size_t)saver->config.last || old.count == 0 ||
            old.count >= before)
            return DP_OK;
        before = old.count;
        DP_TRY(dp__os_remove(dp__saver_path(saver, old.found.name)));
    }
}

/* ==== >>beside ==================================================================================
   A save lies in two scopes: what the thread needs of it, and a guard, whose end waits for the
   thread. The guard is the newest scope of the saver, and so ends first, in dp_close too.       */

static void dp__saver_join(void *user)
{
    dp_saver *saver = user;
    if (saver->running)
        dp__thread_join(saver->thread);
    saver->running = false;
}

static void dp__saver_end(dp_saver *saver)
{
    dp_scope_end(saver->guard);
    dp_scope_end(saver->temp);
    saver->guard = saver->temp = NULL;
}

/* Gives up a save that has begun, and that no thread writes yet. */
static void dp__saver_drop(dp_saver *saver)
{
    (void)dp__os_part_end(&saver->writer.part, DP_ERR_ABORTED);
    dp__saver_end(saver);
}

static dp_status dp__saver_beat(void *user)
{
    dp_saver *saver = user;
    dp__gate_open(&saver->news);
    return DP_OK;
}

static void dp__saver_note(dp_saver *saver, dp_status status)
{
    saver->status = status;
    snprintf(saver->text, sizeof saver->text, "%s", dp_last_error());
}

static dp_status dp__saver_put(dp_saver *saver)
{
    dp__save_writer *writer = &saver->writer;
    const size_t all = saver->image.count;
    for (size_t at = 0; at < all; at += DP__SAVE_CHUNK) {
        writer->chunk = saver->image.bytes + at;
        writer->filled = all - at < DP__SAVE_CHUNK ? all - at : DP__SAVE_CHUNK;
        DP_TRY(dp__save_flush(writer));
    }
    return dp__os_part_sync(&writer->part);
}

static dp_status dp__saver_write(dp_saver *saver)
{
    dp_status status = dp__saver_put(saver);
    if (status == DP_OK)
        status = dp__saver_check_last(saver);
    DP_TRY(dp__os_part_end(&saver->writer.part, status));
    DP_TRY(dp__saver_check_last(saver));
    return saver->tail != NULL ? dp__saver_tidy(saver) : DP_OK;
}

static void *dp__saver_main(void *user)
{
    dp_saver *saver = user;
    dp__saver_note(saver, dp__saver_write(saver));
    atomic_store(&saver->ended, true);
    dp__gate_open(&saver->news);
    return NULL;
}

static dp_status dp__saver_room(dp_saver *saver, size_t bytes)
{
    saver->image.count = bytes;
    if (saver->image.bytes != NULL && bytes <= saver->image_room)
        return DP_OK;
    dp_scope_end(saver->copied);
    saver->copied = dp_scope_child(saver->scope);
    saver->image.bytes = dp_scope_alloc(saver->copied, bytes);
    saver->image_room = bytes;
    return saver->image.bytes != NULL ? DP_OK : dp_no_memory();
}

static dp_status dp__saver_copy(dp_saver *saver, int64_t number, dp_value value, dp_value log)
{
    const char *path;
    dp__save_writer *writer = &saver->writer;
    DP_TRY(dp__saver_name(saver, number, log, &path));
    *writer = (dp__save_writer){.ctx = saver->ctx,
                                .temp = saver->temp,
                                .value = value,
                                .beat = dp__saver_beat,
                                .user = saver};
    DP_TRY(dp__save_prepare(writer, path));
    DP_TRY(dp__saver_last(saver, dp__saver_own(saver), &saver->last));
    DP_TRY(dp__saver_room(saver, writer->header_bytes + (size_t)writer->data_bytes));
    DP_TRY(dp__save_image_put(writer, saver->image.bytes));
    saver->guard = dp_scope_child(saver->scope);
    DP_TRY(dp_scope_check(saver->guard));
    DP_TRY(dp_scope_defer(saver->guard, dp__saver_join, saver));
    return dp__os_part_open(&writer->part);
}

static dp_status dp__saver_begin(dp_saver *saver, int64_t number, dp_value value, dp_value log)
{
    saver->temp = dp_scope_child(saver->scope);
    dp_status status = dp__saver_copy(saver, number, value, log);
    if (status == DP_OK)
        saver->newest = number;
    else
        dp__saver_end(saver);
    return status;
}

/* Writes on in a thread what has begun. As in dp__save_write_in_job, all have answered since the
   part was locked. */
static void dp__saver_start(dp_saver *saver)
{
    atomic_store(&saver->ended, false);
    int failed = dp__thread_start(&saver->thread, dp__saver_main, saver);
    saver->running = failed == 0;
    if (saver->running)
        return;
    saver->status = DP_ERR_NO_MEMORY;
    snprintf(saver->text, sizeof saver->text, "cannot start a thread: %s", dp__os_why_text(failed));
    dp__saver_drop(saver);
}

/* Until nothing is being written. The other processes are told that it goes on. */
static dp_status dp__saver_await(dp_saver *saver)
{
    while (saver->running && saver->info.process_count > 1) {
        unsigned seen = dp__gate_word(&saver->news);
        if (atomic_load(&saver->ended))
            break;
        dp__gate_wait(&saver->news, seen, false);
        if (!atomic_load(&saver->ended))
            DP_TRY(dp__save_goes_on(saver->ctx));
    }
    dp__saver_end(saver);
    return DP_OK;
}

/* ==== >>finding =================================================================================
   Process 0 looks for a name, and all read the file of that name.                               */

/* Travels as numbers. */
typedef union dp__saver_found {
    dp__saver_file file;
    int64_t words[(sizeof(dp__saver_file) + 7) / 8];
} dp__saver_found;

static dp_status dp__saver_look(const dp_saver *saver, int64_t number, const dp__saver_file *below,
                                dp__saver_file *out)
{
    bool any = number < 0;
    dp__saver_search search = {.saver = saver,
                               .order = number == DP_SAVER_BEST ? DP__SAVER_BEST : DP__SAVER_NEWEST,
                               .least = any ? 0 : number,
                               .most = any ? INT64_MAX : number,
                               .below = below};
    DP_TRY(dp__saver_names(saver, dp__saver_see, &search));
    *out = search.found;
    if (search.count > 0)
        return DP_OK;
    return any ? dp_error(DP_ERR_NO_FILE, "there is no such file")
               : dp_error(DP_ERR_NO_FILE, "there is none with the number %lld", (long long)number);
}

static void dp__saver_warn(const dp_saver *saver)
{
    dp_config config;
    char text[DP__SAVE_SENTENCE + 64];
    if (!saver->writes || dp_config_get(saver->ctx, &config) != DP_OK || config.log.fn == NULL ||
        config.log.level < DP_LOG_WARN)
        return;
    snprintf(text, sizeof text, "dp_saver_load takes an older file: %s", dp_last_error());
    config.log.fn(&(dp_log_record){DP_LOG_WARN, dp_rank(saver->ctx), text}, config.log.user);
}

/* By the file alone, so that an older one may be better. */
static bool dp__saver_is_unread(dp_status status)
{
    return status == DP_ERR_FILE || status == DP_ERR_NO_FILE || status == DP_ERR_UNSUPPORTED;
}

/* The newest that can be read, or the failure of the newest of all. */
static dp_status dp__saver_load(dp_saver *saver, dp_scope *scope, int64_t number, dp_value *out)
{
    dp__saver_found found = {.words = {0}}, last;
    char text[DP__SAVE_SENTENCE] = "";
    dp_status status = DP_OK, first = DP_OK;
    for (bool again = false;; again = true) {
        last = found;
        status = saver->writes
                     ? dp__saver_look(saver, number, again ? &last.file : NULL, &found.file)
                     : DP_OK;
        status = dp__save_hear(saver->ctx, status);
        if (status == DP_ERR_NO_FILE && again)
            return dp_error(first, "%s", text);
        DP_TRY(status);
        DP_TRY(dp_broadcast_i64(saver->ctx, found.words, sizeof found / sizeof(int64_t), 0));
        status = dp_checkpoint_load(saver->ctx, scope, dp__saver_path(saver, found.file.name), out);
        if (number != DP_SAVER_LAST || !dp__saver_is_unread(status))
            break;
        if (!again) {
            first = status == DP_ERR_NO_FILE ? DP_ERR_FILE : status; /* its name is there */
            snprintf(text, sizeof text, "%s", dp_last_error());
        }
        dp__saver_warn(saver);
    }
    if (number == DP_SAVER_LAST && status == DP_OK)
        saver->newest = found.file.number;
    return status;
}

/* ==== >>saving ==================================================================================
   What process 0 does, and the others hear of.                                                  */

static dp_status dp__saver_check_config(const dp_saver_config *config)
{
    const char *slash = strrchr(config->path, '/'), *star = strchr(config->path, '*');
    if (star != NULL && ((slash != NULL && star < slash) || strchr(star + 1, '*') != NULL))
        return dp_error(DP_ERR_INVALID, "there is one * at most, in the name of the file");
    if (star == NULL && (config->last > 1 || config->last < 0 || config->best_by != NULL))
        return dp_error(DP_ERR_INVALID, "several files are to be kept, and there is no * for them");
    if (config->best_is_most && config->best_by == NULL)
        return dp_error(DP_ERR_INVALID, "best_is_most is set, and best_by is not");
    for (const char *at = config->best_by; at != NULL && (*at != '\0' || at == config->best_by);
         at++)
        if ((unsigned char)*at < ' ' || *at == '/')
            return dp_error(DP_ERR_INVALID, "best_by is '%s', which cannot be in a name of a file",
                            dp__save_show(config->best_by).text);
    return DP_OK;
}

static char *dp__saver_text(dp_scope *scope, const char *text, size_t count)
{
    char *own = dp_scope_alloc(scope, count + 1);
    if (own != NULL) {
        memcpy(own, text, count);
        own[count] = '\0';
    }
    return own;
}

static dp_status dp__saver_strings(dp_saver *saver, const dp_saver_config *config)
{
    const char *path = config->path, *slash = strrchr(path, '/'), *star = strchr(path, '*');
    size_t folder = slash != NULL ? (size_t)(slash + 1 - path) : 0;
    size_t head = star != NULL ? (size_t)(star - path) - folder : 0;
    const char *entry = config->best_by != NULL ? config->best_by : "";
    saver->config = *config;
    saver->config.last = config->last != 0 ? config->last : 1;
    saver->config.path = dp__saver_text(saver->scope, path, strlen(path));
    saver->config.best_by = dp__saver_text(saver->scope, entry, strlen(entry));
    saver->folder = dp__saver_text(saver->scope, path, folder);
    saver->head = dp__saver_text(saver->scope, path + folder, head);
    saver->path = dp_scope_alloc(saver->scope, folder + DP__SAVER_NAME);
    if (saver->config.path == NULL || saver->config.best_by == NULL || saver->folder == NULL ||
        saver->head == NULL || saver->path == NULL)
        return dp_no_memory();
    if (config->best_by == NULL)
        saver->config.best_by = NULL;
    if (star != NULL)
        saver->tail = saver->config.path + (star + 1 - path);
    return DP_OK;
}

static void dp__saver_fini(void *user)
{
    dp_saver *saver = user;
    dp__gate_fini(&saver->news);
}

/* Of those that are kept. */
static dp_status dp__saver_newest(dp_saver *saver)
{
    dp__saver_file last;
    if (!saver->writes)
        return DP_OK;
    DP_TRY(dp__saver_last(saver, NULL, &last));
    saver->newest = last.number;
    return DP_OK;
}

static dp_status dp__saver_make(dp_ctx *ctx, const dp_saver_config *config, dp_scope *scope,
                                dp_saver **out)
{
    dp_info info;
    DP_TRY(dp_scope_check(scope));
    DP_TRY(dp_info_get(ctx, &info));
    dp_saver *saver = dp_scope_alloc(scope, sizeof *saver);
    if (saver == NULL)
        return dp_no_memory();
    *saver = (dp_saver){
        .ctx = ctx, .scope = scope, .newest = -1, .info = info, .writes = info.process == 0};
    DP_TRY(dp__saver_strings(saver, config));
    DP_TRY(dp_scope_defer(scope, dp__saver_fini, saver));
    dp__gate_init(&saver->news);
    *out = saver;
    return dp__saver_newest(saver);
}

DP_API dp_status dp_saver_create(dp_ctx *ctx, const dp_saver_config *config, dp_saver **out)
{
    dp_saver *saver = NULL;
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "config", config));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp__os_check_path(__func__, config->path));
    DP_TRY(dp__os_named(__func__, config->path, dp__saver_check_config(config)));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_agree(ctx, dp__saver_make(ctx, config, scope, &saver));
    if (status == DP_OK)
        *out = saver;
    else
        dp_scope_end(scope);
    return dp__os_named(__func__, config->path, status);
}

DP_API void dp_saver_destroy(dp_saver *saver)
{
    if (saver != NULL)
        dp_scope_end(saver->scope);
}

static dp_status dp__saver_check(const char *fn, const dp_saver *saver)
{
    DP_TRY(dp_check_pointer(fn, "saver", saver));
    return dp_check_ctx(fn, saver->ctx);
}

/* After dp_recover another process may be the one that writes. */
static dp_status dp__saver_rejoin(dp_saver *saver)
{
    dp_info info;
    DP_TRY(dp_info_get(saver->ctx, &info));
    if (info.recoveries == saver->info.recoveries)
        return DP_OK;
    saver->info = info;
    saver->writes = info.process == 0;
    if (saver->writes)
        DP_TRY(dp__saver_await(saver));
    else
        dp__saver_end(saver);
    return dp__saver_newest(saver);
}

/* Once. No thread is running. */
static dp_status dp__saver_tell(dp_saver *saver)
{
    dp_status status = saver->status;
    saver->status = DP_OK;
    return status == DP_OK ? DP_OK : dp_error(status, "%s", saver->text);
}

/* Two things may have failed: the save before, which is told now, and this one, which then has to
   be told by the next call. */
static dp_status dp__saver_next(dp_saver *saver, int64_t number, dp_value value, dp_value log)
{
    char text[DP__SAVE_SENTENCE];
    DP_TRY(dp__saver_await(saver));
    dp_status before = dp__saver_tell(saver);
    snprintf(text, sizeof text, "%s", dp_last_error());
    dp_status status = dp__saver_begin(saver, number, value, log);
    if (before == DP_OK)
        return status;
    if (status != DP_OK)
        dp__saver_note(saver, status);
    return dp_error(before, "%s", text);
}

DP_API dp_status dp_saver_save(dp_saver *saver, int64_t number, dp_value value, dp_value log)
{
    DP_TRY(dp__saver_check(__func__, saver));
    if (number < 0 || number > INT64_MAX / 10)
        return dp_error(DP_ERR_INVALID, "%s: number is %lld", __func__, (long long)number);
    dp_trace_begin(__func__);
    dp_status status = dp__saver_rejoin(saver);
    if (saver->writes && status == DP_OK)
        status = dp__saver_next(saver, number, value, log);
    bool begun = saver->temp != NULL && !saver->running;
    status = dp__save_hear(saver->ctx, status);
    if (begun && dp_status_class(status) != DP_CLASS_JOB)
        dp__saver_start(saver);
    else if (begun)
        dp__saver_drop(saver);
    dp_trace_end();
    return dp__os_named(__func__, saver->config.path, status);
}

DP_API dp_status dp_saver_wait(dp_saver *saver)
{
    DP_TRY(dp__saver_check(__func__, saver));
    dp_trace_begin(__func__);
    dp_status status = dp__saver_rejoin(saver);
    if (saver->writes && status == DP_OK)
        status = dp__saver_await(saver);
    if (saver->writes && status == DP_OK)
        status = dp__saver_tell(saver);
    status = dp__save_hear(saver->ctx, status);
    dp_trace_end();
    return dp__os_named(__func__, saver->config.path, status);
}

DP_API dp_status dp_saver_load(dp_saver *saver, dp_scope *scope, int64_t number, dp_value *out)
{
    DP_TRY(dp__saver_check(__func__, saver));
    DP_TRY(dp__save_check_read(__func__, saver->ctx, scope, saver->config.path, out));
    if (number < DP_SAVER_BEST || (number != DP_SAVER_LAST && saver->tail == NULL))
        return dp_error(DP_ERR_INVALID, "%s: number is %lld", __func__, (long long)number);
    dp_status status = dp__saver_rejoin(saver);
    if (saver->writes && status == DP_OK)
        status = dp__saver_await(saver);
    DP_TRY(dp__os_named(__func__, saver->config.path, dp__save_hear(saver->ctx, status)));
    if (saver->tail == NULL)
        return dp_checkpoint_load(saver->ctx, scope, saver->config.path, out);
    return dp__os_named(__func__, saver->config.path, dp__saver_load(saver, scope, number, out));
}
#endif /* little-endian */
#endif /* DP_IMPLEMENTATION && !DP_SAVE_IMPLEMENTED */
/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
