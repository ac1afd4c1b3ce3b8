"""A plan as lines of fstab and KEY=VALUE lines, for a program that mounts by itself.

What such a program can't do is what mode ``spec`` can't: see ``start.plan.spec_edits``. Sources:
fstab(5); the comments of util-linux on x-mount options, and enroot's, which has x-create=.
"""

import os
import stat
from collections.abc import Iterable

from gpuhook.ground.oci.process import Setting
from gpuhook.start.plan import spec_edits
from gpuhook.start.plan.operations import DEVICE_OPTIONS, BindFile, Operation, Plan, SetVariable

_ESCAPED = {" ": "\\040", "\t": "\\011", "\n": "\\012", "\\": "\\134"}


def lines(plan: Plan) -> list[str]:
    """Return a line for each mount of a plan: destinations are paths in the root folder."""
    found = []
    for op in spec_edits.steps(plan):
        if isinstance(op, spec_edits.MakeNode):
            found.append(_line(op.source, op.destination, "file", DEVICE_OPTIONS))
        elif isinstance(op, BindFile):
            kind = "dir" if _is_folder(op.source) else "file"
            found.append(_line(op.source, op.destination, kind, op.options))
    return found


def undone(plan: Plan) -> list[Operation]:
    """Return the steps of a plan that such lines have no words for."""
    return spec_edits.undone(plan)


def _line(source: str, destination: str, kind: str, options: Iterable[str]) -> str:
    words = ",".join((f"x-create={kind}", "bind", *options))
    return f"{_escaped(source)} {_escaped(destination)} none {words} 0 0"


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.stat(path).st_mode)


def _escaped(path: str) -> str:
    return "".join(_ESCAPED.get(char, char) for char in path)


def settings(operations: Iterable[Operation], env: dict[str, str]) -> list[str]:
    """Return a line for each variable that is set, beside the environment there is."""
    found: dict[str, str] = {}
    for op in operations:
        if isinstance(op, SetVariable):
            name, value = op.setting.name, _value(op.setting, found.get(op.setting.name), env)
            found[name] = value
    return [f"{name}={value}" for name, value in found.items() if env.get(name) != value]


def _value(setting: Setting, earlier: str | None, env: dict[str, str]) -> str:
    """Return a variable's new value; what goes in front may be there already."""
    old = env.get(setting.name, "") if earlier is None else earlier
    if not setting.front or not old:
        return setting.value
    if f":{setting.value}:" in f":{old}:":
        return old
    return f"{setting.value}:{old}"
