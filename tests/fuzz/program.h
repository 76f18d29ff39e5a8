/* program.h - what fuzz_program.c knows of the modules that it makes: who is in whom, and which
   number each element of a parameter and of its gradient should be. A number that cannot be known,
   as a call failed half way, say, is NAN, and learned again from what is there. */

#ifndef PROGRAM_H
#define PROGRAM_H

#include <math.h>
#include "fuzz.h"

enum {
    PROGRAM_NETS = 24,
    PROGRAM_OWN = 3, /* parameters of a module, and children */
    PROGRAM_VARS = 48,
    PROGRAM_ELEMENTS = 320,
    PROGRAM_RANKS = 4,
    PROGRAM_ROWS = 12
};

typedef enum partial { WHOLE, PARTIAL, PERHAPS } partial; /* PARTIAL: more is to be added */

typedef struct var { /* a parameter's memory, which may have several names */
    const void *memory;
    dp_dtype dtype;
    size_t count;
    bool has_grad, buffer;
    partial partial;
    double data[PROGRAM_ELEMENTS], grad[PROGRAM_ELEMENTS];
} var;

typedef enum net_kind {
    PLAIN,
    DATA,
    CONTAINER,
    MODEL,
    META,
    DISTRIBUTED,
    SEPARATE,
    NET_KINDS
} net_kind;

typedef struct net {   /* a module; its methods get it as their state */
    dp_module *module; /* NULL: it was destroyed, or is a part of a copy */
    net_kind kind;
    bool owned; /* by a parent, or wrapped */
    bool mean_grads, training, announces, muddy;
    dp_reduction reduction;
    char name[8];
    const char *param_names[PROGRAM_OWN];
    int vars[PROGRAM_OWN]; /* -1: it has no elements */
    size_t param_count, child_count;
    struct net *children[PROGRAM_OWN]; /* of a wrapper: what it wraps */
} net;

typedef struct world {
    dp_ctx *ctx;
    dp_info info;
    bool host_memory;
    size_t net_count, var_count;
    net nets[PROGRAM_NETS];
    var vars[PROGRAM_VARS];
} world;

static inline bool world_counts(const var *v) /* numbers of others are rounded away */
{
    return v->dtype == DP_F32 || v->dtype == DP_F64;
}

static inline void world_forget(var *v)
{
    v->partial = PERHAPS;
    for (size_t i = 0; i < v->count; i++)
        v->data[i] = v->grad[i] = NAN;
}

static inline void world_forget_all(world *w)
{
    for (size_t i = 0; i < w->var_count; i++)
        world_forget(&w->vars[i]);
}

/* The memory behind a name, new or known; -1 if it has no elements, or there is no room for it. */
static inline int world_var(world *w, dp_module *root, const char *name)
{
    size_t param;
    dp_param_info info;
    if (dp_module_find(root, name, &param) != DP_OK)
        return -1;
    FUZZ_CHECK(dp_module_param(root, param, &info) == DP_OK);
    size_t count = (size_t)dp_tensor_count(&info.data);
    for (size_t i = 0; i < w->var_count && count > 0; i++)
        if (w->vars[i].memory == info.data.data)
            return (int)i;
    if (count == 0 || count > PROGRAM_ELEMENTS || w->var_count == PROGRAM_VARS)
        return -1;
    var *v = &w->vars[w->var_count];
    *v = (var){.memory = info.data.data,
               .dtype = (dp_dtype)info.data.dtype,
               .count = count,
               .has_grad = !info.frozen && !info.buffer,
               .buffer = info.buffer};
    world_forget(v);
    v->partial = WHOLE;
    for (size_t i = 0; i < count && v->has_grad && world_counts(v); i++)
        v->grad[i] = 0;
    return (int)w->var_count++;
}

