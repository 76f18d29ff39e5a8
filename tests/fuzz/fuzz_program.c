/* fuzz_program.c - bytes become a program: modules in modules, wrappers around them, and calls in
   any order, of which some fail, end what others need, or come from inside a method. Nothing
   crashes or leaks, a call that is refused changes nothing, and parameters, buffers, gradients and
   outputs are the numbers that program.h says, on however many devices. */

#include <stdatomic.h>
#include "../../dp_average.h"
#include "../../dp_save.h"
#include "../../dp_train.h"
#include "../../examples/custom_device.h"
#include "program.h"

enum { PASSES = 3, SCOPES = 3, OPTIMS = 2, AVERAGES = 2, SAVED = 2, STEPS = 64 };

typedef enum mischief { /* what a method does besides its work, once */
                        NOTHING,
                        FAILS,
                        FAILS_ODDLY,
                        FORGETS,
                        WEIGHS,
                        ENDS_ITS_SCOPE,
                        CLOSES,
                        DESTROYS,
                        WRAPS,
                        ZEROES,
                        EDITS,
                        CALLS,
                        TRAINS,
                        STEPS_OPTIM,
                        ASKS_NORM,
                        GOES_BACK,
                        AVERAGES_NOW,
                        COPIES,
                        LEAVES_A_SCOPE,
                        MISCHIEFS
} mischief;

typedef struct pass {
    dp_pass *pass; /* NULL: none */
    net *of;
    int scope;
    double x;
    int64_t rows;
    bool no_sync;
} pass;

typedef struct optim {
    dp_optim *optim;
    net *of;
    bool plain;       /* SGD without anything: the model knows what it does */
    bool accumulates; /* ranks divide by the samples of several passes together */
} optim;

typedef struct average {
    dp_average *average;
    net *of;
} average;

static struct program {
    fuzz in;
    world w;
    dp_scope *root, *scopes[SCOPES];
    pass passes[PASSES];
    optim optims[OPTIMS];
    average averages[AVERAGES];
    dp_value saved[SAVED];
    atomic_int runs;  /* methods so far */
    atomic_int alive; /* states of replicas */
    bool replicas_fail;
    struct {
        mischief what;
        bool backward;
        size_t replica;
        int whom; /* a number that chooses what it is done to */
        atomic_bool armed;
        bool done; /* something was changed by it */
    } mood;
} p;

/* ---- memory ---------------------------------------------------------------------------------- */

static atomic_long blocks, until_full; /* until_full: allocations that go well; below 0: all do */

static void *take(size_t bytes, size_t align, void *user)
{
    (void)user;
    if (atomic_load(&until_full) >= 0 && atomic_fetch_sub(&until_full, 1) == 0)
        return NULL;
    void *memory = aligned_alloc(align, (bytes + align - 1) / align * align);
    atomic_fetch_add(&blocks, memory != NULL);
    return memory;
}

static void give(void *memory, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    atomic_fetch_sub(&blocks, memory != NULL);
    free(memory);
}

/* ---- methods --------------------------------------------------------------------------------- */

/* What refuses to be called from a replica among others. */
static void refused_together(const dp_call *call, dp_status status)
{
    FUZZ_CHECK(call->replica_count == 1 || status != DP_OK);
    p.mood.done = p.mood.done || status == DP_OK;
}

static net *any_net(int number)
{
    return p.w.net_count > 0 ? &p.w.nets[(size_t)number % p.w.net_count] : NULL;
}

static void went(dp_status status)
{
    p.mood.done = true;
    FUZZ_CHECK(status == DP_OK || dp_last_error()[0] != '\0');
    FUZZ_CHECK(dp_status_class(status) != DP_CLASS_JOB);
}

static dp_value batch_of(dp_scope *scope, int64_t rows, double x)
{
    dp_tensor tensor;
    if (dp_tensor_new(scope, (dp_device){0, 0}, DP_F32, 1, &rows, &tensor) != DP_OK)
        return dp_none();
    for (int64_t i = 0; i < rows; i++)
        ((float *)tensor.data)[i] = (float)x;
    return DP_DICT(scope, {"x", dp_of(scope, &tensor)});
}

static void do_to_module(dp_call *call, net *n)
{
    dp_value out;
    dp_tensor data;
    double norm;
    dp_value batch = batch_of(call->scope, 4, 1);
    switch (p.mood.what) {
    case ZEROES:
        went(dp_zero_grad(n->module));
        break;
    case EDITS:
        went(dp_params_edit(n->module, 0, &data, NULL));
        break;
    case CALLS:
        went(dp_invoke(n->module, call->scope, "forward", dp_none(), batch, NULL, &out, NULL));
        break;
    case TRAINS:
        went(dp_train_step(n->module, call->scope, batch, NULL, &out));
        break;
    case ASKS_NORM:
        went(dp_grad_norm(n->module, 2, &norm));
        break;
    default:
        break;
    }
}

/* What is made here ends with the context. */
static void make_one(dp_call *call, net *n)
{
    dp_module *made;
    dp_average *average;
    if (p.mood.what == WRAPS)
        refused_together(call, dp_data_parallel(n->module, NULL, &made));
    else if (p.mood.what == COPIES)
        refused_together(call, dp_module_copy(n->module, 0, &made));
    else if (p.mood.what == AVERAGES_NOW)
        went(dp_average_create(n->module, NULL, &average));
}

