"""LXC containers that have devices: their requests, and the files that configure them.

A container's own file gets a single line. It includes a file in the state folder, which is
written again when the driver has changed. So Proxmox, which moves comments and copies lines to
snapshots when it writes a container's file, keeps that line intact.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuhook.base.config.loader import load
from gpuhook.base.errors import EngineError, FolderError, GpuhookError, shown
from gpuhook.hpc.lxc import lines
from gpuhook.hpc.lxc.engine import NAME
from gpuhook.hpc.rootfs.requests import FolderRequest, Requests, Units, planned
from gpuhook.tools.engines import lxc_text
from gpuhook.tools.engines.files import DROP_IN_HEADER, read_text
from gpuhook.tools.engines.prefix import below

_PROXMOX = "/etc/pve/lxc"
_SYSTEM = "/etc/lxc/lxc.conf"
_FOLDER = "/var/lib/lxc"
_PATH = re.compile(r"^\s*lxc\.lxcpath\s*=\s*(/\S*)\s*$", re.MULTILINE)
_ROOTFS = re.compile(r"^\s*lxc\.rootfs(?:\.path)?\s*=\s*(?:dir:|btrfs:)?(/.*?)\s*$", re.MULTILINE)
_INCLUDE = "lxc.include"
_RULE = re.compile(
    r"^[ \t]*(lxc\.include|lxc\.cgroup2\.devices\.(?:allow|deny))[ \t]*=[ \t]*(.*?)[ \t\r]*$",
    re.MULTILINE,
)
_MOST_INCLUDES = 8  # in each other
# A user mapping, in LXC's own files and in those of Proxmox.
_MAPPED = re.compile(r"^\s*(?:lxc\.idmap\s*[:=]\s*[ugb]|unprivileged:\s*1\s*$)", re.MULTILINE)


@dataclass(frozen=True)
class LxcContainer(FolderRequest):
    """A container and its request; ``file`` is its configuration file."""


@dataclass(frozen=True)
class LxcFiles:
    """The contents of a container's files, and messages.

    ``units`` are its configuration file with the path that is to be included there, and the
    included file with its text.
    """

    units: Units
    warnings: tuple[str, ...]


def files(container: LxcContainer, state: str, prefix: str = "") -> LxcFiles:
    """Return a container's files; RequestError if it requests nothing.

    ``state`` is the state folder, ``prefix`` a folder to use as /.
    """
    config = below(prefix, container.file)
    for other in requests(state).load():
        if other.name == container.name and other.file != container.file:
            raise EngineError(
                f"The container {other.name} of {other.file} has devices already",
                f"Remove them first: gpuhook uninstall --engine lxc --container {other.name}",
            )
    text = _text(config)
    rootfs = _rootfs(container, text, prefix)
    done, plan = planned(rootfs, container.asked, load(container.config))
    try:
        versions = lines.versions(is_restricted=_is_restricted(config, prefix))
        made = lines.lines(plan, done.environment, rootfs, versions)
    except OSError as error:
        raise FolderError(
            f"{rootfs} can't be examined: {error.strerror} ({error.filename})",
            "Fix or remove that path in the container, or name another folder with --rootfs",
        ) from None
    said = lines.warnings(plan) if _MAPPED.search(text) else []
    included = included_file(container.name, state)
    content = "".join(f"{line}\n" for line in (f"# {DROP_IN_HEADER}", *made))
    inside = included.removeprefix(prefix.rstrip("/"))
    return LxcFiles(((config, inside), (included, content)), (*done.warnings, *said))


def included_file(name: str, state: str) -> str:
    """Return the path of the file that a container's configuration file includes."""
    return os.path.join(state, NAME, f"{lxc_text.PREFIX}{name}.conf")


