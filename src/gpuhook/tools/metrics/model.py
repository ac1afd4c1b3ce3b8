"""One look at all devices and containers, as plain data; ``observer.Observer.take`` makes it.

Where nobody says a value it is None, "" for a text: never 0 for what isn't known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """An accelerator, or a part of one (a MIG device), whose ``parent`` is the other's ``id``.

    ``label`` is what a person calls it here (3, 0:1), ``bus_id`` the PCI address as /sys spells
    it. ``utilization`` is 0 to 1; ``clock_mhz`` is that of what computes; ``energy_joules`` and
    ``xids`` (number -> how many; None where nobody hears of any) only grow.
    ``ecc_corrected`` and ``ecc_uncorrected`` are errors of memory since the driver was loaded,
    ``clock_reasons`` are why the clocks are what they are, ``recovery`` is what the driver would
    have done to the device (none, gpu_reset, ...).
    ``readings`` are others by name, in the driver's own units, where they were asked for.
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
    """A running container that was given devices, or whose processes use some.

    ``engine`` is docker, podman, kubernetes, ... ("" unknown), ``name`` what its engine calls
    it; ``pod``, ``namespace``, ``container`` and ``pod_uid`` are Kubernetes' words. ``devices``
    are the ids of those that it was given, which may be idle. ``id`` is "" for one that is known
    to the kubelet alone. ``slurm_job`` is the number of the job that it runs in; a job's processes
    that are in no container are one of engine slurm.
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
    """What the processes of one container do on one device, both by their ids.

    ``container`` is "" for all processes that are in no container. ``sm_utilization`` is 0 to 1,
    the mean since the look before; None where the driver doesn't say it (MIG). ``processes`` is how
    many it has there. ``memory_source`` is
    who says ``memory_bytes``: driver by its processes, or by the container's cgroup dmem (the
    kernel) or nvml; those know ``memory_limit_bytes``, None for none.
    """

    container: str
    device: str
    memory_bytes: int | None = None
    sm_utilization: float | None = None
    processes: int | None = None
    memory_limit_bytes: int | None = None
    memory_source: str = "driver"


@dataclass(frozen=True)
class Process:
    """A process that uses a device, and the ``container`` that it is in, both by their ids.

    ``user`` is its user's id, None where that isn't known, and ``command`` what it calls itself.
    """

    pid: int
    device: str
    container: str = ""
    user: int | None = None
    command: str = ""
    memory_bytes: int | None = None
    sm_utilization: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """What one look found; ``processes`` where they were asked for.

    ``drivers`` are versions by vendor. ``errors`` counts by kind what failed since the observer
    began, ``durations`` are seconds by step; ``problems`` are sentences on what is missing now,
    ``notes`` on what this machine hasn't got.
    ``mps`` says whether the control daemon of MPS is there, None where no device is shared by it.
    """

    devices: tuple[Device, ...] = ()
    containers: tuple[Container, ...] = ()
    usages: tuple[Usage, ...] = ()
    drivers: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    durations: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    mps: bool | None = None


@dataclass(frozen=True)
class SeriesOptions:
    """Series to serve in addition to ours: cAdvisor's three, DCGM's."""

    cadvisor: bool = False
    dcgm: bool = False
