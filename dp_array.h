/* dp_array.h - v0.2.0 - arrays of others: DLPack, .npy, .npz, and text - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h, and on its system
   (dp/os.h) for files. It needs no other package.

       DLManagedTensor *theirs = ...;                          from torch, CuPy, numpy, JAX
       dp_dlpack_import(ctx, step, theirs, &tensor);           a view; given back when step ends

       dp_npy_read(ctx, step, "images.npy", &tensor);          a view of the mapped file
       dp_npz_write(ctx, "all.npz", DP_DICT(step, {"x", dp_of(step, &x)}, {"y", dp_of(step, &y)}));
       dp_print(ctx, stdout, dp_of(step, &tensor));

   CONTENTS (search for the tag)
     >>dlpack      tensors in memory, without a copy
     >>arrays      files of numpy
     >>text        values as Python prints them
   and of the implementation
     >>managed     how DLPack describes a tensor
     >>importing   theirs becomes a view of ours
     >>exporting   ours becomes theirs
     >>describing  the header of a .npy file
     >>viewing     the file as a tensor
     >>members     what a .npz file says it has
     >>putting     arrays into files
     >>packing     many of them into one
     >>digits      a number's shortest decimal form, exactly
     >>numbers     widths and forms that all elements share
     >>lines       rows, brackets, and what is left out
     >>values      trees
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_ARRAY_H) && defined(DP_H)
#define DP_ARRAY_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>dlpack =================================================================================
   DLPack is how array libraries hand memory to each other: a struct that says what lies where, with
   a deleter that gives it back. The structs are those of <dlpack/dlpack.h>, which you include if
   you have to look into them. DLManagedTensor is the old form (0.x: capsules named "dltensor"),
   DLManagedTensorVersioned the new one (1.x: "dltensor_versioned"), which also says that memory is
   read-only.

   Memory of the host, or pinned or managed by CUDA or HIP, is {0} here. A GPU's number, as CUDA or
   HIP counts, is that of a local rank: the first that has this GPU. A device with memory of the
   host, as those of dp_cpu.h, is the CPU for others. Both sides have to order their work: what is
   imported has to be written, and what is exported must not change meanwhile, on other streams than
   the device's compute stream.                                                                  */

struct DLManagedTensor; /* of <dlpack/dlpack.h> */
struct DLManagedTensorVersioned;

/* A view of it, with its strides, that lives as long as the scope. Its deleter is called once, when
   the scope ends, after the work that was enqueued on the compute stream of its device and copies
   that read it: end a scope of its own to give it back earlier. If the call fails, it stays yours.
   After a failure of the job no deleter is called, as a device may still use the memory. What a
   dp_tensor cannot be is UNSUPPORTED: negative strides, more dims, other dtypes, other devices. */
DP_MUST_USE DP_API dp_status dp_dlpack_import(dp_ctx *ctx, dp_scope *scope,
                                              struct DLManagedTensor *managed, dp_tensor *out);
/* The same. If it is read-only, so is the view. Any version 1.x. */
DP_MUST_USE DP_API dp_status dp_dlpack_import_versioned(dp_ctx *ctx, dp_scope *scope,
                                                        struct DLManagedTensorVersioned *managed,
                                                        dp_tensor *out);

typedef struct dp_dlpack_config { /* zero: the memory is yours, until the deleter was called */
    /* Ended by the deleter, on the thread that calls it: hand over the scope that the tensor lives
       in. If it ends before, as in dp_close, the memory is gone, and the deleter still right. */
    dp_scope *holder;
    bool copy; /* a copy in host memory, row-major, which ends with the deleter: it may live longer
                  than the context. No holder then. Marked as copied (1.x) */
} dp_dlpack_config;

/* What others call a tensor. Whoever takes it has to call its deleter once. config may be NULL. As
   a DLManagedTensor cannot say that it is read-only, such a tensor is refused, unless copied. */
DP_MUST_USE DP_API dp_status dp_dlpack_export(dp_ctx *ctx, const dp_tensor *tensor,
                                              const dp_dlpack_config *config,
                                              struct DLManagedTensor **out);
DP_MUST_USE DP_API dp_status dp_dlpack_export_versioned(dp_ctx *ctx, const dp_tensor *tensor,
                                                        const dp_dlpack_config *config,
                                                        struct DLManagedTensorVersioned **out);

/* ==== >>arrays =================================================================================
   Files of numpy.save and numpy.savez. They are memory-mapped, and checked before use: a file has
   exactly what its header says. Anything else is a DP_ERR_FILE that says what is wrong; UNSUPPORTED
   are a dtype that dp.h does not have, and more dims. DP_ERR_NO_FILE: no file has this name.

   Headers are taken as numpy.load takes them, in what programs write: strings in either quotes, and
   sizes with the L of Python 2, but no escapes, comments or numbers in hexadecimal.

   Tensors are read-only views of the file, which stays mapped until the scope ends. Nothing is read
   before it is used, so the file may be larger than memory. Meanwhile it may be replaced, but not
   changed or cut. Fortran's order becomes strides. Numbers that are big-endian, or not aligned to
   their size, and bools that are neither 0 nor 1, are copied.

   numpy has no bf16: in a file it is two bytes of anything ('<V2'), as with the package ml_dtypes:
   numpy.load(...).view(ml_dtypes.bfloat16).

   Writes are atomic, as those of dp_save.h: the file is there as a whole or not at all.         */

DP_MUST_USE DP_API dp_status dp_npy_read(dp_ctx *ctx, dp_scope *scope, const char *path,
                                         dp_tensor *out);
/* Of any device, with any strides; the file is row-major. [host] */
DP_MUST_USE DP_API dp_status dp_npy_write(dp_ctx *ctx, const char *path, const dp_tensor *tensor);

/* A dict of tensors, in the order of the file. What numpy.savez_compressed has written is
   UNSUPPORTED. Checksums are not looked at, as that would read the file. */
DP_MUST_USE DP_API dp_status dp_npz_read(dp_ctx *ctx, dp_scope *scope, const char *path,
                                         dp_value *out);
/* Of a dict of tensors, each aligned to 64 bytes in the file, with its checksum; files and members
   of more than 4 GiB, and more than 65,535 of them, in the form of zip64. [host] */
DP_MUST_USE DP_API dp_status dp_npz_write(dp_ctx *ctx, const char *path, dp_value dict);

/* ==== >>text ===================================================================================
   A tensor is printed as numpy 2.4 prints an array: 8 digits after the point at most, as few as
   tell a number from its neighbours; columns; lines of 75 characters; of more than 1000 elements
   the first and last three of each dim. bf16 is printed as f16 is. Inside a dict or a list it is
   numpy's repr: array([0.5, 1. ], dtype=float32). Everything else is what Python prints: none is
   None; a string alone has no quotes, as with print; inside others it is its repr; a container is
   the repr of its data. Strings are escaped as Python does, but for characters that its version of
   Unicode does not have: only those are that no version has.                                    */

/* With a line end. Only what is printed is copied from a device. [host] */
DP_MUST_USE DP_API dp_status dp_print(dp_ctx *ctx, FILE *file, dp_value value);
/* Without a line end, in the scope. [host] */
DP_MUST_USE DP_API dp_status dp_print_text(dp_ctx *ctx, dp_scope *scope, dp_value value,
                                           const char **out);

#ifdef __cplusplus
}
#endif
#endif /* DP_ARRAY_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_ARRAY_IMPLEMENTED)
#define DP_ARRAY_IMPLEMENTED

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "dp_array.h: files are written as they lie in memory, which has to be little-endian"
#else

#include <math.h>
#include <string.h>

/* ==== >>managed ================================================================================
   The structs of <dlpack/dlpack.h>, 0.x and 1.x, under names of our own. Those of others are copied
   to and from them byte by byte, so that no compiler takes them for other objects.              */

