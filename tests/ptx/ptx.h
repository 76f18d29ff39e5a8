/* ptx.h - what the instructions of PTX do, for the C that translate.py makes of kernels. It runs on
   the grid of tests/sim, lane by lane.

   Registers are bits. Arithmetic in f32 gives one NaN, 0x7fffffff, whatever NaN goes in: PTX says
   "an unspecified NaN", and that is the one that GPUs give. Arithmetic in f64 keeps a NaN's bits.
   Conversions between the two, and of f16, make one NaN of all. Instructions that move, choose or
   compare (mov, selp, ld, st, and, or) keep bits.

   Every access must be aligned to its whole size, a vector's too. One to shared, local or parameter
   memory must lie inside it. Two lanes that touch the same shared bytes with no barrier in between,
   one of them writing, are a finding, whatever order they run in.                               */

#ifndef PTX_H
#define PTX_H

#include <stddef.h>

typedef struct ptx_kernel {
    const char *name;
    void (*run)(const unsigned char *params); /* one lane */
    size_t param_bytes;
} ptx_kernel;

/* The last one has no name. */
extern const ptx_kernel ptx_kernels[] __attribute__((weak));

/* What is wrong in this line of the PTX; the lane goes on. */
void ptx_find(const char *name, int line);

#endif /* PTX_H */

#if defined(PTX_SHARED)

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include "../sim/grid.h"

#define JUNK 0x7f7f7f7f7f7f7f7fULL /* what memory and registers hold that were not written */

/* ---- numbers --------------------------------------------------------------------------------- */

