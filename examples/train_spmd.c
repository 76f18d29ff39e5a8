/* train_spmd.c - a trainer that does forward, backward and step in one function keeps its loop.

   Each rank runs it, with parameters of its own, on rows of its own. One line is new: the gradients
   become their mean over all ranks, which are the devices of all processes. Each rank has as many
   rows, so the mean over ranks is that over rows, and what is learned does not depend on how many
   ranks there are.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/train_spmd.c dp.o -o train_spmd -lpthread -lm
   Run:   ./train_spmd, or mpirun -np 2 ./train_spmd, or dprun -n 2 ./train_spmd
   Prints:
   step 0: loss 2.303, ... % right
   step 16: loss ..., ... % right
   step 32: loss ..., ... % right
   step 48: loss ..., ... % right
   step 64: loss ..., ... % right */

#include "../dp.h"
#include "pictures.h"
#include <math.h>
#include <string.h>

enum { BATCH = 840, STEPS = 65, FLOATS = PIXELS * CLASSES + CLASSES };

typedef struct model { /* a layer and its softmax; gradients are the same */
    float w[PIXELS][CLASSES], b[CLASSES];
} model;

typedef struct gradient {
    model of;
    float loss, right; /* travel with it */
} gradient;

/* From some rows to the mean of their gradients: plain C, which knows of one thread. */
static void forward_and_backward(const model *net, float (*x)[PIXELS], const int64_t *label,
                                 int rows, gradient *out)
{
    memset(out, 0, sizeof *out);
    for (int i = 0; i < rows; i++) {
        float p[CLASSES], sum = 0;
        int best = 0;
        memcpy(p, net->b, sizeof p);
        for (int k = 0; k < PIXELS; k++)
            for (int c = 0; c < CLASSES; c++)
                p[c] += x[i][k] * net->w[k][c];
        for (int c = 0; c < CLASSES; c++) {
            best = p[c] > p[best] ? c : best;
            sum += expf(p[c]);
        }
        out->loss += (logf(sum) - p[label[i]]) / (float)rows;
        out->right += (float)(best == label[i]) / (float)rows;
        for (int c = 0; c < CLASSES; c++) {
            float d = (expf(p[c]) / sum - (float)(c == label[i])) / (float)rows;
            out->of.b[c] += d;
            for (int k = 0; k < PIXELS; k++)
                out->of.w[k][c] += d * x[i][k];
        }
    }
}

static void step(model *net, const model *grad, float lr)
{
    for (int c = 0; c < CLASSES; c++) {
        net->b[c] -= lr * grad->b[c];
        for (int k = 0; k < PIXELS; k++)
            net->w[k][c] -= lr * grad->w[k][c];
    }
}

/* The whole loop, on the thread of each local rank. */
static dp_status train(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    int rank = dp_rank(ctx) + local_rank, rows = BATCH / dp_rank_count(ctx);
    model *net = dp_scope_alloc(scope, sizeof *net);
    gradient *grad = dp_scope_alloc(scope, sizeof *grad);
    if (net == NULL || grad == NULL)
        return DP_ERR_NO_MEMORY;
    memset(net, 0, sizeof *net); /* else: dp_rank_broadcast(ctx, net, FLOATS, DP_F32, 0) */
    for (int i = 0; i < STEPS; i++) {
        int first = i * BATCH % (PICTURES - BATCH) + rank * rows;
        forward_and_backward(net, &pictures[first], &labels[first], rows, grad);
        DP_TRY(dp_rank_all_reduce(ctx, grad, grad, FLOATS + 2, DP_F32, DP_OP_MEAN)); /* new */
        step(net, &grad->of, 0.05f);
        if (rank == 0 && i % 16 == 0)
            printf("step %d: loss %.3f, %.0f %% right\n", i, (double)grad->loss,
                   100 * (double)grad->right);
    }
    return DP_OK;
}

int main(void)
{
    dp_ctx *ctx;
    load_pictures();
    DP_CHECK(dp_open(NULL, &ctx));
    if (BATCH % dp_rank_count(ctx) != 0) {
        fprintf(stderr, "%d rows cannot be divided by %d ranks\n", BATCH, dp_rank_count(ctx));
        return 1;
    }
    DP_CHECK(dp_run(ctx, NULL, train, ctx));
    dp_close(ctx);
    return 0;
}
