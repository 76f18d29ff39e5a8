/* conform_tables.h - tables for `make conform` to try itself on.

     lazy_table     asynchronous, memory that the host cannot reach, every optional method
     shared_table   the same, and all devices have one memory
     refusing_table the same as lazy_table, whose devices cannot copy from each other and say so
     broken_table   lazy_table with the bug that $CONFORM_BUG names
     broken_coll    NULL, or the CPU's collectives with such a bug
     named_table    that which $CONFORM_TABLE names, so that one binary has them all */

#ifndef CONFORM_TABLES_H
#define CONFORM_TABLES_H

#include <math.h>
#include <stdlib.h>
#include "lazy.h"
#include "reluctant.h"

static inline const dp_device_ops *lazy_table(void)
{
    return lazy_device(reluctant_device(HAS_ALL, ALL_KERNELS));
}

static inline const dp_device_ops *shared_table(void)
{
    return lazy_device(reluctant_one_memory(HAS_ALL, ALL_KERNELS));
}

static dp_device_ops refusing_ops;

static inline dp_status refusing_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev,
                                           const void *src, size_t bytes)
{
    (void)stream, (void)dst, (void)src_dev, (void)src, (void)bytes;
    return dp_error(DP_ERR_UNSUPPORTED, "these devices do not reach each other");
}

static inline const dp_device_ops *refusing_table(void)
{
    refusing_ops = *lazy_table();
    refusing_ops.peer_copy = refusing_peer_copy;
    return &refusing_ops;
}

/* ---- bugs, and the test that finds each ------------------------------------------------------ */

#define BROKEN_BUGS(X)                                                                             \
    X(copies_stop_one_byte_short, "device/copies_move_bytes")                                      \
    X(event_wait_does_nothing, "device/streams_and_events_order")                                  \
    X(event_sync_does_nothing, "device/streams_and_events_order")                                  \
    X(stream_sync_does_nothing, "device/copies_move_bytes")                                        \
    X(copy_in_keeps_its_source, "device/sources_end_with_a_sync")                                  \
    X(kernel_keeps_its_arguments, "device/axpby")                                                  \
    X(kernel_rounds_once, "device/axpby")                                                          \
    X(kernel_keeps_gradients, "train_kernels/gradients_become_zero_behind_a_step")                 \
    X(alloc_is_not_aligned, "device/blocks_are_apart")                                             \
    X(peer_copy_to_the_wrong_place, "device/devices_copy_from_each_other")                         \
    X(copy_2d_knows_one_pitch, "device/rows_are_copied")                                           \
    X(open_takes_any_index, "device/devices_are_counted_and_open")                                 \
    X(streams_are_not_freed, "device/table_is_whole")                                              \
    X(owns_everything, "device/owns_what_it_gave")                                                 \
    X(host_calls_are_forgotten, "device/host_calls_come_in_their_turn")                            \
    X(one_memory_is_several, "device/one_memory_is_shared")                                        \
    X(memory_is_not_unified, "device/unified_memory_is_at_hand_after_a_wait")                      \
    X(mean_is_a_sum, "coll/all_reduce")

static dp_device_ops broken_ops;
static dp_coll_ops broken_coll_ops;

static inline bool broken_by(const char *bug)
{
    const char *name = getenv("CONFORM_BUG");
    return name != NULL && strcmp(name, bug) == 0;
}

static inline dp_status broken_copy_out(dp_stream *stream, void *host, const void *src,
                                        size_t bytes)
{
    return bytes > 1 ? lazy_copy_out(stream, host, src, bytes - 1) : DP_OK;
}

static inline dp_status broken_info(dp_dev *dev, dp_device_info *out)
{
    DP_TRY(toy_device()->info(dev, out));
    out->unified = true;
    return DP_OK;
}

static inline dp_status broken_event_wait(dp_stream *stream, dp_event *event)
{
    (void)stream, (void)event;
    return DP_OK;
}

static inline dp_status broken_event_sync(dp_event *event)
{
    (void)event;
    return DP_OK;
}

static inline dp_status broken_stream_sync(dp_stream *stream)
{
    (void)stream;
    return DP_OK;
}

static struct { /* what is put off until somebody reads */
    dp_stream *stream;
    void *dst;
    const void *host;
    size_t bytes;
    dp_kernel_args args;
    bool copies, computes;
} broken_late;

static inline dp_status broken_late_copy_in(dp_stream *stream, void *dst, const void *host,
                                            size_t bytes)
{
    broken_late.copies = true;
    broken_late.stream = stream;
    broken_late.dst = dst;
    broken_late.host = host;
    broken_late.bytes = bytes;
    return DP_OK;
}

static inline dp_status broken_late_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    broken_late.computes = true;
    broken_late.stream = stream;
    broken_late.args = *args;
    return DP_OK;
}

static inline dp_status broken_late_copy_out(dp_stream *stream, void *host, const void *src,
                                             size_t bytes)
{
    if (broken_late.copies)
        CHECK_OK(
            lazy_copy_in(broken_late.stream, broken_late.dst, broken_late.host, broken_late.bytes));
    if (broken_late.computes)
        CHECK_OK(lazy_kernel(broken_late.stream, &broken_late.args));
    broken_late.copies = broken_late.computes = false;
    return lazy_copy_out(stream, host, src, bytes);
}

/* a * x + b * y with one rounding too few. */
static inline dp_status broken_rounding(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel != DP_KERNEL_AXPBY || args->dtype != DP_F32 || args->in_count != 2)
        return reluctant_kernel(stream, args);
    const float *x = toy_flip(stream->dev, args->in[0]), *y = toy_flip(stream->dev, args->in[1]);
    float *out = toy_flip(stream->dev, args->out[0]);
    for (size_t i = 0; i < args->count; i++)
        out[i] = fmaf((float)args->alpha, x[i], (float)args->beta * y[i]);
    return DP_OK;
}

