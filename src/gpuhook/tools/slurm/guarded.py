"""From which devices Slurm keeps jobs that weren't given them, by its configuration.

What Slurm doesn't guard the kernel lets every job open, so that its answer says nothing of whose a
device is. Sources: cgroup.conf(5), slurm.conf(5) and gres.conf(5), and Slurm's parse_config.c.
"""

import itertools
import os
import re
import stat

from gpuhook.ground.errors import ConfigError
from gpuhook.ground.host import files

_SLURM_CONF, _GRES_CONF = "slurm.conf", "gres.conf"
_PLUGIN = "cgroup"  # of those that make a task ready, the one that guards devices
_MOST = 1 << 12  # files that one line names
_INCLUDE = re.compile(r"^\s*Include\s", re.IGNORECASE | re.MULTILINE)
_FILES = re.compile(r"\b(?:File|MultipleFiles)\s*=\s*\"?([^\s\"]+)", re.IGNORECASE)
_NAMES = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # in a list; commas in brackets part no names
_RANGES = re.compile(r"\[([0-9,-]+)\]")


class Guarded:
    """The devices that gres.conf names, by their numbers; None where Slurm finds them itself."""

    def __init__(self, numbers: frozenset[int] | None) -> None:
        self._numbers = numbers

    def has(self, paths: list[str]) -> bool:
        """Tell whether Slurm guards a device with these nodes, one of them at least."""
        numbers = self._numbers
        return numbers is None or any(_number(path) in numbers for path in paths)


def guarded(cgroup_conf: str) -> Guarded:
    """Return which devices Slurm guards, by its files beside cgroup.conf.

    ConfigError where it guards none: by cgroup.conf it keeps jobs from devices, a plugin named in
    slurm.conf does that, and gres.conf names them.
    """
    folder = os.path.dirname(cgroup_conf)
    constrain = _values(_whole(cgroup_conf), "ConstrainDevices")
    if constrain[-1:] != ["yes"]:  # protects: slurm-constrains
        raise _unguarded(f"{cgroup_conf} doesn't set ConstrainDevices=yes")
    path = os.path.join(folder, _SLURM_CONF)
    said = _said(path)
    words = ",".join(_values(said, "TaskPlugin")[-1:]).split(",")
    # Slurm takes the last value, and where slurm.conf has none, it may be in a file it includes.
    unknown = words == [""] and _INCLUDE.search(said)
    # protects: slurm-plugin
    if not unknown and _PLUGIN not in [word.removeprefix("task/") for word in words]:
        raise _unguarded(f"{path} has no task/cgroup in TaskPlugin")
    said = _whole(os.path.join(folder, _GRES_CONF))
    if {*_values(said, "AutoDetect")} - {"off"}:
        return Guarded(None)
    paths = [name for value in _FILES.findall(said) for name in expanded(value)]
    return Guarded(frozenset(number for path in paths if (number := _number(path)) is not None))


def expanded(text: str) -> list[str]:
    """Return the names in a list of Slurm's: /dev/x[0,2-3],/dev/y7."""
    return [name for each in _NAMES.findall(text) for name in _expanded(each)]


def _expanded(name: str) -> list[str]:
    head, *rest = _RANGES.split(name)
    choices = [[head]]
    for ranges, after in zip(rest[::2], rest[1::2], strict=True):
        numbers = [number for part in ranges.split(",") for number in _range(part)]
        choices.append([f"{number}{after}" for number in numbers])
    return ["".join(parts) for parts in itertools.islice(itertools.product(*choices), _MOST)]


def _range(text: str) -> list[str]:
    """Return the numbers of a range, with as many digits as its first one."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        return []
    numbers = range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    return [str(number).zfill(len(first)) for number in numbers]


def _number(path: str) -> int | None:
    """Return the number of a device node, None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None


def _values(said: str, key: str) -> list[str]:
    """Return a key's values in small letters, in their order: of several the last counts."""
    found = re.findall(rf"\b{key}\s*=\s*\"?([\w/,]+)", said, re.IGNORECASE)
    return [value.lower() for value in found]


def _whole(path: str) -> str:
    """Return what a file says; ConfigError where another file may say otherwise."""
    said = _said(path)
    if _INCLUDE.search(said):
        raise ConfigError(
            f"{path} includes another file, which may say otherwise of what Slurm guards",
            "Write all of it into that file, or name a folder's cgroup.conf with --cgroup-conf "
            "where the files are whole",
        )
    return said


def _said(path: str) -> str:
    """Return the text of a file of Slurm's without comments; ConfigError if it can't be read."""
    try:
        text = files.read(path).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}",
            "Name Slurm's cgroup.conf with --cgroup-conf, and have slurm.conf and gres.conf beside "
            "it, for all users to read",
        ) from None
    return "\n".join(line.partition("#")[0] for line in text.replace("\\\n", "").split("\n"))


def _unguarded(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, so every job may open every device, and nothing that can be trusted says which "
        "are this one's",
        "Set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup in slurm.conf, and "
        "restart slurmd",
    )