typedef struct dp__dl_tensor { /* DLTensor */
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dp__dl_tensor;

typedef struct dp__dl_plain { /* DLManagedTensor */
    dp__dl_tensor tensor;
    void *manager;
    void (*deleter)(struct DLManagedTensor *self);
} dp__dl_plain;

typedef struct
    dp__dl_versioned { /* DLManagedTensorVersioned; its first three fields stay for ever */
    uint32_t major, minor;
    void *manager;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    dp__dl_tensor tensor;
} dp__dl_versioned;

enum { DP__DL_READ_ONLY = 1, DP__DL_COPIED = 2 };

enum {
    DP__DL_CPU = 1,
    DP__DL_CUDA = 2,
    DP__DL_CUDA_HOST = 3,
    DP__DL_ROCM = 10,
    DP__DL_ROCM_HOST = 11,
    DP__DL_CUDA_MANAGED = 13
};

static const struct {
    uint8_t code, bits;
} dp__dl_dtypes[] = {{2, 32}, {2, 64}, {2, 16}, {4, 16}, {0, 64},
                     {0, 32}, {0, 16}, {0, 8},  {1, 8},  {6, 8}};
_Static_assert(sizeof dp__dl_dtypes / sizeof dp__dl_dtypes[0] == DP_DTYPE_COUNT,
               "each dtype has a number in DLPack");

/* DLPack's number of the devices of a table, 0 if it has none. */
static int32_t dp__dl_type_of(const dp_device_ops *ops)
{
    return strcmp(ops->name, "cuda") == 0  ? DP__DL_CUDA
           : strcmp(ops->name, "hip") == 0 ? DP__DL_ROCM
                                           : 0;
}

/* ==== >>importing ==============================================================================
   Two scopes, one in the other: the outer one gives the memory back, the inner one ends before, and
   waits for copies that read host memory.                                                       */

typedef struct dp__dl_import {
    const char *fn;
    dp_ctx *ctx;
    dp_device device;
    struct DLManagedTensor *plain; /* one of them */
    struct DLManagedTensorVersioned *versioned;
} dp__dl_import;

static void dp__dl_delete(const dp__dl_import *import)
{
    dp__dl_plain plain;
    dp__dl_versioned versioned;
    if (import->plain != NULL) {
        memcpy(&plain, (const void *)import->plain, sizeof plain);
        if (plain.deleter != NULL)
            plain.deleter(import->plain);
        return;
    }
    memcpy(&versioned, (const void *)import->versioned, sizeof versioned);
    if (versioned.deleter != NULL)
        versioned.deleter(import->versioned);
}

/* When the scope ends. A stream that cannot be waited for may still use the memory. */
static void dp__dl_return(void *user)
{
    const dp__dl_import *import = user;
    dp_stream *stream = NULL;
    if (import->device.backend != 0)
        stream = dp_local_stream(import->ctx, import->device.index);
    if (!dp_failure(import->ctx, NULL) &&
        (stream == NULL || stream->dev->ops->stream_sync(stream) == DP_OK))
        dp__dl_delete(import);
}

static dp_status dp__dl_device_in(const dp_ctx *ctx, const dp__dl_tensor *from, dp_device *out)
{
    dp_info info;
    *out = (dp_device){0, 0};
    if (from->device_type == DP__DL_CPU || from->device_type == DP__DL_CUDA_HOST ||
        from->device_type == DP__DL_ROCM_HOST || from->device_type == DP__DL_CUDA_MANAGED)
        return DP_OK;
    DP_TRY(dp_info_get(ctx, &info));
    for (int i = 0; i < info.local_count; i++) {
        const dp_stream *stream = dp_local_stream(ctx, i);
        if (from->device_type != 0 && stream != NULL &&
            dp__dl_type_of(stream->dev->ops) == from->device_type &&
            stream->dev->index == from->device_id) {
            *out = dp_local_device(ctx, i);
            return DP_OK;
        }
    }
    return dp_error(DP_ERR_UNSUPPORTED, "no device of this context is DLPack's {%d, %d}",
                    from->device_type, from->device_id);
}

static dp_status dp__dl_dtype_in(const dp__dl_tensor *from, dp_dtype *out)
{
    for (int i = 0; i < DP_DTYPE_COUNT; i++)
        if (from->lanes == 1 && dp__dl_dtypes[i].code == from->code &&
            dp__dl_dtypes[i].bits == from->bits) {
            *out = (dp_dtype)i;
            return DP_OK;
        }
    return dp_error(DP_ERR_UNSUPPORTED, "there is no dtype of code %d, %d bits and %d lane%s",
                    from->code, from->bits, from->lanes, from->lanes == 1 ? "" : "s");
}

/* Strides of dims with one element or none mean nothing, and may be anything. */
static dp_status dp__dl_strides_in(const dp__dl_tensor *from, dp_tensor *tensor)
{
    for (int d = 0; d < from->ndim && from->strides != NULL && dp_tensor_count(tensor) > 0; d++) {
        if (from->shape[d] > 1)
            tensor->stride[d] = from->strides[d];
        if (tensor->stride[d] < 0)
            return dp_error(DP_ERR_UNSUPPORTED,
                            "its stride in dim %d is %lld: copy it first, as "
                            "numpy.ascontiguousarray does",
                            d, (long long)tensor->stride[d]);
    }
    return DP_OK;
}

static dp_status dp__dl_tensor_in(const dp__dl_import *import, const dp__dl_tensor *from,
                                  dp_tensor *out)
{
    dp_dtype dtype = DP_F32;
    dp_device device;
    if (from->ndim < 0 || from->ndim > DP_MAX_DIMS || (from->ndim > 0 && from->shape == NULL))
        return dp_error(from->ndim > DP_MAX_DIMS ? DP_ERR_UNSUPPORTED : DP_ERR_INVALID,
                        "%d dims, a tensor has 0 to %d%s", from->ndim, DP_MAX_DIMS,
                        from->shape == NULL ? ", and a shape" : "");
    DP_TRY(dp__dl_dtype_in(from, &dtype));
    DP_TRY(dp__dl_device_in(import->ctx, from, &device));
    uintptr_t at = (uintptr_t)from->data;
    if (from->byte_offset > UINTPTR_MAX - at || (from->data == NULL && from->byte_offset > 0))
        return dp_error(DP_ERR_INVALID, "an offset of %llu bytes leads nowhere",
                        (unsigned long long)from->byte_offset);
    at += (uintptr_t)from->byte_offset;
    dp_tensor tensor = dp_wrap((void *)at, dtype, from->ndim, from->shape);
    if (tensor.dtype != dtype)
        return dp_error(DP_ERR_INVALID,
                        "its shape has a size below 0, or more elements than can be counted");
    DP_TRY(dp__dl_strides_in(from, &tensor));
    tensor.device = device;
    dp_value value = {.kind = DP_TENSOR, .as.t = &tensor};
    DP_TRY(dp_check_value(import->fn, "managed", value));
    *out = tensor;
    return DP_OK;
}

static dp_status dp__dl_hold(const dp__dl_import *import, dp_scope *own)
{
    dp_scope *inner = dp_scope_child(own);
    dp__dl_import *kept = dp_scope_alloc(own, sizeof *kept);
    if (kept == NULL || dp_scope_alloc(inner, 1) == NULL)
        return dp_no_memory();
    *kept = *import;
    return dp_scope_defer(own, dp__dl_return, kept);
}

static dp_status dp__dl_import_in(dp__dl_import *import, dp_scope *scope, const dp__dl_tensor *from,
                                  dp_tensor *out)
{
    DP_TRY(dp__dl_tensor_in(import, from, out));
    import->device = out->device;
    dp_scope *own = dp_scope_child(scope);
    dp_status status = dp__dl_hold(import, own);
    if (status != DP_OK)
        dp_scope_end(own);
    return status;
}

static dp_status dp__dl_check(const char *fn, const dp_ctx *ctx, const dp_scope *scope,
                              const void *managed, const void *out)
{
    DP_TRY(dp_check_ctx(fn, ctx));
    DP_TRY(dp_check_scope(fn, scope, ctx));
    DP_TRY(dp_check_pointer(fn, "managed", managed));
    return dp_check_pointer(fn, "out", out);
}

DP_API dp_status dp_dlpack_import(dp_ctx *ctx, dp_scope *scope, struct DLManagedTensor *managed,
                                  dp_tensor *out)
{
    dp__dl_plain from;
    dp_tensor tensor;
    dp__dl_import import = {.fn = __func__, .ctx = ctx, .plain = managed};
    DP_TRY(dp__dl_check(__func__, ctx, scope, managed, out));
    memcpy(&from, (const void *)managed, sizeof from);
    DP_TRY(dp_error_in(__func__, dp__dl_import_in(&import, scope, &from.tensor, &tensor)));
    *out = tensor;
    return DP_OK;
}

DP_API dp_status dp_dlpack_import_versioned(dp_ctx *ctx, dp_scope *scope,
                                            struct DLManagedTensorVersioned *managed,
                                            dp_tensor *out)
{
    dp__dl_versioned from;
    dp_tensor tensor;
    dp__dl_import import = {.fn = __func__, .ctx = ctx, .versioned = managed};
    DP_TRY(dp__dl_check(__func__, ctx, scope, managed, out));
    memcpy(&from.major, (const void *)managed, sizeof from.major);
    if (from.major != 1)
        return dp_error(DP_ERR_UNSUPPORTED, "%s: version %u of DLPack, and not 1", __func__,
                        (unsigned)from.major);
    memcpy(&from, (const void *)managed, sizeof from);
    DP_TRY(dp_error_in(__func__, dp__dl_import_in(&import, scope, &from.tensor, &tensor)));
    tensor.read_only = (from.flags & DP__DL_READ_ONLY) != 0;
    *out = tensor;
    return DP_OK;
}

/* ==== >>exporting ==============================================================================
   What is exported is one block of memory, which the deleter frees.                             */

typedef struct dp__dl_export {
    union {
        dp__dl_plain plain;
        dp__dl_versioned versioned;
    } as; /* first, so that a pointer to it is one to the whole */
    int64_t shape[DP_MAX_DIMS], strides[DP_MAX_DIMS];
    dp_scope *holder; /* NULL: none, or it has ended */
    bool deleted;
    void *copy;
    size_t copy_bytes;
} dp__dl_export;

enum { DP__DL_ALIGN = 256 }; /* bytes; DLPack wants it */

static void dp__dl_free(dp__dl_export *made)
{
    if (made->copy != NULL)
        dp__os_free(made->copy, made->copy_bytes, NULL);
    dp__os_free(made, sizeof *made, NULL);
}

/* When the holder ends: by the deleter, or before. */
static void dp__dl_held(void *user)
{
    dp__dl_export *made = user;
    made->holder = NULL;
    if (made->deleted)
        dp__dl_free(made);
}

static void dp__dl_deleted(dp__dl_export *made)
{
    made->deleted = true;
    if (made->holder != NULL)
        dp_scope_end(made->holder);
    else
        dp__dl_free(made);
}

static void dp__dl_delete_plain(struct DLManagedTensor *self)
{
    dp__dl_deleted((dp__dl_export *)(void *)self);
}

static void dp__dl_delete_versioned(struct DLManagedTensorVersioned *self)
{
    dp__dl_deleted((dp__dl_export *)(void *)self);
}

static dp_status dp__dl_device_out(dp_ctx *ctx, dp_device device, dp__dl_tensor *out)
{
    dp_device_info info;
    out->device_type = DP__DL_CPU;
    out->device_id = 0;
    if (device.backend == 0)
        return DP_OK;
    const dp_device own = dp_local_device(ctx, device.index);
    const dp_stream *stream = dp_local_stream(ctx, device.index);
    if (stream == NULL || own.backend != device.backend || own.index != device.index)
        return dp_error(DP_ERR_INVALID, "{%d, %d} is not a device of this context", device.backend,
                        device.index);
    const dp_dev *dev = stream->dev;
    if (dp__dl_type_of(dev->ops) != 0) {
        out->device_type = dp__dl_type_of(dev->ops);
        out->device_id = dev->index;
        return DP_OK;
    }
    DP_TRY(dp_device_info_get(ctx, device.index, &info));
    if (!info.host_memory)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "DLPack has no name for a device of '%s': let it be "
                        "copied",
                        dev->ops->name);
    return DP_OK;
}

static dp_status dp__dl_copy(dp_ctx *ctx, const dp_tensor *tensor, dp__dl_export *made,
                             dp_tensor *out)
{
    size_t bytes = (size_t)dp_tensor_count(tensor) * dp_dtype_bytes((dp_dtype)tensor->dtype);
    made->copy_bytes = bytes > 0 ? bytes : 1;
    made->copy = dp__os_alloc(made->copy_bytes, DP__DL_ALIGN, NULL);
    if (made->copy == NULL)
        return dp_no_memory();
    *out = dp_wrap(made->copy, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape);
    return dp_read(ctx, tensor, made->copy, bytes);
}

/* All but what is around it. */
static dp_status dp__dl_fill(dp_ctx *ctx, const dp_tensor *tensor, const dp_dlpack_config *config,
                             dp__dl_export *made, dp__dl_tensor *out)
{
    dp_tensor view = *tensor;
    if (config->copy)
        DP_TRY(dp__dl_copy(ctx, tensor, made, &view));
    DP_TRY(dp__dl_device_out(ctx, view.device, out));
    for (int d = 0; d < view.ndim; d++) {
        made->shape[d] = view.shape[d];
        made->strides[d] = view.stride[d];
    }
    out->data = view.data;
    out->ndim = view.ndim;
    out->code = dp__dl_dtypes[view.dtype].code;
    out->bits = dp__dl_dtypes[view.dtype].bits;
    out->lanes = 1;
    out->shape = made->shape;
    out->strides = made->strides;
    out->byte_offset = 0;
    if (config->holder == NULL)
        return DP_OK;
    DP_TRY(dp_scope_defer(config->holder, dp__dl_held, made));
    made->holder = config->holder;
    return DP_OK;
}

static dp_status dp__dl_make(const char *fn, dp_ctx *ctx, const dp_tensor *tensor,
                             const dp_dlpack_config *config, dp__dl_tensor *filled,
                             dp__dl_export **out)
{
    dp_value value = {.kind = DP_TENSOR, .as.t = tensor};
    DP_TRY(dp_check_pointer(fn, "tensor", tensor));
    DP_TRY(dp_check_value(fn, "tensor", value));
    if (config->holder != NULL)
        DP_TRY(dp_check_scope(fn, config->holder, NULL));
    if (config->holder != NULL && config->copy)
        return dp_error(DP_ERR_INVALID, "%s: a copy needs no holder", fn);
    dp__dl_export *made = dp__os_alloc(sizeof *made, 0, NULL);
    if (made == NULL)
        return dp_error_in(fn, dp_no_memory());
    memset(made, 0, sizeof *made);
    dp_status status = dp__dl_fill(ctx, tensor, config, made, filled);
    if (status != DP_OK) {
        dp__dl_free(made);
        return dp_error_in(fn, status);
    }
    *out = made;
    return DP_OK;
}

DP_API dp_status dp_dlpack_export(dp_ctx *ctx, const dp_tensor *tensor,
                                  const dp_dlpack_config *config, struct DLManagedTensor **out)
{
    dp__dl_export *made;
    dp__dl_plain as = {.deleter = dp__dl_delete_plain};
    dp_dlpack_config own = {0};
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (config != NULL)
        own = *config;
    if (tensor != NULL && tensor->read_only && !own.copy)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: tensor is read-only, which this form cannot say: export it versioned, "
                        "or as a copy",
                        __func__);
    DP_TRY(dp__dl_make(__func__, ctx, tensor, &own, &as.tensor, &made));
    as.manager = made;
    memcpy(&made->as, &as, sizeof as);
    *out = (struct DLManagedTensor *)(void *)made;
    return DP_OK;
}

