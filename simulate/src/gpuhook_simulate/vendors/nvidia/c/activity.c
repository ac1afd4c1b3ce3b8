/* The activity of simulated GPUs, computed from the history in the state folder's file "activity".
 *
 * Its lines, with times in seconds since 1970:
 *   TIME boot
 *   TIME DEVICE process PID KIND BYTES SM MEMORY ENCODER DECODER
 *   TIME DEVICE end PID
 *   TIME DEVICE accounting on|off|clear
 * where a DEVICE is GPU or GPU:GI:CI. Invalid lines are skipped. */
#include "activity.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define IDLE 34000      /* thousandths of a degree Celsius */
#define HEATING 46000   /* more than that, at full load */
#define DEGREES_PER_SECOND 1
#define MOST_BYTES (1ULL << 50)

/* The state of a GPU at the time of its last line. */
struct history {
    u64 since;
    u64 energy;     /* microjoules */
    long long heat; /* thousandths of a degree */
    unsigned sm;    /* percent, from then on */
    int accounting;
    u64 shown; /* the last reported energy: a counter never decreases */
};

static pthread_mutex_t activity_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_log log_file;
static struct history histories[SIM_MAX_GPUS];
static struct sim_process processes[SIM_PROCESSES];
static int begun;

u64 sim_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
}

static int is_of(const struct sim_process *process, struct sim_device device)
{
    if (process->gpu != device.gpu)
        return 0;
    return !device.mig || (process->gi == device.mig->gi && process->ci == device.mig->ci);
}

/* True if a process is possible in the current MIG mode: one on a destroyed MIG device counts as
 * ended. */
static int has_place(const struct sim_process *process)
{
    const struct sim_gpu *gpu = process->gpu;
    unsigned m;

    if (process->gi == SIM_NO_INSTANCE)
        return !gpu->mig_enabled;
    for (m = 0; m < gpu->mig_count; m++)
        if (gpu->migs[m]->gi == process->gi && gpu->migs[m]->ci == process->ci)
            return 1;
    return 0;
}

static int is_running(const struct sim_process *process)
{
    return process->gpu && !process->end;
}

static unsigned at_most_100(unsigned percent)
{
    return percent > 100 ? 100 : percent;
}

static unsigned power_of(const struct sim_gpu *gpu, unsigned sm)
{
    return gpu->power_limit / 10 + gpu->power_limit / 1000 * 9 * sm;
}

/* Advances a GPU's time to now, with its current load. */
static void pass(const struct sim_gpu *gpu, struct history *history, u64 now)
{
    long long target = IDLE + HEATING / 100 * (long long)history->sm, step;
    u64 milliseconds;

    if (now <= history->since)
        return;
    milliseconds = now / 1000 - history->since / 1000;
    history->energy += power_of(gpu, history->sm) * milliseconds; /* mW times ms */
    step = milliseconds > 1000000 ? 1000000 : (long long)milliseconds * DEGREES_PER_SECOND;
    if (history->heat < target)
        history->heat = history->heat + step > target ? target : history->heat + step;
    else
        history->heat = history->heat - step < target ? target : history->heat - step;
    history->since = now;
}

/* Resets the history, with GPUs that have been idle since that time. */
static void begin_at(u64 time)
{
    unsigned i;

    memset(processes, 0, sizeof processes);
    memset(histories, 0, sizeof histories);
    for (i = 0; i < SIM_GPU_COUNT; i++) {
        histories[i].since = time;
        histories[i].heat = IDLE;
    }
}

static void sum_up(const struct sim_gpu *gpu)
{
    unsigned p, sm = 0;

    for (p = 0; p < SIM_PROCESSES; p++)
        if (processes[p].gpu == gpu && is_running(&processes[p]))
            sm = at_most_100(sm + processes[p].sm);
    histories[gpu - sim_gpus].sm = sm;
}

/* Accumulates a process's usage until now. */
static void settle(struct sim_process *process, u64 now)
{
    if (now <= process->changed)
        return;
    process->sm_total += process->sm * (now - process->changed);
    process->memory_total += process->memory * (now - process->changed);
    process->changed = now;
}

/* An entry for a new process: a free one, or that of the process that ended first. */
static struct sim_process *free_entry(void)
{
    struct sim_process *oldest = NULL;
    unsigned p;

    for (p = 0; p < SIM_PROCESSES; p++) {
        if (!processes[p].gpu)
            return &processes[p];
        if (processes[p].end && (!oldest || processes[p].end < oldest->end))
            oldest = &processes[p];
    }
    return oldest;
}

static struct sim_process *find_running(const struct sim_process *like)
{
    unsigned p;

    for (p = 0; p < SIM_PROCESSES; p++) {
        struct sim_process *process = &processes[p];

        if (is_running(process) && process->gpu == like->gpu && process->pid == like->pid &&
            process->kind == like->kind && process->gi == like->gi && process->ci == like->ci)
            return process;
    }
    return NULL;
}

