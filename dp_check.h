/* dp_check.h - v0.2.0 - is the model what one believes it to be? - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h.

       dp_check_report report;
       if (dp_self_check(net, batch, NULL, &report) != DP_OK)
           puts(dp_last_error());

       dp_self_check: gradient of 'fc1.weight' differs at [3, 17]: 0.25 on one device, 0.5 on 2
       replicas; all of it is 2 times as large

   CONTENTS (search for the tag)
     >>check        one device against several, backward against differences
     >>watching     what $DP_DEBUG=check finds while a program trains
   and of the implementation
     >>numbers      tensors as doubles, and where two of them differ
     >>outputs      of one device and of all replicas, side by side
     >>runs         copies of the module, forwards and backwards
     >>comparing    gradients of both
     >>differences  of the output, when one number is moved
     >>asking       dp_self_check itself
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_CHECK_H) && defined(DP_H)
#define DP_CHECK_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>check ==================================================================================
   The batch goes through copies of the module (dp_module_copy), which itself stays the same, bit by
   bit. A wrapper is checked for what it wraps; other processes take no part. One device gets the
   batch as a wrapper of one device gives it, so that a container has one group there, or there are
   no replicas. In this order:

     twice       The same again on one device. If it differs, the model is random or reads memory
                 that nobody wrote, and nothing else can be checked. Dropout needs a seed from the
                 sample, or from dp_call.row_first.
     adding      With gradients that begin as NaN: where they are numbers after the backward, it has
                 set them (=) in place of adding to them (+=). Not if the output is one number, and
                 not with dp_module_config.mean_grads.
     replicas    Cut over several devices, as by dp_data_parallel. Tensors are joined along dim 0,
                 and lists appended, if that gives as many as on one device. Anything else, such as
                 a loss without dims, must be the mean over the replicas, weighted by their rows, or
                 their sum. Then the gradients of parameters and of the batch.
     differences Some elements of each f32 and f64 parameter, and of each such tensor of the batch
                 that gets a gradient, are moved a little, among them that of the largest gradient.
                 The gradient is compared with the change of the output. If moves of several sizes
                 disagree (a kink of ReLU, too few digits), the element counts as undecided.

   Backward gets numbers between -1 and 1 for tensors, and 1 for numbers and tensors without dims.
   If the output is a dict with keys that contain "loss", only these get a gradient. With
   dp_module_config.mean_grads all get 1.                                                        */

typedef struct dp_check_config { /* zero: all of it */
    const char *method;          /* NULL: "forward" */
    int replicas;                /* 0: as many as there are devices, but at least 2 */
    bool exact;                  /* replicas must give the very numbers of one device */
    double tolerance;            /* relative to a tensor's largest number; 0: by the coarser dtype,
                                    its own or the parameters': 1e-9 for f64, 1e-4 for f32, 1e-2 for
                                    f16, 5e-2 for bf16 */
    size_t samples;              /* elements moved in each tensor; 0: 8 */
    bool only_outputs;           /* the model has no backward */
    bool no_replicas, no_differences;
} dp_check_config;

typedef struct dp_check_report {
    size_t compared;  /* numbers of replicas */
    size_t moved;     /* elements whose gradient agrees with the output's change */
    size_t undecided; /* elements of which nothing can be said */
    /* The first difference, if there is one. */
    char name[128]; /* "output", "output 'y'", "gradient of 'w'", "gradient of argument 0" */
    int ndim;
    int64_t position[DP_MAX_DIMS];
    double expected, found; /* on one device and elsewhere; the difference and the gradient */
} dp_check_report;

/* `batch`: the method's arguments, a dict (kwargs) or a list or tuple (args). DP_ERR_MISMATCH: the
   sentence names the first difference. out_report may be NULL. [host] */
DP_MUST_USE DP_API dp_status dp_self_check(dp_module *module, dp_value batch,
                                           const dp_check_config *config,
                                           dp_check_report *out_report);

/* ==== >>watching ===============================================================================
   Some mistakes are legal: each call is fine, and the model learns nothing. With $DP_DEBUG=check in
   the environment, dp.h looks for them in the first step and in each 100th of any program, also of
   one that does not include this header. check=20 is each 20th. Words of a level may stand beside
   it: info,check=20. In a program dp_config.check is the same, and counts before the environment.
   What is found makes the call fail with DP_ERR_CHECK, a failure of this pass alone. With
   check=warn (dp_config.check_warns) it is one line of the log, at warn level, and nothing fails. A
   step is a pass with gradients that you ask for; under dp_distributed, what ends with a reduction.

   LEARNING
     loss           It is not finite: which rank and step, and whether the batch or a parameter was
                    so before. Looked at are entries that hold "loss" in their name, and a loss
                    alone; not those of a replica without rows.
     gradients      One is not finite: parameter, place, rank and step, before gradients are added
                    up, and once they are. Not with a loss that is scaled, where this may happen.
     cleared        Parameters were updated since the last backward, and their gradients are what
                    they were: each step would count again in the next. (Found in the step after one
                    that is checked.) Backwards that are added up before one update are fine; so is
                    who zeroes or scales gradients by hand.
     apart          No gradients travel between the processes of a job: after 32 updates. That is
                    also a warning without `check`.
   and, by running methods of some replicas again, one at a time:
     set            A backward sets a gradient (=) where it has to add to it (+=).
     kept           The backward of one replica gives other gradients if the forward of another one
                    has run before it: both keep something in one place, a static variable, say.
     beside         A forward has returned something else beside the others than it returns alone.
                    (Where there are no buffers.)
     batch          A method writes to the batch.
   and under dp_distributed, of all processes, which have to check the same steps (else creating a
   wrapper is a MISMATCH):
     rows           Two processes give the same rows.
     parameters     They are not the same on all ranks. (Buffers are made the same before each
                    forward.)
   What is found before gradients are reduced all ranks learn, as of any failure of a backward.

   Methods that run again leave nothing in gradients and buffers, but they do again what they do
   elsewhere: draw random numbers, count, add to memory of yours. They are not run again if the
   module has mean_grads or no gradients, if messages were sent, if the first replica has no rows,
   and in passes inside a method of yours. One that fails, as it calls a collective, has no partners
   and is given up (a line at info level). Of a model that is random only `set` and `batch` can be
   found. dp_self_check finds more, with data that you choose.

   MEMORY
   dp_config.poison, which `check` sets, fills host memory that nobody may use with bytes that are
   NaN as a float of any size (and -1 as an integer): what a scope has given back, what nobody has
   written yet, and 64 bytes behind each piece of a scope. Each piece has a block of its own, and
   with `check` it is not used again soon. A read there becomes NaN in what is computed from it. A
   write there is logged at error level when the scope ends, or when the memory is used again.
   Whenever the program is compiled with -fsanitize=address, with `check` or without it,
   AddressSanitizer knows what may be used, and reports the line that reads or writes. Memory of
   devices that the host does not reach is left alone, and so is what processes share.

   WHAT IT COSTS
   A step that is checked copies gradients and parameters to the host and reads them, and hashes the
   batch: about two passes over each, and three small collectives; and it runs four forwards and
   three backwards of one replica, and a forward of each. All other steps pay for poison: each piece
   of memory is filled twice. Without `check` it is a few branches a pass.

   WHAT NOTHING FINDS
   Labels that belong to other rows, and an evaluation with dp_module_train(net, true): numbers are
   fine, and only you know what they should be. tests/models/test_mistakes.c has fifty mistakes, and
   what is said of each.                                                                         */

