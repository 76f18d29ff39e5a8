/* bench_reduce.c - C8, C14: training steps of two processes with one device each, against the same
   two processes that never talk to each other. The limit: they wait for each other at the end of
   each step, with nothing to add. */

#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../../examples/gpt.h"
#include "bench.h"

enum { MLP_LAYERS = 3, MLP_ROWS = 128, GPT_ROWS = 4, CLASSES = 10 };

typedef struct model {
    const char *name;
    int width;       /* of the MLP's hidden layers; 0: a GPT */
    gpt_shape shape; /* of the GPT */
    int steps;       /* of a round */
    double at_least;
} model;

static const model models[] = {
    {"C8 MLP 784-1024-1024-10, 2 processes", 1024, {0}, 2, 0.97},
    {"C8 MLP 784-256-256-10, 2 processes", 256, {0}, 10, 0.97},
    {"C14 GPT of 0.1 M parameters, 2 processes", 0, {2, 2, 64, 32, 64}, 10, 0.95},
    {"C14 GPT of 10 M parameters, 2 processes", 0, {8, 4, 320, 32, 64}, 1, 0.95}};

typedef struct trainer {
    duo duo;
    const model *model;
    float *params, *grads; /* one block each */
    size_t count;
    int sizes[MLP_LAYERS + 1];
    float *x[MLP_LAYERS + 1], *d[MLP_LAYERS + 1]; /* of the MLP: activations, their gradients */
    gpt gpt;
    uint8_t tokens[GPT_ROWS * 32];
    dp_reducer *reducer;
    bool reduces, meets; /* in this round */
    atomic_int *met;     /* of each process: steps at whose end it was */
} trainer;

static void ready(void *user, int unit)
{
    const trainer *t = user;
    if (t->reduces)
        must(dp_reducer_ready(t->reducer, 0, (uint32_t)unit, NULL));
}

/* ---- the models ------------------------------------------------------------------------------ */

