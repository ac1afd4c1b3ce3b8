/* Stands for ldconfig: say on one line how far this process is shut in, and fail. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char **environ;

static const char *writing(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    return fd >= 0 ? "OK" : strerrorname_np(errno);
}

static int entries(const char *path) {
    DIR *folder = opendir(path);
    int count = -2;
    if (!folder)
        return -1;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static unsigned long limit(int which) {
    struct rlimit value;
    return getrlimit(which, &value) == 0 ? value.rlim_max : 0;
}

int main(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    syscall(SYS_capget, &header, data);
    int bounding = 0, fds = 0, variables = 0;
    for (int i = 0; i < 64; i++)
        bounding += prctl(PR_CAPBSET_READ, i) == 1;
    for (int fd = 0; fd < 4096; fd++)
        fds += fcntl(fd, F_GETFD) >= 0;
    while (environ[variables])
        variables++;
    struct if_nameindex *interfaces = if_nameindex();
    int network = 0;
    while (interfaces && interfaces[network].if_index)
        network++;
    int program = open("/usr/local/bin/dlprobe", O_RDONLY | O_CLOEXEC);
    char *argv[] = {"dlprobe", NULL};
    int executed = fexecve(program, argv, environ) == 0 ? 0 : errno;
    fprintf(stderr,
            "uid=%d/%d pid=%d caps=%u bounding=%d nnp=%d env=%d fds=%d etc=%s dev=%s proc=%d sys=%d"
            " net=%d exec=%s cpu=%lu as=%lu nofile=%lu fsize=%lu\n",
            getuid(), getgid(), getpid(), data[0].permitted | data[1].permitted, bounding,
            prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), variables, fds, writing("/etc/made"),
            writing("/dev/made"), entries("/proc"), entries("/sys"), network,
            strerrorname_np(executed), limit(RLIMIT_CPU), limit(RLIMIT_AS) >> 20,
            limit(RLIMIT_NOFILE), limit(RLIMIT_FSIZE) >> 20);
    return 3;
}
