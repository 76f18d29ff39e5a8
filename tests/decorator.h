/* decorator.h - tables around other tables, which the core cannot tell from them.

       const dp_device_ops *const backends[] = {decorate_device(dp_cpu()), NULL};
       deco.fail_at = 3, deco.fail_with = DP_ERR_DEVICE;
       ...
       CHECK_DECORATOR();

   They log every call in order, fail one of them on demand, know what is alive, and hold the core
   to its side of the contract: deco.breach says where it first broke it. A test hides a method by
   changing deco.device or deco.coll before it opens a context. One pair of tables a test file. */

#ifndef DECORATOR_H
#define DECORATOR_H

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "test.h"

/* clang-format off */
#define DECO_METHODS(X)                                                                            \
    X(count) X(open) X(close) X(info) X(alloc) X(free) X(stream_create) X(stream_destroy)          \
    X(stream_sync) X(event_create) X(event_destroy) X(event_record) X(event_wait) X(event_sync)    \
    X(copy_in) X(copy_out) X(copy) X(host_alloc) X(host_free) X(copy_2d) X(peer_copy) X(kernel)    \
    X(host_call)                                                                                   \
    X(coll_fits) X(coll_open) X(coll_close) X(coll_run) X(coll_abort) X(coll_poll)
/* clang-format on */
#define DECO_ENUM(name) DECO_##name,
#define DECO_NAME(name) #name,

typedef enum deco_method { DECO_METHODS(DECO_ENUM) DECO_METHOD_COUNT } deco_method;

typedef enum deco_kind {
    DECO_DEV,
    DECO_STREAM,
    DECO_EVENT,
    DECO_BLOCK,
    DECO_HOST_BLOCK,
    DECO_COMM
} deco_kind;

typedef struct deco_object {
    deco_kind kind;
    const dp_dev *dev; /* whose it is */
    const void *at;
    size_t bytes;
    bool busy; /* a stream in a call */
} deco_object;

enum { DECO_MAX_OBJECTS = 4096, DECO_MAX_LOG = 65536 };

typedef struct decorator {
    dp_device_ops device; /* what the core sees */
    dp_coll_ops coll;
    const dp_device_ops *inner;
    const dp_coll_ops *inner_coll;
    bool host_memory; /* of the inner device */

    long fail_at; /* this call fails, of those that can; the first is 1, 0 = none */
    dp_status fail_with;
    bool fired;
    deco_method fired_in;
    bool then_waits_fail; /* after that call every wait for a device fails too */

    pthread_mutex_t mutex;
    long call_count;  /* of those that can fail */
    deco_method *log; /* DECO_MAX_LOG */
    size_t log_count;
    deco_object *objects; /* DECO_MAX_OBJECTS */
    size_t object_count;
    char breach[256];
} decorator;

static decorator deco;

static inline const char *deco_name(deco_method method)
{
    static const char *const names[] = {DECO_METHODS(DECO_NAME)};
    return names[method];
}

/* How often a method was called. */
static inline int deco_calls(deco_method method)
{
    int count = 0;
    for (size_t i = 0; i < deco.log_count; i++)
        count += deco.log[i] == method;
    return count;
}

/* No breach, and all was given back. */
#define CHECK_DECORATOR()                                                                          \
    do {                                                                                           \
        CHECK_STR(deco.breach, "");                                                                \
        CHECK_INT(deco.object_count, 0);                                                           \
    } while (0)

/* ---- what is alive; callers hold the mutex --------------------------------------------------- */

DP_PRINTF(1, 2) static inline void deco_breach(const char *format, ...)
{
    va_list args;
    if (deco.breach[0] != '\0')
        return;
    va_start(args, format);
    vsnprintf(deco.breach, sizeof(deco.breach), format, args);
    va_end(args);
}

static inline deco_object *deco_find(deco_kind kind, const void *at)
{
    for (size_t i = 0; i < deco.object_count; i++) {
        if (deco.objects[i].kind == kind && deco.objects[i].at == at)
            return &deco.objects[i];
    }
    return NULL;
}

/* ---- what is alive; callers do not hold it --------------------------------------------------- */

