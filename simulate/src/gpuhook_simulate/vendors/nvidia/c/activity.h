/* The activity of simulated GPUs: simulated processes, and the resulting memory, power,
 * temperature and energy.
 *
 * All of it is computed from the file "activity" of the state folder, a history of lines with
 * times. So every program computes the same values, also for the time before its start. */
#ifndef GPUHOOK_ACTIVITY_H
#define GPUHOOK_ACTIVITY_H

#include "nvml.h"

#define SIM_NO_INSTANCE 0xffffffff /* of a process that uses a whole GPU */
#define SIM_PROCESSES 4000         /* stored for all GPUs together, including ended ones */

enum sim_kind { SIM_COMPUTE = 1, SIM_GRAPHICS = 2, SIM_MPS = 4, SIM_ANY = 7 };

struct sim_process {
    const struct sim_gpu *gpu; /* NULL in an entry that is free */
    unsigned pid;
    enum sim_kind kind;
    unsigned gi, ci;
    u64 bytes, most_bytes;
    unsigned sm, memory, encoder, decoder; /* percent */
    u64 start, end;   /* microseconds since 1970; end is 0 while it runs */
    u64 changed;      /* the time of the last change */
    u64 sm_total, memory_total; /* percent times microseconds, until then */
    int accounted;
};

/* The current usage of a GPU or a MIG device. */
struct sim_usage {
    u64 bytes;
    unsigned sm, memory, encoder, decoder; /* percent, 100 at most */
};

/* The work of a GPU or a MIG device until a time: percent times microseconds, which only grow. */
struct sim_work {
    u64 time; /* microseconds since 1970 */
    u64 sm, memory;
};

/* The current condition of a GPU. */
struct sim_condition {
    u64 energy;  /* millijoules since the machine was built */
    unsigned power; /* milliwatts */
    unsigned temperature; /* degrees Celsius */
};

/* Microseconds since 1970, as in NVML's time stamps. */
u64 sim_now(void);

struct sim_usage sim_usage(struct sim_device device);
struct sim_work sim_work(struct sim_device device);
struct sim_condition sim_condition(const struct sim_gpu *gpu);

/* Copies the device's running processes of these kinds, `room` at most; returns their number. For a
 * GPU in MIG mode, they are those of all its MIG devices. */
unsigned sim_running(struct sim_device device, int kinds, struct sim_process *list, unsigned room);

/* The same for a GPU's accounted processes, including ended ones; only the latest for each pid. */
unsigned sim_accounted(const struct sim_gpu *gpu, struct sim_process *list, unsigned room);

/* True if processes of the GPU are accounted. */
int sim_is_accounting(const struct sim_gpu *gpu);

/* Writes a line about the GPU into the file; returns NVML_SUCCESS or an error. */
int sim_write_activity(const struct sim_gpu *gpu, const char *words);

#endif
