/* dp/checks.h - v0.2.0 - what is wrong, but legal - MIT licence

   Part of dp.h, which includes it. Mistakes that no call can refuse, since each call by itself is
   fine. Some cost nothing to look for, and are logged once at warn level. For others numbers have
   to be read: that is done in some steps, where $DP_DEBUG=check or dp_config.check asks for it.
   Manual: dp_check.h.

   Where it looks: before a backward (the loss, gradients of the step before), after the backward of
   each replica (its gradients), and after all of it. Under dp_distributed what is found before
   gradients are reduced is a failure of the backward, which all ranks learn; the rest is in
   dp/distributed.h.

   CONTENTS (search for the tag)
     >>finding  which steps are checked, and what is done with what is found
     >>finite   losses and gradients
     >>cleared  gradients that nobody has cleared since parameters were updated
     >>apart    processes that train, and exchange nothing
     >>backward before one, and after it
     >>idle     devices that get no rows
*/

#ifndef DP__ROOMS
#error "dp/checks.h is a part of dp.h: include dp.h"
#else

/* ==== >>finding ==================================================================================
   The first step is checked, and each n-th. A step is a pass with gradients that the user asked
   for; of a wrapper over ranks it is what ends with a reduction, which all ranks count alike.    */

DP__COLD DP_PRINTF(2, 3) static dp_status dp__finding(const dp_ctx *ctx, const char *format, ...)
{
    char text[DP__TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!ctx->checks.warns)
        return dp_error(DP_ERR_CHECK, "%s", text);
    dp__log(ctx, DP_LOG_WARN, "%s", text);
    return DP_OK;
}

/* Counts a pass, and decides whether it is checked. */
static void dp__check_decide(dp_pass *pass)
{
    const dp__face_ops *ops = dp__ops(pass->face);
    unsigned every = pass->ctx->checks.every;
    if (every == 0 || !pass->records[0].call.grad_enabled || !dp__is_asked(pass))
        return;
    uint64_t before = ops->steps != NULL ? ops->steps(pass->face) : pass->runs->steps++;
    pass->step = before + 1;
    pass->checked = before % every == 0;
}

/* Reports memory that was written where nobody may write: see >>poison. */
static dp_status dp__check_damage(dp_ctx *ctx)
{
    char text[DP__SENTENCE_BYTES];
    if (ctx->checks.every == 0)
        return DP_OK;
    dp__lock_enter(&ctx->lock);
    memcpy(text, ctx->checks.damage, sizeof text);
    ctx->checks.damage[0] = '\0';
    dp__lock_leave(&ctx->lock);
    return text[0] != '\0' ? dp__finding(ctx, "%s", text) : DP_OK;
}

/* ---- hashes ---------------------------------------------------------------------------------- */

typedef struct dp__data_hasher {
    dp__mapper mapper;
    uint64_t hash;
} dp__data_hasher;

static dp_status dp__hash_leaf(dp__mapper *mapper, dp_value value, dp_value *out)
{
    dp__data_hasher *hasher = (dp__data_hasher *)mapper;
    dp_tensor host;
    *out = value;
    hasher->hash = dp__hash(hasher->hash, &value.kind, sizeof value.kind);
    if (value.kind == DP_CONTAINER)
        return dp__map(mapper, value.as.c->data, out);
    if (value.kind == DP_STRING)
        hasher->hash = dp__hash(hasher->hash, value.as.s, strlen(value.as.s));
    else if (value.kind != DP_TENSOR)
        hasher->hash = dp__hash(hasher->hash, &value.as, sizeof value.as);
    if (value.kind != DP_TENSOR || dp__count(value.as.t) == 0)
        return DP_OK;
    DP_TRY(dp__tensor_from(mapper->scope, &mapper->scope->ctx->host_device, value.as.t, &host));
    hasher->hash = dp__hash(hasher->hash, host.data, dp__bytes(&host));
    return DP_OK;
}

/* Hashes data, wherever it lies. */
static dp_status dp__data_hash(dp_ctx *ctx, dp_value data, uint64_t *out)
{
    dp_scope *temp = NULL;
    dp_value copy;
    DP_TRY(dp__check_value("dp_train_step", "data", data));
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp__data_hasher hasher = {{.scope = temp, .leaf = dp__hash_leaf, .plain = true},
                              dp__hash_first};
    dp_status status = dp__map(&hasher.mapper, data, &copy);
    *out = hasher.hash;
    return dp__temp_end(temp, NULL, status);
}