static inline void deco_born(deco_kind kind, const dp_dev *dev, const void *at, size_t bytes)
{
    pthread_mutex_lock(&deco.mutex);
    if (deco.object_count == DECO_MAX_OBJECTS)
        deco_breach("more than %d objects", DECO_MAX_OBJECTS);
    else
        deco.objects[deco.object_count++] =
            (deco_object){.kind = kind, .dev = dev, .at = at, .bytes = bytes};
    pthread_mutex_unlock(&deco.mutex);
}

static inline void deco_died(deco_method method, deco_kind kind, const void *at, size_t bytes)
{
    pthread_mutex_lock(&deco.mutex);
    deco_object *object = deco_find(kind, at);
    if (object == NULL)
        deco_breach("%s: not alive", deco_name(method));
    else if (object->bytes != bytes)
        deco_breach("%s: %zu bytes, it has %zu", deco_name(method), bytes, object->bytes);
    else
        *object = deco.objects[--deco.object_count];
    for (size_t i = 0; i < deco.object_count && kind == DECO_DEV; i++) {
        if (deco.objects[i].dev == at)
            deco_breach("close: kind %d is still alive", (int)deco.objects[i].kind);
    }
    pthread_mutex_unlock(&deco.mutex);
}

/* Devices with the same number, above 0, have one memory. */
static inline size_t deco_memory(const dp_dev *dev)
{
    for (size_t i = 0; i < deco.object_count; i++)
        if (deco.objects[i].kind == DECO_DEV && deco.objects[i].at == dev)
            return deco.objects[i].bytes;
    return 0;
}

static inline bool deco_in_block(const dp_dev *dev, const void *at, size_t bytes)
{
    size_t memory = deco_memory(dev);
    for (size_t i = 0; i < deco.object_count; i++) {
        const deco_object *o = &deco.objects[i];
        uintptr_t offset = (uintptr_t)at - (uintptr_t)o->at;
        if (o->kind == DECO_BLOCK && offset < o->bytes && bytes <= o->bytes - offset)
            return o->dev == dev || (memory > 0 && deco_memory(o->dev) == memory);
    }
    return false;
}

/* The bytes are memory of the device. */
static inline void deco_range(deco_method method, const dp_dev *dev, const void *at, size_t bytes)
{
    pthread_mutex_lock(&deco.mutex);
    if (bytes == 0)
        deco_breach("%s: nothing to do", deco_name(method));
    if (!deco.host_memory && !deco_in_block(dev, at, bytes))
        deco_breach("%s: %zu bytes outside of the device's memory", deco_name(method), bytes);
    pthread_mutex_unlock(&deco.mutex);
}

static inline void deco_expect(deco_method method, bool good, const char *what)
{
    pthread_mutex_lock(&deco.mutex);
    if (!good)
        deco_breach("%s: %s", deco_name(method), what);
    pthread_mutex_unlock(&deco.mutex);
}

/* The device whose memory this is, NULL if it is none's. */
static inline const dp_dev *deco_owner(const void *at)
{
    const deco_object *block = NULL;
    pthread_mutex_lock(&deco.mutex);
    for (size_t i = 0; i < deco.object_count; i++) {
        if (deco.objects[i].kind == DECO_BLOCK &&
            (uintptr_t)at - (uintptr_t)deco.objects[i].at < deco.objects[i].bytes)
            block = &deco.objects[i];
    }
    const dp_dev *dev = block != NULL ? block->dev : NULL;
    pthread_mutex_unlock(&deco.mutex);
    return dev;
}

/* ---- every call ------------------------------------------------------------------------------ */

static inline void deco_log(deco_method method)
{
    if (deco.log_count < DECO_MAX_LOG)
        deco.log[deco.log_count++] = method;
}

/* Of a call that cannot fail. */
static inline void deco_note(deco_method method)
{
    pthread_mutex_lock(&deco.mutex);
    deco_log(method);
    pthread_mutex_unlock(&deco.mutex);
}

