/* sim.h - simulated CUDA and NCCL: what tests may ask of it, and what its parts ask of each other.

   Work is done at once, on memory of the host, but its order is followed as if it were not: each
   stream has a clock, and so has the host; enqueueing, events and waits hand clocks on. Accesses to
   the same bytes, one of them a write, that no clock orders are a race, whatever the timing.
   Device memory is at addresses that nobody can touch, and begins as NaN of any kind; pinned memory
   cannot be touched by the host while a copy may still be using it. Behind each block, and behind
   each operand of a kernel, is a page that cannot be touched either. A kernel runs lane by lane, as
   its text is for CUDA, in two orders that must give the same. Where PTX is linked in (tests/ptx),
   that is what runs, and must give what the text gives. Whatever is wrong becomes a finding,
   and a test with findings fails.

   Collectives of NCCL wait for ranks of other processes, each with a simulation of its own, and
   hold back what their streams have behind them.

   All threads of the host have one clock: how they order each other is not known here.          */

#ifndef SIM_H
#define SIM_H

#include <stdbool.h>
#include <stddef.h>

/* ---- for tests ------------------------------------------------------------------------------- */

void sim_set_device_count(int count); /* none before */
void sim_set_first_device(int place); /* of this process, in the machine; 0 */
void sim_set_slices(int each);        /* so many devices in a row are slices (MIG) of one GPU; 1 */
void sim_set_driver(int version);     /* 13000; 0 = there is none */
bool sim_has_gpus(void);
void sim_set_memory(size_t bytes);             /* of each device; 4 GiB */
void sim_set_arch(int arch);                   /* 90 for sm_90 */
void sim_set_arch_of(int device, int arch);    /* of one; 0: as all others */
void sim_set_versions(int runtime, int nvrtc); /* 13000 and 13000 */
void sim_set_count_error(int code);            /* what cudaGetDeviceCount returns */

/* No library has this name, and no function; how many libraries of CUDA or HIP are loaded. */
void sim_lack(const char *name);
int sim_loads(void);

/* What HIP calls the GPUs; "gfx90:sramecc+:xnack-" for sm_90 when a test begins. */
void sim_set_hip_arch(const char *name);

/* The nth call of hipSetDevice from now on fails with this hipError_t. One that sets the device of
   before does so all the same. */
void sim_fail_set_device(long n, int code);
bool sim_set_device_failed(void);

/* What NVRTC knows, up to 16: 75 and 90; how long it takes; how often it was asked to compile, and
   what for at last. Compiled kernels are not kept on disk, as no GPU could use them: $DP_CACHE is
   off when a test begins. */
void sim_set_archs(const int *archs, int count);
void sim_set_compile_ms(int ms);
int sim_compile_count(void);
const char *sim_compiled(void); /* "sm_90" */

/* Memory of the test's own is pinned, until then. */
void sim_pin(void *pointer, size_t bytes);
void sim_unpin(void *pointer);
void sim_manage(bool on); /* pinned memory says that it is managed, as long as it is on */

/* The node that the newest pinned memory was asked of (devices with odd numbers are near to node 0,
   of the others nobody knows); -1: any. */
int sim_pinned_node(void);

/* How `reader` gets what `from` has. A pair that is not good may still say that it is. Waiting for
   what hangs is a finding, also where the driver waits: when it frees memory. */
typedef enum sim_peer {
    SIM_PEER_GOOD,
    SIM_PEER_NONE,
    SIM_PEER_FLIPS,   /* a bit in the middle */
    SIM_PEER_LATE,    /* that bit, until a copy of this process ends; by NCCL */
    SIM_PEER_STALE,   /* what sim_nccl_pair's pair has brought before */
    SIM_PEER_CROSSED, /* what the next rank has given, in a gather of NCCL */
    SIM_PEER_HANGS
} sim_peer;
void sim_set_peer(int reader, int from, sim_peer peer);
long sim_peer_copies(void); /* directly between devices, so far */

/* Work is not done when it is enqueued, but later, in an order that the seed decides among those
   that streams and events allow: what is not ordered shows as wrong numbers. 0: at once. A test
   begins with $SIM_SEED. */
void sim_defer(unsigned long long seed);

struct CUstream_st;

/* A kernel of the user's keeps the stream busy for so long from now on. */
void sim_keep_busy(struct CUstream_st *stream, int ms);

/* The nth call from now on fails with this cudaError_t, and with `sticky` all after it. */
void sim_fail_at(long n, int code, bool sticky);
bool sim_fault_fired(void);
long sim_call_count(void);
long sim_wait_count(void);  /* calls of cudaEventSynchronize */
long sim_alloc_count(void); /* calls of cudaMalloc */

/* The device is lost: each call with its context fails with this cudaError_t, until the last who
   uses the context releases it. */
void sim_lose_device(int device, int code);

long sim_push_count(void); /* of contexts; not among the calls */

/* How long what is enqueued between the two would take, in microseconds: links between GPUs carry
   350 GB/s in each direction, those to the host 55 GB/s, memory has 2400 GB/s, and whatever is
   started takes 2 us more. Order is as streams and events say, and as the host waits for events.
   Nothing is moved meanwhile. And what each GPU's link to other GPUs carried. */
void sim_trace_begin(void);
double sim_trace_end(void);
size_t sim_trace_bytes(int device, bool out);

/* While it is on, calls that may wait for the device are findings: "blocks". */
void sim_enqueue_only(bool on);

/* Captures are as CUDA documents them, with the three modes. What breaks one is a finding, "in
   capture", as well as an error. */

