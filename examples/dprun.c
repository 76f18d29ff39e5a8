/* dprun.c - starts the processes of a job on this machine, without mpirun, srun or torchrun.

   Each process learns from its environment which one it is (>>launch in dp.h), so any program with
   dp_open in it can be started, as it is. No part of dp.h is in here.

   Its lines come out whole, behind the number of the process that wrote them. A program that writes
   into a pipe keeps its lines back until it has some kilobytes; if they should come at once, it
   calls setvbuf(stdout, NULL, _IOLBF, 0) first. stdin is that of process 0.

   The first process that fails ends the job: after a moment, in which those that fail because of it
   end by themselves, the others get SIGTERM, and those that are still there after some seconds
   SIGKILL. The job's exit status is that of the failed one (128 + the number of the signal that
   ended it), whose last words are repeated at the end. With --grace a process that hangs while
   others of the job have failed, on whichever machine, ends by itself, with 124: that is the job's
   status only if no other process has failed here. Signals are passed on; a second Ctrl-C kills.
   Each process has a process group, so what it has started itself hears all that too. If dprun is
   killed by SIGKILL, its processes are killed as well, on Linux. Elsewhere, and for what they have
   started, the next line that they write ends them, as nobody reads it.

   A program that calls dp_recover and dp_admit goes on when processes fail. With --spare so many
   may; with --respawn each is started again, and joins the others; --elastic is both, for as long
   as there are enough of them. Then other dpruns with --join may bring more, also from other
   machines, if --addr and DP_SECRET are theirs.

   dprun --status shows the jobs of this user on this machine, whoever has started them, also those
   that hang, with their processes on other machines (examples/status.c, which has to lie beside
   this file).

   Build: cc -std=c11 examples/dprun.c -o dprun
   Run:   ./dprun -n 2 ./train_anywhere
   Prints:
   [0] parameters after 64 steps add up to ... */

#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* for sched_setaffinity */
#elif !defined(__linux__) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/prctl.h>
#endif

#define STATUS_WITHOUT_MAIN
#include "status.c"

#if defined(__GNUC__)
#define SAYS __attribute__((format(printf, 1, 2)))
#else
#define SAYS
#endif

static const char usage[] =
    "dprun [options] [--] program [arguments]\n"
    "dprun --status [--json] [--watch[=SECONDS]] [process id ...]\n"
    "  -n COUNT           processes on this machine (1)\n"
    "  --nodes COUNT      machines; dprun is started on each, with the same -n (1)\n"
    "  --node NUMBER      which of them this is, from 0 on\n"
    "  --addr HOST:PORT   of machine 0, a port that is free there; for several machines, and for\n"
    "                     jobs that others join. DP_SECRET in the environment, the same of all,\n"
    "                     keeps out other jobs and people\n"
    "  --output DIR       what process 3 writes goes to DIR/3.log, else here, each line after [3]\n"
    "  --restarts COUNT   start the job again when it has failed, at most so often (0). A program\n"
    "                     goes on from what it has saved; DP_RESTART says how often. On several\n"
    "                     machines each dprun starts its own part\n"
    "  --spare COUNT      so many processes may fail, and the others go on: by dp_recover (0)\n"
    "  --respawn COUNT    each process that fails is started again, alone, at most so often (0),\n"
    "                     and joins the others: by dp_admit. DP_REJOIN is set for it. All of this\n"
    "                     machine may fail at once if others are elsewhere: --nodes, --join\n"
    "  --elastic MIN:MAX  each process that fails is started again, but not after the third time\n"
    "                     in a minute. The job goes on while MIN of this machine's run, and may\n"
    "                     grow to MAX, of all machines\n"
    "  --join             the processes join a job that runs, at the --addr of its dprun\n"
    "  --bind cores       each process gets its own share of the cores (Linux)\n"
    "  --grace SECONDS    from SIGTERM to SIGKILL (10). If it is given, DP_GRACE is set, too: a\n"
    "                     process that hangs for so long after the job has failed, here or on\n"
    "                     another machine, ends by itself, with 124\n"
    "  --status           starts nothing, and shows the jobs of this user on this machine, also\n"
    "                     those of other launchers (Linux), with their processes on other\n"
    "                     machines, which answer: for each process its steps, seconds a\n"
    "                     step, collectives begun and ended, how often all others waited for it,\n"
    "                     its memory, what it is in, for whom it waits. --watch: every second.\n"
    "                     Exit status 1: there is none\n"
    "  -h                 this text\n"
    "Exit status: that of the process that failed first; 128 + its signal; 1: a process cannot\n"
    "be started, or output cannot be written; 2: wrong options; 126, 127: the program cannot be\n"
    "run, is not there.\n";

