/* dp_average.h - v0.2.0 - averages of a model's parameters over its training - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h.

       dp_average *average;
       dp_average_create(par, &(dp_average_config){.momentum = 0.001}, &average);
       for (...) {
           dp_train_step(par, step, batch, optim, &log);
           dp_average_update(average);
       }
       dp_average_begin(average);                 the module has the averages
       evaluate(par);
       dp_average_end(average);                   and its own numbers again

   CONTENTS (search for the tag)
     >>average    SWA, EMA, annealed EMA: mmengine's averaged models
   and of the implementation
     >>entries    parameters and buffers of a module, and what is kept for each
     >>updating   one pass over each of them
     >>using      the averages in a module
     >>saving     and in a checkpoint
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_AVERAGE_H) && defined(DP_H)
#define DP_AVERAGE_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>average ================================================================================
   Every owner keeps the averages of its parameters, so an update sends nothing: ranks with equal
   parameters have equal averages. Averages of f16 and bf16 are f32, as a half would lose what a
   small momentum adds. The weights of old and new add up to exactly 1, so the average of equal
   numbers is that number after any number of updates.                                           */

typedef struct dp_average dp_average;

typedef enum dp_average_rule {
    DP_AVERAGE_EMA,     /* (1 - momentum) * average + momentum * parameter */
    DP_AVERAGE_SWA,     /* the mean of all that were averaged */
    DP_AVERAGE_ANNEALED /* EMA with momentum max(momentum, gamma / (gamma + updates before)) */
} dp_average_rule;

typedef struct dp_average_config { /* zero: as mmengine's ExponentialMovingAverage */
    dp_average_rule rule;
    double momentum;  /* below 1; 0: 0.0002, DP_ZERO: 0. For f32 and halves it is rounded to a
                         multiple of 2^-24, about 6e-8. SWA has none */
    double gamma;     /* above 0; 0: 100. Only for DP_AVERAGE_ANNEALED */
    int64_t interval; /* average every so many updates; 0: 1 */
    bool buffers;     /* averaged like parameters; else each update copies them */
} dp_average_config;

/* Begins with copies of all parameters and buffers of a module or wrapper, frozen ones too. Dtypes
   that are not floating are copied, not averaged. Ends with the context, or by dp_average_destroy,
   before its module. */
DP_MUST_USE DP_API dp_status dp_average_create(dp_module *module, const dp_average_config *config,
                                               dp_average **out);
/* Ends what was begun. NULL is fine. */
DP_API void dp_average_destroy(dp_average *average);

/* After a step. The first one copies. It only reads the module, and so may come at any time:
   between a forward and its backward it gets the numbers of before the step. Like dp_average_load
   it is refused (STATE) in a method that several devices run at once, if the averages lie on
   several. */
DP_MUST_USE DP_API dp_status dp_average_update(dp_average *average);

typedef struct dp_average_info {
    int64_t updates;
    bool begun;
    double momentum; /* of the next update that averages */
    size_t bytes;    /* on each device that has parameters; halves have scratch memory, too */
} dp_average_info;
DP_MUST_USE DP_API dp_status dp_average_info_get(const dp_average *average, dp_average_info *out);

/* Between begin and end the module has the averages, on every owner, and updates are refused. Its
   own numbers come back bit by bit, whatever is written to it meanwhile. With several averages of
   one module, the last to begin is the first to end. */
DP_MUST_USE DP_API dp_status dp_average_begin(dp_average *average);
DP_MUST_USE DP_API dp_status dp_average_end(dp_average *average);

/* Into a module, for good: the same module, a copy of it (dp_module_copy), or any other that has
   parameters of these names and shapes, on any device. If it lacks one, or ties two of them,
   nothing changes. Its other parameters stay as they are. [host] */
DP_MUST_USE DP_API dp_status dp_average_copy(dp_average *average, dp_module *module);

/* A dict on the host, from which to go on later: "rule", "updates", and "average", a dict of
   tensors by the names of parameters. */
DP_MUST_USE DP_API dp_status dp_average_save(dp_average *average, dp_scope *scope, dp_value *out);
/* The same to be written before the next update: views of the averages, no copies. */
DP_MUST_USE DP_API dp_status dp_average_view(dp_average *average, dp_scope *scope, dp_value *out);
/* Rule and parameters must be the same; else an error names what differs, and nothing changes. What
   dp_average_view has given of this average is loaded as it was given, or copied before: not as
   other views of it, nor under other names. [host] */
