"""Ask NVML what the GPUs do now, in a child that lives on and answers each line with some.

The child holds NVML open: before the driver can be unloaded, or a GPU's MIG mode changed, it has
to end. Like the one of ``nvml`` it is below the driver root, without privileges, and NVML may
hang in it. It reads lines of JSON, {"ask": 7, "more": false}, and says

    {"ready": 1}            NVML is open
    {"asking": UUID}        the next answer depends on this GPU or MIG device
    {"xid": 79, "gpu": UUID, ...}  an error since the last question, as ``events`` has it
    {"answer": 7, "devices": {UUID: {...}}, "failed": {UUID: why}}
    {"error": text}         NVML can't be used; the child ends

A device's values are those of ``Device`` of the exporter, without those that NVML doesn't
say; "processes" are [pid, bytes or null], "sm" is what those that computed used (0 to 1), by pid.
"""

import time

from gpuhook.ground.container import kernel
from gpuhook.tools.vendors.nvidia import events
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any

    from gpuhook.ground.config.model import Config
    from gpuhook.tools.host.child import Talk, Work
    from gpuhook.vendors.nvidia.model import Inventory

    Values = dict[str, Any]

_SECOND = 1_000_000  # the driver's times are in microseconds
_TICK = _SECOND  # the longest time between two samples of a process' utilisation
_FIRST = 2 * _SECOND  # how far the first question looks back
_MILLI = 1000
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t
_KINDS = ("Compute", "Graphics", "MPSCompute")  # the lists of processes that NVML has


def can_ask(inventory: "Inventory") -> bool:
    """Tell whether there is something to ask: only NVIDIA's driver for Linux is known here."""
    return bool(inventory.gpus) and not inventory.platform


def facts(inventory: "Inventory") -> "dict[str, Values]":
    """Return what the house doesn't know of each device, by fields of the exporter's ``Device``."""
    found: dict[str, Values] = {}
    for gpu in inventory.gpus:
        found[gpu.id] = {"minor": gpu.minor if gpu.minor >= 0 else None}
        for mig in gpu.mig:
            profile = mig.name.rpartition("MIG ")[2]
            found[mig.uuid] = {"minor": gpu.minor, "mig_profile": profile, "gpu_instance": mig.gi}
    return found


def begin(config: "Config", inventory: "Inventory", but: "Collection[str]") -> "Work":
    """Return what a child does that answers; DriverError if there is no NVML.

    ``but`` are UUIDs to leave alone.
    """
    uid, gid = nvml.ids(config.user)
    path = library(config)
    gpus = {
        gpu.uuid: [mig.uuid for mig in gpu.mig if mig.uuid not in but]
        for gpu in inventory.gpus
        if gpu.uuid and gpu.uuid not in but
    }
    return lambda talk: _answer_all(lambda: nvml.start(inventory.root, path, uid, gid), gpus, talk)


# In the child -------------------------------------------------------------------------------


def _answer_all(start: "Callable[[], Any]", gpus: dict[str, list[str]], talk: "Talk") -> None:
    """Answer until nobody asks any more."""
    kernel.set_name("gpuhook-nvml")
    try:
        pynvml = start()
        pynvml.nvmlInit()
    except OSError as error:
        talk.say({"error": f"NVML can't be loaded: {error}"})
        return
    except Exception as error:
        talk.say({"error": f"NVML failed: {error}"})
        raise
    talk.say({"ready": 1})
    ears = events.Ears(pynvml, talk.say)
    ears.register([*gpus])
    eyes = _Eyes(pynvml, talk.say)
    for question in talk.asked():
        devices, failed = eyes.measure(gpus, more=question["more"])
        ears.poll()
        talk.say({"answer": question["ask"], "devices": devices, "failed": failed})


