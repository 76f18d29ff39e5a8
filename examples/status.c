/* status.c - what the jobs of this user do: asked from outside, without their help.

   dprun --status is the same. Whoever has started a job: each process shows what it has begun in
   memory that it shares with the others, and the system says who has that memory open. One that is
   alone does so where a launcher has started it, or $DP_METRICS is set.
   So this needs nothing of the processes, which may hang or be stopped, and does not disturb them.
   It reads, and writes nothing. Those on other machines it asks for the same, at the port where
   each listens, with a key that only this user can read here. One that does not answer within two
   seconds is stopped, or its machine is out of reach; all are asked at once.

   A line for each process: steps that have ended and seconds a step, collectives begun and ended,
   how often all others waited for it (0.1 ms or longer), its memory; and what it is in. For whom
   all wait stands first. No part of dp.h is in here, but the layout of what it reads (>>shown in
   dp/job.h, dp/asking.h), which has a number: another one is refused. For Linux, where /proc lists
   open files.

   Build: cc -std=c11 examples/status.c -o status
   Run:   ./status (--json; --watch or --watch=SECONDS: again and again; numbers of processes: their
          jobs only)
   Prints:
   a job of 2 processes, by dp, on ...; open for ... s
   process      rank      pid   steps  s/step    begun    ended   late   memory
         0         0 ... */

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* for the names of modes, and clocks */
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if !defined(MSG_NOSIGNAL)
#define MSG_NOSIGNAL 0
#endif

enum {
    BOARD_LAYOUT = 2,
    BOARD_LANES = 2, /* the caller's, the courier's */
    BOARD_PROCESSES = 1 << 20,
    BOARD_MEMBERS_AT = 1 << 16,
    BOARD_TEXT = 512,
    SEEN_TEXT = 1024,
    SEEN_WIDTH = 80
};

/* ---- what lies in the memory of a job -------------------------------------------------------- */

static const uint64_t board_magic = 0x6472616f622e7064u; /* "dp.board" */

typedef struct board_head {
    uint64_t magic;
    uint32_t layout, version;
    int32_t process_count, process; /* process: whose board it is; -1: that of all */
    uint32_t member_bytes, entry_bytes, kept, recent;
    uint64_t members_at, entries_at, each, epoch;
    char launcher[24];
    uint64_t asks[2]; /* the key for asking others; 0: there is none */
    uint32_t failed;  /* 2: the text is there */
    int32_t status, rank;
} board_head; /* and the text of the failure */

enum { BOARD_TEXT_AT = offsetof(board_head, rank) + sizeof(int32_t) };

typedef struct board_lane {
    _Alignas(128) uint32_t begun;
    _Alignas(128) uint32_t ended;
    _Alignas(128) uint32_t said_after;
    uint32_t awaits;   /* a process from 1 on; 0: none */
    uint32_t since;    /* the collective in which it waits, as it was seen to last, */
    uint64_t since_ns; /* and since when */
    uint64_t late, late_ns, waited_ns;
} board_lane;

typedef struct board_member { /* of each process */
    board_lane lanes[BOARD_LANES];
    int32_t presence;
    uint32_t held;
    uint64_t looked_ns, asked_ns, away_ns, back_ns;
    uint64_t in_since_ns; /* 0: it is in no function */
    char in[48];
    int32_t thread, reserved;
    char said[160];
    uint64_t opened_ns, recoveries, steps, stepped_ns, step_ns;
    int32_t id, rank, rank_count;
    uint32_t here;
    char host[64], address[64];
    uint32_t port, unused; /* where it can be asked; 0: nowhere */
} board_member;

enum { PRESENCE_LEFT = 2, PRESENCE_DEAD = 3 };

typedef struct board_entry { /* a collective */
    uint64_t seq;
    int32_t verb, dtype, op, root;
    uint32_t reducer, bucket;
    uint64_t count;
    double scale;
    uint64_t late;
    char what[64], by[24], tag[40];
} board_entry;

/* ---- what travels, to ask those on other machines -------------------------------------------- */

enum {
    ASK_MAGIC = 0x31706b64,
    ASK_CHALLENGE_MAGIC = 0x31706364,
    ASK_REPLY_MAGIC = 0x31706164,
    ASK_KIND = 5,        /* of connections to a process */
    ASK_HEAD_BYTES = 96, /* of a head that are sent */
    ASK_MS = 2000,       /* for which one is asked, */
    ASK_AGAIN_MS = 100,  /* and how often, while it takes no connection */
    ASK_AT_ONCE = 256
};

typedef struct ask_request {
    uint32_t magic;
    int32_t version;
    uint64_t nonce;
    int32_t process, process_count;
    uint64_t listens;
    uint32_t patience_ms;
    uint16_t kind, connection;
    char host[64];
} ask_request;

typedef struct ask_challenge {
    uint32_t magic;
    int32_t version;
    uint64_t nonce, proof;
} ask_challenge;

typedef struct ask_proof { /* what a proof is made from */
    ask_request request;
    uint64_t nonce, side;
} ask_proof;

typedef struct ask_reply { /* the answer: parts of the board of a process */
    uint32_t magic, bytes;
    uint64_t now_ns, memory;
    unsigned char head[112];
    char text[BOARD_TEXT];
    unsigned char member[sizeof(board_member)];
    board_entry last[BOARD_LANES];
} ask_reply;
_Static_assert(sizeof(board_head) == 128 && BOARD_TEXT_AT == 124 && sizeof(board_member) == 1280 &&
                   sizeof(board_entry) == 184 && sizeof(ask_request) == 104 &&
                   sizeof(ask_challenge) == 24 && sizeof(ask_reply) == 2296,
               "as in dp/job.h, dp/tree.h and dp/asking.h");

static const char *const verb_texts[] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter",
                                         "all_to_all"};
static const char *const type_texts[] = {"f32", "f64", "f16", "bf16", "i64",
                                         "i32", "i16", "i8",  "u8",   "bool"};
static const char *const op_texts[] = {"sum", "mean", "prod", "min", "max"};

