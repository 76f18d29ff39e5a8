/* steps.c - C8, C14: training steps whose matrix products OpenBLAS makes, with one thread a device,
   for the driver in bench.c: in processes of their own, as the driver is to run without OpenBLAS.

       peer_steps

   Says "ready" and OpenBLAS' version; then, for each line "HOW WIDTH STEPS" on the standard input,
   trains the model of this width, one step that does not count and STEPS that do, and answers with
   the nanoseconds that one took. Widths 1024 and 256 are those of an MLP's hidden layers, 64 and
   320 the channels of a GPT. HOW is
     devices     one process with two devices (of the MLPs)
     processes   two processes with one device each and half of the batch each
     alone       the same, at the same time, without a word to each other
     meeting     as alone, but both wait for each other at the end of each step
     hidden      no steps: percent of the processes' communication that backward did not hide
   Process 1 is a child, which sleeps in between. Ends with its input. */

#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../../dp_train.h"
#include "../bench.h"
#define GPT_BLAS
#include "../../../examples/gpt.h"

enum { LAYERS = 3, INPUTS = 784, CLASSES = 10, HALF = 128, BATCH = 2 * HALF };
enum { GPT_ROWS = 4, GPT_CONTEXT = 32, MAX_RANGES = GPT_TENSORS * GPT_MAX_LAYERS };
static const float rate = 1e-6f;

typedef struct model {
    int width;
    gpt_shape shape; /* of the GPTs */
} model;

static const model models[] = {
    {.width = 1024},
    {.width = 256},
    {.width = 64, .shape = {2, 2, 64, GPT_CONTEXT, 64}},    /* 0.1 M parameters */
    {.width = 320, .shape = {8, 4, 320, GPT_CONTEXT, 64}}}; /* 10 M */
enum { MODELS = sizeof(models) / sizeof(models[0]) };

static void begin_weights(float *weights, size_t count)
{
    for (size_t i = 0; i < count; i++)
        weights[i] = 0.01f * (float)((i * 7 + (i >> 5)) % 11) - 0.05f;
}

/* ---- the MLP --------------------------------------------------------------------------------- */

typedef struct mlp {
    int rows, sizes[LAYERS + 1];
    const float *w[LAYERS], *input;
    float *grads[LAYERS];
    float *x[LAYERS], *d[LAYERS]; /* of each layer's outputs: activations, their gradients */
} mlp;

static mlp mlp_of(int width, int rows)
{
    return (mlp){.rows = rows, .sizes = {INPUTS, width, width, CLASSES}};
}

static size_t weights_of(const mlp *m, int layer)
{
    return (size_t)m->sizes[layer] * (size_t)m->sizes[layer + 1];
}

static size_t outputs_of(const mlp *m, int layer)
{
    return (size_t)m->rows * (size_t)m->sizes[layer + 1];
}

static const float *input_of(const mlp *m, int layer)
{
    return layer > 0 ? m->x[layer - 1] : m->input;
}

static void mlp_forward(const mlp *m)
{
    for (int l = 0; l < LAYERS; l++) {
        int in = m->sizes[l], out = m->sizes[l + 1];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m->rows, out, in, 1, input_of(m, l),
                    in, m->w[l], out, 0, m->x[l], out);
        for (size_t i = 0; l + 1 < LAYERS && i < outputs_of(m, l); i++)
            m->x[l][i] = m->x[l][i] > 0 ? m->x[l][i] : 0;
    }
}

/* Output k of each row is to become k: half of the squared distance is the loss. */
static void mlp_loss(const mlp *m, float *loss)
{
    const float *y = m->x[LAYERS - 1];
    for (int r = 0; r < m->rows; r++) {
        loss[r] = 0;
        for (int k = 0; k < CLASSES; k++, y++)
            loss[r] += 0.5f * (*y - (float)k) * (*y - (float)k);
    }
}

/* loss_grads: of each row, or of all rows if the stride is 0. */
static void mlp_loss_back(const mlp *m, const float *loss_grads, int stride)
{
    for (int i = 0; i < m->rows * CLASSES; i++)
        m->d[LAYERS - 1][i] = (m->x[LAYERS - 1][i] - (float)(i % CLASSES)) *
                              loss_grads[i / CLASSES * stride];
}

