/* test_train_kernels.c - what optimizers do to one tensor, sums in a tree, sums of channels: the
   kernels of dp_train.h, on all backends. */

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
    {"no first momentum",
     DP_KERNEL_ADAMW,
     0.1,
     0.05,
     0,
     0.9,
     1e-8,
     0,
     {0x1.412c7cacc74d4p-1, -0x1.abf1130f8371ep+0, 0x1.f98688c4fc348p-3}},
    {"signs",
     DP_KERNEL_ADAMW,
     0.1,
     0.05,
     0.5,
     0,
     0,
     DP_KERNEL_L2,
     {0x1.7537f5fb68063p-1, -0x1.b30db8a237695p+0, 0x1.3af141bad3aeap-7}},
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
            t = g - m;                                                                             \
            u = t * (n[2] < (A)0.5 ? n[2] : 1 - n[2]);                                             \
            m = n[2] < (A)0.5 ? m + u : g - u;                                                     \
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

/* ---- gradients that become 0 ----------------------------------------------------------------- */

enum {
    BESIDE = 3,
    ZEROED_MOST = MOST - 2 * BESIDE
}; /* elements before a gradient, and behind it */

/* Steps once, from the same numbers each time. The gradient lies between others, whose bytes before
   and after are given. */
static void step_between(dp_ctx *ctx, dp_scope *scope, dp_kernel_args args, const double *gate,
                         numbers_of *out, char *before, char *after)
{
    static numbers_of start, grads, none;
    const size_t all = args.count + (size_t)2 * BESIDE, bytes = dp_dtype_bytes(args.dtype);
    const dp_dtype wide = args.dtype == DP_F64 ? DP_F64 : DP_F32;
    for (size_t i = 0; i < all; i++) {
        start[i] = parameter_of(i);
        grads[i] = gradient_of(i, 1);
    }
    void *to[3] = {put(ctx, scope, args.dtype, start, args.count),
                   put(ctx, scope, wide, none, args.count),
                   put(ctx, scope, wide, none, args.count)};
    char *grad = put(ctx, scope, args.dtype, grads, all);
    const void *in[2] = {grad + BESIDE * bytes,
                         gate != NULL ? put(ctx, scope, DP_F64, gate, 2) : NULL};
    dp_tensor area = dp_wrap(grad, args.dtype, DP_SHAPE((int64_t)all));
    area.device = dp_local_device(ctx, 0);
    args.out = to;
    args.in = in;
    args.in_count = gate != NULL ? 2 : 1;
    CHECK_OK(dp_read(ctx, &area, before, all * bytes));
    CHECK_OK(dp_kernel_run(ctx, 0, &args));
    CHECK_OK(dp_read(ctx, &area, after, all * bytes));
    for (size_t k = 0; k < args.out_count; k++)
        get(ctx, k == 0 ? args.dtype : wide, to[k], out[k], args.count);
}

/* The step is the same, and what is beside the gradient stays. */
static void check_zeroed(dp_ctx *ctx, dp_scope *scope, const dp_kernel_args *as, const double *gate)
{
    static numbers_of want[3], got[3];
    static char before[MOST * sizeof(double)], after[sizeof before];
    const size_t bytes = dp_dtype_bytes(as->dtype);
    dp_kernel_args args = *as;
    memset(want, 0, sizeof want);
    memset(got, 0, sizeof got);
    step_between(ctx, scope, args, gate, want, before, after);
    CHECK_BYTES(after, before, (args.count + 2 * BESIDE) * bytes);
    args.flags |= DP_KERNEL_ZERO_GRAD;
    step_between(ctx, scope, args, gate, got, before, after);
    if (gate == NULL || !(gate[1] > 0))
        memset(before + BESIDE * bytes, 0, args.count * bytes);
    CHECK_BYTES(after, before, (args.count + 2 * BESIDE) * bytes);
    CHECK_BYTES(got, want, sizeof want);
}