DP_API dp_status dp_dlpack_export_versioned(dp_ctx *ctx, const dp_tensor *tensor,
                                            const dp_dlpack_config *config,
                                            struct DLManagedTensorVersioned **out)
{
    dp__dl_export *made;
    dp__dl_versioned as = {.major = 1, .deleter = dp__dl_delete_versioned};
    dp_dlpack_config own = {0};
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (config != NULL)
        own = *config;
    DP_TRY(dp__dl_make(__func__, ctx, tensor, &own, &as.tensor, &made));
    as.manager = made;
    as.flags = own.copy ? DP__DL_COPIED : tensor->read_only ? DP__DL_READ_ONLY : 0;
    memcpy(&made->as, &as, sizeof as);
    *out = (struct DLManagedTensorVersioned *)(void *)made;
    return DP_OK;
}

/* ==== >>describing =============================================================================
   A .npy file begins with "\x93NUMPY", two bytes of a version, the length of what follows, and a
   dict of Python: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.                  */

typedef struct dp__array_form { /* what a header says */
    dp_dtype dtype;
    bool swapped, fortran;
    int ndim;
    int64_t shape[DP_MAX_DIMS];
    char descr[24];
} dp__array_form;

/* Before them may stand '<', '>' for big-endian, or '=' or '|', which say the same as nothing. */
static const char *const dp__array_descrs[] = {"f4", "f8", "f2", "V2", "i8",
                                               "i4", "i2", "i1", "u1", "b1"};
_Static_assert(sizeof dp__array_descrs / sizeof dp__array_descrs[0] == DP_DTYPE_COUNT,
               "each dtype has a name in files of numpy");

enum { DP__ARRAY_SHOWN = 24 }; /* characters of a file in a sentence */

typedef struct dp__array_text { /* from an untrusted file: sentences show no control characters */
    const char *at, *end;
    bool longs; /* numbers may end in L, as those of Python 2 */
    char shown[DP__ARRAY_SHOWN + 1];
} dp__array_text;

static const char *dp__array_show(dp__array_text *text)
{
    int count = 0;
    while (count < DP__ARRAY_SHOWN && text->at + count < text->end) {
        unsigned char c = (unsigned char)text->at[count];
        text->shown[count++] = c < ' ' || c >= 127 ? '?' : (char)c;
    }
    text->shown[count] = '\0';
    return text->shown;
}

static void dp__array_blanks(dp__array_text *text)
{
    static const char blanks[] = {' ', '\t', '\n', '\f', '\r'};
    while (text->at < text->end && memchr(blanks, *text->at, sizeof blanks) != NULL)
        text->at++;
}

static bool dp__array_takes(dp__array_text *text, const char *word)
{
    size_t bytes = strlen(word);
    dp__array_blanks(text);
    if ((size_t)(text->end - text->at) < bytes || memcmp(text->at, word, bytes) != 0)
        return false;
    text->at += bytes;
    return true;
}

/* A string of Python, without escapes. */
static bool dp__array_takes_string(dp__array_text *text, char *out, size_t room)
{
    char quote = dp__array_takes(text, "'") ? '\'' : '"';
    size_t count = 0;
    if (quote == '"' && !dp__array_takes(text, "\""))
        return false;
    while (text->at < text->end && *text->at != quote && *text->at != '\0' && count < room - 1)
        out[count++] = *text->at++;
    out[count] = '\0';
    return text->at < text->end && *text->at++ == quote;
}

/* A list of fields, to the end of its brackets; those in their names are none. */
static bool dp__array_takes_fields(dp__array_text *text, dp__array_form *form)
{
    int depth = 1;
    char quote = '\0';
    for (; text->at < text->end && depth > 0; text->at++) {
        char c = *text->at;
        if (quote == '\0' && (c == '\'' || c == '"'))
            quote = c;
        else if (quote == '\0')
            depth += (c == '[') - (c == ']');
        else if (c == quote)
            quote = '\0';
        else if (c == '\\' && text->at + 1 < text->end)
            text->at++;
    }
    snprintf(form->descr, sizeof form->descr, "[fields]");
    return depth == 0;
}

/* What is no dtype of ours stays DP_DTYPE_ANY, and is refused by its name when all is read. */
static bool dp__array_takes_descr(dp__array_text *text, dp__array_form *form)
{
    if (dp__array_takes(text, "["))
        return dp__array_takes_fields(text, form);
    if (!dp__array_takes_string(text, form->descr, sizeof form->descr))
        return false;
    const char *name = form->descr + (memchr("<>=|", form->descr[0], 4) != NULL);
    form->swapped = form->descr[0] == '>';
    for (int i = 0; i < DP_DTYPE_COUNT; i++)
        if (strcmp(name, dp__array_descrs[i]) == 0)
            form->dtype = (dp_dtype)i;
    return true;
}

/* Like Python, without zeros before other digits. */
static bool dp__array_takes_number(dp__array_text *text, int64_t *out)
{
    enum { DIGITS = 18 };
    int digits = 0;
    dp__array_blanks(text);
    const char *first = text->at;
    for (*out = 0; text->at < text->end && *text->at >= '0' && *text->at <= '9'; digits++)
        if (digits == DIGITS)
            return false;
        else
            *out = *out * 10 + (*text->at++ - '0');
    if (digits > 1 && *first == '0' && *out > 0)
        text->at = first;
    else if (text->longs && digits > 0)
        (void)dp__array_takes(text, "L");
    return text->at > first;
}

/* Of more dims than a tensor has the first ones, and that there are more. */
static bool dp__array_takes_shape(dp__array_text *text, dp__array_form *form)
{
    int64_t size;
    bool comma = true;
    if (!dp__array_takes(text, "("))
        return false;
    for (form->ndim = 0; !dp__array_takes(text, ")"); form->ndim += form->ndim <= DP_MAX_DIMS) {
        if (!comma || !dp__array_takes_number(text, &size))
            return false;
        if (form->ndim < DP_MAX_DIMS)
            form->shape[form->ndim] = size;
        comma = dp__array_takes(text, ",");
    }
    return form->ndim != 1 || comma; /* (3) is a number in Python */
}

enum { DP__ARRAY_DESCR = 1, DP__ARRAY_ORDER = 2, DP__ARRAY_SHAPE = 4, DP__ARRAY_ALL = 7 };

/* One of these keys, or 0. */
static int dp__array_takes_key(dp__array_text *text)
{
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    const char *first = text->at;
    char word[sizeof "fortran_order"];
    bool string = dp__array_takes_string(text, word, sizeof word);
    for (int i = 0; i < 3; i++)
        if (string && strcmp(word, keys[i]) == 0)
            return 1 << i;
    text->at = first;
    return 0;
}

/* Each key once, in any order. */
static bool dp__array_takes_dict(dp__array_text *text, dp__array_form *form)
{
    int found = 0;
    bool comma = true, good = dp__array_takes(text, "{");
    while (good && !dp__array_takes(text, "}")) {
        int key = dp__array_takes_key(text);
        good = comma && key != 0 && (found & key) == 0 && dp__array_takes(text, ":");
        found |= key;
        if (good && key == DP__ARRAY_ORDER)
            form->fortran = dp__array_takes(text, "True");
        if (good)
            good = key == DP__ARRAY_DESCR   ? dp__array_takes_descr(text, form)
                   : key == DP__ARRAY_SHAPE ? dp__array_takes_shape(text, form)
                                            : form->fortran || dp__array_takes(text, "False");
        comma = good && dp__array_takes(text, ",");
    }
    return good && found == DP__ARRAY_ALL;
}

static uint64_t dp__array_number(const char *bytes, int count)
{
    uint64_t number = 0;
    while (count-- > 0)
        number = number << 8 | (unsigned char)bytes[count];
    return number;
}

static dp_status dp__array_describe(dp__array_text *text, dp__array_form *out)
{
    *out = (dp__array_form){.dtype = DP_DTYPE_ANY};
    if (!dp__array_takes_dict(text, out))
        return dp_error(DP_ERR_FILE, "its header makes no sense at \"%s\"", dp__array_show(text));
    dp__array_blanks(text);
    if (text->at < text->end)
        return dp_error(DP_ERR_FILE, "something follows in its header: \"%s\"",
                        dp__array_show(text));
    if (out->ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_UNSUPPORTED, "it has more than %d dims", DP_MAX_DIMS);
    if (out->dtype != DP_DTYPE_ANY)
        return DP_OK;
    text->at = out->descr;
    text->end = out->descr + strlen(out->descr);
    return dp_error(DP_ERR_UNSUPPORTED, "its dtype is '%s'", dp__array_show(text));
}

/* The header of an array; *at comes to stand behind it. */
static dp_status dp__array_header(const char **at, const char *end, dp__array_form *out)
{
    static const char magic[] = "\x93NUMPY";
    enum { MAGIC = sizeof magic - 1, VERSION = 2, NARROW = 2, WIDE = 4 };
    const char *bytes = *at;
    size_t left = (size_t)(end - bytes);
    if (left < MAGIC + VERSION + WIDE || memcmp(bytes, magic, MAGIC) != 0)
        return dp_error(DP_ERR_FILE, "it does not begin as a .npy file does");
    int version = bytes[MAGIC], wide = version > 1 ? WIDE : NARROW;
    if (version < 1 || version > 3)
        return dp_error(DP_ERR_UNSUPPORTED, "version %d.%d of .npy", version, bytes[MAGIC + 1]);
    uint64_t count = dp__array_number(bytes + MAGIC + VERSION, wide);
    bytes += MAGIC + VERSION + wide;
    if (count > (uint64_t)(end - bytes))
        return dp_error(DP_ERR_FILE, "its header says that it has %llu bytes, there are %llu",
                        (unsigned long long)count, (unsigned long long)(end - bytes));
    *at = bytes + count;
    dp__array_text text = {.at = bytes, .end = *at, .longs = version < 3};
    return dp__array_describe(&text, out);
}

/* ==== >>viewing ================================================================================
   Memory of the file is used as it lies, if it can be.                                          */

static bool dp__array_in_order(const dp__array_form *form, const char *data, size_t bytes)
{
    bool good = !form->swapped && (uintptr_t)data % dp_dtype_bytes(form->dtype) == 0;
    for (size_t i = 0; good && form->dtype == DP_BOOL && i < bytes; i++)
        good = (unsigned char)data[i] <= 1;
    return good || bytes == 0;
}

/* Elements as they lie in the file become those of a machine that is little-endian. */
static void dp__array_mend(const dp__array_form *form, char *bytes, size_t count)
{
    size_t size = dp_dtype_bytes(form->dtype);
    for (char *at = bytes; form->swapped && at < bytes + count; at += size)
        for (size_t i = 0; i < size / 2; i++) {
            char byte = at[i];
            at[i] = at[size - 1 - i];
            at[size - 1 - i] = byte;
        }
    for (size_t i = 0; form->dtype == DP_BOOL && i < count; i++)
        bytes[i] = bytes[i] != 0;
}

/* How many bytes the shape has; false when that cannot be counted. */
static bool dp__array_bytes(const dp__array_form *form, uint64_t *out)
{
    uint64_t bytes = dp_dtype_bytes(form->dtype);
    bool empty = false, good = true;
    for (int d = 0; d < form->ndim; d++)
        empty |= form->shape[d] == 0;
    for (int d = 0; d < form->ndim && !empty && good; d++) {
        good = bytes <= INT64_MAX / (uint64_t)form->shape[d];
        bytes *= (uint64_t)form->shape[d];
    }
    *out = empty ? 0 : bytes;
    return good;
}

/* Also of an array without elements the other sizes have to make sense. */
static bool dp__array_is_countable(const dp__array_form *form)
{
    return dp_wrap_const(NULL, form->dtype, form->ndim, form->shape).dtype == form->dtype;
}

/* The whole of a .npy file, or of a member of a .npz file; the bytes are there as long as the
   scope. */
