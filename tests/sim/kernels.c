/* kernels.c - the kernels of dp_cuda.h, compiled as C, and which bytes each of them touches. Where
   PTX is linked in (tests/ptx), it runs in their place. */

#include "../../dp.h" /* before dp_device is a word of the kernels */
#define SIM_GRID_IMPLEMENTATION
#include "grid.h"
#define DP_CUDA_TEXT_AS_C
#include "../../dp_cuda.h"
#include <string.h>
#include "../ptx/ptx.h"
#include "parts.h"
#include "sim.h"

typedef struct dp__cuda_params params;

typedef struct dp__cuda_steps step_params;

/* Optimizers' kernels have parameters of their own. */
typedef union any_params {
    params each;
    step_params steps;
} any_params;
_Static_assert(sizeof(any_params) <= SIM_PARAM_BYTES, "room for the arguments");

typedef void params_fn(const params p);
typedef void step_fn(const step_params p);
#define ENTRY(name)                                                                                \
    {"dp_cuda_" #name,                                                                             \
     _Generic(dp_cuda_##name, params_fn *                                                          \
              : dp_cuda_##name, default                                                            \
              : NULL),                                                                             \
     _Generic(dp_cuda_##name, step_fn *                                                            \
              : dp_cuda_##name, default                                                            \
              : NULL)},
static const struct kernel {
    const char *name;
    params_fn *fn;
    step_fn *step;
} kernels[] = {DP__CUDA_NAMES(ENTRY)};

static int number_of(const char *name)
{
    for (int i = 0; i < DP__CUDA_KERNEL_COUNT; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return i;
    return -1;
}

int sim_kernel_find(const char *name)
{
    return number_of(name);
}

int sim_kernel_count(void)
{
    return DP__CUDA_KERNEL_COUNT;
}

const char *sim_kernel_name(int kernel)
{
    return kernels[kernel].name;
}

/* ---- what a kernel touches ------------------------------------------------------------------- */

static const size_t dtype_bytes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};

static bool is_between(int kernel, int first, int last)
{
    return kernel >= first && kernel <= last;
}

static bool makes_sums(int kernel) /* chunk by chunk, into the scratch */
{
    return is_between(kernel, DP__CUDA_stats_f32, DP__CUDA_stats_half) ||
           is_between(kernel, DP__CUDA_channels_f32, DP__CUDA_channels_half) ||
           kernel == DP__CUDA_total || kernel == DP__CUDA_differ;
}

static bool ends_sums(int kernel) /* what is in the scratch */
{
    return kernel == DP__CUDA_sums_end || kernel == DP__CUDA_channels_end;
}

static bool steps(int kernel)
{
    return kernels[kernel].step != NULL;
}

static size_t strided_count(const params *p, const long long *shape, const long long *stride)
{
    long long last = 0;
    for (int d = 0; d < p->ndim; d++) {
        if (shape[d] == 0)
            return 0;
        last += (shape[d] - 1) * stride[d];
    }
    return (size_t)last + 1;
}

static size_t element_count(int kernel, const params *p, bool input)
{
    if (kernel == DP__CUDA_sums_end)
        return p->out_count;
    if (kernel == DP__CUDA_channels_end) /* sums, and squares as far behind as there are channels */
        return (size_t)p->shape[1] + (size_t)p->count;
    if (kernel == DP__CUDA_copy && input)
        return strided_count(p, p->in_shape, p->in_stride);
    if (kernel == DP__CUDA_copy)
        return strided_count(p, p->shape, p->out_stride);
    return (size_t)p->count;
}

static size_t element_bytes(int kernel, const params *p, bool input)
{
    if (ends_sums(kernel))
        return sizeof(double);
    if (kernel == DP__CUDA_fill || kernel == DP__CUDA_copy)
        return p->width;
    return dtype_bytes[input && kernel == DP__CUDA_cast ? p->in_dtype : p->dtype];
}

static sim_range operand_range(int kernel, const params *p, bool input, unsigned place)
{
    size_t each = element_bytes(kernel, p, input);
    return (sim_range){.pointer = input ? (void *)(uintptr_t)p->in[place] : p->out[place],
                       .bytes = element_count(kernel, p, input) * each,
                       .align = p->packs > 0 && !ends_sums(kernel) ? 16 : each,
                       .write = !input};
}

static unsigned in_count(int kernel, const params *p)
{
    return ends_sums(kernel) ? 0 : p->in_count;
}

static unsigned out_count(int kernel, const params *p)
{
    return makes_sums(kernel) ? 0 : kernel == DP__CUDA_sums_end ? 1 : p->out_count;
}

/* Of each set the gradient, the parameter and its state, then the gate, which is of all. */
static size_t step_ranges(const step_params *p, sim_range *out)
{
    const size_t wide = p->dtype == DP_F64 ? sizeof(double) : sizeof(float);
    size_t count = 0;
    for (unsigned i = 0; i < p->set_count; i++) {
        const struct dp__cuda_set *set = &p->sets[i];
        const size_t each = dtype_bytes[p->dtype], all = (size_t)set->count;
        out[count++] = (sim_range){.pointer = set->grad,
                                   .bytes = all * each,
                                   .align = each,
                                   .write = (p->flags & DP_KERNEL_ZERO_GRAD) != 0};
        for (unsigned k = 0; k < p->out_count; k++) {
            const size_t own = k == 0 ? each : wide;
            out[count++] = (sim_range){
                .pointer = set->out[k], .bytes = all * own, .align = own, .write = true};
        }
    }
    if (p->gate != NULL)
        out[count++] = (sim_range){.pointer = (void *)(uintptr_t)p->gate,
                                   .bytes = 2 * sizeof(double),
                                   .align = sizeof(double)};
    return count;
}

