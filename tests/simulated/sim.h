/* sim.h - a made-up system, on which whole jobs run in one real thread, deterministic by a seed.

   A process of a job is a library (process.c: dp.h, with system.h in place of dp/os_posix.h, and a
   program), loaded once for each process, so that each has its own statics. Its threads run one at
   a time and are exchanged at every call that may wait, at every atomic, and at every look at a
   clock. The clock is virtual: it jumps when all wait. So a run is a function of its plan, and the
   plan of a number.

   PARTS
     sim.h      what a process asks of the system, and what the driver does
     inside.h   what the parts of the system know of each other
     baton.c    threads, the clock, what happens when
     wire.c     connections: latency, short transfers, full buffers, resets, cuts, silence
     disk.c     files, memory between processes, and who holds it
     system.h   the promises of dp/os.h, kept by these
     process.c  a process of a job, by a script
     steps.h    those of its steps that ask for more
     plan.c     the script and its faults, drawn from a seed
     run.c      runs seeds, judges them, shortens what fails
     plant.py   whether all this finds mistakes that are planted                                 */

#ifndef SIM_H
#define SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SIM_PROCESSES = 12, /* that may be begun in one run */
    SIM_MACHINES = 4,
    SIM_FAULTS = 12,
    SIM_STEPS = 40,
};
#define SIM_NEVER UINT64_MAX

/* ---- threads and time ------------------------------------------------------------------------ */

/* Points that cost nothing are left until the next one at which another thread may go on. */
extern int sim_budget;

void sim_spent(void);

/* Another thread may go on. */
static inline void sim_tick(void)
{
    if (--sim_budget < 0)
        sim_spent();
}

/* A point in plans that ask for more: a late write is missed by somebody then. */
extern bool sim_ticks_behind;

static inline void sim_tick_behind(void)
{
    if (sim_ticks_behind)
        sim_tick();
}

typedef bool sim_ready(void *arg);

/* Lets other threads go on until ready(arg), or until the time of this machine's clock: false. */
bool sim_wait(const char *why, sim_ready *ready, void *arg, uint64_t until_ns);

/* Computes for so long, while others go on. */
void sim_pass(uint64_t ns);

uint64_t sim_now(void); /* by the clock of the machine, which differs from others' */
uint64_t sim_wall(void);
uint64_t sim_random(void); /* for the process: secrets, names */
bool sim_one_in(unsigned n);
bool sim_interrupted(void); /* a signal has come */

int sim_thread_start(void *(*fn)(void *user), void *user); /* -1: there is none */
void sim_thread_join(int thread);

/* ---- processes ------------------------------------------------------------------------------- */

const char *sim_env(const char *name);
void sim_env_set(const char *name, const char *text); /* NULL: dropped */
int sim_process(void);                                /* from 0, in the order of their beginnings */
int sim_machine(void);
void sim_log(const char *line);

/* Returns true if this process has more than its first thread. */
bool sim_leftovers(char *text, size_t room);

/* Counts memory that the process takes; false: there is none. */
bool sim_take(void);
void sim_give(void);

/* ---- connections ----------------------------------------------------------------------------- */

/* inside: by a name, on the same machine. Else a machine, -1 for the own, and a port. */
typedef struct sim_place {
    bool inside;
    int machine, port;
    char name[104];
} sim_place;

enum { SIM_READ = 1, SIM_WRITE = 4, SIM_ENDED = 16 };
enum {
    SIM_NONE = -1,
    SIM_CROWDED = -2,
    SIM_REFUSED = -3,
    SIM_FULL = -4
};                                                                        /* in place of a socket */
enum { SIM_TAKEN = 1, SIM_NO_FILES = 2, SIM_NO_FILE = 3, SIM_OTHER = 4 }; /* sim_why */

int *sim_why(void); /* of this thread: why the last call has failed */
int sim_listen(const sim_place *at);
int sim_connect(const sim_place *to);
int sim_connection(int fd);
int sim_accept(int fd, bool *out_full);
ptrdiff_t sim_send(int fd, const void *data, size_t bytes);
ptrdiff_t sim_receive(int fd, void *data, size_t bytes);
bool sim_end_sending(int fd);
int sim_events(int fd, int wanted);
void sim_close(int fd);
bool sim_end_of(int fd, bool own, sim_place *out); /* false: it has none */
int sim_peer(int fd);                              /* the process at the other end; -1: unknown */

/* ---- memory between processes ---------------------------------------------------------------- */

int sim_shared_make(size_t bytes, void **out, uint64_t *out_object); /* a descriptor */
int sim_shared_find(uint64_t object, size_t bytes, void **out);
void sim_shared_trim(void *data, size_t bytes, size_t first, size_t left);
bool sim_hold(int fd, int place); /* until the process ends, or closes one of its descriptors */
bool sim_held(int fd, int place);
bool sim_own(int fd, int place); /* until this descriptor is closed */
void sim_word_wait(const void *word, unsigned seen, uint64_t ns);
void sim_word_wake(const void *word);

/* ---- files: one folder for all, as on a network's disk --------------------------------------- */

