/* dp_nccl.h - v0.2.0 - collectives among GPUs by NCCL, for dp.h - MIT licence

   Include it after dp_cuda.h, or instead of dp.h; or define DP_USE_NCCL, and dp.h includes it. Link
   with -lnccl beside what dp_cuda.h needs; or define DP_DYNAMIC_LOAD together with
   DP_IMPLEMENTATION, and the first library that can be used is loaded when a context opens. NCCL
   2.18 or newer.

   With NCCL 2.28 processes that share an H200 pass the tests of collectives and nearly all of
   dp_recover: they hear of one that ends in any way, and go on without it, or with another one in
   its place. Several GPUs, and all other tests, are simulated (make sim).

   Calls wait for GPUs only while 128 collectives are under way, and before they take memory of GPUs
   or pinned memory, or give it back: then for all collectives of the process. So two contexts of
   several processes may wait for one another, by way of other processes where they are in another
   order, until the time-out, which names that as the reason: let one thread use both, in the same
   order everywhere. A thread watches the communicators: where a process dies, closes or issues
   another collective, all others get an error that names it, within a second. On several machines
   that holds for a process that dies or fails.

   A graph that has collectives in it is of no use after dp_recover or dp_admit. Launched all the
   same, it waits for ranks of the old job, for ever, or writes to memory that others have by then:
   nobody here sees that, so there is no error. Capture a new one, and destroy the old one.

   NCCL carries data between GPUs of several processes, on one machine or on many. Without it their
   collectives go through the host. Among the GPUs of one process NCCL takes large collectives, as
   far as it can add up as asked; the rest goes over dp_cuda_coll(). $DP_NCCL sets from how many
   bytes on (default 1048576, which was not measured); "off" does without NCCL. In a job of several
   processes $DP_INTERFACE (dp.h, >>launch) becomes $NCCL_SOCKET_IFNAME, unless that is set. With
   $NCCL_HOSTID, processes are on one machine for NCCL if that is equal. Where NCCL is looked for at
   run time (DP_DYNAMIC_LOAD), it may also be Python's package of it in $VIRTUAL_ENV, $CONDA_PREFIX,
   $HOME/.local, /usr/local or /usr.

   When a communicator opens, it sends known numbers the way that its sums will go: 256 KiB of each
   GPU, but not more than 4 MiB. If some arrive wrong, dp_open fails and names the ranks. Without
   shards it sends them by ncclAllGather: pairs of GPUs that exchange data only in dp_all_to_all, or
   in sums that NCCL cannot make, are not checked. If a pair of GPUs of one process did not pass the
   check of dp_cuda.h, $NCCL_P2P_DISABLE is set to 1, unless it is set. NCCL reads it with its first
   communicator in a process. So if the program has used NCCL before, set it before the process
   starts.

   Slices of a GPU (MIG) count as GPUs, told apart by their UUIDs. Processes on slices of one GPU
   need NCCL 2.30 or newer; $NCCL_MULTI_RANK_GPU_ENABLE is set to 1 for them, unless it is set.
   Slices in one process do not use NCCL. A process has at most 64 ranks, and a job 4096.

   With dp_config.shards sums are made in the order of dp_coll_ops, from slices that the ranks send
   each other: the bits are those of any other table. Without shards, NCCL adds up in an order of
   its own, the same each time on the same machines; sums that NCCL cannot make as asked use slices
   too. Slices take memory of each GPU, 4 MiB for each rank and 128 MiB at most (above 2048 ranks 64
   KiB for each): from dp_open on with shards, otherwise from the first such sum on.

   CONTENTS (search for the tag)
     >>library    what is called of NCCL, and how it is found
     >>ranks      which rank is on which GPU
     >>failing    the first failure stays
     >>keeper     a thread that watches what has been begun
     >>groups     calls that begin together, and streams around them
     >>natively   sums that NCCL makes
     >>slices     sums that keep the order
     >>blocks     broadcast, gathers
     >>proving    whether the bytes arrive
     >>joining    from a config to a communicator
     >>table      which of these carries what; closing
*/

#define DP__NCCL_FIRST_DP /* dp.h must not include this file again */
#include "dp_cuda.h"      /* outside the guard, so that DP_IMPLEMENTATION is carried through */
#undef DP__NCCL_FIRST_DP

#if !defined(DP_NCCL_H) && !defined(DP__REFUSED)
#define DP_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

DP_API const dp_coll_ops *dp_nccl_coll(void); /* among CUDA devices, of any number of processes */

/* The version as NCCL says it (2.28.9 is 22809) and where it was loaded from; 0 and why not if it
   cannot be used. */
