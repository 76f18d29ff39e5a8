/* dp_train.h - v0.1.0 - what stands around the wrappers of dp.h in a training program - MIT licence

   Include it after dp.h, or instead. It uses nothing of dp.h but what a program of yours could use,
   so it is for every device and every number of processes.

       dp_optim *optim;
       dp_optim_create(par, &(dp_optim_config){.rule = dp_adamw(),
                                               .hyper = {.lr = 3e-4, .weight_decay = 0.1},
                                               .schedule = {.warmup = 100,
                                                            .decay = DP_DECAY_COSINE,
                                                            .total = 5000},
                                               .accumulate = 4,
                                               .clip = {.norm = 1}}, &optim);
       ...
       dp_train_step(par, step, batch, optim, &log);       every 4th of them changes parameters

   CONTENTS (search for the tag)
     >>rules      how a parameter is stepped: SGD, Adam, AdamW, yours
     >>schedule   what the learning rate is multiplied by
     >>optim      the optimizer that dp_train_step takes
     >>clipping   gradients that are not too large
   and of the implementation
     >>stepping   rules as kernels
     >>factors    of the learning rate
     >>views      all parameters and gradients of a module, asked for once
     >>norms      of gradients, and what follows from them
     >>turns      which gradients make a step, and the step
     >>making     an optimizer and its state
     >>keeping    what is asked for, saved and loaded
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#ifndef DP_TRAIN_H
#define DP_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>rules ==================================================================================
   A rule steps the elements of one parameter on one device. It keeps nothing: its state is given to
   it, and is zero at first.                                                                     */

typedef struct dp_hyper { /* 0: what torch.optim has there, but no weight decay, and no lr */
    double lr;            /* above 0 */
    double weight_decay;
    double momentum, dampening; /* SGD */
    bool nesterov;
    double beta1, beta2, eps; /* Adam, AdamW: 0.9, 0.999, 1e-8 */
    bool maximize;
} dp_hyper;

enum { DP_RULE_STATES = 4 };

typedef struct dp_rule_args {
    dp_ctx *ctx;
    int local_rank;
    dp_dtype dtype; /* of param and grad */
    size_t count;   /* elements, one after another */
    void *param, *grad;
    void *state[DP_RULE_STATES]; /* as many as the rule wants: f64 for f64, else f32 */
    const double *gate; /* NULL; or, on the device: what the gradient is multiplied by, and a
                           number that, above 0, says that this step is left out */
    int64_t step;       /* the first is 1 */
    dp_hyper hyper;     /* lr and weight_decay of now, and of this parameter */
} dp_rule_args;

typedef struct dp_rule {
    size_t size; /* sizeof(dp_rule) */
    const char *name;
    /* Whether the numbers make sense, with defaults put in (NULL: they do). */
    dp_status (*check)(dp_hyper *hyper);
    int (*state_count)(const dp_hyper *hyper); /* NULL: none */
    dp_status (*step)(const dp_rule_args *args);
} dp_rule;

DP_API const dp_rule *dp_sgd(void);
DP_API const dp_rule *dp_adam(void); /* weight decay is part of the gradient */
DP_API const dp_rule *dp_adamw(void);

/* ==== >>schedule ===============================================================================
   The learning rate of a step is lr times this factor.                                          */

typedef enum dp_decay {
    DP_DECAY_NONE,
    DP_DECAY_LINEAR, /* from 1 to end_factor, which it has at step `total` and after */
    DP_DECAY_COSINE, /* the same along half a cosine */
    DP_DECAY_STEPS   /* times gamma after every so many steps */
} dp_decay;

typedef struct dp_schedule { /* zero: 1 */
    int64_t warmup;          /* steps in which it rises to 1 */
    double start_factor; /* of the first of them, as torch's LinearLR; 0: it rises evenly from 0 */
    dp_decay decay;      /* from then on */
    int64_t total;       /* steps, those of the warm-up included */
    double end_factor;
    int64_t every;
    double gamma;
    /* Yours, in place of all that; the first step is 0. */
    double (*factor)(int64_t step, void *user);
    void *user;
} dp_schedule;

DP_API double dp_schedule_factor(const dp_schedule *schedule, int64_t step);

/* ==== >>optim ==================================================================================
   An optimizer belongs to the module or wrapper that it is made for, and steps all its parameters
   on every owner: where several devices have parameters of their own, each steps its own, and
   nothing is sent. It is a dp_optim, for dp_train_step; by hand: dp_optim_step.                 */

typedef struct dp_param_group { /* a parameter belongs to the first group that it matches */
    const char *match;          /* a name; each * in it stands for any characters, or none */
    const double *lr_factor;    /* NULL: 1 */
    const double *decay_factor;
} dp_param_group;

typedef struct dp_clip { /* zero: nothing is clipped */
    double norm;         /* of all gradients together, at most */
    double p;            /* of the norm: 0 = 2; INFINITY: the largest */
    double value;        /* of each element, at most; not together with norm */
    /* Where the norm is no finite number: leave the step out, and count that. Without, it is an
       error that names the first such gradient, and parameters stay as they were. */
    bool skip_if_not_finite;
} dp_clip;

typedef struct dp_optim_config {
    const dp_rule *rule; /* NULL: dp_sgd(); yours has to last as long as the optimizer */
    dp_hyper hyper;
    const dp_param_group *groups;
    size_t group_count;
    dp_schedule schedule;
    int accumulate; /* gradients of so many dp_train_steps make one step; 0 = 1 */
    dp_clip clip;
} dp_optim_config;

/* Strings and arrays are copied. It ends with the context, or earlier. */
DP_MUST_USE DP_API dp_status dp_optim_create(dp_module *module, const dp_optim_config *config,
                                             dp_optim **out);
DP_API void dp_optim_destroy(dp_optim *optim); /* NULL is fine */

/* Clip, step, forget the gradients; whatever `accumulate` says. */
DP_MUST_USE DP_API dp_status dp_optim_step(dp_optim *optim);

/* Where a loop stands: `done` of its `total` dp_train_steps are done (-1: nobody knows how many
   there will be). The last of them makes a step too, from the gradients that are left over, and
   these are divided by their number. */
DP_MUST_USE DP_API dp_status dp_optim_progress(dp_optim *optim, int64_t done, int64_t total);

