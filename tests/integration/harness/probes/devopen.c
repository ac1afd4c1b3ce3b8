/* Open each path given and print "PATH RESULT", RESULT being OK or the errno's name. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int fd = open(argv[i], O_RDWR | O_CLOEXEC | O_NONBLOCK);
        printf("%s %s\n", argv[i], fd >= 0 ? "OK" : strerrorname_np(errno));
        if (fd >= 0)
            close(fd);
    }
    return 0;
}
