/* dp.h - v0.2.0 - data parallelism for C11: one model on every device there is - MIT licence

   Copy dp.h, dp_cpu.h and the folder dp/ into your project, or the one file that `make single`
   writes of them. One C file, dp.c, says

       #define DP_IMPLEMENTATION
       #include "dp.h"

   and includes the other headers that you use. cc -std=c11 -O2 -c dp.c takes 20 seconds, once.
   Other files, C or C++, just include them. dp.h needs stb_ds.h (Debian: libstb-dev, or copy it
   beside dp.h). Link with dp.o, -lpthread and -lm. Compile dp.c without -ffast-math: it loses NaN.

   CONTENTS (search for the tag)
     >>basics       the version, limits, and macros of declarations
     >>status       what a call returns, and the sentence that goes with it
     >>types        dtypes, devices, tensors, values, containers
     >>config       what can be set, and what zero means
     >>context      open devices, run on them, close
     >>launch       several processes: who starts them, how they meet
     >>recovery     a job goes on without those that have died
     >>scope        memory that one call frees
     >>tensor       views and the work on them
     >>value        trees of tensors, numbers, strings, lists, dicts
     >>collate      samples become a batch
     >>primitives   scatter cuts a batch; gather, replicate, reduce values
     >>collectives  all_reduce and its relatives on plain memory
     >>agreement    how it went on all ranks; numbers of all processes
     >>messages     from one rank to another
     >>reducer      gradients made equal on all ranks, while backward still runs
     >>module       a model: methods, parameters, children
     >>call         what a method gets
     >>pass         a forward, and its backward
     >>wrappers     one model on many devices
     >>timeline     what happened when, as a file for Perfetto
     >>libraries    for libraries on top of dp.h: checks, and sentences like its own
     >>contract     for writers of backends: the two tables
     >>literals     shapes, dicts, lists and tuples, written in place
   and the files that dp.h includes, in this order
     dp/basics.h       statuses, sentences, dtypes
     dp/os.h           what dp.h needs of a system: threads, sockets, processes, shared memory
     dp/os_posix.h     POSIX, Linux and macOS, which have it
     dp/team.h         the threads of a context
     dp_cpu.h          the host as devices, and its collectives inside a process
     dp/activity.h     what a device is in, for those who wait
     dp/late.h         which process comes last
     dp/core.h         private structs, scopes, the timeline, work on tensors
     dp/threads.h      how many threads OpenMP and BLAS use on each device
     dp/processes.h    what dp.h needs of the other processes of a job
     dp/value.h        trees: collate, scatter, gather, replicate
     dp/ranks.h        collectives as a user calls them
     dp/buckets.h      gradients in buckets, and how a bucket travels
     dp/lanes.h        the lane beside the caller, on which buckets travel
     dp/reduce.h       the reducer: gradients equal on all ranks
     dp/config.h       what a config means
     dp/meet.h         where the threads of one process wait for each other
     dp/open.h         from a config to a context, and back
     dp/run.h          what a context is asked, and functions on its devices
     dp/module.h       modules: parameters, replicas, passes
     dp/spmd.h         collectives that each rank calls for itself
     dp/checks.h       what is wrong, but legal
     dp/parallel.h     wrappers of one process, dp_train_step
     dp/distributed.h  the wrapper for all ranks of a job
     dp/launchers.h    which launcher has started this process
     dp/alone.h        with DP_ONE_PROCESS, in place of all that follow
     dp/job.h          the processes of a job: what each has begun, who is dead, who failed first
     dp/metrics.h      what a job does, as a file for monitors
     dp/launch.h       what a launcher says, and dp_spawn
     dp/tree.h         connections between the processes of a job
     dp/listener.h     where a process can be reached, and who has come
     dp/rendezvous.h   how processes connect to process 0 and to each other
     dp/world.h        what a context knows of the others
     dp/watchdog.h     what listens while a process computes, or hangs
     dp/members.h      which processes are the job after a failure: the algorithm
     dp/voting.h       how they agree on it
     dp/shm.h          collectives between processes of one machine
     dp/carrier.h      the table that carries bytes between processes
     dp/mesh.h         collectives of processes that share no memory
     dp/tcp.h          connections between all processes, and collectives over them
     dp/mailbox.h      what a process knows of its messages
     dp/channels.h     messages over TCP
     dp/messages.h     messages from one rank to another
     dp/asking.h       what a process answers those that ask from another machine
     dp/sharing.h      parameters that the processes of a machine have once
     dp/meeting.h      dp_open of a job, step by step: each is agreed upon by all processes
     dp/group.h        some processes of a job as a job of their own
     dp/recover.h      a job goes on without those that have died
   Beside them lie, each with its own manual: dp_train.h (optimizers), dp_data.h, dp_mirror.h,
   dp_save.h, dp_array.h, dp_average.h, dp_norm.h, dp_check.h, dp_local.h; dp_cuda.h, dp_nccl.h,
   dp_hip.h, dp_mpi.h.

   WHAT IT IS
   A batch is cut into parts, one per device. Your model runs on all devices at the same time. The
   outputs are put together and the gradients are summed. On CPU devices the parts are views, and
   nothing is copied. A device is a thread with its share of the cores, a GPU, or a table of
   functions that you write (examples/custom_device.h).

       dp_ctx *ctx;
       dp_open(NULL, &ctx);                                  one device per core, at most 8
       my_model_create(ctx, &net);                           methods and parameters by name
       dp_everywhere(net, &par);                             a wrapper is a module too
       dp_scope *step = dp_scope_begin(ctx);                 holds what this step makes
       dp_train_step(par, step, batch, optim, &log);         forward, backward, sum, update
       dp_scope_end(step);                                   frees it; blocks are reused
       dp_close(ctx);

   The parts below the wrappers can be used alone:

       dp_scatter(ctx, step, batch, NULL, &parts);           rows 0-2, 3-5, 6-7, 8-9
       dp_run(ctx, step, work, &parts);                      work(rank, ...) on every device
       dp_all_reduce(ctx, grads, count, DP_F32, DP_OP_MEAN); one pass over memory

   WHAT IT IS NOT
   No layers, no autograd. It does not split a model over devices.

   WORDS
     context   the devices of one process in one job. Several can be open; they share nothing.
     device    {backend, index}. Host memory is {0}.
     rank      a device's number in the whole job; `local rank` is its number in this context.
     stream    the order of work on a device. On CPU devices, work is done when a call returns.
     value     an immutable tree of tensors, numbers, strings, lists and dicts.
     container a field that says how it is collated and scattered.
     scope     a lifetime: what is made in a scope is freed when the scope ends.
     module    a model: methods (your functions), parameters and children, all by name.
     replica   a module on one device, for one part of a batch. Replica 0 is the module itself.
     pass      one forward, and the backward that may follow it.
     wrapper   a module that runs another module on several devices.
     bucket    gradients that are reduced together. A gradient, or a group of them, that becomes
               ready at once is a unit. A thread, the courier, reduces buckets while you compute.

   OPTIONS (macros; where to set them)
     DP_IMPLEMENTATION                in one C file, before the first include of any header
     DP_STATIC                        every file: the whole library is static to the file
     DP_API                           every file: linkage of the public functions, else extern
     DP_ASSERT(condition)             with DP_IMPLEMENTATION: for bugs of dp.h, else assert
     DP_USE_CUDA                      every file: includes dp_cuda.h; GPUs are used if there are any
     DP_USE_NCCL                      every file: includes dp_nccl.h, and dp_cuda.h with it; NCCL
                                      carries data between GPUs, of several processes too
     DP_USE_HIP, DP_USE_RCCL          every file: the same for GPUs of AMD: includes dp_hip.h, which
                                      RCCL needs. A program is for one kind of GPUs
     DP_USE_MPI                       every file: includes dp_mpi.h; MPI carries data from one
                                      machine to another
     DP_ONE_PROCESS                   with DP_IMPLEMENTATION: leaves out what lies between
                                      processes (see >>launch), a third of the object
     DP_DYNAMIC_LOAD                  with DP_IMPLEMENTATION: CUDA and NCCL, or HIP and RCCL, are
                                      looked for at run time
   At run time: $DP_DEBUG = error|warn|info|trace logs to stderr, and check, alone or as in
   info,check, looks for mistakes (dp_check.h); $DP_DEVICES = how many devices, or which: 4, or 0,1
   (2,: only 2); $DP_SIMD = base limits the CPU's kernels to instructions that every processor of
   its kind has; $DP_CACHE = off compiles the kernels for GPUs each time, else they are kept in
   $XDG_CACHE_HOME/dp.h, or ~/.cache/dp.h; $DP_PEERS = off: GPUs of a process copy through the host;
   $DP_TRACE = a file: see >>timeline; $DP_METRICS = a file, for monitors: what dprun --status
   shows, each 5 s (OpenMetrics); $DP_STUCK = stack: a thread that is waited for too long prints its
   stack; $DP_NCCL: see dp_nccl.h; $DP_LAUNCH, $DP_ADDR, $DP_PORTS, $DP_INTERFACE, $DP_CONNECTIONS,
   $DP_SECRET, $DP_TIMEOUT, $DP_GRACE: see >>launch; $DP_REJOIN, $DP_PROCESS_LIMIT: see >>recovery.
   For tests: $DP_MACHINE = a word; processes with different ones act as if on different machines,
   and share no memory; $DP_TOPOLOGY = a folder in place of the system's /sys/devices/system/node.

   OWNERSHIP
   What you pass in stays yours. What a function returns belongs to the scope you passed, or to the
   context, and is valid until that ends. Values and views may point into memory of their own scope
   or of an outer one, so the batch must live as long as its parts. dp_keep copies what must live
   longer. Modules belong to their context. Parameters and gradients belong to their module, which
   never moves them; memory that you provide stays yours, and moves if you say so: dp_params_move.
   dp_close ends all scopes and modules; no pointer to or into them is valid after it. Before
   dlclose unloads the library that contains dp.h, close all contexts: their threads run its code.

   THREADS
   One thread at a time calls into a context. Functions marked [any] are exceptions: reading names
   and errors, making views, beginning scopes, dp_reducer_ready, dp_reducer_absent, dp_abort. One
   thread at a time uses a scope. [host] marks functions that wait for devices. Others return once
   work is queued, or what they give to the host is there.

   INSIDE YOUR FUNCTIONS
   The library calls your functions: methods, the function of dp_run, deferred functions,
   replica_create and replica_destroy, functions of an optimizer, hooks. They may call the library
   on the thread that they run on. The table has two cases. "Together": methods of several replicas,
   and functions under dp_run, each on its own device and in its own scope; and the hook of a
   reducer, on the streams that it gets. "Alone": all others, including methods of a plain module,
   of a wrapper of one device, and of any wrapper when the batch made one part.

                                                                  alone     together
     values, views, scopes of its own; what reads names;          yes       yes
     dp_param and its like, dp_call_child, dp_call_all_reduce,
     dp_grad_ready, dp_reducer_ready, dp_reducer_absent,
     dp_module_param, dp_owner_param, dp_owner_grad
     dp_rank_all_reduce and its like                              (3)       (3)
     dp_backward of what dp_call_child made                       yes       in its own backward
     dp_tensor_new, dp_copy, dp_fill and other work on tensors;   yes       on its own device
     dp_scatter, dp_replicate, dp_gather, dp_reduce_add
     dp_invoke, dp_backward, dp_train_step, dp_predict_step,
     dp_zero_grad,                                                yes       (1)
     dp_params_edit, _write, _changed, dp_owner_edit,
     dp_module_train
     dp_params_move, dp_params_move_block                         yes (2)   (1)
     making, copying, wrapping and destroying modules; dp_run,    yes (2)   no
     collectives, messages, dp_buffers_sync, dp_open_group,
     dp_use_stream, dp_threads_limit, dp_data_parallel_once,
     other functions of reducers
     dp_scope_end, dp_scope_attach                                yes (2)   yes (2)
     dp_close                                                     no        no

     (1) only for a module whose whole tree is on this device, that the replicas do not run and no
         other rank uses: for example, one copy for each device
     (2) except on what the function depends on: the scope that it was called for and the scopes
         around it; the module that runs and the modules that contain it. A function under dp_run
         may end its own scope, or hand it over
     (3) under dp_run, in methods that dp_distributed runs, and wherever "alone" may call
         collectives if the process has one local rank; not in hooks

   A call with a "no" in the table fails with DP_ERR_STATE and changes nothing. The log function may
   be called anywhere and at any time. It may call only dp_error and dp_last_error.

   THE SAME BITS
   A rank is a device, unless dp_config.shards sets the number of ranks in the whole job, for
   example 8. Then 1, 2, 4 or 8 devices, in 1, 2, 4 or 8 processes, run all 8 ranks; a device may
   run several. Batches are cut into the same 8 parts, and the results of the 8 replicas are added
   in the same tree (>>collectives). So training gives the same bits on any of these, if the devices
   are of one kind. With shards set, read "device" above as "shard": local_count, local ranks,
   replicas and dp_run count shards.

   This holds only if your own functions are deterministic too:
     - The result of a method for its part must not depend on its number of threads or on other
       replicas. Take a seed from dp_info.rank_first + the replica, or from the sample.
     - With several processes, each cuts a batch of its own. Give it the rows of its ranks, as
       dp_split_rows divides all rows over rank_count ranks: dp_none() or a batch of no rows, if it
       has none. A loader does (dp_data.h, SHARDS). dp_distributed refuses to cut by
       DP_SPLIT_CHUNK or _WEIGHTS (UNSUPPORTED): a rank's rows would depend on the number of
       processes; and by _PADDED without part_rows, as the size of its part would.
     - Under dp_distributed a rank without rows counts for nothing: it adds nothing to gradients and
       samples, and its buffers stay as they were. If its process has no other rows and gets a batch
       of no rows, the rank's methods run all the same, so that they take part in
       dp_call_all_reduce. Without arguments the methods of every rank run.
     - Results made inside one process belong to it only: the losses in a log, a criterion.
     - A hook, a wire of halves and no_sync are fine: each rank rounds and keeps back its own.

   It costs as much as 8 devices: gradients, states of replicas and a thread for each, and parts so
   small that they compute more slowly.

   ERRORS
   What can fail returns a dp_status, or NULL, -1 or 0. dp_last_error() then returns a sentence with
   names and numbers, which begins with the function's name. A wrong call changes nothing. The
   library ends no process, but for grace_ms (>>launch). It prints one line to stderr, once per
   process, if no log is installed and it uses another backend because the preferred devices cannot
   be used, or processes train apart; otherwise only $DP_DEBUG and dp_progress_step print. A call
   that fails on a device waits for the work that it has enqueued. Writing raises no signal: a file
   that may not grow (RLIMIT_FSIZE) is an error, and a log that nobody reads any more is ignored.
   Your signal handlers and masks stay as they are. After a failure of the JOB class (>>status) only
   dp_close works, and dp_recover where the config asks for it. Until one of them has returned
   nothing is waited for, no memory is reused, and a device may use your memory. */

#if defined(DP_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* before the first system header: affinity masks, threads */
#endif

#if defined(DP_USE_RCCL) && !defined(DP_USE_HIP)
#define DP_USE_HIP
#endif

/* What cannot be compiled is left out, so that one error is all that a compiler says. */
#if defined(DP__REFUSED)
#elif defined(__cplusplus) && __cplusplus < 201103L
#define DP__REFUSED
#error "dp.h: compile this file as C++11 or newer (-std=c++11)"
#elif !defined(__cplusplus) && defined(__STRICT_ANSI__) &&                                         \
    (!defined(__STDC_VERSION__) || __STDC_VERSION__ < 199901L)
#define DP__REFUSED
#error "dp.h: compile this file as C11 or newer (-std=c11)"
#elif defined(DP_USE_HIP) && (defined(DP_USE_CUDA) || defined(DP_USE_NCCL))
#define DP__REFUSED
#undef DP_IMPLEMENTATION
#undef DP_USE_CUDA
#undef DP_USE_HIP
#undef DP_USE_NCCL
#undef DP_USE_RCCL
#error "dp.h: a program is for AMD's GPUs (DP_USE_HIP, DP_USE_RCCL) or for NVIDIA's, not for both"
#endif

/* __FINITE_MATH_ONLY__ is always defined, as 0 or 1. */
#if defined(DP_IMPLEMENTATION) && !defined(DP__REFUSED) && !defined(DP__ACCEPTED)
#if defined(__cplusplus)
#error "dp.h: the file that defines DP_IMPLEMENTATION is C11: compile it as C, others may be C++"
#elif !defined(__GNUC__)
#error "dp.h: compile the file that defines DP_IMPLEMENTATION with gcc or clang"
#elif !defined(__STDC_VERSION__) || __STDC_VERSION__ < 201112L
#error "dp.h: compile the file that defines DP_IMPLEMENTATION as C11 or newer (-std=c11)"
#elif defined(DP_ONE_PROCESS) &&                                                                   \
    (defined(DP_USE_MPI) || defined(DP_USE_NCCL) || defined(DP_USE_RCCL))
#error "dp.h: DP_ONE_PROCESS leaves out what MPI, NCCL and RCCL are for: define one or the other"
#elif __SIZEOF_SIZE_T__ != 8
#error "dp.h: for systems of 64 bits only: sizes are counted in them"
#elif !defined(__unix__) && !defined(__APPLE__)
#error "dp.h: for Linux, macOS and the BSDs only: it needs POSIX"
#elif defined(__FAST_MATH__) || __FINITE_MATH_ONLY__ || defined(__ASSOCIATIVE_MATH__) ||           \
    defined(__RECIPROCAL_MATH__)
#error "dp.h: compile the file that defines DP_IMPLEMENTATION with -fno-fast-math: NaN gets lost"
#elif !__has_include("stb_ds.h") && !__has_include(<stb/stb_ds.h>)
#error "dp.h needs stb_ds.h: apt-get install libstb-dev, or copy the file beside dp.h"
#else
#include <sched.h>
#include <time.h>
#if !defined(CLOCK_MONOTONIC) || (defined(__linux__) && !defined(CPU_COUNT))
#error "dp.h: include dp.h before any other header of this file, or compile with -D_GNU_SOURCE"
#else
#define DP__ACCEPTED
#endif
#endif
#ifndef DP__ACCEPTED
#undef DP_IMPLEMENTATION
#undef DP_STATIC
#endif
#endif

#if !defined(DP_H) && !defined(DP__REFUSED)
#define DP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
#include <initializer_list>
#endif

/* ==== >>basics ================================================================================
   For preprocessors and compilers.                                                              */

#define DP_VERSION   200 /* 0.2.0 */
#define DP_LAYOUT    1   /* of tables of functions: see >>contract */
#define DP_MAX_DIMS  8   /* of a tensor */
#define DP_MAX_DEPTH 64  /* of a value: a list in a list in a list ... */

#if defined(__GNUC__)
#define DP_MUST_USE       __attribute__((warn_unused_result))
#define DP_PRINTF(fmt, a) __attribute__((format(printf, fmt, a)))
#define DP__COLD          __attribute__((cold))     /* branches that lead to it are rarely taken */
#define DP__APART         __attribute__((noinline)) /* has so many callers that inlining it costs */
#define DP__MAYBE_UNUSED  __attribute__((unused))
#else
#define DP_MUST_USE
#define DP_PRINTF(fmt, a)
#define DP__COLD
#define DP__APART
#define DP__MAYBE_UNUSED
#endif

#ifndef DP_API
#ifdef DP_STATIC
#define DP_API DP__MAYBE_UNUSED static
#else
#define DP_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>status =================================================================================
   Errors are values, in three classes that differ in what the caller can still do:
     CALL  the call is wrong: nothing happened, correct the call and go on
     PASS  this pass failed: its outputs are void, the context is fine
     JOB   the job failed: sticky, every later call returns it, until dp_close or dp_recover    */

/* clang-format off */
#define DP_STATUS_LIST(X)                                                  \
    X(DP_OK,                0, NONE, "ok")                                 \
    X(DP_PENDING,           1, NONE, "in progress")                        \
    X(DP_ERR_INVALID,      -1, CALL, "an argument is wrong")               \
    X(DP_ERR_STATE,        -2, CALL, "not now: wrong order, closed, or another process") \
    X(DP_ERR_UNSUPPORTED,  -3, CALL, "the backend cannot do this")         \
    X(DP_ERR_MISMATCH,     -4, CALL, "ranks, replicas or fields disagree") \
    X(DP_ERR_NO_MEMORY,    -5, PASS, "out of memory")                      \
    X(DP_ERR_NO_DEVICE,    -6, PASS, "no such device")                     \
    X(DP_ERR_USER,         -7, PASS, "a function of the user's failed")    \
    X(DP_ERR_DEVICE,       -8, JOB,  "the driver reports a failure")       \
    X(DP_ERR_REMOTE,       -9, JOB,  "another rank failed first")          \
    X(DP_ERR_TIMEOUT,     -10, JOB,  "a rank did not arrive in time")      \
    X(DP_ERR_ABORTED,     -11, JOB,  "the job was aborted")                \
    X(DP_ERR_INTERNAL,    -12, JOB,  "a bug in dp.h, or in a backend")     \
    X(DP_ERR_FILE,        -13, PASS, "a file is damaged, or the system refuses it") \
    X(DP_ERR_NO_FILE,     -14, PASS, "no such file")                       \
    X(DP_ERR_CHECK,       -15, PASS, "a check of $DP_DEBUG=check has found a mistake")
