/* dp.h - v0.1.0 - data parallelism for C11: one model on every device there is - MIT licence

   Copy dp.h, dp_value.h, dp_module.h, dp_ranks.h, dp_reduce.h, dp_distributed.h, dp_launch.h,
   dp_shm.h and dp_cpu.h into your project. In one C file, before any other header:

       #define DP_IMPLEMENTATION
       #include "dp.h"

   and simply include dp.h wherever else you use it, from C or C++. It needs stb_ds.h (Debian:
   libstb-dev, or copy it beside dp.h) and links with -lpthread -lm. That one C file cannot be
   compiled with -ffast-math, which loses NaN; others can.

   CONTENTS (search for the tag)
     >>status       what a call returns, and the sentence that goes with it
     >>types        dtypes, devices, tensors, values, containers
     >>config       what can be set, and what zero means
     >>context      open devices, run on them, close
     >>launch       several processes: who starts them, how they meet
     >>scope        memory that goes in one call
     >>tensor       views and the work on them
     >>value        trees of tensors, numbers, strings, lists, dicts
     >>collate      samples become a batch
     >>primitives   scatter, gather, replicate, reduce values
     >>collectives  all_reduce and its relatives on plain memory
     >>reducer      gradients made equal on all ranks, while backward still runs
     >>module       a model: methods, parameters, children
     >>call         what a method gets
     >>pass         a forward, and its backward
     >>wrappers     one model on many devices
     >>timeline     what happened when, as a file for Perfetto
     >>contract     for writers of backends: the two tables
   and then the implementation
     >>platform     headers, poison
     >>state        all private structs
     >>trace        what threads and streams did, for $DP_TRACE
     >>errors       sentences, live contexts, the failure of a job
     >>frames       which of the user's functions a thread is inside
     >>log          records
     >>host         what a backend is lent
     >>pool         blocks that are kept and reused
     >>scopes       lifetimes on top of the pools
     >>checks       what a user passes in
     >>views        shapes and strides
     >>copy         any strides, any two devices
     >>chains       from one device to several others
     >>operands     what may be read and written together
     >>compute      copy, fill, cast, axpby, statistics, read
     >>names        where each of many names is
     >>resolve      what a config means
     >>devices      a context's, an array of stb_ds
     >>open         from a config to a context
     >>closing      and back
     >>running      questions to a context, dp_run
   values, scatter and gather are implemented in dp_value.h, collectives in dp_ranks.h (those
   between processes of one machine in dp_shm.h, of several machines in dp_mpi.h, of GPUs in
   dp_nccl.h), the reducer in dp_reduce.h, launch in dp_launch.h, modules and wrappers in
   dp_module.h, the wrapper for all ranks in dp_distributed.h

   WHAT IT IS
   A batch goes in; it is cut into parts, one per device; your model runs on all devices at the same
   time; the outputs are put together and the gradients are summed. On CPU devices the parts are
   views and nothing is copied. A device is a thread with its share of the cores, a GPU, or whatever
   a table of functions that you write makes of it (examples/custom_device.h).

       dp_ctx *ctx;
       dp_open(NULL, &ctx);                                  one device per core, at most 8
       my_model_create(ctx, &net);                           methods and parameters by name
       dp_data_parallel(net, NULL, &par);                    a wrapper is a module too
       dp_scope *step = dp_scope_begin(ctx);                 what this step makes lives here
       dp_train_step(par, step, batch, optim, &log);         forward, backward, sum, update
       dp_scope_end(step);                                   all of that ends; blocks are reused
       dp_close(ctx);

   What the wrappers are built on can be used alone:

       dp_scatter(ctx, step, batch, NULL, &parts);           rows 0-2, 3-5, 6-7, 8-9
       dp_run(ctx, step, work, &parts);                      work(rank, ...) on every device
       dp_all_reduce(ctx, grads, count, DP_F32, DP_OP_MEAN); one pass over memory

   WHAT IT IS NOT
   No layers, no autograd. It does not split a model over devices.

   WORDS
     context   one job's view of its devices. Several can be open; they share nothing.
     device    {backend, index}. Host memory is {0}. `local rank` is a device's place in this
               context, `rank` its place in the whole job.
     stream    the order of work on a device. CPU devices are done when a call returns.
     tensor    a view by value: it owns nothing.
     value     an immutable tree of tensors and other things.
     container a field that says how it is to be collated and scattered.
     scope     a lifetime. What a function makes goes into the scope that it is given.
     module    a model: methods (functions of yours), parameters and children, all by name.
     unit      what becomes ready for a reducer as a whole: a layer, a parameter.
     bucket    units whose gradients travel together.
     replica   a module on one device, for one part of a batch. Replica 0 is the module itself.
     pass      one forward, and the backward that may follow it.
     wrapper   a module that runs another one on several devices.

   OPTIONS (macros; where to set them)
     DP_IMPLEMENTATION                in one C file, before the first include of any header
     DP_STATIC                        every file: the whole library is static to the file
     DP_API                           every file: linkage of the public functions, else extern
     DP_ASSERT(condition)             with DP_IMPLEMENTATION: for bugs of dp.h, else assert
     DP_USE_CUDA                      every file: includes dp_cuda.h; GPUs are used if there are any
     DP_USE_NCCL                      every file: includes dp_nccl.h, and dp_cuda.h with it; NCCL
                                      carries data between GPUs, of several processes too
     DP_USE_HIP, DP_USE_RCCL          every file: the same for GPUs of AMD: includes dp_hip.h
     DP_USE_MPI                       every file: includes dp_mpi.h; MPI carries data from one
                                      machine to another
     DP_DYNAMIC_LOAD                  with DP_IMPLEMENTATION: CUDA and NCCL, or HIP and RCCL, are
                                      looked for at run time
   At run time: $DP_DEBUG = error|warn|info|trace logs to stderr; $DP_DEVICES = how many devices, or
   which: 4, or 0,1 (0,0: two on one); $DP_SIMD = base limits the CPU's kernels to instructions that
   every processor of its kind has; $DP_CACHE = off compiles the kernels for GPUs each time, else
   they are kept in $XDG_CACHE_HOME/dp.h, or ~/.cache/dp.h; $DP_PEERS = off: GPUs of a process copy
   through the host; $DP_TRACE = a file: see >>timeline; $DP_NCCL: see dp_nccl.h; $DP_LAUNCH,
   $DP_ADDR and $DP_SECRET: see >>launch.

   OWNERSHIP
   What you pass in stays yours; what a function returns belongs to the scope you named, or to the
   context, and you may use it until that ends. Values and views may point into memory of their own
   scope or of an outer one: the batch outlives its parts. dp_keep copies what must live longer.
   Modules belong to their context, parameters and gradients to their module, which never moves
   them; memory that you bring stays yours. dp_close ends all scopes and modules: no pointer to them
   or into them is valid after it. Close all contexts before dlclose unloads the library that holds
   dp.h: their threads run its code.

   THREADS
   One thread at a time calls into a context. Exceptions, marked [any]: reading names and errors,
   making views, beginning scopes, dp_reducer_ready, dp_abort. One thread at a time uses a scope.
   [host] marks what waits for devices; other calls return as soon as their work is queued in order.

   INSIDE YOUR FUNCTIONS
   The library calls functions of yours: methods, what dp_run runs, what dp_scope_defer put off,
   replica_create and replica_destroy, those of an optimizer, hooks. They may call the library, on
   the thread that they were called on. "Together" in the table: methods of several replicas and
   functions under dp_run, each of which works on its own device and in its own scope; and the hook
   of a reducer, which works on the streams that it is given. "Alone": all others, including methods
   of a plain module, of a wrapper of one device, or of any wrapper when the batch made one part.

                                                                  alone     together
     values, views, scopes of its own; what reads names;          yes       yes
     dp_param and its like, dp_call_child, dp_call_all_reduce,
     dp_call_sum_ranks, dp_grad_ready, dp_reducer_ready,
     dp_module_param, dp_owner_grad
     dp_backward of what dp_call_child made                       yes       in its own backward
     dp_tensor_new, dp_copy, dp_fill and other work on tensors;   yes       on its own device
     dp_scatter, dp_replicate, dp_gather, dp_reduce_add
     dp_invoke, dp_backward, dp_train_step, dp_predict_step,
     dp_zero_grad,                                                yes       (1)
     dp_params_edit, _write, _changed, dp_owner_edit,
     dp_module_train
     making, copying, wrapping and destroying modules; dp_run,    yes (2)   no
     collectives, dp_buffers_sync, dp_use_stream,
     dp_data_parallel_once, reducers except dp_reducer_ready
     dp_scope_end, dp_scope_attach                                yes (2)   yes (2)
     dp_close                                                     no        no

     (1) only for a module that lies on this device with its whole tree, that the replicas do not
         run, and that no other rank uses: one copy for each device, say
     (2) but not for what the function itself depends on: the scope that it was called for, or one
         around that; the module that runs, or one that it is a part of. A function under dp_run may
         end its own scope, or hand it over

   A call with a "no" in the table is refused with DP_ERR_STATE, and changes nothing. The log
   function is called from anywhere, and may call nothing but dp_error and dp_last_error.

   THE SAME BITS
   A rank is a device, unless dp_config.shards says how many ranks the whole job has: 8, say. Then
   1, 2, 4 or 8 devices, in 1, 2, 4 or 8 processes, have them all, several on one device where they
   are more than devices. Batches are cut into the same 8 parts, and what 8 replicas make of them is
   added in the same tree (>>collectives); the number of devices says only where. So training gives
   the same bits on all of these, on devices of one kind. To what is above, a shard is a device: it
   is what local_count, local ranks, replicas and dp_run count.

   It holds as far as your functions keep to it. What a method makes of its part must not depend on
   how many threads it has, nor on other replicas; a seed comes from dp_info.rank_first + the
   replica, or from the sample. With several processes each cuts a batch of its own: give it the
   rows of its ranks, as dp_split_rows deals all rows out to rank_count of them. What is made inside
   one process is that process' own: dp_call_all_reduce (not dp_call_sum_ranks), the losses in a
   log, a criterion. A hook, a wire of halves and no_sync are fine: what is rounded, and what is
   kept back, is each rank's own.

   It costs what 8 devices cost: gradients, states of replicas, a thread for each of them, and small
   parts, which are less quick to compute.

   ERRORS
   Every function that can fail returns a dp_status, and dp_last_error() then has a sentence with
   names and numbers, beginning with the function's name. A wrong call changes nothing. The library
   never exits, and prints nothing, but for one line to stderr, once a process and if there is no
   log: when devices that are there cannot be used, and those of another table serve instead.
   A call that fails on a device waits for what it had enqueued. Writing raises no signal: a file
   that may not grow (RLIMIT_FSIZE) is an error, a log that nobody reads any more is silence. Your
   handlers and masks of signals stay as they are.
   After a failure of the JOB class (>>status) only dp_close is left: nothing is waited for, no
   memory is reused, and a device may use yours until dp_close returns.

   CHANGES
     0.1.0  the core: CPU devices, values, collate, scatter and gather, collectives, contract;
            modules, passes, wrappers for the devices of one process, dp_train_step;
            dp_cuda.h: GPUs as devices; several processes, dp_spawn, dp_shm.h; the reducer;
            dp_mpi.h: several machines; dp_nccl.h: GPUs of several processes;
            dp_train.h: optimizers; dp_data.h: samplers, a loader;
            dp_hip.h: AMD's GPUs; dp_save.h: checkpoints; dp_norm.h: batch statistics;
            dp_average.h: averaged models; dp_check.h: wrong gradients;
            a timeline: $DP_TRACE */

#if defined(DP_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* before the first system header: affinity masks, threads */
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

#define DP_VERSION   100 /* 0.1.0 */
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
     JOB   the job failed: sticky, every later call returns it, only dp_close is left           */

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
    X(DP_ERR_NO_FILE,     -14, PASS, "no such file")
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

/* The collectives that this process has begun last, sixteen on the caller's thread and as many on
   that which carries gradients, a line each and the newest first: number, what, for what, tag, and
   whether it has ended; "enqueued" means that it was given to devices which work on their own.
   Returns the length of the whole, as snprintf does. When a job fails the log gets these lines at
   error level. "" with one process. [any] */
DP_API size_t dp_recent_collectives(const dp_ctx *ctx, char *text, size_t bytes);

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
     bootstrap      the processes that a launcher has started (>>launch), else this one alone
     job            "": contexts of several processes meet under one name
     timeout_ms     60,000
     allocator      the C library's
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
    const dp_coll_ops *const *colls;      /* NULL-terminated; the first one that fits serves */
    int device_count;
    const int *devices; /* device_count indices; repeats make virtual devices */
    int shards; /* a power of two: the ranks of the whole job, as many in each process, as many on
                   each of its devices */
    int thread_count; /* cores that this context may use. With more devices than that, threads
                           that wait sleep at once; else they spin a while before they sleep,
                           which is quicker by far where nobody else needs the core */
    dp_bootstrap bootstrap;
    bool local_only; /* this process alone, whatever started it */
    const char *job; /* tells this context's job from others: the same in all its processes */
    int timeout_ms;  /* of everything that waits for another process */
    bool poison;     /* to find invalid uses of memory: each piece of a scope has a block of its
                        own, which is filled with 0xDD when the scope gives it back */
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
   One job's view: the local devices, their workers, the communicator. Several can be open at once.
   One thread at a time calls into a context, except for what is marked [any] and what replicas and
   functions under dp_run may do (see INSIDE YOUR FUNCTIONS). A child of fork may only close.    */

DP_MUST_USE DP_API dp_status dp__open(const dp_config *config, size_t config_bytes, int version,
                                      dp_ctx **out);

/* Open the devices and start one worker for each but the first; the caller drives that one. */
DP_MUST_USE static inline dp_status dp_open(const dp_config *config, dp_ctx **out)
{
    return dp__open(config, sizeof(dp_config), DP_VERSION, out);
}

/* Give everything back, including scopes that are still open. Runs no collective. NULL is fine.
   Refused, with a sentence, while a dp_run or a collective of the context is under way, or a
   function of yours that it has called. But where a reducer's own thread tells your log of a
   failure, it waits until that has returned. */
DP_API void dp_close(dp_ctx *ctx);

typedef struct dp_info {
    int process, process_count;
    int rank_first, rank_count; /* of this process' devices; of the whole job */
    int local_count;            /* devices here, or their shards */
    int core_count;             /* cores that this context may use */
    int threads_per_device;     /* what a method may use, for OpenMP: core_count / local_count */
    const char *device_backend, *coll_backend; /* names of the tables; "none" in a world of one */
    const char *launcher; /* as in DP_LAUNCH; "none", or "bootstrap" for the config's own */
    int machine_process, machine_process_count; /* among the processes of this machine */
} dp_info;

typedef struct dp_device_info {
    char name[64], bus_id[32];
    uint64_t bytes_total, bytes_free; /* 0 when unknown */
    int compute_units;
    bool host_memory; /* the host may read and write this device's memory */
    int memory; /* devices of one table with the same number, not 0, have one memory: each reads and
                   writes in the order of streams what another allocated, and nothing is copied from
                   one to the other; 0: one of its own */
} dp_device_info;

DP_MUST_USE DP_API dp_status dp_info_get(const dp_ctx *ctx, dp_info *out);
DP_MUST_USE DP_API dp_status dp_config_get(const dp_ctx *ctx, dp_config *out); /* as resolved */
DP_MUST_USE DP_API dp_status dp_device_info_get(dp_ctx *ctx, int local_rank, dp_device_info *out);

/* Device of a local rank; {-1, -1} when there is none. The stream is NULL then. [any] */
DP_API dp_device dp_local_device(const dp_ctx *ctx, int local_rank);
DP_API dp_stream *dp_local_stream(const dp_ctx *ctx, int local_rank);

/* Make a stream of yours (from the device's backend) the compute stream; NULL = dp's own again,
   which works after a failure of the job too: you have to give a stream of yours back to its
   backend before dp_close. */
DP_MUST_USE DP_API dp_status dp_use_stream(dp_ctx *ctx, int local_rank, dp_stream *stream);

/* Wait until all local devices have done what was enqueued. [host] */
DP_MUST_USE DP_API dp_status dp_wait(dp_ctx *ctx);

/* Run `fn` once for every local device, each on its own thread, the first on the caller's; return
   when all have. Each gets a scope that ends with `scope` (NULL: when this returns). All run even
   if one fails; the failure that is returned is the first in rank order, with its rank in the
   sentence. [host] */
typedef dp_status (*dp_run_fn)(int local_rank, dp_scope *scope, void *user);
DP_MUST_USE DP_API dp_status dp_run(dp_ctx *ctx, dp_scope *scope, dp_run_fn fn, void *user);

/* Which of `count` rows, or elements of a block, a local device has when all have equal shares (the
   first count % D of D devices have one more): returns how many, and out_first says from where. -1:
   dp_last_error. [any] */
DP_API int64_t dp_local_share(const dp_ctx *ctx, int local_rank, int64_t count, int64_t *out_first);

/* ==== >>launch =================================================================================
   Several processes, on one machine or many, are one job: its ranks are the devices of all. Whoever
   starts them says in the environment which process each is, and dp_open meets the others; every
   process calls it equally often and in the same order. The first of these sets of variables that
   is there counts, and has to be complete:

     DP_LAUNCH  which of how many        on its machine           where process 0 is
     dp         DP_PROCESS, _COUNT       DP_LOCAL_PROCESS, _COUNT DP_ADDR
     torchrun   RANK, WORLD_SIZE         LOCAL_RANK,              MASTER_ADDR, MASTER_PORT
                                         LOCAL_WORLD_SIZE
     openmpi    OMPI_COMM_WORLD_RANK,    .._LOCAL_RANK,           -
                OMPI_COMM_WORLD_SIZE     .._LOCAL_SIZE
     mpich      PMI_RANK, PMI_SIZE       MPI_LOCALRANKID,         -
                                         MPI_LOCALNRANKS
     slurm      SLURM_PROCID,            SLURM_LOCALID            SLURM_STEP_NODELIST
                SLURM_NTASKS

   Where dp_mpi.h is compiled in, processes that MPI has started, or that have initialised it, meet
   through MPI, which knows everything in the last column; DP_LAUNCH = mpi says that MPI has started
   them.

   A world of one opens no connection. $DP_LAUNCH = none says that there is no launcher; a name of
   the first column says that its set is to be used. Slurm's variables count only inside a step,
   which srun makes: under salloc and sbatch alone a program is one process.

   $DP_ADDR = host:port says where process 0 can be reached, for any launcher; if another program
   has that port, the next seven are tried; who looks up a name gets no more than timeout_ms either.
   With torchrun the first is MASTER_PORT + 1, as its own store may sit on the other; with slurm it
   is made from the numbers of job and step, and lies between 20000 and 29999. mpirun says no
   address: its processes meet inside their machine, by a name that is made from the job's; so does
   $DP_ADDR = @name.

   Two jobs at one address are told apart by the number that the launcher has given each
   (TORCHELASTIC_RUN_ID, PMIX_NAMESPACE, PMI_JOBID, SLURM_JOB_ID and SLURM_STEP_ID), or by
   $DP_SECRET: the same in all processes of a job, another one in every job. It also keeps out
   whoever knows the launcher's number. Without either nobody can know which process belongs to
   which job, but there is only one process 0 at an address, until its dp_close: the error of a
   second one names it. While the first job still meets, all processes of both jobs get an error. So
   they do if any other number comes twice; process 0 waits half a second for that when all have
   come. Later the others of the second job find nobody, and their error says who has the address.
   One case stays: a process of the second job takes a place in the first, and the rightful one
   comes more than half a second after that job has met. Then only the rightful one gets an error.

   By hand, in two terminals:

     DP_PROCESS=0 DP_PROCESS_COUNT=2 DP_ADDR=localhost:7000 ./train
     DP_PROCESS=1 DP_PROCESS_COUNT=2 DP_ADDR=localhost:7000 ./train

   The processes of a machine divide it: with equal affinity masks they share out the cores, and
   process i of L takes the i-th part of the devices. A launcher that has bound them to cores has
   divided those already. config.thread_count, device_count, devices and $DP_DEVICES override this.

   A process that does not come within timeout_ms of the first is named in the errors of all that
   did; so is one that ends early. Whoever comes within a second after that hears it, too. The tree
   of connections through which they met stays until dp_close, which waits for nobody.           */

/* Run fn(user) in `count` new processes, as a job on this machine, and wait for all. The
   environment tells each which one it is, so its dp_open needs no config. It begins with a copy of
   this process' memory and with none of its other threads, and ends when fn returns, without
   calling what atexit was given. The first that fails or dies ends the others, and its sentence is
   this call's. Ctrl-C ends all; none of them outlives this process. Threads that OpenMP has left
   waiting for work are let go before, as new processes would wait for them for ever. STATE while a
   context is open, inside a parallel region of OpenMP, and in a process that a launcher has
   started. */
DP_MUST_USE DP_API dp_status dp_spawn(int count, dp_status (*fn)(void *user), void *user);

/* ==== >>scope ==================================================================================
   A lifetime: what is made in a scope is freed by one call, on error paths too. Blocks are kept and
   reused, so a step that repeats itself allocates nothing. Any thread may begin a scope; one thread
   at a time uses it; it may be handed over. Values may point into their own scope or an outer
   one. */

DP_API dp_scope *dp_scope_begin(dp_ctx *ctx);      /* NULL: dp_last_error; calls report it. [any] */
DP_API dp_scope *dp_scope_child(dp_scope *parent); /* ends with its parent, or earlier */
/* As dp_scope_begin, for those who return why there is none. [any] */
DP_MUST_USE DP_API dp_status dp_scope_open(dp_ctx *ctx, dp_scope **out);

/* End it and its children, the newest or last attached first; waits only for copies that still read
   host memory. NULL is fine. Refused, with a sentence, inside a function that was called for this
   scope or one in it. */
DP_API void dp_scope_end(dp_scope *scope);

/* Host bytes, 64-byte aligned, not cleared; NULL when out of memory. 0 bytes give a pointer too. */
DP_API void *dp_scope_alloc(dp_scope *scope, size_t bytes);

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

/* Same shape and dtype, any strides, any two devices. stream NULL = the compute stream of the
   device that writes (if the host writes: of the one that reads). On a stream of yours, of one of
   the two, the copy comes after what is on the compute streams of both by now, and you have to
   order what follows, including the end of a scope. From one device to another the one that writes
   copies: given a stream of the one that reads, it does so on its compute stream, after what is on
   the stream by now, and what follows on the stream comes after the copy. Host memory that a device
   reads may change again after dp_wait. */
DP_MUST_USE DP_API dp_status dp_copy(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src,
                                     dp_stream *stream);

/* Same shape, any two dtypes, same device. In a cast to integers, what is out of range saturates
   and NaN becomes 0; f64 becomes f16 or bf16 through f32. */
DP_MUST_USE DP_API dp_status dp_cast(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src);

/* out = a * x + b * y, floating dtypes, same shape, each product and the sum rounded. y may be NULL
   (scale); out may be x or y. */
DP_MUST_USE DP_API dp_status dp_axpby(dp_ctx *ctx, double a, const dp_tensor *x, double b,
                                      const dp_tensor *y, const dp_tensor *out);

/* Sum of squares in f64 and whether all is finite, read in one pass; the same bits whatever the
   number of threads. [host] */
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
   Trees of tensors, numbers, strings, lists and dicts. Constructors copy what they are given into
   the scope, and return an error value when they fail, which any call then reports. A value that
   was made or changed by hand is checked wherever it is passed in.                              */

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

/* None when absent; errors stay errors. dp_get looks at one key after another: go through a large
   dict by index instead. */
DP_API dp_value dp_get(dp_value dict, const char *key);
DP_API dp_value dp_at(dp_value value, size_t index); /* of a list, tuple or dict */
DP_API size_t dp_count(dp_value value);              /* entries of a list, tuple or dict, else 0 */
DP_API const char *dp_key_at(dp_value dict, size_t index); /* NULL when there is none */
DP_API const char *dp_text(dp_value string);               /* NULL when it is not one */

/* The tensor in a value, checked; `what` names it in the sentence. DP_DTYPE_ANY, ndim -1: any. */
DP_MUST_USE DP_API dp_status dp_as_tensor(dp_value value, const char *what, dp_dtype dtype,
                                          int ndim, const dp_tensor **out);

/* ==== >>collate ================================================================================
   Many samples become one batch, field by field: tensors are stacked, numbers become an i64 or f64
   tensor (bools a bool one), strings a list; a container is treated as it says, in groups of
   samples_per_device (0 = 1), one group per device.                                             */

DP_MUST_USE DP_API dp_status dp_collate(dp_scope *scope, const dp_value *samples, size_t count,
                                        size_t samples_per_device, dp_value *out);

/* ==== >>primitives =============================================================================
   Scatter, gather, replicate and reduce values over the local devices. If something would be lost,
   or cut differently from its neighbour, it is an error. The _into forms fill tensors of yours. */

typedef enum dp_split {
    DP_SPLIT_BALANCED, /* n/d rows each and one more for the first n%d; always d parts */
    DP_SPLIT_CHUNK,    /* torch.chunk: ceil(n/d) rows until none are left; may give fewer parts */
    DP_SPLIT_SIZES,    /* as given */
    DP_SPLIT_WEIGHTS   /* in proportion, rounded by largest remainder */
} dp_split;

typedef struct dp_scatter_config {
    const int *local_ranks; /* NULL = all */
    size_t local_rank_count;
    int dim;
    dp_split split;
    const int64_t *sizes;  /* DP_SPLIT_SIZES: rows of each part */
    const double *weights; /* DP_SPLIT_WEIGHTS: one for each part */
    size_t split_count;    /* entries of sizes or weights: as many as there are devices */
} dp_scatter_config;

typedef struct dp_gather_config {
    int local_rank; /* where the result goes */
    bool to_host;   /* to host memory instead */
    int dim;
} dp_gather_config;

/* How `rows` rows are divided among `part_count` parts: out_rows[part_count] and the number of
   parts made. Of `how` only the split matters; its split_count is part_count. */
DP_MUST_USE DP_API dp_status dp_split_rows(const dp_scatter_config *how, int64_t rows,
                                           size_t part_count, int64_t *out_rows,
                                           size_t *out_part_count);

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
   Over all ranks of the job. One host thread names the buffers of all local ranks in one call, in
   memory of the ranks' devices; any owner. Every process makes the same calls in the same order.
   They return when the work is ordered on the streams (CPU devices: done). Parts must not overlap,
   but for the in-place forms that are named.

   Same call, same bits: ranks are added in a binary tree, ((0 + 1) + (2 + 3)) + (4 + 5) and so on,
   the left one of two halves having the largest power of two. So neighbours can be added first,
   wherever they are, and the sum of as many ranks is the same however they are spread over devices
   and processes: between machines, where each process has the same number, a power of two. See
   THE SAME BITS.

   A call that is refused (>>status: CALL) changes nothing, here or elsewhere, and can be made
   again: the others wait for it. A process that does not mean to should say so by dp_abort, or
   close.

   CPU devices of several processes of one machine meet in shared memory. Where a process dies,
   stops, or issues another collective, all others fail with one sentence, which names its rank, the
   collective, what that was for (a bucket, buffers, dp_tag), and what the rank did last, or was
   refused. Nobody waits for another process longer than timeout_ms, and a few seconds in which it
   may ask who is missing. Those of several machines use MPI, where dp_mpi.h is compiled in: there,
   too, a different collective is noticed, a process that has died after timeout_ms; and the ranks
   of one process are always added first. Without it they are refused with UNSUPPORTED.

   GPUs of several processes use NCCL, where dp_nccl.h is compiled in, and are refused without it
   (dp_hip.h: RCCL is another NCCL).
   Sums have the order above where dp_config.shards is set; else NCCL adds floats in an order of its
   own, the same each time on the same GPUs, and rounds halves on the way. On one machine a process
   that dies, closes or does something else is named at once. On several, one that fails tells the
   others over the connections by which they have met, and those of one that dies break (not where
   dp_config.bootstrap is yours); for the rest NCCL notices, or timeout_ms passes. What a GPU still
   waits for then is given up: dp_wait and dp_read return the failure. */

typedef enum dp_op { DP_OP_SUM, DP_OP_MEAN, DP_OP_PROD, DP_OP_MIN, DP_OP_MAX } dp_op;

typedef struct dp_part { /* one per local rank */
    const void *send;
    void *recv;
    dp_stream *stream; /* NULL = the rank's compute stream */
} dp_part;

/* recv[i] = op over ranks of send[i]. f16 and bf16 are added in f32 and rounded once; integers wrap
   and their mean is cut towards zero; bool: sum and max are or, prod and min are and. In place:
   send == recv. A local rank whose recv is NULL takes part and wants no result: where several
   devices have one owner, one of them receives for all. */
DP_MUST_USE DP_API dp_status dp_all_reduce(dp_ctx *ctx, const dp_part *local, size_t count,
                                           dp_dtype dtype, dp_op op);
/* The same times `scale`, in the same pass; floating dtypes. */
DP_MUST_USE DP_API dp_status dp_all_reduce_scaled(dp_ctx *ctx, const dp_part *local, size_t count,
                                                  dp_dtype dtype, dp_op op, double scale);
/* The mean, with each rank weighted (by its rows, say): the sum of weight * send divided by the sum
   of the weights of all ranks. weights: one per local rank, finite and not negative, not all 0.
   Each product is rounded to `dtype`. */
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

   CPU devices of a process may have one owner, here and in dp_all_gather: a local rank whose recv
   is NULL wants no result, and a recv may lie where another local rank sends the same elements. So
   all of them receive their parts into what the first one sends, or send from what it receives. */
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

/* ==== >>reducer ================================================================================
   Gradients that lie in memory of yours become the same on all ranks. You say which parts of it
   become ready together (units), and report each unit as soon as backward has its gradient; units
   travel in buckets, strictly one after another. With several processes of CPU devices a separate
   thread carries each bucket as soon as all local ranks have it, while backward goes on; a single
   process adds everything up in one pass over memory at the end, and so do devices with memory of
   their own. With one rank there is nothing to do, unless there is a hook.

       dp_reducer_create(ctx, &config, &reducer);
       dp_reducer_begin(reducer, NULL);                      at the forward
       dp_reducer_ready(reducer, 0, layer, NULL);            in backward, layer by layer
       dp_reducer_finish(reducer);                           gradients are equal now

   Every process makes the same calls in the same order, except dp_reducer_ready. Several reducers
   may have passes at the same time, and finish them in any order. Only the oldest open pass travels
   early; when it is finished, the next one begins to. A pass that is finished before an older one
   is reduced when it is finished. Where a process has another order the job fails, and the
   sentence names both reducers, or both buckets, even if they have the same size. (NCCL on several
   machines does not compare what it adds up.)                                                   */

