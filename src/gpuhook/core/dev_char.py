"""Links /dev/char/MAJOR:MINOR for driver nodes, which runtimes use to name devices to systemd.

At ``daemon-reload``, systemd writes the device rules of a container's scope again, from the list
that runc passed to it. runc 1.1.3 to 1.1.6 (Debian 12 has 1.1.5) lists only devices with a
/dev/char/MAJOR:MINOR link. Later runc with systemd 240 or newer, and crun, need no link. The
driver creates its nodes without telling udev, so udev makes no links. Source: runc's systemd
driver and its release notes, systemd's bpf-devices.c.
"""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.core.inventory.model import DeviceNode


def make_links(nodes: "Iterable[DeviceNode]", root: str = "/", dev: str = "/dev") -> list[str]:
    """Make links that are missing or dangling; return their names.

    A link leads to the node in the host's /dev, or else to the one below the driver root. Failures
    are ignored: no container may fail because of a link.
    """
    made = []
    for node in nodes:
        name = f"{node.major}:{node.minor}"
        path = f"{dev}/char/{name}"
        if os.path.exists(path):
            continue
        below = node.path.removeprefix("/dev/")
        for target, place in (
            (f"../{below}", f"{dev}/{below}"),
            (f"{root.rstrip('/')}{node.path}",) * 2,
        ):
            if _is_node(place, node) and _link(target, path):
                made.append(name)
                break
    return made


def _is_node(path: str, node: "DeviceNode") -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return stat.S_ISCHR(status.st_mode) and numbers == (node.major, node.minor)


def _link(target: str, path: str) -> bool:
    try:
        if os.path.islink(path):  # of a driver that was unloaded
            os.unlink(path)
        os.symlink(target, path)
    except OSError:
        return False
    return True