enum {
    LINE = 16 << 10,     /* a longer line is broken */
    PREFIX = 16,         /* "[12] " */
    WORDS = 400,         /* of a process' last ones */
    DRAIN = 1 << 20,     /* read at most from a pipe whose process has ended: others may go on */
    LOOK_MS = 50,        /* between looks for what is left of a group */
    COUNT_MAX = 4096,    /* processes of a machine */
    TOTAL_MAX = 1 << 20, /* and of all */
    SECONDS_MAX = 1000000,
    HUNG = 124,      /* the exit status of a process that dp.h has ended: DP_GRACE */
    MOMENT_MS = 300, /* after a failure: others that fail, too, end by themselves, and say why */
    FAILURES = 3,    /* within a minute are too many */
    MINUTE_MS = 60000
};

static struct {
    int count, nodes, node, restarts, spare, respawn;
    int grace;       /* -1: it is not given */
    int least, most; /* of --elastic; 0: it is not */
    bool join;
    const char *addr, *output, *bind, *elastic;
    char **program;
} asked = {.count = 1, .nodes = 1, .node = -1, .grace = -1};

typedef struct stream {  /* stdout or stderr of a process */
    int fd, to;          /* fd -1: it has ended */
    bool tty;            /* where it goes to */
    size_t used, late;   /* bytes of a line; bytes that came after the end of the process */
    char line[LINE + 1]; /* with its newline */
} stream;

typedef struct process {
    pid_t pid;  /* its group's number too; 0: not started */
    bool ended; /* and waited for */
    bool group; /* somebody of its group may be there */
    bool early; /* it has ended before it was told to */
    int status;
    int again;                   /* how often it was started again, alone, */
    int64_t again_ms;            /* and when it will be; 0: it will not */
    int64_t failed_ms[FAILURES]; /* the last times that it has failed */
    char words[WORDS];           /* the last line that it wrote to stderr */
    stream out[2];
} process;

static struct {
    process *all;
    struct pollfd *watched;
    int running, lost; /* lost: how many have failed, and were spared */
    int well;          /* how many have ended well: nobody is let in any more */
    int first;         /* the process that failed first of those that end the job, or -1 */
    int attempt, code;
    bool broken;        /* a process could not be started */
    bool ending;        /* all have been told to end */
    bool killed;        /* and those that did not, killed */
    bool told;          /* by a signal to dprun */
    bool unwritten;     /* what a process wrote is lost: a disk is full */
    int64_t first_ms;   /* when the first one has failed */
    int64_t until_ms;   /* when they are killed */
    pid_t self, typist; /* who brings process 0 what is typed */
} job;

static int number_of(const process *p) /* in the whole job */
{
    return asked.node * asked.count + (int)(p - job.all);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool failed(const process *p)
{
    return !WIFEXITED(p->status) || WEXITSTATUS(p->status) != 0;
}

/* Returns true if dp.h has ended a process that hung when others had failed. */
static bool was_hung(const process *p)
{
    return WIFEXITED(p->status) && WEXITSTATUS(p->status) == HUNG;
}

/* ---- signals --------------------------------------------------------------------------------- */

/* The first ones end the job. */
enum { ENDING = 4, SIGNALS = 8 };
static const int signals[SIGNALS] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT,
                                     SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
static volatile sig_atomic_t heard[SIGNALS];
static bool caught[SIGNALS]; /* not what dprun was started to ignore, as by nohup */
static int wake[2];          /* a pipe: a signal that comes before poll ends it too */
static struct sigaction pipe_before;

static void hear(int number)
{
    int before = errno;
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i] == number)
            heard[i] = 1;
    ssize_t full = write(wake[1], "", 1); /* then it wakes without this byte */
    (void)full;
    errno = before;
}

static void make_private(int fd, bool waits)
{
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (!waits)
        fcntl(fd, F_SETFL, O_NONBLOCK);
}

static bool open_pipe(int fd[2])
{
    if (pipe(fd) != 0)
        return false;
    make_private(fd[0], true);
    make_private(fd[1], true);
    return true;
}

static bool take_signals(void)
{
    struct sigaction before, act = {.sa_handler = hear};
    sigfillset(&act.sa_mask);
    if (!open_pipe(wake))
        return false;
    make_private(wake[0], false);
    make_private(wake[1], false);
    sigaction(SIGCHLD, &act, NULL);
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &before);
        caught[i] = before.sa_handler != SIG_IGN;
        if (caught[i])
            sigaction(signals[i], &act, NULL);
    }
    act.sa_handler = SIG_IGN; /* a write says it as well */
    sigaction(SIGPIPE, &act, &pipe_before);
    return true;
}