DP_API int dp_nccl_version(char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif /* DP_NCCL_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_NCCL_IMPLEMENTED)
#define DP_NCCL_IMPLEMENTED

#if defined(DP__HIP)
#include <rccl/rccl.h>
#define DP__NCCL_IS    "rccl" /* the table's name */
#define DP__NCCL_NAME  "RCCL"
#define DP__NCCL_WHERE "librccl.so.1 is looked for where the system finds libraries"
#else
#include <nccl.h>
#define DP__NCCL_IS   "nccl"
#define DP__NCCL_NAME "NCCL"
#define DP__NCCL_WHERE                                                                             \
    "libnccl.so.2 is looked for where the system finds libraries ($LD_LIBRARY_PATH), and in "      \
    "Python's package nvidia.nccl"
#endif
#if defined(DP_DYNAMIC_LOAD) && !defined(DP__HIP)
#include <glob.h>
#endif

/* ==== >>library ==================================================================================
   Every function of NCCL that is called is in this list, and is called through one table: bound
   when the program is linked, or with DP_DYNAMIC_LOAD when the first context asks. Nothing but its
   version is asked before a device has been opened: NCCL starts threads as soon as it is used.
   RCCL has the same calls under the same names (dp_hip.h).                                      */

/* clang-format off */
#define DP__NCCL_FUNCTIONS(X)                                                                      \
    X(ncclAllGather) X(ncclAllReduce) X(ncclBroadcast) X(ncclCommAbort) X(ncclCommDestroy)         \
    X(ncclCommFinalize) X(ncclCommGetAsyncError) X(ncclCommInitRankConfig) X(ncclGetErrorString)   \
    X(ncclGetLastError) X(ncclGetUniqueId) X(ncclGetVersion) X(ncclGroupEnd) X(ncclGroupStart)     \
    X(ncclRecv) X(ncclRedOpCreatePreMulSum) X(ncclRedOpDestroy) X(ncclReduceScatter) X(ncclSend)
/* clang-format on */

/* The oldest that has all of them, and communicators that do not block. */
enum { DP__NCCL_FLOOR = 21800, DP__NCCL_LEAST_BYTES = 1 << 20 };
enum { DP__NCCL_SLICES = 23000 }; /* the first that takes several ranks on one GPU */

static struct dp__nccl_library {
    DP__NCCL_FUNCTIONS(DP__CUDA_FIELD)
    bool bound;
    char path[512];
}
#if defined(DP_DYNAMIC_LOAD)
dp__nccl;
#else
dp__nccl = {DP__NCCL_FUNCTIONS(DP__CUDA_BIND).path = "linked"};
#endif

static dp__lock dp__nccl_lock = DP__LOCK_INITIALIZER; /* for binding, and the list of >>keeper */

typedef struct dp__nccl_refused { /* "PATH is NCCL 2.17.5; PATH lacks ncclSend" */
    char text[DP__TEXT_BYTES - 160];
    size_t used;
} dp__nccl_refused;

/* Returns true if the library in the table can be used. lacks: a function that it lacks; NULL:
   none. */
static bool dp__nccl_suits(const char *lacks, dp__nccl_refused *refused)
{
    char why[64];
    int version = 0;
    if (lacks == NULL && dp__nccl.ncclGetVersion(&version) == ncclSuccess &&
        version >= DP__NCCL_FLOOR)
        return true;
    if (lacks != NULL)
        snprintf(why, sizeof why, "lacks %s", lacks);
    else
        snprintf(why, sizeof why, "is " DP__NCCL_NAME " %d.%d.%d", version / 10000,
                 version / 100 % 100, version % 100);
    refused->used = dp__append(refused->text, sizeof refused->text, refused->used, "%s%s %s",
                               refused->used > 0 ? "; " : "", dp__nccl.path, why);
    return false;
}

#if defined(DP_DYNAMIC_LOAD)
#define DP__NCCL_FIND(name)                                                                        \
    lacks = dp__cuda_find(library, #name, &dp__nccl.name) || lacks != NULL ? lacks : #name;

/* Loads a library, and unloads it if it cannot be used: another one may do. */
static bool dp__nccl_bind_path(const char *path, dp__nccl_refused *refused)
{
    const char *lacks = NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return false;
    DP__NCCL_FUNCTIONS(DP__NCCL_FIND)
    snprintf(dp__nccl.path, sizeof dp__nccl.path, "%s",
             dp__cuda_place(library, "ncclGetVersion", path));
    bool suits = dp__nccl_suits(lacks, refused);
    if (!suits)
        (void)dlclose(library);
    return suits;
}

#if defined(DP__HIP)
static bool dp__nccl_bind(dp__nccl_refused *refused)
{
    return dp__nccl_bind_path("librccl.so.1", refused) || dp__nccl_bind_path("librccl.so", refused);
}
#else
/* Where Python's package has it, in the folder of an environment or of the system. */
static bool dp__nccl_bind_package(const char *root, dp__nccl_refused *refused)
{
    char pattern[768];
    glob_t list;
    bool found = false;
    if (root == NULL || root[0] != '/')
        return false;
    snprintf(pattern, sizeof pattern, "%s/lib/python3*/*-packages/nvidia/nccl/lib/libnccl.so.2",
             root);
    if (glob(pattern, 0, NULL, &list) != 0)
        return false;
    for (size_t i = 0; i < list.gl_pathc && !found; i++)
        found = dp__nccl_bind_path(list.gl_pathv[i], refused);
    globfree(&list);
    return found;
}

static bool dp__nccl_bind(dp__nccl_refused *refused)
{
    char local[512] = "";
    const char *home = dp__os_env("HOME");
    if (home != NULL)
        snprintf(local, sizeof local, "%.490s/.local", home);
    const char *const roots[] = {dp__os_env("VIRTUAL_ENV"), dp__os_env("CONDA_PREFIX"), local,
                                 "/usr/local", "/usr"};
    /* The first is also the name of a copy that this process has already, wherever it is from. */
    bool found = dp__nccl_bind_path("libnccl.so.2", refused) ||
                 dp__nccl_bind_path("libnccl.so", refused);
    for (size_t i = 0; i < sizeof roots / sizeof roots[0] && !found; i++)
        found = dp__nccl_bind_package(roots[i], refused);
    return found;
}
#endif
#else
static bool dp__nccl_bind(dp__nccl_refused *refused)
{
    return dp__nccl_suits(NULL, refused);
}
#endif

/* The library is there, and new enough. */
static dp_status dp__nccl_ready(void)
{
    dp__nccl_refused refused = {.used = 0};
    dp__lock_enter(&dp__nccl_lock);
    bool bound = dp__nccl.bound = dp__nccl.bound || dp__nccl_bind(&refused);
    dp__lock_leave(&dp__nccl_lock);
    return bound ? DP_OK
                 : dp_error(DP_ERR_UNSUPPORTED, DP__NCCL_NAME " 2.18 or newer was not found: %s",
                            refused.used > 0 ? refused.text : DP__NCCL_WHERE);
}

/* $DP_NCCL: 0: off; else from how many bytes on NCCL carries what one process could do without. */
static dp_status dp__nccl_wish(size_t *out_least)
{
    const char *wish = dp__os_env("DP_NCCL");
    char *end = NULL;
    *out_least = DP__NCCL_LEAST_BYTES;
    if (wish == NULL || wish[0] == '\0')
        return DP_OK;
    if (strcmp(wish, "off") == 0)
        return dp_error(DP_ERR_UNSUPPORTED, "NCCL is off, as DP_NCCL says");
    unsigned long long least = strtoull(wish, &end, 10);
    if (wish[0] < '0' || wish[0] > '9' || *end != '\0')
        return dp_error(DP_ERR_INVALID, "DP_NCCL is '%.60s', neither off nor a number of bytes",
                        wish);
    *out_least = (size_t)least;
    return DP_OK;
}

DP_API int dp_nccl_version(char *text, size_t bytes)
{
    int version = 0;
    bool usable = dp__nccl_ready() == DP_OK;
    if (usable)
        (void)dp__nccl.ncclGetVersion(&version);
    if (text != NULL && bytes > 0)
        snprintf(text, bytes, "%s", usable ? dp__nccl.path : dp_last_error());
    return version;
}

/* ==== >>ranks ====================================================================================
   NCCL knows GPUs: each that takes part is one of its ranks, which one process drives, whatever
   number of ranks of the job are on it. The GPUs are numbered as ranks come to them. What NCCL does
   for a GPU is on the stream of the first local rank there, its lead.                            */

enum {
    DP__NCCL_WATCHED = 128,           /* collectives that may be under way */
    DP__NCCL_SLOTS_BYTES = 128 << 20, /* of a GPU: what others send, a slot for each rank */
    DP__NCCL_SLOT_LEAST = 64 << 10,
    DP__NCCL_SLOT_MOST = 4 << 20,
    DP__NCCL_LOOK_NS = 20000000, /* between two looks of the keeper */
    DP__NCCL_NEWS_MS = 200,      /* for others to say what NCCL has noticed */
    DP__NCCL_CLOSE_MS = 2000     /* for NCCL to finish what it has begun, or to abort it */
};

typedef struct dp__nccl_gpu { /* one that this process drives */
    dp__cuda_dev *dev;
    const dp__cuda_gpu *physical; /* stays when the device is closed */
    int lead;                     /* local rank */
    ncclComm_t comm;
    void *slots; /* one for each rank of the job; NULL: it has not added up slices yet */
    void *spare; /* for what no rank here wants */
    size_t spare_bytes;
    bool spare_captured; /* a graph writes there */
    const void *send;    /* of the collective that runs */
    void *recv;
    dp_stream *prover;  /* see >>proving; */
    void *proof;        /* first what it has found, as double */
    ncclRedOp_t scaled; /* a sum of numbers times a factor, made when it is first needed */
    double factor;
    dp_dtype scaled_dtype;
    bool has_scaled;
    cudaEvent_t begun[DP__NCCL_WATCHED], ended[DP__NCCL_WATCHED];
} dp__nccl_gpu;

typedef struct dp__nccl_slice { /* of every send, for the GPU that adds it up */
    size_t begin, count;
} dp__nccl_slice;

typedef enum dp__nccl_order { DP__NCCL_WATCH, DP__NCCL_ABORT, DP__NCCL_CLOSE } dp__nccl_order;

/* In memory of its own: a keeper that hangs in NCCL outlives the context, see dp__nccl_borrow. */
typedef struct dp__nccl_comm {
    dp_comm base;
    dp_comm *near;        /* dp_cuda_coll(), for one process */
    dp__journal *journal; /* NULL: there are no other processes */
    int rank_first, rank_count, local_count, timeout_ms;
    int gpu_first, gpu_count, job_gpu_count; /* local GPUs; all GPUs of the job */
    bool ordered;
    size_t least, slot_bytes;
    int *job_gpus;          /* the GPU of each rank of the job */
    dp__nccl_gpu *gpus;     /* local */
    dp__nccl_slice *slices; /* of each GPU of the job */
    dp__cuda_rank *ranks;   /* local */
    atomic_ullong carried, carried_bytes, carried_near;
    dp__lock lock; /* around every call of NCCL, and for what follows */
    dp_status failed;
    int culprit;
    char text[DP__TEXT_BYTES];
    unsigned calls[DP__NCCL_WATCHED]; /* their numbers on the lane */
    unsigned head, tail;              /* begun, ended */
    bool announced;                   /* a collective, once: groups are of those since then */
    uint64_t since_ns; /* since then the oldest one under way has kept all GPUs here waiting */
    bool kept;         /* there is a keeper, and communicators that it is to destroy */
    struct dp__nccl_comm *next; /* of all that are kept */
    dp__thread thread;
    atomic_int order; /* dp__nccl_order */
    atomic_uint bell;
    atomic_uint over; /* 1: the keeper is done; 2: dp_close has gone on without it */
    dp__lock lent;    /* around each use of what is the context's */
    bool orphaned;    /* under it: the context is gone */
} dp__nccl_comm;
_Static_assert(offsetof(dp__nccl_comm, base) == 0, "a dp_comm is the head of its communicator");

static dp__nccl_comm *dp__nccl_of(dp_comm *comm)
{
    return (dp__nccl_comm *)comm;
}

typedef struct dp__nccl_call { /* one collective */
    dp__nccl_comm *comm;
    dp_coll_call asked;
    size_t size, bytes; /* of an element; of asked.count */
    bool captured;
} dp__nccl_call;

typedef dp_status dp__nccl_way(const dp__nccl_call *call);

static size_t dp__nccl_least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int dp__nccl_job_gpu(const dp__nccl_comm *comm, int local_rank)
{
    return comm->job_gpus[comm->rank_first + local_rank];
}

/* Whether a local rank is on this local GPU. */
static bool dp__nccl_is_on(const dp__nccl_comm *comm, int local_rank, int gpu)
{
    return dp__nccl_job_gpu(comm, local_rank) == comm->gpu_first + gpu;
}

static dp_stream *dp__nccl_stream(const dp__nccl_call *call, int gpu)
{
    return call->asked.local[call->comm->gpus[gpu].lead].stream;
}

static cudaStream_t dp__nccl_native(const dp__nccl_call *call, int gpu)
{
    return dp__cuda_stream_of(dp__nccl_stream(call, gpu))->native;
}

static bool dp__nccl_one_each(const dp__nccl_comm *comm)
{
    return comm->job_gpu_count == comm->rank_count;
}

/* The first local rank on this GPU that wants what is reduced; -1: none does. */
static int dp__nccl_taker(const dp__nccl_call *call, int gpu)
{
    for (int i = call->comm->gpus[gpu].lead; i < call->comm->local_count; i++)
        if (dp__nccl_is_on(call->comm, i, gpu) && call->asked.local[i].recv != NULL)
            return i;
    return -1;
}

/* ==== >>failing ================================================================================
   A failure in NCCL fails the job, and the first one stays: later ones are its consequences. From
   then on only the keeper calls NCCL.                                                          */

static dp_status dp__nccl_status(ncclResult_t code)
{
    switch ((int)code) {
    case ncclUnhandledCudaError:
        return DP_ERR_DEVICE;
    case ncclSystemError:
    case ncclRemoteError:
        return DP_ERR_REMOTE;
    default:
        return DP_ERR_INTERNAL;
    }
}

/* The job and the devices are the context's, and a keeper that hangs in NCCL outlives it. So they
   are used between these two only, where nothing calls NCCL or CUDA: dp__nccl_orphan waits. */
static dp_status dp__nccl_borrow(dp__nccl_comm *comm)
{
    dp__lock_enter(&comm->lent);
    if (!comm->orphaned)
        return DP_OK;
    dp__lock_leave(&comm->lent);
    return dp_error(DP_ERR_ABORTED, "nccl: the context has been closed");
}

static dp_status dp__nccl_give_back(dp__nccl_comm *comm, dp_status status)
{
    dp__lock_leave(&comm->lent);
    return status;
}

/* From here on the communicator has only its own memory. */
static void dp__nccl_orphan(dp__nccl_comm *comm)
{
    dp__lock_enter(&comm->lent);
    comm->orphaned = true;
    dp__lock_leave(&comm->lent);
}

/* What others have said. */
static dp_status dp__nccl_news(dp__nccl_comm *comm)
{
    DP_TRY(dp__nccl_borrow(comm));
    return dp__nccl_give_back(comm,
                              comm->journal != NULL ? dp__job_heard(comm->journal->job) : DP_OK);
}

/* see >>keeper */
static dp_status dp__nccl_doubt(dp__nccl_comm *comm, unsigned number, uint64_t waited_ns);

/* NCCL may notice that a process has gone before others can see who it was: they have some time. */
static dp_status dp__nccl_late_news(dp__nccl_comm *comm)
{
    uint64_t until = dp__os_after_ms(DP__NCCL_NEWS_MS);
    dp_status first = dp__nccl_news(comm);
    while (first == DP_OK && dp__os_now_ns() < until) {
        dp__os_sleep_ms(1);
        first = comm->tail != comm->head ? dp__nccl_doubt(comm, comm->tail, 0) : DP_OK;
        first = first == DP_OK ? dp__nccl_news(comm) : first;
    }
    return first;
}

/* The first failure in the job. */
static dp_status dp__nccl_tell(dp__nccl_comm *comm, dp_status status)
{
    char text[DP__TEXT_BYTES];
    int rank = dp__of_thread.culprit > 0 ? dp__of_thread.culprit - 1 : comm->rank_first;
    snprintf(text, sizeof text, "%s", dp__of_thread.text);
    dp_status first = status == DP_ERR_REMOTE ? dp__nccl_late_news(comm) : dp__nccl_news(comm);
    if (first != DP_OK)
        return first;
    if (comm->journal != NULL) {
        DP_TRY(dp__nccl_borrow(comm));
        dp__job_spread_own(comm->journal->job, status, rank, text);
        (void)dp__nccl_give_back(comm, DP_OK);
    }
    first = dp__nccl_news(comm);
    return first != DP_OK ? first : dp_error(status, "%s", text);
}

/* The keeper looks at once. */
static void dp__nccl_ring(dp__nccl_comm *comm)
{
    atomic_fetch_add(&comm->bell, 1);
    dp__os_word_wake(&comm->bell);
}

/* Under the lock. The sentence is this thread's last one. Whatever it is to this process, it is a
   failure of the job: others may be in the same collective. */
static dp_status dp__nccl_fail(dp__nccl_comm *comm, dp_status status)
{
    if (comm->failed == DP_OK && dp_status_class(status) != DP_CLASS_JOB)
        status = dp_error(DP_ERR_INTERNAL, "%s (%s)", dp__of_thread.text, dp_status_name(status));
    if (comm->failed == DP_OK) {
        comm->failed = dp__nccl_tell(comm, status);
        comm->culprit = dp__of_thread.culprit;
        snprintf(comm->text, sizeof comm->text, "%s", dp__of_thread.text);
        dp__nccl_ring(comm);
    }
    dp__of_thread.culprit = comm->culprit;
    return dp_error(comm->failed, "%s", comm->text);
}

/* Under the lock. A code, or what the communicator of a GPU has to say about it. */
static dp_status dp__nccl_check(dp__nccl_comm *comm, const char *fn, const dp__nccl_gpu *gpu,
                                ncclResult_t code)
{
    if (code == ncclSuccess || code == ncclInProgress)
        return DP_OK;
    const char *more = dp__nccl.ncclGetLastError(gpu->comm);
    (void)dp__cuda.cudaGetLastError();
    dp_error(dp__nccl_status(code), "nccl: %s on GPU %d: %s (%d)%s%.200s", fn,
             gpu->physical->ordinal, dp__nccl.ncclGetErrorString(code), (int)code,
             more != NULL && more[0] != '\0' ? ": " : "", more != NULL ? more : "");
    return dp__nccl_fail(comm, dp__nccl_status(code));
}

/* Under the lock: NCCL may be called. */
static dp_status dp__nccl_usable(dp__nccl_comm *comm)
{
    return comm->failed == DP_OK ? DP_OK : dp__nccl_fail(comm, comm->failed);
}

/* Under the lock: what others, or NCCL, have found out. out_busy: NCCL still works at what it was
   given last. */
static dp_status dp__nccl_heard(dp__nccl_comm *comm, bool *out_busy)
{
    dp_status status = DP_OK;
    *out_busy = false;
    if (comm->failed == DP_OK)
        status = dp__nccl_news(comm);
    if (status == DP_OK && atomic_load(&comm->order) == DP__NCCL_ABORT)
        status = dp_error(DP_ERR_ABORTED, "nccl: the context was aborted");
    if (status != DP_OK)
        return dp__nccl_fail(comm, status);
    for (int g = 0; g < comm->gpu_count && comm->failed == DP_OK; g++) {
        ncclResult_t state = ncclSuccess;
        const dp__nccl_gpu *gpu = &comm->gpus[g];
        if (gpu->comm == NULL)
            continue;
        DP_TRY(dp__nccl_check(comm, "ncclCommGetAsyncError", gpu,
                              dp__nccl.ncclCommGetAsyncError(gpu->comm, &state)));
        DP_TRY(dp__nccl_check(comm, "what was begun before", gpu, state));
        *out_busy = *out_busy || state == ncclInProgress;
    }
    return dp__nccl_usable(comm);
}

/* ==== >>keeper ===================================================================================
   Nobody who waits for a stream can be told that others will not come: the wait is CUDA's. So a
   thread of its own looks every few milliseconds what NCCL has found out, whether the context was
   aborted, what others have said, and whether what is under way takes too long. If so it aborts the
   communicators, and the GPUs let go of what they wait for. It destroys them, too. All of that may
   hang in NCCL: then dp_close goes on without, and a keeper that comes back finds itself an orphan.

   A collective waits for other processes from the moment on when all GPUs here have come to it, on
   their streams, until all have done it. Two marks tell.                                        */

/* What a mark says; not yet reached: false. */
static dp_status dp__nccl_passed(const dp__nccl_gpu *gpu, cudaEvent_t mark, bool *out)
{
    DP_TRY(dp__cuda_enter(gpu->physical));
    cudaError_t code = dp__cuda.cudaEventQuery(mark);
    *out = code == cudaSuccess;
    if (code == cudaErrorNotReady)
        (void)dp__cuda.cudaGetLastError();
    return dp__cuda_leave_after(gpu->physical, "cudaEventQuery",
                                code == cudaErrorNotReady ? cudaSuccess : code);
}

/* Every GPU is asked: one that is lost may be the one for which the first one waits. */
static dp_status dp__nccl_all_passed(const dp__nccl_comm *comm, bool ended, bool *out)
{
    size_t place = comm->tail % DP__NCCL_WATCHED;
    *out = true;
    for (int g = 0; g < comm->gpu_count; g++) {
        const dp__nccl_gpu *gpu = &comm->gpus[g];
        bool passed = false;
        DP_TRY(dp__nccl_passed(gpu, ended ? gpu->ended[place] : gpu->begun[place], &passed));
        *out = *out && passed;
    }
    return DP_OK;
}

/* It is not sure that others will come to collective `number`; why, if they will not. */
static dp_status dp__nccl_doubt(dp__nccl_comm *comm, unsigned number, uint64_t waited_ns)
{
    unsigned seq = comm->calls[number % DP__NCCL_WATCHED];
    if (comm->journal != NULL) {
        DP_TRY(dp__nccl_borrow(comm));
        return dp__nccl_give_back(comm, dp__journal_look(comm->journal, seq, waited_ns));
    }
    if (waited_ns < (uint64_t)comm->timeout_ms * 1000000)
        return DP_OK;
    return dp_error(DP_ERR_TIMEOUT, "nccl: what was begun did not end within %d ms",
                    comm->timeout_ms);
}

static dp_status dp__nccl_ended(dp__nccl_comm *comm, unsigned seq)
{
    if (comm->journal == NULL)
        return DP_OK;
    DP_TRY(dp__nccl_borrow(comm));
    return dp__nccl_give_back(comm, dp__journal_ended_to(comm->journal, seq));
}

/* Under the lock: collectives that have ended are forgotten, the oldest other one is looked at. */
static dp_status dp__nccl_look(dp__nccl_comm *comm)
{
    bool passed = true;
    while (comm->tail != comm->head) {
        DP_TRY(dp__nccl_all_passed(comm, true, &passed));
        if (!passed)
            break;
        DP_TRY(dp__nccl_ended(comm, comm->calls[comm->tail % DP__NCCL_WATCHED]));
        comm->tail++;
        comm->since_ns = 0;
    }
    if (comm->tail == comm->head)
        return DP_OK;
    DP_TRY(dp__nccl_all_passed(comm, false, &passed));
    if (passed && comm->since_ns == 0)
        comm->since_ns = dp__os_now_ns();
    return passed ? dp__nccl_doubt(comm, comm->tail, dp__os_now_ns() - comm->since_ns) : DP_OK;
}

/* Once around. */
static dp_status dp__nccl_watch_once(dp__nccl_comm *comm)
{
    const dp__cuda_gpu *gpu = comm->gpus[0].physical;
    bool busy = false;
    dp__of_thread.culprit = 0;
    dp__lock_enter(&comm->lock);
    dp_status status = dp__cuda_enter(gpu);
    if (status == DP_OK) {
        status = dp__nccl_heard(comm, &busy);
        if (status == DP_OK)
            status = dp__nccl_look(comm);
        status = dp__cuda_leave(gpu, status);
    }
    if (status != DP_OK)
        status = dp__nccl_fail(comm, status);
    dp__lock_leave(&comm->lock);
    return status;
}

/* Not under the lock, for which others may wait: they find that it has failed. Streams go on now,
   with nothing done: whoever waits for them hears of it. What a lost GPU has stays, as does what an
   orphan has. */
static void dp__nccl_abort_all(dp__nccl_comm *comm)
{
    if (dp__nccl_borrow(comm) != DP_OK)
        return;
    for (int i = 0; i < comm->local_count; i++)
        atomic_store_explicit(&comm->ranks[i].dev->failed, &comm->base, memory_order_release);
    (void)dp__nccl_give_back(comm, DP_OK);
    for (int g = 0; g < comm->gpu_count; g++)
        if (comm->gpus[g].comm != NULL && dp__cuda_enter(comm->gpus[g].physical) == DP_OK) {
            (void)dp__nccl.ncclCommAbort(comm->gpus[g].comm);
            (void)dp__cuda_leave(comm->gpus[g].physical, DP_OK);
        }
}

/* There are no communicators yet if another process could not join. */
static bool dp__nccl_group(dp__nccl_comm *comm, ncclResult_t (*fn)(ncclComm_t comm))
{
    bool good = true;
    if (dp__nccl.ncclGroupStart() != ncclSuccess)
        return false;
    for (int g = 0; g < comm->gpu_count && good; g++) {
        ncclComm_t own = comm->gpus[g].comm;
        ncclResult_t code = own != NULL ? fn(own) : ncclSuccess;
        good = code == ncclSuccess || code == ncclInProgress;
    }
    ncclResult_t code = dp__nccl.ncclGroupEnd();
    return good && (code == ncclSuccess || code == ncclInProgress);
}

/* Nothing is under way any more, as streams were waited for. What NCCL still sends for others is
   given some time. With a context, so that NCCL does not make one on another GPU for this thread.
   False: they are still to be aborted. */
static bool dp__nccl_destroy_all(dp__nccl_comm *comm)
{
    uint64_t until = dp__os_after_ms(DP__NCCL_CLOSE_MS);
    bool busy = true, good = dp__nccl_group(comm, dp__nccl.ncclCommFinalize);
    while (good && busy) {
        good = dp__nccl_heard(comm, &busy) == DP_OK && dp__os_now_ns() < until;
        if (busy)
            dp__os_sleep_ms(1);
    }
    if (good)
        (void)dp__nccl_group(comm, dp__nccl.ncclCommDestroy);
    (void)dp__cuda.cudaGetLastError();
    return good;
}

static void dp__nccl_free(dp__nccl_comm *comm)
{
    dp__os_free(comm->job_gpus, 0, NULL);
    dp__os_free(comm->gpus, 0, NULL);
    dp__os_free(comm->slices, 0, NULL);
    dp__os_free(comm->ranks, 0, NULL);
    dp__os_free(comm, 0, NULL);
}

static void dp__nccl_end(dp__nccl_comm *comm)
{
    const dp__cuda_gpu *gpu = comm->gpus[0].physical;
    dp__lock_enter(&comm->lock);
    bool gone = false, failed = comm->failed != DP_OK;
    dp__lock_leave(&comm->lock);
    if (!failed && dp__cuda_enter(gpu) == DP_OK) {
        gone = dp__nccl_destroy_all(comm);
        (void)dp__cuda_leave(gpu, DP_OK);
    }
    if (!gone)
        dp__nccl_abort_all(comm);
}

/* Until the streams are free again, if that does not take too long. */
static void dp__nccl_let_go(dp__nccl_comm *comm, int most_ms)
{
    uint64_t until = dp__os_after_ms(most_ms);
    while (atomic_load(&comm->over) == 0 && dp__os_now_ns() < until)
        dp__os_word_wait(&comm->over, 0, 100000000);
}

static dp__nccl_comm *dp__nccl_kept; /* under dp__nccl_lock */

/* Returns true if a collective is under way. One that has failed is not, once the keeper has
   aborted it. */
static bool dp__nccl_is_busy(dp__nccl_comm *comm)
{
    dp__lock_enter(&comm->lock);
    dp_status status = comm->failed == DP_OK ? dp__nccl_look(comm) : comm->failed;
    if (status != DP_OK)
        (void)dp__nccl_fail(comm, status);
    bool failed = comm->failed != DP_OK, busy = !failed && comm->head != comm->tail;
    dp__lock_leave(&comm->lock);
    if (failed)
        dp__nccl_let_go(comm, DP__NCCL_CLOSE_MS);
    return busy;
}

/* Whoever waits in a job of other processes for their collectives, while they may wait for this
   one, is held up: no order among contexts is agreed upon. */
static void dp__nccl_hold(const dp_host *host, int by)
{
    dp__job *job = dp__job_of(host);
    if (job != NULL)
        atomic_fetch_add(&dp__progress_of(job, job->process)->held, (unsigned)by);
}

static void dp__nccl_calm_one(dp__nccl_comm *comm, const dp_host *host)
{
    if (!dp__nccl_is_busy(comm))
        return;
    bool others = comm->base.host != host;
    if (others)
        dp__nccl_hold(host, 1);
    do
        dp__os_sleep_ms(1);
    while (dp__nccl_is_busy(comm));
    if (others)
        dp__nccl_hold(host, -1);
}

/* A communicator that fails meanwhile says so to its own context, and not to this caller. */
static void dp__nccl_calm(const dp_host *host)
{
    char text[DP__TEXT_BYTES];
    int culprit = dp__of_thread.culprit;
    bool fresh = dp__of_thread.fresh;
    memcpy(text, dp__of_thread.text, sizeof text);
    dp__lock_enter(&dp__nccl_lock);
    for (dp__nccl_comm *comm = dp__nccl_kept; comm != NULL; comm = comm->next)
        dp__nccl_calm_one(comm, host);
    dp__lock_leave(&dp__nccl_lock);
    memcpy(dp__of_thread.text, text, sizeof text);
    dp__of_thread.culprit = culprit;
    dp__of_thread.fresh = fresh;
}

static void (*dp__cuda_calm)(const dp_host *host) = dp__nccl_calm;

static void dp__nccl_list(dp__nccl_comm *comm, bool kept)
{
    dp__lock_enter(&dp__nccl_lock);
    dp__nccl_comm **link = &dp__nccl_kept;
    while (*link != NULL && *link != comm)
        link = &(*link)->next;
    if (kept)
        *link = comm;
    else if (*link != NULL)
        *link = comm->next;
    dp__lock_leave(&dp__nccl_lock);
}

static void *dp__nccl_keep(void *user)
{
    dp__nccl_comm *comm = user;
    while (atomic_load(&comm->order) != DP__NCCL_CLOSE) {
        unsigned seen = atomic_load(&comm->bell);
        if (dp__nccl_watch_once(comm) != DP_OK)
            break;
        if (atomic_load(&comm->order) == DP__NCCL_WATCH)
            dp__os_word_wait(&comm->bell, seen, DP__NCCL_LOOK_NS);
    }
    dp__nccl_end(comm);
    bool alone = atomic_fetch_or(&comm->over, 1) != 0;
    dp__os_word_wake(&comm->over);
    if (alone)
        dp__nccl_free(comm);
    return NULL;
}

static void dp__nccl_bid(dp__nccl_comm *comm, dp__nccl_order order)
{
    int before = DP__NCCL_WATCH;
    if (order == DP__NCCL_CLOSE)
        atomic_store(&comm->order, order);
    else
        (void)atomic_compare_exchange_strong(&comm->order, &before, order);
    dp__nccl_ring(comm);
}

/* ==== >>groups ===================================================================================
   A collective is one group of calls, one for each GPU here. NCCL does not block: it may still work
   at a group when the call has returned, and until it has done so the streams are not to be used.
   So each group is waited for; that is a matter of the host, and does not wait for the GPUs of
   others once connections are made.                                                             */

/* The lock is held, and a context, until dp__nccl_group_end. */
static dp_status dp__nccl_group_begin(dp__nccl_comm *comm)
{
    const dp__cuda_gpu *gpu = comm->gpus[0].physical;
    DP_TRY(dp__cuda_enter(gpu));
    dp__lock_enter(&comm->lock);
    dp_status status = dp__nccl_usable(comm);
    if (status == DP_OK)
        status = dp__nccl_check(comm, "ncclGroupStart", &comm->gpus[0], dp__nccl.ncclGroupStart());
    if (status == DP_OK)
        return DP_OK;
    dp__lock_leave(&comm->lock);
    return dp__cuda_leave(gpu, status);
}

/* Under the lock. Connections are made with all who come to the collective, so that others are
   waited for before it can be watched. */
static dp_status dp__nccl_unsettled(dp__nccl_comm *comm, uint64_t waited_ns)
{
    dp_status status = DP_OK;
    if (comm->announced)
        status = dp__nccl_doubt(comm, comm->head, waited_ns);
    else if (waited_ns > (uint64_t)comm->timeout_ms * 1000000)
        status = dp_error(DP_ERR_TIMEOUT, "nccl: connections were not made within %d ms",
                          comm->timeout_ms);
    return status == DP_OK ? DP_OK : dp__nccl_fail(comm, status);
}

/* Until NCCL has done what it was given. */
static dp_status dp__nccl_settle(dp__nccl_comm *comm)
{
    uint64_t begun = dp__os_now_ns(), waited = 0;
    bool busy = true;
    while (true) {
        dp__lock_enter(&comm->lock);
        dp_status status = dp__nccl_heard(comm, &busy);
        waited = dp__os_now_ns() - begun;
        if (status == DP_OK && busy && waited > 1000000)
            status = dp__nccl_unsettled(comm, waited);
        dp__lock_leave(&comm->lock);
        if (status != DP_OK || !busy)
            return status;
        if (waited > 1000000)
            dp__os_sleep_ms(1);
        else
            dp__os_pause();
    }
}

/* A group that was begun is ended, whatever happened in it. */
static dp_status dp__nccl_group_end(dp__nccl_comm *comm, dp_status status)
{
    const dp__cuda_gpu *gpu = comm->gpus[0].physical;
    ncclResult_t code = dp__nccl.ncclGroupEnd();
    dp_status ended = dp__nccl_check(comm, "ncclGroupEnd", &comm->gpus[0], code);
    status = status != DP_OK ? dp__nccl_fail(comm, status) : ended;
    dp__lock_leave(&comm->lock);
    if (status == DP_OK && code == ncclInProgress)
        status = dp__nccl_settle(comm);
    if (status != DP_OK)
        dp__nccl_let_go(comm, DP__NCCL_CLOSE_MS);
    return dp__cuda_leave(gpu, status);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* The streams of all local ranks on a GPU meet in that of the lead: before what it does for them,
   or after. */
static dp_status dp__nccl_meet(const dp__nccl_call *call, bool before)
{
    const dp__nccl_comm *comm = call->comm;
    const dp_part *local = call->asked.local;
    for (int g = 0; g < comm->gpu_count; g++) {
        int lead = comm->gpus[g].lead;
        if (!before && !dp__nccl_one_each(comm))
            DP_TRY(dp__cuda_mark(&comm->ranks[lead], &local[lead]));
        for (int i = lead + 1; i < comm->local_count; i++) {
            if (!dp__nccl_is_on(comm, i, g))
                continue;
            if (before)
                DP_TRY(dp__cuda_mark(&comm->ranks[i], &local[i]));
            DP_TRY(before ? dp__cuda_heed(&comm->ranks[lead], &local[lead], &comm->ranks[i])
                          : dp__cuda_heed(&comm->ranks[i], &local[i], &comm->ranks[lead]));
        }
    }
    return DP_OK;
}

/* A place among those that are watched; who is far ahead of the GPUs waits for one. */
static dp_status dp__nccl_place(dp__nccl_comm *comm)
{
    for (bool full = true; full;) {
        dp__lock_enter(&comm->lock);
        dp_status status = dp__nccl_usable(comm);
        full = comm->head - comm->tail == DP__NCCL_WATCHED;
        dp__lock_leave(&comm->lock);
        DP_TRY(status);
        if (full)
            dp__os_sleep_ms(1);
    }
    return DP_OK;
}

static dp_status dp__nccl_marks(const dp__nccl_call *call, bool ended)
{
    dp__nccl_comm *comm = call->comm;
    size_t place = comm->head % DP__NCCL_WATCHED;
    for (int g = 0; g < comm->gpu_count && !call->captured; g++) {
        const dp__nccl_gpu *gpu = &comm->gpus[g];
        DP_TRY(dp__cuda_record(gpu->physical, ended ? gpu->ended[place] : gpu->begun[place],
                               dp__nccl_native(call, g)));
    }
    return DP_OK;
}

/* Others may be waited for from now on. */
static void dp__nccl_announce(const dp__nccl_call *call)
{
    dp__nccl_comm *comm = call->comm;
    dp__lock_enter(&comm->lock);
    if (comm->journal != NULL)
        comm->calls[comm->head % DP__NCCL_WATCHED] = (unsigned)comm->journal->now.seq;
    comm->announced = true;
    dp__lock_leave(&comm->lock);
}

/* What is captured runs later, perhaps often: nobody can watch it, and only one GPU in a process
   may wait for others in it. */
static dp_status dp__nccl_captured(const dp__nccl_call *call, bool *out)
{
    *out = false;
    for (int i = 0; i < call->comm->local_count && !*out; i++)
        DP_TRY(dp__cuda_captures(call->asked.local[i].stream, out));
    if (*out && call->comm->near == NULL && call->comm->gpu_count > 1)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "nccl: a collective with other processes can be captured where a process "
                        "drives one GPU, this one drives %d",
                        call->comm->gpu_count);
    return DP_OK;
}

/* NCCL orders what it does itself, whatever the streams, but not the sums of slices, which read
   slots that the next collective may write to. */
static dp_status dp__nccl_follow(const dp__nccl_call *call)
{
    const dp__nccl_comm *comm = call->comm;
    size_t before = (comm->head + DP__NCCL_WATCHED - 1) % DP__NCCL_WATCHED;
    for (int g = 0; g < comm->gpu_count && !call->captured && comm->head != 0; g++)
        DP_TRY(dp__cuda_await(comm->gpus[g].physical, dp__nccl_native(call, g),
                              comm->gpus[g].ended[before]));
    return DP_OK;
}

static dp_status dp__nccl_run_inside(const dp__nccl_call *call, dp__nccl_way *way)
{
    dp__nccl_comm *comm = call->comm;
    dp__nccl_announce(call);
    DP_TRY(dp__nccl_follow(call));
    DP_TRY(dp__nccl_meet(call, true));
    DP_TRY(dp__nccl_marks(call, false));
    DP_TRY(way(call));
    DP_TRY(dp__nccl_marks(call, true));
    DP_TRY(dp__nccl_meet(call, false));
    atomic_fetch_add_explicit(&comm->carried, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&comm->carried_bytes, call->bytes, memory_order_relaxed);
    dp__lock_enter(&comm->lock);
    comm->head += !call->captured;
    dp__lock_leave(&comm->lock);
    return DP_OK;
}

/* With a context for marks; launches enter that of their own GPU. */
static dp_status dp__nccl_run(const dp__nccl_call *call, dp__nccl_way *way)
{
    dp__nccl_comm *comm = call->comm;
    const dp__cuda_gpu *gpu = comm->gpus[0].physical;
    DP_TRY(dp__nccl_place(comm));
    DP_TRY(dp__cuda_enter(gpu));
    dp_status status = dp__cuda_leave(gpu, dp__nccl_run_inside(call, way));
    if (status == DP_OK || call->captured || comm->near != NULL)
        return status;
    dp__lock_enter(&comm->lock);
    status = dp__nccl_fail(comm, status);
    dp__lock_leave(&comm->lock);
    return status;
}

/* A copy on a GPU, by the stream of its lead. */
static dp_status dp__nccl_copy(const dp__nccl_call *call, int gpu, void *to, const void *from,
                               size_t bytes)
{
    return to != from ? dp__cuda_copy(dp__nccl_stream(call, gpu), to, from, bytes) : DP_OK;
}

/* What one local rank has received goes to all others on its GPU that want it. -1: none does. */
static dp_status dp__nccl_share(const dp__nccl_call *call, int gpu, int from, size_t at,
                                size_t bytes)
{
    if (from < 0)
        return DP_OK;
    const char *src = call->asked.local[from].recv;
    for (int i = call->comm->gpus[gpu].lead; i < call->comm->local_count; i++)
        if (i != from && dp__nccl_is_on(call->comm, i, gpu) && call->asked.local[i].recv != NULL)
            DP_TRY(
                dp__nccl_copy(call, gpu, (char *)call->asked.local[i].recv + at, src + at, bytes));
    return DP_OK;
}

/* Bytes of one GPU to another, in a group. Those of a pair arrive in the order in which they were
   sent, so both sides go through ranks in the same order. */
static dp_status dp__nccl_send(const dp__nccl_call *call, int gpu, const void *data, size_t bytes,
                               int job_gpu)
{
    dp__nccl_comm *comm = call->comm;
    if (bytes == 0)
        return DP_OK;
    return dp__nccl_check(comm, "ncclSend", &comm->gpus[gpu],
                          dp__nccl.ncclSend(data, bytes, ncclUint8, job_gpu, comm->gpus[gpu].comm,
                                            dp__nccl_native(call, gpu)));
}

static dp_status dp__nccl_take(const dp__nccl_call *call, int gpu, void *data, size_t bytes,
                               int job_gpu)
{
    dp__nccl_comm *comm = call->comm;
    if (bytes == 0)
        return DP_OK;
    return dp__nccl_check(comm, "ncclRecv", &comm->gpus[gpu],
                          dp__nccl.ncclRecv(data, bytes, ncclUint8, job_gpu, comm->gpus[gpu].comm,
                                            dp__nccl_native(call, gpu)));
}

/* One group of calls, in which each GPU has a turn. */
static dp_status dp__nccl_each(const dp__nccl_call *call,
                               dp_status (*turn)(const dp__nccl_call *call, int gpu))
{
    dp__nccl_comm *comm = call->comm;
    dp_status status = DP_OK;
    DP_TRY(dp__nccl_group_begin(comm));
    for (int g = 0; g < comm->gpu_count && status == DP_OK; g++)
        status = turn(call, g);
    return dp__nccl_group_end(comm, status);
}

/* ==== >>natively =================================================================================
   Sums that NCCL makes: of floats, with a factor that goes with them, and what is exact in any
   order. Halves are rounded at each step, as everywhere with NCCL; but a factor of theirs has to be
   a power of two, since it would be rounded first. What else there is, smallest and largest floats
   among it, whose NaN would depend on NCCL's version, is made of slices.                        */

static bool dp__nccl_dtype(dp_dtype dtype, ncclDataType_t *out)
{
    static const int types[DP_DTYPE_COUNT] = {[DP_F32] = ncclFloat32, [DP_F64] = ncclFloat64,
                                              [DP_F16] = ncclFloat16, [DP_BF16] = ncclBfloat16,
                                              [DP_I64] = ncclInt64,   [DP_I32] = ncclInt32,
                                              [DP_I16] = -1,          [DP_I8] = ncclInt8,
                                              [DP_U8] = ncclUint8,    [DP_BOOL] = ncclUint8};
    *out = (ncclDataType_t)types[dtype];
    return types[dtype] >= 0;
}

/* What every sum is multiplied by. */
static double dp__nccl_factor(const dp__nccl_call *call)
{
    return call->asked.op == DP_OP_MEAN ? call->asked.scale / call->comm->rank_count
                                        : call->asked.scale;
}

/* NaN equals nothing. */
static bool dp__nccl_equals(double a, double b)
{
    return a >= b && a <= b;
}

static bool dp__nccl_can_add(const dp__nccl_call *call)
{
    ncclDataType_t type;
    int exponent;
    double factor = dp__nccl_factor(call);
    if (call->comm->ordered || !dp__nccl_dtype(call->asked.dtype, &type))
        return false;
    if (call->asked.dtype > DP_BF16)
        return call->asked.op != DP_OP_MEAN && dp__nccl_equals(factor, 1);
    if (call->asked.op != DP_OP_SUM && call->asked.op != DP_OP_MEAN)
        return false;
    if (call->asked.dtype == DP_F32 || call->asked.dtype == DP_F64)
        return true;
    double half = frexp(factor, &exponent); /* f16 has normal numbers from 2^-14 to 2^15 */
    return dp__nccl_equals(half, 0.5) && exponent >= -13 && exponent <= 16;
}

/* Bools are 0 and 1: their sum is the largest of them, their product the smallest. */
static ncclRedOp_t dp__nccl_op(const dp__nccl_call *call)
{
    bool yes_no = call->asked.dtype == DP_BOOL;
    switch (call->asked.op) {
    case DP_OP_PROD:
        return yes_no ? ncclMin : ncclProd;
    case DP_OP_MIN:
        return ncclMin;
    case DP_OP_MAX:
        return ncclMax;
    case DP_OP_SUM:
    case DP_OP_MEAN:
        break;
    }
    return yes_no ? ncclMax : ncclSum;
}

/* The factor as a number of the dtype; of halves it is a power of two. */
static void dp__nccl_number(double factor, dp_dtype dtype, void *out)
{
    float narrow = (float)factor;
    int exponent;
    (void)frexp(factor, &exponent);
    unsigned power = (unsigned)(exponent - 1 + (dtype == DP_F16 ? 15 : 127));
    uint16_t half = (uint16_t)(power << (dtype == DP_F16 ? 10 : 7));
    if (dtype == DP_F64)
        memcpy(out, &factor, sizeof factor);
    else if (dtype == DP_F32)
        memcpy(out, &narrow, sizeof narrow);
    else
        memcpy(out, &half, sizeof half);
}

/* With the lock: the operation with a factor, kept as long as the next call wants the same. */
static dp_status dp__nccl_scale(const dp__nccl_call *call, dp__nccl_gpu *gpu, double factor)
{
    dp__nccl_comm *comm = call->comm;
    ncclDataType_t type;
    uint64_t number = 0;
    (void)dp__nccl_dtype(call->asked.dtype, &type);
    if (gpu->has_scaled && gpu->scaled_dtype == call->asked.dtype &&
        dp__nccl_equals(gpu->factor, factor))
        return DP_OK;
    if (gpu->has_scaled)
        DP_TRY(dp__nccl_check(comm, "ncclRedOpDestroy", gpu,
                              dp__nccl.ncclRedOpDestroy(gpu->scaled, gpu->comm)));
    gpu->has_scaled = false;
    dp__nccl_number(factor, call->asked.dtype, &number);
    DP_TRY(dp__nccl_check(comm, "ncclRedOpCreatePreMulSum", gpu,
                          dp__nccl.ncclRedOpCreatePreMulSum(&gpu->scaled, &number, type,
                                                            ncclScalarHostImmediate, gpu->comm)));
    gpu->has_scaled = true;
    gpu->scaled_dtype = call->asked.dtype;
    gpu->factor = factor;
    return DP_OK;
}

static dp_status dp__nccl_add_turn(const dp__nccl_call *call, int place)
{
    dp__nccl_gpu *gpu = &call->comm->gpus[place];
    ncclDataType_t type;
    ncclRedOp_t op = dp__nccl_op(call);
    double factor = dp__nccl_factor(call);
    (void)dp__nccl_dtype(call->asked.dtype, &type);
    if (!dp__nccl_equals(factor, 1)) {
        DP_TRY(dp__nccl_scale(call, gpu, factor));
        op = gpu->scaled;
    }
    if (call->asked.verb == DP_REDUCE_SCATTER)
        return dp__nccl_check(call->comm, "ncclReduceScatter", gpu,
                              dp__nccl.ncclReduceScatter(gpu->send, gpu->recv, call->asked.count,
                                                         type, op, gpu->comm,
                                                         dp__nccl_native(call, place)));
    return dp__nccl_check(call->comm, "ncclAllReduce", gpu,
                          dp__nccl.ncclAllReduce(gpu->send, gpu->recv, call->asked.count, type, op,
                                                 gpu->comm, dp__nccl_native(call, place)));
}

/* Memory for a result that no rank on the GPU wants. What used it is done when it is given back, as
   dp_cuda.h waits then; what a graph uses goes with the communicator, or the device. */
static dp_status dp__nccl_spare(const dp__nccl_call *call, int place)
{
    dp__nccl_gpu *gpu = &call->comm->gpus[place];
    bool fits = gpu->spare_bytes >= call->bytes, kept = gpu->spare_captured;
    gpu->spare_captured = (fits && kept) || call->captured;
    if (fits)
        return DP_OK;
    if (gpu->spare != NULL && !kept)
        dp__cuda_free(&gpu->dev->base, gpu->spare, gpu->spare_bytes);
    gpu->spare = NULL;
    gpu->spare_bytes = 0;
    DP_TRY(dp__cuda_alloc(&gpu->dev->base, call->bytes, &gpu->spare));
    gpu->spare_bytes = call->bytes;
    return DP_OK;
}

/* What a GPU gives: the send of its one rank, as in a reduce-scatter always, or the sum of those of
   all, where the result goes. */
static dp_status dp__nccl_prepare(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    dp__nccl_gpu *gpu = &comm->gpus[place];
    const void *in[DP__CUDA_OPERANDS];
    int taker = dp__nccl_taker(call, place);
    dp_kernel_args args =
        dp__reduction(&call->asked, call->asked.dtype, call->asked.count, comm->rank_count, false);
    args.out = &gpu->recv;
    args.in = in;
    args.out_count = 1;
    if (taker < 0)
        DP_TRY(dp__nccl_spare(call, place));
    gpu->recv = taker < 0 ? gpu->spare : call->asked.local[taker].recv;
    gpu->send = call->asked.local[gpu->lead].send;
    for (int i = gpu->lead; i < comm->local_count; i++)
        if (dp__nccl_is_on(comm, i, place))
            in[args.in_count++] = call->asked.local[i].send;
    if (args.in_count == 1)
        return DP_OK;
    gpu->send = gpu->recv;
    return dp__cuda_kernel(dp__nccl_stream(call, place), &args);
}

static dp_status dp__nccl_add(const dp__nccl_call *call)
{
    for (int g = 0; g < call->comm->gpu_count; g++)
        DP_TRY(dp__nccl_prepare(call, g));
    DP_TRY(dp__nccl_each(call, dp__nccl_add_turn));
    for (int g = 0; g < call->comm->gpu_count; g++)
        DP_TRY(dp__nccl_share(call, g, dp__nccl_taker(call, g), 0, call->bytes));
    return DP_OK;
}

/* ==== >>slices ===================================================================================
   Sums in the order that was promised. Every GPU adds up one slice of the data: the others send
   theirs into its slots, one for each rank, and one kernel adds up slots and what is here, in the
   tree. Of an all-reduce it then sends the sums to all others. Large data goes in pieces, whose
   slices fill the slots. With R GPUs each sends, and receives, 2 (R - 1) / R of the data, as in a
   ring, and halves are rounded once.                                                            */

static char *dp__nccl_slot(const dp__nccl_comm *comm, int place, int rank)
{
    return (char *)comm->gpus[place].slots + (size_t)rank * comm->slot_bytes;
}

/* Each slice to the GPU that adds it up. */
static dp_status dp__nccl_collect_turn(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    int job_gpu = comm->gpu_first + place;
    size_t bytes = comm->slices[job_gpu].count * call->size;
    for (int i = 0; i < comm->local_count; i++)
        for (int other = 0; other < comm->job_gpu_count && dp__nccl_is_on(comm, i, place);
             other++) {
            const dp__nccl_slice *slice = &comm->slices[other];
            const char *send = (const char *)call->asked.local[i].send + slice->begin * call->size;
            if (other != job_gpu)
                DP_TRY(dp__nccl_send(call, place, send, slice->count * call->size, other));
        }
    for (int rank = 0; rank < comm->rank_count; rank++)
        if (comm->job_gpus[rank] != job_gpu)
            DP_TRY(dp__nccl_take(call, place, dp__nccl_slot(comm, place, rank), bytes,
                                 comm->job_gpus[rank]));
    return DP_OK;
}

/* Where a GPU has the sums that another one, or itself, has made: where a rank wants them, or in a
   slot. */
static char *dp__nccl_sums_at(const dp__nccl_call *call, int place, int job_gpu)
{
    const dp__nccl_comm *comm = call->comm;
    int taker = dp__nccl_taker(call, place);
    if (taker < 0)
        return dp__nccl_slot(comm, place, job_gpu);
    return (char *)call->asked.local[taker].recv + comm->slices[job_gpu].begin * call->size;
}

/* What a rank gives to the GPU's slice: in its memory, or in its slot. */
static const void *dp__nccl_given(const dp__nccl_call *call, int place, int rank)
{
    const dp__nccl_comm *comm = call->comm;
    int job_gpu = comm->gpu_first + place;
    if (comm->job_gpus[rank] != job_gpu)
        return dp__nccl_slot(comm, place, rank);
    return (const char *)call->asked.local[rank - comm->rank_first].send +
           comm->slices[job_gpu].begin * call->size;
}

/* in[0] op in[1] ..., without what comes after. */
static dp_status dp__nccl_tree(const dp__nccl_call *call, int place, dp_dtype dtype,
                               const void *const *in, int in_count, void *out, bool last)
{
    const dp__nccl_comm *comm = call->comm;
    size_t count = comm->slices[comm->gpu_first + place].count;
    dp_kernel_args args = dp__reduction(&call->asked, dtype, count, comm->rank_count, last);
    args.out = &out;
    args.in = in;
    args.out_count = 1;
    args.in_count = (size_t)in_count;
    return dp__cuda_kernel(dp__nccl_stream(call, place), &args);
}

static dp_status dp__nccl_cast(const dp__nccl_call *call, int place, dp_dtype to, void *out,
                               dp_dtype from, const void *in)
{
    dp_kernel_args args = {.kernel = DP_KERNEL_CAST,
                           .dtype = to,
                           .in_dtype = from,
                           .count = call->comm->slices[call->comm->gpu_first + place].count,
                           .out = &out,
                           .in = &in,
                           .out_count = 1,
                           .in_count = 1};
    return dp__cuda_kernel(dp__nccl_stream(call, place), &args);
}

/* More ranks than a kernel takes are added in runs of as many, which are whole parts of the tree;
   halves as f32, for which the second half of each slot is kept. */
static dp_status dp__nccl_sum_run(const dp__nccl_call *call, int place, int first, void *out)
{
    const dp__nccl_comm *comm = call->comm;
    const void *in[DP__CUDA_OPERANDS];
    bool half = dp__is_half(call->asked.dtype);
    int count = (int)dp__nccl_least((size_t)(comm->rank_count - first), DP__CUDA_OPERANDS);
    for (int i = 0; i < count; i++) {
        in[i] = dp__nccl_given(call, place, first + i);
        if (!half)
            continue;
        void *wide = dp__nccl_slot(comm, place, first + i) + comm->slot_bytes / 2;
        DP_TRY(dp__nccl_cast(call, place, DP_F32, wide, call->asked.dtype, in[i]));
        in[i] = wide;
    }
    return dp__nccl_tree(call, place, half ? DP_F32 : call->asked.dtype, in, count, out, false);
}

static dp_status dp__nccl_sum_runs(const dp__nccl_call *call, int place, void *out)
{
    const dp__nccl_comm *comm = call->comm;
    const void *sums[DP__CUDA_OPERANDS];
    bool half = dp__is_half(call->asked.dtype);
    int count = 0;
    void *whole = half ? dp__nccl_slot(comm, place, 0) + comm->slot_bytes / 2 : out;
    for (int first = 0; first < comm->rank_count; first += DP__CUDA_OPERANDS, count++) {
        void *sum = dp__nccl_slot(comm, place, first) + (half ? comm->slot_bytes / 2 : 0);
        DP_TRY(dp__nccl_sum_run(call, place, first, sum));
        sums[count] = sum;
    }
    DP_TRY(dp__nccl_tree(call, place, half ? DP_F32 : call->asked.dtype, sums, count, whole, true));
    return half ? dp__nccl_cast(call, place, call->asked.dtype, out, DP_F32, whole) : DP_OK;
}

/* The GPU's own slice, into `out`. */
static dp_status dp__nccl_sum_slice(const dp__nccl_call *call, int place, void *out)
{
    const dp__nccl_comm *comm = call->comm;
    const void *in[DP__CUDA_OPERANDS];
    if (comm->slices[comm->gpu_first + place].count == 0)
        return DP_OK;
    if (comm->rank_count > DP__CUDA_OPERANDS)
        return dp__nccl_sum_runs(call, place, out);
    for (int rank = 0; rank < comm->rank_count; rank++)
        in[rank] = dp__nccl_given(call, place, rank);
    return dp__nccl_tree(call, place, call->asked.dtype, in, comm->rank_count, out, true);
}

/* Elements of a slice at most. */
static size_t dp__nccl_slot_count(const dp__nccl_call *call)
{
    bool wide = dp__is_half(call->asked.dtype) && call->comm->rank_count > DP__CUDA_OPERANDS;
    return call->comm->slot_bytes / (wide ? 2 * sizeof(float) : call->size);
}

/* The sums to all others. */
static dp_status dp__nccl_spread_turn(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    int job_gpu = comm->gpu_first + place;
    const char *own = dp__nccl_sums_at(call, place, job_gpu);
    for (int other = 0; other < comm->job_gpu_count; other++) {
        if (other == job_gpu)
            continue;
        DP_TRY(dp__nccl_send(call, place, own, comm->slices[job_gpu].count * call->size, other));
        DP_TRY(dp__nccl_take(call, place, dp__nccl_sums_at(call, place, other),
                             comm->slices[other].count * call->size, other));
    }
    return DP_OK;
}

/* Elements begin to begin + count, a slice for each GPU. */
static void dp__nccl_cut(dp__nccl_comm *comm, size_t size, size_t begin, size_t count)
{
    size_t job_gpus = (size_t)comm->job_gpu_count, pack = 16 / size;
    size_t each = ((count + job_gpus - 1) / job_gpus + pack - 1) / pack * pack;
    for (size_t job_gpu = 0; job_gpu < job_gpus; job_gpu++) {
        size_t at = dp__nccl_least(job_gpu * each, count);
        comm->slices[job_gpu] = (dp__nccl_slice){begin + at, dp__nccl_least(each, count - at)};
    }
}

static dp_status dp__nccl_add_piece(const dp__nccl_call *call, size_t begin, size_t count)
{
    dp__nccl_comm *comm = call->comm;
    dp__nccl_cut(comm, call->size, begin, count);
    DP_TRY(dp__nccl_each(call, dp__nccl_collect_turn));
    for (int g = 0; g < comm->gpu_count; g++)
        DP_TRY(dp__nccl_sum_slice(call, g, dp__nccl_sums_at(call, g, comm->gpu_first + g)));
    DP_TRY(dp__nccl_each(call, dp__nccl_spread_turn));
    for (int g = 0; g < comm->gpu_count; g++)
        DP_TRY(dp__nccl_share(call, g, dp__nccl_taker(call, g), begin * call->size,
                              count * call->size));
    return DP_OK;
}

static dp_status dp__nccl_add_slices(const dp__nccl_call *call)
{
    size_t most = dp__nccl_slot_count(call) * (size_t)call->comm->job_gpu_count;
    for (size_t at = 0, count = 0; at < call->asked.count; at += count) {
        count = dp__nccl_least(most, call->asked.count - at);
        DP_TRY(dp__nccl_add_piece(call, at, count));
    }
    return DP_OK;
}

/* The rank whose block a GPU adds up in this round; -1: it has no more. */
static int dp__nccl_in_round(const dp__nccl_comm *comm, int job_gpu, int round)
{
    for (int rank = 0; rank < comm->rank_count; rank++)
        if (comm->job_gpus[rank] == job_gpu && round-- == 0)
            return rank;
    return -1;
}

/* A piece of a block for each GPU; false: nobody has a block in this round. */
static bool dp__nccl_cut_blocks(const dp__nccl_call *call, int round, size_t at, size_t count)
{
    dp__nccl_comm *comm = call->comm;
    bool any = false;
    for (int job_gpu = 0; job_gpu < comm->job_gpu_count; job_gpu++) {
        int rank = dp__nccl_in_round(comm, job_gpu, round);
        any = any || rank >= 0;
        comm->slices[job_gpu] =
            rank < 0 ? (dp__nccl_slice){0, 0}
                     : (dp__nccl_slice){(size_t)rank * call->asked.count + at, count};
    }
    return any;
}

static dp_status dp__nccl_scatter_piece(const dp__nccl_call *call, int round, size_t at)
{
    const dp__nccl_comm *comm = call->comm;
    DP_TRY(dp__nccl_each(call, dp__nccl_collect_turn));
    for (int g = 0; g < comm->gpu_count; g++) {
        int rank = dp__nccl_in_round(comm, comm->gpu_first + g, round);
        if (rank >= 0)
            DP_TRY(dp__nccl_sum_slice(call, g,
                                      (char *)call->asked.local[rank - comm->rank_first].recv +
                                          at * call->size));
    }
    return DP_OK;
}

static dp_status dp__nccl_scatter_slices(const dp__nccl_call *call)
{
    size_t most = dp__nccl_slot_count(call);
    for (int round = 0; dp__nccl_cut_blocks(call, round, 0, 0); round++)
        for (size_t at = 0, count = 0; at < call->asked.count; at += count) {
            count = dp__nccl_least(most, call->asked.count - at);
            (void)dp__nccl_cut_blocks(call, round, at, count);
            DP_TRY(dp__nccl_scatter_piece(call, round, at));
        }
    return DP_OK;
}

/* Before anything of the first such sum is begun; where all sums are, before there are any. */
static dp_status dp__nccl_slots(dp__nccl_comm *comm)
{
    for (int g = 0; g < comm->gpu_count; g++) {
        dp__nccl_gpu *gpu = &comm->gpus[g];
        if (gpu->slots == NULL)
            DP_TRY(dp__cuda_alloc(&gpu->dev->base, (size_t)comm->rank_count * comm->slot_bytes,
                                  &gpu->slots));
    }
    return DP_OK;
}

static dp_status dp__nccl_run_slices(const dp__nccl_call *call)
{
    DP_TRY(dp__nccl_slots(call->comm));
    return dp__nccl_run(call, call->asked.verb == DP_REDUCE_SCATTER ? dp__nccl_scatter_slices
                                                                    : dp__nccl_add_slices);
}

/* ==== >>blocks ===================================================================================
   What is not added up. Where every rank has a GPU of its own NCCL gathers; else, and where blocks
   are of pairs, GPUs send each other what they lack, and copies on a GPU do the rest.           */

static int dp__nccl_receiver(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    return comm->job_gpus[call->asked.root] == comm->gpu_first + place
               ? call->asked.root - comm->rank_first
               : comm->gpus[place].lead;
}

static dp_status dp__nccl_broadcast_turn(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    int receiver = dp__nccl_receiver(call, place);
    const dp_part *part = &call->asked.local[receiver];
    bool is_root = comm->rank_first + receiver == call->asked.root;
    return dp__nccl_check(
        call->comm, "ncclBroadcast", &comm->gpus[place],
        dp__nccl.ncclBroadcast(is_root ? part->send : part->recv, part->recv, call->bytes,
                               ncclUint8, comm->job_gpus[call->asked.root], comm->gpus[place].comm,
                               dp__nccl_native(call, place)));
}

static dp_status dp__nccl_broadcast_all(const dp__nccl_call *call)
{
    DP_TRY(dp__nccl_each(call, dp__nccl_broadcast_turn));
    for (int g = 0; g < call->comm->gpu_count; g++)
        DP_TRY(dp__nccl_share(call, g, dp__nccl_receiver(call, g), 0, call->bytes));
    return DP_OK;
}

static dp_status dp__nccl_gather_turn(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    const dp_part *part = &call->asked.local[comm->gpus[place].lead];
    return dp__nccl_check(call->comm, "ncclAllGather", &comm->gpus[place],
                          dp__nccl.ncclAllGather(part->send, part->recv, call->bytes, ncclUint8,
                                                 comm->gpus[place].comm,
                                                 dp__nccl_native(call, place)));
}

/* Whether others send to this rank: in a gather to the first one on each GPU. */
static bool dp__nccl_gets(const dp__nccl_call *call, int rank)
{
    return call->asked.verb == DP_ALL_TO_ALL ||
           dp__nccl_in_round(call->comm, call->comm->job_gpus[rank], 0) == rank;
}

/* What a local rank has for this rank. */
static const char *dp__nccl_block(const dp__nccl_call *call, int local_rank, int rank)
{
    size_t before = call->asked.verb == DP_ALL_TO_ALL ? (size_t)rank : 0;
    return (const char *)call->asked.local[local_rank].send + before * call->bytes;
}

static dp_status dp__nccl_give_blocks(const dp__nccl_call *call, int place, int local_rank)
{
    const dp__nccl_comm *comm = call->comm;
    for (int rank = 0; rank < comm->rank_count; rank++)
        if (comm->job_gpus[rank] != comm->gpu_first + place && dp__nccl_gets(call, rank))
            DP_TRY(dp__nccl_send(call, place, dp__nccl_block(call, local_rank, rank), call->bytes,
                                 comm->job_gpus[rank]));
    return DP_OK;
}

/* From one rank, for all that are here. */
static dp_status dp__nccl_take_blocks(const dp__nccl_call *call, int place, int rank)
{
    const dp__nccl_comm *comm = call->comm;
    for (int i = 0; i < comm->local_count; i++)
        if (dp__nccl_is_on(comm, i, place) && dp__nccl_gets(call, comm->rank_first + i))
            DP_TRY(dp__nccl_take(call, place,
                                 (char *)call->asked.local[i].recv + (size_t)rank * call->bytes,
                                 call->bytes, comm->job_gpus[rank]));
    return DP_OK;
}

static dp_status dp__nccl_exchange_turn(const dp__nccl_call *call, int place)
{
    const dp__nccl_comm *comm = call->comm;
    for (int i = 0; i < comm->local_count; i++)
        if (dp__nccl_is_on(comm, i, place))
            DP_TRY(dp__nccl_give_blocks(call, place, i));
    for (int rank = 0; rank < comm->rank_count; rank++)
        if (comm->job_gpus[rank] != comm->gpu_first + place)
            DP_TRY(dp__nccl_take_blocks(call, place, rank));
    return DP_OK;
}

/* What ranks on one GPU have for each other. */
static dp_status dp__nccl_blocks_here(const dp__nccl_call *call, int place, int from)
{
    const dp__nccl_comm *comm = call->comm;
    size_t at = (size_t)(comm->rank_first + from) * call->bytes;
    for (int i = 0; i < comm->local_count; i++)
        if (dp__nccl_is_on(comm, i, place) && dp__nccl_gets(call, comm->rank_first + i))
            DP_TRY(dp__nccl_copy(call, place, (char *)call->asked.local[i].recv + at,
                                 dp__nccl_block(call, from, comm->rank_first + i), call->bytes));
    return DP_OK;
}

static dp_status dp__nccl_exchange(const dp__nccl_call *call)
{
    const dp__nccl_comm *comm = call->comm;
    size_t all = call->bytes * (size_t)comm->rank_count;
    DP_TRY(dp__nccl_each(call, dp__nccl_exchange_turn));
    for (int i = 0; i < comm->local_count; i++)
        DP_TRY(dp__nccl_blocks_here(call, dp__nccl_job_gpu(comm, i) - comm->gpu_first, i));
    for (int g = 0; g < comm->gpu_count && call->asked.verb == DP_ALL_GATHER; g++)
        DP_TRY(dp__nccl_share(call, g, comm->gpus[g].lead, 0, all));
    return DP_OK;
}

static dp_status dp__nccl_gather(const dp__nccl_call *call)
{
    return dp__nccl_one_each(call->comm) ? dp__nccl_each(call, dp__nccl_gather_turn)
                                         : dp__nccl_exchange(call);
}

/* ==== >>proving ==================================================================================
   NCCL lets GPUs read each other, and network cards read GPUs, wherever the driver does, and does
   not look at what arrives. So a new communicator carries known numbers first, the way that sums go
   in it: each GPU gives some to all others, and each counts those that arrive wrong.            */

enum {
    DP__NCCL_PROOF_BYTES = DP__CUDA_CHECK_BYTES / 32, /* of each GPU, */
    DP__NCCL_PROOF_MOST = DP__CUDA_CHECK_BYTES / 2    /* and of all: on real ones 256 KiB, 4 MiB */
};

typedef struct dp__nccl_proof { /* parts are of leads: what they have comes after what they find */
    dp__nccl_comm *comm;
    uint64_t seed;
    size_t words;  /* of a GPU */
    double *wrong; /* of each GPU of the job, here; a 0 behind each */
    dp_part parts[DP__CUDA_OPERANDS];
} dp__nccl_proof;

/* What the GPUs of the job give is one pattern, in their order, to whose seed dp_pattern adds this
   much from word to word: no two parts are alike. */
static struct dp__cuda_params dp__nccl_proof_params(const dp__nccl_proof *proof, int job_gpu)
{
    uint64_t before = (uint64_t)job_gpu * proof->words;
    return (struct dp__cuda_params){.count = proof->words,
                                    .fill = proof->seed + before * 0x9e3779b97f4a7c15u};
}

/* Not of a slab, which would keep it. */
static dp_status dp__nccl_proof_begin(dp__nccl_proof *proof, int place)
{
    const dp__nccl_comm *comm = proof->comm;
    dp__nccl_gpu *gpu = &comm->gpus[place];
    dp_part *part = &proof->parts[gpu->lead];
    size_t job_gpus = (size_t)comm->job_gpu_count, own = proof->words * sizeof(unsigned);
    DP_TRY(dp__cuda_enter(gpu->physical));
    DP_TRY(dp__cuda_leave_after(
        gpu->physical, "cudaMalloc",
        dp__cuda.cudaMalloc(&gpu->proof, job_gpus * (2 * sizeof(double) + own))));
    DP_TRY(dp__cuda_stream_create(&gpu->dev->base, 0, &gpu->prover));
    struct dp__cuda_params params = dp__nccl_proof_params(proof, comm->gpu_first + place);
    params.out_count = 1;
    part->stream = gpu->prover;
    part->recv = (double *)gpu->proof + 2 * job_gpus;
    part->send = params.out[0] = (char *)part->recv + (size_t)(comm->gpu_first + place) * own;
    return dp__cuda_launch_each(part->stream, DP__CUDA_pattern, &params);
}

/* What hangs is given up, and so are processes that do not come. */
static dp_status dp__nccl_proof_wait(dp__nccl_comm *comm, const dp__nccl_gpu *gpu)
{
    uint64_t until = dp__os_after_ms(comm->timeout_ms);
    cudaEvent_t mark = gpu->ended[0];
    DP_TRY(dp__cuda_enter(gpu->physical));
    DP_TRY(dp__cuda_leave(gpu->physical, dp__cuda_record(gpu->physical, mark,
                                                         dp__cuda_stream_of(gpu->prover)->native)));
    for (bool passed = false; true; dp__os_sleep_ms(1)) {
        DP_TRY(dp__nccl_passed(gpu, mark, &passed));
        dp__lock_enter(&comm->lock);
        dp_status status = dp__nccl_usable(comm); /* what was aborted has passed, too */
        if (status == DP_OK && !passed && dp__os_now_ns() > until)
            status = dp__nccl_fail(comm, dp_error(DP_ERR_TIMEOUT,
                                                  "nccl: nothing arrives at GPU %d within %d ms",
                                                  gpu->physical->ordinal, comm->timeout_ms));
        dp__lock_leave(&comm->lock);
        if (passed || status != DP_OK)
            return status;
    }
}

/* The wrong words of all that came, or of what came from each GPU: a sum for each chunk. */
static dp_status dp__nccl_proof_count(const dp__nccl_proof *proof, int place, size_t chunks)
{
    const dp__nccl_comm *comm = proof->comm;
    const dp__nccl_gpu *gpu = &comm->gpus[place];
    const dp_part *part = &proof->parts[gpu->lead];
    struct dp__cuda_params params = dp__nccl_proof_params(proof, 0);
    params.in_count = 1;
    params.in[0] = part->recv;
    params.scratch = gpu->proof;
    params.count *= (unsigned long long)comm->job_gpu_count;
    params.chunk = params.count / chunks;
    params.chunk_count = chunks;
    DP_TRY(dp__cuda_launch(part->stream, DP__CUDA_differ, chunks, &params));
    return dp__cuda_copy_out(part->stream, proof->wrong, gpu->proof,
                             2 * chunks * sizeof *proof->wrong);
}

/* One launch for all that came; whose is wrong is asked only then, and may be right by then. */
static dp_status dp__nccl_proof_judge(const dp__nccl_proof *proof, int place)
{
    static const char advice[] = "start all processes with NCCL_P2P_DISABLE=1, or, if those are of "
                                 "two machines, NCCL_NET_GDR_LEVEL=LOC";
    const dp__nccl_comm *comm = proof->comm;
    int own = dp__nccl_in_round(comm, comm->gpu_first + place, 0);
    DP_TRY(dp__nccl_proof_wait(proof->comm, &comm->gpus[place]));
    DP_TRY(dp__nccl_proof_count(proof, place, 1));
    double wrong = proof->wrong[0];
    if (wrong == 0)
        return DP_OK;
    DP_TRY(dp__nccl_proof_count(proof, place, (size_t)comm->job_gpu_count));
    for (int job_gpu = 0; job_gpu < comm->job_gpu_count; job_gpu++)
        if (proof->wrong[2 * job_gpu] > 0)
            return dp_error(DP_ERR_DEVICE,
                            "nccl: %.0f of %zu words from rank %d arrive wrong at rank %d: %s",
                            proof->wrong[2 * job_gpu], proof->words,
                            dp__nccl_in_round(comm, job_gpu, 0), own, advice);
    return dp_error(DP_ERR_DEVICE,
                    "nccl: %.0f of %zu words arrive at rank %d later than NCCL says: %s", wrong,
                    proof->words * (size_t)comm->job_gpu_count, own, advice);
}

/* After a failure what it took goes with the communicator. */
static void dp__nccl_proof_drop(dp__nccl_gpu *gpu)
{
    if (gpu->prover != NULL)
        dp__cuda_stream_destroy(gpu->prover);
    if (gpu->proof != NULL && dp__cuda_enter(gpu->physical) == DP_OK)
        (void)dp__cuda_leave_after(gpu->physical, "cudaFree", dp__cuda.cudaFree(gpu->proof));
    gpu->prover = NULL;
    gpu->proof = NULL;
}

/* The numbers are this communicator's: what an earlier one has left in memory is wrong. */
static dp_status dp__nccl_proof_open(dp__nccl_proof *proof, dp__nccl_comm *comm,
                                     const ncclUniqueId *id)
{
    const dp_host *host = comm->base.host;
    size_t job_gpus = (size_t)comm->job_gpu_count;
    size_t bytes = dp__nccl_least(DP__NCCL_PROOF_BYTES, DP__NCCL_PROOF_MOST / job_gpus);
    proof->comm = comm;
    proof->seed = dp__hash(dp__hash_first, id, sizeof *id);
    proof->words = bytes / sizeof(unsigned) | 1;
    proof->wrong = host->alloc(host, job_gpus * 2 * sizeof *proof->wrong, _Alignof(double));
    if (proof->wrong == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "nccl: no memory for the first numbers");
    for (int g = 0; g < comm->gpu_count; g++)
        DP_TRY(dp__nccl_proof_begin(proof, g));
    return DP_OK;
}

static dp_status dp__nccl_prove(const dp__nccl_proof *proof)
{
    dp__nccl_comm *comm = proof->comm;
    const dp__nccl_call call = {.comm = comm,
                                .asked = {.local = proof->parts, .count = proof->words},
                                .size = sizeof(unsigned),
                                .bytes = proof->words * sizeof(unsigned)};
    for (int job_gpu = 0; job_gpu < comm->job_gpu_count; job_gpu++)
        comm->slices[job_gpu] = (dp__nccl_slice){(size_t)job_gpu * proof->words, proof->words};
    DP_TRY(dp__nccl_each(&call, comm->ordered ? dp__nccl_spread_turn : dp__nccl_gather_turn));
    for (int g = 0; g < comm->gpu_count; g++)
        DP_TRY(dp__nccl_proof_judge(proof, g));
    for (int g = 0; g < comm->gpu_count; g++)
        dp__nccl_proof_drop(&comm->gpus[g]);
    return DP_OK;
}

/* ==== >>joining ==================================================================================
   From a config to a communicator. Every step is agreed upon by all processes, including those that
   failed in it: nobody waits in NCCL for one that will not come.                                */

enum {
    DP__NCCL_LOCAL = 64,                                   /* ranks in a process */
    DP__NCCL_RANKS = DP__CUDA_OPERANDS * DP__CUDA_OPERANDS /* in all */
};

typedef struct dp__nccl_tag { /* which GPU a rank is on */
    uint64_t machine;
    CUuuid uuid;
    char bus_id[32];
} dp__nccl_tag;

typedef struct dp__nccl_card { /* what a process tells the others */
    int32_t local_count;
    dp__nccl_tag tags[DP__NCCL_LOCAL];
    ncclUniqueId id; /* of process 0 */
} dp__nccl_card;

typedef struct dp__nccl_join {
    const dp_host *host;
    const dp_comm_config *config;
    int process, process_count;
    dp__nccl_comm *comm;
    dp__nccl_card own, *all; /* of each process */
    dp__job *job;            /* NULL: there are no other processes */
    dp__nccl_proof proof;
} dp__nccl_join;

static const char *dp__nccl_bus_id(const dp_comm_config *config, int local_rank)
{
    return dp__cuda_gpu_of(config->local[local_rank])->bus_id;
}

/* Slices of one GPU in one process copy through the host, which needs no NCCL. */
static bool dp__nccl_fits(const dp_comm_config *config)
{
    int gpus = 0;
    bool slices = false;
    size_t least;
    for (int i = 0; i < config->local_count; i++) {
        int k = 0;
        if (!dp__cuda_is_open(config->local[i]))
            return false;
        while (strcmp(dp__nccl_bus_id(config, k), dp__nccl_bus_id(config, i)) != 0)
            k++;
        slices = slices || dp__cuda_gpu_of(config->local[k]) != dp__cuda_gpu_of(config->local[i]);
        gpus += k == i;
    }
    if (config->bootstrap != NULL)
        return true; /* else nobody would: dp__nccl_open says what is missing */
    return gpus > 1 && !slices && !config->ordered && dp__nccl_wish(&least) == DP_OK &&
           dp__nccl_ready() == DP_OK && dp_cuda_coll()->fits(config);
}

static dp_status dp__nccl_agree(const dp__nccl_join *join, dp_status status)
{
    return join->job != NULL ? dp__job_agree(join->job, status) : status;
}

/* The cards of all; with one process its own. */
static dp_status dp__nccl_show(dp__nccl_join *join)
{
    if (join->job != NULL)
        return dp__boot_gather(join->config->bootstrap, &join->own, join->all, sizeof join->own);
    join->all[0] = join->own;
    return DP_OK;
}

/* NCCL tells machines apart by NCCL_HOSTID where that is set. */
static uint64_t dp__nccl_machine(void)
{
    const char *host = dp__os_env("NCCL_HOSTID");
    bool set = host != NULL && host[0] != '\0';
    return set ? dp__hash(dp__hash_first, host, strlen(host)) : dp__os_machine();
}

static dp_status dp__nccl_tags(dp__nccl_join *join)
{
    const dp_comm_config *config = join->config;
    if (config->local_count > DP__NCCL_LOCAL)
        return dp_error(DP_ERR_UNSUPPORTED, "nccl: %d devices in a process, at most %d",
                        config->local_count, DP__NCCL_LOCAL);
    join->own.local_count = config->local_count;
    for (int i = 0; i < config->local_count; i++) {
        const dp__cuda_gpu *gpu = dp__cuda_gpu_of(config->local[i]);
        dp__nccl_tag *tag = &join->own.tags[i];
        *tag = (dp__nccl_tag){.machine = dp__nccl_machine(), .uuid = gpu->uuid};
        memcpy(tag->bus_id, gpu->bus_id, sizeof tag->bus_id);
    }
    return DP_OK;
}

/* Zeros. */
static void *dp__nccl_room(int count, size_t size, bool *full)
{
    void *room = dp__os_alloc((size_t)count * size, 64, NULL);
    if (room != NULL)
        memset(room, 0, (size_t)count * size);
    *full = *full || room == NULL;
    return room;
}

/* Room for what all processes tell. */
static dp_status dp__nccl_prepare_to_ask(dp__nccl_join *join)
{
    const dp_comm_config *config = join->config;
    bool full = false;
    if (config->rank_count > DP__NCCL_RANKS)
        return dp_error(DP_ERR_UNSUPPORTED, "nccl: %d ranks, at most %d", config->rank_count,
                        DP__NCCL_RANKS);
    join->all = dp__nccl_room(join->process_count, sizeof *join->all, &full);
    return dp__nccl_agree(join,
                          full ? dp_error(DP_ERR_NO_MEMORY, "nccl: no memory to ask %d processes",
                                          join->process_count)
                               : DP_OK);
}

/* Where dp.h listens, NCCL shall too. It reads this with its first communicator. */
static void dp__nccl_interface(const dp__nccl_join *join)
{
    const char *wanted = dp__os_env("DP_INTERFACE");
    dp__os_interface found;
    char text[64];
    if (wanted == NULL || join->process_count == 1 || dp__os_env("NCCL_SOCKET_IFNAME") != NULL ||
        !dp__os_interface_find(wanted, &found, text, sizeof text))
        return;
    snprintf(text, sizeof text, "=%s", found.name);
    dp__os_env_set("NCCL_SOCKET_IFNAME", text);
}

/* A communicator with nothing in it. */
static dp_status dp__nccl_new(dp__nccl_join *join)
{
    const dp_comm_config *config = join->config;
    bool full = false;
    dp__nccl_comm *comm = join->comm = dp__nccl_room(1, sizeof *comm, &full);
    if (comm == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "nccl: no memory for a communicator");
    comm->base = (dp_comm){dp_nccl_coll(), join->host};
    comm->rank_first = config->rank_first;
    comm->rank_count = config->rank_count;
    comm->local_count = config->local_count;
    comm->timeout_ms = config->timeout_ms;
    comm->ordered = config->ordered;
    comm->lock = comm->lent = (dp__lock)DP__LOCK_INITIALIZER;
    if (join->job != NULL) {
        comm->journal = dp__journal_opening(join->job);
        comm->journal->ends_later = true;
    }
    comm->job_gpus = dp__nccl_room(config->rank_count, sizeof *comm->job_gpus, &full);
    comm->slices = dp__nccl_room(config->rank_count, sizeof *comm->slices, &full);
    comm->gpus = dp__nccl_room(config->local_count, sizeof *comm->gpus, &full);
    comm->ranks = dp__nccl_room(config->local_count, sizeof *comm->ranks, &full);
    if (full)
        return dp_error(DP_ERR_NO_MEMORY, "nccl: no memory for a communicator");
    DP_TRY(dp__nccl_wish(&comm->least));
    dp__nccl_interface(join);
    DP_TRY(dp__nccl_ready());
    return dp__nccl_tags(join);
}

/* The first rank on the same GPU as this one; a slice of a GPU is one. */
static int dp__nccl_first_of_gpu(const dp__nccl_tag *const *tags, int rank)
{
    int first = 0;
    while (tags[first]->machine != tags[rank]->machine ||
           memcmp(&tags[first]->uuid, &tags[rank]->uuid, sizeof(CUuuid)) != 0)
        first++;
    return first;
}

/* NCCL goes by the bus id, which slices of a GPU share, and has to be told that it is meant so. */
static dp_status dp__nccl_allow_slices(const dp__nccl_join *join, const dp__nccl_tag *const *tags,
                                       int rank)
{
    const char *allow = "NCCL_MULTI_RANK_GPU_ENABLE";
    int other = 0, version = 0;
    while (tags[other]->machine != tags[rank]->machine ||
           strcmp(tags[other]->bus_id, tags[rank]->bus_id) != 0)
        other++;
    if (dp__nccl_first_of_gpu(tags, rank) == dp__nccl_first_of_gpu(tags, other) ||
        dp__os_env(allow) != NULL)
        return DP_OK;
    (void)dp__nccl.ncclGetVersion(&version);
    if (version < DP__NCCL_SLICES)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "nccl: ranks %d and %d are on slices (MIG) of one GPU, %s, which NCCL "
                        "takes from 2.30 on, and this one is %d.%d",
                        other, rank, tags[rank]->bus_id, version / 10000, version / 100 % 100);
    join->host->log(join->host, DP_LOG_INFO,
                    "nccl: NCCL_MULTI_RANK_GPU_ENABLE is set to 1, for slices (MIG) of one GPU");
    dp__os_env_set(allow, "1");
    return DP_OK;
}

/* Numbers the GPUs of the job. Each is of one process. */
static dp_status dp__nccl_number_gpus(const dp__nccl_join *join, const dp__nccl_tag **tags,
                                      int *owners)
{
    dp__nccl_comm *comm = join->comm;
    int rank = 0;
    for (int p = 0; p < join->process_count; p++)
        for (int i = 0; i < join->all[p].local_count; i++, rank++) {
            tags[rank] = &join->all[p].tags[i];
            owners[rank] = p;
            int first = dp__nccl_first_of_gpu(tags, rank);
            comm->job_gpus[rank] = first == rank ? comm->job_gpu_count++ : comm->job_gpus[first];
            if (owners[first] != p)
                return dp_error(DP_ERR_UNSUPPORTED,
                                "nccl: processes %d and %d drive the same GPU, %s: each process "
                                "needs GPUs of its own (CUDA_VISIBLE_DEVICES, or "
                                "dp_config.devices)",
                                owners[first], p, tags[rank]->bus_id);
            DP_TRY(dp__nccl_allow_slices(join, tags, rank));
        }
    return DP_OK;
}

static dp_status dp__nccl_sit(const dp__nccl_join *join)
{
    bool full = false;
    const dp__nccl_tag **tags = dp__nccl_room(join->comm->rank_count, sizeof *tags, &full);
    int *owners = dp__nccl_room(join->comm->rank_count, sizeof *owners, &full);
    dp_status status = full ? dp_error(DP_ERR_NO_MEMORY, "nccl: no memory for ranks")
                            : dp__nccl_number_gpus(join, tags, owners);
    dp__os_free(tags, 0, NULL);
    dp__os_free(owners, 0, NULL);
    return status;
}

/* With the context of its GPU. */
static dp_status dp__nccl_rank_open(dp__nccl_comm *comm, dp__cuda_dev *dev, int local_rank)
{
    dp__nccl_gpu *gpu = &comm->gpus[dp__nccl_job_gpu(comm, local_rank) - comm->gpu_first];
    comm->ranks[local_rank].dev = dev;
    DP_TRY(dp__cuda_rank_open(&comm->ranks[local_rank]));
    if (gpu->dev != NULL)
        return DP_OK;
    comm->gpu_count++;
    gpu->dev = dev;
    gpu->physical = dev->gpu;
    gpu->lead = local_rank;
    for (int i = 0; i < DP__NCCL_WATCHED; i++) {
        DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &gpu->begun[i]));
        DP_TRY(dp__cuda_native_event(dev->gpu->ordinal, &gpu->ended[i]));
    }
    return DP_OK;
}

