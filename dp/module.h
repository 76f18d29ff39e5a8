/* dp/module.h - v0.2.0 - modules: parameters, replicas, passes - MIT licence

   Part of dp.h, which includes it. Trees of modules, what a wrapper keeps for each device, and one
   record of a pass: a method, its call, its backward.

   CONTENTS (search for the tag)
     >>modules   methods, parameters and children, as they are given
     >>kinds     what a wrapper keeps, and what kinds of wrappers there are
     >>slots     parameters as a tree sees them; modules made and destroyed
     >>storage   blocks of parameters and gradients
     >>layout    which parameters lie together
     >>keeping   what a user asks of a module, and does to it; what may prevent that
     >>editing   parameters that are written to, gradients that are zeroed; copies
     >>moving    memory of the user's that gets another address
     >>sharing   edits of parameters that processes share
     >>replicas  the memory of a wrapper's devices
     >>passes    one record: a method, its call, its backward
     >>asking    what a method may ask of its call
*/

#ifndef DP__ROOMS
#error "dp/module.h is a part of dp.h: include dp.h"
#else

/* ==== >>modules ==================================================================================
   Trees of modules. A slot is a parameter or buffer as a tree sees it: a module's own come first,
   then those of one child after another; what a wrapper wraps counts as its last child, under no
   name. Tied slots have one root, and one home in the list that the user sees. Everything of a
   module lies in a scope of its own. */

#define DP__MODULE_LIVE 0x30d01e0bu /* dp_module.magic */
#define DP__NO_SLOT     SIZE_MAX
#define DP__NO_ADDER    0u
#define DP__ONE_PROCESS UINT32_MAX /* whoever does not reduce over ranks */

/* So early loops ask for a child or a parameter: of thousands, none is in a cache. */
enum { DP__MODULES_AHEAD = 8 };

typedef struct dp__param {
    const char *name, *same_as;
    dp_module *owner;
    dp_tensor data;        /* a view of its memory; .data is NULL until there is some */
    void *grad;            /* its gradient's, which is like it */
    struct dp__param *tie; /* the one whose memory it shares, or itself */
    size_t home;           /* a guess, which dp__module_list checks */
    bool frozen, buffer;
    bool foreign, foreign_grad; /* the user's memory */
    /* Of a root's memory: what is known of its gradient since that was zeroed, and of its data. */
    atomic_bool used; /* somebody has asked for the gradient, to add to it */
    bool torn;        /* a backward that was adding to it has failed */
    bool scattered;   /* ranks hold their shares of it */
    bool asked;       /* for writing, in an edit of what processes share */
    bool unreduced;   /* ranks have added to it, each by itself, since it was reduced or zeroed */
    uint32_t adder;   /* who has added to it: a dp__distributed.number, or one of these two */
    uint64_t written; /* dp_ctx.forwards at the last edit of the data */
    /* Hashes of both, from the end of a backward that was checked: see dp/checks.h. */
    bool noted;
    uint64_t noted_data, noted_grad;
    struct dp__sharing *sharing; /* NULL: this process has the data for itself */
} dp__param;

typedef struct dp__child {
    const char *name; /* the module's */
    dp_module *module;
    size_t slot_first, place_first; /* of its slots and modules in those of the tree */
} dp__child;

typedef struct dp__grad_group { /* gradients of a replica, side by side, zeroed together */
    struct dp__grad_group *next;
    unsigned pass; /* in which it was last zeroed */
    dp_tensor flat;
} dp__grad_group;

typedef struct dp__memory { /* what one replica of a tree has of its own */
    /* By slot: where the pointer to its memory is. Slots, modules and replicas that have the same
       memory have the same pointer, so that memory of the user's can move. */
    void ***data, ***grad;
    void **own;    /* by place: replica_create's results */
    bool *touched; /* by slot: backward asked for its gradient; NULL: nobody wants to know */
    dp__grad_group **grad_groups; /* by slot; NULL for the original, which is never zeroed here */
    dp__grad_group *grad_group_list;
    unsigned pass;
    uint64_t edits; /* which parameters were edited as an owner's; see dp_owner_edit */
} dp__memory;

typedef enum dp__sort { DP__PARAMS, DP__GRADS, DP__BUFFERS, DP__SORT_COUNT } dp__sort;

static const char *const dp__sort_names[DP__SORT_COUNT] = {"parameters", "gradients", "buffers"};

typedef struct dp__region { /* one parameter in a layout */
    dp_dtype dtype;
    int32_t local_rank; /* of its device */
    size_t bytes, home;
    char *at;        /* in the original, when it was laid out */
    bool foreign;    /* that is, or was, the user's memory: what lies in a gap is not ours */
    const void *key; /* regions of one range have the same; see dp__param_key */
    size_t range;
    size_t first;  /* where it begins in its range, in elements */
    size_t offset; /* in a replica's block of its dtype, in bytes */
} dp__region;

typedef struct dp__range { /* regions that lie together, in replicas too */
    dp_dtype dtype;
    bool ignored; /* by all that ranks do together */
    size_t first, region_count;
    size_t count; /* elements, those of gaps too */
} dp__range;

typedef struct dp__layout { /* see >>layout */
    dp__sort sort;
    dp__region *regions;
    dp__range *ranges;
    size_t region_count, range_count;
} dp__layout;

typedef struct dp__room_head { /* what all see of a room, before its first page */
    atomic_int users;          /* processes that still have it */
    atomic_uint writes;        /* how often one of them was let write there */
} dp__room_head;

/* Of the heap, for a block that all processes of the machine have there. */
typedef struct dp__heap_room {
    struct dp__heap_room *next;
    dp__room_head *head;
    size_t at, bytes; /* in the shared memory; both are multiples of pages */
} dp__heap_room;

typedef struct dp__once { /* a block of parameters that the processes have once */
    dp__block *block;
    void *spare;         /* pages for the time after that; NULL: not yet */
    size_t bytes, pages; /* of the numbers; and of the pages that they are in */
    dp__room_head *head;
} dp__once;

typedef struct dp__sharing { /* what one wrapper shares with the other processes */
    dp_ctx *ctx;
    dp_module *wrapper;
    dp__heap *heap; /* which has the rooms */
    size_t count;
    dp__once *blocks;
    int edits;     /* of its parameters, that are open; 0: nobody may write */
    unsigned seen; /* dp__room_head.writes of the first block, when an edit last ended */
    bool writes;   /* this process has begun to, since then */
    bool shares;   /* it has written its ranks' shares, or others have */
    const struct dp__cluster *cluster; /* NULL: all processes are on one machine */
} dp__sharing;

typedef struct dp__face dp__face;
typedef struct dp__face_ops dp__face_ops;

struct dp_module {
    uint32_t magic, serial; /* serial tells this one from an earlier one in the same place */
    dp_ctx *ctx;
    dp_scope *scope;
    dp_module *next_idle;
    dp_module *parent;
    size_t wrapper_count; /* wrappers around this one */
    const char *name;
    const dp_method *methods;
    dp__param *params;
    dp__child *children;
    size_t method_count, param_count, child_count; /* the wrapped one is a child here */
    dp__index param_names, child_names;
    dp_module *wraps;
    dp__param **slots;
    const char **names; /* of the slots */
    size_t *homes;      /* of the slots: index into `listed` */
    size_t *next_tied;  /* of the slots: the next one of the same memory, or DP__NO_SLOT */
    size_t *listed;     /* the first slot of each memory */
    size_t slot_count, listed_count, place_count;
    dp__memory memory; /* the original's */
    dp__layout layouts[DP__SORT_COUNT];
    dp_stretch *stretches; /* NULL: nobody has asked yet */
    size_t stretch_count;
    int stretched_for; /* dp_info.recoveries, of the ranks that share them */
    const void *state;
    dp_status (*replica_create)(const dp_replica_info *info, void **own);
    void (*replica_destroy)(void *own);
    void *own, *shared;
    uint64_t version; /* of the numbers in parameters; wrappers compare */
    uint64_t zeroed;  /* how often gradients were */
    uint64_t steps;   /* passes with gradients that were counted: see dp/checks.h */
    uint64_t intact;  /* none of its gradients is torn by the first so many in dp_ctx.torn */
    bool partial;     /* mean_grads: a pass with no_sync has left gradients, to be added to */
    int local_rank;
    bool training, ready, announces_changes, moves, packed, mean_grads;
    dp__face *face;             /* of the library's wrappers that have replicas */
    const dp__face_ops *ops;    /* of a wrapper of the library's, or of none: see >>kinds */
    dp_module *next_over_ranks; /* see dp_ctx */
    dp__sharing *sharing;       /* of a wrapper; NULL: it shares nothing */
    dp_module **separate; /* by child of what it wraps: a wrapper that this one has, or NULL */
    size_t separate_count;
};

/* One that exists, even if its job has failed. */
DP__APART static dp_status dp__check_module_open(const char *fn, const dp_module *module)
{
    DP_TRY(dp__check_pointer(fn, "module", module));
    if (module->magic != DP__MODULE_LIVE)
        return dp_error(DP_ERR_STATE, "%s: the module was destroyed", fn);
    return dp__check_open(fn, module->ctx);
}

DP__APART static dp_status dp__check_module(const char *fn, const dp_module *module)
{
    DP_TRY(dp__check_module_open(fn, module));
    return dp__check_ctx(fn, module->ctx);
}

static dp__param *dp__root(dp__param *param)
{
    while (param->tie != param)
        param = param->tie;
    return param;
}

/* The memory that is listed there, and its first name. */
static dp__param *dp__param_at(const dp_module *module, size_t home)
{
    return dp__root(module->slots[module->listed[home]]);
}

static const char *dp__name_at(const dp_module *module, size_t home)
{
    return module->names[module->listed[home]];
}

static dp_module *dp__top(dp_module *module)
{
    while (module->parent != NULL)
        module = module->parent;
    return module;
}

/* Children but for what it wraps, which is the last one. */
static size_t dp__own_child_count(const dp_module *module)
{
    return module->child_count - (module->wraps != NULL);
}

/* Names are parts of paths. */
static dp_status dp__check_name(const char *fn, const char *what, const char *name)
{
    if (name == NULL || name[0] == '\0')
        return dp_error(DP_ERR_INVALID, "%s: %s has no name", fn, what);
    return DP_OK;
}

static dp_status dp__module_methods(dp_module *module, const dp_module_config *config)
{
    dp_method *methods = dp__array(module->scope, config->method_count, sizeof *methods);
    if (methods == NULL)
        return dp__full("dp_module_create");
    for (size_t i = 0; i < config->method_count; i++) {
        DP_TRY(dp__check_name("dp_module_create", "a method", config->methods[i].name));
        if (config->methods[i].fn == NULL)
            return dp_error(DP_ERR_INVALID, "dp_module_create: method '%s' has no function",
                            config->methods[i].name);
        for (size_t k = 0; k < i; k++)
            if (strcmp(methods[k].name, config->methods[i].name) == 0)
                return dp_error(DP_ERR_INVALID, "dp_module_create: method '%s' is there twice",
                                methods[k].name);
        methods[i].fn = config->methods[i].fn;
        methods[i].name = dp__copy_text(module->scope, config->methods[i].name);
        if (methods[i].name == NULL)
            return dp__full("dp_module_create");
    }
    module->methods = methods;
    module->method_count = config->method_count;
    return DP_OK;
}

DP__COLD static dp_status dp__no_method(dp_status status, const char *fn, const dp_module *module,
                                        const char *name)
{
    dp__names names = {.count = 0};
    for (size_t i = 0; i < module->method_count; i++)
        dp__names_add(&names, module->methods[i].name);
    return dp__no_such(status, &names, "%s: '%s' has no method '%s'", fn, module->name, name);
}

static const dp_method *dp__find_method(const dp_module *module, const char *name)
{
    for (size_t i = 0; i < module->method_count; i++)
        if (strcmp(module->methods[i].name, name) == 0)
            return &module->methods[i];
    return NULL;
}

static dp_status dp__module_param(dp_module *module, const dp_param_config *config, dp__param *out)
{
    int64_t count = 0;
    const dp__device *device = &module->ctx->devices[module->local_rank];
    DP_TRY(dp__check_name("dp_module_create", "a parameter", config->name));
    DP_TRY(dp__check_shape("dp_module_create", config->dtype, config->ndim, config->shape, &count));
    if (config->same_as != NULL && (config->data != NULL || config->grad != NULL))
        return dp_error(DP_ERR_INVALID,
                        "dp_module_create: '%s' has both same_as and memory of its own",
                        config->name);
    if (config->grad != NULL && (config->frozen || config->buffer))
        return dp_error(DP_ERR_INVALID,
                        "dp_module_create: '%s' is frozen, or a buffer, and has a "
                        "gradient",
                        config->name);
    *out = (dp__param){.name = dp__copy_text(module->scope, config->name),
                       .owner = module,
                       .grad = config->grad,
                       .tie = out,
                       .frozen = config->frozen,
                       .buffer = config->buffer,
                       .foreign = config->data != NULL,
                       .foreign_grad = config->grad != NULL};
    out->data =
        dp__tensor_like(config->data, device->id, config->dtype, config->ndim, config->shape);
    if (config->same_as != NULL)
        out->same_as = dp__copy_text(module->scope, config->same_as);
    if (out->name == NULL || (config->same_as != NULL && out->same_as == NULL))
        return dp__full("dp_module_create");
    return DP_OK;
}

static dp_status dp__module_params(dp_module *module, const dp_module_config *config)
{
    module->params = dp__array(module->scope, config->param_count, sizeof *module->params);
    module->param_count = config->param_count;
    if (module->params == NULL || !dp__index_make(module->scope, module->params, sizeof(dp__param),
                                                  config->param_count, &module->param_names))
        return dp__full("dp_module_create");
    for (size_t i = 0; i < config->param_count; i++) {
        DP_TRY(dp__module_param(module, &config->params[i], &module->params[i]));
        if (!dp__index_add(&module->param_names))
            return dp_error(DP_ERR_INVALID, "dp_module_create: parameter '%s' is there twice",
                            module->params[i].name);
    }
    return DP_OK;
}

/* Packed parameters have one dtype, all have gradients, and none has memory that lies elsewhere. */
static dp_status dp__check_packed(const dp_module *module, size_t *out_bytes)
{
    *out_bytes = 0;
    for (size_t i = 0; i < module->param_count; i++) {
        const dp__param *param = &module->params[i];
        if (param->data.dtype != module->params[0].data.dtype || param->frozen || param->buffer ||
            param->same_as != NULL || param->foreign || param->foreign_grad)
            return dp_error(DP_ERR_INVALID,
                            "dp_module_create: '%s' cannot be packed with '%s': packed parameters "
                            "need one dtype and must be trainable, untied and library-owned",
                            param->name, module->params[0].name);
        if (__builtin_add_overflow(*out_bytes, dp__bytes(&param->data), out_bytes) ||
            *out_bytes > INT64_MAX / 2)
            return dp_error(DP_ERR_INVALID, "dp_module_create: the block is larger than can be "
                                            "counted");
    }
    return DP_OK;
}

static dp_status dp__block_zero(dp_scope *scope, const dp__device *device, dp__sort sort,
                                size_t bytes, dp_tensor *out);

/* One block of parameters and one of gradients, the user's or the library's. */
static dp_status dp__module_pack(dp_module *module, const dp_module_config *config)
{
    size_t bytes = 0, offset = 0;
    dp_tensor data = {.data = config->block}, grad = {.data = config->block_grad};
    const dp__device *device = &module->ctx->devices[module->local_rank];
    if (!config->packed && (config->block != NULL || config->block_grad != NULL))
        return dp_error(DP_ERR_INVALID, "dp_module_create: block is given, but packed is not set");
    if (!config->packed)
        return DP_OK;
    DP_TRY(dp__check_packed(module, &bytes));
    if (data.data == NULL)
        DP_TRY(dp__block_zero(module->scope, device, DP__PARAMS, bytes, &data));
    if (grad.data == NULL)
        DP_TRY(dp__block_zero(module->scope, device, DP__GRADS, bytes, &grad));
    for (size_t i = 0; i < module->param_count; i++) {
        dp__param *param = &module->params[i];
        param->data.data = (char *)data.data + offset;
        param->grad = (char *)grad.data + offset;
        param->foreign = config->block != NULL;
        param->foreign_grad = config->block_grad != NULL;
        offset += dp__bytes(&param->data);
    }
    module->packed = true;
    return DP_OK;
}