#define DP__STATUS_ENUM(name, value, class_, text) name = value,
typedef enum dp_status { DP_STATUS_LIST(DP__STATUS_ENUM) } dp_status;
#undef DP__STATUS_ENUM
/* clang-format on */

typedef enum dp_class { DP_CLASS_NONE, DP_CLASS_CALL, DP_CLASS_PASS, DP_CLASS_JOB } dp_class;

typedef struct dp_ctx dp_ctx;
typedef struct dp_scope dp_scope;
typedef struct dp_stream dp_stream;
typedef struct dp_device_ops dp_device_ops;
typedef struct dp_coll_ops dp_coll_ops;

typedef struct dp_failure_info { /* its texts live as long as the context */
    dp_status status;
    int rank; /* the first of the process where it happened */
    const char *text;
    const char *here; /* several processes: what this one was in then, or had done last; else "" */
} dp_failure_info;

DP_API int dp_version(void);                         /* DP_VERSION of the implementation */
DP_API const char *dp_status_name(dp_status status); /* "DP_ERR_INVALID" */
DP_API const char *dp_status_text(dp_status status); /* "an argument is wrong" */
DP_API dp_class dp_status_class(dp_status status);

/* This thread's last error sentence, with names and numbers; "" before the first failure. Success
   leaves it alone. A failure in a worker is copied to the thread that waits for it. [any] */
DP_API const char *dp_last_error(void);

/* Set this thread's sentence and return `status`: for methods and backends. [any] */
DP_API dp_status dp_error(dp_status status, const char *format, ...) DP_PRINTF(2, 3) DP__COLD;

/* In a function that returns a dp_status: return what `call` returned, unless it is DP_OK. */
#define DP_TRY(call)                                                                               \
    do {                                                                                           \
        dp_status dp__status = (call);                                                             \
        if (dp__status != DP_OK)                                                                   \
            return dp__status;                                                                     \
    } while (0)

/* For small programs: when `call` fails, print where and dp_last_error() to stderr, and exit(1).
   The library itself never does this. */
#define DP_CHECK(call) ((call) == DP_OK ? (void)0 : dp__check_failed(__FILE__, __LINE__))
DP_API void dp__check_failed(const char *file, int line) DP__COLD;

/* The first failure of the job, if there is one. [any] */
DP_API bool dp_failure(const dp_ctx *ctx, dp_failure_info *out);

/* Fail the job from here: every call of this context returns `why` from now on, or DP_ERR_ABORTED
   if `why` is not a status of the JOB class. [any] */
DP_API void dp_abort(dp_ctx *ctx, dp_status why, const char *format, ...) DP_PRINTF(3, 4);

/* With several processes: say what the program is at, "epoch 3" or "validation". When the job fails
   this stands beside the collectives that were begun since, in the sentences of all ranks. The
   first 39 bytes are copied; NULL or "" takes it back. [any] */
DP_API void dp_tag(dp_ctx *ctx, const char *text);

/* Between calls of this context: show others, in 47 bytes, what this process is in, as if it were a
   function of yours that the library calls. The next one that is called, dp_loader_next, NULL and
   "" take it back. */
DP_API void dp_doing(dp_ctx *ctx, const char *what);

/* The last 16 collectives of this process on the caller's thread and on the courier's, one a line,
   newest first: number, what, for what, tag, and whether it has ended; "enqueued": it was given to
   devices that work on their own. Returns the length of the whole, as snprintf does. When a job
   fails, these lines are logged at error level. "" with one process. [any] */
DP_API size_t dp_recent_collectives(const dp_ctx *ctx, char *text, size_t bytes);

/* Tells who comes last. All enter a collective, so all wait for the last one, which by its own
   times is the only one that looks well. dp.h knows how long each process has waited for others to
   begin each collective. When all have had to wait for one of them 64 to 1024 times, it looks
   whether that was the same one in four of five long waits, and for a twentieth of the time. If so
   process 0 logs it at warn level, once, and again when it is another one; and in what that one
   spends the time: in forward or backward of a wrapper by dp_distributed, or outside of both (code
   between steps, a loader). Where it is each time another one, none is named.

   It costs no message, and some nanoseconds a collective. It is known where dp.h compares what the
   processes begin: in shared memory, over TCP and MPI, not with NCCL. Between machines whose links
   differ by more than what is looked for, the nearest one may be named. The devices of a process
   are told apart, too, in passes that give each the same rows and in collectives under dp_run:
   that process logs it, and where it is the only one, dp_late tells it. [any]                  */
typedef struct dp_late_info {
    int rank;            /* when this was judged last, the process that comes last was that of this
                            first rank; -1: none was */
    int waits, last;     /* so often all have waited long for one; and for this one */
    double late_s;       /* each time for so long, in the mean */
    const char *where;   /* "in forward", "in backward", "outside of forward and backward" */
    double longest_s;    /* the longest that all others have waited for one process, */
    int longest_rank;    /* and for which; -1: for none */
    double for_others_s; /* in all, this process has waited so long for others, */
    double by_others_s;  /* and all others for this one */
} dp_late_info;
DP_MUST_USE DP_API dp_status dp_late(const dp_ctx *ctx, dp_late_info *out);

/* ==== >>types ==================================================================================
   Small things that travel by value. None of them owns memory.                                 */

/* clang-format off */
#define DP_DTYPE_LIST(X) /* name, text, bytes */                                            \
    X(DP_F32,  "f32",  4) X(DP_F64, "f64", 8) X(DP_F16, "f16", 2) X(DP_BF16, "bf16", 2)     \
    X(DP_I64,  "i64",  8) X(DP_I32, "i32", 4) X(DP_I16, "i16", 2) X(DP_I8,   "i8",   1)     \
    X(DP_U8,   "u8",   1) X(DP_BOOL, "bool", 1)
#define DP__DTYPE_ENUM(name, text, bytes) name,
typedef enum dp_dtype { DP_DTYPE_LIST(DP__DTYPE_ENUM) DP_DTYPE_COUNT, DP_DTYPE_ANY = 255 } dp_dtype;
#undef DP__DTYPE_ENUM
/* clang-format on */

DP_API const char *dp_dtype_name(dp_dtype dtype);
DP_API size_t dp_dtype_bytes(dp_dtype dtype); /* 0 if it is not a dtype */
DP_API bool dp_dtype_is_float(dp_dtype dtype);

typedef struct dp_device {
    int32_t backend; /* 0 is host memory, so {0} means the host; k: the k-th table of the config */
    int32_t index;   /* the local rank */
} dp_device;

typedef struct dp_tensor { /* a view */
    void *data;
    int64_t shape[DP_MAX_DIMS];
    int64_t stride[DP_MAX_DIMS]; /* in elements, never negative */
    dp_device device;
    uint8_t dtype, ndim;
    bool read_only; /* the library refuses to write through this view */
    uint8_t reserved[5];
} dp_tensor;

typedef enum dp_kind {
    DP_NONE,
    DP_ERROR, /* from a constructor that failed; every call that gets it returns its status */
    DP_BOOLEAN,
    DP_INT,
    DP_FLOAT,
    DP_STRING,
    DP_TENSOR,
    DP_CONTAINER,
    DP_LIST,
    DP_TUPLE,
    DP_DICT, /* keeps the order of insertion */
    DP_OPAQUE
} dp_kind;

struct dp_pair;
struct dp_container;
struct dp__use_a_constructor;

typedef struct dp_value { /* 16 bytes, immutable once made, so that replicas may share it */
    union {
        const struct dp__use_a_constructor *guard; /* first, so that {"n", 3} draws a warning */
        bool b;
        int64_t i;
        double f;
        const char *s; /* DP_STRING; DP_ERROR: its sentence */
        const dp_tensor *t;
        const struct dp_container *c;
        const struct dp_value *items; /* DP_LIST, DP_TUPLE */
        const struct dp_pair *pairs;  /* DP_DICT */
        void *p;
    } as;
    uint32_t count;   /* of items or pairs */
    uint8_t kind;     /* dp_kind */
    uint8_t depth;    /* 0 for leaves; at most DP_MAX_DEPTH */
    int8_t status;    /* DP_ERROR: the dp_status; for other kinds the library's own use */
    uint8_t reserved; /* the library's own use */
} dp_value;

typedef struct dp_pair {
    const char *key;
    dp_value value;
} dp_pair;

#define DP_PAD_NONE (-1)
typedef struct
    dp_container { /* says how collate and scatter treat a field (mmcv's DataContainer) */
    dp_value data;
    double padding_value;
    int8_t pad_dims; /* trailing dims that collate pads: 1, 2, 3 or DP_PAD_NONE; 0 means 2 */
    bool stack;      /* collate makes one tensor per group */
    bool cpu_only;   /* passed on as it is, element i to device i; wins over stack */
} dp_container;

/* ==== >>config =================================================================================
   All zero is the default, and NULL means all zero. dp_config_get reads back what became of it.

     field          zero means
     backends       GPUs if dp_cuda.h or dp_hip.h is compiled in and there are any, else the CPU;
                    with a warning where there are GPUs that cannot be used
     colls          the tables that are compiled in
     device_count   $DP_DEVICES, else all there are (CPU: the cores, at most 8), or this process'
                    share of them where several are on a machine (>>launch)
     devices        those of $DP_DEVICES, else a run of device_count, from 0 on
     shards         0: a rank is a device; see THE SAME BITS
     thread_count   the cores of the affinity mask, or fewer if a cgroup's quota says so; shared
                    out among processes of a machine with the same mask
     threads_per_device  core_count / local_count, at least 1
     bootstrap      the processes that a launcher has started (>>launch), else this one alone
     job            "": contexts of several processes meet under one name
     timeout_ms     $DP_TIMEOUT, which is in seconds, else 60,000
     grace_ms       $DP_GRACE, which is in seconds, else no process is ended
     unbound        threads keep to nodes of the machine, if it has several: see NODES
     allocator      the C library's
     check          what $DP_DEBUG = check or check=N says, else none
     log            silent, or what $DP_DEBUG = error|warn|info|trace says, to stderr           */

typedef enum dp_level {
    DP_LOG_DEFAULT,
    DP_LOG_ERROR,
    DP_LOG_WARN,
    DP_LOG_INFO,
    DP_LOG_TRACE
} dp_level;

typedef struct dp_log_record {
    dp_level level;
    int rank; /* first rank of the process, -1 before it is known */
    const char *text;
} dp_log_record;

typedef struct dp_log {
    void (*fn)(const dp_log_record *record, void *user); /* from any thread; text dies at return */
    void *user;
    dp_level level; /* the most detailed that is wanted; 0 = DP_LOG_INFO */
} dp_log;

typedef struct dp_allocator {                               /* both functions or none */
    void *(*alloc)(size_t bytes, size_t align, void *user); /* align: a power of two; NULL = full */
    void (*free)(void *data, size_t bytes, void *user);
    void *user;
} dp_allocator;

typedef struct dp_bootstrap { /* how the processes of a job find each other */
    /* Every process gives bytes_each bytes and gets those of all, in process order. */
    dp_status (*all_gather)(const void *in, void *out, size_t bytes_each, void *user);
    void *user;
    int process, process_count;
} dp_bootstrap;

typedef struct dp_config {
    const dp_device_ops *const *backends; /* NULL-terminated; the first one with a device serves */
    const dp_coll_ops *const *colls;      /* NULL-terminated; the first one that fits serves. Where
                                             none does, and one process is all: dp_cpu_coll() */
    int device_count;
    const int *devices; /* device_count indices; repeats make virtual devices */
    int shards; /* a power of two: the ranks of the whole job, dealt out evenly to its processes and
                   their devices */
    int thread_count; /* cores that this context may use. With more devices than that, threads
                           that wait sleep at once; else they spin a while before they sleep,
                           which is quicker by far where nobody else needs the core */
    /* For OpenMP, OpenBLAS, BLIS and MKL in your functions: see dp_run. -1: they are left alone. */
    int threads_per_device;
    dp_bootstrap bootstrap;
    bool local_only;  /* this process alone, whatever started it */
    bool unbound;     /* threads run where the system likes: see NODES */
    const char *job;  /* tells this context's job from others: the same in all its processes */
    bool recovers;    /* dp_recover may follow a failure: see >>recovery */
    int timeout_ms;   /* of everything that waits for another process */
    int grace_ms;     /* of a process that hangs while the job has failed: see >>launch */
    bool poison;      /* to find invalid uses of memory: see dp_check.h */
    int check;        /* n: the first step and each n-th are checked: see dp_check.h; -1: none is */
    bool check_warns; /* what checks find is logged, and no error */
    dp_allocator allocator;
    dp_log log;
} dp_config;

DP_API void dp_log_stderr(const dp_log_record *record, void *user); /* ready-made dp_log.fn */

/* A real 0 for a field whose 0 means something else, in any config of any header:
   {.beta1 = DP_ZERO, .beta2 = 0.9}. Not -0.0, which -ffast-math loses. */
#define DP_ZERO (-1e-300)

/* What such a field means: `usual` if it is 0, 0 if it is DP_ZERO, else what it says. [any] */
DP_API double dp_or(double number, double usual);

/* ==== >>context ================================================================================
   One job's view: the local devices, their workers, the communicator. Who may call what on which
   thread: see THREADS and INSIDE YOUR FUNCTIONS. A child of fork may only close.                */

DP_MUST_USE DP_API dp_status dp__open(const dp_config *config, size_t config_bytes, int version,
                                      dp_ctx **out);

/* Open the devices and start one worker for each but the first; the caller drives that one. */
DP_MUST_USE static inline dp_status dp_open(const dp_config *config, dp_ctx **out)
{
    return dp__open(config, sizeof(dp_config), DP_VERSION, out);
}

/* Free everything, including scopes that are still open. Runs no collective. NULL is fine. Refused
   (see dp_last_error) while a dp_run, a collective or a function of yours called by the context is
   running. But while a reducer's own thread reports a failure to your log, dp_close waits until the
   log function has returned. dp_last_error stays what it was: you may close before you print. */
DP_API void dp_close(dp_ctx *ctx);

typedef struct dp_info {
    int process, process_count;
    int rank_first, rank_count; /* of this process' devices; of the whole job */
    int local_count;            /* devices here, or their shards */
    int core_count;             /* cores that this context may use */
    int threads_per_device; /* what a method may use: the config's, or core_count / local_count */
    const char *device_backend, *coll_backend; /* names of the tables; coll: "none" if alone */
    const char *launcher; /* as in DP_LAUNCH; "none", "bootstrap" for the config's own, "group" */
    int machine_process, machine_process_count; /* among the processes of this machine */
    int machine, machine_count; /* machines are numbered in the order of their first processes */
    int node_count;      /* nodes that threads of its devices are bound to; 0: none is bound */
    const char *binding; /* "nodes", or why no thread is bound */
    int recoveries;      /* grows with each; the same in all processes: see >>recovery */
} dp_info;

/* NODES (NUMA): a core is slower with memory of another node, and memory lies near the core that
   writes to it first. So on Linux all cores, node by node, are divided among the processes of the
   machine, and those of a process among its devices. The thread of each device is bound to the
   nodes that its part has cores of, and so are threads that it starts, such as OpenMP's in a
   method; a GPU's to the node of its bus. Parameters and gradients that the library allocates are
   first written to by the thread of their device. The caller's thread does more than the work of
   the first device: it is bound to all nodes of its process, and left alone if there are no others.
   Once its contexts are closed it may use the cores of before, and a child of fork may at once.

   No thread is bound, and dp_info.binding says why, if it is
     "config.unbound"
     "one node"        or the system does not say how many there are
     "one device"      of one process, which has the whole machine
     "bound before"    by a launcher, a container, taskset, or you: the calling thread may not use
                       all cores of the machine
     "masks differ"    only some processes of the machine were bound before
     "unknown nodes"   of GPUs, as in most virtual machines
     "refused"         the system does not allow it                                            */

typedef struct dp_device_info {
    char name[64], bus_id[32];
    uint64_t bytes_total, bytes_free; /* 0 when unknown */
    int compute_units;
    bool host_memory; /* the host may read and write this device's memory */
    bool unified;     /* it may once no enqueued work uses that memory: after a wait */
    int memory; /* devices of one table with the same number, not 0, share memory: each may use, in
                   the order of streams, what another allocated, and nothing is copied between them;
                   0: it is not shared */
} dp_device_info;

DP_MUST_USE DP_API dp_status dp_info_get(const dp_ctx *ctx, dp_info *out);
DP_MUST_USE DP_API dp_status dp_config_get(const dp_ctx *ctx, dp_config *out); /* as resolved */
DP_MUST_USE DP_API dp_status dp_device_info_get(dp_ctx *ctx, int local_rank, dp_device_info *out);

/* Device of a local rank; {-1, -1} when there is none. The stream is NULL then. [any] */
DP_API dp_device dp_local_device(const dp_ctx *ctx, int local_rank);
DP_API dp_stream *dp_local_stream(const dp_ctx *ctx, int local_rank);

/* Make a stream of yours (from the device's backend) the compute stream; NULL = dp's own again.
   This works after a failure of the job too, because you have to give your stream back to its
   backend before dp_close. */
DP_MUST_USE DP_API dp_status dp_use_stream(dp_ctx *ctx, int local_rank, dp_stream *stream);

/* Wait until all local devices have done what was enqueued. [host] */
DP_MUST_USE DP_API dp_status dp_wait(dp_ctx *ctx);

/* Run `fn` once for every local device, each on its own thread, the first on the caller's; return
   when all have. Each gets a scope that ends with `scope` (NULL: when this returns). All run even
   if one fails; the first failure in rank order is returned, with its rank in it. A collective that
   failed because another rank did (dp_rank_all_reduce) counts only if there is no other. [host]

   While functions or methods of yours run on several devices of a machine, in one process or in
   several, OpenMP, OpenBLAS, BLIS and MKL use threads_per_device threads on each, or as many as the
   caller has set, if that is less. They are looked for when the context is opened, or when a job
   grows that had one device on the machine. When the call returns, the caller has its settings
   again. Methods of a plain module keep the caller's, and so does one part alone where a process
   has several devices: see dp_threads_limit. OpenBLAS built with threads of its own has one setting
   for all threads of the process, and lets one call at a time use several. What cannot be set so is
   logged, with its variable; what is linked statically, loaded later or privately is not found. */
typedef dp_status (*dp_run_fn)(int local_rank, dp_scope *scope, void *user);
DP_MUST_USE DP_API dp_status dp_run(dp_ctx *ctx, dp_scope *scope, dp_run_fn fn, void *user);

/* From now on these libraries use at most threads_per_device threads on the calling thread: for a
   process that shares its machine with others of the job, and computes outside of dp_run and of
   wrappers' methods, where each would use all cores. No number is raised or put back; one that you
   set later counts. Libraries are looked for now. If threads_per_device is -1, nothing happens. */
DP_MUST_USE DP_API dp_status dp_threads_limit(dp_ctx *ctx);

/* The rows (or elements of a block) of a local device if `count` are shared equally: the first
   count % D of D devices get one more. Returns how many; out_first gets the first one. -1: see
   dp_last_error. [any] */
DP_API int64_t dp_local_share(const dp_ctx *ctx, int local_rank, int64_t count, int64_t *out_first);

/* Which of the `total` rows of a batch of the whole job are this process': together the processes
   have each row once. They are divided over all ranks, as dp_split_rows divides them; of fewer rows
   than ranks some processes have none. Alone a process has all. [any] */
DP_MUST_USE DP_API dp_status dp_my_rows(const dp_ctx *ctx, int64_t total, int64_t *out_first,
                                        int64_t *out_count);

