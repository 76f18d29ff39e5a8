/* test_steps.c - what optimizers do to one tensor, sums in a tree, sums of channels: the kernels of
   dp_train.h, on all backends. */

#include <float.h>
#include <math.h>
#include "tree.h"
/* clang-format off */
#include "numbers.h"
/* clang-format on */

enum { MOST = 300 };

typedef double numbers_of[MOST];

/* Memory of local rank 0 with these numbers. */
static void *put(dp_ctx *ctx, dp_scope *scope, dp_dtype dtype, const double *from, size_t count)
{
    static uint64_t bits[2 * MOST];
    dp_tensor tensor, host = dp_wrap(bits, dtype, DP_SHAPE((int64_t)count));
    for (size_t i = 0; i < count; i++)
        number_put(dtype, bits, i, (number)from[i]);
    CHECK_OK(
        dp_tensor_new(scope, dp_local_device(ctx, 0), dtype, DP_SHAPE((int64_t)count), &tensor));
    CHECK_OK(dp_copy(ctx, &tensor, &host, NULL));
    CHECK_OK(dp_wait(ctx));
    return tensor.data;
}

static void get(dp_ctx *ctx, dp_dtype dtype, void *data, double *out, size_t count)
{
    static uint64_t bits[2 * MOST];
    dp_tensor tensor = dp_wrap(data, dtype, DP_SHAPE((int64_t)count));
    tensor.device = dp_local_device(ctx, 0);
    CHECK_OK(dp_read(ctx, &tensor, bits, count * dp_dtype_bytes(dtype)));
    for (size_t i = 0; i < count; i++)
        out[i] = (double)number_get(dtype, bits, i);
}

/* ---- steps ----------------------------------------------------------------------------------- */

typedef struct step_case {
    const char *name;
    dp_kernel kernel;
    double lr, decay, momentum, dampening; /* ADAMW: momentum and dampening are the betas */
    double eps;
    unsigned flags;
    double torch[3]; /* torch.optim, f64, after three steps from 1, -2, 0.3 */
} step_case;

static const step_case steps[] = {
    {"SGD",
     DP_KERNEL_SGD,
     0.1,
     0,
     0,
     0,
     0,
     0,
     {0x1.e147ae147ae14p-1, -0x1.ca3d70a3d70a3p+0, 0x1.ae147ae147ae1p-3}},
    {"momentum",
     DP_KERNEL_SGD,
     0.1,
     0.01,
     0.9,
     0,
     0,
     0,
     {0x1.cc77f800a48d0p-1, -0x1.98af57e94270bp+0, -0x1.4b6ded16b9ee6p-5}},
    {"dampened",
     DP_KERNEL_SGD,
     0.1,
     0,
     0.9,
     0.3,
     0,
     DP_KERNEL_MAXIMIZE,
     {0x1.131f8a0902de0p+0, -0x1.2a786c226809dp+1, 0x1.495182a9930bfp-1}},
    {"nesterov",
     DP_KERNEL_SGD,
     0.1,
     0.01,
     0.9,
     0,
     0,
     DP_KERNEL_NESTEROV,
     {0x1.b16f00d4ab7c8p-1, -0x1.6be5a594fe634p+0, -0x1.8a95eb94869d1p-4}},
    {"AdamW",
     DP_KERNEL_ADAMW,
     0.1,
     0.05,
     0.9,
     0.999,
     1e-8,
     0,
     {0x1.6372fcd907d2ap-1, -0x1.abf1130f83721p+0, 0x1.6a5b837f61c9ap-4}},
    {"Adam",
     DP_KERNEL_ADAMW,
     0.1,
     0.05,
     0.9,
     0.999,
     1e-6,
     DP_KERNEL_L2,
     {0x1.68450450fa67bp-1, -0x1.b33746b92100cp+0, 0x1.720a24c71572cp-4}},
    {"maximize",
     DP_KERNEL_ADAMW,
     0.1,
     0.05,
     0.8,
     0.95,
     1e-8,
     DP_KERNEL_MAXIMIZE,
     {0x1.477a19172b916p+0, -0x1.22633260b741cp+1, 0x1.f7877da3a3463p-2}}};

