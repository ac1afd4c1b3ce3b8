/* The machine's mutable state while programs run: lost GPUs, and MIG devices. */
#define _GNU_SOURCE /* struct statx, syscall */
#include "state.h"

#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "reach.h"

#define TEXT_LIMIT (1 << 20)
#define MIG_SLOTS 4096
#define GPU_INSTANCES 15
#define COMPUTE_INSTANCES 8
#define MEMORY_SLICES 8
#define COMPUTE_SLICES 7
#define CAPS 65536

/* The version of a file at the last read; all 0 if the file is missing. */
struct version {
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec changed;
};

/* A GPU's MIG devices, parsed from a text. */
struct layout {
    int enabled;
    unsigned count;
    struct sim_mig *migs[SIM_MAX_MIGS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct version lost_version, mig_version;
static int read_once;

/* A MIG device keeps its slot permanently, so that its address can be a handle: a destroyed one has
 * `present` 0. */
static struct sim_mig slots[MIG_SLOTS];
static unsigned slot_count;

char *sim_next_line(char **text)
{
    char *line = *text, *end;

    if (!line || !*line)
        return NULL;
    end = strchr(line, '\n');
    if (end)
        *end = '\0';
    *text = end ? end + 1 : NULL;
    return line;
}

char *sim_next_word(char **line)
{
    char *word = *line, *end;

    if (!word)
        return NULL;
    word += strspn(word, " \t\r");
    if (!*word)
        return NULL;
    end = word + strcspn(word, " \t\r");
    *line = *end ? end + 1 : NULL;
    *end = '\0';
    return word;
}

int sim_number(const char *word, unsigned long long most, unsigned long long *number)
{
    *number = 0;
    if (!word || !*word)
        return 0;
    for (; *word; word++) {
        unsigned digit = (unsigned)(*word - '0');

        if (digit > 9 || digit > most || *number > (most - digit) / 10)
            return 0;
        *number = *number * 10 + digit;
    }
    return *number <= most;
}

struct sim_gpu *sim_find_gpu(const char *word)
{
    unsigned long long number;
    unsigned i;
    int is_number = sim_number(word, UINT_MAX, &number);

    for (i = 0; word && i < SIM_GPU_COUNT; i++)
        if (is_number ? sim_gpus[i].slot == number : strcasecmp(sim_gpus[i].uuid, word) == 0)
            return &sim_gpus[i];
    return NULL;
}

const struct sim_mig *sim_find_mig(const char *uuid)
{
    unsigned s;

    for (s = 0; s < slot_count; s++)
        if (slots[s].present && strcasecmp(slots[s].uuid, uuid) == 0)
            return &slots[s];
    return NULL;
}

int sim_is_mig(const void *address)
{
    const char *at = address, *start = (const char *)slots;

    return at >= start && at < start + slot_count * sizeof *slots &&
           (size_t)(at - start) % sizeof *slots == 0;
}

static int is_mig_uuid(const char *text)
{
    size_t i;

    if (strncmp(text, "MIG-", 4) != 0 || strlen(text) != SIM_MIG_UUID)
        return 0;
    for (i = 4; i < SIM_MIG_UUID; i++)
        if (i == 12 || i == 17 || i == 22 || i == 27 ? text[i] != '-'
                                                     : !isxdigit((unsigned char)text[i]))
            return 0;
    return 1;
}

/* The slot of a MIG device equal to this one: its own, or a new one. NULL if all are taken, or if
 * the GPU had another device of that UUID, because handles of that one may still be in use. */
static struct sim_mig *slot_of(const struct sim_mig *like)
{
    unsigned s;

    for (s = 0; s < slot_count; s++) {
        struct sim_mig *slot = &slots[s];

        if (strcasecmp(slot->uuid, like->uuid) != 0)
            continue;
        if (slot->gpu != like->gpu || slot->profile != like->profile || slot->gi != like->gi ||
            slot->ci != like->ci)
            return NULL;
        slot->gi_cap = like->gi_cap;
        slot->ci_cap = like->ci_cap;
        slot->start = like->start;
        return slot;
    }
    if (slot_count == MIG_SLOTS)
        return NULL;
    slots[slot_count] = *like;
    return &slots[slot_count++];
}

static const struct sim_profile *find_profile(const struct sim_gpu *gpu, const char *name)
{
    unsigned p;

    for (p = 0; name && p < gpu->profile_count; p++)
        if (strcmp(gpu->profiles[p].name, name) == 0)
            return &gpu->profiles[p];
    return NULL;
}

/* Parses "MIG-UUID PROFILE GI CI GI_CAP CI_CAP START"; 0 if the words are invalid. */
static int parse_mig(char *words, struct sim_mig *mig)
{
    const unsigned most[] = {GPU_INSTANCES - 1, COMPUTE_INSTANCES - 1, CAPS, CAPS,
                             MEMORY_SLICES - 1};
    unsigned long long numbers[5];
    char *uuid = sim_next_word(&words);
    unsigned n;

    if (!uuid || !is_mig_uuid(uuid))
        return 0;
    strcpy(mig->uuid, uuid);
    mig->profile = find_profile(mig->gpu, sim_next_word(&words));
    for (n = 0; n < 5; n++)
        if (!sim_number(sim_next_word(&words), most[n], &numbers[n]))
            return 0;
    if (!mig->profile || numbers[4] + mig->profile->memory_slices > MEMORY_SLICES)
        return 0;
    mig->gi = (unsigned)numbers[0];
    mig->ci = (unsigned)numbers[1];
    mig->gi_cap = (unsigned)numbers[2];
    mig->ci_cap = (unsigned)numbers[3];
    mig->start = (unsigned)numbers[4];
    return sim_next_word(&words) == NULL;
}

static unsigned slices_of(const struct sim_mig *mig)
{
    return ((1u << mig->profile->memory_slices) - 1) << mig->start;
}

/* True if a device fits in addition to those before it. Callers of NVML allocate space for the
 * maximum number of devices, so there must never be more. */
static int fits(const struct layout *layout, const struct sim_mig *mig)
{
    unsigned m, same = 1, slices = mig->profile->slices;

    for (m = 0; m < layout->count; m++) {
        const struct sim_mig *other = layout->migs[m];

        if (other->gi == mig->gi || slices_of(other) & slices_of(mig))
            return 0;
        same += other->profile == mig->profile;
        slices += other->profile->slices;
    }
    return layout->count < SIM_MAX_MIGS && same <= mig->profile->instances &&
           slices <= COMPUTE_SLICES;
}

/* A line names a GPU in MIG mode and optionally one device of it. */
static void parse_mig_line(char *line, struct layout *layouts)
{
    struct sim_mig mig = {.uuid = ""};
    struct layout *layout;
    struct sim_mig *slot;
    char *word = sim_next_word(&line);
    struct sim_gpu *gpu = sim_find_gpu(word);

    if (!gpu || !gpu->profile_count)
        return;
    layout = &layouts[gpu - sim_gpus];
    mig.gpu = gpu;
    if (line && *line && !parse_mig(line, &mig))
        return;
    layout->enabled = 1;
    slot = *mig.uuid && fits(layout, &mig) ? slot_of(&mig) : NULL;
    if (slot)
        layout->migs[layout->count++] = slot;
}

static void apply_mig(char *text)
{
    static struct layout layouts[SIM_MAX_GPUS];
    unsigned i, m, s;
    char *line;

    memset(layouts, 0, sizeof layouts);
    while ((line = sim_next_line(&text)))
        parse_mig_line(line, layouts);
    for (s = 0; s < slot_count; s++)
        slots[s].present = 0;
    for (i = 0; i < SIM_GPU_COUNT; i++) {
        struct sim_gpu *gpu = &sim_gpus[i];

        gpu->mig_enabled = layouts[i].enabled;
        gpu->mig_count = layouts[i].count;
        for (m = 0; m < layouts[i].count; m++) {
            gpu->migs[m] = layouts[i].migs[m];
            layouts[i].migs[m]->present = 1;
        }
    }
}

static void apply_lost(char *text)
{
    int lost[SIM_MAX_GPUS] = {0};
    unsigned i;
    char *line;

    while ((line = sim_next_line(&text))) {
        const struct sim_gpu *gpu = sim_find_gpu(sim_next_word(&line));

        if (gpu)
            lost[gpu - sim_gpus] = 1;
    }
    for (i = 0; i < SIM_GPU_COUNT; i++)
        sim_gpus[i].lost = lost[i];
}

/* The text of a file with a terminator, which the caller frees; NULL if it can't be read. */
static char *read_text(int fd)
{
    char *text = malloc(TEXT_LIMIT + 1);
    size_t length = 0;
    ssize_t got;

    while (text && length < TEXT_LIMIT &&
           (got = read(fd, text + length, TEXT_LIMIT - length)) > 0)
        length += (size_t)got;
    if (text)
        text[length] = '\0';
    return text;
}

/* True if a path, or with "" a descriptor, is a plain file; returns its status. The C library is
   the container's: glibc before 2.33 has no symbol stat, and musl before 1.2.5 no statx. */
static int is_file(int fd, const char *path, struct statx *found)
{
    return syscall(SYS_statx, fd, path, AT_EMPTY_PATH, STATX_BASIC_STATS, found) == 0 &&
           S_ISREG(found->stx_mode);
}

/* The device that a file is on, as a number to compare. */
static dev_t device_of(const struct statx *found)
{
    return (dev_t)found->stx_dev_major << 32 | found->stx_dev_minor;
}

static struct version version_of(const char *path)
{
    struct version version;
    struct statx found;

    memset(&version, 0, sizeof version); /* including padding bytes, for memcmp */
    if (*path && is_file(AT_FDCWD, path, &found)) {
        version.device = device_of(&found);
        version.inode = found.stx_ino;
        version.size = (off_t)found.stx_size;
        version.changed.tv_sec = found.stx_mtime.tv_sec;
        version.changed.tv_nsec = found.stx_mtime.tv_nsec;
    }
    return version;
}

/* Applies a text of the state folder if it changed since the last time; 1 if it did. */
static int refresh_text(const char *name, const char *compiled, struct version *last,
                        void (*apply)(char *text))
{
    char path[PATH_MAX], *text = NULL;
    struct version now;
    int fd = -1;

    if (!sim_state_path(name, path, sizeof path))
        path[0] = '\0';
    now = version_of(path);
    if (read_once && memcmp(&now, last, sizeof now) == 0)
        return 0;
    if (now.inode)
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        text = read_text(fd);
        close(fd);
    } else {
        text = strdup(compiled);
    }
    if (!text)
        return 0; /* no memory: unchanged until the next call */
    apply(text);
    free(text);
    *last = now;
    return 1;
}

void sim_refresh(int force)
{
    unsigned s;

    pthread_mutex_lock(&lock);
    refresh_text("lost", SIM_LOST, &lost_version, apply_lost);
    if (refresh_text("mig", SIM_MIG, &mig_version, apply_mig) || force)
        for (s = 0; s < slot_count; s++)
            slots[s].reachable = slots[s].present && sim_reach_mig(slots[s].gpu, &slots[s]);
    read_once = 1;
    pthread_mutex_unlock(&lock);
}

int sim_open_log(struct sim_log *log, const char *name, off_t *size, int *again)
{
    char path[PATH_MAX];
    struct statx status = {.stx_size = 0};
    dev_t device;
    int fd = -1;

    if (sim_state_path(name, path, sizeof path))
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0 && !is_file(fd, "", &status)) {
        close(fd);
        fd = -1;
    }
    *again = 0;
    if (fd < 0) {
        *again = log->inode != 0;
        memset(log, 0, sizeof *log);
        return -1;
    }
    device = device_of(&status);
    *size = (off_t)status.stx_size;
    if (log->inode != status.stx_ino || log->device != device || *size < log->at) {
        *log = (struct sim_log){device, status.stx_ino, 0, 0};
        *again = 1;
    }
    return fd;
}

int sim_read_log(struct sim_log *log, int fd, char line[SIM_LINE])
{
    char *end;
    ssize_t got;
    int whole;

    for (;;) {
        got = pread(fd, line, SIM_LINE - 1, log->at);
        if (got <= 0)
            return 0;
        line[got] = '\0';
        end = memchr(line, '\n', (size_t)got);
        if (!end && got < SIM_LINE - 1)
            return 0; /* still being written */
        log->at += end ? end + 1 - line : got;
        whole = end && !log->skipping;
        log->skipping = !end;
        if (end)
            break;
    }
    *(whole ? end : line) = '\0';
    return 1;
}
