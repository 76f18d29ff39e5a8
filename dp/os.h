/* dp/os.h - v0.2.0 - what dp.h needs of an operating system - MIT licence

   Part of dp.h, which includes it. Here is the surface: types, what needs no system, and functions
   with their promises. A system keeps them: dp/os_posix.h, or the file that DP__SYSTEM names. No
   other room calls the system, so a port to another one adds one file and changes none.

   CONTENTS (search for the tag)
     >>services   memory, environment, time, cores, the program, the log
     >>threads    threads, locks, what happens around a fork
     >>files      that are there as a whole or not at all, and as memory
     >>nodes      which cores belong together, and which of them a thread may use
     >>sockets    connections to other processes
     >>hosts      their addresses by name, and where this machine can be reached
     >>processes  who this process is among others, and processes of our own
     >>shared     memory between processes, words to wait for in it, who is alive

   PROMISES (a letter behind a declaration; none: the call neither blocks nor is interrupted)
     B  blocks, as long as its comment says
     I  may return early, for a signal or for nothing: the caller looks at the time, or at the word
     S  may do less than it was asked to: the caller looks at the count
   A descriptor is an int; all negative ones are none, and may be given to every call that takes
   one. No descriptor outlives exec, nor is one of the numbers of stdin, stdout and stderr. No call
   raises a signal. A call that fails sets dp__os_why, unless its comment says otherwise.
*/

#ifndef DP__ROOMS
#error "dp/os.h is a part of dp.h: include dp.h"
#else

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== >>services ================================================================================
   Plain services. The system keeps no state of dp.h's, but for counts of its own.               */

/* FNV-1a; begins with dp__hash_first, or goes on from an earlier hash. */
static const uint64_t dp__hash_first = 14695981039346656037u;

static uint64_t dp__hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

/* Returns memory so aligned, a power of two; NULL: there is none. */
static void *dp__os_alloc(size_t bytes, size_t align, void *user);

/* Takes back what dp__os_alloc has returned, or NULL. */
static void dp__os_free(void *data, size_t bytes, void *user);

/* Returns a variable of the environment, until one is set; NULL: it is not set, or empty. */
static const char *dp__os_env(const char *name);
static void dp__os_env_set(const char *name, const char *text);
static void dp__os_env_drop(const char *name);

typedef void (*dp__os_fn)(void);

/* Returns a function of the program or of a library that it has loaded; NULL: there is none. */
static dp__os_fn dp__os_find(const char *name);

/* Writes a text and its end to a stream, in one piece; false: not all of it. */
static bool dp__os_print(FILE *file, const char *text, const char *end);

/* Writes a line of the log to stderr. */
DP__MAYBE_UNUSED static void dp__os_write(const char *line)
{
    (void)dp__os_print(stderr, line, "");
}

/* Returns true if a person reads the log. */
DP__MAYBE_UNUSED static bool dp__os_is_read(void);

/* Reads the clock that never goes back. */
static uint64_t dp__os_now_ns(void);

/* Returns the same as it was at most some milliseconds ago, which costs less. */
static uint64_t dp__os_coarse_ns(void);

/* Reads the clock on the wall, in nanoseconds since 1970. */
static uint64_t dp__os_wall_ns(void);

static uint64_t dp__os_after_ms(int64_t ms)
{
    return dp__os_now_ns() + (uint64_t)ms * 1000000u;
}

