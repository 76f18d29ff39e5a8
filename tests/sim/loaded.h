/* loaded.h - after the implementation, whose lists name what it calls: the libraries that it loads,
   and what the system may refuse. See loader.h. */

#undef dlopen
#undef dlsym
#undef dlclose
#undef dladdr
#undef posix_memalign
#undef pthread_create

static CUresult sim_init(unsigned flags)
{
    (void)flags;
    return sim_has_gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

#define SIM_ENTRY(name) {#name, (void (*)(void))name},
static const struct sim_entry {
    const char *name;
    void (*fn)(void);
} sim_entries[] = {DP__CUDA_RUNTIME(SIM_ENTRY) DP__CUDA_NVRTC(SIM_ENTRY)
                       DP__NCCL_FUNCTIONS(SIM_ENTRY){"cuInit", (void (*)(void))sim_init}};

static const char *const sim_cuda_names[] = {"libcudart.so.13", "libnvrtc.so.13", "libcuda.so.1"};
static sim_nccl_file sim_nccl_usual[] = {{.path = "libnccl.so.2"}};
static sim_nccl_file *sim_nccl_files = sim_nccl_usual;
static int sim_nccl_file_count = 1;
static const sim_nccl_file *sim_nccl_asked; /* for a function, last */

void sim_set_nccl_files(sim_nccl_file *files, int count)
{
    sim_nccl_files = files;
    sim_nccl_file_count = count;
}

void *sim_dlopen(const char *name, int flags)
{
    (void)flags;
    for (int i = 0; i < 3; i++)
        if (strcmp(sim_cuda_names[i], name) == 0)
            return (void *)(uintptr_t)sim_cuda_names[i];
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
    for (int i = 0; i < sim_nccl_file_count; i++)
        if (library == &sim_nccl_files[i])
            sim_nccl_files[i].loads--;
    return 0;
}

void *sim_dlsym(void *library, const char *name)
{
    void (*fn)(void) = NULL;
    void *found;
    for (int i = 0; i < sim_nccl_file_count; i++)
        sim_nccl_asked = library == &sim_nccl_files[i] ? &sim_nccl_files[i] : sim_nccl_asked;
    for (size_t i = 0; i < sizeof sim_entries / sizeof *sim_entries; i++)
        if (strcmp(sim_entries[i].name, name) == 0)
            fn = sim_entries[i].fn;
    if (library == sim_nccl_asked && sim_nccl_asked->lacks != NULL &&
        strcmp(sim_nccl_asked->lacks, name) == 0)
        fn = NULL;
    memcpy(&found, &fn, sizeof found);
    return found;
}

int sim_dladdr(const void *address, Dl_info *out)
{
    (void)address;
    *out = (Dl_info){.dli_fname = sim_nccl_asked->is_at};
    return sim_nccl_asked->is_at != NULL;
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
