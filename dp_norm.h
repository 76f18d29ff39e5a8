/* dp_norm.h - v0.2.0 - batch statistics of all devices and ranks, for layers in dp.h - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h. A layer that
   normalises by the batch, spread over devices and processes, is two methods:

       static dp_status norm_forward(dp_call *call)
       {
           dp_tensor weight = dp_param_tensor(call, WEIGHT), bias = dp_param_tensor(call, BIAS),
                     mean = dp_buffer_tensor(call, MEAN), var = dp_buffer_tensor(call, VAR), y;
           const dp_norm norm = {.weight = &weight, .bias = &bias, .mean = &mean, .var = &var};
           const dp_tensor *x;
           DP_TRY(dp_call_arg(call, 0, DP_DTYPE_ANY, -1, &x));
           DP_TRY(dp_norm_forward(call, &norm, x, &y, &call->saved));
           call->out = dp_of(call->scope, &y);
           return DP_OK;
       }

       static dp_status norm_backward(dp_call *call)
       {
           dp_tensor dy, dx, weight = dp_grad_tensor(call, WEIGHT),
                             bias = dp_grad_tensor(call, BIAS);
           DP_TRY(dp_call_out_grad(call, NULL, &dy));
           DP_TRY(dp_norm_backward(call, call->saved, &dy, &dx, &weight, &bias));
           call->args_grad = DP_TUPLE_OF(call->scope, dp_of(call->scope, &dx));
           return DP_OK;
       }

   CONTENTS (search for the tag)
     >>norm       what is normalised by what; forward and backward
   and of the implementation
     >>channels   numbers of each channel, on the host and beside every element
     >>moments    of the batch of all ranks
     >>running    the mean and variance that last
     >>layer      forward and backward

   WHO TAKES PART
   All replicas of the pass and, under dp_distributed, those of all processes: they exchange sums
   twice in a forward and once in a backward (dp_call_all_reduce). Parts without rows take part too;
   a process without data passes a batch of no rows. Evaluation uses the running statistics and
   exchanges nothing; neither does a single part. A device without rows has no replica: under
   dp_distributed its running statistics stay old until buffers are made equal, before the next
   forward with a pass. With dp_config.shards the same is true of every rank without rows.

   NUMBERS
   Elements are f32, f64, f16 or bf16; halves are computed in f32. Sums are f64, first for the mean,
   then for the variance around it, so that a large mean costs no digits. With dp_config.shards they
   have the same bits on any number of devices (dp.h, THE SAME BITS). */

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_NORM_H) && defined(DP_H)
#define DP_NORM_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>norm ===================================================================================
   x has the shape (rows, channels, any other dims); each channel has a mean and a variance.     */

typedef enum dp_norm_weights {
    DP_NORM_SAMPLES, /* weight every value equally; the running variance is unbiased: torch's
                        SyncBatchNorm */
    DP_NORM_DEVICES  /* weight every part that has rows equally; the running variance is biased:
                        PyTorch-Encoding */
} dp_norm_weights;

typedef struct dp_norm { /* zero: as torch has it, without weight, bias and running statistics */
    dp_norm_weights weights;
    bool alone;              /* each part by itself: nothing is exchanged */
    double eps;              /* 0: 1e-5, DP_ZERO: 0 */
    double momentum;         /* of the running statistics, up to 1; 0: 0.1, DP_ZERO: they stay */
    bool cumulative;         /* average all batches so far instead, which `steps` counts */
    const dp_tensor *weight; /* NULL: 1; as many elements as there are channels */
    const dp_tensor *bias;   /* NULL: 0 */
    const dp_tensor *mean, *var; /* running; NULL: an evaluation is normalised by its own part */
    const dp_tensor *steps; /* NULL, or an i64: counts the batches that running statistics saw */
} dp_norm;

/* y = (x - mean) / sqrt(variance + eps) * weight + bias, in the dtype of x. In training, mean and
   variance are those of the batch of all ranks, and the running ones are updated; a batch without
   rows changes nothing, and a single value for a channel is an error on all ranks. out_saved is for
   the backward; NULL: there will be none. [host] */
DP_MUST_USE DP_API dp_status dp_norm_forward(dp_call *call, const dp_norm *norm, const dp_tensor *x,
                                             dp_tensor *out_y, void **out_saved);
