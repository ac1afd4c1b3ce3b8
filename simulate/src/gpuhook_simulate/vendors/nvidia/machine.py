"""The simulated machine: its GPUs and MIG devices with all their identifying numbers."""

import itertools
import uuid
from dataclasses import dataclass

from gpuhook.base.errors import SimulateError, shown
from gpuhook_simulate.vendors.nvidia.models import MigProfile, Model, find_model
from gpuhook_simulate.vendors.nvidia.options import (
    DEFAULT_DRIVER,
    Failure,
    Options,
    cuda_number,
)

_NAMESPACE = uuid.UUID("5f0d3b1e-0d3e-5c57-9b8e-0e9d2f6a7c11")

# The PCI buses of a DGX H100's eight GPUs; further GPUs repeat them in the next domain.
_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)

# The minor numbers of /dev/nvidia-caps: 1 and 2 are for MIG as a whole. Then follow, for each GPU,
# 15 GPU instances, each followed by its 8 compute instances.
CAP_CONFIG, CAP_MONITOR, _FIRST_CAP = 1, 2, 3
GPU_INSTANCES, COMPUTE_INSTANCES = 15, 8

_COMPUTE_SLICES = 7

# Memory slices -> the first id of the GPU instances of that size.
_FIRST_INSTANCE = {8: 0, 4: 1, 2: 3, 1: 7}


@dataclass(frozen=True, slots=True)
class SimulatedMig:
    """One MIG device; ``gi`` and ``ci`` are instance ids, the caps minors of nvidia-capN.

    ``start`` is its first memory slice.
    """

    profile: MigProfile
    uuid: str
    gi: int
    ci: int
    gi_cap: int
    ci_cap: int
    start: int


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """One GPU; ``index`` is its slot, which doesn't change when another GPU is unplugged."""

    index: int
    minor: int
    model: Model
    uuid: str
    serial: str
    domain: int
    bus: int
    numa_node: int
    lost: bool
    mig_enabled: bool
    migs: tuple[SimulatedMig, ...]

    def lines(self) -> list[str]:
        """Return its readable state: a line for it, and one for each MIG device."""
        mode = " (MIG)" if self.mig_enabled else ""
        words = " (lost)" if self.lost else ""
        line = f"GPU {self.index}: {self.model.name} {self.uuid}{mode}{words}"
        return [line, *(f"  MIG {mig.profile.name} {mig.uuid}" for mig in self.migs)]

    @property
    def proc_bus_id(self) -> str:
        """The PCI address in the form of /proc/driver/nvidia/gpus."""
        return f"{self.domain:04x}:{self.bus:02x}:00.0"

    @property
    def pci_bus_id(self) -> str:
        """The PCI address in NVML's form."""
        return f"{self.domain:08X}:{self.bus:02X}:00.0"

    def to_json(self) -> dict[str, object]:
        """Return the ids and states of the GPU and its MIG devices."""
        return {
            "minor": self.minor,
            "uuid": self.uuid,
            "pci_bus_id": self.pci_bus_id,
            "name": self.model.name,
            "lost": self.lost,
            "mig_enabled": self.mig_enabled,
            "mig": [
                {"uuid": mig.uuid, "profile": mig.profile.name, "gi": mig.gi, "ci": mig.ci}
                for mig in self.migs
            ],
        }


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """All facts from which the tree and the libraries are built.

    ``module_version`` is the version of the loaded kernel module, which differs from the
    libraries' after an upgrade without reboot; ``cuda`` is 1000 * major + 10 * minor.
    """

    driver_version: str
    module_version: str
    cuda: int
    gpus: tuple[SimulatedGpu, ...]
    loaded: bool
    init_seconds: float
    nvlink: str

    @property
    def mig_capable(self) -> bool:
        """True if the driver has created capability devices."""
        return any(gpu.model.mig for gpu in self.gpus)

    def device(self, name: str) -> tuple[SimulatedGpu, SimulatedMig | None]:
        """Return the GPU of a number or UUID, and the MIG device if it names one."""
        for gpu in self.gpus:
            if name in {str(gpu.index), gpu.uuid}:
                return gpu, None
            for mig in gpu.migs:
                if name == mig.uuid:
                    return gpu, mig
        raise SimulateError(
            f"The simulated machine has no device {shown(name)}",
            "Give a GPU's number or UUID, or a MIG device's UUID, as gpuhook simulate printed it",
        )


