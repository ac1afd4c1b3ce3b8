/* CUDA as a client of MPS: a program with a pipe folder registers with the daemon. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cuda.h"

static char limits[256];

/* The daemon's response, "" without MPS; only the simulated library has this function. */
API const char *cuGpuhookMpsLimits(void)
{
    return limits;
}

/* Registers once per process, until the process ends. */
int sim_cuda_join_mps(void)
{
    static int joined;
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    ssize_t size;
    int fd;

    if (joined || !folder)
        return CUDA_SUCCESS;
    if (strlen(folder) + sizeof "/control" > sizeof address.sun_path)
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    strcat(strcpy(address.sun_path, folder), "/control");
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) ||
        send(fd, "client\n", 7, MSG_NOSIGNAL) != 7 ||
        (size = recv(fd, limits, sizeof limits - 1, 0)) <= 0) {
        close(fd);
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    }
    limits[size] = '\0';
    joined = 1;
    return CUDA_SUCCESS;
}
