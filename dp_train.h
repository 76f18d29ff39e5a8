/* dp_train.h - v0.2.0 - what stands around the wrappers of dp.h in a training program - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h, and on its system
   (dp/os.h) for lines and signals, so it works with every device and any number of processes.

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
     >>optim      the optimizer that dp_train_step takes; scaled losses, state on several ranks
     >>clipping   gradients that are not too large
     >>several    optimizers with names: a generator's, a discriminator's
     >>logging    what dp_train_step has logged, of all processes
     >>progress   a line that says how far training is
     >>stopping   all processes end after the same step
   and of the implementation
     >>stepping   rules as kernels
     >>factors    of the learning rate
     >>views      all parameters and gradients of a module
     >>norms      of gradients
     >>clips      what follows from them
     >>shares     what an optimizer keeps, and what of it each rank has
     >>turns      which gradients make a step, and what is done with them
     >>applying   all of a step
     >>groups     of parameters, by their names
     >>making     an optimizer and its state
     >>asking     what a loop asks and tells
     >>keeping    what is saved and loaded
     >>naming     of several
     >>means      of logs
     >>line       on the terminal
     >>ending     signals, a clock
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_TRAIN_H) && defined(DP_H)
#define DP_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>rules ==================================================================================
   A rule steps elements on one device: several parameters that are neighbours in memory, or a part
   of one. It keeps nothing: their state is given to it, and is zero at first.                   */

/* 0 means torch.optim's default (weight_decay: none; lr has none and is required; dp_schedule says
   its own), and DP_ZERO a real 0, here and in the structs below. To set a number that the rule does
   not use is an error. */
typedef struct dp_hyper {
    double lr; /* above 0, or DP_ZERO */
    double weight_decay;
    double momentum, dampening; /* SGD */
    bool nesterov;
    double beta1, beta2, eps; /* Adam, AdamW: 0.9, 0.999, 1e-8 */
    bool maximize;
} dp_hyper;

enum { DP_RULE_STATES = 4, DP_RULE_STEPS = 64 /* at most at a time */ };

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
    dp_hyper hyper;     /* lr and weight_decay of now, and of these parameters */
    const char *name;   /* these three are for rules that want parameters whole */
    int ndim;
    bool zero_grad; /* the rules below make grad 0, too; others are never asked to */
    const int64_t *shape;
} dp_rule_args;

typedef struct dp_rule {
    dp_table_head head; /* DP_TABLE(dp_rule) */
    const char *name;   /* which the state is saved with */
    /* Whether the numbers make sense, with defaults put in: see dp_or (NULL: they do). */
    dp_status (*check)(dp_hyper *hyper);
    int (*state_count)(const dp_hyper *hyper); /* NULL: none */
    dp_status (*step)(const dp_rule_args *args);
    bool whole; /* one parameter at a time, all of it: for rules in which elements meet (LARS,
                   LAMB, Muon) */
    /* The same for several (NULL: one after another). They are on one device, apart from each
       other, and have the same dtype, gate, step and hyper. */
    dp_status (*steps)(const dp_rule_args *args, size_t count);
} dp_rule;

DP_API const dp_rule *dp_sgd(void);
DP_API const dp_rule *dp_adam(void); /* weight decay is part of the gradient */
DP_API const dp_rule *dp_adamw(void);

/* ==== >>schedule ===============================================================================
   The learning rate of a step is lr times this factor. Steps are those of the optimizer, from 0 on:
   with `accumulate` 4 a loop of 4,000 dp_train_steps has 1,000. One that was left out (skip_count)
   is not counted.                                                                               */

typedef enum dp_decay {
    DP_DECAY_NONE,
    DP_DECAY_LINEAR, /* from 1 to end_factor, which it has at step `total` and after */
    DP_DECAY_COSINE, /* the same along half a cosine */
    DP_DECAY_STEPS   /* times gamma after every so many steps (StepLR), or at each of the milestones
                        (MultiStepLR) */
} dp_decay;

typedef struct dp_schedule { /* zero: 1 */
    int64_t warmup;          /* steps in which it rises to 1. Step s of them has the factor
                                start_factor + (1 - start_factor) * s / warmup, as LinearLR */
    double start_factor;     /* 0: step s has (s + 1) / (warmup + 1) instead; DP_ZERO: s / warmup */
    dp_decay decay;          /* from then on */
    int64_t total;           /* steps, those of the warm-up included */
    double end_factor;
    int64_t every;             /* counted from the end of the warm-up */
    const int64_t *milestones; /* or these, as `total` counted from step 0; they do not fall */
    size_t milestone_count;
    double gamma;
    /* Yours, in place of all that; the first step is 0. */
    double (*factor)(int64_t step, void *user);
    void *user;
} dp_schedule;

DP_API double dp_schedule_factor(const dp_schedule *schedule, int64_t step);

/* ==== >>optim ==================================================================================
   An optimizer belongs to the module or wrapper that it is made for, and steps all its parameters
   on every owner: if several devices have parameters of their own, each steps its own, and nothing
   is sent. It is a dp_optim, for dp_train_step; by hand, call dp_optim_step.

   As in torch.optim, a parameter without a gradient is not stepped: no weight decay, no momentum,
   no count. dp_grads_used tells which have one. All ranks step the same parameters.            */

typedef struct dp_param_group { /* a parameter belongs to the first group that it matches */
    const char *match;          /* a name; each * in it stands for any characters, or none. To match
                                   nothing, or nothing that is left by groups before, is an error */
    const double *lr_factor;    /* NULL: 1 */
    const double *decay_factor;
} dp_param_group;

typedef struct dp_clip { /* zero: nothing is clipped */
    double norm;         /* of all gradients together, at most */
    double p;            /* of the norm: 0 = 2; INFINITY: the largest */
    double value;        /* of each element, at most; not together with norm */
    /* Where the norm is no finite number: leave the step out, and count that. Without, where there
       is `norm`, it is an error (STATE) that names the first such gradient, and parameters stay as
       they were, on all ranks. So do gradients: dp_zero_grad comes before the next step. */
    bool skip_if_not_finite;
} dp_clip;

/* Small gradients vanish in f16. So losses are multiplied by a scale, and gradients divided by it
   when they make a step, which is left out where not all are finite then, or where their norm is
   more than f32 holds. */
typedef struct dp_loss_scale { /* zero: none */
    bool dynamic; /* it falls when a step is left out, and grows after so many steps that were not,
                     as torch's GradScaler does */
    double scale; /* always, or at first; dynamic: 0 = 65536 */
    double growth, backoff; /* 0 = 2, 0.5 */
    int64_t interval;       /* 0 = 2000 */
} dp_loss_scale;

typedef struct dp_optim_config {
    const dp_rule *rule; /* NULL: dp_sgd(); yours has to last as long as the optimizer */
    dp_hyper hyper;
    const dp_param_group *groups;
    size_t group_count;
    dp_schedule schedule;
    /* Gradients of so many dp_train_steps make one step, by their mean: over steps, or with
       DP_MEAN_SAMPLES over the samples (or tokens) of all of them; 0 = 1. A dp_train_step that
       fails does not count. If its backward has failed, the gradients of those before are lost with
       its own: after dp_zero_grad the step is made from those that follow, and a mean over steps is
       divided as if none was missing.
       With several processes, one that is not the last of a step fails on its rank alone, and the
       others go on. Repeat it on that rank, with the same data or dp_none(); other data is refused
       (STATE), as the ranks would come apart. */
    int accumulate;
    dp_clip clip;
    dp_loss_scale scale;
    dp_dtype compute_dtype; /* that methods are asked to compute in (call->compute_dtype), as by
                               torch's autocast; DP_F32: the parameters' own */
    /* f16 and bf16 parameters are stepped in f32, by copies that are kept with the state. They
       begin as the parameters are: who writes to these later makes another optimizer, or loads
       one. */
    bool masters;
    /* State is spread over the ranks of the job: each keeps that of its part of the parameters,
       gets the gradients of that part alone, steps it, and receives the other parts. Parameters
       that lie together are cut if each part has at least 256 elements; all ranks keep and step
       the others.
       With share_params, each machine receives only other machines' parts, once, and process 0
       alone keeps and steps the others.
       (To create one calls dp_grads_scatter_set with true, if all ranks can; one without this, with
       false.) The same numbers come out, bit by bit, where ranks are added up in one order (by NCCL
       they are not); but a norm is added up by ranks, which may change its last bits. The module is
       one by dp_distributed, or by dp_separate_distributed, whose children have to be stepped
       together then; and between a forward and the step nobody else writes to parameters. All
       processes make the calls that create, step, save and load. */
    bool sharded;
    bool mirrored; /* with sharded: each share has a copy in another process. See dp_mirror.h */
} dp_optim_config;

/* Strings and arrays are copied. It ends with the context; or earlier, and before its module. Where
   one is made after a sharded one, all processes have to make it: they all scatter gradients, or
   none does. */
DP_MUST_USE DP_API dp_status dp_optim_create(dp_module *module, const dp_optim_config *config,
                                             dp_optim **out);
/* NULL is fine. Gradients that were scattered for it still are: dp_grads_scatter_set with false
   ends that. */
DP_API void dp_optim_destroy(dp_optim *optim);

/* Clip, step, forget the gradients; whatever `accumulate` says. One that fails while it steps has
   stepped some parameters, and their gradients may be 0. */
DP_MUST_USE DP_API dp_status dp_optim_step(dp_optim *optim);

/* Divide gradients by the loss scale now, to look at them or clip them by hand: at most once before
   each step, which else does it itself. UNSUPPORTED if one is in f16, where small numbers would
   vanish: a step divides in f32. Until that step, loss_factor leaves the scale out. [host] */
DP_MUST_USE DP_API dp_status dp_optim_unscale(dp_optim *optim);

/* Where a loop stands: `done` of its `total` dp_train_steps are done (-1: nobody knows how many
   there will be). The last of them makes a step too, from the gradients that are left over, and
   these are divided by their number. A loop that begins between two steps lacks the gradients that
   were there before it; its first step is made without them, and divided as usual. */
DP_MUST_USE DP_API dp_status dp_optim_progress(dp_optim *optim, int64_t done, int64_t total);

typedef struct dp_optim_info {
    const char *rule;
    int64_t done, total; /* see dp_optim_progress */
    int64_t step_count;  /* how often parameters have been stepped */
    int64_t skip_count;  /* and how often that was left out */
    double lr, momentum; /* of the next step, for parameters in no group; Adam: beta1 */
    bool has_norm;       /* the last step was clipped by its norm, which was */
    double grad_norm;
    double scale;       /* of losses; 1 where they have none */
    double loss_factor; /* what dp_train_step gives to dp_backward next, and a loop of yours too */
    size_t group_count; /* groups, and one for what is in none, which is the last */
    size_t state_bytes; /* on each device that has parameters */
} dp_optim_info;
DP_MUST_USE DP_API dp_status dp_optim_info_get(const dp_optim *optim, dp_optim_info *out);
DP_MUST_USE DP_API dp_status dp_optim_lr(const dp_optim *optim, size_t group, double *out);

/* All that has to be kept so that training can go on as if it had not stopped, as a dict on the
   host: counts, and the state of every parameter by its name. Gradients that wait for a step are
   not in it: where several make one, save after a step. */
DP_MUST_USE DP_API dp_status dp_optim_save(dp_optim *optim, dp_scope *scope, dp_value *out);
/* The same, but state that is not spread over ranks is a view, as dp_module_save gives parameters:
   write it before the next step, which changes it. */
DP_MUST_USE DP_API dp_status dp_optim_view(dp_optim *optim, dp_scope *scope, dp_value *out);
/* Of an optimizer with the same rule, for a module with the same parameters; else an error names
   what differs, and nothing is changed. What was saved replaces the state of parameters, the counts
   of dp_optim_info (done, step_count, skip_count), and a dynamic scale. All that the config says
   stays as it is here, unlike in torch: hyper, groups, schedule, accumulate, clip, a fixed scale;
   so does `total`. What dp_optim_view has given of this optimizer is not loaded under other names.
   [host] */
DP_MUST_USE DP_API dp_status dp_optim_load(dp_optim *optim, dp_value saved);

/* ==== >>clipping ===============================================================================
   For your own loops. The norm is that of all gradients of the module together, before clipping,
   and equal for all owners. If ranks reduce only some gradients, the others count once for each
   process. Then all processes make the call, and the norm is that of the job.                  */

DP_MUST_USE DP_API dp_status dp_grad_norm(dp_module *module, double p, double *out); /* [host] */
/* As torch's clip_grad_norm_: all are multiplied by most / (norm + 1e-6), unless that is above 1.
   out_norm may be NULL. [host] */
DP_MUST_USE DP_API dp_status dp_clip_grad_norm(dp_module *module, double most, double p,
                                               double *out_norm);
DP_MUST_USE DP_API dp_status dp_clip_grad_value(dp_module *module, double most);

/* ==== >>several ================================================================================
   Where parts of a model have optimizers of their own, as those of a GAN (>>wrappers in dp.h), each
   is stepped by itself. What is done to all of them takes their names: "gen", "dis". One that
   is alone may have none, and then stands for itself.                                           */

typedef struct dp_named_optim {
    const char *name;
    dp_optim *optim;
} dp_named_optim;

/* What dp_optim_save gives for each: a dict by name. */
DP_MUST_USE DP_API dp_status dp_optims_save(const dp_named_optim *optims, size_t count,
                                            dp_scope *scope, dp_value *out);
/* All of them; or, where one does not fit, none. [host] */
DP_MUST_USE DP_API dp_status dp_optims_load(const dp_named_optim *optims, size_t count,
                                            dp_value saved);
/* For a log: a dict of "gen.lr" and "gen.momentum", those of dp_optim_info, and of "gen.grad_norm"
   if it has one; then "dis.lr" and so on. */
DP_MUST_USE DP_API dp_status dp_optims_log(const dp_named_optim *optims, size_t count,
                                           dp_scope *scope, dp_value *out);

/* ==== >>logging ================================================================================
   The log of dp_train_step has the numbers of this process. Its tensors become numbers only when
   they are read, so that a step does not wait.                                                 */

/* The mean over all processes of each entry of a log, or another dict of numbers and tensors of one
   element, as floats. Processes are weighted by `samples`, which are tokens where these are the
   weights of the step (dp.h, TOKENS); if all are 0, means are NaN.
   All processes call it, with the same keys; one without a batch gives and gets dp_none().
   [host] */
DP_MUST_USE DP_API dp_status dp_log_mean(dp_ctx *ctx, dp_scope *scope, dp_value log,
                                         int64_t samples, dp_value *out);

/* ==== >>progress ===============================================================================
   A line on the terminal, again and again:

       epoch 2/10  step 120/938  loss 0.4312  12345 samples/s  1:41 left

   Only process 0 shows it, and only where stderr is a terminal. $DP_PROGRESS: "on" writes lines
   where it is none; "off" shows nothing.                                                        */

typedef struct dp_progress {
    int64_t epoch_count; /* 0: nobody knows */
    int64_t step_count;  /* of an epoch; 0: nobody knows */
    double every_s;      /* it is shown at most that often, as to look at a loss means to wait for
                            it; 0 = 0.2, below 0: at each step */
    struct dp__train_seen { /* the library's own; zero at first */
        int64_t began_ns, shown_ns, first_step, samples;
        int how;
    } seen;
} dp_progress;

/* After a step: the number of the epoch from 0 on, how many of its steps are done, how many samples
   this one had (of all processes, if they are to be counted), and the log of dp_train_step, or
   none. It changes nothing, and what it cannot show it leaves out. */
DP_API void dp_progress_step(dp_progress *progress, dp_ctx *ctx, int64_t epoch, int64_t step,
                             int64_t samples, dp_value log);
DP_API void dp_progress_end(dp_progress *progress); /* leave the line */

/* ==== >>stopping ===============================================================================
   A job is told to stop: by Slurm before its time is up, by a cloud that wants its machine back, by
   Ctrl-C. Whichever process hears of it, all stop after the same step, with a checkpoint:

       dp_stop_on_signal(SIGTERM);
       while (...) {
           dp_train_step(...);
           dp_stop_requested(ctx, &stop);
           if (stop)
               return keep(file);                                      as in dp_save.h
       }

   A request is never taken back: it lasts as long as the process.                               */

/* From now on this signal asks for a stop, once; after that it does what it did before. So a second
   Ctrl-C ends a program that does not listen. INVALID: no such signal, SIGKILL, SIGSTOP. [any] */
DP_MUST_USE DP_API dp_status dp_stop_on_signal(int signal);

/* A stop is asked for so many seconds from now; the earliest of several counts. A job that has four
   hours gives four hours less the time that a checkpoint takes. [any] */
DP_MUST_USE DP_API dp_status dp_stop_after(double seconds);

/* Ask for one. Signal handlers may call it, too. [any] */
DP_API void dp_stop_request(void);

/* Whether a process of the job has been asked, by any of these. All processes call it equally often
   and get the same answer; it costs an all-reduce of one number. Where several batches make a step,
   call it only after the last of them (dp_optim_info.step_count). [host] */
DP_MUST_USE DP_API dp_status dp_stop_requested(dp_ctx *ctx, bool *out);

#ifdef __cplusplus
}
#endif
#endif /* DP_TRAIN_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_TRAIN_IMPLEMENTED)
#define DP_TRAIN_IMPLEMENTED

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== >>stepping ================================================================================
   Those of the library are kernels of the devices.                                              */

static int64_t dp__train_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Of numbers that each rule has, or whose default is 0. */
static dp_status dp__train_hyper_resolve(dp_hyper *hyper)
{
    if (!(dp_or(hyper->lr, -1) >= 0) || !isfinite(hyper->lr))
        return dp_error(DP_ERR_INVALID, "lr is %g, not a finite number above 0", hyper->lr);
    hyper->lr = dp_or(hyper->lr, 0);
    hyper->weight_decay = dp_or(hyper->weight_decay, 0);
    hyper->momentum = dp_or(hyper->momentum, 0);
    hyper->dampening = dp_or(hyper->dampening, 0);
    if (!(hyper->weight_decay >= 0) || !isfinite(hyper->weight_decay))
        return dp_error(DP_ERR_INVALID, "weight_decay is %g, not a finite number of 0 or more",
                        hyper->weight_decay);
    return DP_OK;
}

