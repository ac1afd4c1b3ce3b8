"""GPUs' memory, and their possible and actual instances (MIG), from NVML.

A child queries them once, for the descriptions of GPUs in a cluster. Also the names of generations.
"""

import ctypes

from gpuhook.base.oci.jsontext import Record
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

MIB = 1 << 20
# An instance's resources other than memory -> the field of nvmlGpuInstanceProfileInfo_t.
_FIELDS = {
    "multiprocessors": "multiprocessorCount",
    "copyEngines": "copyEngineCount",
    "decoders": "decoderCount",
    "encoders": "encoderCount",
    "jpegEngines": "jpegCount",
    "ofaEngines": "ofaCount",
}
COUNTED = (*_FIELDS, "memory")
# A MIG device's resources, with the names of GPU feature discovery -> the field of
# nvmlDeviceAttributes_t; memory in MiB.
_OF_DEVICE = {
    "memory": "memorySizeMB",
    "multiprocessors": "multiprocessorCount",
    "slices.gi": "gpuInstanceSliceCount",
    "slices.ci": "computeInstanceSliceCount",
    "engines.copy": "sharedCopyEngineCount",
    "engines.decoder": "sharedDecoderCount",
    "engines.encoder": "sharedEncoderCount",
    "engines.jpeg": "sharedJpegCount",
    "engines.ofa": "sharedOfaCount",
}
ATTRIBUTES = (*_OF_DEVICE,)


class Profile(Record):
    """A profile of GPU instances; ``counts`` are their amounts of COUNTED, memory in bytes.

    ``id`` is nvidia-smi's number of it, ``slices`` is its number of the GPU's seven slices,
    ``places`` are the memory slices at which an instance may start, and ``size`` is its number of
    memory slices. There are no places if NVML reports them only in MIG mode.
    """

    name: str
    id: int
    slices: int
    counts: "tuple[int, ...]"
    places: "tuple[int, ...]" = ()
    size: int = 0

    @property
    def counted(self) -> dict[str, int]:
        """Its amounts, by the names of COUNTED."""
        return dict(zip(COUNTED, self.counts, strict=True))


class Division(Record, profiles=Profile):
    """A GPU's memory in bytes, its profiles, and its instances.

    ``instances`` are (number, profile's id, first memory slice, number of slices); ``attributes``
    are the values of ATTRIBUTES for each of the MIG devices ``migs`` (UUIDs). ``mig_capable`` is
    whether NVML reports a MIG mode, also where it reports no profiles.
    """

    memory: int = 0
    profiles: "tuple[Profile, ...]" = ()
    instances: "tuple[tuple[int, int, int, int], ...]" = ()
    migs: tuple[str, ...] = ()
    attributes: "tuple[tuple[int, ...], ...]" = ()
    mig_capable: bool = False

    def profile(self, number: int) -> Profile | None:
        """Return the profile with that id."""
        return next((each for each in self.profiles if each.id == number), None)

    def attributes_of(self, mig: str) -> tuple[int, ...]:
        """Return a MIG device's values of ATTRIBUTES, () if NVML doesn't report them."""
        return next(
            (each for uuid, each in zip(self.migs, self.attributes, strict=True) if uuid == mig), ()
        )


def divisions(config: "Config", inventory: "NvidiaInventory") -> dict[str, Division]:
    """Return the division of each GPU, by UUID; DriverError as ``nvml.ask``."""
    if not inventory.gpus or inventory.platform:
        return {}
    found = nvml.query(
        inventory.root,
        library(config),
        config.user,
        config.nvml_timeout,
        lambda it: {gpu.uuid: _division(it, gpu).to_json() for gpu in inventory.gpus},
    )
    return {uuid: Division.from_json(each) for uuid, each in found.items()}


# In the child -----------------------------------------------------------------------------------