#ifdef __cplusplus
}
#endif
#endif /* DP_CHECK_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_CHECK_IMPLEMENTED)
#define DP_CHECK_IMPLEMENTED

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ==== >>numbers =================================================================================
   Everything is compared as doubles.                                                            */

typedef struct dp__self_numbers {
    double *data;
    int64_t count;
    dp_dtype dtype; /* that they had */
    int ndim;
    int64_t shape[DP_MAX_DIMS];
} dp__self_numbers;

typedef struct dp__self {
    dp_module *module; /* what a wrapper wraps */
    dp_ctx *ctx;
    dp_scope *scope;
    dp_check_config config; /* defaults put in */
    dp_check_report *report;
    dp_value args, kwargs;   /* kept, so that they may be written to */
    const char *one, *other; /* where two numbers were found, for the sentence */
    dp_dtype coarsest;       /* of the parameters */
    bool exact;              /* of what is compared now */
    size_t count;            /* of replicas, or of runs, that are compared with one */
    const double *shares;    /* of the rows, for each replica; they add up to 1 */
    bool gives_grads;        /* the outputs that are compared now get gradients */
} dp__self;

static dp_status dp__self_room(dp_scope *scope, dp_dtype dtype, int ndim, const int64_t *shape,
                               dp__self_numbers *out)
{
    *out = (dp__self_numbers){.count = 1, .dtype = dtype, .ndim = ndim};
    for (int d = 0; d < ndim; d++) {
        out->shape[d] = shape[d];
        out->count *= shape[d];
    }
    out->data = dp_scope_alloc(scope, (size_t)out->count * sizeof *out->data);
    return out->data != NULL ? DP_OK : dp_no_memory();
}

static dp_status dp__self_read(const dp__self *check, dp_scope *scope, const dp_tensor *tensor,
                               dp__self_numbers *out)
{
    dp_tensor wide;
    DP_TRY(dp__self_room(scope, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape, out));
    if (out->count == 0)
        return DP_OK;
    dp_scope *temp = dp_scope_child(scope);
    dp_status status =
        dp_tensor_new(temp, tensor->device, DP_F64, tensor->ndim, tensor->shape, &wide);
    if (status == DP_OK)
        status = dp_cast(check->ctx, &wide, tensor);
    if (status == DP_OK)
        status = dp_read(check->ctx, &wide, out->data, (size_t)out->count * sizeof *out->data);
    dp_scope_end(temp);
    return status;
}

/* A tensor of the host with these numbers. */
static dp_status dp__self_write(const dp__self *check, const dp__self_numbers *numbers,
                                dp_value *out)
{
    dp_tensor wide, tensor;
    const dp_device host = {0, 0};
    DP_TRY(dp_tensor_from(check->scope, host, numbers->data, DP_F64, numbers->ndim, numbers->shape,
                          &wide));
    DP_TRY(
        dp_tensor_new(check->scope, host, numbers->dtype, numbers->ndim, numbers->shape, &tensor));
    DP_TRY(dp_cast(check->ctx, &tensor, &wide));
    *out = dp_of(check->scope, &tensor);
    return dp_made(*out, out);
}

static double dp__self_epsilon(dp_dtype dtype)
{
    static const double epsilons[] = {
        [DP_F32] = 0x1p-24, [DP_F64] = 0x1p-53, [DP_F16] = 0x1p-11, [DP_BF16] = 0x1p-8};
    return dp_dtype_is_float(dtype) ? epsilons[dtype] : 0;
}

static dp_dtype dp__self_coarser(dp_dtype a, dp_dtype b)
{
    return dp__self_epsilon(a) > dp__self_epsilon(b) ? a : b;
}

/* A loss that is a double was computed in the parameters' dtype. */
static double dp__self_tolerance(const dp__self *check, dp_dtype dtype)
{
    static const double usual[] = {
        [DP_F32] = 1e-4, [DP_F64] = 1e-9, [DP_F16] = 1e-2, [DP_BF16] = 5e-2};
    if (check->exact || !dp_dtype_is_float(dtype))
        return 0;
    return dp_or(check->config.tolerance, usual[dp__self_coarser(dtype, check->coarsest)]);
}

static double dp__self_largest(const dp__self_numbers *numbers)
{
    double largest = 0;
    for (int64_t i = 0; i < numbers->count; i++)
        largest = fabs(numbers->data[i]) > largest ? fabs(numbers->data[i]) : largest;
    return largest;
}

/* Infinities equal themselves, and so do NaNs. */
static bool dp__self_near(double a, double b, double tolerance)
{
    if (isnan(a) || isnan(b))
        return isnan(a) && isnan(b);
    return !(a < b || a > b) || fabs(a - b) <= tolerance;
}

/* The first element where two tensors of one shape differ; -1: there is none. */
static int64_t dp__self_where(const dp__self *check, const dp__self_numbers *one,
                              const dp__self_numbers *other)
{
    double largest = dp__self_largest(one), tolerance = dp__self_tolerance(check, one->dtype);
    tolerance *= isfinite(largest) ? largest : 0;
    for (int64_t i = 0; i < one->count; i++)
        if (!dp__self_near(one->data[i], other->data[i], tolerance))
            return i;
    return -1;
}

/* "[3, 17]", or nothing for a number. */
static const char *dp__self_place(const dp_check_report *report, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; d < report->ndim && used < bytes; d++) {
        int more = snprintf(text + used, bytes - used, "%s%lld", d == 0 ? " at [" : ", ",
                            (long long)report->position[d]);
        used += more > 0 ? (size_t)more : 0;
    }
    if (report->ndim > 0 && used < bytes)
        snprintf(text + used, bytes - used, "]");
    return text;
}

static void dp__self_note(const dp__self *check, const char *name, const dp__self_numbers *one,
                          int64_t at, double found)
{
    dp_check_report *report = check->report;
    snprintf(report->name, sizeof report->name, "%s", name);
    report->ndim = one->ndim;
    report->expected = one->data[at];
    report->found = found;
    for (int d = one->ndim - 1; d >= 0; at /= one->shape[d--])
        report->position[d] = at % one->shape[d];
}

