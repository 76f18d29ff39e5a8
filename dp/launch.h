/* dp/launch.h - v0.1.0 - how the processes of a job find each other - MIT licence

   A room of dp.h, which includes it. A launcher says in the environment which process this is and
   how many there are; process 0 listens, the others come to it, and all end up as a tree of
   connections that stays open as long as the context. dp_spawn is the launcher for one machine.

   CONTENTS (search for the tag)
     >>launchers  what the environment says
     >>wire       bytes on a connection, and who may speak
     >>tree       lasting connections: all_gather, failures, closing
     >>door       who comes in, and who does not
     >>address    where processes listen, and that there is one process 0
     >>knocking   how a process finds another one
     >>meeting    from the environment to a tree
     >>world      what a context knows of its other processes
     >>spawn      processes without a launcher
*/

#ifndef DP__ROOMS
#error "dp/launch.h is a part of dp.h: include dp.h"
#else

/* ==== >>launchers ==============================================================================
   One table of what launchers set; the first of them whose variables are there decides. An
   incomplete set is an error: something was lost, and every process would train by itself and
   overwrite what the others write.                                                              */

enum {
    DP__PROCESSES_MAX = 1 << 20,
    DP__PORT_MAX = 65535,
    DP__PORTS = 8, /* from the first on, where another program may have taken the first */
    DP__HOST_BYTES = 256,
    DP__PLACE_BYTES = 64,
    DP__WHERE_BYTES = 80
};

typedef struct dp__launcher {
    const char *name;                /* in DP_LAUNCH and dp_info */
    const char *process, *count;     /* variables: which of how many this is */
    const char *local, *local_count; /* among those of its machine; NULL: it does not say */
    const char *host, *port;         /* of process 0, if the launcher says that */
    const char *job[2];              /* what distinguishes this job from all others */
    const char *again;               /* and this run of it from earlier ones */
    const char *channel; /* a descriptor that the launcher left to each of its processes */
    const char *step, *pseudo_step[2]; /* if it is not set, or one of these, nothing was started */
} dp__launcher;

/* Slurm sets its variables for salloc and sbatch too, where one shell runs: only what srun starts
   has a step. The steps in which those shells themselves run have numbers of their own. */
static const dp__launcher dp__launchers[] = {
    {.name = "dp",
     .process = "DP_PROCESS",
     .count = "DP_PROCESS_COUNT",
     .local = "DP_LOCAL_PROCESS",
     .local_count = "DP_LOCAL_PROCESS_COUNT"},
    {.name = "torchrun",
     .process = "RANK",
     .count = "WORLD_SIZE",
     .local = "LOCAL_RANK",
     .local_count = "LOCAL_WORLD_SIZE",
     .host = "MASTER_ADDR",
     .port = "MASTER_PORT",
     .job = {"TORCHELASTIC_RUN_ID"},
     .again = "TORCHELASTIC_RESTART_COUNT"},
    {.name = "openmpi",
     .process = "OMPI_COMM_WORLD_RANK",
     .count = "OMPI_COMM_WORLD_SIZE",
     .local = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_count = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.name = "mpich",
     .process = "PMI_RANK",
     .count = "PMI_SIZE",
     .local = "MPI_LOCALRANKID",
     .local_count = "MPI_LOCALNRANKS",
     .job = {"PMI_JOBID"},
     .channel = "PMI_FD"},
    {.name = "slurm",
     .process = "SLURM_PROCID",
     .count = "SLURM_NTASKS",
     .local = "SLURM_LOCALID",
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     .again = "SLURM_RESTART_COUNT",
     .step = "SLURM_STEP_ID",
     .pseudo_step = {"4294967290", "4294967291"}},
};

enum { DP__LAUNCHERS = sizeof dp__launchers / sizeof dp__launchers[0] };

typedef struct dp__key { /* what only processes of one job know */
    uint64_t low, high;
} dp__key;

typedef struct dp__launch { /* what was found */
    const char *name;
    int process, process_count;
    int local, local_count;    /* local_count 0: the launcher does not say */
    char host[DP__HOST_BYTES]; /* of process 0; "": all meet at a place inside this machine */
    int port, port_count;
    char where[DP__WHERE_BYTES]; /* the same in words */
    char place[DP__PLACE_BYTES]; /* a name inside this machine */
    dp__key key;
    bool numbered; /* the launcher has told this job from all others */
    bool secret;   /* or the user has */
} dp__launch;

static uint64_t dp__rotated(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static void dp__sip_rounds(uint64_t v[4], int count)
{
    for (int i = 0; i < count; i++) {
        v[0] += v[1], v[2] += v[3];
        v[1] = dp__rotated(v[1], 13) ^ v[0], v[3] = dp__rotated(v[3], 16) ^ v[2];
        v[0] = dp__rotated(v[0], 32);
        v[2] += v[1], v[0] += v[3];
        v[1] = dp__rotated(v[1], 17) ^ v[2], v[3] = dp__rotated(v[3], 21) ^ v[0];
        v[2] = dp__rotated(v[2], 32);
    }
}

/* SipHash-2-4: nobody can make the number without the key, whatever they have overheard. */
static uint64_t dp__sip(dp__key key, const void *data, size_t bytes)
{
    const unsigned char *in = data;
    uint64_t v[4] = {key.low ^ 0x736f6d6570736575u, key.high ^ 0x646f72616e646f6du,
                     key.low ^ 0x6c7967656e657261u, key.high ^ 0x7465646279746573u};
    for (size_t at = 0; at <= bytes; at += 8) {
        bool last = bytes - at < 8;
        uint64_t word = last ? (uint64_t)bytes << 56 : 0;
        for (size_t i = 0; i < (last ? bytes - at : 8); i++)
            word |= (uint64_t)in[at + i] << 8 * i;
        v[3] ^= word;
        dp__sip_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    dp__sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* The key of those who know the old one and this text. */
static dp__key dp__key_with(dp__key key, const char *text)
{
    size_t bytes = text != NULL ? strlen(text) : 0;
    dp__key turned = {~key.high, key.low};
    return (dp__key){dp__sip(key, text, bytes), dp__sip(turned, text, bytes)};
}

static dp__key dp__key_of_run(dp__key key, uint64_t run)
{
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)run);
    return dp__key_with(key, text);
}

static dp_status dp__env_number(const char *variable, int least, int most, int *out)
{
    const char *set = dp__os_env(variable), *text = set != NULL ? set : "", *at = text;
    int64_t number = 0;
    for (; *at >= '0' && *at <= '9' && number <= most; at++)
        number = number * 10 + (*at - '0');
    if (at == text || *at != '\0' || number < least || number > most)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is '%s', not a whole number from %d to %d",
                        variable, text, least, most);
    *out = (int)number;
    return DP_OK;
}

static dp_status dp__half_a_set(const char *there, const char *missing)
{
    return dp_error(DP_ERR_INVALID,
                    "dp_open: %s is '%s' and %s is not set: a launcher sets both. If there is "
                    "none, DP_LAUNCH=none says so",
                    there, dp__os_env(there), missing);
}

/* Two variables, which are set both or not at all: which of how many. */
DP__COLD static dp_status dp__env_place(const char *place, const char *count, int *out_place,
                                        int *out_count)
{
    bool has_place = dp__os_env(place) != NULL, has_count = dp__os_env(count) != NULL;
    if (!has_place && !has_count)
        return DP_OK;
    if (has_place != has_count)
        return dp__half_a_set(has_place ? place : count, has_place ? count : place);
    DP_TRY(dp__env_number(count, 1, DP__PROCESSES_MAX, out_count));
    DP_TRY(dp__env_number(place, 0, DP__PROCESSES_MAX, out_place));
    if (*out_place >= *out_count)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: %s is %d and %s is %d: they contradict each other, as the first "
                        "one counts from 0",
                        place, *out_place, count, *out_count);
    return DP_OK;
}

static bool dp__launcher_ran(const dp__launcher *launcher)
{
    const char *step = launcher->step != NULL ? dp__os_env(launcher->step) : NULL;
    if (launcher->step == NULL)
        return dp__os_env(launcher->process) != NULL || dp__os_env(launcher->count) != NULL ||
               dp__os_env(launcher->local) != NULL || dp__os_env(launcher->local_count) != NULL;
    return step != NULL && strcmp(step, launcher->pseudo_step[0]) != 0 &&
           strcmp(step, launcher->pseudo_step[1]) != 0;
}

/* NULL when no launcher started this process, or DP_LAUNCH says so. */
DP__COLD static dp_status dp__launcher_find(const dp__launcher **out)
{
    const char *only = dp__os_env("DP_LAUNCH");
    *out = NULL;
    if (only != NULL && strcmp(only, "none") == 0)
        return DP_OK;
    for (int i = 0; i < DP__LAUNCHERS && *out == NULL; i++) {
        const dp__launcher *launcher = &dp__launchers[i];
        if (only != NULL ? strcmp(only, launcher->name) == 0 : dp__launcher_ran(launcher))
            *out = launcher;
    }
    if (only != NULL && *out == NULL)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_LAUNCH is '%s', not none, dp, torchrun, openmpi, mpich or "
                        "slurm",
                        only);
    return DP_OK;
}

/* "HOST:PORT", "[HOST]:PORT" where the host has colons itself, or "@NAME" for a place inside this
   machine. */
static dp_status dp__launch_address(dp__launch *launch, const char *text)
{
    const char *colon = strrchr(text, ':'), *at = colon != NULL ? colon + 1 : "";
    bool bracket = colon != NULL && text[0] == '[' && colon[-1] == ']';
    size_t bytes = colon != NULL ? (size_t)(colon - text) - (bracket ? 2 : 0) : 0;
    int port = 0;
    snprintf(launch->where, sizeof launch->where, "at %s", text);
    if (text[0] == '@' && text[1] != '\0') {
        launch->key = dp__key_with(launch->key, text);
        return DP_OK;
    }
    for (; *at >= '0' && *at <= '9' && port <= DP__PORT_MAX; at++)
        port = port * 10 + (*at - '0');
    if (bytes == 0 || bytes >= DP__HOST_BYTES || *at != '\0' || port < 1 || port > DP__PORT_MAX)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_ADDR is '%s', not host:port with a port from 1 to %d, nor "
                        "@name",
                        text, DP__PORT_MAX);
    memcpy(launch->host, text + bracket, bytes);
    launch->host[bytes] = '\0';
    launch->port = port;
    return DP_OK;
}

/* torchrun's own store may use its port: our first one is the next. */
static dp_status dp__launch_master(dp__launch *launch, const dp__launcher *launcher)
{
    const char *host = dp__os_env(launcher->host);
    bool has_port = dp__os_env(launcher->port) != NULL;
    if (host == NULL || !has_port)
        return dp__half_a_set(launcher->count, host == NULL ? launcher->host : launcher->port);
    if (strlen(host) >= DP__HOST_BYTES)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is longer than the name of any host: '%.64s'",
                        launcher->host, host);
    strcpy(launch->host, host);
    DP_TRY(dp__env_number(launcher->port, 1, DP__PORT_MAX - 1, &launch->port));
    launch->port++;
    snprintf(launch->where, sizeof launch->where, "at %.60s:%d", host, launch->port);
    return DP_OK;
}

/* The first name of a list like "node[01-03,7],other". */
static void dp__first_host(const char *list, char *out, size_t room)
{
    size_t bytes = 0;
    bool skips = false, inside = false;
    for (; *list != '\0' && (inside || *list != ',') && bytes + 1 < room; list++) {
        if (*list == '[' || *list == ']')
            inside = *list == '[', skips = false;
        else if (inside && (*list == '-' || *list == ','))
            skips = true;
        else if (!skips)
            out[bytes++] = *list;
    }
    out[bytes] = '\0';
}

/* The launcher itself is what its processes have in common: it has made the connections that it
   left to them, even if there is a shell in between; else it is taken to be the parent. */