static dp_status dp__array_parse(dp_scope *scope, const char *bytes, size_t count, dp_tensor *out)
{
    dp__array_form form;
    uint64_t size = 0;
    const char *data = bytes, *end = bytes + count;
    DP_TRY(dp__array_header(&data, end, &form));
    bool counted = dp__array_bytes(&form, &size);
    if (counted && size == 0 && !dp__array_is_countable(&form))
        return dp_error(DP_ERR_FILE, "its shape has more elements than can be counted");
    if (!counted || size != (uint64_t)(end - data))
        return dp_error(DP_ERR_FILE, "it has %llu bytes of elements, and its shape says %s%llu",
                        (unsigned long long)(end - data), counted ? "" : "more than ",
                        counted ? (unsigned long long)size : (unsigned long long)INT64_MAX);
    if (!dp__array_in_order(&form, data, (size_t)size)) {
        char *copy = dp_scope_alloc(scope, (size_t)size);
        if (copy == NULL)
            return dp_no_memory();
        memcpy(copy, data, (size_t)size);
        dp__array_mend(&form, copy, (size_t)size);
        data = copy;
    }
    *out = dp_wrap_const(data, form.dtype, form.ndim, form.shape);
    int64_t stride = 1;
    for (int d = 0; form.fortran && size > 0 && d < form.ndim; stride *= form.shape[d++])
        out->stride[d] = stride;
    return DP_OK;
}

/* The mapping ends with `own`; what is made lies in *out_inner, which ends first, and waits for
   devices that still read. */
static dp_status dp__array_map(dp_ctx *ctx, dp_scope *own, const char *path, dp__os_map *out,
                               dp_scope **out_inner)
{
    *out_inner = dp_scope_child(own);
    if (dp_scope_alloc(*out_inner, 1) == NULL)
        return dp_no_memory();
    return dp__os_map_open(ctx, own, path, out);
}

static dp_status dp__array_check_read(const char *fn, const dp_ctx *ctx, const dp_scope *scope,
                                      const char *path, const void *out)
{
    DP_TRY(dp_check_ctx(fn, ctx));
    DP_TRY(dp__os_check_path(fn, path));
    DP_TRY(dp_check_scope(fn, scope, ctx));
    return dp_check_pointer(fn, "out", out);
}

DP_API dp_status dp_npy_read(dp_ctx *ctx, dp_scope *scope, const char *path, dp_tensor *out)
{
    dp__os_map map;
    dp_tensor tensor;
    dp_scope *inner;
    DP_TRY(dp__array_check_read(__func__, ctx, scope, path, out));
    dp_scope *own = dp_scope_child(scope);
    dp_status status = dp__array_map(ctx, own, path, &map, &inner);
    if (status == DP_OK)
        status = dp__array_parse(inner, map.bytes, map.count, &tensor);
    if (status == DP_OK)
        *out = tensor;
    else
        dp_scope_end(own);
    return dp__os_named(__func__, path, status);
}

/* ==== >>members ================================================================================
   A .npz file is a zip: members, each after a header of its own, then a directory of them, then its
   end. If a number is too large for its place there, that has only ones, and zip64 says it
   elsewhere. The directory is believed; a member's own header is asked only where its bytes begin.
 */

enum {
    DP__ZIP_MEMBER = 0x04034b50,
    DP__ZIP_ENTRY = 0x02014b50,
    DP__ZIP_END = 0x06054b50,
    DP__ZIP_END64 = 0x06064b50,
    DP__ZIP_FINDER64 = 0x07064b50,
    DP__ZIP_MEMBER_BYTES = 30,
    DP__ZIP_ENTRY_BYTES = 46,
    DP__ZIP_END_BYTES = 22,
    DP__ZIP_END64_BYTES = 56,
    DP__ZIP_FINDER64_BYTES = 20,
    DP__ZIP_EXTRA64 = 1,
    DP__ZIP_LOCKED = 1, /* bits of flags */
    DP__ZIP_UTF8 = 0x800
};

static const uint64_t dp__npz_most32 = 0xffffffff;
static const char dp__array_suffix[] = ".npy";

typedef struct dp__npz { /* a file */
    const char *bytes;
    uint64_t count;
    uint64_t entries, at, end; /* of the directory */
} dp__npz;

typedef struct dp__npz_entry {
    const char *name;
    size_t name_bytes;
    int flags, method;
    uint64_t packed, bytes, at;
} dp__npz_entry;

static bool dp__npz_is(const dp__npz *zip, uint64_t at, uint64_t count, uint32_t mark)
{
    return at <= zip->count && count <= zip->count - at &&
           dp__array_number(zip->bytes + at, 4) == mark;
}

static bool dp__npz_end64(dp__npz *zip, uint64_t end)
{
    uint64_t finder = end - DP__ZIP_FINDER64_BYTES;
    if (end < DP__ZIP_FINDER64_BYTES ||
        !dp__npz_is(zip, finder, DP__ZIP_FINDER64_BYTES, DP__ZIP_FINDER64))
        return true; /* there is none */
    uint64_t at = dp__array_number(zip->bytes + finder + 8, 8);
    if (!dp__npz_is(zip, at, DP__ZIP_END64_BYTES, DP__ZIP_END64))
        return false;
    zip->entries = dp__array_number(zip->bytes + at + 32, 8);
    zip->end = dp__array_number(zip->bytes + at + 40, 8);
    zip->at = dp__array_number(zip->bytes + at + 48, 8);
    return zip->end <= at;
}

/* The end of a zip may have a comment, so it is looked for. */
static dp_status dp__npz_open(dp__npz *zip)
{
    enum { COMMENT_MOST = 0xffff };
    uint64_t room = 0, found = zip->count;
    for (; room <= COMMENT_MOST && room + DP__ZIP_END_BYTES <= zip->count; room++) {
        uint64_t at = zip->count - room - DP__ZIP_END_BYTES;
        if (dp__npz_is(zip, at, DP__ZIP_END_BYTES, DP__ZIP_END) &&
            dp__array_number(zip->bytes + at + 20, 2) == room) {
            found = at;
            break;
        }
    }
    if (found == zip->count)
        return dp_error(DP_ERR_FILE, "it does not end as a .npz file does");
    zip->entries = dp__array_number(zip->bytes + found + 10, 2);
    zip->end = dp__array_number(zip->bytes + found + 12, 4); /* bytes, till now */
    zip->at = dp__array_number(zip->bytes + found + 16, 4);
    bool good = dp__npz_end64(zip, found) && zip->at <= found && zip->end <= found - zip->at;
    zip->end += zip->at;
    if (!good || zip->entries > (zip->end - zip->at) / DP__ZIP_ENTRY_BYTES)
        return dp_error(DP_ERR_FILE, "its directory of %llu members is not where its end says",
                        (unsigned long long)zip->entries);
    return DP_OK;
}

/* Numbers of 64 bits, in this order, where those of 32 are all ones. */
static bool dp__npz_extra(const char *extra, uint64_t count, dp__npz_entry *entry)
{
    uint64_t *const places[] = {&entry->bytes, &entry->packed, &entry->at};
    while (count >= 4) {
        uint64_t id = dp__array_number(extra, 2), bytes = dp__array_number(extra + 2, 2);
        extra += 4;
        count -= 4;
        if (bytes > count)
            return false;
        for (int i = 0; i < 3 && id == DP__ZIP_EXTRA64; i++)
            if (*places[i] == dp__npz_most32) {
                if (bytes < 8)
                    return false;
                *places[i] = dp__array_number(extra, 8);
                extra += 8;
                count -= 8;
                bytes -= 8;
            }
        extra += bytes;
        count -= bytes;
    }
    return true;
}

/* The entry of the directory at *at, which comes to stand behind it. */
static dp_status dp__npz_entry_at(const dp__npz *zip, uint64_t *at, dp__npz_entry *out)
{
    const char *bytes = zip->bytes + *at;
    if (zip->end - *at < DP__ZIP_ENTRY_BYTES ||
        !dp__npz_is(zip, *at, DP__ZIP_ENTRY_BYTES, DP__ZIP_ENTRY))
        return dp_error(DP_ERR_FILE, "its directory is damaged at byte %llu",
                        (unsigned long long)*at);
    *out = (dp__npz_entry){.name = bytes + DP__ZIP_ENTRY_BYTES,
                           .name_bytes = (size_t)dp__array_number(bytes + 28, 2),
                           .flags = (int)dp__array_number(bytes + 8, 2),
                           .method = (int)dp__array_number(bytes + 10, 2),
                           .packed = dp__array_number(bytes + 20, 4),
                           .bytes = dp__array_number(bytes + 24, 4),
                           .at = dp__array_number(bytes + 42, 4)};
    uint64_t extra = dp__array_number(bytes + 30, 2), comment = dp__array_number(bytes + 32, 2);
    uint64_t whole = DP__ZIP_ENTRY_BYTES + out->name_bytes + extra + comment;
    if (zip->end - *at < whole || !dp__npz_extra(out->name + out->name_bytes, extra, out))
        return dp_error(DP_ERR_FILE, "its directory is damaged at byte %llu",
                        (unsigned long long)*at);
    *at += whole;
    return DP_OK;
}

/* Without ".npy"; a string of its own. */
static dp_status dp__npz_name(dp_scope *scope, const dp__npz_entry *entry, const char **out)
{
    size_t suffix = sizeof dp__array_suffix - 1, count = entry->name_bytes;
    if (count >= suffix && memcmp(entry->name + count - suffix, dp__array_suffix, suffix) == 0)
        count -= suffix;
    char *name = dp_scope_alloc(scope, count + 1);
    if (name == NULL)
        return dp_no_memory();
    memcpy(name, entry->name, count);
    name[count] = '\0';
    if (strlen(name) != count || !dp_is_utf8(name))
        return dp_error(DP_ERR_FILE, "the name of a member is not UTF-8");
    *out = name;
    return DP_OK;
}

/* Where its bytes are. */
static dp_status dp__npz_member(const dp__npz *zip, const dp__npz_entry *entry, const char **out)
{
    if ((entry->flags & DP__ZIP_LOCKED) != 0 || entry->method != 0)
        return dp_error(DP_ERR_UNSUPPORTED, "it is %s: write it with numpy.savez, and not %s",
                        entry->method != 0 ? "compressed" : "encrypted",
                        entry->method != 0 ? "numpy.savez_compressed" : "so");
    bool good = entry->packed == entry->bytes &&
                dp__npz_is(zip, entry->at, DP__ZIP_MEMBER_BYTES, DP__ZIP_MEMBER);
    const char *bytes = zip->bytes + (good ? entry->at : 0);
    uint64_t name = good ? dp__array_number(bytes + 26, 2) : 0,
             extra = good ? dp__array_number(bytes + 28, 2) : 0,
             first = entry->at + DP__ZIP_MEMBER_BYTES + name + extra;
    good = good && name == entry->name_bytes && first <= zip->at &&
           entry->bytes <= zip->at - first &&
           memcmp(bytes + DP__ZIP_MEMBER_BYTES, entry->name, entry->name_bytes) == 0;
    *out = good ? zip->bytes + first : NULL;
    return good ? DP_OK : dp_error(DP_ERR_FILE, "it is not where the directory says");
}

static dp_status dp__npz_read_entry(dp_scope *scope, const dp__npz *zip, const dp__npz_entry *entry,
                                    dp_pair *out)
{
    enum { TEXT = 512 };
    char text[TEXT];
    dp_tensor tensor;
    const char *bytes;
    DP_TRY(dp__npz_name(scope, entry, &out->key));
    dp_status status = dp__npz_member(zip, entry, &bytes);
    if (status == DP_OK)
        status = dp__array_parse(scope, bytes, (size_t)entry->bytes, &tensor);
    if (status == DP_OK)
        return dp_made(dp_of(scope, &tensor), &out->value);
    dp__array_text name = {.at = out->key, .end = out->key + strlen(out->key)};
    snprintf(text, sizeof text, "%s", dp_last_error());
    return dp_error(status, "member '%s': %s", dp__array_show(&name), text);
}