typedef struct dp_optim_info {
    const char *rule;
    int64_t done, total; /* see dp_optim_progress */
    int64_t step_count;  /* how often parameters have been stepped */
    int64_t skip_count;  /* and how often that was left out */
    double lr, momentum; /* of the next step, for parameters in no group; Adam: beta1 */
    bool has_norm;       /* the last step was clipped by its norm, which was */
    double grad_norm;
    size_t group_count; /* groups, and one for what is in none, which is the last */
    size_t state_bytes; /* on each device that has parameters */
} dp_optim_info;
DP_MUST_USE DP_API dp_status dp_optim_info_get(const dp_optim *optim, dp_optim_info *out);
DP_MUST_USE DP_API dp_status dp_optim_lr(const dp_optim *optim, size_t group, double *out);

/* All that has to be kept so that training can go on as if it had not stopped, as a dict on the
   host: counts, and the state of every parameter by its name. */
DP_MUST_USE DP_API dp_status dp_optim_save(dp_optim *optim, dp_scope *scope, dp_value *out);
/* Of an optimizer with the same rule, for a module with the same parameters; else an error names
   what differs, and nothing is changed. [host] */
DP_MUST_USE DP_API dp_status dp_optim_load(dp_optim *optim, dp_value saved);

/* ==== >>clipping ===============================================================================
   For loops of your own. The norm is that of all gradients of the module together, before they are
   clipped; several owners have the same.                                                        */

DP_MUST_USE DP_API dp_status dp_grad_norm(dp_module *module, double p, double *out); /* [host] */
/* As torch's clip_grad_norm_: all are multiplied by most / (norm + 1e-6), unless that is above 1.
   out_norm may be NULL. [host] */
DP_MUST_USE DP_API dp_status dp_clip_grad_norm(dp_module *module, double most, double p,
                                               double *out_norm);
DP_MUST_USE DP_API dp_status dp_clip_grad_value(dp_module *module, double most);

#ifdef __cplusplus
}
#endif
#endif /* DP_TRAIN_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_TRAIN_IMPLEMENTED)
#define DP_TRAIN_IMPLEMENTED

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ==== >>stepping ================================================================================
   Those of the library are kernels of the devices.                                              */

static dp_status dp__train_full(void)
{
    return dp_error(DP_ERR_NO_MEMORY, "no memory");
}

static double dp__train_or(double number, double usual)
{
    return number > 0 || number < 0 ? number : usual;
}

static dp_status dp__train_hyper_check(const dp_hyper *hyper)
{
    if (!(hyper->lr > 0) || !isfinite(hyper->lr))
        return dp_error(DP_ERR_INVALID, "lr is %g, which is no number above 0", hyper->lr);
    if (!(hyper->weight_decay >= 0) || !isfinite(hyper->weight_decay))
        return dp_error(DP_ERR_INVALID, "weight_decay is %g, which is no number from 0 on",
                        hyper->weight_decay);
    return DP_OK;
}

static dp_status dp__train_sgd_check(dp_hyper *hyper)
{
    if (!(hyper->momentum >= 0 && hyper->momentum < 1))
        return dp_error(DP_ERR_INVALID, "momentum is %g, which is not from 0 to 1",
                        hyper->momentum);
    if (!isfinite(hyper->dampening))
        return dp_error(DP_ERR_INVALID, "dampening is %g", hyper->dampening);
    if (hyper->nesterov && (!(hyper->momentum > 0) || hyper->dampening > 0 || hyper->dampening < 0))
        return dp_error(DP_ERR_INVALID, "nesterov wants a momentum, and no dampening");
    return DP_OK;
}

static int dp__train_sgd_states(const dp_hyper *hyper)
{
    return hyper->momentum > 0;
}

/* One of the update kernels of the contract, with so many states. */
static dp_status dp__train_rule_kernel(const dp_rule_args *args, dp_kernel kernel, int state_count,
                                       unsigned flags, const double *numbers, size_t number_count)
{
    void *out[1 + DP_RULE_STATES] = {args->param};
    const void *in[2] = {args->grad, args->gate};
    dp_kernel_args own = {.kernel = kernel,
                          .dtype = args->dtype,
                          .in_dtype = args->dtype,
                          .count = args->count,
                          .out = out,
                          .in = in,
                          .out_count = 1 + (size_t)state_count,
                          .in_count = args->gate != NULL ? 2 : 1,
                          .flags = flags | (args->hyper.maximize ? DP_KERNEL_MAXIMIZE : 0u)};
    for (int i = 0; i < state_count; i++)
        out[1 + i] = args->state[i];
    memcpy(own.numbers, numbers, number_count * sizeof *numbers);
    return dp_kernel_run(args->ctx, args->local_rank, &own);
}

static dp_status dp__train_sgd_step(const dp_rule_args *args)
{
    const dp_hyper *hyper = &args->hyper;
    const double numbers[] = {hyper->lr, hyper->weight_decay, hyper->momentum,
                              1 - hyper->dampening};
    unsigned flags = (hyper->nesterov ? DP_KERNEL_NESTEROV : 0u) |
                     (args->step == 1 && hyper->momentum > 0 ? DP_KERNEL_FIRST : 0u);
    return dp__train_rule_kernel(args, DP_KERNEL_SGD, dp__train_sgd_states(hyper), flags, numbers,
                                 4);
}

static dp_status dp__train_adam_check(dp_hyper *hyper)
{
    hyper->beta1 = dp__train_or(hyper->beta1, 0.9);
    hyper->beta2 = dp__train_or(hyper->beta2, 0.999);
    hyper->eps = dp__train_or(hyper->eps, 1e-8);
    if (!(hyper->beta1 > 0 && hyper->beta1 < 1 && hyper->beta2 > 0 && hyper->beta2 < 1))
        return dp_error(DP_ERR_INVALID, "betas are %g and %g, which are not both between 0 and 1",
                        hyper->beta1, hyper->beta2);
    if (!(hyper->eps > 0) || !isfinite(hyper->eps))
        return dp_error(DP_ERR_INVALID, "eps is %g, which is no number above 0", hyper->eps);
    return DP_OK;
}

static int dp__train_adam_states(const dp_hyper *hyper)
{
    (void)hyper;
    return 2;
}

static dp_status dp__train_adam_kernel(const dp_rule_args *args, double decay, unsigned flags)
{
    const dp_hyper *hyper = &args->hyper;
    double unbiased1 = 1 - pow(hyper->beta1, (double)args->step);
    double unbiased2 = 1 - pow(hyper->beta2, (double)args->step);
    const double numbers[] = {
        hyper->lr / unbiased1, decay,           1 - hyper->beta1, hyper->beta2,
        1 - hyper->beta2,      sqrt(unbiased2), hyper->eps};
    return dp__train_rule_kernel(args, DP_KERNEL_ADAMW, 2, flags, numbers, 7);
}

