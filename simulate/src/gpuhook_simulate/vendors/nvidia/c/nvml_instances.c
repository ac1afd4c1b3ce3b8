/* NVML: the GPU and compute instances of MIG devices. They can be read but not changed: only
 * gpuhook simulate changes them.
 *
 * The handle of a GPU instance and that of its one compute instance are the address of the MIG
 * device's table entry. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "nvml.h"
#include "state.h"

#define NAME_SIZE 96

struct gi_profile_info {
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs;
    unsigned ofas;
    u64 memory_mib;
};

struct gi_profile_info_v2 {
    unsigned version;
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs;
    unsigned ofas;
    u64 memory_mib;
    char name[NAME_SIZE];
};

struct ci_profile_info {
    unsigned id, slices, instances, multiprocessors;
    unsigned copy_engines, decoders, encoders, jpegs, ofas;
};

struct ci_profile_info_v2 {
    unsigned version;
    struct ci_profile_info info;
    char name[NAME_SIZE];
};

struct placement {
    unsigned start, size;
};

struct gi_info {
    nvml_device device;
    unsigned id, profile_id;
    struct placement placement;
};

struct ci_info {
    nvml_device device;
    const struct sim_mig *gpu_instance;
    unsigned id, profile_id;
    struct placement placement;
};

/* A GPU in MIG mode; the calls below are not valid for others. */
static int resolve_partitioned(nvml_device handle, const struct sim_gpu **gpu)
{
    int result = sim_resolve_gpu(handle, gpu);

    if (result)
        return result;
    return (*gpu)->mig_enabled ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static int resolve_instance(const struct sim_mig *instance, struct sim_device *device)
{
    int result = sim_resolve(instance, device);

    if (result)
        return result;
    return device->mig ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static const struct sim_profile *profile_by_number(const struct sim_gpu *gpu, unsigned number)
{
    unsigned p;

    for (p = 0; p < gpu->profile_count; p++)
        if (gpu->profiles[p].number == number)
            return &gpu->profiles[p];
    return NULL;
}

static const struct sim_profile *profile_by_id(const struct sim_gpu *gpu, unsigned id)
{
    unsigned p;

    for (p = 0; p < gpu->profile_count; p++)
        if (gpu->profiles[p].id == id)
            return &gpu->profiles[p];
    return NULL;
}

static void describe(const struct sim_profile *profile, struct gi_profile_info *info)
{
    memset(info, 0, sizeof *info);
    info->id = profile->id;
    info->slices = profile->slices;
    info->instances = profile->instances;
    info->multiprocessors = profile->multiprocessors;
    info->copy_engines = profile->slices;
    info->decoders = profile->decoders;
    info->jpegs = info->ofas = profile->media;
    info->memory_mib = profile->memory >> 20;
}

static void describe_v2(const struct sim_profile *profile, struct gi_profile_info_v2 *info)
{
    struct gi_profile_info first;

    describe(profile, &first);
    memcpy(&info->id, &first, offsetof(struct gi_profile_info, memory_mib));
    info->memory_mib = first.memory_mib;
    snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
}

API int nvmlDeviceGetGpuInstanceProfileInfo(nvml_device handle, unsigned number,
                                            struct gi_profile_info *info)
{
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    profile = profile_by_number(gpu, number);
    if (!profile)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    describe(profile, info);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceProfileInfoV(nvml_device handle, unsigned number,
                                             struct gi_profile_info_v2 *info)
{
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    profile = profile_by_number(gpu, number);
    if (!profile)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != (sizeof *info | 2 << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    describe_v2(profile, info);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvml_device handle, unsigned id,
                                                 struct gi_profile_info_v2 *info)
{
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    profile = profile_by_id(gpu, id);
    if (!profile)
        return NVML_ERROR_NOT_FOUND;
    return nvmlDeviceGetGpuInstanceProfileInfoV(handle, profile->number, info);
}

/* The memory slices that are taken, one bit each. */
static unsigned taken_slices(const struct sim_gpu *gpu)
{
    unsigned m, taken = 0;

    for (m = 0; m < gpu->mig_count; m++) {
        unsigned size = gpu->migs[m]->profile->memory_slices;

        taken |= ((1u << size) - 1) << gpu->migs[m]->start;
    }
    return taken;
}

static unsigned free_compute_slices(const struct sim_gpu *gpu)
{
    unsigned m, used = 0;

    for (m = 0; m < gpu->mig_count; m++)
        used += gpu->migs[m]->profile->slices;
    return 7 - used;
}

static unsigned same_profile(const struct sim_gpu *gpu, const struct sim_profile *profile)
{
    unsigned m, same = 0;

    for (m = 0; m < gpu->mig_count; m++)
        same += gpu->migs[m]->profile == profile;
    return same;
}

API int nvmlDeviceGetGpuInstanceRemainingCapacity(nvml_device handle, unsigned id, unsigned *count)
{
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    unsigned taken, start, places = 0, compute, allowed;
    int result = resolve_partitioned(handle, &gpu);

    if (result)
        return result;
    profile = profile_by_id(gpu, id);
    if (!profile || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    taken = taken_slices(gpu);
    for (start = 0; start < 8; start += profile->memory_slices)
        places += !(taken >> start & ((1u << profile->memory_slices) - 1));
    compute = free_compute_slices(gpu) / profile->slices;
    allowed = profile->instances - same_profile(gpu, profile);
    *count = places < compute ? places : compute;
    *count = *count < allowed ? *count : allowed;
    return NVML_SUCCESS;
}

/* Placements are the places where a profile may start, taken or not. */
API int nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvml_device handle, unsigned id,
                                                      struct placement *places, unsigned *count)
{
    const struct sim_gpu *gpu;
    const struct sim_profile *profile;
    unsigned p;
    int result = resolve_partitioned(handle, &gpu);

    if (result)
        return result;
    profile = profile_by_id(gpu, id);
    if (!profile || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = profile->memory_slices == 1 ? 7 : profile->instances;
    for (p = 0; places && p < *count; p++)
        places[p] = (struct placement){p * profile->memory_slices, profile->memory_slices};
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetGpuInstancePossiblePlacements_v2")
int nvmlDeviceGetGpuInstancePossiblePlacements(nvml_device handle, unsigned id,
                                               struct placement *places, unsigned *count);

API int nvmlDeviceGetGpuInstances(nvml_device handle, unsigned id, const struct sim_mig **instances,
                                  unsigned *count)
{
    const struct sim_gpu *gpu;
    unsigned m;
    int result = resolve_partitioned(handle, &gpu);

    if (result)
        return result;
    if (!profile_by_id(gpu, id) || !instances || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    for (m = 0; m < gpu->mig_count; m++)
        if (gpu->migs[m]->profile->id == id && gpu->migs[m]->reachable)
            instances[(*count)++] = gpu->migs[m];
    return NVML_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceById(nvml_device handle, unsigned id,
                                     const struct sim_mig **instance)
{
    const struct sim_gpu *gpu;
    unsigned m;
    int result = resolve_partitioned(handle, &gpu);

    if (result)
        return result;
    if (!instance)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (m = 0; m < gpu->mig_count; m++) {
        if (gpu->migs[m]->gi != id || !gpu->migs[m]->reachable)
            continue;
        *instance = gpu->migs[m];
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

API int nvmlGpuInstanceGetInfo(const struct sim_mig *instance, struct gi_info *info)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    info->device = device.gpu;
    info->id = instance->gi;
    info->profile_id = instance->profile->id;
    info->placement = (struct placement){instance->start, instance->profile->memory_slices};
    return NVML_SUCCESS;
}

/* Compute instance profiles are numbered by size: 1, 2, 3, 4 and 7 slices; number and id agree. */
static unsigned ci_profile(const struct sim_mig *instance)
{
    return instance->profile->slices == 7 ? 4 : instance->profile->slices - 1;
}

API int nvmlGpuInstanceGetComputeInstanceProfileInfo(const struct sim_mig *instance,
                                                     unsigned number, unsigned engines,
                                                     struct ci_profile_info *info)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    if (result)
        return result;
    if (!info || engines)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (number != ci_profile(instance))
        return NVML_ERROR_NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->id = number;
    info->slices = instance->profile->slices;
    info->instances = 1;
    info->multiprocessors = instance->profile->multiprocessors;
    info->copy_engines = instance->profile->slices;
    info->decoders = instance->profile->decoders;
    info->jpegs = info->ofas = instance->profile->media;
    return NVML_SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstanceProfileInfoV(const struct sim_mig *instance,
                                                      unsigned number, unsigned engines,
                                                      struct ci_profile_info_v2 *info)
{
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != (sizeof *info | 2 << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (sim_is_mig(instance))
        snprintf(info->name, sizeof info->name, "MIG %s", instance->profile->name);
    return nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, engines, &info->info);
}

API int nvmlGpuInstanceGetComputeInstanceRemainingCapacity(const struct sim_mig *instance,
                                                           unsigned id, unsigned *count)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    (void)id;
    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0; /* the one compute instance fills its GPU instance */
    return NVML_SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstances(const struct sim_mig *instance, unsigned id,
                                           const struct sim_mig **instances, unsigned *count)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    if (result)
        return result;
    if (!instances || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = id == ci_profile(instance);
    if (*count)
        *instances = instance;
    return NVML_SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstanceById(const struct sim_mig *instance, unsigned id,
                                              const struct sim_mig **found)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    if (result)
        return result;
    if (!found)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (id != instance->ci)
        return NVML_ERROR_NOT_FOUND;
    *found = instance;
    return NVML_SUCCESS;
}

API int nvmlComputeInstanceGetInfo_v2(const struct sim_mig *instance, struct ci_info *info)
{
    struct sim_device device;
    int result = resolve_instance(instance, &device);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    info->device = device.gpu;
    info->gpu_instance = instance;
    info->id = instance->ci;
    info->profile_id = ci_profile(instance);
    info->placement = (struct placement){0, instance->profile->slices};
    return NVML_SUCCESS;
}

ALIAS("nvmlComputeInstanceGetInfo_v2")
int nvmlComputeInstanceGetInfo(const struct sim_mig *instance, struct ci_info *info);