/* Members that lie one on another would make much memory of a small file. */
static dp_status dp__npz_read(dp_scope *scope, dp_scope *temp, const char *bytes, size_t count,
                              dp_value *out)
{
    dp__npz zip = {.bytes = bytes, .count = count};
    uint64_t all = 0;
    DP_TRY(dp__npz_open(&zip));
    uint64_t at = zip.at;
    dp_pair *pairs = dp_scope_alloc(temp, (size_t)zip.entries * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (uint64_t i = 0; i < zip.entries; i++) {
        dp__npz_entry entry;
        DP_TRY(dp__npz_entry_at(&zip, &at, &entry));
        if (entry.packed > zip.at - all)
            return dp_error(DP_ERR_FILE, "its members have more bytes than it has");
        all += entry.packed;
        DP_TRY(dp__npz_read_entry(scope, &zip, &entry, &pairs[i]));
    }
    dp_value made = dp_dict_make(scope, pairs, (size_t)zip.entries);
    if (made.kind == DP_ERROR && made.status == DP_ERR_INVALID)
        return dp_error(DP_ERR_FILE, "two of its members have the same name");
    return dp_made(made, out);
}

DP_API dp_status dp_npz_read(dp_ctx *ctx, dp_scope *scope, const char *path, dp_value *out)
{
    dp__os_map map;
    dp_value value;
    dp_scope *inner;
    DP_TRY(dp__array_check_read(__func__, ctx, scope, path, out));
    dp_scope *own = dp_scope_child(scope), *temp = dp_scope_begin(ctx);
    dp_status status = dp_scope_check(temp);
    if (status == DP_OK)
        status = dp__array_map(ctx, own, path, &map, &inner);
    if (status == DP_OK)
        status = dp__npz_read(inner, temp, map.bytes, map.count, &value);
    dp_scope_end(temp);
    if (status == DP_OK)
        *out = value;
    else
        dp_scope_end(own);
    return dp__os_named(__func__, path, status);
}

/* ==== >>putting ================================================================================
   All goes through a piece of host memory.                                                      */

enum { DP__ARRAY_CHUNK = 1 << 20, DP__ARRAY_ALIGN = 64, DP__ARRAY_HEADER = 512 };

typedef uint32_t dp__array_crcs[8][256];

typedef struct dp__array_writer {
    dp_ctx *ctx;
    dp_scope *temp;
    dp__os_part part;
    char *chunk;
    size_t filled;
    uint64_t at;                /* bytes put till now */
    const dp__array_crcs *crcs; /* NULL: nobody asks for a checksum */
    uint32_t crc;               /* of the member, inverted */
} dp__array_writer;

static dp_status dp__array_flush(dp__array_writer *writer)
{
    size_t filled = writer->filled;
    writer->filled = 0;
    return dp__os_part_write(&writer->part, writer->chunk, filled);
}

/* Eight bytes at a time: each table is what a byte does so many places further on. */
static void dp__array_crcs_make(dp__array_crcs crcs)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
        crcs[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            crcs[k][i] = crcs[k - 1][i] >> 8 ^ crcs[0][crcs[k - 1][i] & 0xff];
}

static uint32_t dp__array_crc(const dp__array_crcs *crcs, uint32_t crc, const char *bytes,
                              size_t count)
{
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= (*crcs)[7 - i][word >> 8 * i & 0xff];
    }
    for (; count > 0; count--, bytes++)
        crc = crc >> 8 ^ (*crcs)[0][(crc ^ (unsigned char)*bytes) & 0xff];
    return crc;
}

/* Room for so many bytes, at most a chunk, which dp__array_put_end takes. */
static dp_status dp__array_put_begin(dp__array_writer *writer, size_t bytes, char **out)
{
    if (writer->filled + bytes > DP__ARRAY_CHUNK)
        DP_TRY(dp__array_flush(writer));
    *out = writer->chunk + writer->filled;
    return DP_OK;
}

static void dp__array_put_end(dp__array_writer *writer, size_t bytes)
{
    if (writer->crcs != NULL)
        writer->crc =
            dp__array_crc(writer->crcs, writer->crc, writer->chunk + writer->filled, bytes);
    writer->filled += bytes;
    writer->at += bytes;
}

static dp_status dp__array_put(dp__array_writer *writer, const char *bytes, size_t count)
{
    char *to;
    DP_TRY(dp__array_put_begin(writer, count, &to));
    memcpy(to, bytes, count);
    dp__array_put_end(writer, count);
    return DP_OK;
}

static dp_status dp__array_put_piece(const dp_tensor *piece, size_t bytes, void *user)
{
    dp__array_writer *writer = user;
    char *to;
    DP_TRY(dp__array_put_begin(writer, bytes, &to));
    DP_TRY(dp_read(writer->ctx, piece, to, bytes));
    for (size_t i = 0; i < bytes && piece->dtype == DP_BOOL; i++)
        to[i] = to[i] != 0;
    dp__array_put_end(writer, bytes);
    return DP_OK;
}

/* What numpy writes: filled with blanks to a multiple of 64, the last byte ends the line. numpy
   leaves room for dim 0 to grow; we do not. Returns how many bytes. */
static size_t dp__array_header_make(const dp_tensor *tensor, char text[DP__ARRAY_HEADER])
{
    enum { FIRST = 10 };
    const char *descr = dp__array_descrs[tensor->dtype];
    size_t at = FIRST, room = DP__ARRAY_HEADER;
    at += (size_t)snprintf(text + at, room - at,
                           "{'descr': '%c%s', 'fortran_order': False, "
                           "'shape': (",
                           descr[1] == '1' ? '|' : '<', descr);
    for (int d = 0; d < tensor->ndim; d++)
        at += (size_t)snprintf(text + at, room - at, "%s%lld", d > 0 ? ", " : "",
                               (long long)tensor->shape[d]);
    at += (size_t)snprintf(text + at, room - at, "%s), }", tensor->ndim == 1 ? "," : "");
    do
        text[at++] = ' ';
    while (at % DP__ARRAY_ALIGN != 0);
    text[at - 1] = '\n';
    memcpy(text, "\x93NUMPY\x01", 8);
    text[8] = (char)((at - FIRST) & 0xff);
    text[9] = (char)((at - FIRST) >> 8);
    return at;
}

static dp_status dp__array_put_array(dp__array_writer *writer, const dp_tensor *tensor)
{
    char header[DP__ARRAY_HEADER];
    DP_TRY(dp__array_put(writer, header, dp__array_header_make(tensor, header)));
    return dp_tensor_pieces(tensor, DP__ARRAY_CHUNK, dp__array_put_piece, writer);
}

/* A file that `put` fills: all of it, or none. */
static dp_status dp__array_write_in(dp__array_writer *writer, const char *path,
                                    dp_status (*put)(dp__array_writer *writer, const void *what),
                                    const void *what)
{
    writer->chunk = dp_scope_alloc(writer->temp, DP__ARRAY_CHUNK);
    if (writer->chunk == NULL)
        return dp_no_memory();
    DP_TRY(dp__os_part_make(writer->temp, path, &writer->part));
    DP_TRY(dp__os_part_open(&writer->part));
    dp_status status = put(writer, what);
    if (status == DP_OK)
        status = dp__array_flush(writer);
    if (status == DP_OK)
        status = dp__os_part_sync(&writer->part);
    return dp__os_part_end(&writer->part, status);
}

static dp_status dp__array_write(dp_ctx *ctx, const char *path,
                                 dp_status (*put)(dp__array_writer *writer, const void *what),
                                 const void *what)
{
    dp__array_writer writer = {.ctx = ctx, .temp = dp_scope_begin(ctx)};
    DP_TRY(dp_scope_check(writer.temp));
    dp_status status = dp__array_write_in(&writer, path, put, what);
    dp_scope_end(writer.temp);
    return status;
}

static dp_status dp__array_put_one(dp__array_writer *writer, const void *what)
{
    return dp__array_put_array(writer, what);
}

DP_API dp_status dp_npy_write(dp_ctx *ctx, const char *path, const dp_tensor *tensor)
{
    dp_value value = {.kind = DP_TENSOR, .as.t = tensor};
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp__os_check_path(__func__, path));
    DP_TRY(dp_check_pointer(__func__, "tensor", tensor));
    DP_TRY(dp_check_value(__func__, "tensor", value));
    return dp__os_named(__func__, path, dp__array_write(ctx, path, dp__array_put_one, tensor));
}

/* ==== >>packing ================================================================================
   A member's checksum is put into its header when its bytes are known.                          */

enum {
    DP__ZIP_VERSION = 20,
    DP__ZIP_VERSION64 = 45,
    DP__ZIP_UNIX = 3 << 8,
    DP__ZIP_DAY = 1 << 5 | 1, /* 1980-01-01 */
    DP__ZIP_CRC_AT = 14,
    DP__ZIP_FILLER = 0xd935, /* an extra field that only aligns, as in Android's packages */
    DP__ZIP_FILLER_BYTES = 6,
    DP__ZIP_NAME_MOST = 0xffff
};

typedef struct dp__npz_put { /* a member that was put */
    const char *name;
    size_t name_bytes; /* with .npy */
    uint32_t crc;
    uint64_t bytes, at;
} dp__npz_put;

typedef struct dp__npz_head { /* a header that is being made */
    char bytes[128];
    size_t count;
} dp__npz_head;

static void dp__npz_add(dp__npz_head *head, uint64_t number, int bytes)
{
    for (; bytes > 0; bytes--, number >>= 8)
        head->bytes[head->count++] = (char)(number & 0xff);
}

static uint64_t dp__npz_cap(uint64_t number)
{
    return number < dp__npz_most32 ? number : dp__npz_most32;
}

/* Where numbers do not fit into 32 bits; a member's own header does not have its place. */
static void dp__npz_add_extra64(dp__npz_head *head, const dp__npz_put *put, bool has_place)
{
    bool large = put->bytes >= dp__npz_most32, far = has_place && put->at >= dp__npz_most32;
    if (!large && !far)
        return;
    dp__npz_add(head, DP__ZIP_EXTRA64, 2);
    dp__npz_add(head, (large ? 16u : 0u) + (far ? 8u : 0u), 2);
    if (large) {
        dp__npz_add(head, put->bytes, 8);
        dp__npz_add(head, put->bytes, 8);
    }
    if (far)
        dp__npz_add(head, put->at, 8);
}

/* What members' headers and entries have in common: from the version to the name's length. */
static void dp__npz_add_member(dp__npz_head *head, const dp__npz_put *put, size_t extra)
{
    int flags = 0;
    for (size_t i = 0; put->name[i] != '\0'; i++)
        flags |= (unsigned char)put->name[i] >= 0x80 ? DP__ZIP_UTF8 : 0;
    bool large = put->bytes >= dp__npz_most32 || put->at >= dp__npz_most32;
    dp__npz_add(head, large ? DP__ZIP_VERSION64 : DP__ZIP_VERSION, 2);
    dp__npz_add(head, (uint64_t)flags, 2);
    dp__npz_add(head, 0, 4); /* stored; the time of day */
    dp__npz_add(head, DP__ZIP_DAY, 2);
    dp__npz_add(head, put->crc, 4);
    dp__npz_add(head, dp__npz_cap(put->bytes), 4);
    dp__npz_add(head, dp__npz_cap(put->bytes), 4);
    dp__npz_add(head, put->name_bytes, 2);
    dp__npz_add(head, extra, 2);
}

static dp_status dp__npz_put_name(dp__array_writer *writer, const dp__npz_put *put)
{
    DP_TRY(dp__array_put(writer, put->name, strlen(put->name)));
    return dp__array_put(writer, dp__array_suffix, sizeof dp__array_suffix - 1);
}

