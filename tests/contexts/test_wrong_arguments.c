/* test_wrong_arguments.c - every public function, with every argument wrong in turn, on every
   backend: an error, a sentence that begins with the function's name, nothing written, and a
   context that works as before. A row names a function and the kinds of its arguments; what can be
   wrong with each kind stands in one place. What is in use while it is asked for: test_reentry.c.
   */

#include <limits.h>
#include "methods.h"
#include "tree.h"
#include "lazy.h"

enum { ROWS = 4, NOBODY = 99 };

static struct outs { /* all that a call may write to: 0x5a before, and so it must stay */
    dp_tensor tensor, grad;
    dp_value value, list;
    const dp_tensor *view;
    double number;
    dp_stats stats;
    dp_info info;
    dp_config config;
    dp_device_info device;
    dp_failure_info failure;
    dp_late_info late;
    dp_param_info param;
    dp_wrapper_info wrapper;
    dp_input_grad grads;
    dp_reducer_info reducer_info;
    dp_bucket_info bucket;
    const dp_stretch *stretches;
    dp_report report;
    dp_reducer *reducer;
    dp_module *module;
    dp_pass *pass;
    dp_ctx *ctx;
    dp_scope *scope;
    size_t count;
    int64_t rows[ROWS], first;
    double reals[ROWS];
    float host[ROWS];
    bool yes, used[8];
} outs;

typedef struct args { /* one of each kind */
    dp_ctx *ctx;
    dp_scope *scope;
    dp_module *module, *wrapper;
    dp_pass *pass;
    dp_reducer *reducer;
    dp_call *call;
    dp_value value, tuple, dict, list, number;
    const dp_tensor *a, *b, *out;
    const dp_part *parts;
    int rank, dim, root, ndim;
    const int64_t *shape;
    dp_dtype dtype;
    dp_op op;
    size_t count, index;
    const char *name, *known; /* any text; one that names something */
    void *memory;
    const dp_scatter_config *cut, *ranks;
    const dp_gather_config *gather;
    const dp_parallel_config *parallel;
    const dp_config *config;
    const dp_module_config *create;
    const dp_kernel_args *kernel;
    const dp_reducer_config *reduce;
    struct outs *outs;
} args;

typedef struct row {
    const char *fn;
    const char *kinds; /* of its arguments: letters of spoil() */
    dp_status (*call)(const args *a);
    unsigned how;
} row;

enum {
    NEUTRAL = 1,     /* wrong arguments give something harmless, and no sentence */
    INSIDE = 2,      /* called in a method's backward */
    LAST = 4,        /* called rightly, nothing works any more */
    NOT_RIGHTLY = 8, /* a right call is made elsewhere */
    GOES_ON = 16,    /* also when the job has failed */
    IN_RUN = 32      /* called under dp_run, wrongly by the first rank, rightly by all */
};

static struct kit {
    dp_ctx *ctx, *closed, *other;
    dp_scope *scope, *ended, *elsewhere;
    dp_module *net, *par, *destroyed;
    dp_pass *used, *stale;
    dp_reducer *finished; /* destroyed */
    dp_tensor a, b, out;
    args good;
    int devices;
    bool failed;
    const row *inside;
} kit;

static const int64_t four[] = {ROWS};

/* ---- what is wrong --------------------------------------------------------------------------- */

static dp_pass *one_pass(dp_scope *scope);

/* What has ended waits to be begun again, so it is stale for a short time only. */
static void end_something(void)
{
    kit.ended = dp_scope_begin(kit.ctx);
    if (kit.ended != NULL)
        kit.stale = one_pass(kit.ended);
    dp_scope_end(kit.ended);
    if (dp_module_create(kit.ctx, &(dp_module_config){.name = "ended"}, &kit.destroyed) == DP_OK)
        (void)dp_module_destroy(kit.destroyed);
    if (dp_reducer_create(kit.ctx, &(dp_reducer_config){.reduction = DP_SUM_RANKS},
                          &kit.finished) == DP_OK)
        (void)dp_reducer_destroy(kit.finished);
}

static dp_tensor forged_tensor(dp_tensor t, int n)
{
    const uint8_t ndims[] = {9, 200}, dtypes[] = {DP_DTYPE_COUNT, 99, DP_DTYPE_ANY};
    const int64_t wrong[] = {-4, INT64_MIN, INT64_MAX};
    if (n < 2)
        t.ndim = ndims[n];
    else if (n < 5)
        t.dtype = dtypes[n - 2];
    else if (n < 8)
        t.shape[0] = wrong[n - 5];
    else if (n < 11)
        t.stride[0] = wrong[n - 8];
    else
        t.data = NULL;
    return t;
}
enum { FORGED_TENSORS = 12 };

/* Values that no constructor makes; each is wrong wherever it stands. */
static bool forged_value(int n, dp_value *out)
{
    static dp_tensor tensor;
    static dp_value itself[1], item[1];
    static dp_pair no_key[1];
    static dp_container padding;
    if (n < FORGED_TENSORS) {
        tensor = forged_tensor(kit.a, n);
        *out = tree_by_hand(DP_TENSOR, &tensor, 0, 0);
        return true;
    }
    item[0] = dp_int(1);
    no_key[0].value = dp_int(1);
    padding = (dp_container){.data = dp_int(1), .pad_dims = 77};
    itself[0] = tree_by_hand(DP_LIST, itself, 1, 1);
    dp_value yes = dp_bool(true), garbage;
    *(unsigned char *)&yes.as = 0x5a;
    memset(&garbage, 0x5a, sizeof garbage);
    const dp_value wrong[] = {garbage,
                              yes,
                              itself[0],
                              tree_by_hand(NOBODY, item, 1, 1),
                              tree_by_hand(DP_TENSOR, NULL, 0, 0),
                              tree_by_hand(DP_STRING, NULL, 0, 0),
                              tree_by_hand(DP_CONTAINER, NULL, 0, 1),
                              tree_by_hand(DP_CONTAINER, &padding, 0, 1),
                              tree_by_hand(DP_LIST, NULL, 1, 1),
                              tree_by_hand(DP_TUPLE, item, 1, 0),
                              tree_by_hand(DP_LIST, item, 1, 255),
                              tree_by_hand(DP_DICT, no_key, 1, 1),
                              tree_by_hand(DP_DICT, NULL, UINT32_MAX, 1),
                              tree_by_hand(DP_ERROR, NULL, 0, 0),
                              dp_string(NULL, "x")};
    n -= FORGED_TENSORS;
    if (n >= (int)(sizeof wrong / sizeof wrong[0]))
        return false;
    *out = wrong[n];
    return true;
}

/* The wrong value itself, or inside a list, tuple or dict made by hand. */
static bool spoil_value(dp_value *value, int n, int kind)
{
    static dp_value item[1];
    static dp_pair pair[1] = {{.key = "x"}};
    if (!forged_value(n, item))
        return false;
    pair[0].value = item[0];
    bool holds = kind == DP_LIST || kind == DP_TUPLE;
    uint8_t depth = (uint8_t)(item[0].depth < DP_MAX_DEPTH ? item[0].depth + 1 : DP_MAX_DEPTH);
    *value = holds             ? tree_by_hand(kind, item, 1, depth)
             : kind == DP_DICT ? tree_by_hand(DP_DICT, pair, 1, depth)
                               : item[0];
    return true;
}

static bool spoil_tensor(const dp_tensor **tensor, int n)
{
    static dp_tensor wrong;
    wrong = forged_tensor(**tensor, n % FORGED_TENSORS);
    *tensor = n < FORGED_TENSORS ? &wrong : NULL;
    return n <= FORGED_TENSORS;
}

/* And what is on no device, or may not be written to. */
static bool spoil_placed(const dp_tensor **tensor, int n, bool written)
{
    static dp_tensor wrong;
    if (n >= 2 || (n == 1 && !written))
        return spoil_tensor(tensor, n - (written ? 2 : 1));
    wrong = **tensor;
    wrong.device = n == 0 ? (dp_device){7, 7} : wrong.device;
    wrong.read_only = n == 1;
    *tensor = &wrong;
    return true;
}

static bool spoil_pointer(const void *const *wrong, int count, int n, const void **out)
{
    if (n < count)
        *out = wrong[n];
    return n < count;
}

static bool spoil_int(int *value, int n, bool root)
{
    const int wrong[] = {-1, NOBODY, INT_MAX, INT_MIN};
    (void)root;
    *value = wrong[n % 4];
    return n < 4;
}