static atomic_bool dp__nccl_begun; /* a communicator, in this process: NCCL knows its environment */

/* If what arrives is wrong NCCL has to go another way. It may not hear of it, since the program has
   used NCCL itself before: >>proving finds out. */
static dp_status dp__nccl_distrust(const dp__nccl_join *join, const dp__nccl_gpu *reader,
                                   const dp__nccl_gpu *from)
{
    char text[DP__TEXT_BYTES];
    int can = 0;
    bool direct = true;
    DP_TRY(dp__cuda_check("cudaDeviceCanAccessPeer", reader->physical->ordinal,
                          dp__cuda.cudaDeviceCanAccessPeer(&can, reader->physical->ordinal,
                                                           from->physical->ordinal)));
    if (can)
        DP_TRY(dp__cuda_pair(reader->dev, from->dev, &direct));
    if (direct || dp__os_env("NCCL_P2P_DISABLE") != NULL)
        return DP_OK;
    snprintf(text, sizeof text,
             "nccl: NCCL_P2P_DISABLE is set to 1, as GPU %d does not read GPU %d directly%s",
             reader->physical->ordinal, from->physical->ordinal,
             atomic_load(&dp__nccl_begun) ? ": too late, NCCL has been used in this process; set "
                                            "it before the process starts"
                                          : "");
    join->host->log(join->host, DP_LOG_WARN, text);
    dp__os_env_set("NCCL_P2P_DISABLE", "1");
    return DP_OK;
}

