/* NVML: identity of a device - names, identifiers, PCI address, architecture, memory. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "activity.h"
#include "memory_limits.h"
#include "nvml.h"

API int nvmlDeviceGetName(nvml_device handle, char *name, unsigned length)
{
    struct sim_device device;
    char text[128];
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!device.mig)
        return sim_copy(name, length, device.gpu->name);
    snprintf(text, sizeof text, "%s MIG %s", device.gpu->name, device.mig->profile->name);
    return sim_copy(name, length, text);
}

API int nvmlDeviceGetUUID(nvml_device handle, char *uuid, unsigned length)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    return sim_copy(uuid, length, device.mig ? device.mig->uuid : device.gpu->uuid);
}

/* Defines a call that copies one text of a whole GPU. */
#define TEXT_OF_GPU(function, field)                                          \
    API int function(nvml_device handle, char *text, unsigned length)         \
    {                                                                         \
        const struct sim_gpu *gpu;                                            \
        int result = sim_resolve_gpu(handle, &gpu);                           \
                                                                              \
        return result ? result : sim_copy(text, length, gpu->field);          \
    }

TEXT_OF_GPU(nvmlDeviceGetSerial, serial)
TEXT_OF_GPU(nvmlDeviceGetBoardPartNumber, board_part)
TEXT_OF_GPU(nvmlDeviceGetVbiosVersion, vbios)

API int nvmlDeviceGetGspFirmwareVersion(nvml_device handle, char *version)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    return result ? result : sim_copy(version, 80, SIM_DRIVER_VERSION);
}

API int nvmlDeviceGetGspFirmwareMode(nvml_device handle, unsigned *enabled, unsigned *default_mode)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!enabled || !default_mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *enabled = *default_mode = 1;
    return NVML_SUCCESS;
}

/* Defines a call that returns one number of a device, a GPU or a part of one. */
#define NUMBER_OF_DEVICE(function, expression)                                \
    NUMBER_WHERE(1, function, expression)

/* Defines a call that is supported only if a condition holds. */
#define NUMBER_WHERE(supported, function, expression)                         \
    API int function(nvml_device handle, unsigned *number)                    \
    {                                                                         \
        struct sim_device device;                                             \
        const struct sim_gpu *gpu;                                            \
        int result = sim_resolve(handle, &device);                            \
                                                                              \
        if (result)                                                           \
            return result;                                                    \
        if (!number)                                                          \
            return NVML_ERROR_INVALID_ARGUMENT;                               \
        gpu = device.gpu;                                                     \
        (void)gpu;                                                            \
        if (!(supported))                                                     \
            return NVML_ERROR_NOT_SUPPORTED;                                  \
        *number = (unsigned)(expression);                                     \
        return NVML_SUCCESS;                                                  \
    }

static unsigned index_of(struct sim_device device)
{
    unsigned i, m, seen = 0;

    for (i = 0; !device.mig && i < sim_gpu_count(); i++)
        if (sim_gpu_at(i) == device.gpu)
            return i;
    for (m = 0; m < device.gpu->mig_count && device.gpu->migs[m] != device.mig; m++)
        seen += (unsigned)device.gpu->migs[m]->reachable;
    return seen;
}

NUMBER_OF_DEVICE(nvmlDeviceGetIndex, index_of(device))
NUMBER_WHERE(!SIM_ONE_NODE, nvmlDeviceGetMinorNumber, gpu->minor)
NUMBER_OF_DEVICE(nvmlDeviceGetBrand, gpu->brand)
NUMBER_OF_DEVICE(nvmlDeviceGetArchitecture, gpu->architecture)
NUMBER_OF_DEVICE(nvmlDeviceGetMemoryBusWidth, gpu->bus_width)
NUMBER_OF_DEVICE(nvmlDeviceGetNumGpuCores, gpu->cores)
NUMBER_OF_DEVICE(nvmlDeviceGetBoardId, gpu->domain << 16 | gpu->bus << 8 | gpu->device)
NUMBER_OF_DEVICE(nvmlDeviceGetModuleId, index_of(device) + 1)
NUMBER_OF_DEVICE(nvmlDeviceGetBusType, 2) /* PCIe */