static bool spoil_dim(int *dim, int n)
{
    const int wrong[] = {1, -2, 9, INT_MAX, INT_MIN};
    *dim = wrong[n % 5];
    return n < 5;
}

static bool spoil_shape(args *a, int n)
{
    static const int64_t wrong[][1] = {{-1}, {INT64_MAX}, {INT64_MIN}};
    const int ndims[] = {-1, 9, 200, INT_MAX, INT_MIN};
    if (n < 5)
        a->ndim = ndims[n];
    else
        a->shape = n < 8 ? wrong[n - 5] : NULL;
    return n < 9;
}

static bool spoil_ranks(const dp_scatter_config **how, int n)
{
    static const int far[] = {NOBODY}, below[] = {-1}, good[] = {0};
    static const dp_scatter_config wrong[] = {{.local_ranks = far, .local_rank_count = 1},
                                              {.local_ranks = below, .local_rank_count = 1},
                                              {.local_ranks = good},
                                              {.local_ranks = good, .local_rank_count = SIZE_MAX},
                                              {.local_rank_count = NOBODY}};
    *how = &wrong[n % 5];
    return n < 5;
}

static bool spoil_split(const dp_scatter_config **how, int n)
{
    static const int64_t sizes[NOBODY] = {-1};
    static const double weights[NOBODY] = {-1};
    static const dp_scatter_config wrong[] = {
        {.cut.split = (dp_split)77},
        {.cut.split = (dp_split)-1},
        {.cut.split = DP_SPLIT_SIZES},
        {.cut = {.split = DP_SPLIT_SIZES, .sizes = sizes}},
        {.cut = {.split = DP_SPLIT_SIZES, .split_count = 1}},
        {.cut = {.split = DP_SPLIT_SIZES, .sizes = sizes, .split_count = NOBODY}},
        {.cut.split = DP_SPLIT_WEIGHTS},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = weights}},
        {.cut = {.split = DP_SPLIT_WEIGHTS, .weights = weights, .split_count = NOBODY}},
        {.cut = {.sizes = sizes, .split_count = 1}},
        {.cut = {.weights = weights, .split_count = 1}},
        {.cut.split_count = 1},
        {.cut.part_rows = 1},
        {.cut = {.split = DP_SPLIT_PADDED, .part_rows = -1}},
        {.cut = {.split = DP_SPLIT_EQUAL, .split_count = 1}}};
    const int count = sizeof wrong / sizeof wrong[0];
    *how = &wrong[n % count];
    return n < count;
}

static bool spoil_parallel(const dp_parallel_config **config, int n)
{
    static const int far = NOBODY;
    static dp_parallel_config wrong;
    const dp_scatter_config *how = NULL;
    const int dims[] = {DP_MAX_DIMS, -DP_MAX_DIMS - 1, INT_MAX};
    wrong = (dp_parallel_config){0};
    *config = &wrong;
    if (n < 3) {
        wrong.cut.dim = dims[n];
        return true;
    }
    if (n == 3) {
        wrong.output_rank = &far;
        return true;
    }
    if (!spoil_ranks(&how, n - 4) && !spoil_split(&how, n - 9))
        return false;
    wrong.local_ranks = how->local_ranks;
    wrong.local_rank_count = how->local_rank_count;
    wrong.cut.split = how->cut.split;
    wrong.cut.sizes = how->cut.sizes;
    wrong.cut.weights = how->cut.weights;
    wrong.cut.split_count = how->cut.split_count;
    wrong.cut.part_rows = how->cut.part_rows;
    return true;
}

static void *some_alloc(size_t bytes, size_t align, void *user)
{
    (void)bytes;
    (void)align;
    (void)user;
    return NULL;
}

static bool spoil_config(const dp_config **config, int n)
{
    static const int zero[] = {0};
    static const dp_device_ops none = {.head = {8, DP_LAYOUT}};
    static const dp_device_ops *const tables[] = {&none, NULL};
    static const dp_config wrong[] = {{.device_count = -1},
                                      {.device_count = INT_MAX},
                                      {.devices = zero},
                                      {.thread_count = -1},
                                      {.threads_per_device = -2},
                                      {.timeout_ms = -1},
                                      {.log = {.level = (dp_level)77}},
                                      {.allocator = {.alloc = some_alloc}},
                                      {.bootstrap = {.process_count = 2}},
                                      {.backends = tables}};
    const int count = sizeof wrong / sizeof wrong[0];
    *config = &wrong[n % count];
    return n < count;
}

static bool spoil_module_config(const dp_module_config **config, int n)
{
    static const dp_param_config params[] = {{.name = "w", .ndim = 77}};
    static dp_module *children[1];
    static dp_module_config wrong[10];
    end_something();
    children[0] = kit.destroyed;
    wrong[0] = (dp_module_config){.name = "a.b"};
    wrong[1] = (dp_module_config){.local_rank = NOBODY};
    wrong[2] = (dp_module_config){.method_count = 1};
    wrong[3] = (dp_module_config){.params = params};
    wrong[4] = (dp_module_config){.params = params, .param_count = 1};
    wrong[5] = (dp_module_config){.params = params, .param_count = SIZE_MAX};
    wrong[6] = (dp_module_config){.children = children, .child_count = 1};
    wrong[7] = (dp_module_config){.children = children, .child_count = SIZE_MAX};
    wrong[8] = (dp_module_config){.wraps = kit.destroyed};
    *config = n < 9 ? &wrong[n] : NULL;
    return n < 10;
}

static bool spoil_kernel(const dp_kernel_args **kernel, int n)
{
    static dp_kernel_args wrong;
    wrong = **kernel;
    *kernel = n < 6 ? &wrong : NULL;
    wrong.kernel = n == 0 ? (dp_kernel)NOBODY : wrong.kernel;
    wrong.dtype = n == 1 ? (dp_dtype)NOBODY : wrong.dtype;
    wrong.out = n == 2 ? NULL : wrong.out;
    wrong.out_count = n == 3 ? SIZE_MAX : wrong.out_count;
    wrong.in_count = n == 4 ? SIZE_MAX : wrong.in_count;
    wrong.count = n == 5 ? SIZE_MAX : wrong.count;
    return n < 7;
}

static bool spoil_reducer_config(const dp_reducer_config **config, int n)
{
    static const dp_range far[] = {{.block = NOBODY}};
    static dp_reducer_config wrong[9];
    for (int i = 0; i < 9; i++)
        wrong[i] = **config;
    wrong[0].reduction = (dp_reduction)0;
    wrong[1].reduction = (dp_reduction)77;
    wrong[2].blocks = NULL;
    wrong[3].block_count = SIZE_MAX;
    wrong[4].range_count = 1;
    wrong[5].ranges = far;
    wrong[5].range_count = 1;
    wrong[6].ranges = far;
    wrong[6].range_count = SIZE_MAX;
    wrong[7].unused_units = (dp_unused)-1;
    wrong[8].buckets.wire = DP_U8;
    *config = n < 9 ? &wrong[n] : NULL;
    return n < 10;
}

static bool spoil_handle(args *a, char kind, int n)
{
    static uint64_t zeros[512];
    static dp_call no_call;
    end_something();
    const void *const contexts[] = {kit.closed, zeros, &outs, NULL};
    const void *const scopes[] = {kit.ended, NULL, kit.elsewhere};
    const void *const modules[] = {kit.destroyed, NULL};
    const void *const passes[] = {kit.used, kit.stale, NULL};
    const void *const reducers[] = {kit.finished, NULL};
    const void *const calls[] = {&no_call, NULL};
    const void *wrong = NULL;
    bool some = false, is_scope = strchr("sSTx", kind) != NULL;
    if (kind == 'c' || kind == 'C') /* big letters: NULL is fine */
        some = spoil_pointer(contexts, kind == 'c' ? 4 : 3, n, &wrong);
    else if (kind == 'x') /* NULL is fine */
        some = spoil_pointer(scopes, 3, n == 1 ? 2 : n, &wrong) && n < 2;
    else if (is_scope) /* T: no context goes with it */
        some = spoil_pointer(scopes, kind == 's' ? 3 : kind == 'T' ? 2 : 1, n, &wrong);
    else if (kind == 'm' || kind == 'M')
        some = spoil_pointer(modules, kind == 'm' ? 2 : 1, n, &wrong);
    else if (kind == 'j' || kind == 'J')
        some = spoil_pointer(reducers, kind == 'j' ? 2 : 1, n, &wrong);
    else
        some = kind == 'p' ? spoil_pointer(passes, 3, n, &wrong)
                           : spoil_pointer(calls, 2, n, &wrong);
    void *handle = (void *)(uintptr_t)wrong;
    if (kind == 'c' || kind == 'C')
        a->ctx = handle;
    else if (is_scope)
        a->scope = handle;
    else if (kind == 'm' || kind == 'M')
        a->module = a->wrapper = handle;
    else if (kind == 'j' || kind == 'J')
        a->reducer = handle;
    else if (kind == 'p')
        a->pass = handle;
    else
        a->call = handle;
    return some;
}

