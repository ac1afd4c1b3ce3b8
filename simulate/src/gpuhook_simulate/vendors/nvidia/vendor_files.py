"""Installation of a real driver's files into a simulated root, from extracted packages.

The source is the tree that ``dpkg-deb -x`` extracts from packages such as libcuda1 and nvidia-smi.
Files keep their paths. Debian's links, which its packages' scripts create at installation, are
created here.
"""

import os
import re
import shutil
from dataclasses import dataclass

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.tree import Tree

_CUDA = re.compile(r"libcuda\.so\.([0-9]{2,4}(?:\.[0-9]+)+)")
_DOCUMENTATION = ("usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/bug")

_TRIPLET = re.compile(r"-linux-gnu[a-z]*$")

# Debian has a separate folder for each driver branch; an alternative selects the one in use.
_PRIVATE_DIR = re.compile(r"(/usr/lib/[^/]+)/nvidia/([^/]+)")

# Links from the library folder into the private one: nvidia-alternative's postinst.
_LIBRARIES = (
    "libGLX_nvidia.so.0",
    "libEGL_nvidia.so.0",
    "libGLESv1_CM_nvidia.so.1",
    "libGLESv2_nvidia.so.2",
    "libcuda.so.1",
    "libcuda.so",
    "libcudadebugger.so.1",
    "libnvcuvid.so.1",
    "libnvcuvid.so",
    "libnvidia-allocator.so.1",
    "libnvidia-api.so.1",
    "libnvidia-encode.so.1",
    "libnvidia-fbc.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ngx.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
    "libnvidia-opticalflow.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvoptix.so.1",
    "vdpau/libvdpau_nvidia.so.1",
    "gbm/nvidia-drm_gbm.so",
)

# Links outside of the library folders: link -> name below /usr/lib/nvidia/BRANCH.
_PROGRAMS = {
    "usr/bin/nvidia-smi": "nvidia-smi",
    "usr/bin/nvidia-debugdump": "nvidia-debugdump",
    "usr/lib/nvidia/nvidia-bug-report.sh": "nvidia-bug-report.sh",
    "usr/lib/nvidia/nvidia_drv.so": "nvidia_drv.so",
    "usr/lib/nvidia/libglxserver_nvidia.so": "libglxserver_nvidia.so",
}

# A second alternative, GLX, leads to the files of the first one: glx-alternative-nvidia.
_GLX_PROGRAMS = {
    "usr/bin/nvidia-bug-report.sh": "usr/lib/nvidia/nvidia-bug-report.sh",
    "usr/lib/xorg/modules/drivers/nvidia_drv.so": "usr/lib/nvidia/nvidia_drv.so",
    "usr/lib/xorg/modules/extensions/libglxserver_nvidia.so": (
        "usr/lib/nvidia/libglxserver_nvidia.so"
    ),
}


@dataclass(frozen=True, slots=True)
class VendorFiles:
    """A tree of driver files: its version, and its libcuda's folder below the root."""

    source: str
    version: str
    library_dir: str


def find_vendor_files(source: str) -> VendorFiles:
    """Find the driver in a tree; SimulateError if it has none, or several."""
    machine = os.uname().machine
    found = []
    for folder, _, names in os.walk(source):
        inside = "/" + os.path.relpath(folder, source)
        found += [
            VendorFiles(source, match[1], inside)
            for match in map(_CUDA.fullmatch, names)
            if match and (f"/{machine}-" in inside or inside.startswith("/usr/lib64"))
        ]
    if not found:
        raise SimulateError(
            f"There is no libcuda.so.VERSION for {machine} below {source}",
            "Extract the driver's packages there, for instance with scripts/fetch-driver-files",
        )
    if len(found) > 1:
        versions = ", ".join(sorted(f"{files.library_dir}: {files.version}" for files in found))
        raise SimulateError(
            f"There is more than one driver below {source} ({versions})",
            "Extract one driver's packages into a separate folder",
        )
    return found[0]


def install_vendor_files(tree: Tree, files: VendorFiles) -> None:
    """Install the files into the tree, as hard links if they are on the same file system.

    The two libraries that the simulation replaces are left out, and so are files at the top,
    where packages have none.
    """
    replaced = {f"libcuda.so.{files.version}", f"libnvidia-ml.so.{files.version}"}
    replaced_dir = files.library_dir.lstrip("/")
    for folder, folders, names in os.walk(files.source):
        inside = os.path.relpath(folder, files.source)
        folders[:] = [n for n in folders if os.path.join(inside, n) not in _DOCUMENTATION]
        for name in names:
            ours = inside == replaced_dir and name in replaced
            if not ours and inside != ".":
                _lay(os.path.join(folder, name), tree.path(os.path.join(inside, name)))
    private = _PRIVATE_DIR.fullmatch(files.library_dir)
    if private:
        _make_debian_links(tree, private[2], files.version)


def _lay(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def public_library_dirs(tree: Tree, files: VendorFiles) -> list[str]:
    """Return the loader's folders with the libraries' names, the driver's own first."""
    private = _PRIVATE_DIR.fullmatch(files.library_dir)
    public = private[1] if private else files.library_dir
    others = [f"/usr/lib/{name}" for name in sorted(os.listdir(tree.path("usr/lib/")))]
    return [public] + [other for other in others if _TRIPLET.search(other) and other != public]


def _make_debian_links(tree: Tree, branch: str, version: str) -> None:
    tree.link("etc/alternatives/nvidia", f"/usr/lib/nvidia/{branch}")
    tree.link("usr/lib/nvidia/nvidia", "/etc/alternatives/nvidia")
    tree.link("etc/alternatives/glx", "/usr/lib/nvidia")
    tree.link("usr/lib/glx", "/etc/alternatives/glx")
    for folder in sorted(os.listdir(tree.path("usr/lib/"))):
        if _PRIVATE_DIR.fullmatch(f"/usr/lib/{folder}/nvidia/{branch}"):
            _link_libraries(tree, folder, branch, version)
    for link, name in _PROGRAMS.items():
        _alternative(tree, link, f"nvidia--{name}", f"/usr/lib/nvidia/{branch}/{name}")
    for link, target in _GLX_PROGRAMS.items():
        _alternative(tree, link, f"glx--{os.path.basename(link)}", f"/{target}")


def _link_libraries(tree: Tree, triplet: str, branch: str, version: str) -> None:
    public, private = f"usr/lib/{triplet}", f"/usr/lib/{triplet}/nvidia/{branch}"
    for link in (*_LIBRARIES, f"libnvidia-nvvm.so.{version}"):
        name = os.path.basename(link)
        _alternative(tree, f"{public}/{link}", f"nvidia--{name}-{triplet}", f"{private}/{name}")
    cfg = "libnvidia-cfg.so.1"
    inner = f"{public}/nvidia/{cfg}"
    _alternative(tree, inner, f"nvidia--{cfg}-{triplet}", f"{private}/{cfg}")
    _alternative(tree, f"{public}/{cfg}", f"glx--{cfg}-{triplet}", f"/{inner}")
    indirect = "libGLX_indirect.so.0"
    glx = f"/{public}/libGLX_nvidia.so.0"
    _alternative(tree, f"{public}/{indirect}", f"glx--{indirect}-{triplet}", glx)


def _alternative(tree: Tree, link: str, name: str, target: str) -> None:
    """Create link -> /etc/alternatives/name -> target, if the target exists."""
    if not os.path.lexists(os.path.join(tree.root, target.lstrip("/"))):
        return
    tree.link(f"etc/alternatives/{name}", target)
    tree.link(link, f"/etc/alternatives/{name}")
