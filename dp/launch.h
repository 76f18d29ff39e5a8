/* dp/launch.h - v0.2.0 - how the processes of a job find each other - MIT licence

   Part of dp.h, which includes it. A launcher says in the environment which process this is and how
   many there are; process 0 listens, the others come to it, and all end up as a tree of connections
   that stays open as long as the context. dp_spawn is the launcher for one machine.

   CONTENTS (search for the tag)
     >>launchers  what the environment says
     >>place      and where the processes meet
     >>wire       bytes on a connection, and who may speak
     >>shape      who is connected to whom
     >>tree       lasting connections: failures, what others have begun
     >>gathering  what all say together, and what is heard between; closing
     >>server     who may join, and who may not
     >>awaiting   until all are here, or it is known who is not
     >>address    where processes listen, and that there is one process 0
     >>connecting how a process finds another one
     >>meeting    from the environment to a tree
     >>world      what a context knows of its other processes
     >>seats      where each process listens, beside the tree
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
    DP__PORTS = 8,          /* from the first on, where another program may have taken the first */
    DP__PORT_FIRST = 20000, /* of those that process 0 takes if no one says which */
    DP__PORT_LAST = 29999,
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

typedef struct dp__ports { /* from the first to the last; 0: whatever is free */
    int first, last;
} dp__ports;

typedef struct dp__launch { /* what was found */
    const char *name;
    int process, process_count;
    int local, local_count;    /* local_count 0: the launcher does not say */
    char host[DP__HOST_BYTES]; /* of process 0; "": all meet at a place inside this machine */
    int port, port_count;
    char where[DP__WHERE_BYTES]; /* the same in words */
    const int *listener;         /* with which process 0 does already; or NULL */
    dp__ports ports;             /* where processes listen that no one has told where */
    char own[DP__PLACE_BYTES];   /* at which address this one does; "": at all that it has */
    char place[DP__PLACE_BYTES]; /* a name inside this machine */
    dp__key key;
    bool numbered; /* the launcher has told this job from all others */
    bool agreed;   /* the processes have told each other the key: none has another one */
    bool secret;   /* or the user has */
    bool again;    /* they have met before, and look for each other at the same time */
    dp_status (*hear)(
        void *user); /* asked while others are awaited: a failure ends that; or NULL */
    void *user;
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

/* This process joins others that run already. */
static bool dp__comes_later(void)
{
    return dp__os_env("DP_REJOIN") != NULL;
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
    if (*out_place >= *out_count && !dp__comes_later())
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

/* ==== >>place ==================================================================================
   Where process 0 is, and at which addresses and ports this process may listen.                 */

/* "PORT", or "PORT-PORT": the first and the last of a range. */
static dp_status dp__launch_ports(dp__launch *launch)
{
    const char *text = dp__os_env("DP_PORTS"), *at = text;
    dp__ports *ports = &launch->ports;
    if (text == NULL)
        return DP_OK;
    ports->first = ports->last = dp__number_below(&at, DP__PORT_MAX + 1);
    if (*at == '-') {
        at++;
        ports->last = dp__number_below(&at, DP__PORT_MAX + 1);
    }
    if (*at != '\0' || ports->first <= 0 || ports->last < ports->first)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_PORTS is '%s', neither a port from 1 to %d nor a range of "
                        "them like 20000-20031",
                        text, DP__PORT_MAX);
    return DP_OK;
}

/* Finds the address that the others are told. Process 0 is found by its name, and need not know it.
   */
static dp_status dp__launch_interface(dp__launch *launch)
{
    const char *wanted = dp__os_env("DP_INTERFACE");
    dp__os_interface found;
    char others[200];
    if (wanted == NULL)
        return DP_OK;
    if (!dp__os_interface_find(wanted, &found, others, sizeof others))
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_INTERFACE is '%s', and no interface of this machine has a "
                        "name or an address that begins so. There are %s",
                        wanted, others[0] != '\0' ? others : "none, or it may open no more files");
    memcpy(launch->own, found.address, sizeof launch->own);
    return DP_OK;
}

/* "HOST:PORT", "[HOST]:PORT" where the host has colons itself, or "@NAME" for a place inside this
   machine. */