static dp_status dp__check_free(const dp_module *child)
{
    if (child->parent != NULL)
        return dp_error(DP_ERR_INVALID, "dp_module_create: '%s' is a child of '%s' already",
                        child->name, child->parent->name);
    return DP_OK;
}

static dp_status dp__check_child(const dp_module *module, const dp_module *child, bool wrapped)
{
    DP_TRY(dp__check_module("dp_module_create", child));
    if (child->ctx != module->ctx)
        return dp_error(DP_ERR_INVALID, "dp_module_create: '%s' is of another context",
                        child->name);
    if (!wrapped)
        DP_TRY(dp__check_free(child));
    return DP_OK;
}

/* What a wrapper in `tree` wraps, however many wrappers and trees away, if it is in the tree of
   `top`; NULL: nothing is. */
static const dp_module *dp__wrapped_inside(const dp_module *top, const dp_module *tree)
{
    const dp_module *found = NULL;
    const dp_module *home = tree->wraps != NULL ? dp__top(tree->wraps) : NULL;
    if (home == top)
        return tree->wraps;
    if (home != NULL)
        found = dp__wrapped_inside(top, home);
    for (size_t i = 0; i < dp__own_child_count(tree) && found == NULL; i++)
        found = dp__wrapped_inside(top, tree->children[i].module);
    return found;
}

/* A tree that wraps a part of itself would block itself for ever: neither has memory without the
   other, and neither can be destroyed before the other. Checked after replica_create, which may
   have made wrappers and parents of modules in this tree. */
static dp_status dp__check_wraps(dp_module *module, const dp_module_config *config)
{
    for (size_t i = 0; i < config->child_count; i++)
        DP_TRY(dp__check_free(config->children[i]));
    for (size_t i = 0; i < config->child_count; i++)
        config->children[i]->parent = module;
    const dp_module *inside = dp__wrapped_inside(module, module);
    for (size_t i = 0; i < config->child_count; i++)
        config->children[i]->parent = NULL; /* it may still fail */
    if (inside != NULL)
        return dp_error(DP_ERR_INVALID,
                        "dp_module_create: '%s' would contain both '%s' and a wrapper of it",
                        module->name, inside->name);
    return DP_OK;
}

static dp_status dp__module_children(dp_module *module, const dp_module_config *config)
{
    size_t count = config->child_count + (config->wraps != NULL);
    module->children = dp__array(module->scope, count, sizeof *module->children);
    module->slot_count = module->param_count;
    module->place_count = 1;
    if (module->children == NULL || !dp__index_make(module->scope, module->children,
                                                    sizeof(dp__child), count, &module->child_names))
        return dp__full("dp_module_create");
    for (size_t i = 0; i < count; i++) {
        if (i + DP__MODULES_AHEAD < config->child_count)
            dp__fetch_ahead(config->children[i + DP__MODULES_AHEAD], sizeof(dp_module));
        bool wrapped = i == config->child_count;
        dp_module *child = wrapped ? config->wraps : config->children[i];
        DP_TRY(dp__check_child(module, child, wrapped));
        module->children[i] =
            (dp__child){child->name, child, module->slot_count, module->place_count};
        if (!dp__index_add(&module->child_names))
            return dp_error(DP_ERR_INVALID, "dp_module_create: two children are called '%s'",
                            child->name);
        module->child_count++;
        module->slot_count += child->slot_count;
        module->place_count += child->place_count;
    }
    module->wraps = config->wraps;
    return DP_OK;
}

/* ==== >>kinds ====================================================================================
   What one of the library's wrappers keeps: its devices, and for each a replica of the module's
   memory. A table holds what each kind of wrapper does in its own way.                        */

typedef struct dp__distributed dp__distributed;
typedef struct dp__record dp__record;
typedef struct dp__invocation dp__invocation;

struct dp__face {
    const dp__face_ops *ops;
    dp_ctx *ctx;
    dp_scope *scope;  /* holds all of it */
    dp_module *inner; /* what is wrapped */
    dp_module *runs;  /* what has the methods: `inner`, or what library wrappers there wrap */
    dp_scatter_config how;
    size_t count;     /* devices, each with a replica */
    int *threads;     /* by replica: which thread runs it */
    bool own_threads; /* no two replicas on one thread */
    bool own_devices; /* nor on one device */
    dp__device *output;
    bool mean_of_samples;
    dp__memory *replicas;
    dp__layout layouts[DP__SORT_COUNT];
    dp_tensor *sent_to;   /* room for the replicas of a range */
    unsigned idle_passes; /* the last so many in a row had no rows for some device */
    bool idle_said;
    uint64_t version;       /* of the parameters that the replicas have */
    bool foreign;           /* some are the user's, who does not say when they change */
    dp__distributed *ranks; /* of a face over all ranks, else NULL; see dp/distributed.h */
    const void **keys;      /* by home: see dp__ranks_ignore; NULL: nothing is ignored */
};

/* Tells the kinds of wrappers apart: nothing else knows of kinds. NULL stands for what a module
   without a wrapper does, or as the function says. */
struct dp__face_ops {
    bool runs;                 /* of none: methods are the module's, not those of what it wraps */
    bool output_on_one;        /* of its own devices: output_rank is one of them */
    bool needs_all;            /* nothing runs beside it, on whatever devices */
    bool keeps_buffers;        /* before() makes those of replicas equal */
    bool over_ranks;           /* all ranks have the same passes: their replicas are partners */
    const char *no_wrapper;    /* why there is none around it; NULL: there may be */
    const char *no_prediction; /* why this module by itself has none; NULL: it has */
    const char *no_padding;    /* why its parts are not filled up; NULL: they may be */
    /* May this method run? May dp_train_step run it? NULL: all may. */
    dp_status (*allows)(const dp__face *face, const char *method);
    dp_status (*allows_step)(const dp_module *wrapper);
    dp_status (*cut)(const dp__invocation *invocation, dp__face *face, dp_pass **out);
    /* The outputs of all replicas become one; NULL: they stay where they are, in a list. */
    dp_status (*join)(const dp_pass *pass, dp_value list, dp_value *out);
    /* A replica's part of the gradient that was given; NULL: it is cut as outputs were gathered. */
    dp_status (*out_grad)(const dp_pass *pass, size_t r, dp_value grad, dp_value *out);
    dp_status (*backward)(const char *fn, dp_pass *pass); /* of all replicas, to one gradient */
    /* The gradient of what was cut; NULL: that of each replica's part, gathered. */
    dp_status (*args_grad)(const dp_pass *pass, const dp_value *own, dp_value *grads,
                           dp_value *out);

    dp_reduction (*reduces)(const dp__face *face, size_t slot); /* how over ranks, or 0 */
    /* When the wrapper is made, before its replicas have memory. */
    dp_status (*prepare)(const char *fn, dp__face *face, const void *config);
    dp_status (*lay)(const dp__face *face, dp__layout *layout); /* changes the original's layout */
    /* Before the replicas run a forward, and after it, with how it went. */
    dp_status (*before)(dp_pass *pass, const dp__invocation *invocation);
    dp_status (*after)(dp_pass *pass, const dp__invocation *invocation, dp_status status);
    /* Returns that of a replica in a mean over all ranks; NULL: this process sums its own here. */
    double (*weight)(const dp_pass *pass, size_t r);
    dp_status (*ran_backward)(dp__record *record); /* one replica has */
    uint64_t (*steps)(const dp__face *face); /* so many were made; NULL: the module counts them */
    /* A backward, or a step, begins, with its forward behind it or not; it has ended so. */
    void (*begin)(const dp__face *face, bool has_run);
    dp_status (*end)(const char *fn, const dp__face *face, bool synced, dp_status status);
    /* Before a step: may it be made of these data? NULL: if they are any. After it, instead of
       end(). */
    dp_status (*check_data)(const dp__face *face, dp_value data);
    dp_status (*end_step)(const dp__invocation *invocation, const dp__face *face, dp_value data,
                          dp_status status);
    dp_status (*idle)(const dp__invocation *invocation,
                      const dp__face *face); /* a step without data */
};

/* Returns the table of a face, or of none. */
static const dp__face_ops *dp__ops(const dp__face *face)
{
    static const dp__face_ops none = {.runs = true};
    return face != NULL ? face->ops : &none;
}

/* Which child of a module has a slot; child_count: none, it is the module's own. */
static size_t dp__child_of_slot(const dp_module *module, size_t slot)
{
    size_t child = module->child_count;
    while (child > 0 && slot < module->children[child - 1].slot_first)
        child--;
    return child > 0 ? child - 1 : module->child_count;
}

/* Returns a module's child, or what the wrapper that a pass goes through has in its place. */
static dp_module *dp__child_through(const dp_module *through, const dp_module *module, size_t child)
{
    dp_module *wrapper = NULL;
    if (child < through->separate_count && through->wraps == module)
        wrapper = through->separate[child];
    return wrapper != NULL ? wrapper : module->children[child].module;
}

/* Returns the wrapper in a tree that holds a slot and reduces it over ranks, *out_slot there; NULL:
   none does. */
static dp__face *dp__slot_ranks(const dp_module *module, size_t slot, size_t *out_slot)
{
    for (const dp_module *through = module; module->ops->reduces == NULL;) {
        size_t child = dp__child_of_slot(module, slot);
        if (child == module->child_count)
            return NULL;
        slot -= module->children[child].slot_first;
        const dp_module *next = dp__child_through(through, module, child);
        through = module;
        module = next;
    }
    *out_slot = slot;
    return module->face;
}

/* The wrapper in the module's tree that reduces a gradient, under any of its names; NULL: none
   does. *out_slot is the name's there. */
static dp__face *dp__slot_reducer(const dp_module *module, size_t slot, size_t *out_slot)
{
    dp__face *found = NULL;
    for (; slot != DP__NO_SLOT && found == NULL; slot = module->next_tied[slot]) {
        dp__face *face = dp__slot_ranks(module, slot, out_slot);
        if (face != NULL && face->ops->reduces(face, *out_slot) != 0)
            found = face;
    }
    return found;
}

/* How it does, or 0. */
static dp_reduction dp__slot_reduction(const dp_module *module, size_t slot)
{
    size_t own = 0;
    const dp__face *face = dp__slot_reducer(module, slot, &own);
    return face != NULL ? face->ops->reduces(face, own) : (dp_reduction)0;
}

/* Returns true if other processes have the same pass, and reduce what it gives. */
static bool dp__is_joint(const dp__face *face, bool synced)
{
    return synced && dp__ops(face)->over_ranks && face->ctx->info.process_count > 1;
}

/* ==== >>slots ====================================================================================
   Parameters as a tree sees them: names from the tree's root, ties, the list that a user gets; and
   finally the module itself.                                                                    */

static const char *dp__slot_name(const dp_module *module, const dp__child *child, const char *name)
{
    if (child->module == module->wraps)
        return name;
    return dp_join_names(module->scope, child->module->name, name);
}

static dp_status dp__module_slots(dp_module *module)
{
    module->slots = dp__array(module->scope, module->slot_count, sizeof *module->slots);
    module->names = dp__array(module->scope, module->slot_count, sizeof *module->names);
    module->homes = dp__array(module->scope, module->slot_count, sizeof *module->homes);
    module->next_tied = dp__array(module->scope, module->slot_count, sizeof *module->next_tied);
    module->listed = dp__array(module->scope, module->slot_count, sizeof *module->listed);
    if (module->slots == NULL || module->names == NULL || module->homes == NULL ||
        module->next_tied == NULL || module->listed == NULL)
        return dp__full("dp_module_create");
    for (size_t i = 0; i < module->param_count; i++) {
        module->slots[i] = &module->params[i];
        module->names[i] = module->params[i].name;
    }
    for (size_t c = 0; c < module->child_count; c++) {
        const dp__child *child = &module->children[c];
        for (size_t i = 0; i < child->module->slot_count; i++) {
            module->slots[child->slot_first + i] = child->module->slots[i];
            module->names[child->slot_first + i] =
                dp__slot_name(module, child, child->module->names[i]);
            if (module->names[child->slot_first + i] == NULL)
                return dp__full("dp_module_create");
        }
    }
    return DP_OK;
}

/* The slot of a name, looked for from child to child; among the module's own if `with_own`. */
static bool dp__slot_named(const dp_module *module, const char *name, bool with_own,
                           size_t *out_slot)
{
    size_t at = 0;
    const char *dot = strchr(name, '.');
    const dp__child *child = NULL;
    if (with_own && dp__index_find(&module->param_names, name, strlen(name), out_slot))
        return true;
    if (dot != NULL && dp__index_find(&module->child_names, name, (size_t)(dot - name), &at))
        child = &module->children[at];
    bool found = child != NULL && child->module != module->wraps &&
                 dp__slot_named(child->module, dot + 1, true, out_slot);
    if (!found && module->wraps != NULL) { /* it adds nothing to names */
        child = &module->children[module->child_count - 1];
        found = dp__slot_named(module->wraps, name, true, out_slot);
    }
    if (found)
        *out_slot += child->slot_first;
    return found;
}

/* Tied parameters are one from then on. */
static dp_status dp__check_alike(const char *from_name, const dp__param *from, const char *to_name,
                                 const dp__param *to)
{
    char a[96], b[96];
    if (from->data.dtype == to->data.dtype && dp__same_shape(&from->data, &to->data) &&
        from->frozen == to->frozen && from->buffer == to->buffer &&
        dp__same_device(from->data.device, to->data.device))
        return DP_OK;
    return dp_error(
        DP_ERR_INVALID,
        "dp_module_create: '%s' is %s (%s) on local rank %d, same_as '%s' is %s (%s) on "
        "local rank %d: both must be alike, frozen and buffer too",
        from_name, dp__dtype_names[from->data.dtype], dp__shape_text(&from->data, a, sizeof a),
        (int)from->data.device.index, to_name, dp__dtype_names[to->data.dtype],
        dp__shape_text(&to->data, b, sizeof b), (int)to->data.device.index);
}

/* What a parameter with same_as stands for: a child's parameter of that name, or else itself. */
static dp__param *dp__tied(const dp_module *module, dp__param *own)
{
    size_t slot = 0;
    return dp__slot_named(module, own->name, false, &slot) ? module->slots[slot] : own;
}

/* A module below that is wrapped and has this memory in its tree. Its wrapper has its own lists of
   what shares memory, and may outlive the parameter that is tied to. */
static const dp_module *dp__wrapped_with(const dp_module *module, const dp__param *root)
{
    const dp_module *found = NULL;
    for (size_t i = 0; i < module->child_count && found == NULL; i++) {
        const dp_module *child = module->children[i].module;
        bool has = false;
        for (size_t k = 0; k < child->slot_count && !has; k++)
            has = dp__root(child->slots[k]) == root;
        if (has && (child == module->wraps || child->wrapper_count > 0))
            return child;
        found = has ? dp__wrapped_with(child, root) : NULL;
    }
    return found;
}

static bool dp__wraps_below(const dp_module *module)
{
    bool found = module->wraps != NULL;
    for (size_t i = 0; i < module->child_count && !found; i++)
        found = module->children[i].module->wrapper_count > 0 ||
                dp__wraps_below(module->children[i].module);
    return found;
}

/* The memory of `from`, whose names are those of `own`, is given up for that of `to`: nothing may
   be lost with it. */
