"""The node labels of NVIDIA's GPU feature discovery (gpu-feature-discovery).

The timestamp is left out, because it would change every time. So are labels of vGPUs and of the
fabric, which are unknown here.
"""

import re
from collections.abc import Mapping

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendor_parts import Share
from gpuhook.cluster.vendors.nvidia import instances
from gpuhook.cluster.vendors.nvidia.cluster import profile
from gpuhook.cluster.vendors.nvidia.instances import ATTRIBUTES, MIB, Division, divisions
from gpuhook.cluster.vendors.nvidia.plugin import DOMAIN, NONE, SINGLE, PluginSettings
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendors import pci
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.nvidia.model import Gpu, Mig, NvidiaInventory

_GPU = f"{DOMAIN}/gpu"
_MACHINE = "/sys/class/dmi/id/product_name"
_MODES = {"0x030000": "graphics", "0x030200": "compute"}
_STRANGE = re.compile(r"[^A-Za-z0-9-_. ]")
_UNSHARED = Share(0, renamed=False)  # of GPUs of which only partitions are allocated


def labels(
    config: Config,
    inventory: NvidiaInventory,
    root: Rootfs,
    chosen: PluginSettings | None,
    shares: Mapping[str, Share],
) -> dict[str, str]:
    """Return the labels by name; DriverError if the driver doesn't answer."""
    if not inventory.gpus or inventory.platform:
        return {}
    strategy = (chosen or PluginSettings()).mig_strategy
    known = divisions(config, inventory)
    found = {
        **_versions(inventory),
        f"{DOMAIN}/gpu.machine": _clean(_machine(root)) or "unknown",
        f"{DOMAIN}/gpu.mode": _mode(inventory.devices, root),
        f"{DOMAIN}/mig.capable": _word(any(each.mig_capable for each in known.values())),
        f"{DOMAIN}/mps.capable": "false",
        **_whole(inventory, known, shares),
    }
    if strategy != NONE:
        found[f"{DOMAIN}/mig.strategy"] = strategy
        found.update(_parts(inventory, known, shares, single=strategy == SINGLE))
    return found


def _word(value: bool) -> str:
    return "true" if value else "false"


def _versions(inventory: NvidiaInventory) -> dict[str, str]:
    driver = [*inventory.version.split("."), "", ""][:3]
    cuda = [*inventory.cuda_version.split("."), "0"][:2]
    found = {
        f"cuda.driver.{name}": word
        for name, word in zip(("major", "minor", "rev"), driver, strict=True)
    }
    names = ("major", "minor", "revision")
    found.update(
        {f"cuda.driver-version.{name}": word for name, word in zip(names, driver, strict=True)}
    )
    for old in ("cuda.runtime", "cuda.runtime-version"):
        found.update({f"{old}.{name}": word for name, word in zip(names[:2], cuda, strict=True)})
    found["cuda.driver-version.full"] = inventory.version
    found["cuda.runtime-version.full"] = inventory.cuda_version
    return {f"{DOMAIN}/{name}": value for name, value in found.items()}


def _machine(root: Rootfs) -> str:
    if root.exists("/sys/class/dmi"):
        return sysfs_devices.text(root, _MACHINE)
    with Rootfs("/") as own:
        return sysfs_devices.text(own, _MACHINE)


def _mode(devices: tuple[Device, ...], root: Rootfs) -> str:
    whole = [each.bus_id for each in devices if not each.parent]
    classes = {pci.attribute(root, bus_id, "class") for bus_id in whole}
    return _MODES.get(classes.pop(), "unknown") if len(classes) == 1 else "unknown"


def _clean(text: str) -> str:
    """Return a text in the form of NVIDIA's labels: - for blanks, without special characters."""
    return "-".join(word for word in _STRANGE.sub("", text).split(" ") if word)


def _whole(
    inventory: NvidiaInventory, known: Mapping[str, Division], shares: Mapping[str, Share]
) -> dict[str, str]:
    """Return the labels of GPUs; of several products the last one, preferably without MIG."""
    found: dict[str, str] = {}
    for gpu in sorted(inventory.gpus, key=lambda each: not each.mig_enabled):
        share = _UNSHARED if gpu.mig_enabled else shares.get(_GPU, Share())
        count = sum(each.name == gpu.name for each in inventory.gpus)
        memory = known.get(gpu.uuid, Division()).memory // MIB
        found.update(_base(_GPU, (gpu.name,), count, share))
        found.update({f"{_GPU}.memory": str(memory)} if memory else {})
        found.update(_architecture(gpu))
    return found


def _architecture(gpu: Gpu) -> dict[str, str]:
    major, minor = instances.capability_numbers(gpu.architecture)
    if not major:
        return {}
    family = instances.architecture(gpu.architecture).lower().replace(" ", "-")
    about = {
        "family": "undefined" if family == "unknown" else family,
        "compute.major": str(major),
        "compute.minor": str(minor),
    }
    return {f"{_GPU}.{name}": value for name, value in about.items()}


def _base(resource: str, words: tuple[str, ...], count: int, share: Share) -> dict[str, str]:
    product = "-".join(map(_clean, words))
    if share.replicas > 1 and not share.renamed:
        product += "-SHARED"
    strategy = "none" if share.replicas <= 1 else "mps" if share.by_mps else "time-slicing"
    about = {
        "product": product,
        "count": str(count),
        "replicas": str(share.replicas),
        "sharing-strategy": strategy,
    }
    return {f"{resource}.{name}": value for name, value in about.items()}


def _parts(
    inventory: NvidiaInventory,
    known: Mapping[str, Division],
    shares: Mapping[str, Share],
    *,
    single: bool,
) -> dict[str, str]:
    """Return the labels of MIG devices, by profile."""
    by_profile: dict[str, list[tuple[Gpu, Mig]]] = {}
    for gpu in inventory.gpus:
        for mig in gpu.mig:
            by_profile.setdefault(profile(mig).replace("+", "."), []).append((gpu, mig))
    divided = [gpu for gpu in inventory.gpus if gpu.mig_enabled]
    if single and divided and not _alike(inventory, by_profile):
        invalid = _base(_GPU, (divided[0].name, "MIG", "INVALID"), 0, _UNSHARED)
        return {**invalid, f"{_GPU}.sharing-strategy": "", f"{_GPU}.memory": "0"}
    found: dict[str, str] = {}
    for name, every in by_profile.items():
        if not name:
            continue  # a MIG device that can't be requested
        gpu, mig = every[0]
        resource = _GPU if single else f"{DOMAIN}/mig-{name}"
        share = shares.get(resource, Share())
        found.update(_base(resource, (gpu.name, "MIG", name), len(every), share))
        values = known.get(gpu.uuid, Division()).attributes_of(mig.uuid)
        found.update(
            {f"{resource}.{word}": str(n) for word, n in zip(ATTRIBUTES, values, strict=False)}
        )
    return found


def _alike(inventory: NvidiaInventory, by_profile: Mapping[str, object]) -> bool:
    """Tell whether all GPUs are in MIG mode, none of them empty, with one profile."""
    whole = all(gpu.mig_enabled and gpu.mig for gpu in inventory.gpus)
    return whole and len(by_profile) == 1
