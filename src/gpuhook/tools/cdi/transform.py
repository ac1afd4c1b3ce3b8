"""Transformation of a CDI spec for another driver root, in host or container paths.

A generator in a container sees the host's files below another folder than the engine that reads
the spec.
"""

import copy

from gpuhook.base.errors import CdiError, shown
from gpuhook.core.cdi import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Move = Callable[[str], str]

HOST, CONTAINER = "host", "container"

# Stages of hooks whose program is in the container, and those whose arguments are its paths.
_RUNS_INSIDE = ("startContainer",)
_SEES_INSIDE = ("createContainer", "startContainer")


def mover(old: str, new: str) -> "Move":
    """Return a function that moves paths from one folder to another, and keeps other paths.

    Only whole names match: /run/driver-2 isn't below /run/driver. CdiError for a relative folder.
    """
    for folder in (old, new):
        if not folder.startswith("/"):
            raise CdiError(
                f"{shown(folder)} isn't an absolute path", "Give --from and --to absolute paths"
            )
    old, new = old.rstrip("/"), new.rstrip("/")

    def move(path: str) -> str:
        if path == old or path.startswith(f"{old}/"):
            return new + path.removeprefix(old) or "/"
        return path

    return move


def root(document: "dict[str, Any]", old: str, new: str, relative_to: str) -> "dict[str, Any]":
    """Return the spec with another root in its host paths or its container paths.

    Its version is raised to the one that the new spec needs, if it is lower or missing.
    """
    move = mover(old, new)
    found = copy.deepcopy(document)
    for edits in _all_edits(found):
        if relative_to == HOST:
            _move_host(edits, move)
        else:
            _move_container(edits, move)
    version = versions.needed(found)
    if versions.is_below(found.get("cdiVersion") or "0.0.0", version):
        found["cdiVersion"] = version
    return found


def _all_edits(document: "dict[str, Any]") -> "Iterator[dict[str, Any]]":
    for part in (document, *(document.get("devices") or ())):
        if part.get("containerEdits"):
            yield part["containerEdits"]


def _move_host(edits: "dict[str, Any]", move: "Move") -> None:
    for node in edits.get("deviceNodes") or ():
        path = node.get("hostPath") or node["path"]
        # Without a hostPath, the path is also the path on the host.
        if "hostPath" in node or move(path) != path:
            node["hostPath"] = move(path)
    for mount in edits.get("mounts") or ():
        mount["hostPath"] = move(mount["hostPath"])
    for hook in edits.get("hooks") or ():
        if hook["hookName"] not in _RUNS_INSIDE:
            hook["path"] = move(hook["path"])
        if hook["hookName"] not in _SEES_INSIDE:
            _move_arguments(hook, move)


def _move_container(edits: "dict[str, Any]", move: "Move") -> None:
    for node in edits.get("deviceNodes") or ():
        path = node["path"]
        node["path"] = move(path)
        if "hostPath" not in node and node["path"] != path:
            node["hostPath"] = path
    for mount in edits.get("mounts") or ():
        mount["containerPath"] = move(mount["containerPath"])
    for hook in edits.get("hooks") or ():
        if hook["hookName"] in _RUNS_INSIDE:
            hook["path"] = move(hook["path"])
        if hook["hookName"] in _SEES_INSIDE:
            _move_arguments(hook, move)


def _move_arguments(hook: "dict[str, Any]", move: "Move") -> None:
    """Move each argument that is a path, and both parts of an argument such as target::link."""
    if hook.get("args"):
        hook["args"] = ["::".join(move(part) for part in arg.split("::")) for arg in hook["args"]]