static uint64_t dp__launcher_id(const dp__launcher *launcher)
{
    int fd = -1;
    dp__os_owner maker = {0, 0};
    if (launcher->channel != NULL && dp__os_env(launcher->channel) != NULL &&
        dp__env_number(launcher->channel, 0, INT_MAX - 1, &fd) == DP_OK)
        (void)dp__os_owner_of(fd, &maker);
    return maker.process != 0 ? maker.process : dp__os_parent();
}

/* When no address is given: the machines of a Slurm step have names; else all processes have to be
   on one machine, and the job's key is the name of the place where they meet. */
static dp_status dp__launch_place(dp__launch *launch, const dp__launcher *launcher)
{
    const char *nodes = dp__os_env("SLURM_STEP_NUM_NODES"),
               *list = dp__os_env("SLURM_STEP_NODELIST");
    bool far = launch->local_count != 0 && launch->local_count < launch->process_count;
    strcpy(launch->where, "on this machine");
    if (launcher->step != NULL && list != NULL && (nodes == NULL || strcmp(nodes, "1") != 0)) {
        dp__first_host(list, launch->host, sizeof launch->host);
        launch->port = 20000 + (int)(dp__sip(launch->key, "port", 4) % 10000);
        snprintf(launch->where, sizeof launch->where, "at %.60s:%d", launch->host, launch->port);
        return DP_OK;
    }
    if (far)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_open: %s says that %d of %d processes are on this machine, and not "
                        "where process 0 is: set DP_ADDR=host:port, the host where process 0 runs "
                        "and a port that is free there",
                        launcher->name, launch->local_count, launch->process_count);
    if (!launch->numbered)
        launch->key = dp__key_of_run(launch->key, dp__launcher_id(launcher));
    launch->numbered = true;
    return DP_OK;
}

/* Names inside a machine are each user's own; who meets over a network may be another user. */
static void dp__launch_name(dp__launch *launch)
{
    char user[24] = "";
    bool far = launch->host[0] != '\0';
    launch->port_count = DP__PORT_MAX - launch->port + 1;
    if (launch->port_count > DP__PORTS)
        launch->port_count = DP__PORTS;
    if (far) /* ranges of ports overlap */
        launch->key = dp__key_of_run(launch->key, (uint64_t)launch->port);
    if (!far)
        snprintf(user, sizeof user, "%llu-", (unsigned long long)dp__os_user());
    snprintf(launch->place, sizeof launch->place, "dp-%s%016llx", user,
             (unsigned long long)dp__sip(launch->key, "place", 5));
}

DP__COLD static dp_status dp__launch_where(dp__launch *launch, const dp__launcher *launcher)
{
    const char *address = dp__os_env("DP_ADDR");
    if (address != NULL)
        DP_TRY(dp__launch_address(launch, address));
    else if (launcher->host != NULL)
        DP_TRY(dp__launch_master(launch, launcher));
    else if (launcher == &dp__launchers[0])
        return dp__half_a_set(launcher->count, "DP_ADDR");
    else
        DP_TRY(dp__launch_place(launch, launcher));
    dp__launch_name(launch);
    return DP_OK;
}

/* Which process of how many this is. */
DP__COLD static dp_status dp__launch_self(const dp__launcher *launcher, dp__launch *out)
{
    out->name = launcher->name;
    out->process_count = 0;
    DP_TRY(dp__env_place(launcher->process, launcher->count, &out->process, &out->process_count));
    if (out->process_count == 0)
        return dp_error(DP_ERR_INVALID, "dp_open: %s and %s are not set", launcher->process,
                        launcher->count);
    if (launcher->local_count != NULL)
        DP_TRY(
            dp__env_place(launcher->local, launcher->local_count, &out->local, &out->local_count));
    else if (dp__os_env(launcher->local) != NULL)
        DP_TRY(dp__env_number(launcher->local, 0, out->process_count - 1, &out->local));
    if (out->local_count > out->process_count)
        return dp_error(
            DP_ERR_INVALID, "dp_open: %s is %d and %s is %d: more on this machine than in all",
            launcher->local_count, out->local_count, launcher->count, out->process_count);
    return DP_OK;
}

/* The same, and of which job. A world of one needs no address. */
DP__COLD static dp_status dp__launch_read(const char *job, dp__launch *out)
{
    const dp__launcher *launcher;
    *out = (dp__launch){.name = "none", .process_count = 1};
    DP_TRY(dp__launcher_find(&launcher));
    if (launcher == NULL)
        return DP_OK;
    DP_TRY(dp__launch_self(launcher, out));
    if (out->process_count == 1)
        return DP_OK;
    out->secret = dp__os_env("DP_SECRET") != NULL;
    out->key = dp__key_with(dp__key_with(out->key, dp__os_env("DP_SECRET")), launcher->name);
    for (int i = 0; i < 2 && launcher->job[i] != NULL; i++) {
        const char *number = dp__os_env(launcher->job[i]);
        out->key = dp__key_with(out->key, number);
        out->numbered = out->numbered || (number != NULL && strcmp(number, "none") != 0);
    }
    if (launcher->again != NULL)
        out->key = dp__key_with(out->key, dp__os_env(launcher->again));
    out->key = dp__key_with(out->key, job);
    return dp__launch_where(out, launcher);
}

/* ==== >>wire ===================================================================================
   Bytes on a connection; every wait has an end. The caller sends a nonce, the listener answers with
   one of its own and a proof that it has the job's key, and the caller proves the same. So neither
   speaks to a stranger, which includes processes of another job or run, and nothing overheard can
   be replayed. Before that nothing is believed.                                                 */

enum {
    DP__KNOCK_MAGIC = 0x31706b64,
    DP__CHALLENGE_MAGIC = 0x31706364,
    DP__NOTE_MAGIC = 0x31706e64,
    DP__GRACE_MS = 1000, /* beyond the time-out: to be told why, or for an answer */
    DP__STEP_MS = 300    /* by which who stands deeper in the tree waits longer: its parent may have
                         something to tell */
};

typedef struct dp__knock { /* a process that comes in */
    uint32_t magic;
    int32_t version;
    uint64_t nonce;
    int32_t process, process_count;
    uint64_t listens; /* where those behind it connect: a port, or a number in a name */
    uint32_t patience_ms, reserved;
} dp__knock;

typedef struct dp__challenge {
    uint32_t magic;
    int32_t version;
    uint64_t nonce, proof;
} dp__challenge;

typedef struct dp__oath { /* what a proof is made from */
    dp__knock knock;
    uint64_t nonce, side;
} dp__oath;

typedef enum dp__kind {
    DP__WELCOME, /* dp__welcome: all are here */
    DP__READY,   /* connected to all neighbours */
    DP__GO,      /* all are ready */
    DP__FAILED,  /* a sentence: the job has failed */
    DP__GATHER,  /* up the tree, of a process and all behind it */
    DP__SPREAD,  /* down the tree, of all */
    DP__BYE,     /* closed in good order */
    DP__ASK,     /* are you there? */
    DP__HERE,    /* yes, and waiting too */
    DP__KINDS
} dp__kind;

typedef struct dp__note { /* precedes everything that travels between processes of a job */
    uint32_t magic, kind;
    int32_t status, process; /* what failed, and where; of a question: the call, and who asks */
    uint64_t bytes;          /* that follow */
} dp__note;

typedef struct dp__welcome {
    uint64_t run; /* of this meeting: mixed into the key, so that an earlier one is a stranger */
    uint64_t listens; /* the parent's */
    uint32_t patience_ms, reserved;
    char host[DP__PLACE_BYTES]; /* "": where process 0 is */
} dp__welcome;

_Static_assert(sizeof(dp__knock) == 40 && sizeof(dp__challenge) == 24 && sizeof(dp__note) == 24 &&
                   sizeof(dp__oath) == 56 && sizeof(dp__welcome) == 88,
               "what travels has no gaps");

static uint64_t dp__after_ms(int64_t ms)
{
    return dp__os_now_ns() + (uint64_t)ms * 1000000u;
}

static int dp__ms_until(uint64_t when_ns)
{
    uint64_t now = dp__os_now_ns();
    uint64_t ms = now < when_ns ? (when_ns - now + 999999u) / 1000000u : 0;
    return ms < INT_MAX ? (int)ms : INT_MAX;
}

static uint64_t dp__proof(dp__key key, const dp__knock *knock, uint64_t nonce, bool of_caller)
{
    dp__oath oath = {.knock = *knock, .nonce = nonce, .side = of_caller};
    return dp__sip(key, &oath, sizeof oath);
}

/* TIMEOUT: not in time. REMOTE: the connection has ended. Neither leaves a sentence. */
static dp_status dp__wire_send(int fd, const void *data, size_t bytes, uint64_t until_ns)
{
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t sent = dp__os_send(fd, (const char *)data + done, bytes - done);
        if (sent < 0)
            return DP_ERR_REMOTE;
        done += (size_t)sent;
        dp__os_watch watch = {.fd = fd, .events = POLLOUT};
        if (sent == 0 && dp__ms_until(until_ns) == 0)
            return DP_ERR_TIMEOUT;
        if (sent == 0)
            dp__os_poll(&watch, 1, dp__ms_until(until_ns));
    }
    return DP_OK;
}

static dp_status dp__wire_receive(int fd, void *data, size_t bytes, uint64_t until_ns)
{
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t got = dp__os_receive(fd, (char *)data + done, bytes - done);
        if (got < 0)
            return DP_ERR_REMOTE;
        done += (size_t)got;
        dp__os_watch watch = {.fd = fd, .events = POLLIN};
        if (got == 0 && dp__ms_until(until_ns) == 0)
            return DP_ERR_TIMEOUT;
        if (got == 0)
            dp__os_poll(&watch, 1, dp__ms_until(until_ns));
    }
    return DP_OK;
}

static dp_status dp__note_send(int fd, const dp__note *note, const void *data, uint64_t until_ns)
{
    dp_status status = dp__wire_send(fd, note, sizeof *note, until_ns);
    return status == DP_OK ? dp__wire_send(fd, data, note->bytes, until_ns) : status;
}

/* Tell a process that it is over, and why; without a long wait if it does not listen. */
static void dp__note_failure(int fd, dp_status status, int process, const char *text)
{
    dp__note note = {DP__NOTE_MAGIC, DP__FAILED, (int32_t)status, process, strlen(text)};
    (void)dp__note_send(fd, &note, text, dp__after_ms(100));
}

/* Whether a note can be ours: no process of ours sends other sizes than these, and they must not
   decide how much memory is used. */
static bool dp__note_is_sound(const dp__note *note)
{
    if (note->magic != DP__NOTE_MAGIC || note->kind >= DP__KINDS)
        return false;
    bool of_call = note->kind == DP__GATHER || note->kind == DP__SPREAD;
    return note->kind == DP__WELCOME  ? note->bytes == sizeof(dp__welcome)
           : note->kind == DP__FAILED ? note->bytes < DP__TEXT_BYTES
                                      : of_call || note->bytes == 0;
}

/* Receive the sentence of a failure; returns its status, which is of the JOB class unless this
   process was not let in at all. */
static dp_status dp__failure_receive(int fd, const dp__note *note, uint64_t until_ns)
{
    char text[DP__TEXT_BYTES] = "";
    dp_status status = (dp_status)note->status;
    if (!dp__is_failure(status))
        status = DP_ERR_REMOTE;
    if (note->bytes == 0 || dp__wire_receive(fd, text, note->bytes, until_ns) != DP_OK)
        return dp_error(DP_ERR_REMOTE, "process %d failed, and could not say why",
                        (int)note->process);
    text[note->bytes] = '\0';
    return dp_error(status, "%s", text[0] != '\0' ? text : dp_status_text(status));
}

/* The same from a process of the same job, which then has failed here too. */
static dp_status dp__failure_shared(int fd, const dp__note *note)
{
    dp_status status = dp__failure_receive(fd, note, dp__after_ms(DP__GRACE_MS));
    return dp_status_class(status) == DP_CLASS_JOB ? status : DP_ERR_REMOTE;
}