/* x - g * lr, and g stays. */
static inline dp_status broken_step(dp_stream *stream, const dp_kernel_args *args)
{
    if (args->kernel != DP_KERNEL_SGD || args->flags != DP_KERNEL_ZERO_GRAD ||
        args->dtype != DP_F32 || args->in_count + args->out_count > 2 || args->numbers[1] != 0)
        return lazy_kernel(stream, args);
    CHECK_OK(lazy_stream_sync(stream));
    const float *grad = toy_flip(stream->dev, args->in[0]);
    float *x = toy_flip(stream->dev, args->out[0]);
    for (size_t i = 0; i < args->count; i++) {
        const float step = grad[i] * (float)args->numbers[0];
        x[i] -= step;
    }
    return DP_OK;
}

static inline dp_status broken_alloc(dp_dev *dev, size_t bytes, void **out)
{
    dp_status status = bytes < SIZE_MAX - 64 ? lazy_alloc(dev, bytes + 64, out) : DP_ERR_NO_MEMORY;
    if (status == DP_OK)
        *out = (char *)*out + 8;
    return status;
}

static inline void broken_free(dp_dev *dev, void *data, size_t bytes)
{
    lazy_free(dev, (char *)data - 8, bytes + 64);
}

static inline dp_status broken_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev,
                                         const void *src, size_t bytes)
{
    return bytes > 1 ? lazy_peer_copy(stream, (char *)dst + 1, src_dev, src, bytes - 1) : DP_OK;
}

static inline dp_status broken_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch,
                                       const void *src, size_t src_pitch, size_t row_bytes,
                                       size_t rows)
{
    (void)src_pitch;
    return lazy_copy_2d(stream, dst, dst_pitch, src, dst_pitch, row_bytes, rows);
}

static inline dp_status broken_open(const dp_host *host, int index, dp_dev **out)
{
    return lazy_open(host, index < 0 ? 0 : index, out);
}

static inline void broken_stream_destroy(dp_stream *stream)
{
    CHECK_OK(lazy_stream_sync(stream));
}

static inline bool broken_owns(dp_dev *dev, const void *data)
{
    return dev != NULL && data != NULL;
}

static inline dp_status broken_host_call(dp_stream *stream, void (*fn)(void *user), void *user)
{
    (void)stream;
    (void)fn;
    (void)user;
    return DP_OK;
}

static inline dp_status broken_run(dp_comm *comm, const dp_coll_call *call)
{
    dp_coll_call other = *call;
    other.op = call->op == DP_OP_MEAN ? DP_OP_SUM : call->op;
    return dp_cpu_coll()->run(comm, &other);
}

static inline void broken_late_ops(void)
{
    if (broken_by("copy_in_keeps_its_source"))
        broken_ops.copy_in = broken_late_copy_in;
    if (broken_by("kernel_keeps_its_arguments"))
        broken_ops.kernel = broken_late_kernel;
    if (broken_ops.copy_in == broken_late_copy_in || broken_ops.kernel == broken_late_kernel)
        broken_ops.copy_out = broken_late_copy_out;
}

static inline const dp_device_ops *broken_table(void)
{
    if (broken_by("mean_is_a_sum"))
        return dp_cpu();
    broken_ops = *lazy_table();
    if (broken_by("copies_stop_one_byte_short"))
        broken_ops.copy_out = broken_copy_out;
    if (broken_by("event_wait_does_nothing"))
        broken_ops.event_wait = broken_event_wait;
    if (broken_by("event_sync_does_nothing"))
        broken_ops.event_sync = broken_event_sync;
    if (broken_by("stream_sync_does_nothing"))
        broken_ops.stream_sync = broken_stream_sync;
    if (broken_by("kernel_rounds_once"))
        reluctant_ops.kernel = broken_rounding;
    if (broken_by("kernel_keeps_gradients"))
        broken_ops.kernel = broken_step, broken_ops.kernel_flags = DP_KERNEL_ZERO_GRAD;
    if (broken_by("alloc_is_not_aligned"))
        broken_ops.alloc = broken_alloc, broken_ops.free = broken_free;
    if (broken_by("peer_copy_to_the_wrong_place"))
        broken_ops.peer_copy = broken_peer_copy;
    if (broken_by("copy_2d_knows_one_pitch"))
        broken_ops.copy_2d = broken_copy_2d;
    if (broken_by("open_takes_any_index"))
        broken_ops.open = broken_open;
    if (broken_by("streams_are_not_freed"))
        broken_ops.stream_destroy = broken_stream_destroy;
    if (broken_by("owns_everything"))
        broken_ops.owns = broken_owns;
    if (broken_by("host_calls_are_forgotten"))
        broken_ops.host_call = broken_host_call;
    if (broken_by("one_memory_is_several"))
        broken_ops.info = reluctant_info_one;
    if (broken_by("memory_is_not_unified"))
        broken_ops.info = broken_info;
    broken_late_ops();
    return &broken_ops;
}

static inline const dp_coll_ops *broken_coll(void)
{
    if (!broken_by("mean_is_a_sum"))
        return NULL;
    broken_coll_ops = *dp_cpu_coll();
    broken_coll_ops.run = broken_run;
    return &broken_coll_ops;
}

static inline const dp_device_ops *named_table(void)
{
    const char *name = getenv("CONFORM_TABLE");
    if (name == NULL)
        return broken_table();
    if (strcmp(name, "shared") == 0)
        return shared_table();
    if (strcmp(name, "refusing") == 0)
        return refusing_table();
    return strcmp(name, "lazy") == 0 ? lazy_table() : NULL;
}

#endif /* CONFORM_TABLES_H */