static dp_status do_mischief(dp_call *call)
{
    net *n = any_net(p.mood.whom);
    switch (p.mood.what) {
    case FAILS:
        return dp_error(DP_ERR_USER, "as it was told");
    case FAILS_ODDLY:
        return (dp_status)77;
    case FORGETS:
        call->out = (dp_value){.kind = DP_ERROR};
        break;
    case WEIGHS:
        call->weight = p.mood.whom % 3 == 0 ? -1 : p.mood.whom;
        break;
    case ENDS_ITS_SCOPE:
        dp_scope_end(call->scope);
        break;
    case CLOSES:
        dp_close(call->ctx);
        break;
    case DESTROYS:
        if (n->module != NULL && call->replica_count > 1)
            refused_together(call, dp_module_destroy(n->module));
        break;
    case GOES_BACK:
        if (p.passes[0].pass != NULL)
            went(dp_backward(p.passes[0].pass, dp_float(1), NULL));
        break;
    case STEPS_OPTIM:
        if (p.optims[0].optim != NULL)
            went(dp_optim_step(p.optims[0].optim));
        break;
    case LEAVES_A_SCOPE:
        (void)dp_scope_child(call->scope);
        break;
    default:
        if (n->module != NULL) {
            do_to_module(call, n);
            make_one(call, n);
        }
    }
    return DP_OK;
}

static dp_status method_begins(dp_call *call, bool backward)
{
    if (p.mood.what == NOTHING || p.mood.backward != backward || call->replica != p.mood.replica ||
        !atomic_exchange(&p.mood.armed, false))
        return DP_OK;
    return do_mischief(call);
}

typedef struct kept { /* dp_call.saved */
    dp_pass *passes[PROGRAM_OWN];
    const dp_tensor *x;
} kept;

static dp_status read_floats(const dp_call *call, const dp_tensor *tensor, float *out)
{
    return dp_read(call->ctx, tensor, out, (size_t)dp_tensor_count(tensor) * sizeof *out);
}

static dp_status make_floats(const dp_call *call, const float *numbers, int ndim,
                             const int64_t *shape, dp_tensor *out)
{
    dp_tensor host;
    DP_TRY(dp_tensor_from(call->scope, (dp_device){0, 0}, numbers, DP_F32, ndim, shape, &host));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, ndim, shape, out));
    return dp_copy(call->ctx, out, &host, NULL);
}

/* tensor += pattern * amount, in whatever dtype. */
static dp_status add_to(const dp_call *call, const dp_tensor *tensor, double amount, bool pattern)
{
    static _Thread_local float numbers[PROGRAM_ELEMENTS];
    dp_tensor whole, own;
    FUZZ_CHECK(dp_tensor_count(tensor) <= PROGRAM_ELEMENTS);
    for (size_t i = 0; i < (size_t)dp_tensor_count(tensor); i++)
        numbers[i] = (float)(amount * (pattern ? world_factor(i) : 1));
    DP_TRY(make_floats(call, numbers, tensor->ndim, tensor->shape, &whole));
    DP_TRY(dp_tensor_new(call->scope, call->device, (dp_dtype)tensor->dtype, tensor->ndim,
                         tensor->shape, &own));
    DP_TRY(dp_cast(call->ctx, &own, &whole));
    return dp_axpby(call->ctx, 1, tensor, 1, &own, tensor);
}

/* The first elements of its own parameters; buffers are counted up. */
static dp_status look_at_own(const dp_call *call, const net *n, double *out_slope)
{
    static _Thread_local _Alignas(64) char bytes[PROGRAM_ELEMENTS * sizeof(double)];
    for (size_t k = 0; k < n->param_count; k++) {
        const var *v = n->vars[k] >= 0 ? &p.w.vars[n->vars[k]] : NULL;
        if (v == NULL || !world_counts(v))
            continue;
        if (v->buffer && call->training) {
            dp_tensor buffer = dp_buffer_tensor(call, k);
            DP_TRY(add_to(call, &buffer, 1, false));
        } else if (!v->buffer) {
            dp_tensor param = dp_param_tensor(call, k);
            DP_TRY(dp_read(call->ctx, &param, bytes, v->count * dp_dtype_bytes(v->dtype)));
            *out_slope += world_element(bytes, v->dtype, 0);
        }
    }
    return DP_OK;
}

static dp_status call_children(dp_call *call, const net *n, kept *keeps, float *y, int64_t rows)
{
    float more[PROGRAM_ROWS];
    for (size_t c = 0; c < n->child_count; c++) {
        dp_value out;
        const dp_tensor *got;
        bool grad = call->grad_enabled;
        DP_TRY(dp_call_child(call, n->children[c]->name, "forward", dp_none(), call->kwargs, &out,
                             grad ? &keeps->passes[c] : NULL));
        DP_TRY(dp_as_tensor(out, "a child's output", DP_F32, 1, &got));
        FUZZ_CHECK(got->shape[0] == rows);
        DP_TRY(read_floats(call, got, more));
        for (int64_t r = 0; r < rows; r++)
            y[r] += more[r];
    }
    return DP_OK;
}

