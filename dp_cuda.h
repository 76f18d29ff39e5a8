/* dp_cuda.h - v0.1.0 - NVIDIA GPUs as devices of dp.h - MIT licence

   Include it instead of dp.h, or after; or define DP_USE_CUDA, and dp.h includes it. Link with
   -lcudart -lnvrtc; or define DP_DYNAMIC_LOAD together with DP_IMPLEMENTATION, and the libraries
   are loaded when a context opens: one binary for machines with and without them. Any C11 compiler
   will do: kernels are compiled when a device opens, for that device. CUDA 12.8 or newer.

   If there is no driver, no GPU, or one that is too old, dp_cuda()->count says so, and the next
   table of dp_config.backends is used.

   CONTENTS (search for the tag)
     >>native       streams and devices as CUDA knows them
     >>text         kernels: one text, compiled by NVRTC and, in tests, as C
     >>sums         those of them that add up
     >>steps        what optimizers do, sums of channels
     >>surface      all that is called of CUDA, and how it is found
     >>gpus         physical devices: context, kernels
     >>memory       slabs
     >>staging      pageable memory goes through a ring of pinned slots
     >>peers        which GPU can read which, and whether it reads the right bytes
     >>copies       in, out, inside, between
     >>launch       a dp_kernel becomes a launch
     >>device       the table of devices
     >>collectives  ranks, and the order of their streams
     >>adding       all-reduce, reduce-scatter
     >>spreading    broadcast, gathers; the table of collectives
*/

#define DP__CUDA_FIRST_DP /* dp.h must not include this file again */
#include "dp.h"           /* outside the guard, so that DP_IMPLEMENTATION is carried through */
#undef DP__CUDA_FIRST_DP

#ifndef DP_CUDA_H
#define DP_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>native =================================================================================
   For kernels of yours: launched on dp_cuda_stream(call->stream) they run in order with what the
   library enqueues.                                                                             */

struct CUstream_st; /* a cudaStream_t points to it */

DP_API const dp_device_ops *dp_cuda(void);
DP_API const dp_coll_ops *dp_cuda_coll(void); /* among the GPUs of one process */

/* NULL if it is not a stream of a CUDA device. */
DP_API struct CUstream_st *dp_cuda_stream(const dp_stream *stream);
/* The ordinal for cudaSetDevice, -1 if it is not a stream of a CUDA device. */
DP_API int dp_cuda_ordinal(const dp_stream *stream);

/* A stream of yours, for dp_use_stream. It stays yours; dp_cuda_release frees what stands for it
   here, when no context uses it any more. */
DP_MUST_USE DP_API dp_status dp_cuda_adopt(dp_ctx *ctx, int local_rank, struct CUstream_st *native,
                                           dp_stream **out);
DP_API void dp_cuda_release(dp_stream *stream);

#ifdef __cplusplus
}
#endif
#endif /* DP_CUDA_H */

#if (defined(DP_IMPLEMENTATION) || defined(DP_CUDA_TEXT_AS_C)) && !defined(DP_CUDA_IMPLEMENTED)
#define DP_CUDA_IMPLEMENTED

/* ==== >>text =====================================================================================
   The kernels. Each generator below is source for NVRTC, and C for tests: nothing in it is CUDA
   except what these macros stand for. A kernel gets one dp__cuda_params. Results do not depend on
   the number of blocks: sums are made in chunks whose size depends only on the count. NVRTC is told
   not to contract; conversions of halves are done with integers.                                */

enum { DP__CUDA_OPERANDS = 64, DP__CUDA_LANES = 256, DP__CUDA_CHUNKS = 4096 };

#if defined(DP_CUDA_TEXT_AS_C)
#define DP__CUDA_KERNEL(name) static void dp_cuda_##name(const struct dp__cuda_params p)
#define DP__CUDA_DEVICE       static inline
#define DP__CUDA_SHARED
#define DP__CUDA_SYNC  ;
#define DP__CUDA_SQRTF __builtin_sqrtf
#define DP__CUDA_SQRT  __builtin_sqrt
#define DP__CUDA_ROLLED
#define DP__CUDA_FIRST      0
#define DP__CUDA_STEP       1
#define DP__CUDA_LANE       0
#define DP__CUDA_LANE_STEP  1
#define DP__CUDA_BLOCK      0
#define DP__CUDA_BLOCK_STEP 1
#else
#define DP__CUDA_KERNEL(name) dp_global void dp_cuda_##name(const struct dp__cuda_params p)
#define DP__CUDA_DEVICE       dp_device
#define DP__CUDA_SHARED       dp_shared
#define DP__CUDA_SYNC         __syncthreads();
#define DP__CUDA_SQRTF        sqrtf
#define DP__CUDA_SQRT         sqrt
#define DP__CUDA_ROLLED       dp_rolled
#define DP__CUDA_FIRST        (blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x)
#define DP__CUDA_STEP         (gridDim.x * (unsigned long long)blockDim.x)
#define DP__CUDA_LANE         threadIdx.x
#define DP__CUDA_LANE_STEP    256
#define DP__CUDA_BLOCK        blockIdx.x
#define DP__CUDA_BLOCK_STEP   gridDim.x
#endif

/* clang-format off */
#define DP__CUDA_PARAMS                                                                            \
    struct dp__cuda_params {                                                                       \
        const void *in[64];                                                                        \
        void *out[64];                                                                             \
        unsigned long long count;                                                                  \
        unsigned long long chunk;                                                                  \
        unsigned long long chunk_count;                                                            \
        unsigned long long fill;                                                                   \
        double alpha;                                                                              \
        double beta;                                                                               \
        double *scratch;                                                                           \
        double numbers[8];                                                                         \
        long long shape[8];                                                                        \
        long long out_stride[8];                                                                   \
        long long in_shape[8];                                                                     \
        long long in_stride[8];                                                                    \
        unsigned in_count;                                                                         \
        unsigned out_count;                                                                        \
        int ndim;                                                                                  \
        int op;                                                                                    \
        int dtype;                                                                                 \
        int in_dtype;                                                                              \
        unsigned width;                                                                           \
        unsigned flags;                                                                            \
    };

#define DP__CUDA_EACH(i)                                                                           \
    for (unsigned long long i = DP__CUDA_FIRST; i < p.count; i += DP__CUDA_STEP)

/* Halves, from and to their bits; see dp_cpu.h for the same without branches. */
#define DP__CUDA_HALVES                                                                            \
    DP__CUDA_DEVICE float dp_float_of(unsigned bits)                                               \
    {                                                                                              \
        union { unsigned u; float f; } x;                                                          \
        x.u = bits;                                                                                \
        return x.f;                                                                                \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned dp_bits_of(float number)                                              \
    {                                                                                              \
        union { unsigned u; float f; } x;                                                          \
        x.f = number;                                                                              \
        return x.u;                                                                                \
    }                                                                                              \
    DP__CUDA_DEVICE float dp_get_f16(unsigned short h)                                             \
    {                                                                                              \
        unsigned sign = (h & 0x8000u) << 16, u = (h & 0x7fffu) << 13, whole = u + 0x38000000u;     \
        if (u < 0x00800000u)                                                                       \
            whole = dp_bits_of(dp_float_of(u + 0x38800000u) - dp_float_of(0x38800000u));           \
        else if (u >= 0x0f800000u)                                                                 \
            whole = (whole + 0x38000000u) | (u > 0x0f800000u ? 0x00400000u : 0u);                  \
        return dp_float_of(sign | whole);                                                          \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_put_f16(float number)                                        \
    {                                                                                              \
        unsigned bits = dp_bits_of(number), sign = bits & 0x80000000u, u = bits ^ sign;            \
        unsigned h = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;                          \
        if (u < 0x38800000u)                                                                       \
            h = dp_bits_of(dp_float_of(u) + 0.5f) - 0x3f000000u;                                   \
        else if (u > 0x7f800000u)                                                                  \
            h = 0x7e00u | ((u >> 13) & 0x3ffu);                                                    \
        else if (u >= 0x47800000u)                                                                 \
            h = 0x7c00u;                                                                           \
        return (unsigned short)(h | sign >> 16);                                                   \
    }                                                                                              \
    DP__CUDA_DEVICE float dp_get_bf16(unsigned short h)                                            \
    {                                                                                              \
        return dp_float_of((unsigned)h << 16);                                                     \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_put_bf16(float number)                                       \
    {                                                                                              \
        unsigned u = dp_bits_of(number);                                                           \
        if ((u & 0x7fffffffu) > 0x7f800000u)                                                       \
            return (unsigned short)((u | 0x400000u) >> 16);                                        \
        return (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);                           \
    }                                                                                              \
    DP__CUDA_DEVICE float dp_get_f32(float x) { return x; }                                        \
    DP__CUDA_DEVICE float dp_put_f32(float x) { return x; }                                        \
    DP__CUDA_DEVICE double dp_get_f64(double x) { return x; }                                      \
    DP__CUDA_DEVICE double dp_put_f64(double x) { return x; }

/* op: 0 sum, 2 product, 3 min, 4 max. NaN wins in min and max. In a binary tree: four inputs at a
   time, and what waits for the right half of its subtree is in `sums`, which 64 inputs fill. */
#define DP__CUDA_REDUCE(name, T, A)                                                                \
    DP__CUDA_DEVICE A dp_combine_##name(int op, A v, A w)                                          \
    {                                                                                              \
        if (op == 0)                                                                               \
            return v + w;                                                                          \
        if (op == 2)                                                                               \
            return v * w;                                                                          \
        if (op == 3)                                                                               \
            return v < w || v != v ? v : w;                                                        \
        return v > w || v != v ? v : w;                                                            \
    }                                                                                              \
    DP__CUDA_KERNEL(reduce_##name)                                                                 \
    {                                                                                              \
        const A alpha = (A)p.alpha, beta = (A)p.beta;                                              \
        const unsigned count = p.in_count;                                                         \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            A v = 0, sums[4];                                                                      \
            unsigned waiting = 0;                                                                  \
            DP__CUDA_ROLLED for (unsigned k = 0; k < count; k += 4) {                              \
                unsigned half = k / 4;                                                             \
                v = dp_get_##name(((const T *)p.in[k])[i]);                                        \
                if (k + 1 < count)                                                                 \
                    v = dp_combine_##name(p.op, v, dp_get_##name(((const T *)p.in[k + 1])[i]));    \
                if (k + 2 < count) {                                                               \
                    A w = dp_get_##name(((const T *)p.in[k + 2])[i]);                              \
                    if (k + 3 < count)                                                             \
                        w = dp_combine_##name(p.op, w, dp_get_##name(((const T *)p.in[k + 3])[i]));\
                    v = dp_combine_##name(p.op, v, w);                                             \
                }                                                                                  \
                DP__CUDA_ROLLED for (; waiting > 0 && (half % 2 == 1 || k + 4 >= count); half /= 2)\
                    v = dp_combine_##name(p.op, sums[--waiting], v);                               \
                if (k + 4 < count)                                                                 \
                    sums[waiting++] = v;                                                           \
            }                                                                                      \
            if (p.alpha != 1 || p.beta != 1)                                                       \
                v = v * alpha / beta;                                                              \
            T stored = dp_put_##name(v);                                                           \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                ((T *)p.out[k])[i] = stored;                                                       \
        }                                                                                          \
    }

#define DP__CUDA_REDUCE_BOOL                                                                       \
    DP__CUDA_KERNEL(reduce_bool)                                                                   \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            unsigned trues = 0;                                                                    \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.in_count; k++)                              \
                trues += ((const unsigned char *)p.in[k])[i] != 0;                                 \
            unsigned all = p.op == 2 || p.op == 3;                                                 \
            unsigned stored = all ? trues == p.in_count : trues > 0;                               \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                ((unsigned char *)p.out[k])[i] = (unsigned char)stored;                            \
        }                                                                                          \
    }

#define DP__CUDA_AXPBY(name, T, A)                                                                 \
    DP__CUDA_KERNEL(axpby_##name)                                                                  \
    {                                                                                              \
        const A alpha = (A)p.alpha, beta = (A)p.beta;                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            A v = alpha * dp_get_##name(((const T *)p.in[0])[i]);                                  \
            if (p.in_count > 1) {                                                                  \
                A w = beta * dp_get_##name(((const T *)p.in[1])[i]);                               \
                v = v + w;                                                                         \
            }                                                                                      \
            ((T *)p.out[0])[i] = dp_put_##name(v);                                                 \
        }                                                                                          \
    }

/* From any dtype to any other; the numbers are those of dp_dtype. */
#define DP__CUDA_CAST                                                                              \
    DP__CUDA_DEVICE double dp_real_of(const void *in, unsigned long long i, int dtype)             \
    {                                                                                              \
        if (dtype == 0)                                                                            \
            return ((const float *)in)[i];                                                         \
        if (dtype == 1)                                                                            \
            return ((const double *)in)[i];                                                        \
        if (dtype == 2)                                                                            \
            return dp_get_f16(((const unsigned short *)in)[i]);                                    \
        return dp_get_bf16(((const unsigned short *)in)[i]);                                       \
    }                                                                                              \
    DP__CUDA_DEVICE long long dp_whole_of(const void *in, unsigned long long i, int dtype)         \
    {                                                                                              \
        if (dtype == 4)                                                                            \
            return ((const long long *)in)[i];                                                     \
        if (dtype == 5)                                                                            \
            return ((const int *)in)[i];                                                           \
        if (dtype == 6)                                                                            \
            return ((const short *)in)[i];                                                         \
        if (dtype == 7)                                                                            \
            return ((const signed char *)in)[i];                                                   \
        return ((const unsigned char *)in)[i];                                                     \
    }                                                                                              \
    DP__CUDA_DEVICE long long dp_cut(double x)                                                     \
    {                                                                                              \
        if (x != x)                                                                                \
            return 0;                                                                              \
        if (x >= 9223372036854775808.0)                                                            \
            return 0x7fffffffffffffffLL;                                                           \
        return x < -9223372036854775808.0 ? -0x7fffffffffffffffLL - 1 : (long long)x;              \
    }                                                                                              \
    DP__CUDA_DEVICE long long dp_within(long long x, long long least, long long most)              \
    {                                                                                              \
        return x < least ? least : x > most ? most : x;                                            \
    }                                                                                              \
    DP__CUDA_KERNEL(cast)                                                                          \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            const int real = p.in_dtype < 4;                                                       \
            const double x = real ? dp_real_of(p.in[0], i, p.in_dtype) : 0;                        \
            const long long w = real ? 0 : dp_whole_of(p.in[0], i, p.in_dtype);                    \
            const float f = real ? (float)x : (float)w;                                            \
            if (p.dtype == 0)                                                                      \
                ((float *)p.out[0])[i] = f;                                                        \
            else if (p.dtype == 1)                                                                 \
                ((double *)p.out[0])[i] = real ? x : (double)w;                                    \
            else if (p.dtype == 2)                                                                 \
                ((unsigned short *)p.out[0])[i] = dp_put_f16(f);                                   \
            else if (p.dtype == 3)                                                                 \
                ((unsigned short *)p.out[0])[i] = dp_put_bf16(f);                                  \
            else if (p.dtype == 9)                                                                 \
                ((unsigned char *)p.out[0])[i] = real ? x != 0 : w != 0;                           \
            else {                                                                                 \
                const long long v = real ? dp_cut(x) : w;                                          \
                if (p.dtype == 4)                                                                  \
                    ((long long *)p.out[0])[i] = v;                                                \
                else if (p.dtype == 5)                                                             \
                    ((int *)p.out[0])[i] = (int)dp_within(v, -2147483647LL - 1, 2147483647LL);     \
                else if (p.dtype == 6)                                                             \
                    ((short *)p.out[0])[i] = (short)dp_within(v, -32768, 32767);                   \
                else if (p.dtype == 7)                                                             \
                    ((signed char *)p.out[0])[i] = (signed char)dp_within(v, -128, 127);           \
                else                                                                               \
                    ((unsigned char *)p.out[0])[i] = (unsigned char)dp_within(v, 0, 255);          \
            }                                                                                      \
        }                                                                                          \
    }

/* Kernels that only move bytes: elements of `width` 1, 2, 4 or 8 bytes. One kernel for all widths,
   since each takes time to compile; the branch is the same for all threads. */
