/* NVML: the processes on a GPU - running ones, their usage, and accounted ones. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "activity.h"

#define SAMPLE_PERIOD 166667 /* microseconds between two samples of utilization */
#define DISABLED 0
#define ENABLED 1

struct process_info_v1 {
    unsigned pid;
    u64 bytes;
};

/* The second and the third version have this layout. */
struct process_info {
    unsigned pid;
    u64 bytes;
    unsigned gi, ci;
};

struct process_sample {
    unsigned pid;
    u64 time;
    unsigned sm, memory, encoder, decoder; /* percent */
};

struct process_utilization {
    u64 time;
    unsigned pid;
    unsigned sm, memory, encoder, decoder, jpeg, ofa; /* percent */
};

struct processes_utilization {
    unsigned version;
    unsigned count;
    u64 last_seen;
    struct process_utilization *list;
};

struct accounting_stats {
    unsigned gpu, memory; /* percent, over its life */
    u64 most_bytes;
    u64 milliseconds; /* 0 while it runs */
    u64 start;        /* microseconds since 1970 */
    unsigned running;
    unsigned reserved[5];
};

_Static_assert(sizeof(struct process_info_v1) == 16, "as nvml.h had it");
_Static_assert(sizeof(struct process_info) == 24, "as nvml.h has it");
_Static_assert(sizeof(struct process_sample) == 32, "as nvml.h has it");
_Static_assert(sizeof(struct process_utilization) == 40, "as nvml.h has it");
_Static_assert(sizeof(struct processes_utilization) == 24, "as nvml.h has it");
_Static_assert(sizeof(struct accounting_stats) == 56, "as nvml.h has it");

static struct sim_process *process_list(void)
{
    return calloc(SIM_PROCESSES, sizeof(struct sim_process));
}

/* NVML's protocol for lists: the caller passes the size of its array, and gets the number of
 * entries; the first call may be made without an array. */
static int check_room(unsigned there, unsigned *room, const void *list)
{
    unsigned had = *room;

    *room = there;
    if (had < there)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return there && !list ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

/* Puts one process into the list of a caller. */
typedef void (*put_process)(void *list, unsigned at, const struct sim_process *process);

static void put_v1(void *list, unsigned at, const struct sim_process *process)
{
    ((struct process_info_v1 *)list)[at] = (struct process_info_v1){process->pid, process->bytes};
}

static void put_v3(void *list, unsigned at, const struct sim_process *process)
{
    ((struct process_info *)list)[at] =
        (struct process_info){process->pid, process->bytes, process->gi, process->ci};
}

static int running(nvml_device handle, enum sim_kind kind, unsigned *count, void *list,
                   put_process put)
{
    struct sim_device device;
    struct sim_process *found;
    unsigned p, there;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    found = process_list();
    if (!found)
        return NVML_ERROR_MEMORY;
    there = sim_running(device, (int)kind, found, SIM_PROCESSES);
    result = check_room(there, count, list);
    for (p = 0; result == NVML_SUCCESS && p < there; p++)
        put(list, p, &found[p]);
    free(found);
    return result;
}

/* Defines the three versions of a call that lists processes of one kind. */
#define RUNNING(function, kind)                                                              \
    API int function(nvml_device handle, unsigned *count, void *list)                        \
    {                                                                                        \
        return running(handle, kind, count, list, put_v1);                                   \
    }                                                                                        \
    API int function##_v3(nvml_device handle, unsigned *count, void *list)                   \
    {                                                                                        \
        return running(handle, kind, count, list, put_v3);                                   \
    }                                                                                        \
    ALIAS(#function "_v3") int function##_v2(nvml_device handle, unsigned *count, void *list);

RUNNING(nvmlDeviceGetComputeRunningProcesses, SIM_COMPUTE)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, SIM_GRAPHICS)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, SIM_MPS)

/* Adds a process to the samples, which have one entry for each pid. */
static unsigned add_sample(struct process_sample *samples, unsigned count,
                           const struct sim_process *process, u64 time)
{
    struct process_sample *sample = samples;

    while (sample < samples + count && sample->pid != process->pid)
        sample++;
    if (sample == samples + count)
        *sample = (struct process_sample){process->pid, time, 0, 0, 0, 0};
    sample->sm += process->sm;
    sample->memory += process->memory;
    sample->encoder += process->encoder;
    sample->decoder += process->decoder;
    return sample == samples + count ? count + 1 : count;
}

/* The GPU's last sample, unless the caller has it already: the processes that were active then. The
 * caller must free the result; NULL with *count 0 for none. */
static struct process_sample *sample(const struct sim_gpu *gpu, u64 last_seen, unsigned *count)
{
    struct sim_device device = {gpu, NULL};
    u64 time = sim_now() / SAMPLE_PERIOD * SAMPLE_PERIOD;
    struct process_sample *samples = calloc(SIM_PROCESSES, sizeof *samples);
    struct sim_process *found = process_list();
    unsigned p, there;

