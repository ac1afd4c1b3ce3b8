// The launcher: gpu-py, gpuhook-prestart, gpuhook-cdi-hook and gpuhook-container-cli.
//
// Engines call an OCI runtime three or four times for every container, and a Python start costs as
// much as the low-level runtime's whole call. So this program handles the calls that need no
// Python. What it does depends on the name that it is installed under:
//
//   gpu-py            becomes the low-level runtime for verbs that create nothing, and for a create
//                     whose config.json has none of the trigger strings that every request has.
//                     For any other create, a prefork server's worker returns the new config.json.
//   gpuhook-prestart  lets the container's hook worker do the hook's work (prefork/hook_worker.py).
//   gpuhook-cdi-hook  does the same, else lets a prefork server's worker do it (prefork/worker.py).
//
// In any other case it becomes isolated Python (_start.py); gpuhook-container-cli always does. The
// launcher reads a bounded part of every file, waits for every process with a time limit, and reads
// nothing that a container can write.
//
// launchers/build_launcher.py generates launcher_table.h from the Python modules.

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "launcher_table.h"

#ifndef CHUNK
#define CHUNK 65536 // bytes of config.json that are searched at a time
#endif
#ifndef ANSWER_MS
#define ANSWER_MS 10000 // for a worker to take a request, and then to respond
#endif
#define TRIGGER_LONGEST (CHUNK / 2)
#define TRIGGERS_MOST 1024
#define SPEC_MOST (64L << 20) // bytes of config.json, as for Python
#define CACHE_MOST 65536      // bytes of the cache that Python writes
#define LINE_MOST 65536       // bytes of a response
#define ABOUT_MOST 2000       // bytes of a request's subject
#define LINKS_MOST 40
#define READING (O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)
#define CLAIMS_MOST 8
#define WORK_MS 70000   // a worker is killed after 60 s (prefork/hook_worker.py)

struct text {
    const char *at;
    size_t length;
};

struct arguments {
    enum { FOR_PYTHON, CREATES_NOTHING, CREATES } verb;
    const char *bundle; // of create and run
    bool is_usual;      // there is one id, as the last argument, as engines write it
    const char *id;
    const char *root;   // "": none is given
    const char *maker;  // the runtime that created the container (crun, runc), else NULL
};

// Options before and after the verb, with and without a value, that all runtimes read the same way.
static const char *const VALUES_BEFORE[] = {
    "--root",     "--log",  "--log-format",     "--log-level",
    "--rootless", "--criu", "--cgroup-manager", NULL,
};
static const char *const FLAGS_BEFORE[] = {"--debug", "--systemd-cgroup", NULL};
static const char *const VALUES_AFTER[] = {
    "--bundle", "--pid-file", "--console-socket", "--pidfd-socket", "--preserve-fds", NULL,
};
static const char *const FLAGS_AFTER[] = {
    "--no-pivot", "--no-new-keyring", "--no-subreaper", "--keep", "--detach", "-d", NULL,
};
static const char *const TELLING[] = {"--version", "-v", "--help", "-h", NULL};
static const char *const CREATING[] = {"create", "run", NULL};
static const char *const CREATING_NOTHING[] = {
    "start",  "delete", "state",  "kill",     "exec", "ps",         "list", "events",
    "update", "pause",  "resume", "features", "spec", "checkpoint", NULL,
};

// Variables that could redirect an interpreter or its loader. _start.py restores them for the
// runtime.
#define HIDDEN_PREFIX "GPUHOOK_HIDDEN_"
static const char *const HIDDEN[] = {
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "LD_DEBUG", "LD_DEBUG_OUTPUT", "LD_PROFILE",
    "LD_PROFILE_OUTPUT", "LD_ORIGIN_PATH", "LD_DYNAMIC_WEAK", "GLIBC_TUNABLES", "GCONV_PATH",
    "LOCPATH", "NLSPATH", NULL,
};

static char self[PATH_MAX];   // the path that was called, with final symlinks resolved
static char config[PATH_MAX]; // config.toml
static bool config_is_named;  // by the environment
static bool config_exists;
static struct stat config_status;
static char saved[PATH_MAX];            // the folder of its cache, which Python writes
static const char *program = "runtime"; // the program that Python runs as
static struct text runtimes = {DEFAULT_RUNTIMES, sizeof DEFAULT_RUNTIMES - 1};

// Texts and paths ---------------------------------------------------------------------------------

static bool is_one_of(const char *const *names, const char *word, size_t length)
{
    for (; *names != NULL; names++)
        if (strlen(*names) == length && memcmp(*names, word, length) == 0)
            return true;
    return false;
}

static bool is_any(const char *const *names, const char *word)
{
    return is_one_of(names, word, strlen(word));
}

static bool equals(struct text text, const char *word)
{
    return text.length == strlen(word) && memcmp(text.at, word, text.length) == 0;
}

static bool begins(const char *word, const char *start)
{
    return strncmp(word, start, strlen(start)) == 0;
}

static bool is_number(const char *word)
{
    size_t length = strspn(word, "0123456789");
    return length > 0 && length < 10 && word[length] == '\0';
}