/* Hashes what a pass was given. */
static dp_status dp__batch_hash(const dp_pass *pass, uint64_t *out)
{
    uint64_t args = 0, kwargs = 0;
    DP_TRY(dp__data_hash(pass->ctx, pass->args, &args));
    DP_TRY(dp__data_hash(pass->ctx, pass->kwargs, &kwargs));
    *out = args ^ kwargs * 31;
    return DP_OK;
}

/* ==== >>finite ===================================================================================
   A number that is not finite makes all parameters so, a step later.                            */

/* All NaN are the same one in a sentence: some have a sign. */
static double dp__unsigned_nan(double number)
{
    return isnan(number) ? (double)NAN : number;
}

typedef struct dp__bad { /* a number of a tensor, mostly the first that is not finite */
    int64_t at;          /* -1: there is none */
    double number;
} dp__bad;

/* Finds the first number that is finite, or the first that is not. */
static dp_status dp__number_among(dp_ctx *ctx, dp_scope *temp, const dp_tensor *tensor, bool finite,
                                  dp__bad *out)
{
    dp_tensor host, wide;
    DP_TRY(dp__tensor_from(temp, &ctx->host_device, tensor, &host));
    DP_TRY(dp__tensor_make(temp, &ctx->host_device, DP_F64, host.ndim, host.shape, &wide));
    DP_TRY(dp__cast_flat(ctx, &ctx->host_device, wide.data, DP_F64, host.data, (dp_dtype)host.dtype,
                         (size_t)dp__count(&host)));
    const double *numbers = wide.data;
    for (int64_t i = 0; i < dp__count(&host) && out->at < 0; i++)
        if ((isfinite(numbers[i]) != 0) == finite)
            *out = (dp__bad){i, dp__unsigned_nan(numbers[i])};
    return DP_OK;
}

/* Looks at all elements on their device, if they should be finite, before it searches. */
static dp_status dp__number_find(dp_ctx *ctx, const dp_tensor *tensor, bool finite, dp__bad *out)
{
    const double *sums = NULL;
    dp_scope *temp = NULL;
    const dp__device *device = dp__device_of(ctx, tensor->device);
    *out = (dp__bad){.at = -1};
    if (device == NULL || !dp__is_float((dp_dtype)tensor->dtype) || dp__count(tensor) == 0)
        return DP_OK;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = finite ? DP_OK : dp__stats(ctx, temp, device, tensor, &sums);
    if (status == DP_OK && (finite || sums[1] > 0))
        status = dp__number_among(ctx, temp, tensor, finite, out);
    return dp__temp_end(temp, NULL, status);
}

static dp_status dp__bad_find(dp_ctx *ctx, const dp_tensor *tensor, dp__bad *out)
{
    return dp__number_find(ctx, tensor, false, out);
}

/* "nan at [3, 17]" */
static const char *dp__bad_text(const dp_tensor *tensor, dp__bad bad, char *text, size_t bytes)
{
    int64_t places[DP_MAX_DIMS];
    size_t used = dp__append(text, bytes, 0, "%g", bad.number);
    for (int d = tensor->ndim - 1; d >= 0; bad.at /= tensor->shape[d--])
        places[d] = bad.at % tensor->shape[d];
    for (int d = 0; d < tensor->ndim; d++)
        used = dp__append(text, bytes, used, "%s%lld%s", d == 0 ? " at [" : ", ",
                          (long long)places[d], d == tensor->ndim - 1 ? "]" : "");
    return text;
}