static dp_status forward(dp_call *call)
{
    const net *n = call->state;
    float x[PROGRAM_ROWS], y[PROGRAM_ROWS];
    double slope = 0;
    dp_tensor out;
    atomic_fetch_add(&p.runs, 1);
    kept *keeps = dp_scope_alloc(call->scope, sizeof *keeps);
    if (keeps == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory");
    *keeps = (kept){.x = NULL};
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &keeps->x));
    int64_t rows = keeps->x->shape[0];
    FUZZ_CHECK(rows <= PROGRAM_ROWS);
    DP_TRY(read_floats(call, keeps->x, x));
    DP_TRY(look_at_own(call, n, &slope));
    for (int64_t r = 0; r < rows; r++)
        y[r] = (float)(slope * (double)x[r]);
    DP_TRY(call_children(call, n, keeps, y, rows));
    DP_TRY(make_floats(call, y, 1, &rows, &out));
    call->out = dp_of(call->scope, &out);
    call->saved = keeps;
    return method_begins(call, false);
}

/* The sum of x times the gradient; or its mean, of a module that has never heard of others. */
static dp_status amount_of(const dp_call *call, const net *n, dp_tensor *grad, double *out)
{
    const kept *keeps = call->saved;
    float x[PROGRAM_ROWS], g[PROGRAM_ROWS];
    double sum = 0;
    DP_TRY(dp_call_out_grad(call, NULL, grad));
    DP_TRY(read_floats(call, keeps->x, x));
    DP_TRY(read_floats(call, grad, g));
    int64_t rows = keeps->x->shape[0];
    for (int64_t r = 0; r < rows; r++)
        sum += (double)x[r] * (n->mean_grads ? 1 : (double)g[r]);
    *out = n->mean_grads && rows > 0 ? sum / (double)rows : sum;
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    const net *n = call->state;
    const kept *keeps = call->saved;
    double amount;
    dp_tensor grad;
    atomic_fetch_add(&p.runs, 1);
    DP_TRY(method_begins(call, true));
    DP_TRY(amount_of(call, n, &grad, &amount));
    for (size_t c = n->child_count; c-- > 0;)
        if (keeps->passes[c] != NULL)
            DP_TRY(dp_backward(keeps->passes[c], dp_of(call->scope, &grad), NULL));
    for (size_t k = n->param_count; k-- > 0;) {
        const var *v = n->vars[k] >= 0 ? &p.w.vars[n->vars[k]] : NULL;
        if (v == NULL || !v->has_grad)
            continue;
        dp_tensor own = dp_grad_tensor(call, k);
        DP_TRY(add_to(call, &own, amount, true));
    }
    if (call->input_grad_wanted)
        call->kwargs_grad = DP_DICT(call->scope, {"x", dp_of(call->scope, &grad)});
    return DP_OK;
}

static dp_status replica_create(const dp_replica_info *info, void **own)
{
    (void)info;
    if (p.replicas_fail)
        return dp_error(DP_ERR_USER, "no replica today");
    atomic_fetch_add(&p.alive, 1);
    *own = &p;
    return DP_OK;
}

static void replica_destroy(void *own)
{
    FUZZ_CHECK(own == &p);
    atomic_fetch_sub(&p.alive, 1);
}

/* ---- making modules -------------------------------------------------------------------------- */

static int next(int below)
{
    return fuzz_next(&p.in, below);
}

/* What a call came to. `all`: it may have begun. */
typedef enum outcome { WENT, REFUSED, BROKE } outcome;

static outcome judge(dp_status status, int runs)
{
    bool called = atomic_load(&p.runs) != runs;
    dp_class class = dp_status_class(status);
    FUZZ_CHECK(class != DP_CLASS_JOB && (status == DP_OK || class != DP_CLASS_NONE));
    FUZZ_CHECK(status == DP_OK || dp_last_error()[0] != '\0');
    outcome out = status == DP_OK ? WENT : class == DP_CLASS_CALL && !called ? REFUSED : BROKE;
    if (out == BROKE)
        world_forget_all(&p.w);
    return out;
}

static net *root_net(void)
{
    net *n = any_net(next(PROGRAM_NETS));
    for (size_t i = 0; n != NULL && i < p.w.net_count;
         i++, n = n + 1 < p.w.nets + p.w.net_count ? n + 1 : p.w.nets)
        if (n->module != NULL)
            return n;
    return NULL;
}

static void config_param(net *n, size_t k, dp_param_config *params)
{
    static _Alignas(64) char memory[PROGRAM_NETS][PROGRAM_OWN][2][PROGRAM_ELEMENTS * 8];
    static const char *const names[] = {"w", "b", "c"};
    static char same[16];
    dp_param_config *out = &params[k];
    char(*own)[PROGRAM_ELEMENTS * 8] = memory[n - p.w.nets][k];
    int flags = next(16), size = next(6), more = next(16), dtype = next(16);
    *out = (dp_param_config){.name = names[k], .frozen = flags == 1, .buffer = flags == 2};
    out->dtype = dtype < DP_DTYPE_COUNT ? (dp_dtype)dtype : DP_F32;
    out->ndim = size < 4 ? size : 1;
    for (int d = 0; d < out->ndim; d++)
        out->shape[d] = size == 4 ? 300 : size == 5 ? 0 : 1 + (more >> d & 1) * 2;
    if (flags == 3 && n->child_count > 0) {
        snprintf(same, sizeof same, "%s.w", n->children[0]->name);
        out->same_as = same;
    } else if (flags == 4 && k > 0) {
        *out = params[0];
        out->name = names[k];
        out->same_as = names[0];
    }
    memset(own, 0, sizeof *own * 2);
    out->data = p.w.host_memory && flags >= 10 ? own[0] : NULL;
    out->grad = p.w.host_memory && flags >= 12 ? own[1] : NULL;
    n->param_names[k] = names[k];
    n->muddy = n->muddy || out->data != NULL;
}