def make_machine(options: Options, driver_version: str = "") -> SimulatedMachine:
    """Return the machine that the options describe.

    ``driver_version`` is that of the real driver files in the root, if there are any.
    """
    version = driver_version or options.driver_version or DEFAULT_DRIVER
    mismatch = options.failure is Failure.VERSION_MISMATCH
    return SimulatedMachine(
        driver_version=version,
        module_version=_older(version) if mismatch else version,
        cuda=cuda_number(options, version),
        gpus=tuple(
            _make_gpu(options, index)
            for index in range(options.gpus)
            if index not in options.unplugged
        ),
        loaded=options.failure is not Failure.NOT_LOADED,
        init_seconds=options.init_seconds,
        nvlink=options.nvlink,
    )


def _older(version: str) -> str:
    head, _, last = version.rpartition(".")
    number = int(last)
    return f"{head}.{number - 1:0{len(last)}}" if number else f"{head}.{1:0{len(last)}}"


def _make_gpu(options: Options, index: int) -> SimulatedGpu:
    model = find_model(options.models[index if len(options.models) > 1 else 0])
    if options.nvlink != "none" and not any(model.nvlinks):
        raise SimulateError(
            f"{model.name} has no NVLink", "Choose a model with NVLink, such as H100 or A100"
        )
    minor = options.minors[index] if options.minors else index
    identity = _identity(options, f"gpu/{index}")
    return SimulatedGpu(
        index=index,
        minor=minor,
        model=model,
        uuid=f"GPU-{identity}",
        serial=str(1_320_000_000_000 + identity.int % 10**10),
        domain=index // len(_BUSES),
        bus=_BUSES[index % len(_BUSES)],
        numa_node=index * 2 // options.gpus,  # two processors with half of the GPUs each
        lost=index in options.lost,
        mig_enabled=index in options.mig,
        migs=_make_migs(options, index, minor, model),
    )


def _identity(options: Options, path: str) -> uuid.UUID:
    return uuid.uuid5(_NAMESPACE, f"{options.seed}/{path}")


def _make_migs(options: Options, index: int, minor: int, model: Model) -> tuple[SimulatedMig, ...]:
    if index in options.mig and not model.mig:
        raise SimulateError(f"{model.name} has no MIG", "Choose a model with MIG, such as A100")
    profiles = [model.profile(name) for name in options.mig.get(index, ())]
    return tuple(
        SimulatedMig(
            profile=profile,
            uuid=f"MIG-{_identity(options, f'gpu/{index}/mig/{profile.name}/{gi}')}",
            gi=gi,
            ci=0,
            gi_cap=cap_minor(minor, gi),
            ci_cap=cap_minor(minor, gi, 0),
            start=start,
        )
        for profile, (gi, start) in zip(profiles, place(profiles, index), strict=True)
    )


def place(profiles: list[MigProfile], index: int) -> list[tuple[int, int]]:
    """Return a GPU instance id and the first memory slice for each profile.

    SimulateError, with GPU ``index`` in its text, if they don't fit together. Large ones are placed
    first, as an administrator must do it.
    """
    if sum(profile.slices for profile in profiles) > _COMPUTE_SLICES:
        raise _too_many(index)
    taken: set[int] = set()
    ids = {size: itertools.count(first) for size, first in _FIRST_INSTANCE.items()}
    placed: dict[int, tuple[int, int]] = {}
    for at in sorted(range(len(profiles)), key=lambda at: _by_size(profiles[at])):
        profile = profiles[at]
        size = profile.memory_slices
        fitting = [s for s in profile.starts if taken.isdisjoint(range(s, s + size))]
        if not fitting or profiles[: at + 1].count(profile) > profile.instances:
            raise _too_many(index)
        taken.update(range(fitting[0], fitting[0] + size))
        placed[at] = (next(ids[size]), fitting[0])
    return [placed[at] for at in range(len(profiles))]


def _by_size(profile: MigProfile) -> tuple[int, int]:
    return -profile.memory_slices, -profile.slices


def _too_many(index: int) -> SimulateError:
    return SimulateError(
        f"The requested MIG devices don't fit on GPU {index}",
        "Request fewer: a GPU has 7 compute slices (the g) and 8 memory slices",
    )


def cap_minor(gpu_minor: int, gi: int, ci: int | None = None) -> int:
    """Return the minor number of an instance's node in /dev/nvidia-caps."""
    stride = COMPUTE_INSTANCES + 1
    first = _FIRST_CAP + (gpu_minor * GPU_INSTANCES + gi) * stride
    return first if ci is None else first + 1 + ci
