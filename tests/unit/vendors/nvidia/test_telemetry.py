"""Telemetry of a GPU with unknown values, which are omitted and affect no other value."""

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuhook.metrics.vendors.nvidia import telemetry

UUID = "GPU-1"
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
KINDS = ("Compute", "Graphics", "MPSCompute")
# pynvml raises this, not an NVMLError, if a library has no function of the newest form.
OLD: Any = pynvml.NVMLLibraryMismatchError("no")


class Nvml:
    """pynvml in which some functions return or raise the given answers."""

    def __init__(self, **answers: Any) -> None:
        self._answers = {"nvmlDeviceGetHandleByUUID": 1, **answers}

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            return getattr(pynvml, name)
        answer = self._answers[name]

        def function(*_: Any, **__: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return function


def error(number: int) -> Exception:
    made: Exception = pynvml.NVMLError(number)
    return made


def lists(**of_version: Any) -> dict[str, Any]:
    """Return answers of the process lists: the given ones for Compute, and none for other kinds."""
    name = "nvmlDeviceGet{}RunningProcesses{}".format
    absent = error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    found = {name(kind, form): absent for kind in KINDS for form in ("_v2", "_v3")}
    found.update({name(kind, ""): OLD for kind in KINDS})
    found.update({name("Compute", form): answer for form, answer in of_version.items()})
    return found


def seen(**answers: Any) -> dict[str, Any]:
    """Return the known values of a GPU, whose temperature is always known."""
    memory = SimpleNamespace(total=80, used=8, reserved=1)
    known = {"nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetTemperature": 40}
    eyes = telemetry._Sampler(Nvml(**{**known, **answers}), lambda _: None)
    found, failed = eyes.measure({UUID: []}, more=False)
    assert failed == {}
    assert found[UUID]["temperature_celsius"] == 40
    return found[UUID]


PROCESS = SimpleNamespace(pid=7, usedGpuMemory=5)


@pytest.mark.protects(
    "unknown-processes",
    "GPU processes that NVML can't list aren't reported as none",
    instead="return []",
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lists(_v3=[PROCESS]), [[7, 5]]),
        (lists(_v3=[]), []),
        (lists(_v2=[PROCESS]), [[7, 5]]),  # a driver before 510
        (lists(), None),
        (lists(_v3=error(NOT_SUPPORTED)), None),
        (lists(_v3=error(pynvml.NVML_ERROR_NO_PERMISSION)), None),
        (lists(_v3=error(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)), None),
        # If one list can't be read, the whole set of processes is unknown.
        ({**lists(_v3=[PROCESS]), "nvmlDeviceGetGraphicsRunningProcesses_v3":
          error(pynvml.NVML_ERROR_UNKNOWN)}, None),
    ],
)  # fmt: skip
def test_processes_unknown_to_nvml_are_not_reported_as_none(given: Any, expected: Any) -> None:
    assert seen(**given).get("processes") == expected


@pytest.mark.protects(
    "no-own-memory",
    "a GPU without memory of its own still reports its other values",
    instead="raise",
)
def test_a_gpu_without_own_memory_has_its_other_values() -> None:
    """NVML on GB10 supports neither form of the memory query."""
    found = seen(nvmlDeviceGetMemoryInfo=error(NOT_SUPPORTED), **lists(_v3=[PROCESS]))
    assert found["processes"] == [[7, 5]]
    assert not any(name.startswith("memory") for name in found)


def test_a_gpu_split_into_mig_devices_reports_no_processes_itself() -> None:
    """Its list contains the processes of its MIG devices, which aren't its own."""
    memory = SimpleNamespace(total=80, used=8)
    known = {"nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetProcessUtilization": []}
    for parted, expected in (((), {"processes", "sm"}), ((UUID,), set())):
        eyes = telemetry._Sampler(Nvml(**known, **lists(_v3=[PROCESS])), lambda _: None, parted)
        found, _ = eyes.measure({UUID: []}, more=False)
        assert {"processes", "sm"} & {*found[UUID]} == expected


@pytest.mark.parametrize("name", ["MemoryInfo", "ComputeRunningProcesses_v3"])
def test_a_lost_gpu_is_reported_as_failed(name: str) -> None:
    lost = {f"nvmlDeviceGet{name}": error(pynvml.NVML_ERROR_GPU_IS_LOST)}
    memory = {"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80, used=8)}
    eyes = telemetry._Sampler(Nvml(**{**memory, **lists(), **lost}), lambda _: None)
    found, failed = eyes.measure({UUID: []}, more=False)
    assert (found, [*failed]) == ({}, [UUID])


@pytest.mark.protects(
    "clock-set-back", "SM usage is still reported after the clock is set back", instead="pass"
)
def test_sm_usage_continues_after_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's samples use the clock, so those from before the change mean nothing now."""
    second, hour = 10**6, 3600 * 10**6
    clock, samples = [10 * hour], [SimpleNamespace(timeStamp=10 * hour, pid=7, smUtil=80)]

    class Driver(Nvml):
        def nvmlDeviceGetProcessUtilization(self, _: object, since: int) -> Any:  # noqa: N802
            found = [each for each in samples if each.timeStamp > since]
            if not found:
                raise error(pynvml.NVML_ERROR_NOT_FOUND)
            return found

    monkeypatch.setattr(time, "time_ns", lambda: clock[0] * 1000)
    eyes = telemetry._Sampler(Driver(), lambda _: None)
    assert eyes._sm(UUID, 1) == {"7": 0.8}
    clock[0] -= hour
    assert eyes._sm(UUID, 1) == {}
    clock[0] += 2 * second
    samples.append(SimpleNamespace(timeStamp=clock[0], pid=8, smUtil=50))
    assert eyes._sm(UUID, 1) == {"8": 0.5}