static dp_status dp__check_tie(const dp_module *module, bool wraps_below, const dp__param *own,
                               dp__param *from, dp__param *to)
{
    const dp__param *root = dp__root(from);
    const dp_module *wrapped = wraps_below && from != own ? dp__wrapped_with(module, root) : NULL;
    DP_TRY(dp__check_alike(own->name, own, own->same_as, to));
    DP_TRY(dp__check_alike(own->name, from, own->same_as, to));
    if (root == dp__root(to))
        return DP_OK;
    if (root->data.data != NULL || root->grad != NULL)
        return dp_error(
            DP_ERR_STATE,
            "dp_module_create: '%s' already has memory, so it cannot share that of '%s'", own->name,
            own->same_as);
    if (wrapped != NULL)
        return dp_error(DP_ERR_STATE,
                        "dp_module_create: '%s' cannot be tied to '%s' any more: '%s' is wrapped",
                        own->name, own->same_as, wrapped->name);
    return DP_OK;
}

/* Each piece of memory by its first name. */
DP__COLD static dp__names dp__slot_names(const dp_module *module)
{
    dp__names names = {.count = 0};
    for (size_t i = 0; i < module->slot_count; i++)
        dp__names_add(&names, module->names[i]);
    return names;
}

/* Ties are made one by one, since each looks at memory as those before have left it. */
static dp_status dp__tie(const dp_module *module, bool wraps_below, dp__param *own,
                         dp__param **out_root)
{
    size_t slot = 0;
    dp__param *from = dp__tied(module, own);
    if (own->same_as == NULL && from != own)
        return dp_error(DP_ERR_INVALID, "dp_module_create: a child has a parameter '%s' too",
                        own->name);
    if (own->same_as == NULL)
        return DP_OK;
    bool found = dp__slot_named(module, own->same_as, true, &slot);
    dp__param *to = found ? module->slots[slot] : NULL;
    if (!found || to == own || to == from) {
        dp__names names = dp__slot_names(module);
        return dp__no_such(DP_ERR_INVALID, &names,
                           "dp_module_create: same_as of '%s' is '%s', which does not exist",
                           own->name, own->same_as);
    }
    DP_TRY(dp__check_tie(module, wraps_below, own, from, to));
    *out_root = dp__root(from);
    (*out_root)->tie = dp__root(to);
    dp__root(own)->tie = dp__root(to);
    return DP_OK;
}

/* Ties are marks on the children, and have to be undone if one of them cannot be made. */
static dp_status dp__module_tie(dp_module *module)
{
    dp__param **roots = dp__array(module->scope, module->param_count, sizeof *roots);
    dp_status status = roots != NULL ? DP_OK : dp__full("dp_module_create");
    bool wraps_below = dp__wraps_below(module);
    size_t done = 0;
    for (; done < module->param_count && status == DP_OK; done++)
        status = dp__tie(module, wraps_below, &module->params[done], &roots[done]);
    for (; done > 0 && status != DP_OK; done--)
        if (roots[done - 1] != NULL)
            roots[done - 1]->tie = roots[done - 1];
    return status;
}

/* Finds the root, and shortens the way to it for later calls. */
static dp__param *dp__root_ahead(dp__param *param)
{
    for (; param->tie != param; param = param->tie)
        param->tie = param->tie->tie;
    return param;
}

/* The user's list: each piece of memory once, where it comes first. A root's home may have been set
   for another list: it is valid if this list has the root there. */
static void dp__module_list(dp_module *module)
{
    module->listed_count = 0;
    for (size_t i = 0; i < module->slot_count; i++) {
        dp__param *root = dp__root_ahead(module->slots[i]);
        if (root->home >= module->listed_count || dp__param_at(module, root->home) != root) {
            root->home = module->listed_count++;
            module->listed[root->home] = i;
        }
        module->homes[i] = root->home;
    }
    for (size_t home = 0; home < module->listed_count; home++)
        module->listed[home] = DP__NO_SLOT;
    for (size_t i = module->slot_count; i-- > 0;) {
        size_t *first = &module->listed[module->homes[i]];
        module->next_tied[i] = *first;
        *first = i;
    }
}

/* Ties change the lists of children too. */
static void dp__children_list(dp_module *module)
{
    for (size_t i = 0; i < dp__own_child_count(module); i++) {
        dp__children_list(module->children[i].module);
        dp__module_list(module->children[i].module);
    }
}

static bool dp__has_ties(const dp_module *module)
{
    size_t i = 0;
    while (i < module->param_count && module->params[i].same_as == NULL)
        i++;
    return i < module->param_count;
}

/* A replica's own state, which is destroyed with `scope`. */
static dp_status dp__replica_own(dp_module *module, dp_scope *scope, size_t replica,
                                 dp_device device, void **out)
{
    dp_replica_info info = {module->ctx, module, module->state, device, replica, &module->shared};
    *out = NULL;
    if (module->replica_create == NULL)
        return DP_OK;
    dp__deferred *deferred = dp__scope_cut(scope, sizeof *deferred, _Alignof(dp__deferred));
    if (deferred == NULL)
        return dp__full("dp_module_create");
    dp__frame frame = {.what = "replica_create of",
                       .name = module->name,
                       .ctx = module->ctx,
                       .scope = scope,
                       .module = module};
    dp__frame_enter(&frame);
    dp_status status = dp__frame_leave(&frame, module->replica_create(&info, out));
    if (status != DP_OK)
        return dp_error(status, "replica_create of '%s', replica %zu: %s", module->name, replica,
                        dp_last_error());
    if (module->replica_destroy == NULL)
        return DP_OK;
    *deferred = (dp__deferred){scope->deferred, module->replica_destroy, *out};
    scope->deferred = deferred;
    return DP_OK;
}

static dp_status dp__module_fill(dp_module *module, const dp_module_config *config)
{
    const char *name = config->name != NULL ? config->name : "module";
    module->name = dp__copy_text(module->scope, name);
    if (module->name == NULL)
        return dp__full("dp_module_create");
    if (name[0] == '\0' || strchr(name, '.') != NULL)
        return dp_error(DP_ERR_INVALID,
                        "dp_module_create: '%s' is not a name: empty, or with a dot", name);
    DP_TRY(dp__module_methods(module, config));
    DP_TRY(dp__module_params(module, config));
    DP_TRY(dp__module_pack(module, config));
    DP_TRY(dp__module_children(module, config));
    DP_TRY(dp__module_slots(module));
    return dp__replica_own(module, module->scope, 0, module->ctx->devices[module->local_rank].id,
                           &module->own);
}

/* From the idle ones, or new; they stay with the context, so that a destroyed one can be detected.
   Modules are made and destroyed by one thread at a time, so no lock guards the list. */
static dp_module *dp__module_take(dp_ctx *ctx)
{
    dp_module *module = ctx->idle_modules;
    if (module != NULL)
        ctx->idle_modules = module->next_idle;
    if (ctx->idle_modules != NULL) /* the next child's, mostly: of thousands, none is in a cache */
        dp__fetch_ahead(ctx->idle_modules, sizeof *module);
    uint32_t serial = module != NULL ? module->serial + 1 : 0;
    if (module == NULL)
        module = dp__host_alloc(&ctx->host, sizeof *module, 64);
    if (module != NULL)
        *module = (dp_module){.ctx = ctx, .serial = serial};
    return module;
}

static void dp__module_give(dp_module *module)
{
    dp_ctx *ctx = module->ctx;
    module->magic = 0;
    dp__scope_end(module->scope);
    module->next_idle = ctx->idle_modules;
    ctx->idle_modules = module;
}

/* An array and its count: both, or none; and no more than can be counted, in bytes too. */
static dp_status dp__check_array(const char *one, const char *all, const void *array, size_t count)
{
    if ((array == NULL) == (count == 0) && count <= INT_MAX)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "dp_module_create: %s_count is %zu and %s is %s", one, count,
                    all, array != NULL ? "given" : "NULL");
}

static dp_status dp__check_module_config(const dp_ctx *ctx, const dp_module_config *config)
{
    DP_TRY(dp__check_pointer("dp_module_create", "config", config));
    DP_TRY(dp__check_rank("dp_module_create", ctx, "local_rank", config->local_rank));
    DP_TRY(dp__check_array("method", "methods", config->methods, config->method_count));
    DP_TRY(dp__check_array("param", "params", config->params, config->param_count));
    return dp__check_array("child", "children", config->children, config->child_count);
}

/* A scope whose first chunk is as large as this module needs: there may be thousands. */
static dp_scope *dp__module_scope(dp_ctx *ctx, const dp_module_config *config)
{
    size_t bytes = 768 + config->param_count * (sizeof(dp__param) + 128) +
                   config->child_count * (sizeof(dp__child) + 128);
    bool small = config->wraps == NULL && bytes < DP__CHUNK_BYTES;
    dp_scope *scope = dp__scope_open(ctx, NULL);
    if (scope == NULL || scope->home != NULL || !small || dp__scope_chunk(scope, bytes) == DP_OK)
        return scope;
    dp__scope_end(scope);
    return NULL;
}

/* Parents are marks on the children, so they are set last, when nothing can fail any more. */
static dp_status dp__module_make(dp_ctx *ctx, const dp_module_config *config, dp_module **out)
{
    dp_module *module = dp__module_take(ctx);
    if (module == NULL)
        return dp__full("dp_module_create");
    module->scope = dp__module_scope(ctx, config);
    module->local_rank = config->local_rank;
    module->state = config->state;
    module->replica_create = config->replica_create;
    module->replica_destroy = config->replica_destroy;
    module->announces_changes = config->announces_changes;
    module->moves = config->moves;
    module->mean_grads = config->mean_grads;
    module->training = true;
    module->ops = dp__ops(NULL);
    dp_status status = module->scope != NULL ? dp__module_fill(module, config)
                                             : dp__full("dp_module_create");
    if (status == DP_OK)
        status = dp__check_wraps(module, config);
    if (status == DP_OK)
        status = dp__module_tie(module);
    if (status != DP_OK) {
        dp__module_give(module);
        return status;
    }
    for (size_t i = 0; i < config->child_count; i++)
        config->children[i]->parent = module;
    if (module->wraps != NULL)
        module->wraps->wrapper_count++;
    if (dp__has_ties(module))
        dp__children_list(module);
    dp__module_list(module);
    module->magic = DP__MODULE_LIVE;
    *out = module;
    return DP_OK;
}

DP_API dp_status dp_module_create(dp_ctx *ctx, const dp_module_config *config, dp_module **out)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_alone(__func__, ctx));
    DP_TRY(dp__check_module_config(ctx, config));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    return dp__leave(__func__, ctx, dp__module_make(ctx, config, out));
}

/* ==== >>storage ==================================================================================
   Parameters lie in blocks, one for each dtype and device of a tree, their gradients in others in
   the same order: the last parameter first, as backward produces them. Memory is allocated when it
   is first needed, for the whole tree under the topmost module, and never moves.                */

enum {
    DP__PARAM_ALIGN = 64,
    DP__GRAD_GROUP_BYTES = 128 << 10 /* stays in a cache until it is used */
};

static bool dp__is_of_sort(const dp__param *param, dp__sort sort)
{
    switch (sort) {
    case DP__PARAMS:
        return !param->buffer;
    case DP__GRADS:
        return !param->buffer && !param->frozen;
    case DP__BUFFERS:
        return param->buffer;
    case DP__SORT_COUNT:
        break;
    }
    return false;
}

static void **dp__start_of(dp__param *param, dp__sort sort)
{
    return sort == DP__GRADS ? &param->grad : &param->data.data;
}

typedef struct dp__blank { /* a block to be made, all zero */
    dp_scope *scope;
    const dp__device *device;
    dp__sort sort;
    size_t bytes;
    dp_tensor *out;
} dp__blank;

/* Gradients lie where other processes see them, and need no copy to be added; parameters where they
   can come to see them. */
static dp_status dp__blank_make(const dp__blank *blank)
{
    dp_scope *scope = blank->scope;
    dp_ctx *ctx = scope->ctx;
    int64_t count = (int64_t)blank->bytes;
    dp__pool *pool = blank->sort == DP__GRADS ? &ctx->shared_pool : &ctx->page_pool;
    DP_TRY(blank->sort != DP__BUFFERS
               ? dp__shared_make(scope, blank->device, pool, blank->bytes, blank->out)
               : dp__tensor_make(scope, blank->device, DP_U8, 1, &count, blank->out));
    return dp__fill_tensor(ctx, blank->device, blank->out, 0);
}

static void dp__blank_part(int local_rank, void *user)
{
    const dp__blank *blank = user;
    if (local_rank != blank->device->local_rank)
        return;
    dp__slot *slot = &blank->scope->ctx->slots[local_rank];
    slot->status = dp__blank_make(blank);
    if (slot->status != DP_OK)
        memcpy(slot->text, dp__of_thread.text, sizeof slot->text);
}

/* On the thread of its device, if that may be on another node than this one: who writes first
   decides which node's memory it is. */
static dp_status dp__block_zero(dp_scope *scope, const dp__device *device, dp__sort sort,
                                size_t bytes, dp_tensor *out)
{
    dp_ctx *ctx = scope->ctx;
    dp__blank blank = {scope, device, sort, bytes, out};
    if (ctx->info.node_count < 2 || !device->info.host_memory || device->local_rank < 1 ||
        !dp__team_enter(ctx->team))
        return dp__blank_make(&blank);
    const dp__slot *slot = &ctx->slots[device->local_rank];
    dp__team_run(ctx->team, device->local_rank + 1, dp__blank_part, &blank);
    dp__team_exit(ctx->team);
    return slot->status == DP_OK ? DP_OK : dp_error(slot->status, "%s", slot->text);
}

typedef struct dp__settling { /* memory of one sort, device and dtype: a block */
    bool wanted;              /* by some parameter, which may be empty: that has an address too */
    size_t bytes;
    char *at; /* where the next parameter's begins */
} dp__settling;

/* The block in which a parameter is to get memory; NULL: it has some, or is not of this sort. */
static dp__settling *dp__settling_of(const dp_module *top, dp__settling *blocks, dp__param *root,
                                     int sort)
{
    int block = sort * top->ctx->info.local_count + root->data.device.index;
    if (!dp__is_of_sort(root, (dp__sort)sort) || *dp__start_of(root, (dp__sort)sort) != NULL)
        return NULL;
    return &blocks[(size_t)block * DP_DTYPE_COUNT + root->data.dtype];
}

static dp_status dp__settle_count(const dp_module *top, dp__settling *blocks)
{
    for (size_t home = 0; home < top->listed_count; home++) {
        if (home + DP__MODULES_AHEAD < top->listed_count)
            dp__fetch_ahead(top->slots[top->listed[home + DP__MODULES_AHEAD]], sizeof(dp__param));
        dp__param *root = dp__param_at(top, home);
        for (int sort = 0; sort < DP__SORT_COUNT; sort++) {
            dp__settling *block = dp__settling_of(top, blocks, root, sort);
            if (block == NULL)
                continue;
            block->wanted = true;
            block->bytes += dp__align_up(dp__bytes(&root->data), DP__PARAM_ALIGN);
            if (block->bytes > INT64_MAX / 2)
                return dp_error(DP_ERR_NO_MEMORY,
                                "the parameters of '%s' have more bytes than can be "
                                "counted",
                                top->name);
        }
    }
    return DP_OK;
}

static void dp__settle_views(const dp_module *top, dp__settling *blocks)
{
    for (size_t home = top->listed_count; home-- > 0;) {
        dp__param *root = dp__param_at(top, home);
        for (int sort = 0; sort < DP__SORT_COUNT; sort++) {
            dp__settling *block = dp__settling_of(top, blocks, root, sort);
            if (block == NULL)
                continue;
            *dp__start_of(root, (dp__sort)sort) = block->at;
            block->at += dp__align_up(dp__bytes(&root->data), DP__PARAM_ALIGN);
        }
    }
}