static dp_status dp__train_adam_step(const dp_rule_args *args)
{
    return dp__train_adam_kernel(args, args->hyper.weight_decay, DP_KERNEL_L2);
}

static dp_status dp__train_adamw_step(const dp_rule_args *args)
{
    return dp__train_adam_kernel(args, 1 - args->hyper.lr * args->hyper.weight_decay, 0);
}

DP_API const dp_rule *dp_sgd(void)
{
    static const dp_rule rule = {sizeof rule, "sgd", dp__train_sgd_check, dp__train_sgd_states,
                                 dp__train_sgd_step};
    return &rule;
}

DP_API const dp_rule *dp_adam(void)
{
    static const dp_rule rule = {sizeof rule, "adam", dp__train_adam_check, dp__train_adam_states,
                                 dp__train_adam_step};
    return &rule;
}

DP_API const dp_rule *dp_adamw(void)
{
    static const dp_rule rule = {sizeof rule, "adamw", dp__train_adam_check, dp__train_adam_states,
                                 dp__train_adamw_step};
    return &rule;
}

/* ==== >>factors =================================================================================
   Steps are counted from 0.                                                                     */

static double dp__train_warmup_factor(const dp_schedule *schedule, int64_t step)
{
    double start = schedule->start_factor, warmup = (double)schedule->warmup;
    double part = start > 0 ? (double)step / warmup : (double)(step + 1) / (warmup + 1);
    return start + (1 - start) * part;
}

/* How far the decay has come, from 0 to 1. */
static double dp__train_decay_part(const dp_schedule *schedule, int64_t step)
{
    double length = (double)(schedule->total - schedule->warmup);
    double part = length > 0 ? (double)(step - schedule->warmup) / length : 1;
    return part < 1 ? part : 1;
}

DP_API double dp_schedule_factor(const dp_schedule *schedule, int64_t step)
{
    const double pi = 3.14159265358979323846;
    if (schedule->factor != NULL)
        return schedule->factor(step, schedule->user);
    if (step < schedule->warmup)
        return dp__train_warmup_factor(schedule, step);
    double part = dp__train_decay_part(schedule, step), end = schedule->end_factor;
    switch (schedule->decay) {
    case DP_DECAY_LINEAR:
        return 1 + (end - 1) * part;
    case DP_DECAY_COSINE:
        return end + (1 - end) * (1 + cos(pi * part)) / 2;
    case DP_DECAY_STEPS:
        return pow(schedule->gamma, (double)((step - schedule->warmup) / schedule->every));
    case DP_DECAY_NONE:
        break;
    }
    return 1;
}

static dp_status dp__train_schedule_check(const dp_schedule *schedule)
{
    bool ends = schedule->decay == DP_DECAY_LINEAR || schedule->decay == DP_DECAY_COSINE;
    if ((unsigned)schedule->decay > DP_DECAY_STEPS)
        return dp_error(DP_ERR_INVALID, "schedule.decay is %d", (int)schedule->decay);
    if (schedule->warmup < 0 || !(schedule->start_factor >= 0 && schedule->start_factor <= 1))
        return dp_error(DP_ERR_INVALID, "schedule: warm-up of %lld steps from a factor of %g",
                        (long long)schedule->warmup, schedule->start_factor);
    if (ends && (schedule->total <= schedule->warmup || !(schedule->end_factor >= 0) ||
                 !isfinite(schedule->end_factor)))
        return dp_error(
            DP_ERR_INVALID, "schedule: to a factor of %g by step %lld, after %lld steps of warm-up",
            schedule->end_factor, (long long)schedule->total, (long long)schedule->warmup);
    if (schedule->decay == DP_DECAY_STEPS &&
        (schedule->every < 1 || !(schedule->gamma > 0) || !isfinite(schedule->gamma)))
        return dp_error(DP_ERR_INVALID, "schedule: times %g every %lld steps", schedule->gamma,
                        (long long)schedule->every);
    return DP_OK;
}

/* ==== >>views ==================================================================================
   All parameters that have a gradient, of every owner, asked for once: that is an edit, and owners
   that are edited equally stay equal.                                                           */

typedef struct dp__train_views {
    dp_module *module;
    dp_ctx *ctx;
    dp_scope *temp;
    size_t owner_count, count;
    size_t *params;         /* their numbers in the module */
    dp_tensor *data, *grad; /* owner after owner */
} dp__train_views;

static size_t dp__train_trained(dp_module *module, size_t *out_params)
{
    size_t count = 0;
    for (size_t i = 0; i < dp_module_param_count(module); i++) {
        dp_param_info info;
        if (dp_module_param(module, i, &info) != DP_OK || info.frozen || info.buffer)
            continue;
        if (out_params != NULL)
            out_params[count] = i;
        count++;
    }
    return count;
}

static dp_status dp__train_views_ask(dp__train_views *views)
{
    size_t all = views->owner_count * views->count;
    views->params = dp_scope_alloc(views->temp, views->count * sizeof *views->params);
    views->data = dp_scope_alloc(views->temp, all * sizeof *views->data);
    views->grad = dp_scope_alloc(views->temp, all * sizeof *views->grad);
    if (views->params == NULL || views->data == NULL || views->grad == NULL)
        return dp__train_full();
    (void)dp__train_trained(views->module, views->params);
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t i = 0; i < views->count; i++) {
            size_t at = owner * views->count + i;
            DP_TRY(dp_owner_edit(views->module, owner, views->params[i], &views->data[at],
                                 &views->grad[at]));
        }
    return DP_OK;
}

/* Ends with dp__train_views_end, whatever this returns. */
static dp_status dp__train_views_begin(dp_module *module, dp__train_views *out)
{
    *out = (dp__train_views){.module = module, .ctx = dp_module_ctx(module)};
    if (out->ctx == NULL)
        return dp_error(DP_ERR_INVALID, "this is no module");
    out->temp = dp_scope_begin(out->ctx);
    out->owner_count = dp_owner_count(module);
    out->count = dp__train_trained(module, NULL);
    return dp__train_views_ask(out);
}