/* Adds to the layer's gradients; nobody needs those of the input. */
static void mlp_layer_back(const mlp *m, int l)
{
    int in = m->sizes[l], out = m->sizes[l + 1];
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, in, out, m->rows, 1, input_of(m, l), in,
                m->d[l], out, 1, m->grads[l], out);
    if (l == 0)
        return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m->rows, in, out, 1, m->d[l], out, m->w[l],
                out, 0, m->d[l - 1], in);
    for (size_t i = 0; i < outputs_of(m, l - 1); i++)
        m->d[l - 1][i] = m->x[l - 1][i] > 0 ? m->d[l - 1][i] : 0;
}

/* ---- one process, two devices ---------------------------------------------------------------- */

typedef struct module { /* an MLP on two devices */
    dp_ctx *ctx;
    dp_module *par;
    dp_optim *optim;
    float *images;
} module;

static dp_status forward(dp_call *call)
{
    const dp_tensor *x;
    dp_tensor loss;
    mlp *m = call->saved = dp_scope_alloc(call->scope, sizeof(*m));
    if (m == NULL)
        return DP_ERR_NO_MEMORY;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 2, &x));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(x->shape[0]), &loss));
    *m = mlp_of((int)dp_param_tensor(call, 0).shape[1], (int)x->shape[0]);
    m->input = x->data;
    for (int l = 0; l < LAYERS; l++) {
        size_t bytes = outputs_of(m, l) * sizeof(float);
        m->w[l] = dp_param(call, (size_t)l);
        m->x[l] = dp_scope_alloc(call->scope, bytes);
        m->d[l] = dp_scope_alloc(call->scope, bytes);
        if (m->x[l] == NULL || m->d[l] == NULL)
            return DP_ERR_NO_MEMORY;
    }
    mlp_forward(m);
    mlp_loss(m, loss.data);
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)});
    return DP_OK;
}

static dp_status backward(dp_call *call)
{
    mlp *m = call->saved;
    dp_tensor loss_grads;
    DP_TRY(dp_call_out_grad(call, "loss", &loss_grads));
    mlp_loss_back(m, loss_grads.data, 1);
    for (int l = LAYERS; l-- > 0;) {
        m->grads[l] = dp_grad(call, (size_t)l);
        mlp_layer_back(m, l);
        DP_TRY(dp_grad_ready(call, (size_t)l));
    }
    return DP_OK;
}

static void write_weights(dp_module *net, const mlp *shape)
{
    for (int l = 0; l < LAYERS; l++) {
        size_t count = weights_of(shape, l);
        float *weights = new_floats(count * sizeof(float));
        begin_weights(weights, count);
        must(dp_params_write(net, (size_t)l, weights, count * sizeof(float)));
        free(weights);
    }
}

static void module_open(module *m, int width)
{
    static const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    static const char *const names[LAYERS] = {"first", "second", "third"};
    const mlp shape = mlp_of(width, BATCH);
    dp_param_config params[LAYERS] = {{0}};
    dp_module *net;
    for (int l = 0; l < LAYERS; l++)
        params[l] = (dp_param_config){
            .name = names[l], .ndim = 2, .shape = {shape.sizes[l], shape.sizes[l + 1]}};
    m->ctx = open_devices(2);
    m->images = new_floats(sizeof(float) * BATCH * INPUTS);
    must(dp_module_create(
        m->ctx,
        &(dp_module_config){
            .methods = methods, .method_count = 2, .params = params, .param_count = LAYERS},
        &net));
    write_weights(net, &shape);
    must(dp_data_parallel(net, NULL, &m->par));
    must(dp_optim_create(m->par, &(dp_optim_config){.hyper = {.lr = rate}}, &m->optim));
}

static void module_step(const module *m)
{
    dp_value log;
    dp_scope *scope = dp_scope_begin(m->ctx);
    dp_tensor x = dp_wrap_const(m->images, DP_F32, DP_SHAPE(BATCH, INPUTS));
    dp_value batch = DP_DICT(scope, {"x", dp_of(scope, &x)});
    must(dp_train_step(m->par, scope, batch, m->optim, &log));
    dp_scope_end(scope);
}

static void module_close(module *m)
{
    if (m->ctx == NULL)
        return;
    dp_close(m->ctx);
    free(m->images);
}

/* ---- two processes with one device each ------------------------------------------------------ */