/* The factor by which all of one tensor is larger than the other; 1 if there is none. */
static double dp__self_factor(const dp__self *check, const dp__self_numbers *one,
                              const dp__self_numbers *other)
{
    double products = 0, squares = 0;
    for (int64_t i = 0; i < one->count; i++) {
        products += one->data[i] * other->data[i];
        squares += one->data[i] * one->data[i];
    }
    double factor = squares > 0 ? products / squares : 1;
    double tolerance = 1e-6 + dp__self_tolerance(check, one->dtype);
    tolerance *= fabs(factor) * dp__self_largest(one);
    for (int64_t i = 0; i < one->count; i++)
        if (!(fabs(other->data[i] - factor * one->data[i]) <= tolerance))
            return 1;
    return factor;
}

/* Numbers of one device and of the others. */
static dp_status dp__self_compare(const dp__self *check, const char *name,
                                  const dp__self_numbers *one, const dp__self_numbers *other)
{
    char place[160], all[80] = "";
    int64_t at = dp__self_where(check, one, other);
    check->report->compared += (size_t)one->count;
    if (at < 0)
        return DP_OK;
    dp__self_note(check, name, one, at, other->data[at]);
    double factor = dp__self_factor(check, one, other);
    if (one->count > 1 && (factor < 1 || factor > 1))
        snprintf(all, sizeof all, "; all of it is %g times as large", factor);
    return dp_error(DP_ERR_MISMATCH, "%s differs%s: %.9g %s, %.9g %s%s", name,
                    dp__self_place(check->report, place, sizeof place), one->data[at], check->one,
                    other->data[at], check->other, all);
}

/* ==== >>outputs =================================================================================
   The trees of one device and of each replica are walked side by side. On the way both get the same
   gradients for the same elements.                                                              */

typedef struct dp__self_leaves { /* at one place of the trees */
    dp_value one;
    const dp_value *others;
    dp_value one_grad, *other_grads; /* what is made for them */
} dp__self_leaves;

/* `name` with what is inside: "output 'y'", "output 'y' 2". */
static void dp__self_inside(char *out, size_t bytes, const char *name, const char *key, size_t i)
{
    if (key != NULL)
        snprintf(out, bytes, "%s '%s'", name, key);
    else
        snprintf(out, bytes, "%s %zu", name, i);
}

/* From -1 to 1, in eighths, and not 0. */
static double dp__self_pattern(int64_t i)
{
    int64_t eighths = (i * 7919 + i / 5) % 16 - 8;
    return (double)(eighths < 0 ? eighths : eighths + 1) / 8;
}

/* A tensor, or a number as a tensor without dims. */
static dp_status dp__self_leaf(const dp__self *check, dp_value value, dp__self_numbers *out)
{
    if (value.kind == DP_TENSOR)
        return dp__self_read(check, check->scope, value.as.t, out);
    DP_TRY(dp__self_room(check->scope, value.kind == DP_FLOAT ? DP_F64 : DP_I64, 0, NULL, out));
    out->data[0] = value.kind == DP_FLOAT ? value.as.f
                   : value.kind == DP_INT ? (double)value.as.i
                                          : (double)value.as.b;
    return DP_OK;
}

/* Rows from `first` on, as many as `part` has. */
static void dp__self_take(const dp__self_numbers *whole, int64_t first, dp__self_numbers *part)
{
    int64_t row = whole->shape[0] > 0 ? whole->count / whole->shape[0] : 0;
    memcpy(part->data, whole->data + first * row, (size_t)part->count * sizeof *part->data);
}

/* Whether the parts are the rows of the whole. */
static bool dp__self_are_rows(const dp__self *check, const dp__self_numbers *one,
                              const dp__self_numbers *parts)
{
    int64_t rows = 0;
    for (size_t r = 0; r < check->count; r++) {
        if (parts[r].ndim != one->ndim || one->ndim == 0)
            return false;
        for (int d = 1; d < one->ndim; d++)
            if (parts[r].shape[d] != one->shape[d])
                return false;
        rows += parts[r].shape[0];
    }
    return rows == one->shape[0];
}

static bool dp__self_are_like(const dp__self *check, const dp__self_numbers *one,
                              const dp__self_numbers *parts)
{
    for (size_t r = 0; r < check->count; r++)
        if (parts[r].ndim != one->ndim || parts[r].count != one->count ||
            memcmp(parts[r].shape, one->shape, sizeof one->shape) != 0)
            return false;
    return true;
}

/* The gradient of an output, and its rows or shares for the replicas. */
static dp_status dp__self_grads(const dp__self *check, dp__self_leaves *leaves,
                                const dp__self_numbers *one, dp__self_numbers *parts, bool rows,
                                bool mean)
{
    int64_t first = 0;
    if (!check->gives_grads || !dp_dtype_is_float(one->dtype))
        return DP_OK;
    for (int64_t i = 0; i < one->count; i++)
        one->data[i] = one->ndim == 0 ? 1 : dp__self_pattern(i);
    DP_TRY(dp__self_write(check, one, &leaves->one_grad));
    for (size_t r = 0; r < check->count; r++) {
        if (rows)
            dp__self_take(one, first, &parts[r]);
        for (int64_t i = 0; !rows && i < one->count; i++)
            parts[r].data[i] = one->data[i] * (mean ? check->shares[r] : 1);
        first += rows ? parts[r].shape[0] : 0;
        DP_TRY(dp__self_write(check, &parts[r], &leaves->other_grads[r]));
        if (leaves->one.kind != DP_TENSOR)
            leaves->other_grads[r] = dp_float(parts[r].data[0]);
    }
    if (leaves->one.kind != DP_TENSOR)
        leaves->one_grad = dp_float(one->data[0]);
    return DP_OK;
}

/* Outputs that are not rows must be a mean, or a sum, over the replicas. */
static dp_status dp__self_shared(const dp__self *check, const char *name, dp__self_leaves *leaves,
                                 const dp__self_numbers *one, dp__self_numbers *parts)
{
    dp__self_numbers mean, sum;
    DP_TRY(dp__self_room(check->scope, one->dtype, one->ndim, one->shape, &mean));
    DP_TRY(dp__self_room(check->scope, one->dtype, one->ndim, one->shape, &sum));
    for (int64_t i = 0; i < one->count; i++) {
        bool alike = true;
        mean.data[i] = sum.data[i] = 0;
        for (size_t r = 0; r < check->count; r++) {
            alike = alike && dp__self_near(parts[r].data[i], parts[0].data[i], 0);
            mean.data[i] += check->shares[r] > 0 ? check->shares[r] * parts[r].data[i] : 0;
            sum.data[i] += parts[r].data[i];
        }
        mean.data[i] = alike ? parts[0].data[i] : mean.data[i];
    }
    if (dp__self_where(check, one, &mean) < 0 || dp__self_where(check, one, &sum) >= 0) {
        DP_TRY(dp__self_compare(check, name, one, &mean));
        return dp__self_grads(check, leaves, one, parts, false, true);
    }
    check->report->compared += (size_t)one->count;
    return dp__self_grads(check, leaves, one, parts, false, false);
}