static dp_status dp__train_sgd_check(dp_hyper *hyper)
{
    if (fabs(hyper->beta1) + fabs(hyper->beta2) + fabs(hyper->eps) > 0)
        return dp_error(DP_ERR_INVALID, "beta1, beta2 and eps are %g, %g and %g, and not for SGD",
                        hyper->beta1, hyper->beta2, hyper->eps);
    if (!(hyper->momentum >= 0 && hyper->momentum < 1))
        return dp_error(DP_ERR_INVALID, "momentum is %g, not from 0 to 1", hyper->momentum);
    if (!isfinite(hyper->dampening))
        return dp_error(DP_ERR_INVALID, "dampening is %g", hyper->dampening);
    if (hyper->nesterov && (!(hyper->momentum > 0) || hyper->dampening > 0 || hyper->dampening < 0))
        return dp_error(DP_ERR_INVALID, "nesterov needs a momentum and no dampening");
    return DP_OK;
}

static int dp__train_sgd_states(const dp_hyper *hyper)
{
    return hyper->momentum > 0;
}

typedef struct dp__train_update { /* a kernel of the contract */
    dp_kernel kernel;
    size_t state_count;
    unsigned flags;
    double numbers[8];
} dp__train_update;

/* All of them by one kernel. */
static dp_status dp__train_update_all(const dp__train_update *update, const dp_rule_args *args,
                                      size_t count)
{
    void *out[DP_RULE_STEPS * 3];
    const void *in[DP_RULE_STEPS * 2];
    size_t counts[DP_RULE_STEPS];
    dp_kernel_args own = {.kernel = update->kernel,
                          .dtype = args->dtype,
                          .in_dtype = args->dtype,
                          .out = out,
                          .in = in,
                          .out_count = 1 + update->state_count,
                          .in_count = args->gate != NULL ? 2 : 1,
                          .flags = update->flags |
                                   (args->hyper.maximize ? DP_KERNEL_MAXIMIZE : 0u) |
                                   (args->zero_grad ? DP_KERNEL_ZERO_GRAD : 0u),
                          .set_count = count,
                          .counts = counts};
    memcpy(own.numbers, update->numbers, sizeof own.numbers);
    for (size_t i = 0; i < count; i++) {
        void **to = &out[i * own.out_count];
        const void **from = &in[i * own.in_count];
        counts[i] = args[i].count;
        to[0] = args[i].param;
        memcpy(&to[1], args[i].state, update->state_count * sizeof *to);
        from[0] = args[i].grad;
        if (args[i].gate != NULL)
            from[1] = args[i].gate;
    }
    return dp_kernel_run(args->ctx, args->local_rank, &own);
}

static dp_status dp__train_sgd_steps(const dp_rule_args *args, size_t count)
{
    const dp_hyper *hyper = &args->hyper;
    const dp__train_update update = {
        .kernel = DP_KERNEL_SGD,
        .state_count = (size_t)dp__train_sgd_states(hyper),
        .flags = (hyper->nesterov ? DP_KERNEL_NESTEROV : 0u) |
                 (args->step == 1 && hyper->momentum > 0 ? DP_KERNEL_FIRST : 0u),
        .numbers = {hyper->lr, hyper->weight_decay, hyper->momentum, 1 - hyper->dampening}};
    return dp__train_update_all(&update, args, count);
}

static dp_status dp__train_sgd_step(const dp_rule_args *args)
{
    return dp__train_sgd_steps(args, 1);
}

static dp_status dp__train_adam_check(dp_hyper *hyper)
{
    if (fabs(hyper->momentum) + fabs(hyper->dampening) > 0 || hyper->nesterov)
        return dp_error(DP_ERR_INVALID,
                        "momentum and dampening are %g and %g, nesterov %d, and not for Adam",
                        hyper->momentum, hyper->dampening, hyper->nesterov);
    hyper->beta1 = dp_or(hyper->beta1, 0.9);
    hyper->beta2 = dp_or(hyper->beta2, 0.999);
    hyper->eps = dp_or(hyper->eps, 1e-8);
    if (!(hyper->beta1 >= 0 && hyper->beta1 < 1 && hyper->beta2 >= 0 && hyper->beta2 < 1))
        return dp_error(DP_ERR_INVALID, "betas are %g and %g, not both from 0 to below 1",
                        hyper->beta1, hyper->beta2);
    if (!(hyper->eps >= 0) || !isfinite(hyper->eps))
        return dp_error(DP_ERR_INVALID, "eps is %g, not a finite number of 0 or more", hyper->eps);
    return DP_OK;
}

static int dp__train_adam_states(const dp_hyper *hyper)
{
    (void)hyper;
    return 2;
}

static dp_status dp__train_adam_all(const dp_rule_args *args, size_t count, double decay,
                                    unsigned flags)
{
    const dp_hyper *hyper = &args->hyper;
    double unbiased1 = 1 - pow(hyper->beta1, (double)args->step);
    double unbiased2 = 1 - pow(hyper->beta2, (double)args->step);
    const dp__train_update update = {.kernel = DP_KERNEL_ADAMW,
                                     .state_count = 2,
                                     .flags = flags,
                                     .numbers = {hyper->lr / unbiased1, decay, 1 - hyper->beta1,
                                                 hyper->beta2, 1 - hyper->beta2, sqrt(unbiased2),
                                                 hyper->eps}};
    return dp__train_update_all(&update, args, count);
}

static dp_status dp__train_adam_steps(const dp_rule_args *args, size_t count)
{
    return dp__train_adam_all(args, count, args->hyper.weight_decay, DP_KERNEL_L2);
}

static dp_status dp__train_adam_step(const dp_rule_args *args)
{
    return dp__train_adam_steps(args, 1);
}

static dp_status dp__train_adamw_steps(const dp_rule_args *args, size_t count)
{
    return dp__train_adam_all(args, count, 1 - args->hyper.lr * args->hyper.weight_decay, 0);
}

static dp_status dp__train_adamw_step(const dp_rule_args *args)
{
    return dp__train_adamw_steps(args, 1);
}

DP_API const dp_rule *dp_sgd(void)
{
    static const dp_rule rule = {.head = DP_TABLE(dp_rule),
                                 .name = "sgd",
                                 .check = dp__train_sgd_check,
                                 .state_count = dp__train_sgd_states,
                                 .step = dp__train_sgd_step,
                                 .steps = dp__train_sgd_steps};
    return &rule;
}

DP_API const dp_rule *dp_adam(void)
{
    static const dp_rule rule = {.head = DP_TABLE(dp_rule),
                                 .name = "adam",
                                 .check = dp__train_adam_check,
                                 .state_count = dp__train_adam_states,
                                 .step = dp__train_adam_step,
                                 .steps = dp__train_adam_steps};
    return &rule;
}

DP_API const dp_rule *dp_adamw(void)
{
    static const dp_rule rule = {.head = DP_TABLE(dp_rule),
                                 .name = "adamw",
                                 .check = dp__train_adam_check,
                                 .state_count = dp__train_adam_states,
                                 .step = dp__train_adamw_step,
                                 .steps = dp__train_adamw_steps};
    return &rule;
}

/* ==== >>factors =================================================================================
   Steps are counted from 0.                                                                     */

static double dp__train_warmup_factor(const dp_schedule *schedule, int64_t step)
{
    double start = dp_or(schedule->start_factor, -1), warmup = (double)schedule->warmup;
    if (start < 0)
        return (double)(step + 1) / (warmup + 1);
    return start + (1 - start) * (double)step / warmup;
}

/* How far the decay has come, from 0 to 1. */
static double dp__train_decay_part(const dp_schedule *schedule, int64_t step)
{
    double length = (double)(schedule->total - schedule->warmup);
    double part = length > 0 ? (double)(step - schedule->warmup) / length : 1;
    return fmin(part, 1);
}

static int64_t dp__train_drops(const dp_schedule *schedule, int64_t step)
{
    int64_t drops = 0, most = (int64_t)schedule->milestone_count;
    if (schedule->every > 0)
        return (step - schedule->warmup) / schedule->every;
    while (drops < most && schedule->milestones[drops] <= step)
        drops++;
    return drops;
}

DP_API double dp_schedule_factor(const dp_schedule *schedule, int64_t step)
{
    const double pi = 3.14159265358979323846;
    if (schedule->factor != NULL)
        return schedule->factor(step, schedule->user);
    if (step < schedule->warmup)
        return dp__train_warmup_factor(schedule, step);
    double part = dp__train_decay_part(schedule, step), end = dp_or(schedule->end_factor, 0);
    switch (schedule->decay) {
    case DP_DECAY_LINEAR:
        return 1 + (end - 1) * part;
    case DP_DECAY_COSINE:
        return end + (1 - end) * (1 + cos(pi * part)) / 2;
    case DP_DECAY_STEPS:
        return pow(dp_or(schedule->gamma, 0), (double)dp__train_drops(schedule, step));
    case DP_DECAY_NONE:
        break;
    }
    return 1;
}

static dp_status dp__train_drops_check(const dp_schedule *schedule)
{
    size_t count = schedule->milestone_count;
    int64_t least = schedule->warmup;
    if (schedule->every < 0 || (schedule->every > 0) == (count > 0) ||
        !(dp_or(schedule->gamma, -1) >= 0) || !isfinite(schedule->gamma))
        return dp_error(DP_ERR_INVALID,
                        "schedule: times %g every %lld steps or at %zu milestones, one of both",
                        schedule->gamma, (long long)schedule->every, count);
    if (count > 0 && schedule->milestones == NULL)
        return dp_error(DP_ERR_INVALID, "schedule.milestones is NULL");
    for (size_t i = 0; i < count; least = schedule->milestones[i++])
        if (schedule->milestones[i] < least)
            return dp_error(DP_ERR_INVALID,
                            "schedule.milestones[%zu] is %lld, which is below %s%lld", i,
                            (long long)schedule->milestones[i],
                            i > 0 ? "the one before, " : "warmup, ", (long long)least);
    return DP_OK;
}

static dp_status dp__train_schedule_check(const dp_schedule *schedule)
{
    bool ends = schedule->decay == DP_DECAY_LINEAR || schedule->decay == DP_DECAY_COSINE;
    double start = dp_or(schedule->start_factor, 0);
    if ((unsigned)schedule->decay > DP_DECAY_STEPS)
        return dp_error(DP_ERR_INVALID, "schedule.decay is %d", (int)schedule->decay);
    if (schedule->warmup < 0 || !(start >= 0 && start <= 1))
        return dp_error(DP_ERR_INVALID, "schedule: warm-up of %lld steps from a factor of %g",
                        (long long)schedule->warmup, start);
    if (ends && (schedule->total <= schedule->warmup || !(dp_or(schedule->end_factor, 0) >= 0) ||
                 !isfinite(schedule->end_factor)))
        return dp_error(
            DP_ERR_INVALID, "schedule: to a factor of %g by step %lld, after %lld steps of warm-up",
            schedule->end_factor, (long long)schedule->total, (long long)schedule->warmup);
    if (schedule->decay == DP_DECAY_STEPS)
        return dp__train_drops_check(schedule);
    if (schedule->milestone_count > 0)
        return dp_error(DP_ERR_INVALID, "schedule has milestones, but decay is not DP_DECAY_STEPS");
    return DP_OK;
}

/* ==== >>views ==================================================================================
   All parameters that have a gradient, of every owner. To ask for them is an edit, and owners that
   are edited equally stay equal. They are listed stretch by stretch; stretches side by side are one
   span: a module is one, if nothing lies between its parameters. Those of a span that are of one
   group are one run, which a kernel passes at once. Where ranks share parameters out each has a
   part of every span, and what cannot be cut evenly, at the end.                                */

typedef struct dp__train_run {
    size_t first, param_count; /* of the parameters below */
    size_t count;              /* elements */
} dp__train_run;

typedef struct dp__train_span {
    dp__train_run all;
    size_t each; /* elements that each rank has for itself; 0: all ranks have all */
    bool once;   /* or, where processes share them, the first process */
} dp__train_span;

/* Of a run an owner has up to three pieces: its ranks' shares, those of which it has the copy, and
   the end. */
enum { DP__TRAIN_OWN, DP__TRAIN_COPY, DP__TRAIN_END, DP__TRAIN_PIECES };

typedef struct dp__train_piece {
    size_t first, count; /* elements of the run */
    size_t at;           /* among those of the span that the same ranks have */
} dp__train_piece;

typedef struct dp__train_ranks {
    size_t first, end;
} dp__train_ranks;

typedef struct dp__train_listed { /* a parameter */
    size_t param;                 /* its number in the module */
    size_t number;                /* among those listed here, as the module has them */
    size_t group;
    size_t span, at; /* where it begins in its span */
    size_t share;    /* dp_stretch.share; 0 where ranks do not share parameters out */
    bool goes_on;    /* the span of the one before */
    bool once;       /* the processes of the machine share it: see dp_param_info.shared */
    bool reduced;    /* see dp_param_info; the first owner alone steps what is not */
    int64_t steps;   /* how often it was stepped */
} dp__train_listed;

typedef struct dp__train_views {
    dp_module *module;
    dp_ctx *ctx;
    dp_info job;
    size_t owner_count, count, run_count, span_count;
    dp__train_listed *listed;
    bool *used;             /* by number in the module: which have a gradient, and so are stepped */
    bool all_used;          /* all are */
    bool even;              /* and were as often before */
    size_t *ranks;          /* the first rank of each owner, and where those of the last end */
    dp__train_ranks copied; /* the ranks of whose shares this process has the copy */
    bool spread;    /* gradients differ from rank to rank, and norms are to be the same on all */
    size_t sampled; /* how many have gradients that are means over samples */
    dp_tensor *data, *grad; /* owner after owner */
    dp__train_run *runs;
    dp__train_span *spans;
} dp__train_views;

static const dp_tensor *dp__train_data(const dp__train_views *views, size_t owner, size_t i)
{
    return &views->data[owner * views->count + i];
}

static const dp_tensor *dp__train_grad(const dp__train_views *views, size_t owner, size_t i)
{
    return &views->grad[owner * views->count + i];
}

static size_t dp__train_bytes(const dp_tensor *tensor)
{
    return (size_t)dp_tensor_count(tensor) * dp_dtype_bytes((dp_dtype)tensor->dtype);
}

/* Elements one after another, where `like` is. */
static dp_tensor dp__train_flat(const dp_tensor *like, void *data, dp_dtype dtype, size_t count)
{
    dp_tensor flat = {.data = data, .device = like->device, .dtype = (uint8_t)dtype, .ndim = 1};
    flat.shape[0] = (int64_t)count;
    flat.stride[0] = 1;
    return flat;
}

/* Elements of a run's gradients. */
static dp_tensor dp__train_run_grad(const dp__train_views *views, size_t owner,
                                    const dp__train_run *run)
{
    const dp_tensor *first = dp__train_grad(views, owner, run->first);
    return dp__train_flat(first, first->data, (dp_dtype)first->dtype, run->count);
}

static bool dp__train_has(const dp__train_views *views, size_t owner, size_t i)
{
    return owner == 0 || views->listed[i].reduced;
}

/* Whether a stretch is listed after the one before. What ranks share out together is a span; what
   follows it is part of what they cannot cut evenly. shared: ranks share parameters out. */
static bool dp__train_follows(const dp_stretch *stretch, bool shared)
{
    return stretch->before != SIZE_MAX && !(shared && stretch->share > 0);
}

/* numbers: of each of the module's parameters, among those that are listed. */
static dp_status dp__train_number(dp__train_views *views, size_t *numbers)
{
    size_t count = 0, reduced = 0;
    for (size_t i = 0; i < dp_module_param_count(views->module); i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(views->module, i, &info));
        numbers[i] = count;
        if (info.frozen || info.buffer)
            continue;
        if (info.data.dtype > DP_BF16)
            return dp_error(DP_ERR_INVALID, "parameter '%s' is %s, not a floating dtype", info.name,
                            dp_dtype_name((dp_dtype)info.data.dtype));
        count++;
        views->sampled += info.reduction == DP_MEAN_SAMPLES;
        reduced += info.reduced;
    }
    views->spread = reduced > 0 && reduced < count;
    return DP_OK;
}

/* From each stretch that follows none, those that do. */
static void dp__train_list(dp__train_views *views, const dp_stretch *all, size_t stretch_count,
                           const size_t *numbers, bool shared)
{
    size_t count = 0;
    for (size_t first = 0; first < stretch_count; first++) {
        size_t s = dp__train_follows(&all[first], shared) ? SIZE_MAX : first;
        for (; s != SIZE_MAX && (s == first || dp__train_follows(&all[s], shared));
             s = all[s].after) {
            bool goes_on = s != first && all[s].reduced == views->listed[count - 1].reduced;
            for (size_t i = 0; i < all[s].param_count; i++)
                views->listed[count++] = (dp__train_listed){.param = all[s].params[i],
                                                            .number = numbers[all[s].params[i]],
                                                            .share = shared ? all[s].share : 0,
                                                            .goes_on = goes_on || i > 0,
                                                            .reduced = all[s].reduced};
        }
    }
}

/* What processes share has one owner, and is not edited before all have come. */
static dp_status dp__train_share(const dp__train_views *views)
{
    for (size_t i = 0; i < views->count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(views->module, views->listed[i].param, &info));
        views->listed[i].once = info.shared;
        views->data[i] = info.data;
    }
    return DP_OK;
}

/* Only parameters are edited: who asks for a gradient to edit it gives the parameter one. `all`:
   what processes share, too. */
static dp_status dp__train_edit(const dp__train_views *views, bool all)
{
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t i = 0; i < views->count; i++)
            if (dp__train_has(views, owner, i) && (all || !views->listed[i].once))
                DP_TRY(dp_owner_edit(views->module, owner, views->listed[i].param,
                                     &views->data[owner * views->count + i], NULL));
    return DP_OK;
}