static dp_status dp__nccl_check_pairs(const dp__nccl_join *join)
{
    const dp__nccl_comm *comm = join->comm;
    for (int g = 0; g < comm->gpu_count; g++)
        for (int k = 0; k < comm->gpu_count; k++)
            if (g != k)
                DP_TRY(dp__nccl_distrust(join, &comm->gpus[g], &comm->gpus[k]));
    return DP_OK;
}

/* All that this process has on its GPUs, before NCCL is asked for anything. */
static dp_status dp__nccl_equip(const dp__nccl_join *join)
{
    const dp_comm_config *config = join->config;
    dp__nccl_comm *comm = join->comm;
    size_t slot = DP__NCCL_SLOTS_BYTES / (size_t)comm->rank_count / 256 * 256;
    slot = dp__nccl_least(slot, DP__NCCL_SLOT_MOST);
    comm->slot_bytes = slot > DP__NCCL_SLOT_LEAST ? slot : DP__NCCL_SLOT_LEAST;
    comm->gpu_first = comm->job_gpus[comm->rank_first];
    if (config->bootstrap == NULL)
        DP_TRY(dp_cuda_coll()->open(join->host, config, &comm->near));
    for (int i = 0; i < comm->local_count; i++) {
        dp__cuda_dev *dev = dp__cuda_dev_of(config->local[i]);
        DP_TRY(dp__cuda_enter(dev->gpu));
        DP_TRY(dp__cuda_leave(dev->gpu, dp__nccl_rank_open(comm, dev, i)));
    }
    if (comm->ordered)
        DP_TRY(dp__nccl_slots(comm));
    return dp__nccl_check_pairs(join);
}