DP_MUST_USE DP_API dp_status dp_average_load(dp_average *average, dp_value saved);

#ifdef __cplusplus
}
#endif
#endif /* DP_AVERAGE_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_AVERAGE_IMPLEMENTED)
#define DP_AVERAGE_IMPLEMENTED

#include <math.h>
#include <string.h>

/* ==== >>entries =================================================================================
   An entry is a parameter or buffer, by its number in the module.                               */

typedef struct dp__average_entry {
    const char *name;
    dp_dtype dtype; /* the module's */
    bool buffer;
    dp_tensor *own;  /* the average, owner after owner */
    dp_tensor *kept; /* between begin and end: what the module had */
} dp__average_entry;

struct dp_average {
    dp_module *module;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_average_config config; /* defaults put in */
    size_t count, owner_count;
    dp__average_entry *entries;
    dp_tensor *wide; /* of each device where halves lie: f32 for the largest of all */
    bool apart;      /* the averages lie on several devices */
    int64_t updates;
    dp_scope *kept; /* NULL: not begun */
};

static const char *const dp__average_rules[] = {"ema", "swa", "annealed"};

static dp_dtype dp__average_dtype(dp_dtype dtype)
{
    return dtype == DP_F16 || dtype == DP_BF16 ? DP_F32 : dtype;
}

static dp_status dp__average_entry_make(const dp_average *average, size_t i)
{
    dp__average_entry *entry = &average->entries[i];
    dp_param_info info;
    DP_TRY(dp_module_param(average->module, i, &info));
    *entry = (dp__average_entry){
        .name = dp_text(dp_string(average->scope, info.name)),
        .dtype = (dp_dtype)info.data.dtype,
        .buffer = info.buffer,
        .own = dp_scope_alloc(average->scope, average->owner_count * sizeof *entry->own),
        .kept = dp_scope_alloc(average->scope, average->owner_count * sizeof *entry->kept)};
    if (entry->name == NULL || entry->own == NULL || entry->kept == NULL)
        return dp_no_memory();
    for (size_t owner = 0; owner < average->owner_count; owner++) {
        dp_tensor from;
        DP_TRY(dp_owner_param(average->module, owner, i, &from));
        DP_TRY(dp_tensor_to(average->scope, from.device, dp__average_dtype(entry->dtype), &from,
                            &entry->own[owner]));
    }
    return DP_OK;
}

/* How many elements of one parameter are halves. */
static int64_t dp__average_halves(const dp__average_entry *entry)
{
    bool half = dp__average_dtype(entry->dtype) != entry->dtype;
    return half ? dp_tensor_count(&entry->own[0]) : 0;
}

/* Room for the largest half as f32, on each device that has any: a tree may be on several. */
static dp_status dp__average_wide_make(dp_average *average)
{
    int64_t most = 0;
    dp_info info;
    DP_TRY(dp_info_get(average->ctx, &info));
    size_t bytes = (size_t)info.local_count * sizeof *average->wide;
    average->wide = dp_scope_alloc(average->scope, bytes);
    if (average->wide == NULL)
        return dp_no_memory();
    memset(average->wide, 0, bytes);
    for (size_t i = 0; i < average->count; i++) {
        int64_t count = dp__average_halves(&average->entries[i]);
        most = count > most ? count : most;
    }
    for (size_t i = 0; i < average->count; i++)
        for (size_t owner = 0; owner < average->owner_count; owner++) {
            dp_device device = average->entries[i].own[owner].device;
            dp_tensor *wide = &average->wide[device.index];
            if (dp__average_halves(&average->entries[i]) > 0 && wide->data == NULL)
                DP_TRY(dp_tensor_new(average->scope, device, DP_F32, 1, &most, wide));
        }
    return DP_OK;
}

static bool dp__average_is_apart(const dp_average *average)
{
    for (size_t i = 0; i < average->count; i++)
        for (size_t owner = 0; owner < average->owner_count; owner++)
            if (average->entries[i].own[owner].device.index !=
                average->entries[0].own[0].device.index)
                return true;
    return false;
}

/* While replicas run, each may write to its own device: so not to all of these. */
static dp_status dp__average_check_alone(const char *fn, const dp_average *average)
{
    DP_TRY(dp_check_pointer(fn, "average", average));
    return average->apart ? dp_check_alone(fn, average->ctx) : DP_OK;
}