static dp_status dp__launch_address(dp__launch *launch, const char *text)
{
    const char *colon = strrchr(text, ':'), *at = colon != NULL ? colon + 1 : "";
    bool bracket = colon != NULL && text[0] == '[' && colon[-1] == ']';
    size_t bytes = colon != NULL ? (size_t)(colon - text) - (bracket ? 2 : 0) : 0;
    int port;
    snprintf(launch->where, sizeof launch->where, "at %s", text);
    if (text[0] == '@' && text[1] != '\0') {
        launch->key = dp__key_with(launch->key, text);
        return DP_OK;
    }
    port = dp__number_below(&at, DP__PORT_MAX + 1);
    if (bytes == 0 || bytes >= DP__HOST_BYTES || *at != '\0' || port <= 0)
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

/* The launcher says none: the number of the job chooses one, and leaves room for the next ones. */
static int dp__launch_port(const dp__launch *launch)
{
    dp__ports ports = {DP__PORT_FIRST, DP__PORT_LAST};
    if (launch->ports.last != 0)
        ports = launch->ports;
    int choices = ports.last - ports.first + 2 - DP__PORTS;
    uint64_t drawn = dp__sip(launch->key, "port", 4);
    return ports.first + (choices > 1 ? (int)(drawn % (uint64_t)choices) : 0);
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
        launch->port = dp__launch_port(launch);
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

static bool dp__launch_may(const dp__launch *launch, int port)
{
    return port >= launch->ports.first && port <= launch->ports.last;
}

/* Names inside a machine are each user's own; who meets over a network may be another user. */
static void dp__launch_name(dp__launch *launch)
{
    char user[24] = "";
    bool far = launch->host[0] != '\0';
    int last = dp__launch_may(launch, launch->port) ? launch->ports.last : DP__PORT_MAX;
    launch->port_count = last - launch->port + 1;
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
    DP_TRY(dp__launch_ports(launch));
    if (address != NULL)
        DP_TRY(dp__launch_address(launch, address));
    else if (launcher->host != NULL)
        DP_TRY(dp__launch_master(launch, launcher));
    else if (launcher == &dp__launchers[0])
        return dp__half_a_set(launcher->count, "DP_ADDR");
    else
        DP_TRY(dp__launch_place(launch, launcher));
    dp__launch_name(launch);
    return launch->host[0] != '\0' ? dp__launch_interface(launch) : DP_OK;
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

/* Returns why it is in vain to await others, if there is something that knows it. */
static dp_status dp__launch_hear(const dp__launch *launch)
{
    return launch->hear != NULL ? launch->hear(launch->user) : DP_OK;
}

/* A world of one needs no address, unless others come later. */
static bool dp__launch_is_alone(const dp__launch *launch)
{
    return launch->process_count == 1 && !dp__comes_later() &&
           dp__os_env("DP_PROCESS_LIMIT") == NULL;
}

/* Reads what the launcher says, and of which job. */
DP__COLD static dp_status dp__launch_read(const char *job, dp__launch *out)
{
    const dp__launcher *launcher;
    *out = (dp__launch){.name = "none", .process_count = 1};
    DP_TRY(dp__launcher_find(&launcher));
    if (launcher == NULL)
        return DP_OK;
    DP_TRY(dp__launch_self(launcher, out));
    if (dp__launch_is_alone(out))
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
   Bytes on a connection. Every wait has an end. The connecting process sends a nonce. The listener
   answers with a nonce of its own and a proof that it has the job's key; then the connecting
   process proves the same. So neither talks to a process of another job or run, and recorded bytes
   cannot be replayed. Nothing is trusted before both proofs.                                   */

enum {
    DP__JOIN_MAGIC = 0x31706b64,
    DP__CHALLENGE_MAGIC = 0x31706364,
    DP__HEADER_MAGIC = 0x31706e64,
    DP__LISTENER_NONCE = 0,  /* of a listener that is not waited for: see dp/tcp.h */
    DP__GRACE_MS = 1000,     /* beyond the time-out: to be told why, or for an answer */
    DP__HELD_UP_MS = 5,      /* who goes on so much later than it wanted to was held up, */
    DP__AGAIN_MS = 100,      /* and has so long to read what came meanwhile */
    DP__LAST_WORDS_MS = 100, /* so that the others read why the job has failed */
    DP__STEP_MS = 300 /* by which who stands deeper in the tree waits longer: its parent may have
                         something to tell */
};

typedef struct dp__join_request { /* sent by a connecting process */
    uint32_t magic;
    int32_t version;
    uint64_t nonce;
    int32_t process, process_count;
    uint64_t listens; /* where those behind it connect: a port, or a number in a name */
    uint32_t patience_ms, reserved;
    char host[DP__PLACE_BYTES]; /* and at which address; "": where this comes from */
} dp__join_request;

typedef struct dp__challenge {
    uint32_t magic;
    int32_t version;
    uint64_t nonce, proof;
} dp__challenge;

typedef struct dp__proof_input { /* what a proof is made from */
    dp__join_request request;
    uint64_t nonce, side;
} dp__proof_input;

typedef enum dp__kind {
    DP__WELCOME,  /* dp__welcome: all are here */
    DP__READY,    /* connected to all neighbours */
    DP__GO,       /* all are ready */
    DP__FAILED,   /* a sentence: the job has failed */
    DP__GATHER,   /* up the tree, of a process and all behind it */
    DP__SPREAD,   /* down the tree, of all */
    DP__BYE,      /* closed in good order */
    DP__ASK,      /* are you there? */
    DP__HERE,     /* yes, and waiting too */
    DP__PROGRESS, /* dp__progress_message: what a process has begun; passed on to all */
    DP__KINDS
} dp__kind;

typedef struct dp__tree_header { /* precedes everything that travels between processes of a job */
    uint32_t magic, kind;
    int32_t status, process; /* what failed, and where; of a question: the call, and who asks; of an
                                answer while they meet: for how many ms process 0 was held up */
    uint64_t bytes;          /* that follow */
} dp__tree_header;

typedef struct dp__welcome {
    uint64_t run;     /* mixed into the key, so that an earlier run has another one */
    uint64_t listens; /* the parent's */
    uint32_t patience_ms, reserved;
    char host[DP__PLACE_BYTES]; /* "": where process 0 is */
} dp__welcome;

typedef struct dp__tree_progress {
    dp__tree_header header;
    dp__progress_message progress;
} dp__tree_progress;

_Static_assert(sizeof(dp__tree_progress) ==
                       sizeof(dp__tree_header) + sizeof(dp__progress_message) &&
                   sizeof(dp__join_request) == 104 && sizeof(dp__challenge) == 24 &&
                   sizeof(dp__tree_header) == 24 && sizeof(dp__proof_input) == 120 &&
                   sizeof(dp__welcome) == 88,
               "what travels has no gaps");

static uint64_t dp__proof(dp__key key, const dp__join_request *request, uint64_t nonce,
                          bool of_caller)
{
    dp__proof_input input = {.request = *request, .nonce = nonce, .side = of_caller};
    return dp__sip(key, &input, sizeof input);
}

/* Returns true if this process wanted to go on at that time, and was held up: by a signal, a
   debugger, or as its machine slept. */
static bool dp__was_held_up(uint64_t due_ns, uint64_t now)
{
    return due_ns != 0 && now > due_ns + DP__HELD_UP_MS * (uint64_t)1000000;
}

/* Returns for how much longer this process waits; 0: the time is up. If it was held up until then,
   it has a while more, once: what it waits for may have come. */
DP__APART static int dp__ms_left(uint64_t *until_ns, bool *again)
{
    int ms = dp__os_ms_until(*until_ns);
    if (ms > 0 || *again || !dp__was_held_up(*until_ns, dp__os_now_ns()))
        return ms;
    *again = true;
    *until_ns = dp__os_after_ms(DP__AGAIN_MS);
    return DP__AGAIN_MS;
}

/* TIMEOUT: not in time. REMOTE: the connection has ended. Neither leaves a sentence. */
static dp_status dp__wire_send(int fd, const void *data, size_t bytes, uint64_t until_ns)
{
    bool again = false;
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t sent = dp__os_send(fd, (const char *)data + done, bytes - done);
        if (sent < 0)
            return DP_ERR_REMOTE;
        done += (size_t)sent;
        if (sent > 0)
            continue;
        int ms = dp__ms_left(&until_ns, &again);
        if (ms == 0)
            return DP_ERR_TIMEOUT;
        dp__os_ready(fd, DP__CAN_WRITE, ms);
    }
    return DP_OK;
}

static dp_status dp__wire_receive(int fd, void *data, size_t bytes, uint64_t until_ns)
{
    bool again = false;
    for (size_t done = 0; done < bytes;) {
        ptrdiff_t got = dp__os_receive(fd, (char *)data + done, bytes - done);
        if (got < 0)
            return DP_ERR_REMOTE;
        done += (size_t)got;
        if (got > 0)
            continue;
        int ms = dp__ms_left(&until_ns, &again);
        if (ms == 0)
            return DP_ERR_TIMEOUT;
        dp__os_ready(fd, DP__CAN_READ, ms);
    }
    return DP_OK;
}

static dp_status dp__tree_header_send(int fd, const dp__tree_header *header, const void *data,
                                      uint64_t until_ns)
{
    dp_status status = dp__wire_send(fd, header, sizeof *header, until_ns);
    return status == DP_OK ? dp__wire_send(fd, data, header->bytes, until_ns) : status;
}

/* Tell a process why the job fails; without a long wait if it does not listen. */
static void dp__tree_header_failure(int fd, dp_status status, int process, const char *text)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__FAILED, (int32_t)status, process, strlen(text)};
    (void)dp__tree_header_send(fd, &header, text, dp__os_after_ms(100));
}

/* Sends a failure over a connection, if there is one, and ends it. */
static void dp__tree_header_last(int *fd, dp_status status, int process, const char *text)
{
    if (*fd >= 0)
        dp__tree_header_failure(*fd, status, process, text);
    dp__os_finish(*fd, 0);
    *fd = -1;
}

/* Returns true if a header can be of this job: its processes send no other sizes than these, and
   sizes must not decide how much memory is used. */
static bool dp__tree_header_is_sound(const dp__tree_header *header)
{
    if (header->magic != DP__HEADER_MAGIC || header->kind >= DP__KINDS)
        return false;
    bool of_call = header->kind == DP__GATHER || header->kind == DP__SPREAD;
    return header->kind == DP__WELCOME    ? header->bytes == sizeof(dp__welcome)
           : header->kind == DP__PROGRESS ? header->bytes == sizeof(dp__progress_message)
           : header->kind == DP__FAILED   ? header->bytes < DP__TEXT_BYTES
                                          : of_call || header->bytes == 0;
}

/* Receive the sentence of a failure; returns its status, which is of the JOB class unless this
   process was not let in at all. */
static dp_status dp__failure_receive(int fd, const dp__tree_header *header, uint64_t until_ns)
{
    char text[DP__TEXT_BYTES] = "";
    dp_status status = (dp_status)header->status;
    if (!dp__is_failure(status))
        status = DP_ERR_REMOTE;
    if (header->bytes == 0 || dp__wire_receive(fd, text, header->bytes, until_ns) != DP_OK)
        return dp_error(DP_ERR_REMOTE, "process %d failed, and the reason did not arrive",
                        (int)header->process);
    text[header->bytes] = '\0';
    return dp_error(status, "%s", text[0] != '\0' ? text : dp_status_text(status));
}

/* Receives a failure from a process of the same job, which then has failed here too. */
static dp_status dp__failure_shared(int fd, const dp__tree_header *header)
{
    dp_status status = dp__failure_receive(fd, header, dp__os_after_ms(DP__GRACE_MS));
    return dp_status_class(status) == DP_CLASS_JOB ? status : DP_ERR_REMOTE;
}

/* ==== >>shape ==================================================================================
   Each process has a parent and at most log2(processes) children.                               */

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

/* Returns the neighbour of a process that lies on the way to another one. */
static int dp__towards(int process, int to, int process_count)
{
    int step = 1;
    if (to < process || to >= process + dp__behind(process, process_count))
        return dp__parent(process);
    while (process + 2 * step <= to)
        step *= 2;
    return process + step;
}

static int dp__child_count(int process, int process_count)
{
    int count = 0;
    for (int step = 1; step < dp__behind(process, process_count); step *= 2)
        count++;
    return count;
}

/* ==== >>tree ===================================================================================
   The connections of a job while it lasts. Each process has a parent and at most log2(processes)
   children, so that all_gather takes as many steps. A process that fails tells its neighbours, and
   they tell theirs: all get the first failure's sentence. A process that closes says so; this is an
   error only for a process that still needs it.

   At the time-out, the missing process may itself be waiting for another one, and may have begun
   later. So it is asked whether it is there. A waiting process answers yes, and asks the process
   that it waits for. In the end one does not answer, and is named.

   All waits of an opening together have one time-out, which all processes count from the first one
   that came: what meeting has taken is not there for what follows. Time in which a process does
   something itself, as to open its devices, is not counted.                                    */

enum {
    DP__LINKS_MAX = 1 + 20,
    DP__TREE_LOOK_MS = 50, /* so often who waits looks whether this process has failed meanwhile */
    DP__TREE_ASKS = 8,     /* after so many answers what is waited for is lost for good */
    DP__TREE_NOTES = 64 /* of each link, which one look between calls reads: others send one each */
};

typedef struct dp__link {
    int fd, process;
    bool left;  /* has closed */
    bool here;  /* has answered */
    size_t got; /* bytes of the header, which is complete when somebody has to wait for it */
    dp__tree_header header;
} dp__link;

typedef struct dp__tree {
    int process, process_count, timeout_ms;
    const dp__job *job; /* once a context is open: where progress messages go */
    int calls;          /* of all_gather, so far */
    uint64_t until_ns;  /* then somebody's patience is over */
    uint64_t spare_ns;  /* for which it may still wait for others until a context is open; */
    uint64_t begun_ns;  /* and while it does: since when, */
    uint64_t ends_ns;   /* and until when at most */
    int claim;          /* process 0: what no other one can have meanwhile; else -1 */
    dp__os_address claimed;
    int first_child, link_count; /* the parent's link is before, unless this is process 0 */
    dp__link links[DP__LINKS_MAX];
    dp__lock lock;    /* of all that follows, which any thread may change */
    bool busy;        /* a thread speaks or listens: the links are its own */
    bool untold;      /* and it is to tell the others of a failure before it goes */
    dp_status failed; /* once and for all, like what is said about it */
    int culprit;      /* a process */
    char text[DP__TEXT_BYTES];
    dp__progress_message told; /* the last own one, by who has the links, */
    uint64_t told_ns;          /* and when */
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
            dp__tree_header_failure(tree->links[i].fd, tree->failed, tree->culprit, tree->text);
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

/* Notes a failure, in the words of dp_last_error. */
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

/* Just a header, with the number of a call. If it cannot be sent at once, nobody listens. */
static void dp__tree_say(const dp__tree *tree, const dp__link *link, dp__kind kind, int call)
{
    dp__tree_header header = {DP__HEADER_MAGIC, (uint32_t)kind, call, tree->process, 0};
    (void)dp__wire_send(link->fd, &header, sizeof header, dp__os_after_ms(100));
}

/* A header that is no part of a call. */
static void dp__tree_answer(dp__tree *tree, dp__link *link)
{
    link->got = 0;
    if (link->header.kind == DP__BYE) {
        link->left = true;
    } else if (link->header.status < tree->calls) {
        return; /* of a call that is over */
    } else if (link->header.kind == DP__HERE) {
        link->here = true;
    } else {
        tree->until_ns = 0;
        dp__tree_say(tree, link, DP__HERE, link->header.status);
    }
}

/* To all but the one that brought it, as far as they listen: if there is no room for a progress
   message, nobody has read many of them yet, and who does so then asks if that is too little. Half
   a progress message would be the end of a link. */
DP__APART static void dp__tree_post(dp__tree *tree, const dp__link *bringer, int from,
                                    const dp__progress_message *progress)
{
    const dp__tree_progress whole = {
        {DP__HEADER_MAGIC, DP__PROGRESS, DP_OK, from, sizeof *progress}, *progress};
    for (int i = 0; i < tree->link_count; i++) {
        dp__link *link = &tree->links[i];
        if (link != bringer && !link->left && dp__os_ready(link->fd, DP__CAN_WRITE, 0))
            link->left = dp__wire_send(link->fd, &whole, sizeof whole, dp__os_after_ms(100)) ==
                         DP_ERR_TIMEOUT;
    }
}

/* The own one. Who only answers says the same thing once for all who ask at about the same time, as
   those do that wait for one process: a progress message about a process goes over each link of the
   tree once, however many have asked. If each question had its own answers, there would be as many
   as the square of the number of processes, and each would go over all links. */
DP__APART static void dp__tree_report(dp__tree *tree, const dp__progress_message *progress,
                                      bool answers)
{
    dp__progress_message news = *progress;
    uint64_t now = dp__os_now_ns();
    news.asks = 0;
    if (answers && now - tree->told_ns < dp__news_ns(tree->timeout_ms) &&
        memcmp(&news, &tree->told, sizeof news) == 0)
        return;
    tree->told = news;
    tree->told_ns = now;
    dp__tree_post(tree, NULL, tree->process, progress);
}

static dp_status dp__tree_letter(dp__tree *tree, dp__link *link)
{
    dp__progress_message progress;
    int from = link->header.process;
    link->got = 0;
    if (dp__wire_receive(link->fd, &progress, sizeof progress, dp__os_after_ms(DP__GRACE_MS)) !=
        DP_OK)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "ended while it was sending");
    if (from < 0 || from >= tree->process_count || from == tree->process ||
        !dp__progress_message_is_sound(&progress))
        return dp__tree_lost(tree, link, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    dp__tree_post(tree, link, from, &progress);
    if (tree->job == NULL || !dp__progress_message_read(tree->job, from, &progress))
        return DP_OK;
    progress = dp__progress_message_of(tree->job);
    dp__tree_report(tree, &progress, true);
    return DP_OK;
}

static dp_status dp__tree_last_words(dp__tree *tree, dp__link *link, int wait_ms);

/* While they meet, process 0 is connected to all, and says who was first to end: the neighbour that
   this process misses may have heard it sooner. */
DP__COLD static dp_status dp__tree_ended(dp__tree *tree, dp__link *link)
{
    bool meets = tree->process != 0 && tree->first_child == 0;
    link->left = true;
    if (meets && link != &tree->links[0])
        DP_TRY(dp__tree_last_words(tree, &tree->links[0], DP__GRACE_MS));
    return dp__tree_lost(tree, link, DP_ERR_REMOTE, "ended, or the connection to it broke");
}

/* As much of a header as there is. What is no part of a call is dealt with here. */
static dp_status dp__tree_hear(dp__tree *tree, dp__link *link, bool listens)
{
    dp__tree_header *header = &link->header;
    ptrdiff_t got =
        dp__os_receive(link->fd, (char *)header + link->got, sizeof *header - link->got);
    if (got < 0 && listens && tree->job != NULL) {
        link->left = true;
        dp__job_miss(tree->job, link->process);
        return DP_OK;
    }
    if (got < 0)
        return dp__tree_ended(tree, link);
    link->got += (size_t)got;
    if (link->got < sizeof *header)
        return DP_OK;
    if (!dp__tree_header_is_sound(header))
        return dp__tree_lost(tree, link, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    if (header->kind == DP__FAILED) {
        dp_status status = dp__failure_shared(link->fd, header);
        return dp__tree_fail(tree, link, status, header->process);
    }
    if (header->kind == DP__PROGRESS)
        return dp__tree_letter(tree, link);
    if (header->kind == DP__BYE || header->kind == DP__ASK || header->kind == DP__HERE)
        dp__tree_answer(tree, link);
    return DP_OK;
}

/* ==== >>gathering ================================================================================
   all_gather over the tree, in as many steps as it is deep; and what a process that is in no such
   call hears when it looks.                                                                      */

/* Links that may have something new, for dp__os_poll; returns how many. */
static int dp__tree_watch(const dp__tree *tree, dp__os_watch *watch)
{
    int count = 0;
    for (int i = 0; i < tree->link_count; i++)
        if (!tree->links[i].left && tree->links[i].got < sizeof(dp__tree_header))
            watch[count++] = (dp__os_watch){.fd = tree->links[i].fd, .events = DP__CAN_READ};
    return count;
}

static dp_status dp__tree_hear_all(dp__tree *tree, const dp__os_watch *watch, int count,
                                   bool listens)
{
    for (int i = 0, k = 0; i < tree->link_count && k < count; i++) {
        dp__link *link = &tree->links[i];
        if (link->fd != watch[k].fd)
            continue;
        if (watch[k++].revents != 0)
            DP_TRY(dp__tree_hear(tree, link, listens));
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
        if (link->got == sizeof link->header)
            *out = link;
        else if (link->left)
            return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
        else if (answered && !link->here)
            return dp__tree_lost(tree, link, DP_ERR_TIMEOUT, "did not come");
    }
    return DP_OK;
}

/* Fails where all who are missing have answered, again and again. */
DP__COLD static dp_status dp__tree_give_up(dp__tree *tree, uint32_t missing)
{
    int first = 0;
    while ((missing >> first & 1) == 0)
        first++;
    return dp__tree_lost(tree, &tree->links[first], DP_ERR_TIMEOUT,
                         "is there, and what it was to send did not come");
}

/* Waits for something new, at most so long, and hears it. */
static dp_status dp__tree_rest(dp__tree *tree, int ms)
{
    dp__os_watch watch[DP__LINKS_MAX];
    int count = dp__tree_watch(tree, watch);
    dp__os_poll(watch, count, ms < DP__TREE_LOOK_MS ? ms : DP__TREE_LOOK_MS);
    return dp__tree_hear_all(tree, watch, count, false);
}

/* Until one of those who are missing has said something; all others are heard. Who has answered is
   asked again. That ends, as no two wait for each other, unless the network has lost something: a
   parent waits for its children before it gives them the whole, and they wait for it only after
   they gave their part. */
DP__COLD static dp_status dp__tree_await(dp__tree *tree, uint32_t missing, dp__link **out)
{
    uint64_t answer_ns = 0; /* 0: nobody was asked */
    int asks = 0;
    bool again = false;
    *out = NULL;
    for (;;) {
        int ms = answer_ns != 0 ? dp__ms_left(&answer_ns, &again) : dp__os_ms_until(tree->until_ns);
        DP_TRY(dp__tree_failure(tree));
        DP_TRY(dp__tree_look(tree, missing, answer_ns != 0 && ms == 0, out));
        if (*out != NULL)
            return DP_OK;
        if (ms == 0 && asks++ == DP__TREE_ASKS)
            return dp__tree_give_up(tree, missing);
        if (ms == 0) {
            dp__tree_ask(tree, missing);
            answer_ns = dp__os_after_ms(DP__GRACE_MS);
            again = false;
        }
        DP_TRY(dp__tree_rest(tree, ms));
    }
}

/* Asks process 0, to which the first link leads, whether it is there; fails if it does not answer.
   *out_held_ms: for how long it was held up. */
DP__COLD static dp_status dp__tree_probe(dp__tree *tree, int *out_held_ms)
{
    dp__link *first = &tree->links[0], *some = NULL;
    uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS);
    bool again = false;
    dp__tree_ask(tree, 1);
    while (!first->here && some == NULL) {
        int ms = dp__ms_left(&until_ns, &again);
        DP_TRY(dp__tree_failure(tree));
        DP_TRY(dp__tree_look(tree, 1, ms == 0, &some));
        DP_TRY(dp__tree_rest(tree, ms));
    }
    *out_held_ms = (int)first->header.status;
    return DP_OK;
}

/* Begins to wait for others while a context opens: what it takes is not there for the next wait. */
static void dp__tree_begin(dp__tree *tree)
{
    tree->begun_ns = dp__os_now_ns();
    tree->ends_ns = tree->begun_ns + tree->spare_ns;
}

static void dp__tree_end(dp__tree *tree)
{
    uint64_t waited_ns = dp__os_now_ns() - tree->begun_ns;
    tree->spare_ns -= waited_ns < tree->spare_ns ? waited_ns : tree->spare_ns;
}

/* Returns when a wait ends for one that is not asked whether it is there: it has a while, whatever
   is left. */
static uint64_t dp__tree_until(const dp__tree *tree, int least_ms)
{
    uint64_t least_ns = dp__os_after_ms(least_ms);
    return tree->ends_ns > least_ns ? tree->ends_ns : least_ns;
}

/* Receives the rest of what has begun to come. It answers no question meanwhile, so it gives up
   before those that ask do. */
static dp_status dp__tree_take(dp__tree *tree, dp__link *link, dp__kind kind, void *data,
                               size_t bytes)
{
    if (link->header.kind != (uint32_t)kind || link->header.bytes != bytes) {
        dp_error(DP_ERR_REMOTE,
                 "process %d of %d sent %llu bytes, process %d expected %zu: the processes are "
                 "executing different calls",
                 link->process, tree->process_count, (unsigned long long)link->header.bytes,
                 tree->process, bytes);
        return dp__tree_fail(tree, NULL, DP_ERR_REMOTE, link->process);
    }
    link->got = 0;
    uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS / 2);
    dp_status status = dp__wire_receive(link->fd, data, bytes, until_ns);
    return status == DP_OK ? DP_OK
                           : dp__tree_lost(tree, link, status,
                                           status == DP_ERR_TIMEOUT ? "did not send everything"
                                                                    : "ended while it was sending");
}

/* Reads all that was said before the connection broke, or is said in a while: it may be why. */
static dp_status dp__tree_last_words(dp__tree *tree, dp__link *link, int wait_ms)
{
    uint64_t until_ns = dp__os_after_ms(wait_ms);
    while (!link->left && link->got < sizeof link->header &&
           dp__os_ready(link->fd, DP__CAN_READ, dp__os_ms_until(until_ns)))
        DP_TRY(dp__tree_hear(tree, link, false));
    return DP_OK;
}

/* Sends to a neighbour. It cannot ask nor answer meanwhile, so it waits longer than those that can.
   If it gives up, half a header may have been sent, so that nothing can follow on that link. */
static dp_status dp__tree_give(dp__tree *tree, dp__link *link, dp__kind kind, const void *data,
                               size_t bytes)
{
    uint64_t until_ns = dp__tree_until(tree, DP__GRACE_MS) + DP__GRACE_MS * (uint64_t)1000000;
    dp__tree_header header = {DP__HEADER_MAGIC, (uint32_t)kind, DP_OK, tree->process, bytes};
    if (link->left)
        return dp__tree_lost(tree, link, DP_ERR_REMOTE, "has closed its context");
    dp_status status = dp__tree_header_send(link->fd, &header, data, until_ns);
    if (status == DP_OK)
        return DP_OK;
    if (status == DP_ERR_REMOTE)
        DP_TRY(dp__tree_last_words(tree, link, 0));
    link->left = true;
    return dp__tree_lost(tree, link, status,
                         status == DP_ERR_TIMEOUT ? "did not receive" : "has ended");
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
    dp__tree_begin(tree);
    tree->until_ns = tree->ends_ns;
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
    dp__tree_end(tree);
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

/* Between calls, and without waiting: why the job has failed, if it has; tree->culprit then says
   because of which process. */
static dp_status dp__tree_listen(dp__tree *tree)
{
    dp__os_watch watch[DP__LINKS_MAX];
    if (dp__tree_enter(tree, false)) {
        bool more = true;
        for (int i = 0; i < DP__TREE_NOTES && more && dp__tree_failure(tree) == DP_OK; i++) {
            int count = dp__tree_watch(tree, watch);
            more = count > 0 && dp__os_poll(watch, count, 0) > 0;
            if (more)
                (void)dp__tree_hear_all(tree, watch, count, true);
        }
        dp__tree_leave(tree);
    }
    return dp__tree_failure(tree);
}

/* Answers those that have gone on to the next call that this process is there: their questions
   stand behind what that call is to read. */
static void dp__tree_stay(const dp__tree *tree)
{
    for (int i = 0; i < tree->link_count; i++)
        if (!tree->links[i].left && tree->links[i].got == sizeof(dp__tree_header))
            dp__tree_say(tree, &tree->links[i], DP__HERE, tree->calls + 1);
}

/* Passes over what others have given to a call that is not to be, and reads what comes behind it:
   why they fail, if they do. */
DP__COLD static dp_status dp__tree_skip(dp__tree *tree)
{
    char some[256];
    for (int i = 0; i < tree->link_count; i++) {
        dp__link *link = &tree->links[i];
        uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS), bytes = link->header.bytes;
        if (link->left || link->got < sizeof link->header)
            continue;
        link->got = 0;
        while (!link->left && bytes > 0) {
            size_t part = bytes < sizeof some ? (size_t)bytes : sizeof some;
            link->left = dp__wire_receive(link->fd, some, part, until_ns) != DP_OK;
            bytes -= part;
        }
    }
    return dp__tree_listen(tree);
}

/* Closes without a word. So does a child of fork with its copies: it may outlive its parent, whose
   end others notice by that of the connections, and the address is not its own. */
static void dp__tree_let_go(dp__tree *tree)
{
    if (tree == NULL)
        return;
    for (int i = 0; i < tree->link_count; i++)
        dp__os_drop(&tree->links[i].fd);
    dp__os_drop(&tree->claim);
}

/* Closes the tree, and waits for nobody that has room for a farewell: half of one would read as a
   death. */
static void dp__tree_close(dp__tree *tree, bool politely)
{
    if (tree == NULL)
        return;
    dp__tree_header bye = {DP__HEADER_MAGIC, DP__BYE, DP_OK, tree->process, 0};
    uint64_t bye_ns = dp__os_after_ms(DP__LAST_WORDS_MS);
    for (int i = 0; i < tree->link_count; i++)
        if (politely && !tree->links[i].left)
            (void)dp__wire_send(tree->links[i].fd, &bye, sizeof bye, bye_ns);
    uint64_t until_ns = dp__os_after_ms(tree->failed != DP_OK ? DP__LAST_WORDS_MS : 0);
    for (int i = 0; politely && i < tree->link_count; i++) {
        dp__os_finish(tree->links[i].fd, until_ns);
        tree->links[i].fd = -1;
    }
    if (politely && tree->claim >= 0)
        dp__os_forget(&tree->claimed);
    dp__tree_let_go(tree);
    dp__os_free(tree, 0, NULL);
}

/* ==== >>server =================================================================================
   Accepts the processes of the job. A pending connection says which process it is and proves that
   it has the key. Then it belongs to a peer and stays open. Pending connections may be many, and
   may come from anywhere: one that sends anything but a request is closed, one that is silent is
   replaced by a later one, and none is waited for.

   A flood of strangers keeps no process of the job out. The system's queue of callers may be full,
   and then any caller gets the next place: one of the job tries every millisecond, and stays in the
   queue once it is there, since inside a machine it waits for an answer until its time is over. It
   comes to the head of the queue because every look takes DP__ACCEPT_MAX out. By then it has sent
   its request, unless the queue was empty; then it has the four looks it takes to replace all that
   are pending. After its request only those that have asked too are replaced before it.

   Process 0 keeps a connection to every peer until all have connected to their neighbours. It
   notices any process that ends or fails before that, and tells all others, also those that connect
   within a second after that. To look at many peers takes a while, so that it is not done each time
   when a connection has news: else to meet would take time with the square of their number. For as
   long as it takes to open, process 0 raises its limit of open files, where that is low.

   Without a number from a launcher and without a secret, two jobs started at one address cannot be
   told apart. Then some process number comes twice, which is an error for all processes there.
   Process 0 waits a little longer for this when all numbers have come.                           */

enum {
    DP__PENDING_MAX = 256,
    DP__ACCEPT_MAX = 64, /* between two looks at the time */
    DP__PEERS_FEW = 64,  /* are looked at each time */
    DP__PEER_NS = 400,   /* else for each of them so long passes; a look at one takes 50 to 100 */
    DP__PENDING_MS = 5000,
    DP__QUIET_MS = 500,
    DP__CALL_LOOK_MS = 10, /* so often it looks whether the job has failed */
    DP__SAID_BYTES = 320
};

typedef struct dp__pending {
    int fd;
    bool asked; /* its request has come, its proof has not */
    size_t got; /* bytes received of the current message */
    unsigned char said[sizeof(dp__join_request)];
    dp__join_request request;
    uint64_t nonce, came_ns;
} dp__pending;

typedef struct dp__peer { /* a process behind this one */
    bool taken, ready;
    int fd; /* -1: the tree has it, or nobody came */
    uint64_t listens;
    char host[DP__PLACE_BYTES];
} dp__peer;

typedef struct dp__server {
    const dp__launch *launch;
    int process, process_count;
    int first;     /* of those that may connect */
    bool all;      /* all behind it connect, as to process 0; else only children in the tree do */
    bool any;      /* all others may connect, at any time; nobody is waited for */
    bool welcomed; /* all have joined, and connect to their neighbours */
    bool twice;    /* two processes have the same number */
    dp_status failed; /* no process may join any more: dp_last_error says why */
    dp__tree *tree;   /* gets the connections in the end */
    dp__key key;
    int listener;
    dp__os_address at;
    dp__peer *peers; /* of the processes behind this one, in order */
    int peer_count, taken, ready, expected;
    dp__pending *pending;
    int pending_count, pending_capacity;
    dp__os_watch *watch;
    uint64_t opened_ns, until_ns;
    uint64_t shorter_ns;       /* by how much the others' time has made this one shorter; */
    int earliest;              /* by that of which process */
    uint64_t due_ns, held_ns;  /* when it is to look again; for how long it was held up so far */
    bool again;                /* it was held up for long, and has had more time than others */
    uint64_t quiet_ns;         /* until then a number may come twice */
    uint64_t peers_ns;         /* not before then are the peers looked at again */
    bool raised;               /* the limit of open files */
    bool full;                 /* nobody is accepted before those that are pending are gone */
    int rejected;              /* connections without the right proof */
    dp__os_watch *more;        /* what else ends a look, of somebody who looks every so often; or */
    int more_count, more_most; /* NULL */
    char said[DP__SAID_BYTES]; /* why the last process was refused */
} dp__server;

static dp_status dp__server_open(dp__server *server)
{
    server->first = server->any ? 0 : server->process + 1;
    server->peer_count = server->all ? server->process_count - server->first
                                     : dp__behind(server->process, server->process_count) - 1;
    server->expected = server->all ? server->peer_count
                                   : dp__child_count(server->process, server->process_count);
    server->pending_capacity = DP__PENDING_MAX + server->expected;
    size_t peers = (size_t)server->peer_count, pending = (size_t)server->pending_capacity;
    size_t watched = 2 + peers + pending + DP__LINKS_MAX + (size_t)server->more_most;
    server->peers = dp__os_alloc((peers + 1) * sizeof *server->peers, 64, NULL);
    server->pending = dp__os_alloc(pending * sizeof *server->pending, 64, NULL);
    server->watch = dp__os_alloc(watched * sizeof *server->watch, 64, NULL);
    for (size_t i = 0; i < peers && server->peers != NULL; i++)
        server->peers[i] = (dp__peer){.fd = -1};
    if (server->peers == NULL || server->pending == NULL || server->watch == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", server->process_count);
    server->raised = server->all && !server->any;
    if (server->raised)
        dp__os_files_raise(peers + DP__PENDING_MAX);
    return DP_OK;
}

/* Connections that the tree has taken over are no longer here. */
static void dp__server_hang_up(dp__server *server)
{
    dp__os_drop(&server->listener);
    for (int i = 0; server->peers != NULL && i < server->peer_count; i++)
        dp__os_drop(&server->peers[i].fd);
    while (server->pending_count > 0)
        dp__os_close(server->pending[--server->pending_count].fd);
}

static void dp__server_close(dp__server *server)
{
    if (server->listener >= 0)
        dp__os_forget(&server->at);
    dp__server_hang_up(server);
    if (server->raised)
        dp__os_files_lower();
    dp__os_free(server->peers, 0, NULL);
    dp__os_free(server->pending, 0, NULL);
    dp__os_free(server->watch, 0, NULL);
}

static bool dp__server_twice(dp__server *server, int process)
{
    server->twice = !server->any; /* where bytes that were recorded may come */
    snprintf(server->said, DP__SAID_BYTES,
             "two processes are process %d of %d %s: either two jobs have the same address (give "
             "each its own, or a DP_SECRET), or one of the two has a wrong number",
             process, server->process_count, server->launch->where);
    return false;
}

/* NULL: that number is none of those that may connect. */
static dp__peer *dp__server_peer(const dp__server *server, int process)
{
    bool behind = process >= server->first && process - server->first < server->peer_count;
    return behind ? &server->peers[process - server->first] : NULL;
}

/* Returns true if a process that has the key may join. If not, server->said gets the reason, which
   is not a failure of this process. */
static bool dp__server_admits(dp__server *server, const dp__join_request *request)
{
    int who = request->process;
    const dp__peer *peer = dp__server_peer(server, who);
    char *said = server->said;
    if (request->version != DP_VERSION)
        snprintf(said, DP__SAID_BYTES, "process %d has dp.h %d, process %d has %d", who,
                 (int)request->version, server->process, DP_VERSION);
    else if (request->process_count != server->process_count)
        snprintf(said, DP__SAID_BYTES, "process %d counts %d processes, process %d counts %d", who,
                 (int)request->process_count, server->process, server->process_count);
    else if (who == server->process || (peer != NULL && peer->taken))
        return dp__server_twice(server, who);
    else if (peer == NULL || (!server->all && dp__parent(who) != server->process))
        snprintf(said, DP__SAID_BYTES, "process %d does not belong behind process %d", who,
                 server->process);
    else
        return true;
    return false;
}

typedef enum dp__heard { DP__MORE, DP__REQUESTED, DP__PROVED, DP__NOISE } dp__heard;

/* How many bytes a pending connection has to send next. */
static size_t dp__pending_bytes(const dp__pending *pending)
{
    return pending->asked ? sizeof(uint64_t) : sizeof(dp__join_request);
}

/* Checks pending->got bytes, which are untrusted. */
static dp__heard dp__pending_hear(dp__key key, dp__pending *pending)
{
    uint64_t proof;
    if (pending->got < dp__pending_bytes(pending))
        return DP__MORE;
    pending->got = 0;
    if (pending->asked) {
        memcpy(&proof, pending->said, sizeof proof);
        return proof == dp__proof(key, &pending->request, pending->nonce, true) ? DP__PROVED
                                                                                : DP__NOISE;
    }
    memcpy(&pending->request, pending->said, sizeof pending->request);
    pending->asked = true;
    return pending->request.magic == DP__JOIN_MAGIC ? DP__REQUESTED : DP__NOISE;
}

/* The connection belongs to the peer from now on, or to the tree. The first process to arrive has
   waited longest: all have the time that it has left. */
static void dp__server_add(dp__server *server, const dp__pending *pending)
{
    dp__peer *peer = &server->peers[pending->request.process - server->first];
    uint64_t until = dp__os_after_ms(pending->request.patience_ms);
    peer->taken = true;
    if (server->all)
        peer->fd = pending->fd;
    else
        dp__tree_link(server->tree, pending->fd, pending->request.process);
    peer->listens = pending->request.listens;
    memcpy(peer->host, pending->request.host, sizeof peer->host);
    peer->host[sizeof peer->host - 1] = '\0';
    if (peer->host[0] == '\0')
        dp__os_host_of(pending->fd, false, peer->host, sizeof peer->host);
    if (until < server->until_ns) {
        server->shorter_ns += server->until_ns - until;
        server->earliest = pending->request.process;
        server->until_ns = until;
    }
    if (server->all && !server->launch->numbered && !server->launch->secret)
        server->quiet_ns = dp__os_after_ms(DP__QUIET_MS);
    server->taken++;
}

/* Returns true if that process has been told that no process may join any more. It then comes for
   another try, before which this process has to be ready; where a number came twice, it may be
   another process. */
static bool dp__server_has_told(const dp__server *server, int process)
{
    const dp__peer *peer = dp__server_peer(server, process);
    bool late = peer != NULL && !peer->taken;
    return server->failed != DP_OK && !server->twice && !late;
}

/* A process that comes too late is told why. */
static void dp__server_reject(dp__server *server, const dp__pending *pending)
{
    if (!server->twice) {
        server->peers[pending->request.process - server->first].taken = true;
        server->taken++;
    }
    dp__tree_header_failure(pending->fd, server->failed, server->process, dp_last_error());
}

/* false: the connection is closed, or belongs to a peer. */
static bool dp__server_answer(dp__server *server, dp__pending *pending, dp__heard heard)
{
    if (dp__server_has_told(server, pending->request.process)) {
        dp__os_close(pending->fd);
        return false;
    }
    bool here = !server->any || pending->request.listens == (uint64_t)server->process;
    if (heard == DP__REQUESTED && here) {
        pending->nonce = server->any ? DP__LISTENER_NONCE : dp__os_random();
        dp__challenge challenge = {
            DP__CHALLENGE_MAGIC, DP_VERSION, pending->nonce,
            dp__proof(server->key, &pending->request, pending->nonce, false)};
        if (dp__os_send(pending->fd, &challenge, sizeof challenge) == (ptrdiff_t)sizeof challenge)
            return true;
    } else if (heard == DP__PROVED && server->failed != DP_OK) {
        dp__server_reject(server, pending);
    } else if (heard == DP__PROVED) {
        if (dp__server_admits(server, &pending->request)) {
            dp__server_add(server, pending);
            return false;
        }
        if (!server->any) /* who calls there does not listen for headers */
            dp__tree_header_failure(pending->fd, DP_ERR_MISMATCH, server->process, server->said);
    }
    server->rejected += heard == DP__NOISE && pending->asked;
    dp__os_close(pending->fd);
    return false;
}

/* Read from a pending connection; false: it is no longer pending. */
static bool dp__server_read(dp__server *server, dp__pending *pending)
{
    ptrdiff_t got = dp__os_receive(pending->fd, pending->said + pending->got,
                                   dp__pending_bytes(pending) - pending->got);
    if (got < 0) {
        server->rejected += pending->asked; /* its key is another one: it closed */
        dp__os_close(pending->fd);
        return false;
    }
    pending->got += (size_t)got;
    dp__heard heard = dp__pending_hear(server->key, pending);
    return heard == DP__MORE || dp__server_answer(server, pending, heard);
}

/* Closes a connection on which nothing has come for long. One that has asked may be of this job,
   and held up: it takes itself for let in once it has sent its proof. */
static bool dp__server_keeps(const dp__server *server, const dp__pending *pending)
{
    uint64_t most_ms = server->full ? DP__QUIET_MS : DP__PENDING_MS;
    bool stays = pending->asked && !server->any && !server->full;
    if (stays || dp__os_now_ns() - pending->came_ns < most_ms * 1000000)
        return true;
    dp__os_close(pending->fd);
    return false;
}

/* Returns true if `a` is replaced sooner than `b`: a connection with a request may be of this job.
   */
static bool dp__server_drops_first(const dp__pending *a, const dp__pending *b)
{
    return a->asked != b->asked ? b->asked : a->came_ns < b->came_ns;
}

/* The connection that is replaced first; -1: none is pending. */
static int dp__server_first_to_drop(const dp__server *server)
{
    int place = server->pending_count - 1;
    for (int i = place - 1; i >= 0; i--)
        if (dp__server_drops_first(&server->pending[i], &server->pending[place]))
            place = i;
    return place;
}

/* If there is no place left, the connection that has been silent for longest is replaced. */
static void dp__server_hold(dp__server *server, int fd)
{
    int place = server->pending_count;
    if (place == server->pending_capacity) {
        place = dp__server_first_to_drop(server);
        dp__os_close(server->pending[place].fd);
    } else {
        server->pending_count++;
    }
    server->pending[place] = (dp__pending){.fd = fd, .came_ns = dp__os_now_ns()};
}

/* This process may open no more files. Those that are pending come in first, or go: then it is
   known who needs a file. */
static dp_status dp__server_full(dp__server *server)
{
    server->full = server->pending_count > 0 || server->any; /* then they come later */
    if (server->full)
        return DP_OK;
    return dp_error(DP_ERR_NO_MEMORY,
                    "process %d has %d of %d connections and may open no more files than %llu: "
                    "raise its hard limit (ulimit -Hn, LimitNOFILE of a service) to %d or more",
                    server->process, server->taken, server->expected,
                    (unsigned long long)dp__os_files_limit(), server->expected + DP__PENDING_MAX);
}

/* Accept new connections: only so many at once, since those accepted are served first. */
static dp_status dp__server_accept(dp__server *server, int listener)
{
    bool full = false;
    int fd = 0;
    for (int i = 0; i < DP__ACCEPT_MAX && fd >= 0; i++) {
        fd = dp__os_accept(listener, &full);
        if (fd >= 0 && (!dp__os_is_local(&server->at) || dp__os_same_user(fd)))
            dp__server_hold(server, fd);
        else
            dp__os_close(fd);
    }
    return full ? dp__server_full(server) : DP_OK;
}

/* ==== >>awaiting =================================================================================
   Whoever serves looks at all that has happened, again and again, until all have joined and then
   until all have met their neighbours, or until it has to say who is missing.                    */

/* Returns true if this process still waits for that peer. */
static bool dp__server_misses(const dp__server *server, int peer)
{
    if (server->welcomed)
        return !server->peers[peer].ready;
    return !server->peers[peer].taken &&
           (server->all || dp__parent(server->first + peer) == server->process);
}

/* "process 3", "processes 3 and 7", "processes 1, 2 and 40 more" */
static void dp__server_name_missing(const dp__server *server, char *text, size_t room)
{
    int missing = server->expected - (server->welcomed ? server->ready : server->taken), named = 0;
    size_t used = (size_t)snprintf(text, room, missing == 1 ? "process" : "processes");
    for (int i = 0; i < server->peer_count && named < missing; i++) {
        int process = server->first + i;
        if (!dp__server_misses(server, i))
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

/* Returns for how long this process was held up; 0: not for much of the time. */
static int dp__server_held_ms(const dp__server *server)
{
    uint64_t most_ns = (server->until_ns - server->opened_ns) / 8;
    return server->held_ns >= most_ns ? (int)(server->held_ns / 1000000) : 0;
}

/* Puts in words that this process came late itself, if it did: others have waited for much of their
   time when they find it. */
static void dp__server_say_late(const dp__server *server, char *text, size_t room)
{
    text[0] = '\0';
    if (server->shorter_ns > (server->until_ns - server->opened_ns) / 4)
        snprintf(text, room, "; process %d itself came %.3g s after process %d", server->process,
                 (double)server->shorter_ns * 1e-9, server->earliest);
}

/* Fails as some did not come. Inside a machine, a process with another secret connects to another
   name, and is not noticed. Those of this job, too, close their connections while this process is
   held up, as those of another job do. */
static dp_status dp__server_timed_out(const dp__server *server)
{
    char missing[160], rejected[80] = "", late[80];
    double seconds = (double)(server->until_ns - server->opened_ns) * 1e-9;
    dp__server_name_missing(server, missing, sizeof missing);
    if (server->welcomed)
        return dp_error(DP_ERR_TIMEOUT,
                        "%s of %d joined, but did not connect to the others within %.3g s", missing,
                        server->process_count, seconds);
    if (server->rejected > 0 && dp__server_held_ms(server) == 0)
        snprintf(rejected, sizeof rejected,
                 "; connections from another job, or with another DP_SECRET: %d", server->rejected);
    else if (server->launch->host[0] == '\0' && !server->launch->agreed)
        strcpy(rejected, "; a process with another DP_SECRET cannot find this one");
    dp__server_say_late(server, late, sizeof late);
    return dp_error(DP_ERR_TIMEOUT, "%s of %d did not come within %.3g s%s%s%s%s%s", missing,
                    server->process_count, seconds, late, rejected,
                    server->said[0] != '\0' ? " (" : "", server->said,
                    server->said[0] != '\0' ? ", and was refused)" : "");
}

/* Adds to a sentence that a process was held up, if it was. */
DP__COLD static dp_status dp__add_held_up(dp_status status, int process, int held_ms)
{
    char why[DP__TEXT_BYTES];
    if (held_ms <= 0)
        return status;
    memcpy(why, dp_last_error(), sizeof why);
    return dp_error(status, "%s; process %d was held up for %.3g s or longer", why, process,
                    held_ms * 1e-3);
}

/* A peer sends nothing until it has connected to its neighbours, or has failed. */
static dp_status dp__server_receive(dp__server *server, int place)
{
    dp__tree_header header, here = {DP__HEADER_MAGIC, DP__HERE, dp__server_held_ms(server), 0, 0};
    dp__peer *peer = &server->peers[place];
    uint64_t until_ns = dp__os_after_ms(DP__GRACE_MS);
    bool sound = dp__wire_receive(peer->fd, &header, sizeof header, until_ns) == DP_OK &&
                 dp__tree_header_is_sound(&header);
    if (sound && header.kind == DP__FAILED)
        return dp__failure_shared(peer->fd, &header);
    sound = sound && server->welcomed;
    if (sound && header.kind == DP__ASK)
        return dp__tree_header_send(peer->fd, &here, NULL, until_ns);
    if (sound && header.kind == DP__READY && !peer->ready) {
        peer->ready = true;
        server->ready++;
        return DP_OK;
    }
    return dp_error(DP_ERR_REMOTE, "process %d of %d joined, and ended before all %s",
                    server->first + place, server->process_count,
                    server->welcomed ? "had connected" : "had joined");
}

/* How long the peers are left alone; 0: it is time to look at them. */
static int dp__server_rest_ms(const dp__server *server)
{
    bool many = server->all && server->failed == DP_OK && server->taken > DP__PEERS_FEW;
    return many ? dp__os_ms_until(server->peers_ns) : 0;
}

/* Watch the peers that have joined: those behind this process in the tree may report a failure.
   What comes from those that nobody waits for is for somebody else. */
static int dp__server_watch(dp__server *server, dp__os_watch *watch)
{
    int count = 0;
    if (server->failed != DP_OK || server->any)
        return 0;
    if (!server->all)
        return dp__tree_watch(server->tree, watch);
    server->peers_ns = dp__os_now_ns() + (uint64_t)server->taken * DP__PEER_NS;
    for (int i = 0; i < server->peer_count; i++)
        if (server->peers[i].taken)
            watch[count++] = (dp__os_watch){.fd = server->peers[i].fd, .events = DP__CAN_READ};
    return count;
}

static dp_status dp__server_receive_all(dp__server *server, const dp__os_watch *watch, int count)
{
    if (!server->all)
        return dp__tree_hear_all(server->tree, watch, count, false);
    for (int i = 0, k = 0; i < server->peer_count && k < count; i++)
        if (server->peers[i].taken && watch[k++].revents != 0)
            DP_TRY(dp__server_receive(server, i));
    return DP_OK;
}

static bool dp__server_is_done(const dp__server *server)
{
    if (server->welcomed)
        return server->ready == server->expected;
    return server->taken == server->expected &&
           (dp__os_ms_until(server->quiet_ns) == 0 || dp__os_ms_until(server->until_ns) == 0);
}

static int dp__server_patience(const dp__server *server)
{
    bool quiet = !server->welcomed && server->taken == server->expected && server->more == NULL;
    int ms = dp__os_ms_until(quiet ? server->quiet_ns : server->until_ns);
    bool looks = server->more != NULL || server->launch->hear != NULL;
    int most = looks && !server->full ? DP__CALL_LOOK_MS : DP__QUIET_MS;
    return ms < most ? ms : most;
}

/* Notes for how long this process was held up, if it was; returns the time. */
static uint64_t dp__server_note_time(dp__server *server)
{
    uint64_t now = dp__os_now_ns();
    if (dp__was_held_up(server->due_ns, now))
        server->held_ns += now - server->due_ns;
    server->due_ns = now;
    return now;
}

/* Look once at everything that has happened. Pending connections are served backwards, because the
   last one takes the place of one that is removed. */
static dp_status dp__server_look(dp__server *server)
{
    dp__os_watch *watch = server->watch, *peers = watch + 2;
    server->full = server->full && server->pending_count > 0;
    int ms = dp__server_patience(server), rest_ms = dp__server_rest_ms(server);
    int peer_count = rest_ms == 0 ? dp__server_watch(server, peers) : 0;
    dp__os_watch *pending = peers + peer_count;
    watch[0] = (dp__os_watch){.fd = server->full ? -1 : server->listener, .events = DP__CAN_READ};
    watch[1] = (dp__os_watch){.fd = server->full || server->tree == NULL ? -1 : server->tree->claim,
                              .events = DP__CAN_READ};
    for (int i = 0; i < server->pending_count; i++)
        pending[i] = (dp__os_watch){.fd = server->pending[i].fd, .events = DP__CAN_READ};
    dp__os_watch *more = pending + server->pending_count;
    size_t more_bytes = (size_t)server->more_count * sizeof *more;
    if (more_bytes > 0)
        memcpy(more, server->more, more_bytes);
    server->due_ns += (uint64_t)ms * 1000000;
    dp__os_poll(watch, 2 + peer_count + server->pending_count + server->more_count,
                rest_ms > 0 && rest_ms < ms ? rest_ms : ms);
    dp__server_note_time(server);
    if (more_bytes > 0)
        memcpy(server->more, more, more_bytes);
    DP_TRY(dp__server_receive_all(server, peers, peer_count));
    for (int i = server->pending_count; i-- > 0;)
        if (pending[i].revents != 0 ? !dp__server_read(server, &server->pending[i])
                                    : !dp__server_keeps(server, &server->pending[i]))
            server->pending[i] = server->pending[--server->pending_count];
    if (server->twice && server->failed == DP_OK)
        return dp_error(DP_ERR_MISMATCH, "%s", server->said);
    for (int i = 0; i < 2; i++)
        if (watch[i].revents != 0)
            DP_TRY(dp__server_accept(server, watch[i].fd));
    return DP_OK;
}

/* All processes that have come are told the reason; so are those that come within a while. */
static dp_status dp__server_fail(dp__server *server, dp_status status)
{
    char why[DP__TEXT_BYTES];
    memcpy(why, dp_last_error(), sizeof why);
    for (int i = 0; i < server->peer_count; i++)
        dp__tree_header_last(&server->peers[i].fd, status, server->process, why);
    server->failed = status;
    server->until_ns = server->quiet_ns = dp__os_after_ms(server->launch->again ? 0 : DP__GRACE_MS);
    while ((server->twice || server->taken < server->expected) &&
           dp__os_ms_until(server->until_ns) > 0 && dp__server_look(server) == DP_OK) {
    }
    return dp_error(status, "%s", why);
}

/* Begins to wait until server->until_ns. */
static void dp__server_begin(dp__server *server)
{
    server->opened_ns = dp__os_now_ns();
    if (server->opened_ns > server->until_ns) /* it was held up before this */
        server->opened_ns = server->until_ns;
    if (server->due_ns == 0 || !server->all)
        server->due_ns = server->opened_ns;
    server->again = false;
}

/* Returns true if another process has said who it is, and is about to prove it. */
static bool dp__server_is_asked(const dp__server *server)
{
    bool asked = false;
    for (int i = 0; i < server->pending_count; i++)
        asked = asked || server->pending[i].asked;
    return asked;
}

/* Returns true once the time is up; to be asked before each look. A process that was held up has a
   while more, once, and so has one that is about to be joined: it would be named as one that did
   not come. */
static bool dp__server_is_over(dp__server *server)
{
    if (dp__server_note_time(server) < server->until_ns)
        return false;
    if (!server->again && dp__server_is_asked(server)) {
        server->again = true;
        server->until_ns = dp__os_after_ms(DP__AGAIN_MS);
        return false;
    }
    bool last = server->again || dp__server_held_ms(server) == 0;
    return last || dp__ms_left(&server->until_ns, &server->again) == 0;
}

/* Adds to why others did not come that this process was held up, if it was. */
DP__COLD static dp_status dp__server_held_up(const dp__server *server, dp_status status)
{
    return dp__add_held_up(status, server->process, dp__server_held_ms(server));
}

/* Wait until all are here, or, once they are, until they have met each other. */
DP__COLD static dp_status dp__server_wait(dp__server *server)
{
    dp_status status = DP_OK;
    dp__server_begin(server);
    while (!dp__server_is_done(server) && status == DP_OK) {
        status = dp__server_is_over(server)
                     ? dp__server_held_up(server, dp__server_timed_out(server))
                     : dp__server_look(server);
        if (status == DP_OK)
            status = dp__launch_hear(server->launch);
    }
    return status == DP_OK || !server->all ? status : dp__server_fail(server, status);
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
            "process 0 of %d cannot listen %s: a process of user %llu%s has its name on this "
            "machine. Use another address or DP_SECRET",
            launch->process_count, launch->where, (unsigned long long)owner->user, who);
    return dp_error(DP_ERR_MISMATCH,
                    "process 0 of %d is not the only one %s: another process 0%s has that address. "
                    "Give each job its own address, or a DP_SECRET",
                    launch->process_count, launch->where, who);
}

static dp_status dp__listen_nowhere(int process)
{
    return dp_error(DP_ERR_NO_MEMORY, "process %d cannot open a port, or any more files", process);
}

/* On all interfaces, as the name of a host may mean another address on the host itself; but if it
   says that all are on this machine, only they can connect, and if it is the address of the one
   that is wanted, only who reaches that one. */
static bool dp__listen_on(dp__server *server, const char *host, int port)
{
    dp__os_found found = {.count = 0};
    if (dp__is_loopback(host) || strcmp(host, server->launch->own) == 0)
        dp__os_look_up(host, port, false, &found);
    else
        found.count = dp__os_everywhere(port, found.list);
    for (int i = 0; i < found.count && server->listener < 0; i++) {
        server->at = found.list[i];
        server->listener = dp__os_listen(&found.list[i]);
    }
    return server->listener >= 0;
}

static dp_status dp__listen_here(dp__server *server, const dp__launch *launch)
{
    dp__os_owner owner = {0, 0};
    int other;
    server->at = dp__os_local(launch->place);
    server->listener = dp__listen_at(&server->at, &other);
    bool known = dp__os_owner_of(other, &owner);
    dp__os_close(other);
    if (server->listener >= 0)
        return DP_OK;
    return known ? dp__claim_is_taken(launch, &owner) : dp__listen_nowhere(server->process);
}

static dp_status dp__listen_first(dp__server *server, const dp__launch *launch)
{
    if (launch->host[0] == '\0')
        return dp__listen_here(server, launch);
    for (int i = 0; i < launch->port_count; i++)
        if (dp__listen_on(server, launch->host, launch->port + i))
            return DP_OK;
    return dp_error(
        DP_ERR_INVALID,
        "process 0 cannot listen at %s: its ports %d to %d are taken; DP_ADDR=host:port "
        "names others",
        launch->host, launch->port, launch->port + launch->port_count - 1);
}

/* Any port, or one of those that there may be. Process 0 of another job, or of this one, may want
   that where it is met and those after it: they come last, and that one at the very end. */
static dp_status dp__listen_within(dp__server *server, const dp__launch *launch)
{
    dp__ports ports = launch->ports;
    const char *host = launch->own[0] != '\0' ? launch->own : launch->host;
    int count = ports.last - ports.first + 1;
    int met = dp__launch_may(launch, launch->port) ? launch->port - ports.first : 0;
    if (ports.last == 0)
        return dp__listen_on(server, host, 0) ? DP_OK : dp__listen_nowhere(server->process);
    for (int i = 1; i <= count; i++)
        if (dp__listen_on(server, host, ports.first + (met + count - i) % count))
            return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "process %d cannot listen: the ports of DP_PORTS, %d to %d, are taken. See "
                    "DP_PORTS in dp.h for how many are needed",
                    server->process, ports.first, ports.last);
}

/* Listens where those behind this process will find it. */
static dp_status dp__listen_behind(dp__server *server, const dp__launch *launch,
                                   uint64_t *out_listens)
{
    char place[DP__PLACE_BYTES + 24];
    int other = -1;
    *out_listens = dp__os_random() | 1;
    snprintf(place, sizeof place, "%s-%016llx", launch->place, (unsigned long long)*out_listens);
    if (launch->host[0] != '\0') {
        DP_TRY(dp__listen_within(server, launch));
        *out_listens = (uint64_t)dp__os_port(server->listener);
        return DP_OK;
    }
    server->at = dp__os_local(place);
    server->listener = dp__listen_at(&server->at, &other);
    dp__os_close(other);
    return server->listener >= 0 ? DP_OK : dp__listen_nowhere(server->process);
}

/* ==== >>connecting =============================================================================
   How a process finds and joins another one: process 0 first, then its parent in the tree.       */

typedef struct dp__target { /* where somebody listens */
    const char *host;       /* "": inside this machine, at `place` */
    int port, port_count;
    char place[DP__PLACE_BYTES];
    const dp__launch *launch; /* it is process 0; else NULL */
    dp__tree *tree;           /* who may fail meanwhile; or NULL */
} dp__target;

/* As it was when a round ended; anything else that was found stays. */
static const char dp__refused[] = "nobody listens there";
static const char dp__silent[] = "a program listens there that does not answer";

static const char *dp__lasting(const char *why)
{
    return why == dp__refused || why == dp__silent ? NULL : why;
}

/* false: the listener is not of this job, or did not answer in time. */
static bool dp__handshake(int fd, dp__key key, dp__join_request *request, uint64_t until_ns,
                          const char **out_why)
{
    dp__challenge challenge;
    request->nonce = dp__os_random();
    if (dp__wire_send(fd, request, sizeof *request, until_ns) != DP_OK ||
        dp__wire_receive(fd, &challenge, sizeof challenge, until_ns) != DP_OK ||
        challenge.magic != DP__CHALLENGE_MAGIC)
        return false;
    if (challenge.proof != dp__proof(key, request, challenge.nonce, false)) {
        *out_why = "the listener belongs to another job, or has another DP_SECRET";
        return false;
    }
    uint64_t proof = dp__proof(key, request, challenge.nonce, true);
    return dp__wire_send(fd, &proof, sizeof proof, until_ns) == DP_OK;
}

/* Take the name of process 0. If another process has it and still waits for others, it is told.
   Another context of this process may have it for the same job. */
static dp_status dp__claim(dp__tree *tree, const dp__launch *launch)
{
    dp__join_request request = {DP__JOIN_MAGIC, DP_VERSION, .process_count = launch->process_count};
    dp__os_owner owner = {0, 0};
    const char *why;
    int other;
    tree->claimed = dp__claim_of(launch);
    tree->claim = dp__listen_at(&tree->claimed, &other);
    bool known = dp__os_owner_of(other, &owner);
    bool foreign = known && owner.process != (uint64_t)dp__os_process_id();
    if (foreign)
        (void)dp__handshake(other, launch->key, &request, dp__os_after_ms(DP__GRACE_MS), &why);
    dp__os_close(other);
    if (foreign)
        return dp__claim_is_taken(launch, &owner);
    return known || tree->claim >= 0 ? DP_OK : dp__listen_nowhere(launch->process);
}

static dp_status dp__connect_nowhere(int process)
{
    return dp_error(DP_ERR_NO_MEMORY,
                    "process %d has no room for a connection: it may open no more files than %llu, "
                    "see ulimit -Hn, or LimitNOFILE of a service",
                    process, (unsigned long long)dp__os_files_limit());
}

/* DP_PENDING: nobody of this job is there, or not now. DP_OK: the connection stays. An error: there
   can be none. */
static dp_status dp__connect_at(const dp__os_address *at, dp__key key, dp__join_request *request,
                                uint64_t until_ns, int *out_fd, const char **out_why)
{
    int fd = dp__os_connect(at);
    for (; fd == DP__OS_CROWDED && dp__os_ms_until(until_ns) > 0; fd = dp__os_connect(at))
        dp__os_sleep_ms(1);
    if (fd == DP__OS_FULL)
        return dp__connect_nowhere((int)request->process);
    if (fd == DP__OS_REFUSED)
        *out_why = dp__refused;
    if (fd < 0)
        return DP_PENDING;
    int how = dp__os_ready(fd, DP__CAN_WRITE, dp__os_ms_until(until_ns)) ? dp__os_connection(fd)
                                                                         : -1;
    bool good = how == 0;
    if (how == DP__OS_REFUSED)
        *out_why = dp__refused;
    if (good && dp__os_is_local(at) && !dp__os_same_user(fd)) {
        *out_why = "its place is held by another user of this machine";
        good = false;
    }
    if (good) {
        *out_why = dp__silent; /* unless it says more */
        good = dp__handshake(fd, key, request, until_ns, out_why);
    }
    *out_fd = good ? fd : -1;
    if (!good)
        dp__os_close(fd);
    return good ? DP_OK : DP_PENDING;
}

/* Returns how long a silent one is waited for: longer every round, as it may be busy. Process 0
   takes the first port that it finds free: behind one where nobody listens a silent one is rather
   another program, and process 0 may come to that one at any moment. */
static int dp__patience_ms(int round, bool behind_a_free_one)
{
    return (behind_a_free_one ? 100 : 1000) << (round < 5 ? round : 5);
}

/* Returns how long to rest after a round that was in vain. */
static int dp__pause_ms(int round)
{
    return round < 7 ? 1 << round : 100;
}

/* Try every address and port once. Whoever is silent there gets only its share of what is left to
   those after it and to the next round, as it may be a program that knows nothing about us. */
static dp_status dp__connect_once(const dp__target *target, dp__key key, dp__join_request *request,
                                  int round, uint64_t until_ns, int *out_fd, const char **out_why)
{
    dp__os_found found;
    int rest = dp__os_ms_until(until_ns);
    dp_status status = DP_PENDING;
    if (target->host[0] == '\0') {
        /* One of the job listens there, or another user of the machine. */
        dp__os_address here = dp__os_local(target->place);
        int patience = dp__patience_ms(round, false);
        uint64_t until = dp__os_after_ms(patience < rest ? patience : rest);
        until = target->tree == NULL ? until_ns : until;
        return dp__connect_at(&here, key, request, until, out_fd, out_why);
    }
    dp__os_resolve(dp__os_look_up, target->host, target->port, rest, &found);
    *out_why = found.count == 0 ? found.why : *out_why;
    int count = target->port_count * found.count, refused = 0;
    for (int i = 0; i < count && status == DP_PENDING && dp__os_ms_until(until_ns) > 0; i++) {
        dp__os_address at =
            dp__os_at_port(&found.list[i % found.count], target->port + i / found.count);
        int share = dp__os_ms_until(until_ns) / (count - i + 1);
        int patience = dp__patience_ms(round, refused >= found.count);
        uint64_t until = dp__os_after_ms(patience < share ? patience : share);
        const char *why = NULL;
        status = dp__connect_at(&at, key, request, until, out_fd, &why);
        refused += why == dp__refused;
        if (dp__lasting(why) != NULL || (why == dp__silent && *out_why == NULL))
            *out_why = why;
    }
    if (*out_why == NULL && refused == count)
        *out_why = dp__refused;
    return status;
}

/* Another job may have this address, whose processes have met already; or process 0 of this one is
   on this machine, and could not be reached. It looks at its claim only as long as it waits. */
DP__COLD static const char *dp__claim_text(const dp__launch *launch, char *text, size_t room)
{
    char who[48];
    dp__os_owner owner = {0, 0};
    dp__os_address claim = dp__claim_of(launch);
    int fd = dp__os_connect(&claim);
    text[0] = '\0';
    if (fd >= 0 && dp__os_owner_of(fd, &owner))
        snprintf(text, room, ". There is a process 0%s %s", dp__owner_text(&owner, who, sizeof who),
                 dp__os_is_attended(fd, DP__GRACE_MS) ? "that waits for others"
                                                      : "whose job has started already");
    dp__os_close(fd);
    return text;
}

DP__COLD static dp_status dp__connect_failed(const dp__target *target, int process,
                                             const dp__join_request *request, double seconds,
                                             const char *why)
{
    char claim[128] = "";
    if (target->launch != NULL)
        dp__claim_text(target->launch, claim, sizeof claim);
    if (target->host[0] == '\0' && (target->launch == NULL || target->launch->agreed))
        return dp_error(DP_ERR_TIMEOUT, "process %d of %d was not found within %.3g s", process,
                        (int)request->process_count, seconds);
    if (target->host[0] == '\0')
        return dp_error(
            DP_ERR_TIMEOUT,
            "process %d of %d was not found %s within %.3g s%s%s%s. It may have another DP_SECRET; "
            "if it is on another machine, set DP_ADDR=host:port",
            process, (int)request->process_count, target->launch->where, seconds,
            why != NULL ? ": " : "", why != NULL ? why : "", claim);
    return dp_error(DP_ERR_TIMEOUT,
                    "process %d of %d did not answer at %s, ports %d to %d, within %.3g s%s%s%s",
                    process, (int)request->process_count, target->host, target->port,
                    target->port + target->port_count - 1, seconds, why != NULL ? ": " : "",
                    why != NULL ? why : "", claim);
}

DP__COLD static dp_status dp__connect_until(const dp__target *target, int process, dp__key key,
                                            dp__join_request *request, uint64_t until_ns,
                                            int *out_fd)
{
    uint64_t begin = dp__os_now_ns();
    const char *why = NULL, *found = NULL;
    bool again = false;
    for (int round = 0; dp__ms_left(&until_ns, &again) > 0; round++) {
        why = dp__lasting(why);
        if (target->tree != NULL)
            DP_TRY(dp__tree_listen(target->tree));
        if (target->launch != NULL)
            DP_TRY(dp__launch_hear(target->launch));
        request->patience_ms = (uint32_t)dp__os_ms_until(until_ns);
        dp_status status = dp__connect_once(target, key, request, round, until_ns, out_fd, &why);
        if (status != DP_PENDING)
            return status;
        found = why != NULL ? why : found;
        int pause = dp__pause_ms(round), rest = dp__os_ms_until(until_ns);
        dp__os_sleep_ms(pause < rest ? pause : rest);
    }
    return dp__connect_failed(target, process, request, (double)(dp__os_now_ns() - begin) * 1e-9,
                              found);
}

/* ==== >>meeting ================================================================================
   Each process connects to process 0, tells it where it listens, and learns its parent when all are
   there. Then the tree is connected from the top. When all processes are in it, they close the
   connections to process 0 that are not part of it.

   A process may miss a neighbour that still waits for process 0 to say where to go. So it asks
   process 0 whether it is there before it names that neighbour, and a process that has waited for
   process 0 in vain tells it so. Process 0, and whoever waits for its children, says in that case
   whether it was held up itself for much of the time, by a signal, by a debugger, or as its machine
   slept: then others may have given up because of it.                                           */

/* Process 0 says when all are here, or why not. */
static dp_status dp__await_welcome(int fd, int process_count, uint64_t until_ns, dp__welcome *out)
{
    dp__tree_header header;
    dp_status status = dp__wire_receive(fd, &header, sizeof header, until_ns);
    if (status == DP_OK && (!dp__tree_header_is_sound(&header) ||
                            (header.kind != DP__WELCOME && header.kind != DP__FAILED)))
        status = DP_ERR_REMOTE;
    if (status == DP_OK && header.kind == DP__FAILED)
        return dp__failure_receive(fd, &header, until_ns);
    if (status == DP_OK)
        status = dp__wire_receive(fd, out, sizeof *out, until_ns);
    out->host[DP__PLACE_BYTES - 1] = '\0';
    if (status == DP_ERR_TIMEOUT)
        return dp_error(status, "process 0 of %d did not report in time whether all have joined",
                        process_count);
    if (status == DP_ERR_REMOTE)
        return dp_error(status, "process 0 of %d ended before all had joined", process_count);
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
static void dp__welcome_all(dp__server *server)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__WELCOME, DP_OK, 0, sizeof(dp__welcome)};
    int left_ms = dp__os_ms_until(server->until_ns);
    left_ms = left_ms > DP__GRACE_MS ? left_ms : DP__GRACE_MS;
    dp__welcome welcome = {.run = dp__os_random(), .patience_ms = (uint32_t)left_ms};
    for (int process = 1; process < server->process_count; process++) {
        int parent = dp__parent(process);
        const dp__peer *peer = &server->peers[process - 1];
        const dp__peer *next = parent == 0 ? peer : &server->peers[parent - 1];
        welcome.listens = next->listens;
        memcpy(welcome.host, next->host, sizeof welcome.host);
        (void)dp__tree_header_send(peer->fd, &header, &welcome, dp__os_after_ms(DP__GRACE_MS));
    }
    server->welcomed = true;
    server->tree->ends_ns = dp__os_after_ms(left_ms);
    server->until_ns = dp__os_after_ms((int64_t)left_ms + dp__levels_ms(server->process_count));
}

/* All have met: only those right behind process 0 stay connected to it. */
static void dp__go_all(dp__tree *tree, dp__server *server)
{
    dp__tree_header header = {DP__HEADER_MAGIC, DP__GO, DP_OK, 0, 0};
    for (int process = 1; process < tree->process_count; process++) {
        dp__peer *peer = &server->peers[process - 1];
        (void)dp__tree_header_send(peer->fd, &header, NULL, dp__os_after_ms(DP__GRACE_MS));
        if (dp__parent(process) != 0)
            continue;
        dp__tree_link(tree, peer->fd, process);
        peer->fd = -1;
    }
}

/* As process 0. */
DP__COLD static dp_status dp__meet_first(dp__tree *tree, const dp__launch *launch,
                                         dp__server *server)
{
    server->all = true;
    DP_TRY(dp__server_open(server));
    if (launch->listener == NULL) {
        DP_TRY(dp__claim(tree, launch));
        DP_TRY(dp__listen_first(server, launch));
    } else {
        server->listener = *launch->listener;
    }
    DP_TRY(dp__server_wait(server));
    dp__welcome_all(server);
    DP_TRY(dp__server_wait(server));
    dp__go_all(tree, server);
    return DP_OK;
}

/* Returns until when there is time for the rest. What process 0 says may have been on its way for a
   while: `latest_ns` is when it was waited for at most. */
static uint64_t dp__meet_ends_ns(const dp__welcome *welcome, uint64_t latest_ns)
{
    uint64_t ends_ns = dp__os_after_ms(welcome->patience_ms);
    return ends_ns < latest_ns ? ends_ns : latest_ns;
}

/* Fails as a neighbour did not come, or because of process 0, if that does not answer now. */
DP__COLD static dp_status dp__meet_missed(dp__tree *tree, dp_status status, int culprit)
{
    char why[DP__TEXT_BYTES];
    int held_ms = 0;
    memcpy(why, dp_last_error(), sizeof why);
    if (status == DP_ERR_TIMEOUT)
        DP_TRY(dp__tree_probe(tree, &held_ms));
    (void)dp_error(status, "%s", why);
    return dp__tree_fail(tree, NULL, dp__add_held_up(status, 0, held_ms), culprit);
}

/* Connect to the parent, unless that is process 0, with which there is a connection already. */
static dp_status dp__meet_parent(dp__tree *tree, const dp__launch *launch, const dp__welcome *to,
                                 dp__server *server, dp__join_request *request)
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
    dp_status status =
        dp__connect_until(&target, parent, server->key, request, server->until_ns, &fd);
    if (status != DP_OK)
        return dp__meet_missed(tree, status, parent);
    dp__tree_link(tree, fd, parent);
    return DP_OK;
}