/* In a new process: what dprun ignores would stay so. */
static void leave_signals(const sigset_t *mask)
{
    struct sigaction act = {.sa_handler = SIG_DFL};
    sigemptyset(&act.sa_mask);
    sigaction(SIGCHLD, &act, NULL);
    for (int i = 0; i < SIGNALS; i++)
        if (caught[i])
            sigaction(signals[i], &act, NULL);
    sigaction(SIGPIPE, &pipe_before, NULL);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

static void pass_on(int number)
{
    for (process *p = job.all; p < job.all + asked.count; p++)
        if (p->group)
            p->group = kill(-p->pid, number) == 0;
}

static void end_job(int number)
{
    if (!job.ending)
        job.until_ms = now_ms() + 1000 * (int64_t)(asked.grace < 0 ? 10 : asked.grace);
    job.ending = true;
    pass_on(number);
    pass_on(SIGCONT); /* who is stopped hears nothing */
}

static void heed_signals(void)
{
    for (int i = 0; i < SIGNALS; i++) {
        if (!heard[i])
            continue;
        heard[i] = 0;
        if (i >= ENDING)
            pass_on(signals[i]);
        else if (job.told)
            job.until_ms = now_ms();
        else
            end_job(signals[i]);
        job.told = job.told || i < ENDING;
        if (signals[i] == SIGTSTP)
            raise(SIGSTOP);
    }
}

SAYS static void say(const char *format, ...);

static void say_how(const process *p)
{
    const char *colon = p->words[0] != '\0' ? ": " : "";
    if (WIFSIGNALED(p->status))
        say("process %d was ended by signal %d (%s)%s%s", number_of(p), WTERMSIG(p->status),
            strsignal(WTERMSIG(p->status)), colon, p->words);
    else
        say("process %d ended with exit status %d%s%s", number_of(p), WEXITSTATUS(p->status), colon,
            p->words);
}

/* For --elastic: whether it has failed too often lately. */
static bool is_hopeless(process *p)
{
    int64_t now = now_ms(), first = p->failed_ms[(p->again + 1) % FAILURES];
    p->failed_ms[p->again % FAILURES] = now;
    return first != 0 && now - first < MINUTE_MS;
}

/* Another dprun may have processes of the job that go on, whatever becomes of those here. */
static bool others_elsewhere(void)
{
    return asked.join || asked.nodes > 1;
}

/* The job goes on without it, if there are others (they may have ended well), or until it is back:
   each time that takes twice as long, up to ten seconds. Or it came back when the others were about
   to end. */
static bool is_spared(process *p)
{
    bool late = job.well > 0 && p->again > 0;
    bool returns = p->again < asked.respawn, spared = returns || job.lost < asked.spare;
    int others = job.running + job.well;
    if (asked.most > 0) {
        returns = !is_hopeless(p);
        spared = others >= asked.least;
    }
    bool goes_on = others > 0 || (returns && others_elsewhere());
    if (job.ending || !(late || (spared && goes_on)))
        return false;
    say_how(p);
    if (asked.most > 0 && !returns)
        say("process %d has failed %d times within a minute: it stays out", number_of(p), FAILURES);
    returns = returns && job.well == 0;
    job.lost += !returns;
    if (returns)
        p->again_ms = now_ms() + (p->again < 7 ? 100 << p->again : 10000);
    p->again += returns;
    return true;
}

/* Returns true if it is the first that has failed. Of several that have failed at once, one that a
   signal has ended is no echo of another; one that has hung may be. */
static bool is_first(const process *p)
{
    const process *first = job.first < 0 ? NULL : &job.all[job.first];
    return first == NULL ||
           (!job.ending && WIFSIGNALED(p->status) && !WIFSIGNALED(first->status)) ||
           (!job.ending && was_hung(first) && !was_hung(p));
}

static void reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        job.typist = pid == job.typist ? 0 : job.typist;
        for (process *p = job.all; p < job.all + asked.count; p++) {
            if (p->pid != pid || p->ended)
                continue;
            p->ended = true;
            p->early = !job.ending;
            p->status = status;
            job.running--;
            job.well += !failed(p);
            if (failed(p) && is_first(p) && !is_spared(p))
                job.first = (int)(p - job.all);
        }
    }
    for (process *p = job.all; p < job.all + asked.count; p++)
        if (p->ended && p->group) /* those that it has started have its number still */
            p->group = kill(-p->pid, 0) == 0;
}

/* Returns the process of this machine that the last words of another one name; NULL: there is none.
   Errors of dp.h name one as "(process 3, pid 4242)". */