/* Of a call that can, on a device (or NULL) and a stream of it (or NULL). */
static inline dp_status deco_enter(deco_method method, const dp_dev *dev, const dp_stream *stream)
{
    pthread_mutex_lock(&deco.mutex);
    deco_object *entry = stream != NULL ? deco_find(DECO_STREAM, stream) : NULL;
    deco_log(method);
    if (dev != NULL && deco_find(DECO_DEV, dev) == NULL)
        deco_breach("%s: the device is not open", deco_name(method));
    if (stream != NULL && (entry == NULL || entry->busy))
        deco_breach("%s: the stream %s", deco_name(method),
                    entry == NULL ? "does not exist" : "is in use by another thread");
    bool waits = method == DECO_stream_sync || method == DECO_event_sync;
    bool fails = ++deco.call_count == deco.fail_at;
    if (fails) {
        deco.fired = true;
        deco.fired_in = method;
    }
    fails = fails || (waits && deco.fired && deco.then_waits_fail);
    if (entry != NULL && !fails)
        entry->busy = true;
    pthread_mutex_unlock(&deco.mutex);
    return fails ? dp_error(deco.fail_with, "decorator: %s fails", deco_name(method)) : DP_OK;
}

static inline dp_status deco_leave(const dp_stream *stream, dp_status status)
{
    pthread_mutex_lock(&deco.mutex);
    deco_object *entry = deco_find(DECO_STREAM, stream);
    if (entry != NULL)
        entry->busy = false;
    pthread_mutex_unlock(&deco.mutex);
    return status;
}

/* ---- dp_device_ops --------------------------------------------------------------------------- */

static inline dp_status deco_count(const dp_host *host, int *out)
{
    dp_status status = deco_enter(DECO_count, NULL, NULL);
    return status != DP_OK ? status : deco.inner->count(host, out);
}

static inline dp_status deco_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = deco_enter(DECO_open, NULL, NULL);
    if (status == DP_OK)
        status = deco.inner->open(host, index, out);
    if (status == DP_OK) {
        dp_device_info info = {0};
        if (deco.inner->info(*out, &info) == DP_OK)
            deco.host_memory = info.host_memory;
        (*out)->ops = &deco.device;
        deco_born(DECO_DEV, *out, *out, (size_t)info.memory); /* see deco_memory */
    }
    return status;
}

static inline void deco_close(dp_dev *dev)
{
    deco_note(DECO_close);
    deco_died(DECO_close, DECO_DEV, dev, deco_memory(dev));
    dev->ops = deco.inner;
    deco.inner->close(dev);
}

static inline dp_status deco_info(dp_dev *dev, dp_device_info *out)
{
    dp_status status = deco_enter(DECO_info, dev, NULL);
    return status != DP_OK ? status : deco.inner->info(dev, out);
}

static inline dp_status deco_alloc(dp_dev *dev, size_t bytes, void **out)
{
    deco_expect(DECO_alloc, bytes > 0, "no bytes");
    dp_status status = deco_enter(DECO_alloc, dev, NULL);
    if (status == DP_OK)
        status = deco.inner->alloc(dev, bytes, out);
    if (status == DP_OK)
        deco_born(DECO_BLOCK, dev, *out, bytes);
    return status;
}

static inline void deco_free(dp_dev *dev, void *data, size_t bytes)
{
    deco_note(DECO_free);
    deco_died(DECO_free, DECO_BLOCK, data, bytes);
    deco.inner->free(dev, data, bytes);
}

static inline dp_status deco_stream_create(dp_dev *dev, int priority, dp_stream **out)
{
    deco_expect(DECO_stream_create, priority == 0 || priority == 1, "priority");
    dp_status status = deco_enter(DECO_stream_create, dev, NULL);
    if (status == DP_OK)
        status = deco.inner->stream_create(dev, priority, out);
    if (status == DP_OK)
        deco_born(DECO_STREAM, dev, *out, 0);
    return status;
}

static inline void deco_stream_destroy(dp_stream *stream)
{
    deco_note(DECO_stream_destroy);
    deco_died(DECO_stream_destroy, DECO_STREAM, stream, 0);
    deco.inner->stream_destroy(stream);
}

static inline dp_status deco_stream_sync(dp_stream *stream)
{
    dp_status status = deco_enter(DECO_stream_sync, stream->dev, NULL); /* any thread may wait */
    return status != DP_OK ? status : deco.inner->stream_sync(stream);
}