/* dy has the dtype and shape of x. This replica's gradients of weight and bias are added to what is
   there; NULL: not wanted. out_dx NULL: not wanted, on all ranks alike; nothing is exchanged.
   [host] */
DP_MUST_USE DP_API dp_status dp_norm_backward(dp_call *call, const void *saved, const dp_tensor *dy,
                                              dp_tensor *out_dx, const dp_tensor *weight_grad,
                                              const dp_tensor *bias_grad);

/* For other kinds of layers: mean and biased variance of each channel over all ranks, and of how
   many values; 0: there are none, and one is refused in training, as by dp_norm_forward. `norm`
   says how parts are weighted. Their gradient needs the sums of dy and dy * (x - mean) over all
   ranks: dp_call_all_reduce. [host] */
DP_MUST_USE DP_API dp_status dp_norm_moments(dp_call *call, const dp_norm *norm, const dp_tensor *x,
                                             double *out_mean, double *out_var, double *out_count);

#ifdef __cplusplus
}
#endif
#endif /* DP_NORM_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_NORM_IMPLEMENTED)
#define DP_NORM_IMPLEMENTED

#include <math.h>
#include <string.h>

/* ==== >>channels ================================================================================
   The numbers of channels are computed on the host, in f64; elements by kernels of the device, some
   rows at a time, beside which the numbers of the channels are laid out. */

enum { DP__NORM_CHUNK = 1 << 18 }; /* elements of those rows: few enough to stay in a cache */

typedef struct dp__norm_work {
    dp_call *call;
    dp_scope *temp;
    dp_dtype dtype; /* that is computed in */
    int64_t rows, channels, inner;
    dp_tensor x; /* dense, of that dtype, with these three dims */
} dp__norm_work;

static double *dp__norm_numbers(dp_scope *scope, int64_t count)
{
    double *numbers = dp_scope_alloc(scope, (size_t)count * sizeof *numbers);
    if (numbers != NULL)
        memset(numbers, 0, (size_t)count * sizeof *numbers);
    return numbers;
}

static int64_t dp__norm_count(const dp__norm_work *work)
{
    return work->rows * work->channels * work->inner;
}

/* The tensor on this device: a plain module gets its arguments wherever they are. */
static dp_status dp__norm_bring(const dp__norm_work *work, const dp_tensor *tensor, dp_tensor *out)
{
    dp_device here = work->call->device;
    if (tensor->device.backend == here.backend && tensor->device.index == here.index)
        return dp_contiguous(work->temp, tensor, out);
    return dp_tensor_to(work->temp, here, (dp_dtype)tensor->dtype, tensor, out);
}

/* The dense tensor of three dims, of the dtype that is computed in. */
static dp_status dp__norm_widen(const dp__norm_work *work, const dp_tensor *tensor, dp_tensor *out)
{
    const int64_t shape[] = {work->rows, work->channels, work->inner};
    DP_TRY(dp__norm_bring(work, tensor, out));
    DP_TRY(dp_reshape(out, 3, shape, out));
    if (out->dtype == work->dtype)
        return DP_OK;
    return dp_tensor_to(work->temp, out->device, work->dtype, out, out);
}

static dp_status dp__norm_begin(dp_call *call, const dp_tensor *x, dp__norm_work *out)
{
    *out = (dp__norm_work){.call = call, .temp = NULL, .rows = 1, .inner = 1};
    if (x->ndim < 2 || dp_tensor_count(x) < 0)
        return dp_error(DP_ERR_INVALID, "x has %d dims, not rows, channels and perhaps others",
                        (int)x->ndim);
    if (x->dtype > DP_BF16)
        return dp_error(DP_ERR_INVALID, "x is %s, not a floating dtype",
                        dp_dtype_name((dp_dtype)x->dtype));
    out->dtype = x->dtype == DP_F64 ? DP_F64 : DP_F32;
    out->rows = x->shape[0];
    out->channels = x->shape[1];
    for (int d = 2; d < x->ndim; d++)
        out->inner *= x->shape[d];
    out->temp = dp_scope_child(call->scope);
    return out->temp != NULL ? dp__norm_widen(out, x, &out->x) : dp_no_memory();
}