static const process *named_by(const process *p)
{
    char id[32];
    for (const process *q = job.all; q < job.all + asked.count; q++) {
        snprintf(id, sizeof id, ", pid %d)", (int)q->pid);
        if (q != p && q->pid != 0 && strstr(p->words, id) != NULL)
            return q;
    }
    return NULL;
}

/* Returns the process because of which the first one has failed, which may be that one. A process
   closes its connections before its end can be seen, so an echo of its failure may end first. */
static const process *culprit(void)
{
    const process *p = &job.all[job.first], *named = named_by(p);
    for (int i = 0;
         i < asked.count && named != NULL && named->ended && named->early && !was_hung(named);
         i++) {
        p = named;
        named = failed(p) ? named_by(p) : NULL;
    }
    return p;
}

/* Returns true once a failure ends the job: not before the others have had a moment. */
static bool is_time_to_end(void)
{
    if (job.first < 0 || job.ending)
        return false;
    if (job.first_ms == 0)
        job.first_ms = now_ms();
    return job.running == 0 || now_ms() - job.first_ms >= MOMENT_MS;
}

static void start_process(process *p);

/* Alone, whoever is due, once all that it had written has been passed on. If nobody is left, or the
   others are about to end, there is nobody to join. */
static void start_again(void)
{
    bool some = job.running > 0 || others_elsewhere();
    for (process *p = job.all; p < job.all + asked.count; p++) {
        if (job.ending || !some || job.well > 0)
            p->again_ms = 0;
        if (p->again_ms == 0 || now_ms() < p->again_ms || p->out[0].fd >= 0 || p->out[1].fd >= 0)
            continue;
        p->again_ms = 0;
        p->ended = p->group = false;
        p->pid = 0;
        p->words[0] = '\0';
        if (asked.most > 0)
            say("process %d is started again", number_of(p));
        else
            say("process %d is started again, %d of %d", number_of(p), p->again, asked.respawn);
        start_process(p);
    }
}

/* All that does not wait, whenever something may have happened. */
static void attend(void)
{
    char bytes[64];
    while (read(wake[0], bytes, sizeof bytes) > 0)
        ;
    heed_signals();
    reap();
    start_again();
    if (job.broken && !job.ending)
        end_job(SIGTERM);
    if (is_time_to_end())
        end_job(SIGTERM);
    if (job.ending && !job.killed && now_ms() >= job.until_ms) {
        job.killed = true;
        pass_on(SIGKILL);
    }
}

static int patience(void)
{
    bool looks = (job.ending && (job.told || !job.killed)) || (job.first >= 0 && !job.ending);
    for (const process *p = job.all; p < job.all + asked.count; p++)
        looks = looks || p->again_ms != 0;
    return looks ? LOOK_MS : -1;
}

/* ---- what is written ------------------------------------------------------------------------- */

/* A reader may take its time: the processes wait for it then, but signals and ends do not. So each
   time only what a pipe takes at once if poll calls it ready. False: nobody reads it. */
static bool put(int fd, const char *data, size_t bytes)
{
    while (bytes > 0) {
        struct pollfd set[2] = {{.fd = wake[0], .events = POLLIN}, {.fd = fd, .events = POLLOUT}};
        if (poll(set, 2, patience()) < 0)
            set[1].revents = 0;
        attend();
        if (job.told && job.killed && set[1].revents == 0) {
            errno = EINTR;
            return false;
        }
        ssize_t done = 0;
        if (set[1].revents != 0)
            done = write(fd, data, bytes < PIPE_BUF ? bytes : PIPE_BUF);
        if (done < 0 && errno != EINTR && errno != EAGAIN)
            return false;
        data += done > 0 ? done : 0;
        bytes -= done > 0 ? (size_t)done : 0;
    }
    return true;
}

SAYS static void say(const char *format, ...)
{
    char text[1024] = "dprun: ";
    size_t begin = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + begin, sizeof text - 1 - begin, format, args);
    va_end(args);
    size_t bytes = strlen(text);
    text[bytes] = '\n';
    (void)put(2, text, bytes + 1);
}

static struct {
    size_t used;
    char text[PREFIX + LINE + 1];
} lines; /* of one stream, that go out in one write; none but while a stream is read or ends */

static bool put_lines(const process *p, const stream *s)
{
    size_t bytes = lines.used;
    lines.used = 0;
    if (put(s->to, lines.text, bytes))
        return true;
    if (errno == ENOSPC || errno == EDQUOT || errno == EIO) {
        job.unwritten = true;
        say("process %d: its output: %s", number_of(p), strerror(errno));
    }
    return false;
}

/* As many as a pipe takes whole go together: a call of write for each short line takes too long. To
   a terminal they go one by one, as a signal may end a write in the middle. */