/* Say that this process has all its neighbours, and wait until all have theirs. Then it needs
   process 0 no more, unless that is its parent. */
static dp_status dp__meet_last(dp__tree *tree, const dp__server *server)
{
    dp__link *first;
    dp__tree_say(tree, &tree->links[0], DP__READY, DP_OK);
    tree->until_ns = server->until_ns; /* process 0 answers as long as others have more time */
    DP_TRY(dp__tree_await(tree, 1, &first));
    if (first->header.kind != DP__GO)
        return dp__tree_lost(tree, first, DP_ERR_REMOTE,
                             "sent bytes that no process of a job sends");
    first->got = 0;
    if (dp__parent(tree->process) != 0) {
        dp__os_close(first->fd);
        memmove(first, first + 1, (size_t)--tree->link_count * sizeof *first);
    }
    tree->first_child = 1;
    return DP_OK;
}

/* As any other. */
DP__COLD static dp_status dp__meet_others(dp__tree *tree, const dp__launch *launch,
                                          dp__server *server)
{
    dp__join_request request = {.magic = DP__JOIN_MAGIC,
                                .version = DP_VERSION,
                                .process = tree->process,
                                .process_count = tree->process_count};
    dp__target first = {.host = launch->host,
                        .port = launch->port,
                        .port_count = launch->port_count,
                        .launch = launch};
    dp__welcome welcome = {0};
    int fd = -1;
    DP_TRY(dp__server_open(server));
    memcpy(request.host, launch->own, sizeof request.host);
    if (server->expected > 0)
        DP_TRY(dp__listen_behind(server, launch, &request.listens));
    memcpy(first.place, launch->place, sizeof first.place);
    DP_TRY(dp__connect_until(&first, 0, launch->key, &request, server->until_ns, &fd));
    dp__tree_link(tree, fd, 0);
    uint64_t latest_ns = server->until_ns + DP__GRACE_MS * (uint64_t)1000000;
    dp_status status = dp__await_welcome(fd, tree->process_count, latest_ns, &welcome);
    if (status == DP_ERR_TIMEOUT) /* process 0 may go on, and miss this one */
        return dp__tree_fail(tree, NULL, status, 0);
    DP_TRY(status);
    server->key = dp__key_of_run(launch->key, welcome.run);
    tree->ends_ns = dp__meet_ends_ns(&welcome, latest_ns);
    server->until_ns = tree->ends_ns + (uint64_t)dp__depth_ms(tree->process) * 1000000;
    DP_TRY(dp__meet_parent(tree, launch, &welcome, server, &request));
    server->until_ns += DP__STEP_MS * (uint64_t)1500000; /* a child that finds nobody knows more */
    status = dp__server_wait(server);
    return status == DP_OK ? dp__meet_last(tree, server)
                           : dp__meet_missed(tree, status, tree->process);
}

