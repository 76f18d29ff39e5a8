/* mpi.c - Open MPI's collectives of floats between two processes, for the driver in bench.c; built
   with BENCH_DP, the all-reduce of dp_mpi.h (see dp_steps.h).

       mpirun --oversubscribe -np 2 peer_mpi FIFO

   Says "ready" and the library's version; then, for each line "HOW BYTES CALLS" on the standard
   input, where HOW is in_place or apart (an all-reduce), broadcast, all_gather, barrier or message
   (there and back), makes one call that does not count, and CALLS that do, and answers with the
   nanoseconds that one took. In between both ranks sleep in read: rank 0 on its input, rank 1 on
   the fifo, for inside MPI a rank that waits spins. Ends with its input. */

#if defined(BENCH_DP)
#define DP_IMPLEMENTATION
#include "../../../dp_mpi.h"
#endif
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct request {
    char how[16];
    size_t bytes;
    int calls;
} request;

/* Locks that a program of one thread does not need are not the peer's to pay for. */
#if defined(BENCH_DP)
#define MPI_LEVEL MPI_THREAD_MULTIPLE
#else
#define MPI_LEVEL MPI_THREAD_SINGLE
#endif

typedef struct buffers {
    float *send, *recv;
    size_t bytes;
} buffers;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void fill(buffers *b, size_t bytes)
{
    size_t room = (bytes + 63) / 64 * 64;
    if (bytes > b->bytes) {
        free(b->send);
        free(b->recv);
        b->send = aligned_alloc(64, room);
        b->recv = aligned_alloc(64, room);
        b->bytes = bytes;
    }
    if (b->send == NULL || b->recv == NULL)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        b->send[i] = b->recv[i] = 1;
}

#if defined(BENCH_DP)
#include "dp_steps.h"
#else
static void begin(void)
{
}

static void finish(void)
{
}

static void there_and_back(const buffers *b, int count)
{
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0)
        MPI_Send(b->send, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(b->recv, count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1)
        MPI_Send(b->send, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
}

static void call(const buffers *b, const request *r)
{
    int count = (int)(r->bytes / sizeof(float));
    if (strcmp(r->how, "message") == 0) {
        there_and_back(b, count);
        return;
    }
    if (strcmp(r->how, "broadcast") == 0)
        MPI_Bcast(b->recv, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    else if (strcmp(r->how, "all_gather") == 0)
        MPI_Allgather(b->send, count, MPI_FLOAT, b->recv, count, MPI_FLOAT, MPI_COMM_WORLD);
    else if (strcmp(r->how, "barrier") == 0)
        MPI_Barrier(MPI_COMM_WORLD);
    else
        MPI_Allreduce(strcmp(r->how, "in_place") == 0 ? MPI_IN_PLACE : b->send, b->recv, count,
                      MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static double serve(buffers *b, const request *r)
{
    fill(b, 2 * r->bytes); /* of both ranks, for all_gather */
    MPI_Barrier(MPI_COMM_WORLD);
    call(b, r);
    double start = now();
    for (int i = 0; i < r->calls; i++)
        call(b, r);
    return (now() - start) / r->calls;
}
#endif

/* Rank 0 hears the driver, and passes on what it heard. */
static void lead(int fifo)
{
    buffers b = {0};
    request r = {0};
    char line[128], version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = '\0';
    printf("ready %s\n", version);
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin) != NULL) {
        if (sscanf(line, "%15s %zu %d", r.how, &r.bytes, &r.calls) != 3)
            break;
        if (write(fifo, &r, sizeof(r)) != (ssize_t)sizeof(r))
            break;
        printf("%.1f\n", serve(&b, &r));
        fflush(stdout);
    }
    close(fifo);
    free(b.send);
    free(b.recv);
}

static void follow(int fifo)
{
    buffers b = {0};
    request r;
    while (read(fifo, &r, sizeof(r)) == (ssize_t)sizeof(r))
        serve(&b, &r);
    close(fifo);
    free(b.send);
    free(b.recv);
}

int main(int argc, char **argv)
{
    int rank, fifo, level;
    MPI_Init_thread(&argc, &argv, MPI_LEVEL, &level);
    begin();
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc != 2)
        MPI_Abort(MPI_COMM_WORLD, 2);
    if (rank == 0) {
        unlink(argv[1]);
        mkfifo(argv[1], 0600);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    fifo = open(argv[1], rank == 0 ? O_WRONLY : O_RDONLY);
    if (fifo < 0)
        MPI_Abort(MPI_COMM_WORLD, 3);
    if (rank == 0)
        lead(fifo);
    else
        follow(fifo);
    finish();
    MPI_Finalize();
    return 0;
}
