"""Detection of engines' files that another program regenerates, or that are read-only.

An edit of a regenerated file would be lost. Such files are recognised by their first comment, by
a folder such as the NixOS store, and by systems that write all of /etc.
"""

import os
import re
from collections.abc import Callable

from gpuhook.base.errors import EngineError, printable, shown
from gpuhook.tools.engines.files import has_header, read_text

_PAGE = "docs/engines/distributions.md"
_SAID = re.compile(
    r"do(?:es)? not (?:edit|modify|change)|don't (?:edit|modify|change)|auto(?:matically)?[ -]?"
    r"generated|(?:generated|managed) (?:automatically )?by|"
    r"(?:ansible|puppet|chef|salt|cfengine)[ -]managed|will be (?:overwritten|replaced|lost)|"
    r"is (?:generated|managed)",
    re.IGNORECASE,
)
# Folders of files that a system generates from its configuration, and the setting per engine.
STORES = {"/nix/store": "NixOS", "/gnu/store": "Guix"}
_SETTINGS = {
    "docker": "virtualisation.docker.daemon.settings",
    "containerd": "virtualisation.containerd.settings",
    "crio": "virtualisation.cri-o.settings",
    "podman": "virtualisation.containers.containersConf.settings",
}
_OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
_TALOS_FILES = "/etc/cri/"
# The programs that call runc on Bottlerocket; they identify its file in a pod, too.
BOTTLEROCKETS = frozenset({"shimpei", "nvidia-oci"})
# Systems on which users can't change /etc.
_CLOSED = {"talos": "Talos", "bottlerocket": "Bottlerocket"}
_MOUNTS = (
    "Add devices to pods without gpuhook's runtime: "
    "kubectl apply -k packaging/kubernetes/overlays/mounts (docs/kubernetes/mounts.md)"
)


def check_system(engine: str, system: Callable[[str], str], config: str | None = None) -> None:
    """Raise EngineError on a system that writes the engines' files from its own settings.

    ``system`` returns a path below the prefix, if there is one; ``config`` is the file named by
    the user.
    """
    if config and os.path.isabs(talos := _place(system, _TALOS_FILES)) and config.startswith(talos):
        raise closed(engine, _CLOSED["talos"])
    for path in _OS_RELEASE:
        for line in (read_text(_place(system, path)) or "").split("\n"):
            name = line.removeprefix("ID=").strip("\"' ")
            if line.startswith("ID=") and name in _CLOSED:
                raise closed(engine, _CLOSED[name])


def _place(system: Callable[[str], str], path: str) -> str:
    """Return a path of the system, "" if a link leads out of the prefix."""
    try:
        return system(path)
    except EngineError:
        return ""


def closed(engine: str, system: str) -> EngineError:
    """Return the error for an engine on a system where its files can't be changed."""
    return EngineError(
        f"{system} writes the files of {engine} itself, from its own settings, which "
        "can't name gpu-py",
        _MOUNTS,
    )


def claim(text: str) -> tuple[int, str] | None:
    """Return (line, text) of a leading comment that says that a program writes the file."""
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

    ``instead`` is the content that the other program must write in place of our edit.
    """
    found = claim(text)
    if found is None:
        return
    line, said = found
    raise EngineError(
        f"{path} is written by another program, as its line {line} says ({shown(said)}), and "
        f"an edit for {engine} would be lost",
        f"Make that program write {instead}, and run this again; or remove the line if it is wrong",
    )


def check_store(engine: str, path: str) -> None:
    """Raise EngineError for a file in a read-only store, or a link to one."""
    real = os.path.realpath(path)
    for folder, system in STORES.items():
        if real.startswith(f"{folder}/"):
            leads = "is" if real == path else f"leads to {printable(real)},"
            setting = f" ({_SETTINGS[engine]})" if engine in _SETTINGS else ""
            raise EngineError(
                f"{printable(path)} {leads} a file that {system} generates from the system's "
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
            "Copy it to a writable place, name the copy in the engine's unit and with --config, "
            f"or name a writable copy of the system with --prefix ({_PAGE})",
        )
