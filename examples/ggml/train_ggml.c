/* train_ggml.c - a net of ggml, trained by ggml-opt on all devices of all processes. Lines with "+"
   are what it needs for that; the rest is as in ggml's own example of MNIST.

   Build: cc -std=c11 -O2 -c examples/dp.c
          cc -std=c11 -O2 examples/ggml/train_ggml.c dp.o -o train_ggml
              $(pkg-config --cflags --libs ggml) -lggml-base -lggml-cpu -lpthread -lm
   Run:   DP_DEVICES=2 ./train_ggml, dprun -n 2 ./train_ggml, or mpirun -np 2 ./train_ggml
   Prints:
   epoch 0: loss ..., ... % right
   epoch 1: loss ..., ... % right
   epoch 2: loss ..., ... % right */

#include "../../dp_save.h"
#include "../pictures.h"
#include "dp_ggml.h"
#include <ggml-cpu.h>
#include <gguf.h>
#include <math.h>

enum { HIDDEN = 500, BATCH = 512, BATCHES = PICTURES / BATCH, EPOCHS = 3, WEIGHTS = 4 };

typedef struct net {
    ggml_backend_t backend;
    ggml_backend_sched_t sched;
    struct ggml_context *fixed, *graph; /* weights and inputs; all else */
    ggml_backend_buffer_t memory;
    struct ggml_tensor *weights[WEIGHTS], *images, *logits;
} net;

/* ---- the model, which knows of one thread ---------------------------------------------------- */

static struct ggml_context *context_of(size_t bytes)
{
    return ggml_init((struct ggml_init_params){.mem_size = bytes, .no_alloc = true});
}

static struct ggml_tensor *weight(net *n, const char *name, int64_t in, int64_t out)
{
    struct ggml_tensor *w = ggml_new_tensor_2d(n->fixed, GGML_TYPE_F32, in, out);
    ggml_set_param(w);
    return ggml_set_name(w, name);
}

static void randomize(struct ggml_tensor *w, unsigned seed)
{
    float *numbers = ggml_get_data_f32(w), range = 1 / sqrtf((float)w->ne[0]);
    for (int64_t i = 0; i < ggml_nelements(w); i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = w->ne[1] > 1 ? range * ((float)(seed >> 8) / (1 << 23) - 1) : 0;
    }
}

/* fc2(relu(fc1(x))) */
static struct ggml_tensor *graph_of(const net *n)
{
    struct ggml_context *g = n->graph;
    struct ggml_tensor *const *w = n->weights;
    struct ggml_tensor *hidden = ggml_add(g, ggml_mul_mat(g, w[0], n->images), w[1]);
    return ggml_add(g, ggml_mul_mat(g, w[2], ggml_relu(g, hidden)), w[3]);
}

static void build(net *n, int rows)
{
    n->backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(n->backend, 1); /* + each rank has a core */
    n->sched = ggml_backend_sched_new(&n->backend, NULL, 1, GGML_DEFAULT_GRAPH_SIZE, false, true);
    n->fixed = context_of(16 * ggml_tensor_overhead());
    n->graph = context_of(GGML_DEFAULT_GRAPH_SIZE * ggml_tensor_overhead() +
                          3 * ggml_graph_overhead_custom(GGML_DEFAULT_GRAPH_SIZE, true));
    n->weights[0] = weight(n, "fc1.weight", PIXELS, HIDDEN);
    n->weights[1] = weight(n, "fc1.bias", HIDDEN, 1);
    n->weights[2] = weight(n, "fc2.weight", HIDDEN, CLASSES);
    n->weights[3] = weight(n, "fc2.bias", CLASSES, 1);
    n->images = ggml_new_tensor_2d(n->fixed, GGML_TYPE_F32, PIXELS, rows);
    ggml_set_input(n->images);
    n->memory = ggml_backend_alloc_ctx_tensors(n->fixed, n->backend);
    for (int i = 0; i < WEIGHTS; i++)
        randomize(n->weights[i], (unsigned)i);
    n->logits = graph_of(n);
    ggml_set_output(n->logits);
}

static void unbuild(const net *n)
{
    ggml_backend_sched_free(n->sched);
    ggml_backend_buffer_free(n->memory);
    ggml_free(n->graph);
    ggml_free(n->fixed);
    ggml_backend_free(n->backend);
}

/* ---- a rank, which has a model of its own ---------------------------------------------------- */

/* Takes from each batch the rows of a rank. */
static ggml_opt_dataset_t dataset_of(int rank, int rows)
{
    ggml_opt_dataset_t data = ggml_opt_dataset_init(GGML_TYPE_F32, GGML_TYPE_F32, PIXELS, CLASSES,
                                                    (int64_t)BATCHES * rows, rows);
    float *x = ggml_get_data_f32(ggml_opt_dataset_data(data));
    float *y = ggml_get_data_f32(ggml_opt_dataset_labels(data));
    for (int i = 0; i < BATCHES * rows; i++, x += PIXELS, y += CLASSES) {
        int from = i / rows * BATCH + rank * rows + i % rows; /* + alone, it is i */
        memcpy(x, pictures[from], sizeof pictures[0]);
        for (int c = 0; c < CLASSES; c++)
            y[c] = c == labels[from];
    }
    return data;
}