/* 0 is none of them, and an error: no default would be right for everybody. */
typedef enum dp_reduction {
    DP_SUM = 1,
    DP_MEAN_RANKS,  /* the sum over ranks, divided by their number */
    DP_MEAN_SAMPLES /* divided by the samples of all ranks since the last reduction: for gradients
                       that are sums over samples */
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

/* What becomes of units that a rank does not report in a reduced pass. In the last two, one that no
   rank has reported since the last reduction keeps what it holds, everywhere. */
typedef enum dp_unused {
    DP_UNUSED_ERROR, /* all ranks get an error */
    DP_UNUSED_FOUND, /* they travel when the pass ends; ranks tell each other what they used */
    DP_UNUSED_FIXED  /* the same in the first reduced pass. From then on each rank has to report
                        what it had reported by the end of that one; more or less is an error on all
                        ranks. Nobody waits for the rest, which may travel once a pass is open.
                        dp_distributed: in the first one for which each device has rows */
} dp_unused;

struct dp_bucket;

typedef struct dp_reducer_config {
    const char *name; /* for sentences; NULL = "" */
    const dp_block *blocks;
    size_t block_count;
    const dp_range *ranges; /* NULL = each block is one unit */
    size_t range_count;
    const char *const *unit_names; /* for sentences; NULL = none */
    dp_reduction reduction;
    size_t first_bucket_bytes; /* a bucket is full when it has this many; 0 = 1 MiB */
    size_t bucket_bytes;       /* the same for all others; 0 = 25 MiB */
    dp_unused unused_units;
    /* Devices of a process that share one owner of their parameters need what is reduced once: its
       first local rank gets it, and what the others hold is void. A hook leaves it to all. May
       differ from process to process. */
    bool to_first;
    /* Blocks of f32 and f64 travel as DP_F16 or DP_BF16: cast, added over the ranks in f32, times
       what the reduction says, rounded once, cast back. What f16 cannot hold becomes infinite. 0 =
       as they are, as they always are with one rank. */
    dp_dtype wire;
    dp_status (*hook)(const struct dp_bucket *bucket, void *user); /* see dp_bucket; NULL = none */
    void *hook_user; /* what the hook gets as `user` */
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
    bool regrouped;     /* by the order in which rank 0 reported in the first reduced pass */
    bool scatters;      /* as it did in the last pass: see dp_grads_scatter */
    dp_reduce_times last, mean; /* of the last reduced pass; of all of them, a pass */
    uint64_t pass_count;        /* that were reduced, and did not fail */
    size_t bytes;               /* of a rank's gradients, without gaps between them */
    dp_reduction reduction;     /* from here on as the config has it, zeros resolved */
    dp_unused unused_units;
    size_t first_bucket_bytes, bucket_bytes;
    dp_dtype wire;
    bool has_hook;
} dp_reducer_info;

typedef struct dp_bucket_info { /* its arrays are valid until the next dp_reducer_finish */
    dp_dtype dtype;
    size_t bytes;          /* that travel: of gaps between a wrapper's gradients too */
    const uint32_t *units; /* in the order in which they are expected */
    size_t unit_count;
    const dp_range *ranges; /* their memory, in its order */
    size_t range_count;
    double left_s, travel_s; /* when it left after dp_reducer_begin, and was under way for how long,
                                when it last travelled; 0: not yet, as it is now */
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

/* End the pass: gradients are reduced, in order on the compute streams (CPU devices: done). What
   was not reported is reduced too, so that no rank waits for ever, and then every rank gets a
   MISMATCH (see dp_unused) that names the unit and the rank: gradients are void, the next pass
   works. What happens when a hook fails: see dp_bucket. A collective that fails is the job's
   failure. */
DP_MUST_USE DP_API dp_status dp_reducer_finish(dp_reducer *reducer);

/* How it works at present; buckets in the order in which they travel. */
DP_MUST_USE DP_API dp_status dp_reducer_info_get(const dp_reducer *reducer, dp_reducer_info *out);
DP_MUST_USE DP_API dp_status dp_reducer_bucket_get(const dp_reducer *reducer, size_t bucket,
                                                   dp_bucket_info *out);

/* What a hook gets. The hook takes the place of the all-reduce of each bucket: it may compress,
   all-reduce and decompress, say. It finds gradients in the memory of `local`, and leaves the
   result there, the same on all ranks. Nothing is scaled before or after it. With several processes
   of CPU devices it is called on a separate thread, while the caller computes; else in
   dp_reducer_finish. A bucket of which no rank uses anything does not travel; single units that no
   rank uses are zeros in it, and keep what they hold.

   In a hook all processes call the two functions below in the same order, with the same count,
   dtype, op and scale, and at least once: this is compared before anything travels. If they differ,
   or a hook fails, all ranks know: the rest of the pass does not travel, and dp_reducer_finish says
   which bucket, which rank, and what its hook said. Gradients are void, the next pass works. */
typedef struct dp_bucket {
    dp_ctx *ctx;
    dp_reducer *reducer;
    size_t index;         /* buckets travel in this order */
    bool is_last;         /* no other has a higher index */
    dp_dtype dtype;       /* dp_reducer_config.wire, where that is set */
    size_t count;         /* elements of a local rank */
    const dp_part *local; /* one per local rank: send == recv, and the stream to work on */
    dp_bucket_info info;  /* its ranges lie there one after another */
    dp_op op;             /* without a hook it would be all-reduced by this */
    double scale;         /* and multiplied by this */
} dp_bucket;

/* As dp_all_reduce_scaled and dp_all_gather, over all ranks, on any memory; NULL streams are those
   of bucket->local. For the hook that got the bucket, on the thread that it was called on. */
DP_MUST_USE DP_API dp_status dp_bucket_all_reduce(const dp_bucket *bucket, const dp_part *local,
                                                  size_t count, dp_dtype dtype, dp_op op,
                                                  double scale);
DP_MUST_USE DP_API dp_status dp_bucket_all_gather(const dp_bucket *bucket, const dp_part *local,
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
    bool buffer; /* neither; each replica but the first gets a copy at every forward */
    /* Shares the memory of the parameter of this name; both names may be a child's: "child.name".
       The two must be alike and on one device; this one must not have memory already, neither yours
       nor the library's. */
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
    bool packed;              /* parameters are one block, in their order: dp_param_block */
    void *block, *block_grad; /* packed: memory of yours for it; NULL = the library's, all zero */
    bool mean_grads;          /* backward divides by its own number of rows; see dp_backward */
} dp_module_config;

/* Strings and arrays are copied; what pointers in them point to is not. */
DP_MUST_USE DP_API dp_status dp_module_create(dp_ctx *ctx, const dp_module_config *config,
                                              dp_module **out);
/* The same module again on any device: it has its own memory with the same numbers, and so have its
   children. */
DP_MUST_USE DP_API dp_status dp_module_copy(dp_module *module, int local_rank, dp_module **out);
/* dp_close does it for all modules. Refused while it is a child, wrapped, or in use. NULL is
   fine. */
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
    bool reduced;           /* it has a gradient, which a backward here makes equal on all ranks */
    dp_reduction reduction; /* and how; 0 if it does not */
    /* What a rank gets of it where gradients are scattered, see dp_grads_scatter: it and those that
       come right before and after it in memory are cut together. Rank r gets `share` elements from
       r * share on, counted from where the first of them begins, which is share_at elements before
       this one; and all ranks get what comes after the last share. 0: they get all of it, as
       where a share would have fewer than 256 elements. */
    size_t share, share_at;
    bool unseen; /* its gradient is scattered by a wrapper that is not in this tree: void here */
} dp_param_info;

/* Parameters and buffers of the whole tree, each piece of memory once: the module's own come first,
   then those of one child after another. */
DP_API size_t dp_module_param_count(const dp_module *module);
DP_MUST_USE DP_API dp_status dp_module_param(dp_module *module, size_t param, dp_param_info *out);
DP_MUST_USE DP_API dp_status dp_module_find(const dp_module *module, const char *name,
                                            size_t *out_param);

/* Views to write to; replicas follow at the next forward. Ask again for every change. Frozen
   parameters and buffers have no gradient: count 0. out_grad may be NULL; to ask for it gives the
   parameter a gradient. To read: dp_module_param and dp_owner_grad. */
DP_MUST_USE DP_API dp_status dp_params_edit(dp_module *module, size_t param, dp_tensor *out_data,
                                            dp_tensor *out_grad);
DP_MUST_USE DP_API dp_status dp_params_write(dp_module *module, size_t param, const void *host,
                                             size_t bytes);
DP_MUST_USE DP_API dp_status dp_params_changed(dp_module *module);
/* All gradients of the tree become zero, and as if no backward had been: nobody has used them, they
   are not void, and samples whose gradients waited for a reduction do not count in it. */
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
    dp_scope *scope; /* this replica's; lasts as long as the pass, so `saved` may lie in it */
    dp_value args, kwargs;
    dp_value out;                    /* a forward must set it (dp_none() counts) */
    void *saved;                     /* a forward sets it, its backward finds it */
    dp_value grad;                   /* backward: of `out`. See dp_backward */
    dp_value args_grad, kwargs_grad; /* backward sets them if input_grad_wanted; none = none */
    bool training, grad_enabled;     /* not grad_enabled: no backward will follow */
    bool input_grad_wanted;
    dp_dtype compute_dtype; /* from dp_pass_config; DP_F32 = the parameters' own */
    size_t replica, replica_count;
    int64_t row_first, row_count, row_total; /* of the whole batch: seeds; 0 when nothing was cut */
    double weight; /* samples in this replica's part, row_count at first; a forward may set it to
                      any number that is finite and not negative */
    struct dp__record *record;
};

/* The replica's parameter, by its place in dp_module_config.params. NULL, with a sentence, when
   there is none. Gradients exist only in backward, to be added to; frozen parameters have none. */
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

/* In backward: the gradient of this parameter is complete, by what is on call->stream by now, and
   may travel while backward goes on. Call it once per name and pass, and leave the gradient alone
   after that. Where nothing travels nothing happens; gradients that were not reported count as
   ready when backward returns. */
DP_MUST_USE DP_API dp_status dp_grad_ready(const dp_call *call, size_t param);

/* In backward: the gradient of the output called `name` (NULL: of an output that is one tensor), as
   a dense tensor like that output, whatever dp_backward was given: a number fills it, none zeroes
   it. */
DP_MUST_USE DP_API dp_status dp_call_out_grad(const dp_call *call, const char *name,
                                              dp_tensor *out);

/* A tensor among kwargs, or args, in row-major memory without gaps: one with other strides is
   copied into call->scope. The error says what is wrong with it. DP_DTYPE_ANY, ndim -1: any. */
DP_MUST_USE DP_API dp_status dp_call_tensor(const dp_call *call, const char *name, dp_dtype dtype,
                                            int ndim, const dp_tensor **out);
DP_MUST_USE DP_API dp_status dp_call_arg(const dp_call *call, size_t index, dp_dtype dtype,
                                         int ndim, const dp_tensor **out);
/* The same as it came, never copied: channels-last, transposed, or a part cut along dim 1, say. */
DP_MUST_USE DP_API dp_status dp_call_tensor_view(const dp_call *call, const char *name,
                                                 dp_dtype dtype, int ndim, const dp_tensor **out);
DP_MUST_USE DP_API dp_status dp_call_arg_view(const dp_call *call, size_t index, dp_dtype dtype,
                                              int ndim, const dp_tensor **out);

/* Run a child's method, in this replica. `child` is the name that dp_module_config gave it (without
   one: "module"; a wrapper's: the name of its function, "data_parallel"); NULL: what this module
   wraps. The pass is for dp_backward in this method's backward; out_pass may be NULL. Inside a
   replica, and under dp_run, a wrapper uses only the device that it is called on. */
DP_MUST_USE DP_API dp_status dp_call_child(dp_call *call, const char *child, const char *method,
                                           dp_value args, dp_value kwargs, dp_value *out,
                                           dp_pass **out_pass);

/* recv[i] = op over the replicas of this pass of send[i]. Every one of them enters, with the same
   count, dtype and op, and gets the same status; if one fails or returns instead, the others get an
   error. send and recv lie in memory of call->device: a host array does on a CPU device, but is a
   wild pointer on one with memory of its own. In place: send == recv; else what a replica receives
   must not overlap anything else that is sent or received. [host] */
DP_MUST_USE DP_API dp_status dp_call_all_reduce(dp_call *call, const void *send, void *recv,
                                                size_t count, dp_dtype dtype, dp_op op);
/* The same for dense tensors of one shape and dtype; where they lie is checked. */
DP_MUST_USE DP_API dp_status dp_call_all_reduce_tensor(dp_call *call, const dp_tensor *send,
                                                       const dp_tensor *recv, dp_op op);
/* The sum; where dp_distributed runs the pass, over the replicas of all processes, in the tree of
   >>collectives, in which a rank without rows, that has no replica, counts as zeros. All processes
   enter equally often, then, and one that has run out of data needs a batch of no rows for that:
   dp_none() would leave the others waiting. Where one enters and another does something else, the
   job fails. dp_norm.h shows how to use it. */
DP_MUST_USE DP_API dp_status dp_call_sum_ranks(dp_call *call, const void *send, void *recv,
                                               size_t count, dp_dtype dtype);

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
DP_MUST_USE DP_API dp_status dp_invoke(dp_module *module, const char *method, dp_scope *scope,
                                       dp_value args, dp_value kwargs, const dp_pass_config *config,
                                       dp_value *out, dp_pass **out_pass);

typedef struct dp_input_grad {
    dp_value args, kwargs;
} dp_input_grad;

/* Run "backward" for a pass, once. `grad` has the structure of its output, and tensors of the same
   dtype and shape, which are brought to the replica's device; a number stands for that number
   everywhere, none and a missing key for no gradient. If it has not, nothing happened, but for a
   pass that other processes reduce too: see dp_distributed. Parameters'
   gradients are added to; those of the inputs are given out if wanted (NULL: they are not): joined
   along dim, none of one replica is zeros if others have a gradient.

   If a backward fails, the gradients of all parameters of its module are void, those of earlier
   passes with them. Until dp_zero_grad, whatever would add to them, read them or step by them is
   refused (STATE). A parameter or buffer that a call has edited since the forward is STATE too: the
   backward needs what the forward has seen.

   A backward that was written for one device often divides by its number of rows itself, and does
   not look at the gradient that it is given. With dp_module_config.mean_grads it may stay as it is,
   whether it writes gradients or adds to them: they are zeroed first, the mean over all replicas
   counts each by its weight, and that mean is multiplied by `grad`, which must be a number
   (dp_train_step: by the loss factor). After a pass with no_sync the result is added to what that
   one has left. In it call->grad is the gradient of its own mean, as for `grad` 1: what it may pass
   on to children. */
DP_MUST_USE DP_API dp_status dp_backward(dp_pass *pass, dp_value grad, dp_input_grad *out);

/* ==== >>wrappers ===============================================================================
   A wrapper is a module that runs another one on several devices. It has the methods of what it
   wraps, and adds nothing to the names of parameters; wrappers nest. The batch is cut as by
   dp_scatter, every part goes through a replica, and the gradients of all replicas are summed into
   the one original.

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
     dp_separate_distributed  its children are, each by itself (mmengine's
                            MMSeparateDistributedDataParallel)

   With one device nothing is cut and nothing is gathered: a result is what the method returned.
   With several devices dp_gather always joins, so a loss without dims comes as a vector.

   The gradient of an input is where the input was. That of a container is its groups' gradients,
   joined on the first device; groups that were padded to different sizes cannot be joined, and
   dp_backward says so when it is asked for them.                                                */

typedef struct
    dp_parallel_config {    /* zero: all devices, balanced along dim 0, results on the first */
    const int *local_ranks; /* the wrapped module lives on the first of them; the replicas of a GPU
                               that is there twice take turns */
    size_t local_rank_count;
    const int *output_rank; /* NULL = the first; need not be one of them */
    bool output_to_host;
    int dim;
    dp_split split;
    const int64_t *sizes; /* these as in dp_scatter_config */
    const double *weights;
    size_t split_count;
    bool mean_of_samples; /* dp_criterion_parallel: losses are weighted by replicas' samples */
} dp_parallel_config;

/* With DP_SPLIT_BALANCED and _WEIGHTS trailing parts without rows get no replica, but the first one
   always does. With _SIZES, and where containers have groups, every part gets one, and so do those
   that _CHUNK makes: all of them, empty, if the batch has no rows. Without arguments there is one
   replica. */
DP_MUST_USE DP_API dp_status dp_data_parallel(dp_module *module, const dp_parallel_config *config,
                                              dp_module **out);
/* The same for one pass, without a lasting wrapper; arguments as for dp_invoke. */
DP_MUST_USE DP_API dp_status dp_data_parallel_once(dp_module *module, const char *method,
                                                   dp_scope *scope, dp_value args, dp_value kwargs,
                                                   const dp_parallel_config *config, dp_value *out,
                                                   dp_pass **out_pass);
DP_MUST_USE DP_API dp_status dp_container_parallel(dp_module *module,
                                                   const dp_parallel_config *config,
                                                   dp_module **out);
/* The criterion takes the model's list as its first argument, and targets that are cut as the batch
   was; in a replica it gets (output, targets...), with a tuple of outputs spread into as many
   arguments. Its result is the mean of the losses. */
DP_MUST_USE DP_API dp_status dp_model_parallel(dp_module *module, const dp_parallel_config *config,
                                               dp_module **out);
DP_MUST_USE DP_API dp_status dp_criterion_parallel(dp_module *criterion,
                                                   const dp_parallel_config *config,
                                                   dp_module **out);
/* Containers are unwrapped. dp_module_copy makes independent modules for tasks that run side by
   side. */
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
    size_t first_bucket_bytes; /* from here on as in dp_reducer_config */
    size_t bucket_bytes;
    dp_dtype wire;
    dp_status (*hook)(const struct dp_bucket *bucket, void *user);
    void *hook_user;
    int dim; /* from here on as in dp_parallel_config: how a process cuts its batch */
    dp_split split;
    const int64_t *sizes;
    const double *weights;
    size_t split_count;
} dp_distributed_config;

/* The module on every rank of the job: each process cuts its own batch over its devices, and leaves
   outputs where they are, as dp_model_parallel does; dp_backward ends when the gradients of all
   ranks are reduced, into the module of each process. There they may be scaled, or zeroed, by hand
   too: the next backward adds to what it finds. Buckets travel while backward goes on: see
   dp_grad_ready. When it is made, ranks compare what they made, and all start with the numbers of
   rank 0.

   All processes make the same forwards and backwards in the same order. Whether a pass is reduced
   is decided at its forward (no_sync). Buffers are made equal before a forward that gets a pass, if
   gradients have been reduced since the last time; a forward without a pass, an evaluation, waits
   for no other process.

   With DP_MEAN_RANKS the gradient is that of the mean of the ranks' losses. With DP_MEAN_SAMPLES
   backward gets gradients of sums over samples, and the sum over all ranks is divided by the sum of
   their weights; dp_train_step does this by itself, so that N ranks compute what one would. DP_SUM
   and DP_MEAN_SAMPLES would count twice what was reduced already: call dp_zero_grad before the next
   backward. It also comes between the backwards of two wrappers of the same parameters, and of a
   wrapper and of the module by itself, whatever the reduction: one does not know what the other has
   reduced (STATE).

   Children that are trained by themselves, a GAN's: see dp_separate_distributed.

   dp_train_step: data dp_none() is an empty step of a process that has run out. It adds nothing,
   and weighs nothing in DP_MEAN_SAMPLES. Losses in the log are those of this process.

   With several processes a dp_backward or dp_train_step that is reduced fails on all ranks if it
   does on one: a batch that cannot be cut, a gradient of another shape, a method that fails, a
   dp_zero_grad that was forgotten. All return that rank's status, with its number and sentence;
   gradients are void until dp_zero_grad, the pass is over, the next one works. A forward by itself
   meets nobody after its buffers: what is refused before its methods run is for this process alone
   to mend; a method that fails is the job's failure, and so is an optimizer that fails to begin.
   One whose update fails has failed here alone, after the others have made their step.

   What is compared when it is made includes how memory is laid out: memory of yours (`data`, packed
   blocks) is given on all ranks or on none. */
DP_MUST_USE DP_API dp_status dp_distributed(dp_module *module, const dp_distributed_config *config,
                                            dp_module **out);
/* A module whose methods train its children one by one, a GAN: each child that has parameters with
   a gradient is on every rank, as dp_distributed would have it with this config, under its own
   name; other children, and the module's own parameters, stay with their process. dp_invoke of what
   is made runs the module's method ("train_step"), whose dp_call_child finds the children on all
   ranks, and whose dp_backward reduces; a pass with no_sync is one of all children. Gradients want
   an out_pass there, too. The module itself stays what it was. Names in `ignored` are the
   module's: "child.name". If one of its methods fails on one rank, between two passes, the others
   do not know, and wait: dp_abort tells them. */
DP_MUST_USE DP_API dp_status dp_separate_distributed(dp_module *module,
                                                     const dp_distributed_config *config,
                                                     dp_module **out);

/* Devices with memory of their own each have their own parameters and, after a backward, the
   reduced gradients. If an optimizer steps only the parameters of the module itself, these are sent
   to all other devices before the next forward. One that takes the same step for every owner, on
   its device, avoids that: parameters that were edited equally often for each owner are not sent,
   if nothing else has edited the module since the last forward, dp_params_edit to read included.
   Devices that share memory have one owner, and so do other wrappers and plain modules: for them
   dp_owner_edit is the same as dp_params_edit. dp_params_compare of the wrapper tells whether the
   owners have come apart. */
DP_API size_t dp_owner_count(const dp_module *module);
DP_MUST_USE DP_API dp_status dp_owner_edit(dp_module *module, size_t owner, size_t param,
                                           dp_tensor *out_data, dp_tensor *out_grad);

/* The gradient of a parameter, to read, as an owner (0: the module itself) has it. To ask for it is
   no edit. Frozen parameters and buffers have none: count 0. STATE while it is void. */
DP_MUST_USE DP_API dp_status dp_owner_grad(dp_module *module, size_t owner, size_t param,
                                           dp_tensor *out);
/* Which parameters have a gradient for the next step: one answer for each, so count is
   dp_module_param_count. Since dp_zero_grad a backward has asked for it (on any rank, if ranks have
   reduced it), or an edit was given out_grad; or its memory is yours. Optimizers leave the others
   as they are, with their state. STATE while one is void. */
DP_MUST_USE DP_API dp_status dp_grads_used(dp_module *module, bool *out_used, size_t count);

/* From the next backward on, whether gradients that are reduced are scattered: each rank gets its
   share of them (dp_param_info), so half as much is sent, and what it holds of other ranks' shares
   is void; to another wrapper of the same parameters all of it is. For optimizers that step shares:
   those of dp_train.h with `sharded` set it. What holds shares is not added to, whatever the
   reduction: dp_zero_grad comes before the next backward. `true` is for wrappers by dp_distributed,
   and modules with such children; all processes make the call, and none scatters if one cannot
   (UNSUPPORTED): if it has a hook or a wire dtype, or its collectives have no reduce_scatter; or if
   its devices share their parameters. But where there are several processes, CPU devices may: their
   shares lie side by side. */
DP_MUST_USE DP_API dp_status dp_grads_scatter(dp_module *module, bool scatter);
/* Whether some gradients here hold shares since they were reduced, and have not been zeroed. */
DP_API bool dp_grads_are_scattered(const dp_module *module);

/* What a wrapper made by dp_distributed reduces with, to ask for buckets and times; NULL for other
   modules. */
DP_API const dp_reducer *dp_wrapper_reducer(const dp_module *wrapper);

typedef struct dp_report { /* of a wrapper by dp_distributed, in this process */
    dp_info job;
    const char *transport;   /* "none", "inside the process", or job.coll_backend */
    dp_reducer_info reducer; /* its compute_s is what backward took */
    dp_buffer_sync buffers;
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

/* Whether a process says yes: one that has data left, say. [host] */
DP_MUST_USE DP_API dp_status dp_any(dp_ctx *ctx, bool mine, bool *out);
/* Whether parameters are the same on all ranks, bit by bit; else a MISMATCH names the first that is
   not, and a rank. What is ignored is not looked at. [host] */
DP_MUST_USE DP_API dp_status dp_params_compare(dp_module *module);
/* The same of buffers, on each local rank of a wrapper too: of tables, say, and of statistics over
   all ranks. What methods write from rows of their own differs from one forward to the next, which
   makes it equal; with DP_BUFFERS_LOCAL it may, and is not looked at. [host] */
DP_MUST_USE DP_API dp_status dp_buffers_compare(dp_module *module);

/* Make buffers the same on all ranks now. In training they become so before each forward, but what
   that writes to them is each rank's own: in the end they differ, and an evaluation, or the last
   checkpoint, wants them equal. Each wrapper by dp_distributed in the module's tree does as it
   was told: all get those of rank 0, or the mean; with DP_BUFFERS_LOCAL, and where ignored, they
   stay. It is a write, like dp_params_write. Without such a wrapper there is nothing to do, and
   with several processes it is an error. All processes make the call. */
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

/* What dp_train_step needs of an optimizer: put a dp_optim first in a struct of yours, or take one
   of dp_train.h. */
typedef struct dp_optim dp_optim;
typedef struct dp_optim_ops {
    size_t size; /* sizeof(dp_optim_ops) */
    dp_status (*begin)(dp_optim *optim, dp_module *module, dp_pass_config *pass); /* may be NULL */
    dp_status (*loss_factor)(dp_optim *optim, double *out);  /* of gradients; NULL = 1 */
    dp_status (*update)(dp_optim *optim, dp_module *module); /* step and zero, when it is time */
} dp_optim_ops;
struct dp_optim {
    const dp_optim_ops *ops;
};

/* One training step on every device that the module or wrapper drives. "preprocess", if there is
   such a method, turns the data into other data. "forward" gets it as kwargs (a dict) or args, and
   mode "loss"; it returns a loss (a tensor or a number), or a dict of tensors, numbers and lists of
   them. `loss` is the sum of the means of those whose key contains "loss", each device weighted by
   its samples. Then backward and optim->update. The log: "loss", then every entry's mean. optim
   NULL: gradients and nothing else. */
DP_MUST_USE DP_API dp_status dp_train_step(dp_module *module, dp_scope *scope, dp_value data,
                                           dp_optim *optim, dp_value *out_log);

/* An evaluation with the same data: "preprocess", which sees dp_call.training as false, and
   "forward" with mode "predict". What that returns is given out as dp_invoke does. No backward
   follows, and no other process takes part. */
DP_MUST_USE DP_API dp_status dp_predict_step(dp_module *module, dp_scope *scope, dp_value data,
                                             dp_value *out);

/* ==== >>timeline ===============================================================================
   With $DP_TRACE=run.json in the environment of dp_open, what the process does is written to that
   file, which ui.perfetto.dev and chrome://tracing show: steps and their parts, methods and other
   functions of yours, collectives, what a loader or a checkpoint takes, each in the row of the
   thread that did it; the caller's is device 0's too. Devices with memory of their own, GPUs, have
   a row for their stream: when it came to a method or a collective, and when that was done. To
   tell, the stream waits for the host for some microseconds.

   The processes of a machine share the file, and each is a process in it. On several machines each
   needs a file of its own; all lines but the first can be appended to another's, as time is that of
   process 0 everywhere, as far as the clocks agree. While something happens, lines are written at
   most a quarter of a second late; the rest when the job fails, and in dp_close. So the file of a
   run that was killed can be read too, and what never ended is what it was in. The last bracket is
   always missing, as viewers allow.

   Where a profiler listens (Nsight Systems), dp_cuda.h gives it the same spans by NVTX, as ranges
   of the domain "dp", with $DP_TRACE or without.                                                 */

/* A span of yours on this thread. They nest; each begin has its end, on the same thread. Without a
   timeline nothing happens. [any] */
DP_API void dp_trace_begin(const char *name);
DP_API void dp_trace_end(void);

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
                    the host's own kernels are used.
     stream_create  the core makes one compute stream per device. Work on a stream runs in order;
                    streams are ordered among each other by events only.
     ...            copies, kernels, alloc and free, from any thread; each stream is used by one
                    thread at a time
     event_*        record marks a point of a stream; wait lets another stream wait for it, sync the
                    host. An event that was never recorded is waited for at once.
     close          after all streams, events and memory of the device were given back.
   After fork nothing that is open is called in the child. Nor are count and open, if a device was
   opened before the fork, or count had found one: few drivers survive that, and some wait for ever
   for threads that only the parent has. dp_open takes them for devices that cannot be used, unless
   the table says survives_fork.

   The core checks arguments before it calls: counts are above zero, pointers are of this device,
   ranges do not overlap unless they are equal. A kernel's operands are aligned to their elements,
   and so is what is reduced among devices whose memory the host cannot reach; copies take bytes
   at any address. Methods are only ever appended.

   What is optional. A method behind the bar may be NULL, or past `size`. The core does without:
     host_alloc, host_free   host memory is the allocator's, and may be slower to copy
     copy_2d                 one copy a row
     peer_copy               through the host; so if it says DP_ERR_UNSUPPORTED, of some devices or
                             of all
     kernel                  copied to the host, done there, copied back; so if it says
                             DP_ERR_UNSUPPORTED, of some kinds, dtypes or flags, or of all
     owns                    nobody asks
     host_call               the timeline has no row for the stream
     survives_fork           not used in a child of a process that has used it
   and of the collectives
     reduce_scatter          all_reduce into a temporary, then the own part
     all_to_all              all_gather into a temporary, then the own parts
     abort                   others hear why this process has failed over the connections of the
                             launcher, or MPI; who waits in the table, when that gives up
     poll                    nothing is known before the next call
     say                     who comes to wait for this process does not hear why it is in vain
     describe                dp_report_text says nothing of it

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
    DP_KERNEL_STATS,   /* out[0] = double[2]: the sum of squares of in[0], and how many elements
                          are not finite; those are in the sum, which they make infinite or NaN */
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
              x = x - m / (sqrt(s) / root + eps) * lr                                          */
enum {                         /* dp_kernel_args.flags */
       DP_KERNEL_NESTEROV = 1, /* SGD */
       DP_KERNEL_FIRST = 2,    /* SGD: momentum becomes the gradient */
       DP_KERNEL_L2 = 4,       /* ADAMW: decay goes into the gradient */
       DP_KERNEL_MAXIMIZE = 8  /* SGD, ADAMW: against the gradient */
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
    bool (*aborted)(const struct dp_host *host); /* check it in every wait for other processes */
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
    size_t size; /* sizeof(dp_device_ops) */
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
};

/* The life of a dp_coll_ops: `fits` is asked table by table, with the same answer in every process,
   and the first that says yes is opened. Ranks rank_first .. rank_first + local_count - 1 are
   local. Each collective gets one dp_part per local rank, with its stream filled in, and orders
   its work on it; the array of parts is valid until the call returns. One thread at a time calls
   into a comm, except abort and describe; several comms may be called at once. A failure may leave
   work in those streams, and in no others: it is waited for. Its class is what the table says; with
   several processes it must be JOB, since the others cannot know. A table may refuse a call, with
   the class CALL, before it has begun anything of it. No wait for another process is longer than
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

struct dp_coll_ops {
    size_t size; /* sizeof(dp_coll_ops) */
    const char *name;
    bool (*fits)(const dp_comm_config *config);
    dp_status (*open)(const dp_host *host, const dp_comm_config *config, dp_comm **out);
    void (*close)(dp_comm *comm);
    /* op over ranks, in the tree of DP_KERNEL_REDUCE (MEAN: the sum, divided by rank_count), then
       * scale; f16 and bf16 are rounded once, at the end. Unless config->ordered, a table may add
       up in another order, the same each time, and round on the way. A rank whose recv is NULL
       gives, and wants nothing. */
    dp_status (*all_reduce)(dp_comm *comm, const dp_part *local, size_t count, dp_dtype dtype,
                            dp_op op, double scale);
    dp_status (*broadcast)(dp_comm *comm, const dp_part *local, size_t count, dp_dtype dtype,
                           int root);
    /* With host_memory a recv may be NULL, as above, and may have another local rank's send in it,
       at the place of that rank. */
    dp_status (*all_gather)(dp_comm *comm, const dp_part *local, size_t count_each, dp_dtype dtype);
    /* -------------------------------------------------------------------------- optional -- */
    /* With host_memory a recv may be NULL, and may lie in what another local rank sends, at the
       place of the receiver: nothing is written there before all ranks' elements are read. */
    dp_status (*reduce_scatter)(dp_comm *comm, const dp_part *local, size_t count_each,
                                dp_dtype dtype, dp_op op, double scale);
    dp_status (*all_to_all)(dp_comm *comm, const dp_part *local, size_t count_each, dp_dtype dtype);
    /* The job has failed here: release those who wait, in other processes too, and tell them why.
       Called from any thread, perhaps more than once. */
    void (*abort)(dp_comm *comm);
    dp_status (*poll)(dp_comm *comm); /* what went wrong since */
    /* A call has failed here, and the job has not: a sentence for those who come to wait for this
       process in vain. From one thread at a time. */
    void (*say)(dp_comm *comm, const char *text);
    /* What it has carried so far, in a few words for dp_report_text, from any thread. */
    void (*describe)(dp_comm *comm, char *text, size_t bytes);
};

#define DP_HAS(type, ops, method)                                                                  \
    ((ops)->size >= offsetof(type, method) + sizeof((ops)->method) && (ops)->method)

/* One kernel of the contract on the compute stream of a device, or by the host where the device has
   none of this kind: what dp_train.h is made of. Operands have to be memory of that device, which
   is not checked; everything else is. */
DP_MUST_USE DP_API dp_status dp_kernel_run(dp_ctx *ctx, int local_rank, const dp_kernel_args *args);

DP_API const dp_device_ops *dp_cpu(void);    /* dp_cpu.h: threads of this process */
DP_API const dp_coll_ops *dp_cpu_coll(void); /* dp_cpu.h: devices whose memory the host reaches */
DP_API const dp_coll_ops *dp_shm_coll(void); /* dp_shm.h: the same, of processes of one machine */

#ifdef __cplusplus
} /* extern "C" */
#endif

/* DP_SHAPE(64, 784) gives the two arguments ndim and shape; DP_DICT, DP_LIST_OF and DP_TUPLE_OF
   build values; DP_LOCAL_RANKS(0, 2) in a config names two devices (C only). */
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

/* ==== >>platform ===============================================================================
   Headers, and the few macros. dp_cpu.h comes in here: what follows makes no system call.        */

/* FNV-1a; begins with dp__hash_first, or goes on from an earlier hash. */
static const uint64_t dp__hash_first = 14695981039346656037u;

static uint64_t dp__hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

#include "dp_cpu.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DP_ASSERT /* for bugs of dp.h itself, never for what a user passes in */
#include <assert.h>
#define DP_ASSERT(condition) assert(condition)
#endif

/* Memory that nobody uses is poisoned under AddressSanitizer. */
#if defined(__SANITIZE_ADDRESS__)
#define DP__ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DP__ASAN
#endif
#endif
#ifdef DP__ASAN /* DP__UNCHECKED: functions that read freed memory to detect a stale handle */
#define DP__UNCHECKED __attribute__((no_sanitize("address")))
enum { DP__RED_ZONE_BYTES = 16 };
void __asan_poison_memory_region(void const volatile *data, size_t bytes);
void __asan_unpoison_memory_region(void const volatile *data, size_t bytes);
static void dp__poison(const void *data, size_t bytes)
{
    __asan_poison_memory_region(data, bytes);
}
static void dp__unpoison(const void *data, size_t bytes)
{
    __asan_unpoison_memory_region(data, bytes);
}
#else
#define DP__UNCHECKED
enum { DP__RED_ZONE_BYTES = 0 };
static void dp__poison(const void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}
static void dp__unpoison(const void *data, size_t bytes)
{
    (void)data;
    (void)bytes;
}
#endif

