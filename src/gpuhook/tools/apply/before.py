"""What a root folder was before devices were put into it, and how it becomes that again.

All that a plan can touch is looked at and written down before the first change, so that a run
that is killed at any moment can be undone. The folder's owner may change it meanwhile: whatever
is undone is looked up again, below the root, and only what looks as we left it goes.
"""

import base64
import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from gpuhook.ground.container import kernel
from gpuhook.ground.container.changes import Container
from gpuhook.ground.container.rootfs import read_link
from gpuhook.ground.errors import FolderError, GpuhookError
from gpuhook.ground.host import files as host_files
from gpuhook.ground.host import proc
from gpuhook.start.plan.operations import Operation, Symlink

Place = dict[str, Any]

_MOST_LINKS = 40  # include/linux/namei.h
_FILE_LIMIT = 64 << 20
_STATE_LIMIT = 256 << 20
_ABSENT, _LINK, _FILE, _OTHER = "absent", "link", "file", "other"


# Looking --------------------------------------------------------------------------------------


def look(container: Container, operations: Iterable[Operation]) -> list[Place]:
    """Return what there is at each place that the operations may change, in their order.

    A place has its ``path`` in the folder, links resolved, how many ``mounts`` are on it, what it
    ``was``, and which folders above it would be ``made``; a link's also what it is to lead to.
    """
    table = _mount_points()
    found: dict[str, Place] = {}
    for op in operations:
        path = op.to_json().get("destination")
        if path is None:
            continue
        target = op.target if isinstance(op, Symlink) else None
        written = op.kind in ("write", "ldcache")
        place = _place(container, path, follow=target is None and not written)
        if place["path"] in found:
            continue
        place["written"] = written
        if written:
            place["was"] = _with_data(container, place)
        place["mounts"] = table.count(_outside(container, place["path"]))
        if target is not None:
            place["link"] = target
        found[place["path"]] = place
    return list(found.values())


def _place(container: Container, path: str, *, follow: bool) -> Place:
    """Return a place: where its path leads, and what is there."""
    made: list[str] = []
    for _ in range(_MOST_LINKS):
        above, _, name = path.rpartition("/")
        folder = _folder(container, above, made)
        real = f"{folder}/{name}"
        target = None if made else read_link(container.folder(folder or "/"), name)
        if target is None or not follow:
            was = {"is": _ABSENT} if made else _content(container, folder, name)
            return {"path": real, "was": was, "made": made}
        path = target if target.startswith("/") else f"{folder}/{target}"
    raise FolderError(
        f"Links in the folder lead in a circle at {path}", "Remove them, and apply again"
    )


def _folder(container: Container, path: str, made: list[str]) -> str:
    """Return where a folder's path leads; what is missing of it is added to ``made``."""
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
        elif (target := read_link(container.folder(above), name)) is not None:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            here = [] if target.startswith("/") else here
            waiting += [word for word in target.split("/") if word not in ("", ".")][::-1]
            continue
        elif not container.exists(f"{above.rstrip('/')}/{name}"):
            made.append(f"{above.rstrip('/')}/{name}")
        here.append(name)
    return "".join(f"/{name}" for name in here)


def _content(container: Container, folder: str, name: str) -> dict[str, Any]:
    """Return what a name in a folder is."""
    parent = container.folder(folder or "/")
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return {"is": _ABSENT}
    owner = {"uid": status.st_uid, "gid": status.st_gid, "mode": stat.S_IMODE(status.st_mode)}
    if stat.S_ISLNK(status.st_mode):
        return {"is": _LINK, "target": read_link(parent, name), **owner}
    return {"is": _FILE if stat.S_ISREG(status.st_mode) else _OTHER, **owner}


def _with_data(container: Container, place: Place) -> dict[str, Any]:
    """Return what a place was, and the content of a file that is replaced."""
    was: dict[str, Any] = place["was"]
    if was["is"] == _FILE:
        data = container.read_file(place["path"], _FILE_LIMIT) or b""
        return {**was, "data": base64.b64encode(data).decode()}
    return was


def seal(container: Container, places: list[Place]) -> None:
    """Note what we have written, by which undoing knows that nobody has changed it since."""
    for place in places:
        if place["written"]:
            data = container.read_file(place["path"], _FILE_LIMIT) or b""
            place["now"] = _digest(data)


def _mount_points() -> list[str]:
    table = proc.Mounts(proc.read("/proc/self/mountinfo"))
    return [proc.unescaped(mount.point) for mount in table]


