/* NVML: the compute mode of a GPU, kept in the state folder's file `compute`, a line for each. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "reach.h"
#include "state.h"

#define MODES 4 /* default, exclusive thread (gone), prohibited, exclusive process */

static void read_modes(int fd, unsigned modes[SIM_MAX_GPUS])
{
    char text[4096], *rest = text, *line;
    ssize_t size = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    unsigned long long gpu, mode;

    memset(modes, 0, SIM_MAX_GPUS * sizeof *modes);
    text[size < 0 ? 0 : size] = '\0';
    while ((line = sim_next_line(&rest)))
        if (sim_number(sim_next_word(&line), SIM_MAX_GPUS - 1, &gpu) &&
            sim_number(sim_next_word(&line), MODES - 1, &mode))
            modes[gpu] = (unsigned)mode;
}

API int nvmlDeviceGetComputeMode(nvml_device handle, unsigned *mode)
{
    const struct sim_gpu *gpu;
    unsigned modes[SIM_MAX_GPUS];
    char path[PATH_MAX];
    int result = sim_resolve_gpu(handle, &gpu), fd;

    if (result)
        return result;
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    fd = sim_state_path("compute", path, sizeof path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    read_modes(fd, modes);
    if (fd >= 0)
        close(fd);
    *mode = modes[gpu->slot];
    return NVML_SUCCESS;
}

API int nvmlDeviceSetComputeMode(nvml_device handle, unsigned mode)
{
    const struct sim_gpu *gpu;
    unsigned modes[SIM_MAX_GPUS], i;
    char path[PATH_MAX], text[4096];
    int result = sim_resolve_gpu(handle, &gpu), fd, size = 0;

    if (result)
        return result;
    if (mode >= MODES || mode == 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (geteuid() || !sim_state_path("compute", path, sizeof path))
        return NVML_ERROR_NO_PERMISSION;
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || flock(fd, LOCK_EX))
        return NVML_ERROR_NO_PERMISSION;
    read_modes(fd, modes);
    modes[gpu->slot] = mode;
    for (i = 0; i < SIM_MAX_GPUS; i++)
        if (modes[i])
            size += snprintf(text + size, sizeof text - (size_t)size, "%u %u\n", i, modes[i]);
    result = pwrite(fd, text, (size_t)size, 0) == size && !ftruncate(fd, size);
    close(fd);
    return result ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}