static bool pass_line(process *p, stream *s, const char *line, size_t bytes)
{
    char number[PREFIX];
    size_t prefix = 0;
    if (asked.output == NULL)
        prefix = (size_t)snprintf(number, PREFIX, "[%d] ", number_of(p));
    if (s == &p->out[1] && bytes > 0)
        snprintf(p->words, WORDS, "%.*s", (int)bytes, line);
    bool full = s->tty || lines.used + prefix + bytes + 1 > PIPE_BUF;
    if (full && lines.used > 0 && !put_lines(p, s))
        return false;
    memcpy(lines.text + lines.used, number, prefix);
    memcpy(lines.text + lines.used + prefix, line, bytes);
    lines.used += prefix + bytes + 1;
    lines.text[lines.used - 1] = '\n';
    return true;
}

static void stream_end(process *p, stream *s)
{
    if (s->fd < 0)
        return;
    if (s->used != 0 && pass_line(p, s, s->line, s->used))
        (void)put_lines(p, s);
    close(s->fd);
    if (s->to > 2)
        close(s->to);
    s->fd = -1;
}

/* What has come is passed on up to its last newline. If nobody reads it, its own next line will end
   the process, as it would without dprun. */
static void stream_read(process *p, stream *s)
{
    ssize_t got = read(s->fd, s->line + s->used, sizeof s->line - s->used);
    if (got < 0 && (errno == EINTR || (errno == EAGAIN && !p->ended)))
        return;
    s->used += got > 0 ? (size_t)got : 0;
    s->late += got > 0 && p->ended ? (size_t)got : 0;
    char *at = s->line, *end = s->line + s->used, *newline;
    bool reads = true;
    for (; reads && (newline = memchr(at, '\n', (size_t)(end - at))) != NULL; at = newline + 1)
        reads = pass_line(p, s, at, (size_t)(newline - at));
    if (reads && end - at > LINE)
        reads = pass_line(p, s, at, LINE), at += LINE;
    reads = reads && put_lines(p, s);
    s->used = reads ? (size_t)(end - at) : 0;
    memmove(s->line, at, s->used);
    if (got <= 0 || s->late > DRAIN || !reads)
        stream_end(p, s);
}

/* ---- processes ------------------------------------------------------------------------------- */

#if defined(__linux__)
static void die_with(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
}

static void adopt_orphans(void) /* else they stay in their group until somebody waits for them */
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/* The i-th of `count` shares of the cores that dprun has; one core, if there are fewer. */
static bool bind_to_share(int i, int count)
{
    cpu_set_t have, own;
    int cores, seen = 0;
    if (sched_getaffinity(0, sizeof have, &have) != 0)
        return false;
    cores = CPU_COUNT(&have);
    int first = cores < count ? i % cores : (int)((int64_t)i * cores / count);
    int end = cores < count ? first + 1 : (int)((int64_t)(i + 1) * cores / count);
    CPU_ZERO(&own);
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET((size_t)core, &have))
            continue;
        if (seen >= first && seen < end)
            CPU_SET((size_t)core, &own);
        seen++;
    }
    return sched_setaffinity(0, sizeof own, &own) == 0;
}
#else
static void die_with(pid_t parent)
{
    (void)parent;
}

static void adopt_orphans(void)
{
}

static bool bind_to_share(int i, int count)
{
    (void)i;
    (void)count;
    errno = ENOSYS;
    return false;
}
#endif

static bool draw(char *hex, size_t bytes)
{
    unsigned char drawn[16];
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    bool whole = fd >= 0 && read(fd, drawn, bytes) == (ssize_t)bytes;
    for (size_t i = 0; i < bytes && whole; i++)
        snprintf(hex + 2 * i, 3, "%02x", drawn[i]);
    if (fd >= 0)
        close(fd);
    return whole;
}

/* Where they meet, and what only they know: new each time, so nobody of the last time comes. */
static bool set_meeting(void)
{
    static bool users;
    char secret[33], place[20] = "@";
    users = users || (job.attempt == 0 && getenv("DP_SECRET") != NULL);
    if (asked.addr != NULL)
        return setenv("DP_ADDR", asked.addr, 1) == 0;
    if (!draw(secret, 16) || !draw(place + 1, 8))
        return false;
    return setenv("DP_ADDR", place, 1) == 0 && (users || setenv("DP_SECRET", secret, 1) == 0);
}

static void set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

/* Who joins has none of the places that there were at first. */
static int place_of(const process *p)
{
    return number_of(p) + (asked.join ? asked.nodes * asked.count : 0);
}

