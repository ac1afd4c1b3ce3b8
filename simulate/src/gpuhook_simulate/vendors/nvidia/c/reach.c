/* The devices that this process can reach, tested by opening nodes as the real driver does.
 *
 * open() of a node without a driver fails with ENXIO or ENODEV after the device cgroup has allowed
 * the call, so these two mean "reachable". EPERM comes from the cgroup, EACCES from the file mode,
 * ENOENT means that the container doesn't have the node. */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "reach.h"
#include "state.h"

static char prefix[PATH_MAX];
static int in_root;

/* Removes SIM_LIBRARY_DIR/<file> from the path; 0 if the path doesn't end with it. */
static int cut_library_dir(char *path)
{
    char *slash = strrchr(path, '/');
    size_t length, tail = strlen(SIM_LIBRARY_DIR);

    if (!slash)
        return 0;
    *slash = '\0';
    length = strlen(path);
    if (length < tail || strcmp(path + length - tail, SIM_LIBRARY_DIR) != 0)
        return 0;
    path[length - tail] = '\0';
    return 1;
}

static int is_simulated_root(const char *path)
{
    char marker[PATH_MAX];

    return (size_t)snprintf(marker, sizeof marker, "%s/%s", path, SIM_MARKER) < sizeof marker &&
           access(marker, F_OK) == 0;
}

/* dl_iterate_phdr and not dladdr: the latter has a symbol version that is too new for
 * images with an older glibc than the one with which this file was compiled. */
static int find_own_object(struct dl_phdr_info *info, size_t size, void *data)
{
    char real[PATH_MAX];
    ElfW(Addr) address = (ElfW(Addr))(uintptr_t)&prefix;
    int i;

    (void)size;
    (void)data;
    for (i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        ElfW(Addr) start = info->dlpi_addr + header->p_vaddr;

        if (header->p_type != PT_LOAD || address < start || address >= start + header->p_memsz)
            continue;
        if (info->dlpi_name && realpath(info->dlpi_name, real) && cut_library_dir(real) &&
            is_simulated_root(real)) {
            strcpy(prefix, real);
            in_root = 1;
        }
        return 1;
    }
    return 0;
}

/* The driver root from which this library was loaded; empty in a container, under chroot, and
 * wherever else the devices have their usual paths. */
__attribute__((constructor)) static void find_prefix(void)
{
    dl_iterate_phdr(find_own_object, NULL);
    if (strcmp(prefix, "/") == 0)
        prefix[0] = '\0';
}

int sim_state_path(const char *name, char *path, size_t size)
{
    int length = snprintf(path, size, "%s" SIM_STATE_DIR "/%s", prefix, name);

    return in_root && length > 0 && (size_t)length < size;
}

static int reach(const char *path)
{
    char full[PATH_MAX + 128];
    int fd;

    snprintf(full, sizeof full, "%s%s", prefix, path);
    fd = open(full, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return 0;
    }
    return errno == ENXIO || errno == ENODEV ? 0 : errno;
}

int sim_reach_control(void)
{
    return reach(SIM_CONTROL_NODE);
}

int sim_reach_uvm(void)
{
    return reach(SIM_UVM_NODE);
}

int sim_reach_gpu(const struct sim_gpu *gpu)
{
    char path[64];

    if (SIM_ONE_NODE)
        return reach(SIM_CONTROL_NODE) == 0;
    snprintf(path, sizeof path, "/dev/nvidia%u", gpu->minor);
    return reach(path) == 0;
}

static int reach_capability(unsigned cap, const char *access_file)
{
    char path[64];
    int error;

    snprintf(path, sizeof path, "/dev/nvidia-caps/nvidia-cap%u", cap);
    error = reach(path);
    /* Drivers before the capability devices guarded an instance only by its file in /proc. */
    if (error == ENOENT && reach("/dev/nvidia-caps") == ENOENT)
        error = reach(access_file);
    return error == 0;
}

int sim_reach_mig(const struct sim_gpu *gpu, const struct sim_mig *mig)
{
    char gi[128], ci[160];

    snprintf(gi, sizeof gi, "/proc/driver/nvidia/capabilities/gpu%u/mig/gi%u/access", gpu->minor,
             mig->gi);
    snprintf(ci, sizeof ci, "/proc/driver/nvidia/capabilities/gpu%u/mig/gi%u/ci%u/access",
             gpu->minor, mig->gi, mig->ci);
    return reach_capability(mig->gi_cap, gi) && reach_capability(mig->ci_cap, ci);
}