/* The sums of each channel and then its sums of squares. */
static dp_status dp__norm_sums(const dp__norm_work *work, const dp_tensor *tensor, double *out)
{
    const int64_t shape[] = {2, work->channels};
    const void *in = tensor->data;
    dp_tensor sums;
    memset(out, 0, 2 * (size_t)work->channels * sizeof *out);
    if (dp__norm_count(work) == 0)
        return DP_OK;
    DP_TRY(dp_tensor_new(work->temp, work->call->device, DP_F64, 2, shape, &sums));
    DP_TRY(dp_kernel_run(work->call->ctx, work->call->local_rank,
                         &(dp_kernel_args){.kernel = DP_KERNEL_CHANNELS,
                                           .dtype = work->dtype,
                                           .count = (size_t)dp__norm_count(work),
                                           .out = &sums.data,
                                           .in = &in,
                                           .out_count = 1,
                                           .in_count = 1,
                                           .ndim = 3,
                                           .shape = tensor->shape}));
    return dp_read(work->call->ctx, &sums, out, 2 * (size_t)work->channels * sizeof *out);
}

/* out = a op b, element by element; out may be one of the two. */
static dp_status dp__norm_elements(const dp__norm_work *work, dp_op op, const void *a,
                                   const void *b, void *out, int64_t count)
{
    const void *in[] = {a, b};
    if (count == 0)
        return DP_OK;
    return dp_kernel_run(work->call->ctx, work->call->local_rank,
                         &(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                           .op = op,
                                           .dtype = work->dtype,
                                           .count = (size_t)count,
                                           .out = &out,
                                           .in = in,
                                           .out_count = 1,
                                           .in_count = 2,
                                           .alpha = 1,
                                           .beta = 1});
}

/* A number for each channel, on the device, in a dtype. */
static dp_status dp__norm_vector(const dp__norm_work *work, const double *numbers, dp_dtype dtype,
                                 dp_tensor *out)
{
    dp_tensor wide;
    DP_TRY(
        dp_tensor_from(work->temp, work->call->device, numbers, DP_F64, 1, &work->channels, &wide));
    return dp_tensor_to(work->temp, work->call->device, dtype, &wide, out);
}

/* out = in op the numbers of the channels: some rows at a time. */
static dp_status dp__norm_channels(const dp__norm_work *work, dp_op op, const dp_tensor *in,
                                   const double *numbers, const dp_tensor *out)
{
    int64_t row = work->channels * work->inner;
    if (dp__norm_count(work) == 0)
        return DP_OK;
    int64_t most = DP__NORM_CHUNK / row, some = most > 1 ? most : 1;
    some = some < work->rows ? some : work->rows;
    const int64_t shape[] = {some, work->channels, work->inner};
    const size_t size = dp_dtype_bytes(work->dtype);
    dp_tensor vector, beside;
    DP_TRY(dp__norm_vector(work, numbers, work->dtype, &vector));
    DP_TRY(dp_tensor_new(work->temp, work->call->device, work->dtype, 3, shape, &beside));
    dp_tensor all = beside;
    all.data = vector.data;
    all.read_only = true;
    all.stride[0] = all.stride[2] = 0; /* each element again and again */
    all.stride[1] = 1;
    DP_TRY(dp_copy(work->call->ctx, &beside, &all, NULL));
    for (int64_t first = 0; first < work->rows; first += some) {
        size_t at = (size_t)(first * row) * size;
        int64_t rows = work->rows - first < some ? work->rows - first : some;
        DP_TRY(dp__norm_elements(work, op, (const char *)in->data + at, beside.data,
                                 (char *)out->data + at, rows * row));
    }
    return DP_OK;
}

/* The elements of a tensor of the layer; `what` names it. */
static dp_status dp__norm_get(const dp__norm_work *work, const dp_tensor *tensor, const char *what,
                              double *out)
{
    dp_tensor wide;
    if (dp_tensor_count(tensor) != work->channels || tensor->dtype > DP_BF16)
        return dp_error(DP_ERR_INVALID, "%s has %lld elements of %s, x has %lld channels", what,
                        (long long)dp_tensor_count(tensor), dp_dtype_name((dp_dtype)tensor->dtype),
                        (long long)work->channels);
    DP_TRY(dp_tensor_to(work->temp, tensor->device, DP_F64, tensor, &wide));
    return dp_read(work->call->ctx, &wide, out, (size_t)work->channels * sizeof *out);
}