static void write_numbers(net *n)
{
    char bytes[PROGRAM_ELEMENTS * 8];
    dp_tensor data;
    for (size_t i = 0; i < dp_module_param_count(n->module); i++) {
        dp_param_info info;
        FUZZ_CHECK(dp_module_param(n->module, i, &info) == DP_OK);
        size_t count = (size_t)dp_tensor_count(&info.data);
        FUZZ_CHECK(count <= PROGRAM_ELEMENTS);
        for (size_t e = 0; e < count; e++)
            if (info.data.dtype == DP_F32)
                ((float *)bytes)[e] = (float)(e % 4);
            else if (info.data.dtype == DP_F64)
                ((double *)bytes)[e] = (double)(e % 4);
        int runs = atomic_load(&p.runs);
        if (info.data.dtype <= DP_F64 &&
            judge(dp_params_write(n->module, i, bytes,
                                  count * dp_dtype_bytes((dp_dtype)info.data.dtype)),
                  runs) != REFUSED)
            world_forget_all(&p.w);
    }
    (void)data;
}

static void take_children(net *n, dp_module **modules)
{
    for (int c = next(PROGRAM_OWN + 1); c > 0; c--) {
        net *child = root_net();
        if (child == NULL)
            continue;
        n->children[n->child_count] = child;
        modules[n->child_count++] = child->module;
    }
}

static void make_module(void)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_param_config params[PROGRAM_OWN];
    dp_module *children[PROGRAM_OWN];
    net *n = world_net(&p.w, PLAIN);
    if (n == NULL)
        return;
    int flags = next(64), runs = atomic_load(&p.runs);
    take_children(n, children);
    n->param_count = (size_t)next(PROGRAM_OWN + 1);
    for (size_t k = 0; k < n->param_count; k++)
        config_param(n, k, params);
    n->mean_grads = (flags & 3) == 3;
    n->announces = (flags & 4) != 0;
    dp_module_config config = {.name = n->name,
                               .methods = methods,
                               .method_count = (flags & 48) == 48 ? 1 : 2,
                               .params = n->param_count > 0 ? params : NULL,
                               .param_count = n->param_count,
                               .children = n->child_count > 0 ? children : NULL,
                               .child_count = n->child_count,
                               .state = n,
                               .replica_create = replica_create,
                               .replica_destroy = replica_destroy,
                               .local_rank = n->child_count > 0 ? dp_module_rank(children[0])
                                                                : next(8) % p.w.info.local_count,
                               .announces_changes = n->announces,
                               .packed = (flags & 24) == 24,
                               .mean_grads = n->mean_grads};
    if (judge(dp_module_create(p.w.ctx, &config, &n->module), runs) != WENT) {
        n->module = NULL;
        return;
    }
    p.w.net_count++;
    for (size_t c = 0; c < n->child_count; c++)
        n->children[c]->owned = true;
    world_bind(&p.w, n, n->module, "");
    write_numbers(n);
}

static dp_status wrap(net *n, net_kind kind, net *inner)
{
    int ranks[PROGRAM_RANKS * 2];
    int64_t sizes[PROGRAM_RANKS];
    double weights[PROGRAM_RANKS];
    int count = 1 + next(p.w.info.local_count), first = dp_module_rank(inner->module),
        flags = next(64);
    dp_parallel_config config = {.local_ranks = ranks,
                                 .local_rank_count = (size_t)count,
                                 .cut.split = (dp_split)(flags & 3)};
    for (int i = 0; i < count; i++) {
        ranks[i] = (first + i) % p.w.info.local_count;
        int size = config.cut.split < DP_SPLIT_SIZES ? 0 : next(4);
        sizes[i] = size;
        weights[i] = size;
    }
    config.cut.sizes = config.cut.split == DP_SPLIT_SIZES ? sizes : NULL;
    config.cut.weights = config.cut.split == DP_SPLIT_WEIGHTS ? weights : NULL;
    config.cut.split_count = config.cut.split >= DP_SPLIT_SIZES ? (size_t)count : 0;
    config.output_to_host = (flags & 4) != 0;
    dp_distributed_config all = {
        .name = n->name,
        .reduction = (dp_reduction)(flags >> 2 & 3),
        .buffers = (dp_buffer_sync)(flags >> 4 & 1),
        .unused_params = (dp_unused)(flags % 3),
        .buckets = {.first_bytes = flags & 32 ? 8 : 0, .bytes = flags & 32 ? 16 : 0}};
    n->reduction = all.reduction == 0 ? DP_MEAN_RANKS : all.reduction;
    n->muddy = all.buffers != DP_BUFFERS_FIRST || config.cut.split == DP_SPLIT_WEIGHTS;
    switch (kind) {
    case DATA:
        return dp_data_parallel(inner->module, &config, &n->module);
    case CONTAINER:
        return dp_container_parallel(inner->module, &config, &n->module);
    case MODEL:
        return dp_model_parallel(inner->module, &config, &n->module);
    case META:
        return dp_meta_test_parallel(inner->module, &n->module);
    case DISTRIBUTED:
        return dp_distributed(inner->module, &all, &n->module);
    default:
        return dp_separate_distributed(inner->module, &all, &n->module);
    }
}