static dp_status dp__average_check(dp_average_config *config)
{
    if ((unsigned)config->rule > DP_AVERAGE_ANNEALED)
        return dp_error(DP_ERR_INVALID, "rule is %d", (int)config->rule);
    if (config->rule == DP_AVERAGE_SWA && fabs(config->momentum) > 0)
        return dp_error(DP_ERR_INVALID, "momentum is %g, but SWA has none", config->momentum);
    if (config->rule != DP_AVERAGE_ANNEALED && fabs(config->gamma) > 0)
        return dp_error(DP_ERR_INVALID, "gamma is %g, but rule '%s' has none", config->gamma,
                        dp__average_rules[config->rule]);
    config->momentum = dp_or(config->momentum, 0.0002);
    config->gamma = dp_or(config->gamma, 100);
    config->interval = config->interval == 0 ? 1 : config->interval;
    if (!(config->momentum >= 0 && config->momentum < 1))
        return dp_error(DP_ERR_INVALID, "momentum is %g, not from 0 to below 1", config->momentum);
    if (!(config->gamma > 0) || !isfinite(config->gamma))
        return dp_error(DP_ERR_INVALID, "gamma is %g, not a finite number above 0", config->gamma);
    if (config->interval < 1)
        return dp_error(DP_ERR_INVALID, "interval is %lld, which is below 1",
                        (long long)config->interval);
    return DP_OK;
}

static dp_status dp__average_make(dp_scope *scope, dp_module *module,
                                  const dp_average_config *config, dp_average **out)
{
    static const dp_average_config zero;
    dp_average *average = dp_scope_alloc(scope, sizeof *average);
    if (average == NULL)
        return dp_no_memory();
    *average = (dp_average){.module = module,
                            .ctx = dp_module_ctx(module),
                            .scope = scope,
                            .config = config != NULL ? *config : zero,
                            .count = dp_module_param_count(module),
                            .owner_count = dp_owner_count(module)};
    DP_TRY(dp__average_check(&average->config));
    average->entries = dp_scope_alloc(scope, average->count * sizeof *average->entries);
    if (average->entries == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < average->count; i++)
        DP_TRY(dp__average_entry_make(average, i));
    average->apart = dp__average_is_apart(average);
    *out = average;
    return dp__average_wide_make(average);
}