/* Memory of the user's may have moved since the last step. */
static dp_status dp__train_find_grads(const dp__train_views *views)
{
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t i = 0; i < views->count; i++)
            if (dp__train_has(views, owner, i))
                DP_TRY(dp_owner_grad(views->module, owner, views->listed[i].param,
                                     &views->grad[owner * views->count + i]));
    return DP_OK;
}

/* Replicas that ask at the same time are refused before anything is written. */
static dp_status dp__train_ask(const dp__train_views *views)
{
    const dp_stretch *stretches;
    size_t count;
    DP_TRY(dp_module_stretches(views->module, &stretches, &count));
    DP_TRY(dp__train_edit(views, false));
    return dp__train_find_grads(views);
}

/* The first that ranks reduce, or as many as there are. */
static size_t dp__train_first_reduced(const dp__train_views *views)
{
    size_t i = 0;
    while (i < views->count && !views->listed[i].reduced)
        i++;
    return i;
}

/* An owner's ranks go up to the next one's. */
static void dp__train_rank_all(dp__train_views *views)
{
    size_t i = dp__train_first_reduced(views);
    for (size_t owner = 0; owner <= views->owner_count; owner++) {
        size_t local = owner > 0 ? (size_t)views->job.local_count : 0;
        if (owner > 0 && owner < views->owner_count && i < views->count)
            local = (size_t)dp__train_data(views, owner, i)->device.index;
        views->ranks[owner] = (size_t)views->job.rank_first + local;
    }
}

static size_t dp__train_elements(const dp__train_views *views, size_t i)
{
    return (size_t)dp_tensor_count(dp__train_data(views, 0, i));
}

/* By the parameter that follows. */
static void dp__train_lengthen(const dp__train_views *views, dp__train_run *run)
{
    run->count += dp__train_elements(views, run->first + run->param_count);
    run->param_count++;
}

/* alone: each parameter is a run by itself. */
static void dp__train_cut(dp__train_views *views, bool alone)
{
    views->run_count = views->span_count = 0;
    for (size_t i = 0; i < views->count; i++) {
        bool on = !alone && views->listed[i].goes_on;
        dp__train_listed *listed = &views->listed[i];
        if (!on)
            views->spans[views->span_count++] =
                (dp__train_span){.all = {.first = i}, .each = listed->share, .once = listed->once};
        if (!on || views->listed[i - 1].group != listed->group)
            views->runs[views->run_count++] = (dp__train_run){.first = i};
        listed->span = views->span_count - 1;
        listed->at = views->spans[listed->span].all.count;
        dp__train_lengthen(views, &views->spans[listed->span].all);
        dp__train_lengthen(views, &views->runs[views->run_count - 1]);
    }
    for (size_t s = 0; s < views->span_count; s++)
        views->spread = views->spread || views->spans[s].each > 0;
}

/* What some ranks have of a run: their part, that which is copied, and the end, which everybody
   has; each may be empty. */
static void dp__train_pieces_of(const dp__train_views *views, const dp__train_run *run,
                                dp__train_ranks own, dp__train_ranks copied, dp__train_piece *out)
{
    const dp__train_listed *listed = &views->listed[run->first];
    size_t each = views->spans[listed->span].each, cut = each * (size_t)views->job.rank_count;
    size_t at = listed->at, end = at + run->count, kept = 0;
    const size_t ranges[DP__TRAIN_PIECES][2] = {{own.first * each, own.end * each},
                                                {copied.first * each, copied.end * each},
                                                {cut, SIZE_MAX}};
    for (int i = 0; i < DP__TRAIN_PIECES; i++) {
        size_t first = ranges[i][0] > at ? ranges[i][0] : at;
        size_t last = ranges[i][1] < end ? ranges[i][1] : end;
        bool some = first < last;
        out[i] = (dp__train_piece){.first = some ? first - at : 0,
                                   .count = some ? last - first : 0,
                                   .at = some ? kept + first - ranges[i][0] : 0};
        kept += ranges[i][1] - ranges[i][0];
    }
}

/* Those that an owner steps. Of what processes share only one can have the end. */
static void dp__train_pieces(const dp__train_views *views, const dp__train_run *run, size_t owner,
                             dp__train_piece *out)
{
    const dp__train_ranks own = {views->ranks[owner], views->ranks[owner + 1]};
    dp__train_pieces_of(views, run, own, views->copied, out);
    if (views->spans[views->listed[run->first].span].once && views->job.process > 0)
        out[DP__TRAIN_END] = (dp__train_piece){0};
}

/* Elements of a run, by the tensor that it begins with. */
static dp_tensor dp__train_part(const dp_tensor *first, const dp__train_piece *piece)
{
    size_t at = piece->first * dp_dtype_bytes((dp_dtype)first->dtype);
    return dp__train_flat(first, (char *)first->data + at, (dp_dtype)first->dtype, piece->count);
}

/* What an owner keeps of a span lies there piece after piece. */
static dp_tensor dp__train_kept_part(const dp_tensor *kept, const dp__train_piece *piece)
{
    const dp__train_piece own = {piece->at, piece->count, 0};
    return dp__train_part(kept, &own);
}

/* From the span to what is kept of it, or back. */
static dp_status dp__train_piece_copy(dp_ctx *ctx, const dp_tensor *kept, const dp_tensor *first,
                                      const dp__train_piece *piece, bool back)
{
    dp_tensor here = dp__train_kept_part(kept, piece), there = dp__train_part(first, piece);
    return back ? dp_copy(ctx, &there, &here, NULL) : dp_copy(ctx, &here, &there, NULL);
}

/* All that an owner keeps of a span. */
static dp_status dp__train_pieces_copy(const dp__train_views *views, size_t s, size_t owner,
                                       const dp_tensor *kept, const dp_tensor *first, bool back)
{
    dp__train_piece pieces[DP__TRAIN_PIECES];
    dp__train_pieces(views, &views->spans[s].all, owner, pieces);
    for (int k = 0; k < DP__TRAIN_PIECES; k++)
        DP_TRY(dp__train_piece_copy(views->ctx, kept, first, &pieces[k], back));
    return DP_OK;
}

/* They live as long as the scope. */
static dp_status dp__train_views_make(dp_module *module, dp_scope *scope, bool shared,
                                      dp__train_views *out)
{
    size_t param_count = dp_module_param_count(module);
    *out = (dp__train_views){
        .module = module, .ctx = dp_module_ctx(module), .owner_count = dp_owner_count(module)};
    const dp_stretch *stretches;
    size_t stretch_count, *numbers = dp_scope_alloc(scope, param_count * sizeof *numbers);
    DP_TRY(dp_module_stretches(module, &stretches, &stretch_count));
    for (size_t s = 0; s < stretch_count; s++)
        out->count += stretches[s].param_count;
    size_t all = out->owner_count * out->count;
    out->listed = dp_scope_alloc(scope, out->count * sizeof *out->listed);
    out->used = dp_scope_alloc(scope, param_count * sizeof *out->used);
    out->ranks = dp_scope_alloc(scope, (out->owner_count + 1) * sizeof *out->ranks);
    out->runs = dp_scope_alloc(scope, out->count * sizeof *out->runs);
    out->spans = dp_scope_alloc(scope, out->count * sizeof *out->spans);
    out->data = dp_scope_alloc(scope, all * sizeof *out->data);
    out->grad = dp_scope_alloc(scope, all * sizeof *out->grad);
    if (numbers == NULL || out->listed == NULL || out->used == NULL || out->ranks == NULL ||
        out->runs == NULL || out->spans == NULL || out->data == NULL || out->grad == NULL)
        return dp_no_memory();
    DP_TRY(dp_info_get(out->ctx, &out->job));
    DP_TRY(dp__train_number(out, numbers));
    dp__train_list(out, stretches, stretch_count, numbers, shared);
    DP_TRY(dp__train_share(out));
    DP_TRY(dp__train_ask(out));
    dp__train_rank_all(out);
    dp__train_cut(out, false);
    return DP_OK;
}

/* True is set where devices, of which there are more than owners, may have parameters that the
   module does not show; those of the host never do. */
static dp_status dp__train_hides(const dp__train_views *views, bool *out)
{
    int count = views->job.local_count;
    for (int r = 0; r < count && views->owner_count < (size_t)count && !*out; r++) {
        dp_device_info device;
        DP_TRY(dp_device_info_get(views->ctx, r, &device));
        *out = !device.host_memory;
    }
    return DP_OK;
}

/* Of a wrapper below with several owners a module sees the first alone, and of shares on others
   nothing; and nothing of those of a wrapper elsewhere. All processes ask, and none goes on if one
   cannot. out_asked: all go on. */
static dp_status dp__train_seen(const dp__train_views *views, bool *out_asked)
{
    bool unseen = false;
    if (views->job.rank_count == 1 || !dp_grads_are_scattered(views->module))
        return DP_OK;
    DP_TRY(dp__train_hides(views, &unseen));
    DP_TRY(dp_any(views->ctx, unseen || dp_grads_are_unseen(views->module), &unseen));
    *out_asked = !unseen;
    if (!unseen)
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "gradients of '%s' are scattered, which only its wrappers see: ask these, or "
                    "dp_grads_scatter_set(module, false) comes before a backward",
                    dp_module_name(views->module));
}

/* ==== >>norms ===================================================================================
   Norms are taken of the first owner's gradients: others have the same. What ranks do not reduce
   differs from process to process, and so counts once for each. Of what they share out each counts
   its own part: whether others are there too, or void, does not matter.                          */

/* What fails between two collectives of one call cannot be called again: the others are further. */
static dp_status dp__train_alone(dp_ctx *ctx, dp_status status)
{
    dp_info job;
    if (status == DP_OK || dp_status_class(status) == DP_CLASS_JOB ||
        dp_info_get(ctx, &job) != DP_OK || job.process_count == 1)
        return status;
    status = dp_error(DP_ERR_INTERNAL, "%s (%s)", dp_last_error(), dp_status_name(status));
    dp_abort(ctx, status, "%s", dp_last_error());
    return status;
}

/* A number of each local rank becomes, in *numbers, that of all ranks: the sum, or the largest. */
static dp_status dp__train_join(dp_ctx *ctx, dp_scope *temp, dp_op op, double *numbers)
{
    dp_info job;
    dp_tensor first;
    DP_TRY(dp_info_get(ctx, &job));
    dp_part *parts = dp_scope_alloc(temp, (size_t)job.local_count * sizeof *parts);
    if (parts == NULL)
        return dp_no_memory();
    for (int r = job.local_count; r-- > 0;) {
        DP_TRY(dp_tensor_from(temp, dp_local_device(ctx, r), &numbers[r], DP_F64, 0, NULL, &first));
        parts[r] = (dp_part){.send = first.data, .recv = r == 0 ? first.data : NULL};
    }
    DP_TRY(dp_all_reduce(ctx, parts, 1, DP_F64, op));
    return dp_read(ctx, &first, numbers, sizeof *numbers);
}

typedef struct dp__train_terms { /* what a norm is made of, owner after owner */
    const dp__train_views *views;
    dp_tensor *grads;
    size_t *sums; /* where each counts: 0: the same on all ranks; or a local rank, from 1 on */
    size_t count;
    double *results; /* by such a number */
} dp__train_terms;

static void dp__train_term(dp__train_terms *terms, size_t owner, const dp__train_run *run,
                           const dp__train_piece *piece, size_t sum)
{
    const dp_tensor *first = dp__train_grad(terms->views, owner, run->first);
    if (piece->count == 0)
        return;
    terms->grads[terms->count] = dp__train_part(first, piece);
    terms->sums[terms->count++] = sum;
}

/* Of one span. */
static void dp__train_span_terms(dp__train_terms *terms, size_t owner, size_t s)
{
    const dp__train_views *views = terms->views;
    const dp__train_run *run = &views->spans[s].all;
    dp__train_piece pieces[DP__TRAIN_PIECES] = {{0}};
    for (size_t rank = views->ranks[owner]; rank < views->ranks[owner + 1]; rank++) {
        dp__train_pieces_of(views, run, (dp__train_ranks){rank, rank + 1}, (dp__train_ranks){0},
                            pieces);
        dp__train_term(terms, owner, run, &pieces[DP__TRAIN_OWN],
                       rank - (size_t)views->job.rank_first + 1);
    }
    if (owner == 0) /* the end is that of any rank */
        dp__train_term(terms, owner, run, &pieces[DP__TRAIN_END],
                       !views->listed[run->first].reduced);
}

static dp_status dp__train_terms_make(const dp__train_views *views, dp_scope *temp,
                                      dp__train_terms *out)
{
    size_t most = views->span_count * ((size_t)views->job.local_count + 1);
    *out = (dp__train_terms){.views = views,
                             .grads = dp_scope_alloc(temp, most * sizeof *out->grads),
                             .sums = dp_scope_alloc(temp, most * sizeof *out->sums),
                             .results = dp_scope_alloc(temp, ((size_t)views->job.local_count + 1) *
                                                                 sizeof *out->results)};
    if (out->grads == NULL || out->sums == NULL || out->results == NULL)
        return dp_no_memory();
    for (int i = 0; i <= views->job.local_count; i++)
        out->results[i] = 0;
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t s = 0; s < views->span_count; s++)
            dp__train_span_terms(out, owner, s);
    return DP_OK;
}

/* Begins STATS of terms from `first` on, up to those on another device. */
static dp_status dp__train_stats(const dp__train_terms *terms, dp_scope *temp, size_t first,
                                 size_t *out_end, dp_tensor *out)
{
    dp_device device = terms->grads[first].device;
    size_t end = first;
    while (end < terms->count && terms->grads[end].device.index == device.index)
        end++;
    const int64_t shape[] = {(int64_t)(end - first), 2};
    DP_TRY(dp_tensor_new(temp, device, DP_F64, 2, shape, out));
    for (size_t i = first; i < end; i++) {
        void *own = (double *)out->data + 2 * (i - first);
        const void *in = terms->grads[i].data;
        DP_TRY(dp_kernel_run(terms->views->ctx, device.index,
                             &(dp_kernel_args){.kernel = DP_KERNEL_STATS,
                                               .dtype = (dp_dtype)terms->grads[i].dtype,
                                               .count = (size_t)terms->grads[i].shape[0],
                                               .out = &own,
                                               .in = &in,
                                               .out_count = 1,
                                               .in_count = 1}));
    }
    *out_end = end;
    return DP_OK;
}