static void make_wrapper(void)
{
    net_kind kind = (net_kind)(1 + next(NET_KINDS - 1));
    net *inner = root_net(), *n = world_net(&p.w, kind);
    int runs = atomic_load(&p.runs);
    if (n == NULL || inner == NULL)
        return;
    if (judge(wrap(n, kind, inner), runs) != WENT) {
        n->module = NULL;
        return;
    }
    snprintf(n->name, sizeof n->name, "%s", dp_module_name(n->module));
    n->children[n->child_count++] = inner;
    inner->owned = true;
    n->mean_grads = false;
    p.w.net_count++;
}

static void make_copy(void)
{
    net *from = root_net();
    dp_module *made;
    int rank = from != NULL ? next(p.w.info.local_count) : 0, runs = atomic_load(&p.runs);
    if (from == NULL || judge(dp_module_copy(from->module, rank, &made), runs) != WENT)
        return;
    net *n = world_copy(&p.w, from, made, "");
    if (n == NULL) /* it stays, unknown */
        return;
    n->module = made;
    n->owned = false;
}

/* ---- ending them ----------------------------------------------------------------------------- */

/* A module went, and its children with it; what a wrapper wraps stays. */
static void net_ended(net *n)
{
    n->module = NULL;
    for (int i = 0; i < PASSES; i++)
        p.passes[i].of = p.passes[i].of == n ? NULL : p.passes[i].of;
    for (size_t k = 0; k < n->param_count && n->kind == PLAIN; k++)
        if (n->vars[k] >= 0)
            p.w.vars[n->vars[k]].memory = NULL;
    for (size_t c = 0; c < n->child_count; c++) {
        if (n->kind == PLAIN)
            net_ended(n->children[c]);
        else
            n->children[c]->owned = false;
    }
}

static bool ends_with(const net *n, const net *other)
{
    bool ends = n == other;
    for (size_t c = 0; c < n->child_count && n->kind == PLAIN && !ends; c++)
        ends = ends_with(n->children[c], other);
    return ends;
}

/* What trains and averages a module goes before it. */
static void destroy_users(const net *n)
{
    for (int i = 0; i < OPTIMS; i++)
        if (p.optims[i].optim != NULL && ends_with(n, p.optims[i].of)) {
            dp_optim_destroy(p.optims[i].optim);
            p.optims[i].optim = NULL;
        }
    for (int i = 0; i < AVERAGES; i++)
        if (p.averages[i].average != NULL && ends_with(n, p.averages[i].of)) {
            dp_average_destroy(p.averages[i].average);
            p.averages[i].average = NULL;
            world_forget_all(&p.w);
        }
}

static void destroy_module(void)
{
    net *n = root_net();
    if (n != NULL && !n->owned)
        destroy_users(n);
    int runs = atomic_load(&p.runs);
    if (n == NULL)
        return;
    outcome out = judge(dp_module_destroy(n->module), runs);
    FUZZ_CHECK(n->owned || out == WENT || dp_last_error()[0] != '\0');
    if (out == WENT)
        net_ended(n);
}

static void end_scope(int which)
{
    dp_scope_end(p.scopes[which]);
    p.scopes[which] = NULL;
    for (int i = 0; i < PASSES; i++)
        if (p.passes[i].scope == which)
            p.passes[i].pass = NULL;
}

static dp_scope *scope_at(int which)
{
    if (p.scopes[which] == NULL)
        p.scopes[which] = dp_scope_begin(p.w.ctx);
    return p.scopes[which];
}

/* ---- running them ---------------------------------------------------------------------------- */

static void set_mood(void)
{
    int what = next(128);
    p.mood.what = what < MISCHIEFS ? (mischief)what : NOTHING;
    p.mood.backward = p.mood.what != NOTHING && next(2) == 1;
    p.mood.replica = p.mood.what != NOTHING ? (size_t)next(PROGRAM_RANKS) : 0;
    p.mood.whom = p.mood.what != NOTHING ? next(PROGRAM_NETS) : 0;
    atomic_store(&p.mood.armed, p.mood.what != NOTHING);
}

static int64_t check_rows(dp_value out, double want)
{
    float y[PROGRAM_ROWS];
    int64_t rows = 0;
    for (uint32_t i = 0; i < out.count && out.kind == DP_LIST; i++)
        rows += check_rows(out.as.items[i], want);
    if (out.kind != DP_TENSOR)
        return rows;
    rows = out.as.t->shape[0];
    FUZZ_CHECK(dp_read(p.w.ctx, out.as.t, y, (size_t)rows * sizeof *y) == DP_OK);
    for (int64_t r = 0; r < rows; r++)
        FUZZ_CHECK(isnan(want) || world_close((double)y[r], want));
    return rows;
}

static double number(void)
{
    int n = next(8) - 3;
    return n;
}