/* ==== >>state ==================================================================================
   All private structs. A context owns devices, pools, scopes; a scope owns blocks.              */

enum {
    DP__TEXT_BYTES = 512,
    DP__WORDS_BYTES = 256, /* what a collective is, in words */
    DP__LIVE_MAX = 64,     /* contexts that may be open at the same time */
    DP__CLASS_COUNT = 320,
    DP__CHUNK_BYTES = 32 << 10,     /* from which a scope cuts small things */
    DP__SMALL_BYTES = 4 << 10,      /* larger things get a block of their own */
    DP__PACKED_RUN_BYTES = 4 << 10, /* shorter runs are packed by a device that can */
    DP__CHAIN_PIECE = 512 << 10,    /* what devices pass on is cut into: pieces of at least this, */
    DP__CHAIN_PIECES = 32,          /* at most so many */
    DP__COALESCE_BYTES = 10 << 20,
    DP__STAGE_BYTES = 4 << 20,
    DP__OPERANDS_MAX = 1 << 20, /* of a REDUCE */
    DP__TIMEOUT_MS = 60000
};

#define DP__SCOPE_LIVE   0x5c09e0dbu /* dp_scope.magic */
#define DP__SCOPE_ENDING 0x5c09e0deu

typedef struct dp__tracked { /* in front of what dp_host.alloc gives */
    struct dp__tracked *prev, *next;
    size_t bytes, offset; /* of the whole; of the user's part */
} dp__tracked;

typedef struct dp__block {                /* memory of a pool, in a scope or in a free list */
    struct dp__block *next, *made_before; /* made_before: the context's list of all blocks */
    struct dp__pool *pool;
    void *data;
    size_t bytes; /* capacity: the size of its class */
    int class_;
} dp__block;

typedef struct dp__pool {
    struct dp__device *device; /* NULL = the allocator */
    bool pinned;               /* host memory from the device's host_alloc */
    dp__block *free[DP__CLASS_COUNT];
} dp__pool;

typedef struct dp__reads {      /* copies that read host memory, on the streams of one kind */
    dp_event *done;             /* after the last of them */
    const dp_stream *stream;    /* on which that is */
    atomic_uint marked, waited; /* how often it was recorded; up to which record was waited */
} dp__reads;

typedef struct dp__device {
    dp_dev *dev;
    dp_device id;
    int local_rank; /* -1: the host */
    dp_device_info info;
    dp_stream *stream, *own_stream; /* in use; made by the core */
    dp_event *done;                 /* orders another stream after this one */
    dp__reads reads[2];             /* on the compute stream; on others */
    dp__pool pool;
} dp__device;

typedef struct dp__deferred {
    struct dp__deferred *next;
    void (*fn)(void *user);
    void *user;
} dp__deferred;

enum { /* dp__pass_head.kind */
       DP__PASS_PLAIN = 1,
       DP__PASS_SPREAD = 2, /* parts of it lie in the scope's replicas */
       DP__PASS_INNER = 4,  /* it is part of another pass, which may lie in the scope around */
       DP__PASS_ANY = 7
};

typedef struct dp__pass_head { /* what a scope knows about a pass */
    uint32_t magic;
    unsigned kind;
    struct dp__pass_head *next;
} dp__pass_head;

struct dp_scope {
    uint32_t magic;
    dp_ctx *ctx;
    dp_scope *parent, *first_child, *prev, *next; /* next: of the free list too */
    dp__block *home;                              /* its first chunk, which it keeps when idle */
    dp__block *blocks;                            /* others, chunks among them, the newest first */
    char *cursor, *limit;                         /* of the newest chunk */
    dp_scope *made_before;                        /* the context's list of all scopes */
    dp__deferred *deferred;
    dp_scope **replicas;   /* one child per local rank, made by the first dp_run */
    dp__pass_head *passes; /* that lie in it */
};

typedef struct dp__slot { /* of one local rank under dp_run */
    dp_status status;
    char text[DP__TEXT_BYTES];
} dp__slot;

struct dp_ctx {
    dp_host host; /* first: a backend's dp_host is the context's head */
    dp_config config;
    dp_info info;
    unsigned fork_count;
    bool traced;
    dp__lock lock; /* pools, scope lists, tracked blocks, failure */
    dp__tracked *tracked;
    dp__device host_device; /* the CPU table; also does what other devices cannot */
    dp__device *devices;    /* stb_ds array, reserved once */
    dp__pool host_pool, pinned_pool;
    dp__team *team; /* NULL in a world of one device */
    dp__slot *slots;
    dp_comm *comm;               /* NULL in a world of one */
    dp_part *parts;              /* local ranks, streams filled in */
    struct dp__journal *journal; /* with several processes; else NULL */
    int *firsts;           /* the first rank of each process, and how many there are; else NULL */
    dp__lock far_lock;     /* of the next two, while the context is open */
    struct dp__tree *tree; /* to the other processes, where a launcher named them; else NULL */
    struct dp__mpi_line *line; /* the same, where MPI has brought them together */
    dp_comm *courier_comm;     /* for the courier; NULL where nothing travels during backward */
    dp__courier *courier;      /* started by the first reducer */
    dp_part *courier_parts;
    dp_stream **courier_streams;
    struct dp__reported *reported; /* local ranks: what the courier's streams have to come after */
    dp_reducer *riding; /* passes to reduce, the oldest first, which the courier carries; under the
                           lock, as is all state of a pass */
    dp_scope *scopes;   /* live ones without a parent */
    dp_scope *idle;     /* ended ones */
    dp_scope *all_scopes;
    dp__block *all_blocks;
    dp_module *idle_modules; /* destroyed, to be reused */
    uint32_t wrappers;       /* how many dp_distributed has made: their numbers */
    uint32_t reducers;       /* the same of reducers that all processes have made */
    atomic_ullong forwards;  /* with a pass, that have returned */
    atomic_ullong written;   /* how many of them had, at the last edit of a parameter */
    atomic_ullong torn;      /* how many backwards have failed */
    atomic_bool entered;     /* a dp_run, a collective or a pass of several replicas is under way */
    atomic_int inside;       /* threads in the user's functions, except those under `entered` */
    atomic_int failed;       /* a dp_status of the JOB class, or DP_OK */
    int failed_rank;
    char failed_text[DP__TEXT_BYTES];
    char failed_here[DP__WORDS_BYTES];
};
_Static_assert(offsetof(struct dp_ctx, host) == 0, "dp_host is the head of a context");

/* ==== >>trace ==================================================================================
   $DP_TRACE: a line for each beginning and each end, of what threads and streams do. All of it
   belongs to the process, as threads and files do: contexts that are opened with it share it. The
   processes of a machine append whole lines to one file, which the first of them makes anew before
   they meet. A child of fork begins anew.                                                       */

enum {
    DP__TRACE_BYTES = 1 << 16, /* written at once */
    DP__TRACE_LINE = 512,      /* of a line, at most */
    DP__TRACE_NAME = 240,      /* of a name in it, with what is escaped */
    DP__TRACE_OLD = 250000000, /* nanoseconds after which a line is written with the next one */
    /* Rows are numbered from here on: streams of devices, streams of the courier, threads, of which
       there may be any number in the end. */
    DP__TRACE_STREAMS = 1,
    DP__TRACE_COURIER = 10000,
    DP__TRACE_THREADS = 20000
};

typedef struct dp__mark { /* what is to be written when a stream gets there */
    struct dp__mark *next;
    int row;
    char phase;
    char name[];
} dp__mark;

static struct {
    dp__lock lock; /* of all that follows; nobody waits under it */
    atomic_bool on;
    unsigned fork_count; /* of the process that opened it */
    int contexts;        /* that use the file */
    int file;            /* -1: none */
    unsigned files;      /* opened so far: each has to be told what a row is */
    char *path;          /* of the last one */
    int process, threads;
    uint64_t start;   /* of time: when process 0 opened, by this machine's steady clock */
    uint64_t written; /* when */
    char *bytes;      /* to be written */
    size_t used;
    dp__mark *marks;                /* never freed: a graph may hold them */
    void (*push)(const char *name); /* a profiler that listens, or NULL */
    void (*pop)(void);
} dp__trace = {.lock = DP__LOCK_INITIALIZER, .file = -1};

static _Thread_local struct {
    char who[24]; /* "device 1", or "": a thread of the user's */
    int place;    /* where it is shown, from the top */
    int row;
    unsigned files;
} dp__traced;

static bool dp__trace_is_on(void)
{
    return atomic_load_explicit(&dp__trace.on, memory_order_relaxed);
}

static void dp__trace_off(void)
{
    if (dp__trace.file >= 0)
        dp__os_file_close(dp__trace.file);
    dp__os_free(dp__trace.bytes, DP__TRACE_BYTES, NULL);
    dp__trace.file = -1;
    dp__trace.bytes = NULL;
    dp__trace.used = 0;
    atomic_store_explicit(&dp__trace.on, dp__trace.push != NULL, memory_order_relaxed);
}

/* When the disk is full, nothing more is written. */
static void dp__trace_write(void)
{
    bool done = dp__trace.used == 0 ||
                dp__os_file_put(dp__trace.file, dp__trace.bytes, dp__trace.used);
    dp__trace.used = 0;
    dp__trace.written = dp__os_now_ns();
    if (!done)
        dp__trace_off();
}

static void dp__trace_flush(void)
{
    dp__lock_enter(&dp__trace.lock);
    if (dp__trace.file >= 0)
        dp__trace_write();
    dp__lock_leave(&dp__trace.lock);
}

DP_PRINTF(1, 2) static void dp__trace_line(const char *format, ...)
{
    va_list args;
    if (dp__trace.used + DP__TRACE_LINE > DP__TRACE_BYTES)
        dp__trace_write();
    if (dp__trace.file < 0)
        return;
    va_start(args, format);
    int bytes = vsnprintf(dp__trace.bytes + dp__trace.used, DP__TRACE_LINE, format, args);
    va_end(args);
    dp__trace.used += (size_t)bytes;
}

#define DP__TRACE_META "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":"

static void dp__trace_row(int row, int place, const char *who)
{
    dp__trace_line("," DP__TRACE_META "\"thread_name\",\"args\":{\"name\":\"%s\"}}\n",
                   dp__trace.process, row, who);
    dp__trace_line("," DP__TRACE_META "\"thread_sort_index\",\"args\":{\"sort_index\":%d}}\n",
                   dp__trace.process, row, place);
}

/* Who this thread is, if it has not said so before. */
DP_PRINTF(2, 3) static void dp__trace_who(int place, const char *format, ...)
{
    va_list args;
    if (dp__traced.who[0] != '\0')
        return;
    va_start(args, format);
    vsnprintf(dp__traced.who, sizeof dp__traced.who, format, args);
    va_end(args);
    dp__traced.place = place;
}

static int dp__trace_thread(void)
{
    if (dp__traced.row != 0 && dp__traced.files == dp__trace.files)
        return dp__traced.row;
    dp__traced.files = dp__trace.files;
    dp__traced.row = DP__TRACE_THREADS + dp__trace.threads++;
    dp__trace_who(2 * DP__TRACE_THREADS, "thread %d", dp__trace.threads);
    dp__trace_row(dp__traced.row, dp__traced.place, dp__traced.who);
    return dp__traced.row;
}

/* Bytes of the character that begins here, 0 if it is none: too long for what it says, half of a
   pair, too large, or cut short. */
static size_t dp__utf8(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t count = *at < 0x80 ? 1 : *at >= 0xF0 ? 4 : *at >= 0xE0 ? 3 : *at >= 0xC0 ? 2 : 0;
    uint32_t code = count > 1 ? *at & (0x7FU >> count) : *at;
    for (size_t i = 1; i < count; i++) {
        if ((at[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3F);
    }
    bool half = code >= 0xD800 && code < 0xE000;
    return *at < 0xF8 && code >= least[count] && !half && code <= 0x10FFFF ? count : 0;
}

/* As the inside of a JSON string, cut where there is no room. */
static const char *dp__trace_name(const char *text, char *out)
{
    size_t used = 0;
    while (*text != '\0' && used + sizeof "\\u0000" <= DP__TRACE_NAME) {
        size_t count = dp__utf8(text);
        bool plain = count > 0 && (unsigned char)*text >= ' ' && *text != '"' && *text != '\\';
        if (plain)
            memcpy(out + used, text, count);
        else
            snprintf(out + used, sizeof "\\u0000", "\\u%04x", (unsigned)(unsigned char)*text);
        used += plain ? count : strlen("\\u0000");
        text += plain ? count : 1;
    }
    out[used] = '\0';
    return out;
}

/* An end (E) has no name. In row 0: in this thread's. Under the lock. */
static void dp__trace_event(int row, char phase, const char *name)
{
    char text[DP__TRACE_NAME];
    uint64_t now = dp__os_now_ns(), at = now > dp__trace.start ? now - dp__trace.start : 0;
    if (dp__trace.file < 0)
        return;
    row = row != 0 ? row : dp__trace_thread();
    dp__trace_line(",{\"ph\":\"%c\",\"pid\":%d,\"tid\":%d,\"ts\":%llu.%03u%s%s%s}\n", phase,
                   dp__trace.process, row, (unsigned long long)(at / 1000), (unsigned)(at % 1000),
                   *name != '\0' ? ",\"name\":\"" : "", dp__trace_name(name, text),
                   *name != '\0' ? "\"" : "");
    if (now > dp__trace.written + DP__TRACE_OLD && dp__trace.file >= 0)
        dp__trace_write();
}

DP_API void dp_trace_begin(const char *name)
{
    if (!dp__trace_is_on())
        return;
    name = name != NULL && *name != '\0' ? name : "(no name)";
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(0, 'B', name);
    void (*push)(const char *) = dp__trace.push;
    dp__lock_leave(&dp__trace.lock);
    if (push != NULL)
        push(name);
}

DP_API void dp_trace_end(void)
{
    if (!dp__trace_is_on())
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(0, 'E', "");
    void (*pop)(void) = dp__trace.pop;
    dp__lock_leave(&dp__trace.lock);
    if (pop != NULL)
        pop();
}

/* ---- streams --------------------------------------------------------------------------------- */

static void dp__mark_reached(void *user)
{
    const dp__mark *mark = user;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_event(mark->row, mark->phase, mark->name);
    dp__lock_leave(&dp__trace.lock);
}

/* NULL: there is no memory. */
static dp__mark *dp__mark_of(int row, char phase, const char *name)
{
    dp__mark *mark = dp__trace.marks;
    while (mark != NULL &&
           (mark->row != row || mark->phase != phase || strcmp(mark->name, name) != 0))
        mark = mark->next;
    size_t bytes = strlen(name) + 1;
    if (mark != NULL || (mark = dp__os_alloc(sizeof *mark + bytes, 8, NULL)) == NULL)
        return mark;
    *mark = (dp__mark){.next = dp__trace.marks, .row = row, .phase = phase};
    memcpy(mark->name, name, bytes);
    return dp__trace.marks = mark;
}

/* What the stream does next begins, or what it has done last ends: in its own time, where the table
   can tell. A failure is met again by whatever comes next. */
static void dp__trace_stream(dp_stream *stream, int row, char phase, const char *name)
{
    const dp_device_ops *ops = stream->dev->ops;
    if (!dp__trace_is_on() || !DP_HAS(dp_device_ops, ops, host_call))
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__mark *mark = dp__trace.file >= 0 ? dp__mark_of(row, phase, name) : NULL;
    dp__lock_leave(&dp__trace.lock);
    if (mark != NULL)
        (void)ops->host_call(stream, dp__mark_reached, mark);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* From a backend that has found a profiler. */
DP__MAYBE_UNUSED static void dp__trace_listen(void (*push)(const char *name), void (*pop)(void))
{
    dp__lock_enter(&dp__trace.lock);
    dp__trace.push = push;
    dp__trace.pop = pop;
    atomic_store_explicit(&dp__trace.on, true, memory_order_relaxed);
    dp__lock_leave(&dp__trace.lock);
}

/* What a parent had open is the parent's, with what it has not written. */
static void dp__trace_own(void)
{
    if (dp__trace.fork_count != dp__os_fork_count()) {
        dp__trace_off();
        dp__trace.contexts = 0;
    }
    dp__trace.fork_count = dp__os_fork_count();
}

static bool dp__trace_knows(const char *path)
{
    return dp__trace.path != NULL && strcmp(dp__trace.path, path) == 0;
}

/* By the first process of a machine, before the others open: what an earlier run has left in the
   file goes. It is no whole JSON text: a bracket is missing at its end, as viewers allow. */
static dp_status dp__trace_make(int process)
{
    const char *path = dp__os_env("DP_TRACE");
    char first[DP__TRACE_LINE];
    if (path == NULL)
        return DP_OK;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_own();
    bool there = dp__trace.contexts > 0 || dp__trace_knows(path);
    dp__lock_leave(&dp__trace.lock);
    if (there)
        return DP_OK;
    int bytes = snprintf(first, sizeof first,
                         "[" DP__TRACE_META "\"process_name\",\"args\":{\"name\":\"process\"}}\n",
                         process, 0);
    int file = dp__os_file_append(path, true);
    bool done = file >= 0 && dp__os_file_put(file, first, (size_t)bytes);
    int why = errno;
    if (file >= 0)
        dp__os_file_close(file);
    return done ? DP_OK
                : dp_error(DP_ERR_FILE, "dp_open: $DP_TRACE: '%s': %s", path, strerror(why));
}

/* `epoch`: when process 0 opened, by the clock on the wall. */
static bool dp__trace_open(const char *path, const dp_ctx *ctx, uint64_t epoch)
{
    bool knows = dp__trace_knows(path);
    size_t bytes = strlen(path) + 1;
    char *own = knows ? dp__trace.path : dp__os_alloc(bytes, 8, NULL);
    dp__trace.bytes = dp__os_alloc(DP__TRACE_BYTES, 64, NULL);
    if (own != NULL && dp__trace.bytes != NULL)
        dp__trace.file = dp__os_file_append(path, false);
    if (!knows && own != NULL) {
        dp__os_free(dp__trace.path, 0, NULL);
        dp__trace.path = memcpy(own, path, bytes);
        dp__trace.start = dp__os_now_ns() - (dp__os_wall_ns() - epoch);
    }
    if (dp__trace.file < 0) {
        dp__trace_off();
        return false;
    }
    dp__trace.files++;
    dp__trace.threads = 0;
    dp__trace.process = ctx->info.process;
    dp__trace.written = dp__os_now_ns();
    dp__trace_line("," DP__TRACE_META "\"process_name\",\"args\":{\"name\":\"process %d\"}}\n",
                   ctx->info.process, 0, ctx->info.process);
    dp__trace_who(0, "caller, device 0");
    atomic_store_explicit(&dp__trace.on, true, memory_order_relaxed);
    return true;
}

static void dp__trace_stream_row(int row, const char *what, int number)
{
    char name[48];
    snprintf(name, sizeof name, "%s %d", what, number);
    dp__trace_row(row, DP__TRACE_COURIER + row, name);
}

static void dp__trace_join(dp_ctx *ctx, uint64_t epoch)
{
    const char *path = dp__os_env("DP_TRACE");
    if (path == NULL)
        return;
    dp__lock_enter(&dp__trace.lock);
    dp__trace_own();
    ctx->traced = dp__trace.contexts > 0 || dp__trace_open(path, ctx, epoch);
    dp__trace.contexts += ctx->traced;
    for (int i = 0; ctx->traced && i < ctx->info.local_count; i++) {
        if (ctx->devices[i].info.host_memory)
            continue;
        dp__trace_stream_row(DP__TRACE_STREAMS + i, "stream of device", i);
        dp__trace_stream_row(DP__TRACE_COURIER + i, "courier's stream, device", i);
    }
    dp__lock_leave(&dp__trace.lock);
}

static void dp__trace_leave(const dp_ctx *ctx)
{
    if (!ctx->traced)
        return;
    dp__lock_enter(&dp__trace.lock);
    if (dp__trace.file >= 0)
        dp__trace_write();
    if (--dp__trace.contexts == 0)
        dp__trace_off();
    dp__lock_leave(&dp__trace.lock);
}

/* ==== >>errors =================================================================================
   Sentences, liveness, and the one sticky failure of a job.                                     */

static _Thread_local struct {
    char text[DP__TEXT_BYTES];
    bool fresh;                     /* the sentence is of the public call that is under way */
    dp_status scope_status;         /* why the last dp_scope_begin or dp_scope_child gave NULL */
    const struct dp__frame *frames; /* the innermost; see >>frames */
    bool courier;                   /* it works alone: workers are the caller's */
    int culprit; /* where the failure that is on its way is known to come from: a rank + 1; or 0 */
} dp__thread;

/* Read without the lock: the value of a pointer alone tells whether its context is live. */
static _Atomic(dp_ctx *) dp__live[DP__LIVE_MAX];
static dp__lock dp__live_lock = DP__LOCK_INITIALIZER;

DP_API int dp_version(void)
{
    return DP_VERSION;
}

/* clang-format off */
#define DP__STATUS_NAME(name, value, class_, text) case name: return #name;
#define DP__STATUS_TEXT(name, value, class_, text) case name: return text;
#define DP__STATUS_CLASS(name, value, class_, text) case name: return DP_CLASS_##class_;
/* clang-format on */

DP_API const char *dp_status_name(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_NAME)
    }
    return "unknown status";
}

DP_API const char *dp_status_text(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_TEXT)
    }
    return "unknown status";
}

DP_API dp_class dp_status_class(dp_status status)
{
    switch (status) {
        DP_STATUS_LIST(DP__STATUS_CLASS)
    }
    return DP_CLASS_JOB; /* a number that no table should return: nothing can be trusted any more */
}

DP_API const char *dp_last_error(void)
{
    return dp__thread.text;
}

DP_API dp_status dp_error(dp_status status, const char *format, ...)
{
    char text[DP__TEXT_BYTES]; /* the arguments may point into the old sentence */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format != NULL ? format : "(no text)", args);
    va_end(args);
    memcpy(dp__thread.text, text, sizeof text);
    dp__thread.fresh = true;
    return status;
}

DP_API void dp__check_failed(const char *file, int line)
{
    char text[DP__TEXT_BYTES + 256];
    snprintf(text, sizeof text, "%s:%d: %s\n", file, line, dp__thread.text);
    dp__os_write(text);
    exit(1);
}

/* The sentence of this thread is set aside while a function of the user's runs, so that if it fails
   without setting one, an older sentence is not taken for its own. */
static char dp__sentence_hide(void)
{
    char first = dp__thread.text[0];
    dp__thread.text[0] = '\0';
    return first;
}

static bool dp__is_failure(dp_status status) /* one of the list */
{
    return status < DP_OK && status >= DP_ERR_NO_FILE;
}

static dp_status dp__sentence_after(char first, dp_status status)
{
    if (status != DP_OK && !dp__is_failure(status))
        status = DP_ERR_USER;
    if (status == DP_OK && dp__thread.text[0] == '\0')
        dp__thread.text[0] = first;
    else if (status != DP_OK && dp__thread.text[0] == '\0')
        dp_error(status, "%s", dp_status_text(status));
    return status;
}

static bool dp__is_live(const dp_ctx *ctx)
{
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load_explicit(&dp__live[i], memory_order_relaxed) == ctx)
            return true;
    return false;
}

/* Put `now` in the place of `before`; NULL is an empty place. */
static bool dp__live_swap(dp_ctx *before, dp_ctx *now)
{
    bool found = false;
    dp__lock_enter(&dp__live_lock);
    for (int i = 0; i < DP__LIVE_MAX && !found; i++) {
        found = atomic_load(&dp__live[i]) == before;
        if (found)
            atomic_store(&dp__live[i], now);
    }
    dp__lock_leave(&dp__live_lock);
    return found;
}

/* Around a fork nobody holds a lock, so the child finds all lists whole. */
static void dp__before_fork(void)
{
    dp__lock_enter(&dp__live_lock);
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load(&dp__live[i]) != NULL)
            dp__lock_enter(&atomic_load(&dp__live[i])->lock);
    dp__lock_enter(&dp__trace.lock);
}

static void dp__tree_unclaim(struct dp__tree *tree);

/* In a child, whose contexts are its parent's. */
static void dp__in_child(void)
{
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load(&dp__live[i]) != NULL)
            dp__tree_unclaim(atomic_load(&dp__live[i])->tree);
}

static void dp__after_fork(void)
{
    dp__lock_leave(&dp__trace.lock);
    for (int i = 0; i < DP__LIVE_MAX; i++)
        if (atomic_load(&dp__live[i]) != NULL)
            dp__lock_leave(&atomic_load(&dp__live[i])->lock);
    dp__lock_leave(&dp__live_lock);
}

/* Only for contexts that are live and of this process, even if the job has failed. */
static dp_status dp__check_open(const char *fn, const dp_ctx *ctx)
{
    dp__thread.fresh = false;
    dp__thread.culprit = 0;
    if (ctx == NULL)
        return dp_error(DP_ERR_INVALID, "%s: ctx is NULL", fn);
    if (!dp__is_live(ctx))
        return dp_error(DP_ERR_STATE, "%s: the context is closed", fn);
    if (ctx->fork_count != dp__os_fork_count())
        return dp_error(DP_ERR_STATE,
                        "%s: the context belongs to the parent process; after fork "
                        "a child may only close it",
                        fn);
    return DP_OK;
}

/* A sentence for one that names the function already. */
DP__COLD static const char *dp__unnamed(const char *fn, const char *text)
{
    size_t length = strlen(fn);
    bool named = strncmp(text, fn, length) == 0 && strncmp(text + length, ": ", 2) == 0;
    return named ? text + length + 2 : text;
}

/* This thread's sentence begins with the function's name; what another process says of the same
   function does not name it again. */
DP__COLD static void dp__name_once(const char *fn)
{
    static const char before[] = ") failed: "; /* "rank 1 (process 1, pid 4242) failed: " */
    char *text = dp__thread.text, *at = strstr(text, before);
    if (at == NULL)
        return;
    at += sizeof before - 1;
    const char *rest = dp__unnamed(fn, at);
    memmove(at, rest, strlen(rest) + 1);
}

DP__APART static dp_status dp__check_ctx(const char *fn, const dp_ctx *ctx)
{
    DP_TRY(dp__check_open(fn, ctx));
    int failed = atomic_load_explicit(&ctx->failed, memory_order_acquire);
    if (failed != DP_OK)
        return dp_error((dp_status)failed, "%s: the job failed: %s", fn,
                        dp__unnamed(fn, ctx->failed_text));
    return DP_OK;
}

DP__APART static dp_status dp__check_pointer(const char *fn, const char *what, const void *pointer)
{
    if (pointer == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", fn, what);
    return DP_OK;
}

/* What this process has begun, told by its journal; see dp_ranks.h. */
static void dp__journal_here(const dp_ctx *ctx, char *text, size_t bytes);
static void dp__journal_log(const dp_ctx *ctx);
static void dp__journal_say(dp_ctx *ctx, const char *text);

/* What others hear of this process where the table of collectives says nothing; see dp_launch.h. */
static void dp__far_pass_on(dp_ctx *ctx);

/* True: it is the first failure. */
static bool dp__job_failed(dp_ctx *ctx, dp_status status, const char *text)
{
    dp__lock_enter(&ctx->lock);
    bool first = atomic_load(&ctx->failed) == DP_OK;
    if (first) {
        ctx->failed_rank = dp__thread.culprit > 0 ? dp__thread.culprit - 1 : ctx->info.rank_first;
        snprintf(ctx->failed_text, sizeof ctx->failed_text, "%s", text);
        dp__journal_here(ctx, ctx->failed_here, sizeof ctx->failed_here);
        atomic_store_explicit(&ctx->failed, (int)status, memory_order_release);
    }
    dp__lock_leave(&ctx->lock);
    return first;
}

static void dp__comm_abort(dp_comm *comm)
{
    if (comm != NULL && DP_HAS(dp_coll_ops, comm->ops, abort))
        comm->ops->abort(comm);
}

/* Who waits for this process, elsewhere or here, waits in vain. */
static void dp__job_end(dp_ctx *ctx, dp_status status, const char *text)
{
    bool first = dp__job_failed(ctx, status, text);
    dp__comm_abort(ctx->comm);
    dp__comm_abort(ctx->courier_comm);
    if (first) {
        dp__far_pass_on(ctx);
        dp__journal_log(ctx);
        dp__trace_flush();
    }
    dp__lock_enter(&ctx->lock);
    dp__courier *courier = ctx->courier;
    dp__lock_leave(&ctx->lock);
    if (courier != NULL)
        dp__courier_report(courier);
}

/* On the way out of a public function that called deeper: the sentence begins with its name, and
   failures of the JOB class stick, for the other processes too. */
DP__APART static dp_status dp__leave(const char *fn, dp_ctx *ctx, dp_status status)
{
    if (status == DP_OK)
        return DP_OK;
    if (!dp__thread.fresh) /* a table that failed without a sentence */
        dp_error(status, "%s: %s", fn, dp_status_text(status));
    else if (strncmp(dp__thread.text, fn, strlen(fn)) != 0)
        dp_error(status, "%s: %s", fn, dp__thread.text);
    dp__name_once(fn);
    if (dp_status_class(status) == DP_CLASS_JOB) {
        dp__job_end(ctx, status, dp_last_error());
    } else {
        dp__journal_say(ctx, dp_last_error());
    }
    return status;
}

/* The result of a wait. A device that cannot be waited for is lost, whatever its table says, except
   that now is not the time. */
static dp_status dp__waited(dp_status status)
{
    if (status == DP_OK || status == DP_ERR_STATE || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    return dp_error(DP_ERR_DEVICE, "the device cannot be waited for: %s",
                    dp__thread.fresh ? dp__thread.text : dp_status_text(status));
}

DP__APART static dp_status dp__sync(dp_stream *stream)
{
    return dp__waited(stream->dev->ops->stream_sync(stream));
}

static bool dp__has_failed(const dp_ctx *ctx)
{
    return atomic_load_explicit(&ctx->failed, memory_order_acquire) != DP_OK;
}

DP_API bool dp_failure(const dp_ctx *ctx, dp_failure_info *out)
{
    if (dp__check_open("dp_failure", ctx) != DP_OK)
        return false;
    int failed = atomic_load_explicit(&ctx->failed, memory_order_acquire);
    if (failed != DP_OK && out != NULL)
        *out = (dp_failure_info){(dp_status)failed, ctx->failed_rank, ctx->failed_text,
                                 ctx->failed_here};
    return failed != DP_OK;
}

DP_API void dp_abort(dp_ctx *ctx, dp_status why, const char *format, ...)
{
    char text[DP__TEXT_BYTES];
    va_list args;
    if (dp__check_open("dp_abort", ctx) != DP_OK)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format != NULL ? format : "dp_abort was called", args);
    va_end(args);
    if (!dp__is_failure(why) || dp_status_class(why) != DP_CLASS_JOB)
        why = DP_ERR_ABORTED;
    dp__job_end(ctx, why, text);
}

/* ==== >>frames =================================================================================
   Each call of a user's function leaves a frame on the stack of its thread, which says what the
   function depends on. Whatever would take that away looks here first. Functions that run on all
   devices at the same time also hold ctx->entered, which every thread sees.                     */

typedef struct dp__frame {
    const char *what, *name, *method; /* "the method", the names of module and method, or NULL */
    dp_ctx *ctx;
    const dp_scope *scope;           /* has to stay as long as this runs; NULL: none */
    const dp_module *module;         /* so does its tree, with what it wraps; NULL: none */
    const struct dp__record *record; /* of a method */
    int local_rank;
    bool together;    /* others like it run at the same time */
    bool owns_device; /* but none of them on this device */
    bool on_all;      /* a hook: it works on the streams that it was given */
    bool counted;     /* in ctx->inside; not the courier's, whom dp_close waits for */
    bool fresh;       /* of dp__thread, to be put back */
    char first;       /* first letter of the sentence that was set aside */
    const struct dp__frame *outer;
} dp__frame;

static const char *dp__frame_text(const dp__frame *frame, char *text, size_t bytes)
{
    if (frame->name == NULL)
        snprintf(text, bytes, "%s", frame->what);
    else
        snprintf(text, bytes, "%s '%s%s%s'", frame->what, frame->name,
                 frame->method != NULL ? "." : "", frame->method != NULL ? frame->method : "");
    return text;
}

static void dp__frame_trace(const dp__frame *frame, char phase)
{
    char name[160];
    dp_ctx *ctx = frame->ctx;
    if (frame->together && frame->local_rank > 0)
        dp__trace_who(frame->local_rank, "device %d", frame->local_rank);
    if (phase == 'E')
        dp_trace_end();
    else if (frame->method != NULL)
        snprintf(name, sizeof name, "%s.%s", frame->name, frame->method);
    else
        dp__frame_text(frame, name, sizeof name);
    if (phase == 'B')
        dp_trace_begin(name);
    if (frame->method != NULL)
        dp__trace_stream(ctx->devices[frame->local_rank].stream,
                         DP__TRACE_STREAMS + frame->local_rank, phase, phase == 'B' ? name : "");
}

static void dp__frame_enter(dp__frame *frame)
{
    frame->outer = dp__thread.frames;
    frame->counted = !frame->together && !dp__thread.courier &&
                     (frame->outer == NULL || frame->outer->ctx != frame->ctx);
    if (frame->counted)
        atomic_fetch_add_explicit(&frame->ctx->inside, 1, memory_order_relaxed);
    frame->fresh = dp__thread.fresh;
    frame->first = dp__sentence_hide();
    dp__thread.frames = frame;
    if (dp__trace_is_on())
        dp__frame_trace(frame, 'B');
}

/* `status` is what the function returned; this returns one of the list, with a sentence. */
static dp_status dp__frame_leave(const dp__frame *frame, dp_status status)
{
    if (dp__trace_is_on())
        dp__frame_trace(frame, 'E');
    dp__thread.frames = frame->outer;
    if (frame->counted)
        atomic_fetch_sub_explicit(&frame->ctx->inside, 1, memory_order_relaxed);
    if (status == DP_OK && dp__thread.text[0] == '\0') /* an error may be on its way past this */
        dp__thread.fresh = frame->fresh;
    status = dp__sentence_after(frame->first, status);
    dp__thread.fresh = dp__thread.fresh || status != DP_OK; /* whatever succeeded since */
    return status;
}

/* The innermost function of this context that this thread is in; NULL: none. `together`: the one
   that runs on all devices at the same time. */
static const dp__frame *dp__frame_of(const dp_ctx *ctx, bool together)
{
    const dp__frame *frame = dp__thread.frames;
    while (frame != NULL && (frame->ctx != ctx || (together && !frame->together)))
        frame = frame->outer;
    return frame;
}

static dp_status dp__busy(const char *fn, const dp_ctx *ctx)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, true);
    if (frame == NULL)
        return dp_error(DP_ERR_STATE,
                        "%s: another thread's dp_run, pass or collective is under way in this "
                        "context",
                        fn);
    return dp_error(DP_ERR_STATE,
                    "%s: %s called it on local rank %d while the other devices run too: it is for "
                    "what runs alone",
                    fn, dp__frame_text(frame, text, sizeof text), frame->local_rank);
}

