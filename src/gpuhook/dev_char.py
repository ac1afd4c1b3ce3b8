"""The links in /dev/char, by which systemd finds a device that it knows by its numbers.

NVIDIA's kernel module makes no such links. Where the engines let systemd manage cgroups, a
container's rule for 195:0 is one for /dev/char/195:0 there; without the link systemd drops
the rule, and at the next daemon-reload the container loses its GPU.

Not on the hot path: only ``gpuhook refresh`` comes here. Source: runc's
libcontainer/cgroups/devices/systemd.go.
"""

import os
import stat
from collections.abc import Iterable

from gpuhook.inventory import Node

FOLDER = "/dev/char"


def make_links(nodes: Iterable[Node], folder: str = FOLDER) -> list[str]:
    """Link to every node that exists at its path on the host; return the links made.

    A link that exists is left alone, whatever it says. Raises OSError.
    """
    made = []
    for node in nodes:
        link = f"{folder}/{node.major}:{node.minor}"
        if not _is_there(node) or os.path.lexists(link):
            continue
        os.makedirs(folder, exist_ok=True)
        os.symlink(os.path.relpath(node.path, folder), link)
        made.append(link)
    return made


def _is_there(node: Node) -> bool:
    """Tell whether the host has the node: a driver root may have nodes of its own."""
    try:
        status = os.stat(node.path)
    except OSError:
        return False
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(node.major, node.minor)