DP__COLD static dp_status dp__tree_open(const dp__launch *launch, int timeout_ms, dp__tree **out)
{
    dp__tree *tree = dp__os_alloc(sizeof *tree, 64, NULL);
    dp__server server = {.launch = launch,
                         .process = launch->process,
                         .process_count = launch->process_count,
                         .key = launch->key,
                         .listener = -1,
                         .until_ns = dp__os_after_ms(timeout_ms),
                         .due_ns = dp__os_now_ns()};
    if (tree == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d processes", launch->process_count);
    server.tree = tree;
    *tree = (dp__tree){.process = launch->process,
                       .process_count = launch->process_count,
                       .timeout_ms = timeout_ms,
                       .claim = -1,
                       .lock = DP__LOCK_INITIALIZER};
    dp_status status = launch->process == 0 ? dp__meet_first(tree, launch, &server)
                                            : dp__meet_others(tree, launch, &server);
    if (launch->process == 0 && launch->listener != NULL)
        server.listener = -1;
    dp__server_close(&server);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        return status;
    }
    tree->spare_ns = (uint64_t)dp__os_ms_until(tree->ends_ns) * 1000000;
    *out = tree;
    return DP_OK;
}

/* ==== >>world ==================================================================================
   The processes of a context, whether they met through the tree, through MPI or through the user's
   bootstrap. They learn of each other's failures, and know which of them share a machine.      */

