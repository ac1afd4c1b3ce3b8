"""Telemetry of GPUs from NVML, in a long-lived child that answers each line with several lines.

The child keeps NVML open: before the driver can be unloaded, or a GPU's MIG mode changed, it has
to exit. Like the child of ``nvml`` it runs with the driver root as its root, without privileges,
and NVML may hang in it. It reads lines of JSON, {"ask": 7, "more": false}, and sends

    {"ready": 1}            NVML is open
    {"asking": UUID}        the next answer depends on this GPU or MIG device, "" for no single one
    {"xid": 79, "gpu": UUID, ...}  an error since the last question, in the format of ``events``
    {"watched": 7, "unwatched": {UUID: why}}  GPUs whose errors are received, and others
    {"answer": 7, "devices": {UUID: {...}}, "failed": {UUID: why}}
    {"error": text}         NVML can't be used; the child exits

A device's values are those of the exporter's ``Device``, without those that NVML doesn't report.
"processes" are [pid, bytes or null]; "sm" is the SM usage (0 to 1) of computing processes, by pid.
"""

import time
from contextlib import contextmanager

from gpuhook.base.container import kernel
from gpuhook.metrics.vendors.nvidia import gpm
from gpuhook.metrics.vendors.nvidia.asking import ALL_LINKS, ask, fields
from gpuhook.monitor.vendors.nvidia import events
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.monitor.host.child import Channel, Work
    from gpuhook.vendors.nvidia.model import NvidiaInventory

    Values = dict[str, Any]

_SECOND = 1_000_000  # the driver's times are in microseconds
_TICK = _SECOND  # the longest time between two samples of a process's utilization
_FIRST = 2 * _SECOND  # the period that the first question covers
_MILLI = 1000
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t
_SENT, _RECEIVED = 0, 1  # nvmlPcieUtilCounter_t
_KIB, _MIB = 1 << 10, 1 << 20
_PERCENT = 100
_BETWEEN = 0.1  # seconds between the first two samples: shorter periods give random shares
# NVML_FI_DEV_...; memory errors are those since the driver was loaded.
_FIELDS = {
    "memory_temperature_celsius": 82,
    "ecc_corrected": 3,
    "ecc_uncorrected": 4,
    "recovery": 230,
}
_MORE_FIELDS: "dict[str, int | tuple[int, int]]" = {
    "ECC_SBE_AGG_TOTAL": 5,
    "ECC_DBE_AGG_TOTAL": 6,
    "NVLINK_SENT": (138, ALL_LINKS),
    "NVLINK_RECEIVED": (139, ALL_LINKS),
}
_SHARES = {
    "PROF_GR_ENGINE_ACTIVE": gpm.GRAPHICS,
    "PROF_PIPE_TENSOR_ACTIVE": gpm.TENSOR,
    "PROF_DRAM_ACTIVE": gpm.DRAM,
}
_RATES = {"PROF_PCIE_TX_BYTES": gpm.PCIE_SENT, "PROF_PCIE_RX_BYTES": gpm.PCIE_RECEIVED}
# Bits of nvmlClocksEventReasons, in words.
_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost",
    "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
    "display_clock_setting",
)  # fmt: skip
# nvmlDeviceGpuRecoveryAction_t, in words.
_RECOVERY = (
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain",
    "bus_reset", "system_reboot",
)  # fmt: skip
_KINDS = ("Compute", "Graphics", "MPSCompute")  # NVML's lists of processes


def can_ask(inventory: "NvidiaInventory") -> bool:
    """Tell whether there are GPUs to query: only NVIDIA's driver for Linux is supported here."""
    return bool(inventory.gpus) and not inventory.platform


def facts(inventory: "NvidiaInventory") -> "dict[str, Values]":
    """Return NVIDIA-specific facts of each device, by fields of the exporter's ``Device``."""
    found: dict[str, Values] = {}
    for gpu in inventory.gpus:
        found[gpu.id] = {"minor": gpu.minor if gpu.minor >= 0 else None}
        for mig in gpu.mig:
            profile = mig.name.rpartition("MIG ")[2]
            found[mig.uuid] = {"minor": gpu.minor, "mig_profile": profile, "gpu_instance": mig.gi}
    return found


def worded(values: "Mapping[str, Any]") -> "Values":
    """Return the values of a device with the driver's numeric codes replaced by words."""
    found = dict(values)
    if "clock_reasons" in found:
        bits = int(found["clock_reasons"])
        found["clock_reasons"] = tuple(
            word for place, word in enumerate(_REASONS) if bits >> place & 1
        )
    if "recovery" in found:
        number = int(found["recovery"])
        known = 0 <= number < len(_RECOVERY)
        found["recovery"] = _RECOVERY[number] if known else str(number)
    return found


