/* loaded.h - after the implementation, whose lists name what it calls: the libraries that it loads,
   and what the system may refuse. See loader.h. */

#undef dlopen
#undef dlsym
#undef dlclose
#undef dladdr
#undef posix_memalign
#undef pthread_create
#undef clock_gettime
#undef pthread_mutex_unlock

#if defined(TEST_HIP)
#define SIM_TEXT(...)           #__VA_ARGS__
#define SIM_ENTRY(member, name) {SIM_TEXT(name), (void (*)(void))name},
#define SIM_ENTRIES             DP__HIP_RUNTIME(SIM_ENTRY) DP__HIP_COMPILER(SIM_ENTRY)
static const char *const sim_names[] = {"libamdhip64.so.6", "libhiprtc.so.6"};
#else
static CUresult sim_init(unsigned flags)
{
    (void)flags;
    return sim_has_gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

#define SIM_ENTRY(name) {#name, (void (*)(void))name},
#define SIM_ENTRIES                                                                                \
    DP__CUDA_RUNTIME(SIM_ENTRY) DP__CUDA_NVRTC(SIM_ENTRY){"cuInit", (void (*)(void))sim_init},
static const char *const sim_names[] = {"libcudart.so.13", "libnvrtc.so.13", "libcuda.so.1"};
#endif
#define SIM_ENTRY_OF_NCCL(name) {#name, (void (*)(void))name},

static const struct sim_entry {
    const char *name;
    void (*fn)(void);
} sim_entries[] = {SIM_ENTRIES DP__NCCL_FUNCTIONS(SIM_ENTRY_OF_NCCL)};

static sim_nccl_file sim_nccl_usual[] = {{.path = "libnccl.so.2"}};
static sim_nccl_file *sim_nccl_files = sim_nccl_usual;
static int sim_nccl_file_count = 1;
static const sim_nccl_file *sim_nccl_asked; /* for a function, last */

void sim_set_nccl_files(sim_nccl_file *files, int count)
{
    sim_nccl_files = files;
    sim_nccl_file_count = count;
}

static ncclResult_t sim_own_version(int *out)
{
    *out = sim_nccl_asked->version;
    return ncclSuccess;
}

static const char *sim_lacking = "";
static int sim_loaded;

void sim_lack(const char *name)
{
    sim_lacking = name;
}

int sim_loads(void)
{
    return sim_loaded;
}

void *sim_dlopen(const char *name, int flags)
{
    (void)flags;
    if (strcmp(name, sim_lacking) == 0)
        return NULL;
    for (size_t i = 0; i < sizeof sim_names / sizeof *sim_names; i++)
        if (strcmp(sim_names[i], name) == 0) {
            sim_loaded++;
            return (void *)(uintptr_t)sim_names[i];
        }
    if (strncmp(name, "librccl.so", 10) == 0) /* which tests know by other names */
        name = name[10] != '\0' ? "libnccl.so.2" : "libnccl.so";
    for (int i = 0; i < sim_nccl_file_count && sim_nccl_version() != 0; i++)
        if (strcmp(sim_nccl_files[i].path, name) == 0) {
            sim_nccl_files[i].loads++;
            dp__os_sleep_ms(sim_nccl_files[i].takes_ms);
            return &sim_nccl_files[i];
        }
    return NULL;
}

int sim_dlclose(void *library)
{
    for (size_t i = 0; i < sizeof sim_names / sizeof *sim_names; i++)
        sim_loaded -= library == sim_names[i] ? 1 : 0;
    for (int i = 0; i < sim_nccl_file_count; i++)
        if (library == &sim_nccl_files[i])
            sim_nccl_files[i].loads--;
    return 0;
}

void *sim_dlsym(void *library, const char *name)
{
    void (*fn)(void) = NULL;
    void *found;
    if (library == RTLD_DEFAULT) /* in the program itself there are none */
        return NULL;
    if (strcmp(name, sim_lacking) == 0)
        return NULL;
    for (int i = 0; i < sim_nccl_file_count; i++)
        sim_nccl_asked = library == &sim_nccl_files[i] ? &sim_nccl_files[i] : sim_nccl_asked;
    for (size_t i = 0; i < sizeof sim_entries / sizeof *sim_entries; i++)
        if (strcmp(sim_entries[i].name, name) == 0)
            fn = sim_entries[i].fn;
    if (library == sim_nccl_asked && sim_nccl_asked->lacks != NULL &&
        strcmp(sim_nccl_asked->lacks, name) == 0)
        fn = NULL;
    if (library == sim_nccl_asked && sim_nccl_asked->version != 0 &&
        strcmp(name, "ncclGetVersion") == 0)
        fn = (void (*)(void))sim_own_version;
    memcpy(&found, &fn, sizeof found);
    return found;
}

int sim_dladdr(const void *address, Dl_info *out)
{
    (void)address;
    *out = (Dl_info){.dli_fname = sim_nccl_asked != NULL ? sim_nccl_asked->is_at : NULL};
    return out->dli_fname != NULL;
}

/* ---- the system ------------------------------------------------------------------------------ */

static sim_thing sim_scarce;
static atomic_long sim_left; /* requests up to the one that is refused, with that one */
static atomic_bool sim_was_refused;

void sim_refuse(sim_thing what, long n)
{
    sim_scarce = what;
    atomic_store(&sim_was_refused, false);
    atomic_store(&sim_left, n);
}

bool sim_refused(void)
{
    return atomic_load(&sim_was_refused);
}

static bool sim_refuses(sim_thing what)
{
    if (what != sim_scarce || atomic_load(&sim_left) <= 0 || atomic_fetch_sub(&sim_left, 1) != 1)
        return false;
    atomic_store(&sim_was_refused, true);
    return true;
}

int sim_memalign(void **out, size_t align, size_t bytes)
{
    return sim_refuses(SIM_MEMORY) ? ENOMEM : posix_memalign(out, align, bytes);
}

int sim_thread(pthread_t *out, const pthread_attr_t *how, void *(*fn)(void *user), void *user)
{
    return sim_refuses(SIM_THREADS) ? EAGAIN : pthread_create(out, how, fn, user);
}

static atomic_bool sim_wall_jumps;
static atomic_uint sim_wall_readings;

void sim_jump_wall_clock(bool on)
{
    atomic_store(&sim_wall_jumps, on);
}

int sim_clock(clockid_t clock, struct timespec *out)
{
    int code = clock_gettime(clock, out);
    if (clock == CLOCK_REALTIME && atomic_load(&sim_wall_jumps))
        out->tv_sec += atomic_fetch_add(&sim_wall_readings, 1) % 2 == 0 ? 3600 : -3600;
    return code;
}

/* Nothing else would show a lock that is left and was not entered. */
int sim_leave_mutex(pthread_mutex_t *mutex)
{
    if (pthread_mutex_trylock(mutex) == 0)
        sim_find_left_lock();
    return pthread_mutex_unlock(mutex);
}
