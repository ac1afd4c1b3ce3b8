"""Files named by the caller in addition to a root folder, such as its environment.

A file in the folder is opened below its root like all others there: the folder's owner could
create a link to a file of the host. A file elsewhere is the caller's choice, but no other user
may redirect root's writes.
"""

import os

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.host import files as host_files


def read(path: str, rootfs: str) -> bytes:
    """Return a file's content, b"" if it doesn't exist; OSError if it can't be read."""
    path = os.path.abspath(path)
    below = inside(path, rootfs)
    if below is not None:
        with Rootfs(rootfs) as root:
            return root.read_file(below, host_files.MAX_BYTES) or b""  # protects: environ-confined
    return host_files.read(path) if os.path.lexists(path) else b""


def inside(path: str, rootfs: str) -> str | None:
    """Return the part of a path below a root folder, None if it isn't below.

    The path is absolute and without "..", which after a link of the owner would lead elsewhere.
    """
    try:
        root = os.stat(rootfs)
    except OSError:
        return None
    names = path.split("/")
    for number in range(1, len(names)):
        try:
            found = os.stat("/".join(names[:number]) or "/")
        except OSError:
            return None
        if os.path.samestat(found, root):
            return "/" + "/".join(names[number:])
    return None
