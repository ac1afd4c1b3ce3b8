"""Backup of a root folder's files before devices are added, and their restoration.

Everything that a plan can change is recorded before the first change. The folder's owner may
change it meanwhile, so each path is resolved again below the root before it is restored. Only
files that look unchanged are removed, using the descriptor of a folder that belongs to the root.
Nothing is restored in a volume, because nothing is created there.
"""

import base64
import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from typing import Any

from gpuhook.base.container import entries, kernel
from gpuhook.base.container.rootfs import read_link
from gpuhook.base.errors import FolderError
from gpuhook.core.plan.operations import Operation
from gpuhook.hpc.rootfs.folder import Folder
from gpuhook.hpc.rootfs.record import Place, digest

_MOST_LINKS = 40  # include/linux/namei.h
_ABSENT, _LINK, _FILE, _OTHER = "absent", "link", "file", "other"


# Backup ---------------------------------------------------------------------------------------


def look(folder: Folder, operations: Iterable[Operation]) -> list[Place]:
    """Return the current state of each place that the operations may change, in their order.

    A place has its resolved ``path`` in the folder, the path ``named`` by the operations, whether
    it is ``written``, what it ``was``, and the parent folders to be ``made``; a link also has its
    new target. A place in a volume is only marked to stay.
    """
    found: dict[str, Place] = {}
    for op in operations:
        said = op.to_json()
        path, target = said.get("destination"), said.get("target")
        if path is None:
            continue
        written = op.kind in ("write", "ldcache")
        place = _place(folder, path, link=target is not None, written=written)
        known = found.setdefault(place["path"], place)
        known["named"].append(path)
        if target is not None and known is place:
            place["link"] = target
    return list(found.values())


def _place(folder: Folder, path: str, *, link: bool, written: bool) -> Place:
    """Return a place: its path, resolved unless it becomes a link or is written, and its state."""
    made: list[str] = []
    named: list[str] = []
    for _ in range(_MOST_LINKS):
        above, _, name = path.rpartition("/")
        above = _folder(folder, above, made)
        real = f"{above}/{name}"
        target = None if made else read_link(folder.folder(above or "/"), name)
        if target is None or link or written:
            place = {"path": real, "named": named, "written": written, "made": made}
            parent = folder.folder((made[0].rpartition("/")[0] if made else above) or "/")
            if not folder.is_own(parent):  # protects: volume-stays
                return {**place, "made": [], "was": {"is": _OTHER}}
            if made:
                return {**place, "was": {"is": _ABSENT}}
            replaced = written or (link and _is_empty(parent, name))
            return {**place, "was": _content(parent, name, replaced)}
        path = target if target.startswith("/") else f"{above}/{target}"
    raise FolderError(
        f"The links in the folder form a loop at {path}", "Remove them, and apply again"
    )


def _folder(folder: Folder, path: str, made: list[str]) -> str:
    """Return a folder's resolved path; missing folders are added to ``made``."""
    waiting = [word for word in path.split("/") if word not in ("", ".")][::-1]
    here: list[str] = []
    links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            del here[-1:]
            continue
        above = "/" + "/".join(here)
        if made:
            made.append(f"{above.rstrip('/')}/{name}")
        elif (target := read_link(folder.folder(above), name)) is not None:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            here = [] if target.startswith("/") else here
            waiting += [word for word in target.split("/") if word not in ("", ".")][::-1]
            continue
        elif not folder.exists(f"{above.rstrip('/')}/{name}"):
            made.append(f"{above.rstrip('/')}/{name}")
        here.append(name)
    return "".join(f"/{name}" for name in here)


def _content(parent: int, name: str, replaced: bool) -> dict[str, Any]:
    """Return the state of a name in a folder; for a replaced one, everything to restore it.

    OSError if a replaced one is neither a link nor a file.
    """
    if replaced:
        # Content and owner must be of one file, or the folder's owner could exchange it meanwhile.
        old = entries.remember(parent, name)  # protects: one-file
        if old is None:
            return {"is": _ABSENT}
        if old.link is None:
            label = old.label and base64.b64encode(old.label).decode()
            data = base64.b64encode(old.data).decode()
            return {"is": _FILE, "data": data, "label": label, **_owner(old.status)}
        return {"is": _LINK, "target": old.link, **_owner(old.status)}
    fd = entries.open_here(parent, name)
    if fd is None:
        return {"is": _ABSENT}
    try:
        status = os.fstat(fd)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink("", dir_fd=fd)  # protects: noted-link
            return {"is": _LINK, "target": target, **_owner(status)}
        return {"is": _FILE if stat.S_ISREG(status.st_mode) else _OTHER}
    finally:
        os.close(fd)