static dp_status dp__settle_blocks(const dp_module *top, dp__settling *blocks, size_t count)
{
    dp_tensor made;
    DP_TRY(dp__settle_count(top, blocks));
    for (size_t i = 0; i < count; i++) {
        size_t rank = i / DP_DTYPE_COUNT % (size_t)top->ctx->info.local_count;
        dp__sort sort = (dp__sort)(i / DP_DTYPE_COUNT / (size_t)top->ctx->info.local_count);
        if (!blocks[i].wanted)
            continue;
        DP_TRY(dp__block_zero(top->scope, &top->ctx->devices[rank], sort, blocks[i].bytes, &made));
        blocks[i].at = made.data;
    }
    dp__settle_views(top, blocks);
    return DP_OK;
}

static dp_status dp__module_ready(dp_module *module);

/* A wrapped module outlives its wrapper: its memory belongs to its own tree. */
static dp_status dp__settle_wrapped(dp_module *module)
{
    for (size_t i = 0; i < module->child_count; i++) {
        dp_module *child = module->children[i].module;
        DP_TRY(child == module->wraps ? dp__module_ready(child) : dp__settle_wrapped(child));
    }
    return DP_OK;
}

static dp_status dp__settle(dp_module *top)
{
    dp_scope *temp = NULL;
    size_t count = DP__SORT_COUNT * (size_t)top->ctx->info.local_count * DP_DTYPE_COUNT;
    DP_TRY(dp__settle_wrapped(top));
    DP_TRY(dp__temp_begin(top->ctx, &temp));
    dp__settling *blocks = dp__array(temp, count, sizeof *blocks);
    dp_status status = blocks != NULL
                           ? dp__settle_blocks(top, blocks, count)
                           : dp_error(DP_ERR_NO_MEMORY, "no memory for %zu blocks", count);
    dp__scope_end(temp);
    return status;
}