def begin(config: "Config", inventory: "NvidiaInventory", but: "Collection[str]") -> "Work":
    """Return the function of an answering child; DriverError if there is no NVML.

    ``but`` are UUIDs to skip.
    """
    uid, gid = nvml.ids(config.user)
    path = library(config)
    gpus = {
        gpu.uuid: [mig.uuid for mig in gpu.mig if mig.uuid not in but]
        for gpu in inventory.gpus
        if gpu.uuid and gpu.uuid not in but
    }
    parted = {gpu.uuid for gpu in inventory.gpus if gpu.mig}  # also if a MIG device is skipped
    return lambda talk: _answer_all(
        lambda: nvml.start(inventory.root, path, uid, gid), gpus, parted, talk
    )


# In the child -------------------------------------------------------------------------------


def _answer_all(
    start: "Callable[[], Any]", gpus: dict[str, list[str]], parted: set[str], talk: "Channel"
) -> None:
    """Answer until the parent closes the connection."""
    kernel.set_name("gpuhook-nvml")
    try:
        pynvml = start()
    except OSError as error:
        talk.say({"error": f"NVML can't be loaded: {error}"})
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        talk.say({"error": f"NVML failed: {error}"})
        return
    talk.say({"ready": 1})
    ears = events.EventSet(pynvml, talk.say)
    ears.register([*gpus])
    eyes = _Sampler(pynvml, talk.say, parted)
    for question in talk.asked():
        devices, failed = eyes.measure(gpus, more=question["more"])
        talk.say({"asking": ""})
        ears.poll()
        talk.say({"answer": question["ask"], "devices": devices, "failed": failed})


