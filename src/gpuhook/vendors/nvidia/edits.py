"""Operations for NVIDIA's driver beyond device nodes: files, links, masks, the loader's cache.

Pure: reads nothing, changes nothing.
"""

import os

from gpuhook.base.loader import layout
from gpuhook.base.loader.layout import cache_flags, winners
from gpuhook.base.names import machine_name
from gpuhook.core.inventory.model import SOCKET
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    SOCKET_OPTIONS,
    BindFile,
    BindPart,
    BindSocket,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.vendors.nvidia import completeness, device_nodes, own_files
from gpuhook.vendors.nvidia.model import (  # fmt: skip
    ALIAS,
    CAPS_FOLDER,
    EVERYTHING,
    KINDS32,
    LINKED,
    MANIFEST32,
    selection,
)
from gpuhook.vendors.nvidia.names import NAME
from gpuhook.vendors.nvidia.own_files import PROC_DRIVER, MaskProc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.loader.layout import Layout
    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode, DriverFile
    from gpuhook.core.plan.image import Image
    from gpuhook.core.plan.operations import Operation, _Writer
    from gpuhook.core.plan.writer import Aliases
    from gpuhook.vendors.nvidia.cuda_compat import CudaCompat
    from gpuhook.vendors.nvidia.model import NvidiaInventory, Selection
    from gpuhook.vendors.nvidia.variables import NvidiaOptions

_COPY_MODE = 0o644
# driver capability -> the library sets that it includes (video can't decode without CUDA's).
_LIBRARY_SETS = {
    "utility": ("utility",),
    "compute": ("compute",),
    "video": ("video", "compute"),
    "graphics": ("graphics",),
    "display": ("graphics",),
    "ngx": ("ngx",),
    "compat32": (),
}

# The sets that together include unlisted libraries: all capabilities of 64-bit programs.
_EVERY_SET = frozenset(_LIBRARY_SETS) - {"compat32"}

# name of a library's file -> (link next to it, the link's target; None: the file itself).
_EXTRA_LINKS: "dict[str, tuple[str, str | None]]" = {
    "libcuda.so": ("libcuda.so", "libcuda.so.1"),
    "libGLX_nvidia.so": ("libGLX_indirect.so.0", None),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    "libnvidia-vulkan-producer.so": ("libnvidia-vulkan-producer.so", None),
}

# CUDA uses the allocator as well; only with graphics it is also the GBM backend.
_GBM_LIBRARY = "libnvidia-allocator.so."
_GBM_LINK = ("gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1")

COMPAT_CONFIG = "/etc/ld.so.conf.d/00-compat-gpuhook.conf"


def edits(grant: "Grant", image: "Image") -> "list[Operation]":
    """Return the operations, in order; the loader's cache last."""
    options, inventory = grant.request.options, grant.inventory
    selected = selection(inventory, grant.devices)
    files = list(_wanted_files(options, inventory))
    libraries = [(file, folder) for file in files if (folder := _folder(file, image.layout))]
    if inventory.platform:
        return list(_of_platform(inventory, files, libraries, image))
    compat = _compat(options, inventory, image)
    # protects: proc-covered
    operations: list[Operation] = [
        _proc(options, inventory, selected),
        *_file_binds(inventory, files, libraries),
        *_caps_folder(grant),
        *_drm_links(selected, grant.nodes),
        *_links(libraries),
        *_linked(files, libraries),
        *_gbm_link(options, libraries),
        *_profile(options, selected),
        *_mps(grant),
    ]
    if compat:
        reason = f"CUDA {compat.version} of the image is newer than the driver's"
        operations.append(WriteFile(COMPAT_CONFIG, compat.folder + "\n", 0o644, reason))
    if libraries and image.layout.uses_cache:
        operations.append(_ld_cache(libraries, compat, image.ldconfig))
    return operations