static bool spoil_plain(args *a, char kind, int n)
{
    const dp_dtype dtypes[] = {(dp_dtype)-1, DP_DTYPE_COUNT, (dp_dtype)77, DP_DTYPE_ANY};
    switch (kind) {
    case 'e': /* any dtype that is none; E: DP_DTYPE_ANY is fine */
    case 'E':
        a->dtype = dtypes[n % 4];
        return n < (kind == 'e' ? 4 : 3);
    case 'f':
        a->op = n == 0 ? (dp_op)77 : (dp_op)-1;
        return n < 2;
    case 'i':
        a->index = n == 0 ? NOBODY : SIZE_MAX;
        return n < 2;
    case 'z':
        a->count = n == 0 ? SIZE_MAX : SIZE_MAX / 2;
        return n < 2;
    case 'Z':
        a->count = 0;
        return n < 1;
    case 'N':
        a->name = NULL;
        return n < 1;
    case 'K':
        a->known = n == 0 ? NULL : "nobody";
        return n < 2;
    case 'H':
        a->memory = NULL;
        return n < 1;
    default:
        a->outs = NULL;
        return n < 1;
    }
}

/* Make the argument of this kind wrong in its n-th way; false when there are no more. */
static bool spoil(args *a, char kind, int n)
{
    static const dp_gather_config far = {.local_rank = NOBODY}, below = {.local_rank = -1};
    switch (kind) {
    case 'v':
        return spoil_value(&a->value, n, DP_NONE);
    case 'n':
        return spoil_value(&a->number, n, DP_NONE);
    case 't':
        return spoil_value(&a->tuple, n, DP_TUPLE);
    case 'd':
        return spoil_value(&a->dict, n, DP_DICT);
    case 'l':
        return spoil_value(&a->list, n, DP_LIST);
    case 'a':
        return spoil_placed(&a->a, n, false);
    case 'b':
        return spoil_placed(&a->b, n, false) && a->b != NULL;
    case 'o':
        return spoil_placed(&a->out, n, true);
    case 'A': /* the device does not matter */
        return spoil_tensor(&a->a, n);
    case 'P':
        a->parts = NULL;
        return n < 1;
    case 'r':
        return spoil_int(&a->rank, n, false);
    case 'R':
        return spoil_int(&a->root, n, true);
    case 'D':
        return spoil_dim(&a->dim, n);
    case 'h':
        return spoil_shape(a, n);
    case 'g':
        a->gather = n == 0 ? &far : &below;
        return n < 2;
    case 'u':
        return spoil_ranks(&a->ranks, n);
    case 'w':
        return spoil_split(&a->cut, n);
    case 'W':
        return spoil_ranks(&a->cut, n) || spoil_split(&a->cut, n - 5);
    case 'q':
        return spoil_parallel(&a->parallel, n);
    case 'y':
        return spoil_config(&a->config, n);
    case 'Y':
        return spoil_module_config(&a->create, n);
    case 'X':
        return spoil_kernel(&a->kernel, n);
    case 'V':
        return spoil_reducer_config(&a->reduce, n);
    default:
        return strchr("cCsSTxmMpkjJ", kind) != NULL ? spoil_handle(a, kind, n)
                                                    : spoil_plain(a, kind, n);
    }
}

/* ---- the calls ------------------------------------------------------------------------------- */

static dp_message *message_of(const args *a)
{
    static dp_message one;
    if (a->a == NULL || a->outs == NULL)
        return NULL;
    one = (dp_message){.tensor = *a->a, .local_rank = a->rank, .peer = a->root};
    return &one;
}

#define OUT(field) (a->outs != NULL ? &a->outs->field : NULL)
#define SEND       a->parts[a->rank].send
#define RECV       a->parts[a->rank].recv
#define CALL(name, ...)                                                                            \
    static dp_status call_##name(const args *a)                                                    \
    {                                                                                              \
        (void)a;                                                                                   \
        return name(__VA_ARGS__);                                                                  \
    }
/* One that gives a value. */
#define MAKES(name, ...)                                                                           \
    static dp_status call_##name(const args *a)                                                    \
    {                                                                                              \
        dp_value value = name(__VA_ARGS__);                                                        \
        return value.kind == DP_ERROR ? (dp_status)value.status : DP_OK;                           \
    }
/* One that fails by what it gives. */
#define FAILS(name, failed)                                                                        \
    static dp_status call_##name(const args *a)                                                    \
    {                                                                                              \
        (void)a;                                                                                   \
        return (failed) ? DP_ERR_INVALID : DP_OK;                                                  \
    }

static bool has_spoken(void)
{
    return strcmp(dp_last_error(), "stale") != 0;
}

static void release(void *user)
{
    (void)user;
}

static dp_status spawn_nothing(void *user)
{
    (void)user;
    return DP_OK;
}

static dp_status see_piece(const dp_tensor *piece, size_t bytes, void *user)
{
    (void)piece;
    (void)bytes;
    (void)user;
    return DP_OK;
}

static dp_status map_same(dp_scope *scope, dp_value value, dp_value *out, void *user)
{
    (void)scope;
    (void)user;
    *out = value;
    return DP_OK;
}

static dp_status guarded_nothing(void *user)
{
    (void)user;
    return DP_OK;
}

#define HOST ((dp_device){0, 0})

FAILS(dp_version, dp_version() != DP_VERSION)
FAILS(dp_status_name, strcmp(dp_status_name((dp_status)77), "unknown status") != 0)
FAILS(dp_status_text, strcmp(dp_status_text((dp_status)-77), "unknown status") != 0)
FAILS(dp_status_class, dp_status_class((dp_status)77) != DP_CLASS_JOB)
FAILS(dp_or, dp_or(0, 1) < 1)
FAILS(dp_last_error, dp_last_error() == NULL)
FAILS(dp_error, dp_error(DP_ERR_USER, "%s", "") != DP_ERR_USER)
FAILS(dp_failure, dp_failure(a->ctx, OUT(failure)) != kit.failed || has_spoken())
FAILS(dp_abort, (dp_abort(a->ctx, (dp_status)77, "enough"), has_spoken()))
FAILS(dp_tag, (dp_tag(a->ctx, "epoch 3"), has_spoken()))
FAILS(dp_doing, (dp_doing(a->ctx, "a walk"), has_spoken()))
FAILS(dp_recent_collectives, dp_recent_collectives(a->ctx, NULL, 0) != 0 || has_spoken())
FAILS(dp_trace_begin, (dp_trace_begin(NULL), has_spoken()))
FAILS(dp_trace_end, (dp_trace_end(), has_spoken()))
FAILS(dp_dtype_name, strcmp(dp_dtype_name((dp_dtype)-1), "no dtype") != 0)
FAILS(dp_dtype_bytes, dp_dtype_bytes((dp_dtype)NOBODY) != 0)
FAILS(dp_dtype_is_float, !dp_dtype_is_float(DP_BF16) || dp_dtype_is_float((dp_dtype)NOBODY))
FAILS(dp_log_stderr, (dp_log_stderr(NULL, NULL), false))
CALL(dp_open, a->config, OUT(ctx))
FAILS(dp_close, (dp_close(a->ctx), has_spoken()))
FAILS(dp_spawn, dp_spawn(0, spawn_nothing, NULL) != DP_ERR_INVALID ||
                    dp_spawn(1, NULL, NULL) != DP_ERR_INVALID ||
                    dp_spawn(1, spawn_nothing, NULL) != DP_ERR_STATE)