static void run_forward(void)
{
    net *n = root_net();
    int slot = next(PASSES), scope = next(SCOPES), flags = next(8), rows = next(PROGRAM_ROWS);
    double x = number();
    dp_pass_config config = {.no_sync = flags == 1};
    dp_pass *made = NULL;
    dp_value out;
    if (n == NULL)
        return;
    set_mood();
    int runs = atomic_load(&p.runs);
    dp_value batch = batch_of(scope_at(scope), rows, x);
    const net *simple = world_simple(n);
    double slope = simple != NULL ? world_slope(&p.w, simple) : (double)NAN;
    dp_status status = dp_invoke(n->module, p.scopes[scope], "forward", dp_none(), batch, &config,
                                 &out, flags == 2 ? NULL : &made);
    bool weighed = p.mood.what == WEIGHS;
    outcome went_how = judge(status, runs);
    if (went_how == REFUSED)
        return;
    world_forward(&p.w, n, true, went_how == WENT && simple != NULL && !world_has(n, net_is_muddy));
    if (went_how != WENT)
        return;
    if (simple != NULL && !p.mood.done)
        FUZZ_CHECK(check_rows(out, x * slope) == rows);
    p.passes[slot] =
        (pass){made, n, scope, x, weighed || simple == NULL ? -1 : rows, config.no_sync};
}

/* What a backward adds to each gradient of factor 1; NAN: who knows. */
static double amount_added(const net *n, const pass *from, double g)
{
    const net *simple = world_simple(n);
    double rows = (double)from->rows, sum = rows * from->x * g;
    if (simple == NULL || from->rows < 0 || (from->no_sync && n->kind == DISTRIBUTED) ||
        (n != simple && world_has(n->children[0], net_wraps)))
        return NAN;
    if (simple->mean_grads)
        return rows > 0 && n->kind != DISTRIBUTED ? from->x * g : (double)NAN;
    if (n->kind != DISTRIBUTED || n->reduction == DP_SUM_RANKS)
        return sum;
    return n->reduction == DP_MEAN_RANKS ? sum / p.w.info.rank_count
           : rows > 0                    ? sum / rows
                                         : (double)NAN;
}

static void run_backward(void)
{
    pass *from = &p.passes[next(PASSES)];
    double g = number();
    bool inputs = next(4) == 1;
    dp_input_grad in;
    if (from->pass == NULL)
        return;
    set_mood();
    net *n = from->of;
    int runs = atomic_load(&p.runs);
    outcome out = judge(dp_backward(from->pass, dp_float(g), inputs ? &in : NULL), runs);
    if (out == WENT && n != NULL) {
        const net *simple = world_simple(n);
        if (simple != NULL && simple->mean_grads)
            world_each(&p.w, n, var_begin, from->no_sync);
        world_backward(&p.w, n, amount_added(n, from, g));
    }
    FUZZ_CHECK(out != WENT || n != NULL);
}

/* A step of the optimizer has been made, or not; gradients are as if it had not. */
static void optim_stepped(const optim *with, const dp_optim_info *before)
{
    dp_optim_info after;
    FUZZ_CHECK(dp_optim_info_get(with->optim, &after) == DP_OK);
    if (after.step_count == before->step_count && after.skip_count == before->skip_count)
        return;
    FUZZ_CHECK(after.step_count <= before->step_count + 1 || p.mood.what == STEPS_OPTIM);
    if (!with->plain || with->of == NULL || after.step_count != before->step_count + 1)
        world_forget_all(&p.w);
    else
        world_each(&p.w, with->of, var_step, before->lr);
}

static bool is_due(const optim *with, const dp_optim_info *before)
{
    dp_optim_info after;
    FUZZ_CHECK(dp_optim_info_get(with->optim, &after) == DP_OK);
    return after.step_count + after.skip_count > before->step_count + before->skip_count;
}

static void train(void)
{
    net *n = root_net();
    int which = next(OPTIMS + 1), scope = next(SCOPES), rows = next(PROGRAM_ROWS);
    double x = number();
    optim *with = which < OPTIMS && p.optims[which].optim != NULL ? &p.optims[which] : NULL;
    dp_optim_info before = {.loss_factor = 1};
    dp_value log;
    if (n == NULL)
        return;
    if (with != NULL && with->of != NULL && next(8) != 1)
        n = with->of;
    set_mood();
    int runs = atomic_load(&p.runs);
    const net *simple = world_simple(n);
    bool weighed = p.mood.what == WEIGHS;
    if (with != NULL)
        FUZZ_CHECK(dp_optim_info_get(with->optim, &before) == DP_OK);
    dp_value batch = batch_of(scope_at(scope), rows, x);
    outcome out = judge(
        dp_train_step(n->module, p.scopes[scope], batch, with != NULL ? with->optim : NULL, &log),
        runs);
    if (out == REFUSED)
        return;
    world_forward(&p.w, n, true, out == WENT && simple != NULL && !world_has(n, net_is_muddy));
    if (out != WENT)
        return;
    bool means = n->kind != DISTRIBUTED || n->reduction == DP_MEAN_SAMPLES ||
                 (n->reduction == DP_MEAN_RANKS && rows >= p.w.info.rank_count);
    bool sure = simple != NULL && rows > 0 && means && !weighed &&
                (n == simple || !world_has(n->children[0], net_wraps)) &&
                !world_has(n, net_is_muddy) &&
                !(n->kind == DISTRIBUTED && with != NULL && with->accumulates);
    if (simple != NULL && simple->mean_grads)
        world_each(&p.w, n, var_begin, with != NULL && !is_due(with, &before));
    world_backward(&p.w, n, sure ? x * before.loss_factor : (double)NAN);
    if (with != NULL)
        optim_stepped(with, &before);
}

