/* test_cuda_kernels.c - what the kernels of dp_cuda.h do in packs and what element by element: the
   same numbers, wherever operands begin and however many there are. */

#include "test.h"

#if defined(TEST_CUDA)
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "cuda_device.h"
#include "numbers.h"

typedef struct gpu {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_stream *stream;
} gpu;

static void gpu_open(gpu *g)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    cuda_gpus(1);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &g->ctx));
    g->scope = dp_scope_begin(g->ctx);
    g->stream = dp_local_stream(g->ctx, 0);
}

static void gpu_close(gpu *g)
{
    dp_scope_end(g->scope);
    dp_close(g->ctx);
    cuda_check_leaks();
}

static void *gpu_bytes(gpu *g, size_t bytes)
{
    dp_tensor tensor;
    CHECK_OK(dp_tensor_new(g->scope, dp_local_device(g->ctx, 0), DP_U8, 1,
                           (int64_t[]){(int64_t)bytes}, &tensor));
    return tensor.data;
}

static void *gpu_put(gpu *g, const void *data, size_t bytes)
{
    void *at = gpu_bytes(g, bytes);
    CHECK_OK(dp_cuda()->copy_in(g->stream, at, data, bytes));
    CHECK_OK(dp_cuda()->stream_sync(g->stream));
    return at;
}

static void gpu_get(gpu *g, void *data, const void *at, size_t bytes)
{
    CHECK_OK(dp_cuda()->copy_out(g->stream, data, at, bytes));
    CHECK_OK(dp_cuda()->stream_sync(g->stream));
}

/* ---- sums over ranks ------------------------------------------------------------------------- */

enum { INPUTS = 64, MOST = 45 };

static float inputs[INPUTS][MOST + 1];

static float tree_of(int first, int count, size_t i)
{
    int left = 1;
    if (count == 1)
        return inputs[first][i];
    while (2 * left < count)
        left *= 2;
    return tree_of(first, left, i) + tree_of(first + left, count - left, i);
}

/* `off` elements in front of every operand, and one more before operand `odd`. */
static void check_sum(gpu *g, int in_count, size_t count, size_t off, int odd)
{
    const void *in[INPUTS];
    void *out[2];
    float got[MOST + 1], fence = -7;
    for (int k = 0; k < in_count; k++)
        in[k] = (const float *)gpu_put(g, inputs[k], sizeof inputs[k]) + (k == odd ? 1 : off);
    out[0] = (float *)gpu_put(g, inputs[0], sizeof inputs[0]) + off;
    out[1] = (void *)(uintptr_t)in[in_count - 1]; /* in place */
    const dp_kernel_args args = {.kernel = DP_KERNEL_REDUCE,
                                 .dtype = DP_F32,
                                 .count = count,
                                 .in = in,
                                 .out = out,
                                 .in_count = (size_t)in_count,
                                 .out_count = 2,
                                 .alpha = 1,
                                 .beta = 3};
    CHECK_OK(dp_cuda()->copy_in(g->stream, (float *)out[0] + count, &fence, sizeof fence));
    CHECK_OK(dp_cuda()->stream_sync(g->stream));
    CHECK_OK(dp_cuda()->kernel(g->stream, &args));
    for (int k = 0; k < 2; k++) {
        gpu_get(g, got, out[k], (count + 1 - (size_t)k) * sizeof *got);
        for (size_t i = 0; i < count; i++) {
            float want = 0;
            for (int m = 0; m < in_count; m++) /* what the operands hold, from where they begin */
                inputs[m][MOST] = inputs[m][i + (m == odd ? 1 : off)];
            want = tree_of(0, in_count, MOST) / 3;
            CHECK_BYTES(&got[i], &want, sizeof want);
        }
        CHECK(k == 1 || got[count] == fence);
    }
}

