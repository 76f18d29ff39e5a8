/* lazy.h - a table around another one that does nothing before somebody waits for it.

   Work on a stream is queued. It is done when the host waits for the stream or for an event behind
   it, or when another stream gets to a wait for such an event; then no sooner than it must. So what
   the core reads, overwrites or frees too early is wrong every time, not once in a thousand
   runs. */

#ifndef LAZY_H
#define LAZY_H

#include <stdlib.h>
#include "decorator.h"

enum { LAZY_OPERANDS = 64 };

typedef struct lazy_stream lazy_stream;

typedef struct lazy_args { /* of a kernel, with all that they point to */
    dp_kernel_args args;
    void *out[LAZY_OPERANDS];
    const void *in[LAZY_OPERANDS];
    int64_t dims[4][DP_MAX_DIMS];
} lazy_args;

typedef struct lazy_op {
    deco_method method; /* a copy, kernel, host_call or event_wait */
    void *dst;
    const void *src;
    size_t bytes, dst_pitch, src_pitch, rows;
    dp_dev *src_dev;
    lazy_stream *other; /* event_wait: do its first `mark` operations */
    size_t mark;
    lazy_args *kernel;
    void (*fn)(void *user); /* host_call, with dst */
} lazy_op;

struct lazy_stream {
    dp_stream base;
    dp_stream *inner;
    lazy_op *queue;
    size_t room, first, count, done; /* operations first .. first + count - 1 are in the queue */
    dp_status failed;                /* of an operation: whoever waits from then on is told */
    lazy_stream *next;
};

typedef struct lazy_block {
    const dp_dev *dev;
    const void *data;
    size_t bytes;
    struct lazy_block *next;
} lazy_block;

typedef struct lazy_event {
    dp_event base;
    lazy_stream *stream; /* NULL = never recorded */
    size_t mark;
} lazy_event;

static struct {
    dp_device_ops ops;
    const dp_device_ops *inner;
    lazy_block *blocks;
    lazy_stream *streams; /* destroyed ones too, until their device is closed: events know them */
    pthread_mutex_t mutex;
} lazy = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* ---- the queue; callers hold the mutex ------------------------------------------------------- */

static inline dp_status lazy_do(lazy_stream *stream, size_t mark);

static inline dp_status lazy_do_kernel(dp_stream *stream, lazy_args *kernel)
{
    kernel->args.out = kernel->out;
    kernel->args.in = kernel->in;
    kernel->args.shape = kernel->dims[0];
    kernel->args.out_stride = kernel->dims[1];
    kernel->args.in_shape = kernel->dims[2];
    kernel->args.in_stride = kernel->dims[3];
    dp_status status = lazy.inner->kernel(stream, &kernel->args);
    free(kernel);
    return status;
}

static inline dp_status lazy_do_one(const lazy_stream *stream, const lazy_op *op)
{
    const dp_device_ops *inner = lazy.inner;
    switch ((int)op->method) {
    case DECO_copy_in:
        return inner->copy_in(stream->inner, op->dst, op->src, op->bytes);
    case DECO_copy_out:
        return inner->copy_out(stream->inner, op->dst, op->src, op->bytes);
    case DECO_copy:
        return inner->copy(stream->inner, op->dst, op->src, op->bytes);
    case DECO_peer_copy:
        return inner->peer_copy(stream->inner, op->dst, op->src_dev, op->src, op->bytes);
    case DECO_copy_2d:
        return inner->copy_2d(stream->inner, op->dst, op->dst_pitch, op->src, op->src_pitch,
                              op->bytes, op->rows);
    case DECO_kernel:
        return lazy_do_kernel(stream->inner, op->kernel);
    case DECO_host_call:
        op->fn(op->dst);
        return DP_OK;
    default:
        return lazy_do(op->other, op->mark);
    }
}

static inline dp_status lazy_do(lazy_stream *stream, size_t mark)
{
    while (stream->done < mark) {
        lazy_op op = stream->queue[stream->done++ - stream->first];
        dp_status status = lazy_do_one(stream, &op);
        if (status != DP_OK) {
            stream->failed = status;
            return status;
        }
    }
    if (stream->done == stream->first + stream->count) {
        stream->first = stream->done;
        stream->count = 0;
    }
    return stream->failed;
}