typedef struct dp__mpi_links dp__mpi_links;

typedef struct dp__mpi_backend { /* what dp_mpi.h has for processes that meet through MPI */
    /* Tells whether MPI has brought processes together, and the config wants it; then there are
       links to the others, as config->bootstrap, unless there are none. */
    dp_status (*join)(dp_config *config, int timeout_ms, dp__launch *launch, bool *out_meant,
                      dp__mpi_links **out);
    void (*leave)(dp__mpi_links *links, bool job_failed);
    dp_status (*all_gather)(const void *in, void *out, size_t bytes_each, void *user);
    const dp_coll_ops *(*coll)(void);
    dp_status (*hear)(dp__mpi_links *links, const dp__job *job, int *out_process);
    void (*tell)(dp__mpi_links *links, dp_status status, int process, const char *text);
    void (*send)(dp__mpi_links *links, const dp__progress_message *progress);
    /* A bootstrap for the processes of links that give the same number, until that is dropped; -1
       has none. */
    dp_status (*split)(dp__mpi_links *links, int group, dp_bootstrap *out);
    void (*drop)(dp_bootstrap *boot);
    dp_status (*mailbox)(struct dp__mailbox *mailbox); /* it gets a carrier, if it may call MPI */
} dp__mpi_backend;

static const dp__mpi_backend *dp__backend_mpi; /* dp_mpi.h defines it */