/* Adds to a sentence where a number that is not finite has come from: what a replica was given. */
static dp_status dp__bad_origin(const dp_pass *pass, size_t r, dp_value value, const char *name,
                                char *text, size_t bytes)
{
    char where[128];
    dp__bad bad;
    if (value.kind == DP_CONTAINER)
        value = value.as.c->data;
    for (size_t i = 0; i < dp_count(value) && text[0] == '\0'; i++) {
        const char *key = dp_key_at(value, i);
        DP_TRY(dp__bad_origin(pass, r, dp_at(value, i), key != NULL ? key : name, text, bytes));
    }
    if (value.kind != DP_TENSOR || text[0] != '\0')
        return DP_OK;
    const dp_tensor rows = dp__real_part(pass, r, value.as.t);
    DP_TRY(dp__bad_find(pass->ctx, &rows, &bad));
    if (bad.at >= 0)
        snprintf(text, bytes, "the batch has %s in '%s'",
                 dp__bad_text(&rows, bad, where, sizeof where), name);
    return DP_OK;
}

static dp_status dp__bad_param(const dp_pass *pass, char *text, size_t bytes)
{
    char where[128];
    dp__bad bad;
    for (size_t home = 0; home < pass->runs->listed_count && text[0] == '\0'; home++) {
        const dp__param *root = dp__param_at(pass->runs, home);
        DP_TRY(dp__bad_find(pass->ctx, &root->data, &bad));
        if (bad.at >= 0)
            snprintf(text, bytes, "%s '%s' has %s", root->buffer ? "buffer" : "parameter",
                     dp__name_at(pass->runs, home),
                     dp__bad_text(&root->data, bad, where, sizeof where));
    }
    return DP_OK;
}

static dp_status dp__loss_found(const dp_pass *pass, size_t r, const char *key, double number)
{
    char why[256] = "";
    const dp_call *call = &pass->records[r].call;
    DP_TRY(dp__bad_origin(pass, r, call->args, "an argument", why, sizeof why));
    DP_TRY(dp__bad_origin(pass, r, call->kwargs, "an argument", why, sizeof why));
    DP_TRY(dp__bad_param(pass, why, sizeof why));
    return dp__finding(
        pass->ctx, "'%s' of '%s' is %g in step %llu, on rank %d: %s", key, pass->runs->name, number,
        (unsigned long long)pass->step, pass->ctx->info.rank_first + call->local_rank,
        why[0] != '\0' ? why
                       : "its batch and its parameters are finite, so its forward makes it of "
                         "them, or of memory that it may not read, which is NaN in a check");
}

static dp_status dp__check_loss(const dp_pass *pass, size_t r, const char *key, dp_value value)
{
    dp__bad bad = {.at = -1};
    if (value.kind == DP_FLOAT && !isfinite(value.as.f))
        bad = (dp__bad){0, dp__unsigned_nan(value.as.f)};
    for (uint32_t i = 0; dp__is_sequence(value) && i < value.count; i++)
        DP_TRY(dp__check_loss(pass, r, key, value.as.items[i]));
    if (value.kind == DP_TENSOR) {
        const dp_tensor rows = dp__real_part(pass, r, value.as.t);
        DP_TRY(dp__bad_find(pass->ctx, &rows, &bad));
    }
    return bad.at >= 0 ? dp__loss_found(pass, r, key, bad.number) : DP_OK;
}

/* Looks at entries that hold "loss", and at a number alone. A replica without weight has no rows:
   its mean may be anything, and counts for nothing. */
static dp_status dp__check_losses_of(const dp_pass *pass, size_t r)
{
    dp_value out = pass->records[r].call.out;
    bool alone = out.kind == DP_FLOAT || (out.kind == DP_TENSOR && dp__count(out.as.t) == 1);
    if (!(pass->records[r].call.weight > 0))
        return DP_OK;
    if (alone)
        DP_TRY(dp__check_loss(pass, r, "the loss", out));
    for (uint32_t i = 0; out.kind == DP_DICT && i < out.count; i++)
        if (strstr(out.as.pairs[i].key, "loss") != NULL)
            DP_TRY(dp__check_loss(pass, r, out.as.pairs[i].key, out.as.pairs[i].value));
    return DP_OK;
}

/* Checks the gradient that a replica has made of the parameter of a slot of its tree. Those of a
   scaled loss may be infinite: the scale sees it. */
