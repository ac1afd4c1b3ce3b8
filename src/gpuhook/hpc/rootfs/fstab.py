"""A plan as fstab lines and KEY=VALUE lines, for programs that mount files themselves.

Such a program creates no links and writes no files. Sources: fstab(5); the documentation of
x-mount options in util-linux, and of x-create= in enroot.
"""

import os
import stat
from collections.abc import Iterable

from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.plan.operations import (
    DEVICE_OPTIONS,
    AllowDevice,
    BindDevice,
    BindFile,
    Operation,
    Plan,
    SetVariable,
)
from gpuhook.core.plan.writer import MountWriter, PlanWriter

_ESCAPED = {" ": "\\040", "\t": "\\011", "\n": "\\012", "\\": "\\134"}


class FstabWriter(MountWriter):
    """Writer of a plan as fstab ``lines``; destinations are paths in the root folder.

    The caller handles the process started there, with its device rules, variables and groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def other(self, op: Operation) -> None:
        """Omit operations that don't concern the process."""
        if not op.by_runtime:
            self.unwritten.append(op)

    def rule(self, op: AllowDevice) -> None:
        """Leave device rules to the caller."""

    def node(self, op: BindDevice) -> None:
        """Mount the node."""
        self.lines.append(_line(op.source, op.destination, "file", DEVICE_OPTIONS))

    def mount(self, op: BindFile) -> None:
        """Mount a file or a folder."""
        kind = "dir" if is_folder(op.source) else "file"
        self.lines.append(_line(op.source, op.destination, kind, op.options))


def lines(plan: Plan) -> list[str]:
    """Return a line for each mount of a plan."""
    return FstabWriter().write(plan.operations).lines


def _line(source: str, destination: str, kind: str, options: Iterable[str]) -> str:
    words = ",".join((f"x-create={kind}", "bind", *options))
    return f"{escaped(source)} {escaped(destination)} none {words} 0 0"


def is_folder(path: str) -> bool:
    """Tell whether a source is a folder."""
    return stat.S_ISDIR(os.stat(path).st_mode)


def escaped(path: str) -> str:
    """Return a path as a field of fstab."""
    return "".join(_ESCAPED.get(char, char) for char in path)


def settings(operations: Iterable[Operation], env: dict[str, str]) -> list[str]:
    """Return a line for each variable that the plan sets in the given environment."""
    found = _Variables(env).write(operations).values
    return [f"{name}={value}" for name, value in found.items() if env.get(name) != value]


class _Variables(PlanWriter):
    """Writer of the ``values`` of the variables that a plan sets in an environment."""

    def __init__(self, env: dict[str, str]) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._env = env

    def variable(self, op: SetVariable) -> None:
        """Set a variable."""
        name = op.setting.name
        self.values[name] = _value(op.setting, self.values.get(name), self._env)


def _value(setting: EnvironmentSetting, earlier: str | None, env: dict[str, str]) -> str:
    """Return a variable's new value; a prefix may already be present."""
    old = env.get(setting.name, "") if earlier is None else earlier
    if not setting.front or not old:
        return setting.value
    if f":{setting.value}:" in f":{old}:":
        return old
    return f"{setting.value}:{old}"
