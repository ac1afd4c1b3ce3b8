/* CUDA: memory, only as numbers. There is no storage behind an address. */
#include <pthread.h>
#include <stddef.h>

#include "cuda.h"
#include "memory_limits.h"

#define ALLOCATIONS 4096
#define FIRST_ADDRESS 0x7f0000000000ULL

static struct allocation {
    unsigned long long address;
    size_t bytes; /* 0 in an entry that is free */
    int ordinal;
} allocations[ALLOCATIONS];
static unsigned long long next_address = FIRST_ADDRESS;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

int cuCtxGetDevice(int *ordinal);
int cuDeviceTotalMem_v2(size_t *bytes, int ordinal);

static size_t used_of(int ordinal)
{
    size_t used = 0;
    unsigned a;

    for (a = 0; a < ALLOCATIONS; a++)
        if (allocations[a].ordinal == ordinal)
            used += allocations[a].bytes;
    return used;
}

/* The process's memory limit and usage on the device of its context. */
static int memory_of(int *ordinal, size_t *total, size_t *used)
{
    const struct sim_cuda_device *device;
    int error = cuCtxGetDevice(ordinal);

    if (error)
        return error;
    device = sim_cuda_device(*ordinal, &error);
    if (!device)
        return error;
    error = cuDeviceTotalMem_v2(total, *ordinal);
    if (!error && !device->mig && sim_own_limit(device->gpu) < *total)
        *total = sim_own_limit(device->gpu);
    *used = used_of(*ordinal);
    return error;
}

API int cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    size_t used;
    int ordinal, error;

    if (!unused || !total)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    error = memory_of(&ordinal, total, &used);
    pthread_mutex_unlock(&memory_lock);
    *unused = !error && used < *total ? *total - used : 0;
    return error;
}

ALIAS("cuMemGetInfo_v2") int cuMemGetInfo(size_t *unused, size_t *total);

static int allocate(unsigned long long *address, size_t bytes)
{
    size_t total, used;
    int ordinal, error = memory_of(&ordinal, &total, &used);
    unsigned a;

    if (error)
        return error;
    for (a = 0; a < ALLOCATIONS && allocations[a].bytes; a++)
        ;
    if (a == ALLOCATIONS || used > total || bytes > total - used)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocations[a] = (struct allocation){next_address, bytes, ordinal};
    *address = next_address;
    next_address += (bytes + 511) / 512 * 512;
    return CUDA_SUCCESS;
}

API int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    int error = sim_cuda_initialized() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;

    if (error)
        return error;
    if (!address || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory_lock);
    error = allocate(address, bytes);
    pthread_mutex_unlock(&memory_lock);
    return error;
}

API int cuMemFree_v2(unsigned long long address)
{
    int error = CUDA_ERROR_INVALID_VALUE;
    unsigned a;

    pthread_mutex_lock(&memory_lock);
    for (a = 0; a < ALLOCATIONS; a++)
        if (allocations[a].bytes && allocations[a].address == address) {
            allocations[a].bytes = 0;
            error = CUDA_SUCCESS;
        }
    pthread_mutex_unlock(&memory_lock);
    return error;
}
