/* NVML: events. Events of a simulated GPU are lines of the file "events" in the state folder,
 * appended while programs run: GPU XID [GI CI].
 *
 * Each event set reads the file separately, from its end at the time of the GPU's registration. So
 * every set of every process gets every event. */
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"
#include "state.h"

#define EVENT_SINGLE_BIT 1
#define EVENT_DOUBLE_BIT 2
#define EVENT_XID 8
#define WHOLE_GPU 0xffffffff /* if an event isn't of one instance */
#define UNWATCHED_MILLISECONDS 200 /* between polls if the folder can't be watched */

struct nvml_event {
    nvml_device device;
    u64 type, data;
    unsigned gpu_instance, compute_instance;
};

/* The first version ended before the instances. */
struct nvml_event_v1 {
    nvml_device device;
    u64 type, data;
};

struct event_set {
    struct event_set *next;
    u64 types[SIM_MAX_GPUS]; /* registered of each GPU */
    off_t from[SIM_MAX_GPUS]; /* the offset of the first line after its registration */
    struct sim_log log;
};

_Static_assert(sizeof(struct nvml_event) == 32, "as nvml.h has it");
_Static_assert(sizeof(struct nvml_event_v1) == 24, "as nvml.h had it");

static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;
static struct event_set *sets;

static int is_set(const struct event_set *set)
{
    const struct event_set *known;

    pthread_mutex_lock(&events_lock);
    for (known = sets; known && known != set; known = known->next)
        ;
    pthread_mutex_unlock(&events_lock);
    return set && known;
}

API int nvmlEventSetCreate(struct event_set **set)
{
    char path[PATH_MAX];

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sim_state_path("no-events", path, sizeof path) && !access(path, F_OK))
        return NVML_ERROR_NOT_SUPPORTED;
    *set = calloc(1, sizeof **set);
    if (!*set)
        return NVML_ERROR_MEMORY;
    pthread_mutex_lock(&events_lock);
    (*set)->next = sets;
    sets = *set;
    pthread_mutex_unlock(&events_lock);
    return NVML_SUCCESS;
}

API int nvmlEventSetFree(struct event_set *set)
{
    struct event_set **link;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    pthread_mutex_lock(&events_lock);
    for (link = &sets; *link && *link != set; link = &(*link)->next)
        ;
    if (*link)
        *link = set->next;
    else
        set = NULL;
    pthread_mutex_unlock(&events_lock);
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

API int nvmlDeviceGetSupportedEventTypes(nvml_device handle, u64 *types)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!types)
        return NVML_ERROR_INVALID_ARGUMENT;
    *types = EVENT_XID | (gpu->ecc ? EVENT_SINGLE_BIT | EVENT_DOUBLE_BIT : 0);
    return NVML_SUCCESS;
}

/* Opens the events file; all lines of a replaced file come after every registration. */
static int open_events(struct event_set *set, off_t *size)
{
    int again, fd = sim_open_log(&set->log, "events", size, &again);

    if (again)
        memset(set->from, 0, sizeof set->from);
    return fd;
}

API int nvmlDeviceRegisterEvents(nvml_device handle, u64 types, struct event_set *set)
{
    const struct sim_gpu *gpu;
    off_t size;
    unsigned i, used = 0;
    u64 supported;
    int fd, result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!types || !is_set(set))
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlDeviceGetSupportedEventTypes(handle, &supported);
    if (types & ~supported)
        return NVML_ERROR_NOT_SUPPORTED;
    for (i = 0; i < SIM_GPU_COUNT; i++)
        used |= set->types[i] != 0;
    fd = open_events(set, &size);
    if (fd >= 0) {
        close(fd);
        if (!used)
            set->log.at = size;
        if (!set->types[gpu - sim_gpus])
            set->from[gpu - sim_gpus] = size;
    }
    set->types[gpu - sim_gpus] |= types;
    return NVML_SUCCESS;
}

