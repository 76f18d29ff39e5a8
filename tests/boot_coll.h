/* boot_coll.h - a table of collectives between processes that uses nothing but the bootstrap.

   A piece at a time, every process gives the pieces of its ranks and gets those of all; then each
   reduces for itself. It works on any device, as it moves bytes by the device's own copies. */

#ifndef BOOT_COLL_H
#define BOOT_COLL_H

#include "numbers.h"

enum { BOOT_PROCESSES = 8, BOOT_RANKS = 16, BOOT_PIECE = 1024 };

typedef struct boot_comm {
    dp_comm base;
    dp_bootstrap boot;
    int local_count, rank_first, rank_count;
    int most;                   /* local ranks of any process */
    int counts[BOOT_PROCESSES]; /* local ranks of each */
    char mine[BOOT_RANKS * BOOT_PIECE];
    char all[BOOT_RANKS * BOOT_PIECE]; /* process after process, room for `most` in each */
} boot_comm;

static inline const dp_coll_ops *boot_coll(void);

static inline bool boot_fits(const dp_comm_config *config)
{
    return config->bootstrap != NULL;
}

static inline void boot_close(dp_comm *comm)
{
    comm->host->free(comm->host, comm);
}

static inline dp_status boot_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    boot_comm *comm = host->alloc(host, sizeof(*comm), _Alignof(boot_comm));
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "boot: no memory");
    memset(comm, 0, sizeof(*comm)); /* by hand: a literal of it would be a large piece of stack */
    comm->base = (dp_comm){.ops = boot_coll(), .host = host};
    comm->boot = *config->bootstrap;
    comm->local_count = config->local_count;
    comm->rank_first = config->rank_first;
    comm->rank_count = config->rank_count;
    dp_status status =
        comm->boot.all_gather(&comm->local_count, comm->counts, sizeof(int), comm->boot.user);
    for (int p = 0; p < comm->boot.process_count; p++)
        comm->most = comm->most > comm->counts[p] ? comm->most : comm->counts[p];
    CHECK(status != DP_OK || comm->most * comm->boot.process_count <= BOOT_RANKS);
    *out = &comm->base;
    if (status != DP_OK)
        boot_close(&comm->base);
    return status;
}

/* Where the piece of a rank is in comm->all. */
static inline char *boot_piece(boot_comm *comm, int rank, size_t bytes)
{
    int process = 0, local = rank;
    for (; local >= comm->counts[process]; process++)
        local -= comm->counts[process];
    return comm->all + (size_t)(process * comm->most + local) * bytes;
}

/* `bytes` from `first` on of what every rank sends; of the root alone, unless it is -1. */
static inline dp_status boot_gather(boot_comm *comm, const dp_part *local, size_t first,
                                    size_t bytes, int root)
{
    for (int i = 0; i < comm->local_count; i++) {
        const dp_part *part = &local[i];
        const dp_device_ops *ops = part->stream->dev->ops;
        if (root >= 0 && root != comm->rank_first + i)
            continue;
        dp_status status = ops->copy_out(part->stream, comm->mine + (size_t)i * bytes,
                                         (const char *)part->send + first, bytes);
        status = status == DP_OK ? ops->stream_sync(part->stream) : status;
        if (status != DP_OK)
            return status;
    }
    return comm->boot.all_gather(comm->mine, comm->all, (size_t)comm->most * bytes,
                                 comm->boot.user);
}

static inline dp_status boot_deliver(const boot_comm *comm, const dp_part *local, size_t first,
                                     const void *data, size_t bytes)
{
    for (int i = 0; i < comm->local_count; i++) {
        const dp_device_ops *ops = local[i].stream->dev->ops;
        if (local[i].recv == NULL)
            continue;
        dp_status status =
            ops->copy_in(local[i].stream, (char *)local[i].recv + first, data, bytes);
        status = status == DP_OK ? ops->stream_sync(local[i].stream) : status;
        if (status != DP_OK)
            return status;
    }
    return DP_OK;
}

static inline dp_status boot_all_reduce(boot_comm *comm, const dp_coll_call *call)
{
    const dp_part *local = call->local;
    size_t size = dp_dtype_bytes(call->dtype), count = call->count, piece = 0;
    char sum[BOOT_PIECE];
    const void *in[BOOT_RANKS];
    dp_status status = DP_OK;
    for (size_t done = 0; done < count && status == DP_OK; done += piece) {
        piece = count - done < BOOT_PIECE / size ? count - done : BOOT_PIECE / size;
        status = boot_gather(comm, local, done * size, piece * size, -1);
        for (int r = 0; r < comm->rank_count; r++)
            in[r] = boot_piece(comm, r, piece * size);
        number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                        .op = call->op == DP_OP_MEAN ? DP_OP_SUM : call->op,
                                        .dtype = call->dtype,
                                        .count = piece,
                                        .out = (void *[]){sum},
                                        .in = in,
                                        .out_count = 1,
                                        .in_count = (size_t)comm->rank_count,
                                        .alpha = call->scale,
                                        .beta = call->op == DP_OP_MEAN ? comm->rank_count : 1});
        if (status == DP_OK)
            status = boot_deliver(comm, local, done * size, sum, piece * size);
    }
    return status;
}

static inline dp_status boot_broadcast(boot_comm *comm, const dp_coll_call *call)
{
    const dp_part *local = call->local;
    size_t bytes = call->count * dp_dtype_bytes(call->dtype), piece = 0;
    int root = call->root;
    dp_status status = DP_OK;
    for (size_t done = 0; done < bytes && status == DP_OK; done += piece) {
        piece = bytes - done < BOOT_PIECE ? bytes - done : BOOT_PIECE;
        status = boot_gather(comm, local, done, piece, root);
        if (status == DP_OK)
            status = boot_deliver(comm, local, done, boot_piece(comm, root, piece), piece);
    }
    return status;
}

static inline dp_status boot_all_gather(boot_comm *comm, const dp_coll_call *call)
{
    const dp_part *local = call->local;
    size_t bytes = call->count * dp_dtype_bytes(call->dtype), piece = 0;
    dp_status status = DP_OK;
    for (size_t done = 0; done < bytes && status == DP_OK; done += piece) {
        piece = bytes - done < BOOT_PIECE ? bytes - done : BOOT_PIECE;
        status = boot_gather(comm, local, done, piece, -1);
        for (int r = 0; r < comm->rank_count && status == DP_OK; r++)
            status = boot_deliver(comm, local, (size_t)r * bytes + done, boot_piece(comm, r, piece),
                                  piece);
    }
    return status;
}

static inline dp_status boot_run(dp_comm *base, const dp_coll_call *call)
{
    boot_comm *comm = (boot_comm *)base;
    return call->verb == DP_ALL_REDUCE   ? boot_all_reduce(comm, call)
           : call->verb == DP_BROADCAST  ? boot_broadcast(comm, call)
           : call->verb == DP_ALL_GATHER ? boot_all_gather(comm, call)
                                         : dp_error(DP_ERR_INTERNAL, "boot: verb %d", call->verb);
}

static inline const dp_coll_ops *boot_coll(void)
{
    static const dp_coll_ops ops = {
        .head = DP_TABLE(dp_coll_ops),
        .name = "boot",
        .fits = boot_fits,
        .open = boot_open,
        .close = boot_close,
        .verbs = 1u << DP_ALL_REDUCE | 1u << DP_BROADCAST | 1u << DP_ALL_GATHER,
        .run = boot_run,
    };
    return &ops;
}

#endif /* BOOT_COLL_H */