def _outside(container: Container, path: str) -> str:
    """Return what a path in the folder is called in this namespace's table of mounts."""
    return container.real_place().rstrip("/") + path


# Undoing --------------------------------------------------------------------------------------


def put_back(container: Container, places: list[Place]) -> list[str]:
    """Make the folder what it was; return what couldn't be, a sentence each without a full stop."""
    problems = [text for place in places[::-1] for text in _unmount(container, place)]
    for place in places[::-1]:
        try:
            _restore(container, place)
        except (OSError, GpuhookError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems.append(f"{place['path']} can't become what it was: {reason}")
    return problems


def _unmount(container: Container, place: Place) -> Iterator[str]:
    """Take off what is mounted on a place beyond what was there."""
    more = _mount_points().count(_outside(container, place["path"])) - place["mounts"]
    for _ in range(more):
        try:
            fd = container.open(place["path"])
            try:
                kernel.detach_mount(fd)
            finally:
                os.close(fd)
        except OSError as error:
            yield f"what is mounted on {place['path']} can't be taken off: {error.strerror}"
            return


def _restore(container: Container, place: Place) -> None:
    folder, _, name = place["path"].rpartition("/")
    # A run that was killed may have made some of the folders above, and not this one.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        parent = container.open(folder or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            _restore_name(container, parent, name, place)
        finally:
            os.close(parent)
    for path in place["made"][::-1]:
        above, _, name = path.rpartition("/")
        with contextlib.suppress(OSError):  # somebody else uses it, or it is gone
            kernel.remove_folder(container.folder(above or "/"), name)


def _restore_name(container: Container, parent: int, name: str, place: Place) -> None:
    was = place["was"]
    if not _is_changed(place) or not _is_ours(container, parent, name, place):
        return
    if was["is"] == _ABSENT:
        _remove(parent, name)
    elif was["is"] == _LINK and was["target"] != read_link(parent, name):
        kernel.remove_file(parent, name)
        kernel.create_link(parent, name, was["target"])
        kernel.change_owner(parent, name, (was["uid"], was["gid"]))
    elif "data" in was:
        container.owner = (was["uid"], was["gid"])
        data = base64.b64decode(was["data"])
        container.replace_file(place["path"], data, was["mode"])


def _is_changed(place: Place) -> bool:
    """Tell whether a name is made or replaced for a plan, and not mounted on alone."""
    was = place["was"]["is"]
    replaced = "link" in place or place["written"]
    return was == _ABSENT or (was in (_LINK, _FILE) and replaced)


def _is_ours(container: Container, parent: int, name: str, place: Place) -> bool:
    """Tell whether a name is as we left it: our link or file, or an empty one to mount on."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(status.st_mode):
        return read_link(parent, name) == place.get("link")
    if not stat.S_ISREG(status.st_mode):
        return stat.S_ISDIR(status.st_mode)
    if not place["written"]:
        return status.st_size == 0
    data = container.read_file(place["path"], _FILE_LIMIT) or b""
    return place.get("now") in (None, _digest(data))


def _remove(parent: int, name: str) -> None:
    try:
        kernel.remove_file(parent, name)
    except IsADirectoryError:
        with contextlib.suppress(OSError):
            kernel.remove_folder(parent, name)


# Remembering ------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    import hashlib  # noqa: PLC0415 - OpenSSL takes 5 ms, and many who import this apply nothing

    return hashlib.sha256(data).hexdigest()


def state_file(state: str, rootfs: str) -> str:
    """Return where it is written down what a folder was."""
    digest = _digest(os.fsencode(rootfs))[:32]
    return os.path.join(state, "applied", f"{digest}.json")


def save(path: str, rootfs: str, places: list[Place]) -> None:
    """Write down what a folder was, for root alone; FolderError where that can't be."""
    try:
        host_files.check_way(path)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        text = json.dumps({"rootfs": rootfs, "places": places})
        host_files.replace(path, text.encode(), 0o600)
    except OSError as error:
        raise FolderError(
            f"What {rootfs} was can't be written down in {path}: {error.strerror}",
            "Name a folder that can be written to with --state-dir, or give --no-undo",
        ) from None


def load(path: str) -> list[Place] | None:
    """Return what a folder was, None where nothing is known; FolderError for a damaged file."""
    try:
        host_files.check_writers(path)
        found = json.loads(host_files.read(path, _STATE_LIMIT))
        places: list[Place] = found["places"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FolderError(
            f"{path}, which says what the folder was, can't be read: {error}",
            "Remove it; unmount what is mounted in the folder yourself",
        ) from None
    return places


def forget(path: str) -> None:
    """Remove what was written down."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