static inline bool lazy_touches(const dp_dev *dev, const lazy_stream *stream, const lazy_op *op,
                                uintptr_t data, size_t bytes)
{
    bool mine = stream->base.dev == dev, touched = false;
    if (op->method == DECO_copy_in || op->method == DECO_copy || op->method == DECO_peer_copy ||
        op->method == DECO_copy_2d)
        touched = mine && (uintptr_t)op->dst - data < bytes;
    if (op->method == DECO_copy_out || op->method == DECO_copy || op->method == DECO_copy_2d)
        touched = touched || (mine && (uintptr_t)op->src - data < bytes);
    if (op->method == DECO_peer_copy)
        touched = touched || (op->src_dev == dev && (uintptr_t)op->src - data < bytes);
    for (size_t k = 0; op->method == DECO_kernel && mine && k < op->kernel->args.out_count; k++)
        touched = touched || (uintptr_t)op->kernel->out[k] - data < bytes;
    for (size_t k = 0; op->method == DECO_kernel && mine && k < op->kernel->args.in_count; k++)
        touched = touched || (uintptr_t)op->kernel->in[k] - data < bytes;
    return touched;
}

static inline void lazy_check_free(const dp_dev *dev, const void *data, size_t bytes)
{
    for (const lazy_stream *s = lazy.streams; s != NULL; s = s->next) {
        for (size_t i = s->done; i < s->first + s->count; i++) {
            const lazy_op *op = &s->queue[i - s->first];
            if (lazy_touches(dev, s, op, (uintptr_t)data, bytes))
                test_fail(__FILE__, __LINE__, "free: %s is still to be done with this memory",
                          deco_name(op->method));
        }
    }
}

/* Nothing that is queued reads or writes memory of the host: what did, was waited for before that
   memory went. */
static inline void lazy_check_host(void)
{
    pthread_mutex_lock(&lazy.mutex);
    for (const lazy_stream *s = lazy.streams; s != NULL; s = s->next)
        for (size_t i = s->done; i < s->first + s->count; i++) {
            deco_method method = s->queue[i - s->first].method;
            if (method == DECO_copy_in || method == DECO_copy_out)
                test_fail(__FILE__, __LINE__, "%s is still to be done", deco_name(method));
        }
    pthread_mutex_unlock(&lazy.mutex);
}

static inline dp_status lazy_put(dp_stream *base, lazy_op op)
{
    lazy_stream *stream = (lazy_stream *)base;
    pthread_mutex_lock(&lazy.mutex);
    if (stream->count == stream->room) {
        stream->room = 2 * stream->room + 16;
        stream->queue = realloc(stream->queue, stream->room * sizeof(op));
        CHECK(stream->queue != NULL);
    }
    stream->queue[stream->count++] = op;
    pthread_mutex_unlock(&lazy.mutex);
    return DP_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static inline dp_status lazy_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = lazy.inner->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &lazy.ops;
    return status;
}

static inline void lazy_close(dp_dev *dev)
{
    pthread_mutex_lock(&lazy.mutex);
    for (lazy_stream **at = &lazy.streams; *at != NULL;) {
        lazy_stream *stream = *at;
        if (stream->base.dev == dev) {
            *at = stream->next;
            free(stream->queue);
            free(stream);
        } else {
            at = &stream->next;
        }
    }
    pthread_mutex_unlock(&lazy.mutex);
    dev->ops = lazy.inner;
    lazy.inner->close(dev);
}

static inline dp_status lazy_alloc(dp_dev *dev, size_t bytes, void **out)
{
    dp_status status = lazy.inner->alloc(dev, bytes, out);
    lazy_block *block = malloc(sizeof(*block));
    CHECK(block != NULL);
    if (status != DP_OK) {
        free(block);
        return status;
    }
    pthread_mutex_lock(&lazy.mutex);
    *block = (lazy_block){dev, *out, bytes, lazy.blocks};
    lazy.blocks = block;
    pthread_mutex_unlock(&lazy.mutex);
    return DP_OK;
}

