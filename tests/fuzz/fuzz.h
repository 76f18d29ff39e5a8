/* fuzz.h - what the fuzzers share: bytes become numbers, numbers become values.

   An input is read byte by byte; after its end all bytes are 0. Whatever the bytes are, there is a
   value, so that nothing the fuzzer finds is thrown away. */

#ifndef FUZZ_H
#define FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../../dp.h"

enum { FUZZ_DEVICES = 4, FUZZ_ITEMS = 4, FUZZ_DEPTH = 4, FUZZ_ELEMENTS = 1 << 12 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#define FUZZ_CHECK(condition) ((condition) ? (void)0 : fuzz_fail(#condition, __FILE__, __LINE__))

static inline _Noreturn void fuzz_fail(const char *text, const char *file, int line)
{
    fprintf(stderr, "%s:%d: %s; last error: \"%s\"\n", file, line, text, dp_last_error());
    abort();
}

typedef struct fuzz {
    const uint8_t *data;
    size_t bytes, at;
    dp_ctx *ctx;
    dp_scope *scope;
} fuzz;

/* A number from 0 to below - 1. Never two in one expression: which is read first is not defined. */
static inline int fuzz_next(fuzz *in, int below)
{
    return in->at < in->bytes ? in->data[in->at++] % below : 0;
}

/* A call that failed is the caller's to mend, and says why. */
static inline void fuzz_check_failure(dp_status status)
{
    FUZZ_CHECK(dp_status_class(status) == DP_CLASS_CALL);
    FUZZ_CHECK(dp_last_error()[0] != '\0');
}

/* ---- contexts -------------------------------------------------------------------------------- */

static inline dp_device_ops *fuzz_far_table(void)
{
    static dp_device_ops table;
    return &table;
}

static inline dp_status fuzz_far_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cpu()->open(host, index, out);
    if (status == DP_OK) {
        (*out)->ops = fuzz_far_table();
    }
    return status;
}

static inline dp_status fuzz_far_info(dp_dev *dev, dp_device_info *out)
{
    dp_status status = dp_cpu()->info(dev, out);
    out->host_memory = false;
    return status;
}

/* The CPU's devices, or the same ones which say that the host does not reach their memory: then
   there are copies where there were views. Made once. */
static inline dp_ctx *fuzz_ctx(bool far)
{
    static dp_ctx *made[2];
    if (made[far] == NULL) {
        dp_device_ops *table = fuzz_far_table();
        *table = *dp_cpu();
        table->open = fuzz_far_open;
        table->info = fuzz_far_info;
        const dp_device_ops *const backends[] = {far ? table : dp_cpu(), NULL};
        const dp_config config = {
            .backends = backends, .device_count = FUZZ_DEVICES, .poison = true};
        FUZZ_CHECK(dp_open(&config, &made[far]) == DP_OK);
    }
    return made[far];
}

/* ---- values ---------------------------------------------------------------------------------- */

typedef struct fuzz_shape { /* what is the same in a whole tree */
    int rows;               /* the first size of most tensors */
    int more[2];            /* in containers: added to the last size, and to the one before */
    int seed;               /* added to numbers */
    int odd;                /* the leaf with this number is of another kind; below 0: none is */
    int inside;             /* containers around us */
} fuzz_shape;

/* A tensor in host memory, perhaps with two of its dims swapped. */
static inline dp_value fuzz_tensor(fuzz *in, const fuzz_shape *like)
{
    dp_dtype dtype = (dp_dtype)fuzz_next(in, DP_DTYPE_COUNT);
    int ndim = fuzz_next(in, 5), first = fuzz_next(in, 256) + like->seed;
    bool turned = fuzz_next(in, 4) == 1 && ndim > 1;
    int64_t shape[DP_MAX_DIMS], count = 1;
    dp_tensor tensor;
    for (int d = 0; d < ndim; d++) {
        shape[d] = d || fuzz_next(in, 8) == 1 ? fuzz_next(in, 4) : like->rows;
        shape[d] += like->inside && d >= ndim - 2 ? like->more[ndim - 1 - d] : 0;
        count *= shape[d];
    }
    FUZZ_CHECK(count <= FUZZ_ELEMENTS);
    FUZZ_CHECK(dp_tensor_new(in->scope, (dp_device){0}, dtype, ndim, shape, &tensor) == DP_OK);
    for (size_t i = 0; i < (size_t)count * dp_dtype_bytes(dtype); i++) {
        size_t byte = (size_t)first + i * 7;
        ((uint8_t *)tensor.data)[i] = (uint8_t)(dtype == DP_BOOL ? byte & 1 : byte);
    }
    if (turned) {
        FUZZ_CHECK(dp_transpose(&tensor, 0, ndim - 1, &tensor) == DP_OK);
    }
    return dp_of(in->scope, &tensor);
}

static inline dp_value fuzz_value(fuzz *in, fuzz_shape *shape, int depth);

static inline dp_value fuzz_sequence(fuzz *in, fuzz_shape *shape, dp_kind kind, int depth)
{
    dp_value items[FUZZ_ITEMS];
    size_t count = (size_t)fuzz_next(in, FUZZ_ITEMS + 1);
    for (size_t i = 0; i < count; i++) {
        items[i] = fuzz_value(in, shape, depth + 1);
    }
    return dp_list_make(in->scope, kind, items, count);
}

static inline dp_value fuzz_dict(fuzz *in, fuzz_shape *shape, int depth)
{
    static const char *const keys[FUZZ_ITEMS] = {"img", "", "a['b']", "label"};
    dp_pair pairs[FUZZ_ITEMS];
    size_t count = (size_t)fuzz_next(in, FUZZ_ITEMS + 1);
    size_t first = (size_t)fuzz_next(in, FUZZ_ITEMS);
    for (size_t i = 0; i < count; i++) {
        pairs[i].key = keys[(first + i) % FUZZ_ITEMS];
        pairs[i].value = fuzz_value(in, shape, depth + 1);
    }
    return dp_dict_make(in->scope, pairs, count);
}