def guest(request: FolderRequest, prefix: str) -> LxcContainer:
    """Return the container of a request; EngineError if there is none on this host."""
    request.check("an LXC container's")
    name = request.name
    usual = (f"{_PROXMOX}/{name}.conf", f"{_folder(prefix)}/{name}/config")
    places = (request.file.removeprefix(prefix.rstrip("/")),) if request.file else usual
    for place in places:
        if os.path.lexists(below(prefix, place)):
            return LxcContainer(**{**vars(request), "file": place})
    verb = "doesn't" if request.file else "don't"
    raise EngineError(
        f"There is no LXC container {name} here: {' and '.join(places)} {verb} exist",
        "Name one that lxc-ls or pct list shows, or its file with --config",
    )


def _folder(prefix: str) -> str:
    """Return LXC's folder of containers."""
    found = _PATH.findall(read_text(below(prefix, _SYSTEM)) or "")
    return found[-1].rstrip("/") if found else _FOLDER


def _text(path: str) -> str:
    """Return the part of a configuration file that is in force."""
    text = read_text(path) or ""
    return text.partition("\n[")[0] if lxc_text.is_proxmox(path) else text


def _rootfs(container: LxcContainer, text: str, prefix: str) -> str | None:
    """Return the root folder, None if it isn't a folder: an image is treated like Debian's."""
    found = _ROOTFS.findall(text)
    path = container.rootfs or (below(prefix, found[-1]) if found else "")
    if container.rootfs and not os.path.isdir(path):
        raise FolderError(f"{path} isn't a folder", "Name the container's root with --rootfs")
    return path if os.path.isdir(path) else None


def _is_restricted(config: str, prefix: str) -> bool:
    """Tell whether a container has rules for devices of cgroups v2; userns.conf removes them."""
    if lxc_text.is_proxmox(config):
        number = os.path.basename(config).removesuffix(".conf")
        config = below(prefix, f"{_FOLDER}/{number}/config")  # written at its first start
        if not os.path.exists(config):
            return True
    found: set[str] = set()
    _note_rules(config, found, _MOST_INCLUDES)
    return bool(found)


def _note_rules(path: str, found: set[str], depth: int) -> None:
    """Add the keys of rules in a file and those it includes; an empty value removes its key."""
    for key, value in _RULE.findall(read_text(path) or "") if depth else ():
        if key != _INCLUDE:
            (found.add if value else found.discard)(key)
        elif not os.path.basename(value).startswith(lxc_text.PREFIX):
            inside = sorted(glob.glob(f"{glob.escape(value)}/*.conf"))
            for each in inside if os.path.isdir(value) else [value]:
                _note_rules(each, found, depth - 1)


def every_file() -> Iterator[str]:
    """Yield the configuration files of all containers of this host."""
    found = glob.glob(f"{_PROXMOX}/*.conf")  # Proxmox writes those of LXC itself
    yield from sorted(found or glob.glob(f"{glob.escape(_folder(''))}/*/config"))


# Keeping them fresh ------------------------------------------------------------------------------


def refresh(state: str) -> tuple[list[str], list[GpuhookError]]:
    """Write the included files of all containers again; return those that changed, and errors.

    Containers' own files stay unchanged, so a line that their owner has removed stays removed.
    """

    def units(container: LxcContainer) -> Units:
        if not os.path.exists(container.file):
            return ()  # it was destroyed
        (config, _), included = files(container, state).units
        return (config, ""), included

    return requests(state).refresh(units)


def requests(state: str) -> Requests[LxcContainer]:
    """Return the stored requests."""
    return Requests(state, NAME, LxcContainer)


def remember(state: str, container: LxcContainer) -> None:
    """Store a container, in place of its earlier request."""
    requests(state).put(container)


def file_of(state: str, name: str) -> str:
    """Return the file of a container that has devices; EngineError if there is none."""
    for each in requests(state).load():
        if each.name == name:
            return each.file
    raise EngineError(
        f"gpuhook install has added no devices to an LXC container {shown(name)}",
        f"Name one that {os.path.join(state, NAME)}.json lists",
    )


def forget(state: str, paths: Iterable[str]) -> None:
    """Remove the containers with these configuration files."""
    gone = {*paths}
    names = [each.name for each in requests(state).load() if each.file in gone]
    requests(state).drop(names)