#define DP__CUDA_MOVES                                                                             \
    DP__CUDA_DEVICE unsigned long long dp_take(const void *in, long long i, unsigned width)        \
    {                                                                                              \
        if (width == 4)                                                                            \
            return ((const unsigned *)in)[i];                                                      \
        if (width == 8)                                                                            \
            return ((const unsigned long long *)in)[i];                                            \
        return width == 2 ? ((const unsigned short *)in)[i] : ((const unsigned char *)in)[i];      \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_give(void *out, long long i, unsigned width, unsigned long long x)     \
    {                                                                                              \
        if (width == 4)                                                                            \
            ((unsigned *)out)[i] = (unsigned)x;                                                    \
        else if (width == 8)                                                                       \
            ((unsigned long long *)out)[i] = x;                                                    \
        else if (width == 2)                                                                       \
            ((unsigned short *)out)[i] = (unsigned short)x;                                        \
        else                                                                                       \
            ((unsigned char *)out)[i] = (unsigned char)x;                                          \
    }                                                                                              \
    DP__CUDA_KERNEL(fill)                                                                          \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                dp_give(p.out[k], (long long)i, p.width, p.fill);                                  \
        }                                                                                          \
    }                                                                                              \
    DP__CUDA_KERNEL(copy)                                                                          \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            unsigned long long rest = i;                                                           \
            long long from = 0, to = 0;                                                            \
            DP__CUDA_ROLLED for (int d = p.ndim - 1; d >= 0; d--) {                                \
                long long at = (long long)(rest % (unsigned long long)p.shape[d]);                 \
                rest = rest / (unsigned long long)p.shape[d];                                      \
                from += at * p.in_stride[d];                                                       \
                to += at * p.out_stride[d];                                                        \
            }                                                                                      \
            dp_give(p.out[0], to, p.width, dp_take(p.in[0], from, p.width));                       \
        }                                                                                          \
    }                                                                                              \
    DP__CUDA_KERNEL(pad)                                                                           \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            unsigned long long rest = i;                                                           \
            long long from = 0;                                                                    \
            int inside = 1;                                                                        \
            DP__CUDA_ROLLED for (int d = p.ndim - 1; d >= 0; d--) {                                \
                long long at = (long long)(rest % (unsigned long long)p.shape[d]);                 \
                rest = rest / (unsigned long long)p.shape[d];                                      \
                from += at * p.in_stride[d];                                                       \
                inside = inside && at < p.in_shape[d];                                             \
            }                                                                                      \
            dp_give(p.out[0], (long long)i, p.width,                                               \
                    inside ? dp_take(p.in[0], from, p.width) : p.fill);                            \
        }                                                                                          \
    }

/* Integers wrap, in 64 bits and then in their own size; one kernel for all of them. */
#define DP__CUDA_REDUCE_WHOLE                                                                      \
    DP__CUDA_DEVICE long long dp_modulo(long long x, int dtype)                                    \
    {                                                                                              \
        if (dtype == 4)                                                                            \
            return x;                                                                              \
        if (dtype == 5)                                                                            \
            return (int)x;                                                                         \
        if (dtype == 6)                                                                            \
            return (short)x;                                                                       \
        return dtype == 7 ? (signed char)x : (unsigned char)x;                                     \
    }                                                                                              \
    DP__CUDA_KERNEL(reduce_whole)                                                                  \
    {                                                                                              \
        const long long beta = (long long)p.beta;                                                  \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            long long v = dp_whole_of(p.in[0], i, p.dtype);                                        \
            DP__CUDA_ROLLED for (unsigned k = 1; k < p.in_count; k++) {                            \
                long long w = dp_whole_of(p.in[k], i, p.dtype);                                    \
                if (p.op == 0)                                                                     \
                    v = (long long)((unsigned long long)v + (unsigned long long)w);                \
                else if (p.op == 2)                                                                \
                    v = (long long)((unsigned long long)v * (unsigned long long)w);                \
                else if (p.op == 3)                                                                \
                    v = v < w ? v : w;                                                             \
                else                                                                               \
                    v = v > w ? v : w;                                                             \
            }                                                                                      \
            v = dp_modulo(v, p.dtype);                                                             \
            if (beta != 1)                                                                         \
                v = v / beta;                                                                      \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                dp_give(p.out[k], (long long)i, p.width, (unsigned long long)v);                   \
        }                                                                                          \
    }

/* ==== >>sums ====================================================================================
   Sums of two numbers per element, chunk by chunk, then over the chunks: lanes of a block in a
   tree. The same chunks on any GPU give the same bits.                                          */

#define DP__CUDA_LANES_ADD                                                                         \
    DP__CUDA_ROLLED for (unsigned half = 128; half > 0; half /= 2) {                               \
        DP__CUDA_SYNC                                                                              \
        for (unsigned t = DP__CUDA_LANE; t < half; t += DP__CUDA_LANE_STEP) {                      \
            first[t] += first[t + half];                                                           \
            second[t] += second[t + half];                                                         \
        }                                                                                          \
    }                                                                                              \
    DP__CUDA_SYNC

/* Block b adds up chunk CHUNK of ALL elements; VALUE is element i, and x in FIRST and SECOND. */
#define DP__CUDA_CHUNKS_ADD(name, ALL, CHUNK, VALUE, FIRST, SECOND)                                \
    DP__CUDA_KERNEL(name)                                                                          \
    {                                                                                              \
        DP__CUDA_SHARED double first[256];                                                         \
        DP__CUDA_SHARED double second[256];                                                        \
        const unsigned long long all = (unsigned long long)(ALL);                                  \
        for (unsigned long long b = DP__CUDA_BLOCK; b < p.chunk_count; b += DP__CUDA_BLOCK_STEP) { \
            unsigned long long begin = (CHUNK) * p.chunk, end = begin + p.chunk;                   \
            end = end < all ? end : all;                                                           \
            for (unsigned t = DP__CUDA_LANE; t < 256; t += DP__CUDA_LANE_STEP) {                   \
                double one = 0, two = 0;                                                           \
                DP__CUDA_ROLLED for (unsigned long long i = begin + t; i < end; i += 256) {        \
                    const double x = (double)(VALUE);                                              \
                    one += FIRST;                                                                  \
                    two += SECOND;                                                                 \
                }                                                                                  \
                first[t] = one;                                                                    \
                second[t] = two;                                                                   \
            }                                                                                      \
            DP__CUDA_LANES_ADD                                                                     \
            if (DP__CUDA_LANE == 0) {                                                              \
                p.scratch[2 * b] = first[0];                                                       \
                p.scratch[2 * b + 1] = second[0];                                                  \
            }                                                                                      \
            DP__CUDA_SYNC                                                                          \
        }                                                                                          \
    }

#define DP__CUDA_SUMS(name, T, get, FIRST, SECOND)                                                 \
    DP__CUDA_CHUNKS_ADD(name, p.count, b, get(((const T *)p.in[0])[i]), FIRST, SECOND)

/* One block: out[0] = alpha * the first sums, followed by the second ones if out_count is 2. */
#define DP__CUDA_SUMS_END                                                                          \
    DP__CUDA_KERNEL(sums_end)                                                                      \
    {                                                                                              \
        DP__CUDA_SHARED double first[256];                                                         \
        DP__CUDA_SHARED double second[256];                                                        \
        for (unsigned t = DP__CUDA_LANE; t < 256; t += DP__CUDA_LANE_STEP) {                       \
            first[t] = second[t] = 0;                                                              \
            DP__CUDA_ROLLED for (unsigned long long b = t; b < p.chunk_count; b += 256) {          \
                first[t] += p.scratch[2 * b];                                                      \
                second[t] += p.scratch[2 * b + 1];                                                 \
            }                                                                                      \
        }                                                                                          \
        DP__CUDA_LANES_ADD                                                                         \
        if (DP__CUDA_LANE == 0) {                                                                  \
            ((double *)p.out[0])[0] = p.alpha * first[0];                                          \
            if (p.out_count > 1)                                                                   \
                ((double *)p.out[0])[1] = second[0];                                               \
        }                                                                                          \
    }

#define DP__CUDA_STATS(name, T)                                                                    \
    DP__CUDA_SUMS(stats_##name, T, dp_get_##name, x * x, x - x == 0 ? 0 : 1)

/* What memory is filled with to see whether it arrives. */
#define DP__CUDA_PATTERN                                                                           \
    DP__CUDA_DEVICE unsigned dp_pattern(unsigned long long i, unsigned long long seed)             \
    {                                                                                              \
        unsigned long long x = (i + 1) * 0x9e3779b97f4a7c15ULL + seed;                             \
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ULL;                                               \
        return (unsigned)(x >> 32);                                                                \
    }                                                                                              \
    DP__CUDA_KERNEL(pattern)                                                                       \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            ((unsigned *)p.out[0])[i] = dp_pattern(i, p.fill);                                     \
        }                                                                                          \
    }

/* ==== >>steps ====================================================================================
   The kernels of dp_train.h: see DP_KERNEL_SGD and what follows it. f16 and bf16 are computed as
   f32, by the same kernel. At the end the list of all kernels.                                  */

#define DP__CUDA_ANY                                                                               \
    DP__CUDA_DEVICE float dp_load_f32(const void *in, unsigned long long i, int dtype)             \
    {                                                                                              \
        if (dtype == 0)                                                                            \
            return ((const float *)in)[i];                                                         \
        return dtype == 2 ? dp_get_f16(((const unsigned short *)in)[i])                            \
                          : dp_get_bf16(((const unsigned short *)in)[i]);                          \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_store_f32(void *out, unsigned long long i, int dtype, float x)         \
    {                                                                                              \
        if (dtype == 0)                                                                            \
            ((float *)out)[i] = x;                                                                 \
        else                                                                                       \
            ((unsigned short *)out)[i] = dtype == 2 ? dp_put_f16(x) : dp_put_bf16(x);              \
    }                                                                                              \
    DP__CUDA_DEVICE double dp_load_f64(const void *in, unsigned long long i, int dtype)            \
    {                                                                                              \
        return dtype == 1 ? ((const double *)in)[i] : 0;                                           \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_store_f64(void *out, unsigned long long i, int dtype, double x)        \
    {                                                                                              \
        if (dtype == 1)                                                                            \
            ((double *)out)[i] = x;                                                                \
    }

#define DP__CUDA_SGD(name, A)                                                                      \
    DP__CUDA_KERNEL(sgd_##name)                                                                    \
    {                                                                                              \
        const double *gate = (const double *)(p.in_count > 1 ? p.in[1] : p.numbers);               \
        const A lr = (A)p.numbers[0], decay = (A)p.numbers[1], momentum = (A)p.numbers[2];         \
        const A rest = (A)p.numbers[3], factor = p.in_count > 1 ? (A)gate[0] : (A)1;               \
        const A sign = p.flags & 8 ? -factor : factor;                                            \
        A *velocity = (A *)p.out[1];                                                               \
        if (p.in_count > 1 && gate[1] > 0)                                                         \
            return;                                                                                \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            const A x = dp_load_##name(p.out[0], i, p.dtype);                                      \
            A g = dp_load_##name(p.in[0], i, p.dtype) * sign;                                      \
            const A decayed = decay * x;                                                           \
            g = decay != 0 ? g + decayed : g;                                                      \
            if (p.out_count > 1) {                                                                 \
                const A kept = momentum * velocity[i], fresh = rest * g;                           \
                const A v = p.flags & 2 ? g : kept + fresh;                                        \
                const A ahead = momentum * v;                                                      \
                velocity[i] = v;                                                                   \
                g = p.flags & 1 ? g + ahead : v;                                                   \
            }                                                                                      \
            const A step = lr * g;                                                                 \
            dp_store_##name(p.out[0], i, p.dtype, x - step);                                       \
        }                                                                                          \
    }

#define DP__CUDA_ADAMW(name, A, SQRT)                                                              \
    DP__CUDA_KERNEL(adamw_##name)                                                                  \
    {                                                                                              \
        const double *gate = (const double *)(p.in_count > 1 ? p.in[1] : p.numbers);               \
        const A lr = (A)p.numbers[0], decay = (A)p.numbers[1], fresh1 = (A)p.numbers[2];           \
        const A kept2 = (A)p.numbers[3], fresh2 = (A)p.numbers[4], bias2 = (A)p.numbers[5];        \
        const A eps = (A)p.numbers[6], factor = p.in_count > 1 ? (A)gate[0] : (A)1;                \
        const A sign = p.flags & 8 ? -factor : factor;                                            \
        A *mean = (A *)p.out[1], *square = (A *)p.out[2];                                          \
        if (p.in_count > 1 && gate[1] > 0)                                                         \
            return;                                                                                \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            const A x = dp_load_##name(p.out[0], i, p.dtype), decayed = decay * x;                 \
            A g = dp_load_##name(p.in[0], i, p.dtype) * sign;                                      \
            const A from = p.flags & 4 ? x : decayed;                                              \
            g = p.flags & 4 && decay != 0 ? g + decayed : g;                                       \
            const A moved = (g - mean[i]) * fresh1, m = mean[i] + moved;                           \
            const A kept = square[i] * kept2, squared = g * g, fresh = squared * fresh2;           \
            const A s = kept + fresh;                                                              \
            const A step = lr * (m / (SQRT(s) / bias2 + eps));                                     \
            mean[i] = m;                                                                           \
            square[i] = s;                                                                         \
            dp_store_##name(p.out[0], i, p.dtype, from - step);                                    \
        }                                                                                          \
    }

/* `fill` chunks a channel, one a block. */
#define DP__CUDA_CHANNEL_PLACE                                                                     \
    DP__CUDA_DEVICE unsigned long long dp_place(unsigned long long i, unsigned long long channel,  \
                                                const long long *shape)                            \
    {                                                                                              \
        const unsigned long long channels = (unsigned long long)shape[1];                          \
        const unsigned long long inner = (unsigned long long)shape[2];                             \
        return (i / inner * channels + channel) * inner + i % inner;                               \
    }
#define DP__CUDA_CHANNELS(name)                                                                    \
    DP__CUDA_CHUNKS_ADD(channels_##name, p.shape[0] * p.shape[2], b % p.fill,                      \
                        dp_load_##name(p.in[0], dp_place(i, b / p.fill, p.shape), p.dtype), x,     \
                        x * x)
#define DP__CUDA_CHANNELS_END                                                                      \
    DP__CUDA_KERNEL(channels_end)                                                                  \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            double sum = 0, squares = 0;                                                           \
            DP__CUDA_ROLLED for (unsigned long long k = 0; k < p.fill; k++) {                      \
                sum += p.scratch[2 * (i * p.fill + k)];                                            \
                squares += p.scratch[2 * (i * p.fill + k) + 1];                                    \
            }                                                                                      \
            ((double *)p.out[0])[i] = sum;                                                         \
            ((double *)p.out[0])[p.count + i] = squares;                                           \
        }                                                                                          \
    }

#define DP__CUDA_TEXTS(TEXT)                                                                       \
    TEXT(DP__CUDA_PARAMS)                                                                          \
    TEXT(DP__CUDA_HALVES)                                                                          \
    TEXT(DP__CUDA_REDUCE(f32, float, float))                                                       \
    TEXT(DP__CUDA_REDUCE(f64, double, double))                                                     \
    TEXT(DP__CUDA_REDUCE(f16, unsigned short, float))                                              \
    TEXT(DP__CUDA_REDUCE(bf16, unsigned short, float))                                             \
    TEXT(DP__CUDA_REDUCE_BOOL)                                                                     \
    TEXT(DP__CUDA_AXPBY(f32, float, float))                                                        \
    TEXT(DP__CUDA_AXPBY(f64, double, double))                                                      \
    TEXT(DP__CUDA_AXPBY(f16, unsigned short, float))                                               \
    TEXT(DP__CUDA_AXPBY(bf16, unsigned short, float))                                              \
    TEXT(DP__CUDA_CAST)                                                                            \
    TEXT(DP__CUDA_MOVES)                                                                           \
    TEXT(DP__CUDA_REDUCE_WHOLE)                                                                    \
    TEXT(DP__CUDA_STATS(f32, float))                                                               \
    TEXT(DP__CUDA_STATS(f64, double))                                                              \
    TEXT(DP__CUDA_STATS(f16, unsigned short))                                                      \
    TEXT(DP__CUDA_STATS(bf16, unsigned short))                                                     \
    TEXT(DP__CUDA_SUMS(total, double, dp_get_f64, x, 0))                                           \
    TEXT(DP__CUDA_SUMS_END)                                                                        \
    TEXT(DP__CUDA_PATTERN)                                                                         \
    TEXT(DP__CUDA_SUMS(differ, unsigned, (double), x != dp_pattern(i, p.fill) ? 1 : 0, 0))         \
    TEXT(DP__CUDA_ANY)                                                                             \
    TEXT(DP__CUDA_SGD(f32, float))                                                                 \
    TEXT(DP__CUDA_SGD(f64, double))                                                                \
    TEXT(DP__CUDA_ADAMW(f32, float, DP__CUDA_SQRTF))                                               \
    TEXT(DP__CUDA_ADAMW(f64, double, DP__CUDA_SQRT))                                               \
    TEXT(DP__CUDA_CHANNEL_PLACE)                                                                   \
    TEXT(DP__CUDA_CHANNELS(f32))                                                                   \
    TEXT(DP__CUDA_CHANNELS(f64))                                                                   \
    TEXT(DP__CUDA_CHANNELS_END)

/* Floats in the order of dp_dtype. */
#define DP__CUDA_NAMES(X)                                                                          \
    X(reduce_f32) X(reduce_f64) X(reduce_f16) X(reduce_bf16) X(reduce_whole) X(reduce_bool)        \
    X(axpby_f32) X(axpby_f64) X(axpby_f16) X(axpby_bf16)                                           \
    X(stats_f32) X(stats_f64) X(stats_f16) X(stats_bf16) X(total) X(sums_end)                      \
    X(fill) X(copy) X(pad) X(cast) X(pattern) X(differ)                                            \
    X(sgd_f32) X(sgd_f64) X(adamw_f32) X(adamw_f64)                                                \
    X(channels_f32) X(channels_f64) X(channels_end)
/* clang-format on */

#define DP__CUDA_ENUM(name) DP__CUDA_##name,
enum { DP__CUDA_NAMES(DP__CUDA_ENUM) DP__CUDA_KERNEL_COUNT };

#if defined(DP_CUDA_TEXT_AS_C)
#define DP__CUDA_AS_C(...) __VA_ARGS__
DP__CUDA_TEXTS(DP__CUDA_AS_C)
#else

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>
#if defined(DP_DYNAMIC_LOAD)
#include <dlfcn.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