/* Parses "GPU XID [GI CI]"; 0 if the line is invalid, or its GPU isn't registered. */
static int parse_event(const struct event_set *set, char *line, off_t at, struct nvml_event *event)
{
    const struct sim_gpu *gpu = sim_find_gpu(sim_next_word(&line));
    u64 gi = WHOLE_GPU, ci = WHOLE_GPU;
    char *word;

    if (!gpu || !(set->types[gpu - sim_gpus] & EVENT_XID) || at < set->from[gpu - sim_gpus])
        return 0;
    if (!sim_number(sim_next_word(&line), UINT_MAX, &event->data))
        return 0;
    word = sim_next_word(&line);
    if (word && (!sim_number(word, UINT_MAX, &gi) ||
                 !sim_number(sim_next_word(&line), UINT_MAX, &ci) || sim_next_word(&line)))
        return 0;
    event->device = gpu;
    event->type = EVENT_XID;
    event->gpu_instance = (unsigned)gi;
    event->compute_instance = (unsigned)ci;
    return 1;
}

/* The next event of the set, if there is one. */
static int next_event(struct event_set *set, struct nvml_event *event)
{
    char line[SIM_LINE];
    off_t size;
    int fd = open_events(set, &size), found = 0;

    while (fd >= 0 && !found) {
        off_t at = set->log.at;

        if (!sim_read_log(&set->log, fd, line))
            break;
        found = parse_event(set, line, at, event);
    }
    if (fd >= 0)
        close(fd);
    return found;
}

static int has_lost_gpu(const struct event_set *set)
{
    unsigned i;

    sim_refresh(0);
    for (i = 0; i < SIM_GPU_COUNT; i++)
        if (set->types[i] && sim_gpus[i].lost)
            return 1;
    return 0;
}

/* An inotify descriptor of the state folder; -1 if there is no folder, or inotify fails. */
static int watch_folder(void)
{
    char path[PATH_MAX];
    int fd;

    if (!sim_state_path(".", path, sizeof path))
        return -1;
    fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (fd >= 0 && inotify_add_watch(fd, path, IN_MODIFY | IN_CREATE | IN_MOVED_TO | IN_DELETE |
                                                   IN_DELETE_SELF | IN_ONLYDIR) < 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static long long now_milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* Waits until something changes in the folder, or for `milliseconds`. The folder is watched again
 * each time, because another root may have replaced this one. */
static void wait_for_change(int watch, long long milliseconds)
{
    struct pollfd poll_for = {watch, POLLIN, 0};

    if (watch < 0 && milliseconds > UNWATCHED_MILLISECONDS)
        milliseconds = UNWATCHED_MILLISECONDS;
    if (milliseconds > INT_MAX)
        milliseconds = INT_MAX;
    poll(&poll_for, 1, (int)milliseconds);
}

static int wait_for_event(struct event_set *set, struct nvml_event *event, unsigned milliseconds)
{
    long long end = now_milliseconds() + milliseconds, left;
    int watch, lost, found, result = NVML_SUCCESS;

    if (sim_initialized())
        return NVML_ERROR_UNINITIALIZED;
    if (!event || !is_set(set))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (;;) {
        watch = watch_folder(); /* before reading, so that no change is missed */
        lost = has_lost_gpu(set);
        found = next_event(set, event); /* events of a GPU before its loss come first */
        left = end - now_milliseconds();
        if (!found && lost)
            result = NVML_ERROR_GPU_IS_LOST;
        else if (!found && left <= 0)
            result = NVML_ERROR_TIMEOUT;
        if (!found && !result)
            wait_for_change(watch, left);
        if (watch >= 0)
            close(watch);
        if (found || result)
            return result;
    }
}

API int nvmlEventSetWait_v2(struct event_set *set, struct nvml_event *event, unsigned milliseconds)
{
    struct nvml_event got;
    int result = wait_for_event(set, event ? &got : NULL, milliseconds);

    if (result == NVML_SUCCESS)
        *event = got;
    return result;
}

API int nvmlEventSetWait(struct event_set *set, struct nvml_event_v1 *event, unsigned milliseconds)
{
    struct nvml_event got;
    int result = wait_for_event(set, event ? &got : NULL, milliseconds);

    if (result == NVML_SUCCESS)
        *event = (struct nvml_event_v1){got.device, got.type, got.data};
    return result;
}