API int nvmlDeviceGetCudaComputeCapability(nvml_device handle, int *major, int *minor)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)device.gpu->cc_major;
    *minor = (int)device.gpu->cc_minor;
    return NVML_SUCCESS;
}

void sim_pci_info(struct nvml_pci_info *info, unsigned domain, unsigned bus, unsigned id,
                  unsigned subsystem)
{
    memset(info, 0, sizeof *info);
    info->domain = domain;
    info->bus = bus;
    info->pci_device_id = id;
    info->pci_subsystem_id = subsystem;
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:00.0", domain, bus);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:00.0", domain, bus);
}

/* The first two versions end before bus_id and have four reserved words in its place. */
void sim_old_pci_info(struct nvml_pci_info *old, const struct nvml_pci_info *info)
{
    memcpy(old, info, offsetof(struct nvml_pci_info, bus_id));
    memset((char *)old + offsetof(struct nvml_pci_info, bus_id), 0, 16);
}

API int nvmlDeviceGetPciInfo_v3(nvml_device handle, struct nvml_pci_info *info)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_pci_info(info, gpu->domain, gpu->bus, gpu->pci_id, gpu->pci_subsystem);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetPciInfo_v2(nvml_device handle, struct nvml_pci_info *old)
{
    struct nvml_pci_info info;
    int result = nvmlDeviceGetPciInfo_v3(handle, &info);

    if (result)
        return result;
    if (!old)
        return NVML_ERROR_INVALID_ARGUMENT;
    sim_old_pci_info(old, &info);
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetPciInfo_v2")
int nvmlDeviceGetPciInfo(nvml_device handle, struct nvml_pci_info *info);

API int nvmlDeviceGetPciInfoExt(nvml_device handle, struct nvml_pci_info_ext *info)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    info->domain = gpu->domain;
    info->bus = gpu->bus;
    info->device = gpu->device;
    info->pci_device_id = gpu->pci_id;
    info->pci_subsystem_id = gpu->pci_subsystem;
    info->base_class = 3; /* display controller */
    info->sub_class = 2;  /* 3D */
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus,
             gpu->device);
    return NVML_SUCCESS;
}

static u64 memory_of(struct sim_device device)
{
    return device.mig ? device.mig->profile->memory : device.gpu->memory;
}

/* The driver's reserved memory. */
static u64 reserved_of(struct sim_device device)
{
    return memory_of(device) / 256 >> 20 << 20;
}

/* The processes' memory, at most the available memory. */
static u64 used_of(struct sim_device device)
{
    u64 most = memory_of(device) - reserved_of(device), used = sim_usage(device).bytes;

    return used < most ? used : most;
}

/* Here reserved memory counts as used; since the second version it is separate. */
API int nvmlDeviceGetMemoryInfo(nvml_device handle, struct nvml_memory *memory)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = memory_of(device);
    memory->used = reserved_of(device) + used_of(device);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(nvml_device handle, struct nvml_memory_v2 *memory)
{
    struct sim_device device;
    u64 limit, most;
    int result = sim_resolve(handle, &device);

    if (result)
        return result;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2 << 24))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = memory_of(device);
    memory->reserved = reserved_of(device);
    memory->used = used_of(device);
    limit = device.mig ? SIM_UNLIMITED : sim_own_limit(device.gpu);
    if (limit < memory->total - memory->reserved)
        memory->total = memory->reserved + limit;
    most = memory->total - memory->reserved;
    memory->used = memory->used < most ? memory->used : most;
    memory->free = most - memory->used;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetBAR1MemoryInfo(nvml_device handle, struct nvml_memory *memory)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);
    u64 size = 1 << 20;

    if (result)
        return result;
    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    while (size < memory_of(device))
        size <<= 1; /* a BAR is a power of two */
    memory->total = memory->free = size;
    memory->used = 0;
    return NVML_SUCCESS;
}
