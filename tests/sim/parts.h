/* parts.h - what sim_cuda.c and sim_nccl.c ask of each other. Everything is under one lock, which
   sim_enter() takes.                                                                             */

#ifndef SIM_PARTS_H
#define SIM_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "cuda_runtime_api.h"
#include "sim.h"

/* ---- from sim_cuda.c ------------------------------------------------------------------------- */

bool sim_enter(const char *function);            /* false: this call is one that fails */
bool sim_enter_waiting(const char *function);    /* of a call that may wait for the device */
bool sim_enter_allocating(const char *function); /* of one that waits for all that it does */
void sim_lock(void);
void sim_unlock(void);

__attribute__((format(printf, 2, 3))) void sim_find(const char *name, const char *format, ...);
uint64_t sim_chance(uint64_t below);     /* the seed decides; without one, each answer by turns */
bool sim_uses_devices(void);             /* some device of CUDA's has been asked for */
int sim_place(int device);               /* in the machine */
int sim_gpu(int place);                  /* the GPU that it is, or is a slice of */
int sim_current_device(void);            /* -1: this thread has no context */
sim_peer sim_pair(int reader, int from); /* devices */
bool sim_is_lost(int device);
void sim_mend_later(char *at); /* see SIM_PEER_LATE */

/* Of memory: its device; -1: it is pinned, -2: it is not CUDA's. Where its bytes are, for work that
   may find it freed: NULL. */
int sim_memory_device(const void *pointer);
char *sim_memory(const void *pointer, size_t bytes);

/* What streams do at once, or in turns, at some time: work of another part. It begins when each of
   its streams has come to it, and takes as many steps as it needs. */
enum { SIM_JOB_STREAMS = 16 };
typedef struct sim_job {
    cudaStream_t streams[SIM_JOB_STREAMS];
    int actors[SIM_JOB_STREAMS];
    uint64_t at[SIM_JOB_STREAMS]; /* by the streams' clocks */
    int count;
    int holders; /* streams that have still to pass it; the last one gives it back */
} sim_job;

void sim_job_submit(sim_job *job, double us); /* it would take so long */

/* The order that it keeps: after what all its streams have done, before what they do next. */
typedef struct sim_order sim_order;
sim_order *sim_order_begin(const sim_job *job); /* what they have come to before it */
bool sim_job_touch(const sim_job *job, int stream, const void *pointer, size_t bytes, bool write,
                   const char *what);
void sim_order_after(const sim_job *job, const sim_order *other); /* also after that */
void sim_order_end(const sim_job *job, sim_order *own);
bool sim_job_known(const sim_job *job); /* the host knows that it has ended */

/* For sim_hip.c: all devices have their contexts from the beginning, and keep them. A call of the
   runtime begins under the lock, with a code if it is to fail, and leaves its code behind. */
void sim_keep_contexts(void);
cudaError_t sim_call_begin(void);
cudaError_t sim_call_end(cudaError_t code);
bool sim_push_context(int device);
bool sim_pop_context(void);

bool sim_stream_usable(const char *function, cudaStream_t stream);
int sim_stream_device(cudaStream_t stream);
int sim_stream_capture(cudaStream_t stream);         /* its number; 0: none */
void sim_stream_hold(cudaStream_t stream, int more); /* nobody else may use it meanwhile */
bool sim_run_some(void);                             /* false: nothing can go on */

/* ---- from sim_nccl.c ------------------------------------------------------------------------- */

bool sim_job_can_step(const sim_job *job);
bool sim_job_step(sim_job *job); /* true: that was the last one */
void sim_job_give_back(sim_job *job);
bool sim_job_never_ends(const sim_job *job);
bool sim_nccl_waits(void);     /* for another process, or for a call to come */
bool sim_nccl_in_flight(void); /* as far as the host knows */
void sim_nccl_check_leaks(void);

#endif /* SIM_PARTS_H */