TEST_BACKENDS(gradients_become_zero_behind_a_step)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    static const size_t counts[] = {1, 3, 129, ZEROED_MOST};
    static const double gates[2][2] = {{0.5, 0}, {0.5, 1}};
    for (size_t d = 0; d < 4; d++)
        for (size_t k = 0; k < 4; k++) {
            dp_kernel_args plain = step_args(&steps[0], dtypes[d], counts[k], 1);
            plain.numbers[1] = 0;
            plain.flags = 0;
            plain.out_count = 1;
            check_zeroed(ctx, scope, &plain, NULL);
            for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
                dp_kernel_args args = step_args(&steps[i], dtypes[d], counts[k], 1);
                size_t which = (i + d + k) % 3;
                check_zeroed(ctx, scope, &args, which < 2 ? gates[which] : NULL);
            }
        }
}

/* A table whose kernel keeps gradients, and so must not be asked to zero them. */
static dp_device_ops keeping;
static int kept_count;

static dp_status keeping_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cpu()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &keeping;
    return status;
}

static dp_status keeping_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    dp_kernel_args kept = *args;
    if (args->kernel == DP_KERNEL_SGD)
        kept.flags &= ~(unsigned)DP_KERNEL_ZERO_GRAD;
    kept_count += args->kernel == DP_KERNEL_SGD;
    return dp_cpu()->kernel(stream, &kept);
}

/* Older tables are shorter. */
TEST(a_table_that_cannot_zero_gradients_is_not_asked_to)
{
    const dp_device_ops *const backends[] = {&keeping, NULL};
    dp_kernel_args args = step_args(&steps[1], DP_F32, 100, 1);
    for (int older = 0; older < 2; older++) {
        dp_ctx *ctx = NULL;
        keeping = *dp_cpu();
        keeping.open = keeping_open;
        keeping.kernel = keeping_kernel;
        keeping.kernel_flags = older == 1 ? DP_KERNEL_ZERO_GRAD : 0u;
        if (older == 1)
            keeping.head.size = offsetof(dp_device_ops, kernel_flags);
        CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
        dp_scope *scope = dp_scope_begin(ctx);
        kept_count = 0;
        check_zeroed(ctx, scope, &args, NULL);
        CHECK_INT(kept_count, 1); /* the step without the flag */
        dp_scope_end(scope);
        dp_close(ctx);
    }
}

/* ---- sets of operands ------------------------------------------------------------------------ */

enum { SETS = 71, SET_BYTES = 5 * (MOST + 2) * sizeof(double), SET_AREA = SETS * SET_BYTES + 64 };
enum { PERIOD = 97 }; /* of the numbers in the area */

/* More than a launch takes, of any length, some of which begin at an odd element; the gate last. */
typedef struct many_sets {
    dp_tensor area;
    size_t counts[SETS];
    void *out[SETS * 3];
    const void *in[SETS * 2];
} many_sets;

static void sets_make(dp_ctx *ctx, dp_scope *scope, const dp_kernel_args *args, many_sets *sets)
{
    static double numbers[SET_AREA / sizeof(double)];
    const size_t size = dp_dtype_bytes(args->dtype);
    const size_t wide = args->dtype == DP_F64 ? sizeof(double) : sizeof(float);
    const int64_t all = SET_AREA / sizeof(double);
    dp_tensor host = dp_wrap(numbers, DP_F64, DP_SHAPE(all));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F64, DP_SHAPE(all), &sets->area));
    char *halves = (char *)numbers; /* which are numbers in any dtype */
    for (size_t i = 0; i < PERIOD; i++)
        number_put(DP_BF16, halves, i, (number)(0.25 + (double)i / PERIOD));
    for (size_t i = PERIOD; i < (SET_AREA - 64) / 2; i++)
        memcpy(halves + 2 * i, halves + 2 * (i - PERIOD), 2);
    numbers[all - 8] = 0.5;
    numbers[all - 7] = 0;
    CHECK_OK(dp_copy(ctx, &sets->area, &host, NULL));
    CHECK_OK(dp_wait(ctx));
    for (size_t i = 0; i < SETS; i++) {
        char *at = (char *)sets->area.data + i * SET_BYTES;
        sets->counts[i] = i % 9 == 4 ? 0 : 1 + (i * 53) % MOST;
        for (size_t k = 0; k < args->out_count; k++)
            sets->out[i * args->out_count + k] = at + k * (MOST + 2) * sizeof(double) +
                                                 (i % 7 == 3) * (k == 0 ? size : wide);
        sets->in[i * args->in_count] = at + 4 * (MOST + 2) * sizeof(double);
        if (args->in_count > 1)
            sets->in[i * args->in_count + 1] = (double *)sets->area.data + all - 8;
    }
}