typedef struct trainer {
    const model *model;
    float *params, *grads; /* one block each */
    size_t count;
    mlp mlp;
    gpt gpt;
    uint8_t tokens[GPT_ROWS * GPT_CONTEXT];
    dp_reducer *reducer;
    bool reduces; /* in this round */
} trainer;

typedef struct order {
    char how[16];
    int model, steps;
} order;

typedef struct job {
    duo duo;
    trainer trainers[MODELS];
    module modules[MODELS];
    atomic_int *met; /* of each process: steps at whose end it was */
} job;

static void ready(void *user, int unit)
{
    const trainer *t = user;
    if (t->reduces)
        must(dp_reducer_ready(t->reducer, 0, (uint32_t)unit, NULL));
}

static bool is_gpt(const trainer *t)
{
    return t->model->shape.layers > 0;
}

static size_t mlp_ranges(trainer *t, dp_range *ranges)
{
    t->mlp = mlp_of(t->model->width, HALF);
    t->mlp.input = new_floats(sizeof(float) * HALF * INPUTS);
    for (int l = 0; l < LAYERS; l++) {
        size_t count = weights_of(&t->mlp, l), bytes = outputs_of(&t->mlp, l) * sizeof(float);
        ranges[l] = (dp_range){.unit = (uint32_t)l, .first = t->count, .count = count};
        t->mlp.x[l] = new_floats(bytes);
        t->mlp.d[l] = new_floats(bytes);
        t->count += count;
    }
    return LAYERS;
}

/* Unit l is layer l, as in examples/reduce_gpt.c. */
static size_t gpt_ranges(trainer *t, dp_range *ranges)
{
    const gpt_shape *shape = &t->model->shape;
    size_t n = 0;
    for (int tensor = 0; tensor < GPT_TENSORS; tensor++) {
        bool layered = tensor != GPT_EMBED && tensor != GPT_PLACE;
        size_t parts = layered ? (size_t)shape->layers : 1;
        size_t count = gpt_count(shape, tensor) / parts;
        for (uint32_t l = 0; l < parts; l++) {
            uint32_t unit = layered ? l : (uint32_t)shape->layers;
            ranges[n++] = (dp_range){.unit = unit, .first = t->count, .count = count};
            t->count += count;
        }
    }
    return n;
}

static void point_mlp(trainer *t, const dp_range *ranges)
{
    for (int l = 0; l < LAYERS; l++) {
        t->mlp.w[l] = t->params + ranges[l].first;
        t->mlp.grads[l] = t->grads + ranges[l].first;
    }
    t->gpt.params[0] = t->params; /* for the update */
    t->gpt.grads[0] = t->grads;
}

static void point_gpt(trainer *t)
{
    if (!gpt_tape_create(&t->gpt, &t->model->shape, GPT_ROWS))
        abort();
    gpt_point(t->gpt.params, &t->model->shape, t->params);
    gpt_point(t->gpt.grads, &t->model->shape, t->grads);
    t->gpt.layer_done = ready;
    t->gpt.user = t;
    for (size_t i = 0; i < sizeof(t->tokens); i++)
        t->tokens[i] = (uint8_t)(i % 64);
}

static void trainer_create(trainer *t, const model *m, dp_ctx *ctx)
{
    dp_range ranges[MAX_RANGES];
    *t = (trainer){.model = m};
    size_t range_count = is_gpt(t) ? gpt_ranges(t, ranges) : mlp_ranges(t, ranges);
    t->params = new_floats(t->count * sizeof(float));
    t->grads = dp_shared_alloc(dp_scope_begin(ctx), t->count * sizeof(float));
    begin_weights(t->params, t->count);
    if (is_gpt(t))
        point_gpt(t);
    else
        point_mlp(t, ranges);
    const dp_block block = {DP_F32, t->count, (void *[]){t->grads}};
    must(dp_reducer_create(ctx,
                           &(dp_reducer_config){.blocks = &block,
                                                .block_count = 1,
                                                .ranges = ranges,
                                                .range_count = range_count,
                                                .reduction = DP_MEAN_RANKS,
                                                .buckets.bytes = (size_t)4 << 20},
                           &t->reducer));
}

static void zero_grads(trainer *t)
{
    if (is_gpt(t))
        gpt_zero_grad(&t->gpt);
    else
        memset(t->grads, 0, t->count * sizeof(float));
}