/* `own` is false in a child of fork: MPI belongs to the parent. */
static void dp__mpi_links_close(dp__mpi_links *links, bool own, bool job_failed)
{
    if (dp__backend_mpi != NULL && links != NULL && own)
        dp__backend_mpi->leave(links, job_failed);
}

/* Once a context is open it has no more to say over these connections. Whoever waits for other
   processes, and does not see them, asks here whether one of them has failed, and because of which
   process (-1: unknown). */
static dp_status dp__far_hear(dp_ctx *ctx, int *out_process)
{
    dp_status status = DP_OK;
    *out_process = -1;
    dp__lock_enter(&ctx->far_lock);
    if (ctx->tree != NULL)
        status = dp__tree_listen(ctx->tree);
    if (status != DP_OK)
        *out_process = ctx->tree->culprit;
    if (dp__backend_mpi != NULL && ctx->mpi_links != NULL)
        status = dp__backend_mpi->hear(ctx->mpi_links, ctx->job, out_process);
    dp__lock_leave(&ctx->far_lock);
    return status;
}

/* A failure of this process, which all others hear if it is the first. dp_last_error stays. */
static void dp__far_tell(dp_ctx *ctx, dp_status status, int process, const char *text)
{
    dp__lock_enter(&ctx->far_lock);
    if (ctx->tree != NULL)
        dp__tree_tell(ctx->tree, status, process, text);
    if (dp__backend_mpi != NULL && ctx->mpi_links != NULL)
        dp__backend_mpi->tell(ctx->mpi_links, status, process, text);
    dp__lock_leave(&ctx->far_lock);
}