static dp_status dp__train_views_end(const dp__train_views *views, dp_status status)
{
    dp_scope_end(views->temp);
    return status;
}

/* ==== >>norms ===================================================================================
   Norms are taken of the first owner's gradients: others have the same.                         */

/* STATS of each, read at once. Which parameter is not finite is known then. */
static dp_status dp__train_norm_of_squares(const dp__train_views *views, double *out,
                                           size_t *out_bad)
{
    const int64_t shape[] = {(int64_t)views->count, 2};
    dp_tensor sums;
    double *read = dp_scope_alloc(views->temp, 2 * views->count * sizeof *read), total = 0;
    if (read == NULL)
        return dp__train_full();
    DP_TRY(dp_tensor_new(views->temp, views->grad[0].device, DP_F64, 2, shape, &sums));
    for (size_t i = 0; i < views->count; i++) {
        void *own = (double *)sums.data + 2 * i;
        const void *grad = views->grad[i].data;
        DP_TRY(dp_kernel_run(views->ctx, views->grad[i].device.index,
                             &(dp_kernel_args){.kernel = DP_KERNEL_STATS,
                                               .dtype = (dp_dtype)views->grad[i].dtype,
                                               .count = (size_t)dp_tensor_count(&views->grad[i]),
                                               .out = &own,
                                               .in = &grad,
                                               .out_count = 1,
                                               .in_count = 1}));
    }
    DP_TRY(dp_read(views->ctx, &sums, read, 2 * views->count * sizeof *read));
    for (size_t i = views->count; i-- > 0;)
        *out_bad = read[2 * i + 1] > 0 ? i : *out_bad;
    for (size_t i = 0; i < views->count; i++)
        total += read[2 * i];
    *out = sqrt(total);
    return DP_OK;
}

/* Any other p, by the host: the sum of the pth powers, or the largest. */
static double dp__train_powers(const double *numbers, size_t count, double p, double so_far)
{
    for (size_t i = 0; i < count; i++) {
        double size = fabs(numbers[i]);
        if (!isinf(p))
            so_far += pow(size, p);
        else if (!isnan(so_far) && !(size <= so_far)) /* NaN stays */
            so_far = size;
    }
    return so_far;
}

static dp_status dp__train_norm_of_powers(const dp__train_views *views, double p, double *out,
                                          size_t *out_bad)
{
    double sum = 0;
    for (size_t i = 0; i < views->count; i++) {
        dp_tensor wide, grad = views->grad[i];
        size_t count = (size_t)dp_tensor_count(&grad);
        double *read = dp_scope_alloc(views->temp, count * sizeof *read);
        if (read == NULL)
            return dp__train_full();
        DP_TRY(dp_tensor_new(views->temp, grad.device, DP_F64, grad.ndim, grad.shape, &wide));
        DP_TRY(dp_cast(views->ctx, &wide, &grad));
        DP_TRY(dp_read(views->ctx, &wide, read, count * sizeof *read));
        sum = dp__train_powers(read, count, p, sum);
        if (!isfinite(sum) && *out_bad == views->count)
            *out_bad = i;
    }
    *out = isinf(p) ? sum : pow(sum, 1 / p);
    return DP_OK;
}

/* out_bad: the first that has a number which is not finite; views->count: none. */
static dp_status dp__train_norm(const dp__train_views *views, double p, double *out,
                                size_t *out_bad)
{
    *out = 0;
    *out_bad = views->count;
    if (views->count == 0)
        return DP_OK;
    return p < 2 || p > 2 ? dp__train_norm_of_powers(views, p, out, out_bad)
                          : dp__train_norm_of_squares(views, out, out_bad);
}

static dp_status dp__train_clip_check(double p, double most, const char *what)
{
    if (!(p > 0))
        return dp_error(DP_ERR_INVALID, "p is %g, which is not above 0", p);
    if (!(most > 0))
        return dp_error(DP_ERR_INVALID, "%s is %g, which is not above 0", what, most);
    return DP_OK;
}

static double dp__train_clip_factor(double most, double norm)
{
    double factor = most / (norm + 1e-6);
    return factor < 1 || isnan(factor) ? factor : 1;
}

/* Elements of a gradient, between the two limits; a chunk at a time, as long as the limits are. */
static dp_status dp__train_clamp(dp_ctx *ctx, const dp_tensor *grad, const dp_tensor *limits,
                                 size_t most)
{
    size_t count = (size_t)dp_tensor_count(grad), some = 0;
    size_t size = dp_dtype_bytes((dp_dtype)grad->dtype);
    for (size_t at = 0; at < count; at += some) {
        void *own = (char *)grad->data + at * size;
        some = count - at > most ? most : count - at;
        for (int k = 0; k < 2; k++) {
            const void *in[] = {own, limits[k].data};
            DP_TRY(dp_kernel_run(ctx, grad->device.index,
                                 &(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                                   .op = k == 0 ? DP_OP_MIN : DP_OP_MAX,
                                                   .dtype = (dp_dtype)grad->dtype,
                                                   .count = some,
                                                   .out = &own,
                                                   .in = in,
                                                   .out_count = 1,
                                                   .in_count = 2,
                                                   .alpha = 1,
                                                   .beta = 1}));
        }
    }
    return DP_OK;
}

static dp_status dp__train_clip_value(const dp__train_views *views, double most)
{
    enum { CHUNK = 1 << 16 };
    const int64_t shape = CHUNK;
    dp_tensor limits[2] = {{0}};
    for (size_t i = 0; i < views->owner_count * views->count; i++) {
        const dp_tensor *grad = &views->grad[i];
        if (i == 0 || limits[0].dtype != grad->dtype ||
            limits[0].device.index != grad->device.index)
            for (int k = 0; k < 2; k++) {
                DP_TRY(dp_tensor_new(views->temp, grad->device, (dp_dtype)grad->dtype, 1, &shape,
                                     &limits[k]));
                DP_TRY(dp_fill(views->ctx, &limits[k], dp_float(k == 0 ? most : -most)));
            }
        DP_TRY(dp__train_clamp(views->ctx, grad, limits, CHUNK));
    }
    return DP_OK;
}

/* A sentence of this header begins with the function that was called; others have theirs. */
static dp_status dp__train_named(const char *fn, dp_status status)
{
    if (status == DP_OK || strncmp(dp_last_error(), "dp_", 3) == 0)
        return status;
    return dp_error(status, "%s: %s", fn, dp_last_error());
}