static dp_kernel_args step_args(const step_case *c, dp_dtype dtype, size_t count, int step)
{
    double bias1 = 1 - pow(c->momentum, step), bias2 = 1 - pow(c->dampening, step);
    dp_kernel_args sgd = {.numbers = {c->lr, c->decay, c->momentum, 1 - c->dampening}};
    dp_kernel_args adamw = {
        .numbers = {c->lr / bias1, c->flags & DP_KERNEL_L2 ? c->decay : 1 - c->lr * c->decay,
                    1 - c->momentum, c->dampening, 1 - c->dampening, sqrt(bias2), c->eps}};
    dp_kernel_args args = c->kernel == DP_KERNEL_SGD ? sgd : adamw;
    args.kernel = c->kernel;
    args.flags = c->flags | (c->kernel == DP_KERNEL_SGD && step == 1 ? DP_KERNEL_FIRST : 0u);
    args.dtype = args.in_dtype = dtype;
    args.count = count;
    args.in_count = 1;
    args.out_count = c->kernel == DP_KERNEL_ADAMW ? 3 : c->momentum > 0 ? 2 : 1;
    return args;
}

/* The same, by the book, in f32 or in f64; every assignment rounds. */
#define BY_THE_BOOK(A, root)                                                                       \
    static void by_the_book_##A(const dp_kernel_args *args, double *param, double *first,          \
                                double *second, double gradient)                                   \
    {                                                                                              \
        A x = (A)*param, m = (A)*first, v = (A)*second, g = (A)gradient, t, u, n[7];               \
        for (int i = 0; i < 7; i++)                                                                \
            n[i] = (A)args->numbers[i];                                                            \
        if (args->flags & DP_KERNEL_MAXIMIZE)                                                      \
            g = -g;                                                                                \
        t = n[1] * x;                                                                              \
        if (args->kernel == DP_KERNEL_SGD) {                                                       \
            g = g + t;                                                                             \
            t = n[2] * m;                                                                          \
            u = n[3] * g;                                                                          \
            m = args->flags & DP_KERNEL_FIRST ? g : t + u;                                         \
            t = n[2] * m;                                                                          \
            u = g + t;                                                                             \
            if (args->out_count > 1)                                                               \
                g = args->flags & DP_KERNEL_NESTEROV ? u : m;                                      \
            t = n[0] * g;                                                                          \
            x = x - t;                                                                             \
        } else {                                                                                   \
            if (args->flags & DP_KERNEL_L2)                                                        \
                g = g + t;                                                                         \
            else                                                                                   \
                x = t;                                                                             \
            u = g - m;                                                                             \
            u = u * n[2];                                                                          \
            m = m + u;                                                                             \
            t = v * n[3];                                                                          \
            u = g * g;                                                                             \
            u = u * n[4];                                                                          \
            v = t + u;                                                                             \
            t = root(v);                                                                           \
            t = t / n[5];                                                                          \
            t = t + n[6];                                                                          \
            t = m / t;                                                                             \
            t = n[0] * t;                                                                          \
            x = x - t;                                                                             \
        }                                                                                          \
        *param = (double)x, *first = (double)m, *second = (double)v;                               \
    }
BY_THE_BOOK(float, sqrtf)
BY_THE_BOOK(double, sqrt)

static double rounded(dp_dtype dtype, double x)
{
    uint64_t bits = 0;
    number_put(dtype, &bits, 0, (number)x);
    return (double)number_get(dtype, &bits, 0);
}

static void step_by_the_book(const dp_kernel_args *args, double *const *out, const double *grad)
{
    for (size_t i = 0; i < args->count; i++) {
        if (args->dtype == DP_F64)
            by_the_book_double(args, &out[0][i], &out[1][i], &out[2][i], grad[i]);
        else
            by_the_book_float(args, &out[0][i], &out[1][i], &out[2][i], grad[i]);
        out[0][i] = rounded(args->dtype, out[0][i]);
    }
}

static double gradient_of(size_t i, int step)
{
    const double three[3] = {0.1 * step, -0.7, 1.3 - (step - 1)};
    return i < 3 ? three[i] : sin((double)i * step);
}

static double parameter_of(size_t i)
{
    const double three[3] = {1, -2, 0.3};
    return i < 3 ? three[i] : cos((double)i);
}

static void check_steps(dp_ctx *ctx, dp_scope *scope, const step_case *c, dp_dtype dtype,
                        size_t count)
{
    static numbers_of book[3], grad, got;
    double *want[3] = {book[0], book[1], book[2]};
    dp_dtype wide = dtype == DP_F64 ? DP_F64 : DP_F32;
    memset(book, 0, sizeof book);
    for (size_t i = 0; i < count; i++)
        book[0][i] = rounded(dtype, parameter_of(i));
    void *out[3] = {put(ctx, scope, dtype, book[0], count), put(ctx, scope, wide, book[1], count),
                    put(ctx, scope, wide, book[2], count)};
    for (int step = 1; step <= 3; step++) {
        dp_kernel_args args = step_args(c, dtype, count, step);
        for (size_t i = 0; i < count; i++)
            grad[i] = rounded(dtype, gradient_of(i, step));
        const void *in = put(ctx, scope, dtype, grad, count);
        args.out = out;
        args.in = &in;
        CHECK_OK(dp_kernel_run(ctx, 0, &args));
        step_by_the_book(&args, want, grad);
        for (size_t k = 0; k < args.out_count; k++) {
            get(ctx, k == 0 ? dtype : wide, out[k], got, count);
            for (size_t i = 0; i < count; i++)
                CHECK_F64(got[i], want[k][i], 0);
        }
    }
    for (size_t i = 0; i < count && i < 3; i++)
        CHECK_F64(book[0][i], c->torch[i], dtype == DP_F64 ? 1e-14 : dtype == DP_F32 ? 1e-6 : 0.05);
}

