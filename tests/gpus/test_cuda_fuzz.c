/* test_cuda_fuzz.c - random launches: a GPU's kernels leave the same numbers as the CPU's, wherever
   operands begin, however many there are, and whatever numbers are in them. TEST_SEED chooses other
   launches. Where PTX is linked in (tests/ptx), the simulator also compares it with the kernels'
   text. */

#include "test.h"

#if defined(TEST_CUDA)
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "cuda_device.h"
#include "numbers.h"

enum { AREA = 96 << 10, MOST_INPUTS = 64, ROUNDS = 600, DIMS = 4 };

static uint64_t state; /* of the seed */

static uint64_t below(uint64_t end)
{
    return test_random(&state) % end;
}

static double some_real(void)
{
    return (double)(int64_t)test_random(&state) * 0x1p-63;
}

/* ---- the two sides --------------------------------------------------------------------------- */

/* Both have the same memory: what is at `area` on the CPU is there on the GPU as well. */
static struct side {
    const dp_device_ops *ops;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_stream *stream;
    char *area;
} sides[2];

static void side_open(struct side *own, const dp_device_ops *ops)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    dp_tensor tensor;
    own->ops = ops;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &own->ctx));
    own->scope = dp_scope_begin(own->ctx);
    own->stream = dp_local_stream(own->ctx, 0);
    CHECK_OK(dp_tensor_new(own->scope, dp_local_device(own->ctx, 0), DP_U8, 1, (int64_t[]){AREA},
                           &tensor));
    own->area = tensor.data;
}

static void sides_open(void)
{
    state = test_seed();
    cuda_gpus(1);
    side_open(&sides[0], dp_cpu());
    side_open(&sides[1], dp_cuda());
}

static void sides_close(void)
{
    for (int k = 0; k < 2; k++) {
        dp_scope_end(sides[k].scope);
        dp_close(sides[k].ctx);
    }
    cuda_check_leaks();
}

/* A launch, whose operands are places in the area. */
typedef struct launch {
    dp_kernel_args args;
    size_t in[MOST_INPUTS], out[MOST_INPUTS];
    size_t end; /* of what is taken */
} launch;

static void run_on(const struct side *own, const launch *l, const char *before, char *after)
{
    const void *in[MOST_INPUTS];
    void *out[MOST_INPUTS];
    dp_kernel_args args = l->args;
    for (size_t k = 0; k < args.in_count; k++)
        in[k] = own->area + l->in[k];
    for (size_t k = 0; k < args.out_count; k++)
        out[k] = own->area + l->out[k];
    args.in = in;
    args.out = out;
    CHECK_OK(own->ops->copy_in(own->stream, own->area, before, AREA));
    CHECK_OK(own->ops->stream_sync(own->stream));
    CHECK_OK(own->ops->kernel(own->stream, &args));
    CHECK_OK(own->ops->copy_out(own->stream, after, own->area, AREA));
    CHECK_OK(own->ops->stream_sync(own->stream));
}

/* ---- operands -------------------------------------------------------------------------------- */

/* Behind what is taken: where a pack begins, or a few elements behind that. */
static size_t place_of(launch *l, size_t count, size_t width, bool odd)
{
    const size_t at = (l->end + 15) / 16 * 16 + (odd ? width * (1 + below(16 / width)) : 0);
    l->end = at + count * width;
    CHECK(l->end <= AREA);
    return at;
}

/* Few, many, and about as many as a pack, a block or a chunk has; the core launches nothing for no
   element. */
static size_t some_count(size_t most)
{
    static const size_t about[] = {4, 8, 16, 256, 1024, 2048, 4096, 8192};
    const size_t near = about[below(sizeof about / sizeof *about)];
    const size_t count = below(3) == 0 ? 1 + below(40) : near + below(5) - 2;
    return count <= most ? count : 1 + below(most);
}

static dp_dtype some_dtype(bool real)
{
    return (dp_dtype)below(real ? DP_BF16 + 1 : DP_DTYPE_COUNT);
}

/* Numbers of all sorts: near 1, denormal, infinite, NaN with any bits, zeros with a sign. */
static void fill_area(char *area, dp_dtype dtype)
{
    static const number rare[] = {0,          -0.0L,    1,     -1,      0x1p-140L,
                                  0x1p-1060L, 0x1p-20L, 3e38L, 1.7e308L};
    const uint64_t kind = below(4);
    const size_t width = dp_dtype_bytes(dtype);
    for (size_t i = 0; i < AREA / 8; i++) {
        const uint64_t bits = test_random(&state);
        memcpy(area + 8 * i, &bits, sizeof bits);
    }
    for (size_t i = 0; dtype == DP_BOOL && i < AREA; i++)
        area[i] &= 1;
    for (size_t i = 0; kind > 0 && dtype != DP_BOOL && i < AREA / width; i++) {
        const uint64_t chance = below(64);
        if (kind == 1 || chance > 2 * kind)
            number_put(dtype, area, i, (number)some_real() * 100);
        else if (chance > kind)
            number_put(dtype, area, i, rare[below(sizeof rare / sizeof *rare)]);
        else if (chance == 0 && number_is_float(dtype))
            number_put(dtype, area, i, below(2) > 0 ? NUMBER_INFINITY : -NUMBER_INFINITY);
    }
}