class _Eyes:
    """What is asked of GPUs, and until when the use of their SMs was asked."""

    def __init__(self, it: "Any", say: "Callable[[Values], None]") -> None:
        self._nvml = it
        self._say = say
        self._handles: dict[str, Any] = {}
        self._since: dict[str, int] = {}

    def measure(
        self, gpus: dict[str, list[str]], *, more: bool
    ) -> "tuple[dict[str, Values], dict[str, str]]":
        """Return what each device says, and why others say nothing."""
        found, failed = {}, {}
        for gpu, parts in gpus.items():
            for uuid in (gpu, *parts):
                self._say({"asking": uuid})
                try:
                    found[uuid] = self._device(uuid, gpu, parted=bool(parts), more=more)
                except self._nvml.NVMLError as error:
                    self._handles.pop(uuid, None)
                    failed[uuid] = str(error)
        return found, failed

    def _device(self, uuid: str, gpu: str, *, parted: bool, more: bool) -> "Values":
        """Return the values of a device; a GPU that has parts leaves its processes to them."""
        if uuid not in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        handle = self._handles[uuid]
        found = self._memory(handle)
        if uuid == gpu:
            found.update(self._sensors(handle))
            if more:
                found["readings"] = self._readings(handle)
        if uuid != gpu or not parted:
            found["processes"] = self._processes(handle)
        if uuid == gpu and not parted:
            found["sm"] = self._sm(uuid, handle)
        return {name: value for name, value in found.items() if value is not None}

    def _ask(self, name: str, handle: "Any", *words: "Any") -> "Any":
        """Return what NVML answers, None where it hasn't got that here."""
        it = self._nvml
        try:
            return getattr(it, f"nvmlDevice{name}")(handle, *words)
        except AttributeError:
            return None  # a pynvml that is older than the call
        except it.NVMLError as error:
            if error.value in (it.NVML_ERROR_GPU_IS_LOST, it.NVML_ERROR_INVALID_ARGUMENT):
                raise
            return None

    def _memory(self, handle: "Any") -> "Values":
        """Return the memory, what the driver keeps for itself apart where it says it."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except (self._nvml.NVMLError, TypeError):
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "memory_total_bytes": info.total,
            "memory_used_bytes": info.used,
            "memory_reserved_bytes": getattr(info, "reserved", None),
        }

    def _sensors(self, handle: "Any") -> "Values":
        rates = self._ask("GetUtilizationRates", handle)
        power = self._ask("GetPowerUsage", handle)
        limit = self._ask("GetEnforcedPowerLimit", handle)
        energy = self._ask("GetTotalEnergyConsumption", handle)
        return {
            "utilization": None if rates is None else rates.gpu / 100,
            "temperature_celsius": self._ask("GetTemperature", handle, 0),
            "power_watts": None if power is None else power / _MILLI,
            "power_limit_watts": None if limit is None else limit / _MILLI,
            "clock_mhz": self._ask("GetClockInfo", handle, _SM_CLOCK),
            "energy_joules": None if energy is None else energy / _MILLI,
        }

    def _readings(self, handle: "Any") -> dict[str, float]:
        """Return further values, by the names and in the units of DCGM's fields."""
        rates = self._ask("GetUtilizationRates", handle)
        encoder = self._ask("GetEncoderUtilization", handle)
        decoder = self._ask("GetDecoderUtilization", handle)
        rows = self._ask("GetRemappedRows", handle)
        found = {
            "SM_CLOCK": self._ask("GetClockInfo", handle, _SM_CLOCK),
            "MEM_CLOCK": self._ask("GetClockInfo", handle, _MEMORY_CLOCK),
            "MEM_COPY_UTIL": None if rates is None else rates.memory,
            "ENC_UTIL": encoder and encoder[0],
            "DEC_UTIL": decoder and decoder[0],
            "PCIE_REPLAY_COUNTER": self._ask("GetPcieReplayCounter", handle),
            "CORRECTABLE_REMAPPED_ROWS": rows and rows[0],
            "UNCORRECTABLE_REMAPPED_ROWS": rows and rows[1],
            "ROW_REMAP_FAILURE": rows and rows[3],
        }
        return {name: value for name, value in found.items() if value is not None}

    def _processes(self, handle: "Any") -> list[list[int | None]]:
        """Return [pid, bytes] of the processes; one may have contexts of several kinds."""
        found: dict[int, int | None] = {}
        for kind in _KINDS:
            for process in self._ask(f"Get{kind}RunningProcesses", handle) or ():
                used, before = process.usedGpuMemory, found.get(process.pid)
                found[process.pid] = max(
                    (each for each in (used, before) if each is not None), default=None
                )
        return [[pid, used] for pid, used in found.items()]

    def _sm(self, uuid: str, handle: "Any") -> dict[str, float] | None:
        """Return how much of the SMs each process used since the last question, by pid."""
        now = time.time_ns() // 1000
        since = self._since.get(uuid, now - _FIRST)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_FOUND:
                return None
            samples = []  # nobody used any
        values = [
            (int(each.timeStamp), int(each.pid), int(each.smUtil))
            for each in samples
            if each.timeStamp > since and each.pid and each.smUtil <= 100
        ]
        used, self._since[uuid] = mean(values, since, now)
        return {str(pid): share for pid, share in used.items()}


def mean(
    samples: "Iterable[tuple[int, int, int]]", since: int, now: int
) -> tuple[dict[int, float], int]:
    """Return the mean use of each process from ``since``, and until when; times in microseconds.

    ``samples`` are (time, pid, percent); drivers answer with one or more of each process that
    did something. Each stands for the time since the one before it of that process. Where the
    last of all isn't older than a tick, it is the end: what came after it isn't known yet.
    """
    ordered = sorted(samples)
    newest = ordered[-1][0] if ordered else since
    end = newest if now - newest < _TICK and newest > since else max(now, newest)
    before: dict[int, int] = {}
    used: dict[int, int] = {}
    for moment, pid, percent in ordered:
        used[pid] = used.get(pid, 0) + percent * (moment - before.get(pid, since))
        before[pid] = moment
    whole = max(end - since, 1) * 100
    return {pid: min(each / whole, 1.0) for pid, each in used.items()}, end
