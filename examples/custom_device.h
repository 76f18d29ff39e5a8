/* custom_device.h - a device of your own: "toy", with memory that the host cannot touch.

   Its addresses have a bit set that no address of the host has, so a stray access faults at once;
   only the toy's own copies know where the bytes are. This is the least that the contract in dp.h
   asks for: there is no kernel and no table of collectives, so dp.h computes on the host. For a
   backend of yours, put your driver's calls into the bodies, and see whether it keeps to the
   contract:

       make conform BACKEND=examples/custom_device.h TABLE=toy_device */

#ifndef CUSTOM_DEVICE_H
#define CUSTOM_DEVICE_H

#include "../dp.h"
#include <stdio.h>
#include <string.h>

enum { TOY_COUNT = 8, TOY_BYTES = 64 << 20 }; /* devices in all, bytes of one block at most */

typedef struct toy_dev {
    dp_dev base;    /* first: so the core's struct can be cast to this one */
    uintptr_t mask; /* between where a byte is and the address that the device gives it */
} toy_dev;
static inline const dp_device_ops *toy_device(void);

static dp_status toy_open(const dp_host *host, int index, dp_dev **out)
{
    if (index < 0 || index >= TOY_COUNT)
        return dp_error(DP_ERR_NO_DEVICE, "toy: no device %d, there are %d", index, TOY_COUNT);
    toy_dev *toy = host->alloc(host, sizeof(*toy), _Alignof(toy_dev));
    if (toy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "toy: no memory for device %d", index);
    toy->base = (dp_dev){.ops = toy_device(), .host = host, .index = index};
    toy->mask = (uintptr_t)(TOY_COUNT + index) << 51; /* one bit for all, three to tell which */
    *out = &toy->base;
    return DP_OK;
}

static dp_status toy_info(dp_dev *dev, dp_device_info *out)
{
    *out = (dp_device_info){.compute_units = 1, .host_memory = false};
    snprintf(out->name, sizeof(out->name), "toy %d", (int)dev->index);
    return DP_OK;
}

static void *toy_flip(const dp_dev *dev, const void *address)
{
    return (void *)((uintptr_t)address ^ ((const toy_dev *)dev)->mask);
}

static dp_status toy_alloc(dp_dev *dev, size_t bytes, void **out)
{
    void *memory = bytes <= TOY_BYTES ? dev->host->alloc(dev->host, bytes, 64) : NULL;
    if (memory == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "toy %d: no %zu bytes", (int)dev->index, bytes);
    *out = toy_flip(dev, memory);
    return DP_OK;
}

static void toy_free(dp_dev *dev, void *data, size_t bytes)
{
    (void)bytes;
    dev->host->free(dev->host, toy_flip(dev, data));
}

static dp_status toy_stream_create(dp_dev *dev, int priority, dp_stream **out)
{
    (void)priority;
    *out = dev->host->alloc(dev->host, sizeof(dp_stream), _Alignof(dp_stream));
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "toy %d: no memory for a stream", (int)dev->index);
    (*out)->dev = dev;
    return DP_OK;
}

static dp_status toy_event_create(dp_dev *dev, dp_event **out)
{
    *out = dev->host->alloc(dev->host, sizeof(dp_event), _Alignof(dp_event));
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "toy %d: no memory for an event", (int)dev->index);
    (*out)->dev = dev;
    return DP_OK;
}

static dp_status toy_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    memcpy(toy_flip(stream->dev, dst), host, bytes);
    return DP_OK;
}

static dp_status toy_copy_out(dp_stream *stream, void *host, const void *src, size_t bytes)
{
    memcpy(host, toy_flip(stream->dev, src), bytes);
    return DP_OK;
}

static dp_status toy_copy(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    memmove(toy_flip(stream->dev, dst), toy_flip(stream->dev, src), bytes);
    return DP_OK;
}

/* The rest is short, since everything a toy does is done when the call returns. */
/* clang-format off */
static dp_status toy_count(const dp_host *h, int *out) { (void)h, *out = TOY_COUNT; return DP_OK; }
static void toy_close(dp_dev *dev)           { dev->host->free(dev->host, dev); }
static void toy_stream_destroy(dp_stream *s) { s->dev->host->free(s->dev->host, s); }
static void toy_event_destroy(dp_event *e)   { e->dev->host->free(e->dev->host, e); }
static dp_status toy_stream_sync(dp_stream *s)               { (void)s; return DP_OK; }
static dp_status toy_event_record(dp_event *e, dp_stream *s) { (void)e, (void)s; return DP_OK; }
static dp_status toy_event_wait(dp_stream *s, dp_event *e)   { (void)s, (void)e; return DP_OK; }
static dp_status toy_event_sync(dp_event *e)                 { (void)e; return DP_OK; }

static inline const dp_device_ops *toy_device(void)
{
    static const dp_device_ops ops = {
        .head = DP_TABLE(dp_device_ops), .name = "toy",
        .count = toy_count, .open = toy_open, .close = toy_close, .info = toy_info,
        .alloc = toy_alloc, .free = toy_free,
        .stream_create = toy_stream_create, .stream_destroy = toy_stream_destroy,
        .stream_sync = toy_stream_sync, .event_create = toy_event_create,
        .event_destroy = toy_event_destroy, .event_record = toy_event_record,
        .event_wait = toy_event_wait, .event_sync = toy_event_sync,
        .copy_in = toy_copy_in, .copy_out = toy_copy_out, .copy = toy_copy,
        .survives_fork = true, /* no driver, no threads */
    };
    return &ops;
}
/* clang-format on */

#endif /* CUSTOM_DEVICE_H */
