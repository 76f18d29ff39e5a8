/* test_cuda_kernels.c - what the kernels of dp_cuda.h do in packs and what element by element: the
   same numbers, wherever operands begin and however many there are. */

#include "test.h"

#if defined(TEST_CUDA)
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

/* As the kernels promise: chunks of 4096, in them 256 lanes that take packs in turn, lanes in a
   tree, and the same for the chunks. */
static double by_the_book(const float *x, size_t count)
{
    double lanes[256], chunks[256] = {0};
    for (size_t begin = 0; begin < count; begin += 4096) {
        size_t end = begin + 4096 < count ? begin + 4096 : count;
        memset(lanes, 0, sizeof lanes);
        for (size_t i = begin; i < end; i++)
            lanes[(i - begin) / 4 % 256] += (double)x[i] * (double)x[i];
        for (int half = 128; half > 0; half /= 2)
            for (int t = 0; t < half; t++)
                lanes[t] += lanes[t + half];
        chunks[begin / 4096] = lanes[0];
    }
    for (int half = 128; half > 0; half /= 2)
        for (int t = 0; t < half; t++)
            chunks[t] += chunks[t + half];
    return chunks[0];
}

TEST(statistics_have_the_same_bits_at_any_address)
{
    static const size_t counts[] = {1, 5, 4095, 4096, 4097, 8191, LONG_COUNT};
    static float x[LONG_COUNT];
    gpu g;
    uint64_t state = test_seed();
    gpu_open(&g);
    for (size_t i = 0; i < LONG_COUNT; i++)
        x[i] = (float)(int64_t)test_random(&state) * 0x1p-60f;
    char *at = gpu_bytes(&g, sizeof x + 64), *sums = gpu_bytes(&g, 64);
    for (size_t i = 0; i < 2 * sizeof counts / sizeof *counts; i++) {
        const size_t count = counts[i / 2];
        const void *in = at + i % 2 * 4;
        void *out = sums + 8; /* sums need not begin where packs do */
        double got[2], want = by_the_book(x, count);
        CHECK_OK(dp_cuda()->copy_in(g.stream, at + i % 2 * 4, x, sizeof x));
        CHECK_OK(dp_cuda()->stream_sync(g.stream));
        const dp_kernel_args args = {.kernel = DP_KERNEL_STATS,
                                     .dtype = DP_F32,
                                     .count = count,
                                     .in = &in,
                                     .out = &out,
                                     .in_count = 1,
                                     .out_count = 1};
        CHECK_OK(dp_cuda()->kernel(g.stream, &args));
        gpu_get(&g, got, out, sizeof got);
        CHECK_BYTES(&got[0], &want, sizeof want);
        CHECK(got[1] == 0);
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