static _Noreturn void become(process *p, const int fd[3], int report, const sigset_t *mask)
{
    int own = (int)(p - job.all);
    setpgid(0, 0);
    die_with(job.self);
    unsetenv("DP_REJOIN"); /* of dprun itself, if that is part of another job, */
    if (getenv("DP_PROCESS") != NULL)
        unsetenv("DP_PROCESS_LIMIT"); /* which has another limit */
    setenv("DP_LAUNCH", "dp", 1);
    set_number("DP_PROCESS", place_of(p));
    set_number("DP_PROCESS_COUNT", asked.nodes * asked.count);
    set_number("DP_LOCAL_PROCESS", own);
    set_number("DP_LOCAL_PROCESS_COUNT", asked.count);
    set_number("DP_RESTART", job.attempt);
    if (asked.grace >= 0)
        set_number("DP_GRACE", asked.grace);
    if (p->again > 0 || asked.join)
        set_number("DP_REJOIN", 1);
    if (asked.most > 0)
        set_number("DP_PROCESS_LIMIT", asked.most);
    for (int k = 0; k < 3; k++)
        dup2(fd[k], k);
    leave_signals(mask);
    if (asked.bind == NULL || bind_to_share(own, asked.count))
        execvp(asked.program[0], asked.program);
    int error = errno;
    ssize_t told = write(report, &error, sizeof error);
    (void)told;
    _exit(127);
}

/* Who cannot run the program says why; of who can, the pipe is closed. */
static int fork_process(process *p, const int fd[3])
{
    sigset_t every, mask;
    int error = 0, report[2];
    ssize_t got;
    if (!open_pipe(report))
        return errno;
    sigfillset(&every);
    sigprocmask(SIG_SETMASK, &every, &mask); /* what comes now is for the program */
    pid_t pid = fork();
    if (pid == 0)
        become(p, fd, report[1], &mask);
    if (pid < 0) {
        error = errno;
    } else {
        setpgid(pid, pid); /* one of the two does it first */
        p->pid = pid;
        p->group = true;
        job.running++;
    }
    sigprocmask(SIG_SETMASK, &mask, NULL);
    close(report[1]);
    do
        got = read(report[0], &error, sizeof error);
    while (got < 0 && errno == EINTR);
    close(report[0]);
    return error;
}

static void end_typist(void)
{
    if (job.typist > 0)
        kill(job.typist, SIGKILL);
    job.typist = 0;
}

/* The group of process 0 is not the terminal's, so it may not read there: this process does it, and
   waits where dprun itself is in the background. That of a process 0 before would take a line. */
static int open_typist(void)
{
    int ends[2];
    end_typist();
    if (!open_pipe(ends))
        return -1;
    job.typist = fork();
    if (job.typist == 0) {
        char typed[1024];
        ssize_t got, done = 0;
        die_with(job.self);
        close(ends[0]);
        signal(SIGTTIN, SIG_IGN);
        signal(SIGTSTP, SIG_DFL);
        signal(SIGINT, SIG_IGN);
        while ((got = read(0, typed, sizeof typed)) != 0 && done >= 0)
            if (got > 0)
                done = write(ends[1], typed, (size_t)got);
            else
                poll(NULL, 0, LOOK_MS);
        _exit(0);
    }
    close(ends[1]);
    return ends[0];
}

static int open_input(const process *p)
{
    if (p != job.all)
        return open("/dev/null", O_RDONLY);
    return isatty(0) ? open_typist() : dup(0);
}

/* The end of a pipe for the process; dprun keeps the other one. */
static int open_output(process *p, stream *s, int usual)
{
    static char path[PATH_MAX];
    int ends[2], flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
    if (job.attempt == 0 && p->again == 0 && s == p->out)
        flags |= O_TRUNC;
    s->to = usual;
    if (asked.output != NULL) {
        snprintf(path, sizeof path, "%s/%d.log", asked.output, number_of(p));
        s->to = open(path, flags, 0666);
        if (s->to < 0) {
            int error = errno;
            say("%s: %s", path, strerror(error));
            errno = error;
        }
    }
    if (s->to < 0 || !open_pipe(ends))
        return -1;
    s->tty = isatty(s->to) != 0;
    s->fd = ends[0];
    fcntl(s->fd, F_SETFL, O_NONBLOCK);
    return ends[1];
}

static void start_process(process *p)
{
    int fd[3] = {-1, -1, -1}, error = 0;
    for (int k = 0; k < 3 && error == 0; k++) {
        fd[k] = k == 0 ? open_input(p) : open_output(p, &p->out[k - 1], k);
        error = fd[k] < 0 ? errno : 0;
        fcntl(fd[k], F_SETFD, FD_CLOEXEC);
    }
    if (error == 0)
        error = fork_process(p, fd);
    for (int k = 0; k < 3; k++)
        if (fd[k] >= 0)
            close(fd[k]);
    if (error == 0)
        return;
    job.broken = true;
    job.code = p->pid == 0 ? 1 : error == ENOENT ? 127 : 126;
    say("%s: %s", p->pid == 0 ? "a process cannot be started" : asked.program[0], strerror(error));
}

