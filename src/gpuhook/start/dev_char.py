"""Links /dev/char/MAJOR:MINOR for the driver's nodes, by which runtimes name devices to systemd.

systemd writes the device rules of a container's scope again at ``daemon-reload``, from the list
that runc gave it. Into that, runc 1.1.3 to 1.1.6 (Debian 12 has 1.1.5) takes only devices whose
/dev/char/MAJOR:MINOR is there; a later runc beside systemd 240 and crun need no link. The driver
makes its nodes without telling udev, so nobody else makes these links. Source: runc's systemd
driver and its release notes, systemd's bpf-devices.c.
"""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuhook.start.inventory.model import Node


def make_links(nodes: "Iterable[Node]", root: str = "/", dev: str = "/dev") -> list[str]:
    """Make the links that are missing or lead nowhere; return their names.

    To the node in the host's own /dev, or else to the one below the driver root. What can't be
    made is left: a container must never fail for it.
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


def _is_node(path: str, node: "Node") -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return stat.S_ISCHR(status.st_mode) and numbers == (node.major, node.minor)


def _link(target: str, path: str) -> bool:
    try:
        if os.path.islink(path):  # of a driver that is gone
            os.unlink(path)
        os.symlink(target, path)
    except OSError:
        return False
    return True
