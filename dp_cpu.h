/* dp_cpu.h - v0.2.0 - the host as a backend of dp.h: kernels, collectives - MIT licence

   dp.h includes this file itself; there is nothing to set and nothing to call. It holds two tables:
   the devices of the host, and the collectives among those of one process. Its calls to the system
   are in dp/os.h.

   CONTENTS (search for the tag)
     >>simd         vectors of any width from one text
     >>sums         inputs are added in a tree
     >>sets         the vectors that a machine has
     >>cast         from any dtype to any other
     >>copy         bytes, strided blocks, fills
     >>kernels      what dp_device_ops.kernel does, on one slice of the work
     >>updates      what optimizers do, sums of channels
     >>device       the table dp_cpu(): streams that finish at once, memory of the host
     >>collectives  the table dp_cpu_coll(): all ranks in this process, one pass over memory
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if defined(DP_IMPLEMENTATION) && !defined(DP_CPU_IMPLEMENTED)
#define DP_CPU_IMPLEMENTED

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== >>simd ====================================================================================
   One instruction set is one table of functions over whole vectors, and each generator below is
   expanded once per set: GCC lowers vector code for the target of the function it is in, before
   it inlines, so that sets can share source but no functions. `one` has vectors of one element and
   does what the others leave over, `base` has 16 bytes and works everywhere, `avx2` has the floats.
   AVX-512 was measured and gave nothing: these loops wait for memory.
   Invariant: every set gives the same bits. A function stops where no whole vector is left and
   returns that place; positions count bytes (convert: elements).                                */

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* The user's memory may be unaligned; allowing that costs nothing when it is aligned. */
#define DP__CPU_ANYWHERE      __attribute__((aligned(1), may_alias))
#define DP__V(bytes)          __attribute__((vector_size(bytes))) DP__CPU_ANYWHERE
#define DP__CPU_INLINE(isa)   DP__CPU_TARGET_##isa static inline __attribute__((always_inline))
#define DP__CPU_FUNCTION(isa) DP__CPU_TARGET_##isa static
#if defined(__clang__)
#define DP__CPU_UNROLL _Pragma("unroll")
#else
#define DP__CPU_UNROLL _Pragma("GCC unroll 16")
#endif

typedef uint8_t dp__any_u8 DP__CPU_ANYWHERE; /* the bits of any element */
typedef uint16_t dp__any_u16 DP__CPU_ANYWHERE;
typedef uint32_t dp__any_u32 DP__CPU_ANYWHERE;
typedef uint64_t dp__any_u64 DP__CPU_ANYWHERE;
typedef float dp__any_float DP__CPU_ANYWHERE;
typedef double dp__any_double DP__CPU_ANYWHERE;

/* What a set is: its target, the bytes of a vector, how many of them REDUCE takes at a time, and
   the constraint of a register. */
#define DP__CPU_TARGET_one
#define DP__CPU_TARGET_base
#define DP__CPU_TARGET_avx2   __attribute__((target("avx2,f16c")))
#define DP__CPU_BYTES_one(T)  sizeof(T)
#define DP__CPU_BYTES_base(T) 16
#define DP__CPU_BYTES_avx2(T) 32
#define DP__CPU_BLOCK_one     1
#define DP__CPU_BLOCK_avx2    4
#define DP__CPU_REG_one       "+m"
#define DP__CPU_REG_avx2      "+x"
#if defined(__x86_64__)
#define DP__CPU_BLOCK_base 1
#define DP__CPU_REG_base   "+x"
#elif defined(__aarch64__)
#define DP__CPU_BLOCK_base 4
#define DP__CPU_REG_base   "+w"
#else
#define DP__CPU_BLOCK_base 4
#define DP__CPU_REG_base   "+m"
#endif

