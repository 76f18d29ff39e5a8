/* reluctant.h - the toy of the examples with every optional method, or only some; its kernel serves
   all kinds, or only some, as numbers.h does them. */

#ifndef RELUCTANT_H
#define RELUCTANT_H

#include <stdlib.h>
#include "../examples/custom_device.h"
#include "decorator.h"
#include "numbers.h"

enum { HAS_HOST_ALLOC = 1, HAS_COPY_2D = 2, HAS_PEER_COPY = 4, HAS_KERNEL = 8, HAS_ALL = 15 };
enum { ALL_KERNELS = 0xff };

static dp_device_ops reluctant_ops;
static unsigned reluctant_serves; /* 1 << kernel */

static inline dp_status reluctant_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = toy_device()->open(host, index, out);
    if (status == DP_OK) {
        (*out)->ops = &reluctant_ops;
    }
    return status;
}

static inline dp_status reluctant_host_alloc(dp_dev *dev, size_t bytes, void **out)
{
    *out = dev->host->alloc(dev->host, bytes, 64);
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "reluctant: %zu bytes", bytes);
}

static inline void reluctant_host_free(dp_dev *dev, void *data, size_t bytes)
{
    test_spoil(data, bytes, 0xdd);
    dev->host->free(dev->host, data);
}

static inline dp_status reluctant_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch,
                                          const void *src, size_t src_pitch, size_t row_bytes,
                                          size_t rows)
{
    for (size_t r = 0; r < rows; r++) {
        CHECK_OK(toy_copy(stream, (char *)dst + r * dst_pitch, (const char *)src + r * src_pitch,
                          row_bytes));
    }
    return DP_OK;
}

static inline dp_status reluctant_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev,
                                            const void *src, size_t bytes)
{
    memcpy(toy_flip(stream->dev, dst), toy_flip(src_dev, src), bytes);
    return DP_OK;
}

static inline void *reluctant_stage(const dp_dev *dev, const void *at, size_t bytes)
{
    void *copy = malloc(bytes);
    CHECK(copy != NULL);
    memcpy(copy, toy_flip(dev, at), bytes);
    return copy;
}

static inline dp_status reluctant_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    enum { MOST = 64 };
    size_t in_bytes = deco_operand(args, true), out_bytes = deco_operand(args, false);
    dp_kernel_args staged = *args;
    void *in[MOST], *out[MOST];
    if (!(reluctant_serves >> args->kernel & 1) || args->flags != 0) {
        return dp_error(DP_ERR_UNSUPPORTED, "reluctant: no kernel %d", (int)args->kernel);
    }
    CHECK(args->in_count <= MOST && args->out_count <= MOST);
    for (size_t k = 0; k < args->in_count; k++) {
        in[k] = reluctant_stage(stream->dev, args->in[k], in_bytes);
    }
    for (size_t k = 0; k < args->out_count; k++) {
        out[k] = reluctant_stage(stream->dev, args->out[k], out_bytes);
    }
    staged.in = (const void *const *)in;
    staged.out = out;
    number_kernel(&staged);
    for (size_t k = 0; k < args->in_count; k++) {
        free(in[k]);
    }
    for (size_t k = 0; k < args->out_count; k++) {
        memcpy(toy_flip(stream->dev, args->out[k]), out[k], out_bytes);
        free(out[k]);
    }
    return DP_OK;
}

static inline const dp_device_ops *reluctant_device(unsigned methods, unsigned kernels)
{
    reluctant_serves = kernels;
    reluctant_ops = *toy_device();
    reluctant_ops.name = "reluctant";
    reluctant_ops.open = reluctant_open;
    if (methods & HAS_HOST_ALLOC) {
        reluctant_ops.host_alloc = reluctant_host_alloc;
        reluctant_ops.host_free = reluctant_host_free;
    }
    if (methods & HAS_COPY_2D) {
        reluctant_ops.copy_2d = reluctant_copy_2d;
    }
    if (methods & HAS_PEER_COPY) {
        reluctant_ops.peer_copy = reluctant_peer_copy;
    }
    if (methods & HAS_KERNEL) {
        reluctant_ops.kernel = reluctant_kernel;
    }
    return &reluctant_ops;
}

/* ---- one memory ------------------------------------------------------------------------------ */

static inline dp_status reluctant_open_one(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = reluctant_open(host, index, out);
    if (status == DP_OK) {
        ((toy_dev *)*out)->mask = (uintptr_t)TOY_COUNT << 51;
    }
    return status;
}

static inline dp_status reluctant_info_one(dp_dev *dev, dp_device_info *out)
{
    dp_status status = toy_info(dev, out);
    out->memory = 1;
    return status;
}

/* The same, but that all devices have one memory, which the host does not reach. */
static inline const dp_device_ops *reluctant_one_memory(unsigned methods, unsigned kernels)
{
    reluctant_device(methods, kernels);
    reluctant_ops.open = reluctant_open_one;
    reluctant_ops.info = reluctant_info_one;
    return &reluctant_ops;
}

#endif /* RELUCTANT_H */