/* Sends what this process has begun to all others; false: there is no way to them. Another thread
   that has the links sends the same. */
static bool dp__far_send(dp_ctx *ctx, const dp__progress_message *progress)
{
    dp__lock_enter(&ctx->far_lock);
    if (ctx->tree != NULL && dp__tree_enter(ctx->tree, false)) {
        dp__tree_report(ctx->tree, progress, false);
        dp__tree_leave(ctx->tree);
    }
    if (dp__backend_mpi != NULL && ctx->mpi_links != NULL)
        dp__backend_mpi->send(ctx->mpi_links, progress);
    bool some = ctx->tree != NULL || ctx->mpi_links != NULL;
    dp__lock_leave(&ctx->far_lock);
    return some;
}

/* Finds the address by which other machines find this process: the user's, or that from which a
   connection to one comes; where a bootstrap of the user's has made none, the usual one. "":
   nothing is known. */
static dp_status dp__far_host(const dp__tree *tree, char *text, size_t room)
{
    dp__launch own = {.name = "far"};
    DP_TRY(dp__launch_interface(&own));
    snprintf(text, room, "%s", own.own);
    for (int i = 0; tree != NULL && i < tree->link_count && text[0] == '\0'; i++)
        dp__os_host_of(tree->links[i].fd, true, text, room);
    if (tree == NULL && text[0] == '\0')
        dp__os_host_usual(text, room);
    return DP_OK;
}

/* Returns the process to which another one passes on what is for a third; by MPI it is that one. */
static int dp__far_next(const dp_ctx *ctx, int from, int to)
{
    return ctx->tree != NULL ? dp__towards(from, to, ctx->tree->process_count) : to;
}

static void dp__far_begin(dp_ctx *ctx, dp__tree *tree, dp__mpi_links *links)
{
    dp__lock_enter(&ctx->far_lock);
    if (tree != NULL)
        tree->job = ctx->job;
    ctx->tree = tree;
    ctx->mpi_links = links;
    dp__lock_leave(&ctx->far_lock);
}

/* Meet the processes of a launch. */
static dp_status dp__join_tree(dp_config *config, const dp__launch *launch, int timeout_ms,
                               dp__tree **out)
{
    dp_status status = dp__tree_open(launch, timeout_ms, out);
    if (status != DP_OK)
        dp_error(status, "dp_open: %s", dp__open_error());
    config->bootstrap =
        (dp_bootstrap){dp__tree_all_gather, *out, launch->process, launch->process_count};
    return status;
}

/* Takes the time-out of the program, else that of its user. A wrong number is an error later, when
   the others can be told. */
static dp_status dp__join_timeout(dp_config *config, int *out_ms)
{
    int seconds = DP__TIMEOUT_MS / 1000;
    if (config->timeout_ms == 0 && dp__os_env("DP_TIMEOUT") != NULL)
        DP_TRY(dp__env_number("DP_TIMEOUT", 1, INT_MAX / 1000, &seconds));
    if (config->timeout_ms == 0)
        config->timeout_ms = seconds * 1000;
    *out_ms = config->timeout_ms > 0 ? config->timeout_ms : DP__TIMEOUT_MS;
    return DP_OK;
}

/* Join the world that the environment names, unless the config has another, or wants none. */
static dp_status dp__join(dp_config *config, dp__launch *launch, dp__tree **out,
                          dp__mpi_links **out_line)
{
    int timeout_ms;
    bool own = config->bootstrap.all_gather != NULL, by_mpi = false;
    *out = NULL;
    *out_line = NULL;
    *launch = (dp__launch){.name = own ? "bootstrap" : "none", .process_count = 1};
    DP_TRY(dp__join_timeout(config, &timeout_ms));
    if (config->local_only)
        return DP_OK;
    if (dp__backend_mpi != NULL)
        DP_TRY(dp__backend_mpi->join(config, timeout_ms, launch, &by_mpi, out_line));
    if (own || by_mpi)
        return DP_OK;
    DP_TRY(dp__launch_read(config->job, launch));
    if (launch->process >= launch->process_count)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_open: this process has come later (DP_REJOIN), and the others meet it "
                        "in its first context only: set local_only");
    return launch->process_count > 1 ? dp__join_tree(config, launch, timeout_ms, out) : DP_OK;
}

static bool dp__boot_is_mpi(const dp_bootstrap *boot)
{
    return dp__backend_mpi != NULL && boot->all_gather == dp__backend_mpi->all_gather;
}

/* The library has brought the processes together, and not a bootstrap of the user's. */
static bool dp__boot_is_ours(const dp_bootstrap *boot)
{
    return boot->all_gather == dp__tree_all_gather || dp__boot_is_mpi(boot);
}