static dp_status dp__self_joined(const dp__self *check, const char *name, dp__self_leaves *leaves,
                                 const dp__self_numbers *one, dp__self_numbers *parts)
{
    dp__self_numbers all;
    int64_t done = 0;
    DP_TRY(dp__self_room(check->scope, one->dtype, one->ndim, one->shape, &all));
    for (size_t r = 0; r < check->count; r++) {
        memcpy(all.data + done, parts[r].data, (size_t)parts[r].count * sizeof *all.data);
        done += parts[r].count;
    }
    DP_TRY(dp__self_compare(check, name, one, &all));
    return dp__self_grads(check, leaves, one, parts, true, false);
}

static dp_status dp__self_tensors(const dp__self *check, const char *name, dp__self_leaves *leaves)
{
    dp__self_numbers one, *parts = dp_scope_alloc(check->scope, check->count * sizeof *parts);
    if (parts == NULL)
        return dp_no_memory();
    DP_TRY(dp__self_leaf(check, leaves->one, &one));
    for (size_t r = 0; r < check->count; r++) {
        DP_TRY(dp__self_leaf(check, leaves->others[r], &parts[r]));
        if (parts[r].dtype != one.dtype)
            return dp_error(DP_ERR_MISMATCH, "%s is %s %s, %s %s", name, dp_dtype_name(one.dtype),
                            check->one, dp_dtype_name(parts[r].dtype), check->other);
    }
    if (dp__self_are_rows(check, &one, parts))
        return dp__self_joined(check, name, leaves, &one, parts);
    if (dp__self_are_like(check, &one, parts))
        return dp__self_shared(check, name, leaves, &one, parts);
    return dp_error(DP_ERR_MISMATCH,
                    "%s has %lld numbers %s: neither the rows of the replicas give that, nor has "
                    "each of them the same shape (the first has %lld numbers)",
                    name, (long long)one.count, check->one, (long long)parts[0].count);
}

static dp_status dp__self_values(const dp__self *check, const char *name, dp__self_leaves *leaves);

static dp_value *dp__self_nones(const dp__self *check, size_t count)
{
    dp_value *nones = dp_scope_alloc(check->scope, count * sizeof *nones);
    for (size_t i = 0; i < count && nones != NULL; i++)
        nones[i] = dp_none();
    return nones;
}

/* Entry `i` of all; for appended lists that of the replica that has it. */
static dp_status dp__self_entry(const dp__self *check, const char *name,
                                const dp__self_leaves *leaves, size_t i, bool appended,
                                dp_value **grads)
{
    char inside[160];
    dp__self own = *check;
    const char *key = dp_key_at(leaves->one, i);
    size_t first = 0, r = 0, at = i;
    dp__self_leaves in = {.one = dp_at(leaves->one, i)};
    dp_value *others = dp__self_nones(check, 2 * check->count);
    if (others == NULL)
        return dp_no_memory();
    in.others = others;
    in.other_grads = others + check->count;
    for (; appended && at >= dp_count(leaves->others[r]); first = ++r)
        at -= dp_count(leaves->others[r]);
    own.count = appended ? 1 : check->count;
    for (size_t k = 0; k < own.count; k++)
        others[k] = key != NULL ? dp_get(leaves->others[first + k], key)
                                : dp_at(leaves->others[first + k], appended ? at : i);
    const double whole = 1;
    own.shares = appended ? &whole : check->shares;
    dp__self_inside(inside, sizeof inside, name, key, i);
    DP_TRY(dp__self_values(&own, inside, &in));
    grads[check->count][i] = in.one_grad;
    for (size_t k = 0; k < own.count; k++)
        grads[first + k][appended ? at : i] = in.other_grads[k];
    return DP_OK;
}

/* Whether only entries with "loss" in their key have a gradient. */
static bool dp__self_has_loss(dp_value value)
{
    bool has = false;
    for (size_t i = 0; i < dp_count(value) && !has; i++)
        has = dp_key_at(value, i) != NULL && strstr(dp_key_at(value, i), "loss") != NULL;
    return has;
}

static dp_status dp__self_rebuild(const dp__self *check, dp_value like, const dp_value *items,
                                  dp_value *out)
{
    size_t count = dp_count(like);
    dp_pair *pairs = dp_scope_alloc(check->scope, count * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++)
        pairs[i] = (dp_pair){dp_key_at(like, i), items[i]};
    *out = like.kind == DP_DICT ? dp_dict_make(check->scope, pairs, count)
                                : dp_list_make(check->scope, (dp_kind)like.kind, items, count);
    return dp_made(*out, out);
}

static dp_status dp__self_entries(const dp__self *check, const char *name, dp__self_leaves *leaves)
{
    size_t count = dp_count(leaves->one), total = 0;
    bool alike = true, is_dict = leaves->one.kind == DP_DICT;
    bool only_loss = is_dict && dp__self_has_loss(leaves->one);
    dp_value **grads = dp_scope_alloc(check->scope, (check->count + 1) * sizeof *grads);
    if (grads == NULL)
        return dp_no_memory();
    for (size_t r = 0; r < check->count; r++) {
        total += dp_count(leaves->others[r]);
        alike = alike && dp_count(leaves->others[r]) == count;
    }
    if (!alike && (total != count || is_dict))
        return dp_error(DP_ERR_MISMATCH, "%s has %zu entries %s, all replicas together %zu", name,
                        count, check->one, total);
    for (size_t r = 0; r <= check->count; r++) {
        grads[r] = dp__self_nones(check, r < check->count ? dp_count(leaves->others[r]) : count);
        if (grads[r] == NULL)
            return dp_no_memory();
    }
    for (size_t i = 0; i < count; i++) {
        dp__self own = *check;
        if (only_loss && strstr(dp_key_at(leaves->one, i), "loss") == NULL)
            own.gives_grads = false;
        DP_TRY(dp__self_entry(&own, name, leaves, i, !alike, grads));
    }
    for (size_t r = 0; r < check->count; r++)
        DP_TRY(dp__self_rebuild(check, leaves->others[r], grads[r], &leaves->other_grads[r]));
    return dp__self_rebuild(check, leaves->one, grads[check->count], &leaves->one_grad);
}

/* Leaves that are no numbers: strings are compared, pointers are not. */
static dp_status dp__self_words(const dp__self *check, const char *name,
                                const dp__self_leaves *leaves)
{
    for (size_t r = 0; r < check->count && leaves->one.kind == DP_STRING; r++)
        if (strcmp(dp_text(leaves->one), dp_text(leaves->others[r])) != 0)
            return dp_error(DP_ERR_MISMATCH, "%s differs: '%s' %s, '%s' %s", name,
                            dp_text(leaves->one), check->one, dp_text(leaves->others[r]),
                            check->other);
    return DP_OK;
}