/* ==== >>moments =================================================================================
   Ranks add up the values, then the squares of their distance from the mean. `shift` is the mean as
   it was subtracted, rounded to the dtype of x; `rest` is the mean minus `shift`.               */

typedef struct dp__norm_moments {
    double values;      /* of a channel, on all ranks */
    double total;       /* what sums are divided by: values, or parts that have rows */
    double own;         /* by which the sums of this part are divided first */
    double *mean, *var; /* of each channel */
    double *rest;
    dp_tensor centred; /* x - shift */
} dp__norm_moments;

/* Adds numbers up over all parts, if there are others. */
static dp_status dp__norm_meet(const dp__norm_work *work, bool meets, double *numbers,
                               int64_t count)
{
    dp_tensor sums;
    if (!meets)
        return DP_OK;
    DP_TRY(dp_tensor_from(work->temp, work->call->device, numbers, DP_F64, 1, &count, &sums));
    DP_TRY(dp_call_all_reduce_tensor(work->call, &sums, &sums, DP_OP_SUM));
    return dp_read(work->call->ctx, &sums, numbers, (size_t)count * sizeof *numbers);
}

static bool dp__norm_meets(const dp_call *call, const dp_norm *norm)
{
    return call->training && !norm->alone;
}

/* x - shift, in memory of its own. */
static dp_status dp__norm_centre(const dp__norm_work *work, dp__norm_moments *moments)
{
    double *minus = dp__norm_numbers(work->temp, work->channels);
    if (minus == NULL)
        return dp_no_memory();
    for (int64_t c = 0; c < work->channels; c++) {
        double mean = moments->mean[c];
        double shift = work->dtype == DP_F64 ? mean : (double)(float)mean;
        minus[c] = -shift;
        moments->rest[c] = mean - shift;
    }
    DP_TRY(dp_tensor_new(work->call->scope, work->call->device, work->dtype, 3, work->x.shape,
                         &moments->centred));
    return dp__norm_channels(work, DP_OP_SUM, &work->x, minus, &moments->centred);
}

static dp_status dp__norm_moments_make(const dp__norm_work *work, dp__norm_moments *out)
{
    dp_scope *scope = work->call->scope; /* a backward needs some of them */
    *out = (dp__norm_moments){.mean = dp__norm_numbers(scope, work->channels),
                              .var = dp__norm_numbers(scope, work->channels),
                              .rest = dp__norm_numbers(scope, work->channels),
                              .total = 1,
                              .own = 1};
    return out->mean != NULL && out->var != NULL && out->rest != NULL ? DP_OK : dp_no_memory();
}

/* How the parts count. */
static dp_status dp__norm_mean(const dp__norm_work *work, const dp_norm *norm,
                               dp__norm_moments *out)
{
    const int64_t channels = work->channels;
    double here = (double)(work->rows * work->inner);
    double *sums = dp__norm_numbers(work->temp, 2 * channels + 2);
    if (sums == NULL)
        return dp_no_memory();
    bool alike = norm->weights == DP_NORM_DEVICES;
    out->own = alike && here > 0 ? here : 1;
    DP_TRY(dp__norm_sums(work, &work->x, sums + 2));
    for (int64_t c = 0; c < channels; c++)
        sums[2 + c] /= out->own;
    sums[0] = here;
    sums[1] = here > 0;
    DP_TRY(dp__norm_meet(work, dp__norm_meets(work->call, norm), sums, 2 + channels));
    out->values = sums[0];
    out->total = alike ? sums[1] : sums[0];
    for (int64_t c = 0; c < channels && out->values > 0; c++)
        out->mean[c] = sums[2 + c] / out->total;
    return DP_OK;
}

