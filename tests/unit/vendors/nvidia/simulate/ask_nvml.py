"""Program that reads everything from the NVML that the loader finds, and prints it as JSON.

Tests run it in a child process, with LD_LIBRARY_PATH pointing to the library in question.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pynvml as n


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    try:
        value = call(*args)
    except n.NVMLError as error:
        return f"error {error.value}"
    return getattr(value, "value", value)


def device(handle: Any) -> dict[str, Any]:
    return {
        "index": n.nvmlDeviceGetIndex(handle),
        "name": n.nvmlDeviceGetName(handle),
        "uuid": n.nvmlDeviceGetUUID(handle),
        "minor": n.nvmlDeviceGetMinorNumber(handle),
        "memory": n.nvmlDeviceGetMemoryInfo(handle).total,
        "memory_v2": n.nvmlDeviceGetMemoryInfo(handle, n.nvmlMemory_v2).total,
        "is_mig": attempt(n.nvmlDeviceIsMigDeviceHandle, handle),
    }


def gpu(index: int) -> dict[str, Any]:
    handle = n.nvmlDeviceGetHandleByIndex(index)
    pci = n.nvmlDeviceGetPciInfo(handle)
    facts = device(handle)
    facts["bus"] = [pci.busId, pci.busIdLegacy, pci.domain, pci.bus, hex(pci.pciDeviceId)]
    facts["capability"] = list(n.nvmlDeviceGetCudaComputeCapability(handle))
    facts["brand"] = n.nvmlDeviceGetBrand(handle)
    facts["architecture"] = n.nvmlDeviceGetArchitecture(handle)
    facts["mig_mode"] = attempt(n.nvmlDeviceGetMigMode, handle)
    facts["max_migs"] = n.nvmlDeviceGetMaxMigDeviceCount(handle)
    facts["temperature"] = n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)
    facts["power"] = n.nvmlDeviceGetPowerUsage(handle)
    facts["fan"] = attempt(n.nvmlDeviceGetFanSpeed, handle)
    facts["ecc"] = attempt(n.nvmlDeviceGetEccMode, handle)
    facts["nvlink"] = attempt(n.nvmlDeviceGetNvLinkState, handle, 0)
    facts["processes"] = n.nvmlDeviceGetComputeRunningProcesses(handle)
    facts["same"] = [
        n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(facts["uuid"])),
        n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(pci.busId)),
        n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleBySerial(n.nvmlDeviceGetSerial(handle))),
    ]
    facts["migs"] = []
    for at in range(facts["max_migs"]):
        try:
            mig = n.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
        except n.NVMLError as error:
            facts["migs_end"] = error.value
            break
        facts["migs"].append(part(handle, mig))
    return facts


def part(parent: Any, mig: Any) -> dict[str, Any]:
    facts = device(mig)
    attributes = n.nvmlDeviceGetAttributes_v2(mig)
    facts["gi"] = n.nvmlDeviceGetGpuInstanceId(mig)
    facts["ci"] = n.nvmlDeviceGetComputeInstanceId(mig)
    facts["slices"] = attributes.gpuInstanceSliceCount
    facts["sms"] = attributes.multiprocessorCount
    facts["parent"] = n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig))
    facts["by_uuid"] = n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(facts["uuid"]))
    instance = n.nvmlDeviceGetGpuInstanceById(parent, facts["gi"])
    info = n.nvmlGpuInstanceGetInfo(instance)
    profile = n.nvmlDeviceGetGpuInstanceProfileInfoById(parent, info.profileId)
    place = info.placement
    facts["profile"] = [profile.name, profile.id, place.start, place.size]
    return facts


def main() -> None:
    before = attempt(n.nvmlDeviceGetCount) if n._LoadNvmlLibrary() is None else None
    started = time.monotonic()
    failure = attempt(n.nvmlInit)
    answer = {"before": before, "init": failure, "seconds": time.monotonic() - started}
    if failure is None:
        answer["driver"] = n.nvmlSystemGetDriverVersion()
        answer["cuda"] = n.nvmlSystemGetCudaDriverVersion_v2()
        answer["gpus"] = [attempt(gpu, index) for index in range(n.nvmlDeviceGetCount())]
        answer["beyond"] = attempt(n.nvmlDeviceGetHandleByIndex, len(answer["gpus"]))
        answer["nobody"] = attempt(n.nvmlDeviceGetHandleByUUID, "GPU-x")
        n.nvmlShutdown()
        answer["after"] = attempt(n.nvmlDeviceGetCount)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