/* The bytes of a member begin at a multiple of 64, and those of its elements do, too. */
static dp_status dp__npz_put_header(dp__array_writer *writer, const dp__npz_put *put)
{
    dp__npz_head head = {.count = 0}, extra = {.count = 0};
    dp__npz_add_extra64(&extra, put, false);
    uint64_t end = put->at + DP__ZIP_MEMBER_BYTES + put->name_bytes + extra.count;
    size_t filler = (size_t)(DP__ARRAY_ALIGN - end % DP__ARRAY_ALIGN);
    if (filler < DP__ZIP_FILLER_BYTES)
        filler += DP__ARRAY_ALIGN;
    dp__npz_add(&extra, DP__ZIP_FILLER, 2);
    dp__npz_add(&extra, filler - 4, 2);
    dp__npz_add(&extra, DP__ARRAY_ALIGN, 2);
    while (filler-- > DP__ZIP_FILLER_BYTES)
        dp__npz_add(&extra, 0, 1);
    dp__npz_add(&head, DP__ZIP_MEMBER, 4);
    dp__npz_add_member(&head, put, extra.count);
    DP_TRY(dp__array_put(writer, head.bytes, head.count));
    DP_TRY(dp__npz_put_name(writer, put));
    return dp__array_put(writer, extra.bytes, extra.count);
}

static dp_status dp__npz_put_member(dp__array_writer *writer, const dp_tensor *tensor,
                                    dp__npz_put *put)
{
    char bytes[DP__ARRAY_HEADER];
    put->at = writer->at;
    put->bytes = dp__array_header_make(tensor, bytes) +
                 (uint64_t)dp_tensor_count(tensor) * dp_dtype_bytes((dp_dtype)tensor->dtype);
    DP_TRY(dp__npz_put_header(writer, put));
    writer->crc = 0xffffffff;
    DP_TRY(dp__array_put_array(writer, tensor));
    put->crc = ~writer->crc;
    dp__npz_head crc = {.count = 0};
    dp__npz_add(&crc, put->crc, 4);
    uint64_t at = put->at + DP__ZIP_CRC_AT, flushed = writer->at - writer->filled;
    if (at >= flushed) {
        memcpy(writer->chunk + (at - flushed), crc.bytes, crc.count);
        return DP_OK;
    }
    DP_TRY(dp__array_flush(writer));
    return dp__os_part_mend(&writer->part, crc.bytes, crc.count, at);
}

static dp_status dp__npz_put_entry(dp__array_writer *writer, const dp__npz_put *put)
{
    dp__npz_head head = {.count = 0}, extra = {.count = 0};
    dp__npz_add_extra64(&extra, put, true);
    dp__npz_add(&head, DP__ZIP_ENTRY, 4);
    dp__npz_add(&head, DP__ZIP_UNIX | DP__ZIP_VERSION64, 2);
    dp__npz_add_member(&head, put, extra.count);
    dp__npz_add(&head, 0, 6);              /* no comment; disk 0; no text */
    dp__npz_add(&head, 0100644u << 16, 4); /* a file that all may read */
    dp__npz_add(&head, dp__npz_cap(put->at), 4);
    DP_TRY(dp__array_put(writer, head.bytes, head.count));
    DP_TRY(dp__npz_put_name(writer, put));
    return dp__array_put(writer, extra.bytes, extra.count);
}

static dp_status dp__npz_put_end(dp__array_writer *writer, uint64_t count, uint64_t at)
{
    enum { MOST16 = 0xffff };
    dp__npz_head head = {.count = 0};
    uint64_t end = writer->at, bytes = end - at, short_count = count < MOST16 ? count : MOST16;
    if (count >= MOST16 || bytes >= dp__npz_most32 || at >= dp__npz_most32) {
        dp__npz_add(&head, DP__ZIP_END64, 4);
        dp__npz_add(&head, DP__ZIP_END64_BYTES - 12, 8);
        dp__npz_add(&head, DP__ZIP_UNIX | DP__ZIP_VERSION64, 2);
        dp__npz_add(&head, DP__ZIP_VERSION64, 2);
        dp__npz_add(&head, 0, 8); /* disks */
        dp__npz_add(&head, count, 8);
        dp__npz_add(&head, count, 8);
        dp__npz_add(&head, bytes, 8);
        dp__npz_add(&head, at, 8);
        dp__npz_add(&head, DP__ZIP_FINDER64, 4);
        dp__npz_add(&head, 0, 4);
        dp__npz_add(&head, end, 8);
        dp__npz_add(&head, 1, 4); /* disk */
    }
    dp__npz_add(&head, DP__ZIP_END, 4);
    dp__npz_add(&head, 0, 4); /* disks */
    dp__npz_add(&head, short_count, 2);
    dp__npz_add(&head, short_count, 2);
    dp__npz_add(&head, dp__npz_cap(bytes), 4);
    dp__npz_add(&head, dp__npz_cap(at), 4);
    dp__npz_add(&head, 0, 2); /* no comment */
    return dp__array_put(writer, head.bytes, head.count);
}

typedef struct dp__npz_what { /* to be written */
    dp_value dict;
    dp__npz_put *puts;
} dp__npz_what;

static dp_status dp__npz_put_all(dp__array_writer *writer, const void *user)
{
    const dp__npz_what *what = user;
    size_t count = dp_count(what->dict);
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__npz_put_member(writer, dp_at(what->dict, i).as.t, &what->puts[i]));
    uint64_t at = writer->at;
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__npz_put_entry(writer, &what->puts[i]));
    return dp__npz_put_end(writer, count, at);
}

/* A name is a key; nothing but tensors has a form in numpy's files. */
static dp_status dp__npz_check(dp_value dict, dp__npz_put *puts)
{
    for (size_t i = 0; i < dp_count(dict); i++) {
        const char *key = dp_key_at(dict, i);
        size_t count = strlen(key);
        bool text = dp_is_utf8(key);
        dp__array_text name = {.at = key, .end = key + count};
        puts[i] = (dp__npz_put){.name = key, .name_bytes = count + sizeof dp__array_suffix - 1};
        if (!text || puts[i].name_bytes > DP__ZIP_NAME_MOST)
            return dp_error(DP_ERR_INVALID, "key '%s' is %s", dp__array_show(&name),
                            text ? "too long" : "not UTF-8");
        if (dp_at(dict, i).kind != DP_TENSOR)
            return dp_error(DP_ERR_INVALID,
                            "'%s' is not a tensor: dp_file_write (dp_save.h) writes other values",
                            dp__array_show(&name));
    }
    return DP_OK;
}

static dp_status dp__npz_write(dp_ctx *ctx, dp_scope *temp, const char *path, dp_value dict)
{
    dp__npz_what what = {.dict = dict};
    dp__array_writer writer = {.ctx = ctx, .temp = temp};
    dp__array_crcs *crcs = dp_scope_alloc(temp, sizeof *crcs);
    what.puts = dp_scope_alloc(temp, dp_count(dict) * sizeof *what.puts);
    if (crcs == NULL || what.puts == NULL)
        return dp_no_memory();
    DP_TRY(dp__npz_check(dict, what.puts));
    dp__array_crcs_make(*crcs);
    writer.crcs = (const dp__array_crcs *)crcs;
    return dp__array_write_in(&writer, path, dp__npz_put_all, &what);
}

DP_API dp_status dp_npz_write(dp_ctx *ctx, const char *path, dp_value dict)
{
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp__os_check_path(__func__, path));
    DP_TRY(dp_check_value(__func__, "dict", dict));
    if (dict.kind != DP_DICT)
        return dp_error(DP_ERR_INVALID, "%s: dict is not a dict", __func__);
    dp_scope *temp = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__npz_write(ctx, temp, path, dict);
    dp_scope_end(temp);
    return dp__os_named(__func__, path, status);
}

/* ==== >>digits =================================================================================
   The shortest decimal that is read as a number stands for it. The C library writes numbers in as
   many exact digits as one asks for, and reads them. What stands for a point depends on the locale:
   it is skipped in what is written, and there is none in what is read.                           */

enum { DP__DIGITS_MOST = 17 }; /* all that f64 takes */

typedef struct dp__decimal {
    char text[DP__DIGITS_MOST]; /* without zeros at the end, or a NUL */
    int count;                  /* at least one digit */
    int exponent;               /* of the first */
} dp__decimal;

enum { DP__DECIMAL_ROOM = DP__DIGITS_MOST + 24 }; /* with a sign, a point of some bytes, exponent */

static double dp__array_float(dp_dtype dtype, const char *element)
{
    static const struct {
        int bytes, fraction, exponent; /* the last two in bits */
    } forms[] = {{4, 23, 8}, {8, 52, 11}, {2, 10, 5}, {2, 7, 8}};
    int fraction = forms[dtype].fraction, exponent = forms[dtype].exponent;
    uint64_t bits = dp__array_number(element, forms[dtype].bytes), one = 1;
    int most = (1 << exponent) - 1, biased = (int)(bits >> fraction) & most;
    double m = (double)((bits & ((one << fraction) - 1)) + (biased > 0 ? one << fraction : 0)),
           size = ldexp(m, (biased > 0 ? biased : 1) - most / 2 - fraction);
    if (biased == most)
        size = (bits & ((one << fraction) - 1)) != 0 ? (double)NAN : HUGE_VAL;
    return (bits >> (fraction + exponent) & 1) != 0 ? -size : size;
}

/* Rounds to a dtype, as if it had no largest number. */
static double dp__array_round(dp_dtype dtype, double number)
{
    static const int bits[] = {24, 53, 11, 8}, least[] = {-149, -1074, -24, -133};
    int exponent;
    (void)frexp(number, &exponent);
    exponent = exponent - bits[dtype] > least[dtype] ? exponent - bits[dtype] : least[dtype];
    return ldexp(nearbyint(ldexp(number, -exponent)), exponent);
}

/* Returns true if the decimal is read as the number. Decimals of f32 are not rounded twice. */
static bool dp__decimal_is(const dp__decimal *digits, dp_dtype dtype, double size)
{
    char text[DP__DECIMAL_ROOM];
    snprintf(text, sizeof text, "%.*se%d", digits->count, digits->text,
             digits->exponent + 1 - digits->count);
    double again = dtype == DP_F32 ? (double)strtof(text, NULL)
                                   : dp__array_round(dtype, strtod(text, NULL));
    return !(again < size) && !(again > size);
}

/* Adds one in the last place. */
static void dp__decimal_next(dp__decimal *digits)
{
    while (digits->count > 0 && digits->text[digits->count - 1] == '9')
        digits->count--;
    if (digits->count > 0) {
        digits->text[digits->count - 1]++;
        return;
    }
    digits->text[digits->count++] = '1';
    digits->exponent++;
}

/* Rounds to so many digits. Returns true if the number is read again from these, or from the next
   decimal: the neighbour below a power of two is nearer than the one above. */
static bool dp__decimal_round(dp_dtype dtype, double size, int count, dp__decimal *out)
{
    char text[DP__DECIMAL_ROOM], *at = text;
    snprintf(text, sizeof text, "%.*e", count - 1, size);
    out->count = 0;
    for (; *at != 'e'; at++)
        if (*at >= '0' && *at <= '9')
            out->text[out->count++] = *at;
    out->exponent = atoi(at + 1);
    if (dp__decimal_is(out, dtype, size))
        return true;
    dp__decimal next = *out;
    dp__decimal_next(&next);
    bool found = dp__decimal_is(&next, dtype, size);
    *out = found ? next : *out;
    return found;
}

/* Makes the shortest decimal that is read as the number, or else rounds it to the most digits. */
static void dp__decimal_make(dp_dtype dtype, double size, int least, int most, dp__decimal *out)
{
    while (least < most) { /* if some digits are enough, more are, too */
        int middle = (least + most) / 2;
        bool found = dp__decimal_round(dtype, size, middle, out);
        least = found ? least : middle + 1;
        most = found ? middle : most;
    }
    dp__decimal_round(dtype, size, least, out);
    while (out->count > 1 && out->text[out->count - 1] == '0')
        out->count--;
}

/* Makes the same, but with no more than so many digits behind the point. */
static void dp__decimal_places(dp_dtype dtype, double size, int places, dp__decimal *out)
{
    dp__decimal_make(dtype, size, 1, DP__DIGITS_MOST, out);
    int most = out->exponent + 1 + places;
    if (out->count > most)
        dp__decimal_make(dtype, size, most, most, out);
}

