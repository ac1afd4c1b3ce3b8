/* Open character devices inside a container, and say what becomes of it: OK or the errno's name.
 *
 * usage: devopen PATH...               prints "PATH RESULT" of each
 *        devopen --see KIND PATH...    prints "KIND PATH RESULT MAJOR:MINOR MODE UID:GID" of each,
 *                                      the numbers in hexadecimal and the mode in octal digits
 *        devopen --make PREFIX MAJOR MINOR...
 *                                      makes each node PREFIX-MINOR, and then prints
 *                                      "by-hand MINOR RESULT" of it
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const char *opened(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return strerrorname_np(errno);
    close(fd);
    return "OK";
}

static void see(const char *kind, char **paths) {
    for (; *paths; paths++) {
        struct stat status;
        printf("%s %s %s", kind, *paths, opened(*paths));
        if (!lstat(*paths, &status))
            printf(" %x:%x %o %u:%u", major(status.st_rdev), minor(status.st_rdev),
                   status.st_mode & 07777, status.st_uid, status.st_gid);
        puts("");
    }
}

static void make(const char *prefix, int major_number, char **minors) {
    for (; *minors; minors++) {
        char path[256];
        snprintf(path, sizeof path, "%s-%s", prefix, *minors);
        if (mknod(path, S_IFCHR | 0666, makedev(major_number, atoi(*minors))) < 0)
            perror(path);
        else
            printf("by-hand %s %s\n", *minors, opened(path));
    }
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "--see"))
        see(argv[2], argv + 3);
    else if (argc > 3 && !strcmp(argv[1], "--make"))
        make(argv[2], atoi(argv[3]), argv + 4);
    else
        for (int i = 1; i < argc; i++)
            printf("%s %s\n", argv[i], opened(argv[i]));
    return 0;
}
