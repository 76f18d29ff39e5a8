/* fuzz_load.c - what was saved of a model, an optimizer, a loader and an average, edited in ways
   that a file may hold, is loaded again. It is refused with a sentence, and nothing has changed,
   memory that runs out included; or it is what was given, and can be gone on from. */

#include <math.h>
#include <stdatomic.h>
#include "../../dp_average.h"
#include "../../dp_data.h"
#include "../../dp_save.h"
#include "../../dp_train.h"

#include "../../examples/custom_device.h"
#include "fuzz.h"

enum { PARAMS = 4, EDITS = 4, SAMPLES = 20 };

typedef enum subject { MODEL, OPTIM, LOADER, AVERAGE, SUBJECTS } subject;

typedef struct job {
    fuzz *in;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_module *module;
    dp_optim *optim;
    dp_loader *loader;
    dp_average *average;
    dp_module_load_config how;
} job;

static atomic_long until_full = -1; /* allocations that go well; below 0: all do */

static void *take(size_t bytes, size_t align, void *user)
{
    (void)user;
    if (atomic_load(&until_full) >= 0 && atomic_fetch_sub(&until_full, 1) <= 0)
        return NULL;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void give(void *memory, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    free(memory);
}

/* ---- what is loaded -------------------------------------------------------------------------- */

static dp_status forward(dp_call *call)
{
    int64_t shape = 1;
    dp_tensor out;
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, 1, &shape, &out));
    DP_TRY(dp_fill(call->ctx, &out, dp_float(1)));
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    for (size_t i = 0; i < PARAMS - 1; i++) {
        dp_tensor grad = dp_grad_tensor(call, i);
        DP_TRY(dp_fill(call->ctx, &grad, dp_float(1)));
    }
    return DP_OK;
}

static dp_module *make_module(dp_ctx *ctx)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static const dp_param_config params[PARAMS] = {
        {.name = "w", .ndim = 2, .shape = {2, 3}},
        {.name = "b", .dtype = DP_F64, .ndim = 1, .shape = {3}},
        {.name = "h", .dtype = DP_BF16},
        {.name = "count", .dtype = DP_I64, .ndim = 1, .shape = {2}, .buffer = true}};
    const dp_module_config config = {.name = "net",
                                     .methods = methods,
                                     .method_count = 2,
                                     .params = params,
                                     .param_count = PARAMS};
    dp_module *module = NULL;
    FUZZ_CHECK(dp_module_create(ctx, &config, &module) == DP_OK);
    return module;
}

static dp_status read_sample(dp_sample *sample, void *user)
{
    (void)user;
    FUZZ_CHECK(sample->index >= 0 && sample->index < SAMPLES);
    *(int64_t *)sample->rows[0] = sample->index;
    return DP_OK;
}

static void make_loader(job *j, int flags)
{
    static const dp_field fields[] = {{"index", DP_I64, 0, {0}}};
    const dp_loader_config config = {
        .sampler = {.count = SAMPLES, .seed = 3, .sampling = (dp_sampling)(flags & 3)},
        .batch = 1 + (flags >> 2 & 3),
        .read = read_sample,
        .fields = fields,
        .field_count = 1,
        .epoch_count = flags & 16 ? 3 : 0};
    FUZZ_CHECK(dp_loader_create(j->ctx, &config, &j->loader) == DP_OK);
}

static void go_on(job *j);

static void make(job *j)
{
    int flags = fuzz_next(j->in, 64), more = fuzz_next(j->in, 64);
    const dp_device_ops *const backends[] = {flags & 1 ? toy_device() : dp_cpu(), NULL};
    const dp_config config = {.backends = backends,
                              .device_count = 1 + (flags >> 1 & 1),
                              .thread_count = 1,
                              .local_only = true,
                              .poison = true,
                              .allocator = {take, give, NULL}};
    FUZZ_CHECK(dp_open(&config, &j->ctx) == DP_OK);
    j->scope = dp_scope_begin(j->ctx);
    j->module = make_module(j->ctx);
    if (flags & 4)
        FUZZ_CHECK(dp_distributed(j->module, NULL, &j->module) == DP_OK);
    const dp_optim_config optim = {.rule = flags & 8 ? dp_adamw() : dp_sgd(),
                                   .hyper = {.lr = 0.5, .momentum = flags & 8 ? 0 : 0.5},
                                   .scale = {.dynamic = (more & 2) != 0},
                                   .accumulate = 1 + (more & 1),
                                   .masters = (flags & 16) != 0};
    FUZZ_CHECK(dp_optim_create(j->module, &optim, &j->optim) == DP_OK);
    const dp_average_config average = {.rule = (dp_average_rule)((more >> 2) % 3),
                                       .buffers = (more & 16) != 0};
    FUZZ_CHECK(dp_average_create(j->module, &average, &j->average) == DP_OK);
    make_loader(j, more);
    j->how = (dp_module_load_config){.allow_missing = (more & 8) != 0,
                                     .allow_unknown = (more & 16) != 0,
                                     .cast = (more & 32) != 0,
                                     .check_only = (flags & 48) == 48};
    go_on(j);
}