static dp_status dp__check_grad(const dp__record *record, size_t slot)
{
    char where[128];
    dp__bad bad;
    const dp_pass *pass = record->pass;
    const dp_module *runs = pass->runs;
    const dp__param *root = dp__root(runs->slots[slot]);
    if (!pass->checked || pass->scaled || record->leaves_nothing ||
        !dp__is_of_sort(root, DP__GRADS))
        return DP_OK;
    dp_tensor grad = root->data;
    grad.data = *record->memory->grad[slot];
    grad.device = record->call.replica > 0 ? record->call.device : grad.device;
    DP_TRY(dp__bad_find(pass->ctx, &grad, &bad));
    if (bad.at < 0)
        return DP_OK;
    return dp__finding(pass->ctx, "the gradient of '%s' of '%s' has %s in step %llu, on rank %d",
                       runs->names[slot], runs->name, dp__bad_text(&grad, bad, where, sizeof where),
                       (unsigned long long)pass->step,
                       pass->ctx->info.rank_first + record->call.local_rank);
}

static dp_status dp__check_grads(const dp__record *record)
{
    const dp_module *runs = record->pass->runs;
    for (size_t home = 0; home < runs->listed_count; home++)
        DP_TRY(dp__check_grad(record, runs->listed[home]));
    return DP_OK;
}

/* ==== >>cleared ==================================================================================
   A backward adds to gradients. If parameters have changed since they were made, and they have not,
   the step before counts again, and so does each step before that. Numbers are compared, not calls:
   whoever clears gradients or scales them by hand, and whoever puts other parameters in place for a
   while, is right.                                                                              */

/* Hashes numbers; on the host where they are. */
static dp_status dp__numbers_hash(dp_ctx *ctx, const dp_tensor *numbers, uint64_t *out)
{
    dp_scope *temp = NULL;
    dp_tensor host = *numbers;
    dp_status status = DP_OK;
    if (!dp__is_host(&ctx->devices[numbers->device.index])) {
        DP_TRY(dp__temp_begin(ctx, &temp));
        status = dp__tensor_from(temp, &ctx->host_device, numbers, &host);
    }
    if (status == DP_OK)
        *out = dp__hash(dp__hash_first, host.data, dp__bytes(&host));
    return dp__temp_end(temp, NULL, status);
}

/* Keeps in mind what a parameter and its gradient are, unless that is all zero. */
static dp_status dp__grad_note(dp_ctx *ctx, dp__param *root)
{
    const double *sums = NULL;
    dp_scope *temp = NULL;
    dp_tensor grad = root->data;
    grad.data = root->grad;
    root->noted = false;
    if (!dp__is_of_sort(root, DP__GRADS) || root->scattered || dp__count(&grad) == 0)
        return DP_OK;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__stats(ctx, temp, &ctx->devices[grad.device.index], &grad, &sums);
    if (status == DP_OK)
        status = dp__numbers_hash(ctx, &root->data, &root->noted_data);
    if (status == DP_OK)
        status = dp__numbers_hash(ctx, &grad, &root->noted_grad);
    root->noted = status == DP_OK && !(sums[0] <= 0);
    return dp__temp_end(temp, NULL, status);
}

static dp_status dp__check_cleared_of(const dp_module *runs, size_t home)
{
    uint64_t data = 0, grad = 0;
    dp__param *root = dp__param_at(runs, home);
    dp_tensor own = root->data;
    own.data = root->grad;
    if (!root->noted || root->torn || root->scattered)
        return DP_OK;
    root->noted = false;
    DP_TRY(dp__numbers_hash(runs->ctx, &root->data, &data));
    DP_TRY(dp__numbers_hash(runs->ctx, &own, &grad));
    if (data == root->noted_data || grad != root->noted_grad)
        return DP_OK;
    return dp__finding(runs->ctx,
                       "'%s' of '%s' was updated since the last backward, and its gradient was not "
                       "cleared: this backward would add to that of the step before; call "
                       "dp_zero_grad after each update",
                       dp__name_at(runs, home), runs->name);
}

/* ==== >>apart ====================================================================================
   Each process of a job trains a model of its own if it is wrapped by dp_data_parallel, say, in
   place of dp_everywhere: the losses look fine, and nobody learns more than alone. That it is so
   can only be seen from what does not happen: parameters are edited after each backward, and
   nothing travels that can hold gradients or parameters. Numbers that processes tell each other
   (dp_log_mean) do not count, nor do the gradients of wrappers over all ranks, which are of other
   modules. A reducer of the user's may travel seldom (dp_local.h): one is enough.               */