/* Whether all devices are in use by one call. A hook that the courier calls has not entered: only
   its frame tells. */
static bool dp__is_shared(const dp_ctx *ctx)
{
    return atomic_load_explicit(&ctx->entered, memory_order_relaxed) ||
           dp__frame_of(ctx, true) != NULL;
}

/* For what changes things that all devices use. */
static dp_status dp__check_alone(const char *fn, const dp_ctx *ctx)
{
    return dp__is_shared(ctx) ? dp__busy(fn, ctx) : DP_OK;
}

/* For work on a device: while others run too, a function keeps to its own. */
static dp_status dp__check_own(const char *fn, const dp_ctx *ctx, int local_rank)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, true);
    if (frame == NULL || frame->on_all || frame->local_rank == local_rank)
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "%s: %s runs on local rank %d, and this is the device of local rank %d, which "
                    "others use at the same time",
                    fn, dp__frame_text(frame, text, sizeof text), frame->local_rank, local_rank);
}

static dp_status dp__enter(const char *fn, dp_ctx *ctx)
{
    if (dp__frame_of(ctx, true) != NULL ||
        atomic_exchange_explicit(&ctx->entered, true, memory_order_acquire))
        return dp__busy(fn, ctx);
    return DP_OK;
}

static dp_status dp__exit(const char *fn, dp_ctx *ctx, dp_status status)
{
    atomic_store_explicit(&ctx->entered, false, memory_order_release);
    if (status == DP_OK) /* the job may have failed meanwhile: then the result is void */
        return dp__check_ctx(fn, ctx);
    return dp__leave(fn, ctx, status);
}

/* ==== >>log ====================================================================================
   Records go to the user's function, or to stderr as $DP_DEBUG says.                            */

static const char *const dp__level_names[] = {"", "error", "warn", "info", "trace"};

static dp_level dp__level_of(const char *text)
{
    for (int level = DP_LOG_ERROR; level <= DP_LOG_TRACE; level++)
        if (text != NULL && strcmp(text, dp__level_names[level]) == 0)
            return (dp_level)level;
    return DP_LOG_DEFAULT;
}

DP_API void dp_log_stderr(const dp_log_record *record, void *user)
{
    char line[DP__TEXT_BYTES + 64];
    (void)user;
    if (record == NULL)
        return;
    bool known = record->level >= DP_LOG_ERROR && record->level <= DP_LOG_TRACE;
    snprintf(line, sizeof line, "[dp %d %s] %s\n", record->rank,
             known ? dp__level_names[record->level] : "log",
             record->text != NULL ? record->text : "");
    dp__os_write(line);
}

static bool dp__log_wants(const dp_ctx *ctx, dp_level level)
{
    return ctx->config.log.fn != NULL && level <= ctx->config.log.level;
}

DP_PRINTF(3, 4) static void dp__log(const dp_ctx *ctx, dp_level level, const char *format, ...)
{
    char text[DP__TEXT_BYTES];
    va_list args;
    if (!dp__log_wants(ctx, level))
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int rank = ctx->info.rank_count > 0 ? ctx->info.rank_first : -1;
    dp__frame frame = {.what = "the log function", .ctx = (dp_ctx *)(uintptr_t)ctx};
    dp__frame_enter(&frame);
    ctx->config.log.fn(&(dp_log_record){level, rank, text}, ctx->config.log.user);
    (void)dp__frame_leave(&frame, DP_OK);
}

/* ==== >>host ===================================================================================
   What a backend gets: memory that the context keeps track of (a child of fork can free it without
   asking the backend, and dp_close names what a backend forgot), the log, the workers.          */

static dp_ctx *dp__ctx_of(const dp_host *host)
{
    return (dp_ctx *)(uintptr_t)host; /* the tables see it const; it is a context's head */
}

static void *dp__raw_alloc(const dp_ctx *ctx, size_t bytes, size_t align)
{
    return ctx->config.allocator.alloc(bytes, align, ctx->config.allocator.user);
}

static void dp__raw_free(const dp_ctx *ctx, void *data, size_t bytes)
{
    ctx->config.allocator.free(data, bytes, ctx->config.allocator.user);
}

static void *dp__host_alloc(const dp_host *host, size_t bytes, size_t align)
{
    dp_ctx *ctx = dp__ctx_of(host);
    size_t offset = align > sizeof(dp__tracked) ? align : sizeof(dp__tracked);
    char *whole = bytes <= SIZE_MAX - offset ? dp__raw_alloc(ctx, bytes + offset, offset) : NULL;
    if (whole == NULL)
        return NULL;
    dp__tracked *head = (dp__tracked *)(void *)(whole + offset - sizeof(dp__tracked));
    *head = (dp__tracked){.bytes = bytes + offset, .offset = offset};
    dp__lock_enter(&ctx->lock);
    head->next = ctx->tracked;
    if (ctx->tracked != NULL)
        ctx->tracked->prev = head;
    ctx->tracked = head;
    dp__lock_leave(&ctx->lock);
    return whole + offset;
}

static void dp__tracked_free(dp_ctx *ctx, dp__tracked *head)
{
    if (head->prev != NULL)
        head->prev->next = head->next;
    else
        ctx->tracked = head->next;
    if (head->next != NULL)
        head->next->prev = head->prev;
    dp__raw_free(ctx, (char *)head + sizeof *head - head->offset, head->bytes);
}

static void dp__host_free(const dp_host *host, void *data)
{
    dp_ctx *ctx = dp__ctx_of(host);
    if (data == NULL)
        return;
    dp__lock_enter(&ctx->lock);
    dp__tracked_free(ctx, (dp__tracked *)data - 1);
    dp__lock_leave(&ctx->lock);
}

static void dp__host_log(const dp_host *host, dp_level level, const char *text)
{
    dp__log(dp__ctx_of(host), level, "%s", text);
}

static int dp__host_thread_count(const dp_host *host)
{
    const dp_ctx *ctx = dp__ctx_of(host);
    return ctx->team != NULL ? ctx->team->share_count : 1;
}

static void dp__host_parallel(const dp_host *host, int part_count, void (*fn)(int, void *),
                              void *user)
{
    dp_ctx *ctx = dp__ctx_of(host);
    if (ctx->team == NULL || part_count < 2 || dp__thread.courier || !dp__team_enter(ctx->team)) {
        for (int part = 0; part < part_count; part++)
            fn(part, user);
        return;
    }
    dp__team_share(ctx->team, part_count, fn, user);
    dp__team_exit(ctx->team);
}

static bool dp__host_aborted(const dp_host *host)
{
    return atomic_load_explicit(&dp__ctx_of(host)->failed, memory_order_relaxed) != DP_OK;
}

static dp_host dp__host_make(void)
{
    return (dp_host){.size = sizeof(dp_host),
                     .alloc = dp__host_alloc,
                     .free = dp__host_free,
                     .log = dp__host_log,
                     .parallel = dp__host_parallel,
                     .thread_count = dp__host_thread_count,
                     .aborted = dp__host_aborted};
}

/* ==== >>pool ===================================================================================
   Blocks of the host, of pinned memory and of each device. A block's size is rounded up to its
   class (eight classes per power of two, so at most 1/8 is lost) and stays there: a step that
   repeats itself finds all its blocks in the free lists. Device blocks are reused in the order of
   the compute stream. The context's lock guards the lists. */

static bool dp__mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static bool dp__class_of(size_t bytes, int *out_class, size_t *out_bytes)
{
    if (bytes <= 256) {
        *out_class = 0;
        *out_bytes = 256;
        return true;
    }
    unsigned long long last = bytes - 1;
    int exponent = 63 - __builtin_clzll(last), shift = exponent - 3;
    *out_class = 1 + (exponent - 8) * 8 + (int)((last >> shift) & 7);
    *out_bytes = ((bytes - 1) >> shift << shift) + ((size_t)1 << shift);
    return *out_class < DP__CLASS_COUNT;
}

/* *out is NULL, and stays NULL if a table returns DP_OK but gives no memory. */
static dp_status dp__pool_fetch(dp_ctx *ctx, const dp__pool *pool, size_t bytes, void **out)
{
    if (pool->device == NULL)
        *out = dp__raw_alloc(ctx, bytes, 64);
    else if (pool->pinned)
        DP_TRY(pool->device->dev->ops->host_alloc(pool->device->dev, bytes, out));
    else
        DP_TRY(pool->device->dev->ops->alloc(pool->device->dev, bytes, out));
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
}

static void dp__pool_return(dp_ctx *ctx, const dp__block *block)
{
    const dp__device *device = block->pool->device;
    if (device == NULL)
        dp__raw_free(ctx, block->data, block->bytes);
    else if (block->pool->pinned)
        device->dev->ops->host_free(device->dev, block->data, block->bytes);
    else
        device->dev->ops->free(device->dev, block->data, block->bytes);
}

static bool dp__pool_is_host(const dp__pool *pool)
{
    return pool->device == NULL || pool->pinned || pool->device->info.host_memory;
}

static dp_status dp__block_make(dp_ctx *ctx, dp__pool *pool, int class_, size_t bytes,
                                dp__block **out)
{
    dp__block *block = dp__raw_alloc(ctx, sizeof *block, _Alignof(dp__block));
    if (block == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", sizeof *block);
    *block = (dp__block){.pool = pool, .bytes = bytes, .class_ = class_};
    dp_status status = dp__pool_fetch(ctx, pool, bytes, &block->data);
    if (status != DP_OK) {
        dp__raw_free(ctx, block, sizeof *block);
        return status;
    }
    dp__lock_enter(&ctx->lock);
    block->made_before = ctx->all_blocks;
    ctx->all_blocks = block;
    dp__lock_leave(&ctx->lock);
    *out = block;
    return DP_OK;
}

static dp_status dp__block_take(dp_ctx *ctx, dp__pool *pool, size_t bytes, dp__block **out)
{
    int class_;
    size_t capacity;
    if (!dp__class_of(bytes, &class_, &capacity))
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    dp__lock_enter(&ctx->lock);
    dp__block *block = pool->free[class_];
    if (block != NULL)
        pool->free[class_] = block->next;
    dp__lock_leave(&ctx->lock);
    if (block == NULL)
        return dp__block_make(ctx, pool, class_, capacity, out);
    block->next = NULL;
    *out = block;
    return DP_OK;
}

/* What the host can see is poisoned before it goes back. */
static void dp__blocks_wipe(const dp_ctx *ctx, const dp__block *blocks)
{
    for (const dp__block *block = blocks; block != NULL; block = block->next) {
        if (!dp__pool_is_host(block->pool))
            continue;
        if (ctx->config.poison) {
            dp__unpoison(block->data, block->bytes);
            memset(block->data, 0xDD, block->bytes);
        }
        dp__poison(block->data, block->bytes);
    }
}

static void dp__blocks_give(dp__block *blocks) /* under the context's lock */
{
    while (blocks != NULL) {
        dp__block *block = blocks, **list = &block->pool->free[block->class_];
        blocks = block->next;
        block->next = *list;
        *list = block;
    }
}

/* All blocks of the context, wherever they are. */
static void dp__blocks_free(dp_ctx *ctx, bool ask_devices)
{
    while (ctx->all_blocks != NULL) {
        dp__block *block = ctx->all_blocks;
        ctx->all_blocks = block->made_before;
        if (dp__pool_is_host(block->pool))
            dp__unpoison(block->data, block->bytes);
        if (ask_devices || block->pool->device == NULL)
            dp__pool_return(ctx, block);
        dp__raw_free(ctx, block, sizeof *block);
    }
}

/* ==== >>scopes ===================================================================================
   Small things are cut from chunks, larger ones are blocks; all but the first chunk go back to the
   pools when the scope ends. An ended scope waits in ctx->idle to be reused. Links between
   scopes are under the context's lock, since children may be used by other threads than their
   parent.                                                                                       */

DP__APART static dp_status dp__check_scope(const char *fn, const dp_scope *scope)
{
    if (scope == NULL && dp__thread.scope_status == DP_ERR_NO_MEMORY)
        return dp_error(DP_ERR_NO_MEMORY, "%s: scope is NULL, there was no memory to begin it", fn);
    if (scope == NULL && dp_status_class(dp__thread.scope_status) == DP_CLASS_JOB)
        return dp_error(dp__thread.scope_status,
                        "%s: scope is NULL, the job had failed before it was begun", fn);
    if (scope == NULL)
        return dp_error(DP_ERR_INVALID, "%s: scope is NULL", fn);
    if (scope->magic != DP__SCOPE_LIVE)
        return dp_error(DP_ERR_STATE, "%s: the scope %s", fn,
                        scope->magic == DP__SCOPE_ENDING ? "is ending" : "has ended");
    return dp__check_open(fn, scope->ctx);
}

static dp_status dp__check_scope_of(const char *fn, const dp_scope *scope, const dp_ctx *ctx)
{
    DP_TRY(dp__check_scope(fn, scope));
    if (scope->ctx != ctx)
        return dp_error(DP_ERR_INVALID, "%s: the scope is of another context", fn);
    return DP_OK;
}

static void dp__scope_cut_from(dp_scope *scope, const dp__block *chunk)
{
    scope->cursor = chunk->data;
    scope->limit = scope->cursor + chunk->bytes;
    dp__poison(chunk->data, chunk->bytes);
}

static dp_status dp__scope_chunk(dp_scope *scope, size_t bytes)
{
    dp__block *chunk = NULL;
    DP_TRY(dp__block_take(scope->ctx, &scope->ctx->host_pool, bytes, &chunk));
    if (scope->home == NULL) {
        scope->home = chunk;
    } else {
        chunk->next = scope->blocks;
        scope->blocks = chunk;
    }
    dp__scope_cut_from(scope, chunk);
    return DP_OK;
}

static size_t dp__align_up(size_t bytes, size_t align)
{
    return (bytes + align - 1) & ~(align - 1);
}

static dp_status dp__scope_block(dp_scope *scope, dp__pool *pool, size_t bytes, void **out)
{
    dp__block *block = NULL;
    DP_TRY(dp__block_take(scope->ctx, pool, bytes, &block));
    block->next = scope->blocks;
    scope->blocks = block;
    if (dp__pool_is_host(pool))
        dp__unpoison(block->data, bytes);
    *out = block->data;
    return DP_OK;
}

/* `bytes` is 1 to DP__SMALL_BYTES. Under AddressSanitizer a gap follows each piece. With poison
   each piece has a block of its own, and there are no chunks. */
static void *dp__scope_cut(dp_scope *scope, size_t bytes, size_t align)
{
    uintptr_t at = dp__align_up((uintptr_t)scope->cursor, align);
    char *data = (char *)at;
    if (at + bytes > (uintptr_t)scope->limit) {
        void *block = NULL;
        if (scope->ctx->config.poison)
            return dp__scope_block(scope, &scope->ctx->host_pool, bytes, &block) == DP_OK ? block
                                                                                          : NULL;
        if (dp__scope_chunk(scope, DP__CHUNK_BYTES) != DP_OK)
            return NULL;
        data = scope->cursor; /* chunks are 64-byte aligned */
    }
    scope->cursor = data + bytes;
    bool room = scope->limit - scope->cursor > DP__RED_ZONE_BYTES;
    scope->cursor = room ? scope->cursor + DP__RED_ZONE_BYTES : scope->limit;
    dp__unpoison(data, bytes);
    return data;
}

static void *dp__scope_bytes(dp_scope *scope, size_t bytes, size_t align)
{
    void *data = NULL;
    if (bytes <= DP__SMALL_BYTES)
        return dp__scope_cut(scope, bytes > 0 ? bytes : 1, align);
    return dp__scope_block(scope, &scope->ctx->host_pool, bytes, &data) == DP_OK ? data : NULL;
}

static void dp__scope_link(dp_scope *scope, dp_scope *parent) /* under the context's lock */
{
    dp_scope **list = parent != NULL ? &parent->first_child : &scope->ctx->scopes;
    scope->parent = parent;
    scope->prev = NULL;
    scope->next = *list;
    if (*list != NULL)
        (*list)->prev = scope;
    *list = scope;
}

/* Passes of these kinds that lie in a scope are no longer valid. */
static void dp__passes_end(const dp_scope *scope, unsigned kinds)
{
    for (dp__pass_head *pass = scope->passes; pass != NULL; pass = pass->next)
        if (pass->kind & kinds)
            pass->magic = 0;
}

static void dp__scope_unlink(dp_scope *scope) /* under the context's lock */
{
    dp_scope **list = scope->parent != NULL ? &scope->parent->first_child : &scope->ctx->scopes;
    if (scope->prev != NULL)
        scope->prev->next = scope->next;
    else
        *list = scope->next;
    if (scope->next != NULL)
        scope->next->prev = scope->prev;
    dp_scope **replicas = scope->parent != NULL ? scope->parent->replicas : NULL;
    for (int i = 0; replicas != NULL && i < scope->ctx->info.local_count; i++) {
        if (replicas[i] != scope)
            continue;
        replicas[i] = NULL; /* the next dp_run makes another */
        dp__passes_end(scope->parent, DP__PASS_SPREAD);
        dp__passes_end(scope, DP__PASS_INNER);
    }
}

/* Idle scopes for those of `out` that are NULL, as far as there are any. */
static void dp__scopes_reuse(dp_ctx *ctx, dp_scope *parent, dp_scope **out, size_t count)
{
    dp__lock_enter(&ctx->lock);
    for (size_t i = 0; i < count && ctx->idle != NULL; i++) {
        if (out[i] != NULL)
            continue;
        out[i] = ctx->idle;
        ctx->idle = out[i]->next;
        dp__scope_link(out[i], parent);
        out[i]->magic = DP__SCOPE_LIVE;
    }
    dp__lock_leave(&ctx->lock);
}

static dp_scope *dp__scope_make(dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = dp__raw_alloc(ctx, sizeof *scope, _Alignof(dp_scope));
    if (scope == NULL)
        return NULL;
    *scope = (dp_scope){.magic = DP__SCOPE_LIVE, .ctx = ctx};
    dp__lock_enter(&ctx->lock);
    scope->made_before = ctx->all_scopes;
    ctx->all_scopes = scope;
    dp__scope_link(scope, parent);
    dp__lock_leave(&ctx->lock);
    return scope;
}

static dp_scope *dp__scope_open(dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = NULL;
    dp__scopes_reuse(ctx, parent, &scope, 1);
    return scope != NULL ? scope : dp__scope_make(ctx, parent);
}

static dp_scope *dp__scope_try_open(const char *fn, dp_ctx *ctx, dp_scope *parent)
{
    dp_scope *scope = dp__scope_open(ctx, parent);
    if (scope == NULL)
        dp__thread.scope_status = dp_error(DP_ERR_NO_MEMORY, "%s: no memory for a scope", fn);
    return scope;
}

DP_API dp_scope *dp_scope_begin(dp_ctx *ctx)
{
    dp__thread.scope_status = dp__check_ctx(__func__, ctx);
    if (dp__thread.scope_status != DP_OK)
        return NULL;
    return dp__scope_try_open(__func__, ctx, NULL);
}

DP_API dp_status dp_scope_open(dp_ctx *ctx, dp_scope **out)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_scope *scope = dp__scope_try_open(__func__, ctx, NULL);
    if (scope == NULL)
        return dp__thread.scope_status;
    *out = scope;
    return DP_OK;
}

DP_API dp_scope *dp_scope_child(dp_scope *parent)
{
    dp__thread.scope_status = dp__check_scope(__func__, parent);
    if (dp__thread.scope_status != DP_OK)
        return NULL;
    return dp__scope_try_open(__func__, parent->ctx, parent);
}

/* Under the lock. */
static dp_status dp__reads_mark(dp__reads *reads, const dp_device_ops *ops, dp_stream *stream)
{
    bool pending = atomic_load(&reads->marked) != atomic_load(&reads->waited);
    if (pending && reads->stream != stream) /* the event is about to leave that stream */
        DP_TRY(ops->event_wait(stream, reads->done));
    DP_TRY(ops->event_record(reads->done, stream));
    reads->stream = stream;
    atomic_fetch_add(&reads->marked, 1);
    return DP_OK;
}

/* A copy that was enqueued on `stream` reads host memory. One event stands for all such copies of
   the device's compute stream, another for those of other streams. Replicas that share a device
   have threads of their own. */
static dp_status dp__mark_read(dp_ctx *ctx, dp__device *device, dp_stream *stream)
{
    dp__lock_enter(&ctx->lock);
    dp_status status =
        dp__reads_mark(&device->reads[stream == device->stream ? 0 : 1], device->dev->ops, stream);
    dp__lock_leave(&ctx->lock);
    return status;
}

static dp_status dp__wait_marked(const dp__device *device, dp__reads *reads)
{
    unsigned marked = atomic_load(&reads->marked);
    if (marked == atomic_load(&reads->waited))
        return DP_OK;
    DP_TRY(dp__waited(device->dev->ops->event_sync(reads->done)));
    atomic_store(&reads->waited, marked); /* only now: others take it that the wait is over */
    return DP_OK;
}

static void dp__wait_reads(dp_ctx *ctx, dp__device *device)
{
    bool fresh = dp__thread.fresh; /* an error may be on its way out past this */
    dp__thread.fresh = false;
    dp__thread.culprit = 0;
    dp_status status = dp__wait_marked(device, &device->reads[0]);
    if (status == DP_OK)
        status = dp__wait_marked(device, &device->reads[1]);
    if (status == DP_OK)
        dp__thread.fresh = fresh;
    (void)dp__leave("dp_scope_end", ctx, status);
}

/* A copy may still read host memory of the scope. */
static void dp__scope_wait_reads(const dp_scope *scope)
{
    dp_ctx *ctx = scope->ctx;
    bool empty = scope->home == NULL && scope->blocks == NULL;
    for (int i = 0; !empty && i < ctx->info.local_count && !dp__has_failed(ctx); i++)
        dp__wait_reads(ctx, &ctx->devices[i]);
}

static void dp__scope_run_deferred(dp_scope *scope)
{
    dp__frame frame = {.what = "a deferred function", .ctx = scope->ctx, .scope = scope};
    dp__frame_enter(&frame);
    while (scope->deferred != NULL) {
        dp__deferred *deferred = scope->deferred;
        scope->deferred = deferred->next;
        deferred->fn(deferred->user);
    }
    (void)dp__frame_leave(&frame, DP_OK);
}

/* Ends all that it holds, except the blocks themselves; it has no children any more. When the job
   has failed a device may do what was enqueued at any later time: no memory is touched then. */
static void dp__scope_empty(dp_scope *scope)
{
    scope->magic = DP__SCOPE_ENDING;
    dp__passes_end(scope, DP__PASS_ANY);
    scope->passes = NULL;
    if (scope->deferred != NULL)
        dp__scope_run_deferred(scope);
    dp__scope_wait_reads(scope);
    scope->magic = 0;
    if (dp__has_failed(scope->ctx))
        return;
    dp__blocks_wipe(scope->ctx, scope->blocks);
    dp__blocks_wipe(scope->ctx, scope->home);
    if (scope->home != NULL)
        dp__scope_cut_from(scope, scope->home);
}

/* For reuse; when the job has failed everything is left to dp_close. Under the context's lock. */
static void dp__scopes_give(dp_ctx *ctx, dp_scope *scopes)
{
    while (scopes != NULL && !dp__has_failed(ctx)) {
        dp_scope *scope = scopes;
        scopes = scope->next;
        dp__blocks_give(scope->blocks);
        scope->blocks = NULL;
        scope->replicas = NULL;
        scope->next = ctx->idle;
        ctx->idle = scope;
    }
}

static dp_scope *dp__scope_leaf(dp_scope *scope)
{
    while (scope->first_child != NULL)
        scope = scope->first_child;
    return scope;
}

/* Leaf by leaf, without recursion: chains of children may be long. Scopes inside have no links to
   scopes of other threads, so the lock is taken once for all. The last to end is the first to be
   reused: in a step that repeats itself each scope plays the same part again. NULL is fine. */
static void dp__scope_end(dp_scope *scope)
{
    dp_scope *inside = NULL, **last = &inside;
    if (scope == NULL)
        return;
    for (dp_scope *leaf = dp__scope_leaf(scope); leaf != scope;) {
        dp_scope *parent = leaf->parent;
        dp__scope_empty(leaf);
        dp__scope_unlink(leaf);
        leaf->next = NULL;
        *last = leaf;
        last = &leaf->next;
        leaf = dp__scope_leaf(parent);
    }
    dp__scope_empty(scope);
    dp__lock_enter(&scope->ctx->lock);
    dp__scope_unlink(scope);
    scope->next = NULL;
    dp__scopes_give(scope->ctx, inside);
    dp__scopes_give(scope->ctx, scope);
    dp__lock_leave(&scope->ctx->lock);
}

static dp_status dp__temp_begin(dp_ctx *ctx, dp_scope **out)
{
    *out = dp__scope_open(ctx, NULL);
    return *out != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "no memory for a scope");
}

/* A call that fails half-way may have left work in any stream that it could use: the compute
   streams and `stream` (or NULL). That work is waited for before its memory is reused; a stream
   that cannot be waited for now has none that runs, and refused what was to come. A failure of the
   JOB class waits for nothing, since no memory is reused after it. */
static dp_status dp__drain(dp_ctx *ctx, dp_stream *stream, dp_status status)
{
    char text[DP__TEXT_BYTES];
    dp_status synced = DP_OK;
    bool fresh = dp__thread.fresh;
    if (status == DP_OK || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    memcpy(text, dp__thread.text, sizeof text);
    dp__thread.fresh = false;
    if (stream != NULL)
        synced = dp__sync(stream);
    for (int i = 0; i < ctx->info.local_count && synced == DP_OK; i++)
        synced = dp__sync(ctx->devices[i].stream);
    if (dp_status_class(synced) == DP_CLASS_JOB)
        return synced;
    memcpy(dp__thread.text, text, sizeof text);
    dp__thread.fresh = fresh;
    return status;
}

/* End a temporary scope that work on the compute streams and on `stream` (or NULL) used; NULL is
   fine. Work that cannot be waited for keeps its memory: the scope is left to dp_close. */
DP__APART static dp_status dp__temp_end(dp_scope *temp, dp_stream *stream, dp_status status)
{
    if (temp != NULL)
        status = dp__drain(temp->ctx, stream, status);
    if (dp_status_class(status) != DP_CLASS_JOB)
        dp__scope_end(temp);
    return status;
}

static bool dp__scope_is_inside(const dp_scope *scope, const dp_scope *outer)
{
    while (scope != NULL && scope != outer)
        scope = scope->parent;
    return scope != NULL;
}

/* OK if no function that this thread is in depends on the scope, or on one inside it. */
static dp_status dp__check_scope_idle(const char *fn, const dp_scope *scope)
{
    char text[160];
    for (const dp__frame *frame = dp__thread.frames; frame != NULL; frame = frame->outer)
        if (dp__scope_is_inside(frame->scope, scope))
            return dp_error(DP_ERR_STATE, "%s: the scope is in use by %s, which called this", fn,
                            dp__frame_text(frame, text, sizeof text));
    return DP_OK;
}

DP_API void dp_scope_end(dp_scope *scope)
{
    if (scope == NULL || dp__check_scope(__func__, scope) != DP_OK ||
        dp__check_scope_idle(__func__, scope) != DP_OK)
        return;
    dp__scope_end(scope);
}

DP_API void *dp_scope_alloc(dp_scope *scope, size_t bytes)
{
    if (dp__check_scope(__func__, scope) != DP_OK)
        return NULL;
    void *data = dp__scope_bytes(scope, bytes, 64);
    if (data == NULL)
        dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu bytes", __func__, bytes);
    return data;
}

DP_API dp_status dp_scope_defer(dp_scope *scope, void (*fn)(void *user), void *user)
{
    DP_TRY(dp__check_scope(__func__, scope));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    dp__deferred *deferred = dp__scope_cut(scope, sizeof *deferred, _Alignof(dp__deferred));
    if (deferred == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory", __func__);
    *deferred = (dp__deferred){scope->deferred, fn, user};
    scope->deferred = deferred;
    return DP_OK;
}

DP_API dp_status dp_scope_attach(dp_scope *parent, dp_scope *scope)
{
    DP_TRY(dp__check_scope(__func__, parent));
    DP_TRY(dp__check_scope(__func__, scope));
    if (parent->ctx != scope->ctx)
        return dp_error(DP_ERR_INVALID, "%s: the scopes are of two contexts", __func__);
    DP_TRY(dp__check_scope_idle(__func__, scope));
    dp__lock_enter(&parent->ctx->lock);
    bool inside = dp__scope_is_inside(parent, scope);
    if (!inside) {
        dp__scope_unlink(scope);
        dp__scope_link(scope, parent);
    }
    dp__lock_leave(&parent->ctx->lock);
    if (inside)
        return dp_error(DP_ERR_INVALID, "%s: parent is scope itself, or inside it", __func__);
    return DP_OK;
}

/* ==== >>checks =================================================================================
   The public edge: what a user passes in is checked once, here. `fn` is the public function's
   name, with which every sentence begins.                                                       */

#define DP__DTYPE_NAME(name, text, bytes)  text,
#define DP__DTYPE_BYTES(name, text, bytes) bytes,
static const char *const dp__dtype_names[] = {DP_DTYPE_LIST(DP__DTYPE_NAME)};
static const uint8_t dp__dtype_sizes[] = {DP_DTYPE_LIST(DP__DTYPE_BYTES)};
static const char *const dp__kinds[] = {"none",    "an error", "a bool",   "an int",
                                        "a float", "a string", "a tensor", "a container",
                                        "a list",  "a tuple",  "a dict",   "an opaque pointer"};

DP_API const char *dp_dtype_name(dp_dtype dtype)
{
    return (unsigned)dtype < DP_DTYPE_COUNT ? dp__dtype_names[dtype] : "no dtype";
}

DP_API size_t dp_dtype_bytes(dp_dtype dtype)
{
    return (unsigned)dtype < DP_DTYPE_COUNT ? dp__dtype_sizes[dtype] : 0;
}

static const char *dp__a_kind(uint8_t kind)
{
    return kind <= DP_OPAQUE ? dp__kinds[kind] : "of no kind";
}

static bool dp__is_float(dp_dtype dtype)
{
    return dtype == DP_F32 || dtype == DP_F64 || dtype == DP_F16 || dtype == DP_BF16;
}

static size_t dp__size_of(const dp_tensor *tensor)
{
    return dp__dtype_sizes[tensor->dtype];
}

/* "a list of 3", "an int" */
DP__COLD static const char *dp__value_text(dp_value value, char *text, size_t bytes)
{
    if (value.kind == DP_LIST || value.kind == DP_TUPLE || value.kind == DP_DICT)
        snprintf(text, bytes, "%s of %u", dp__a_kind(value.kind), (unsigned)value.count);
    else
        snprintf(text, bytes, "%s", dp__a_kind(value.kind));
    return text;
}

static unsigned dp__bits(unsigned mask)
{
    unsigned count = 0;
    for (; mask != 0; mask &= mask - 1)
        count++;
    return count;
}

static const char *dp__s(size_t count) /* the s of a plural, or "" */
{
    return count == 1 ? "" : "s";
}

typedef struct dp__names { /* a list of them in a sentence, as long as it fits */
    char text[192];
    size_t used, count, shown;
} dp__names;

DP__COLD static void dp__names_add(dp__names *names, const char *name)
{
    size_t room = sizeof names->text - names->used;
    int wrote =
        snprintf(names->text + names->used, room, "%s'%s'", names->count > 0 ? ", " : "", name);
    bool fits = wrote > 0 && (size_t)wrote < room && names->shown == names->count;
    names->used += fits ? (size_t)wrote : 0;
    names->shown += fits;
    names->count++;
    names->text[names->used] = '\0';
}

DP__COLD static dp__names dp__keys_of(dp_value dict)
{
    dp__names names = {.count = 0};
    for (uint32_t i = 0; dict.kind == DP_DICT && i < dict.count; i++)
        dp__names_add(&names, dict.as.pairs[i].key);
    return names;
}

/* There is nothing of this name: the sentence ends with the names that there are. */
DP_PRINTF(3, 4)
DP__COLD static dp_status dp__no_such(dp_status status, const dp__names *names, const char *format,
                                      ...)
{
    char text[DP__TEXT_BYTES], more[48] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (names->count > names->shown)
        snprintf(more, sizeof more, " and %zu more", names->count - names->shown);
    return dp_error(status, "%s; there %s %s%s", text, names->count == 1 ? "is" : "are",
                    names->count > 0 ? names->text : "none", more);
}

static dp_status dp__check_dtype(const char *fn, dp_dtype dtype)
{
    if ((unsigned)dtype >= DP_DTYPE_COUNT)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a dtype", fn, (int)dtype);
    return DP_OK;
}

/* Bytes of a shape, in which a size of 0 counts as 1; false when they cannot be counted. */
static bool dp__shape_bytes(int ndim, const int64_t *shape, size_t size, size_t *out)
{
    bool fits = true;
    *out = size;
    for (int i = 0; i < ndim; i++)
        fits = fits && (shape[i] == 0 || dp__mul(*out, (size_t)shape[i], out));
    return fits && *out <= INT64_MAX / 2;
}

/* Sizes are not negative and their bytes can be counted; out_count: elements. */
static dp_status dp__check_shape(const char *fn, dp_dtype dtype, int ndim, const int64_t *shape,
                                 int64_t *out_count)
{
    size_t bytes = 0;
    bool empty = false;
    DP_TRY(dp__check_dtype(fn, dtype));
    if (ndim < 0 || ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %d dims, a tensor has 0 to %d", fn, ndim, DP_MAX_DIMS);
    if (ndim > 0)
        DP_TRY(dp__check_pointer(fn, "shape", shape));
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return dp_error(DP_ERR_INVALID, "%s: size %lld of dim %d is negative", fn,
                            (long long)shape[i], i);
        empty |= shape[i] == 0;
    }
    if (!dp__shape_bytes(ndim, shape, dp__dtype_sizes[dtype], &bytes))
        return dp_error(DP_ERR_INVALID, "%s: the shape has more elements than can be counted", fn);
    *out_count = empty ? 0 : (int64_t)(bytes / dp__dtype_sizes[dtype]);
    return DP_OK;
}

/* Bytes from the first element to the end of the last; false when they cannot be counted. */
static bool dp__extent(int ndim, const int64_t *shape, const int64_t *stride, size_t size,
                       size_t *out)
{
    size_t last = 0, step = 0;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == 0) {
            *out = 0;
            return true;
        }
        if (!dp__mul((size_t)(shape[i] - 1), (size_t)stride[i], &step) ||
            __builtin_add_overflow(last, step, &last))
            return false;
    }
    return !__builtin_add_overflow(last, (size_t)1, &last) && dp__mul(last, size, out) &&
           *out <= INT64_MAX / 2;
}