/* All devices are at it before the first is waited for. */
static dp_status dp__train_squares(const dp__train_terms *terms, dp_scope *temp)
{
    size_t some = 0, end = 0; /* an owner may have parameters on several devices */
    double *read = dp_scope_alloc(temp, 2 * terms->count * sizeof *read);
    dp_tensor *stats = dp_scope_alloc(temp, terms->count * sizeof *stats);
    if (read == NULL || stats == NULL)
        return dp_no_memory();
    while (end < terms->count)
        DP_TRY(dp__train_stats(terms, temp, end, &end, &stats[some++]));
    double *to = read;
    for (size_t i = 0; i < some; to += 2 * stats[i++].shape[0])
        DP_TRY(dp_read(terms->views->ctx, &stats[i], to,
                       2 * (size_t)stats[i].shape[0] * sizeof *read));
    for (size_t i = 0; i < terms->count; i++)
        terms->results[terms->sums[i]] += read[2 * i];
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

static dp_status dp__train_term_powers(dp_ctx *ctx, const dp_tensor *grad, double p,
                                       const dp_tensor *wide, double *read, double *sum)
{
    dp_tensor own, to;
    int64_t most = wide->shape[0];
    for (int64_t at = 0, some; at < grad->shape[0]; at += some) {
        some = dp__train_least(grad->shape[0] - at, most);
        DP_TRY(dp_narrow(grad, 0, at, some, &own));
        DP_TRY(dp_narrow(wide, 0, 0, some, &to));
        DP_TRY(dp_cast(ctx, &to, &own));
        DP_TRY(dp_read(ctx, &to, read, (size_t)some * sizeof *read));
        *sum = dp__train_powers(read, (size_t)some, p, *sum);
    }
    return DP_OK;
}

static dp_status dp__train_all_powers(const dp__train_terms *terms, dp_scope *temp, double p)
{
    enum { CHUNK = 1 << 16 };
    const int64_t chunk = CHUNK;
    dp_tensor wide = {0};
    double *read = dp_scope_alloc(temp, CHUNK * sizeof *read);
    if (read == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < terms->count; i++) {
        const dp_tensor *grad = &terms->grads[i];
        if (wide.data == NULL || wide.device.index != grad->device.index)
            DP_TRY(dp_tensor_new(temp, grad->device, DP_F64, 1, &chunk, &wide));
        DP_TRY(dp__train_term_powers(terms->views->ctx, grad, p, &wide, read,
                                     &terms->results[terms->sums[i]]));
    }
    return DP_OK;
}

/* Of both sums, or both maxima. */
static double dp__train_root(const double *sums, double p)
{
    if (isinf(p))
        return sums[0] > sums[1] || isnan(sums[0]) ? sums[0] : sums[1];
    return p < 2 || p > 2 ? pow(sums[0] + sums[1], 1 / p) : sqrt(sums[0] + sums[1]);
}

static dp_status dp__train_norm_in(const dp__train_views *views, dp_scope *temp, double p,
                                   double *out)
{
    dp__train_terms terms;
    DP_TRY(dp__train_terms_make(views, temp, &terms));
    DP_TRY(p < 2 || p > 2 ? dp__train_all_powers(&terms, temp, p)
                          : dp__train_squares(&terms, temp));
    if (views->spread)
        DP_TRY(
            dp__train_join(views->ctx, temp, isinf(p) ? DP_OP_MAX : DP_OP_SUM, &terms.results[1]));
    *out = dp__train_root(terms.results, p);
    return DP_OK;
}

static dp_status dp__train_norm(const dp__train_views *views, double p, double *out)
{
    dp_scope *temp = dp_scope_begin(views->ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__train_norm_in(views, temp, p, out);
    dp_scope_end(temp);
    return status;
}

/* The error for a norm that is no finite number. */
static dp_status dp__train_not_finite(const dp__train_views *views, double norm)
{
    for (size_t i = 0; i < views->count; i++) {
        dp_param_info info;
        dp_stats stats;
        DP_TRY(dp_tensor_stats(views->ctx, dp__train_grad(views, 0, i), &stats));
        DP_TRY(dp_module_param(views->module, views->listed[i].param, &info));
        if (!stats.all_finite)
            return dp_error(DP_ERR_STATE,
                            "the norm of the gradients is %g: the gradient of %s is not finite",
                            norm, info.name);
    }
    return dp_error(DP_ERR_STATE, "the norm of the gradients is %g%s", norm,
                    views->spread && views->job.process_count > 1 ? ", here or in another process"
                                                                  : "");
}

/* ==== >>clips ===================================================================================
   What follows from a norm, or from a limit.                                                    */

static dp_status dp__train_clip_check(double p, double most)
{
    if (!(p > 0))
        return dp_error(DP_ERR_INVALID, "p is %g, not above 0", p);
    if (!(dp_or(most, -1) >= 0))
        return dp_error(DP_ERR_INVALID, "most is %g, not above 0", most);
    return DP_OK;
}

static double dp__train_clip_factor(double most, double norm)
{
    double factor = most / (norm + 1e-6);
    return factor >= 1 ? 1 : factor; /* NaN stays */
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

static double dp__train_largest(dp_dtype dtype)
{
    static const double largest[] = {
        [DP_F32] = (double)FLT_MAX, [DP_F64] = DBL_MAX, [DP_F16] = 65504, [DP_BF16] = 0x1.fep127};
    return dtype <= DP_BF16 ? largest[dtype] : DBL_MAX;
}

/* A limit that the dtype does not have is its largest number. */
static dp_status dp__train_limits_make(const dp__train_views *views, dp_scope *temp,
                                       const dp_tensor *grad, double most, size_t count,
                                       dp_tensor *limits)
{
    const int64_t shape = (int64_t)count;
    double limit = fmin(most, dp__train_largest((dp_dtype)grad->dtype));
    for (int k = 0; k < 2; k++) {
        DP_TRY(dp_tensor_new(temp, grad->device, (dp_dtype)grad->dtype, 1, &shape, &limits[k]));
        DP_TRY(dp_fill(views->ctx, &limits[k], dp_float(k == 0 ? limit : -limit)));
    }
    return DP_OK;
}

static dp_status dp__train_clip_runs(const dp__train_views *views, dp_scope *temp, double most)
{
    enum { CHUNK = 1 << 16 };
    dp_tensor limits[2] = {{0}};
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t r = 0; r < views->run_count; r++) {
            if (!dp__train_has(views, owner, views->runs[r].first))
                continue;
            dp_tensor grad = dp__train_run_grad(views, owner, &views->runs[r]);
            if (limits[0].data == NULL || limits[0].dtype != grad.dtype ||
                limits[0].device.index != grad.device.index)
                DP_TRY(dp__train_limits_make(views, temp, &grad, most, CHUNK, limits));
            DP_TRY(dp__train_clamp(views->ctx, &grad, limits, CHUNK));
        }
    return DP_OK;
}

static dp_status dp__train_clip_value(const dp__train_views *views, double most)
{
    dp_scope *temp = dp_scope_begin(views->ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__train_clip_runs(views, temp, most);
    dp_scope_end(temp);
    return status;
}

static dp_status dp__train_scale_all(const dp__train_views *views, double factor)
{
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t r = 0; r < views->run_count; r++) {
            if (!dp__train_has(views, owner, views->runs[r].first))
                continue;
            dp_tensor grad = dp__train_run_grad(views, owner, &views->runs[r]);
            DP_TRY(dp_axpby(views->ctx, factor, &grad, 0, NULL, &grad));
        }
    return DP_OK;
}

typedef struct dp__train_clipping { /* what one of the calls below wants */
    double p, most;
    bool by_value;  /* most: of each element */
    bool only_norm; /* nothing is clipped */
    double norm;    /* which was found */
} dp__train_clipping;

static dp_status dp__train_clip_all(const dp__train_views *views, dp__train_clipping *clipping)
{
    if (clipping->by_value)
        return dp__train_clip_value(views, clipping->most);
    DP_TRY(dp__train_norm(views, clipping->p, &clipping->norm));
    double factor = dp__train_clip_factor(clipping->most, clipping->norm);
    return clipping->only_norm || factor >= 1 ? DP_OK : dp__train_scale_all(views, factor);
}

static dp_status dp__train_clip(const char *fn, dp_module *module, dp__train_clipping *clipping)
{
    bool asked = false;
    dp__train_views views;
    DP_TRY(dp_error_in(fn, dp__train_clip_check(clipping->p, clipping->most)));
    clipping->most = dp_or(clipping->most, 0);
    if (dp_module_ctx(module) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", fn);
    dp_scope *temp = dp_scope_begin(dp_module_ctx(module));
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__train_views_make(module, temp, dp_grads_are_scattered(module), &views);
    if (status == DP_OK)
        status = dp__train_seen(&views, &asked);
    if (status == DP_OK)
        status = dp_error_in(fn, dp__train_clip_all(&views, clipping));
    if (asked)
        status = dp__train_alone(views.ctx, status);
    dp_scope_end(temp);
    return dp_error_in(fn, status);
}

DP_API dp_status dp_grad_norm(dp_module *module, double p, double *out)
{
    dp__train_clipping clipping = {.p = p, .most = 1, .only_norm = true};
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp__train_clip(__func__, module, &clipping));
    *out = clipping.norm;
    return DP_OK;
}

DP_API dp_status dp_clip_grad_norm(dp_module *module, double most, double p, double *out_norm)
{
    dp__train_clipping clipping = {.p = p, .most = most};
    DP_TRY(dp__train_clip(__func__, module, &clipping));
    if (out_norm != NULL)
        *out_norm = clipping.norm;
    return DP_OK;
}

DP_API dp_status dp_clip_grad_value(dp_module *module, double most)
{
    dp__train_clipping clipping = {.p = 2, .most = most, .by_value = true};
    return dp__train_clip(__func__, module, &clipping);
}

/* ==== >>shares ==================================================================================
   What an optimizer keeps of the elements of a span: of all of them, or, sharded, of its ranks'
   part.                                                                                         */

enum { DP__TRAIN_STAGE = 1 << 16 };

typedef struct dp__train_store { /* of the span of the same number */
    size_t slots;                /* states, and the master copy if there is one */
    dp_tensor *state;            /* owner after owner; of its pieces, one after another */
    dp_tensor grad;              /* mirrored: of the same pieces, for the step */
    dp_tensor param;             /* and what it has made of them, if mirror->far */
} dp__train_store;

typedef struct dp__train_queue { /* what the rule steps next, together */
    size_t group, count;
    dp_rule_args args[DP_RULE_STEPS];
} dp__train_queue;

typedef struct dp__train_ring { /* of processes, each with the copy of the one before */
    int before, next;
} dp__train_ring;

typedef struct dp__train_mirror dp__train_mirror; /* of dp_mirror.h */

typedef struct dp__train_optimizer {
    dp_optim base;
    dp_scope *home;         /* its own */
    dp_scope *scope;        /* of all below; mirrored: ends when state is cut anew */
    dp_optim_config config; /* with arrays of its own */
    dp__train_views views;
    const char **names;
    size_t state_count;
    dp__train_store *stores;
    dp_tensor *gates;       /* of each device; without memory where no parameters lie */
    dp_tensor *rooms;       /* of each device: gradients in f32; where there are master copies */
    dp_tensor *stages;      /* of each local rank, on the way to others; where state is sharded */
    dp__train_queue *queue; /* NULL: the rule steps one after another */
    dp_part *parts;
    dp_tensor *all;                            /* of each owner: a span, as it is sent */
    int64_t done, total, steps, skipped, good; /* good: steps since the scale has changed */
    double scale;
    bool staged;   /* some process in the job hides parameters */
    bool may_zero; /* a step of all parameters may zero the module's gradients */
    bool zeroes;   /* the last one does so */
    bool unscaled; /* gradients of the next step were divided by it already */
    bool refused;  /* the last step: its norm was no number, as all ranks know */
    bool overflow; /* and not all were finite */
    bool has_norm;
    double norm;
    dp__train_ring ring;
    dp__train_mirror *mirror; /* NULL: nothing is copied */
} dp__train_optimizer;

/* Lists what the mirrors of an optimizer do, in the order of the first calls. */
typedef struct dp__train_mirror_ops {
    /* Finds the ring. All processes call it before one makes an optimizer. */
    dp_status (*begin)(dp_ctx *ctx, dp__train_ring *out);
    dp_status (*make)(dp__train_optimizer *optim);
    /* Makes room for gradients of a span, of which an owner keeps so many elements. */
    dp_status (*room)(const dp__train_optimizer *optim, dp__train_store *store,
                      const dp_tensor *first, int64_t kept);
    /* Ends what all processes do together. Of those that have made an optimizer at the same time,
       some may have state already; `before`: what this process has, or NULL. */
    dp_status (*join)(dp__train_optimizer *optim, dp__train_optimizer *before);
    void (*turn)(dp__train_optimizer *optim); /* a step is asked for */
    dp_status (*steps)(dp__train_optimizer *optim, double factor);
    dp_status (*rule)(const dp__train_optimizer *optim, const dp_rule_args *args, size_t count);
    /* Returns how a step ended that has ended so far with `status`. */
    dp_status (*begun)(const dp__train_optimizer *optim, dp_status status);
    dp_status (*cut_anew)(dp__train_optimizer *optim); /* after dp_recover */
} dp__train_mirror_ops;

/* dp_mirror.h fills it in; without that header all of it is NULL. */
static const dp__train_mirror_ops dp__train_mirrors;

_Static_assert(offsetof(dp__train_optimizer, base) == 0, "a dp_optim is the head of its optimizer");

static dp__train_optimizer *dp__train_optimizer_of(dp_optim *optim)
{
    return (dp__train_optimizer *)optim;
}

/* Numbers are sent as integers of their size, so that no bit of them changes. */
static dp_dtype dp__train_bits(dp_dtype dtype)
{
    size_t bytes = dp_dtype_bytes(dtype);
    return bytes == 2 ? DP_I16 : bytes == 4 ? DP_I32 : DP_I64;
}

/* In place. The first rank of an owner receives for all of them. */
static dp_status dp__train_gather_each(const dp__train_optimizer *optim, size_t each,
                                       const dp_tensor *all)
{
    const dp__train_views *views = &optim->views;
    size_t size = dp_dtype_bytes((dp_dtype)all->dtype), first = (size_t)views->job.rank_first;
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t rank = views->ranks[owner]; rank < views->ranks[owner + 1]; rank++) {
            char *data = all[owner].data;
            bool receives = rank == views->ranks[owner];
            optim->parts[rank - first] =
                (dp_part){.send = data + rank * each * size, .recv = receives ? data : NULL};
        }
    return dp_all_gather(views->ctx, optim->parts, each, (dp_dtype)all->dtype);
}

/* What an owner has of elements that are staged, and zeros elsewhere. */
static dp_status dp__train_stage(const dp__train_optimizer *optim, size_t each, size_t owner,
                                 const dp_tensor *all, int64_t from, const dp_tensor *stage)
{
    const dp__train_views *views = &optim->views;
    int64_t first = (int64_t)(views->ranks[owner] * each) - from;
    int64_t last = (int64_t)(views->ranks[owner + 1] * each) - from;
    dp_tensor to, own;
    first = first > 0 ? first : 0;
    last = dp__train_least(last, stage->shape[0]);
    DP_TRY(dp_fill(views->ctx, stage, dp_int(0)));
    if (first >= last)
        return DP_OK;
    DP_TRY(dp_narrow(stage, 0, first, last - first, &to));
    DP_TRY(dp_narrow(all, 0, from + first, last - first, &own));
    return dp_copy(views->ctx, &to, &own, NULL);
}

/* The first rank of an owner sends for all of them. */
static dp_status dp__train_gather_some(const dp__train_optimizer *optim, size_t each,
                                       const dp_tensor *all, int64_t from, int64_t count)
{
    const dp__train_views *views = &optim->views;
    dp_dtype dtype = (dp_dtype)all->dtype;
    size_t owner = 0; /* whose first rank is next: after the last owner, it is another process' */
    for (size_t r = 0; r < (size_t)views->job.local_count; r++) {
        const dp_tensor *room = &optim->stages[r];
        dp_tensor stage = dp__train_flat(room, room->data, dtype, (size_t)count);
        bool sends = views->ranks[owner] == (size_t)views->job.rank_first + r;
        DP_TRY(sends ? dp__train_stage(optim, each, owner, &all[owner], from, &stage)
                     : dp_fill(views->ctx, &stage, dp_int(0)));
        optim->parts[r] = (dp_part){.send = stage.data, .recv = sends ? stage.data : NULL};
        owner += sends;
    }
    DP_TRY(dp_all_reduce(views->ctx, optim->parts, (size_t)count, dtype, DP_OP_SUM));
    for (owner = 0; owner < views->owner_count; owner++) {
        size_t r = views->ranks[owner] - (size_t)views->job.rank_first;
        dp_tensor to,
            stage = dp__train_flat(&optim->stages[r], optim->stages[r].data, dtype, (size_t)count);
        DP_TRY(dp_narrow(&all[owner], 0, from, count, &to));
        DP_TRY(dp_copy(views->ctx, &to, &stage, NULL));
    }
    return DP_OK;
}

/* `all`: of each owner, integers. Its own pieces are there; the others come. Where a process hides
   parameters a gather has no place for those of each rank, and sums take its place. */
static dp_status dp__train_gather(const dp__train_optimizer *optim, size_t each,
                                  const dp_tensor *all)
{
    const dp__train_views *views = &optim->views;
    int64_t cut = (int64_t)(each * (size_t)views->job.rank_count), some;
    if (views->owner_count == 1 && views->job.process_count == 1)
        return DP_OK;
    if (!optim->staged)
        return dp__train_gather_each(optim, each, all);
    for (int64_t at = 0; at < cut; at += some) {
        some = dp__train_least(cut - at, DP__TRAIN_STAGE);
        DP_TRY(dp__train_gather_some(optim, each, all, at, some));
    }
    return DP_OK;
}

/* ==== >>turns ===================================================================================
   Which gradients make a step, and what is done with them.                                      */

/* Of steps: one more can be counted, for as long as anybody will wait. */
#define DP__TRAIN_COUNT_MAX ((int64_t)1 << 62)

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

/* ---- the scale of losses --------------------------------------------------------------------- */

static bool dp__train_is_scaled(const dp__train_optimizer *optim)
{
    return optim->config.scale.scale > 0;
}

/* Gradients are f32 where they are multiplied by 1 / scale. */
static bool dp__train_is_scale(double scale)
{
    return scale >= (double)FLT_MIN && scale <= (double)FLT_MAX;
}

static void dp__train_rescale(dp__train_optimizer *optim, bool skips)
{
    const dp_loss_scale *scale = &optim->config.scale;
    optim->unscaled = optim->overflow = false;
    if (!scale->dynamic)
        return;
    optim->good = skips ? 0 : optim->good + 1;
    bool grows = optim->good >= scale->interval;
    double next = optim->scale * (skips ? scale->backoff : grows ? scale->growth : 1);
    if (grows)
        optim->good = 0;
    if (dp__train_is_scale(next))
        optim->scale = next;
}

/* ---- a step ---------------------------------------------------------------------------------- */

typedef struct dp__train_turn { /* of a piece */
    dp_rule_args args;
    dp_tensor data, grad; /* its elements */
    dp_tensor master;     /* data NULL: there is none */
} dp__train_turn;

static dp_status dp__train_rule_call(const dp__train_optimizer *optim, const dp_rule_args *args,
                                     size_t count)
{
    const dp_rule *rule = optim->config.rule;
    return count > 0 ? rule->steps(args, count) : rule->step(args);
}

static dp_status dp__train_rule_run(const dp__train_optimizer *optim, const dp_rule_args *args,
                                    size_t count)
{
    return optim->mirror != NULL ? dp__train_mirrors.rule(optim, args, count)
                                 : dp__train_rule_call(optim, args, count);
}

/* In f32, as much at a time as there is room for. */
static dp_status dp__train_master_step(const dp__train_optimizer *optim, const dp__train_turn *turn,
                                       const dp_tensor *room)
{
    dp_ctx *ctx = optim->views.ctx;
    for (int64_t at = 0, some; at < turn->data.shape[0]; at += some) {
        dp_rule_args args = turn->args;
        dp_tensor grad, from, master, to;
        some = dp__train_least(turn->data.shape[0] - at, room->shape[0]);
        DP_TRY(dp_narrow(room, 0, 0, some, &grad));
        DP_TRY(dp_narrow(&turn->grad, 0, at, some, &from));
        DP_TRY(dp_narrow(&turn->master, 0, at, some, &master));
        DP_TRY(dp_narrow(&turn->data, 0, at, some, &to));
        args.dtype = DP_F32;
        args.count = (size_t)some;
        args.param = master.data;
        args.grad = grad.data;
        for (size_t k = 0; k < optim->state_count; k++)
            args.state[k] = (float *)args.state[k] + at;
        DP_TRY(dp_cast(ctx, &grad, &from));
        DP_TRY(dp__train_rule_run(optim, &args, 0));
        DP_TRY(dp_cast(ctx, &to, &master));
    }
    return DP_OK;
}

static bool dp__train_is_used(const dp__train_views *views, size_t i)
{
    return views->used[views->listed[i].param];
}

/* Parameters without a gradient are left as they are, with their state, as by torch.optim. */
static dp_status dp__train_look(dp__train_views *views)
{
    bool alike = true;
    views->all_used = true;
    DP_TRY(dp_grads_used(views->module, views->used, dp_module_param_count(views->module)));
    for (size_t i = 0; i < views->count; i++) {
        views->all_used = views->all_used && dp__train_is_used(views, i);
        alike = alike && views->listed[i].steps == views->listed[0].steps;
    }
    views->even = views->all_used && alike;
    return DP_OK;
}

/* The part of a run after *part, in which all are stepped, and were as often before; *part is empty
   and begins as the run does at first. False: there is none. */
static bool dp__train_next_part(const dp__train_views *views, const dp__train_run *run,
                                dp__train_run *part)
{
    const dp__train_listed *listed = views->listed;
    size_t i = part->first + part->param_count, end = run->first + run->param_count;
    if (views->even && i == run->first) {
        *part = *run;
        return true;
    }
    while (i < end && !dp__train_is_used(views, i))
        i++;
    *part = (dp__train_run){.first = i};
    for (; i < end && dp__train_is_used(views, i) && listed[i].steps == listed[part->first].steps;
         i++)
        dp__train_lengthen(views, part);
    return part->param_count > 0;
}

/* Nothing waits then, whatever becomes of it. */
static dp_status dp__train_queue_step(const dp__train_optimizer *optim)
{
    size_t count = optim->queue->count;
    optim->queue->count = 0;
    return count > 0 ? dp__train_rule_run(optim, optim->queue->args, count) : DP_OK;
}

static dp_status dp__train_enqueue(const dp__train_optimizer *optim, const dp_rule_args *args,
                                   size_t group)
{
    dp__train_queue *queue = optim->queue;
    const dp_rule_args *first = queue->args;
    bool alike = group == queue->group && args->local_rank == first->local_rank &&
                 args->dtype == first->dtype && args->step == first->step;
    if (queue->count == DP_RULE_STEPS || (queue->count > 0 && !alike))
        DP_TRY(dp__train_queue_step(optim));
    queue->group = group;
    queue->args[queue->count++] = *args;
    return DP_OK;
}

static dp_status dp__train_piece_step(const dp__train_optimizer *optim, size_t owner,
                                      const dp__train_run *run, const dp__train_piece *piece,
                                      bool gated)
{
    const dp__train_views *views = &optim->views;
    const dp__train_listed *listed = &views->listed[run->first];
    const dp__train_store *store = &optim->stores[listed->span];
    const dp_tensor *state = &store->state[owner * store->slots];
    const dp_tensor *first = dp__train_data(views, owner, run->first);
    int rank = first->device.index;
    bool whole = optim->config.rule->whole;
    dp__train_turn turn = {
        .data = dp__train_part(first, piece),
        .grad = optim->mirror != NULL
                    ? dp__train_kept_part(&store->grad, piece)
                    : dp__train_part(dp__train_grad(views, owner, run->first), piece)};
    turn.args = (dp_rule_args){.ctx = views->ctx,
                               .local_rank = rank,
                               .dtype = (dp_dtype)first->dtype,
                               .count = piece->count,
                               .param = turn.data.data,
                               .grad = turn.grad.data,
                               .gate = gated ? optim->gates[rank].data : NULL,
                               .step = listed->steps + 1,
                               .hyper = dp__train_hyper_now(optim, listed->group),
                               .name = whole ? optim->names[run->first] : NULL,
                               .ndim = whole ? first->ndim : 0,
                               .zero_grad = optim->zeroes && owner == 0,
                               .shape = whole ? first->shape : NULL};
    for (size_t k = 0; k < store->slots; k++) {
        dp_tensor part = dp__train_kept_part(&state[k], piece);
        if (k < optim->state_count)
            turn.args.state[k] = part.data;
        else
            turn.master = part;
    }
    if (turn.master.data != NULL)
        return dp__train_master_step(optim, &turn, &optim->rooms[rank]);
    return optim->queue != NULL ? dp__train_enqueue(optim, &turn.args, listed->group)
                                : dp__train_rule_run(optim, &turn.args, 0);
}

static dp_status dp__train_run_step(const dp__train_optimizer *optim, size_t owner,
                                    const dp__train_run *run, bool gated)
{
    dp__train_run part = {.first = run->first};
    while (dp__train_next_part(&optim->views, run, &part)) {
        dp__train_piece pieces[DP__TRAIN_PIECES];
        dp__train_pieces(&optim->views, &part, owner, pieces);
        for (int k = 0; k < DP__TRAIN_PIECES; k++)
            if (pieces[k].count > 0)
                DP_TRY(dp__train_piece_step(optim, owner, &part, &pieces[k], gated));
    }
    return DP_OK;
}

/* Group by group, so that those of one are stepped together though others lie between them. */
static dp_status dp__train_owner_step(const dp__train_optimizer *optim, size_t owner, bool gated)
{
    const dp__train_views *views = &optim->views;
    dp_status status = DP_OK;
    for (size_t group = 0; group <= optim->config.group_count; group++)
        for (size_t r = 0; r < views->run_count && status == DP_OK; r++) {
            const dp__train_run *run = &views->runs[r];
            if (views->listed[run->first].group == group && dp__train_has(views, owner, run->first))
                status = dp__train_run_step(optim, owner, run, gated);
        }
    if (optim->queue == NULL)
        return status;
    dp_status last = dp__train_queue_step(optim);
    return status != DP_OK ? status : last;
}

static bool dp__train_is_own(const dp_rule *rule)
{
    return rule == dp_sgd() || rule == dp_adam() || rule == dp_adamw();
}

/* Returns true if a step of all parameters passes over all gradients that dp_zero_grad would zero.
   These are the first owner's: those of others are zeroed when a backward asks for them. */
static bool dp__train_may_zero(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    bool may = dp__train_is_own(optim->config.rule) && optim->mirror == NULL &&
               dp_grads_may_zero(views->module);
    for (size_t r = 0; r < views->run_count && may; r++) {
        const dp__train_run *run = &views->runs[r];
        dp__train_piece pieces[DP__TRAIN_PIECES];
        size_t count = 0;
        dp__train_pieces(views, run, 0, pieces);
        for (int k = 0; k < DP__TRAIN_PIECES; k++)
            count += pieces[k].count;
        may = count == run->count &&
              optim->stores[views->listed[run->first].span].slots == optim->state_count;
    }
    return may;
}

/* Of those who step, all multiply their gradients by this. */
static dp_status dp__train_gates_set(const dp__train_optimizer *optim, double factor)
{
    dp_tensor number;
    for (int rank = 0; rank < optim->views.job.local_count; rank++) {
        if (optim->gates[rank].data == NULL)
            continue;
        DP_TRY(dp_narrow(&optim->gates[rank], 0, 0, 1, &number));
        DP_TRY(dp_fill(optim->views.ctx, &number, dp_float(factor)));
    }
    return DP_OK;
}

/* What the others have stepped of a span. */
static dp_status dp__train_fetch(const dp__train_optimizer *optim, const dp__train_span *span)
{
    const dp__train_views *views = &optim->views;
    for (size_t owner = 0; owner < views->owner_count; owner++) {
        const dp_tensor *first = dp__train_data(views, owner, span->all.first);
        dp_dtype bits = dp__train_bits((dp_dtype)first->dtype);
        optim->all[owner] = dp__train_flat(first, first->data, bits, span->all.count);
    }
    return dp__train_gather(optim, span->each, optim->all);
}

static dp_status dp__train_owners_step(const dp__train_optimizer *optim, double factor)
{
    bool gated = factor < 1 || factor > 1;
    dp_status status = gated ? dp__train_gates_set(optim, factor) : DP_OK;
    for (size_t owner = 0; owner < optim->views.owner_count && status == DP_OK; owner++)
        status = dp__train_owner_step(optim, owner, gated);
    return status;
}

/* by: 1, or -1: it was not made after all. */
static void dp__train_count(dp__train_optimizer *optim, int by)
{
    for (size_t i = 0; i < optim->views.count; i++)
        optim->views.listed[i].steps += by * dp__train_is_used(&optim->views, i);
    optim->steps += by;
}

/* ==== >>applying ================================================================================
   All of a step, and what dp_train_step asks.                                                   */

static dp_status dp__train_fetch_all(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    for (size_t s = 0; s < views->span_count; s++)
        if (views->spans[s].each > 0 && !views->spans[s].once)
            DP_TRY(dp__train_fetch(optim, &views->spans[s]));
    return DP_OK;
}

static dp_status dp__train_optim_steps(dp__train_optimizer *optim, double factor)
{
    if (optim->mirror != NULL)
        return dp__train_mirrors.steps(optim, factor);
    /* a rule that fails here must not make others wait: all send what they have */
    dp_status status = dp__train_owners_step(optim, factor);
    DP_TRY(dp__train_fetch_all(optim));
    return status;
}

/* out_factor: what gradients are to be multiplied by; out_skips: this step is left out. */
static dp_status dp__train_optim_clip(dp__train_optimizer *optim, double *out_factor,
                                      bool *out_skips)
{
    const dp_clip *clip = &optim->config.clip;
    bool clips = clip->norm >= 0, scaled = dp__train_is_scaled(optim);
    bool skips = scaled || clip->skip_if_not_finite, asked = clips || skips;
    double scale = optim->unscaled ? 1 : optim->scale, norm = 0;
    *out_factor = 1 / scale;
    optim->has_norm = false;
    if (asked)
        DP_TRY(dp__train_norm(&optim->views, clip->p, &norm));
    *out_skips = !isfinite(norm) || optim->overflow;
    if (*out_skips && !skips) {
        optim->refused = true;
        return dp__train_not_finite(&optim->views, norm);
    }
    if (clips) {
        optim->has_norm = true;
        optim->norm = norm / scale;
        *out_factor *= dp__train_clip_factor(clip->norm, optim->norm);
    }
    if (scaled && !isfinite((float)(norm * *out_factor)))
        *out_skips = true;
    if (*out_skips || clip->value < 0)
        return DP_OK;
    dp_status status = dp__train_clip_value(&optim->views, clip->value * scale);
    return asked && optim->views.spread ? dp__train_alone(optim->views.ctx, status) : status;
}

/* Gradients that are scattered are for an optimizer of shares, and one that asked for it, which it
   does not where parameters may be hidden; and not for one of another wrapper. */
static dp_status dp__train_is_ours(const dp__train_optimizer *optim)
{
    bool others = !optim->config.sharded || optim->staged;
    if (!dp_grads_are_scattered(optim->views.module))
        return DP_OK;
    if (!others && !dp_grads_are_unseen(optim->views.module))
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "gradients of '%s' are scattered, for another optimizer: "
                    "dp_grads_scatter_set(module, false) comes before a backward",
                    dp_module_name(optim->views.module));
}