def _of_platform(
    inventory: "NvidiaInventory",
    files: "list[DriverFile]",
    libraries: "list[tuple[DriverFile, str]]",
    image: "Image",
) -> "Iterator[Operation]":
    """Yield the operations for a platform whose files all have fixed destinations."""
    title = inventory.platform
    listed = {file.path: file.target for file in files if file.kind == "link"}
    yield from _file_binds(inventory, [each for each in files if each.kind != "link"], libraries)
    for link, target in listed.items():
        yield Symlink(link, target, replace=False, reason=title)
    for op in (*_links(libraries), *_default_links(libraries, image.layout, title)):
        if op.destination not in listed:
            yield op
    for file in files:
        if file.kind == "binary":
            link = f"/usr/bin/{_name(file)}"
            yield Symlink(link, file.target, replace=False, reason=title)
    if libraries and image.layout.uses_cache:
        yield _ld_cache(libraries, None, image.ldconfig)


def _default_links(
    libraries: "list[tuple[DriverFile, str]]", layout: "Layout", reason: str
) -> "Iterator[Symlink]":
    """Yield a link for each SONAME in the folder that the loader searches by default.

    For mode spec, which has no cache, and for the image's own ldconfig.
    """
    done: set[str] = set()
    for folder, files in _by_folder(libraries).items():
        place = layout.folder_of(files[0].path, bits32=False)
        if place is None or place == folder:
            continue
        names = winners([(_name(file), file.soname) for file in files])
        for link, _, target in _extra_links(files):
            names.setdefault(link, names.get(target, target))
        for name, file in names.items():
            if name not in done:
                done.add(name)
                yield Symlink(f"{place}/{name}", f"{folder}/{file}", replace=True, reason=reason)


def _wanted_files(options: "NvidiaOptions", inventory: "NvidiaInventory") -> "Iterator[DriverFile]":
    """Yield the files to mount, each destination once, in the inventory's order."""
    sets = {name for capability in options.capabilities for name in _LIBRARY_SETS[capability]}
    sets.update(options.features)
    if _EVERY_SET.issubset(options.capabilities):
        sets.add(EVERYTHING)
    seen = set()
    for file in inventory.files:
        if file.kind in KINDS32 and "compat32" not in options.capabilities:
            continue
        by = options.capabilities if file.kind == "binary" else sets
        if file.capability and file.capability not in by:
            continue
        if (file.kind, file.target) not in seen:
            seen.add((file.kind, file.target))
            yield file


def _folder(file: "DriverFile", layout: "Layout") -> str | None:
    """Return the container's folder for a library, None for other files."""
    if not file.kind.startswith("library"):
        return None
    if file.target.startswith("/"):
        return os.path.dirname(file.target)
    return layout.folder_of(file.path, bits32=file.kind == "library32")


def _name(file: "DriverFile") -> str:
    """Return the name of a library's file."""
    return file.target.rpartition("/")[2]


def _file_binds(
    inventory: "NvidiaInventory",
    files: "list[DriverFile]",
    libraries: "list[tuple[DriverFile, str]]",
) -> "Iterator[Operation]":
    places = _places(libraries)
    aliases = [(each.target, places.get(each.path)) for each in files if each.kind == ALIAS]
    known = tuple((name, place) for name, place in aliases if place)
    has_32 = any(file.kind == "library32" for file, _ in libraries)
    for file in files:
        # A container without a folder for 32-bit libraries gets none of them.
        if file.kind in (ALIAS, LINKED) or (file.kind == MANIFEST32 and not has_32):
            continue
        destination = file.target
        if file.kind.startswith("library"):
            if file.path not in places:
                continue
            destination = places[file.path]
        reason = file.capability or file.kind
        if file.kind == SOCKET:
            yield BindSocket(inventory.root, file.path, destination, SOCKET_OPTIONS, reason)
            continue
        kind = BindPart if _is_part(file) else BindFile
        bind = kind(inventory.root, file.path, destination, FILE_OPTIONS, reason)
        if file.content:
            yield WriteCopy(bind, _content(file, libraries), known)
        else:
            yield bind


def _is_part(file: "DriverFile") -> bool:
    """Tell whether the driver works without a library or a program."""
    if file.kind == "library":
        return _name(file).partition(".so")[0] not in completeness.NEEDED
    return file.kind in ("library32", "binary")


