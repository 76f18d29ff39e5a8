/* numbers.h - the arithmetic of dp.h once more: slow, plain, rounded by the book.

   A long double holds every value of every dtype, so there is one way out of memory and one way
   back; what lies between is computed as the contract in dp.h says. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <float.h>
#include <math.h>
#include <string.h>
#include "test.h"

_Static_assert(LDBL_MANT_DIG >= 64, "a long double holds an int64_t");

typedef long double number;

#define NUMBER_INFINITY ((number)INFINITY)
#define NUMBER_NAN      ((number)NAN)

static inline bool number_is_float(dp_dtype dtype)
{
    return dtype == DP_F32 || dtype == DP_F64 || dtype == DP_F16 || dtype == DP_BF16;
}

/* The greatest finite value. */
static inline number number_most(dp_dtype dtype)
{
    static const number most[DP_DTYPE_COUNT] = {
        [DP_F32] = (number)FLT_MAX,
        [DP_F64] = (number)DBL_MAX,
        [DP_F16] = 65504,
        [DP_BF16] = 0x1.fep127L,
        [DP_I64] = (number)INT64_MAX,
        [DP_I32] = INT32_MAX,
        [DP_I16] = INT16_MAX,
        [DP_I8] = INT8_MAX,
        [DP_U8] = UINT8_MAX,
        [DP_BOOL] = 1,
    };
    return most[dtype];
}

static inline number number_least(dp_dtype dtype)
{
    if (dtype == DP_U8 || dtype == DP_BOOL)
        return 0;
    return number_is_float(dtype) ? -number_most(dtype) : -number_most(dtype) - 1;
}

/* ---- out of memory and back ------------------------------------------------------------------ */

typedef union number_bits {
    float f32;
    double f64;
    int64_t i64;
    int32_t i32;
    int16_t i16;
    int8_t i8;
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
} number_bits;

static inline number number_of_f16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, digits = bits & 1023;
    number size = exponent == 0 ? ldexpl(digits, -24) : ldexpl(digits + 1024, exponent - 25);
    if (exponent == 31)
        size = digits == 0 ? NUMBER_INFINITY : NUMBER_NAN;
    return bits >> 15 ? -size : size;
}

static inline number number_get(dp_dtype dtype, const void *data, size_t i)
{
    number_bits n;
    memcpy(&n, (const char *)data + i * dp_dtype_bytes(dtype), dp_dtype_bytes(dtype));
    if (dtype == DP_BF16)
        n.u32 = (uint32_t)n.u16 << 16;
    return dtype == DP_F64                       ? (number)n.f64
           : dtype == DP_F32 || dtype == DP_BF16 ? (number)n.f32
           : dtype == DP_F16                     ? number_of_f16(n.u16)
           : dtype == DP_I64                     ? (number)n.i64
           : dtype == DP_I32                     ? n.i32
           : dtype == DP_I16                     ? n.i16
           : dtype == DP_I8                      ? n.i8
                                                 : n.u8;
}

/* To nearest, ties to even, with so many digits, none of them worth less than 2^least. */
static inline number number_round(number value, int digits, int least)
{
    int exponent;
    number last;
    if (value == 0 || !isfinite(value))
        return value;
    frexpl(value, &exponent);
    last = ldexpl(1, exponent - digits > least ? exponent - digits : least);
    return rintl(value / last) * last;
}

static inline uint16_t number_to_f16(number value)
{
    int exponent;
    unsigned sign = signbit(value) ? 0x8000 : 0;
    number size = fabsl(number_round(value, 11, -24));
    if (isnan(size))
        return 0x7e00;
    if (size > number_most(DP_F16))
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x1p-14L)
        return (uint16_t)(sign | (unsigned)ldexpl(size, 24));
    frexpl(size, &exponent);
    return (uint16_t)(sign | ((unsigned)(exponent + 14) << 10) |
                      ((unsigned)ldexpl(size, 11 - exponent) - 1024));
}

static inline uint16_t number_to_bf16(number value)
{
    number_bits n = {.f32 = (float)number_round(value, 8, -133)};
    return isnan(value) ? 0x7fc0 : (uint16_t)(n.u32 >> 16);
}

/* Floating dtypes: rounded once. Integers: cut towards zero, saturated, NaN is 0. A bool is true
   but for 0. */