TEST_SLOW(sums_are_a_tree_of_any_number_of_inputs, 60)
{
    static const size_t counts[] = {1, 3, 4, 5, 43};
    gpu g;
    uint64_t state = test_seed();
    gpu_open(&g);
    for (int in_count = 1; in_count <= INPUTS; in_count += in_count < 18 ? 1 : 23) {
        for (int k = 0; k < INPUTS; k++)
            for (size_t i = 0; i < MOST; i++)
                inputs[k][i] = (float)(int64_t)test_random(&state) * 0x1p-60f;
        dp_scope *outer = g.scope;
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            g.scope = dp_scope_begin(g.ctx);
            check_sum(&g, in_count, counts[c], 0, -1);
            check_sum(&g, in_count, counts[c], 1, -1);
            check_sum(&g, in_count, counts[c], 0, in_count / 2);
            dp_scope_end(g.scope);
        }
        g.scope = outer;
    }
    gpu_close(&g);
}

/* ---- sums of a tensor ------------------------------------------------------------------------ */

enum { LONG_COUNT = 3 * 4096 + 1001 };

typedef float numbers[LONG_COUNT];

/* A number as a multiple of a unit, to the nearest one; the rest of it is a float. */
static double whole_units(double x, double unit, float *out_rest)
{
    double whole = rint(x / unit) * unit;
    *out_rest = (float)(x - whole);
    return whole;
}

static float rests_in_a_tree(const float *rest)
{
    float quads[4];
    for (int q = 0; q < 4; q++)
        quads[q] = (rest[4 * q] + rest[4 * q + 1]) + (rest[4 * q + 2] + rest[4 * q + 3]);
    return (quads[0] + quads[1]) + (quads[2] + quads[3]);
}

/* As the kernels promise for sixteen numbers of a lane, below 2^(exponent + 1): their sum and that
   of their squares are whole units and 25 binary places of what is left. */
static void sixteen_in_units(const float *x, int exponent, double *sums)
{
    const double units[] = {ldexp(1, exponent - 21), ldexp(1, 2 * exponent - 21)};
    for (int k = 0; k < 2; k++) {
        float rest[16];
        double sum = 0, place = ldexp(units[k], -25);
        for (int i = 0; i < 16; i++)
            sum += whole_units((k == 0 ? 1.0 : (double)x[i]) * (double)x[i], units[k], &rest[i]);
        sums[k] += sum + trunc((double)rests_in_a_tree(rest) / place) * place;
    }
}

static void sixteen_by_the_book(dp_dtype dtype, const float *x, double *sums)
{
    float most = 0;
    for (int i = 0; i < 16; i++)
        most = fmaxf(most, fabsf(x[i]));
    bool units = dtype != DP_F64 && most >= 0x1p-40f && most < 0x1p62f;
    if (units)
        sixteen_in_units(x, ilogbf(most), sums);
    for (int i = 0; i < 16 && !units; i++) {
        sums[0] += (double)x[i];
        sums[1] += (double)x[i] * (double)x[i];
    }
}

static void tree_of_lanes(double lanes[256][2])
{
    for (int half = 128; half > 0; half /= 2)
        for (int t = 0; t < half; t++)
            for (int k = 0; k < 2; k++)
                lanes[t][k] += lanes[t + half][k];
}

/* In a chunk 256 lanes take packs in turn, and there is a tree of lanes. */
static void chunk_by_the_book(dp_dtype dtype, const float *x, size_t count, size_t pack,
                              double *sums)
{
    static double lanes[256][2];
    memset(lanes, 0, sizeof lanes);
    for (size_t first = 0; first < count; first += 4096)
        for (size_t lane = 0; lane < 256; lane++) {
            float own[16];
            for (size_t u = 0; u < 16; u++) {
                size_t i = first + (u / pack * 256 + lane) * pack + u % pack;
                own[u] = i < count ? x[i] : 0;
            }
            sixteen_by_the_book(dtype, own, lanes[lane]);
        }
    tree_of_lanes(lanes);
    memcpy(sums, lanes[0], 2 * sizeof *sums);
}