static inline float as_f32(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t of_f32(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return number != number ? 0x7fffffffu : bits;
}

static inline double as_f64(uint64_t bits)
{
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint64_t of_f64(double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline uint64_t f64_of_f32(uint32_t bits)
{
    const float number = as_f32(bits);
    return number != number ? 0x7ff8000000000000u : of_f64((double)number);
}

static inline uint32_t f32_of_f64(uint64_t bits)
{
    return of_f32((float)as_f64(bits));
}

/* A half is its 10 or 11 digits times a power of two: exact in f32. */
static inline uint32_t f32_of_f16(uint16_t half)
{
    const int exponent = half >> 10 & 31, digits = half & 0x3ff;
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    if (exponent == 31)
        return digits != 0 ? 0x7fffffffu : sign | 0x7f800000u;
    if (exponent == 0)
        return sign | of_f32((float)digits * 0x1p-24f);
    return sign | of_f32(ldexpf((float)(digits + 1024), exponent - 25));
}

/* The digits before the point, once they are there, are rounded by the C library. */
static inline uint16_t f16_of_f32(uint32_t bits)
{
    const float number = as_f32(bits & 0x7fffffffu);
    const uint32_t sign = bits >> 16 & 0x8000;
    int exponent;
    if (number != number)
        return 0x7fff;
    if (number >= 65520)
        return (uint16_t)(sign | 0x7c00);
    if (number < 0x1p-14f)
        return (uint16_t)(sign | (uint32_t)nearbyint((double)number * 0x1p24));
    (void)frexpf(number, &exponent); /* number = [0.5, 1) * 2^exponent */
    return (uint16_t)(sign | (((uint32_t)(exponent + 13) << 10) +
                              (uint32_t)nearbyint(ldexp((double)number, 11 - exponent))));
}

/* Cut, and held within the range; a NaN becomes the least number, and 0 where all is of 32 bits. */
static inline uint64_t s64_of_f64(uint64_t bits)
{
    const double number = as_f64(bits);
    if (number >= 0x1p63)
        return INT64_MAX;
    return number >= -0x1p63 ? (uint64_t)(int64_t)number : (uint64_t)INT64_MIN;
}

static inline uint32_t s32_of_f32(uint32_t bits)
{
    const float number = as_f32(bits);
    if (number != number)
        return 0;
    if (number >= 0x1p31f)
        return INT32_MAX;
    return number >= -0x1p31f ? (uint32_t)(int32_t)number : (uint32_t)INT32_MIN;
}

static inline uint32_t neg_f32(uint32_t bits)
{
    return of_f32(-as_f32(bits));
}

static inline uint64_t neg_f64(uint64_t bits)
{
    return bits ^ 0x8000000000000000u;
}

static inline uint32_t abs_f32(uint32_t bits)
{
    return of_f32(fabsf(as_f32(bits)));
}

/* Of a number and a NaN, the number; 0 is more than -0. */
static inline uint32_t min_f32(float a, float b)
{
    const bool is_less = a < b || b != b || (a == b && signbit(a) && !signbit(b));
    return of_f32(is_less ? a : b);
}

static inline uint32_t max_f32(float a, float b)
{
    return neg_f32(min_f32(-a, -b));
}

/* By zero: PTX does not say what comes out. */
static inline uint64_t div_u64(uint64_t a, uint64_t b, int line)
{
    if (b == 0)
        ptx_find("division by zero", line);
    return b == 0 ? JUNK : a / b;
}

static inline uint64_t div_s64(int64_t a, int64_t b, int line)
{
    if (b == 0)
        ptx_find("division by zero", line);
    return b == 0 ? JUNK : b == -1 ? 0 - (uint64_t)a : (uint64_t)(a / b);
}

/* Four of the eight bytes of two words: a choice has three bits, and one that spreads the sign. */
static inline uint32_t permute(uint32_t low, uint32_t high, uint32_t choices)
{
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t out = 0;
    for (int place = 0; place < 4; place++) {
        const uint32_t choice = choices >> 4 * place, byte = both >> 8 * (choice & 7) & 0xff;
        out |= ((choice & 8) == 0 ? byte : byte & 0x80 ? 0xffu : 0) << 8 * place;
    }
    return out;
}

/* ---- memory ---------------------------------------------------------------------------------- */

#define PTX_ACCESS(bits)                                                                           \
    static inline uint##bits##_t load##bits(const unsigned char *at)                               \
    {                                                                                              \
        uint##bits##_t value;                                                                      \
        memcpy(&value, at, sizeof value);                                                          \
        return value;                                                                              \
    }                                                                                              \
    static inline void store##bits(unsigned char *at, uint##bits##_t value)                        \
    {                                                                                              \
        memcpy(at, &value, sizeof value);                                                          \
    }
PTX_ACCESS(8)
PTX_ACCESS(16)
PTX_ACCESS(32)
PTX_ACCESS(64)

static inline unsigned char *at_global(uint64_t at, unsigned bytes, int line)
{
    if (at % bytes != 0)
        ptx_find("misaligned", line);
    return (unsigned char *)(uintptr_t)at;
}

/* Its place in a room of `size` bytes. */
static inline uint64_t inside(uint64_t at, unsigned bytes, uint64_t size, int line)
{
    if (at % bytes != 0)
        ptx_find("misaligned", line);
    if (at <= size && bytes <= size - at)
        return at;
    ptx_find("out of bounds", line);
    return 0;
}

static inline unsigned char *at_param(const unsigned char *params, uint64_t at, unsigned bytes,
                                      int line, uint64_t size)
{
    return (unsigned char *)(uintptr_t)params + inside(at, bytes, size, line);
}

static inline unsigned char *at_local(unsigned char *local, uint64_t at, unsigned bytes, int line,
                                      uint64_t size)
{
    return local + inside(at, bytes, size, line);
}

/* Who has touched a byte of shared memory, and after which barrier; SEVERAL lanes may read it. */
enum { SEVERAL = -1 };
typedef struct ptx_touch {
    uint64_t written, read;
    int writer, reader;
} ptx_touch;

dp_shared _Alignas(16) unsigned char ptx_shared[PTX_SHARED];
static ptx_touch ptx_touches[PTX_SHARED];

static inline void touch(ptx_touch *own, bool write, int line)
{
    const int lane = (int)threadIdx.x;
    const bool written = own->written == sim_grid_rounds, read = own->read == sim_grid_rounds;
    if ((written && own->writer != lane) || (write && read && own->reader != lane))
        ptx_find("shared race", line);
    if (write)
        own->written = sim_grid_rounds, own->writer = lane;
    else
        own->reader = read && own->reader != lane ? SEVERAL : lane, own->read = sim_grid_rounds;
}

static inline unsigned char *at_shared(uint64_t at, unsigned bytes, int line, bool write)
{
    at = inside(at, bytes, PTX_SHARED - 1, line);
    for (unsigned k = 0; k < bytes; k++)
        touch(&ptx_touches[at + k], write, line);
    return ptx_shared + at;
}

/* bar.sync: all lanes of a warp have to come to the same one. */
static inline void barrier(int line)
{
    static uint64_t rounds[SIM_LANES_MAX / 32];
    static int lines[SIM_LANES_MAX / 32];
    const unsigned warp = threadIdx.x / 32;
    if (rounds[warp] == sim_grid_rounds && lines[warp] != line)
        ptx_find("barrier of some", line);
    rounds[warp] = sim_grid_rounds;
    lines[warp] = line;
    __syncthreads();
}

#endif /* PTX_SHARED */