/* A step of everything: what it comes to depends on what was loaded. */
static void go_on(job *j)
{
    dp_value log;
    dp_batch batch;
    dp_scope *step = dp_scope_begin(j->ctx);
    const dp_status all[] = {
        dp_train_step(j->module, step, DP_LIST_OF(step, dp_int(1)), j->optim, &log),
        dp_average_update(j->average), dp_loader_next(j->loader, step, &batch)};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        FUZZ_CHECK(dp_status_class(all[i]) != DP_CLASS_JOB);
    dp_scope_end(step);
}

static dp_value state_of(job *j, subject what)
{
    dp_value out = dp_none();
    dp_status status = what == MODEL    ? dp_module_save(j->module, j->scope, &out)
                       : what == OPTIM  ? dp_optim_save(j->optim, j->scope, &out)
                       : what == LOADER ? dp_loader_save(j->loader, j->scope, &out)
                                        : dp_average_save(j->average, j->scope, &out);
    FUZZ_CHECK(status == DP_OK);
    FUZZ_CHECK(dp_keep(j->scope, out, &out) == DP_OK);
    return out;
}

static dp_status load(job *j, subject what, dp_value saved)
{
    switch (what) {
    case MODEL:
        return dp_module_load(j->module, saved, &j->how);
    case OPTIM:
        return dp_optim_load(j->optim, saved);
    case LOADER:
        return dp_loader_load(j->loader, saved);
    default:
        return dp_average_load(j->average, saved);
    }
}

/* ---- edits ----------------------------------------------------------------------------------- */

static dp_value number_from(fuzz *in)
{
    static const int64_t whole[] = {
        0, -1, 1, 2, 3, 20, 1 << 20, INT64_MAX, INT64_MAX - 1, INT64_MIN, (int64_t)1 << 53};
    static const double real[] = {0,           -1,   1, 0.5, 1e308, 5e-324, (double)INFINITY,
                                  (double)NAN, 65536};
    int kind = fuzz_next(in, 4), which = fuzz_next(in, 99);
    return kind == 0   ? dp_float(real[which % 9])
           : kind == 1 ? dp_bool(which & 1)
           : kind == 2 ? dp_int(which)
                       : dp_int(whole[which % 11]);
}

/* The same shape in another dtype, or in other strides; or anything. */
static dp_value tensor_from(fuzz *in, dp_value like)
{
    int how = fuzz_next(in, 3), dtype = fuzz_next(in, DP_DTYPE_COUNT);
    fuzz_shape shape = {.rows = 3};
    dp_tensor made;
    if (like.kind != DP_TENSOR || how == 0)
        return fuzz_value(in, &shape, FUZZ_DEPTH - 1);
    dp_tensor turned = *like.as.t;
    if (how == 1)
        dtype = turned.dtype;
    for (int d = 0; d < turned.ndim; d++)
        turned.shape[d] = like.as.t->shape[turned.ndim - 1 - d];
    FUZZ_CHECK(dp_tensor_new(in->scope, (dp_device){0, 0}, (dp_dtype)dtype, turned.ndim,
                             turned.shape, &made) == DP_OK);
    memset(made.data, 1, (size_t)dp_tensor_count(&made) * dp_dtype_bytes((dp_dtype)dtype));
    if (made.ndim > 1)
        FUZZ_CHECK(dp_transpose(&made, 0, made.ndim - 1, &made) == DP_OK);
    return dp_of(in->scope, &made);
}

static dp_value values_of(fuzz *in, dp_value dict)
{
    dp_value items[16];
    uint32_t count = dict.kind == DP_DICT ? dict.count : 0;
    FUZZ_CHECK(count < 16);
    for (uint32_t i = 0; i < count; i++)
        items[i] = dict.as.pairs[i].value;
    return dp_list_make(in->scope, fuzz_next(in, 2) ? DP_TUPLE : DP_LIST, items, count);
}

