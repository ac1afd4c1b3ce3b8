"""A root folder whose changes are recorded in advance."""

import contextlib

from gpuhook.base.container import kernel
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.hpc.rootfs import mount_tracking
from gpuhook.hpc.rootfs.record import FolderIdentity, FolderRecord


class Folder(ContainerRootfs):
    """A root folder; with a ``record``, mounts and writes are recorded there first."""

    record: FolderRecord | None = None

    def identity(self) -> FolderIdentity:
        """Return the folder's identity."""
        fd = self.folder("/")
        return FolderIdentity(*kernel.identity(fd), kernel.born(fd))

    def settle_identity(self) -> None:
        """Make the first change now, because overlayfs then changes the folder's birth time."""
        with contextlib.suppress(OSError):  # if this can't be changed, nothing can be
            kernel.give(self.folder("/"), (-1, -1))

    def is_own(self, fd: int) -> bool:
        """Tell whether an open folder belongs to the root, and not to a volume."""
        return self._verdict(fd).own

    def attaching(self, tree: int) -> None:
        """Record a mount before it is attached."""
        if self.record is not None:
            self.record.note_mount(mount_tracking.attached(tree))  # protects: mount-noted

    def replace_file(self, path: str, data: bytes, mode: int) -> None:
        """Replace a file's content as ``ContainerRootfs`` does, and record that first."""
        if self.record is not None:
            self.record.note_written(path, data)  # protects: write-noted
        super().replace_file(path, data, mode)
