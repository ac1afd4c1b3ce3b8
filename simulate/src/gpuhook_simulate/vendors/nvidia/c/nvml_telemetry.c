/* NVML: the condition of a GPU - utilization, power, temperature, clocks. */
#include <stddef.h>

#include "activity.h"

#define SLOWDOWN_TEMPERATURE 87 /* degrees Celsius */
#define SHUTDOWN_TEMPERATURE 92

/* Defines a call that returns one number of a GPU which has the feature. */
#define NUMBER_IF(function, condition, expression)                            \
    API int function(nvml_device handle, unsigned *number)                    \
    {                                                                         \
        const struct sim_gpu *gpu;                                            \
        int result = sim_resolve_gpu(handle, &gpu);                           \
                                                                              \
        if (result)                                                           \
            return result;                                                    \
        if (!(condition))                                                     \
            return NVML_ERROR_NOT_SUPPORTED;                                  \
        if (!number)                                                          \
            return NVML_ERROR_INVALID_ARGUMENT;                               \
        *number = (unsigned)(expression);                                     \
        return NVML_SUCCESS;                                                  \
    }

#define NUMBER_OF_GPU(function, expression) NUMBER_IF(function, 1, expression)

NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, sim_condition(gpu).power)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementDefaultLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementMode, 1)
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, 1)
NUMBER_OF_GPU(nvmlDeviceGetPerformanceState, 0)
NUMBER_OF_GPU(nvmlDeviceGetPowerState, 0)
NUMBER_OF_GPU(nvmlDeviceGetDisplayMode, 0)
NUMBER_OF_GPU(nvmlDeviceGetDisplayActive, 0)
NUMBER_OF_GPU(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkGeneration, gpu->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkGeneration, gpu->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetGpuMaxPcieLinkGeneration, gpu->pcie_generation)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkWidth, 16)
NUMBER_OF_GPU(nvmlDeviceGetPcieReplayCounter, 0)
NUMBER_OF_GPU(nvmlDeviceGetNumFans, gpu->fans)
NUMBER_OF_GPU(nvmlDeviceGetIrqNum, 128 + gpu->minor)
NUMBER_IF(nvmlDeviceGetFanSpeed, gpu->fans, 30)
NUMBER_IF(nvmlDeviceGetDefaultEccMode, gpu->ecc, 1)
NUMBER_IF(nvmlDeviceGetRetiredPagesPendingStatus, gpu->ecc, 0)

API int nvmlDeviceGetPowerManagementLimitConstraints(nvml_device handle, unsigned *low,
                                                     unsigned *high)
{
    int result = nvmlDeviceGetPowerManagementLimit(handle, high);

    if (result)
        return result;
    if (!low)
        return NVML_ERROR_INVALID_ARGUMENT;
    *low = *high / 3;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(nvml_device handle, struct nvml_utilization *rates)
{
    const struct sim_gpu *gpu;
    struct sim_usage usage;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!rates)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (gpu->mig_enabled)
        return NVML_ERROR_NOT_SUPPORTED; /* a partitioned GPU has no rate of its own */
    usage = sim_usage((struct sim_device){gpu, NULL});
    rates->gpu = usage.sm;
    rates->memory = usage.memory;
    return NVML_SUCCESS;
}

/* Defines a call that returns the utilization of a video engine. */
#define ENGINE(function, field)                                                        \
    API int function(nvml_device handle, unsigned *percent, unsigned *period)          \
    {                                                                                  \
        const struct sim_gpu *gpu;                                                     \
        int result = sim_resolve_gpu(handle, &gpu);                                    \
                                                                                       \
        if (result)                                                                    \
            return result;                                                             \
        if (!percent || !period)                                                       \
            return NVML_ERROR_INVALID_ARGUMENT;                                        \
        *percent = sim_usage((struct sim_device){gpu, NULL}).field;                    \
        *period = 167000; /* microseconds */                                           \
        return NVML_SUCCESS;                                                           \
    }

ENGINE(nvmlDeviceGetEncoderUtilization, encoder)
ENGINE(nvmlDeviceGetDecoderUtilization, decoder)

API int nvmlDeviceGetTemperature(nvml_device handle, unsigned sensor, unsigned *temperature)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (sensor != 0 || !temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    *temperature = sim_condition(gpu).temperature;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetTemperatureV(nvml_device handle, struct nvml_temperature *temperature)
{
    if (!temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetTemperature(handle, temperature->sensor,
                                    (unsigned *)&temperature->temperature);
}

API int nvmlDeviceGetTemperatureThreshold(nvml_device handle, unsigned type, unsigned *temperature)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (type > 1)
        return NVML_ERROR_NOT_SUPPORTED;
    *temperature = type == 0 ? SHUTDOWN_TEMPERATURE : SLOWDOWN_TEMPERATURE;
    return NVML_SUCCESS;
}

/* Clock types: 0 graphics, 1 multiprocessor, 2 memory, 3 video. */
API int nvmlDeviceGetMaxClockInfo(nvml_device handle, unsigned type, unsigned *clock)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (type > 3 || !clock)
        return NVML_ERROR_INVALID_ARGUMENT;
    *clock = type == 2 ? gpu->memory_clock : gpu->sm_clock;
    return NVML_SUCCESS;
}

static int is_idle(const struct sim_gpu *gpu)
{
    return sim_usage((struct sim_device){gpu, NULL}).sm == 0;
}

API int nvmlDeviceGetClockInfo(nvml_device handle, unsigned type, unsigned *clock)
{
    int result = nvmlDeviceGetMaxClockInfo(handle, type, clock);

    if (result == NVML_SUCCESS && type != 2 && is_idle(handle))
        *clock = *clock / 5 / 15 * 15; /* clocks come in steps of 15 MHz */
    return result;
}

API int nvmlDeviceGetEccMode(nvml_device handle, unsigned *current, unsigned *pending)
{
    int result = nvmlDeviceGetDefaultEccMode(handle, current);

    if (result)
        return result;
    if (!pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *pending = *current;
    return NVML_SUCCESS;
}

/* A physical GPU has no licensable features: only a virtual machine's share of one has. */
API int nvmlDeviceGetGridLicensableFeatures_v4(nvml_device handle, unsigned supported_and_count[2])
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!supported_and_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    supported_and_count[0] = supported_and_count[1] = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetTotalEnergyConsumption(nvml_device handle, u64 *millijoules)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!millijoules)
        return NVML_ERROR_INVALID_ARGUMENT;
    *millijoules = sim_condition(gpu).energy;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetCurrentClocksEventReasons(nvml_device handle, u64 *reasons)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!reasons)
        return NVML_ERROR_INVALID_ARGUMENT;
    *reasons = (u64)is_idle(gpu); /* the first bit: idle */
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetCurrentClocksEventReasons")
int nvmlDeviceGetCurrentClocksThrottleReasons(nvml_device handle, u64 *reasons);
