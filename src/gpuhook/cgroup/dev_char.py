"""Links /dev/char/MAJOR:MINOR for the driver's nodes, by which systemd finds devices.

systemd writes the device rules of a container's scope anew at ``daemon-reload``, and takes
into them only devices that it finds as /dev/char/MAJOR:MINOR. The driver makes its nodes
without telling udev, so nobody else makes these links. Source: systemd's bpf-devices.c,
sd_bus property DeviceAllow.
"""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.inventory.model import Node


def wanted(cgroups_path: object) -> bool:
    """Tell whether systemd makes the container's cgroup: its path is then slice:prefix:name."""
    return isinstance(cgroups_path, str) and cgroups_path.count(":") == 2


def make_links(nodes: "Iterable[Node]", dev: str = "/dev") -> list[str]:
    """Make the links that are missing; return their names.

    Only where the host's own /dev has the node with these numbers. What can't be made is
    left: a container must never fail for it.
    """
    made = []
    folder = f"{dev}/char"
    for node in nodes:
        name = f"{node.major}:{node.minor}"
        below = node.path.removeprefix("/dev/")
        try:
            os.lstat(f"{folder}/{name}")
        except FileNotFoundError:
            if _is_node(f"{dev}/{below}", node) and _link(f"../{below}", f"{folder}/{name}"):
                made.append(name)
        except OSError:
            return made
    return made


def _is_node(path: str, node: "Node") -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return stat.S_ISCHR(status.st_mode) and numbers == (node.major, node.minor)


def _link(target: str, path: str) -> bool:
    try:
        os.symlink(target, path)
    except OSError:
        return False
    return True
