"""A snapshot of all devices and containers, as plain data; ``observer.Observer.take`` makes it.

An unknown value is None, or "" for a text, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accelerator:
    """An accelerator, or a part of one (a MIG device), whose ``parent`` is the other's ``id``.

    ``label`` is its short name for people (3, 0:1), ``bus_id`` the PCI address as /sys spells it.
    ``utilization`` is 0 to 1; ``clock_mhz`` is the compute clock. ``energy_joules`` and ``xids``
    (number -> count; None if they aren't monitored) only grow.
    ``ecc_corrected`` and ``ecc_uncorrected`` are memory errors since the driver was loaded,
    ``clock_reasons`` are the reasons for the current clocks. ``recovery`` is the driver's
    recommended recovery action (none, gpu_reset, ...).
    ``readings`` are other values by name, in the driver's own units, if they were requested.
    """

    vendor: str
    id: str
    label: str
    minor: int | None = None
    bus_id: str = ""
    model: str = ""
    parent: str = ""
    mig_profile: str = ""
    gpu_instance: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    utilization: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None
    energy_joules: float | None = None
    memory_temperature_celsius: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    recovery: str = ""
    xids: Mapping[int, int] | None = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Container:
    """A running container that has devices, or whose processes use some.

    ``engine`` is docker, podman, kubernetes, ... ("" unknown), ``name`` its name in the engine;
    ``pod``, ``namespace``, ``container`` and ``pod_uid`` are Kubernetes' fields. ``devices`` are
    the ids of its allocated devices, which may be idle. ``id`` is "" for a container that only the
    kubelet knows. ``slurm_job`` is the number of its job; a job's processes outside of containers
    count as one container of the engine slurm.
    """

    id: str
    engine: str = ""
    name: str = ""
    pod: str = ""
    namespace: str = ""
    container: str = ""
    pod_uid: str = ""
    image: str = ""
    devices: tuple[str, ...] = ()
    slurm_job: str = ""


@dataclass(frozen=True)
class Usage:
    """The use of a device by the processes of one container, both given by their ids.

    ``container`` is "" for all processes outside of containers. ``sm_utilization`` is 0 to 1, the
    mean since the previous snapshot; None if the driver doesn't report it (MIG). ``processes`` is
    their number. ``memory_source`` is the source of ``memory_bytes``: driver by processes, or by
    the container's cgroup dmem (the kernel) or nvml; those know ``memory_limit_bytes``, None for
    no limit.
    """

    container: str
    device: str
    memory_bytes: int | None = None
    sm_utilization: float | None = None
    processes: int | None = None
    memory_limit_bytes: int | None = None
    memory_source: str = "driver"


@dataclass(frozen=True)
class DeviceProcess:
    """A process that uses a device, and the ``container`` that it is in, both by their ids.

    ``user`` is its user's id, None if unknown, and ``command`` its own name. ``cpu_seconds``,
    ``cpu_utilization`` and ``host_memory_bytes`` are its use of the host (``host_use.ProcessUse``).
    """

    pid: int
    device: str
    container: str = ""
    user: int | None = None
    command: str = ""
    memory_bytes: int | None = None
    sm_utilization: float | None = None
    cpu_seconds: float | None = None
    cpu_utilization: float | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """The result of one observation; ``processes`` only if they were requested.

    ``drivers`` are versions by vendor. ``errors`` counts failures by kind since the observer
    started, ``durations`` are seconds by step. ``problems`` are sentences about missing values,
    ``notes`` about features that this host doesn't have.
    ``mps`` says whether the MPS control daemon is running, None if it shares no device.
    """

    devices: tuple[Accelerator, ...] = ()
    containers: tuple[Container, ...] = ()
    usages: tuple[Usage, ...] = ()
    drivers: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    durations: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    mps: bool | None = None


@dataclass(frozen=True)
class SeriesOptions:
    """Series to serve in addition to ours: cAdvisor's three, DCGM's."""

    cadvisor: bool = False
    dcgm: bool = False