static void pass(trainer *t)
{
    const float loss_grad = 1.0f / HALF;
    if (is_gpt(t)) {
        gpt_forward(&t->gpt, t->tokens, t->tokens, GPT_ROWS);
        gpt_backward(&t->gpt);
        return;
    }
    mlp_forward(&t->mlp);
    mlp_loss_back(&t->mlp, &loss_grad, 0);
    for (int l = LAYERS; l-- > 0;) {
        mlp_layer_back(&t->mlp, l);
        ready(t, l);
    }
}

static void meet(const job *j)
{
    int process = j->duo.process, now = 1 + atomic_fetch_add(&j->met[16 * process], 1);
    while (atomic_load(&j->met[16 * !process]) < now)
        ;
}

static void trainer_step(const job *j, trainer *t, bool meets)
{
    zero_grads(t);
    if (t->reduces)
        must(dp_reducer_begin(t->reducer, NULL));
    pass(t);
    if (t->reduces)
        must(dp_reducer_finish(t->reducer));
    if (meets)
        meet(j);
    gpt_update(&t->gpt, rate, 0, t->count);
}

static void trainer_free(trainer *t)
{
    for (int l = 0; l < LAYERS; l++) {
        free(t->mlp.x[l]);
        free(t->mlp.d[l]);
    }
    free((void *)(uintptr_t)t->mlp.input);
    free(t->gpt.tape);
    free(t->params);
}

/* ---- what is asked for ----------------------------------------------------------------------- */

static double train_on_devices(module *m, const order *now)
{
    double start = 0;
    if (m->ctx == NULL)
        module_open(m, models[now->model].width);
    for (int i = -1; i < now->steps; i++) {
        if (i == 0)
            start = now_ns();
        module_step(m);
    }
    return (now_ns() - start) / now->steps;
}

/* Both processes begin at the same time. */
static double train_in_processes(job *j, const order *now)
{
    char here = 0;
    trainer *t = &j->trainers[now->model];
    bool meets = strcmp(now->how, "meeting") == 0;
    t->reduces = strcmp(now->how, "processes") == 0;
    trainer_step(j, t, meets);
    if (!duo_send(&j->duo, &here, 1) || !duo_receive(&j->duo, &here, 1))
        exit(EXIT_FAILURE);
    double start = now_ns();
    for (int i = 0; i < now->steps; i++)
        trainer_step(j, t, meets);
    return (now_ns() - start) / now->steps;
}

static double not_hidden(const trainer *t)
{
    dp_reducer_info info;
    must(dp_reducer_info_get(t->reducer, &info));
    return 100 * (1 - info.last.hidden_s / info.last.travel_s);
}

static double serve(job *j, order *now)
{
    if (strcmp(now->how, "devices") == 0)
        return train_on_devices(&j->modules[now->model], now);
    if (strcmp(now->how, "hidden") == 0)
        return not_hidden(&j->trainers[now->model]);
    if (!duo_send(&j->duo, now, sizeof(*now)))
        exit(EXIT_FAILURE);
    return train_in_processes(j, now);
}

static int model_of(int width)
{
    for (int i = 0; i < MODELS; i++) {
        if (models[i].width == width)
            return i;
    }
    return -1;
}

static void lead(job *j)
{
    char line[128];
    order now = {0}, end = {0};
    int width;
    printf("ready %s\n", openblas_get_config());
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        if (sscanf(line, "%15s %d %d", now.how, &width, &now.steps) != 3)
            break;
        now.model = model_of(width);
        if (now.model < 0)
            break;
        printf("%.1f\n", serve(j, &now));
        fflush(stdout);
    }
    duo_send(&j->duo, &end, sizeof(end));
}

static void follow(job *j)
{
    order now;
    while (duo_receive(&j->duo, &now, sizeof(now)) && now.steps > 0)
        train_in_processes(j, &now);
    _exit(EXIT_SUCCESS);
}

int main(void)
{
    static job j;
    openblas_set_num_threads(1);
    j.met = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.met == MAP_FAILED)
        abort();
    duo_open(&j.duo);
    for (int i = 0; i < MODELS; i++)
        trainer_create(&j.trainers[i], &models[i], j.duo.ctx);
    if (j.duo.process == 1)
        follow(&j);
    lead(&j);
    duo_close(&j.duo);
    for (int i = 0; i < MODELS; i++) {
        module_close(&j.modules[i]);
        trainer_free(&j.trainers[i]);
    }
    munmap(j.met, 4096);
    return 0;
}