static dp_status dp__norm_var(const dp__norm_work *work, const dp_norm *norm, dp__norm_moments *out)
{
    const int64_t channels = work->channels;
    double *sums = dp__norm_numbers(work->temp, 2 * channels);
    if (sums == NULL)
        return dp_no_memory();
    DP_TRY(dp__norm_sums(work, &out->centred, sums));
    for (int64_t c = 0; c < 2 * channels; c++)
        sums[c] /= out->own;
    DP_TRY(dp__norm_meet(work, dp__norm_meets(work->call, norm), sums, 2 * channels));
    for (int64_t c = 0; c < channels; c++) {
        double rest = sums[c] / out->total, var = sums[channels + c] / out->total - rest * rest;
        out->rest[c] = rest;
        out->var[c] = var < 0 ? 0 : var; /* what rounding made of 0 */
    }
    return DP_OK;
}

/* Of the batch. All ranks know the number of values, so they fail or go on together. */
static dp_status dp__norm_of_batch(const dp__norm_work *work, const dp_norm *norm,
                                   dp__norm_moments *out)
{
    DP_TRY(dp__norm_mean(work, norm, out));
    if (out->values > 0 && out->values < 2 && work->call->training)
        return dp_error(DP_ERR_INVALID,
                        "Expected more than 1 value per channel when training: %s has 1 row, and 1 "
                        "value in each of its %lld channels",
                        norm->alone ? "this part" : "the whole batch", (long long)work->channels);
    DP_TRY(dp__norm_centre(work, out));
    return out->values > 0 ? dp__norm_var(work, norm, out) : DP_OK;
}

static dp_status dp__norm_check(const dp_call *call, const dp_norm *norm, const dp_tensor *x)
{
    if (call == NULL || norm == NULL || x == NULL)
        return dp_error(DP_ERR_INVALID, "%s is NULL",
                        call == NULL   ? "call"
                        : norm == NULL ? "norm"
                                       : "x");
    if ((unsigned)norm->weights > DP_NORM_DEVICES)
        return dp_error(DP_ERR_INVALID, "weights is %d", (int)norm->weights);
    if (!(dp_or(norm->eps, 0) >= 0) || !isfinite(norm->eps))
        return dp_error(DP_ERR_INVALID, "eps is %g, not a finite number of 0 or more", norm->eps);
    if (!(dp_or(norm->momentum, 0) >= 0 && norm->momentum <= 1))
        return dp_error(DP_ERR_INVALID, "momentum is %g, not from 0 to 1", norm->momentum);
    if ((norm->mean == NULL) != (norm->var == NULL))
        return dp_error(DP_ERR_INVALID, "one of mean and var is NULL, and one is not");
    if (norm->cumulative && norm->steps == NULL)
        return dp_error(DP_ERR_INVALID, "cumulative needs steps, which count the batches");
    if (norm->steps != NULL && (dp_tensor_count(norm->steps) != 1 || norm->steps->dtype != DP_I64))
        return dp_error(DP_ERR_INVALID, "steps has %lld elements of %s, not one i64",
                        (long long)dp_tensor_count(norm->steps),
                        dp_dtype_name((dp_dtype)norm->steps->dtype));
    return DP_OK;
}

static dp_status dp__norm_moments_run(dp_call *call, const dp_norm *norm, const dp_tensor *x,
                                      dp__norm_work *work, dp__norm_moments *out)
{
    DP_TRY(dp__norm_begin(call, x, work));
    DP_TRY(dp__norm_moments_make(work, out));
    return dp__norm_of_batch(work, norm, out);
}

DP_API dp_status dp_norm_moments(dp_call *call, const dp_norm *norm, const dp_tensor *x,
                                 double *out_mean, double *out_var, double *out_count)
{
    dp__norm_work work = {.temp = NULL};
    dp__norm_moments moments;
    DP_TRY(dp_error_in(__func__, dp__norm_check(call, norm, x)));
    if (out_mean == NULL || out_var == NULL || out_count == NULL)
        return dp_error(DP_ERR_INVALID, "%s: an out is NULL", __func__);
    dp_status status = dp__norm_moments_run(call, norm, x, &work, &moments);
    dp_scope_end(work.temp);
    if (status != DP_OK)
        return dp_error_in(__func__, status);
    memcpy(out_mean, moments.mean, (size_t)work.channels * sizeof *out_mean);
    memcpy(out_var, moments.var, (size_t)work.channels * sizeof *out_var);
    *out_count = moments.values;
    return DP_OK;
}

