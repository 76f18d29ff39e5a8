/* sim_cuda.c - the simulated CUDA: see sim.h. */

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "cuda.h"
#include "cuda_runtime_api.h"
#include "nvrtc.h"
#include "nvtx3/nvToolsExt.h"
#include "parts.h"
#include "sim.h"
#include "trace.h"

enum { DEVICES = 64, ACTORS = 256, HOST = 0, FINDINGS = 64, PAGE = 4096, STACK = 16 };
enum { PITCH_MAX = 1 << 20, MULTIPROCESSORS = 3, LANES = 1024, SHARED_MAX = 48 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything here */

static int device_count, driver_version = 13000, arch = 90;
static int own_archs[64]; /* of devices of their own; 0: as all */
static int runtime_version = 13000, nvrtc_version = 13000, count_error;
static size_t memory_bytes = (size_t)4 << 30;
static size_t memory_used[DEVICES];
static bool devices_used; /* somebody has asked whether there are some */

/* ---- findings -------------------------------------------------------------------------------- */

static struct finding {
    const char *name;
    int count;
} findings[FINDINGS];
static int finding_kinds, finding_total;
static bool hushed;

__attribute__((format(printf, 2, 3))) static void find(const char *name, const char *format, ...)
{
    va_list args;
    int k = 0;
    while (k < finding_kinds && strcmp(findings[k].name, name) != 0)
        k++;
    if (k == finding_kinds && k < FINDINGS)
        findings[finding_kinds++].name = name;
    findings[k < FINDINGS ? k : FINDINGS - 1].count++;
    finding_total++;
    if (hushed || finding_total > 20)
        return;
    va_start(args, format);
    fprintf(stderr, "sim: %s: ", name);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
}

int sim_finding_count(const char *name)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int k = 0; k < finding_kinds; k++)
        count += name == NULL || strcmp(findings[k].name, name) == 0 ? findings[k].count : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void sim_find_left_lock(void)
{
    sim_lock();
    sim_find("lock", "it is left, and nobody had entered it");
    sim_unlock();
}

void sim_hush(bool hush)
{
    hushed = hush;
}

void sim_forget_findings(void)
{
    finding_kinds = finding_total = 0;
}

/* A test that leaves findings behind fails, whatever it checked itself. */
__attribute__((destructor)) static void end_with_findings(void)
{
    if (finding_total > 0) {
        fprintf(stderr, "sim: %d findings\n", finding_total);
        _exit(1);
    }
}

/* ---- contexts of threads --------------------------------------------------------------------- */

struct CUctx_st {
    int device, users;
};
static struct CUctx_st contexts[DEVICES], others[DEVICES]; /* the primary ones, and not */
static cudaError_t lost[DEVICES];                          /* cudaSuccess: it is not */
static _Thread_local CUcontext stack[STACK];
static _Thread_local int stack_depth;
static _Thread_local cudaError_t last_error;

/* ---- faults ---------------------------------------------------------------------------------- */

static long call_count, fail_at;
static int fail_code;
static bool fail_sticky, fault_fired;

void sim_fail_at(long n, int code, bool sticky)
{
    call_count = 0;
    fail_at = n;
    fail_code = code;
    fail_sticky = sticky;
    fault_fired = false;
}

bool sim_fault_fired(void)
{
    return fault_fired;
}

long sim_call_count(void)
{
    return call_count;
}

/* What is wrong with the device of the context that the thread has. */
static cudaError_t lost_here(void)
{
    return stack_depth > 0 ? lost[stack[stack_depth - 1]->device] : cudaSuccess;
}

void sim_lose_device(int device, int code)
{
    lost[device] = (cudaError_t)code;
}

/* What is captured: one stream, and those that have waited for it since. */
typedef struct capture {
    int number;
    enum cudaStreamCaptureMode mode;
    const void *thread; /* where its mode is */
    cudaStream_t origin;
    bool broken; /* it can only be ended */
    struct CUgraph_st *graph;
    struct capture *next;
} capture;

static capture *captures;
static _Thread_local enum cudaStreamCaptureMode thread_mode; /* global, at first */

/* To this thread, what is potentially unsafe: see cudaThreadExchangeStreamCaptureMode. */
static bool forbids(const capture *c)
{
    if (c->thread == &thread_mode)
        return thread_mode != cudaStreamCaptureModeRelaxed &&
               c->mode != cudaStreamCaptureModeRelaxed;
    return thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
}

/* Potentially unsafe is here all that does not enqueue, but for questions that are not about work.
   The captures that forbid it are broken by it. */
static cudaError_t unsafe(const char *fn, cudaError_t code)
{
    for (capture *c = captures; c != NULL; c = c->next)
        if (forbids(c)) {
            find("in capture", "%s, while a stream is captured", fn);
            c->broken = true;
            code = code == cudaSuccess ? cudaErrorStreamCaptureUnsupported : code;
        }
    return code;
}

static _Thread_local bool in_host_call; /* a stream's, which must not use CUDA */

/* Every call passes here first, and ends with leave(). */
static cudaError_t enter(void)
{
    if (in_host_call)
        find("CUDA in a host function", "a function that a stream has called uses CUDA");
    else
        pthread_mutex_lock(&lock);
    call_count++;
    bool fails = fail_at > 0 && (call_count == fail_at || (fail_sticky && call_count > fail_at));
    fault_fired = fault_fired || fails;
    for (capture *c = captures; c != NULL && fails; c = c->next) /* it is one of those errors */
        c->broken = c->broken || (fail_code >= cudaErrorStreamCaptureUnsupported &&
                                  fail_code <= cudaErrorStreamCaptureWrongThread);
    return fails ? (cudaError_t)fail_code : lost_here();
}

static bool enqueue_only;

void sim_enqueue_only(bool on)
{
    enqueue_only = on;
}

/* A call that may wait, or for which the driver may. */
static cudaError_t may_wait(const char *fn, cudaError_t code)
{
    if (enqueue_only)
        find("blocks", "%s, where work is only enqueued", fn);
    return unsafe(fn, code);
}

static cudaError_t enter_waiting(const char *fn)
{
    return may_wait(fn, enter());
}

/* A call that waits for all that the device does: with a rank of NCCL's among it, perhaps for ever.
 */
static cudaError_t enter_allocating(const char *fn)
{
    cudaError_t code = enter_waiting(fn);
    if (!fail_sticky && lost_here() == cudaSuccess && sim_nccl_in_flight())
        find("allocation in flight", "%s, while a collective of this process may be running", fn);
    return code;
}

/* Calls that release: on a lost device they fail, and yet nothing is left behind. */
static bool releases(cudaError_t code)
{
    return code == cudaSuccess || fail_sticky || lost_here() != cudaSuccess;
}

/* The thread keeps an error until it is asked for it, even "not ready". */
static cudaError_t leave(cudaError_t code)
{
    if (code != cudaSuccess)
        last_error = code;
    if (!in_host_call)
        pthread_mutex_unlock(&lock);
    return code;
}

/* NVRTC has errors of its own. */
static bool nvrtc_fails(void)
{
    cudaError_t code = enter();
    pthread_mutex_unlock(&lock);
    return code != cudaSuccess;
}

/* ---- pairs of devices ------------------------------------------------------------------------ */

static sim_peer peers[DEVICES][DEVICES];
static bool reaches[DEVICES][DEVICES]; /* access was enabled */
static long peer_copies;
static char *late; /* a bit is wrong there, until something is copied */

/* What a pair does to bytes that go directly from one device to the other. */
static void spoil(int reader, int from, char *bytes, size_t count)
{
    if (reader != from && peers[reader][from] == SIM_PEER_FLIPS && count > 0)
        bytes[count / 2] = (char)(bytes[count / 2] ^ 1);
}

static void mend(void)
{
    if (late != NULL)
        *late = (char)(*late ^ 1);
    late = NULL;
}

void sim_mend_later(char *at)
{
    late = at;
}

/* ---- the driver: contexts -------------------------------------------------------------------- */

/* The device of the context that the thread has; what needs one would else make one. */
static int current_device(const char *fn)
{
    if (stack_depth == 0) {
        find("no context", "%s gives the thread a context that it did not have", fn);
        return 0;
    }
    return stack[stack_depth - 1]->device;
}

static long push_count;

long sim_push_count(void)
{
    return push_count;
}