static dp_kernel_args all_sets(const dp_kernel_args *args, many_sets *sets)
{
    dp_kernel_args all = *args;
    all.out = sets->out;
    all.in = sets->in;
    all.counts = sets->counts;
    all.set_count = SETS;
    return all;
}

static void check_sets(dp_ctx *ctx, dp_scope *scope, const dp_kernel_args *args)
{
    static many_sets together, apart;
    static char got[SET_AREA], want[SET_AREA];
    sets_make(ctx, scope, args, &together);
    sets_make(ctx, scope, args, &apart);
    const dp_kernel_args all = all_sets(args, &together);
    CHECK_OK(dp_kernel_run(ctx, 0, &all));
    for (size_t i = 0; i < SETS; i++) {
        dp_kernel_args one = *args;
        one.count = apart.counts[i];
        one.out = &apart.out[i * args->out_count];
        one.in = &apart.in[i * args->in_count];
        CHECK_OK(dp_kernel_run(ctx, 0, &one));
    }
    CHECK_OK(dp_read(ctx, &together.area, got, sizeof got));
    CHECK_OK(dp_read(ctx, &apart.area, want, sizeof want));
    CHECK_BYTES(got, want, sizeof want);
}

TEST_BACKENDS(sets_are_stepped_as_one_by_one)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_BF16};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i += 3)
        for (int k = 0; k < 3; k++) {
            dp_kernel_args args = step_args(&steps[i], dtypes[k], 0, 2);
            args.in_count = 1 + (i + (size_t)k) % 2;
            args.flags |= k > 0 ? DP_KERNEL_ZERO_GRAD : 0u;
            check_sets(ctx, scope, &args);
        }
}

/* A launch cuts sets into chunks of 1024: these end at one, before it and behind it. */
TEST_BACKENDS(sets_are_cut_into_chunks)
{
    enum { LARGE = 5, ALL = 1 + 1024 + 1023 + 4097 + 2048 };
    static const size_t counts[LARGE] = {1, 1024, 1023, 4097, 2048};
    static float numbers[ALL];
    dp_tensor params, grads, host = dp_wrap(numbers, DP_F32, DP_SHAPE(ALL));
    void *out[LARGE];
    const void *in[LARGE];
    for (int i = 0; i < ALL; i++)
        numbers[i] = (float)i;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(ALL), &grads));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(ALL), &params));
    CHECK_OK(dp_copy(ctx, &grads, &host, NULL));
    CHECK_OK(dp_fill(ctx, &params, dp_float(1)));
    for (size_t i = 0, at = 0; i < LARGE; at += counts[i++]) {
        out[i] = (float *)params.data + at;
        in[i] = (const float *)grads.data + at;
    }
    CHECK_OK(dp_kernel_run(ctx, 0,
                           &(dp_kernel_args){.kernel = DP_KERNEL_SGD,
                                             .dtype = DP_F32,
                                             .in_dtype = DP_F32,
                                             .in = in,
                                             .out = out,
                                             .in_count = 1,
                                             .out_count = 1,
                                             .numbers = {0.5},
                                             .set_count = LARGE,
                                             .counts = counts}));
    CHECK_OK(dp_read(ctx, &params, numbers, sizeof numbers));
    for (int i = 0; i < ALL; i++)
        CHECK_F64(numbers[i], 1 - 0.5 * i, 0);
}