/* ---- what is the same ------------------------------------------------------------------------ */

static bool is_same(dp_dtype dtype, const char *got, const char *want, size_t i)
{
    const size_t width = dp_dtype_bytes(dtype);
    return memcmp(got + i * width, want + i * width, width) == 0 ||
           (number_is_float(dtype) && isnan(number_get(dtype, got, i)) &&
            isnan(number_get(dtype, want, i)));
}

/* The bytes of all that are no outputs, and the numbers of these. */
static void check_outputs(const launch *l, const dp_dtype *dtypes, const char *got, char *want)
{
    for (size_t k = 0; k < l->args.out_count; k++) {
        const size_t width = dp_dtype_bytes(dtypes[k]);
        for (size_t i = 0; i < l->args.count; i++)
            if (!is_same(dtypes[k], got + l->out[k], want + l->out[k], i))
                test_fail(__FILE__, __LINE__,
                          "kernel %d, op %d, dtypes %d and %d, %zu inputs, %zu elements: element "
                          "%zu of output %zu at %zu is %.17Lg, and on the CPU %.17Lg",
                          (int)l->args.kernel, (int)l->args.op, (int)l->args.dtype,
                          (int)l->args.in_dtype, l->args.in_count, l->args.count, i, k, l->out[k],
                          number_get(dtypes[k], got + l->out[k], i),
                          number_get(dtypes[k], want + l->out[k], i));
        memcpy(want + l->out[k], got + l->out[k], l->args.count * width);
    }
    CHECK_BYTES(got, want, AREA);
}

static void check_launch(const launch *l, dp_dtype content, const dp_dtype *dtypes,
                         void (*adjust)(char *area, const launch *l))
{
    static _Alignas(16) char before[AREA], got[AREA], want[AREA];
    fill_area(before, content);
    if (adjust != NULL)
        adjust(before, l);
    run_on(&sides[0], l, before, want);
    run_on(&sides[1], l, before, got);
    check_outputs(l, dtypes, got, want);
}

/* ---- element by element ---------------------------------------------------------------------- */

static void some_reduce(void)
{
    static const dp_op ops[] = {DP_OP_SUM, DP_OP_PROD, DP_OP_MIN, DP_OP_MAX};
    const dp_dtype dtype = some_dtype(below(2) > 0);
    const size_t width = dp_dtype_bytes(dtype), inputs = 1 + below(below(2) > 0 ? 9 : MOST_INPUTS);
    const bool odd = below(2) > 0, scaled = below(2) > 0, real = number_is_float(dtype);
    launch l = {.args = {.kernel = DP_KERNEL_REDUCE, .op = ops[below(4)], .dtype = dtype}};
    dp_dtype dtypes[MOST_INPUTS];
    l.args.in_count = inputs;
    l.args.out_count = 1 + below(inputs < 4 ? inputs : 4);
    l.args.count = some_count((AREA - 2048) / width / (inputs + 4) - 32 / width);
    l.args.alpha = scaled && real ? some_real() : 1;
    l.args.beta = scaled && dtype != DP_BOOL ? (double)(1 + below(7)) : 1;
    for (size_t k = 0; k < inputs; k++)
        l.in[k] = place_of(&l, l.args.count, width, odd && below(4) > 0);
    const size_t own = below(l.args.out_count + 1); /* the others are inputs */
    for (size_t k = 0; k < l.args.out_count; k++) {
        l.out[k] = k < own ? place_of(&l, l.args.count, width, odd && below(4) > 0) : l.in[k];
        dtypes[k] = dtype;
    }
    check_launch(&l, dtype, dtypes, NULL);
}

static void some_axpby(void)
{
    const dp_dtype dtype = some_dtype(true);
    const size_t width = dp_dtype_bytes(dtype);
    launch l = {.args = {.kernel = DP_KERNEL_AXPBY, .dtype = dtype, .out_count = 1}};
    l.args.in_count = below(4) > 0 ? 2 : 1;
    l.args.count = some_count(AREA / width / 4);
    l.args.alpha = some_real() * 3;
    l.args.beta = below(4) > 0 ? some_real() : 0;
    for (size_t k = 0; k < l.args.in_count; k++)
        l.in[k] = place_of(&l, l.args.count, width, below(3) == 0);
    l.out[0] = below(2) > 0 ? l.in[below(l.args.in_count)]
                            : place_of(&l, l.args.count, width, below(3) == 0);
    check_launch(&l, dtype, &dtype, NULL);
}