static dp_status train_epoch(dp_ggml *own, ggml_opt_context_t opt, ggml_opt_dataset_t data,
                             double means[2])
{
    ggml_opt_result_t result = ggml_opt_result_init();
    ggml_opt_dataset_shuffle(opt, data, -1); /* whole batches: the same in all ranks */
    for (int i = 0; i < BATCHES && own->status == DP_OK; i++) {
        ggml_opt_alloc(opt, true);
        ggml_opt_dataset_get_batch(data, ggml_opt_inputs(opt), ggml_opt_labels(opt), i);
        ggml_opt_eval(opt, result);
    }
    ggml_opt_result_loss(result, &means[0], NULL);
    ggml_opt_result_accuracy(result, &means[1], NULL);
    ggml_opt_result_free(result);
    DP_TRY(own->status);
    return dp_rank_all_reduce(own->ctx, means, means, 2, DP_F64, DP_OP_MEAN); /* + the job's */
}

static dp_status train(dp_ctx *ctx, int rank, const net *n, ggml_opt_dataset_t data)
{
    struct ggml_opt_params params =
        ggml_opt_default_params(n->sched, GGML_OPT_LOSS_TYPE_CROSS_ENTROPY);
    params.ctx_compute = n->graph;
    params.inputs = n->images;
    params.outputs = n->logits;
    ggml_opt_context_t opt = ggml_opt_init(params);
    dp_ggml own;
    double means[2];
    dp_ggml_begin(&own, ctx, n->sched);                    /* + */
    dp_status status = dp_ggml_share(ctx, rank, n->fixed); /* + */
    for (int e = 0; e < EPOCHS && status == DP_OK; e++) {
        status = train_epoch(&own, opt, data, means);
        if (status == DP_OK && rank == 0)
            printf("epoch %d: loss %.6f, %.1f %% right\n", e, means[0], 100 * means[1]);
    }
    ggml_opt_free(opt);
    return status;
}

typedef struct job {
    dp_ctx *ctx;
    net nets[64]; /* of the ranks here */
    int rows;     /* of a batch, for each */
} job;

static dp_status train_rank(int local_rank, dp_scope *scope, void *user)
{
    const job *of = user;
    int rank = dp_rank(of->ctx) + local_rank;
    (void)scope;
    ggml_opt_dataset_t data = dataset_of(rank, of->rows);
    dp_status status = train(of->ctx, rank, &of->nets[local_rank], data);
    ggml_opt_dataset_free(data);
    return status;
}

/* ---- what it has learned --------------------------------------------------------------------- */

static bool save_gguf(const net *n, const char *file)
{
    struct gguf_context *out = gguf_init_empty();
    for (int i = 0; i < WEIGHTS; i++)
        gguf_add_tensor(out, n->weights[i]);
    bool saved = gguf_write_to_file(out, file, false);
    gguf_free(out);
    return saved;
}

/* Writes sizes in the order of C: ggml has the one that runs fastest first. */
static dp_status save_safetensors(dp_ctx *ctx, const net *n, const char *file)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_pair all[WEIGHTS];
    for (int i = 0; i < WEIGHTS; i++) {
        const struct ggml_tensor *w = n->weights[i];
        const int64_t sizes[] = {w->ne[1], w->ne[0]};
        int dims = ggml_n_dims(w);
        all[i] = (dp_pair){w->name, dp_array(scope, w->data, DP_F32, dims, &sizes[2 - dims])};
    }
    dp_status status = dp_checkpoint_save(ctx, file, dp_dict_make(scope, all, WEIGHTS));
    dp_scope_end(scope);
    return status;
}

int main(int argc, char **argv)
{
    static job of;
    dp_info info;
    load_pictures();
    DP_CHECK(dp_open(NULL, &of.ctx)); /* + */
    DP_CHECK(dp_info_get(of.ctx, &info));
    if (BATCH % info.rank_count != 0 || info.local_count > 64) {
        fprintf(stderr, "%d rows are not the same for %d ranks\n", BATCH, info.rank_count);
        return 1;
    }
    of.rows = BATCH / info.rank_count;
    for (int r = 0; r < info.local_count; r++)
        build(&of.nets[r], of.rows);
    DP_CHECK(dp_run(of.ctx, NULL, train_rank, &of)); /* + on each device of this process */
    if (argc > 1 && info.process == 0 && !save_gguf(&of.nets[0], argv[1]))
        fprintf(stderr, "%s was not written\n", argv[1]);
    if (argc > 2)
        DP_CHECK(save_safetensors(of.ctx, &of.nets[0], argv[2]));
    for (int r = 0; r < info.local_count; r++)
        unbuild(&of.nets[r]);
    dp_close(of.ctx);
    return 0;
}