_Static_assert(DP_F32 == 0 && DP_BF16 == 3 && DP_I64 == 4 && DP_U8 == 8 && DP_BOOL == 9,
               "the kernels know dtypes by their numbers");
_Static_assert(DP_OP_SUM == 0 && DP_OP_PROD == 2 && DP_OP_MIN == 3 && DP_OP_MAX == 4,
               "the kernels know operations by their numbers");

DP__CUDA_PARAMS
#define DP__CUDA_STRING(...)               #__VA_ARGS__ "\n",
#define DP__CUDA_AS_STRING(...)            DP__CUDA_STRING(__VA_ARGS__)
#define DP__CUDA_NAME(name)                "dp_cuda_" #name,
static const char *const dp__cuda_texts[] = {
    /* CUDA's headers hide these words from a C compiler. */
    "#define dp_global extern \"C\" __global__\n"
    "#define dp_device static __device__ inline\n"
    "#define dp_shared __shared__\n"
    "#define dp_rolled _Pragma(\"unroll 1\")\n", /* unrolled they take four times as long here */
    DP__CUDA_TEXTS(DP__CUDA_AS_STRING)};
static const char *const dp__cuda_names[] = {DP__CUDA_NAMES(DP__CUDA_NAME)};

/* ==== >>surface ==================================================================================
   Every CUDA function that is called is in these lists, and is called through one table: bound when
   the program is linked, or with DP_DYNAMIC_LOAD when the first context opens. The driver's
   functions are asked for by name, so that nothing links to it.                                 */

/* clang-format off */
#define DP__CUDA_RUNTIME(X)                                                                        \
    X(cudaDeviceCanAccessPeer) X(cudaDeviceDisablePeerAccess) X(cudaDeviceEnablePeerAccess)        \
    X(cudaDeviceGetAttribute) X(cudaDeviceGetPCIBusId) X(cudaDeviceGetStreamPriorityRange)         \
    X(cudaDriverGetVersion) X(cudaEventCreateWithFlags) X(cudaEventDestroy) X(cudaEventQuery)      \
    X(cudaEventRecord) X(cudaEventSynchronize) X(cudaFree) X(cudaFreeHost)     \
    X(cudaFuncGetAttributes) X(cudaGetDeviceCount) X(cudaGetDriverEntryPointByVersion)             \
    X(cudaGetErrorString) X(cudaGetLastError) X(cudaHostAlloc) X(cudaLaunchKernel)                 \
    X(cudaLibraryGetKernel) X(cudaLibraryLoadData) X(cudaLibraryUnload) X(cudaMalloc)              \
    X(cudaMemGetInfo) X(cudaMemcpy2DAsync) X(cudaMemcpyAsync) X(cudaMemcpyPeerAsync)               \
    X(cudaPointerGetAttributes) X(cudaStreamCreateWithPriority) X(cudaStreamDestroy)          \
    X(cudaStreamGetDevice) X(cudaStreamIsCapturing) X(cudaStreamSynchronize)                       \
    X(cudaStreamWaitEvent)
#define DP__CUDA_NVRTC(X)                                                                          \
    X(nvrtcCompileProgram) X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcGetCUBIN)           \
    X(nvrtcGetCUBINSize) X(nvrtcGetErrorString) X(nvrtcGetNumSupportedArchs) X(nvrtcGetPTX)        \
    X(nvrtcGetPTXSize) X(nvrtcGetProgramLog) X(nvrtcGetProgramLogSize) X(nvrtcGetSupportedArchs)
#define DP__CUDA_DRIVER(X)                                                                         \
    X(cuCtxPopCurrent, (CUcontext *)) X(cuCtxPushCurrent, (CUcontext))                             \
    X(cuDeviceGet, (CUdevice *, int)) X(cuDeviceGetName, (char *, int, CUdevice))                  \
    X(cuDevicePrimaryCtxRelease, (CUdevice)) X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))
/* clang-format on */

/* The driver's names have versions behind macros; `cuda.h` knows them. */
#define DP__CUDA_FIELD(name)               __typeof__(name) *name;
#define DP__CUDA_DRIVER_FIELD(name, types) CUresult(CUDAAPI *call_##name) types;

static struct dp__cuda {
    DP__CUDA_RUNTIME(DP__CUDA_FIELD)
    DP__CUDA_NVRTC(DP__CUDA_FIELD)
    DP__CUDA_DRIVER(DP__CUDA_DRIVER_FIELD)
    bool bound, has_driver;
}
#if defined(DP_DYNAMIC_LOAD)
dp__cuda;
#else
#define DP__CUDA_BIND(name) .name = name,
dp__cuda = {DP__CUDA_RUNTIME(DP__CUDA_BIND) DP__CUDA_NVRTC(DP__CUDA_BIND).bound = true};
#endif

enum { DP__CUDA_FLOOR = 12080 }; /* the oldest driver, and the version of its functions asked for */

#if defined(DP_DYNAMIC_LOAD)
/* The first of the names that loads; NULL ends them. */
static void *dp__cuda_library(const char *const *names)
{
    void *library = NULL;
    for (; *names != NULL && library == NULL; names++)
        library = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
    return library;
}

static bool dp__cuda_find(void *library, const char *name, void *out_fn)
{
    void *found = dlsym(library, name);
    memcpy(out_fn, &found, sizeof found);
    return found != NULL;
}

#define DP__CUDA_FIND_RUNTIME(name) found = found && dp__cuda_find(runtime, #name, &dp__cuda.name);
#define DP__CUDA_FIND_NVRTC(name)   found = found && dp__cuda_find(nvrtc, #name, &dp__cuda.name);

static dp_status dp__cuda_bind(void)
{
    static const char *const runtimes[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so",
                                           NULL};
    static const char *const nvrtcs[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", NULL};
    void *runtime = dp__cuda_library(runtimes), *nvrtc = dp__cuda_library(nvrtcs);
    if (runtime == NULL || nvrtc == NULL)
        return dp_error(DP_ERR_NO_DEVICE, "%s was not found",
                        runtime == NULL ? "libcudart.so" : "libnvrtc.so");
    bool found = true;
    DP__CUDA_RUNTIME(DP__CUDA_FIND_RUNTIME)
    DP__CUDA_NVRTC(DP__CUDA_FIND_NVRTC)
    if (!found)
        return dp_error(DP_ERR_NO_DEVICE, "the CUDA libraries are older than 12.8");
    dp__cuda.bound = true;
    return DP_OK;
}
#else
static dp_status dp__cuda_bind(void)
{
    return DP_OK;
}
#endif

/* What a code of CUDA means here. */
static dp_status dp__cuda_status(cudaError_t code)
{
    switch ((int)code) {
    case cudaSuccess:
        return DP_OK;
    case cudaErrorMemoryAllocation:
        return DP_ERR_NO_MEMORY;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
        return DP_ERR_NO_DEVICE;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorNotSupported:
        return DP_ERR_UNSUPPORTED;
    default:
        return DP_ERR_DEVICE;
    }
}

enum { DP__CUDA_GPUS_MAX = 64 };

/* A GPU that has faulted, or hangs, is lost for as long as the process runs: its context is not
   entered again (>>gpus), so nothing of it is waited for or given back. */
static atomic_bool dp__cuda_lost[DP__CUDA_GPUS_MAX];

/* What leaves a context such that all later calls return the same code. */
static bool dp__cuda_is_fault(cudaError_t code)
{
    switch ((int)code) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
        return true;
    default:
        return false;
    }
}

/* Also clears the thread's last error, where the user would find the code. */
static dp_status dp__cuda_check(const char *fn, int ordinal, cudaError_t code)
{
    if (code == cudaSuccess)
        return DP_OK;
    if (dp__cuda_is_fault(code))
        atomic_store(&dp__cuda_lost[ordinal], true);
    (void)dp__cuda.cudaGetLastError();
    return dp_error(dp__cuda_status(code), "cuda %d: %s: %s (%d)", ordinal, fn,
                    dp__cuda.cudaGetErrorString(code), (int)code);
}

#define DP__CUDA_FIND_DRIVER(name, types)                                                          \
    found = found && dp__cuda_entry(#name, &dp__cuda.call_##name);

static bool dp__cuda_entry(const char *name, void *out_fn)
{
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t code = dp__cuda.cudaGetDriverEntryPointByVersion(name, &fn, DP__CUDA_FLOOR,
                                                                 cudaEnableDefault, &result);
    memcpy(out_fn, &fn, sizeof fn);
    return code == cudaSuccess && result == cudaDriverEntryPointSuccess && fn != NULL;
}

/* Everything that is needed is there, and new enough. Under the lock of >>gpus. */
static dp_status dp__cuda_ready(void)
{
    int version = 0;
    bool found = true;
    if (dp__cuda.has_driver)
        return DP_OK;
    if (!dp__cuda.bound)
        DP_TRY(dp__cuda_bind());
    if (dp__cuda.cudaDriverGetVersion(&version) != cudaSuccess || version == 0)
        return dp_error(DP_ERR_NO_DEVICE, "there is no driver for NVIDIA GPUs");
    if (version < DP__CUDA_FLOOR)
        return dp_error(DP_ERR_NO_DEVICE, "the driver is for CUDA %d.%d, 12.8 is needed",
                        version / 1000, version % 1000 / 10);
    DP__CUDA_DRIVER(DP__CUDA_FIND_DRIVER)
    if (!found)
        return dp_error(DP_ERR_NO_DEVICE, "the driver lacks functions of CUDA 12.8");
    dp__cuda.has_driver = true;
    return DP_OK;
}

/* ==== >>gpus =====================================================================================
   A physical GPU: its primary context and its kernels, shared by all devices on it. The thread's
   current device stays as it was: calls are made between enter and leave, which push the context
   and pop it, once where they are nested. Setting a device back would give a thread a context that
   it did not have. A launch needs the context of its stream, and an allocation that of its GPU;
   copies, events and waits go with any.                                                         */

enum { DP__CUDA_NESTED = 8 };

typedef struct dp__cuda_code { /* the kernels for one architecture; they run on all its GPUs */
    int arch, users;
    cudaLibrary_t library;
    cudaKernel_t kernels[DP__CUDA_KERNEL_COUNT];
} dp__cuda_code;

typedef struct dp__cuda_gpu {
    int ordinal, users;
    int arch; /* 90: sm_90 */
    int multiprocessors;
    size_t pitch_max;
    CUdevice device;
    CUcontext context;
    struct dp__cuda_code *code;
    atomic_int reach[DP__CUDA_GPUS_MAX]; /* dp__cuda_reach: how it reads the others */
} dp__cuda_gpu;

static dp__lock dp__cuda_lock = DP__LOCK_INITIALIZER; /* for these, and for binding */
static dp__cuda_gpu dp__cuda_gpus[DP__CUDA_GPUS_MAX];
static dp__cuda_code dp__cuda_codes[DP__CUDA_GPUS_MAX];
static struct dp__cuda_dev *dp__cuda_open_list;

static dp_status dp__cuda_driver_check(const char *fn, int ordinal, CUresult code)
{
    if (code == CUDA_SUCCESS)
        return DP_OK;
    return dp_error(code == CUDA_ERROR_OUT_OF_MEMORY ? DP_ERR_NO_MEMORY : DP_ERR_DEVICE,
                    "cuda %d: %s: code %d of the driver", ordinal, fn, (int)code);
}

static _Thread_local struct { /* what this thread has entered, the innermost last */
    const dp__cuda_gpu *gpu;
    int times;
} dp__cuda_inside[DP__CUDA_NESTED];
static _Thread_local int dp__cuda_depth;

static dp_status dp__cuda_enter(const dp__cuda_gpu *gpu)
{
    int depth = dp__cuda_depth;
    if (atomic_load_explicit(&dp__cuda_lost[gpu->ordinal], memory_order_relaxed))
        return dp_error(DP_ERR_DEVICE, "cuda %d: the GPU is lost, since it faulted or hung",
                        gpu->ordinal);
    if (depth > 0 && dp__cuda_inside[depth - 1].gpu == gpu) {
        dp__cuda_inside[depth - 1].times++;
        return DP_OK;
    }
    DP_TRY(dp__cuda_driver_check("cuCtxPushCurrent", gpu->ordinal,
                                 dp__cuda.call_cuCtxPushCurrent(gpu->context)));
    dp__cuda_inside[depth].gpu = gpu;
    dp__cuda_inside[depth].times = 1;
    dp__cuda_depth++;
    return DP_OK;
}

/* The status of the calls in between; `status` of an earlier failure wins. */
static dp_status dp__cuda_leave(const dp__cuda_gpu *gpu, dp_status status, const char *fn,
                                cudaError_t code)
{
    CUcontext popped = NULL;
    if (status == DP_OK)
        status = dp__cuda_check(fn, gpu->ordinal, code);
    if (--dp__cuda_inside[dp__cuda_depth - 1].times > 0)
        return status;
    dp__cuda_depth--;
    CUresult pop = dp__cuda.call_cuCtxPopCurrent(&popped);
    return status != DP_OK ? status : dp__cuda_driver_check("cuCtxPopCurrent", gpu->ordinal, pop);
}

static dp_status dp__cuda_attribute(int ordinal, enum cudaDeviceAttr what, int *out)
{
    *out = 0;
    return dp__cuda_check("cudaDeviceGetAttribute", ordinal,
                          dp__cuda.cudaDeviceGetAttribute(out, what, ordinal));
}

/* All sources, one after another. */
static char *dp__cuda_source(const dp_host *host)
{
    size_t bytes = 1, at = 0;
    for (size_t i = 0; i < sizeof dp__cuda_texts / sizeof *dp__cuda_texts; i++)
        bytes += strlen(dp__cuda_texts[i]);
    char *source = host->alloc(host, bytes, 1);
    for (size_t i = 0; source != NULL && i < sizeof dp__cuda_texts / sizeof *dp__cuda_texts; i++) {
        size_t part = strlen(dp__cuda_texts[i]);
        memcpy(source + at, dp__cuda_texts[i], part + 1);
        at += part;
    }
    return source;
}

static dp_status dp__cuda_compile_check(const dp_host *host, nvrtcResult code, nvrtcProgram program,
                                        const char *fn)
{
    size_t bytes = 0;
    char *log = NULL;
    if (code == NVRTC_SUCCESS)
        return DP_OK;
    if (code == NVRTC_ERROR_COMPILATION &&
        dp__cuda.nvrtcGetProgramLogSize(program, &bytes) == NVRTC_SUCCESS)
        log = host->alloc(host, bytes + 1, 1);
    if (log != NULL && dp__cuda.nvrtcGetProgramLog(program, log) != NVRTC_SUCCESS)
        log[0] = '\0';
    dp_status status = dp_error(
        code == NVRTC_ERROR_OUT_OF_MEMORY ? DP_ERR_NO_MEMORY : DP_ERR_UNSUPPORTED,
        "cuda: %s: %s %.600s", fn, dp__cuda.nvrtcGetErrorString(code), log != NULL ? log : "");
    host->free(host, log);
    return status;
}

/* The newest architecture that NVRTC knows. */
static int dp__cuda_newest_arch(void)
{
    int count = 0, archs[128] = {0}, newest = 0;
    if (dp__cuda.nvrtcGetNumSupportedArchs(&count) != NVRTC_SUCCESS || count < 1 || count > 128 ||
        dp__cuda.nvrtcGetSupportedArchs(archs) != NVRTC_SUCCESS)
        return 0;
    for (int i = 0; i < count; i++)
        newest = archs[i] > newest ? archs[i] : newest;
    return newest;
}

/* A binary for the architecture; for one newer than NVRTC, text that the driver compiles. */
static dp_status dp__cuda_image(const dp_host *host, nvrtcProgram program, int arch, char **out)
{
    char option[48];
    int newest = dp__cuda_newest_arch();
    bool text = arch > newest;
    size_t bytes = 0;
    snprintf(option, sizeof option, "--gpu-architecture=%s_%d", text ? "compute" : "sm",
             text ? newest : arch);
    const char *const options[] = {option, "--fmad=false"};
    DP_TRY(dp__cuda_compile_check(host, dp__cuda.nvrtcCompileProgram(program, 2, options), program,
                                  "nvrtcCompileProgram"));
    DP_TRY(dp__cuda_compile_check(host,
                                  text ? dp__cuda.nvrtcGetPTXSize(program, &bytes)
                                       : dp__cuda.nvrtcGetCUBINSize(program, &bytes),
                                  program, "the size of the kernels"));
    *out = host->alloc(host, bytes, 16);
    if (*out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda: no memory for the kernels");
    return dp__cuda_compile_check(
        host, text ? dp__cuda.nvrtcGetPTX(program, *out) : dp__cuda.nvrtcGetCUBIN(program, *out),
        program, "the kernels");
}

static dp_status dp__cuda_compile(const dp_host *host, int arch, char **out_image)
{
    nvrtcProgram program = NULL;
    char *source = dp__cuda_source(host);
    *out_image = NULL;
    if (source == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda: no memory for the kernels");
    dp_status status = dp__cuda_compile_check(
        host, dp__cuda.nvrtcCreateProgram(&program, source, "dp_cuda.h", 0, NULL, NULL), program,
        "nvrtcCreateProgram");
    if (status == DP_OK)
        status = dp__cuda_image(host, program, arch, out_image);
    if (program != NULL)
        (void)dp__cuda.nvrtcDestroyProgram(&program);
    host->free(host, source);
    return status;
}

static void dp__cuda_code_drop(dp__cuda_code *code)
{
    if (code == NULL || --code->users > 0)
        return;
    if (code->library != NULL)
        (void)dp__cuda.cudaLibraryUnload(code->library);
    *code = (dp__cuda_code){0};
}

/* With the GPU's context. The code of another GPU of the same architecture is used, if any. */
static dp_status dp__cuda_code_use(const dp_host *host, dp__cuda_gpu *gpu)
{
    int place = 0;
    char *image = NULL;
    while (dp__cuda_codes[place].users > 0 && dp__cuda_codes[place].arch != gpu->arch)
        place++; /* there are not more of them than GPUs */
    dp__cuda_code *code = gpu->code = &dp__cuda_codes[place];
    if (code->users++ > 0)
        return DP_OK;
    code->arch = gpu->arch;
    dp_status status = dp__cuda_compile(host, gpu->arch, &image);
    if (status == DP_OK)
        status = dp__cuda_check(
            "cudaLibraryLoadData", gpu->ordinal,
            dp__cuda.cudaLibraryLoadData(&code->library, image, NULL, NULL, 0, NULL, NULL, 0));
    for (int i = 0; i < DP__CUDA_KERNEL_COUNT && status == DP_OK; i++)
        status = dp__cuda_check(
            dp__cuda_names[i], gpu->ordinal,
            dp__cuda.cudaLibraryGetKernel(&code->kernels[i], code->library, dp__cuda_names[i]));
    host->free(host, image);
    return status;
}

/* Asking for a kernel's attributes loads it now: a kernel that loads later may wait for others. */
static dp_status dp__cuda_load(const dp_host *host, dp__cuda_gpu *gpu)
{
    struct cudaFuncAttributes attributes;
    DP_TRY(dp__cuda_code_use(host, gpu));
    for (int i = 0; i < DP__CUDA_KERNEL_COUNT; i++)
        DP_TRY(dp__cuda_check(
            dp__cuda_names[i], gpu->ordinal,
            dp__cuda.cudaFuncGetAttributes(&attributes, (const void *)gpu->code->kernels[i])));
    return DP_OK;
}

static dp_status dp__cuda_gpu_look(dp__cuda_gpu *gpu)
{
    int major = 0, minor = 0, pitch = 0, ordinal = gpu->ordinal;
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrComputeCapabilityMajor, &major));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrComputeCapabilityMinor, &minor));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrMultiProcessorCount, &gpu->multiprocessors));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrMaxPitch, &pitch));
    gpu->arch = major * 10 + minor;
    gpu->pitch_max = (size_t)pitch;
    if (gpu->arch < 75)
        return dp_error(DP_ERR_UNSUPPORTED, "cuda %d: architecture %d.%d, 7.5 is needed", ordinal,
                        major, minor);
    return DP_OK;
}

