/* As root of a user namespace of its own, mounts its cgroup (v2) and tries to get around a limit:
 * what any root may do that isn't forbidden to make user namespaces.
 *
 * usage: owncgroup    prints a line for each try, with OK or the errno's name */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static int put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    int done = write(fd, text, strlen(text)) < 0 ? -1 : 0;
    close(fd);
    return done;
}

static int tell(const char *what, int result) {
    printf("%s %s\n", what, result < 0 ? strerrorname_np(errno) : "OK");
    return result;
}

int main(void) {
    int spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP;
    if (tell("namespaces", unshare(spaces)) < 0) return 1;
    if (tell("root", put("/proc/self/uid_map", "0 0 1\n")) < 0) return 1;
    mkdir("/tmp/cgroup", 0700);
    if (tell("mount", mount("none", "/tmp/cgroup", "cgroup2", 0, NULL)) < 0) return 1;
    tell("below", mkdir("/tmp/cgroup/away", 0700));
    tell("space", put("/tmp/cgroup/cgroup.max.descendants", "max\n"));
    return 0;
}