CALL(dp_open_group, a->ctx, 0, a->config, OUT(ctx))
CALL(dp_recover, a->ctx)
CALL(dp_admit, a->ctx, OUT(yes))
CALL(dp_info_get, a->ctx, OUT(info))
CALL(dp_late, a->ctx, OUT(late))
CALL(dp_config_get, a->ctx, OUT(config))
CALL(dp_device_info_get, a->ctx, a->rank, OUT(device))
FAILS(dp_local_device, dp_local_device(a->ctx, a->rank).backend < 0)
FAILS(dp_local_stream, dp_local_stream(a->ctx, a->rank) == NULL)
CALL(dp_use_stream, a->ctx, a->rank, NULL)
CALL(dp_wait, a->ctx)
CALL(dp_run, a->ctx, a->scope, run_nothing, NULL)
CALL(dp_threads_limit, a->ctx)
FAILS(dp_local_share, dp_local_share(a->ctx, a->rank, ROWS, OUT(first)) < 0)
CALL(dp_my_rows, a->ctx, ROWS, OUT(first), OUT(first))
FAILS(dp_scope_begin, dp_scope_begin(a->ctx) == NULL)
CALL(dp_scope_check, a->scope)
FAILS(dp_scope_child, dp_scope_child(a->scope) == NULL)
FAILS(dp_scope_end, (dp_scope_end(a->scope), has_spoken()))
FAILS(dp_scope_alloc, dp_scope_alloc(a->scope, a->count) == NULL)
FAILS(dp_shared_alloc, dp_shared_alloc(a->scope, a->count) == NULL)
CALL(dp_scope_defer, a->scope, release, NULL)
CALL(dp_scope_attach, a->scope, dp_scope_child(a->scope))
CALL(dp_keep, a->scope, a->value, OUT(value))
CALL(dp_tensor_new, a->scope, HOST, a->dtype, a->ndim, a->shape, OUT(tensor))
CALL(dp_tensor_from, a->scope, HOST, a->memory, a->dtype, a->ndim, a->shape, OUT(tensor))
FAILS(dp_wrap, dp_wrap(a->memory, a->dtype, a->ndim, a->shape).dtype == DP_DTYPE_ANY)
FAILS(dp_wrap_const, dp_wrap_const(a->memory, a->dtype, a->ndim, a->shape).dtype == DP_DTYPE_ANY)
FAILS(dp_tensor_count, dp_tensor_count(a->a) < 0)
FAILS(dp_is_contiguous, !dp_is_contiguous(a->a))
FAILS(dp_same_shape, !dp_same_shape(a->a, a->b))
CALL(dp_tensor_to, a->scope, HOST, a->dtype, a->a, OUT(tensor))
CALL(dp_tensor_pieces, a->a, a->count * sizeof(float), see_piece, NULL)
CALL(dp_narrow, a->a, a->dim, 0, 1, OUT(tensor))
CALL(dp_select, a->a, a->dim, 0, OUT(tensor))
CALL(dp_transpose, a->a, a->dim, 0, OUT(tensor))
CALL(dp_reshape, a->a, 1, four, OUT(tensor))
CALL(dp_contiguous, a->scope, a->a, OUT(tensor))
CALL(dp_fill, a->ctx, a->out, a->number)
CALL(dp_copy, a->ctx, a->out, a->a, NULL)
CALL(dp_cast, a->ctx, a->out, a->a)
CALL(dp_axpby, a->ctx, 1, a->a, 1, a->b, a->out)
CALL(dp_tensor_stats, a->ctx, a->a, OUT(stats))
CALL(dp_read, a->ctx, a->a, a->outs != NULL ? a->outs->host : NULL, sizeof a->outs->host)
CALL(dp_item, a->ctx, a->number, OUT(number))
FAILS(dp_none, dp_none().kind != DP_NONE)
FAILS(dp_bool, !dp_bool(true).as.b)
FAILS(dp_int, dp_int(7).as.i != 7)
FAILS(dp_float, dp_float(7).kind != DP_FLOAT)
FAILS(dp_opaque, dp_opaque(NULL).kind != DP_OPAQUE)
MAKES(dp_string, a->scope, a->name)
MAKES(dp_of, a->scope, a->a)
MAKES(dp_array, a->scope, a->memory, a->dtype, a->ndim, a->shape)
MAKES(dp_contain, a->scope, &(dp_container){.data = a->value})
MAKES(dp_stacked, a->scope, a->value, 0)
MAKES(dp_cpu_only, a->scope, a->value)
MAKES(dp_list_make, a->scope, DP_LIST, &a->value, a->count)
MAKES(dp_dict_make, a->scope, &(dp_pair){"x", a->value}, a->count)
MAKES(dp_get, a->dict, "x")
MAKES(dp_at, a->list, 0)
MAKES(dp_part_of, a->ctx, a->list, a->rank)
FAILS(dp_count, dp_count(a->list) > 4)
FAILS(dp_key_at, dp_key_at(a->dict, 0) == NULL)
FAILS(dp_text, dp_text(a->value) == NULL)
CALL(dp_as_tensor, a->value, "it", a->dtype, -1, OUT(view))
CALL(dp_map, a->scope, a->dict, map_same, NULL, OUT(value))
CALL(dp_collate, a->scope, &a->value, a->count, 1, OUT(value))
CALL(dp_collate_parts, a->scope, &a->value, a->count, 1, OUT(value))
CALL(dp_pseudo_collate, a->scope, &a->value, a->count, OUT(value), NULL)
CALL(dp_default_collate, a->scope, &a->value, a->count, OUT(value), NULL)
CALL(dp_split_rows, ROWS, a->count, a->cut != NULL ? &a->cut->cut : NULL,
     a->outs != NULL ? a->outs->rows : NULL, OUT(count))