/* ==== >>tree ===================================================================================
   The connections of a job while it lasts: a parent and at most log2 of the job children, so that
   what all say goes up and down in as many steps. A process that fails says so to its neighbours,
   they to theirs: all have the first sentence. One that closes says good-bye, and is missed only by
   who still needs it.

   When time is over, the process that is waited for may be waiting too, for one further away, and
   may have begun later. So it is asked whether it is there: who waits says yes and asks in its turn
   the one that it waits for. In the end somebody does not answer, and is named.                 */

/* Behind process p are those before p + its lowest bit, so that the part of each child is a run of
   processes. */
static int dp__parent(int process)
{
    return process & (process - 1);
}

static int dp__behind(int process, int process_count) /* it and all behind it */
{
    int span = process == 0 ? process_count : process & -process;
    return span < process_count - process ? span : process_count - process;
}

static int dp__child_count(int process, int process_count)
{
    int count = 0;
    for (int step = 1; step < dp__behind(process, process_count); step *= 2)
        count++;
    return count;
}

enum {
    DP__LINKS_MAX = 1 + 20,
    DP__TREE_LOOK_MS = 50 /* so often who waits looks whether this process has failed meanwhile */
};

typedef struct dp__link {
    int fd, process;
    bool left;  /* said good-bye */
    bool here;  /* has answered */
    size_t got; /* bytes of the note, which is complete when somebody has to wait for it */
    dp__note note;
} dp__link;

typedef struct dp__tree {
    int process, process_count, timeout_ms;
    int calls;         /* of all_gather, so far */
    uint64_t until_ns; /* then somebody's patience is over */
    int claim;         /* process 0: what no other one can have meanwhile; else -1 */
    dp__os_address claimed;
    int first_child, link_count; /* the parent's link is before, unless this is process 0 */
    dp__link links[DP__LINKS_MAX];
    dp__lock lock;    /* of all that follows, which any thread may change */
    bool busy;        /* a thread speaks or listens: the links are its own */
    bool untold;      /* and it is to tell the others of a failure before it goes */
    dp_status failed; /* once and for all, like what is said about it */
    int culprit;      /* a process */
    char text[DP__TEXT_BYTES];
} dp__tree;

/* The parent first, children in order. */
static void dp__tree_link(dp__tree *tree, int fd, int process)
{
    int place = tree->link_count++;
    for (; place > 0 && tree->links[place - 1].process > process; place--)
        tree->links[place] = tree->links[place - 1];
    tree->links[place] = (dp__link){.fd = fd, .process = process};
}

/* True: it is the first failure, which stays. */
static bool dp__tree_note(dp__tree *tree, dp_status status, int process, const char *text)
{
    dp__lock_enter(&tree->lock);
    bool first = tree->failed == DP_OK;
    if (first) {
        tree->culprit = process >= 0 && process < tree->process_count ? process : -1;
        snprintf(tree->text, sizeof tree->text, "%s", text);
        tree->failed = status;
    }
    dp__lock_leave(&tree->lock);
    return first;
}

/* Why the job has failed, if it has. */
static dp_status dp__tree_failure(dp__tree *tree)
{
    dp__lock_enter(&tree->lock);
    dp_status status = tree->failed;
    dp__lock_leave(&tree->lock);
    return status == DP_OK ? DP_OK : dp_error(status, "%s", tree->text);
}

/* All but the one that told it. */
DP__COLD static void dp__tree_pass_on(const dp__tree *tree, const dp__link *teller)
{
    for (int i = 0; i < tree->link_count; i++)
        if (&tree->links[i] != teller && !tree->links[i].left)
            dp__note_failure(tree->links[i].fd, tree->failed, tree->culprit, tree->text);
}

/* false: another thread has the links. `tells`: then it is to tell the others of the failure. */
static bool dp__tree_enter(dp__tree *tree, bool tells)
{
    dp__lock_enter(&tree->lock);
    bool free = !tree->busy;
    tree->busy = true;
    tree->untold = tree->untold || (tells && !free);
    dp__lock_leave(&tree->lock);
    return free;
}

static void dp__tree_leave(dp__tree *tree)
{
    for (bool untold = true; untold;) {
        dp__lock_enter(&tree->lock);
        untold = tree->untold;
        tree->untold = false;
        tree->busy = untold;
        dp__lock_leave(&tree->lock);
        if (untold)
            dp__tree_pass_on(tree, NULL);
    }
}

/* A failure of this process, from any thread. One that waits for others hears of it, too. */
static void dp__tree_tell(dp__tree *tree, dp_status status, int process, const char *text)
{
    if (!dp__tree_note(tree, status, process, text) || !dp__tree_enter(tree, true))
        return;
    dp__tree_pass_on(tree, NULL);
    dp__tree_leave(tree);
}

/* The same, in words that dp_last_error has. */
DP__COLD static dp_status dp__tree_fail(dp__tree *tree, const dp__link *teller, dp_status status,
                                        int process)
{
    if (dp__tree_note(tree, status, process, dp_last_error()))
        dp__tree_pass_on(tree, teller);
    return dp__tree_failure(tree);
}

/* There is no sense in waiting for this link: `why` is said about the process at the other end. */
static dp_status dp__tree_lost(dp__tree *tree, dp__link *link, dp_status status, const char *why)
{
    if (status == DP_ERR_TIMEOUT)
        dp_error(status, "process %d of %d %s within %.3g s", link->process, tree->process_count,
                 why, tree->timeout_ms * 1e-3);
    else
        dp_error(status, "process %d of %d %s", link->process, tree->process_count, why);
    link->left = link->left || status == DP_ERR_REMOTE;
    return dp__tree_fail(tree, NULL, status, link->process);
}

/* Nothing but a note, with the number of a call. Where there is no room for it, nobody listens. */
static void dp__tree_say(const dp__tree *tree, const dp__link *link, dp__kind kind, int call)
{
    dp__note note = {DP__NOTE_MAGIC, (uint32_t)kind, call, tree->process, 0};
    (void)dp__wire_send(link->fd, &note, sizeof note, dp__after_ms(100));
}

/* A note that is no part of a call. */
static void dp__tree_answer(dp__tree *tree, dp__link *link)
{
    link->got = 0;
    if (link->note.kind == DP__BYE) {
        link->left = true;
    } else if (link->note.status < tree->calls) {
        return; /* of a call that is over */
    } else if (link->note.kind == DP__HERE) {
        link->here = true;
    } else {
        tree->until_ns = 0;
        dp__tree_say(tree, link, DP__HERE, link->note.status);
    }
}

/* As much of a note as there is. What is no part of a call is dealt with here. */
static dp_status dp__tree_hear(dp__tree *tree, dp__link *link)
{
    dp__note *note = &link->note;
    ptrdiff_t got = dp__os_receive(link->fd, (char *)note + link->got, sizeof *note - link->got);
    if (got < 0)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has ended, or the connection to it");
    link->got += (size_t)got;
    if (link->got < sizeof *note)
        return DP_OK;
    if (!dp__note_is_sound(note))
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "sent what no process of a job sends");
    if (note->kind == DP__FAILED) {
        dp_status status = dp__failure_shared(link->fd, note);
        return dp__tree_fail(tree, link, status, note->process);
    }
    if (note->kind == DP__BYE || note->kind == DP__ASK || note->kind == DP__HERE)
        dp__tree_answer(tree, link);
    return DP_OK;
}

/* Links that may have something new, for dp__os_poll; returns how many. */
static int dp__tree_watch(const dp__tree *tree, dp__os_watch *watch)
{
    int count = 0;
    for (int i = 0; i < tree->link_count; i++)
        if (!tree->links[i].left && tree->links[i].got < sizeof(dp__note))
            watch[count++] = (dp__os_watch){.fd = tree->links[i].fd, .events = POLLIN};
    return count;
}

static dp_status dp__tree_hear_all(dp__tree *tree, const dp__os_watch *watch, int count)
{
    for (int i = 0, k = 0; i < tree->link_count && k < count; i++) {
        dp__link *link = &tree->links[i];
        if (link->fd != watch[k].fd)
            continue;
        if (watch[k++].revents != 0)
            DP_TRY(dp__tree_hear(tree, link));
    }
    return DP_OK;
}

/* Those who are missing, one bit for each link, are asked. */
static void dp__tree_ask(dp__tree *tree, uint32_t missing)
{
    for (int i = 0; i < tree->link_count; i++) {
        if ((missing >> i & 1) == 0)
            continue;
        tree->links[i].here = false;
        dp__tree_say(tree, &tree->links[i], DP__ASK, tree->calls);
    }
}

/* One of them has said something, or is not there. */
static dp_status dp__tree_look(dp__tree *tree, uint32_t missing, bool answered, dp__link **out)
{
    for (int i = 0; i < tree->link_count && *out == NULL; i++) {
        dp__link *link = &tree->links[i];
        if ((missing >> i & 1) == 0)
            continue;
        if (link->got == sizeof link->note)
            *out = link;
        else if (link->left)
            return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
        else if (answered && !link->here)
            return dp__tree_lost(tree, link, DP_ERR_TIMEOUT, "did not come");
    }
    return DP_OK;
}

/* Until one of those who are missing has said something. All others are heard meanwhile: they may
   fail, and they may ask. Who has answered is asked again. That ends, as no two wait for each
   other: a parent waits for its children before it gives them the whole, and they wait for it only
   after they gave their part. */
DP__COLD static dp_status dp__tree_await(dp__tree *tree, uint32_t missing, dp__link **out)
{
    dp__os_watch watch[DP__LINKS_MAX];
    uint64_t answer_ns = 0; /* 0: nobody was asked */
    *out = NULL;
    for (;;) {
        int ms = dp__ms_until(answer_ns != 0 ? answer_ns : tree->until_ns);
        DP_TRY(dp__tree_failure(tree));
        DP_TRY(dp__tree_look(tree, missing, answer_ns != 0 && ms == 0, out));
        if (*out != NULL)
            return DP_OK;
        if (ms == 0) {
            dp__tree_ask(tree, missing);
            answer_ns = dp__after_ms(DP__GRACE_MS);
        }
        int count = dp__tree_watch(tree, watch);
        dp__os_poll(watch, count, ms < DP__TREE_LOOK_MS ? ms : DP__TREE_LOOK_MS);
        DP_TRY(dp__tree_hear_all(tree, watch, count));
    }
}

static dp_status dp__tree_take(dp__tree *tree, dp__link *link, dp__kind kind, void *data,
                               size_t bytes)
{
    if (link->note.kind != (uint32_t)kind || link->note.bytes != bytes) {
        dp_error(DP_ERR_REMOTE,
                 "process %d of %d gives %llu bytes where process %d wants %zu: they are in "
                 "different calls",
                 link->process, tree->process_count, (unsigned long long)link->note.bytes,
                 tree->process, bytes);
        return dp__tree_fail(tree, NULL, DP_ERR_REMOTE, link->process);
    }
    link->got = 0;
    dp_status status = dp__wire_receive(link->fd, data, bytes, dp__after_ms(tree->timeout_ms));
    return status == DP_OK ? DP_OK
                           : dp__tree_lost(tree, link, status,
                                           status == DP_ERR_TIMEOUT ? "did not say all"
                                                                    : "ended while it spoke");
}

/* All that was said before the connection broke, which may be why. */
static dp_status dp__tree_last_words(dp__tree *tree, dp__link *link)
{
    dp__os_watch watch = {.fd = link->fd, .events = POLLIN};
    while (!link->left && link->got < sizeof link->note && dp__os_poll(&watch, 1, 0) > 0)
        DP_TRY(dp__tree_hear(tree, link));
    return DP_OK;
}

/* Who speaks cannot ask, nor answer: it waits longer than those who can, and may be named for one
   that has stopped listening. If it gives up, half a note may have been sent, so that nothing can
   follow on that link. */