static inline dp_status deco_event_create(dp_dev *dev, dp_event **out)
{
    dp_status status = deco_enter(DECO_event_create, dev, NULL);
    if (status == DP_OK)
        status = deco.inner->event_create(dev, out);
    if (status == DP_OK)
        deco_born(DECO_EVENT, dev, *out, 0);
    return status;
}

static inline void deco_event_destroy(dp_event *event)
{
    deco_note(DECO_event_destroy);
    deco_died(DECO_event_destroy, DECO_EVENT, event, 0);
    deco.inner->event_destroy(event);
}

static inline dp_status deco_event_record(dp_event *event, dp_stream *stream)
{
    deco_expect(DECO_event_record, event->dev == stream->dev, "event of another device");
    dp_status status = deco_enter(DECO_event_record, stream->dev, stream);
    return status != DP_OK ? status : deco_leave(stream, deco.inner->event_record(event, stream));
}

static inline dp_status deco_event_wait(dp_stream *stream, dp_event *event)
{
    deco_expect(DECO_event_wait, event->dev->ops == &deco.device, "event of another table");
    dp_status status = deco_enter(DECO_event_wait, stream->dev, stream);
    return status != DP_OK ? status : deco_leave(stream, deco.inner->event_wait(stream, event));
}

static inline dp_status deco_event_sync(dp_event *event)
{
    dp_status status = deco_enter(DECO_event_sync, event->dev, NULL);
    return status != DP_OK ? status : deco.inner->event_sync(event);
}

static inline dp_status deco_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    deco_range(DECO_copy_in, stream->dev, dst, bytes);
    dp_status status = deco_enter(DECO_copy_in, stream->dev, stream);
    return status != DP_OK ? status
                           : deco_leave(stream, deco.inner->copy_in(stream, dst, host, bytes));
}

static inline dp_status deco_copy_out(dp_stream *stream, void *host, const void *src, size_t bytes)
{
    deco_range(DECO_copy_out, stream->dev, src, bytes);
    dp_status status = deco_enter(DECO_copy_out, stream->dev, stream);
    return status != DP_OK ? status
                           : deco_leave(stream, deco.inner->copy_out(stream, host, src, bytes));
}

static inline dp_status deco_copy(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    uintptr_t a = (uintptr_t)dst, b = (uintptr_t)src;
    deco_range(DECO_copy, stream->dev, dst, bytes);
    deco_range(DECO_copy, stream->dev, src, bytes);
    deco_expect(DECO_copy, a == b || (a < b ? b - a : a - b) >= bytes, "ranges overlap");
    dp_status status = deco_enter(DECO_copy, stream->dev, stream);
    return status != DP_OK ? status : deco_leave(stream, deco.inner->copy(stream, dst, src, bytes));
}

static inline dp_status deco_host_alloc(dp_dev *dev, size_t bytes, void **out)
{
    deco_expect(DECO_host_alloc, bytes > 0, "no bytes");
    dp_status status = deco_enter(DECO_host_alloc, dev, NULL);
    if (status == DP_OK)
        status = deco.inner->host_alloc(dev, bytes, out);
    if (status == DP_OK)
        deco_born(DECO_HOST_BLOCK, dev, *out, bytes);
    return status;
}

static inline void deco_host_free(dp_dev *dev, void *data, size_t bytes)
{
    deco_note(DECO_host_free);
    deco_died(DECO_host_free, DECO_HOST_BLOCK, data, bytes);
    deco.inner->host_free(dev, data, bytes);
}

static inline dp_status deco_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch,
                                     const void *src, size_t src_pitch, size_t row_bytes,
                                     size_t rows)
{
    deco_expect(DECO_copy_2d, rows > 0 && dst_pitch >= row_bytes && src_pitch >= row_bytes, "rows");
    deco_range(DECO_copy_2d, stream->dev, dst, (rows - 1) * dst_pitch + row_bytes);
    deco_range(DECO_copy_2d, stream->dev, src, (rows - 1) * src_pitch + row_bytes);
    dp_status status = deco_enter(DECO_copy_2d, stream->dev, stream);
    return status != DP_OK ? status
                           : deco_leave(stream, deco.inner->copy_2d(stream, dst, dst_pitch, src,
                                                                    src_pitch, row_bytes, rows));
}