static dp_value leaf_from(fuzz *in, dp_value like)
{
    static const char *const texts[] = {"sgd", "adamw", "ema", "swa", "", "w"};
    switch (fuzz_next(in, 6)) {
    case 0:
        return dp_none();
    case 1:
        return dp_string(in->scope, texts[fuzz_next(in, 6)]);
    case 2: /* of the other kind of container */
        return values_of(in, like);
    case 3:
        return tensor_from(in, like);
    default:
        return number_from(in);
    }
}

static dp_value edited(fuzz *in, dp_value value);

/* An entry less, one more, one of another name, or one that is edited itself. */
static dp_value dict_edited(fuzz *in, dp_value value)
{
    static const char *const keys[] = {"w", "b", "steps", "state", "net.w", "rule", ""};
    dp_pair pairs[16];
    uint32_t count = value.count, at = (uint32_t)fuzz_next(in, (int)count);
    int how = fuzz_next(in, 8);
    FUZZ_CHECK(count < 16);
    memcpy(pairs, value.as.pairs, count * sizeof *pairs);
    if (how == 0)
        pairs[at] = pairs[--count];
    else if (how == 1)
        pairs[at].key = keys[fuzz_next(in, 7)];
    else if (how == 2)
        pairs[count++] = (dp_pair){keys[fuzz_next(in, 7)], leaf_from(in, dp_none())};
    else
        pairs[at].value = edited(in, pairs[at].value);
    dp_value made = dp_dict_make(in->scope, pairs, count);
    return made.kind != DP_ERROR ? made : value; /* two of one name */
}

static dp_value list_edited(fuzz *in, dp_value value)
{
    dp_value items[20];
    uint32_t count = value.count, at = (uint32_t)fuzz_next(in, (int)count);
    int how = fuzz_next(in, 8);
    FUZZ_CHECK(count < 20);
    memcpy(items, value.as.items, count * sizeof *items);
    if (how == 0)
        items[at] = items[--count];
    else if (how == 1)
        items[count++] = items[at];
    else
        items[at] = edited(in, items[at]);
    return dp_list_make(in->scope, how == 2 ? DP_TUPLE : DP_LIST, items, count);
}

static dp_value edited(fuzz *in, dp_value value)
{
    if (value.count == 0 || fuzz_next(in, 8) == 1)
        return leaf_from(in, value);
    return value.kind == DP_DICT ? dict_edited(in, value) : list_edited(in, value);
}

/* ---- and back -------------------------------------------------------------------------------- */

/* Of what was loaded, each entry is there: of a model's all that were not refused, else those that
   are state. */
static void check_loaded(job *j, subject what, dp_value saved)
{
    static const char *const keys[SUBJECTS] = {NULL, "state", "epoch", "average"};
    dp_value now = state_of(j, what);
    if (what == MODEL &&
        (j->how.allow_missing || j->how.allow_unknown || j->how.cast || j->how.check_only))
        return;
    dp_value a = keys[what] != NULL ? dp_get(saved, keys[what]) : saved;
    dp_value b = keys[what] != NULL ? dp_get(now, keys[what]) : now;
    FUZZ_CHECK(a.kind == b.kind && a.count == b.count);
    for (uint32_t i = 0; i < b.count; i++) {
        dp_value x = dp_get(a, dp_key_at(b, i)), y = dp_at(b, i);
        FUZZ_CHECK(x.kind == DP_LIST || x.kind == DP_TUPLE
                       ? x.count == y.count && fuzz_same_items(j->ctx, x, y)
                       : fuzz_same(j->ctx, x, y));
    }
}

static void try_load(job *j, subject what)
{
    dp_value before = state_of(j, what), saved = before;
    for (int i = fuzz_next(j->in, EDITS); i >= 0; i--)
        saved = edited(j->in, saved);
    int full = fuzz_next(j->in, 64);
    atomic_store(&until_full, full < 32 ? -1 : full - 32);
    dp_status status = load(j, what, saved);
    atomic_store(&until_full, -1);
    FUZZ_CHECK(status == DP_OK ||
               (dp_last_error()[0] != '\0' && dp_status_class(status) != DP_CLASS_JOB));
    FUZZ_CHECK(status == DP_OK || fuzz_same(j->ctx, before, state_of(j, what)));
    if (status == DP_OK)
        check_loaded(j, what, saved);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    fuzz in = {.data = data, .bytes = bytes};
    job j = {.in = &in};
    make(&j);
    in.ctx = j.ctx;
    in.scope = j.scope;
    for (int i = fuzz_next(&in, 3); i >= 0; i--) {
        try_load(&j, (subject)fuzz_next(&in, SUBJECTS));
        go_on(&j);
    }
    dp_close(j.ctx);
    return 0;
}