static dp_status dp__tree_give(dp__tree *tree, dp__link *link, dp__kind kind, const void *data,
                               size_t bytes)
{
    uint64_t until_ns = dp__after_ms((int64_t)tree->timeout_ms + 2 * DP__GRACE_MS);
    dp__note note = {DP__NOTE_MAGIC, (uint32_t)kind, DP_OK, tree->process, bytes};
    if (link->left)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
    dp_status status = dp__note_send(link->fd, &note, data, until_ns);
    if (status == DP_OK)
        return DP_OK;
    if (status == DP_ERR_REMOTE)
        DP_TRY(dp__tree_last_words(tree, link));
    link->left = true;
    return dp__tree_lost(tree, link, status,
                         status == DP_ERR_TIMEOUT ? "did not listen" : "has ended");
}

/* The parts of all children, as they come: who has given its part may ask for the whole. */
static dp_status dp__tree_take_all(dp__tree *tree, char *all, size_t bytes_each)
{
    uint32_t missing = (1u << tree->link_count) - (1u << tree->first_child);
    while (missing != 0) {
        dp__link *child;
        DP_TRY(dp__tree_await(tree, missing, &child));
        size_t part = (size_t)dp__behind(child->process, tree->process_count) * bytes_each;
        DP_TRY(dp__tree_take(tree, child, DP__GATHER, all + (size_t)child->process * bytes_each,
                             part));
        missing &= ~(1u << (child - tree->links));
    }
    return DP_OK;
}

/* The part of each child is one run, so it is received in its place. */
static dp_status dp__tree_gather(dp__tree *tree, const void *in, char *all, size_t bytes_each)
{
    char *own = all + (size_t)tree->process * bytes_each;
    size_t bytes = (size_t)tree->process_count * bytes_each;
    DP_TRY(dp__tree_failure(tree));
    memmove(own, in, bytes_each);
    tree->calls++;
    tree->until_ns = dp__after_ms(tree->timeout_ms);
    DP_TRY(dp__tree_take_all(tree, all, bytes_each));
    if (tree->process != 0) {
        size_t part = (size_t)dp__behind(tree->process, tree->process_count) * bytes_each;
        dp__link *parent;
        DP_TRY(dp__tree_give(tree, &tree->links[0], DP__GATHER, own, part));
        DP_TRY(dp__tree_await(tree, 1, &parent));
        DP_TRY(dp__tree_take(tree, parent, DP__SPREAD, all, bytes));
    }
    for (int i = tree->link_count; i-- > tree->first_child;) /* those with most behind them first */
        DP_TRY(dp__tree_give(tree, &tree->links[i], DP__SPREAD, all, bytes));
    return DP_OK;
}

/* dp_bootstrap.all_gather */
static dp_status dp__tree_all_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    while (!dp__tree_enter(user, false))
        dp__os_sleep_ms(1);
    dp_status status = dp__tree_gather(user, in, out, bytes_each);
    dp__tree_leave(user);
    return status;
}

/* Between calls, and without waiting: why the job has failed, if it has. Who has closed its context
   is not missed. */
static dp_status dp__tree_listen(dp__tree *tree, int *out_process)
{
    dp__os_watch watch[DP__LINKS_MAX];
    if (dp__tree_enter(tree, false)) {
        int count = dp__tree_failure(tree) == DP_OK ? dp__tree_watch(tree, watch) : 0;
        if (count > 0 && dp__os_poll(watch, count, 0) > 0)
            (void)dp__tree_hear_all(tree, watch, count);
        dp__tree_leave(tree);
    }
    dp_status status = dp__tree_failure(tree);
    *out_process = status != DP_OK ? tree->culprit : -1;
    return status;
}

/* A child of fork may outlive its parent's context, and the address is not its own. */
static void dp__tree_unclaim(dp__tree *tree)
{
    if (tree == NULL)
        return;
    dp__os_close(tree->claim);
    tree->claim = -1;
}

/* Waits for nobody. A child of fork closes its copies silently: the connection is the parent's. */
static void dp__tree_close(dp__tree *tree, bool politely)
{
    if (tree == NULL)
        return;
    dp__note bye = {DP__NOTE_MAGIC, DP__BYE, DP_OK, tree->process, 0};
    for (int i = 0; i < tree->link_count; i++) {
        if (politely && !tree->links[i].left)
            (void)dp__os_send(tree->links[i].fd, &bye, sizeof bye);
        dp__os_close(tree->links[i].fd);
    }
    if (politely && tree->claim >= 0)
        dp__os_forget(&tree->claimed);
    dp__tree_unclaim(tree);
    dp__os_free(tree, 0, NULL);
}

/* ==== >>door ===================================================================================
   Who comes in. A guest says who it is and proves it; then it has a seat, and its connection stays.
   There may be many guests, and they may be anybody: one that sends something else than a knock is
   disconnected, one that is silent loses its place to a later one, and none is waited for.

   At process 0 all have a seat until they have met each other: whoever ends or fails before that is
   noticed there, whatever its place in the tree, and all hear it; so do those who come within a
   second after that.

   Where neither a launcher nor a secret tells jobs apart, two that are started at one address can
   be told apart by nobody. Then some number comes twice, and that is an error for all who are
   there; process 0 waits a little longer for it, when all numbers have come.                    */

enum {
    DP__GUESTS = 64, /* and so many are let in between two looks at the time */
    DP__GUEST_MS = 5000,
    DP__QUIET_MS = 500,
    DP__SAID_BYTES = 320
};

typedef struct dp__guest {
    int fd;
    bool asked; /* it has knocked, and owes an answer */
    size_t got; /* bytes of what it says now */
    unsigned char said[sizeof(dp__knock)];
    dp__knock knock;
    uint64_t nonce, came_ns;
} dp__guest;

typedef struct dp__seat { /* of one process */
    bool taken, ready;
    int fd; /* -1: the tree has it, or nobody came */
    uint64_t listens;
    char host[DP__PLACE_BYTES];
} dp__seat;

typedef struct dp__door {
    const dp__launch *launch;
    int process, process_count;
    bool all; /* everybody comes here, to process 0; else only those right behind it in the tree */
    bool welcomed;    /* all have come, and connect to their neighbours */
    bool twice;       /* two have come with one number */
    dp_status failed; /* nobody is let in any more: dp_last_error says why */
    dp__tree *tree;   /* theirs from then on */
    dp__key key;
    int listener;
    dp__os_address at;
    dp__seat *seats; /* of the processes behind this one, in order */
    int seat_count, taken, ready, expected;
    dp__guest *guests;
    int guest_count, guest_room;
    dp__os_watch *watch;
    uint64_t opened_ns, until_ns;
    uint64_t quiet_ns;         /* if nobody comes until then, nobody comes twice */
    int strangers;             /* guests that proved nothing */
    char said[DP__SAID_BYTES]; /* what the last one that was refused was told */
} dp__door;