static dp_status dp__check_tensor(const char *fn, const char *what, const dp_tensor *tensor)
{
    size_t bytes = 0, reach = 0;
    DP_TRY(dp__check_pointer(fn, what, tensor));
    if (tensor->dtype >= DP_DTYPE_COUNT || tensor->ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %s is not a tensor (dtype %d, %d dim%s)", fn, what,
                        tensor->dtype, tensor->ndim, dp__s(tensor->ndim));
    for (int i = 0; i < tensor->ndim; i++)
        if ((tensor->shape[i] | tensor->stride[i]) < 0)
            return dp_error(DP_ERR_INVALID, "%s: %s has size %lld and stride %lld in dim %d", fn,
                            what, (long long)tensor->shape[i], (long long)tensor->stride[i], i);
    if (!dp__shape_bytes(tensor->ndim, tensor->shape, dp__size_of(tensor), &bytes))
        return dp_error(DP_ERR_INVALID, "%s: %s has more elements than can be counted", fn, what);
    if (!dp__extent(tensor->ndim, tensor->shape, tensor->stride, dp__size_of(tensor), &reach))
        return dp_error(DP_ERR_INVALID, "%s: the strides of %s reach too far", fn, what);
    if (tensor->data == NULL && reach > 0)
        return dp_error(DP_ERR_INVALID, "%s: %s has %zu element%s and no data", fn, what,
                        bytes / dp__size_of(tensor), dp__s(bytes / dp__size_of(tensor)));
    return DP_OK;
}

static dp_status dp__check_dim(const char *fn, int dim, int ndim, int *out)
{
    if (dim < -ndim || dim >= ndim)
        return dp_error(DP_ERR_INVALID, "%s: dim %d is out of range for %d dim%s", fn, dim, ndim,
                        dp__s((size_t)ndim));
    *out = dim < 0 ? dim + ndim : dim;
    return DP_OK;
}

typedef struct dp__path { /* where a walk is, from the leaf outwards; for sentences */
    const struct dp__path *outer;
    const char *key; /* NULL: index */
    size_t index;
} dp__path;

static const char *dp__path_text(const dp__path *path, char *text, size_t bytes)
{
    const dp__path *trail[DP_MAX_DEPTH + 2];
    size_t depth = 0, used = 0;
    text[0] = '\0';
    for (; path != NULL && depth < DP_MAX_DEPTH + 2; path = path->outer)
        trail[depth++] = path;
    while (depth > 0 && used + 1 < bytes) {
        const dp__path *step = trail[--depth];
        int wrote = step->key != NULL ? snprintf(text + used, bytes - used, "['%s']", step->key)
                                      : snprintf(text + used, bytes - used, "[%zu]", step->index);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    if (used == 0)
        snprintf(text, bytes, "the value");
    return text;
}

/* An error whose sentence begins with a place. */
DP_PRINTF(3, 4)
DP__COLD static dp_status dp__path_error(dp_status status, const dp__path *path, const char *format,
                                         ...)
{
    char where[160], text[DP__TEXT_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dp_error(status, "%s%s", dp__path_text(path, where, sizeof where), text);
}

static bool dp__is_zero_or_one(const void *byte) /* any other cannot be read as a bool */
{
    return *(const unsigned char *)byte <= 1;
}

/* Its kind exists, and what it points to is there. */
static bool dp__is_whole(dp_value value)
{
    switch ((dp_kind)value.kind) {
    case DP_BOOLEAN:
        return dp__is_zero_or_one(&value.as);
    case DP_STRING:
    case DP_TENSOR:
        return value.as.p != NULL;
    case DP_CONTAINER:
        return value.as.p != NULL && dp__is_zero_or_one(&value.as.c->stack) &&
               dp__is_zero_or_one(&value.as.c->cpu_only);
    case DP_LIST:
    case DP_TUPLE:
    case DP_DICT:
        return value.as.p != NULL || value.count == 0;
    case DP_NONE:
    case DP_ERROR:
    case DP_INT:
    case DP_FLOAT:
    case DP_OPAQUE:
        return true;
    }
    return false;
}

/* Tensors, containers, lists, tuples and dicts that were made by a constructor carry a mark: a
   flag, and a number that depends on everything else in the value. So one that was changed, or made
   by hand, is recognised as such, whatever is in `reserved`. */
enum { DP__PLAIN_TREE = 1, DP__LIST_OF_OUTPUTS = 2, DP__FLAGS = 3 };

static dp_value dp__marked(dp_value value, unsigned flag)
{
    uint64_t rest = (uint64_t)value.count << 32 | (uint64_t)value.kind << 24 |
                    (uint64_t)value.depth << 16 | flag << 8;
    uint64_t mix = ((uintptr_t)value.as.p + rest) * 0x9e3779b97f4a7c15u;
    value.status = (int8_t)(mix >> 56);
    value.reserved = (uint8_t)((mix >> 48 & 0x78) | 4 | flag); /* neither 0 nor 0xff */
    return value;
}

static bool dp__is_marked(dp_value value)
{
    if (value.reserved == 0) /* as in leaves */
        return false;
    dp_value again = dp__marked(value, value.reserved & DP__FLAGS);
    return again.reserved == value.reserved && again.status == value.status;
}

static bool dp__has_flag(dp_value value, unsigned flag)
{
    return (value.reserved & DP__FLAGS) == flag && dp__is_marked(value);
}

/* What is wrong with a value itself, apart from what is in it. `path` leads to it from `what`. */
DP__COLD static dp_status dp__value_error(const char *fn, const char *what, dp_value value,
                                          const dp__path *path)
{
    char where[160], name[224];
    dp_status status = (dp_status)value.status;
    snprintf(name, sizeof name, "%s%s", what,
             path != NULL ? dp__path_text(path, where, sizeof where) : "");
    if (value.kind == DP_TENSOR && value.as.t != NULL && value.depth <= DP_MAX_DEPTH)
        return dp__check_tensor(fn, name, value.as.t);
    if (value.kind != DP_ERROR)
        return dp_error(DP_ERR_INVALID, "%s: %s is not a value (kind %d, depth %d)", fn, name,
                        value.kind, value.depth);
    if (dp_status_class(status) != DP_CLASS_CALL && status != DP_ERR_NO_MEMORY)
        status = DP_ERR_INVALID;
    return dp_error(status, "%s: %s: %s", fn, name,
                    value.as.s != NULL ? value.as.s : "an error value");
}

static dp_status dp__check_inside(const char *fn, const char *what, dp_value value,
                                  const dp__path *path);

static dp_status dp__check_place(const char *fn, const char *what, dp_value value,
                                 const dp__path *path)
{
    bool good = value.kind != DP_ERROR && dp__is_whole(value) && value.depth <= DP_MAX_DEPTH;
    if (!good || (value.kind == DP_TENSOR && dp__check_tensor(fn, what, value.as.t) != DP_OK))
        return dp__value_error(fn, what, value, path);
    return dp__check_inside(fn, what, value, path);
}

/* The public edge of every function that takes a value. What a constructor made was checked then;
   what was made by hand is checked now, down to its leaves. Behind the edge values are sound. */
static dp_status dp__check_value(const char *fn, const char *what, dp_value value)
{
    return dp__is_marked(value) ? DP_OK : dp__check_place(fn, what, value, NULL);
}

static bool dp__same_device(dp_device a, dp_device b)
{
    return a.backend == b.backend && a.index == b.index;
}

/* The device that a tensor names: the host, or a local one. */
DP__APART static dp__device *dp__device_of(dp_ctx *ctx, dp_device id)
{
    if (dp__same_device(id, ctx->host_device.id))
        return &ctx->host_device;
    if (id.index < 0 || id.index >= ctx->info.local_count)
        return NULL;
    return id.backend == ctx->devices[0].id.backend ? &ctx->devices[id.index] : NULL;
}

DP__APART static dp_status dp__check_device(const char *fn, dp_ctx *ctx, dp_device id,
                                            dp__device **out)
{
    *out = dp__device_of(ctx, id);
    if (*out == NULL)
        return dp_error(DP_ERR_INVALID, "%s: {%d, %d} is not a device of this context", fn,
                        (int)id.backend, (int)id.index);
    return *out == &ctx->host_device ? DP_OK : dp__check_own(fn, ctx, (int)id.index);
}

static bool dp__is_local_rank(const dp_ctx *ctx, int local_rank)
{
    return local_rank >= 0 && local_rank < ctx->info.local_count;
}

DP__APART static dp_status dp__check_rank(const char *fn, const dp_ctx *ctx, const char *what,
                                          int local_rank)
{
    if (!dp__is_local_rank(ctx, local_rank))
        return dp_error(DP_ERR_INVALID, "%s: %s is %d, the context has %d device%s", fn, what,
                        local_rank, ctx->info.local_count, dp__s((size_t)ctx->info.local_count));
    return DP_OK;
}

/* Asks tables that can tell. NULL is for the caller to check. */
static dp_status dp__check_owned(const char *fn, const char *what, const dp__device *device,
                                 const void *data)
{
    const dp_device_ops *ops = device->dev->ops;
    if (data == NULL || !DP_HAS(dp_device_ops, ops, owns) || ops->owns(device->dev, data))
        return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "%s: %s of local rank %d is %p, which is not memory of that device", fn, what,
                    device->local_rank, data);
}

/* ==== >>views ====================================================================================
   Views: arithmetic on shapes and strides. Nothing here touches data.                           */

static void dp__row_major(dp_tensor *tensor)
{
    int64_t step = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        tensor->stride[i] = step;
        step *= tensor->shape[i] > 0 ? tensor->shape[i] : 1;
    }
}

DP__APART static dp_tensor dp__tensor_like(void *data, dp_device device, dp_dtype dtype, int ndim,
                                           const int64_t *shape)
{
    dp_tensor tensor = {
        .data = data, .device = device, .dtype = (uint8_t)dtype, .ndim = (uint8_t)ndim};
    for (int i = 0; i < ndim; i++)
        tensor.shape[i] = shape[i];
    dp__row_major(&tensor);
    return tensor;
}

DP__APART static int64_t dp__count(const dp_tensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

static size_t dp__bytes(const dp_tensor *tensor)
{
    return (size_t)dp__count(tensor) * dp__size_of(tensor);
}

static size_t dp__span(const dp_tensor *tensor)
{
    size_t bytes = 0;
    return dp__extent(tensor->ndim, tensor->shape, tensor->stride, dp__size_of(tensor), &bytes)
               ? bytes
               : 0;
}

DP_API int64_t dp_tensor_count(const dp_tensor *tensor)
{
    return dp__check_tensor(__func__, "tensor", tensor) == DP_OK ? dp__count(tensor) : -1;
}

/* Whether walking the dims in this order meets the elements one after another. */
DP__APART static bool dp__is_dense_in(const dp_tensor *tensor, const int *order)
{
    int64_t step = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int dim = order[i];
        if (tensor->shape[dim] == 0)
            return true;
        if (tensor->shape[dim] != 1 && tensor->stride[dim] != step)
            return false;
        step *= tensor->shape[dim];
    }
    return true;
}

static const int dp__order_rows[DP_MAX_DIMS] = {0, 1, 2, 3, 4, 5, 6, 7};
static const int dp__order_nhwc[4] = {0, 2, 3, 1}, dp__order_ndhwc[5] = {0, 2, 3, 4, 1};

static bool dp__is_dense(const dp_tensor *tensor)
{
    return dp__is_dense_in(tensor, dp__order_rows);
}

DP_API bool dp_is_contiguous(const dp_tensor *tensor)
{
    return dp__check_tensor(__func__, "tensor", tensor) == DP_OK && dp__is_dense(tensor);
}

static bool dp__is_channels_last(const dp_tensor *tensor)
{
    if (tensor->ndim == 4)
        return !dp__is_dense(tensor) && dp__is_dense_in(tensor, dp__order_nhwc);
    return tensor->ndim == 5 && !dp__is_dense(tensor) && dp__is_dense_in(tensor, dp__order_ndhwc);
}

static void dp__make_channels_last(dp_tensor *tensor)
{
    const int *order = tensor->ndim == 4 ? dp__order_nhwc : dp__order_ndhwc;
    int64_t step = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        tensor->stride[order[i]] = step;
        step *= tensor->shape[order[i]] > 0 ? tensor->shape[order[i]] : 1;
    }
}

static dp_tensor dp__wrap_host(const char *fn, void *data, dp_dtype dtype, int ndim,
                               const int64_t *shape)
{
    int64_t count = 0;
    if (dp__check_shape(fn, dtype, ndim, shape, &count) != DP_OK)
        return (dp_tensor){.dtype = DP_DTYPE_ANY}; /* which every check refuses */
    return dp__tensor_like(data, (dp_device){0, 0}, dtype, ndim, shape);
}

DP_API dp_tensor dp_wrap(void *data, dp_dtype dtype, int ndim, const int64_t *shape)
{
    return dp__wrap_host(__func__, data, dtype, ndim, shape);
}

DP_API dp_tensor dp_wrap_const(const void *data, dp_dtype dtype, int ndim, const int64_t *shape)
{
    dp_tensor tensor = dp__wrap_host(__func__, (void *)(uintptr_t)data, dtype, ndim, shape);
    tensor.read_only = true;
    return tensor;
}

/* `first` and `count` are in range. */
static void dp__narrow_here(dp_tensor *view, int dim, int64_t first, int64_t count)
{
    view->shape[dim] = count;
    if (view->data != NULL && count > 0)
        view->data = (char *)view->data + (size_t)(first * view->stride[dim]) * dp__size_of(view);
}

static dp_tensor dp__narrow(const dp_tensor *tensor, int dim, int64_t first, int64_t count)
{
    dp_tensor view = *tensor;
    dp__narrow_here(&view, dim, first, count);
    return view;
}

DP_API dp_status dp_narrow(const dp_tensor *tensor, int dim, int64_t first, int64_t count,
                           dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim, tensor->ndim, &dim));
    if (first < 0 || count < 0 || first > tensor->shape[dim] || count > tensor->shape[dim] - first)
        return dp_error(DP_ERR_INVALID, "%s: %lld elements from %lld on, dim %d has %lld", __func__,
                        (long long)count, (long long)first, dim, (long long)tensor->shape[dim]);
    *out = dp__narrow(tensor, dim, first, count);
    return DP_OK;
}

DP_API dp_status dp_select(const dp_tensor *tensor, int dim, int64_t index, dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim, tensor->ndim, &dim));
    if (index < 0 || index >= tensor->shape[dim])
        return dp_error(DP_ERR_INVALID, "%s: index %lld, dim %d has %lld", __func__,
                        (long long)index, dim, (long long)tensor->shape[dim]);
    dp_tensor view = dp__narrow(tensor, dim, index, 1);
    view.ndim--;
    for (int i = dim; i < view.ndim; i++) {
        view.shape[i] = view.shape[i + 1];
        view.stride[i] = view.stride[i + 1];
    }
    view.shape[view.ndim] = view.stride[view.ndim] = 0;
    *out = view;
    return DP_OK;
}

DP_API dp_status dp_transpose(const dp_tensor *tensor, int dim_a, int dim_b, dp_tensor *out)
{
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_dim(__func__, dim_a, tensor->ndim, &dim_a));
    DP_TRY(dp__check_dim(__func__, dim_b, tensor->ndim, &dim_b));
    dp_tensor view = *tensor;
    view.shape[dim_a] = tensor->shape[dim_b];
    view.shape[dim_b] = tensor->shape[dim_a];
    view.stride[dim_a] = tensor->stride[dim_b];
    view.stride[dim_b] = tensor->stride[dim_a];
    *out = view;
    return DP_OK;
}

/* Fill in a size of -1, and check that the new shape has as many elements. */
static dp_status dp__infer_shape(const char *fn, const dp_tensor *tensor, int ndim,
                                 const int64_t *shape, int64_t *out_shape)
{
    int64_t known = 0, count = dp__count(tensor);
    int open = -1;
    if (ndim < 0 || ndim > DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "%s: %d dims, a tensor has 0 to %d", fn, ndim, DP_MAX_DIMS);
    if (ndim > 0)
        DP_TRY(dp__check_pointer(fn, "shape", shape));
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && open >= 0)
            return dp_error(DP_ERR_INVALID, "%s: dims %d and %d are both -1", fn, open, i);
        out_shape[i] = shape[i] == -1 ? 1 : shape[i];
        open = shape[i] == -1 ? i : open;
    }
    DP_TRY(dp__check_shape(fn, (dp_dtype)tensor->dtype, ndim, out_shape, &known));
    if (open >= 0 && known > 0 && count % known == 0)
        out_shape[open] = count / known;
    else if (open >= 0 || known != count)
        return dp_error(DP_ERR_INVALID, "%s: %lld element%s cannot fill the new shape", fn,
                        (long long)count, dp__s((size_t)count));
    return DP_OK;
}

/* Match runs of old dims with runs of new ones of as many elements; an old run can be cut anew only
   if it lies in memory as one dim. The tensor is not empty, and the view has as many elements. */
static bool dp__restride(const dp_tensor *tensor, dp_tensor *view)
{
    int64_t shape[DP_MAX_DIMS], stride[DP_MAX_DIMS];
    int old_count = 0, old = 0, new = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 1)
            continue;
        shape[old_count] = tensor->shape[i];
        stride[old_count++] = tensor->stride[i];
    }
    while (old < old_count) {
        int64_t have = shape[old++], want = view->shape[new];
        int first = new ++;
        while (have != want) {
            if (want < have) {
                want *= view->shape[new ++];
                continue;
            }
            if (stride[old - 1] != stride[old] * shape[old])
                return false;
            have *= shape[old++];
        }
        view->stride[new - 1] = stride[old - 1];
        for (int i = new - 1; i > first; i--)
            view->stride[i - 1] = view->stride[i] * view->shape[i];
    }
    for (; new < view->ndim; new ++)
        view->stride[new] = 1;
    return true;
}

DP_API dp_status dp_reshape(const dp_tensor *tensor, int ndim, const int64_t *shape, dp_tensor *out)
{
    int64_t sizes[DP_MAX_DIMS] = {0};
    DP_TRY(dp__check_tensor(__func__, "tensor", tensor));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__infer_shape(__func__, tensor, ndim, shape, sizes));
    dp_tensor view =
        dp__tensor_like(tensor->data, tensor->device, (dp_dtype)tensor->dtype, ndim, sizes);
    view.read_only = tensor->read_only;
    if (dp__count(tensor) > 0 && !dp__is_dense(tensor) && !dp__restride(tensor, &view))
        return dp_error(DP_ERR_INVALID,
                        "%s: the strides cannot say the new shape, it takes "
                        "dp_contiguous first",
                        __func__);
    *out = view;
    return DP_OK;
}

static dp_status dp__tensor_make(dp_scope *scope, const dp__device *device, dp_dtype dtype,
                                 int ndim, const int64_t *shape, dp_tensor *out)
{
    dp_tensor tensor = dp__tensor_like(NULL, device->id, dtype, ndim, shape);
    size_t bytes = dp__bytes(&tensor);
    dp__pool *pool = (dp__pool *)(uintptr_t)&device->pool;
    if (device->local_rank < 0)
        pool = &scope->ctx->pinned_pool;
    if (bytes <= DP__SMALL_BYTES && dp__pool_is_host(pool) && !pool->pinned) {
        tensor.data = dp__scope_cut(scope, bytes > 0 ? bytes : 1, 64);
        if (tensor.data == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    } else {
        DP_TRY(dp__scope_block(scope, pool, bytes, &tensor.data));
    }
    *out = tensor;
    return DP_OK;
}

DP_API dp_status dp_tensor_new(dp_scope *scope, dp_device device, dp_dtype dtype, int ndim,
                               const int64_t *shape, dp_tensor *out)
{
    int64_t count = 0;
    dp__device *owner = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_shape(__func__, dtype, ndim, shape, &count));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_device(__func__, scope->ctx, device, &owner));
    return dp__leave(__func__, scope->ctx, dp__tensor_make(scope, owner, dtype, ndim, shape, out));
}

/* ==== >>copy ===================================================================================
   From any strides on any device to any strides on any other. Devices that the host reaches copy
   with their kernel; the rest with the table's copies, in runs of bytes that lie together on both
   sides, or packed through the host. Work is ordered on the writing device's stream. */

static bool dp__is_host(const dp__device *device)
{
    return device->info.host_memory;
}

/* Whether work on one may use the memory of the other directly, in the order of streams. */
static bool dp__reaches(const dp__device *a, const dp__device *b)
{
    bool together = a->info.memory != 0 && a->info.memory == b->info.memory;
    return a == b || (dp__is_host(a) && dp__is_host(b)) || (together && a->dev->ops == b->dev->ops);
}

/* The host's own stand-in when a device has no kernel of this kind. */
static dp_status dp__kernel_on_host(dp_ctx *ctx, const dp_kernel_args *args)
{
    const dp__device *host = &ctx->host_device;
    return host->dev->ops->kernel(host->stream, args);
}

static bool dp__is_update(const dp_kernel_args *args)
{
    return args->kernel == DP_KERNEL_SGD || args->kernel == DP_KERNEL_ADAMW;
}

static bool dp__makes_sums(const dp_kernel_args *args)
{
    return args->kernel == DP_KERNEL_STATS || args->kernel == DP_KERNEL_TOTAL ||
           args->kernel == DP_KERNEL_CHANNELS;
}

/* Bytes of an element. Sums and gates are f64; the state of an update is f32, f64 for f64. */
static size_t dp__operand_size(const dp_kernel_args *args, bool input, size_t place)
{
    if (input ? dp__is_update(args) && place > 0 : dp__makes_sums(args))
        return sizeof(double);
    if (dp__is_update(args) && place > 0)
        return args->dtype == DP_F64 ? sizeof(double) : sizeof(float);
    return dp__dtype_sizes[input && args->kernel == DP_KERNEL_CAST ? args->in_dtype : args->dtype];
}

static size_t dp__operand_bytes(const dp_kernel_args *args, bool input, size_t place)
{
    const int64_t *shape = input && args->kernel == DP_KERNEL_PAD ? args->in_shape : args->shape;
    const int64_t *stride = input ? args->in_stride : args->out_stride;
    size_t size = dp__operand_size(args, input, place), bytes = 0;
    if (!input && dp__makes_sums(args))
        return args->kernel == DP_KERNEL_STATS      ? 2 * size
               : args->kernel == DP_KERNEL_CHANNELS ? 2 * (size_t)args->shape[1] * size
                                                    : size;
    if (input && dp__is_update(args) && place > 0)
        return 2 * size;
    if (args->kernel != DP_KERNEL_COPY && !(input && args->kernel == DP_KERNEL_PAD))
        return args->count * size;
    return dp__extent(args->ndim, shape, stride, size, &bytes) ? bytes : 0;
}

/* Every operand begins at a multiple of its element's size. */
static bool dp__operands_aligned(const dp_kernel_args *args)
{
    uintptr_t off = 0;
    for (size_t i = 0; i < args->in_count; i++)
        off |= (uintptr_t)args->in[i] % dp__operand_size(args, true, i);
    for (size_t i = 0; i < args->out_count; i++)
        off |= (uintptr_t)args->out[i] % dp__operand_size(args, false, i);
    return off == 0;
}

/* Bring the operands to the host, compute there, bring the results back. Outputs come along too,
   since a strided one has gaps. Everything is done when this returns. */