DP_API dp_status dp_grad_norm(dp_module *module, double p, double *out)
{
    dp__train_views views;
    size_t bad = 0;
    double norm = 0;
    if (out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: out is NULL", __func__);
    DP_TRY(dp__train_named(__func__, dp__train_clip_check(p, 1, "most")));
    dp_status status = dp__train_views_begin(module, &views);
    if (status == DP_OK)
        status = dp__train_norm(&views, p, &norm, &bad);
    DP_TRY(dp__train_named(__func__, dp__train_views_end(&views, status)));
    *out = norm;
    return DP_OK;
}

static dp_status dp__train_scale_all(const dp__train_views *views, double factor)
{
    for (size_t i = 0; i < views->owner_count * views->count && (factor < 1 || isnan(factor)); i++)
        DP_TRY(dp_axpby(views->ctx, factor, &views->grad[i], 0, NULL, &views->grad[i]));
    return DP_OK;
}

DP_API dp_status dp_clip_grad_norm(dp_module *module, double most, double p, double *out_norm)
{
    dp__train_views views;
    size_t bad = 0;
    double norm = 0;
    DP_TRY(dp__train_named(__func__, dp__train_clip_check(p, most, "most")));
    dp_status status = dp__train_views_begin(module, &views);
    if (status == DP_OK)
        status = dp__train_norm(&views, p, &norm, &bad);
    if (status == DP_OK)
        status = dp__train_scale_all(&views, dp__train_clip_factor(most, norm));
    DP_TRY(dp__train_named(__func__, dp__train_views_end(&views, status)));
    if (out_norm != NULL)
        *out_norm = norm;
    return DP_OK;
}

DP_API dp_status dp_clip_grad_value(dp_module *module, double most)
{
    dp__train_views views;
    DP_TRY(dp__train_named(__func__, dp__train_clip_check(2, most, "most")));
    dp_status status = dp__train_views_begin(module, &views);
    if (status == DP_OK)
        status = dp__train_clip_value(&views, most);
    return dp__train_named(__func__, dp__train_views_end(&views, status));
}

/* ==== >>turns ===================================================================================
   State lies in a scope of the optimizer's, beside the parameters that it belongs to.           */

typedef struct dp__train_optim_param {
    const char *name;
    size_t group;
    dp_tensor *state; /* owner after owner */
} dp__train_optim_param;

typedef struct dp__train_optimizer {
    dp_optim base;
    dp_module *module;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_optim_config config; /* with arrays of its own */
    size_t owner_count, param_count, state_count;
    dp__train_optim_param *params;
    dp_tensor *gates; /* of each owner; where norms are clipped */
    int64_t done, total, steps, skipped;
    bool has_norm;
    double norm;
} dp__train_optimizer;
_Static_assert(offsetof(dp__train_optimizer, base) == 0, "a dp_optim is the head of its optimizer");

static dp__train_optimizer *dp__train_optimizer_of(dp_optim *optim)
{
    return (dp__train_optimizer *)optim;
}

/* Whether a name is of a pattern, in which * stands for any characters. */
static bool dp__train_matches(const char *pattern, const char *name)
{
    const char *star = NULL, *back = NULL;
    while (*name != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            back = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star != NULL) {
            pattern = star + 1;
            name = ++back;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

static size_t dp__train_group_of(const dp_optim_config *config, const char *name)
{
    size_t group = 0;
    while (group < config->group_count && !dp__train_matches(config->groups[group].match, name))
        group++;
    return group;
}

/* ---- which step it is ------------------------------------------------------------------------ */

/* How many train steps have their gradients in the step that comes next. */
static int64_t dp__train_gathered(const dp__train_optimizer *optim)
{
    int64_t every = optim->config.accumulate, rest = optim->total > 0 ? optim->total % every : 0;
    bool last = optim->total >= 0 && optim->done < optim->total &&
                optim->done >= optim->total - rest;
    return last ? rest : every;
}

static bool dp__train_is_due(const dp__train_optimizer *optim, int64_t done)
{
    return done % optim->config.accumulate == 0 || done == optim->total;
}

static dp_hyper dp__train_hyper_now(const dp__train_optimizer *optim, size_t group)
{
    const dp_optim_config *config = &optim->config;
    dp_hyper hyper = config->hyper;
    hyper.lr *= dp_schedule_factor(&config->schedule, optim->steps);
    if (group < config->group_count && config->groups[group].lr_factor != NULL)
        hyper.lr *= *config->groups[group].lr_factor;
    if (group < config->group_count && config->groups[group].decay_factor != NULL)
        hyper.weight_decay *= *config->groups[group].decay_factor;
    return hyper;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static dp_status dp__train_param_step(const dp__train_optimizer *optim,
                                      const dp__train_views *views, size_t owner, size_t i,
                                      const dp_tensor *gate)
{
    size_t at = owner * views->count + i;
    const dp_tensor *data = &views->data[at];
    dp_rule_args args = {.ctx = optim->ctx,
                         .local_rank = data->device.index,
                         .dtype = (dp_dtype)data->dtype,
                         .count = (size_t)dp_tensor_count(data),
                         .param = data->data,
                         .grad = views->grad[at].data,
                         .gate = gate != NULL ? gate->data : NULL,
                         .step = optim->steps + 1,
                         .hyper = dp__train_hyper_now(optim, optim->params[i].group)};
    for (size_t k = 0; k < optim->state_count; k++)
        args.state[k] = optim->params[i].state[owner * optim->state_count + k].data;
    return args.count > 0 ? optim->config.rule->step(&args) : DP_OK;
}

/* out_factor: what gradients are to be multiplied by; out_skips: this step is left out. */
static dp_status dp__train_optim_clip(dp__train_optimizer *optim, const dp__train_views *views,
                                      double *out_factor, bool *out_skips)
{
    const dp_clip *clip = &optim->config.clip;
    size_t bad = 0;
    *out_factor = 1;
    *out_skips = optim->has_norm = false;
    if (clip->value > 0)
        return dp__train_clip_value(views, clip->value);
    if (!(clip->norm > 0))
        return DP_OK;
    DP_TRY(dp__train_norm(views, clip->p, &optim->norm, &bad));
    optim->has_norm = true;
    *out_factor = dp__train_clip_factor(clip->norm, optim->norm);
    *out_skips = !isfinite(optim->norm);
    if (*out_skips && !clip->skip_if_not_finite)
        return dp_error(DP_ERR_STATE, "the norm of the gradients is %g%s%s", optim->norm,
                        bad < views->count ? ": not finite is that of " : "",
                        bad < views->count ? optim->params[bad].name : "");
    return DP_OK;
}

static dp_status dp__train_optim_steps(const dp__train_optimizer *optim,
                                       const dp__train_views *views, double factor)
{
    for (size_t owner = 0; owner < views->owner_count; owner++) {
        const dp_tensor *gate = factor < 1 ? &optim->gates[owner] : NULL;
        dp_tensor first;
        if (gate != NULL) {
            DP_TRY(dp_narrow(gate, 0, 0, 1, &first));
            DP_TRY(dp_fill(optim->ctx, &first, dp_float(factor)));
        }
        for (size_t i = 0; i < views->count; i++)
            DP_TRY(dp__train_param_step(optim, views, owner, i, gate));
    }
    return DP_OK;
}

static dp_status dp__train_optim_run(dp__train_optimizer *optim, const dp__train_views *views)
{
    double factor = 1;
    bool skips = false;
    if (views->count != optim->param_count || views->owner_count != optim->owner_count)
        return dp_error(DP_ERR_STATE, "'%s' has other parameters than when the optimizer was made",
                        dp_module_name(optim->module));
    DP_TRY(dp__train_optim_clip(optim, views, &factor, &skips));
    if (!skips)
        DP_TRY(dp__train_optim_steps(optim, views, factor));
    optim->steps += !skips;
    optim->skipped += skips;
    return DP_OK;
}

static dp_status dp__train_optim_apply(dp__train_optimizer *optim)
{
    dp__train_views views;
    dp_status status = dp__train_views_begin(optim->module, &views);
    if (status == DP_OK)
        status = dp__train_optim_run(optim, &views);
    DP_TRY(dp__train_views_end(&views, status));
    return dp_zero_grad(optim->module);
}

/* ---- for dp_train_step ----------------------------------------------------------------------- */

static dp_status dp__train_optim_begin(dp_optim *base, dp_module *module, dp_pass_config *pass)
{
    const dp__train_optimizer *optim = dp__train_optimizer_of(base);
    if (module != optim->module)
        return dp_error(DP_ERR_INVALID, "the optimizer was made for '%s', not for '%s'",
                        dp_module_name(optim->module), dp_module_name(module));
    pass->no_sync = !dp__train_is_due(optim, optim->done + 1);
    return DP_OK;
}

static dp_status dp__train_optim_loss_factor(dp_optim *base, double *out)
{
    *out = 1 / (double)dp__train_gathered(dp__train_optimizer_of(base));
    return DP_OK;
}

static dp_status dp__train_optim_update(dp_optim *base, dp_module *module)
{
    dp__train_optimizer *optim = dp__train_optimizer_of(base);
    (void)module; /* begin has seen it */
    optim->done++;
    return dp__train_is_due(optim, optim->done) ? dp__train_optim_apply(optim) : DP_OK;
}

static const dp_optim_ops dp__train_ops = {.size = sizeof(dp_optim_ops),
                                           .begin = dp__train_optim_begin,
                                           .loss_factor = dp__train_optim_loss_factor,
                                           .update = dp__train_optim_update};

/* ==== >>making ==================================================================================
   Everything that an optimizer has is in a scope of its own.                                    */

static dp_status dp__train_groups_copy(dp_scope *scope, dp_optim_config *config)
{
    dp_param_group *own = dp_scope_alloc(scope, config->group_count * sizeof *own);
    if (own == NULL)
        return dp__train_full();
    for (size_t i = 0; i < config->group_count; i++) {
        const dp_param_group *group = &config->groups[i];
        double *factors = dp_scope_alloc(scope, 2 * sizeof *factors);
        const char *match = group->match != NULL ? dp_text(dp_string(scope, group->match)) : NULL;
        if (group->match == NULL)
            return dp_error(DP_ERR_INVALID, "groups[%zu].match is NULL", i);
        if (match == NULL || factors == NULL)
            return dp__train_full();
        factors[0] = group->lr_factor != NULL ? *group->lr_factor : 1;
        factors[1] = group->decay_factor != NULL ? *group->decay_factor : 1;
        if (!(factors[0] >= 0 && factors[1] >= 0) || !isfinite(factors[0] + factors[1]))
            return dp_error(DP_ERR_INVALID, "groups[%zu] ('%s'): factors are %g and %g", i, match,
                            factors[0], factors[1]);
        own[i] = (dp_param_group){match, &factors[0], &factors[1]};
    }
    config->groups = own;
    return DP_OK;
}

/* Defaults are put in. */
static dp_status dp__train_optim_check(dp_optim_config *config)
{
    dp_clip *clip = &config->clip;
    config->rule = config->rule != NULL ? config->rule : dp_sgd();
    config->accumulate = config->accumulate == 0 ? 1 : config->accumulate;
    clip->p = dp__train_or(clip->p, 2);
    if (config->rule->size < sizeof *config->rule || config->rule->step == NULL)
        return dp_error(DP_ERR_INVALID, "rule has no step");
    if (config->accumulate < 0)
        return dp_error(DP_ERR_INVALID, "accumulate is %d", config->accumulate);
    if (config->group_count > 0 && config->groups == NULL)
        return dp_error(DP_ERR_INVALID, "groups is NULL");
    if (!(clip->norm >= 0 && clip->value >= 0) || (clip->norm > 0 && clip->value > 0))
        return dp_error(DP_ERR_INVALID, "clip.norm is %g and clip.value %g: one of them, above 0",
                        clip->norm, clip->value);
    DP_TRY(dp__train_clip_check(clip->p, 1, "norm"));
    DP_TRY(dp__train_hyper_check(&config->hyper));
    DP_TRY(dp__train_schedule_check(&config->schedule));
    return config->rule->check != NULL ? config->rule->check(&config->hyper) : DP_OK;
}

/* Zeros, of the parameter's shape. */
static dp_status dp__train_state_make(const dp__train_optimizer *optim, const dp_tensor *data,
                                      dp_tensor *out)
{
    dp_dtype dtype = data->dtype == DP_F64 ? DP_F64 : DP_F32;
    DP_TRY(dp_tensor_new(optim->scope, data->device, dtype, data->ndim, data->shape, out));
    return dp_fill(optim->ctx, out, dp_float(0));
}

static dp_status dp__train_optim_param_make(dp__train_optimizer *optim,
                                            const dp__train_views *views, size_t i)
{
    dp__train_optim_param *param = &optim->params[i];
    dp_param_info info;
    DP_TRY(dp_module_param(optim->module, views->params[i], &info));
    if (info.data.dtype > DP_BF16)
        return dp_error(DP_ERR_INVALID, "parameter '%s' is %s, which is no floating dtype",
                        info.name, dp_dtype_name((dp_dtype)info.data.dtype));
    param->name = dp_text(dp_string(optim->scope, info.name));
    param->state = dp_scope_alloc(optim->scope,
                                  views->owner_count * optim->state_count * sizeof *param->state);
    if (param->name == NULL || param->state == NULL)
        return dp__train_full();
    param->group = dp__train_group_of(&optim->config, param->name);
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t k = 0; k < optim->state_count; k++)
            DP_TRY(dp__train_state_make(optim, &views->data[owner * views->count + i],
                                        &param->state[owner * optim->state_count + k]));
    return DP_OK;
}

static dp_status dp__train_gates_make(dp__train_optimizer *optim, const dp__train_views *views)
{
    const int64_t two = 2;
    optim->gates = dp_scope_alloc(optim->scope, views->owner_count * sizeof *optim->gates);
    if (optim->gates == NULL)
        return dp__train_full();
    for (size_t owner = 0; owner < views->owner_count && views->count > 0; owner++) {
        dp_tensor *gate = &optim->gates[owner];
        DP_TRY(dp_tensor_new(optim->scope, views->data[owner * views->count].device, DP_F64, 1,
                             &two, gate));
        DP_TRY(dp_fill(optim->ctx, gate, dp_float(0)));
    }
    return DP_OK;
}

static dp_status dp__train_optim_fill(dp__train_optimizer *optim, const dp__train_views *views)
{
    const dp_rule *rule = optim->config.rule;
    int states = rule->state_count != NULL ? rule->state_count(&optim->config.hyper) : 0;
    if (states < 0 || states > DP_RULE_STATES)
        return dp_error(DP_ERR_INVALID, "rule '%s' wants %d states, at most %d",
                        rule->name != NULL ? rule->name : "", states, DP_RULE_STATES);
    optim->state_count = (size_t)states;
    optim->param_count = views->count;
    optim->owner_count = views->owner_count;
    optim->params = dp_scope_alloc(optim->scope, views->count * sizeof *optim->params);
    if (optim->params == NULL)
        return dp__train_full();
    for (size_t i = 0; i < views->count; i++)
        DP_TRY(dp__train_optim_param_make(optim, views, i));
    return dp__train_gates_make(optim, views);
}

static dp_status dp__train_optim_make(dp_module *module, const dp_optim_config *config,
                                      dp_scope *scope, dp__train_optimizer **out)
{
    dp__train_views views;
    dp__train_optimizer *optim = dp_scope_alloc(scope, sizeof *optim);
    if (optim == NULL)
        return dp__train_full();
    *optim = (dp__train_optimizer){.base = {&dp__train_ops},
                                   .module = module,
                                   .ctx = dp_module_ctx(module),
                                   .scope = scope,
                                   .config = *config,
                                   .total = -1};
    DP_TRY(dp__train_optim_check(&optim->config));
    DP_TRY(dp__train_groups_copy(scope, &optim->config));
    dp_status status = dp__train_views_begin(module, &views);
    if (status == DP_OK)
        status = dp__train_optim_fill(optim, &views);
    *out = optim;
    return dp__train_views_end(&views, status);
}

DP_API dp_status dp_optim_create(dp_module *module, const dp_optim_config *config, dp_optim **out)
{
    dp__train_optimizer *optim = NULL;
    if (config == NULL || out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", __func__,
                        config == NULL ? "config" : "out");
    if (dp_module_ctx(module) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: this is no module", __func__);
    dp_scope *scope = dp_scope_begin(dp_module_ctx(module));
    dp_status status = dp__train_optim_make(module, config, scope, &optim);
    if (status == DP_OK)
        *out = &optim->base;
    else
        dp_scope_end(scope);
    return dp__train_named(__func__, status);
}

DP_API void dp_optim_destroy(dp_optim *optim)
{
    if (optim != NULL)
        dp_scope_end(dp__train_optimizer_of(optim)->scope);
}

/* ==== >>keeping =================================================================================
   What is asked for, and what goes into checkpoints and comes out of them.                       */

static dp_status dp__train_optim_valid(const char *fn, const dp_optim *optim)
{
    if (optim == NULL || optim->ops != &dp__train_ops)
        return dp_error(DP_ERR_INVALID, "%s: this is no optimizer by dp_optim_create", fn);
    return DP_OK;
}

DP_API dp_status dp_optim_step(dp_optim *optim)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    return dp__train_named(__func__, dp__train_optim_apply(dp__train_optimizer_of(optim)));
}

DP_API dp_status dp_optim_progress(dp_optim *optim, int64_t done, int64_t total)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    if (done < 0 || total < -1 || (total >= 0 && done > total))
        return dp_error(DP_ERR_INVALID, "%s: %lld of %lld are done", __func__, (long long)done,
                        (long long)total);
    dp__train_optimizer_of(optim)->done = done;
    dp__train_optimizer_of(optim)->total = total;
    return DP_OK;
}

static size_t dp__train_state_bytes(const dp__train_optimizer *optim)
{
    size_t bytes = 0;
    for (size_t i = 0; i < optim->param_count; i++)
        for (size_t k = 0; k < optim->state_count; k++) {
            const dp_tensor *state = &optim->params[i].state[k];
            bytes += (size_t)dp_tensor_count(state) * dp_dtype_bytes((dp_dtype)state->dtype);
        }
    return bytes;
}

DP_API dp_status dp_optim_info_get(const dp_optim *base, dp_optim_info *out)
{
    DP_TRY(dp__train_optim_valid(__func__, base));
    if (out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: out is NULL", __func__);
    const dp__train_optimizer *optim = (const dp__train_optimizer *)base;
    dp_hyper hyper = dp__train_hyper_now(optim, optim->config.group_count);
    *out = (dp_optim_info){.rule = optim->config.rule->name,
                           .done = optim->done,
                           .total = optim->total,
                           .step_count = optim->steps,
                           .skip_count = optim->skipped,
                           .lr = hyper.lr,
                           .momentum = hyper.momentum > 0 ? hyper.momentum : hyper.beta1,
                           .has_norm = optim->has_norm,
                           .grad_norm = optim->has_norm ? optim->norm : 0,
                           .group_count = optim->config.group_count + 1,
                           .state_bytes = dp__train_state_bytes(optim)};
    return DP_OK;
}

DP_API dp_status dp_optim_lr(const dp_optim *base, size_t group, double *out)
{
    DP_TRY(dp__train_optim_valid(__func__, base));
    const dp__train_optimizer *optim = (const dp__train_optimizer *)base;
    if (out == NULL || group > optim->config.group_count)
        return dp_error(DP_ERR_INVALID, "%s: group %zu of %zu, or out is NULL", __func__, group,
                        optim->config.group_count + 1);
    *out = dp__train_hyper_now(optim, group).lr;
    return DP_OK;
}

/* ---- kept and brought back ------------------------------------------------------------------- */

static dp_status dp__train_state_save(const dp__train_optimizer *optim, dp_scope *scope, size_t i,
                                      dp_pair *out)
{
    dp_value items[DP_RULE_STATES];
    for (size_t k = 0; k < optim->state_count; k++) {
        const dp_tensor *state = &optim->params[i].state[k];
        dp_tensor own;
        DP_TRY(dp_tensor_new(scope, (dp_device){0, 0}, (dp_dtype)state->dtype, state->ndim,
                             state->shape, &own));
        DP_TRY(dp_copy(optim->ctx, &own, state, NULL));
        items[k] = dp_of(scope, &own);
    }
    *out =
        (dp_pair){optim->params[i].name, dp_list_make(scope, DP_LIST, items, optim->state_count)};
    return DP_OK;
}

static dp_status dp__train_optim_save(const dp__train_optimizer *optim, dp_scope *scope,
                                      dp_value *out)
{
    dp_pair *pairs = dp_scope_alloc(scope, optim->param_count * sizeof *pairs);
    if (pairs == NULL)
        return dp__train_full();
    for (size_t i = 0; i < optim->param_count; i++)
        DP_TRY(dp__train_state_save(optim, scope, i, &pairs[i]));
    const dp_pair all[] = {{"rule", dp_string(scope, optim->config.rule->name)},
                           {"done", dp_int(optim->done)},
                           {"steps", dp_int(optim->steps)},
                           {"skipped", dp_int(optim->skipped)},
                           {"state", dp_dict_make(scope, pairs, optim->param_count)}};
    dp_value made = dp_dict_make(scope, all, sizeof all / sizeof all[0]);
    if (made.kind == DP_ERROR)
        return dp_error((dp_status)made.status, "%s", made.as.s);
    *out = made;
    return DP_OK;
}

DP_API dp_status dp_optim_save(dp_optim *optim, dp_scope *scope, dp_value *out)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    if (scope == NULL || out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", __func__,
                        scope == NULL ? "scope" : "out");
    return dp__train_named(__func__,
                           dp__train_optim_save(dp__train_optimizer_of(optim), scope, out));
}

static dp_status dp__train_state_check(const dp__train_optimizer *optim, size_t i, dp_value saved)
{
    const dp__train_optim_param *param = &optim->params[i];
    if (dp_count(saved) != optim->state_count)
        return dp_error(DP_ERR_MISMATCH, "'%s' has %zu tensors of state, %zu were saved",
                        param->name, optim->state_count, dp_count(saved));
    for (size_t k = 0; k < optim->state_count; k++) {
        const dp_tensor *from, *to = &param->state[k];
        DP_TRY(dp_as_tensor(dp_at(saved, k), param->name, (dp_dtype)to->dtype, to->ndim, &from));
        for (int d = 0; d < to->ndim; d++)
            if (from->shape[d] != to->shape[d])
                return dp_error(DP_ERR_MISMATCH, "dim %d of the state of '%s' is %lld, saved %lld",
                                d, param->name, (long long)to->shape[d], (long long)from->shape[d]);
    }
    return DP_OK;
}

static dp_status dp__train_saved_check(const dp__train_optimizer *optim, dp_value saved)
{
    const char *rule = dp_text(dp_get(saved, "rule"));
    dp_value state = dp_get(saved, "state");
    if (rule == NULL || strcmp(rule, optim->config.rule->name) != 0)
        return dp_error(DP_ERR_MISMATCH, "the rule is '%s', saved '%s'", optim->config.rule->name,
                        rule != NULL ? rule : "");
    for (int k = 0; k < 3; k++) {
        static const char *const counts[] = {"done", "steps", "skipped"};
        dp_value count = dp_get(saved, counts[k]);
        if (count.kind != DP_INT || count.as.i < 0)
            return dp_error(DP_ERR_MISMATCH, "'%s' is missing, or no count", counts[k]);
    }
    for (size_t i = 0; i < optim->param_count; i++)
        DP_TRY(dp__train_state_check(optim, i, dp_get(state, optim->params[i].name)));
    if (dp_count(state) != optim->param_count)
        return dp_error(DP_ERR_MISMATCH, "%zu parameters, saved %zu", optim->param_count,
                        dp_count(state));
    return DP_OK;
}

static dp_status dp__train_state_load(const dp__train_optimizer *optim, size_t i, dp_value saved)
{
    for (size_t k = 0; k < optim->owner_count * optim->state_count; k++) {
        const dp_tensor *from;
        DP_TRY(
            dp_as_tensor(dp_at(saved, k % optim->state_count), "state", DP_DTYPE_ANY, -1, &from));
        DP_TRY(dp_copy(optim->ctx, &optim->params[i].state[k], from, NULL));
    }
    return DP_OK;
}

DP_API dp_status dp_optim_load(dp_optim *base, dp_value saved)
{
    DP_TRY(dp__train_optim_valid(__func__, base));
    dp__train_optimizer *optim = dp__train_optimizer_of(base);
    DP_TRY(dp__train_named(__func__, dp__train_saved_check(optim, saved)));
    for (size_t i = 0; i < optim->param_count; i++)
        DP_TRY(
            dp__train_state_load(optim, i, dp_get(dp_get(saved, "state"), optim->params[i].name)));
    optim->done = dp_get(saved, "done").as.i;
    optim->steps = dp_get(saved, "steps").as.i;
    optim->skipped = dp_get(saved, "skipped").as.i;
    return dp_wait(optim->ctx); /* what was saved may go */
}
#endif /* DP_IMPLEMENTATION && !DP_TRAIN_IMPLEMENTED */
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