static void apply_process(const struct sim_process *new, u64 now)
{
    struct sim_process *process = find_running(new);

    if (process) {
        settle(process, now);
    } else {
        process = free_entry();
        if (!process)
            return;
        *process = *new;
        process->start = process->changed = now;
        process->accounted = histories[new->gpu - sim_gpus].accounting;
    }
    process->bytes = new->bytes;
    process->sm = new->sm;
    process->memory = new->memory;
    process->encoder = new->encoder;
    process->decoder = new->decoder;
    if (process->most_bytes < new->bytes)
        process->most_bytes = new->bytes;
}

static int parse_kind(const char *word, enum sim_kind *kind)
{
    if (!word)
        return 0;
    *kind = strcmp(word, "compute") == 0    ? SIM_COMPUTE
            : strcmp(word, "graphics") == 0 ? SIM_GRAPHICS
            : strcmp(word, "mps") == 0      ? SIM_MPS
                                            : 0;
    return *kind != 0;
}

/* PID KIND BYTES SM MEMORY ENCODER DECODER */
static int parse_process(char *line, struct sim_process *process)
{
    unsigned *percents[] = {&process->sm, &process->memory, &process->encoder, &process->decoder};
    u64 number;
    unsigned n;

    if (!sim_number(sim_next_word(&line), INT_MAX, &number) || !number)
        return 0;
    process->pid = (unsigned)number;
    if (!parse_kind(sim_next_word(&line), &process->kind) ||
        !sim_number(sim_next_word(&line), MOST_BYTES, &process->bytes))
        return 0;
    for (n = 0; n < 4; n++) {
        if (!sim_number(sim_next_word(&line), 100, &number))
            return 0;
        *percents[n] = (unsigned)number;
    }
    return sim_next_word(&line) == NULL;
}

static void end_process(const struct sim_process *like, u64 now)
{
    unsigned p;

    for (p = 0; p < SIM_PROCESSES; p++) {
        struct sim_process *process = &processes[p];

        if (!is_running(process) || process->gpu != like->gpu || process->pid != like->pid ||
            process->gi != like->gi || process->ci != like->ci)
            continue;
        settle(process, now);
        process->end = now > process->start ? now : process->start + 1;
    }
}

static void clear_accounts(const struct sim_gpu *gpu)
{
    unsigned p;

    for (p = 0; p < SIM_PROCESSES; p++)
        if (processes[p].gpu == gpu)
            processes[p].accounted = 0;
}

static void apply_accounting(const struct sim_gpu *gpu, const char *word)
{
    int on = word && strcmp(word, "on") == 0, off = word && strcmp(word, "off") == 0;

    if (on || off)
        histories[gpu - sim_gpus].accounting = on;
    if (off || (word && strcmp(word, "clear") == 0))
        clear_accounts(gpu);
}

/* SECONDS or SECONDS.FRACTION, in microseconds. */
static int parse_time(char *word, u64 *time)
{
    char *point = word ? strchr(word, '.') : NULL;
    u64 seconds, part = 0;
    size_t digits = 6;

    if (point) {
        *point++ = '\0';
        digits = strlen(point);
        if (digits > 6 || !sim_number(point, 999999, &part))
            return 0;
    }
    if (!sim_number(word, UINT_MAX, &seconds))
        return 0;
    for (; digits < 6; digits++)
        part *= 10;
    *time = seconds * 1000000 + part;
    return 1;
}

/* GPU or GPU:GI:CI */
static int parse_device(char *word, struct sim_process *process)
{
    char *gi = word ? strchr(word, ':') : NULL, *ci = gi ? strchr(gi + 1, ':') : NULL;
    u64 first, second;

    process->gi = process->ci = SIM_NO_INSTANCE;
    if (gi) {
        if (!ci)
            return 0;
        *gi++ = *ci++ = '\0';
        if (!sim_number(gi, 64, &first) || !sim_number(ci, 64, &second))
            return 0;
        process->gi = (unsigned)first;
        process->ci = (unsigned)second;
    }
    process->gpu = sim_find_gpu(word);
    return process->gpu != NULL;
}

static void apply_line(char *line)
{
    struct sim_process process = {.gpu = NULL};
    char *word, *pid;
    u64 time, number;

    if (!parse_time(sim_next_word(&line), &time) || !(word = sim_next_word(&line)))
        return;
    if (strcmp(word, "boot") == 0) {
        begin_at(time);
        return;
    }
    if (!parse_device(word, &process) || !(word = sim_next_word(&line)))
        return;
    if (time < histories[process.gpu - sim_gpus].since)
        time = histories[process.gpu - sim_gpus].since; /* the clock was set back */
    pass(process.gpu, &histories[process.gpu - sim_gpus], time);
    if (strcmp(word, "process") == 0 && parse_process(line, &process)) {
        apply_process(&process, time);
    } else if (strcmp(word, "end") == 0 && (pid = sim_next_word(&line)) &&
               sim_number(pid, INT_MAX, &number)) {
        process.pid = (unsigned)number;
        end_process(&process, time);
    } else if (strcmp(word, "accounting") == 0) {
        apply_accounting(process.gpu, sim_next_word(&line));
    }
    sum_up(process.gpu);
}