static dp_status dp__self_values(const dp__self *check, const char *name, dp__self_leaves *leaves)
{
    leaves->one_grad = dp_none();
    for (size_t r = 0; r < check->count; r++) {
        leaves->other_grads[r] = dp_none();
        if (leaves->others[r].kind != leaves->one.kind)
            return dp_error(DP_ERR_MISMATCH, "%s is not of the same kind %s and %s", name,
                            check->one, check->other);
    }
    switch ((dp_kind)leaves->one.kind) {
    case DP_TENSOR:
    case DP_BOOLEAN:
    case DP_INT:
    case DP_FLOAT:
        return dp__self_tensors(check, name, leaves);
    case DP_LIST:
    case DP_TUPLE:
    case DP_DICT:
        return dp__self_entries(check, name, leaves);
    case DP_NONE:
    case DP_ERROR:
    case DP_STRING:
    case DP_CONTAINER:
    case DP_OPAQUE:
        break;
    }
    return dp__self_words(check, name, leaves);
}

/* ==== >>runs ====================================================================================
   Each run has its own copy of the module, so that replicas' states begin anew too.             */

typedef struct dp__self_run {
    dp_scope *scope;
    dp_module *copy, *wrapper; /* which brings the batch to its devices, also if that is one */
    bool replicas;
    dp_value out;
    dp_pass *pass;
    dp_input_grad inputs;
} dp__self_run;

/* The devices of so many replicas: the module's own, and those behind it. */
static dp_status dp__self_ranks(const dp__self *check, size_t count, int **out)
{
    dp_info info;
    DP_TRY(dp_info_get(check->ctx, &info));
    int *ranks = dp_scope_alloc(check->scope, count * sizeof *ranks);
    for (size_t r = 0; r < count && ranks != NULL; r++)
        ranks[r] = (dp_module_rank(check->module) + (int)r) % info.local_count;
    *out = ranks;
    return ranks != NULL ? DP_OK : dp_no_memory();
}

/* Ends with dp__self_run_end, whatever this returns. */
static dp_status dp__self_run_make(const dp__self *check, bool replicas, dp__self_run *out)
{
    size_t count = replicas ? (size_t)check->config.replicas : 1;
    int *ranks;
    *out = (dp__self_run){.replicas = replicas, .inputs = {dp_none(), dp_none()}};
    out->scope = dp_scope_begin(check->ctx);
    DP_TRY(dp_scope_check(out->scope));
    DP_TRY(dp__self_ranks(check, count, &ranks));
    DP_TRY(dp_module_copy(check->module, ranks[0], &out->copy));
    return dp_model_parallel(out->copy,
                             &(dp_parallel_config){.local_ranks = ranks, .local_rank_count = count},
                             &out->wrapper);
}

static dp_status dp__self_run_begin(const dp__self *check, bool replicas, dp__self_run *out)
{
    const dp_check_config *config = &check->config;
    DP_TRY(dp__self_run_make(check, replicas, out));
    return dp_invoke(out->wrapper, out->scope, config->method, check->args, check->kwargs, NULL,
                     &out->out, config->only_outputs ? NULL : &out->pass);
}

/* Returns `status`, or that of what could not be destroyed. */
static dp_status dp__self_run_end(dp__self_run *run, dp_status status)
{
    char text[512];
    snprintf(text, sizeof text, "%s", dp_last_error());
    dp_scope_end(run->scope);
    dp_status ended = dp_module_destroy(run->wrapper);
    if (ended == DP_OK)
        ended = dp_module_destroy(run->copy);
    return status != DP_OK ? dp_error(status, "%s", text) : ended;
}

/* Rows of the first tensor that has any, or entries of a list in a container. */
static int64_t dp__self_rows(dp_value value)
{
    int64_t rows = -1;
    if (value.kind == DP_CONTAINER && dp_count(value.as.c->data) > 0)
        return (int64_t)dp_count(value.as.c->data);
    if (value.kind == DP_CONTAINER)
        return dp__self_rows(value.as.c->data);
    if (value.kind == DP_TENSOR)
        return value.as.t->ndim > 0 ? value.as.t->shape[0] : -1;
    for (size_t i = 0; i < dp_count(value) && rows < 0; i++)
        rows = dp__self_rows(dp_at(value, i));
    return rows;
}

/* Which part of the rows each of `count` replicas has, when the batch is cut as it was. */
static dp_status dp__self_cut(dp__self *check, size_t count)
{
    int *ranks;
    dp_value args, kwargs;
    double total = 0, *shares = dp_scope_alloc(check->scope, count * sizeof *shares);
    if (shares == NULL)
        return dp_no_memory();
    DP_TRY(dp__self_ranks(check, (size_t)check->config.replicas, &ranks));
    const dp_scatter_config how = {.local_ranks = ranks,
                                   .local_rank_count = (size_t)check->config.replicas};
    DP_TRY(dp_scatter_kwargs(check->ctx, check->scope, check->args, check->kwargs, &how, &args,
                             &kwargs));
    for (size_t r = 0; r < count; r++) {
        int64_t rows = dp__self_rows(dp_at(args, r));
        rows = rows >= 0 ? rows : dp__self_rows(dp_at(kwargs, r));
        shares[r] = rows >= 0 ? (double)rows : 1;
        total += shares[r];
    }
    for (size_t r = 0; r < count; r++)
        shares[r] = total > 0 ? shares[r] / total : 1 / (double)count;
    check->shares = shares;
    return DP_OK;
}

/* Backward; with mean_grads, by a number. */
static dp_status dp__self_backward(dp__self_run *run, dp_value *grad)
{
    char text[512];
    dp_status status = dp_backward(run->pass, *grad, &run->inputs);
    if (dp_status_class(status) != DP_CLASS_CALL)
        return status;
    snprintf(text, sizeof text, "%s", dp_last_error());
    *grad = dp_float(1);
    return dp_backward(run->pass, *grad, &run->inputs) == DP_OK ? DP_OK
                                                                : dp_error(status, "%s", text);
}

/* ==== >>comparing ===============================================================================
   The same on one device, again there, and on several.                                          */

static dp_status dp__self_param_grads(const dp__self *check, const dp__self_run *one,
                                      const dp__self_run *other)
{
    for (size_t i = 0; i < dp_module_param_count(one->copy); i++) {
        char name[160];
        dp_param_info info;
        dp_tensor data, grad, other_grad;
        dp__self_numbers first, second;
        DP_TRY(dp_module_param(one->copy, i, &info));
        if (info.frozen || info.buffer)
            continue;
        snprintf(name, sizeof name, "gradient of '%s'", info.name);
        DP_TRY(dp_params_edit(one->copy, i, &data, &grad));
        DP_TRY(dp_params_edit(other->copy, i, &data, &other_grad));
        DP_TRY(dp__self_read(check, check->scope, &grad, &first));
        DP_TRY(dp__self_read(check, check->scope, &other_grad, &second));
        DP_TRY(dp__self_compare(check, name, &first, &second));
    }
    return DP_OK;
}

static dp_status dp__self_input_grads(const dp__self *check, dp_value one, dp_value other)
{
    dp__self own = *check;
    const double whole = 1;
    dp_value unused;
    dp__self_leaves leaves = {.one = one, .others = &other, .other_grads = &unused};
    own.count = 1;
    own.shares = &whole;
    own.gives_grads = false;
    return dp__self_values(&own, "gradient of argument", &leaves);
}