/* One by one where an operand is not aligned to its element. */
TEST_BACKENDS(sets_may_lie_at_odd_addresses)
{
    static many_sets sets;
    float got = 0, grad = 3;
    char zeroed[sizeof grad + 2], around[sizeof zeroed] = {1, 0, 0, 0, 0, 1};
    dp_kernel_args args = step_args(&steps[0], DP_F32, 0, 1);
    args.out_count = 1;
    args.numbers[0] = 0.5;
    args.numbers[1] = 0;
    args.flags = DP_KERNEL_ZERO_GRAD;
    sets_make(ctx, scope, &args, &sets);
    const int64_t size = sizeof(float), beside = sizeof around;
    dp_tensor bytes = sets.area, from = dp_wrap(&grad, DP_U8, DP_SHAPE(size)), to, odd;
    dp_tensor ones = dp_wrap(around, DP_U8, DP_SHAPE(beside));
    bytes.dtype = DP_U8;
    bytes.shape[0] *= (int64_t)sizeof(double);
    sets.counts[0] = sets.counts[1] = 1;
    const int64_t at = (int64_t)SET_BYTES - (int64_t)sizeof(double) * 2; /* of no set */
    sets.in[1] = (const char *)sets.area.data + at + 1;
    CHECK_OK(dp_narrow(&bytes, 0, at, beside, &odd));
    CHECK_OK(dp_copy(ctx, &odd, &ones, NULL));
    CHECK_OK(dp_narrow(&bytes, 0, at + 1, size, &to));
    CHECK_OK(dp_copy(ctx, &to, &from, NULL));
    CHECK_OK(dp_narrow(&bytes, 0, (int64_t)SET_BYTES, size, &to));
    CHECK_OK(dp_wait(ctx));
    grad = 2;
    CHECK_OK(dp_copy(ctx, &to, &from, NULL));
    dp_kernel_args all = all_sets(&args, &sets);
    all.set_count = 2;
    CHECK_OK(dp_kernel_run(ctx, 0, &all));
    CHECK_OK(dp_read(ctx, &to, &got, sizeof got));
    CHECK_F64(got, 2 - 0.5 * 3, 0);
    CHECK_OK(dp_read(ctx, &odd, zeroed, sizeof zeroed));
    CHECK_BYTES(zeroed, around, sizeof zeroed);
}

/* A table that takes sets: how many it got, call by call. */
static dp_device_ops taking;
static size_t taken[SETS + 1];
static int taken_count;
static dp_status taken_status;

static dp_status taking_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cpu()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &taking;
    return status;
}

static dp_status taking_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    dp_kernel_args one = *args;
    if (args->kernel != DP_KERNEL_SGD)
        return dp_cpu()->kernel(stream, args);
    taken[taken_count++] = args->set_count;
    if (taken_status != DP_OK && args->set_count > 0)
        return dp_error(taken_status, "not so many");
    for (size_t i = 0; i < args->set_count; i++) {
        one.set_count = 0;
        one.count = args->counts[i];
        one.out = args->out + i * args->out_count;
        one.in = args->in + i * args->in_count;
        DP_TRY(dp_cpu()->kernel(stream, &one));
    }
    return args->set_count > 0 ? DP_OK : dp_cpu()->kernel(stream, args);
}

static dp_status step_sets(dp_ctx *ctx, many_sets *sets, const dp_kernel_args *args)
{
    const dp_kernel_args all = all_sets(args, sets);
    taken_count = 0;
    return dp_kernel_run(ctx, 0, &all);
}

