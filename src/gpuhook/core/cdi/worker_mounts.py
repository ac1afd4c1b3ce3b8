"""Application of CDI specs when a worker is available for our hook.

The worker also makes the mounts of the CDI spec, in half the time of a low-level runtime. The
mounts are passed as an argument of the hook, so the hook can make them without the worker too.
"""

import os
import stat

from gpuhook.base import names
from gpuhook.base.config.model import DEFAULT_PATH
from gpuhook.base.oci import jsontext
from gpuhook.core.cdi import apply
from gpuhook.core.cdi.hook_args import HOOKS, MOUNTS_OPTION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.base.oci.spec import Spec
    from gpuhook.core.cdi.apply import Edits
    from gpuhook.core.cdi.hook_args import Entry
    from gpuhook.core.contract import VendorRegistry

_MOST_BYTES = 96 << 10  # of mounts in one argument; the limit is 128 KiB (execve(2))
_PLACES = ("mounts",)
_IN_USR = ("bin", "lib", "lib32", "lib64", "sbin")
# The mount options of driver files in our CDI specs.
_OPTIONS = {"ro", "nosuid", "nodev", "rbind", "rprivate"}


def apply_to_spec(
    spec: "Spec",
    edits: "Edits",
    devices: tuple[str, ...],
    vendors: "VendorRegistry",
    config: "Config",
    folder: str,
) -> "tuple[Spec, int, str]":
    """Return the spec with the edits of CDI specs, and the hook of them that a worker can serve.

    That is the hook's index and its kind, "" for none. Only the hook of this installation in
    ``folder``, called with this configuration, gets a worker. A worker serves one hook: the first.
    If the ``devices``, by name, are of one kind, that hook makes those mounts that can be made
    after all others.
    """
    wanted = _find(edits.get("hooks") or [], vendors, config, folder)
    if wanted is None:
        return apply.apply_to_spec(spec, edits), 0, ""
    values = apply.changes_of_spec(spec, edits)
    hooks = values.get(HOOKS) or spec.hooks(names.CDI_HOOK_STAGE)
    same = [(each.get("path"), each.get("args")) for each in hooks]
    place = same.index((wanted["path"], wanted["args"]))
    kind: str = wanted["args"][-1]
    if all(name.startswith(f"{kind}=") for name in devices):
        mounts = values.get(_PLACES) or []
        moved = movable(mounts, edits.get("mounts") or [])
        word = jsontext.dumps([(each["source"], each["destination"]) for each in moved])
        if moved and len(word) <= _MOST_BYTES:
            made = {id(each) for each in moved}
            values[_PLACES] = [each for each in mounts if id(each) not in made]
            values[HOOKS] = _with_first(hooks, place, [MOUNTS_OPTION, word])
    return spec.put(values), place, kind


def with_words(spec: "Spec", place: int, words: "Sequence[str]") -> "Spec":
    """Return a spec in which the createContainer hook of that place has other first arguments."""
    return spec.put({HOOKS: _with_first(spec.hooks(names.CDI_HOOK_STAGE), place, words)})


def _find(
    hooks: "list[Entry]", vendors: "VendorRegistry", config: "Config", folder: str
) -> "Entry | None":
    """Return our hook among those of CDI specs; None if none is of this installation."""
    path = os.path.join(os.path.abspath(folder), names.CDI_HOOK)
    options: list[list[str]] = [["--config", config.path]] if config.path else []
    if config.path in (None, DEFAULT_PATH):
        options.append([])
    kinds = [each.KIND for each in vendors.values()]
    expected = [[names.CDI_HOOK, *words, kind] for words in options for kind in kinds]
    for hook in hooks:
        ours = hook["hookName"] == names.CDI_HOOK_STAGE and hook["path"] == path
        if ours and hook.get("args") in expected:
            return hook
    return None


def _with_first(hooks: "list[Entry]", place: int, words: "Sequence[str]") -> "list[Entry]":
    """Return the hooks, with other arguments in one of them."""
    args = hooks[place]["args"]
    changed = {**hooks[place], "args": [args[0], *words, *args[1:]]}
    return [*hooks[:place], changed, *hooks[place + 1 :]]


def movable(mounts: "list[Entry]", edits: "list[Entry]") -> "list[Entry]":
    """Return the mounts of config.json that our hook can make after all others.

    They come from the CDI specs (``edits``), and mount files as our own CDI specs do. Nothing else
    is mounted at, above or below their destinations.
    """
    places = {(each["hostPath"], each["containerPath"]) for each in edits}
    moved = [
        each
        for each in mounts
        if (each.get("source"), each.get("destination")) in places and _is_plain(each)
    ]
    theirs = {id(each) for each in moved}
    # protects: volume-over-mount
    others = [_usual(each.get("destination")) for each in mounts if id(each) not in theirs]
    return [each for each in moved if not _meets(_usual(each["destination"]), others)]


def _is_plain(mount: "Entry") -> bool:
    """Tell whether a CDI spec's mount is of a file, as in our own CDI specs."""
    options = mount.get("options")
    if not isinstance(options, list) or set(options) != _OPTIONS or "type" in mount:
        return False
    try:
        return stat.S_ISREG(os.stat(mount["source"]).st_mode)
    except OSError:
        return False


def _usual(path: "Any") -> str:
    """Return a path's usual name: /lib is a link to /usr/lib; "" if it isn't a path."""
    name = "/" + os.path.normpath(path).lstrip("/") if isinstance(path, str) else ""
    first = name.split("/", 2)[1:2]
    return f"/usr{name}" if first and first[0] in _IN_USR else name.rstrip("/")


def _meets(place: str, others: list[str]) -> bool:
    return any(
        f"{place}/".startswith(f"{each}/") or each.startswith(f"{place}/") for each in others
    )