/* ---- the job --------------------------------------------------------------------------------- */

static bool some_left(void) /* of processes, of what they have started and written */
{
    bool left = job.running > 0;
    for (const process *p = job.all; p < job.all + asked.count; p++)
        left = left || p->out[0].fd >= 0 || p->out[1].fd >= 0 || p->again_ms != 0 ||
               (p->group && job.ending && !job.killed);
    return left;
}

/* Only what is open is watched: poll takes no more than a process may have open. */
static void wait_and_pass(void)
{
    nfds_t count = 1;
    int timeout = patience();
    job.watched[0] = (struct pollfd){.fd = wake[0], .events = POLLIN};
    for (int i = 0; i < 2 * asked.count; i++) {
        const process *p = &job.all[i / 2];
        if (p->out[i % 2].fd < 0)
            continue;
        job.watched[count++] = (struct pollfd){.fd = p->out[i % 2].fd, .events = POLLIN};
        if (p->ended)
            timeout = 0; /* what is there is all, whoever else has the pipe */
    }
    bool some = poll(job.watched, count, timeout) >= 0;
    attend();
    count = 1;
    for (int i = 0; i < 2 * asked.count && some; i++) {
        process *p = &job.all[i / 2];
        stream *s = &p->out[i % 2];
        if (s->fd >= 0 && (job.watched[count++].revents != 0 || p->ended))
            stream_read(p, s);
    }
}

static void run_job(void)
{
    job.running = job.lost = job.well = 0, job.first = -1, job.first_ms = 0, job.code = 0;
    job.ending = job.killed = job.broken = false;
    memset(job.all, 0, (size_t)asked.count * sizeof *job.all);
    for (process *p = job.all; p < job.all + asked.count; p++)
        p->out[0].fd = p->out[1].fd = -1;
    if (!set_meeting()) {
        say("/dev/urandom gives no secret");
        job.broken = true, job.code = 1;
    }
    for (process *p = job.all; p < job.all + asked.count && !job.ending; p++) {
        if (!job.broken)
            start_process(p);
        if (job.broken)
            end_job(SIGTERM);
    }
    while (some_left())
        wait_and_pass();
    end_typist();
}

/* At the end, where it is easily found: which one failed, and what it said. */
static void conclude(void)
{
    if (job.first < 0 || job.broken)
        return;
    const process *p = culprit();
    if (!failed(p)) {
        say("process %d has left, without dp_close, while others needed it", number_of(p));
        p = &job.all[job.first];
    }
    job.code = WIFSIGNALED(p->status) ? 128 + WTERMSIG(p->status) : WEXITSTATUS(p->status);
    say_how(p);
}

/* ---- what is asked --------------------------------------------------------------------------- */

SAYS static _Noreturn void wrong(const char *format, ...)
{
    va_list args;
    fputs("dprun: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputs("; dprun -h says what there is\n", stderr);
    exit(2);
}

static const struct option {
    const char *name;
    int least, most, *number;
    const char **text;
} options[] = {
    {"-n", 1, COUNT_MAX, &asked.count, NULL},
    {"--nodes", 1, TOTAL_MAX, &asked.nodes, NULL},
    {"--node", 0, TOTAL_MAX - 1, &asked.node, NULL},
    {"--restarts", 0, SECONDS_MAX, &asked.restarts, NULL},
    {"--spare", 0, TOTAL_MAX, &asked.spare, NULL},
    {"--respawn", 0, SECONDS_MAX, &asked.respawn, NULL},
    {"--grace", 0, SECONDS_MAX, &asked.grace, NULL},
    {"--addr", 0, 0, NULL, &asked.addr},
    {"--output", 0, 0, NULL, &asked.output},
    {"--bind", 0, 0, NULL, &asked.bind},
    {"--elastic", 0, 0, NULL, &asked.elastic},
};

static int whole_number(const char *what, const char *text, int least, int most)
{
    char *end = NULL;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || number < least ||
        number > most)
        wrong("%s is '%s', not a whole number from %d to %d", what, text, least, most);
    return (int)number;
}