/* Returns how a step ended. One that a mirror has begun is made, whatever happened since. */
static dp_status dp__train_ended(const dp__train_optimizer *optim, dp_status status)
{
    return optim->mirror != NULL ? dp__train_mirrors.begun(optim, status) : status;
}

static dp_status dp__train_optim_edit(dp__train_optimizer *optim)
{
    double factor = 1;
    bool skips = false;
    DP_TRY(dp__train_edit(&optim->views, true));
    DP_TRY(dp_edit_shares(optim->views.module));
    DP_TRY(dp__train_look(&optim->views));
    DP_TRY(dp__train_find_grads(&optim->views));
    DP_TRY(dp__train_optim_clip(optim, &factor, &skips));
    optim->zeroes = optim->may_zero && optim->views.all_used && !skips;
    if (!skips) {
        DP_TRY(dp__train_ended(optim, dp__train_optim_steps(optim, factor)));
        dp__train_count(optim, 1);
    }
    optim->skipped += skips;
    dp__train_rescale(optim, skips);
    return optim->zeroes ? dp_grads_zeroed(optim->views.module) : dp_zero_grad(optim->views.module);
}

static dp_status dp__train_optim_apply(dp__train_optimizer *optim)
{
    if (optim->mirror != NULL)
        dp__train_mirrors.turn(optim);
    DP_TRY(dp_edit_begin(optim->views.module, dp__train_is_ours(optim)));
    return dp__train_ended(optim, dp_edit_end(optim->views.module, dp__train_optim_edit(optim)));
}

/* After dp_recover ranks have other numbers. */
static dp_status dp__train_rejoin(dp__train_optimizer *optim)
{
    dp__train_views *views = &optim->views;
    dp_info job;
    DP_TRY(dp_info_get(views->ctx, &job));
    if (job.recoveries == views->job.recoveries)
        return DP_OK;
    if (optim->mirror != NULL)
        return dp__train_mirrors.cut_anew(optim);
    if (optim->config.sharded)
        return dp_error(DP_ERR_STATE,
                        "the state of '%s' was spread over %d ranks, and some have died with their "
                        "parts: make a new optimizer, which can load a checkpoint",
                        dp_module_name(views->module), views->job.rank_count);
    views->job = job;
    dp__train_rank_all(views);
    return DP_OK;
}

/* ---- for dp_train_step ----------------------------------------------------------------------- */

static dp_status dp__train_optim_begin(dp_optim *base, dp_module *module, dp_pass_config *pass)
{
    dp__train_optimizer *optim = dp__train_optimizer_of(base);
    DP_TRY(dp__train_rejoin(optim));
    if (module != optim->views.module)
        return dp_error(DP_ERR_INVALID, "the optimizer was made for '%s', not for '%s'",
                        dp_module_name(optim->views.module), dp_module_name(module));
    pass->no_sync = !dp__train_is_due(optim, optim->done + 1);
    pass->compute_dtype = optim->config.compute_dtype;
    return DP_OK;
}

/* Means over samples are means over the samples of all steps already. */
static double dp__train_loss_factor(const dp__train_optimizer *optim)
{
    double steps = optim->views.sampled > 0 ? 1 : (double)dp__train_gathered(optim);
    return (optim->unscaled ? 1 : optim->scale) / steps;
}

static dp_status dp__train_optim_loss_factor(dp_optim *base, double *out)
{
    *out = dp__train_loss_factor(dp__train_optimizer_of(base));
    return DP_OK;
}

/* Where it is sharded others may wait for this step; dp_train_step, called again, would be another
   one. Nobody waits for one that is refused for its norm, which is that of all ranks. */
static dp_status dp__train_optim_update(dp_optim *base, dp_module *module)
{
    dp__train_optimizer *optim = dp__train_optimizer_of(base);
    (void)module; /* begin has seen it */
    optim->done++;
    if (!dp__train_is_due(optim, optim->done))
        return DP_OK;
    optim->refused = false;
    dp_status status = dp__train_optim_apply(optim);
    optim->done -= optim->refused;
    bool awaited = optim->config.sharded && !optim->refused;
    return awaited ? dp__train_alone(optim->views.ctx, status) : status;
}

static const dp_optim_ops dp__train_ops = {.head = DP_TABLE(dp_optim_ops),
                                           .begin = dp__train_optim_begin,
                                           .loss_factor = dp__train_optim_loss_factor,
                                           .update = dp__train_optim_update};

/* ==== >>groups ==================================================================================
   Which parameters a group is for.                                                              */

