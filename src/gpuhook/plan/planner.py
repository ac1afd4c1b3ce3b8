"""From a request and an inventory to the ordered list of operations that make it true.

Pure: looks at nothing, changes nothing. The runtime takes the device rules from it, the
hook executes it, ``gpuhook explain`` prints it.
"""

import os

from gpuhook.loader import layout
from gpuhook.loader.layout import cache_flags
from gpuhook.plan.operations import (
    FILE_OPTIONS,
    IPC_OPTIONS,
    PROC_DRIVER,
    AllowDevice,
    BindDevice,
    BindFile,
    MaskProc,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.vendors.nvidia import cuda_compat, device_nodes, own_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuhook.inventory.model import DriverFile, Inventory, Node
    from gpuhook.inventory.selection import Selection
    from gpuhook.loader.layout import Layout
    from gpuhook.plan.image import CudaCompat, Image
    from gpuhook.plan.operations import Operation
    from gpuhook.request.reader import Request

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

# name of a library's file -> (link beside it, what the link says; None: the file itself).
_EXTRA_LINKS: "dict[str, tuple[str, str | None]]" = {
    "libcuda.so": ("libcuda.so", "libcuda.so.1"),
    "libGLX_nvidia.so": ("libGLX_indirect.so.0", None),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    "libnvidia-vulkan-producer.so": ("libnvidia-vulkan-producer.so", None),
}

# The allocator is CUDA's as well; only with graphics it is also the GBM backend.
_GBM_LIBRARY = "libnvidia-allocator.so."
_GBM_LINK = ("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1")

COMPAT_CONFIG = "/etc/ld.so.conf.d/00-compat-gpuhook.conf"


class Plan:
    """What will be done, in order."""

    def __init__(self, operations: "list[Operation]") -> None:
        self.operations = operations

    @property
    def devices(self) -> list[tuple[int, int]]:
        """The (major, minor) pairs that the container may open."""
        return [(op.major, op.minor) for op in self.operations if isinstance(op, AllowDevice)]


def make_plan(
    request: "Request", inventory: "Inventory", selection: "Selection", image: "Image"
) -> Plan:
    """Return the operations that give the container what was selected for it.

    Raises UnknownDeviceError where an IMEX channel doesn't exist.
    """
    nodes = device_nodes.nodes(request, inventory, selection)
    allowed = device_nodes.allowed(request, inventory, selection, nodes)
    files = list(_wanted_files(request, inventory))
    libraries = [(file, folder) for file in files if (folder := _folder(file, image.layout))]
    compat = _compat(request, inventory, image)
    operations: list[Operation] = [
        *(AllowDevice(pair, reason) for pair, reason in allowed.items()),
        _proc(request, inventory, selection),
        *_file_binds(inventory, files, image.layout),
        *_device_binds(request, inventory, nodes),
        *_drm_links(selection, nodes),
        *_links(libraries),
        *_gbm_link(request, libraries),
        *_profile(request, selection),
    ]
    if compat:
        reason = f"CUDA {compat.version} of the image is newer than the driver's"
        operations.append(WriteFile(COMPAT_CONFIG, compat.folder + "\n", 0o644, reason))
    if libraries and image.layout.uses_cache:
        operations.append(_ld_cache(libraries, compat, image.ldconfig))
    return Plan(operations)


def _wanted_files(request: "Request", inventory: "Inventory") -> "Iterator[DriverFile]":
    """Yield the files to mount, each destination once, in the inventory's order."""
    sets = {name for capability in request.capabilities for name in _LIBRARY_SETS[capability]}
    sets.update(request.features)
    seen = set()
    for file in inventory.files:
        if file.kind == "library32" and "compat32" not in request.capabilities:
            continue
        by = request.capabilities if file.kind == "binary" else sets
        if file.capability and file.capability not in by:
            continue
        if (file.kind, file.target) not in seen:
            seen.add((file.kind, file.target))
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


def _device_binds(
    request: "Request", inventory: "Inventory", nodes: "list[tuple[Node, str]]"
) -> "Iterator[Operation]":
    managed = request.mig_config is not None or request.mig_monitor is not None
    caps = device_nodes.CAPS_FOLDER
    if managed and any(node.path.startswith(caps + "/") for node in inventory.nodes):
        # The folder, because instances that are made later get nodes later.
        yield BindFile(inventory.root, caps, caps, ("nosuid", "noexec"), "management of MIG")
    for node, reason in nodes:
        if not (managed and node.path.startswith(caps + "/")):
            yield BindDevice(inventory.root, node.path, (node.major, node.minor), reason)


def _drm_links(selection: "Selection", nodes: "list[tuple[Node, str]]") -> "Iterator[Operation]":
    """Yield the by-path links that udev makes, for the DRM nodes that are given."""
    given = {node.path for node, _ in nodes}
    for gpu in selection.gpus:
        for path in gpu.drm:
            kind = "render" if path.startswith("/dev/dri/renderD") else "card"
            if path in given and not path.startswith("/dev/dri/controlD"):
                link = f"/dev/dri/by-path/pci-{gpu.kernel_bus_id}-{kind}"
                target = "../" + path.rpartition("/")[2]
                yield Symlink(link, target, replace=False, reason=f"graphics on GPU {gpu.index}")


def _by_folder(libraries: "list[tuple[DriverFile, str]]") -> "dict[str, list[DriverFile]]":
    """Return the libraries of each folder: a folder holds one ABI."""
    folders: dict[str, list[DriverFile]] = {}
    for file, folder in libraries:
        folders.setdefault(folder, []).append(file)
    return folders


def _links(libraries: "list[tuple[DriverFile, str]]") -> "Iterator[Operation]":
    """Yield the SONAME links that ldconfig would make, then those that it wouldn't."""
    for folder, files in _by_folder(libraries).items():
        capability = {file.target: file.capability for file in files}
        names = [(file.target, file.soname) for file in files]
        for link, name in layout.links(names).items():
            yield Symlink(f"{folder}/{link}", name, replace=True, reason=capability[name])
        for link, name, target in _extra_links(files):
            yield Symlink(f"{folder}/{link}", target, replace=False, reason=capability[name])


def _extra_links(files: "list[DriverFile]") -> "Iterator[tuple[str, str, str]]":
    """Yield link, file and the link's content for the links that programs expect besides."""
    for file in files:
        stem = file.target.partition(".so.")[0] + ".so"
        if stem in _EXTRA_LINKS:
            link, target = _EXTRA_LINKS[stem]
            yield link, file.target, target or file.target


def _gbm_link(
    request: "Request", libraries: "list[tuple[DriverFile, str]]"
) -> "Iterator[Operation]":
    """Yield the link by which GBM finds the driver."""
    for file, folder in libraries:
        if file.target.startswith(_GBM_LIBRARY) and "graphics" in request.capabilities:
            name, target = _GBM_LINK
            yield Symlink(f"{folder}/{name}", target, replace=False, reason="graphics")


def _profile(request: "Request", selection: "Selection") -> "Iterator[Operation]":
    """Yield the profile that limits EGL to the container's GPUs."""
    if "graphics" in request.capabilities or "display" in request.capabilities:
        text = own_files.profile(gpu.minor for gpu in selection.gpus)
        if text is not None:
            mode = own_files.PROFILE_MODE
            yield WriteFile(own_files.PROFILE_PATH, text, mode, "graphics on these GPUs alone")


def _compat(request: "Request", inventory: "Inventory", image: "Image") -> "CudaCompat | None":
    """Return the image's newer CUDA where it should be used instead of the driver's."""
    compat = image.compat
    if compat is None or "compute" not in request.capabilities:
        return None
    use = cuda_compat.decide(
        compat.version, inventory.driver_version, inventory.cuda_version, compat.note
    )
    return compat if use else None


def _ld_cache(
    libraries: "list[tuple[DriverFile, str]]", compat: "CudaCompat | None", ldconfig: str
) -> UpdateLdCache:
    machine = os.uname().machine
    entries = []
    native = cache_flags(machine, bits32=False)
    if compat is not None and native is not None:
        entries += [(name, f"{compat.folder}/{name}", native) for name in compat.libraries]
    for folder, files in _by_folder(libraries).items():
        flags = cache_flags(machine, bits32=files[0].kind == "library32")
        if flags is not None:
            names = [(file.target, file.soname) for file in files]
            extra = [link for link, _, _ in _extra_links(files)]
            entries += layout.cache_entries(folder, names, flags, extra)
    return UpdateLdCache(tuple(entries), "driver libraries", ldconfig)


def _proc(request: "Request", inventory: "Inventory", selection: "Selection") -> MaskProc:
    binds = [f"gpus/{gpu.kernel_bus_id}" for gpu in selection.gpus]
    if request.mig_config is not None:
        binds.append("capabilities/mig/config")
    if request.mig_monitor is not None:
        binds.append("capabilities/mig/monitor")
    if request.mig_config is not None or request.mig_monitor is not None:
        binds += [f"capabilities/gpu{gpu.minor}" for gpu in selection.gpus]
    else:
        for gpu, mig in selection.migs:
            instance = f"capabilities/gpu{gpu.minor}/mig/gi{mig.gi}"
            binds += [f"{instance}/access", f"{instance}/ci{mig.ci}/access"]
    files = ("params", "version", "registry")
    unique = tuple(dict.fromkeys(binds))
    return MaskProc(inventory.root, files, unique, f"{PROC_DRIVER} shows selected GPUs alone")