/* Chunks of 4096, and again a tree. */
static void sums_by_the_book(dp_dtype dtype, const float *x, size_t count, double *sums)
{
    static double chunks[256][2];
    memset(chunks, 0, sizeof chunks);
    for (size_t begin = 0; begin < count; begin += 4096)
        chunk_by_the_book(dtype, x + begin, count - begin < 4096 ? count - begin : 4096,
                          16 / dp_dtype_bytes(dtype), chunks[begin / 4096]);
    tree_of_lanes(chunks);
    memcpy(sums, chunks[0], 2 * sizeof *sums);
}

/* The error that a sum may have beside its true value. */
static void check_error(double got, const float *x, size_t count, int power)
{
    number sum = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
        number term = power == 1 ? (number)x[i] : (number)x[i] * (number)x[i];
        sum += term;
        all += fabsl(term);
    }
    CHECK(fabsl((number)got - sum) <= ldexpl(all, -40));
}

/* Some of a dtype: as they come; of sizes that differ much; too small and too large for a float's
   square; sixteen of one size, each of a lane; one for which all others are what is left. */
enum { PLAIN, WIDE, SMALL, LARGE, EDGES, ALONE, ZEROS, KINDS };

static float a_number(int kind, size_t i, uint64_t *state)
{
    float x = (float)((int64_t)test_random(state) >> 8) * 0x1p-55f;
    const int size = (int)(test_random(state) % 64), edges[] = {-41, -40, 61, 62};
    switch (kind) {
    case WIDE:
        return ldexpf(x, size - 32);
    case SMALL:
        return ldexpf(x, -120 - size / 2);
    case LARGE:
        return ldexpf(x, 64 + size);
    case EDGES: /* beside the powers of two from which on the way is another */
        return ldexpf(1 + fabsf(x) / 2, edges[i / 2048 % 4]);
    case ALONE:
        return i % 4096 == 0 ? 1 : ldexpf(1 + fabsf(x), -13);
    case ZEROS:
        return i % 3 == 0 ? -0.0f : 0;
    default:
        return x;
    }
}

static void make_numbers(dp_dtype dtype, int kind, float *x, void *stored)
{
    uint64_t state = test_seed() + (uint64_t)kind;
    for (size_t i = 0; i < LONG_COUNT; i++) {
        number_put(dtype, stored, i, (number)a_number(kind, i, &state));
        x[i] = (float)number_get(dtype, stored, i);
        if (!isfinite(x[i])) { /* too large for it */
            number_put(dtype, stored, i, 1);
            x[i] = 1;
        }
    }
}

static void run_sums(gpu *g, dp_kernel kernel, dp_dtype dtype, size_t count, const void *in,
                     void *out, double *got)
{
    CHECK_OK(dp_cuda()->kernel(g->stream, &(dp_kernel_args){.kernel = kernel,
                                                            .dtype = dtype,
                                                            .count = count,
                                                            .in = &in,
                                                            .out = &out,
                                                            .in_count = 1,
                                                            .out_count = 1,
                                                            .alpha = 0.5}));
    gpu_get(g, got, out, 2 * sizeof *got);
}

static void check_sums(gpu *g, dp_dtype dtype, const float *x, const void *at, void *out)
{
    static const size_t counts[] = {1, 5, 16, 4095, 4096, 4097, 8191, LONG_COUNT - 3};
    for (size_t i = 0; i < 2 * sizeof counts / sizeof *counts; i++) {
        const size_t count = counts[i / 2], skip = i % 2;
        const void *in = (const char *)at + skip * dp_dtype_bytes(dtype);
        double got[2], want[2];
        sums_by_the_book(dtype, x + skip, count, want);
        run_sums(g, DP_KERNEL_STATS, dtype, count, in, out, got);
        CHECK_BYTES(&got[0], &want[1], sizeof *want);
        CHECK(got[1] == 0);
        check_error(got[0], x + skip, count, 2);
        if (dtype == DP_F64) {
            run_sums(g, DP_KERNEL_TOTAL, dtype, count, in, out, got);
            CHECK(got[0] == want[0] / 2);
            check_error(2 * got[0], x + skip, count, 1);
        }
    }
}