static dp_status dp__door_open(dp__door *door)
{
    door->seat_count = dp__behind(door->process, door->process_count) - 1;
    door->expected = door->all ? door->seat_count
                               : dp__child_count(door->process, door->process_count);
    door->guest_room = DP__GUESTS + door->expected;
    size_t seats = (size_t)door->seat_count, guests = (size_t)door->guest_room;
    door->seats = dp__os_alloc(seats * sizeof *door->seats, 64, NULL);
    door->guests = dp__os_alloc(guests * sizeof *door->guests, 64, NULL);
    door->watch =
        dp__os_alloc((2 + seats + guests + DP__LINKS_MAX) * sizeof *door->watch, 64, NULL);
    if (door->seats == NULL || door->guests == NULL || door->watch == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", door->process_count);
    for (size_t i = 0; i < seats; i++)
        door->seats[i] = (dp__seat){.fd = -1};
    return DP_OK;
}

/* Seats that somebody else has taken over are empty by then. */
static void dp__door_close(dp__door *door)
{
    for (int i = 0; door->seats != NULL && i < door->seat_count; i++)
        dp__os_close(door->seats[i].fd);
    for (int i = 0; door->guests != NULL && i < door->guest_count; i++)
        dp__os_close(door->guests[i].fd);
    if (door->listener >= 0)
        dp__os_forget(&door->at);
    dp__os_close(door->listener);
    dp__os_free(door->seats, 0, NULL);
    dp__os_free(door->guests, 0, NULL);
    dp__os_free(door->watch, 0, NULL);
}

static bool dp__door_twice(dp__door *door, int process)
{
    door->twice = true;
    snprintf(door->said, DP__SAID_BYTES,
             "two processes have come as process %d of %d %s: two jobs have one address, and then "
             "each needs its own, or a DP_SECRET; or one of these two has a wrong number",
             process, door->process_count, door->launch->where);
    return false;
}

/* Whether a process that has proved that it is of this job can come in; the reason why not goes to
   door->said, as it is not a failure of this process. */
static bool dp__door_admits(dp__door *door, const dp__knock *knock)
{
    int who = knock->process, seat = who - door->process - 1;
    char *said = door->said;
    if (knock->version != DP_VERSION)
        snprintf(said, DP__SAID_BYTES, "process %d has dp.h %d, process %d has %d", who,
                 (int)knock->version, door->process, DP_VERSION);
    else if (knock->process_count != door->process_count)
        snprintf(said, DP__SAID_BYTES, "process %d counts %d processes, process %d counts %d", who,
                 (int)knock->process_count, door->process, door->process_count);
    else if (who == door->process ||
             (seat >= 0 && seat < door->seat_count && door->seats[seat].taken))
        return dp__door_twice(door, who);
    else if (who < door->process || seat >= door->seat_count ||
             (!door->all && dp__parent(who) != door->process))
        snprintf(said, DP__SAID_BYTES, "process %d does not belong behind process %d", who,
                 door->process);
    else
        return true;
    return false;
}

typedef enum dp__heard { DP__MORE, DP__KNOCKED, DP__PROVED, DP__NOISE } dp__heard;

/* What a guest is to say next, in full. */
static size_t dp__guest_bytes(const dp__guest *guest)
{
    return guest->asked ? sizeof(uint64_t) : sizeof(dp__knock);
}

/* Looks at guest->got bytes; nothing in them has been believed before. */
static dp__heard dp__guest_hear(const dp__door *door, dp__guest *guest)
{
    uint64_t proof;
    if (guest->got < dp__guest_bytes(guest))
        return DP__MORE;
    guest->got = 0;
    if (guest->asked) {
        memcpy(&proof, guest->said, sizeof proof);
        return proof == dp__proof(door->key, &guest->knock, guest->nonce, true) ? DP__PROVED
                                                                                : DP__NOISE;
    }
    memcpy(&guest->knock, guest->said, sizeof guest->knock);
    guest->asked = true;
    return guest->knock.magic == DP__KNOCK_MAGIC ? DP__KNOCKED : DP__NOISE;
}

/* The connection belongs to the seat from now on, or to the tree. The first to arrive has waited
   longest: what is left of its time is what all have. */
static void dp__door_seat(dp__door *door, const dp__guest *guest)
{
    dp__seat *seat = &door->seats[guest->knock.process - door->process - 1];
    uint64_t until = dp__after_ms(guest->knock.patience_ms);
    seat->taken = true;
    if (door->all)
        seat->fd = guest->fd;
    else
        dp__tree_link(door->tree, guest->fd, guest->knock.process);
    seat->listens = guest->knock.listens;
    dp__os_peer(guest->fd, seat->host, sizeof seat->host);
    door->until_ns = until < door->until_ns ? until : door->until_ns;
    if (door->all && !door->launch->numbered && !door->launch->secret)
        door->quiet_ns = dp__after_ms(DP__QUIET_MS);
    door->taken++;
}

/* Whether that process has heard that nobody is let in any more. It comes for another try then, for
   which this process has to be ready first; but where numbers come twice, it may be another one. */
static bool dp__door_has_told(const dp__door *door, int process)
{
    int seat = process - door->process - 1;
    bool late = seat >= 0 && seat < door->seat_count && !door->seats[seat].taken;
    return door->failed != DP_OK && !door->twice && !late;
}

/* Who comes too late hears why. */
static void dp__door_send_away(dp__door *door, const dp__guest *guest)
{
    if (!door->twice) {
        door->seats[guest->knock.process - door->process - 1].taken = true;
        door->taken++;
    }
    dp__note_failure(guest->fd, door->failed, door->process, dp_last_error());
}

/* false: the guest is gone, or has a seat. */
static bool dp__door_answer(dp__door *door, dp__guest *guest, dp__heard heard)
{
    if (dp__door_has_told(door, guest->knock.process)) {
        dp__os_close(guest->fd);
        return false;
    }
    if (heard == DP__KNOCKED) {
        guest->nonce = dp__os_random();
        dp__challenge challenge = {DP__CHALLENGE_MAGIC, DP_VERSION, guest->nonce,
                                   dp__proof(door->key, &guest->knock, guest->nonce, false)};
        if (dp__os_send(guest->fd, &challenge, sizeof challenge) == (ptrdiff_t)sizeof challenge)
            return true;
    } else if (heard == DP__PROVED && door->failed != DP_OK) {
        dp__door_send_away(door, guest);
    } else if (heard == DP__PROVED) {
        if (dp__door_admits(door, &guest->knock)) {
            dp__door_seat(door, guest);
            return false;
        }
        dp__note_failure(guest->fd, DP_ERR_MISMATCH, door->process, door->said);
    }
    door->strangers += heard == DP__NOISE && guest->asked;
    dp__os_close(guest->fd);
    return false;
}

/* Take what a guest says; false: it is no longer a guest. */
static bool dp__door_listen(dp__door *door, dp__guest *guest)
{
    ptrdiff_t got =
        dp__os_receive(guest->fd, guest->said + guest->got, dp__guest_bytes(guest) - guest->got);
    if (got < 0) {
        door->strangers += guest->asked; /* it saw a proof with another key, and left */
        dp__os_close(guest->fd);
        return false;
    }
    guest->got += (size_t)got;
    dp__heard heard = dp__guest_hear(door, guest);
    return heard == DP__MORE || dp__door_answer(door, guest, heard);
}

static bool dp__door_bears(const dp__guest *guest)
{
    if (dp__os_now_ns() - guest->came_ns < DP__GUEST_MS * (uint64_t)1000000)
        return true;
    dp__os_close(guest->fd);
    return false;
}

/* Whether guest `a` gives up its place sooner than `b`: who has knocked may be of this job. */
static bool dp__door_spares(const dp__guest *a, const dp__guest *b)
{
    return a->asked != b->asked ? b->asked : a->came_ns < b->came_ns;
}

/* If there is no place left, a new guest has that of the one that was silent for longest. */
static void dp__door_enter(dp__door *door, int fd)
{
    int place = door->guest_count;
    for (int i = 0; door->guest_count == door->guest_room && i < door->guest_room; i++)
        if (place == door->guest_room || dp__door_spares(&door->guests[i], &door->guests[place]))
            place = i;
    if (place == door->guest_count)
        door->guest_count++;
    else
        dp__os_close(door->guests[place].fd);
    door->guests[place] = (dp__guest){.fd = fd, .came_ns = dp__os_now_ns()};
}

/* Accept new guests. There may be a flood of them, and what has been let in is looked at first. */
static dp_status dp__door_accept(dp__door *door, int listener)
{
    bool full = false;
    int fd = 0;
    for (int i = 0; i < DP__GUESTS && fd >= 0; i++) {
        fd = dp__os_accept(listener, &full);
        if (fd >= 0 && (door->at.at.ss_family != AF_UNIX || dp__os_same_user(fd)))
            dp__door_enter(door, fd);
        else
            dp__os_close(fd);
    }
    if (!full)
        return DP_OK;
    return dp_error(DP_ERR_NO_MEMORY,
                    "process %d has %d of %d connections and may open no more files: "
                    "ulimit -n says how many",
                    door->process, door->taken, door->expected);
}

/* Whether this process waits for who has that seat. */
static bool dp__door_misses(const dp__door *door, int seat)
{
    if (door->welcomed)
        return !door->seats[seat].ready;
    return !door->seats[seat].taken &&
           (door->all || dp__parent(door->process + 1 + seat) == door->process);
}

/* "process 3", "processes 3 and 7", "processes 1, 2 and 40 more" */
static void dp__door_name_missing(const dp__door *door, char *text, size_t room)
{
    int missing = door->expected - (door->welcomed ? door->ready : door->taken), named = 0;
    size_t used = (size_t)snprintf(text, room, missing == 1 ? "process" : "processes");
    for (int i = 0; i < door->seat_count && named < missing; i++) {
        int process = door->process + 1 + i;
        if (!dp__door_misses(door, i))
            continue;
        const char *before = named == 0 ? "" : named + 1 == missing ? " and" : ",";
        if (named == 8 && missing > 9) {
            snprintf(text + used, room - used, " and %d more", missing - named);
            return;
        }
        used += (size_t)snprintf(text + used, room - used, "%s %d", before, process);
        named++;
    }
}

/* Who has another secret calls at another place inside a machine, and is not even heard. */
static dp_status dp__door_late(const dp__door *door)
{
    char missing[160], strangers[80] = "";
    double seconds = (double)(door->until_ns - door->opened_ns) * 1e-9;
    dp__door_name_missing(door, missing, sizeof missing);
    if (door->welcomed)
        return dp_error(DP_ERR_TIMEOUT, "%s of %d came, and did not meet the others within %.3g s",
                        missing, door->process_count, seconds);
    if (door->strangers > 0)
        snprintf(strangers, sizeof strangers,
                 "; of another job, or with another DP_SECRET, came %d", door->strangers);
    else if (door->launch->host[0] == '\0')
        strcpy(strangers, "; one with another DP_SECRET would not find this one");
    return dp_error(DP_ERR_TIMEOUT, "%s of %d did not come within %.3g s%s%s%s%s", missing,
                    door->process_count, seconds, strangers, door->said[0] != '\0' ? " (" : "",
                    door->said, door->said[0] != '\0' ? ", and was refused)" : "");
}

/* What a process says that has a seat: nothing, until it has met its neighbours, or has failed. */
static dp_status dp__door_hear_seat(dp__door *door, int place)
{
    dp__note note, here = {DP__NOTE_MAGIC, DP__HERE, DP_OK, 0, 0};
    dp__seat *seat = &door->seats[place];
    uint64_t until_ns = dp__after_ms(DP__GRACE_MS);
    bool sound = dp__wire_receive(seat->fd, &note, sizeof note, until_ns) == DP_OK &&
                 door->welcomed && dp__note_is_sound(&note);
    if (sound && note.kind == DP__FAILED)
        return dp__failure_shared(seat->fd, &note);
    if (sound && note.kind == DP__ASK)
        return dp__note_send(seat->fd, &here, NULL, until_ns);
    if (sound && note.kind == DP__READY && !seat->ready) {
        seat->ready = true;
        door->ready++;
        return DP_OK;
    }
    return dp_error(DP_ERR_REMOTE, "process %d of %d came, and ended before all %s",
                    door->process + 1 + place, door->process_count,
                    door->welcomed ? "had met each other" : "the others were here");
}

/* Processes that have come: those behind this one in the tree may tell what has failed there. */
static int dp__door_watch_seats(const dp__door *door, dp__os_watch *watch)
{
    int count = 0;
    if (door->failed != DP_OK)
        return 0;
    if (!door->all)
        return dp__tree_watch(door->tree, watch);
    for (int i = 0; i < door->seat_count; i++)
        if (door->seats[i].taken)
            watch[count++] = (dp__os_watch){.fd = door->seats[i].fd, .events = POLLIN};
    return count;
}

static dp_status dp__door_hear_seats(dp__door *door, const dp__os_watch *watch, int count)
{
    if (!door->all)
        return dp__tree_hear_all(door->tree, watch, count);
    for (int i = 0, k = 0; i < door->seat_count && k < count; i++)
        if (door->seats[i].taken && watch[k++].revents != 0)
            DP_TRY(dp__door_hear_seat(door, i));
    return DP_OK;
}

static bool dp__door_is_done(const dp__door *door)
{
    if (door->welcomed)
        return door->ready == door->expected;
    return door->taken == door->expected &&
           (dp__ms_until(door->quiet_ns) == 0 || dp__ms_until(door->until_ns) == 0);
}

static int dp__door_patience(const dp__door *door)
{
    bool quiet = !door->welcomed && door->taken == door->expected;
    int ms = dp__ms_until(quiet ? door->quiet_ns : door->until_ns);
    return ms < DP__GUEST_MS ? ms : DP__GUEST_MS;
}

/* Look once at everything that has happened. Guests are gone through backwards, as the last one
   takes the place of one that leaves. */
static dp_status dp__door_look(dp__door *door)
{
    dp__os_watch *watch = door->watch, *seats = watch + 2;
    int seat_count = dp__door_watch_seats(door, seats);
    dp__os_watch *guests = seats + seat_count;
    watch[0] = (dp__os_watch){.fd = door->listener, .events = POLLIN};
    watch[1] = (dp__os_watch){.fd = door->tree->claim, .events = POLLIN};
    for (int i = 0; i < door->guest_count; i++)
        guests[i] = (dp__os_watch){.fd = door->guests[i].fd, .events = POLLIN};
    dp__os_poll(watch, 2 + seat_count + door->guest_count, dp__door_patience(door));
    DP_TRY(dp__door_hear_seats(door, seats, seat_count));
    for (int i = door->guest_count; i-- > 0;)
        if (guests[i].revents != 0 ? !dp__door_listen(door, &door->guests[i])
                                   : !dp__door_bears(&door->guests[i]))
            door->guests[i] = door->guests[--door->guest_count];
    if (door->twice && door->failed == DP_OK)
        return dp_error(DP_ERR_MISMATCH, "%s", door->said);
    for (int i = 0; i < 2; i++)
        if (watch[i].revents != 0)
            DP_TRY(dp__door_accept(door, watch[i].fd));
    return DP_OK;
}

/* All who have come hear why it was in vain, and so do others, for a while. */
static dp_status dp__door_regret(dp__door *door, dp_status status)
{
    char why[DP__TEXT_BYTES];
    memcpy(why, dp_last_error(), sizeof why);
    for (int i = 0; i < door->seat_count; i++) {
        dp__seat *seat = &door->seats[i];
        if (seat->fd >= 0)
            dp__note_failure(seat->fd, status, door->process, dp_last_error());
        dp__os_close(seat->fd);
        seat->fd = -1;
    }
    door->failed = status;
    door->until_ns = door->quiet_ns = dp__after_ms(DP__GRACE_MS);
    while ((door->twice || door->taken < door->expected) && dp__ms_until(door->until_ns) > 0 &&
           dp__door_look(door) == DP_OK) {
    }
    return dp_error(status, "%s", why);
}

/* Wait until all are here, or, once they are, until they have met each other. */
DP__COLD static dp_status dp__door_wait(dp__door *door)
{
    dp_status status = DP_OK;
    door->opened_ns = dp__os_now_ns();
    while (!dp__door_is_done(door) && status == DP_OK)
        status = dp__ms_until(door->until_ns) == 0 ? dp__door_late(door) : dp__door_look(door);
    if (status != DP_OK && !door->all)
        return dp__tree_fail(door->tree, NULL, status, door->process);
    return status == DP_OK ? DP_OK : dp__door_regret(door, status);
}

/* ==== >>address ================================================================================
   Where a process listens. Process 0 does it where the launcher says, and holds a name inside its
   machine, too, which no other can hold: so there is one at an address, whatever port it found
   free. The name stays its own as long as the context is open.                                  */

static bool dp__is_loopback(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

/* A live process at that place answers at once: *out_other is a connection to it. What a dead one
   has left does not. */
static int dp__listen_at(const dp__os_address *at, int *out_other)
{
    int listener = -1;
    *out_other = -1;
    for (int tries = 0; tries < 2 && listener < 0 && *out_other < 0; tries++) {
        *out_other = dp__os_connect(at);
        if (*out_other < 0) {
            dp__os_forget(at);
            listener = dp__os_listen(at);
        }
    }
    return listener;
}

static dp__os_address dp__claim_of(const dp__launch *launch)
{
    char name[DP__PLACE_BYTES + 8];
    snprintf(name, sizeof name, "%s-0", launch->place);
    return dp__os_local(name);
}

/* " (its process id is 4242)", as far as it is known */
static const char *dp__owner_text(const dp__os_owner *owner, char *text, size_t room)
{
    text[0] = '\0';
    if (owner->process != 0)
        snprintf(text, room, " (its process id is %llu)", (unsigned long long)owner->process);
    return text;
}

/* Somebody else has the name of process 0. */
static dp_status dp__claim_is_taken(const dp__launch *launch, const dp__os_owner *owner)
{
    char who[48];
    dp__owner_text(owner, who, sizeof who);
    if (owner->user != dp__os_user())
        return dp_error(
            DP_ERR_MISMATCH,
            "process 0 of %d cannot meet the others %s: a process of user %llu%s has "
            "its place on this machine. Another address, or DP_SECRET, is another place",
            launch->process_count, launch->where, (unsigned long long)owner->user, who);
    return dp_error(DP_ERR_MISMATCH,
                    "process 0 of %d is not the only one %s: another process 0%s has that address. "
                    "Two jobs need two addresses, or a DP_SECRET each",
                    launch->process_count, launch->where, who);
}

static dp_status dp__listen_nowhere(int process)
{
    return dp_error(DP_ERR_NO_MEMORY, "process %d can open no port, or no more files", process);
}

/* On all interfaces, as the name of a host may mean another address on the host itself; but if it
   says that all are on this machine, only they can connect. */
static bool dp__listen_on(dp__door *door, const char *host, int port)
{
    dp__os_found found = {.count = 0};
    if (dp__is_loopback(host))
        dp__os_look_up(host, port, 0, &found);
    else
        found.count = dp__os_everywhere(port, found.list);
    for (int i = 0; i < found.count && door->listener < 0; i++) {
        door->at = found.list[i];
        door->listener = dp__os_listen(&found.list[i]);
    }
    return door->listener >= 0;
}

static dp_status dp__listen_here(dp__door *door, const dp__launch *launch)
{
    dp__os_owner owner = {0, 0};
    int other;
    door->at = dp__os_local(launch->place);
    door->listener = dp__listen_at(&door->at, &other);
    bool known = dp__os_owner_of(other, &owner);
    dp__os_close(other);
    if (door->listener >= 0)
        return DP_OK;
    return known ? dp__claim_is_taken(launch, &owner) : dp__listen_nowhere(door->process);
}

static dp_status dp__listen_first(dp__door *door, const dp__launch *launch)
{
    if (launch->host[0] == '\0')
        return dp__listen_here(door, launch);
    for (int i = 0; i < launch->port_count; i++)
        if (dp__listen_on(door, launch->host, launch->port + i))
            return DP_OK;
    return dp_error(
        DP_ERR_INVALID,
        "process 0 cannot listen at %s: its ports %d to %d are taken; DP_ADDR=host:port "
        "names others",
        launch->host, launch->port, launch->port + launch->port_count - 1);
}

/* Where those behind this process find it; it has a port of its own. */
static dp_status dp__listen_behind(dp__door *door, const dp__launch *launch, uint64_t *out_listens)
{
    char place[DP__PLACE_BYTES + 24];
    int other = -1;
    *out_listens = dp__os_random() | 1;
    snprintf(place, sizeof place, "%s-%016llx", launch->place, (unsigned long long)*out_listens);
    door->at = dp__os_local(place);
    if (launch->host[0] == '\0')
        door->listener = dp__listen_at(&door->at, &other);
    else if (dp__listen_on(door, launch->host, 0))
        *out_listens = (uint64_t)dp__os_port(door->listener);
    dp__os_close(other);
    return door->listener >= 0 ? DP_OK : dp__listen_nowhere(door->process);
}

/* ==== >>knocking ===============================================================================
   How a process finds another one and gets in: process 0 at first, then its parent in the tree. */

typedef struct dp__target { /* where somebody listens */
    const char *host;       /* "": inside this machine, at `place` */
    int port, port_count;
    char place[DP__PLACE_BYTES];
    const dp__launch *launch; /* it is process 0; else NULL */
    dp__tree *tree;           /* who may fail meanwhile; or NULL */
} dp__target;

/* false: who is there is not of this job, or did not answer in time. */
static bool dp__knock_on(int fd, dp__key key, dp__knock *knock, uint64_t until_ns,
                         const char **out_why)
{
    dp__challenge challenge;
    knock->nonce = dp__os_random();
    if (dp__wire_send(fd, knock, sizeof *knock, until_ns) != DP_OK ||
        dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) != DP_OK ||
        challenge.magic != DP__CHALLENGE_MAGIC)
        return false;
    if (challenge.proof != dp__proof(key, knock, challenge.nonce, false)) {
        *out_why = "who answers is of another job, or has another DP_SECRET";
        return false;
    }
    uint64_t proof = dp__proof(key, knock, challenge.nonce, true);
    return dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK;
}

/* Take the name of process 0. Where another has it, that one hears of this, as long as it still
   waits for others. Another context of this process may have it for the same job. */
static dp_status dp__claim(dp__tree *tree, const dp__launch *launch)
{
    dp__knock knock = {DP__KNOCK_MAGIC, DP_VERSION, .process_count = launch->process_count};
    dp__os_owner owner = {0, 0};
    const char *why;
    int other;
    tree->claimed = dp__claim_of(launch);
    tree->claim = dp__listen_at(&tree->claimed, &other);
    bool known = dp__os_owner_of(other, &owner);
    bool foreign = known && owner.process != (uint64_t)dp__os_process_id();
    if (foreign)
        (void)dp__knock_on(other, launch->key, &knock, dp__after_ms(DP__GRACE_MS), &why);
    dp__os_close(other);
    if (foreign)
        return dp__claim_is_taken(launch, &owner);
    return known || tree->claim >= 0 ? DP_OK : dp__listen_nowhere(launch->process);
}

/* DP_PENDING: nobody of this job is there, or not now. DP_OK: the connection stays. */
static dp_status dp__knock_at(const dp__os_address *at, dp__key key, dp__knock *knock,
                              uint64_t until_ns, int *out_fd, const char **out_why)
{
    int fd = dp__os_connect(at);
    dp__os_watch watch = {.fd = fd, .events = POLLOUT};
    if (fd < 0)
        return DP_PENDING;
    dp__os_poll(&watch, 1, dp__ms_until(until_ns));
    bool good = watch.revents != 0 && dp__os_connected(fd);
    if (good && at->at.ss_family == AF_UNIX && !dp__os_same_user(fd)) {
        *out_why = "its place is held by another user of this machine";
        good = false;
    }
    good = good && dp__knock_on(fd, key, knock, until_ns, out_why);
    *out_fd = good ? fd : -1;
    if (!good)
        dp__os_close(fd);
    return good ? DP_OK : DP_PENDING;
}

/* Try every address and port once. Whoever is silent there is given more time every round: it may
   be busy, or it may be a program that knows nothing about us. */
static dp_status dp__knock_around(const dp__target *target, dp__key key, dp__knock *knock,
                                  int round, uint64_t until_ns, int *out_fd, const char **out_why)
{
    dp__os_found found;
    int patience = 1000 << (round < 5 ? round : 5), rest = dp__ms_until(until_ns);
    uint64_t until = dp__after_ms(patience < rest ? patience : rest);
    dp_status status = DP_PENDING;
    if (target->host[0] == '\0') {
        dp__os_address here = dp__os_local(target->place);
        return dp__knock_at(&here, key, knock, until, out_fd, out_why);
    }
    dp__os_resolve(dp__os_look_up, target->host, target->port, rest, &found);
    *out_why = found.count == 0 ? found.why : *out_why;
    rest = dp__ms_until(until_ns);
    for (int i = 0; i < target->port_count && status == DP_PENDING; i++)
        for (int k = 0; k < found.count && status == DP_PENDING && rest > 0; k++) {
            dp__os_address at = dp__os_at_port(&found.list[k], target->port + i);
            until = dp__after_ms(patience < rest ? patience : rest);
            status = dp__knock_at(&at, key, knock, until, out_fd, out_why);
            rest = dp__ms_until(until_ns);
        }
    return status;
}

/* Another job may have this address, whose processes have met already. */
static const char *dp__claim_text(const dp__target *target, char *text, size_t room)
{
    char who[48];
    dp__os_owner owner = {0, 0};
    dp__os_address claim = dp__claim_of(target->launch);
    int fd = dp__os_connect(&claim);
    text[0] = '\0';
    if (fd >= 0 && dp__os_owner_of(fd, &owner))
        snprintf(text, room, ". There is a process 0%s that waits for nobody any more",
                 dp__owner_text(&owner, who, sizeof who));
    dp__os_close(fd);
    return text;
}

static dp_status dp__knock_in_vain(const dp__target *target, int process, const dp__knock *knock,
                                   double seconds, const char *why)
{
    char claim[128] = "";
    if (target->launch != NULL)
        dp__claim_text(target, claim, sizeof claim);
    if (target->host[0] == '\0' && target->launch == NULL)
        return dp_error(DP_ERR_TIMEOUT, "process %d of %d was not found within %.3g s", process,
                        (int)knock->process_count, seconds);
    if (target->host[0] == '\0')
        return dp_error(
            DP_ERR_TIMEOUT,
            "process %d of %d was not found %s within %.3g s%s%s%s. It may have another "
            "DP_SECRET; if it is on another machine, DP_ADDR=host:port has to say where",
            process, (int)knock->process_count, target->launch->where, seconds,
            why != NULL ? ": " : "", why != NULL ? why : "", claim);
    return dp_error(DP_ERR_TIMEOUT,
                    "process %d of %d did not answer at %s, ports %d to %d, within %.3g s%s%s%s",
                    process, (int)knock->process_count, target->host, target->port,
                    target->port + target->port_count - 1, seconds, why != NULL ? ": " : "",
                    why != NULL ? why : "", claim);
}

DP__COLD static dp_status dp__knock_until(const dp__target *target, int process, dp__key key,
                                          dp__knock *knock, uint64_t until_ns, int *out_fd)
{
    uint64_t begin = dp__os_now_ns();
    const char *why = NULL;
    for (int round = 0; dp__ms_until(until_ns) > 0; round++) {
        int culprit;
        if (target->tree != NULL)
            DP_TRY(dp__tree_listen(target->tree, &culprit));
        knock->patience_ms = (uint32_t)dp__ms_until(until_ns);
        if (dp__knock_around(target, key, knock, round, until_ns, out_fd, &why) == DP_OK)
            return DP_OK;
        int pause = round < 4 ? 10 << round : 100, rest = dp__ms_until(until_ns);
        dp__os_sleep_ms(pause < rest ? pause : rest);
    }
    return dp__knock_in_vain(target, process, knock, (double)(dp__os_now_ns() - begin) * 1e-9, why);
}

/* ==== >>meeting ================================================================================
   Each process connects to process 0, says where it listens itself, and learns who its parent is
   once all are there. Then the tree is made from the top, and when all have said that they have
   their place in it, they let go of process 0.                                                  */

/* Process 0 says when all are here, or why not. */
static dp_status dp__await_welcome(int fd, int process_count, uint64_t until_ns, dp__welcome *out)
{
    dp__note note;
    dp_status status = dp__wire_receive(fd, &note, sizeof note, until_ns);
    if (status == DP_OK &&
        (!dp__note_is_sound(&note) || (note.kind != DP__WELCOME && note.kind != DP__FAILED)))
        status = DP_ERR_REMOTE;
    if (status == DP_OK && note.kind == DP__FAILED)
        return dp__failure_receive(fd, &note, until_ns);
    if (status == DP_OK)
        status = dp__wire_receive(fd, out, sizeof *out, until_ns);
    out->host[DP__PLACE_BYTES - 1] = '\0';
    if (status == DP_ERR_TIMEOUT)
        return dp_error(status, "process 0 of %d did not say in time whether all are here",
                        process_count);
    if (status == DP_ERR_REMOTE)
        return dp_error(status, "process 0 of %d has ended before all were here", process_count);
    return status;
}

/* How much longer than process 0 a process waits that stands where this one does in the tree. */
static int dp__depth_ms(int process)
{
    return (int)dp__bits((unsigned)process) * DP__STEP_MS;
}

/* And longer than any of them. */
static int dp__levels_ms(int process_count)
{
    return (dp__child_count(0, process_count) + 1) * DP__STEP_MS;
}

/* All are here, and learn where to go. Who is deepest has most time for it; if one ends meanwhile,
   that is noticed as before. */
static void dp__welcome_all(dp__door *door)
{
    dp__note note = {DP__NOTE_MAGIC, DP__WELCOME, DP_OK, 0, sizeof(dp__welcome)};
    int left_ms = dp__ms_until(door->until_ns);
    left_ms = left_ms > DP__GRACE_MS ? left_ms : DP__GRACE_MS;
    dp__welcome welcome = {.run = dp__os_random(), .patience_ms = (uint32_t)left_ms};
    for (int process = 1; process < door->process_count; process++) {
        int parent = dp__parent(process);
        const dp__seat *seat = &door->seats[process - 1];
        const dp__seat *next = parent == 0 ? seat : &door->seats[parent - 1];
        welcome.listens = next->listens;
        memcpy(welcome.host, next->host, sizeof welcome.host);
        (void)dp__note_send(seat->fd, &note, &welcome, dp__after_ms(DP__GRACE_MS));
    }
    door->welcomed = true;
    door->until_ns = dp__after_ms((int64_t)left_ms + dp__levels_ms(door->process_count));
}

/* All have met: only those right behind process 0 stay connected to it. */
static void dp__go_all(dp__tree *tree, dp__door *door)
{
    dp__note note = {DP__NOTE_MAGIC, DP__GO, DP_OK, 0, 0};
    for (int process = 1; process < tree->process_count; process++) {
        dp__seat *seat = &door->seats[process - 1];
        (void)dp__note_send(seat->fd, &note, NULL, dp__after_ms(DP__GRACE_MS));
        if (dp__parent(process) != 0)
            continue;
        dp__tree_link(tree, seat->fd, process);
        seat->fd = -1;
    }
}

/* As process 0. */
DP__COLD static dp_status dp__meet_first(dp__tree *tree, const dp__launch *launch, dp__door *door)
{
    door->all = true;
    DP_TRY(dp__door_open(door));
    DP_TRY(dp__claim(tree, launch));
    DP_TRY(dp__listen_first(door, launch));
    DP_TRY(dp__door_wait(door));
    dp__welcome_all(door);
    DP_TRY(dp__door_wait(door));
    dp__go_all(tree, door);
    return DP_OK;
}

/* Connect to the parent, unless that is process 0, with which there is a connection already. */
static dp_status dp__meet_parent(dp__tree *tree, const dp__launch *launch, const dp__welcome *to,
                                 dp__door *door, dp__knock *knock)
{
    int fd = -1, parent = dp__parent(tree->process);
    if (parent == 0)
        return DP_OK;
    dp__target target = {.host = to->host[0] != '\0' ? to->host : launch->host,
                         .port = (int)(to->listens & DP__PORT_MAX),
                         .port_count = 1,
                         .tree = tree};
    snprintf(target.place, sizeof target.place, "%.40s-%016llx", launch->place,
             (unsigned long long)to->listens);
    dp_status status = dp__knock_until(&target, parent, door->key, knock, door->until_ns, &fd);
    if (status != DP_OK)
        return dp__tree_fail(tree, NULL, status, parent);
    dp__tree_link(tree, fd, parent);
    return DP_OK;
}

/* Say that this process has all its neighbours, and wait until all have theirs. Then it needs
   process 0 no more, unless that is its parent. */
static dp_status dp__meet_last(dp__tree *tree, const dp__door *door)
{
    dp__link *first;
    dp__tree_say(tree, &tree->links[0], DP__READY, DP_OK);
    tree->until_ns = door->until_ns + (uint64_t)dp__levels_ms(tree->process_count) * 1000000;
    DP_TRY(dp__tree_await(tree, 1, &first));
    if (first->note.kind != DP__GO)
        return dp__tree_lost(tree, first, DP_ERR_REMOTE, "sent what no process of a job sends");
    first->got = 0;
    if (dp__parent(tree->process) != 0) {
        dp__os_close(first->fd);
        memmove(first, first + 1, (size_t)--tree->link_count * sizeof *first);
    }
    tree->first_child = 1;
    return DP_OK;
}

/* As any other. */
DP__COLD static dp_status dp__meet_others(dp__tree *tree, const dp__launch *launch, dp__door *door)
{
    dp__knock knock = {.magic = DP__KNOCK_MAGIC,
                       .version = DP_VERSION,
                       .process = tree->process,
                       .process_count = tree->process_count};
    dp__target first = {launch->host, launch->port, launch->port_count, "", launch, NULL};
    dp__welcome welcome = {0};
    int fd = -1;
    DP_TRY(dp__door_open(door));
    if (door->expected > 0)
        DP_TRY(dp__listen_behind(door, launch, &knock.listens));
    memcpy(first.place, launch->place, sizeof first.place);
    DP_TRY(dp__knock_until(&first, 0, launch->key, &knock, door->until_ns, &fd));
    dp__tree_link(tree, fd, 0);
    DP_TRY(dp__await_welcome(fd, tree->process_count,
                             door->until_ns + DP__GRACE_MS * (uint64_t)1000000, &welcome));
    door->key = dp__key_of_run(launch->key, welcome.run);
    door->until_ns = dp__after_ms((int64_t)welcome.patience_ms + dp__depth_ms(tree->process));
    DP_TRY(dp__meet_parent(tree, launch, &welcome, door, &knock));
    door->until_ns += DP__STEP_MS * (uint64_t)1500000; /* a child that finds nobody knows more */
    DP_TRY(dp__door_wait(door));
    return dp__meet_last(tree, door);
}

DP__COLD static dp_status dp__tree_open(const dp__launch *launch, int timeout_ms, dp__tree **out)
{
    dp__tree *tree = dp__os_alloc(sizeof *tree, 64, NULL);
    dp__door door = {.launch = launch,
                     .process = launch->process,
                     .process_count = launch->process_count,
                     .key = launch->key,
                     .listener = -1,
                     .until_ns = dp__after_ms(timeout_ms)};
    if (tree == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", launch->process_count);
    door.tree = tree;
    *tree = (dp__tree){.process = launch->process,
                       .process_count = launch->process_count,
                       .timeout_ms = timeout_ms,
                       .claim = -1,
                       .lock = DP__LOCK_INITIALIZER};
    dp_status status = launch->process == 0 ? dp__meet_first(tree, launch, &door)
                                            : dp__meet_others(tree, launch, &door);
    dp__door_close(&door);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        return status;
    }
    *out = tree;
    return DP_OK;
}

/* ==== >>world ==================================================================================
   The processes of a context, however they have met: through the tree, MPI or the user's own means.
   They hear of each other's failures, and know who is near.                                     */

typedef struct dp__mpi_line dp__mpi_line;

typedef struct dp__mpi_place { /* what dp_mpi.h has for processes that meet through MPI */
    /* Whether MPI has brought processes together, and the config wants it; then there is a line to
       the others, as config->bootstrap, unless there are none. */
    dp_status (*join)(dp_config *config, int timeout_ms, dp__launch *launch, bool *out_meant,
                      dp__mpi_line **out);
    void (*leave)(dp__mpi_line *line, bool job_failed);
    dp_status (*all_gather)(const void *in, void *out, size_t bytes_each, void *user);
    const dp_coll_ops *(*coll)(void);
    dp_status (*hear)(dp__mpi_line *line, int *out_process);
    void (*tell)(dp__mpi_line *line, dp_status status, int process, const char *text);
} dp__mpi_place;

static const dp__mpi_place *dp__backend_mpi; /* dp_mpi.h defines it */

/* `own` is false in a child of fork: MPI belongs to the parent. */
static void dp__line_close(dp__mpi_line *line, bool own, bool job_failed)
{
    if (dp__backend_mpi != NULL && line != NULL && own)
        dp__backend_mpi->leave(line, job_failed);
}

/* Once a context is open it has no more to say over these connections. Whoever waits for other
   processes, and does not see them, asks here whether one of them has failed, and because of which
   process (-1: unknown). */
DP__MAYBE_UNUSED static dp_status dp__far_hear(dp_ctx *ctx, int *out_process)
{
    dp_status status = DP_OK;
    *out_process = -1;
    dp__lock_enter(&ctx->far_lock);
    if (ctx->tree != NULL)
        status = dp__tree_listen(ctx->tree, out_process);
    if (dp__backend_mpi != NULL && ctx->line != NULL)
        status = dp__backend_mpi->hear(ctx->line, out_process);
    dp__lock_leave(&ctx->far_lock);
    return status;
}

/* A failure of this process, which all others hear if it is the first. dp_last_error stays. */
static void dp__far_tell(dp_ctx *ctx, dp_status status, int process, const char *text)
{
    dp__lock_enter(&ctx->far_lock);
    if (ctx->tree != NULL)
        dp__tree_tell(ctx->tree, status, process, text);
    if (dp__backend_mpi != NULL && ctx->line != NULL)
        dp__backend_mpi->tell(ctx->line, status, process, text);
    dp__lock_leave(&ctx->far_lock);
}

/* Of which process a rank is. */
DP__MAYBE_UNUSED static int dp__process_of(const int *firsts, int rank)
{
    int process = 0;
    while (firsts[process + 1] <= rank)
        process++;
    return process;
}

static void dp__far_begin(dp_ctx *ctx, dp__tree *tree, dp__mpi_line *line)
{
    dp__lock_enter(&ctx->far_lock);
    ctx->tree = tree;
    ctx->line = line;
    dp__lock_leave(&ctx->far_lock);
}

/* "process 2 of 4 (ranks 4 to 5)". firsts: the first rank of every process, and one past the last
   of all; NULL: unknown. */
static const char *dp__process_text(int process, int process_count, const int *firsts, char *text,
                                    size_t bytes)
{
    int used = snprintf(text, bytes, "process %d of %d", process, process_count);
    int first = firsts != NULL ? firsts[process] : 0;
    int last = firsts != NULL ? firsts[process + 1] - 1 : 0;
    size_t room = bytes - (size_t)used;
    if (firsts != NULL && first == last)
        snprintf(text + used, room, " (rank %d)", first);
    else if (firsts != NULL)
        snprintf(text + used, room, " (ranks %d to %d)", first, last);
    return text;
}

static bool dp__far_serves(const dp_ctx *ctx)
{
    return ctx->comm != NULL && ctx->firsts != NULL && !DP_HAS(dp_coll_ops, ctx->comm->ops, abort);
}

/* The job has failed here, and the table of collectives has no way to tell the others why. What
   another process is to blame for was heard there, so that it is known. */
static void dp__far_pass_on(dp_ctx *ctx)
{
    char who[80], text[DP__TEXT_BYTES];
    int process = ctx->info.process;
    if (!dp__far_serves(ctx))
        return;
    dp__process_text(process, ctx->info.process_count, ctx->firsts, who, sizeof who);
    snprintf(text, sizeof text, "%s failed: %.*s", who, DP__TEXT_BYTES - 120, ctx->failed_text);
    dp__far_tell(ctx, (dp_status)atomic_load(&ctx->failed), process, text);
}

/* The same from the other side: such a table has failed here, perhaps since another process has,
   which may have said why, or somebody else has who knows. */
static dp_status dp__far_reason(dp_ctx *ctx, dp_status status)
{
    bool echo = status == DP_ERR_REMOTE || status == DP_ERR_TIMEOUT, fresh = dp__thread.fresh;
    char said[DP__TEXT_BYTES];
    int process = -1;
    if (dp_status_class(status) != DP_CLASS_JOB || !dp__far_serves(ctx) ||
        (ctx->tree == NULL && ctx->line == NULL))
        return status;
    memcpy(said, dp_last_error(), sizeof said);
    uint64_t until_ns = dp__after_ms(echo ? DP__GRACE_MS : 0);
    dp_status heard = dp__far_hear(ctx, &process);
    while (heard == DP_OK && !dp__has_failed(ctx) && dp__ms_until(until_ns) > 0) {
        dp__os_sleep_ms(10);
        heard = dp__far_hear(ctx, &process);
    }
    bool explains = heard != DP_OK && (echo || strcmp(said, dp_last_error()) == 0);
    if (heard != DP_OK && !explains) {
        (void)dp_error(status, "%s", said);
        dp__thread.fresh = fresh;
    }
    if (explains && process >= 0)
        dp__thread.culprit = ctx->firsts[process] + 1;
    return explains ? heard : status;
}

/* The last sentence as others are told it: they know which function is under way. */
static const char *dp__open_error(void)
{
    const char *text = dp_last_error();
    return strncmp(text, "dp_open: ", 9) == 0 ? text + 9 : text;
}

/* Join the world that the environment names, unless the config has another, or wants none. */
static dp_status dp__join(dp_config *config, dp__launch *launch, dp__tree **out,
                          dp__mpi_line **out_line)
{
    int timeout_ms = config->timeout_ms > 0 ? config->timeout_ms : DP__TIMEOUT_MS;
    bool own = config->bootstrap.all_gather != NULL, by_mpi = false;
    *out = NULL;
    *out_line = NULL;
    *launch = (dp__launch){.name = own ? "bootstrap" : "none", .process_count = 1};
    if (config->local_only)
        return DP_OK;
    if (dp__backend_mpi != NULL)
        DP_TRY(dp__backend_mpi->join(config, timeout_ms, launch, &by_mpi, out_line));
    if (own || by_mpi)
        return DP_OK;
    DP_TRY(dp__launch_read(config->job, launch));
    if (launch->process_count == 1)
        return DP_OK;
    dp_status status = dp__tree_open(launch, timeout_ms, out);
    if (status != DP_OK)
        dp_error(status, "dp_open: %s", dp__open_error());
    config->bootstrap =
        (dp_bootstrap){dp__tree_all_gather, *out, launch->process, launch->process_count};
    return status;
}

/* One round of the bootstrap. A failure in it is a failure of the job, even in a user's. */
static dp_status dp__boot_gather(const dp_bootstrap *boot, const void *own, void *all, size_t bytes)
{
    char first = dp__sentence_hide();
    dp_status status = dp__sentence_after(first, boot->all_gather(own, all, bytes, boot->user));
    if (status == DP_OK)
        return DP_OK;
    if (boot->all_gather == dp__tree_all_gather ||
        (dp__backend_mpi != NULL && boot->all_gather == dp__backend_mpi->all_gather))
        return dp_error(status, "dp_open: %s", dp__open_error());
    return dp_error(DP_ERR_REMOTE, "dp_open: bootstrap.all_gather failed: %s", dp__open_error());
}

typedef struct dp__share { /* a part of something that `count` processes divide */
    int place, count;
} dp__share;

typedef struct dp__neighbours { /* on the machine of a process */
    dp__share machine, cores;
} dp__neighbours;

typedef struct dp__whereabouts {
    uint64_t machine, cores;
} dp__whereabouts;

/* Which processes are on this machine, and which of them may run on the same cores: a launcher that
   has bound its processes to different ones has divided them already. What the launcher says about
   places counts, as it may know things about a machine that containers hide. */
DP__COLD static dp_status dp__find_neighbours(const dp_bootstrap *boot, const dp__launch *launch,
                                              dp__neighbours *out)
{
    dp__whereabouts own = {dp__os_machine(), dp__os_affinity()};
    size_t count = (size_t)boot->process_count;
    dp__whereabouts *all = dp__os_alloc(count * sizeof own, _Alignof(dp__whereabouts), NULL);
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    dp_status status = dp__boot_gather(boot, &own, all, sizeof own);
    *out = (dp__neighbours){{0, 0}, {0, 0}};
    for (int i = 0; i < boot->process_count && status == DP_OK; i++) {
        bool near = all[i].machine == own.machine, same = near && all[i].cores == own.cores;
        out->machine.place += near && i < boot->process;
        out->machine.count += near;
        out->cores.place += same && i < boot->process;
        out->cores.count += same;
    }
    dp__os_free(all, 0, NULL);
    if (launch->local_count > 0)
        out->machine = (dp__share){launch->local, launch->local_count};
    return status;
}

/* ==== >>spawn ==================================================================================
   The launcher for one machine: it forks, tells each child with the usual variables which process
   of how many it is, and waits for all. The first that fails ends the others.                   */

enum { DP__SPAWN_GRACE_MS = 2000, DP__SPAWN_MAX = 4096 };

typedef struct dp__last_words { /* of a child */
    int32_t status;
    char text[DP__TEXT_BYTES];
} dp__last_words;

typedef struct dp__spawned {
    int count, left;
    dp__os_child *children;
    bool ending;       /* they were told to end */
    uint64_t until_ns; /* when they are told to end, or made to; 0: nobody has failed */
    dp_status status;
    char text[DP__TEXT_BYTES + 64];
} dp__spawned;

static atomic_bool dp__spawning; /* signals belong to the whole process */

static void dp__env_set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    dp__os_env_set(name, text);
}

