/* bench_growth.c - C17: what one parameter, child or key costs, where there are few and many. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench.h"

enum { FEW = 64, MANY = 1024, MOST = 16384, SIZES = 3, NAME = 32, FLOATS = 16 };

static const size_t sizes[SIZES] = {FEW, MANY, MOST};

typedef struct model { /* of `count` parameters, its own or one a child; a dict has as many keys */
    dp_ctx *ctx;
    size_t count;
    bool nested;
    char (*names)[NAME];
    dp_param_config *params;
    dp_module **children;
    dp_pair *pairs;
    dp_module *net, *par;
    float loss;
} model;

static dp_status forward(dp_call *call)
{
    dp_tensor loss;
    must(dp_tensor_new(call->scope, call->device, DP_F32, 0, NULL, &loss));
    *(float *)loss.data = 1;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    size_t count = dp_module_param_count(call->module);
    for (size_t i = 0; i < count; i++)
        ((float *)dp_grad(call, i))[0] += ((const float *)dp_param(call, i))[0];
    return DP_OK;
}

static void open_model(model *m, size_t count, bool nested)
{
    *m = (model){.ctx = open_devices(2), .count = count, .nested = nested};
    m->names = calloc(count, sizeof *m->names);
    m->params = calloc(count, sizeof *m->params);
    m->children = calloc(count, sizeof(dp_module *));
    m->pairs = calloc(count, sizeof *m->pairs);
    if (m->names == NULL || m->params == NULL || m->children == NULL || m->pairs == NULL)
        abort();
    for (size_t i = 0; i < count; i++) {
        snprintf(m->names[i], NAME, "layer%zu", i);
        m->params[i] = (dp_param_config){.name = m->names[i], .ndim = 1, .shape = {FLOATS}};
        m->pairs[i].key = m->names[i];
    }
}

static void close_model(model *m)
{
    dp_close(m->ctx);
    free(m->pairs);
    free(m->children);
    free(m->params);
    free(m->names);
}

static void make(model *m)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    dp_module_config net = {.methods = methods, .method_count = 2};
    dp_module_config child = {.params = m->params, .param_count = 1};
    for (size_t i = 0; i < m->count && m->nested; i++) {
        child.name = m->names[i];
        must(dp_module_create(m->ctx, &child, &m->children[i]));
    }
    if (m->nested) {
        net.children = m->children;
        net.child_count = m->count;
    } else {
        net.params = m->count > 0 ? m->params : NULL;
        net.param_count = m->count;
    }
    must(dp_module_create(m->ctx, &net, &m->net));
}

static void wrap(model *m)
{
    must(dp_data_parallel(m->net, NULL, &m->par));
}

static void unmake(model *m)
{
    if (m->par != NULL)
        must(dp_module_destroy(m->par));
    must(dp_module_destroy(m->net));
    m->par = NULL;
}

/* As often as it takes to get to as many parameters. */
static size_t times(const model *m)
{
    return MOST / m->count;
}

static double make_once(void *user)
{
    model *m = user;
    double spent = 0;
    for (size_t i = 0; i < times(m); i++) {
        double start = now_ns();
        make(m);
        spent += now_ns() - start;
        unmake(m);
    }
    return spent / MOST;
}

static double wrap_once(void *user)
{
    model *m = user;
    double spent = 0;
    for (size_t i = 0; i < times(m); i++) {
        make(m);
        double start = now_ns();
        wrap(m);
        spent += now_ns() - start;
        unmake(m);
    }
    return spent / MOST;
}

static double step_ns(model *m)
{
    double start = 0;
    for (size_t i = 0; i <= times(m); i++) {
        if (i == 1)
            start = now_ns();
        dp_value log, batch;
        dp_tensor x = dp_wrap_const(&m->params[0].shape, DP_I64, DP_SHAPE(2));
        dp_scope *scope = dp_scope_begin(m->ctx);
        batch = DP_DICT(scope, {"x", dp_of(scope, &x)});
        must(dp_train_step(m->par, scope, batch, NULL, &log));
        must(dp_zero_grad(m->net));
        dp_scope_end(scope);
    }
    return (now_ns() - start) / (double)times(m);
}

/* What the parameters cost: less what a step without them takes (C7, C12 are about that). */
static double step_once(void *user)
{
    model *m = user, none = *m;
    if (m->par == NULL) {
        make(m);
        wrap(m);
    }
    none.count = 0;
    make(&none);
    wrap(&none);
    none.count = m->count; /* as many steps */
    double without = step_ns(&none), with = step_ns(m);
    unmake(&none);
    return (with - without) / (double)m->count;
}

static dp_value dict_of(const model *m, dp_scope *scope)
{
    return dp_dict_make(scope, m->pairs, m->count);
}

static double dict_once(void *user)
{
    model *m = user;
    double spent = 0;
    for (size_t i = 0; i < times(m); i++) {
        dp_scope *scope = dp_scope_begin(m->ctx);
        double start = now_ns();
        dp_value dict = dict_of(m, scope);
        spent += now_ns() - start;
        if (dict.kind != DP_DICT)
            abort();
        dp_scope_end(scope);
    }
    return spent / MOST;
}

static double gather_once(void *user)
{
    model *m = user;
    double spent = 0;
    for (size_t i = 0; i < times(m); i++) {
        dp_value out;
        dp_scope *scope = dp_scope_begin(m->ctx);
        dp_value list = DP_LIST_OF(scope, dict_of(m, scope), dict_of(m, scope));
        double start = now_ns();
        must(dp_gather(m->ctx, scope, list, NULL, &out));
        spent += now_ns() - start;
        dp_scope_end(scope);
    }
    return spent / MOST;
}

static void rows_of(const char *what, const char *item, double (*once)(void *), bool nested,
                    double at_most_ns)
{
    model models[SIZES];
    entrant e[SIZES] = {{0}};
    char name[64];
    for (int i = 0; i < SIZES; i++) {
        open_model(&models[i], sizes[i], nested);
        e[i] = (entrant){.once = once, .user = &models[i]};
    }
    take_turns(e, SIZES);
    for (int i = 0; i < SIZES; i++) {
        snprintf(name, sizeof name, "C17 %s: a %s of %zu", what, item, sizes[i]);
        report_time(name, &e[i].times, at_most_ns);
        close_model(&models[i]);
    }
    snprintf(name, sizeof name, "C17 %s: %d against %d", what, MOST, FEW);
    report_share(name, &e[SIZES - 1].times, &e[0].times, NULL, 1.5);
}

void rows_c17(void)
{
    rows_of("step", "parameter", step_once, false, 60);
    rows_of("module made", "parameter", make_once, false, 500);
    rows_of("module wrapped", "parameter", wrap_once, false, 500);
    rows_of("module made", "child", make_once, true, 500);
    rows_of("module wrapped", "child", wrap_once, true, 500);
    rows_of("dict made", "key", dict_once, false, 200);
    rows_of("dicts gathered", "key", gather_once, false, 200);
}