/* Two channels in turn, a number each: 4096 numbers of a channel are one chunk, more are more. */
static void check_channels(gpu *g, dp_dtype dtype, const float *x, const void *at, void *out)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {1, 1, 4096}, {7, 2, 300}, {6000, 2, 1}};
    static numbers own;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int64_t *shape = shapes[s];
        const size_t channels = (size_t)shape[1], inner = (size_t)shape[2];
        const size_t all = (size_t)shape[0] * inner, each = (all + 4095) / 4096;
        const size_t chunk = (all + each - 1) / each;
        double got[4];
        CHECK_OK(dp_cuda()->kernel(g->stream, &(dp_kernel_args){.kernel = DP_KERNEL_CHANNELS,
                                                                .dtype = dtype,
                                                                .count = all * channels,
                                                                .in = &at,
                                                                .out = &out,
                                                                .in_count = 1,
                                                                .out_count = 1,
                                                                .ndim = 3,
                                                                .shape = shape}));
        gpu_get(g, got, out, 2 * channels * sizeof *got);
        for (size_t c = 0; c < channels; c++) {
            double sums[2] = {0, 0}, part[2];
            for (size_t i = 0; i < all; i++)
                own[i] = x[(i / inner * channels + c) * inner + i % inner];
            for (size_t i = 0; i < all; i += chunk) {
                chunk_by_the_book(dtype, own + i, all - i < chunk ? all - i : chunk, 1, part);
                sums[0] += part[0];
                sums[1] += part[1];
            }
            CHECK_BYTES(&got[c], &sums[0], sizeof *sums);
            CHECK_BYTES(&got[channels + c], &sums[1], sizeof *sums);
            check_error(got[c], own, all, 1);
            check_error(got[channels + c], own, all, 2);
        }
    }
}

TEST_SLOW(sums_have_the_same_bits_at_any_address, 60)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static numbers x;
    static double stored[LONG_COUNT];
    gpu g;
    gpu_open(&g);
    char *at = gpu_bytes(&g, sizeof stored), *sums = gpu_bytes(&g, 64);
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (int kind = 0; kind < KINDS; kind++) {
            make_numbers(dtypes[d], kind, x, stored);
            CHECK_OK(dp_cuda()->copy_in(g.stream, at, stored, sizeof stored));
            CHECK_OK(dp_cuda()->stream_sync(g.stream));
            check_sums(&g, dtypes[d], x, at, sums + 8); /* need not begin where packs do */
            check_channels(&g, dtypes[d], x, at, sums + 8);
        }
    gpu_close(&g);
}

/* Some beside others, some alone among sixteen, the first and the last. */
TEST(numbers_that_are_not_finite_are_counted)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static const size_t places[] = {0, 1, 2, 4097, 4098, 9000, LONG_COUNT - 1};
    static const number odd[] = {NUMBER_INFINITY, NUMBER_INFINITY, -NUMBER_INFINITY, NUMBER_NAN};
    static numbers x;
    static double stored[LONG_COUNT];
    gpu g;
    gpu_open(&g);
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        make_numbers(dtypes[d], PLAIN, x, stored);
        number_put(dtypes[d], stored, 3, number_most(dtypes[d])); /* which is finite */
        for (size_t k = 0; k < sizeof places / sizeof *places; k++) {
            double got[2];
            number_put(dtypes[d], stored, places[k], odd[k % 4]);
            run_sums(&g, DP_KERNEL_STATS, dtypes[d], LONG_COUNT, gpu_put(&g, stored, sizeof stored),
                     gpu_bytes(&g, 64), got);
            CHECK(k < 3 ? isinf(got[0]) && got[0] > 0 : isnan(got[0]));
            CHECK_F64(got[1], (double)(k + 1), 0);
        }
    }
    gpu_close(&g);
}

/* ---- halves ---------------------------------------------------------------------------------- */