int sim_file_open(const char *path, bool makes, bool *out_made);
bool sim_file_lock(int fd);
bool sim_file_is_at(int fd, const char *path);
ptrdiff_t sim_file_write(int fd, const void *data, size_t bytes, int64_t at); /* -1: at the end */
ptrdiff_t sim_file_read(int fd, void *data, size_t bytes, uint64_t at);
uint64_t sim_file_bytes(int fd);
void sim_file_empty(int fd);
void *sim_file_map(int fd); /* a copy */
bool sim_file_rename(const char *from, const char *to);
bool sim_file_remove(const char *path);
uint64_t sim_file_version(const char *path); /* 0: there is none; changes with each write */
const char *sim_file_name(int index);        /* NULL: there are no more */

/* ---- the script ------------------------------------------------------------------------------ */

typedef enum sim_step {
    SIM_SUM,
    SIM_AGREE,
    SIM_GATHER,
    SIM_SPREAD,
    SIM_BARRIER,
    SIM_MESSAGES,
    SIM_ADMIT,
    SIM_SAVE,
    SIM_COMPUTE,
    SIM_LARGE, /* this and those behind it ask for more: see steps.h */
    SIM_MAIL,
    SIM_GROUP,
    SIM_REDUCE,
    SIM_STEP_KINDS
} sim_step;

typedef enum sim_fault_kind {
    SIM_KILL,         /* process a */
    SIM_STOP,         /* process a, for ns */
    SIM_DARK,         /* machine a, without a word */
    SIM_CUT,          /* from machine a to b, and back if both, for ns */
    SIM_RESET,        /* a connection between machines */
    SIM_NO_MEMORY,    /* of process a, for the next b calls */
    SIM_NO_FILE_LEFT, /* of process a, for ns */
    SIM_BIRTH,        /* a process comes to machine a */
    SIM_PAUSE,        /* all processes, for ns, and they go on together: nobody is to miss it */
    SIM_LOSE, /* the next connection of process a for messages, before it is used: nor this */
    SIM_FAULT_KINDS
} sim_fault_kind;

/* Names something that a process does, and another one is about to notice. */
typedef enum sim_act {
    SIM_NO_ACT,
    SIM_SENDS,
    SIM_CONNECTS,
    SIM_ACCEPTS,
    SIM_WAKES, /* who waits for a word of memory, */
    SIM_WAITS, /* or has waited for one itself */
    SIM_ACTS
} sim_act;

typedef struct sim_fault {
    sim_fault_kind kind;
    int a, b;
    bool both;
    uint64_t ns;
    /* When: this point has come, and so long after the fault before it; and then process a, or one
       of machine a, has done this so often, in a call whose name begins like that. */
    uint64_t point, after_ns;
    sim_act act;
    const char *within;
    int times;
    bool dropped;
} sim_fault;

typedef struct sim_plan {
    uint64_t seed;
    int process_count, machine_count, device_count, timeout_ms;
    int machine_of[SIM_PROCESSES];
    bool recovers, signals, clocks_differ, strangers;
    bool more;   /* than most plans ask for */
    bool leaves; /* each process leaves when it has done its steps, and waits for no other one */
    int alien;   /* on which machine somebody who is not of the job comes to its place; -1: none */
    bool forges; /* he has no key, and says that he has; else he is a process of another job */
    int connections; /* to each process, over TCP */
    int step_count, fault_count;
    struct {
        sim_step kind;
        uint32_t size, salt;
    } steps[SIM_STEPS];
    sim_fault faults[SIM_FAULTS];
} sim_plan;

typedef struct sim_call {
    const char *name;
    uint64_t begun_ns, ns; /* on the clock of the simulator, as all that is of a story */
} sim_call;

/* One process' story, for the judge. */
typedef struct sim_story {
    const sim_plan *plan;
    bool opened, done, left_over;
    bool lost; /* its job has failed in the end */
    bool busy; /* it has computed for a part of the time-out */
    int tries, recoveries, rank, count;
    int blamed; /* the process of its job whose fault it is, as it is told; -1: nobody's */
    int steps;  /* that went well */
    int status; /* of what went wrong */
    char text[600], wrong[200], left[100]; /* wrong: "" if all that came was right */
    char hurt[300];                        /* what failed, and the job went on; "": nothing */
    const char *where;
    uint64_t failed_ns, tried_ns, hurt_ns, called_ns; /* tried: when the call began that failed */
    uint64_t apart_ns;                                /* the longest stay in a job inside the job */
    sim_call longest[2]; /* of those that have gone well, and that have failed */
} sim_story;

typedef void sim_program(sim_story *story); /* "sim_main" of a process' library */

/* Finds the part of a library that each thread has. */
typedef void sim_locals(void **out_data, size_t *out_bytes); /* "sim_thread_locals" */

uint64_t sim_time(void); /* without a cost */

/* ---- what the judge hears while it goes on --------------------------------------------------- */

/* The calling process is in the job of this number, in which these are the processes 0, 1 ... */
void sim_is_in(int number, const int *roster, int count);

#define SIM_FILE "run.safetensors"

/* All processes of a job know that SIM_FILE ends with this word. */
void sim_has_saved(int64_t stamp);

/* That job has failed, as the calling process is told by this sentence, which blames process
   `blamed` of it. */
void sim_has_failed(int number, const char *text, int blamed);

/* A collective call of that job, begun then, has gone well. */
void sim_went_well(int number, uint64_t begun_ns);

#endif
