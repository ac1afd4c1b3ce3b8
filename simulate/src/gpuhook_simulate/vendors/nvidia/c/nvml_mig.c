/* NVML: multi-instance GPU. Reachable MIG devices are numbered from 0. */
#include <stddef.h>

#include "nvml.h"

API int nvmlDeviceGetMigMode(nvml_device handle, unsigned *current, unsigned *pending)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!gpu->profile_count)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu->mig_enabled;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(nvml_device handle, unsigned *count)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = gpu->profile_count ? SIM_MAX_MIGS : 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(nvml_device handle, unsigned index, nvml_device *mig)
{
    const struct sim_gpu *gpu;
    unsigned m, seen = 0;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!mig || index >= SIM_MAX_MIGS)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!gpu->profile_count)
        return NVML_ERROR_NOT_SUPPORTED;
    for (m = 0; m < gpu->mig_count; m++) {
        if (!gpu->migs[m]->reachable || seen++ != index)
            continue;
        *mig = gpu->migs[m];
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml_device handle, nvml_device *parent)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!device.mig || !parent)
        return NVML_ERROR_INVALID_ARGUMENT;
    *parent = device.gpu;
    return NVML_SUCCESS;
}

API int nvmlDeviceIsMigDeviceHandle(nvml_device handle, unsigned *is_mig)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!is_mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    *is_mig = device.mig != NULL;
    return NVML_SUCCESS;
}

/* The MIG device of a handle, for calls that are only valid for one. */
static int resolve_mig(nvml_device handle, const struct sim_mig **mig)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    *mig = device.mig;
    return device.mig ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API int nvmlDeviceGetGpuInstanceId(nvml_device handle, unsigned *id)
{
    const struct sim_mig *mig;
    int result = resolve_mig(handle, &mig);

    if (result)
        return result;
    if (!id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = mig->gi;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeInstanceId(nvml_device handle, unsigned *id)
{
    const struct sim_mig *mig;
    int result = resolve_mig(handle, &mig);

    if (result)
        return result;
    if (!id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = mig->ci;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetAttributes_v2(nvml_device handle, struct nvml_attributes *attributes)
{
    const struct sim_mig *mig;
    int result = resolve_mig(handle, &mig);

    if (result)
        return result;
    if (!attributes)
        return NVML_ERROR_INVALID_ARGUMENT;
    attributes->multiprocessors = mig->profile->multiprocessors;
    attributes->copy_engines = mig->profile->slices;
    attributes->decoders = mig->profile->decoders;
    attributes->encoders = 0;
    attributes->jpegs = attributes->ofas = mig->profile->media;
    attributes->gi_slices = attributes->ci_slices = mig->profile->slices;
    attributes->memory_mib = mig->profile->memory >> 20;
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetAttributes_v2")
int nvmlDeviceGetAttributes(nvml_device handle, struct nvml_attributes *attributes);
