"""A root folder, in which all that is done is noted before."""

import contextlib

from gpuhook.ground.container import kernel
from gpuhook.ground.container.changes import Container
from gpuhook.tools.apply import mounted
from gpuhook.tools.apply.record import Identity, Record


class Folder(Container):
    """A root folder; with a ``record``, what is mounted and written is noted there first."""

    record: Record | None = None

    def identity(self) -> Identity:
        """Return which folder it is."""
        fd = self.folder("/")
        return Identity(*kernel.identity(fd), kernel.born(fd))

    def settle_identity(self) -> None:
        """Have the first change to it made now: overlayfs gives it another time of birth then."""
        with contextlib.suppress(OSError):  # where that can't be changed, nothing else can be
            kernel.give(self.folder("/"), (-1, -1))

    def is_own(self, fd: int) -> bool:
        """Tell whether an open folder is the root's own, and no volume's."""
        return self._verdict(fd).own

    def attaching(self, tree: int) -> None:
        """Note what is about to be mounted."""
        if self.record is not None:
            self.record.note_mount(mounted.attached(tree))  # protects: mount-noted

    def replace_file(self, path: str, data: bytes, mode: int) -> None:
        """Give a file a new content, as ``Container`` does, and note that first."""
        if self.record is not None:
            self.record.note_written(path, data)  # protects: write-noted
        super().replace_file(path, data, mode)