static void some_cast(void)
{
    const dp_dtype from = some_dtype(below(2) > 0), to = some_dtype(below(2) > 0);
    launch l = {.args = {.kernel = DP_KERNEL_CAST, .dtype = to, .in_dtype = from}};
    l.args.in_count = l.args.out_count = 1;
    l.args.count = some_count(AREA / 24);
    l.in[0] = place_of(&l, l.args.count, dp_dtype_bytes(from), below(2) > 0);
    l.out[0] = place_of(&l, l.args.count, dp_dtype_bytes(to), below(2) > 0);
    check_launch(&l, from, &to, NULL);
}

static void some_fill(void)
{
    const dp_dtype dtype = some_dtype(false);
    const size_t width = dp_dtype_bytes(dtype);
    launch l = {.args = {.kernel = DP_KERNEL_FILL, .dtype = dtype, .out_count = 1}};
    l.args.count = some_count(AREA / width / 2);
    l.args.fill_bits = test_random(&state) >> (64 - 8 * width);
    l.out[0] = place_of(&l, l.args.count, width, below(2) > 0);
    check_launch(&l, dtype, &dtype, NULL);
}

/* ---- places ---------------------------------------------------------------------------------- */

/* From the first element to the last. */
static size_t extent(int ndim, const int64_t *shape, const int64_t *stride)
{
    size_t last = 0;
    for (int d = 0; d < ndim; d++)
        last += (size_t)((shape[d] > 0 ? shape[d] - 1 : 0) * stride[d]);
    return last + 1;
}

/* A pad is dense, and has its input in its corner; a copy leaves gaps, which nobody touches. */
static void some_places(void)
{
    static const dp_dtype byte = DP_U8;
    const bool pad = below(2) > 0;
    const dp_dtype dtype = some_dtype(false);
    const size_t width = dp_dtype_bytes(dtype);
    const int ndim = 1 + (int)below(DIMS);
    int64_t shape[DIMS], in_shape[DIMS], in_stride[DIMS], out_stride[DIMS], step = 1;
    launch l = {.args = {.kernel = pad ? DP_KERNEL_PAD : DP_KERNEL_COPY,
                         .dtype = dtype,
                         .count = 1,
                         .in_count = 1,
                         .out_count = 1,
                         .ndim = ndim,
                         .shape = shape,
                         .in_shape = in_shape,
                         .in_stride = in_stride,
                         .out_stride = out_stride}};
    for (int d = ndim - 1; d >= 0; d--) {
        shape[d] = 1 + (int64_t)below(d == ndim - 1 ? 40 : 6);
        in_shape[d] = pad ? (int64_t)below((uint64_t)shape[d] + 1) : shape[d];
        in_stride[d] = (int64_t)below(d == ndim - 1 ? 3 : 50);
        out_stride[d] = step + (pad ? 0 : (int64_t)below(3));
        step = out_stride[d] * shape[d];
        l.args.count *= (size_t)shape[d];
    }
    const size_t in_extent = extent(ndim, in_shape, in_stride);
    const size_t out_extent = extent(ndim, shape, out_stride);
    if ((in_extent + out_extent) * width > AREA - 64)
        return;
    l.args.fill_bits = test_random(&state) >> (64 - 8 * width);
    l.in[0] = place_of(&l, in_extent, width, below(2) > 0);
    l.out[0] = place_of(&l, out_extent, width, below(2) > 0);
    check_launch(&l, dtype, &byte, NULL);
}

/* ---- steps of optimizers --------------------------------------------------------------------- */

/* A factor, and a number that shuts the gate if it is above 0. */
static void set_gate(char *area, const launch *l)
{
    const double gate[] = {some_real(), below(8) == 0 ? 1 : 0};
    if (l->args.in_count > 1)
        memcpy(area + l->in[1], gate, sizeof gate);
}