static CUresult ctx_push(CUcontext context)
{
    push_count++;
    if (context == NULL || context->users == 0 || stack_depth == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[stack_depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult ctx_pop(CUcontext *out)
{
    if (stack_depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = stack[--stack_depth];
    if (stack_depth == 0 && last_error != cudaSuccess) {
        if (lost[(*out)->device] == cudaSuccess) /* or nobody can clear it */
            find("error left behind", "code %d, for the next who asks this thread",
                 (int)last_error);
        last_error = cudaSuccess;
    }
    return CUDA_SUCCESS;
}

struct CUctx_st *sim_other_context(int device)
{
    others[device] = (struct CUctx_st){.device = device, .users = 1};
    return &others[device];
}

static cudaError_t context_error;

void sim_refuse_contexts(int code)
{
    context_error = (cudaError_t)code;
}

static bool libraries_fit(int device);

static CUresult ctx_retain(CUcontext *out, CUdevice device)
{
    pthread_mutex_lock(&lock);
    cudaError_t code = unsafe("cuDevicePrimaryCtxRetain", context_error);
    if (code == cudaSuccess && !libraries_fit(device))
        code = cudaErrorNoKernelImageForDevice;
    if (code == cudaSuccess) {
        contexts[device].device = device;
        contexts[device].users++;
        *out = &contexts[device];
    }
    pthread_mutex_unlock(&lock);
    return (CUresult)code;
}

static CUresult ctx_release(CUdevice device)
{
    pthread_mutex_lock(&lock);
    if (--contexts[device].users < 0)
        find("context released twice", "device %d", device);
    for (int d = 0; d < DEVICES && contexts[device].users == 0; d++)
        reaches[device][d] = reaches[d][device] = false; /* it went with the context */
    if (contexts[device].users == 0)
        lost[device] = cudaSuccess;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static int contexts_kept; /* of each device, by nobody */

void sim_keep_contexts(void)
{
    CUcontext context = NULL;
    contexts_kept = 1;
    for (int d = 0; d < DEVICES; d++)
        (void)ctx_retain(&context, d);
}

bool sim_push_context(int device)
{
    return device >= 0 && device < device_count && ctx_push(&contexts[device]) == CUDA_SUCCESS;
}

bool sim_pop_context(void)
{
    CUcontext context = NULL;
    return ctx_pop(&context) == CUDA_SUCCESS;
}

cudaError_t sim_call_begin(void)
{
    return enter();
}

cudaError_t sim_call_end(cudaError_t code)
{
    return leave(code);
}

static CUresult device_get(CUdevice *out, int ordinal)
{
    *out = ordinal;
    return ordinal < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static int first_place, slices = 1;

void sim_set_first_device(int place)
{
    first_place = place;
}

void sim_set_slices(int each)
{
    slices = each;
}

int sim_place(int device)
{
    return first_place + device;
}

int sim_gpu(int place)
{
    return place / slices;
}

static CUresult device_uuid(CUuuid *out, CUdevice device)
{
    *out = (CUuuid){{0}};
    snprintf(out->bytes, sizeof out->bytes, "simulated %d", sim_place(device));
    return CUDA_SUCCESS;
}

static CUresult device_name(char *out, int bytes, CUdevice device)
{
    snprintf(out, (size_t)bytes, "simulated GPU %d", device);
    return CUDA_SUCCESS;
}

/* ---- clocks ---------------------------------------------------------------------------------- */

typedef struct clock_of {
    uint64_t at[ACTORS];
} clock_of;

typedef struct work { /* what a stream has to do: bytes to move, a kernel, or order to keep */
    enum { MOVE, KERNEL, RECORD, WAIT, JOB, CALL, BUSY } kind;
    struct work *next;
    char *to; /* MOVE */
    const char *from;
    size_t bytes;
    int reader, source; /* devices; -1: the host */
    int kernel;
    sim_launch launch;
    size_t operand_count;
    struct operand *operands;
    void *params;
    uint64_t serial; /* RECORD, WAIT: which record */
    sim_job *job;
    cudaHostFn_t fn; /* CALL */
    void *user;
    double until_ms; /* BUSY */
} work;

struct CUstream_st {
    uint32_t magic;
    int device, actor;
    CUcontext context;
    bool of_a_thread; /* what cudaStreamPerThread is to it */
    bool hangs;       /* it will never be done */
    int capture;      /* its number; 0: none */
    int held;         /* so many groups of NCCL are in progress with it */
    clock_of clock;
    work *todo, **end; /* deferred */
    struct CUstream_st *next;
};
struct CUevent_st {
    uint32_t magic;
    int device;
    bool recorded, hangs;
    int capture;     /* in which the newest record is */
    unsigned denied; /* how often a query says that it is not ready yet */
    uint64_t serial; /* of the newest record */
    cudaStream_t stream;
    clock_of clock;
    struct CUevent_st *next;
};
enum { STREAM = 0x57ea3, EVENT = 0xe7e47, GONE = 0xdead };

static clock_of host;
static uint64_t ticks[ACTORS]; /* of each actor, also after its stream was destroyed */
static bool taken[ACTORS] = {[HOST] = true};
static struct CUstream_st *streams;
static struct CUevent_st *events;
static bool collectives_matter;

void sim_nccl_mind_hangs(bool on)
{
    collectives_matter = on;
}

static void never_ends(const char *fn, bool hangs)
{
    if (hangs)
        find("waits for ever", "%s waits for what hangs", fn);
}

static const struct CUstream_st *recorder_of(uint64_t serial)
{
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        for (const work *w = s->todo; w != NULL; w = w->next)
            if (w->kind == RECORD && w->serial == serial)
                return s;
    return NULL;
}

/* It will never be done: what it is at will not be, or what that waits for. */
static bool stream_hangs(const struct CUstream_st *stream)
{
    while (!stream->hangs && stream->todo != NULL && stream->todo->kind == WAIT) {
        const struct CUstream_st *other = recorder_of(stream->todo->serial);
        if (other == NULL)
            return false;
        stream = other;
    }
    const work *w = stream->todo;
    return stream->hangs ||
           (collectives_matter && w != NULL && w->kind == JOB && sim_job_never_ends(w->job));
}

static void device_never_ends(const char *fn, int device)
{
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        never_ends(fn, s->magic == STREAM && s->device == device && stream_hangs(s));
}

static void join(clock_of *into, const clock_of *other)
{
    for (int a = 0; a < ACTORS; a++)
        into->at[a] = into->at[a] > other->at[a] ? into->at[a] : other->at[a];
}

/* The streams that have no memory of their own: NULL, cudaStreamLegacy and cudaStreamPerThread. */
static bool is_special(cudaStream_t stream)
{
    return stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

static bool stream_is(const char *fn, cudaStream_t stream)
{
    if (is_special(stream))
        find(stream == cudaStreamPerThread ? "stream of a thread" : "legacy stream",
             "%s on a default stream", fn);
    else if (stream->magic != STREAM)
        find("stream after destroy", "%s", fn);
    return !is_special(stream) && stream->magic == STREAM;
}

/* NULL: there are no more actors. */
static cudaStream_t stream_new(CUcontext context)
{
    int actor = 1;
    while (actor < ACTORS && taken[actor])
        actor++;
    struct CUstream_st *s = actor < ACTORS ? calloc(1, sizeof *s) : NULL;
    if (s == NULL)
        return NULL;
    *s = (struct CUstream_st){.magic = STREAM,
                              .device = context->device,
                              .actor = actor,
                              .context = context,
                              .next = streams};
    taken[actor] = true;
    streams = s;
    return s;
}

static capture *capture_of(int number)
{
    capture *c = captures;
    while (c != NULL && c->number != number)
        c = c->next;
    return c;
}

static void capture_break(int number)
{
    capture *c = capture_of(number);
    if (c != NULL)
        c->broken = true;
}

/* A call about a stream; a thread has one of its own in each context. To a broken capture nothing
   is added. */
static cudaError_t enter_on(cudaStream_t *stream)
{
    static _Thread_local cudaStream_t own[DEVICES];
    cudaError_t code = enter();
    if (*stream == cudaStreamPerThread && stack_depth > 0) {
        cudaStream_t *at = &own[stack[stack_depth - 1]->device];
        *at = *at == NULL ? stream_new(stack[stack_depth - 1]) : *at;
        *stream = *at;
        (*at)->of_a_thread = true;
    }
    const capture *c = is_special(*stream) ? NULL : capture_of((*stream)->capture);
    bool broken = c != NULL && c->broken;
    return code == cudaSuccess && broken ? cudaErrorStreamCaptureInvalidated : code;
}

/* Nobody may use a stream while NCCL has not said that it has enqueued what it was told to. */
static bool stream_is_free(const char *fn, cudaStream_t stream)
{
    bool is = stream_is(fn, stream);
    if (is && stream->held > 0)
        find("stream in progress", "%s, while a group of NCCL is not polled to its end", fn);
    return is;
}

static bool event_is(const char *fn, cudaEvent_t event)
{
    if (event == NULL || event->magic != EVENT)
        find("event after destroy", "%s", fn);
    return event != NULL && event->magic == EVENT;
}

/* What is enqueued now comes after what the host has done so far. */
static void enqueue(cudaStream_t stream)
{
    join(&stream->clock, &host);
    stream->clock.at[stream->actor] = ++ticks[stream->actor];
}

struct CUkern_st {
    int kernel;
    struct CUlib_st *library;
};
struct CUlib_st {
    bool live;
    char image[32];
    struct CUkern_st kernels[SIM_KERNELS];
    struct CUlib_st *next;
};

static struct CUlib_st *libraries;
static long library_loads;

static int arch_of_device(int device)
{
    return own_archs[device] != 0 ? own_archs[device] : arch;
}

/* 90 for sm_90 and compute_90. */
static int arch_of(const char *name)
{
    const char *number = strchr(name, '_');
    return number != NULL ? atoi(number + 1) : 0;
}

/* A binary runs on its own generation, from its own architecture on; text on all from that on. */
static bool image_fits(const char *image, int device)
{
    int of = strncmp(image, "sim ", 4) == 0 ? arch_of(image + 4) : 0, own = arch_of_device(device);
    bool text = strncmp(image, "sim compute_", 12) == 0;
    return of > 0 && of <= own && (text || of / 10 == own / 10);
}

/* Libraries are loaded onto a device when something of them is needed there; or eagerly: onto all
   that have a context, and onto others when they get one. */
static bool is_eager(void)
{
    const char *loading = getenv("CUDA_MODULE_LOADING");
    return loading != NULL && strcmp(loading, "EAGER") == 0;
}

static bool libraries_fit(int device)
{
    bool fit = true;
    for (const struct CUlib_st *l = libraries; l != NULL && is_eager(); l = l->next)
        fit = fit && (!l->live || image_fits(l->image, device));
    return fit;
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct access_of {
    size_t begin, end;
    int actor;
    bool write;
    uint64_t time;
    const char *what;
    struct access_of *next;
} access_of;

typedef struct block {
    char *public_at, *shadow; /* what the program has; where the bytes are */
    size_t bytes;
    int device;   /* -1: pinned memory of the host */
    int only_for; /* pinned: the device that may use it; -1: any */
    bool freed, closed;
    bool lent; /* the test's own memory, pinned */
    access_of *accesses;
    struct block *next;
} block;

enum { BEHIND_BYTE = 0x5d };

static block *blocks;

static block *block_of(const void *pointer)
{
    for (block *b = blocks; b != NULL; b = b->next)
        if ((const char *)pointer >= b->public_at &&
            (const char *)pointer < b->public_at + b->bytes)
            return b;
    return NULL;
}

static size_t pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static bool is_behind_block(const char *at)
{
    bool behind = false;
    for (const block *b = blocks; b != NULL; b = b->next)
        behind = behind ||
                 (at >= b->public_at + b->bytes && at < b->public_at + pages(b->bytes) + PAGE);
    return behind;
}

static bool before(const access_of *a, const clock_of *clock)
{
    return a->time <= clock->at[a->actor];
}

/* The host may not touch these bytes, and what else is on their pages; or only read them. */
static void close_bytes(const block *b, size_t begin, size_t end, bool write)
{
    size_t first = begin / PAGE * PAGE;
    mprotect(b->public_at + first, pages(end) - first, write ? PROT_NONE : PROT_READ);
}

/* A page of pinned memory is the host's again when it knows of the end of every copy there. */
static void open_blocks(void)
{
    for (block *b = blocks; b != NULL; b = b->next) {
        if (!b->closed || b->freed)
            continue;
        mprotect(b->public_at, pages(b->bytes), PROT_READ | PROT_WRITE);
        b->closed = false;
        for (int writes = 0; writes < 2; writes++) /* where both are, nothing may be done */
            for (const access_of *a = b->accesses; a != NULL; a = a->next)
                if (a->write == (writes == 1) && !before(a, &host)) {
                    close_bytes(b, a->begin, a->end, a->write);
                    b->closed = true;
                }
    }
}

static void host_learns(const clock_of *clock)
{
    join(&host, clock);
    open_blocks();
}

static void close_block(block *b, size_t begin, size_t end, bool write)
{
    if (b->device >= 0 || b->lent)
        return;
    close_bytes(b, begin, end, write);
    b->closed = true;
}

static bool overlap(const access_of *a, size_t begin, size_t end)
{
    return a->begin < end && begin < a->end;
}

/* The bytes are touched by the newest operation of the stream. */
static void touch(block *b, size_t begin, size_t bytes, bool write, cudaStream_t stream,
                  const char *what)
{
    size_t end = begin + bytes;
    for (access_of **link = &b->accesses; *link != NULL;) {
        access_of *a = *link;
        bool ordered = before(a, &stream->clock) || a->actor == stream->actor;
        if (overlap(a, begin, end) && (a->write || write) && !ordered)
            find("race",
                 "%s %s bytes %zu to %zu of a block of %zu on %d, %s %s bytes %zu to %zu, "
                 "and nothing orders them",
                 what, write ? "writes" : "reads", begin, end, b->bytes, b->device, a->what,
                 a->write ? "wrote" : "read", a->begin, a->end);
        bool covered = a->begin >= begin && a->end <= end && ordered && (write || !a->write);
        if (covered || before(a, &host)) { /* what the host knows of is before all that comes */
            *link = a->next;
            free(a);
        } else {
            link = &a->next;
        }
    }
    access_of *own = malloc(sizeof *own);
    *own = (access_of){begin, end, stream->actor, write, ticks[stream->actor], what, b->accesses};
    b->accesses = own;
    close_block(b, begin, end, write);
}

/* Where the bytes of an operand are; NULL, and a finding, where there are none. */
static char *reach(const void *pointer, size_t bytes, bool write, cudaStream_t stream,
                   const char *what)
{
    block *b = block_of(pointer);
    size_t at = b != NULL ? (size_t)((const char *)pointer - b->public_at) : 0;
    if (b == NULL) {
        find("no memory", "%s: %p is not memory of CUDA's", what, pointer);
        return NULL;
    }
    if (b->freed) {
        find("use after free", "%s: a block of %zu bytes on %d", what, b->bytes, b->device);
        return NULL;
    }
    if (bytes > b->bytes - at) {
        find("out of bounds", "%s: bytes %zu to %zu of a block of %zu", what, at, at + bytes,
             b->bytes);
        return NULL;
    }
    if (b->only_for >= 0 && b->only_for != stream->device)
        find("not portable", "%s of device %d uses memory that is pinned for %d", what,
             stream->device, b->only_for);
    touch(b, at, bytes, write, stream, what);
    return b->shadow + at;
}

static bool cell_fault(const char *at);

/* The host touched what it must not: say so, and let it have pinned memory. */
static void fault(int signal_number, siginfo_t *info, void *context)
{
    block *b = block_of(info->si_addr);
    (void)signal_number, (void)context;
    if (b != NULL && b->device < 0 && b->closed) {
        find("host in flight", "the host touches pinned memory that a copy is using");
        mprotect(b->public_at, pages(b->bytes), PROT_READ | PROT_WRITE);
        b->closed = false;
        return;
    }
    if (b == NULL && cell_fault(info->si_addr))
        return;
    if (b == NULL && is_behind_block(info->si_addr))
        find("host out of bounds", "the host touches what is behind a block");
    if (b != NULL)
        find("host on device", "the host touches memory of device %d", b->device);
    signal(SIGSEGV, SIG_DFL); /* and the same access again */
}

static void watch_faults(void)
{
    static bool watching;
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (!watching)
        sigaction(SIGSEGV, &action, NULL);
    watching = true;
}

/* Memory of the host is mapped twice, so that it can be closed to all but the copies. */
static bool map_host(block *b)
{
    int file = memfd_create("sim", 0);
    size_t bytes = pages(b->bytes);
    bool made = file >= 0 && ftruncate(file, (off_t)bytes) == 0;
    void *first = made ? mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                       : MAP_FAILED;
    void *second = made ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                        : MAP_FAILED;
    close(file);
    b->public_at = first;
    b->shadow = second;
    if (second != MAP_FAILED && first != MAP_FAILED) { /* behind the end of the file is nothing */
        mprotect((char *)first + bytes, PAGE, PROT_NONE);
        memset(b->shadow + b->bytes, BEHIND_BYTE, bytes - b->bytes);
    }
    return first != MAP_FAILED && second != MAP_FAILED;
}

/* Memory begins as NaN of any kind: pages of one file, each copied when it is first written. */
enum { POISON_BYTES = 4 << 20 };
static int poison_file = -1;

__attribute__((constructor)) static void make_poison(void)
{
    static char page[PAGE];
    memset(page, 0xff, sizeof page);
    poison_file = memfd_create("sim poison", 0);
    for (int at = 0; at < POISON_BYTES; at += PAGE)
        if (write(poison_file, page, sizeof page) != PAGE)
            abort();
}

static bool poison(char *at, size_t bytes)
{
    bool made = true;
    for (size_t done = 0; done < bytes && made; done += POISON_BYTES) {
        size_t part = bytes - done < POISON_BYTES ? bytes - done : POISON_BYTES;
        made = mmap(at + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, poison_file,
                    0) != MAP_FAILED;
    }
    return made;
}

/* Addresses of device memory are reserved for ever: what was freed is never anybody else's, and
   behind each block is a page of nobody's. */
static bool map_device(block *b)
{
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t bytes = pages(b->bytes);
    void *at = mmap(NULL, bytes + PAGE, PROT_NONE, how, -1, 0);
    void *shadow = mmap(NULL, bytes, PROT_NONE, how, -1, 0);
    b->public_at = at;
    b->shadow = shadow;
    return at != MAP_FAILED && shadow != MAP_FAILED && poison(shadow, bytes);
}

static cudaError_t make_block(size_t bytes, int device, void **out)
{
    block *b = calloc(1, sizeof *b);
    watch_faults();
    if (b == NULL || bytes == 0 || (device >= 0 && bytes > memory_bytes - memory_used[device])) {
        free(b);
        return bytes == 0 ? cudaErrorInvalidValue : cudaErrorMemoryAllocation;
    }
    *b = (block){.bytes = bytes, .device = device, .only_for = -1, .next = blocks};
    if (!(device < 0 ? map_host(b) : map_device(b))) {
        free(b);
        return cudaErrorMemoryAllocation;
    }
    if (device >= 0)
        memory_used[device] += bytes;
    blocks = b;
    *out = b->public_at;
    return cudaSuccess;
}

void sim_pin(void *pointer, size_t bytes)
{
    block *b = calloc(1, sizeof *b);
    pthread_mutex_lock(&lock);
    *b = (block){.public_at = pointer,
                 .shadow = pointer,
                 .bytes = bytes,
                 .device = -1,
                 .lent = true,
                 .next = blocks};
    blocks = b;
    pthread_mutex_unlock(&lock);
}

static void finish_all(void);

void sim_unpin(void *pointer)
{
    pthread_mutex_lock(&lock);
    finish_all();
    for (block **link = &blocks; *link != NULL; link = &(*link)->next)
        if ((*link)->public_at == pointer && (*link)->lent) {
            *link = (*link)->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

static cudaError_t drop_block(const char *fn, void *pointer, bool pinned)
{
    finish_all(); /* what may still use it is a finding, not a crash */
    block *b = block_of(pointer);
    if (pointer == NULL)
        return cudaSuccess;
    if (b == NULL || b->public_at != pointer || pinned != (b->device < 0)) {
        find("bad free", "%s of %p", fn, pointer);
        return cudaErrorInvalidValue;
    }
    if (b->freed) {
        find("double free", "%s of a block of %zu bytes", fn, b->bytes);
        return cudaErrorInvalidValue;
    }
    for (const access_of *a = b->accesses; a != NULL; a = a->next)
        if (!before(a, &host) && !fail_sticky && lost_here() == cudaSuccess)
            find("free in flight", "%s of a block that %s may still be using", fn, a->what);
    while (b->accesses != NULL) {
        access_of *a = b->accesses;
        b->accesses = a->next;
        free(a);
    }
    bool same = true;
    for (size_t at = b->bytes; b->device < 0 && at < pages(b->bytes); at++)
        same = same && b->shadow[at] == BEHIND_BYTE;
    if (!same)
        find("host out of bounds", "the host wrote behind a pinned block of %zu bytes", b->bytes);
    b->freed = true;
    munmap(b->shadow, pages(b->bytes));
    mprotect(b->public_at, pages(b->bytes), PROT_NONE);
    if (b->device >= 0)
        memory_used[b->device] -= b->bytes;
    return cudaSuccess;
}

void sim_check_leaks(void)
{
    pthread_mutex_lock(&lock);
    for (const block *b = blocks; b != NULL; b = b->next)
        if (!b->freed)
            find("leak", "%zu bytes on %d", b->bytes, b->device);
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        if (s->magic == STREAM && !s->of_a_thread)
            find("leak", "a stream of device %d", s->device);
    for (const struct CUevent_st *e = events; e != NULL; e = e->next)
        if (e->magic == EVENT)
            find("leak", "an event of device %d", e->device);
    for (int d = 0; d < DEVICES; d++)
        if (contexts[d].users > contexts_kept)
            find("leak", "the context of device %d", d);
    for (const struct CUlib_st *l = libraries; l != NULL; l = l->next)
        if (l->live)
            find("leak", "a library of kernels");
    if (stack_depth > 0)
        find("leak", "a context on the stack of this thread");
    if (captures != NULL)
        find("leak", "a capture that did not end");
    sim_nccl_check_leaks();
    if (last_error != cudaSuccess)
        find("error left behind", "code %d, for the next who asks this thread", (int)last_error);
    pthread_mutex_unlock(&lock);
}

/* ---- kernels of the text, and of the test's own ---------------------------------------------- */

static sim_kernel added_kernels[SIM_KERNELS];
static int added_kernel_count;

void sim_add_kernel(const sim_kernel *kernel)
{
    added_kernels[added_kernel_count++] = *kernel;
}

static int kernel_find(const char *name)
{
    for (int k = 0; k < added_kernel_count; k++)
        if (strcmp(added_kernels[k].name, name) == 0)
            return sim_kernel_count() + k;
    return sim_kernel_find(name);
}

static const char *kernel_name(int kernel)
{
    const int text = sim_kernel_count();
    return kernel >= text ? added_kernels[kernel - text].name : sim_kernel_name(kernel);
}

/* NULL: it is of the text. */
static const sim_kernel *added_kernel(int kernel)
{
    return kernel >= sim_kernel_count() ? &added_kernels[kernel - sim_kernel_count()] : NULL;
}

/* ---- work ------------------------------------------------------------------------------------

   Done when it is enqueued; or, deferred, later: at some time that the seed decides, in any order
   that streams and events allow, at the latest when the host waits for it.                       */

typedef struct operand {
    sim_range range;
    int device;
    char *shadow, *copy, *first;    /* first: the copy of the first of two runs */
    struct cell *cell, *first_cell; /* NULL: the copy is that of an operand before */
} operand;

static uint64_t seed;      /* 0: nothing is deferred */
static unsigned run_count; /* kernels, and where $SIM_SEED begins to count */

/* Records are numbered from 1 on. Two of one event, on two streams, are reached in any order. */
static uint64_t record_count, record_room;
static bool *reached;

static uint64_t record_new(void)
{
    if (++record_count >= record_room) {
        record_room = 2 * record_count + 1024;
        reached = realloc(reached, record_room * sizeof *reached);
    }
    reached[record_count] = false;
    return record_count;
}

static bool is_reached(uint64_t serial)
{
    return serial == 0 || reached[serial];
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("SIM_SEED");
    seed = text != NULL ? strtoull(text, NULL, 10) : 0;
    run_count = (unsigned)seed;
    setenv("DP_CACHE", "off", 1);
}

void sim_defer(unsigned long long new_seed)
{
    seed = new_seed;
}

static uint64_t chance(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

/* A kernel runs on copies of exactly the bytes that it may touch. A copy lies as its operand does
   in steps of COPY_ALIGN, so that wide accesses are aligned where they are in reality, and ends
   where a page that nobody may touch begins; what lies between has a known content. */
typedef struct cell {
    char *begin, *end; /* whole pages */
    bool used, torn;   /* torn: somebody was in the pages around it, which are open now */
    struct cell *next;
} cell;

enum { COPY_ALIGN = 32, FENCE = 64, FENCE_BYTE = 0x5e, TWICE_BYTES = 1 << 20 };

static cell *cells;
static const char *running; /* the kernel */

/* The kernels' text is compiled with -fsanitize=alignment, which calls this. */
void __ubsan_handle_type_mismatch_v1(void *site, uintptr_t pointer);
void __ubsan_handle_type_mismatch_v1(void *site, uintptr_t pointer)
{
    (void)site;
    find("misaligned", "%s reads or writes more at a time than 0x%llx allows", running,
         (unsigned long long)pointer);
}

static cell *cell_take(size_t bytes)
{
    cell *own = cells;
    bytes = pages(bytes + FENCE);
    while (own != NULL && (own->used || (size_t)(own->end - own->begin) != bytes))
        own = own->next;
    if (own == NULL) {
        char *at = mmap(NULL, bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(at + PAGE, bytes, PROT_READ | PROT_WRITE);
        own = malloc(sizeof *own);
        *own = (cell){.begin = at + PAGE, .end = at + PAGE + bytes, .next = cells};
        cells = own;
    }
    own->used = true;
    return own;
}

static void cell_give(cell *own)
{
    if (own->torn) {
        mprotect(own->begin - PAGE, PAGE, PROT_NONE);
        mprotect(own->end, PAGE, PROT_NONE);
    }
    own->used = own->torn = false;
}

/* A kernel is beside its operand: say so, and let it go on. */
static bool cell_fault(const char *at)
{
    for (cell *c = cells; c != NULL; c = c->next)
        if (c->used && at >= c->begin - PAGE && at < c->end + PAGE) {
            find("out of bounds", "%s touches what is %s an operand", running,
                 at < c->begin ? "before" : "behind");
            mprotect(c->begin - PAGE, PAGE, PROT_READ | PROT_WRITE);
            mprotect(c->end, PAGE, PROT_READ | PROT_WRITE);
            c->torn = true;
            return true;
        }
    return false;
}

/* The place of a copy in its cell: at its end. */
static char *cell_place(const cell *own, const operand *o)
{
    size_t over = ((uintptr_t)own->end - o->range.bytes - (uintptr_t)o->range.pointer) % COPY_ALIGN;
    return own->end - o->range.bytes - over;
}

static void lay_out(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        operand *own = &w->operands[i];
        size_t bytes = own->range.bytes;
        own->copy = NULL;
        own->cell = NULL;
        for (size_t k = 0; k < i && own->copy == NULL; k++)
            if (w->operands[k].shadow == own->shadow && w->operands[k].range.bytes == bytes)
                own->copy = w->operands[k].copy; /* the same bytes */
        if (own->copy != NULL)
            continue;
        own->cell = cell_take(bytes + COPY_ALIGN);
        own->copy = cell_place(own->cell, own);
        memcpy(own->copy, own->shadow, bytes);
        spoil(w->reader, own->device, own->copy, bytes);
        memset(own->copy - FENCE, FENCE_BYTE, FENCE);
        memset(own->copy + bytes, FENCE_BYTE, (size_t)(own->cell->end - own->copy) - bytes);
    }
}

static bool is_fence(const char *from, const char *to)
{
    while (from < to && *from == FENCE_BYTE)
        from++;
    return from == to;
}

static void check_fences(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        const operand *own = &w->operands[i];
        if (own->cell != NULL && (!is_fence(own->copy - FENCE, own->copy) ||
                                  !is_fence(own->copy + own->range.bytes, own->cell->end)))
            find("out of bounds", "%s writes beside an operand of %zu bytes",
                 kernel_name(w->kernel), own->range.bytes);
    }
}

static void run_on_copies(const work *w, unsigned grid, unsigned order, bool as_text)
{
    char *at[SIM_RANGES];
    const sim_kernel *added = added_kernel(w->kernel);
    const sim_launch launch = {grid, w->launch.lanes, order, as_text};
    lay_out(w);
    for (size_t i = 0; i < w->operand_count; i++)
        at[i] = w->operands[i].copy;
    running = kernel_name(w->kernel);
    bool together = added != NULL ? added->run(w->params, at, &launch)
                                  : sim_kernel_run(w->kernel, w->params, at, &launch);
    if (!together)
        find("barrier of some", "%s: not all lanes of a block come to it", running);
    check_fences(w);
}

/* To be compared with the next one. */
static void keep_run(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        operand *own = &w->operands[i];
        if (own->first_cell != NULL)
            cell_give(own->first_cell);
        own->first = own->copy;
        own->first_cell = own->cell;
    }
}

static void compare_runs(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        const operand *own = &w->operands[i];
        if (own->range.write && memcmp(own->first, own->copy, own->range.bytes) != 0)
            find("order of lanes",
                 "%s: the result depends on which lane or block is first, or how many there are",
                 running);
    }
}

static void compare_with_text(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        const operand *own = &w->operands[i];
        if (own->range.write && !sim_kernel_agrees(w->kernel, w->params, i, own->first, own->copy))
            find("not the text", "%s: its PTX computes something else", running);
    }
}

static void put_back(const work *w)
{
    for (size_t i = 0; i < w->operand_count; i++) {
        const operand *own = &w->operands[i];
        if (own->range.write)
            memcpy(own->shadow, own->copy, own->range.bytes);
        if (own->cell != NULL)
            cell_give(own->cell);
        if (own->first_cell != NULL)
            cell_give(own->first_cell);
    }
}

/* In two orders, which must give the same; what is long in one of them. For kernels of the text the
   number of blocks must not matter either: with few of them, a lane goes round several times. PTX
   must give what the text gives as well. */
static void run_kernel(const work *w)
{
    size_t bytes = 0;
    for (size_t i = 0; i < w->operand_count; i++)
        bytes += w->operands[i].range.bytes;
    const unsigned orders[] = {SIM_FORWARDS, SIM_BACKWARDS, SIM_SHUFFLED + ++run_count};
    const bool text = added_kernel(w->kernel) == NULL;
    const bool ptx = text && sim_kernel_is_ptx(w->kernel);
    const unsigned all = w->launch.blocks, some = text ? 1 + run_count / 3 % all : all;
    if (ptx && bytes < TWICE_BYTES) {
        run_on_copies(w, all, SIM_FORWARDS, true);
        keep_run(w);
    }
    run_on_copies(w, all, orders[run_count % 3], false);
    if (ptx && bytes < TWICE_BYTES)
        compare_with_text(w);
    if (bytes < TWICE_BYTES) {
        keep_run(w);
        run_on_copies(w, some, orders[(run_count + 1) % 3], false);
        compare_runs(w);
    }
    put_back(w);
    free(w->operands);
    free(w->params);
}

static void perform(const work *w)
{
    switch (w->kind) {
    case MOVE:
        memmove(w->to, w->from, w->bytes);
        spoil(w->reader, w->source, w->to, w->bytes);
        mend();
        break;
    case KERNEL:
        run_kernel(w);
        break;
    case RECORD:
        reached[w->serial] = true;
        break;
    case CALL:
        in_host_call = true;
        w->fn(w->user);
        in_host_call = false;
        break;
    case WAIT:
    case JOB:
    case BUSY:
        break;
    }
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Every one of its streams has come to the job, or passed it. */
static bool is_met(const sim_job *job)
{
    int met = job->count - job->holders;
    for (int i = 0; i < job->count; i++) {
        const work *next = job->streams[i]->todo;
        met += next != NULL && next->kind == JOB && next->job == job;
    }
    return met == job->count;
}

static bool can_begin(const work *w)
{
    if (w->kind == JOB)
        return is_met(w->job) && sim_job_can_step(w->job);
    if (w->kind == BUSY)
        return now_ms() >= w->until_ms;
    return w->kind != WAIT || is_reached(w->serial);
}

static bool is_ready(const struct CUstream_st *s)
{
    return s->todo != NULL && can_begin(s->todo);
}

static void pass(struct CUstream_st *s)
{
    work *w = s->todo;
    s->todo = w->next;
    if (s->todo == NULL)
        s->end = &s->todo;
    free(w);
}

static void take_step(struct CUstream_st *s)
{
    work *w = s->todo;
    if (w->kind != JOB) {
        perform(w);
        pass(s);
    } else if (sim_job_step(w->job)) {
        sim_job *job = w->job;
        pass(s);
        if (--job->holders == 0)
            sim_job_give_back(job);
    }
}

/* One piece of work of any stream that has some ready; false: there is none. */
static bool run_some(void)
{
    uint64_t ready = 0, place;
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        ready += is_ready(s);
    if (ready == 0)
        return false;
    place = chance(ready);
    for (struct CUstream_st *s = streams; s != NULL; s = s->next)
        if (is_ready(s) && place-- == 0) {
            take_step(s);
            return true;
        }
    return false;
}

static void finish_all(void)
{
    while (run_some())
        continue;
}

/* What was captured, to be done again: one piece after another, as it was enqueued. Who else uses
   its memory meanwhile is not looked at. */
struct CUgraph_st {
    work *pieces;
    size_t count;
    int users;
    bool has_jobs; /* which are done once */
};
struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = data != NULL ? malloc(bytes) : NULL;
    return copy != NULL ? memcpy(copy, data, bytes) : NULL;
}

static work piece_of(const work *w)
{
    work own = *w;
    own.operands = copy_of(w->operands, w->operand_count * sizeof *w->operands);
    own.params = copy_of(w->params, SIM_PARAM_BYTES);
    return own;
}

static void capture_piece(struct CUgraph_st *graph, const work *w)
{
    graph->has_jobs = graph->has_jobs || w->kind == JOB;
    if (w->kind != MOVE && w->kind != KERNEL && w->kind != CALL)
        return;
    graph->pieces = realloc(graph->pieces, (graph->count + 1) * sizeof *w);
    graph->pieces[graph->count++] = piece_of(w);
}

static void graph_drop(struct CUgraph_st *graph)
{
    if (graph == NULL || --graph->users > 0)
        return;
    for (size_t i = 0; i < graph->count; i++) {
        free(graph->pieces[i].operands);
        free(graph->pieces[i].params);
    }
    free(graph->pieces);
    free(graph);
}

static void submit(cudaStream_t stream, work w)
{
    const capture *c = capture_of(stream->capture);
    if (c != NULL)
        capture_piece(c->graph, &w);
    if (trace_on && (w.kind == MOVE || w.kind == KERNEL)) {
        free(w.operands);
        free(w.params);
        return;
    }
    if (seed == 0 && stream->todo == NULL && w.kind != JOB && can_begin(&w)) {
        perform(&w);
        return;
    }
    work *own = malloc(sizeof *own);
    *own = w;
    own->next = NULL;
    if (stream->todo == NULL)
        stream->end = &stream->todo;
    *stream->end = own;
    stream->end = &own->next;
    if (seed == 0)
        finish_all();
    for (uint64_t some = seed != 0 ? chance(3) : 0; some > 0 && run_some(); some--)
        continue;
}

static bool some_are_busy(void)
{
    bool busy = false;
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        busy = busy || (s->todo != NULL && s->todo->kind == BUSY);
    return busy;
}

/* What can only go on when another process does something, or another thread, or after some time:
   those get their time. False: it is in vain. */
static bool others_go_on(void)
{
    if (!sim_nccl_waits() && !some_are_busy())
        return false;
    pthread_mutex_unlock(&lock);
    usleep(100);
    pthread_mutex_lock(&lock);
    return true;
}

/* For ever, where hangs are not minded: another thread may still abort. */
static bool waits_on(const char *fn, const struct CUstream_st *stream)
{
    bool hangs = stream != NULL && stream_hangs(stream);
    never_ends(fn, hangs);
    return !hangs && others_go_on();
}

static void check_finished(const struct CUstream_st *stream)
{
    if (stream->todo != NULL && !sim_nccl_waits())
        find("never done", "a stream is waited for that does not come to its end");
}

static void finish_stream(const struct CUstream_st *stream)
{
    while (stream->todo != NULL && (run_some() || waits_on("a stream", stream)))
        continue;
    check_finished(stream);
}

static void finish_event(const struct CUevent_st *event)
{
    while (!is_reached(event->serial) && (run_some() || waits_on("an event", event->stream)))
        continue;
    if (!is_reached(event->serial) && !sim_nccl_waits())
        find("never done", "an event is waited for that no stream comes to");
}

/* ---- the runtime: devices -------------------------------------------------------------------- */

bool sim_has_gpus(void)
{
    return driver_version != 0 && device_count > 0;
}

void sim_set_device_count(int count)
{
    device_count = count;
}

void sim_set_driver(int version)
{
    driver_version = version;
}

void sim_set_memory(size_t bytes)
{
    memory_bytes = bytes;
}

void sim_set_arch(int new_arch)
{
    arch = new_arch;
}

void sim_set_arch_of(int device, int own)
{
    own_archs[device] = own;
}

void sim_set_versions(int runtime, int nvrtc)
{
    runtime_version = runtime;
    nvrtc_version = nvrtc;
}

void sim_set_count_error(int code)
{
    count_error = code;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    cudaError_t code = enter();
    *version = runtime_version;
    return leave(code);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t code = enter();
    if (code == cudaSuccess)
        code = (cudaError_t)count_error;
    if (code == cudaSuccess && driver_version == 0)
        code = cudaErrorInsufficientDriver;
    if (code == cudaSuccess && device_count == 0)
        code = cudaErrorNoDevice;
    if (code == cudaSuccess)
        *count = device_count;
    devices_used = devices_used || code == cudaSuccess;
    return leave(code);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    cudaError_t code = enter();
    *version = driver_version;
    return leave(code);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    cudaError_t code = enter();
    if (code == cudaSuccess && (device < 0 || device >= device_count))
        code = cudaErrorInvalidDevice;
    if (code == cudaSuccess)
        *value = attr == cudaDevAttrComputeCapabilityMajor   ? arch_of_device(device) / 10
                 : attr == cudaDevAttrComputeCapabilityMinor ? arch_of_device(device) % 10
                 : attr == cudaDevAttrMaxPitch               ? PITCH_MAX
                 : attr == cudaDevAttrHostNumaId             ? device % 2 - 1
                                                             : MULTIPROCESSORS;
    return leave(code);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device)
{
    cudaError_t code = enter();
    if (code == cudaSuccess)
        snprintf(id, (size_t)bytes, "0000:%02x:00.0", (unsigned)sim_gpu(sim_place(device)));
    return leave(code);
}

void sim_set_peer(int reader, int from, sim_peer peer)
{
    peers[reader][from] = peer;
}

long sim_peer_copies(void)
{
    return peer_copies;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    cudaError_t code = enter();
    if (code == cudaSuccess)
        *can = device != peer && peers[device][peer] != SIM_PEER_NONE;
    return leave(code);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    cudaError_t code = unsafe(__func__, enter());
    int device = current_device(__func__);
    if (flags != 0)
        find("unknown flags", "%s: 0x%x", __func__, flags);
    if (code == cudaSuccess && peers[device][peer] == SIM_PEER_NONE)
        code = cudaErrorInvalidDevice;
    if (code == cudaSuccess && reaches[device][peer])
        code = cudaErrorPeerAccessAlreadyEnabled;
    if (code == cudaSuccess)
        reaches[device][peer] = true;
    return leave(code);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    cudaError_t code = unsafe(__func__, enter());
    int device = current_device(__func__);
    if (code == cudaSuccess && !reaches[device][peer])
        code = cudaErrorPeerAccessNotEnabled;
    if (code == cudaSuccess)
        reaches[device][peer] = false;
    return leave(code);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static CUresult exchange_mode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = (CUstreamCaptureMode)thread_mode;
    thread_mode = (enum cudaStreamCaptureMode) * mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* Default streams are of any context. */
static CUresult stream_context(cudaStream_t stream, CUcontext *out, CUgreenCtx *out_green)
{
    *out_green = NULL;
    if (is_special(stream) && stack_depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = is_special(stream) ? stack[stack_depth - 1] : stream->context;
    return CUDA_SUCCESS;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    cudaError_t code = enter();
    (void)current_device(__func__);
    if (code == cudaSuccess) {
        *least = 0;
        *greatest = -5;
    }
    return leave(code);
}

cudaError_t cudaMemGetInfo(size_t *bytes_free, size_t *total)
{
    cudaError_t code = enter();
    int device = current_device(__func__);
    if (code == cudaSuccess) {
        *bytes_free = memory_bytes - memory_used[device];
        *total = memory_bytes;
    }
    return leave(code);
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "a simulated error";
}

/* What a device is lost for stays. */
cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last_error;
    last_error = lost_here();
    return code;
}

static CUresult pointer_attribute(void *out, CUpointer_attribute what, CUdeviceptr pointer)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    const block *b = block_of((const void *)(uintptr_t)pointer);
    CUdeviceptr first = b != NULL ? (uintptr_t)b->public_at : 0;
    if (b != NULL && !b->freed) {
        if (what == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
            memcpy(out, &b->bytes, sizeof b->bytes);
        else
            memcpy(out, &first, sizeof first);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    static const struct {
        const char *name;
        void (*fn)(void);
    } entries[] = {{"cuCtxPushCurrent", (void (*)(void))ctx_push},
                   {"cuCtxPopCurrent", (void (*)(void))ctx_pop},
                   {"cuDeviceGet", (void (*)(void))device_get},
                   {"cuDeviceGetName", (void (*)(void))device_name},
                   {"cuDeviceGetUuid", (void (*)(void))device_uuid},
                   {"cuDevicePrimaryCtxRetain", (void (*)(void))ctx_retain},
                   {"cuDevicePrimaryCtxRelease", (void (*)(void))ctx_release},
                   {"cuPointerGetAttribute", (void (*)(void))pointer_attribute},
                   {"cuStreamGetCtx", (void (*)(void))stream_context},
                   {"cuThreadExchangeStreamCaptureMode", (void (*)(void))exchange_mode}};
    cudaError_t code = enter();
    (void)version, (void)flags;
    *result = cudaDriverEntryPointSymbolNotFound;
    for (size_t i = 0; i < sizeof entries / sizeof *entries && code == cudaSuccess; i++)
        if (strcmp(entries[i].name, symbol) == 0) {
            memcpy(out, &entries[i].fn, sizeof *out);
            *result = cudaDriverEntryPointSuccess;
        }
    return leave(code);
}

/* ---- the runtime: memory --------------------------------------------------------------------- */

static long alloc_count;

long sim_alloc_count(void)
{
    return alloc_count;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    cudaError_t code = enter_allocating(__func__);
    int device = current_device(__func__);
    alloc_count++;
    return leave(code == cudaSuccess ? make_block(bytes, device, out) : code);
}

cudaError_t cudaFree(void *pointer)
{
    cudaError_t code = enter_allocating(__func__);
    int device = current_device(__func__);
    if (code == cudaSuccess)
        device_never_ends(__func__, device);
    cudaError_t dropped = releases(code) ? drop_block(__func__, pointer, false) : code;
    return leave(code == cudaSuccess ? dropped : code);
}

static int pinned_node = -1;

int sim_pinned_node(void)
{
    return pinned_node;
}

static int preferred_node(void)
{
    unsigned long nodes[16] = {0};
    int mode = 0;
    if (syscall(SYS_get_mempolicy, &mode, nodes, 1024, 0, 0) != 0 || mode != 1 || nodes[0] == 0)
        return -1;
    return __builtin_ctzl(nodes[0]);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    cudaError_t code = enter_allocating(__func__);
    int device = current_device(__func__);
    if (code == cudaSuccess && (flags & ~(unsigned)cudaHostAllocPortable) != 0) {
        find("unknown flags", "%s: 0x%x", __func__, flags);
        code = cudaErrorInvalidValue;
    }
    if (code == cudaSuccess)
        code = make_block(bytes, -1, out);
    if (code == cudaSuccess)
        blocks->only_for = flags == 0 ? device : -1;
    pinned_node = preferred_node();
    return leave(code);
}

cudaError_t cudaFreeHost(void *pointer)
{
    cudaError_t code = enter_allocating(__func__);
    (void)current_device(__func__);
    cudaError_t dropped = releases(code) ? drop_block(__func__, pointer, true) : code;
    return leave(code == cudaSuccess ? dropped : code);
}

static enum cudaMemoryType host_type = cudaMemoryTypeHost;

void sim_manage(bool on)
{
    host_type = on ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    cudaError_t code = enter();
    (void)current_device(__func__);
    if (code == cudaSuccess) {
        const block *b = block_of(pointer);
        bool live = b != NULL && !b->freed;
        *attributes = (struct cudaPointerAttributes){.type = !live ? cudaMemoryTypeUnregistered
                                                             : b->device < 0 ? host_type
                                                                             : cudaMemoryTypeDevice,
                                                     .device = live ? b->device : 0};
    }
    return leave(code);
}

/* ---- the runtime: streams and events --------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    cudaError_t code = enter_waiting(__func__);
    (void)current_device(__func__);
    (void)priority;
    if (code == cudaSuccess && (flags & ~(unsigned)cudaStreamNonBlocking) != 0) {
        find("unknown flags", "%s: 0x%x", __func__, flags);
        code = cudaErrorInvalidValue;
    }
    if (code == cudaSuccess && flags == 0)
        find("blocking stream", "it waits for the default stream, and that for it");
    cudaStream_t stream =
        code == cudaSuccess && stack_depth > 0 ? stream_new(stack[stack_depth - 1]) : NULL;
    if (stream == NULL)
        return leave(code != cudaSuccess ? code : cudaErrorMemoryAllocation);
    *out = stream;
    return leave(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t code = enter_waiting(__func__);
    (void)current_device(__func__);
    if (releases(code) && stream_is_free(__func__, stream)) {
        if (stream->capture != 0)
            find("in capture", "%s of a stream that is captured", __func__);
        while (stream->todo != NULL && run_some())
            continue;
        check_finished(stream);
        stream->magic = GONE; /* what waits for other ranks it still does */
        taken[stream->actor] = stream->todo != NULL;
    }
    return leave(code);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    cudaError_t code = enter();
    int current = current_device(__func__);
    if (code == cudaSuccess && (is_special(stream) || stream_is(__func__, stream)))
        *device = is_special(stream) ? current : stream->device;
    return leave(code);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    code = may_wait(__func__, code);
    (void)current_device(__func__);
    if (code == cudaSuccess && stream_is_free(__func__, stream)) {
        if (stream->capture != 0) {
            find("in capture", "%s of a stream that is captured", __func__);
            capture_break(stream->capture);
            return leave(cudaErrorStreamCaptureUnsupported);
        }
        never_ends(__func__, stream->hangs);
        finish_stream(stream);
        host_learns(&stream->clock);
    }
    return leave(code);
}

/* A stream that waits for an event of a captured one is captured from then on. What is captured is
   done at once, as if the graph were launched, and again when it is. */
static cudaError_t capture_refuses(cudaStream_t stream, const struct CUevent_st *event,
                                   const char *what, cudaError_t code)
{
    find("in capture", "a stream waits for an event %s", what);
    capture_break(stream->capture);
    capture_break(event->capture);
    return code;
}

static cudaError_t capture_follows(cudaStream_t stream, cudaEvent_t event)
{
    if (stream->capture == event->capture)
        return cudaSuccess;
    if (event->capture == 0)
        return capture_refuses(stream, event, "outside its capture",
                               cudaErrorStreamCaptureIsolation);
    if (capture_of(event->capture) == NULL)
        return capture_refuses(stream, event, "of a capture that has ended",
                               cudaErrorCapturedEvent);
    if (stream->capture != 0)
        return capture_refuses(stream, event, "of another capture", cudaErrorStreamCaptureMerge);
    stream->capture = event->capture;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    static int count;
    cudaError_t code = enter_on(&stream);
    if (code == cudaSuccess && stream_is_free(__func__, stream)) {
        if (stream->capture != 0)
            return leave(cudaErrorIllegalState);
        capture *c = calloc(1, sizeof *c);
        *c = (capture){.number = ++count,
                       .mode = mode,
                       .thread = &thread_mode,
                       .origin = stream,
                       .graph = calloc(1, sizeof *c->graph),
                       .next = captures};
        c->graph->users = 1;
        captures = c;
        stream->capture = c->number;
    }
    return leave(code);
}

/* Streams are let go of. What a capture had that came to nothing is over: it will not run. */
static void capture_close(capture *c, bool good)
{
    capture **link = &captures;
    while (*link != c)
        link = &(*link)->next;
    *link = c->next;
    if (!good)
        finish_all();
    for (struct CUstream_st *s = streams; s != NULL; s = s->next) {
        if (s->capture != c->number)
            continue;
        s->capture = 0;
        if (!good)
            host_learns(&s->clock);
    }
    graph_drop(c->graph);
    free(c);
}

/* Every stream that was drawn in has come back to the one where it began. */
static bool capture_is_joined(const capture *c)
{
    bool joined = true;
    for (struct CUstream_st *s = streams; s != NULL; s = s->next)
        if (s->capture == c->number && s->clock.at[s->actor] > c->origin->clock.at[s->actor]) {
            find("in capture", "a stream of device %d was not joined again", s->device);
            joined = false;
        }
    return joined;
}

static cudaError_t capture_ends(const capture *c, cudaStream_t stream)
{
    if (c == NULL || stream != c->origin) {
        find("in capture", "it is ended on another stream than it was begun");
        return c == NULL ? cudaErrorIllegalState : cudaErrorStreamCaptureUnmatched;
    }
    if (c->thread != &thread_mode && c->mode != cudaStreamCaptureModeRelaxed) {
        find("in capture", "it is ended by another thread than it was begun");
        return cudaErrorStreamCaptureWrongThread;
    }
    if (c->broken)
        return cudaErrorStreamCaptureInvalidated;
    return capture_is_joined(c) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    cudaError_t code = enter_on(&stream);
    capture *c = capture_of(stream->capture);
    *graph = NULL;
    if (code == cudaSuccess || code == cudaErrorStreamCaptureInvalidated)
        code = capture_ends(c, stream);
    if (code == cudaSuccess) {
        *graph = c->graph;
        c->graph->users++;
    }
    if (c != NULL && code != cudaErrorStreamCaptureWrongThread)
        capture_close(c, code == cudaSuccess);
    return leave(code);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    cudaError_t code = enter_allocating(__func__);
    if (flags != 0)
        find("unknown flags", "%s: 0x%llx", __func__, flags);
    if (code == cudaSuccess && graph->has_jobs)
        code = cudaErrorNotSupported;
    if (code == cudaSuccess) {
        *out = malloc(sizeof **out);
        (*out)->graph = graph;
        graph->users++;
    }
    return leave(code);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    if (code == cudaSuccess && stream_is_free(__func__, stream)) {
        enqueue(stream);
        for (size_t i = 0; i < exec->graph->count; i++)
            submit(stream, piece_of(&exec->graph->pieces[i]));
    }
    return leave(code);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    cudaError_t code = enter();
    graph_drop(graph);
    return leave(code);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    cudaError_t code = enter();
    graph_drop(exec->graph);
    free(exec);
    return leave(code);
}

/* Of a broken capture, too. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out)
{
    cudaError_t code = enter_on(&stream);
    const capture *c = is_special(stream) ? NULL : capture_of(stream->capture);
    code = c != NULL && c->broken ? cudaSuccess : code;
    if (code == cudaSuccess && stream_is(__func__, stream))
        *out = c == NULL   ? cudaStreamCaptureStatusNone
               : c->broken ? cudaStreamCaptureStatusInvalidated
                           : cudaStreamCaptureStatusActive;
    return leave(code);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (flags != 0)
        find("unknown flags", "%s: 0x%x", __func__, flags);
    if (code == cudaSuccess && stream_is_free(__func__, stream) && event_is(__func__, event)) {
        if (!event->recorded)
            find("wait for nothing", "an event that was never recorded orders nothing");
        code = capture_follows(stream, event);
        if (code != cudaSuccess)
            return leave(code);
        join(&stream->clock, &event->clock);
        trace_order(TRACE_WAIT, stream->actor, event->serial);
        submit(stream, (work){.kind = WAIT, .serial = event->serial});
        stream->hangs = stream->hangs || event->hangs;
    }
    return leave(code);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    cudaError_t code = enter_waiting(__func__);
    int device = current_device(__func__);
    if (code == cudaSuccess && (flags & ~(unsigned)cudaEventDisableTiming) != 0) {
        find("unknown flags", "%s: 0x%x", __func__, flags);
        code = cudaErrorInvalidValue;
    }
    if (code == cudaSuccess && flags == 0)
        find("event with timing", "to record it and to wait for it costs more");
    if (code == cudaSuccess) {
        struct CUevent_st *e = calloc(1, sizeof *e);
        e->magic = EVENT;
        e->device = device;
        e->next = events;
        events = e;
        *out = e;
    }
    return leave(code);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t code = enter();
    (void)current_device(__func__);
    if (releases(code) && event_is(__func__, event))
        event->magic = GONE;
    return leave(code);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (code == cudaSuccess && event_is(__func__, event) && stream_is_free(__func__, stream)) {
        if (event->device != stream->device) {
            find("event of another device", "an event of %d is recorded on a stream of %d",
                 event->device, stream->device);
            return leave(cudaErrorInvalidResourceHandle);
        }
        event->clock = stream->clock;
        join(&event->clock, &host);
        event->recorded = true;
        event->capture = stream->capture;
        event->denied = seed != 0 ? 0 : (unsigned)(record_count % 3);
        event->serial = record_new();
        event->stream = stream;
        trace_order(TRACE_RECORD, stream->actor, event->serial);
        submit(stream, (work){.kind = RECORD, .serial = event->serial});
        event->hangs = stream->hangs;
    }
    return leave(code);
}

static bool host_knows(const clock_of *clock)
{
    bool known = true;
    for (int a = 0; a < ACTORS && known; a++)
        known = clock->at[a] <= host.at[a];
    return known;
}

/* The answer is not always yes: a few times it is no, or, deferred, as long as it is. */
static bool event_is_ready(struct CUevent_st *event)
{
    if (event->hangs || (event->denied > 0 && !host_knows(&event->clock))) {
        event->denied -= event->denied > 0;
        return false;
    }
    for (uint64_t some = seed != 0 ? 1 + chance(8) : 0; some > 0 && run_some(); some--)
        continue;
    return is_reached(event->serial);
}

/* Nobody may ask for it, or wait for it, until it is recorded outside. */
static cudaError_t event_is_captured(const char *fn, const struct CUevent_st *event)
{
    if (capture_of(event->capture) != NULL)
        find("in capture", "%s of an event that is captured", fn);
    capture_break(event->capture);
    return cudaErrorCapturedEvent;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    cudaError_t code = unsafe(__func__, enter());
    (void)current_device(__func__);
    if (code != cudaSuccess || !event_is(__func__, event))
        return leave(code);
    if (event->capture != 0)
        return leave(event_is_captured(__func__, event));
    if (!event_is_ready(event))
        return leave(cudaErrorNotReady);
    host_learns(&event->clock);
    return leave(cudaSuccess);
}

static long wait_count;

long sim_wait_count(void)
{
    return wait_count;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t code = enter_waiting(__func__);
    wait_count++;
    (void)current_device(__func__);
    if (code == cudaSuccess && event_is(__func__, event)) {
        if (!event->recorded)
            find("wait for nothing", "an event that was never recorded orders nothing");
        if (event->capture != 0)
            return leave(event_is_captured(__func__, event));
        never_ends(__func__, event->hangs);
        trace_host_wait(event->serial);
        finish_event(event);
        host_learns(&event->clock);
    }
    return leave(code);
}

/* ---- the runtime: work ----------------------------------------------------------------------- */

void sim_keep_busy(cudaStream_t stream, int ms)
{
    pthread_mutex_lock(&lock);
    enqueue(stream);
    submit(stream, (work){.kind = BUSY, .until_ms = now_ms() + ms});
    pthread_mutex_unlock(&lock);
}

static bool is_device(const void *pointer)
{
    const block *b = block_of(pointer);
    return b != NULL && b->device >= 0;
}

/* What a copy says of its ends has to be so. Pageable memory works, and blocks. */
static bool copy_fits(const void *dst, const void *src, enum cudaMemcpyKind kind)
{
    bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (is_device(dst) != to || is_device(src) != from) {
        find("wrong kind", "a copy of kind %d between %p and %p", (int)kind, dst, src);
        return false;
    }
    if ((!to && block_of(dst) == NULL) || (!from && block_of(src) == NULL)) {
        find("pageable", "a copy from or to memory that is not pinned blocks");
        return false;
    }
    return true;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (code != cudaSuccess || !stream_is_free(__func__, stream) || !copy_fits(dst, src, kind))
        return leave(code != cudaSuccess ? code : cudaErrorInvalidValue);
    enqueue(stream);
    const char *from = reach(src, bytes, false, stream, "cudaMemcpyAsync");
    char *to = reach(dst, bytes, true, stream, "cudaMemcpyAsync");
    if (from != NULL && to != NULL) {
        if (kind == cudaMemcpyDeviceToDevice)
            trace_copy(stream->actor, stream->device, stream->device, bytes);
        else
            trace_host_copy(stream->actor, stream->device, kind == cudaMemcpyDeviceToHost, bytes);
        submit(stream, (work){.kind = MOVE, .to = to, .from = from, .bytes = bytes});
    }
    return leave(from != NULL && to != NULL ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                                size_t bytes, cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (code != cudaSuccess || !stream_is_free(__func__, stream))
        return leave(code != cudaSuccess ? code : cudaErrorInvalidValue);
    const block *to_block = block_of(dst), *from_block = block_of(src);
    if ((to_block != NULL && to_block->device != dst_device) ||
        (from_block != NULL && from_block->device != src_device))
        find("wrong device", "a copy from %d to %d names other devices than its memory", src_device,
             dst_device);
    if (!reaches[dst_device][src_device])
        find("peer without access", "%d reads %d", dst_device, src_device);
    enqueue(stream);
    const char *from = reach(src, bytes, false, stream, __func__);
    char *to = reach(dst, bytes, true, stream, __func__);
    if (from != NULL && to != NULL) {
        submit(stream, (work){.kind = MOVE,
                              .to = to,
                              .from = from,
                              .bytes = bytes,
                              .reader = dst_device,
                              .source = src_device});
        trace_copy(stream->actor, src_device, dst_device, bytes);
        stream->hangs = stream->hangs || peers[dst_device][src_device] == SIM_PEER_HANGS;
        peer_copies++;
    }
    return leave(from != NULL && to != NULL ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (code == cudaSuccess && (dst_pitch > PITCH_MAX || src_pitch > PITCH_MAX ||
                                dst_pitch < width || src_pitch < width)) {
        find("bad pitch", "%zu and %zu for rows of %zu", dst_pitch, src_pitch, width);
        code = cudaErrorInvalidValue;
    }
    if (code != cudaSuccess || !stream_is_free(__func__, stream) || !copy_fits(dst, src, kind))
        return leave(code != cudaSuccess ? code : cudaErrorInvalidValue);
    enqueue(stream);
    for (size_t row = 0; row < height && code == cudaSuccess; row++) {
        const char *from =
            reach((const char *)src + row * src_pitch, width, false, stream, __func__);
        char *to = reach((char *)dst + row * dst_pitch, width, true, stream, __func__);
        if (from == NULL || to == NULL)
            code = cudaErrorInvalidValue;
        else
            submit(stream, (work){.kind = MOVE, .to = to, .from = from, .bytes = width});
    }
    return leave(code);
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* ---- NVTX ------------------------------------------------------------------------------------ */

static struct nvtxDomainRegistration_st {
    bool listens;
    int count;
    atomic_int open; /* of all threads */
    char names[4096][96];
} profiler;

void sim_listen(void)
{
    profiler.listens = true;
}

int sim_ranges(const char *name)
{
    int count = 0;
    for (int i = 0; i < profiler.count; i++)
        count += strcmp(profiler.names[i], name) == 0;
    return count;
}

int sim_open_ranges(void)
{
    return profiler.open;
}

nvtxDomainHandle_t nvtxDomainCreateA(const char *name)
{
    return profiler.listens && strcmp(name, "dp") == 0 ? &profiler : NULL;
}

int nvtxDomainRangePushEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *range)
{
    bool fits = range->version == NVTX_VERSION && range->size == NVTX_EVENT_ATTRIB_STRUCT_SIZE &&
                range->messageType == NVTX_MESSAGE_TYPE_ASCII;
    if (!fits || domain != &profiler)
        find("bad range", "NVTX is told something else than a name in its domain");
    pthread_mutex_lock(&lock);
    if (fits && profiler.count < 4096)
        snprintf(profiler.names[profiler.count++], sizeof profiler.names[0], "%s",
                 range->message.ascii);
    pthread_mutex_unlock(&lock);
    return atomic_fetch_add(&profiler.open, 1);
}

int nvtxDomainRangePop(nvtxDomainHandle_t domain)
{
    if (domain != &profiler || profiler.open == 0)
        find("bad range", "no range is open");
    return atomic_fetch_sub(&profiler.open, 1) - 1;
}

long sim_library_loads(void)
{
    return library_loads;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *out, const void *code_data, enum cudaJitOption *jit,
                                void **jit_values, unsigned jit_count,
                                enum cudaLibraryOption *options, void **values, unsigned count)
{
    cudaError_t code = enter_allocating(__func__);
    int device = current_device(__func__);
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    for (int d = 0; d < DEVICES && code == cudaSuccess; d++)
        if ((d == device || (is_eager() && contexts[d].users > 0)) && !image_fits(code_data, d))
            code = cudaErrorNoKernelImageForDevice;
    if (code == cudaSuccess) {
        struct CUlib_st *library = calloc(1, sizeof *library);
        *library = (struct CUlib_st){.live = true, .next = libraries};
        snprintf(library->image, sizeof library->image, "%s", (const char *)code_data);
        libraries = *out = library;
        library_loads++;
    }
    return leave(code);
}

static bool library_is(const char *fn, const struct CUlib_st *library)
{
    if (!library->live)
        find("library after unload", "%s", fn);
    return library->live;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    cudaError_t code = enter_allocating(__func__);
    (void)current_device(__func__);
    if (releases(code) && library_is(__func__, library)) {
        finish_all();
        library->live = false;
    }
    return leave(code);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *out, cudaLibrary_t library, const char *name)
{
    cudaError_t code = enter();
    int kernel = kernel_find(name);
    if (code == cudaSuccess && (!library_is(__func__, library) || kernel < 0))
        code = cudaErrorInvalidValue;
    if (code == cudaSuccess) {
        library->kernels[kernel] = (struct CUkern_st){kernel, library};
        *out = &library->kernels[kernel];
    }
    return leave(code);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *fn)
{
    cudaError_t code = enter();
    int device = current_device(__func__);
    const struct CUlib_st *library = ((const struct CUkern_st *)fn)->library;
    if (code == cudaSuccess && !library_is(__func__, library))
        code = cudaErrorInvalidResourceHandle;
    if (code == cudaSuccess && !image_fits(library->image, device))
        code = cudaErrorNoKernelImageForDevice;
    if (code == cudaSuccess)
        attributes->maxThreadsPerBlock = 1024;
    return leave(code);
}

/* Where the operands are; false, and findings, where there are none. */
static bool find_operands(operand *operands, size_t count, cudaStream_t stream, const char *name)
{
    for (size_t i = 0; i < count; i++) {
        operand *own = &operands[i];
        const block *b = block_of(own->range.pointer);
        own->shadow = reach(own->range.pointer, own->range.bytes, own->range.write, stream, name);
        if (own->shadow == NULL)
            return false;
        own->device = b->device;
        if ((uintptr_t)own->range.pointer % own->range.align != 0)
            find("misaligned", "%s has an operand at %p, and reads %zu bytes at a time", name,
                 own->range.pointer, own->range.align);
        if (b->device != stream->device && !reaches[stream->device][b->device])
            find("wrong device", "%s on %d has an operand on %d", name, stream->device, b->device);
    }
    return true;
}

/* What the launch itself is allowed to be. */
static bool launch_fits(const char *name, const struct CUkern_st *fn, dim3 grid, dim3 block_dim,
                        size_t shared, cudaStream_t stream)
{
    int device = current_device("cudaLaunchKernel");
    unsigned long long lanes = (unsigned long long)block_dim.x * block_dim.y * block_dim.z;
    if (!stream_is_free("cudaLaunchKernel", stream) || !library_is("cudaLaunchKernel", fn->library))
        return false;
    if (!image_fits(fn->library->image, device))
        find("wrong architecture", "%s is launched on device %d", name, device);
    if (device != stream->device)
        find("wrong device", "%s is launched with device %d current on a stream of %d", name,
             device, stream->device);
    bool fits = grid.x >= 1 && grid.x <= INT32_MAX && grid.y == 1 && grid.z == 1 &&
                block_dim.y == 1 && block_dim.z == 1 && lanes >= 1 && lanes <= LANES &&
                shared <= SHARED_MAX;
    if (!fits)
        find("bad launch", "%s: %u blocks of %llu lanes, %zu bytes shared", name, grid.x, lanes,
             shared);
    return fits;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user)
{
    cudaError_t code = enter_on(&stream);
    (void)current_device(__func__);
    if (code == cudaSuccess && stream_is_free(__func__, stream)) {
        enqueue(stream);
        submit(stream, (work){.kind = CALL, .fn = fn, .user = user});
    }
    return leave(code);
}

cudaError_t cudaLaunchKernel(const void *fn, dim3 grid, dim3 block_dim, void **args, size_t shared,
                             cudaStream_t stream)
{
    static sim_range ranges[SIM_RANGES];
    cudaError_t code = enter_on(&stream);
    const struct CUkern_st *own = fn;
    const char *name = kernel_name(own->kernel);
    if (code != cudaSuccess || !launch_fits(name, own, grid, block_dim, shared, stream))
        return leave(code != cudaSuccess ? code : cudaErrorInvalidValue);
    enqueue(stream);
    const sim_kernel *added = added_kernel(own->kernel);
    size_t count = added != NULL ? added->ranges(args[0], ranges)
                                 : sim_kernel_ranges(own->kernel, args[0], ranges);
    operand *operands = calloc(count, sizeof *operands);
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        operands[i].range = ranges[i];
        bytes += ranges[i].bytes;
    }
    trace_kernel(stream->actor, bytes);
    if (!find_operands(operands, count, stream, name)) {
        free(operands);
        return leave(cudaErrorIllegalAddress);
    }
    void *params = malloc(SIM_PARAM_BYTES);
    memcpy(params, args[0], added != NULL ? SIM_PARAM_BYTES : sim_param_bytes(own->kernel));
    submit(stream, (work){.kind = KERNEL,
                          .kernel = own->kernel,
                          .launch = {.blocks = grid.x, .lanes = block_dim.x},
                          .reader = stream->device,
                          .operands = operands,
                          .operand_count = count,
                          .params = params});
    return leave(cudaSuccess);
}

/* ---- for NCCL -------------------------------------------------------------------------------- */

bool sim_enter(const char *function)
{
    (void)function;
    return enter() == cudaSuccess;
}

bool sim_enter_waiting(const char *function)
{
    return enter_waiting(function) == cudaSuccess;
}

bool sim_enter_allocating(const char *function)
{
    return enter_allocating(function) == cudaSuccess;
}

void sim_lock(void)
{
    pthread_mutex_lock(&lock);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

void sim_find(const char *name, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    find(name, "%s", text);
}

uint64_t sim_chance(uint64_t below)
{
    static uint64_t turn;
    return seed != 0 ? chance(below) : turn++ % below;
}

bool sim_uses_devices(void)
{
    return devices_used;
}

int sim_current_device(void)
{
    return stack_depth > 0 ? stack[stack_depth - 1]->device : -1;
}

sim_peer sim_pair(int reader, int from)
{
    return from >= 0 && from < DEVICES ? peers[reader][from] : SIM_PEER_GOOD;
}

bool sim_is_lost(int device)
{
    return lost[device] != cudaSuccess;
}

int sim_memory_device(const void *pointer)
{
    const block *b = block_of(pointer);
    return b != NULL ? b->device : -2;
}

char *sim_memory(const void *pointer, size_t bytes)
{
    const block *b = block_of(pointer);
    size_t at = b != NULL ? (size_t)((const char *)pointer - b->public_at) : 0;
    return b != NULL && !b->freed && bytes <= b->bytes - at ? b->shadow + at : NULL;
}

struct sim_order {
    clock_of before;
};

sim_order *sim_order_begin(const sim_job *job)
{
    sim_order *own = malloc(sizeof *own);
    own->before = host;
    for (int i = 0; i < job->count; i++)
        join(&own->before, &job->streams[i]->clock);
    for (int i = 0; i < job->count; i++) {
        enqueue(job->streams[i]);
        join(&job->streams[i]->clock, &own->before);
    }
    return own;
}

bool sim_job_touch(const sim_job *job, int stream, const void *pointer, size_t bytes, bool write,
                   const char *what)
{
    return reach(pointer, bytes, write, job->streams[stream], what) != NULL;
}

void sim_order_after(const sim_job *job, const sim_order *other)
{
    for (int i = 0; i < job->count; i++)
        join(&job->streams[i]->clock, &other->before);
}

void sim_order_end(const sim_job *job, sim_order *own)
{
    own->before = host;
    for (int i = 0; i < job->count; i++)
        join(&own->before, &job->streams[i]->clock);
    sim_order_after(job, own);
    free(own);
}

bool sim_job_known(const sim_job *job)
{
    bool known = true;
    for (int i = 0; i < job->count; i++)
        known = known && job->at[i] <= host.at[job->actors[i]];
    return known;
}

void sim_job_submit(sim_job *job, double us)
{
    for (int i = 0; i < job->count; i++) {
        cudaStream_t stream = job->streams[i];
        job->actors[i] = stream->actor;
        job->at[i] = stream->clock.at[stream->actor];
        trace_add((trace_item){.actor = stream->actor, .from = -1, .to = -1, .us = us});
    }
    job->holders = job->count;
    for (int i = 0; i < job->count; i++)
        submit(job->streams[i], (work){.kind = JOB, .job = job});
}

bool sim_stream_usable(const char *function, cudaStream_t stream)
{
    return stream_is_free(function, stream);
}

int sim_stream_device(cudaStream_t stream)
{
    return stream->device;
}

int sim_stream_capture(cudaStream_t stream)
{
    return stream->capture;
}

void sim_stream_hold(cudaStream_t stream, int more)
{
    stream->held += more;
}

bool sim_run_some(void)
{
    return run_some();
}

/* ---- NVRTC ----------------------------------------------------------------------------------- */

struct _nvrtcProgram {
    char image[32];
};

static int known_archs[16] = {75, 90}, known_count = 2;
static int compile_ms, compile_count;
static char compiled[24];

void sim_set_archs(const int *archs, int count)
{
    memcpy(known_archs, archs, (size_t)count * sizeof *archs);
    known_count = count;
}

void sim_set_compile_ms(int ms)
{
    compile_ms = ms;
}

int sim_compile_count(void)
{
    return compile_count;
}

const char *sim_compiled(void)
{
    return compiled;
}

static bool nvrtc_knows(int number)
{
    bool known = false;
    for (int i = 0; i < known_count; i++)
        known = known || known_archs[i] == number;
    return known;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram *out, const char *source, const char *name,
                               int header_count, const char *const *headers,
                               const char *const *names)
{
    (void)source, (void)name, (void)header_count, (void)headers, (void)names;
    if (nvrtc_fails())
        return NVRTC_ERROR_OUT_OF_MEMORY;
    *out = calloc(1, sizeof **out);
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program)
{
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options)
{
    if (nvrtc_fails())
        return NVRTC_ERROR_COMPILATION;
    usleep((useconds_t)compile_ms * 1000);
    compile_count++;
    for (int i = 0; i < count; i++)
        if (strncmp(options[i], "--gpu-architecture=", 19) == 0) {
            if (!nvrtc_knows(arch_of(options[i] + 19))) {
                find("unknown architecture", "NVRTC is asked for %s", options[i] + 19);
                return NVRTC_ERROR_INVALID_OPTION;
            }
            snprintf(compiled, sizeof compiled, "%s", options[i] + 19);
            snprintf(program->image, sizeof program->image, "sim %s", compiled);
        }
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes)
{
    *bytes = sizeof program->image;
    return nvrtc_fails() ? NVRTC_ERROR_INVALID_PROGRAM : NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *out)
{
    memcpy(out, program->image, sizeof program->image);
    return nvrtc_fails() ? NVRTC_ERROR_INVALID_PROGRAM : NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes)
{
    return nvrtcGetCUBINSize(program, bytes);
}

nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *out)
{
    return nvrtcGetCUBIN(program, out);
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes)
{
    (void)program;
    *bytes = sizeof "simulated";
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *out)
{
    (void)program;
    memcpy(out, "simulated", sizeof "simulated");
    return NVRTC_SUCCESS;
}

const char *nvrtcGetErrorString(nvrtcResult result)
{
    return result == NVRTC_ERROR_COMPILATION ? "it does not compile" : "a simulated error";
}

nvrtcResult nvrtcGetNumSupportedArchs(int *count)
{
    *count = known_count;
    return nvrtc_fails() ? NVRTC_ERROR_INVALID_PROGRAM : NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int *archs)
{
    memcpy(archs, known_archs, (size_t)known_count * sizeof *archs);
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcVersion(int *major, int *minor)
{
    *major = nvrtc_version / 1000;
    *minor = nvrtc_version % 1000 / 10;
    return NVRTC_SUCCESS;
}