/* ==== >>running =================================================================================
   The mean and variance that last: buffers of the layer.                                        */

static dp_status dp__norm_put(const dp__norm_work *work, const double *numbers,
                              const dp_tensor *tensor)
{
    dp_tensor wide;
    DP_TRY(dp_tensor_from(work->temp, tensor->device, numbers, DP_F64, tensor->ndim, tensor->shape,
                          &wide));
    return dp_cast(work->call->ctx, tensor, &wide);
}

/* running = (1 - momentum) * running + momentum * now */
static dp_status dp__norm_follow(const dp__norm_work *work, const dp_tensor *running,
                                 const char *what, double momentum, const double *now,
                                 double factor)
{
    double *numbers = dp__norm_numbers(work->temp, work->channels);
    if (numbers == NULL)
        return dp_no_memory();
    DP_TRY(dp__norm_get(work, running, what, numbers));
    for (int64_t c = 0; c < work->channels; c++)
        numbers[c] = (1 - momentum) * numbers[c] + momentum * factor * now[c];
    return dp__norm_put(work, numbers, running);
}

static dp_status dp__norm_run_on(const dp__norm_work *work, const dp_norm *norm,
                                 const dp__norm_moments *moments)
{
    bool unbiased = norm->weights == DP_NORM_SAMPLES;
    double momentum = dp_or(norm->momentum, 0.1);
    int64_t steps = 0;
    if (norm->steps != NULL) {
        DP_TRY(dp_read(work->call->ctx, norm->steps, &steps, sizeof steps));
        DP_TRY(dp_fill(work->call->ctx, norm->steps, dp_int(++steps)));
    }
    if (norm->cumulative)
        momentum = 1 / (double)steps;
    DP_TRY(dp__norm_follow(work, norm->mean, "mean", momentum, moments->mean, 1));
    return dp__norm_follow(work, norm->var, "var", momentum, moments->var,
                           unbiased ? moments->values / (moments->values - 1) : 1);
}

/* ==== >>layer ===================================================================================
   With s = weight / sqrt(var + eps), g = the sum of dy and d = the sum of dy * (x - mean) over all
   ranks, each divided by the number of values:
     y  = (x - mean) * s + bias
     dx = (dy - g - (x - mean) * d / (var + eps)) * s                                            */

typedef struct dp__norm_saved {
    dp_tensor x; /* its dtype and shape */
    bool batch;  /* the statistics were the batch's, which depend on x */
    bool meets;
    double *scale, *inverse; /* s, and 1 / sqrt(var + eps) */
    dp__norm_moments moments;
} dp__norm_saved;

static dp_status dp__norm_of_running(const dp__norm_work *work, const dp_norm *norm,
                                     dp__norm_moments *out)
{
    DP_TRY(dp__norm_get(work, norm->mean, "mean", out->mean));
    DP_TRY(dp__norm_get(work, norm->var, "var", out->var));
    return dp__norm_centre(work, out);
}

/* centred * scale + offset, as a tensor like x */
static dp_status dp__norm_output(const dp__norm_work *work, const dp__norm_saved *saved,
                                 const double *offset, dp_tensor *out)
{
    dp_call *call = work->call;
    dp_tensor wide, flat;
    DP_TRY(dp_tensor_new(call->scope, call->device, (dp_dtype)saved->x.dtype, saved->x.ndim,
                         saved->x.shape, out));
    DP_TRY(dp_reshape(out, 3, work->x.shape, &flat));
    wide = flat;
    if (saved->x.dtype != work->dtype)
        DP_TRY(dp_tensor_new(work->temp, call->device, work->dtype, 3, work->x.shape, &wide));
    DP_TRY(dp__norm_channels(work, DP_OP_PROD, &saved->moments.centred, saved->scale, &wide));
    DP_TRY(dp__norm_channels(work, DP_OP_SUM, &wide, offset, &wide));
    return saved->x.dtype != work->dtype ? dp_cast(call->ctx, &flat, &wide) : DP_OK;
}