CALL(dp_scatter, a->ctx, a->scope, a->value, a->cut, OUT(value))
CALL(dp_scatter_kwargs, a->ctx, a->scope, a->tuple, a->dict, a->cut, OUT(value), OUT(list))
CALL(dp_gather, a->ctx, a->scope, a->list, a->gather, OUT(value))
CALL(dp_replicate, a->ctx, a->scope, a->value, a->ranks, OUT(value))
CALL(dp_reduce_add, a->ctx, a->scope, a->list, a->gather, OUT(value))
CALL(dp_scatter_into, a->ctx, a->a, a->dim, a->out, a->count)
CALL(dp_gather_into, a->ctx, a->a, a->count, a->dim, a->out)
CALL(dp_replicate_into, a->ctx, a->a, a->out, a->count)
CALL(dp_reduce_add_into, a->ctx, a->a, a->count, a->out)
CALL(dp_all_reduce, a->ctx, a->parts, a->count, a->dtype, a->op)
CALL(dp_all_reduce_scaled, a->ctx, a->parts, a->count, a->dtype, a->op, 2)
CALL(dp_all_reduce_weighted, a->ctx, a->parts, a->memory, a->count, a->dtype)
CALL(dp_broadcast, a->ctx, a->parts, a->count, a->dtype, a->root)
CALL(dp_all_gather, a->ctx, a->parts, a->count, a->dtype)
CALL(dp_reduce_scatter, a->ctx, a->parts, a->count, a->dtype, a->op)
CALL(dp_all_to_all, a->ctx, a->parts, a->count, a->dtype)
CALL(dp_reduce_to, a->ctx, a->parts, a->count, a->dtype, a->op, a->root)
CALL(dp_gather_to, a->ctx, a->parts, a->count, a->dtype, a->root)
CALL(dp_scatter_from, a->ctx, a->parts, a->count, a->dtype, a->root)
CALL(dp_barrier, a->ctx)
CALL(dp_rank_all_reduce, a->ctx, SEND, RECV, a->count, a->dtype, a->op)
CALL(dp_rank_broadcast, a->ctx, RECV, a->count, a->dtype, a->root)
CALL(dp_rank_all_gather, a->ctx, SEND, RECV, a->count, a->dtype)
CALL(dp_rank_reduce_scatter, a->ctx, SEND, RECV, a->count, a->dtype, a->op)
CALL(dp_rank_barrier, a->ctx)
FAILS(dp_utf8_bytes, dp_utf8_bytes(a->name) == 0)
FAILS(dp_is_utf8, !dp_is_utf8(a->name))
FAILS(dp_rank, dp_rank(a->ctx) == -1)
FAILS(dp_rank_count, dp_rank_count(a->ctx) == -1)
CALL(dp_agree, a->ctx, DP_OK)
CALL(dp_any, a->ctx, true, OUT(yes))
CALL(dp_all_reduce_i64, a->ctx, OUT(first), a->count, a->op)
CALL(dp_all_reduce_f64, a->ctx, a->memory, a->count, a->op)
CALL(dp_all_gather_i64, a->ctx, a->memory, a->count, a->outs != NULL ? a->outs->rows : NULL)
CALL(dp_all_gather_f64, a->ctx, a->memory, a->count, a->outs != NULL ? a->outs->reals : NULL)
CALL(dp_broadcast_i64, a->ctx, OUT(first), a->count, a->root)
CALL(dp_broadcast_f64, a->ctx, a->memory, a->count, a->root)
CALL(dp_send, a->ctx, a->a, a->root, 0)
CALL(dp_recv, a->ctx, a->out, a->root, 0)
CALL(dp_messages_begin, a->ctx, message_of(a), 1)
CALL(dp_messages_end, a->ctx, message_of(a), 1)
CALL(dp_messages_test, a->ctx, message_of(a), 1)
CALL(dp_reducer_create, a->ctx, a->reduce, OUT(reducer))
CALL(dp_reducer_destroy, a->reducer)
CALL(dp_reducer_begin, a->reducer, NULL)
CALL(dp_reducer_ready, a->reducer, a->rank, (uint32_t)a->index, NULL)
CALL(dp_reducer_absent, a->reducer, a->rank)
CALL(dp_reducer_finish, a->reducer)
FAILS(dp_reducer_used, !dp_reducer_used(a->reducer, (uint32_t)a->index))
CALL(dp_reducer_info_get, a->reducer, OUT(reducer_info))
CALL(dp_reducer_bucket_get, a->reducer, a->index, OUT(bucket))
static const dp_bucket *bucket_of(const args *a) /* outside of any hook */
{
    static dp_bucket bucket;
    bucket.reducer = a->reducer;
    return a->reducer != NULL ? &bucket : NULL;
}
CALL(dp_bucket_all_reduce, bucket_of(a), a->parts, a->count, a->dtype, a->op, 1)
CALL(dp_bucket_all_gather, bucket_of(a), a->parts, a->count, a->dtype)
CALL(dp_bucket_all_to_all, bucket_of(a), a->parts, a->count, a->dtype)
CALL(dp_module_create, a->ctx, a->create, OUT(module))
CALL(dp_module_copy, a->module, a->rank, OUT(module))
CALL(dp_module_destroy, a->module)
CALL(dp_module_train, a->module, true)
CALL(dp_grads_scatter_set, a->module, false)
FAILS(dp_module_name, dp_module_name(a->module)[0] == '\0')
FAILS(dp_module_rank, dp_module_rank(a->module) < 0)
FAILS(dp_module_ctx, dp_module_ctx(a->module) == NULL)
FAILS(dp_module_param_count, dp_module_param_count(a->module) == 0)
CALL(dp_module_param, a->module, a->index, OUT(param))
CALL(dp_module_find, a->module, a->known, OUT(count))
CALL(dp_module_stretches, a->module, OUT(stretches), OUT(count))
CALL(dp_params_edit, a->module, a->index, OUT(tensor), OUT(grad))
CALL(dp_params_write, a->module, a->index, a->memory, sizeof(float[ROWS]))
CALL(dp_params_changed, a->module)
CALL(dp_params_move, a->module, a->index, a->memory, NULL)
CALL(dp_params_move_block, a->module, a->memory, NULL)
CALL(dp_edit_begin, a->module, DP_OK)
CALL(dp_edit_end, a->module, DP_OK)
CALL(dp_edit_shares, a->module)
CALL(dp_zero_grad, a->module)
FAILS(dp_grads_may_zero, !dp_grads_may_zero(a->module))
CALL(dp_grads_zeroed, a->module)
FAILS(dp_param, dp_param(a->call, a->index) == NULL)
FAILS(dp_buffer, dp_buffer(a->call, a->index + 1) == NULL)
FAILS(dp_grad, dp_grad(a->call, a->index) == NULL)
FAILS(dp_param_tensor, dp_param_tensor(a->call, a->index).dtype == DP_DTYPE_ANY)
FAILS(dp_buffer_tensor, dp_buffer_tensor(a->call, a->index + 1).dtype == DP_DTYPE_ANY)
FAILS(dp_grad_tensor, dp_grad_tensor(a->call, a->index).dtype == DP_DTYPE_ANY)
FAILS(dp_param_block, dp_param_block(a->call) == NULL)
FAILS(dp_grad_block, dp_grad_block(a->call) == NULL)
CALL(dp_grad_ready, a->call, a->index)
CALL(dp_call_out_grad, a->call, NULL, OUT(tensor))
CALL(dp_call_tensor, a->call, a->known, a->dtype, -1, OUT(view))
CALL(dp_call_shaped, a->call, a->known, a->dtype, 1, four, OUT(view))
CALL(dp_call_arg, a->call, a->index, a->dtype, -1, OUT(view))
CALL(dp_call_tensor_view, a->call, a->known, a->dtype, -1, OUT(view))
CALL(dp_call_arg_view, a->call, a->index, a->dtype, -1, OUT(view))
CALL(dp_call_child, a->call, a->known, "forward", a->tuple, a->dict, OUT(value), NULL)
CALL(dp_call_all_reduce, a->call, kit.a.data, kit.out.data, a->count, a->dtype, a->op)
CALL(dp_call_all_reduce_tensor, a->call, a->a, a->out, a->op)
CALL(dp_invoke, a->module, a->scope, a->name, a->tuple, a->dict, NULL, OUT(value), NULL)
CALL(dp_backward, a->pass, a->number, OUT(grads))
CALL(dp_data_parallel, a->module, a->parallel, OUT(module))
CALL(dp_data_parallel_once, a->module, a->scope, a->name, a->tuple, a->dict, a->parallel,
     OUT(value), NULL)
CALL(dp_container_parallel, a->module, a->parallel, OUT(module))
CALL(dp_model_parallel, a->module, a->parallel, OUT(module))
CALL(dp_criterion_parallel, a->module, a->parallel, OUT(module))
CALL(dp_meta_test_parallel, a->module, OUT(module))
CALL(dp_everywhere, a->module, OUT(module))
CALL(dp_distributed, a->module, NULL, OUT(module))
CALL(dp_separate_distributed, a->module, NULL, OUT(module))
FAILS(dp_wrapper_reducer, dp_wrapper_reducer(a->wrapper) == NULL)
FAILS(dp_owner_count, dp_owner_count(a->module) == 0)
FAILS(dp_grads_are_scattered, !dp_grads_are_scattered(a->module))
FAILS(dp_grads_are_unseen, !dp_grads_are_unseen(a->module))
CALL(dp_owner_edit, a->module, 0, a->index, OUT(tensor), OUT(grad))
CALL(dp_owner_param, a->module, 0, a->index, OUT(tensor))
CALL(dp_owner_grad, a->module, 0, a->index, OUT(tensor))
CALL(dp_grads_used, a->module, a->outs != NULL ? a->outs->used : NULL,
     dp_module_param_count(a->module))
CALL(dp_report_get, a->wrapper, OUT(report))
FAILS(dp_report_text, dp_report_text(a->module, (char *)OUT(host), sizeof outs.host) == 0)
CALL(dp_params_compare, a->module)
CALL(dp_buffers_compare, a->module)
CALL(dp_buffers_sync, a->module)
CALL(dp_all_reduce_list, a->ctx, a->scope, a->list, a->ranks, OUT(value))
CALL(dp_wrapper_info_get, a->wrapper, OUT(wrapper))
FAILS(dp_is_wrapper, !dp_is_wrapper(a->wrapper))
FAILS(dp_wrapped, dp_wrapped(a->wrapper) == NULL)
FAILS(dp_unwrap, dp_unwrap(a->wrapper) == NULL)
CALL(dp_train_step, a->module, a->scope, a->dict, NULL, OUT(value))
CALL(dp_predict_step, a->module, a->scope, a->dict, OUT(value))
CALL(dp_kernel_run, a->ctx, a->rank, a->kernel)
CALL(dp_error_in, "dp_error_in", DP_OK)
FAILS(dp_no_memory, dp_no_memory() != DP_ERR_NO_MEMORY)
CALL(dp_check_ctx, "dp_check_ctx", a->ctx)
CALL(dp_check_alone, "dp_check_alone", a->ctx)
CALL(dp_check_scope, "dp_check_scope", a->scope, a->ctx)
CALL(dp_check_pointer, "dp_check_pointer", "it", a->memory)
CALL(dp_check_value, "dp_check_value", "it", a->value)
CALL(dp_scope_guard, a->scope, a->name, guarded_nothing, NULL)
CALL(dp_made, dp_of(a->scope, a->a), OUT(value))
FAILS(dp_join_names, dp_join_names(a->scope, a->known, a->name) == NULL)
FAILS(dp_cpu, dp_cpu() == NULL)
FAILS(dp_cpu_coll, dp_cpu_coll() == NULL)
FAILS(dp_shm_coll, dp_shm_coll() == NULL)
FAILS(dp_tcp_coll, dp_tcp_coll() == NULL)

