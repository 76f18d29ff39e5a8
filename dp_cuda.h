/* dp_cuda.h - v0.2.0 - NVIDIA GPUs as devices of dp.h - MIT licence

   Include it instead of dp.h, or after; or define DP_USE_CUDA, and dp.h includes it. Link with
   -lcudart -lnvrtc; or define DP_DYNAMIC_LOAD together with DP_IMPLEMENTATION, and the libraries
   are loaded when a context opens: one binary for machines with and without them. Any C11 compiler
   will do: kernels are compiled when a device opens, for that device. CUDA 12.8 or newer.

   On an H200 (CUDA 13.0) all tests for one GPU pass, and compute-sanitizer finds nothing. Several
   GPUs are only simulated (make sim; make ptx runs the kernels' PTX). make gpu-test: on yours.

   Without a driver or a GPU, the next table of dp_config.backends is used. The same happens, with a
   warning, if there are GPUs that cannot be used: the driver is too old or broken, or the libraries
   belong to CUDA 12 and 13.

   A device opens when its kernels are compiled, which takes a second. Compiled kernels are kept in
   $XDG_CACHE_HOME/dp.h, or ~/.cache/dp.h, unless $DP_CACHE = off. With $CUDA_MODULE_LOADING = EAGER
   and GPUs of several architectures, the driver compiles them at each start for all GPUs.

   GPUs of a process copy directly from each other if a check shows that the bytes arrive, else
   through the host ($DP_PEERS = off: always). A GPU that has faulted is lost to the process: no
   context opens it again (DP_ERR_NO_DEVICE).

   The library may be called while any thread captures streams, in any mode. On captured streams,
   calls that only enqueue become part of the graph, collectives among GPUs too. Calls that wait
   fail with DP_ERR_STATE: dp_wait, dp_read, copies of memory that is not pinned, copies from GPU to
   GPU through the host, and the first copy of a pair. What CUDA refuses in a capture breaks the
   capture, not the context. Memory allocated in a capture must live as long as the graph, and so
   must the communicator: after dp_recover, capture again. Sums of a graph may not run beside other
   sums of the context.

   CONTENTS (search for the tag)
     >>native       streams and devices as CUDA knows them
     >>text         kernels: one text, compiled by NVRTC and, in tests, as C
     >>moves        those of them that copy, fill, convert
     >>sums         those that add up
     >>steps        what optimizers do, sums of channels
     >>surface      all that is called of CUDA, and how it is found
     >>compile      kernels for one architecture
     >>kept         compiled kernels on disk
     >>gpus         physical devices: context, kernels
     >>memory       slabs
     >>staging      pageable memory goes through a ring of pinned slots
     >>grid         blocks of a launch, packs and dims of its operands
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

#if !defined(DP_CUDA_H) && !defined(DP__REFUSED)
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
   here, when no context uses it any more and its work is done. It has to be created on that GPU,
   after cudaSetDevice. A default stream (NULL, cudaStreamLegacy, cudaStreamPerThread), which is
   another one in each context or thread, is refused: order it and dp_cuda_stream by events. */
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
   The kernels. Each generator below is source for NVRTC, and C for tests, which give CUDA's words a
   meaning: nothing in it is CUDA except what these macros stand for. A kernel gets one
   dp__cuda_params. Results do not depend on the number of blocks: sums are made in chunks whose
   size depends only on the count. NVRTC is told not to contract.

   All of them wait for memory. What is read in a second has to be on its way for as long as a load
   takes (Little's law): at 600 ns, a multiprocessor of an H100 (3.35 TB/s for 132 of them) needs 15
   KB in flight, one of an H200 (4.8 TB/s) 22 KB. So a thread moves packs of 16 bytes, and several
   of them are on their way before the first is used. In KB:
     reduce_f32 128, reduce_f64 96, reduce_half 80, reduce_bool 96
             four inputs a round, of two inputs half as much; products go element by element
     reduce_whole 48
             four elements of 8 bytes, of fewer bytes in proportion
     axpby_f32 96, axpby_f64 80, axpby_half 64
             two packs of each input
     cast 80
             four packs of f32, of halves 40; of other dtypes four elements: 5 KB a byte that they
             have
     stats_f32 96, stats_half 48, stats_f64 160, total 160
     channels_f32 64, channels_half 32, channels_f64 128
             sixteen elements a lane
     copy 64
             eight elements, of 16 bytes four; of 4 bytes 32, of 2 16, of 1 8; pads as well
     sgd_f32 48, sgd_f64 72, adamw_f32 64, adamw_f64 64
             one pack of each operand; sgd without momentum two thirds
   This is what a thread loads before it waits, times the threads that the registers on sm_90 leave
   room for. tests/compile/sass.sh counts both, and compares.

   Packs are for operands that all begin at a multiple of 16; what is left of them, and all of
   others, goes element by element, with the same operations in the same order.                  */

enum { DP__CUDA_OPERANDS = 64, DP__CUDA_LANES = 256, DP__CUDA_CHUNKS = 4096 };

/* It gets no more registers than so many blocks of it have on a multiprocessor. */
#define DP__CUDA_KERNEL_OF(name, params, blocks)                                                   \
    dp_global(blocks) void dp_cuda_##name(dp_const struct params p)
#define DP__CUDA_KERNEL(name) DP__CUDA_KERNEL_OF(name, dp__cuda_params, 4)
#define DP__CUDA_DEVICE       dp_device
#define DP__CUDA_SHARED       dp_shared
#define DP__CUDA_SYNC         __syncthreads();
#define DP__CUDA_SQRTF        sqrtf
#define DP__CUDA_SQRT         sqrt
#define DP__CUDA_ROLLED       dp_rolled
#define DP__CUDA_ALIGNED      alignas
#define DP__CUDA_FIRST        (blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x)
#define DP__CUDA_STEP         (gridDim.x * (unsigned long long)blockDim.x)
#define DP__CUDA_LANE         threadIdx.x
#define DP__CUDA_BLOCK        blockIdx.x
#define DP__CUDA_BLOCK_STEP   gridDim.x

/* clang-format off */
#define DP__CUDA_PARAMS                                                                            \
    struct dp__cuda_params {                                                                       \
        const void *in[64];                                                                        \
        void *out[64];                                                                             \
        unsigned long long count;                                                                  \
        unsigned long long packs;                                                                  \
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
        unsigned magic[8];                                                                         \
        unsigned shift[8];                                                                         \
        unsigned in_count;                                                                         \
        unsigned out_count;                                                                        \
        int ndim;                                                                                  \
        int op;                                                                                    \
        int dtype;                                                                                 \
        int in_dtype;                                                                              \
        unsigned width;                                                                            \
        unsigned flags;                                                                            \
    };                                                                                             \
    struct dp__cuda_set {                                                                          \
        void *out[3];                                                                              \
        void *grad;                                                                                \
        unsigned long long count;                                                                  \
    };                                                                                             \
    struct dp__cuda_steps {                                                                        \
        struct dp__cuda_set sets[64];                                                              \
        unsigned first[64];                                                                        \
        double numbers[8];                                                                         \
        const double *gate;                                                                        \
        unsigned long long chunk;                                                                  \
        unsigned set_count;                                                                        \
        unsigned chunk_count;                                                                      \
        unsigned out_count;                                                                        \
        int dtype;                                                                                 \
        unsigned flags;                                                                            \
    };

/* `each` of them a thread in a round, DP__CUDA_STEP apart. */
#define DP__CUDA_FROM(begin, end, each)                                                            \
    DP__CUDA_ROLLED for (unsigned long long i = (begin) + DP__CUDA_FIRST; i < (end);               \
                         i += (each) * DP__CUDA_STEP)

#define DP__CUDA_EACH(i)                                                                           \
    for (unsigned long long i = DP__CUDA_FIRST; i < p.count; i += DP__CUDA_STEP)

/* Packs first, then what is left: fn_wide(&p, i, end) for pack i, fn_one for element i. */
#define DP__CUDA_EACH_PACK(fn, W, each)                                                            \
    DP__CUDA_FROM(0, p.packs, each) fn##_wide(&p, i, p.packs);                                     \
    DP__CUDA_FROM(p.packs * (W), p.count, each) fn##_one(&p, i, p.count);

/* dp_f32x4 and its like: elements that are loaded and stored together. */
#define DP__CUDA_PACK(name, T, W)                                                                  \
    struct dp_##name##x##W {                                                                       \
        DP__CUDA_ALIGNED(W * sizeof(T)) T at[W];                                                   \
    };
#define DP__CUDA_PACKS                                                                             \
    DP__CUDA_PACK(f32, float, 1) DP__CUDA_PACK(f32, float, 4)                                      \
    DP__CUDA_PACK(f64, double, 1) DP__CUDA_PACK(f64, double, 2)                                    \
    DP__CUDA_PACK(u16, unsigned short, 1) DP__CUDA_PACK(u16, unsigned short, 4)                    \
    DP__CUDA_PACK(u16, unsigned short, 8)                                                          \
    DP__CUDA_PACK(u32, unsigned, 1) DP__CUDA_PACK(u32, unsigned, 4)                                \
    DP__CUDA_PACK(u64, unsigned long long, 2)

#define DP__CUDA_BITS                                                                              \
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
    }

/* What GPUs have an instruction for: f16 and f64 from and to f32. All NaNs become the same one. */
#if defined(DP_CUDA_TEXT_AS_C) || defined(DP__HIP)
#define DP__CUDA_CONVERT                                                                           \
    DP__CUDA_DEVICE float dp_of_f16(unsigned short h)                                              \
    {                                                                                              \
        unsigned sign = (h & 0x8000u) << 16, u = (h & 0x7fffu) << 13, whole = u + 0x38000000u;     \
        if (u > 0x0f800000u)                                                                       \
            return dp_float_of(0x7fffffffu);                                                       \
        if (u < 0x00800000u)                                                                       \
            whole = dp_bits_of(dp_float_of(u + 0x38800000u) - dp_float_of(0x38800000u));           \
        else if (u == 0x0f800000u)                                                                 \
            whole = whole + 0x38000000u;                                                           \
        return dp_float_of(sign | whole);                                                          \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_f16_of(float number)                                         \
    {                                                                                              \
        unsigned bits = dp_bits_of(number), sign = bits & 0x80000000u, u = bits ^ sign;            \
        unsigned h = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;                          \
        if (u > 0x7f800000u)                                                                       \
            return 0x7fffu;                                                                        \
        if (u < 0x38800000u)                                                                       \
            h = dp_bits_of(dp_float_of(u) + 0.5f) - 0x3f000000u;                                   \
        else if (u >= 0x47800000u)                                                                 \
            h = 0x7c00u;                                                                           \
        return (unsigned short)(h | sign >> 16);                                                   \
    }                                                                                              \
    DP__CUDA_DEVICE double dp_of_f32(float number)                                                 \
    {                                                                                              \
        const union { unsigned long long u; double f; } nan = {0x7ff8000000000000u};               \
        return number != number ? nan.f : (double)number;                                          \
    }                                                                                              \
    DP__CUDA_DEVICE float dp_f32_of(double number)                                                 \
    {                                                                                              \
        return number != number ? dp_float_of(0x7fffffffu) : (float)number;                        \
    }
#else
#define DP__CUDA_CONVERT                                                                           \
    DP__CUDA_DEVICE float dp_of_f16(unsigned short h)                                              \
    {                                                                                              \
        float x;                                                                                   \
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));                                             \
        return x;                                                                                  \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_f16_of(float number)                                         \
    {                                                                                              \
        unsigned short h;                                                                          \
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(number));                                     \
        return h;                                                                                  \
    }                                                                                              \
    DP__CUDA_DEVICE double dp_of_f32(float number) { return number; }                              \
    DP__CUDA_DEVICE float dp_f32_of(double number) { return (float)number; }
#endif