TEST(a_table_that_takes_sets_gets_them_at_once)
{
    static many_sets sets;
    const dp_device_ops *const backends[] = {&taking, NULL};
    dp_ctx *ctx = NULL;
    taking = *dp_cpu();
    taking.open = taking_open;
    taking.kernel = taking_kernel;
    taking.takes_sets = true;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_kernel_args args = step_args(&steps[0], DP_F32, 0, 1);
    sets_make(ctx, scope, &args, &sets);
    for (size_t i = 0; i < SETS; i++)
        sets.counts[i] = i + 1;
    CHECK_OK(step_sets(ctx, &sets, &args));
    CHECK_INT(taken_count, 1);
    CHECK_INT(taken[0], SETS);
    taken_status = DP_ERR_UNSUPPORTED; /* then one by one */
    CHECK_OK(step_sets(ctx, &sets, &args));
    CHECK_INT(taken_count, 1 + SETS);
    CHECK_INT(taken[SETS], 0);
    taken_status = DP_ERR_NO_MEMORY;
    CHECK_ERROR(step_sets(ctx, &sets, &args), DP_ERR_NO_MEMORY, "not so many");
    CHECK_INT(taken_count, 1);
    taken_status = DP_OK;
    sets.counts[SETS - 1] = 0; /* a table gets no set of nothing */
    CHECK_OK(step_sets(ctx, &sets, &args));
    CHECK_INT(taken_count, SETS - 1);
    sets.counts[SETS - 1] = 5;
    sets.in[7] = (const char *)sets.in[7] + 1; /* nor one that is not aligned */
    CHECK_OK(step_sets(ctx, &sets, &args));
    CHECK_INT(taken_count, SETS - 1);
    dp_scope_end(scope);
    dp_close(ctx);
}