/* All local GPUs at once. */
static dp_status dp__nccl_init_turns(dp__nccl_comm *comm, const ncclUniqueId *id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    atomic_store(&dp__nccl_begun, true);
    for (int g = 0; g < comm->gpu_count; g++) {
        dp__nccl_gpu *gpu = &comm->gpus[g];
        DP_TRY(dp__cuda_enter(gpu->physical));
        ncclResult_t code = dp__nccl.ncclCommInitRankConfig(&gpu->comm, comm->job_gpu_count, *id,
                                                            comm->gpu_first + g, &config);
        if (code == ncclUnhandledCudaError) /* which leaves a group of its own open */
            (void)dp__nccl.ncclGroupEnd();
        DP_TRY(dp__cuda_leave(gpu->physical,
                              dp__nccl_check(comm, "ncclCommInitRankConfig", gpu, code)));
    }
    return DP_OK;
}

/* NCCL takes memory of GPUs, as >>proving does after it. */
static dp_status dp__nccl_init(dp__nccl_comm *comm, const ncclUniqueId *id)
{
    dp__cuda_quiet(comm->base.host);
    DP_TRY(dp__nccl_group_begin(comm));
    return dp__nccl_group_end(comm, dp__nccl_init_turns(comm, id));
}

static dp_status dp__nccl_name(dp__nccl_join *join)
{
    ncclResult_t code = join->process == 0 ? dp__nccl.ncclGetUniqueId(&join->own.id) : ncclSuccess;
    if (code == ncclSuccess)
        return DP_OK;
    return dp_error(DP_ERR_INTERNAL, "nccl: ncclGetUniqueId: %s: %.100s",
                    dp__nccl.ncclGetErrorString(code), dp__nccl.ncclGetLastError(NULL));
}