// Returns whether a path is absolute, and has no ".." and no unusual character.
static bool is_plain_path(const char *path)
{
    return path[0] == '/' && strstr(path, "..") == NULL &&
           path[strspn(path, PATH_CHARACTERS)] == '\0';
}

static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

// Writes a text into an array; returns false, and empties it, if the text is too long.
#define PRINT(array, ...) print(array, sizeof(array), __VA_ARGS__)
__attribute__((format(printf, 3, 4)))
static bool print(char *to, size_t size, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    int length = vsnprintf(to, size, format, values);
    va_end(values);
    if (length >= 0 && (size_t)length < size)
        return true;
    to[0] = '\0';
    return false;
}

// Writes the folder of a path into an array of PATH_MAX bytes.
static void folder_of(char *folder, const char *path)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        print(folder, PATH_MAX, ".");
    else
        print(folder, PATH_MAX, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

// Removes a part from the front of a text, up to a separator; returns false if there is none.
static bool take(struct text *rest, char separator, struct text *part)
{
    const char *end = memchr(rest->at, separator, rest->length);
    if (end == NULL)
        return false;
    *part = (struct text){rest->at, (size_t)(end - rest->at)};
    *rest = (struct text){end + 1, rest->length - part->length - 1};
    return true;
}

// Files -------------------------------------------------------------------------------------------

static bool is_same(const struct stat *one, const struct stat *other)
{
    return one->st_dev == other->st_dev && one->st_ino == other->st_ino;
}

static bool is_file(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode);
}

// Returns whether a file is younger than another one, or the other one doesn't exist.
static bool is_younger(const struct stat *file, const char *path)
{
    struct stat other;
    if (stat(path, &other) != 0)
        return true;
    if (file->st_mtim.tv_sec != other.st_mtim.tv_sec)
        return file->st_mtim.tv_sec > other.st_mtim.tv_sec;
    return file->st_mtim.tv_nsec > other.st_mtim.tv_nsec;
}

// Reads a file up to its end, or until the buffer is full; returns the number of bytes, or -1.
static ssize_t read_all(int file, char *buffer, size_t size)
{
    size_t length = 0;
    ssize_t more = 1;
    while (more > 0 && length < size) {
        more = read(file, buffer + length, size - length);
        length += more > 0 ? (size_t)more : 0;
    }
    return more < 0 ? -1 : (ssize_t)length;
}

// Sets self. Symlinks to this program are resolved, because the package is found relative to it.
static void find_self(const char *called)
{
    const char *path = (const char *)getauxval(AT_EXECFN); // argv[0] can be any string
    char target[PATH_MAX], folder[PATH_MAX];
    PRINT(self, "%s", path != NULL ? path : called);
    for (int links = 0; links < LINKS_MOST; links++) {
        ssize_t length = readlink(self, target, sizeof target);
        if (length <= 0 || (size_t)length == sizeof target)
            return;
        target[length] = '\0';
        folder_of(folder, self);
        if (!(target[0] == '/' ? PRINT(self, "%s", target) : PRINT(self, "%s/%s", folder, target)))
            return;
    }
}

// The command line --------------------------------------------------------------------------------

// Returns the runtime, crun or runc, that created a container, or NULL. Each keeps a state file
// that the other can't read: if the configured runtime has changed since the create, the new one
// could neither stop nor delete it. A user's folder, which su leaves in root's environment, is
// ignored.
static const char *find_maker(const char *id, const char *root)
{
    static const struct {
        const char *name, *file;
    } makers[] = {{"crun", "status"}, {"runc", "state.json"}};
    struct stat status;
    char path[PATH_MAX];
    const char *own = getenv("XDG_RUNTIME_DIR");
    if (id[0] == '\0' || id[0] == '-' || id[0] == '.' || strchr(id, '/') != NULL)
        return NULL;
    if (own == NULL || stat(own, &status) != 0 || status.st_uid != geteuid())
        own = "/run"; // protects: own-runtime-folder
    for (int at = 0; at < 2; at++) {
        const char *name = makers[at].name, *file = makers[at].file;
        bool found = root[0] != '\0'
                         ? PRINT(path, "%s/%s/%s", root, id, file) && is_file(path)
                         : (PRINT(path, "%s/%s/%s/%s", own, name, id, file) && is_file(path)) ||
                               (PRINT(path, "/run/%s/%s/%s", name, id, file) && is_file(path));
        if (found)
            return name;
    }
    return NULL;
}

// Returns an option's value, and advances to it if it is the next argument; NULL if there is none.
static const char *value_of(const char *word, int *at, int count, char *const *words)
{
    const char *sign = strchr(word, '=');
    if (sign != NULL)
        return sign + 1;
    return ++*at < count ? words[*at] : NULL;
}

// Reads the arguments before the verb; returns the verb's index, or that of an unknown argument.
static int read_before(int count, char *const *words, struct arguments *found)
{
    int at = 0;
    for (; at < count; at++) {
        const char *word = words[at];
        size_t length = strcspn(word, "=");
        if (is_any(FLAGS_BEFORE, word))
            continue;
        if (!is_one_of(VALUES_BEFORE, word, length))
            break;
        const char *value = value_of(word, &at, count, words);
        if (value != NULL && length == strlen("--root") && begins(word, "--root"))
            found->root = value;
    }
    return at;
}