static dp_status dp__kernel_bounced(dp_ctx *ctx, dp_scope *temp, const dp__device *device,
                                    dp_stream *stream, const dp_kernel_args *args)
{
    const dp_device_ops *ops = device->dev->ops;
    dp_kernel_args local = *args;
    void **ins = dp__scope_bytes(temp, args->in_count * sizeof *ins, 64);
    void **outs = dp__scope_bytes(temp, args->out_count * sizeof *outs, 64);
    if (ins == NULL || outs == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to compute on the host");
    for (size_t i = 0; i < args->in_count; i++) {
        size_t bytes = dp__operand_bytes(args, true, i);
        DP_TRY(dp__scope_block(temp, &ctx->pinned_pool, bytes, &ins[i]));
        DP_TRY(ops->copy_out(stream, ins[i], args->in[i], bytes));
    }
    for (size_t i = 0; i < args->out_count; i++) {
        size_t bytes = dp__operand_bytes(args, false, i);
        DP_TRY(dp__scope_block(temp, &ctx->pinned_pool, bytes, &outs[i]));
        DP_TRY(ops->copy_out(stream, outs[i], args->out[i], bytes));
    }
    DP_TRY(dp__sync(stream));
    local.in = (const void *const *)ins;
    local.out = outs;
    DP_TRY(dp__kernel_on_host(ctx, &local));
    for (size_t i = 0; i < args->out_count; i++)
        DP_TRY(ops->copy_in(stream, args->out[i], outs[i], dp__operand_bytes(args, false, i)));
    return dp__sync(stream);
}

/* One kernel on a device, by the device if it can. A GPU faults where an operand is not aligned to
   its element: only the host's own kernels are given operands like that. */
static dp_status dp__kernel(dp_ctx *ctx, const dp__device *device, dp_stream *stream,
                            const dp_kernel_args *args)
{
    const dp_device_ops *ops = device->dev->ops;
    dp_status status = DP_ERR_UNSUPPORTED;
    if (args->count == 0)
        return DP_OK;
    if (args->in_count > DP__OPERANDS_MAX)
        return dp_error(DP_ERR_UNSUPPORTED, "%zu parts to add up, more than %d", args->in_count,
                        DP__OPERANDS_MAX);
    if (DP_HAS(dp_device_ops, ops, kernel) && dp__operands_aligned(args))
        status = ops->kernel(stream, args);
    if (status != DP_ERR_UNSUPPORTED)
        return status;
    if (dp__is_host(device)) /* its streams have nothing to do */
        return dp__kernel_on_host(ctx, args);
    dp_scope *temp = NULL;
    DP_TRY(dp__temp_begin(ctx, &temp));
    return dp__temp_end(temp, stream, dp__kernel_bounced(ctx, temp, device, stream, args));
}

typedef enum dp__way { DP__WAY_IN, DP__WAY_OUT, DP__WAY_INSIDE } dp__way;

typedef struct dp__copy { /* one copy by a table, both sides as merged dims, innermost last */
    dp__way way;
    const dp__device *device;
    dp_stream *stream;
    size_t run; /* bytes that lie together on both sides */
    int ndim;
    int64_t shape[DP_MAX_DIMS];
    size_t dst_step[DP_MAX_DIMS], src_step[DP_MAX_DIMS]; /* bytes */
} dp__copy;

/* Drop dims of size 1, and merge neighbours that lie as one dim on both sides. */
static void dp__copy_merge(dp__copy *copy, const dp_tensor *dst, const dp_tensor *src)
{
    size_t size = dp__size_of(dst);
    copy->run = size;
    copy->ndim = 0;
    for (int i = 0; i < dst->ndim; i++) {
        if (dst->shape[i] == 1)
            continue;
        size_t dst_step = (size_t)dst->stride[i] * size, src_step = (size_t)src->stride[i] * size;
        int last = copy->ndim - 1;
        if (last >= 0 && copy->dst_step[last] == dst_step * (size_t)dst->shape[i] &&
            copy->src_step[last] == src_step * (size_t)dst->shape[i]) {
            copy->shape[last] *= dst->shape[i];
        } else {
            last = copy->ndim++;
            copy->shape[last] = dst->shape[i];
        }
        copy->dst_step[last] = dst_step;
        copy->src_step[last] = src_step;
    }
    int last = copy->ndim - 1;
    if (last >= 0 && copy->dst_step[last] == size && copy->src_step[last] == size) {
        copy->run = size * (size_t)copy->shape[last];
        copy->ndim--;
    }
}

static dp_status dp__copy_run(const dp__copy *copy, char *dst, const char *src)
{
    const dp_device_ops *ops = copy->device->dev->ops;
    switch (copy->way) {
    case DP__WAY_IN:
        return ops->copy_in(copy->stream, dst, src, copy->run);
    case DP__WAY_OUT:
        return ops->copy_out(copy->stream, dst, src, copy->run);
    case DP__WAY_INSIDE:
        break;
    }
    return ops->copy(copy->stream, dst, src, copy->run);
}

/* Rows of dims[0 .. ndim-1], like an odometer. */
static dp_status dp__copy_runs(const dp__copy *copy, char *dst, const char *src)
{
    int64_t at[DP_MAX_DIMS] = {0};
    const dp_device_ops *ops = copy->device->dev->ops;
    if (copy->ndim == 1 && copy->way == DP__WAY_INSIDE && copy->src_step[0] >= copy->run &&
        DP_HAS(dp_device_ops, ops, copy_2d))
        return ops->copy_2d(copy->stream, dst, copy->dst_step[0], src, copy->src_step[0], copy->run,
                            (size_t)copy->shape[0]);
    for (;;) {
        int dim = copy->ndim - 1;
        DP_TRY(dp__copy_run(copy, dst, src));
        for (; dim >= 0; dim--) {
            dst += copy->dst_step[dim];
            src += copy->src_step[dim];
            if (++at[dim] < copy->shape[dim])
                break;
            dst -= copy->dst_step[dim] * (size_t)copy->shape[dim];
            src -= copy->src_step[dim] * (size_t)copy->shape[dim];
            at[dim] = 0;
        }
        if (dim < 0)
            return DP_OK;
    }
}

static dp_kernel_args dp__copy_args(const dp_tensor *dst, const dp_tensor *src, void *const *out,
                                    const void *const *in)
{
    return (dp_kernel_args){.kernel = DP_KERNEL_COPY,
                            .dtype = (dp_dtype)dst->dtype,
                            .in_dtype = (dp_dtype)src->dtype,
                            .count = (size_t)dp__count(dst),
                            .out = out,
                            .in = in,
                            .out_count = 1,
                            .in_count = 1,
                            .ndim = dst->ndim,
                            .shape = dst->shape,
                            .out_stride = dst->stride,
                            .in_stride = src->stride};
}

/* Inside one device, or among devices whose memory the host reaches. */
static dp_status dp__copy_inside(dp_ctx *ctx, const dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    dp__copy copy = {.way = DP__WAY_INSIDE, .device = device, .stream = stream};
    dp__copy_merge(&copy, dst, src);
    if (copy.ndim == 0)
        return dp__copy_run(&copy, dst->data, src->data);
    void *out = dst->data;
    const void *in = src->data;
    dp_kernel_args args = dp__copy_args(dst, src, &out, &in);
    bool aligned = dp__operands_aligned(&args);
    if (dp__is_host(device) || (!aligned && copy.run < DP__PACKED_RUN_BYTES))
        return dp__kernel(ctx, device, stream, &args);
    dp_status status = DP_ERR_UNSUPPORTED;
    if (aligned && DP_HAS(dp_device_ops, device->dev->ops, kernel))
        status = device->dev->ops->kernel(stream, &args);
    return status != DP_ERR_UNSUPPORTED ? status : dp__copy_runs(&copy, dst->data, src->data);
}

/* What follows on `stream`, of the same table, comes after what is enqueued on the device's compute
   stream. */
static dp_status dp__order_after(const dp__device *device, dp_stream *stream)
{
    const dp_device_ops *ops = device->dev->ops;
    if (device->stream == stream)
        return DP_OK;
    DP_TRY(ops->event_record(device->done, device->stream));
    return ops->event_wait(stream, device->done);
}

static dp_status dp__copy_across(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src);

/* Like `tensor`, dense, on a device, until the scope ends. */
static dp_status dp__packed_make(dp_scope *temp, const dp__device *device, const dp_tensor *tensor,
                                 dp_tensor *out)
{
    return dp__tensor_make(temp, device, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape, out);
}

/* Between the host and a device with short runs: the device packs and unpacks with its kernel. */
static dp_status dp__copy_packed(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    bool in = way == DP__WAY_IN;
    dp_scope *temp = NULL;
    dp_tensor packed;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__packed_make(temp, device, dst, &packed);
    if (status == DP_OK)
        status = in ? dp__copy_across(ctx, way, device, stream, &packed, src)
                    : dp__copy_inside(ctx, device, stream, &packed, src);
    if (status == DP_OK)
        status = in ? dp__copy_inside(ctx, device, stream, dst, &packed)
                    : dp__copy_across(ctx, way, device, stream, dst, &packed);
    if (status == DP_OK && stream != device->stream)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

static bool dp__packs(const dp__device *device, const dp_tensor *tensor, size_t run)
{
    return run < DP__PACKED_RUN_BYTES && !dp__is_dense(tensor) &&
           DP_HAS(dp_device_ops, device->dev->ops, kernel);
}

/* Between the host and a device. A side of the host's that is not dense is packed, so that a device
   sees as few and as long runs as its own side allows. */
static dp_status dp__copy_across(dp_ctx *ctx, dp__way way, dp__device *device, dp_stream *stream,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    const dp_tensor *host = way == DP__WAY_IN ? src : dst;
    dp__copy copy = {.way = way, .device = device, .stream = stream};
    dp__copy_merge(&copy, dst, src);
    if (copy.ndim > 0 && dp__packs(device, way == DP__WAY_IN ? dst : src, copy.run))
        return dp__copy_packed(ctx, way, device, stream, dst, src);
    if (copy.ndim == 0 || dp__is_dense(host))
        return dp__copy_runs(&copy, dst->data, src->data);
    dp_scope *temp = NULL;
    dp_tensor packed;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_make(temp, &ctx->host_device, (dp_dtype)host->dtype, host->ndim,
                                       host->shape, &packed);
    dp__copy_merge(&copy, way == DP__WAY_IN ? dst : &packed, way == DP__WAY_IN ? &packed : src);
    if (status == DP_OK && way == DP__WAY_IN)
        status = dp__copy_inside(ctx, &ctx->host_device, ctx->host_device.stream, &packed, src);
    if (status == DP_OK)
        status = way == DP__WAY_IN ? dp__copy_runs(&copy, dst->data, packed.data)
                                   : dp__copy_runs(&copy, packed.data, src->data);
    if (status == DP_OK) /* the packed copy ends with `temp`, or is about to be read */
        status = dp__sync(stream);
    if (status == DP_OK && way == DP__WAY_OUT)
        status = dp__copy_inside(ctx, &ctx->host_device, ctx->host_device.stream, dst, &packed);
    return dp__temp_end(temp, stream, status);
}

/* Both dense. Whoever gets src's memory next comes after the copy. */
static dp_status dp__peer_dense(const dp__device *to, dp_stream *stream, const dp__device *from,
                                const dp_tensor *dst, const dp_tensor *src)
{
    const dp_device_ops *ops = to->dev->ops;
    DP_TRY(dp__order_after(from, stream));
    DP_TRY(ops->peer_copy(stream, dst->data, from->dev, src->data, dp__bytes(src)));
    DP_TRY(ops->event_record(to->done, stream));
    return ops->event_wait(from->stream, to->done);
}

/* Packed where it is read, unpacked where it is written. */
static dp_status dp__peer_packed(dp_ctx *ctx, dp__device *to, dp_stream *stream, dp__device *from,
                                 const dp_tensor *dst, const dp_tensor *src)
{
    dp_scope *temp = NULL;
    dp_tensor packed_dst = *dst, packed_src = *src;
    bool packs_dst = !dp__is_dense(dst), packs_src = !dp__is_dense(src);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = DP_OK;
    if (packs_src)
        status = dp__packed_make(temp, from, src, &packed_src);
    if (status == DP_OK && packs_src)
        status = dp__copy_inside(ctx, from, from->stream, &packed_src, src);
    if (status == DP_OK && packs_dst)
        status = dp__packed_make(temp, to, dst, &packed_dst);
    if (status == DP_OK)
        status = dp__peer_dense(to, stream, from, &packed_dst, &packed_src);
    if (status == DP_OK && packs_dst)
        status = dp__copy_inside(ctx, to, stream, dst, &packed_dst);
    if (status == DP_OK && packs_dst && stream != to->stream)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

/* From one device to another: directly if the table can, else through the host. */
static dp_status dp__copy_peer(dp_ctx *ctx, dp__device *to, dp_stream *stream, dp__device *from,
                               const dp_tensor *dst, const dp_tensor *src)
{
    const dp_device_ops *ops = to->dev->ops;
    bool dense = dp__is_dense(dst) && dp__is_dense(src);
    dp_scope *temp = NULL;
    dp_tensor host;
    if (ops == from->dev->ops && DP_HAS(dp_device_ops, ops, peer_copy) &&
        (dense || DP_HAS(dp_device_ops, ops, kernel))) {
        dp_status status = dp__peer_packed(ctx, to, stream, from, dst, src);
        if (status != DP_ERR_UNSUPPORTED)
            return status;
    }
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_make(temp, &ctx->host_device, (dp_dtype)src->dtype, src->ndim,
                                       src->shape, &host);
    if (status == DP_OK)
        status = dp__copy_across(ctx, DP__WAY_OUT, from, from->stream, &host, src);
    if (status == DP_OK)
        status = dp__sync(from->stream);
    if (status == DP_OK)
        status = dp__copy_across(ctx, DP__WAY_IN, to, stream, dst, &host);
    if (status == DP_OK)
        status = dp__sync(stream);
    return dp__temp_end(temp, stream, status);
}

static dp_status dp__copy_on(dp_ctx *ctx, dp_stream *stream, const dp_tensor *dst,
                             const dp_tensor *src)
{
    dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    if (!dp__is_host(to)) /* earlier work there may still use this memory */
        DP_TRY(dp__order_after(to, stream));
    if (dp__is_host(to) && !dp__is_host(from)) {
        DP_TRY(dp__order_after(from, stream));
        DP_TRY(dp__copy_across(ctx, DP__WAY_OUT, from, stream, dst, src));
        return dp__sync(stream);
    }
    if (!dp__is_host(to) && dp__is_host(from)) {
        DP_TRY(dp__copy_across(ctx, DP__WAY_IN, to, stream, dst, src));
        return dp__mark_read(ctx, to, stream);
    }
    if (to == from || dp__is_host(to))
        return dp__copy_inside(ctx, to, stream, dst, src);
    return dp__copy_peer(ctx, to, stream, from, dst, src);
}

/* An event belongs to a device, so a copy on another one's stream cannot be marked there: it goes
   on the compute stream of the device that writes, between two marks. */
static dp_status dp__copy_for(dp_ctx *ctx, dp_stream *stream, const dp_tensor *dst,
                              const dp_tensor *src)
{
    const dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    const dp_device_ops *ops = from->dev->ops;
    if (stream->dev != from->dev || dp__is_host(to) || to->dev == from->dev)
        return dp__copy_on(ctx, stream, dst, src);
    DP_TRY(ops->event_record(from->done, stream));
    DP_TRY(ops->event_wait(to->stream, from->done));
    DP_TRY(dp__copy_on(ctx, to->stream, dst, src));
    return dp__order_after(to, stream);
}

/* Shapes and dtypes are the same. stream NULL = the compute stream of the device that writes. When
   a copy has failed, nothing of it still reads or writes. */
static dp_status dp__copy_tensor(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src,
                                 dp_stream *stream)
{
    const dp__device *to = dp__device_of(ctx, dst->device), *from = dp__device_of(ctx, src->device);
    if (dp__count(dst) == 0)
        return DP_OK;
    if (stream == NULL)
        stream = dp__is_host(to) && !dp__is_host(from) ? from->stream : to->stream;
    return dp__drain(ctx, stream, dp__copy_for(ctx, stream, dst, src));
}

/* ==== >>chains ===================================================================================
   From one device to several others.                                                            */

/* Whether each of `outs` can be copied from the one before: dense, on devices of one table that
   copies among them, each once. */
static bool dp__forms_chain(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs, size_t count)
{
    const dp__device *first = dp__device_of(ctx, src->device);
    const dp_device_ops *ops = first->dev->ops;
    bool fits = !dp__is_host(first) && DP_HAS(dp_device_ops, ops, peer_copy) && dp__is_dense(src);
    for (size_t i = 0; i < count && fits; i++) {
        const dp__device *device = dp__device_of(ctx, outs[i].device);
        fits = device != first && device->dev->ops == ops && dp__is_dense(&outs[i]);
        for (size_t k = 0; k < i && fits; k++)
            fits = device != dp__device_of(ctx, outs[k].device);
    }
    return fits && count > 1 && dp__bytes(src) > DP__CHAIN_PIECE;
}

/* A piece from each to the next; what came to a device before is what it passes on. */
static dp_status dp__chain_piece(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                 size_t count, size_t at, size_t bytes)
{
    const dp_tensor *last = src;
    for (size_t i = 0; i < count; last = &outs[i++]) {
        const dp__device *from = dp__device_of(ctx, last->device);
        const dp__device *to = dp__device_of(ctx, outs[i].device);
        DP_TRY(dp__order_after(from, to->stream));
        DP_TRY(to->dev->ops->peer_copy(to->stream, (char *)outs[i].data + at, from->dev,
                                       (const char *)last->data + at, bytes));
    }
    return DP_OK;
}

static dp_status dp__copy_chain(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                size_t count)
{
    size_t all = dp__bytes(src), piece = all / DP__CHAIN_PIECES / 512 * 512;
    piece = piece > DP__CHAIN_PIECE ? piece : DP__CHAIN_PIECE;
    for (size_t at = 0; at < all; at += piece)
        DP_TRY(dp__chain_piece(ctx, src, outs, count, at, all - at < piece ? all - at : piece));
    for (size_t i = 0; i < count; i++) { /* who was read goes on after its reader */
        const dp__device *from = dp__device_of(ctx, i == 0 ? src->device : outs[i - 1].device);
        DP_TRY(dp__order_after(dp__device_of(ctx, outs[i].device), from->stream));
    }
    return DP_OK;
}

/* From one device to others. As a chain, a piece after another, each link carries the bytes once:
   one device alone would send them count times. Those that are src itself are left alone. */
static dp_status dp__copy_to_all(dp_ctx *ctx, const dp_tensor *src, const dp_tensor *outs,
                                 size_t count)
{
    if (dp__forms_chain(ctx, src, outs, count)) {
        dp_status status = dp__drain(ctx, NULL, dp__copy_chain(ctx, src, outs, count));
        if (status != DP_ERR_UNSUPPORTED)
            return status;
    }
    for (size_t i = 0; i < count; i++)
        if (outs[i].data != src->data)
            DP_TRY(dp__copy_tensor(ctx, &outs[i], src, NULL));
    return DP_OK;
}

/* ==== >>operands =================================================================================
   What an operation reads and writes, checked at the public edge: on the right device, writable, of
   one shape, and apart from each other, which is decided exactly for views of one tensor.       */

static dp_status dp__check_placed(const char *fn, dp_ctx *ctx, const char *what,
                                  const dp_tensor *tensor, dp__device **out)
{
    DP_TRY(dp__check_tensor(fn, what, tensor));
    return dp__check_device(fn, ctx, tensor->device, out);
}

/* Whether each step of a dim leaps over everything that the smaller steps reach. Strides that
   interleave without meeting do not pass: they are too rare to be worth a search. */
static bool dp__is_spread(const dp_tensor *tensor)
{
    int order[DP_MAX_DIMS], count = 0;
    int64_t reach = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        int at = count;
        if (tensor->shape[i] < 2)
            continue;
        for (; at > 0 && tensor->stride[order[at - 1]] > tensor->stride[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
        count++;
    }
    for (int i = 0; i < count; i++) {
        if (tensor->stride[order[i]] <= reach)
            return false;
        reach += tensor->stride[order[i]] * (tensor->shape[order[i]] - 1);
    }
    return true;
}

/* Writable, and no two elements in one place. */
static dp_status dp__check_writable(const char *fn, const char *what, const dp_tensor *tensor)
{
    if (tensor->read_only)
        return dp_error(DP_ERR_INVALID, "%s: %s is read-only", fn, what);
    if (!dp__is_spread(tensor) && dp__count(tensor) > 0)
        return dp_error(DP_ERR_INVALID,
                        "%s: elements of %s share a place: its strides repeat or "
                        "interleave",
                        fn, what);
    return DP_OK;
}

static bool dp__same_shape(const dp_tensor *a, const dp_tensor *b)
{
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

static const char *dp__shape_text(const dp_tensor *tensor, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < tensor->ndim && used < bytes; i++) {
        int wrote = snprintf(text + used, bytes - used, "%s%lld", i > 0 ? "," : "",
                             (long long)tensor->shape[i]);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return text;
}

static dp_status dp__check_same_shape(const char *fn, const char *what_a, const dp_tensor *a,
                                      const char *what_b, const dp_tensor *b)
{
    char text_a[96], text_b[96];
    if (dp__same_shape(a, b))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is (%s), %s is (%s)", fn, what_a,
                    dp__shape_text(a, text_a, sizeof text_a), what_b,
                    dp__shape_text(b, text_b, sizeof text_b));
}

static dp_status dp__check_same_dtype(const char *fn, const char *what_a, const dp_tensor *a,
                                      const char *what_b, const dp_tensor *b)
{
    if (a->dtype == b->dtype)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is %s, %s is %s", fn, what_a, dp__dtype_names[a->dtype],
                    what_b, dp__dtype_names[b->dtype]);
}

static bool dp__ranges_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t from_a = (uintptr_t)a, from_b = (uintptr_t)b;
    return a_bytes > 0 && b_bytes > 0 && from_a < from_b + b_bytes && from_b < from_a + a_bytes;
}

/* Views with the same strides, both spread: whether one has an element that the other has too,
   `delta` elements further on. dims: largest stride first. A step along a dim can be counted in two
   ways: rounded down, or one more and then back. */
static bool dp__boxes_meet(const dp_tensor *a, const dp_tensor *b, const int *dims, int count,
                           int64_t delta)
{
    if (count == 0)
        return delta == 0;
    int dim = dims[count - 1];
    int64_t step = a->stride[dim], down = delta / step - (delta % step < 0);
    for (int64_t at = down; at <= down + 1; at++)
        if (at < a->shape[dim] && -at < b->shape[dim] &&
            dp__boxes_meet(a, b, dims, count - 1, delta - at * step))
            return true;
    return false;
}

static bool dp__same_strides(const dp_tensor *a, const dp_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->stride, b->stride, sizeof a->stride[0] * a->ndim) == 0;
}

/* Exact for views of one tensor; for others by the bytes they span, which may be too strict. */
static bool dp__overlap(const dp_tensor *a, const dp_tensor *b)
{
    int dims[DP_MAX_DIMS], count = 0;
    intptr_t apart = (intptr_t)b->data - (intptr_t)a->data, size = (intptr_t)dp__size_of(a);
    if (!dp__ranges_overlap(a->data, dp__span(a), b->data, dp__span(b)))
        return false;
    if (dp__size_of(a) != dp__size_of(b) || !dp__same_strides(a, b) || !dp__is_spread(a) ||
        !dp__is_spread(b) || apart % size != 0)
        return true;
    for (int i = 0; i < a->ndim; i++) { /* a dim counts if either has more than one step in it */
        int at = count;
        if (a->shape[i] < 2 && b->shape[i] < 2)
            continue;
        for (; at > 0 && a->stride[dims[at - 1]] > a->stride[i]; at--)
            dims[at] = dims[at - 1];
        dims[at] = i;
        count++;
    }
    return dp__boxes_meet(a, b, dims, count, apart / size);
}

/* Exactly the same elements may be read and written; a partial overlap is refused. */
static dp_status dp__check_apart(const char *fn, const dp_tensor *dst, const dp_tensor *src)
{
    bool same = dst->data == src->data && dst->dtype == src->dtype && dp__same_shape(dst, src) &&
                dp__same_strides(dst, src);
    if (!same && dp__overlap(dst, src))
        return dp_error(DP_ERR_INVALID, "%s: what is written overlaps what is read", fn);
    return DP_OK;
}

typedef struct dp__pair { /* what is written and what is read, as the caller calls them */
    const char *dst_name, *src_name;
    const dp_tensor *dst, *src;
    dp__device *to, *from; /* filled in */
} dp__pair;

static dp_status dp__check_copy(const char *fn, dp_ctx *ctx, dp__pair *pair)
{
    DP_TRY(dp__check_placed(fn, ctx, pair->dst_name, pair->dst, &pair->to));
    DP_TRY(dp__check_placed(fn, ctx, pair->src_name, pair->src, &pair->from));
    DP_TRY(dp__check_writable(fn, pair->dst_name, pair->dst));
    DP_TRY(dp__check_same_shape(fn, pair->dst_name, pair->dst, pair->src_name, pair->src));
    return dp__check_apart(fn, pair->dst, pair->src);
}

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct dp__kernel_rule { /* what a kernel takes */
    const char *name;
    size_t out_least, out_most, in_least, in_most;
    unsigned flags;             /* that it knows */
    int number_count;           /* of dp_kernel_args.numbers; all are finite */
    bool floats, doubles;       /* only of these dtypes */
    bool in_place;              /* an output may be an input */
    bool out_shaped, in_shaped; /* by ndim, shape and strides */
} dp__kernel_rule;

static const dp__kernel_rule dp__kernel_rules[] = {
    [DP_KERNEL_COPY] = {"COPY", 1, 1, 1, 1, .out_shaped = true, .in_shaped = true},
    [DP_KERNEL_FILL] = {"FILL", 1, 1, 0, 0, .flags = 0},
    [DP_KERNEL_CAST] = {"CAST", 1, 1, 1, 1, .in_place = true},
    [DP_KERNEL_AXPBY] = {"AXPBY", 1, 1, 1, 2, .floats = true, .in_place = true},
    [DP_KERNEL_REDUCE] = {"REDUCE", 1, INT_MAX, 1, DP__OPERANDS_MAX, .in_place = true},
    [DP_KERNEL_STATS] = {"STATS", 1, 1, 1, 1, .flags = 0},
    [DP_KERNEL_PAD] = {"PAD", 1, 1, 1, 1, .out_shaped = true, .in_shaped = true},
    [DP_KERNEL_TOTAL] = {"TOTAL", 1, 1, 1, 1, .doubles = true},
    [DP_KERNEL_SGD] = {"SGD", 1, 2, 1, 2, DP_KERNEL_NESTEROV | DP_KERNEL_FIRST | DP_KERNEL_MAXIMIZE,
                       4, .floats = true},
    [DP_KERNEL_ADAMW] = {"ADAMW", 3, 3, 1, 2, DP_KERNEL_L2 | DP_KERNEL_MAXIMIZE, 7, .floats = true},
    [DP_KERNEL_CHANNELS] = {"CHANNELS", 1, 1, 1, 1, .floats = true, .in_shaped = true}};

static dp_status dp__check_operands(const char *fn, const dp__kernel_rule *rule, const char *what,
                                    const void *array, size_t count, bool input)
{
    size_t least = input ? rule->in_least : rule->out_least;
    size_t most = input ? rule->in_most : rule->out_most;
    if (count < least || count > most)
        return dp_error(DP_ERR_INVALID, "%s: %s_count of %s is %zu, not %zu to %zu", fn, what,
                        rule->name, count, least, most);
    return count > 0 ? dp__check_pointer(fn, what, array) : DP_OK;
}

static dp_status dp__check_kernel_dtype(const char *fn, const dp__kernel_rule *rule,
                                        const dp_kernel_args *args)
{
    DP_TRY(dp__check_dtype(fn, args->dtype));
    if (args->kernel == DP_KERNEL_CAST)
        DP_TRY(dp__check_dtype(fn, args->in_dtype));
    if ((rule->floats && !dp__is_float(args->dtype)) || (rule->doubles && args->dtype != DP_F64))
        return dp_error(DP_ERR_INVALID, "%s: %s is not for %s", fn, rule->name,
                        dp__dtype_names[args->dtype]);
    if ((args->flags & ~rule->flags) != 0)
        return dp_error(DP_ERR_INVALID, "%s: %s has no flags 0x%x", fn, rule->name,
                        args->flags & ~rule->flags);
    return DP_OK;
}

static dp_status dp__check_kernel_numbers(const char *fn, const dp__kernel_rule *rule,
                                          const dp_kernel_args *args)
{
    double alpha = args->alpha, beta = args->beta;
    bool floats = dp__is_float(args->dtype);
    for (int i = 0; i < rule->number_count; i++)
        if (!isfinite(args->numbers[i]))
            return dp_error(DP_ERR_INVALID, "%s: numbers[%d] of %s is %g", fn, i, rule->name,
                            args->numbers[i]);
    if (args->kernel != DP_KERNEL_REDUCE)
        return DP_OK;
    if ((unsigned)args->op > DP_OP_MAX || args->op == DP_OP_MEAN)
        return dp_error(DP_ERR_INVALID, "%s: op of REDUCE is %d", fn, (int)args->op);
    bool whole = !(alpha < 1) && !(alpha > 1) && !(fabs(beta) < 1) && fabs(beta) < 0x1p63 &&
                 !(floor(beta) < beta);
    if (!isfinite(alpha) || !isfinite(beta) || !(fabs(beta) > 0) || (!floats && !whole))
        return dp_error(DP_ERR_INVALID,
                        "%s: REDUCE of %s times alpha %g, divided by beta %g: beta is not 0, and "
                        "for integers alpha is 1 and beta whole",
                        fn, dp__dtype_names[args->dtype], alpha, beta);
    return DP_OK;
}

/* One operand as a tensor; without strides it is dense. */
static dp_status dp__kernel_view(const char *fn, const char *what, const dp_kernel_args *args,
                                 const void *data, const int64_t *shape, const int64_t *stride,
                                 dp_tensor *out)
{
    int64_t count = 0;
    DP_TRY(dp__check_shape(fn, args->dtype, args->ndim, shape, &count));
    *out =
        dp__tensor_like((void *)(uintptr_t)data, (dp_device){0, 0}, args->dtype, args->ndim, shape);
    if (stride != NULL)
        memcpy(out->stride, stride, (size_t)args->ndim * sizeof *stride);
    return dp__check_tensor(fn, what, out);
}

/* The operands of COPY, PAD and CHANNELS have a shape, of which count is the product. */
static dp_status dp__check_kernel_shapes(const char *fn, const dp__kernel_rule *rule,
                                         const dp_kernel_args *args)
{
    bool pad = args->kernel == DP_KERNEL_PAD, copy = args->kernel == DP_KERNEL_COPY;
    const int64_t *in_shape = pad ? args->in_shape : args->shape;
    dp_tensor in = {0}, out = {0};
    if (!rule->in_shaped)
        return DP_OK;
    if (args->kernel == DP_KERNEL_CHANNELS && args->ndim != 3)
        return dp_error(DP_ERR_INVALID, "%s: ndim of CHANNELS is %d, not 3", fn, args->ndim);
    if (rule->out_shaped && args->ndim > 0)
        DP_TRY(dp__check_pointer(fn, "in_stride", args->in_stride));
    if (copy && args->ndim > 0)
        DP_TRY(dp__check_pointer(fn, "out_stride", args->out_stride));
    DP_TRY(dp__kernel_view(fn, "in[0]", args, args->in[0], in_shape,
                           rule->out_shaped ? args->in_stride : NULL, &in));
    if (rule->out_shaped)
        DP_TRY(dp__kernel_view(fn, "out[0]", args, args->out[0], args->shape,
                               copy ? args->out_stride : NULL, &out));
    int64_t count = dp__count(rule->out_shaped ? &out : &in);
    if ((uint64_t)count != args->count)
        return dp_error(DP_ERR_INVALID, "%s: count is %zu, shape has %lld element%s", fn,
                        args->count, (long long)count, dp__s((size_t)count));
    for (int i = 0; pad && i < args->ndim; i++)
        if (in_shape[i] > args->shape[i])
            return dp_error(DP_ERR_INVALID, "%s: in_shape[%d] is %lld, shape[%d] is %lld", fn, i,
                            (long long)in_shape[i], i, (long long)args->shape[i]);
    if (!copy)
        return DP_OK;
    DP_TRY(dp__check_writable(fn, "out[0]", &out));
    return dp__check_apart(fn, &out, &in);
}

/* No output overlaps another, nor an input, unless it is that very input and the rule allows it. */
static dp_status dp__check_kernel_apart(const char *fn, const dp__kernel_rule *rule,
                                        const dp_kernel_args *args)
{
    for (size_t i = 0; i < args->out_count; i++) {
        size_t bytes = dp__operand_bytes(args, false, i);
        for (size_t k = 0; k < i; k++)
            if (dp__ranges_overlap(args->out[i], bytes, args->out[k],
                                   dp__operand_bytes(args, false, k)))
                return dp_error(DP_ERR_INVALID, "%s: out[%zu] overlaps out[%zu]", fn, i, k);
        for (size_t k = 0; k < args->in_count; k++) {
            size_t in_bytes = dp__operand_bytes(args, true, k);
            bool same = rule->in_place && args->out[i] == args->in[k] && bytes == in_bytes;
            if (!same && dp__ranges_overlap(args->out[i], bytes, args->in[k], in_bytes))
                return dp_error(DP_ERR_INVALID, "%s: out[%zu] overlaps in[%zu]", fn, i, k);
        }
    }
    return DP_OK;
}

/* Checks everything except where the operands lie. */
static dp_status dp__check_kernel(const char *fn, const dp_kernel_args *args)
{
    size_t kinds = sizeof dp__kernel_rules / sizeof dp__kernel_rules[0], bytes = 0;
    if ((size_t)args->kernel >= kinds)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a kernel", fn, (int)args->kernel);
    const dp__kernel_rule *rule = &dp__kernel_rules[args->kernel];
    DP_TRY(dp__check_kernel_dtype(fn, rule, args));
    DP_TRY(dp__check_operands(fn, rule, "out", args->out, args->out_count, false));
    DP_TRY(dp__check_operands(fn, rule, "in", args->in, args->in_count, true));
    DP_TRY(dp__check_kernel_numbers(fn, rule, args));
    if (args->heads != 0)
        return dp_error(DP_ERR_INVALID, "%s: heads is %zu, not 0", fn, args->heads);
    if (!dp__mul(args->count, sizeof(double), &bytes) || bytes > INT64_MAX / 2)
        return dp_error(DP_ERR_INVALID, "%s: count is %zu, more than can be counted", fn,
                        args->count);
    for (size_t i = 0; args->count > 0 && i < args->out_count + args->in_count; i++) {
        bool input = i >= args->out_count;
        size_t place = input ? i - args->out_count : i;
        if ((input ? args->in[place] : args->out[place]) == NULL)
            return dp_error(DP_ERR_INVALID, "%s: %s[%zu] is NULL", fn, input ? "in" : "out", place);
    }
    DP_TRY(dp__check_kernel_shapes(fn, rule, args));
    return args->count == 0 || args->kernel == DP_KERNEL_COPY
               ? DP_OK
               : dp__check_kernel_apart(fn, rule, args);
}

/* ==== >>compute ==================================================================================
   What touches data, at the public edge: copy, fill, cast, axpby, statistics, read.             */

/* A stream of one of the two devices; between host memory and host memory, one of any device that
   the host reaches. */
static bool dp__may_order(const dp_ctx *ctx, const dp_stream *stream, const dp__pair *pair)
{
    if (stream->dev == pair->to->dev || stream->dev == pair->from->dev)
        return true;
    for (int i = 0; i < ctx->info.local_count; i++)
        if (stream->dev == ctx->devices[i].dev)
            return dp__is_host(&ctx->devices[i]) && dp__is_host(pair->to) &&
                   dp__is_host(pair->from);
    return false;
}

DP_API dp_status dp_copy(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src, dp_stream *stream)
{
    dp__pair pair = {.dst_name = "dst", .src_name = "src", .dst = dst, .src = src};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_copy(__func__, ctx, &pair));
    DP_TRY(dp__check_same_dtype(__func__, "dst", dst, "src", src));
    if (stream != NULL && !dp__may_order(ctx, stream, &pair))
        return dp_error(DP_ERR_INVALID, "%s: the stream is of another device than the tensors",
                        __func__);
    return dp__leave(__func__, ctx, dp__copy_tensor(ctx, dst, src, stream));
}

static dp_status dp__contiguous(dp_scope *scope, const dp_tensor *tensor, dp_tensor *out)
{
    dp_ctx *ctx = scope->ctx;
    const dp__device *device = dp__device_of(ctx, tensor->device);
    dp_tensor copy;
    if (dp__is_dense(tensor)) {
        *out = *tensor;
        return DP_OK;
    }
    DP_TRY(dp__tensor_make(scope, device, (dp_dtype)tensor->dtype, tensor->ndim, tensor->shape,
                           &copy));
    DP_TRY(dp__copy_tensor(ctx, &copy, tensor, NULL));
    *out = copy;
    return DP_OK;
}

DP_API dp_status dp_contiguous(dp_scope *scope, const dp_tensor *tensor, dp_tensor *out)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_placed(__func__, scope->ctx, "tensor", tensor, &device));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    return dp__leave(__func__, scope->ctx, dp__contiguous(scope, tensor, out));
}

static dp_status dp__cast_on(dp_ctx *ctx, const dp__device *device, dp_stream *stream, void *dst,
                             dp_dtype dtype, const void *src, dp_dtype src_dtype, size_t count)
{
    dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                           .dtype = dtype,
                           .in_dtype = src_dtype,
                           .count = count,
                           .out = &dst,
                           .in = &src,
                           .out_count = 1,
                           .in_count = 1};
    return dp__kernel(ctx, device, stream, &args);
}

DP__APART static dp_status dp__cast_flat(dp_ctx *ctx, const dp__device *device, void *dst,
                                         dp_dtype dtype, const void *src, dp_dtype src_dtype,
                                         size_t count)
{
    return dp__cast_on(ctx, device, device->stream, dst, dtype, src, src_dtype, count);
}

/* A device that the host does not reach reads a copy in the scope, which stays until it is read. */
static dp_status dp__tensor_from(dp_scope *scope, const dp__device *device, const dp_tensor *src,
                                 dp_tensor *out)
{
    dp_tensor tensor, staged = *src;
    dp_dtype dtype = (dp_dtype)src->dtype;
    DP_TRY(dp__tensor_make(scope, device, dtype, src->ndim, src->shape, &tensor));
    if (!dp__is_host(device)) {
        const dp__device *host = &scope->ctx->host_device;
        DP_TRY(dp__tensor_make(scope, host, dtype, src->ndim, src->shape, &staged));
        DP_TRY(dp__copy_tensor(scope->ctx, &staged, src, NULL));
    }
    DP_TRY(dp__copy_tensor(scope->ctx, &tensor, &staged, NULL));
    *out = tensor;
    return DP_OK;
}