static inline void number_put(dp_dtype dtype, void *data, size_t i, number value)
{
    number_bits n;
    memset(&n, 0, sizeof(n));
    if (dtype == DP_BOOL) {
        value = value != 0;
    } else if (!number_is_float(dtype)) {
        value = isnan(value) ? 0 : truncl(value);
        value = value < number_least(dtype) ? number_least(dtype) : value;
        value = value > number_most(dtype) ? number_most(dtype) : value;
    }
    if (dtype == DP_F64)
        n.f64 = (double)value;
    else if (dtype == DP_F32)
        n.f32 = (float)value;
    else if (dtype == DP_F16)
        n.u16 = number_to_f16(value);
    else if (dtype == DP_BF16)
        n.u16 = number_to_bf16(value);
    else if (dtype == DP_I64)
        n.i64 = (int64_t)value;
    else if (dtype == DP_I32)
        n.i32 = (int32_t)value;
    else if (dtype == DP_I16)
        n.i16 = (int16_t)value;
    else if (dtype == DP_I8)
        n.i8 = (int8_t)value;
    else
        n.u8 = (uint8_t)value;
    memcpy((char *)data + i * dp_dtype_bytes(dtype), &n, dp_dtype_bytes(dtype));
}

/* ---- arithmetic: f64 in f64, other floats in f32, integers modulo their width ---------------- */

static inline number number_wrap(dp_dtype dtype, uint64_t bits)
{
    number_bits n;
    n.i64 = (int64_t)bits;
    return dtype == DP_I64   ? (number)n.i64
           : dtype == DP_I32 ? (number)(int32_t)(uint32_t)bits
           : dtype == DP_I16 ? (number)(int16_t)(uint16_t)bits
           : dtype == DP_I8  ? (number)(int8_t)(uint8_t)bits
                             : (number)(uint8_t)bits;
}

static inline number number_add(dp_dtype dtype, number a, number b)
{
    if (dtype == DP_F64)
        return (number)((double)a + (double)b);
    if (number_is_float(dtype))
        return (number)((float)a + (float)b);
    return number_wrap(dtype, (uint64_t)(int64_t)a + (uint64_t)(int64_t)b);
}

static inline number number_multiply(dp_dtype dtype, number a, number b)
{
    if (dtype == DP_F64)
        return (number)((double)a * (double)b);
    if (number_is_float(dtype))
        return (number)((float)a * (float)b);
    return number_wrap(dtype, (uint64_t)(int64_t)a * (uint64_t)(int64_t)b);
}

static inline number number_divide(dp_dtype dtype, number a, number b)
{
    if (dtype == DP_F64)
        return (number)((double)a / (double)b);
    if (number_is_float(dtype))
        return (number)((float)a / (float)b);
    return (number)((int64_t)a / (int64_t)b);
}

static inline number number_combine(dp_dtype dtype, dp_op op, number a, number b)
{
    if (dtype == DP_BOOL)
        return op == DP_OP_SUM || op == DP_OP_MAX ? a + b > 0 : a * b > 0;
    return op == DP_OP_PROD  ? number_multiply(dtype, a, b)
           : op == DP_OP_MIN ? (a < b || isnan(a) ? a : b)
           : op == DP_OP_MAX ? (a > b || isnan(a) ? a : b)
                             : number_add(dtype, a, b);
}

/* What `count` operands from in[first] on come to: the left half has the largest power of two. */
static inline number number_tree(const dp_kernel_args *args, size_t i, size_t first, size_t count)
{
    size_t left = 1;
    if (count == 1)
        return number_get(args->dtype, args->in[first], i);
    while (2 * left < count)
        left *= 2;
    return number_combine(args->dtype, args->op, number_tree(args, i, first, left),
                          number_tree(args, i, first + left, count - left));
}

/* ---- the kernels ----------------------------------------------------------------------------- */

