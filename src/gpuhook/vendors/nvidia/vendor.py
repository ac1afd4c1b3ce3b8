"""NVIDIA's implementation of the vendor contract."""

import os

from gpuhook.base.errors import listed as listed_names
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory.fingerprint import names as listed
from gpuhook.core.inventory.fingerprint import status, text
from gpuhook.vendors.nvidia import completeness, device_nodes, names, variables
from gpuhook.vendors.nvidia.model import CAPS_FOLDER, IMEX_FOLDER, NvidiaInventory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.oci.jsontext import Record
    from gpuhook.base.oci.process import EnvironmentSetting
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import Device, DeviceNode
    from gpuhook.core.memory_limiter import MemoryLimiter
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation
    from gpuhook.core.request.reader import RequestReader

_PROC = "/proc/driver/nvidia"
_DOMAIN = names.KIND.partition("/")[0]
# Folders of device nodes that come and go as a whole; the rest lies in /dev itself.
_NODE_FOLDERS = (CAPS_FOLDER, IMEX_FOLDER, "/dev/infiniband", "/dev/dri")
_NODE_PREFIXES = ("nvidia", "gdrdrv")
_NVGPU = "/dev/nvgpu/igpu0"
# Folders of the Windows driver: an update adds a folder to the second.
_WSL_NODE = "dxg"
_WSL_FOLDERS = ("/usr/lib/wsl/lib", "/usr/lib/wsl/drivers")


