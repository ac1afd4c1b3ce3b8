"""GPUs and MIG devices as a cluster's resources, by the rules of NVIDIA's device plugin."""

import re
from collections.abc import Callable, Iterator
from types import ModuleType

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import RequestError, listed
from gpuhook.cluster.vendors.cluster import Extras, Offers, RequestChannels, VendorCluster
from gpuhook.cluster.vendors.nvidia.plugin import DOMAIN, NONE, SINGLE, PluginSettings
from gpuhook.core.inventory.model import Device
from gpuhook.tools.vendors.nvidia import driver_folder
from gpuhook.vendors.nvidia.model import Mig, NvidiaInventory
from gpuhook.vendors.nvidia.variables import IMEX_CHANNELS, NvidiaOptions, feature_variable
from gpuhook.vendors.nvidia.vendor import VENDOR

_GPUS = "/proc/driver/nvidia/gpus"
_SMALL = 1 << 14  # bytes
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
# The end of a MIG device's name: the slices of its compute instance, unless it has all of its GPU
# instance's; the slices and the memory of the GPU instance; and attributes (+me).
_PROFILE = re.compile(r"(?:([0-9]+)c\.)?([0-9]+)g\.[0-9]+gb(?:[-+][a-z0-9.+-]+)?")


class NvidiaCluster(VendorCluster):
    """GPUs, or their MIG devices."""

    pci_classes = ("", "0300", "0302")
    driver_folder = driver_folder.INSIDE
    unnamed = f"{VendorCluster.unnamed}; mig-strategy single or mixed offers those"

    def __init__(self, names: ModuleType, chosen: PluginSettings | None = None) -> None:
        self.chosen: PluginSettings = chosen or PluginSettings()
        super().__init__(names, self.chosen)
        self.listens = self.chosen.listens

    def offers(self, inventory: NvidiaInventory, root: Rootfs) -> tuple[Offers, list[str]]:
        del root
        kind: str = self.names.KIND
        if self.chosen.mig_strategy == NONE:
            gpus = [device for device in inventory.devices if not device.parent]
            return ({kind: gpus} if gpus else {}), []
        whole = {gpu.id for gpu in inventory.gpus if not gpu.mig_enabled}
        found: Offers = {}
        for device in inventory.devices:
            if device.id in whole:
                found.setdefault(kind, []).append(device)
        warnings = _empty(inventory)
        parts, left_out = _by_profile(inventory)
        warnings += left_out
        if self.chosen.mig_strategy == SINGLE:
            _check_alike(inventory, parts)
            alone = [device for devices in parts.values() for device in devices]
            return ({kind: alone} if alone else found), warnings
        for profile, devices in parts.items():
            found[f"{DOMAIN}/mig-{profile.replace('+', '.')}"] = devices
        return found, warnings

    def handed_out(self, device: Device) -> str:
        """Return its GPU if whole GPUs are offered: a GPU is unhealthy if one instance is."""
        return (self.chosen.mig_strategy == NONE and device.parent) or device.id

    def lost(self, inventory: NvidiaInventory, root: Rootfs) -> list[Device]:
        """Return the GPUs that have fallen off the bus, from the kernel module.

        NVML reports only their number; the module usually still has their UUIDs.
        """
        known = {gpu.uuid for gpu in inventory.gpus}
        uuids = [uuid for uuid in _uuids(root) if uuid not in known]
        certain = len(uuids) == len(inventory.lost)
        found = []
        for at, index in enumerate(inventory.lost):
            identity = uuids[at] if certain else f"lost-{index}"
            state = "it has fallen off the bus"
            found.append(Device(identity, str(index), {}, state=state))
        return found

    def extras(
        self, options: NvidiaOptions, ways: RequestChannels, why_not: Callable[[], str]
    ) -> Extras:
        features, channels = self.chosen.features, self.chosen.imex_channel_ids
        warnings = []
        if features and ways.by_variable and not ways.unprivileged:
            warnings.append(
                f"Containers that aren't privileged don't get {listed(features)}: their variables "
                "don't count if accept-nvidia-visible-devices-envvar-when-unprivileged is off"
            )
        options.features = tuple(sorted(features))
        options.imex_channels = channels
        if channels and not self.chosen.imex_required and why_not():
            wanted = listed([*map(str, channels)])
            warnings.append(f"Containers get no IMEX channel: not all of {wanted} exist")
            options.imex_channels = channels = ()
        variables = {feature_variable(name): "enabled" for name in features}
        if channels and not ways.by_mounts:
            variables[IMEX_CHANNELS] = ",".join(map(str, channels))
        names = VENDOR.tenant_names(options)
        names += [f"{DOMAIN}/{name}=all" for name in features]
        mounts = tuple(f"imex/{each}" for each in channels)
        return Extras(variables, mounts, tuple(names), tuple(warnings))


def profile(mig: Mig) -> str:
    """Return a MIG device's profile (1g.10gb+me), "" if its name has none."""
    word = mig.name.rpartition(" ")[2]
    return word if _PROFILE.fullmatch(word) else ""


def is_whole(name: str) -> bool:
    """Tell whether a profile is of a compute instance with all of its GPU instance."""
    match = _PROFILE.fullmatch(name)
    return match is not None and match[1] in (None, match[2])


def _by_profile(inventory: NvidiaInventory) -> tuple[Offers, list[str]]:
    """Return the MIG devices by profile, in the order of their GPUs, and those left out."""
    found: Offers = {}
    left_out = []
    migs = {mig.uuid: mig for gpu in inventory.gpus for mig in gpu.mig}
    for device in inventory.devices:
        if not device.parent:
            continue
        name = profile(migs[device.id])
        if is_whole(name):
            found.setdefault(name, []).append(device)
        else:
            why = "has only a part of its GPU instance" if name else "has no known profile"
            left_out.append(f"MIG device {device.label} isn't offered: it {why}")
    return found, left_out


def _empty(inventory: NvidiaInventory) -> list[str]:
    empty = [gpu.index for gpu in inventory.gpus if gpu.mig_enabled and not gpu.mig]
    return [f"GPU {index} is in MIG mode and has no MIG device" for index in empty]


def _check_alike(inventory: NvidiaInventory, parts: Offers) -> None:
    """Refuse GPUs of which only some are in MIG mode, and MIG devices of several profiles."""
    remedy = "Use mig-strategy mixed, or give all GPUs one profile (nvidia-smi mig)"
    others = [str(gpu.index) for gpu in inventory.gpus if not gpu.mig_enabled]
    if others and len(others) < len(inventory.gpus):
        raise RequestError(
            "With mig-strategy single all GPUs must be in MIG mode or none, and of these some are "
            f"and others aren't ({listed(others)})",
            remedy,
        )
    if len(parts) > 1:
        raise RequestError(
            "With mig-strategy single all MIG devices must have one profile, and here are "
            f"{listed(sorted(parts))}",
            remedy,
        )


def _uuids(root: Rootfs) -> Iterator[str]:
    """Yield the UUIDs of GPUs from the kernel module, in the order of their addresses."""
    for name in sorted(root.list_folder(_GPUS)):
        try:
            data = root.read_file(f"{_GPUS}/{name}/information", _SMALL) or b""
        except OSError:
            continue
        match = _UUID.search(data.decode("ascii", "replace"))
        if match:
            yield match[1]


CLUSTER = NvidiaCluster