/* The context and the kernels of a lost GPU stay. */
static void dp__cuda_gpu_drop(dp__cuda_gpu *gpu)
{
    bool lost = atomic_load(&dp__cuda_lost[gpu->ordinal]);
    if (gpu->code != NULL && dp__cuda_enter(gpu) == DP_OK) {
        dp__cuda_code_drop(gpu->code);
        (void)dp__cuda_leave(gpu, DP_OK, "cudaLibraryUnload", dp__cuda.cudaGetLastError());
    }
    if (gpu->context != NULL && !lost)
        (void)dp__cuda.call_cuDevicePrimaryCtxRelease(gpu->device);
    for (int i = 0; i < DP__CUDA_GPUS_MAX; i++) {
        atomic_store(&gpu->reach[i], 0);
        atomic_store(&dp__cuda_gpus[i].reach[gpu->ordinal], 0);
    }
    gpu->code = NULL;
    gpu->context = NULL;
}

static dp_status dp__cuda_gpu_open(const dp_host *host, dp__cuda_gpu *gpu)
{
    DP_TRY(dp__cuda_driver_check("cuDeviceGet", gpu->ordinal,
                                 dp__cuda.call_cuDeviceGet(&gpu->device, gpu->ordinal)));
    DP_TRY(dp__cuda_gpu_look(gpu));
    DP_TRY(
        dp__cuda_driver_check("cuDevicePrimaryCtxRetain", gpu->ordinal,
                              dp__cuda.call_cuDevicePrimaryCtxRetain(&gpu->context, gpu->device)));
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, dp__cuda_load(host, gpu), "", cudaSuccess);
}

static dp_status dp__cuda_launch_on(const dp__cuda_gpu *gpu, cudaStream_t stream, int kernel,
                                    uint64_t blocks, struct dp__cuda_params *params)
{
    uint64_t most = (uint64_t)gpu->multiprocessors * 16;
    void *arguments[] = {params};
    dim3 grid = {(unsigned)(blocks < most ? blocks : most), 1, 1};
    dim3 block = {DP__CUDA_LANES, 1, 1};
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, DP_OK, dp__cuda_names[kernel],
                          dp__cuda.cudaLaunchKernel((const void *)gpu->code->kernels[kernel], grid,
                                                    block, arguments, 0, stream));
}

/* One thread per element. */
static dp_status dp__cuda_launch_each_on(const dp__cuda_gpu *gpu, cudaStream_t stream, int kernel,
                                         struct dp__cuda_params *params)
{
    uint64_t blocks = (params->count + DP__CUDA_LANES - 1) / DP__CUDA_LANES;
    return dp__cuda_launch_on(gpu, stream, kernel, blocks, params);
}

/* The size of chunks depends only on the count. */
static dp_status dp__cuda_launch_sums_on(const dp__cuda_gpu *gpu, cudaStream_t stream, int kernel,
                                         struct dp__cuda_params *params)
{
    const uint64_t least = 64 << 10, all = DP__CUDA_CHUNKS * least;
    params->chunk = (params->count + all - 1) / all * least;
    params->chunk_count = (params->count + params->chunk - 1) / params->chunk;
    DP_TRY(dp__cuda_launch_on(gpu, stream, kernel, params->chunk_count, params));
    return dp__cuda_launch_on(gpu, stream, DP__CUDA_sums_end, 1, params);
}

static dp_status dp__cuda_gpu_use(const dp_host *host, int ordinal, dp__cuda_gpu **out)
{
    int count = 0;
    dp__cuda_gpu *gpu = &dp__cuda_gpus[ordinal];
    DP_TRY(dp__cuda_ready());
    DP_TRY(dp__cuda_check("cudaGetDeviceCount", ordinal, dp__cuda.cudaGetDeviceCount(&count)));
    if (ordinal >= count)
        return dp_error(DP_ERR_NO_DEVICE, "cuda: no GPU %d, there are %d", ordinal, count);
    if (atomic_load(&dp__cuda_lost[ordinal]))
        return dp_error(DP_ERR_NO_DEVICE,
                        "cuda: GPU %d is lost to this process, since it faulted or hung", ordinal);
    if (gpu->users == 0) {
        gpu->ordinal = ordinal;
        dp_status status = dp__cuda_gpu_open(host, gpu);
        if (status != DP_OK) {
            dp__cuda_gpu_drop(gpu);
            return status;
        }
    }
    gpu->users++;
    *out = gpu;
    return DP_OK;
}

/* ==== >>memory ===================================================================================
   cudaMalloc waits for the device, so it is asked for slabs, and blocks are cut from them. The core
   keeps blocks until it closes, and reuses them in the order of the compute stream; a slab goes
   back with its last block.                                                                     */

enum { DP__CUDA_SLAB_BYTES = 32 << 20, DP__CUDA_ALIGN = 512 };

typedef struct dp__cuda_slab {
    struct dp__cuda_slab *next;
    char *data;
    size_t bytes, used;
    size_t live; /* blocks that are out */
} dp__cuda_slab;

typedef struct dp__cuda_slot { /* of the ring of >>staging */
    char *data;
    cudaEvent_t done; /* the copy from or to it */
    bool busy;
} dp__cuda_slot;

enum { DP__CUDA_SLOTS = 4, DP__CUDA_SLOT_BYTES = 2 << 20 };

typedef struct dp__cuda_dev {
    dp_dev base;
    struct dp__cuda_dev *next_open; /* under dp__cuda_lock */
    dp__cuda_gpu *gpu;
    dp__lock lock; /* for the slabs, and for the ring */
    dp__cuda_slab *slabs;
    dp__cuda_slot slots[DP__CUDA_SLOTS];
    unsigned next_slot;
    cudaStream_t out; /* copies from this GPU to others leave on this stream */
    cudaEvent_t mark; /* between `out` and other streams, under the lock */
} dp__cuda_dev;
_Static_assert(offsetof(dp__cuda_dev, base) == 0, "a dp_dev is the head of its device");

typedef struct dp__cuda_stream {
    dp_stream base;
    cudaStream_t native;
    double *scratch; /* for sums; DP__CUDA_CHUNKS pairs */
    bool adopted;
} dp__cuda_stream;
_Static_assert(offsetof(dp__cuda_stream, base) == 0, "a dp_stream is the head of its stream");

typedef struct dp__cuda_event {
    dp_event base;
    cudaEvent_t native;
    atomic_bool recorded;
} dp__cuda_event;
_Static_assert(offsetof(dp__cuda_event, base) == 0, "a dp_event is the head of its event");

static dp__cuda_dev *dp__cuda_dev_of(dp_dev *dev)
{
    return (dp__cuda_dev *)dev;
}

static const dp__cuda_gpu *dp__cuda_gpu_of(const dp_dev *dev)
{
    return ((const dp__cuda_dev *)dev)->gpu;
}

static dp_status dp__cuda_slab_make(dp__cuda_dev *dev, size_t bytes, dp__cuda_slab **out)
{
    const dp_host *host = dev->base.host;
    dp__cuda_slab *slab = host->alloc(host, sizeof *slab, _Alignof(dp__cuda_slab));
    void *data = NULL;
    if (slab == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda %d: no memory on the host", dev->gpu->ordinal);
    dp_status status = dp__cuda_enter(dev->gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(dev->gpu, DP_OK, "cudaMalloc", dp__cuda.cudaMalloc(&data, bytes));
    if (status != DP_OK) {
        host->free(host, slab);
        return status;
    }
    *slab = (dp__cuda_slab){.next = dev->slabs, .data = data, .bytes = bytes};
    dev->slabs = slab;
    *out = slab;
    return DP_OK;
}

static void dp__cuda_slab_drop(dp__cuda_dev *dev, dp__cuda_slab **link)
{
    dp__cuda_slab *slab = *link;
    *link = slab->next;
    if (dp__cuda_enter(dev->gpu) == DP_OK)
        (void)dp__cuda_leave(dev->gpu, DP_OK, "cudaFree", dp__cuda.cudaFree(slab->data));
    dev->base.host->free(dev->base.host, slab);
}

/* Large blocks have a slab of their own. */
static dp_status dp__cuda_cut(dp__cuda_dev *dev, size_t bytes, void **out)
{
    dp__cuda_slab *slab = dev->slabs;
    bytes = (bytes + DP__CUDA_ALIGN - 1) / DP__CUDA_ALIGN * DP__CUDA_ALIGN;
    while (slab != NULL && slab->bytes - slab->used < bytes)
        slab = slab->next;
    if (slab == NULL)
        DP_TRY(dp__cuda_slab_make(
            dev, bytes > DP__CUDA_SLAB_BYTES / 4 ? bytes : DP__CUDA_SLAB_BYTES, &slab));
    *out = slab->data + slab->used;
    slab->used += bytes;
    slab->live++;
    return DP_OK;
}

static dp_status dp__cuda_alloc(dp_dev *dev, size_t bytes, void **out)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    if (bytes > SIZE_MAX - DP__CUDA_ALIGN)
        return dp_error(DP_ERR_NO_MEMORY, "cuda %d: no %zu bytes", own->gpu->ordinal, bytes);
    dp__lock_enter(&own->lock);
    dp_status status = dp__cuda_cut(own, bytes, out);
    dp__lock_leave(&own->lock);
    return status;
}

static void dp__cuda_free(dp_dev *dev, void *data, size_t bytes)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    (void)bytes;
    dp__lock_enter(&own->lock);
    dp__cuda_slab **link = &own->slabs;
    while (*link != NULL &&
           ((char *)data < (*link)->data || (char *)data >= (*link)->data + (*link)->bytes))
        link = &(*link)->next;
    if (*link != NULL && --(*link)->live == 0)
        dp__cuda_slab_drop(own, link);
    dp__lock_leave(&own->lock);
}

static dp_status dp__cuda_host_alloc(dp_dev *dev, size_t bytes, void **out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, DP_OK, "cudaHostAlloc",
                          dp__cuda.cudaHostAlloc(out, bytes, cudaHostAllocPortable));
}

static void dp__cuda_host_free(dp_dev *dev, void *data, size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    (void)bytes;
    if (dp__cuda_enter(gpu) == DP_OK)
        (void)dp__cuda_leave(gpu, DP_OK, "cudaFreeHost", dp__cuda.cudaFreeHost(data));
}

/* ==== >>staging ==================================================================================
   The driver copies pageable memory itself, a small piece at a time, and blocks. So what is not
   pinned goes through a ring of pinned slots, filled by all idle threads; a slot is used again when
   its event says so. Under the device's lock.                                                   */

typedef struct dp__cuda_fill { /* memcpy by several threads */
    char *to;
    const char *from;
    size_t bytes;
    int parts;
} dp__cuda_fill;

enum { DP__CUDA_PART_BYTES = 256 << 10 };

static void dp__cuda_fill_part(int part, void *user)
{
    const dp__cuda_fill *fill = user;
    size_t each = (fill->bytes / (size_t)fill->parts + 63) / 64 * 64;
    size_t begin = each * (size_t)part, end = begin + each;
    end = end < fill->bytes && part + 1 < fill->parts ? end : fill->bytes;
    if (begin < end)
        memcpy(fill->to + begin, fill->from + begin, end - begin);
}

static void dp__cuda_fill_all(const dp_host *host, void *to, const void *from, size_t bytes)
{
    int most = host->thread_count(host);
    size_t parts = bytes / DP__CUDA_PART_BYTES;
    dp__cuda_fill fill = {to, from, bytes, parts < (size_t)most ? (int)parts : most};
    if (fill.parts < 2)
        memcpy(to, from, bytes);
    else
        host->parallel(host, fill.parts, dp__cuda_fill_part, &fill);
}