static inline dp_status deco_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev,
                                       const void *src, size_t bytes)
{
    deco_expect(DECO_peer_copy, src_dev != stream->dev && src_dev->ops == stream->dev->ops, "peer");
    deco_range(DECO_peer_copy, stream->dev, dst, bytes);
    deco_range(DECO_peer_copy, src_dev, src, bytes);
    dp_status status = deco_enter(DECO_peer_copy, stream->dev, stream);
    return status != DP_OK
               ? status
               : deco_leave(stream, deco.inner->peer_copy(stream, dst, src_dev, src, bytes));
}

/* Bytes of an operand, from its first element to behind its last. */
static inline size_t deco_operand(const dp_kernel_args *args, bool input)
{
    bool pad = args->kernel == DP_KERNEL_PAD, cast = args->kernel == DP_KERNEL_CAST;
    const int64_t *shape = input && pad ? args->in_shape : args->shape;
    const int64_t *stride = input ? args->in_stride : args->out_stride;
    size_t bytes = dp_dtype_bytes(input && cast ? args->in_dtype : args->dtype);
    int64_t last = 0;
    if (args->kernel == DP_KERNEL_STATS && !input)
        return 2 * sizeof(double);
    if (args->kernel == DP_KERNEL_TOTAL && !input)
        return sizeof(double);
    if (args->kernel != DP_KERNEL_COPY && !(input && pad))
        return args->count * bytes;
    for (int d = 0; d < args->ndim; d++)
        last += (shape[d] - 1) * stride[d];
    return (size_t)(last + 1) * bytes;
}

static inline void deco_check_kernel(const dp_dev *dev, const dp_kernel_args *args)
{
    deco_expect(DECO_kernel, args->count > 0 && args->out_count > 0, "nothing to do");
    deco_expect(DECO_kernel, args->op != DP_OP_MEAN, "op is MEAN");
    for (size_t k = 0; k < args->out_count; k++)
        deco_range(DECO_kernel, dev, args->out[k], deco_operand(args, false));
    for (size_t k = 0; k < args->in_count; k++)
        deco_range(DECO_kernel, dev, args->in[k], deco_operand(args, true));
}

static inline dp_status deco_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    deco_check_kernel(stream->dev, args);
    dp_status status = deco_enter(DECO_kernel, stream->dev, stream);
    return status != DP_OK ? status : deco_leave(stream, deco.inner->kernel(stream, args));
}

static inline dp_status deco_host_call(dp_stream *stream, void (*fn)(void *user), void *user)
{
    dp_status status = deco_enter(DECO_host_call, stream->dev, stream);
    return status != DP_OK ? status : deco_leave(stream, deco.inner->host_call(stream, fn, user));
}

static inline bool deco_owns(dp_dev *dev, const void *data)
{
    return deco.inner->owns(dev, data);
}

/* ---- dp_coll_ops ----------------------------------------------------------------------------- */

static inline bool deco_coll_fits(const dp_comm_config *config)
{
    deco_note(DECO_coll_fits);
    for (int i = 0; i < config->local_count; i++)
        deco_expect(DECO_coll_fits, config->local[i] != NULL && config->local[i]->ops != NULL,
                    "no device of a local rank");
    return deco.inner_coll->fits(config);
}

static inline dp_status deco_coll_open(const dp_host *host, const dp_comm_config *config,
                                       dp_comm **out)
{
    dp_status status = deco_enter(DECO_coll_open, NULL, NULL);
    if (status == DP_OK)
        status = deco.inner_coll->open(host, config, out);
    if (status == DP_OK) {
        (*out)->ops = &deco.coll;
        deco_born(DECO_COMM, NULL, *out, 0);
    }
    return status;
}

static inline void deco_coll_close(dp_comm *comm)
{
    deco_note(DECO_coll_close);
    deco_died(DECO_coll_close, DECO_COMM, comm, 0);
    comm->ops = deco.inner_coll;
    deco.inner_coll->close(comm);
}