def _content(file: "DriverFile", libraries: "list[tuple[DriverFile, str]]") -> str:
    """Return a manifest's content in a container; for 32-bit programs it has absolute paths.

    With a bare name, 64-bit programs would load their own library from it.
    """
    content = file.content
    for library, folder in libraries if file.kind == MANIFEST32 else ():
        if library.kind == "library32":
            for name in {library.soname or library.target, library.target}:
                content = content.replace(f'"{name}"', f'"{folder}/{name}"')
    return content


class WriteCopy(WriteFile):
    """Copy of a driver's file, with library names that are valid in the container.

    ``file`` is the mount of the original, for formats that can only mount. ``aliases`` are paths
    in the file, each with the path of that library in the container: such a format mounts the
    library there as well.
    """

    def __init__(self, file: BindFile, content: str, aliases: "Aliases" = ()) -> None:
        super().__init__(file.destination, content, _COPY_MODE, file.reason)
        self.root = file.root
        self.file = file
        self.aliases = aliases

    def is_usable(self, host: "Rootfs") -> bool:
        """Tell whether the original can be mounted."""
        done = self.file.is_usable(host)
        self.left_out = self.file.left_out
        return done

    def describe(self) -> str:
        """Describe the copy and its source."""
        return f"write {self.destination}, a copy of {self.file.source}"

    def to_json(self) -> "dict[str, Any]":
        """Add the source of the copy."""
        return {**super().to_json(), "source": self.file.source}

    def write_to(self, writer: "_Writer") -> None:
        """Write the operation as a copy."""
        writer.copy(self.file, self.aliases)


def _caps_folder(grant: "Grant") -> "Iterator[Operation]":
    if device_nodes.manages_mig(grant):
        # The whole folder, because instances that are created later get their nodes later.
        options = ("nosuid", "noexec")
        yield BindFile(grant.inventory.root, CAPS_FOLDER, CAPS_FOLDER, options, "management of MIG")


def _drm_links(
    selection: "Selection", nodes: "list[tuple[DeviceNode, str]]"
) -> "Iterator[Operation]":
    """Yield the by-path links that udev makes, for the DRM nodes that are mounted."""
    given = {node.path for node, _ in nodes}
    for gpu in selection.gpus:
        for path in gpu.drm:
            kind = "render" if path.startswith("/dev/dri/renderD") else "card"
            if path in given and not path.startswith("/dev/dri/controlD"):
                link = f"/dev/dri/by-path/pci-{gpu.kernel_bus_id}-{kind}"
                target = "../" + path.rpartition("/")[2]
                yield Symlink(link, target, replace=False, reason=f"graphics on GPU {gpu.index}")


def _by_folder(libraries: "list[tuple[DriverFile, str]]") -> "dict[str, list[DriverFile]]":
    """Return the libraries by folder: a folder holds one ABI."""
    folders: dict[str, list[DriverFile]] = {}
    for file, folder in libraries:
        folders.setdefault(folder, []).append(file)
    return folders


def _links(libraries: "list[tuple[DriverFile, str]]") -> "Iterator[Symlink]":
    """Yield the SONAME links that ldconfig would make, then further ones."""
    for folder, files in _by_folder(libraries).items():
        capability = {_name(file): file.capability or file.kind for file in files}
        names = [(_name(file), file.soname) for file in files]
        for link, name in layout.links(names).items():
            yield Symlink(f"{folder}/{link}", name, replace=True, reason=capability[name])
        for link, name, target in _extra_links(files):
            path, reason = f"{folder}/{link}", capability[name]
            yield Symlink(path, target, replace=False, renewed=True, reason=reason)


def _linked(
    files: "list[DriverFile]", libraries: "list[tuple[DriverFile, str]]"
) -> "Iterator[Symlink]":
    """Yield links at the paths where the driver's programs search for its libraries."""
    linked = [file for file in files if file.kind == LINKED]
    places = _places(libraries) if linked else {}
    for file in linked:
        place = places.get(file.path)
        if place and os.path.dirname(place) != os.path.dirname(file.target):
            yield Symlink(file.target, place, replace=False, reason=file.capability)