/* Some versions of the driver report an error for memory that they do not know. */
static bool dp__cuda_is_pinned(const dp__cuda_gpu *gpu, const void *host)
{
    struct cudaPointerAttributes attributes = {.type = cudaMemoryTypeUnregistered};
    if (dp__cuda_enter(gpu) != DP_OK)
        return false;
    if (dp__cuda.cudaPointerGetAttributes(&attributes, host) != cudaSuccess)
        (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(gpu, DP_OK, "", cudaSuccess);
    return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
}

/* The slot that was used longest ago, when the copy that used it is done. */
static dp_status dp__cuda_slot_take(dp__cuda_dev *dev, dp__cuda_slot **out)
{
    dp__cuda_slot *slot = &dev->slots[dev->next_slot];
    if (slot->busy)
        DP_TRY(dp__cuda_check("cudaEventSynchronize", dev->gpu->ordinal,
                              dp__cuda.cudaEventSynchronize(slot->done)));
    slot->busy = false;
    dev->next_slot = (dev->next_slot + 1) % DP__CUDA_SLOTS;
    *out = slot;
    return DP_OK;
}

static dp_status dp__cuda_move(const dp__cuda_gpu *gpu, void *dst, const void *src, size_t bytes,
                               enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return dp__cuda_check("cudaMemcpyAsync", gpu->ordinal,
                          dp__cuda.cudaMemcpyAsync(dst, src, bytes, kind, stream));
}

/* From here on the slot belongs to the copy. Its event is recorded even if the copy failed. */
static dp_status dp__cuda_slot_use(const dp__cuda_gpu *gpu, dp__cuda_slot *slot, dp_status status,
                                   cudaStream_t stream)
{
    dp_status marked = dp__cuda_check("cudaEventRecord", gpu->ordinal,
                                      dp__cuda.cudaEventRecord(slot->done, stream));
    slot->busy = marked == DP_OK;
    return status != DP_OK ? status : marked;
}

static size_t dp__cuda_piece(size_t left)
{
    return left < DP__CUDA_SLOT_BYTES ? left : DP__CUDA_SLOT_BYTES;
}

static dp_status dp__cuda_stage_in(dp__cuda_dev *dev, char *dst, const char *host, size_t bytes,
                                   cudaStream_t stream)
{
    for (size_t at = 0; at < bytes; at += DP__CUDA_SLOT_BYTES) {
        size_t piece = dp__cuda_piece(bytes - at);
        dp__cuda_slot *slot = NULL;
        DP_TRY(dp__cuda_slot_take(dev, &slot));
        dp__cuda_fill_all(dev->base.host, slot->data, host + at, piece);
        dp_status status =
            dp__cuda_move(dev->gpu, dst + at, slot->data, piece, cudaMemcpyHostToDevice, stream);
        DP_TRY(dp__cuda_slot_use(dev->gpu, slot, status, stream));
    }
    return DP_OK;
}

/* All slots are under way at once; the oldest is waited for and emptied. */
static dp_status dp__cuda_stage_out(dp__cuda_dev *dev, char *host, const char *src, size_t bytes,
                                    cudaStream_t stream)
{
    dp__cuda_slot *slots[DP__CUDA_SLOTS];
    size_t pieces = (bytes + DP__CUDA_SLOT_BYTES - 1) / DP__CUDA_SLOT_BYTES;
    for (size_t i = 0; i < pieces + DP__CUDA_SLOTS; i++) {
        dp__cuda_slot **place = &slots[i % DP__CUDA_SLOTS];
        if (i >= DP__CUDA_SLOTS) {
            size_t at = (i - DP__CUDA_SLOTS) * DP__CUDA_SLOT_BYTES;
            if (at >= bytes)
                continue;
            DP_TRY(dp__cuda_check("cudaEventSynchronize", dev->gpu->ordinal,
                                  dp__cuda.cudaEventSynchronize((*place)->done)));
            (*place)->busy = false;
            dp__cuda_fill_all(dev->base.host, host + at, (*place)->data,
                              dp__cuda_piece(bytes - at));
        }
        if (i < pieces) {
            size_t at = i * DP__CUDA_SLOT_BYTES;
            DP_TRY(dp__cuda_slot_take(dev, place));
            dp_status status = dp__cuda_move(dev->gpu, (*place)->data, src + at,
                                             dp__cuda_piece(bytes - at), cudaMemcpyDeviceToHost,
                                             stream);
            DP_TRY(dp__cuda_slot_use(dev->gpu, *place, status, stream));
        }
    }
    return DP_OK;
}

/* What is enqueued on `stream` comes after what is on the other one. */
static dp_status dp__cuda_follow(const dp__cuda_gpu *gpu, cudaStream_t stream, cudaEvent_t mark,
                                 cudaStream_t other)
{
    cudaError_t code = dp__cuda.cudaEventRecord(mark, other);
    if (code == cudaSuccess)
        code = dp__cuda.cudaStreamWaitEvent(stream, mark, 0);
    return dp__cuda_check("cudaStreamWaitEvent", gpu->ordinal, code);
}

/* Between GPUs that do not reach each other: out on a stream of the one, in on the other's. */
static dp_status dp__cuda_over_piece(dp__cuda_dev *dev, dp__cuda_dev *from, char *dst,
                                     const char *src, size_t bytes, cudaStream_t stream)
{
    dp__cuda_slot *slot = NULL;
    DP_TRY(dp__cuda_slot_take(dev, &slot));
    dp_status status =
        dp__cuda_move(from->gpu, slot->data, src, bytes, cudaMemcpyDeviceToHost, from->out);
    if (status == DP_OK)
        status = dp__cuda_follow(from->gpu, stream, from->mark, from->out);
    if (status == DP_OK)
        status = dp__cuda_move(dev->gpu, dst, slot->data, bytes, cudaMemcpyHostToDevice, stream);
    if (status != DP_OK) /* the copy out may not be covered by the slot's event */
        (void)dp__cuda.cudaStreamSynchronize(from->out);
    return dp__cuda_slot_use(dev->gpu, slot, status, stream);
}

static dp_status dp__cuda_stage_over(dp__cuda_dev *dev, dp__cuda_dev *from, char *dst,
                                     const char *src, size_t bytes, cudaStream_t stream)
{
    DP_TRY(dp__cuda_follow(dev->gpu, from->out, dev->mark, stream));
    for (size_t at = 0; at < bytes; at += DP__CUDA_SLOT_BYTES)
        DP_TRY(
            dp__cuda_over_piece(dev, from, dst + at, src + at, dp__cuda_piece(bytes - at), stream));
    return DP_OK;
}

/* Copies have priority over the compute stream. */
static dp_status dp__cuda_native_stream(int ordinal, int priority, cudaStream_t *out)
{
    int least = 0, greatest = 0;
    cudaError_t code = dp__cuda.cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (code == cudaSuccess)
        code = dp__cuda.cudaStreamCreateWithPriority(out, cudaStreamNonBlocking,
                                                     priority > 0 ? greatest : least);
    return dp__cuda_check("cudaStreamCreateWithPriority", ordinal, code);
}

static dp_status dp__cuda_native_event(int ordinal, cudaEvent_t *out)
{
    return dp__cuda_check("cudaEventCreateWithFlags", ordinal,
                          dp__cuda.cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}

/* Which memory of the host is near: as CUDA says, or the system; -1: unknown, as in most virtual
   machines. */
static int dp__cuda_node(const dp__cuda_gpu *gpu)
{
    int node = -1;
    char id[32] = "", path[96];
    cudaError_t code = dp__cuda.cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu->ordinal);
    if (code == cudaSuccess && node >= 0)
        return node;
    node = -1;
    if (dp__cuda.cudaDeviceGetPCIBusId(id, (int)sizeof id, gpu->ordinal) != cudaSuccess)
        id[0] = '\0';
    (void)dp__cuda.cudaGetLastError(); /* not knowing is no failure */
    for (char *c = id; *c != '\0'; c++)
        *c = (char)(*c >= 'A' && *c <= 'F' ? *c - 'A' + 'a' : *c);
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", id);
    FILE *file = fopen(path, "r");
    if (file != NULL && fscanf(file, "%d", &node) != 1)
        node = -1;
    if (file != NULL)
        fclose(file);
    return node;
}

#if defined(__linux__) && defined(SYS_set_mempolicy) && defined(SYS_get_mempolicy)
typedef struct dp__cuda_policy { /* of this thread: where its new memory goes */
    int mode;
    unsigned long nodes[1024 / (8 * sizeof(unsigned long))];
} dp__cuda_policy;

/* New memory comes from that node, if possible; the policy from before goes to `out`. */
static bool dp__cuda_near_begin(int node, dp__cuda_policy *out)
{
    enum { BITS = 8 * sizeof(unsigned long), PREFERRED = 1 };
    dp__cuda_policy near = {.mode = PREFERRED};
    *out = (dp__cuda_policy){0};
    if (node < 0 || node >= 1024 || syscall(SYS_get_mempolicy, &out->mode, out->nodes, 1024, 0, 0))
        return false;
    near.nodes[(unsigned)node / BITS] = 1ul << ((unsigned)node % BITS);
    return syscall(SYS_set_mempolicy, near.mode, near.nodes, 1024) == 0;
}

static void dp__cuda_near_end(const dp__cuda_policy *before)
{
    (void)syscall(SYS_set_mempolicy, before->mode, before->mode != 0 ? before->nodes : NULL,
                  before->mode != 0 ? 1024 : 0);
}
#else
typedef int dp__cuda_policy;
static bool dp__cuda_near_begin(int node, dp__cuda_policy *out)
{
    (void)node;
    *out = 0;
    return false;
}

static void dp__cuda_near_end(const dp__cuda_policy *before)
{
    (void)before;
}
#endif

static dp_status dp__cuda_ring_fill(dp__cuda_dev *dev)
{
    for (int i = 0; i < DP__CUDA_SLOTS; i++) {
        void *data = NULL;
        DP_TRY(dp__cuda_check(
            "cudaHostAlloc", dev->gpu->ordinal,
            dp__cuda.cudaHostAlloc(&data, DP__CUDA_SLOT_BYTES, cudaHostAllocPortable)));
        dev->slots[i].data = data;
        DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &dev->slots[i].done));
    }
    return DP_OK;
}

static dp_status dp__cuda_ring_open(dp__cuda_dev *dev)
{
    dp__cuda_policy before;
    DP_TRY(dp__cuda_native_stream(dev->gpu->ordinal, 1, &dev->out));
    DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &dev->mark));
    bool near = dp__cuda_near_begin(dp__cuda_node(dev->gpu), &before);
    dp_status status = dp__cuda_ring_fill(dev);
    if (near)
        dp__cuda_near_end(&before);
    return status;
}

static void dp__cuda_ring_close(dp__cuda_dev *dev)
{
    for (int i = 0; i < DP__CUDA_SLOTS; i++) {
        dp__cuda_slot *slot = &dev->slots[i];
        if (slot->busy)
            (void)dp__cuda.cudaEventSynchronize(slot->done);
        if (slot->done != NULL)
            (void)dp__cuda.cudaEventDestroy(slot->done);
        if (slot->data != NULL)
            (void)dp__cuda.cudaFreeHost(slot->data);
    }
    if (dev->mark != NULL)
        (void)dp__cuda.cudaEventDestroy(dev->mark);
    if (dev->out != NULL)
        (void)dp__cuda.cudaStreamDestroy(dev->out);
    (void)dp__cuda.cudaGetLastError();
}

/* ==== >>peers ====================================================================================
   GPUs that say they reach each other's memory have been seen to read other bytes, or to hang. So a
   pair is checked at its first copy; if it does not pass, copies go through the host.           */

enum dp__cuda_reach { DP__CUDA_UNKNOWN, DP__CUDA_DIRECT, DP__CUDA_STAGED };
enum { DP__CUDA_CHECK_COUNT = (8 << 20) / 4 + 3, DP__CUDA_CHECK_ROUNDS = 3 };
enum { DP__CUDA_CHECK_SECONDS = 5, DP__CUDA_RESULTS = 2 };

typedef struct dp__cuda_side { /* one GPU's side of a check */
    const dp__cuda_gpu *gpu;
    cudaStream_t stream;
    cudaEvent_t event;
    unsigned *words;
    double *scratch, *results; /* after the words; results: one per way to read */
} dp__cuda_side;

static dp_status dp__cuda_side_open(dp__cuda_side *side)
{
    size_t words = ((size_t)DP__CUDA_CHECK_COUNT * 4 + DP__CUDA_ALIGN - 1) / DP__CUDA_ALIGN *
                   DP__CUDA_ALIGN;
    size_t scratch = 2 * sizeof(double) * DP__CUDA_CHUNKS;
    int ordinal = side->gpu->ordinal;
    void *block = NULL;
    DP_TRY(dp__cuda_native_stream(ordinal, 0, &side->stream));
    DP_TRY(dp__cuda_native_event(ordinal, &side->event));
    DP_TRY(dp__cuda_check(
        "cudaMalloc", ordinal,
        dp__cuda.cudaMalloc(&block, words + scratch + DP__CUDA_RESULTS * sizeof(double))));
    side->words = block;
    side->scratch = (void *)((char *)block + words);
    side->results = (void *)((char *)block + words + scratch);
    return DP_OK;
}

/* Of a GPU that is lost everything stays. */
static void dp__cuda_side_close(dp__cuda_side *side)
{
    if (dp__cuda_enter(side->gpu) != DP_OK)
        return;
    if (side->stream != NULL)
        (void)dp__cuda.cudaStreamSynchronize(side->stream);
    if (side->words != NULL)
        (void)dp__cuda.cudaFree(side->words);
    if (side->event != NULL)
        (void)dp__cuda.cudaEventDestroy(side->event);
    if (side->stream != NULL)
        (void)dp__cuda.cudaStreamDestroy(side->stream);
    (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(side->gpu, DP_OK, "", cudaSuccess);
}

/* DP_ERR_TIMEOUT: it hangs. */
static dp_status dp__cuda_poll(const dp__cuda_side *side)
{
    struct timespec now, start;
    (void)timespec_get(&start, TIME_UTC);
    for (;;) {
        cudaError_t code = dp__cuda.cudaEventQuery(side->event);
        if (code != cudaErrorNotReady)
            return dp__cuda_check("cudaEventQuery", side->gpu->ordinal, code);
        (void)timespec_get(&now, TIME_UTC);
        if (now.tv_sec - start.tv_sec > DP__CUDA_CHECK_SECONDS)
            return dp_error(DP_ERR_TIMEOUT, "a copy does not end");
    }
}

/* `reader` fills its words with something else, reads the other's, and counts the wrong ones. */
static dp_status dp__cuda_read_over(const dp__cuda_side *reader, const dp__cuda_side *from,
                                    bool by_kernel, uint64_t seed)
{
    struct dp__cuda_params params = {.in = {from->words},
                                     .out = {reader->words},
                                     .in_count = 1,
                                     .out_count = 1,
                                     .count = DP__CUDA_CHECK_COUNT,
                                     .fill = ~seed,
                                     .width = sizeof(unsigned),
                                     .ndim = 1,
                                     .shape = {DP__CUDA_CHECK_COUNT},
                                     .in_stride = {1},
                                     .out_stride = {1},
                                     .alpha = 1};
    const dp__cuda_gpu *gpu = reader->gpu;
    DP_TRY(dp__cuda_launch_each_on(gpu, reader->stream, DP__CUDA_fill, &params));
    if (by_kernel)
        DP_TRY(dp__cuda_launch_each_on(gpu, reader->stream, DP__CUDA_copy, &params));
    else
        DP_TRY(dp__cuda_check("cudaMemcpyPeerAsync", gpu->ordinal,
                              dp__cuda.cudaMemcpyPeerAsync(
                                  reader->words, gpu->ordinal, from->words, from->gpu->ordinal,
                                  (size_t)DP__CUDA_CHECK_COUNT * 4, reader->stream)));
    params.in[0] = reader->words;
    params.out[0] = reader->results + by_kernel;
    params.fill = seed;
    params.scratch = reader->scratch;
    return dp__cuda_launch_sums_on(gpu, reader->stream, DP__CUDA_differ, &params);
}

/* `wrong`: pinned, one number per way to read. */
static dp_status dp__cuda_check_round(const dp__cuda_side *reader, const dp__cuda_side *from,
                                      double *wrong, uint64_t seed)
{
    struct dp__cuda_params params = {
        .out = {from->words}, .out_count = 1, .count = DP__CUDA_CHECK_COUNT, .fill = seed};
    DP_TRY(dp__cuda_launch_each_on(from->gpu, from->stream, DP__CUDA_pattern, &params));
    DP_TRY(dp__cuda_follow(from->gpu, reader->stream, from->event, from->stream));
    DP_TRY(dp__cuda_read_over(reader, from, false, seed));
    DP_TRY(dp__cuda_read_over(reader, from, true, seed));
    DP_TRY(dp__cuda_move(reader->gpu, wrong, reader->results, DP__CUDA_RESULTS * sizeof *wrong,
                         cudaMemcpyDeviceToHost, reader->stream));
    DP_TRY(dp__cuda_check("cudaEventRecord", reader->gpu->ordinal,
                          dp__cuda.cudaEventRecord(reader->event, reader->stream)));
    DP_TRY(dp__cuda_poll(reader));
    DP_TRY(dp__cuda_follow(reader->gpu, from->stream, reader->event, reader->stream));
    if (wrong[0] > 0 || wrong[1] > 0)
        return dp_error(DP_ERR_DEVICE, "%.0f of %d words arrive wrong", wrong[wrong[0] > 0 ? 0 : 1],
                        DP__CUDA_CHECK_COUNT);
    return DP_OK;
}

/* With the reader's context. A check that does not end loses both GPUs: what hangs in one cannot be
   waited for, and what the other gives back may still be read. */
static dp_status dp__cuda_check_pair(dp__cuda_side *reader, dp__cuda_side *from)
{
    void *wrong = NULL;
    DP_TRY(dp__cuda_side_open(reader));
    DP_TRY(dp__cuda_enter(from->gpu));
    DP_TRY(dp__cuda_leave(from->gpu, dp__cuda_side_open(from), "", cudaSuccess));
    DP_TRY(dp__cuda_check(
        "cudaHostAlloc", reader->gpu->ordinal,
        dp__cuda.cudaHostAlloc(&wrong, DP__CUDA_RESULTS * sizeof(double), cudaHostAllocPortable)));
    dp_status status = DP_OK;
    for (int round = 0; round < DP__CUDA_CHECK_ROUNDS && status == DP_OK; round++)
        status = dp__cuda_check_round(reader, from, wrong, (uint64_t)(round + 1) * 0x5851f42d);
    if (status == DP_ERR_TIMEOUT) { /* all of it stays */
        atomic_store(&dp__cuda_lost[reader->gpu->ordinal], true);
        atomic_store(&dp__cuda_lost[from->gpu->ordinal], true);
        return status;
    }
    (void)dp__cuda.cudaStreamSynchronize(reader->stream);
    (void)dp__cuda.cudaFreeHost(wrong);
    return status;
}

/* Whether the reader may use the other's memory, and reads the right bytes there. */
static dp_status dp__cuda_pair_open(const dp__cuda_gpu *reader, const dp__cuda_gpu *from)
{
    int can = 0;
    dp__cuda_side sides[2] = {{.gpu = reader}, {.gpu = from}};
    DP_TRY(dp__cuda_check("cudaDeviceCanAccessPeer", reader->ordinal,
                          dp__cuda.cudaDeviceCanAccessPeer(&can, reader->ordinal, from->ordinal)));
    if (!can)
        return dp_error(DP_ERR_UNSUPPORTED, "the driver says so");
    DP_TRY(dp__cuda_enter(reader));
    cudaError_t enabled = dp__cuda.cudaDeviceEnablePeerAccess(from->ordinal, 0);
    dp_status status = DP_OK;
    if (enabled != cudaErrorPeerAccessAlreadyEnabled)
        status = dp__cuda_check("cudaDeviceEnablePeerAccess", reader->ordinal, enabled);
    else
        (void)dp__cuda.cudaGetLastError();
    if (status == DP_OK)
        status = dp__cuda_check_pair(&sides[0], &sides[1]);
    DP_TRY(dp__cuda_leave(reader, DP_OK, "", cudaSuccess));
    dp__cuda_side_close(&sides[0]);
    dp__cuda_side_close(&sides[1]);
    if (status != DP_OK && enabled == cudaSuccess && dp__cuda_enter(reader) == DP_OK)
        (void)dp__cuda_leave(reader, DP_OK, "cudaDeviceDisablePeerAccess",
                             dp__cuda.cudaDeviceDisablePeerAccess(from->ordinal));
    return status;
}

static dp_status dp__cuda_captures(const dp_stream *stream, bool *out)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t code =
        dp__cuda.cudaStreamIsCapturing(((const dp__cuda_stream *)stream)->native, &capture);
    *out = capture != cudaStreamCaptureStatusNone;
    return dp__cuda_check("cudaStreamIsCapturing", dp__cuda_gpu_of(stream->dev)->ordinal, code);
}