static inline dp_value fuzz_container(fuzz *in, fuzz_shape *shape, int depth)
{
    int flags = fuzz_next(in, 4), dims = fuzz_next(in, 5) - 1, pad = fuzz_next(in, 100);
    dp_container container = {.stack = (flags & 1) != 0,
                              .cpu_only = (flags & 2) != 0,
                              .pad_dims = (int8_t)dims,
                              .padding_value = pad + shape->seed};
    shape->inside++;
    container.data = fuzz_value(in, shape, depth + 1);
    shape->inside--;
    return dp_contain(in->scope, &container);
}

static inline dp_value fuzz_plain_leaf(fuzz *in, const fuzz_shape *shape, int kind)
{
    static int opaque;
    switch (kind) {
    case DP_NONE:
        return dp_none();
    case DP_BOOLEAN:
        return dp_bool((fuzz_next(in, 2) ^ (shape->seed & 1)) == 1);
    case DP_INT:
        return dp_int(fuzz_next(in, 256) - shape->seed);
    case DP_FLOAT:
        return dp_float(fuzz_next(in, 256) / 4.0 + shape->seed);
    case DP_STRING:
        return dp_string(in->scope, (fuzz_next(in, 2) ^ (shape->seed & 1)) ? "" : "text");
    case DP_OPAQUE:
        return dp_opaque(&opaque);
    default:
        return fuzz_tensor(in, shape);
    }
}

/* An odd one reads the bytes that it would have needed, so that all after it is as it was. */
static inline dp_value fuzz_leaf(fuzz *in, fuzz_shape *shape, int kind)
{
    dp_value leaf = fuzz_plain_leaf(in, shape, kind);
    if (shape->odd-- == 0) {
        return kind == DP_INT ? dp_bool(true) : dp_int(7);
    }
    return leaf;
}

static inline dp_value fuzz_value(fuzz *in, fuzz_shape *shape, int depth)
{
    int kind = fuzz_next(in, 16); /* 12 and above are tensors too */
    if (depth < FUZZ_DEPTH) {
        if (kind == DP_LIST || kind == DP_TUPLE) {
            return fuzz_sequence(in, shape, (dp_kind)kind, depth);
        } else if (kind == DP_DICT) {
            return fuzz_dict(in, shape, depth);
        } else if (kind == DP_CONTAINER) {
            return fuzz_container(in, shape, depth);
        }
    }
    return fuzz_leaf(in, shape, kind);
}

static inline bool fuzz_is_sequence(dp_value value)
{
    return value.kind == DP_LIST || value.kind == DP_TUPLE;
}

/* Item or pair number `index`. */
static inline dp_value fuzz_child(dp_value value, uint32_t index)
{
    return value.kind == DP_DICT ? value.as.pairs[index].value : value.as.items[index];
}

/* ---- equality -------------------------------------------------------------------------------- */

static inline bool fuzz_same_shape(const dp_tensor *a, const dp_tensor *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0;
}

static inline bool fuzz_same_tensor(dp_ctx *ctx, const dp_tensor *a, const dp_tensor *b)
{
    static char elements[2][FUZZ_ELEMENTS * sizeof(double) * 8];
    if (!fuzz_same_shape(a, b)) {
        return false;
    }
    size_t bytes = (size_t)dp_tensor_count(a) * dp_dtype_bytes((dp_dtype)a->dtype);
    FUZZ_CHECK(bytes <= sizeof(elements[0]));
    FUZZ_CHECK(dp_read(ctx, a, elements[0], bytes) == DP_OK);
    FUZZ_CHECK(dp_read(ctx, b, elements[1], bytes) == DP_OK);
    return memcmp(elements[0], elements[1], bytes) == 0;
}

static inline bool fuzz_same(dp_ctx *ctx, dp_value a, dp_value b);

static inline bool fuzz_same_items(dp_ctx *ctx, dp_value a, dp_value b)
{
    for (uint32_t i = 0; i < a.count; i++) {
        if (a.kind == DP_DICT && strcmp(a.as.pairs[i].key, b.as.pairs[i].key) != 0) {
            return false;
        } else if (!fuzz_same(ctx, fuzz_child(a, i), fuzz_child(b, i))) {
            return false;
        }
    }
    return true;
}

static inline bool fuzz_same(dp_ctx *ctx, dp_value a, dp_value b)
{
    if (a.kind != b.kind || a.count != b.count || a.depth != b.depth) {
        return false;
    }
    switch ((dp_kind)a.kind) {
    case DP_NONE:
    case DP_ERROR:
        return true;
    case DP_BOOLEAN:
        return a.as.b == b.as.b;
    case DP_INT:
    case DP_FLOAT:
        return a.as.i == b.as.i;
    case DP_STRING:
        return strcmp(a.as.s, b.as.s) == 0;
    case DP_TENSOR:
        return fuzz_same_tensor(ctx, a.as.t, b.as.t);
    case DP_CONTAINER:
        return a.as.c->stack == b.as.c->stack && a.as.c->cpu_only == b.as.c->cpu_only &&
               a.as.c->pad_dims == b.as.c->pad_dims && fuzz_same(ctx, a.as.c->data, b.as.c->data);
    case DP_LIST:
    case DP_TUPLE:
    case DP_DICT:
        return fuzz_same_items(ctx, a, b);
    case DP_OPAQUE:
        return a.as.p == b.as.p;
    }
    return false;
}

#endif /* FUZZ_H */