class _Sampler:
    """A sampler of GPUs, which remembers the time of the last query of SM usage.

    ``parted`` are the GPUs that have MIG devices.
    """

    def __init__(
        self, it: "Any", say: "Callable[[Values], None]", parted: "Collection[str]" = ()
    ) -> None:
        self._nvml = it
        self._parted = parted
        self._say = say
        self._handles: dict[str, Any] = {}
        self._since: dict[str, int] = {}
        self._lacking = (it.NVML_ERROR_NOT_SUPPORTED, it.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._samples = gpm.GpmSamples(it)
        self._sampled = float("-inf")  # when the last first sample of a device was taken

    def measure(
        self, gpus: dict[str, list[str]], *, more: bool
    ) -> "tuple[dict[str, Values], dict[str, str]]":
        """Return the values of each device, and the errors of others."""
        self._take_first_samples(gpus, more=more)
        found: dict[str, Values] = {}
        failed: dict[str, str] = {}
        for gpu, parts in gpus.items():
            for uuid in (gpu, *parts):
                with self._asking(uuid, failed):
                    found[uuid] = self._device(uuid, gpu, parted=gpu in self._parted, more=more)
        return found, failed

    @contextmanager
    def _asking(self, uuid: str, failed: dict[str, str]) -> "Iterator[None]":
        """Report that a device is queried, in which the driver may hang; record its error."""
        self._say({"asking": uuid})
        try:
            yield
        except self._nvml.NVMLError as error:
            self._handles.pop(uuid, None)
            self._samples.forget(uuid)
            failed[uuid] = str(error)

    def _take_first_samples(self, gpus: dict[str, list[str]], *, more: bool) -> None:
        """Take samples of devices without one, so that the first answer has their shares, too."""
        for gpu, parts in gpus.items():
            for uuid in (gpu, *parts):
                if (more or uuid != gpu) and not self._samples.has(uuid):
                    with self._asking(uuid, {}):
                        self._sample(uuid, gpu)
                        self._sampled = time.monotonic()
        time.sleep(max(0.0, self._sampled + _BETWEEN - time.monotonic()))

    def _handle(self, uuid: str) -> "Any":
        if uuid not in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _sample(self, uuid: str, gpu: str) -> dict[int, float]:
        """Return a device's metrics since the last sample, by the numbers of ``gpm``."""
        instance = None
        if uuid != gpu:
            instance = self._ask("GetGpuInstanceId", self._handle(uuid))
            if instance is None:
                return {}
        return self._samples.between(uuid, gpu, self._handle(gpu), instance)

    def _device(self, uuid: str, gpu: str, *, parted: bool, more: bool) -> "Values":
        """Return the values of a device; processes of a divided GPU are those of its instances."""
        handle = self._handle(uuid)
        found = self._memory(handle)
        done = self._sample(uuid, gpu) if more or uuid != gpu else {}
        if uuid == gpu:
            found.update(self._sensors(handle))
            found.update(fields(self._nvml, handle, _FIELDS))
        elif gpm.GRAPHICS in done:  # the only source of it for a MIG device
            found["utilization"] = min(done[gpm.GRAPHICS] / _PERCENT, 1.0)
        if more:
            found["readings"] = _shares(done)
            if uuid == gpu:
                found["readings"].update(self._readings(handle, found))
            if uuid == gpu and not self._samples.has(uuid):
                found["readings"].update(self._throughput(handle))
        if uuid != gpu or not parted:
            found["processes"] = self._processes(handle)
        if uuid == gpu and not parted:
            found["sm"] = self._sm(uuid, handle)
        return {name: value for name, value in found.items() if value is not None}

    def _ask(self, name: str, handle: "Any", *words: "Any") -> "Any":
        return ask(self._nvml, f"nvmlDevice{name}", handle, *words)

    def _memory(self, handle: "Any") -> "Values":
        """Return the memory, with the driver's reserved part separate if it is reported.

        Nothing for a GPU without its own memory, such as GB10, which uses the host's.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except (self._nvml.NVMLError, TypeError):
            try:
                info = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                if error.value not in self._lacking:
                    raise
                return {}  # protects: no-own-memory
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
            "clock_reasons": self._ask("GetCurrentClocksEventReasons", handle),
        }

    def _readings(self, handle: "Any", known: "Values") -> dict[str, float]:
        """Return further values, by the names and in the units of DCGM's fields."""
        rates = self._ask("GetUtilizationRates", handle)
        encoder = self._ask("GetEncoderUtilization", handle)
        decoder = self._ask("GetDecoderUtilization", handle)
        rows = self._ask("GetRemappedRows", handle)
        found: dict[str, Any] = {
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
        found["CLOCKS_EVENT_REASONS"] = known["clock_reasons"]
        found["GET_GPU_RECOVERY_ACTION"] = known.get("recovery")
        found.update(self._traffic(handle))
        return {name: value for name, value in found.items() if value is not None}

    def _traffic(self, handle: "Any") -> "dict[str, float | None]":
        """Return link traffic, persistent error counters, and the license status."""
        found: dict[str, Any] = fields(self._nvml, handle, _MORE_FIELDS)
        both = [found.pop(f"NVLINK_{way}", None) for way in ("SENT", "RECEIVED")]
        if None not in both:
            found["NVLINK_BANDWIDTH_TOTAL"] = sum(both)
        licences = self._ask("GetGridLicensableFeatures", handle)
        if licences is not None:
            features = licences.gridLicensableFeatures[: licences.licensableFeaturesCount]
            found["VGPU_LICENSE_STATUS"] = int(any(each.featureState for each in features))
        return found

    def _throughput(self, handle: "Any") -> "dict[str, float]":
        """Return the bytes per second on PCI Express; NVML measures each for 20 ms."""
        ways = {"PROF_PCIE_TX_BYTES": _SENT, "PROF_PCIE_RX_BYTES": _RECEIVED}
        said = {name: self._ask("GetPcieThroughput", handle, way) for name, way in ways.items()}
        return {name: value * _KIB for name, value in said.items() if value is not None}

    def _processes(self, handle: "Any") -> list[list[int | None]] | None:
        """Return [pid, bytes] of the processes, None if NVML doesn't report them.

        One process may have contexts of several kinds.
        """
        try:
            lists = [self._running(kind, handle) for kind in _KINDS]
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None  # protects: unknown-processes
        said = [each for each in lists if each is not None]
        if not said:
            return None
        found: dict[int, int | None] = {}
        for process in (process for each in said for process in each):
            used, before = process.usedGpuMemory, found.get(process.pid)
            found[process.pid] = max(
                (each for each in (used, before) if each is not None), default=None
            )
        return [[pid, used] for pid, used in found.items()]

    def _running(self, kind: str, handle: "Any") -> "list[Any] | None":
        """Return the processes with contexts of a kind, None if NVML has no such lists.

        Drivers before 510 have another version of them. NVMLError if NVML has the lists but fails:
        then the other kinds count as unknown, too.
        """
        for version in ("_v3", "_v2"):
            try:
                function = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses{version}")
                found: list[Any] = function(handle)
            except AttributeError:
                continue  # a pynvml without it
            except self._nvml.NVMLError as error:
                if error.value not in self._lacking:
                    raise
            else:
                return found
        return None

    def _sm(self, uuid: str, handle: "Any") -> dict[str, float] | None:
        """Return each process's SM usage since the last question, by pid."""
        now = time.time_ns() // 1000
        latest = now + _TICK  # later samples are from before the clock was set back
        since = self._since.get(uuid, latest + 1)
        if since > latest:
            since = now - _FIRST  # protects: clock-set-back
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_FOUND:
                return None
            samples = []  # no process used any
        values = [
            (int(each.timeStamp), int(each.pid), int(each.smUtil))
            for each in samples
            if since < each.timeStamp <= latest and each.pid and each.smUtil <= 100
        ]
        used, self._since[uuid] = mean(values, since, now)
        return {str(pid): share for pid, share in used.items()}


def _shares(done: dict[int, float]) -> dict[str, float]:
    """Return a device's metrics by the names and in the units of DCGM's fields."""
    found = {}
    for name, metric in _SHARES.items():
        if metric in done:
            found[name] = done[metric] / _PERCENT
    for name, metric in _RATES.items():
        if metric in done:
            found[name] = done[metric] * _MIB
    return found


def mean(
    samples: "Iterable[tuple[int, int, int]]", since: int, now: int
) -> tuple[dict[int, float], int]:
    """Return the mean usage of each process from ``since``, and the end; times in microseconds.

    ``samples`` are (time, pid, percent); drivers return one or more for each active process. Each
    covers the time since the previous sample of that process. If the last of all isn't older than a
    tick, its time is the end: later usage isn't known yet.
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