static inline void lazy_free(dp_dev *dev, void *data, size_t bytes)
{
    pthread_mutex_lock(&lazy.mutex);
    lazy_check_free(dev, data, bytes);
    for (lazy_block **at = &lazy.blocks; *at != NULL; at = &(*at)->next) {
        lazy_block *block = *at;
        if (block->dev == dev && block->data == data) {
            *at = block->next;
            free(block);
            break;
        }
    }
    pthread_mutex_unlock(&lazy.mutex);
    lazy.inner->free(dev, data, bytes);
}

static inline bool lazy_one_memory(dp_dev *a, dp_dev *b)
{
    dp_device_info of_a = {0}, of_b = {0};
    return a == b || (lazy.inner->info(a, &of_a) == DP_OK && lazy.inner->info(b, &of_b) == DP_OK &&
                      of_a.memory > 0 && of_a.memory == of_b.memory);
}

static inline bool lazy_owns(dp_dev *dev, const void *data)
{
    bool found = false;
    pthread_mutex_lock(&lazy.mutex);
    for (const lazy_block *block = lazy.blocks; block != NULL && !found; block = block->next)
        found = (uintptr_t)data - (uintptr_t)block->data < block->bytes &&
                lazy_one_memory(dev, (dp_dev *)(uintptr_t)block->dev);
    pthread_mutex_unlock(&lazy.mutex);
    return found;
}

static inline dp_status lazy_stream_create(dp_dev *dev, int priority, dp_stream **out)
{
    lazy_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "lazy: no memory");
    dp_status status = lazy.inner->stream_create(dev, priority, &stream->inner);
    if (status != DP_OK) {
        free(stream);
        return status;
    }
    stream->base.dev = dev;
    pthread_mutex_lock(&lazy.mutex);
    stream->next = lazy.streams;
    lazy.streams = stream;
    pthread_mutex_unlock(&lazy.mutex);
    *out = &stream->base;
    return DP_OK;
}

static inline dp_status lazy_stream_sync(dp_stream *base)
{
    lazy_stream *stream = (lazy_stream *)base;
    pthread_mutex_lock(&lazy.mutex);
    dp_status status = lazy_do(stream, stream->first + stream->count);
    pthread_mutex_unlock(&lazy.mutex);
    return status;
}

static inline void lazy_stream_destroy(dp_stream *base)
{
    lazy_stream *stream = (lazy_stream *)base;
    do /* what has failed was told */
        (void)lazy_stream_sync(base);
    while (stream->count > 0);
    lazy.inner->stream_destroy(stream->inner);
}

static inline dp_status lazy_event_create(dp_dev *dev, dp_event **out)
{
    lazy_event *event = calloc(1, sizeof(*event));
    if (event == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "lazy: no memory");
    event->base.dev = dev;
    *out = &event->base;
    return DP_OK;
}

static inline void lazy_event_destroy(dp_event *event)
{
    free(event);
}

static inline dp_status lazy_event_record(dp_event *base, dp_stream *stream)
{
    lazy_event *event = (lazy_event *)base;
    pthread_mutex_lock(&lazy.mutex);
    event->stream = (lazy_stream *)stream;
    event->mark = event->stream->first + event->stream->count;
    pthread_mutex_unlock(&lazy.mutex);
    return DP_OK;
}

static inline dp_status lazy_event_wait(dp_stream *stream, dp_event *base)
{
    lazy_event *event = (lazy_event *)base;
    pthread_mutex_lock(&lazy.mutex);
    lazy_op op = {.method = DECO_event_wait, .other = event->stream, .mark = event->mark};
    pthread_mutex_unlock(&lazy.mutex);
    return op.other != NULL ? lazy_put(stream, op) : DP_OK;
}

static inline dp_status lazy_event_sync(dp_event *base)
{
    lazy_event *event = (lazy_event *)base;
    pthread_mutex_lock(&lazy.mutex);
    dp_status status = event->stream != NULL ? lazy_do(event->stream, event->mark) : DP_OK;
    pthread_mutex_unlock(&lazy.mutex);
    return status;
}

static inline dp_status lazy_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    return lazy_put(stream,
                    (lazy_op){.method = DECO_copy_in, .dst = dst, .src = host, .bytes = bytes});
}

