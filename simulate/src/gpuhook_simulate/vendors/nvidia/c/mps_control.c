/* nvidia-cuda-mps-control: the MPS control daemon, and the program that talks to it.
 *
 * It stores limits and counts clients; it shares no work. A client, such as the simulated CUDA,
 * connects to the socket `control` of the pipe folder, or of a namespace's folder below it (-p 3),
 * sends "client" and stays connected. Commands arrive at the same socket of the pipe folder, from
 * root or the daemon's own user. Source: NVIDIA's MPS guide of release 615; the texts of its
 * responses and the protocol of its sockets are gpuhook's. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tables.h"

#define MOST_PEERS 512
#define MOST_SPACES 256
#define MOST_LIMITS 64
#define NAME_SIZE 65
#define WORD_SIZE 256
#define LINE_SIZE 1024
#define MOST_CLIENTS 48
#define END '\4' /* after each answer */

struct limits {
    char percentage[WORD_SIZE];
    char memory[WORD_SIZE]; /* of v3, one for all devices */
};

struct space {
    char name[NAME_SIZE], server[NAME_SIZE];
    struct limits limits;
    int fd;
};

struct peer {
    int fd, space; /* -1: the pipe folder itself */
    int is_client;
    struct ucred who;
    char line[LINE_SIZE];
    size_t size;
};

static const char *folder;
static int version = 2;
static struct space spaces[MOST_SPACES];
static int space_count;
static struct peer peers[MOST_PEERS];
static int peer_count;
static char server_names[MOST_SPACES][NAME_SIZE];
static int server_count;
static struct defaults {
    char percentage[WORD_SIZE];
    struct { char device[WORD_SIZE], limit[WORD_SIZE]; } pinned[MOST_LIMITS];
    int count;
} defaults = {.percentage = "100.0"}, served; /* of the next server, and of the running one */
static int quitting;
static char answer[1 << 16];
static size_t answered;

static void say(const char *form, ...)
{
    va_list values;
    int size;

    va_start(values, form);
    size = vsnprintf(answer + answered, sizeof answer - answered, form, values);
    va_end(values);
    if (size > 0 && answered + (size_t)size < sizeof answer)
        answered += (size_t)size;
}

static int address_of(const char *name, struct sockaddr_un *address)
{
    int size;

    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    size = snprintf(address->sun_path, sizeof address->sun_path, "%s%s%s/control", folder,
                    name ? "/" : "", name ? name : "");
    return size > 0 && (size_t)size < sizeof address->sun_path;
}

static int listen_at(const char *name)
{
    struct sockaddr_un address;
    int fd;

    if (!address_of(name, &address))
        return -1;
    unlink(address.sun_path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64) ||
        chmod(address.sun_path, 0666)) {
        close(fd);
        return -1;
    }
    return fd;
}

static struct space *find_space(const char *name, const char *server)
{
    int i;

    for (i = 0; i < space_count; i++)
        if (!strcmp(spaces[i].name, name) && !strcmp(spaces[i].server, server))
            return &spaces[i];
    return NULL;
}

static int find_server(const char *name)
{
    int i;

    for (i = 0; i < server_count; i++)
        if (!strcmp(server_names[i], name))
            return 1;
    return 0;
}

static int is_name(const char *name)
{
    size_t size = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_");

    return size > 0 && size < NAME_SIZE && !name[size];
}

/* The value of --NAME=VALUE among the words, "" if there is none. */
static const char *option(char **words, int count, const char *name)
{
    size_t size = strlen(name);
    int i;

    for (i = 0; i < count; i++)
        if (!strncmp(words[i], "--", 2) && !strncmp(words[i] + 2, name, size) &&
            words[i][2 + size] == '=')
            return words[i] + 3 + size;
    return "";
}