/* The ranges in a fixed order: inputs, outputs, scratch. */
size_t sim_kernel_ranges(int kernel, const void *arguments, sim_range *out)
{
    const params *p = arguments;
    size_t count = 0;
    if (steps(kernel))
        return step_ranges(arguments, out);
    for (unsigned k = 0; k < in_count(kernel, p); k++)
        out[count++] = operand_range(kernel, p, true, k);
    for (unsigned k = 0; k < out_count(kernel, p); k++)
        out[count++] = operand_range(kernel, p, false, k);
    if (makes_sums(kernel) || ends_sums(kernel))
        out[count++] = (sim_range){.pointer = p->scratch,
                                   .bytes = (size_t)p->chunk_count * 2 * sizeof(double),
                                   .align = sizeof(double),
                                   .write = makes_sums(kernel)};
    return count;
}

/* ---- PTX ------------------------------------------------------------------------------------- */

static const ptx_kernel *ptx_of(int kernel)
{
    const ptx_kernel *own = ptx_kernels;
    while (own != NULL && own->name != NULL && strcmp(own->name, kernels[kernel].name) != 0)
        own++;
    return own != NULL && own->name != NULL ? own : NULL;
}

bool sim_kernel_is_ptx(int kernel)
{
    return ptx_of(kernel) != NULL;
}

static int running; /* the kernel */
static const ptx_kernel *running_ptx;

void ptx_find(const char *name, int line)
{
    sim_find(name, "%s, in line %d of its PTX", kernels[running].name, line);
}

/* Floats that a kernel computes, of a range that it writes; what it moves has all its bits. */
static size_t computed_bytes(int kernel, const params *p, const sim_range *range)
{
    if (makes_sums(kernel) || ends_sums(kernel))
        return sizeof(double);
    if (steps(kernel))
        return range->align;
    if (is_between(kernel, DP__CUDA_fill, DP__CUDA_pattern) || p->dtype > DP_BF16)
        return 0;
    return range->bytes % dtype_bytes[p->dtype] == 0 ? dtype_bytes[p->dtype] : 0;
}

static int dtype_of(int kernel, const void *arguments)
{
    return steps(kernel) ? ((const step_params *)arguments)->dtype
                         : ((const params *)arguments)->dtype;
}

static bool is_nan(const char *at, size_t bytes, bool is_bf16)
{
    uint64_t bits = 0;
    memcpy(&bits, at, bytes); /* the machine is little-endian */
    const uint64_t infinite = bytes == 8   ? 0x7ff0000000000000u
                              : bytes == 4 ? 0x7f800000u
                              : is_bf16    ? 0x7f80u
                                           : 0x7c00u;
    return (bits & (UINT64_MAX >> (65 - 8 * bytes))) > infinite;
}

bool sim_kernel_agrees(int kernel, const void *arguments, size_t range, const char *text,
                       const char *ptx)
{
    sim_range ranges[SIM_RANGES];
    sim_kernel_ranges(kernel, arguments, ranges);
    const size_t bytes = ranges[range].bytes;
    const size_t each = computed_bytes(kernel, arguments, &ranges[range]);
    const bool is_bf16 = dtype_of(kernel, arguments) == DP_BF16;
    bool agrees = each > 0 || memcmp(text, ptx, bytes) == 0;
    for (size_t at = 0; each > 0 && at < bytes; at += each)
        agrees = agrees && (memcmp(text + at, ptx + at, each) == 0 ||
                            (is_nan(text + at, each, is_bf16) && is_nan(ptx + at, each, is_bf16)));
    return agrees;
}

static void lane(const void *arguments)
{
    kernels[running].fn(*(const params *)arguments);
}

static void step_lane(const void *arguments)
{
    kernels[running].step(*(const step_params *)arguments);
}

static void ptx_lane(const void *arguments)
{
    running_ptx->run(arguments);
}

static void params_move(int kernel, params *p, char *const *at)
{
    for (unsigned k = 0; k < in_count(kernel, p); k++)
        p->in[k] = *at++;
    for (unsigned k = 0; k < out_count(kernel, p); k++)
        p->out[k] = *at++;
    if (makes_sums(kernel) || ends_sums(kernel))
        p->scratch = (double *)(void *)*at;
}

static void step_params_move(step_params *p, char *const *at)
{
    for (unsigned i = 0; i < p->set_count; i++) {
        p->sets[i].grad = *at++;
        for (unsigned k = 0; k < p->out_count; k++)
            p->sets[i].out[k] = *at++;
    }
    if (p->gate != NULL)
        p->gate = (const double *)(const void *)*at;
}

/* Run it on other memory: each range at `at`, in the order of sim_kernel_ranges. */
bool sim_kernel_run(int kernel, const void *arguments, char *const *at, const sim_launch *launch)
{
    any_params p;
    sim_lane_fn *text = steps(kernel) ? step_lane : lane;
    memcpy(&p, arguments, sim_param_bytes(kernel));
    if (steps(kernel))
        step_params_move(&p.steps, at);
    else
        params_move(kernel, &p.each, at);
    running = kernel;
    running_ptx = launch->as_text ? NULL : ptx_of(kernel);
    return sim_grid_run(running_ptx != NULL ? ptx_lane : text, &p, launch->blocks, launch->lanes,
                        launch->order);
}

size_t sim_param_bytes(int kernel)
{
    return steps(kernel) ? sizeof(step_params) : sizeof(params);
}

void sim_fill_params(void *out, void *dst, size_t count)
{
    const params p = {.out = {dst}, .out_count = 1, .count = count, .width = sizeof(float)};
    memcpy(out, &p, sizeof p);
}
