"""GPUs and MIG devices with the attributes of NVIDIA's own DRA driver (gpu.nvidia.com).

Device names differ: NVIDIA's driver builds them from the minor number, which another GPU may get
after one is lost. gpuhook uses the UUID.

A GPU that can be divided has a counter set: its engines, and one counter for each slice of its
memory. Each MIG device uses a part of them, and the whole GPU all, so that the scheduler allocates
nothing twice.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError
from gpuhook.cluster.vendors.nvidia import instances
from gpuhook.cluster.vendors.nvidia.cluster import is_whole, profile
from gpuhook.cluster.vendors.nvidia.instances import Division, Profile, divisions
from gpuhook.cluster.vendors.slices import (
    KEEP_AWAY,
    SEND_AWAY,
    DeviceClass,
    Offer,
    PublishedDevice,
    Slices,
    Value,
    device_name,
    version,
    why_not,
)
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendors.nvidia import xids
from gpuhook.vendors.nvidia import mps
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory

_CAPITAL = re.compile(r"[A-Z]")


class NvidiaSlices(Slices):
    """GPUs, or their MIG devices."""

    driver = "gpu.nvidia.com"
    lost_taint = "gpu-lost"

    def offer(
        self, config: Config, inventory: NvidiaInventory, root: Rootfs, *, dynamic: bool
    ) -> Offer:
        warnings = []
        try:
            known = divisions(config, inventory)
        except DriverError as error:
            known = {}
            warnings.append(f"The memory of GPUs is unknown: {error.cause}")
        by_id = {device.id: device for device in inventory.devices}
        found: list[PublishedDevice] = []
        counters = {}
        for gpu in inventory.gpus:
            one = _OneGpu(gpu, inventory, known.get(gpu.uuid, Division()), by_id)
            offered = one.offered(dynamic=dynamic)
            # protects: dra-mps-withheld
            if config.mps_devices and mps.is_meant(config.mps_devices, by_id[gpu.id]):
                offered = [replace(each, withheld=True) for each in offered]
                one.warnings.append(f"GPU {gpu.index} isn't published: [gpuhook.mps] shares it")
            found += offered
            warnings += one.warnings
            if any(device.counters for device in found if device.counters == one.counters):
                counters[one.counters] = one.all_counters()
        found += [self.lost(device, root) for device in self.cluster.lost(inventory, root)]
        return Offer(tuple(found), counters, tuple(warnings))

    def lost(self, device: Device, root: Rootfs) -> PublishedDevice:
        known = device.id.startswith("GPU-")
        about: dict[str, Value] = {"type": "gpu", **({"uuid": device.id} if known else {})}
        return PublishedDevice(
            _gpu_name(device.id), "", about, reason=device.state, taint=self.lost_taint
        )

    def taint(self, event: Mapping[str, Any]) -> tuple[str, str]:
        return ("xid", str(event["xid"])) if "xid" in event else super().taint(event)

    def effect(self, event: Mapping[str, Any]) -> str:
        return SEND_AWAY if xids.must_be_left(event) else KEEP_AWAY

    def classes(self, driver: str, resource: str) -> list[DeviceClass]:
        kinds = {"gpu": driver, "mig": f"mig.{driver.removeprefix('gpu.')}"}
        return [
            DeviceClass(
                name,
                f'device.driver == "{driver}" && device.attributes["{driver}"].type == "{kind}"',
                str(self.names.KIND) if kind == "gpu" else "",
            )
            for kind, name in kinds.items()
        ]


class _OneGpu:
    """A builder of one GPU's published devices, which collects ``warnings``."""

    def __init__(
        self, gpu: Gpu, inventory: NvidiaInventory, division: Division, devices: dict[str, Device]
    ) -> None:
        self.gpu = gpu
        self.inventory = inventory
        self.division = division
        self.devices = devices
        self.name = _gpu_name(gpu.id)
        self.counters = f"{self.name}-counter-set"
        self.warnings: list[str] = []

    def offered(self, *, dynamic: bool) -> list[PublishedDevice]:
        """Return the GPU, or its MIG devices; with ``dynamic`` both, including possible ones.

        A GPU in MIG mode can't be used as a whole, but a driver that creates MIG devices itself
        would leave that mode.
        """
        could_be = [*self._could_be()] if dynamic else []
        if could_be and not self.gpu.mig:
            return [self._whole(divisible=True), *could_be]
        if not self.gpu.mig_enabled:
            return [self._whole(divisible=False)]
        if not self.gpu.mig:
            self.warnings.append(f"GPU {self.gpu.index} is in MIG mode and has no MIG device")
        return [each for mig in self.gpu.mig if (each := self._static(mig))]

    def all_counters(self) -> dict[str, int]:
        """Return all counters of the GPU, by name."""
        slices = range(max(place + each.size for each, place in self._placed()))
        found = _counters(self._most())
        return {**found, **{f"memory-slice-{number}": 1 for number in slices}}

    # Devices -------------------------------------------------------------------------------------

    def _whole(self, *, divisible: bool) -> PublishedDevice:
        device = self.devices[self.gpu.id]
        about: dict[str, Value] = {"type": "gpu", "uuid": self.gpu.uuid, **self._common()}
        memory = {"memory": self.division.memory} if self.division.memory else {}
        return PublishedDevice(
            self.name,
            device.bus_id,
            about,
            self._most() if divisible else memory,
            self.counters if divisible else "",
            self.all_counters() if divisible else {},
            why_not(device, self.inventory),
            id=device.id,
        )

    def _static(self, mig: Mig) -> PublishedDevice | None:
        """Return an existing MIG device, None for one with only a part of a GPU instance."""
        device, name = self.devices[mig.uuid], profile(mig)
        if not is_whole(name):
            why = "has only a part of its GPU instance" if name else "has no known profile"
            self.warnings.append(f"MIG device {device.label} isn't published: it {why}")
            return None
        about: dict[str, Value] = {"uuid": mig.uuid, **self._part(name)}
        reason = why_not(device, self.inventory)
        found = next((each for each in self.division.instances if each[0] == mig.gi), None)
        size = self.division.profile(found[1]) if found else None
        if found is None or size is None:
            name = device_name("mig", mig.uuid)
            return PublishedDevice(name, device.bus_id, about, reason=reason, id=device.id)
        _, number, start, count = found
        slices = range(start, start + count)
        return PublishedDevice(
            self._part_name(name, number, start),
            device.bus_id,
            about,
            {**size.counted, **{f"memorySlice{each}": 1 for each in slices}},
            self.counters,
            _used(size.counted, slices),
            reason,
            id=device.id,
        )

    def _could_be(self) -> list[PublishedDevice]:
        """Return every possible MIG device of the GPU, at each of its places."""
        device = self.devices[self.gpu.id]
        reason = why_not(device, self.inventory)
        return [
            PublishedDevice(
                self._part_name(size.name, size.id, start),
                device.bus_id,
                self._part(size.name),
                size.counted,
                self.counters,
                _used(size.counted, range(start, start + size.size)),
                reason,
            )
            for size, start in self._placed()
        ]

    # What they say -------------------------------------------------------------------------------

    def _placed(self) -> list[tuple[Profile, int]]:
        """Return the profiles with each of their possible places."""
        found = [(size, start) for size in self.division.profiles for start in size.places]
        if found:
            return found
        sizes = {each.id: each for each in self.division.profiles}
        return [
            (sizes[number].but(size=count), start)
            for _, number, start, count in self.division.instances
            if number in sizes
        ]

    def _most(self) -> dict[str, int]:
        """Return the maximum of each resource over all profiles."""
        found: dict[str, int] = {}
        for each in self.division.profiles:
            for word, count in each.counted.items():
                found[word] = max(count, found.get(word, 0))
        return found

    def _common(self) -> dict[str, Value]:
        gpu, inventory = self.gpu, self.inventory
        return {
            "productName": gpu.name,
            "brand": gpu.brand,
            "architecture": instances.architecture(gpu.architecture),
            **version("cudaComputeCapability", gpu.architecture),
            **version("driverVersion", inventory.version),
            **version("cudaDriverVersion", inventory.cuda_version),
        }

    def _part(self, name: str) -> dict[str, Value]:
        return {
            "type": "mig", "parentUUID": self.gpu.uuid, "profile": name, **self._common()
        }  # fmt: skip

    def _part_name(self, name: str, number: int, start: int) -> str:
        words = name.replace(".", "").replace("+", "-")
        return device_name(self.name, "mig", words, str(number), str(start))


def _gpu_name(identity: str) -> str:
    return device_name("gpu", identity.removeprefix("GPU-"))


def _used(counted: dict[str, int], slices: range) -> dict[str, int]:
    return {**_counters(counted), **{f"memory-slice-{number}": 1 for number in slices}}


def _counters(counted: dict[str, int]) -> dict[str, int]:
    """Return counts by counter names, which have dashes: copyEngines is copy-engines."""
    return {_CAPITAL.sub(lambda at: f"-{at[0].lower()}", word): n for word, n in counted.items()}


SLICES = NvidiaSlices