static dp_status dp__norm_affine(const dp__norm_work *work, const dp_norm *norm,
                                 dp__norm_saved *saved, double *offset)
{
    const dp__norm_moments *moments = &saved->moments;
    double eps = dp_or(norm->eps, 1e-5);
    for (int64_t c = 0; c < work->channels; c++)
        saved->scale[c] = 1;
    if (norm->weight != NULL)
        DP_TRY(dp__norm_get(work, norm->weight, "weight", saved->scale));
    if (norm->bias != NULL)
        DP_TRY(dp__norm_get(work, norm->bias, "bias", offset));
    for (int64_t c = 0; c < work->channels; c++) {
        saved->inverse[c] = 1 / sqrt(moments->var[c] + eps);
        saved->scale[c] *= saved->inverse[c];
        offset[c] -= moments->rest[c] * saved->scale[c];
    }
    return DP_OK;
}

static dp_status dp__norm_forward(const dp__norm_work *work, const dp_norm *norm,
                                  dp__norm_saved *saved, dp_tensor *out_y)
{
    dp_scope *scope = work->call->scope;
    double *offset = dp__norm_numbers(work->temp, work->channels);
    saved->scale = dp__norm_numbers(scope, work->channels);
    saved->inverse = dp__norm_numbers(scope, work->channels);
    if (offset == NULL || saved->scale == NULL || saved->inverse == NULL)
        return dp_no_memory();
    DP_TRY(dp__norm_moments_make(work, &saved->moments));
    DP_TRY(saved->batch ? dp__norm_of_batch(work, norm, &saved->moments)
                        : dp__norm_of_running(work, norm, &saved->moments));
    DP_TRY(dp__norm_affine(work, norm, saved, offset));
    if (work->call->training && norm->mean != NULL && saved->moments.values > 0)
        DP_TRY(dp__norm_run_on(work, norm, &saved->moments));
    return dp__norm_output(work, saved, offset, out_y);
}

DP_API dp_status dp_norm_forward(dp_call *call, const dp_norm *norm, const dp_tensor *x,
                                 dp_tensor *out_y, void **out_saved)
{
    dp__norm_work work;
    DP_TRY(dp_error_in(__func__, dp__norm_check(call, norm, x)));
    DP_TRY(dp_check_pointer(__func__, "out_y", out_y));
    dp__norm_saved *saved = dp_scope_alloc(call->scope, sizeof *saved);
    if (saved == NULL)
        return dp_error_in(__func__, dp_no_memory());
    *saved = (dp__norm_saved){.x = *x,
                              .batch = call->training || norm->mean == NULL,
                              .meets = dp__norm_meets(call, norm)};
    dp_status status = dp__norm_begin(call, x, &work);
    if (status == DP_OK)
        status = dp__norm_forward(&work, norm, saved, out_y);
    dp_scope_end(work.temp);
    if (status == DP_OK && out_saved != NULL)
        *out_saved = saved;
    return dp_error_in(__func__, status);
}

/* ---- backward -------------------------------------------------------------------------------- */

static dp_status dp__norm_grad_add(const dp__norm_work *work, const double *numbers,
                                   const dp_tensor *grad, const char *what)
{
    dp_tensor vector;
    if (grad == NULL)
        return DP_OK;
    if (dp_tensor_count(grad) != work->channels || grad->dtype > DP_BF16)
        return dp_error(DP_ERR_INVALID, "%s has %lld elements, x has %lld channels", what,
                        (long long)dp_tensor_count(grad), (long long)work->channels);
    DP_TRY(dp__norm_vector(work, numbers, (dp_dtype)grad->dtype, &vector));
    DP_TRY(dp_reshape(&vector, grad->ndim, grad->shape, &vector));
    return dp_axpby(work->call->ctx, 1, grad, 1, &vector, grad);
}

