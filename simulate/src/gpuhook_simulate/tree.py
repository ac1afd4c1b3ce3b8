"""Write files, links, nodes and sockets below a root that is being built."""

import os
import stat

from gpuhook.ground.errors import SimulateError
from gpuhook.tools.engines.prefix import checked


class Tree:
    """A folder under construction; paths are relative to it and parents are made as needed."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, relative: str) -> str:
        """Return the path on this machine, its parent folder made.

        EngineError where a link or ".." on the way leads out of the root.
        """
        full = os.path.join(os.path.abspath(self.root), relative.lstrip("/"))
        checked(os.path.abspath(self.root), os.path.dirname(full))
        os.makedirs(os.path.dirname(full), exist_ok=True)
        return full

    def folder(self, relative: str, mode: int = 0o755) -> None:
        """Make a folder with exactly that mode."""
        full = self.path(relative)
        os.makedirs(full, exist_ok=True)
        os.chmod(full, mode)

    def text(self, relative: str, content: str, mode: int = 0o644) -> None:
        """Write a file."""
        self.data(relative, content.encode(), mode)

    def data(self, relative: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, in place of a link (hard or symbolic) that may be there."""
        full = self.path(relative)
        if os.path.lexists(full):
            os.unlink(full)
        with open(full, "wb") as file:
            file.write(content)
        os.chmod(full, mode)

    def link(self, relative: str, target: str) -> None:
        """Make a symbolic link, in place of whatever file or link is there."""
        full = self.path(relative)
        if os.path.lexists(full):
            os.unlink(full)
        os.symlink(target, full)

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        """Make a character device of root's and group ``gid``; SimulateError where we may not."""
        full = self.path(relative)
        try:
            os.mknod(full, stat.S_IFCHR | mode, os.makedev(major, minor))
            os.chown(full, 0, gid)
        except PermissionError as error:
            raise SimulateError(
                f"This user may not make the device node {full}",
                "Run as root, outside of user namespaces",
            ) from error
        os.chmod(full, mode)

    def socket(self, relative: str) -> None:
        """Make the file of a socket on which nobody listens."""
        full = self.path(relative)
        os.mknod(full, stat.S_IFSOCK | 0o666)
        os.chmod(full, 0o666)  # noqa: S103 - as the daemons make theirs
