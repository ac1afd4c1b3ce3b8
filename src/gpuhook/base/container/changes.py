"""Confined changes below a container's root: mount points, links and files, with rollback.

Everything is created by name in a folder whose descriptor is held, never through a path, and
recorded in a ``Journal``. So a failed injection is rolled back exactly. Nothing is ever created
in a volume, and nothing is mounted where the mount would appear on the host.
"""

import errno
import os
import stat

from gpuhook.base.container import entries, kernel
from gpuhook.base.container.mounts import Boundary, MountPermissions
from gpuhook.base.container.rootfs import PATH_FLAGS, Rootfs, enter, walk
from gpuhook.base.errors import InjectError, in_volume

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Final

    from gpuhook.base.host.proc import MountInfo

_LINK_FLAGS: "Final" = PATH_FLAGS | os.O_NOFOLLOW
# Errors if a file can't be replaced although its folder is the container's own.
_CANT_REPLACE: "Final" = (errno.EROFS, errno.EBUSY)  # protects: cache-covered
_COVER_ATTRIBUTES: "Final" = (
    kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
)
_EVERYTHING_OWN: "Final" = MountPermissions(own=True, shared=False)


class ContainerRootfs(Rootfs):
    """A container's root filesystem while it is being created.

    ``owner`` is (uid, gid) on the host for everything created below it: the container's root
    user if the container has a user namespace. ``process`` is a descriptor of /proc/PID of the
    container's first process, -1 if there is none. If this process was started in the
    container's mount namespace (``inside``), it is a descriptor of this process. ``skipped`` says
    what was left out because it isn't worth failing the container. ``lacks`` are the paths of
    that, each with the link target, "" for a file.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        journal: "Journal",
        owner: tuple[int, int] = (0, 0),
        process: int = -1,
        *,
        inside: bool = False,
    ) -> None:
        """Take ownership of the descriptors of the root and of /proc/PID."""
        self._set_up(fd, path)
        self.process = process
        self.journal = journal
        self.skipped: list[str] = []
        self.lacks: dict[str, str] = {}
        self.owner = owner
        self._places: dict[str, int] = {}
        self._folder_verdicts: dict[int, MountPermissions] = {}
        self._held: list[int] = []
        self._attached: dict[str, int] = {}
        self._known: dict[str, tuple[int, int]] = {}
        self._boundary = Boundary(process, fd, inside=inside) if process >= 0 else None

    def close(self) -> None:
        """Close every descriptor held; the journal must not be rolled back after this."""
        for fd in (*self._places.values(), *self._held):
            os.close(fd)
        self._places.clear()
        self._held.clear()
        if self._boundary is not None:
            self._boundary.close()
        if self.process >= 0:
            os.close(self.process)
        super().close()

    def adopt(self, tables: "list[bytes]") -> bool:
        """Treat the mount below the root as the container's own (``Boundary.adopt``)."""
        return self._boundary is not None and self._boundary.adopt(self._fd, tables)

    def settle(self, tables: "list[bytes]") -> None:
        """Treat the root as a folder of this namespace (``Boundary.settle``)."""
        if self._boundary is not None:
            self._boundary.settle(self.real_place(), tables)

    def real_place(self) -> str:
        """Return the root's path in this namespace, links resolved; only for the mount table."""
        return os.readlink(f"/proc/self/fd/{self._fd}")

    def is_mounted_on(self) -> bool:
        """Tell whether anything is mounted below the root, as in every container's namespace."""
        return self._boundary is not None and self._boundary.is_mounted_on()

    def mounts(self) -> "Iterator[tuple[str, MountInfo]]":
        """Yield the mounts on and below the root, with their paths in the root."""
        return self._boundary.mounts() if self._boundary else iter(())

    def mounted(self) -> list[str]:
        """Return the mount points in the root."""
        return self._boundary.mounted(self.real_place()) if self._boundary else []

    def is_read_only(self) -> bool:
        """Tell whether the root is mounted read-only."""
        return bool(os.fstatvfs(self._fd).f_flag & os.ST_RDONLY)

    def set_read_only(self, *, yes: bool) -> None:
        """Make the root's mount read-only, or not."""
        kernel.set_read_only(self._fd, self.path, yes=yes)

    def holder(self, path: str) -> str:
        """Return the word for the owner of a path or its nearest parent: image or volume."""
        while path:
            try:
                fd = self.open(path)
            except OSError:
                path = path.rpartition("/")[0]
                continue
            try:
                return "image" if self._verdict(fd).own else "volume"
            finally:
                os.close(fd)
        return "image"

    def may_write(self, path: str) -> bool:
        """Tell whether files may be created in the folder of a path: not in a volume."""
        return self._folder_verdict(self._place(path)[0]).own

    def _verdict(self, fd: int) -> MountPermissions:
        return self._boundary.verdict(fd) if self._boundary else _EVERYTHING_OWN

    def _folder_verdict(self, fd: int) -> MountPermissions:
        """Return the verdict on a folder that stays open, so that it stays on its mount."""
        found = self._folder_verdicts.get(fd)
        if found is None:
            found = self._folder_verdicts[fd] = self._verdict(fd)
        return found

    # Places ------------------------------------------------------------------------------

    def _place(self, path: str) -> tuple[int, str]:
        """Return the folder of a path, created if missing, and the last name."""
        parent, _, name = path.rpartition("/")
        return self._folder(parent or "/"), name

    def _folder(self, path: str) -> int:
        fd = self._places.get(path)
        if fd is None:
            try:
                fd = self.open(path, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                fd = self._make_folders(path)
            self._places[path] = fd
        return fd

    def _make_folders(self, path: str) -> int:
        parent, name = walk(self._fd, path, self._enter_or_make)
        try:
            return self._enter_or_make(parent, name)
        finally:
            os.close(parent)

    def _behind_link(self, path: str) -> tuple[int, str]:
        """Return folder and name that a link at a path leads to; we keep the folder open."""
        parent, name = walk(self._fd, path, self._enter_or_make)
        self._held.append(parent)
        return parent, name

    def _enter_or_make(self, parent: int, name: str) -> int:
        try:
            return enter(parent, name)
        except FileNotFoundError:
            if not self._verdict(parent).own:
                raise in_volume(name) from None
        held = os.dup(parent)
        self._held.append(held)
        entries.make(self.owner, kernel.create_folder, held, name)  # protects: folder-by-folder
        self.journal.record(lambda: kernel.remove_folder(held, name))
        self._give(held, name)
        return enter(held, name)

    # Mounting ----------------------------------------------------------------------------

    def mount_point(
        self, path: str, *, folder: bool = False, source: os.stat_result | None = None
    ) -> int | None:
        """Return a descriptor to mount on: an empty file (or folder), created if missing.

        An existing file is used with any content. A link in the image is followed inside the
        root. None if a volume has ``source`` itself there already. Raises InjectError if a folder
        is in the way of a file or the reverse, VolumeError if the mount point would have to be
        created in a volume.
        """
        parent, name = self._place(path)
        fd = entries.open_here(parent, name)
        if fd is not None and stat.S_ISLNK(os.fstat(fd).st_mode):
            os.close(fd)
            parent, name = self._behind_link(path)
            fd = entries.open_here(parent, name)
        if fd is None:
            # What is created in a folder is on the folder's mount.
            verdict = self._folder_verdict(parent)
            if verdict.own and verdict.shared:
                raise _shared(path)
            return self._make_mount_point(parent, name, folder)
        try:
            return self._usable(fd, path, folder, source)
        except BaseException:
            os.close(fd)
            raise

    def _usable(
        self, fd: int, path: str, folder: bool, source: os.stat_result | None
    ) -> int | None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode) != folder:
            raise _wrong_kind(path, folder, self.holder(path))  # protects: folder-for-file
        verdict = self._verdict(fd)
        # protects: own-file
        if not verdict.own and source is not None and entries.same(status, source):
            os.close(fd)
            return None
        if verdict.shared:
            raise _shared(path)
        return fd

    def _make_mount_point(self, parent: int, name: str, folder: bool) -> int:
        if folder:
            return self._enter_or_make(parent, name)
        if not self._folder_verdict(parent).own:
            raise in_volume(name)
        # A new file: an existing one could have further hard links.
        fd = entries.make(self.owner, kernel.create_file, parent, name, 0o644)
        try:
            made = os.fstat(fd)
            self.journal.record(lambda: entries.remove_same(parent, name, made))
            self._give(parent, name)
        except OSError:
            os.close(fd)
            raise
        return fd

    def attaching(self, tree: int) -> None:
        """Record a detached mount that is about to be mounted."""

    def attach(self, tree: int, target: int, path: str) -> None:
        """Mount a detached mount on a descriptor from ``mount_point``."""
        self.attaching(tree)
        kernel.attach_mount(tree, target, path)
        self.journal.record(lambda: kernel.detach_mount(tree))
        self._attached[path] = tree

    def know(self, identity: tuple[int, int], path: str) -> None:
        """Record a file that the engine has mounted at a path, by ``kernel.identity``."""
        self._known[path] = identity

    def _mounted(self, path: str) -> int | None:
        """Return a descriptor of our mount at a path, or of the engine's if it is known.

        The engine's mount itself, because before Linux 6.15 a detached one can't be copied.
        """
        if path not in self._known:
            return self._attached.get(path)
        found = self.open(path)
        self._held.append(found)
        same = kernel.identity(found) == self._known[path]
        return found if same else None  # protects: covered-by-engines

    # Links -------------------------------------------------------------------------------

    def make_link(self, path: str, target: str, *, replace: bool, renewed: bool = False) -> None:
        """Create a symbolic link; an existing name stays, unless an earlier start left it.

        For ``renewed`` see ``is_leftover``. With ``replace``, the name leads to ``target``
        afterwards: another link is replaced, and a file is masked by the mount at ``target``.
        VolumeError if that would change a volume.
        """
        parent, name = self._place(path)
        own = self._folder_verdict(parent).own
        if own and self._make_missing_link(parent, name, target):
            return
        try:
            old = os.readlink(name, dir_fd=parent)
        except FileNotFoundError:
            raise in_volume(name) from None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if replace:
                self._cover_by_target(path, target)  # protects: soname-covered
                return
            old = None
        if old == target or not (replace or self._may_replace(path, target, renewed=renewed)):
            return
        if not own:
            raise in_volume(name)
        try:
            self._replace_by_link(parent, name, target)
        except OSError as error:
            if replace or error.errno not in _CANT_REPLACE:
                raise

    def _may_replace(self, path: str, target: str, *, renewed: bool) -> bool:
        there = self.exists(os.path.join(os.path.dirname(path), target))
        return there and self.is_leftover(path, target, renewed=renewed)

    def _make_missing_link(self, parent: int, name: str, target: str) -> bool:
        """Create a link, and tell whether it was missing."""
        try:
            # protects: link-by-folder
            entries.make(self.owner, kernel.create_link, parent, name, target)
        except FileExistsError:
            return False
        self.journal.record(lambda: entries.remove_link(parent, name, target))
        self._give(parent, name)
        return True

    def _replace_by_link(self, parent: int, name: str, target: str) -> None:
        was = entries.remember(parent, name)
        entries.put_link(parent, name, target, self.owner)
        if was is not None:
            self.journal.record(lambda: was.put_back(parent, name))

    def _cover_by_target(self, path: str, target: str) -> None:
        """Mount the file that a link would lead to on a file of the link's name."""
        folder = path.rpartition("/")[0]
        attached = self._mounted(f"{folder}/{target}")
        if attached is None:
            return  # the target is the volume's own file, and so is this one
        place = self.mount_point(path)
        if place is None:
            return
        try:
            copy = kernel.clone_tree(attached, path)
            self._held.append(copy)
            self.attach(copy, place, path)
        finally:
            os.close(place)

    def _give(self, parent: int, name: str) -> None:
        if self.owner != (0, 0):
            kernel.change_owner(parent, name, self.owner)

    # Files -------------------------------------------------------------------------------

    def replace_file(self, path: str, data: bytes, mode: int) -> None:
        """Replace a file's content atomically; the journal can roll it back.

        A temporary file in the same folder is renamed over it; a link of that name is replaced.
        If that isn't possible (a volume, a read-only filesystem, a file mounted there), our own
        file is mounted on it instead.
        """
        parent, name = self._place(path)
        try:
            if self._folder_verdict(parent).own:
                self._replace(parent, name, data, mode)
                return
        except OSError as error:
            if error.errno not in _CANT_REPLACE:
                raise
        self._cover_by_data(path, data, mode)

    def _replace(self, parent: int, name: str, data: bytes, mode: int) -> None:
        old = entries.remember(parent, name)
        label = old.label if old else None
        entries.put_file(parent, name, data, mode, self.owner, label)
        if old is None:
            self.journal.record(lambda: kernel.remove_file(parent, name))
        else:
            self.journal.record(lambda: old.put_back(parent, name))

    def _cover_by_data(self, path: str, data: bytes, mode: int) -> None:
        """Mount a read-only file with the data on an existing one."""
        place = self.mount_point(path)
        if place is None:
            return
        try:
            tree = self._file_in_memory(path, data, mode)
            self._held.append(tree)
            kernel.set_mount_attributes(tree, _COVER_ATTRIBUTES, path)
            self.attach(tree, place, path)
        finally:
            os.close(place)

    def _file_in_memory(self, path: str, data: bytes, mode: int) -> int:
        """Return a detached mount of one file on a tmpfs.

        Only a mount that is attached in our namespace can be cloned, so the tmpfs is briefly on
        the container's root. Descriptors opened below the root stay valid.
        """
        if self._verdict(self._fd).shared:
            raise _shared(path)
        tmpfs = kernel.new_tmpfs({"mode": "0755", "size": f"{len(data) + (1 << 20)}"}, 0)
        try:
            entries.put_file(tmpfs, "file", data, mode, self.owner, None)
            self.attaching(tmpfs)
            kernel.attach_mount(tmpfs, self._fd, path)
            try:
                fd = os.open("file", _LINK_FLAGS, dir_fd=tmpfs)
                try:
                    return kernel.clone_tree(fd, path)
                finally:
                    os.close(fd)
            finally:
                self._uncover(tmpfs)
        finally:
            os.close(tmpfs)

    def _uncover(self, tmpfs: int) -> None:
        """Unmount the tmpfs from the root; leave it to the journal if that fails."""
        try:
            kernel.detach_mount(tmpfs)
        except OSError:
            held = os.dup(tmpfs)
            self._held.append(held)
            self.journal.record(lambda: kernel.detach_mount(held))
            raise


def _wrong_kind(path: str, folder: bool, holder: str) -> InjectError:
    found, wanted = ("a file", "a folder") if folder else ("a folder", "a file")
    return InjectError(
        f"the {holder} has {found} at {path}, where {wanted} has to be mounted",
        f"Remove {path} from the {holder}",
    )


def _shared(path: str) -> InjectError:
    return InjectError(
        f"what is mounted on {path} in the container would show up on the host, because its parent "
        "mount is shared with the host",
        "Use the propagation rprivate or rslave for that volume, or for rootfsPropagation",
    )


class Journal:
    """Completed changes, each with the function that reverts it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def record(self, undo: "Callable[[], None]") -> None:
        """Record how to revert the change that was just made."""
        self._undo.append(undo)

    def roll_back(self) -> list[str]:
        """Revert every change, last first; return what failed, in words."""
        failures = []
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except OSError as error:
                failures.append(str(error))
        return failures