/* All 65,536 of them, as f32 and back: each keeps its bits, a signalling NaN becomes quiet. */
static void check_halves(gpu *g, dp_dtype dtype, size_t skip)
{
    enum { HALVES = 1 << 16 };
    static uint16_t halves[HALVES], back[HALVES];
    const uint16_t exponent = dtype == DP_F16 ? 0x7c00 : 0x7f80,
                   quiet = dtype == DP_F16 ? 0x200 : 0x40;
    for (size_t i = 0; i < HALVES; i++)
        halves[i] = (uint16_t)i;
    char *narrow = gpu_put(g, halves, sizeof halves), *wide = gpu_bytes(g, HALVES * 4);
    const void *in = narrow + 2 * skip;
    void *out = wide + 4 * skip;
    dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                           .dtype = DP_F32,
                           .in_dtype = dtype,
                           .count = HALVES - skip,
                           .in = &in,
                           .out = &out,
                           .in_count = 1,
                           .out_count = 1};
    CHECK_OK(dp_cuda()->kernel(g->stream, &args));
    in = wide + 4 * skip;
    out = narrow + 2 * skip;
    args.dtype = dtype;
    args.in_dtype = DP_F32;
    CHECK_OK(dp_cuda()->kernel(g->stream, &args));
    gpu_get(g, back, narrow, sizeof back);
    for (size_t i = 0; i < HALVES; i++) {
        bool nan = (i & 0x7fff) > exponent;
        CHECK_INT(back[i], nan && i >= skip ? i | quiet : i);
    }
}

TEST(every_half_keeps_its_bits)
{
    gpu g;
    gpu_open(&g);
    for (size_t skip = 0; skip < 2; skip++) {
        check_halves(&g, DP_F16, skip);
        check_halves(&g, DP_BF16, skip);
    }
    gpu_close(&g);
}

/* ---- casts ----------------------------------------------------------------------------------- */

/* More elements than a launch has threads: each takes several. */
TEST(casts_of_elements_that_are_no_packs)
{
    enum { COUNT = 140003 };
    static const dp_dtype from[] = {DP_I8, DP_U8, DP_I16, DP_I32, DP_I64, DP_F64, DP_F16};
    static double out[COUNT], in[COUNT];
    gpu g;
    gpu_open(&g);
    char *src = gpu_bytes(&g, sizeof in), *dst = gpu_bytes(&g, sizeof out);
    for (size_t k = 0; k < sizeof from / sizeof *from; k++) {
        const void *ins = src;
        void *outs = dst;
        for (size_t i = 0; i < COUNT; i++)
            number_put(from[k], in, i, (number)((i * 37 + i / 251) % 127));
        CHECK_OK(dp_cuda()->copy_in(g.stream, src, in, sizeof in));
        CHECK_OK(dp_cuda()->kernel(g.stream, &(dp_kernel_args){.kernel = DP_KERNEL_CAST,
                                                               .dtype = DP_F64,
                                                               .in_dtype = from[k],
                                                               .count = COUNT,
                                                               .in = &ins,
                                                               .out = &outs,
                                                               .in_count = 1,
                                                               .out_count = 1}));
        gpu_get(&g, out, dst, sizeof out);
        for (size_t i = 0; i < COUNT; i++)
            if (out[i] != (double)((i * 37 + i / 251) % 127))
                CHECK_F64(out[i], (i * 37 + i / 251) % 127, 0);
    }
    gpu_close(&g);
}

/* ---- copies ---------------------------------------------------------------------------------- */

enum { ROWS = 7, PITCH = 700, AREA = (ROWS + 1) * PITCH };