static void make_space(const char *name, const char *server)
{
    char path[WORD_SIZE * 2];
    struct space *made = &spaces[space_count];

    if (!is_name(name) || !find_server(server) || find_space(name, server) ||
        space_count == MOST_SPACES) {
        say("error: namespace %s can't be made\n", name);
        return;
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    if (mkdir(path, 0755) && errno != EEXIST) {
        say("error: %s\n", strerror(errno));
        return;
    }
    memset(made, 0, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    snprintf(made->server, sizeof made->server, "%s", server);
    made->fd = listen_at(name);
    if (made->fd < 0)
        say("error: %s\n", strerror(errno));
    else
        space_count++;
}

static void list_clients(void)
{
    int i;

    for (i = 0; i < peer_count; i++)
        if (peers[i].is_client) {
            const struct space *at = peers[i].space < 0 ? NULL : &spaces[peers[i].space];

            if (version == 2)
                say("%d\n", peers[i].who.pid);
            else
                say("%d,%s,%s,%u\n", peers[i].who.pid, at ? at->server : "", at ? at->name : "",
                    peers[i].who.uid);
        }
}

static void version3(char **words, int count)
{
    const char *server = option(words, count, "server");
    struct space *space;
    int i;

    if (count >= 3 && !strcmp(words[0], "server") && !strcmp(words[1], "create")) {
        if (!is_name(words[2]) || find_server(words[2]) || server_count == MOST_SPACES)
            say("error: server %s can't be made\n", words[2]);
        else
            strcpy(server_names[server_count++], words[2]);
    } else if (count >= 2 && !strcmp(words[0], "server") && !strcmp(words[1], "list")) {
        for (i = 0; i < server_count; i++)
            say("%s,%d,0\n", server_names[i], getpid());
    } else if (count >= 3 && !strcmp(words[0], "namespace") && !strcmp(words[1], "create")) {
        make_space(words[2], server);
    } else if (count >= 3 && !strcmp(words[0], "namespace") && !strcmp(words[1], "set")) {
        space = find_space(words[2], server);
        if (!space) {
            say("error: there is no namespace %s\n", words[2]);
            return;
        }
        snprintf(space->limits.percentage, WORD_SIZE, "%s",
                 option(words, count, "active-thread-percentage"));
        snprintf(space->limits.memory, WORD_SIZE, "%s",
                 option(words, count, "pinned-memory-limit"));
    } else if (count >= 2 && !strcmp(words[0], "namespace") && !strcmp(words[1], "list")) {
        for (i = 0; i < space_count; i++)
            say("%s,%s,%s,%s\n", spaces[i].name, spaces[i].server, spaces[i].limits.percentage,
                spaces[i].limits.memory);
    } else if (count >= 2 && !strcmp(words[0], "client") && !strcmp(words[1], "list")) {
        list_clients();
    } else {
        say("error: unknown command %s\n", words[0]);
    }
}

static void set_pinned(const char *device, const char *limit)
{
    int i;

    for (i = 0; i < defaults.count && strcmp(defaults.pinned[i].device, device); i++)
        ;
    if (i == MOST_LIMITS)
        return;
    snprintf(defaults.pinned[i].device, WORD_SIZE, "%s", device);
    snprintf(defaults.pinned[i].limit, WORD_SIZE, "%s", limit);
    if (i == defaults.count)
        defaults.count++;
}

/* Starts the server of version 2 if there is none; later defaults don't apply to it. */
static void start_server(void)
{
    if (!server_count) {
        server_count = 1;
        served = defaults;
    }
}

static void version2(char **words, int count)
{
    int i;

    if (!strcmp(words[0], "start_server") && count == 3) {
        start_server();
    } else if (!strcmp(words[0], "get_server_list")) {
        if (server_count)
            say("%d\n", getpid());
    } else if (!strcmp(words[0], "get_client_list") || !strcmp(words[0], "get_device_client_list")) {
        list_clients();
    } else if (!strcmp(words[0], "set_default_active_thread_percentage") && count == 2) {
        snprintf(defaults.percentage, WORD_SIZE, "%.1f", atof(words[1]));
        say("%s\n", defaults.percentage);
    } else if (!strcmp(words[0], "get_default_active_thread_percentage")) {
        say("%s\n", defaults.percentage);
    } else if (!strcmp(words[0], "set_default_device_pinned_mem_limit") && count == 3) {
        set_pinned(words[1], words[2]);
    } else if (!strcmp(words[0], "get_default_device_pinned_mem_limit") && count == 2) {
        for (i = 0; i < defaults.count; i++)
            if (!strcmp(defaults.pinned[i].device, words[1]))
                say("%s\n", defaults.pinned[i].limit);
    } else {
        say("error: unknown command %s\n", words[0]);
    }
}

static void command(char *line)
{
    char *words[16], *rest = NULL, *word;
    int count = 0;

    for (word = strtok_r(line, " ", &rest); word && count < 16; word = strtok_r(NULL, " ", &rest))
        words[count++] = word;
    if (!count)
        return;
    if (!strcmp(words[0], "quit"))
        quitting = 1;
    else if (version == 3)
        version3(words, count);
    else
        version2(words, count);
}

/* Sends a client its limits: its namespace's, else the defaults; 0 if there are too many. */
static int greet(struct peer *peer)
{
    int i, others = 0;

    for (i = 0; i < peer_count; i++)
        others += peers[i].is_client;
    if (others >= MOST_CLIENTS || (version == 3 && peer->space < 0))
        return 0;
    peer->is_client = 1;
    if (version == 2)
        start_server(); /* the first client does that */
    if (peer->space >= 0)
        say("ok percentage=%s memory=%s", spaces[peer->space].limits.percentage,
            spaces[peer->space].limits.memory);
    else
        say("ok percentage=%s memory=", served.percentage);
    for (i = 0; peer->space < 0 && i < served.count; i++)
        say("%s%s=%s", i ? "," : "", served.pinned[i].device, served.pinned[i].limit);
    say("\n");
    return 1;
}

/* Executes a line; 0 if the peer must be disconnected. */
static int hear(struct peer *peer, char *line)
{
    int stays = 1;

    answered = 0;
    answer[0] = '\0';
    if (!strcmp(line, "client")) {
        stays = greet(peer);
    } else if (!strncmp(line, "command ", 8)) {
        if (peer->space >= 0 || (peer->who.uid && peer->who.uid != geteuid()))
            say("error: permission denied\n");
        else
            command(line + 8);
        say("%c", END);
    }
    if (answered && send(peer->fd, answer, answered, MSG_NOSIGNAL) < 0)
        return 0;
    return stays;
}

static void let_go(int i)
{
    close(peers[i].fd);
    peers[i] = peers[--peer_count];
}

static int read_peer(struct peer *peer)
{
    ssize_t size = recv(peer->fd, peer->line + peer->size, sizeof peer->line - 1 - peer->size, 0);
    char *end;

    if (size <= 0)
        return size < 0 && errno == EAGAIN;
    peer->size += (size_t)size;
    peer->line[peer->size] = '\0';
    while ((end = strchr(peer->line, '\n'))) {
        *end = '\0';
        if (!hear(peer, peer->line))
            return 0;
        peer->size -= (size_t)(end + 1 - peer->line);
        memmove(peer->line, end + 1, peer->size + 1);
    }
    return peer->size < sizeof peer->line - 1;
}

static void take(int listener, int space)
{
    struct peer *peer = &peers[peer_count];
    socklen_t size = sizeof peer->who;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    memset(peer, 0, sizeof *peer);
    if (peer_count == MOST_PEERS ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer->who, &size)) {
        close(fd);
        return;
    }
    peer->fd = fd;
    peer->space = space;
    peer_count++;
}

static void serve(int listener)
{
    static struct pollfd polled[1 + MOST_SPACES + MOST_PEERS];
    int i, first, known;

    while (!quitting) {
        polled[0] = (struct pollfd){listener, POLLIN, 0};
        for (i = 0; i < space_count; i++)
            polled[1 + i] = (struct pollfd){spaces[i].fd, POLLIN, 0};
        first = 1 + space_count;
        known = peer_count;
        for (i = 0; i < known; i++)
            polled[first + i] = (struct pollfd){peers[i].fd, POLLIN, 0};
        if (poll(polled, (nfds_t)(first + known), -1) < 0)
            continue;
        for (i = known - 1; i >= 0; i--)
            if (polled[first + i].revents && !read_peer(&peers[i]))
                let_go(i);
        for (i = 0; i < first; i++)
            if (polled[i].revents)
                take(polled[i].fd, i - 1);
    }
}

static void write_pid(void)
{
    char path[WORD_SIZE * 2];
    FILE *file;

    snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", folder);
    file = fopen(path, "we");
    if (file) {
        fprintf(file, "%d\n", getpid());
        fclose(file);
    }
}

static int connect_to(void)
{
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && address_of(NULL, &address) &&
        !connect(fd, (struct sockaddr *)&address, sizeof address))
        return fd;
    close(fd);
    return -1;
}