enum { DP__APART_UPDATES = 32 };

/* Process 0 warns, or each fails, as the first steps of any job may be checked, but not this. */
static dp_status dp__say_apart(const dp_pass *pass)
{
    static atomic_bool said;
    char text[DP__TEXT_BYTES];
    const dp_ctx *ctx = pass->ctx;
    snprintf(text, sizeof text,
             "'%s' was updated %d times, and dp.h has carried no gradients and no parameters "
             "between the %d processes: each trains a model of its own. dp_everywhere and "
             "dp_distributed train one together",
             pass->runs->name, DP__APART_UPDATES, ctx->info.process_count);
    if (ctx->checks.every > 0)
        return dp__finding(ctx, "%s", text);
    if (ctx->info.process == 0)
        dp__warn_all(ctx, &said, text);
    return DP_OK;
}

/* Counts the update before a backward that the user asked for, whose gradients no other process
   gets. */
static dp_status dp__apart_count(const dp_pass *pass)
{
    dp_ctx *ctx = pass->ctx;
    dp__apart *apart = &ctx->apart;
    uint64_t exchanges = atomic_load_explicit(&dp__exchanges, memory_order_relaxed);
    if (ctx->info.process_count == 1 || apart->said || ctx->world.mailbox != NULL ||
        atomic_load_explicit(&dp__reduces_itself, memory_order_relaxed))
        return DP_OK;
    bool updated = atomic_load_explicit(&ctx->written, memory_order_relaxed) >= apart->forward;
    bool goes_on = apart->forward > 0 && exchanges == apart->exchanges;
    apart->updates = goes_on ? apart->updates + updated : 0;
    apart->exchanges = exchanges;
    apart->forward = pass->number;
    if (apart->updates < DP__APART_UPDATES)
        return DP_OK;
    apart->said = true;
    return dp__say_apart(pass);
}

/* ==== >>backward =================================================================================
   Checks before a backward that the user asked for, and after it.                               */

static dp_status dp__check_before(const dp_pass *pass)
{
    const dp_module *runs = pass->runs;
    if (!dp__is_asked(pass))
        return DP_OK;
    for (size_t home = 0; home < runs->listed_count && !runs->mean_grads; home++)
        DP_TRY(dp__check_cleared_of(runs, home));
    for (size_t r = 0; pass->checked && r < pass->count; r++)
        DP_TRY(dp__check_losses_of(pass, r));
    return DP_OK;
}

/* Checks what this process finds alone; where others have to learn of it, dp/distributed.h does. */
static dp_status dp__check_after(const dp_pass *pass)
{
    const dp_module *runs = pass->runs;
    if (!dp__ops(pass->face)->over_ranks) {
        DP_TRY(dp__apart_count(pass));
        DP_TRY(dp__check_damage(pass->ctx));
    }
    for (size_t home = 0; pass->checked && home < runs->listed_count; home++)
        DP_TRY(dp__grad_note(pass->ctx, dp__param_at(runs, home)));
    return DP_OK;
}

/* ==== >>idle =====================================================================================
   A batch of fewer rows than devices leaves some without work. One is usual, at the end. Batches of
   no rows are usual where other processes have more.                                            */

enum { DP__IDLE_PASSES = 32 };

/* Counts a pass that was cut. */
static void dp__idle_count(dp__face *face, const dp_pass *pass)
{
    size_t busy = 0;
    for (size_t r = 0; r < pass->count && pass->rows != NULL; r++)
        busy += pass->rows[r] > 0;
    bool lasts = busy > 0 || (pass->rows != NULL && face->ctx->info.process_count == 1);
    bool idle = lasts && busy < face->count;
    face->idle_passes = idle ? face->idle_passes + 1 : 0;
    if (face->idle_passes != DP__IDLE_PASSES || face->idle_said)
        return;
    face->idle_said = true;
    dp__log(face->ctx, DP_LOG_WARN,
            "'%s': the last %d batches had rows for %zu of %zu devices, and the others had nothing "
            "to do: give it larger batches, or fewer devices (DP_DEVICES, local_ranks)",
            face->runs->name, DP__IDLE_PASSES, busy, face->count);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