static _Noreturn void dp__spawn_run(const dp__os_child *child, int process, int count,
                                    const char *secret, dp_status (*fn)(void *user), void *user)
{
    dp__last_words words = {DP_OK, ""};
    char place[40];
    snprintf(place, sizeof place, "@%s", secret);
    dp__os_env_set("DP_LAUNCH", dp__launchers[0].name);
    dp__env_set_number("DP_PROCESS", process);
    dp__env_set_number("DP_PROCESS_COUNT", count);
    dp__env_set_number("DP_LOCAL_PROCESS", process);
    dp__env_set_number("DP_LOCAL_PROCESS_COUNT", count);
    dp__os_env_set("DP_ADDR", place);
    dp__os_env_set("DP_SECRET", secret);
    atomic_store(&dp__spawning, false);
    dp__thread.text[0] = '\0';
    words.status = (int32_t)dp__sentence_after('\0', fn(user));
    if (words.status != DP_OK)
        memcpy(words.text, dp__thread.text, sizeof words.text);
    dp__os_leave(child, &words, sizeof words, words.status == DP_OK);
}

/* Notes whether a process that has ended failed, and if so, whether it was the first or the cause:
   REMOTE and TIMEOUT may be only the echo of another process' failure. */
static void dp__spawn_judge(dp__spawned *all, int process)
{
    const dp__os_child *child = &all->children[process];
    dp__last_words words = {DP_OK, ""};
    bool spoke = dp__os_words(child, &words, sizeof words), echo;
    if (!spoke && (child->by_signal != 0 || child->code != 0)) {
        words.status = DP_ERR_USER;
        snprintf(words.text, sizeof words.text, "%s %d",
                 child->by_signal != 0 ? "it was ended by signal" : "it ended with exit status",
                 child->by_signal != 0 ? child->by_signal : child->code);
    }
    words.text[sizeof words.text - 1] = '\0';
    if (words.status == DP_OK || (all->ending && !spoke))
        return;
    echo = words.status == DP_ERR_REMOTE || words.status == DP_ERR_TIMEOUT;
    if (all->status != DP_OK && (echo || dp_status_class(all->status) != DP_CLASS_JOB))
        return;
    all->status = (dp_status)words.status;
    snprintf(all->text, sizeof all->text, "process %d of %d: %s", process, all->count, words.text);
    if (!all->ending)
        all->until_ns = dp__after_ms(echo ? 300 : 0);
}

