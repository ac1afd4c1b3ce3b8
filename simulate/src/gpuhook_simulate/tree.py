"""Creation of files, links, nodes and sockets below a root that is being built."""

import os
import stat

from gpuhook.base.errors import SimulateError
from gpuhook.tools.engines.prefix import checked


class Tree:
    """A folder under construction; paths are relative to it and parents are created as needed."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, relative: str) -> str:
        """Return the path on this host, after creating its parent folder.

        EngineError if a link or ".." in the path leads out of the root.
        """
        full = os.path.join(os.path.abspath(self.root), relative.lstrip("/"))
        checked(os.path.abspath(self.root), os.path.dirname(full))
        os.makedirs(os.path.dirname(full), exist_ok=True)
        return full

    def folder(self, relative: str, mode: int = 0o755) -> None:
        """Create a folder with exactly that mode."""
        full = self.path(relative)
        os.makedirs(full, exist_ok=True)
        os.chmod(full, mode)

    def text(self, relative: str, content: str, mode: int = 0o644) -> None:
        """Write a file."""
        self.data(relative, content.encode(), mode)

    def data(self, relative: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, replacing an existing hard or symbolic link."""
        full = self.path(relative)
        if os.path.lexists(full):
            os.unlink(full)
        with open(full, "wb") as file:
            file.write(content)
        os.chmod(full, mode)

    def link(self, relative: str, target: str) -> None:
        """Create a symbolic link, replacing an existing file or link."""
        full = self.path(relative)
        if os.path.lexists(full):
            os.unlink(full)
        os.symlink(target, full)

    def node(self, relative: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> None:
        """Create a character device of root and group ``gid``; SimulateError if not permitted."""
        full = self.path(relative)
        try:
            os.mknod(full, stat.S_IFCHR | mode, os.makedev(major, minor))
            os.chown(full, 0, gid)
        except PermissionError as error:
            raise SimulateError(
                f"This user may not create the device node {full}",
                "Run as root, outside of user namespaces",
            ) from error
        os.chmod(full, mode)

    def socket(self, relative: str) -> None:
        """Create a socket file without a listener."""
        full = self.path(relative)
        os.mknod(full, stat.S_IFSOCK | 0o666)
        os.chmod(full, 0o666)  # noqa: S103 - as the daemons create theirs