/* ==== >>launch =================================================================================
   Several processes, on one machine or many, are one job: its ranks are the devices of all. The
   launcher that starts them says in the environment which process each one is. dp_open connects
   each to the others. All processes call it equally often and in the same order. dp_open uses the
   first set in this table of which a variable of the first two columns is there (of slurm's,
   SLURM_STEP_ID too). The first column must be complete, and the second complete or not there:

     DP_LAUNCH  which of how many      on its machine              where process 0 is
     dp         DP_PROCESS,            DP_LOCAL_PROCESS,           DP_ADDR
                DP_PROCESS_COUNT       DP_LOCAL_PROCESS_COUNT
     torchrun   RANK, WORLD_SIZE       LOCAL_RANK,                 MASTER_ADDR, MASTER_PORT
                                       LOCAL_WORLD_SIZE
     openmpi    OMPI_COMM_WORLD_RANK,  OMPI_COMM_WORLD_LOCAL_RANK, -
                OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_SIZE
     mpich      PMI_RANK, PMI_SIZE     MPI_LOCALRANKID,            -
                                       MPI_LOCALNRANKS
     slurm      SLURM_PROCID,          SLURM_LOCALID               SLURM_STEP_NODELIST, unless
                SLURM_NTASKS                                       SLURM_STEP_NUM_NODES is 1

   If dp_mpi.h is compiled in, processes that MPI has started, or that have initialised MPI, meet
   through MPI, which knows the last column. DP_LAUNCH = mpi says that MPI has started them.

   A job of one process opens no connection. $DP_LAUNCH = none means that there is no launcher. A
   name of the first column selects its set. Slurm's variables count only inside a step made by
   srun: under salloc or sbatch alone a program is one process.

   With DP_ONE_PROCESS the object of dp.h and the time to compile it are two thirds, and dp_open,
   where this table, DP_REJOIN or a bootstrap says that there are others, is UNSUPPORTED. So are
   dp_spawn, messages, also to oneself, and MPI, NCCL and RCCL. All that serves the devices of one
   process is as before, dp_distributed too.

   $DP_ADDR = host:port is the address of process 0, for any launcher. If another program has that
   port, the next seven are tried; one that takes connections there and never answers has its share
   of timeout_ms, and then the next port is tried. Looking up a host name takes timeout_ms at most.
   With torchrun the first port is MASTER_PORT + 1, because torchrun's own store may use
   MASTER_PORT. With slurm it is made from the numbers of job and step, between 20000 and 29999.
   mpirun gives no address: its processes meet inside their machine, under a name made from the
   job's, or from the number of the process that has started them (mpich: the one behind PMI_FD); so
   do processes with $DP_ADDR = @name. Other systems have a file of that name in $TMPDIR.

   For a firewall, $DP_PORTS = 20000-20031 (or one port) is the range in which processes listen if
   nothing else gives them a port: process 0 under slurm, and all processes that others connect to.
   Without it, those take any free port. A process needs one while a context opens, and one for as
   long as the context is open if there are several machines or the job can recover: all that others
   have to say to it comes there. So does each group. Where others may come later, each machine
   needs one more, or nobody finds them.

   $DP_INTERFACE chooses among the networks of a machine. It is the name of an interface, or the
   beginning of a name (ib) or of an address (10.1.). Processes listen there, and the others connect
   to that address. Without it that is the one from which a process reaches process 0, or, with a
   bootstrap of yours, the one from which it would leave its machine. Process 0 is still found at
   the address above; if that is the interface's, it listens nowhere else. NCCL gets the same
   interface (dp_nccl.h), MPI has settings of its own.

   $DP_CONNECTIONS = 1 to 64 is how many connections two processes have for collectives over TCP;
   without it, one. More are for links that one does not fill, as they are long, or as the network
   slows each connection down. A connection gets one window across in each round trip: so take the
   bytes that the link carries in a second, times its round trip, divided by what a window may have
   (Linux: net.ipv4.tcp_wmem and tcp_rmem). Where one fills the link, more of them cost files, and
   time to open. The number of process 0 is that of the job, also for processes that come later; who
   has another one logs a warning. If a process has more than 16 KiB for another one, connections
   carry parts of it side by side. Who loses one of them has lost the process. Messages keep to a
   connection of their own.

   Two jobs at one address are told apart by the number that their launcher has given them
   (TORCHELASTIC_RUN_ID, PMIX_NAMESPACE or OMPI_MCA_ess_base_jobid, PMI_JOBID, SLURM_JOB_ID and
   SLURM_STEP_ID; TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT), or by $DP_SECRET: the same in
   all processes of a job, different in every job. It also keeps out processes that know the number.

   Without either, processes of two jobs at one address cannot be told apart. But only one process 0
   can have the address until its dp_close; the error of a second one names it. If the first job is
   still being formed, all processes of both jobs get an error. The same happens if any other
   process number comes twice; process 0 waits half a second for that when all have come. If the
   first job has formed, processes of the second one find nobody, and their error says who has the
   address. One case remains: a process of the second job takes a place in the first, and the
   rightful one comes more than half a second after the job has formed: only that one gets an error.

   Where there is no launcher, examples/dprun.c is one. By hand, in two terminals:

     DP_PROCESS=0 DP_PROCESS_COUNT=2 DP_ADDR=localhost:7000 ./train
     DP_PROCESS=1 DP_PROCESS_COUNT=2 DP_ADDR=localhost:7000 ./train

   The processes of a machine divide it. With equal affinity masks they share the cores, and process
   i of L takes the i-th part of the devices. A launcher that has bound them to cores has divided
   those already. config.thread_count, device_count, devices and $DP_DEVICES override this. Threads
   keep to the nodes (NUMA) of their part: see NODES.

   If a process does not come within timeout_ms of the first, or ends early, the error of all others
   names it. A process that comes within a second after that gets the same error. If the process
   that waited for it was held up itself for an eighth of that time, by a debugger or as its machine
   slept, the error says that, too. All waits of one dp_open, for processes that come and for what
   they do until all have a context, last timeout_ms together, and a few seconds in which it asks
   who is missing; what a process does itself, like opening its devices, is no wait. Who comes last
   has a second, however late it is. The tree of connections stays until dp_close, which waits for
   nobody: 512 processes meet in a second or two, each with at most ten connections.

   Later, too, the error of all others names a process that is killed, stops, leaves out a
   collective or issues a different one. Every process returns within the time-out plus a few
   seconds, in which it asks which one is missing. The others can go on without it: see >>recovery.
   The error, and a warning at a quarter of the time-out, also say which of your functions that one
   is in, and since when.

   A process that hangs in a function of yours does not learn that the job has failed. With grace_ms
   it ends: if the job has failed for so long, and no call has returned that to the program (to a
   function that the context has called does not count), a thread beside it logs what it is in (to
   stderr, if there is no log) and ends the process, with status 124 and without exit handlers; what
   stdio has not written is lost. So does one that dp_recover has left behind. What the program does
   after it has the error takes as long as it likes. A process that is stopped (SIGSTOP) cannot end
   itself: that is for its launcher (dprun --grace). Groups have a grace only if their config says
   so. MPI has to serve several threads.                                                        */

/* Run fn(user) in `count` new processes (1 to 4096), as a job on this machine, and wait for all.
   The environment tells each process its number, so its dp_open needs no config. A process begins
   with a copy of this process' memory but none of its other threads. It ends when fn returns,
   without calling functions given to atexit. The first process that fails or dies ends the others,
   and this call returns its sentence. One that ends before fn returns has failed, whatever its exit
   status: by exit, or as another program (exec). How one died is not known if a handler of SIGCHLD
   waits for any child. Ctrl-C ends all; none outlives this process. Idle threads of OpenMP are
   ended before, because new processes would wait for them for ever. STATE while a context is open,
   inside a parallel region of OpenMP, and in a process that a launcher has started. */
DP_MUST_USE DP_API dp_status dp_spawn(int count, dp_status (*fn)(void *user), void *user);

DP_MUST_USE DP_API dp_status dp__open_group(dp_ctx *ctx, int group, const dp_config *config,
                                            size_t config_bytes, int version, dp_ctx **out);

/* Open a context for some processes of this job, as a job of their own: with ranks, collectives,
   wrappers and failures of its own. All processes of `ctx` call this; those that give the same
   number `group` are together, in their order in `ctx`. A process that gives -1 is in no group, and
   gets NULL. If it fails in one process, all get its status; those that wait for the others' groups
   have three seconds more than timeout_ms. Two calls cut a job of several machines both ways:

       dp_open_group(ctx, info.machine, NULL, &inside);             who is on this machine
       dp_open_group(ctx, info.machine_process, NULL, &between);    one process of each machine

   What is 0 in `config` (NULL: everything) is as in `ctx`: the devices too, and the shards, if the
   group's processes have a power of two of them, else 0. INVALID: bootstrap, local_only, job.
   Threads keep to the cores of the calling thread.

   Close the group with dp_close, before `ctx` or after it. A process that dies fails all contexts
   that it was in; whatever else fails a group leaves the others alone. One thread may use both in
   turn, if all processes do so in the same order. */
DP_MUST_USE static inline dp_status dp_open_group(dp_ctx *ctx, int group, const dp_config *config,
                                                  dp_ctx **out)
{
    return dp__open_group(ctx, group, config, sizeof(dp_config), DP_VERSION, out);
}

/* ==== >>recovery ===============================================================================
   A job goes on without processes that have died. With config.recovers, the others call dp_recover
   once a call has failed with a status of the JOB class. They agree who is left, and are a job of
   their own, in the same context:

       status = step(changed);
       changed = status != DP_OK && dp_failure(ctx, NULL);
       if (changed)
           status = dp_recover(ctx);       dp_info says which process this is now

   and step begins with

       if (!changed)
           DP_TRY(dp_admit(ctx, &changed));       where processes may come later; see below
       if (changed)
           DP_TRY(share(...));     what the furthest one has: dp_checkpoint_share in dp_save.h

   Devices, memory, scopes, modules, wrappers by dp_distributed, optimizers, averages, loaders and
   log functions stay. Processes are numbered anew, without gaps, in the order that they had, and so
   are ranks; dp_info.recoveries counts. A wrapper reduces over the ranks that are left, its
   gradients are zero, and its buckets are those of a new wrapper. What was under way is void:
   passes and messages. Parameters stay as they are in each process. Some processes may have ended
   the last step, and others not: they are at most one step apart. Cores are not shared out anew:
   set config.thread_count, or threads_per_device, where a job is to grow on a machine.

   Reducers that you have made, a dp_local, and optimizers with `sharded` (the dead had parts of
   their state) are not valid any more: calls return STATE, and destroying them works. (A new
   optimizer loads a checkpoint, and one with `mirrored`, by dp_mirror.h, goes on.)
   Groups are contexts of their own.

   There is never a second job. Where all processes share a machine with Linux, any number may die.
   Elsewhere only a majority of the job goes on, or the half with the process that has been in it
   longest (of those, the lowest): the others might be alive where nobody here can see them. A
   process that is left behind gets an error that says so, even if it was only stopped and wakes up
   later. One that still computes is waited for, half of timeout_ms; one that cannot be reached, for
   1.5 s, and if those that came are too few, a quarter of timeout_ms. One that waits in a call for
   a process that is stopped, and hears of no failure, learns after a second, or an eighth of
   timeout_ms, that others recover. One that may open no more files does not know who is there: it
   waits until it may, or fails (NO_MEMORY), and the others go on. If another one dies meanwhile, or
   does not come where they meet, within a second to five, recovery begins anew. Once the devices
   have ended their work dp_recover takes at most timeout_ms and three seconds, as those that agree
   late still have to meet; NCCL may take timeout_ms more. Where two cannot reach each other, though
   others reach both, no job can be made of them: each try fails until they can, or one has ended.
   One that waits in a group is missed if that takes longer than those times. dp/members.h has the
   algorithm, and why it is safe.

   config.recovers costs each process an open port from dp_open to dp_close, and each machine some
   shared memory. MPI ends all processes when one has died: dp_open with both is UNSUPPORTED. So is
   dp_recover with share_params.

   Processes can come later: new ones, and those that were started again. They have the environment
   of the others and $DP_REJOIN = 1, as dprun --respawn and dprun --join say; any DP_PROCESS will
   do. There is room for as many as at first, or for $DP_PROCESS_LIMIT, the same in all that are
   there at first. The first dp_open of such a process waits until the others call dp_admit and
   there is room; one that waits already may come in with dp_recover. Then, before any other
   collective call, it makes the wrappers that the others have, in the same order (by
   dp_distributed), and begins with `changed` set: all share what the furthest process has. See
   examples/elastic.c, and share in examples/training.h.

   It finds process 0, whichever that is by then: inside a machine by a name, else at the host of
   $DP_ADDR, eight ports behind the one there (before it, near the last), or in $DP_PORTS. Processes
   that have met inside one machine have addresses for others only if DP_INTERFACE is set. If
   process 0 cannot have that name or any of those ports, it logs a warning that says why; every
   dp_admit tries again. Process 0 listens there from the first dp_admit or dp_recover on, and a job
   that recovers may be nowhere for a while. Between machines no more come in at once than there are
   already, so that those that run can go on without them. A process that comes waits for all of its
   own timeout_ms, whatever is there. Then its error says what it has found: a job that has no room
   or does not call dp_admit, another job, a program that does not answer, or nobody.

   With shards a job goes on only when it is complete: dp_recover waits at least half of timeout_ms
   for processes that replace the dead. If they have not come, or cannot, it returns TIMEOUT, and
   the sentence says which; then try again. So training that has lost and gained processes ends with
   the same bits.                                                                               */

/* All that are left call this. An error: the job stays failed, and only dp_close is left, or
   another try. STATE: the job has not failed, config.recovers was not set, or dp_open met no other
   process. [host] */
DP_MUST_USE DP_API dp_status dp_recover(dp_ctx *ctx);

/* All call this between two steps: it lets in the processes that wait to come back. out_came: some
   came, and this process has gone through what dp_recover does. If nobody waits it costs as much as
   dp_any; in a process that is alone, nothing. STATE: config.recovers was not set; or a reducer has
   an open pass, or messages were not ended. A forward without its backward is void if some came.
   Groups stay as they are. [host] */
DP_MUST_USE DP_API dp_status dp_admit(dp_ctx *ctx, bool *out_came);

/* ==== >>scope ==================================================================================
   A lifetime: what is made in a scope is freed by one call, on error paths too. Blocks are kept and
   reused, so a step that repeats itself allocates nothing. Any thread may begin a scope; one thread
   at a time uses it; it may be handed over. Values may point into their scope or an outer one. */

DP_API dp_scope *dp_scope_begin(dp_ctx *ctx);      /* NULL: dp_last_error; calls report it. [any] */
DP_API dp_scope *dp_scope_child(dp_scope *parent); /* ends with its parent, or earlier */
/* DP_OK; or why it cannot be used, or could not be begun, for those who return that. [any] */
DP_MUST_USE DP_API dp_status dp_scope_check(const dp_scope *scope);

/* End it and its children, the newest or last attached first. Waits only for copies that still read
   host memory. NULL is fine. Refused (dp_last_error) in a function called for it, or one inside. */
DP_API void dp_scope_end(dp_scope *scope);

/* Host bytes, 64-byte aligned, not cleared; NULL when out of memory. 0 bytes give a pointer too. */
DP_API void *dp_scope_alloc(dp_scope *scope, size_t bytes);

/* The same where all CPU ranks of the machine see it, if they can: collectives of more than 64 KiB
   copy nothing on the way. After a JOB error others may write there until dp_close. */
DP_API void *dp_shared_alloc(dp_scope *scope, size_t bytes);

/* Call `fn` when the scope ends, before its memory goes; last in, first out. */
DP_MUST_USE DP_API dp_status dp_scope_defer(dp_scope *scope, void (*fn)(void *user), void *user);

/* Hand `scope` over: it becomes a child of `parent`, as when a loader's batch joins a step. */
DP_MUST_USE DP_API dp_status dp_scope_attach(dp_scope *parent, dp_scope *scope);

/* Copy a value and all it points to, tensors' data too, so that it lives as long as `to`. */
DP_MUST_USE DP_API dp_status dp_keep(dp_scope *to, dp_value value, dp_value *out);

/* ==== >>tensor =================================================================================
   Views are made without a context; what touches data takes one. Work on a device is ordered on its
   compute stream; results in host memory are complete at return. Memory may lie at any address, on
   any device. It is fastest if aligned to its elements: the host loses little without that, but a
   GPU has kernels for aligned memory only, and the host does their work on the rest.            */

/* New memory of a local device or ({0}) of the host, row-major, not cleared. */
DP_MUST_USE DP_API dp_status dp_tensor_new(dp_scope *scope, dp_device device, dp_dtype dtype,
                                           int ndim, const int64_t *shape, dp_tensor *out);

/* The same with these numbers; `host` may change as soon as this returns. */
DP_MUST_USE DP_API dp_status dp_tensor_from(dp_scope *scope, dp_device device, const void *host,
                                            dp_dtype dtype, int ndim, const int64_t *shape,
                                            dp_tensor *out);

/* Host memory of yours, row-major. A wrong argument is reported when the tensor is used. [any] */
DP_API dp_tensor dp_wrap(void *data, dp_dtype dtype, int ndim, const int64_t *shape);
DP_API dp_tensor dp_wrap_const(const void *data, dp_dtype dtype, int ndim, const int64_t *shape);

DP_API int64_t dp_tensor_count(const dp_tensor *tensor); /* elements; -1 when it is malformed */
DP_API bool dp_is_contiguous(const dp_tensor *tensor);   /* row-major without gaps */
DP_API bool dp_same_shape(const dp_tensor *a, const dp_tensor *b); /* false: if one is malformed */

/* Views; dims may be negative, counted from the end. [any] */
DP_MUST_USE DP_API dp_status dp_narrow(const dp_tensor *tensor, int dim, int64_t first,
                                       int64_t count, dp_tensor *out);
DP_MUST_USE DP_API dp_status dp_select(const dp_tensor *tensor, int dim, int64_t index,
                                       dp_tensor *out);
DP_MUST_USE DP_API dp_status dp_transpose(const dp_tensor *tensor, int dim_a, int dim_b,
                                          dp_tensor *out);
/* One size may be -1. INVALID when no strides give the new shape: call dp_contiguous first. */
DP_MUST_USE DP_API dp_status dp_reshape(const dp_tensor *tensor, int ndim, const int64_t *shape,
                                        dp_tensor *out);

/* The tensor itself if it is contiguous, else a contiguous copy in `scope`. */
DP_MUST_USE DP_API dp_status dp_contiguous(dp_scope *scope, const dp_tensor *tensor,
                                           dp_tensor *out);

/* Every element becomes `number` (DP_BOOLEAN, DP_INT or DP_FLOAT), which must fit the dtype. */
DP_MUST_USE DP_API dp_status dp_fill(dp_ctx *ctx, const dp_tensor *dst, dp_value number);

/* Copy a tensor to one of the same shape and dtype, with any strides, on any two devices. stream
   NULL = the compute stream of the device that writes (if the host writes: of the device that
   reads). On a stream of yours, of either device, the copy comes after everything already on the
   compute streams of both. You have to order what follows, including the end of a scope. Between
   two devices the one that writes copies. Given a stream of the one that reads, it copies on its
   own compute stream: after everything already on the given stream, and before what follows on it.
   Host memory that a device reads may change again after dp_wait. */
DP_MUST_USE DP_API dp_status dp_copy(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src,
                                     dp_stream *stream);

/* Same shape, any two dtypes and devices. To integers, what is out of range saturates and NaN
   becomes 0; f64 becomes f16 or bf16 through f32. Between equal dtypes it is dp_copy. */
DP_MUST_USE DP_API dp_status dp_cast(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src);

/* The elements of a tensor in new memory, row-major, on this device and in this dtype, as by
   dp_cast; `out` may be `from`. */
DP_MUST_USE DP_API dp_status dp_tensor_to(dp_scope *scope, dp_device device, dp_dtype dtype,
                                          const dp_tensor *from, dp_tensor *out);

/* Calls fn(piece, its bytes, user) for views of a tensor, which together are all of it, in
   row-major order: each has at most `most` bytes (one element is the least), and as many rows as
   fit. fn's error ends the walk and is returned. [any] */
typedef dp_status (*dp_piece_fn)(const dp_tensor *piece, size_t bytes, void *user);
DP_MUST_USE DP_API dp_status dp_tensor_pieces(const dp_tensor *tensor, size_t most, dp_piece_fn fn,
                                              void *user);

/* out = a * x + b * y, floating dtypes, same shape, each product and the sum rounded. y may be NULL
   (scale); out may be x or y. */
DP_MUST_USE DP_API dp_status dp_axpby(dp_ctx *ctx, double a, const dp_tensor *x, double b,
                                      const dp_tensor *y, const dp_tensor *out);

/* Sum of squares, in f64 and to 1e-12 of it, and whether all is finite, read in one pass; the
   same bits whatever the number of threads. [host] */
typedef struct dp_stats {
    double sum_squares;
    bool all_finite;
} dp_stats;
DP_MUST_USE DP_API dp_status dp_tensor_stats(dp_ctx *ctx, const dp_tensor *tensor, dp_stats *out);

