/* train_darknet.c - darknet's trainer on all devices of all processes, with darknet as it is: one
   network a device. They begin with the same weights, and make each step with the same gradients.

   Build: cc -std=c11 -O2 -c examples/dp.c
          cc -std=gnu11 -O2 -Idarknet/include examples/darknet/train_darknet.c dp.o
              darknet/libdarknet.a -o train_darknet -lpthread -lm
   Run:   DP_DEVICES=2 ./train_darknet examples/darknet/pictures.cfg, or under dprun or mpirun
   Prints:
   epoch 0: loss ...
   epoch 1: loss ...
   epoch 2: loss ... */

#include <darknet.h>
#include "../../dp.h"
#include "../pictures.h"
#include <string.h>

enum { EPOCHS = 3 };

/* ---- one network a device -------------------------------------------------------------------- */

typedef dp_status reduce_fn(dp_ctx *ctx, float *numbers, int count);

static dp_status mean(dp_ctx *ctx, float *numbers, int count)
{
    return dp_rank_all_reduce(ctx, numbers, numbers, (size_t)count, DP_F32, DP_OP_MEAN);
}

static dp_status of_rank_0(dp_ctx *ctx, float *numbers, int count)
{
    return dp_rank_broadcast(ctx, numbers, (size_t)count, DP_F32, 0);
}

/* Passes over what layers learn, or what they are to be changed by. A kind of layer with more of
   it, such as batch norm or rnn, adds that here. */
static dp_status each(dp_ctx *ctx, const network *net, bool updates, reduce_fn *reduce)
{
    for (int i = 0; i < net->n; i++) {
        const layer *l = &net->layers[i];
        bool full = l->type == CONNECTED;
        if (l->weight_updates == NULL)
            continue;
        DP_TRY(reduce(ctx, updates ? l->weight_updates : l->weights,
                      full ? l->inputs * l->outputs : l->nweights));
        DP_TRY(reduce(ctx, updates ? l->bias_updates : l->biases, full ? l->outputs : l->n));
    }
    return DP_OK;
}

/* Does what train_network_datum does, with one line more. Momentum lies in the updates, too, and is
   the same in all. */
static dp_status train_datum(dp_ctx *ctx, network *net)
{
    *net->seen += (size_t)net->batch;
    net->train = 1;
    forward_network(net);
    backward_network(net);
    if (*net->seen / (size_t)net->batch % (size_t)net->subdivisions != 0)
        return DP_OK;
    DP_TRY(each(ctx, net, true, mean));
    update_network(net);
    return DP_OK;
}

/* ---- the program ----------------------------------------------------------------------------- */

typedef struct job {
    dp_ctx *ctx;
    network *nets[64]; /* of the ranks here */
    int batch;         /* of all ranks together */
} job;

static void read_rows(const network *net, int first)
{
    memset(net->truth, 0, (size_t)(net->batch * CLASSES) * sizeof(float));
    memcpy(net->input, pictures[first], (size_t)net->batch * sizeof pictures[0]);
    for (int i = 0; i < net->batch; i++)
        net->truth[i * CLASSES + (int)labels[first + i]] = 1;
}

static dp_status train_epoch(const job *of, int rank, network *net, float *loss)
{
    int steps = PICTURES / of->batch;
    for (int i = 0; i < steps; i++) {
        read_rows(net, i * of->batch + rank * net->batch);
        DP_TRY(train_datum(of->ctx, net));
        *loss += *net->cost / (float)(net->batch * steps);
    }
    return mean(of->ctx, loss, 1);
}

static dp_status train_rank(int local_rank, dp_scope *scope, void *user)
{
    const job *of = user;
    int rank = dp_rank(of->ctx) + local_rank;
    (void)scope;
    DP_TRY(each(of->ctx, of->nets[local_rank], false, of_rank_0));
    for (int e = 0; e < EPOCHS; e++) {
        float loss = 0;
        DP_TRY(train_epoch(of, rank, of->nets[local_rank], &loss));
        if (rank == 0)
            printf("epoch %d: loss %.6f\n", e, (double)loss);
    }
    return DP_OK;
}

/* Loads one network after the other: what draws their weights, rand() and a static variable, is not
   for several threads. */
static bool load_networks(job *of, char *config, const dp_info *info)
{
    for (int r = 0; r < info->local_count; r++) {
        network *net = of->nets[r] = load_network(config, NULL, 0);
        of->batch = net->batch;
        if (of->batch % info->rank_count != 0)
            return false;
        set_batch_network(net, of->batch / info->rank_count);
    }
    return true;
}

int main(int argc, char **argv)
{
    static job of;
    dp_info info;
    load_pictures();
    DP_CHECK(dp_open(NULL, &of.ctx));
    DP_CHECK(dp_info_get(of.ctx, &info));
    if (argc < 2 || info.local_count > 64 || !load_networks(&of, argv[1], &info)) {
        fprintf(stderr, "usage: train_darknet CONFIG, with a batch that ranks divide\n");
        return 1;
    }
    DP_CHECK(dp_run(of.ctx, NULL, train_rank, &of));
    if (argc > 2 && info.process == 0)
        save_weights(of.nets[0], argv[2]);
    for (int r = 0; r < info.local_count; r++)
        free_network(of.nets[r]);
    dp_close(of.ctx);
    return 0;
}