/* Outputs and gradients of one run and another; *grad is what the one's backward gets, or got. */
static dp_status dp__self_both(const dp__self *check, dp__self_run *one, dp__self_run *other,
                               dp_value *grad)
{
    bool replicas = other->replicas;
    dp__self_leaves leaves = {.one = one->out,
                              .others = replicas ? other->out.as.items : &other->out,
                              .other_grads = dp__self_nones(check, check->count)};
    if (leaves.other_grads == NULL)
        return dp_no_memory();
    DP_TRY(dp__self_values(check, "output", &leaves));
    if (check->config.only_outputs)
        return DP_OK;
    bool first = grad->kind == DP_ERROR;
    if (first) {
        *grad = leaves.one_grad;
        DP_TRY(dp__self_backward(one, grad));
    }
    dp_value of_other = replicas
                            ? dp_list_make(check->scope, DP_LIST, leaves.other_grads, check->count)
                            : leaves.other_grads[0];
    if (grad->kind == DP_FLOAT && leaves.one_grad.kind != DP_FLOAT)
        of_other = *grad; /* mean_grads */
    DP_TRY(dp__self_backward(other, &of_other));
    DP_TRY(dp__self_param_grads(check, one, other));
    DP_TRY(dp__self_input_grads(check, one->inputs.args, other->inputs.args));
    return dp__self_input_grads(check, one->inputs.kwargs, other->inputs.kwargs);
}

static dp_status dp__self_twice(const dp__self *check, dp__self_run *one, dp_value *grad)
{
    const double whole = 1;
    size_t compared = check->report->compared;
    dp__self own = *check;
    dp__self_run again;
    own.one = "in one run";
    own.other = "in another on the same device";
    own.exact = false;
    own.count = 1;
    own.shares = &whole;
    dp_status status = dp__self_run_begin(check, false, &again);
    if (status == DP_OK)
        status = dp__self_both(&own, one, &again, grad);
    check->report->compared = compared;
    return dp__self_run_end(&again, status);
}

static dp_status dp__self_fill_grads(const dp__self *check, dp_module *copy, double number)
{
    for (size_t i = 0; i < dp_module_param_count(copy); i++) {
        dp_param_info info;
        dp_tensor data, grad;
        DP_TRY(dp_module_param(copy, i, &info));
        if (info.frozen || info.buffer)
            continue;
        DP_TRY(dp_params_edit(copy, i, &data, &grad));
        DP_TRY(dp_fill(check->ctx, &grad, dp_float(number)));
    }
    return DP_OK;
}

/* Looks for an element that was NaN before the backward, and is not. */
static dp_status dp__self_set_grads(const dp__self *check, dp_module *copy)
{
    for (size_t i = 0; i < dp_module_param_count(copy); i++) {
        char name[160], place[160];
        int64_t at = 0;
        dp_param_info info;
        dp_tensor data, grad;
        dp__self_numbers numbers;
        DP_TRY(dp_module_param(copy, i, &info));
        if (info.frozen || info.buffer)
            continue;
        DP_TRY(dp_params_edit(copy, i, &data, &grad));
        DP_TRY(dp__self_read(check, check->scope, &grad, &numbers));
        while (at < numbers.count && isnan(numbers.data[at]))
            at++;
        if (at == numbers.count)
            continue;
        double found = numbers.data[at];
        numbers.data[at] = (double)NAN;
        snprintf(name, sizeof name, "gradient of '%s'", info.name);
        dp__self_note(check, name, &numbers, at, found);
        return dp_error(DP_ERR_MISMATCH,
                        "%s%s is set, to %.9g, and has to be added to (+=): other passes and other "
                        "uses of the parameter add to the same gradient",
                        name, dp__self_place(check->report, place, sizeof place), found);
    }
    return DP_OK;
}

/* A number as the gradient may be for mean_grads, where the library clears gradients itself. */
static dp_status dp__self_adds(const dp__self *check, dp_value grad)
{
    dp__self_run run;
    if (grad.kind == DP_FLOAT || check->config.only_outputs)
        return DP_OK;
    dp_status status = dp__self_run_make(check, false, &run);
    if (status == DP_OK)
        status = dp__self_fill_grads(check, run.copy, (double)NAN);
    if (status == DP_OK)
        status = dp_invoke(run.wrapper, run.scope, check->config.method, check->args, check->kwargs,
                           NULL, &run.out, &run.pass);
    if (status == DP_OK)
        status = dp_backward(run.pass, grad, NULL);
    if (status == DP_OK)
        status = dp__self_set_grads(check, run.copy);
    return dp__self_run_end(&run, status);
}

static dp_status dp__self_replicas(const dp__self *check, dp__self_run *one, dp_value *grad)
{
    char other[64];
    dp__self own = *check;
    dp__self_run many;
    dp_status status = dp__self_run_begin(check, true, &many);
    if (status == DP_OK) {
        own.count = dp_count(many.out);
        snprintf(other, sizeof other, "on %zu replica%s", own.count, own.count == 1 ? "" : "s");
        own.other = other;
        status = dp__self_cut(&own, own.count);
    }
    if (status == DP_OK)
        status = dp__self_both(&own, one, &many, grad);
    return dp__self_run_end(&many, status);
}

/* ==== >>differences =============================================================================
   The sum of outputs times their gradients, as a function of one element. Its noise follows from
   the roundings of the outputs.                                                                 */

typedef struct dp__self_move {
    const dp__self *check;
    const dp__self_run *run;
    dp_value grad;          /* of the output */
    const char *name;       /* "gradient of 'w'" */
    const dp_tensor *input; /* what is moved: this one, or else the parameter */
    size_t param;
    const dp__self_numbers *values, *grads;
    double here;    /* the sum before any move */
    double largest; /* of the gradients */
    double epsilon; /* of the coarsest dtype that has a part in it */
} dp__self_move;

typedef struct dp__self_sum {
    double sum, squares; /* of the products, which are rounded to epsilon or worse */
    double epsilon;
} dp__self_sum;

static dp_status dp__self_dot_leaf(const dp__self *check, dp_scope *temp, dp_value out,
                                   dp_value grad, dp__self_sum *sum)
{
    dp__self_numbers y = {.dtype = DP_F64, .count = 1, .data = &out.as.f}, g = {.count = 0};
    if (out.kind == DP_TENSOR && !dp_dtype_is_float((dp_dtype)out.as.t->dtype))
        return DP_OK;
    if (out.kind == DP_TENSOR)
        DP_TRY(dp__self_read(check, temp, out.as.t, &y));
    if (grad.kind == DP_TENSOR)
        DP_TRY(dp__self_read(check, temp, grad.as.t, &g));
    double epsilon = dp__self_epsilon(y.dtype);
    sum->epsilon = epsilon > sum->epsilon ? epsilon : sum->epsilon;
    for (int64_t i = 0; i < y.count; i++) {
        double product = y.data[i] * (grad.kind == DP_TENSOR ? g.data[i] : grad.as.f);
        sum->sum += product;
        sum->squares += product * product;
    }
    return DP_OK;
}

