/* NVML: values by number, and the rows of memory that were remapped. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "activity.h"
#include "state.h"

#define AMPERE 7 /* nvmlDeviceArchitecture_t: rows are remapped from here on */
#define XID_ROW_REMAPPED 63
#define XID_REMAPPING_FAILED 64
#define XID_OFF_THE_BUS 79
#define XID_UNCONTAINED 95
#define GPU_RESET 1 /* NVML_GPU_RECOVERY_ACTION_... */
#define NODE_REBOOT 2
#define STACKED 4096 /* bits: a bus of stacked memory, which has a sensor */
#define HOTTER 8 /* degrees that memory is above the GPU */

enum value_type { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

struct field_value {
    unsigned id, scope;
    long long time, latency; /* microseconds */
    unsigned type;
    int result;
    union {
        double real;
        unsigned number;
        u64 long_number;
    } value;
};

_Static_assert(sizeof(struct field_value) == 40, "as nvml.h has it");

/* Counts the XIDs of one number that have happened to a GPU, by the lines of the file of events. */
static unsigned count_xids(const struct sim_gpu *gpu, unsigned xid)
{
    struct sim_log log = {0, 0, 0, 0};
    char line[SIM_LINE], *rest;
    unsigned count = 0;
    off_t size;
    int again, fd = sim_open_log(&log, "events", &size, &again);
    u64 number;

    while (fd >= 0 && sim_read_log(&log, fd, line)) {
        rest = line;
        if (sim_find_gpu(sim_next_word(&rest)) == gpu &&
            sim_number(sim_next_word(&rest), 0xffffffff, &number) && number == xid)
            count++;
    }
    if (fd >= 0)
        close(fd);
    return count;
}

API int nvmlDeviceGetRemappedRows(nvml_device handle, unsigned *correctable,
                                  unsigned *uncorrectable, unsigned *pending, unsigned *failed)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!correctable || !uncorrectable || !pending || !failed)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (gpu->architecture < AMPERE || !gpu->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    *correctable = 0;
    *uncorrectable = count_xids(gpu, XID_ROW_REMAPPED);
    *pending = *uncorrectable > 0; /* until a reset, which a simulated GPU doesn't have */
    *failed = count_xids(gpu, XID_REMAPPING_FAILED) > 0;
    return NVML_SUCCESS;
}

static int set_number(struct field_value *field, unsigned number)
{
    field->type = UNSIGNED_INT;
    field->value.number = number;
    return NVML_SUCCESS;
}

static int set_long(struct field_value *field, u64 number)
{
    field->type = UNSIGNED_LONG_LONG;
    field->value.long_number = number;
    return NVML_SUCCESS;
}

static int remapped(nvml_device handle, struct field_value *field)
{
    unsigned rows[4];
    int result = nvmlDeviceGetRemappedRows(handle, &rows[0], &rows[1], &rows[2], &rows[3]);

    return result ? result : set_number(field, rows[field->id - 142]);
}

/* The numbers are NVML_FI_DEV_... */
static int get_field(nvml_device handle, const struct sim_gpu *gpu, struct field_value *field)
{
    switch (field->id) {
    case 1: case 2: /* mode of error correction */
        return set_number(field, (unsigned)gpu->ecc);
    case 3: case 4: case 5: case 6: /* errors of memory */
        return gpu->ecc ? set_long(field, 0) : NVML_ERROR_NOT_SUPPORTED;
    case 82:
        return gpu->bus_width >= STACKED
                   ? set_number(field, sim_condition(gpu).temperature + HOTTER)
                   : NVML_ERROR_NOT_SUPPORTED;
    case 83:
        return set_long(field, sim_condition(gpu).energy);
    case 91:
        return set_number(field, SIM_NVLINK == SIM_NVLINK_NONE ? 0 : gpu->nvlinks);
    case 94: case 95: /* replays on PCI Express */
        return set_number(field, 0);
    case 142: case 143: case 144: case 145:
        return remapped(handle, field);
    case 185: case 186:
        return set_number(field, sim_condition(gpu).power);
    case 230: /* what helps the GPU, until a reset, which a simulated GPU doesn't have */
        if (gpu->architecture < AMPERE)
            return NVML_ERROR_NOT_SUPPORTED;
        return set_number(field, count_xids(gpu, XID_OFF_THE_BUS) ? NODE_REBOOT
                                 : count_xids(gpu, XID_UNCONTAINED) ? GPU_RESET : 0);
    case 188: case 189: case 190:
        return set_number(field, gpu->power_limit);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

API int nvmlDeviceGetFieldValues(nvml_device handle, int count, struct field_value *fields)
{
    const struct sim_gpu *gpu;
    int f, result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!fields || count <= 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (f = 0; f < count; f++) {
        fields[f].time = (long long)sim_now();
        fields[f].latency = 0;
        fields[f].value.long_number = 0;
        fields[f].result = get_field(handle, gpu, &fields[f]);
    }
    return NVML_SUCCESS;
}