DP_API dp_status dp_average_create(dp_module *module, const dp_average_config *config,
                                   dp_average **out)
{
    dp_average *average = NULL;
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (dp_module_ctx(module) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", __func__);
    dp_scope *scope = dp_scope_begin(dp_module_ctx(module));
    DP_TRY(dp_scope_check(scope));
    dp_status status = dp__average_make(scope, module, config, &average);
    if (status == DP_OK)
        *out = average;
    else
        dp_scope_end(scope);
    return dp_error_in(__func__, status);
}

/* ==== >>updating ================================================================================
   Updates before this one are counted, as mmengine does.                                        */

static double dp__average_momentum(const dp_average *average)
{
    const dp_average_config *config = &average->config;
    int64_t rest = average->updates % config->interval;
    int64_t turn = average->updates / config->interval + (rest > 0);
    double before = (double)turn * (double)config->interval;
    double annealed = config->gamma / (config->gamma + before);
    if (config->rule == DP_AVERAGE_SWA)
        return 1 / (double)(turn + 1);
    if (config->rule == DP_AVERAGE_ANNEALED && annealed > config->momentum)
        return annealed;
    return config->momentum;
}

/* The larger weight is rounded to the dtype that is computed in; 1 minus that is exact there. */
static void dp__average_weights(double momentum, dp_dtype dtype, double *out_old, double *out_new)
{
    double large = momentum < 0.5 ? 1 - momentum : momentum;
    large = dtype == DP_F64 ? large : (double)(float)large;
    *out_old = momentum < 0.5 ? large : 1 - large;
    *out_new = momentum < 0.5 ? 1 - large : large;
}

static dp_status dp__average_blend(const dp_average *average, const dp_tensor *from,
                                   const dp_tensor *own)
{
    double old_weight, new_weight;
    dp_tensor wide = *from;
    dp__average_weights(dp__average_momentum(average), (dp_dtype)own->dtype, &old_weight,
                        &new_weight);
    if (from->dtype != own->dtype) {
        const dp_tensor *room = &average->wide[own->device.index];
        DP_TRY(dp_narrow(room, 0, 0, dp_tensor_count(from), &wide));
        DP_TRY(dp_reshape(&wide, from->ndim, from->shape, &wide));
        DP_TRY(dp_cast(average->ctx, &wide, from));
    }
    return dp_axpby(average->ctx, old_weight, own, new_weight, &wide, own);
}

static dp_status dp__average_entry_update(const dp_average *average, size_t owner, size_t i)
{
    const dp__average_entry *entry = &average->entries[i];
    bool due = average->updates % average->config.interval == 0;
    bool copied = average->updates == 0 || (entry->buffer && !average->config.buffers) ||
                  entry->dtype > DP_BF16;
    dp_tensor from, *own = &entry->own[owner];
    if (dp_tensor_count(own) == 0)
        return DP_OK;
    if (!due && !(entry->buffer && !average->config.buffers))
        return DP_OK;
    DP_TRY(dp_owner_param(average->module, owner, i, &from));
    return copied ? dp_cast(average->ctx, own, &from) : dp__average_blend(average, &from, own);
}

/* The module has the parameters it had when the average was made. After a job failure it lists
   none; asking for one tells why. */
static dp_status dp__average_same(const dp_average *average)
{
    dp_module *module = average->module;
    dp_param_info first;
    if (average->count > 0 && dp_module_param_count(module) == 0)
        DP_TRY(dp_module_param(module, 0, &first));
    if (dp_module_param_count(module) != average->count ||
        dp_owner_count(module) != average->owner_count)
        return dp_error(DP_ERR_STATE, "'%s' has other parameters than when the average was made",
                        dp_module_name(module));
    return DP_OK;
}

static dp_status dp__average_not_begun(const dp_average *average, const char *what)
{
    return average->kept == NULL ? dp__average_same(average)
                                 : dp_error(DP_ERR_STATE,
                                            "'%s' has the averages since dp_average_begin: call "
                                            "dp_average_end before %s",
                                            dp_module_name(average->module), what);
}

static dp_status dp__average_update(const dp_average *average)
{
    DP_TRY(dp__average_not_begun(average, "an update"));
    for (size_t owner = 0; owner < average->owner_count; owner++)
        for (size_t i = 0; i < average->count; i++)
            DP_TRY(dp__average_entry_update(average, owner, i));
    return DP_OK;
}

DP_API dp_status dp_average_update(dp_average *average)
{
    DP_TRY(dp__average_check_alone(__func__, average));
    DP_TRY(dp_error_in(__func__, dp__average_update(average)));
    average->updates++;
    return DP_OK;
}

DP_API dp_status dp_average_info_get(const dp_average *average, dp_average_info *out)
{
    DP_TRY(dp_check_pointer(__func__, "average", average));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    *out = (dp_average_info){.updates = average->updates,
                             .begun = average->kept != NULL,
                             .momentum = dp__average_momentum(average)};
    for (size_t i = 0; i < average->count; i++) {
        const dp_tensor *own = &average->entries[i].own[0];
        out->bytes += (size_t)dp_tensor_count(own) * dp_dtype_bytes((dp_dtype)own->dtype);
    }
    return DP_OK;
}

/* ==== >>using ===================================================================================
   What the module had is kept in a scope that lasts as long as it is needed.                    */

/* Everything that can run out of memory comes before the module is written to. */
static dp_status dp__average_keep(const dp_average *average, dp_scope *scope)
{
    for (size_t i = 0; i < average->count; i++)
        for (size_t owner = 0; owner < average->owner_count; owner++) {
            const dp__average_entry *entry = &average->entries[i];
            dp_tensor from;
            DP_TRY(dp_owner_param(average->module, owner, i, &from));
            DP_TRY(dp_tensor_to(scope, from.device, entry->dtype, &from, &entry->kept[owner]));
        }
    return DP_OK;
}

/* Into every owner: the averages, or what was kept. */
static dp_status dp__average_put(const dp_average *average, bool kept)
{
    for (size_t owner = 0; owner < average->owner_count; owner++)
        for (size_t i = 0; i < average->count; i++) {
            const dp__average_entry *entry = &average->entries[i];
            dp_tensor to;
            DP_TRY(dp_owner_edit(average->module, owner, i, &to, NULL));
            DP_TRY(dp_cast(average->ctx, &to, kept ? &entry->kept[owner] : &entry->own[owner]));
        }
    return DP_OK;
}

/* Where processes share the parameters they all write the same; `status`: whether this one can. */
static dp_status dp__average_write(const dp_average *average, dp_status status, bool kept)
{
    DP_TRY(dp_edit_begin(average->module, status));
    status = dp__average_put(average, kept);
    return dp_edit_end(average->module, status);
}

DP_API dp_status dp_average_begin(dp_average *average)
{
    DP_TRY(dp_check_pointer(__func__, "average", average));
    DP_TRY(dp_error_in(__func__, dp__average_not_begun(average, "another one")));
    dp_scope *scope = dp_scope_begin(average->ctx);
    dp_status status = dp_scope_check(scope);
    if (status == DP_OK)
        status = dp__average_keep(average, scope);
    status = dp__average_write(average, status, false);
    if (status == DP_OK)
        average->kept = scope;
    else
        dp_scope_end(scope);
    return dp_error_in(__func__, status);
}

static dp_status dp__average_end(dp_average *average)
{
    if (average->kept == NULL)
        return dp_error(DP_ERR_STATE, "nothing was begun: call dp_average_begin first");
    DP_TRY(dp__average_same(average));
    DP_TRY(dp__average_write(average, DP_OK, true));
    dp_scope_end(average->kept);
    average->kept = NULL;
    return DP_OK;
}

DP_API dp_status dp_average_end(dp_average *average)
{
    DP_TRY(dp_check_pointer(__func__, "average", average));
    return dp_error_in(__func__, dp__average_end(average));
}

DP_API void dp_average_destroy(dp_average *average)
{
    if (average == NULL)
        return;
    if (average->kept != NULL && dp__average_end(average) != DP_OK)
        dp_scope_end(average->kept);
    dp_scope_end(average->scope);
}

/* What a module has under the name of an entry; `out` is its number there. */
static dp_status dp__average_find(const dp__average_entry *entry, dp_module *module, size_t *out)
{
    dp_param_info info;
    DP_TRY(dp_module_find(module, entry->name, out));
    DP_TRY(dp_module_param(module, *out, &info));
    if (info.data.dtype != entry->dtype || !dp_same_shape(&info.data, &entry->own[0]))
        return dp_error(DP_ERR_MISMATCH, "'%s' of '%s' has another dtype or shape", entry->name,
                        dp_module_name(module));
    return DP_OK;
}

/* In the module's dtypes, to the module's devices. */
static dp_status dp__average_send_all(const dp_average *average, dp_module *module,
                                      const size_t *params)
{
    for (size_t i = 0; i < average->count; i++) {
        dp_tensor to;
        DP_TRY(dp_params_edit(module, params[i], &to, NULL));
        DP_TRY(dp_cast(average->ctx, &to, &average->entries[i].own[0]));
    }
    return dp_wait(average->ctx);
}

/* What the module has under the names of all entries. */
static dp_status dp__average_find_all(const dp_average *average, dp_scope *temp, dp_module *module,
                                      size_t **out)
{
    size_t *params = dp_scope_alloc(temp, average->count * sizeof *params);
    bool *taken = dp_scope_alloc(temp, dp_module_param_count(module) * sizeof *taken);
    if (params == NULL || taken == NULL)
        return dp_no_memory();
    memset(taken, 0, dp_module_param_count(module) * sizeof *taken);
    for (size_t i = 0; i < average->count; i++) {
        DP_TRY(dp__average_find(&average->entries[i], module, &params[i]));
        if (taken[params[i]])
            return dp_error(DP_ERR_MISMATCH, "'%s' of '%s' is tied, and its average is not",
                            average->entries[i].name, dp_module_name(module));
        taken[params[i]] = true;
    }
    *out = params;
    return DP_OK;
}

static dp_status dp__average_copy(const dp_average *average, dp_scope *temp, dp_module *module)
{
    size_t *params = NULL;
    dp_status status = dp_scope_check(temp);
    if (status == DP_OK)
        status = dp__average_find_all(average, temp, module, &params);
    DP_TRY(dp_edit_begin(module, status));
    return dp_edit_end(module, dp__average_send_all(average, module, params));
}

DP_API dp_status dp_average_copy(dp_average *average, dp_module *module)
{
    DP_TRY(dp_check_pointer(__func__, "average", average));
    if (dp_module_ctx(module) != average->ctx)
        return dp_error(DP_ERR_INVALID, "%s: not a module of the same context", __func__);
    if (average->kept != NULL)
        DP_TRY(dp_error_in(__func__, dp__average_not_begun(average, "a copy")));
    dp_scope *temp = dp_scope_begin(average->ctx);
    dp_status status = dp__average_copy(average, temp, module);
    dp_scope_end(temp);
    return dp_error_in(__func__, status);
}

/* ==== >>saving ==================================================================================
   All owners have the same averages: the first one's are saved.                                 */

/* A copy on the host, or a view. */
static dp_status dp__average_entry_save(const dp_average *average, dp_scope *scope, size_t i,
                                        bool copy, dp_value *out)
{
    dp_tensor own = average->entries[i].own[0];
    own.read_only = true;
    if (copy)
        DP_TRY(dp_tensor_to(scope, (dp_device){0, 0}, (dp_dtype)own.dtype, &own, &own));
    *out = dp_of(scope, &own);
    return DP_OK;
}

static dp_status dp__average_save(const char *fn, dp_average *average, dp_scope *scope, bool copy,
                                  dp_value *out)
{
    DP_TRY(dp_check_pointer(fn, "average", average));
    DP_TRY(dp_check_scope(fn, scope, average->ctx));
    DP_TRY(dp_check_pointer(fn, "out", out));
    dp_pair *pairs = dp_scope_alloc(scope, average->count * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < average->count; i++) {
        pairs[i].key = average->entries[i].name;
        DP_TRY(dp__average_entry_save(average, scope, i, copy, &pairs[i].value));
    }
    const dp_pair all[] = {{"rule", dp_string(scope, dp__average_rules[average->config.rule])},
                           {"updates", dp_int(average->updates)},
                           {"average", dp_dict_make(scope, pairs, average->count)}};
    return dp_made(dp_dict_make(scope, all, sizeof all / sizeof all[0]), out);
}

DP_API dp_status dp_average_save(dp_average *average, dp_scope *scope, dp_value *out)
{
    return dp_error_in(__func__, dp__average_save(__func__, average, scope, true, out));
}

DP_API dp_status dp_average_view(dp_average *average, dp_scope *scope, dp_value *out)
{
    return dp_error_in(__func__, dp__average_save(__func__, average, scope, false, out));
}

static dp_status dp__average_entry_check(const dp__average_entry *entry, dp_value saved)
{
    const dp_tensor *from, *own = &entry->own[0];
    if (saved.kind != DP_TENSOR)
        return dp_error(DP_ERR_MISMATCH, "no average of '%s' was saved", entry->name);
    DP_TRY(dp_as_tensor(saved, entry->name, (dp_dtype)own->dtype, own->ndim, &from));
    for (int d = 0; d < own->ndim; d++)
        if (from->shape[d] != own->shape[d])
            return dp_error(DP_ERR_MISMATCH, "dim %d of '%s' is %lld, saved %lld", d, entry->name,
                            (long long)own->shape[d], (long long)from->shape[d]);
    return DP_OK;
}

#define DP__AVERAGE_UPDATES_MAX ((int64_t)1 << 62)

static dp_status dp__average_saved_check(const dp_average *average, dp_value saved)
{
    const char *rule = dp_text(dp_get(saved, "rule"));
    const char *own = dp__average_rules[average->config.rule];
    dp_value entries = dp_get(saved, "average"), updates = dp_get(saved, "updates");
    if (rule == NULL || strcmp(rule, own) != 0)
        return dp_error(DP_ERR_MISMATCH, "the rule is '%s', saved '%s'", own,
                        rule != NULL ? rule : "");
    if (updates.kind != DP_INT || updates.as.i < 0 || updates.as.i > DP__AVERAGE_UPDATES_MAX)
        return dp_error(DP_ERR_MISMATCH, "'updates' is missing, or not a count");
    for (size_t i = 0; i < average->count; i++)
        DP_TRY(dp__average_entry_check(&average->entries[i],
                                       dp_get(entries, average->entries[i].name)));
    if (dp_count(entries) != average->count)
        return dp_error(DP_ERR_MISMATCH, "%zu parameters and buffers, saved %zu", average->count,
                        dp_count(entries));
    return DP_OK;
}

DP_API dp_status dp_average_load(dp_average *average, dp_value saved)
{
    DP_TRY(dp__average_check_alone(__func__, average));
    DP_TRY(dp_error_in(__func__, dp__average_saved_check(average, saved)));
    for (size_t i = 0; i < average->count; i++)
        for (size_t owner = 0; owner < average->owner_count; owner++) {
            const dp__average_entry *entry = &average->entries[i];
            dp_value from = dp_get(dp_get(saved, "average"), entry->name);
            DP_TRY(dp_copy(average->ctx, &entry->own[owner], from.as.t, NULL));
        }
    average->updates = dp_get(saved, "updates").as.i;
    return dp_wait(average->ctx); /* what was saved may go */
}
#endif /* DP_IMPLEMENTATION && !DP_AVERAGE_IMPLEMENTED */
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