static inline number number_of_kernel(const dp_kernel_args *args, size_t i)
{
    dp_dtype dtype = args->dtype;
    number n = number_get(args->kernel == DP_KERNEL_CAST ? args->in_dtype : dtype, args->in[0], i);
    if (args->kernel == DP_KERNEL_CAST && args->in_dtype == DP_F64 &&
        (dtype == DP_F16 || dtype == DP_BF16)) {
        n = (number)(float)n; /* by way of f32 */
    }
    if (args->kernel == DP_KERNEL_AXPBY) {
        n = number_multiply(dtype, (number)args->alpha, n);
        if (args->in_count == 2)
            n = number_add(
                dtype, n,
                number_multiply(dtype, (number)args->beta, number_get(dtype, args->in[1], i)));
    } else if (args->kernel == DP_KERNEL_REDUCE) {
        n = number_tree(args, i, 0, args->in_count);
        if (dtype != DP_BOOL)
            n = number_divide(dtype, number_multiply(dtype, n, (number)args->alpha),
                              (number)args->beta);
    }
    return n;
}

static inline void number_strided_copy(const dp_kernel_args *args)
{
    size_t bytes = dp_dtype_bytes(args->dtype);
    for (size_t i = 0; i < args->count; i++) {
        size_t rest = i, from = 0, to = 0;
        for (int d = args->ndim - 1; d >= 0; d--) {
            from += rest % (size_t)args->shape[d] * (size_t)args->in_stride[d];
            to += rest % (size_t)args->shape[d] * (size_t)args->out_stride[d];
            rest /= (size_t)args->shape[d];
        }
        memcpy((char *)args->out[0] + to * bytes, (const char *)args->in[0] + from * bytes, bytes);
    }
}

/* Out is dense; what lies behind the input in any dim becomes fill_bits. */
static inline void number_pad(const dp_kernel_args *args)
{
    size_t bytes = dp_dtype_bytes(args->dtype);
    for (size_t i = 0; i < args->count; i++) {
        const char *element = args->in[0];
        size_t rest = i;
        bool inside = true;
        for (int d = args->ndim - 1; d >= 0; d--) {
            size_t at = rest % (size_t)args->shape[d];
            inside = inside && at < (size_t)args->in_shape[d];
            element += at * (size_t)args->in_stride[d] * bytes;
            rest /= (size_t)args->shape[d];
        }
        memcpy((char *)args->out[0] + i * bytes, inside ? element : (const char *)&args->fill_bits,
               bytes);
    }
}

static inline void number_stats(const dp_kernel_args *args)
{
    double *stats = args->out[0];
    stats[0] = stats[1] = 0;
    for (size_t i = 0; i < args->count; i++) {
        double n = (double)number_get(args->dtype, args->in[0], i);
        stats[0] += n * n;
        stats[1] += isfinite(n) ? 0 : 1;
    }
}

static inline void number_total(const dp_kernel_args *args)
{
    double *total = args->out[0];
    *total = 0;
    for (size_t i = 0; i < args->count; i++)
        *total += (double)number_get(DP_F64, args->in[0], i);
    *total *= args->alpha;
}

/* One kernel on host memory. */
static inline void number_kernel(const dp_kernel_args *args)
{
    size_t bytes = dp_dtype_bytes(args->dtype);
    if (args->kernel == DP_KERNEL_COPY) {
        number_strided_copy(args);
    } else if (args->kernel == DP_KERNEL_PAD) {
        number_pad(args);
    } else if (args->kernel == DP_KERNEL_STATS) {
        number_stats(args);
    } else if (args->kernel == DP_KERNEL_TOTAL) {
        number_total(args);
    } else {
        for (size_t i = 0; i < args->count; i++) {
            number n = args->kernel == DP_KERNEL_FILL ? 0 : number_of_kernel(args, i);
            for (size_t k = 0; k < args->out_count; k++) {
                if (args->kernel == DP_KERNEL_FILL)
                    memcpy((char *)args->out[k] + i * bytes, &args->fill_bits, bytes);
                else
                    number_put(args->dtype, args->out[k], i, n);
            }
        }
    }
}

enum { CYCLE = 251 };

/* `count` elements of a cycle that goes on for ever, from its element `first`. */
static inline void lay_cycles(char *out, const char *cycle, size_t first, size_t count, size_t size)
{
    for (size_t done = 0, run; done < count; done += run) {
        size_t at = (first + done) % CYCLE;
        run = CYCLE - at < count - done ? CYCLE - at : count - done;
        memcpy(out + done * size, cycle + at * size, run * size);
    }
}

#endif /* NUMBERS_H */