/* Copy all elements, row-major, to the host. `bytes` must be exactly their size. [host] */
DP_MUST_USE DP_API dp_status dp_read(dp_ctx *ctx, const dp_tensor *src, void *host, size_t bytes);

/* The number in a number, or in a tensor of one element. [host] */
DP_MUST_USE DP_API dp_status dp_item(dp_ctx *ctx, dp_value scalar, double *out);

/* ==== >>value ==================================================================================
   Trees of tensors, numbers, strings, lists and dicts. Constructors copy their arguments into the
   scope. A constructor that fails returns an error value, which any later call reports. A value
   that you made or changed by hand is checked wherever it is passed in.                        */

static inline dp_value dp__leaf(uint8_t kind)
{
    dp_value v;
    v.as.i = 0;
    v.count = 0;
    v.kind = kind;
    v.depth = 0;
    v.status = 0;
    v.reserved = 0;
    return v;
}
static inline dp_value dp_none(void)
{
    return dp__leaf(DP_NONE);
}
static inline dp_value dp_bool(bool b)
{
    dp_value v = dp__leaf(DP_BOOLEAN);
    v.as.b = b;
    return v;
}
static inline dp_value dp_int(int64_t i)
{
    dp_value v = dp__leaf(DP_INT);
    v.as.i = i;
    return v;
}
static inline dp_value dp_float(double f)
{
    dp_value v = dp__leaf(DP_FLOAT);
    v.as.f = f;
    return v;
}
static inline dp_value dp_opaque(void *p) /* passed on as it is; the pointee stays yours */
{
    dp_value v = dp__leaf(DP_OPAQUE);
    v.as.p = p;
    return v;
}
DP_API dp_value dp_string(dp_scope *scope, const char *text);
DP_API dp_value dp_of(dp_scope *scope, const dp_tensor *tensor);
DP_API dp_value dp_contain(dp_scope *scope, const dp_container *container);
DP_API dp_value dp_list_make(dp_scope *scope, dp_kind kind, const dp_value *items, size_t count);
DP_API dp_value dp_dict_make(dp_scope *scope, const dp_pair *pairs, size_t count);

/* An array of yours in host memory, row-major, as a read-only tensor; it is not copied. */
DP_API dp_value dp_array(dp_scope *scope, const void *data, dp_dtype dtype, int ndim,
                         const int64_t *shape);

/* The usual containers (>>collate): stacked, with the last two dims padded; left on the host. */
static inline dp_value dp_stacked(dp_scope *scope, dp_value tensor, double padding_value)
{
    dp_container container = {tensor, padding_value, 0, true, false};
    return dp_contain(scope, &container);
}
static inline dp_value dp_cpu_only(dp_scope *scope, dp_value data)
{
    dp_container container = {data, 0, 0, false, true};
    return dp_contain(scope, &container);
}

/* None if absent; an error value stays one. Keys are compared in turn: use indices for many. */
DP_API dp_value dp_get(dp_value dict, const char *key);
DP_API dp_value dp_at(dp_value value, size_t index); /* of a list, tuple or dict */
DP_API size_t dp_count(dp_value value);              /* entries of a list, tuple or dict, else 0 */
DP_API const char *dp_key_at(dp_value dict, size_t index); /* NULL when there is none */
DP_API const char *dp_text(dp_value string);               /* NULL when it is not one */
/* Bytes of the UTF-8 character that `text` begins with, 1 at its final NUL; 0: that is none, or
   `text` is NULL. [any] */
DP_API size_t dp_utf8_bytes(const char *text);
DP_API bool dp_is_utf8(const char *text); /* all of it; false: NULL. [any] */

/* The tensor in a value, checked; `what` names it in the sentence. DP_DTYPE_ANY, ndim -1: any. */
DP_MUST_USE DP_API dp_status dp_as_tensor(dp_value value, const char *what, dp_dtype dtype,
                                          int ndim, const dp_tensor **out);

/* Calls fn(scope, tensor or container, its place in the new tree, user) for each of a tree. The new
   tree has what fn made, and shares all other leaves, and lists and dicts without tensors, with
   `value`. fn may call dp_map for what is in a container. Its error ends the walk and is returned;
   what it makes may not be deeper than what it got. */
typedef dp_status (*dp_map_fn)(dp_scope *scope, dp_value value, dp_value *out, void *user);
DP_MUST_USE DP_API dp_status dp_map(dp_scope *scope, dp_value value, dp_map_fn fn, void *user,
                                    dp_value *out);

/* ==== >>collate ================================================================================
   Many samples become one batch, field by field: tensors are stacked, numbers become an i64 or f64
   tensor (bools a bool one), strings a list; a container is treated as it says, in groups of
   samples_per_device (0 = 1), one group per device.                                             */

DP_MUST_USE DP_API dp_status dp_collate(dp_scope *scope, const dp_value *samples, size_t count,
                                        size_t samples_per_device, dp_value *out);
/* Collates in part_count groups, among which samples are divided as rows by DP_SPLIT_BALANCED;
   fewer samples make as many groups. */
DP_MUST_USE DP_API dp_status dp_collate_parts(dp_scope *scope, const dp_value *samples,
                                              size_t count, size_t part_count, dp_value *out);

/* mmengine's two ways (dp_collate is mmcv's). Lists, tuples and dicts of samples become a list or a
   dict of batches, all the way down. If samples differ in that, an error names the place. Both are
   a dp_collate_fn of dp_data.h; `user` is not used. */
/* Stacks nothing: each field is the list of the samples' values, whose memory it shares. */
DP_MUST_USE DP_API dp_status dp_pseudo_collate(dp_scope *scope, const dp_value *samples,
                                               size_t count, dp_value *out, void *user);
/* Tensors are stacked, numbers become a tensor, strings and opaque pointers a list; containers are
   collated by dp_collate, with one sample for each device. */
DP_MUST_USE DP_API dp_status dp_default_collate(dp_scope *scope, const dp_value *samples,
                                                size_t count, dp_value *out, void *user);

/* ==== >>primitives =============================================================================
   Scatter, gather, replicate and reduce values over the local devices. If something would be lost,
   or cut differently from its neighbour, it is an error. The _into forms fill tensors of yours. */

typedef enum dp_split {
    DP_SPLIT_BALANCED, /* n/d rows each and one more for the first n%d; always d parts */
    DP_SPLIT_CHUNK,    /* torch.chunk: ceil(n/d) rows until none are left; may give fewer parts */
    DP_SPLIT_SIZES,    /* as given */
    DP_SPLIT_WEIGHTS,  /* in proportion, rounded by largest remainder */
    DP_SPLIT_EQUAL,    /* n/d rows each, or an error; always d parts. See ONE SIZE */
    DP_SPLIT_PADDED    /* as BALANCED, but filled up to one size; always d parts */
} dp_split;

typedef struct dp_cut { /* how rows become parts */
    int dim;            /* what counts as rows */
    dp_split split;
    const int64_t *sizes;  /* DP_SPLIT_SIZES: rows of each part */
    const double *weights; /* DP_SPLIT_WEIGHTS: one for each part */
    size_t split_count;    /* entries of sizes or weights: as many as there are devices */
    /* DP_SPLIT_EQUAL, _PADDED: how many rows each part has, also on a single device. 0: as many as
       the largest part of the batch, so that a single device gets all as it is. */
    int64_t part_rows;
} dp_cut;

/* ONE SIZE. A compiled graph accepts one number of rows. DP_SPLIT_EQUAL refuses a batch that makes
   parts of another size. DP_SPLIT_PADDED fills parts up to part_rows, and refuses more rows than
   that. A filled part is a copy: its real rows come first, as BALANCED deals them out, and then its
   last row again and again, because a row of zeros may make no sense. (A part without real rows,
   which only dp_scatter makes, repeats the last row of the batch; if the batch has none, there are
   zeros.) dp_split_rows tells how many rows of each part are real.

   In a wrapper, padding does not count:
     - call->row_count is the number of real rows, and so is the weight of the replica at first.
     - A tensor of an output that has as many rows along `dim` as the part loses those of padding:
       before it is gathered or returned, and in the log. Its gradient is zero there; therefore ask
       dp_call_out_grad for it, as it is a tensor even if dp_backward was given a number.
     - Gradients of inputs lose these rows, too.
     - What a method adds up itself it has to add up over row_count rows: a loss that it returns as
       one number, the mean of mean_grads, sums over the batch (dp_norm.h).

   Each process of a job cuts its own batch: set part_rows, so that all parts of the job have the
   same size. A batch of no rows makes one part of zeros; EQUAL refuses it if part_rows is set. Data
   dp_none() is a step in which no method runs.

   Where containers have groups, these are the parts. EQUAL refuses groups of different sizes.
   PADDED repeats the last sample of a group, in a stacked tensor and in a list; empty lists and
   what is cpu_only stay as they are.                                                            */

typedef struct dp_scatter_config {
    const int *local_ranks; /* NULL = all */
    size_t local_rank_count;
    dp_cut cut;
} dp_scatter_config;

typedef struct dp_gather_config {
    int local_rank; /* where the result goes */
    bool to_host;   /* to host memory instead */
    int dim;
} dp_gather_config;

/* How `rows` rows are divided among `part_count` parts: out_rows[part_count] and the number of
   parts made. `cut`: NULL = all zero; split_count is part_count, dim does not matter. */
DP_MUST_USE DP_API dp_status dp_split_rows(int64_t rows, size_t part_count, const dp_cut *cut,
                                           int64_t *out_rows, size_t *out_part_count);

/* A list with one value per part. Where there are containers they decide the cut: group i goes to
   device i, and a tensor beside them is cut along dim by the samples that the groups have (rows of
   a stacked tensor, entries of a list). Else tensors are cut along dim as `how` says. The rest is
   repeated. A single device gets everything as it is, and nothing has to agree. A container of a
   tensor that was never collated goes whole to the first device. A part whose memory its device can
   reach is a view, any other is a copy there. */
DP_MUST_USE DP_API dp_status dp_scatter(dp_ctx *ctx, dp_scope *scope, dp_value value,
                                        const dp_scatter_config *how, dp_value *out_list);

/* Positional and named arguments, cut alike: two lists of equal length, the shorter one filled up
   with empty tuples or dicts. */
DP_MUST_USE DP_API dp_status dp_scatter_kwargs(dp_ctx *ctx, dp_scope *scope, dp_value args,
                                               dp_value kwargs, const dp_scatter_config *how,
                                               dp_value *out_args, dp_value *out_kwargs);

/* The values of a list, all of one structure, become one, entry by entry: tensors are joined along
   dim in list order, 0-dim tensors become a vector, none stays none. Lists must be equally long and
   are not appended to each other: item i of the result is made of all items i. Numbers and strings
   cannot be joined: return tensors. */
DP_MUST_USE DP_API dp_status dp_gather(dp_ctx *ctx, dp_scope *scope, dp_value list,
                                       const dp_gather_config *how, dp_value *out);

/* A list with a value for each rank of `how` (its split is not used). The first rank's value shares
   the memory if it can, the others are copies: tensors of one dtype travel together. */
DP_MUST_USE DP_API dp_status dp_replicate(dp_ctx *ctx, dp_scope *scope, dp_value value,
                                          const dp_scatter_config *how, dp_value *out_list);

/* The values of a list, of one structure, are added up, in a binary tree (>>collectives). */
DP_MUST_USE DP_API dp_status dp_reduce_add(dp_ctx *ctx, dp_scope *scope, dp_value list,
                                           const dp_gather_config *how, dp_value *out);

DP_MUST_USE DP_API dp_status dp_scatter_into(dp_ctx *ctx, const dp_tensor *src, int dim,
                                             const dp_tensor *outs, size_t out_count);
DP_MUST_USE DP_API dp_status dp_gather_into(dp_ctx *ctx, const dp_tensor *parts, size_t part_count,
                                            int dim, const dp_tensor *out);
DP_MUST_USE DP_API dp_status dp_replicate_into(dp_ctx *ctx, const dp_tensor *src,
                                               const dp_tensor *outs, size_t out_count);
DP_MUST_USE DP_API dp_status dp_reduce_add_into(dp_ctx *ctx, const dp_tensor *parts,
                                                size_t part_count, const dp_tensor *out);

/* ==== >>collectives ============================================================================
   Over all ranks of the job. One host thread passes the buffers of all local ranks in one call.
   They may belong to anybody, in memory of the ranks' devices. Every process makes the same calls
   in the same order. A call returns when its work is ordered on the streams (CPU devices: done).
   Parts must not overlap, except in the in-place forms described below.

   Same call, same bits: ranks are added in a binary tree, ((0 + 1) + (2 + 3)) + (4 + 5) and so on.
   The left half of each sum has the largest power of two. So neighbours can be added first, and the
   sum over the same ranks does not depend on how they are spread over devices and processes.
   Between machines each process needs as many ranks, a power of two: see THE SAME BITS.

   A call that is refused (>>status: CALL) changes nothing, here or elsewhere. You can correct and
   repeat it: the others wait for it. If you will not, call dp_abort or dp_close.

   If a process dies, stops, closes its context, or issues another collective, all others fail with
   the same sentence, whatever carries the bytes. It names the rank at fault, the collective, what
   the collective was for (a bucket, buffers, dp_tag), and the last thing the rank did. Processes of
   one machine see at once what another one does. Those of several machines tell each other over the
   connections of the launcher, where a dead one is noticed too, or over MPI, where it is missed
   after timeout_ms. With a bootstrap of yours dp_open makes such connections, for which it takes
   timeout_ms where a firewall drops them. Where there are none, messages are UNSUPPORTED
   (>>messages), and only processes of one machine learn why others did not come. No process waits
   for another longer than timeout_ms plus a few seconds.

   CPU devices of several processes of one machine use shared memory. What lies there (gradients
   that the library allocates, memory of dp_shared_alloc) is added there, in one pass; the rest is
   copied on the way. Several machines use MPI where it has brought the processes together
   (dp_mpi.h), else TCP (dp/tcp.h), which needs nothing compiled in: each process is connected to
   each other one. Where there are 2, 4, 8, ... processes on each machine, what they send or need
   together crosses its link once. For that each communicator takes 3 MiB of shared memory for a
   process, and for a machine, and up to 24 where more than 64 processes take part. The ranks of one
   process are always added first.

   Devices with memory of their own that no table of collectives serves go through the host: the
   table that serves CPU devices carries copies, with the same sums, sentences and time-outs. Copies
   go in pieces of 1 MiB. dp_open allocates two for each local rank, with several processes four,
   which dp_recover uses again, once the streams that were at work on them are done; the next piece
   is copied out while one is carried. In one job, either all devices are of this kind or none.

   GPUs of several processes use NCCL, if dp_nccl.h is compiled in (dp_hip.h: RCCL takes NCCL's
   place). Without it they go through the host, with a warning. With NCCL, sums have the order above
   if dp_config.shards is set. Otherwise NCCL adds floats in an order of its own, the same each time
   on the same GPUs, and rounds halves on the way. When the job fails, whatever a GPU still waits
   for is given up: dp_wait and dp_read return the failure.                                     */

typedef enum dp_op { DP_OP_SUM, DP_OP_MEAN, DP_OP_PROD, DP_OP_MIN, DP_OP_MAX } dp_op;

typedef struct dp_part { /* one per local rank */
    const void *send;
    void *recv;
    dp_stream *stream; /* NULL = the rank's compute stream */
} dp_part;

/* recv[i] = op over ranks of send[i]. f16 and bf16 are added in f32 and rounded once. Integers
   wrap, and their mean is truncated towards zero. On bool, sum and max are "or", prod and min are
   "and". In place: send == recv. A local rank whose recv is NULL takes part but gets no result: if
   several devices have one owner, one of them receives for all. */
DP_MUST_USE DP_API dp_status dp_all_reduce(dp_ctx *ctx, const dp_part *local, size_t count,
                                           dp_dtype dtype, dp_op op);
/* The same times `scale`, in the same pass; floating dtypes. */
DP_MUST_USE DP_API dp_status dp_all_reduce_scaled(dp_ctx *ctx, const dp_part *local, size_t count,
                                                  dp_dtype dtype, dp_op op, double scale);
/* The mean, with each rank weighted (by its rows or tokens, say): the sum of weight * send divided
   by the sum of the weights of all ranks. weights: one per local rank, finite and not negative, not
   all 0. Each product is rounded to `dtype`. */
DP_MUST_USE DP_API dp_status dp_all_reduce_weighted(dp_ctx *ctx, const dp_part *local,
                                                    const double *weights, size_t count,
                                                    dp_dtype dtype);
/* recv of every rank = send of the root; send matters there only. In place: send == recv. */
DP_MUST_USE DP_API dp_status dp_broadcast(dp_ctx *ctx, const dp_part *local, size_t count,
                                          dp_dtype dtype, int root);
/* recv[rank * count_each + i] = send of that rank. In place: send == own part of recv. */
DP_MUST_USE DP_API dp_status dp_all_gather(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                           dp_dtype dtype);
/* recv[i] = op over ranks of send[own rank * count_each + i]. In place: recv == own part of send.

   Here and in dp_all_gather, CPU devices of a process may share a buffer: a local rank whose recv
   is NULL wants no result, and a recv may lie where another local rank sends the same elements. So
   all can receive their parts into what the first one sends, or send from what it receives. */
DP_MUST_USE DP_API dp_status dp_reduce_scatter(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                               dp_dtype dtype, dp_op op);
/* recv[r * count_each + i] = send[own rank * count_each + i] of rank r. Never in place. */
DP_MUST_USE DP_API dp_status dp_all_to_all(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                           dp_dtype dtype);
/* Rooted forms: recv matters at the root only (scatter: send does). */
DP_MUST_USE DP_API dp_status dp_reduce_to(dp_ctx *ctx, const dp_part *local, size_t count,
                                          dp_dtype dtype, dp_op op, int root);
DP_MUST_USE DP_API dp_status dp_gather_to(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                          dp_dtype dtype, int root);
DP_MUST_USE DP_API dp_status dp_scatter_from(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                             dp_dtype dtype, int root);
/* Return when every rank has entered. [host] */
DP_MUST_USE DP_API dp_status dp_barrier(dp_ctx *ctx);

/* Collectives that each rank calls for itself, as under MPI, in a function under dp_run. The thread
   tells which rank it is; all ranks of the job take part. A process that has one local rank may
   also call these wherever it may call dp_all_reduce.

       dp_status step(int local_rank, dp_scope *scope, void *user)      dp_run calls it
       {
           ...                                                          forward, backward
           DP_TRY(dp_rank_all_reduce(ctx, grads, grads, count, DP_F32, DP_OP_MEAN));
           ...                                                          step
       }

   All ranks make the same calls in the same order, each with memory of its own device; in place as
   above. What a rank receives into must not overlap what another one uses. Ranks that wait sleep,
   so there may be more of them than cores. The ranks of a process get the same status:
     what happens                        what follows
     a rank gives a wrong argument       its call is refused at once, and it can correct itself, as
                                         the others wait for it
     a rank of this process returns,     the others get an error that names it, from each such call
     fails or asks for something else    until dp_run has returned. Other processes wait: dp_abort
                                         ends that
     a rank does not call within         the job fails, and the sentence names the rank
     timeout_ms
     a process dies, or asks for         the job fails, as after any collective
     something else

   A group's context is for a dp_run of the group; after dp_recover all ranks are those that are
   left. Methods that dp_distributed runs may call these functions, too. A rank without a replica,
   or with shards without rows, counts for nothing in what is reduced, as in dp_call_all_reduce;
   all_gather and broadcast send zeros for it. In passes of other wrappers they are UNSUPPORTED.
   [host] */
DP_MUST_USE DP_API dp_status dp_rank_all_reduce(dp_ctx *ctx, const void *send, void *recv,
                                                size_t count, dp_dtype dtype, dp_op op);
DP_MUST_USE DP_API dp_status dp_rank_broadcast(dp_ctx *ctx, void *buffer, size_t count,
                                               dp_dtype dtype, int root); /* a rank of the job */
DP_MUST_USE DP_API dp_status dp_rank_all_gather(dp_ctx *ctx, const void *send, void *recv,
                                                size_t count_each, dp_dtype dtype);
DP_MUST_USE DP_API dp_status dp_rank_reduce_scatter(dp_ctx *ctx, const void *send, void *recv,
                                                    size_t count_each, dp_dtype dtype, dp_op op);
DP_MUST_USE DP_API dp_status dp_rank_barrier(dp_ctx *ctx);

/* ==== >>agreement ==============================================================================
   What the processes of a job tell each other on the host: counts, losses, how it went. Each
   process has one set of numbers, however many devices it has, and no memory is asked for. All
   processes make the same calls in the same order. In a job of one process nothing travels.

       int64_t seen[2] = {right, total};                     of this process' part of the data
       dp_all_reduce_i64(ctx, seen, 2, DP_OP_SUM);           now of all of it
       if (dp_rank(ctx) == 0)
           printf("%g %% right\n", 100.0 * (double)seen[0] / (double)seen[1]);                    */

