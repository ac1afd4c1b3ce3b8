/* CUDA: properties of a device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cuda.h"

API int cuDeviceGet(int *device, int ordinal)
{
    int error;

    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim_cuda_device(ordinal, &error))
        *device = ordinal;
    return error;
}

API int cuDeviceGetName(char *name, int length, int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (device->mig)
        snprintf(name, (size_t)length, "%s MIG %s", device->gpu->name, device->mig->profile->name);
    else
        snprintf(name, (size_t)length, "%s", device->gpu->name);
    return CUDA_SUCCESS;
}

/* 16 bytes from the hexadecimal digits of GPU-8-4-4-4-12 or MIG-8-4-4-4-12. */
static void pack_uuid(const char *text, unsigned char uuid[16])
{
    char digits[3] = "";
    int i;

    for (i = 0, text += 4; i < 16; i++, text += 2) {
        if (*text == '-')
            text++;
        memcpy(digits, text, 2);
        uuid[i] = (unsigned char)strtoul(digits, NULL, 16);
    }
}

API int cuDeviceGetUuid(unsigned char uuid[16], int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    pack_uuid(device->gpu->uuid, uuid);
    return CUDA_SUCCESS;
}

API int cuDeviceGetUuid_v2(unsigned char uuid[16], int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    pack_uuid(device->mig ? device->mig->uuid : device->gpu->uuid, uuid);
    return CUDA_SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = device->mig ? device->mig->profile->memory : device->gpu->memory;
    return CUDA_SUCCESS;
}

/* The first version counted bytes in 32 bits. */
API int cuDeviceTotalMem(unsigned *bytes, int ordinal)
{
    size_t all;
    int error = cuDeviceTotalMem_v2(&all, ordinal);

    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (error == CUDA_SUCCESS)
        *bytes = all > 0xffffffff ? 0xffffffff : (unsigned)all;
    return error;
}

API int cuDeviceComputeCapability(int *major, int *minor, int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = (int)device->gpu->cc_major;
    *minor = (int)device->gpu->cc_minor;
    return CUDA_SUCCESS;
}

/* CUdevice_attribute numbers; limits that are equal for all simulated models are constants. */
static int attribute(const struct sim_cuda_device *device, int number)
{
    const struct sim_gpu *gpu = device->gpu;
    unsigned multiprocessors =
        device->mig ? device->mig->profile->multiprocessors : gpu->multiprocessors;

    switch (number) {
    case 1: return 1024;                 /* threads per block */
    case 2: case 3: return 1024;         /* block dimensions x, y */
    case 4: return 64;                   /* z */
    case 5: return 2147483647;           /* grid dimension x */
    case 6: case 7: return 65535;        /* y, z */
    case 8: return 49152;                /* shared memory per block */
    case 9: return 65536;                /* constant memory */
    case 10: return 32;                  /* warp size */
    case 11: return 2147483647;          /* pitch */
    case 12: return 65536;               /* registers per block */
    case 13: return (int)gpu->sm_clock * 1000; /* kHz */
    case 14: return 512;                 /* texture alignment */
    case 15: return 1;                   /* copy while running */
    case 16: return (int)multiprocessors;
    case 17: return 0;                   /* no run time limit */
    case 18: return 0;                   /* not integrated */
    case 19: return 1;                   /* can map host memory */
    case 20: return 0;                   /* compute mode: default */
    case 31: return 1;                   /* concurrent kernels */
    case 32: return gpu->ecc;
    case 33: return (int)gpu->bus;
    case 34: return (int)gpu->device;
    case 35: return 0;                   /* no TCC driver: not Windows */
    case 36: return (int)gpu->memory_clock * 1000;
    case 37: return (int)gpu->bus_width;
    case 38: return 50 << 20;            /* L2 cache */
    case 39: return 2048;                /* threads per multiprocessor */
    case 40: return 3;                   /* copy engines */
    case 41: return 1;                   /* unified addressing */
    case 50: return (int)gpu->domain;
    case 75: return (int)gpu->cc_major;
    case 76: return (int)gpu->cc_minor;
    case 78: case 83: case 88: case 89: return 1; /* priorities, managed memory */
    case 84: return 0;                   /* not a multi-GPU board */
    default: return 0;
    }
}

API int cuDeviceGetAttribute(int *value, int number, int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!value || number <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute(device, number);
    return CUDA_SUCCESS;
}

API int cuDeviceGetPCIBusId(char *text, int length, int ordinal)
{
    int error;
    const struct sim_cuda_device *device = sim_cuda_device(ordinal, &error);

    if (!device)
        return error;
    if (!text || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", device->gpu->domain, device->gpu->bus,
             device->gpu->device);
    return CUDA_SUCCESS;
}

API int cuDeviceGetByPCIBusId(int *ordinal, const char *bus_id)
{
    const struct sim_cuda_device *device;
    char text[32];
    int i, error;

    if (!ordinal || !bus_id)
        return CUDA_ERROR_INVALID_VALUE;
    for (i = 0; (device = sim_cuda_device(i, &error)); i++) {
        cuDeviceGetPCIBusId(text, sizeof text, i);
        if (strcasecmp(text, bus_id) != 0)
            continue;
        *ordinal = i;
        return CUDA_SUCCESS;
    }
    return error;
}

API int cuDeviceCanAccessPeer(int *can, int ordinal, int peer)
{
    int error;

    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_cuda_device(ordinal, &error) || !sim_cuda_device(peer, &error))
        return error;
    *can = ordinal != peer;
    return CUDA_SUCCESS;
}