static dp_status dp__memory_make(dp_scope *scope, const dp_module *module, dp__memory *out)
{
    out->data = dp__array(scope, module->slot_count, sizeof *out->data);
    out->grad = dp__array(scope, module->slot_count, sizeof *out->grad);
    out->own = dp__array(scope, module->place_count, sizeof *out->own);
    if (out->data == NULL || out->grad == NULL || out->own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", module->slot_count);
    return DP_OK;
}

/* The own states of the tree's modules, by place. */
static void dp__own_collect(const dp_module *module, void **own)
{
    own[0] = module->own;
    for (size_t i = 0; i < module->child_count; i++)
        dp__own_collect(module->children[i].module, own + module->children[i].place_first);
}

/* ==== >>layout ===================================================================================
   Where the parameters of a module lie, sort by sort, once they have memory. A range is what lies
   together, wherever memory of the user's moves: a range is zeroed, sent or summed as a whole, with
   the padding that it has. What lies together in the original lies so in every replica.        */

/* Returns a key that differs where parameters may come apart: memory of the user's moves parameter
   by parameter, and the block of a packed module as a whole. */
static const void *dp__param_key(const dp__param *root, bool foreign)
{
    if (!foreign || !root->owner->moves)
        return NULL;
    return root->owner->packed ? (const void *)root->owner : root;
}

/* Whether only padding, or nothing, lies between a region and the one before. */
static bool dp__region_follows(const dp__region *region, const dp__region *before)
{
    bool padded = !region->foreign && !before->foreign;
    const char *end = before->at + before->bytes;
    return region->dtype == before->dtype && region->local_rank == before->local_rank &&
           region->key == before->key &&
           (region->at == end ||
            (padded && region->at > end && region->at < end + DP__PARAM_ALIGN));
}

static int dp__region_order(const void *a, const void *b)
{
    const dp__region *x = a, *y = b;
    if (x->dtype != y->dtype)
        return x->dtype < y->dtype ? -1 : 1;
    if (x->range != y->range)
        return x->range < y->range ? -1 : 1;
    if (x->local_rank != y->local_rank)
        return x->local_rank < y->local_rank ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* Parameters lie in their blocks with the last one first, so they mostly come in order. */
static void dp__regions_sort(const dp__layout *layout)
{
    bool in_order = true;
    for (size_t i = 1; i < layout->region_count && in_order; i++)
        in_order = dp__region_order(&layout->regions[i - 1], &layout->regions[i]) <= 0;
    if (!in_order)
        qsort(layout->regions, layout->region_count, sizeof *layout->regions, dp__region_order);
}

/* A replica's block of a dtype keeps the gaps of the original, so that ranges stay ranges. */
static void dp__region_place(dp__layout *layout, size_t i)
{
    dp__region *own = &layout->regions[i];
    const dp__region *before = i > 0 ? own - 1 : NULL;
    bool follows = before != NULL && dp__region_follows(own, before);
    own->range = follows ? before->range : layout->range_count++;
    dp__range *range = &layout->ranges[own->range];
    if (!follows)
        *range = (dp__range){.dtype = own->dtype, .first = i};
    if (follows)
        own->offset = before->offset + (size_t)(own->at - before->at);
    else if (before != NULL && before->dtype == own->dtype)
        own->offset = dp__align_up(before->offset + before->bytes, DP__PARAM_ALIGN);
    else
        own->offset = 0;
    size_t size = dp__dtype_sizes[own->dtype];
    own->first = (size_t)(own->at - layout->regions[range->first].at) / size;
    range->count = own->first + own->bytes / size;
    range->region_count++;
}

/* The ranges of regions that come in the order of memory, or of larger ranges. Ranges come as their
   parameters are listed: in the same order on all ranks, wherever memory lies. */
static dp_status dp__layout_cut(dp_scope *scope, dp__layout *layout)
{
    dp__region *regions = layout->regions;
    size_t count = layout->region_count, ranges = 0;
    for (size_t i = 0, end = 0; i < count; ranges++) {
        size_t first = regions[i].home;
        for (end = i + 1; end < count && dp__region_follows(&regions[end], &regions[end - 1]);
             end++)
            first = regions[end].home < first ? regions[end].home : first;
        while (i < end)
            regions[i++].range = first;
    }
    dp__regions_sort(layout);
    layout->range_count = 0;
    layout->ranges = dp__array(scope, ranges, sizeof *layout->ranges);
    if (layout->ranges == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", count);
    for (size_t i = 0; i < count; i++)
        dp__region_place(layout, i);
    return DP_OK;
}

static dp_status dp__layout_make(dp_module *module, dp__sort sort)
{
    dp__layout *layout = &module->layouts[sort];
    size_t most = module->listed_count;
    *layout = (dp__layout){sort, .regions = dp__array(module->scope, most, sizeof(dp__region))};
    if (layout->regions == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", most);
    for (size_t home = module->listed_count; home-- > 0;) {
        dp__param *root = dp__param_at(module, home);
        const dp_tensor *view = &root->data;
        bool foreign = sort == DP__GRADS ? root->foreign_grad : root->foreign;
        if (!dp__is_of_sort(root, sort) || dp__count(view) == 0)
            continue;
        layout->regions[layout->region_count++] = (dp__region){.dtype = (dp_dtype)view->dtype,
                                                               .local_rank = view->device.index,
                                                               .bytes = dp__bytes(view),
                                                               .home = home,
                                                               .at = *dp__start_of(root, sort),
                                                               .foreign = foreign,
                                                               .key = dp__param_key(root, foreign)};
    }
    dp__regions_sort(layout);
    return dp__layout_cut(module->scope, layout);
}

/* A range in the memory of one replica. */
static dp_tensor dp__range_in(const dp_module *module, const dp__layout *layout, size_t i,
                              const dp__memory *memory)
{
    const dp__range *range = &layout->ranges[i];
    const dp__region *first = &layout->regions[range->first];
    void **const *by_slot = layout->sort == DP__GRADS ? memory->grad : memory->data;
    return dp__flat(*by_slot[module->listed[first->home]],
                    module->ctx->devices[first->local_rank].id, range->dtype,
                    (int64_t)range->count);
}

/* See that the module's parameters have memory from now on. */
static dp_status dp__module_ready(dp_module *module)
{
    if (module->ready)
        return DP_OK;
    DP_TRY(dp__settle(dp__top(module)));
    DP_TRY(dp__memory_make(module->scope, module, &module->memory));
    for (size_t i = 0; i < module->slot_count; i++) {
        dp__param *root = dp__root(module->slots[i]);
        module->memory.data[i] = &root->data.data;
        module->memory.grad[i] = &root->grad;
    }
    dp__own_collect(module, module->memory.own);
    for (int sort = 0; sort < DP__SORT_COUNT; sort++)
        DP_TRY(dp__layout_make(module, (dp__sort)sort));
    module->ready = true;
    return DP_OK;
}

/* Whose methods run where a module does, and whose memory is laid out: its own, or those of what a
   wrapper of the library's is around, which lists the same parameters. */
static dp_module *dp__runs_of(dp_module *module)
{
    while (!module->ops->runs)
        module = module->wraps;
    return module;
}

/* ==== >>keeping ==================================================================================
   What a user asks of a module, and does to it: each call first finds out who else needs it. */

static bool dp__has_wrapper(const dp_module *module, const dp_module **out)
{
    *out = module;
    if (module->wrapper_count > 0)
        return true;
    for (size_t i = 0; i < dp__own_child_count(module); i++)
        if (dp__has_wrapper(module->children[i].module, out))
            return true;
    return false;
}

/* From now on the whole tree counts as destroyed, since replica_destroy may call anything. */
static void dp__module_mark(dp_module *module)
{
    module->magic = 0;
    for (size_t i = 0; i < module->separate_count; i++)
        if (module->separate[i] != NULL)
            module->separate[i]->magic = 0;
    for (size_t i = 0; i < dp__own_child_count(module); i++)
        dp__module_mark(module->children[i].module);
}

/* ---- what is shared, at its end -------------------------------------------------------------- */

/* Pages with the same numbers, for what it still shares. */
static dp_status dp__sharing_prepare(const char *fn, dp_module *wrapper)
{
    dp__sharing *sharing = wrapper->sharing;
    if (sharing->edits > 0)
        return dp_error(DP_ERR_STATE, "%s: parameters of '%s' are being edited: dp_edit_end first",
                        fn, wrapper->name);
    for (size_t i = 0; i < sharing->count; i++) {
        dp__once *once = &sharing->blocks[i];
        once->spare = dp__os_pages_make(once->pages);
        if (once->spare == NULL)
            return dp_error(DP_ERR_NO_MEMORY,
                            "%s: no memory for %zu bytes of parameters, which '%s' shares", fn,
                            once->bytes, wrapper->name);
        memcpy(once->spare, once->block->data, once->bytes);
    }
    return DP_OK;
}

/* It goes on after all. */
static dp_status dp__sharing_stay(const char *fn, dp_module *wrapper)
{
    (void)fn;
    for (size_t i = 0; i < wrapper->sharing->count; i++) {
        dp__once *once = &wrapper->sharing->blocks[i];
        if (once->spare != NULL)
            dp__os_pages_free(once->spare, once->pages);
        once->spare = NULL;
    }
    return DP_OK;
}

/* Each wrapper that shares, of those that end with a module. Those of dp_separate_distributed do
   not. */
static dp_status dp__each_sharing(const char *fn, dp_module *module,
                                  dp_status (*what)(const char *fn, dp_module *wrapper))
{
    if (module->sharing != NULL)
        DP_TRY(what(fn, module));
    for (size_t i = 0; i < dp__own_child_count(module); i++)
        DP_TRY(dp__each_sharing(fn, module->children[i].module, what));
    return DP_OK;
}

/* The process has its parameters for itself again. Where the job has failed before all shared them
   there are no pages for that, and nobody uses them any more. */
static void dp__sharing_end(dp_module *wrapper)
{
    dp__sharing *sharing = wrapper->sharing;
    const dp_module *inner = wrapper->wraps;
    for (size_t i = 0; i < sharing->count; i++) {
        dp__once *once = &sharing->blocks[i];
        if (once->spare == NULL)
            continue;
        if (dp__os_pages_replace(once->block->data, once->spare, once->pages)) {
            once->block->everybodys = false;
            atomic_fetch_sub(&once->head->users, 1);
        } else {
            dp__os_pages_free(once->spare, once->pages);
            dp_abort(sharing->ctx, DP_ERR_NO_MEMORY, "pages of '%s' cannot be exchanged",
                     wrapper->name);
        }
    }
    for (size_t home = 0; home < inner->listed_count; home++) {
        dp__param *root = dp__param_at(inner, home);
        if (root->sharing == sharing)
            root->sharing = NULL;
    }
    sharing->ctx->world.sharings--;
    wrapper->sharing = NULL;
}

/* Those over ranks are made anew after a failure. */
static void dp__wrapper_list(dp_module *wrapper)
{
    dp_module **at = &wrapper->ctx->over_ranks;
    while (*at != NULL)
        at = &(*at)->next_over_ranks;
    *at = wrapper;
    wrapper->next_over_ranks = NULL;
}

static void dp__wrapper_unlist(const dp_module *module)
{
    dp_module **at = &module->ctx->over_ranks;
    while (*at != NULL && *at != module)
        at = &(*at)->next_over_ranks;
    if (*at != NULL)
        *at = module->next_over_ranks;
}

static void dp__module_give_tree(dp_module *module)
{
    dp__wrapper_unlist(module);
    for (size_t i = 0; i < module->separate_count; i++)
        if (module->separate[i] != NULL)
            dp__module_give_tree(module->separate[i]);
    if (module->wraps != NULL)
        module->wraps->wrapper_count--;
    if (module->sharing != NULL)
        dp__sharing_end(module);
    for (size_t i = 0; i < dp__own_child_count(module); i++)
        dp__module_give_tree(module->children[i].module);
    dp__module_give(module);
}

static void dp__module_end(dp_module *module)
{
    dp__module_mark(module);
    dp__module_give_tree(module);
}

static bool dp__tree_holds(const dp_module *tree, const dp_module *module)
{
    bool found = tree == module;
    for (size_t i = 0; i < tree->child_count && !found; i++)
        found = dp__tree_holds(tree->children[i].module, module);
    return found;
}

/* Whether two trees have a module in common, including what they wrap. */
static bool dp__trees_meet(const dp_module *a, const dp_module *b)
{
    bool found = dp__tree_holds(b, a);
    for (size_t i = 0; i < a->child_count && !found; i++)
        found = dp__trees_meet(a->children[i].module, b);
    return found;
}

/* OK if no function that this thread is in needs anything that the module would take along when it
   is destroyed. What it wraps would stay. */
static dp_status dp__check_module_idle(const char *fn, const dp_module *module)
{
    char text[160];
    for (const dp__frame *frame = dp__of_thread.frames; frame != NULL; frame = frame->outer)
        if (frame->module != NULL && dp__tree_holds(frame->module, module))
            return dp_error(DP_ERR_STATE, "%s: '%s' is in use by %s, which called this", fn,
                            module->name, dp__frame_text(frame, text, sizeof text));
    for (size_t i = 0; i < dp__own_child_count(module); i++)
        DP_TRY(dp__check_module_idle(fn, module->children[i].module));
    return DP_OK;
}

DP_API dp_status dp_module_destroy(dp_module *module)
{
    const dp_module *wrapped = NULL;
    if (module == NULL)
        return DP_OK;
    if (module->magic != DP__MODULE_LIVE)
        return dp_error(DP_ERR_STATE, "%s: the module was destroyed already", __func__);
    DP_TRY(dp__check_open(__func__, module->ctx));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    DP_TRY(dp__check_module_idle(__func__, module));
    if (module->parent != NULL)
        return dp_error(DP_ERR_STATE, "%s: '%s' is a child of '%s' and is destroyed with it",
                        __func__, module->name, module->parent->name);
    if (dp__has_wrapper(module, &wrapped))
        return dp_error(DP_ERR_STATE, "%s: '%s' is wrapped: destroy the wrapper first", __func__,
                        wrapped->name);
    dp_status status = dp__each_sharing(__func__, module, dp__sharing_prepare);
    if (status != DP_OK) {
        (void)dp__each_sharing(__func__, module, dp__sharing_stay);
        return status;
    }
    dp__module_end(module);
    return DP_OK;
}

static bool dp__lives_on(const dp_module *module, int local_rank)
{
    bool lives = module->local_rank == local_rank;
    for (size_t i = 0; i < module->child_count && lives; i++)
        lives = dp__lives_on(module->children[i].module, local_rank);
    return lives;
}

/* While all devices run at the same time, nobody else uses a module that lies on the device of the
   function that asks, with its whole tree, and is not what all are running. */
static dp_status dp__check_unshared(const char *fn, dp_module *module)
{
    DP_TRY(dp__check_module(fn, module));
    if (!dp__is_shared(module->ctx))
        return DP_OK;
    const dp__frame *frame = dp__frame_of(module->ctx, true);
    const dp_module *top = dp__top(module);
    if (frame != NULL && frame->owns_device && dp__lives_on(top, frame->local_rank) &&
        (frame->module == NULL || !dp__trees_meet(top, frame->module)))
        return DP_OK;
    return dp__busy(fn, module->ctx);
}

static void dp__module_train(dp_module *module, bool training)
{
    module->training = training;
    for (size_t i = 0; i < module->child_count; i++)
        dp__module_train(module->children[i].module, training);
}

DP_API dp_status dp_module_train(dp_module *module, bool training)
{
    DP_TRY(dp__check_unshared(__func__, module));
    dp__module_train(module, training);
    return DP_OK;
}

DP_API const char *dp_module_name(const dp_module *module)
{
    return dp__check_module(__func__, module) == DP_OK ? module->name : "";
}

DP_API int dp_module_rank(const dp_module *module)
{
    return dp__check_module(__func__, module) == DP_OK ? module->local_rank : -1;
}

/* Also of a job that has failed: its context is to be closed. */
DP_API dp_ctx *dp_module_ctx(const dp_module *module)
{
    return dp__check_module_open(__func__, module) == DP_OK ? module->ctx : NULL;
}

DP_API dp_module *dp_wrapped(const dp_module *module)
{
    return dp__check_module(__func__, module) == DP_OK ? module->wraps : NULL;
}

DP_API bool dp_is_wrapper(const dp_module *module)
{
    return dp__check_module(__func__, module) == DP_OK && module->wraps != NULL;
}

DP_API dp_module *dp_unwrap(dp_module *module)
{
    if (dp__check_module(__func__, module) != DP_OK)
        return NULL;
    while (module->wraps != NULL)
        module = module->wraps;
    return module;
}

DP_API size_t dp_module_param_count(const dp_module *module)
{
    return dp__check_module(__func__, module) == DP_OK ? module->listed_count : 0;
}

/* Whether it has its memory: one of the two may be the user's. */
static bool dp__param_is_there(const dp_module *module, size_t param)
{
    const dp__param *root = dp__param_at(module, param);
    bool whole = root->data.data != NULL &&
                 (root->grad != NULL || !dp__is_of_sort(root, DP__GRADS));
    return module->ready || whole;
}

static dp_status dp__check_param(const char *fn, dp_module *module, size_t param)
{
    DP_TRY(dp__check_module(fn, module));
    if (param >= module->listed_count)
        return dp_error(DP_ERR_INVALID, "%s: parameter %zu, '%s' has %zu", fn, param, module->name,
                        module->listed_count);
    if (dp__param_is_there(module, param))
        return DP_OK;
    DP_TRY(dp__check_unshared(fn, module));
    return dp__leave(fn, module->ctx, dp__module_ready(module));
}

static dp_reduction dp__slot_reduction(const dp_module *module, size_t slot);

DP_API dp_status dp_module_param(dp_module *module, size_t param, dp_param_info *out)
{
    DP_TRY(dp__check_param(__func__, module, param));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    size_t slot = module->listed[param];
    const dp__param *root = dp__root(module->slots[slot]);
    *out = (dp_param_info){.name = module->names[slot],
                           .frozen = root->frozen,
                           .buffer = root->buffer,
                           .data = root->data,
                           .shared = root->sharing != NULL,
                           .reduction = dp__slot_reduction(module, slot)};
    out->data.read_only = true;
    out->reduced = out->reduction != 0;
    return DP_OK;
}

static dp_status dp__module_find(const char *fn, const dp_module *module, const char *name,
                                 size_t *out_param)
{
    size_t slot = 0;
    if (dp__slot_named(module, name, true, &slot)) {
        *out_param = module->homes[slot];
        return DP_OK;
    }
    dp__names names = dp__slot_names(module);
    return dp__no_such(DP_ERR_INVALID, &names, "%s: '%s' has no parameter '%s'", fn, module->name,
                       name);
}

DP_API dp_status dp_module_find(const dp_module *module, const char *name, size_t *out_param)
{
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_pointer(__func__, "name", name));
    DP_TRY(dp__check_pointer(__func__, "out_param", out_param));
    return dp__module_find(__func__, module, name, out_param);
}

/* ==== >>editing ==================================================================================
   Parameters that are written to, gradients that are zeroed, and what is known of both.         */

/* Whoever holds replicas of a tree compares the sum of its versions. */
static void dp__changed(dp_module *module)
{
    module->version++;
    for (size_t i = 0; i < module->child_count; i++)
        dp__changed(module->children[i].module);
}

/* Forwards that have returned by now were before the edit that is being made. */
static uint64_t dp__edit_begin(dp_ctx *ctx)
{
    unsigned long long forwards = atomic_load_explicit(&ctx->forwards, memory_order_relaxed);
    unsigned long long last = atomic_load_explicit(&ctx->written, memory_order_relaxed);
    while (last < forwards && !atomic_compare_exchange_weak(&ctx->written, &last, forwards))
        ;
    return forwards;
}

/* One parameter only, in all modules of the tree that have it. */
static void dp__param_changed(dp_module *module, size_t param)
{
    dp__param_at(module, param)->written = dp__edit_begin(module->ctx);
    for (size_t slot = module->listed[param]; slot != DP__NO_SLOT; slot = module->next_tied[slot])
        module->slots[slot]->owner->version++;
}

/* Replicas do it at the same time, each in its thread: most find that it is done. */
static void dp__use(dp__param *root)
{
    if (!atomic_load_explicit(&root->used, memory_order_relaxed))
        atomic_store_explicit(&root->used, true, memory_order_relaxed);
}

DP__COLD static dp_status dp__torn_error(dp_module *module, size_t param)
{
    return dp_error(DP_ERR_STATE,
                    "the gradient of '%s' of '%s' is void because a backward failed: call "
                    "dp_zero_grad",
                    dp__name_at(module, param), dp__runs_of(module)->name);
}

/* The original's. */
static dp_status dp__param_grad(const char *fn, dp_module *module, size_t param, dp_tensor *out)
{
    const dp__param *root = dp__param_at(module, param);
    if (root->torn)
        return dp__leave(fn, module->ctx, dp__torn_error(module, param));
    *out = root->data;
    out->data = root->grad;
    if (!dp__is_of_sort(root, DP__GRADS))
        *out = dp__flat(NULL, root->data.device, (dp_dtype)root->data.dtype, 0);
    return DP_OK;
}

/* Once until all have met. */
static void dp__write_count(dp__sharing *sharing)
{
    if (!sharing->writes)
        atomic_fetch_add(&sharing->blocks->head->writes, 1);
    sharing->writes = true;
}

/* What other processes read, too, is written while they wait. */
static dp_status dp__check_edited(const char *fn, const dp_module *module, size_t param)
{
    dp__param *root = dp__param_at(module, param);
    if (root->sharing == NULL)
        return DP_OK;
    const char *name = dp__name_at(module, param);
    if (root->sharing->edits == 0)
        return dp_error(DP_ERR_STATE,
                        "%s: '%s' is shared by the processes of this machine: all of them call "
                        "dp_edit_begin first",
                        fn, name);
    if (root->sharing->shares)
        return dp_error(DP_ERR_STATE,
                        "%s: only shares of '%s' are written in this edit since dp_edit_shares: "
                        "all processes call dp_edit_begin for another one",
                        fn, name);
    dp__write_count(root->sharing);
    root->asked = true;
    return DP_OK;
}

static dp_status dp__param_edit(const char *fn, dp_module *module, size_t param,
                                dp_tensor *out_data, dp_tensor *out_grad)
{
    DP_TRY(dp__check_param(fn, module, param));
    DP_TRY(dp__check_unshared(fn, module));
    DP_TRY(dp__check_pointer(fn, "out_data", out_data));
    dp__param *root = dp__param_at(module, param);
    DP_TRY(dp__check_edited(fn, module, param));
    if (out_grad != NULL) {
        DP_TRY(dp__param_grad(fn, module, param, out_grad));
        dp__use(root);
    }
    *out_data = root->data;
    dp__param_changed(module, param);
    return DP_OK;
}

DP_API dp_status dp_params_edit(dp_module *module, size_t param, dp_tensor *out_data,
                                dp_tensor *out_grad)
{
    return dp__param_edit(__func__, module, param, out_data, out_grad);
}

DP_API dp_status dp_params_write(dp_module *module, size_t param, const void *host, size_t bytes)
{
    DP_TRY(dp__check_param(__func__, module, param));
    DP_TRY(dp__check_unshared(__func__, module));
    const dp_tensor *data = &dp__param_at(module, param)->data;
    if (bytes != dp__bytes(data))
        return dp_error(DP_ERR_INVALID, "%s: '%s' has %zu bytes, not %zu", __func__,
                        dp__name_at(module, param), dp__bytes(data), bytes);
    if (bytes == 0)
        return DP_OK;
    DP_TRY(dp__check_pointer(__func__, "host", host));
    DP_TRY(dp__check_edited(__func__, module, param));
    dp_tensor src = *data;
    src.device = (dp_device){0, 0};
    memcpy(&src.data, &host, sizeof host); /* only read */
    dp__param_changed(module, param);
    dp_status status = dp__copy_tensor(module->ctx, data, &src, NULL);
    if (status == DP_OK && !dp__is_host(&module->ctx->devices[data->device.index]))
        status = dp__sync_all(module->ctx); /* the caller may reuse its memory */
    return dp__leave(__func__, module->ctx, status);
}

DP_API dp_status dp_params_changed(dp_module *module)
{
    DP_TRY(dp__check_unshared(__func__, module));
    dp__changed(module);
    uint64_t forwards = dp__edit_begin(module->ctx);
    for (size_t home = 0; home < module->listed_count; home++)
        dp__param_at(module, home)->written = forwards;
    return DP_OK;
}

static void dp__zeroed(dp_module *module)
{
    module->zeroed++;
    module->partial = false;
    for (size_t i = 0; i < module->child_count; i++)
        dp__zeroed(module->children[i].module);
}

static void dp__grads_forget(dp_module *module)
{
    dp__zeroed(module);
    for (size_t home = 0; home < module->listed_count; home++) {
        dp__param *root = dp__param_at(module, home);
        root->torn = root->scattered = root->unreduced = false;
        root->adder = DP__NO_ADDER;
        atomic_store_explicit(&root->used, false, memory_order_relaxed);
    }
}

static dp_status dp__grads_zero(dp_module *module)
{
    dp_module *runs = dp__runs_of(module);
    const dp__layout *layout = &runs->layouts[DP__GRADS];
    DP_TRY(dp__module_ready(runs));
    dp__grads_forget(module);
    for (size_t i = 0; i < layout->range_count; i++) {
        dp_tensor range = dp__range_in(runs, layout, i, &runs->memory);
        DP_TRY(dp__fill_tensor(module->ctx, &module->ctx->devices[range.device.index], &range, 0));
    }
    return DP_OK;
}

/* Bytes between a region and the one before in its range. */
static size_t dp__padding_before(const dp__layout *layout, size_t i)
{
    const dp__region *region = &layout->regions[i];
    if (i == layout->ranges[region->range].first)
        return 0;
    return (size_t)(region->at - (region - 1)->at) - (region - 1)->bytes;
}

/* Returns true if kernels that step all parameters may zero their gradients as they do. Where
   memory is the user's, two gradients may lie in the same; and padding has to be in the host's
   reach, as kernels leave it alone. */
DP_API bool dp_grads_may_zero(const dp_module *module)
{
    if (dp__check_module(__func__, module) != DP_OK)
        return false;
    const dp_module *runs = dp__runs_of((dp_module *)(uintptr_t)module);
    const dp__layout *layout = &runs->layouts[DP__GRADS];
    bool may = runs->ready;
    for (size_t i = 0; i < layout->region_count && may; i++) {
        const dp__region *region = &layout->regions[i];
        const dp__device *device = &module->ctx->devices[region->local_rank];
        bool alone = !region->foreign || layout->range_count == 1;
        bool reached = dp__is_host(device) || dp__padding_before(layout, i) == 0;
        may = alone && reached && dp__knows_zero_grad(device);
    }
    return may;
}

DP_API dp_status dp_grads_zeroed(dp_module *module)
{
    DP_TRY(dp__check_unshared(__func__, module));
    if (!dp_grads_may_zero(module))
        return dp_error(DP_ERR_UNSUPPORTED, "%s: kernels cannot zero all gradients of '%s'",
                        __func__, module->name);
    const dp__layout *layout = &dp__runs_of(module)->layouts[DP__GRADS];
    dp__grads_forget(module);
    for (size_t i = 0; i < layout->region_count; i++) {
        size_t padding = dp__padding_before(layout, i);
        if (padding > 0)
            memset(layout->regions[i].at - padding, 0, padding);
    }
    return DP_OK;
}

DP_API dp_status dp_zero_grad(dp_module *module)
{
    DP_TRY(dp__check_unshared(__func__, module));
    return dp__leave(__func__, module->ctx, dp__grads_zero(module));
}

/* ---- what is known of gradients -------------------------------------------------------------- */

/* A backward that was adding to a module's gradients has ended with this status. */
static dp_status dp__torn_by(const dp_module *module, dp_status status)
{
    for (size_t home = 0; home < module->listed_count && status != DP_OK; home++)
        dp__param_at(module, home)->torn = true;
    if (status != DP_OK)
        atomic_fetch_add_explicit(&module->ctx->torn, 1, memory_order_relaxed);
    return status;
}

/* Fails if another one has added to a gradient: neither knows what the other has reduced, or on
   which device it is. */
static dp_status dp__check_adder(const dp__param *root, uint32_t adder)
{
    if (root->adder == DP__NO_ADDER || root->adder == adder)
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "%s has added to the gradient of '%s' of '%s': call dp_zero_grad first",
                    root->adder != DP__ONE_PROCESS ? "another wrapper"
                                                   : "a backward without this wrapper, or an edit "
                                                     "with out_grad before it was made,",
                    root->name, root->owner->name);
}

/* A wrapper that reduces is made. Before the first one, passes do not mark what they add to: what
   is there is marked now. */
static void dp__grads_found(const dp_module *module)
{
    for (size_t home = 0; home < module->listed_count; home++) {
        dp__param *root = dp__param_at(module, home);
        if (root->adder == DP__NO_ADDER && atomic_load_explicit(&root->used, memory_order_relaxed))
            root->adder = DP__ONE_PROCESS;
    }
}

/* A pass whose gradients are not reduced is about to add to them, but for those of children that
   are wrapped so. It matters only where there are such wrappers. */
static dp_status dp__grads_claim(const dp_module *module)
{
    bool some = module->ctx->wrappers > 0 && module->ops->reduces == NULL;
    size_t count = some ? module->listed_count : 0, own = 0;
    for (size_t home = 0; home < count; home++)
        if (dp__slot_ranks(module, module->listed[home], &own) == NULL)
            DP_TRY(dp__check_adder(dp__param_at(module, home), DP__ONE_PROCESS));
    for (size_t home = 0; home < count; home++)
        if (dp__slot_ranks(module, module->listed[home], &own) == NULL)
            dp__param_at(module, home)->adder = DP__ONE_PROCESS;
    return DP_OK;
}

/* Nothing can be added to gradients that are torn. They are looked at again only after another
   backward has failed. */
static dp_status dp__check_intact(dp_module *module)
{
    uint64_t torn = atomic_load_explicit(&module->ctx->torn, memory_order_relaxed);
    for (size_t home = 0; home < module->listed_count && module->intact != torn; home++)
        if (dp__param_at(module, home)->torn)
            return dp__torn_error(module, home);
    module->intact = torn;
    return DP_OK;
}

DP__COLD static dp_status dp__unreduced_error(dp_module *module, size_t param)
{
    return dp_error(DP_ERR_STATE,
                    "the gradient of '%s' of '%s' differs from rank to rank, because passes had "
                    "no_sync or bypassed the wrapper: call dp_zero_grad first, or run a pass that "
                    "reduces it",
                    dp__name_at(module, param), dp_unwrap(module)->name);
}

/* Ranks have added to it, each by itself, and a wrapper is there to reduce it. */
static bool dp__is_unreduced(const dp_module *module, size_t slot)
{
    const dp__param *root = dp__root(module->slots[slot]);
    bool alone = root->adder == DP__ONE_PROCESS && module->ctx->info.rank_count > 1;
    return root->unreduced || (alone && dp__slot_reduction(module, slot) != 0);
}

/* Ranks that step by gradients of their own come apart. */
static dp_status dp__check_reduced(dp_module *module)
{
    for (size_t home = 0; home < module->listed_count && module->ctx->wrappers > 0; home++)
        if (dp__is_unreduced(module, module->listed[home]))
            return dp__unreduced_error(module, home);
    return DP_OK;
}

/* Who writes to gradients in memory of his own need not tell. */
DP_API dp_status dp_grads_used(dp_module *module, bool *out_used, size_t count)
{
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_pointer(__func__, "out_used", out_used));
    if (count != module->listed_count)
        return dp_error(DP_ERR_INVALID, "%s: count is %zu, '%s' has %zu parameters", __func__,
                        count, module->name, module->listed_count);
    for (size_t home = 0; home < module->listed_count; home++) {
        dp__param *root = dp__param_at(module, home);
        bool used = root->foreign_grad || atomic_load_explicit(&root->used, memory_order_relaxed);
        out_used[home] = used && dp__is_of_sort(root, DP__GRADS);
    }
    dp_status status = dp__check_intact(module);
    return dp__leave(__func__, module->ctx, status == DP_OK ? dp__check_reduced(module) : status);
}

/* With mean_grads backward writes to gradients that are zero. */
static dp_status dp__grads_begin(dp_module *runs, bool no_sync, bool *out_adds)
{
    *out_adds = runs->partial;
    if (runs->mean_grads && !runs->partial)
        DP_TRY(dp__grads_zero(runs));
    DP_TRY(dp__check_intact(runs));
    runs->partial = runs->mean_grads && no_sync;
    return DP_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static dp_status dp__copy_config(const dp_module *module, int local_rank, dp_scope *temp,
                                 dp_module **children, dp_module **out)
{
    dp_param_config *params = dp__array(temp, module->param_count, sizeof *params);
    if (params == NULL)
        return dp__full("dp_module_copy");
    for (size_t i = 0; i < module->param_count; i++) {
        const dp__param *from = &module->params[i];
        params[i] = (dp_param_config){.name = from->name,
                                      .dtype = (dp_dtype)from->data.dtype,
                                      .ndim = from->data.ndim,
                                      .frozen = from->frozen,
                                      .buffer = from->buffer,
                                      .same_as = from->same_as};
        memcpy(params[i].shape, from->data.shape, sizeof params[i].shape);
    }
    dp_module_config config = {.name = module->name,
                               .methods = module->methods,
                               .method_count = module->method_count,
                               .params = params,
                               .param_count = module->param_count,
                               .children = children,
                               .child_count = module->child_count,
                               .state = module->state,
                               .replica_create = module->replica_create,
                               .replica_destroy = module->replica_destroy,
                               .local_rank = local_rank,
                               .packed = module->packed,
                               .mean_grads = module->mean_grads};
    DP_TRY(dp__module_make(module->ctx, &config, out));
    (*out)->training = module->training;
    return DP_OK;
}

/* A tree like this one, with all numbers zero. */
static dp_status dp__copy_tree(const dp_module *module, int local_rank, dp_scope *temp,
                               dp_module **out)
{
    dp_module **children = dp__array(temp, module->child_count, sizeof *children);
    dp_status status = children != NULL ? DP_OK : dp__full("dp_module_copy");
    if (module->wraps != NULL)
        return dp_error(DP_ERR_UNSUPPORTED, "'%s' is a wrapper: copy what it wraps, and wrap that",
                        module->name);
    for (size_t i = 0; i < module->child_count && status == DP_OK; i++)
        status = dp__copy_tree(module->children[i].module, local_rank, temp, &children[i]);
    if (status == DP_OK)
        status = dp__copy_config(module, local_rank, temp, children, out);
    for (size_t i = 0; children != NULL && i < module->child_count && status != DP_OK; i++)
        if (children[i] != NULL)
            dp__module_end(children[i]);
    return status;
}

static dp_status dp__copy_numbers(dp_module *from, dp_module *to)
{
    DP_TRY(dp__module_ready(from));
    DP_TRY(dp__module_ready(to));
    for (size_t i = 0; i < from->listed_count; i++)
        DP_TRY(dp__copy_tensor(from->ctx, &dp__param_at(to, i)->data, &dp__param_at(from, i)->data,
                               NULL));
    return DP_OK;
}

DP_API dp_status dp_module_copy(dp_module *module, int local_rank, dp_module **out)
{
    dp_scope *temp = NULL;
    dp_module *copy = NULL;
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    DP_TRY(dp__check_rank(__func__, module->ctx, "local_rank", local_rank));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_status status = dp__temp_begin(module->ctx, &temp);
    if (status == DP_OK)
        status = dp__copy_tree(module, local_rank, temp, &copy);
    status = dp__temp_end(temp, NULL, status);
    if (status == DP_OK)
        status = dp__copy_numbers(module, copy);
    if (status == DP_OK)
        *out = copy;
    else if (copy != NULL)
        dp__module_end(copy);
    return dp__leave(__func__, module->ctx, status);
}

/* ==== >>moving =================================================================================
   Memory of the user's gets another address. A parameter's root has the only pointers to it; a
   reducer is told of the gradient's when its next pass begins.                                  */

/* Fails if a function that this thread is in may have a pointer to the parameter. */
static dp_status dp__check_param_idle(const char *fn, const dp__param *root)
{
    char text[160];
    for (const dp__frame *frame = dp__of_thread.frames; frame != NULL; frame = frame->outer) {
        const dp_module *module = frame->module;
        for (size_t i = 0; module != NULL && i < module->slot_count; i++)
            if (dp__root(module->slots[i]) == root)
                return dp_error(DP_ERR_STATE, "%s: '%s' of '%s' is in use by %s, which called this",
                                fn, root->name, root->owner->name,
                                dp__frame_text(frame, text, sizeof text));
    }
    return DP_OK;
}

/* Checks whether the numbers of a parameter, or its gradient, may lie at `to`; NULL: they stay. */
static dp_status dp__check_move(const char *fn, const dp__param *root, dp__sort sort,
                                const void *to)
{
    bool grad = sort == DP__GRADS, foreign = grad ? root->foreign_grad : root->foreign;
    const char *what = grad ? "grad" : "data";
    if (to == NULL)
        return DP_OK;
    if (grad && !dp__is_of_sort(root, DP__GRADS))
        return dp_error(DP_ERR_INVALID, "%s: '%s' of '%s' is frozen, or a buffer: it has no grad",
                        fn, root->name, root->owner->name);
    if (!foreign)
        return dp_error(DP_ERR_STATE,
                        "%s: %s of '%s' of '%s' is memory of the library's, which does not move",
                        fn, what, root->name, root->owner->name);
    return dp__check_owned(fn, what, &root->owner->ctx->devices[root->data.device.index], to);
}

static dp_status dp__check_moves(const char *fn, const dp__param *root, const void *data,
                                 const void *grad)
{
    if (data == NULL && grad == NULL)
        return dp_error(DP_ERR_INVALID, "%s: both addresses are NULL", fn);
    DP_TRY(dp__check_param_idle(fn, root));
    if (!root->owner->moves)
        return dp_error(DP_ERR_STATE, "%s: '%s' was made to stay: dp_module_config.moves is false",
                        fn, root->owner->name);
    DP_TRY(dp__check_move(fn, root, DP__PARAMS, data));
    return dp__check_move(fn, root, DP__GRADS, grad);
}

/* Sets the pointers, which are all that there are. A new place of the numbers is an edit. */
static void dp__param_move(dp_module *module, size_t param, void *data, void *grad)
{
    dp__param *root = dp__param_at(module, param);
    if (data != NULL && data != root->data.data) {
        root->data.data = data;
        dp__param_changed(module, param);
    }
    root->grad = grad != NULL ? grad : root->grad;
}

DP_API dp_status dp_params_move(dp_module *module, size_t param, void *data, void *grad)
{
    DP_TRY(dp__check_param(__func__, module, param));
    DP_TRY(dp__check_unshared(__func__, module));
    const dp__param *root = dp__param_at(module, param);
    if (root->owner->packed)
        return dp_error(DP_ERR_STATE, "%s: '%s' lies in the block of '%s': dp_params_move_block",
                        __func__, root->name, root->owner->name);
    DP_TRY(dp__check_moves(__func__, root, data, grad));
    dp__param_move(module, param, data, grad);
    return DP_OK;
}

DP_API dp_status dp_params_move_block(dp_module *module, void *block, void *block_grad)
{
    size_t offset = 0;
    DP_TRY(dp__check_unshared(__func__, module));
    if (!module->packed || module->param_count == 0)
        return dp_error(DP_ERR_INVALID, "%s: the parameters of '%s' are not packed", __func__,
                        module->name);
    DP_TRY(dp__check_moves(__func__, &module->params[0], block, block_grad));
    for (size_t i = 0; i < module->param_count; i++) {
        dp__param_move(module, module->homes[i], block != NULL ? (char *)block + offset : NULL,
                       block_grad != NULL ? (char *)block_grad + offset : NULL);
        offset += dp__bytes(&module->params[i].data);
    }
    return DP_OK;
}

/* ==== >>sharing ================================================================================
   Edits of parameters that processes share. When all have come to begin one, none is in a pass;
   when all have come to its end, all have written: see >>edits of dp/distributed.h.             */

static bool dp__shares(const dp_module *module)
{
    bool shares = false;
    for (size_t i = 0; module->ctx->world.sharings > 0 && i < module->listed_count && !shares; i++)
        shares = dp__param_at(module, i)->sharing != NULL;
    return shares;
}

/* Each parameter counts. */
static void dp__edits_count(const dp_module *module, int more)
{
    for (size_t i = 0; i < module->listed_count; i++) {
        dp__sharing *sharing = dp__param_at(module, i)->sharing;
        if (sharing == NULL)
            continue;
        sharing->edits += more;
        module->ctx->world.edits += more;
    }
}

static bool dp__is_edited(const dp_module *module)
{
    bool edited = false;
    for (size_t i = 0; module->ctx->world.edits > 0 && i < module->listed_count && !edited; i++) {
        const dp__sharing *sharing = dp__param_at(module, i)->sharing;
        edited = sharing != NULL && sharing->edits > 0;
    }
    return edited;
}

/* Methods would read what other processes may write just now. */
static dp_status dp__check_unedited(const char *fn, const dp_module *module)
{
    if (!dp__is_edited(module))
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "%s: parameters of '%s' are being edited by the processes that share them: "
                    "dp_edit_end first",
                    fn, module->name);
}

static unsigned dp__writes_of(const dp__sharing *sharing)
{
    return atomic_load(&sharing->blocks->head->writes);
}

/* ==== >>replicas =================================================================================
   Parameters that a device can see are not copied. Others are, range by range.                  */

/* Whether ranks leave alone what is listed there. */
static bool dp__ignores(const dp__face *face, size_t home)
{
    return face->keys != NULL && face->keys[home] == NULL;
}

static dp__device *dp__replica_device(const dp__face *face, size_t r)
{
    return &face->ctx->devices[dp__rank_at(&face->how, r)];
}

/* The first replica whose memory replica `r` can use as it is: `r` has its parameters. */
static size_t dp__replica_home(const dp__face *face, size_t r)
{
    size_t home = 0;
    while (!dp__reaches(dp__replica_device(face, r), dp__replica_device(face, home)))
        home++;
    return home;
}

/* Returns true if replica `r` has the parameters of one before it, and none of its own. */
static bool dp__replica_sees(const dp__face *face, size_t r)
{
    return dp__replica_home(face, r) != r;
}

/* Set the pointer to the memory of a region in one replica, by slot. */
static void dp__replica_assign(const dp__face *face, dp__sort sort, size_t r,
                               const dp__region *region, void **at)
{
    const dp_module *inner = face->inner;
    void ***by_slot = sort == DP__GRADS ? face->replicas[r].grad : face->replicas[r].data;
    for (size_t slot = inner->listed[region->home]; slot != DP__NO_SLOT;
         slot = inner->next_tied[slot])
        by_slot[slot] = at;
}

/* Gradients side by side form groups of at most DP__GRAD_GROUP_BYTES, or of one gradient. */
static dp_status dp__replica_grad_groups(const dp__face *face, size_t r, const dp__region *regions,
                                         size_t count, char *block)
{
    const dp_module *inner = face->inner;
    dp__memory *memory = &face->replicas[r];
    dp_device device = dp__replica_device(face, r)->id;
    size_t begin = 0, end = 0, size = dp__dtype_sizes[regions[0].dtype];
    for (size_t i = 0; i < count; i++) {
        end = regions[i].offset + regions[i].bytes;
        if (i == 0 || end - begin > DP__GRAD_GROUP_BYTES) {
            dp__grad_group *group =
                dp__scope_cut(face->scope, sizeof *group, 64); /* of one thread */
            if (group == NULL)
                return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu gradients", count);
            *group = (dp__grad_group){.next = memory->grad_group_list};
            memory->grad_group_list = group;
            begin = regions[i].offset;
        }
        memory->grad_group_list->flat =
            dp__flat(block + begin, device, regions[0].dtype, (int64_t)((end - begin) / size));
        size_t slot = inner->listed[regions[i].home];
        for (; slot != DP__NO_SLOT; slot = inner->next_tied[slot])
            memory->grad_groups[slot] = memory->grad_group_list;
    }
    return DP_OK;
}

/* A replica's memory for regions of one dtype. */
static dp_status dp__replica_block(const dp__face *face, dp__sort sort, size_t r,
                                   const dp__region *regions, size_t count)
{
    const dp__device *device = dp__replica_device(face, r);
    size_t bytes = regions[count - 1].offset + regions[count - 1].bytes;
    dp_tensor block;
    if (sort == DP__PARAMS && dp__replica_sees(face, r)) {
        void **const *seen = face->replicas[dp__replica_home(face, r)].data;
        for (size_t i = 0; i < count; i++)
            dp__replica_assign(face, sort, r, &regions[i],
                               seen[face->inner->listed[regions[i].home]]);
        return DP_OK;
    }
    void **own = dp__array(face->scope, count, sizeof *own);
    if (own == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", count);
    DP_TRY(dp__block_zero(face->scope, device, sort, bytes, &block));
    for (size_t i = 0; i < count; i++) {
        own[i] = (char *)block.data + regions[i].offset;
        dp__replica_assign(face, sort, r, &regions[i], &own[i]);
    }
    return sort == DP__GRADS ? dp__replica_grad_groups(face, r, regions, count, block.data) : DP_OK;
}

/* The layout of one sort, and the replicas' memory for it. */
static dp_status dp__lay(dp__face *face, dp__sort sort)
{
    dp__layout *layout = &face->layouts[sort];
    *layout = face->inner->layouts[sort];
    if (face->ops->lay != NULL)
        DP_TRY(face->ops->lay(face, layout));
    for (size_t first = 0, last = 0; first < layout->region_count; first = last) {
        const dp__region *regions = &layout->regions[first];
        while (last < layout->region_count && layout->regions[last].dtype == regions->dtype)
            last++;
        for (size_t r = 1; r < face->count; r++)
            DP_TRY(dp__replica_block(face, sort, r, regions, last - first));
    }
    return DP_OK;
}

/* The own states of modules, one child after another, in the order of the tree. */
static dp_status dp__replica_owns(dp__face *face, dp_module *module, size_t r, void **own)
{
    DP_TRY(dp__replica_own(module, face->scope, r, dp__replica_device(face, r)->id, own));
    for (size_t i = 0; i < module->child_count; i++)
        DP_TRY(dp__replica_owns(face, module->children[i].module, r,
                                own + module->children[i].place_first));
    return DP_OK;
}

/* What has no elements gets no memory in a replica: its address is the original's there too. */
static void dp__replica_empties(const dp_module *inner, dp__memory *memory)
{
    for (size_t slot = 0; slot < inner->slot_count; slot++) {
        if (dp__count(&dp__root(inner->slots[slot])->data) > 0)
            continue;
        memory->data[slot] = inner->memory.data[slot];
        memory->grad[slot] = inner->memory.grad[slot];
    }
}

static dp_status dp__replicas_make(dp__face *face)
{
    DP_TRY(dp__module_ready(face->inner));
    face->replicas = dp__array(face->scope, face->count, sizeof *face->replicas);
    face->sent_to = dp__array(face->scope, face->count, sizeof *face->sent_to);
    if (face->replicas == NULL || face->sent_to == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", face->count);
    face->replicas[0] = face->inner->memory;
    for (size_t r = 1; r < face->count; r++) {
        dp__memory *memory = &face->replicas[r];
        DP_TRY(dp__memory_make(face->scope, face->inner, memory));
        dp__replica_empties(face->inner, memory);
        memory->grad_groups =
            dp__array(face->scope, face->inner->slot_count, sizeof(dp__grad_group *));
        if (memory->grad_groups == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", face->count);
        DP_TRY(dp__replica_owns(face, face->inner, r, memory->own));
    }
    for (int sort = 0; sort < DP__SORT_COUNT; sort++)
        DP_TRY(dp__lay(face, (dp__sort)sort));
    return DP_OK;
}

static dp_tensor dp__range_of(const dp__face *face, dp__sort sort, size_t i, size_t r)
{
    dp_tensor range = dp__range_in(face->inner, &face->layouts[sort], i, &face->replicas[r]);
    range.device = dp__replica_device(face, r)->id;
    return range;
}

/* Returns true if no replica before `r` has this range in the same memory. */
static bool dp__range_is_own(const dp__face *face, dp__sort sort, size_t i, size_t r)
{
    size_t home = dp__replica_home(face, r);
    return home == r ||
           dp__range_of(face, sort, i, home).data != dp__range_of(face, sort, i, r).data;
}

/* What the original has goes to the first `count` replicas that have memory of their own; gradients
   that ranks leave alone do not. */
static dp_status dp__replicas_send(const dp__face *face, dp__sort sort, size_t count)
{
    for (size_t i = 0; i < face->layouts[sort].range_count; i++) {
        dp_tensor from = dp__range_of(face, sort, i, 0);
        bool stays = face->layouts[sort].ranges[i].ignored && sort == DP__GRADS;
        size_t apart = 0;
        for (size_t r = 1; r < count && !stays; r++)
            if (dp__range_is_own(face, sort, i, r))
                face->sent_to[apart++] = dp__range_of(face, sort, i, r);
        DP_TRY(dp__copy_to_all(face->ctx, &from, face->sent_to, apart));
    }
    return DP_OK;
}

static uint64_t dp__version(const dp_module *module)
{
    uint64_t sum = module->version;
    for (size_t i = 0; i < module->child_count; i++)
        sum += dp__version(module->children[i].module);
    return sum;
}

/* Whether a replica with parameters of its own may have other numbers than the original. It cannot
   if nobody has written to either, or if each owner's were edited alike. */
static bool dp__replicas_differ(const dp__face *face)
{
    bool apart = false, alike = face->version == dp__version(face->inner) + 1; /* 0: never */
    for (size_t r = 1; r < face->count; r++) {
        bool own = !dp__replica_sees(face, r);
        apart = apart || own;
        alike = alike && (!own || face->replicas[r].edits == face->replicas[0].edits);
    }
    return apart && (face->foreign || !alike);
}

/* Before a forward: parameters if somebody may have written to them, and buffers, unless the face
   handles its own. Parameters go to all replicas, not only to the `count` of this pass: one version
   stands for all. */
static dp_status dp__replicas_update(dp__face *face, size_t count)
{
    if (dp__replicas_differ(face)) {
        DP_TRY(dp__replicas_send(face, DP__PARAMS, face->count));
        face->version = dp__version(face->inner) + 1;
        for (size_t r = 0; r < face->count; r++)
            face->replicas[r].edits = 0;
    }
    return face->ops->keeps_buffers ? DP_OK : dp__replicas_send(face, DP__BUFFERS, count);
}

/* Replicas that see another one's parameters work on streams of their own: their work comes after
   what was done to the parameters before, and before what is done to them later. */
static dp_status dp__replicas_order(const dp__face *face, size_t count, bool before)
{
    for (size_t r = 1; r < count; r++) {
        const dp__device *device = dp__replica_device(face, r);
        const dp__device *home = dp__replica_device(face, dp__replica_home(face, r));
        if (home != device && !dp__is_host(home))
            DP_TRY(before ? dp__order_after(home, device->stream)
                          : dp__order_after(device, home->stream));
    }
    return DP_OK;
}

/* After a backward: original += replica 1 + replica 2 + ..., in one pass over each range. */
static dp_status dp__replicas_reduce(const dp__face *face, dp_scope *temp, size_t count)
{
    dp_tensor *views = dp__array(temp, count, sizeof *views);
    const dp_tensor **parts = dp__array(temp, count, sizeof *parts);
    dp__device *first = dp__replica_device(face, 0);
    if (views == NULL || parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", count);
    for (size_t i = 0; i < face->layouts[DP__GRADS].range_count; i++) {
        for (size_t r = 0; r < count; r++) {
            views[r] = dp__range_of(face, DP__GRADS, i, r);
            parts[r] = &views[r];
        }
        DP_TRY(dp__add_up(face->ctx, temp, parts, count, first, &views[0]));
    }
    return DP_OK;
}

/* ==== >>passes ===================================================================================
   A pass is one forward and its backward: a record for each replica, in the scope of the caller.
   This section has what a single record does; >>parallel drives several of them.                */

#define DP__PASS_LIVE 0x9a550ba5u /* dp__pass_head.magic */

struct dp__record { /* one replica's part of a pass */
    dp_call call;
    dp_pass *pass;
    struct dp__record *outer; /* the one whose method asked for this one; NULL: the user asked */
    const dp__memory *memory;
    size_t slot_first, place; /* of call.module, in the memory's tree */
    dp_value losses;          /* dp_train_step: a dict of what the forward returned */
    bool in_backward;
    bool absent;         /* its rank has no rows, and reports no gradient to the other ranks */
    bool leaves_nothing; /* nor does it change anything: see dp__record_leave_nothing */
    bool left_behind;    /* it failed because another one did */
    dp_status status;
    const char *text; /* the sentence, if it failed */
    uint64_t done_ns; /* when, where it is watched who comes last */
};

struct dp_pass {
    dp__pass_head head;
    uint32_t serial; /* the module's */
    dp_ctx *ctx;
    dp_module *module;                  /* that was invoked */
    dp_module *runs;                    /* whose methods run: the module, or what it wraps */
    const dp_method *method, *backward; /* the latter NULL when there is none */
    const char *mode;                   /* the request's */
    dp_scope *scope;
    const dp__face *face; /* NULL: the module runs where it is, in one record */
    bool keeps;           /* outputs are a list, not gathered */
    bool alone;           /* a wrapper drives one device: nothing is gathered, nothing summed */
    bool no_sync;         /* as it was asked for, of the children's passes too */
    bool adds;            /* mean_grads: its backward leaves in place what an earlier one gave */
    bool synced;          /* of a face of all ranks: its gradients are reduced */
    bool checked;         /* its numbers are looked at: see dp/checks.h */
    bool scaled;          /* its gradients are those of a loss that was made larger */
    uint64_t step;        /* which one it is, from 1, where steps are checked */
    struct dp__replay *replay;  /* what this one is made for; NULL: for the user */
    uint64_t number;            /* among the context's forwards that have returned */
    uint64_t forward_ns;        /* and so long its forward took; while that runs: since when */
    uint64_t forward_waited_ns; /* for others in it; while it runs: before it */
    bool used;                  /* by a backward */
    double factor;              /* mean_grads: multiplies the gradients, since backward does not */
    size_t count;
    dp__record *records;
    int64_t takers;    /* over ranks: see dp__meet; 0: not known yet */
    int64_t *rows;     /* of each replica's part; NULL: nothing was cut */
    int64_t part_rows; /* that each part was filled up to; 0: none was */
    dp_value args, kwargs;
};

struct dp__invocation { /* what dp_invoke was asked */
    const char *fn;
    dp_module *module;
    const char *method;
    dp_scope *scope;
    dp_value args, kwargs;
    dp_pass_config config;
    bool wants_pass;
    bool keeps;       /* outputs stay */
    const char *mode; /* of a step, whose data is preprocessed; NULL: this is none */
    dp__record *outer;
    const dp__child *child; /* of outer's module */
};

static const dp_value dp__not_set = {.kind = DP_ERROR, .status = DP_ERR_USER};

static dp_status dp__record_call(dp__record *record, const dp_method *method)
{
    dp_call *call = &record->call;
    const dp_pass *pass = record->pass;
    dp__frame frame = {.what = "method",
                       .name = call->module->name,
                       .method = method->name,
                       .ctx = pass->ctx,
                       .scope = call->scope,
                       .module = pass->module,
                       .call = &record->call,
                       .local_rank = call->local_rank,
                       .together = pass->count > 1,
                       .owns_device = pass->count > 1 && pass->face->own_devices};
    dp__frame_enter(&frame);
    return dp__frame_leave(&frame, method->fn(call));
}

static dp_status dp__record_forward(dp__record *record, const dp_method *method)
{
    dp_call *call = &record->call;
    call->out = dp__not_set;
    call->method = method->name;
    dp_status status = dp__record_call(record, method);
    if (status == DP_OK && call->out.kind == DP_ERROR && call->out.as.s == NULL)
        status = dp_error(DP_ERR_USER, "it returned without setting call->out (dp_none() if there "
                                       "is nothing to return)");
    else if (status == DP_OK)
        status = dp__check_value("call->out", "value", call->out);
    if (status == DP_OK && (!(call->weight >= 0) || !isfinite(call->weight)))
        status = dp_error(DP_ERR_INVALID, "call->weight is %g", call->weight);
    if (status != DP_OK)
        return dp_error(status, "%s.%s: %s", call->module->name, method->name, dp_last_error());
    return DP_OK;
}

static dp_status dp__record_backward(dp__record *record)
{
    dp_call *call = &record->call;
    call->args_grad = call->kwargs_grad = dp_none();
    record->in_backward = true;
    dp_status status = dp__record_call(record, record->pass->backward);
    record->in_backward = false;
    if (status == DP_OK)
        status = dp__check_value("call->args_grad", "value", call->args_grad);
    if (status == DP_OK)
        status = dp__check_value("call->kwargs_grad", "value", call->kwargs_grad);
    if (status != DP_OK)
        return dp_error(status, "%s.backward: %s", call->module->name, dp_last_error());
    return DP_OK;
}

static double dp__weight_total(const dp_pass *pass)
{
    double total = 0;
    for (size_t r = 0; r < pass->count; r++)
        total += pass->records[r].call.weight;
    return total;
}

static void dp__call_begin(dp__record *record, const dp__invocation *invocation, dp_module *module,
                           const dp__device *device)
{
    dp_ctx *ctx = module->ctx;
    const dp_call *outer = invocation->outer != NULL ? &invocation->outer->call : NULL;
    record->call = (dp_call){.ctx = ctx,
                             .module = module,
                             .state = module->state,
                             .own = record->memory->own[record->place],
                             .device = device->id,
                             .local_rank = device->local_rank,
                             .stream = device->stream,
                             .scope = invocation->scope,
                             .args = invocation->args,
                             .kwargs = invocation->kwargs,
                             .training = module->training && (outer == NULL || outer->training),
                             .grad_enabled = invocation->wants_pass &&
                                             !invocation->config.no_grad &&
                                             (outer == NULL || outer->grad_enabled),
                             .compute_dtype = invocation->config.compute_dtype,
                             .replica_count = 1,
                             .weight = 1,
                             .record = record};
    if (outer != NULL) {
        record->call.replica = outer->replica;
        record->call.replica_count = outer->replica_count;
        record->call.row_first = outer->row_first;
        record->call.row_count = outer->row_count;
        record->call.row_total = outer->row_total;
        record->call.weight = outer->weight;
    }
}

static dp__device *dp__call_device(const dp_call *call)
{
    return &call->ctx->devices[call->local_rank];
}

/* Of a pass whose forward has returned. */
static uint64_t dp__pass_number(dp_ctx *ctx)
{
    return atomic_fetch_add_explicit(&ctx->forwards, 1, memory_order_relaxed) + 1;
}

/* `face` NULL: the module runs in one record. */
static dp_status dp__pass_make(const dp__invocation *invocation, dp_module *runs,
                               const dp__face *face, size_t count, dp_pass **out)
{
    const dp_method *method = dp__find_method(runs, invocation->method);
    dp_pass *pass = dp__scope_bytes(invocation->scope, sizeof *pass, 64);
    dp__record *records = dp__scope_bytes(invocation->scope, count * sizeof *records, 64);
    if (pass == NULL || records == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a pass");
    if (method == NULL)
        return dp__no_method(DP_ERR_UNSUPPORTED, invocation->fn, runs, invocation->method);
    unsigned kind = count > 1 ? DP__PASS_SPREAD : DP__PASS_PLAIN;
    kind |= invocation->outer != NULL ? DP__PASS_INNER : 0;
    *pass = (dp_pass){.head = {DP__PASS_LIVE, kind, invocation->scope->passes},
                      .serial = invocation->module->serial,
                      .ctx = runs->ctx,
                      .module = invocation->module,
                      .runs = runs,
                      .method = method,
                      .backward = dp__find_method(runs, "backward"),
                      .mode = invocation->mode,
                      .scope = invocation->scope,
                      .face = face,
                      .alone = face == NULL || face->count == 1,
                      .no_sync = invocation->config.no_sync,
                      .factor = 1,
                      .count = count,
                      .records = records,
                      .args = invocation->args,
                      .kwargs = invocation->kwargs};
    for (size_t r = 0; r < count; r++) {
        records[r].pass = pass;
        records[r].outer = invocation->outer;
        records[r].slot_first = records[r].place = 0;
        records[r].in_backward = records[r].left_behind = records[r].absent = false;
        records[r].leaves_nothing = invocation->outer != NULL && invocation->outer->leaves_nothing;
        records[r].status = DP_OK;
    }
    invocation->scope->passes = &pass->head;
    *out = pass;
    return pass->alone ? DP_OK : dp__run_scopes(invocation->scope);
}

/* Returns the replica that a record belongs to: the outermost method's. */
static dp__record *dp__outermost(dp__record *record)
{
    while (record->outer != NULL && record->pass->count == 1)
        record = record->outer;
    return record;
}

/* Returns true if replicas of a pass have partners, here or in other processes. */
static bool dp__has_partners(const dp_pass *pass)
{
    return pass->count > 1 || dp__ops(pass->face)->over_ranks;
}

/* Returns the same, but where ranks of other processes have the pass too, it is that pass'. */
static dp__record *dp__outermost_of_ranks(dp__record *record)
{
    while (!dp__has_partners(record->pass) && record->outer != NULL)
        record = record->outer;
    return record;
}

/* How many of the library's wrappers lie between. Each is a place in the tree, and has no slots. */
static size_t dp__layers(const dp_module *from, const dp_module *to)
{
    size_t count = 0;
    for (; from != to; from = from->wraps)
        count++;
    return count;
}

/* Returns true if the user asked for a pass, or if it is of all ranks: others are parts of one. */
static bool dp__is_asked(const dp_pass *pass)
{
    return pass->records[0].outer == NULL || dp__ops(pass->face)->over_ranks;
}

/* ---- padding ---------------------------------------------------------------------------------
   Of a part that was filled up to some size the first rows are real. A tensor that a replica makes
   has as many rows as its part, or is not cut by rows: so its size along the dim of the cut tells
   whether padding is in it.                                                                     */

static bool dp__has_padding(const dp_pass *pass, size_t r)
{
    return pass->part_rows > 0 && pass->rows[r] < pass->part_rows;
}

/* Returns the real rows of a tensor of replica r, along *out_dim; -1: it has no padding. */
static int64_t dp__real_rows(const dp_pass *pass, size_t r, const dp_tensor *tensor, int *out_dim)
{
    if (!dp__has_padding(pass, r))
        return -1;
    int dim = pass->face->how.cut.dim;
    dim = dim < 0 ? dim + tensor->ndim : dim;
    if (dim < 0 || dim >= tensor->ndim || tensor->shape[dim] != pass->part_rows)
        return -1;
    *out_dim = dim;
    return pass->rows[r];
}

/* Returns the tensor without padding. */
static dp_tensor dp__real_part(const dp_pass *pass, size_t r, const dp_tensor *tensor)
{
    int dim = 0;
    int64_t rows = dp__real_rows(pass, r, tensor, &dim);
    dp_tensor part = *tensor;
    if (rows >= 0)
        dp__narrow_here(&part, dim, 0, rows);
    return part;
}

/* ==== >>asking ===================================================================================
   What a method may ask of its call: parameters, gradients, arguments, children.                */

/* Looks at memory that may have been freed by now. A copy of a call does not count as one. */
DP__UNCHECKED static bool dp__is_call(const dp_call *call)
{
    return (const void *)call->record == call && call->record->pass->head.magic == DP__PASS_LIVE;
}

static dp_status dp__check_call(const char *fn, const dp_call *call)
{
    DP_TRY(dp__check_pointer(fn, "call", call));
    if (!dp__is_call(call))
        return dp_error(DP_ERR_STATE, "%s: this is not a call, or the scope of its pass has ended",
                        fn);
    return DP_OK;
}

static bool dp__call_param(const char *fn, const dp_call *call, size_t param, size_t *out_slot)
{
    if (dp__check_call(fn, call) != DP_OK)
        return false;
    if (param >= call->module->param_count) {
        dp_error(DP_ERR_INVALID, "%s: parameter %zu, '%s' has %zu of its own", fn, param,
                 call->module->name, call->module->param_count);
        return false;
    }
    *out_slot = call->record->slot_first + param;
    return true;
}

static bool dp__call_data(const char *fn, const dp_call *call, size_t param, void **out)
{
    size_t slot = 0;
    if (!dp__call_param(fn, call, param, &slot))
        return false;
    *out = *call->record->memory->data[slot];
    return true;
}

static bool dp__call_buffer(const char *fn, const dp_call *call, size_t param, void **out)
{
    if (!dp__call_data(fn, call, param, out))
        return false;
    if (dp__root(&call->module->params[param])->buffer)
        return true;
    dp_error(DP_ERR_INVALID, "%s: '%s' of '%s' is a parameter: dp_params_edit writes to it", fn,
             call->module->params[param].name, call->module->name);
    return false;
}

/* A group is zeroed when the first of its gradients is asked for in a pass: they are about to be
   used, by this thread. */
static dp_status dp__grad_group_zero(dp_ctx *ctx, const dp__memory *memory, dp__grad_group *group)
{
    if (group->pass == memory->pass)
        return DP_OK;
    group->pass = memory->pass;
    return dp__fill_tensor(ctx, &ctx->devices[group->flat.device.index], &group->flat, 0);
}

/* Groups that nobody has asked for in this pass still hold the gradients of an earlier one. */
static dp_status dp__grad_groups_zero(dp_ctx *ctx, const dp__memory *memory)
{
    for (dp__grad_group *group = memory->grad_group_list; group != NULL; group = group->next)
        DP_TRY(dp__grad_group_zero(ctx, memory, group));
    return DP_OK;
}

static bool dp__call_grad(const char *fn, const dp_call *call, size_t param, void **out)
{
    size_t slot = 0;
    if (!dp__call_param(fn, call, param, &slot))
        return false;
    const dp__record *record = call->record;
    if (!record->in_backward) {
        dp_error(DP_ERR_STATE, "%s: gradients exist only in backward", fn);
        return false;
    }
    if (!dp__is_of_sort(dp__root(&call->module->params[param]), DP__GRADS)) {
        dp_error(DP_ERR_INVALID, "%s: '%s' of '%s' is frozen, or a buffer", fn,
                 call->module->params[param].name, call->module->name);
        return false;
    }
    const dp__memory *memory = record->memory;
    if (!record->leaves_nothing)
        dp__use(dp__root(&call->module->params[param]));
    if (memory->touched != NULL)
        memory->touched[slot] = !record->leaves_nothing;
    dp__grad_group *group = memory->grad_groups != NULL ? memory->grad_groups[slot] : NULL;
    dp_status status = group != NULL ? dp__grad_group_zero(call->ctx, memory, group) : DP_OK;
    *out = *memory->grad[slot];
    return status == DP_OK || dp__leave(fn, call->ctx, status) == DP_OK;
}

/* Returns `data` as the parameter's tensor. */
static dp_tensor dp__call_view(const dp_call *call, size_t param, bool found, void *data)
{
    if (!found)
        return dp__no_tensor();
    dp_tensor view = call->module->params[param].data;
    view.data = data;
    view.device = call->device;
    return view;
}

DP_API const void *dp_param(const dp_call *call, size_t param)
{
    void *data = NULL;
    return dp__call_data(__func__, call, param, &data) ? data : NULL;
}

DP_API void *dp_buffer(const dp_call *call, size_t param)
{
    void *data = NULL;
    return dp__call_buffer(__func__, call, param, &data) ? data : NULL;
}

DP_API void *dp_grad(const dp_call *call, size_t param)
{
    void *data = NULL;
    return dp__call_grad(__func__, call, param, &data) ? data : NULL;
}

DP_API dp_tensor dp_param_tensor(const dp_call *call, size_t param)
{
    void *data = NULL;
    bool found = dp__call_data(__func__, call, param, &data);
    dp_tensor view = dp__call_view(call, param, found, data);
    view.read_only = true;
    return view;
}

DP_API dp_tensor dp_buffer_tensor(const dp_call *call, size_t param)
{
    void *data = NULL;
    bool found = dp__call_buffer(__func__, call, param, &data);
    return dp__call_view(call, param, found, data);
}

DP_API dp_tensor dp_grad_tensor(const dp_call *call, size_t param)
{
    void *data = NULL;
    bool found = dp__call_grad(__func__, call, param, &data);
    return dp__call_view(call, param, found, data);
}

/* Moves *out_first to the first parameter with elements, where a packed module's block begins. */
static bool dp__call_block(const char *fn, const dp_call *call, size_t *out_first)
{
    if (dp__check_call(fn, call) != DP_OK)
        return false;
    const dp_module *module = call->module;
    if (!module->packed) {
        dp_error(DP_ERR_INVALID, "%s: the parameters of '%s' are not packed", fn, module->name);
        return false;
    }
    while (*out_first < module->param_count && dp__count(&module->params[*out_first].data) == 0)
        ++*out_first;
    return *out_first < module->param_count;
}

DP_API const void *dp_param_block(const dp_call *call)
{
    size_t first = 0;
    void *data = NULL;
    bool found = dp__call_block(__func__, call, &first);
    return found && dp__call_data(__func__, call, first, &data) ? data : NULL;
}

DP_API void *dp_grad_block(const dp_call *call)
{
    size_t first = 0;
    void *block = NULL, *own = NULL;
    bool found = dp__call_block(__func__, call, &first) &&
                 dp__call_grad(__func__, call, first, &block);
    for (size_t i = 0; found && i < call->module->param_count; i++)
        found = dp__call_grad(__func__, call, i, &own); /* which zeroes it */
    return found ? block : NULL;
}

/* ---- the output's gradient ------------------------------------------------------------------- */

/* What the forward returned under a name, as a tensor without data, and the gradient that belongs
   to it. A number that was returned counts as an f64 tensor without dims. */
static dp_status dp__out_entry(const dp_call *call, const char *name, dp_tensor *out_like,
                               dp_value *out_grad)
{
    const dp_tensor *tensor = out_like;
    const dp_pair *pair = name != NULL && call->out.kind == DP_DICT ? dp__find(call->out, name)
                                                                    : NULL;
    if (name != NULL && pair == NULL) {
        dp__names names = dp__keys_of(call->out);
        return dp__no_such(DP_ERR_INVALID, &names, "dp_call_out_grad: the output has no key '%s'",
                           name);
    }
    dp_value value = pair != NULL ? pair->value : call->out;
    bool whole = name == NULL || call->grad.kind != DP_DICT; /* a number stands for all entries */
    *out_grad = whole ? call->grad : dp_get(call->grad, name);
    *out_like = dp__tensor_like(NULL, call->device, DP_F64, 0, NULL);
    if (value.kind == DP_INT || value.kind == DP_FLOAT)
        return DP_OK;
    DP_TRY(dp_as_tensor(value, name != NULL ? name : "the output", DP_DTYPE_ANY, -1, &tensor));
    *out_like =
        dp__tensor_like(NULL, call->device, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape);
    return DP_OK;
}

static dp_status dp__out_grad(const dp_call *call, const dp_tensor *like, dp_value grad,
                              dp_tensor *out)
{
    uint64_t bits = 0;
    dp__device *device = dp__call_device(call);
    if (grad.kind == DP_TENSOR) {
        dp_tensor own = *grad.as.t;
        DP_TRY(dp__check_same_shape("dp_call_out_grad", "the gradient", &own, "the output", like));
        DP_TRY(dp__place(call->scope, &own, device));
        return dp__contiguous(call->scope, &own, out);
    }
    if (grad.kind != DP_NONE)
        DP_TRY(dp__number_bits(call->ctx, "dp_call_out_grad", grad, (dp_dtype)like->dtype, &bits));
    DP_TRY(dp__tensor_as(call->scope, device, like, out));
    return dp__fill_tensor(call->ctx, device, out, bits);
}

DP_API dp_status dp_call_out_grad(const dp_call *call, const char *name, dp_tensor *out)
{
    dp_tensor like;
    dp_value grad = dp_none();
    DP_TRY(dp__check_call(__func__, call));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (!call->record->in_backward)
        return dp_error(DP_ERR_STATE, "%s: gradients exist only in backward", __func__);
    dp_status status = dp__out_entry(call, name, &like, &grad);
    if (status == DP_OK)
        status = dp__out_grad(call, &like, grad, out);
    return dp__leave(__func__, call->ctx, status);
}

static dp_status dp__call_kwarg(const char *fn, const dp_call *call, const char *name,
                                dp_dtype dtype, int ndim, const dp_tensor **out)
{
    DP_TRY(dp__check_call(fn, call));
    DP_TRY(dp__check_pointer(fn, "name", name));
    const dp_pair *pair = call->kwargs.kind == DP_DICT ? dp__find(call->kwargs, name) : NULL;
    if (pair == NULL) {
        dp__names names = dp__keys_of(call->kwargs);
        return dp__no_such(DP_ERR_INVALID, &names, "%s: there is no argument '%s'", fn, name);
    }
    return dp__as_tensor(fn, pair->value, name, dtype, ndim, out);
}

static dp_status dp__call_arg(const char *fn, const dp_call *call, size_t index, dp_dtype dtype,
                              int ndim, const dp_tensor **out)
{
    char what[48];
    DP_TRY(dp__check_call(fn, call));
    if (!dp__is_sequence(call->args) || index >= call->args.count)
        return dp_error(DP_ERR_INVALID, "%s: argument %zu, there are %u", fn, index,
                        dp__is_sequence(call->args) ? (unsigned)call->args.count : 0);
    dp_value value = call->args.as.items[index];
    if (dp__as_tensor(fn, value, "an argument", dtype, ndim, out) == DP_OK)
        return DP_OK;
    snprintf(what, sizeof what, "argument %zu", index);
    return dp__as_tensor(fn, value, what, dtype, ndim, out);
}

/* The view itself if it is dense, else a copy that lasts as long as the pass. */
static dp_status dp__call_dense(const char *fn, const dp_call *call, const dp_tensor *view,
                                const dp_tensor **out)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_pointer(fn, "out", out));
    if (dp__is_dense(view)) {
        *out = view;
        return DP_OK;
    }
    DP_TRY(dp__check_device(fn, call->ctx, view->device, &device));
    dp_tensor *copy = dp__scope_bytes(call->scope, sizeof *copy, _Alignof(dp_tensor));
    dp_status status = copy != NULL ? dp__contiguous(call->scope, view, copy) : dp__full(fn);
    if (status == DP_OK)
        *out = copy;
    return dp__leave(fn, call->ctx, status);
}

DP_API dp_status dp_call_tensor(const dp_call *call, const char *name, dp_dtype dtype, int ndim,
                                const dp_tensor **out)
{
    const dp_tensor *view = NULL;
    DP_TRY(dp__call_kwarg(__func__, call, name, dtype, ndim, &view));
    return dp__call_dense(__func__, call, view, out);
}

/* Writes "any,16". */
static const char *dp__sizes_text(int ndim, const int64_t *shape, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ndim; i++)
        used = shape[i] < 0
                   ? dp__append(text, bytes, used, "%sany", i > 0 ? "," : "")
                   : dp__append(text, bytes, used, "%s%lld", i > 0 ? "," : "", (long long)shape[i]);
    return text;
}

/* Checks the sizes that a tensor must have, and how many there are. */
static dp_status dp__check_shaped(const char *fn, const char *name, const dp_tensor *tensor,
                                  int ndim, const int64_t *shape)
{
    char is[96], wanted[96];
    bool fits = tensor->ndim == ndim;
    for (int i = 0; i < ndim && fits; i++)
        fits = shape[i] < 0 || tensor->shape[i] == shape[i];
    return fits ? DP_OK
                : dp_error(DP_ERR_INVALID, "%s: %s is (%s), not (%s)", fn, name,
                           dp__shape_text(tensor, is, sizeof is),
                           dp__sizes_text(ndim, shape, wanted, sizeof wanted));
}

DP_API dp_status dp_call_shaped(const dp_call *call, const char *name, dp_dtype dtype, int ndim,
                                const int64_t *shape, const dp_tensor **out)
{
    const dp_tensor *view = NULL;
    DP_TRY(dp__call_kwarg(__func__, call, name, dtype, -1, &view));
    if (ndim < 0 || ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: ndim is %d, not 0 to %d", __func__, ndim, DP_MAX_DIMS);
    if (ndim > 0)
        DP_TRY(dp__check_pointer(__func__, "shape", shape));
    DP_TRY(dp__check_shaped(__func__, name, view, ndim, shape));
    return dp__call_dense(__func__, call, view, out);
}

DP_API dp_status dp_call_tensor_view(const dp_call *call, const char *name, dp_dtype dtype,
                                     int ndim, const dp_tensor **out)
{
    return dp__call_kwarg(__func__, call, name, dtype, ndim, out);
}

DP_API dp_status dp_call_arg(const dp_call *call, size_t index, dp_dtype dtype, int ndim,
                             const dp_tensor **out)
{
    const dp_tensor *view = NULL;
    DP_TRY(dp__call_arg(__func__, call, index, dtype, ndim, &view));
    return dp__call_dense(__func__, call, view, out);
}

DP_API dp_status dp_call_arg_view(const dp_call *call, size_t index, dp_dtype dtype, int ndim,
                                  const dp_tensor **out)
{
    return dp__call_arg(__func__, call, index, dtype, ndim, out);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