/* Its own parameters, and those of all children that have no module of their own. */
static inline void world_bind(world *w, net *n, dp_module *root, const char *prefix)
{
    char path[96];
    for (size_t k = 0; k < n->param_count; k++) {
        snprintf(path, sizeof path, "%s%s", prefix, n->param_names[k]);
        n->vars[k] = world_var(w, root, path);
    }
}

static inline net *world_net(world *w, net_kind kind)
{
    if (w->net_count == PROGRAM_NETS)
        return NULL;
    net *n = &w->nets[w->net_count];
    *n = (net){.kind = kind, .training = true};
    snprintf(n->name, sizeof n->name, "m%zu", w->net_count);
    return n; /* who keeps it counts it */
}

/* A copy has memory of its own, all the way down. */
static inline net *world_copy(world *w, const net *from, dp_module *root, const char *prefix)
{
    char path[96];
    net *n = world_net(w, from->kind);
    if (n == NULL)
        return NULL;
    char name[8];
    memcpy(name, from->name, sizeof name);
    *n = *from;
    n->module = NULL;
    w->net_count++;
    world_bind(w, n, root, prefix);
    for (size_t c = 0; c < n->child_count; c++) {
        bool named = from->kind == PLAIN;
        snprintf(path, sizeof path, "%s%s%s", prefix, named ? from->children[c]->name : "",
                 named ? "." : "");
        n->children[c] = world_copy(w, from->children[c], root, path);
        if (n->children[c] == NULL)
            return NULL;
    }
    return n;
}

/* ---- what passes do -------------------------------------------------------------------------- */

static inline double world_factor(size_t element) /* of its gradient */
{
    return 1 + (double)(element % 3);
}

/* A module gives x times the sum of the first elements of its parameters, and of all below it. */
static inline double world_slope(const world *w, const net *n)
{
    double sum = 0;
    for (size_t k = 0; k < n->param_count; k++) {
        const var *v = n->vars[k] >= 0 ? &w->vars[n->vars[k]] : NULL;
        if (v != NULL && !v->buffer && world_counts(v))
            sum += v->data[0];
    }
    for (size_t c = 0; c < n->child_count; c++)
        sum += world_slope(w, n->children[c]);
    return sum;
}

/* Buffers count how often they were seen in training. */
static inline void world_forward(world *w, const net *n, bool training, bool sure)
{
    training = training && (n->kind != PLAIN || n->training); /* a wrapper has none of its own */
    for (size_t k = 0; k < n->param_count && (training || !sure); k++) {
        var *v = n->vars[k] >= 0 ? &w->vars[n->vars[k]] : NULL;
        for (size_t i = 0; v != NULL && v->buffer && world_counts(v) && i < v->count; i++)
            v->data[i] += sure ? 1 : NAN;
    }
    for (size_t c = 0; c < n->child_count; c++)
        world_forward(w, n->children[c], training, sure);
}

static inline void world_backward(world *w, const net *n, double amount)
{
    for (size_t k = 0; k < n->param_count; k++) {
        var *v = n->vars[k] >= 0 ? &w->vars[n->vars[k]] : NULL;
        for (size_t i = 0; v != NULL && v->has_grad && i < v->count; i++)
            v->grad[i] += world_factor(i) * amount;
    }
    for (size_t c = 0; c < n->child_count; c++)
        world_backward(w, n->children[c], amount);
}

static inline void world_mark(const net *n, bool *marked)
{
    for (size_t k = 0; k < n->param_count; k++)
        if (n->vars[k] >= 0)
            marked[n->vars[k]] = true;
    for (size_t c = 0; c < n->child_count; c++)
        world_mark(n->children[c], marked);
}

/* Each piece of memory in the tree once. */
static inline void world_each(world *w, const net *n, void (*fn)(var *v, double number),
                              double number)
{
    bool marked[PROGRAM_VARS] = {false};
    world_mark(n, marked);
    for (size_t i = 0; i < w->var_count; i++)
        if (marked[i])
            fn(&w->vars[i], number);
}