/* The first rank of this process; how many ranks the job has. -1: dp_last_error. [any] */
DP_API int dp_rank(const dp_ctx *ctx);
DP_API int dp_rank_count(const dp_ctx *ctx);

/* `status` is this process' result, and dp_last_error its sentence. If all are DP_OK, all get
   DP_OK; else all get the status and the sentence of the first rank that failed: "rank 2: ...". So
   nobody waits for one that cannot go on. This does not fail the job: a status of the JOB class may
   be another context's. [host] */
DP_MUST_USE DP_API dp_status dp_agree(dp_ctx *ctx, dp_status status);

/* Whether a process says yes: one that has data left, say. [host] */
DP_MUST_USE DP_API dp_status dp_any(dp_ctx *ctx, bool mine, bool *out);

/* numbers[i] = op over processes of numbers[i]. Integers wrap, their mean is cut towards zero. When
   a call fails they are void. [host] */
DP_MUST_USE DP_API dp_status dp_all_reduce_i64(dp_ctx *ctx, int64_t *numbers, size_t count,
                                               dp_op op);
DP_MUST_USE DP_API dp_status dp_all_reduce_f64(dp_ctx *ctx, double *numbers, size_t count,
                                               dp_op op);
/* out[rank * count_each + i] = numbers[i] of the process that has that rank: as many times
   count_each as there are ranks. `out` is other memory than `numbers`. [host] */
DP_MUST_USE DP_API dp_status dp_all_gather_i64(dp_ctx *ctx, const int64_t *numbers,
                                               size_t count_each, int64_t *out);
DP_MUST_USE DP_API dp_status dp_all_gather_f64(dp_ctx *ctx, const double *numbers,
                                               size_t count_each, double *out);
/* numbers = those of the process that has rank `root`. [host] */
DP_MUST_USE DP_API dp_status dp_broadcast_i64(dp_ctx *ctx, int64_t *numbers, size_t count,
                                              int root);
DP_MUST_USE DP_API dp_status dp_broadcast_f64(dp_ctx *ctx, double *numbers, size_t count, int root);

/* ==== >>messages ===============================================================================
   From one rank to another: pipelines, parameter servers. Only these two take part. Messages from A
   to B with the same tag arrive in the order in which they were begun; others may overtake.

   A message is done when all of it is at the receiver, so a send waits for its receive, and two
   ranks that dp_send to each other wait in vain: begin both directions, then wait. Between begin
   and end a process may compute, run collectives, and begin more. But messages move only while both
   processes are in functions of this section: if one of them waits for a message, and comes to a
   collective after that, the other one may not wait in that collective first.

   If dtype or number of elements differ, both sides get DP_ERR_MISMATCH; other messages are not
   affected. If the peer dies or closes its context first, or nothing has moved for timeout_ms while
   this process waits, the job fails, and the sentence names ranks and tag. If the peer waits for a
   third rank, and so on, the sentence names the last one as well, and dp_failure that one.

   The memory stays yours, and has to last, unchanged, until the message is done: dp_scope_end does
   not wait for it. dp_close drops what is not done; then others that wait for it fail. Processes of
   a machine use shared memory; what lies there (dp_shared_alloc) is copied once. Several machines
   use MPI, if it has brought them together (for dp_close then see THE END in dp_mpi.h), else TCP,
   whatever carries their collectives: two processes connect when the first message between them
   begins. Where a process cannot have a port, or cannot be found by other machines (>>launch),
   dp_open logs a warning, and messages are UNSUPPORTED. Memory of devices that the host does not
   reach goes through copies on the host: those are read before a send has begun, and written, in
   the order of the stream, when a receive is done.                                              */

#define DP_ANY_RANK (-1)

typedef struct dp_message { /* all zero but for what you set */
    dp_tensor tensor; /* what is sent, or where it goes: the same dtype and number of elements */
    int local_rank;   /* which rank of this process sends or receives */
    int peer; /* a rank of the job, also of this process; to receive: or DP_ANY_RANK, which becomes
                 the sender */
    int tag;  /* any; the other side has the same */
    bool receives;
    dp_status status; /* DP_PENDING, and in the end how it went */
    void *state;      /* this and `number` are the library's */
    uint64_t number;
} dp_message;

/* All begin, or none. A struct may be copied; end only one of the copies. [host] if the host does
   not reach a tensor's memory */
DP_MUST_USE DP_API dp_status dp_messages_begin(dp_ctx *ctx, dp_message *messages, size_t count);
/* Wait until all of these are done. Returns the first failure; what is done stays so. [host] */
DP_MUST_USE DP_API dp_status dp_messages_end(dp_ctx *ctx, dp_message *messages, size_t count);
/* The same without waiting: DP_PENDING if one is not done. `count` 0 moves all on. */
DP_MUST_USE DP_API dp_status dp_messages_test(dp_ctx *ctx, dp_message *messages, size_t count);

/* One message, and wait for its end. The local rank is the tensor's device's, or for host memory
   the first one. `from` may be DP_ANY_RANK. [host] */
DP_MUST_USE DP_API dp_status dp_send(dp_ctx *ctx, const dp_tensor *tensor, int to, int tag);
DP_MUST_USE DP_API dp_status dp_recv(dp_ctx *ctx, const dp_tensor *tensor, int from, int tag);

/* ==== >>reducer ================================================================================
   Makes gradients in your own memory the same on all ranks. You say which parts of the memory
   become ready together (units), and report each unit as soon as backward has computed its
   gradient. Units travel in buckets, strictly one after another. With several processes a thread of
   its own (the courier) reduces each bucket as soon as all local ranks have it, while backward goes
   on, fastest in memory of dp_shared_alloc. A single process adds everything up in one pass over
   memory at the end; and with a hook, devices with memory of their own reduce all at the end. With
   one rank there is nothing to do, unless there is a hook.

       dp_reducer_create(ctx, &config, &reducer);
       dp_reducer_begin(reducer, NULL);                      at the forward
       dp_reducer_ready(reducer, 0, layer, NULL);            in backward, layer by layer
       dp_reducer_finish(reducer);                           gradients are equal now

   Every process makes the same calls in the same order, except dp_reducer_ready and _absent.
   Several reducers may have open passes at the same time, and may finish them in any order. Only
   the oldest open pass travels early; when it is finished, the next one starts. A pass that is
   finished before an older one is reduced when it is finished. If a process uses another order the
   job fails, and the error names both reducers, or both buckets, even if they have the same size.
   (NCCL on several machines does not compare what it adds up.)                                */

/* 0 is none of them, and an error: no default would be right for everybody. */
typedef enum dp_reduction {
    DP_SUM_RANKS = 1, /* the sum over ranks */
    DP_MEAN_RANKS,    /* the sum over ranks, divided by their number */
    DP_MEAN_SAMPLES   /* divided by the samples of all ranks since the last reduction: for gradients
                       that are sums over samples. See TOKENS */
} dp_reduction;

typedef struct dp_block { /* memory on every rank */
    dp_dtype dtype;
    size_t count;
    void *const *local; /* one pointer per local rank; blocks do not overlap */
} dp_block;

typedef struct dp_range { /* a part of a block; no two overlap */
    uint32_t block, unit; /* units are numbered without gaps */
    size_t first, count;  /* elements */
} dp_range;

/* What happens to units that a rank does not report in a reduced pass. With the last two, a unit
   that no rank has reported since the last reduction keeps its contents everywhere. */
typedef enum dp_unused {
    DP_UNUSED_ERROR, /* all ranks get an error */
    DP_UNUSED_FOUND, /* they travel when the pass ends; ranks tell each other what they used */
    DP_UNUSED_FIXED  /* the same up to the end of the first reduced pass in which no rank is absent
                        (dp_reducer_absent; dp_distributed: each device has rows). From then on each
                        rank that is not absent has to report what it had reported by the end of
                        that one; more or less is an error on all ranks. Nobody waits for the rest,
                        which may travel once a pass is open. */
} dp_unused;

struct dp_bucket;

typedef struct dp_buckets { /* how gradients travel */
    size_t first_bytes;     /* the first bucket is full when it has this many; 0 = 1 MiB */
    size_t bytes;           /* the same for all others; 0 = 25 MiB */
    /* Blocks of f32 and f64 travel as DP_F16 or DP_BF16: cast, added over the ranks in f32, times
       what the reduction says, rounded once, cast back. What f16 cannot hold becomes infinite. 0 =
       as they are, as they always are with one rank. */
    dp_dtype wire;
    dp_status (*hook)(const struct dp_bucket *bucket, void *user); /* see dp_bucket; NULL = none */
    void *hook_user; /* what the hook gets as `user` */
} dp_buckets;

typedef struct dp_reducer_config {
    const char *name; /* for sentences; NULL = "" */
    const dp_block *blocks;
    size_t block_count;
    const dp_range *ranges; /* NULL = each block is one unit */
    size_t range_count;
    const char *const *unit_names; /* for sentences; NULL = none */
    dp_reduction reduction;
    dp_unused unused_units;
    /* Devices of a process that share one owner of their parameters need what is reduced once: its
       first local rank gets it, and what the others hold is void. A hook leaves it to all. May
       differ from process to process. */
    bool to_first;
    dp_buckets buckets;
} dp_reducer_config;

typedef struct dp_reduce_pass { /* NULL = all zero */
    bool no_sync;               /* gradients stay local: add to them, and reduce in a later pass */
    const double *samples;      /* DP_MEAN_SAMPLES: one number per local rank, 0 is allowed */
} dp_reduce_pass;

typedef struct dp_reducer dp_reducer;

typedef struct dp_reduce_times { /* of a reduced pass, in this process */
    double compute_s;            /* from dp_reducer_begin to the last report */
    double travel_s;             /* while buckets were under way */
    double hidden_s;             /* the part of it before dp_reducer_finish was called */
    double finish_s;             /* that dp_reducer_finish took */
    size_t bytes;                /* that a rank gave to collectives */
} dp_reduce_times;

typedef struct dp_reducer_info {
    const char *name;
    size_t unit_count, bucket_count;
    size_t early_count; /* buckets that were reduced before dp_reducer_finish was called: in the
                           last reduced pass, or so far in the open one */
    bool regrouped; /* by the order in which rank 0 reported in the first reduced pass in which it
                           reported anything */
    bool scatters;  /* as it did in the last pass: see dp_grads_scatter_set */
    dp_reduce_times last, mean; /* of the last reduced pass; of all of them, a pass */
    uint64_t pass_count;        /* that were reduced, and did not fail */
    size_t bytes;               /* of a rank's gradients, without gaps between them */
    dp_reduction reduction;     /* from here on as the config has it, zeros resolved */
    dp_unused unused_units;
    dp_buckets buckets;
} dp_reducer_info;

typedef struct dp_bucket_info { /* its arrays are valid until the next dp_reducer_finish */
    dp_dtype dtype;
    size_t bytes;          /* that travel: of gaps between a wrapper's gradients too */
    const uint32_t *units; /* in the order in which they are expected */
    size_t unit_count;
    const dp_range *ranges; /* their memory, in its order */
    size_t range_count;
    double left_s, travel_s; /* when it last travelled: seconds from dp_reducer_begin until it left,
                                and on its way; 0: not yet in its present form */
} dp_bucket_info;

/* Arrays and strings are copied. All ranks must give the same config, but for `name`, to_first and
   hook_user; else all get a MISMATCH that says what one rank has, and what rank 0 has. It lives
   until dp_reducer_destroy or the end of the context. [host] */
DP_MUST_USE DP_API dp_status dp_reducer_create(dp_ctx *ctx, const dp_reducer_config *config,
                                               dp_reducer **out);
/* Refused while a pass is open. NULL is fine. */
DP_API dp_status dp_reducer_destroy(dp_reducer *reducer);

/* Open a pass. With DP_MEAN_SAMPLES all ranks tell each other how many samples they have; otherwise
   samples do not matter. */
DP_MUST_USE DP_API dp_status dp_reducer_begin(dp_reducer *reducer, const dp_reduce_pass *pass);

/* The gradient of a unit is complete on a local rank: by what is on `stream` by now (NULL = its
   compute stream), which must exist until the pass is finished. Each unit once per pass. [any] */
DP_MUST_USE DP_API dp_status dp_reducer_ready(dp_reducer *reducer, int local_rank, uint32_t unit,
                                              dp_stream *stream);
/* This local rank has nothing to report in the open pass: it has run out of data, say. Nobody waits
   for it, and it is no error, whatever unused_units is. Its memory is added all the same, so make
   it zero before the pass; what passes with no_sync have left there counts. With DP_MEAN_SAMPLES
   give 0 samples for it. STATE if it has reported a unit in this pass. [any] */
DP_MUST_USE DP_API dp_status dp_reducer_absent(dp_reducer *reducer, int local_rank);

/* End the pass. Gradients are reduced, in order on the compute streams (CPU devices: done).
   Unreported units are reduced too, so that no rank waits for ever; then every rank gets a MISMATCH
   (see dp_unused) that names the unit and the rank. Gradients are void then, and the next pass
   works. For a hook that fails see dp_bucket. A collective that fails is the job's failure. */
DP_MUST_USE DP_API dp_status dp_reducer_finish(dp_reducer *reducer);
/* Returns true if any rank used the unit in the last reduction (with DP_UNUSED_FIXED: in the pass
   that fixed it), before the first, and with DP_UNUSED_ERROR; else its memory was left alone. */
DP_API bool dp_reducer_used(const dp_reducer *reducer, uint32_t unit);

/* How it works at present; buckets in the order in which they travel. */
DP_MUST_USE DP_API dp_status dp_reducer_info_get(const dp_reducer *reducer, dp_reducer_info *out);
DP_MUST_USE DP_API dp_status dp_reducer_bucket_get(const dp_reducer *reducer, size_t bucket,
                                                   dp_bucket_info *out);

/* What a hook gets. A hook replaces the all-reduce of each bucket: for example, it compresses,
   all-reduces and decompresses. It finds gradients in the memory of `local`, and leaves the result
   there, the same on all ranks. Nothing is scaled before or after it. It is called in
   dp_reducer_finish, with several processes of CPU devices also on the courier's thread, while the
   caller computes. A bucket that no rank uses does not travel. Single units that no rank uses are
   zeros in it, and keep their contents.

   In a hook all processes call the functions below in the same order, with the same count,
   dtype, op and scale, and at least once. This is compared before anything travels. If they differ,
   or a hook fails, all ranks learn it: the rest of the pass does not travel, and dp_reducer_finish
   names the bucket and the rank, and quotes the hook's sentence. Gradients are void then, and the
   next pass works. */
typedef struct dp_bucket {
    dp_ctx *ctx;
    dp_reducer *reducer;
    size_t index;         /* buckets travel in this order */
    bool is_last;         /* no other has a higher index */
    dp_dtype dtype;       /* dp_buckets.wire, where that is set */
    size_t count;         /* elements of a local rank */
    const dp_part *local; /* one per local rank: send == recv, and the stream to work on */
    dp_bucket_info info;  /* its ranges lie there one after another */
    dp_op op;             /* without a hook it would be all-reduced by this */
    double scale;         /* and multiplied by this */
    dp_scope *scope; /* the reducer's, for what a hook keeps from pass to pass; it never ends it */
    void **kept;     /* where a hook keeps that: one place for all buckets, NULL at first */
} dp_bucket;

/* As dp_all_reduce_scaled, dp_all_gather and dp_all_to_all, over all ranks, on any memory; NULL
   streams are those of bucket->local. For the hook that got the bucket, on the hook's thread. */
DP_MUST_USE DP_API dp_status dp_bucket_all_reduce(const dp_bucket *bucket, const dp_part *local,
                                                  size_t count, dp_dtype dtype, dp_op op,
                                                  double scale);
DP_MUST_USE DP_API dp_status dp_bucket_all_gather(const dp_bucket *bucket, const dp_part *local,
                                                  size_t count_each, dp_dtype dtype);
DP_MUST_USE DP_API dp_status dp_bucket_all_to_all(const dp_bucket *bucket, const dp_part *local,
                                                  size_t count_each, dp_dtype dtype);

/* ==== >>module =================================================================================
   A model: methods, parameters and children, all by name. A method is a function of yours that gets
   one dp_call. There are no layers and no autograd: backward is a method too. A module lives on one
   device; wrappers (>>wrappers) run it on many. One thread at a time uses a module.             */

typedef struct dp_module dp_module;
typedef struct dp_pass dp_pass;
typedef struct dp_call dp_call;

typedef struct dp_method {
    const char *name; /* "forward", "backward", "train_step", or any other */
    dp_status (*fn)(dp_call *call);
} dp_method;

typedef struct dp_param_config {
    const char *name;
    dp_dtype dtype;
    int ndim;
    int64_t shape[DP_MAX_DIMS];
    bool frozen; /* has no gradient */
    bool buffer; /* no gradient either; replicas but the first get a copy a forward */
    /* Shares the memory of the parameter of this name; both names may be a child's: "child.name".
       The two must be alike and on one device; this one must not have memory of its own already. */
    const char *same_as;
    void *data, *grad; /* yours, dense, on the module's device; NULL = the library's, all zero */
} dp_param_config;

typedef struct dp_replica_info { /* of a module, for dp_module_config.replica_create */
    dp_ctx *ctx;
    dp_module *module;
    const void *state; /* the module's */
    dp_device device;
    size_t replica; /* 0: the module itself, when it is created; others: when it is wrapped */
    void **shared;  /* one pointer that all replicas of this module see; NULL at first */
} dp_replica_info;

typedef struct dp_module_config {
    const char *name;
    const dp_method *methods;
    size_t method_count;
    const dp_param_config *params;
    size_t param_count;
    dp_module *const *children; /* belong to this module from now on; none wraps another */
    size_t child_count;
    dp_module *wraps;  /* this one is a wrapper around that one, whose owner stays the same */
    const void *state; /* all replicas read it; nobody writes it while they run */
    dp_status (*replica_create)(const dp_replica_info *info,
                                void **own); /* a replica's own state */
    void (*replica_destroy)(void *own);
    int local_rank;           /* the device */
    bool announces_changes;   /* the owner of `data` calls dp_params_changed after writing to it */
    bool moves;               /* memory of yours may get other addresses: see dp_params_move */
    bool packed;              /* parameters are one block, in their order: dp_param_block */
    void *block, *block_grad; /* packed: memory of yours for it; NULL = the library's, all zero */
    bool mean_grads;          /* backward divides by its own number of rows; see dp_backward */
} dp_module_config;

/* Strings and arrays are copied; what pointers in them point to is not. */
DP_MUST_USE DP_API dp_status dp_module_create(dp_ctx *ctx, const dp_module_config *config,
                                              dp_module **out);
/* A copy of a module and its children on any device: memory of its own, the same numbers. */
DP_MUST_USE DP_API dp_status dp_module_copy(dp_module *module, int local_rank, dp_module **out);
/* dp_close does it for all. Refused while it is a child, wrapped, or in use. NULL is fine. */
DP_API dp_status dp_module_destroy(dp_module *module);

/* Sets dp_call.training, also for children and for what it wraps. Modules begin with true. */
DP_MUST_USE DP_API dp_status dp_module_train(dp_module *module, bool training);
DP_API const char *dp_module_name(const dp_module *module); /* "" if it is not a module */
DP_API int dp_module_rank(const dp_module *module);         /* local rank of its device, or -1 */
DP_API dp_ctx *dp_module_ctx(const dp_module *module); /* the context it was made in, or NULL */

typedef struct dp_param_info {
    const char *name; /* "child.name": the path from this module; wrappers add nothing to it */
    bool frozen, buffer;
    dp_tensor data;         /* read-only */
    bool shared;            /* all processes of the machine have it once: see dp_edit_begin */
    bool reduced;           /* it has a gradient that a backward here makes equal on all ranks */
    dp_reduction reduction; /* and how; 0 if it does not */
} dp_param_info;

/* Parameters and buffers of the whole tree, each piece of memory once: first the module's own, then
   those of its children, in order. */
DP_API size_t dp_module_param_count(const dp_module *module);
DP_MUST_USE DP_API dp_status dp_module_param(dp_module *module, size_t param, dp_param_info *out);
DP_MUST_USE DP_API dp_status dp_module_find(const dp_module *module, const char *name,
                                            size_t *out_param);

/* Parameters side by side in memory, and so are their gradients, for every owner (dp_owner_count).
   What is done to each element can be done to all of them at once: they begin where dp_owner_edit
   and dp_owner_grad of params[0] do. Every parameter with a gradient is in one stretch; one without
   elements is alone. */