static int dp__os_ms_until(uint64_t when_ns)
{
    uint64_t now = dp__os_now_ns();
    uint64_t ms = now < when_ns ? (when_ns - now + 999999u) / 1000000u : 0;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

/* Waits for so long, or until a signal. B I */
static void dp__os_sleep_ns(uint64_t ns);

static void dp__os_sleep_ms(int ms)
{
    dp__os_sleep_ns((uint64_t)ms * 1000000u);
}

/* Slows a loop down that waits for another thread, by tens of nanoseconds. */
static void dp__os_pause(void);

/* Lets another thread have the core, if one waits for it. */
DP__MAYBE_UNUSED static void dp__os_yield(void);

/* Returns bits that nobody can guess; false: the system has none, and why is not set. */
static bool dp__os_secret(void *out, size_t bytes);

/* Returns a number that is used once; it may be guessed. */
static uint64_t dp__os_random(void);

/* Returns the bytes of this machine's memory; 0: unknown. */
static uint64_t dp__os_memory_bytes(void);

/* Returns the cores that this process may use, by its affinity and by quotas; at least 1. */
static int dp__os_core_count(void);

/* Returns the system's number for why the last of its calls in this thread has failed. */
static int dp__os_why(void);
static const char *dp__os_why_text(int why);

/* Returns true if another one has the address that was asked for. */
static bool dp__os_is_taken(int why);

/* ==== >>threads =================================================================================
   Threads, locks, and waiting for another thread. None of this can fail but a start.            */

typedef struct dp__lock dp__lock;     /* DP__LOCK_INITIALIZER: one that nobody has */
typedef struct dp__wake dp__wake;     /* for one thread that waits */
typedef struct dp__thread dp__thread; /* of the system, as all three are */

static void dp__lock_init(dp__lock *lock);
static void dp__lock_fini(dp__lock *lock);
static void dp__lock_enter(dp__lock *lock); /* B */
static void dp__lock_leave(dp__lock *lock);

static void dp__wake_init(dp__wake *wake);
static void dp__wake_fini(dp__wake *wake);

/* Leaves the lock, waits to be woken or until a time of dp__os_now_ns (UINT64_MAX: there is none),
   and enters it again. B I */
static void dp__wake_wait(dp__wake *wake, dp__lock *lock, uint64_t until_ns);
static void dp__wake_signal(dp__wake *wake);

/* Starts a thread, to which the program's signals do not go; returns 0, or why it did not start. */
static int dp__thread_start(dp__thread *out, void *(*fn)(void *user), void *user);

/* Waits until a thread has ended. B */
static void dp__thread_join(dp__thread thread);

/* Lets a thread end by itself: nobody joins it. */
DP__MAYBE_UNUSED static void dp__thread_detach(dp__thread thread);

/* Has `before` and `after` called around every fork, `after` on both sides, and `child` before
   that. Only the first call counts. */
static void dp__os_init(void (*before)(void), void (*after)(void), void (*child)(void));

/* Returns how many forks lie between the first process and this one. It costs a read of memory:
   every public call asks. */
static unsigned dp__os_fork_count(void);

/* ==== >>files ==================================================================================
   Files that are there as a whole or not at all, and files as memory: for headers around training.
   All of these block for as long as the disk takes.                                             */

/* At the public edge: which function, and which file. */
DP__MAYBE_UNUSED static dp_status dp__os_named(const char *fn, const char *path, dp_status status)
{
    size_t count = strlen(path), most = 160;
    if (status == DP_OK)
        return DP_OK;
    return dp_error(status, "%s: '%s%s': %s", fn, count > most ? "..." : "",
                    count > most ? path + count - most : path, dp_last_error());
}

DP__MAYBE_UNUSED static dp_status dp__os_check_path(const char *fn, const char *path)
{
    if (path == NULL || path[0] == '\0' || path[strlen(path) - 1] == '/')
        return dp_error(DP_ERR_INVALID, "%s: path is %s", fn,
                        path == NULL ? "NULL" : "no name of a file");
    return DP_OK;
}

/* Opens a file for several processes to append to; each put stays in one piece. -1: it cannot. */
static int dp__os_file_append(const char *path, bool anew);

/* Writes all of it, however the system cuts it; false: not all of it. */
static bool dp__os_file_put(int file, const void *data, size_t bytes);

/* Opens a file to be read: a regular one, with something in it. DP_ERR_NO_FILE: there is none. */
DP__MAYBE_UNUSED static dp_status dp__os_file_open(const char *path, int *out_fd,
                                                   uint64_t *out_bytes);

/* Reads all of it; false: it cannot be read, or ends before. */
DP__MAYBE_UNUSED static bool dp__os_file_get_at(int file, void *data, size_t bytes, uint64_t at);

/* Closes a descriptor of any kind. */
static void dp__os_close(int fd);

/* Closes a descriptor that nobody has any more. */
static void dp__os_drop(int *fd)
{
    dp__os_close(*fd);
    *fd = -1;
}

/* Calls fn with each name in a folder; it may remove what it is called with. */
DP__MAYBE_UNUSED static dp_status
dp__os_names(const char *folder, void (*fn)(const char *name, void *user), void *user);

/* Removes a file, which need not be there. */
DP__MAYBE_UNUSED static dp_status dp__os_remove(const char *path);

/* ---- parts: files that are being written ----------------------------------------------------- */

typedef struct dp__os_file_id { /* which file has a name; zero: none */
    uint64_t device, inode, bytes, changed_ns;
} dp__os_file_id;

typedef struct dp__os_part { /* a file that is being written */
    const char *target;
    char *path, *room; /* target.part, and as much room */
    int fd;
    dp__os_file_id before; /* what the target was at first */
} dp__os_part;

/* Takes all memory that a part needs, and notes what the target is: that it must be at the end. */
DP__MAYBE_UNUSED static dp_status dp__os_part_make(dp_scope *scope, const char *target,
                                                   dp__os_part *out);

/* Makes the part, empty and locked; nobody else has it until it ends, or its process does. Refuses
   a target that is no regular file before anything is written. */
DP__MAYBE_UNUSED static dp_status dp__os_part_open(dp__os_part *part);

DP__MAYBE_UNUSED static dp_status dp__os_part_write(const dp__os_part *part, const char *bytes,
                                                    size_t count);

/* Writes over bytes that were written before. */
DP__MAYBE_UNUSED static dp_status dp__os_part_mend(const dp__os_part *part, const char *bytes,
                                                   size_t count, uint64_t at);

/* Returns when the part is on disk. */
DP__MAYBE_UNUSED static dp_status dp__os_part_sync(const dp__os_part *part);

/* Gives the part, which is on disk, its target's name, whole and for good; removes it if `status`
   is an error, or if another one has written the target meanwhile. */
DP__MAYBE_UNUSED static dp_status dp__os_part_end(dp__os_part *part, dp_status status);

/* Removes what a writer that was killed has left; one that is alive has locked its own. */
DP__MAYBE_UNUSED static void dp__os_part_clear(const char *path);

/* ---- kept: what can be made anew, in a folder of this user's --------------------------------- */

/* Opens a file; -1: there is none. out_bytes is 0 if others than this user may write to it. */
DP__MAYBE_UNUSED static int dp__os_kept_open(const char *path, uint64_t *out_bytes);

/* Makes the folder, and the one around it, for this user alone, and locks it; after wait_ms another
   process may still have it. Returns what unlocks it; -1: there is no folder. B */
DP__MAYBE_UNUSED static int dp__os_kept_lock(const char *folder, int wait_ms);

/* Unlocks the folder, also for children that this process has forked meanwhile. */
DP__MAYBE_UNUSED static void dp__os_kept_unlock(int lock);

/* Writes a file that is there as a whole or not at all, unless the machine crashes. */
DP__MAYBE_UNUSED static bool dp__os_kept_put(const char *path, const void *head, size_t head_bytes,
                                             const void *data, size_t bytes);

/* Writes a file for other programs, which find all of it or none; path.new is overwritten. */
DP__MAYBE_UNUSED static bool dp__os_text_put(const char *path, const char *text, size_t bytes);

/* ---- files as memory ------------------------------------------------------------------------- */

typedef struct dp__os_map { /* a file as memory */
    dp_ctx *ctx;
    void *bytes;
    size_t count;
} dp__os_map;

/* Maps a file, until the scope ends. */
DP__MAYBE_UNUSED static dp_status dp__os_map_open(dp_ctx *ctx, dp_scope *scope, const char *path,
                                                  dp__os_map *out);

/* ==== >>nodes ==================================================================================
   A node (NUMA) has cores, and memory that is nearer to them than the other nodes' is. Whoever
   writes to a page first decides where it lies: near the core that he is on then. So a thread that
   keeps to the cores of one node has its memory near. A system may know nothing of this.        */

enum { DP__CORE_WORDS = 16, DP__CORES_MAX = 64 * DP__CORE_WORDS, DP__NODES_MAX = 256 };

typedef struct dp__cores { /* one bit each */
    uint64_t words[DP__CORE_WORDS];
} dp__cores;

typedef struct dp__row { /* the cores that there are, node by node */
    int count, node_count;
    uint8_t node[DP__CORES_MAX];
    uint16_t core[DP__CORES_MAX];
} dp__row;

typedef struct dp__os_bound { /* a thread that keeps to some cores, and those it had before */
    int thread;               /* 0: none does */
    dp__cores before, now;
} dp__os_bound;

static void dp__cores_add(dp__cores *cores, int core)
{
    cores->words[core / 64] |= (uint64_t)1 << core % 64;
}

static bool dp__cores_have(const dp__cores *cores, int core)
{
    return (cores->words[core / 64] >> core % 64 & 1) != 0;
}

static int dp__cores_count(const dp__cores *cores)
{
    int count = 0;
    for (int i = 0; i < DP__CORE_WORDS; i++)
        for (uint64_t left = cores->words[i]; left != 0; left &= left - 1)
            count++;
    return count;
}

static void dp__cores_join(dp__cores *cores, const dp__cores *others)
{
    for (int i = 0; i < DP__CORE_WORDS; i++)
        cores->words[i] |= others->words[i];
}

/* Whether all of them are among the others. */
static bool dp__cores_within(const dp__cores *cores, const dp__cores *others)
{
    uint64_t outside = 0;
    for (int i = 0; i < DP__CORE_WORDS; i++)
        outside |= cores->words[i] & ~others->words[i];
    return outside == 0;
}

static bool dp__cores_equal(const dp__cores *a, const dp__cores *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Up to the first other character; -1: no digit, or as many as `limit` or more. */
static int dp__number_below(const char **at, int limit)
{
    const char *first = *at;
    int number = 0;
    for (; **at >= '0' && **at <= '9' && number < limit; ++*at)
        number = number * 10 + (**at - '0');
    return *at > first && number < limit ? number : -1;
}

/* Finds the cores of a thread of this process, 0: of the caller. All, if they are unknown. */
static void dp__os_cores_of(int thread, dp__cores *out);

/* Returns the system's number for the calling thread; 0: it has none. */
static int dp__os_thread(void);

/* Lets threads of this process be asked where they are; false: libc cannot tell, or the program has
   a use of its own for the signal (SIGURG, which ends no process that does not know it). */
static bool dp__os_stack_open(void);

/* Asks a thread of this process, or of another one that has called dp__os_stack_open, too, to print
   its stack to stderr. Does nothing where this process has not. */
static void dp__os_stack_ask(int process, int thread);

/* From here on the calling thread, and each that it starts, keeps to these cores; false: it cannot
   be had. */
static bool dp__os_bind(const dp__cores *cores, dp__os_bound *out);

/* Gives a bound thread other cores, by whatever thread; false: that thread has ended, or has been
   given other cores since. */
static bool dp__os_rebind(const dp__os_bound *bound, const dp__cores *cores);

/* Lists all cores that are in use, of whatever process; false: unknown. */
static bool dp__os_row(dp__row *out);

/* Returns the node of memory that a device on the PCI bus is near to; -1: unknown. `bus_id` is as
   drivers of GPUs write it, 0000:0A:00.0. */
DP__MAYBE_UNUSED static int dp__os_node_of(const char *bus_id);

typedef struct dp__os_near dp__os_near; /* where this thread's new memory went before */

/* Until the end this thread's new memory comes from that node, if possible. */
DP__MAYBE_UNUSED static void dp__os_near_begin(int node, dp__os_near *out);
DP__MAYBE_UNUSED static void dp__os_near_end(const dp__os_near *before);

/* ==== >>sockets ================================================================================
   Connections to other processes, over a network or inside this machine. Only dp__os_poll and
   functions on it wait. Bytes come in order, each once; what was sent before an end comes before
   it. The first 512 bytes on a connection on which nothing is under way are sent whole.         */

typedef struct dp__os_address { /* of the system; compared and copied by nobody else */
    _Alignas(8) unsigned char at[128];
    uint32_t bytes;
} dp__os_address;

/* It can be written to once a KiB can be sent without waiting. */
enum { DP__CAN_READ = 1, DP__CAN_WRITE = 4 };

typedef struct dp__os_watch {
    int fd;
    short events, revents; /* to wait for, and that there are */
} dp__os_watch;

/* Waits until one can be read or written, or has ended; returns how many. timeout_ms < 0: without
   an end. B I */
static int dp__os_poll(dp__os_watch *list, int count, int timeout_ms);

/* Returns true if what there is says that the connection has ended, or is none. */
static bool dp__os_has_ended(int events)
{
    return (events & ~(DP__CAN_READ | DP__CAN_WRITE)) != 0;
}

/* Waits until this one can be read or written, or has ended; false: it took longer. B */
static bool dp__os_ready(int fd, int events, int timeout_ms)
{
    dp__os_watch watch = {.fd = fd, .events = (short)events};
    uint64_t until_ns = dp__os_after_ms(timeout_ms);
    while (dp__os_poll(&watch, 1, timeout_ms) == 0) { /* that may have been a signal */
        timeout_ms = dp__os_ms_until(until_ns);
        if (timeout_ms <= 0)
            return false;
    }
    return true;
}

/* Makes an address inside this machine, where the system knows whose it is. */
static dp__os_address dp__os_local(const char *name);
static bool dp__os_is_local(const dp__os_address *address);

/* Makes the addresses of all interfaces: first for both families, then for machines without IPv6;
   returns how many. */
static int dp__os_everywhere(int port, dp__os_address out[2]);

/* Makes the address of the same host at another port. */
static dp__os_address dp__os_at_port(const dp__os_address *at, int port);

/* Listens; -1: it cannot, and dp__os_why may be that the address is taken. */
static int dp__os_listen(const dp__os_address *address);

/* Removes what a listener of this address leaves behind, on systems where there is something. */
static void dp__os_forget(const dp__os_address *address);

/* Returns the port of this end; 0 inside the machine. */
static int dp__os_port(int fd);

/* Accepts a connection; -1: nobody calls, or there is no descriptor left: out_full says which. */
static int dp__os_accept(int listener, bool *out_full);

enum { DP__OS_CROWDED = -2, DP__OS_REFUSED = -3, DP__OS_FULL = -4 };

/* Begins to connect; done once it can be written to and dp__os_connection returns 0. -1: it cannot;
   DP__OS_REFUSED: nobody listens there; DP__OS_CROWDED: as many as may wait for the listener do, so
   that it knows nothing of this one; DP__OS_FULL: this process may open no more files. */
static int dp__os_connect(const dp__os_address *to);

/* Returns 0 if it is connected, DP__OS_REFUSED if nobody listens there, else -1. */
static int dp__os_connection(int fd);

static bool dp__os_connected(int fd)
{
    return dp__os_connection(fd) == 0;
}

/* Sends; returns how many bytes: 0 when none can be sent now, -1 when none ever will. S */
static ptrdiff_t dp__os_send(int fd, const void *data, size_t bytes);

/* Receives; returns how many bytes: 0 when there are none yet, -1 at the end. S */
static ptrdiff_t dp__os_receive(int fd, void *data, size_t bytes);

/* Ends the sending side: the other side finds an end once it has read what was sent. */
static bool dp__os_end_sending(int fd);

/* Returns true if the program that listens there accepts connections: it closes one on which
   nothing is sent. B */
static bool dp__os_is_attended(int fd, int ms)
{
    char none;
    return dp__os_end_sending(fd) && dp__os_ready(fd, DP__CAN_READ, ms) &&
           dp__os_receive(fd, &none, 1) < 0;
}

/* Closes a connection on which something was sent last: what still comes is read, until then at the
   most. Bytes that nobody has read would take back what the other side has not read yet. B */
static void dp__os_finish(int fd, uint64_t until_ns)
{
    enum { ROUNDS = 1000 }; /* of one that does not end to send */
    char none[512];
    bool more = fd >= 0 && dp__os_end_sending(fd);
    for (int i = 0; more && i < ROUNDS; i++) {
        ptrdiff_t got = dp__os_receive(fd, none, sizeof none);
        more = got > 0 || (got == 0 && dp__os_ready(fd, DP__CAN_READ, dp__os_ms_until(until_ns)));
    }
    dp__os_close(fd);
}

/* The process that has made the other end of a connection inside this machine, or listened. */
typedef struct dp__os_owner {
    uint64_t user, process; /* process 0: unknown */
} dp__os_owner;

/* Finds the owner; false: unknown. */
static bool dp__os_owner_of(int fd, dp__os_owner *out);

/* Returns who this process belongs to. */
static uint64_t dp__os_user(void);

static bool dp__os_same_user(int fd)
{
    dp__os_owner owner;
    return dp__os_owner_of(fd, &owner) && owner.user == dp__os_user();
}

/* Returns how many files and sockets this process may open; 0: unknown. */
static uint64_t dp__os_files_limit(void);

/* So many more are going to be opened, until the same number of calls of dp__os_files_lower: the
   limit is raised as far as it can be. */
static void dp__os_files_raise(size_t more);
static void dp__os_files_lower(void);

/* ==== >>hosts ==================================================================================
   The addresses of a host by its name, within a time limit; and where this machine, which may have
   several networks, can be reached: the user decides which, where no connection shows it.       */

enum { DP__OS_ADDRESSES = 8 }; /* of one host, at most */

typedef struct dp__os_found { /* the addresses of a host; count 0: why it has none */
    dp__os_address list[DP__OS_ADDRESSES];
    int count;
    const char *why;
} dp__os_found;

typedef void dp__os_looker(const char *host, int port, bool number, dp__os_found *out);

/* Finds the addresses of a host, for as long as that takes; not if the host has to be a number and
   is none. B */
static void dp__os_look_up(const char *host, int port, bool number, dp__os_found *out);

/* Finds the addresses of a host within timeout_ms. B */
static void dp__os_resolve(dp__os_looker *look_up, const char *host, int port, int timeout_ms,
                           dp__os_found *out);

/* Writes the address of one end of a connection, of this one or of the other, as text for
   dp__os_resolve; "" inside the machine, where a third process could not use it. */
static void dp__os_host_of(int fd, bool own, char *text, size_t room);

/* Writes the address that this machine uses for what is far away, if nothing else says which; "":
   none. Nothing is sent. */
static void dp__os_host_usual(char *text, size_t room);

/* Writes the name of this machine; "": it has none. */
static void dp__os_host_name(char *text, size_t room);

typedef struct dp__os_interface {
    char name[32], address[64]; /* as text for dp__os_resolve */
} dp__os_interface;

static bool dp__begins(const char *text, const char *begin)
{
    return strncmp(text, begin, strlen(begin)) == 0;
}

/* How well it fits: a name before the beginning of one, that before the beginning of an address,
   and with equal ones IPv4 before IPv6. 0: not at all. */
static int dp__os_interface_fits(const dp__os_interface *one, const char *wanted)
{
    int fits = strcmp(one->name, wanted) == 0     ? 6
               : dp__begins(one->name, wanted)    ? 4
               : dp__begins(one->address, wanted) ? 2
                                                  : 0;
    return fits > 0 && strchr(one->address, ':') == NULL ? fits + 1 : fits;
}

/* Finds the interface that `wanted` means, NULL: any that is no loop; false: none, and `others`
   names those that there are. */
static bool dp__os_interface_find(const char *wanted, dp__os_interface *out, char *others,
                                  size_t room);

/* ==== >>processes ==============================================================================
   Who this process is among others, and children: started, ended and waited for.               */

static int dp__os_process_id(void);
static uint64_t dp__os_parent(void);

/* Returns the memory that a process of this machine has; 0: unknown. */
DP__MAYBE_UNUSED static uint64_t dp__os_resident_bytes(int process);

/* Returns a number that is equal in processes that can share memory. $DP_MACHINE makes processes
   look apart. */
static uint64_t dp__os_machine(void);

/* Returns the cores that this process may run on, hashed into one number; 0: unknown. */
static uint64_t dp__os_affinity(void);

typedef struct dp__os_child {
    int pid;             /* 0: there is none, or it was waited for */
    int code, by_signal; /* how it ended, */
    bool unknown;        /* unless somebody else has waited for it */
} dp__os_child;

/* Returns memory that this process has in common with children to come, all zeros; NULL: none. */
static void *dp__os_common_alloc(size_t bytes);
static void dp__os_common_free(void *data, size_t bytes);

/* Between these two calls requests to end (SIGINT, SIGTERM) are noted, and children are kept until
   dp__os_ended has been called for them; after them dp__os_signal_again does what was noted. */
static void dp__os_signals_take(void);
static void dp__os_signals_give_back(void);
static void dp__os_signal_again(void);

/* Returns the number of the request to end that was noted; 0: none. */
static int dp__os_asked_to_end(void);

/* Returns, before a fork, why its child would wait for ever for threads of its parent; NULL: it
   would not. */
static const char *dp__os_let_threads_go(void);

/* Starts a child that goes on from here and ends with this process: 1 in the parent, 0 in the
   child, -1: there is none. */
static int dp__os_fork(dp__os_child *child);

/* Ends a child without the exit handlers of its parent. */
static _Noreturn void dp__os_leave(bool good);

/* Ends this process at once, whatever its threads do and hold. */
static _Noreturn void dp__os_quit(int code);

/* Returns true if a child has ended; if so, `child` says how. */
static bool dp__os_ended(dp__os_child *child);

/* Asks a child to end, or ends it. */
static void dp__os_end(const dp__os_child *child, bool at_once);

/* Notes this signal from now on as a request to stop, once: then what the program had before is
   back. false: there is no such signal, or nobody may have it. */
DP__MAYBE_UNUSED static bool dp__os_stop_on(int number);

/* Returns the last of these signals; 0: none has come. */
DP__MAYBE_UNUSED static int dp__os_asked_to_stop(void);

/* ==== >>shared =================================================================================
   The processes of one machine share a piece of memory, words in it that can be waited for, and
   places that are held until a process ends, however it ends.                                   */

enum { DP__SHARED_PAGE = 64 << 10 }; /* a multiple of every system's page */

typedef struct dp__shared {
    void *data;
    size_t bytes;
    int fd; /* open as long as the memory is used: the locks depend on it */
} dp__shared;

typedef struct dp__shared_name { /* by which other processes find it */
    uint64_t device, inode;
    int32_t process_id, fd;
    char path[40]; /* "" where it has none */
} dp__shared_name;

/* Makes it, all zeros, with the name by which others can open it: `named` on a system where memory
   is found by names alone. */
static dp_status dp__os_shared_make(bool named, size_t bytes, dp__shared *out,
                                    dp__shared_name *out_name);

/* Opens what another process has made, and nothing that has taken its place. */
static dp_status dp__os_shared_find(const dp__shared_name *name, size_t bytes, dp__shared *out);

/* Removes the name, if it has one: the others have opened it. */
static void dp__os_shared_unlink(const char *path);

static void dp__os_shared_close(dp__shared *shared);

/* Gives back all but these bytes, multiples of DP__SHARED_PAGE, which stay where they are, as
   memory that no other process sees. Without memory for that they stay shared. */
static void dp__os_shared_trim(dp__shared *shared, size_t first, size_t bytes);

/* Makes sure of the pages of this part: to write to them cannot fail. */
static dp_status dp__os_shared_reserve(const dp__shared *shared, size_t first, size_t bytes);

/* Decides whether these pages are part of a core dump, which would fill those that nobody uses. */
static void dp__os_shared_dump(const dp__shared *shared, size_t first, size_t bytes, bool dump);

/* From here on others see that this process is alive. Each process has its own place. */
static dp_status dp__os_shared_hold(const dp__shared *shared, int place);

/* Returns true if the process that held the place is alive, or if the system cannot say. */
static bool dp__os_shared_held(const dp__shared *shared, int place);

/* Takes a place for what has opened the memory here, not for the process; false: another one has
   it. Two contexts of a process are two that way. */
static bool dp__os_shared_own(const dp__shared *shared, int place);

/* Waits until the word, in whatever memory, is no longer as it was seen, or for so long. The look
   and the sleep are one step: no wake-up is lost between them. B I */
static void dp__os_word_wait(atomic_uint *word, unsigned seen, uint64_t ns);
static void dp__os_word_wake(atomic_uint *word);

/* ---- pages ----------------------------------------------------------------------------------- */

/* Returns memory of this process, all zeros, that can later be exchanged for a part of what
   processes share, and back, where DP__PAGES_CHANGE is 1: its address stays. NULL: none. */
static void *dp__os_pages_make(size_t bytes);
static void dp__os_pages_free(void *data, size_t bytes);

/* Puts the part of the shared memory from `first` on in their place; their contents are gone. */
static dp_status dp__os_pages_share(void *data, size_t bytes, const dp__shared *shared,
                                    size_t first);

/* Puts other pages, with what they hold, in their place; false: it cannot. */
static bool dp__os_pages_replace(void *data, void *other, size_t bytes);

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
