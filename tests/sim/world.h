/* world.h - where the simulated NCCL's ranks meet, of one process or of several: a file in memory
   that has no name. Its maker's descriptor is the unique id: /proc/PID/fd/N. The file goes when the
   last process has closed it, however that ended. What ranks give each other lies in it as well. */

#ifndef SIM_WORLD_H
#define SIM_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { WORLD_RANKS = 64, WORLD_ID_BYTES = 128, WORLD_HOST_BYTES = 32 };

typedef enum world_verb {
    WORLD_ALL_REDUCE,
    WORLD_BROADCAST,
    WORLD_ALL_GATHER,
    WORLD_REDUCE_SCATTER,
    WORLD_SEND,
    WORLD_RECV
} world_verb;

/* What has to be the same on all ranks. */
typedef struct world_call {
    int verb, dtype, op, root; /* root: also the peer */
    size_t count;
} world_call;

typedef struct world_rank {
    _Atomic bool claimed, joined; /* by somebody; who has said what follows */
    int device;
    pid_t process;
    char host[WORLD_HOST_BYTES];
    _Atomic bool absent, gone;     /* it takes part in nothing more; it was aborted or destroyed */
    _Atomic bool finalized, quiet; /* quiet: and it has done all it was told */
    _Atomic uint64_t given;        /* so many collectives */
    _Atomic unsigned calling;      /* a bit for each verb that it has called */
    world_call calls[2];           /* the newest two of them, by number */
} world_rank;

/* From one rank to another. */
typedef struct world_letter {
    _Atomic uint64_t sent, taken;
    world_call call; /* the newest */
} world_letter;

typedef struct world_meeting { /* in memory that processes share */
    uint64_t key, seed;
    _Atomic int ranks; /* 0: nobody has come yet */
    world_rank rank[WORLD_RANKS];
    world_letter letters[WORLD_RANKS][WORLD_RANKS]; /* [from][to] */
} world_meeting;

typedef struct world { /* of this process, for all its ranks */
    world_meeting *meeting;
    int file, users;
    int made; /* the maker's descriptor; -1: that is another process */
    struct world *next;
} world;

bool world_make(char *id);         /* its maker, too, has to open it */
world *world_open(const char *id); /* NULL: there is none, or its maker has ended */
void world_close(world *own);

/* False: others say that there are more ranks, or fewer, or that they are this one. */
bool world_join(world *own, int rank, int ranks, int device, const char *host);

/* Its process, which is another one, or it has closed the world. */
bool world_has_ended(const world *own, int rank);

/* A collective is given by all its ranks, and then taken by each; nobody is more than one ahead.
   `bytes` of `data` at most. */
void world_give(world *own, int rank, const world_call *call, const char *data, size_t bytes);
bool world_is_given(const world *own, uint64_t number);        /* by all */
int world_unlike(const world *own, int rank, uint64_t number); /* a rank with another call; or -1 */
void world_take(world *own, int rank, uint64_t number, char *out);

bool world_can_send(const world *own, int from, int to);
uint64_t world_send(world *own, int from, int to, const world_call *call, const char *data,
                    size_t bytes); /* its number */
bool world_can_receive(const world *own, int from, int to);
void world_receive(world *own, int from, int to, char *out, size_t bytes);

/* ---- numbers --------------------------------------------------------------------------------- */

typedef union world_number {
    double real;
    uint64_t whole;
} world_number;

size_t world_bytes(int dtype);
bool world_is_real(int dtype);
world_number world_load(int dtype, const char *at);
void world_store(int dtype, char *at, world_number number);
world_number world_add(int dtype, int op, world_number a, world_number b); /* or multiplied, ... */

#endif /* SIM_WORLD_H */