/* A context of the device that is not its primary one; and primary ones are refused with this
   CUresult. */
struct CUctx_st *sim_other_context(int device);
void sim_refuse_contexts(int code);

/* ---- NCCL: ranks of this process, and of others that have the same unique id ---- */

void sim_set_nccl(int version); /* 22809; 0 = there is none */
int sim_nccl_version(void);

/* The files that are there of NCCL's library, by the names under which it is loaded; when a test
   begins there is "libnccl.so.2". */
typedef struct sim_nccl_file {
    const char *path;
    const char *is_at; /* as the system says; NULL: it does not know */
    const char *lacks; /* one function */
    int version;       /* 0: that of sim_set_nccl */
    int takes_ms;      /* to load */
    int loads;
} sim_nccl_file;
void sim_set_nccl_files(sim_nccl_file *files, int count);

/* An asynchronous error: after so many more calls of collectives (one for each rank) every
   communicator reports this ncclResult_t, and what is called then never ends until it is aborted.
   0: none. */
void sim_nccl_fail(int code, long after);

/* As with the real one, a group stays in progress until all ranks have called its verbs once: only
   then are they connected. A test begins with it if $SIM_SEED is odd. */
void sim_nccl_connects_late(bool on);

/* Ranks of this process take part in nothing more. */
void sim_nccl_never_arrives(bool on);

/* What NCCL brings from one rank directly to another one of this process, on the same machine, is
   as this pair of GPUs brings it; else as pairs of this process do. Directly it is brought unless
   NCCL has found NCCL_P2P_DISABLE = 1, which it reads with a process' first communicator. */
void sim_nccl_pair(int from, int to, sim_peer peer);

/* ncclCommAbort, ncclCommFinalize or ncclCommGetAsyncError blocks as long as it is the one named
   here; NULL: none does. */
void sim_nccl_hangs(const char *function);

/* Sets a function that ncclCommAbort calls once streams go on, while it tidies up; NULL: none. */
void sim_nccl_in_abort(void (*fn)(void));

/* Waiting for a collective that will never end is a finding; else another thread may abort it. */
void sim_nccl_mind_hangs(bool on);

/* What ranks of this process were told to do so far, by calls in groups that were ended. */
typedef struct sim_nccl_counts {
    long all_reduce, broadcast, all_gather, reduce_scatter, send, recv;
    long groups;  /* with at least one of them */
    size_t bytes; /* that they give to others */
} sim_nccl_counts;
sim_nccl_counts sim_nccl_count(void);

/* Images of kernels that were loaded, so far. */
long sim_library_loads(void);

/* From here on there is a profiler, which NVTX finds. What it has heard: how many ranges have had
   this name, and how many are open. */
void sim_listen(void);
int sim_ranges(const char *name);
int sim_open_ranges(void);

/* Findings so far, by name; printed to stderr as they happen unless hushed. */
int sim_finding_count(const char *name); /* NULL: of any name */
void sim_hush(bool hush);
void sim_forget_findings(void);

void sim_find_left_lock(void); /* a finding, for loaded.h: nobody had entered it */

/* The system refuses this to the library, when it asks for it the nth time from now on: memory that
   is not from an allocator of the test's, or a thread. 0: never. */
typedef enum sim_thing { SIM_MEMORY, SIM_THREADS } sim_thing;
void sim_refuse(sim_thing what, long n);
bool sim_refused(void);

/* The library reads a wall clock that is set an hour ahead and an hour back in turns. */
void sim_jump_wall_clock(bool on);

/* What is still there becomes findings "leak". */
void sim_check_leaks(void);

/* Arguments of the kernels fill_1 ... fill_8, for count elements at dst. */
void sim_fill_params(void *out, void *dst, size_t count);

/* ---- between its parts, and for kernels of a test's own -------------------------------------- */

typedef struct sim_range {
    void *pointer;
    size_t bytes, align;
    bool write;
} sim_range;

/* Lanes and blocks run as they are numbered, or the last one first, or, from here on, in an order
   that the number decides. */
enum { SIM_FORWARDS, SIM_BACKWARDS, SIM_SHUFFLED };

typedef struct sim_launch {
    unsigned blocks, lanes, order;
    bool as_text; /* also where there is PTX */
} sim_launch;

enum { SIM_RANGES = 288, SIM_PARAM_BYTES = 4096 };

/* What it touches, and how it runs on other memory: each range at `at`. False: not all lanes came
   to the same barriers. Arguments are SIM_PARAM_BYTES, and end where sim_param_bytes says. */
typedef struct sim_kernel {
    const char *name;
    size_t (*ranges)(const void *arguments, sim_range *out);
    bool (*run)(const void *arguments, char *const *at, const sim_launch *launch);
} sim_kernel;

void sim_add_kernel(const sim_kernel *kernel); /* a copy; libraries have it from now on */

enum { SIM_KERNELS = 256 }; /* at most, of the text and of the test */

int sim_kernel_find(const char *name); /* -1: there is none */
int sim_kernel_count(void);
const char *sim_kernel_name(int kernel);
size_t sim_kernel_ranges(int kernel, const void *arguments, sim_range *out);
size_t sim_param_bytes(int kernel);
bool sim_kernel_run(int kernel, const void *arguments, char *const *at, const sim_launch *launch);

/* Whether there is PTX for it, and whether what two runs left in its nth range is the same. What is
   computed may differ in a NaN's bits, about which text and PTX have no agreement. */
bool sim_kernel_is_ptx(int kernel);
bool sim_kernel_agrees(int kernel, const void *arguments, size_t range, const char *text,
                       const char *ptx);

#endif /* SIM_H */