/* Rows of `bytes`, from `skip` on, `step` apart: whatever width they have. */
static void check_rows(gpu *g, size_t bytes, size_t skip, size_t step)
{
    static char from[AREA], want[AREA], got[AREA];
    for (size_t i = 0; i < AREA; i++) {
        from[i] = (char)(i * 7 + i / 256);
        want[i] = (char)(i * 3);
    }
    char *src = gpu_put(g, from, AREA), *dst = gpu_put(g, want, AREA);
    const void *in = src + skip;
    void *out = dst + 2 * skip;
    const dp_kernel_args args = {.kernel = DP_KERNEL_COPY,
                                 .dtype = DP_U8,
                                 .count = ROWS * bytes,
                                 .in = &in,
                                 .out = &out,
                                 .in_count = 1,
                                 .out_count = 1,
                                 .ndim = 2,
                                 .shape = (int64_t[]){ROWS, (int64_t)bytes},
                                 .in_stride = (int64_t[]){(int64_t)step, 1},
                                 .out_stride = (int64_t[]){PITCH, 1}};
    CHECK_OK(dp_cuda()->kernel(g->stream, &args));
    for (size_t row = 0; row < ROWS; row++)
        memcpy(want + 2 * skip + row * PITCH, from + skip + row * step, bytes);
    gpu_get(g, got, dst, AREA);
    CHECK_BYTES(got, want, AREA);
}

TEST(rows_of_any_width)
{
    static const size_t bytes[] = {1, 2, 3, 4, 6, 8, 16, 20, 48, 255, 256, 257, 336, 512};
    static const size_t steps[] = {0, 1, 16, 336, 512, 513, 690};
    gpu g;
    gpu_open(&g);
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        for (size_t k = 0; k < sizeof steps / sizeof *steps; k++)
            for (size_t skip = 0; skip <= 16; skip += skip < 2 ? 1 : 14)
                check_rows(&g, bytes[i], skip, steps[k]);
    gpu_close(&g);
}

enum { HUGE_ROW = (1 << 26) + 3 };

static void kernel_on_huge_rows(gpu *g, dp_kernel_args args, void *in, void *out, char fill)
{
    const void *ins = in;
    args.in = &ins;
    args.out = &out;
    args.in_count = args.out_count = 1;
    args.dtype = DP_U8;
    args.ndim = 2;
    args.fill_bits = (unsigned char)fill;
    args.count = (size_t)(args.shape[0] * args.shape[1]);
    CHECK_OK(dp_cuda()->kernel(g->stream, &args));
}

/* More elements than one launch numbers: every other byte, and a pad on both sides of its half. */
TEST_SLOW(copies_of_more_than_a_launch, 120)
{
    gpu g;
    char *data = malloc(2 * (size_t)HUGE_ROW), *got = malloc(2 * (size_t)HUGE_ROW);
    gpu_open(&g);
    CHECK(data != NULL && got != NULL);
    for (size_t i = 0; i < 2 * (size_t)HUGE_ROW; i++)
        data[i] = (char)(i * 2654435761u >> 13);
    char *in = gpu_put(&g, data, 2 * (size_t)HUGE_ROW), *out = gpu_bytes(&g, 2 * (size_t)HUGE_ROW);
    kernel_on_huge_rows(&g,
                        (dp_kernel_args){.kernel = DP_KERNEL_COPY,
                                         .shape = (int64_t[]){1, HUGE_ROW},
                                         .in_stride = (int64_t[]){0, 2},
                                         .out_stride = (int64_t[]){0, 1}},
                        in, out, 0);
    gpu_get(&g, got, out, HUGE_ROW);
    for (size_t i = 0; i < HUGE_ROW; i++)
        if (got[i] != data[2 * i])
            CHECK_INT(i, -1);
    static const int64_t inside[] = {0, 1000, HUGE_ROW / 2, HUGE_ROW - 1};
    for (size_t k = 0; k<sizeof inside / sizeof *inside; k += test_stride()> 1 ? 2 : 1) {
        kernel_on_huge_rows(&g,
                            (dp_kernel_args){.kernel = DP_KERNEL_PAD,
                                             .shape = (int64_t[]){1, HUGE_ROW},
                                             .in_shape = (int64_t[]){1, inside[k]},
                                             .in_stride = (int64_t[]){0, 1}},
                            in, out, 'x');
        gpu_get(&g, got, out, HUGE_ROW);
        CHECK_BYTES(got, data, (size_t)inside[k]);
        for (int64_t i = inside[k]; i < HUGE_ROW; i++)
            if (got[i] != 'x')
                CHECK_INT(i, -1);
    }
    gpu_close(&g);
    free(data);
    free(got);
}

#endif
