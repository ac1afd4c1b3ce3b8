/* Memory limits by cgroup: see memory_limits.h. */
#include "memory_limits.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "state.h"

#define TREE "/sys/fs/cgroup"
#define OWN_TEXT 65536

static void attribute_of(const struct sim_gpu *gpu, char *name, size_t size)
{
    snprintf(name, size, "user.gpuhook.limit.%s", gpu->uuid);
}

int sim_get_limit(const struct sim_gpu *gpu, const char *folder, struct sim_limit *limit)
{
    char name[128], text[64];
    ssize_t length;

    attribute_of(gpu, name, sizeof name);
    length = getxattr(folder, name, text, sizeof text - 1);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    return sscanf(text, "%llu %llu", &limit->soft, &limit->hard) == 2;
}

int sim_set_limit(const struct sim_gpu *gpu, const char *folder, struct sim_limit limit)
{
    char name[128], text[64], marker[PATH_MAX];

    if ((size_t)snprintf(marker, sizeof marker, "%s/cgroup.procs", folder) >= sizeof marker ||
        access(marker, F_OK) != 0)
        return 0;
    attribute_of(gpu, name, sizeof name);
    snprintf(text, sizeof text, "%llu %llu", limit.soft, limit.hard);
    return setxattr(folder, name, text, strlen(text), 0) == 0;
}

/* The path of this process's cgroup (v2) from /proc; 0 without one. */
static int own_path(char path[PATH_MAX])
{
    static char text[OWN_TEXT];
    char *rest = text, *line;
    ssize_t length;
    int fd = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    while ((line = sim_next_line(&rest)))
        if (strncmp(line, "0::/", 4) == 0)
            return (size_t)snprintf(path, PATH_MAX, TREE "%s", line + 3) < PATH_MAX;
    return 0;
}

unsigned long long sim_own_limit(const struct sim_gpu *gpu)
{
    struct sim_limit limit;
    unsigned long long least = SIM_UNLIMITED;
    char path[PATH_MAX], *slash;

    if (!own_path(path))
        return least;
    for (;;) {
        if (sim_get_limit(gpu, path, &limit) && limit.hard < least)
            least = limit.hard;
        slash = strrchr(path, '/');
        if (!slash || (size_t)(slash - path) < strlen(TREE))
            return least;
        *slash = '\0';
    }
}
