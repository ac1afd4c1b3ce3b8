/* NVML: memory limits by cgroup, since driver 615. */
#include "memory_limits.h"

#include <stdio.h>
#include <unistd.h>

#include "activity.h"
#include "nvml.h"

#if SIM_LIMITS

struct nvml_set_limits {
    const char *name_space;
    u64 soft, hard;
};

struct nvml_get_limits {
    const char *name_space;
    u64 soft, hard, used;
};

static int limitable(nvml_device handle, const struct sim_gpu **gpu)
{
    int result = sim_resolve_gpu(handle, gpu);

    if (result)
        return result;
    return (*gpu)->mig_enabled ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

/* True if a process is directly in that cgroup. */
static int is_member(const char *folder, unsigned pid)
{
    char path[4096];
    unsigned member;
    int found = 0;
    FILE *file;

    snprintf(path, sizeof path, "%s/cgroup.procs", folder);
    file = fopen(path, "re");
    while (file && !found && fscanf(file, "%u", &member) == 1)
        found = member == pid;
    if (file)
        fclose(file);
    return found;
}

API int nvmlDeviceSetMemoryLimits_v1(nvml_device handle, const struct nvml_set_limits *limits)
{
    const struct sim_gpu *gpu;
    int result = limitable(handle, &gpu);

    if (result)
        return result;
    if (!limits || !limits->name_space || limits->soft > limits->hard)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    return sim_set_limit(gpu, limits->name_space, (struct sim_limit){limits->soft, limits->hard})
               ? NVML_SUCCESS
               : NVML_ERROR_NOT_FOUND;
}

API int nvmlDeviceGetMemoryLimits_v1(nvml_device handle, struct nvml_get_limits *limits)
{
    static struct sim_process running[SIM_PROCESSES];
    struct sim_limit found;
    const struct sim_gpu *gpu;
    unsigned count, p;
    int result = limitable(handle, &gpu);

    if (result)
        return result;
    if (!limits || !limits->name_space)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!sim_get_limit(gpu, limits->name_space, &found))
        return NVML_ERROR_NOT_SUPPORTED;
    limits->soft = found.soft;
    limits->hard = found.hard;
    limits->used = 0;
    count = sim_running((struct sim_device){gpu, NULL}, SIM_ANY, running, SIM_PROCESSES);
    for (p = 0; p < count && p < SIM_PROCESSES; p++)
        if (is_member(limits->name_space, running[p].pid))
            limits->used += running[p].bytes;
    return NVML_SUCCESS;
}

#endif
