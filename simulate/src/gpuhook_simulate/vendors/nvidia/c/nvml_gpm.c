/* NVML: metrics of a GPU or a GPU instance between two samples (GPM), and PCI Express traffic.
 *
 * The shares follow from the simulated processes: tensors take half of the multiprocessors' time,
 * and each percent of it causes traffic. */
#include <stdlib.h>

#include "activity.h"

#define HOPPER 9 /* nvmlDeviceArchitecture_t: the first with samples */
#define SENT 10 /* MiB/s on PCI Express for each percent; it receives twice as much */

API int nvmlDeviceGetPcieThroughput(nvml_device handle, unsigned counter, unsigned *kib)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (counter > 1 || !kib)
        return NVML_ERROR_INVALID_ARGUMENT;
    *kib = sim_usage((struct sim_device){gpu, NULL}).sm * SENT * (counter + 1) * 1024;
    return NVML_SUCCESS;
}

#if SIM_GPM

struct gpm_sample {
    struct sim_device device;
    struct sim_work work;
};

struct gpm_support {
    unsigned version, supported;
};

struct gpm_metric {
    unsigned id;
    int result;
    double value;
    const char *short_name, *long_name, *unit;
};

struct gpm_metrics {
    unsigned version, count;
    struct gpm_sample *first, *second;
    struct gpm_metric metrics[]; /* the caller determines their number */
};

_Static_assert(sizeof(struct gpm_metric) == 40, "as nvml.h has it");

static int is_sampled(const struct sim_gpu *gpu)
{
    return gpu->architecture >= HOPPER;
}

API int nvmlGpmQueryDeviceSupport(nvml_device handle, struct gpm_support *support)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!support)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (support->version != 1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    support->supported = (unsigned)is_sampled(gpu);
    return NVML_SUCCESS;
}

API int nvmlGpmSampleAlloc(struct gpm_sample **sample)
{
    int result = sim_initialized();

    if (result)
        return result;
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    *sample = calloc(1, sizeof **sample);
    return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

API int nvmlGpmSampleFree(struct gpm_sample *sample)
{
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(sample);
    return NVML_SUCCESS;
}

static int take_sample(struct sim_device device, struct gpm_sample *sample)
{
    if (!is_sampled(device.gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    if (!sample)
        return NVML_ERROR_INVALID_ARGUMENT;
    sample->device = device;
    sample->work = sim_work(device);
    return NVML_SUCCESS;
}

API int nvmlGpmSampleGet(nvml_device handle, struct gpm_sample *sample)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    return result ? result : take_sample((struct sim_device){gpu, NULL}, sample);
}

API int nvmlGpmMigSampleGet(nvml_device handle, unsigned instance, struct gpm_sample *sample)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);
    unsigned m;

    if (result)
        return result;
    for (m = 0; m < gpu->mig_count; m++)
        if (gpu->migs[m]->gi == instance && gpu->migs[m]->reachable)
            return take_sample((struct sim_device){gpu, gpu->migs[m]}, sample);
    return NVML_ERROR_INVALID_ARGUMENT;
}

static void compute(struct gpm_metric *metric, double sm, double memory)
{
    metric->result = NVML_SUCCESS;
    switch (metric->id) {
    case 1: case 2: /* of anything, of the multiprocessors */
        metric->value = sm;
        break;
    case 5: /* of tensors */
        metric->value = sm / 2;
        break;
    case 10: /* of the memory's bandwidth */
        metric->value = memory;
        break;
    case 20: case 21: /* MiB/s sent and received */
        metric->value = sm * SENT * (metric->id - 19);
        break;
    default:
        metric->result = NVML_ERROR_NOT_SUPPORTED;
    }
}

static double share(u64 before, u64 after, u64 time)
{
    double percent = after < before ? 0 : (double)(after - before) / (double)time;

    return percent > 100 ? 100 : percent;
}

API int nvmlGpmMetricsGet(struct gpm_metrics *it)
{
    const struct sim_work *before, *after;
    u64 time;
    unsigned m;
    int result = sim_initialized();

    if (result)
        return result;
    if (!it || !it->first || !it->second || !it->count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (it->version != 1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    before = &it->first->work;
    after = &it->second->work;
    if (it->first->device.gpu != it->second->device.gpu ||
        it->first->device.mig != it->second->device.mig || after->time <= before->time)
        return NVML_ERROR_INVALID_ARGUMENT;
    time = after->time - before->time;
    for (m = 0; m < it->count; m++)
        compute(&it->metrics[m], share(before->sm, after->sm, time),
                share(before->memory, after->memory, time));
    return NVML_SUCCESS;
}

#endif