static dp_status call_wrapper_invoke(const args *a)
{
    return dp_invoke(a->wrapper, a->scope, a->name, a->tuple, a->dict, NULL, OUT(value), NULL);
}

static dp_status call_wrapper_step(const args *a)
{
    return dp_train_step(a->wrapper, a->scope, a->dict, NULL, OUT(value));
}

#define ROW(name, kinds, how)                                                                      \
    {                                                                                              \
#name, kinds, call_##name, how                                                             \
    }

/* clang-format off */
static const row table[] = {
    ROW(dp_version, "", 0), ROW(dp_status_name, "", 0), ROW(dp_status_text, "", 0),
    ROW(dp_status_class, "", 0), ROW(dp_or, "", 0), ROW(dp_last_error, "", 0), ROW(dp_error, "", 0),
    ROW(dp_failure, "c", GOES_ON), ROW(dp_tag, "c", GOES_ON), ROW(dp_doing, "c", GOES_ON),
    ROW(dp_trace_begin, "", 0), ROW(dp_trace_end, "", 0),
    ROW(dp_recent_collectives, "c", GOES_ON), ROW(dp_dtype_name, "", 0), ROW(dp_dtype_bytes, "", 0),
    ROW(dp_dtype_is_float, "", 0),
    ROW(dp_log_stderr, "", 0), ROW(dp_open, "yO", NOT_RIGHTLY), ROW(dp_spawn, "", 0),
    ROW(dp_recover, "c", NOT_RIGHTLY), ROW(dp_admit, "cO", NOT_RIGHTLY),
    ROW(dp_open_group, "cyO", NOT_RIGHTLY), ROW(dp_info_get, "cO", GOES_ON),
    ROW(dp_late, "cO", GOES_ON),
    ROW(dp_config_get, "cO", GOES_ON), ROW(dp_device_info_get, "crO", 0),
    ROW(dp_local_device, "cr", GOES_ON), ROW(dp_local_stream, "cr", GOES_ON),
    ROW(dp_use_stream, "cr", GOES_ON), ROW(dp_wait, "c", 0), ROW(dp_run, "cx", 0),
    ROW(dp_threads_limit, "c", 0), ROW(dp_local_share, "cr", GOES_ON),
    ROW(dp_my_rows, "cO", GOES_ON), ROW(dp_scope_begin, "c", 0),
    ROW(dp_scope_check, "T", GOES_ON),
    ROW(dp_scope_child, "T", GOES_ON), ROW(dp_scope_end, "S", NOT_RIGHTLY),
    ROW(dp_scope_alloc, "Tz", GOES_ON), ROW(dp_shared_alloc, "Tz", GOES_ON),
    ROW(dp_scope_defer, "T", GOES_ON),
    ROW(dp_scope_attach, "T", GOES_ON), ROW(dp_keep, "TvO", 0), ROW(dp_tensor_new, "TehO", 0),
    ROW(dp_tensor_from, "TeHhO", 0), ROW(dp_wrap, "eh", 0), ROW(dp_wrap_const, "eh", 0),
    ROW(dp_tensor_count, "A", 0), ROW(dp_is_contiguous, "A", 0), ROW(dp_same_shape, "A", 0),
    ROW(dp_tensor_to, "TeaO", 0), ROW(dp_tensor_pieces, "AZ", 0), ROW(dp_narrow, "ADO", 0),
    ROW(dp_select, "ADO", 0), ROW(dp_transpose, "ADO", 0), ROW(dp_reshape, "AO", 0),
    ROW(dp_contiguous, "TaO", 0), ROW(dp_fill, "con", 0), ROW(dp_copy, "coa", 0),
    ROW(dp_cast, "coa", 0), ROW(dp_axpby, "cabo", 0), ROW(dp_tensor_stats, "caO", 0),
    ROW(dp_read, "caO", 0), ROW(dp_item, "cnO", 0), ROW(dp_none, "", 0), ROW(dp_bool, "", 0),
    ROW(dp_int, "", 0), ROW(dp_float, "", 0), ROW(dp_opaque, "", 0), ROW(dp_string, "TN", GOES_ON),
    ROW(dp_of, "TA", GOES_ON), ROW(dp_array, "TeHh", GOES_ON), ROW(dp_contain, "Tv", GOES_ON),
    ROW(dp_stacked, "Tv", GOES_ON), ROW(dp_cpu_only, "Tv", GOES_ON),
    ROW(dp_list_make, "Tvz", GOES_ON), ROW(dp_dict_make, "Tvz", GOES_ON), ROW(dp_get, "d", 0),
    ROW(dp_at, "l", 0), ROW(dp_part_of, "cr", GOES_ON),
    ROW(dp_count, "", 0), ROW(dp_key_at, "d", 0),
    ROW(dp_text, "v", NEUTRAL | NOT_RIGHTLY), ROW(dp_as_tensor, "vEO", 0),
    ROW(dp_map, "TdO", GOES_ON), ROW(dp_collate, "TvzZO", 0),
    ROW(dp_collate_parts, "TvzZO", 0), ROW(dp_pseudo_collate, "TvzZO", 0),
    ROW(dp_default_collate, "TvzZO", 0), ROW(dp_split_rows, "wzZO", 0), ROW(dp_scatter, "csvWO", 0),
    ROW(dp_scatter_kwargs, "cstdWO", 0), ROW(dp_gather, "cslgO", 0), ROW(dp_replicate, "csvuO", 0),
    ROW(dp_reduce_add, "cslgO", 0), ROW(dp_scatter_into, "caoDzZ", 0),
    ROW(dp_gather_into, "caoDzZ", 0), ROW(dp_replicate_into, "caozZ", 0),
    ROW(dp_reduce_add_into, "caozZ", 0), ROW(dp_all_reduce, "cPzef", 0),
    ROW(dp_all_reduce_scaled, "cPzef", 0), ROW(dp_all_reduce_weighted, "cPzeH", 0),
    ROW(dp_broadcast, "cPzeR", 0), ROW(dp_all_gather, "cPze", 0),
    ROW(dp_reduce_scatter, "cPzef", 0), ROW(dp_all_to_all, "cPze", 0),
    ROW(dp_reduce_to, "cPzefR", 0), ROW(dp_gather_to, "cPzeR", 0), ROW(dp_scatter_from, "cPzeR", 0),
    ROW(dp_barrier, "c", 0), ROW(dp_rank_all_reduce, "czef", IN_RUN),
    ROW(dp_rank_broadcast, "czeR", IN_RUN), ROW(dp_rank_all_gather, "cze", IN_RUN),
    ROW(dp_rank_reduce_scatter, "czef", IN_RUN), ROW(dp_rank_barrier, "c", IN_RUN),
    ROW(dp_utf8_bytes, "N", NEUTRAL), ROW(dp_is_utf8, "N", NEUTRAL),
    ROW(dp_rank, "c", GOES_ON), ROW(dp_rank_count, "c", GOES_ON),
    ROW(dp_agree, "c", 0), ROW(dp_any, "cO", 0), ROW(dp_all_reduce_i64, "czfO", 0),
    ROW(dp_all_reduce_f64, "cHzf", 0), ROW(dp_all_gather_i64, "cHzO", 0),
    ROW(dp_all_gather_f64, "cHzO", 0), ROW(dp_broadcast_i64, "czRO", 0),
    ROW(dp_broadcast_f64, "cHzR", 0), ROW(dp_send, "caR", NOT_RIGHTLY),
    ROW(dp_recv, "coR", NOT_RIGHTLY), ROW(dp_messages_begin, "carRO", NOT_RIGHTLY),
    ROW(dp_messages_end, "cO", NOT_RIGHTLY), ROW(dp_messages_test, "cO", NOT_RIGHTLY),
    ROW(dp_reducer_create, "cVO", 0),
    ROW(dp_reducer_destroy, "J", NOT_RIGHTLY), ROW(dp_reducer_begin, "j", 0),
    ROW(dp_reducer_ready, "jri", 0), ROW(dp_reducer_absent, "jr", NOT_RIGHTLY),
    ROW(dp_reducer_finish, "j", 0), ROW(dp_reducer_used, "ji", GOES_ON),
    ROW(dp_reducer_info_get, "jO", GOES_ON), ROW(dp_reducer_bucket_get, "jiO", GOES_ON),
    ROW(dp_bucket_all_reduce, "jPe", NOT_RIGHTLY), ROW(dp_bucket_all_gather, "jPe", NOT_RIGHTLY),
    ROW(dp_bucket_all_to_all, "jPe", NOT_RIGHTLY),
    ROW(dp_module_create, "cYO", 0), ROW(dp_module_copy, "mrO", 0),
    ROW(dp_module_destroy, "M", NOT_RIGHTLY), ROW(dp_module_train, "m", 0),
    ROW(dp_module_name, "m", 0), ROW(dp_module_rank, "m", 0), ROW(dp_module_ctx, "m", GOES_ON),
    ROW(dp_module_param_count, "m", 0), ROW(dp_module_param, "miO", 0),
    ROW(dp_module_find, "mKO", 0), ROW(dp_module_stretches, "mO", 0),
    ROW(dp_params_edit, "miO", 0), ROW(dp_params_write, "miH", 0),
    ROW(dp_params_changed, "m", 0), ROW(dp_edit_begin, "m", 0), ROW(dp_edit_end, "m", 0),
    ROW(dp_params_move, "miH", NOT_RIGHTLY), ROW(dp_params_move_block, "mH", NOT_RIGHTLY),
    ROW(dp_edit_shares, "m", 0),
    ROW(dp_zero_grad, "m", 0), ROW(dp_grads_may_zero, "m", NOT_RIGHTLY),
    ROW(dp_grads_zeroed, "m", NOT_RIGHTLY), ROW(dp_param, "ki", INSIDE),
    ROW(dp_buffer, "ki", INSIDE), ROW(dp_grad, "ki", INSIDE), ROW(dp_param_tensor, "ki", INSIDE),
    ROW(dp_buffer_tensor, "ki", INSIDE), ROW(dp_grad_tensor, "ki", INSIDE),
    ROW(dp_param_block, "k", INSIDE | NOT_RIGHTLY), ROW(dp_grad_block, "k", INSIDE | NOT_RIGHTLY),
    ROW(dp_grad_ready, "ki", INSIDE), ROW(dp_call_out_grad, "kO", INSIDE),
    ROW(dp_call_tensor, "kKEO", INSIDE), ROW(dp_call_shaped, "kKEO", INSIDE),
    ROW(dp_call_arg, "kiEO", INSIDE), ROW(dp_call_tensor_view, "kKEO", INSIDE),
    ROW(dp_call_arg_view, "kiEO", INSIDE), ROW(dp_call_child, "kKtdO", INSIDE),
    ROW(dp_call_all_reduce, "kzef", INSIDE), ROW(dp_call_all_reduce_tensor, "kaof", INSIDE),
    ROW(dp_invoke, "msNtdO", 0), {"dp_invoke", "msNtdO", call_wrapper_invoke, 0},
    ROW(dp_backward, "pn", 0), ROW(dp_data_parallel, "mqO", 0),
    ROW(dp_data_parallel_once, "msNtdqO", 0), ROW(dp_container_parallel, "mqO", 0),
    ROW(dp_model_parallel, "mqO", 0), ROW(dp_criterion_parallel, "mqO", 0),
    ROW(dp_meta_test_parallel, "mO", 0), ROW(dp_everywhere, "mO", 0), ROW(dp_distributed, "mO", 0),
    ROW(dp_owner_count, "m", 0), ROW(dp_owner_edit, "miO", 0),
    ROW(dp_owner_param, "miO", 0), ROW(dp_owner_grad, "miO", 0), ROW(dp_grads_used, "mO", 0),
    ROW(dp_grads_scatter_set, "m", 0), ROW(dp_grads_are_scattered, "m", NOT_RIGHTLY),
    ROW(dp_grads_are_unseen, "m", NOT_RIGHTLY),
    ROW(dp_separate_distributed, "mO", NOT_RIGHTLY), ROW(dp_wrapper_reducer, "m", NOT_RIGHTLY),
    ROW(dp_report_get, "mO", NOT_RIGHTLY), ROW(dp_report_text, "mO", 0),
    ROW(dp_params_compare, "m", 0), ROW(dp_buffers_compare, "m", 0),
    ROW(dp_buffers_sync, "m", 0),
    ROW(dp_all_reduce_list, "csluO", 0),
    ROW(dp_wrapper_info_get, "mO", 0), ROW(dp_is_wrapper, "m", 0), ROW(dp_wrapped, "m", 0),
    ROW(dp_unwrap, "m", 0), ROW(dp_train_step, "msdO", 0), ROW(dp_predict_step, "msdO", 0),
    {"dp_train_step", "msdO", call_wrapper_step, 0}, ROW(dp_kernel_run, "crX", 0),
    ROW(dp_error_in, "", 0), ROW(dp_no_memory, "", 0), ROW(dp_check_ctx, "c", 0),
    ROW(dp_check_alone, "c", GOES_ON), ROW(dp_check_scope, "sC", GOES_ON),
    ROW(dp_check_pointer, "H", 0), ROW(dp_check_value, "v", 0), ROW(dp_made, "TA", GOES_ON),
    ROW(dp_scope_guard, "TN", GOES_ON), ROW(dp_join_names, "TN", GOES_ON),
    ROW(dp_cpu, "", 0), ROW(dp_cpu_coll, "", 0), ROW(dp_shm_coll, "", 0), ROW(dp_tcp_coll, "", 0),
    ROW(dp_abort, "c", LAST), ROW(dp_close, "C", LAST)};