/* Tell all to end, and kill those that do not. */
static void dp__spawn_end(dp__spawned *all)
{
    if (all->until_ns == 0 || dp__ms_until(all->until_ns) > 0)
        return;
    for (int i = 0; i < all->count; i++)
        dp__os_end(&all->children[i], all->ending);
    all->ending = true;
    all->until_ns = dp__after_ms(DP__SPAWN_GRACE_MS);
}

static void dp__spawn_wait(dp__spawned *all)
{
    while (all->left > 0) {
        for (int i = 0; i < all->count; i++) {
            dp__os_child *child = &all->children[i];
            if (child->pid == 0 || !dp__os_ended(child))
                continue;
            dp__spawn_judge(all, i);
            dp__os_close(child->pipe);
            all->left--;
        }
        if (dp__os_signal != 0 && all->status == DP_OK) {
            all->status = DP_ERR_ABORTED;
            snprintf(all->text, sizeof all->text, "ended by signal %d", (int)dp__os_signal);
            all->until_ns = dp__os_now_ns();
        }
        dp__spawn_end(all);
        if (all->left > 0)
            dp__os_sleep_ms(2 + all->count / 8);
    }
}

DP__COLD static dp_status dp__spawn_all(dp__spawned *all, dp_status (*fn)(void *user), void *user)
{
    char secret[36];
    uint64_t drawn[2];
    if (!dp__os_secret(drawn, sizeof drawn))
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_spawn: the system has no random numbers for the secret of the new "
                        "processes: neither getentropy nor /dev/urandom gives any");
    snprintf(secret, sizeof secret, "%016llx%016llx", (unsigned long long)drawn[0],
             (unsigned long long)drawn[1]);
    for (int i = 0; i < all->count && all->status == DP_OK; i++) {
        int forked = dp__os_fork(&all->children[i]);
        if (forked == 0)
            dp__spawn_run(&all->children[i], i, all->count, secret, fn, user);
        all->left += forked > 0;
        if (forked < 0) {
            all->status = DP_ERR_NO_MEMORY;
            snprintf(all->text, sizeof all->text, "the system has no room for %d processes",
                     all->count);
            all->until_ns = dp__os_now_ns();
        }
    }
    dp__spawn_wait(all);
    return all->status == DP_OK ? DP_OK : dp_error(all->status, "dp_spawn: %s", all->text);
}