/* Refuses what makes the host wait where the stream is captured, before anything has been added to
   the capture. */
static dp_status dp__cuda_uncaptured(const dp_stream *stream, const char *what)
{
    bool captured = false;
    DP_TRY(dp__cuda_captures(stream, &captured));
    return !captured ? DP_OK
                     : dp_error(DP_ERR_STATE, "cuda %d: %s cannot be captured, and its stream is",
                                dp__cuda_gpu_of(stream->dev)->ordinal, what);
}

/* Checks the pair at its first copy. Says so once, if that does not pass. */
static dp_status dp__cuda_reach(dp__cuda_dev *dev, const dp__cuda_gpu *from, atomic_int *reach)
{
    char text[DP__TEXT_BYTES];
    char first = dp__sentence_hide();
    dp_status status = dp__cuda_pair_open(dev->gpu, from);
    if (status == DP_ERR_TIMEOUT)
        return dp_error(DP_ERR_DEVICE, "cuda: GPU %d does not come to the end of reading GPU %d",
                        dev->gpu->ordinal, from->ordinal);
    if (status != DP_OK) {
        snprintf(text, sizeof text,
                 "cuda: GPU %d does not read GPU %d directly (%.300s): copies go through the host",
                 dev->gpu->ordinal, from->ordinal, dp_last_error());
        dev->base.host->log(dev->base.host, DP_LOG_WARN, text);
    }
    (void)dp__sentence_after(first, DP_OK);
    atomic_store(reach, status == DP_OK ? DP__CUDA_DIRECT : DP__CUDA_STAGED);
    return DP_OK;
}

/* Whether the stream's GPU copies from the other directly. */
static dp_status dp__cuda_reaches(dp_stream *stream, const dp__cuda_gpu *from, bool *out)
{
    dp__cuda_dev *dev = dp__cuda_dev_of(stream->dev);
    atomic_int *reach = &dp__cuda_gpus[dev->gpu->ordinal].reach[from->ordinal];
    dp_status status = DP_OK;
    if (atomic_load(reach) == DP__CUDA_UNKNOWN) {
        DP_TRY(dp__cuda_uncaptured(stream, "the first copy from another GPU, which is checked,"));
        dp__lock_enter(&dp__cuda_lock);
        if (atomic_load(reach) == DP__CUDA_UNKNOWN)
            status = dp__cuda_reach(dev, from, reach);
        dp__lock_leave(&dp__cuda_lock);
    }
    *out = atomic_load(reach) == DP__CUDA_DIRECT;
    return status;
}

/* ==== >>copies ===================================================================================
   The table's copies. Each enqueues on the stream; only a copy to memory that is not pinned waits,
   since it has to be copied on from the ring.                                                   */

static const dp__cuda_stream *dp__cuda_stream_of(const dp_stream *stream)
{
    return (const dp__cuda_stream *)stream;
}

/* A plain copy of any kind. */
static dp_status dp__cuda_plain(dp_stream *stream, void *dst, const void *src, size_t bytes,
                                enum cudaMemcpyKind kind)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(
        gpu, DP_OK, "cudaMemcpyAsync",
        dp__cuda.cudaMemcpyAsync(dst, src, bytes, kind, dp__cuda_stream_of(stream)->native));
}

typedef dp_status dp__cuda_stage_fn(dp__cuda_dev *dev, char *dst, const char *src, size_t bytes,
                                    cudaStream_t stream);

static dp_status dp__cuda_staged(dp_stream *stream, void *dst, const void *src, size_t bytes,
                                 dp__cuda_stage_fn *stage)
{
    dp__cuda_dev *dev = dp__cuda_dev_of(stream->dev);
    DP_TRY(dp__cuda_enter(dev->gpu));
    dp_status status =
        dp__cuda_uncaptured(stream, "a copy between a GPU and memory that is not pinned");
    if (status == DP_OK) {
        dp__lock_enter(&dev->lock);
        status = stage(dev, dst, src, bytes, dp__cuda_stream_of(stream)->native);
        dp__lock_leave(&dev->lock);
    }
    return dp__cuda_leave(dev->gpu, status, "", cudaSuccess);
}

static dp_status dp__cuda_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    return dp__cuda_is_pinned(dp__cuda_gpu_of(stream->dev), host)
               ? dp__cuda_plain(stream, dst, host, bytes, cudaMemcpyHostToDevice)
               : dp__cuda_staged(stream, dst, host, bytes, dp__cuda_stage_in);
}

static dp_status dp__cuda_copy_out(dp_stream *stream, void *host, const void *src, size_t bytes)
{
    return dp__cuda_is_pinned(dp__cuda_gpu_of(stream->dev), host)
               ? dp__cuda_plain(stream, host, src, bytes, cudaMemcpyDeviceToHost)
               : dp__cuda_staged(stream, host, src, bytes, dp__cuda_stage_out);
}

static dp_status dp__cuda_copy(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    return dp__cuda_plain(stream, dst, src, bytes, cudaMemcpyDeviceToDevice);
}

/* Both devices' locks are taken, always in the same order. */
static dp_status dp__cuda_staged_over(dp_stream *stream, void *dst, dp__cuda_dev *from,
                                      const void *src, size_t bytes)
{
    dp__cuda_dev *dev = dp__cuda_dev_of(stream->dev);
    bool reader_first = (uintptr_t)dev < (uintptr_t)from;
    dp__lock *first = reader_first ? &dev->lock : &from->lock;
    dp__lock *second = reader_first ? &from->lock : &dev->lock;
    DP_TRY(dp__cuda_uncaptured(stream, "a copy from another GPU through the host"));
    dp__lock_enter(first);
    dp__lock_enter(second);
    dp_status status =
        dp__cuda_stage_over(dev, from, dst, src, bytes, dp__cuda_stream_of(stream)->native);
    dp__lock_leave(second);
    dp__lock_leave(first);
    return status;
}

/* With the context of any GPU. */
static dp_status dp__cuda_peer_move(dp_stream *stream, void *dst, dp_dev *src_dev, const void *src,
                                    size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev), *from = dp__cuda_gpu_of(src_dev);
    bool reaches = false;
    if (from == gpu)
        return dp__cuda_move(gpu, dst, src, bytes, cudaMemcpyDeviceToDevice,
                             dp__cuda_stream_of(stream)->native);
    DP_TRY(dp__cuda_reaches(stream, from, &reaches));
    if (!reaches)
        return dp__cuda_staged_over(stream, dst, dp__cuda_dev_of(src_dev), src, bytes);
    return dp__cuda_check("cudaMemcpyPeerAsync", gpu->ordinal,
                          dp__cuda.cudaMemcpyPeerAsync(dst, gpu->ordinal, src, from->ordinal, bytes,
                                                       dp__cuda_stream_of(stream)->native));
}

static dp_status dp__cuda_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev, const void *src,
                                    size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, dp__cuda_peer_move(stream, dst, src_dev, src, bytes), "",
                          cudaSuccess);
}

/* ==== >>launch ===================================================================================
   A dp_kernel becomes one launch, a sum over all elements two.                                  */

static dp_status dp__cuda_launch_each(dp_stream *stream, int kernel, struct dp__cuda_params *params)
{
    return dp__cuda_launch_each_on(dp__cuda_gpu_of(stream->dev), dp__cuda_stream_of(stream)->native,
                                   kernel, params);
}

static dp_status dp__cuda_launch_sums(dp_stream *stream, int kernel, struct dp__cuda_params *params)
{
    params->scratch = dp__cuda_stream_of(stream)->scratch;
    return dp__cuda_launch_sums_on(dp__cuda_gpu_of(stream->dev), dp__cuda_stream_of(stream)->native,
                                   kernel, params);
}

static void dp__cuda_dims(struct dp__cuda_params *params, const dp_kernel_args *args)
{
    params->ndim = args->ndim;
    for (int d = 0; d < args->ndim; d++) {
        params->shape[d] = args->shape[d];
        params->in_stride[d] = args->in_stride[d];
        params->out_stride[d] = args->out_stride != NULL ? args->out_stride[d] : 0;
        params->in_shape[d] = args->in_shape != NULL ? args->in_shape[d] : 0;
    }
}

static struct dp__cuda_params dp__cuda_params_of(const dp_kernel_args *args)
{
    struct dp__cuda_params params = {.count = args->count,
                                     .fill = args->fill_bits,
                                     .alpha = args->alpha,
                                     .beta = args->beta,
                                     .in_count = (unsigned)args->in_count,
                                     .out_count = (unsigned)args->out_count,
                                     .op = (int)args->op,
                                     .dtype = (int)args->dtype,
                                     .in_dtype = (int)args->in_dtype,
                                     .width = (unsigned)dp_dtype_bytes(args->dtype),
                                     .flags = args->flags};
    memcpy(params.numbers, args->numbers, sizeof params.numbers);
    for (size_t i = 0; i < args->in_count; i++)
        params.in[i] = args->in[i];
    for (size_t i = 0; i < args->out_count; i++)
        params.out[i] = args->out[i];
    return params;
}

/* Chunks per channel: as many as there is scratch for, with a size that depends only on the
   shape. */
static dp_status dp__cuda_launch_channels(dp_stream *stream, int kernel, const int64_t *shape,
                                          struct dp__cuda_params *params)
{
    uint64_t all = (uint64_t)shape[0] * (uint64_t)shape[2], channels = (uint64_t)shape[1];
    uint64_t most = DP__CUDA_CHUNKS / channels, each = (all + (64 << 10) - 1) / (64 << 10);
    if (most == 0)
        return dp_error(DP_ERR_UNSUPPORTED, "cuda: %llu channels", (unsigned long long)channels);
    params->fill = each < most ? each : most;
    params->chunk = (all + params->fill - 1) / params->fill;
    params->chunk_count = channels * params->fill;
    params->scratch = dp__cuda_stream_of(stream)->scratch;
    for (int d = 0; d < 3; d++)
        params->shape[d] = shape[d];
    DP_TRY(dp__cuda_launch_on(dp__cuda_gpu_of(stream->dev), dp__cuda_stream_of(stream)->native,
                              kernel, params->chunk_count, params));
    params->count = channels;
    return dp__cuda_launch_each(stream, DP__CUDA_channels_end, params);
}

static dp_status dp__cuda_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    bool real = args->dtype <= DP_BF16;
    int wide = args->dtype == DP_F64; /* of the kernels that compute halves as f32 */
    int dtype = (int)args->dtype;
    if (args->in_count > DP__CUDA_OPERANDS || args->out_count > DP__CUDA_OPERANDS)
        return dp_error(DP_ERR_UNSUPPORTED, "cuda: a kernel of %zu and %zu operands",
                        args->in_count, args->out_count);
    struct dp__cuda_params params = dp__cuda_params_of(args);
    switch (args->kernel) {
    case DP_KERNEL_COPY:
        dp__cuda_dims(&params, args);
        return dp__cuda_launch_each(stream, DP__CUDA_copy, &params);
    case DP_KERNEL_FILL:
        return dp__cuda_launch_each(stream, DP__CUDA_fill, &params);
    case DP_KERNEL_CAST:
        return dp__cuda_launch_each(stream, DP__CUDA_cast, &params);
    case DP_KERNEL_REDUCE:
        return dp__cuda_launch_each(stream,
                                    real                     ? DP__CUDA_reduce_f32 + dtype
                                    : args->dtype == DP_BOOL ? DP__CUDA_reduce_bool
                                                             : DP__CUDA_reduce_whole,
                                    &params);
    case DP_KERNEL_PAD:
        dp__cuda_dims(&params, args);
        return dp__cuda_launch_each(stream, DP__CUDA_pad, &params);
    case DP_KERNEL_TOTAL:
        return dp__cuda_launch_sums(stream, DP__CUDA_total, &params);
    case DP_KERNEL_AXPBY:
        if (real)
            return dp__cuda_launch_each(stream, DP__CUDA_axpby_f32 + dtype, &params);
        break;
    case DP_KERNEL_STATS:
        params.alpha = 1;
        params.out_count = 2; /* both sums lie in out[0] */
        if (real)
            return dp__cuda_launch_sums(stream, DP__CUDA_stats_f32 + dtype, &params);
        break;
    case DP_KERNEL_SGD:
        if (real)
            return dp__cuda_launch_each(stream, DP__CUDA_sgd_f32 + wide, &params);
        break;
    case DP_KERNEL_ADAMW:
        if (real)
            return dp__cuda_launch_each(stream, DP__CUDA_adamw_f32 + wide, &params);
        break;
    case DP_KERNEL_CHANNELS:
        if (real)
            return dp__cuda_launch_channels(stream, DP__CUDA_channels_f32 + wide, args->shape,
                                            &params);
        break;
    }
    return dp_error(DP_ERR_UNSUPPORTED, "cuda: no kernel %d for dtype %s", (int)args->kernel,
                    dp_dtype_name(args->dtype));
}

/* Rows that are short, or too far apart for the copy engine, are copied by a kernel. */
static dp_status dp__cuda_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch, const void *src,
                                  size_t src_pitch, size_t row_bytes, size_t rows)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    size_t together = (uintptr_t)dst | (uintptr_t)src | dst_pitch | src_pitch | row_bytes;
    size_t each = together % 8 == 0 ? 8 : together % 4 == 0 ? 4 : together % 2 == 0 ? 2 : 1;
    struct dp__cuda_params params = {.in = {src}, .out = {dst}, .in_count = 1, .out_count = 1};
    if (row_bytes < 256 || dst_pitch > gpu->pitch_max || src_pitch > gpu->pitch_max) {
        params.ndim = 2;
        params.width = (unsigned)each;
        params.count = rows * (row_bytes / each);
        params.shape[0] = (long long)rows;
        params.shape[1] = (long long)(row_bytes / each);
        params.out_stride[0] = (long long)(dst_pitch / each);
        params.in_stride[0] = (long long)(src_pitch / each);
        params.out_stride[1] = params.in_stride[1] = 1;
        return dp__cuda_launch_each(stream, DP__CUDA_copy, &params);
    }
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, DP_OK, "cudaMemcpy2DAsync",
                          dp__cuda.cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, row_bytes,
                                                     rows, cudaMemcpyDeviceToDevice,
                                                     dp__cuda_stream_of(stream)->native));
}

/* ==== >>device ===================================================================================
   The table dp_cuda(), and what kernels of the user need.                                       */

static dp_status dp__cuda_count(const dp_host *host, int *out)
{
    (void)host;
    dp__lock_enter(&dp__cuda_lock);
    dp_status status = dp__cuda_ready();
    if (status == DP_OK)
        status = dp__cuda_check("cudaGetDeviceCount", 0, dp__cuda.cudaGetDeviceCount(out));
    dp__lock_leave(&dp__cuda_lock);
    return status;
}

static void dp__cuda_close(dp_dev *dev)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    const dp_host *host = dev->host;
    dp__lock_enter(&dp__cuda_lock);
    dp__cuda_dev **link = &dp__cuda_open_list;
    while (*link != NULL && *link != own)
        link = &(*link)->next_open;
    if (*link == own)
        *link = own->next_open;
    while (own->slabs != NULL)
        dp__cuda_slab_drop(own, &own->slabs);
    if (dp__cuda_enter(own->gpu) == DP_OK) {
        dp__cuda_ring_close(own);
        (void)dp__cuda_leave(own->gpu, DP_OK, "", cudaSuccess);
    }
    if (--own->gpu->users == 0)
        dp__cuda_gpu_drop(own->gpu);
    dp__lock_leave(&dp__cuda_lock);
    host->free(host, own);
}

