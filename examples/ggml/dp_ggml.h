/* dp_ggml.h - ggml-opt on many devices, with ggml as it is: between backward and the optimizer's
   step, gradients become their mean over all ranks.

   Each rank is a whole trainer, in a function under dp_run: it has a backend, a scheduler, a model
   and an optimizer of its own, and its rows of each batch. See train_ggml.c.

       dp_ggml_begin(&own, ctx, sched);          before the first ggml_opt_eval
       dp_ggml_share(ctx, rank, weights);        all begin with the weights of rank 0
       ...                                       ggml_opt_alloc, _get_batch and _eval, as ever
       DP_TRY(own.status);                       after each

   Each rank has as many rows: the loss is a mean over them. Gradients travel when backward has
   ended, not during it. After an error no step is made any more, but a parameter may have made one
   with its rank's gradient: load what was saved. `ctx` is on CPUs; gradients in other memory go
   through the host's. */

#ifndef DP_GGML_H
#define DP_GGML_H

#include "../../dp.h"
#include <ggml-backend.h>
#include <ggml-opt.h>
#include <ggml.h>
#include <stdlib.h>
#include <string.h>

typedef struct dp_ggml {
    dp_ctx *ctx;
    dp_status status; /* of the first reduction that failed; from then on no step is made */
    /* the rest is its own */
    const struct ggml_tensor *asked, *computed; /* the last ones before the optimizer's */
    char boundary[GGML_MAX_NAME]; /* the name of the last one of backward; "": not known yet */
} dp_ggml;

/* Reduces a tensor over all ranks, in whichever memory it is. */
static inline dp_status dp_ggml_all_reduce(dp_ctx *ctx, struct ggml_tensor *tensor, dp_op op)
{
    size_t count = (size_t)ggml_nelements(tensor), bytes = ggml_nbytes(tensor);
    if (tensor->type != GGML_TYPE_F32 || bytes != count * sizeof(float))
        return dp_error(DP_ERR_UNSUPPORTED, "'%s' is not f32 without gaps", tensor->name);
    if (ggml_backend_buffer_is_host(tensor->buffer))
        return dp_rank_all_reduce(ctx, tensor->data, tensor->data, count, DP_F32, op);
    void *host = malloc(bytes);
    if (host == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "'%s': %zu bytes", tensor->name, bytes);
    ggml_backend_tensor_get(tensor, host, 0, bytes);
    dp_status status = dp_rank_all_reduce(ctx, host, host, count, DP_F32, op);
    ggml_backend_tensor_set(tensor, host, 0, bytes);
    free(host);
    return status;
}

/* Is called by ggml's scheduler, which asks of each node whether to stop behind it, and computes
   what lies before a stop before it asks for more. So a stop behind the last node of backward makes
   all gradients complete when the first node of the optimizer is asked for. Which node that is, the
   first step shows: it stops behind each. */
static inline bool dp_ggml_node(struct ggml_tensor *node, bool ask, void *user)
{
    dp_ggml *own = user;
    if (!ask) {
        own->computed = node;
        return own->status == DP_OK; /* false: computes no more */
    }
    if (node->op != GGML_OP_OPT_STEP_ADAMW && node->op != GGML_OP_OPT_STEP_SGD) {
        own->asked = node;
        return own->boundary[0] == '\0' || strcmp(node->name, own->boundary) == 0;
    }
    if (own->status == DP_OK && own->asked != own->computed)
        own->status = dp_error(DP_ERR_INTERNAL, "'%s' was not computed before '%s'",
                               own->asked->name, node->name);
    if (own->status == DP_OK)
        own->status = dp_ggml_all_reduce(own->ctx, node->src[1], DP_OP_MEAN);
    memcpy(own->boundary, own->asked->name, sizeof own->boundary);
    return own->status != DP_OK;
}

/* Makes gradients of what `sched` computes the mean over all ranks. `own` stays where it is as long
   as `sched` computes. */
static inline void dp_ggml_begin(dp_ggml *own, dp_ctx *ctx, ggml_backend_sched_t sched)
{
    *own = (dp_ggml){.ctx = ctx};
    ggml_backend_sched_set_eval_callback(sched, dp_ggml_node, own);
}

/* Gives all ranks the parameters that rank 0 has in `weights`. */
static inline dp_status dp_ggml_share(dp_ctx *ctx, int rank, struct ggml_context *weights)
{
    for (struct ggml_tensor *w = ggml_get_first_tensor(weights); w != NULL;
         w = ggml_get_next_tensor(weights, w)) {
        if ((w->flags & GGML_TENSOR_FLAG_PARAM) == 0)
            continue;
        if (rank != 0)
            ggml_backend_tensor_memset(w, 0, 0, ggml_nbytes(w));
        DP_TRY(dp_ggml_all_reduce(ctx, w, DP_OP_SUM));
    }
    return DP_OK;
}

#endif /* DP_GGML_H */