def _places(libraries: "list[tuple[DriverFile, str]]") -> dict[str, str]:
    """Return the libraries' paths in a container, by their paths on the host."""
    return {file.path: f"{folder}/{_name(file)}" for file, folder in libraries}


def _extra_links(files: "list[DriverFile]") -> "Iterator[tuple[str, str, str]]":
    """Yield link, file and target for the further links that programs expect."""
    for file in files:
        name = _name(file)
        stem = name.partition(".so.")[0] + ".so"
        if stem in _EXTRA_LINKS and stem != name:
            link, target = _EXTRA_LINKS[stem]
            yield link, name, target if target and target == file.soname else name


def _gbm_link(
    options: "NvidiaOptions", libraries: "list[tuple[DriverFile, str]]"
) -> "Iterator[Operation]":
    """Yield the link through which GBM finds the driver."""
    for file, folder in libraries:
        if file.target.startswith(_GBM_LIBRARY) and "graphics" in options.capabilities:
            name, target = _GBM_LINK
            path = f"{folder}/{name}"
            yield Symlink(path, target, replace=False, renewed=True, reason="graphics")


def _profile(options: "NvidiaOptions", selection: "Selection") -> "Iterator[Operation]":
    """Yield the profile that limits EGL to the container's GPUs."""
    if "graphics" in options.capabilities or "display" in options.capabilities:
        text = own_files.profile(gpu.minor for gpu in selection.gpus)
        if text is not None:
            mode = own_files.PROFILE_MODE
            yield WriteFile(own_files.PROFILE_PATH, text, mode, "graphics on only these GPUs")


def _mps(grant: "Grant") -> "list[Operation]":
    if not grant.request.options.mps:
        return []
    from gpuhook.vendors.nvidia import mps_mounts  # noqa: PLC0415 - MPS is rarely used

    return mps_mounts.operations(grant)


def _compat(
    options: "NvidiaOptions", inventory: "NvidiaInventory", image: "Image"
) -> "CudaCompat | None":
    """Return the image's newer CUDA if it should be used instead of the driver's."""
    compat: Any = image.brings.get(NAME)  # what cuda_compat.find_newer found
    if compat is None or "compute" not in options.capabilities:
        return None
    from gpuhook.vendors.nvidia import cuda_compat  # noqa: PLC0415 - the probe has imported it

    use = cuda_compat.decide(
        compat.version, inventory.driver_version, inventory.cuda_version, compat.note
    )
    return compat if use else None


def _ld_cache(
    libraries: "list[tuple[DriverFile, str]]", compat: "CudaCompat | None", ldconfig: str
) -> UpdateLdCache:
    machine = machine_name()
    entries = []
    native = cache_flags(machine, bits32=False)
    if compat is not None and native is not None:
        entries += [(name, f"{compat.folder}/{name}", native) for name in compat.libraries]
    for folder, files in _by_folder(libraries).items():
        flags = cache_flags(machine, bits32=files[0].kind == "library32")
        if flags is not None:
            names = [(_name(file), file.soname) for file in files]
            extra = [link for link, _, _ in _extra_links(files)]
            entries += layout.cache_entries(folder, names, flags, extra)
    return UpdateLdCache(tuple(entries), "driver libraries", ldconfig)


def _proc(
    options: "NvidiaOptions", inventory: "NvidiaInventory", selection: "Selection"
) -> MaskProc:
    binds = [f"gpus/{gpu.kernel_bus_id}" for gpu in selection.gpus]  # protects: proc-selected
    if options.mig_config is not None:
        binds.append("capabilities/mig/config")
    if options.mig_monitor is not None:
        binds.append("capabilities/mig/monitor")
    if options.mig_config is not None or options.mig_monitor is not None:
        binds += [f"capabilities/gpu{gpu.minor}" for gpu in selection.gpus]
    else:
        for gpu, mig in selection.migs:
            instance = f"capabilities/gpu{gpu.minor}/mig/gi{mig.gi}"
            binds += [f"{instance}/access", f"{instance}/ci{mig.ci}/access"]
    files = ("params", "version", "registry")
    unique = tuple(dict.fromkeys(binds))
    return MaskProc(inventory.root, files, unique, f"{PROC_DRIVER} shows only selected GPUs")