static inline void var_zero(var *v, double ignored)
{
    (void)ignored;
    v->partial = WHOLE;
    for (size_t i = 0; v->has_grad && i < v->count; i++)
        v->grad[i] = 0;
}

/* One step of SGD, after which gradients are zero. */
static inline void var_step(var *v, double lr)
{
    for (size_t i = 0; v->has_grad && i < v->count; i++)
        v->data[i] -= lr * v->grad[i];
    var_zero(v, 0);
}

/* A backward of mean_grads begins with zeros, unless a pass before said that more would come. */
static inline void var_begin(var *v, double no_sync)
{
    for (size_t i = 0; i < v->count && v->partial != PARTIAL; i++)
        v->grad[i] = v->partial == WHOLE ? 0 : (double)NAN;
    v->partial = no_sync > 0 ? PARTIAL : WHOLE;
}

static inline void world_train(net *n, bool training)
{
    n->training = training;
    for (size_t c = 0; c < n->child_count; c++)
        world_train(n->children[c], training);
}

/* Whether some module in the tree is not as simple as the numbers here. */
static inline bool world_has(const net *n, bool (*is)(const net *n))
{
    bool has = is(n);
    for (size_t c = 0; c < n->child_count && !has; c++)
        has = world_has(n->children[c], is);
    return has;
}

static inline bool net_divides(const net *n)
{
    return n->mean_grads;
}

static inline bool net_is_muddy(const net *n)
{
    return n->muddy;
}

static inline bool net_wraps(const net *n)
{
    return n->kind != PLAIN;
}

/* What it runs in the end; NULL: a tree with wrappers or mean_grads below its top. */
static inline const net *world_simple(const net *n)
{
    while (n->kind != PLAIN && n->kind != SEPARATE)
        n = n->children[0];
    bool simple = n->kind == PLAIN;
    for (size_t c = 0; c < n->child_count; c++)
        simple = simple && !world_has(n->children[c], net_wraps) &&
                 !world_has(n->children[c], net_divides);
    return simple ? n : NULL;
}

/* ---- against what is there ------------------------------------------------------------------- */

static inline double world_element(const void *data, dp_dtype dtype, size_t i)
{
    return dtype == DP_F32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

static inline bool world_close(double got, double want)
{
    return fabs(got - want) <= 1e-4 * (1 + fabs(want));
}

/* What is known is compared, and what is not is learned. */
static inline void world_meet(world *w, const dp_tensor *tensor, double *known)
{
    static _Alignas(64) char bytes[PROGRAM_ELEMENTS * sizeof(double)];
    size_t count = (size_t)dp_tensor_count(tensor);
    dp_dtype dtype = (dp_dtype)tensor->dtype;
    FUZZ_CHECK(dp_read(w->ctx, tensor, bytes, count * dp_dtype_bytes(dtype)) == DP_OK);
    for (size_t i = 0; i < count; i++) {
        double got = world_element(bytes, dtype, i);
        FUZZ_CHECK(isnan(known[i]) || world_close(got, known[i]));
        known[i] = fabs(got) < 1e6 ? got : (double)NAN;
    }
}

static inline void world_check(world *w, dp_module *root, bool grads)
{
    for (size_t p = 0; p < dp_module_param_count(root); p++) {
        dp_param_info info;
        dp_tensor grad;
        FUZZ_CHECK(dp_module_param(root, p, &info) == DP_OK);
        int at = world_var(w, root, info.name);
        if (at < 0 || !world_counts(&w->vars[at]))
            continue;
        world_meet(w, &info.data, w->vars[at].data);
        if (!grads || !w->vars[at].has_grad)
            continue;
        dp_status status = dp_owner_grad(root, 0, p, &grad);
        FUZZ_CHECK(status == DP_OK || status == DP_ERR_STATE);
        if (status == DP_OK)
            world_meet(w, &grad, w->vars[at].grad);
    }
}

#endif /* PROGRAM_H */