/* ==== >>numbers ================================================================================
   Numbers as text: in columns as numpy's FloatingFormat has them, or one by one as Python's str. */

enum { DP__PRINT_PRECISION = 8, DP__PRINT_WORD = 64 };

typedef struct dp__print_word { /* a number as text */
    char text[DP__PRINT_WORD];
    int count;
    int left, right; /* characters before the point, and behind it */
    int tail;        /* those from the "e" on */
} dp__print_word;

static void dp__print_char(dp__print_word *word, char c, int count)
{
    for (; count > 0 && word->count < DP__PRINT_WORD; count--)
        word->text[word->count++] = c;
}

/* "12.5", "0.001", "1." */
static void dp__print_positional(const dp__decimal *digits, bool negative, dp__print_word *out)
{
    int at = 0, whole = digits->exponent + 1;
    *out = (dp__print_word){.count = 0};
    dp__print_char(out, '-', negative);
    for (; at < whole; at++)
        dp__print_char(out, at < digits->count ? digits->text[at] : '0', 1);
    dp__print_char(out, '0', whole <= 0);
    out->left = out->count;
    dp__print_char(out, '.', 1);
    dp__print_char(out, '0', -whole);
    for (; at < digits->count && !(digits->count == 1 && digits->text[0] == '0'); at++)
        dp__print_char(out, digits->text[at], 1);
    out->right = out->count - out->left - 1;
}

/* "1.25e+03", with so many digits behind the point and in the exponent, at least. */
static void dp__print_scientific(const dp__decimal *digits, bool negative, int precision,
                                 int exponent_digits, dp__print_word *out)
{
    *out = (dp__print_word){.count = 0};
    dp__print_char(out, '-', negative);
    dp__print_char(out, digits->text[0], 1);
    out->left = out->count;
    dp__print_char(out, '.', 1);
    for (int i = 1; i < digits->count; i++)
        dp__print_char(out, digits->text[i], 1);
    dp__print_char(out, '0', precision - (digits->count - 1));
    out->right = out->count - out->left - 1;
    int room = DP__PRINT_WORD - out->count;
    out->tail = snprintf(out->text + out->count, (size_t)room, "e%c%0*d",
                         digits->exponent < 0 ? '-' : '+', exponent_digits, abs(digits->exponent));
    out->count += out->tail;
}

static void dp__print_put(dp__print_word *word, const char *text)
{
    size_t count = strlen(text);
    *word = (dp__print_word){.count = (int)count};
    memcpy(word->text, text, count);
}

static void dp__print_special(double number, dp__print_word *out)
{
    dp__print_put(out, isnan(number) ? "nan" : number < 0 ? "-inf" : "inf");
}

/* From here on numbers have an exponent: with more digits than the dtype has, or than 8. */
static const double dp__print_large[] = {1e6, 1e8, 1e3, 1e2};
static const double dp__print_small = 1e-4, dp__print_range = 1000, dp__print_large_f64 = 1e16;

/* As Python's repr of a number, and numpy's str of a scalar: "1.0", "1e-05". */
static void dp__print_single(dp_dtype dtype, const char *element, dp__print_word *out)
{
    dp__decimal digits;
    double large = dtype == DP_F64 ? dp__print_large_f64 : dp__print_large[dtype],
           number = dp__array_float(dtype, element), size = fabs(number);
    if (!isfinite(number)) {
        dp__print_special(number, out);
        return;
    }
    dp__decimal_make(dtype, size, 1, DP__DIGITS_MOST, &digits);
    if (size == 0 || (size >= dp__print_small && size < large)) {
        dp__print_positional(&digits, signbit(number) != 0, out);
        dp__print_char(out, '0', out->right == 0);
        return;
    }
    dp__print_scientific(&digits, signbit(number) != 0, 0, 2, out);
    if (out->right == 0) { /* no point before the "e" */
        memmove(out->text + out->left, out->text + out->left + 1, (size_t)out->tail);
        out->count--;
    }
}

typedef struct dp__print_form { /* of all elements of a tensor */
    dp_dtype dtype;
    bool scientific;
    int left, right; /* columns before the point, and behind it */
    int precision, exponent_digits;
    bool spaced; /* bools: " True" is as wide as "False" */
} dp__print_form;

static bool dp__print_is_scientific(dp_dtype dtype, const char *data, size_t count)
{
    double most = 0, least = HUGE_VAL;
    for (size_t i = 0; i < count; i++) {
        double size = fabs(dp__array_float(dtype, data + i * dp_dtype_bytes(dtype)));
        if (size == 0 || !isfinite(size))
            continue;
        most = size > most ? size : most;
        least = size < least ? size : least;
    }
    return most > 0 &&
           (most >= dp__print_large[dtype] || least < dp__array_round(dtype, dp__print_small) ||
            dp__array_round(dtype, most / least) > dp__print_range);
}

static void dp__print_widen(int *width, int count)
{
    *width = count > *width ? count : *width;
}

static void dp__print_measure(dp__print_form *form, const char *data, size_t count)
{
    dp__print_word word;
    dp__decimal digits;
    int special = 0;
    form->scientific = dp__print_is_scientific(form->dtype, data, count);
    for (size_t i = 0; i < count; i++) {
        double number = dp__array_float(form->dtype, data + i * dp_dtype_bytes(form->dtype));
        if (!isfinite(number)) {
            dp__print_special(number, &word);
            dp__print_widen(&special, isnan(number) ? 3 : word.count);
            continue;
        }
        if (form->scientific) {
            dp__decimal_make(form->dtype, fabs(number), 1, 1 + DP__PRINT_PRECISION, &digits);
            dp__print_scientific(&digits, signbit(number) != 0, 0, 2, &word);
        } else {
            dp__decimal_places(form->dtype, fabs(number), DP__PRINT_PRECISION, &digits);
            dp__print_positional(&digits, signbit(number) != 0, &word);
        }
        dp__print_widen(&form->left, word.left);
        dp__print_widen(&form->right, word.right);
        dp__print_widen(&form->exponent_digits, word.tail - 2);
    }
    form->precision = form->right;
    if (form->scientific)
        form->right += 2 + form->exponent_digits;
    dp__print_widen(&form->left, special - (form->right + 1));
}

static void dp__print_float(const dp__print_form *form, const char *element, dp__print_word *out)
{
    dp__print_word word;
    dp__decimal digits;
    double number = dp__array_float(form->dtype, element);
    int count = 1 + form->precision;
    if (!isfinite(number)) {
        dp__print_special(number, &word);
        word.left = word.count - form->right - 1;
    } else if (form->scientific) {
        dp__decimal_make(form->dtype, fabs(number), count, count, &digits);
        dp__print_scientific(&digits, signbit(number) != 0, form->precision, form->exponent_digits,
                             &word);
    } else {
        dp__decimal_places(form->dtype, fabs(number), DP__PRINT_PRECISION, &digits);
        dp__print_positional(&digits, signbit(number) != 0, &word);
        dp__print_char(&word, ' ', form->right - word.right);
    }
    *out = (dp__print_word){.count = 0};
    dp__print_char(out, ' ', form->left - word.left);
    memcpy(out->text + out->count, word.text, (size_t)word.count);
    out->count += word.count;
}

static int64_t dp__print_integer(dp_dtype dtype, const char *element)
{
    size_t bytes = dp_dtype_bytes(dtype);
    uint64_t bits = dp__array_number(element, (int)bytes), sign = (uint64_t)1 << (8 * bytes - 1);
    if (dtype == DP_U8 || dtype == DP_BOOL)
        return (int64_t)bits;
    return (int64_t)((bits ^ sign) - sign);
}

static int dp__print_number(const dp__print_form *form, const char *element, int width,
                            dp__print_word *out)
{
    *out = (dp__print_word){.count = 0};
    out->count = snprintf(out->text, DP__PRINT_WORD, "%*lld", width,
                          (long long)dp__print_integer(form->dtype, element));
    return out->count;
}

static void dp__print_form_make(dp__print_form *form, const char *data, size_t count)
{
    dp__print_word word;
    bool floats = dp_dtype_is_float(form->dtype);
    if (floats)
        dp__print_measure(form, data, count);
    for (size_t i = 0; i < count && !floats; i++)
        dp__print_widen(&form->left,
                        dp__print_number(form, data + i * dp_dtype_bytes(form->dtype), 0, &word));
}

static void dp__print_element(const dp__print_form *form, const char *element, dp__print_word *out)
{
    if (dp_dtype_is_float(form->dtype))
        dp__print_float(form, element, out);
    else if (form->dtype == DP_BOOL)
        dp__print_put(out, *element == 0 ? "False" : form->spaced ? " True" : "True");
    else
        dp__print_number(form, element, form->left, out);
}

/* ==== >>lines ==================================================================================
   Only the corners of a large tensor are printed, and only they are copied to the host.         */

enum { DP__PRINT_MOST = 1000, DP__PRINT_EDGE = 3, DP__PRINT_WIDTH = 75 };

typedef struct dp__print_out { /* text that grows */
    dp_ctx *ctx;
    dp_scope *scope, *temp;
    char *text;
    size_t count, room;
    size_t line; /* where the line begins */
    bool failed; /* no memory */
} dp__print_out;

static void dp__print_bytes(dp__print_out *out, const char *bytes, size_t count)
{
    if (out->room - out->count <= count && !out->failed) {
        size_t room = 2 * out->room + count + 1;
        char *text = dp_scope_alloc(out->scope, room);
        out->failed = text == NULL;
        if (text != NULL && out->count > 0)
            memcpy(text, out->text, out->count);
        if (text != NULL) {
            out->text = text;
            out->room = room;
        }
    }
    if (out->failed)
        return;
    memcpy(out->text + out->count, bytes, count);
    out->count += count;
    out->text[out->count] = '\0';
}

static void dp__print_words(dp__print_out *out, const char *text)
{
    dp__print_bytes(out, text, strlen(text));
}

static void dp__print_line_end(dp__print_out *out, int lines, int indent)
{
    while (!out->failed && out->count > out->line && out->text[out->count - 1] == ' ')
        out->count--;
    for (; lines > 0; lines--)
        dp__print_words(out, "\n");
    out->line = out->count;
    for (; indent > 0; indent--)
        dp__print_words(out, " ");
}

typedef struct dp__print_array { /* that is printed */
    dp__print_out *out;
    const char *separator; /* " " or ", " */
    int indent, width;     /* of its first bracket; of a line */
    dp_tensor corners;
    bool cut[DP_MAX_DIMS]; /* something is left out in the middle of this dim */
    dp__print_form form;
} dp__print_array;

/* Another word in a line, if it fits, or if the next line has no more room. */
static void dp__print_extend(const dp__print_array *array, int dim, const char *word, size_t count)
{
    dp__print_out *out = array->out;
    size_t indent = (size_t)(array->indent + dim + 1), room = (size_t)(array->width - dim - 1);
    if (out->count - out->line + count > room && out->count - out->line > indent)
        dp__print_line_end(out, 1, (int)indent);
    dp__print_bytes(out, word, count);
}

/* Between two rows of this dim, or two elements of the last. */
static void dp__print_next(const dp__print_array *array, int dim)
{
    dp__print_words(array->out, array->separator);
    if (dim + 1 < array->corners.ndim)
        dp__print_line_end(array->out, array->corners.ndim - 1 - dim, array->indent + dim + 1);
}

static const char *dp__print_rows(const dp__print_array *array, int dim, const char *element)
{
    dp__print_word word;
    if (dim == array->corners.ndim) {
        dp__print_element(&array->form, element, &word);
        if (dim > 0)
            dp__print_extend(array, dim - 1, word.text, (size_t)word.count);
        else
            dp__print_bytes(array->out, word.text, (size_t)word.count);
        return element + dp_dtype_bytes(array->form.dtype);
    }
    dp__print_words(array->out, "[");
    for (int64_t i = 0; i < array->corners.shape[dim]; i++) {
        if (i > 0)
            dp__print_next(array, dim);
        if (i == DP__PRINT_EDGE && array->cut[dim]) {
            if (dim + 1 == array->corners.ndim)
                dp__print_extend(array, dim, "...", 3);
            else
                dp__print_words(array->out, "...");
            dp__print_next(array, dim);
        }
        element = dp__print_rows(array, dim + 1, element);
    }
    dp__print_words(array->out, "]");
    return element;
}