/* "--name value" or "--name=value"; returns how many arguments that were. */
static int read_option(char **at)
{
    if (strcmp(at[0], "--join") == 0) {
        asked.join = true;
        return 1;
    }
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        const struct option *o = &options[i];
        size_t bytes = strlen(o->name);
        if (strncmp(at[0], o->name, bytes) != 0 || (at[0][bytes] != '\0' && at[0][bytes] != '='))
            continue;
        const char *value = at[0][bytes] == '=' ? at[0] + bytes + 1 : at[1];
        if (value == NULL || value[0] == '\0')
            wrong("%s needs a value", o->name);
        if (o->text != NULL)
            *o->text = value;
        else
            *o->number = whole_number(o->name, value, o->least, o->most);
        return at[0][bytes] == '=' ? 1 : 2;
    }
    wrong("there is no option %s", at[0]);
}

static void check_elastic(void)
{
    char least[16];
    const char *colon = strchr(asked.elastic, ':');
    size_t bytes = colon != NULL ? (size_t)(colon - asked.elastic) : sizeof least;
    int here = asked.join ? 1 : asked.nodes * asked.count;
    if (bytes >= sizeof least)
        wrong("--elastic is '%s', not MIN:MAX", asked.elastic);
    memcpy(least, asked.elastic, bytes);
    least[bytes] = '\0';
    asked.least = whole_number("MIN of --elastic", least, 1, asked.count);
    asked.most = whole_number("MAX of --elastic", colon + 1, here, TOTAL_MAX);
    if (asked.spare > 0 || asked.respawn > 0)
        wrong("--elastic says more than --spare and --respawn: give it alone");
}

static void check_options(void)
{
    const char *colon = asked.addr != NULL ? strrchr(asked.addr, ':') : NULL;
    if (asked.program[0] == NULL)
        wrong("no program is named");
    if (asked.count > TOTAL_MAX / asked.nodes)
        wrong("%d machines with %d processes each are more than %d", asked.nodes, asked.count,
              TOTAL_MAX);
    if (asked.nodes > 1 && (asked.node < 0 || asked.addr == NULL))
        wrong("--nodes %d needs --node and --addr", asked.nodes);
    if (asked.nodes == 1 && asked.addr != NULL && asked.elastic == NULL && !asked.join)
        wrong("--addr is for --nodes 2 and more, --elastic and --join");
    if (asked.join && asked.addr == NULL)
        wrong("--join needs the --addr of the job");
    if (asked.node >= asked.nodes)
        wrong("--node is %d, and machines count from 0 to %d", asked.node, asked.nodes - 1);
    if (asked.addr != NULL && (colon == NULL || colon == asked.addr))
        wrong("--addr is '%s', not host:port", asked.addr);
    if (asked.addr != NULL)
        whole_number("the port of --addr", colon + 1, 1, 65535);
    if (asked.bind != NULL && strcmp(asked.bind, "cores") != 0)
        wrong("--bind is '%s', not cores", asked.bind);
    if (asked.bind != NULL && !bind_to_share(0, 1))
        wrong("--bind: this system binds no processes to cores");
    if (asked.output != NULL && strlen(asked.output) > PATH_MAX - 32)
        wrong("the path of --output is too long");
    if (asked.node < 0)
        asked.node = 0;
    if (asked.elastic != NULL)
        check_elastic();
}

static void read_options(char **at)
{
    while (at[0] != NULL && at[0][0] == '-' && strcmp(at[0], "--") != 0) {
        if (strcmp(at[0], "-h") == 0 || strcmp(at[0], "--help") == 0) {
            fputs(usage, stdout);
            exit(0);
        }
        at += read_option(at);
    }
    asked.program = at + (at[0] != NULL && strcmp(at[0], "--") == 0);
    check_options();
}

static bool prepare(void)
{
    int fd = 0;
    while (fd >= 0 && fd <= 2) /* so that no pipe is taken for one of them */
        fd = open("/dev/null", O_RDWR);
    close(fd);
    job.self = getpid();
    job.all = calloc((size_t)asked.count, sizeof *job.all);
    job.watched = calloc(1 + 2 * (size_t)asked.count, sizeof *job.watched);
    adopt_orphans();
    return job.all != NULL && job.watched != NULL && take_signals();
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--status") == 0)
        return show_status(argv + 2);
    read_options(argv + (argc > 0));
    if (!prepare()) {
        perror("dprun");
        return 1;
    }
    if (asked.output != NULL && mkdir(asked.output, 0777) != 0 && errno != EEXIST) {
        fprintf(stderr, "dprun: %s: %s\n", asked.output, strerror(errno));
        return 1;
    }
    for (bool again = true; again; job.attempt += again) {
        run_job();
        conclude();
        again = job.code != 0 && !job.broken && !job.told && job.attempt < asked.restarts;
        if (again)
            say("starting again, %d of %d", job.attempt + 1, asked.restarts);
        again = again && !job.told; /* meanwhile */
    }
    return job.code == 0 && job.unwritten ? 1 : job.code;
}
