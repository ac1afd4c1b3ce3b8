/* CUDA: initialization and enumeration of devices. */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cuda.h"
#include "reach.h"
#include "state.h"

static struct sim_cuda_device devices[SIM_MAX_GPUS];
static int device_count;
static int initialized;

int sim_cuda_initialized(void)
{
    return initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

const struct sim_cuda_device *sim_cuda_device(int ordinal, int *error)
{
    *error = sim_cuda_initialized();
    if (*error)
        return NULL;
    if (ordinal < 0 || ordinal >= device_count) {
        *error = CUDA_ERROR_INVALID_DEVICE;
        return NULL;
    }
    return &devices[ordinal];
}

static int first_mig(const struct sim_gpu *gpu, const struct sim_mig **mig)
{
    unsigned m;

    for (m = 0; m < gpu->mig_count; m++) {
        if (!sim_reach_mig(gpu, gpu->migs[m]))
            continue;
        *mig = gpu->migs[m];
        return 1;
    }
    return 0;
}

/* CUDA's rules for MIG: a GPU in MIG mode isn't a device itself; at most one MIG device is
 * enumerated, and then no whole GPU in addition to it. */
static void enumerate(void)
{
    unsigned i;

    sim_refresh(1);
    device_count = 0;
    for (i = 0; i < SIM_GPU_COUNT; i++) {
        const struct sim_gpu *gpu = &sim_gpus[i];
        const struct sim_mig *mig = NULL;

        if (gpu->lost || !sim_reach_gpu(gpu))
            continue;
        if (gpu->mig_enabled && !first_mig(gpu, &mig))
            continue;
        if (mig) {
            devices[0] = (struct sim_cuda_device){gpu, mig};
            device_count = 1;
            return;
        }
        devices[device_count++] = (struct sim_cuda_device){gpu, NULL};
    }
}

/* The device that one word of CUDA_VISIBLE_DEVICES names: an index, or a UUID or its start. */
static int find_visible(const char *word, size_t length, const struct sim_cuda_device *all,
                        int count)
{
    int i;

    if (length && isdigit((unsigned char)*word)) {
        char *end;
        long index = strtol(word, &end, 10);

        return end == word + length && index < count ? (int)index : -1;
    }
    for (i = 0; length > 4 && i < count; i++) {
        const char *uuid = all[i].mig ? all[i].mig->uuid : all[i].gpu->uuid;

        if (strncasecmp(uuid, word, length) == 0)
            return i;
    }
    return -1;
}

/* Keeps the devices that CUDA_VISIBLE_DEVICES names, in its order, up to the first unknown one. */
static void apply_visible_devices(const char *list)
{
    struct sim_cuda_device all[SIM_MAX_GPUS];
    int count = device_count, found;

    memcpy(all, devices, sizeof all);
    device_count = 0;
    while (*list && device_count < SIM_MAX_GPUS) {
        size_t length = strcspn(list, ",");

        found = find_visible(list, length, all, count);
        if (found < 0)
            return;
        devices[device_count++] = all[found];
        list += length;
        if (*list == ',')
            list++;
    }
}

API int cuInit(unsigned flags)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int error;

    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    error = sim_reach_control();
    if (SIM_FAILURE == SIM_FAIL_NOT_LOADED || error == ENOENT)
        return CUDA_ERROR_NO_DEVICE;
    if (error || sim_reach_uvm())
        return CUDA_ERROR_UNKNOWN;
    if (SIM_FAILURE == SIM_FAIL_VERSION_MISMATCH)
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    enumerate();
    if (visible)
        apply_visible_devices(visible);
    if (device_count == 0)
        return CUDA_ERROR_NO_DEVICE;
    initialized = 1;
    return CUDA_SUCCESS;
}

API int cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = SIM_CUDA_VERSION;
    return CUDA_SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
    if (sim_cuda_initialized())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

static const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_text(int error, const char **text, int want_name)
{
    size_t i;

    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    for (i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].error != error)
            continue;
        *text = want_name ? errors[i].name : errors[i].text;
        return CUDA_SUCCESS;
    }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

API int cuGetErrorName(int error, const char **name)
{
    return error_text(error, name, 1);
}

API int cuGetErrorString(int error, const char **text)
{
    return error_text(error, text, 0);
}