class Nvidia(Vendor):
    """GPUs and MIG devices, by NVML, with the driver's files."""

    names = names
    inventory = NvidiaInventory
    settings = (
        "binary_search_paths",
        "csv_ignore",
        "csv_mount_spec_path",
        "data_search_paths",
        "environment",
        "ldcache",
        "library_search_paths",
        "load_kmods",
        "user",
    )
    crowded = (CAPS_FOLDER, IMEX_FOLDER)
    hook_modules = ("gpuhook.vendors.nvidia.edits",)

    def _discover(self, config: "Config") -> NvidiaInventory:
        from gpuhook.vendors.nvidia import discover  # noqa: PLC0415 - costly, and rarely needed

        return discover.discover(config)

    def signs(self) -> "Sequence[str]":
        return ("/dev/nvidiactl", _PROC, f"/dev/{_WSL_NODE}", "/dev/nvgpu")

    def cache_key(self, config: "Config") -> "list[Any]":
        root = self.root(config).rstrip("/")
        nodes = listed(f"{root}/dev")
        lists = f"{root}{config.csv_mount_spec_path}"
        return [
            text(f"{root}{_PROC}/version"),
            listed(f"{root}{_PROC}/gpus"),
            _mig_instances(f"{root}{_PROC}/capabilities"),
            status(root + (config.ldcache or "/etc/ld.so.cache")),
            [name for name in nodes if name.startswith(_NODE_PREFIXES)],
            [status(root + folder) for folder in _NODE_FOLDERS],
            [status(root + path) for path in _WSL_FOLDERS] if _WSL_NODE in nodes else [],
            _tegra(lists, nodes, f"{root}{_NVGPU}"),
        ]

    def withheld(self, config: "Config") -> "list[str]":
        from gpuhook.vendors.nvidia import reach  # noqa: PLC0415 - as discover

        return reach.withheld(self.root(config))

    def within_reach(self, inventory: NvidiaInventory) -> NvidiaInventory:
        root = inventory.root.rstrip("/")
        paths = [path for each in inventory.devices for path in each.nodes]
        if all(os.access(root + path, os.R_OK) for path in paths):
            return inventory
        from gpuhook.vendors.nvidia import reach  # noqa: PLC0415 - for example in a Slurm job

        return reach.within_reach(inventory)  # protects: counted-here

    def volatile_paths(self, config: "Config") -> list[str]:
        from gpuhook.vendors.nvidia import driver_files  # noqa: PLC0415 - as discover

        return driver_files.volatile_paths(config)

    def watched_paths(self, config: "Config") -> list[str]:
        from gpuhook.vendors.nvidia import driver_files  # noqa: PLC0415 - as discover

        return driver_files.watched_paths(config)

    def optional_modules(self, config: "Config") -> tuple[str, ...]:
        modules = ("requirements", "cuda_compat", *(["mps_mounts"] if config.mps_devices else []))
        return tuple(f"gpuhook.vendors.nvidia.{each}" for each in modules)

    def options(self) -> variables.NvidiaOptions:
        return variables.NvidiaOptions()

    def everything(self, config: "Config") -> variables.NvidiaOptions:
        supported = variables.supported_capabilities(config.supported_driver_capabilities)
        return variables.NvidiaOptions(capabilities=supported)

    def offered(self, grant: "Grant") -> "tuple[list[Device], list[str]]":
        found, reasons = super().offered(grant)
        empty = [gpu for gpu in grant.inventory.gpus if gpu.mig_enabled and not gpu.mig]
        without = {gpu.uuid for gpu in empty}
        reasons += [f"GPU {gpu.index} is in MIG mode and has no MIG device" for gpu in empty]
        reasons += completeness.unusable(grant)
        return [device for device in found if device.id not in without], reasons

    def read(self, reading: "RequestReader", options: variables.NvidiaOptions) -> None:
        variables.read(reading, options)

    def tenant_names(self, options: variables.NvidiaOptions) -> list[str]:
        return [f"{_DOMAIN}/imex-channel={each}" for each in options.imex_channels]

    def is_divided(self, device: "Device", inventory: "Any") -> bool:
        by_mode = any(gpu.id == device.id and gpu.mig_enabled for gpu in inventory.gpus)
        return by_mode or super().is_divided(device, inventory)

    def check(self, grant: "Grant") -> None:
        device_nodes.check_platform(grant)
        device_nodes.check_mig_management(grant)
        completeness.check(grant)
        if grant.request.options.requirements:
            from gpuhook.vendors.nvidia import requirements  # noqa: PLC0415 - many images have none

            requirements.check(grant)
        if grant.request.options.mps:
            from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - few share devices by MPS

            mps.check(grant)

    def only_by_runtime(self, grant: "Grant", config: "Config") -> str:
        if not config.mps_devices:
            return ""
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - as in check

        shared = [device.label for device in grant.devices if mps.shares(config, grant, device)]
        if not shared:
            return ""
        return f"GPU {listed_names(shared)} is shared by MPS, and only gpu-py makes clients of it"

    def warnings(self, grant: "Grant") -> list[str]:
        return [*completeness.warnings(grant), *super().warnings(grant)]

    def nodes(self, grant: "Grant") -> "list[tuple[DeviceNode, str]]":
        return device_nodes.nodes(grant)

    def rules(self, grant: "Grant") -> "dict[tuple[int, int], str]":
        return device_nodes.management_rules(grant)

    def memory_limiter(self, grant: "Grant", config: "Config") -> "MemoryLimiter":
        from gpuhook.vendors.nvidia.nvml_limiter import NvmlLimiter  # noqa: PLC0415 - few containers have limits

        return NvmlLimiter(grant, config)

    def environment(self, grant: "Grant") -> "list[EnvironmentSetting]":
        if not grant.request.options.mps:
            return []
        from gpuhook.vendors.nvidia import mps  # noqa: PLC0415 - as in check

        return mps.environment(grant)

    def examine(self, root: "Rootfs", config: "Config") -> "Record | None":
        if not root.exists(config.cuda_compat_root):
            return None
        from gpuhook.vendors.nvidia import cuda_compat  # noqa: PLC0415 - NVIDIA's images have it

        return cuda_compat.find_newer(root, config) if cuda_compat.wanted(config) else None

    def edits(self, grant: "Grant", image: "Image") -> "list[Operation]":
        from gpuhook.vendors.nvidia import edits  # noqa: PLC0415 - as in look

        return edits.edits(grant, image)


def _tegra(folder: str, nodes: "list[str]", more: str) -> "list[Any]":
    """Return Tegra's lists and all nodes, any of which they may name; [] without lists.

    ``more`` is a folder with further nodes.
    """
    names = listed(folder)
    lists = [[name, status(f"{folder}/{name}")] for name in names]
    return [lists, nodes, status(more)] if names else []


def _mig_instances(folder: str) -> "list[Any]":
    """Return the names of all GPU and compute instances.

    The inode is included, to detect an instance that was destroyed and created again.
    """
    found: list[Any] = []
    for gpu in listed(folder):
        mig = f"{folder}/{gpu}/mig"
        for instance in listed(mig) if _may_have_folders(mig) else ():
            path = f"{mig}/{instance}"
            found.append([gpu, instance, _inode(path), listed(path)])
    return found


def _may_have_folders(path: str) -> bool:
    """Return whether a folder may have subfolders: each adds a link to it, ``..``.

    It has two links without subfolders, and one on filesystems that don't count links.
    """
    try:
        return os.stat(path).st_nlink != 2
    except OSError:
        return False


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


VENDOR = Nvidia()
