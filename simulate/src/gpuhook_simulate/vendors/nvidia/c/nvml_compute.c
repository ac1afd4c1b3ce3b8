/* NVML: the compute mode of a GPU, and its time slice, which NVML has no function for: our nvidia-smi
 * asks by one of ours. Kept in the state folder's files `compute` and `timeslice`, a line for each. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "reach.h"
#include "state.h"

#define MODES 4  /* default, exclusive thread (gone), prohibited, exclusive process */
#define SLICES 4 /* default, short, medium, long */

static void read_kept(int fd, unsigned limit, unsigned numbers[SIM_MAX_GPUS])
{
    char text[4096], *rest = text, *line;
    ssize_t size = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    unsigned long long gpu, number;

    memset(numbers, 0, SIM_MAX_GPUS * sizeof *numbers);
    text[size < 0 ? 0 : size] = '\0';
    while ((line = sim_next_line(&rest)))
        if (sim_number(sim_next_word(&line), SIM_MAX_GPUS - 1, &gpu) &&
            sim_number(sim_next_word(&line), limit - 1, &number))
            numbers[gpu] = (unsigned)number;
}

static int get_kept(nvml_device handle, const char *file, unsigned limit, unsigned *number)
{
    const struct sim_gpu *gpu;
    unsigned numbers[SIM_MAX_GPUS];
    char path[PATH_MAX];
    int result = sim_resolve_gpu(handle, &gpu), fd;

    if (result)
        return result;
    if (!number)
        return NVML_ERROR_INVALID_ARGUMENT;
    fd = sim_state_path(file, path, sizeof path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    read_kept(fd, limit, numbers);
    if (fd >= 0)
        close(fd);
    *number = numbers[gpu->slot];
    return NVML_SUCCESS;
}

static int set_kept(nvml_device handle, const char *file, unsigned limit, unsigned number)
{
    const struct sim_gpu *gpu;
    unsigned numbers[SIM_MAX_GPUS], i;
    char path[PATH_MAX], text[4096];
    int result = sim_resolve_gpu(handle, &gpu), fd, size = 0;

    if (result)
        return result;
    if (geteuid() || !sim_state_path(file, path, sizeof path))
        return NVML_ERROR_NO_PERMISSION;
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || flock(fd, LOCK_EX))
        return NVML_ERROR_NO_PERMISSION;
    read_kept(fd, limit, numbers);
    numbers[gpu->slot] = number;
    for (i = 0; i < SIM_MAX_GPUS; i++)
        if (numbers[i])
            size += snprintf(text + size, sizeof text - (size_t)size, "%u %u\n", i, numbers[i]);
    result = pwrite(fd, text, (size_t)size, 0) == size && !ftruncate(fd, size);
    close(fd);
    return result ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

API int nvmlDeviceGetComputeMode(nvml_device handle, unsigned *mode)
{
    return get_kept(handle, "compute", MODES, mode);
}

API int nvmlDeviceSetComputeMode(nvml_device handle, unsigned mode)
{
    if (mode >= MODES || mode == 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    return set_kept(handle, "compute", MODES, mode);
}

API int simGetTimeSlice(nvml_device handle, unsigned *slice)
{
    return get_kept(handle, "timeslice", SLICES, slice);
}

API int simSetTimeSlice(nvml_device handle, unsigned slice)
{
    return slice < SLICES ? set_kept(handle, "timeslice", SLICES, slice)
                          : NVML_ERROR_INVALID_ARGUMENT;
}