static void some_step(void)
{
    const bool adamw = below(2) > 0;
    const dp_dtype dtype = some_dtype(true), own = dtype == DP_F64 ? DP_F64 : DP_F32;
    const dp_dtype dtypes[] = {dtype, own, own};
    launch l = {.args = {.kernel = adamw ? DP_KERNEL_ADAMW : DP_KERNEL_SGD, .dtype = dtype}};
    const unsigned known = adamw ? DP_KERNEL_L2 : DP_KERNEL_NESTEROV | DP_KERNEL_FIRST;
    l.args.in_count = 1 + below(2);
    l.args.out_count = adamw ? 3 : 1 + below(2);
    l.args.count = some_count(AREA / 5 / dp_dtype_bytes(own));
    l.args.flags = (unsigned)below(32) & (known | DP_KERNEL_MAXIMIZE | DP_KERNEL_ZERO_GRAD);
    for (int k = 0; k < 7; k++)
        l.args.numbers[k] = below(6) > 0 ? fabs(some_real()) : k == 5 ? 1 : 0;
    l.in[0] = place_of(&l, l.args.count, dp_dtype_bytes(dtype), below(4) == 0);
    if (l.args.in_count > 1)
        l.in[1] = place_of(&l, 2, sizeof(double), below(2) > 0);
    for (size_t k = 0; k < l.args.out_count; k++)
        l.out[k] = place_of(&l, l.args.count, dp_dtype_bytes(dtypes[k]), below(8) == 0);
    check_launch(&l, dtype, dtypes, set_gate);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* The CPU adds up in another order. */
static void check_sums(launch *l, dp_dtype dtype, size_t sums)
{
    static _Alignas(16) char before[AREA], got[AREA], want[AREA];
    const bool finite = below(3) > 0;
    double ours, theirs;
    for (size_t i = 0; i < AREA / dp_dtype_bytes(dtype); i++)
        number_put(dtype, before, i,
                   finite || below(2000) > 0 ? (number)some_real()
                   : below(2) > 0            ? NUMBER_INFINITY
                                             : NUMBER_NAN);
    l->in[0] = place_of(l, l->args.count, dp_dtype_bytes(dtype), below(2) > 0);
    l->out[0] = place_of(l, sums, sizeof(double), below(2) > 0);
    run_on(&sides[0], l, before, want);
    run_on(&sides[1], l, before, got);
    for (size_t k = 0; k < sums; k++) {
        char *at = want + l->out[0] + k * sizeof(double);
        memcpy(&ours, got + l->out[0] + k * sizeof(double), sizeof ours);
        memcpy(&theirs, at, sizeof theirs);
        CHECK_F64(ours, theirs, 1e-12 * (double)l->args.count);
        memcpy(at, &ours, sizeof ours);
    }
    CHECK_BYTES(got, want, AREA);
}

static void some_sums(void)
{
    const bool total = below(2) > 0;
    const dp_dtype dtype = total ? DP_F64 : some_dtype(true);
    launch l = {.args = {.kernel = total ? DP_KERNEL_TOTAL : DP_KERNEL_STATS,
                         .dtype = dtype,
                         .in_count = 1,
                         .out_count = 1,
                         .alpha = some_real()}};
    l.args.count = some_count(AREA / dp_dtype_bytes(dtype) - 16);
    check_sums(&l, dtype, total ? 1 : 2);
}

static void some_channels(void)
{
    const dp_dtype dtype = some_dtype(true);
    const int64_t shape[] = {1 + (int64_t)below(9), 1 + (int64_t)below(below(8) > 0 ? 9 : 200),
                             1 + (int64_t)below(below(2) > 0 ? 9 : 130)};
    launch l = {.args = {.kernel = DP_KERNEL_CHANNELS,
                         .dtype = dtype,
                         .in_count = 1,
                         .out_count = 1,
                         .ndim = 3,
                         .shape = shape,
                         .count = (size_t)(shape[0] * shape[1] * shape[2])}};
    const size_t sums = 2 * (size_t)shape[1];
    if (l.args.count * dp_dtype_bytes(dtype) + sums * sizeof(double) < AREA - 1024)
        check_sums(&l, dtype, sums);
}

/* ---- all ------------------------------------------------------------------------------------- */

static void check_many(void (*some)(void))
{
    sides_open();
    for (int round = 0; round < ROUNDS; round += test_stride())
        some();
    sides_close();
}

TEST_SLOW(reduces_as_the_cpu, 60)
{
    check_many(some_reduce);
}

TEST_SLOW(weighted_sums_as_the_cpu, 60)
{
    check_many(some_axpby);
}

TEST_SLOW(casts_as_the_cpu, 60)
{
    check_many(some_cast);
}

TEST_SLOW(fills_as_the_cpu, 60)
{
    check_many(some_fill);
}

TEST_SLOW(copies_and_pads_as_the_cpu, 60)
{
    check_many(some_places);
}

TEST_SLOW(steps_as_the_cpu, 60)
{
    check_many(some_step);
}

TEST_SLOW(sums_as_the_cpu, 60)
{
    check_many(some_sums);
}

TEST_SLOW(sums_of_channels_as_the_cpu, 60)
{
    check_many(some_channels);
}

#endif