TEST_BACKENDS(sets_that_are_none)
{
    static many_sets sets;
    dp_kernel_args args = step_args(&steps[0], DP_F32, 0, 1);
    args.in_count = 2;
    sets_make(ctx, scope, &args, &sets);
    const dp_kernel_args right = all_sets(&args, &sets);
    const struct {
        const char *says;
        size_t in_count;
        dp_kernel kernel;
        bool no_counts, no_in, no_out;
    } rows[] = {{"only SGD and ADAMW have sets", 2, DP_KERNEL_FILL, false, false, false},
                {"counts is NULL", 2, DP_KERNEL_SGD, true, false, false},
                {"in is NULL", 2, DP_KERNEL_SGD, false, true, false},
                {"out is NULL", 2, DP_KERNEL_SGD, false, false, true},
                {"in_count of SGD is 3", 3, DP_KERNEL_SGD, false, false, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        dp_kernel_args wrong = right;
        wrong.kernel = rows[i].kernel;
        wrong.in_count = rows[i].in_count;
        wrong.counts = rows[i].no_counts ? NULL : right.counts;
        wrong.in = rows[i].no_in ? NULL : right.in;
        wrong.out = rows[i].no_out ? NULL : right.out;
        CHECK_ERROR(dp_kernel_run(ctx, 0, &wrong), DP_ERR_INVALID, rows[i].says);
    }
    const void *gate = sets.in[69 * 2 + 1];
    sets.in[69 * 2 + 1] = sets.in[0];
    CHECK_ERROR(dp_kernel_run(ctx, 0, &right), DP_ERR_INVALID,
                "set 69 has another gate than set 0");
    sets.in[69 * 2 + 1] = gate;
    void *own = sets.out[69 * args.out_count];
    sets.out[69 * args.out_count] = NULL;
    CHECK_ERROR(dp_kernel_run(ctx, 0, &right), DP_ERR_INVALID, "out[0] is NULL");
    sets.out[69 * args.out_count] = (void *)(uintptr_t)sets.in[69 * 2];
    CHECK_ERROR(dp_kernel_run(ctx, 0, &right), DP_ERR_INVALID, "out[0] overlaps in[0]");
    sets.out[69 * args.out_count] = own;
    CHECK_OK(dp_kernel_run(ctx, 0, &right));
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
    CHECK_ERROR(dp_kernel_run(ctx, 0, &args), DP_ERR_INVALID, "99 is not a kernel");
}

/* A right call of each kernel on 4 elements, of which each check changes one thing. */
typedef struct right_call {
    dp_ctx *ctx;
    void *out[3];
    const void *in[2];
} right_call;

static const int64_t flat[] = {2, 2, 1}, rows[] = {2, 1, 1};

static right_call right_operands(dp_ctx *ctx, dp_scope *scope)
{
    static numbers_of zeros;
    right_call right = {.ctx = ctx};
    for (int i = 0; i < 3; i++)
        right.out[i] = put(ctx, scope, DP_F64, zeros, 16);
    for (int i = 0; i < 2; i++)
        right.in[i] = put(ctx, scope, DP_F64, zeros, 16);
    return right;
}

static dp_kernel_args right_args(const right_call *right, dp_kernel kernel)
{
    bool total = kernel == DP_KERNEL_TOTAL;
    return (dp_kernel_args){.kernel = kernel,
                            .dtype = total ? DP_F64 : DP_F32,
                            .in_dtype = DP_F32,
                            .count = 4,
                            .out = right->out,
                            .in = right->in,
                            .out_count = kernel == DP_KERNEL_ADAMW ? 3
                                         : kernel == DP_KERNEL_SGD ? 2
                                                                   : 1,
                            .in_count = kernel != DP_KERNEL_FILL,
                            .alpha = 1,
                            .beta = 1,
                            .ndim = kernel == DP_KERNEL_CHANNELS ? 3 : 2,
                            .shape = flat,
                            .out_stride = rows,
                            .in_shape = flat,
                            .in_stride = rows,
                            .numbers = {0.1, 0.1, 0.5, 0.5, 0.5, 1, 0.1}};
}

static void check_kernel(int line, const right_call *right, const dp_kernel_args *args,
                         const char *want)
{
    dp_status status = dp_kernel_run(right->ctx, 0, args);
    if (want == NULL ? status != DP_OK
                     : status != DP_ERR_INVALID || strstr(dp_last_error(), want) == NULL ||
                           strncmp(dp_last_error(), "dp_kernel_run: ", 15) != 0)
        test_fail(__FILE__, line, "%s (%s), wanted: %s", dp_status_name(status), dp_last_error(),
                  want != NULL ? want : "no error");
}

/* `want` NULL: it is right. The changes are made to `a`. */
static void set_right_args(right_call *right, dp_kernel kernel, dp_kernel_args *out)
{
    *out = right_args(right, kernel);
}

#define CHECK_KERNEL(name, want, ...)                                                              \
    do {                                                                                           \
        static dp_kernel_args a; /* many of them would be a large frame */                         \
        set_right_args(&right, DP_KERNEL_##name, &a);                                              \
        __VA_ARGS__;                                                                               \
        check_kernel(__LINE__, &right, &a, want);                                                  \
    } while (0)

TEST_BACKENDS(kernels_know_what_they_take)
{
    right_call right = right_operands(ctx, scope);
    for (int kernel = 0; kernel <= DP_KERNEL_CHANNELS; kernel++) {
        dp_kernel_args args = right_args(&right, (dp_kernel)kernel);
        check_kernel(__LINE__, &right, &args, NULL);
    }
    CHECK_KERNEL(FILL, "77 is not a dtype", a.dtype = (dp_dtype)77);
    CHECK_KERNEL(FILL, "in_count of FILL is 1, not 0 to 0", a.in_count = 1);
    CHECK_KERNEL(FILL, "out_count of FILL is 0, not 1 to 1", a.out_count = 0);
    CHECK_KERNEL(FILL, "out_count of FILL is", a.out_count = SIZE_MAX);
    CHECK_KERNEL(FILL, "FILL has no flags 0x1", a.flags = 1);
    CHECK_KERNEL(STATS, "STATS has no flags 0x10", a.flags = DP_KERNEL_ZERO_GRAD);
    CHECK_KERNEL(FILL, "more than can be counted", a.count = SIZE_MAX / 4);
    CHECK_KERNEL(CAST, "77 is not a dtype", a.in_dtype = (dp_dtype)77);
    CHECK_KERNEL(CAST, "in_count of CAST is 2, not 1 to 1", a.in_count = 2);
    CHECK_KERNEL(AXPBY, "AXPBY is not for i32", a.dtype = DP_I32);
    CHECK_KERNEL(AXPBY, "in_count of AXPBY is 3, not 1 to 2", a.in_count = 3);
    CHECK_KERNEL(AXPBY, NULL, a.in_count = 2);
    CHECK_KERNEL(TOTAL, "TOTAL is not for f32", a.dtype = DP_F32);
    CHECK_KERNEL(SGD, "SGD is not for i32", a.dtype = DP_I32);
    CHECK_KERNEL(SGD, "in_count of SGD is 0, not 1 to 2", a.in_count = 0);
    CHECK_KERNEL(SGD, "out_count of SGD is 3, not 1 to 2", a.out_count = 3);
    CHECK_KERNEL(SGD, NULL, a.out_count = 1);
    CHECK_KERNEL(SGD, "numbers[3] of SGD is nan", a.numbers[3] = (double)NAN);
    CHECK_KERNEL(SGD, NULL, a.numbers[4] = (double)NAN);
    CHECK_KERNEL(SGD, NULL, a.flags = DP_KERNEL_ZERO_GRAD);
    CHECK_KERNEL(SGD, NULL, (a.flags = DP_KERNEL_ZERO_GRAD, a.count = 0));
    CHECK_KERNEL(ADAMW, NULL, a.flags = DP_KERNEL_ZERO_GRAD);
    CHECK_KERNEL(ADAMW, "out_count of ADAMW is 2, not 3 to 3", a.out_count = 2);
    CHECK_KERNEL(ADAMW, "numbers[6] of ADAMW is inf", a.numbers[6] = (double)INFINITY);
    CHECK_KERNEL(ADAMW, "ADAMW has no flags 0x1", a.flags = DP_KERNEL_NESTEROV);
    CHECK_KERNEL(CHANNELS, "CHANNELS is not for i8", a.dtype = DP_I8);
    CHECK_KERNEL(REDUCE, "op of REDUCE is 1", a.op = DP_OP_MEAN);
    CHECK_KERNEL(REDUCE, "op of REDUCE is 9", a.op = (dp_op)9);
    CHECK_KERNEL(REDUCE, "in_count of REDUCE is 0", a.in_count = 0);
    CHECK_KERNEL(REDUCE, "REDUCE has no flags 0x4", a.flags = DP_KERNEL_L2);
    CHECK_KERNEL(REDUCE, "in_count of REDUCE is 1048577, not 1 to 1048576",
                 a.in_count = ((size_t)1 << 20) + 1);
    CHECK_KERNEL(REDUCE, "heads is 1, not 0", a.heads = 1);
}

TEST_BACKENDS(kernels_know_what_they_divide_by)
{
    right_call right = right_operands(ctx, scope);
    CHECK_KERNEL(REDUCE, NULL, a.beta = -0.5);
    CHECK_KERNEL(REDUCE, "beta is not 0", a.beta = 0);
    CHECK_KERNEL(REDUCE, "beta nan", a.beta = (double)NAN);
    CHECK_KERNEL(REDUCE, "alpha inf", a.alpha = (double)INFINITY);
    CHECK_KERNEL(REDUCE, NULL, (a.dtype = DP_I64, a.beta = -2));
    CHECK_KERNEL(REDUCE, "beta 0:", (a.dtype = DP_I32, a.beta = 0));
    CHECK_KERNEL(REDUCE, "beta 1.5", (a.dtype = DP_I32, a.beta = 1.5));
    CHECK_KERNEL(REDUCE, "beta -1.5", (a.dtype = DP_I32, a.beta = -1.5));
    CHECK_KERNEL(REDUCE, "beta 9.22337e+18", (a.dtype = DP_I64, a.beta = 0x1p63));
    CHECK_KERNEL(REDUCE, "alpha 2", (a.dtype = DP_U8, a.alpha = 2));
    CHECK_KERNEL(REDUCE, "alpha 0.5", (a.dtype = DP_U8, a.alpha = 0.5));
}

TEST_BACKENDS(kernels_know_shapes_and_places)
{
    static const int64_t below[] = {2, -1}, apart[] = {0, 1}, far[] = {INT64_MAX / 2, 1};
    static const int64_t longer[] = {3, 2};
    static void *nothing[3];
    right_call right = right_operands(ctx, scope);
    const void *const same[] = {right.out[0]}, *const last[] = {right.out[1]};
    const void *const shifted[] = {(const char *)right.out[0] + 4};
    const void *const gated[] = {right.in[0], (const char *)right.in[0] + 8};
    void *const twice[] = {right.out[0], (char *)right.out[0] + 8};
    CHECK_KERNEL(FILL, "out is NULL", a.out = NULL);
    CHECK_KERNEL(FILL, "out[0] is NULL", a.out = nothing);
    CHECK_KERNEL(FILL, NULL, (a.out = nothing, a.count = 0));
    CHECK_KERNEL(CAST, "in is NULL", a.in = NULL);
    CHECK_KERNEL(CAST, "in[0] is NULL", a.in = (const void *const *)nothing);
    CHECK_KERNEL(CAST, NULL, a.in = same);
    CHECK_KERNEL(CAST, "out[0] overlaps in[0]", (a.in = same, a.in_dtype = DP_F64));
    CHECK_KERNEL(CAST, "out[0] overlaps in[0]", a.in = shifted);
    CHECK_KERNEL(STATS, "out[0] overlaps in[0]", a.in = same);
    CHECK_KERNEL(PAD, "out[0] overlaps in[0]", a.in = same);
    CHECK_KERNEL(SGD, "out[0] overlaps in[0]", a.in = same);
    CHECK_KERNEL(SGD, "out[1] overlaps in[0]", a.in = last);
    CHECK_KERNEL(SGD, "out[1] overlaps out[0]", a.out = twice);
    CHECK_KERNEL(SGD, NULL, (a.in = gated, a.in_count = 2));
    CHECK_KERNEL(SGD, "in[0], which becomes 0, overlaps in[1]",
                 (a.in = gated, a.in_count = 2, a.flags = DP_KERNEL_ZERO_GRAD));
    CHECK_KERNEL(COPY, "9 dims", a.ndim = 9);
    CHECK_KERNEL(COPY, "-1 dims", a.ndim = -1);
    CHECK_KERNEL(COPY, "shape is NULL", a.shape = NULL);
    CHECK_KERNEL(COPY, "in_stride is NULL", a.in_stride = NULL);
    CHECK_KERNEL(COPY, "out_stride is NULL", a.out_stride = NULL);
    CHECK_KERNEL(COPY, NULL, (a.ndim = 0, a.count = 1, a.out_stride = a.in_stride = NULL));
    CHECK_KERNEL(COPY, "size -1 of dim 1 is negative", a.shape = below);
    CHECK_KERNEL(COPY, "in[0] has size 2 and stride -1", a.in_stride = below);
    CHECK_KERNEL(COPY, "the strides of in[0] reach too far", a.in_stride = far);
    CHECK_KERNEL(COPY, "elements of out[0] share a place", a.out_stride = apart);
    CHECK_KERNEL(COPY, NULL, a.in_stride = apart);
    CHECK_KERNEL(COPY, "count is 5, shape has 4 elements", a.count = 5);
    CHECK_KERNEL(COPY, "what is written overlaps what is read", a.in = shifted);
    CHECK_KERNEL(PAD, "shape is NULL", a.in_shape = NULL);
    CHECK_KERNEL(PAD, "in_stride is NULL", a.in_stride = NULL);
    CHECK_KERNEL(PAD, NULL, a.out_stride = NULL);
    CHECK_KERNEL(PAD, "in_shape[0] is 3, shape[0] is 2", a.in_shape = longer);
    CHECK_KERNEL(PAD, "count is 2, shape has 4 elements", a.count = 2);
    CHECK_KERNEL(CHANNELS, "ndim of CHANNELS is 2, not 3", a.ndim = 2);
    CHECK_KERNEL(CHANNELS, "count is 3, shape has 4 elements", a.count = 3);
}

TEST_BACKENDS(large_steps)
{
    enum { COUNT = 400001 };
    float *numbers = test_room(COUNT * sizeof(float));
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
    args.flags = DP_KERNEL_ZERO_GRAD;
    CHECK_OK(dp_kernel_run(ctx, 0, &args));
    CHECK_OK(dp_read(ctx, &param, numbers, COUNT * sizeof *numbers));
    for (int i = 0; i < COUNT; i++)
        CHECK_F64(numbers[i], 1 - i % 7, 0);
    CHECK_OK(dp_read(ctx, &grad, numbers, COUNT * sizeof *numbers));
    for (int i = 0; i < COUNT; i++)
        CHECK_F64(numbers[i], 0, 0);
}
