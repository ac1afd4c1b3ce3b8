"""Check whether the driver is installed completely enough for a container.

A capability that can't work is refused; a missing part is a warning. A container without a GPU is
never refused: it may want the driver's other files.

Pure: reads nothing.
"""

from gpuhook.base.errors import DriverError, listed
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.model import EVERYTHING, MANIFEST, MODESET, UVM, WSL
from gpuhook.vendors.nvidia.variables import DRIVER_CAPABILITIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gpuhook.core.contract import Grant
    from gpuhook.core.inventory.model import DeviceNode, DriverFile
    from gpuhook.vendors.nvidia.model import NvidiaInventory
    from gpuhook.vendors.nvidia.variables import NvidiaOptions

MAKE_UVM = "nvidia-modprobe -u -c=0"

# driver capability -> the library that it requires, the purpose of that library, and Debian's
# package of it.
_LIBRARIES = {
    "compute": ("libcuda", "CUDA", "libcuda1"),
    "utility": ("libnvidia-ml", "nvidia-smi", "libnvidia-ml1"),
}

# Libraries that are required even if volumes are in their way; the last is WSL2's.
NEEDED = frozenset({*(library for library, _, _ in _LIBRARIES.values()), "libdxcore"})

# driver capabilities -> libraries, programs and nodes of which each serves a part.
_PARTS = {
    ("compute",): ("libnvidia-ptxjitcompiler",),
    ("utility",): ("nvidia-smi",),
    ("video",): ("libnvcuvid", "libnvidia-encode", "libcuda", UVM.path),
    ("display", "graphics"): ("libGLX_nvidia", "libEGL_nvidia", MODESET.path),
    ("ngx",): ("libnvidia-ngx",),
}
_FILE_KINDS = ("library", "binary")

# folder of manifests in a container -> the programs that find the driver through one, its usual
# name, and the library in it.
_MANIFESTS = {
    "/etc/vulkan/icd.d/": ("Vulkan", "vulkan/icd.d/nvidia_icd.json", "libGLX_nvidia"),
    "/usr/share/glvnd/egl_vendor.d/": ("EGL", "glvnd/egl_vendor.d/10_nvidia.json", "libEGL_nvidia"),
}


def check(grant: "Grant") -> None:
    """Raise DriverError if GPUs are selected and a requested capability can't work."""
    if not grant.devices:
        return
    for capability, cause, remedy in _unusable(grant.request.options, grant.inventory):
        raise DriverError(
            f"The container asks for {capability}, and {cause}",
            f"{remedy}, or request fewer capabilities with {DRIVER_CAPABILITIES}",
        )


def warnings(grant: "Grant") -> list[str]:
    """Return which parts a container doesn't get, a sentence each, without a full stop."""
    options, inventory = grant.request.options, grant.inventory
    if inventory.platform:
        return unusable(grant) + _shared_node(grant)
    parts = missing_parts(options.capabilities, inventory.files, inventory.nodes)
    return unusable(grant) + parts


def _shared_node(grant: "Grant") -> list[str]:
    """Return a warning if one node serves all GPUs and a container gets only some of them."""
    inventory = grant.inventory
    if inventory.platform == WSL and 0 < len(grant.devices) < len(inventory.devices):
        return ["WSL2 has one node for all GPUs: the container can use the others, too"]
    return []


def unusable(grant: "Grant") -> list[str]:
    """Return which GPUs and capabilities can't be used and why, a sentence each."""
    found = []
    options, inventory = grant.request.options, grant.inventory
    if inventory.lost and any(name.lower() == "all" for name in grant.request.selectors):
        found.append(fallen_off(inventory.lost, names))
    for capability, cause, _ in _unusable(options, inventory):
        found.append(f"{capability} can't work: {cause}")
    return found


def _unusable(
    options: "NvidiaOptions", inventory: "NvidiaInventory"
) -> "Iterator[tuple[str, str, str]]":
    """Yield the capabilities that can't work, with cause and remedy."""
    if inventory.platform:
        return  # its driver has other parts, and is always complete
    if "compute" in options.capabilities and inventory.node(UVM.path) is None:
        path = inventory.root.rstrip("/") + UVM.path
        cause = f"there is no device node {path}, without which CUDA doesn't work"
        remedy = (
            f"Run {MAKE_UVM} as root, which loads the module nvidia-uvm and makes the node "
            "(gpuhook refresh isn't needed then)"
        )
        yield "compute", cause, remedy
    yield from missing_libraries(options.capabilities, inventory.files, inventory.driver_version)


def missing_libraries(
    capabilities: "Collection[str]", files: "Collection[DriverFile]", version: str
) -> "Iterator[tuple[str, str, str]]":
    """Yield the capabilities whose required library is missing, with cause and remedy.

    ``version`` is the driver's; the files contain no library of another version.
    """
    for capability, (library, purpose, package) in _LIBRARIES.items():
        if capability in capabilities and not _has(library, files):
            branch = version.partition(".")[0]
            cause = f"{library}.so.{version} isn't installed, without which {purpose} doesn't work"
            remedy = (
                f"Install the driver's libraries of exactly version {version} ({package} on "
                f"Debian, libnvidia-compute-{branch} on Ubuntu, nvidia-driver-cuda-libs on RHEL) "
                "and run ldconfig"
            )
            yield capability, cause, remedy


def missing_parts(
    capabilities: "Collection[str]",
    files: "Collection[DriverFile]",
    nodes: "Collection[DeviceNode]" = (),
) -> list[str]:
    """Return the missing parts of these capabilities, a sentence each."""
    paths = {node.path for node in nodes}
    found = []
    for group, parts in _PARTS.items():
        asked = [capability for capability in group if capability in capabilities]
        missing = [name for name in parts if name not in paths and not _has(name, files)]
        if asked and missing:
            verb = "lacks" if len(asked) == 1 else "lack"
            found.append(f"{' and '.join(asked)} {verb} {listed(missing)}")
    if "graphics" in capabilities:
        found += missing_manifests(files)
    if "compat32" in capabilities and all(file.kind != "library32" for file in files):
        found.append("compat32 lacks every 32-bit library")
    return found


def missing_manifests(files: "Collection[DriverFile]") -> list[str]:
    """Return which graphics programs won't find the driver's libraries, a sentence each."""
    return [
        f"{programs} programs don't find the driver, because there is no manifest {name}: install "
        f"it, or name the folder that has {name.partition('/')[0]} in data-search-paths"
        for folder, (programs, name, library) in _MANIFESTS.items()
        if _has(library, files)
        and not any(file.kind == MANIFEST and file.target.startswith(folder) for file in files)
    ]


def others(files: "Collection[DriverFile]") -> list[str]:
    """Return the libraries that containers get only with all capabilities, without duplicates."""
    found = (file.target.partition(".so")[0] for file in files if file.capability == EVERYTHING)
    return sorted(set(found))


def _has(name: str, files: "Collection[DriverFile]") -> bool:
    """Tell whether the files include a library (without ``.so``) or program of that name."""
    return any(
        file.kind in _FILE_KINDS and file.target.rpartition("/")[2].partition(".so.")[0] == name
        for file in files
    )