/* ---- what is seen of it ---------------------------------------------------------------------- */

typedef struct seen_process {
    board_member is;
    board_entry in[BOARD_LANES]; /* its last collectives; seq 0: unknown */
    bool known;                  /* its own board was read; else what another one has heard */
    bool far;                    /* it is on another machine */
    bool alive;
    char state; /* as the system has it; 'T': stopped */
    int pid;
    uint64_t bytes;
    char why[320]; /* it has not answered; "": it was not asked, or has */
} seen_process;

typedef struct seen_job {
    uint64_t epoch;
    char launcher[24], failure[SEEN_TEXT];
    int count, here; /* processes; of these on this machine */
    uint64_t asks[2];
    bool chosen;
    seen_process *all;
} seen_job;

static struct view {
    seen_job *jobs;
    size_t job_count;
    ino_t *files; /* that were read */
    size_t file_count;
    int refused; /* boards that cannot be read */
    uint64_t now_ns;
    char host[64];
    char **pids; /* whose jobs are asked for; NULL: all */
    bool json;
    int watch_ms; /* 0: once */
} view;

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static double seconds_since(uint64_t then_ns)
{
    return then_ns < view.now_ns ? (double)(view.now_ns - then_ns) * 1e-9 : 0;
}

/* Ends a text that may have no end, and leaves nothing in it that a terminal or JSON could take for
   more than text. */
static void make_text(char *text, size_t room)
{
    text[room - 1] = '\0';
    for (; *text != '\0'; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
add_text(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, SEEN_TEXT - used, format, args);
    va_end(args);
}

static void *grow(void *list, size_t count, size_t bytes)
{
    void *more = realloc(list, (count + 1) * bytes);
    if (more == NULL) {
        perror("no memory");
        exit(1);
    }
    return memset((char *)more + count * bytes, 0, bytes), more;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool read_at(int fd, void *out, size_t bytes, uint64_t at)
{
    return pread(fd, out, bytes, (off_t)at) == (ssize_t)bytes;
}

/* Reads a file of the system as text. */
static void read_system(int pid, const char *name, char *text, size_t room)
{
    char path[64];
    ssize_t got = -1;
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        got = read(fd, text, room - 1);
        close(fd);
    }
    text[got > 0 ? got : 0] = '\0';
}

/* Asks the system how a process is, and how much memory it has. */
static void ask_system(seen_process *process)
{
    char text[512];
    unsigned long long pages = 0;
    read_system(process->pid, "stat", text, sizeof text);
    const char *state = strrchr(text, ')');
    process->state = state != NULL && state[1] == ' ' ? state[2] : '?';
    read_system(process->pid, "statm", text, sizeof text);
    if (sscanf(text, "%*u %llu", &pages) == 1)
        process->bytes = (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Leaves nothing of an entry that cannot be put in words. */
static void check_entry(board_entry *out)
{
    make_text(out->what, sizeof out->what);
    make_text(out->by, sizeof out->by);
    make_text(out->tag, sizeof out->tag);
    if (out->verb < 0 || out->verb >= (int)(sizeof verb_texts / sizeof verb_texts[0]) ||
        out->dtype < 0 || out->dtype >= (int)(sizeof type_texts / sizeof type_texts[0]) ||
        out->op < 0 || out->op >= (int)(sizeof op_texts / sizeof op_texts[0]))
        out->seq = 0;
}

/* Reads the last collective of a lane. It has one of two places: which depends on what carries.
   Behind a board of a process' own there are only its own ones, and head->each is 0. */
static void read_entry(int fd, const board_head *head, int place, int lane, seen_process *process)
{
    board_entry *out = &process->in[lane];
    const uint32_t seq = process->is.lanes[lane].begun, kinds[] = {head->recent, head->kept};
    for (int i = 0; i < 2 && seq > 0; i++) {
        uint64_t entry = (uint64_t)lane * head->kept + seq % kinds[i];
        uint64_t at = head->entries_at + (uint64_t)place * head->each + entry * sizeof *out;
        if (read_at(fd, out, sizeof *out, at) && (uint32_t)out->seq == seq)
            break;
        out->seq = 0;
    }
    check_entry(out);
}

static void check_member(board_member *is, int count)
{
    make_text(is->in, sizeof is->in);
    make_text(is->said, sizeof is->said);
    make_text(is->host, sizeof is->host);
    make_text(is->address, sizeof is->address);
    for (int i = 0; i < BOARD_LANES; i++)
        is->lanes[i].awaits = is->lanes[i].awaits <= (uint32_t)count ? is->lanes[i].awaits : 0;
}

/* Finds whether a process lives, and its number here: it has locked its place on a board that all
   share, and a board of its own is open as long as it lives. */
static void find_process(int fd, const board_head *head, int place, int holder,
                         seen_process *process)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = place, .l_len = 1};
    process->pid = process->is.id;
    process->alive = true;
    if (head->process < 0) {
        bool told = fcntl(fd, F_GETLK, &lock) == 0;
        process->alive = !told || lock.l_type != F_UNLCK;
        process->pid = told && process->alive && lock.l_pid > 0 ? lock.l_pid : process->is.id;
    } else if (process->pid <= 0 || (process->pid != holder && kill(process->pid, 0) != 0)) {
        process->pid = holder;
    }
    process->known = true;
    if (process->alive)
        ask_system(process);
}

static seen_job *job_of(const board_head *head)
{
    for (size_t i = 0; i < view.job_count; i++) {
        seen_job *job = &view.jobs[i];
        if (job->epoch == head->epoch && job->count == head->process_count &&
            memcmp(job->launcher, head->launcher, sizeof job->launcher - 1) == 0)
            return job;
    }
    view.jobs = grow(view.jobs, view.job_count, sizeof *view.jobs);
    seen_job *job = &view.jobs[view.job_count++];
    job->epoch = head->epoch;
    job->count = head->process_count;
    memcpy(job->launcher, head->launcher, sizeof job->launcher);
    make_text(job->launcher, sizeof job->launcher);
    job->all = calloc((size_t)job->count, sizeof *job->all);
    return job;
}

/* Takes from a board all that its processes have written themselves, and of the others what it has
   been told, unless they have boards here. */
static void read_board(int fd, const board_head *head, const board_member *members, int holder)
{
    seen_job *job = job_of(head);
    for (int p = 0; p < job->count && job->all != NULL; p++) {
        seen_process *process = &job->all[p];
        bool own = head->process < 0 || head->process == p;
        if (!own && process->is.id != 0)
            continue;
        process->is = members[p];
        check_member(&process->is, job->count);
        process->far = !own && !process->is.here;
        if (!own)
            continue;
        find_process(fd, head, p, holder, process);
        for (int i = 0; i < BOARD_LANES; i++)
            read_entry(fd, head, p, i, process);
        job->here++;
    }
    if (head->asks[0] != 0)
        memcpy(job->asks, head->asks, sizeof job->asks);
    if (head->failed == 2 && job->failure[0] == '\0') {
        size_t room = head->members_at - BOARD_TEXT_AT;
        room = room < sizeof job->failure ? room : sizeof job->failure;
        if (read_at(fd, job->failure, room, BOARD_TEXT_AT))
            make_text(job->failure, sizeof job->failure);
    }
}

/* Says that a board has another layout; NULL: it has not. */
static const char *layout_refusal(const board_head *head)
{
    static char text[200];
    if (head->layout == BOARD_LAYOUT)
        return NULL;
    snprintf(text, sizeof text,
             "it is of dp.h %u.%u.%u, whose memory has layout %u, and this program reads "
             "layout %d: use the one that comes with that dp.h",
             head->version / 10000 % 100, head->version / 100 % 100, head->version % 100,
             head->layout, BOARD_LAYOUT);
    return text;
}

/* Says why a board is not read; NULL: it can be. */
static const char *refusal(const board_head *head, uint64_t bytes)
{
    if (layout_refusal(head) != NULL)
        return layout_refusal(head);
    bool sound = head->process_count > 0 && head->process_count <= BOARD_PROCESSES &&
                 head->process >= -1 && head->process < head->process_count &&
                 head->member_bytes == sizeof(board_member) &&
                 head->entry_bytes == sizeof(board_entry) && head->kept > 0 && head->recent > 0 &&
                 head->members_at >= sizeof *head && head->members_at < BOARD_MEMBERS_AT &&
                 head->entries_at < bytes && head->each < bytes;
    if (!sound ||
        head->members_at + (uint64_t)head->process_count * sizeof(board_member) > head->entries_at)
        return "its memory is damaged";
    return NULL;
}

/* Reads a file, if it is a board. */
static void look_at_file(int fd, int holder)
{
    struct stat file;
    board_head head;
    if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode) || file.st_uid != geteuid() ||
        !read_at(fd, &head, sizeof head, 0) || head.magic != board_magic)
        return;
    for (size_t i = 0; i < view.file_count; i++)
        if (view.files[i] == file.st_ino)
            return;
    view.files = grow(view.files, view.file_count, sizeof *view.files);
    view.files[view.file_count++] = file.st_ino;
    const char *why = refusal(&head, (uint64_t)file.st_size);
    size_t bytes = why == NULL ? (size_t)head.process_count * sizeof(board_member) : 0;
    board_member *members = why == NULL ? aligned_alloc(128, bytes) : NULL;
    if (why == NULL && members != NULL && read_at(fd, members, bytes, head.members_at))
        read_board(fd, &head, members, holder);
    else
        fprintf(stderr, "the job of process id %d cannot be shown: %s\n", holder,
                why != NULL ? why : "its memory is damaged");
    view.refused += why != NULL;
    free(members);
}