static dp_status dp__nccl_join_all(dp__nccl_join *join)
{
    DP_TRY(dp__nccl_agree(join, dp__nccl_new(join)));
    DP_TRY(dp__nccl_show(join));
    dp_status status = dp__nccl_sit(join);
    if (status == DP_OK)
        status = dp__nccl_equip(join);
    if (status == DP_OK)
        status = dp__nccl_name(join);
    DP_TRY(dp__nccl_agree(join, status));
    DP_TRY(dp__nccl_show(join));
    int failed = dp__thread_start(&join->comm->thread, dp__nccl_keep, join->comm);
    join->comm->kept = failed == 0;
    if (failed == 0)
        dp__nccl_list(join->comm, true);
    status = failed == 0 ? DP_OK
                         : dp_error(DP_ERR_NO_MEMORY, "nccl: cannot start a thread: %s",
                                    dp__os_why_text(failed));
    DP_TRY(dp__nccl_agree(join, status));
    status = dp__nccl_init(join->comm, &join->all[0].id);
    if (status == DP_OK)
        status = dp__nccl_proof_open(&join->proof, join->comm, &join->all[0].id);
    DP_TRY(dp__nccl_agree(join, status));
    return dp__nccl_agree(join, dp__nccl_prove(&join->proof));
}

static void dp__nccl_close(dp_comm *base);

