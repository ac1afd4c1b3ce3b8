/* Preloaded: a process's cgroups are those of v2 alone.
 *
 * The machine's kernel has trees of v1 outside, which /proc/PID/cgroup lists and no namespace hides.
 * Slurm's plugin for v2 refuses to run beside them, though none of them is mounted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int open64(const char *path, int flags, ...)
{
    static int (*next)(const char *, int, ...);
    char text[4096], *line;
    ssize_t size;
    va_list rest;
    int file, v2, mode;

    va_start(rest, flags);
    mode = va_arg(rest, int);
    va_end(rest);
    if (!next)
        next = dlsym(RTLD_NEXT, "open64");
    file = next(path, flags, mode);
    if (file < 0 || strncmp(path, "/proc/", 6) || strlen(path) < 7 ||
        strcmp(path + strlen(path) - 7, "/cgroup"))
        return file;
    size = read(file, text, sizeof text - 1);
    close(file);
    text[size < 0 ? 0 : size] = 0;
    line = strstr(text, "0::");
    v2 = memfd_create("cgroup", MFD_CLOEXEC);
    dprintf(v2, "%s", line ? line : "");
    lseek(v2, 0, SEEK_SET);
    return v2;
}

int open(const char *path, int flags, ...) __attribute__((alias("open64")));