/* clang-format on */

/* ---- the sweep ------------------------------------------------------------------------------- */

static void arm(void)
{
    memset(&outs, 0x5a, sizeof outs);
    (void)dp_error(DP_ERR_USER, "stale");
}

/* Only what the row says may say so: dp_stacked and dp_cpu_only are dp_contain in other words. */
static bool begins_with(const char *fn)
{
    if (strcmp(fn, "dp_stacked") == 0 || strcmp(fn, "dp_cpu_only") == 0)
        fn = "dp_contain";
    if (strcmp(fn, "dp_made") == 0) /* the sentence of what made the value */
        fn = "dp_of";
    size_t length = strlen(fn);
    return strncmp(dp_last_error(), fn, length) == 0 &&
           strncmp(dp_last_error() + length, ": ", 2) == 0 && dp_last_error()[length + 2] != '\0';
}

static void check_refused(const row *r, char kind, int n, dp_status status)
{
    const unsigned char *bytes = (const unsigned char *)&outs;
    bool call = dp_status_class(status) == DP_CLASS_CALL || status == DP_ERR_NO_MEMORY ||
                status == DP_ERR_NO_DEVICE;
    for (size_t i = 0; i < sizeof outs; i++)
        if (bytes[i] != 0x5a)
            test_fail(__FILE__, __LINE__, "%s, '%c' %d: it has written (byte %zu)", r->fn, kind, n,
                      i);
    if (!call || (!begins_with(r->fn) && (r->how & NEUTRAL) == 0))
        test_fail(__FILE__, __LINE__, "%s, '%c' %d: %s, \"%s\"", r->fn, kind, n,
                  dp_status_name(status), dp_last_error());
}

/* The wrong calls of a row, and then a right one. */
static void sweep_row(const row *r, const args *good)
{
    for (const char *kind = r->kinds; *kind != '\0'; kind++)
        for (int n = 0;; n++) {
            args a = *good;
            arm();
            if (!spoil(&a, *kind, n))
                break;
            (void)dp_error(DP_ERR_USER, "stale"); /* a constructor may have spoken */
            check_refused(r, *kind, n, r->call(&a));
        }
    arm();
    if ((r->how & NOT_RIGHTLY) == 0 && r->call(good) != DP_OK)
        test_fail(__FILE__, __LINE__, "%s, all is right: \"%s\"", r->fn, dp_last_error());
}

/* A step whose numbers are known. */
static void check_well(const row *r)
{
    float got[ROWS];
    dp_stats stats;
    dp_scope *scope = dp_scope_begin(kit.ctx);
    dp_value value = dp_of(scope, &kit.a), parts, sum;
    if (dp_replicate(kit.ctx, scope, value, NULL, &parts) != DP_OK ||
        dp_reduce_add(kit.ctx, scope, parts, NULL, &sum) != DP_OK ||
        dp_read(kit.ctx, sum.as.t, got, sizeof got) != DP_OK ||
        dp_tensor_stats(kit.ctx, &kit.a, &stats) != DP_OK ||
        dp_run(kit.ctx, NULL, run_nothing, NULL) != DP_OK || dp_barrier(kit.ctx) != DP_OK)
        test_fail(__FILE__, __LINE__, "after %s: \"%s\"", r->fn, dp_last_error());
    for (int i = 0; i < ROWS; i++)
        CHECK_F64(got[i], (i + 1) * kit.devices, 0);
    CHECK_F64(stats.sum_squares, 30, 0);
    CHECK(!dp_failure(kit.ctx, NULL));
    dp_scope_end(scope);
}