#define DP__CUDA_HALVES                                                                            \
    DP__CUDA_DEVICE float dp_get_f16(unsigned short h)                                             \
    {                                                                                              \
        const unsigned nan = ((h & 0x8000u) << 16) | ((h & 0x7fffu) << 13) | 0x7fc00000u;          \
        const unsigned number = dp_bits_of(dp_of_f16(h));                                          \
        return dp_float_of((h & 0x7fffu) > 0x7c00u ? nan : number);                                \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_put_f16(float number)                                        \
    {                                                                                              \
        const unsigned bits = dp_bits_of(number), half = dp_f16_of(number);                        \
        const unsigned nan = ((bits >> 16) & 0x8000u) | 0x7e00u | ((bits >> 13) & 0x3ffu);         \
        return (unsigned short)(number != number ? nan : half);                                    \
    }                                                                                              \
    DP__CUDA_DEVICE float dp_get_bf16(unsigned short h)                                            \
    {                                                                                              \
        return dp_float_of((unsigned)h << 16);                                                     \
    }                                                                                              \
    DP__CUDA_DEVICE unsigned short dp_put_bf16(float number)                                       \
    {                                                                                              \
        const unsigned bits = dp_bits_of(number), nan = bits | 0x400000u;                          \
        const unsigned half = bits + 0x7fffu + ((bits >> 16) & 1u);                                \
        return (unsigned short)((number != number ? nan : half) >> 16);                            \
    }

/* A pack's W numbers as those that are computed with, and back. Which halves they are `dtype` says,
   since one kernel is for both. */
#define DP__CUDA_NUMBERS(T, A, W)                                                                  \
    DP__CUDA_DEVICE void dp_get_##T##x##W(A *out, const struct dp_##T##x##W *x, int dtype)         \
    {                                                                                              \
        (void)dtype;                                                                               \
        for (unsigned e = 0; e < W; e++)                                                           \
            out[e] = x->at[e];                                                                     \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_put_##T##x##W(struct dp_##T##x##W *out, const A *x, int dtype)         \
    {                                                                                              \
        (void)dtype;                                                                               \
        for (unsigned e = 0; e < W; e++)                                                           \
            out->at[e] = x[e];                                                                     \
    }
#define DP__CUDA_NUMBERS_OF_HALVES(W)                                                              \
    DP__CUDA_DEVICE void dp_get_u16x##W(float *out, const struct dp_u16x##W *x, int dtype)         \
    {                                                                                              \
        if (dtype == 2)                                                                            \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = dp_get_f16(x->at[e]);                                                     \
        else                                                                                       \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = dp_get_bf16(x->at[e]);                                                    \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_put_u16x##W(struct dp_u16x##W *out, const float *x, int dtype)         \
    {                                                                                              \
        if (dtype == 2)                                                                            \
            for (unsigned e = 0; e < W; e++)                                                       \
                out->at[e] = dp_put_f16(x[e]);                                                     \
        else                                                                                       \
            for (unsigned e = 0; e < W; e++)                                                       \
                out->at[e] = dp_put_bf16(x[e]);                                                    \
    }

/* For sums, in which one NaN is as good as another. */
#define DP__CUDA_BARE_HALVES(W)                                                                    \
    DP__CUDA_DEVICE void dp_bare_u16x##W(float *out, const struct dp_u16x##W *x, int dtype)        \
    {                                                                                              \
        if (dtype == 2)                                                                            \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = dp_of_f16(x->at[e]);                                                      \
        else                                                                                       \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = dp_get_bf16(x->at[e]);                                                    \
    }

/* op: 0 sum, 2 product, 3 min, 4 max. NaN wins in min and max. */
#define DP__CUDA_COMBINE(name, A)                                                                  \
    DP__CUDA_DEVICE A dp_combine_##name(int op, A v, A w)                                          \
    {                                                                                              \
        if (op == 0)                                                                               \
            return v + w;                                                                          \
        if (op == 2)                                                                               \
            return v * w;                                                                          \
        if (op == 3)                                                                               \
            return v < w || v != v ? v : w;                                                        \
        return v > w || v != v ? v : w;                                                            \
    }

/* In a binary tree: all of four inputs are loaded before the first is used, and what waits for the
   right half of its subtree is in `sums`, which 64 inputs fill. It is indexed by number, and so
   lies in memory: few have more than four inputs, and the registers are worth more. */
#define DP__CUDA_REDUCE_SPAN(fn, name, T, A, W)                                                    \
    DP__CUDA_DEVICE void fn(const struct dp__cuda_params *p, unsigned long long i,                 \
                            unsigned long long end)                                                \
    {                                                                                              \
        const A alpha = (A)p->alpha, beta = (A)p->beta;                                            \
        const unsigned count = p->in_count;                                                        \
        const int op = p->op;                                                                      \
        A sums[4][W], v[W] = {0}, w[W];                                                            \
        unsigned waiting = 0;                                                                      \
        struct dp_##T##x##W sum;                                                                   \
        (void)end;                                                                                 \
        DP__CUDA_ROLLED for (unsigned k = 0; k < count; k += 4) {                                  \
            struct dp_##T##x##W x[4] = {{{0}}};                                                    \
            unsigned half = k / 4;                                                                 \
            for (unsigned j = 0; j < 4; j++)                                                       \
                if (k + j < count)                                                                 \
                    x[j] = ((const struct dp_##T##x##W *)p->in[k + j])[i];                         \
            dp_get_##T##x##W(v, &x[0], p->dtype);                                                  \
            if (k + 1 < count) {                                                                   \
                dp_get_##T##x##W(w, &x[1], p->dtype);                                              \
                dp_join_##name##x##W(op, v, v, w);                                                 \
            }                                                                                      \
            if (k + 2 < count) {                                                                   \
                A right[W];                                                                        \
                dp_get_##T##x##W(w, &x[2], p->dtype);                                              \
                if (k + 3 < count) {                                                               \
                    dp_get_##T##x##W(right, &x[3], p->dtype);                                      \
                    dp_join_##name##x##W(op, w, w, right);                                         \
                }                                                                                  \
                dp_join_##name##x##W(op, v, v, w);                                                 \
            }                                                                                      \
            DP__CUDA_ROLLED for (; waiting > 0 && (half % 2 == 1 || k + 4 >= count); half /= 2)    \
                dp_join_##name##x##W(op, v, sums[--waiting], v);                                   \
            if (k + 4 < count) {                                                                   \
                for (unsigned e = 0; e < W; e++)                                                   \
                    sums[waiting][e] = v[e];                                                       \
                waiting++;                                                                         \
            }                                                                                      \
        }                                                                                          \
        if (p->alpha != 1 || p->beta != 1)                                                         \
            for (unsigned e = 0; e < W; e++)                                                       \
                v[e] = v[e] * alpha / beta;                                                        \
        dp_put_##T##x##W(&sum, v, p->dtype);                                                       \
        DP__CUDA_ROLLED for (unsigned k = 0; k < p->out_count; k++)                                \
            ((struct dp_##T##x##W *)p->out[k])[i] = sum;                                           \
    }
/* Packs are not for products, which are rare: each operation is there for each element of each
   operand, and takes its time to compile. */
#define DP__CUDA_JOIN(name, A, W)                                                                  \
    DP__CUDA_DEVICE void dp_join_##name##x1(int op, A *out, const A *v, const A *w)                \
    {                                                                                              \
        out[0] = dp_combine_##name(op, v[0], w[0]);                                                \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_join_##name##x##W(int op, A *out, const A *v, const A *w)              \
    {                                                                                              \
        if (op == 0)                                                                               \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = v[e] + w[e];                                                              \
        else                                                                                       \
            for (unsigned e = 0; e < W; e++)                                                       \
                out[e] = (op == 3 ? v[e] < w[e] : v[e] > w[e]) || v[e] != v[e] ? v[e] : w[e];      \
    }
#define DP__CUDA_REDUCE(name, T, A, W)                                                             \
    DP__CUDA_COMBINE(name, A)                                                                      \
    DP__CUDA_JOIN(name, A, W)                                                                      \
    DP__CUDA_REDUCE_SPAN(dp_reduce_##name##_wide, name, T, A, W)                                   \
    DP__CUDA_REDUCE_SPAN(dp_reduce_##name##_one, name, T, A, 1)                                    \
    DP__CUDA_KERNEL(reduce_##name)                                                                 \
    {                                                                                              \
        DP__CUDA_EACH_PACK(dp_reduce_##name, W, 1)                                                 \
    }

/* The bytes of a word that are not 0, as 1. */
#define DP__CUDA_TRUTHS                                                                            \
    DP__CUDA_DEVICE unsigned dp_truths(unsigned x)                                                 \
    {                                                                                              \
        return ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7) & 0x01010101u;                       \
    }

/* All of them, or any; behind the last input comes the first once more, which changes nothing. */
#define DP__CUDA_REDUCE_BOOL                                                                       \
    DP__CUDA_TRUTHS                                                                                \
    DP__CUDA_DEVICE void dp_reduce_bool_wide(const struct dp__cuda_params *p,                      \
                                             unsigned long long i, unsigned long long end)         \
    {                                                                                              \
        const unsigned all = p->op == 2 || p->op == 3;                                             \
        struct dp_u32x4 x[4], v;                                                                   \
        (void)end;                                                                                 \
        for (unsigned e = 0; e < 4; e++)                                                           \
            v.at[e] = all ? 0x01010101u : 0;                                                       \
        DP__CUDA_ROLLED for (unsigned k = 0; k < p->in_count; k += 4) {                            \
            for (unsigned j = 0; j < 4; j++)                                                       \
                x[j] = ((const struct dp_u32x4 *)p->in[k + j < p->in_count ? k + j : 0])[i];       \
            for (unsigned j = 0; j < 4; j++)                                                       \
                for (unsigned e = 0; e < 4; e++) {                                                 \
                    const unsigned t = dp_truths(x[j].at[e]);                                      \
                    v.at[e] = all ? v.at[e] & t : v.at[e] | t;                                     \
                }                                                                                  \
        }                                                                                          \
        DP__CUDA_ROLLED for (unsigned k = 0; k < p->out_count; k++)                                \
            ((struct dp_u32x4 *)p->out[k])[i] = v;                                                 \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_reduce_bool_one(const struct dp__cuda_params *p,                       \
                                            unsigned long long i, unsigned long long end)          \
    {                                                                                              \
        const unsigned all = p->op == 2 || p->op == 3;                                             \
        unsigned trues = 0;                                                                        \
        (void)end;                                                                                 \
        DP__CUDA_ROLLED for (unsigned k = 0; k < p->in_count; k++)                                 \
            trues += ((const unsigned char *)p->in[k])[i] != 0;                                    \
        const unsigned stored = all ? trues == p->in_count : trues > 0;                            \
        DP__CUDA_ROLLED for (unsigned k = 0; k < p->out_count; k++)                                \
            ((unsigned char *)p->out[k])[i] = (unsigned char)stored;                               \
    }                                                                                              \
    DP__CUDA_KERNEL(reduce_bool)                                                                   \
    {                                                                                              \
        DP__CUDA_EACH_PACK(dp_reduce_bool, 16, 1)                                                  \
    }

/* Two packs a round; behind the end the first once more, so that loads need no branch. */
#define DP__CUDA_AXPBY_SPAN(fn, T, A, W)                                                           \
    DP__CUDA_DEVICE void fn##_pack(const struct dp__cuda_params *p, unsigned long long i,          \
                                   const struct dp_##T##x##W *x, const struct dp_##T##x##W *y)     \
    {                                                                                              \
        const A alpha = (A)p->alpha, beta = (A)p->beta;                                            \
        A v[W], w[W];                                                                              \
        dp_get_##T##x##W(v, x, p->dtype);                                                          \
        dp_get_##T##x##W(w, y, p->dtype);                                                          \
        for (unsigned e = 0; e < W; e++) {                                                         \
            v[e] = alpha * v[e];                                                                   \
            w[e] = beta * w[e];                                                                    \
            v[e] = p->in_count > 1 ? v[e] + w[e] : v[e];                                           \
        }                                                                                          \
        struct dp_##T##x##W z;                                                                     \
        dp_put_##T##x##W(&z, v, p->dtype);                                                         \
        ((struct dp_##T##x##W *)p->out[0])[i] = z;                                                 \
    }                                                                                              \
    DP__CUDA_DEVICE void fn(const struct dp__cuda_params *p, unsigned long long i,                 \
                            unsigned long long end)                                                \
    {                                                                                              \
        const unsigned long long next = i + DP__CUDA_STEP, at[2] = {i, next < end ? next : i};     \
        struct dp_##T##x##W x[2], y[2];                                                            \
        for (unsigned u = 0; u < 2; u++)                                                           \
            x[u] = ((const struct dp_##T##x##W *)p->in[0])[at[u]];                                 \
        for (unsigned u = 0; u < 2; u++)                                                           \
            y[u] = ((const struct dp_##T##x##W *)p->in[p->in_count > 1])[at[u]];                   \
        fn##_pack(p, i, &x[0], &y[0]);                                                             \
        if (next < end)                                                                            \
            fn##_pack(p, next, &x[1], &y[1]);                                                      \
    }
#define DP__CUDA_AXPBY(name, T, A, W)                                                              \
    DP__CUDA_AXPBY_SPAN(dp_axpby_##name##_wide, T, A, W)                                           \
    DP__CUDA_AXPBY_SPAN(dp_axpby_##name##_one, T, A, 1)                                            \
    DP__CUDA_KERNEL(axpby_##name)                                                                  \
    {                                                                                              \
        DP__CUDA_EACH_PACK(dp_axpby_##name, W, 2)                                                  \
    }

/* clang-format on */

/* ==== >>moves ====================================================================================
   Kernels that change where numbers lie, or what they are, and those of integers.               */

/* clang-format off */
/* W numbers that are f32, or halves and computed as f32, as `dtype` says: where pack i is, and some
   packs, which are all on their way before the first is converted. */
#define DP__CUDA_ANY(W)                                                                            \
    DP__CUDA_DEVICE const void *dp_at_f32x##W(const void *in, unsigned long long i, int dtype)     \
    {                                                                                              \
        return (const char *)in + i * (dtype == 0 ? 4 * W : 2 * W);                                \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_load_f32x##W(const void *const *at, unsigned count, int dtype,         \
                                         struct dp_f32x##W *out)                                   \
    {                                                                                              \
        struct dp_u16x##W half[16];                                                                \
        if (dtype == 0) {                                                                          \
            for (unsigned u = 0; u < count; u++)                                                   \
                out[u] = *(const struct dp_f32x##W *)at[u];                                        \
            return;                                                                                \
        }                                                                                          \
        for (unsigned u = 0; u < count; u++)                                                       \
            half[u] = *(const struct dp_u16x##W *)at[u];                                           \
        for (unsigned u = 0; u < count; u++)                                                       \
            dp_get_u16x##W(out[u].at, &half[u], dtype);                                            \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_store_f32x##W(void *out, unsigned long long i, int dtype,              \
                                          struct dp_f32x##W x)                                     \
    {                                                                                              \
        struct dp_u16x##W half;                                                                    \
        if (dtype == 0)                                                                            \
            ((struct dp_f32x##W *)out)[i] = x;                                                     \
        else {                                                                                     \
            dp_put_u16x##W(&half, x.at, dtype);                                                    \
            ((struct dp_u16x##W *)out)[i] = half;                                                  \
        }                                                                                          \
    }

/* The bits of four elements, all on their way before one is used; and what they are as an integer
   of this dtype. */
#define DP__CUDA_TAKE                                                                              \
    DP__CUDA_DEVICE void dp_take(unsigned long long *out, const void *in, unsigned width,          \
                                 unsigned long long i, unsigned long long end)                     \
    {                                                                                              \
        unsigned long long at[4];                                                                  \
        for (unsigned u = 0; u < 4; u++)                                                           \
            at[u] = i + u * DP__CUDA_STEP < end ? i + u * DP__CUDA_STEP : i;                       \
        if (width == 4)                                                                            \
            for (unsigned u = 0; u < 4; u++)                                                       \
                out[u] = ((const unsigned *)in)[at[u]];                                            \
        else if (width == 8)                                                                       \
            for (unsigned u = 0; u < 4; u++)                                                       \
                out[u] = ((const unsigned long long *)in)[at[u]];                                  \
        else if (width == 2)                                                                       \
            for (unsigned u = 0; u < 4; u++)                                                       \
                out[u] = ((const unsigned short *)in)[at[u]];                                      \
        else                                                                                       \
            for (unsigned u = 0; u < 4; u++)                                                       \
                out[u] = ((const unsigned char *)in)[at[u]];                                       \
    }                                                                                              \
    DP__CUDA_DEVICE long long dp_whole_of(unsigned long long bits, int dtype)                      \
    {                                                                                              \
        if (dtype == 4)                                                                            \
            return (long long)bits;                                                                \
        if (dtype == 5)                                                                            \
            return (int)bits;                                                                      \
        if (dtype == 6)                                                                            \
            return (short)bits;                                                                    \
        return dtype == 7 ? (signed char)bits : (unsigned char)bits;                               \
    }

/* From any dtype to any other; the numbers are those of dp_dtype, `width` is the input's. */
#define DP__CUDA_CAST                                                                              \
    DP__CUDA_DEVICE float dp_short_of(unsigned long long bits, int dtype)                          \
    {                                                                                              \
        if (dtype == 0)                                                                            \
            return dp_float_of((unsigned)bits);                                                    \
        return dtype == 2 ? dp_get_f16((unsigned short)bits) : dp_get_bf16((unsigned short)bits);  \
    }                                                                                              \
    DP__CUDA_DEVICE long long dp_whole(double x)                                                   \
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
    DP__CUDA_DEVICE void dp_cast_one(const struct dp__cuda_params *p, unsigned long long i,        \
                                     unsigned long long bits)                                      \
    {                                                                                              \
        const int real = p->in_dtype < 4, full = p->in_dtype == 1;                                 \
        union { unsigned long long u; double f; } as;                                              \
        as.u = bits;                                                                               \
        const long long w = real ? 0 : dp_whole_of(bits, p->in_dtype);                             \
        const float f = full   ? dp_f32_of(as.f)                                                   \
                        : real ? dp_short_of(bits, p->in_dtype)                                    \
                               : (float)w;                                                         \
        const double x = full ? as.f : dp_of_f32(f);                                               \
        const long long v = real ? dp_whole(x) : w;                                                \
        if (p->dtype == 0)                                                                         \
            ((float *)p->out[0])[i] = f;                                                           \
        else if (p->dtype == 1)                                                                    \
            ((double *)p->out[0])[i] = real ? x : (double)w;                                       \
        else if (p->dtype == 2)                                                                    \
            ((unsigned short *)p->out[0])[i] = dp_put_f16(f);                                      \
        else if (p->dtype == 3)                                                                    \
            ((unsigned short *)p->out[0])[i] = dp_put_bf16(f);                                     \
        else if (p->dtype == 4)                                                                    \
            ((long long *)p->out[0])[i] = v;                                                       \
        else if (p->dtype == 5)                                                                    \
            ((int *)p->out[0])[i] = (int)dp_within(v, -2147483647LL - 1, 2147483647LL);            \
        else if (p->dtype == 6)                                                                    \
            ((short *)p->out[0])[i] = (short)dp_within(v, -32768, 32767);                          \
        else if (p->dtype == 7)                                                                    \
            ((signed char *)p->out[0])[i] = (signed char)dp_within(v, -128, 127);                  \
        else if (p->dtype == 8)                                                                    \
            ((unsigned char *)p->out[0])[i] = (unsigned char)dp_within(v, 0, 255);                 \
        else                                                                                       \
            ((unsigned char *)p->out[0])[i] = real ? x != 0 : w != 0;                              \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_cast_wide(const struct dp__cuda_params *p, unsigned long long i,       \
                                      unsigned long long end)                                      \
    {                                                                                              \
        struct dp_f32x4 x[4];                                                                      \
        const void *at[4];                                                                         \
        for (unsigned u = 0; u < 4; u++) {                                                         \
            const unsigned long long pack = i + u * DP__CUDA_STEP;                                 \
            at[u] = dp_at_f32x4(p->in[0], pack < end ? pack : i, p->in_dtype);                     \
        }                                                                                          \
        dp_load_f32x4(at, 4, p->in_dtype, x);                                                      \
        for (unsigned u = 0; u < 4; u++)                                                           \
            if (i + u * DP__CUDA_STEP < end)                                                       \
                dp_store_f32x4(p->out[0], i + u * DP__CUDA_STEP, p->dtype, x[u]);                  \
    }                                                                                              \
    DP__CUDA_KERNEL(cast)                                                                          \
    {                                                                                              \
        DP__CUDA_FROM(0, p.packs, 4) dp_cast_wide(&p, i, p.packs);                                 \
        DP__CUDA_FROM(p.packs * 4, p.count, 4)                                                     \
        {                                                                                          \
            unsigned long long x[4], at = i;                                                       \
            dp_take(x, p.in[0], p.width, i, p.count);                                              \
            DP__CUDA_ROLLED for (unsigned u = 0; u < 4 && at < p.count; u++) {                     \
                dp_cast_one(&p, at, x[0]);                                                         \
                at += DP__CUDA_STEP;                                                               \
                x[0] = x[1];                                                                       \
                x[1] = x[2];                                                                       \
                x[2] = x[3];                                                                       \
            }                                                                                      \
        }                                                                                          \
    }

/* Kernels that only move bytes: elements of `width` 1, 2, 4, 8 or 16 bytes. One kernel for all
   widths; the branch is the same for all threads. */
#define DP__CUDA_FILL                                                                              \
    DP__CUDA_DEVICE void dp_give(void *out, unsigned long long i, unsigned width,                  \
                                 unsigned long long x)                                             \
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
        const struct dp_u64x2 pack = {{p.fill, p.fill}};                                           \
        DP__CUDA_FROM(0, p.packs, 1)                                                               \
        {                                                                                          \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                ((struct dp_u64x2 *)p.out[k])[i] = pack;                                           \
        }                                                                                          \
        DP__CUDA_FROM(p.packs * (16 / p.width), p.count, 1)                                        \
        {                                                                                          \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                             \
                dp_give(p.out[k], i, p.width, p.fill);                                             \
        }                                                                                          \
    }

#define DP__CUDA_FILLED(T)                                                                         \
    DP__CUDA_DEVICE T dp_filled_##T(unsigned long long x) { return (T)x; }
#define DP__CUDA_COPY_TYPES                                                                        \
    typedef unsigned char dp_u8;                                                                   \
    typedef unsigned short dp_u16;                                                                 \
    typedef unsigned dp_u32;                                                                       \
    typedef unsigned long long dp_u64;                                                             \
    typedef struct dp_u64x2 dp_u128;                                                               \
    DP__CUDA_FILLED(dp_u8)                                                                         \
    DP__CUDA_FILLED(dp_u16)                                                                        \
    DP__CUDA_FILLED(dp_u32)                                                                        \
    DP__CUDA_FILLED(dp_u64)                                                                        \
    DP__CUDA_DEVICE dp_u128 dp_filled_dp_u128(unsigned long long x)                                \
    {                                                                                              \
        const dp_u128 pack = {{x, x}};                                                             \
        return pack;                                                                               \
    }

/* Eight elements a round, four of which are at their places in all dims before the first is loaded;
   N of them go through registers at a time. Places are found without divisions: n / shape[d] is
   (((n * magic) >> 32) + n) >> shift for n < 2^31. What is behind in_shape is `fill`: a copy has
   nothing there, a pad has. */
#define DP__CUDA_COPY_AS(T, N)                                                                     \
    DP__CUDA_DEVICE void dp_copy_##T(const struct dp__cuda_params *p, unsigned i, unsigned step)   \
    {                                                                                              \
        for (unsigned first = 0; first < 8; first += N) {                                          \
            T x[N];                                                                                \
            long long to[N];                                                                       \
            for (unsigned four = 0; four < N; four += 4) {                                         \
                long long from[4];                                                                 \
                const unsigned behind = dp_places(p, i, first + four, step, from, to + four);      \
                for (unsigned u = 0; u < 4; u++)                                                   \
                    x[four + u] = behind >> u & 1 ? dp_filled_##T(p->fill)                         \
                                                  : ((const T *)p->in[0])[from[u]];                \
            }                                                                                      \
            for (unsigned u = 0; u < N; u++)                                                       \
                if (i + (first + u) * step < (unsigned)p->count)                                   \
                    ((T *)p->out[0])[to[u]] = x[u];                                                \
        }                                                                                          \
    }
#define DP__CUDA_PLACES                                                                            \
    DP__CUDA_DEVICE unsigned dp_places(const struct dp__cuda_params *p, unsigned i,                \
                                       unsigned first, unsigned step, long long *from,             \
                                       long long *to)                                              \
    {                                                                                              \
        unsigned rest[4], behind = 0; /* a bit each */                                             \
        for (unsigned u = 0; u < 4; u++) {                                                         \
            const unsigned at = i + (first + u) * step;                                            \
            rest[u] = at < (unsigned)p->count ? at : i;                                            \
            from[u] = to[u] = 0;                                                                   \
        }                                                                                          \
        DP__CUDA_ROLLED for (int d = p->ndim - 1; d >= 0; d--)                                     \
            for (unsigned u = 0; u < 4; u++) {                                                     \
                const unsigned n = rest[u];                                                        \
                const unsigned high = (unsigned)((unsigned long long)n * p->magic[d] >> 32);       \
                rest[u] = d > 0 ? (high + n) >> p->shift[d] : 0;                                   \
                const unsigned at = n - rest[u] * (unsigned)p->shape[d];                           \
                from[u] += at * p->in_stride[d];                                                   \
                to[u] += at * p->out_stride[d];                                                    \
                behind |= at < p->in_shape[d] ? 0 : 1u << u;                                       \
            }                                                                                      \
        return behind;                                                                             \
    }
#define DP__CUDA_COPY                                                                              \
    DP__CUDA_KERNEL(copy)                                                                          \
    {                                                                                              \
        const unsigned end = (unsigned)p.count, step = (unsigned)DP__CUDA_STEP;                    \
        DP__CUDA_ROLLED for (unsigned i = (unsigned)DP__CUDA_FIRST; i < end; i += 8 * step) {      \
            if (p.width == 1)                                                                      \
                dp_copy_dp_u8(&p, i, step);                                                        \
            else if (p.width == 2)                                                                 \
                dp_copy_dp_u16(&p, i, step);                                                       \
            else if (p.width == 4)                                                                 \
                dp_copy_dp_u32(&p, i, step);                                                       \
            else if (p.width == 8)                                                                 \
                dp_copy_dp_u64(&p, i, step);                                                       \
            else                                                                                   \
                dp_copy_dp_u128(&p, i, step);                                                      \
        }                                                                                          \
    }

/* Integers wrap, in 64 bits and then in their own size; one kernel for all of them. */
#define DP__CUDA_REDUCE_WHOLE                                                                      \
    DP__CUDA_DEVICE long long dp_combine_whole(int op, long long v, long long w)                   \
    {                                                                                              \
        if (op == 0)                                                                               \
            return (long long)((unsigned long long)v + (unsigned long long)w);                     \
        if (op == 2)                                                                               \
            return (long long)((unsigned long long)v * (unsigned long long)w);                     \
        if (op == 3)                                                                               \
            return v < w ? v : w;                                                                  \
        return v > w ? v : w;                                                                      \
    }                                                                                              \
    DP__CUDA_KERNEL(reduce_whole)                                                                  \
    {                                                                                              \
        const long long beta = (long long)p.beta;                                                  \
        DP__CUDA_FROM(0, p.count, 4)                                                               \
        {                                                                                          \
            unsigned long long x[4], at = i;                                                       \
            long long v[4] = {0};                                                                  \
            DP__CUDA_ROLLED for (unsigned k = 0; k < p.in_count; k++) {                            \
                dp_take(x, p.in[k], p.width, i, p.count);                                          \
                for (unsigned u = 0; u < 4; u++) {                                                 \
                    const long long w = dp_whole_of(x[u], p.dtype);                                \
                    v[u] = k == 0 ? w : dp_combine_whole(p.op, v[u], w);                           \
                }                                                                                  \
            }                                                                                      \
            DP__CUDA_ROLLED for (unsigned u = 0; u < 4 && at < p.count; u++) {                     \
                long long whole = dp_whole_of((unsigned long long)v[0], p.dtype);                  \
                if (beta != 1)                                                                     \
                    whole = whole / beta;                                                          \
                DP__CUDA_ROLLED for (unsigned k = 0; k < p.out_count; k++)                         \
                    dp_give(p.out[k], at, p.width, (unsigned long long)whole);                     \
                at += DP__CUDA_STEP;                                                               \
                v[0] = v[1];                                                                       \
                v[1] = v[2];                                                                       \
                v[2] = v[3];                                                                       \
            }                                                                                      \
        }                                                                                          \
    }

/* ==== >>sums ====================================================================================
   Sums of two numbers per element, chunk by chunk, then over the chunks: lanes of a block in a
   tree. The same chunks on any GPU give the same bits. A chunk is 4096 elements, more if there were
   more than 4096 chunks: a lane loads the 16 elements that are its part of them before it adds the
   first, packs of them 256 packs apart.

   A consumer card's multiprocessor does two f64 additions, products or conversions a clock, where
   it does 64 or 128 of f32. That many an element there are, with the tree of lanes, and so long
   they take, of the time that memory takes, on an RTX 4090, an RTX 3090 and a T4:
     stats_f32      0.31   12 %   26 %   20 %
     stats_half     0.31   24 %   53 %   39 %
     stats_f64      2.19   43 %   92 %   69 %
     total          1.19   23 %   50 %   37 %
     channels_f32   0.44   17 %   37 %   28 %
     channels_half  0.44   34 %   74 %   55 %
     channels_f64   2.19   43 %   92 %   69 %
   That is why f32 and halves are added up in f32, by DP__CUDA_SIXTEEN: stats_f32 in f64 took 125 %,
   268 % and 200 %. For f64 itself there is time. tests/compile/sass.sh counts and compares.     */

#define DP__CUDA_LANES_ADD                                                                         \
    DP__CUDA_ROLLED for (unsigned half = 128; half > 0; half /= 2) {                               \
        DP__CUDA_SYNC                                                                              \
        if (DP__CUDA_LANE < half) {                                                                \
            first[DP__CUDA_LANE] += first[DP__CUDA_LANE + half];                                   \
            second[DP__CUDA_LANE] += second[DP__CUDA_LANE + half];                                 \
        }                                                                                          \
    }                                                                                              \
    DP__CUDA_SYNC

/* Block b adds up chunk CHUNK of ALL elements; lane(&p, what the chunk is of, its first element of
   the lane, the chunk's end, out) is what a lane has to add up. */
#define DP__CUDA_CHUNKS_ADD(name, blocks, ALL, CHUNK, OF, W, lane)                                 \
    DP__CUDA_KERNEL_OF(name, dp__cuda_params, blocks)                                              \
    {                                                                                              \
        DP__CUDA_SHARED double first[256];                                                         \
        DP__CUDA_SHARED double second[256];                                                        \
        const unsigned long long all = (unsigned long long)(ALL);                                  \
        DP__CUDA_ROLLED for (unsigned long long b = DP__CUDA_BLOCK; b < p.chunk_count;             \
                             b += DP__CUDA_BLOCK_STEP) {                                           \
            const unsigned long long begin = (CHUNK) * p.chunk, end = begin + p.chunk;             \
            const struct dp_f64x2 sums =                                                           \
                lane(&p, OF, begin + DP__CUDA_LANE * W, end < all ? end : all);                    \
            first[DP__CUDA_LANE] = sums.at[0];                                                     \
            second[DP__CUDA_LANE] = sums.at[1];                                                    \
            DP__CUDA_LANES_ADD                                                                     \
            if (DP__CUDA_LANE == 0) {                                                              \
                p.scratch[2 * b] = first[0];                                                       \
                p.scratch[2 * b + 1] = second[0];                                                  \
            }                                                                                      \
            DP__CUDA_SYNC                                                                          \
        }                                                                                          \
    }

/* A lane's sixteen numbers, and their squares, are added up in f32 and yet with an error like that
   of f64. Let 2^(E + 1) be above all of them. A number or a square that is added to a power of two
   above all is rounded to whole units, the same for all sixteen, which add up as integers. What is
   left of each is a float again; floats of sixteen are added in a tree. Both sums together are a
   whole number of 2^-25 units, less than 2^52 of them, and so the low bits of a double. The error
   is at most 2^-40 of the sum of absolute values.
   Where the largest is below 2^-40, but not 0, or from 2^62 on, a float does not hold squares, or
   not what is left of them; there, and where a number is not finite, each is added in f64. */
#define DP__CUDA_SIXTEEN                                                                           \
    DP__CUDA_DEVICE float dp_in_units(const float *x, int squared, unsigned above,                 \
                                      unsigned *units)                                             \
    {                                                                                              \
        float rest[4], e[4];                                                                       \
        for (unsigned q = 0; q < 4; q++) {                                                         \
            for (unsigned k = 0; k < 4; k++) {                                                     \
                const float v = x[4 * q + k], factor = squared ? v : 1;                            \
                const float sum = fmaf(v, factor, dp_float_of(above));                             \
                *units += dp_bits_of(sum);                                                         \
                e[k] = fmaf(v, factor, dp_float_of(above) - sum);                                  \
            }                                                                                      \
            rest[q] = (e[0] + e[1]) + (e[2] + e[3]);                                               \
        }                                                                                          \
        return (rest[0] + rest[1]) + (rest[2] + rest[3]);                                          \
    }                                                                                              \
    DP__CUDA_DEVICE double dp_of_units(unsigned exponent, unsigned units, unsigned none,           \
                                       float rest, unsigned scale)                                 \
    {                                                                                              \
        union { unsigned long long u; double f; } zero, x;                                         \
        zero.u = ((unsigned long long)exponent << 52) + ((unsigned long long)none << 25);          \
        x.u = ((unsigned long long)exponent << 52) + ((unsigned long long)units << 25) +           \
              (unsigned long long)(int)(rest * dp_float_of(scale << 23));                          \
        return x.f - zero.f;                                                                       \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_add_sixteen(float *x, double *sum, double *squares, unsigned *odd)     \
    {                                                                                              \
        float most = 0;                                                                            \
        for (unsigned u = 0; u < 16; u++)                                                          \
            most = fmaxf(most, fabsf(x[u]));                                                       \
        const unsigned e = dp_bits_of(most) >> 23, one = (e + 2) << 23;                            \
        const unsigned two = (2 * e - 125) << 23;                                                  \
        unsigned ones = 0 - 16 * one, twos = 0 - 16 * two;                                         \
        const float rest = dp_in_units(x, 0, one | 0x400000, &ones);                               \
        const float rests = dp_in_units(x, 1, two, &twos);                                         \
        if ((e - 87 < 102 || most == 0) && rests == rests) {                                       \
            *sum += dp_of_units(902 + e, ones, 1 << 26, rest, 300 - e);                            \
            *squares += dp_of_units(775 + 2 * e, twos, 0, rests, 427 - 2 * e);                     \
            return;                                                                                \
        }                                                                                          \
        DP__CUDA_ROLLED for (unsigned u = 0; u < 16; u++) {                                        \
            const double wide = (double)x[0];                                                      \
            *sum += wide;                                                                          \
            *squares += wide * wide;                                                               \
            *odd += x[0] - x[0] == 0 ? 0 : 1;                                                      \
            for (unsigned k = 0; k < 15; k++)                                                      \
                x[k] = x[k + 1];                                                                   \
        }                                                                                          \
    }

/* dp_add_NAME(&p, i, x, &one, &two) adds the sixteen elements x of a lane, the first of which is
   element i, to its sums. What is behind the end is 0. */
#define DP__CUDA_SUMS(name, blocks, T, A, W, get)                                                  \
    DP__CUDA_DEVICE struct dp_f64x2 dp_lane_##name(                                                \
        const struct dp__cuda_params *p, unsigned long long of, unsigned long long begin,          \
        unsigned long long end)                                                                    \
    {                                                                                              \
        struct dp_f64x2 sums = {{0, 0}};                                                           \
        double one = 0;                                                                            \
        unsigned two = 0;                                                                          \
        (void)of;                                                                                  \
        DP__CUDA_ROLLED for (unsigned long long i = begin; i < end; i += 16 * 256) {               \
            A v[16];                                                                               \
            if (p->packs > 0 && i + (16 - W) * 256 + W <= end) {                                   \
                struct dp_##T##x##W x[16 / W];                                                     \
                for (unsigned u = 0; u < 16 / W; u++)                                              \
                    x[u] = ((const struct dp_##T##x##W *)p->in[0])[i / W + u * 256];               \
                for (unsigned u = 0; u < 16 / W; u++)                                              \
                    get##_##T##x##W(v + u * W, &x[u], p->dtype);                                   \
            } else                                                                                 \
                for (unsigned u = 0; u < 16; u++) {                                                \
                    const unsigned long long at = i + u / W * 256 * W + u % W;                     \
                    v[u] = 0;                                                                      \
                    if (at < end)                                                                  \
                        get##_##T##x1(v + u, (const struct dp_##T##x1 *)p->in[0] + at, p->dtype);  \
                }                                                                                  \
            dp_add_##name(p, i, end, v, &one, &two);                                               \
        }                                                                                          \
        sums.at[0] = one;                                                                          \
        sums.at[1] = (double)two;                                                                  \
        return sums;                                                                               \
    }                                                                                              \
    DP__CUDA_CHUNKS_ADD(name, blocks, p.count, b, 0, W, dp_lane_##name)
#define DP__CUDA_ADD(name, A)                                                                      \
    DP__CUDA_DEVICE void dp_add_##name(const struct dp__cuda_params *p, unsigned long long i,      \
                                       unsigned long long end, A *x, double *one, unsigned *two)

/* The sum of squares, and how many are not finite. */
#define DP__CUDA_STATS(name, T, W, get)                                                            \
    DP__CUDA_ADD(stats_##name, float)                                                              \
    {                                                                                              \
        double sum = 0;                                                                            \
        (void)p, (void)i, (void)end;                                                               \
        dp_add_sixteen(x, &sum, one, two);                                                         \
    }                                                                                              \
    DP__CUDA_SUMS(stats_##name, 6, T, float, W, get)
#define DP__CUDA_STATS_F64                                                                         \
    DP__CUDA_ADD(stats_f64, double)                                                                \
    {                                                                                              \
        (void)p, (void)i, (void)end;                                                               \
        for (unsigned u = 0; u < 16; u++) {                                                        \
            union { double f; unsigned long long u; } bits;                                        \
            bits.f = x[u];                                                                         \
            *one += x[u] * x[u];                                                                   \
            *two += (bits.u >> 52 & 0x7ff) == 0x7ff ? 1 : 0;                                       \
        }                                                                                          \
    }                                                                                              \
    DP__CUDA_SUMS(stats_f64, 4, f64, double, 2, dp_get)
#define DP__CUDA_TOTAL                                                                             \
    DP__CUDA_ADD(total, double)                                                                    \
    {                                                                                              \
        (void)p, (void)i, (void)end, (void)two;                                                    \
        for (unsigned u = 0; u < 16; u++)                                                          \
            *one += x[u];                                                                          \
    }                                                                                              \
    DP__CUDA_SUMS(total, 4, f64, double, 2, dp_get)

/* Every so manieth pair, in order; eight are loaded before the first is added. */
#define DP__CUDA_PAIRS                                                                             \
    DP__CUDA_DEVICE struct dp_f64x2 dp_sum_of_pairs(const double *pairs, unsigned long long first, \
                                                    unsigned long long end, unsigned step)         \
    {                                                                                              \
        struct dp_f64x2 sums = {{0, 0}};                                                           \
        DP__CUDA_ROLLED for (unsigned long long i = first; i < end; i += 8 * step) {               \
            struct dp_f64x2 x[8];                                                                  \
            for (unsigned u = 0; u < 8; u++)                                                       \
                x[u] = ((const struct dp_f64x2 *)pairs)[i + u * step < end ? i + u * step : i];    \
            for (unsigned u = 0; u < 8; u++)                                                       \
                if (i + u * step < end) {                                                          \
                    sums.at[0] += x[u].at[0];                                                      \
                    sums.at[1] += x[u].at[1];                                                      \
                }                                                                                  \
        }                                                                                          \
        return sums;                                                                               \
    }

/* One block: out[0] = alpha * the first sums, followed by the second ones if out_count is 2. */
#define DP__CUDA_SUMS_END                                                                          \
    DP__CUDA_KERNEL(sums_end)                                                                      \
    {                                                                                              \
        DP__CUDA_SHARED double first[256];                                                         \
        DP__CUDA_SHARED double second[256];                                                        \
        const struct dp_f64x2 sums =                                                               \
            dp_sum_of_pairs(p.scratch, DP__CUDA_LANE, p.chunk_count, 256);                         \
        first[DP__CUDA_LANE] = sums.at[0];                                                         \
        second[DP__CUDA_LANE] = sums.at[1];                                                        \
        DP__CUDA_LANES_ADD                                                                         \
        if (DP__CUDA_LANE == 0) {                                                                  \
            ((double *)p.out[0])[0] = p.alpha * first[0];                                          \
            if (p.out_count > 1)                                                                   \
                ((double *)p.out[0])[1] = second[0];                                               \
        }                                                                                          \
    }

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
    }                                                                                              \
    DP__CUDA_ADD(differ, unsigned)                                                                 \
    {                                                                                              \
        unsigned count = 0;                                                                        \
        (void)two;                                                                                 \
        for (unsigned u = 0; u < 16; u++) {                                                        \
            const unsigned long long at = i + u / 4 * 1024 + u % 4;                                \
            count += at < end && x[u] != dp_pattern(at, p->fill) ? 1 : 0;                          \
        }                                                                                          \
        *one += count;                                                                             \
    }                                                                                              \
    DP__CUDA_SUMS(differ, 4, u32, unsigned, 4, dp_get)

/* ==== >>steps ====================================================================================
   The kernels of dp_train.h: see DP_KERNEL_SGD and what follows it. f16 and bf16 are computed as
   f32, by the same kernel. At the end the list of all kernels.                                  */

#define DP__CUDA_ANY_F64(W)                                                                        \
    DP__CUDA_DEVICE const void *dp_at_f64x##W(const void *in, unsigned long long i, int dtype)     \
    {                                                                                              \
        (void)dtype;                                                                               \
        return (const struct dp_f64x##W *)in + i;                                                  \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_load_f64x##W(const void *const *at, unsigned count, int dtype,         \
                                         struct dp_f64x##W *out)                                   \
    {                                                                                              \
        (void)dtype;                                                                               \
        for (unsigned u = 0; u < count; u++)                                                       \
            out[u] = *(const struct dp_f64x##W *)at[u];                                            \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_store_f64x##W(void *out, unsigned long long i, int dtype,              \
                                          struct dp_f64x##W x)                                     \
    {                                                                                              \
        (void)dtype;                                                                               \
        ((struct dp_f64x##W *)out)[i] = x;                                                         \
    }

/* Sets have chunks one after another: the last that begins at this one or before it. */
#define DP__CUDA_OWN                                                                               \
    DP__CUDA_DEVICE unsigned dp_own_set(const struct dp__cuda_steps *p, unsigned chunk)            \
    {                                                                                              \
        unsigned own = 0;                                                                          \
        for (unsigned half = 32; half > 0; half /= 2)                                              \
            if (own + half < p->set_count && p->first[own + half] <= chunk)                        \
                own += half;                                                                       \
        return own;                                                                                \
    }                                                                                              \
    DP__CUDA_DEVICE int dp_is_packed(const struct dp__cuda_set *set)                               \
    {                                                                                              \
        return (((unsigned long long)set->out[0] | (unsigned long long)set->out[1] |               \
                 (unsigned long long)set->out[2] | (unsigned long long)set->grad) & 15) == 0;      \
    }

/* PACK is a struct of W numbers of the type A; what is never a half is loaded first. */
#define DP__CUDA_SGD_SPAN(fn, PACK, A, W)                                                          \
    DP__CUDA_DEVICE void fn(const struct dp__cuda_steps *p, const struct dp__cuda_set *set,        \
                            unsigned long long i, double factor)                                   \
    {                                                                                              \
        const A lr = (A)p->numbers[0], decay = (A)p->numbers[1], momentum = (A)p->numbers[2];      \
        const A rest = (A)p->numbers[3], sign = (A)factor;                                         \
        const void *const at[2] = {dp_at_##PACK(set->out[0], i, p->dtype),                         \
                                   dp_at_##PACK(set->grad, i, p->dtype)};                          \
        struct dp_##PACK x[2];                                                                     \
        struct dp_##PACK velocity = {{0}};                                                         \
        if (p->out_count > 1)                                                                      \
            velocity = ((const struct dp_##PACK *)set->out[1])[i];                                 \
        dp_load_##PACK(at, 2, p->dtype, x);                                                        \
        for (unsigned e = 0; e < W; e++) {                                                         \
            A g = x[1].at[e] * sign;                                                               \
            const A decayed = decay * x[0].at[e];                                                  \
            g = decay != 0 ? g + decayed : g;                                                      \
            const A kept = momentum * velocity.at[e], fresh = rest * g;                            \
            const A v = p->flags & 2 ? g : kept + fresh;                                           \
            const A ahead = momentum * v;                                                          \
            velocity.at[e] = v;                                                                    \
            if (p->out_count > 1)                                                                  \
                g = p->flags & 1 ? g + ahead : v;                                                  \
            const A step = lr * g;                                                                 \
            x[0].at[e] = x[0].at[e] - step;                                                        \
            x[1].at[e] = 0;                                                                        \
        }                                                                                          \
        if (p->out_count > 1)                                                                      \
            ((struct dp_##PACK *)set->out[1])[i] = velocity;                                       \
        dp_store_##PACK(set->out[0], i, p->dtype, x[0]);                                           \
        if (p->flags & 16)                                                                         \
            dp_store_##PACK(set->grad, i, p->dtype, x[1]);                                         \
    }
#define DP__CUDA_ADAMW_SPAN(fn, PACK, A, W, SQRT)                                                  \
    DP__CUDA_DEVICE void fn(const struct dp__cuda_steps *p, const struct dp__cuda_set *set,        \
                            unsigned long long i, double factor)                                   \
    {                                                                                              \
        const A lr = (A)p->numbers[0], decay = (A)p->numbers[1], fresh1 = (A)p->numbers[2];        \
        const A kept2 = (A)p->numbers[3], fresh2 = (A)p->numbers[4], bias2 = (A)p->numbers[5];     \
        const A eps = (A)p->numbers[6], sign = (A)factor;                                          \
        const int near = fresh1 < (A)0.5;                                                          \
        const A way = near ? fresh1 : fresh1 - 1;                                                  \
        const void *const at[2] = {dp_at_##PACK(set->out[0], i, p->dtype),                         \
                                   dp_at_##PACK(set->grad, i, p->dtype)};                          \
        struct dp_##PACK x[2];                                                                     \
        struct dp_##PACK mean = ((const struct dp_##PACK *)set->out[1])[i];                        \
        struct dp_##PACK square = ((const struct dp_##PACK *)set->out[2])[i];                      \
        dp_load_##PACK(at, 2, p->dtype, x);                                                        \
        for (unsigned e = 0; e < W; e++) {                                                         \
            const A decayed = decay * x[0].at[e], from = p->flags & 4 ? x[0].at[e] : decayed;      \
            A g = x[1].at[e] * sign;                                                               \
            g = p->flags & 4 && decay != 0 ? g + decayed : g;                                      \
            const A moved = (g - mean.at[e]) * way;                                                \
            const A kept = square.at[e] * kept2, squared = g * g, fresh = squared * fresh2;        \
            mean.at[e] = (near ? mean.at[e] : g) + moved;                                          \
            square.at[e] = kept + fresh;                                                           \
            const A step = lr * (mean.at[e] / (SQRT(square.at[e]) / bias2 + eps));                 \
            x[0].at[e] = from - step;                                                              \
            x[1].at[e] = 0;                                                                        \
        }                                                                                          \
        ((struct dp_##PACK *)set->out[1])[i] = mean;                                               \
        ((struct dp_##PACK *)set->out[2])[i] = square;                                             \
        dp_store_##PACK(set->out[0], i, p->dtype, x[0]);                                           \
        if (p->flags & 16)                                                                         \
            dp_store_##PACK(set->grad, i, p->dtype, x[1]);                                         \
    }
#define DP__CUDA_STEP_KERNEL(name, W)                                                              \
    DP__CUDA_DEVICE void dp_chunk_##name(const struct dp__cuda_steps *p, unsigned block,           \
                                         double factor)                                            \
    {                                                                                              \
        const unsigned own = dp_own_set(p, block);                                                 \
        const struct dp__cuda_set set = p->sets[own];                                              \
        const unsigned long long begin = (block - p->first[own]) * p->chunk;                       \
        const unsigned long long left = set.count - begin;                                         \
        const unsigned long long end = begin + (left < p->chunk ? left : p->chunk);                \
        const unsigned long long packed = dp_is_packed(&set) ? end / (W) : begin / (W);            \
        DP__CUDA_ROLLED for (unsigned long long i = begin / (W) + DP__CUDA_LANE; i < packed;       \
                             i += 256)                                                             \
            dp_##name##_wide(p, &set, i, factor);                                                  \
        DP__CUDA_ROLLED for (unsigned long long i = packed * (W) + DP__CUDA_LANE; i < end;         \
                             i += 256)                                                             \
            dp_##name##_one(p, &set, i, factor);                                                   \
    }                                                                                              \
    DP__CUDA_KERNEL_OF(name, dp__cuda_steps, 4)                                                    \
    {                                                                                              \
        const double factor = p.gate != 0 ? p.gate[0] : 1;                                         \
        if (p.gate != 0 && p.gate[1] > 0)                                                          \
            return;                                                                                \
        DP__CUDA_ROLLED for (unsigned b = DP__CUDA_BLOCK; b < p.chunk_count;                       \
                             b += DP__CUDA_BLOCK_STEP)                                             \
            dp_chunk_##name(&p, b, p.flags & 8 ? -factor : factor);                                \
    }

/* `fill` chunks a channel, one a block; shape[1] channels in all. Only a lane's first place needs a
   division: 256 elements on is always as many rows, and as far in a row, of which `left` elements
   are left. No chunk is as long as 2^30, and so no more of a row counts. */
#define DP__CUDA_CHANNELS(name, T, A, get)                                                         \
    DP__CUDA_DEVICE struct dp_f64x2 dp_lane_channels_##name(                                       \
        const struct dp__cuda_params *p, unsigned long long channel, unsigned long long begin,     \
        unsigned long long end)                                                                    \
    {                                                                                              \
        const unsigned long long inner = (unsigned long long)p->shape[2];                          \
        const unsigned long long row = (unsigned long long)p->shape[1] * inner;                    \
        const unsigned length = inner < 1u << 30 ? (unsigned)inner : 1u << 30;                     \
        const unsigned rows = 256 / length, along = 256 - rows * length;                           \
        const unsigned long long ahead = inner - begin % inner;                                    \
        unsigned long long at = begin / inner * row + channel * inner + begin % inner;             \
        unsigned left = ahead < length ? (unsigned)ahead : length;                                 \
        struct dp_f64x2 sums = {{0, 0}};                                                           \
        DP__CUDA_ROLLED for (unsigned long long i = begin; i < end; i += 16 * 256) {               \
            const unsigned some = end - i < 16 * 256 ? (unsigned)(end - i) : 16 * 256;             \
            struct dp_##T##x1 x[16];                                                               \
            A v[16];                                                                               \
            for (unsigned u = 0; u < 16; u++) {                                                    \
                const struct dp_##T##x1 none = {{0}};                                              \
                x[u] = u * 256 < some ? ((const struct dp_##T##x1 *)p->in[0])[at] : none;          \
                at += rows * row + along;                                                          \
                at += left > along ? 0 : row - inner;                                              \
                left += left > along ? 0 - along : length - along;                                 \
            }                                                                                      \
            for (unsigned u = 0; u < 16; u++)                                                      \
                get##_##T##x1(&v[u], &x[u], p->dtype);                                             \
            dp_add_channels_##name(v, &sums.at[0], &sums.at[1]);                                   \
        }                                                                                          \
        return sums;                                                                               \
    }                                                                                              \
    DP__CUDA_CHUNKS_ADD(channels_##name, 4, p.shape[0] * p.shape[2], b % p.fill, b / p.fill, 1,    \
                        dp_lane_channels_##name)
#define DP__CUDA_CHANNELS_ADD                                                                      \
    DP__CUDA_DEVICE void dp_add_channels_f32(float *x, double *sum, double *squares)               \
    {                                                                                              \
        unsigned odd = 0;                                                                          \
        dp_add_sixteen(x, sum, squares, &odd);                                                     \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_add_channels_half(float *x, double *sum, double *squares)              \
    {                                                                                              \
        dp_add_channels_f32(x, sum, squares);                                                      \
    }                                                                                              \
    DP__CUDA_DEVICE void dp_add_channels_f64(double *x, double *sum, double *squares)              \
    {                                                                                              \
        for (unsigned u = 0; u < 16; u++) {                                                        \
            *sum += x[u];                                                                          \
            *squares = fma(x[u], x[u], *squares);                                                  \
        }                                                                                          \
    }
#define DP__CUDA_CHANNELS_END                                                                      \
    DP__CUDA_KERNEL(channels_end)                                                                  \
    {                                                                                              \
        DP__CUDA_EACH(i)                                                                           \
        {                                                                                          \
            const unsigned long long begin = i * p.fill;                                           \
            const struct dp_f64x2 sums = dp_sum_of_pairs(p.scratch, begin, begin + p.fill, 1);     \
            ((double *)p.out[0])[i] = sums.at[0];                                                  \
            ((double *)p.out[0])[(unsigned long long)p.shape[1] + i] = sums.at[1];                 \
        }                                                                                          \
    }

#define DP__CUDA_TEXTS(TEXT)                                                                       \
    TEXT(DP__CUDA_PARAMS)                                                                          \
    TEXT(DP__CUDA_PACKS)                                                                           \
    TEXT(DP__CUDA_BITS)                                                                            \
    TEXT(DP__CUDA_CONVERT)                                                                         \
    TEXT(DP__CUDA_HALVES)                                                                          \
    TEXT(DP__CUDA_NUMBERS(f32, float, 1))                                                          \
    TEXT(DP__CUDA_NUMBERS(f32, float, 4))                                                          \
    TEXT(DP__CUDA_NUMBERS(f64, double, 1))                                                         \
    TEXT(DP__CUDA_NUMBERS(f64, double, 2))                                                         \
    TEXT(DP__CUDA_NUMBERS(u32, unsigned, 1))                                                       \
    TEXT(DP__CUDA_NUMBERS(u32, unsigned, 4))                                                       \
    TEXT(DP__CUDA_NUMBERS_OF_HALVES(1))                                                            \
    TEXT(DP__CUDA_NUMBERS_OF_HALVES(4))                                                            \
    TEXT(DP__CUDA_NUMBERS_OF_HALVES(8))                                                            \
    TEXT(DP__CUDA_REDUCE(f32, f32, float, 4))                                                      \
    TEXT(DP__CUDA_REDUCE(f64, f64, double, 2))                                                     \
    TEXT(DP__CUDA_REDUCE(half, u16, float, 8))                                                     \
    TEXT(DP__CUDA_REDUCE_BOOL)                                                                     \
    TEXT(DP__CUDA_AXPBY(f32, f32, float, 4))                                                       \
    TEXT(DP__CUDA_AXPBY(f64, f64, double, 2))                                                      \
    TEXT(DP__CUDA_AXPBY(half, u16, float, 8))                                                      \
    TEXT(DP__CUDA_ANY(1))                                                                          \
    TEXT(DP__CUDA_ANY(4))                                                                          \
    TEXT(DP__CUDA_TAKE)                                                                            \
    TEXT(DP__CUDA_CAST)                                                                            \
    TEXT(DP__CUDA_FILL)                                                                            \
    TEXT(DP__CUDA_COPY_TYPES)                                                                      \
    TEXT(DP__CUDA_PLACES)                                                                          \
    TEXT(DP__CUDA_COPY_AS(dp_u8, 8))                                                               \
    TEXT(DP__CUDA_COPY_AS(dp_u16, 8))                                                              \
    TEXT(DP__CUDA_COPY_AS(dp_u32, 8))                                                              \
    TEXT(DP__CUDA_COPY_AS(dp_u64, 8))                                                              \
    TEXT(DP__CUDA_COPY_AS(dp_u128, 4))                                                             \
    TEXT(DP__CUDA_COPY)                                                                            \
    TEXT(DP__CUDA_REDUCE_WHOLE)                                                                    \
    TEXT(DP__CUDA_BARE_HALVES(1))                                                                  \
    TEXT(DP__CUDA_BARE_HALVES(8))                                                                  \
    TEXT(DP__CUDA_SIXTEEN)                                                                         \
    TEXT(DP__CUDA_STATS(f32, f32, 4, dp_get))                                                      \
    TEXT(DP__CUDA_STATS_F64)                                                                       \
    TEXT(DP__CUDA_STATS(half, u16, 8, dp_bare))                                                    \
    TEXT(DP__CUDA_TOTAL)                                                                           \
    TEXT(DP__CUDA_PAIRS)                                                                           \
    TEXT(DP__CUDA_SUMS_END)                                                                        \
    TEXT(DP__CUDA_PATTERN)                                                                         \
    TEXT(DP__CUDA_ANY_F64(1))                                                                      \
    TEXT(DP__CUDA_ANY_F64(2))                                                                      \
    TEXT(DP__CUDA_OWN)                                                                             \
    TEXT(DP__CUDA_SGD_SPAN(dp_sgd_f32_wide, f32x4, float, 4))                                      \
    TEXT(DP__CUDA_SGD_SPAN(dp_sgd_f32_one, f32x1, float, 1))                                       \
    TEXT(DP__CUDA_STEP_KERNEL(sgd_f32, 4))                                                         \
    TEXT(DP__CUDA_SGD_SPAN(dp_sgd_f64_wide, f64x2, double, 2))                                     \
    TEXT(DP__CUDA_SGD_SPAN(dp_sgd_f64_one, f64x1, double, 1))                                      \
    TEXT(DP__CUDA_STEP_KERNEL(sgd_f64, 2))                                                         \
    TEXT(DP__CUDA_ADAMW_SPAN(dp_adamw_f32_wide, f32x4, float, 4, DP__CUDA_SQRTF))                  \
    TEXT(DP__CUDA_ADAMW_SPAN(dp_adamw_f32_one, f32x1, float, 1, DP__CUDA_SQRTF))                   \
    TEXT(DP__CUDA_STEP_KERNEL(adamw_f32, 4))                                                       \
    TEXT(DP__CUDA_ADAMW_SPAN(dp_adamw_f64_wide, f64x2, double, 2, DP__CUDA_SQRT))                  \
    TEXT(DP__CUDA_ADAMW_SPAN(dp_adamw_f64_one, f64x1, double, 1, DP__CUDA_SQRT))                   \
    TEXT(DP__CUDA_STEP_KERNEL(adamw_f64, 2))                                                       \
    TEXT(DP__CUDA_CHANNELS_ADD)                                                                    \
    TEXT(DP__CUDA_CHANNELS(f32, f32, float, dp_get))                                               \
    TEXT(DP__CUDA_CHANNELS(f64, f64, double, dp_get))                                              \
    TEXT(DP__CUDA_CHANNELS(half, u16, float, dp_bare))                                             \
    TEXT(DP__CUDA_CHANNELS_END)

/* Floats in the order of dp_dtype, but for f16 and bf16, which share a kernel. */
#define DP__CUDA_NAMES(X)                                                                          \
    X(reduce_f32) X(reduce_f64) X(reduce_half) X(reduce_whole) X(reduce_bool)                      \
    X(axpby_f32) X(axpby_f64) X(axpby_half)                                                        \
    X(stats_f32) X(stats_f64) X(stats_half) X(total) X(sums_end)                                   \
    X(fill) X(copy) X(cast) X(pattern) X(differ)                                                   \
    X(sgd_f32) X(sgd_f64) X(adamw_f32) X(adamw_f64)                                                \
    X(channels_f32) X(channels_f64) X(channels_half) X(channels_end)
/* clang-format on */

#define DP__CUDA_ENUM(name) DP__CUDA_##name,
enum { DP__CUDA_NAMES(DP__CUDA_ENUM) DP__CUDA_KERNEL_COUNT };

#if defined(DP_CUDA_TEXT_AS_C)
#define DP__CUDA_AS_C(...) __VA_ARGS__
DP__CUDA_TEXTS(DP__CUDA_AS_C)
#else

#if !defined(DP__HIP)
#define DP__CUDA_IS        "cuda"        /* in sentences, and as the table's name */
#define DP__CUDA_KIND(gpu) ((gpu)->arch) /* GPUs of one kind run the same code */
#define DP__CUDA_BOUNDS    "__launch_bounds__(256, blocks)"
#define DP__CUDA_CONST     "const __grid_constant__"
#define DP__CUDA_TARGET    "--gpu-architecture="
#define DP__CUDA_UNFUSED   "--fmad=false"
#define DP__CUDA_PUSH      "cuCtxPushCurrent" /* what dp__cuda_enter and _leave call */
#define DP__CUDA_POP       "cuCtxPopCurrent"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>
#endif
#if defined(__has_include) && !defined(DP__HIP)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define DP__CUDA_NVTX
#endif
#endif
#if defined(DP_DYNAMIC_LOAD)
#include <dlfcn.h>
#endif

_Static_assert(DP_F32 == 0 && DP_BF16 == 3 && DP_I64 == 4 && DP_U8 == 8 && DP_BOOL == 9,
               "the kernels know dtypes by their numbers");
_Static_assert(DP_OP_SUM == 0 && DP_OP_PROD == 2 && DP_OP_MIN == 3 && DP_OP_MAX == 4,
               "the kernels know operations by their numbers");

DP__CUDA_PARAMS
#define DP__CUDA_STRING(...)    #__VA_ARGS__ "\n",
#define DP__CUDA_AS_STRING(...) DP__CUDA_STRING(__VA_ARGS__)
#define DP__CUDA_NAME(name)     "dp_cuda_" #name,
static const char *const dp__cuda_texts[] = {
    /* CUDA's headers hide these words from a C compiler. */
    "#define dp_global(blocks) extern \"C\" __global__ " DP__CUDA_BOUNDS "\n"
    "#define dp_device static __device__ __forceinline__\n"
    "#define dp_shared __shared__\n"
    "#define dp_const " DP__CUDA_CONST "\n"
    "#define dp_rolled _Pragma(\"unroll 1\")\n", /* unrolled they take four times as long here */
    DP__CUDA_TEXTS(DP__CUDA_AS_STRING)};
static const char *const dp__cuda_names[] = {DP__CUDA_NAMES(DP__CUDA_NAME)};

/* ==== >>surface ==================================================================================
   Every CUDA function that is called is in these lists, and is called through one table: bound when
   the program is linked, or with DP_DYNAMIC_LOAD when the first context opens. The driver's
   functions are asked for by name, so that nothing links to it. dp_hip.h has a table of its own
   with the same members, and what goes with it.                                                 */

#define DP__CUDA_FIELD(name) __typeof__(name) *name;
#if defined(DP_DYNAMIC_LOAD)
static bool dp__cuda_find(void *library, const char *name, void *out_fn)
{
    void *found = dlsym(library, name);
    memcpy(out_fn, &found, sizeof found);
    return found != NULL;
}

/* The file that a library is, which has this function; as far as the system says, else what it was
   asked for by. */
static const char *dp__cuda_place(void *library, const char *fn, const char *name)
{
    Dl_info info;
    return dladdr(dlsym(library, fn), &info) != 0 ? info.dli_fname : name;
}
#else
#define DP__CUDA_BIND(name) .name = name,
#endif

#if !defined(DP__HIP)
/* clang-format off */
#define DP__CUDA_RUNTIME(X)                                                                        \
    X(cudaDeviceCanAccessPeer) X(cudaDeviceDisablePeerAccess) X(cudaDeviceEnablePeerAccess)        \
    X(cudaDeviceGetAttribute) X(cudaDeviceGetPCIBusId) X(cudaDeviceGetStreamPriorityRange)         \
    X(cudaDriverGetVersion) X(cudaEventCreateWithFlags) X(cudaEventDestroy) X(cudaEventQuery)      \
    X(cudaEventRecord) X(cudaEventSynchronize) X(cudaFree) X(cudaFreeHost)                         \
    X(cudaFuncGetAttributes) X(cudaGetDeviceCount) X(cudaGetDriverEntryPointByVersion)             \
    X(cudaGetErrorString) X(cudaGetLastError) X(cudaHostAlloc) X(cudaLaunchHostFunc)               \
    X(cudaLaunchKernel)                                                                            \
    X(cudaLibraryGetKernel) X(cudaLibraryLoadData) X(cudaLibraryUnload) X(cudaMalloc)              \
    X(cudaMemGetInfo) X(cudaMemcpy2DAsync) X(cudaMemcpyAsync) X(cudaMemcpyPeerAsync)               \
    X(cudaPointerGetAttributes) X(cudaRuntimeGetVersion)                                           \
    X(cudaStreamCreateWithPriority) X(cudaStreamDestroy) X(cudaStreamGetDevice)                    \
    X(cudaStreamIsCapturing) X(cudaStreamSynchronize) X(cudaStreamWaitEvent)
#define DP__CUDA_NVRTC(X)                                                                          \
    X(nvrtcCompileProgram) X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcGetCUBIN)           \
    X(nvrtcGetCUBINSize) X(nvrtcGetErrorString) X(nvrtcGetNumSupportedArchs) X(nvrtcGetPTX)        \
    X(nvrtcGetPTXSize) X(nvrtcGetProgramLog) X(nvrtcGetProgramLogSize) X(nvrtcGetSupportedArchs)   \
    X(nvrtcVersion)
#define DP__CUDA_DRIVER(X)                                                                         \
    X(cuCtxPopCurrent, (CUcontext *)) X(cuCtxPushCurrent, (CUcontext))                             \
    X(cuDeviceGet, (CUdevice *, int)) X(cuDeviceGetName, (char *, int, CUdevice))                  \
    X(cuDeviceGetUuid, (CUuuid *, CUdevice))                                                       \
    X(cuDevicePrimaryCtxRelease, (CUdevice)) X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))  \
    X(cuPointerGetAttribute, (void *, CUpointer_attribute, CUdeviceptr))                           \
    X(cuStreamGetCtx, (CUstream, CUcontext *, CUgreenCtx *))                                       \
    X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *))
/* clang-format on */

/* The driver's names have versions behind macros; `cuda.h` knows them. */
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
dp__cuda = {DP__CUDA_RUNTIME(DP__CUDA_BIND) DP__CUDA_NVRTC(DP__CUDA_BIND).bound = true};
#endif

/* The oldest driver and libraries, and the version of the driver's functions that is asked for. */
enum { DP__CUDA_FLOOR = 12080 };

/* 12080 is 12.8. A driver gives the newest CUDA that it serves. 0: there is none, or it does not
   say. */
static int dp__cuda_version(cudaError_t (*ask)(int *out))
{
    int version = 0;
    if (ask(&version) == cudaSuccess)
        return version;
    (void)dp__cuda.cudaGetLastError();
    return 0;
}

/* Driver and libraries are of versions that work together. A newer driver serves older libraries,
   an older one those of its own major version; the compiler's code is for its own runtime. */
static dp_status dp__cuda_versions_fit(int driver)
{
    int runtime = dp__cuda_version(dp__cuda.cudaRuntimeGetVersion), major = 0, minor = 0;
    (void)dp__cuda.nvrtcVersion(&major, &minor);
    int nvrtc = major * 1000 + minor * 10;
    const char *old = runtime < DP__CUDA_FLOOR ? "libcudart" : "libnvrtc";
    int version = runtime < DP__CUDA_FLOOR ? runtime : nvrtc;
    if (version < DP__CUDA_FLOOR)
        return dp_error(DP_ERR_UNSUPPORTED, "%s is of CUDA %d.%d, 12.8 is needed", old,
                        version / 1000, version % 1000 / 10);
    if (runtime / 1000 != major)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "libcudart is of CUDA %d.%d and libnvrtc of CUDA %d.%d: both have to be of "
                        "one major version",
                        runtime / 1000, runtime % 1000 / 10, major, minor);
    if (driver != 0 && driver < DP__CUDA_FLOOR)
        return dp_error(DP_ERR_UNSUPPORTED, "the driver is for CUDA %d.%d, 12.8 is needed",
                        driver / 1000, driver % 1000 / 10);
    if (driver != 0 && driver / 1000 < runtime / 1000)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "the driver is for CUDA %d.%d, libcudart is of CUDA %d.%d", driver / 1000,
                        driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return DP_OK;
}

#if defined(DP_DYNAMIC_LOAD)
#define DP__CUDA_FIND_RUNTIME(name) found = found && dp__cuda_find(runtime, #name, &dp__cuda.name);
#define DP__CUDA_FIND_NVRTC(name)   found = found && dp__cuda_find(nvrtc, #name, &dp__cuda.name);

static dp_status dp__cuda_bind_all(void *runtime, void *nvrtc)
{
    bool found = true;
    DP__CUDA_RUNTIME(DP__CUDA_FIND_RUNTIME)
    DP__CUDA_NVRTC(DP__CUDA_FIND_NVRTC)
    if (!found)
        return dp_error(DP_ERR_UNSUPPORTED, "libcudart or libnvrtc is older than 12.8");
    return dp__cuda_versions_fit(dp__cuda_version(dp__cuda.cudaDriverGetVersion));
}

/* The two libraries with this ending; what does not fit is let go of. */
static dp_status dp__cuda_bind_pair(const char *ending)
{
    char names[2][32];
    void *libraries[2] = {NULL, NULL};
    snprintf(names[0], sizeof names[0], "libcudart.so%s", ending);
    snprintf(names[1], sizeof names[1], "libnvrtc.so%s", ending);
    dp_status status = DP_OK;
    for (int i = 0; i < 2 && status == DP_OK; i++) {
        libraries[i] = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (libraries[i] == NULL)
            status = dp_error(DP_ERR_NO_DEVICE, "%s was not found", names[i]);
    }
    if (status == DP_OK) {
        status = dp__cuda_bind_all(libraries[0], libraries[1]);
        dp__cuda.bound = status == DP_OK;
        if (status == DP_OK)
            return DP_OK;
        dp_error(status, "%s (%s, %s)", dp_last_error(),
                 dp__cuda_place(libraries[0], "cudaRuntimeGetVersion", names[0]),
                 dp__cuda_place(libraries[1], "nvrtcVersion", names[1]));
    }
    dp__cuda = (struct dp__cuda){.bound = false};
    for (int i = 0; i < 2; i++)
        if (libraries[i] != NULL)
            (void)dlclose(libraries[i]);
    return status;
}

/* Whether there are GPUs, as far as a driver says without the runtime. Once asked, the driver stays
   loaded: it is not made to be let go of. */
static bool dp__cuda_driver_has_gpus(void)
{
    CUresult(CUDAAPI * init)(unsigned) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL || !dp__cuda_find(driver, "cuInit", &init))
        return false;
    CUresult code = init(0);
    return code != CUDA_ERROR_NO_DEVICE && code != CUDA_ERROR_STUB_LIBRARY;
}

/* The newest pair that the driver can carry. */
static dp_status dp__cuda_bind(void)
{
    static const char *const endings[] = {".13", ".12", ""};
    char said[DP__TEXT_BYTES - 64] = "";
    for (int i = 0; i < 3; i++) {
        if (dp__cuda_bind_pair(endings[i]) == DP_OK)
            return DP_OK;
        size_t used = strlen(said);
        snprintf(said + used, sizeof said - used, "%s%.240s", i > 0 ? "; " : "", dp_last_error());
    }
    return dp_error(dp__cuda_driver_has_gpus() ? DP_ERR_UNSUPPORTED : DP_ERR_NO_DEVICE,
                    "the libraries of CUDA cannot be used (%s)", said);
}
#else
static dp_status dp__cuda_bind(void)
{
    return DP_OK;
}
#endif
#endif /* !DP__HIP */

/* What codes mean that calls of this file may return, by driver_types.h of CUDA 13.0; those of the
   driver are the same numbers; the first row counts. Codes with this hint are returned by all later
   calls, too: only a new process can use CUDA again, as the header says of all but 214 and 220. */
static const char dp__cuda_sticky[] = ": the GPU is lost to this process: start a new one";

/* clang-format off */
static const struct dp__cuda_meaning {
    int first, last;
    dp_status status;
    const char *hint; /* what usually lies behind it, or what to do */
} dp__cuda_meanings[] = {
    {214, 214, DP_ERR_DEVICE, dp__cuda_sticky}, {220, 220, DP_ERR_DEVICE, dp__cuda_sticky},
    {226, 226, DP_ERR_DEVICE, dp__cuda_sticky}, {700, 700, DP_ERR_DEVICE, dp__cuda_sticky},
    {702, 702, DP_ERR_DEVICE, dp__cuda_sticky}, {710, 710, DP_ERR_DEVICE, dp__cuda_sticky},
    {714, 719, DP_ERR_DEVICE, dp__cuda_sticky}, {721, 721, DP_ERR_DEVICE, dp__cuda_sticky},
    {810, 810, DP_ERR_DEVICE, dp__cuda_sticky}, {911, 911, DP_ERR_DEVICE, dp__cuda_sticky},
    {2, 2, DP_ERR_NO_MEMORY, ""},
    {34, 34, DP_ERR_NO_DEVICE, ""}, {100, 102, DP_ERR_NO_DEVICE, ""},
    {46, 46, DP_ERR_NO_DEVICE, ": another process may have the GPU for itself"},
    {209, 209, DP_ERR_UNSUPPORTED, ""}, {801, 801, DP_ERR_UNSUPPORTED, ""},
    {3, 3, DP_ERR_DEVICE, ": CUDA may have been used before a fork"},
    {35, 36, DP_ERR_UNSUPPORTED, ": the driver is older than the libraries"},
    {221, 223, DP_ERR_UNSUPPORTED, ": the driver cannot compile the kernels"},
    {800, 800, DP_ERR_STATE, ": not in a function that a stream calls"},
    {802, 802, DP_ERR_UNSUPPORTED, ": the fabric manager may not be running"},
    {803, 803, DP_ERR_UNSUPPORTED, ": the driver's library and its module in the kernel differ"},
    {804, 804, DP_ERR_UNSUPPORTED, ": the driver's compatibility package is not for these GPUs"},
    {900, 900, DP_ERR_STATE, ": it cannot be captured: call it before the capture or after it"},
    {901, 901, DP_ERR_STATE, ": an earlier call broke the capture: end it, and capture again"},
    {905, 905, DP_ERR_STATE, ": it would wait for work outside: dp_wait before the capture begins"},
    {906, 906, DP_ERR_STATE, ": create the stream with " DP__CUDA_IS "StreamNonBlocking"},
    {902, 908, DP_ERR_STATE, ": streams or threads do not go together: capture them one by one"},
    {INT_MIN, INT_MAX, DP_ERR_DEVICE, ""},
};
/* clang-format on */

static struct dp__cuda_meaning dp__cuda_meaning_of(int code)
{
    int i = 0;
    while (code < dp__cuda_meanings[i].first || code > dp__cuda_meanings[i].last)
        i++;
    return dp__cuda_meanings[i];
}

enum { DP__CUDA_GPUS_MAX = 64 };

/* A GPU that has faulted, or hangs, is lost for as long as the process runs: its context is not
   entered again (>>gpus), so nothing of it is waited for or given back. */
static atomic_bool dp__cuda_lost[DP__CUDA_GPUS_MAX];

/* Also clears the thread's last error, where the user would find the code. */
static dp_status dp__cuda_check(const char *fn, int ordinal, cudaError_t code)
{
    if (code == cudaSuccess)
        return DP_OK;
    const struct dp__cuda_meaning is = dp__cuda_meaning_of((int)code);
    if (is.hint == dp__cuda_sticky)
        atomic_store(&dp__cuda_lost[ordinal], true);
    (void)dp__cuda.cudaGetLastError();
    bool known = strncmp(fn, "cuda", 4) == 0; /* the rest of its name is the same everywhere */
    return dp_error(is.status, DP__CUDA_IS " %d: %s%s: %s (%d)%s", ordinal,
                    known ? DP__CUDA_IS : "", known ? fn + 4 : fn,
                    dp__cuda.cudaGetErrorString(code), (int)code, is.hint);
}

#if !defined(DP__HIP)
#define DP__CUDA_FIND_DRIVER(name, types)                                                          \
    found = found && dp__cuda_entry(#name, &dp__cuda.call_##name);

static bool dp__cuda_entry(const char *name, void *out_fn)
{
    void *fn = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t code = dp__cuda.cudaGetDriverEntryPointByVersion(name, &fn, DP__CUDA_FLOOR,
                                                                 cudaEnableDefault, &result);
    if (code != cudaSuccess)
        (void)dp__cuda.cudaGetLastError();
    memcpy(out_fn, &fn, sizeof fn);
    return code == cudaSuccess && result == cudaDriverEntryPointSuccess && fn != NULL;
}

/* NVTX, which comes with the Toolkit, as a header alone. Without a profiler it makes no domain. */
#if defined(DP__CUDA_NVTX)
static nvtxDomainHandle_t dp__cuda_domain;

static void dp__cuda_push(const char *name)
{
    nvtxEventAttributes_t range = {.version = NVTX_VERSION,
                                   .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                   .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                   .message = {.ascii = name}};
    (void)nvtxDomainRangePushEx(dp__cuda_domain, &range);
}

static void dp__cuda_pop(void)
{
    (void)nvtxDomainRangePop(dp__cuda_domain);
}

static void dp__cuda_listen(void)
{
    dp__cuda_domain = nvtxDomainCreateA("dp");
    if (dp__cuda_domain != NULL)
        dp__trace_listen(dp__cuda_push, dp__cuda_pop);
}
#else
static void dp__cuda_listen(void)
{
}
#endif

/* Everything that is needed is there, and new enough. Under the lock of >>gpus. */
static dp_status dp__cuda_ready(void)
{
    bool found = true;
    if (dp__cuda.has_driver)
        return DP_OK;
    if (!dp__cuda.bound)
        DP_TRY(dp__cuda_bind());
    int driver = dp__cuda_version(dp__cuda.cudaDriverGetVersion);
    if (driver == 0)
        return dp_error(DP_ERR_NO_DEVICE, "there is no driver for NVIDIA GPUs");
    DP_TRY(dp__cuda_versions_fit(driver));
    DP__CUDA_DRIVER(DP__CUDA_FIND_DRIVER)
    if (!found)
        return dp_error(DP_ERR_UNSUPPORTED, "the driver lacks functions of CUDA 12.8");
    dp__cuda.has_driver = true;
    dp__cuda_listen();
    return DP_OK;
}

static dp_status dp__cuda_gpu_count(int *out)
{
    int count = 0;
    cudaError_t code = dp__cuda.cudaGetDeviceCount(&count);
    *out = count;
    if (code == cudaSuccess)
        return DP_OK;
    (void)dp__cuda.cudaGetLastError();
    int driver = dp__cuda_version(dp__cuda.cudaDriverGetVersion);
    int runtime = dp__cuda_version(dp__cuda.cudaRuntimeGetVersion);
    const struct dp__cuda_meaning is = dp__cuda_meaning_of((int)code);
    return dp_error(is.status,
                    "cudaGetDeviceCount: %s (%d)%s; the driver is for CUDA %d.%d, the runtime of "
                    "CUDA %d.%d",
                    dp__cuda.cudaGetErrorString(code), (int)code, is.hint, driver / 1000,
                    driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}
#endif /* !DP__HIP */

/* ==== >>compile ==================================================================================
   The kernels for one architecture, by NVRTC.                                                   */

enum { DP__CUDA_TEXT = 1 << 16 }; /* added to an architecture: text, even where NVRTC knows it */

typedef struct dp__cuda_target { /* what the kernels are compiled for */
    char name[24];               /* "sm_90", or text that the driver compiles: "compute_90" */
    bool text;
} dp__cuda_target;

typedef struct dp__cuda_image {
    char *data;
    size_t bytes;
} dp__cuda_image;

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
    if (log != NULL) /* HIP's does not end with 0 */
        log[dp__cuda.nvrtcGetProgramLog(program, log) == NVRTC_SUCCESS ? bytes : 0] = '\0';
    dp_status status =
        dp_error(code == NVRTC_ERROR_OUT_OF_MEMORY ? DP_ERR_NO_MEMORY : DP_ERR_UNSUPPORTED,
                 DP__CUDA_IS ": %s: %s %.600s", fn, dp__cuda.nvrtcGetErrorString(code),
                 log != NULL ? log : "");
    host->free(host, log);
    return status;
}

#if defined(DP__HIP)
/* Whatever of the GPU can be switched on and off. */
static dp_status dp__cuda_target_of(const dp_host *host, int arch, dp__cuda_target *out)
{
    (void)host;
    out->text = false;
    snprintf(out->name, sizeof out->name, "gfx%x", (unsigned)arch);
    return DP_OK;
}
#else
/* A binary where NVRTC knows the architecture. It may leave some out that are older than its
   newest: then, and for newer ones, text for the nearest one below. */
static dp_status dp__cuda_target_of(const dp_host *host, int arch, dp__cuda_target *out)
{
    int count = 0, archs[128] = {0}, nearest = 0, exact = arch;
    nvrtcResult code = dp__cuda.nvrtcGetNumSupportedArchs(&count);
    arch %= DP__CUDA_TEXT;
    if (code == NVRTC_SUCCESS && count <= 128)
        code = dp__cuda.nvrtcGetSupportedArchs(archs);
    DP_TRY(dp__cuda_compile_check(host, code, NULL, "nvrtcGetSupportedArchs"));
    for (int i = 0; i < count && i < 128; i++)
        nearest = archs[i] <= arch && archs[i] > nearest ? archs[i] : nearest;
    if (nearest == 0)
        return dp_error(DP_ERR_UNSUPPORTED,
                        DP__CUDA_IS ": NVRTC compiles for none of the architectures up to %d.%d",
                        arch / 10, arch % 10);
    out->text = nearest != exact;
    snprintf(out->name, sizeof out->name, "%s_%d", out->text ? "compute" : "sm", nearest);
    return DP_OK;
}
#endif

/* On failure `out->data` may have to be freed as well. */
static dp_status dp__cuda_image_of(const dp_host *host, nvrtcProgram program,
                                   const dp__cuda_target *target, dp__cuda_image *out)
{
    char option[48];
    snprintf(option, sizeof option, DP__CUDA_TARGET "%s", target->name);
    const char *const options[] = {option, DP__CUDA_UNFUSED};
    DP_TRY(dp__cuda_compile_check(host, dp__cuda.nvrtcCompileProgram(program, 2, options), program,
                                  "nvrtcCompileProgram"));
    DP_TRY(dp__cuda_compile_check(host,
                                  target->text ? dp__cuda.nvrtcGetPTXSize(program, &out->bytes)
                                               : dp__cuda.nvrtcGetCUBINSize(program, &out->bytes),
                                  program, "the size of the kernels"));
    out->data = host->alloc(host, out->bytes, 16);
    if (out->data == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS ": no memory for the kernels");
    return dp__cuda_compile_check(host,
                                  target->text ? dp__cuda.nvrtcGetPTX(program, out->data)
                                               : dp__cuda.nvrtcGetCUBIN(program, out->data),
                                  program, "the kernels");
}

static dp_status dp__cuda_compile(const dp_host *host, const dp__cuda_target *target,
                                  dp__cuda_image *out)
{
    nvrtcProgram program = NULL;
    char *source = dp__cuda_source(host);
    *out = (dp__cuda_image){.data = NULL};
    if (source == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS ": no memory for the kernels");
    dp_status status = dp__cuda_compile_check(
        host, dp__cuda.nvrtcCreateProgram(&program, source, "dp_cuda.h", 0, NULL, NULL), program,
        "nvrtcCreateProgram");
    if (status == DP_OK)
        status = dp__cuda_image_of(host, program, target, out);
    if (program != NULL)
        (void)dp__cuda.nvrtcDestroyProgram(&program);
    host->free(host, source);
    return status;
}

/* ==== >>kept =====================================================================================
   Compiled kernels on disk. A file is named after what it was made of: the source, the target, and
   NVRTC's version. It is written under another name and renamed, so nobody sees a part of it; what
   a crash or somebody else has left there differs from its checksum, and is made anew. The other
   name is always the same: what a process left that was killed goes with the next that writes.
   Processes that start together take turns behind a lock on the folder, so that one compiles and
   the others read; a lock goes with its process, and who cannot have it in some seconds, or on this
   file system, does without: two files of the same name have the same kernels, and if one is
   renamed that another process still writes, it is damaged until that is done. Whatever fails here,
   the kernels are compiled.                                                                     */

enum { DP__CUDA_KEPT_PATH = 1024, DP__CUDA_KEPT_WAIT_MS = 20000 };

typedef struct dp__cuda_kept {
    const dp_host *host;
    uint64_t key;
    char folder[DP__CUDA_KEPT_PATH], path[DP__CUDA_KEPT_PATH + 96];
    int lock; /* the folder; -1: it is not locked */
} dp__cuda_kept;

typedef struct dp__cuda_kept_head { /* of a file; the image follows */
    char what[16];
    uint64_t key, bytes, checksum;
} dp__cuda_kept_head;

static const char dp__cuda_kept_what[16] = "dp.h kernels 1\n";

static void dp__cuda_kept_say(const dp__cuda_kept *kept, const char *what, const char *path)
{
    char text[DP__TEXT_BYTES];
    snprintf(text, sizeof text, DP__CUDA_IS ": compiled kernels are not kept: %s %.300s: %s", what,
             path, dp__os_why_text(dp__os_why()));
    kept->host->log(kept->host, DP_LOG_INFO, text);
}

/* $XDG_CACHE_HOME counts if it begins at the root, as its specification says. */
static bool dp__cuda_kept_folder(char *folder)
{
    const char *cache = dp__os_env("XDG_CACHE_HOME"), *home = dp__os_env("HOME");
    int length = 0;
    if (cache != NULL && cache[0] == '/')
        length = snprintf(folder, DP__CUDA_KEPT_PATH, "%s/dp.h", cache);
    else if (home != NULL && home[0] == '/')
        length = snprintf(folder, DP__CUDA_KEPT_PATH, "%s/.cache/dp.h", home);
    return length > 0 && length < DP__CUDA_KEPT_PATH;
}

/* Whether a variable turns off what it is about; otherwise things are as usual. */
static bool dp__cuda_is_off(const dp_host *host, const char *variable, const char *usual)
{
    const char *wish = dp__os_env(variable);
    char text[160];
    if (wish == NULL || strcmp(wish, "off") == 0)
        return wish != NULL;
    snprintf(text, sizeof text, "%s is '%.60s', not off: %s", variable, wish, usual);
    host->log(host, DP_LOG_WARN, text);
    return false;
}

/* False: nothing is kept. */
static bool dp__cuda_kept_open(const dp_host *host, const dp__cuda_target *target,
                               dp__cuda_kept *out)
{
    int version[2] = {0, 0};
    out->host = host;
    out->lock = -1;
    if (dp__cuda_is_off(host, "DP_CACHE", "compiled kernels are kept"))
        return false;
    if (!dp__cuda_kept_folder(out->folder)) {
        host->log(host, DP_LOG_INFO,
                  DP__CUDA_IS
                  ": compiled kernels are not kept: neither $XDG_CACHE_HOME nor $HOME is a "
                  "path of less than 1000 bytes");
        return false;
    }
    (void)dp__cuda.nvrtcVersion(&version[0], &version[1]);
    out->key = dp__hash(dp__hash_first, target->name, strlen(target->name));
    out->key = dp__hash(out->key, version, sizeof version);
    for (size_t i = 0; i < sizeof dp__cuda_texts / sizeof *dp__cuda_texts; i++)
        out->key = dp__hash(out->key, dp__cuda_texts[i], strlen(dp__cuda_texts[i]));
    snprintf(out->path, sizeof out->path, "%s/%s-" DP__CUDA_IS "%d.%d-%016llx", out->folder,
             target->name, version[0], version[1], (unsigned long long)out->key);
    return true;
}

/* Returns true if the head is right, and the file as long as it says. What it holds will run. */
static bool dp__cuda_kept_fits(const dp__cuda_kept *kept, int file, uint64_t bytes,
                               dp__cuda_kept_head *head)
{
    return bytes > sizeof *head && dp__os_file_get_at(file, head, sizeof *head, 0) &&
           memcmp(head->what, dp__cuda_kept_what, sizeof head->what) == 0 &&
           head->key == kept->key && head->bytes == bytes - sizeof *head;
}

/* False: it is not there, or not good. */
static bool dp__cuda_kept_get(const dp__cuda_kept *kept, dp__cuda_image *out)
{
    const dp_host *host = kept->host;
    dp__cuda_kept_head head;
    uint64_t bytes = 0;
    int file = dp__os_kept_open(kept->path, &bytes);
    *out = (dp__cuda_image){.data = NULL};
    if (file < 0)
        return false;
    if (dp__cuda_kept_fits(kept, file, bytes, &head))
        out->data = host->alloc(host, head.bytes, 16);
    bool good = out->data != NULL && dp__os_file_get_at(file, out->data, head.bytes, sizeof head) &&
                dp__hash(dp__hash_first, out->data, head.bytes) == head.checksum;
    dp__os_close(file);
    if (good) {
        out->bytes = head.bytes;
        return true;
    }
    host->free(host, out->data);
    out->data = NULL;
    if (kept->lock < 0) /* else it was said before the lock */
        host->log(host, DP_LOG_INFO,
                  DP__CUDA_IS ": a damaged file of compiled kernels is made anew");
    return false;
}

/* The folder is there, and ours alone until dp__cuda_kept_close, if that can be had. */
static bool dp__cuda_kept_lock(dp__cuda_kept *kept)
{
    kept->lock = dp__os_kept_lock(kept->folder, DP__CUDA_KEPT_WAIT_MS);
    if (kept->lock < 0)
        dp__cuda_kept_say(kept, "no folder", kept->folder);
    return kept->lock >= 0;
}

static void dp__cuda_kept_close(dp__cuda_kept *kept)
{
    dp__os_kept_unlock(kept->lock);
    kept->lock = -1;
}

static void dp__cuda_kept_put(const dp__cuda_kept *kept, const dp__cuda_image *image)
{
    dp__cuda_kept_head head = {.key = kept->key,
                               .bytes = image->bytes,
                               .checksum = dp__hash(dp__hash_first, image->data, image->bytes)};
    memcpy(head.what, dp__cuda_kept_what, sizeof head.what);
    if (!dp__os_kept_put(kept->path, &head, sizeof head, image->data, image->bytes))
        dp__cuda_kept_say(kept, "writing", kept->path);
}

/* The kernels for this architecture, compiled now or before. */
static dp_status dp__cuda_kernels_of(const dp_host *host, int arch, dp__cuda_image *out)
{
    dp__cuda_target target;
    dp__cuda_kept kept;
    *out = (dp__cuda_image){.data = NULL};
    DP_TRY(dp__cuda_target_of(host, arch, &target));
    bool keeps = dp__cuda_kept_open(host, &target, &kept);
    if (keeps && dp__cuda_kept_get(&kept, out))
        return DP_OK;
    keeps = keeps && dp__cuda_kept_lock(&kept);
    dp_status status = DP_OK;
    if (!keeps || !dp__cuda_kept_get(&kept, out)) { /* another process was faster */
        status = dp__cuda_compile(host, &target, out);
        if (keeps && status == DP_OK)
            dp__cuda_kept_put(&kept, out);
    }
    dp__cuda_kept_close(&kept);
    return status;
}

/* ==== >>gpus =====================================================================================
   A physical GPU: its primary context and its kernels, shared by all devices on it. The thread's
   current device stays as it was: calls are made between enter and leave, which push the context
   and pop it, once where they are nested. Setting a device back would give a thread a context that
   it did not have. A launch needs the context of its stream, and an allocation that of its GPU;
   copies, events and waits go with any. In between captures of the user's forbid nothing.       */

enum {
    DP__CUDA_NESTED = 8, /* deepest: a collective, in it a pair's check, its other GPU, a launch */
    DP__CUDA_OPEN_MAX = 1024
};

typedef struct dp__cuda_code { /* the kernels for one kind of GPU; they run on all of these */
    int kind, users;
    cudaLibrary_t library;
    cudaKernel_t kernels[DP__CUDA_KERNEL_COUNT];
} dp__cuda_code;

typedef struct dp__cuda_gpu {
    int ordinal, users;
    int arch; /* 90: sm_90; 0x90a: gfx90a */
    int multiprocessors;
    size_t pitch_max;
    bool apart; /* it is not to read other GPUs */
    CUdevice device;
    char bus_id[32];
    CUuuid uuid; /* slices of one GPU (MIG) have one each, and the bus id of the whole */
    CUcontext context;
    struct dp__cuda_code *code;
    atomic_int reach[DP__CUDA_GPUS_MAX]; /* dp__cuda_reach: how it reads the others */
} dp__cuda_gpu;

static dp__lock dp__cuda_lock = DP__LOCK_INITIALIZER; /* for these, and for binding */
static dp__cuda_gpu dp__cuda_gpus[DP__CUDA_GPUS_MAX];
static dp__cuda_code dp__cuda_codes[DP__CUDA_GPUS_MAX];

/* The devices of all contexts: under the lock, but read without, before a kernel of the user's. */
static struct dp__cuda_dev *_Atomic dp__cuda_open_devs[DP__CUDA_OPEN_MAX];
static _Atomic uint64_t dp__cuda_open_end; /* behind it there was never any; above: of which fork */

static _Thread_local struct { /* what this thread has entered, the innermost last */
    const dp__cuda_gpu *gpu;
    int times;
    CUstreamCaptureMode mode; /* before */
} dp__cuda_inside[DP__CUDA_NESTED];
static _Thread_local int dp__cuda_depth;

/* While this thread captures, or another, CUDA forbids to allocate, to free, to ask for events and
   to wait, and breaks the capture if that is tried: but not to a thread in relaxed mode. */
static dp_status dp__cuda_enter(const dp__cuda_gpu *gpu)
{
    int depth = dp__cuda_depth;
    if (atomic_load_explicit(&dp__cuda_lost[gpu->ordinal], memory_order_relaxed))
        return dp_error(DP_ERR_DEVICE, DP__CUDA_IS " %d: the GPU is lost, since it faulted or hung",
                        gpu->ordinal);
    if (depth > 0 && dp__cuda_inside[depth - 1].gpu == gpu) {
        dp__cuda_inside[depth - 1].times++;
        return DP_OK;
    }
    DP_TRY(dp__cuda_check(DP__CUDA_PUSH, gpu->ordinal,
                          (cudaError_t)dp__cuda.call_cuCtxPushCurrent(gpu->context)));
    dp__cuda_inside[depth].gpu = gpu;
    dp__cuda_inside[depth].times = 1;
    dp__cuda_inside[depth].mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)dp__cuda.call_cuThreadExchangeStreamCaptureMode(&dp__cuda_inside[depth].mode);
    dp__cuda_depth++;
    return DP_OK;
}

/* The status of what was done in between; a failure of it wins. */
static dp_status dp__cuda_leave(const dp__cuda_gpu *gpu, dp_status status)
{
    CUcontext popped = NULL;
    if (--dp__cuda_inside[dp__cuda_depth - 1].times > 0)
        return status;
    (void)dp__cuda.call_cuThreadExchangeStreamCaptureMode(&dp__cuda_inside[--dp__cuda_depth].mode);
    CUresult pop = dp__cuda.call_cuCtxPopCurrent(&popped);
    return status != DP_OK ? status : dp__cuda_check(DP__CUDA_POP, gpu->ordinal, (cudaError_t)pop);
}

/* Where that was one call. */
static dp_status dp__cuda_leave_after(const dp__cuda_gpu *gpu, const char *fn, cudaError_t code)
{
    return dp__cuda_leave(gpu, dp__cuda_check(fn, gpu->ordinal, code));
}

static void (*dp__cuda_calm)(const dp_host *host); /* dp_nccl.h defines it */

/* Waits until collectives with other processes have ended, before memory is taken or given back:
   that may wait for GPUs, and these for other processes. */
static void dp__cuda_quiet(const dp_host *host)
{
    if (dp__cuda_calm != NULL)
        dp__cuda_calm(host);
}

static dp_status dp__cuda_attribute(int ordinal, enum cudaDeviceAttr what, int *out)
{
    *out = 0;
    return dp__cuda_check("cudaDeviceGetAttribute", ordinal,
                          dp__cuda.cudaDeviceGetAttribute(out, what, ordinal));
}

static void dp__cuda_code_drop(dp__cuda_code *code)
{
    if (code == NULL || --code->users > 0)
        return;
    if (code->library != NULL)
        (void)dp__cuda.cudaLibraryUnload(code->library);
    *code = (dp__cuda_code){0};
}

/* With the GPU's context. The code of another GPU of the same kind is used, if any. */
static dp_status dp__cuda_code_use(const dp_host *host, dp__cuda_gpu *gpu)
{
    int place = 0;
    dp__cuda_image image = {.data = NULL};
    while (dp__cuda_codes[place].users > 0 && dp__cuda_codes[place].kind != DP__CUDA_KIND(gpu))
        place++; /* there are not more of them than GPUs */
    dp__cuda_code *code = gpu->code = &dp__cuda_codes[place];
    if (code->users++ > 0)
        return DP_OK;
    code->kind = DP__CUDA_KIND(gpu);
    dp__cuda_quiet(host);
    dp_status status = dp__cuda_kernels_of(host, gpu->arch, &image);
    if (status == DP_OK)
        status = dp__cuda_check(
            "cudaLibraryLoadData", gpu->ordinal,
            dp__cuda.cudaLibraryLoadData(&code->library, image.data, NULL, NULL, 0, NULL, NULL, 0));
    for (int i = 0; i < DP__CUDA_KERNEL_COUNT && status == DP_OK; i++)
        status = dp__cuda_check(
            dp__cuda_names[i], gpu->ordinal,
            dp__cuda.cudaLibraryGetKernel(&code->kernels[i], code->library, dp__cuda_names[i]));
    host->free(host, image.data);
    if (status != DP_OK) { /* nothing that others of its kind would find */
        dp__cuda_code_drop(code);
        (void)dp__cuda.cudaGetLastError();
        gpu->code = NULL;
    }
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

#if !defined(DP__HIP)
enum { DP__CUDA_OLDEST = 75 };

static dp_status dp__cuda_capability(int ordinal, int *out)
{
    int major = 0, minor = 0;
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrComputeCapabilityMajor, &major));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrComputeCapabilityMinor, &minor));
    *out = major * 10 + minor;
    return DP_OK;
}

/* What its kernels are compiled for. With CUDA_MODULE_LOADING=EAGER the driver loads a library onto
   each GPU that the process uses, then or later: those of several architectures have text in
   common, for the oldest. */
static dp_status dp__cuda_arch_of(int ordinal, int *out)
{
    const char *loading = dp__os_env("CUDA_MODULE_LOADING");
    int count = 0, own = 0;
    DP_TRY(dp__cuda_capability(ordinal, &own));
    *out = own;
    if (own < DP__CUDA_OLDEST)
        return dp_error(DP_ERR_UNSUPPORTED, "cuda %d: architecture %d.%d, 7.5 is needed", ordinal,
                        own / 10, own % 10);
    if (loading == NULL || strcmp(loading, "EAGER") != 0)
        return DP_OK;
    DP_TRY(dp__cuda_gpu_count(&count));
    for (int i = 0; i < count; i++) {
        int arch = 0;
        DP_TRY(dp__cuda_capability(i, &arch));
        if (arch >= DP__CUDA_OLDEST && arch != own) {
            int least = *out % DP__CUDA_TEXT;
            *out = DP__CUDA_TEXT + (arch < least ? arch : least);
        }
    }
    return DP_OK;
}
#endif

static dp_status dp__cuda_gpu_look(dp__cuda_gpu *gpu)
{
    int pitch = 0, ordinal = gpu->ordinal;
    DP_TRY(dp__cuda_arch_of(ordinal, &gpu->arch));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrMultiProcessorCount, &gpu->multiprocessors));
    DP_TRY(dp__cuda_attribute(ordinal, cudaDevAttrMaxPitch, &pitch));
    gpu->pitch_max = (size_t)pitch;
    DP_TRY(dp__cuda_check(
        "cudaDeviceGetPCIBusId", ordinal,
        dp__cuda.cudaDeviceGetPCIBusId(gpu->bus_id, (int)sizeof gpu->bus_id, ordinal)));
    return dp__cuda_check("cuDeviceGetUuid", ordinal,
                          (cudaError_t)dp__cuda.call_cuDeviceGetUuid(&gpu->uuid, gpu->device));
}

/* The context and the kernels of a lost GPU stay. */
static void dp__cuda_gpu_drop(dp__cuda_gpu *gpu)
{
    bool lost = atomic_load(&dp__cuda_lost[gpu->ordinal]);
    if (gpu->code != NULL && dp__cuda_enter(gpu) == DP_OK) {
        dp__cuda_code_drop(gpu->code);
        (void)dp__cuda_leave_after(gpu, "cudaLibraryUnload", dp__cuda.cudaGetLastError());
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
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    DP_TRY(dp__cuda_check("cuDeviceGet", gpu->ordinal,
                          (cudaError_t)dp__cuda.call_cuDeviceGet(&gpu->device, gpu->ordinal)));
    DP_TRY(dp__cuda_gpu_look(gpu));
    gpu->apart = dp__cuda_is_off(host, "DP_PEERS", "GPUs copy directly from each other");
    (void)dp__cuda.call_cuThreadExchangeStreamCaptureMode(&mode);
    CUresult code = dp__cuda.call_cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
    (void)dp__cuda.call_cuThreadExchangeStreamCaptureMode(&mode);
    DP_TRY(dp__cuda_check("cuDevicePrimaryCtxRetain", gpu->ordinal, (cudaError_t)code));
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, dp__cuda_load(host, gpu));
}

static dp_status dp__cuda_gpu_use(const dp_host *host, int ordinal, dp__cuda_gpu **out)
{
    int count = 0;
    dp__cuda_gpu *gpu = &dp__cuda_gpus[ordinal];
    DP_TRY(dp__cuda_ready());
    DP_TRY(dp__cuda_gpu_count(&count));
    if (ordinal >= count)
        return dp_error(DP_ERR_NO_DEVICE, DP__CUDA_IS ": no GPU %d, there are %d", ordinal, count);
    if (atomic_load(&dp__cuda_lost[ordinal]))
        return dp_error(DP_ERR_NO_DEVICE,
                        DP__CUDA_IS ": GPU %d is lost to this process, since it faulted or hung",
                        ordinal);
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

enum { DP__CUDA_SLOTS = 4, DP__CUDA_SLOT_BYTES = 2 << 20, DP__CUDA_SLOT_STREAMS = 4 };

typedef struct dp__cuda_pending { /* the copies of one stream from or to a slot */
    cudaEvent_t done;             /* the last of them */
    cudaStream_t stream;
    bool busy;
} dp__cuda_pending;

typedef struct dp__cuda_slot { /* of the ring of >>staging */
    void *data;
    size_t used;         /* bytes that pieces have had since it was empty */
    cudaStream_t writer; /* that alone found it empty; NULL: all did */
    dp__cuda_pending pending[DP__CUDA_SLOT_STREAMS];
} dp__cuda_slot;

typedef struct dp__cuda_dev {
    dp_dev base;
    dp__cuda_gpu *gpu;
    dp__lock lock; /* for the slabs */
    dp__cuda_slab *slabs;
    dp__lock ring; /* for what follows: who has it may wait for the GPU, as copies do */
    dp__cuda_slot slots[DP__CUDA_SLOTS];
    unsigned slot;           /* that pieces come from now */
    cudaEvent_t begun;       /* what a stream had to do before it reads another GPU */
    cudaStream_t out;        /* copies from this GPU to others leave here; under no lock, */
    cudaEvent_t mark;        /* as whoever waits for a later mark of it waits for an earlier one */
    dp_comm *_Atomic failed; /* one that has let go of streams: what was waited for is void */
} dp__cuda_dev;
_Static_assert(offsetof(dp__cuda_dev, base) == 0, "a dp_dev is the head of its device");

typedef struct dp__cuda_stream {
    dp_stream base;
    cudaStream_t native;
    void *scratch; /* for sums; DP__CUDA_CHUNKS pairs of double */
    bool adopted;
} dp__cuda_stream;
_Static_assert(offsetof(dp__cuda_stream, base) == 0, "a dp_stream is the head of its stream");

typedef struct dp__cuda_event {
    dp_event base;
    cudaEvent_t native;
    atomic_bool recorded, captured; /* captured: the newest record is */
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

static const dp__cuda_stream *dp__cuda_stream_of(const dp_stream *stream)
{
    return (const dp__cuda_stream *)stream;
}

static dp_status dp__cuda_slab_make(dp__cuda_dev *dev, size_t bytes, dp__cuda_slab **out)
{
    const dp_host *host = dev->base.host;
    dp__cuda_slab *slab = host->alloc(host, sizeof *slab, _Alignof(dp__cuda_slab));
    void *data = NULL;
    if (slab == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS " %d: no memory on the host",
                        dev->gpu->ordinal);
    dp__cuda_quiet(host);
    dp_status status = dp__cuda_enter(dev->gpu);
    if (status == DP_OK)
        status = dp__cuda_leave_after(dev->gpu, "cudaMalloc", dp__cuda.cudaMalloc(&data, bytes));
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
    dp__cuda_quiet(dev->base.host);
    if (dp__cuda_enter(dev->gpu) == DP_OK)
        (void)dp__cuda_leave_after(dev->gpu, "cudaFree", dp__cuda.cudaFree(slab->data));
    dev->base.host->free(dev->base.host, slab);
}

/* Large blocks have a slab of their own. */
static dp_status dp__cuda_cut(dp__cuda_dev *dev, size_t bytes, void **out)
{
    dp__cuda_slab *slab = dev->slabs;
    bytes = dp__align_up(bytes, DP__CUDA_ALIGN);
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
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS " %d: no %zu bytes", own->gpu->ordinal,
                        bytes);
    dp__lock_enter(&own->lock);
    dp_status status = dp__cuda_cut(own, bytes, out);
    dp__lock_leave(&own->lock);
    return status;
}

/* What leads to the slab that these bytes are in, or to the end of the list. */
static dp__cuda_slab **dp__cuda_slab_of(dp__cuda_dev *dev, const char *data)
{
    dp__cuda_slab **link = &dev->slabs;
    while (*link != NULL && (data < (*link)->data || data >= (*link)->data + (*link)->bytes))
        link = &(*link)->next;
    return link;
}

static void dp__cuda_free(dp_dev *dev, void *data, size_t bytes)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    (void)bytes;
    dp__lock_enter(&own->lock);
    dp__cuda_slab **link = dp__cuda_slab_of(own, data);
    if (*link != NULL && --(*link)->live == 0)
        dp__cuda_slab_drop(own, link);
    dp__lock_leave(&own->lock);
}

static dp_status dp__cuda_host_alloc(dp_dev *dev, size_t bytes, void **out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    dp__cuda_quiet(dev->host);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave_after(gpu, "cudaHostAlloc",
                                dp__cuda.cudaHostAlloc(out, bytes, cudaHostAllocPortable));
}

static void dp__cuda_host_free(dp_dev *dev, void *data, size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    (void)bytes;
    dp__cuda_quiet(dev->host);
    if (dp__cuda_enter(gpu) == DP_OK)
        (void)dp__cuda_leave_after(gpu, "cudaFreeHost", dp__cuda.cudaFreeHost(data));
}

/* ==== >>staging ==================================================================================
   The driver copies pageable memory itself, a small piece at a time, and blocks. So what is not
   pinned goes through a ring of pinned slots, filled by all idle threads. A long copy has one slot
   after another, short ones share a slot; it is used again when it is full and its events say so,
   one for each stream that used it. Under the ring's lock.

   Between GPUs that do not reach each other the ring is the reader's, and nothing waits but
   streams: so both directions of a pair, and any number of pairs, are under way at once.        */

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
    size_t each = dp__align_up(fill->bytes / (size_t)fill->parts, 64);
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
static bool dp__cuda_pins_byte(const void *host)
{
    struct cudaPointerAttributes attributes = {.type = cudaMemoryTypeUnregistered};
    if (dp__cuda.cudaPointerGetAttributes(&attributes, host) != cudaSuccess)
        (void)dp__cuda.cudaGetLastError();
    return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
}

/* Whether an allocation that has the first of these bytes has all of them. Where the driver does
   not say how far it goes, the last byte has to do. */
static bool dp__cuda_pins_all(const char *host, size_t bytes)
{
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)host, first = at;
    size_t size = 0;
    CUresult found =
        dp__cuda.call_cuPointerGetAttribute(&first, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at);
    if (found == CUDA_SUCCESS)
        found = dp__cuda.call_cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at);
    if (found != CUDA_SUCCESS || at < first || at - first >= size)
        return dp__cuda_pins_byte(host + bytes - 1);
    return size - (size_t)(at - first) >= bytes;
}

/* All of it, in one piece: CUDA refuses a copy that goes from one allocation into the next, and one
   of memory that is pinned in part. Such a copy goes through the ring. */
static bool dp__cuda_is_pinned(const dp__cuda_gpu *gpu, const void *host, size_t bytes)
{
    if (bytes == 0 || dp__cuda_enter(gpu) != DP_OK)
        return false;
    bool pinned = dp__cuda_pins_byte(host) && dp__cuda_pins_all(host, bytes);
    return dp__cuda_leave(gpu, DP_OK) == DP_OK && pinned;
}

static dp_status dp__cuda_record(const dp__cuda_gpu *gpu, cudaEvent_t mark, cudaStream_t stream)
{
    return dp__cuda_check("cudaEventRecord", gpu->ordinal, dp__cuda.cudaEventRecord(mark, stream));
}

static dp_status dp__cuda_await(const dp__cuda_gpu *gpu, cudaStream_t stream, cudaEvent_t mark)
{
    return dp__cuda_check("cudaStreamWaitEvent", gpu->ordinal,
                          dp__cuda.cudaStreamWaitEvent(stream, mark, 0));
}

/* Where a stream's copies from or to the slot are noted; -1: too many streams use it already. A new
   stream may have the address of one that is gone: its work comes after that one's. */
static int dp__cuda_pending_of(const dp__cuda_slot *slot, cudaStream_t stream)
{
    int place = -1;
    for (int i = 0; i < DP__CUDA_SLOT_STREAMS; i++) {
        if (slot->pending[i].busy && slot->pending[i].stream == stream)
            return i;
        if (!slot->pending[i].busy)
            place = i;
    }
    return place;
}

static dp_status dp__cuda_pending_wait(const dp__cuda_gpu *gpu, dp__cuda_pending *pending)
{
    if (pending->busy)
        DP_TRY(dp__cuda_check("cudaEventSynchronize", gpu->ordinal,
                              dp__cuda.cudaEventSynchronize(pending->done)));
    pending->busy = false;
    return DP_OK;
}

/* What comes next in the slot comes after all copies that used it: to the host, or, if it is not
   NULL, to the stream that writes there. */
static dp_status dp__cuda_slot_clear(const dp__cuda_gpu *gpu, dp__cuda_slot *slot,
                                     cudaStream_t writer)
{
    for (int i = 0; i < DP__CUDA_SLOT_STREAMS; i++)
        if (writer == NULL)
            DP_TRY(dp__cuda_pending_wait(gpu, &slot->pending[i]));
        else if (slot->pending[i].busy)
            DP_TRY(dp__cuda_await(gpu, writer, slot->pending[i].done));
    for (int i = 0; i < DP__CUDA_SLOT_STREAMS; i++)
        slot->pending[i].busy = false;
    slot->used = 0;
    slot->writer = writer;
    return DP_OK;
}

typedef struct dp__cuda_piece { /* of the ring, for one copy */
    char *data;
    dp__cuda_pending *pending;
} dp__cuda_piece;

/* From the slot in use, if it was cleared for this writer too, else from the one that was used
   longest ago, when all copies that used it are done: see dp__cuda_slot_clear. Each piece has pages
   of its own: none is with a copy and with the host. */
static dp_status dp__cuda_piece_take(dp__cuda_dev *dev, size_t bytes, cudaStream_t stream,
                                     cudaStream_t writer, dp__cuda_piece *out)
{
    dp__cuda_slot *slot = &dev->slots[dev->slot];
    int place = dp__cuda_pending_of(slot, stream);
    bool clear = slot->writer == NULL || slot->writer == writer;
    if (place < 0 || !clear || DP__CUDA_SLOT_BYTES - slot->used < bytes) {
        unsigned next = (dev->slot + 1) % DP__CUDA_SLOTS;
        slot = &dev->slots[next];
        DP_TRY(dp__cuda_slot_clear(dev->gpu, slot, writer));
        dev->slot = next;
        place = 0;
    }
    out->pending = &slot->pending[place];
    out->data = (char *)slot->data + slot->used;
    slot->used += dp__align_up(bytes, 4096);
    return DP_OK;
}

static dp_status dp__cuda_move(const dp__cuda_gpu *gpu, void *dst, const void *src, size_t bytes,
                               enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return dp__cuda_check("cudaMemcpyAsync", gpu->ordinal,
                          dp__cuda.cudaMemcpyAsync(dst, src, bytes, kind, stream));
}

/* The piece is the copy's now. It is noted even if that failed; if it cannot be, that is over. */
static dp_status dp__cuda_piece_use(const dp__cuda_gpu *gpu, dp__cuda_pending *pending,
                                    dp_status status, cudaStream_t stream)
{
    dp_status marked = dp__cuda_record(gpu, pending->done, stream);
    if (marked == DP_OK) {
        *pending = (dp__cuda_pending){pending->done, stream, true};
    } else { /* what was noted before still holds */
        (void)dp__cuda.cudaStreamSynchronize(stream);
        (void)dp__cuda.cudaGetLastError();
    }
    return status != DP_OK ? status : marked;
}

static size_t dp__cuda_piece_bytes(size_t left)
{
    return left < DP__CUDA_SLOT_BYTES ? left : DP__CUDA_SLOT_BYTES;
}

static dp_status dp__cuda_stage_in(dp__cuda_dev *dev, char *dst, const char *host, size_t bytes,
                                   cudaStream_t stream)
{
    for (size_t at = 0; at < bytes; at += DP__CUDA_SLOT_BYTES) {
        size_t some = dp__cuda_piece_bytes(bytes - at);
        dp__cuda_piece piece;
        DP_TRY(dp__cuda_piece_take(dev, some, stream, NULL, &piece));
        dp__cuda_fill_all(dev->base.host, piece.data, host + at, some);
        dp_status status =
            dp__cuda_move(dev->gpu, dst + at, piece.data, some, cudaMemcpyHostToDevice, stream);
        DP_TRY(dp__cuda_piece_use(dev->gpu, piece.pending, status, stream));
    }
    return DP_OK;
}

/* As many pieces as there are slots are under way at once; the oldest is waited for and emptied.
   None shares a slot with another: all but the last fill theirs. */
static dp_status dp__cuda_stage_out(dp__cuda_dev *dev, char *host, const char *src, size_t bytes,
                                    cudaStream_t stream)
{
    dp__cuda_piece pieces[DP__CUDA_SLOTS];
    size_t count = (bytes + DP__CUDA_SLOT_BYTES - 1) / DP__CUDA_SLOT_BYTES;
    for (size_t i = 0; i < count + DP__CUDA_SLOTS; i++) {
        dp__cuda_piece *piece = &pieces[i % DP__CUDA_SLOTS];
        if (i >= DP__CUDA_SLOTS) {
            size_t at = (i - DP__CUDA_SLOTS) * DP__CUDA_SLOT_BYTES;
            DP_TRY(dp__cuda_pending_wait(dev->gpu, piece->pending));
            dp__cuda_fill_all(dev->base.host, host + at, piece->data,
                              dp__cuda_piece_bytes(bytes - at));
        }
        if (i < count) {
            size_t at = i * DP__CUDA_SLOT_BYTES, some = dp__cuda_piece_bytes(bytes - at);
            DP_TRY(dp__cuda_piece_take(dev, some, stream, NULL, piece));
            dp_status status = dp__cuda_move(dev->gpu, piece->data, src + at, some,
                                             cudaMemcpyDeviceToHost, stream);
            DP_TRY(dp__cuda_piece_use(dev->gpu, piece->pending, status, stream));
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
    dp__cuda_piece piece;
    DP_TRY(dp__cuda_piece_take(dev, bytes, stream, from->out, &piece));
    dp_status status =
        dp__cuda_move(from->gpu, piece.data, src, bytes, cudaMemcpyDeviceToHost, from->out);
    if (status == DP_OK)
        status = dp__cuda_follow(from->gpu, stream, from->mark, from->out);
    if (status == DP_OK)
        status = dp__cuda_move(dev->gpu, dst, piece.data, bytes, cudaMemcpyHostToDevice, stream);
    if (status != DP_OK) /* the copy out may not be covered by the piece's event */
        (void)dp__cuda.cudaStreamSynchronize(from->out);
    return dp__cuda_piece_use(dev->gpu, piece.pending, status, stream);
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

/* Which memory of the host is near: as CUDA says, or the system. */
static int dp__cuda_node(const dp__cuda_gpu *gpu)
{
    int node = -1;
    cudaError_t code = dp__cuda.cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu->ordinal);
    if (code != cudaSuccess)
        (void)dp__cuda.cudaGetLastError(); /* not knowing is no failure */
    return code == cudaSuccess && node >= 0 ? node : dp__os_node_of(gpu->bus_id);
}

static dp_status dp__cuda_ring_fill(dp__cuda_dev *dev)
{
    for (int i = 0; i < DP__CUDA_SLOTS; i++) {
        DP_TRY(dp__cuda_host_alloc(&dev->base, DP__CUDA_SLOT_BYTES, &dev->slots[i].data));
        for (int k = 0; k < DP__CUDA_SLOT_STREAMS; k++)
            DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &dev->slots[i].pending[k].done));
    }
    return DP_OK;
}

static dp_status dp__cuda_ring_open(dp__cuda_dev *dev)
{
    dp__os_near before;
    DP_TRY(dp__cuda_native_stream(dev->gpu->ordinal, 1, &dev->out));
    DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &dev->mark));
    DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &dev->begun));
    dp__os_near_begin(dp__cuda_node(dev->gpu), &before);
    dp_status status = dp__cuda_ring_fill(dev);
    dp__os_near_end(&before);
    return status;
}

static void dp__cuda_ring_close(dp__cuda_dev *dev)
{
    for (int i = 0; i < DP__CUDA_SLOTS; i++) {
        dp__cuda_slot *slot = &dev->slots[i];
        for (int k = 0; k < DP__CUDA_SLOT_STREAMS; k++) {
            (void)dp__cuda_pending_wait(dev->gpu, &slot->pending[k]);
            if (slot->pending[k].done != NULL)
                (void)dp__cuda.cudaEventDestroy(slot->pending[k].done);
        }
        if (slot->data != NULL)
            (void)dp__cuda.cudaFreeHost(slot->data);
    }
    if (dev->mark != NULL)
        (void)dp__cuda.cudaEventDestroy(dev->mark);
    if (dev->begun != NULL)
        (void)dp__cuda.cudaEventDestroy(dev->begun);
    if (dev->out != NULL)
        (void)dp__cuda.cudaStreamDestroy(dev->out);
    (void)dp__cuda.cudaGetLastError();
}

/* ==== >>grid =====================================================================================
   How many blocks a launch has, whether its operands are made of packs, and which dims a copy has
   for its kernel. None of it changes a result.                                                  */

enum {
    DP__CUDA_BLOCKS = 32,       /* of a launch for each multiprocessor; 4 to 8 run at a time */
    DP__CUDA_COPY_MAX = 1 << 26 /* elements of a launch of `copy`, which numbers them in 32 bits */
};

static dp_status dp__cuda_launch(const dp_stream *stream, int kernel, uint64_t blocks, void *params)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    uint64_t most = (uint64_t)gpu->multiprocessors * DP__CUDA_BLOCKS;
    void *arguments[] = {params};
    dim3 grid = {(unsigned)(blocks < most ? blocks : most), 1, 1};
    dim3 block = {DP__CUDA_LANES, 1, 1};
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave_after(gpu, dp__cuda_names[kernel],
                                dp__cuda.cudaLaunchKernel((const void *)gpu->code->kernels[kernel],
                                                          grid, block, arguments, 0,
                                                          dp__cuda_stream_of(stream)->native));
}

/* One thread per pack, or per element if there are none: what is small is spread over the GPU
   before a thread gets a second one. */
static dp_status dp__cuda_launch_each(const dp_stream *stream, int kernel,
                                      struct dp__cuda_params *params)
{
    uint64_t threads = params->packs > 0 ? params->packs : params->count;
    uint64_t blocks = (threads + DP__CUDA_LANES - 1) / DP__CUDA_LANES;
    return dp__cuda_launch(stream, kernel, blocks, params);
}

/* The size of chunks depends only on the count. */
static dp_status dp__cuda_launch_sums(const dp_stream *stream, int kernel,
                                      struct dp__cuda_params *params)
{
    const uint64_t least = 4 << 10, all = DP__CUDA_CHUNKS * least;
    params->chunk = (params->count + all - 1) / all * least;
    params->chunk_count = (params->count + params->chunk - 1) / params->chunk;
    params->scratch = dp__cuda_stream_of(stream)->scratch;
    DP_TRY(dp__cuda_launch(stream, kernel, params->chunk_count, params));
    return dp__cuda_launch(stream, DP__CUDA_sums_end, 1, params);
}

/* Packs of `each` elements, if the first so many inputs and outputs all begin at one. */
static uint64_t dp__cuda_packs(const struct dp__cuda_params *params, size_t in_count,
                               size_t out_count, uint64_t each)
{
    uintptr_t together = 0;
    for (size_t i = 0; i < in_count; i++)
        together |= (uintptr_t)params->in[i];
    for (size_t i = 0; i < out_count; i++)
        together |= (uintptr_t)params->out[i];
    return together % 16 == 0 ? params->count / each : 0;
}

/* The bits of an element, again and again. */
static uint64_t dp__cuda_repeated(uint64_t bits, size_t width)
{
    for (; width < sizeof bits; width *= 2)
        bits = (bits & ((UINT64_C(1) << 8 * width) - 1)) | bits << 8 * width;
    return bits;
}

/* Leave out dims of one element, and make one of neighbours that lie as one on both sides. */
static void dp__cuda_merge(struct dp__cuda_params *params)
{
    int last = -1;
    for (int d = 0; d < params->ndim; d++) {
        long long shape = params->shape[d], in_shape = params->in_shape[d];
        if (shape == 1 && in_shape == 1)
            continue;
        if (last < 0 || in_shape != shape ||
            params->in_stride[last] != params->in_stride[d] * shape ||
            params->out_stride[last] != params->out_stride[d] * shape) {
            last++;
            params->shape[last] = params->in_shape[last] = 1;
        }
        params->shape[last] *= shape;
        params->in_shape[last] *= in_shape;
        params->in_stride[last] = params->in_stride[d];
        params->out_stride[last] = params->out_stride[d];
    }
    params->ndim = last + 1;
}

static bool dp__cuda_has_rows(const struct dp__cuda_params *params)
{
    int last = params->ndim - 1;
    return last >= 0 && params->in_stride[last] == 1 && params->out_stride[last] == 1;
}

/* The widest elements that rows, and the steps between them, are made of. */
static void dp__cuda_widen(struct dp__cuda_params *params)
{
    int last = params->ndim - 1;
    uint64_t together = (uint64_t)(uintptr_t)params->in[0] | (uint64_t)(uintptr_t)params->out[0];
    if (!dp__cuda_has_rows(params))
        return;
    for (int d = 0; d < last; d++)
        together |= (uint64_t)(params->in_stride[d] | params->out_stride[d]) * params->width;
    together |= (uint64_t)(params->in_shape[last] | params->shape[last]) * params->width;
    for (; params->width < 16 && together % (2 * params->width) == 0; params->width *= 2) {
        for (int d = 0; d < last; d++) {
            params->in_stride[d] /= 2;
            params->out_stride[d] /= 2;
        }
        params->in_shape[last] /= 2;
        params->shape[last] /= 2;
        params->count /= 2;
    }
}

/* For division by shape[d] without one: Granlund and Montgomery, 1994. */
static void dp__cuda_divide(struct dp__cuda_params *params)
{
    for (int d = 1; d < params->ndim; d++) {
        uint64_t by = (uint64_t)params->shape[d], power = 1;
        for (params->shift[d] = 0; power < by; power *= 2)
            params->shift[d]++;
        params->magic[d] = (unsigned)(((power - by) << 32) / by + 1);
    }
}

/* What has more elements than a launch may number is halved, in its first dim. */
static dp_status dp__cuda_launch_parts(const dp_stream *stream,
                                       const struct dp__cuda_params *params)
{
    struct dp__cuda_params part = *params;
    int d = 0;
    if (params->count <= DP__CUDA_COPY_MAX) {
        dp__cuda_divide(&part);
        return dp__cuda_launch_each(stream, DP__CUDA_copy, &part);
    }
    while (params->shape[d] == 1)
        d++;
    const long long half = params->shape[d] / 2, inside = params->in_shape[d];
    part.shape[d] = half;
    part.in_shape[d] = inside < half ? inside : half;
    part.count = params->count / (uint64_t)params->shape[d] * (uint64_t)half;
    DP_TRY(dp__cuda_launch_parts(stream, &part));
    part.count = params->count - part.count;
    part.shape[d] = params->shape[d] - half;
    part.in_shape[d] = inside < half ? 0 : inside - half;
    part.out[0] = (char *)part.out[0] + half * part.out_stride[d] * part.width;
    if (inside > half)
        part.in[0] = (const char *)part.in[0] + half * part.in_stride[d] * part.width;
    return dp__cuda_launch_parts(stream, &part);
}

/* ==== >>peers ====================================================================================
   GPUs that say they reach each other's memory have been seen to read other bytes, or to hang. So a
   pair is checked at its first copy; if it does not pass, copies go through the host.           */

enum dp__cuda_reach { DP__CUDA_UNKNOWN, DP__CUDA_DIRECT, DP__CUDA_STAGED };
#if !defined(DP__CUDA_CHECK_BYTES)
#define DP__CUDA_CHECK_BYTES (8 << 20) /* simulated GPUs have less */
#endif
enum { DP__CUDA_CHECK_COUNT = DP__CUDA_CHECK_BYTES / 4 + 3, DP__CUDA_CHECK_ROUNDS = 3 };
enum { DP__CUDA_CHECK_SECONDS = 5, DP__CUDA_RESULTS = 2 };

typedef struct dp__cuda_side { /* one GPU's side of a check */
    dp__cuda_stream stream;
    cudaEvent_t event;
    unsigned *words;
    double *results; /* after the words and the stream's scratch; one per way to read */
    void *wrong;     /* the reader's results, where the host can read them */
} dp__cuda_side;

static const dp__cuda_gpu *dp__cuda_side_gpu(const dp__cuda_side *side)
{
    return dp__cuda_gpu_of(side->stream.base.dev);
}

static dp_status dp__cuda_side_open(dp__cuda_side *side)
{
    size_t words = dp__align_up((size_t)DP__CUDA_CHECK_COUNT * 4, DP__CUDA_ALIGN);
    size_t scratch = 2 * sizeof(double) * DP__CUDA_CHUNKS;
    int ordinal = dp__cuda_side_gpu(side)->ordinal;
    void *block = NULL;
    dp__cuda_quiet(side->stream.base.dev->host);
    DP_TRY(dp__cuda_native_stream(ordinal, 0, &side->stream.native));
    DP_TRY(dp__cuda_native_event(ordinal, &side->event));
    DP_TRY(dp__cuda_check(
        "cudaMalloc", ordinal,
        dp__cuda.cudaMalloc(&block, words + scratch + DP__CUDA_RESULTS * sizeof(double))));
    side->words = block;
    side->stream.scratch = (char *)block + words;
    side->results = (void *)((char *)block + words + scratch);
    return DP_OK;
}

/* Of a GPU that is lost everything stays. */
static void dp__cuda_side_close(dp__cuda_side *side)
{
    const dp__cuda_gpu *gpu = dp__cuda_side_gpu(side);
    cudaStream_t stream = side->stream.native;
    if (dp__cuda_enter(gpu) != DP_OK)
        return;
    if (stream != NULL)
        (void)dp__cuda.cudaStreamSynchronize(stream);
    if (side->words != NULL)
        (void)dp__cuda.cudaFree(side->words);
    if (side->wrong != NULL)
        (void)dp__cuda.cudaFreeHost(side->wrong);
    if (side->event != NULL)
        (void)dp__cuda.cudaEventDestroy(side->event);
    if (stream != NULL)
        (void)dp__cuda.cudaStreamDestroy(stream);
    (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(gpu, DP_OK);
}

/* DP_ERR_TIMEOUT: it hangs. */
static dp_status dp__cuda_poll(const dp__cuda_side *side)
{
    uint64_t until = dp__os_after_ms(DP__CUDA_CHECK_SECONDS * 1000);
    for (;;) {
        bool late = dp__os_ms_until(until) == 0; /* this thread may have been stopped since */
        cudaError_t code = dp__cuda.cudaEventQuery(side->event);
        if (code != cudaErrorNotReady)
            return dp__cuda_check("cudaEventQuery", dp__cuda_side_gpu(side)->ordinal, code);
        (void)dp__cuda.cudaGetLastError(); /* "not ready" stays as well */
        if (late)
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
                                     .in_shape = {DP__CUDA_CHECK_COUNT},
                                     .in_stride = {1},
                                     .out_stride = {1},
                                     .alpha = 1};
    const dp_stream *stream = &reader->stream.base;
    int ordinal = dp__cuda_side_gpu(reader)->ordinal;
    DP_TRY(dp__cuda_launch_each(stream, DP__CUDA_fill, &params));
    if (by_kernel)
        DP_TRY(dp__cuda_launch_parts(stream, &params));
    else
        DP_TRY(dp__cuda_check("cudaMemcpyPeerAsync", ordinal,
                              dp__cuda.cudaMemcpyPeerAsync(reader->words, ordinal, from->words,
                                                           dp__cuda_side_gpu(from)->ordinal,
                                                           (size_t)DP__CUDA_CHECK_COUNT * 4,
                                                           reader->stream.native)));
    params.in[0] = reader->words;
    params.out[0] = reader->results + by_kernel;
    params.fill = seed;
    return dp__cuda_launch_sums(stream, DP__CUDA_differ, &params);
}

/* The host has seen the end of it before the next round begins. */
static dp_status dp__cuda_check_round(const dp__cuda_side *reader, const dp__cuda_side *from,
                                      uint64_t seed)
{
    const dp__cuda_gpu *gpu = dp__cuda_side_gpu(reader);
    cudaStream_t stream = reader->stream.native;
    const double *wrong = reader->wrong;
    struct dp__cuda_params params = {
        .out = {from->words}, .out_count = 1, .count = DP__CUDA_CHECK_COUNT, .fill = seed};
    DP_TRY(dp__cuda_launch_each(&from->stream.base, DP__CUDA_pattern, &params));
    DP_TRY(dp__cuda_follow(dp__cuda_side_gpu(from), stream, from->event, from->stream.native));
    DP_TRY(dp__cuda_read_over(reader, from, false, seed));
    DP_TRY(dp__cuda_read_over(reader, from, true, seed));
    DP_TRY(dp__cuda_move(gpu, reader->wrong, reader->results, DP__CUDA_RESULTS * sizeof *wrong,
                         cudaMemcpyDeviceToHost, stream));
    DP_TRY(dp__cuda_record(gpu, reader->event, stream));
    DP_TRY(dp__cuda_poll(reader));
    if (wrong[0] > 0 || wrong[1] > 0)
        return dp_error(DP_ERR_DEVICE, "%.0f of %d words arrive wrong", wrong[wrong[0] > 0 ? 0 : 1],
                        DP__CUDA_CHECK_COUNT);
    return DP_OK;
}

/* With the reader's context. A check that does not end loses both GPUs: what hangs in one cannot be
   waited for, and what the other gives back may still be read. */
static dp_status dp__cuda_check_pair(dp__cuda_side *reader, dp__cuda_side *from)
{
    const dp__cuda_gpu *gpu = dp__cuda_side_gpu(reader), *other = dp__cuda_side_gpu(from);
    DP_TRY(dp__cuda_side_open(reader));
    DP_TRY(dp__cuda_enter(other));
    DP_TRY(dp__cuda_leave(other, dp__cuda_side_open(from)));
    DP_TRY(dp__cuda_host_alloc(reader->stream.base.dev, DP__CUDA_RESULTS * sizeof(double),
                               &reader->wrong));
    dp_status status = DP_OK;
    for (int round = 0; round < DP__CUDA_CHECK_ROUNDS && status == DP_OK; round++)
        status = dp__cuda_check_round(reader, from, (uint64_t)(round + 1) * 0x5851f42d);
    if (status == DP_ERR_TIMEOUT) { /* all of it stays */
        atomic_store(&dp__cuda_lost[gpu->ordinal], true);
        atomic_store(&dp__cuda_lost[other->ordinal], true);
    }
    return status;
}

/* Whether the reader may use the other's memory, and reads the right bytes there. */
static dp_status dp__cuda_pair_open(dp__cuda_dev *reader, dp__cuda_dev *from)
{
    int can = 0, own = reader->gpu->ordinal, other = from->gpu->ordinal;
    dp__cuda_side sides[2] = {{.stream.base = {&reader->base}}, {.stream.base = {&from->base}}};
    if (reader->gpu->apart)
        return dp_error(DP_ERR_UNSUPPORTED, "DP_PEERS is off");
    DP_TRY(dp__cuda_check("cudaDeviceCanAccessPeer", own,
                          dp__cuda.cudaDeviceCanAccessPeer(&can, own, other)));
    if (!can)
        return dp_error(DP_ERR_UNSUPPORTED, "the driver says so");
    DP_TRY(dp__cuda_enter(reader->gpu));
    cudaError_t enabled = dp__cuda.cudaDeviceEnablePeerAccess(other, 0);
    dp_status status = DP_OK;
    if (enabled != cudaErrorPeerAccessAlreadyEnabled)
        status = dp__cuda_check("cudaDeviceEnablePeerAccess", own, enabled);
    else
        (void)dp__cuda.cudaGetLastError();
    if (status == DP_OK)
        status = dp__cuda_check_pair(&sides[0], &sides[1]);
    DP_TRY(dp__cuda_leave(reader->gpu, DP_OK));
    dp__cuda_side_close(&sides[0]);
    dp__cuda_side_close(&sides[1]);
    if (status != DP_OK && enabled == cudaSuccess && dp__cuda_enter(reader->gpu) == DP_OK)
        (void)dp__cuda_leave_after(reader->gpu, "cudaDeviceDisablePeerAccess",
                                   dp__cuda.cudaDeviceDisablePeerAccess(other));
    return status;
}

static dp_status dp__cuda_captures(const dp_stream *stream, bool *out)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t code = dp__cuda.cudaStreamIsCapturing(dp__cuda_stream_of(stream)->native, &capture);
    *out = capture != cudaStreamCaptureStatusNone;
    return dp__cuda_check("cudaStreamIsCapturing", dp__cuda_gpu_of(stream->dev)->ordinal, code);
}

/* Refuses what makes the host wait where the stream is captured, before anything of it is. */
static dp_status dp__cuda_uncaptured(const dp_stream *stream, const char *what)
{
    bool captured = false;
    DP_TRY(dp__cuda_captures(stream, &captured));
    return !captured
               ? DP_OK
               : dp_error(DP_ERR_STATE, DP__CUDA_IS " %d: %s cannot be captured, and its stream is",
                          dp__cuda_gpu_of(stream->dev)->ordinal, what);
}

/* Checks the pair at its first copy. Says so once, if that does not pass: a warning, unless it is
   as the user wants it. */
static dp_status dp__cuda_reach(dp__cuda_dev *dev, dp__cuda_dev *from)
{
    char text[DP__TEXT_BYTES];
    char first = dp__sentence_hide();
    int own = dev->gpu->ordinal, other = from->gpu->ordinal;
    dp_status status = dp__cuda_pair_open(dev, from);
    if (status == DP_ERR_TIMEOUT)
        return dp_error(DP_ERR_DEVICE, DP__CUDA_IS ": GPU %d does not finish reading GPU %d", own,
                        other);
    if (status != DP_OK) {
        snprintf(text, sizeof text,
                 DP__CUDA_IS
                 ": GPU %d does not read GPU %d directly (%.300s): copies go through the host",
                 own, other, dp_last_error());
        dev->base.host->log(dev->base.host, dev->gpu->apart ? DP_LOG_INFO : DP_LOG_WARN, text);
    }
    (void)dp__sentence_after(first, DP_OK);
    atomic_store(&dev->gpu->reach[other], status == DP_OK ? DP__CUDA_DIRECT : DP__CUDA_STAGED);
    return DP_OK;
}

/* Whether the device's GPU copies from the other's directly. */
static dp_status dp__cuda_pair(dp__cuda_dev *dev, dp__cuda_dev *from, bool *out)
{
    atomic_int *reach = &dev->gpu->reach[from->gpu->ordinal];
    dp_status status = DP_OK;
    dp__lock_enter(&dp__cuda_lock);
    if (atomic_load(reach) == DP__CUDA_UNKNOWN)
        status = dp__cuda_reach(dev, from);
    dp__lock_leave(&dp__cuda_lock);
    *out = atomic_load(reach) == DP__CUDA_DIRECT;
    return status;
}

static dp_status dp__cuda_reaches(dp_stream *stream, dp__cuda_dev *from, bool *out)
{
    dp__cuda_dev *dev = dp__cuda_dev_of(stream->dev);
    int reach = atomic_load(&dev->gpu->reach[from->gpu->ordinal]);
    *out = reach == DP__CUDA_DIRECT;
    if (reach != DP__CUDA_UNKNOWN)
        return DP_OK;
    DP_TRY(dp__cuda_uncaptured(stream, "the first copy from another GPU, which is checked,"));
    return dp__cuda_pair(dev, from, out);
}

/* ==== >>copies ===================================================================================
   The table's copies. Each enqueues on the stream; only a copy to memory that is not pinned waits,
   since it has to be copied on from the ring.                                                   */

/* A plain copy of any kind. */
static dp_status dp__cuda_plain(dp_stream *stream, void *dst, const void *src, size_t bytes,
                                enum cudaMemcpyKind kind)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(
        gpu, dp__cuda_move(gpu, dst, src, bytes, kind, dp__cuda_stream_of(stream)->native));
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
        dp__lock_enter(&dev->ring);
        status = stage(dev, dst, src, bytes, dp__cuda_stream_of(stream)->native);
        dp__lock_leave(&dev->ring);
    }
    return dp__cuda_leave(dev->gpu, status);
}

static dp_status dp__cuda_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    return dp__cuda_is_pinned(dp__cuda_gpu_of(stream->dev), host, bytes)
               ? dp__cuda_plain(stream, dst, host, bytes, cudaMemcpyHostToDevice)
               : dp__cuda_staged(stream, dst, host, bytes, dp__cuda_stage_in);
}

static dp_status dp__cuda_copy_out(dp_stream *stream, void *host, const void *src, size_t bytes)
{
    return dp__cuda_is_pinned(dp__cuda_gpu_of(stream->dev), host, bytes)
               ? dp__cuda_plain(stream, host, src, bytes, cudaMemcpyDeviceToHost)
               : dp__cuda_staged(stream, host, src, bytes, dp__cuda_stage_out);
}

static dp_status dp__cuda_copy(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    return dp__cuda_plain(stream, dst, src, bytes, cudaMemcpyDeviceToDevice);
}

static dp_status dp__cuda_staged_over(dp_stream *stream, void *dst, dp__cuda_dev *from,
                                      const void *src, size_t bytes)
{
    dp__cuda_dev *dev = dp__cuda_dev_of(stream->dev);
    cudaStream_t native = dp__cuda_stream_of(stream)->native;
    DP_TRY(dp__cuda_uncaptured(stream, "a copy from another GPU through the host"));
    dp__lock_enter(&dev->ring);
    dp_status status = dp__cuda_follow(dev->gpu, from->out, dev->begun, native);
    for (size_t at = 0; at < bytes && status == DP_OK; at += DP__CUDA_SLOT_BYTES)
        status = dp__cuda_over_piece(dev, from, (char *)dst + at, (const char *)src + at,
                                     dp__cuda_piece_bytes(bytes - at), native);
    dp__lock_leave(&dev->ring);
    return status;
}

/* With the context of any GPU. */
static dp_status dp__cuda_peer_move(dp_stream *stream, void *dst, dp_dev *src_dev, const void *src,
                                    size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    dp__cuda_dev *from = dp__cuda_dev_of(src_dev);
    bool reaches = false;
    if (from->gpu == gpu)
        return dp__cuda_move(gpu, dst, src, bytes, cudaMemcpyDeviceToDevice,
                             dp__cuda_stream_of(stream)->native);
    DP_TRY(dp__cuda_reaches(stream, from, &reaches));
    if (!reaches)
        return dp__cuda_staged_over(stream, dst, from, src, bytes);
    return dp__cuda_check("cudaMemcpyPeerAsync", gpu->ordinal,
                          dp__cuda.cudaMemcpyPeerAsync(dst, gpu->ordinal, src, from->gpu->ordinal,
                                                       bytes, dp__cuda_stream_of(stream)->native));
}

static dp_status dp__cuda_peer_copy(dp_stream *stream, void *dst, dp_dev *src_dev, const void *src,
                                    size_t bytes)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, dp__cuda_peer_move(stream, dst, src_dev, src, bytes));
}

/* ==== >>launch ===================================================================================
   A dp_kernel becomes one launch, a sum over all elements two.                                  */

/* What lies behind in_shape is filled: of a copy nothing, and a pad is dense. */
static void dp__cuda_dims(struct dp__cuda_params *params, const dp_kernel_args *args)
{
    bool pad = args->kernel == DP_KERNEL_PAD;
    long long dense = 1;
    params->ndim = args->ndim;
    for (int d = args->ndim - 1; d >= 0; d--) {
        params->shape[d] = args->shape[d];
        params->in_shape[d] = pad ? args->in_shape[d] : args->shape[d];
        params->in_stride[d] = args->in_stride[d];
        params->out_stride[d] = pad ? dense : args->out_stride[d];
        dense *= args->shape[d];
    }
    dp__cuda_merge(params);
    dp__cuda_widen(params);
}

static struct dp__cuda_params dp__cuda_params_of(const dp_kernel_args *args)
{
    struct dp__cuda_params params = {
        .count = args->count,
        .fill = dp__cuda_repeated(args->fill_bits, dp_dtype_bytes(args->dtype)),
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

/* Some of the channels, from `first` on: no more than there is scratch for. */
static dp_status dp__cuda_launch_some_channels(dp_stream *stream, int kernel, uint64_t first,
                                               uint64_t some, const struct dp__cuda_params *whole)
{
    struct dp__cuda_params params = *whole;
    uint64_t skipped = first * (uint64_t)params.shape[2];
    params.in[0] = (const char *)whole->in[0] + skipped * params.width;
    params.out[0] = (double *)whole->out[0] + first;
    params.count -= skipped; /* what is left of the input */
    params.chunk_count = some * params.fill;
    params.scratch = dp__cuda_stream_of(stream)->scratch;
    DP_TRY(dp__cuda_launch(stream, kernel, params.chunk_count, &params));
    params.count = some;
    return dp__cuda_launch_each(stream, DP__CUDA_channels_end, &params);
}

/* Chunks per channel: as many as there is scratch for, but not more than one thread adds up in a
   few rounds, with a size that depends only on the shape. More channels than that share the
   scratch, some after others. */
static dp_status dp__cuda_launch_channels(dp_stream *stream, int kernel, const int64_t *shape,
                                          struct dp__cuda_params *params)
{
    uint64_t all = (uint64_t)shape[0] * (uint64_t)shape[2], channels = (uint64_t)shape[1];
    uint64_t together = channels < DP__CUDA_CHUNKS ? channels : DP__CUDA_CHUNKS;
    uint64_t most = DP__CUDA_CHUNKS / together, each = (all + (4 << 10) - 1) / (4 << 10);
    most = most < 128 ? most : 128;
    params->fill = each < most ? each : most;
    params->chunk = (all + params->fill - 1) / params->fill;
    for (int d = 0; d < 3; d++)
        params->shape[d] = shape[d];
    for (uint64_t first = 0; first < channels; first += together) {
        uint64_t some = together < channels - first ? together : channels - first;
        DP_TRY(dp__cuda_launch_some_channels(stream, kernel, first, some, params));
    }
    return DP_OK;
}

/* Whether the driver takes such rows: not short ones, none that overlap, none too far apart. */
static bool dp__cuda_takes_rows(const dp__cuda_gpu *gpu, const struct dp__cuda_params *params)
{
    if (params->ndim != 2 || !dp__cuda_has_rows(params))
        return false;
    size_t dst_pitch = (size_t)params->out_stride[0] * params->width;
    size_t src_pitch = (size_t)params->in_stride[0] * params->width;
    size_t row_bytes = (size_t)params->shape[1] * params->width;
    return row_bytes >= 256 && row_bytes <= dst_pitch && row_bytes <= src_pitch &&
           dst_pitch <= gpu->pitch_max && src_pitch <= gpu->pitch_max;
}

/* By the driver, which has a copy engine and its own kernels. */
static dp_status dp__cuda_copy_rows(const dp_stream *stream, const struct dp__cuda_params *params)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    const size_t width = params->width;
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave_after(
        gpu, "cudaMemcpy2DAsync",
        dp__cuda.cudaMemcpy2DAsync(params->out[0], (size_t)params->out_stride[0] * width,
                                   params->in[0], (size_t)params->in_stride[0] * width,
                                   (size_t)params->shape[1] * width, (size_t)params->shape[0],
                                   cudaMemcpyDeviceToDevice, dp__cuda_stream_of(stream)->native));
}

/* Elements of less than 4 bytes have too little in flight (see >>text): the driver's, if it can. */
static dp_status dp__cuda_launch_copy(const dp_stream *stream, const struct dp__cuda_params *params)
{
    return params->width < 4 && dp__cuda_takes_rows(dp__cuda_gpu_of(stream->dev), params)
               ? dp__cuda_copy_rows(stream, params)
               : dp__cuda_launch_parts(stream, params);
}

/* Rows that the driver does not take are copied by the kernel. */
static dp_status dp__cuda_copy_2d(dp_stream *stream, void *dst, size_t dst_pitch, const void *src,
                                  size_t src_pitch, size_t row_bytes, size_t rows)
{
    struct dp__cuda_params params = {
        .in = {src},
        .out = {dst},
        .in_count = 1,
        .out_count = 1,
        .width = 1,
        .count = rows * row_bytes,
        .ndim = 2,
        .shape = {(long long)rows, (long long)row_bytes},
        .in_shape = {(long long)rows, (long long)row_bytes},
        .out_stride = {(long long)dst_pitch, 1},
        .in_stride = {(long long)src_pitch, 1},
    };
    if (dp__cuda_takes_rows(dp__cuda_gpu_of(stream->dev), &params))
        return dp__cuda_copy_rows(stream, &params);
    dp__cuda_merge(&params);
    dp__cuda_widen(&params);
    return dp__cuda_launch_parts(stream, &params);
}

static bool dp__cuda_is_short(dp_dtype dtype)
{
    return dtype == DP_F32 || dp__is_half(dtype);
}

/* How many packs the operands are made of; 0 where the kernel has no form for packs. */
static uint64_t dp__cuda_packs_of(const dp_kernel_args *args, const struct dp__cuda_params *params)
{
    const uint64_t each = 16 / params->width;
    const bool floats_add = args->dtype <= DP_BF16 && args->op != DP_OP_PROD;
    if (args->kernel == DP_KERNEL_FILL || args->kernel == DP_KERNEL_AXPBY ||
        (args->kernel == DP_KERNEL_REDUCE && (args->dtype == DP_BOOL || floats_add)))
        return dp__cuda_packs(params, args->in_count, args->out_count, each);
    if (args->kernel == DP_KERNEL_STATS || args->kernel == DP_KERNEL_TOTAL)
        return dp__cuda_packs(params, 1, 0, each);
    if (args->kernel == DP_KERNEL_CAST && dp__cuda_is_short(args->dtype) &&
        dp__cuda_is_short(args->in_dtype))
        return dp__cuda_packs(params, 1, 1, 4);
    return 0;
}

/* Sets of operands from `first` on, `some` of them, in chunks for blocks. */
static void dp__cuda_sets(const dp_kernel_args *args, size_t first, size_t some,
                          struct dp__cuda_steps *steps)
{
    const uint64_t least = 4 << 8; /* 256 packs */
    uint64_t all = 0;
    for (size_t i = 0, at = first; i < some; i++, at++) {
        struct dp__cuda_set *set = &steps->sets[i];
        *set = (struct dp__cuda_set){.grad = (void *)(uintptr_t)args->in[at * args->in_count]};
        set->count = args->set_count > 0 ? args->counts[at] : args->count;
        for (size_t k = 0; k < args->out_count; k++)
            set->out[k] = args->out[at * args->out_count + k];
        all += set->count;
    }
    steps->chunk = (all / (2 * DP__CUDA_CHUNKS) + least) / least * least;
    steps->set_count = (unsigned)some;
    steps->chunk_count = 0;
    for (size_t i = 0; i < some; i++) {
        steps->first[i] = steps->chunk_count;
        steps->chunk_count += (unsigned)((steps->sets[i].count + steps->chunk - 1) / steps->chunk);
    }
}

DP__APART static dp_status dp__cuda_launch_steps(dp_stream *stream, const dp_kernel_args *args)
{
    const int first_of = args->kernel == DP_KERNEL_SGD ? DP__CUDA_sgd_f32 : DP__CUDA_adamw_f32;
    const int kernel = first_of + (args->dtype == DP_F64); /* halves are computed as f32 */
    struct dp__cuda_steps steps = {.gate = args->in_count > 1 ? args->in[1] : NULL,
                                   .out_count = (unsigned)args->out_count,
                                   .dtype = (int)args->dtype,
                                   .flags = args->flags};
    const size_t most = sizeof steps.sets / sizeof *steps.sets;
    const size_t sets = args->set_count > 0 ? args->set_count : 1;
    memcpy(steps.numbers, args->numbers, sizeof steps.numbers);
    for (size_t first = 0, some; first < sets; first += some) {
        some = sets - first < most ? sets - first : most;
        dp__cuda_sets(args, first, some, &steps);
        DP_TRY(dp__cuda_launch(stream, kernel, steps.chunk_count, &steps));
    }
    return DP_OK;
}

static dp_status dp__cuda_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    bool real = args->dtype <= DP_BF16;
    int form = args->dtype < DP_F16 ? (int)args->dtype : DP_F16; /* of those that have all three */
    if (args->in_count > DP__CUDA_OPERANDS || args->out_count > DP__CUDA_OPERANDS)
        return dp_error(DP_ERR_UNSUPPORTED, DP__CUDA_IS ": a kernel of %zu and %zu operands",
                        args->in_count, args->out_count);
    if (real && (args->kernel == DP_KERNEL_SGD || args->kernel == DP_KERNEL_ADAMW))
        return dp__cuda_launch_steps(stream, args);
    struct dp__cuda_params params = dp__cuda_params_of(args);
    params.packs = dp__cuda_packs_of(args, &params);
    switch (args->kernel) {
    case DP_KERNEL_COPY:
        dp__cuda_dims(&params, args);
        return dp__cuda_launch_copy(stream, &params);
    case DP_KERNEL_FILL:
        return dp__cuda_launch_each(stream, DP__CUDA_fill, &params);
    case DP_KERNEL_CAST:
        params.width = (unsigned)dp_dtype_bytes(args->in_dtype);
        return dp__cuda_launch_each(stream, DP__CUDA_cast, &params);
    case DP_KERNEL_REDUCE:
        return dp__cuda_launch_each(stream,
                                    real                     ? DP__CUDA_reduce_f32 + form
                                    : args->dtype == DP_BOOL ? DP__CUDA_reduce_bool
                                                             : DP__CUDA_reduce_whole,
                                    &params);
    case DP_KERNEL_PAD:
        dp__cuda_dims(&params, args);
        return dp__cuda_launch_parts(stream, &params);
    case DP_KERNEL_TOTAL:
        return dp__cuda_launch_sums(stream, DP__CUDA_total, &params);
    case DP_KERNEL_AXPBY:
        if (real)
            return dp__cuda_launch_each(stream, DP__CUDA_axpby_f32 + form, &params);
        break;
    case DP_KERNEL_STATS:
        params.alpha = 1;
        params.out_count = 2; /* both sums lie in out[0] */
        if (real)
            return dp__cuda_launch_sums(stream, DP__CUDA_stats_f32 + form, &params);
        break;
    case DP_KERNEL_SGD:
    case DP_KERNEL_ADAMW:
        break;
    case DP_KERNEL_CHANNELS:
        if (real)
            return dp__cuda_launch_channels(stream, DP__CUDA_channels_f32 + form, args->shape,
                                            &params);
        break;
    }
    return dp_error(DP_ERR_UNSUPPORTED, DP__CUDA_IS ": no kernel %d for dtype %s",
                    (int)args->kernel, dp_dtype_name(args->dtype));
}

/* ==== >>device ===================================================================================
   The table dp_cuda(), and what kernels of the user need.                                       */

static dp_status dp__cuda_count(const dp_host *host, int *out)
{
    (void)host;
    dp__lock_enter(&dp__cuda_lock);
    dp_status status = dp__cuda_ready();
    if (status == DP_OK)
        status = dp__cuda_gpu_count(out);
    dp__lock_leave(&dp__cuda_lock);
    return status;
}

/* In a child of fork there are none: those in the list are its parent's. */
static int dp__cuda_open_count(void)
{
    uint64_t end = atomic_load(&dp__cuda_open_end);
    return end >> 32 == dp__os_fork_count() ? (int)(uint32_t)end : 0;
}

/* Put `now` in the place of `before`; NULL: an empty place. False: there is none. With the lock. */
static bool dp__cuda_list(const dp__cuda_dev *before, dp__cuda_dev *now)
{
    int i = 0, end = dp__cuda_open_count();
    while (i < end && atomic_load(&dp__cuda_open_devs[i]) != before)
        i++;
    if (i == end && (before != NULL || i == DP__CUDA_OPEN_MAX))
        return false;
    atomic_store(&dp__cuda_open_devs[i], now);
    if (i == end)
        atomic_store(&dp__cuda_open_end, (uint64_t)dp__os_fork_count() << 32 | (unsigned)(end + 1));
    return true;
}

/* A table may be decorated, so a device is recognised by its address only. */
static bool dp__cuda_is_open(const dp_dev *dev)
{
    int i = 0, end = dp__cuda_open_count();
    while (i < end && (const dp_dev *)atomic_load(&dp__cuda_open_devs[i]) != dev)
        i++;
    return i < end;
}

static void dp__cuda_close(dp_dev *dev)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    const dp_host *host = dev->host;
    dp__lock_enter(&dp__cuda_lock);
    (void)dp__cuda_list(own, NULL);
    while (own->slabs != NULL)
        dp__cuda_slab_drop(own, &own->slabs);
    if (own->gpu != NULL && dp__cuda_enter(own->gpu) == DP_OK) {
        dp__cuda_ring_close(own);
        (void)dp__cuda_leave(own->gpu, DP_OK);
    }
    if (own->gpu != NULL && --own->gpu->users == 0)
        dp__cuda_gpu_drop(own->gpu);
    dp__lock_leave(&dp__cuda_lock);
    host->free(host, own);
}

static dp_status dp__cuda_open(const dp_host *host, int index, dp_dev **out)
{
    if (index < 0 || index >= DP__CUDA_GPUS_MAX)
        return dp_error(DP_ERR_NO_DEVICE, DP__CUDA_IS ": there is no GPU %d", index);
    dp__cuda_dev *dev = host->alloc(host, sizeof *dev, _Alignof(dp__cuda_dev));
    if (dev == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS " %d: no memory on the host", index);
    *dev = (dp__cuda_dev){.base = {dp_cuda(), host, index},
                          .lock = DP__LOCK_INITIALIZER,
                          .ring = DP__LOCK_INITIALIZER};
    dp__lock_enter(&dp__cuda_lock);
    dp_status status = dp__cuda_list(NULL, dev)
                           ? dp__cuda_gpu_use(host, index, &dev->gpu)
                           : dp_error(DP_ERR_NO_MEMORY,
                                      DP__CUDA_IS " %d: %d devices are open already", index,
                                      DP__CUDA_OPEN_MAX);
    dp__lock_leave(&dp__cuda_lock);
    if (status == DP_OK)
        status = dp__cuda_enter(dev->gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(dev->gpu, dp__cuda_ring_open(dev));
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
    DP_TRY(dp__cuda_check(
        "cuDeviceGetName", gpu->ordinal,
        (cudaError_t)dp__cuda.call_cuDeviceGetName(out->name, (int)sizeof out->name, gpu->device)));
    memcpy(out->bus_id, gpu->bus_id, sizeof out->bus_id);
    DP_TRY(dp__cuda_enter(gpu));
    DP_TRY(dp__cuda_leave_after(gpu, "cudaMemGetInfo",
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
        /* cudaStreamDestroy lets work go on; its memory may be freed now */
        (void)dp__cuda.cudaStreamSynchronize(own->native);
        (void)dp__cuda.cudaGetLastError();
        (void)dp__cuda_leave_after(gpu, "cudaStreamDestroy",
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
    dp__cuda_stream *stream =
        dev->host->alloc(dev->host, sizeof *stream, _Alignof(dp__cuda_stream));
    if (stream == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS " %d: no memory for a stream", gpu->ordinal);
    *stream = (dp__cuda_stream){.base = {dev}, .native = native, .adopted = native != NULL};
    dp_status status = dp__cuda_alloc(dev, 2 * DP__CUDA_CHUNKS * sizeof(double), &stream->scratch);
    if (status == DP_OK)
        status = dp__cuda_enter(gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(
            gpu, native == NULL ? dp__cuda_native_stream(gpu->ordinal, priority, &stream->native)
                                : DP_OK);
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

/* After a wait: whether what was waited for was done. */
static dp_status dp__cuda_done(dp_dev *dev)
{
    dp_comm *failed = atomic_load_explicit(&dp__cuda_dev_of(dev)->failed, memory_order_acquire);
    return failed != NULL ? failed->ops->poll(failed) : DP_OK;
}

static dp_status dp__cuda_stream_sync(dp_stream *stream)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_uncaptured(stream, "a wait");
    if (status == DP_OK)
        status = dp__cuda_check("cudaStreamSynchronize", gpu->ordinal,
                                dp__cuda.cudaStreamSynchronize(dp__cuda_stream_of(stream)->native));
    DP_TRY(dp__cuda_leave(gpu, status));
    return dp__cuda_done(stream->dev);
}

static dp_status dp__cuda_event_create(dp_dev *dev, dp_event **out)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(dev);
    dp__cuda_event *event = dev->host->alloc(dev->host, sizeof *event, _Alignof(dp__cuda_event));
    if (event == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS " %d: no memory for an event", gpu->ordinal);
    *event = (dp__cuda_event){.base = {dev}};
    dp_status status = dp__cuda_enter(gpu);
    if (status == DP_OK)
        status = dp__cuda_leave(gpu, dp__cuda_native_event(gpu->ordinal, &event->native));
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
        (void)dp__cuda_leave_after(gpu, "cudaEventDestroy",
                                   dp__cuda.cudaEventDestroy(((dp__cuda_event *)event)->native));
    host->free(host, event);
}

/* What is captured does not run: nobody waits for it, and to try would break the capture. So what
   the event has marked before is waited for now. */
static dp_status dp__cuda_event_record(dp_event *event, dp_stream *stream)
{
    dp__cuda_event *own = (dp__cuda_event *)event;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    cudaError_t code = cudaSuccess;
    bool captured = false;
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_captures(stream, &captured);
    if (status == DP_OK && captured && atomic_load(&own->recorded) && !atomic_load(&own->captured))
        code = dp__cuda.cudaEventSynchronize(own->native);
    if (status == DP_OK && code == cudaSuccess)
        code = dp__cuda.cudaEventRecord(own->native, dp__cuda_stream_of(stream)->native);
    if (status == DP_OK)
        status = dp__cuda_check("cudaEventRecord", gpu->ordinal, code);
    DP_TRY(dp__cuda_leave(gpu, status));
    atomic_store(&own->captured, captured);
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
    return dp__cuda_leave(gpu,
                          dp__cuda_await(gpu, dp__cuda_stream_of(stream)->native, own->native));
}

static dp_status dp__cuda_event_sync(dp_event *event)
{
    dp__cuda_event *own = (dp__cuda_event *)event;
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(event->dev);
    if (!atomic_load(&own->recorded) || atomic_load(&own->captured))
        return DP_OK;
    DP_TRY(dp__cuda_enter(gpu));
    DP_TRY(dp__cuda_leave_after(gpu, "cudaEventSynchronize",
                                dp__cuda.cudaEventSynchronize(own->native)));
    return dp__cuda_done(event->dev);
}

/* Blocks of ours are known; only of other memory the driver is asked. A lost GPU says so later. */
static bool dp__cuda_owns(dp_dev *dev, const void *data)
{
    dp__cuda_dev *own = dp__cuda_dev_of(dev);
    struct cudaPointerAttributes attributes = {.type = cudaMemoryTypeUnregistered};
    dp__lock_enter(&own->lock);
    bool ours = *dp__cuda_slab_of(own, data) != NULL;
    dp__lock_leave(&own->lock);
    if (ours || dp__cuda_enter(own->gpu) != DP_OK)
        return true;
    if (dp__cuda.cudaPointerGetAttributes(&attributes, data) != cudaSuccess)
        (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(own->gpu, DP_OK);
    return attributes.type == cudaMemoryTypeManaged ||
           (attributes.type == cudaMemoryTypeDevice && attributes.device == own->gpu->ordinal);
}

static dp_status dp__cuda_host_call(dp_stream *stream, void (*fn)(void *user), void *user)
{
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(stream->dev);
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave_after(
        gpu, "cudaLaunchHostFunc",
        dp__cuda.cudaLaunchHostFunc(dp__cuda_stream_of(stream)->native, fn, user));
}

DP_API const dp_device_ops *dp_cuda(void)
{
    static const dp_device_ops ops = {.head = DP_TABLE(dp_device_ops),
                                      .name = DP__CUDA_IS,
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
                                      .owns = dp__cuda_owns,
                                      .host_call = dp__cuda_host_call,
                                      .takes_sets = true,
                                      .kernel_flags = DP_KERNEL_ZERO_GRAD};
    return &ops;
}

static const dp_device_ops *(*dp__backend_cuda)(void) = dp_cuda; /* dp.h asks for it */

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
    CUcontext context = NULL;
    CUgreenCtx part = NULL; /* of the GPU; its streams are of the primary context, too */
    if (ordinal < 0)
        return dp_error(DP_ERR_INVALID, "%s: local rank %d is not a device of " DP__CUDA_IS,
                        __func__, local_rank);
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (native == NULL || native == cudaStreamLegacy || native == cudaStreamPerThread)
        return dp_error(DP_ERR_INVALID, "%s: native is NULL, or another default stream: create one",
                        __func__);
    const dp__cuda_gpu *gpu = dp__cuda_gpu_of(own->dev);
    DP_TRY(dp__cuda_enter(gpu)); /* the thread may have no context: the call would make one */
    cudaError_t code = dp__cuda.cudaStreamGetDevice(native, &place);
    if (code == cudaSuccess)
        code = (cudaError_t)dp__cuda.call_cuStreamGetCtx(native, &context, &part);
    DP_TRY(dp__cuda_leave_after(gpu, "cudaStreamGetDevice", code));
    if (place == ordinal && context == gpu->context)
        return dp__cuda_stream_make(own->dev, 0, native, out);
    return dp_error(
        DP_ERR_INVALID,
        "%s: the stream is of %sGPU %d, local rank %d is GPU %d: create one after " DP__CUDA_IS
        "SetDevice",
        __func__, place == ordinal ? "another context of " : "", place, local_rank, ordinal);
}

DP_API void dp_cuda_release(dp_stream *stream)
{
    if (dp_cuda_stream(stream) != NULL && dp__cuda_stream_of(stream)->adopted)
        dp__cuda_stream_destroy(stream);
}

/* ==== >>collectives ============================================================================
   The table dp_cuda_coll(): ranks of one process, each on a GPU, several on one if need be. Each
   sum is made on the GPU that wants it, by one kernel over all ranks. The kernel reads what is on
   its GPU in place; data of another GPU is copied to a receive buffer first, in pieces. In an
   all-reduce each GPU adds up one slice. No sum needs another one, so all are enqueued before any
   result is fetched: every GPU reads all the time, and no two read from the same GPU. All work is
   on the streams of the call. Where one stream has to wait for another, marks say so: `heed` makes
   one rank's stream wait for what another's had to do when it was marked.

   S bytes on D GPUs: each reads (D - 1) / D of S for its sums and as much of others' sums, and is
   read as often. A broadcast goes from GPU to GPU, each of which is read once. With links of 350
   GB/s in each direction, 2 us a copy, 2 us and 2400 GB/s a kernel, S = 256 MiB (tests/sim/sim.h
   has the same links; to the right what goes over each in each direction):

     GPUs   all-reduce   one sum after another   broadcast   from one
        2      1.06 ms                 2.3 ms       0.77 ms    0.77 ms     256 MiB
        4      1.42 ms                 4.3 ms       0.88 ms    2.30 ms     384 MiB
        8      1.61 ms                 8.3 ms       0.99 ms    5.37 ms     448 MiB              */

enum { DP__CUDA_RECEIVED_BYTES = 4 << 20 }; /* of each other rank */
enum { DP__CUDA_SLICE_LEAST = 32 << 10 };   /* smaller ones cost more in calls than they save */
enum { DP__CUDA_LINK_LEAST = 512 << 10, DP__CUDA_LINK_PIECES = 32 }; /* of a broadcast */

typedef struct dp__cuda_rank {
    dp__cuda_dev *dev;
    cudaEvent_t mark;
    int lead;       /* the first rank on the same GPU */
    void *received; /* DP__CUDA_RECEIVED_BYTES per rank; NULL: no sum has needed it yet */
} dp__cuda_rank;

typedef struct dp__cuda_comm {
    dp_comm base;
    int count, gpu_count;
    bool captured, has_summed; /* the collective that runs; an earlier one, with sums */
    dp__cuda_rank ranks[DP__CUDA_OPERANDS];
    dp__cuda_rank sums; /* of no stream: marked when receive buffers are free again */
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

static void dp__cuda_rank_close(dp__cuda_rank *rank)
{
    if (rank->mark != NULL && dp__cuda_enter(rank->dev->gpu) == DP_OK)
        (void)dp__cuda_leave_after(rank->dev->gpu, "cudaEventDestroy",
                                   dp__cuda.cudaEventDestroy(rank->mark));
    if (rank->received != NULL)
        dp__cuda_free(&rank->dev->base, rank->received, 0);
}

static void dp__cuda_coll_close(dp_comm *comm)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    for (int i = 0; i < own->count; i++)
        dp__cuda_rank_close(&own->ranks[i]);
    dp__cuda_rank_close(&own->sums);
    comm->host->free(comm->host, own);
}

static dp_status dp__cuda_rank_open(dp__cuda_rank *rank)
{
    const dp__cuda_gpu *gpu = rank->dev->gpu;
    DP_TRY(dp__cuda_enter(gpu));
    return dp__cuda_leave(gpu, dp__cuda_native_event(gpu->ordinal, &rank->mark));
}

static dp_status dp__cuda_coll_open(const dp_host *host, const dp_comm_config *config,
                                    dp_comm **out)
{
    dp__cuda_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp__cuda_comm));
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, DP__CUDA_IS ": no memory on the host");
    *comm = (dp__cuda_comm){.base = {dp_cuda_coll(), host}, .count = config->local_count};
    for (int i = 0; i < comm->count; i++) {
        comm->ranks[i].dev = dp__cuda_dev_of(config->local[i]);
        while (comm->ranks[comm->ranks[i].lead].dev->gpu != comm->ranks[i].dev->gpu)
            comm->ranks[i].lead++;
        comm->gpu_count += comm->ranks[i].lead == i;
    }
    comm->sums.dev = comm->ranks[0].dev;
    dp_status status = dp__cuda_rank_open(&comm->sums);
    for (int i = 0; i < comm->count && status == DP_OK; i++)
        status = dp__cuda_rank_open(&comm->ranks[i]);
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
    return dp__cuda_record(rank->dev->gpu, rank->mark, dp__cuda_stream_of(part->stream)->native);
}

static dp_status dp__cuda_heed(const dp__cuda_rank *rank, const dp_part *part,
                               const dp__cuda_rank *other)
{
    return dp__cuda_await(rank->dev->gpu, dp__cuda_stream_of(part->stream)->native, other->mark);
}

/* The first rank's next work comes after what all have done. */
static dp_status dp__cuda_fan_in(dp__cuda_comm *comm, const dp_part *local)
{
    for (int i = 1; i < comm->count; i++) {
        DP_TRY(dp__cuda_mark(&comm->ranks[i], &local[i]));
        DP_TRY(dp__cuda_heed(&comm->ranks[0], &local[0], &comm->ranks[i]));
    }
    return DP_OK;
}

/* The next work of all comes after what the first rank has done. */
static dp_status dp__cuda_fan_out(dp__cuda_comm *comm, const dp_part *local)
{
    DP_TRY(dp__cuda_mark(&comm->ranks[0], &local[0]));
    for (int i = 1; i < comm->count; i++)
        DP_TRY(dp__cuda_heed(&comm->ranks[i], &local[i], &comm->ranks[0]));
    return DP_OK;
}

static dp_status dp__cuda_meet(dp__cuda_comm *comm, const dp_part *local)
{
    DP_TRY(dp__cuda_fan_in(comm, local));
    return dp__cuda_fan_out(comm, local);
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

/* ==== >>adding ===================================================================================
   The collectives that add up.                                                                  */

typedef struct dp__cuda_sum { /* of every rank's send */
    dp__cuda_comm *comm;
    const dp_coll_call *asked;
    const dp_part *local;
    size_t size; /* bytes per element */
} dp__cuda_sum;

typedef struct dp__cuda_slice { /* elements from begin on, before end, and who adds them up */
    size_t begin, end;
    int owner;
} dp__cuda_slice;

static bool dp__cuda_near(const dp__cuda_comm *comm, int a, int b)
{
    return comm->ranks[a].lead == comm->ranks[b].lead;
}

static dp_status dp__cuda_receive_buffer(dp__cuda_comm *comm, int i)
{
    dp__cuda_rank *rank = &comm->ranks[i];
    if (comm->gpu_count == 1 || rank->received != NULL)
        return DP_OK;
    return dp__cuda_alloc(&rank->dev->base, (size_t)comm->count * DP__CUDA_RECEIVED_BYTES,
                          &rank->received);
}

/* One piece, which fits into a receive buffer, on one rank's stream, into `out`. */
static dp_status dp__cuda_sum_piece(const dp__cuda_sum *sum, int rank, size_t first, size_t count,
                                    void *const *out, size_t out_count)
{
    const void *in[DP__CUDA_OPERANDS];
    const dp__cuda_comm *comm = sum->comm;
    dp_stream *stream = sum->local[rank].stream;
    dp_kernel_args args = dp__reduction(sum->asked, sum->asked->dtype, count, comm->count, true);
    args.out = out;
    args.in = in;
    args.out_count = out_count;
    args.in_count = (size_t)comm->count;
    for (int k = 0; k < comm->count; k++) {
        int i = (rank + k) % comm->count; /* not all from the same one at the same time */
        in[i] = (const char *)sum->local[i].send + first * sum->size;
        if (dp__cuda_near(comm, i, rank))
            continue;
        char *received = (char *)comm->ranks[rank].received + (size_t)i * DP__CUDA_RECEIVED_BYTES;
        DP_TRY(dp__cuda_peer_move(stream, received, &comm->ranks[i].dev->base, in[i],
                                  count * sum->size));
        in[i] = received;
    }
    return dp__cuda_kernel(stream, &args);
}

/* Elements begin to end of the sends, to the same place of every `out`. */
static dp_status dp__cuda_sum_up(const dp__cuda_sum *sum, const dp__cuda_slice *slice,
                                 void *const *out, size_t out_count)
{
    const dp__cuda_gpu *gpu = sum->comm->ranks[slice->owner].dev->gpu;
    size_t most = sum->comm->gpu_count > 1 ? DP__CUDA_RECEIVED_BYTES / sum->size : SIZE_MAX;
    dp_status status = DP_OK;
    void *at[DP__CUDA_OPERANDS];
    DP_TRY(dp__cuda_receive_buffer(sum->comm, slice->owner));
    DP_TRY(dp__cuda_enter(gpu));
    for (size_t first = slice->begin, count = 0; first < slice->end && status == DP_OK;
         first += count) {
        count = slice->end - first < most ? slice->end - first : most;
        for (size_t i = 0; i < out_count; i++)
            at[i] = (char *)out[i] + (first - slice->begin) * sum->size;
        status = dp__cuda_sum_piece(sum, slice->owner, first, count, at, out_count);
    }
    return dp__cuda_leave(gpu, status);
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
        each = dp__align_up((count + takers - 1) / takers, 64);
    each = each > least ? each : least;
    for (int i = 0; i < sum->comm->count; i++) {
        size_t begin = (size_t)slices * each;
        if (dp__cuda_taker(sum, i) == i && begin < count)
            out[slices++] = (dp__cuda_slice){
                .begin = begin, .end = count - begin > each ? begin + each : count, .owner = i};
    }
    return slices;
}

/* The owner adds up for all ranks on its GPU that want the result. */
static dp_status dp__cuda_sum_slice(const dp__cuda_sum *sum, const dp__cuda_slice *slice)
{
    const dp__cuda_comm *comm = sum->comm;
    void *out[DP__CUDA_OPERANDS];
    size_t out_count = 0;
    for (int i = slice->owner; i < comm->count; i++)
        if (dp__cuda_near(comm, i, slice->owner) && sum->local[i].recv != NULL)
            out[out_count++] = (char *)sum->local[i].recv + slice->begin * sum->size;
    return dp__cuda_sum_up(sum, slice, out, out_count);
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
    for (int i = 0; i < slice_count; i++) {
        int owner = slices[i].owner;
        DP_TRY(dp__cuda_sum_slice(sum, &slices[i]));
        DP_TRY(dp__cuda_mark(&comm->ranks[owner], &sum->local[owner]));
    }
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
    DP_TRY(dp__cuda_fan_in(sum->comm, sum->local));
    if (dp__cuda_taker(sum, 0) >= 0)
        DP_TRY(dp__cuda_sum_slice(sum, &whole));
    return dp__cuda_fan_out(sum->comm, sum->local);
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

/* Receive buffers are those of the sums before, which may be made on other streams. What is
   captured runs when its graph does: there the user orders it. */
static dp_status dp__cuda_add(dp__cuda_comm *own, const dp_coll_call *call)
{
    const dp__cuda_sum sum = {own, call, call->local, dp_dtype_bytes(call->dtype)};
    bool shares = own->gpu_count > 1 && !own->captured;
    if (shares && own->has_summed)
        DP_TRY(dp__cuda_heed(&own->ranks[0], &call->local[0], &own->sums));
    dp_status status = call->verb == DP_REDUCE_SCATTER ? dp__cuda_scatter_sums(&sum, call->count)
                       : own->gpu_count == 1           ? dp__cuda_reduce_here(&sum, call->count)
                                                       : dp__cuda_reduce_slices(&sum, call->count);
    if (!shares || status != DP_OK)
        return status;
    own->has_summed = true;
    return dp__cuda_mark(&own->sums, &call->local[0]);
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

static dp_status dp__cuda_do(dp__cuda_comm *own, const dp_coll_call *call)
{
    size_t bytes = call->count * dp_dtype_bytes(call->dtype);
    dp__cuda_route route;
    if (call->verb == DP_ALL_REDUCE || call->verb == DP_REDUCE_SCATTER)
        return dp__cuda_add(own, call);
    if (call->verb != DP_BROADCAST)
        return dp__cuda_fetch_blocks(own, call->local, bytes, call->verb == DP_ALL_TO_ALL);
    dp__cuda_route_plan(own, call->root, bytes, &route);
    return dp__cuda_route_run(own, call->local, &route);
}

/* With a context; launches enter that of their own GPU. Whoever began a capture can end it only
   when all that were taken in have come back, also from a collective that failed. */
static dp_status dp__cuda_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    dp__cuda_comm *own = dp__cuda_comm_of(comm);
    const dp__cuda_gpu *gpu = own->ranks[0].dev->gpu;
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_fork(own, call->local);
    if (status != DP_OK)
        return dp__cuda_leave(gpu, status);
    status = dp__cuda_do(own, call);
    if (own->captured) {
        dp_status joined = dp__cuda_meet(own, call->local);
        status = status != DP_OK ? status : joined;
    }
    return dp__cuda_leave(gpu, status);
}

DP_API const dp_coll_ops *dp_cuda_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = DP__CUDA_IS,
                                    .fits = dp__cuda_coll_fits,
                                    .open = dp__cuda_coll_open,
                                    .close = dp__cuda_coll_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__cuda_coll_run};
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