DP_API dp_status dp_tensor_from(dp_scope *scope, dp_device device, const void *host, dp_dtype dtype,
                                int ndim, const int64_t *shape, dp_tensor *out)
{
    int64_t count = 0;
    dp__device *owner = NULL;
    DP_TRY(dp__check_scope(__func__, scope));
    DP_TRY(dp__check_ctx(__func__, scope->ctx));
    DP_TRY(dp__check_shape(__func__, dtype, ndim, shape, &count));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_device(__func__, scope->ctx, device, &owner));
    if (count > 0)
        DP_TRY(dp__check_pointer(__func__, "host", host));
    dp_tensor src = dp_wrap_const(host, dtype, ndim, shape);
    return dp__leave(__func__, scope->ctx, dp__tensor_from(scope, owner, &src, out));
}

/* Elementwise work wants all operands dense; what is not is packed in `temp`. */
typedef struct dp__dense {
    dp_scope *temp;
    dp_tensor out, in[2];
} dp__dense;

static dp_status dp__dense_begin(dp_ctx *ctx, const dp_tensor *out, const dp_tensor *const *in,
                                 int in_count, dp__dense *dense)
{
    const dp__device *device = dp__device_of(ctx, out->device);
    DP_TRY(dp__temp_begin(ctx, &dense->temp));
    dp_status status = DP_OK;
    for (int i = 0; i < in_count && status == DP_OK; i++)
        status = dp__contiguous(dense->temp, in[i], &dense->in[i]);
    dense->out = *out;
    if (status == DP_OK && !dp__is_dense(out))
        status = dp__tensor_make(dense->temp, device, (dp_dtype)out->dtype, out->ndim, out->shape,
                                 &dense->out);
    return status;
}

static dp_status dp__dense_end(dp_ctx *ctx, const dp_tensor *out, dp__dense *dense,
                               dp_status status)
{
    if (status == DP_OK && dense->out.data != out->data)
        status = dp__copy_tensor(ctx, out, &dense->out, NULL);
    return dp__temp_end(dense->temp, NULL, status);
}

static dp_status dp__check_same_device(const char *fn, const char *what, const dp_tensor *a,
                                       const dp_tensor *b)
{
    if (dp__same_device(a->device, b->device))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %s is on {%d, %d}, the others on {%d, %d}", fn, what,
                    (int)a->device.backend, (int)a->device.index, (int)b->device.backend,
                    (int)b->device.index);
}

DP_API dp_status dp_cast(dp_ctx *ctx, const dp_tensor *dst, const dp_tensor *src)
{
    dp__dense dense = {0};
    dp__pair pair = {.dst_name = "dst", .src_name = "src", .dst = dst, .src = src};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_copy(__func__, ctx, &pair));
    DP_TRY(dp__check_same_device(__func__, "src", src, dst));
    if (dp__count(dst) == 0)
        return DP_OK;
    dp_status status = dp__dense_begin(ctx, dst, &src, 1, &dense);
    if (status == DP_OK)
        status = dp__cast_flat(ctx, pair.to, dense.out.data, (dp_dtype)dst->dtype, dense.in[0].data,
                               (dp_dtype)src->dtype, (size_t)dp__count(dst));
    status = dp__dense_end(ctx, dst, &dense, status);
    return dp__leave(__func__, ctx, status);
}

DP_API dp_status dp_axpby(dp_ctx *ctx, double a, const dp_tensor *x, double b, const dp_tensor *y,
                          const dp_tensor *out)
{
    const dp_tensor *operands[2] = {x, y != NULL ? y : x};
    int operand_count = y != NULL ? 2 : 1;
    dp__device *device = NULL;
    dp__dense dense = {0};
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "out", out, &device));
    DP_TRY(dp__check_writable(__func__, "out", out));
    for (int i = 0; i < operand_count; i++) {
        const char *what = i == 0 ? "x" : "y";
        DP_TRY(dp__check_tensor(__func__, what, operands[i]));
        DP_TRY(dp__check_same_device(__func__, what, operands[i], out));
        DP_TRY(dp__check_same_dtype(__func__, what, operands[i], "out", out));
        DP_TRY(dp__check_same_shape(__func__, what, operands[i], "out", out));
        DP_TRY(dp__check_apart(__func__, out, operands[i]));
    }
    if (!dp__is_float((dp_dtype)out->dtype))
        return dp_error(DP_ERR_INVALID, "%s: %s is not a floating dtype", __func__,
                        dp__dtype_names[out->dtype]);
    dp_status status = dp__dense_begin(ctx, out, operands, operand_count, &dense);
    const void *in[2] = {dense.in[0].data, dense.in[1].data};
    dp_kernel_args args = {.kernel = DP_KERNEL_AXPBY,
                           .dtype = (dp_dtype)out->dtype,
                           .in_dtype = (dp_dtype)out->dtype,
                           .count = (size_t)dp__count(out),
                           .out = &dense.out.data,
                           .in = in,
                           .out_count = 1,
                           .in_count = (size_t)operand_count,
                           .alpha = a,
                           .beta = b};
    if (status == DP_OK)
        status = dp__kernel(ctx, device, device->stream, &args);
    status = dp__dense_end(ctx, out, &dense, status);
    return dp__leave(__func__, ctx, status);
}

DP_API dp_status dp_kernel_run(dp_ctx *ctx, int local_rank, const dp_kernel_args *args)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "args", args));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_own(__func__, ctx, local_rank));
    DP_TRY(dp__check_kernel(__func__, args));
    const dp__device *device = &ctx->devices[local_rank];
    for (size_t i = 0; i < args->out_count; i++)
        DP_TRY(dp__check_owned(__func__, "an output", device, args->out[i]));
    for (size_t i = 0; i < args->in_count; i++)
        DP_TRY(dp__check_owned(__func__, "an input", device, args->in[i]));
    return dp__leave(__func__, ctx, dp__kernel(ctx, device, device->stream, args));
}

/* Write the bit pattern of `number` as one element into *out, which is 0; refused when the element
   would be a different number (floats round as usual, but a finite number must stay finite). */
static dp_status dp__number_bits(dp_ctx *ctx, const char *fn, dp_value number, dp_dtype dtype,
                                 uint64_t *out)
{
    double as_f64 = 0, back = 0;
    int64_t as_i64 = 0, back_i64 = 0;
    const dp__device *host = &ctx->host_device;
    bool whole = number.kind == DP_INT || number.kind == DP_BOOLEAN;
    if (!whole && number.kind != DP_FLOAT)
        return dp_error(DP_ERR_INVALID, "%s: number is %s", fn, dp__a_kind(number.kind));
    as_i64 = number.kind == DP_BOOLEAN ? number.as.b : number.as.i;
    as_f64 = number.as.f;
    if (whole) {
        DP_TRY(dp__cast_flat(ctx, host, out, dtype, &as_i64, DP_I64, 1));
        DP_TRY(dp__cast_flat(ctx, host, &back_i64, DP_I64, out, dtype, 1));
        DP_TRY(dp__cast_flat(ctx, host, &back, DP_F64, out, dtype, 1));
        if (dp__is_float(dtype) ? isfinite(back) != 0 : back_i64 == as_i64)
            return DP_OK;
        return dp_error(DP_ERR_INVALID, "%s: %lld does not fit %s", fn, (long long)as_i64,
                        dp__dtype_names[dtype]);
    }
    DP_TRY(dp__cast_flat(ctx, host, out, dtype, &as_f64, DP_F64, 1));
    DP_TRY(dp__cast_flat(ctx, host, &back, DP_F64, out, dtype, 1));
    bool same = !(back < as_f64) && !(back > as_f64) && isfinite(as_f64) &&
                as_f64 < 9223372036854775808.0; /* 2^63, to which INT64_MAX is rounded */
    if (dp__is_float(dtype) ? isfinite(back) || !isfinite(as_f64) : same)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: %g does not fit %s", fn, as_f64, dp__dtype_names[dtype]);
}

/* One element, repeated: a copy from stride 0 when the elements do not lie together. */
static dp_status dp__fill_tensor(dp_ctx *ctx, const dp__device *device, const dp_tensor *dst,
                                 uint64_t bits)
{
    static const int64_t one[DP_MAX_DIMS] = {1, 1, 1, 1, 1, 1, 1, 1};
    dp_tensor element = *dst, everywhere = *dst;
    dp_scope *temp = NULL;
    dp_kernel_args args = {.kernel = DP_KERNEL_FILL,
                           .dtype = (dp_dtype)dst->dtype,
                           .count = (size_t)dp__count(dst),
                           .out = &element.data,
                           .out_count = 1,
                           .fill_bits = bits};
    if (dp__is_dense(dst) || dp__is_channels_last(dst))
        return dp__kernel(ctx, device, device->stream, &args);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status =
        dp__tensor_make(temp, device, (dp_dtype)dst->dtype, dst->ndim, one, &element);
    args.count = 1;
    if (status == DP_OK)
        status = dp__kernel(ctx, device, device->stream, &args);
    everywhere.data = element.data;
    memset(everywhere.stride, 0, sizeof everywhere.stride);
    if (status == DP_OK)
        status = dp__copy_tensor(ctx, dst, &everywhere, NULL);
    return dp__temp_end(temp, NULL, status);
}

DP_API dp_status dp_fill(dp_ctx *ctx, const dp_tensor *dst, dp_value number)
{
    dp__device *device = NULL;
    uint64_t bits = 0;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "dst", dst, &device));
    DP_TRY(dp__check_writable(__func__, "dst", dst));
    DP_TRY(dp__check_value(__func__, "number", number));
    DP_TRY(dp__number_bits(ctx, __func__, number, (dp_dtype)dst->dtype, &bits));
    return dp__leave(__func__, ctx, dp__fill_tensor(ctx, device, dst, bits));
}

/* The two sums in host memory of `temp`: not on the stack, where a device that cannot be waited for
   might write later. */
static dp_status dp__stats(dp_ctx *ctx, dp_scope *temp, const dp__device *device,
                           const dp_tensor *tensor, const double **out)
{
    static const int64_t two = 2;
    dp_tensor dense, result, host;
    DP_TRY(dp__tensor_make(temp, &ctx->host_device, DP_F64, 1, &two, &host));
    *out = host.data;
    DP_TRY(dp__contiguous(temp, tensor, &dense));
    DP_TRY(dp__tensor_make(temp, device, DP_F64, 1, &two, &result));
    const void *in = dense.data;
    dp_kernel_args args = {.kernel = DP_KERNEL_STATS,
                           .dtype = (dp_dtype)tensor->dtype,
                           .in_dtype = (dp_dtype)tensor->dtype,
                           .count = (size_t)dp__count(tensor),
                           .out = &result.data,
                           .in = &in,
                           .out_count = 1,
                           .in_count = 1};
    DP_TRY(dp__kernel(ctx, device, device->stream, &args));
    return dp__copy_tensor(ctx, &host, &result, NULL);
}

DP_API dp_status dp_tensor_stats(dp_ctx *ctx, const dp_tensor *tensor, dp_stats *out)
{
    const double *sums = NULL;
    dp__device *device = NULL;
    dp_scope *temp = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "tensor", tensor, &device));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (dp__count(tensor) == 0) {
        *out = (dp_stats){.all_finite = true};
        return DP_OK;
    }
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__stats(ctx, temp, device, tensor, &sums);
    if (status == DP_OK)
        *out = (dp_stats){.sum_squares = sums[0], .all_finite = !(sums[1] > 0)};
    return dp__leave(__func__, ctx, dp__temp_end(temp, NULL, status));
}

DP_API dp_status dp_read(dp_ctx *ctx, const dp_tensor *src, void *host, size_t bytes)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_placed(__func__, ctx, "src", src, &device));
    if (bytes != dp__bytes(src))
        return dp_error(DP_ERR_INVALID, "%s: the tensor has %zu bytes, not %zu", __func__,
                        dp__bytes(src), bytes);
    if (bytes == 0)
        return DP_OK;
    DP_TRY(dp__check_pointer(__func__, "host", host));
    dp_tensor dst =
        dp__tensor_like(host, (dp_device){0, 0}, (dp_dtype)src->dtype, src->ndim, src->shape);
    DP_TRY(dp__check_apart(__func__, &dst, src));
    return dp__leave(__func__, ctx, dp__copy_tensor(ctx, &dst, src, NULL));
}

static dp_status dp__item(dp_ctx *ctx, const dp__device *device, const dp_tensor *tensor,
                          double *out)
{
    const dp__device *host = &ctx->host_device;
    dp_dtype dtype = (dp_dtype)tensor->dtype;
    dp_scope *temp = NULL;
    dp_tensor copy;
    if (dp__is_host(device))
        return dp__cast_flat(ctx, host, out, DP_F64, tensor->data, dtype, 1);
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__tensor_make(temp, host, dtype, tensor->ndim, tensor->shape, &copy);
    if (status == DP_OK)
        status = dp__copy_tensor(ctx, &copy, tensor, NULL);
    if (status == DP_OK)
        status = dp__cast_flat(ctx, host, out, DP_F64, copy.data, dtype, 1);
    return dp__temp_end(temp, NULL, status);
}

DP_API dp_status dp_item(dp_ctx *ctx, dp_value scalar, double *out)
{
    dp__device *device = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_value(__func__, "scalar", scalar));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (scalar.kind == DP_TENSOR) {
        DP_TRY(dp__check_device(__func__, ctx, scalar.as.t->device, &device));
        if (dp__count(scalar.as.t) != 1)
            return dp_error(DP_ERR_INVALID, "%s: the tensor has %lld elements", __func__,
                            (long long)dp__count(scalar.as.t));
        return dp__leave(__func__, ctx, dp__item(ctx, device, scalar.as.t, out));
    }
    if (scalar.kind != DP_INT && scalar.kind != DP_FLOAT && scalar.kind != DP_BOOLEAN)
        return dp_error(DP_ERR_INVALID, "%s: scalar is %s", __func__, dp__a_kind(scalar.kind));
    *out = scalar.kind == DP_FLOAT ? scalar.as.f
                                   : (double)(scalar.kind == DP_INT ? scalar.as.i : scalar.as.b);
    return DP_OK;
}

/* ==== >>names ====================================================================================
   Where each of many names is, so that looking one up takes no longer among many than among few: an
   index of names, and a finder for keys that are looked up one after another.                    */

enum { DP__FEW_NAMES = 16 }; /* up to this many are compared one by one */

/* For few names only where they are, for many a table with open addressing. The string maps of
   stb_ds will not do: they crash when memory runs out, and all of them write the seed of the next
   one to one variable, even those of two contexts in two threads. */
typedef struct dp__cell {
    uint32_t hash, number; /* of a name, counted from 1; 0: the cell is free */
} dp__cell;

typedef struct dp__index {
    const char *names; /* where the pointer to the first one is */
    size_t stride;     /* from there to the pointer to the next one, in bytes */
    size_t count;      /* of those that have joined */
    dp__cell *cells;   /* NULL: there are few */
    size_t cell_count; /* a power of two */
} dp__index;

/* How many cells an index of this many names needs: at most two thirds of them will be in use. */
static size_t dp__cell_count(size_t name_count)
{
    size_t count = 1;
    while (count < name_count + name_count / 2)
        count *= 2;
    return name_count > DP__FEW_NAMES ? count : 0;
}

/* An index of no names yet. `room` is for dp__cell_count(count) cells; NULL: as for few names. */
static dp__index dp__index_in(void *room, const void *names, size_t stride, size_t count)
{
    dp__index index = {.names = names, .stride = stride, .cell_count = dp__cell_count(count)};
    if (room != NULL && index.cell_count > 0)
        index.cells = memset(room, 0, index.cell_count * sizeof *index.cells);
    return index;
}

/* False: there is no memory. */
static bool dp__index_make(dp_scope *scope, const void *names, size_t stride, size_t count,
                           dp__index *out)
{
    void *room = dp__scope_bytes(scope, dp__cell_count(count) * sizeof(dp__cell), 8);
    if (room != NULL)
        *out = dp__index_in(room, names, stride, count);
    return room != NULL;
}

static const char *dp__index_name(const dp__index *index, size_t number)
{
    const char *name = NULL;
    memcpy(&name, index->names + number * index->stride, sizeof name);
    return name;
}

static bool dp__index_is(const dp__index *index, size_t number, const char *name, size_t length)
{
    const char *own = dp__index_name(index, number);
    return strncmp(own, name, length) == 0 && own[length] == '\0';
}

/* The cell of a name, or the free one where it would be. Names come from anybody's files: where the
   cells lie makes the hash another one in each index, so that names cannot be chosen to meet. */
static dp__cell *dp__index_cell(const dp__index *index, const char *name, size_t length,
                                uint32_t *out_hash)
{
    uint64_t hash = dp__hash(dp__hash_first ^ (uintptr_t)index->cells, name, length);
    *out_hash = (uint32_t)(hash ^ hash >> 32);
    for (size_t at = *out_hash;; at++) {
        dp__cell *cell = &index->cells[at & (index->cell_count - 1)];
        if (cell->number == 0 ||
            (cell->hash == *out_hash && dp__index_is(index, cell->number - 1, name, length)))
            return cell;
    }
}

static bool dp__index_find(const dp__index *index, const char *name, size_t length,
                           size_t *out_number)
{
    uint32_t hash = 0;
    size_t number = 0;
    if (index->cells != NULL) {
        const dp__cell *cell = dp__index_cell(index, name, length, &hash);
        *out_number = cell->number - 1u;
        return cell->number != 0;
    }
    while (number < index->count && !dp__index_is(index, number, name, length))
        number++;
    *out_number = number;
    return number < index->count;
}

/* The next name joins; false: an equal one has joined before. */
static bool dp__index_add(dp__index *index)
{
    uint32_t hash = 0;
    const char *name = dp__index_name(index, index->count);
    for (size_t i = 0; index->cells == NULL && i < index->count; i++)
        if (strcmp(dp__index_name(index, i), name) == 0)
            return false;
    if (index->cells != NULL) {
        dp__cell *cell = dp__index_cell(index, name, strlen(name), &hash);
        if (cell->number != 0)
            return false;
        *cell = (dp__cell){hash, (uint32_t)index->count + 1};
    }
    index->count++;
    return true;
}

static const dp_pair *dp__find(dp_value dict, const char *key)
{
    for (uint32_t i = 0; i < dict.count; i++)
        if (strcmp(dict.as.pairs[i].key, key) == 0)
            return &dict.as.pairs[i];
    return NULL;
}

typedef struct dp__finder { /* looks for one key after another */
    dp_value dict;
    uint32_t next;   /* where the next one is, if they come in the dict's own order */
    dp__index index; /* made when they do not */
} dp__finder;

static dp_status dp__finder_index(dp__finder *finder, dp_scope *scope)
{
    const dp_value dict = finder->dict;
    if (!dp__index_make(scope, dict.as.pairs, sizeof(dp_pair), dict.count, &finder->index))
        return dp_error(DP_ERR_NO_MEMORY, "no memory to look at a dict of %u",
                        (unsigned)dict.count);
    for (uint32_t i = 0; i < dict.count; i++)
        (void)dp__index_add(&finder->index);
    return DP_OK;
}

/* *out is NULL where there is no such key. */
static dp_status dp__finder_find(dp__finder *finder, dp_scope *scope, const char *key,
                                 const dp_pair **out)
{
    const dp_pair *pairs = finder->dict.as.pairs;
    size_t at = finder->next;
    bool here = at < finder->dict.count && strcmp(pairs[at].key, key) == 0;
    if (!here && finder->index.names == NULL)
        DP_TRY(dp__finder_index(finder, scope));
    if (!here)
        here = dp__index_find(&finder->index, key, strlen(key), &at);
    *out = here ? &pairs[at] : NULL;
    if (here)
        finder->next = (uint32_t)at + 1;
    return DP_OK;
}

/* One for each of several values, NULL where there is no memory. */
static dp__finder *dp__finders(dp_scope *scope, const dp_value *dicts, size_t count)
{
    dp__finder *finders = dp__scope_bytes(scope, count * sizeof *finders, _Alignof(dp__finder));
    for (size_t i = 0; finders != NULL && i < count; i++)
        finders[i] = (dp__finder){.dict = dicts[i]};
    return finders;
}

#include "dp_value.h"

#include "dp_ranks.h"

#include "dp_reduce.h"

#include "dp_launch.h"

#include "dp_shm.h"

/* ==== >>resolve ==================================================================================
   What a config means: tables are complete, zero becomes the default, lists are copied.         */

enum { DP__DEVICES_MAX = 4096 };

DP_API double dp_or(double number, double usual)
{
    if (number < 0 && number >= DP_ZERO)
        return 0;
    return number > 0 || number < 0 || isnan(number) ? number : usual;
}

typedef struct dp__method {
    const char *name;
    size_t offset;
} dp__method;

#define DP__DEVICE_METHOD(name) {#name, offsetof(dp_device_ops, name)},
#define DP__COLL_METHOD(name)   {#name, offsetof(dp_coll_ops, name)},
/* clang-format off */
static const dp__method dp__device_methods[] = {
    DP__DEVICE_METHOD(count) DP__DEVICE_METHOD(open) DP__DEVICE_METHOD(close)
    DP__DEVICE_METHOD(info) DP__DEVICE_METHOD(alloc) DP__DEVICE_METHOD(free)
    DP__DEVICE_METHOD(stream_create) DP__DEVICE_METHOD(stream_destroy)
    DP__DEVICE_METHOD(stream_sync) DP__DEVICE_METHOD(event_create)
    DP__DEVICE_METHOD(event_destroy) DP__DEVICE_METHOD(event_record)
    DP__DEVICE_METHOD(event_wait) DP__DEVICE_METHOD(event_sync)
    DP__DEVICE_METHOD(copy_in) DP__DEVICE_METHOD(copy_out) DP__DEVICE_METHOD(copy)};
static const dp__method dp__coll_methods[] = {
    DP__COLL_METHOD(fits) DP__COLL_METHOD(open) DP__COLL_METHOD(close)
    DP__COLL_METHOD(all_reduce) DP__COLL_METHOD(broadcast) DP__COLL_METHOD(all_gather)};
/* clang-format on */

/* Checks that a table is long enough for its required methods, and has them. */
static dp_status dp__check_table(const void *table, size_t size, const char *name,
                                 const dp__method *methods, size_t count)
{
    void (*method)(void) = NULL;
    if (name == NULL)
        return dp_error(DP_ERR_INVALID, "dp_open: a table of functions has no name");
    for (size_t i = 0; i < count; i++) {
        if (size >= methods[i].offset + sizeof method)
            memcpy(&method, (const char *)table + methods[i].offset, sizeof method);
        if (size < methods[i].offset + sizeof method || method == NULL)
            return dp_error(DP_ERR_INVALID, "dp_open: table '%s' (size %zu) has no method '%s'",
                            name, size, methods[i].name);
    }
    return DP_OK;
}

static dp_status dp__check_device_table(const dp_device_ops *ops)
{
    if (ops->size < offsetof(dp_device_ops, count))
        return dp_error(DP_ERR_INVALID, "dp_open: a table of functions has size %zu", ops->size);
    return dp__check_table(ops, ops->size, ops->name, dp__device_methods,
                           sizeof dp__device_methods / sizeof dp__device_methods[0]);
}

static dp_status dp__check_coll_table(const dp_coll_ops *ops)
{
    if (ops->size < offsetof(dp_coll_ops, fits))
        return dp_error(DP_ERR_INVALID, "dp_open: a table of functions has size %zu", ops->size);
    return dp__check_table(ops, ops->size, ops->name, dp__coll_methods,
                           sizeof dp__coll_methods / sizeof dp__coll_methods[0]);
}

/* A copy of a NULL-terminated list, so that the caller's may go. */
static dp_status dp__copy_list(dp_ctx *ctx, const void *const *list, const void *const **out)
{
    size_t count = 0;
    while (list[count] != NULL)
        count++;
    const void **copy = dp__host_alloc(&ctx->host, (count + 1) * sizeof *copy, sizeof *copy);
    if (copy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    memcpy(copy, list, (count + 1) * sizeof *copy);
    *out = copy;
    return DP_OK;
}

static dp_status dp__copy_job(dp_ctx *ctx, const char *text, const char **out)
{
    size_t bytes = text != NULL ? strlen(text) + 1 : 0;
    char *copy = bytes != 0 ? dp__host_alloc(&ctx->host, bytes, 1) : NULL;
    if (bytes != 0 && copy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    if (bytes != 0)
        memcpy(copy, text, bytes);
    *out = copy;
    return DP_OK;
}

static const dp_device_ops *(*dp__backend_cuda)(void); /* dp_cuda.h defines them */
static const dp_coll_ops *(*dp__backend_cuda_coll)(void);
static const dp_coll_ops *(*dp__backend_nccl_coll)(void); /* dp_nccl.h defines it */

static dp_status dp__resolve_tables(dp_ctx *ctx)
{
    bool cuda = dp__backend_cuda != NULL;
    const dp_device_ops *const devices[] = {cuda ? dp__backend_cuda() : dp_cpu(),
                                            cuda ? dp_cpu() : NULL, NULL};
    const dp_coll_ops *colls[] = {dp_cpu_coll(), dp_shm_coll(), NULL, NULL, NULL, NULL};
    int count = 2;
    dp_config *config = &ctx->config;
    if (dp__backend_mpi != NULL)
        colls[count++] = dp__backend_mpi->coll();
    if (dp__backend_nccl_coll != NULL)
        colls[count++] = dp__backend_nccl_coll();
    if (cuda)
        colls[count++] = dp__backend_cuda_coll();
    if (config->backends == NULL)
        config->backends = devices;
    if (config->colls == NULL)
        config->colls = colls;
    for (size_t i = 0; config->backends[i] != NULL; i++)
        DP_TRY(dp__check_device_table(config->backends[i]));
    for (size_t i = 0; config->colls[i] != NULL; i++)
        DP_TRY(dp__check_coll_table(config->colls[i]));
    DP_TRY(dp__copy_list(ctx, (const void *const *)config->backends,
                         (const void *const **)&config->backends));
    return dp__copy_list(ctx, (const void *const *)config->colls,
                         (const void *const **)&config->colls);
}

/* Devices that are there and cannot be used: a job on others would be slow without a word. So who
   has no log hears it too, once a process. */
static void dp__warn_of_unused(const dp_ctx *ctx, const char *unused, const char *serves)
{
    static atomic_bool said;
    char text[DP__TEXT_BYTES];
    bool silent = ctx->config.log.fn == NULL;
    if ((!silent && !dp__log_wants(ctx, DP_LOG_WARN)) || atomic_exchange(&said, true))
        return;
    snprintf(text, sizeof text, "%s serves, since there are devices that cannot be used: %s",
             serves, unused);
    if (silent)
        dp_log_stderr(&(dp_log_record){DP_LOG_WARN, -1, text}, NULL);
    else
        dp__log(ctx, DP_LOG_WARN, "%s", text);
}

/* Tables that have found a device, here or in a process that this one was forked from; by name, as
   tables can be decorated. Under dp__live_lock, which nobody holds while a process forks. */
enum { DP__FOUND_MAX = 16, DP__FOUND_BYTES = 32 };
static struct {
    char name[DP__FOUND_BYTES]; /* "": this place is free, and so are those behind it */
    unsigned fork_count;
} dp__found[DP__FOUND_MAX];

/* Notes that a table has found a device, unless that was noted before; returns at which fork. Where
   the list is full, nothing is known. */
static unsigned dp__found_at(const char *name, bool note)
{
    unsigned at = dp__os_fork_count();
    int place = 0;
    dp__lock_enter(&dp__live_lock);
    while (place < DP__FOUND_MAX && dp__found[place].name[0] != '\0' &&
           strncmp(dp__found[place].name, name, DP__FOUND_BYTES - 1) != 0)
        place++;
    if (place < DP__FOUND_MAX && dp__found[place].name[0] != '\0') {
        at = dp__found[place].fork_count;
    } else if (place < DP__FOUND_MAX && note) {
        snprintf(dp__found[place].name, DP__FOUND_BYTES, "%s", name);
        dp__found[place].fork_count = at;
    }
    dp__lock_leave(&dp__live_lock);
    return at;
}

/* How many devices a table has. One with a driver is not asked where that may not survive. */
static dp_status dp__table_count(const dp_ctx *ctx, const dp_device_ops *ops, int *out)
{
    bool survives = DP_HAS(dp_device_ops, ops, survives_fork);
    if (!survives && dp__found_at(ops->name, false) != dp__os_fork_count())
        return dp_error(DP_ERR_STATE,
                        "used before this process was forked, and a driver does not survive that: "
                        "fork before it is used");
    DP_TRY(ops->count(&ctx->host, out));
    if (!survives && *out > 0)
        (void)dp__found_at(ops->name, true);
    return DP_OK;
}

/* The first table that has a device serves; what the others said is kept for the sentence. */
static dp_status dp__choose_backend(dp_ctx *ctx, int *out_place, int *out_count)
{
    char said[DP__TEXT_BYTES / 2] = "", unused[DP__TEXT_BYTES / 2] = "";
    const dp_device_ops *const *backends = ctx->config.backends;
    for (int place = 0; backends[place] != NULL; place++) {
        int count = 0;
        dp_status status = dp__table_count(ctx, backends[place], &count);
        if (status == DP_OK && count > 0) {
            if (unused[0] != '\0')
                dp__warn_of_unused(ctx, unused, backends[place]->name);
            *out_place = place;
            *out_count = count;
            return DP_OK;
        }
        const char *why = status == DP_OK ? "no device" : dp_last_error();
        if (status != DP_OK && status != DP_ERR_NO_DEVICE && unused[0] == '\0')
            snprintf(unused, sizeof unused, "%.30s: %.220s", backends[place]->name, why);
        size_t used = strlen(said);
        snprintf(said + used, sizeof said - used, "%s%s: %.100s", place > 0 ? "; " : "",
                 backends[place]->name, why);
        dp__log(ctx, DP_LOG_INFO, "%s: %s", backends[place]->name, why);
    }
    return dp_error(DP_ERR_NO_DEVICE, "dp_open: no table has a device (%s)", said);
}

/* Digits up to the first other character; false when there are none, or too many. */
static bool dp__digits(const char **at, int *out)
{
    const char *first = *at;
    *out = 0;
    for (; **at >= '0' && **at <= '9' && *out <= DP__DEVICES_MAX; ++*at)
        *out = *out * 10 + (**at - '0');
    return *at > first && *out <= DP__DEVICES_MAX;
}

/* $DP_DEVICES: "4" is a number of devices, "0,2" are their indices, and "2," is one of them. */
static dp_status dp__env_devices(dp_ctx *ctx)
{
    const char *text = dp__os_env("DP_DEVICES"), *at = text;
    int count = 0;
    if (text == NULL)
        return DP_OK;
    if (dp__digits(&at, &count) && *at == '\0' && count > 0) {
        ctx->config.device_count = count;
        return DP_OK;
    }
    int *list = dp__host_alloc(&ctx->host, (strlen(text) + 1) * sizeof *list, sizeof *list);
    if (list == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    bool good = true;
    for (at = text, count = 0; good && *at != '\0'; at += *at == ',') {
        good = dp__digits(&at, &list[count++]);
        good = good && (*at == ',' || (*at == '\0' && count > 1));
    }
    if (!good)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_DEVICES is '%s', neither a number of devices from 1 to %d "
                        "nor a list of their indices, such as 0,1",
                        text, DP__DEVICES_MAX);
    ctx->config.devices = list;
    ctx->config.device_count = count;
    return DP_OK;
}

/* This process' share of the devices that there are; if there are more processes than devices,
   several have the same one. There can be any number of CPU devices, but more than its cores are of
   no use. */
static int dp__device_share(const dp_ctx *ctx, const dp_device_ops *ops, int available,
                            int *out_first)
{
    int64_t place = ctx->info.machine_process, count = ctx->info.machine_process_count;
    int first = (int)(place * available / count), last = (int)((place + 1) * available / count);
    if (ops == dp_cpu())
        return ctx->config.thread_count < available ? ctx->config.thread_count : available;
    *out_first = first;
    return last > first ? last - first : 1;
}

/* Of devices that nobody has asked for by number, as many as can share `ranks` evenly. */
static int dp__shard_devices(dp_ctx *ctx, int ranks, int count)
{
    int most = ranks;
    while (most > count)
        most /= 2;
    if (most < count && most < ranks)
        dp__log(ctx, DP_LOG_WARN, "%d shards are computed on %d of %d devices", ranks, most, count);
    return most;
}

/* What is in config.devices, each as often as it has ranks. */
static dp_status dp__resolve_ranks(dp_ctx *ctx, int ranks, int first)
{
    dp_config *config = &ctx->config;
    int count = config->device_count;
    if (ranks % count != 0)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: device_count is %d, and this process has %d of %d shards: give "
                        "it a power of two, at most as many",
                        count, ranks, config->shards);
    int *devices = dp__host_alloc(&ctx->host, (size_t)ranks * sizeof *devices, sizeof *devices);
    if (devices == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    for (int i = 0; i < ranks; i++) {
        int device = i / (ranks / count);
        devices[i] = config->devices != NULL ? config->devices[device] : first + device;
    }
    config->devices = devices;
    config->device_count = ranks;
    return DP_OK;
}

static dp_status dp__resolve_devices(dp_ctx *ctx, int place, int available)
{
    dp_config *config = &ctx->config;
    int first = 0, ranks = config->shards / ctx->info.process_count;
    if (config->device_count == 0 && config->devices == NULL)
        DP_TRY(dp__env_devices(ctx));
    if (config->device_count == 0 && config->devices == NULL) {
        config->device_count = dp__device_share(ctx, config->backends[place], available, &first);
        if (ranks > 0)
            config->device_count = dp__shard_devices(ctx, ranks, config->device_count);
    }
    if (config->device_count < 1 || config->device_count > DP__DEVICES_MAX)
        return dp_error(DP_ERR_INVALID, "dp_open: device_count is %d, not 1 to %d%s",
                        config->device_count, DP__DEVICES_MAX,
                        config->devices != NULL ? ", and devices is given" : "");
    return dp__resolve_ranks(ctx, ranks > 0 ? ranks : config->device_count, first);
}

/* Cores that processes with one affinity mask may use, divided among them. */
static int dp__core_share(int cores, dp__share among)
{
    int each = cores / among.count + (among.place < cores % among.count);
    return each > 0 ? each : 1;
}

static dp_status dp__check_shards(const dp_config *config)
{
    int shards = config->shards, processes = config->bootstrap.process_count;
    if (shards < 0 || shards > DP__DEVICES_MAX || (shards & (shards - 1)) != 0)
        return dp_error(DP_ERR_INVALID, "dp_open: shards is %d, not a power of two from 1 to %d",
                        shards, DP__DEVICES_MAX);
    if (shards > 0 && processes > 1 && shards % processes != 0)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: %d shards cannot be dealt out evenly to %d processes", shards,
                        processes);
    return DP_OK;
}

static dp_status dp__resolve_numbers(dp_ctx *ctx, dp__share cores)
{
    dp_config *config = &ctx->config;
    if (config->thread_count < 0 || config->timeout_ms < 0 || config->device_count < 0)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is negative",
                        config->thread_count < 0 ? "thread_count"
                        : config->timeout_ms < 0 ? "timeout_ms"
                                                 : "device_count");
    if (config->log.level < DP_LOG_DEFAULT || config->log.level > DP_LOG_TRACE)
        return dp_error(DP_ERR_INVALID, "dp_open: log.level is %d", (int)config->log.level);
    DP_TRY(dp__check_shards(config));
    if (config->thread_count == 0)
        config->thread_count = dp__core_share(dp__os_core_count(), cores);
    if (config->timeout_ms == 0)
        config->timeout_ms = DP__TIMEOUT_MS;
    config->bootstrap.process_count =
        config->bootstrap.all_gather != NULL ? config->bootstrap.process_count : 1;
    return dp__copy_job(ctx, config->job, &config->job);
}