/* Square roots: sqrt would have to look for negative numbers one by one, to set errno. */
#define DP__CPU_ROOT_one(to, v, real) ((to)[0] = DP__CPU_ROOT_OF_##real((v)[0]))
#define DP__CPU_ROOT_OF_float         sqrtf
#define DP__CPU_ROOT_OF_double        sqrt
#define DP__CPU_ROOT_avx2(to, v, real)                                                             \
    __asm__("vsqrt" DP__CPU_ROOT_NAME_##real " %1, %0" : "=x"(to) : "x"(v))
#define DP__CPU_ROOT_NAME_float  "ps"
#define DP__CPU_ROOT_NAME_double "pd"
#if defined(__x86_64__)
#define DP__CPU_ROOT_base(to, v, real)                                                             \
    __asm__("sqrt" DP__CPU_ROOT_NAME_##real " %1, %0" : "=x"(to) : "x"(v))
#elif defined(__aarch64__)
#define DP__CPU_ROOT_LANES_float  ".4s"
#define DP__CPU_ROOT_LANES_double ".2d"
#define DP__CPU_ROOT_base(to, v, real)                                                             \
    __asm__("fsqrt %0" DP__CPU_ROOT_LANES_##real ", %1" DP__CPU_ROOT_LANES_##real                  \
            : "=w"(to)                                                                             \
            : "w"(v))
#else
#define DP__CPU_ROOT_base(to, v, real)                                                             \
    for (size_t k = 0; k < lanes; k++)                                                             \
    (to)[k] = DP__CPU_ROOT_OF_##real((v)[k])
#endif

/* Between f32 and f64: GCC converts half a vector at a time, though the processor can do all. */
#define DP__CPU_WIDER_one(E, D, x)    __builtin_convertvector(x, D)
#define DP__CPU_NARROWER_one(E, D, x) __builtin_convertvector(x, E)
#define DP__CPU_WIDER_base            DP__CPU_WIDER_one
#define DP__CPU_NARROWER_base         DP__CPU_NARROWER_one
#if defined(__x86_64__) && !defined(__clang__)
#define DP__CPU_WIDER_avx2(E, D, x)    DP__CPU_CONVERTED(D, "vcvtps2pd", x)
#define DP__CPU_NARROWER_avx2(E, D, x) DP__CPU_CONVERTED(E, "vcvtpd2psy", x)
#define DP__CPU_CONVERTED(To, name, x)                                                             \
    __extension__({                                                                                \
        To converted;                                                                              \
        __asm__(name " %1, %0" : "=x"(converted) : "xm"(x));                                       \
        converted;                                                                                 \
    })
#else
#define DP__CPU_WIDER_avx2    DP__CPU_WIDER_one
#define DP__CPU_NARROWER_avx2 DP__CPU_NARROWER_one
#endif

/* Where there is fma, GCC fuses a product with the sum behind it, and a header cannot ask for
   -ffp-contract=off: hide where `v` comes from. */
#define DP__CPU_ROUNDED(isa, v) __asm__("" : DP__CPU_REG_##isa(v))

#define DP__CPU_AHEAD  2048 /* bytes that REDUCE and updates ask for early: see >>sums */
#define DP__CPU_LEVELS 20   /* of REDUCE's tree: 2^20 inputs, see DP__OPERANDS_MAX */
#define DP__CPU_LANES  16   /* of a STATS: element i is added to lane i % 16, in f64 */

typedef size_t dp__cpu_range_fn(const dp_kernel_args *args, dp_op op, size_t at, size_t end);
typedef size_t dp__cpu_convert_fn(void *out, const void *in, size_t at, size_t count);
typedef void dp__cpu_squares_fn(double *lanes, const void *in, size_t count);

typedef struct dp__cpu_stepped { /* elements of an SGD or ADAMW, widened to f32 or f64 */
    const dp_kernel_args *args;
    void *x, *state[2];
    const void *grad;
} dp__cpu_stepped;
typedef size_t dp__cpu_update_fn(const dp__cpu_stepped *update, size_t at, size_t count);

typedef struct dp__simd {
    const char *name;
    dp__cpu_range_fn *reduce[DP_DTYPE_COUNT]; /* NULL: base has it */
    dp__cpu_range_fn *axpby[DP_BF16 + 1];
    dp__cpu_convert_fn *convert[DP_BF16 + 1][DP_BF16 + 1]; /* [to][from]; NULL: through f32 */
    dp__cpu_squares_fn *squares[DP_F64 + 1];               /* count is a multiple of the lanes */
    dp__cpu_update_fn *sgd[DP_F64 + 1], *adamw[DP_F64 + 1];
} dp__simd;

#define DP__CPU_TYPE(isa, T, name) typedef T dp__v_##isa##_##name DP__V(DP__CPU_BYTES_##isa(T))
#define DP__CPU_TYPES(isa)                                                                         \
    DP__CPU_TYPE(isa, float, f32);                                                                 \
    DP__CPU_TYPE(isa, double, f64);                                                                \
    DP__CPU_TYPE(isa, int64_t, i64);                                                               \
    DP__CPU_TYPE(isa, int32_t, i32);                                                               \
    DP__CPU_TYPE(isa, int16_t, i16);                                                               \
    DP__CPU_TYPE(isa, int8_t, i8);                                                                 \
    DP__CPU_TYPE(isa, uint64_t, u64);                                                              \
    DP__CPU_TYPE(isa, uint32_t, u32);                                                              \
    DP__CPU_TYPE(isa, uint16_t, u16);                                                              \
    DP__CPU_TYPE(isa, uint8_t, u8);                                                                \
    DP__CPU_TYPE(isa, uint8_t, b8);                                                                \
    typedef uint16_t dp__v_##isa##_f16 DP__V(DP__CPU_BYTES_##isa(float) / 2);                      \
    typedef uint16_t dp__v_##isa##_bf16 DP__V(DP__CPU_BYTES_##isa(float) / 2);                     \
    typedef float dp__v_##isa##_half DP__V(DP__CPU_BYTES_##isa(double) / 2)

/* `widen` turns the stored type into the one for computing, `narrow` turns it back. */
#define DP__CPU_PLAIN(isa, T, V)                                                                   \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_widen_##T(V v)                                           \
    {                                                                                              \
        return v;                                                                                  \
    }                                                                                              \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_narrow_##T(V v)                                          \
    {                                                                                              \
        return v;                                                                                  \
    }

#define DP__CPU_B8(isa, V) /* any byte but 0 is true */                                            \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_widen_b8(V v)                                            \
    {                                                                                              \
        return (V)(v != 0) & 1;                                                                    \
    }                                                                                              \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_narrow_b8(V v)                                           \
    {                                                                                              \
        return v;                                                                                  \
    }

#define DP__CPU_BF16(isa, H, F, U, I)                                                              \
    DP__CPU_INLINE(isa) F dp__cpu_##isa##_widen_bf16(H h)                                          \
    {                                                                                              \
        return (F)(__builtin_convertvector(h, U) << 16);                                           \
    }                                                                                              \
    DP__CPU_INLINE(isa) H dp__cpu_##isa##_narrow_bf16(F f)                                         \
    {                                                                                              \
        const U u = (U)f, nan = (U)((I)(u & 0x7fffffff) > 0x7f800000);                             \
        const U even = u + 0x7fff + ((u >> 16) & 1);                                               \
        return __builtin_convertvector((((u | 0x400000) & nan) | (even & ~nan)) >> 16, H);         \
    }

/* f16 with integers. Below 2^-14 an addition of floats moves the mantissa to its place, so that the
   addition itself rounds to even. */
#define DP__CPU_F16(isa, H, F, U, I)                                                               \
    DP__CPU_INLINE(isa) F dp__cpu_##isa##_widen_f16(H half)                                        \
    {                                                                                              \
        const U h = __builtin_convertvector(half, U);                                              \
        const U sign = (h & 0x8000) << 16, u = (h & 0x7fff) << 13;                                 \
        const U small = (U)((I)u < 0x00800000), big = (U)((I)u >= 0x0f800000);                     \
        const U nan = (U)((I)u > 0x0f800000);                                                      \
        const F exact = (F)(u + 0x38800000) - 0x1p-14f;                                            \
        const U whole = (u + 0x38000000 + (big & 0x38000000)) | (nan & 0x00400000);                \
        return (F)(sign | ((U)exact & small) | (whole & ~small));                                  \
    }                                                                                              \
    DP__CPU_INLINE(isa) H dp__cpu_##isa##_narrow_f16(F f)                                          \
    {                                                                                              \
        const U sign = (U)f & 0x80000000u, u = (U)f ^ sign;                                        \
        const U small = (U)((I)u < 0x38800000), big = (U)((I)u >= 0x47800000);                     \
        const U nan = (U)((I)u > 0x7f800000);                                                      \
        const F carried = (F)u + 0.5f;                                                             \
        const U tiny = (U)carried - 0x3f000000;                                                    \
        const U whole = (u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13;                          \
        const U huge = (nan & (0x200 | ((u >> 13) & 0x3ff))) | 0x7c00;                             \
        const U h = (tiny & small) | (huge & big) | (whole & ~(small | big)) | (sign >> 16);       \
        return __builtin_convertvector(h, H);                                                      \
    }

/* The operations. NaN wins in min and max: a != a costs nothing for integers. Integers wrap, so
   they are added as U, unsigned; M is the signed integer of their size. */
#define DP__CPU_OPS(isa, A, V, U, M)                                                               \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_sum_##A(V a, V b)                                        \
    {                                                                                              \
        return (V)((U)a + (U)b);                                                                   \
    }                                                                                              \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_prod_##A(V a, V b)                                       \
    {                                                                                              \
        return (V)((U)a * (U)b);                                                                   \
    }                                                                                              \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_min_##A(V a, V b)                                        \
    {                                                                                              \
        const M first = (M)(a < b) | (M)(a != a);                                                  \
        return (V)(((M)a & first) | ((M)b & ~first));                                              \
    }                                                                                              \
    DP__CPU_INLINE(isa) V dp__cpu_##isa##_max_##A(V a, V b)                                        \
    {                                                                                              \
        const M first = (M)(a > b) | (M)(a != a);                                                  \
        return (V)(((M)a & first) | ((M)b & ~first));                                              \
    }

/* ==== >>sums ====================================================================================
   What REDUCE does with vectors: blocks of N vectors of dtype T, computed in A. Inputs are added in
   a binary tree, four at a time; `sums` holds what waits for the right half of its subtree, the
   largest first. At the end the heads (dp_kernel_args.heads), from the right.

   All inputs of a block are read before any output is written, since an output may be an input.
   More than two inputs are prefetched up to the end of the slice: four or eight took 1.15 to 1.3
   times as long without. Two take 1.2 times as long with it in the first two caches, 0.85 in the
   third, and 1.2 to 1.3 beyond. (Of no use: 64-byte vectors, pinned threads, halves in place of
   slices, buffers that begin elsewhere in a page. Huge pages give a twentieth with and without.) */

#define DP__CPU_EACH(N) DP__CPU_UNROLL for (size_t u = 0; u < N; ++u)
#define DP__CPU_FETCH(p, bytes)                                                                    \
    if (at < near) {                                                                               \
        DP__CPU_UNROLL for (size_t line = 64; line <= (bytes); line += 64)                         \
        {                                                                                          \
            __builtin_prefetch((const char *)(p) + DP__CPU_AHEAD + line - 64);                     \
        }                                                                                          \
    }
#define DP__CPU_INPUT(isa, T, N, k)                                                                \
    p = (const void *)((const char *)in[k] + at);                                                  \
    DP__CPU_FETCH(p, N * sizeof(dp__v_##isa##_##T))
#define DP__CPU_FOLD(isa, A, N, to, left, right) /* sums are what most ask for */                  \
    if (__builtin_expect(op == DP_OP_SUM, 1)) {                                                    \
        DP__CPU_EACH(N) to[u] = dp__cpu_##isa##_sum_##A(left, right);                              \
    } else if (op == DP_OP_PROD) {                                                                 \
        DP__CPU_EACH(N) to[u] = dp__cpu_##isa##_prod_##A(left, right);                             \
    } else if (op == DP_OP_MIN) {                                                                  \
        DP__CPU_EACH(N) to[u] = dp__cpu_##isa##_min_##A(left, right);                              \
    } else {                                                                                       \
        DP__CPU_EACH(N) to[u] = dp__cpu_##isa##_max_##A(left, right);                              \
    }

#define DP__CPU_ROW(isa, T, A, N) /* whole numbers: in any order they come to the same */          \
    DP__CPU_INPUT(isa, T, N, 0)                                                                    \
    DP__CPU_EACH(N) v[u] = dp__cpu_##isa##_widen_##T(p[u]);                                        \
    for (size_t k = 1; k < in_count; ++k) {                                                        \
        DP__CPU_INPUT(isa, T, N, k)                                                                \
        DP__CPU_FOLD(isa, A, N, v, v[u], dp__cpu_##isa##_widen_##T(p[u]))                          \
    }
#define DP__CPU_TREE(isa, T, A, N)                                                                 \
    dp__v_##isa##_##A sums[DP__CPU_LEVELS][N];                                                     \
    size_t waiting = 0;                                                                            \
    for (size_t k = heads;;) {                                                                     \
        DP__CPU_INPUT(isa, T, N, k)                                                                \
        DP__CPU_EACH(N) v[u] = dp__cpu_##isa##_widen_##T(p[u]);                                    \
        if (++k < in_count) {                                                                      \
            DP__CPU_INPUT(isa, T, N, k)                                                            \
            DP__CPU_FOLD(isa, A, N, v, v[u], dp__cpu_##isa##_widen_##T(p[u]))                      \
            if (++k < in_count) {                                                                  \
                dp__v_##isa##_##A w[N];                                                            \
                DP__CPU_INPUT(isa, T, N, k)                                                        \
                DP__CPU_EACH(N) w[u] = dp__cpu_##isa##_widen_##T(p[u]);                            \
                if (++k < in_count) {                                                              \
                    DP__CPU_INPUT(isa, T, N, k)                                                    \
                    DP__CPU_FOLD(isa, A, N, w, w[u], dp__cpu_##isa##_widen_##T(p[u]))              \
                    ++k;                                                                           \
                }                                                                                  \
                DP__CPU_FOLD(isa, A, N, v, v[u], w[u])                                             \
            }                                                                                      \
        }                                                                                          \
        const bool last = k == in_count;                                                           \
        for (size_t n = k - heads; waiting > 0 && (n % 8 == 0 || last); n /= 2) {                  \
            --waiting;                                                                             \
            DP__CPU_FOLD(isa, A, N, v, sums[waiting][u], v[u])                                     \
        }                                                                                          \
        if (last)                                                                                  \
            break;                                                                                 \
        DP__CPU_EACH(N) sums[waiting][u] = v[u];                                                   \
        ++waiting;                                                                                 \
    }                                                                                              \
    for (size_t k = heads; k-- > 0;) {                                                             \
        DP__CPU_INPUT(isa, T, N, k)                                                                \
        DP__CPU_FOLD(isa, A, N, v, dp__cpu_##isa##_widen_##T(p[u]), v[u])                          \
    }

#define DP__CPU_REDUCE_BLOCKS(isa, T, A, N, ORDER, SCALE)                                          \
    for (; end - at >= N * sizeof(dp__v_##isa##_##T); at += N * sizeof(dp__v_##isa##_##T)) {       \
        const dp__v_##isa##_##T *p;                                                                \
        dp__v_##isa##_##A v[N];                                                                    \
        dp__v_##isa##_##T stored[N];                                                               \
        ORDER(isa, T, A, N)                                                                        \
        SCALE(N)                                                                                   \
        DP__CPU_EACH(N) stored[u] = dp__cpu_##isa##_narrow_##T(v[u]);                              \
        for (size_t k = 0; k < out_count; ++k) {                                                   \
            dp__v_##isa##_##T *const q = (void *)((char *)out[k] + at);                            \
            DP__CPU_EACH(N) q[u] = stored[u];                                                      \
        }                                                                                          \
    }
/* PAIRS: sums of two, as two devices or two processes have them, are compiled once more, with
   counts that are known and pointers that are copied: stores could be to any memory, so that each
   block would read args->in and args->out again. In caches they take half as long. Only f32 and f64
   have them, and only in whole vectors, since code has a size. */
#define DP__CPU_REDUCE(isa, T, A, ORDER, SCALARS, SCALE, PAIRS)                                    \
    DP__CPU_INLINE(isa)                                                                            \
    size_t dp__cpu_##isa##_blocks_##T(const dp_kernel_args *args, dp_op op, const void *const *in, \
                                      size_t in_count, size_t heads, void *const *out,             \
                                      size_t out_count, size_t at, size_t end)                     \
    {                                                                                              \
        const size_t near = in_count > 2 && end > DP__CPU_AHEAD ? end - DP__CPU_AHEAD : 0;         \
        (void)args, (void)heads; /* whole numbers ask for neither */                               \
        SCALARS                                                                                    \
        DP__CPU_REDUCE_BLOCKS(isa, T, A, DP__CPU_BLOCK_##isa, ORDER, SCALE)                        \
        return at;                                                                                 \
    }                                                                                              \
    DP__CPU_FUNCTION(isa)                                                                          \
    size_t dp__cpu_##isa##_reduce_##T(const dp_kernel_args *args, dp_op op, size_t at, size_t end) \
    {                                                                                              \
        const size_t outs = args->out_count;                                                       \
        if (PAIRS && DP__CPU_BYTES_##isa(uint8_t) > 1 && op == DP_OP_SUM && args->in_count == 2 && \
            args->heads == 0 && (outs == 1 || outs == 2)) {                                        \
            const void *const in[] = {args->in[0], args->in[1]};                                   \
            void *const out[] = {args->out[0], args->out[outs - 1]};                               \
            if (outs == 2)                                                                         \
                return dp__cpu_##isa##_blocks_##T(args, DP_OP_SUM, in, 2, 0, out, 2, at, end);     \
            return dp__cpu_##isa##_blocks_##T(args, DP_OP_SUM, in, 2, 0, out, 1, at, end);         \
        }                                                                                          \
        return dp__cpu_##isa##_blocks_##T(args, op, args->in, args->in_count, args->heads,         \
                                          args->out, outs, at, end);                               \
    }

/* Division by a power of two, as most world sizes are, is multiplication and much faster. */
#define DP__CPU_SCALARS(real)                                                                      \
    const real alpha = (real)args->alpha, beta = (real)args->beta, inverse = 1 / beta;             \
    const bool scaled = args->alpha != 1 || args->beta != 1;                                       \
    const bool exact = dp__cpu_is_power(args->beta);
#define DP__CPU_SCALED(N)                                                                          \
    if (scaled && exact) {                                                                         \
        DP__CPU_EACH(N) v[u] = v[u] * alpha * inverse;                                             \
    } else if (scaled) {                                                                           \
        DP__CPU_EACH(N) v[u] = v[u] * alpha / beta;                                                \
    }
#define DP__CPU_UNSCALED(N)

/* ==== >>sets ====================================================================================
   What else is computed with vectors, and all of it for each set of instructions.               */

#define DP__CPU_AXPBY(isa, T, A, real)                                                             \
    DP__CPU_FUNCTION(isa)                                                                          \
    size_t dp__cpu_##isa##_axpby_##T(const dp_kernel_args *args, dp_op op, size_t at, size_t end)  \
    {                                                                                              \
        const char *const x = args->in[0], *const y = args->in_count > 1 ? args->in[1] : NULL;     \
        char *const out = args->out[0];                                                            \
        const real alpha = (real)args->alpha, beta = (real)args->beta;                             \
        (void)op;                                                                                  \
        for (; end - at >= sizeof(dp__v_##isa##_##T); at += sizeof(dp__v_##isa##_##T)) {           \
            const dp__v_##isa##_##T *const p = (const void *)(x + at);                             \
            dp__v_##isa##_##A v = dp__cpu_##isa##_widen_##T(*p) * alpha;                           \
            if (y != NULL) {                                                                       \
                const dp__v_##isa##_##T *const q = (const void *)(y + at);                         \
                dp__v_##isa##_##A w = dp__cpu_##isa##_widen_##T(*q) * beta;                        \
                DP__CPU_ROUNDED(isa, v);                                                           \
                DP__CPU_ROUNDED(isa, w);                                                           \
                v += w;                                                                            \
            }                                                                                      \
            *(dp__v_##isa##_##T *)(void *)(out + at) = dp__cpu_##isa##_narrow_##T(v);              \
        }                                                                                          \
        return at;                                                                                 \
    }

#define DP__CPU_CONVERT(isa, to, from, To, From, expression)                                       \
    DP__CPU_FUNCTION(isa)                                                                          \
    size_t dp__cpu_##isa##_##from##_to_##to(void *out, const void *in, size_t at, size_t count)    \
    {                                                                                              \
        const size_t to_bytes = sizeof(dp__v_one_##to), from_bytes = sizeof(dp__v_one_##from);     \
        const size_t lanes = sizeof(To) / to_bytes;                                                \
        for (; count - at >= lanes; at += lanes) {                                                 \
            const From x = *(const From *)(const void *)((const char *)in + at * from_bytes);      \
            *(To *)(void *)((char *)out + at * to_bytes) = (expression);                           \
        }                                                                                          \
        return at;                                                                                 \
    }
#define DP__CPU_CONVERTS(isa, B, H, F, D, E) /* the types of bf16, f16, f32, f64, half an f32 */   \
    DP__CPU_CONVERT(isa, bf16, f32, B, F, dp__cpu_##isa##_narrow_bf16(x))                          \
    DP__CPU_CONVERT(isa, f32, bf16, F, B, dp__cpu_##isa##_widen_bf16(x))                           \
    DP__CPU_CONVERT(isa, f16, f32, H, F, dp__cpu_##isa##_narrow_f16(x))                            \
    DP__CPU_CONVERT(isa, f32, f16, F, H, dp__cpu_##isa##_widen_f16(x))                             \
    DP__CPU_CONVERT(isa, f64, f32, D, E, DP__CPU_WIDER_##isa(E, D, x))                             \
    DP__CPU_CONVERT(isa, f32, f64, E, D, DP__CPU_NARROWER_##isa(E, D, x))

#define DP__CPU_SQUARES(isa, T, S, D, WIDER)                                                       \
    DP__CPU_FUNCTION(isa)                                                                          \
    void dp__cpu_##isa##_squares_##T(double *lanes, const void *in, size_t count)                  \
    {                                                                                              \
        enum { VECTORS = DP__CPU_LANES * sizeof(double) / sizeof(D) };                             \
        const S *p = in;                                                                           \
        D *const all = (void *)lanes;                                                              \
        D sum[VECTORS];                                                                            \
        DP__CPU_EACH(VECTORS) sum[u] = all[u];                                                     \
        for (size_t i = 0; i < count; i += DP__CPU_LANES, p += VECTORS) {                          \
            __builtin_prefetch((const char *)p + DP__CPU_AHEAD);                                   \
            DP__CPU_EACH(VECTORS)                                                                  \
            {                                                                                      \
                const D x = WIDER(S, D, p[u]);                                                     \
                D square = x * x;                                                                  \
                DP__CPU_ROUNDED(isa, square);                                                      \
                sum[u] += square;                                                                  \
            }                                                                                      \
        }                                                                                          \
        DP__CPU_EACH(VECTORS) all[u] = sum[u];                                                     \
    }

/* A product that is rounded before it is added to anything. */
#define DP__CPU_PRODUCT(isa, V, name, value)                                                       \
    V name = (value);                                                                              \
    DP__CPU_ROUNDED(isa, name)

/* Asks for what a loop comes to. Up to 4 KiB ahead took as long, half a KiB longer. */
static inline void dp__cpu_ahead(const void *at)
{
    __builtin_prefetch((const char *)at + DP__CPU_AHEAD);
}

/* What both optimizers begin with. */
#define DP__CPU_UPDATE(V, real)                                                                    \
    const dp_kernel_args *args = update->args;                                                     \
    const dp__any_double *gate = args->in_count > 1 ? args->in[1] : NULL;                          \
    const real factor = gate != NULL ? (real)gate[0] : 1;                                          \
    const real sign = (args->flags & DP_KERNEL_MAXIMIZE) != 0 ? -factor : factor;                  \
    const real lr = (real)args->numbers[0], decay = (real)args->numbers[1];                        \
    const size_t lanes = sizeof(V) / sizeof(real);                                                 \
    dp__any_##real *x = update->x;                                                                 \
    const dp__any_##real *grad = update->grad;

#define DP__CPU_SGD(isa, V, real)                                                                  \
    DP__CPU_FUNCTION(isa)                                                                          \
    size_t dp__cpu_##isa##_sgd_##real(const dp__cpu_stepped *update, size_t at, size_t count)      \
    {                                                                                              \
        DP__CPU_UPDATE(V, real)                                                                    \
        dp__any_##real *velocity = update->state[0];                                               \
        const real momentum = (real)args->numbers[2], rest = (real)args->numbers[3];               \
        const bool nesterov = (args->flags & DP_KERNEL_NESTEROV) != 0;                             \
        const bool first = (args->flags & DP_KERNEL_FIRST) != 0;                                   \
        for (; count - at >= lanes; at += lanes) {                                                 \
            V *const own = (void *)(x + at);                                                       \
            dp__cpu_ahead(own);                                                                    \
            dp__cpu_ahead(grad + at);                                                              \
            DP__CPU_PRODUCT(isa, V, g, *(const V *)(const void *)(grad + at) * sign);              \
            DP__CPU_PRODUCT(isa, V, decayed, *own *decay);                                         \
            if (decay != 0)                                                                        \
                g += decayed;                                                                      \
            if (velocity != NULL) {                                                                \
                V *const kept = (void *)(velocity + at);                                           \
                dp__cpu_ahead(kept);                                                               \
                DP__CPU_PRODUCT(isa, V, old, *kept *momentum);                                     \
                DP__CPU_PRODUCT(isa, V, fresh, g *rest);                                           \
                V now = old + fresh;                                                               \
                if (first)                                                                         \
                    now = g;                                                                       \
                DP__CPU_PRODUCT(isa, V, ahead, now *momentum);                                     \
                *kept = now;                                                                       \
                g = nesterov ? (V)(g + ahead) : now;                                               \
            }                                                                                      \
            DP__CPU_PRODUCT(isa, V, step, g *lr);                                                  \
            *own -= step;                                                                          \
        }                                                                                          \
        return at;                                                                                 \
    }

#define DP__CPU_ADAMW(isa, V, real)                                                                \
    DP__CPU_FUNCTION(isa)                                                                          \
    size_t dp__cpu_##isa##_adamw_##real(const dp__cpu_stepped *update, size_t at, size_t count)    \
    {                                                                                              \
        DP__CPU_UPDATE(V, real)                                                                    \
        dp__any_##real *mean = update->state[0], *square = update->state[1];                       \
        const double *numbers = args->numbers;                                                     \
        const real fresh1 = (real)numbers[2], kept2 = (real)numbers[3];                            \
        const real fresh2 = (real)numbers[4], bias2 = (real)numbers[5], eps = (real)numbers[6];    \
        const bool near = fresh1 < (real)0.5;                                                      \
        const real way = near ? fresh1 : fresh1 - 1;                                               \
        const bool l2 = (args->flags & DP_KERNEL_L2) != 0;                                         \
        for (; count - at >= lanes; at += lanes) {                                                 \
            V *const own = (void *)(x + at), *const m = (void *)(mean + at);                       \
            V *const s = (void *)(square + at), root;                                              \
            dp__cpu_ahead(own);                                                                    \
            dp__cpu_ahead(grad + at);                                                              \
            dp__cpu_ahead(m);                                                                      \
            dp__cpu_ahead(s);                                                                      \
            DP__CPU_PRODUCT(isa, V, g, *(const V *)(const void *)(grad + at) * sign);              \
            DP__CPU_PRODUCT(isa, V, decayed, *own *decay);                                         \
            const V from = l2 ? (V)*own : decayed;                                                 \
            if (l2 && decay != 0)                                                                  \
                g += decayed;                                                                      \
            DP__CPU_PRODUCT(isa, V, moved, (g - *m) * way);                                        \
            const V now = (near ? *m : g) + moved;                                                 \
            DP__CPU_PRODUCT(isa, V, old, *s *kept2);                                               \
            DP__CPU_PRODUCT(isa, V, squared, g *g);                                                \
            DP__CPU_PRODUCT(isa, V, fresh, squared *fresh2);                                       \
            const V squares = old + fresh;                                                         \
            DP__CPU_ROOT_##isa(root, squares, real);                                               \
            DP__CPU_PRODUCT(isa, V, step, now / (root / bias2 + eps) * lr);                        \
            *m = now;                                                                              \
            *s = squares;                                                                          \
            *own = from - step;                                                                    \
        }                                                                                          \
        return at;                                                                                 \
    }

#define DP__CPU_UPDATES(isa)                                                                       \
    DP__CPU_SGD(isa, dp__v_##isa##_f32, float)                                                     \
    DP__CPU_SGD(isa, dp__v_##isa##_f64, double)                                                    \
    DP__CPU_ADAMW(isa, dp__v_##isa##_f32, float)                                                   \
    DP__CPU_ADAMW(isa, dp__v_##isa##_f64, double)
#define DP__CPU_TABLE_UPDATES(isa)                                                                 \
    .sgd = {[DP_F32] = dp__cpu_##isa##_sgd_float, [DP_F64] = dp__cpu_##isa##_sgd_double},          \
    .adamw = {[DP_F32] = dp__cpu_##isa##_adamw_float, [DP_F64] = dp__cpu_##isa##_adamw_double}

#define DP__CPU_REAL(isa, T, A, real)                                                              \
    DP__CPU_REDUCE(isa, T, A, DP__CPU_TREE, DP__CPU_SCALARS(real), DP__CPU_SCALED,                 \
                   sizeof(dp__v_##isa##_##T) == sizeof(dp__v_##isa##_##A))                         \
    DP__CPU_AXPBY(isa, T, A, real)
#define DP__CPU_REALS(isa, F16) /* F16 is the generator of its half-precision conversions */       \
    DP__CPU_PLAIN(isa, f32, dp__v_##isa##_f32)                                                     \
    DP__CPU_PLAIN(isa, f64, dp__v_##isa##_f64)                                                     \
    DP__CPU_BF16(isa, dp__v_##isa##_bf16, dp__v_##isa##_f32, dp__v_##isa##_u32, dp__v_##isa##_i32) \
    F16(isa, dp__v_##isa##_f16, dp__v_##isa##_f32, dp__v_##isa##_u32, dp__v_##isa##_i32)           \
    DP__CPU_OPS(isa, f32, dp__v_##isa##_f32, dp__v_##isa##_f32, dp__v_##isa##_i32)                 \
    DP__CPU_OPS(isa, f64, dp__v_##isa##_f64, dp__v_##isa##_f64, dp__v_##isa##_i64)                 \
    DP__CPU_REAL(isa, f32, f32, float)                                                             \
    DP__CPU_REAL(isa, f64, f64, double)                                                            \
    DP__CPU_REAL(isa, f16, f32, float)                                                             \
    DP__CPU_REAL(isa, bf16, f32, float)                                                            \
    DP__CPU_CONVERTS(isa, dp__v_##isa##_bf16, dp__v_##isa##_f16, dp__v_##isa##_f32,                \
                     dp__v_##isa##_f64, dp__v_##isa##_half)

#define DP__CPU_WHOLE(isa, T, V, U, M)                                                             \
    DP__CPU_PLAIN(isa, T, V)                                                                       \
    DP__CPU_OPS(isa, T, V, U, M)                                                                   \
    DP__CPU_REDUCE(isa, T, T, DP__CPU_ROW, , DP__CPU_UNSCALED, false)
#define DP__CPU_WHOLES(isa)                                                                        \
    DP__CPU_WHOLE(isa, i64, dp__v_##isa##_i64, dp__v_##isa##_u64, dp__v_##isa##_i64)               \
    DP__CPU_WHOLE(isa, i32, dp__v_##isa##_i32, dp__v_##isa##_u32, dp__v_##isa##_i32)               \
    DP__CPU_WHOLE(isa, i16, dp__v_##isa##_i16, dp__v_##isa##_u16, dp__v_##isa##_i16)               \
    DP__CPU_WHOLE(isa, i8, dp__v_##isa##_i8, dp__v_##isa##_u8, dp__v_##isa##_i8)                   \
    DP__CPU_WHOLE(isa, u8, dp__v_##isa##_u8, dp__v_##isa##_u8, dp__v_##isa##_i8)                   \
    DP__CPU_B8(isa, dp__v_##isa##_u8)                                                              \
    DP__CPU_REDUCE(isa, b8, u8, DP__CPU_ROW, , DP__CPU_UNSCALED, false)

#define DP__CPU_TABLE_REALS(isa)                                                                   \
    [DP_F32] = dp__cpu_##isa##_reduce_f32, [DP_F64] = dp__cpu_##isa##_reduce_f64,                  \
    [DP_F16] = dp__cpu_##isa##_reduce_f16, [DP_BF16] = dp__cpu_##isa##_reduce_bf16
#define DP__CPU_TABLE_WHOLES(isa)                                                                  \
    [DP_I64] = dp__cpu_##isa##_reduce_i64, [DP_I32] = dp__cpu_##isa##_reduce_i32,                  \
    [DP_I16] = dp__cpu_##isa##_reduce_i16, [DP_I8] = dp__cpu_##isa##_reduce_i8,                    \
    [DP_U8] = dp__cpu_##isa##_reduce_u8, [DP_BOOL] = dp__cpu_##isa##_reduce_b8
#define DP__CPU_TABLE_PAIRS(isa)                                                                   \
    .axpby = {[DP_F32] = dp__cpu_##isa##_axpby_f32,                                                \
              [DP_F64] = dp__cpu_##isa##_axpby_f64,                                                \
              [DP_F16] = dp__cpu_##isa##_axpby_f16,                                                \
              [DP_BF16] = dp__cpu_##isa##_axpby_bf16},                                             \
    .convert = {                                                                                   \
        [DP_F16] = {[DP_F32] = dp__cpu_##isa##_f32_to_f16},                                        \
        [DP_BF16] = {[DP_F32] = dp__cpu_##isa##_f32_to_bf16},                                      \
        [DP_F64] = {[DP_F32] = dp__cpu_##isa##_f32_to_f64},                                        \
        [DP_F32] = {[DP_F16] = dp__cpu_##isa##_f16_to_f32,                                         \
                    [DP_BF16] = dp__cpu_##isa##_bf16_to_f32,                                       \
                    [DP_F64] = dp__cpu_##isa##_f64_to_f32},                                        \
    }
#define DP__CPU_TABLE_SQUARES(isa)                                                                 \
    .squares = {[DP_F32] = dp__cpu_##isa##_squares_f32, [DP_F64] = dp__cpu_##isa##_squares_f64}

/* At least 1 and without a fraction: then 1 / x is exact. */
static bool dp__cpu_is_power(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x >= 1 && bits << 12 == 0;
}

DP__CPU_TYPES(one);
DP__CPU_REALS(one, DP__CPU_F16)
DP__CPU_WHOLES(one)
DP__CPU_UPDATES(one)
static const dp__simd dp__cpu_one = {
    .name = "one",
    .reduce = {DP__CPU_TABLE_REALS(one), DP__CPU_TABLE_WHOLES(one)},
    DP__CPU_TABLE_PAIRS(one),
    DP__CPU_TABLE_UPDATES(one)};

DP__CPU_TYPES(base);
DP__CPU_REALS(base, DP__CPU_F16)
DP__CPU_WHOLES(base)
DP__CPU_SQUARES(base, f32, dp__v_base_half, dp__v_base_f64, DP__CPU_WIDER_base)
DP__CPU_SQUARES(base, f64, dp__v_base_f64, dp__v_base_f64, DP__CPU_WIDER_one)
DP__CPU_UPDATES(base)
static const dp__simd dp__cpu_base = {
    .name = "base",
    .reduce = {DP__CPU_TABLE_REALS(base), DP__CPU_TABLE_WHOLES(base)},
    DP__CPU_TABLE_PAIRS(base),
    DP__CPU_TABLE_SQUARES(base),
    DP__CPU_TABLE_UPDATES(base)};

#if defined(__x86_64__)
typedef short dp__v_short8 __attribute__((vector_size(16)));
typedef float dp__v_float8 __attribute__((vector_size(32)));
#if defined(__clang__) /* newer ones have no such builtin, and GCC 12 no such vectors */
typedef __fp16 dp__v_half8 __attribute__((vector_size(16)));
#define DP__CPU_OF_HALVES(h) __builtin_convertvector((dp__v_half8)(h), dp__v_float8)
#else
#define DP__CPU_OF_HALVES(h) __builtin_ia32_vcvtph2ps256((dp__v_short8)(h))
#endif
#define DP__CPU_F16C(isa, H, F, U, I)                                                              \
    DP__CPU_INLINE(isa) F dp__cpu_##isa##_widen_f16(H h)                                           \
    {                                                                                              \
        return (F)DP__CPU_OF_HALVES(h);                                                            \
    }                                                                                              \
    DP__CPU_INLINE(isa) H dp__cpu_##isa##_narrow_f16(F f)                                          \
    {                                                                                              \
        return (H)__builtin_ia32_vcvtps2ph256((dp__v_float8)f, 0);                                 \
    }

DP__CPU_TYPES(avx2);
DP__CPU_REALS(avx2, DP__CPU_F16C)
DP__CPU_SQUARES(avx2, f32, dp__v_avx2_half, dp__v_avx2_f64, DP__CPU_WIDER_avx2)
DP__CPU_SQUARES(avx2, f64, dp__v_avx2_f64, dp__v_avx2_f64, DP__CPU_WIDER_one)
DP__CPU_UPDATES(avx2)
static const dp__simd dp__cpu_avx2 = {.name = "avx2",
                                      .reduce = {DP__CPU_TABLE_REALS(avx2)},
                                      DP__CPU_TABLE_PAIRS(avx2),
                                      DP__CPU_TABLE_SQUARES(avx2),
                                      DP__CPU_TABLE_UPDATES(avx2)};

static const dp__simd *dp__simd_best(void)
{
    unsigned a = 0, b = 0, c = 0, d = 0; /* clang 14 does not know "f16c" */
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    return __builtin_cpu_supports("avx2") && f16c ? &dp__cpu_avx2 : &dp__cpu_base;
}
#else
static const dp__simd *dp__simd_best(void)
{
    return &dp__cpu_base;
}
#endif

/* $DP_SIMD = base: only what every machine of this kind has. */
static dp_status dp__simd_choose(const dp__simd **out)
{
    const dp__simd *best = dp__simd_best();
    const char *name = dp__os_env("DP_SIMD");
    *out = name != NULL && strcmp(name, dp__cpu_base.name) == 0 ? &dp__cpu_base : best;
    if (name != NULL && strcmp(name, (*out)->name) != 0)
        return dp_error(DP_ERR_INVALID, "cpu: DP_SIMD is '%s'; this machine has base%s%s", name,
                        best != &dp__cpu_base ? " and " : "",
                        best != &dp__cpu_base ? best->name : "");
    return DP_OK;
}

/* ==== >>cast ====================================================================================
   A conversion of any pair is at most three steps over a tile: narrow types widen to f32 or i32, a
   wide type (f32, f64, i32, i64) becomes another, and that one narrows. The halves are reached only
   through f32. Tiles are always converted whole, with zeros after the end, so that the loops have a
   constant count. Integers are saturated at every step, which is the same as once at the end.   */

#define DP__CPU_TILE 128

typedef union dp__cpu_tile {
    float f32[DP__CPU_TILE];
    double f64[DP__CPU_TILE];
    int64_t i64[DP__CPU_TILE];
    int32_t i32[DP__CPU_TILE];
    int16_t i16[DP__CPU_TILE];
    int8_t i8[DP__CPU_TILE];
    uint8_t u8[DP__CPU_TILE], b8[DP__CPU_TILE];
} dp__cpu_tile;

typedef void dp__cpu_step_fn(dp__cpu_tile *restrict out, const dp__cpu_tile *restrict in);

#define DP__CPU_STEP(from, to, expression)                                                         \
    static void dp__cpu_##from##_##to(dp__cpu_tile *restrict out, const dp__cpu_tile *restrict in) \
    {                                                                                              \
        for (int i = 0; i < DP__CPU_TILE; ++i) {                                                   \
            __typeof__(in->from[0]) x = in->from[i];                                               \
            out->to[i] = (__typeof__(out->to[0]))(expression);                                     \
        }                                                                                          \
    }
#define DP__CPU_CLAMP(low, high) (x < (low)) ? (low) : (x > (high)) ? (high) : x
#define DP__CPU_TRUNCATE(T, low, high, limit)                                                      \
    (x != x) ? 0 : (x >= (limit)) ? (high) : (x < -(limit)) ? (low) : (T)x

DP__CPU_STEP(i16, i32, x)
DP__CPU_STEP(i8, i32, x)
DP__CPU_STEP(u8, i32, x)
DP__CPU_STEP(b8, i32, x != 0)
DP__CPU_STEP(f32, i32, DP__CPU_TRUNCATE(int32_t, INT32_MIN, INT32_MAX, 0x1p31f))
DP__CPU_STEP(f64, i32, DP__CPU_TRUNCATE(int32_t, INT32_MIN, INT32_MAX, 0x1p31))
DP__CPU_STEP(f32, i64, DP__CPU_TRUNCATE(int64_t, INT64_MIN, INT64_MAX, 0x1p63f))
DP__CPU_STEP(f64, i64, DP__CPU_TRUNCATE(int64_t, INT64_MIN, INT64_MAX, 0x1p63))
DP__CPU_STEP(i32, f32, x)
DP__CPU_STEP(i32, f64, x)
DP__CPU_STEP(i32, i64, x)
DP__CPU_STEP(i64, f32, x)
DP__CPU_STEP(i64, f64, x)
DP__CPU_STEP(i64, i32, DP__CPU_CLAMP(INT32_MIN, INT32_MAX))
DP__CPU_STEP(i32, i16, DP__CPU_CLAMP(INT16_MIN, INT16_MAX))
DP__CPU_STEP(i32, i8, DP__CPU_CLAMP(INT8_MIN, INT8_MAX))
DP__CPU_STEP(i32, u8, DP__CPU_CLAMP(0, UINT8_MAX))
DP__CPU_STEP(f32, b8, x != 0)
DP__CPU_STEP(f64, b8, x != 0)
DP__CPU_STEP(i32, b8, x != 0)
DP__CPU_STEP(i64, b8, x != 0)

static dp__cpu_step_fn *const dp__cpu_steps[DP_DTYPE_COUNT][DP_DTYPE_COUNT] = {
    /* [to][from] */
    [DP_F32] = {[DP_I32] = dp__cpu_i32_f32, [DP_I64] = dp__cpu_i64_f32},
    [DP_F64] = {[DP_I32] = dp__cpu_i32_f64, [DP_I64] = dp__cpu_i64_f64},
    [DP_I64] = {[DP_F32] = dp__cpu_f32_i64, [DP_F64] = dp__cpu_f64_i64, [DP_I32] = dp__cpu_i32_i64},
    [DP_I32] = {[DP_F32] = dp__cpu_f32_i32,
                [DP_F64] = dp__cpu_f64_i32,
                [DP_I64] = dp__cpu_i64_i32,
                [DP_I16] = dp__cpu_i16_i32,
                [DP_I8] = dp__cpu_i8_i32,
                [DP_U8] = dp__cpu_u8_i32,
                [DP_BOOL] = dp__cpu_b8_i32},
    [DP_I16] = {[DP_I32] = dp__cpu_i32_i16},
    [DP_I8] = {[DP_I32] = dp__cpu_i32_i8},
    [DP_U8] = {[DP_I32] = dp__cpu_i32_u8},
    [DP_BOOL] = {[DP_F32] = dp__cpu_f32_b8,
                 [DP_F64] = dp__cpu_f64_b8,
                 [DP_I32] = dp__cpu_i32_b8,
                 [DP_I64] = dp__cpu_i64_b8},
};

static dp_dtype dp__cpu_wide(dp_dtype dtype)
{
    if (dtype == DP_F64 || dtype == DP_I64)
        return dtype;
    return dtype <= DP_BF16 ? DP_F32 : DP_I32;
}

/* One step from tile `*at` to the other one. */
static void dp__cpu_step(const dp__simd *simd, dp__cpu_tile *tiles, int *at, dp_dtype from,
                         dp_dtype to)
{
    if (from == to)
        return;
    if (from <= DP_BF16 && to <= DP_BF16)
        simd->convert[to][from](&tiles[!*at], &tiles[*at], 0, DP__CPU_TILE);
    else
        dp__cpu_steps[to][from](&tiles[!*at], &tiles[*at]);
    *at = !*at;
}

static void dp__cpu_cast_tiled(const dp__simd *simd, dp_dtype to, char *out, dp_dtype from,
                               const char *in, size_t count)
{
    const size_t to_bytes = dp_dtype_bytes(to), from_bytes = dp_dtype_bytes(from);
    const dp_dtype first = dp__cpu_wide(from), last = to == DP_BOOL ? first : dp__cpu_wide(to);
    dp__cpu_tile tiles[2];
    for (size_t i = 0; i < count; i += DP__CPU_TILE) {
        const size_t n = count - i < DP__CPU_TILE ? count - i : DP__CPU_TILE;
        int at = 0;
        memcpy(tiles, in + i * from_bytes, n * from_bytes);
        memset((char *)tiles + n * from_bytes, 0, (DP__CPU_TILE - n) * from_bytes);
        dp__cpu_step(simd, tiles, &at, from, first);
        dp__cpu_step(simd, tiles, &at, first, last);
        dp__cpu_step(simd, tiles, &at, last, to);
        memcpy(out + i * to_bytes, &tiles[at], n * to_bytes);
    }
}

static void dp__cpu_cast(const dp__simd *simd, dp_dtype to, void *out, dp_dtype from,
                         const void *in, size_t count)
{
    if (from <= DP_BF16 && to <= DP_BF16 && simd->convert[to][from] != NULL) {
        const size_t at = simd->convert[to][from](out, in, 0, count);
        (void)dp__cpu_one.convert[to][from](out, in, at, count);
    } else {
        dp__cpu_cast_tiled(simd, to, out, from, in, count);
    }
}

/* ==== >>copy ====================================================================================
   Bytes and strided blocks. Dims are sorted by the strides of the output, so that writes run
   forward whatever the order of the shape is, and merged where both sides allow; that leaves planes
   of rows and columns. Short rows of big blocks are streamed past the caches: a plain store
   would read its line first. One long row is left to memcpy, which does the same.               */

#define DP__CPU_STREAM_BYTES ((size_t)16 << 20) /* below, the output is better kept in a cache */
#define DP__CPU_STREAM_ROW   256                /* below, the two ends of a row are most of it */

#if defined(__x86_64__) && defined(__clang__)
#define DP__CPU_STREAM(q, v) __builtin_nontemporal_store(v, q)
#elif defined(__x86_64__)
#define DP__CPU_STREAM(q, v) __builtin_ia32_movntdq(q, v)
#endif

#if defined(__x86_64__)
typedef long long dp__v_line __attribute__((vector_size(16), may_alias));
/* `step`: 64, or 0, which puts the same line everywhere. */
static void dp__cpu_stream_lines(char *dst, const char *src, size_t step, size_t lines)
{
    for (; lines > 0; --lines, dst += 64, src += step) {
        const dp__v_base_i64 *const p = (const void *)src;
        const dp__v_base_i64 a = p[0], b = p[1], c = p[2], d = p[3];
        dp__v_line *const q = (void *)dst;
        DP__CPU_STREAM(q + 0, (dp__v_line)a);
        DP__CPU_STREAM(q + 1, (dp__v_line)b);
        DP__CPU_STREAM(q + 2, (dp__v_line)c);
        DP__CPU_STREAM(q + 3, (dp__v_line)d);
    }
}
static void dp__cpu_stream_end(void) /* unlocking a mutex does not order streamed lines */
{
    __builtin_ia32_sfence();
}
#else
static void dp__cpu_stream_lines(char *dst, const char *src, size_t step, size_t lines)
{
    for (; lines > 0; --lines, dst += 64, src += step)
        memcpy(dst, src, 64);
}
static void dp__cpu_stream_end(void)
{
}
#endif

/* Bytes before the first line that begins at or after `p`. */
static size_t dp__cpu_head(const void *p)
{
    return (64 - (uintptr_t)p % 64) % 64;
}

/* Where part `part` of `count` things begins. */
static size_t dp__cpu_share(size_t count, size_t part, size_t part_count)
{
    return count / part_count * part + count % part_count * part / part_count;
}

/* The same for bytes: at a line of `base`, except the two ends. If lines begin in the middle of an
   element, then at multiples of 64 bytes from `base` on instead. */
static size_t dp__cpu_cut(const void *base, size_t element, size_t bytes, size_t part,
                          size_t part_count)
{
    const size_t line = dp__cpu_head(base), head = line % element == 0 ? line : 0;
    if (part == 0)
        return 0;
    if (part == part_count || bytes <= head)
        return bytes;
    return head + 64 * dp__cpu_share((bytes - head) / 64, part, part_count);
}

static void dp__cpu_copy_rows(char *dst, size_t dst_pitch, const char *src, size_t src_pitch,
                              size_t row_bytes, size_t rows, bool stream)
{
    if (!stream || row_bytes < DP__CPU_STREAM_ROW || rows == 1) {
        for (size_t i = 0; i < rows; ++i, dst += dst_pitch, src += src_pitch)
            memcpy(dst, src, row_bytes);
        return;
    }
    for (size_t i = 0; i < rows; ++i, dst += dst_pitch, src += src_pitch) {
        const size_t head = dp__cpu_head(dst), lines = (row_bytes - head) / 64;
        const size_t tail = head + lines * 64;
        memcpy(dst, src, head);
        dp__cpu_stream_lines(dst + head, src + head, 64, lines);
        memcpy(dst + tail, src + tail, row_bytes - tail);
    }
    dp__cpu_stream_end();
}

/* A block larger than caches is written past them: else it would be read first. `all`: bytes of the
   whole kernel, which this is a part of. */
static void dp__cpu_fill(char *out, size_t bytes, uint64_t bits, size_t element, size_t all)
{
    const size_t head = dp__cpu_head(out), tail = bytes - (bytes - head) % 64;
    uint64_t line[16];
    for (size_t i = element; i < sizeof bits; i *= 2) { /* 1, 2 and 4 bytes become 8 */
        bits = (bits & (UINT64_MAX >> (64 - 8 * i))) | bits << (8 * i);
    }
    for (int i = 0; i < 16; ++i)
        line[i] = bits;
    if (all >= DP__CPU_STREAM_BYTES && bytes >= DP__CPU_STREAM_ROW) {
        const char *const turned = (const char *)line + head % sizeof bits;
        memcpy(out, line, head);
        dp__cpu_stream_lines(out + head, turned, 0, (tail - head) / 64);
        memcpy(out + tail, turned, bytes - tail);
        dp__cpu_stream_end();
        return;
    }
    if (bits == (bits & 0xff) * 0x0101010101010101) {
        memset(out, (int)(bits & 0xff), bytes);
        return;
    }
    size_t done = bytes < 64 ? bytes : 64;
    memcpy(out, line, done);
    while (done < bytes) {
        const size_t behind = done < 4096 ? done : 4096;
        const size_t more = bytes - done < behind ? bytes - done : behind;
        memcpy(out + done, out, more);
        done += more;
    }
}

typedef struct dp__cpu_plane { /* strides in bytes */
    char *out;
    const char *in;
    size_t rows, cols, out_row, out_col, in_row, in_col;
} dp__cpu_plane;

static void dp__cpu_plane_part(dp__cpu_plane *part, const dp__cpu_plane *plane, size_t row,
                               size_t col, size_t rows, size_t cols)
{
    part->out = plane->out + row * plane->out_row + col * plane->out_col;
    part->in = plane->in + row * plane->in_row + col * plane->in_col;
    part->rows = plane->rows - row < rows ? plane->rows - row : rows;
    part->cols = plane->cols - col < cols ? plane->cols - col : cols;
}

/* The columns after this part: no hardware predicts jumps that long. */
static void dp__cpu_plane_prefetch(const dp__cpu_plane *part, size_t cols_left)
{
    const size_t end = cols_left < 2 * part->cols ? cols_left : 2 * part->cols;
    for (size_t c = part->cols; c < end; ++c)
        __builtin_prefetch(part->in + c * part->in_col);
}

#if defined(__clang__)
#define DP__CPU_SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DP__CPU_SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, (V){__VA_ARGS__})
#endif
#define DP__CPU_LOW_u64  0, 2
#define DP__CPU_HIGH_u64 1, 3
#define DP__CPU_LOW_u32  0, 4, 1, 5
#define DP__CPU_HIGH_u32 2, 6, 3, 7
#define DP__CPU_LOW_u16  0, 8, 1, 9, 2, 10, 3, 11
#define DP__CPU_HIGH_u16 4, 12, 5, 13, 6, 14, 7, 15
#define DP__CPU_LOW_u8   0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define DP__CPU_HIGH_u8  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

/* Transpose N vectors of N elements: interleave the first half with the second, log2(N) times. */
#define DP__CPU_TURN(T, V, N)                                                                      \
    static inline void dp__cpu_turn_##T(char *out, size_t out_row, const char *in, size_t in_col)  \
    {                                                                                              \
        V a[N], b[N];                                                                              \
        DP__CPU_EACH(N) a[u] = *(const V *)(const void *)(in + u * in_col);                        \
        DP__CPU_UNROLL for (size_t done = 1; done < N; done *= 2)                                  \
        {                                                                                          \
            DP__CPU_EACH(N / 2)                                                                    \
            {                                                                                      \
                b[2 * u] = DP__CPU_SHUFFLE(V, a[u], a[u + N / 2], DP__CPU_LOW_##T);                \
                b[2 * u + 1] = DP__CPU_SHUFFLE(V, a[u], a[u + N / 2], DP__CPU_HIGH_##T);           \
            }                                                                                      \
            DP__CPU_EACH(N) a[u] = b[u];                                                           \
        }                                                                                          \
        DP__CPU_EACH(N) * (V *)(void *)(out + u * out_row) = a[u];                                 \
    }

/* Squares are transposed in a buffer and written in whole lines: with strides of powers of two, the
   lines of many rows do not fit into the first cache at the same time. */
#define DP__CPU_STRIDED(T, V, N, SIDE)                                                             \
    DP__CPU_TURN(T, V, N)                                                                          \
    static void dp__cpu_square_##T(const dp__cpu_plane *at)                                        \
    {                                                                                              \
        const size_t bytes = sizeof(dp__any_##T), line = SIDE * bytes;                             \
        char square[SIDE * SIDE * sizeof(dp__any_##T)];                                            \
        for (size_t c = 0; c < SIDE; c += N) {                                                     \
            for (size_t r = 0; r < SIDE; r += N) {                                                 \
                dp__cpu_turn_##T(square + r * line + c * bytes, line,                              \
                                 at->in + c * at->in_col + r * bytes, at->in_col);                 \
            }                                                                                      \
        }                                                                                          \
        for (size_t r = 0; r < SIDE; ++r) {                                                        \
            memcpy(at->out + r * at->out_row, square + r * line, line);                            \
        }                                                                                          \
    }                                                                                              \
    static void dp__cpu_edge_##T(const dp__cpu_plane *at)                                          \
    {                                                                                              \
        const size_t cols = at->cols, out_col = at->out_col, in_col = at->in_col;                  \
        for (size_t r = 0; r < at->rows; ++r) {                                                    \
            char *q = at->out + r * at->out_row;                                                   \
            const char *p = at->in + r * at->in_row;                                               \
            for (size_t c = 0; c < cols; ++c, q += out_col, p += in_col) {                         \
                *(dp__any_##T *)(void *)q = *(const dp__any_##T *)(const void *)p;                 \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void dp__cpu_strided_##T(const dp__cpu_plane *plane)                                    \
    {                                                                                              \
        const size_t bytes = sizeof(dp__any_##T);                                                  \
        const bool turned = plane->in_row == bytes && plane->out_col == bytes;                     \
        const size_t side = plane->rows < SIDE ? SIDE * SIDE / plane->rows : SIDE;                 \
        dp__cpu_plane at = *plane;                                                                 \
        for (size_t r = 0; r < plane->rows; r += SIDE) {                                           \
            for (size_t c = 0; c < plane->cols; c += side) {                                       \
                dp__cpu_plane_part(&at, plane, r, c, SIDE, side);                                  \
                if (turned && at.rows == SIDE && at.cols == SIDE) {                                \
                    dp__cpu_plane_prefetch(&at, plane->cols - c);                                  \
                    dp__cpu_square_##T(&at);                                                       \
                } else {                                                                           \
                    dp__cpu_edge_##T(&at);                                                         \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

DP__CPU_STRIDED(u8, dp__v_base_u8, 16, 32)
DP__CPU_STRIDED(u16, dp__v_base_u16, 8, 32)
DP__CPU_STRIDED(u32, dp__v_base_u32, 4, 16)
DP__CPU_STRIDED(u64, dp__v_base_u64, 2, 8)

typedef struct dp__cpu_dim { /* strides in bytes */
    size_t count, out, in;
} dp__cpu_dim;

typedef struct dp__cpu_plan { /* at least two dims, the last two are the plane */
    size_t element, bytes, ndim;
    dp__cpu_dim dims[DP_MAX_DIMS + 1];
} dp__cpu_plan;

static void dp__cpu_dims_swap(dp__cpu_dim *a, dp__cpu_dim *b)
{
    const dp__cpu_dim dim = *a;
    *a = *b;
    *b = dim;
}

static void dp__cpu_plan_merge(dp__cpu_plan *plan)
{
    dp__cpu_dim *last = plan->dims;
    for (size_t d = 1; d < plan->ndim; ++d) {
        const dp__cpu_dim dim = plan->dims[d];
        if (last->out == dim.out * dim.count && last->in == dim.in * dim.count)
            *last = (dp__cpu_dim){last->count * dim.count, dim.out, dim.in};
        else
            *++last = dim;
    }
    plan->ndim = (size_t)(last - plan->dims) + 1;
}

static void dp__cpu_plan_make(const dp_kernel_args *args, dp__cpu_plan *plan)
{
    const size_t element = dp_dtype_bytes(args->dtype);
    *plan = (dp__cpu_plan){.element = element, .bytes = args->count * element, .ndim = 1};
    plan->dims[0] = (dp__cpu_dim){1, SIZE_MAX, 0}; /* stays in front of all others */
    for (int d = 0; d < args->ndim; ++d) {
        if (args->shape[d] == 1)
            continue;
        dp__cpu_dim *at = &plan->dims[plan->ndim++];
        *at = (dp__cpu_dim){(size_t)args->shape[d], (size_t)args->out_stride[d] * element,
                            (size_t)args->in_stride[d] * element};
        for (; at[-1].out < at->out; --at)
            dp__cpu_dims_swap(at - 1, at);
    }
    plan->dims[0].out = 0;
    if (plan->ndim == 1)
        plan->dims[plan->ndim++] = (dp__cpu_dim){1, element, element};
    dp__cpu_plan_merge(plan);
}

static void dp__cpu_copy_plane(const dp__cpu_plan *plan, const dp__cpu_plane *plane)
{
    const size_t element = plan->element;
    const bool stream = plan->bytes >= DP__CPU_STREAM_BYTES;
    if (plane->in_col == element && plane->out_col == element)
        dp__cpu_copy_rows(plane->out, plane->out_row, plane->in, plane->in_row,
                          plane->cols * element, plane->rows, stream);
    else if (element == 1)
        dp__cpu_strided_u8(plane);
    else if (element == 2)
        dp__cpu_strided_u16(plane);
    else if (element == 4)
        dp__cpu_strided_u32(plane);
    else
        dp__cpu_strided_u64(plane);
}

/* The rows of a plane are along the dim that is dense in the input, if the columns are not. */
static void dp__cpu_plan_turn(dp__cpu_plan *plan)
{
    dp__cpu_dim *const row = &plan->dims[plan->ndim - 2];
    for (dp__cpu_dim *dim = plan->dims; dim < row && row[1].in != plan->element; ++dim) {
        if (dim->in == plan->element)
            dp__cpu_dims_swap(dim, row);
    }
}

static dp__cpu_plane dp__cpu_plan_plane(const dp__cpu_plan *plan, const dp_kernel_args *args,
                                        size_t index)
{
    const dp__cpu_dim *dim = &plan->dims[plan->ndim - 2], *const col = dim + 1;
    dp__cpu_plane plane = {.out = args->out[0],
                           .in = args->in[0],
                           .rows = dim->count,
                           .cols = col->count,
                           .out_row = dim->out,
                           .out_col = col->out,
                           .in_row = dim->in,
                           .in_col = col->in};
    while (dim > plan->dims) {
        --dim;
        plane.out += index % dim->count * dim->out;
        plane.in += index % dim->count * dim->in;
        index /= dim->count;
    }
    return plane;
}

/* Parts are runs of rows over all planes; when there are only few rows, columns of all of them. */
static void dp__cpu_copy(const dp_kernel_args *args, size_t part, size_t part_count)
{
    dp__cpu_plan plan;
    dp__cpu_plan_make(args, &plan);
    dp__cpu_plan_turn(&plan);
    const size_t rows = plan.dims[plan.ndim - 2].count, cols = plan.dims[plan.ndim - 1].count;
    size_t first = 0, last = args->count / cols, first_col = 0, last_col = cols;
    if (last >= 8 * part_count) {
        first = dp__cpu_share(args->count / cols, part, part_count);
        last = dp__cpu_share(args->count / cols, part + 1, part_count);
    } else {
        const size_t each = plan.element, bytes = cols * each;
        first_col = dp__cpu_cut(args->out[0], each, bytes, part, part_count) / each;
        last_col = dp__cpu_cut(args->out[0], each, bytes, part + 1, part_count) / each;
    }
    while (first < last && first_col < last_col) {
        dp__cpu_plane plane = dp__cpu_plan_plane(&plan, args, first / rows);
        const size_t row = first % rows;
        plane.out += row * plane.out_row + first_col * plane.out_col;
        plane.in += row * plane.in_row + first_col * plane.in_col;
        plane.cols = last_col - first_col;
        plane.rows = rows - row < last - first ? rows - row : last - first;
        dp__cpu_copy_plane(&plan, &plane);
        first += plane.rows;
    }
}

/* ==== >>kernels =================================================================================
   One dp_kernel, or one part of it: parts are cut at cache lines of the output, so that threads do
   not share any. Nothing is allocated and nothing is remembered.                                 */

/* A set leaves over what is less than one of its vectors; smaller vectors do that. */
static void dp__cpu_reduce_range(const dp__simd *simd, const dp_kernel_args *args, dp_op op,
                                 size_t at, size_t end)
{
    if (simd->reduce[args->dtype] != NULL)
        at = simd->reduce[args->dtype](args, op, at, end);
    at = dp__cpu_base.reduce[args->dtype](args, op, at, end);
    (void)dp__cpu_one.reduce[args->dtype](args, op, at, end);
}

static void dp__cpu_axpby(const dp__simd *simd, const dp_kernel_args *args, size_t at, size_t end)
{
    at = simd->axpby[args->dtype](args, DP_OP_SUM, at, end);
    at = dp__cpu_base.axpby[args->dtype](args, DP_OP_SUM, at, end);
    (void)dp__cpu_one.axpby[args->dtype](args, DP_OP_SUM, at, end);
}

/* Truncated towards zero. For the small types a quotient of doubles is exact enough, and faster. */
#define DP__CPU_DIVIDE(T, name, quotient)                                                          \
    static void dp__cpu_divide_##name(void *data, size_t bytes, double by)                         \
    {                                                                                              \
        typedef T element DP__CPU_ANYWHERE;                                                        \
        element *const p = data;                                                                   \
        for (size_t i = 0; i < bytes / sizeof(T); ++i) {                                           \
            p[i] = (T)(quotient);                                                                  \
        }                                                                                          \
    }
DP__CPU_DIVIDE(int64_t, i64, by == -1 ? 0 - (uint64_t)p[i] : (uint64_t)(p[i] / (int64_t)by))
DP__CPU_DIVIDE(int32_t, i32, (int64_t)(p[i] / by))
DP__CPU_DIVIDE(int16_t, i16, (int64_t)(p[i] / by))
DP__CPU_DIVIDE(int8_t, i8, (int64_t)(p[i] / by))
DP__CPU_DIVIDE(uint8_t, u8, (int64_t)(p[i] / by))

static void (*const dp__cpu_divide[DP_DTYPE_COUNT])(void *data, size_t bytes, double by) = {
    [DP_I64] = dp__cpu_divide_i64, [DP_I32] = dp__cpu_divide_i32, [DP_I16] = dp__cpu_divide_i16,
    [DP_I8] = dp__cpu_divide_i8,   [DP_U8] = dp__cpu_divide_u8,
};

static void dp__cpu_reduce(const dp__simd *simd, const dp_kernel_args *args, size_t at, size_t end)
{
    dp_op op = args->op;
    if (args->dtype == DP_BOOL) { /* of zeros and ones */
        op = op == DP_OP_SUM || op == DP_OP_MAX ? DP_OP_MAX : DP_OP_MIN;
    }
    if (args->dtype <= DP_BF16 || args->dtype == DP_BOOL || args->beta == 1) {
        dp__cpu_reduce_range(simd, args, op, at, end);
        return;
    }
    while (at < end) { /* there is no vector division of integers: in place, while it is cached */
        const size_t bytes = end - at < 4096 ? end - at : 4096;
        dp__cpu_reduce_range(simd, args, op, at, at + bytes);
        dp__cpu_divide[args->dtype]((char *)args->out[0] + at, bytes, args->beta);
        for (size_t k = 1; k < args->out_count; ++k)
            memcpy((char *)args->out[k] + at, (const char *)args->out[0] + at, bytes);
        at += bytes;
    }
}

/* STATS is split over threads by slots: elements are grouped into chunks, chunks in order into
   DP__CPU_STATS_SLOTS runs, whatever the number of threads. dp__simd_stats_slot fills slots[slot],
   for every slot, in any order; dp__simd_stats_join adds them up in order. */
#define DP__CPU_STATS_SLOTS 64
#define DP__CPU_STATS_CHUNK 65536

static size_t dp__cpu_count_bad(const dp__simd *simd, dp_dtype dtype, const char *in, size_t count)
{
    const size_t bytes = dp_dtype_bytes(dtype);
    size_t bad = 0;
    for (size_t i = 0; i < count; i += DP__CPU_TILE) {
        const size_t n = count - i < DP__CPU_TILE ? count - i : DP__CPU_TILE;
        double tile[DP__CPU_TILE];
        dp__cpu_cast(simd, DP_F64, tile, dtype, in + i * bytes, n);
        for (size_t k = 0; k < n; ++k)
            bad += isfinite(tile[k]) ? 0 : 1;
    }
    return bad;
}

static void dp__cpu_squares(const dp__simd *simd, double *lanes, dp_dtype dtype, const char *in,
                            size_t count)
{
    const dp_dtype wide = dtype <= DP_BF16 && dtype != DP_F64 ? DP_F32 : DP_F64;
    const size_t whole = dtype == wide ? count - count % DP__CPU_LANES : 0;
    const size_t bytes = dp_dtype_bytes(dtype);
    dp__cpu_tile tile;
    simd->squares[wide](lanes, in, whole);
    for (size_t i = whole; i < count; i += DP__CPU_TILE) {
        const size_t n = count - i < DP__CPU_TILE ? count - i : DP__CPU_TILE;
        memset((char *)&tile + n * dp_dtype_bytes(wide), 0,
               (DP__CPU_TILE - n) * dp_dtype_bytes(wide));
        dp__cpu_cast(simd, wide, &tile, dtype, in + i * bytes, n);
        simd->squares[wide](lanes, &tile, (n + DP__CPU_LANES - 1) / DP__CPU_LANES * DP__CPU_LANES);
    }
}

/* Non-finite elements are counted only if the sum is not finite: they always make it so. */
static void dp__cpu_stats_chunk(const dp__simd *simd, dp_dtype dtype, const char *in, size_t count,
                                double out[2])
{
    double lanes[DP__CPU_LANES] = {0};
    dp__cpu_squares(simd, lanes, dtype, in, count);
    for (size_t width = DP__CPU_LANES / 2; width > 0; width /= 2) {
        for (size_t i = 0; i < width; ++i)
            lanes[i] += lanes[i + width];
    }
    out[0] += lanes[0];
    if (!isfinite(lanes[0]))
        out[1] += (double)dp__cpu_count_bad(simd, dtype, in, count);
}

static void dp__simd_stats_slot(const dp__simd *simd, const dp_kernel_args *args, size_t slot,
                                double out[2])
{
    const size_t chunks = (args->count - 1) / DP__CPU_STATS_CHUNK + 1;
    const size_t last = dp__cpu_share(chunks, slot + 1, DP__CPU_STATS_SLOTS);
    const size_t bytes = dp_dtype_bytes(args->dtype);
    out[0] = out[1] = 0;
    for (size_t i = dp__cpu_share(chunks, slot, DP__CPU_STATS_SLOTS); i < last; ++i) {
        const size_t first = i * DP__CPU_STATS_CHUNK, rest = args->count - first;
        dp__cpu_stats_chunk(simd, args->dtype, (const char *)args->in[0] + first * bytes,
                            rest < DP__CPU_STATS_CHUNK ? rest : DP__CPU_STATS_CHUNK, out);
    }
}

static void dp__simd_stats_join(const double slots[DP__CPU_STATS_SLOTS][2], void *out)
{
    double sums[2] = {0, 0};
    for (int i = 0; i < DP__CPU_STATS_SLOTS; ++i) {
        sums[0] += slots[i][0];
        sums[1] += slots[i][1];
    }
    memcpy(out, sums, sizeof sums);
}

/* ==== >>updates ==================================================================================
   Optimizers, in f32 or f64, halves a tile at a time; and sums of channels.                     */

/* Elements of a gradient that become 0 at a time. By 1024 AdamW takes 1.03 times as long. */
#define DP__CPU_ZERO_BLOCK 4096

static void dp__cpu_update_tile(const dp__simd *simd, const dp_kernel_args *args, void *x,
                                const void *grad, size_t at, size_t count)
{
    const dp__simd *const sets[] = {simd, &dp__cpu_base, &dp__cpu_one};
    const dp_dtype wide = args->dtype == DP_F64 ? DP_F64 : DP_F32;
    dp__cpu_stepped update = {.args = args, .x = x, .grad = grad};
    size_t done = 0;
    for (size_t i = 1; i < args->out_count; ++i)
        update.state[i - 1] = (char *)args->out[i] + at * dp_dtype_bytes(wide);
    for (int i = 0; i < 3; ++i)
        done = args->kernel == DP_KERNEL_SGD ? sets[i]->sgd[wide](&update, done, count)
                                             : sets[i]->adamw[wide](&update, done, count);
}

/* At most a tile, widened and narrowed. */
static void dp__cpu_update_halves(const dp__simd *simd, const dp_kernel_args *args, void *x,
                                  const void *grad, size_t at, size_t count)
{
    dp__cpu_tile wide, wide_grad;
    dp__cpu_cast(simd, DP_F32, &wide, args->dtype, x, count);
    dp__cpu_cast(simd, DP_F32, &wide_grad, args->dtype, grad, count);
    dp__cpu_update_tile(simd, args, &wide, &wide_grad, at, count);
    dp__cpu_cast(simd, args->dtype, x, DP_F32, &wide, count);
}

/* Elements `at` to `end`. Gradients become 0 block by block, while they are in a cache. */
static void dp__cpu_update(const dp__simd *simd, const dp_kernel_args *args, size_t at, size_t end)
{
    const dp__any_double *gate = args->in_count > 1 ? args->in[1] : NULL;
    const size_t bytes = dp_dtype_bytes(args->dtype);
    const bool halves = args->dtype > DP_F64, zeroes = (args->flags & DP_KERNEL_ZERO_GRAD) != 0;
    const size_t block = halves ? DP__CPU_TILE : zeroes ? DP__CPU_ZERO_BLOCK : end - at;
    if (gate != NULL && gate[1] > 0)
        return;
    for (size_t count; at < end; at += count) {
        char *const x = (char *)args->out[0] + at * bytes;
        char *const grad = (char *)(uintptr_t)args->in[0] + at * bytes;
        count = end - at < block ? end - at : block;
        if (halves)
            dp__cpu_update_halves(simd, args, x, grad, at, count);
        else
            dp__cpu_update_tile(simd, args, x, grad, at, count);
        if (zeroes)
            memset(grad, 0, count * bytes);
    }
}

static void dp__cpu_channel(const dp__simd *simd, const dp_kernel_args *args, size_t channel)
{
    const size_t channels = (size_t)args->shape[1], inner = (size_t)args->shape[2];
    const size_t bytes = dp_dtype_bytes(args->dtype);
    double sum = 0, squares = 0;
    for (size_t o = 0; o < (size_t)args->shape[0]; ++o) {
        const char *row = (const char *)args->in[0] + (o * channels + channel) * inner * bytes;
        for (size_t i = 0; i < inner; i += DP__CPU_TILE) {
            const size_t count = inner - i < DP__CPU_TILE ? inner - i : DP__CPU_TILE;
            dp__cpu_tile tile;
            dp__cpu_cast(simd, DP_F64, &tile, args->dtype, row + i * bytes, count);
            for (size_t k = 0; k < count; ++k) {
                double square = tile.f64[k] * tile.f64[k];
                DP__CPU_ROUNDED(base, square);
                sum += tile.f64[k];
                squares += square;
            }
        }
    }
    ((dp__any_double *)args->out[0])[channel] = sum;
    ((dp__any_double *)args->out[0])[channels + channel] = squares;
}

static void dp__cpu_channels(const dp__simd *simd, const dp_kernel_args *args, size_t part,
                             size_t part_count)
{
    const size_t channels = (size_t)args->shape[1];
    const size_t last = dp__cpu_share(channels, part + 1, part_count);
    for (size_t channel = dp__cpu_share(channels, part, part_count); channel < last; ++channel)
        dp__cpu_channel(simd, args, channel);
}

/* Bytes read and written, which decide the number of parts. */
static size_t dp__simd_bytes(const dp_kernel_args *args)
{
    const size_t bytes = args->count * dp_dtype_bytes(args->dtype);
    switch (args->kernel) {
    case DP_KERNEL_COPY:
        return 2 * bytes;
    case DP_KERNEL_CAST:
        return bytes + args->count * dp_dtype_bytes(args->in_dtype);
    case DP_KERNEL_AXPBY:
    case DP_KERNEL_REDUCE:
    case DP_KERNEL_SGD:
    case DP_KERNEL_ADAMW:
        return (args->in_count + args->out_count) * bytes;
    case DP_KERNEL_FILL:
    case DP_KERNEL_STATS:
    case DP_KERNEL_PAD:
    case DP_KERNEL_TOTAL:
    case DP_KERNEL_CHANNELS:
        break;
    }
    return bytes;
}

/* Part `part` of a kernel that is cut by elements. */
static void dp__simd_run(const dp__simd *simd, const dp_kernel_args *args, size_t part,
                         size_t part_count)
{
    char *const out = args->out[0];
    const size_t element = dp_dtype_bytes(args->dtype), all = args->count * element;
    const size_t first = dp__cpu_cut(out, element, all, part, part_count);
    const size_t last = dp__cpu_cut(out, element, all, part + 1, part_count);
    switch (args->kernel) {
    case DP_KERNEL_COPY:
        dp__cpu_copy(args, part, part_count);
        break;
    case DP_KERNEL_FILL:
        dp__cpu_fill(out + first, last - first, args->fill_bits, element, all);
        break;
    case DP_KERNEL_CAST:
        dp__cpu_cast(simd, args->dtype, out + first, args->in_dtype,
                     (const char *)args->in[0] + first / element * dp_dtype_bytes(args->in_dtype),
                     (last - first) / element);
        break;
    case DP_KERNEL_AXPBY:
        dp__cpu_axpby(simd, args, first, last);
        break;
    case DP_KERNEL_REDUCE:
        dp__cpu_reduce(simd, args, first, last);
        break;
    case DP_KERNEL_SGD:
    case DP_KERNEL_ADAMW:
        dp__cpu_update(simd, args, first / element, last / element);
        break;
    case DP_KERNEL_CHANNELS:
        dp__cpu_channels(simd, args, part, part_count);
        break;
    case DP_KERNEL_STATS: /* the caller does these three */
    case DP_KERNEL_PAD:
    case DP_KERNEL_TOTAL:
        break;
    }
}

/* ==== >>device =================================================================================
   The table dp_cpu(). A stream has nothing in flight: every call is done when it returns. Large
   work is cut into slices for the context's threads; inside dp_run it stays on the calling
   thread. */

enum {
    DP__CPU_MAX_DEFAULT = 8,         /* devices when nobody asks for a number */
    DP__CPU_SLICE_BYTES = 128 << 10, /* below this a hand-over costs more than it gains */
    DP__CPU_SLICES_A_THREAD = 4      /* so that a thread that is late or disturbed does fewer */
};

typedef struct dp__cpu_dev {
    dp_dev base;
    const dp__simd *simd;
} dp__cpu_dev;
_Static_assert(offsetof(dp__cpu_dev, base) == 0, "a dp_dev is the head of its device");

static int dp__cpu_count_slices(const dp_host *host, size_t bytes)
{
    size_t most = (size_t)host->thread_count(host) * DP__CPU_SLICES_A_THREAD;
    size_t slices = bytes / DP__CPU_SLICE_BYTES;
    if (most == DP__CPU_SLICES_A_THREAD || slices < 2)
        return 1;
    return (int)(slices < most ? slices : most);
}

typedef struct dp__cpu_job { /* in one piece: its lines travel to another core together */
    _Alignas(64) const dp__simd *simd;
    size_t part_count;
    double (*slots)[2]; /* STATS */
    dp_kernel_args args;
} dp__cpu_job;

static void dp__cpu_job_part(int part, void *user)
{
    const dp__cpu_job *job = user;
    dp__simd_run(job->simd, &job->args, (size_t)part, job->part_count);
}

static void dp__cpu_job_slot(int slot, void *user)
{
    const dp__cpu_job *job = user;
    dp__simd_stats_slot(job->simd, &job->args, (size_t)slot, job->slots[slot]);
}

/* One row of a padded block: what the input has, and the padding after it. */
static void dp__cpu_pad_row(const dp_kernel_args *args, char *out, const char *in, bool inside)
{
    size_t size = dp_dtype_bytes(args->dtype), row = (size_t)args->shape[args->ndim - 1] * size;
    size_t own = inside ? (size_t)args->in_shape[args->ndim - 1] * size : 0;
    if (own > 0 && args->in_stride[args->ndim - 1] == 1)
        memcpy(out, in, own);
    dp__cpu_fill(out + own, row - own, args->fill_bits, size, 0);
}

/* Rows in the order of the output, which is dense. Rows of the input that are not contiguous were
   put in their place before. */
static void dp__cpu_pad_rows(const dp_kernel_args *args)
{
    int64_t at[DP_MAX_DIMS] = {0};
    size_t size = dp_dtype_bytes(args->dtype), step = (size_t)args->shape[args->ndim - 1] * size;
    char *out = args->out[0];
    for (;;) {
        const char *in = args->in[0];
        bool inside = true;
        int dim = args->ndim - 2;
        for (int i = 0; i <= dim; i++) {
            inside = inside && at[i] < args->in_shape[i];
            in += (size_t)(at[i] * args->in_stride[i]) * size;
        }
        dp__cpu_pad_row(args, out, in, inside);
        out += step;
        while (dim >= 0 && ++at[dim] == args->shape[dim])
            at[dim--] = 0;
        if (dim < 0)
            return;
    }
}

static void dp__cpu_pad(const dp__simd *simd, const dp_kernel_args *args)
{
    dp_kernel_args copy = *args;
    int64_t dense[DP_MAX_DIMS], step = 1;
    bool grows = false;
    copy.kernel = DP_KERNEL_COPY;
    copy.shape = args->in_shape;
    copy.out_stride = dense;
    copy.count = 1;
    for (int i = args->ndim; i-- > 0; step *= args->shape[i]) {
        dense[i] = step;
        grows = grows || args->shape[i] != args->in_shape[i];
        copy.count *= (size_t)args->in_shape[i];
    }
    bool together = grows && args->in_stride[args->ndim - 1] == 1;
    if (!together && copy.count > 0)
        dp__simd_run(simd, &copy, 0, 1);
    if (grows)
        dp__cpu_pad_rows(args);
}

static void dp__cpu_stats_run(const dp_host *host, dp__cpu_job *job, bool worth)
{
    double slots[DP__CPU_STATS_SLOTS][2];
    job->slots = slots;
    for (int slot = 0; !worth && slot < DP__CPU_STATS_SLOTS; slot++)
        dp__cpu_job_slot(slot, job);
    if (worth)
        host->parallel(host, DP__CPU_STATS_SLOTS, dp__cpu_job_slot, job);
    dp__simd_stats_join((const double(*)[2])slots, job->args.out[0]);
}

/* Losses and the like: short, so one thread adds them up, in four lanes. */
static void dp__cpu_total(const dp_kernel_args *args)
{
    const dp__any_double *in = args->in[0];
    double lanes[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < args->count; i++)
        lanes[i % 4] += in[i];
    *(dp__any_double *)args->out[0] = args->alpha * ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
}

static void dp__cpu_run_slices(const dp_host *host, const dp__simd *simd,
                               const dp_kernel_args *args, int slices)
{
    dp__cpu_job job = {.simd = simd, .args = *args, .part_count = (size_t)slices};
    if (args->kernel == DP_KERNEL_STATS)
        dp__cpu_stats_run(host, &job, slices > 1);
    else
        host->parallel(host, slices, dp__cpu_job_part, &job);
}

static void dp__cpu_run(const dp_host *host, const dp__simd *simd, const dp_kernel_args *args)
{
    int slices = dp__cpu_count_slices(host, dp__simd_bytes(args));
    if (args->kernel == DP_KERNEL_PAD)
        dp__cpu_pad(simd, args);
    else if (args->kernel == DP_KERNEL_TOTAL)
        dp__cpu_total(args);
    else if (slices == 1 && args->kernel != DP_KERNEL_STATS)
        dp__simd_run(simd, args, 0, 1);
    else
        dp__cpu_run_slices(host, simd, args, slices);
}

static void dp__cpu_run_cast(const dp_host *host, const dp__simd *simd, void *out, dp_dtype to,
                             const void *in, dp_dtype from, size_t count)
{
    dp__cpu_run(host, simd,
                &(dp_kernel_args){.kernel = DP_KERNEL_CAST,
                                  .dtype = to,
                                  .in_dtype = from,
                                  .count = count,
                                  .out = &out,
                                  .in = &in,
                                  .out_count = 1,
                                  .in_count = 1});
}

static dp_status dp__cpu_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    dp__cpu_run(stream->dev->host, ((const dp__cpu_dev *)stream->dev)->simd, args);
    return DP_OK;
}

/* A plain copy is a strided one of one dim. */
static dp_status dp__cpu_copy_bytes(dp_stream *stream, void *dst, const void *src, size_t bytes)
{
    const int64_t shape = (int64_t)bytes, step = 1;
    dp_kernel_args args = {.kernel = DP_KERNEL_COPY,
                           .dtype = DP_U8,
                           .in_dtype = DP_U8,
                           .count = bytes,
                           .out = &dst,
                           .in = &src,
                           .out_count = 1,
                           .in_count = 1,
                           .ndim = 1,
                           .shape = &shape,
                           .out_stride = &step,
                           .in_stride = &step};
    if (bytes < DP__CPU_SLICE_BYTES)
        memcpy(dst, src, bytes);
    else if (dst != src)
        return dp__cpu_kernel(stream, &args);
    return DP_OK;
}

static dp_status dp__cpu_count(const dp_host *host, int *out)
{
    int cores = dp__os_core_count();
    (void)host;
    *out = cores < DP__CPU_MAX_DEFAULT ? cores : DP__CPU_MAX_DEFAULT;
    return DP_OK;
}

static dp_status dp__cpu_open(const dp_host *host, int index, dp_dev **out)
{
    const dp__simd *simd = NULL;
    if (index < 0)
        return dp_error(DP_ERR_NO_DEVICE, "cpu: index %d is negative", index);
    DP_TRY(dp__simd_choose(&simd));
    dp__cpu_dev *cpu = host->alloc(host, sizeof *cpu, _Alignof(dp__cpu_dev));
    if (cpu == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for device %d", index);
    *cpu = (dp__cpu_dev){.base = {dp_cpu(), host, index}, .simd = simd};
    *out = &cpu->base;
    return DP_OK;
}

static void dp__cpu_close(dp_dev *dev)
{
    dev->host->free(dev->host, dev);
}

static dp_status dp__cpu_info(dp_dev *dev, dp_device_info *out)
{
    *out = (dp_device_info){.bytes_total = dp__os_memory_bytes(),
                            .compute_units = dp__os_core_count(),
                            .host_memory = true};
    snprintf(out->name, sizeof out->name, "cpu %d", (int)dev->index);
    return DP_OK;
}

static dp_status dp__cpu_alloc(dp_dev *dev, size_t bytes, void **out)
{
    *out = dev->host->alloc(dev->host, bytes, 64);
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for %zu bytes", bytes);
}

static void dp__cpu_free(dp_dev *dev, void *data, size_t bytes)
{
    (void)bytes;
    dev->host->free(dev->host, data);
}

static dp_status dp__cpu_stream_create(dp_dev *dev, int priority, dp_stream **out)
{
    (void)priority;
    dp_stream *stream = dev->host->alloc(dev->host, sizeof *stream, _Alignof(dp_stream));
    if (stream == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for a stream");
    stream->dev = dev;
    *out = stream;
    return DP_OK;
}

static void dp__cpu_stream_destroy(dp_stream *stream)
{
    stream->dev->host->free(stream->dev->host, stream);
}

static dp_status dp__cpu_stream_sync(dp_stream *stream)
{
    (void)stream;
    return DP_OK;
}

static dp_status dp__cpu_event_create(dp_dev *dev, dp_event **out)
{
    dp_event *event = dev->host->alloc(dev->host, sizeof *event, _Alignof(dp_event));
    if (event == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for an event");
    event->dev = dev;
    *out = event;
    return DP_OK;
}

static void dp__cpu_event_destroy(dp_event *event)
{
    event->dev->host->free(event->dev->host, event);
}

static dp_status dp__cpu_event_record(dp_event *event, dp_stream *stream)
{
    (void)event;
    (void)stream;
    return DP_OK;
}

static dp_status dp__cpu_event_wait(dp_stream *stream, dp_event *event)
{
    (void)stream;
    (void)event;
    return DP_OK;
}

static dp_status dp__cpu_event_sync(dp_event *event)
{
    (void)event;
    return DP_OK;
}

DP_API const dp_device_ops *dp_cpu(void)
{
    static const dp_device_ops ops = {.head = DP_TABLE(dp_device_ops),
                                      .name = "cpu",
                                      .count = dp__cpu_count,
                                      .open = dp__cpu_open,
                                      .close = dp__cpu_close,
                                      .info = dp__cpu_info,
                                      .alloc = dp__cpu_alloc,
                                      .free = dp__cpu_free,
                                      .stream_create = dp__cpu_stream_create,
                                      .stream_destroy = dp__cpu_stream_destroy,
                                      .stream_sync = dp__cpu_stream_sync,
                                      .event_create = dp__cpu_event_create,
                                      .event_destroy = dp__cpu_event_destroy,
                                      .event_record = dp__cpu_event_record,
                                      .event_wait = dp__cpu_event_wait,
                                      .event_sync = dp__cpu_event_sync,
                                      .copy_in = dp__cpu_copy_bytes,
                                      .copy_out = dp__cpu_copy_bytes,
                                      .copy = dp__cpu_copy_bytes,
                                      .kernel = dp__cpu_kernel,
                                      .survives_fork = true,
                                      .kernel_flags = DP_KERNEL_ZERO_GRAD};
    return &ops;
}

/* ==== >>collectives ============================================================================
   The table dp_cpu_coll(): all ranks are in this process and the host reaches all their memory, so
   a reduction is one pass that reads every rank's buffer and writes every rank's buffer. */

typedef struct dp__cpu_comm {
    dp_comm base;
    const dp__simd *simd;
    size_t rank_count;
    const void **in; /* rank_count of each, as the last call left them */
    void **out;
} dp__cpu_comm;
_Static_assert(offsetof(dp__cpu_comm, base) == 0, "a dp_comm is the head of its communicator");

static bool dp__cpu_comm_fits(const dp_comm_config *config)
{
    return config->bootstrap == NULL && config->host_memory;
}

static void dp__cpu_comm_close(dp_comm *comm)
{
    const dp_host *host = comm->host;
    dp__cpu_comm *own = (dp__cpu_comm *)comm;
    host->free(host, own->in);
    host->free(host, own->out);
    host->free(host, own);
}

static dp_status dp__cpu_comm_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    size_t bytes = (size_t)config->rank_count * sizeof(void *);
    const dp__simd *simd = NULL;
    DP_TRY(dp__simd_choose(&simd));
    dp__cpu_comm *comm = host->alloc(host, sizeof *comm, _Alignof(dp__cpu_comm));
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for a communicator");
    *comm = (dp__cpu_comm){.base = {dp_cpu_coll(), host},
                           .simd = simd,
                           .rank_count = (size_t)config->rank_count,
                           .in = host->alloc(host, bytes, _Alignof(void *)),
                           .out = host->alloc(host, bytes, _Alignof(void *))};
    if (comm->in == NULL || comm->out == NULL) {
        dp__cpu_comm_close(&comm->base);
        return dp_error(DP_ERR_NO_MEMORY, "cpu: no memory for a communicator");
    }
    *out = &comm->base;
    return DP_OK;
}

/* What a kernel computes for a collective of any table; its operands are not set yet. `last`: there
   is nothing left to add. */
static dp_kernel_args dp__reduction(const dp_coll_call *call, dp_dtype dtype, size_t count,
                                    int rank_count, bool last)
{
    bool mean = call->op == DP_OP_MEAN;
    return (dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                            .op = mean ? DP_OP_SUM : call->op,
                            .dtype = dtype,
                            .in_dtype = dtype,
                            .count = count,
                            .alpha = last ? call->scale : 1,
                            .beta = last && mean ? rank_count : 1};
}

/* The places of the local ranks that want a result, `at` bytes further on; how many there are. */
static size_t dp__wanted(const dp_coll_call *call, int local_count, size_t at, void **out)
{
    size_t count = 0;
    for (int i = 0; i < local_count; i++)
        if (call->local[i].recv != NULL)
            out[count++] = (char *)call->local[i].recv + at;
    return count;
}

static dp_kernel_args dp__cpu_reduction(const dp__cpu_comm *comm, const dp_coll_call *call)
{
    dp_kernel_args args =
        dp__reduction(call, call->dtype, call->count, (int)comm->rank_count, true);
    args.out = comm->out;
    args.in = comm->in;
    args.in_count = comm->rank_count;
    return args;
}

static dp_status dp__cpu_all_reduce(dp__cpu_comm *own, const dp_coll_call *call)
{
    const dp_part *local = call->local;
    dp_kernel_args args = dp__cpu_reduction(own, call);
    for (size_t r = 0; r < own->rank_count; r++) { /* unchanged lines stay in the workers' caches */
        void **out = &own->out[args.out_count];
        if (own->in[r] != local[r].send)
            own->in[r] = local[r].send;
        if (local[r].recv != NULL && *out != local[r].recv)
            *out = local[r].recv;
        args.out_count += local[r].recv != NULL;
    }
    if (args.out_count > 0)
        dp__cpu_run(own->base.host, own->simd, &args);
    return DP_OK;
}

static dp_status dp__cpu_reduce_scatter(dp__cpu_comm *own, const dp_coll_call *call)
{
    const dp_part *local = call->local;
    dp_kernel_args args = dp__cpu_reduction(own, call);
    args.out_count = 1;
    for (size_t to = 0; to < own->rank_count; to++) {
        if (local[to].recv == NULL)
            continue;
        for (size_t r = 0; r < own->rank_count; r++)
            own->in[r] = (const char *)local[r].send +
                         to * call->count * dp_dtype_bytes(call->dtype);
        own->out[0] = local[to].recv;
        dp__cpu_run(own->base.host, own->simd, &args);
    }
    return DP_OK;
}

/* The other collectives move bytes: block `from` of a rank's send goes to block `to` of a recv. */
typedef struct dp__cpu_move {
    const dp__cpu_comm *comm;
    const dp_coll_call *call;
    size_t bytes; /* of a block */
    size_t part_count;
} dp__cpu_move;

static void dp__cpu_move_block(const dp__cpu_move *move, size_t from, size_t to, size_t first,
                               size_t bytes)
{
    size_t send = move->call->verb == DP_ALL_TO_ALL ? to * move->bytes : 0;
    size_t recv = move->call->verb != DP_BROADCAST ? from * move->bytes : 0;
    const char *src = (const char *)move->call->local[from].send + send + first;
    char *dst = move->call->local[to].recv;
    if (dst != NULL && dst + recv + first != src)
        memcpy(dst + recv + first, src, bytes);
}

/* A slice of every block. A broadcast reads it once and has it in its cache for all receivers. */
static void dp__cpu_move_part(int part, void *user)
{
    const dp__cpu_move *move = user;
    size_t ranks = move->comm->rank_count;
    size_t first = dp__cpu_cut(NULL, 1, move->bytes, (size_t)part, move->part_count);
    size_t bytes = dp__cpu_cut(NULL, 1, move->bytes, (size_t)part + 1, move->part_count) - first;
    for (size_t from = 0; from < ranks && bytes > 0; from++) {
        if (move->call->verb == DP_BROADCAST && from != (size_t)move->call->root)
            continue;
        for (size_t to = 0; to < ranks; to++)
            dp__cpu_move_block(move, from, to, first, bytes);
    }
}

static dp_status dp__cpu_move_all(const dp__cpu_comm *comm, const dp_coll_call *call)
{
    const dp_host *host = comm->base.host;
    dp__cpu_move move = {
        .comm = comm, .call = call, .bytes = call->count * dp_dtype_bytes(call->dtype)};
    size_t blocks = comm->rank_count, all = move.bytes * blocks;
    if (call->verb != DP_BROADCAST)
        all *= blocks;
    int slices = dp__cpu_count_slices(host, all);
    move.part_count = (size_t)slices;
    host->parallel(host, slices, dp__cpu_move_part, &move);
    return DP_OK;
}

static dp_status dp__cpu_coll_run(dp_comm *comm, const dp_coll_call *call)
{
    dp__cpu_comm *own = (dp__cpu_comm *)comm;
    if (call->verb == DP_ALL_REDUCE)
        return dp__cpu_all_reduce(own, call);
    return call->verb == DP_REDUCE_SCATTER ? dp__cpu_reduce_scatter(own, call)
                                           : dp__cpu_move_all(own, call);
}

DP_API const dp_coll_ops *dp_cpu_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "cpu",
                                    .fits = dp__cpu_comm_fits,
                                    .open = dp__cpu_comm_open,
                                    .close = dp__cpu_comm_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__cpu_coll_run};
    return &ops;
}

#endif /* DP_IMPLEMENTATION && !DP_CPU_IMPLEMENTED */

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