static int start(void)
{
    int listener, fd = connect_to(), null;

    if (fd >= 0) {
        fprintf(stderr, "An instance of this daemon is already running\n");
        return 1;
    }
    mkdir(folder, 0755);
    listener = listen_at(NULL);
    if (listener < 0) {
        fprintf(stderr, "Cannot listen in %s: %s\n", folder, strerror(errno));
        return 1;
    }
    if (fork())
        return 0;
    setsid();
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(null, 0);
    dup2(null, 1);
    dup2(null, 2);
    signal(SIGPIPE, SIG_IGN);
    write_pid();
    serve(listener);
    return 0;
}

static int talk(void)
{
    char line[LINE_SIZE - 16], byte;
    int fd = connect_to(), failed = 0;

    if (fd < 0) {
        fprintf(stderr, "Cannot find MPS control daemon process\n");
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        if (dprintf(fd, "command %s\n", line) < 0)
            return 1;
        while (read(fd, &byte, 1) == 1 && byte != END)
            failed |= putchar(byte) == EOF;
        fflush(stdout);
    }
    return failed;
}

int main(int argc, char **argv)
{
    int i, daemon = 0;

    folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    folder = folder ? folder : "/tmp/nvidia-mps";
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "-d")) {
            daemon = 1;
        } else if (!strcmp(argv[i], "-p") && i + 1 < argc && atoi(SIM_DRIVER_VERSION) >= 615) {
            version = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--version") || !strcmp(argv[i], "--help")) {
            printf("nvidia-cuda-mps-control: simulated by gpuhook, driver version %s\n",
                   SIM_DRIVER_VERSION);
            return 0;
        } else {
            fprintf(stderr, "Unknown option %s\n", argv[i]);
            return 1;
        }
    }
    return daemon ? start() : talk();
}
