/* bench.h - what the benchmarks share: taking turns, the table, peers, limits, counted calls. */

#ifndef BENCH_H
#define BENCH_H

#include "../../dp.h"

enum { MAX_ROUNDS = 61, MAX_DEVICES = 8 };

/* ---- for peers, too: base.c ------------------------------------------------------------------ */

double now_ns(void);

/* Ends the program, with the sentence, unless the status is DP_OK. */
void must(dp_status status);

/* A context with so many devices, of which there need not be as many cores. */
dp_ctx *open_devices(int count);

/* 64-byte aligned, every float is 1; of free. */
float *new_floats(size_t bytes);

/* ---- measuring: bench.c ---------------------------------------------------------------------- */

typedef struct samples {
    double ns[MAX_ROUNDS];
    int count;
} samples;

typedef struct entrant {
    double (*once)(void *user); /* nanoseconds that one call takes; below zero: no answer */
    void *user;
    samples times;
} entrant;

/* All entrants measure once in every round, one after the other. */
void take_turns(entrant *entrants, size_t count);

/* Of two ways to do the same, the faster one. */
const samples *faster_of(const samples *a, const samples *b);

/* ---- the table: bench.c ---------------------------------------------------------------------- */

/* NULL stands for what a row does not have; samples without an answer for what is absent. What is
   compared with is the peer, or the limit if there is no peer. */

/* dp.h does `at_least` times as much in the same time. */
void report_speed(const char *what, const samples *dp, const samples *peer, const samples *limit,
                  double at_least);
/* dp.h takes at most this share of the time. */
void report_share(const char *what, const samples *dp, const samples *peer, const samples *limit,
                  double at_most);
/* dp.h takes at most so many nanoseconds more. */
void report_extra(const char *what, const samples *dp, const samples *peer, double at_most_ns);
void report_time(const char *what, const samples *dp, double at_most_ns);
void report_count(const char *what, double count, double at_most, const char *unit);
/* What a peer itself makes of it: nothing of dp.h's, and no target. */
void report_peer(const char *what, const samples *peer, const samples *limit);
void report_absent(const char *what);

/* ---- peers, which are other processes: peer.c ------------------------------------------------ */

typedef struct question { /* for calls of what `how` says */
    const char *peer, *how;
    size_t size; /* bytes, or what peers/ says of this peer */
    int calls;
} question;

/* An entrant's, whose user is a question: nanoseconds that one call took, below zero: absent.
   Starts the peer when it is asked for the first time. */
double peer_once(void *user);

/* Name and version, or "absent". */
const char *peer_library(const char *name);

/* Says what each peer is that was asked. */
void peers_print(void);
void peers_end(void);

/* ---- two processes: duo.c ------------------------------------------------------------------- */

typedef struct duo {
    int end; /* of a pair of sockets */
    int process;
    int other; /* its process id; in process 1: 0 */
    dp_ctx *ctx;
} duo;

/* Returns twice, in both processes. *p stays where it is. */
void duo_open(duo *p);
void duo_open_apart(duo *p); /* they share no memory: TCP over the loopback device */
bool duo_send(const duo *p, void *data, size_t bytes); /* false: the other one has gone */
bool duo_receive(const duo *p, void *data, size_t bytes);
void duo_close(duo *p); /* process 0, when the other one has been told to end */

/* ---- limits: limit.c ------------------------------------------------------------------------- */

/* Threads that spin between two jobs while the team is awake, and sleep otherwise. */
typedef struct team team;
typedef void (*team_fn)(int part, int part_count, void *user);

team *team_new(int size);
void team_free(team *t);
void team_wake(team *t);
void team_sleep(team *t);
void team_run(team *t, team_fn fn, void *user); /* all parts, the first one on the caller */

/* Every buffer = the sum of all, in one pass. */
typedef struct sum_job {
    float *data[MAX_DEVICES];
    int buffer_count;
    size_t count; /* a multiple of 16 */
} sum_job;
void sum_part(int part, int part_count, void *user);

/* A step of SGD with momentum, or of AdamW, which leaves zeros in the gradient. */
typedef struct step_job {
    float *data[4]; /* parameters, gradients, and what is kept of them */
    size_t count;   /* a multiple of 16 */
    bool adam;
    double squares[MAX_DEVICES]; /* of the gradients, by part */
} step_job;
void step_part(int part, int part_count, void *user);
void squares_part(int part, int part_count, void *user);

typedef struct copy_job {
    void *to;
    const void *from;
    size_t bytes;
} copy_job;
void copy_part(int part, int part_count, void *user);

/* ---- counted calls: count.c ------------------------------------------------------------------ */

typedef struct call_counts {
    long heap;    /* malloc, calloc, realloc, free, aligned_alloc, posix_memalign */
    long mmaps;   /* mmap, munmap */
    long threads; /* pthread_create */
} call_counts;

/* What all threads of this process called so far. */
call_counts calls_so_far(void);

/* ---- the rows -------------------------------------------------------------------------------- */

typedef struct settings {
    const char *directory; /* for what was built */
    const char *rows;      /* "" = all */
    int rounds;
    const char *torch; /* a Python whose torch is measured beside the system's; NULL: none */
} settings;
extern settings bench;

void rows_c1(void);
void rows_c2(void);
void rows_c3(void);
void rows_c4(void);
void rows_c5(void);
void rows_c6(void);
void rows_c7(void);
void rows_c8(void);
void rows_c9(void);
void rows_c11(void);
void rows_c11b(void);
void rows_c11c(void);
void rows_c12(void);
void rows_c13(void);
void rows_c14(void);
void rows_c15(void);
void rows_c16(void);
void rows_c17(void);
void rows_c18(void);
void rows_c19(void);
void rows_p7(void); /* of modules */
void rows_p9(void);
void rows_p10(void);
void rows_p12(void);
void rows_s1(void);
void rows_s2(void);

#endif /* BENCH_H */