/* The first and last of each dim that is cut, from this dim on. */
static dp_status dp__print_corners(const dp__print_array *array, int dim, const dp_tensor *from,
                                   const dp_tensor *to)
{
    dp_tensor part, own;
    while (dim < from->ndim && !array->cut[dim])
        dim++;
    if (dim == from->ndim)
        return dp_copy(array->out->ctx, to, from, NULL);
    for (int k = 0; k < 2; k++) {
        int64_t first = k * (from->shape[dim] - DP__PRINT_EDGE);
        DP_TRY(dp_narrow(from, dim, first, DP__PRINT_EDGE, &part));
        DP_TRY(dp_narrow(to, dim, (int64_t)k * DP__PRINT_EDGE, DP__PRINT_EDGE, &own));
        DP_TRY(dp__print_corners(array, dim + 1, &part, &own));
    }
    return DP_OK;
}

static dp_status dp__print_begin(dp__print_array *array, const dp_tensor *tensor)
{
    int64_t shape[DP_MAX_DIMS] = {0};
    bool summary = dp_tensor_count(tensor) > DP__PRINT_MOST;
    for (int d = 0; d < tensor->ndim; d++) {
        array->cut[d] = summary && tensor->shape[d] > 2 * DP__PRINT_EDGE;
        shape[d] = array->cut[d] ? 2 * DP__PRINT_EDGE : tensor->shape[d];
    }
    DP_TRY(dp_tensor_new(array->out->temp, (dp_device){0, 0}, (dp_dtype)tensor->dtype, tensor->ndim,
                         shape, &array->corners));
    DP_TRY(dp__print_corners(array, 0, tensor, &array->corners));
    array->form = (dp__print_form){.dtype = (dp_dtype)tensor->dtype, .spaced = tensor->ndim > 0};
    dp__print_form_make(&array->form, array->corners.data,
                        (size_t)dp_tensor_count(&array->corners));
    return DP_OK;
}

/* numpy's str. */
static dp_status dp__print_plain(dp__print_out *out, const dp_tensor *tensor)
{
    dp__print_array array = {.out = out, .separator = " ", .width = DP__PRINT_WIDTH};
    dp__print_word word;
    DP_TRY(dp__print_begin(&array, tensor));
    const char *data = array.corners.data;
    if (tensor->ndim == 0 && dp_dtype_is_float(array.form.dtype)) {
        dp__print_single(array.form.dtype, data, &word);
        dp__print_bytes(out, word.text, (size_t)word.count);
    } else if (dp_tensor_count(tensor) == 0) {
        dp__print_words(out, "[]");
    } else {
        dp__print_rows(&array, 0, data);
    }
    return DP_OK;
}

/* What array(...) does not tell by itself. */
static int dp__print_extras(const dp_tensor *tensor, char *text, size_t room)
{
    static const char *const names[] = {"float32", "float64", "float16", "bfloat16", "int64",
                                        "int32",   "int16",   "int8",    "uint8",    "bool"};
    int64_t count = dp_tensor_count(tensor);
    int at = 0;
    bool told = tensor->dtype == DP_F64 || tensor->dtype == DP_I64 || tensor->dtype == DP_BOOL;
    text[0] = '\0';
    if (count > DP__PRINT_MOST || (count == 0 && tensor->ndim > 1)) {
        at += snprintf(text, room, "shape=(");
        for (int d = 0; d < tensor->ndim; d++)
            at += snprintf(text + at, room - (size_t)at, "%s%lld", d > 0 ? ", " : "",
                           (long long)tensor->shape[d]);
        at += snprintf(text + at, room - (size_t)at, "%s)", tensor->ndim == 1 ? "," : "");
    }
    if (!told || count == 0)
        at += snprintf(text + at, room - (size_t)at, "%sdtype=%s", at > 0 ? ", " : "",
                       names[tensor->dtype]);
    return at;
}

/* numpy's repr. */
static dp_status dp__print_whole(dp__print_out *out, const dp_tensor *tensor)
{
    static const char prefix[] = "array(";
    enum { INDENT = sizeof prefix - 1, EXTRAS = 256 };
    char extras[EXTRAS];
    dp__print_array array = {
        .out = out, .separator = ", ", .indent = INDENT, .width = DP__PRINT_WIDTH - 1};
    DP_TRY(dp__print_begin(&array, tensor));
    out->line = out->count;
    dp__print_words(out, prefix);
    if (dp_tensor_count(tensor) == 0)
        dp__print_words(out, "[]");
    else
        dp__print_rows(&array, 0, array.corners.data);
    int count = dp__print_extras(tensor, extras, sizeof extras);
    if (count > 0) {
        dp__print_words(out, ",");
        if (out->count - out->line + (size_t)count + 2 > DP__PRINT_WIDTH)
            dp__print_line_end(out, 1, INDENT);
        else
            dp__print_words(out, " ");
    }
    dp__print_words(out, extras);
    dp__print_words(out, ")");
    return DP_OK;
}

/* ==== >>values =================================================================================
   Python's repr.                                                                                */

/* Returns true for characters that Python escapes: Unicode's control, format and private ones,
   separators but ' ', and those that no version of Unicode has (almost all of the planes 4 to 16,
   and "noncharacters"). Python also escapes those that its own version does not have yet. */
static bool dp__print_is_hidden(uint32_t code)
{
    static const uint32_t hidden[][2] = {
        {0, 0x1F},          {0x7F, 0xA0},       {0xAD, 0xAD},       {0x600, 0x605},
        {0x61C, 0x61C},     {0x6DD, 0x6DD},     {0x70F, 0x70F},     {0x890, 0x891},
        {0x8E2, 0x8E2},     {0x1680, 0x1680},   {0x180E, 0x180E},   {0x2000, 0x200F},
        {0x2028, 0x202F},   {0x205F, 0x206F},   {0x3000, 0x3000},   {0xE000, 0xF8FF},
        {0xFDD0, 0xFDEF},   {0xFEFF, 0xFEFF},   {0xFFF9, 0xFFFB},   {0x110BD, 0x110BD},
        {0x110CD, 0x110CD}, {0x13430, 0x1343F}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A},
        {0x40000, 0xE00FF}, {0xE01F0, 0x10FFFF}};
    bool found = (code & 0xFFFE) == 0xFFFE;
    for (size_t i = 0; i < sizeof hidden / sizeof hidden[0] && !found; i++)
        found = code >= hidden[i][0] && code <= hidden[i][1];
    return found;
}

/* A byte that is not UTF-8 is escaped, too. */
static void dp__print_string(dp__print_out *out, const char *text)
{
    char quote = strchr(text, '\'') != NULL && strchr(text, '"') == NULL ? '"' : '\'', escape[16];
    dp__print_bytes(out, &quote, 1);
    for (size_t count; *text != '\0'; text += count > 0 ? count : 1) {
        count = dp_utf8_bytes(text);
        uint32_t code = (unsigned char)*text & (count > 1 ? 0x7FU >> count : 0xFFU);
        for (size_t i = 1; i < count; i++)
            code = code << 6 | ((unsigned char)text[i] & 0x3FU);
        if (code == '\n' || code == '\r' || code == '\t')
            dp__print_words(out, code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t");
        else if (count == 0 || dp__print_is_hidden(code)) {
            int digits = code < 0x100 ? 2 : code < 0x10000 ? 4 : 8;
            snprintf(escape, sizeof escape, "\\%c%0*x", "xuU"[digits / 4], digits, (unsigned)code);
            dp__print_words(out, escape);
        } else {
            if (code == '\\' || code == (unsigned char)quote)
                dp__print_words(out, "\\");
            dp__print_bytes(out, text, count);
        }
    }
    dp__print_bytes(out, &quote, 1);
}

static void dp__print_scalar(dp__print_out *out, dp_value value)
{
    char text[DP__PRINT_WORD];
    dp__print_word word;
    if (value.kind == DP_FLOAT) {
        dp__print_single(DP_F64, (const char *)&value.as.f, &word);
        dp__print_bytes(out, word.text, (size_t)word.count);
        return;
    }
    if (value.kind == DP_INT)
        snprintf(text, sizeof text, "%lld", (long long)value.as.i);
    else if (value.kind == DP_OPAQUE)
        snprintf(text, sizeof text, "<opaque %p>", value.as.p);
    else
        snprintf(text, sizeof text, "%s",
                 value.kind == DP_NONE ? "None"
                 : value.as.b          ? "True"
                                       : "False");
    dp__print_words(out, text);
}

static dp_status dp__print_value(dp__print_out *out, dp_value value);

static dp_status dp__print_items(dp__print_out *out, dp_value value)
{
    size_t count = dp_count(value);
    const char *brackets = value.kind == DP_DICT ? "{}" : value.kind == DP_LIST ? "[]" : "()";
    dp__print_bytes(out, brackets, 1);
    for (size_t i = 0; i < count; i++) {
        dp__print_words(out, i > 0 ? ", " : "");
        if (value.kind == DP_DICT) {
            dp__print_string(out, dp_key_at(value, i));
            dp__print_words(out, ": ");
        }
        DP_TRY(dp__print_value(out, dp_at(value, i)));
    }
    if (value.kind == DP_TUPLE && count == 1)
        dp__print_words(out, ",");
    dp__print_bytes(out, brackets + 1, 1);
    return DP_OK;
}

static dp_status dp__print_value(dp__print_out *out, dp_value value)
{
    if (value.kind == DP_CONTAINER)
        return dp__print_value(out, value.as.c->data);
    if (value.kind == DP_TENSOR)
        return dp__print_whole(out, value.as.t);
    if (value.kind == DP_LIST || value.kind == DP_TUPLE || value.kind == DP_DICT)
        return dp__print_items(out, value);
    if (value.kind == DP_STRING)
        dp__print_string(out, value.as.s);
    else
        dp__print_scalar(out, value);
    return DP_OK;
}

/* As print(value) in Python, without the line end; the text lies in `scope`. */
static dp_status dp__print_make(dp_ctx *ctx, dp_scope *scope, dp_value value, const char **out)
{
    dp__print_out made = {.ctx = ctx, .scope = scope, .temp = dp_scope_begin(ctx)};
    dp_status status = dp_scope_check(made.temp);
    if (status == DP_OK) {
        dp__print_words(&made, "");
        if (value.kind == DP_TENSOR)
            status = dp__print_plain(&made, value.as.t);
        else if (value.kind == DP_STRING)
            dp__print_words(&made, value.as.s);
        else
            status = dp__print_value(&made, value);
    }
    dp_scope_end(made.temp);
    if (status == DP_OK && made.failed)
        return dp_no_memory();
    *out = made.text;
    return status;
}

DP_API dp_status dp_print_text(dp_ctx *ctx, dp_scope *scope, dp_value value, const char **out)
{
    const char *text;
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_scope(__func__, scope, ctx));
    DP_TRY(dp_check_value(__func__, "value", value));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp_error_in(__func__, dp__print_make(ctx, scope, value, &text)));
    *out = text;
    return DP_OK;
}

DP_API dp_status dp_print(dp_ctx *ctx, FILE *file, dp_value value)
{
    const char *text = "";
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "file", file));
    DP_TRY(dp_check_value(__func__, "value", value));
    dp_scope *temp = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__print_make(ctx, temp, value, &text);
    if (status == DP_OK && !dp__os_print(file, text, "\n"))
        status =
            dp_error(DP_ERR_FILE, "the text cannot be written: %s", dp__os_why_text(dp__os_why()));
    dp_scope_end(temp);
    return dp_error_in(__func__, status);
}
#endif /* little-endian */
#endif /* DP_IMPLEMENTATION && !DP_ARRAY_IMPLEMENTED */
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