def _division(it: "Any", gpu: "Gpu") -> Division:
    handle = _try(it, None, it.nvmlDeviceGetHandleByUUID, gpu.uuid)
    if handle is None:
        return Division()
    memory = _try(it, None, it.nvmlDeviceGetMemoryInfo, handle)
    numbers = range(getattr(it, "NVML_GPU_INSTANCE_PROFILE_COUNT", 0))
    profiles = [each for number in numbers if (each := _profile(it, handle, number))]
    instances = [_instance(it, handle, number) for number in sorted({mig.gi for mig in gpu.mig})]
    attributes = [_attributes(it, mig.uuid) for mig in gpu.mig]
    return Division(
        int(memory.total) if memory else 0,
        tuple(profiles),
        tuple(each for each in instances if each),
        tuple(mig.uuid for mig in gpu.mig),
        tuple(attributes),
        _try(it, None, it.nvmlDeviceGetMigMode, handle) is not None,
    )


def _attributes(it: "Any", uuid: str) -> tuple[int, ...]:
    handle = _try(it, None, it.nvmlDeviceGetHandleByUUID, uuid)
    found = _try(it, None, it.nvmlDeviceGetAttributes_v2, handle) if handle else None
    if found is None:
        return ()
    return tuple(int(getattr(found, field)) for field in _OF_DEVICE.values())


def _profile(it: "Any", handle: "Any", number: int) -> Profile | None:
    info = _try(it, None, it.nvmlDeviceGetGpuInstanceProfileInfo, handle, number)
    if info is None:
        return None
    name = nvml.text_of(info.name).removeprefix("MIG ")
    counts = [int(getattr(info, field)) for field in _FIELDS.values()]
    counts.append(int(info.memorySizeMB) * MIB)
    places = _places(it, handle, int(info.id))
    sizes = {size for _, size in places} or {0}
    starts = tuple(sorted(start for start, _ in places))
    return Profile(name, int(info.id), int(info.sliceCount), tuple(counts), starts, max(sizes))


def _places(it: "Any", handle: "Any", identity: int) -> list[tuple[int, int]]:
    """Return the possible first memory slices of a profile's instances, each with their number."""
    count = ctypes.c_uint(0)
    ask = it.nvmlDeviceGetGpuInstancePossiblePlacements
    if _try(it, None, ask, handle, identity, None, ctypes.byref(count)) is None or not count.value:
        return []
    places = (it.c_nvmlGpuInstancePlacement_t * count.value)()
    if _try(it, None, ask, handle, identity, places, ctypes.byref(count)) is None:
        return []
    return [(int(each.start), int(each.size)) for each in places[: count.value]]


def _instance(it: "Any", handle: "Any", number: int) -> tuple[int, int, int, int] | None:
    instance = _try(it, None, it.nvmlDeviceGetGpuInstanceById, handle, number)
    info = _try(it, None, it.nvmlGpuInstanceGetInfo, instance) if instance else None
    if info is None:
        return None
    place = info.placement
    return number, int(info.profileId), int(place.start), int(place.size)


def _try(it: "Any", default: "Any", ask: "Callable[..., Any]", *arguments: "Any") -> "Any":
    """Return NVML's result, ``default`` on an error: one faulty GPU doesn't affect the others."""
    try:
        return ask(*arguments)
    except it.NVMLError:
        return default


# The lowest compute capability -> the name.
_NAMES = (
    ((12, 0), "Blackwell"), ((10, 0), "Blackwell"), ((9, 0), "Hopper"), ((8, 9), "Ada Lovelace"),
    ((8, 0), "Ampere"), ((7, 5), "Turing"), ((7, 0), "Volta"), ((6, 0), "Pascal"),
    ((5, 0), "Maxwell"), ((3, 0), "Kepler"), ((2, 0), "Fermi"), ((1, 0), "Tesla"),
)  # fmt: skip


def capability_numbers(capability: str) -> tuple[int, int]:
    """Return the two numbers of a compute capability (9.0), zeros if it is unknown."""
    major, _, minor = capability.partition(".")
    if not major.isdecimal() or not minor.isdecimal():
        return 0, 0
    return int(major), int(minor)


def architecture(capability: str) -> str:
    """Return the generation's name, Unknown for one that isn't in the list."""
    number = capability_numbers(capability)
    newer = number[0] == 11 or number >= (13, 0)
    return next((name for least, name in _NAMES if number >= least and not newer), "Unknown")
