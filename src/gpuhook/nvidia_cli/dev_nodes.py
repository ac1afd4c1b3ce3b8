"""Existing and possible nodes of NVIDIA's driver in /dev, and links to them for systemd.

Sources: the driver's README, "How and why to use device nodes"; /proc/devices of proc(5);
/proc/driver/nvidia-caps/mig-minors. Why systemd needs the links: gpuhook.core.dev_char.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from gpuhook.base.errors import DriverError
from gpuhook.base.host import proc
from gpuhook.vendors.nvidia.discover import MIG_MINORS
from gpuhook.vendors.nvidia.model import CAPS_FOLDER, CONTROL_NODES
from gpuhook.vendors.nvidia.names import PCI_VENDOR

MODPROBE = "/sbin/modprobe"
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset")
_DRIVER, _OLD_DRIVER, _CAPS = "nvidia", "nvidia-frontend", "nvidia-caps"
_NOT_LINKED = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers, the first digits of 0x030000


@dataclass(frozen=True)
class DevNode:
    """A character device node, existing or possible: its path and numbers."""

    path: str
    major: int
    minor: int


def majors(text: str) -> dict[str, int]:
    """Return the majors of NVIDIA's drivers, from the text of /proc/devices.

    DriverError if there are none.
    """
    found = {}
    for line in text.split("\n"):
        number, _, name = line.strip().partition(" ")
        if number.isdecimal() and name.startswith("nvidia"):
            found[name] = int(number)
    if not found:
        raise DriverError(
            "/proc/devices has no NVIDIA driver", "Load it (modprobe nvidia) and try again"
        )
    return found


def text_of_devices(root: str = "") -> str:
    """Return the text of /proc/devices; DriverError if it can't be read."""
    return _text(f"{root}/proc/devices")


def control_nodes(known: dict[str, int]) -> list[DevNode]:
    """Return the nodes that don't belong to a GPU; DriverError if a module isn't loaded."""
    ordered = sorted(CONTROL_NODES, key=lambda each: each.module)
    return [DevNode(each.path, _major(known, each.module), each.minor) for each in ordered]


def _major(known: dict[str, int], name: str) -> int:
    # Drivers before 550 use the longer name for the same module.
    found = known.get(name, known.get(_OLD_DRIVER) if name == _DRIVER else None)
    if found is None:
        raise DriverError(f"The kernel module of {name} isn't loaded", f"Run modprobe {name}")
    return found


def possible(root: str = "") -> list[DevNode]:
    """Return all nodes that this host's GPUs can have, existing or not."""
    known = majors(text_of_devices(root))
    nodes = control_nodes(known)
    gpus = _gpus(root)
    nodes += [DevNode(f"/dev/nvidia{minor}", _major(known, _DRIVER), minor) for minor in gpus]
    for line in _text(f"{root}{MIG_MINORS}", missing="").split("\n"):
        name, _, minor = line.partition(" ")
        owner = name.partition("/")[0].removeprefix("gpu")
        if minor.isdecimal() and (not owner.isdecimal() or int(owner) in gpus):
            path = f"{CAPS_FOLDER}/nvidia-cap{minor}"
            nodes.append(DevNode(path, _major(known, _CAPS), int(minor)))
    return nodes


def _gpus(root: str) -> range:
    """Return the minors of the GPUs on the PCI bus."""
    folder = f"{root}/sys/bus/pci/devices"
    try:
        found = os.listdir(folder)
    except OSError:
        found = []
    gpus = [
        each
        for each in found
        if _text(f"{folder}/{each}/vendor", "").strip() == f"0x{PCI_VENDOR}"
        and _text(f"{folder}/{each}/class", "").startswith(_GPU_CLASSES)
    ]
    return range(len(gpus))


def _text(path: str, missing: str | None = None) -> str:
    try:
        return proc.read(path).decode("utf-8", "replace")
    except OSError as error:
        if missing is not None:
            return missing
        raise DriverError(f"{path} can't be read: {error.strerror}", "Mount /proc") from None


def existing(dev: str = "/dev") -> Iterator[DevNode]:
    """Yield the existing nodes of GPUs, of MIG devices and of the driver."""
    for folder in (dev, f"{dev}/{os.path.basename(CAPS_FOLDER)}"):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.startswith("nvidia") and not name.startswith(_NOT_LINKED):
                path = f"{folder}/{name}"
                status = os.lstat(path)
                if stat.S_ISCHR(status.st_mode):
                    yield DevNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))


def link(folder: str, node: DevNode, *, dry_run: bool) -> str:
    """Link FOLDER/MAJOR:MINOR to a node; return a message, "" if it exists already.

    OSError if that fails.
    """
    path = f"{folder}/{node.major}:{node.minor}"
    if os.path.realpath(path) == os.path.realpath(node.path) and os.path.islink(path):
        return ""
    if os.path.lexists(path):
        return f"warning: {path} exists already and doesn't lead to {node.path}"
    if dry_run:
        return f"would link {path} to {node.path}"
    os.symlink(node.path, path)
    return f"linked {path} to {node.path}"


def make(node: DevNode, root: str, *, dry_run: bool) -> str:
    """Create a node below a root, for all users; return a message, "" if it exists already.

    OSError if that fails.
    """
    path = root.rstrip("/") + node.path
    if os.path.lexists(path):
        return ""
    if dry_run:
        return f"would create the node {path} ({node.major}:{node.minor})"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(node.major, node.minor))
    os.chmod(path, 0o666)  # noqa: S103 - as by the driver, regardless of the umask
    return f"created the node {path} ({node.major}:{node.minor})"


def module_commands(root: str) -> list[list[str]]:
    """Return the command lines that load the driver's modules from a root."""
    begin = [] if root in ("", "/") else ["chroot", root]
    return [[*begin, MODPROBE, module] for module in MODULES]
