/* NVML: lookup of a device handle by index, UUID, serial number or PCI address. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nvml.h"
#include "state.h"

int sim_resolve(nvml_device handle, struct sim_device *device)
{
    const char *address = handle, *start = (const char *)sim_gpus;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    sim_refresh(0);
    device->mig = sim_is_mig(handle) ? handle : NULL;
    if (device->mig)
        device->gpu = device->mig->gpu;
    else if (address < start || address >= start + SIM_GPU_COUNT * sizeof *sim_gpus ||
             (size_t)(address - start) % sizeof *sim_gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    else
        device->gpu = handle;
    if (device->mig && !device->mig->present)
        return NVML_ERROR_INVALID_ARGUMENT; /* destroyed since the handle was returned */
    return device->gpu->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

int sim_resolve_gpu(nvml_device handle, const struct sim_gpu **gpu)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    *gpu = device.gpu;
    return device.mig ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static int hand_out(const struct sim_gpu *gpu, nvml_device *handle)
{
    sim_refresh(0);
    if (gpu->lost)
        return NVML_ERROR_GPU_IS_LOST;
    *handle = gpu;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device *handle)
{
    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!handle || index >= sim_gpu_count())
        return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(sim_gpu_at(index), handle);
}

ALIAS("nvmlDeviceGetHandleByIndex_v2")
int nvmlDeviceGetHandleByIndex(unsigned index, nvml_device *handle);

static int find_mig(const struct sim_gpu *gpu, const char *uuid, nvml_device *handle)
{
    unsigned m;

    for (m = 0; m < gpu->mig_count; m++) {
        if (strcasecmp(gpu->migs[m]->uuid, uuid) != 0 || !gpu->migs[m]->reachable)
            continue;
        if (gpu->lost)
            return NVML_ERROR_GPU_IS_LOST;
        *handle = gpu->migs[m];
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device *handle)
{
    unsigned i;
    int result;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !handle)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_refresh(0);
    for (i = 0; i < sim_gpu_count(); i++) {
        if (strcasecmp(sim_gpu_at(i)->uuid, uuid) == 0)
            return hand_out(sim_gpu_at(i), handle);
        result = find_mig(sim_gpu_at(i), uuid, handle);
        if (result != NVML_ERROR_NOT_FOUND)
            return result;
    }
    return NVML_ERROR_NOT_FOUND;
}

API int nvmlDeviceGetHandleByUUIDV(const struct nvml_uuid_argument *argument, nvml_device *handle)
{
    if (!argument)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (argument->type != 1)
        return NVML_ERROR_NOT_SUPPORTED;
    return nvmlDeviceGetHandleByUUID(argument->value.text, handle);
}

API int nvmlDeviceGetHandleBySerial(const char *serial, nvml_device *handle)
{
    unsigned i;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!serial || !handle)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (i = 0; i < sim_gpu_count(); i++)
        if (strcmp(sim_gpu_at(i)->serial, serial) == 0)
            return hand_out(sim_gpu_at(i), handle);
    return NVML_ERROR_NOT_FOUND;
}

/* Parses [domain:]bus:device[.function] into three numbers; 0 if the text is invalid. */
static int parse_bus_id(const char *text, unsigned long numbers[3])
{
    unsigned long part[3] = {0, 0, 0};
    int count = 0;
    char *end;

    for (;;) {
        part[count++] = strtoul(text, &end, 16);
        if (end == text)
            return 0;
        if (*end != ':' || count == 3)
            break;
        text = end + 1;
    }
    if (count < 2 || (*end && strcmp(end, ".0") != 0))
        return 0;
    numbers[0] = count == 3 ? part[0] : 0;
    numbers[1] = part[count - 2];
    numbers[2] = part[count - 1];
    return 1;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvml_device *handle)
{
    unsigned long want[3];
    unsigned i;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!bus_id || !handle || !parse_bus_id(bus_id, want))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (i = 0; i < sim_gpu_count(); i++) {
        const struct sim_gpu *gpu = sim_gpu_at(i);

        if (gpu->domain == want[0] && gpu->bus == want[1] && gpu->device == want[2])
            return hand_out(gpu, handle);
    }
    return NVML_ERROR_NOT_FOUND;
}

ALIAS("nvmlDeviceGetHandleByPciBusId_v2")
int nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvml_device *handle);