// Reads the arguments after create and run; returns false if Python has to interpret them.
static bool read_after(int count, char *const *words, struct arguments *found)
{
    int ids = 0;
    for (int at = 0; at < count; at++) {
        const char *word = words[at];
        size_t length = strcspn(word, "=");
        ids = ids > 0 ? 2 : 0;
        if (word[0] != '-') {
            ids = ids > 0 ? 2 : 1;
            found->id = word;
            continue;
        }
        if (is_any(FLAGS_AFTER, word))
            continue;
        bool is_short = strcmp(word, "-b") == 0;
        if (!is_short && !is_one_of(VALUES_AFTER, word, length))
            return false;
        const char *value = value_of(word, &at, count, words);
        if (value == NULL)
            return false;
        if (is_short || (length == strlen("--bundle") && begins(word, "--bundle")))
            found->bundle = value;
    }
    found->is_usual = ids == 1;
    return found->bundle[0] != '\0';
}

// Reads gpu-py's arguments; anything unclear is FOR_PYTHON, as in runtime_argv.py.
static struct arguments read_arguments(int count, char *const *words)
{
    struct arguments found = {FOR_PYTHON, ".", false, "", "", NULL};
    int at = read_before(count, words, &found);
    if (count == 1 && is_any(TELLING, words[0]))
        found.verb = CREATES_NOTHING;
    else if (at < count && is_any(CREATING_NOTHING, words[at]))
        found.verb = CREATES_NOTHING;
    else if (at < count && is_any(CREATING, words[at]))
        found.verb = read_after(count - at - 1, words + at + 1, &found) ? CREATES : FOR_PYTHON;
    if (found.verb == CREATES_NOTHING)
        while (++at < count && found.maker == NULL)
            found.maker = find_maker(words[at], found.root);
    return found;
}

// Trigger strings ---------------------------------------------------------------------------------

static struct text triggers[TRIGGERS_MOST];
static size_t trigger_count, trigger_longest;
static unsigned char pairs[65536 / 8]; // a bit for each pair of bytes that a trigger starts with

static void add_trigger(struct text trigger)
{
    unsigned first = (unsigned char)trigger.at[0] << 8;
    unsigned second = trigger.length > 1 ? (unsigned char)trigger.at[1] : 0;
    unsigned last = trigger.length > 1 ? second : 255;
    for (unsigned pair = first | second; pair <= (first | last); pair++)
        pairs[pair / 8] |= (unsigned char)(1 << pair % 8);
    triggers[trigger_count++] = trigger;
    if (trigger.length > trigger_longest)
        trigger_longest = trigger.length;
}

// Reads trigger strings, one a line; returns false unless END_MARKER is the last line.
static bool read_triggers(struct text content)
{
    struct text line;
    while (take(&content, '\n', &line)) {
        if (equals(line, END_MARKER))
            return content.length == 0 && trigger_count > 0;
        if (line.length == 0 || line.length > TRIGGER_LONGEST || trigger_count == TRIGGERS_MOST)
            return false;
        add_trigger(line);
    }
    return false; // protects: cache-cut-short
}

// Returns whether bytes, which are followed by a NUL, contain a trigger.
static bool has_trigger(const char *data, size_t length)
{
    for (size_t at = 0; at < length; at++) {
        unsigned pair = (unsigned)(unsigned char)data[at] << 8 | (unsigned char)data[at + 1];
        if ((pairs[pair / 8] & 1 << pair % 8) == 0)
            continue;
        for (size_t each = 0; each < trigger_count; each++)
            if (triggers[each].length <= length - at &&
                memcmp(triggers[each].at, data + at, triggers[each].length) == 0)
                return true;
    }
    return false;
}

// Returns whether a file contains no trigger; false also if it can't be read completely.
static bool has_no_trigger(int file)
{
    static char data[CHUNK + 1];
    size_t kept = 0;
    for (long total = 0; total <= SPEC_MOST;) {
        ssize_t more = read(file, data + kept, CHUNK - kept);
        if (more <= 0)
            return more == 0;
        size_t length = kept + (size_t)more;
        data[length] = '\0';
        if (has_trigger(data, length))
            return false;
        kept = length < trigger_longest ? length : trigger_longest - 1;
        memmove(data, data + length - kept, kept);
        total += more;
    }
    return false;
}

// Returns whether config.json surely requests nothing; false if it is missing or broken.
static bool asks_for_nothing(const char *bundle)
{
    char path[PATH_MAX];
    struct stat status;
    int file = PRINT(path, "%s/config.json", bundle) ? open(path, READING) : -1;
    if (file < 0)
        return false;
    bool nothing = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && has_no_trigger(file);
    close(file);
    return nothing;
}

// The configuration -------------------------------------------------------------------------------

