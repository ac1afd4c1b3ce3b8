/* NVML: the state of an idle GPU - utilisation, power, temperature, clocks, processes. */
#include <time.h>

#include "nvml.h"

#define IDLE_TEMPERATURE 34 /* degrees Celsius */
#define SLOWDOWN_TEMPERATURE 87
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

NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, gpu->power_limit / 10)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementDefaultLimit, gpu->power_limit)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementMode, 1)
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, 1)
NUMBER_OF_GPU(nvmlDeviceGetComputeMode, 0)
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
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!rates)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (gpu->mig_enabled)
        return NVML_ERROR_NOT_SUPPORTED; /* a partitioned GPU has no rate of its own */
    rates->gpu = rates->memory = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetEncoderUtilization(nvml_device handle, unsigned *percent, unsigned *period)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (!percent || !period)
        return NVML_ERROR_INVALID_ARGUMENT;
    *percent = 0;
    *period = 167000; /* microseconds */
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetEncoderUtilization")
int nvmlDeviceGetDecoderUtilization(nvml_device handle, unsigned *percent, unsigned *period);

API int nvmlDeviceGetTemperature(nvml_device handle, unsigned sensor, unsigned *temperature)
{
    const struct sim_gpu *gpu;
    int result = sim_resolve_gpu(handle, &gpu);

    if (result)
        return result;
    if (sensor != 0 || !temperature)
        return NVML_ERROR_INVALID_ARGUMENT;
    *temperature = IDLE_TEMPERATURE;
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

API int nvmlDeviceGetClockInfo(nvml_device handle, unsigned type, unsigned *clock)
{
    int result = nvmlDeviceGetMaxClockInfo(handle, type, clock);

    if (result == NVML_SUCCESS && type != 2)
        *clock = *clock / 5 / 15 * 15; /* idle; clocks come in steps of 15 MHz */
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

API int nvmlDeviceGetTotalEccErrors(nvml_device handle, unsigned type, unsigned counter, u64 *count)
{
    unsigned mode;
    int result = nvmlDeviceGetDefaultEccMode(handle, &mode);

    (void)type;
    (void)counter;
    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

API int nvmlDeviceGetTotalEnergyConsumption(nvml_device handle, u64 *millijoules)
{
    unsigned milliwatts;
    int result = nvmlDeviceGetPowerUsage(handle, &milliwatts);
    struct timespec up;

    if (result)
        return result;
    if (!millijoules)
        return NVML_ERROR_INVALID_ARGUMENT;
    clock_gettime(CLOCK_MONOTONIC, &up);
    *millijoules = (u64)milliwatts * (u64)up.tv_sec;
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
    *reasons = 1; /* idle */
    return NVML_SUCCESS;
}

ALIAS("nvmlDeviceGetCurrentClocksEventReasons")
int nvmlDeviceGetCurrentClocksThrottleReasons(nvml_device handle, u64 *reasons);

/* No process runs on a simulated GPU. */
API int nvmlDeviceGetComputeRunningProcesses_v3(nvml_device handle, unsigned *count, void *list)
{
    struct sim_device device;
    int result = sim_resolve(handle, &device);

    (void)list;
    if (result)
        return result;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

#define NO_PROCESSES(function)                             \
    ALIAS("nvmlDeviceGetComputeRunningProcesses_v3")       \
    int function(nvml_device handle, unsigned *count, void *list);

NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* How two GPUs are connected: 0 same GPU, 30 through one host bridge, 50 across the system. */
API int nvmlDeviceGetTopologyCommonAncestor(nvml_device a, nvml_device b, unsigned *level)
{
    const struct sim_gpu *first, *second;
    int result = sim_resolve_gpu(a, &first);

    if (result == NVML_SUCCESS)
        result = sim_resolve_gpu(b, &second);
    if (result)
        return result;
    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = first == second ? 0 : first->domain == second->domain ? 30 : 50;
    return NVML_SUCCESS;
}

API int nvmlDeviceOnSameBoard(nvml_device a, nvml_device b, int *same)
{
    const struct sim_gpu *first, *second;
    int result = sim_resolve_gpu(a, &first);

    if (result == NVML_SUCCESS)
        result = sim_resolve_gpu(b, &second);
    if (result)
        return result;
    if (!same)
        return NVML_ERROR_INVALID_ARGUMENT;
    *same = first == second;
    return NVML_SUCCESS;
}