/* Reads new lines of the file; the lock is held. Without a file, all GPUs have always been idle. */
static void refresh(void)
{
    struct timespec up;
    char line[SIM_LINE];
    off_t size;
    int again, fd = sim_open_log(&log_file, "activity", &size, &again);

    if (!begun || again) {
        clock_gettime(CLOCK_MONOTONIC, &up);
        begin_at(sim_now() - (u64)up.tv_sec * 1000000);
        begun = 1;
    }
    while (fd >= 0 && sim_read_log(&log_file, fd, line))
        apply_line(line);
    if (fd >= 0)
        close(fd);
}

struct sim_usage sim_usage(struct sim_device device)
{
    struct sim_usage usage = {0, 0, 0, 0, 0};
    unsigned p;

    pthread_mutex_lock(&activity_lock);
    refresh();
    for (p = 0; p < SIM_PROCESSES; p++) {
        const struct sim_process *process = &processes[p];

        if (!is_running(process) || !is_of(process, device) || !has_place(process))
            continue;
        usage.bytes += process->bytes;
        usage.sm = at_most_100(usage.sm + process->sm);
        usage.memory = at_most_100(usage.memory + process->memory);
        usage.encoder = at_most_100(usage.encoder + process->encoder);
        usage.decoder = at_most_100(usage.decoder + process->decoder);
    }
    pthread_mutex_unlock(&activity_lock);
    return usage;
}

struct sim_work sim_work(struct sim_device device)
{
    struct sim_work work = {sim_now(), 0, 0};
    unsigned p;

    pthread_mutex_lock(&activity_lock);
    refresh();
    for (p = 0; p < SIM_PROCESSES; p++) {
        struct sim_process process = processes[p];

        if (!process.gpu || !is_of(&process, device))
            continue;
        if (!process.end)
            settle(&process, work.time);
        work.sm += process.sm_total;
        work.memory += process.memory_total;
    }
    pthread_mutex_unlock(&activity_lock);
    return work;
}

struct sim_condition sim_condition(const struct sim_gpu *gpu)
{
    struct history *history = &histories[gpu - sim_gpus], now;
    struct sim_condition condition;

    pthread_mutex_lock(&activity_lock);
    refresh();
    now = *history;
    pass(gpu, &now, sim_now());
    if (history->shown < now.energy)
        history->shown = now.energy;
    condition.energy = history->shown / 1000;
    condition.power = power_of(gpu, history->sm);
    condition.temperature = (unsigned)(now.heat / 1000);
    pthread_mutex_unlock(&activity_lock);
    return condition;
}

unsigned sim_running(struct sim_device device, int kinds, struct sim_process *list, unsigned room)
{
    unsigned p, count = 0;

    pthread_mutex_lock(&activity_lock);
    refresh();
    for (p = 0; p < SIM_PROCESSES; p++) {
        const struct sim_process *process = &processes[p];

        if (!is_running(process) || !(process->kind & kinds) || !is_of(process, device) ||
            !has_place(process))
            continue;
        if (count < room)
            list[count] = *process;
        count++;
    }
    pthread_mutex_unlock(&activity_lock);
    return count;
}

/* True if another entry of the same pid started later, or at the same time and comes first. */
static int is_outdone(const struct sim_process *process)
{
    const struct sim_process *other;

    for (other = processes; other < processes + SIM_PROCESSES; other++)
        if (other->gpu == process->gpu && other->accounted && other->pid == process->pid &&
            (other->start > process->start || (other->start == process->start && other < process)))
            return 1;
    return 0;
}

unsigned sim_accounted(const struct sim_gpu *gpu, struct sim_process *list, unsigned room)
{
    unsigned p, count = 0;

    pthread_mutex_lock(&activity_lock);
    refresh();
    for (p = 0; p < SIM_PROCESSES; p++) {
        struct sim_process *process = &processes[p];

        if (process->gpu != gpu || !process->accounted || is_outdone(process))
            continue;
        if (count < room) {
            list[count] = *process;
            if (!process->end)
                settle(&list[count], sim_now());
        }
        count++;
    }
    pthread_mutex_unlock(&activity_lock);
    return count;
}

int sim_is_accounting(const struct sim_gpu *gpu)
{
    int on;

    pthread_mutex_lock(&activity_lock);
    refresh();
    on = histories[gpu - sim_gpus].accounting;
    pthread_mutex_unlock(&activity_lock);
    return on;
}

int sim_write_activity(const struct sim_gpu *gpu, const char *words)
{
    char path[PATH_MAX], line[SIM_LINE];
    u64 now = sim_now();
    int fd, length;
    ssize_t written;

    if (!sim_state_path("activity", path, sizeof path))
        return NVML_ERROR_NOT_SUPPORTED; /* a container has no state folder */
    fd = geteuid() == 0 ? open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return NVML_ERROR_NO_PERMISSION;
    length = snprintf(line, sizeof line, "%llu.%06llu %u %s\n", now / 1000000, now % 1000000,
                      gpu->slot, words);
    written = write(fd, line, (size_t)length);
    close(fd);
    return written == length ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}