TEST_BACKENDS(steps_are_those_of_torch)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static const size_t counts[] = {1, 3, 129, MOST};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        for (int d = 0; d < 4; d++)
            for (int k = 0; k < 4; k++)
                check_steps(ctx, scope, &steps[i], dtypes[d], counts[k]);
}

/* A factor for the gradient, and whether to step at all. */
TEST_BACKENDS(a_gate_scales_and_skips)
{
    static numbers_of start, grad, got[2];
    for (size_t i = 0; i < 2 * sizeof steps / sizeof *steps; i++) {
        const step_case *c = &steps[i / 2];
        bool skips = i % 2 != 0;
        double gate[2] = {0.25, skips ? 3 : 0}, zeros[5] = {0};
        void *out[2][3];
        for (size_t k = 0; k < 5; k++) {
            start[k] = parameter_of(k);
            grad[k] = gradient_of(k, 1);
        }
        for (int run = 0; run < 2; run++) {
            out[run][0] = put(ctx, scope, DP_F64, start, 5);
            out[run][1] = put(ctx, scope, DP_F64, zeros, 5);
            out[run][2] = put(ctx, scope, DP_F64, zeros, 5);
            for (size_t k = 0; k < 5 && run == 1; k++)
                grad[k] *= 0.25;
            dp_kernel_args args = step_args(c, DP_F64, 5, 1);
            const void *in[2] = {put(ctx, scope, DP_F64, grad, 5),
                                 put(ctx, scope, DP_F64, gate, 2)};
            args.in = in;
            args.out = out[run];
            args.in_count = run == 0 ? 2 : 1;
            if (run == 0 || !skips) {
                CHECK_OK(dp_kernel_run(ctx, 0, &args));
            }
            get(ctx, DP_F64, out[run][0], got[run], 5);
        }
        for (size_t k = 0; k < 5; k++) {
            CHECK_F64(got[0][k], got[1][k], 0);
            CHECK((got[0][k] < start[k] || got[0][k] > start[k]) == !skips);
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

static double tree_of_numbers(dp_dtype dtype, const double *x, size_t count)
{
    size_t left = 1;
    if (count == 1)
        return x[0];
    while (2 * left < count)
        left *= 2;
    double sum = tree_of_numbers(dtype, x, left) + tree_of_numbers(dtype, x + left, count - left);
    return dtype == DP_F64 ? sum : (double)(float)sum;
}

TEST_BACKENDS(sums_in_a_tree)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    enum { COUNT = 131, INPUTS = 33 };
    static double values[INPUTS][COUNT], got[COUNT], column[INPUTS];
    const void *in[INPUTS];
    uint64_t state = test_seed();
    for (int d = 0; d < 4; d++)
        for (size_t inputs = 1; inputs <= INPUTS; inputs += inputs < 9 ? 1 : 12) {
            for (size_t k = 0; k < inputs; k++) {
                for (size_t i = 0; i < COUNT; i++)
                    values[k][i] =
                        rounded(dtypes[d], ldexp((double)(int64_t)test_random(&state), -60));
                in[k] = put(ctx, scope, dtypes[d], values[k], COUNT);
            }
            void *out[2] = {(void *)(uintptr_t)in[0], put(ctx, scope, dtypes[d], got, COUNT)};
            dp_kernel_args args = {.kernel = DP_KERNEL_REDUCE,
                                   .op = DP_OP_SUM,
                                   .flags = DP_KERNEL_TREE,
                                   .dtype = dtypes[d],
                                   .in_dtype = dtypes[d],
                                   .count = COUNT,
                                   .in = in,
                                   .out = out,
                                   .in_count = inputs,
                                   .out_count = 2,
                                   .alpha = 0.5,
                                   .beta = 1};
            CHECK_OK(dp_kernel_run(ctx, 0, &args));
            for (int k = 0; k < 2; k++) {
                get(ctx, dtypes[d], out[k], got, COUNT);
                for (size_t i = 0; i < COUNT; i++) {
                    for (size_t j = 0; j < inputs; j++)
                        column[j] = values[j][i];
                    double want = tree_of_numbers(dtypes[d], column, inputs) * 0.5;
                    CHECK_F64(got[i], rounded(dtypes[d], want), 0);
                }
            }
        }
}

TEST_BACKENDS(sums_of_channels)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {4, 1, 70}, {1, 300, 1}, {2, 2, 0}};
    static numbers_of values, got;
    for (int d = 0; d < 4; d++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            const int64_t *shape = shapes[s];
            size_t channels = (size_t)shape[1], inner = (size_t)shape[2];
            size_t count = (size_t)shape[0] * channels * inner;
            static double want[2][MOST];
            memset(want, 0, sizeof want);
            for (size_t i = 0; i < count; i++) {
                values[i] = (double)(int)(i % 17) - 8; /* whole: any order gives the same */
                want[0][i / inner % channels] += values[i];
                want[1][i / inner % channels] += values[i] * values[i];
            }
            const void *in = put(ctx, scope, dtypes[d], values, count);
            dp_tensor sums;
            CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F64,
                                   DP_SHAPE(2, (int64_t)channels), &sums));
            CHECK_OK(dp_fill(ctx, &sums, dp_float(0)));
            void *out = sums.data;
            dp_kernel_args args = {.kernel = DP_KERNEL_CHANNELS,
                                   .dtype = dtypes[d],
                                   .in_dtype = dtypes[d],
                                   .count = count,
                                   .in = &in,
                                   .out = &out,
                                   .in_count = 1,
                                   .out_count = 1,
                                   .ndim = 3,
                                   .shape = shape};
            CHECK_OK(dp_kernel_run(ctx, 0, &args));
            for (size_t k = 0; k < 2; k++) {
                get(ctx, DP_F64, (double *)out + k * channels, got, channels);
                for (size_t c = 0; c < channels; c++)
                    CHECK_F64(got[c], want[k][c], 0);
            }
        }
}