static dp_status dp__nccl_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    const dp_bootstrap *boot = config->bootstrap;
    dp__nccl_join join = {.host = host,
                          .config = config,
                          .process = boot != NULL ? boot->process : 0,
                          .process_count = boot != NULL ? boot->process_count : 1,
                          .job = dp__job_of(host)};
    dp_status status = dp__nccl_prepare_to_ask(&join);
    if (status == DP_OK)
        status = dp__nccl_join_all(&join);
    dp__os_free(join.all, 0, NULL);
    host->free(host, join.proof.wrong);
    if (status == DP_OK)
        *out = &join.comm->base;
    else if (join.comm != NULL)
        dp__nccl_close(&join.comm->base);
    return status;
}

/* ==== >>table ====================================================================================
   The table of collectives, and the end of a communicator.                                      */

/* Devices may go on with another communicator: see dp_recover. */
static void dp__nccl_gpu_close(dp__nccl_gpu *gpu)
{
    dp__nccl_proof_drop(gpu);
    if (gpu->slots != NULL)
        dp__cuda_free(&gpu->dev->base, gpu->slots, 0);
    if (gpu->spare != NULL)
        dp__cuda_free(&gpu->dev->base, gpu->spare, gpu->spare_bytes);
    if (gpu->dev == NULL || dp__cuda_enter(gpu->physical) != DP_OK)
        return;
    for (int i = 0; i < DP__NCCL_WATCHED; i++) {
        if (gpu->begun[i] != NULL)
            (void)dp__cuda.cudaEventDestroy(gpu->begun[i]);
        if (gpu->ended[i] != NULL)
            (void)dp__cuda.cudaEventDestroy(gpu->ended[i]);
    }
    (void)dp__cuda.cudaGetLastError();
    (void)dp__cuda_leave(gpu->physical, DP_OK);
}