    *count = 0;
    if (found && samples && time > last_seen) {
        there = sim_running(device, SIM_ANY, found, SIM_PROCESSES);
        for (p = 0; p < there; p++)
            if (found[p].sm || found[p].memory || found[p].encoder || found[p].decoder)
                *count = add_sample(samples, *count, &found[p], time);
    }
    free(found);
    return samples;
}

static int resolve_sampled(nvml_device handle, const struct sim_gpu **gpu)
{
    int result = sim_resolve_gpu(handle, gpu);

    if (result)
        return result;
    return (*gpu)->mig_enabled ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

API int nvmlDeviceGetProcessUtilization(nvml_device handle, struct process_sample *list,
                                        unsigned *count, u64 last_seen)
{
    const struct sim_gpu *gpu;
    struct process_sample *samples;
    unsigned there;
    int result = resolve_sampled(handle, &gpu);

    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    samples = sample(gpu, last_seen, &there);
    result = there ? check_room(there, count, list) : NVML_ERROR_NOT_FOUND;
    if (result == NVML_SUCCESS)
        memcpy(list, samples, there * sizeof *list);
    free(samples);
    return result;
}

API int nvmlDeviceGetProcessesUtilizationInfo(nvml_device handle,
                                              struct processes_utilization *info)
{
    const struct sim_gpu *gpu;
    struct process_sample *samples;
    unsigned there, p;
    int result = resolve_sampled(handle, &gpu);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != (sizeof *info | 1 << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    samples = sample(gpu, info->last_seen, &there);
    result = there ? check_room(there, &info->count, info->list) : NVML_ERROR_NOT_FOUND;
    for (p = 0; result == NVML_SUCCESS && p < there; p++)
        info->list[p] = (struct process_utilization){
            samples[p].time,    samples[p].pid,     samples[p].sm, samples[p].memory,
            samples[p].encoder, samples[p].decoder, 0,             0};
    free(samples);
    return result;
}

/* A GPU whose processes can be accounted: MIG has no accounting. */
static int resolve_accountable(nvml_device handle, const struct sim_gpu **gpu)
{
    return resolve_sampled(handle, gpu);
}

API int nvmlDeviceGetAccountingMode(nvml_device handle, unsigned *mode)
{
    const struct sim_gpu *gpu;
    int result = resolve_accountable(handle, &gpu);

    if (result)
        return result;
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = sim_is_accounting(gpu) ? ENABLED : DISABLED;
    return NVML_SUCCESS;
}

API int nvmlDeviceSetAccountingMode(nvml_device handle, unsigned mode)
{
    const struct sim_gpu *gpu;
    int result = resolve_accountable(handle, &gpu);

    if (result)
        return result;
    if (mode != ENABLED && mode != DISABLED)
        return NVML_ERROR_INVALID_ARGUMENT;
    return sim_write_activity(gpu, mode == ENABLED ? "accounting on" : "accounting off");
}

API int nvmlDeviceClearAccountingPids(nvml_device handle)
{
    const struct sim_gpu *gpu;
    int result = resolve_accountable(handle, &gpu);

    return result ? result : sim_write_activity(gpu, "accounting clear");
}

API int nvmlDeviceGetAccountingBufferSize(nvml_device handle, unsigned *size)
{
    const struct sim_gpu *gpu;
    int result = resolve_accountable(handle, &gpu);

    if (result)
        return result;
    if (!size)
        return NVML_ERROR_INVALID_ARGUMENT;
    *size = SIM_PROCESSES;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetAccountingPids(nvml_device handle, unsigned *count, unsigned *pids)
{
    const struct sim_gpu *gpu;
    struct sim_process *found;
    unsigned there, p;
    int result = resolve_accountable(handle, &gpu);

    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!sim_is_accounting(gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    found = process_list();
    if (!found)
        return NVML_ERROR_MEMORY;
    there = sim_accounted(gpu, found, SIM_PROCESSES);
    result = check_room(there, count, pids);
    for (p = 0; result == NVML_SUCCESS && p < there; p++)
        pids[p] = found[p].pid;
    free(found);
    return result;
}

static void account(const struct sim_process *process, struct accounting_stats *stats)
{
    u64 life = process->changed - process->start;

    memset(stats, 0, sizeof *stats);
    stats->gpu = life ? (unsigned)(process->sm_total / life) : 0;
    stats->memory = life ? (unsigned)(process->memory_total / life) : 0;
    stats->most_bytes = process->most_bytes;
    stats->milliseconds = process->end ? (process->end - process->start) / 1000 : 0;
    stats->start = process->start;
    stats->running = process->end == 0;
}

API int nvmlDeviceGetAccountingStats(nvml_device handle, unsigned pid,
                                     struct accounting_stats *stats)
{
    const struct sim_gpu *gpu;
    struct sim_process *found;
    unsigned there, p;
    int result = resolve_accountable(handle, &gpu);

    if (result)
        return result;
    if (!stats)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!sim_is_accounting(gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    found = process_list();
    if (!found)
        return NVML_ERROR_MEMORY;
    there = sim_accounted(gpu, found, SIM_PROCESSES);
    for (p = 0; p < there && found[p].pid != pid; p++)
        ;
    if (p < there)
        account(&found[p], stats);
    free(found);
    return p < there ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