TEST_BACKENDS(kernels_that_are_none)
{
    void *out = NULL;
    dp_kernel_args args = {.kernel = DP_KERNEL_FILL, .dtype = DP_F32, .out = &out, .out_count = 1};
    (void)scope;
    CHECK_OK(dp_kernel_run(ctx, 0, &args)); /* of nothing */
    CHECK_ERROR(dp_kernel_run(NULL, 0, &args), DP_ERR_INVALID, "ctx");
    CHECK_ERROR(dp_kernel_run(ctx, 0, NULL), DP_ERR_INVALID, "args is NULL");
    CHECK_ERROR(dp_kernel_run(ctx, -1, &args), DP_ERR_INVALID, "local_rank is -1, the context has");
    CHECK_ERROR(dp_kernel_run(ctx, 1000, &args), DP_ERR_INVALID, "local_rank is 1000");
    args.kernel = (dp_kernel)99;
    CHECK_ERROR(dp_kernel_run(ctx, 0, &args), DP_ERR_INVALID, "kernel 99");
    args.kernel = DP_KERNEL_SGD;
    args.dtype = DP_I32;
    args.count = 1;
    args.in = (const void *const[]){NULL};
    args.in_count = 0;
    args.out = (void *const[]){put(ctx, scope, DP_I32, (double[]){7}, 1)};
    CHECK_ERROR(dp_kernel_run(ctx, 0, &args), DP_ERR_UNSUPPORTED, "no kernel");
}

TEST_BACKENDS(large_steps)
{
    enum { COUNT = 400001 };
    static float numbers[COUNT];
    dp_tensor param, grad, host = dp_wrap(numbers, DP_F32, DP_SHAPE(COUNT));
    for (int i = 0; i < COUNT; i++)
        numbers[i] = (float)(i % 7);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(COUNT), &grad));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(COUNT), &param));
    CHECK_OK(dp_copy(ctx, &grad, &host, NULL));
    CHECK_OK(dp_fill(ctx, &param, dp_float(1)));
    dp_kernel_args args = {.kernel = DP_KERNEL_SGD,
                           .dtype = DP_F32,
                           .in_dtype = DP_F32,
                           .count = COUNT,
                           .in = (const void *const[]){grad.data},
                           .out = (void *const[]){param.data},
                           .in_count = 1,
                           .out_count = 1,
                           .numbers = {0.5}};
    CHECK_OK(dp_kernel_run(ctx, 0, &args));
    CHECK_OK(dp_read(ctx, &param, numbers, sizeof numbers));
    for (int i = 0; i < COUNT; i++)
        CHECK_F64(numbers[i], 1 - 0.5 * (i % 7), 0);
}
