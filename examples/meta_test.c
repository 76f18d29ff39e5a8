/* meta_test.c - few-shot tasks side by side, each on a device of its own.

   A task has five classes, with five samples of each to learn from and fifteen to be tested on.
   Every device has a copy of the model behind dp_meta_test_parallel and takes every DEVICES-th
   task: it forgets, learns, and is tested. Nothing is shared, nothing is summed.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/meta_test.c dp.o -o meta_test -lpthread -lm
   Prints:
   device 0 had tasks 0 2 4 ... 38, device 1 tasks 1 3 5 ... 39
   40 tasks: ... % right, +- ... (95 %) */

#include "fewshot.h"
#include <stdio.h>
#include <stdlib.h>

enum { DEVICES = 2, TASKS = 40, SHOTS = 5, QUERIES = 15, STEPS = 30 };

typedef struct meta {
    dp_ctx *ctx;
    dp_module *tests[DEVICES];
    double right[TASKS];
} meta;

/* `each` samples of every class, around a centre that belongs to the class and the task. */
static void draw(unsigned task, int each, unsigned seed, float *x, int64_t *label)
{
    for (int i = 0; i < each * WAYS * FEATURES; i++) {
        int row = i / FEATURES, k = i % FEATURES;
        label[row] = row % WAYS;
        unsigned centre = (task * 97u + (unsigned)label[row] * 31u + (unsigned)k * 7u) *
                          2654435761u;
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(centre >> 28) / 16 + (float)(seed >> 8) / (1 << 24) * 2 - 1.5f;
    }
}

static dp_value samples(dp_scope *scope, const char *mode, int rows, const float *x,
                        const int64_t *label)
{
    return DP_DICT(scope, {"x", dp_array(scope, x, DP_F32, DP_SHAPE(rows, FEATURES))},
                   {"label", dp_array(scope, label, DP_I64, DP_SHAPE(rows))},
                   {"mode", dp_string(scope, mode)});
}

static dp_status learn(const meta *m, dp_module *test, dp_scope *scope, dp_value support)
{
    dp_pass *pass;
    dp_value out;
    dp_tensor w, grad;
    DP_TRY(dp_invoke(test, scope, "forward", dp_none(), support, NULL, &out, &pass));
    DP_TRY(dp_backward(pass, dp_float(1), NULL));
    DP_TRY(dp_params_edit(test, 0, &w, &grad));
    DP_TRY(dp_axpby(m->ctx, 1, &w, -1, &grad, &w));
    return dp_zero_grad(test);
}

/* [readme-meta */
static dp_status run_task(meta *m, unsigned task, dp_module *test, dp_scope *scope)
{
    float *x = dp_scope_alloc(scope, QUERIES * WAYS * FEATURES * sizeof *x);
    int64_t label[QUERIES * WAYS];
    dp_value out;
    if (x == NULL)
        return DP_ERR_NO_MEMORY;
    draw(task, SHOTS, task, x, label);
    dp_value support = samples(scope, "support", SHOTS * WAYS, x, label);
    DP_TRY(
        dp_invoke(test, scope, "before_forward_support", dp_none(), dp_none(), NULL, &out, NULL));
    for (int i = 0; i < STEPS; i++)
        DP_TRY(learn(m, test, scope, support));
    draw(task, QUERIES, ~task, x, label);
    dp_value query = samples(scope, "query", QUERIES * WAYS, x, label);
    DP_TRY(dp_invoke(test, scope, "forward", dp_none(), query, NULL, &out, NULL));
    DP_TRY(dp_item(m->ctx, out, &m->right[task]));
    m->right[task] /= QUERIES * WAYS;
    return DP_OK;
}

static dp_status run_tasks(int rank, dp_scope *scope, void *user)
{
    meta *m = user;
    for (int task = rank; task < TASKS; task += DEVICES)
        DP_TRY(run_task(m, (unsigned)task, m->tests[rank], scope));
    return DP_OK;
}
/* readme-meta] */

int main(void)
{
    meta m = {0};
    dp_module *net, *copy;
    double mean = 0, square = 0;
    DP_CHECK(dp_open(&(dp_config){.device_count = DEVICES}, &m.ctx));
    DP_CHECK(fewshot_create(m.ctx, &net));
    for (int rank = 0; rank < DEVICES; rank++) {
        DP_CHECK(dp_module_copy(net, rank, &copy));
        DP_CHECK(dp_meta_test_parallel(copy, &m.tests[rank]));
    }
    dp_scope *scope = dp_scope_begin(m.ctx);
    DP_CHECK(dp_run(m.ctx, scope, run_tasks, &m));
    dp_scope_end(scope);
    printf("device 0 had tasks 0 2 4 ... %d, device 1 tasks 1 3 5 ... %d\n", TASKS - 2, TASKS - 1);
    for (int task = 0; task < TASKS; task++) {
        mean += m.right[task] / TASKS;
        square += m.right[task] * m.right[task] / TASKS;
    }
    printf("%d tasks: %.1f %% right, +- %.1f (95 %%)\n", TASKS, mean * 100,
           1.96 * sqrt((square - mean * mean) / TASKS) * 100);
    dp_close(m.ctx);
    return mean > 0.5 ? 0 : 1;
}