// Sets config and saved. Our variable overrides that of NVIDIA's toolkit. The hook of a CDI spec
// receives the file as an argument.
static void find_config(const char *given)
{
    const char *ours = getenv("GPUHOOK_CONFIG"), *theirs = getenv("NVIDIA_CTK_CONFIG_FILE_PATH");
    if ((ours == NULL || ours[0] == '\0') && theirs != NULL && theirs[0] != '\0') {
        setenv("GPUHOOK_CONFIG", theirs, 1);
        ours = getenv("GPUHOOK_CONFIG");
    }
    config_is_named = ours != NULL && ours[0] != '\0';
    PRINT(config, "%s", given != NULL ? given : config_is_named ? ours : DEFAULT_CONFIG);
    config_exists = stat(config, &config_status) == 0;
    PRINT(saved, "%s%s", CACHE_FOLDER, config_exists ? config : "/defaults");
}

// Reads the runtimes and the trigger strings from the cache. Returns false if the cache is
// incomplete, or was made from another config.toml: an earlier version, or a replaced file, which
// may have the same time (Nix gives all files one time).
static bool take_cached(struct text content)
{
    char expected[80];
    struct text line;
    long long time = config_status.st_mtim.tv_sec * 1000000000LL + config_status.st_mtim.tv_nsec;
    return PRINT(expected, "%ju %ju %lld", (uintmax_t)config_status.st_dev,
                 (uintmax_t)config_status.st_ino, time) &&
           take(&content, '\n', &line) && equals(line, expected) &&
           take(&content, '\n', &runtimes) && read_triggers(content);
}

// Reads the cache of config.toml. It must belong to our user, and be younger than this program,
// config.toml and that file's folder (a file that is moved there keeps its time). Returns false if
// Python has to read config.toml, and may have to write the cache again. Without config.toml, the
// defaults hold.
static bool read_cache(void)
{
    static char buffer[CACHE_MOST];
    char path[PATH_MAX], folder[PATH_MAX];
    struct stat status;
    const struct text defaults = {DEFAULT_TRIGGERS, strlen(DEFAULT_TRIGGERS)};
    if (!config_exists)
        return !config_is_named && read_triggers(defaults);
    if (!is_plain_path(config))
        return false;
    program = "runtime-save";
    int file = PRINT(path, "%s/" CACHE, saved) ? open(path, READING) : -1;
    if (file < 0)
        return false;
    folder_of(folder, config);
    bool fresh = fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                 status.st_uid == geteuid() && is_younger(&status, config) &&
                 is_younger(&status, folder) && is_younger(&status, self);
    ssize_t length = fresh ? read_all(file, buffer, sizeof buffer) : -1;
    close(file);
    if (length < 0 || length == sizeof buffer ||
        !take_cached((struct text){buffer, (size_t)length}))
        return false;
    program = "runtime";
    return true;
}

// The low-level runtime ---------------------------------------------------------------------------

// Becomes the program at a path, if it exists and isn't this launcher. Returns false if there is
// none, and true if it can't be started: Python reports the reason.
static bool become(const char *path, char **argv)
{
    struct stat status, own;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode) || access(path, X_OK) != 0)
        return false;
    if (stat(self, &own) == 0 && is_same(&status, &own))
        return false;
    argv[0] = (char *)path;
    execv(path, argv);
    return true;
}

// Becomes a low-level runtime, given by path, or by name in PATH and the usual folders.
static bool become_named(struct text name, char **argv)
{
    char path[PATH_MAX];
    const char *lists[] = {getenv("PATH"), SEARCH_PATH};
    if (name.length == 0 || name.length >= PATH_MAX)
        return false;
    if (memchr(name.at, '/', name.length) != NULL)
        return PRINT(path, "%.*s", (int)name.length, name.at) && become(path, argv);
    for (int at = 0; at < 2; at++) {
        for (const char *folder = lists[at], *next; folder != NULL; folder = next) {
            size_t length = strcspn(folder, ":");
            next = folder[length] == ':' ? folder + length + 1 : NULL;
            if (folder[0] != '/' || length >= PATH_MAX)
                continue; // relative to a folder of the caller
            if (PRINT(path, "%.*s/%.*s", (int)length, folder, (int)name.length, name.at) &&
                become(path, argv))
                return true;
        }
    }
    return false;
}

// Becomes the low-level runtime that created the container, else the first that exists, in the same
// order as find_runtime in runtime_shim.py. Returns if Python has to find it. An empty name means
// the engine's own runtime, by its absolute path.
static void become_runtime(const char *maker, char **argv)
{
    struct text name;
    const char *engines = getenv(ENGINES_RUNTIME);
    const char *other = maker == NULL ? NULL : strcmp(maker, "crun") == 0 ? "runc" : "crun";
    while (take(&runtimes, ':', &name)) {
        if (name.length == 0 && engines != NULL && engines[0] == '/')
            name = (struct text){engines, strlen(engines)};
        const char *slash = memrchr(name.at, '/', name.length);
        const char *base = slash == NULL ? name.at : slash + 1;
        size_t length = name.length - (size_t)(base - name.at);
        if (other != NULL && memmem(base, length, other, strlen(other)) != NULL)
            continue;
        if (become_named(name, argv))
            return;
    }
    if (maker != NULL)
        become_named((struct text){maker, strlen(maker)}, argv);
}

// Other processes ---------------------------------------------------------------------------------

static bool was_killed; // the worker had taken the hook's work, and didn't respond

