"""Which device nodes a container gets, and why: control nodes, GPUs, MIG, IMEX, features.

Pure: looks at nothing.
"""

from gpuhook.errors import UnknownDeviceError
from gpuhook.inventory.model import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.container.rootfs import Rootfs
    from gpuhook.inventory.model import Gpu, Inventory
    from gpuhook.inventory.selection import Selection
    from gpuhook.request.reader import Request

CAPS_FOLDER = "/dev/nvidia-caps"
IMEX_FOLDER = "/dev/nvidia-caps-imex-channels"
_GRAPHICS = frozenset({"graphics", "display"})

# feature -> folder of its nodes, and what their names begin with.
_FEATURE_NODES = {
    "gds": (("/dev", "nvidia-fs"),),
    "mofed": (("/dev/infiniband", "uverbs"), ("/dev/infiniband", "rdma_cm")),
    "gdrcopy": (("/dev", "gdrdrv"),),
    "nvswitch": (("/dev", "nvidia-nvswitch"),),
}

# driver capability -> the control nodes it needs beside /dev/nvidiactl.
_CONTROL_NODES = {
    "compute": ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "video": ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "display": ("/dev/nvidia-modeset",),
}


def nodes(
    request: "Request", inventory: "Inventory", selection: "Selection"
) -> "list[tuple[Node, str]]":
    """Return the nodes to give, each once, with the reason; UnknownDeviceError if one is missing.

    Control nodes that the machine doesn't have are left out: not every driver has them all.
    """
    wanted: dict[str, str] = {}
    for path, reason in (
        *_control(request),
        *_gpus(request, selection),
        *_mig(selection),
        *_features(request, inventory),
    ):
        wanted.setdefault(path, reason)
    there = {node.path: node for node in inventory.nodes}
    found = [(there[path], reason) for path, reason in wanted.items() if path in there]
    return found + list(_imex(request, inventory))


def _control(request: "Request") -> "Iterator[tuple[str, str]]":
    yield "/dev/nvidiactl", "driver control"
    for capability in request.capabilities:
        for path in _CONTROL_NODES.get(capability, ()):
            yield path, capability


def _gpus(request: "Request", selection: "Selection") -> "Iterator[tuple[str, str]]":
    parts_only = {gpu.uuid for gpu, _ in selection.migs} - set(selection.uuids)
    for gpu in selection.gpus:
        yield f"/dev/nvidia{gpu.minor}", f"GPU {gpu.index}"
        if _GRAPHICS.intersection(request.capabilities) and gpu.uuid not in parts_only:
            for path in gpu.drm:
                yield path, f"graphics on GPU {gpu.index}"


def _mig(selection: "Selection") -> "Iterator[tuple[str, str]]":
    for gpu, mig in selection.migs:
        for cap in (mig.gi_cap, mig.ci_cap):
            if cap is not None:
                yield f"{CAPS_FOLDER}/nvidia-cap{cap}", f"MIG device {gpu.index}:{mig.index}"


def _features(request: "Request", inventory: "Inventory") -> "Iterator[tuple[str, str]]":
    for node in inventory.nodes if request.features else ():
        feature = feature_of(node.path)
        if feature in request.features:
            yield node.path, f"NVIDIA_{str(feature).upper()}=enabled"


def _imex(request: "Request", inventory: "Inventory") -> "Iterator[tuple[Node, str]]":
    for channel in request.imex_channels:
        node = inventory.node(f"{IMEX_FOLDER}/channel{channel}")
        if node is None:
            raise UnknownDeviceError(
                f"This machine has no IMEX channel {channel}",
                f"Ask for one that `ls {IMEX_FOLDER}` shows, or make it with nvidia-modprobe",
            )
        yield node, f"IMEX channel {channel}"


def allowed(
    request: "Request",
    inventory: "Inventory",
    selection: "Selection",
    given: "list[tuple[Node, str]] | None" = None,
) -> dict[tuple[int, int], str]:
    """Return the (major, minor) of all that the container may open, each with the reason.

    ``given`` is what ``nodes`` returned, if it was asked already.
    """
    if given is None:
        given = nodes(request, inventory, selection)
    found = {(node.major, node.minor): reason for node, reason in given}
    for pair in mig_management_minors(request, inventory, selection.gpus):
        found.setdefault(pair, "management of MIG")
    return found


def mig_management_minors(
    request: "Request", inventory: "Inventory", gpus: "tuple[Gpu, ...]"
) -> list[tuple[int, int]]:
    """Return (major, minor) of all that a container that manages MIG must open.

    That are more than exist: it will make instances, and use them without a restart.
    """
    managed = [
        name
        for name, value in (("config", request.mig_config), ("monitor", request.mig_monitor))
        if value is not None
    ]
    major = next((n.major for n in inventory.nodes if n.path.startswith(CAPS_FOLDER + "/")), None)
    if not managed or major is None:
        return []
    prefixes = tuple(f"gpu{gpu.minor}/" for gpu in gpus)
    pairs = []
    for line in inventory.mig_minors.splitlines():
        key, _, minor = line.partition(" ")
        if key in managed or key.startswith(prefixes):
            pairs.append((major, int(minor)))
    return pairs


def feature_of(path: str) -> str | None:
    """Return the feature that a device node belongs to, None for the driver's other nodes."""
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