static inline dp_status lazy_copy_out(dp_stream *stream, void *host, const void *src, size_t bytes)
{
    return lazy_put(stream,
                    (lazy_op){.method = DECO_copy_out, .dst = host, .src = src, .bytes = bytes});
}

static inline dp_status lazy_copy(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    return lazy_put(stream, (lazy_op){.method = DECO_copy, .dst = dst, .src = src, .bytes = bytes});
}

static inline dp_status lazy_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev,
                                       const void *src, size_t bytes)
{
    return lazy_put(
        stream,
        (lazy_op){
            .method = DECO_peer_copy, .dst = dst, .src = src, .src_dev = src_dev, .bytes = bytes});
}

static inline dp_status lazy_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch,
                                     const void *src, size_t src_pitch, size_t row_bytes,
                                     size_t rows)
{
    return lazy_put(stream, (lazy_op){.method = DECO_copy_2d,
                                      .dst = dst,
                                      .dst_pitch = dst_pitch,
                                      .src = src,
                                      .src_pitch = src_pitch,
                                      .bytes = row_bytes,
                                      .rows = rows});
}

/* The arguments die when the call returns, and what is not to be had must be refused by then: all
   but what numbers.h computes. */
static inline dp_status lazy_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel > DP_KERNEL_TOTAL || args->flags != 0)
        return dp_error(DP_ERR_UNSUPPORTED, "lazy: no kernel %d of flags %u", (int)args->kernel,
                        args->flags);
    const int64_t *const dims[] = {args->shape, args->out_stride, args->in_shape, args->in_stride};
    lazy_args *kernel = calloc(1, sizeof(*kernel));
    CHECK(kernel != NULL && args->out_count <= LAZY_OPERANDS && args->in_count <= LAZY_OPERANDS);
    kernel->args = *args;
    memcpy(kernel->out, args->out, args->out_count * sizeof(kernel->out[0]));
    for (size_t k = 0; k < args->in_count; k++)
        kernel->in[k] = args->in[k];
    for (int i = 0; i < 4 && args->ndim > 0; i++) {
        if (dims[i] != NULL)
            memcpy(kernel->dims[i], dims[i], (size_t)args->ndim * sizeof(int64_t));
    }
    return lazy_put(stream, (lazy_op){.method = DECO_kernel, .kernel = kernel});
}

static inline dp_status lazy_host_call(dp_stream *stream, void (*fn)(void *user), void *user)
{
    return lazy_put(stream, (lazy_op){.method = DECO_host_call, .fn = fn, .dst = user});
}

static inline const dp_device_ops *lazy_device(const dp_device_ops *inner)
{
    lazy.inner = inner;
    lazy.ops = *inner;
    lazy.ops.head.size = sizeof(lazy.ops);
    lazy.ops.open = lazy_open;
    lazy.ops.close = lazy_close;
    lazy.ops.alloc = lazy_alloc;
    lazy.ops.free = lazy_free;
    lazy.ops.owns = lazy_owns;
    lazy.ops.host_call = lazy_host_call;
    lazy.ops.stream_create = lazy_stream_create;
    lazy.ops.stream_destroy = lazy_stream_destroy;
    lazy.ops.stream_sync = lazy_stream_sync;
    lazy.ops.event_create = lazy_event_create;
    lazy.ops.event_destroy = lazy_event_destroy;
    lazy.ops.event_record = lazy_event_record;
    lazy.ops.event_wait = lazy_event_wait;
    lazy.ops.event_sync = lazy_event_sync;
    lazy.ops.copy_in = lazy_copy_in;
    lazy.ops.copy_out = lazy_copy_out;
    lazy.ops.copy = lazy_copy;
    lazy.ops.peer_copy = DP_HAS(dp_device_ops, inner, peer_copy) ? lazy_peer_copy : NULL;
    lazy.ops.copy_2d = DP_HAS(dp_device_ops, inner, copy_2d) ? lazy_copy_2d : NULL;
    lazy.ops.kernel = DP_HAS(dp_device_ops, inner, kernel) ? lazy_kernel : NULL;
    return &lazy.ops;
}

#endif /* LAZY_H */