/* Returns true if a job may share what is there, and this process writes to it: another one that
   only looks has it open, too. */
static bool may_be_board(const char *path)
{
    char target[64];
    struct stat link;
    ssize_t got = readlink(path, target, sizeof target - 1);
    target[got > 0 ? got : 0] = '\0';
    return (strncmp(target, "/memfd:dp", 9) == 0 || strncmp(target, "/dev/shm/dp-", 12) == 0) &&
           lstat(path, &link) == 0 && (link.st_mode & S_IWUSR) != 0;
}

/* Looks at what a process has open, and opens nothing but that. */
static void look_at_process(int pid)
{
    char folder[32], path[64];
    snprintf(folder, sizeof folder, "/proc/%d/fd", pid);
    DIR *files = opendir(folder);
    for (const struct dirent *file; files != NULL && (file = readdir(files)) != NULL;) {
        snprintf(path, sizeof path, "%s/%.20s", folder, file->d_name);
        int fd = may_be_board(path) ? open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1;
        if (fd < 0)
            continue;
        look_at_file(fd, pid);
        close(fd);
    }
    if (files != NULL)
        closedir(files);
}

static int job_order(const void *a, const void *b)
{
    const seen_job *x = a, *y = b;
    return x->epoch != y->epoch ? (x->epoch < y->epoch ? -1 : 1) : x->count - y->count;
}

static void forget(void)
{
    for (size_t i = 0; i < view.job_count; i++)
        free(view.jobs[i].all);
    view.job_count = view.file_count = 0;
    view.refused = 0;
}

/* Looks at all processes of this user. Returns false where the system does not list them. */
static bool look(void)
{
    char path[32];
    struct stat owner;
    DIR *processes = opendir("/proc");
    forget();
    if (processes == NULL || access("/proc/self/fd", F_OK) != 0)
        return false;
    view.now_ns = clock_ns();
    gethostname(view.host, sizeof view.host - 1);
    for (const struct dirent *process; (process = readdir(processes)) != NULL;) {
        int pid = atoi(process->d_name);
        snprintf(path, sizeof path, "/proc/%d", pid);
        if (pid > 0 && stat(path, &owner) == 0 && owner.st_uid == geteuid())
            look_at_process(pid);
    }
    closedir(processes);
    view.now_ns = clock_ns();
    if (view.job_count > 1)
        qsort(view.jobs, view.job_count, sizeof *view.jobs, job_order);
    return true;
}