typedef struct dp_stretch {
    const size_t *params; /* in the order of memory: in the library's the last one comes first */
    size_t param_count, count; /* count: elements */
    dp_dtype dtype;
    bool reduced; /* see dp_param_info: all of them are, or none */
    /* Where gradients are scattered (dp_grads_scatter_set), rank r owns elements r * share up to
       (r + 1) * share, and all own the rest. 0, as where it would be below 256: all own all. */
    size_t share;
    size_t before, after; /* stretches beside it that ranks reduce or share apart; or SIZE_MAX */
} dp_stretch;

/* All of the tree, in the order of their first parameters. They go with the module. */
DP_MUST_USE DP_API dp_status dp_module_stretches(dp_module *module, const dp_stretch **out,
                                                 size_t *out_count);

/* Views for writing. Replicas get the change at the next forward. Ask again for every change.
   Frozen parameters and buffers have no gradient: count 0. out_grad may be NULL; asking for it
   gives the parameter a gradient. For reading: dp_module_param, dp_owner_param, dp_owner_grad. */
DP_MUST_USE DP_API dp_status dp_params_edit(dp_module *module, size_t param, dp_tensor *out_data,
                                            dp_tensor *out_grad);
DP_MUST_USE DP_API dp_status dp_params_write(dp_module *module, size_t param, const void *host,
                                             size_t bytes);
DP_MUST_USE DP_API dp_status dp_params_changed(dp_module *module);
/* Tells the module that memory of yours has moved: from now on the numbers of this parameter or
   buffer are at `data`, and its gradient is at `grad` (NULL: where it was). Shape, dtype and device
   stay. The old memory is not used again, and may be gone already, if devices have no work left
   that uses it (dp_wait). Wrappers, reducers, optimizers, averages, files and recovery find the new
   place. Each process moves its own memory when it likes, between two steps:

       for (size_t i = 0; i < count; i++)
           DP_TRY(dp_params_move(net, i, tensors[i]->data, tensors[i]->grad->data));

   Tensors that you got before point to the old place, and so does a value of dp_module_save. A new
   `data` counts as an edit: the numbers may be others, and a forward before it has no backward. A
   gradient that waits for more passes (no_sync) moves with its numbers. STATE: this memory is the
   library's, or dp_module_config.moves is not set; or this was called by a function of yours that
   runs for the module, or for one that contains it. */
DP_MUST_USE DP_API dp_status dp_params_move(dp_module *module, size_t param, void *data,
                                            void *grad);
/* Tells a packed module that its block has moved, or that of its gradients. */
DP_MUST_USE DP_API dp_status dp_params_move_block(dp_module *module, void *block, void *block_grad);
/* With share_params, parameters are written only between these two, which all processes call: after
   the first nobody reads them, after the second all have written. In between each may write the
   same numbers, or its own part; passes are refused (STATE), as are writes outside. `status` is how
   it went here so far: if it is not DP_OK everywhere, all get the first error, as by dp_agree, and
   no edit has begun; dp_edit_end always ends one. They nest. Optimizers, dp_module_load and
   dp_average_begin do it by themselves. For modules that share nothing both return `status`, and
   nobody waits. [host]

   With several machines, each gets what was written on another one at the end, or at the beginning
   of an edit inside. If several have written to a parameter, it has to be the same on all of these:
   then it does not travel. Else all processes get MISMATCH, and the numbers of the first of these
   machines. So parts of one parameter are written on one machine, or see dp_edit_shares.

       DP_TRY(dp_edit_begin(net, DP_OK));
       dp_status status = dp_params_write(net, 0, numbers, sizeof numbers);
       DP_TRY(dp_edit_end(net, status));                                                        */
DP_MUST_USE DP_API dp_status dp_edit_begin(dp_module *module, dp_status status);
DP_MUST_USE DP_API dp_status dp_edit_end(dp_module *module, dp_status status);
/* All processes call this in an edit of a wrapper, or of a tree that has it. Each then writes only
   its ranks' shares of stretches (dp_stretch), and process 0 the rest, in tensors that it got in
   this edit before the call. Asking for others is STATE until the edit ends or one inside begins.
   Machines exchange these shares instead of whole parameters. Optimizers do it by themselves. */
DP_MUST_USE DP_API dp_status dp_edit_shares(dp_module *module);
/* Set all gradients of the tree to zero, as if no backward had run: they are unused and not void,
   and samples that waited for a reduction do not count in it. */
DP_MUST_USE DP_API dp_status dp_zero_grad(dp_module *module);

/* ==== >>call ===================================================================================
   What a method gets: everything, so that nothing is thread-local. Methods of several replicas run
   at the same time; each works in call->scope, on call->device.                                 */

struct dp_call {
    dp_ctx *ctx;
    dp_module *module;
    const char *method; /* of the forward, in its backward too */
    const void *state;  /* dp_module_config.state */
    void *own;          /* what replica_create made for this replica */
    dp_device device;
    int local_rank;
    dp_stream *stream;
    /* This replica's; lasts as long as the pass, so `saved` may lie in it. A method may put one of
       its own here while it calls a child, so that what the child makes, passes too, ends with that
       one (examples/in_parts.c). */
    dp_scope *scope;
    dp_value args, kwargs;
    dp_value out;                    /* a forward must set it (dp_none() counts) */
    void *saved;                     /* a forward sets it, its backward finds it */
    dp_value grad;                   /* backward: of `out`. See dp_backward */
    dp_value args_grad, kwargs_grad; /* backward sets them if input_grad_wanted; none = none */
    bool training, grad_enabled;     /* not grad_enabled: no backward will follow */
    bool input_grad_wanted;
    dp_dtype compute_dtype; /* from dp_pass_config; DP_F32 = the parameters' own */
    size_t replica, replica_count;
    int64_t row_first, row_count, row_total; /* of the whole batch: seeds; 0 when nothing was cut.
                                                Real rows: see ONE SIZE */
    double weight; /* samples in this replica's part, row_count at first; a forward may set it to
                      any number that is finite and not negative, its tokens, say: see TOKENS */
    struct dp__record *record;
};

/* The replica's parameter, by its index in dp_module_config.params; NULL: see dp_last_error.
   Gradients exist only in backward, which adds to them; frozen parameters have none. */
DP_API const void *dp_param(const dp_call *call, size_t param);
DP_API void *dp_buffer(const dp_call *call, size_t param);
DP_API void *dp_grad(const dp_call *call, size_t param);

/* The same as tensors: device, dtype and shape filled in. Errors are reported when one is used. */
DP_API dp_tensor dp_param_tensor(const dp_call *call, size_t param); /* read-only */
DP_API dp_tensor dp_buffer_tensor(const dp_call *call, size_t param);
DP_API dp_tensor dp_grad_tensor(const dp_call *call, size_t param);

/* All parameters of a packed module, and all their gradients: one array each, in the order of
   dp_module_config.params, without gaps. Otherwise as dp_param and dp_grad. */
DP_API const void *dp_param_block(const dp_call *call);
DP_API void *dp_grad_block(const dp_call *call);

/* In backward: the gradient of this parameter is complete after the work that is on call->stream by
   now, and may travel while backward goes on. Call it once per name and pass, and do not touch the
   gradient after that. It has no effect where nothing travels. Gradients that were not reported are
   ready when backward returns. */
DP_MUST_USE DP_API dp_status dp_grad_ready(const dp_call *call, size_t param);

/* In backward: the gradient of the output called `name` (NULL: of an output that is one tensor), as
   a dense tensor like that output, whatever dp_backward got: a number fills it, none zeroes it. */
DP_MUST_USE DP_API dp_status dp_call_out_grad(const dp_call *call, const char *name,
                                              dp_tensor *out);

/* A tensor of kwargs, or args, as row-major memory without gaps. One with other strides is copied
   into call->scope. The error says what is wrong with it. DP_DTYPE_ANY, ndim -1: any. */
DP_MUST_USE DP_API dp_status dp_call_tensor(const dp_call *call, const char *name, dp_dtype dtype,
                                            int ndim, const dp_tensor **out);
DP_MUST_USE DP_API dp_status dp_call_arg(const dp_call *call, size_t index, dp_dtype dtype,
                                         int ndim, const dp_tensor **out);
/* Checks the sizes of such a tensor, too; -1 is any: DP_SHAPE(-1, 16) takes rows of 16. */
DP_MUST_USE DP_API dp_status dp_call_shaped(const dp_call *call, const char *name, dp_dtype dtype,
                                            int ndim, const int64_t *shape, const dp_tensor **out);
/* The same as it came, never copied: channels-last, transposed, or a part cut along dim 1, say. */
DP_MUST_USE DP_API dp_status dp_call_tensor_view(const dp_call *call, const char *name,
                                                 dp_dtype dtype, int ndim, const dp_tensor **out);
DP_MUST_USE DP_API dp_status dp_call_arg_view(const dp_call *call, size_t index, dp_dtype dtype,
                                              int ndim, const dp_tensor **out);

/* Run a child's method in this replica. `child` is its name in dp_module_config (without one:
   "module"; of a wrapper: the name of its function, "data_parallel"). NULL: the module that this
   one wraps. The pass is for dp_backward in this method's backward; out_pass may be NULL. Inside a
   replica, and under dp_run, a wrapper uses only the device that it is called on. */
DP_MUST_USE DP_API dp_status dp_call_child(dp_call *call, const char *child, const char *method,
                                           dp_value args, dp_value kwargs, dp_value *out,
                                           dp_pass **out_pass);

/* recv[i] = op over the replicas of this pass of send[i]; where dp_distributed runs it, over those
   of all processes, in the tree of >>collectives. Every replica enters, with the same count, dtype
   and op, and gets the same status. If one fails or returns instead, the others get an error; if
   one does not come within timeout_ms, the job fails. send and recv lie in memory of call->device:
   a host array is fine on a CPU device, but not on a device with memory of its own. In place: send
   == recv. Otherwise the memory that a replica receives into must not overlap any other that is
   sent or received.

   Under dp_distributed a rank without a replica counts for nothing, and with shards so does a
   replica without rows: it adds nothing to a sum, and a mean is divided by the number of the
   others. All processes enter equally often, so one that has run out of data needs a batch of no
   rows: dp_none() would leave the others waiting. If one process enters and another does something
   else, the job fails. dp_norm.h shows how to use it. [host] */
DP_MUST_USE DP_API dp_status dp_call_all_reduce(dp_call *call, const void *send, void *recv,
                                                size_t count, dp_dtype dtype, dp_op op);
/* The same for dense tensors of one shape and dtype; where they lie is checked. */
DP_MUST_USE DP_API dp_status dp_call_all_reduce_tensor(dp_call *call, const dp_tensor *send,
                                                       const dp_tensor *recv, dp_op op);

/* ==== >>pass ===================================================================================
   One forward, and its backward. A pass lives as long as the scope given to dp_invoke, and so do
   the scopes of its replicas, which are children of that one.                                   */

typedef struct dp_pass_config {
    bool no_grad; /* the same as no out_pass */
    bool no_sync; /* more passes follow, which add to these gradients. dp_distributed: until
                               one without it, gradients stay with their rank; children's too */
    dp_dtype compute_dtype; /* passed on to the methods */
} dp_pass_config;

/* Run a method of a module, or of what it wraps. out_pass NULL: no backward will follow. */
DP_MUST_USE DP_API dp_status dp_invoke(dp_module *module, dp_scope *scope, const char *method,
                                       dp_value args, dp_value kwargs, const dp_pass_config *config,
                                       dp_value *out, dp_pass **out_pass);

typedef struct dp_input_grad {
    dp_value args, kwargs;
} dp_input_grad;

/* Run "backward" for a pass, once. `grad` has the structure of the output, with tensors of the same
   dtype and shape, which are copied to the replica's device. A number fills a whole tensor; none,
   or a missing key, means no gradient. If the structure differs, the call has no effect (passes
   that other processes reduce too: see dp_distributed). Backward adds to the gradients of
   parameters. Those of the inputs are returned if you ask for them (NULL: you do not): joined along
   dim, with zeros for a replica without a gradient if others have one.

   If a backward fails, the gradients of all parameters of its module are void, those of earlier
   passes included. Until dp_zero_grad, whatever would add to them, read them or step by them fails
   with STATE. So does a backward after a call has edited a parameter or buffer since the forward:
   the backward needs the numbers of the forward.

   A backward written for one device often divides by its own number of rows, and ignores the
   gradient that it is given. With dp_module_config.mean_grads it may stay as it is, whether it
   overwrites gradients or adds to them. They are zeroed first. Then the library takes the mean over
   all replicas, weighted by samples, and multiplies it by `grad`, which must be a number
   (dp_train_step: the loss factor). Under dp_distributed the reduction decides how ranks count:
   only DP_MEAN_SAMPLES weights them by samples. After a pass with no_sync the result is added to
   that pass's. In such a backward call->grad is the gradient of its own mean, 1/n for each of n
   elements of an output, to be passed on to children. */
DP_MUST_USE DP_API dp_status dp_backward(dp_pass *pass, dp_value grad, dp_input_grad *out);

/* ==== >>wrappers ===============================================================================
   A wrapper is a module that runs another one on several devices. It has the methods of the wrapped
   module, and adds nothing to the names of parameters. Wrappers nest. The batch is cut as by
   dp_scatter, every part goes through a replica, and all gradients are summed into the original.

     dp_data_parallel       outputs are gathered on one device (torch's DataParallel)
     dp_container_parallel  the same; the module's own train_step and val_step need a single device
                            (mmcv's MMDataParallel)
     dp_model_parallel      outputs stay where they are: a list with one entry per replica. Choose
                            it also for evaluation, where each replica returns a list with one entry
                            per image, and the lists are not equally long
     dp_criterion_parallel  takes that list, and computes losses where the outputs are (both:
                            PyTorch-Encoding)
     dp_meta_test_parallel  on the module's own device alone (mmfewshot's MetaTestParallel)
     dp_distributed         on the devices of all processes (torch's DistributedDataParallel)
     dp_separate_distributed  each of its children is wrapped by itself (mmengine's
                            MMSeparateDistributedDataParallel)

   With one device nothing is cut or gathered: the result is what the method returned. With several
   devices dp_gather always joins, so a loss without dims becomes a vector.

   The gradient of an input is where the input was. The gradient of a container is that of its
   groups, joined on the first device. Groups that were padded to different sizes cannot be joined;
   dp_backward says so if you ask for their gradients.                                          */

typedef struct
    dp_parallel_config {    /* zero: all devices, balanced along dim 0, results on the first */
    const int *local_ranks; /* the wrapped module lives on the first of them; the replicas of a GPU
                               that is there twice take turns */
    size_t local_rank_count;
    const int *output_rank; /* NULL = the first; need not be one of them */
    bool output_to_host;
    dp_cut cut;
    bool mean_of_samples; /* dp_criterion_parallel: losses are weighted by replicas' samples */
} dp_parallel_config;

/* With DP_SPLIT_BALANCED, _WEIGHTS, _EQUAL and _PADDED trailing parts without rows get no replica,
   but the first one always does. With _SIZES, and where containers have groups, every part gets
   one, and so do those that _CHUNK makes: all, empty, if the batch has no rows. Without arguments
   there is one replica. dp_distributed does the same, but for shards: see THE SAME BITS. */
DP_MUST_USE DP_API dp_status dp_data_parallel(dp_module *module, const dp_parallel_config *config,
                                              dp_module **out);
/* The same for one pass, without a lasting wrapper; arguments as for dp_invoke. */
DP_MUST_USE DP_API dp_status dp_data_parallel_once(dp_module *module, dp_scope *scope,
                                                   const char *method, dp_value args,
                                                   dp_value kwargs,
                                                   const dp_parallel_config *config, dp_value *out,
                                                   dp_pass **out_pass);
DP_MUST_USE DP_API dp_status dp_container_parallel(dp_module *module,
                                                   const dp_parallel_config *config,
                                                   dp_module **out);
DP_MUST_USE DP_API dp_status dp_model_parallel(dp_module *module, const dp_parallel_config *config,
                                               dp_module **out);
/* The criterion takes the model's list as its first argument, and targets that are cut as the batch
   was; in a replica it gets (output, targets...), with a tuple of outputs spread into as many
   arguments. Its result is the mean of the losses. */
DP_MUST_USE DP_API dp_status dp_criterion_parallel(dp_module *criterion,
                                                   const dp_parallel_config *config,
                                                   dp_module **out);
/* Containers are unwrapped. dp_module_copy makes modules for tasks that run side by side. */
DP_MUST_USE DP_API dp_status dp_meta_test_parallel(dp_module *module, dp_module **out);

/* A list of values, one per device: each becomes the sum of all. Its backward is the same call on
   the gradients. */
DP_MUST_USE DP_API dp_status dp_all_reduce_list(dp_ctx *ctx, dp_scope *scope, dp_value list,
                                                const dp_scatter_config *how, dp_value *out_list);

/* ---- all ranks ------------------------------------------------------------------------------- */

typedef enum dp_buffer_sync {
    DP_BUFFERS_FIRST, /* all ranks get those of rank 0 */
    DP_BUFFERS_MEAN,  /* floating-point ones become their mean over the ranks, others as above */
    DP_BUFFERS_LOCAL  /* each rank keeps its own */
} dp_buffer_sync;

/* Zero: as torch's DistributedDataParallel. */
typedef struct dp_distributed_config {
    const char *name;       /* as a child; NULL = "distributed" */
    dp_reduction reduction; /* 0 = DP_MEAN_RANKS */
    dp_buffer_sync buffers;
    dp_unused unused_params; /* those whose gradient backward did not ask for are unused */
    bool log_unused;         /* say at error level which those are, at each backward */
    /* Parameters and buffers that all ranks leave alone: names as dp_module_find has them. They
       start as they are, on each rank with shapes of its own if need be; their gradients stay with
       their rank, and are those of the first local rank in the module; nobody compares them. */
    const char *const *ignored;
    size_t ignored_count;
    dp_buckets buckets;
    dp_cut cut; /* of a process' batch, over its devices */
    /* The processes of a machine have parameters once, and each steps a part of them: see SHARED
       PARAMETERS. */
    bool share_params;
} dp_distributed_config;

/* A module that learns the same wherever it runs: in this process alone or in all of a job, on one
   device or many. It is dp_distributed with DP_MEAN_SAMPLES and buffers of rank 0: each process
   gives the rows that dp_my_rows says, or any others. */
DP_MUST_USE DP_API dp_status dp_everywhere(dp_module *module, dp_module **out);

/* The module on every rank of the job. Each process cuts its own batch over its devices, and leaves
   outputs where they are, as dp_model_parallel does: with one device or several, that of device i
   is dp_part_of(ctx, out, i). dp_backward returns when the gradients of all
   ranks are reduced, into the module of each process. You may scale or zero them there by hand; the
   next backward adds to them. Buckets travel while backward goes on: see dp_grad_ready.
   dp_distributed compares the modules of all ranks, and gives all of them the numbers of rank 0.

   All processes make the same forwards and backwards in the same order. The forward decides whether
   a pass is reduced (no_sync). Buffers are made equal before a forward with a pass, if gradients
   have been reduced since the last time. A forward without a pass, as in an evaluation, waits for
   no other process.

   With DP_MEAN_RANKS the gradient is that of the mean of the ranks' losses. With DP_MEAN_SAMPLES
   backward gets gradients of sums over samples, and the sum over all ranks is divided by the sum of
   their weights. dp_train_step does this by itself, so that N ranks compute the same as one.
   DP_SUM_RANKS and DP_MEAN_SAMPLES would count already reduced gradients twice: call dp_zero_grad
   before the next backward. Call it also between the backwards of two wrappers of the same
   parameters, and of a wrapper and the module by itself, whatever the reduction: one does not know
   what the other has reduced (STATE).

   TOKENS. If rows are sequences of different lengths, a mean over samples of means over tokens is
   not the mean over tokens: one token of a short sequence counts more than one of a long sequence.
   The same goes for means of devices, of processes, and of passes whose gradients are added up,
   because each has another number of tokens. Let a forward return the mean over all tokens of its
   part as its loss (0 if there are none), and set call->weight to their number. In dp_train_step of
   DP_MEAN_SAMPLES (dp_everywhere) the gradient then is that of the mean over all tokens of a step:
   of all ranks, and of all passes, with no_sync or dp_optim_config.accumulate. Give dp_log_mean
   their number in this process. If you call dp_backward yourself, give it 1, and let the loss be
   the sum over tokens. DP_MEAN_RANKS does not weight ranks, and other wrappers weight devices but
   not passes (examples/tokens.c).

   For children that are trained separately, as in a GAN, see dp_separate_distributed.

   dp_train_step with data dp_none() is an empty step, for a process that has run out of data. It
   adds nothing, and has no weight in DP_MEAN_SAMPLES. Losses in the log are those of this process.

   A module without parameters, or without any that ranks reduce, is for a trainer that has its
   numbers elsewhere. Its batches are cut, its methods run on all devices, the table below holds,
   and it goes on after dp_recover. The trainer makes its numbers equal at first (dp_broadcast) and
   after dp_recover (dp_checkpoint_share), and sums its own gradients: with dp_call_all_reduce in a
   method, or dp_all_reduce after the step. What asks for parameters finds none: dp_params_compare
   compares nothing, dp_module_save gives an empty dict, and an optimizer only counts steps, so that
   dp_optim_lr tells the rate of a schedule.

   With several processes:
     what fails                           who gets the error       after that
     a reduced dp_backward or             all ranks: status,       gradients are void until
     dp_train_step (a batch that          number and sentence      dp_zero_grad; the pass is over,
     cannot be cut, a wrong gradient,     of the failing rank      the next one works
     a method, no dp_zero_grad)
     a forward, before its methods run    this process             go on
     a method of a forward; an            all: the job's           only dp_close works
     optimizer that fails to begin        failure
     an optimizer's update                this process; with       the others have made their step;
                                          `sharded` (dp_train.h)   with `sharded` only dp_close
                                          all                      works

   The comparison includes the layout of memory: give memory of yours (`data`, packed blocks) on all
   ranks or on none.

   SHARED PARAMETERS. With share_params, CPU devices of all processes of a machine read parameters
   in one piece of memory; addresses do not change. In place of P times the parameters and state of
   an optimizer there are parameters once a machine, state once in the job, and gradients P times.
   Buffers stay with each process. An optimizer has to be `sharded` (dp_train.h). Whoever writes,
   writes for all: see dp_edit_begin. When the wrapper is destroyed each process gets a copy of its
   own, which may fail for want of memory (NO_MEMORY: nothing has changed). The one copy lies near
   the first process of the machine. A process that dies in a step leaves some parameters stepped
   and others not: go back to a checkpoint.
   Inside a machine a step sends nothing. Between machines it sends what ranks have stepped: each
   share goes to one process of each other machine. These are messages, over TCP or MPI; where
   nothing carries messages (>>messages) parameters are broadcast, and all processes receive
   them. Machines may have different numbers of processes.
   Devices other than CPU devices, `ignored` parameters, memory of yours, a module in a tree with
   other parameters, and a second wrapper are UNSUPPORTED. With one process, or without parameters,
   the switch changes nothing. */