static dp_status dp__cuda_open(const dp_host *host, int index, dp_dev **out)
{
    if (index < 0 || index >= DP__CUDA_GPUS_MAX)
        return dp_error(DP_ERR_NO_DEVICE, "cuda: there is no GPU %d", index);
    dp__cuda_dev *dev = host->alloc(host, sizeof *dev, _Alignof(dp__cuda_dev));
    if (dev == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda %d: no memory on the host", index);
    *dev = (dp__cuda_dev){.base = {dp_cuda(), host, index}, .lock = DP__LOCK_INITIALIZER};
    dp__lock_enter(&dp__cuda_lock);
    dp_status status = dp__cuda_gpu_use(host, index, &dev->gpu);
    if (status == DP_OK) {
        dev->next_open = dp__cuda_open_list;
        dp__cuda_open_list = dev;
    }
    dp__lock_leave(&dp__cuda_lock);
    if (status != DP_OK) {
        host->free(host, dev);
        return status;
    }
    status = dp__cuda_enter(dev->gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(dev->gpu, dp__cuda_ring_open(dev), "", cudaSuccess);
    if (status != DP_OK) {
        dp__cuda_close(&dev->base);
        return status;
    }
    *out = &dev->base;
    return DP_OK;
}

static dp_status dp__cuda_info(dp_dev *dev, dp_device_info *out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    size_t bytes_free = 0, bytes_total = 0;
    *out = (dp_device_info){.compute_units = gpu->multiprocessors, .memory = gpu->ordinal + 1};
    DP_TRY(dp__cuda_driver_check(
        "cuDeviceGetName", gpu->ordinal,
        dp__cuda.call_cuDeviceGetName(out->name, (int)sizeof out->name, gpu->device)));
    DP_TRY(dp__cuda_check(
        "cudaDeviceGetPCIBusId", gpu->ordinal,
        dp__cuda.cudaDeviceGetPCIBusId(out->bus_id, (int)sizeof out->bus_id, gpu->ordinal)));
    DP_TRY(dp__cuda_enter(gpu));
    DP_TRY(dp__cuda_leave(gpu, DP_OK, "cudaMemGetInfo",
                          dp__cuda.cudaMemGetInfo(&bytes_free, &bytes_total)));
    out->bytes_free = bytes_free;
    out->bytes_total = bytes_total;
    return DP_OK;
}

static void dp__cuda_stream_destroy(dp_stream *stream)
{
    dp__cuda_stream *own = (dp__cuda_stream *)stream;
    const dp_host *host = stream->dev->host;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    if (own->native != NULL && !own->adopted && dp__cuda_enter(gpu) == DP_OK) {
        if (!host->aborted(
                host)) /* cudaStreamDestroy lets work go on; its memory may be freed now */
            (void)dp__cuda.cudaStreamSynchronize(own->native);
        (void)dp__cuda_leave(gpu, DP_OK, "cudaStreamDestroy",
                             dp__cuda.cudaStreamDestroy(own->native));
    }
    if (own->scratch != NULL)
        dp__cuda_free(stream->dev, own->scratch, 0);
    host->free(host, own);
}

/* `native` NULL: a stream of its own. */
static dp_status dp__cuda_stream_make(dp_dev *dev, int priority, cudaStream_t native,
                                      dp_stream **out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    void *scratch = NULL;
    dp__cuda_stream *stream =
        dev->host->alloc(dev->host, sizeof *stream, _Alignof(dp__cuda_stream));
    if (stream == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda %d: no memory for a stream", gpu->ordinal);
    *stream = (dp__cuda_stream){.base = {dev}, .native = native, .adopted = native != NULL};
    dp_status status = dp__cuda_alloc(dev, 2 * DP__CUDA_CHUNKS * sizeof *stream->scratch, &scratch);
    stream->scratch = scratch;
    if (status == DP_OK)
        status = dp__cuda_enter(gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(
            gpu,
            native == NULL ? dp__cuda_native_stream(gpu->ordinal, priority, &stream->native)
                           : DP_OK,
            "", cudaSuccess);
    if (status != DP_OK) {
        dp__cuda_stream_destroy(&stream->base);
        return status;
    }
    *out = &stream->base;
    return DP_OK;
}

static dp_status dp__cuda_stream_create(dp_dev *dev, int priority, dp_stream **out)
{
    return dp__cuda_stream_make(dev, priority, NULL, out);
}

static dp_status dp__cuda_stream_sync(dp_stream *stream)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    cudaError_t code = cudaSuccess;
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_uncaptured(stream, "a wait");
    if (status == DP_OK)
        code = dp__cuda.cudaStreamSynchronize(dp__cuda_stream_of(stream)->native);
    return dp__cuda_leave(gpu, status, "cudaStreamSynchronize", code);
}

static dp_status dp__cuda_event_create(dp_dev *dev, dp_event **out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    dp__cuda_event *event = dev->host->alloc(dev->host, sizeof *event, _Alignof(dp__cuda_event));
    if (event == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda %d: no memory for an event", gpu->ordinal);
    *event = (dp__cuda_event){.base = {dev}};
    dp_status status = dp__cuda_enter(gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(gpu, dp__cuda_native_event(gpu->ordinal, &event->native), "",
                                cudaSuccess);
    if (status != DP_OK) {
        dev->host->free(dev->host, event);
        return status;
    }
    *out = &event->base;
    return DP_OK;
}

static void dp__cuda_event_destroy(dp_event *event)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(event->dev);
    const dp_host *host = event->dev->host;
    if (dp__cuda_enter(gpu) == DP_OK)
        (void)dp__cuda_leave(gpu, DP_OK, "cudaEventDestroy",
                             dp__cuda.cudaEventDestroy(((dp__cuda_event *)event)->native));
    host->free(host, event);
}

static dp_status dp__cuda_event_record(dp_event *event, dp_stream *stream)
{
    dp__cuda_event *own = (dp__cuda_event *)event;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    DP_TRY(
        dp__cuda_leave(gpu, DP_OK, "cudaEventRecord",
                       dp__cuda.cudaEventRecord(own->native, dp__cuda_stream_of(stream)->native)));
    atomic_store(&own->recorded, true);
    return DP_OK;
}

static dp_status dp__cuda_event_wait(dp_stream *stream, dp_event *event)
{
    dp__cuda_event *own = (dp__cuda_event *)event;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    if (!atomic_load(&own->recorded))
        return DP_OK;
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(
        gpu, DP_OK, "cudaStreamWaitEvent",
        dp__cuda.cudaStreamWaitEvent(dp__cuda_stream_of(stream)->native, own->native, 0));
}

static dp_status dp__cuda_event_sync(dp_event *event)
{
    dp__cuda_event *own = (dp__cuda_event *)event;
    if (!atomic_load(&own->recorded))
        return DP_OK;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(event->dev);
    DP_TRY(dp__cuda_enter(gpu));
    cudaError_t code = dp__cuda.cudaEventSynchronize(own->native);
    if (code == cudaErrorCapturedEvent) { /* what is captured does not run: nothing to wait for */
        (void)dp__cuda.cudaGetLastError();
        code = cudaSuccess;
    }
    return dp__cuda_leave(gpu, DP_OK, "cudaEventSynchronize", code);
}

/* Blocks of ours are known; only of other memory the driver is asked. A lost GPU says so later. */
static bool dp__cuda_owns(dp_dev *dev, const void *data)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    struct cudaPointerAttributes attributes = {.type = cudaMemoryTypeUnregistered};
    dp__lock_enter(&own->lock);
    const dp__cuda_slab *slab = own->slabs;
    while (slab != NULL &&
           ((const char *)data < slab->data || (const char *)data >= slab->data + slab->bytes))
        slab = slab->next;
    dp__lock_leave(&own->lock);
    if (slab != NULL || dp__cuda_enter(own->gpu) != DP_OK)
        return true;
    if (dp__cuda.cudaPointerGetAttributes(&attributes, data) != cudaSuccess)
        (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(own->gpu, DP_OK, "", cudaSuccess);
    return attributes.type == cudaMemoryTypeManaged ||
           (attributes.type == cudaMemoryTypeDevice && attributes.device == own->gpu->ordinal);
}

DP_API const dp_device_ops *dp_cuda(void)
{
    static const dp_device_ops ops = {.size = sizeof ops,
                                      .name = "cuda",
                                      .count = dp__cuda_count,
                                      .open = dp__cuda_open,
                                      .close = dp__cuda_close,
                                      .info = dp__cuda_info,
                                      .alloc = dp__cuda_alloc,
                                      .free = dp__cuda_free,
                                      .stream_create = dp__cuda_stream_create,
                                      .stream_destroy = dp__cuda_stream_destroy,
                                      .stream_sync = dp__cuda_stream_sync,
                                      .event_create = dp__cuda_event_create,
                                      .event_destroy = dp__cuda_event_destroy,
                                      .event_record = dp__cuda_event_record,
                                      .event_wait = dp__cuda_event_wait,
                                      .event_sync = dp__cuda_event_sync,
                                      .copy_in = dp__cuda_copy_in,
                                      .copy_out = dp__cuda_copy_out,
                                      .copy = dp__cuda_copy,
                                      .host_alloc = dp__cuda_host_alloc,
                                      .host_free = dp__cuda_host_free,
                                      .copy_2d = dp__cuda_copy_2d,
                                      .peer_copy = dp__cuda_peer_copy,
                                      .kernel = dp__cuda_kernel,
                                      .owns = dp__cuda_owns};
    return &ops;
}

static const dp_device_ops *(*dp__backend_cuda)(void) = dp_cuda; /* dp.h asks for it */

/* A table may be decorated, so a device is recognised by its address only. */
static bool dp__cuda_is_open(const dp_dev *dev)
{
    dp__lock_enter(&dp__cuda_lock);
    const dp__cuda_dev *own = dp__cuda_open_list;
    while (own != NULL && &own->base != dev)
        own = own->next_open;
    dp__lock_leave(&dp__cuda_lock);
    return own != NULL;
}

DP_API struct CUstream_st *dp_cuda_stream(const dp_stream *stream)
{
    bool own = stream != NULL && dp__cuda_is_open(stream->dev);
    return own ? dp__cuda_stream_of(stream)->native : NULL;
}

DP_API int dp_cuda_ordinal(const dp_stream *stream)
{
    bool own = stream != NULL && dp__cuda_is_open(stream->dev);
    return own ? dp__cuda_gpu_of(stream->dev)->ordinal : -1;
}

DP_API dp_status dp_cuda_adopt(dp_ctx *ctx, int local_rank, struct CUstream_st *native,
                               dp_stream **out)
{
    const dp_stream *own = dp_local_stream(ctx, local_rank);
    int ordinal = dp_cuda_ordinal(own), place = -1;
    if (ordinal < 0)
        return dp_error(DP_ERR_INVALID, "%s: local rank %d is not a CUDA device", __func__,
                        local_rank);
    if (native == NULL || out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", __func__,
                        native == NULL ? "native" : "out");
    DP_TRY(dp__cuda_check("cudaStreamGetDevice", ordinal,
                          dp__cuda.cudaStreamGetDevice(native, &place)));
    if (place != ordinal)
        return dp_error(DP_ERR_INVALID, "%s: the stream is of GPU %d, local rank %d is GPU %d",
                        __func__, place, local_rank, ordinal);
    return dp__cuda_stream_make(own->dev, 0, native, out);
}

DP_API void dp_cuda_release(dp_stream *stream)
{
    if (dp_cuda_stream(stream) != NULL && dp__cuda_stream_of(stream)->adopted)
        dp__cuda_stream_destroy(stream);
}

/* ==== >>collectives ==============================================================================
   The table dp_cuda_coll(): ranks of one process, each on a GPU, several on one if need be. Sums
   are made where they are wanted, over all ranks, by one kernel that reads what is on its GPU in
   place; what is on another one comes to a lobby first, a piece at a time. An all-reduce gives each
   GPU one slice to add up. No sum needs another, so all of them are enqueued before anything is
   fetched: every GPU then reads all the time, and no two read the same one. All of it is on the
   streams of the call. An order that is not one after another is kept by marks: `heed` makes one
   rank's stream wait for what another's had to do when it was marked.

   S bytes on D GPUs: each reads (D - 1) / D of S for its sums and as much of others' sums, and is
   read as often. A broadcast goes from GPU to GPU, each of which is read once. With links of 350
   GB/s in each direction, 2 us a copy, 2 us and 2400 GB/s a kernel, S = 256 MiB (tests/sim/sim.h
   has the same links; to the right what goes over each in each direction):

     GPUs   all-reduce   one sum after another   broadcast   from one
        2      1.06 ms                 2.3 ms       0.77 ms    0.77 ms     256 MiB
        4      1.42 ms                 4.3 ms       0.88 ms    2.30 ms     384 MiB
        8      1.61 ms                 8.3 ms       0.99 ms    5.37 ms     448 MiB              */

enum { DP__CUDA_LOBBY_BYTES = 4 << 20 };  /* of each other rank */
enum { DP__CUDA_SLICE_LEAST = 32 << 10 }; /* smaller ones cost more in calls than they save */
enum { DP__CUDA_LINK_LEAST = 512 << 10, DP__CUDA_LINK_PIECES = 32 }; /* of a broadcast */

typedef struct dp__cuda_rank {
    dp__cuda_dev *dev;
    cudaEvent_t mark;
    int lead;    /* the first rank on the same GPU */
    char *lobby; /* DP__CUDA_LOBBY_BYTES per rank; NULL if all are on one GPU */
} dp__cuda_rank;

typedef struct dp__cuda_comm {
    dp_comm base;
    int count, gpu_count;
    bool captured; /* the collective that runs */
    dp__cuda_rank ranks[DP__CUDA_OPERANDS];
} dp__cuda_comm;
_Static_assert(offsetof(dp__cuda_comm, base) == 0, "a dp_comm is the head of its communicator");

static dp__cuda_comm *dp__cuda_comm_of(dp_comm *comm)
{
    return (dp__cuda_comm *)comm;
}

static bool dp__cuda_coll_fits(const dp_comm_config *config)
{
    bool fits = config->bootstrap == NULL && config->local_count <= DP__CUDA_OPERANDS;
    for (int i = 0; i < config->local_count; i++)
        fits = fits && dp__cuda_is_open(config->local[i]);
    return fits;
}

static void dp__cuda_coll_close(dp_comm *comm)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    for (int i = 0; i < own->count; i++) {
        dp__cuda_rank *rank = &own->ranks[i];
        if (rank->mark != NULL && dp__cuda_enter(rank->dev->gpu) == DP_OK)
            (void)dp__cuda_leave(rank->dev->gpu, DP_OK, "cudaEventDestroy",
                                 dp__cuda.cudaEventDestroy(rank->mark));
        if (rank->lobby != NULL)
            dp__cuda_free(&rank->dev->base, rank->lobby, 0);
    }
    comm->host->free(comm->host, own);
}

static dp_status dp__cuda_rank_open(dp__cuda_comm *comm, int i)
{
    dp__cuda_rank *rank = &comm->ranks[i];
    const dp__cuda_gpu *gpu = rank->dev->gpu;
    void *lobby = NULL;
    DP_TRY(dp__cuda_enter(gpu));
    DP_TRY(dp__cuda_leave(gpu, dp__cuda_native_event(gpu->ordinal, &rank->mark), "", cudaSuccess));
    if (comm->gpu_count > 1)
        DP_TRY(
            dp__cuda_alloc(&rank->dev->base, (size_t)comm->count * DP__CUDA_LOBBY_BYTES, &lobby));
    rank->lobby = lobby;
    return DP_OK;
}

static dp_status dp__cuda_coll_open(const dp_host *host, const dp_comm_config *config,
                                    dp_comm **out)
{
    dp__cuda_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp__cuda_comm));
    dp_status status = DP_OK;
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cuda: no memory on the host");
    *comm = (dp__cuda_comm){.base = {dp_cuda_coll(), host}, .count = config->local_count};
    for (int i = 0; i < comm->count; i++) {
        comm->ranks[i].dev = dp__cuda_dev_of(config->local[i]);
        while (comm->ranks[comm->ranks[i].lead].dev->gpu != comm->ranks[i].dev->gpu)
            comm->ranks[i].lead++;
        comm->gpu_count += comm->ranks[i].lead == i;
    }
    for (int i = 0; i < comm->count && status == DP_OK; i++)
        status = dp__cuda_rank_open(comm, i);
    if (status != DP_OK) {
        dp__cuda_coll_close(&comm->base);
        return status;
    }
    *out = &comm->base;
    return DP_OK;
}

/* ---- order of streams ------------------------------------------------------------------------ */

static dp_status dp__cuda_mark(const dp__cuda_rank *rank, const dp_part *part)
{
    return dp__cuda_check(
        "cudaEventRecord", rank->dev->gpu->ordinal,
        dp__cuda.cudaEventRecord(rank->mark, dp__cuda_stream_of(part->stream)->native));
}

static dp_status dp__cuda_heed(const dp__cuda_rank *rank, const dp_part *part,
                               const dp__cuda_rank *other)
{
    return dp__cuda_check(
        "cudaStreamWaitEvent", rank->dev->gpu->ordinal,
        dp__cuda.cudaStreamWaitEvent(dp__cuda_stream_of(part->stream)->native, other->mark, 0));
}

/* The hub's next work comes after what all have done. */
static dp_status dp__cuda_fan_in(dp__cuda_comm *comm, const dp_part *local, int hub)
{
    for (int i = 0; i < comm->count; i++)
        if (i != hub) {
            DP_TRY(dp__cuda_mark(&comm->ranks[i], &local[i]));
            DP_TRY(dp__cuda_heed(&comm->ranks[hub], &local[hub], &comm->ranks[i]));
        }
    return DP_OK;
}

/* The next work of all comes after what the hub has done. */
static dp_status dp__cuda_fan_out(dp__cuda_comm *comm, const dp_part *local, int hub)
{
    DP_TRY(dp__cuda_mark(&comm->ranks[hub], &local[hub]));
    for (int i = 0; i < comm->count; i++)
        if (i != hub)
            DP_TRY(dp__cuda_heed(&comm->ranks[i], &local[i], &comm->ranks[hub]));
    return DP_OK;
}

static dp_status dp__cuda_meet(dp__cuda_comm *comm, const dp_part *local)
{
    DP_TRY(dp__cuda_fan_in(comm, local, 0));
    return dp__cuda_fan_out(comm, local, 0);
}

/* A stream outside a capture cannot be waited for inside: the first that is captured takes all
   others in. */
static dp_status dp__cuda_fork(dp__cuda_comm *comm, const dp_part *local)
{
    bool captured[DP__CUDA_OPERANDS];
    int origin = comm->count;
    for (int i = comm->count; i-- > 0;) {
        DP_TRY(dp__cuda_captures(local[i].stream, &captured[i]));
        origin = captured[i] ? i : origin;
    }
    comm->captured = origin < comm->count;
    if (!comm->captured)
        return DP_OK;
    DP_TRY(dp__cuda_mark(&comm->ranks[origin], &local[origin]));
    for (int i = 0; i < comm->count; i++)
        if (!captured[i])
            DP_TRY(dp__cuda_heed(&comm->ranks[i], &local[i], &comm->ranks[origin]));
    return DP_OK;
}

/* Between begin and end a collective has a context; launches enter that of their own GPU. */
static dp_status dp__cuda_coll_begin(dp__cuda_comm *comm, const dp_part *local)
{
    const dp__cuda_gpu *gpu = comm->ranks[0].dev->gpu;
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_fork(comm, local);
    return status == DP_OK ? DP_OK : dp__cuda_leave(gpu, status, "", cudaSuccess);
}

/* Whoever began a capture can end it only when all that were taken in have come back, also from a
   collective that failed. */
static dp_status dp__cuda_coll_end(dp__cuda_comm *comm, const dp_part *local, dp_status status)
{
    if (comm->captured) {
        dp_status joined = dp__cuda_meet(comm, local);
        status = status != DP_OK ? status : joined;
    }
    return dp__cuda_leave(comm->ranks[0].dev->gpu, status, "", cudaSuccess);
}

/* ==== >>adding ===================================================================================
   The collectives that add up.                                                                  */

typedef struct dp__cuda_sum { /* of every rank's send */
    dp__cuda_comm *comm;
    const dp_part *local;
    size_t size; /* bytes per element */
    dp_dtype dtype;
    dp_op op;
    double scale;
} dp__cuda_sum;

typedef struct dp__cuda_slice { /* elements from begin on, before end, and who adds them up */
    size_t begin, end;
    int owner;
} dp__cuda_slice;

static bool dp__cuda_near(const dp__cuda_comm *comm, int a, int b)
{
    return comm->ranks[a].lead == comm->ranks[b].lead;
}

/* One piece, of no more than a lobby, on one rank's stream, into `out`. */
static dp_status dp__cuda_sum_piece(const dp__cuda_sum *sum, int rank, size_t first, size_t count,
                                    void *const *out, size_t out_count)
{
    const void *in[DP__CUDA_OPERANDS];
    const dp__cuda_comm *comm = sum->comm;
    dp_stream *stream = sum->local[rank].stream;
    dp_kernel_args args = {.kernel = DP_KERNEL_REDUCE,
                           .op = sum->op == DP_OP_MEAN ? DP_OP_SUM : sum->op,
                           .dtype = sum->dtype,
                           .in_dtype = sum->dtype,
                           .count = count,
                           .out = out,
                           .in = in,
                           .out_count = out_count,
                           .in_count = (size_t)comm->count,
                           .alpha = sum->scale,
                           .beta = sum->op == DP_OP_MEAN ? comm->count : 1};
    for (int k = 0; k < comm->count; k++) {
        int i = (rank + k) % comm->count; /* not all from the same one at the same time */
        in[i] = (const char *)sum->local[i].send + first * sum->size;
        if (dp__cuda_near(comm, i, rank))
            continue;
        char *lobby = comm->ranks[rank].lobby + (size_t)i * DP__CUDA_LOBBY_BYTES;
        DP_TRY(
            dp__cuda_peer_move(stream, lobby, &comm->ranks[i].dev->base, in[i], count * sum->size));
        in[i] = lobby;
    }
    return dp__cuda_kernel(stream, &args);
}

/* Elements begin to end of the sends, to the same place of every `out`. */
static dp_status dp__cuda_sum_up(const dp__cuda_sum *sum, const dp__cuda_slice *slice,
                                 void *const *out, size_t out_count)
{
    const dp__cuda_gpu *gpu = sum->comm->ranks[slice->owner].dev->gpu;
    size_t most = sum->comm->gpu_count > 1 ? DP__CUDA_LOBBY_BYTES / sum->size : SIZE_MAX;
    dp_status status = DP_OK;
    void *at[DP__CUDA_OPERANDS];
    DP_TRY(dp__cuda_enter(gpu));
    for (size_t first = slice->begin, count = 0; first < slice->end && status == DP_OK;
         first += count) {
        count = slice->end - first < most ? slice->end - first : most;
        for (size_t i = 0; i < out_count; i++)
            at[i] = (char *)out[i] + (first - slice->begin) * sum->size;
        status = dp__cuda_sum_piece(sum, slice->owner, first, count, at, out_count);
    }
    return dp__cuda_leave(gpu, status, "", cudaSuccess);
}

/* The first rank on the same GPU that wants the result; -1: none does. */
static int dp__cuda_taker(const dp__cuda_sum *sum, int rank)
{
    for (int i = sum->comm->ranks[rank].lead; i < sum->comm->count; i++)
        if (dp__cuda_near(sum->comm, i, rank) && sum->local[i].recv != NULL)
            return i;
    return -1;
}

/* A slice for each GPU that wants the result, or for as many as are worth it. */
static int dp__cuda_cut_slices(const dp__cuda_sum *sum, size_t count, dp__cuda_slice *out)
{
    size_t least = DP__CUDA_SLICE_LEAST / sum->size, takers = 0, each = 0;
    int slices = 0;
    for (int i = 0; i < sum->comm->count; i++)
        takers += dp__cuda_taker(sum, i) == i;
    if (takers > 0)
        each = ((count + takers - 1) / takers + 63) / 64 * 64;
    each = each > least ? each : least;
    for (int i = 0; i < sum->comm->count; i++) {
        size_t begin = (size_t)slices * each;
        if (dp__cuda_taker(sum, i) == i && begin < count)
            out[slices++] = (dp__cuda_slice){
                .begin = begin, .end = count - begin > each ? begin + each : count, .owner = i};
    }
    return slices;
}

/* The owner adds up for all ranks on its GPU. */
static dp_status dp__cuda_sum_slice(const dp__cuda_sum *sum, const dp__cuda_slice *slice)
{
    dp__cuda_comm *comm = sum->comm;
    void *out[DP__CUDA_OPERANDS];
    size_t out_count = 0;
    for (int i = slice->owner; i < comm->count; i++)
        if (dp__cuda_near(comm, i, slice->owner) && sum->local[i].recv != NULL)
            out[out_count++] = (char *)sum->local[i].recv + slice->begin * sum->size;
    DP_TRY(dp__cuda_sum_up(sum, slice, out, out_count));
    return dp__cuda_mark(&comm->ranks[slice->owner], &sum->local[slice->owner]);
}

/* The sums that a rank's GPU did not make: from their owners, or from the rank on the same GPU that
   has fetched them. */
static dp_status dp__cuda_fetch_slices(const dp__cuda_sum *sum, int rank,
                                       const dp__cuda_slice *slices, int count)
{
    const dp__cuda_comm *comm = sum->comm;
    const dp_part *part = &sum->local[rank];
    int taker = dp__cuda_taker(sum, rank);
    if (taker != rank)
        DP_TRY(dp__cuda_heed(&comm->ranks[rank], part, &comm->ranks[taker]));
    for (int k = 0; k < count; k++) {
        const dp__cuda_slice *slice = &slices[(rank + k) % count];
        int from = taker == rank ? slice->owner : taker;
        size_t at = slice->begin * sum->size;
        if (dp__cuda_near(comm, slice->owner, rank))
            continue;
        if (taker == rank)
            DP_TRY(dp__cuda_heed(&comm->ranks[rank], part, &comm->ranks[from]));
        DP_TRY(dp__cuda_peer_move(
            part->stream, (char *)part->recv + at, &comm->ranks[from].dev->base,
            (const char *)sum->local[from].recv + at, (slice->end - slice->begin) * sum->size));
    }
    return DP_OK;
}

/* Among several GPUs. */
static dp_status dp__cuda_reduce_slices(const dp__cuda_sum *sum, size_t count)
{
    dp__cuda_comm *comm = sum->comm;
    dp__cuda_slice slices[DP__CUDA_OPERANDS];
    int slice_count = dp__cuda_cut_slices(sum, count, slices);
    DP_TRY(dp__cuda_meet(comm, sum->local));
    for (int i = 0; i < slice_count; i++)
        DP_TRY(dp__cuda_sum_slice(sum, &slices[i]));
    for (int i = 0; i < comm->count; i++)
        if (dp__cuda_taker(sum, i) == i)
            DP_TRY(dp__cuda_fetch_slices(sum, i, slices, slice_count));
    for (int i = 0; i < comm->count; i++)
        if (dp__cuda_taker(sum, i) == i)
            DP_TRY(dp__cuda_mark(&comm->ranks[i], &sum->local[i]));
    for (int i = 0; i < comm->count; i++)
        if (dp__cuda_taker(sum, i) != i && sum->local[i].recv != NULL)
            DP_TRY(dp__cuda_fetch_slices(sum, i, slices, slice_count));
    return dp__cuda_meet(comm, sum->local);
}

/* On one GPU the first rank's stream does it all. */
static dp_status dp__cuda_reduce_here(const dp__cuda_sum *sum, size_t count)
{
    const dp__cuda_slice whole = {.end = count};
    void *out[DP__CUDA_OPERANDS];
    size_t out_count = 0;
    for (int i = 0; i < sum->comm->count; i++)
        if (sum->local[i].recv != NULL)
            out[out_count++] = sum->local[i].recv;
    DP_TRY(dp__cuda_fan_in(sum->comm, sum->local, 0));
    if (out_count > 0)
        DP_TRY(dp__cuda_sum_up(sum, &whole, out, out_count));
    return dp__cuda_fan_out(sum->comm, sum->local, 0);
}

static dp_status dp__cuda_all_reduce(dp_comm *comm, const dp_part *local, size_t count,
                                     dp_dtype dtype, dp_op op, double scale)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    dp__cuda_sum sum = {.comm = own,
                        .local = local,
                        .size = dp_dtype_bytes(dtype),
                        .dtype = dtype,
                        .op = op,
                        .scale = scale};
    DP_TRY(dp__cuda_coll_begin(own, local));
    return dp__cuda_coll_end(own, local,
                             own->gpu_count == 1 ? dp__cuda_reduce_here(&sum, count)
                                                 : dp__cuda_reduce_slices(&sum, count));
}