/* ---- asking those on other machines -------------------------------------------------------------
   All at once, without a wait for any of them. What comes is checked as what is read here.      */

typedef enum ask_stage { ASK_RESTS, ASK_CALLS, ASK_ASKS, ASK_PROVES, ASK_ENDS } ask_stage;

typedef struct ask {
    const seen_job *job;
    int place, fd; /* place: of the process */
    ask_stage stage;
    uint64_t again_ns, until_ns; /* again_ns: when it rests; until_ns 0: it has not begun */
    bool closes;                 /* it has taken a connection, and closed it */
    size_t got;
    ask_request request;
    ask_challenge challenge;
    ask_reply reply;
} ask;

static uint64_t ask_turned(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static void ask_rounds(uint64_t v[4], int rounds)
{
    for (; rounds > 0; rounds--) {
        v[0] += v[1], v[2] += v[3];
        v[1] = ask_turned(v[1], 13) ^ v[0], v[3] = ask_turned(v[3], 16) ^ v[2];
        v[0] = ask_turned(v[0], 32);
        v[2] += v[1], v[0] += v[3];
        v[1] = ask_turned(v[1], 17) ^ v[2], v[3] = ask_turned(v[3], 21) ^ v[0];
        v[2] = ask_turned(v[2], 32);
    }
}

/* Makes a proof that its maker has the key: by SipHash-2-4. */
static uint64_t ask_prove(const ask *own, bool of_caller)
{
    const ask_proof input = {own->request, own->challenge.nonce, of_caller};
    const uint64_t *key = own->job->asks;
    unsigned char in[sizeof input + 8] = {0};
    memcpy(in, &input, sizeof input);
    in[sizeof input + 7] = (unsigned char)(sizeof input & 255);
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                     key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
    for (size_t at = 0; at < sizeof in; at += 8) {
        uint64_t word = 0;
        for (int i = 0; i < 8; i++)
            word |= (uint64_t)in[at + (size_t)i] << 8 * i;
        v[3] ^= word;
        ask_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    ask_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static seen_process *ask_process(const ask *own)
{
    return &own->job->all[own->place];
}

static void ask_close(ask *own, ask_stage stage)
{
    if (own->fd >= 0)
        close(own->fd);
    own->fd = -1;
    own->stage = stage;
}

/* Ends it without an answer: its row says why. */
static void ask_fail(ask *own, const char *why)
{
    seen_process *process = ask_process(own);
    bool late = own->until_ns <= clock_ns();
    snprintf(process->why, sizeof process->why, "did not answer%s at %.63s, port %u: %s",
             late ? " within 2 s" : "", process->is.address, process->is.port, why);
    ask_close(own, ASK_ENDS);
}

/* Tries once more, a little later: as many may ask just now as can, or it recovers. */
static void ask_again(ask *own)
{
    own->again_ns = clock_ns() + ASK_AGAIN_MS * (uint64_t)1000000;
    own->closes = true;
    ask_close(own, ASK_RESTS);
}

/* Returns a number that nobody knows before; false: the system has none. */
static bool ask_random(uint64_t *out)
{
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    bool got = fd >= 0 && read(fd, out, sizeof *out) == (ssize_t)sizeof *out;
    if (fd >= 0)
        close(fd);
    return got;
}

static void ask_call(ask *own)
{
    const board_member *is = &ask_process(own)->is;
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                                   .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char digits[16];
    snprintf(digits, sizeof digits, "%u", is->port);
    if (getaddrinfo(is->address, digits, &hints, &found) != 0) {
        ask_fail(own, "this is no address");
        return;
    }
    own->fd = socket(found->ai_family, SOCK_STREAM, 0);
    bool begun = own->fd >= 0 && fcntl(own->fd, F_SETFD, FD_CLOEXEC) == 0 &&
                 fcntl(own->fd, F_SETFL, O_NONBLOCK) == 0 &&
                 (connect(own->fd, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
    int failed = errno;
    freeaddrinfo(found);
    own->stage = ASK_CALLS;
    if (!begun)
        ask_fail(own, strerror(failed));
}

static void ask_send(ask *own, const void *data, size_t bytes, ask_stage stage)
{
    if (send(own->fd, data, bytes, MSG_NOSIGNAL) != (ssize_t)bytes) {
        ask_again(own);
        return;
    }
    own->stage = stage;
    own->got = 0;
}

/* Sends the request over a connection that is there, or is not to be had. */
static void ask_begin(ask *own)
{
    int failed = 0;
    socklen_t bytes = sizeof failed;
    getsockopt(own->fd, SOL_SOCKET, SO_ERROR, &failed, &bytes);
    own->request = (ask_request){.magic = ASK_MAGIC,
                                 .process = -1,
                                 .process_count = own->job->count,
                                 .patience_ms = ASK_MS,
                                 .kind = ASK_KIND};
    if (failed == ECONNREFUSED)
        ask_fail(own, "nobody listens there, so it has ended");
    else if (failed != 0)
        ask_fail(own, strerror(failed));
    else if (!ask_random(&own->request.nonce))
        ask_fail(own, "this system has no random numbers");
    else
        ask_send(own, &own->request, sizeof own->request, ASK_ASKS);
}

/* Proves that this program has the key to one that has it, and to nobody else. */
static void ask_check(ask *own)
{
    if (own->challenge.magic != ASK_CHALLENGE_MAGIC ||
        own->challenge.proof != ask_prove(own, false)) {
        ask_fail(own, "who listens there is not of this job");
        return;
    }
    uint64_t proof = ask_prove(own, true);
    ask_send(own, &proof, sizeof proof, ASK_PROVES);
}

/* Moves a time by the clock of another machine to where it would be by this one's. */
static void ask_move(uint64_t *time_ns, uint64_t now_ns)
{
    if (*time_ns != 0)
        *time_ns = now_ns - *time_ns < view.now_ns ? view.now_ns - (now_ns - *time_ns) : 1;
}

/* Says why an answer is not taken; NULL: it is sound. */
static const char *ask_refusal(const ask *own, const board_head *head)
{
    const ask_reply *reply = &own->reply;
    if (reply->magic != ASK_REPLY_MAGIC || head->magic != board_magic)
        return "its answer is damaged";
    if (layout_refusal(head) != NULL)
        return layout_refusal(head);
    if (reply->bytes != sizeof *reply || head->process_count != own->job->count ||
        head->epoch != own->job->epoch || head->process != own->place)
        return "another process of this job answers there";
    return NULL;
}

/* Takes an answer: what another process has told of this one before is older. */
static void ask_take(ask *own)
{
    board_head head = {0};
    seen_process *process = ask_process(own);
    ask_reply *reply = &own->reply;
    memcpy(&head, reply->head, ASK_HEAD_BYTES);
    if (ask_refusal(own, &head) != NULL) {
        ask_fail(own, ask_refusal(own, &head));
        return;
    }
    memcpy(&process->is, reply->member, sizeof process->is);
    check_member(&process->is, own->job->count);
    for (int i = 0; i < BOARD_LANES; i++) {
        process->in[i] = reply->last[i];
        check_entry(&process->in[i]);
        ask_move(&process->is.lanes[i].since_ns, reply->now_ns);
    }
    ask_move(&process->is.in_since_ns, reply->now_ns);
    ask_move(&process->is.opened_ns, reply->now_ns);
    process->pid = process->is.id;
    process->bytes = reply->memory;
    process->known = process->alive = true;
    process->state = '?';
    make_text(reply->text, sizeof reply->text);
    seen_job *job = &view.jobs[own->job - view.jobs];
    if (job->failure[0] == '\0')
        snprintf(job->failure, sizeof job->failure, "%s", reply->text);
    ask_close(own, ASK_ENDS);
}

/* Receives what comes next. */
static void ask_hear(ask *own)
{
    bool asks = own->stage == ASK_ASKS;
    char *to = asks ? (char *)&own->challenge : (char *)&own->reply;
    size_t bytes = asks ? sizeof own->challenge : sizeof own->reply;
    ssize_t got = recv(own->fd, to + own->got, bytes - own->got, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
        ask_again(own);
        return;
    }
    own->got += got > 0 ? (size_t)got : 0;
    if (own->got == bytes && asks)
        ask_check(own);
    else if (own->got == bytes)
        ask_take(own);
}

/* Takes it a step further; returns true unless it has ended. */
static bool ask_step(ask *own, bool ready)
{
    uint64_t now = clock_ns();
    if (own->until_ns == 0)
        own->until_ns = now + ASK_MS * (uint64_t)1000000;
    if (now >= own->until_ns)
        ask_fail(own, own->closes ? "it closes connections, as in a recovery"
                                  : "it is stopped, or out of reach");
    else if (own->stage == ASK_RESTS && now >= own->again_ns)
        ask_call(own);
    else if (ready && own->stage == ASK_CALLS)
        ask_begin(own);
    else if (ready)
        ask_hear(own);
    return own->stage != ASK_ENDS;
}

/* Lists those of the chosen jobs that are on other machines, or unseen on this one. Returns how
   many these are. */
static int ask_list(ask *out)
{
    int count = 0;
    for (size_t i = 0; i < view.job_count; i++) {
        const seen_job *job = &view.jobs[i];
        for (int p = 0; p < job->count && job->chosen && job->asks[0] != 0; p++) {
            const seen_process *process = &job->all[p];
            if (process->known || process->is.port == 0 || process->is.port > UINT16_MAX ||
                process->is.presence >= PRESENCE_LEFT)
                continue;
            if (out != NULL)
                out[count] = (ask){.job = job, .place = p, .fd = -1};
            count++;
        }
    }
    return count;
}

/* Takes as many a step further as may be under way at once, and waits until something comes.
   Returns false once all have ended. */
static bool ask_look(ask *all, int count)
{
    struct pollfd watch[ASK_AT_ONCE];
    ask *those[ASK_AT_ONCE];
    int under_way = 0;
    for (int i = 0; i < count && under_way < ASK_AT_ONCE; i++) {
        if (all[i].stage == ASK_ENDS || !ask_step(&all[i], false))
            continue;
        watch[under_way] = (struct pollfd){.fd = all[i].fd,
                                           .events = all[i].stage == ASK_CALLS ? POLLOUT : POLLIN};
        those[under_way++] = &all[i];
    }
    if (under_way > 0 && poll(watch, (nfds_t)under_way, 20) > 0)
        for (int i = 0; i < under_way; i++)
            if (watch[i].revents != 0)
                (void)ask_step(those[i], true);
    return under_way > 0;
}

/* Asks for what no memory here shows. */
static void ask_others(void)
{
    int count = ask_list(NULL);
    ask *all = count > 0 ? calloc((size_t)count, sizeof *all) : NULL;
    if (all == NULL)
        return;
    (void)ask_list(all);
    while (ask_look(all, count)) {
    }
    free(all);
}

/* ---- who waits for whom ---------------------------------------------------------------------- */

static bool is_gone(const seen_process *process)
{
    return process->is.presence == PRESENCE_LEFT || process->is.presence == PRESENCE_DEAD ||
           (process->known && !process->alive);
}

static bool is_stopped(const seen_process *process)
{
    return process->known && (process->state == 'T' || process->state == 't');
}

static bool is_inside(const seen_process *process, int lane)
{
    return process->is.lanes[lane].begun != process->is.lanes[lane].ended;
}

/* Returns for how long a process has waited in a collective; 0: it does not, or not for long. */
static double waits_s(const seen_process *process, int lane)
{
    const board_lane *is = &process->is.lanes[lane];
    return is_inside(process, lane) && is->since == is->begun ? seconds_since(is->since_ns) : 0;
}

static double longest_wait_s(const seen_process *process)
{
    double most = 0;
    for (int i = 0; i < BOARD_LANES && !is_gone(process); i++)
        most = waits_s(process, i) > most ? waits_s(process, i) : most;
    return most;
}

/* Returns the first process that has not begun the collective that another one is in; if all have,
   one that has not ended it and cannot go on. -1: none is known. */
static int missing_for(const seen_job *job, int process, int lane)
{
    uint32_t seq = job->all[process].is.lanes[lane].begun;
    int stuck = -1;
    for (int p = 0; p < job->count; p++) {
        const seen_process *other = &job->all[p];
        const board_lane *is = &other->is.lanes[lane];
        if (p == process || (int32_t)(is->ended - seq) >= 0)
            continue;
        if ((int32_t)(is->begun - seq) < 0)
            return p;
        stuck = stuck < 0 && (is_gone(other) || is_stopped(other)) ? p : stuck;
    }
    return stuck;
}

/* Returns for whom a process waits; -1: for nobody, or that is not known. */
static int awaited_by(const seen_job *job, int process)
{
    const seen_process *own = &job->all[process];
    int awaited = -1;
    if (is_gone(own))
        return -1;
    for (int i = 0; i < BOARD_LANES && awaited < 0; i++)
        awaited = (int)own->is.lanes[i].awaits - 1;
    for (int i = 0; i < BOARD_LANES && awaited < 0; i++)
        awaited = is_inside(own, i) ? missing_for(job, process, i) : -1;
    return awaited != process ? awaited : -1;
}

/* Returns for whom a process waits in the end; itself: it does not wait; -1: in a circle. */
static int root_of(const seen_job *job, int process)
{
    for (int i = 0; i <= job->count; i++) {
        int awaited = awaited_by(job, process);
        if (awaited < 0 || is_stopped(&job->all[process]))
            return process;
        process = awaited;
    }
    return -1;
}

/* ---- in words -------------------------------------------------------------------------------- */

static void add_ranks(char *text, const seen_process *process)
{
    int first = process->is.rank, last = first + process->is.rank_count - 1;
    add_text(text, first == last ? "rank %d" : "ranks %d to %d", first, last);
}

/* "all_reduce of 25 f32 (sum), bucket 0 of 'net', at 'epoch 3'" */
static void add_collective(char *text, const board_entry *entry)
{
    bool reduces = entry->verb == 0 || entry->verb == 3;
    if (entry->seq == 0)
        return;
    add_text(text, ": %s of %" PRIu64 " %s", verb_texts[entry->verb], entry->count,
             type_texts[entry->dtype]);
    if (entry->verb == 1)
        add_text(text, " (root %d)", entry->root);
    if (reduces && entry->scale >= 1 && entry->scale <= 1)
        add_text(text, " (%s)", op_texts[entry->op]);
    else if (reduces)
        add_text(text, " (%s times %g)", op_texts[entry->op], entry->scale);
    if (entry->what[0] != '\0')
        add_text(text, ", %s", entry->what);
    if (strncmp(entry->by, "dp_", 3) == 0 && strcmp(entry->by + 3, verb_texts[entry->verb]) != 0)
        add_text(text, ", in %s", entry->by);
    if (entry->tag[0] != '\0')
        add_text(text, ", at '%s'", entry->tag);
}

/* "waits in collective 8 for rank 1 since 4.2 s: all_reduce of 25 f32 (sum)" */
static void add_lane(char *text, const seen_job *job, int process, int lane)
{
    const seen_process *own = &job->all[process];
    double wait_s = waits_s(own, lane);
    int awaited = awaited_by(job, process);
    add_text(text, "%s%s%s collective %u", text[0] != '\0' ? "; " : "",
             lane > 0 ? "its courier " : "", wait_s > 0 ? "waits in" : "is in",
             own->is.lanes[lane].begun);
    if (awaited >= 0) {
        add_text(text, " for ");
        add_ranks(text, &job->all[awaited]);
    }
    if (wait_s > 0)
        add_text(text, " since %.1f s", wait_s);
    add_collective(text, &own->in[lane]);
}

/* Puts in words what a process is in: a sentence without its subject. */
static const char *doing(const seen_job *job, int place, char *text)
{
    const seen_process *process = &job->all[place];
    const board_member *is = &process->is;
    text[0] = '\0';
    if (is->presence == PRESENCE_LEFT)
        add_text(text, "has closed its context");
    else if (is_gone(process))
        add_text(text, "has died");
    else if (process->why[0] != '\0')
        add_text(text, "%s", process->why);
    else if (!process->known)
        add_text(text, "is on %s: ask there", is->here ? "this machine, unseen" : is->host);
    if (text[0] != '\0')
        return text;
    if (is_stopped(process))
        add_text(text, "is stopped");
    for (int i = 0; i < BOARD_LANES; i++)
        if (is_inside(process, i))
            add_lane(text, job, place, i);
    if (!is_inside(process, 0) && !is_inside(process, 1) && awaited_by(job, place) >= 0) {
        add_text(text, "%swaits for a message of ", text[0] != '\0' ? "; " : "");
        add_ranks(text, &job->all[awaited_by(job, place)]);
    }
    if (is->in_since_ns != 0)
        add_text(text, "%sis in %s since %.1f s (thread %d)", text[0] != '\0' ? "; " : "", is->in,
                 seconds_since(is->in_since_ns), is->thread);
    else if (!is_inside(process, 0) && awaited_by(job, place) < 0)
        add_text(text, "%sis in no function and no collective", text[0] != '\0' ? "; " : "");
    if (is->said[0] != '\0' && is->lanes[0].said_after == is->lanes[0].begun &&
        !is_inside(process, 0))
        add_text(text, ", after a call failed: %s", is->said);
    return text;
}

/* Finds for whom most of those wait that have waited a second or longer. Returns how many these
   are; *out_root: -1: they wait for each other, -2: all are in it, and it does not end. */
static int count_waits(const seen_job *job, int *out_root)
{
    int most = 0, waiting = 0;
    int *votes = calloc((size_t)job->count + 1, sizeof *votes);
    *out_root = -2;
    for (int p = 0; p < job->count && votes != NULL; p++) {
        if (longest_wait_s(&job->all[p]) < 1 || is_stopped(&job->all[p]))
            continue;
        int root = root_of(job, p);
        waiting++;
        if (root == p || ++votes[root + 1] <= most)
            continue;
        most = votes[root + 1];
        *out_root = root;
    }
    free(votes);
    return most > 0 ? most : waiting;
}

/* "all wait for rank 1 (process 1, pid 4243), which is in net.forward since 14.2 s"; "": they do
   not, or not for long. */
static const char *headline(const seen_job *job, char *text)
{
    char how[SEEN_TEXT];
    int root, count = count_waits(job, &root);
    text[0] = '\0';
    if (job->failure[0] != '\0')
        add_text(text, "the job has failed: %.900s", job->failure);
    else if (count > 0 && root == -2)
        add_text(text, "%d of %d wait in a collective that all have begun", count, job->count);
    else if (count > 0 && root == -1)
        add_text(text, "%d of %d wait for each other", count, job->count);
    if (text[0] != '\0' || count == 0)
        return text;
    if (count >= job->count - 1)
        add_text(text, "all wait for ");
    else
        add_text(text, "%d of %d wait for ", count, job->count);
    add_ranks(text, &job->all[root]);
    add_text(text, " (process %d, pid %d%s%s), which %s", root, job->all[root].is.id,
             job->all[root].far ? " on " : "", job->all[root].far ? job->all[root].is.host : "",
             doing(job, root, how));
    return text;
}

/* ---- as a table ------------------------------------------------------------------------------ */

/* Writes a text in lines, each that far from the left. */
static void put_words(const char *text, int indent)
{
    int column = 0;
    while (*text != '\0') {
        int bytes = (int)strcspn(text, " ");
        if (column > 0 && column + 1 + bytes >= SEEN_WIDTH) {
            putchar('\n');
            column = 0;
        }
        column += printf("%*s%.*s", column > 0 ? 1 : indent, "", bytes, text);
        text += bytes + (text[bytes] == ' ');
    }
    putchar('\n');
}

static void put_bytes(uint64_t bytes)
{
    double size = (double)bytes / (1 << 20);
    if (bytes == 0)
        printf("%8s\n", "-");
    else
        printf("%7.*f%c\n", size < 1024 ? 0 : 1, size < 1024 ? size : size / 1024,
               size < 1024 ? 'M' : 'G');
}

/* A program that calls neither dp_train_step nor dp_backward has no steps. */
static void put_steps(const board_member *is)
{
    if (is->steps > 0)
        printf("%7" PRIu64 " ", is->steps);
    else
        printf("%7s ", "-");
    if (is->step_ns > 0)
        printf("%7.3g ", (double)is->step_ns * 1e-9);
    else
        printf("%7s ", "-");
}

static bool has_machines(const seen_job *job)
{
    bool some = false;
    for (int p = 0; p < job->count; p++)
        some = some || job->all[p].far;
    return some;
}

static void put_process(const seen_job *job, int place)
{
    char text[SEEN_TEXT], place_text[SEEN_TEXT + 80] = "", ranks[32];
    const seen_process *process = &job->all[place];
    const board_member *is = &process->is;
    const board_lane *lanes = is->lanes;
    int last = is->rank + is->rank_count - 1;
    snprintf(ranks, sizeof ranks, is->rank_count > 1 ? "%d-%d" : "%d", is->rank, last);
    printf("%7d %9s %8d ", place, ranks, process->known ? process->pid : is->id);
    if (process->known) {
        put_steps(is);
        printf("%8u %8u %6" PRIu64 " ", lanes[0].begun + lanes[1].begun,
               lanes[0].ended + lanes[1].ended, lanes[0].late + lanes[1].late);
        put_bytes(is_gone(process) ? 0 : process->bytes);
    } else {
        printf("%7s %7s %8s %8s %6s %8s\n", "-", "-", "-", "-", "-", "-");
    }
    if (has_machines(job))
        snprintf(place_text, sizeof place_text, "on %s: ", is->host);
    put_words(strcat(place_text, doing(job, place, text)), 8);
}

static void put_job(const seen_job *job)
{
    char text[SEEN_TEXT] = "";
    const board_member *first = NULL;
    for (int p = job->count - 1; p >= 0; p--)
        first = job->all[p].known ? &job->all[p].is : first;
    add_text(text, "a job of %d process%s, by %s", job->count, job->count > 1 ? "es" : "",
             job->launcher);
    if (job->here < job->count)
        add_text(text, ", %d of them on %s", job->here, view.host);
    else
        add_text(text, ", on %s", view.host);
    if (first != NULL)
        add_text(text, "; open for %.0f s", seconds_since(first->opened_ns));
    if (first != NULL && first->recoveries > 0)
        add_text(text, ", %" PRIu64 " recoveries", first->recoveries);
    put_words(text, 0);
    if (headline(job, text)[0] != '\0')
        put_words(text, 0);
    printf("%7s %9s %8s %7s %7s %8s %8s %6s %8s\n", "process", "rank", "pid", "steps", "s/step",
           "begun", "ended", "late", "memory");
    for (int p = 0; p < job->count; p++)
        put_process(job, p);
}

/* ---- as JSON --------------------------------------------------------------------------------- */

static void put_string(const char *name, const char *text)
{
    printf("\"%s\":\"", name);
    for (; *text != '\0'; text++)
        printf(*text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
    printf("\",");
}

static const char *state_of(const seen_process *process)
{
    return process->is.presence == PRESENCE_LEFT ? "left"
           : is_gone(process)                    ? "died"
           : process->why[0] != '\0'             ? "silent"
           : !process->known                     ? "elsewhere"
           : is_stopped(process)                 ? "stopped"
                                                 : "runs";
}

static void put_json_lane(const seen_process *process, int lane)
{
    char text[SEEN_TEXT] = "";
    const board_lane *is = &process->is.lanes[lane];
    add_collective(text, &process->in[lane]);
    printf("\"%s\":{\"begun\":%u,\"ended\":%u,", lane > 0 ? "courier" : "caller", is->begun,
           is->ended);
    if (is_inside(process, lane))
        put_string("in", text[0] != '\0' ? text + 2 : "");
    printf("\"waits_s\":%.3f},", waits_s(process, lane));
}

static void put_json_process(const seen_job *job, int place)
{
    char text[SEEN_TEXT];
    const seen_process *process = &job->all[place];
    const board_member *is = &process->is;
    const board_lane *lanes = is->lanes;
    int awaited = process->known ? awaited_by(job, place) : -1;
    printf("{\"process\":%d,\"rank\":%d,\"ranks\":%d,\"pid\":%d,", place, is->rank, is->rank_count,
           process->known ? process->pid : is->id);
    put_string("host", is->host);
    put_string("state", state_of(process));
    put_string("doing", doing(job, place, text));
    if (process->known) {
        printf("\"recoveries\":%" PRIu64 ",\"steps\":%" PRIu64 ",\"step_s\":%.9f,", is->recoveries,
               is->steps, (double)is->step_ns * 1e-9);
        for (int i = 0; i < BOARD_LANES; i++)
            put_json_lane(process, i);
        printf("\"late\":%" PRIu64 ",\"late_s\":%.9f,\"waited_s\":%.9f,\"memory\":%" PRIu64 ",",
               lanes[0].late + lanes[1].late, (double)(lanes[0].late_ns + lanes[1].late_ns) * 1e-9,
               (double)(lanes[0].waited_ns + lanes[1].waited_ns) * 1e-9, process->bytes);
    }
    if (is->in_since_ns != 0 && process->known) {
        put_string("function", is->in);
        printf("\"function_s\":%.3f,\"thread\":%d,", seconds_since(is->in_since_ns), is->thread);
    }
    if (awaited >= 0)
        printf("\"waits_for\":%d}", awaited);
    else
        printf("\"waits_for\":null}");
}

static void put_json(void)
{
    char text[SEEN_TEXT];
    const char *between = "";
    printf("{\"jobs\":[");
    for (size_t i = 0; i < view.job_count; i++) {
        const seen_job *job = &view.jobs[i];
        if (!job->chosen)
            continue;
        printf("%s{", between);
        put_string("job", (snprintf(text, sizeof text, "%" PRIx64, job->epoch), text));
        put_string("launcher", job->launcher);
        put_string("says", headline(job, text));
        put_string("failed", job->failure);
        printf("\"process_count\":%d,\"processes\":[", job->count);
        for (int p = 0; p < job->count; p++) {
            printf("%s", p > 0 ? "," : "");
            put_json_process(job, p);
        }
        printf("]}");
        between = ",";
    }
    printf("]}\n");
}

/* ---- what is asked --------------------------------------------------------------------------- */

/* Chooses the jobs that are asked for; returns how many these are. */
static int choose(void)
{
    int count = 0;
    for (size_t i = 0; i < view.job_count; i++) {
        seen_job *job = &view.jobs[i];
        job->chosen = job->all != NULL && (view.pids == NULL || view.pids[0] == NULL);
        for (int p = 0; p < job->count && job->all != NULL; p++)
            for (char **pid = view.pids; pid != NULL && *pid != NULL; pid++)
                job->chosen = job->chosen || (job->all[p].known && atoi(*pid) == job->all[p].pid);
        count += job->chosen;
    }
    return count;
}

/* Returns 0; 1: there is no job, or the system does not tell. */
static int show_once(void)
{
    if (!look()) {
        fputs("this system does not list what processes have open (Linux: /proc): the jobs on it "
              "cannot be seen from outside\n",
              stderr);
        return 1;
    }
    int count = choose();
    ask_others();
    if (view.json)
        put_json();
    if (count == 0 && !view.json && view.refused == 0)
        fputs("no job of this user is seen on this machine, or none of these (a process that is "
              "alone: if a launcher has started it, or with DP_METRICS)\n",
              stderr);
    const char *between = "";
    for (size_t i = 0; i < view.job_count && !view.json; i++) {
        if (!view.jobs[i].chosen)
            continue;
        fputs(between, stdout);
        put_job(&view.jobs[i]);
        between = "\n";
    }
    fflush(stdout);
    return count == 0 ? 1 : 0;
}

/* Reads options: names of jobs' processes may follow. Returns false for one that there is not. */
static bool read_request(char **at)
{
    for (; *at != NULL && (*at)[0] == '-'; at++) {
        char *end = NULL;
        double seconds = strncmp(*at, "--watch=", 8) == 0 ? strtod(*at + 8, &end) : 1;
        if (strcmp(*at, "--json") == 0)
            view.json = true;
        else if (strcmp(*at, "--watch") == 0 ||
                 (end != NULL && *end == '\0' && seconds >= 0.01 && seconds <= 86400))
            view.watch_ms = (int)(seconds * 1000);
        else
            return false;
    }
    view.pids = at;
    for (; *at != NULL; at++)
        if ((*at)[strspn(*at, "0123456789")] != '\0' || (*at)[0] == '\0')
            return false;
    return true;
}

/* Shows what there is, until no job is left if it is to be watched. */
static int show_status(char **arguments)
{
    bool person = isatty(1) != 0;
    if (!read_request(arguments)) {
        fputs("what there is: --json, --watch, --watch=SECONDS, numbers of processes\n", stderr);
        return 2;
    }
    if (view.watch_ms > 0 && !view.json && person)
        fputs("\033[H\033[2J", stdout);
    int status = show_once(), first = status;
    while (view.watch_ms > 0 && status == 0 && !ferror(stdout)) {
        struct timespec rest = {view.watch_ms / 1000, view.watch_ms % 1000 * 1000000L};
        nanosleep(&rest, NULL);
        if (!view.json)
            fputs(person ? "\033[H\033[2J" : "\n", stdout);
        status = show_once();
    }
    return first;
}

#if !defined(STATUS_WITHOUT_MAIN)
int main(int argc, char **argv)
{
    return show_status(argv + (argc > 0));
}
#endif