static inline dp_status deco_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    deco_expect(DECO_coll_run, call->count > 0, "nothing to do");
    deco_expect(DECO_coll_run, dp_dtype_bytes(call->dtype) > 0, "no dtype");
    deco_expect(DECO_coll_run, call->local[0].stream != NULL, "no stream");
    deco_expect(DECO_coll_run, (deco.inner_coll->verbs >> call->verb & 1) != 0, "no such verb");
    DP_TRY(deco_enter(DECO_coll_run, NULL, NULL));
    return deco.inner_coll->run(comm, call);
}

static inline void deco_coll_abort(dp_comm *comm)
{
    deco_note(DECO_coll_abort);
    deco.inner_coll->abort(comm);
}

static inline dp_status deco_coll_poll(dp_comm *comm)
{
    dp_status status = deco_enter(DECO_coll_poll, NULL, NULL);
    return status != DP_OK ? status : deco.inner_coll->poll(comm);
}

/* ---- the tables ------------------------------------------------------------------------------ */

/* Forget all calls and what went wrong, and fail the nth from now on. */
static inline void deco_reset(long fail_at, dp_status fail_with)
{
    deco.fail_at = fail_at;
    deco.fail_with = fail_with;
    deco.fired = false;
    deco.then_waits_fail = false;
    deco.call_count = 0;
    deco.log_count = 0;
    deco.object_count = 0;
    deco.breach[0] = '\0';
}

static inline void deco_begin(void)
{
    pthread_mutex_init(&deco.mutex, NULL);
    if (deco.log == NULL) {
        deco.log = test_room(DECO_MAX_LOG * sizeof *deco.log);
        deco.objects = test_room(DECO_MAX_OBJECTS * sizeof *deco.objects);
    }
}

static inline const dp_device_ops *decorate_device(const dp_device_ops *inner)
{
    deco_begin();
    deco.inner = inner;
    deco.device = (dp_device_ops){
        .head = DP_TABLE(dp_device_ops),
        .name = inner->name,
        .count = deco_count,
        .open = deco_open,
        .close = deco_close,
        .info = deco_info,
        .alloc = deco_alloc,
        .free = deco_free,
        .stream_create = deco_stream_create,
        .stream_destroy = deco_stream_destroy,
        .stream_sync = deco_stream_sync,
        .event_create = deco_event_create,
        .event_destroy = deco_event_destroy,
        .event_record = deco_event_record,
        .event_wait = deco_event_wait,
        .event_sync = deco_event_sync,
        .copy_in = deco_copy_in,
        .copy_out = deco_copy_out,
        .copy = deco_copy,
        .host_alloc = DP_HAS(dp_device_ops, inner, host_alloc) ? deco_host_alloc : NULL,
        .host_free = DP_HAS(dp_device_ops, inner, host_free) ? deco_host_free : NULL,
        .copy_2d = DP_HAS(dp_device_ops, inner, copy_2d) ? deco_copy_2d : NULL,
        .peer_copy = DP_HAS(dp_device_ops, inner, peer_copy) ? deco_peer_copy : NULL,
        .kernel = DP_HAS(dp_device_ops, inner, kernel) ? deco_kernel : NULL,
        .owns = DP_HAS(dp_device_ops, inner, owns) ? deco_owns : NULL,
        .host_call = DP_HAS(dp_device_ops, inner, host_call) ? deco_host_call : NULL,
    };
    deco_reset(0, DP_OK);
    return &deco.device;
}

static inline const dp_coll_ops *decorate_coll(const dp_coll_ops *inner)
{
    deco_begin();
    deco.inner_coll = inner;
    deco.coll = (dp_coll_ops){
        .head = DP_TABLE(dp_coll_ops),
        .name = inner->name,
        .fits = deco_coll_fits,
        .open = deco_coll_open,
        .close = deco_coll_close,
        .verbs = inner->verbs,
        .run = deco_coll_run,
        .abort = DP_HAS(dp_coll_ops, inner, abort) ? deco_coll_abort : NULL,
        .poll = DP_HAS(dp_coll_ops, inner, poll) ? deco_coll_poll : NULL,
    };
    return &deco.coll;
}

#endif /* DECORATOR_H */