/* $DP_DEBUG counts if no log was asked for; an unknown word in it is reported. */
static void dp__resolve_log(dp_ctx *ctx)
{
    dp_log *log = &ctx->config.log;
    const char *debug = log->fn == NULL ? dp__os_env("DP_DEBUG") : NULL;
    dp_level level = dp__level_of(debug);
    if (debug != NULL)
        *log = (dp_log){dp_log_stderr, NULL, level != DP_LOG_DEFAULT ? level : DP_LOG_WARN};
    if (log->level == DP_LOG_DEFAULT)
        log->level = DP_LOG_INFO;
    if (debug != NULL && level == DP_LOG_DEFAULT)
        dp__log(ctx, DP_LOG_WARN, "DP_DEBUG is '%s', not error, warn, info or trace", debug);
}

/* ==== >>devices ================================================================================
   A context's devices are an array of stb_ds, in memory of the context. Only macros are used: the
   functions are global, and do not check what realloc returns. The header is read under other names
   and then forgotten, so that a user's own stb_ds can come before it, after it or not at all.    */

#ifndef INCLUDE_STB_DS_H
#define DP__STB_DS_PRIVATE
#pragma push_macro("STBDS_REALLOC")
#pragma push_macro("STBDS_FREE")
#pragma push_macro("STBDS_NO_SHORT_NAMES")
#pragma push_macro("STB_DS_IMPLEMENTATION")
#undef STBDS_REALLOC
#undef STBDS_FREE
#undef STBDS_NO_SHORT_NAMES
#undef STB_DS_IMPLEMENTATION
#define STBDS_NO_SHORT_NAMES
#define stbds_array_header dp__stbds_array_header
#define stbds_string_arena dp__stbds_string_arena
#define stbds_string_block dp__stbds_string_block
#define stbds_stralloc     dp__stbds_stralloc
#define stbds_strreset     dp__stbds_strreset
#define STBDS_SH_NONE      DP__STBDS_SH_NONE
#define STBDS_SH_DEFAULT   DP__STBDS_SH_DEFAULT
#define STBDS_SH_STRDUP    DP__STBDS_SH_STRDUP
#define STBDS_SH_ARENA     DP__STBDS_SH_ARENA
#if __has_include("stb_ds.h")
#include "stb_ds.h"
#else
#include <stb/stb_ds.h>
#endif
#endif

#define stbds_arrgrowf(array, item_bytes, more, count) (array) /* what is reserved is enough */

/* Pools point to their device, so the array must not move: it is reserved once. */
static bool dp__devices_reserve(dp_ctx *ctx, int count)
{
    size_t bytes = (size_t)count * sizeof *ctx->devices;
    stbds_array_header *head = dp__host_alloc(&ctx->host, sizeof *head + bytes, 64);
    if (head == NULL)
        return false;
    *head = (stbds_array_header){.capacity = (size_t)count};
    ctx->devices = (void *)(head + 1);
    return true;
}

static dp__device *dp__devices_add(dp_ctx *ctx)
{
    stbds_arrput(ctx->devices, (dp__device){0});
    return &stbds_arrlast(ctx->devices);
}

static ptrdiff_t dp__devices_count(const dp_ctx *ctx)
{
    return stbds_arrlen(ctx->devices);
}

#undef stbds_arrgrowf
#ifdef DP__STB_DS_PRIVATE
#undef DP__STB_DS_PRIVATE
#undef INCLUDE_STB_DS_H
#undef stbds_array_header
#undef stbds_string_arena
#undef stbds_string_block
#undef stbds_stralloc
#undef stbds_strreset
#undef STBDS_SH_NONE
#undef STBDS_SH_DEFAULT
#undef STBDS_SH_STRDUP
#undef STBDS_SH_ARENA
#pragma pop_macro("STBDS_REALLOC")
#pragma pop_macro("STBDS_FREE")
#pragma pop_macro("STBDS_NO_SHORT_NAMES")
#pragma pop_macro("STB_DS_IMPLEMENTATION")
#endif

/* ==== >>open =====================================================================================
   From a config to a context. With other processes every step is agreed upon.                   */

/* `backend` 0 is the host. */
static dp_status dp__device_open(dp_ctx *ctx, const dp_device_ops *ops, dp__device *device,
                                 dp_device id, int index)
{
    *device = (dp__device){.id = id, .local_rank = id.backend != 0 ? id.index : -1};
    dp_status status = ops->open(&ctx->host, index, &device->dev);
    if (status != DP_OK)
        device->dev = NULL; /* whatever the table has left there */
    DP_TRY(status);
    if (device->dev == NULL || device->dev->ops == NULL)
        return dp_error(DP_ERR_INTERNAL, "dp_open: '%s' opened a device without ops", ops->name);
    ops = device->dev->ops;
    device->pool.device = device;
    DP_TRY(ops->info(device->dev, &device->info));
    DP_TRY(ops->stream_create(device->dev, 0, &device->own_stream));
    device->stream = device->own_stream;
    DP_TRY(ops->event_create(device->dev, &device->done));
    DP_TRY(ops->event_create(device->dev, &device->reads[0].done));
    return ops->event_create(device->dev, &device->reads[1].done);
}

static bool dp__device_is_open(const dp__device *device)
{
    return device->dev != NULL && device->dev->ops != NULL;
}

static void dp__streams_close(dp__device *device)
{
    if (!dp__device_is_open(device))
        return;
    const dp_device_ops *ops = device->dev->ops;
    for (int i = 0; i < 2; i++)
        if (device->reads[i].done != NULL)
            ops->event_destroy(device->reads[i].done);
    if (device->done != NULL)
        ops->event_destroy(device->done);
    if (device->own_stream != NULL)
        ops->stream_destroy(device->own_stream);
}

static void dp__device_close(dp__device *device)
{
    if (dp__device_is_open(device))
        device->dev->ops->close(device->dev);
}

static dp_status dp__devices_open(dp_ctx *ctx, int place)
{
    const dp_device_ops *ops = ctx->config.backends[place];
    int count = ctx->config.device_count;
    DP_TRY(dp__device_open(ctx, dp_cpu(), &ctx->host_device, (dp_device){0, 0}, 0));
    if (!dp__devices_reserve(ctx, count))
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    for (int i = 0; i < count; i++)
        DP_TRY(dp__device_open(ctx, ops, dp__devices_add(ctx), (dp_device){place + 1, i},
                               ctx->config.devices[i]));
    ctx->info.local_count = ctx->info.rank_count = count;
    ctx->info.device_backend = ops->name;
    ctx->pinned_pool.device = &ctx->devices[0];
    ctx->pinned_pool.pinned = DP_HAS(dp_device_ops, ctx->devices[0].dev->ops, host_alloc) &&
                              DP_HAS(dp_device_ops, ctx->devices[0].dev->ops, host_free);
    if (!ctx->pinned_pool.pinned)
        ctx->pinned_pool.device = NULL;
    return DP_OK;
}

static dp_status dp__threads_open(dp_ctx *ctx)
{
    int count = ctx->info.local_count, cores = ctx->config.thread_count;
    size_t slots = (size_t)count * sizeof *ctx->slots, parts = (size_t)count * sizeof *ctx->parts;
    ctx->info.core_count = cores;
    ctx->info.threads_per_device = cores > count ? cores / count : 1;
    ctx->slots = dp__host_alloc(&ctx->host, slots, 64);
    ctx->parts = dp__host_alloc(&ctx->host, parts, 64);
    if (ctx->slots == NULL || ctx->parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    if (count == 1)
        return DP_OK;
    if (cores == 1)
        dp__log(ctx, DP_LOG_WARN,
                "%d devices and one core: they take turns. If a launcher bound this process to a "
                "core, ask it for more (mpirun --bind-to none)",
                count);
    return dp__team_open(&ctx->host, count, cores, &ctx->team);
}

typedef struct dp__hello {   /* what every process tells the others while it opens */
    uint64_t machine, epoch; /* epoch: when it opened, by the clock on the wall */
    int32_t version, status;
    int32_t local_count;
    int32_t coll; /* place of the table that it chose; -1: none yet */
    int32_t shards;
} dp__hello;

typedef struct dp__meeting { /* the processes of a job */
    const dp_bootstrap *boot;
    dp__hello own, *all;
    const char *launcher;
    dp__neighbours near;
} dp__meeting;

/* Every process takes part each time, even one that failed: so all fail together, and nobody
   waits. */
static dp_status dp__agree(dp__meeting *meeting, dp_status own)
{
    const dp_bootstrap *boot = meeting->boot;
    char said[DP__TEXT_BYTES]; /* this process' own reason must survive the others' failure */
    memcpy(said, dp_last_error(), sizeof said);
    meeting->own.status = (int32_t)own;
    dp_status status = dp__boot_gather(boot, &meeting->own, meeting->all, sizeof meeting->own);
    if (own != DP_OK)
        return dp_error(own, "%s", said);
    DP_TRY(status);
    for (int i = 0; i < boot->process_count; i++) {
        const dp__hello *other = &meeting->all[i];
        if (other->version != DP_VERSION)
            return dp_error(DP_ERR_MISMATCH, "dp_open: process %d has dp.h %d, process %d has %d",
                            boot->process, DP_VERSION, i, (int)other->version);
        if (other->shards != meeting->own.shards)
            return dp_error(DP_ERR_MISMATCH, "dp_open: process %d has %d shards, process %d has %d",
                            boot->process, (int)meeting->own.shards, i, (int)other->shards);
        if (other->status != DP_OK)
            return dp_error(DP_ERR_REMOTE, "dp_open: process %d of %d failed: %s", i,
                            boot->process_count, dp_status_text((dp_status)other->status));
        if (other->coll != meeting->own.coll)
            return dp_error(DP_ERR_MISMATCH,
                            "dp_open: process %d has its table of collectives in "
                            "place %d, process %d in place %d",
                            boot->process, (int)meeting->own.coll, i, (int)other->coll);
    }
    return DP_OK;
}

static bool dp__one_machine(const dp__meeting *meeting)
{
    bool one = true;
    for (int i = 0; meeting != NULL && i < meeting->boot->process_count; i++)
        one = one && meeting->all[i].machine == meeting->own.machine;
    return one;
}

static dp_status dp__comm_config(dp_ctx *ctx, const dp__meeting *meeting, dp_comm_config *out)
{
    int count = ctx->info.local_count;
    dp_dev **local = dp__host_alloc(&ctx->host, (size_t)count * sizeof *local, sizeof *local);
    if (local == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    *out =
        (dp_comm_config){.local = local,
                         .local_count = count,
                         .rank_first = ctx->info.rank_first,
                         .rank_count = ctx->info.rank_count,
                         .timeout_ms = ctx->config.timeout_ms,
                         .host_memory = true,
                         .bootstrap = ctx->info.process_count > 1 ? &ctx->config.bootstrap : NULL,
                         .one_machine = dp__one_machine(meeting),
                         .ordered = ctx->config.shards > 0};
    for (int i = 0; i < count; i++) {
        local[i] = ctx->devices[i].dev;
        out->host_memory = out->host_memory && dp__is_host(&ctx->devices[i]);
    }
    return DP_OK;
}

/* The first table that fits; after the last of them comes the one that stages through the host. */
static dp_status dp__comm_choose(const dp_ctx *ctx, const dp_comm_config *config, int *out_place)
{
    const dp_coll_ops *const *colls = ctx->config.colls;
    int place = 0;
    while (colls[place] != NULL && !colls[place]->fits(config))
        place++;
    if (colls[place] == NULL && !dp__staging_fits(config))
        return dp_error(
            DP_ERR_UNSUPPORTED,
            "dp_open: no table of collectives serves '%s' devices of %d processes%s",
            ctx->info.device_backend, ctx->info.process_count,
            dp__backend_cuda != NULL &&
                    strcmp(ctx->info.device_backend, dp__backend_cuda()->name) == 0
                ? ": between GPUs of several processes NCCL carries the bytes, where dp_nccl.h is "
                  "compiled in (DP_USE_NCCL, on AMD's DP_USE_RCCL)"
            : !config->host_memory
                ? ": the host does not reach their memory, so that a dp_coll_ops that does has to "
                  "be in dp_config.colls"
            : !config->one_machine
                ? " on several machines: between machines MPI carries the bytes, where dp_mpi.h "
                  "is compiled in (DP_USE_MPI) and MPI has started the processes (mpirun)"
                : "");
    *out_place = place;
    return DP_OK;
}

static dp_status dp__comm_open(dp_ctx *ctx, const dp_comm_config *config, int place, dp_comm **out)
{
    const dp_coll_ops *coll = ctx->config.colls[place];
    coll = coll != NULL ? coll : &dp__staging_ops;
    ctx->info.coll_backend = coll->name;
    dp_status status = coll->open(&ctx->host, config, out);
    if (status != DP_OK)
        *out = NULL; /* whatever the table has left there */
    return status;
}

static dp_status dp__firsts_make(dp_ctx *ctx, const dp__meeting *meeting)
{
    size_t count = (size_t)meeting->boot->process_count;
    int *firsts = dp__host_alloc(&ctx->host, (count + 1) * sizeof *firsts, sizeof *firsts);
    if (firsts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    firsts[0] = 0;
    for (size_t i = 0; i < count; i++)
        firsts[i + 1] = firsts[i] + meeting->all[i].local_count;
    ctx->firsts = firsts;
    return DP_OK;
}

/* Ranks of the whole job and the communicator, unless this rank is the only one. With other
   processes each step is agreed upon before the next. */
static dp_status dp__job_open(dp_ctx *ctx, dp__meeting *meeting)
{
    dp_comm_config config = {0};
    int place = 0;
    for (int i = 0; meeting != NULL && i < meeting->boot->process_count; i++) {
        ctx->info.rank_first += i < meeting->boot->process ? meeting->all[i].local_count : 0;
        ctx->info.rank_count += i != meeting->boot->process ? meeting->all[i].local_count : 0;
    }
    if (ctx->info.rank_count == 1)
        return DP_OK;
    dp_status status = dp__comm_config(ctx, meeting, &config);
    if (status == DP_OK && meeting != NULL)
        status = dp__firsts_make(ctx, meeting);
    if (status == DP_OK && meeting != NULL)
        status = dp__journal_open(ctx);
    if (status == DP_OK)
        status = dp__comm_choose(ctx, &config, &place);
    if (meeting != NULL) {
        meeting->own.coll = place;
        DP_TRY(dp__agree(meeting, status));
    }
    if (status == DP_OK)
        status = dp__comm_open(ctx, &config, place, &ctx->comm);
    if (meeting == NULL)
        return status;
    DP_TRY(dp__agree(meeting, status));
    /* The courier's collectives must not mix with those of the user's threads. */
    return dp__agree(meeting, dp__comm_open(ctx, &config, place, &ctx->courier_comm));
}

static dp_status dp__open_local(dp_ctx *ctx, const dp__meeting *meeting)
{
    int place = 0, available = 0;
    ctx->info.coll_backend = "none";
    ctx->info.launcher = meeting->launcher;
    ctx->info.machine_process = meeting->near.machine.place;
    ctx->info.machine_process_count = meeting->near.machine.count;
    ctx->info.process = ctx->config.bootstrap.process;
    if (ctx->info.machine_process == 0)
        DP_TRY(dp__trace_make(ctx->info.process));
    DP_TRY(dp__resolve_numbers(ctx, meeting->near.cores));
    ctx->info.process_count = ctx->config.bootstrap.process_count;
    DP_TRY(dp__resolve_tables(ctx));
    DP_TRY(dp__choose_backend(ctx, &place, &available));
    DP_TRY(dp__resolve_devices(ctx, place, available));
    DP_TRY(dp__devices_open(ctx, place));
    return dp__threads_open(ctx);
}

static void dp__release(dp_ctx *ctx, bool ask_devices);

/* A context with its hooks and nothing else; NULL when there is no memory. */
static dp_ctx *dp__ctx_new(const dp_config *config)
{
    dp_allocator allocator = config->allocator;
    if (allocator.alloc == NULL)
        allocator = (dp_allocator){dp__os_alloc, dp__os_free, NULL};
    dp_ctx *ctx = allocator.alloc(sizeof *ctx, 64, allocator.user);
    if (ctx == NULL) {
        dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for a context");
        return NULL;
    }
    dp__os_init(dp__before_fork, dp__after_fork, dp__in_child);
    *ctx = (dp_ctx){.host = dp__host_make(),
                    .config = *config,
                    .lock = DP__LOCK_INITIALIZER,
                    .far_lock = DP__LOCK_INITIALIZER};
    ctx->config.allocator = allocator;
    ctx->fork_count = dp__os_fork_count();
    dp__resolve_log(ctx);
    return ctx;
}

static dp_status dp__open_ctx(const dp_config *config, dp__meeting *meeting, dp_ctx **out)
{
    dp_ctx *ctx = dp__ctx_new(config);
    dp__meeting *others = meeting->all != NULL ? meeting : NULL;
    dp_status status = ctx != NULL ? dp__open_local(ctx, meeting) : DP_ERR_NO_MEMORY;
    if (others != NULL) {
        meeting->own.local_count = ctx != NULL ? ctx->info.local_count : 0;
        status = dp__agree(meeting, status);
    }
    if (status == DP_OK)
        status = dp__job_open(ctx, others);
    if (status == DP_OK && !dp__live_swap(NULL, ctx))
        status =
            dp_error(DP_ERR_UNSUPPORTED, "dp_open: more than %d contexts at once", DP__LIVE_MAX);
    if (status != DP_OK && ctx != NULL) {
        status = dp__leave("dp_open", ctx, status);
        dp__release(ctx, true);
    }
    if (status == DP_OK)
        dp__trace_join(ctx, others != NULL ? others->all[0].epoch : meeting->own.epoch);
    *out = ctx;
    return status;
}

static dp_status dp__check_config(const dp_config *config)
{
    const dp_bootstrap *boot = &config->bootstrap;
    if ((config->allocator.alloc == NULL) != (config->allocator.free == NULL))
        return dp_error(DP_ERR_INVALID, "dp_open: allocator needs both functions or none");
    if (boot->all_gather != NULL &&
        (boot->process_count < 1 || boot->process < 0 || boot->process >= boot->process_count))
        return dp_error(DP_ERR_INVALID, "dp_open: bootstrap is process %d of process_count %d",
                        boot->process, boot->process_count);
    if (boot->all_gather == NULL && (boot->process_count > 1 || boot->process_count < 0))
        return dp_error(DP_ERR_INVALID,
                        "dp_open: bootstrap.process_count is %d and "
                        "bootstrap.all_gather is NULL",
                        boot->process_count);
    if (boot->all_gather != NULL && config->local_only)
        return dp_error(DP_ERR_INVALID, "dp_open: local_only is set, and bootstrap is given");
    return DP_OK;
}

/* Meet the other processes, and find out which of them are near. If something goes wrong before
   that, they notice that this one is missing; if later, they are told. */
static dp_status dp__open_job(const dp_config *config, const dp__launch *launch, dp_ctx **out)
{
    const dp_bootstrap *boot = &config->bootstrap;
    dp__meeting meeting = {.boot = boot,
                           .own = {.machine = dp__os_machine(),
                                   .epoch = dp__os_wall_ns(),
                                   .version = DP_VERSION,
                                   .coll = -1,
                                   .shards = config->shards},
                           .launcher = launch->name,
                           .near = {{0, 1}, {0, 1}}};
    if (boot->all_gather == NULL || boot->process_count == 1)
        return dp__open_ctx(config, &meeting, out);
    /* not by the allocator's hooks: a process without memory still has to say so */
    meeting.all =
        dp__os_alloc((size_t)boot->process_count * sizeof *meeting.all, _Alignof(dp__hello), NULL);
    if (meeting.all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d processes",
                        boot->process_count);
    dp_status status = dp__find_neighbours(boot, launch, &meeting.near);
    if (status == DP_OK)
        status = dp__open_ctx(config, &meeting, out);
    dp__os_free(meeting.all, 0, NULL);
    return status;
}

DP_API dp_status dp__open(const dp_config *config, size_t config_bytes, int version, dp_ctx **out)
{
    static const dp_config zero;
    dp_ctx *ctx = NULL;
    DP_TRY(dp__check_pointer("dp_open", "out", out));
    if (config_bytes != sizeof(dp_config) || version != DP_VERSION)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: the caller was compiled with another dp.h (version %d, config of "
                        "%zu bytes) than the implementation (%d, %zu)",
                        version, config_bytes, DP_VERSION, sizeof(dp_config));
    config = config != NULL ? config : &zero;
    DP_TRY(dp__check_config(config));
    dp_config joined = *config;
    dp__launch launch;
    dp__tree *tree;
    dp__mpi_line *line;
    DP_TRY(dp__join(&joined, &launch, &tree, &line));
    dp_status status = dp__open_job(&joined, &launch, &ctx);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        dp__line_close(line, true, false);
    }
    DP_TRY(status);
    dp__far_begin(ctx, tree, line);
    dp__log(ctx, DP_LOG_INFO, "launcher: %s, process %d of %d, %d of %d on this machine",
            ctx->info.launcher, ctx->info.process, ctx->info.process_count,
            ctx->info.machine_process, ctx->info.machine_process_count);
    dp__log(ctx, DP_LOG_INFO, "%d x %s on %d cores, %d threads a device, %d ranks, collectives: %s",
            ctx->info.local_count, ctx->info.device_backend, ctx->info.core_count,
            ctx->info.threads_per_device, ctx->info.rank_count, ctx->info.coll_backend);
    *out = ctx;
    return DP_OK;
}

/* ==== >>closing ==================================================================================
   What was opened is closed in reverse order, however far opening came.                         */

/* In a child of fork (ask_devices false) locks and devices are as the parent left them:
   untouched. */
static void dp__release(dp_ctx *ctx, bool ask_devices)
{
    if (ask_devices)
        dp__courier_end(ctx);
    while (ask_devices && ctx->scopes != NULL)
        dp__scope_end(ctx->scopes);
    for (int i = 0; ask_devices && i < ctx->info.local_count; i++) /* before memory is freed */
        (void)ctx->devices[i].dev->ops->stream_sync(ctx->devices[i].stream);
    if (ask_devices && ctx->comm != NULL)
        ctx->comm->ops->close(ctx->comm);
    dp__tree_close(ctx->tree, ask_devices);
    dp__line_close(ctx->line, ask_devices, ctx->failed != DP_OK);
    if (ask_devices && ctx->team != NULL)
        dp__team_close(ctx->team);
    for (ptrdiff_t i = 0; ask_devices && i < dp__devices_count(ctx); i++)
        dp__streams_close(&ctx->devices[i]); /* what could not be waited for still has its memory */
    dp__blocks_free(ctx, ask_devices);
    for (ptrdiff_t i = 0; ask_devices && i < dp__devices_count(ctx); i++)
        dp__device_close(&ctx->devices[i]);
    if (ask_devices) {
        dp__streams_close(&ctx->host_device);
        dp__device_close(&ctx->host_device);
    }
    while (ctx->all_scopes != NULL) {
        dp_scope *scope = ctx->all_scopes;
        ctx->all_scopes = scope->made_before;
        dp__raw_free(ctx, scope, sizeof *scope);
    }
    if (ask_devices)
        dp__trace_leave(ctx);
    dp_allocator allocator = ctx->config.allocator;
    while (ctx->tracked != NULL)
        dp__tracked_free(ctx, ctx->tracked);
    allocator.free(ctx, sizeof *ctx, allocator.user);
}

/* OK if nothing of the context runs, here or in another thread; then it is entered, for good. */
static dp_status dp__check_idle(const char *fn, dp_ctx *ctx)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, false);
    if (frame != NULL)
        return dp_error(DP_ERR_STATE, "%s: the context is in use by %s, which called this", fn,
                        dp__frame_text(frame, text, sizeof text));
    DP_TRY(dp__enter(fn, ctx));
    int count = atomic_load_explicit(&ctx->inside, memory_order_relaxed);
    if (count == 0)
        return DP_OK;
    atomic_store_explicit(&ctx->entered, false, memory_order_release);
    return dp_error(DP_ERR_STATE,
                    "%s: the context is in use: threads in methods, deferred functions and the "
                    "like: %d",
                    fn, count);
}

DP_API void dp_close(dp_ctx *ctx)
{
    if (ctx == NULL)
        return;
    if (!dp__is_live(ctx)) {
        dp_error(DP_ERR_STATE, "dp_close: the context is closed already");
        return;
    }
    bool forked = ctx->fork_count != dp__os_fork_count();
    if (!forked && dp__check_idle("dp_close", ctx) != DP_OK)
        return;
    dp__live_swap(ctx, NULL);
    dp__release(ctx, !forked);
    dp__thread.scope_status = DP_OK; /* it says nothing about scopes of other contexts */
}

/* ==== >>running ==================================================================================
   What can be asked of a context, and running on its devices' threads.                          */

DP_API dp_status dp_info_get(const dp_ctx *ctx, dp_info *out)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = ctx->info;
    return DP_OK;
}

DP_API dp_status dp_config_get(const dp_ctx *ctx, dp_config *out)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = ctx->config;
    return DP_OK;
}

DP_API dp_status dp_device_info_get(dp_ctx *ctx, int local_rank, dp_device_info *out)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_dev *dev = ctx->devices[local_rank].dev;
    return dp__leave(__func__, ctx, dev->ops->info(dev, out));
}

DP_API dp_device dp_local_device(const dp_ctx *ctx, int local_rank)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK)
        return (dp_device){-1, -1};
    return ctx->devices[local_rank].id;
}

DP_API dp_stream *dp_local_stream(const dp_ctx *ctx, int local_rank)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK)
        return NULL;
    return ctx->devices[local_rank].stream;
}

DP_API dp_status dp_use_stream(dp_ctx *ctx, int local_rank, dp_stream *stream)
{
    DP_TRY(stream != NULL ? dp__check_ctx(__func__, ctx) : dp__check_open(__func__, ctx));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_alone(__func__, ctx));
    dp__device *device = &ctx->devices[local_rank];
    if (dp__has_failed(ctx)) { /* the user has to destroy theirs before dp_close */
        device->stream = device->own_stream;
        return DP_OK;
    }
    stream = stream != NULL ? stream : device->own_stream;
    if (stream->dev != device->dev)
        return dp_error(DP_ERR_INVALID, "%s: the stream is not of local rank %d", __func__,
                        local_rank);
    DP_TRY(dp__leave(__func__, ctx, dp__order_after(device, stream)));
    device->stream = stream;
    return DP_OK;
}

DP_API dp_status dp_wait(dp_ctx *ctx)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__leave(__func__, ctx, dp__sync_all(ctx));
}

typedef struct dp__run {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_run_fn fn;
    void *user;
} dp__run;

static void dp__run_part(int local_rank, void *user)
{
    const dp__run *run = user;
    dp__slot *slot = &run->ctx->slots[local_rank];
    dp__frame frame = {.what = "a function under dp_run",
                       .ctx = run->ctx,
                       .scope = run->scope,
                       .local_rank = local_rank,
                       .together = true,
                       .owns_device = true};
    dp__frame_enter(&frame);
    slot->status =
        dp__frame_leave(&frame, run->fn(local_rank, run->scope->replicas[local_rank], run->user));
    if (slot->status != DP_OK)
        memcpy(slot->text, dp__thread.text, sizeof slot->text);
}

static dp_status dp__run_scopes(dp_scope *scope)
{
    size_t count = (size_t)scope->ctx->info.local_count;
    if (scope->replicas == NULL) {
        dp_scope **replicas = dp__scope_bytes(scope, count * sizeof *replicas, sizeof *replicas);
        if (replicas == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu scopes", count);
        for (size_t i = 0; i < count; i++)
            replicas[i] = NULL;
        scope->replicas = replicas;
    }
    size_t missing = 0;
    for (size_t i = 0; i < count; i++)
        missing += scope->replicas[i] == NULL;
    if (missing > 0)
        dp__scopes_reuse(scope->ctx, scope, scope->replicas, count);
    for (size_t i = 0; i < count && missing > 0; i++) {
        if (scope->replicas[i] == NULL)
            scope->replicas[i] = dp__scope_make(scope->ctx, scope);
        if (scope->replicas[i] == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu scopes", count);
    }
    return DP_OK;
}

static dp_status dp__run_result(const dp_ctx *ctx)
{
    for (int i = 0; i < ctx->info.local_count; i++) {
        const dp__slot *slot = &ctx->slots[i];
        if (slot->status != DP_OK)
            return dp_error(slot->status, "dp_run: local rank %d: %s", i,
                            slot->text[0] != '\0' ? slot->text : dp_status_text(slot->status));
    }
    return DP_OK;
}

static dp_status dp__run_all(dp__run *run)
{
    dp_ctx *ctx = run->ctx;
    DP_TRY(dp__run_scopes(run->scope));
    if (ctx->team == NULL) {
        dp__run_part(0, run);
        return dp__run_result(ctx);
    }
    if (!dp__team_enter(ctx->team)) /* the workers are busy with another thread's copy just now */
        return dp_error(DP_ERR_STATE, "dp_run: another thread is inside this context");
    dp__team_run(ctx->team, ctx->info.local_count, dp__run_part, run);
    dp__team_exit(ctx->team);
    return dp__run_result(ctx);
}

DP_API dp_status dp_run(dp_ctx *ctx, dp_scope *scope, dp_run_fn fn, void *user)
{
    dp_scope *own = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    if (scope != NULL)
        DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    DP_TRY(dp__enter(__func__, ctx));
    dp_status status = scope == NULL ? dp__temp_begin(ctx, &own) : DP_OK;
    dp__run run = {ctx, scope != NULL ? scope : own, fn, user};
    if (status == DP_OK)
        status = dp__run_all(&run);
    status = dp__exit(__func__, ctx, status);
    dp__scope_end(own); /* deferred functions run alone */
    return status;
}

DP_API int64_t dp_local_share(const dp_ctx *ctx, int local_rank, int64_t count, int64_t *out_first)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK ||
        dp__check_pointer(__func__, "out_first", out_first) != DP_OK)
        return -1;
    if (count < 0) {
        dp_error(DP_ERR_INVALID, "%s: count is %lld", __func__, (long long)count);
        return -1;
    }
    int64_t each = count / ctx->info.local_count, more = count % ctx->info.local_count;
    *out_first = local_rank * each + (local_rank < more ? local_rank : more);
    return each + (local_rank < more);
}

#include "dp_module.h"
#include "dp_distributed.h"

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