/* With a number for all, only losses count where there are any. */
static dp_status dp__self_dot(const dp__self *check, dp_scope *temp, dp_value out, dp_value grad,
                              dp__self_sum *sum)
{
    bool only_loss = grad.kind == DP_FLOAT && dp__self_has_loss(out);
    if (grad.kind == DP_NONE)
        return DP_OK;
    if (out.kind == DP_TENSOR || out.kind == DP_FLOAT)
        return dp__self_dot_leaf(check, temp, out, grad, sum);
    for (size_t i = 0; i < dp_count(out); i++) {
        const char *key = dp_key_at(out, i);
        dp_value own = grad.kind == DP_FLOAT ? grad : dp_at(grad, i);
        if (!only_loss || strstr(key, "loss") != NULL)
            DP_TRY(dp__self_dot(check, temp, dp_at(out, i), own, sum));
    }
    return DP_OK;
}

/* Buffers are as they were before each forward. */
static dp_status dp__self_buffers(const dp__self *check, dp_module *copy)
{
    for (size_t i = 0; i < dp_module_param_count(copy); i++) {
        dp_param_info info;
        dp_tensor data;
        DP_TRY(dp_module_param(check->module, i, &info));
        if (!info.buffer)
            continue;
        DP_TRY(dp_params_edit(copy, i, &data, NULL));
        DP_TRY(dp_copy(check->ctx, &data, &info.data, NULL));
    }
    return DP_OK;
}

static dp_status dp__self_evaluate(const dp__self_move *move, dp__self_sum *out)
{
    const dp__self *check = move->check;
    dp_value value;
    *out = (dp__self_sum){.sum = 0};
    DP_TRY(dp__self_buffers(check, move->run->copy));
    dp_scope *temp = dp_scope_begin(check->ctx);
    DP_TRY(dp_scope_check(temp));
    dp_status status = dp_invoke(move->run->wrapper, temp, check->config.method, check->args,
                                 check->kwargs, NULL, &value, NULL);
    if (status == DP_OK)
        status = dp__self_dot(check, temp, value, move->grad, out);
    dp_scope_end(temp);
    return status;
}

static dp_status dp__self_set(const dp__self_move *move, int64_t at, double number)
{
    dp_tensor all, element;
    if (move->input != NULL)
        all = *move->input;
    else
        DP_TRY(dp_params_edit(move->run->copy, move->param, &all, NULL));
    DP_TRY(dp_reshape(&all, 1, (const int64_t[]){-1}, &all));
    DP_TRY(dp_narrow(&all, 0, at, 1, &element));
    return dp_fill(move->check->ctx, &element, dp_float(number));
}

typedef struct dp__self_rate { /* how much the sum changes for a move of 1 */
    double by;                 /* the move, up and down */
    double rate, noise;        /* and what roundings may have to do with it */
    double above, below;       /* of the move up, and of the one down */
} dp__self_rate;

static dp_status dp__self_rate_of(const dp__self_move *move, int64_t at, double by,
                                  dp__self_rate *out)
{
    bool wide = move->values->dtype == DP_F64;
    double was = move->values->data[at], up = was + by, down = was - by;
    dp__self_sum above, below;
    up = wide ? up : (double)(float)up;
    down = wide ? down : (double)(float)down;
    DP_TRY(dp__self_set(move, at, up));
    DP_TRY(dp__self_evaluate(move, &above));
    DP_TRY(dp__self_set(move, at, down));
    DP_TRY(dp__self_evaluate(move, &below));
    DP_TRY(dp__self_set(move, at, was));
    *out = (dp__self_rate){.by = by,
                           .rate = (above.sum - below.sum) / (up - down),
                           .noise = 8 * move->epsilon * sqrt(above.squares + below.squares) /
                                    (up - down),
                           .above = (above.sum - move->here) / (up - was),
                           .below = (move->here - below.sum) / (was - down)};
    return DP_OK;
}

static dp_status dp__self_wrong(const dp__self_move *move, int64_t at, const dp__self_rate *rate)
{
    dp_check_report *report = move->check->report;
    double grad = move->grads->data[at];
    char place[160];
    dp__self_note(move->check, move->name, move->grads, at, grad);
    report->expected = rate->rate;
    return dp_error(DP_ERR_MISMATCH,
                    "%s%s is %.9g, but when that number is moved by %.2g the output changes at a "
                    "rate of %.9g",
                    move->name, dp__self_place(report, place, sizeof place), grad, rate->by,
                    rate->rate);
}

/* Smaller and smaller moves, while digits last. A gradient is right if one move confirms it, as
   larger ones may cross a kink. It is wrong if moves agree with each other but not with it, and
   moves up and down agree too: there is no kink. */
static dp_status dp__self_element(const dp__self_move *move, int64_t at)
{
    double grad = move->grads->data[at], was = fabs(move->values->data[at]);
    double by = cbrt(move->epsilon) * (was > 1 ? was : 1), before = 0;
    double tolerance = move->epsilon > 0x1p-40 ? 1e-2 : 1e-5;
    bool wrong = false;
    dp__self_rate rate, last = {.by = 0};
    for (int sizes = 0; sizes < 5; sizes++, by /= 4) {
        DP_TRY(dp__self_rate_of(move, at, by, &rate));
        double size = fmax(fabs(rate.rate), fabs(grad)), apart = fabs(rate.rate - before);
        double allowed = rate.noise + tolerance * (size + 1e-2 * move->largest);
        bool is_right = fabs(rate.rate - grad) <= allowed;
        if (rate.noise > 0.1 * fmax(size, move->largest) && !(is_right && !(size > 0)))
            break;
        if (is_right || !isfinite(grad)) {
            move->check->report->moved++;
            return is_right ? DP_OK : dp__self_wrong(move, at, &rate);
        }
        wrong = sizes > 0 && apart <= allowed && fabs(rate.above - rate.below) <= 4 * allowed;
        before = rate.rate;
        last = rate;
    }
    move->check->report->moved += wrong;
    move->check->report->undecided += !wrong;
    return wrong ? dp__self_wrong(move, at, &last) : DP_OK;
}

/* The largest gradient, and others from the first to the last. */
static dp_status dp__self_elements(const dp__self_move *move)
{
    int64_t count = move->grads->count, largest = 0;
    int64_t samples = (int64_t)move->check->config.samples;
    samples = samples < count ? samples : count;
    for (int64_t i = 0; i < count; i++)
        if (fabs(move->grads->data[i]) > fabs(move->grads->data[largest]))
            largest = i;
    for (int64_t i = 0; i < samples; i++) {
        int64_t at = samples > 1 ? i * (count - 1) / (samples - 1) : largest;
        DP_TRY(dp__self_element(move, at));
    }
    return samples < count && samples > 1 ? dp__self_element(move, largest) : DP_OK;
}

