"""The devices to which Slurm restricts access, by its configuration.

The kernel lets every job open devices that Slurm doesn't guard. For those, a successful open says
nothing about the job that owns them. Sources: cgroup.conf(5), slurm.conf(5) and gres.conf(5), and
Slurm's parse_config.c.
"""

import os
import re
import stat

from gpuhook.base.errors import ConfigError
from gpuhook.base.host import files
from gpuhook.hpc.slurm import node as nodes
from gpuhook.hpc.slurm.gres import NAME
from gpuhook.hpc.slurm.node import Line, SlurmNode

_SLURM_CONF, _GRES_CONF = "slurm.conf", "gres.conf"
_PLUGIN = "cgroup"  # the task plugin that guards devices
_MOST = 1 << 12  # files that one line names
_INCLUDE = re.compile(r"^\s*Include\s", re.IGNORECASE | re.MULTILINE)
_OFF = "off"
# Keys of gres.conf: for files that are a device each, and for files that together are one device.
_ONE, _SEVERAL = "file", "multiplefiles"


class GresDevices:
    """The devices that gres.conf names, by their numbers; None if Slurm detects them itself.

    ``has_any`` is true if Slurm has any devices of this node.
    """

    def __init__(self, numbers: frozenset[int] | None, *, has_any: bool) -> None:
        self._numbers = numbers
        self.has_any = has_any

    def has(self, paths: list[str]) -> bool:
        """Tell whether Slurm guards at least one of a device's nodes."""
        numbers = self._numbers
        return numbers is None or any(_number(path) in numbers for path in paths)


def guarded(cgroup_conf: str) -> GresDevices:
    """Return the devices that Slurm guards, by the files in cgroup.conf's folder.

    ConfigError if it guards none. That needs a setting in cgroup.conf, a plugin in slurm.conf, and
    lines in gres.conf for this node and for the plugin whose files Slurm guards. ConfigError also
    if slurm.conf gives the node fewer devices: Slurm leaves the rest open.
    """
    folder = os.path.dirname(cgroup_conf)
    constrain = _values(_whole(cgroup_conf), "ConstrainDevices")
    if constrain[-1:] != ["yes"]:  # protects: slurm-constrains
        raise _unguarded(f"{cgroup_conf} doesn't set ConstrainDevices=yes")
    path = os.path.join(folder, _SLURM_CONF)
    said = _said(path)
    words = ",".join(_values(said, "TaskPlugin")[-1:]).split(",")
    # Slurm uses the last value; if slurm.conf has none, it may be in an included file.
    includes = _INCLUDE.search(said) is not None
    unknown = words == [""] and includes
    # protects: slurm-plugin
    if not unknown and _PLUGIN not in [word.removeprefix("task/") for word in words]:
        raise _unguarded(f"{path} has no task/cgroup in TaskPlugin")
    here = nodes.node_here(nodes.lines(said), os.uname().nodename)
    if not includes and NAME not in ",".join(_values(said, "GresTypes")[-1:]).split(","):
        here = SlurmNode(here.names, 0)
    return _by_lines(os.path.join(folder, _GRES_CONF), here)


def _by_lines(path: str, here: SlurmNode) -> GresDevices:
    """Return the devices that Slurm guards on this node, by the lines of gres.conf."""
    every = nodes.lines(_whole(path))
    own = [line for line in every if here.has(line)]  # protects: slurm-own-lines
    named = [line for line in own if "nodename" in line]
    if here.gpus is None and not named and _numbers(_files(every)) - _numbers(_files(own)):
        raise ConfigError(
            f"{path} has only devices of other nodes, and {_SLURM_CONF} in its folder doesn't say "
            f"which node {os.uname().nodename} is",
            "Write the node's line into slurm.conf itself, with NodeHostname if its name differs",
        )
    # Lines for a node override lines for all nodes.
    if (_detect(named) or _detect(own)) - {_OFF}:
        none = here.gpus == 0
        return GresDevices(frozenset() if none else None, has_any=not none)
    count = sum(len(_listed(line, _ONE)) + (_SEVERAL in line) for line in own if _is_guarded(line))
    # protects: slurm-all-lines
    if here.gpus is not None and count > here.gpus:
        raise _unguarded(
            f"{path} has {count} devices of this node and {_SLURM_CONF} {here.gpus}, and Slurm "
            "leaves the additional ones open to all jobs",
            f"Set Gres and GresTypes in {_SLURM_CONF} as `gpuhook slurm gres` prints them, and "
            "restart slurmctld and slurmd",
        )
    return GresDevices(frozenset(_numbers(_files(own))), has_any=count > 0)


def _detect(found: list[Line]) -> set[str]:
    return {line["autodetect"].lower() for line in found if "autodetect" in line}


def _is_guarded(line: Line) -> bool:
    """Tell whether Slurm guards a line's files: it doesn't for a site's own Gres names."""
    return line.get("name", "").lower() == NAME  # protects: slurm-plugins-lines


def _files(found: list[Line]) -> list[str]:
    own = [line for line in found if _is_guarded(line)]
    return [path for line in own for key in (_ONE, _SEVERAL) for path in _listed(line, key)]


def _listed(line: Line, key: str) -> list[str]:
    return nodes.expanded(line.get(key, ""), _MOST)


def _numbers(paths: list[str]) -> set[int]:
    return {number for path in paths if (number := _number(path)) is not None}


def _number(path: str) -> int | None:
    """Return the number of a device node, None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None


def _values(said: str, key: str) -> list[str]:
    """Return a key's values in lower case, in order: the last one counts."""
    found = re.findall(rf"\b{key}\s*=\s*\"?([\w/,]+)", said, re.IGNORECASE)
    return [value.lower() for value in found]


def _whole(path: str) -> str:
    """Return a file's text; ConfigError if it includes a file that may override it."""
    said = _said(path)
    if _INCLUDE.search(said):
        raise ConfigError(
            f"{path} includes another file, which may change what Slurm guards",
            "Write everything into that file, or use --cgroup-conf to name the cgroup.conf of a "
            "folder with complete files",
        )
    return said


def _said(path: str) -> str:
    """Return the text of a Slurm file without comments; ConfigError if it can't be read."""
    try:
        text = files.read(path).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}",
            "Name Slurm's cgroup.conf with --cgroup-conf; slurm.conf and gres.conf must be in its "
            "folder, readable by all users",
        ) from None
    return "\n".join(line.partition("#")[0] for line in text.replace("\\\n", "").split("\n"))


def _unguarded(what: str, remedy: str = "") -> ConfigError:
    return ConfigError(
        what
        if remedy
        else f"{what}, so every job may open every device, and no trusted source says "
        "which are this one's",
        remedy
        or "Set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup in slurm.conf, and "
        "restart slurmd",
    )