static size_t mlp_ranges(trainer *t, dp_range *ranges)
{
    const int sizes[] = {784, t->model->width, t->model->width, CLASSES};
    for (int l = 0; l < MLP_LAYERS; l++) {
        size_t count = (size_t)sizes[l] * (size_t)sizes[l + 1];
        ranges[l] = (dp_range){.unit = (uint32_t)l, .first = t->count, .count = count};
        t->count += count;
    }
    for (int l = 0; l <= MLP_LAYERS; l++) {
        t->sizes[l] = sizes[l];
        t->x[l] = new_floats((size_t)(MLP_ROWS * sizes[l]) * sizeof(float));
        t->d[l] = new_floats((size_t)(MLP_ROWS * sizes[l]) * sizeof(float));
    }
    return MLP_LAYERS;
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

static void model_create(trainer *t)
{
    dp_range ranges[GPT_TENSORS * GPT_MAX_LAYERS];
    size_t range_count = t->model->width > 0 ? mlp_ranges(t, ranges) : gpt_ranges(t, ranges);
    t->params = new_floats(t->count * sizeof(float));
    t->grads = dp_shared_alloc(dp_scope_begin(t->duo.ctx), t->count * sizeof(float));
    for (size_t i = 0; i < t->count; i++)
        t->params[i] = 0.01f * (float)((i * 7 + (i >> 5)) % 11) - 0.05f;
    t->gpt.params[0] = t->params; /* for the update */
    t->gpt.grads[0] = t->grads;
    if (t->model->width == 0) {
        if (!gpt_tape_create(&t->gpt, &t->model->shape, GPT_ROWS))
            abort();
        gpt_point(t->gpt.params, &t->model->shape, t->params);
        gpt_point(t->gpt.grads, &t->model->shape, t->grads);
        t->gpt.layer_done = ready;
        t->gpt.user = t;
        for (size_t i = 0; i < sizeof(t->tokens); i++)
            t->tokens[i] = (uint8_t)(i % 64);
    }
    const dp_block block = {DP_F32, t->count, (void *[]){t->grads}};
    must(dp_reducer_create(t->duo.ctx,
                           &(dp_reducer_config){.blocks = &block,
                                                .block_count = 1,
                                                .ranges = ranges,
                                                .range_count = range_count,
                                                .reduction = DP_MEAN_RANKS,
                                                .buckets.bytes = (size_t)4 << 20},
                           &t->reducer));
}

static void mlp_pass(trainer *t)
{
    const size_t last = (size_t)(MLP_ROWS * CLASSES);
    float *w = t->params, *gw = t->grads + t->count;
    for (int l = 0; l < MLP_LAYERS; l++) {
        int in = t->sizes[l], out = t->sizes[l + 1];
        gpt_matmul(t->x[l + 1], t->x[l], w, MLP_ROWS, in, out, 0);
        for (int i = 0; l + 1 < MLP_LAYERS && i < MLP_ROWS * out; i++)
            t->x[l + 1][i] = t->x[l + 1][i] > 0 ? t->x[l + 1][i] : 0;
        w += (size_t)in * (size_t)out;
    }
    for (size_t i = 0; i < last; i++)
        t->d[MLP_LAYERS][i] = (t->x[MLP_LAYERS][i] - (float)(i % CLASSES)) * 1e-4f;
    for (int l = MLP_LAYERS; l-- > 0;) {
        int in = t->sizes[l], out = t->sizes[l + 1];
        w -= (size_t)in * (size_t)out;
        gw -= (size_t)in * (size_t)out;
        gpt_matmul_back(t->d[l], gw, t->d[l + 1], t->x[l], w, MLP_ROWS, in, out);
        for (int i = 0; l > 0 && i < MLP_ROWS * in; i++)
            t->d[l][i] = t->x[l][i] > 0 ? t->d[l][i] : 0;
        ready(t, l);
    }
}

static void meet(const trainer *t)
{
    int now = 1 + atomic_fetch_add(&t->met[16 * t->duo.process], 1);
    while (atomic_load(&t->met[16 * !t->duo.process]) < now)
        ;
}

static void step(trainer *t)
{
    if (t->model->width > 0)
        memset(t->grads, 0, t->count * sizeof(float));
    else
        gpt_zero_grad(&t->gpt);
    if (t->reduces)
        must(dp_reducer_begin(t->reducer, NULL));
    if (t->model->width > 0) {
        mlp_pass(t);
    } else {
        gpt_forward(&t->gpt, t->tokens, t->tokens, GPT_ROWS);
        gpt_backward(&t->gpt);
    }
    if (t->reduces)
        must(dp_reducer_finish(t->reducer));
    if (t->meets)
        meet(t);
    gpt_update(&t->gpt, 1e-3f, 0, t->count);
}

/* ---- both processes -------------------------------------------------------------------------- */

typedef enum order { END, ALONE, MEETING, TOGETHER } order;

/* Both begin at the same time. */
static double serve(trainer *t, order now)
{
    char here = 0;
    t->reduces = now == TOGETHER;
    t->meets = now == MEETING;
    step(t);
    if (!duo_send(&t->duo, &here, 1) || !duo_receive(&t->duo, &here, 1))
        return -1;
    double start = now_ns();
    for (int i = 0; i < t->model->steps; i++)
        step(t);
    return (now_ns() - start) / t->model->steps;
}

static double ask(trainer *t, order now)
{
    return duo_send(&t->duo, &now, sizeof(now)) ? serve(t, now) : -1;
}

static double alone_once(void *user)
{
    return ask(user, ALONE);
}

static double meeting_once(void *user)
{
    return ask(user, MEETING);
}

static double together_once(void *user)
{
    return ask(user, TOGETHER);
}

static void follow(trainer *t)
{
    order now;
    while (duo_receive(&t->duo, &now, sizeof(now)) && now != END)
        serve(t, now);
    _exit(EXIT_SUCCESS);
}

static void trainer_free(trainer *t)
{
    for (int l = 0; l <= MLP_LAYERS; l++) {
        free(t->x[l]);
        free(t->d[l]);
    }
    free(t->gpt.tape);
    free(t->params);
    munmap(t->met, 4096);
}

/* torch's DistributedDataParallel does the same; asked for the MLPs alone. */
static double torch_once(const trainer *t, const char *how)
{
    peer_process *torch = t->model->width > 0 ? peer_of("torch", bench.directory) : NULL;
    return torch != NULL ? peer_ask(torch, how, (size_t)t->model->width, t->model->steps) : -1;
}

static double torch_together_once(void *user)
{
    return torch_once(user, "together");
}

static double torch_alone_once(void *user)
{
    return torch_once(user, "alone");
}

static void rows_of(const model *m)
{
    static trainer t;
    char what[96];
    order end = END;
    dp_reducer_info info;
    t = (trainer){.model = m};
    t.met = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (t.met == MAP_FAILED)
        abort();
    duo_open(&t.duo);
    model_create(&t);
    if (t.duo.process == 1)
        follow(&t);
    entrant e[] = {{.once = together_once, .user = &t},
                   {.once = alone_once, .user = &t},
                   {.once = torch_together_once, .user = &t},
                   {.once = torch_alone_once, .user = &t},
                   {.once = meeting_once, .user = &t}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_speed(m->name, &e[0].times, &e[1].times, &e[4].times, m->at_least);
    if (m->width > 0)
        report_peer("C8   torch DDP over gloo, likewise", &e[2].times, &e[3].times);
    must(dp_reducer_info_get(t.reducer, &info));
    snprintf(what, sizeof(what), "%.3s   of its communication not hidden", m->name);
    report_count(what, (int)(100 * (1 - info.last.hidden_s / info.last.travel_s)), 100, " %");
    duo_send(&t.duo, &end, sizeof(end));
    duo_close(&t.duo);
    trainer_free(&t);
}

void rows_c8(void)
{
    rows_of(&models[0]);
    rows_of(&models[1]);
}

void rows_c14(void)
{
    rows_of(&models[2]);
    rows_of(&models[3]);
}