static void predict(void)
{
    net *n = root_net();
    int scope = next(SCOPES);
    dp_value out;
    if (n == NULL)
        return;
    set_mood();
    int runs = atomic_load(&p.runs);
    outcome how = judge(
        dp_predict_step(n->module, scope_at(scope), batch_of(scope_at(scope), 5, 1), &out), runs);
    if (how != REFUSED)
        world_forward(&p.w, n, true, false);
}

static void set_training(void)
{
    net *n = root_net();
    bool training = next(2) == 1;
    int runs = atomic_load(&p.runs);
    if (n != NULL && judge(dp_module_train(n->module, training), runs) == WENT)
        world_train(n, training);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static void zero_grad(void)
{
    net *n = root_net();
    int runs = atomic_load(&p.runs);
    if (n != NULL && judge(dp_zero_grad(n->module), runs) == WENT)
        world_each(&p.w, n, var_zero, 0);
}

static void edit_param(void)
{
    net *n = root_net();
    int which = next(8), runs = atomic_load(&p.runs), how = next(3);
    dp_tensor data, grad;
    char bytes[PROGRAM_ELEMENTS * 8] = {0};
    size_t count = n != NULL ? dp_module_param_count(n->module) : 0,
           i = count > 0 ? (size_t)which % count : 0;
    if (n == NULL)
        return;
    dp_status status =
        how == 0 && dp_owner_count(n->module) > 0
            ? dp_owner_edit(n->module, (size_t)which % dp_owner_count(n->module), i, &data, &grad)
            : dp_params_edit(n->module, i, &data, &grad);
    if (judge(status, runs) != WENT)
        return;
    FUZZ_CHECK(dp_tensor_count(&grad) == 0 || grad.data != NULL);
    FUZZ_CHECK(dp_read(p.w.ctx, &data, bytes,
                       (size_t)dp_tensor_count(&data) * dp_dtype_bytes((dp_dtype)data.dtype)) ==
               DP_OK);
    FUZZ_CHECK(how != 1 || dp_fill(p.w.ctx, &data,
                                   data.dtype == DP_BOOL   ? dp_bool(true)
                                   : data.dtype <= DP_BF16 ? dp_float(2)
                                                           : dp_int(2)) == DP_OK);
    if (how == 1)
        world_forget_all(&p.w);
}

static void write_all(void)
{
    net *n = root_net();
    if (n != NULL && next(2) == 1)
        write_numbers(n);
    else if (n != NULL)
        (void)judge(dp_params_changed(n->module), atomic_load(&p.runs));
}

static void ask_norm(void)
{
    net *n = root_net();
    int how = next(4), runs = atomic_load(&p.runs);
    double norm = 0;
    if (n == NULL)
        return;
    dp_status status = how == 0   ? dp_grad_norm(n->module, 2, &norm)
                       : how == 1 ? dp_grad_norm(n->module, (double)INFINITY, &norm)
                       : how == 2 ? dp_clip_grad_norm(n->module, 1, 2, &norm)
                                  : dp_clip_grad_value(n->module, 1);
    if (judge(status, runs) == WENT && how >= 2)
        world_forget_all(&p.w);
}

static void compare(void)
{
    net *n = root_net();
    char text[512];
    int runs = atomic_load(&p.runs), how = next(4);
    if (n == NULL)
        return;
    (void)judge(how == 0   ? dp_params_compare(n->module)
                : how == 1 ? dp_buffers_compare(n->module)
                : how == 2 ? dp_grads_scatter_set(n->module, next(2) == 1)
                           : (dp_report_text(n->module, text, sizeof text), DP_OK),
                runs);
}

/* ---- what trains them ------------------------------------------------------------------------ */

static void make_optim(void)
{
    optim *o = &p.optims[next(OPTIMS)];
    net *n = root_net();
    int flags = next(256), accumulate = next(4), rule = next(8);
    int runs = atomic_load(&p.runs);
    if (n == NULL || o->optim != NULL)
        return;
    dp_optim_config config = {.rule = rule == 1   ? dp_adam()
                                      : rule == 2 ? dp_adamw()
                                                  : dp_sgd(),
                              .hyper = {.lr = 0.5},
                              .accumulate = accumulate};
    o->plain = rule != 1 && rule != 2 && flags < 128;
    o->accumulates = accumulate > 1;
    if (flags >= 128) {
        config.hyper.weight_decay = flags & 1 ? 0.1 : 0;
        config.hyper.momentum = flags & 2 && rule != 1 && rule != 2 ? 0.9 : 0;
        config.clip.norm = flags & 4 ? 1 : 0;
        config.clip.skip_if_not_finite = (flags & 8) != 0;
        config.scale.dynamic = (flags & 16) != 0;
        config.masters = (flags & 32) != 0;
        config.sharded = (flags & 64) != 0;
    }
    if (judge(dp_optim_create(n->module, &config, &o->optim), runs) == WENT)
        o->of = n;
    else
        o->optim = NULL;
}

static void use_optim(void)
{
    optim *o = &p.optims[next(OPTIMS)];
    int how = next(8), runs = atomic_load(&p.runs), which = next(SAVED);
    dp_optim_info before;
    dp_value got;
    if (o->optim == NULL)
        return;
    FUZZ_CHECK(dp_optim_info_get(o->optim, &before) == DP_OK);
    if (how < 3) {
        if (judge(dp_optim_step(o->optim), runs) == WENT)
            optim_stepped(o, &before);
    } else if (how == 3) {
        dp_optim_destroy(o->optim);
        *o = (optim){.optim = NULL};
    } else if (how == 4) {
        if (judge(dp_optim_save(o->optim, p.root, &got), runs) == WENT)
            (void)judge(dp_keep(p.root, got, &p.saved[which]), runs);
    } else if (how == 5) {
        (void)judge(dp_optim_load(o->optim, p.saved[which]), runs);
    } else if (how == 6) {
        if (judge(dp_optim_unscale(o->optim), runs) == WENT)
            world_forget_all(&p.w);
    } else {
        (void)judge(dp_optim_progress(o->optim, next(4), next(8)), runs);
    }
}

static void use_average(void)
{
    average *a = &p.averages[next(AVERAGES)];
    int how = next(8), runs = atomic_load(&p.runs), which = next(SAVED);
    const dp_average_config config = {.rule = (dp_average_rule)next(3), .buffers = how == 1};
    net *n = root_net();
    dp_value got;
    if (a->average == NULL) {
        if (n != NULL && judge(dp_average_create(n->module, &config, &a->average), runs) != WENT)
            a->average = NULL;
        a->of = n;
    } else if (how < 3) {
        (void)judge(dp_average_update(a->average), runs);
    } else if (how == 3) {
        if (judge(dp_average_begin(a->average), runs) == WENT)
            world_forget_all(&p.w);
    } else if (how == 4) {
        if (judge(dp_average_end(a->average), runs) == WENT)
            world_forget_all(&p.w);
    } else if (how == 5) {
        dp_average_destroy(a->average);
        a->average = NULL;
        world_forget_all(&p.w);
    } else if (how == 6) {
        if (judge(dp_average_save(a->average, p.root, &got), runs) == WENT)
            (void)judge(dp_keep(p.root, got, &p.saved[which]), runs);
    } else if (next(2) == 1) {
        (void)judge(dp_average_load(a->average, p.saved[which]), runs);
    } else if (n != NULL && judge(dp_average_copy(a->average, n->module), runs) == WENT) {
        world_forget_all(&p.w);
    }
}

static void save_or_load(void)
{
    net *n = root_net();
    int which = next(SAVED), flags = next(16), runs = atomic_load(&p.runs);
    dp_value got;
    const dp_module_load_config config = {.allow_missing = (flags & 1) != 0,
                                          .allow_unknown = (flags & 2) != 0,
                                          .cast = (flags & 4) != 0};
    if (n == NULL)
        return;
    if (flags & 8) {
        if (judge(dp_module_save(n->module, p.root, &got), runs) == WENT)
            (void)judge(dp_keep(p.root, got, &p.saved[which]), runs);
    } else if (judge(dp_module_load(n->module, p.saved[which], &config), runs) == WENT) {
        world_forget_all(&p.w);
    }
}

/* ---- the program ----------------------------------------------------------------------------- */

static void look(void)
{
    for (size_t i = 0; i < p.w.net_count; i++)
        if (p.w.nets[i].module != NULL && !p.w.nets[i].owned)
            world_check(&p.w, p.w.nets[i].module, !dp_grads_are_scattered(p.w.nets[i].module));
}

static void step(void)
{
    static void (*const calls[])(void) = {
        make_module, make_wrapper, run_forward, run_backward,   train,        train,   zero_grad,
        edit_param,  make_optim,   use_optim,   use_average,    save_or_load, compare, ask_norm,
        write_all,   set_training, make_copy,   destroy_module, predict};
    enum { CALLS_COUNT = sizeof calls / sizeof calls[0] };
    int what = next(CALLS_COUNT + 4);
    if (what < CALLS_COUNT)
        calls[what]();
    else if (what == CALLS_COUNT)
        end_scope(next(SCOPES));
    else if (what == CALLS_COUNT + 1)
        p.replicas_fail = next(4) == 1;
    if (p.mood.done) /* by a method, beside what the call itself did */
        world_forget_all(&p.w);
    p.mood.done = false;
    look();
}

static void open_world(void)
{
    int flags = next(64), devices = 1 + (flags & 3);
    const dp_device_ops *const backends[] = {flags & 4 ? toy_device() : dp_cpu(), NULL};
    const dp_config config = {.backends = backends,
                              .device_count = devices,
                              .shards = (flags & 56) == 56 && devices != 3 ? 4 : 0,
                              .thread_count = devices,
                              .local_only = true,
                              .poison = (flags & 8) != 0,
                              .allocator = {take, give, NULL}};
    FUZZ_CHECK(dp_open(&config, &p.w.ctx) == DP_OK);
    FUZZ_CHECK(dp_info_get(p.w.ctx, &p.w.info) == DP_OK);
    p.w.host_memory = !(flags & 4);
    p.root = dp_scope_begin(p.w.ctx);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    atomic_store(&until_full, -1);
    memset(&p, 0, offsetof(struct program, w) + offsetof(world, nets));
    p.w.net_count = p.w.var_count = 0;
    memset(p.scopes, 0, sizeof p - offsetof(struct program, scopes));
    p.in = (fuzz){.data = data, .bytes = bytes};
    open_world();
    for (int i = next(4); i >= 0; i--)
        make_module();
    for (int i = 0; i < STEPS && p.in.at < bytes; i++)
        step();
    dp_close(p.w.ctx);
    FUZZ_CHECK(atomic_load(&blocks) == 0 && atomic_load(&p.alive) == 0);
    return 0;
}