static dp_status dp__cuda_scatter_sums(const dp__cuda_sum *sum, size_t count_each)
{
    DP_TRY(dp__cuda_meet(sum->comm, sum->local));
    for (int i = 0; i < sum->comm->count; i++) {
        size_t begin = (size_t)i * count_each;
        const dp__cuda_slice slice = {.begin = begin, .end = begin + count_each, .owner = i};
        DP_TRY(dp__cuda_sum_up(sum, &slice, &sum->local[i].recv, 1));
    }
    return dp__cuda_meet(sum->comm, sum->local);
}

static dp_status dp__cuda_reduce_scatter(dp_comm *comm, const dp_part *local, size_t count_each,
                                         dp_dtype dtype, dp_op op, double scale)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    dp__cuda_sum sum = {.comm = own,
                        .local = local,
                        .size = dp_dtype_bytes(dtype),
                        .dtype = dtype,
                        .op = op,
                        .scale = scale};
    DP_TRY(dp__cuda_coll_begin(own, local));
    return dp__cuda_coll_end(own, local, dp__cuda_scatter_sums(&sum, count_each));
}

/* ==== >>spreading ================================================================================
   The collectives that only copy, and the table.                                                */

typedef struct dp__cuda_route { /* who reads whom in a broadcast, those who are read first */
    int order[DP__CUDA_OPERANDS];
    int from[DP__CUDA_OPERANDS]; /* by rank */
    bool is_read[DP__CUDA_OPERANDS];
    size_t bytes, piece;
} dp__cuda_route;

/* What is small goes from the root to everybody. Else the first rank of each GPU reads the GPU
   before, and all others of a GPU read that rank. */
static void dp__cuda_route_plan(const dp__cuda_comm *comm, int root, size_t bytes,
                                dp__cuda_route *out)
{
    bool chain = comm->gpu_count > 2 && bytes > DP__CUDA_LINK_LEAST;
    int last = root, place = 0, heads[DP__CUDA_OPERANDS];
    size_t piece = bytes / DP__CUDA_LINK_PIECES;
    piece = piece > DP__CUDA_LINK_LEAST ? piece / 512 * 512 : DP__CUDA_LINK_LEAST;
    *out = (dp__cuda_route){.bytes = bytes, .piece = chain ? piece : bytes};
    for (int i = 0; i < comm->count; i++)
        heads[i] = dp__cuda_near(comm, i, root) ? root : comm->ranks[i].lead;
    out->order[place++] = out->from[root] = root;
    for (int i = 0; i < comm->count; i++) /* heads of the other GPUs */
        if (heads[i] == i && i != root) {
            out->order[place++] = i;
            out->from[i] = chain ? last : root;
            last = i;
        }
    for (int i = 0; i < comm->count; i++)
        if (heads[i] != i) {
            out->order[place++] = i;
            out->from[i] = chain ? heads[i] : root;
        }
    for (int i = 0; i < comm->count; i++)
        out->is_read[out->from[i]] = true;
}

/* One rank's copy of one piece; its own send, if it is the root and not in place. */
static dp_status dp__cuda_route_piece(dp__cuda_comm *comm, const dp_part *local,
                                      const dp__cuda_route *route, int rank, size_t at)
{
    int from = route->from[rank], root = route->order[0];
    size_t bytes = route->bytes - at < route->piece ? route->bytes - at : route->piece;
    const char *src = from == root ? local[from].send : local[from].recv;
    if (rank != root && (from != root || at == 0))
        DP_TRY(dp__cuda_heed(&comm->ranks[rank], &local[rank], &comm->ranks[from]));
    if (local[rank].recv != src)
        DP_TRY(dp__cuda_peer_move(local[rank].stream, (char *)local[rank].recv + at,
                                  &comm->ranks[from].dev->base, src + at, bytes));
    return route->is_read[rank] && rank != root ? dp__cuda_mark(&comm->ranks[rank], &local[rank])
                                                : DP_OK;
}

/* A rank that was read goes on after its readers. */
static dp_status dp__cuda_route_run(dp__cuda_comm *comm, const dp_part *local,
                                    const dp__cuda_route *route)
{
    int root = route->order[0];
    DP_TRY(dp__cuda_mark(&comm->ranks[root], &local[root]));
    for (size_t at = 0; at < route->bytes; at += route->piece)
        for (int i = 0; i < comm->count; i++)
            DP_TRY(dp__cuda_route_piece(comm, local, route, route->order[i], at));
    for (int i = 0; i < comm->count; i++) {
        const dp__cuda_rank *from = &comm->ranks[route->from[i]];
        if (i == root)
            continue;
        DP_TRY(dp__cuda_mark(&comm->ranks[i], &local[i]));
        DP_TRY(dp__cuda_heed(from, &local[route->from[i]], &comm->ranks[i]));
    }
    return DP_OK;
}

static dp_status dp__cuda_broadcast(dp_comm *comm, const dp_part *local, size_t count,
                                    dp_dtype dtype, int root)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    dp__cuda_route route;
    dp__cuda_route_plan(own, root, count * dp_dtype_bytes(dtype), &route);
    DP_TRY(dp__cuda_coll_begin(own, local));
    return dp__cuda_coll_end(own, local, dp__cuda_route_run(own, local, &route));
}

/* Every rank gets block `from_own ? i : 0` of each rank's send, one after another. */
static dp_status dp__cuda_fetch_blocks(dp__cuda_comm *comm, const dp_part *local, size_t bytes,
                                       bool from_own)
{
    DP_TRY(dp__cuda_meet(comm, local));
    for (int i = 0; i < comm->count; i++)
        for (int k = 0; k < comm->count; k++) {
            int from = (i + k) % comm->count; /* not all from the same one at the same time */
            char *to = (char *)local[i].recv + (size_t)from * bytes;
            const char *send = (const char *)local[from].send + (from_own ? (size_t)i * bytes : 0);
            if (to != send)
                DP_TRY(dp__cuda_peer_move(local[i].stream, to, &comm->ranks[from].dev->base, send,
                                          bytes));
        }
    return dp__cuda_meet(comm, local);
}

static dp_status dp__cuda_fetch(dp_comm *comm, const dp_part *local, size_t bytes, bool from_own)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    DP_TRY(dp__cuda_coll_begin(own, local));
    return dp__cuda_coll_end(own, local, dp__cuda_fetch_blocks(own, local, bytes, from_own));
}

static dp_status dp__cuda_all_gather(dp_comm *comm, const dp_part *local, size_t count_each,
                                     dp_dtype dtype)
{
    return dp__cuda_fetch(comm, local, count_each * dp_dtype_bytes(dtype), false);
}

static dp_status dp__cuda_all_to_all(dp_comm *comm, const dp_part *local, size_t count_each,
                                     dp_dtype dtype)
{
    return dp__cuda_fetch(comm, local, count_each * dp_dtype_bytes(dtype), true);
}

DP_API const dp_coll_ops *dp_cuda_coll(void)
{
    static const dp_coll_ops ops = {.size = sizeof ops,
                                    .name = "cuda",
                                    .fits = dp__cuda_coll_fits,
                                    .open = dp__cuda_coll_open,
                                    .close = dp__cuda_coll_close,
                                    .all_reduce = dp__cuda_all_reduce,
                                    .broadcast = dp__cuda_broadcast,
                                    .all_gather = dp__cuda_all_gather,
                                    .reduce_scatter = dp__cuda_reduce_scatter,
                                    .all_to_all = dp__cuda_all_to_all};
    return &ops;
}

static const dp_coll_ops *(*dp__backend_cuda_coll)(void) = dp_cuda_coll;
#endif /* !DP_CUDA_TEXT_AS_C */
#endif /* DP_IMPLEMENTATION && !DP_CUDA_IMPLEMENTED */

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
