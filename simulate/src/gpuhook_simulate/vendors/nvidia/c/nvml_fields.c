/* NVML: field values by number, and remapped memory rows. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "activity.h"
#include "state.h"

#define AMPERE 7 /* nvmlDeviceArchitecture_t: the first with row remapping */
#define XID_ROW_REMAPPED 63
#define XID_REMAPPING_FAILED 64
#define STACKED 4096 /* bits: a bus of stacked memory, which has a sensor */
#define HOTTER 8 /* degrees by which memory is hotter than the GPU */
#define ALL_LINKS 0xffffffff /* a scope */
#define XID_OFF_THE_BUS 79 /* only a reboot helps */

#if SIM_RECOVERY
/* nvmlDeviceGpuRecoveryAction_t */
enum recovery { RECOVERY_NONE, RECOVERY_RESET, RECOVERY_REBOOT };

/* XIDs after which a GPU must be reset: errors of memory, of its firmware, of remapping. */
static const unsigned resets[] = {48, XID_REMAPPING_FAILED, 95, 119, 120};
#endif

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

/* Counts a GPU's XIDs of one number, by the lines of the events file. */
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

/* Corrected and uncorrected memory errors since the driver was loaded. */
static int ecc_errors(const struct sim_gpu *gpu, struct field_value *field)
{
    if (!gpu->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    return set_long(field, field->id % 2 ? count_xids(gpu, 92) : count_xids(gpu, 48));
}

#if SIM_RECOVERY
/* The driver's recovery action, until a reboot, which a simulated machine doesn't have. */
static int recovery(const struct sim_gpu *gpu, struct field_value *field)
{
    unsigned x, action = count_xids(gpu, XID_OFF_THE_BUS) ? RECOVERY_REBOOT : RECOVERY_NONE;

    for (x = 0; !action && x < sizeof resets / sizeof *resets; x++)
        action = count_xids(gpu, resets[x]) ? RECOVERY_RESET : RECOVERY_NONE;
    return set_number(field, action);
}
#endif

/* KiB over all NVLinks; ten times a second's percents. */
static int traffic(const struct sim_gpu *gpu, struct field_value *field)
{
    if (SIM_NVLINK == SIM_NVLINK_NONE || !gpu->nvlinks || field->scope != ALL_LINKS)
        return NVML_ERROR_NOT_SUPPORTED;
    return set_long(field, sim_work((struct sim_device){gpu, NULL}).sm / 100000);
}

/* The numbers are NVML_FI_DEV_... */
static int get_field(nvml_device handle, const struct sim_gpu *gpu, struct field_value *field)
{
    switch (field->id) {
    case 1: case 2: /* mode of error correction */
        return set_number(field, (unsigned)gpu->ecc);
    case 3: case 4: case 5: case 6: /* memory errors */
        return ecc_errors(gpu, field);
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
    case 138: case 139: /* data sent and received on NVLinks */
        return traffic(gpu, field);
    case 142: case 143: case 144: case 145:
        return remapped(handle, field);
    case 185: case 186:
        return set_number(field, sim_condition(gpu).power);
    case 188: case 189: case 190:
        return set_number(field, gpu->power_limit);
#if SIM_RECOVERY
    case 230:
        return recovery(gpu, field);
#endif
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

/* `type` 0 means corrected errors, `counter` 0 means since the driver was loaded. */
API int nvmlDeviceGetTotalEccErrors(nvml_device handle, unsigned type, unsigned counter, u64 *count)
{
    struct field_value field = {.id = 3 + (type ? 1 : 0) + (counter ? 2 : 0)};
    int result;

    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = nvmlDeviceGetFieldValues(handle, 1, &field);
    *count = field.value.long_number;
    return result ? result : field.result;
}