// Returns a descriptor of /proc/PID, or -1. It refers to that process even if its id is reused.
static int open_process(const char *number)
{
    char path[32];
    return is_number(number) && PRINT(path, "/proc/%s", number)
               ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)
               : -1;
}

// Returns whether a process' descriptor is that file.
static bool has_open(int process, const char *fd, const struct stat *what)
{
    struct stat status;
    char name[32];
    return is_number(fd) && PRINT(name, "fd/%s", fd) && fstatat(process, name, &status, 0) == 0 &&
           is_same(&status, what);
}

// Returns whether a process is in our namespace of that kind.
static bool shares(int process, const char *kind)
{
    struct stat own, its;
    char path[32];
    return PRINT(path, "/proc/self/ns/%s", kind) && stat(path, &own) == 0 &&
           fstatat(process, path + strlen("/proc/self/"), &its, 0) == 0 && is_same(&its, &own);
}

// Returns whether a process can respond: it isn't stopped, frozen, or held by a debugger. The
// kernel kills one that is stopped later (prefork/server.py).
static bool is_running(int process)
{
    char text[4096];
    int file = openat(process, "status", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read_all(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    if (length < 0)
        return false;
    text[length] = '\0';
    const char *state = strstr(text, "\nState:\t");
    return state != NULL && (state[8] == 'R' || state[8] == 'S');
}

// Opens the pipe behind a process' descriptor, without waiting; returns -1 if it isn't a pipe.
static int open_pipe(int process, const char *fd, int flags)
{
    struct stat status;
    char name[32];
    if (!is_number(fd) || !PRINT(name, "fd/%s", fd) || fstatat(process, name, &status, 0) != 0 ||
        !S_ISFIFO(status.st_mode))
        return -1;
    int pipe = openat(process, name, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (pipe < 0 || (fstat(pipe, &status) == 0 && S_ISFIFO(status.st_mode)))
        return pipe;
    close(pipe);
    return -1;
}

// Writes a line into a pipe completely without waiting, or not at all.
static bool tell(int pipe, const char *line)
{
    struct sigaction ignored = {.sa_handler = SIG_IGN}, before;
    if (sigaction(SIGPIPE, &ignored, &before) != 0)
        return false;
    ssize_t length = (ssize_t)strlen(line);
    bool told = write(pipe, line, (size_t)length) == length;
    sigaction(SIGPIPE, &before, NULL);
    return told;
}

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

// A response that is read from a pipe until a deadline, in milliseconds.
struct answer {
    int pipe;
    long long end;
    size_t length, taken;
    char text[LINE_MOST];
};

// Waits for more bytes; returns false if none come in time.
static bool read_more(struct answer *answer)
{
    size_t space = sizeof answer->text - answer->length;
    ssize_t more = -1;
    while (space > 0 && more < 0) {
        long long left = answer->end - now_ms();
        struct pollfd ready = {answer->pipe, POLLIN, 0};
        poll(&ready, 1, left > 0 ? (int)left : 0);
        more = read(answer->pipe, answer->text + answer->length, space);
        if (more < 0 && (left <= 0 || (errno != EAGAIN && errno != EINTR)))
            return false;
    }
    answer->length += more > 0 ? (size_t)more : 0;
    return more > 0;
}

// Waits for the next line; returns false if none comes in time.
static bool read_line(struct answer *answer, struct text *line)
{
    do {
        struct text rest = {answer->text + answer->taken, answer->length - answer->taken};
        if (take(&rest, '\n', line)) {
            answer->taken += line->length + 1;
            return true;
        }
    } while (read_more(answer));
    return false;
}

// Waits ``patience`` milliseconds for the line "taken" of a worker that has the request, and sets
// the deadline of the next line to ``next`` milliseconds.
static bool is_taken(struct answer *answer, int patience, int next)
{
    struct text line;
    answer->end = now_ms() + patience;
    if (!read_line(answer, &line) || !equals(line, "taken"))
        return false;
    answer->end = now_ms() + next;
    return true;
}

// Copies that many bytes from a pipe into a file; returns false if fewer come.
static bool copy(struct answer *answer, size_t length, int file)
{
    while (length > 0) {
        struct text part = {answer->text + answer->taken, answer->length - answer->taken};
        if (part.length == 0) {
            answer->length = answer->taken = 0;
            if (!read_more(answer))
                return false;
            continue;
        }
        part.length = part.length < length ? part.length : length;
        ssize_t written = write(file, part.at, part.length);
        if (written <= 0)
            return false;
        answer->taken += (size_t)written;
        length -= (size_t)written;
    }
    return true;
}

// Reads the result of the work that a worker does for this hook, and exits with it. Returns if no
// worker has taken the request, or if it took it and didn't respond in time (was_killed).
static void end_with(struct answer *answer, int patience)
{
    struct text line;
    if (!is_taken(answer, patience, WORK_MS))
        return;
    if (!read_line(answer, &line)) {
        was_killed = true;
        return;
    }
    if (equals(line, "done"))
        _exit(0);
    dprintf(STDERR_FILENO, "%s: %.*s\n", base_of(self), (int)line.length, line.at);
    _exit(1);
}

// Writes this process' id as in the mounted /proc: a CDI spec's hook is already in the container's
// namespaces, but not yet in its root.
static bool find_number(char *number, size_t size)
{
    ssize_t length = readlink("/proc/self", number, size);
    if (length <= 0 || (size_t)length >= size)
        return false;
    number[length] = '\0';
    return is_number(number);
}

// Sends a hook's request to its hook worker, and waits for the response. The request is this
// process' id, with which the worker reads the container's state from HOOK_STATE. The arguments are
// the worker's id, the descriptors of its two pipes and of the bundle's folder, and the folder's
// path.
static void ask_worker(char *const *words)
{
    static struct answer answer;
    struct stat bundle;
    char number[16], line[20];
    if (!find_number(number, sizeof number) || !PRINT(line, "%s\n", number) ||
        dup3(STDIN_FILENO, HOOK_STATE, O_CLOEXEC) < 0)
        return;
    int process = open_process(words[0]);
    if (process < 0 || stat(words[4], &bundle) != 0 || !has_open(process, words[3], &bundle))
        return;
    if (!is_running(process))
        return; // protects: stopped-worker
    int asked = open_pipe(process, words[1], O_WRONLY);
    answer.pipe = open_pipe(process, words[2], O_RDONLY);
    if (asked >= 0 && answer.pipe >= 0 && tell(asked, line))
        end_with(&answer, WORK_MS);
}

// The prefork server ------------------------------------------------------------------------------

// Returns whether a process is a prefork server for this launcher: it has this launcher and the
// folder that only root can enter open, and is in our namespaces. For CDI hooks, which run inside
// the container's namespaces, the worker itself checks where the runtime runs.
static bool is_server(int process, const struct stat *folder, bool creates)
{
    char path[PATH_MAX], own[PATH_MAX];
    struct stat launcher;
    folder_of(own, self);
    if (!PRINT(path, "%s/gpu-py", own) || stat(creates ? self : path, &launcher) != 0)
        return false;
    if (!has_open(process, SERVER_FOLDER, folder) || !shares(process, "user"))
        return false;
    if (!has_open(process, SERVER_LAUNCHER, &launcher))
        return false; // protects: own-installation
    if (creates && !shares(process, "mnt"))
        return false; // protects: own-mount-namespace
    return !creates || shares(process, "pid");
}

// Claims a response slot by creating its file with O_EXCL. Returns its number, or -1 if too many
// slots are in use.
static int claim_slot(int folder, const char *server, int number)
{
    char name[48];
    for (int tries = 0; tries < CLAIMS_MOST; tries++) {
        int slot = (number % SLOT_COUNT + 7 * tries) % SLOT_COUNT;
        int flags = O_WRONLY | O_CREAT | O_CLOEXEC;
        flags |= O_EXCL; // protects: one-slot
        int file = PRINT(name, ".%s.%d", server, slot) ? openat(folder, name, flags, 0600) : -1;
        if (file >= 0) {
            close(file);
            return slot;
        }
    }
    return -1;
}

// Sends a request with a claimed slot to a server; returns false if that fails. A hook reads the
// response from HOOK_SLOT, by which the worker identifies it.
static bool ask_from(int slot, int process, const char *number, const char *about, bool creates,
                     struct answer *answer)
{
    char line[ABOUT_MOST + 64], name[16];
    answer->pipe = -1;
    if (!PRINT(line, "%d %s %s\n", slot, number, about) || !PRINT(name, "%d", SLOT_FIRST + slot))
        return false;
    int requests = open_pipe(process, SERVER_REQUESTS, O_WRONLY);
    int pipe = open_pipe(process, name, O_RDONLY), reads = pipe;
    if (!creates && pipe >= 0) {
        reads = dup3(pipe, HOOK_SLOT, O_CLOEXEC); // replaces the placeholder
        close(pipe);
    }
    bool asked = requests >= 0 && reads >= 0 && tell(requests, line);
    close(requests);
    answer->pipe = reads;
    answer->length = answer->taken = 0;
    return asked;
}

// Replaces a bundle's config.json atomically with one that is read from a pipe, keeping mode and
// owner.
static bool replace_config(const char *bundle, struct answer *answer, size_t length)
{
    char path[PATH_MAX], new[PATH_MAX];
    struct stat old;
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    if (!PRINT(path, "%s/config.json", bundle) || !PRINT(new, "%s.gpuhook", path) ||
        stat(path, &old) != 0)
        return false;
    unlink(new); // left by a killed start
    int file = open(new, flags, 0600);
    bool done = file >= 0 && copy(answer, length, file) &&
                fchown(file, old.st_uid, old.st_gid) == 0 &&
                fchmod(file, old.st_mode & 07777) == 0 && rename(new, path) == 0;
    if (file >= 0)
        close(file);
    if (!done)
        unlink(new);
    return done;
}

// Reads a worker's response to a create: config.json stays, or is replaced here, so a late worker
// changes nothing. Returns false if Python has to edit it.
static bool take_config(const char *bundle, const char *number, struct answer *answer)
{
    struct text line, word;
    if (!is_taken(answer, ANSWER_MS, ANSWER_MS) || !read_line(answer, &line) ||
        !take(&line, ' ', &word) || line.length == 0 || line.length > 8)
        return false;
    if (!equals(word, number))
        return false; // a response for another process
    size_t length = 0;
    for (size_t at = 0; at < line.length; at++) {
        if (line.at[at] < '0' || line.at[at] > '9')
            return false;
        length = 10 * length + (size_t)(line.at[at] - '0');
    }
    if (length == 0)
        return true;
    if (!replace_config(bundle, answer, length))
        return false;
    umask(022); // the runtime creates mount points, which all users must be able to enter
    return true;
}

// Sends a request to the servers of this configuration, one by one, until one has responded for a
// bundle. If the bundle is NULL, it is a hook's request, and this process exits when a worker has
// done the work. Servers of other mount namespaces have their names in the same folder.
static bool ask_servers(const char *about, const char *number, const char *bundle)
{
    static struct answer answer;
    bool creates = bundle != NULL;
    char path[PATH_MAX];
    struct stat folder, name;
    DIR *names = PRINT(path, "%s/" READY, saved) ? opendir(path) : NULL;
    if (names == NULL || fstat(dirfd(names), &folder) != 0)
        return false;
    bool done = false;
    for (struct dirent *entry; !done && !was_killed && (entry = readdir(names)) != NULL;) {
        if (fstatat(dirfd(names), entry->d_name, &name, 0) != 0 || name.st_uid != geteuid())
            continue;
        int process = open_process(entry->d_name);
        if (process < 0)
            continue;
        bool asks = is_server(process, &folder, creates);
        if (!is_running(process))
            asks = false; // protects: server-running
        int slot = asks ? claim_slot(dirfd(names), entry->d_name, atoi(number)) : -1;
        asks = slot >= 0 && ask_from(slot, process, number, about, creates, &answer);
        close(process);
        if (asks && creates)
            done = take_config(bundle, number, &answer);
        else if (asks)
            end_with(&answer, ANSWER_MS);
        if (creates && slot >= 0)
            close(answer.pipe);
    }
    closedir(names);
    return done;
}

// Replaces the bundle's config.json with a worker's response. The worker then does the hook's work.
static bool ask_to_edit(const struct arguments *found)
{
    char number[16], about[ABOUT_MOST], id[ABOUT_MOST];
    return found->is_usual && PRINT(about, "%s %s", found->bundle, found->id) &&
           is_plain_path(found->bundle) && PRINT(id, "/%s", found->id) && is_plain_path(id) &&
           PRINT(number, "%d", (int)getpid()) && ask_servers(about, number, found->bundle);
}

// Lets a server's worker do the work of a CDI spec's hook that has no hook worker, whether the
// engine or gpu-py applied the spec. The arguments are [--config FILE] KIND. Returns as end_with.
static void ask_for_cdi_hook(int count, char *const *words)
{
    char number[16];
    if (count == 3 && strcmp(words[0], "--config") == 0)
        words += 2;
    else if (count != 1)
        return;
    const char *kind = words[0];
    if (kind[0] < 'a' || kind[0] > 'z' || kind[strspn(kind, PATH_CHARACTERS)] != '\0' ||
        strlen(kind) >= ABOUT_MOST || !is_plain_path(config) || !find_number(number, sizeof number))
        return;
    // Reserves both descriptor numbers.
    if (dup3(STDIN_FILENO, HOOK_STATE, O_CLOEXEC) < 0 ||
        dup3(STDIN_FILENO, HOOK_SLOT, O_CLOEXEC) < 0)
        return;
    ask_servers(kind, number, NULL);
}

// Python ------------------------------------------------------------------------------------------

// Finds the package in lib next to the bin folder, where pip and system packages install it, so
// that Python need not read site-packages (-S). Returns false if it is elsewhere (an editable
// install). Sets python to the interpreter's name, such as python3.12 for lib/python3.12.
static bool find_packages(const char *bin, char *packages, char *python)
{
    static const char *const kinds[] = {"site-packages", "dist-packages"};
    char path[PATH_MAX];
    packages[0] = '\0';
    for (int at = 0; at < 2 && packages[0] == '\0'; at++) {
        DIR *folders = PRINT(path, "%s/../lib", bin) ? opendir(path) : NULL;
        for (struct dirent *entry; folders != NULL && (entry = readdir(folders)) != NULL;) {
            const char *name = entry->d_name;
            if (!begins(name, "python3") || (packages[0] != '\0' && strcmp(name, python) >= 0) ||
                !PRINT(path, "%s/../lib/%s/%s/gpuhook/_start.py", bin, name, kinds[at]) ||
                !is_file(path))
                continue;
            print(packages, PATH_MAX, "%s/../lib/%s/%s", bin, name, kinds[at]);
            print(python, NAME_MAX + 1, "%s", name);
        }
        if (folders != NULL)
            closedir(folders);
    }
    if (packages[0] != '\0')
        return true;
    bool own = PRINT(path, "%s/../lib/gpuhook/gpuhook/_start.py", bin) && is_file(path);
    print(python, NAME_MAX + 1, "%s", own ? "" : "python3");
    return own && print(packages, PATH_MAX, "%s/../lib/gpuhook", bin);
}

static bool is_program(const char *path)
{
    return is_file(path) && access(path, X_OK) == 0;
}

// Writes the interpreter's path: that of the virtual environment, which may have been moved, else
// the one of that name here or in a system folder.
static void find_python(const char *bin, const char *name, char *python)
{
    const char *folders[] = {bin, "/usr/local/bin", "/usr/bin"};
    char path[PATH_MAX];
    if (PRINT(path, "%s/../pyvenv.cfg", bin) && is_file(path) &&
        print(python, PATH_MAX, "%s/python3", bin) && access(python, X_OK) == 0)
        return;
    for (int at = 0; at < 3 && name[0] != '\0'; at++)
        if (print(python, PATH_MAX, "%s/%s", folders[at], name) && is_program(python))
            return;
    print(python, PATH_MAX, "/usr/bin/python3");
}

// Returns the environment, in which variables that could redirect Python's loader are renamed.
static char **hidden_environment(void)
{
    size_t count = 0;
    while (environ[count] != NULL)
        count++;
    char **changed = calloc(count + 1, sizeof *changed);
    for (size_t at = 0, next = 0; changed != NULL && at < count; at++) {
        char *entry = environ[at];
        if (begins(entry, HIDDEN_PREFIX))
            continue; // only this program may set these
        if (is_one_of(HIDDEN, entry, strcspn(entry, "="))) {
            size_t size = strlen(HIDDEN_PREFIX) + strlen(entry) + 1;
            char *renamed = malloc(size);
            if (renamed == NULL || !print(renamed, size, HIDDEN_PREFIX "%s", entry))
                return NULL;
            entry = renamed;
        }
        changed[next++] = entry;
    }
    return changed;
}

// Becomes Python with a module (_start.py or another) and its arguments, isolated from the caller's
// environment, the bundle and the working folder.
static int become_python(const char *module, int count, char *const *words)
{
    char bin[PATH_MAX], packages[PATH_MAX], name[NAME_MAX + 1], python[PATH_MAX], code[256];
    char **argv = calloc((size_t)count + 12, sizeof *argv), **environment = hidden_environment();
    char isolated[] = "-I"; // protects: isolated
    size_t at = 0;
    folder_of(bin, self);
    bool found = find_packages(bin, packages, name);
    find_python(bin, name, python);
    if (argv == NULL || environment == NULL)
        return 1;
    PRINT(code, "import sys\n"
                "sys.path.insert(0, sys.argv.pop(1))\n" // protects: own-module-folder
                "from %s import main\n"
                "sys.path.append(sys.path.pop(0))\n" // protects: module-path-end
                "main()", module);
    const char *begin[] = {python, isolated, "-S", "-c", code, packages};
    const char *elsewhere[] = {python, isolated, "-m", module};
    for (size_t each = 0; each < (found ? 6 : 4); each++)
        argv[at++] = (char *)(found ? begin : elsewhere)[each];
    argv[at++] = (char *)program;
    argv[at++] = self;
    if (was_killed)
        argv[at++] = (char *)"--helper-killed";
    for (int each = 0; each < count; each++)
        argv[at++] = words[each];
    execve(python, argv, environment);
    dprintf(STDERR_FILENO, "%s: %s can't be started: %s. Install Python 3.11 or newer.\n",
            base_of(self), python, strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    find_self(argc > 0 ? argv[0] : "gpu-py");
    const char *name = base_of(self);
    int count = argc > 0 ? argc - 1 : 0;
    char **words = argv + (argc > 0);
    bool is_hook = strcmp(name, "gpuhook-prestart") == 0;
    bool is_cdi_hook = strcmp(name, "gpuhook-cdi-hook") == 0;
    bool is_cli = strcmp(name, "gpuhook-container-cli") == 0;
    if ((is_hook || is_cdi_hook) && count >= 6 && strcmp(words[0], "--helper") == 0) {
        ask_worker(words + 1);
        words += 6, count -= 6;
        if (is_hook) {
            words -= 2, count += 2; // the bundle's path may be missing in crun's state
            words[0] = (char *)"--bundle";
        } else if (count >= 2 && strcmp(words[0], "--mounts") == 0) {
            words += 2, count -= 2; // the mounts are read from config.json
        }
    }
    find_config(is_cdi_hook && count == 3 && strcmp(words[0], "--config") == 0 ? words[1] : NULL);
    if (is_cdi_hook && !was_killed)
        ask_for_cdi_hook(count, words);
    if (is_hook || is_cdi_hook || is_cli) {
        program = is_hook ? "hook" : is_cdi_hook ? "cdi-hook" : "cli";
    } else if (count > 0 && strcmp(words[0], SERVER_OPTION) == 0) {
        program = "standby";
    } else {
        struct arguments found = read_arguments(count, words);
        bool known = found.verb != FOR_PYTHON && read_cache();
        if (known && (found.verb == CREATES_NOTHING || asks_for_nothing(found.bundle) ||
                      ask_to_edit(&found)))
            become_runtime(found.maker, argv);
    }
    const char *module = is_cli ? "gpuhook.nvidia_cli.__main__" : "gpuhook._start";
    return become_python(module, count, words);
}
