/* Mounts a file on another in a user and a mount namespace of its own, says so and stays:
 * what any process may do that isn't forbidden to make user namespaces.
 *
 * usage: ownmount FILE PLACE MARK    (MARK is made when it is done) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mount.h>
#include <unistd.h>

static int failed(const char *what) {
    perror(what);
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int mark = open(argv[3], O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (mark < 0) return failed(argv[3]);
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return failed("unshare");
    if (mount(argv[1], argv[2], NULL, MS_BIND, NULL) != 0) return failed("mount");
    if (write(mark, "mounted\n", 8) != 8) return failed("write");
    for (;;) pause();
}
