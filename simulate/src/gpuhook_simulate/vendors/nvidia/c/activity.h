/* What simulated GPUs do: invented processes, and what follows of them for memory, power,
 * temperature and energy.
 *
 * All of it comes from the file "activity" of the state folder, a history of lines with their
 * times, so that every program computes the same, also of what was before it began. */
#ifndef GPUHOOK_ACTIVITY_H
#define GPUHOOK_ACTIVITY_H

#include "nvml.h"

#define SIM_NO_INSTANCE 0xffffffff /* of a process that uses a whole GPU */
#define SIM_PROCESSES 4000         /* remembered of all GPUs together, ended ones too */

enum sim_kind { SIM_COMPUTE = 1, SIM_GRAPHICS = 2, SIM_MPS = 4, SIM_ANY = 7 };

struct sim_process {
    const struct sim_gpu *gpu; /* NULL in an entry that is free */
    unsigned pid;
    enum sim_kind kind;
    unsigned gi, ci;
    u64 bytes, most_bytes;
    unsigned sm, memory, encoder, decoder; /* percent */
    u64 start, end;   /* microseconds since 1970; end is 0 while it runs */
    u64 changed;      /* when the values became what they are */
    u64 sm_total, memory_total; /* percent times microseconds, until then */
    int accounted;
};

/* What a GPU or a MIG device is busy with. */
struct sim_usage {
    u64 bytes;
    unsigned sm, memory, encoder, decoder; /* percent, 100 at most */
};

/* What a GPU or a MIG device has done until a time: percent times microseconds, which only grow. */
struct sim_work {
    u64 time; /* microseconds since 1970 */
    u64 sm, memory;
};

/* How a GPU is just now. */
struct sim_condition {
    u64 energy;  /* millijoules since the machine was built */
    unsigned power; /* milliwatts */
    unsigned temperature; /* degrees Celsius */
};

/* Microseconds since 1970, as NVML's time stamps are. */
u64 sim_now(void);

struct sim_usage sim_usage(struct sim_device device);
struct sim_work sim_work(struct sim_device device);
struct sim_condition sim_condition(const struct sim_gpu *gpu);

/* Copies the device's running processes of these kinds, `room` at most; returns how many there
 * are. They are those of each of its MIG devices where the device is a GPU in MIG mode. */
unsigned sim_running(struct sim_device device, int kinds, struct sim_process *list, unsigned room);

/* The same for a GPU's processes that are accounted, ended ones too; one for each pid, the latest. */
unsigned sim_accounted(const struct sim_gpu *gpu, struct sim_process *list, unsigned room);

/* Whether processes of the GPU are accounted. */
int sim_is_accounting(const struct sim_gpu *gpu);

/* Writes a line of the GPU into the file; NVML_SUCCESS, or why it can't be done. */
int sim_write_activity(const struct sim_gpu *gpu, const char *words);

#endif