/* One round of the bootstrap. A failure in it is a failure of the job, even in a user's. */
static dp_status dp__boot_gather(const dp_bootstrap *boot, const void *own, void *all, size_t bytes)
{
    char first = dp__sentence_hide();
    dp_status status = dp__sentence_after(first, boot->all_gather(own, all, bytes, boot->user));
    if (status == DP_OK)
        return DP_OK;
    if (dp__boot_is_ours(boot))
        return dp_error(status, "dp_open: %s", dp__open_error());
    return dp_error(DP_ERR_REMOTE, "dp_open: bootstrap.all_gather failed: %s", dp__open_error());
}

typedef struct dp__share { /* a part of something that `count` processes divide */
    int place, count;
} dp__share;

typedef struct dp__neighbours {
    dp__share machine, cores; /* among the processes of its machine; of these cores */
    dp__share machines;       /* its machine among all */
} dp__neighbours;

typedef struct dp__location {
    uint64_t machine, cores;
} dp__location;

/* Returns true if a process is the first of its machine; most are beside another one of it. */
static bool dp__is_first_there(const dp__location *all, int process)
{
    int before = process - 1;
    while (before >= 0 && all[before].machine != all[process].machine)
        before--;
    return before < 0;
}

/* The machine of this process among those of all, in the order of their first processes. */
static dp__share dp__count_machines(const dp__location *all, const dp_bootstrap *boot)
{
    dp__share out = {0, 0};
    for (int i = 0; i < boot->process_count; i++) {
        bool first = dp__is_first_there(all, i);
        if (first && all[i].machine == all[boot->process].machine)
            out.place = out.count;
        out.count += first;
    }
    return out;
}

/* Which processes are on this machine, and which of them may run on the same cores: a launcher that
   has bound its processes to different ones has divided them already. What the launcher says about
   places counts, as it may know things about a machine that containers hide. */
DP__COLD static dp_status dp__find_neighbours(const dp_bootstrap *boot, const dp__launch *launch,
                                              dp__neighbours *out)
{
    dp__location own = {dp__os_machine(), dp__os_affinity()};
    size_t count = (size_t)boot->process_count;
    dp__location *all = dp__os_alloc(count * sizeof own, _Alignof(dp__location), NULL);
    if (all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu processes", count);
    dp_status status = dp__boot_gather(boot, &own, all, sizeof own);
    *out = (dp__neighbours){{0, 0}, {0, 0}, {0, 0}};
    for (int i = 0; i < boot->process_count && status == DP_OK; i++) {
        bool near = all[i].machine == own.machine, same = near && all[i].cores == own.cores;
        out->machine.place += near && i < boot->process;
        out->machine.count += near;
        out->cores.place += same && i < boot->process;
        out->cores.count += same;
    }
    if (status == DP_OK)
        out->machines = dp__count_machines(all, boot);
    dp__os_free(all, 0, NULL);
    if (launch->local_count > 0)
        out->machine = (dp__share){launch->local, launch->local_count};
    return status;
}

/* ==== >>seats ==================================================================================
   Where each process listens, beside the tree, and how the others find it.                      */

typedef struct dp__seat { /* and the process that has it, for as long as that lives */
    uint64_t holder;      /* a random number of that process; 0: the seat is empty */
    uint64_t came;        /* the number of the roster with which it came: see dp/members.h */
    uint64_t memory;      /* with a word, that it shares with its machine; 0: none */
    uint64_t machine;
    uint32_t port, limit; /* limit: how many seats it wants there to be */
    dp__key key;
    char host[DP__PLACE_BYTES]; /* its address for other machines; "": not known */
    uint64_t there_only;        /* it listens at that address, and at no other */
} dp__seat;
_Static_assert(sizeof(dp__seat) == 128, "what travels has no gaps");

static dp_status dp__seat_key(dp__seat *seat)
{
    if (dp__os_secret((uint64_t *)&seat->key, sizeof seat->key))
        return DP_OK;
    return dp_error(DP_ERR_UNSUPPORTED,
                    "the system has no random numbers for the secret of a job: neither getentropy "
                    "nor /dev/urandom gives any");
}

/* With a port of its own, which only its machine can reach if all processes are there. */
static dp_status dp__seat_make(dp__seat *seat, dp__launch *launch, const dp__tree *tree, bool far,
                               dp__server *server)
{
    seat->machine = dp__os_machine();
    snprintf(launch->host, DP__HOST_BYTES, "%s", far ? "0.0.0.0" : "127.0.0.1");
    if (far) {
        DP_TRY(dp__far_host(tree, seat->host, sizeof seat->host));
        DP_TRY(dp__launch_ports(launch));
        DP_TRY(dp__launch_interface(launch));
    }
    seat->there_only = launch->own[0] != '\0';
    DP_TRY(dp__seat_key(seat));
    DP_TRY(dp__listen_within(server, launch));
    seat->port = (uint32_t)dp__os_port(server->listener);
    return DP_OK;
}

/* A process whose connections all stay inside its machine has the address of another one there; "":
   there is none. */
static const char *dp__seat_address(const dp__seat *seats, int count, int seat)
{
    const char *host = seats[seat].host;
    for (int s = 0; s < count && host[0] == '\0'; s++)
        if (seats[s].machine == seats[seat].machine)
            host = seats[s].host;
    return host;
}

/* From the place of `own`. */
static const char *dp__seat_host(const dp__seat *seats, int count, int own, int seat)
{
    bool near = seats[seat].machine == seats[own].machine && !seats[seat].there_only;
    return near ? "127.0.0.1" : dp__seat_address(seats, count, seat);
}

/* As dp__os_connect. */
static int dp__seat_connect(const dp__seat *seats, int count, int own, int seat)
{
    dp__os_found found;
    dp__os_look_up(dp__seat_host(seats, count, own, seat), (int)seats[seat].port, true, &found);
    return found.count > 0 ? dp__os_connect(&found.list[0]) : -1;
}

static dp_status dp__seats_check(const dp__seat *seats, int count, int own)
{
    for (int s = 0; s < count; s++)
        if (dp__seat_host(seats, count, own, s)[0] == '\0')
            return dp_error(DP_ERR_UNSUPPORTED,
                            "the processes are on several machines, and have met inside one, or by "
                            "a bootstrap of yours, so that no address of process %d is known: set "
                            "DP_INTERFACE",
                            s);
    return DP_OK;
}

/* ==== >>spawn ==================================================================================
   The launcher for one machine: it forks, tells each child with the usual variables which process
   of how many it is, and waits for all. The first that fails ends the others.                   */

enum { DP__SPAWN_GRACE_MS = 2000, DP__SPAWN_MAX = 4096 };

typedef struct dp__exit_report { /* of a child, in memory that it shares with its parent */
    atomic_int said;             /* all that follows: its function has returned */
    int32_t status;
    char text[DP__TEXT_BYTES];
} dp__exit_report;

typedef struct dp__children {
    int count, left;
    dp__os_child *children;
    dp__exit_report *words;
    bool ending;       /* they were told to end */
    uint64_t until_ns; /* when they are told to end, or made to; 0: nobody has failed */
    dp_status status;
    char text[DP__TEXT_BYTES + 64];
} dp__children;

static atomic_bool dp__spawning; /* signals belong to the whole process */

static void dp__env_set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    dp__os_env_set(name, text);
}

static _Noreturn void dp__spawn_run(dp__exit_report *words, int process, int count,
                                    const char *secret, dp_status (*fn)(void *user), void *user)
{
    char place[40];
    snprintf(place, sizeof place, "@%s", secret);
    dp__os_env_set("DP_LAUNCH", dp__launchers[0].name);
    dp__env_set_number("DP_PROCESS", process);
    dp__env_set_number("DP_PROCESS_COUNT", count);
    dp__env_set_number("DP_LOCAL_PROCESS", process);
    dp__env_set_number("DP_LOCAL_PROCESS_COUNT", count);
    dp__os_env_set("DP_ADDR", place);
    dp__os_env_set("DP_SECRET", secret);
    dp__os_env_drop("DP_REJOIN"); /* the new ones begin; this one may have come later */
    atomic_store(&dp__spawning, false);
    dp__of_thread.text[0] = '\0';
    int own = dp__os_process_id();
    dp_status status = dp__sentence_after('\0', fn(user));
    if (dp__os_process_id() != own) /* fn has forked, and this is not the process to speak */
        dp__os_leave(status == DP_OK);
    words->status = (int32_t)status;
    if (status != DP_OK)
        memcpy(words->text, dp__of_thread.text, sizeof words->text);
    atomic_store(&words->said, 1);
    dp__os_leave(status == DP_OK);
}

/* Says how a process failed that has not said it: its function has not returned, whatever the exit
   status is, or it was ended after that. */
static void dp__spawn_speak_for(const dp__os_child *child, dp__exit_report *words)
{
    words->status = DP_ERR_USER;
    if (child->unknown)
        snprintf(words->text, sizeof words->text,
                 "it ended, and how is not known: its parent has waited for any child");
    else if (child->by_signal != 0)
        snprintf(words->text, sizeof words->text, "it was ended by signal %d", child->by_signal);
    else
        snprintf(words->text, sizeof words->text,
                 "it ended with exit status %d before its function returned", child->code);
}

/* Notes whether a process that has ended failed, and if so, whether it was the first or the cause:
   REMOTE and TIMEOUT may be only the echo of another process' failure. */
static void dp__spawn_judge(dp__children *all, int process)
{
    dp__exit_report *words = &all->words[process];
    const dp__os_child *child = &all->children[process];
    bool said = atomic_load(&words->said) != 0, echo;
    bool spoke = said && (words->status != DP_OK || child->by_signal == 0);
    if (!spoke)
        dp__spawn_speak_for(child, words);
    words->text[sizeof words->text - 1] = '\0';
    if (words->status == DP_OK || (all->ending && !spoke))
        return;
    echo = words->status == DP_ERR_REMOTE || words->status == DP_ERR_TIMEOUT;
    if (all->status != DP_OK && (echo || dp_status_class(all->status) != DP_CLASS_JOB))
        return;
    all->status = (dp_status)words->status;
    snprintf(all->text, sizeof all->text, "process %d of %d: %s", process, all->count, words->text);
    if (!all->ending)
        all->until_ns = dp__os_after_ms(echo ? 300 : 0);
}

/* Tell all to end, and kill those that do not. */
static void dp__spawn_end(dp__children *all)
{
    if (all->until_ns == 0 || dp__os_ms_until(all->until_ns) > 0)
        return;
    for (int i = 0; i < all->count; i++)
        dp__os_end(&all->children[i], all->ending);
    all->ending = true;
    all->until_ns = dp__os_after_ms(DP__SPAWN_GRACE_MS);
}

static void dp__spawn_wait(dp__children *all)
{
    while (all->left > 0) {
        for (int i = 0; i < all->count; i++) {
            dp__os_child *child = &all->children[i];
            if (child->pid == 0 || !dp__os_ended(child))
                continue;
            dp__spawn_judge(all, i);
            all->left--;
        }
        if (dp__os_asked_to_end() != 0 && all->status == DP_OK) {
            all->status = DP_ERR_ABORTED;
            snprintf(all->text, sizeof all->text, "ended by signal %d", dp__os_asked_to_end());
            all->until_ns = dp__os_now_ns();
        }
        dp__spawn_end(all);
        if (all->left > 0)
            dp__os_sleep_ms(2 + all->count / 8);
    }
}

DP__COLD static dp_status dp__spawn_all(dp__children *all, dp_status (*fn)(void *user), void *user)
{
    char secret[36];
    uint64_t drawn[2];
    memset(all->children, 0, (size_t)all->count * sizeof *all->children);
    if (!dp__os_secret(drawn, sizeof drawn))
        return dp_error(DP_ERR_UNSUPPORTED,
                        "dp_spawn: the system has no random numbers for the secret of the new "
                        "processes: neither getentropy nor /dev/urandom gives any");
    snprintf(secret, sizeof secret, "%016llx%016llx", (unsigned long long)drawn[0],
             (unsigned long long)drawn[1]);
    for (int i = 0; i < all->count && all->status == DP_OK; i++) {
        int forked = dp__os_fork(&all->children[i]);
        if (forked == 0)
            dp__spawn_run(&all->words[i], i, all->count, secret, fn, user);
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
    if (atomic_exchange(&dp__spawning, true))
        return dp_error(DP_ERR_STATE, "dp_spawn: another thread is inside dp_spawn");
    size_t bytes = (size_t)count * sizeof(dp__os_child);
    size_t said = (size_t)count * sizeof(dp__exit_report);
    dp__children all = {.count = count,
                        .children = dp__os_alloc(bytes, 64, NULL),
                        .words = dp__os_common_alloc(said)};
    dp__os_signals_take();
    dp_status status =
        all.children != NULL && all.words != NULL
            ? dp__spawn_all(&all, fn, user)
            : dp_error(DP_ERR_NO_MEMORY, "dp_spawn: no memory for %d processes", count);
    dp__os_signals_give_back();
    dp__os_free(all.children, bytes, NULL);
    if (all.words != NULL)
        dp__os_common_free(all.words, said);
    atomic_store(&dp__spawning, false);
    dp__os_signal_again();
    return status;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
