"""From a request and an inventory to the ordered list of operations that make it true.

Pure: looks at nothing, changes nothing. The runtime takes the device rules from it, the
hook executes it, ``gpuhook explain`` prints it.

Hot path: imports operations.
"""

import os

from gpuhook import driver_files
from gpuhook.operations import (
    FILE_OPTIONS,
    IPC_OPTIONS,
    PROC_DRIVER,
    AllowDevice,
    BindDevice,
    BindFile,
    MaskProc,
    Symlink,
    UpdateLdCache,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.inventory import DriverFile, Gpu, Inventory, Node
    from gpuhook.layout import Layout
    from gpuhook.operations import Operation
    from gpuhook.request import Request
    from gpuhook.selection import Selection

# driver capability -> the library sets it brings (video can't decode without CUDA's).
_LIBRARY_SETS = {
    "utility": ("utility",),
    "compute": ("compute",),
    "video": ("video", "compute"),
    "graphics": ("graphics",),
    "display": ("graphics",),
    "ngx": ("ngx",),
    "compat32": (),
}

# driver capability -> the control nodes it needs beside /dev/nvidiactl.
_CONTROL_NODES = {
    "compute": ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "video": ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "display": ("/dev/nvidia-modeset",),
}

# name of a library's file -> (link beside it, what the link says; None: the file itself).
_DEVELOPMENT_LINKS = {
    "libcuda.so": ("libcuda.so", "libcuda.so.1"),
    "libGLX_nvidia.so": ("libGLX_indirect.so.0", None),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
}


class Plan:
    """What will be done, in order."""

    def __init__(self, operations: "list[Operation]") -> None:
        self.operations = operations

    @property
    def devices(self) -> list[tuple[int, int]]:
        """The (major, minor) pairs that the container may open."""
        return [(op.major, op.minor) for op in self.operations if isinstance(op, AllowDevice)]


def make_plan(
    request: "Request", inventory: "Inventory", selection: "Selection", layout: "Layout"
) -> Plan:
    """Return the operations that give the container what was selected for it."""
    nodes = list(_nodes(request, inventory, selection))
    operations: list[Operation] = [
        AllowDevice((node.major, node.minor), reason) for node, reason in nodes
    ]
    operations.append(_proc(inventory, selection))
    files = list(_wanted_files(request, inventory))
    operations += _file_binds(inventory, files, layout)
    operations += [
        BindDevice(inventory.root, node.path, (node.major, node.minor), reason)
        for node, reason in nodes
    ]
    libraries = [(file, folder) for file in files if (folder := _folder(file, layout))]
    operations += _links(libraries)
    if libraries and layout.uses_cache:
        operations.append(_ld_cache(libraries))
    return Plan(operations)


def _nodes(
    request: "Request", inventory: "Inventory", selection: "Selection"
) -> "Iterator[tuple[Node, str]]":
    """Yield the device nodes to give, each once, with the reason."""
    wanted = {"/dev/nvidiactl": "driver control"}
    for capability in request.capabilities:
        for path in _CONTROL_NODES.get(capability, ()):
            wanted.setdefault(path, capability)
    for gpu in selection.gpus:
        wanted[f"/dev/nvidia{gpu.minor}"] = f"GPU {gpu.index}"
    for gpu, mig in selection.migs:
        for cap in (mig.gi_cap, mig.ci_cap):
            if cap is not None:
                wanted[f"/dev/nvidia-caps/nvidia-cap{cap}"] = f"MIG device {gpu.index}:{mig.index}"
    for path, reason in wanted.items():
        node = inventory.node(path)
        if node is not None:
            yield node, reason


def _wanted_files(request: "Request", inventory: "Inventory") -> "Iterator[DriverFile]":
    sets = {name for capability in request.capabilities for name in _LIBRARY_SETS[capability]}
    for file in inventory.files:
        if file.kind == "library32" and "compat32" not in request.capabilities:
            continue
        if file.kind == "binary":
            wanted = file.capability in request.capabilities
        else:
            wanted = file.capability in sets or not file.capability
        if wanted:
            yield file


def _folder(file: "DriverFile", layout: "Layout") -> str | None:
    """Return the container's folder for a library, None for other files."""
    if file.kind == "library":
        return layout.libraries
    if file.kind == "library32":
        return layout.libraries32
    return None


def _file_binds(
    inventory: "Inventory", files: "list[DriverFile]", layout: "Layout"
) -> "Iterator[Operation]":
    for file in files:
        destination = file.target
        if file.kind.startswith("library"):
            folder = _folder(file, layout)
            if folder is None:
                continue  # this container has no place for 32-bit libraries
            destination = f"{folder}/{file.target}"
        options = IPC_OPTIONS if file.kind == "ipc" else FILE_OPTIONS
        reason = file.capability or file.kind
        yield BindFile(inventory.root, file.path, destination, options, reason)


def _links(libraries: "list[tuple[DriverFile, str]]") -> "Iterator[Operation]":
    """Yield the SONAME links that ldconfig would make, then the three that it wouldn't."""
    for file, folder in libraries:
        if file.soname and file.soname != file.target:
            yield Symlink(
                f"{folder}/{file.soname}", file.target, replace=True, reason=file.capability
            )
    for file, folder in libraries:
        stem = file.target.partition(".so.")[0] + ".so"
        if stem in _DEVELOPMENT_LINKS:
            name, target = _DEVELOPMENT_LINKS[stem]
            yield Symlink(
                f"{folder}/{name}", target or file.target, replace=False, reason=file.capability
            )


def _ld_cache(libraries: "list[tuple[DriverFile, str]]") -> UpdateLdCache:
    machine = os.uname().machine
    entries = []
    for file, folder in libraries:
        name = file.soname or file.target
        flags = driver_files.cache_flags(machine, bits32=file.kind == "library32")
        if flags is not None:
            entries.append((name, f"{folder}/{name}", flags))
    return UpdateLdCache(tuple(entries), "driver libraries")


def _proc(inventory: "Inventory", selection: "Selection") -> MaskProc:
    binds = [f"gpus/{_proc_bus_id(gpu)}" for gpu in selection.gpus]
    for gpu, mig in selection.migs:
        instance = f"capabilities/gpu{gpu.minor}/mig/gi{mig.gi}"
        binds += [f"{instance}/access", f"{instance}/ci{mig.ci}/access"]
    files = ("params", "version", "registry")
    unique = tuple(dict.fromkeys(binds))
    return MaskProc(inventory.root, files, unique, f"{PROC_DRIVER} shows selected GPUs alone")


def _proc_bus_id(gpu: "Gpu") -> str:
    """Return the bus id as /proc/driver/nvidia/gpus spells it (0000:1b:00.0)."""
    domain, _, rest = gpu.pci_bus_id.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}"
