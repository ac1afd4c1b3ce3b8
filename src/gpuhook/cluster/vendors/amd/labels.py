"""The node labels of AMD's node labeller, with all of its options.

Labels for the GPUs' family and firmware are missing, because they require opening a device.
"""

from collections import Counter
from collections.abc import Mapping

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.vendor_parts import Share
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.monitor.vendors import pci
from gpuhook.monitor.vendors.sensors import integer
from gpuhook.vendors import sysfs_devices
from gpuhook.vendors.amd.discover import kfd_devices, partition_type
from gpuhook.vendors.amd.vendor import GPUS, MODULE

_DOMAIN = "amd.com"
_GIB = 1 << 30


def labels(
    config: Config,
    inventory: Inventory,
    root: Rootfs,
    chosen: None,
    shares: Mapping[str, Share],
) -> dict[str, str]:
    """Return the labels by name."""
    del config, chosen, shares
    if not inventory.devices:
        return {}
    found = _modules(root)
    kinds: dict[str, list[str]] = {}
    properties = kfd_devices(root)
    for device in inventory.devices:
        for kind, value in _facts(device, inventory, root, properties).items():
            kinds.setdefault(kind, []).append(value)
    for kind, values in kinds.items():
        found.update(_counted(kind, Counter(values)))
    return {**found, **_partitions(inventory, root)}


def _modules(root: Rootfs) -> dict[str, str]:
    files = {"driver-version": "version", "driver-src-version": "srcversion"}
    said = {name: sysfs_devices.text(root, f"{MODULE}/{file}") for name, file in files.items()}
    return {f"{_DOMAIN}/gpu.{name}": value for name, value in said.items() if value}


def _facts(
    device: Device,
    inventory: Inventory,
    root: Rootfs,
    properties: Mapping[int, Mapping[str, int]],
) -> dict[str, str]:
    """Return the counted facts of a GPU or partition that the kernel reports."""
    minors = [sysfs_devices.number(path.rpartition("/")[2], "renderD") for path in device.nodes]
    minor = next((each for each in minors if each is not None), -1)
    said = properties.get(minor, {})
    simd, each = said.get("simd_count", 0), said.get("simd_per_cu", 0)
    product = sysfs_devices.text(root, f"{GPUS}/{device.bus_id}/product_name")
    sharing = max(sum(other.bus_id == device.bus_id for other in inventory.devices), 1)
    memory = (integer(root, f"{GPUS}/{device.bus_id}/mem_info_vram_total") or 0) // sharing
    found = {
        "device-id": pci.attribute(root, device.bus_id, "device").removeprefix("0x"),
        "product-name": product.replace(" ", "_").replace("(", "").replace(")", ""),
        "vram": f"{round(memory / _GIB)}G" if memory else "",
        "simd-count": str(simd) if simd else "",
        "cu-count": str(simd // each) if simd and each else "",
    }
    return {kind: value for kind, value in found.items() if value}


def _counted(kind: str, counts: Counter[str]) -> dict[str, str]:
    """Return the old (beta) and new labels of a kind: counts, and a value common to all."""
    old, new = f"beta.{_DOMAIN}/gpu.{kind}", f"{_DOMAIN}/gpu.{kind}"
    found = {f"{old}.{value}": str(count) for value, count in counts.items()}
    if len(counts) == 1:
        [value] = counts
        return {**found, old: value, new: value}
    return {**found, **{f"{new}.{value}": str(count) for value, count in counts.items()}}


def _partitions(inventory: Inventory, root: Rootfs) -> dict[str, str]:
    gpus = {device.bus_id for device in inventory.devices}
    modes = {partition_type(root, f"{GPUS}/{bus_id}") for bus_id in gpus}
    found = {
        f"{_DOMAIN}/{sort}-partitioning-supported": _word(
            any(root.exists(f"{GPUS}/{bus_id}/current_{sort}_partition") for bus_id in gpus)
        )
        for sort in ("compute", "memory")
    }
    if len(modes) == 1 and modes != {""}:
        found[f"{_DOMAIN}/compute-memory-partition"] = modes.pop()
    return found


def _word(value: bool) -> str:
    return "true" if value else "false"