/* What is left once nobody keeps it. */
static void dp__nccl_clear(dp__nccl_comm *comm)
{
    for (int i = 0; i < comm->local_count && comm->ranks != NULL; i++) {
        if (comm->ranks[i].dev == NULL)
            continue;
        atomic_store(&comm->ranks[i].dev->failed, NULL);
        dp__cuda_rank_close(&comm->ranks[i]);
    }
    for (int g = 0; g < comm->gpu_count; g++)
        dp__nccl_gpu_close(&comm->gpus[g]);
    if (comm->near != NULL)
        comm->near->ops->close(comm->near);
}

/* True: the keeper is done. NCCL gives memory of GPUs back meanwhile. */
static bool dp__nccl_dismiss(dp__nccl_comm *comm)
{
    dp__cuda_quiet(comm->base.host);
    dp__nccl_bid(comm, DP__NCCL_CLOSE);
    dp__nccl_let_go(comm, 2 * DP__NCCL_CLOSE_MS);
    return atomic_load(&comm->over) != 0;
}

/* A keeper that still hangs has it from here on, and frees it. */
static void dp__nccl_part(dp__nccl_comm *comm)
{
    dp__thread thread = comm->thread;
    bool kept = comm->kept;
    if (kept && atomic_fetch_or(&comm->over, 2) == 0) {
        dp__thread_detach(thread);
        return;
    }
    if (kept)
        dp__thread_join(thread);
    dp__nccl_free(comm);
}

/* Its GPUs may never be done with what they were given: nothing of them is waited for any more. */
static void dp__nccl_leave_behind(dp__nccl_comm *comm)
{
    const dp_host *host = comm->base.host;
    for (int g = 0; g < comm->gpu_count; g++)
        atomic_store(&dp__cuda_lost[comm->gpus[g].physical->ordinal], true);
    dp__nccl_orphan(comm);
    host->log(host, DP_LOG_WARN, "nccl: a communicator hangs while it ends, and is left");
}

static void dp__nccl_describe(dp_comm *base, char *text, size_t bytes)
{
    const dp__nccl_comm *comm = dp__nccl_of(base);
    int used = snprintf(text, bytes, "%llu by NCCL, %llu bytes of each rank",
                        atomic_load_explicit(&comm->carried, memory_order_relaxed),
                        atomic_load_explicit(&comm->carried_bytes, memory_order_relaxed));
    if (comm->near != NULL && used > 0 && (size_t)used < bytes)
        snprintf(text + used, bytes - (size_t)used, "; %llu by the GPUs themselves",
                 atomic_load_explicit(&comm->carried_near, memory_order_relaxed));
}

/* Without a keeper there are no communicators of NCCL. */
static void dp__nccl_close(dp_comm *base)
{
    char text[128], line[160];
    dp__nccl_comm *comm = dp__nccl_of(base);
    const dp_host *host = base->host;
    dp__nccl_list(comm, false);
    bool done = !comm->kept || dp__nccl_dismiss(comm);
    dp__nccl_describe(base, text, sizeof text);
    snprintf(line, sizeof line, "nccl: collectives: %s", text);
    host->log(host, DP_LOG_INFO, line);
    if (!done)
        dp__nccl_leave_behind(comm);
    dp__nccl_clear(comm);
    dp__nccl_part(comm);
}

/* The keeper aborts. */
static void dp__nccl_abort(dp_comm *base)
{
    dp__nccl_bid(dp__nccl_of(base), DP__NCCL_ABORT);
}

static dp_status dp__nccl_poll(dp_comm *base)
{
    dp__nccl_comm *comm = dp__nccl_of(base);
    dp__lock_enter(&comm->lock);
    dp_status status = dp__nccl_usable(comm);
    if (status == DP_OK) {
        status = dp__nccl_look(comm);
        status = status != DP_OK ? dp__nccl_fail(comm, status) : DP_OK;
    }
    dp__lock_leave(&comm->lock);
    return status;
}

/* Whether the GPUs of one process do it among themselves: what is small, or captured, what not all
   want, and sums that NCCL would not make. */
static bool dp__nccl_is_near(const dp__nccl_call *call, bool by_nccl)
{
    const dp__nccl_comm *comm = call->comm;
    if (comm->near == NULL)
        return false;
    for (int g = 0; g < comm->gpu_count; g++)
        if (dp__nccl_taker(call, g) < 0)
            return true;
    return call->captured || !by_nccl || call->bytes < comm->least;
}

/* What carries the call by NCCL. *out_can becomes false if it cannot make the sum as it is asked
   for. */
static dp__nccl_way *dp__nccl_way_of(const dp__nccl_call *call, bool *out_can)
{
    switch (call->asked.verb) {
    case DP_ALL_REDUCE:
        *out_can = dp__nccl_can_add(call);
        return dp__nccl_add;
    case DP_REDUCE_SCATTER:
        *out_can = dp__nccl_one_each(call->comm) && dp__nccl_can_add(call);
        return dp__nccl_add;
    case DP_BROADCAST:
        return dp__nccl_broadcast_all;
    case DP_ALL_GATHER:
        return dp__nccl_gather;
    case DP_ALL_TO_ALL:
    case DP_REDUCE_TO:
    case DP_GATHER_TO:
    case DP_SCATTER_FROM:
        break;
    }
    return dp__nccl_exchange;
}

static dp_status dp__nccl_coll_run(dp_comm *base, const dp_coll_call *asked)
{
    dp__nccl_comm *comm = dp__nccl_of(base);
    dp__nccl_call call = {.comm = comm, .asked = *asked, .size = dp_dtype_bytes(asked->dtype)};
    call.bytes = asked->count * call.size;
    bool by_nccl = true;
    dp__nccl_way *way = dp__nccl_way_of(&call, &by_nccl);
    DP_TRY(dp__nccl_captured(&call, &call.captured));
    if (!dp__nccl_is_near(&call, by_nccl))
        return by_nccl ? dp__nccl_run(&call, way) : dp__nccl_run_slices(&call);
    atomic_fetch_add_explicit(&comm->carried_near, 1, memory_order_relaxed);
    return comm->near->ops->run(comm->near, asked);
}

DP_API const dp_coll_ops *dp_nccl_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = DP__NCCL_IS,
                                    .fits = dp__nccl_fits,
                                    .open = dp__nccl_open,
                                    .close = dp__nccl_close,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__nccl_coll_run,
                                    .abort = dp__nccl_abort,
                                    .poll = dp__nccl_poll,
                                    .describe = dp__nccl_describe};
    return &ops;
}

static const dp_coll_ops *(*dp__backend_nccl_coll)(void) = dp_nccl_coll;
#endif /* DP_IMPLEMENTATION && !DP_NCCL_IMPLEMENTED */

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