static dp_status dp__self_tensor_moves(const dp__self_move *whole, const dp_tensor *values,
                                       const dp_tensor *grads)
{
    dp__self_move move = *whole;
    dp__self_numbers was, grad;
    if (grads->dtype > DP_F64 || values->dtype != grads->dtype ||
        dp_tensor_count(values) != dp_tensor_count(grads))
        return DP_OK;
    dp_scope *temp = dp_scope_child(move.check->scope);
    dp_status status = dp__self_read(move.check, temp, values, &was);
    if (status == DP_OK)
        status = dp__self_read(move.check, temp, grads, &grad);
    if (status == DP_OK && was.count > 0) {
        double epsilon = dp__self_epsilon(was.dtype);
        move.values = &was;
        move.grads = &grad;
        move.largest = dp__self_largest(&grad);
        move.epsilon = epsilon > move.epsilon ? epsilon : move.epsilon;
        status = dp__self_elements(&move);
    }
    dp_scope_end(temp);
    return status;
}

static dp_status dp__self_param_moves(dp__self_move *move, const dp__self_run *one)
{
    for (size_t i = 0; i < dp_module_param_count(one->copy); i++) {
        char name[160];
        dp_param_info info;
        dp_tensor data, grad;
        DP_TRY(dp_module_param(one->copy, i, &info));
        if (info.frozen || info.buffer)
            continue;
        DP_TRY(dp_params_edit(one->copy, i, &data, &grad));
        snprintf(name, sizeof name, "gradient of '%s'", info.name);
        move->name = name;
        move->param = i;
        DP_TRY(dp__self_tensor_moves(move, &data, &grad));
    }
    return DP_OK;
}

/* Tensors of the batch that backward gave a gradient for. */
static dp_status dp__self_input_moves(dp__self_move *move, const char *name, dp_value value,
                                      dp_value grad)
{
    char inside[160];
    if (value.kind == DP_TENSOR && grad.kind == DP_TENSOR) {
        move->name = name;
        move->input = value.as.t;
        return dp__self_tensor_moves(move, value.as.t, grad.as.t);
    }
    for (size_t i = 0; i < dp_count(value); i++) {
        const char *key = dp_key_at(value, i);
        dp_value own = key != NULL ? dp_get(grad, key) : dp_at(grad, i);
        dp__self_inside(inside, sizeof inside, name, key, i);
        DP_TRY(dp__self_input_moves(move, inside, dp_at(value, i), own));
    }
    return DP_OK;
}

static dp_status dp__self_moves(const dp__self *check, const dp__self_run *one, dp_value grad)
{
    static const char *const argument = "gradient of argument";
    dp__self_run run;
    dp__self_move move = {.check = check, .run = &run, .grad = grad};
    dp__self_sum sum;
    dp_status status = dp__self_run_make(check, false, &run);
    if (status == DP_OK)
        status = dp__self_evaluate(&move, &sum);
    if (status == DP_OK) {
        move.here = sum.sum;
        move.epsilon = fmax(sum.epsilon, dp__self_epsilon(check->coarsest));
        status = dp__self_param_moves(&move, one);
    }
    if (status == DP_OK)
        status = dp__self_input_moves(&move, argument, check->args, one->inputs.args);
    if (status == DP_OK)
        status = dp__self_input_moves(&move, argument, check->kwargs, one->inputs.kwargs);
    return dp__self_run_end(&run, status);
}

/* ==== >>asking ==================================================================================
   All runs are compared with one run on one device.                                             */

static dp_status dp__self_config_check(dp__self *check, dp_value batch)
{
    dp_check_config *config = &check->config;
    dp_info info;
    DP_TRY(dp_info_get(check->ctx, &info));
    DP_TRY(dp_made(batch, &batch));
    if (!(dp_or(config->tolerance, 0) >= 0) || !isfinite(config->tolerance))
        return dp_error(DP_ERR_INVALID, "tolerance is %g, not a finite number of 0 or more",
                        config->tolerance);
    if (config->replicas < 0 || config->replicas == 1)
        return dp_error(DP_ERR_INVALID, "replicas is %d, not 2 or more", config->replicas);
    if (batch.kind != DP_DICT && batch.kind != DP_LIST && batch.kind != DP_TUPLE)
        return dp_error(DP_ERR_INVALID, "batch is not a dict, list or tuple of arguments");
    config->method = config->method != NULL ? config->method : "forward";
    config->samples = config->samples > 0 ? config->samples : 8;
    if (config->replicas == 0)
        config->replicas = info.local_count > 1 ? info.local_count : 2;
    return DP_OK;
}

static dp_status dp__self_coarsest(const dp__self *check, dp_dtype *out)
{
    *out = DP_F64;
    for (size_t i = 0; i < dp_module_param_count(check->module); i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(check->module, i, &info));
        if (!info.frozen && !info.buffer)
            *out = dp__self_coarser((dp_dtype)info.data.dtype, *out);
    }
    return DP_OK;
}

static dp_status dp__self_all(dp__self *check)
{
    const dp_check_config *config = &check->config;
    dp_value grad = {.kind = DP_ERROR}; /* there is none yet */
    dp__self_run one;
    dp_status status = dp__self_run_begin(check, false, &one);
    if (status == DP_OK)
        status = dp__self_twice(check, &one, &grad);
    if (status == DP_OK)
        status = dp__self_adds(check, grad);
    if (status == DP_OK && !config->no_replicas)
        status = dp__self_replicas(check, &one, &grad);
    if (status == DP_OK && !config->no_differences && !config->only_outputs)
        status = dp__self_moves(check, &one, grad);
    return dp__self_run_end(&one, status);
}

static dp_status dp__self_run_all(dp__self *check, dp_value batch)
{
    dp_value kept;
    DP_TRY(dp__self_config_check(check, batch));
    DP_TRY(dp__self_coarsest(check, &check->coarsest));
    DP_TRY(dp_keep(check->scope, batch, &kept));
    check->args = kept.kind != DP_DICT ? kept : dp_none();
    check->kwargs = kept.kind == DP_DICT ? kept : dp_none();
    return dp__self_all(check);
}

DP_API dp_status dp_self_check(dp_module *module, dp_value batch, const dp_check_config *config,
                               dp_check_report *out_report)
{
    static const dp_check_config zero;
    dp_check_report report = {.compared = 0};
    dp__self check = {.module = dp_unwrap(module),
                      .ctx = dp_module_ctx(module),
                      .config = config != NULL ? *config : zero,
                      .report = &report,
                      .one = "on one device",
                      .gives_grads = true};
    if (check.ctx == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", __func__);
    check.exact = check.config.exact;
    check.scope = dp_scope_begin(check.ctx);
    DP_TRY(dp_scope_check(check.scope));
    dp_status status = dp__self_run_all(&check, batch);
    dp_scope_end(check.scope);
    if (out_report != NULL)
        *out_report = report;
    return dp_error_in(__func__, status);
}
#endif /* DP_IMPLEMENTATION && !DP_CHECK_IMPLEMENTED */
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