/* dx = dy * scale + centred * slope + level: a product at a time; `product` is scratch. */
static dp_status dp__norm_input_grad(const dp__norm_work *work, const dp__norm_saved *saved,
                                     const dp_tensor *product, const double *slope,
                                     const double *level, dp_tensor *out_dx)
{
    dp_call *call = work->call;
    dp_tensor flat, wide;
    DP_TRY(dp_tensor_new(call->scope, call->device, (dp_dtype)saved->x.dtype, saved->x.ndim,
                         saved->x.shape, out_dx));
    DP_TRY(dp_reshape(out_dx, 3, work->x.shape, &flat));
    wide = flat;
    if (saved->x.dtype != work->dtype)
        DP_TRY(dp_tensor_new(work->temp, call->device, work->dtype, 3, work->x.shape, &wide));
    DP_TRY(dp__norm_channels(work, DP_OP_PROD, &work->x, saved->scale, &wide));
    if (saved->batch) {
        DP_TRY(dp__norm_channels(work, DP_OP_PROD, &saved->moments.centred, slope, product));
        DP_TRY(dp__norm_elements(work, DP_OP_SUM, wide.data, product->data, wide.data,
                                 dp__norm_count(work)));
        DP_TRY(dp__norm_channels(work, DP_OP_SUM, &wide, level, &wide));
    }
    return saved->x.dtype != work->dtype ? dp_cast(call->ctx, &flat, &wide) : DP_OK;
}

/* The sums over all ranks become coefficients of each element's gradient. */
static void dp__norm_slopes(const dp__norm_work *work, const dp__norm_saved *saved, double *sums)
{
    const dp__norm_moments *moments = &saved->moments;
    double share = 1 / (moments->total * moments->own);
    for (int64_t c = 0; c < work->channels; c++) {
        double scale = saved->scale[c] * share, inverse = saved->inverse[c];
        double slope = -scale * inverse * inverse * sums[work->channels + c];
        sums[c] = -scale * sums[c] - slope * moments->rest[c];
        sums[work->channels + c] = slope;
    }
}

/* work->x is dy. */
static dp_status dp__norm_backward(const dp__norm_work *work, const dp__norm_saved *saved,
                                   dp_tensor *out_dx, const dp_tensor *weight_grad,
                                   const dp_tensor *bias_grad)
{
    const int64_t channels = work->channels;
    double *sums = dp__norm_numbers(work->temp, 3 * channels); /* of dy, then of the products */
    double *grads = dp__norm_numbers(work->temp, channels);
    dp_tensor product;
    if (sums == NULL || grads == NULL)
        return dp_no_memory();
    DP_TRY(dp_tensor_new(work->temp, work->call->device, work->dtype, 3, work->x.shape, &product));
    DP_TRY(dp__norm_elements(work, DP_OP_PROD, work->x.data, saved->moments.centred.data,
                             product.data, dp__norm_count(work)));
    DP_TRY(dp__norm_sums(work, &work->x, sums));
    DP_TRY(dp__norm_sums(work, &product, sums + channels));
    for (int64_t c = 0; c < channels; c++) {
        sums[channels + c] -= saved->moments.rest[c] * sums[c];
        grads[c] = sums[channels + c] * saved->inverse[c];
    }
    DP_TRY(dp__norm_grad_add(work, grads, weight_grad, "weight_grad"));
    DP_TRY(dp__norm_grad_add(work, sums, bias_grad, "bias_grad"));
    if (out_dx == NULL)
        return DP_OK;
    if (saved->batch)
        DP_TRY(dp__norm_meet(work, saved->meets, sums, 2 * channels));
    dp__norm_slopes(work, saved, sums);
    return dp__norm_input_grad(work, saved, &product, sums + channels, sums, out_dx);
}

DP_API dp_status dp_norm_backward(dp_call *call, const void *saved, const dp_tensor *dy,
                                  dp_tensor *out_dx, const dp_tensor *weight_grad,
                                  const dp_tensor *bias_grad)
{
    dp__norm_work work;
    DP_TRY(dp_check_pointer(__func__, "call", call));
    DP_TRY(dp_check_pointer(__func__, "saved", saved));
    DP_TRY(dp_check_pointer(__func__, "dy", dy));
    const dp__norm_saved *own = saved;
    if (dy->dtype != own->x.dtype || !dp_same_shape(dy, &own->x))
        return dp_error(DP_ERR_INVALID, "%s: dy does not have the dtype and shape of x", __func__);
    dp_status status = dp__norm_begin(call, dy, &work);
    if (status == DP_OK)
        status = dp__norm_backward(&work, saved, out_dx, weight_grad, bias_grad);
    dp_scope_end(work.temp);
    return dp_error_in(__func__, status);
}
#endif /* DP_IMPLEMENTATION && !DP_NORM_IMPLEMENTED */
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