DP_MUST_USE DP_API dp_status dp_distributed(dp_module *module, const dp_distributed_config *config,
                                            dp_module **out);

/* The part of an output that a wrapper left on this device; all of it where there is one device,
   none if this one had no rows. [any] */
DP_API dp_value dp_part_of(const dp_ctx *ctx, dp_value out, int local_rank);
/* A module whose methods train its children one by one, as in a GAN. Each child that has parameters
   with a gradient is on every rank, as dp_distributed would have it with this config, under its own
   name. Other children, and the module's own parameters, stay with their process. dp_invoke of the
   result runs the module's method ("train_step"). There dp_call_child finds the children on all
   ranks, dp_backward reduces, and a pass with no_sync is one of all children; gradients need an
   out_pass there, too. The module itself is unchanged. Names in `ignored` are the module's:
   "child.name". If a method fails on one rank between two passes, the others do not learn it and
   wait: call dp_abort. */
DP_MUST_USE DP_API dp_status dp_separate_distributed(dp_module *module,
                                                     const dp_distributed_config *config,
                                                     dp_module **out);

/* Each device with memory of its own has its own parameters and, after a backward, the reduced
   gradients. If an optimizer steps only the parameters of the module itself, these are sent to all
   other devices before the next forward. To avoid that, take the same step for every owner on its
   device. Parameters that were edited equally often for each owner are not sent, unless something
   else has edited the module since the last forward (dp_params_edit for reading counts). Devices
   that share memory have one owner, on the first of them: 8 ranks on 2 GPUs have 2. Other wrappers
   and plain modules have one: for these dp_owner_edit is the same as dp_params_edit.
   dp_params_compare of the wrapper tells whether the owners differ. */
DP_API size_t dp_owner_count(const dp_module *module);
DP_MUST_USE DP_API dp_status dp_owner_edit(dp_module *module, size_t owner, size_t param,
                                           dp_tensor *out_data, dp_tensor *out_grad);

/* A parameter or buffer of an owner (0: the module itself), for reading, at any time. This is not
   an edit. What was written to the module alone other owners have from the next forward on. */
DP_MUST_USE DP_API dp_status dp_owner_param(dp_module *module, size_t owner, size_t param,
                                            dp_tensor *out);

/* The gradient of a parameter of an owner (0: the module itself), for reading. This is not an edit.
   Frozen parameters and buffers have none: count 0. STATE while it is void. */
DP_MUST_USE DP_API dp_status dp_owner_grad(dp_module *module, size_t owner, size_t param,
                                           dp_tensor *out);
/* Which parameters have a gradient for the next step, one answer for each: count is
   dp_module_param_count. A parameter has one if, since dp_zero_grad, a backward has asked for it
   (on any rank, if ranks have reduced it) or an edit was given out_grad; or if its memory is yours.
   A device that has no rows counts as one that has asked for all that it has to: with
   DP_UNUSED_FIXED for what it had asked for in the first reduced pass. Optimizers leave other
   parameters and their state alone. STATE while a gradient is void, and while one that a wrapper of
   the module reduces still differs from rank to rank: its passes had no_sync, or the module ran
   without the wrapper. Ranks would step apart by such gradients. */
DP_MUST_USE DP_API dp_status dp_grads_used(dp_module *module, bool *out_used, size_t count);

/* For optimizers whose kernels zero gradients as they step (DP_KERNEL_ZERO_GRAD), which saves a
   pass over memory: whether they may, if they step all parameters of the module. Where they have,
   dp_grads_zeroed does what is left of dp_zero_grad; UNSUPPORTED: they may not. */
DP_API bool dp_grads_may_zero(const dp_module *module);
DP_MUST_USE DP_API dp_status dp_grads_zeroed(dp_module *module);

/* From the next backward on, whether reduced gradients are scattered: each rank gets only its share
   of them (dp_stretch), so half as much is sent. Other ranks' shares are void here, and for
   another wrapper of the same parameters all of it is. This is for optimizers that step shares;
   those of dp_train.h with `sharded` set it. Nothing is added to shares, whatever the reduction:
   call dp_zero_grad before the next backward. `true` works for wrappers by dp_distributed and
   modules with such children. All processes make the call. None scatters if one cannot
   (UNSUPPORTED): it has a hook or a wire dtype, its collectives have no reduce_scatter, or its
   devices share their parameters. But with several processes, CPU devices may share them: their
   shares lie side by side. */
DP_MUST_USE DP_API dp_status dp_grads_scatter_set(dp_module *module, bool scatter);
/* Whether some gradients here hold shares since they were reduced, and have not been zeroed. */
DP_API bool dp_grads_are_scattered(const dp_module *module);
/* Whether some are void here, as a wrapper outside of the module's tree has scattered them. */
DP_API bool dp_grads_are_unseen(const dp_module *module);

/* Returns what a wrapper by dp_distributed reduces with: its buckets and times; else NULL. */
DP_API const dp_reducer *dp_wrapper_reducer(const dp_module *wrapper);

typedef struct dp_report { /* of a wrapper by dp_distributed, in this process */
    dp_info job;
    const char *transport;   /* "none", "inside the process", or job.coll_backend */
    dp_reducer_info reducer; /* its compute_s is what backward took */
    dp_buffer_sync buffers;
    bool params_shared; /* see dp_distributed_config.share_params */
    size_t ignored_count;
    double forward_s, mean_forward_s; /* of passes that were reduced, with what made buffers equal
                                         before them */
} dp_report;
DP_MUST_USE DP_API dp_status dp_report_get(const dp_module *wrapper, dp_report *out);

/* The same as a table: the job, and each wrapper by dp_distributed in the module's tree, with its
   buckets, when they left after backward began, and what the last and the mean pass took. Returns
   how many characters the whole table has, as snprintf does: `text` gets those that fit and a zero.
   0: dp_last_error. */
DP_API size_t dp_report_text(const dp_module *module, char *text, size_t bytes);

/* Whether parameters are the same on all ranks, bit by bit; else a MISMATCH names the first that is
   not, and a rank. What is ignored is not looked at. [host] */
DP_MUST_USE DP_API dp_status dp_params_compare(dp_module *module);
/* The same for buffers, on each local rank of a wrapper too: tables, statistics over all ranks.
   Buffers that methods fill from their own rows differ after a forward, until the next one makes
   them equal. With DP_BUFFERS_LOCAL they may differ, and are not compared. [host] */
DP_MUST_USE DP_API dp_status dp_buffers_compare(dp_module *module);

/* Make buffers the same on all ranks now. In training this happens before each forward, but each
   rank then writes its own numbers: in the end they differ, and an evaluation, or the last
   checkpoint, needs equal ones. Each wrapper by dp_distributed in the module's tree follows its
   config: all ranks get the buffers of rank 0, or the mean; with DP_BUFFERS_LOCAL, and where
   ignored, they stay. This is a write, like dp_params_write. Without such a wrapper it has no
   effect, and with several processes it is an error. All processes make the call. */
DP_MUST_USE DP_API dp_status dp_buffers_sync(dp_module *module);

typedef struct dp_wrapper_info { /* of one of the library's wrappers */
    const int *local_ranks;      /* lives as long as the wrapper */
    size_t local_rank_count;
    dp_device output; /* where results go; {0}: the host */
    int dim;
} dp_wrapper_info;
DP_MUST_USE DP_API dp_status dp_wrapper_info_get(const dp_module *wrapper, dp_wrapper_info *out);

DP_API bool dp_is_wrapper(const dp_module *module);
DP_API dp_module *dp_wrapped(const dp_module *module); /* what it wraps directly, or NULL */
DP_API dp_module *dp_unwrap(dp_module *module); /* the innermost; itself if it is not a wrapper */

/* Tells of which dp.h a table of functions is: see >>contract. */
typedef struct dp_table_head {
    uint32_t size, layout;
} dp_table_head;
#define DP_TABLE(type)                                                                             \
    {                                                                                              \
        sizeof(type), DP_LAYOUT                                                                    \
    } /* its head */

/* What dp_train_step needs of an optimizer: of dp_train.h, or a struct that begins with this. */
typedef struct dp_optim dp_optim;
typedef struct dp_optim_ops {
    dp_table_head head; /* DP_TABLE(dp_optim_ops) */
    dp_status (*begin)(dp_optim *optim, dp_module *module, dp_pass_config *pass); /* may be NULL */
    dp_status (*loss_factor)(dp_optim *optim, double *out);  /* of gradients; NULL = 1 */
    dp_status (*update)(dp_optim *optim, dp_module *module); /* step and zero, when it is time */
} dp_optim_ops;
struct dp_optim {
    const dp_optim_ops *ops;
};

/* One training step on every device of the module or wrapper. If there is a method "preprocess", it
   turns the data into other data. "forward" gets them as kwargs (a dict) or args, and mode "loss".
   It returns a loss (a tensor or a number), or a dict of tensors, numbers and lists of them. `loss`
   is the sum of the means of all entries whose key contains "loss", each device weighted by its
   samples. Then come backward and optim->update. The log has "loss", then the mean of every entry.
   optim NULL: gradients only. A module that has nothing to learn, as no parameter has a gradient,
   needs no "backward". */
DP_MUST_USE DP_API dp_status dp_train_step(dp_module *module, dp_scope *scope, dp_value data,
                                           dp_optim *optim, dp_value *out_log);

/* An evaluation with the same data: "preprocess", with dp_call.training false, and "forward" with
   mode "predict"; the result is as by dp_invoke. No backward follows, and others take no part. */
DP_MUST_USE DP_API dp_status dp_predict_step(dp_module *module, dp_scope *scope, dp_value data,
                                             dp_value *out);

/* ==== >>timeline ===============================================================================
   With $DP_TRACE=run.json in the environment, dp_open starts to record in that file what the
   process does, for ui.perfetto.dev and chrome://tracing: steps and their parts, methods and other
   functions of yours, collectives, in them waits for processes that begin them later, waits for
   messages, loaders and checkpoints, each in the row of the thread that ran it. The caller's row is
   also that of device 0. Devices with memory of their own, such as GPUs, have a row for their
   stream: when it began a method or a collective, and when that was done. To find out, the stream
   waits for the host for some microseconds.

   The processes of a machine share the file, each as a process in it. Several machines need one
   file each. All lines but the first can be appended to another machine's file: time is that of
   process 0 everywhere, as far as the clocks agree. Lines are written at most a quarter of a second
   late while something happens; the rest when the job fails, and in dp_close. So the file of a
   killed run can be read too, and shows what it was doing. The last bracket is always missing,
   which viewers allow. examples/timeline.c makes a page of the last steps and their waits.

   Where a profiler listens (Nsight Systems), dp_cuda.h gives it the same spans by NVTX, as ranges
   of the domain "dp", with or without $DP_TRACE.                                               */

/* A span of yours on this thread. They nest; each begin has its end, on the same thread. Without a
   timeline nothing happens. [any] */
DP_API void dp_trace_begin(const char *name);
DP_API void dp_trace_end(void);

/* ==== >>libraries ==============================================================================
   For libraries on top of dp.h, such as dp_train.h and its neighbours, which use nothing private of
   it but its system (dp/os.h). Their errors look like those of dp.h: a public function checks its
   arguments first, and its sentence begins with its name, `fn`:

       dp_status my_step(my_thing *thing, dp_scope *scope, dp_value batch, dp_value *out)
       {
           DP_TRY(dp_check_pointer(__func__, "thing", thing));   "my_step: thing is NULL"
           DP_TRY(dp_check_scope(__func__, scope, thing->ctx));
           DP_TRY(dp_check_value(__func__, "batch", batch));
           DP_TRY(dp_check_pointer(__func__, "out", out));
           return dp_error_in(__func__, my_step_in(thing, scope, batch, out));
       }                                                                                         */

/* Returns `status`. If it is an error and this thread's sentence does not begin with `fn`, it
   becomes "fn: sentence". [any] */
DP_API dp_status dp_error_in(const char *fn, dp_status status);
/* Sets this thread's sentence to "no memory" and returns DP_ERR_NO_MEMORY. [any] */
DP_API dp_status dp_no_memory(void) DP__COLD;

/* Each returns DP_OK, or sets a sentence that begins with `fn`. [any] */
/* The context is open, and its job has not failed. */
DP_MUST_USE DP_API dp_status dp_check_ctx(const char *fn, const dp_ctx *ctx);
/* Not all devices are in use by one call: it is for what changes things that all use. See INSIDE
   YOUR FUNCTIONS. */
DP_MUST_USE DP_API dp_status dp_check_alone(const char *fn, const dp_ctx *ctx);
/* The scope can be used, and is of this context; ctx NULL: of any. */
DP_MUST_USE DP_API dp_status dp_check_scope(const char *fn, const dp_scope *scope,
                                            const dp_ctx *ctx);
/* It is not NULL; `what` is its name. */
DP_MUST_USE DP_API dp_status dp_check_pointer(const char *fn, const char *what,
                                              const void *pointer);
/* The value is sound, down to its leaves, and no error. Values that constructors made are checked
   in no time; so `value.as` may be read afterwards. */
DP_MUST_USE DP_API dp_status dp_check_value(const char *fn, const char *what, dp_value value);

/* Writes the value that a constructor returned, or returns the status of an error value, with its
   sentence. `out` is then as it was. [any] */
DP_MUST_USE DP_API dp_status dp_made(dp_value made, dp_value *out);

/* Calls fn(user), a function of the library's user, and returns its status. Until then this thread
   cannot end the scope, those around it, and the context: it gets STATE, and a sentence that has
   `what`: "a function of a loader". */
DP_MUST_USE DP_API dp_status dp_scope_guard(dp_scope *scope, const char *what,
                                            dp_status (*fn)(void *user), void *user);

/* Returns "outer.inner", or "inner" if outer is NULL, of the scope; NULL: no memory. */
DP_API char *dp_join_names(dp_scope *scope, const char *outer, const char *inner);

/* ==== >>contract ===============================================================================
   For writers of backends; users of the library can stop reading here. A backend is a header with a
   function that returns a const table: nothing to register, nothing in dp.h to edit.
   examples/custom_device.h is a whole one, and

       make conform BACKEND=examples/custom_device.h TABLE=toy_device

   says whether it keeps to this contract.

   The life of a dp_device_ops, in the order of the calls:
     count          how many devices to drive when the user gives no number. 0, or an error: the
                    next table in the list is tried.
     open           one device, by index. Repeats of an index are separate (virtual) devices. A bad
                    index is DP_ERR_NO_DEVICE. Put a dp_dev first in a struct of yours, fill in ops,
                    host and index, return its address. Tables can be decorated: the core calls
                    through dev->ops only, and never compares tables.
     info           may be asked at any time. host_memory says that plain loads and stores by the
                    host reach memory from `alloc`; then scatter makes views instead of copies, and
                    the host's own kernels are used. unified says that they do while no enqueued
                    work uses that memory, and that later work sees what the host wrote. Then the
                    core waits for the stream, and the host computes and carries collectives where
                    the data is, without copies. Scatter still copies.
     stream_create  the core makes one compute stream per device. Work on a stream runs in order;
                    streams are ordered among each other by events only.
     ...            copies, kernels, alloc and free, from any thread; each stream is used by one
                    thread at a time
     event_*        record marks a point of a stream. wait makes another stream wait for it, sync
                    the host. Waiting for a never-recorded event returns immediately.
     close          after all streams, events and memory of the device were given back.
   After fork the child calls nothing that is open. Nor does it call count and open, if a device was
   opened before the fork, or count had found one: few drivers survive that, and some wait for ever
   for threads that only the parent has. dp_open treats such devices as unusable, unless the table
   says survives_fork.

   The core checks arguments before it calls: counts are above zero, pointers are of this device,
   ranges do not overlap unless they are equal. A kernel's operands are aligned to their elements,
   and so is what is reduced among devices whose memory the host cannot reach; copies take bytes
   at any address.

   Which dp.h a table is of. Its head is DP_TABLE: its size, and DP_LAYOUT. Methods may be appended
   to a type of tables, if it becomes longer: older tables are shorter, and lack them. Whatever else
   changes in tables, or in what is passed to their methods, gets another DP_LAYOUT. dp_open refuses
   tables of another layout, and tables that are longer than the implementation's, which would not
   call all of their methods. So do dp_train_step with a dp_optim_ops and dp_optim_create with a
   dp_rule. The caller of dp_open has to have the implementation's 0.N of DP_VERSION, within which
   no declaration changes (CHANGES.md).

   What is optional. A method behind the bar may be NULL, or past `size`. The core does without:
     host_alloc, host_free   host memory is the allocator's, and may be slower to copy
     copy_2d                 one copy a row
     peer_copy               through the host; so if it says DP_ERR_UNSUPPORTED, of some devices or
                             of all
     kernel                  copied to the host, done there, copied back (unified: done where it
                             is); so if it says DP_ERR_UNSUPPORTED, of some kinds, dtypes or flags,
                             or of all
     owns                    nobody asks
     host_call               the timeline has no row for the stream
     survives_fork           not used in a child of a process that has used it
     takes_sets              sets of operands come one by one
     kernel_flags            such steps are made on the host; optimizers zero gradients afterwards
   and of the collectives
     DP_REDUCE_SCATTER       all_reduce into a temporary, then the own part
     DP_ALL_TO_ALL           all_gather into a temporary, then the own parts
     abort                   those that wait in the table hear of it from dp_host.aborted
     poll                    failures are noticed at the next call
     describe                dp_report_text does not mention it

   Order. Methods that take a stream enqueue and return; only *_sync waits. A table may do the work
   at once, and one with host_memory must, since the host does not ask before it reads. Streams, of
   one device or of several, are ordered by events alone.

   What a call is given. dp_kernel_args and the arrays in it (out, in, shape, strides) are valid
   until `kernel` returns: copy what is needed later. Memory stays: the core keeps the operands, and
   both sides of a copy, until the work is done. So a backend need not save the source of copy_in;
   the core changes or frees it only behind an event or a sync.

   Events. A new record replaces the old one. wait and sync refer to the record that was the newest
   when they were called; a later one does not affect them.

   The end of things. `free` and `host_free` get memory that no queued work uses. Before the core
   destroys a stream it has waited for it; a user may not have: then stream_destroy finishes the
   work in it or drops it, so that none of it touches memory that is freed later. If a wait failed,
   the streams are destroyed first and the memory is freed after that.

   Threads. count, open and close: one thread at a time for each dp_host, that is for each context;
   several contexts may open and close at once. info, owns, alloc, free, host_alloc, host_free,
   *_create and *_destroy: any thread, several at once. Copies, kernel, event_record and event_wait:
   any thread, several at once on different streams, one at a time on the same stream. stream_sync
   and event_sync: any thread, even while another one uses the stream or the event; they wait for
   what came before.

   Failures are reported with dp_error(status, sentence). What they do to the context:
     count, open, info, *_create, alloc, host_alloc
                    nothing was made. The class is what the table says; DP_ERR_NO_MEMORY and
                    DP_ERR_NO_DEVICE are of the PASS class: the context goes on.
     copies, kernel, event_record, event_wait
                    part of the work may be enqueued; what it writes is void. The class is what the
                    table says. If the context goes on, the core waits for the streams before it
                    reuses the memory. DP_ERR_UNSUPPORTED from kernel and peer_copy is not a
                    failure: nothing is enqueued, and the core does without.
     stream_sync, event_sync
                    always of the JOB class; DP_ERR_DEVICE if the table says something else. Only
                    DP_ERR_STATE stays what it is: nobody can wait for the stream now (it is being
                    captured), and nothing of it runs.
   If work fails after its call has returned, the syncs that wait for it report that, or any later
   call for that device. The failure must not get lost. */