static dp_status dp__spawn_check(int count, dp_status (*fn)(void *user))
{
    const dp__launcher *launcher;
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "dp_spawn: fn is NULL");
    if (count < 1 || count > DP__SPAWN_MAX)
        return dp_error(DP_ERR_INVALID, "dp_spawn: count is %d, not 1 to %d", count, DP__SPAWN_MAX);
    for (int i = 0; i < DP__LIVE_MAX; i++) {
        const dp_ctx *ctx = atomic_load(&dp__live[i]);
        if (ctx != NULL && ctx->fork_count == dp__os_fork_count())
            return dp_error(DP_ERR_STATE, "dp_spawn: a context is open, and its threads would not "
                                          "be in the new processes: close it before");
    }
    if (dp__launcher_find(&launcher) == DP_OK && launcher != NULL)
        return dp_error(DP_ERR_STATE,
                        "dp_spawn: this process is one of several already: '%s' has started it",
                        launcher->name);
    const char *obstacle = dp__os_let_threads_go();
    return obstacle == NULL ? DP_OK : dp_error(DP_ERR_STATE, "dp_spawn: %s", obstacle);
}

DP__COLD DP_API dp_status dp_spawn(int count, dp_status (*fn)(void *user), void *user)
{
    DP_TRY(dp__spawn_check(count, fn));
    size_t bytes = (size_t)count * sizeof(dp__os_child);
    dp__spawned all = {.count = count, .children = dp__os_alloc(bytes, 64, NULL)};
    if (all.children == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_spawn: no memory for %d processes", count);
    memset(all.children, 0, bytes);
    if (atomic_exchange(&dp__spawning, true)) {
        dp__os_free(all.children, bytes, NULL);
        return dp_error(DP_ERR_STATE, "dp_spawn: another thread is inside dp_spawn");
    }
    dp__os_signals_take();
    dp_status status = dp__spawn_all(&all, fn, user);
    dp__os_signals_give_back();
    dp__os_free(all.children, bytes, NULL);
    atomic_store(&dp__spawning, false);
    dp__os_signal_again();
    return status;
}

#endif /* DP__ROOMS */

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
