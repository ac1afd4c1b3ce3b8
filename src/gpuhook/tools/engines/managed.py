"""Files of engines that another program writes again, or that can't be written at all.

An edit of the first would be lost. Who says so in the file's first comment, a folder such as
NixOS' store, and the systems that write all of /etc are known here.
"""

import os
import re
from collections.abc import Callable

from gpuhook.ground.errors import EngineError, printable, shown
from gpuhook.tools.engines.files import has_header, read_text

_PAGE = "docs/engines/distributions.md"
_SAID = re.compile(
    r"do(?:es)? not (?:edit|modify|change)|don't (?:edit|modify|change)|auto(?:matically)?[ -]?"
    r"generated|(?:generated|managed) (?:automatically )?by|"
    r"(?:ansible|puppet|chef|salt|cfengine)[ -]managed|will be (?:overwritten|replaced|lost)|"
    r"is (?:generated|managed)",
    re.IGNORECASE,
)
# Folders of files that a system makes of its configuration, and the setting for each engine.
STORES = {"/nix/store": "NixOS", "/gnu/store": "Guix"}
_SETTINGS = {
    "docker": "virtualisation.docker.daemon.settings",
    "containerd": "virtualisation.containerd.settings",
    "crio": "virtualisation.cri-o.settings",
    "podman": "virtualisation.containers.containersConf.settings",
}
_OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
_TALOS_FILES = "/etc/cri/"
# The programs that call runc on Bottlerocket, by which its file is known in a pod, too.
BOTTLEROCKETS = frozenset({"shimpei", "nvidia-oci"})
# Systems on which nothing in /etc is a user's to write, and which have no shell for gpu-py.
_CLOSED = {"talos": "Talos", "bottlerocket": "Bottlerocket"}
_MOUNTS = (
    "Give pods devices without a runtime of gpuhook's: "
    "kubectl apply -k packaging/kubernetes/overlays/mounts (docs/kubernetes/mounts.md)"
)


def check_system(engine: str, system: Callable[[str], str], config: str | None = None) -> None:
    """Raise EngineError on a system that writes the engines' files from settings of its own.

    ``system`` gives a path's place, below a prefix where there is one; ``config`` is the file that
    was named.
    """
    if config and os.path.isabs(talos := _place(system, _TALOS_FILES)) and config.startswith(talos):
        raise closed(engine, _CLOSED["talos"])
    for path in _OS_RELEASE:
        for line in (read_text(_place(system, path)) or "").split("\n"):
            name = line.removeprefix("ID=").strip("\"' ")
            if line.startswith("ID=") and name in _CLOSED:
                raise closed(engine, _CLOSED[name])


def _place(system: Callable[[str], str], path: str) -> str:
    """Return where a path of the system is, "" where a link leads out of a prefix."""
    try:
        return system(path)
    except EngineError:
        return ""


def closed(engine: str, system: str) -> EngineError:
    """Return the error for an engine on a system where nothing can be installed for it."""
    return EngineError(
        f"{system} writes the files of {engine} itself, from its own settings, and has no shell "
        "for gpu-py",
        _MOUNTS,
    )


def claim(text: str) -> tuple[int, str] | None:
    """Return (line, text) of the comment at the start that says that a program writes the file."""
    if has_header(text.encode("utf-8", "replace")):
        return None
    for number, line in enumerate(text.split("\n"), 1):
        content = line.strip()
        if content and not content.startswith("#"):
            return None
        if _SAID.search(content):
            return number, content
    return None


def check_edit(engine: str, path: str, text: str, instead: str) -> None:
    """Raise EngineError for a file that says that another program writes it.

    ``instead`` is what that program has to write in the place of our edit.
    """
    found = claim(text)
    if found is None:
        return
    line, said = found
    raise EngineError(
        f"{path} is written by another program, as its line {line} says ({shown(said)}), and "
        f"an edit for {engine} would be lost",
        f"Have that program write {instead}, and run this again; or remove that line if none does",
    )


def check_store(engine: str, path: str) -> None:
    """Raise EngineError for a file that is, or leads to, one of a read-only store."""
    real = os.path.realpath(path)
    for folder, system in STORES.items():
        if real.startswith(f"{folder}/"):
            leads = "is" if real == path else f"leads to {printable(real)},"
            setting = f" ({_SETTINGS[engine]})" if engine in _SETTINGS else ""
            raise EngineError(
                f"{printable(path)} {leads} a file that {system} makes of the system's "
                "configuration",
                f"Write it there{setting}, as {_PAGE} shows",
            )


def check_writable(path: str) -> None:
    """Raise EngineError for a file on a filesystem that is mounted read-only."""
    folder = os.path.dirname(os.path.realpath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise EngineError(
            f"{printable(path)} is on a filesystem that is mounted read-only",
            "Copy it to where it can be written, have the engine's unit name that copy, and name "
            f"it with --config, or a writable copy of the system with --prefix ({_PAGE})",
        )