typedef enum dp_kernel {
    DP_KERNEL_COPY,    /* out[0] = in[0], both strided: ndim, shape, out_stride, in_stride */
    DP_KERNEL_FILL,    /* every element of out[0] = fill_bits, the element's own bit pattern */
    DP_KERNEL_CAST,    /* out[0] of dtype = in[0] of in_dtype */
    DP_KERNEL_AXPBY,   /* out[0] = alpha * in[0] + beta * in[1]; in_count 1: alpha * in[0] */
    DP_KERNEL_REDUCE,  /* every out = op over in[0], in[1], ..., then * alpha, then / beta, rounded
                         to dtype once; an out may be an in; op is never DP_OP_MEAN here: the core
                         says SUM and beta. The smaller, or larger, of NaN and a number is NaN. In a
                         binary tree: ((in[0] + in[1]) + (in[2] + in[3])) + in[4], the left half
                         having the largest power of two */
    DP_KERNEL_STATS,   /* out[0] = double[2]: the sum of squares of in[0], to 1e-12 of it, and how
                          many elements are not finite; those are in the sum, which they make
                          infinite or NaN */
    DP_KERNEL_PAD,     /* out[0], dense, of `shape` = in[0], of in_shape and in_stride, and
                          fill_bits behind it; out_stride may be NULL */
    DP_KERNEL_TOTAL,   /* out[0] = double[1]: alpha * the sum of in[0], which is f64 */
    DP_KERNEL_SGD,     /* out[0] parameter, out[1] momentum; in[0] gradient, in[1] gate */
    DP_KERNEL_ADAMW,   /* out[0] parameter, out[1] mean, out[2] square; in as SGD */
    DP_KERNEL_CHANNELS /* out[0] = double[2][C]: sums and sums of squares of in[0], which is
                          dense, of shape {outer, C, inner} */
} dp_kernel;

/* SGD and ADAMW step as torch.optim does. All is computed in f32, or in f64 for f64, and rounded to
   that after each operation; a parameter in f16 or bf16 is rounded to its dtype at last. State is
   in what is computed in: f32 for f16, bf16 and f32. x is out[0], and g is in[0] * factor, or
   in[0] * -factor with MAXIMIZE. in[1], the gate, is double[2]: that factor, and a number that,
   above 0, leaves everything as it is; without a gate they are 1 and 0. The numbers are:

     SGD      lr, decay, momentum, fresh = 1 - dampening
     ADAMW    lr, divided by 1 - beta1^t; decay: 1 - lr * weight_decay, with L2 weight_decay;
              w = 1 - beta1, beta2, fresh = 1 - beta2, root = sqrt(1 - beta2^t), eps

     SGD      if (decay != 0) g = g + x * decay
              if (v)          v = FIRST ? g : v * momentum + g * fresh     v is out[1], or not there
              if (v)          g = NESTEROV ? g + v * momentum : v
              x = x - g * lr
     ADAMW    if (!L2) x = x * decay; else if (decay != 0) g = g + x * decay
              m = w < 0.5 ? m + (g - m) * w : g + (g - m) * (w - 1)        m is out[1]; torch.lerp
              s = s * beta2 + (g * g) * fresh                              s is out[2]
              x = x - m / (sqrt(s) / root + eps) * lr
     both     if (ZERO_GRAD)  in[0] = 0, all bits of it                                        */
enum {                          /* dp_kernel_args.flags */
       DP_KERNEL_NESTEROV = 1,  /* SGD */
       DP_KERNEL_FIRST = 2,     /* SGD: momentum becomes the gradient */
       DP_KERNEL_L2 = 4,        /* ADAMW: decay goes into the gradient */
       DP_KERNEL_MAXIMIZE = 8,  /* SGD, ADAMW: against the gradient */
       DP_KERNEL_ZERO_GRAD = 16 /* SGD, ADAMW: the gradient becomes 0 when it is read. Tables get
                                   this if it is in their kernel_flags */
};

typedef struct dp_kernel_args {
    dp_kernel kernel;
    dp_op op;
    dp_dtype dtype;    /* of out, and of in except for CAST. STATS: of in */
    dp_dtype in_dtype; /* CAST */
    size_t count;      /* elements of every operand; COPY, PAD: product of shape */
    void *const *out;
    const void *const *in;
    size_t out_count, in_count;
    double alpha, beta; /* f16, bf16 and f32 are computed in f32, f64 in f64, never contracted.
                           Integers: alpha is 1, beta a whole number. */
    uint64_t fill_bits;
    int ndim; /* COPY, PAD, CHANNELS */
    const int64_t *shape, *out_stride, *in_shape, *in_stride;
    unsigned flags;
    double numbers[8]; /* SGD, ADAMW; rounded to what is computed in */
    size_t heads;      /* 0: the library's, whose own kernels know it. The first so many of a REDUCE
                          stand before the tree: in[0] + (in[1] + (in[2] + ... all others)) */
    size_t set_count;  /* SGD, ADAMW: 0, or how many sets of out_count and in_count operands lie in
                          out and in, one after another: apart, and all with the same gate */
    const size_t *counts; /* the elements of each set, in place of count */
} dp_kernel_args;

typedef struct dp_host { /* what the runtime lends a backend; lives as long as the context */
    size_t size;
    void *(*alloc)(const struct dp_host *host, size_t bytes, size_t align); /* set-up code */
    void (*free)(const struct dp_host *host, void *data);
    void (*log)(const struct dp_host *host, dp_level level, const char *text);
    /* fn(0) .. fn(part_count-1), on idle workers and the caller; on the caller alone if there are
       none or this is a worker. Parts must not wait for each other. */
    void (*parallel)(const struct dp_host *host, int part_count, void (*fn)(int part, void *user),
                     void *user);
    int (*thread_count)(const struct dp_host *host); /* how many parts can run at the same time */
    /* Whether the job has failed, here or elsewhere. Ask it in every wait for other processes,
       every few milliseconds: it looks whether they are still there, and in the same collective. */
    bool (*aborted)(const struct dp_host *host);
} dp_host;

typedef struct dp_dev {
    const dp_device_ops *ops;
    const dp_host *host;
    int32_t index;
} dp_dev;
struct dp_stream {
    dp_dev *dev;
};
typedef struct dp_event {
    dp_dev *dev;
} dp_event;

struct dp_device_ops {
    dp_table_head head; /* DP_TABLE(dp_device_ops) */
    const char *name;
    /* DP_ERR_NO_DEVICE: there is none. Another error: there are some that cannot be used, which is
       worth a warning when a table behind this one serves. */
    dp_status (*count)(const dp_host *host, int *out);
    dp_status (*open)(const dp_host *host, int index, dp_dev **out);
    void (*close)(dp_dev *dev);
    dp_status (*info)(dp_dev *dev, dp_device_info *out);
    dp_status (*alloc)(dp_dev *dev, size_t bytes, void **out); /* aligned to 64 bytes or better */
    void (*free)(dp_dev *dev, void *data, size_t bytes);
    dp_status (*stream_create)(dp_dev *dev, int priority, dp_stream **out); /* 0 compute, 1 copy */
    void (*stream_destroy)(dp_stream *stream);
    dp_status (*stream_sync)(dp_stream *stream);
    dp_status (*event_create)(dp_dev *dev, dp_event **out);
    void (*event_destroy)(dp_event *event);
    dp_status (*event_record)(dp_event *event, dp_stream *stream);
    dp_status (*event_wait)(dp_stream *stream, dp_event *event);
    dp_status (*event_sync)(dp_event *event);
    dp_status (*copy_in)(dp_stream *stream, void *dst, const void *host, size_t bytes);
    dp_status (*copy_out)(dp_stream *stream, void *host, const void *src, size_t bytes);
    dp_status (*copy)(dp_stream *stream, void *dst, const void *src, size_t bytes);
    /* -------------------------------------------------------------------------- optional -- */
    /* Host memory that copies fast. */
    dp_status (*host_alloc)(dp_dev *dev, size_t bytes, void **out);
    void (*host_free)(dp_dev *dev, void *data, size_t bytes);
    /* `rows` rows inside the device. */
    dp_status (*copy_2d)(dp_stream *stream, void *dst, size_t dst_pitch, const void *src,
                         size_t src_pitch, size_t row_bytes, size_t rows);
    /* From another device of this table, ordered on the reader's stream. */
    dp_status (*peer_copy)(dp_stream *stream, void *dst, dp_dev *src_dev, const void *src,
                           size_t bytes);
    dp_status (*kernel)(dp_stream *stream, const dp_kernel_args *args);
    /* Whether work on the device may use this address. Asked for each pointer of a collective and
       of dp_kernel_run, so that a pointer into other memory is an error instead of a stray access.
       Leave it out where the answer is slow; for dp_cpu any address will do. */
    bool (*owns)(dp_dev *dev, const void *data);
    /* fn(user) on the host, on any thread, when the stream gets there; fn is short and calls
       nothing of the table. */
    dp_status (*host_call)(dp_stream *stream, void (*fn)(void *user), void *user);
    /* No driver and no threads: count and open work in a child of fork as they do here. */
    bool survives_fork;
    bool takes_sets;     /* `kernel` may be given several: see dp_kernel_args */
    size_t kernel_flags; /* DP_KERNEL_ZERO_GRAD, if `kernel` knows it */
};

/* The life of a dp_coll_ops: `fits` is asked table by table, with the same answer in every process,
   and the first that says yes is opened. If none does for devices with memory of their own, all are
   asked again for CPU devices in their place: the one that says yes carries copies in host memory,
   a piece at a time. Ranks rank_first .. rank_first + local_count - 1 are local. Each collective
   gets one dp_part per local rank, with its stream filled in, and orders its work on it; the
   array of parts is valid until the call returns. One thread at a time calls into a comm, except
   abort and describe; several comms may be called at once. A failure may leave work in those
   streams, and in no others: it is waited for. Its class is what the table says; with several
   processes it must be JOB, since the others cannot know. A table may refuse a call, with the
   class CALL, before it has begun anything of it. No wait for another process is longer than
   timeout_ms; its error should name the rank that did not come. close runs no collective: it may
   come at any time. */
typedef struct dp_comm_config {
    dp_dev *const *local;
    int local_count, rank_first, rank_count;
    int timeout_ms;
    bool host_memory;              /* of all local devices */
    const dp_bootstrap *bootstrap; /* NULL = one process */
    bool one_machine;              /* all processes see the same memory and the same processes */
    bool ordered;                  /* sums have to be made in the order below */
} dp_comm_config;

typedef struct dp_comm {
    const dp_coll_ops *ops;
    const dp_host *host;
} dp_comm;

typedef enum dp_verb {
    /* op over ranks, in the tree of DP_KERNEL_REDUCE (MEAN: the sum, divided by rank_count), then
       * scale; f16 and bf16 are rounded once, at the end. Unless config->ordered, a table may add
       up in another order, the same each time, and round on the way. A rank whose recv is NULL
       gives, and wants nothing. */
    DP_ALL_REDUCE,
    DP_BROADCAST,
    /* With host_memory a recv may be NULL, as above, and may have another local rank's send in it,
       at the place of that rank. */
    DP_ALL_GATHER,
    /* With host_memory a recv may be NULL, and may lie in what another local rank sends, at the
       place of the receiver: nothing is written there before all ranks' elements are read. */
    DP_REDUCE_SCATTER,
    DP_ALL_TO_ALL,
    DP_REDUCE_TO, /* the core makes these of the others */
    DP_GATHER_TO,
    DP_SCATTER_FROM
} dp_verb;

#define DP_COLL_VERBS ((1u << (DP_ALL_TO_ALL + 1)) - 1)

typedef struct dp_coll_call {
    dp_verb verb;
    const dp_part *local; /* by local rank */
    size_t count;         /* elements of a block */
    dp_dtype dtype;
    dp_op op; /* of what reduces */
    double scale;
    int root; /* of a broadcast */
} dp_coll_call;

struct dp_coll_ops {
    dp_table_head head; /* DP_TABLE(dp_coll_ops) */
    const char *name;
    bool (*fits)(const dp_comm_config *config);
    dp_status (*open)(const dp_host *host, const dp_comm_config *config, dp_comm **out);
    void (*close)(dp_comm *comm);
    unsigned verbs; /* DP_COLL_VERBS, or fewer: a bit 1u << verb for each that `run` knows. The
                       first three may not be missing; the core makes the rest of these */
    dp_status (*run)(dp_comm *comm, const dp_coll_call *call);
    /* -------------------------------------------------------------------------- optional -- */
    /* The job has failed here, and other processes have been told: release those who wait. Called
       from any thread, perhaps more than once. */
    void (*abort)(dp_comm *comm);
    dp_status (*poll)(dp_comm *comm); /* what went wrong since */
    /* What it has carried so far, in a few words for dp_report_text, from any thread. */
    void (*describe)(dp_comm *comm, char *text, size_t bytes);
};

#define DP_FITS(type, ops) ((ops)->head.layout == DP_LAYOUT && (ops)->head.size <= sizeof(type))
#define DP_HAS(type, ops, method)                                                                  \
    ((ops)->head.size >= offsetof(type, method) + sizeof((ops)->method) && (ops)->method)

/* One kernel of the contract on the compute stream of a device, or by the host where the device has
   none of this kind: what dp_train.h is made of. Operands have to be memory of that device, which
   is not checked; everything else is. */
DP_MUST_USE DP_API dp_status dp_kernel_run(dp_ctx *ctx, int local_rank, const dp_kernel_args *args);

DP_API const dp_device_ops *dp_cpu(void);    /* dp_cpu.h: threads of this process */
DP_API const dp_coll_ops *dp_cpu_coll(void); /* dp_cpu.h: devices whose memory the host reaches */
DP_API const dp_coll_ops *dp_shm_coll(void); /* dp/shm.h: the same, of processes of one machine */
DP_API const dp_coll_ops *dp_tcp_coll(void); /* dp/tcp.h: the same, of processes on any machines */

#ifdef __cplusplus
} /* extern "C" */
#endif

/* ==== >>literals ===============================================================================
   DP_SHAPE(64, 784) gives the two arguments ndim and shape; DP_DICT, DP_LIST_OF and DP_TUPLE_OF
   build values; DP_LOCAL_RANKS(0, 2) in a config names two devices (C only).                    */

#ifdef __cplusplus
static inline dp_value dp__dict(dp_scope *scope, std::initializer_list<dp_pair> pairs)
{
    return dp_dict_make(scope, pairs.begin(), pairs.size());
}
static inline dp_value dp__list(dp_scope *scope, dp_kind kind,
                                std::initializer_list<dp_value> items)
{
    return dp_list_make(scope, kind, items.begin(), items.size());
}
#define DP_DICT(scope, ...)     dp__dict((scope), {__VA_ARGS__})
#define DP_LIST_OF(scope, ...)  dp__list((scope), DP_LIST, {__VA_ARGS__})
#define DP_TUPLE_OF(scope, ...) dp__list((scope), DP_TUPLE, {__VA_ARGS__})
#define DP_SHAPE(...)                                                                              \
    static_cast<int>(std::initializer_list<int64_t>{__VA_ARGS__}.size()),                          \
        std::initializer_list<int64_t>{__VA_ARGS__}.begin()
#else
#define DP__COUNT(type, ...) (sizeof((const type[]){__VA_ARGS__}) / sizeof(type))
#define DP_DICT(scope, ...)                                                                        \
    dp_dict_make((scope), (const dp_pair[]){__VA_ARGS__}, DP__COUNT(dp_pair, __VA_ARGS__))
#define DP__LIST(scope, kind, ...)                                                                 \
    dp_list_make((scope), kind, (const dp_value[]){__VA_ARGS__}, DP__COUNT(dp_value, __VA_ARGS__))
#define DP_LIST_OF(scope, ...)  DP__LIST(scope, DP_LIST, __VA_ARGS__)
#define DP_TUPLE_OF(scope, ...) DP__LIST(scope, DP_TUPLE, __VA_ARGS__)
#define DP_LOCAL_RANKS(...)                                                                        \
    .local_ranks = (const int[]){__VA_ARGS__}, .local_rank_count = DP__COUNT(int, __VA_ARGS__)
#define DP_SHAPE(...)                                                                              \
    (int)DP__COUNT(int64_t, __VA_ARGS__), (const int64_t[])                                        \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
#endif
#endif /* DP_H */

#if defined(DP_USE_HIP) && !defined(DP__HIP_FIRST_DP) && !defined(DP_IMPLEMENTATION)
#include "dp_hip.h"
#endif
#if defined(DP_USE_CUDA) && !defined(DP__CUDA_FIRST_DP) && !defined(DP_IMPLEMENTATION)
#include "dp_cuda.h"
#endif
#if defined(DP_USE_NCCL) && !defined(DP__NCCL_FIRST_DP) && !defined(DP_IMPLEMENTATION)
#include "dp_nccl.h"
#endif
#if defined(DP_USE_MPI) && !defined(DP__MPI_FIRST_DP) && !defined(DP_IMPLEMENTATION)
#include "dp_mpi.h"
#endif

/* ================================================================================================
   Everything below is implementation.
   ============================================================================================== */
#if defined(DP_IMPLEMENTATION) && !defined(DP_IMPLEMENTED)
#define DP_IMPLEMENTED

#define DP__ROOMS           /* none of them can be included by itself */
#if defined(DP_ONE_PROCESS) /* functions that only the rooms between processes call stay unused */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "dp/basics.h"
#include "dp/os.h"
#if defined(DP__SYSTEM)
#include DP__SYSTEM
#else
#include "dp/os_posix.h"
#endif
#include "dp/team.h"
#include "dp_cpu.h"
#include "dp/activity.h"
#include "dp/late.h"
#include "dp/core.h"
#include "dp/threads.h"
#include "dp/processes.h"
#include "dp/value.h"
#include "dp/ranks.h"
#include "dp/buckets.h"
#include "dp/lanes.h"
#include "dp/reduce.h"
#include "dp/config.h"
#include "dp/meet.h"
#include "dp/open.h"
#include "dp/run.h"
#include "dp/module.h"
#include "dp/spmd.h"
#include "dp/checks.h"
#include "dp/parallel.h"
#include "dp/distributed.h"
#include "dp/launchers.h"
#if defined(DP_ONE_PROCESS)
#include "dp/alone.h"
#pragma GCC diagnostic pop
#else
#include "dp/job.h"
#include "dp/metrics.h"
#include "dp/launch.h"
#include "dp/tree.h"
#include "dp/listener.h"
#include "dp/rendezvous.h"
#include "dp/world.h"
#include "dp/watchdog.h"
#include "dp/members.h"
#include "dp/voting.h"
#include "dp/shm.h"
#include "dp/carrier.h"
#include "dp/mesh.h"
#include "dp/tcp.h"
#include "dp/mailbox.h"
#include "dp/channels.h"
#include "dp/messages.h"
#include "dp/asking.h"
#include "dp/sharing.h"
#include "dp/meeting.h"
#include "dp/group.h"
#include "dp/recover.h"
#endif
#undef DP__ROOMS

#if defined(DP_USE_HIP) && !defined(DP__HIP_FIRST_DP)
#include "dp_hip.h"
#endif
#if defined(DP_USE_CUDA) && !defined(DP__CUDA_FIRST_DP)
#include "dp_cuda.h"
#endif
#if defined(DP_USE_NCCL) && !defined(DP__NCCL_FIRST_DP)
#include "dp_nccl.h"
#endif
#if defined(DP_USE_MPI) && !defined(DP__MPI_FIRST_DP)
#include "dp_mpi.h"
#endif
#endif /* DP_IMPLEMENTATION && !DP_IMPLEMENTED */

/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