/* Whether a name is of a pattern, in which * stands for any characters. */
static bool dp__train_matches(const char *pattern, const char *name)
{
    const char *after = NULL, *back = NULL; /* the last star; from where the name is tried */
    while (*name != '\0') {
        if (*pattern == '*') {
            after = ++pattern;
            back = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (after != NULL) {
            pattern = after;
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

static dp_status dp__train_groups_copy(dp_scope *scope, dp_optim_config *config)
{
    dp_param_group *own = dp_scope_alloc(scope, config->group_count * sizeof *own);
    if (own == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < config->group_count; i++) {
        const dp_param_group *group = &config->groups[i];
        double *factors = dp_scope_alloc(scope, 2 * sizeof *factors);
        const char *match = group->match != NULL ? dp_text(dp_string(scope, group->match)) : NULL;
        if (group->match == NULL)
            return dp_error(DP_ERR_INVALID, "groups[%zu].match is NULL", i);
        if (match == NULL || factors == NULL)
            return dp_no_memory();
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

/* How many characters of a pattern and a name have to change so that they match. */
static size_t dp__train_distance(const char *pattern, const char *name)
{
    enum { MOST = 255 };
    size_t row[MOST + 1], length = strnlen(name, MOST);
    for (size_t i = 0; i <= length; i++)
        row[i] = i;
    for (; *pattern != '\0'; pattern++) {
        bool star = *pattern == '*';
        size_t across = row[0]; /* the row before, one character before */
        row[0] += !star;
        for (size_t i = 1; i <= length; i++) {
            size_t same = across + (*pattern != name[i - 1]), either = row[i];
            across = row[i];
            either = (row[i - 1] < either ? row[i - 1] : either) + !star;
            row[i] = !star && same < either ? same : either;
        }
    }
    return row[length];
}

/* The error for a pattern that no name matches, with the names that are nearest to it. */
static dp_status dp__train_no_match(const dp__train_optimizer *optim, size_t group)
{
    enum { MOST = 3 };
    struct {
        size_t distance;
        const char *name;
    } near[MOST + 1] = {{0}}, other; /* by distance; the last one is the next to compare */
    const char *match = optim->config.groups[group].match;
    char text[256] = "";
    size_t used = 0, count = optim->views.count;
    for (size_t i = 0; i < count; i++) {
        size_t at = i < MOST ? i : MOST;
        near[at].distance = dp__train_distance(match, optim->names[i]);
        near[at].name = optim->names[i];
        for (; at > 0 && near[at].distance < near[at - 1].distance; at--) {
            other = near[at];
            near[at] = near[at - 1];
            near[at - 1] = other;
        }
    }
    for (size_t i = 0; i < MOST && i < count; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s'%.60s'",
                                 i > 0 ? ", " : "; nearest: ", near[i].name);
    return dp_error(DP_ERR_INVALID, "groups[%zu].match is '%s', which no parameter matches%s",
                    group, match, text);
}

/* Names of frozen parameters may be those that a group is for: it has nothing to do then. */
static dp_status dp__train_group_check(const dp__train_optimizer *optim, size_t group)
{
    const dp_param_group *groups = optim->config.groups;
    dp_module *module = optim->views.module;
    bool matches = false;
    for (size_t i = 0; i < optim->views.count; i++)
        if (optim->views.listed[i].group == group)
            return DP_OK;
    for (size_t i = 0; i < dp_module_param_count(module); i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(module, i, &info));
        if (!dp__train_matches(groups[group].match, info.name))
            continue;
        size_t first = dp__train_group_of(&optim->config, info.name);
        if (!info.frozen && !info.buffer)
            return dp_error(
                DP_ERR_INVALID,
                "groups[%zu] ('%s') gets no parameter: '%s', say, is in groups[%zu] ('%s')", group,
                groups[group].match, info.name, first, groups[first].match);
        matches = true;
    }
    return matches ? DP_OK : dp__train_no_match(optim, group);
}

/* ==== >>making ==================================================================================
   Everything that an optimizer has is in a scope of its own.                                    */

static dp_status dp__train_milestones_copy(dp_scope *scope, dp_schedule *schedule)
{
    size_t bytes = schedule->milestone_count * sizeof *schedule->milestones;
    int64_t *own = dp_scope_alloc(scope, bytes);
    if (own == NULL)
        return dp_no_memory();
    if (bytes > 0)
        memcpy(own, schedule->milestones, bytes);
    schedule->milestones = own;
    return DP_OK;
}

/* Defaults are put in; a limit that is not there is below 0. */
static dp_status dp__train_clip_resolve(dp_clip *clip)
{
    double norm = dp_or(clip->norm, -1), value = dp_or(clip->value, -1);
    if (!(dp_or(clip->norm, 0) >= 0 && dp_or(clip->value, 0) >= 0) || (norm >= 0 && value >= 0))
        return dp_error(DP_ERR_INVALID, "clip.norm is %g and clip.value %g: one of them, above 0",
                        clip->norm, clip->value);
    *clip = (dp_clip){norm, dp_or(clip->p, 2), value, clip->skip_if_not_finite};
    return dp__train_clip_check(clip->p, 1);
}

static dp_status dp__train_scale_resolve(dp_loss_scale *scale)
{
    if (scale->scale != 0 && !dp__train_is_scale(scale->scale))
        return dp_error(DP_ERR_INVALID, "scale.scale is %g, not from %g to %g",
                        dp_or(scale->scale, 0), (double)FLT_MIN, (double)FLT_MAX);
    if (scale->dynamic) {
        scale->scale = dp_or(scale->scale, 65536);
        scale->growth = dp_or(scale->growth, 2);
        scale->backoff = dp_or(scale->backoff, 0.5);
        scale->interval = scale->interval == 0 ? 2000 : scale->interval;
    }
    if (scale->dynamic && (!(scale->growth > 1) || !isfinite(scale->growth) ||
                           !(scale->backoff > 0 && scale->backoff < 1) || scale->interval < 1))
        return dp_error(DP_ERR_INVALID,
                        "scale: times %g after %lld steps, which is not above 1, or times %g, "
                        "which is not between 0 and 1",
                        scale->growth, (long long)scale->interval, scale->backoff);
    return DP_OK;
}

/* Puts in the defaults of all that a config has. */
static dp_status dp__train_optim_check(dp_optim_config *config)
{
    config->rule = config->rule != NULL ? config->rule : dp_sgd();
    if (!DP_FITS(dp_rule, config->rule))
        return dp_error(DP_ERR_INVALID,
                        "rule is a table of layout %u and size %u, dp_train.h's have layout %d and "
                        "size %zu: it was compiled with another one, or its head is not DP_TABLE",
                        config->rule->head.layout, config->rule->head.size, DP_LAYOUT,
                        sizeof *config->rule);
    if (config->rule->head.size < sizeof *config->rule || config->rule->step == NULL)
        return dp_error(DP_ERR_INVALID, "rule has no step");
    if (config->rule->name == NULL)
        return dp_error(DP_ERR_INVALID, "rule has no name");
    if (config->accumulate < 0)
        return dp_error(DP_ERR_INVALID, "accumulate is %d", config->accumulate);
    config->accumulate = config->accumulate == 0 ? 1 : config->accumulate;
    if ((unsigned)config->compute_dtype > DP_BF16)
        return dp_error(DP_ERR_INVALID, "compute_dtype is %d, not a floating dtype",
                        (int)config->compute_dtype);
    if (config->group_count > 0 && config->groups == NULL)
        return dp_error(DP_ERR_INVALID, "groups is NULL");
    DP_TRY(dp__train_clip_resolve(&config->clip));
    DP_TRY(dp__train_scale_resolve(&config->scale));
    DP_TRY(dp__train_hyper_resolve(&config->hyper));
    DP_TRY(dp__train_schedule_check(&config->schedule));
    return config->rule->check != NULL ? config->rule->check(&config->hyper) : DP_OK;
}

/* ---- an optimizer's memory ------------------------------------------------------------------- */

static bool dp__train_is_half(dp_dtype dtype)
{
    return dtype == DP_F16 || dtype == DP_BF16;
}

/* How many elements an owner has the state of. */
static size_t dp__train_kept(const dp__train_views *views, const dp__train_run *all, size_t owner)
{
    dp__train_piece pieces[DP__TRAIN_PIECES];
    size_t count = 0;
    dp__train_pieces(views, all, owner, pieces);
    for (int k = 0; k < DP__TRAIN_PIECES; k++)
        count += pieces[k].count;
    return count;
}

/* Zeros for the pieces that an owner has. */
static dp_status dp__train_state_make(const dp__train_optimizer *optim, const dp__train_run *all,
                                      size_t owner, dp_tensor *out)
{
    const dp__train_views *views = &optim->views;
    const dp_tensor *first = dp__train_data(views, owner, all->first);
    dp_dtype dtype = first->dtype == DP_F64 ? DP_F64 : DP_F32;
    const int64_t count = (int64_t)dp__train_kept(views, all, owner);
    DP_TRY(dp_tensor_new(optim->scope, first->device, dtype, 1, &count, out));
    return dp_fill(views->ctx, out, dp_float(0));
}

/* The master copy begins as the parameter of the first owner is: others follow at a forward. */
static dp_status dp__train_master_make(const dp__train_optimizer *optim, const dp__train_run *all,
                                       size_t owner, const dp_tensor *master)
{
    const dp__train_views *views = &optim->views;
    const dp_tensor *first = dp__train_data(views, 0, all->first);
    dp__train_piece pieces[DP__TRAIN_PIECES];
    dp__train_pieces(views, all, owner, pieces);
    for (int k = 0; k < DP__TRAIN_PIECES; k++) {
        dp_tensor from = dp__train_part(first, &pieces[k]);
        dp_tensor to = dp__train_kept_part(master, &pieces[k]);
        DP_TRY(dp_cast(views->ctx, &to, &from));
    }
    return DP_OK;
}

static dp_status dp__train_store_make(dp__train_optimizer *optim, size_t s)
{
    const dp__train_views *views = &optim->views;
    const dp__train_run *all = &views->spans[s].all;
    const dp_tensor *first = dp__train_data(views, 0, all->first);
    dp__train_store *store = &optim->stores[s];
    dp_dtype dtype = (dp_dtype)first->dtype;
    bool master = optim->config.masters && dp__train_is_half(dtype);
    store->slots = optim->state_count + master;
    store->state =
        dp_scope_alloc(optim->scope, views->owner_count * store->slots * sizeof *store->state);
    if (store->state == NULL)
        return dp_no_memory();
    for (size_t owner = 0; owner < views->owner_count; owner++) {
        dp_tensor *state = &store->state[owner * store->slots];
        if (!dp__train_has(views, owner, all->first))
            continue;
        for (size_t k = 0; k < store->slots; k++)
            DP_TRY(dp__train_state_make(optim, all, owner, &state[k]));
        if (master)
            DP_TRY(dp__train_master_make(optim, all, owner, &state[optim->state_count]));
    }
    if (optim->mirror == NULL)
        return DP_OK;
    return dp__train_mirrors.room(optim, store, first, (int64_t)dp__train_kept(views, all, 0));
}

/* How many elements a master copy is stepped by at a time; 0: there is none. */
static int64_t dp__train_room(const dp__train_optimizer *optim)
{
    const int64_t usual = 1 << 20;
    const dp__train_views *views = &optim->views;
    int64_t room = 0;
    for (size_t r = 0; r < views->run_count; r++) {
        const dp__train_run *run = &views->runs[r];
        if (optim->stores[views->listed[run->first].span].slots > optim->state_count &&
            (int64_t)run->count > room)
            room = (int64_t)run->count;
    }
    return optim->config.rule->whole ? room : dp__train_least(room, usual);
}

/* A device on which parameters lie has a gate, and room for their gradients in f32. */
static dp_status dp__train_room_make(dp__train_optimizer *optim, int local_rank, int64_t room)
{
    const int64_t two = 2;
    dp_device device = dp_local_device(optim->views.ctx, local_rank);
    dp_tensor *gate = &optim->gates[local_rank];
    if (gate->data != NULL)
        return DP_OK;
    DP_TRY(dp_tensor_new(optim->scope, device, DP_F64, 1, &two, gate));
    DP_TRY(dp_fill(optim->views.ctx, gate, dp_float(0)));
    return dp_tensor_new(optim->scope, device, DP_F32, 1, &room, &optim->rooms[local_rank]);
}

static dp_status dp__train_rooms_make(dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    const int64_t room = dp__train_room(optim);
    size_t bytes = (size_t)views->job.local_count * sizeof *optim->gates;
    optim->gates = dp_scope_alloc(optim->scope, bytes);
    optim->rooms = dp_scope_alloc(optim->scope, bytes);
    if (optim->gates == NULL || optim->rooms == NULL)
        return dp_no_memory();
    memset(optim->gates, 0, bytes);
    for (size_t owner = 0; owner < views->owner_count; owner++)
        for (size_t i = 0; i < views->count; i++)
            if (dp__train_has(views, owner, i))
                DP_TRY(dp__train_room_make(optim, dp__train_data(views, owner, i)->device.index,
                                           room));
    return DP_OK;
}

/* What gathering needs is there before the first step: then it does not fail on one rank alone. */
static dp_status dp__train_stages_make(dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    const int64_t room = DP__TRAIN_STAGE;
    size_t local = (size_t)views->job.local_count;
    optim->parts = dp_scope_alloc(optim->scope, local * sizeof *optim->parts);
    optim->stages = dp_scope_alloc(optim->scope, local * sizeof *optim->stages);
    optim->all = dp_scope_alloc(optim->scope, views->owner_count * sizeof *optim->all);
    if (optim->parts == NULL || optim->stages == NULL || optim->all == NULL)
        return dp_no_memory();
    for (size_t r = 0; r < local && optim->staged; r++)
        DP_TRY(dp_tensor_new(optim->scope, dp_local_device(views->ctx, (int)r), DP_I64, 1, &room,
                             &optim->stages[r]));
    return DP_OK;
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Names, and groups: a rule that wants parameters whole gets each by itself. */
static dp_status dp__train_names_make(dp__train_optimizer *optim)
{
    dp__train_views *views = &optim->views;
    optim->names = dp_scope_alloc(optim->scope, views->count * sizeof *optim->names);
    if (optim->names == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < views->count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(views->module, views->listed[i].param, &info));
        optim->names[i] = dp_text(dp_string(optim->scope, info.name));
        if (optim->names[i] == NULL)
            return dp_no_memory();
        views->listed[i].group = dp__train_group_of(&optim->config, optim->names[i]);
    }
    dp__train_cut(views, optim->config.rule->whole);
    return DP_OK;
}

/* What is no mean over samples is divided by the number of steps with the loss, all of it. */
static dp_status dp__train_accumulate_check(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    if (optim->config.accumulate == 1 || views->sampled == 0 || views->sampled == views->count)
        return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "accumulate is %d: of %zu parameters of '%s' %zu have gradients that are means "
                    "over samples, and the others have not",
                    optim->config.accumulate, views->count, dp_module_name(views->module),
                    views->sampled);
}

static dp_status dp__train_sharded_check(const dp__train_optimizer *optim)
{
    const dp__train_views *views = &optim->views;
    for (size_t s = 0; s < views->span_count && !optim->config.sharded; s++)
        if (views->spans[s].once)
            return dp_error(DP_ERR_INVALID,
                            "the processes share parameters of '%s' (share_params): set sharded, "
                            "so that each steps a part of them",
                            dp_module_name(views->module));
    if (!optim->config.sharded)
        return DP_OK;
    if (optim->config.rule->whole)
        return dp_error(DP_ERR_INVALID, "sharded: rule '%s' needs whole parameters",
                        optim->config.rule->name);
    if (dp__train_first_reduced(views) < views->count)
        return DP_OK;
    return dp_is_wrapper(views->module)
               ? dp_error(DP_ERR_INVALID, "sharded: '%s' has no parameter that ranks reduce",
                          dp_module_name(views->module))
               : dp_error(DP_ERR_INVALID,
                          "sharded: '%s' is no wrapper over ranks: make the optimizer for the one "
                          "that dp_distributed or dp_separate_distributed has made of it, or of "
                          "its parent",
                          dp_module_name(views->module));
}

/* All processes gather in the same way, whatever their devices are. `status`: whether this one has
   an optimizer. */
static dp_status dp__train_sharded_begin(dp_ctx *ctx, dp__train_optimizer *optim, dp_status status)
{
    DP_TRY(dp_agree(ctx, status));
    const dp__train_views *views = &optim->views;
    DP_TRY(dp_any(ctx, optim->staged, &optim->staged));
    DP_TRY(dp_agree(ctx, dp__train_stages_make(optim)));
    status = optim->staged ? DP_OK : dp_grads_scatter_set(views->module, true);
    return status == DP_ERR_UNSUPPORTED ? DP_OK : status; /* then all get all of them */
}

static dp_status dp__train_queue_make(dp__train_optimizer *optim)
{
    if (optim->config.rule->steps == NULL)
        return DP_OK;
    optim->queue = dp_scope_alloc(optim->scope, sizeof *optim->queue);
    if (optim->queue == NULL)
        return dp_no_memory();
    optim->queue->count = 0;
    return DP_OK;
}

static dp_status dp__train_optim_fill(dp__train_optimizer *optim)
{
    const dp_rule *rule = optim->config.rule;
    int states = rule->state_count != NULL ? rule->state_count(&optim->config.hyper) : 0;
    if (states < 0 || states > DP_RULE_STATES)
        return dp_error(DP_ERR_INVALID, "rule '%s' needs %d states, the limit is %d", rule->name,
                        states, DP_RULE_STATES);
    optim->state_count = (size_t)states;
    DP_TRY(dp__train_names_make(optim));
    for (size_t i = 0; i < optim->config.group_count; i++)
        DP_TRY(dp__train_group_check(optim, i));
    DP_TRY(dp__train_sharded_check(optim));
    DP_TRY(dp__train_accumulate_check(optim));
    if (optim->config.mirrored)
        DP_TRY(dp__train_mirrors.make(optim));
    if (optim->config.sharded)
        DP_TRY(dp__train_hides(&optim->views, &optim->staged));
    size_t span_count = optim->views.span_count;
    optim->stores = dp_scope_alloc(optim->scope, span_count * sizeof *optim->stores);
    if (optim->stores == NULL)
        return dp_no_memory();
    DP_TRY(dp__train_queue_make(optim));
    for (size_t s = 0; s < span_count; s++)
        DP_TRY(dp__train_store_make(optim, s));
    optim->may_zero = dp__train_may_zero(optim);
    return dp__train_rooms_make(optim);
}

/* All but the struct. `config` is checked, and has arrays of others. */
static dp_status dp__train_optim_build(dp_module *module, dp__train_optimizer *optim)
{
    DP_TRY(dp__train_groups_copy(optim->scope, &optim->config));
    DP_TRY(dp__train_milestones_copy(optim->scope, &optim->config.schedule));
    DP_TRY(dp__train_views_make(module, optim->scope, optim->config.sharded, &optim->views));
    return dp__train_optim_fill(optim);
}

static dp_status dp__train_optim_make(dp_module *module, const dp_optim_config *config,
                                      const dp__train_ring *ring, dp_scope *home,
                                      dp__train_optimizer **out)
{
    dp__train_optimizer *optim = dp_scope_alloc(home, sizeof *optim);
    if (optim == NULL)
        return dp_no_memory();
    *optim = (dp__train_optimizer){.base = {&dp__train_ops},
                                   .home = home,
                                   .scope = config->mirrored ? dp_scope_child(home) : home,
                                   .config = *config,
                                   .ring = *ring,
                                   .total = -1,
                                   .scale = 1};
    DP_TRY(dp_scope_check(optim->scope));
    DP_TRY(dp__train_optim_check(&optim->config));
    if (dp__train_is_scaled(optim))
        optim->scale = optim->config.scale.scale;
    *out = optim;
    return dp__train_optim_build(module, optim);
}

/* Makes what all processes make together. `before`: see dp__train_mirror_ops.join. */
static dp_status dp__train_optim_begin_all(dp_ctx *ctx, dp__train_optimizer *optim,
                                           dp__train_optimizer *before, dp_status status)
{
    DP_TRY(dp__train_sharded_begin(ctx, optim, status));
    bool mirrored = optim != NULL && optim->mirror != NULL;
    return mirrored ? dp__train_mirrors.join(optim, before) : DP_OK;
}

DP_API dp_status dp_optim_create(dp_module *module, const dp_optim_config *config, dp_optim **out)
{
    dp__train_optimizer *optim = NULL;
    dp__train_ring ring = {0, 0};
    DP_TRY(dp_check_pointer(__func__, "config", config));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (config->mirrored && dp__train_mirrors.begin == NULL)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: mirrored: the file that defines DP_IMPLEMENTATION has to include "
                        "dp_mirror.h",
                        __func__);
    if (dp_module_ctx(module) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", __func__);
    dp_ctx *ctx = dp_module_ctx(module);
    if (config->sharded && config->mirrored)
        DP_TRY(dp_error_in(__func__, dp__train_mirrors.begin(ctx, &ring)));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_scope_check(scope);
    if (status == DP_OK)
        status = dp__train_optim_make(module, config, &ring, scope, &optim);
    if (config->sharded) /* others wait for it, however it went */
        status = dp__train_optim_begin_all(ctx, optim, NULL, status);
    else if (status == DP_OK)
        status = dp_grads_scatter_set(module, false);
    if (status == DP_OK)
        *out = &optim->base;
    else
        dp_scope_end(scope);
    return dp_error_in(__func__, status);
}

DP_API void dp_optim_destroy(dp_optim *optim)
{
    if (optim != NULL)
        dp_scope_end(dp__train_optimizer_of(optim)->home);
}

/* ==== >>asking ==================================================================================
   What a loop asks an optimizer, and tells it.                                                  */

static dp_status dp__train_optim_valid(const char *fn, const dp_optim *optim)
{
    if (optim == NULL || optim->ops != &dp__train_ops)
        return dp_error(DP_ERR_INVALID, "%s: not an optimizer by dp_optim_create", fn);
    return DP_OK;
}

DP_API dp_status dp_optim_step(dp_optim *optim)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    DP_TRY(dp_error_in(__func__, dp__train_rejoin(dp__train_optimizer_of(optim))));
    return dp_error_in(__func__, dp__train_optim_apply(dp__train_optimizer_of(optim)));
}

/* Those whose numbers, divided, are no longer what they were. */
static dp_status dp__train_wide_grads(const dp__train_optimizer *optim)
{
    for (size_t i = 0; i < optim->views.count; i++)
        if (dp__train_grad(&optim->views, 0, i)->dtype == DP_F16)
            return dp_error(DP_ERR_UNSUPPORTED,
                            "the gradient of '%s' is f16, in which small numbers would vanish when "
                            "they are divided: a step divides them in f32",
                            optim->names[i]);
    return DP_OK;
}

static dp_status dp__train_optim_unscale(dp__train_optimizer *optim)
{
    double norm = 0;
    DP_TRY(dp__train_rejoin(optim));
    if (!dp__train_is_scaled(optim))
        return dp_error(DP_ERR_STATE, "losses are not scaled");
    if (optim->unscaled)
        return dp_error(DP_ERR_STATE, "gradients of this step were divided by the scale already");
    DP_TRY(dp__train_is_ours(optim));
    DP_TRY(dp__train_wide_grads(optim));
    DP_TRY(dp__train_ask(&optim->views));
    DP_TRY(dp__train_norm(&optim->views, 2, &norm));
    DP_TRY(dp__train_scale_all(&optim->views, 1 / optim->scale));
    optim->overflow = !isfinite(norm);
    optim->unscaled = true;
    return DP_OK;
}

DP_API dp_status dp_optim_unscale(dp_optim *optim)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    return dp_error_in(__func__, dp__train_optim_unscale(dp__train_optimizer_of(optim)));
}

DP_API dp_status dp_optim_progress(dp_optim *optim, int64_t done, int64_t total)
{
    DP_TRY(dp__train_optim_valid(__func__, optim));
    if (done < 0 || done > DP__TRAIN_COUNT_MAX || total < -1 || (total >= 0 && done > total))
        return dp_error(DP_ERR_INVALID, "%s: %lld of %lld are done", __func__, (long long)done,
                        (long long)total);
    dp__train_optimizer_of(optim)->done = done;
    dp__train_optimizer_of(optim)->total = total;
    return DP_OK;
}

static size_t dp__train_state_bytes(const dp__train_optimizer *optim)
{
    size_t bytes = 0;
    for (size_t s = 0; s < optim->views.span_count; s++)
        for (size_t k = 0; k < optim->stores[s].slots; k++)
            bytes += dp__train_bytes(&optim->stores[s].state[k]);
    return bytes;
}

DP_API dp_status dp_optim_info_get(const dp_optim *base, dp_optim_info *out)
{
    DP_TRY(dp__train_optim_valid(__func__, base));
    DP_TRY(dp_check_pointer(__func__, "out", out));
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
                           .scale = optim->scale,
                           .loss_factor = dp__train_loss_factor(optim),
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

/* ==== >>keeping =================================================================================
   What goes into checkpoints and comes out of them: tensors of the parameters' shapes, however
   state is cut here.                                                                            */

/* The end of what processes share, which the first of them has, in the memory of all. */
static dp_status dp__train_end_send(const dp__train_optimizer *optim, dp_scope *temp, size_t s,
                                    const dp_tensor *all)
{
    const dp__train_views *views = &optim->views;
    size_t cut = views->spans[s].each * (size_t)views->job.rank_count;
    const int64_t rest = (int64_t)(views->spans[s].all.count - cut);
    dp_tensor end, other;
    DP_TRY(dp_narrow(all, 0, (int64_t)cut, rest, &end));
    for (size_t r = 0; r < (size_t)views->job.local_count; r++) {
        other = end;
        if (r > 0)
            DP_TRY(dp_tensor_new(temp, dp_local_device(views->ctx, (int)r), (dp_dtype)end.dtype, 1,
                                 &rest, &other));
        optim->parts[r] = (dp_part){.send = end.data, .recv = other.data};
    }
    return dp_broadcast(views->ctx, optim->parts, (size_t)rest, (dp_dtype)end.dtype, 0);
}

/* A span's state on the first owner's device, the other ranks' parts too. */
static dp_status dp__train_state_whole(const dp__train_optimizer *optim, dp_scope *temp, size_t s,
                                       size_t k, dp_tensor *out)
{
    const dp__train_views *views = &optim->views;
    const dp__train_store *store = &optim->stores[s];
    const int64_t count = (int64_t)views->spans[s].all.count;
    *out = store->state[k];
    if (views->spans[s].each == 0 && !views->spans[s].once)
        return DP_OK;
    for (size_t owner = 0; owner < views->owner_count; owner++) {
        const dp_tensor *state = &store->state[owner * store->slots + k];
        dp_tensor *all = &optim->all[owner];
        DP_TRY(dp_tensor_new(temp, state->device, (dp_dtype)state->dtype, 1, &count, all));
        DP_TRY(dp__train_pieces_copy(views, s, owner, state, all, true));
        all->dtype = (uint8_t)dp__train_bits((dp_dtype)all->dtype);
    }
    if (views->spans[s].each > 0)
        DP_TRY(dp__train_gather(optim, views->spans[s].each, optim->all));
    if (views->spans[s].once)
        DP_TRY(dp__train_end_send(optim, temp, s, &optim->all[0]));
    *out = optim->all[0];
    out->dtype = store->state[k].dtype;
    return DP_OK;
}

/* The part of a span's state that is a parameter's: a copy on the host, or a view. */
static dp_status dp__train_param_save(const dp__train_optimizer *optim, dp_scope *scope, size_t i,
                                      const dp_tensor *whole, bool copy, dp_value *out)
{
    const dp_tensor *data = dp__train_data(&optim->views, 0, i);
    dp_tensor own;
    DP_TRY(dp_narrow(whole, 0, (int64_t)optim->views.listed[i].at, dp_tensor_count(data), &own));
    DP_TRY(dp_reshape(&own, data->ndim, data->shape, &own));
    own.read_only = true;
    if (copy)
        DP_TRY(dp_tensor_to(scope, (dp_device){0, 0}, (dp_dtype)own.dtype, &own, &own));
    *out = dp_of(scope, &own);
    return DP_OK;
}

static dp_status dp__train_span_save(const dp__train_optimizer *optim, dp_scope *scope, size_t s,
                                     bool copy, dp_value *items)
{
    const dp__train_run *all = &optim->views.spans[s].all;
    size_t slots = optim->stores[s].slots;
    dp_scope *temp = dp_scope_begin(optim->views.ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = DP_OK;
    for (size_t k = 0; k < slots && status == DP_OK; k++) {
        dp_tensor whole;
        status = dp__train_state_whole(optim, temp, s, k, &whole);
        bool gathered = status == DP_OK && whole.data != optim->stores[s].state[k].data;
        for (size_t p = 0; p < all->param_count && status == DP_OK; p++)
            status = dp__train_param_save(optim, scope, all->first + p, &whole, copy || gathered,
                                          &items[p * slots + k]);
    }
    dp_scope_end(temp);
    return status;
}

/* How often each parameter was stepped; none if all were as often. `pairs` has room for all. */
static dp_status dp__train_counts_save(const dp__train_optimizer *optim, dp_scope *scope,
                                       dp_pair *pairs, dp_value *out)
{
    const dp__train_views *views = &optim->views;
    bool alike = true;
    for (size_t i = 0; i < views->count; i++) {
        pairs[views->listed[i].number] = (dp_pair){optim->names[i], dp_int(views->listed[i].steps)};
        alike = alike && views->listed[i].steps == optim->steps;
    }
    *out = dp_none();
    return alike ? DP_OK : dp_made(dp_dict_make(scope, pairs, views->count), out);
}

static dp_status dp__train_state_save(const dp__train_optimizer *optim, dp_scope *scope, bool copy,
                                      dp_value *out)
{
    const dp__train_views *views = &optim->views;
    dp_pair *pairs = dp_scope_alloc(scope, views->count * sizeof *pairs);
    dp_value *items =
        dp_scope_alloc(scope, views->count * (optim->state_count + 1) * sizeof *items);
    dp_value counts;
    if (pairs == NULL || items == NULL)
        return dp_no_memory();
    DP_TRY(dp__train_counts_save(optim, scope, pairs, &counts));
    for (size_t s = 0; s < views->span_count; s++) {
        const dp__train_run *run = &views->spans[s].all;
        size_t slots = optim->stores[s].slots;
        DP_TRY(dp__train_span_save(optim, scope, s, copy, items));
        for (size_t p = 0; p < run->param_count; p++)
            pairs[views->listed[run->first + p].number] =
                (dp_pair){optim->names[run->first + p],
                          dp_list_make(scope, DP_LIST, items + p * slots, slots)};
    }
    const dp_pair all[] = {{"rule", dp_string(scope, optim->config.rule->name)},
                           {"done", dp_int(optim->done)},
                           {"steps", dp_int(optim->steps)},
                           {"skipped", dp_int(optim->skipped)},
                           {"good", dp_int(optim->good)},
                           {"scale", dp_float(optim->scale)},
                           {"state", dp_dict_make(scope, pairs, views->count)},
                           {"param_steps", counts}};
    size_t count = sizeof all / sizeof all[0];
    return dp_made(dp_dict_make(scope, all, counts.kind == DP_NONE ? count - 1 : count), out);
}

static dp_status dp__train_optim_save(const char *fn, dp_optim *optim, dp_scope *scope, bool copy,
                                      dp_value *out)
{
    dp__train_optimizer *own = dp__train_optimizer_of(optim);
    DP_TRY(dp__train_optim_valid(fn, optim));
    DP_TRY(dp_check_scope(fn, scope, own->views.ctx));
    DP_TRY(dp_check_pointer(fn, "out", out));
    DP_TRY(dp_error_in(fn, dp__train_rejoin(own)));
    return dp_error_in(fn, dp__train_state_save(own, scope, copy, out));
}

DP_API dp_status dp_optim_save(dp_optim *optim, dp_scope *scope, dp_value *out)
{
    return dp__train_optim_save(__func__, optim, scope, true, out);
}

DP_API dp_status dp_optim_view(dp_optim *optim, dp_scope *scope, dp_value *out)
{
    return dp__train_optim_save(__func__, optim, scope, false, out);
}

/* ---- brought back ---------------------------------------------------------------------------- */

static dp_status dp__train_state_check(const dp__train_optimizer *optim, size_t i, dp_value saved)
{
    const dp_tensor *data = dp__train_data(&optim->views, 0, i);
    size_t slots = optim->stores[optim->views.listed[i].span].slots;
    dp_dtype dtype = data->dtype == DP_F64 ? DP_F64 : DP_F32;
    if (dp_count(saved) != slots)
        return dp_error(DP_ERR_MISMATCH, "'%s' has %zu tensors of state, %zu were saved",
                        optim->names[i], slots, dp_count(saved));
    for (size_t k = 0; k < slots; k++) {
        const dp_tensor *from;
        DP_TRY(dp_as_tensor(dp_at(saved, k), optim->names[i], dtype, data->ndim, &from));
        for (int d = 0; d < data->ndim; d++)
            if (from->shape[d] != data->shape[d])
                return dp_error(DP_ERR_MISMATCH, "dim %d of the state of '%s' is %lld, saved %lld",
                                d, optim->names[i], (long long)data->shape[d],
                                (long long)from->shape[d]);
    }
    return DP_OK;
}

static dp_status dp__train_counts_check(dp_value saved)
{
    static const char *const counts[] = {"done", "steps", "skipped", "good"};
    dp_value scale = dp_get(saved, "scale");
    for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
        dp_value count = dp_get(saved, counts[k]);
        if (count.kind != DP_INT || count.as.i < 0 || count.as.i > DP__TRAIN_COUNT_MAX)
            return dp_error(DP_ERR_MISMATCH, "'%s' is missing, or not a count", counts[k]);
    }
    if (scale.kind != DP_FLOAT || !dp__train_is_scale(scale.as.f))
        return dp_error(DP_ERR_MISMATCH, "'scale' is missing, or not from %g to %g",
                        (double)FLT_MIN, (double)FLT_MAX);
    return DP_OK;
}

/* They are usually in the order of the parameters. */
static dp_value dp__train_saved_of(const dp__train_optimizer *optim, dp_value state, size_t i)
{
    const char *name = optim->names[i];
    size_t number = optim->views.listed[i].number;
    if (state.kind == DP_DICT && number < dp_count(state) &&
        strcmp(state.as.pairs[number].key, name) == 0)
        return state.as.pairs[number].value;
    return dp_get(state, name);
}

static dp_status dp__train_param_counts_check(const dp__train_optimizer *optim, dp_value saved)
{
    dp_value counts = dp_get(saved, "param_steps");
    int64_t most = dp_get(saved, "steps").as.i;
    for (size_t i = 0; i < optim->views.count && counts.kind != DP_NONE; i++) {
        dp_value count = dp__train_saved_of(optim, counts, i);
        if (count.kind != DP_INT || count.as.i < 0 || count.as.i > most)
            return dp_error(DP_ERR_MISMATCH, "'param_steps' of '%s' is missing, or not a count",
                            optim->names[i]);
    }
    return DP_OK;
}

static dp_status dp__train_saved_check(const dp__train_optimizer *optim, dp_value saved)
{
    const dp__train_views *views = &optim->views;
    const char *rule = dp_text(dp_get(saved, "rule"));
    dp_value state = dp_get(saved, "state");
    if (rule == NULL || strcmp(rule, optim->config.rule->name) != 0)
        return dp_error(DP_ERR_MISMATCH, "the rule is '%s', saved '%s'", optim->config.rule->name,
                        rule != NULL ? rule : "");
    DP_TRY(dp__train_counts_check(saved));
    DP_TRY(dp__train_param_counts_check(optim, saved));
    for (size_t i = 0; i < views->count; i++)
        DP_TRY(dp__train_state_check(optim, i, dp__train_saved_of(optim, state, i)));
    if (dp_count(state) != views->count)
        return dp_error(DP_ERR_MISMATCH, "%zu parameters, saved %zu", views->count,
                        dp_count(state));
    return DP_OK;
}

/* A parameter's elements, as far as an owner keeps them. */
static dp_status dp__train_state_put(const dp__train_optimizer *optim, size_t i, size_t owner,
                                     size_t k, const dp_tensor *from)
{
    const dp__train_views *views = &optim->views;
    const dp__train_listed *listed = &views->listed[i];
    const dp__train_store *store = &optim->stores[listed->span];
    size_t at = listed->at, count = (size_t)dp_tensor_count(from);
    dp_tensor dense = dp__train_flat(from, from->data, (dp_dtype)from->dtype, count);
    dp__train_piece pieces[DP__TRAIN_PIECES];
    dp__train_pieces(views, &views->spans[listed->span].all, owner, pieces);
    for (int p = 0; p < DP__TRAIN_PIECES; p++) {
        const dp__train_piece *piece = &pieces[p];
        size_t first = at > piece->first ? at : piece->first;
        size_t end = piece->first + piece->count, last = at + count < end ? at + count : end;
        dp_tensor own, to;
        if (first >= last)
            continue;
        DP_TRY(dp_narrow(&dense, 0, (int64_t)(first - at), (int64_t)(last - first), &own));
        DP_TRY(dp_narrow(&store->state[owner * store->slots + k], 0,
                         (int64_t)(piece->at + first - piece->first), (int64_t)(last - first),
                         &to));
        DP_TRY(dp_copy(views->ctx, &to, &own, NULL));
    }
    return DP_OK;
}

/* All that was saved, parameter by parameter, as state_put wants it. What needs memory for that has
   it before anything is changed. */
static dp_status dp__train_saved_dense(const dp__train_optimizer *optim, dp_scope *temp,
                                       dp_value state, dp_tensor *out)
{
    for (size_t i = 0; i < optim->views.count; i++) {
        dp_value saved = dp__train_saved_of(optim, state, i);
        for (size_t k = 0; k < dp_count(saved); k++)
            DP_TRY(dp_contiguous(temp, dp_at(saved, k).as.t, out++));
    }
    return DP_OK;
}

static dp_status dp__train_states_load(const dp__train_optimizer *optim, dp_scope *temp,
                                       dp_value state)
{
    const dp__train_views *views = &optim->views;
    size_t most = views->count * (optim->state_count + 1); /* and a master copy */
    dp_tensor *saved = dp_scope_alloc(temp, most * sizeof *saved);
    if (saved == NULL)
        return dp_no_memory();
    DP_TRY(dp__train_saved_dense(optim, temp, state, saved));
    for (size_t i = 0; i < views->count; i++)
        for (size_t k = 0; k < optim->stores[views->listed[i].span].slots; k++, saved++)
            for (size_t owner = 0; owner < views->owner_count; owner++)
                if (dp__train_has(views, owner, i))
                    DP_TRY(dp__train_state_put(optim, i, owner, k, saved));
    return dp_wait(views->ctx); /* what was saved may go */
}

/* A file in which all were stepped as often has no counts. */
static void dp__train_counts_load(dp__train_optimizer *optim, dp_value counts)
{
    for (size_t i = 0; i < optim->views.count; i++) {
        bool some = counts.kind == DP_DICT;
        optim->views.listed[i].steps = some ? dp__train_saved_of(optim, counts, i).as.i
                                            : optim->steps;
    }
}

DP_API dp_status dp_optim_load(dp_optim *base, dp_value saved)
{
    DP_TRY(dp__train_optim_valid(__func__, base));
    dp__train_optimizer *optim = dp__train_optimizer_of(base);
    DP_TRY(dp_error_in(__func__, dp__train_rejoin(optim)));
    DP_TRY(dp_error_in(__func__, dp__train_saved_check(optim, saved)));
    dp_scope *temp = dp_scope_begin(optim->views.ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__train_states_load(optim, temp, dp_get(saved, "state"));
    dp_scope_end(temp);
    DP_TRY(dp_error_in(__func__, status));
    optim->done = dp_get(saved, "done").as.i;
    optim->steps = dp_get(saved, "steps").as.i;
    optim->skipped = dp_get(saved, "skipped").as.i;
    dp__train_counts_load(optim, dp_get(saved, "param_steps"));
    if (optim->config.scale.dynamic) {
        optim->good = dp_get(saved, "good").as.i;
        optim->scale = dp_get(saved, "scale").as.f;
    }
    optim->unscaled = optim->overflow = false;
    return DP_OK;
}

/* ==== >>naming ==================================================================================
   Each is checked before anything is done to one.                                               */

static dp_status dp__train_optims_check(const char *fn, const dp_named_optim *optims, size_t count)
{
    if (optims == NULL && count > 0)
        return dp_error(DP_ERR_INVALID, "%s: optims is NULL", fn);
    for (size_t i = 0; i < count; i++) {
        const char *name = optims[i].name;
        DP_TRY(dp__train_optim_valid(fn, optims[i].optim));
        if (count > 1 && (name == NULL || *name == '\0'))
            return dp_error(DP_ERR_INVALID, "%s: optimizer %zu of %zu has no name", fn, i, count);
        for (size_t k = 0; k < i; k++)
            if (strcmp(optims[k].name, name) == 0)
                return dp_error(DP_ERR_INVALID, "%s: two optimizers have the name '%s'", fn, name);
    }
    return DP_OK;
}

static bool dp__train_unnamed(const dp_named_optim *optims, size_t count)
{
    return count == 1 && (optims[0].name == NULL || *optims[0].name == '\0');
}

DP_API dp_status dp_optims_save(const dp_named_optim *optims, size_t count, dp_scope *scope,
                                dp_value *out)
{
    DP_TRY(dp__train_optims_check(__func__, optims, count));
    DP_TRY(dp_check_scope(__func__, scope, NULL));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (dp__train_unnamed(optims, count))
        return dp_optim_save(optims[0].optim, scope, out);
    dp_pair *pairs = dp_scope_alloc(scope, count * sizeof *pairs);
    if (pairs == NULL)
        return dp_error_in(__func__, dp_no_memory());
    /* who has come back makes all of them, too, and then saves */
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp_error_in(__func__, dp__train_rejoin(dp__train_optimizer_of(optims[i].optim))));
    for (size_t i = 0; i < count; i++) {
        pairs[i].key = optims[i].name;
        DP_TRY(dp_optim_save(optims[i].optim, scope, &pairs[i].value));
    }
    return dp_error_in(__func__, dp_made(dp_dict_make(scope, pairs, count), out));
}

DP_API dp_status dp_optims_load(const dp_named_optim *optims, size_t count, dp_value saved)
{
    DP_TRY(dp__train_optims_check(__func__, optims, count));
    if (dp__train_unnamed(optims, count))
        return dp_optim_load(optims[0].optim, saved);
    for (size_t i = 0; i < count; i++) {
        const dp__train_optimizer *optim = dp__train_optimizer_of(optims[i].optim);
        dp_value own = dp_get(saved, optims[i].name);
        if (own.kind != DP_DICT)
            return dp_error(DP_ERR_MISMATCH, "%s: nothing was saved for '%s'", __func__,
                            optims[i].name);
        dp_status status = dp__train_saved_check(optim, own);
        if (status != DP_OK)
            return dp_error(status, "%s: '%s': %s", __func__, optims[i].name, dp_last_error());
    }
    if (dp_count(saved) != count)
        return dp_error(DP_ERR_MISMATCH, "%s: %zu optimizers, saved %zu", __func__, count,
                        dp_count(saved));
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp_optim_load(optims[i].optim, dp_get(saved, optims[i].name)));
    return DP_OK;
}

/* What it is at, added to the pairs that are used already. */
static dp_status dp__train_log_one(dp_scope *scope, const dp_named_optim *named, dp_pair *pairs,
                                   size_t *used)
{
    const char *name = named->name != NULL && *named->name != '\0' ? named->name : NULL;
    dp_optim_info info;
    DP_TRY(dp_optim_info_get(named->optim, &info));
    const struct {
        const char *what;
        double number;
    } all[] = {{"lr", info.lr}, {"momentum", info.momentum}, {"grad_norm", info.grad_norm}};
    for (int i = 0; i < (info.has_norm ? 3 : 2); i++) {
        dp_pair *pair = &pairs[(*used)++];
        pair->key = dp_join_names(scope, name, all[i].what);
        pair->value = dp_float(all[i].number);
        if (pair->key == NULL)
            return dp_no_memory();
    }
    return DP_OK;
}

DP_API dp_status dp_optims_log(const dp_named_optim *optims, size_t count, dp_scope *scope,
                               dp_value *out)
{
    size_t used = 0;
    DP_TRY(dp__train_optims_check(__func__, optims, count));
    DP_TRY(dp_check_scope(__func__, scope, NULL));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    dp_pair *pairs = dp_scope_alloc(scope, 3 * count * sizeof *pairs);
    dp_status status = pairs != NULL ? DP_OK : dp_no_memory();
    for (size_t i = 0; i < count && status == DP_OK; i++)
        status = dp__train_log_one(scope, &optims[i], pairs, &used);
    if (status == DP_OK)
        status = dp_made(dp_dict_make(scope, pairs, used), out);
    return dp_error_in(__func__, status);
}

/* ==== >>means ===================================================================================
   Keys are compared by a number that is made of them, and entries go round as one vector.       */

/* Of the first `count` keys. */
static int64_t dp__train_keys_hash(dp_value log, size_t count)
{
    uint64_t hash = dp__hash_first;
    for (size_t i = 0; i < count; i++)
        hash = dp__hash(hash, log.as.pairs[i].key, strlen(log.as.pairs[i].key) + 1);
    return (int64_t)(hash >> 1);
}

typedef struct dp__train_entry { /* an entry of a rank's log, in a sentence */
    int64_t hash;                /* of the keys up to it */
    char text[56];               /* "'loss'", as much as fits; "nothing"; "": there is no log */
} dp__train_entry;

static dp_status dp__train_keys_at(dp_ctx *ctx, dp_value log, size_t at, dp__train_entry *all)
{
    union { /* as it travels */
        dp__train_entry entry;
        int64_t words[sizeof(dp__train_entry) / sizeof(int64_t)];
    } own = {{0, ""}};
    if (log.kind == DP_DICT && at < dp_count(log)) {
        own.entry.hash = dp__train_keys_hash(log, at + 1);
        snprintf(own.entry.text, sizeof own.entry.text, "'%.*s'", (int)sizeof own.entry.text - 3,
                 dp_key_at(log, at));
    } else if (log.kind == DP_DICT) {
        snprintf(own.entry.text, sizeof own.entry.text, "nothing");
    }
    return dp_all_gather_i64(ctx, own.words, sizeof own / sizeof(int64_t), &all->hash);
}

/* Keys differ somewhere among the first `count`: all processes look for the first that does. */
static dp_status dp__train_keys_differ(dp_ctx *ctx, dp_scope *temp, dp_value log, size_t count)
{
    int ranks = dp_rank_count(ctx);
    dp__train_entry *keys = dp_scope_alloc(temp, (size_t)ranks * sizeof *keys);
    if (keys == NULL)
        return dp_no_memory();
    for (size_t at = 0; at < count; at++) {
        int first = 0, other = 0;
        DP_TRY(dp__train_keys_at(ctx, log, at, keys));
        while (*keys[first].text == '\0')
            first++;
        while (other < ranks &&
               (*keys[other].text == '\0' || memcmp(&keys[other], &keys[first], sizeof *keys) == 0))
            other++;
        if (other < ranks)
            return dp_error(DP_ERR_MISMATCH,
                            "entry %zu of the log is %s on rank %d and %s on rank %d", at,
                            keys[first].text, first, keys[other].text, other);
    }
    return dp_error(DP_ERR_MISMATCH, "processes have logs with other keys");
}

/* The entries times samples. */
static dp_status dp__train_log_numbers(dp_ctx *ctx, dp_value log, int64_t samples, double *numbers)
{
    if (log.kind != DP_DICT && log.kind != DP_NONE)
        return dp_error(DP_ERR_INVALID, "the log is not a dict");
    if (samples < 0)
        return dp_error(DP_ERR_INVALID, "samples is %lld", (long long)samples);
    for (size_t i = 0; i < dp_count(log); i++) {
        double number = 0;
        if (dp_item(ctx, log.as.pairs[i].value, &number) != DP_OK)
            return dp_error(DP_ERR_INVALID, "'%s' is not a number: %s", log.as.pairs[i].key,
                            dp_last_error());
        numbers[i] = samples > 0 ? number * (double)samples : 0;
    }
    return DP_OK;
}

/* How many entries those have that have any: the same keys. `status`: what is wrong with one log,
   and so for all. */
static dp_status dp__train_log_agree(dp_ctx *ctx, dp_scope *temp, dp_value log, dp_status status,
                                     int64_t *out_count)
{
    bool has = status == DP_OK && log.kind == DP_DICT;
    int64_t hash = has ? dp__train_keys_hash(log, dp_count(log)) : 0;
    int64_t most[] = {has ? hash : INT64_MIN, has ? -hash : INT64_MIN,
                      has ? (int64_t)dp_count(log) : 0, status != DP_OK};
    DP_TRY(dp_all_reduce_i64(ctx, most, 4, DP_OP_MAX));
    if (most[3] != 0)
        return dp_agree(ctx, status);
    *out_count = most[2];
    if (most[0] == INT64_MIN || most[0] == -most[1])
        return DP_OK;
    return dp__train_keys_differ(ctx, temp, log, (size_t)most[2]);
}

/* The means, of so many entries, some of which this process has, times samples. */
static dp_status dp__train_log_sum(dp_ctx *ctx, dp_scope *scope, dp_scope *temp, dp_value log,
                                   const double *own, int64_t count, int64_t samples, dp_value *out)
{
    double *numbers = dp_scope_alloc(temp, ((size_t)count + 1) * sizeof *numbers);
    dp_pair *pairs = dp_scope_alloc(temp, (size_t)count * sizeof *pairs);
    if (numbers == NULL || pairs == NULL)
        return dp_no_memory();
    for (int64_t i = 0; i <= count; i++)
        numbers[i] = log.kind != DP_DICT ? 0 : i < count ? own[i] : (double)samples;
    DP_TRY(dp_all_reduce_f64(ctx, numbers, (size_t)count + 1, DP_OP_SUM));
    for (int64_t i = 0; i < count && log.kind == DP_DICT; i++)
        pairs[i] = (dp_pair){log.as.pairs[i].key, dp_float(numbers[i] / numbers[count])};
    if (log.kind == DP_DICT)
        return dp_made(dp_dict_make(scope, pairs, (size_t)count), out);
    *out = dp_none();
    return DP_OK;
}

static dp_status dp__train_log_mean(dp_ctx *ctx, dp_scope *scope, dp_scope *temp, dp_value log,
                                    int64_t samples, dp_value *out)
{
    int64_t count = -1; /* until all have agreed that there are numbers */
    double *own = dp_scope_alloc(temp, dp_count(log) * sizeof *own);
    dp_status status = own != NULL ? dp__train_log_numbers(ctx, log, samples, own) : dp_no_memory();
    status = dp__train_log_agree(ctx, temp, log, status, &count);
    if (count < 0 || status == DP_ERR_MISMATCH)
        return status;
    if (status == DP_OK)
        status = dp__train_log_sum(ctx, scope, temp, log, own, count, samples, out);
    return dp__train_alone(ctx, dp_error_in("dp_log_mean", status));
}

DP_API dp_status dp_log_mean(dp_ctx *ctx, dp_scope *scope, dp_value log, int64_t samples,
                             dp_value *out)
{
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_scope(__func__, scope, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    dp_scope *temp = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp__train_log_mean(ctx, scope, temp, log, samples, out);
    dp_scope_end(temp);
    return dp_error_in(__func__, status);
}

/* ==== >>line ====================================================================================
   Put together in a buffer, and written at once.                                                */

enum { DP__TRAIN_UNKNOWN, DP__TRAIN_QUIET, DP__TRAIN_TERMINAL, DP__TRAIN_LINES };

static int dp__train_how(const dp_ctx *ctx)
{
    const char *said = getenv("DP_PROGRESS");
    dp_info info;
    if (dp_info_get(ctx, &info) != DP_OK || info.process > 0 ||
        (said != NULL && strcmp(said, "off") == 0))
        return DP__TRAIN_QUIET;
    if (dp__os_is_read())
        return DP__TRAIN_TERMINAL;
    return said != NULL && strcmp(said, "on") == 0 ? DP__TRAIN_LINES : DP__TRAIN_QUIET;
}

typedef struct dp__train_line {
    char text[256]; /* six counts, a loss, a rate and a time are at most 168 */
    size_t used;
} dp__train_line;

__attribute__((format(printf, 2, 3))) static void dp__train_add(dp__train_line *line,
                                                                const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line->text + line->used, sizeof line->text - line->used, format, args);
    va_end(args);
    line->used += length > 0 ? (size_t)length : 0;
}

/* "step 3/10", or "step 3". */
static void dp__train_add_count(dp__train_line *line, const char *what, int64_t number, int64_t of)
{
    dp__train_add(line, "%s%s %lld", line->used > 0 ? "  " : "", what, (long long)number);
    if (of > 0)
        dp__train_add(line, "/%lld", (long long)of);
}

static void dp__train_add_rest(dp__train_line *line, double seconds)
{
    long long left = (long long)(seconds + 0.5);
    if (left >= 3600)
        dp__train_add(line, "  %lld:%02lld:%02lld left", left / 3600, left / 60 % 60, left % 60);
    else
        dp__train_add(line, "  %lld:%02lld left", left / 60, left % 60);
}

static void dp__train_show(const dp_progress *progress, dp_ctx *ctx, int64_t epoch, int64_t step,
                           dp_value log)
{
    dp__train_line line = {.used = 0};
    char text[sizeof line.text + 8];
    double seconds = (double)(progress->seen.shown_ns - progress->seen.began_ns) * 1e-9, loss = 0;
    int64_t done = epoch * progress->step_count + step;
    int64_t steps = done - progress->seen.first_step;
    int64_t left = progress->epoch_count * progress->step_count - done;
    dp_value value = dp_get(log, "loss");
    dp__train_add_count(&line, "epoch", epoch + 1, progress->epoch_count);
    dp__train_add_count(&line, "step", step, progress->step_count);
    if (value.kind != DP_NONE && dp_item(ctx, value, &loss) == DP_OK)
        dp__train_add(&line, "  loss %.4g", loss);
    if (steps > 0 && seconds > 0) {
        double rate = (double)progress->seen.samples / seconds;
        dp__train_add(&line, rate < 1000 ? "  %.4g samples/s" : "  %.0f samples/s", rate);
        if (left >= 0 && progress->step_count > 0 && progress->epoch_count > 0)
            dp__train_add_rest(&line, seconds / (double)steps * (double)left);
    }
    snprintf(text, sizeof text, progress->seen.how == DP__TRAIN_TERMINAL ? "\r%s\x1b[K" : "%s\n",
             line.text);
    dp__os_write(text);
}

DP_API void dp_progress_step(dp_progress *progress, dp_ctx *ctx, int64_t epoch, int64_t step,
                             int64_t samples, dp_value log)
{
    struct dp__train_seen *seen = &progress->seen;
    double every = dp_or(progress->every_s, 0.2);
    int64_t now = (int64_t)dp__os_now_ns();
    bool begins = seen->how == DP__TRAIN_UNKNOWN;
    if (begins) /* how long the first one took is not known */
        *seen = (struct dp__train_seen){.began_ns = now,
                                        .shown_ns = now,
                                        .first_step = epoch * progress->step_count + step,
                                        .how = dp__train_how(ctx)};
    else
        seen->samples += samples;
    if (seen->how == DP__TRAIN_QUIET || (!begins && (double)(now - seen->shown_ns) < every * 1e9))
        return;
    seen->shown_ns = now;
    dp__train_show(progress, ctx, epoch, step, log);
}

DP_API void dp_progress_end(dp_progress *progress)
{
    if (progress->seen.how == DP__TRAIN_TERMINAL)
        dp__os_write("\n");
    progress->seen = (struct dp__train_seen){.how = DP__TRAIN_UNKNOWN};
}

/* ==== >>ending ===================================================================================
   What a process has heard, until all are asked.                                                */

static atomic_bool dp__stop_asked;
static _Atomic int64_t dp__stop_at_ns; /* 0: never */

DP_API dp_status dp_stop_on_signal(int signal)
{
    if (dp__os_stop_on(signal))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: signal %d is none that a program can wait for", __func__,
                    signal);
}

DP_API dp_status dp_stop_after(double seconds)
{
    if (!(seconds >= 0 && seconds <= 1e9))
        return dp_error(DP_ERR_INVALID, "%s: %g seconds: not 0 to 1e9", __func__, seconds);
    int64_t at = (int64_t)dp__os_now_ns() + (int64_t)(seconds * 1e9);
    int64_t before = atomic_load(&dp__stop_at_ns);
    while ((before == 0 || at < before) &&
           !atomic_compare_exchange_weak(&dp__stop_at_ns, &before, at))
        continue;
    return DP_OK;
}

DP_API void dp_stop_request(void)
{
    atomic_store(&dp__stop_asked, true);
}

DP_API dp_status dp_stop_requested(dp_ctx *ctx, bool *out)
{
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    int64_t at = atomic_load(&dp__stop_at_ns);
    bool own = atomic_load(&dp__stop_asked) || dp__os_asked_to_stop() != 0 ||
               (at != 0 && (int64_t)dp__os_now_ns() >= at);
    return dp_error_in(__func__, dp_any(ctx, own, out));
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