def _is_empty(parent: int, name: str) -> bool:
    """Tell whether a name is an empty file, which a link replaces; other files are masked."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _owner(status: os.stat_result) -> dict[str, int]:
    return {"uid": status.st_uid, "gid": status.st_gid, "mode": stat.S_IMODE(status.st_mode)}


# Restoration ----------------------------------------------------------------------------------


def put_back(folder: Folder, places: list[Place]) -> list[str]:
    """Restore the folder; return the failures as sentences without a full stop."""
    problems = []
    for place in places[::-1]:
        try:
            _restore(folder, place)
        except OSError as error:
            problems.append(f"{place['path']} can't be restored: {error.strerror}")
    return problems


def _restore(folder: Folder, place: Place) -> None:
    above, _, name = place["path"].rpartition("/")
    # A run that was killed may have created only some of the parent folders.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        parent = folder.open(above or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            _restore_name(folder, parent, name, place)
        finally:
            os.close(parent)
    for path in place["made"][::-1]:
        above, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            parent = folder.open(above or "/", os.O_PATH | os.O_DIRECTORY)
            try:
                _check_own(folder, parent)  # protects: undone-folders-volume
                _remove_folder(parent, name)
            finally:
                os.close(parent)


def _restore_name(folder: Folder, parent: int, name: str, place: Place) -> None:
    was = place["was"]
    if not _is_changed(place):
        return
    _check_own(folder, parent)  # protects: undone-volume
    if _is_replaced(place):
        _remove_left(parent, entries.temporary(name))
    if not _is_ours(parent, name, place):
        return
    if was["is"] == _ABSENT:
        _remove(parent, name)
    elif was["is"] == _LINK:
        entries.put_link(parent, name, was["target"], (was["uid"], was["gid"]))
    elif "data" in was:
        label = was["label"] and base64.b64decode(was["label"])
        owner = (was["uid"], was["gid"])
        entries.put_file(parent, name, base64.b64decode(was["data"]), was["mode"], owner, label)


def _remove_left(parent: int, name: str) -> None:
    """Remove the temporary file of a run that was killed, if there is one.

    It is looked up first: a read-only filesystem refuses to remove even a missing file.
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=parent, follow_symlinks=False)
        kernel.remove_file(parent, name)


def _check_own(folder: Folder, parent: int) -> None:
    """Raise OSError for an open folder that doesn't belong to the root."""
    if not folder.is_own(parent):
        raise OSError(errno.EXDEV, "a volume is there now, in which nothing is changed")


def _is_changed(place: Place) -> bool:
    """Tell whether a name is created or replaced for a plan, and not only mounted on."""
    was = place["was"]["is"]
    return was == _ABSENT or (was in (_LINK, _FILE) and _is_replaced(place))


def _is_replaced(place: Place) -> bool:
    return "link" in place or place["written"]


def _is_ours(parent: int, name: str, place: Place) -> bool:
    """Tell whether a name is unchanged since our run: our link or file, or an empty mount point."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(status.st_mode):
        was = place["was"].get("target")
        return "link" in place and read_link(parent, name) == place["link"] != was
    if not stat.S_ISREG(status.st_mode):
        return stat.S_ISDIR(status.st_mode) and not _is_replaced(place)
    if not place["written"]:
        return status.st_size == 0 and "link" not in place
    # A file without a recorded write was never written.
    old = entries.remember(parent, name) if "now" in place else None
    return old is not None and old.link is None and place["now"] == digest(old.data)


def _remove(parent: int, name: str) -> None:
    try:
        kernel.remove_file(parent, name)
    except IsADirectoryError:
        _remove_folder(parent, name)


def _remove_folder(parent: int, name: str) -> None:
    with contextlib.suppress(OSError):  # it is in use by others, or gone
        kernel.remove_folder(parent, name)