static dp_status forward(dp_call *call)
{
    dp_value x = dp_get(call->kwargs, "x");
    call->out = x;
    if (dp_get(call->kwargs, "mode").kind == DP_STRING)
        call->out = dp_dict_make(call->scope, &(dp_pair){"loss", x}, 1);
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    args a = kit.good;
    a.call = call;
    if (kit.inside != NULL)
        sweep_row(kit.inside, &a);
    return DP_OK;
}

static dp_status sweep_in_run(int local_rank, dp_scope *scope, void *user)
{
    args a = kit.good;
    const row *r = user;
    (void)scope;
    a.rank = local_rank;
    if (local_rank > 0)
        return r->call(&a);
    sweep_row(r, &a);
    return DP_OK;
}

static dp_pass *one_pass(dp_scope *scope)
{
    dp_pass *pass = NULL;
    dp_value out;
    CHECK_OK(
        dp_invoke(kit.net, scope, "forward", kit.good.tuple, kit.good.dict, NULL, &out, &pass));
    return pass;
}

static void make_modules(void)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static const dp_param_config params[] = {
        {.name = "x", .ndim = 1, .shape = {ROWS}},
        {.name = "b", .ndim = 1, .shape = {ROWS}, .buffer = true}};
    dp_module_config config = {.name = "x", .methods = methods, .method_count = 2};
    dp_module *child = NULL;
    CHECK_OK(dp_module_create(kit.ctx, &config, &child));
    config.name = "net";
    config.params = params;
    config.param_count = 2;
    config.children = &child;
    config.child_count = 1;
    CHECK_OK(dp_module_create(kit.ctx, &config, &kit.net));
    CHECK_OK(dp_data_parallel(kit.net, NULL, &kit.par));
}

static dp_tensor on_device(int rank, int64_t count)
{
    static const float numbers[64] = {1, 2, 3, 4};
    dp_tensor tensor;
    CHECK_OK(dp_tensor_from(kit.scope, dp_local_device(kit.ctx, rank), numbers, DP_F32, 1, &count,
                            &tensor));
    return tensor;
}

static const dp_reducer_config *reduce_config(void)
{
    static void *grads[TREE_DEVICES];
    static dp_block block = {DP_F32, ROWS, grads};
    static const dp_reducer_config config = {.blocks = &block,
                                             .block_count = 1,
                                             .reduction = DP_SUM_RANKS,
                                             .unused_units = DP_UNUSED_FOUND};
    for (int r = 0; r < kit.devices; r++)
        grads[r] = on_device(r, ROWS).data;
    return &config;
}

static void make_args(void)
{
    static dp_part parts[TREE_DEVICES];
    static dp_value each[TREE_DEVICES];
    static double memory[ROWS] = {1, 1, 1, 1};
    static const dp_config config = {.device_count = 1};
    static const dp_module_config create = {.name = "made"};
    static void *out[1];
    static const void *in[1];
    static dp_kernel_args kernel;
    dp_value x = dp_of(kit.scope, &kit.a);
    for (int r = 0; r < kit.devices; r++) {
        parts[r] = (dp_part){.send = on_device(r, 64).data, .recv = on_device(r, 64).data};
        dp_tensor own = on_device(r, ROWS);
        each[r] = dp_of(kit.scope, &own);
    }
    out[0] = kit.out.data;
    in[0] = kit.a.data;
    kernel = (dp_kernel_args){.kernel = DP_KERNEL_AXPBY,
                              .dtype = DP_F32,
                              .in_dtype = DP_F32,
                              .count = ROWS,
                              .out = out,
                              .in = in,
                              .out_count = 1,
                              .in_count = 1,
                              .alpha = 1};
    kit.good = (args){.ctx = kit.ctx,
                      .scope = kit.scope,
                      .module = kit.net,
                      .wrapper = kit.par,
                      .value = x,
                      .tuple = dp_list_make(kit.scope, DP_TUPLE, &x, 1),
                      .dict = dp_dict_make(kit.scope, &(dp_pair){"x", x}, 1),
                      .list = dp_list_make(kit.scope, DP_LIST, each, (size_t)kit.devices),
                      .number = dp_float(1),
                      .a = &kit.a,
                      .b = &kit.b,
                      .out = &kit.out,
                      .parts = parts,
                      .ndim = 1,
                      .shape = four,
                      .dtype = DP_F32,
                      .count = 1,
                      .name = "forward",
                      .known = "x",
                      .memory = memory,
                      .config = &config,
                      .create = &create,
                      .kernel = &kernel,
                      .reduce = reduce_config(),
                      .outs = &outs};
}

static void make_kit(const dp_config *config)
{
    kit = (__typeof__(kit)){.devices = config->device_count};
    CHECK_OK(dp_open(config, &kit.closed));
    CHECK_OK(dp_open(config, &kit.ctx));
    CHECK_OK(dp_open(config, &kit.other));
    dp_close(kit.closed);
    kit.scope = dp_scope_begin(kit.ctx);
    kit.elsewhere = dp_scope_begin(kit.other);
    kit.a = on_device(0, ROWS);
    kit.b = on_device(0, ROWS);
    kit.out = on_device(0, ROWS);
    make_modules();
    make_args();
    CHECK_OK(dp_reducer_create(kit.ctx, kit.good.reduce, &kit.good.reducer));
    kit.used = one_pass(kit.scope);
    CHECK_OK(dp_backward(kit.used, dp_float(1), NULL));
}

static void sweep(const dp_device_ops *ops, int devices)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    test_allocator counter = {0};
    make_kit(&(dp_config){
        .backends = backends, .device_count = devices, .allocator = test_allocator_of(&counter)});
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        args a = kit.good;
        if ((table[i].how & LAST) == 0)
            a.pass = one_pass(kit.scope);
        kit.inside = &table[i];
        if ((table[i].how & INSIDE) != 0) {
            CHECK_OK(dp_backward(a.pass, dp_float(1), NULL));
        } else if ((table[i].how & IN_RUN) != 0) {
            row own = table[i];
            CHECK_OK(dp_run(kit.ctx, NULL, sweep_in_run, &own));
        } else {
            kit.inside = NULL;
            sweep_row(&table[i], &a);
        }
        if ((table[i].how & LAST) == 0)
            check_well(&table[i]);
    }
    dp_scope_end(kit.elsewhere);
    dp_close(kit.other);
    CHECK_NO_LEAKS(&counter);
}

/* Every call that a context is behind returns the job's failure and writes nothing, but for those
   that only look, or make values. */
TEST(after_the_job_failed)
{
    make_kit(&(dp_config){.device_count = 2});
    args a = kit.good;
    a.pass = one_pass(kit.scope);
    dp_abort(kit.ctx, DP_ERR_REMOTE, "rank 7 is gone");
    kit.failed = true;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const row *r = &table[i];
        if (strpbrk(r->kinds, "cTSsmMpj") == NULL || (r->how & (INSIDE | LAST | NOT_RIGHTLY)) != 0)
            continue;
        arm();
        dp_status status = r->call(&a);
        if ((r->how & GOES_ON) != 0)
            CHECK_OK(status);
        else if (status == DP_OK ||
                 strstr(dp_last_error(), ": the job failed: rank 7 is gone") == NULL ||
                 !begins_with(r->fn))
            test_fail(__FILE__, __LINE__, "%s: %s, \"%s\"", r->fn, dp_status_name(status),
                      dp_last_error());
    }
    dp_scope_end(kit.elsewhere);
    dp_close(kit.other);
    dp_close(kit.ctx);
}

TEST_SLOW(cpu_alone, 60)
{
    sweep(dp_cpu(), 1);
}

TEST_SLOW(cpu_of_two, 60)
{
    sweep(dp_cpu(), 2);
}

TEST_SLOW(cpu_of_three, 60)
{
    sweep(dp_cpu(), 3);
}

TEST_SLOW(toy_of_two, 60)
{
    sweep(toy_device(), 2);
}

TEST_SLOW(lazy_of_three, 60)
{
    sweep(lazy_device(toy_device()), 3);
}

#if defined(TEST_CUDA)
TEST_SLOW(cuda_of_two, 60)
{
    sweep(cuda_device(2), 2);
}
#endif
