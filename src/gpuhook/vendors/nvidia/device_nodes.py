"""Device nodes for a container, with reasons: control nodes, GPUs, MIG, IMEX, features.

Pure: reads nothing.
"""

from gpuhook.base.errors import RequestError, UnknownDeviceError, shown
from gpuhook.core.contract import existing
from gpuhook.vendors.nvidia.model import (
    CAPS_FOLDER,
    CONTROL,
    CONTROL_NODES,
    IMEX_FOLDER,
    TITLES,
    selection,
)
from gpuhook.vendors.nvidia.variables import (
    CSV_MOUNTS,
    IMEX_CHANNELS,
    MIG_CONFIG,
    MIG_MONITOR,
    feature_variable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode
    from gpuhook.vendors.nvidia.model import NvidiaInventory, Selection
    from gpuhook.vendors.nvidia.variables import NvidiaOptions

_GRAPHICS = frozenset({"graphics", "display"})

# feature -> folder of its nodes, and the prefixes of their names.
_FEATURE_NODES = {
    "gds": (("/dev", "nvidia-fs"),),
    "mofed": (("/dev/infiniband", "uverbs"), ("/dev/infiniband", "rdma_cm")),
    "gdrcopy": (("/dev", "gdrdrv"),),
    "nvswitch": (("/dev", "nvidia-nvswitch"),),
}


def nodes(grant: "Grant") -> "list[tuple[DeviceNode, str]]":
    """Return the nodes to mount, without duplicates; UnknownDeviceError if one is missing.

    Missing control nodes are left out: not every driver has them all.
    """
    options, inventory = grant.request.options, grant.inventory
    if inventory.platform:
        return _of_platform(grant)
    selected = selection(inventory, grant.devices)
    wanted: dict[str, str] = {}
    for path, reason in (
        *_control(options),
        *_gpus(options, selected),
        *([] if _managed(options) else _mig(selected)),
        *_features(options, inventory),
    ):
        wanted.setdefault(path, reason)
    return existing(wanted, inventory.nodes) + list(_imex(options, inventory))


def _of_platform(grant: "Grant") -> "list[tuple[DeviceNode, str]]":
    """Return the devices' nodes, and for a request of all lists the nodes of further lists."""
    wanted = {path: f"GPU {device.label}" for device in grant.devices for path in device.nodes}
    if grant.devices and CSV_MOUNTS in grant.request.options.features:
        for node in grant.inventory.nodes:
            wanted.setdefault(node.path, "every list is asked for")
    return existing(wanted, grant.inventory.nodes)


def _control(options: "NvidiaOptions") -> "Iterator[tuple[str, str]]":
    yield CONTROL.path, "driver control"
    for capability in options.capabilities:
        for node in CONTROL_NODES:
            if capability in node.capabilities:
                yield node.path, capability


def _gpus(options: "NvidiaOptions", selected: "Selection") -> "Iterator[tuple[str, str]]":
    whole = set(selected.uuids)
    drawing = {gpu.uuid for gpu, mig in selected.migs if mig.has_graphics}
    parts_only = {gpu.uuid for gpu, _ in selected.migs} - whole - drawing
    for gpu in selected.gpus:
        yield gpu.path, f"GPU {gpu.index}"
        if _GRAPHICS.intersection(options.capabilities) and gpu.uuid not in parts_only:
            for path in gpu.drm:
                yield path, f"graphics on GPU {gpu.index}"


def _mig(selected: "Selection") -> "Iterator[tuple[str, str]]":
    for gpu, mig in selected.migs:
        for path in mig.paths:
            yield path, f"MIG device {gpu.index}:{mig.index}"


def _features(
    options: "NvidiaOptions", inventory: "NvidiaInventory"
) -> "Iterator[tuple[str, str]]":
    for node in inventory.nodes if options.features else ():
        feature = feature_of(node.path)
        if feature is not None and feature in options.features:
            yield node.path, f"{feature_variable(feature)}=enabled"


def _imex(
    options: "NvidiaOptions", inventory: "NvidiaInventory"
) -> "Iterator[tuple[DeviceNode, str]]":
    for channel in options.imex_channels:
        node = inventory.node(f"{IMEX_FOLDER}/channel{channel}")
        if node is None:  # protects: channel-node
            raise UnknownDeviceError(
                f"This host has no IMEX channel {channel}",
                f"Request one that `ls {IMEX_FOLDER}` shows, or make it with nvidia-modprobe",
            )
        yield node, f"IMEX channel {channel}"


def check_platform(grant: "Grant") -> None:
    """Refuse requests that only NVIDIA's driver for Linux can meet: MIG, IMEX channels."""
    if not grant.inventory.platform:
        return
    title, options = TITLES[grant.inventory.platform], grant.request.options
    for name, value in ((MIG_CONFIG, options.mig_config), (MIG_MONITOR, options.mig_monitor)):
        if value is not None:
            raise RequestError(f"{name} is set, and {title} has no MIG", f"Unset {name}")
    if options.imex_channels:
        raise UnknownDeviceError(f"{title} has no IMEX channels", f"Unset {IMEX_CHANNELS}")


def check_mig_management(grant: "Grant") -> None:
    """Refuse it to a container with only parts of GPUs: MIG management affects whole GPUs."""
    selected = selection(grant.inventory, grant.devices)
    partial = bool(selected.migs) and len(selected.gpus) < len(grant.inventory.gpus)
    options = grant.request.options
    for name, value in ((MIG_CONFIG, options.mig_config), (MIG_MONITOR, options.mig_monitor)):
        if value is not None and partial:
            raise RequestError(
                f"{name} is set for a container with single MIG devices",
                f"Request all GPUs, or unset {name}",
            )
        if value is not None and value != "all":
            raise RequestError(
                f"{name} is {shown(value)}, and MIG is managed as a whole",
                f"Set {name}=all or unset it",
            )


def manages_mig(grant: "Grant") -> bool:
    """Tell whether the container gets the folder of capability nodes, instead of single ones.

    It will create instances, which get their nodes later.
    """
    return _managed(grant.request.options) and _caps_major(grant.inventory) is not None


def _managed(options: "NvidiaOptions") -> bool:
    return options.mig_config is not None or options.mig_monitor is not None


def _caps_major(inventory: "NvidiaInventory") -> int | None:
    """Return the major of the capability nodes, None if there are none."""
    return next((n.major for n in inventory.nodes if n.path.startswith(CAPS_FOLDER + "/")), None)


def management_rules(grant: "Grant") -> dict[tuple[int, int], str]:
    """Return (major, minor) of all devices that a container needs for managing MIG.

    These are more than exist: it will create instances, and use them without a restart.
    """
    options, major = grant.request.options, _caps_major(grant.inventory)
    if not _managed(options) or major is None:
        return {}
    selected = selection(grant.inventory, grant.devices)
    given = existing(dict(_mig(selected)), grant.inventory.nodes)
    pairs = {node.numbers: reason for node, reason in given}
    settings = (("config", options.mig_config), ("monitor", options.mig_monitor))
    managed = [name for name, value in settings if value is not None]
    prefixes = tuple(f"gpu{gpu.minor}/" for gpu in selected.gpus)
    for line in grant.inventory.mig_minors.removesuffix("\n").split("\n"):
        key, _, minor = line.partition(" ")
        if key in managed or key.startswith(prefixes):
            pairs.setdefault((major, int(minor)), "management of MIG")
    return pairs


def feature_of(path: str) -> str | None:
    """Return the feature of a device node, None for the driver's other nodes."""
    folder, _, name = path.rpartition("/")
    for feature, places in _FEATURE_NODES.items():
        if any(folder == where and name.startswith(prefix) for where, prefix in places):
            return feature
    return None


def feature_node_paths(root: "Rootfs") -> "Iterator[str]":
    """Yield the paths of all features' nodes below the driver root."""
    for folder in ("/dev", "/dev/infiniband"):
        for name in root.list_folder(folder):
            if feature_of(f"{folder}/{name}"):
                yield f"{folder}/{name}"
