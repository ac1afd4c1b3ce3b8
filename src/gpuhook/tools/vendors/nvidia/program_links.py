"""Links with the names of NVIDIA's programs to gpuhook's, for engines that look for those names.

Docker's --gpus needs a nvidia-container-runtime-hook on dockerd's PATH, old daemon.json
entries call nvidia-container-runtime, and ctr --gpus, Apptainer, enroot and gVisor call
nvidia-container-cli. Docker 29.2 and newer implement --gpus with CDI specs if dockerd finds a
nvidia-cdi-hook. Scripts call nvidia-ctk. NVIDIA's own programs are never replaced or hidden.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuhook.base import names
from gpuhook.base.errors import EngineError
from gpuhook.base.host import files as host_files
from gpuhook.tools.engines.made import MadeFolders
from gpuhook.tools.engines.prefix import check_kept, is_plain
from gpuhook.tools.engines.state_file import StateFile

_RUNTIME = "nvidia-container-runtime"
LINKS = {
    _RUNTIME: names.RUNTIME,
    "nvidia-container-runtime-hook": names.HOOK,
    "nvidia-container-cli": "gpuhook-container-cli",
    names.TOOLKIT_CDI_HOOK: names.CDI_HOOK,
    "nvidia-ctk": "gpuhook-ctk",
}
DEFAULT_FOLDER = "/usr/local/bin"
# The PATH of daemons started by systemd; NVIDIA's packages install to one of these.
TOOLKIT_FOLDER = "/usr/local/nvidia/toolkit"  # of the GPU Operator
_SEARCHED = (*names.SEARCH_PATH.split(":"), TOOLKIT_FOLDER)


@dataclass(frozen=True)
class Link:
    """A link to create in a folder, and the gpuhook program that it leads to."""

    path: str
    program: str

    @property
    def is_there(self) -> bool:
        """True if the link exists and leads to our program."""
        return os.path.islink(self.path) and os.readlink(self.path) == self.program


def plan(
    folder: str, programs: str, prefix: str = "", ours: "list[Link] | None" = None
) -> tuple[list[Link], list[str]]:
    """Return the links to create in ``folder``, and the reasons why others are skipped.

    ``programs`` is the folder of gpuhook's programs, ``ours`` are links that were created before:
    they may lead to the programs' former folder.
    """
    before = {link.path for link in ours or () if link.is_there}
    links, reasons = [], []
    for name, program in LINKS.items():
        link = Link(os.path.join(folder, name), os.path.join(programs, program))
        found = None if link.path in before else _installed(name, folder, prefix, link)
        if found:
            reasons.append(f"{found} is installed already, so {link.path} is not created")
        else:
            links.append(link)
    return links, reasons


def _installed(name: str, folder: str, prefix: str, link: Link) -> str | None:
    """Return the path of a program of that name that is not our link."""
    places = dict.fromkeys([folder, *(prefix.rstrip("/") + place for place in _SEARCHED)])
    for place in places:
        path = os.path.join(place, name)
        if os.path.lexists(path) and os.path.realpath(path) != os.path.realpath(link.program):
            return path
    return None


class LinkRecord:
    """The record of created links, in the state folder; with a prefix, both are below it."""

    def __init__(self, state: str, prefix: str = "") -> None:
        path = os.path.join(state, "nvidia-names.json")
        remedy = "Remove NVIDIA's names that are links to gpuhook by hand, and this file"
        self._file = StateFile(path, EngineError, remedy, mode=0o644)
        self._made = MadeFolders(state, prefix)
        self._prefix = prefix

    def links(self) -> list[Link]:
        """Return the created links."""
        links = self._file.load(_links) or []
        for link in links:
            check_kept(self._prefix, self._file.path, os.path.dirname(link.path))
        return links

    def runtimes(self, planned: Iterable[Link] = ()) -> tuple[str, ...]:
        """Return the links to gpu-py, created or planned, as programs below the prefix see them."""
        every = {link.path: link.program for link in (*self.links(), *planned)}
        ours = [path for path in every if os.path.basename(path) == _RUNTIME]
        return tuple(path.removeprefix(self._prefix.rstrip("/")) for path in ours)

    def folder_of_dead(self) -> str | None:
        """Return the folder of a link that dangles because gpuhook has moved; None if none does."""
        dead = [link for link in self.links() if link.is_there and not os.path.exists(link.program)]
        return os.path.dirname(dead[0].path) if dead else None

    def check(self, folder: str) -> None:
        """Raise EngineError for a folder in which links can't be made or remembered."""
        check_kept(self._prefix, self._file.path, folder)
        host_files.check_way(folder)

    def make(self, links: list[Link]) -> list[Link]:
        """Create the missing links; return them."""
        for link in links:
            self.check(os.path.dirname(link.path))
        missing = [link for link in links if not link.is_there]
        before = {link.path for link in self.links() if link.is_there}
        known = {link.path: link.program for link in [*self.links(), *links]}
        self._file.save(known)
        try:
            for link in missing:
                self._made.make(os.path.dirname(link.path))
                if link.path in before:
                    os.unlink(link.path)
                os.symlink(link.program, link.path)
        except OSError as error:
            raise EngineError(
                f"{error.filename2 or error.filename} can't be created: {error.strerror}",
                "Run this as root, or name another folder of dockerd's PATH with --bin-dir",
            ) from None
        return missing

    def remove(self) -> list[Link]:
        """Remove the links that are still ours; return them."""
        ours = [link for link in self.links() if link.is_there]
        for link in ours:
            host_files.check_way(os.path.dirname(link.path))
        try:
            for link in ours:
                os.unlink(link.path)
            self._file.remove()
            self._made.tidy()
        except OSError as error:
            raise EngineError(
                f"{error.filename} can't be removed: {error.strerror}", "Run this as root"
            ) from None
        return ours


def _links(found: Any) -> list[Link]:
    links = [Link(path, program) for path, program in found.items()]
    if not all(is_plain(link.path) and isinstance(link.program, str) for link in links):
        raise ValueError("it contains something that isn't a path")
    return links
