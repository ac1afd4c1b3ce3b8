/* NVML: initialization, reachable devices, and queries about the whole system. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "nvml.h"
#include "reach.h"
#include "state.h"

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;
static const struct sim_gpu *reachable[SIM_MAX_GPUS];
static unsigned reachable_count;

int sim_initialized(void)
{
    return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

unsigned sim_gpu_count(void)
{
    return reachable_count;
}

const struct sim_gpu *sim_gpu_at(unsigned index)
{
    return reachable[index];
}

int sim_copy(char *buffer, unsigned size, const char *text)
{
    size_t need = strlen(text) + 1;

    if (!buffer)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (size < need)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, text, need);
    return NVML_SUCCESS;
}

static int driver_state(void)
{
    int error;

    if (SIM_FAILURE == SIM_FAIL_NOT_LOADED)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    error = sim_reach_control();
    if (error == ENOENT)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (error == EACCES)
        return NVML_ERROR_NO_PERMISSION;
    if (error)
        return NVML_ERROR_UNKNOWN;
    if (SIM_FAILURE == SIM_FAIL_VERSION_MISMATCH)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    return NVML_SUCCESS;
}

static void find_reachable(void)
{
    unsigned i;

    sim_refresh(1);
    reachable_count = 0;
    for (i = 0; i < SIM_GPU_COUNT; i++) {
        const struct sim_gpu *gpu = &sim_gpus[i];

        if (sim_reach_gpu(gpu))
            reachable[reachable_count++] = gpu;
    }
}

static void sleep_as_asked(void)
{
    struct timespec left = {SIM_INIT_NANOSECONDS / 1000000000, SIM_INIT_NANOSECONDS % 1000000000};

    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
}

API int nvmlInitWithFlags(unsigned flags)
{
    int result = NVML_SUCCESS;

    (void)flags;
    pthread_mutex_lock(&init_lock);
    if (users == 0) {
        result = driver_state();
        if (result == NVML_SUCCESS) {
            sleep_as_asked();
            find_reachable();
        }
    }
    if (result == NVML_SUCCESS)
        users++;
    pthread_mutex_unlock(&init_lock);
    return result;
}

API int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

ALIAS("nvmlInit_v2") int nvmlInit(void);

API int nvmlShutdown(void)
{
    int result = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&init_lock);
    if (users) {
        users--;
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

static const char *const error_texts[] = {
    "Success",
    "Uninitialized",
    "Invalid Argument",
    "Not Supported",
    "Insufficient Permissions",
    "Already Initialized",
    "Not Found",
    "Insufficient Size",
    "Insufficient External Power",
    "Driver Not Loaded",
    "Timeout",
    "Interrupt Request Issue",
    "NVML Shared Library Not Found",
    "Function Not Found",
    "Corrupted infoROM",
    "GPU is lost",
    "GPU requires reset",
    "GPU access blocked by the operating system",
    "Driver/library version mismatch",
    "In use by another client",
    "Insufficient Memory",
    "No data",
    "vGPU ECC Not Supported",
    "Insufficient Resources",
    "Frequency Not Supported",
    "Argument Version Mismatch",
    "Deprecated",
    "Not Ready",
    "GPU not found",
    "Invalid State",
};

API const char *nvmlErrorString(int result)
{
    if (result < 0 || (size_t)result >= sizeof error_texts / sizeof *error_texts)
        return "Unknown Error";
    return error_texts[result];
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    return sim_copy(version, length, SIM_DRIVER_VERSION);
}

/* NVML's own version needs no driver: nvidia-smi prints it when initialization failed. */
API int nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    return sim_copy(version, length, SIM_NVML_VERSION);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = SIM_CUDA_VERSION;
    return NVML_SUCCESS;
}

ALIAS("nvmlSystemGetCudaDriverVersion_v2") int nvmlSystemGetCudaDriverVersion(int *version);

struct branch_info {
    unsigned version;
    char branch[80];
};

API int nvmlSystemGetDriverBranch(struct branch_info *info, unsigned length)
{
    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    return info ? sim_copy(info->branch, length, SIM_DRIVER_BRANCH) : NVML_ERROR_INVALID_ARGUMENT;
}

API int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    char path[64], text[256];
    size_t got;
    FILE *file;

    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    file = fopen(path, "re");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    got = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[got] = '\0';
    return sim_copy(name, length, text);
}

API int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = sim_gpu_count();
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetCount_v2") int nvmlDeviceGetCount(unsigned *count);

API int nvmlUnitGetCount(unsigned *count)
{
    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0; /* no S-class enclosures */
    return NVML_SUCCESS;
}

API int nvmlGetExcludedDeviceCount(unsigned *count)
{
    return nvmlUnitGetCount(count);
}
